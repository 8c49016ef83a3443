"""Single engines on a GPU: exact on integers and within the contract, in all their ways; graphs, determinism."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modelnew
from tests.cases import (
    ADVERSE,
    DTYPES,
    FILLS,
    KERNELS,
    LAYOUTS,
    OPERANDS,
    VIEWS,
    Case,
    adverse_tensors,
    check_bounds,
    check_exact,
    equal,
    gpu,
    hopper,
    in_layout,
    in_wider,
    integers,
    make_tensors,
    margins_intact,
    named,
    normal,
    poisoned_memory,
    positive,
    product,
    reference,
    relative_bound,
    round_to_tf32,
    shifted,
    tf32_switch,
    tf32_ties,
    under_a_tf32_step,
    wide,
)
from tests.problems import (
    GATHER_APART_CASES,
    GATHER_CASES,
    GATHER_CONTAINED_CASES,
    GATHER_LANDING_CASES,
    GATHER_LANDING_CHANNELS,
    MMA_CASES,
    POINTWISE_CASES,
    STEM_16_BIT_FILLS,
    STEM_CASES,
    STEM_CONTRACTS,
    WGMMA_CANDIDATES,
    WGMMA_CASE,
    WGMMA_CASES,
    WGMMA_OPERATORS,
    WGMMA_PRECISIONS,
    check_misfits,
    dy_before_nan,
    gather_operators,
    misfit_tensors,
)

FP32, TF32, FP16, BF16 = (torch.float32, False), (torch.float32, True), (torch.float16, True), (torch.bfloat16, True)
ALL_TYPES = [TF32, FP16, BF16]
ANY_GPU = ("mma", "patches", "pointwise")  # the other engines, or what they give parts to, are Hopper's


def named_or_text(value: object) -> str | None:
    """Of functions their names, of problems and their lists nothing."""
    return getattr(value, "__name__", None) or (str(value) if not isinstance(value, (list, dict)) else "")


# Patch embeddings in small: filters of multiples of 16 bytes and not, pixels in no patch.
GPU_PATCHES_CASES = [
    Case(5, 3, 64, 70, 200, 16, 16, stride=(16, 16)),
    Case(3, 3, 56, 58, 136, 14, 14, stride=(14, 14)),
    Case(2, 4, 64, 64, 72, 32, 32, stride=(32, 32)),
    Case(3, 1, 33, 40, 64, 3, 5, stride=(3, 5)),
]
# Windows with boxes of dy and without, strips of rows, copies of x and of dy, images without gaps, filters that leave
# pixels out, groups, words and channels one by one; ragged edges of every tile, and several splits.
GPU_WGRAD_CASES = [
    Case(3, 64, 28, 28, 64, 3, 3, padding=(1, 1)),
    Case(2, 20, 40, 96, 136, 3, 3, padding=(1, 1)),
    Case(2, 16, 30, 70, 72, 3, 3, padding=(1, 0)),
    Case(5, 96, 14, 14, 300, 1, 1),
    Case(9, 80, 7, 7, 136, 1, 1),
    Case(6, 40, 7, 7, 64, 3, 3, padding=(1, 1)),
    Case(4, 32, 28, 30, 64, 1, 1, stride=(2, 2)),
    Case(2, 24, 33, 29, 40, 5, 4, stride=(2, 3), padding=(2, 1), dilation=(1, 2)),
    Case(3, 64, 20, 20, 96, 3, 3, padding=(1, 1), groups=2),
    Case(2, 3, 64, 60, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(2, 30, 19, 21, 20, 3, 3, padding=(2, 2), dilation=(3, 2)),
    Case(1, 130, 9, 9, 270, 3, 3),
    Case(1, 16, 5, 3, 17, 1, 1),
]
# Large enough for TF32.
GPU_WGRAD_TF32_CASES = [
    Case(16, 128, 28, 28, 256, 3, 3, padding=(1, 1)),
    Case(2, 64, 126, 250, 128, 3, 3),
    Case(64, 256, 14, 14, 320, 1, 1),
    Case(256, 512, 7, 7, 136, 1, 1),
    Case(64, 128, 7, 7, 264, 3, 3, padding=(1, 1)),
    Case(32, 128, 56, 56, 192, 1, 1, stride=(2, 2)),
    Case(8, 64, 57, 61, 72, 5, 3, stride=(2, 1), padding=(2, 1)),
]
# Phases with every number of taps, and without any; a filter that leaves rows out, dilation, groups.
GPU_STRIDED_CASES = [
    Case(3, 64, 28, 30, 72, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(4, 48, 15, 14, 136, 1, 1, stride=(2, 2)),
    Case(2, 40, 33, 29, 24, 5, 4, stride=(3, 2), padding=(2, 1)),
    Case(2, 16, 21, 40, 64, 2, 2, stride=(2, 2)),
    Case(2, 24, 30, 31, 40, 3, 3, stride=(2, 1), padding=(2, 2), dilation=(2, 2)),
    Case(2, 64, 20, 20, 96, 3, 3, stride=(2, 2), padding=(1, 1), groups=2),
]
GPU_STRIDED_TF32_CASES = [
    Case(32, 128, 28, 28, 128, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(64, 256, 28, 28, 128, 1, 1, stride=(2, 2)),
]
# Phases of all images and of one, by several engines; one tap that is left; rows of fewer than all phases.
GPU_DILATED_CASES = [
    Case(3, 64, 28, 28, 64, 3, 3, padding=(24, 24), dilation=(24, 24)),
    Case(1, 72, 65, 65, 40, 3, 3, padding=(36, 36), dilation=(36, 36)),
    Case(2, 64, 14, 14, 256, 3, 3, padding=(24, 24), dilation=(24, 24)),
    Case(40, 96, 30, 26, 64, 3, 3, padding=(9, 2), dilation=(12, 9)),
]
# Blocks of channels in full and ragged, several tiles of output channels and few, points, halos, strides with phases
# and without, dilation, images of one pixel and of rows longer than a tile, few tiles with long reductions.
TMA_CASES = [
    Case(3, 72, 13, 17, 136, 3, 3, padding=(1, 1)),
    Case(2, 64, 56, 56, 64, 3, 3, padding=(1, 1)),
    Case(4, 128, 28, 28, 128, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(33, 256, 14, 14, 264, 1, 1),
    Case(40, 64, 16, 24, 256, 1, 1),
    Case(2, 512, 7, 7, 2048, 1, 1),
    Case(1, 2048, 7, 7, 512, 1, 1),
    Case(2, 512, 7, 7, 512, 3, 3, padding=(1, 1)),
    Case(2, 8, 40, 41, 16, 5, 3, stride=(2, 2), padding=(2, 0)),
    Case(2, 40, 33, 30, 200, 3, 3, padding=(12, 6), dilation=(12, 6)),
    Case(3, 64, 15, 15, 64, 7, 7, stride=(3, 2), padding=(3, 3)),
    Case(2, 24, 9, 9, 144, 1, 1, stride=(2, 2)),
    Case(1, 16, 3, 1000, 8, 2, 2),
    Case(70, 16, 1, 1, 8, 3, 3, padding=(1, 1)),
    Case(2, 320, 64, 64, 320, 3, 3, padding=(1, 1)),
    Case(2, 64, 100, 300, 24, 3, 3, padding=(1, 1)),
    # Strides that are never taken, and pixels that they would have led to.
    Case(3, 16, 4, 4, 72, 3, 3, stride=(2, 2)),
    Case(3, 72, 9, 4, 16, 3, 3, stride=(2, 2), padding=(1, 0)),
    Case(3, 16, 3, 9, 8, 1, 1, stride=(8, 2)),
    Case(2, 8, 300, 1, 8, 4, 1),
    # Outputs that no box takes.
    Case(3, 72, 13, 17, 131, 3, 3, padding=(1, 1)),
    Case(4, 64, 40, 50, 2, 1, 1),
    Case(1, 512, 9, 9, 255, 1, 1),
    # Groups: merged, the last of them in part; more outputs than inputs, points, as they are.
    Case(3, 256, 28, 30, 256, 3, 3, padding=(1, 1), groups=32),
    Case(2, 512, 14, 14, 512, 3, 3, stride=(2, 2), padding=(1, 1), groups=32),
    Case(2, 144, 17, 13, 288, 5, 3, padding=(2, 1), groups=9),
    Case(3, 128, 12, 14, 128, 1, 1, groups=8),
    Case(2, 40, 9, 11, 40, 3, 3, padding=(2, 2), dilation=(2, 2), groups=20),
    Case(3, 256, 13, 14, 384, 3, 3, padding=(1, 1), groups=2),
    Case(2, 320, 16, 16, 320, 1, 1, groups=5),
]
TMA_EIGHTS = [case for case in TMA_CASES if case.K % 8 == 0 and case.groups == 1]
TMA_PLANES_CASES = [
    *TMA_CASES,
    Case(3, 7, 20, 30, 19, 5, 3),
    Case(2, 13, 9, 11, 1, 3, 3, padding=(1, 1)),
    Case(2, 13, 8, 8, 11, 1, 1),
    Case(5, 72, 4, 4, 16, 4, 4),
]
HALVES = (torch.float16, torch.bfloat16)

Views = Mapping[str, Callable[[Tensor], Tensor]]  # of x, w and dy
LAST = VIEWS["channels_last"]
IN_LAYOUT: dict[str, Views] = {"contiguous": {}, "channels_last": {"x": LAST, "dy": LAST}}
WITH_WEIGHTS: dict[str, Views] = {"contiguous": {}, "channels_last": {"x": LAST, "w": LAST, "dy": LAST}}
ALL_LAYOUTS = IN_LAYOUT | {"w in channels_last": {"w": LAST}, "all in channels_last": WITH_WEIGHTS["channels_last"]}
SHIFTS = {f"begins at {elements}": functools.partial(shifted, elements=elements) for elements in (1, 2, 3, 4)}
ONE_FOR_ALL = {
    "one image": lambda tensor: tensor[:1].expand_as(tensor),
    "one channel": lambda tensor: tensor[:, :1].expand_as(tensor),
}
SOME_VIEWS = {name: VIEWS[name] for name in ("channels_last", "sliced", "every other")} | {
    "contiguous": lambda tensor: tensor,
    "off by one": SHIFTS["begins at 1"],
    "one image": ONE_FOR_ALL["one image"],
}


def of_names(views: Mapping[str, Callable], *subsets: Sequence[str]) -> dict[str, Views]:
    """Each view of all tensors of each subset."""
    return {f"{view} of {','.join(names)}": dict.fromkeys(names, views[view]) for view in views for names in subsets}


def in_wider_rows(w: Tensor) -> Tensor:
    """Rows of weights in larger ones, of which the rest is NaN."""
    return F.pad(w, (0, 0, 0, 0, 0, 3), value=math.nan)[:, : w.shape[1]]


XW_VIEWS = of_names(SOME_VIEWS | {"transposed": VIEWS["transposed"]}, "xw") | {
    "x in channels_last": {"x": LAST},  # y is, too, but not w
    "w in channels_last": {"w": LAST},  # y is, too, but not x
}
WIDER = {"x": lambda tensor: in_wider(tensor, 12, 4), "w": lambda tensor: in_wider(tensor, 4, 0)}


def operators_of(engine: str, case: Case) -> set[str]:
    """What an engine takes of the cases that it has here."""
    if engine in ("gather", "mma"):
        return gather_operators(case)
    both, gradients = {"fprop", "dgrad"}, {"wgrad": {"wgrad"}, "tma_wgrad": {"wgrad"}, "strided": {"dgrad"}}
    return gradients.get(engine, both if engine in ("wgmma", "dilated") else {"fprop"})


def forced(
    engine: str, case: Case, tensors: dict[str, Tensor], tf32: bool, wanted: set[str] | None = None
) -> dict[str, Tensor]:
    """Results of an engine for sure: all operators that it is for, or those that are wanted."""
    wanted = operators_of(engine, case) if wanted is None else wanted
    gradients = [(operator, name) for operator, name in (("dgrad", "x"), ("wgrad", "w")) if operator in wanted]
    names = [name for _, name in gradients]
    x, w = (tensors[name].detach().requires_grad_(name in names) for name in ("x", "w"))
    results = {}
    with tf32_switch(tf32), poisoned_memory():
        with modelnew.force_engine(engine) if "fprop" in wanted else contextlib.nullcontext():
            y = modelnew.conv2d(x, w, tensors.get("bias"), **case.kwargs)
        if "fprop" in wanted:
            results["fprop"] = y.detach()
        if gradients:
            with modelnew.force_engine(engine):
                found = torch.autograd.grad(y, [x if name == "x" else w for name in names], tensors["dy"])
            results |= {operator: gradient for (operator, _), gradient in zip(gradients, found, strict=True)}
    return results


def changed(tensors: dict[str, Tensor], views: Views) -> dict[str, Tensor]:
    return tensors | {name: view(tensors[name]) for name, view in views.items()}


def of_engines(table: Iterable[tuple]) -> list:
    """Parameters that start with an engine, which may be Hopper's."""
    return [pytest.param(*one, marks=() if one[0] in ANY_GPU else hopper) for one in table]


