"""All engines without a GPU, in the same tests: plans, and kernels run thread by thread."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.cases import (
    DENSE_CASES,
    DEPTHWISE_CASES,
    DTYPES,
    EXACT_CASES,
    FILLS,
    LAYOUTS,
    LEAST_TF32_WORK_IN_SHIM,
    ONE_TO_ONE_CASES,
    OPERANDS,
    OPERATOR_NUMBER,
    QUEUE_CASES,
    ROUNDING_CASES,
    VIEWS,
    Case,
    any_exponent,
    before_guard_page,
    check_bounds,
    check_exact,
    depthwise_case,
    equal,
    huge,
    in_layout,
    integers,
    make_tensors,
    margins_intact,
    named,
    normal,
    positive,
    random_depthwise_cases,
    reference,
    round_to_tf32,
    specks,
    tf32_ties,
    tiny,
    under_a_tf32_step,
    wide,
    with_margins,
    without_padding,
)
from tests.engines import (
    BF16,
    FP16,
    FP32,
    ORDERS,
    PLACES,
    PLANNED,
    SHAPES,
    TF32,
    WGMMA_SPLIT_CONFIGURATIONS,
    Emulated,
    Engine,
    Planner,
    Runs,
    of_operator,
    settings_of,
    spreads,
)
from tests.problems import (
    DILATED_CASES,
    DILATED_WGRAD_CASES,
    GATHER_CASE,
    PATCHES_CASES,
    STEM_16_BIT_FILLS,
    STEM_CONTRACTS,
    STRIDED_CASES,
    WGMMA_CASE,
    WGMMA_OPERATORS,
    cases_of_gather_plans,
    random_dilated_cases,
    random_gather_cases,
    random_mma_cases,
    random_pointwise_cases,
    random_stem_cases,
    random_strided_cases,
    random_tma_cases,
    random_wgmma_cases,
    random_wgrad_cases,
    small_wgmma_cases,
)

# ---- Plans.
# By number: four widths of a tile, of 128 or 64 channels, rightwards; the widest of both downwards, as the others have
# several rows of pixels a warpgroup. TF32 also has 128 pixels downwards, and the others with contained operands; fp32
# in full the three narrow ones of half the size. -1 is the planner's choice.
WGMMA_CONFIGURATIONS = {*range(8), 8, 12}
WGMMA_STACKED = 17
WGMMA_TF32_CONFIGURATIONS = {16, *(32 + number for number in WGMMA_CONFIGURATIONS)}
# Former faults: a last block of channels that takes fewer groups of steps than the others; x at an odd
# address, where another tile is the best, with more packed weights; rows of so many channels that 32 bits cannot count
# the bytes of a ring of them. And more tiles of output channels than blocks, so that none keeps its weights.
HARD_WGMMA_CASES = [
    Case(13, 40, 13, 513, 300, 1, 3, padding=(2, 5), dilation=(2, 3)),
    Case(13, 40, 44, 1030, 9, 3, 1, padding=(3, 2), dilation=(1, 2)),
    Case(13, 100, 4, 32, 130, 7, 6, padding=(5, 5), dilation=(2, 2)),
    Case(1, 2**20 - 16, 1, 300, 64, 1, 1),
    Case(1, 2**19 - 16, 1, 3300, 64, 1, 2, dilation=(1, 3000)),
    Case(2, 16, 5, 66, 17000, 1, 1),
]


# Engines, problems, and the least share of them that a planner takes at these addresses.
PLANS = [
    ("gather", lambda: itertools.islice(cases_of_gather_plans(), 0, None, 2), 0.9),
    ("mma", lambda: random_mma_cases(3000, seed=0), 0.9),
    ("pointwise", lambda: of_operator("fprop", random_pointwise_cases(4000, seed=0)), 0.9),
    # A third are for a GPU that it does not take.
    ("stem", lambda: of_operator("fprop", random_stem_cases(2500, seed=0)), 0.5),
    # Others have channels or addresses that are no eights. Planes in place, by clusters, are too rare otherwise.
    ("tma", lambda: [(Case(2, 512, 28, 28, 64, 1, 1), "fprop")] * 60 + [*random_tma_cases(6000, seed=0)], 0.6),
    (
        "wgmma",
        lambda: itertools.product(HARD_WGMMA_CASES * 6 + random_wgmma_cases(1200, seed=0), WGMMA_OPERATORS),
        0.5,
    ),
    ("tma_wgrad", lambda: ((case, "wgrad") for case, _ in random_tma_cases(4000, seed=0)), 0.4),
    # Planes that boxes shift are too rare otherwise.
    (
        "hopper_wgrad",
        lambda: of_operator("wgrad", [Case(16, 64, 65, 65, 128, 1, 1)] * 60 + random_wgrad_cases(1500, seed=0)),
        0.6,
    ),
]


@pytest.mark.parametrize("planner, cases, share", PLANS, indirect=["planner"], ids=[p[0] for p in PLANS])
def test_plans_are_sound(planner: Planner, cases: Callable, share: float):
    """Each output once, each term once and where the convolution says, copies where they may be, all in its memory."""
    planned = []
    for seed, (case, operator, *dtype) in enumerate(cases()):
        fault = planner.fault(operator, case, seed, *dtype)
        assert not fault, f"{operator} of {case}, {dtype}, seed {seed}: {fault}"
        planned.append(fault is not None)
    assert sum(planned) > share * len(planned)
    assert planner.unseen() == ""


# Engines, problems, settings, and by what twice the images or channels at least multiply an estimate: more channels may
# be loaded by fours where fewer were not, be stored by boxes, or fit into other tiles.
GROWTH = [
    ("gather", lambda: ((c, op) for c, op, _ in random_gather_cases(1000, seed=1) if c.groups == 1), {}, "NCK", 0.4),
    ("mma", lambda: random_mma_cases(1000, seed=1), {"tf32": False}, "NCK", 0.75),
    ("pointwise", lambda: of_operator("fprop", random_pointwise_cases(1000, seed=1)), {}, "NCK", 0.9),
    ("stem", lambda: of_operator("fprop", random_stem_cases(400, seed=1)), {"tf32": False}, "NK", 0.7),
    ("tma", lambda: random_tma_cases(1000, seed=1), {"dtype": torch.float16}, "NCK", 0.5),
    ("tma", lambda: random_tma_cases(1000, seed=1), {"layout": "channels_last", "dtype": torch.bfloat16}, "NCK", 0.5),
    ("wgmma", lambda: itertools.product(random_wgmma_cases(500, seed=1), WGMMA_OPERATORS), {}, "N", 1),
    (
        "tma_wgrad",
        lambda: ((c, "wgrad") for c, _ in random_tma_cases(1000, seed=1) if c.C % 8 == c.K % 8 == 0),
        {"dtype": torch.float16},
        "NCK",
        1,
    ),
    ("wgmma", lambda: itertools.product(random_wgmma_cases(500, seed=1), WGMMA_OPERATORS), {}, "N", 1),
    # Twice as many channels may need no copy.
    ("hopper_wgrad", lambda: of_operator("wgrad", random_wgrad_cases(100, seed=2)), {}, "NCK", 0.7),
]


@pytest.mark.parametrize("planner, cases, settings, letters, least", GROWTH, indirect=["planner"])
def test_estimates_grow_with_the_work(planner: Planner, cases: Callable, settings: dict, letters: str, least: float):
    grown = 0
    for case, operator in cases():
        if planner.refusal(operator, case, **settings) is not None:
            continue
        once = planner.cycles(operator, case, **settings)
        assert "written too far" not in planner.describes(operator, case, **settings)
        for letter in letters:
            double = dataclasses.replace(case, **{letter: 2 * getattr(case, letter)})
            contracts = {operator in one.tf32_operators(torch.float32, True) for one in (case, double)}
            if len(contracts) > 1 or planner.refusal(operator, double, **settings) is not None:
                continue  # three products are one where there is enough to multiply; or there is no room for a copy
            twice = planner.cycles(operator, double, **settings)
            assert twice >= least * once > 0, f"{operator} of {double}: {twice} after {once}"
            grown += twice > once
    assert grown > 50


# ---- Refusals: what an engine leaves to others, and what looks alike and is its own.
MMA_CASE = Case(1, 3, 56, 57, 64, 7, 7, stride=(2, 2), padding=(3, 3))
PATCHES_CASE = Case(2, 3, 32, 32, 8, 16, 16, stride=(16, 16))
POINTWISE_CASE = Case(2, 64, 9, 10, 40, 1, 1)
STEM_CASE = Case(8, 3, 224, 224, 64, 7, 7, stride=(2, 2), padding=(3, 3))
HALF = {"dtype": torch.float16}
FULL = {"tf32": False}
SIDE = 1 << 28  # positions in 32 bits
WITHIN = dataclasses.replace
REFUSALS = {
    "depthwise": [
        (depthwise_case(1, 4, 9, 9, 3, 3), "bgrad", {}, "bias"),
        (depthwise_case(1, 4, 9, 9, 3, 3), "fprop dgrad wgrad", {"dtype": torch.float64}, "float64"),
        (Case(1, 4, 9, 9, 4, 3, 3, groups=2), "fprop dgrad wgrad", {}, "input channel"),
        (depthwise_case(1, 4, 9, 9, 3, 3, times=2, stride=(1, 2)), "fprop dgrad wgrad", {}, None),
        (depthwise_case(1, 4, 9, 99, 1, 65), "fprop dgrad wgrad", {}, "64 taps"),
        (depthwise_case(1, 1, SIDE, 1, 1, 1), "fprop dgrad wgrad", {}, "image side"),
        (depthwise_case(1, 1, 900, 900, 400, 60), "fprop dgrad wgrad", {}, "shared memory"),
        (depthwise_case(1 << 29, 1, 9, 9, 3, 3, stride=(2, 2)), "dgrad", {}, "parts of images"),
    ],
    "dilated": [
        (Case(2, 3, 9, 9, 4, 3, 3, dilation=(2, 2)), "bgrad", {}, "no gradient to the bias"),
        (Case(2, 3, 9, 9, 4, 3, 3), "fprop", {}, "dilation_h greater than 1"),
        (Case(2, 3, 9, 9, 4, 3, 3, dilation=(1, 2)), "fprop", {}, "dilation_h greater than 1"),
        # Idle taps, but near ones.
        (Case(2, 3, 1, 9, 4, 3, 3, padding=(1, 1), dilation=(1, 2)), "fprop", {}, "dilation_h greater than 1"),
        (Case(2, 3, 9, 9, 4, 3, 3, padding=(4, 4), dilation=(4, 4), stride=(2, 1)), "fprop", {}, "stride_h of 1"),
        (Case(2, 3, 9, 9, 4, 3, 3, padding=(1, 1), dilation=(4, 4)), "fprop", {}, "at most the number of rows"),
        (Case(1, 3, 999, 1, 4, 2, 1, dilation=(300, 1)), "fprop", {}, "at most 256"),
        (Case(2, 3, 1, 9, 4, 2, 3, padding=(9, 0), dilation=(19, 2)), "fprop", {}, "falls into the padding"),
        *((Case(2, 3, 9, 9, 4, 3, 3, dilation=d), "wgrad", {}, None) for d in ((1, 2), (2, 1), (3, 3))),
        (Case(2, 3, 9, 9, 4, 3, 3), "wgrad", {}, "a dilation greater than 1"),
        (Case(2, 3, 9, 9, 4, 1, 3, dilation=(2, 1)), "wgrad", {}, "a dilation greater than 1"),
        (Case(1, 3, 17, 15, 4, 8, 8, dilation=(2, 2)), "wgrad", {}, None),
        (Case(1, 3, 17, 17, 4, 5, 13, padding=(0, 6), dilation=(2, 1)), "wgrad", {}, "at most 64 taps"),
        (Case(2, 3, 7, 7, 4, 3, 3, padding=(9, 9), dilation=(9, 9)), "wgrad", {}, "always falls into the padding"),
        # Outputs meet rows -1, 1 and 3 of the one row 0 by the second tap.
        (Case(1, 2, 1, 5, 3, 2, 1, (2, 1), (4, 0), (3, 1)), "wgrad", {}, "always falls into the padding"),
        (Case(2, 3, 9, 9, 4, 3, 3, dilation=(2, 2)), "wgrad", {"dtype": torch.float64}, "no other engine computes"),
    ],
    # Only what its 32-bit positions cannot number; the forward of a problem may run where a gradient does not.
    "direct": [
        (Case(1, 1, SIDE - 1, 1, 1, 1, 1), "fprop dgrad", {}, None),
        (Case(1, 1, SIDE, 1, 1, 1, 1), "fprop dgrad", {}, "image side"),
        (Case(1, 1, 1 << 14, 1 << 14, 1, 1 << 14, 1 << 14), "fprop dgrad", {}, "filter"),
        (Case(1, 64, 12001, 6001, 64, 1, 1, stride=(6000, 6000), groups=64), "fprop", {}, None),
        (Case(1, 64, 12001, 6001, 64, 1, 1, stride=(6000, 6000), groups=64), "dgrad", {}, "stride"),
        (Case(1, 8, 12001, 6001, 8, 1, 1, stride=(6000, 6000), groups=8), "fprop dgrad", {}, None),
    ],
    "gather": [
        (WITHIN(GATHER_CASE, N=12), "fprop", {}, None),
        (WITHIN(GATHER_CASE, N=12), "fprop", FULL, "full float32"),
        (GATHER_CASE, "fprop", HALF | FULL, None),
        (WITHIN(GATHER_CASE, N=1), "fprop", {}, "full float32"),  # by uses_tf32()
        (GATHER_CASE, "fprop", {"dtype": torch.float64}, "float64"),
        (GATHER_CASE, "wgrad bgrad", HALF, "outputs and input gradients only"),
        (GATHER_CASE, "dgrad", HALF, "stride 1"),
        (Case(1, 16, 3, 80, 16, 3, 3, stride=(2, 1)), "dgrad", HALF, None),  # one row: no stride in it
        (Case(1, 7, 80, 80, 16, 1, 1), "fprop dgrad", HALF, "8 input channels"),
        (Case(1, 16, 80, 80, 14, 1, 1, groups=2), "fprop", HALF, "8 output channels"),
        (Case(1, 16, 300, 300, 16, 3, 3, dilation=(100, 100)), "fprop", HALF, "does not fit"),
        *((GATHER_CASE, "fprop", HALF | {"capability": capability}, "Hopper") for capability in (80, 100, 0)),
    ],
    "mma": [
        *((MMA_CASE, "fprop", {"capability": capability}, None) for capability in (80, 90, 120)),
        *((MMA_CASE, "fprop", {"capability": capability}, "Ampere") for capability in (75, 0)),
        (MMA_CASE, "fprop", HALF, "float32 only"),
        (MMA_CASE, "dgrad", {}, "stride 1"),
        (MMA_CASE, "wgrad bgrad", {}, "outputs and input gradients only"),
        (Case(1, 16, 3, 80, 16, 3, 3, stride=(2, 1)), "dgrad", {}, None),  # one row: no stride in it
        (Case(1, 14, 9, 9, 16, 3, 3, groups=2), "fprop", {}, "groups of at least 8"),
        (Case(1, 16, 9, 9, 14, 3, 3, groups=2), "fprop", {}, "groups of at least 8"),
        (Case(1, 16, 900, 900, 16, 3, 3, dilation=(100, 100)), "fprop", {}, "does not fit"),
    ],
    "patches": [
        (PATCHES_CASE, "fprop", {}, None),
        (PATCHES_CASE, "dgrad wgrad", {}, "outputs only"),
        (WITHIN(PATCHES_CASE, stride=(16, 15)), "fprop", {}, "a stride equal to the filter size"),
        (WITHIN(PATCHES_CASE, padding=(0, 8)), "fprop", {}, "a stride equal to the filter size"),
        (WITHIN(PATCHES_CASE, R=1, S=1, stride=(1, 1)), "fprop", {}, "larger than 1x1"),
        (WITHIN(PATCHES_CASE, C=6, groups=2), "fprop", {}, "one group"),
        (Case(1 << 11, 3, 224, 224, 8, 16, 16, stride=(16, 16)), "fprop", {}, "1 GB"),
    ],
    "pointwise": [
        *((POINTWISE_CASE, "fprop", {"capability": capability}, None) for capability in (80, 90, 120)),
        *((POINTWISE_CASE, "fprop", {"capability": capability}, "Ampere") for capability in (75, 0)),
        (POINTWISE_CASE, "fprop", HALF, "float32 only"),
        (POINTWISE_CASE, "dgrad wgrad bgrad", {}, "outputs only"),
        (WITHIN(POINTWISE_CASE, stride=(3, 2), dilation=(5, 7)), "fprop", {}, None),
        (WITHIN(POINTWISE_CASE, R=3), "fprop", {}, "1x1 filters only"),
        (WITHIN(POINTWISE_CASE, groups=2), "fprop", {}, "one group only"),
        (WITHIN(POINTWISE_CASE, padding=(0, 1)), "fprop", {}, "no padding"),
        (POINTWISE_CASE, "fprop", {"strides": {"x": (2**29, 2**24, 2**10, 1)}}, "fewer than 2^30"),
        (POINTWISE_CASE, "fprop", {"strides": {"dy": (1, 2**26, 1, 1)}}, "fewer than 2^30"),
        (Case(2**21, 2, 32, 32, 2, 1, 1), "fprop", {"strides": {"x": (0, 1, 0, 0), "dy": (0, 1, 0, 0)}}, "2^30"),
        (Case(1, 64, 2**12, 2**11, 64, 1, 1), "fprop", {}, None),
        (Case(1, 64, 2**13, 2**12, 64, 1, 1), "fprop", {}, "fewer than 2^30"),
    ],
    "stem": [
        (STEM_CASE, "fprop", {}, None),
        *((STEM_CASE, "fprop", {"capability": capability}, "Hopper") for capability in (0, 80, 89, 100, 120)),
        *((STEM_CASE, "fprop", {"dtype": dtype}, None) for dtype in DTYPES[1:3]),
        (STEM_CASE, "fprop", {"dtype": torch.float64}, "no float64"),
        (STEM_CASE, "wgrad bgrad", {}, "outputs and input gradients only"),
        (STEM_CASE, "dgrad", {}, "1x1 filters without a stride"),
        (Case(2, 64, 9, 9, 7, 1, 1), "dgrad", {}, None),
        (Case(2, 64, 9, 9, 8, 1, 1), "dgrad", {}, "7 input channels"),
        (Case(2, 64, 9, 9, 2, 1, 1, padding=(0, 1)), "dgrad", {}, "stride or padding"),
        (Case(2, 64, 9, 9, 2, 1, 1, stride=(1, 2)), "dgrad", {}, "stride or padding"),
        (WITHIN(STEM_CASE, C=7), "fprop", {}, None),
        (WITHIN(STEM_CASE, C=8), "fprop", {}, "7 input channels"),
        (WITHIN(STEM_CASE, C=6, groups=2), "fprop", {}, "one group only"),
        (WITHIN(STEM_CASE, dilation=(3, 5)), "fprop", {}, None),
        (WITHIN(STEM_CASE, R=16, S=16, stride=(16, 16)), "fprop", {}, "no tile"),
        (Case(1, 1, 20000, 20000, 1, 16384, 16384), "fprop", {}, "no tile"),
        (Case(1, 3, 9, 9, 64, 1, 1, dilation=(2**20, 2**20)), "fprop", {}, None),
        (Case(2**28, 1, 8, 8, 40, 3, 3, padding=(1, 1)), "fprop", {}, None),
        (Case(2**31, 1, 8, 8, 40, 3, 3, padding=(1, 1)), "fprop", {}, "no tile"),
    ],
    "strided": [
        (STRIDED_CASES[0], "fprop", {}, "input gradients only"),
        (Case(1, 8, 9, 9, 8, 3, 3), "dgrad", {}, "a stride greater than 1 along an axis with more than one output"),
        (Case(1, 8, 9, 9, 8, 9, 9, stride=(2, 2)), "dgrad", {}, "a stride greater than 1"),  # one output
        (Case(1, 8, 30, 30, 8, 3, 3, stride=(5, 4)), "dgrad", {}, "at most 16 phases, stride_h times stride_w"),
    ],
    "wgmma": [
        (WGMMA_CASE, "fprop", {}, None),
        (WGMMA_CASE, "fprop", FULL, None),
        (Case(1, 40, 30, 42, 40, 3, 3), "fprop", {}, "2^25 multiply-adds"),
        (Case(1, 40, 66, 66, 23, 3, 3), "fprop", {}, None),
        (Case(1, 40, 66, 66, 22, 3, 3), "dgrad", FULL, "2^25 multiply-adds"),
        (Case(8, 63, 130, 202, 65, 1, 1), "fprop", FULL, "64 terms"),
        (Case(1, 40, 30, 40, 40, 3, 3), "fprop", HALF | FULL, None),
        (WGMMA_CASE, "fprop", {"dtype": torch.float64}, "float64"),
        (WGMMA_CASE, "wgrad bgrad", HALF, "outputs and input gradients only"),
        (Case(1, 16, 80, 80, 16, 3, 3, stride=(2, 1)), "fprop", HALF, "stride 1"),
        (Case(1, 16, 3, 80, 16, 3, 3, stride=(2, 1)), "fprop", HALF, None),  # one row: no stride in it
        (Case(1, 16, 80, 33, 16, 3, 3), "fprop", HALF, "32 columns"),
        (Case(1, 16, 80, 31, 16, 3, 3, padding=(0, 2)), "dgrad", HALF, "32 columns"),
        (Case(1, 7, 80, 80, 16, 3, 3), "fprop", HALF, "8 input channels"),
        (Case(1, 7, 80, 80, 16, 3, 3), "dgrad", HALF, "8 output channels"),
        (Case(1, 16, 80, 80, 14, 3, 3, groups=2), "fprop", HALF, "8 output channels"),
        (Case(1, 16, 80, 80, 14, 3, 3, groups=2), "dgrad", HALF, "8 input channels"),
        (Case(1, 16, 300, 300, 16, 3, 3, dilation=(100, 100)), "fprop", HALF, "does not fit"),
        *((WGMMA_CASE, "fprop", HALF | {"capability": capability}, "Hopper") for capability in (0, 80, 89, 100)),
    ],
    "hopper_wgrad": [
        (Case(3, 12, 12, 12, 20, 3, 3, padding=(1, 1)), "wgrad", {}, None),
        *((Case(3, 12, 12, 12, 20, 3, 3), "wgrad", {"capability": other}, "Hopper") for other in (80, 100, 0)),
        (Case(1, 8, 9, 9, 8, 3, 3), "fprop", {}, "gradients to weights only"),
        (Case(1, 8, 9, 9, 8, 3, 3), "wgrad", {"dtype": torch.float64}, "no float64"),
        (Case(2, 8, 32768, 32768, 8, 1, 1), "wgrad", {}, "too many pixels or weights"),
        (Case(1, 32768, 1, 1, 65536, 1, 1), "wgrad", {}, "too many pixels or weights"),
        (Case(1, 1, 2, 2, 4, 2**16, 2**16, padding=(2**15, 2**15)), "wgrad", HALF, "too many pixels or weights"),
    ],
}


@pytest.mark.parametrize("planner", sorted(REFUSALS.keys() & PLANNED.keys()), indirect=True)
def test_refusals_say_what_is_required(planner: Planner):
    check_refusals(planner)


@pytest.mark.parametrize("emulated", sorted(REFUSALS.keys() - PLANNED.keys()), indirect=True)
def test_refusals_of_simple_engines_say_what_is_required(emulated: Emulated):
    check_refusals(emulated)


def check_refusals(handle: Engine) -> None:
    for case, operators, settings, text in REFUSALS[handle.engine]:
        for operator in operators.split():
            refusal = handle.refusal(operator, case, **settings)
            assert (refusal is None) == (text is None), f"{operator} of {case}, {settings}: {refusal}"
            assert text is None or text in refusal


# ---- Kernels of engines that synchronise by __syncthreads alone.
# Few channels at strides of 1 and 2: each filter and number of channels; tiles that are full and not, rows of dx of
# whole 16 bytes and not, paddings above the usual one, rows and columns that no tap meets.
STEM_GRADIENTS = [
    Case(2, 3, 34, 67, 10, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(1, 1, 40, 64, 8, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(1, 4, 9, 70, 17, 4, 4, stride=(2, 2), padding=(1, 3)),
    Case(2, 3, 33, 64, 3, 5, 5, stride=(2, 2), padding=(2, 0)),
    Case(1, 4, 12, 31, 9, 7, 7, stride=(2, 2), padding=(1, 5)),
    Case(1, 3, 35, 20, 4, 3, 3, stride=(2, 2), padding=(3, 1)),
    Case(1, 1, 8, 129, 5, 5, 5, stride=(2, 2), padding=(4, 2)),
    Case(2, 3, 20, 24, 12, 4, 4, stride=(2, 2), padding=(1, 1)),
    Case(2, 3, 18, 67, 10, 3, 3, padding=(1, 1)),
    Case(1, 1, 33, 64, 11, 7, 7, padding=(3, 0)),
    Case(1, 4, 9, 70, 17, 5, 5, padding=(0, 4)),
    Case(2, 3, 16, 9, 8, 4, 4, padding=(2, 1)),
]
SIMPLE = [
    ("direct", EXACT_CASES, set(OPERATOR_NUMBER), DTYPES[:1]),
    ("direct", DENSE_CASES[:10] + DEPTHWISE_CASES[:5], set(OPERATOR_NUMBER), DTYPES[1:]),
    ("direct", STEM_GRADIENTS, {"dgrad"}, DTYPES[:3]),
    ("depthwise", ONE_TO_ONE_CASES, {"fprop", "dgrad", "wgrad"}, DTYPES[:3]),
    ("depthwise", random_depthwise_cases(80, seed=0), {"wgrad"}, DTYPES[:3]),
    ("dilated", DILATED_CASES, {"fprop"}, DTYPES[:1]),
    ("dilated", random_dilated_cases(150, seed=0), set(), DTYPES[:1]),
    ("dilated", DILATED_WGRAD_CASES, {"wgrad"}, DTYPES[:3]),
    ("patches", PATCHES_CASES, {"fprop"}, DTYPES[:3]),
    ("strided", STRIDED_CASES, {"dgrad"}, DTYPES[:2]),
    ("strided", random_strided_cases(100, seed=0), set(), DTYPES[:1]),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("emulated, cases, operators, dtypes", SIMPLE, indirect=["emulated"])
def test_exact(emulated: Emulated, cases: Sequence[Case], operators: set[str], dtypes: list[torch.dtype], layout: str):
    """Integers, in every operator that the engine takes."""
    taken = 0
    for number, case in enumerate(cases):
        for dtype in dtypes if operators else [dtypes[number % len(dtypes)]]:
            tensors = in_layout(make_tensors(case, dtype, integers), layout)
            if number % 4 == 0:
                del tensors["bias"]
            results = emulated(case, tensors)
            assert set(results) >= operators, case
            check_exact(case, results, tensors)
            taken += bool(results)
    assert taken > len(cases) // 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dilated_writes_weight_gradients_of_any_strides(dilated_shim, layout):
    """Each tap is a part, which may write nothing but its own weights."""
    cases = [*DILATED_WGRAD_CASES, *random_dilated_cases(150, seed=1)]
    faults = [dilated_shim.fault("wgrad", case, layout, seed, gaps=seed % 2 == 0) for seed, case in enumerate(cases)]
    assert {*faults} == {None, ""}
    assert faults.count("") > 40
    described = dilated_shim.describes("wgrad", DILATED_WGRAD_CASES[0])
    assert described.startswith("9 of 3x3 taps in 9 parts, the first of 3 x 3 rows by hopper_wgrad: ")


PADDING_CASES = {
    "direct": [
        Case(2, 2, 9, 11, 2, 3, 3, padding=(1, 1), groups=2),
        Case(1, 2, 9, 11, 2, 7, 7, padding=(3, 4), groups=2),
        Case(1, 2, 9, 12, 2, 3, 3, stride=(2, 1), padding=(1, 1), groups=2),
        Case(1, 2, 9, 12, 2, 3, 2, padding=(2, 1), dilation=(2, 3), groups=2),
    ],
    "depthwise": [
        depthwise_case(5, 70, 9, 11, 3, 3, padding=(1, 1)),
        depthwise_case(1, 2, 9, 11, 7, 7, padding=(3, 4)),
        depthwise_case(5, 70, 9, 12, 3, 3, stride=(2, 1), padding=(1, 1)),
        depthwise_case(1, 2, 9, 12, 3, 2, padding=(2, 1), dilation=(2, 3)),
        depthwise_case(1, 2, 9, 12, 9, 11, padding=(4, 5)),
        depthwise_case(2, 6, 3, 921, 3, 3, padding=(1, 1)),
    ],
}
PADDING_RUNS = [
    *(
        (engine, case, layout, torch.float32)
        for engine, of in PADDING_CASES.items()
        for case in of
        for layout in LAYOUTS
    ),
    *(("depthwise", case, "channels_last", torch.float16) for case in QUEUE_CASES[::4]),
]


def skips_padding(
    emulated: Emulated, case: Case, layout: str, dtype: torch.dtype, infinite: str, corners: Sequence[int] = (0, -1)
) -> bool:
    """Whether an Inf in w, x or dy, in these corners, is not multiplied by the zeros of padding."""
    tensors = make_tensors(case, dtype, lambda shape, generator: torch.rand(shape, generator=generator) + 0.5)
    tensors.pop("bias")
    for corner in corners:
        tensors[infinite][..., corner, corner] = math.inf
    tensors = in_layout(tensors, layout)
    expected = without_padding(case, {name: tensor.float() for name, tensor in tensors.items()})
    results, bound = emulated(case, tensors), 1e-5 if dtype == torch.float32 else 1e-2
    assert not any(expected[operator].isnan().any() for operator in expected.keys() & results)
    return bool(results) and all(
        torch.allclose(results[operator].float(), expected[operator].reshape(results[operator].shape), bound, bound)
        for operator in expected.keys() & results
    )


@pytest.mark.parametrize("infinite", ["w", "x", "dy"])
@pytest.mark.parametrize("emulated, case, layout, dtype", PADDING_RUNS, indirect=["emulated"], ids=str)
def test_skips_padding(emulated: Emulated, case: Case, layout: str, dtype: torch.dtype, infinite: str):
    """As PyTorch does in depthwise convolutions; an Inf multiplied by the zero of padding would be NaN."""
    assert skips_padding(emulated, case, layout, dtype, infinite)


# ---- Kernels of the others: settings in turn, the first one from a turn on that there is a plan of.
# Few channels and several chunks of them, stems, points, small images with padding and without, lines longer than a
# tile, ragged channels, groups. Rows of x in fours (36 columns) and not, with an odd padding and with a stride.
MMA_SHIM_CASES = [
    (Case(2, 3, 19, 36, 20, 7, 7, stride=(2, 2), padding=(3, 3)), "fprop"),
    (Case(1, 40, 3, 36, 17, 3, 3, padding=(1, 1)), "fprop"),
    (Case(2, 36, 9, 9, 24, 1, 1), "fprop"),
    (Case(1, 64, 6, 6, 40, 3, 3), "fprop"),
    (Case(2, 20, 6, 6, 24, 3, 3, padding=(1, 1)), "fprop"),
    (Case(1, 5, 2, 300, 35, 2, 3, padding=(0, 2), dilation=(1, 2)), "fprop"),
    (Case(2, 16, 13, 12, 18, 1, 1, stride=(2, 3), padding=(0, 1)), "fprop"),
    (Case(1, 24, 9, 20, 36, 1, 3, stride=(2, 1), groups=2), "fprop"),
    (Case(1, 17, 5, 32, 24, 3, 3, padding=(1, 1)), "dgrad"),
    (Case(1, 16, 7, 7, 36, 3, 2, padding=(0, 1), groups=2), "dgrad"),
]
# Stages of 16, 32 and 64 terms; rows and pixels that fill tiles and do not, of one image and several.
POINTWISE_STAGED_CASES = [
    Case(2, 64, 5, 8, 40, 1, 1), Case(1, 64, 8, 16, 64, 1, 1), Case(3, 128, 2, 10, 33, 1, 1),
    Case(1, 128, 12, 12, 100, 1, 1), Case(1, 256, 12, 12, 35, 1, 1),
]  # fmt: skip
# One pixel, one channel, one term, a tile and one more or less of each, images whose pixels come by fours and not,
# strides, and several steps: as many as slices and blocks, fewer, and more.
POINTWISE_SHIM_CASES = [
    Case(2, 16, 4, 8, 32, 1, 1), Case(1, 48, 6, 6, 33, 1, 1), Case(3, 32, 3, 5, 31, 1, 1),
    Case(2, 48, 9, 8, 12, 1, 1, stride=(2, 1)), Case(1, 64, 7, 15, 40, 1, 1, stride=(2, 2)),
    Case(1, 31, 4, 16, 20, 1, 1), Case(5, 112, 1, 1, 10, 1, 1), Case(1, 1, 5, 7, 2, 1, 1),
    Case(1, 132, 2, 2, 8, 1, 1),
]  # fmt: skip
# Bits of rows, bits of splits and slices; in TF32 a block has up to 16 warps, in full 8. And the planner's own.
POINTWISE_SHIM_PLANS = [
    (0, 0, 1), (0, 0, 4), (1, 0, 2), (2, 0, 1), (0, 1, 1), (0, 2, 2), (1, 3, 1), (2, 1, 2), (0, 0, 8), (0, 3, 1),
]  # fmt: skip
POINTWISE_SETTINGS = [
    {"tf32": tf32, "staged": 0, "row_bits": rows, "split_bits": splits, "slices": slices}
    for tf32, (rows, splits, slices) in itertools.product((True, False), POINTWISE_SHIM_PLANS)
] + [{"tf32": True, "staged": 0, "row_bits": 0, "split_bits": 0, "slices": 16}, {"tf32": True}, {"tf32": False}]
# Stems of networks in small, one channel and seven, quads that are full and not, dilation, rows that are longer than a
# box, images of one pixel; rows of y that boxes can store, alone or in runs, and others.
STEM_SHIM_CASES = [
    Case(2, 3, 19, 36, 40, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(2, 3, 21, 32, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(1, 4, 9, 32, 33, 3, 3, padding=(1, 1)),
    Case(3, 2, 12, 12, 24, 3, 3),
    Case(2, 3, 16, 24, 70, 4, 4, stride=(4, 4)),
    Case(1, 5, 3, 300, 35, 2, 3, padding=(0, 2), dilation=(1, 2)),
    Case(2, 7, 8, 9, 20, 1, 1),
    Case(3, 1, 28, 28, 8, 5, 5, padding=(2, 2)),
    Case(1, 3, 23, 30, 100, 11, 11, stride=(4, 4), padding=(2, 2)),
    Case(5, 3, 1, 1, 130, 3, 2, padding=(1, 1)),
]
# Tiles for boxes of rows of y, and for runs; any (0).
STEM_TILES = [(0, 0, 0), (64, 3, 16), (64, 2, 32), (0, 8, 10), (64, 0, 0), (0, 4, 16), (32, 0, 0)]
STEM_SETTINGS = [
    {"dtype": dtype, "tf32": tf32, "tile_k": tile_k, "tile_p": tile_p, "tile_q": tile_q}
    for (tile_k, tile_p, tile_q), (dtype, tf32) in itertools.product(STEM_TILES, STEM_CONTRACTS)
    if tile_k != 32 or (dtype, tf32) != (torch.float32, True)  # one product has the larger tiles only
]
# Several blocks of channels, ragged ones, one and two tiles of output channels; points and pixels left out; halos, a
# dilation, phases of a stride of 2, filters with sides of 2; images of one pixel, lines longer than a tile.
TMA_SHIM_CASES = [
    (Case(2, 72, 6, 9, 136, 3, 3, padding=(1, 1)), "fprop"),
    (Case(3, 136, 5, 8, 40, 1, 1), "fprop"),
    (Case(2, 64, 9, 12, 64, 3, 3, stride=(2, 2), padding=(1, 1)), "fprop"),
    (Case(1, 8, 11, 13, 24, 5, 3, stride=(2, 2), padding=(2, 0)), "fprop"),
    (Case(2, 24, 9, 10, 72, 3, 3, padding=(2, 3), dilation=(2, 3)), "fprop"),
    (Case(1, 16, 3, 270, 8, 2, 2), "fprop"),
    (Case(5, 16, 1, 1, 8, 3, 3, padding=(1, 1)), "fprop"),
    (Case(2, 24, 7, 8, 72, 3, 3, padding=(1, 1)), "dgrad"),
    (Case(3, 16, 4, 4, 72, 3, 3, stride=(2, 2)), "fprop"),
    (Case(3, 16, 3, 9, 8, 1, 1, stride=(8, 2)), "fprop"),
    (Case(2, 72, 7, 9, 19, 3, 3, padding=(1, 1)), "fprop"),
    (Case(5, 24, 6, 7, 131, 1, 1), "fprop"),
    # Groups: merged, of one block and of several, the last of them in part; more outputs than inputs; as they are.
    (Case(2, 192, 6, 9, 192, 3, 3, padding=(1, 1), groups=12), "fprop"),
    (Case(2, 80, 7, 8, 160, 3, 3, stride=(2, 2), padding=(1, 1), groups=5), "fprop"),
    (Case(2, 72, 7, 9, 72, 3, 3, padding=(1, 1), groups=9), "dgrad"),
    (Case(2, 128, 6, 8, 256, 1, 1, groups=2), "fprop"),
    # As many groups as begin where a box can, at multiples of 8 channels, of one block and of several.
    (Case(1, 72, 6, 8, 120, 3, 3, padding=(1, 1), groups=6), "fprop"),
    (Case(2, 96, 5, 7, 96, 3, 2, padding=(1, 0), groups=8), "dgrad"),
    (Case(1, 24, 7, 9, 256, 3, 3, groups=8), "fprop"),
    (Case(2, 24, 6, 7, 40, 3, 3, padding=(1, 1), groups=2), "fprop"),
    # Tiles of fewer channels, for merged groups and for one; the last of them in part.
    (Case(2, 72, 6, 9, 72, 3, 3, padding=(1, 1), groups=3), "fprop"),
    (Case(1, 80, 5, 8, 100, 2, 3, stride=(2, 1), groups=5), "fprop"),
    (Case(2, 120, 5, 6, 48, 3, 3, padding=(1, 1), groups=3), "dgrad"),
    # Phases of dx: with one to four taps, of different sizes; strides of one axis; dilation; groups.
    (Case(2, 136, 9, 12, 72, 3, 3, stride=(2, 2), padding=(1, 1)), "dgrad"),
    (Case(2, 72, 10, 9, 72, 4, 1, stride=(3, 1)), "dgrad"),
    (Case(1, 24, 11, 13, 40, 5, 4, stride=(2, 2), padding=(2, 0)), "dgrad"),
    (Case(2, 16, 8, 11, 72, 2, 3, stride=(2, 1), padding=(1, 2)), "dgrad"),
    (Case(1, 16, 12, 14, 24, 3, 3, stride=(1, 2), padding=(2, 2), dilation=(2, 3)), "dgrad"),
    (Case(2, 128, 6, 7, 128, 3, 3, stride=(2, 2), padding=(1, 1), groups=2), "dgrad"),
    (Case(3, 24, 1, 5, 72, 3, 3, stride=(2, 2), padding=(2, 0)), "dgrad"),
]
# Clusters of blocks, each with a part of the reduction.
TMA_PARTS_CASES = [
    (Case(1, 136, 5, 7, 72, 3, 3, padding=(1, 1)), "fprop"),
    (Case(2, 520, 4, 6, 136, 1, 1), "fprop"),
    (Case(1, 40, 5, 6, 520, 1, 3, padding=(0, 1)), "dgrad"),
]
# Ragged channels on both sides, a stride, a dilation, points, images of one pixel.
TMA_WGRAD_SHIM_CASES = [
    Case(2, 24, 7, 9, 72, 3, 3, padding=(1, 1)),
    Case(3, 136, 5, 6, 136, 1, 1),
    Case(2, 8, 12, 11, 16, 5, 3, stride=(2, 3), padding=(2, 1)),
    Case(1, 72, 10, 10, 64, 2, 3, padding=(2, 0), dilation=(3, 2)),
    Case(70, 16, 1, 1, 8, 1, 1),
    Case(3, 72, 9, 4, 8, 3, 3, stride=(2, 2), padding=(1, 0)),
    Case(3, 16, 3, 9, 8, 1, 1, stride=(8, 2)),
]
# Several groups a block and one, a group divided among blocks, channels that copies take and do not, many units.
MMA_WGRAD_CASES = [
    Case(2, 24, 9, 11, 24, 3, 3, padding=(1, 1), groups=3), Case(3, 64, 7, 7, 64, 3, 3, padding=(1, 1), groups=16),
    Case(1, 96, 6, 20, 96, 3, 3, stride=(2, 2), padding=(1, 1), groups=2), Case(2, 15, 8, 9, 10, 1, 1, groups=5),
    Case(1, 72, 5, 8, 80, 3, 3, padding=(1, 1)), Case(2, 48, 10, 12, 48, 5, 4, dilation=(1, 2), groups=2),
    Case(1, 32, 8, 8, 128, 2, 2, stride=(2, 3), groups=4), Case(5, 24, 4, 4, 32, 1, 1, stride=(2, 1), groups=8),
]  # fmt: skip
# Ragged channels on both sides, groups, few input channels, strides, dilations, points, filters of several blocks of
# taps and of one, images of one pixel, strips of rows.
HOPPER_WGRAD_CASES = [
    Case(3, 40, 7, 7, 72, 3, 3, padding=(1, 1)), Case(2, 9, 5, 40, 17, 3, 2, padding=(1, 0)),
    Case(5, 136, 5, 6, 130, 1, 1), Case(3, 20, 9, 10, 24, 1, 1, stride=(2, 2), padding=(1, 0)),
    Case(2, 10, 15, 14, 12, 5, 4, stride=(2, 3), padding=(2, 1), dilation=(1, 2)),
    Case(2, 32, 9, 10, 140, 3, 3, padding=(1, 1), groups=2), Case(1, 4, 13, 20, 9, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(1, 16, 20, 20, 9, 3, 3, dilation=(7, 4)), Case(2, 24, 8, 12, 12, 1, 9, padding=(0, 4), groups=3),
    Case(70, 16, 1, 1, 8, 1, 1), Case(2, 8, 10, 12, 20, 2, 2, stride=(3, 3)),
    Case(3, 16, 8, 1, 12, 1, 1, stride=(1, 3)),
    Case(2, 12, 15, 15, 20, 3, 3, padding=(1, 1)), Case(2, 8, 11, 10, 12, 3, 2, padding=(1, 1)),
    Case(1, 36, 17, 17, 8, 3, 3, stride=(2, 2), padding=(1, 1)),
]  # fmt: skip
# Few input channels, of which taps become more: all of an axis or blocks of them.
HOPPER_WGRAD_STEMS = [
    Case(2, 3, 9, 11, 9, 3, 3, stride=(2, 2), padding=(1, 1)), Case(2, 3, 8, 12, 70, 4, 4, stride=(4, 4)),
    Case(1, 4, 13, 20, 9, 7, 7, stride=(2, 2), padding=(3, 3)), Case(3, 2, 12, 14, 20, 3, 2, padding=(1, 1)),
    Case(2, 1, 10, 19, 12, 5, 4, stride=(1, 3), padding=(2, 0), dilation=(2, 1)),
    Case(2, 7, 9, 17, 8, 3, 5, stride=(2, 2), padding=(0, 4)), Case(2, 5, 6, 7, 10, 6, 7, stride=(3, 2)),
    Case(1, 3, 30, 31, 12, 11, 9, stride=(3, 4), padding=(2, 1)),
]  # fmt: skip
HOPPER_WGRAD_LINES = [
    Case(5, 136, 5, 6, 130, 1, 1), Case(2, 72, 9, 12, 40, 1, 1), Case(70, 16, 1, 1, 8, 1, 1),
    Case(3, 40, 7, 7, 72, 1, 1), Case(3, 260, 4, 10, 24, 1, 1), Case(2, 16, 12, 15, 20, 1, 1),
    Case(3, 64, 7, 9, 96, 1, 1), Case(2, 128, 8, 8, 160, 1, 1), Case(2, 72, 11, 9, 68, 1, 1, stride=(3, 1)),
    Case(3, 20, 9, 10, 24, 1, 1, stride=(2, 2), padding=(1, 0)),
    Case(2, 68, 8, 9, 64, 1, 1, stride=(1, 2), padding=(0, 2)),
]  # fmt: skip
WGMMA_SHIM_CASES = [
    (case, operator) for case, operator, _ in small_wgmma_cases(110, seed=0) if case.multiply_adds < 1 << 23
]
# Weights that are streamed, and x that boxes can load: whole chunks and rests of one row, of several, of several steps;
# rests alone; a last block of channels that is not full; blocks of channels; groups.
WGMMA_CHUNK_CASES = [
    (Case(1, 64, 4, 264, 128, 3, 3), "fprop"),
    (Case(1, 64, 6, 264, 128, 4, 3, padding=(1, 1)), "fprop"),
    (Case(2, 100, 4, 132, 72, 3, 3, padding=(0, 3)), "dgrad"),
    (Case(1, 120, 4, 68, 128, 3, 3, padding=(1, 2)), "fprop"),
    (Case(1, 128, 3, 140, 256, 3, 3, padding=(0, 1), groups=2), "fprop"),
]
# Rows of taps in one product: several tiles one below the other, odd numbers of rows, two images, groups, tiles of
# channels (of 16 bits), rows by single values, and rings that are shorter than the first window.
WGMMA_STACKED_CASES = [
    (Case(2, 24, 7, 70, 16, 3, 3, padding=(1, 1)), "fprop"),
    (Case(1, 9, 11, 300, 24, 3, 2, padding=(0, 1)), "dgrad"),
    (Case(1, 40, 9, 65, 20, 3, 5, padding=(2, 0), dilation=(1, 2)), "fprop"),
    (Case(2, 32, 6, 50, 18, 3, 1, groups=2), "dgrad"),
    (Case(1, 128, 4, 258, 9, 3, 3), "fprop"),
]
WGMMA_SETTINGS = [
    *settings_of(FP16, TF32, configuration=[-1, *sorted(WGMMA_CONFIGURATIONS)]),
    *settings_of(FP16, configuration=[WGMMA_STACKED]),
    *settings_of(TF32, TF32, configuration=sorted(WGMMA_TF32_CONFIGURATIONS)),
    *settings_of(FP32, configuration=[-1, *sorted(WGMMA_SPLIT_CONFIGURATIONS)]),
]
# Layouts of x, dy and dw.
X_AND_DY_LAYOUTS = [
    ("contiguous", "contiguous", "contiguous"),
    ("channels_last", "channels_last", "channels_last"),
    ("contiguous", "channels_last", "contiguous"),
    ("channels_last", "contiguous", "contiguous"),
    ("contiguous", "contiguous", "channels_last"),
    ("channels_last", "channels_last", "contiguous"),
]
EXACT_RUNS = {
    "mma": [
        Runs(
            MMA_SHIM_CASES,
            4,
            settings_of(FP32, TF32, shape=range(5), hopper=(1, 0)),
            {"x_copies": {*range(5)}, "w_copies": {*range(4)}},
        ),
        Runs([(Case(1, 512, 3, 5, 20, 1, 1), "fprop")], 4, settings_of(FP32, shape=(1,), splits=(2, 4))),
    ],
    "pointwise": [
        Runs(
            of_operator("fprop", POINTWISE_SHIM_CASES),
            12,
            POINTWISE_SETTINGS,
            {"loads": {*range(4)}, "out_vector": {1, 4}},
        ),
        Runs(
            of_operator("fprop", POINTWISE_STAGED_CASES),
            4,
            settings_of(TF32, staged=(1,), row_bits=(0, 1), shift=(0,)),
            {"stage_terms": {16, 32, 64}},
            LAYOUTS[:1],
        ),
    ],
    "stem": [
        Runs(of_operator("fprop", STEM_SHIM_CASES), 8, STEM_SETTINGS, {"x_loads": {0, 1, 2}, "y_stores": {0, 1, 2}}),
        Runs(
            [(Case(2, 20, 7, 8, 2, 1, 1), "dgrad"), (Case(1, 64, 5, 16, 7, 1, 1), "dgrad")],
            16,
            settings_of(FP32, TF32, FP16, BF16, tile_k=(0, 64)),
            {"x_loads": {1, 2}, "y_stores": {0, 1}},
        ),
    ],
    "tma": [
        Runs(
            TMA_SHIM_CASES,
            6,
            settings_of(FP16, shape=range(11), windows=(0, 1), direct=(0,))
            + settings_of(FP16, shape=(0, 2, 4, 9), direct=(1,), shift=(0,))
            + settings_of(FP16, shape=(2, 3, 9, 10), gaps=(True,)),
            {"way": {0, 1, 2, 4, 5}},
        ),
        Runs(TMA_PARTS_CASES, 12, settings_of(FP16, shape=(2, 3, 9, 10), splits=(2, 4, 8))),
        # Planes and weights as they are; copies of x with weights as they are.
        Runs(
            [(Case(3, 136, 5, 8, 40, 1, 1), "dgrad"), (Case(2, 72, 12, 12, 70, 1, 1), "dgrad"),
             (Case(2, 128, 6, 8, 48, 1, 1, groups=2), "fprop")],
            6,
            settings_of(FP16, shape=(0, 2, 4, 9), direct=(1,), splits=(1,), shift=(0,))
            + settings_of(FP16, shape=(2, 9), direct=(1,), splits=(2,), shift=(0,)),
            layouts=("contiguous",),
        ),
        Runs(
            [(Case(2, 72, 7, 7, 136, 1, 1), "dgrad"), (Case(2, 72, 7, 7, 136, 1, 1), "fprop"),
             (Case(2, 24, 7, 9, 40, 3, 3, padding=(1, 1)), "dgrad")],
            6,
            settings_of(FP16, shape=(0, 2, 3, 9, 10), direct=(0,), shift=(0,)),
            layouts=("contiguous", "channels_last"),
        ),
        # Rows of taps that meet nothing but padding, in some tiles or in all; a stride, tiles of several images.
        Runs(
            [(Case(2, 72, 40, 20, 16, 3, 3, padding=(16, 1), dilation=(16, 1)), "fprop"),
             (Case(2, 24, 30, 24, 40, 3, 3, padding=(34, 2), dilation=(34, 2)), "dgrad"),
             (Case(3, 16, 60, 22, 24, 4, 2, stride=(2, 1), padding=(40, 1), dilation=(24, 1)), "fprop"),
             (Case(5, 16, 3, 4, 24, 3, 1, padding=(17, 0), dilation=(17, 1)), "fprop")],
            6,
            settings_of(FP16, shape=(0,), windows=(0,), direct=(0,), shift=(0,)),
            layouts=("contiguous", "channels_last"),
        ),
        # Few output channels: boxes of as many weights, and all warps store them.
        Runs(
            [(Case(2, 24, 9, 11, 3, 3, 3, padding=(1, 1)), "fprop"), (Case(1, 72, 5, 9, 12, 1, 1), "fprop"),
             (Case(2, 3, 9, 11, 24, 3, 3, padding=(1, 1)), "dgrad"),
             (Case(2, 3, 9, 10, 24, 7, 7, (2, 2), (3, 3)), "dgrad")],
            6,
            settings_of(FP16, shape=(0, 2, 3, 6, 10), direct=(0,), shift=(0,)),
            layouts=("contiguous", "channels_last"),
        ),
    ],
    "wgmma": [
        Runs(WGMMA_SHIM_CASES, 1, WGMMA_SETTINGS),
        Runs(
            WGMMA_STACKED_CASES,
            1,
            [*settings_of(FP16, configuration=[WGMMA_STACKED]), *settings_of(FP32, configuration=[64 + WGMMA_STACKED])],
            {"rows_stacked": {1}},
            LAYOUTS[:1],
        ),
        Runs(
            WGMMA_CHUNK_CASES,
            1,
            settings_of(TF32, configuration=(32, 33, 34, 40), shift=(0,)),
            {"chunks": {1}},
            LAYOUTS[:1],
        ),
    ],
    "mma_wgrad": [
        Runs(
            of_operator("wgrad", MMA_WGRAD_CASES),
            6,
            settings_of(FP32, TF32, FP16, BF16, images=(0, 2), tile_p=(0, 3), splits=(0, 3)),
            layouts=X_AND_DY_LAYOUTS,
        )
    ],
    "tma_wgrad": [
        Runs(
            of_operator("wgrad", TMA_WGRAD_SHIM_CASES),
            10,
            settings_of(FP16, BF16, channels=(128, 64), blocks=(1, 2, 3, 4), parts=(0, 2)),
            layouts=X_AND_DY_LAYOUTS,
        ),
        # fp32, in copies that hold scaled fp16.
        Runs(
            of_operator("wgrad", [*TMA_WGRAD_SHIM_CASES, Case(2, 20, 9, 7, 70, 1, 1, stride=(2, 3), padding=(1, 2))]),
            10,
            [
                *settings_of(TF32, channels=(128, 64), blocks=(1, 2, 3, 4), parts=(0, 2)),
                *settings_of(FP32, channels=(128, 64), blocks=(1, 2), parts=(0, 2)),
            ],
            layouts=X_AND_DY_LAYOUTS,
        ),
        # Planes that 1x1 filters read whole: of several stages, and the last one with few pixels.
        Runs(
            of_operator("wgrad", [Case(3, 72, 4, 18, 136, 1, 1), Case(2, 200, 12, 12, 70, 1, 1)]),
            30,
            settings_of(FP16, BF16, channels=(128, 64), blocks=(1, 2, 3, 4), parts=(0, 1, 2), shift=(0,)),
            layouts=X_AND_DY_LAYOUTS[:1] + X_AND_DY_LAYOUTS[4:5],
        ),
        # So many taps that sums take more shared memory than every kernel may have.
        Runs(of_operator("wgrad", [Case(1, 8, 41, 42, 8, 40, 40)]), 1, settings_of(FP16), layouts=X_AND_DY_LAYOUTS[:1]),
        # Planes of dy, whose channels may be no eights.
        Runs(
            of_operator("wgrad", [Case(2, 24, 7, 9, 13, 3, 3, padding=(1, 1))]),
            2,
            settings_of(FP16),
            layouts=X_AND_DY_LAYOUTS[3:],
        ),
    ],
    "hopper_wgrad": [
        Runs(
            of_operator("wgrad", HOPPER_WGRAD_CASES),
            8,
            settings_of(TF32, FP16, BF16, shape=(-1, 0, 1, 3, 4, 6), channels=(0, 64))
            + settings_of(TF32, FP16, shape=(2,), channels=(0, 64))
            + settings_of(TF32, FP16, shape=(0, 5), images=(1, 2), rows=(2,), columns=(5,), parts=(0, 2))
            + settings_of(FP32, shape=(-1, 4, 5, 6, 7, 8), channels=(64, 128)),
            layouts=X_AND_DY_LAYOUTS,
        ),
        Runs(
            of_operator("wgrad", HOPPER_WGRAD_STEMS),
            12,
            settings_of(TF32, FP32, FP16, fold=(-1, 1, 2, 3, 4, 5, 6, 7, 8, 9))
            + settings_of(TF32, FP16, fold=(0, 4, 7), channels=(64, 128), parts=(2,)),
            layouts=X_AND_DY_LAYOUTS,
        ),
        # 1x1: x that is rounded, lines of planes and pixels; boxes of all channels of a tile.
        Runs(
            of_operator("wgrad", HOPPER_WGRAD_LINES),
            10,
            settings_of(TF32, shape=(-1, 2, 4, 5), channels=(64, 128), rounds=(1,))
            + settings_of(TF32, shape=(4, 5), images=(1,), rows=(1,), columns=(32, 64, 100), rounds=(1,))
            + settings_of(FP32, TF32, FP16, images=(1,), rows=(1,), columns=(16, 32, 64))
            + settings_of(TF32),  # where addresses allow no other
            layouts=X_AND_DY_LAYOUTS[:2],
        ),
    ],
}


@pytest.mark.parametrize(
    "emulated, runs", [(engine, runs) for engine, of in EXACT_RUNS.items() for runs in of], indirect=["emulated"]
)
def test_exact_in_every_way(emulated: Emulated, runs: Runs):
    """Integers of all types, at any addresses: each setting that a plan can be asked for runs, and each way it has."""
    runs.check(emulated)


# ---- Strides.
STRIDES = {
    "direct": (
        ["fprop", "dgrad", "wgrad"],
        [
            Case(2, 6, 9, 10, 9, 3, 2, stride=(1, 2), padding=(1, 1), groups=3),
            Case(2, 4, 9, 10, 6, 3, 2, padding=(1, 1)),
        ],
        [{"dtype": torch.float32}],
    ),
    "depthwise": (
        ["fprop", "dgrad", "wgrad"],
        [
            depthwise_case(2, 6, 9, 10, 3, 3, padding=(1, 1)),
            depthwise_case(2, 6, 9, 10, 3, 3, stride=(2, 2), padding=(1, 1)),
            depthwise_case(2, 3, 9, 10, 3, 2, times=2, stride=(1, 2), padding=(1, 1)),
        ],
        [{"dtype": torch.float32}],
    ),
    "patches": (["fprop"], PATCHES_CASES[:3], [{"dtype": torch.float32}]),
    "mma": (
        ["fprop", "dgrad"],
        [Case(2, 9, 6, 12, 18, 3, 3, padding=(1, 1)), Case(3, 20, 5, 7, 16, 1, 1)],
        settings_of(TF32),
    ),
    "pointwise": (
        ["fprop"],
        [Case(2, 20, 5, 8, 36, 1, 1), Case(3, 16, 7, 9, 33, 1, 1, stride=(2, 1))],
        settings_of(FP32, TF32, staged=(0,), split_bits=(0, 1)),
    ),
    "stem": (
        ["fprop"],
        [Case(2, 3, 9, 16, 36, 3, 3, padding=(1, 1)), Case(3, 4, 7, 9, 33, 2, 4)],
        settings_of(TF32, FP16),
    ),
    "mma_wgrad": (["wgrad"], MMA_WGRAD_CASES[:2], settings_of(FP32, BF16, splits=(0, 2))),
    "hopper_wgrad": (["wgrad"], HOPPER_WGRAD_CASES[:2], settings_of(FP32, BF16, parts=(0, 2))),
    "tma_wgrad": (["wgrad"], HOPPER_WGRAD_CASES[:2], settings_of(FP32, TF32, parts=(0, 2))),
}


@pytest.mark.parametrize("view", [*VIEWS, "one image"])
@pytest.mark.parametrize("emulated", STRIDES, indirect=True)
def test_takes_any_strides(emulated: Emulated, view: str):
    """Of each operand, of what is written, and of all of them."""
    change = VIEWS.get(view, lambda tensor: tensor[:1].expand_as(tensor))
    operators, cases, all_settings = STRIDES[emulated.engine]
    ran = set()
    for number, (case, operator, settings) in enumerate(itertools.product(cases, operators, all_settings)):
        place, operands = PLACES[operator], OPERANDS[operator]
        dtype, *_ = settings.values()
        tensors = make_tensors(case, dtype, integers)
        changed = [{operands[0]}, {operands[1]}, {*operands}, {place}, {place, *operands}]
        for names in changed[: 3 if view in ("expanded", "one image") else 5]:
            viewed = tensors | {name: change(tensors[name]) for name in names - {place}}
            out = torch.full(getattr(case, SHAPES[place]), math.nan, dtype=dtype)
            out = change(out) if place in names else with_margins(out)
            out.fill_(math.nan)
            asked = {name: value for name, value in settings.items() if name != "dtype"}
            message = emulated.run(operator, case, viewed, out, seed=number, **asked)
            assert message in (None, ""), f"{operator} of {case}, {names}, {settings}: {message}"
            if message == "":
                check_exact(case, {operator: out}, viewed)
                assert place in names or margins_intact(out)
                ran.add((operator, *names))
    assert len(ran) >= 3 * len(operators) - 1


# ---- Rounding, element by element. (Sums are those of this processor, not of a tensor core.)
def shim_tf32(case: Case, operator: str, tf32: bool) -> bool:
    return operator in case.tf32_operators(torch.float32, tf32, LEAST_TF32_WORK_IN_SHIM)


STEM_ROUNDING_CASE = Case(2, 3, 12, 20, 34, 7, 7, stride=(2, 2), padding=(3, 3))
# Cases, fills of fp32, fills of other types, and where TF32's contract holds: if it is allowed.
ROUNDING = {
    "direct": (
        [Case(1, 9, 24, 30, 11, 5, 4, padding=(2, 1)), *ROUNDING_CASES[1:3], Case(1, 512, 4, 6, 32, 3, 3)],
        FILLS,
        [*((dtype, normal) for dtype in DTYPES[1:]), *((dtype, wide) for dtype in DTYPES[2:])],
        shim_tf32,
    ),
    "depthwise": (
        [
            depthwise_case(2, 6, 20, 33, 3, 3, padding=(1, 1)),
            depthwise_case(1, 4, 20, 20, 7, 7, padding=(3, 3)),
            depthwise_case(1, 2, 28, 30, 21, 19, padding=(10, 9)),
        ],
        [normal, wide, tiny, huge, any_exponent, equal],
        [(dtype, normal) for dtype in DTYPES[1:3]],
        lambda *_: False,
    ),
    "stem": ([STEM_ROUNDING_CASE], FILLS, STEM_16_BIT_FILLS, lambda case, operator, tf32: tf32),
    "hopper_wgrad": (
        [HOPPER_WGRAD_CASES[0], Case(1, 64, 5, 6, 40, 3, 3), Case(2, 9, 6, 9, 24, 1, 1)],
        [normal, wide, tiny, huge, any_exponent, specks, equal],
        [(torch.bfloat16, wide)],
        lambda case, operator, tf32: tf32,
    ),
    "tma_wgrad": (
        [HOPPER_WGRAD_CASES[0], Case(1, 64, 5, 6, 40, 3, 3), Case(2, 9, 6, 9, 24, 1, 1, stride=(2, 1))],
        [normal, wide, tiny, huge, any_exponent, specks, equal],
        [(torch.bfloat16, wide)],
        lambda case, operator, tf32: tf32,
    ),
    "mma": (
        [Case(2, 20, 6, 9, 24, 3, 3, padding=(1, 1)), Case(2, 9, 6, 9, 24, 1, 1)],
        [under_a_tf32_step, tf32_ties, wide, any_exponent],
        [],
        lambda case, operator, tf32: tf32,
    ),
    "mma_wgrad": (
        [*MMA_WGRAD_CASES[:2], Case(1, 64, 5, 6, 40, 3, 3)],
        [under_a_tf32_step, tf32_ties, wide, any_exponent],
        [(torch.bfloat16, wide)],
        lambda case, operator, tf32: tf32 and case.C // case.groups >= 8,
    ),
    "pointwise": (
        [Case(2, 64, 5, 8, 40, 1, 1), Case(2, 9, 5, 8, 40, 1, 1)],
        [under_a_tf32_step, wide, any_exponent],
        [],
        lambda case, operator, tf32: tf32,
    ),
}
OPERATORS = {"stem": ["fprop"], "mma": ["fprop", "dgrad"], "pointwise": ["fprop"]}
OPERATORS |= {engine: ["wgrad"] for engine in ("hopper_wgrad", "mma_wgrad", "tma_wgrad")}
ROUNDING_RUNS = [
    *((engine, DTYPES[0], tf32, fill) for engine, of in ROUNDING.items() for fill in of[1] for tf32 in (False, True)),
    *((engine, dtype, True, fill) for engine, of in ROUNDING.items() for dtype, fill in of[2]),
]


@pytest.mark.parametrize("emulated, dtype, tf32, fill", ROUNDING_RUNS, indirect=["emulated"], ids=named)
def test_rounding(emulated: Emulated, dtype: torch.dtype, tf32: bool, fill: Callable):
    """Within the contract; of TF32 both operands are rounded, to nearest with ties away from zero."""
    cases, *_, has_tf32 = ROUNDING[emulated.engine]
    operators = OPERATORS.get(emulated.engine, OPERATOR_NUMBER)
    for case, layout, operator in itertools.product(cases, LAYOUTS, operators):
        tensors = make_tensors(case, dtype, fill)
        if emulated.engine in ("direct", "depthwise") and emulated.refusal(operator, case, dtype=dtype):
            continue
        out = emulated.result(operator, case, tensors, layout, tf32=tf32)
        of_tf32 = dtype == torch.float32 and has_tf32(case, operator, tf32)
        check_bounds(case, {operator: out}, tensors, {operator} if of_tf32 else ())
        # fp32 sums of rounded operands; hopper_wgrad rounds them to bf16 twice, also where tma_wgrad leaves dw to it.
        if of_tf32 and emulated.engine not in ("hopper_wgrad", "tma_wgrad"):
            rounded = {name: round_to_tf32(tensor) if name != "bias" else tensor for name, tensor in tensors.items()}
            check_bounds(case, {operator: out}, rounded, tf32=())


# Tiles that are not full, of engines that look at the values of a stage.
PARTIAL = {
    "hopper_wgrad": ("wgrad", [Case(2, C, P, P, 16, 3, 3, padding=(1, 1)) for C in (20, 32, 36) for P in (5, 7)]),
    "gather": ("fprop", [Case(2, 20, 9, 11, 40, 3, 3, padding=(1, 1)), Case(2, 36, 7, 7, 24, 1, 1)]),
    "wgmma": ("fprop", [Case(1, 12, 9, 40, 20, 3, 3, padding=(1, 1))]),
}


@pytest.mark.parametrize("emulated", PARTIAL, indirect=True)
def test_shared_memory_that_nobody_wrote_changes_nothing(emulated: Emulated):
    """Values may be multiplied in several ways, and which one it is must follow from the tensors alone."""
    operator, cases = PARTIAL[emulated.engine]
    wishes = {"shape": 0} if emulated.engine == "hopper_wgrad" else {}
    for case, layout in itertools.product(cases, LAYOUTS):
        tensors = make_tensors(case, torch.float32, normal)
        results = []
        for poison in (0xFF, 0x5A, 0x01):
            emulated.set("simt_poison", poison)
            results.append(emulated.result(operator, case, tensors, layout, tf32=True, **wishes))
        emulated.set("simt_poison", 0xFF)
        assert all(torch.equal(results[0], result) for result in results), f"{case}, {layout}"


@pytest.mark.parametrize("emulated", ["mma", "pointwise"], indirect=True)
def test_long_sums_keep_the_contract(emulated: Emulated):
    """Products that are all the same, of the size at which additions err most: in two sums at least."""
    case = Case(1, 8192, 1, 4, 4, 1, 1)
    tensors = make_tensors(case, torch.float32, lambda shape, _: torch.full(shape, 0.24446875))
    tensors["w"].fill_(1)
    one_sum, several = {
        "mma": ({"shape": 1, "splits": 1}, [{"shape": 0}, {"shape": 1, "splits": 2}]),
        "pointwise": ({"staged": 0, "slices": 1, "split_bits": 0}, [{"slices": 4, "split_bits": 0}]),
    }[emulated.engine]
    assert emulated.fault("fprop", case, "contiguous", 0, tf32=False, **one_sum) is None
    for wishes in several:
        out = emulated.result("fprop", case, tensors, tf32=False, **wishes)
        check_bounds(case, {"fprop": out}, tensors, tf32=())


# ---- Inf and NaN: quads with a term that no output reads, in rows that others read; points in fours and not.
SPREADING = [
    *(("mma", Case(1, 16, 7, 20, 20, 3, 3), {"tf32": tf32, "shape": 1}) for tf32 in (False, True)),
    *(
        ("pointwise", case, {"tf32": tf32, "staged": 0, "split_bits": split_bits})
        for case in (Case(1, 32, 7, 20, 40, 1, 1), Case(1, 32, 7, 9, 40, 1, 1), Case(1, 19, 7, 8, 40, 1, 1))
        for tf32, split_bits in itertools.product((False, True), (0, 1))
    ),
    *(
        ("stem", case, {"dtype": dtype, "tf32": tf32})
        for case in (Case(1, 4, 7, 20, 40, 3, 3), Case(1, 5, 7, 13, 33, 2, 3, padding=(1, 1), stride=(1, 2)))
        for dtype, tf32 in STEM_CONTRACTS
    ),
    *(
        ("hopper_wgrad", case, {"tf32": tf32, "operator": "wgrad"})
        for case in (Case(2, 12, 9, 12, 20, 3, 3, padding=(1, 1)), Case(2, 16, 8, 8, 72, 1, 1))
        for tf32 in (False, True)
    ),
    *(
        ("tma_wgrad", case, {"tf32": True, "operator": "wgrad"})
        for case in (Case(2, 12, 9, 12, 20, 3, 3, padding=(1, 1)), Case(2, 16, 8, 8, 72, 1, 1, padding=(1, 0)))
    ),
    *(
        ("direct", Case(1, 16, 40, 37, 8, 3, 3), {"tf32": tf32, "operator": operator})
        for tf32, operator in itertools.product((False, True), OPERANDS)
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("emulated, case, settings", SPREADING, indirect=["emulated"], ids=str)
def test_nan_and_inf_spread_to_those_that_read_them(emulated: Emulated, case: Case, settings: dict, layout: str):
    assert spreads(emulated, case, layout=layout, **settings)


@pytest.mark.parametrize("row_bits", [0, 1])
def test_nan_and_inf_spread_through_stages(pointwise_shim, row_bits):
    assert spreads(pointwise_shim, Case(1, 64, 7, 20, 40, 1, 1), True, staged=1, row_bits=row_bits)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_and_inf_stay_in_their_groups(tma_shim, layout):
    """Merged groups, whose weights are zeros in between: in each way, by boxes and by threads, with all their tiles."""
    ways = set()
    for groups, special, shape, windows in itertools.product((2, 6), (math.inf, math.nan), (4, 6, 9, 10), (0, 1)):
        case = Case(2, 48, 6, 9, 48, 3, 3, padding=(1, 1), groups=groups)
        tensors = make_tensors(case, torch.float16, integers)
        tensors["x"][0, 9, 2, 3] = tensors["x"][1, 47, 5, 8] = tensors["w"][17, 3, 1, 1] = special
        expected = reference("fprop", case, tensors).half()
        assert 0 < expected.isfinite().sum() < expected.numel()
        tensors = in_layout(tensors, layout)
        out = torch.full_like(tensors["dy"], math.nan)
        message = tma_shim.run("fprop", case, tensors, out, shape=shape, windows=windows)
        assert message in (None, ""), message
        if message == "":
            torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
            ways.add((groups, shape, windows))
    assert len(ways) >= 8


# ---- Nothing is read behind operands: they end where memory does.
GUARDED = {
    "direct": (DENSE_CASES[::2] + DEPTHWISE_CASES[::2], {}),
    "depthwise": (ONE_TO_ONE_CASES[::3], {}),
    "hopper_wgrad": (HOPPER_WGRAD_CASES[:7], {"channels": 64}),
    "tma_wgrad": ([case for case in HOPPER_WGRAD_CASES[:7] if case.groups == 1], {}),
}


@pytest.mark.parametrize("layouts", itertools.product(LAYOUTS, LAYOUTS), ids=str)
@pytest.mark.parametrize("emulated", GUARDED, indirect=True)
def test_reads_nothing_behind_its_operands(emulated: Emulated, layouts: tuple[str, str]):
    cases, wishes = GUARDED[emulated.engine]
    for number, case in enumerate(cases):
        dtype = DTYPES[number % 3]
        tensors = {name: before_guard_page(tensor) for name, tensor in make_tensors(case, dtype, integers).items()}
        for name, layout in zip(("x", "dy"), layouts, strict=True):
            order, back = ORDERS[layout]
            tensors[name] = before_guard_page(tensors[name].permute(order)).permute(back)
        for operator, place in PLACES.items():
            shape = (case.K,) if operator == "bgrad" else getattr(case, SHAPES[place])
            out = torch.full(shape, math.nan, dtype=dtype)
            if emulated.engine in ("hopper_wgrad", "tma_wgrad") and operator != "wgrad":
                continue
            message = emulated.run(operator, case, tensors, out, **wishes)
            assert message in (None, ""), f"{operator} of {case}: {message}"
            if message == "":
                check_exact(case, {operator: out}, tensors)


# ---- Weight gradients of fp32 in scaled fp16, with values that do not fit.
@pytest.mark.parametrize("emulated", ["tma_wgrad"], indirect=True)
@pytest.mark.parametrize("count", [2, 14, 1024, 1025])
@pytest.mark.parametrize("names", [("x",), ("dy",), ("x", "dy")], ids=str)
@pytest.mark.parametrize("tf32", [False, True])
def test_lists_what_does_not_fit(emulated: Emulated, names: tuple[str, ...], count: int, tf32: bool):
    """Products with each other as well, in an order of their own; with too many all is computed otherwise."""
    for case, layout in itertools.product(LISTED_CASES, LAYOUTS):
        tensors = make_tensors(case, torch.float32, normal)
        for name, own in zip(names, (count // len(names), (count + 1) // 2), strict=False):
            values = tensors[name].view(-1)
            values[torch.linspace(0, values.numel() - 1, own).long()] = torch.linspace(1e-12, 3e-12, own)
        results = []
        for channels, seed in itertools.product((64, 128), (0, 1)):
            out = emulated.result("wgrad", case, tensors, layout, channels=channels, seed=seed, tf32=tf32)
            check_bounds(case, {"wgrad": out}, tensors, {"wgrad"} if tf32 else ())
            results.append(out)
            # 1x1 filters leave pixels of x out.
            assert emulated.last("listed") == count or (case.R == 1 and "x" in names)
            assert emulated.last("done") == (emulated.last("listed") <= 1024)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[2], results[3])


LISTED_CASES = [
    Case(3, 20, 9, 11, 70, 3, 3, stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
    Case(2, 72, 8, 9, 40, 1, 1, stride=(1, 2), padding=(1, 0)),
]


@pytest.mark.parametrize("emulated", ["tma_wgrad"], indirect=True)
@pytest.mark.parametrize("zeros", ["x", "dy"])
def test_zeros_have_any_scale(emulated: Emulated, zeros: str):
    tensors = make_tensors(LISTED_CASES[0], torch.float32, normal)
    tensors[zeros].zero_()
    assert not emulated.result("wgrad", LISTED_CASES[0], tensors).any()
    assert emulated.last("done") == 1


@pytest.mark.parametrize("emulated", ["tma_wgrad"], indirect=True)
@pytest.mark.parametrize("of_x", [1e-20, math.inf])
@pytest.mark.parametrize("of_dy", [1e-20, math.inf, -math.inf])
@pytest.mark.parametrize("tf32", [False, True])
def test_listed_values_meet(emulated: Emulated, of_x: float, of_dy: float, tf32: bool):
    """Inf where one of them is Inf, and NaN from the padding alone."""
    for padding, layout in itertools.product((0, 1), LAYOUTS):
        case = Case(2, 12, 9, 12, 20, 3, 3, padding=(padding, padding))
        tensors = make_tensors(case, torch.float32, positive)
        tensors["x"][0, 3, 5, 7] = of_x
        tensors["dy"][0, 1, 4, 6] = of_dy
        expected = reference("wgrad", case, tensors).float()
        out = emulated.result("wgrad", case, tensors, layout, tf32=tf32)
        assert emulated.last("done") == 1
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3, equal_nan=True)
