"""Single engines on a GPU: all their ways, exact on integers and within the contract; graphs, determinism."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable

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
    on_gpu,
    poisoned_memory,
    positive,
    product,
    references,
    relative_bound,
    round_to_tf32,
    shifted,
    tf32_switch,
    tf32_ties,
    under_a_tf32_step,
    wide,
    with_margins,
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
    WGMMA_DTYPES,
    WGMMA_OPERATORS,
    WGMMA_PRECISIONS,
    check_misfits,
    dy_before_nan,
    gather_operators,
    misfit_tensors,
    wgmma_tile,
    wgmma_tiles,
)


def on_wgmma(case: Case, tensors: dict[str, Tensor], tf32: bool = True) -> dict[str, Tensor]:
    """y and dx of a case, by wgmma for sure."""
    results = on_gpu(case, tensors, tf32, "wgmma")
    assert set(results) == set(WGMMA_OPERATORS), f"wgmma does not take {case}"
    return results


def on_gather(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """y and, if it has no stride, dx of a case. Forced, as wgmma comes before it in the table."""
    results, x = {}, tensors["x"].detach().requires_grad_()
    with tf32_switch(True), poisoned_memory(), modelnew.force_engine("gather"):
        y = modelnew.conv2d(x, tensors["w"], tensors["bias"], **case.kwargs)
        results["fprop"] = y.detach()
        if "dgrad" in gather_operators(case):
            (results["dgrad"],) = torch.autograd.grad(y, x, tensors["dy"])
    return results


@gpu
@hopper
@pytest.mark.parametrize("dtype", WGMMA_DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", GATHER_CASES, ids=str)
def test_gpu_gather_exact(case, layout, dtype):
    tensors = in_layout(make_tensors(case, dtype, integers, "cuda"), layout)
    check_exact(case, on_gather(case, tensors), tensors)
    tensors["w"] = VIEWS["channels_last"](tensors["w"])
    check_exact(case, on_gather(case, tensors), tensors)


@gpu
@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", GATHER_APART_CASES, ids=str)
def test_gpu_gather_with_taps_apart(case, layout):
    """Exact, and within the contract's bounds."""
    for fill in (integers, *FILLS):
        tensors = in_layout(make_tensors(case, torch.float32, fill, "cuda"), layout)
        results = on_gather(case, tensors)
        if fill is integers:
            check_exact(case, results, tensors)
        else:
            check_bounds(case, results, tensors, case.tf32_operators(torch.float32, True))


@gpu
@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ADVERSE)
def test_gpu_gather_keeps_the_contract_where_fp16_does_not_fit(kind, layout):
    for case in GATHER_CASES:
        for operator in gather_operators(case):
            tensors = in_layout(adverse_tensors(case, kind, operator, "cuda"), layout)
            result = on_gather(case, tensors)[operator]
            check_bounds(case, {operator: result}, tensors, tf32={operator})


@gpu
@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [1e-9, math.nan, math.inf], ids=str)
def test_gpu_gather_mends(value, layout):
    for case in [*GATHER_CONTAINED_CASES, *GATHER_LANDING_CASES[1:], GATHER_LANDING_CHANNELS]:
        for operator in gather_operators(case):
            tensors = in_layout(misfit_tensors(operator, case, value, "cuda"), layout)
            check_misfits(operator, case, on_gather(case, tensors)[operator], tensors)


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
def test_gpu_gather_is_deterministic():
    for case in GATHER_CASES:
        tensors = adverse_tensors(case, "few small", "fprop", "cuda")
        first = on_gather(case, tensors)
        for _ in range(30):
            again = on_gather(case, tensors)
            assert all(torch.equal(first[name], again[name]) for name in first)


MMA_VIEWS = {name: VIEWS[name] for name in ("channels_last", "sliced", "every other")} | {
    "contiguous": lambda tensor: tensor,
    "off by one": lambda tensor: shifted(tensor, 1),
    "one image": lambda tensor: tensor[:1].expand_as(tensor),
}


def on_mma(case: Case, tensors: dict[str, Tensor], tf32: bool) -> dict[str, Tensor]:
    """y, and dx where there is no stride, by mma for sure."""
    results, x = {}, tensors["x"].detach().requires_grad_()
    with tf32_switch(tf32), poisoned_memory(), modelnew.force_engine("mma"):
        y = modelnew.conv2d(x, tensors["w"], tensors.get("bias"), **case.kwargs)
        results["fprop"] = y.detach()
        if case.stride == (1, 1):
            (results["dgrad"],) = torch.autograd.grad(y, x, tensors["dy"])
    return results