# Engines, problems, views of operands, types and whether TF32 is allowed.
WGMMA_TYPES = [*ALL_TYPES, FP32]
EXACT = [
    ("gather", GATHER_CASES, ALL_LAYOUTS, ALL_TYPES),
    ("gather", GATHER_APART_CASES, IN_LAYOUT, [TF32]),
    ("mma", MMA_CASES, of_names(SOME_VIEWS, ("x", "w", "dy")), [FP32, TF32]),
    ("patches", GPU_PATCHES_CASES, WITH_WEIGHTS, ALL_TYPES),
    ("wgrad", GPU_WGRAD_CASES, IN_LAYOUT, ALL_TYPES),
    ("wgrad", GPU_WGRAD_TF32_CASES, IN_LAYOUT, [FP32, TF32]),
    (
        "wgrad",
        [Case(3, 20, 12, 16, 24, 3, 3, padding=(1, 1)), *(Case(2, 16, 8, 8, 40, 1, 1, (s, s)) for s in (1, 2))],
        of_names(VIEWS | SHIFTS, ("x", "dy"), ("x",), ("dy",)),
        ALL_TYPES,
    ),
    ("strided", GPU_STRIDED_CASES, IN_LAYOUT, ALL_TYPES),
    ("strided", GPU_STRIDED_TF32_CASES, IN_LAYOUT, [TF32]),
    ("dilated", GPU_DILATED_CASES, IN_LAYOUT, WGMMA_TYPES),
    ("tma", TMA_CASES, of_names({"channels_last": LAST}, "x", "xw"), [FP16, BF16]),
    ("tma", TMA_PLANES_CASES, {"contiguous": {}} | of_names(SHIFTS, "x"), [FP16, BF16]),
    (
        "tma",
        [Case(3, 13, 8, 16, 11, 1, 1)],
        of_names(ONE_FOR_ALL, "x")
        | {"wider rows": {"w": in_wider_rows}, "wider rows of pixels": {"w": lambda w: in_wider_rows(LAST(w))}},
        [FP16, BF16],
    ),
    ("tma_wgrad", TMA_EIGHTS, {"channels_last": WITH_WEIGHTS["channels_last"], "contiguous": {}}, [FP16, BF16]),
    # Planes are copied: those that begin anywhere, one image or channel for all, x or dy alone.
    (
        "tma_wgrad",
        [case for case in TMA_PLANES_CASES if case.groups == 1],
        of_names(SHIFTS, "x", ("dy",)) | of_names(ONE_FOR_ALL, "x"),
        [FP16, BF16],
    ),
    ("tma_wgrad", TMA_EIGHTS, of_names({"channels_last": LAST}, "x", ("dy",)), [FP16, BF16]),
    ("stem", STEM_CASES, XW_VIEWS, STEM_CONTRACTS),
    ("pointwise", POINTWISE_CASES, XW_VIEWS | of_names(SHIFTS, "x") | {"in wider ones": WIDER}, [FP32, TF32]),
    ("wgmma", [*WGMMA_CASES, *WGMMA_CANDIDATES], {"contiguous": {}}, WGMMA_TYPES),
    # The alignments that change how pixels are loaded: even rows of x at an odd address, besides strides of any kind.
    (
        "wgmma",
        [Case(2, 40, 66, 132, 72, 3, 3, padding=(1, 1)), Case(2, 40, 67, 258, 65, 3, 2, padding=(1, 2))],
        of_names(VIEWS | {"off by one": SHIFTS["begins at 1"]}, "x", "w", ("dy",), ("x", "w", "dy")),
        WGMMA_TYPES,
    ),
]  # fmt: skip
EXACT_RUNS = [
    (engine, cases, view, changes, dtype, tf32)
    for engine, cases, views, contracts in EXACT
    for (view, changes), (dtype, tf32) in itertools.product(views.items(), contracts)
]


