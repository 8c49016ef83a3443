"""The tma engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import re

import pytest
import torch
import torch.nn.functional as F

from tests.cases import DTYPES, LAYOUTS, VIEWS, Case, integers, make_tensors
from tests.emulation import mutated
from tests.mutations import TMA_MUTATIONS, TMA_PLAN_MUTATIONS
from tests.problems import pixel_strides, random_tma_cases

# Several blocks of channels, ragged ones, one and two tiles of output channels; points and pixels left out; halos, a
# dilation, phases of a stride of 2, filters with sides of 2; images of one pixel, lines longer than a tile.
TMA_SHIM_CASES = [
    (Case(2, 72, 6, 9, 136, 3, 3, padding=(1, 1)), "fprop"),
    (Case(3, 136, 5, 8, 40, 1, 1), "fprop"),
    (Case(2, 64, 9, 12, 64, 3, 3, stride=(2, 2), padding=(1, 1)), "fprop"),
    (Case(1, 8, 11, 13, 24, 5, 3, stride=(2, 2), padding=(2, 0)), "fprop"),
    (Case(2, 24, 9, 10, 72, 3, 3, padding=(2, 3), dilation=(2, 3)), "fprop"),
    (Case(1, 16, 3, 270, 8, 2, 2), "fprop"),
    (Case(2, 40, 9, 9, 16, 1, 1, stride=(3, 2)), "fprop"),
    (Case(5, 16, 1, 1, 8, 3, 3, padding=(1, 1)), "fprop"),
    (Case(2, 24, 7, 8, 72, 3, 3, padding=(1, 1)), "dgrad"),
    (Case(2, 72, 8, 8, 136, 1, 1), "dgrad"),
    (Case(3, 16, 4, 4, 72, 3, 3, stride=(2, 2)), "fprop"),
    (Case(3, 72, 9, 4, 16, 3, 3, stride=(2, 2), padding=(1, 0)), "fprop"),
    (Case(3, 16, 3, 9, 8, 1, 1, stride=(8, 2)), "fprop"),
    (Case(3, 16, 4, 4, 72, 3, 3, stride=(2, 2)), "dgrad"),
    (Case(2, 13, 8, 8, 11, 1, 1), "fprop"),
    (Case(2, 8, 300, 1, 8, 4, 1), "fprop"),
    (Case(2, 72, 7, 9, 19, 3, 3, padding=(1, 1)), "fprop"),
    (Case(5, 24, 6, 7, 131, 1, 1), "fprop"),
    # Groups: merged, of one block and of several, the last of them in part; more outputs than inputs; as they are.
    (Case(2, 192, 6, 9, 192, 3, 3, padding=(1, 1), groups=12), "fprop"),
    (Case(2, 80, 7, 8, 160, 3, 3, stride=(2, 2), padding=(1, 1), groups=5), "fprop"),
    (Case(2, 72, 7, 9, 72, 3, 3, padding=(1, 1), groups=9), "dgrad"),
    (Case(2, 128, 6, 8, 256, 1, 1, groups=2), "fprop"),
]
TMA_SHAPES = range(11)


@pytest.mark.parametrize("number", range(len(TMA_SHIM_CASES)))
def test_tma_shim_exact(tma_shim, number):
    """Integers of both types in both memory formats, in every way there is and in each with every third tile."""
    case, operator = TMA_SHIM_CASES[number]
    seen = set()
    for way, wishes in enumerate([{"windows": 0, "direct": 0}, {"windows": 1, "direct": 0}, {"direct": 1}]):
        for i, layout in enumerate(LAYOUTS):
            for shape in list(TMA_SHAPES)[(number + way + i) % 3 :: 3] if case.groups == 1 else TMA_SHAPES:
                seed = 100 * number + 10 * shape + way
                dtype = (torch.float16, torch.bfloat16)[(shape + i) % 2]
                fault = tma_shim.fault(operator, case, layout, seed, dtype, shape=shape, **wishes)
                assert fault in (None, ""), f"{case}, {layout}, {wishes}, {shape}, {dtype}, seed {seed}: {fault}"
                if fault == "":
                    seen.add((layout, tma_shim.last("way") % 4))
    # With a single output a stride is never taken.
    stride = tuple(1 if size == 1 else step for size, step in zip(case.y_shape[2:], case.stride, strict=True))
    ways = {0} | ({1} if case.R * case.S > 1 and stride in ((1, 1), (2, 2)) else set())
    layouts = LAYOUTS if case.H * case.W > 1 else LAYOUTS[1:]  # of one pixel a layout is both, at any alignment
    layouts = layouts if case.C % 8 == 0 else LAYOUTS[:1]
    assert seen >= {(layout, way) for layout in layouts for way in ways}
    points = case.R * case.S == 1 and case.stride == (1, 1) and case.H * case.W % 8 == 0
    assert (("contiguous", 2) in seen) == points


@pytest.mark.parametrize("number", [0, 1, 8, 9, 18, 20])
def test_tma_shim_writes_between_gaps(tma_shim, number):
    """As a part of a strided dgrad is written, in both memory formats."""
    case, operator = TMA_SHIM_CASES[number]
    for layout in LAYOUTS:
        faults = [tma_shim.fault(operator, case, layout, number, gaps=True, shape=shape) for shape in TMA_SHAPES]
        assert not any(faults), faults
        assert faults.count("") >= 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tma_shim_keeps_inf_and_nan_in_their_groups(tma_shim, layout):
    """Merged groups, whose weights are zeros in between: in each way, by boxes and by threads, with all their tiles."""
    case = Case(2, 48, 6, 9, 48, 3, 3, padding=(1, 1), groups=6)
    ways = set()
    for special, shape, windows in itertools.product((math.inf, math.nan), (4, 6, 9, 10), (0, 1)):
        tensors = make_tensors(case, torch.float16, integers)
        tensors["x"][0, 9, 2, 3] = tensors["x"][1, 47, 5, 8] = tensors["w"][17, 3, 1, 1] = special
        expected = F.conv2d(*(tensors[name].double() for name in ("x", "w", "bias")), **case.kwargs).half()
        assert 0 < expected.isfinite().sum() < expected.numel()
        if layout == "channels_last":
            tensors |= {name: VIEWS[layout](tensors[name]) for name in ("x", "w")}
        out = torch.full(case.y_shape, math.nan, dtype=torch.float16)
        out = VIEWS[layout](out) if layout == "channels_last" else out
        message = tma_shim.run("fprop", case, tensors, out, shape=shape, windows=windows)
        assert message in (None, ""), message
        if message is None:
            continue
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
        ways.add((shape, windows))
    assert len(ways) >= 4


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_tma_shim_exact_in_parts(tma_shim, splits):
    """Clusters of blocks, each with a part of the reduction, in every way."""
    cases = [
        (Case(1, 136, 5, 7, 72, 3, 3, padding=(1, 1)), "fprop", {"windows": 0, "direct": 0}),
        (Case(1, 520, 6, 7, 40, 3, 3, padding=(1, 1)), "fprop", {"windows": 1, "direct": 0}),
        (Case(2, 520, 4, 6, 136, 1, 1), "fprop", {"direct": 1}),
        (Case(1, 40, 5, 6, 520, 3, 3, padding=(1, 1)), "dgrad", {"windows": 0, "direct": 0}),
    ]
    for seed, (case, operator, wishes) in enumerate(cases):
        runs = 0
        for layout, shape in itertools.product(LAYOUTS, (2, 3, 9, 10)):
            fault = tma_shim.fault(operator, case, layout, 10 * seed + shape, shape=shape, splits=splits, **wishes)
            assert fault in (None, ""), f"{case}, {layout}, {wishes}, {shape}: {fault}"
            runs += fault == ""
        assert runs >= (1 if "windows" not in wishes else 2), case


@pytest.mark.parametrize("mutation", TMA_MUTATIONS)
def test_tma_shim_sees_what_is_missing(tma_shim, mutation):
    """The shim itself: what is left out shows in one of a few runs, which are right without it."""
    halo = Case(2, 136, 6, 9, 200, 3, 3, padding=(1, 1))
    runs: list[tuple] = [
        (halo, "fprop", "channels_last", {"windows": 1, "shape": 10}),
        (halo, "fprop", "channels_last", {"windows": 0, "shape": 10}),
        (halo, "fprop", "channels_last", {"windows": 0, "shape": 2}),
    ]
    if "groups" in mutation:
        runs = [(*TMA_SHIM_CASES[18], "channels_last", {"shape": 10})]
    elif "box is read" in mutation:  # with several tiles for each warpgroup
        runs = [(Case(23, 16, 6, 9, 200, 1, 1), "fprop", "channels_last", {"shape": 10})]
    elif "phase" in mutation:
        runs = [(TMA_SHIM_CASES[2][0], "fprop", "channels_last", {"windows": 1})]
    elif "part" in mutation:
        runs = [(halo, "fprop", "channels_last", {"splits": 2, "shape": 10})]
    elif "multiplies the filter" in mutation:  # of the GPU's way
        runs = [(*TMA_SHIM_CASES[8], "channels_last", {"shape": 10})]
    elif "pack" in mutation:
        runs = [(*TMA_SHIM_CASES[8], "channels_last", {"shape": 4})]
    elif "planes of the first" in mutation:
        runs = [(TMA_SHIM_CASES[1][0], "fprop", "contiguous", {"direct": 1})]
    elif "planes" in mutation or "copies" in mutation:
        runs = [(halo, "fprop", "contiguous", {"direct": 0})]

    def are_right() -> bool:
        return all(
            tma_shim.fault(operator, case, layout, seed, **wishes) == ""
            for seed in range(1, 4)
            for case, operator, layout, wishes in runs
        )

    assert are_right()
    with mutated(tma_shim.library, TMA_MUTATIONS, mutation):
        assert not are_right()


TMA_KINDS = {
    *(
        f"{tensors}: {kind}"
        for tensors in ("planes", "pixels")
        for kind in (
            *(f"{parts}{way}" for parts in ("", "parts of ") for way in ("columns", "windows", "phases")),
            *(f"tile of 128 x {slots}" for slots in (64, 128, 192, 256)),
            *(f"tile of 64 x {slots}" for slots in (64, 128, 192, 208, 224, 232, 256)),
            *(f"{splits} parts" for splits in (1, 2, 4, 8)),
        )
    ),
    *("planes: planes as they are", "planes: parts of planes as they are", "w packed", "w as it is"),
    *("w transposed", "pixels: y by threads", "pixels: y by boxes", "groups", "merged groups", "planes to anywhere"),
    *(f"{run} {vector}" for run in ("y by", "lines of") for vector in (1, 2, 4, 8)),
}


def test_tma_plans_are_sound(tma_plans):
    """Each output once, each tap once and where the convolution says, boxes where they may be, all in shared memory."""
    planned, count = 0, 6000
    for seed, (case, operator) in enumerate(random_tma_cases(count, seed=0)):
        fault = tma_plans.fault(operator, case, seed)
        assert not fault, f"{operator} of {case}, seed {seed}: {fault}"
        planned += fault is not None
    assert planned > 0.6 * count  # others have channels or addresses that are no eights
    assert tma_plans.seen() >= TMA_KINDS


@pytest.mark.parametrize("mutation", TMA_PLAN_MUTATIONS)
def test_tma_plan_checks_see_what_is_wrong(tma_plans, mutation):
    cases = enumerate(random_tma_cases(6000, seed=0))
    with mutated(tma_plans.library, TMA_PLAN_MUTATIONS, mutation):
        assert any(tma_plans.fault(operator, case, seed) for seed, (case, operator) in cases)


@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=str)
def test_tma_estimates_grow_with_the_work(tma_plans, dtype):
    aligned, grown = [ctypes.c_uint64(0)] * 3, 0
    for number, (case, operator) in enumerate(random_tma_cases(1000, seed=1)):
        settings = {"dtype": dtype, "strides": pixel_strides(case) if number % 2 else {}}
        if tma_plans("refusal", operator, case, **settings) is not None:
            continue
        once = tma_plans("cycles", operator, case, *aligned, **settings)
        for letter in "NCK":
            double = dataclasses.replace(case, **{letter: 2 * getattr(case, letter)})
            settings["strides"] = pixel_strides(double) if number % 2 else {}
            if letter != "N" and tma_plans("refusal", operator, double, **settings) is not None:
                continue  # more channels may leave no room for a copy
            twice = tma_plans("cycles", operator, double, *aligned, **settings)
            # With as many channels as boxes want single pixels need no copy, and in channels_last filters of
            # gradients are not packed.
            single = case.H * case.W == 1 and math.prod(case.y_shape[2:]) == 1
            least = 0.5 if (single or number % 2) and getattr(case, letter) % 8 else 1
            assert twice >= least * once > 0, f"{operator} of {double}: {twice} after {once}"
            grown += twice > once
    assert grown > 1000


def test_tma_engines_describe_their_configurations(tma_plans, tma_wgrad_plans):
    """Whole and in the 320 bytes that the binding has for it."""
    told = dict.fromkeys(("tma", "tma_wgrad"), 0)
    for number, (case, operator) in enumerate(random_tma_cases(400, seed=4)):
        settings = {"dtype": DTYPES[1 + number % 2], "strides": pixel_strides(case) if number % 3 else {}}
        if tma_plans("refusal", operator, case, **settings) is None:
            text = tma_plans("describe", operator, case, **settings)
            assert re.fullmatch(
                r"(x copied, |x in planes, |)tile of (64|128) channels x (\d+ lines x \d+ columns, by windows|\d+ "
                r"pixels, by taps), x in \d stages of \d+ bytes, weights (packed, |)in \d of \d+, \d+ blocks for "
                r"\d+ tiles, [1248] of which share one, about [\d.e+-]+ Mcycles",
                text,
            ), text
            told["tma"] += 1
        if tma_wgrad_plans("refusal", "wgrad", case, **settings) is None:
            text = tma_wgrad_plans("describe", "wgrad", case, **settings)
            assert re.fullmatch(
                r"((x|dy|x and dy) copied, |)tile of (64|128) output channels x [1-4] blocks of 64 weights, \d stages "
                r"of 64 pixels and \d+ bytes, \d+ blocks for \d+ tiles in \d+ parts, about [\d.e+-]+ Mcycles",
                text,
            ), text
            told["tma_wgrad"] += 1
    assert min(told.values()) > 100