@gpu
@pytest.mark.parametrize("tf32", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("view", MMA_VIEWS)
@pytest.mark.parametrize("case", MMA_CASES, ids=str)
def test_gpu_mma_exact(case, view, tf32):
    """Forced. In full with more bits than TF32 has; twice the same bits."""
    tensors = make_tensors(case, torch.float32, integers, "cuda")
    full = set(WGMMA_OPERATORS) - case.tf32_operators(torch.float32, tf32)
    if full == set(WGMMA_OPERATORS):
        tensors["w"] *= 65
    tensors |= {name: MMA_VIEWS[view](tensors[name]) for name in ("x", "w", "dy")}
    results = on_mma(case, tensors, tf32)
    check_exact(case, results, tensors)
    again = on_mma(case, tensors, tf32)
    assert all(torch.equal(again[name], result) for name, result in results.items())


@gpu
@pytest.mark.parametrize("tf32", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan], ids=str)
def test_gpu_mma_spreads_nan_and_inf(special, tf32):
    """Also where an Inf meets padding: its zeros are factors, as in any GEMM."""
    for case in MMA_CASES:
        check_spreading(case, special, lambda tensors, case=case: on_mma(case, tensors, tf32)["fprop"])


def check_spreading(
    case: Case, special: float, run: Callable[[dict[str, Tensor]], Tensor], dtype: torch.dtype = torch.float32
) -> None:
    """That a value comes to those outputs that read it, from x and from w."""
    tensors = make_tensors(case, dtype, positive, "cuda")
    tensors["x"][0, 1, min(5, case.H - 1), min(3, case.W - 1)] = tensors["w"][1, 2, 0, 0] = special
    # In float64, where the CPU has no kernels that leave padding out.
    expected = F.conv2d(*(tensors[name].cpu().double() for name in ("x", "w", "bias")), **case.kwargs).to(dtype)
    y = run(tensors).cpu()
    assert torch.equal(y.isnan(), expected.isnan()), case
    assert torch.equal(y.isinf(), expected.isinf()), case
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2, equal_nan=True)


def on_engine(engine: str, case: Case, tensors: dict[str, Tensor], tf32: bool) -> Tensor:
    """y, by this engine for sure."""
    with tf32_switch(tf32), poisoned_memory(), modelnew.force_engine(engine):
        return modelnew.conv2d(tensors["x"], tensors["w"], tensors.get("bias"), **case.kwargs)


def check_forced_exact(
    engine: str,
    case: Case,
    views: dict[str, Callable],
    tf32: bool,
    device: str = "cuda",
    dtype: torch.dtype = torch.float32,
) -> None:
    """In full with more bits than TF32 has; with a bias and without, twice the same bits."""
    tensors = make_tensors(case, dtype, integers, device)
    if dtype == torch.float32 and "fprop" not in case.tf32_operators(torch.float32, tf32):
        tensors["w"] *= 1025
    tensors |= {name: change(tensors[name]) for name, change in views.items()}
    y = on_engine(engine, case, tensors, tf32)
    check_exact(case, {"fprop": y}, tensors)
    assert torch.equal(on_engine(engine, case, tensors, tf32), y)
    del tensors["bias"]
    expected = product("fprop", case, tensors["x"], tensors["w"]).to(dtype)
    assert torch.equal(on_engine(engine, case, tensors, tf32), expected)