@gpu
@pytest.mark.parametrize("engine, cases, view, changes, dtype, tf32", of_engines(EXACT_RUNS), ids=named_or_text)
def test_gpu_exact(engine, cases, view, changes, dtype, tf32):
    """In full with more bits than TF32 has; with a bias and without; twice the same bits."""
    for case in cases:
        operators = operators_of(engine, case)
        if engine == "wgmma" and (dtype, tf32) == FP32 and min(case.C, case.K) // case.groups * case.R * case.S < 64:
            continue  # sums too short for it
        plain = make_tensors(case, dtype, integers, "cuda")
        full = dtype == torch.float32 and not operators & case.tf32_operators(torch.float32, tf32)
        if full and engine in ("mma", "pointwise", "stem"):
            plain["w"] *= 65 if engine == "mma" else 1025
        tensors = changed(plain, changes)
        results = forced(engine, case, tensors, tf32)
        check_exact(case, results, tensors)
        again = forced(engine, case, tensors, tf32)
        assert all(torch.equal(again[name], result) for name, result in results.items()), case
        if "fprop" in operators:
            del tensors["bias"]
            check_exact(case, forced(engine, case, tensors, tf32, {"fprop"}), tensors)
        assert all(margins_intact(tensor) for tensor in plain.values())


FILLS_16 = {dtype: [fill for of, fill in STEM_16_BIT_FILLS if of == dtype] for dtype in HALVES}
ROUNDING = [
    ("gather", GATHER_APART_CASES, IN_LAYOUT, [TF32]),
    ("patches", GPU_PATCHES_CASES, WITH_WEIGHTS, ALL_TYPES),
    ("pointwise", POINTWISE_CASES, IN_LAYOUT, [FP32, TF32]),
    ("stem", STEM_CASES, IN_LAYOUT, STEM_CONTRACTS),
    ("strided", [*GPU_STRIDED_CASES, *GPU_STRIDED_TF32_CASES], IN_LAYOUT, ALL_TYPES),
    ("tma", TMA_CASES, IN_LAYOUT, [FP16, BF16]),
    ("tma_wgrad", TMA_EIGHTS, {"channels_last": WITH_WEIGHTS["channels_last"]}, [FP16, BF16]),
    ("wgrad", [*GPU_WGRAD_CASES, *GPU_WGRAD_TF32_CASES], IN_LAYOUT, [*ALL_TYPES, FP32]),
]
ROUNDING_RUNS = [
    (engine, cases, view, changes, dtype, tf32, fill)
    for engine, cases, views, contracts in ROUNDING
    for (view, changes), (dtype, tf32) in itertools.product(views.items(), contracts)
    for fill in (FILLS if dtype == torch.float32 else FILLS_16[dtype])
]


@gpu
@pytest.mark.parametrize("engine, cases, view, views, dtype, tf32, fill", of_engines(ROUNDING_RUNS), ids=named_or_text)
def test_gpu_rounding(engine, cases, view, views, dtype, tf32, fill):
    """Each contract, element by element; and the same bits every time."""
    for case in cases:
        tensors = changed(make_tensors(case, dtype, fill, "cuda"), views)
        results = forced(engine, case, tensors, tf32)
        check_bounds(case, results, tensors, case.tf32_operators(dtype, tf32))
        for _ in range(3):
            again = forced(engine, case, tensors, tf32)
            assert all(torch.equal(again[name], result) for name, result in results.items()), case


SPREADING = [
    ("mma", MMA_CASES, [FP32, TF32]),
    ("pointwise", [case for case in POINTWISE_CASES if case.K > 1], [FP32, TF32]),
    ("stem", [case for case in STEM_CASES if case.C > 2], STEM_CONTRACTS),
    ("tma", [*(TMA_CASES[number] for number in (0, 3, 7)), *(c for c in TMA_CASES if c.groups == 32)], [FP16, BF16]),
]
SPREADING_RUNS = [(engine, cases, *contract) for engine, cases, contracts in SPREADING for contract in contracts]


@gpu
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("engine, cases, dtype, tf32", of_engines(SPREADING_RUNS), ids=named_or_text)
def test_gpu_spreads_nan_and_inf(engine, cases, dtype, tf32, layout, special):
    """To those outputs that read it, from x and from w; also where it meets padding, whose zeros are factors."""
    for case in cases:
        tensors = make_tensors(case, dtype, positive, "cuda")
        tensors["x"][0, 1, min(5, case.H - 1), min(3, case.W - 1)] = tensors["w"][1, 2, 0, 0] = special
        # In float64, where the CPU has no kernels that leave padding out.
        expected = F.conv2d(*(tensors[name].cpu().double() for name in ("x", "w", "bias")), **case.kwargs).to(dtype)
        y = forced(engine, case, in_layout(tensors, layout), tf32, {"fprop"})["fprop"].cpu()
        assert torch.equal(y.isnan(), expected.isnan()), case
        assert torch.equal(y.isinf(), expected.isinf()), case
        torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2, equal_nan=True)


# In the last two of wgmma boxes load x, or other tiles of it.
ADVERSE_RUNS = [
    ("gather", GATHER_CASES, True),
    *(
        ("wgmma", [WGMMA_CASE, Case(2, 16, 130, 518, 128, 3, 3), Case(2, 64, 40, 264, 128, 3, 3, padding=(1, 0))], tf32)
        for tf32 in (True, False)
    ),
]


@gpu
@hopper
@pytest.mark.parametrize("kind", ADVERSE)
@pytest.mark.parametrize("engine, cases, tf32", ADVERSE_RUNS, ids=named_or_text)
def test_gpu_keeps_the_contract_where_fp16_does_not_fit(engine, cases, tf32, kind):
    for case, layout in itertools.product(cases, LAYOUTS if engine == "gather" else LAYOUTS[:1]):
        for operator in operators_of(engine, case):
            tensors = in_layout(adverse_tensors(case, kind, operator, "cuda"), layout)
            results = forced(engine, case, tensors, tf32, {operator})
            check_bounds(case, results, tensors, tf32={operator} if tf32 else ())


@gpu
@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [1e-9, math.nan, math.inf], ids=str)
def test_gpu_gather_mends(value, layout):
    for case in [*GATHER_CONTAINED_CASES, *GATHER_LANDING_CASES[1:], GATHER_LANDING_CHANNELS]:
        for operator in gather_operators(case):
            tensors = in_layout(misfit_tensors(operator, case, value, "cuda"), layout)
            check_misfits(operator, case, forced("gather", case, tensors, True, {operator})[operator], tensors)


DETERMINISTIC = [
    *(("gather", case, "few small", TF32, 30) for case in GATHER_CASES),
    *(
        ("wgmma", case, None, contract, 100)
        for case in (Case(8, 40, 66, 257, 130, 3, 3), Case(8, 72, 65, 64, 64, 3, 3, padding=(1, 1)))
        for contract in WGMMA_TYPES
    ),
]