def check_forced_rounding(
    engine: str,
    cases: list[Case],
    layout: str,
    tf32: bool,
    fill: Callable,
    device: str = "cuda",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Both contracts, element by element; and the same bits every time."""
    for case in cases:
        tensors = in_layout(make_tensors(case, dtype, fill, device), layout)
        y = on_engine(engine, case, tensors, tf32)
        check_bounds(case, {"fprop": y}, tensors, case.tf32_operators(dtype, tf32))
        assert all(torch.equal(on_engine(engine, case, tensors, tf32), y) for _ in range(5))


def check_forced_spreading(
    engine: str, cases: list[Case], layout: str, tf32: bool, special: float, dtype: torch.dtype = torch.float32
) -> None:
    for case in cases:
        run = functools.partial(on_engine, engine, case, tf32=tf32)
        check_spreading(case, special, lambda tensors, run=run: run(in_layout(tensors, layout)), dtype)


# Phases of all images and of one, by several engines; one tap that is left; rows of fewer than all phases.
# Patch embeddings in small: filters of multiples of 16 bytes and not, pixels in no patch.
GPU_PATCHES_CASES = [
    Case(5, 3, 64, 70, 200, 16, 16, stride=(16, 16)),
    Case(3, 3, 56, 58, 136, 14, 14, stride=(14, 14)),
    Case(2, 4, 64, 64, 72, 32, 32, stride=(32, 32)),
    Case(3, 1, 33, 40, 64, 3, 5, stride=(3, 5)),
]


@gpu
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", GPU_PATCHES_CASES, ids=str)
def test_gpu_patches(case, layout, dtype):
    """Exact, and within the contract's bounds."""
    fills = {torch.float32: FILLS, torch.float16: [normal], torch.bfloat16: [normal, wide]}[dtype]
    for fill in (integers, *fills):
        tensors = in_layout(make_tensors(case, dtype, fill, "cuda"), layout)
        tensors["w"] = VIEWS["channels_last"](tensors["w"]) if layout == "channels_last" else tensors["w"]
        results = on_gpu(case, tensors, True, "patches")
        assert set(results) == {"fprop"}
        check_exact(case, results, tensors) if fill is integers else check_bounds(case, results, tensors, tf32=())


@gpu
@hopper
def test_gpu_patches_run_what_a_vision_transformer_begins_with():
    for (R, K), dtype in itertools.product(((16, 768), (14, 1024), (32, 768)), (torch.float32, torch.float16)):
        x = torch.randn(8, 3, 224, 224, device="cuda", dtype=dtype)
        w = torch.randn(K, 3, R, R, device="cuda", dtype=dtype)
        with tf32_switch(True):
            assert "\nforward: patches; " in modelnew.explain(x, w, stride=R)


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


def wgrad_of(case: Case, tensors: dict[str, Tensor], tf32: bool) -> Tensor:
    results = on_gpu(case, tensors, tf32, "wgrad")
    assert set(results) == {"wgrad"}
    return results["wgrad"]


@gpu
@hopper
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", GPU_WGRAD_CASES, ids=str)
def test_gpu_wgrad(case, layout, dtype):
    """Exact, within the contract's bounds, and the same bits every time; TF32 where the problem is large enough."""
    fills = {torch.float32: FILLS, torch.float16: [normal], torch.bfloat16: [normal, wide]}[dtype]
    for fill in (integers, *fills):
        tensors = in_layout(make_tensors(case, dtype, fill, "cuda"), layout)
        result = {"wgrad": wgrad_of(case, tensors, True)}
        check_exact(case, result, tensors) if fill is integers else check_bounds(case, result, tensors, tf32=())
        assert all(torch.equal(wgrad_of(case, tensors, True), result["wgrad"]) for _ in range(3))


@gpu
@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case",
    [
        Case(16, 128, 28, 28, 256, 3, 3, padding=(1, 1)),
        Case(2, 64, 126, 250, 128, 3, 3),
        Case(64, 256, 14, 14, 320, 1, 1),
        Case(256, 512, 7, 7, 136, 1, 1),
        Case(64, 128, 7, 7, 264, 3, 3, padding=(1, 1)),
        Case(32, 128, 56, 56, 192, 1, 1, stride=(2, 2)),
        Case(8, 64, 57, 61, 72, 5, 3, stride=(2, 1), padding=(2, 1)),
    ],
    ids=str,
)
def test_gpu_wgrad_as_tf32(case, layout):
    for fill in (integers, *FILLS):
        tensors = in_layout(make_tensors(case, torch.float32, fill, "cuda"), layout)
        for tf32 in (True, False):
            operators = case.tf32_operators(torch.float32, tf32)
            assert ("wgrad" in operators) == tf32
            result = {"wgrad": wgrad_of(case, tensors, tf32)}
            check_exact(case, result, tensors) if fill is integers else check_bounds(case, result, tensors, operators)


@gpu
@hopper
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    "case",
    [Case(3, 20, 12, 16, 24, 3, 3, padding=(1, 1)), Case(2, 16, 8, 8, 40, 1, 1), Case(2, 12, 9, 9, 16, 1, 1, (2, 2))],
    ids=str,
)
def test_gpu_wgrad_takes_any_strides(case, view, dtype):
    tensors = make_tensors(case, dtype, integers, "cuda")
    for names in (("x", "dy"), ("x",), ("dy",)):
        changed = tensors | {name: VIEWS[view](tensors[name]) for name in names}
        check_exact(case, {"wgrad": wgrad_of(case, changed, True)}, changed)