@gpu
@hopper
@pytest.mark.parametrize("engine, case, kind, contract, times", DETERMINISTIC, ids=named_or_text)
def test_gpu_is_deterministic(engine, case, kind, contract, times):
    dtype, tf32 = contract
    make = functools.partial(make_tensors, case, dtype, normal, "cuda")
    tensors = make() if kind is None else adverse_tensors(case, kind, "fprop", "cuda")
    first = forced(engine, case, tensors, tf32)
    for _ in range(times):
        again = forced(engine, case, tensors, tf32)
        assert all(torch.equal(first[name], again[name]) for name in first)


# Problems that an engine refuses when it is forced: shapes of x and w, arguments, and which operator does.
HALF = torch.float16
FORCED_REFUSALS = [
    ("stem", (2, 6, 19, 20), (24, 3, 3, 3), {"groups": 2}, torch.float32, "forward", "one group only"),
    ("stem", (2, 12, 19, 20), (24, 12, 3, 3), {}, torch.float32, "forward", "7 input channels"),
    ("stem", (2, 6, 19, 20), (24, 6, 3, 3), {}, torch.float64, "forward", "no float64"),
    ("stem", (2, 6, 19, 20), (24, 6, 3, 3), {}, torch.float32, "wgrad", "outputs only"),
    ("pointwise", (2, 16, 9, 10), (24, 16, 1, 1), {"padding": 1}, torch.float32, "forward", "no padding"),
    ("pointwise", (2, 16, 9, 10), (24, 8, 1, 1), {"groups": 2}, torch.float32, "forward", "one group only"),
    ("pointwise", (2, 16, 9, 10), (24, 16, 1, 3), {}, torch.float32, "forward", "1x1 filters only"),
    ("pointwise", (2, 16, 9, 10), (24, 16, 1, 1), {}, torch.float64, "forward", "float32 only"),
    ("pointwise", (2, 16, 9, 10), (24, 16, 1, 1), {}, torch.float32, "wgrad", "outputs only"),
    ("wgmma", (1, 16, 80, 80), (16, 16, 3, 3), {"stride": 2}, HALF, "forward", "stride 1 only"),
    ("wgmma", (1, 16, 80, 80), (16, 16, 3, 3), {}, HALF, "wgrad", "input gradients only"),
]


@gpu
@pytest.mark.parametrize("engine, x, w, settings, dtype, operator, text", of_engines(FORCED_REFUSALS), ids=str)
def test_gpu_forced_engines_say_what_they_refuse(engine, x, w, settings, dtype, operator, text):
    x, w = (torch.ones(shape, dtype=dtype, device="cuda", requires_grad=True) for shape in (x, w))
    with modelnew.force_engine(engine):
        y = modelnew.conv2d(x, w, **settings) if operator == "wgrad" else None
        with pytest.raises(RuntimeError, match=rf"'{engine}' is forced but cannot take the {operator} .*{text}"):
            modelnew.conv2d(x, w, **settings) if y is None else torch.autograd.grad(y.sum(), w)


EMPTY = [("stem", Case(0, 3, 9, 10, 24, 3, 3)), ("pointwise", Case(0, 16, 9, 10, 24, 1, 1))]


@gpu
@pytest.mark.parametrize("engine, case", of_engines(EMPTY), ids=str)
def test_gpu_forced_without_images(engine, case):
    tensors = make_tensors(case, torch.float32, normal, "cuda")
    with modelnew.force_engine(engine):
        assert modelnew.conv2d(tensors["x"], tensors["w"], **case.kwargs).shape == case.y_shape


@gpu
@hopper
@pytest.mark.parametrize("last", ["x", "w"])
@pytest.mark.parametrize(
    "engine, case",
    [
        ("gather", Case(64, 64, 112, 112, 64, 1, 1)),
        ("gather", Case(64, 128, 56, 56, 128, 3, 3, stride=(2, 2), padding=(1, 1))),
        ("gather", Case(64, 64, 112, 112, 64, 3, 3, padding=(1, 1))),
        ("stem", Case(64, 3, 224, 224, 64, 7, 7, stride=(2, 2), padding=(3, 3))),
        ("mma", Case(16, 64, 56, 56, 64, 3, 3, padding=(1, 1))),
        ("mma", Case(4, 512, 14, 14, 512, 3, 3, stride=(2, 2), padding=(1, 1))),
        ("pointwise", Case(16, 64, 112, 112, 64, 1, 1)),
        ("pointwise", Case(2, 512, 28, 28, 256, 1, 1)),
    ],
    ids=str,
)
def test_gpu_waits_for_what_wrote_its_operands(engine, case, last):
    """gather's first kernel is launched early: behind kernels, in graphs behind nothing, a memset and two streams.

    What is written differs each time, by an exact factor, so that what an SM has still cached is seen to be old.
    """
    tensors = make_tensors(case, torch.float32, normal, "cuda")
    x, w = torch.empty_like(tensors["x"]), torch.empty_like(tensors["w"])
    side = torch.cuda.Stream()
    factor = torch.ones((), device="cuda")

    def written(name: str, to: Tensor) -> None:
        to.fill_(math.nan)
        torch.mul(tensors[name], factor if name == last else 1.0, out=to)

    def result(before: str = "kernels") -> Tensor:
        for name, to in [("w", w), ("x", x)] if last == "x" else [("x", x), ("w", w)]:
            if before == "streams" and name == last:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    written(name, to)
                torch.cuda.current_stream().wait_stream(side)
            elif before != "nothing":
                written(name, to)
        if before == "memset":
            torch.empty(1 << 20, device="cuda").zero_()
        return modelnew.conv2d(x, w, None, **case.kwargs)

    with tf32_switch(True), modelnew.force_engine(engine):
        expected = modelnew.conv2d(tensors["x"], tensors["w"], None, **case.kwargs)
        assert expected.isfinite().all()
        for _ in range(20):
            factor.mul_(2)
            assert torch.equal(result(), expected * factor)
        for before in ("kernels", "nothing", "memset", "streams"):
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = result(before)
            for _ in range(5):
                out.fill_(math.nan)
                factor.mul_(2)
                written("x", x)  # in front of the graph that writes nothing itself
                written("w", w)
                graph.replay()
                assert torch.equal(out, expected * factor), before
@gpu
@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case",
    [
        Case(64, 64, 56, 56, 64, 1, 1),
        Case(64, 64, 57, 57, 64, 1, 1),
        Case(64, 128, 28, 28, 128, 3, 3, padding=(1, 1)),
        Case(32, 64, 112, 112, 64, 3, 3, padding=(1, 1)),
        Case(8, 128, 65, 65, 128, 3, 3, padding=(4, 4), dilation=(4, 4)),
    ],
    ids=str,
)
def test_gpu_calls_read_what_calls_before_wrote(case, layout):
    """Four calls one right behind another, whose results lie where those of the round before did."""
    tensors = in_layout(make_tensors(case, torch.float32, normal, "cuda"), layout)
    x, w = tensors["x"], tensors["w"]
    to = [torch.empty_like(x) for _ in range(4)]
    with tf32_switch(True):

        def chain(of: Tensor) -> Tensor:
            for out in to:
                torch.cuda.synchronize()  # to begin with, each call by itself
                out.copy_(modelnew.conv2d(of, w, None, **case.kwargs))
                of = out
            return of.clone()

        expected = chain(x)
        assert expected.isfinite().all()
        assert expected.any()
        for i in range(10):
            factor = 2.0**i
            y = x * factor
            for _ in range(4):
                y = modelnew.conv2d(y, w, None, **case.kwargs)
            assert torch.equal(y, expected * factor)


@gpu
@hopper
def test_gpu_patches_run_what_a_vision_transformer_begins_with():
    for (R, K), dtype in itertools.product(((16, 768), (14, 1024), (32, 768)), (torch.float32, torch.float16)):
        x = torch.randn(8, 3, 224, 224, device="cuda", dtype=dtype)
        w = torch.randn(K, 3, R, R, device="cuda", dtype=dtype)
        with tf32_switch(True):
            assert "\nforward: patches; " in modelnew.explain(x, w, stride=R)
@gpu
@hopper
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_gpu_wgrad_takes_rows_with_nan_behind(dtype, rows):
    case = Case(2, 8, 6, 70 if rows else 7, 8, 3, 3, padding=(1, 1))
    tensors = make_tensors(case, dtype, integers, "cuda")
    shown = tensors | {"dy": dy_before_nan(tensors["dy"], rows)}
    check_exact(case, forced("wgrad", case, shown, True), tensors)
@gpu
@hopper
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_wgrad_propagates_nan_and_inf(layout, tf32, special):
    """One in x, in a corner that not all taps see, and one in dy."""
    for case in (Case(64, 32, 24, 24, 136, 3, 3, padding=(1, 1)), Case(128, 64, 16, 14, 300, 1, 1)):
        for name, at in (("x", (1, 3, 0, 0)), ("dy", (2, 5, 4, 3))):
            tensors = make_tensors(case, torch.float32, positive, "cuda")
            tensors[name][at] = special
            result = forced("wgrad", case, in_layout(tensors, layout), tf32)["wgrad"].cpu()
            # In float64, where the CPU has no kernels that leave padding out.
            first, second = tensors["dy"].cpu().double(), tensors["x"].cpu().double()
            expected = nn.grad.conv2d_weight(second, case.w_shape, first, **case.kwargs).float()
            assert not expected.isfinite().all()
            assert torch.equal(result.isnan(), expected.isnan())
            assert torch.equal(result.isinf(), expected.isinf())