@gpu
@hopper
@pytest.mark.parametrize("elements", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("case", [Case(3, 20, 12, 16, 24, 3, 3, padding=(1, 1)), Case(2, 16, 8, 8, 40, 1, 1)], ids=str)
def test_gpu_wgrad_takes_operands_that_begin_anywhere(case, dtype, elements):
    tensors = make_tensors(case, dtype, integers, "cuda")
    for names in (("x", "dy"), ("x",), ("dy",)):
        changed = tensors | {name: shifted(tensors[name], elements) for name in names}
        check_exact(case, {"wgrad": wgrad_of(case, changed, True)}, changed)


@gpu
@hopper
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_gpu_wgrad_takes_rows_with_nan_behind(dtype, rows):
    case = Case(2, 8, 6, 70 if rows else 7, 8, 3, 3, padding=(1, 1))
    tensors = make_tensors(case, dtype, integers, "cuda")
    changed = tensors | {"dy": dy_before_nan(tensors["dy"], rows)}
    check_exact(case, {"wgrad": wgrad_of(case, changed, True)}, tensors)


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
            result = wgrad_of(case, in_layout(tensors, layout), tf32).cpu()
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
    expected = wgrad_of(case, tensors, True).clone()
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


# Phases with every number of taps, and without any; a filter that leaves rows out, dilation, groups.
GPU_STRIDED_CASES = [
    Case(3, 64, 28, 30, 72, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(4, 48, 15, 14, 136, 1, 1, stride=(2, 2)),
    Case(2, 40, 33, 29, 24, 5, 4, stride=(3, 2), padding=(2, 1)),
    Case(2, 16, 21, 40, 64, 2, 2, stride=(2, 2)),
    Case(2, 24, 30, 31, 40, 3, 3, stride=(2, 1), padding=(2, 2), dilation=(2, 2)),
    Case(2, 64, 20, 20, 96, 3, 3, stride=(2, 2), padding=(1, 1), groups=2),
]


@gpu
@hopper
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", GPU_STRIDED_CASES, ids=str)
def test_gpu_strided(case, layout, dtype):
    """Exact, and within the contract's bounds."""
    fills = {torch.float32: FILLS, torch.float16: [normal], torch.bfloat16: [normal, wide]}[dtype]
    for fill in (integers, *fills):
        tensors = in_layout(make_tensors(case, dtype, fill, "cuda"), layout)
        results = on_gpu(case, tensors, True, "strided")
        assert set(results) == {"dgrad"}
        check_exact(case, results, tensors) if fill is integers else check_bounds(case, results, tensors, tf32=())


@gpu
@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case",
    [
        Case(32, 128, 28, 28, 128, 3, 3, stride=(2, 2), padding=(1, 1)),
        Case(64, 256, 28, 28, 128, 1, 1, stride=(2, 2)),
    ],
    ids=str,
)
def test_gpu_strided_as_tf32(case, layout):
    """Chosen, and exact where operands have no more bits than TF32."""
    for fill in (integers, normal):
        tensors = in_layout(make_tensors(case, torch.float32, fill, "cuda"), layout)
        with tf32_switch(True):
            assert "\ndgrad: strided; " in modelnew.explain(tensors["x"], tensors["w"], **case.kwargs)
        results = {"dgrad": on_gpu(case, tensors, True)["dgrad"]}
        check_exact(case, results, tensors) if fill is integers else check_bounds(case, results, tensors, {"dgrad"})


GPU_DILATED_CASES = [
    Case(3, 64, 28, 28, 64, 3, 3, padding=(24, 24), dilation=(24, 24)),
    Case(1, 72, 65, 65, 40, 3, 3, padding=(36, 36), dilation=(36, 36)),
    Case(2, 64, 14, 14, 256, 3, 3, padding=(24, 24), dilation=(24, 24)),
    Case(40, 96, 30, 26, 64, 3, 3, padding=(9, 2), dilation=(12, 9)),
]


@gpu
@hopper
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", GPU_DILATED_CASES, ids=str)
def test_gpu_dilated_exact(case, layout, dtype):
    for tf32 in (False, True) if dtype == torch.float32 else (True,):
        tensors = in_layout(make_tensors(case, dtype, integers, "cuda"), layout)
        results = on_gpu(case, tensors, tf32, "dilated")
        assert set(results) == {"fprop", "dgrad"}
        check_exact(case, results, tensors)


@gpu
@hopper
@pytest.mark.parametrize("elements", [1, 2])
def test_gpu_gather_leaves_taps_that_no_box_reaches_to_others(elements):
    """Of taps far apart, whose tensors in channels_last begin at odd addresses."""
    case = Case(2, 64, 40, 70, 64, 3, 7, padding=(13, 39), dilation=(13, 13))
    x = lambda x: shifted(x.permute(0, 2, 3, 1), elements).permute(0, 3, 1, 2)  # noqa: E731
    check_forced_exact("gather", case, {"x": x}, True)


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
TMA_PLANES_CASES = [
    *TMA_CASES,
    Case(3, 7, 20, 30, 19, 5, 3),
    Case(2, 13, 9, 11, 1, 3, 3, padding=(1, 1)),
    Case(2, 13, 8, 8, 11, 1, 1),
    Case(5, 72, 4, 4, 16, 4, 4),
]
HALVES = (torch.float16, torch.bfloat16)


def of_pixels(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return in_layout(tensors, "channels_last") | {"w": VIEWS["channels_last"](tensors["w"])}


@gpu
@hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", TMA_CASES, ids=str)
def test_gpu_tma_exact(case, dtype):
    pixels = VIEWS["channels_last"]
    for views in ({"x": pixels, "w": pixels}, {"x": pixels}):
        check_forced_exact("tma", case, views, True, dtype=dtype)


@gpu
@hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", TMA_PLANES_CASES, ids=str)
def test_gpu_tma_exact_in_planes(case, dtype):
    for shift in (0, 1, 2, 4):
        check_forced_exact("tma", case, {"x": functools.partial(shifted, elements=shift)}, True, dtype=dtype)


@gpu
@hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gpu_tma_takes_views_of_planes(dtype):
    """One image or channel for all, which no box can take; rows of weights in larger ones, of which the rest is NaN."""
    case = Case(3, 13, 8, 16, 11, 1, 1)
    wider = lambda w: F.pad(w, (0, 0, 0, 0, 0, 3), value=math.nan)[:, : case.C]  # noqa: E731
    for views in (
        {"x": lambda x: x[:1].expand_as(x)},
        {"x": lambda x: x[:, :1].expand_as(x)},
        {"w": wider},
        {"w": lambda w: wider(w.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))},
    ):
        check_forced_exact("tma", case, views, True, dtype=dtype)


@gpu
@hopper
@pytest.mark.parametrize("dtype, fill", STEM_16_BIT_FILLS, ids=named)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_tma_rounding(layout, dtype, fill):
    check_forced_rounding("tma", TMA_CASES, layout, True, fill, dtype=dtype)


@gpu
@hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", TMA_CASES, ids=str)
def test_gpu_tma_gradients_are_exact(case, layout, dtype):
    """dx by tma where there is no stride, dw by tma_wgrad, whatever took the forward."""
    tensors = make_tensors(case, dtype, integers, "cuda")
    if layout == "channels_last":
        tensors = of_pixels(tensors)
    exact = references(case, tensors)
    in_eights = layout == "contiguous" or case.K % 8 == 0
    merged = max(1, 64 // (case.K // case.groups))
    merges = case.groups == 1 or all(channels // case.groups * merged % 64 == 0 for channels in (case.C, case.K))
    engines = {"dgrad": "tma"} if case.stride == (1, 1) and in_eights and merges else {}
    engines |= {"wgrad": "tma_wgrad"} if in_eights and case.groups == 1 else {}
    for operator, engine in engines.items():
        name = OPERANDS_OF_GRADIENT[operator]
        leaf = tensors[name].detach().requires_grad_()
        y = modelnew.conv2d(**{"input": tensors["x"], "weight": tensors["w"]} | {WORDS[name]: leaf}, **case.kwargs)
        with poisoned_memory(), modelnew.force_engine(engine):
            (gradient,) = torch.autograd.grad(y, leaf, tensors["dy"])
        assert torch.equal(gradient, exact[operator].to(dtype)), operator


OPERANDS_OF_GRADIENT = {"dgrad": "x", "wgrad": "w"}
WORDS = {"x": "input", "w": "weight"}


@gpu
@hopper
@pytest.mark.parametrize("dtype, fill", STEM_16_BIT_FILLS, ids=named)
def test_gpu_tma_wgrad_rounding(dtype, fill):
    for case in (case for case in TMA_CASES if case.K % 8 == 0 and case.groups == 1):
        tensors = of_pixels(make_tensors(case, dtype, fill, "cuda"))
        w = tensors["w"].detach().requires_grad_()
        y = modelnew.conv2d(tensors["x"], w, **case.kwargs)
        with poisoned_memory(), modelnew.force_engine("tma_wgrad"):
            gradients = [torch.autograd.grad(y, w, tensors["dy"], retain_graph=True)[0] for _ in range(3)]
        check_bounds(case, {"wgrad": gradients[0]}, tensors, ())
        assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


@gpu
@hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", TMA_PLANES_CASES, ids=str)
def test_gpu_tma_wgrad_copies_planes(case, dtype):
    """That begin anywhere; one image or channel for all; x or dy alone."""
    views: list[dict[str, Callable]] = [{"x": functools.partial(shifted, elements=shift)} for shift in (1, 2, 4)]
    views += [{"dy": change["x"]} for change in views]
    views += [{"x": lambda x: x[:1].expand_as(x)}, {"x": lambda x: x[:, :1].expand_as(x)}]
    views += [{name: VIEWS["channels_last"]} for name, size in (("x", case.C), ("dy", case.K)) if size % 8 == 0]
    for changes in views if case.groups == 1 else []:
        tensors = make_tensors(case, dtype, integers, "cuda")
        tensors |= {name: change(tensors[name]) for name, change in changes.items()}
        w = tensors["w"].detach().requires_grad_()
        y = modelnew.conv2d(tensors["x"], w, **case.kwargs)
        with poisoned_memory(), modelnew.force_engine("tma_wgrad"):
            (dw,) = torch.autograd.grad(y, w, tensors["dy"])
        check_exact(case, {"wgrad": dw}, tensors)


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
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan], ids=str)
def test_gpu_tma_spreads_nan_and_inf(special, layout, dtype):
    cases = [TMA_CASES[0], TMA_CASES[3], TMA_CASES[7], *(case for case in TMA_CASES if case.groups == 32)]
    check_forced_spreading("tma", cases, layout, True, special, dtype)


@gpu
@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_tma_in_a_graph_reads_new_data(layout):
    """Nothing that derives from x or w outlives a call."""
    case = Case(2, 512, 7, 7, 512, 3, 3, padding=(1, 1))  # in parts of the reduction
    tensors = make_tensors(case, torch.float16, integers, "cuda")
    if layout == "channels_last":
        tensors = of_pixels(tensors)
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


STEM_VIEWS = {
    **{name: {"x": view, "w": view} for name, view in MMA_VIEWS.items()},
    "transposed": {"x": VIEWS["transposed"], "w": VIEWS["transposed"]},
    "x in channels_last": {"x": VIEWS["channels_last"]},  # y is, too, but not w
    "w in channels_last": {"w": VIEWS["channels_last"]},  # y is, too, but not x
}


@gpu
@hopper
@pytest.mark.parametrize("dtype, tf32", STEM_CONTRACTS, ids=str)
@pytest.mark.parametrize("view", STEM_VIEWS)
@pytest.mark.parametrize("case", STEM_CASES, ids=str)
def test_gpu_stem_exact(case, view, dtype, tf32):
    check_forced_exact("stem", case, STEM_VIEWS[view], tf32, dtype=dtype)


@gpu
@hopper
@pytest.mark.parametrize("fill", FILLS, ids=named)
@pytest.mark.parametrize("tf32", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_stem_rounding(layout, tf32, fill):
    check_forced_rounding("stem", STEM_CASES, layout, tf32, fill)


@gpu
@hopper
@pytest.mark.parametrize("dtype, fill", STEM_16_BIT_FILLS, ids=named)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_stem_rounding_of_16_bits(layout, dtype, fill):
    check_forced_rounding("stem", STEM_CASES, layout, True, fill, dtype=dtype)


@gpu
@hopper
@pytest.mark.parametrize("dtype, tf32", STEM_CONTRACTS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan], ids=str)
def test_gpu_stem_spreads_nan_and_inf(special, layout, dtype, tf32):
    cases = [case for case in STEM_CASES if case.C > 2]
    check_forced_spreading("stem", cases, layout, tf32, special, dtype)


@gpu
@hopper
def test_gpu_forced_stem_says_what_it_refuses():
    x, w = torch.randn(2, 6, 19, 20, device="cuda"), torch.randn(24, 6, 3, 3, device="cuda", requires_grad=True)
    refused = r"'stem' is forced but cannot take the forward .*"
    with modelnew.force_engine("stem"):
        with pytest.raises(RuntimeError, match=refused + "one group only"):
            modelnew.conv2d(x, w[:, :3], groups=2)
        with pytest.raises(RuntimeError, match=refused + "7 input channels"):
            modelnew.conv2d(torch.cat([x, x], 1), torch.cat([w, w], 1))
        with pytest.raises(RuntimeError, match=refused + "no float64"):
            modelnew.conv2d(x.double(), w.double())
        y = modelnew.conv2d(x, w)
        with pytest.raises(RuntimeError, match=r"'stem' is forced but cannot take the wgrad .*outputs only"):
            y.sum().backward()


@gpu
@hopper
def test_gpu_forced_stem_without_images():
    case = Case(0, 3, 9, 10, 24, 3, 3)
    assert on_engine("stem", case, make_tensors(case, torch.float32, normal, "cuda"), True).shape == case.y_shape


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
        y = on_engine("stem", case, tensors | {"x": x}, False)
        check_exact(dataclasses.replace(case, N=1), {"fprop": y[-1:]}, tensors)
        assert all(torch.equal(image, y[-1]) for image in y)


POINTWISE_VIEWS = {
    **{name: {"x": view, "w": view} for name, view in MMA_VIEWS.items()},
    "transposed": {"x": VIEWS["transposed"], "w": VIEWS["transposed"]},
    "x in channels_last": {"x": VIEWS["channels_last"]},
    "w in channels_last": {"w": VIEWS["channels_last"]},  # y is, too, but not x
    "x off by one": {"x": MMA_VIEWS["off by one"]},
    "in wider ones": {"x": lambda tensor: in_wider(tensor, 12, 4), "w": lambda tensor: in_wider(tensor, 4, 0)},
}


@gpu
@pytest.mark.parametrize("tf32", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("view", POINTWISE_VIEWS)
@pytest.mark.parametrize("case", POINTWISE_CASES, ids=str)
def test_gpu_pointwise_exact(case, view, tf32):
    check_forced_exact("pointwise", case, POINTWISE_VIEWS[view], tf32)


@gpu
@pytest.mark.parametrize("fill", FILLS, ids=named)
@pytest.mark.parametrize("tf32", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_pointwise_rounding(layout, tf32, fill):
    check_forced_rounding("pointwise", POINTWISE_CASES, layout, tf32, fill)


@gpu
@pytest.mark.parametrize("tf32", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan], ids=str)
def test_gpu_pointwise_spreads_nan_and_inf(special, layout, tf32):
    check_forced_spreading("pointwise", [case for case in POINTWISE_CASES if case.K > 1], layout, tf32, special)


@gpu
def test_gpu_forced_pointwise_says_what_it_refuses():
    x, w = torch.randn(2, 16, 9, 10, device="cuda"), torch.randn(24, 16, 1, 1, device="cuda", requires_grad=True)
    refused = r"'pointwise' is forced but cannot take the forward .*"
    with modelnew.force_engine("pointwise"):
        for settings, reason in (({"padding": 1}, "no padding"), ({"groups": 2}, "one group only")):
            with pytest.raises(RuntimeError, match=refused + reason):
                modelnew.conv2d(x, w[:, :8] if "groups" in settings else w, **settings)
        with pytest.raises(RuntimeError, match=refused + "1x1 filters only"):
            modelnew.conv2d(x, torch.randn(24, 16, 1, 3, device="cuda"))
        with pytest.raises(RuntimeError, match=refused + "float32 only"):
            modelnew.conv2d(x.double(), w.double())
        y = modelnew.conv2d(x, w)
        with pytest.raises(RuntimeError, match=r"'pointwise' is forced but cannot take the wgrad .*outputs only"):
            y.sum().backward()


@gpu
def test_gpu_forced_pointwise_without_images():
    case = Case(0, 16, 9, 10, 24, 1, 1)
    assert on_engine("pointwise", case, make_tensors(case, torch.float32, normal, "cuda"), True).shape == case.y_shape


@gpu
@hopper
@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
@pytest.mark.parametrize("case", WGMMA_CASES, ids=str)
def test_gpu_wgmma_exact(case, dtype, tf32):
    if not tf32 and min(case.C, case.K) // case.groups * case.R * case.S < 64:
        pytest.skip("sums too short for it")
    tensors = make_tensors(case, dtype, integers, "cuda")
    check_exact(case, on_wgmma(case, tensors, tf32), tensors)
    assert all(margins_intact(tensor) for tensor in tensors.values())


@gpu
@hopper
@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
def test_gpu_wgmma_exact_without_bias(dtype, tf32):
    """Of tiles that store whole lines, and of others."""
    for case in (WGMMA_CASE, Case(8, 40, 66, 64, 130, 3, 3, padding=(1, 1))):
        tensors = make_tensors(case, dtype, integers, "cuda")
        with tf32_switch(tf32), modelnew.force_engine("wgmma"), poisoned_memory():
            y = modelnew.conv2d(tensors["x"], tensors["w"], **case.kwargs)
        assert torch.equal(y, product("fprop", case, tensors["x"], tensors["w"]).to(dtype))


@gpu
@hopper
@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
def test_gpu_wgmma_exact_in_every_tile(wgmma_plans, dtype, tf32):
    """One case for each tile and direction that the planner can choose, as it tells without a GPU."""
    cases: dict[tuple[int, int, str], Case] = {}
    for case in WGMMA_CANDIDATES:
        if wgmma_plans("refusal", "fprop", case, dtype, tf32=tf32) is None:
            cases.setdefault(wgmma_tile(wgmma_plans("describe", "fprop", case, dtype, tf32=tf32)), case)
    assert set(cases) == wgmma_tiles(dtype, tf32)
    for case in cases.values():
        tensors = make_tensors(case, dtype, integers, "cuda")
        check_exact(case, on_gpu(case, tensors, tf32, "wgmma"), tensors)


# The alignments that change how pixels are loaded: even rows of x at an odd address, besides strides of any kind.
WGMMA_VIEWS = VIEWS | {"off by one": lambda tensor: with_margins(F.pad(tensor.flatten(), (1, 0)))[1:].view_as(tensor)}


@gpu
@hopper
@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
@pytest.mark.parametrize("view", WGMMA_VIEWS)
def test_gpu_wgmma_takes_any_strides(view, dtype, tf32):
    for case in (Case(2, 40, 66, 132, 72, 3, 3, padding=(1, 1)), Case(2, 40, 67, 258, 65, 3, 2, padding=(1, 2))):
        plain = make_tensors(case, dtype, integers, "cuda")
        for names in (("x",), ("w",), ("dy",), ("x", "w", "dy")):
            tensors = plain | {name: WGMMA_VIEWS[view](plain[name]) for name in names}
            check_exact(case, on_wgmma(case, tensors, tf32), tensors)


@gpu
@hopper
@pytest.mark.parametrize("fill", [normal, wide, under_a_tf32_step, tf32_ties, equal], ids=named)
@pytest.mark.parametrize("case", [WGMMA_CASE, Case(1, 300, 20, 66, 65, 6, 7, padding=(3, 3))], ids=str)
def test_gpu_wgmma_rounds_operands_to_nearest(case, fill):
    """Beside the contract: fp32 sums of operands that were rounded, both of them, with ties away from zero."""
    tensors = make_tensors(case, torch.float32, fill, "cuda")
    results = on_wgmma(case, tensors)
    check_bounds(case, results, tensors, tf32=WGMMA_OPERATORS)
    rounded = {name: round_to_tf32(tensor) if name != "bias" else tensor for name, tensor in tensors.items()}
    expected = references(case, rounded)
    for operator, result in results.items():
        scale = product(operator, case, *(rounded[name].double().abs() for name in OPERANDS[operator]))
        added = rounded["bias"].double().abs().view(-1, 1, 1) if operator == "fprop" else 0
        # The contract without the part of the rounding of operands.
        sums = (relative_bound(case, operator, torch.float32, tf32=True) - 2.0**-10) * scale
        bound = sums + 2.0**-126 + 2.0**-23 * (result.double().abs() + added)
        error = (result.double() - expected[operator]).abs()
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
        results = on_wgmma(case, tensors, tf32=False)
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
    clean = on_wgmma(case, tensors, tf32)
    for operator, name in (("fprop", "x"), ("dgrad", "dy")):
        N, C, H, W = (size - 1 for size in tensors[name].shape)
        for place in ((0, 0, 0, 0), (N, C, H, W), (1, 17, 31, 77), (0, C, 0, W), (1, 7, H, 0)):
            spoilt = tensors | {name: tensors[name].clone()}
            put(special, spoilt[name], place)
            marks = torch.zeros_like(tensors[name])
            marks[place] = 1
            reached = product(operator, case, marks, torch.ones_like(tensors["w"])) > 0
            assert reached.any()
            result = on_wgmma(case, spoilt, tf32)[operator]
            infinite = isinstance(special, float) and math.isinf(special)
            assert torch.equal(result.isinf() if infinite else result.isnan(), reached)
            if tf32:
                assert torch.equal(result[~reached], clean[operator][~reached])
            else:  # what shares a tile with it is computed by other means
                torch.testing.assert_close(result[~reached], clean[operator][~reached], rtol=1e-5, atol=1e-5)


@gpu
@hopper
@pytest.mark.parametrize("tf32", [True, False], ids=["tf32", "fp32"])
@pytest.mark.parametrize("kind", ADVERSE)
def test_gpu_wgmma_keeps_the_contract_where_fp16_does_not_fit(kind, tf32):
    # In the last one boxes load x.
    for case in (WGMMA_CASE, Case(2, 16, 130, 518, 128, 3, 3), Case(2, 64, 40, 264, 128, 3, 3, padding=(1, 0))):
        for operator in WGMMA_OPERATORS:
            tensors = adverse_tensors(case, kind, operator, "cuda")
            result = on_wgmma(case, tensors, tf32)[operator]
            check_bounds(case, {operator: result}, tensors, tf32={operator} if tf32 else ())


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
@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
def test_gpu_wgmma_is_deterministic(dtype, tf32):
    for case in (Case(8, 40, 66, 257, 130, 3, 3), Case(8, 72, 65, 64, 64, 3, 3, padding=(1, 1))):
        tensors = make_tensors(case, dtype, normal, "cuda")
        first = on_wgmma(case, tensors, tf32)
        for _ in range(100):
            again = on_wgmma(case, tensors, tf32)
            assert all(torch.equal(first[name], again[name]) for name in first)


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


@gpu
@hopper
def test_gpu_forced_wgmma_says_what_it_refuses():
    x = torch.ones(1, 16, 80, 80, dtype=torch.half, device="cuda", requires_grad=True)
    w = torch.ones(16, 16, 3, 3, dtype=torch.half, device="cuda", requires_grad=True)
    with modelnew.force_engine("wgmma"):
        with pytest.raises(RuntimeError, match=r"'wgmma' is forced but cannot take the forward .*stride 1 only"):
            modelnew.conv2d(x, w, stride=2)
        y = modelnew.conv2d(x, w)
        with pytest.raises(RuntimeError, match=r"'wgmma' is forced but cannot take the wgrad .*input gradients only"):
            y.sum().backward()