FIRST_GRADIENT = """
import sys, threading, torch, modelnew
torch.manual_seed(0)
engine, x, w = sys.argv[1], torch.randn(8, 64, 56, 56, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda")
dy = torch.randn(8, 64, 56, 56, device="cuda")
torch.cuda.synchronize()
x.requires_grad_(engine == "gather")
w.requires_grad_(engine == "wgrad")
y = modelnew.conv2d(x, w, padding=1)
with modelnew.force_engine(engine):
    (gradient,) = torch.autograd.grad(y, x if engine == "gather" else w, dy)
print(gradient.isfinite().all().item())
"""
@gpu
@hopper
@pytest.mark.parametrize("engine", ["wgrad", "gather"])
def test_gpu_first_gradient_of_a_process(engine):
    """Computed in a thread of autograd's own, which has called nothing of CUDA's before."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(KERNELS.parent), *sys.path])}
    command = [sys.executable, "-c", FIRST_GRADIENT, engine]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["True"], done.stderr
@gpu
@hopper
@pytest.mark.parametrize("case", [Case(8, 64, 28, 28, 96, 3, 3, padding=(1, 1)), Case(8, 64, 7, 7, 136, 1, 1)], ids=str)
def test_gpu_wgrad_in_a_graph(case):
    """Copies and sums are made anew at every replay."""
    tensors = make_tensors(case, torch.float32, integers, "cuda")
    expected = forced("wgrad", case, tensors, True)["wgrad"].clone()
    x, dy, w = tensors["x"], tensors["dy"], tensors["w"].detach().requires_grad_()
    with tf32_switch(True):

        def result() -> Tensor:
            y = modelnew.conv2d(x, w, None, **case.kwargs)
            with modelnew.force_engine("wgrad"):
                return torch.autograd.grad(y, w, dy)[0]

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            result()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = result()
        for _ in range(5):
            out.fill_(math.nan)
            dy.mul_(2)
            expected.mul_(2)
            graph.replay()
            assert torch.equal(out, expected)


@gpu
@hopper
@pytest.mark.parametrize("case", GPU_STRIDED_TF32_CASES, ids=str)
def test_gpu_strided_is_chosen(case):
    tensors = make_tensors(case, torch.float32, normal, "cuda")
    with tf32_switch(True):
        assert "\ndgrad: strided; " in modelnew.explain(tensors["x"], tensors["w"], **case.kwargs)


@gpu
@hopper
@pytest.mark.parametrize("elements", [1, 2])
def test_gpu_gather_leaves_taps_that_no_box_reaches_to_others(elements):
    """Of taps far apart, whose tensors in channels_last begin at odd addresses."""
    case = Case(2, 64, 40, 70, 64, 3, 7, padding=(13, 39), dilation=(13, 13))
    tensors = make_tensors(case, torch.float32, integers, "cuda")
    tensors["x"] = shifted(tensors["x"].permute(0, 2, 3, 1), elements).permute(0, 3, 1, 2)
    with tf32_switch(True), poisoned_memory(), modelnew.force_engine("gather"):
        y = modelnew.conv2d(tensors["x"], tensors["w"], tensors["bias"], **case.kwargs)
    check_exact(case, {"fprop": y}, tensors)


@gpu
@hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", TMA_CASES, ids=str)
def test_gpu_tma_gradients_are_exact(case, layout, dtype):
    """dx by tma where there is no stride."""
    in_eights = layout == "contiguous" or case.K % 8 == 0
    together = max(1, 64 // (case.K // case.groups))
    merges = case.groups == 1 or all(channels // case.groups * together % 64 == 0 for channels in (case.C, case.K))
    if case.stride == (1, 1) and in_eights and merges:
        tensors = changed(make_tensors(case, dtype, integers, "cuda"), WITH_WEIGHTS[layout])
        check_exact(case, forced("tma", case, tensors, True, {"dgrad"}), tensors)


@gpu
@hopper
def test_gpu_dilated_runs_far_taps_of_networks():
    """The pyramid of DeepLabV3, in parts or with a box for each tap."""
    images, w = torch.randn(8, 2048, 65, 65, device="cuda"), torch.randn(256, 2048, 3, 3, device="cuda")
    for count, dilation, engine in ((1, 36, "dilated"), (8, 12, "dilated"), (8, 24, "gather"), (8, 36, "gather")):
        settings = {"padding": dilation, "dilation": dilation}
        x = images[:count]
        with tf32_switch(True):
            assert f"\nforward: {engine}; tf32" in modelnew.explain(x, w, **settings)
            y = modelnew.conv2d(x, w, **settings)
        expected = F.conv2d(x[:1].double(), w.double(), **settings)
        scale = F.conv2d(x[:1].abs().double(), w.abs().double(), **settings)
        assert ((y[:1] - expected).abs() <= 2.0**-10 * scale).all()
@gpu
@hopper
@pytest.mark.parametrize("elements", [1, 2, 4])
def test_gpu_tma_leaves_what_no_box_reaches_to_others(elements):
    """Tensors in channels_last at odd addresses are right all the same, forward and backward."""
    case = Case(3, 40, 13, 17, 72, 3, 3, padding=(1, 1))
    tensors = make_tensors(case, torch.float16, integers, "cuda")
    for name in ("x", "w", "dy"):
        tensors[name] = shifted(tensors[name].permute(0, 2, 3, 1), elements).permute(0, 3, 1, 2)
    assert "\nforward: tma;" in modelnew.explain(tensors["x"], tensors["w"], **case.kwargs)
    x, w = (tensors[name].detach().requires_grad_() for name in ("x", "w"))
    with poisoned_memory():
        y = modelnew.conv2d(x, w, tensors["bias"], **case.kwargs)
        dx, dw = torch.autograd.grad(y, (x, w), tensors["dy"])
    check_exact(case, {"fprop": y, "dgrad": dx, "wgrad": dw}, tensors)
@gpu
@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_tma_in_a_graph_reads_new_data(layout):
    """Nothing that derives from x or w outlives a call."""
    case = Case(2, 512, 7, 7, 512, 3, 3, padding=(1, 1))  # in parts of the reduction
    tensors = changed(make_tensors(case, torch.float16, integers, "cuda"), WITH_WEIGHTS[layout])
    x, w = tensors["x"], tensors["w"]
    with modelnew.force_engine("tma"):
        modelnew.conv2d(x, w, **case.kwargs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = modelnew.conv2d(x, w, **case.kwargs)
    for seed in range(1, 4):
        fresh = make_tensors(case, torch.float16, integers, "cuda", seed=seed)
        x.copy_(fresh["x"])
        w.copy_(fresh["w"])
        graph.replay()
        assert torch.equal(y, product("fprop", case, x, w).half())
@gpu
@hopper
def test_gpu_stem_more_than_2_to_the_31_elements():
    """In the output, by boxes and by single values."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free GPU memory")
    for size in (1024, 1023):
        case = Case(34, 3, size, size, 64, 3, 3, padding=(1, 1))
        assert math.prod(case.y_shape) > 2**31
        tensors = make_tensors(dataclasses.replace(case, N=1), torch.float32, integers, "cuda")
        x = tensors["x"].repeat(case.N, 1, 1, 1)
        y = forced("stem", case, tensors | {"x": x}, False, {"fprop"})["fprop"]
        check_exact(dataclasses.replace(case, N=1), {"fprop": y[-1:]}, tensors)
        assert all(torch.equal(image, y[-1]) for image in y)
@gpu
@hopper
@pytest.mark.parametrize("fill", [normal, wide, under_a_tf32_step, tf32_ties, equal], ids=named)
@pytest.mark.parametrize("case", [WGMMA_CASE, Case(1, 300, 20, 66, 65, 6, 7, padding=(3, 3))], ids=str)
def test_gpu_wgmma_rounds_operands_to_nearest(case, fill):
    """Beside the contract: fp32 sums of operands that were rounded, both of them, with ties away from zero."""
    tensors = make_tensors(case, torch.float32, fill, "cuda")
    results = forced("wgmma", case, tensors, True)
    check_bounds(case, results, tensors, tf32=WGMMA_OPERATORS)
    rounded = {name: round_to_tf32(tensor) if name != "bias" else tensor for name, tensor in tensors.items()}
    for operator, result in results.items():
        scale = product(operator, case, *(rounded[name].double().abs() for name in OPERANDS[operator]))
        added = rounded["bias"].double().abs().view(-1, 1, 1) if operator == "fprop" else 0
        # The contract without the part of the rounding of operands.
        sums = (relative_bound(case, operator, torch.float32, tf32=True) - 2.0**-10) * scale
        bound = sums + 2.0**-126 + 2.0**-23 * (result.double().abs() + added)
        error = (result.double() - reference(operator, case, rounded)).abs()
        assert (error <= bound).all(), f"{operator}: {(error / bound).max():.3g} times the bound"
@gpu
@hopper
@pytest.mark.parametrize("fill", [normal, positive], ids=named)
@pytest.mark.parametrize(
    "case, most",
    [
        (Case(2, 16, 130, 518, 128, 3, 3), 1.5e-7),
        (Case(1, 64, 66, 262, 128, 3, 3), 2e-7),
        (Case(1, 64, 68, 134, 128, 5, 7), 2.5e-7),
        (Case(1, 512, 34, 66, 64, 3, 3), 3e-7),
    ],
    ids=str,
)
def test_gpu_wgmma_in_full_is_more_exact_than_cudnn(case, most, fill):
    """Of the whole result, also where all is positive, so that what tensor cores cut off adds up."""
    tensors = make_tensors(case, torch.float32, fill, "cuda")
    x, w = tensors["x"], tensors["w"]
    with tf32_switch(False), modelnew.force_engine("wgmma"), poisoned_memory():
        y = modelnew.conv2d(x, w, **case.kwargs)
    expected = product("fprop", case, x, w)
    assert ((y.double() - expected).norm() / expected.norm()).item() <= most
@gpu
@hopper
def test_gpu_wgmma_in_full_keeps_small_products_beside_large_ones():
    """One large product and 63 that lie at the end of its mantissa: what tensor cores align before they add."""
    case = Case(1, 64, 64, 128, 64, 1, 1)
    for binades in range(18, 27):
        tensors = make_tensors(case, torch.float32, equal, "cuda")
        tensors["x"][:] = (1 - 2.0**-10) * 2.0**-binades
        tensors["x"][:, 5] = 1
        for name in ("w", "dy"):
            tensors[name][:] = 1
        results = forced("wgmma", case, tensors, False)
        check_bounds(case, {"fprop": results["fprop"]}, tensors, tf32=())
def put(special: float | str, tensor: Tensor, place: tuple[int, ...]) -> None:
    """Writes one element: a number, or a NaN with "all bits" set, or with all "but the sign"."""
    if isinstance(special, float):
        tensor[place] = special
    else:
        bits = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
        bits[place] = -1 if special == "all bits" else torch.iinfo(bits.dtype).max
@gpu
@hopper
@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan, "all bits", "but the sign"], ids=str)
def test_gpu_wgmma_spreads_nan_and_inf_to_those_that_read_them(special, dtype, tf32):
    """And leaves all other elements as they are. Corners, edges and an inner pixel, of channels in several pieces."""
    case = Case(2, 40, 66, 132, 72, 3, 5, padding=(1, 2), dilation=(2, 1))
    tensors = make_tensors(case, dtype, under_a_tf32_step, "cuda")
    clean = forced("wgmma", case, tensors, tf32)
    for operator, name in (("fprop", "x"), ("dgrad", "dy")):
        N, C, H, W = (size - 1 for size in tensors[name].shape)
        for place in ((0, 0, 0, 0), (N, C, H, W), (1, 17, 31, 77), (0, C, 0, W), (1, 7, H, 0)):
            spoilt = tensors | {name: tensors[name].clone()}
            put(special, spoilt[name], place)
            marks = torch.zeros_like(tensors[name])
            marks[place] = 1
            reached = product(operator, case, marks, torch.ones_like(tensors["w"])) > 0
            assert reached.any()
            result = forced("wgmma", case, spoilt, tf32)[operator]
            infinite = isinstance(special, float) and math.isinf(special)
            assert torch.equal(result.isinf() if infinite else result.isnan(), reached)
            if tf32:
                assert torch.equal(result[~reached], clean[operator][~reached])
            else:  # what shares a tile with it is computed by other means
                torch.testing.assert_close(result[~reached], clean[operator][~reached], rtol=1e-5, atol=1e-5)
@gpu
@hopper
@pytest.mark.parametrize("engine, tf32", [("wgmma", True), ("wgmma", False), ("gather", True)])
def test_cuda_graph_replays_with_data_of_another_size(engine, tf32):
    """What is contained, what is done again and by what x is scaled is found out anew in every replay."""
    case = Case(2, 16, 130, 518, 128, 3, 3) if engine == "wgmma" else GATHER_CONTAINED_CASES[1]
    fresh = [adverse_tensors(case, kind, "fprop", "cuda", seed) for seed, kind in enumerate([*ADVERSE, "few small"])]
    static = {name: tensor.clone() for name, tensor in fresh[0].items()}
    with tf32_switch(tf32), modelnew.force_engine(engine):
        warm_up = torch.cuda.Stream()
        with torch.cuda.stream(warm_up):
            modelnew.conv2d(static["x"], static["w"], static["bias"], **case.kwargs)
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = modelnew.conv2d(static["x"], static["w"], static["bias"], **case.kwargs)
        for tensors in fresh:
            for name, tensor in tensors.items():
                static[name].copy_(tensor)
            graph.replay()
            check_bounds(case, {"fprop": y}, tensors, tf32={"fprop"} if tf32 else ())
@gpu
@hopper
def test_gpu_wgmma_more_than_2_to_the_31_elements():
    """In the output of the forward, then in the input of dgrad; references in chunks of channels."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (
        torch.randint(-3, 4, shape, device="cuda", generator=generator).half()
        for shape in ((1, 8, 4096, 4100), (130, 8, 1, 1))
    )
    expected = torch.zeros(x.shape, device="cuda")
    with tf32_switch(False), modelnew.force_engine("wgmma"):
        y = modelnew.conv2d(x.requires_grad_(), w)
        assert y.numel() > 2**31
        (dx,) = torch.autograd.grad(y, x, y.detach())
    for k in range(0, 130, 10):
        part = F.conv2d(x.detach().double(), w[k : k + 10].double())
        assert torch.equal(y.detach()[:, k : k + 10], part.half())
        expected += F.conv_transpose2d(part, w[k : k + 10].double()).float()
    assert torch.equal(dx, expected.half())
