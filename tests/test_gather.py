"""The gather engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import math
import random
import re
from collections.abc import Iterable, Iterator

import pytest
import torch

from tests.cases import (
    ADVERSE,
    CONTAINED_KINDS,
    LAYOUTS,
    MARKED_KINDS,
    OPERANDS,
    Case,
    adverse_tensors,
    check_bounds,
    in_layout,
    integers,
    make_tensors,
    normal,
    references,
    same_values,
)
from tests.emulation import mutated
from tests.engines import (
    ALL_AGAIN,
    GATHER_CONTAINED,
    GATHER_POINTS,
    GATHER_SHAPES,
    GATHER_SHAPES_16,
    GATHER_WINDOWS,
    GatherPlans,
    GatherShim,
)
from tests.mutations import GATHER_MUTATIONS, GATHER_PLAN_MUTATIONS
from tests.problems import (
    GATHER_APART_CASES,
    GATHER_CASE,
    GATHER_CASES,
    GATHER_CONTAINED_CASES,
    GATHER_IMAGES_GPU_CASES,
    GATHER_LANDING_CASES,
    GATHER_LANDING_CHANNELS,
    GATHER_STRIDED_CASES,
    GATHER_WIDE_CASES,
    WGMMA_DTYPES,
    WGMMA_OPERATORS,
    check_misfits,
    gather_operators,
    misfit_places,
    misfit_tensors,
    random_gather_cases,
)

GROUPS = Case(32, 512, 28, 28, 512, 3, 3, padding=(1, 1), groups=64)
GROUPS_AS_ONE = dataclasses.replace(GROUPS, groups=32)
FEW_OF_GROUP = "mma is faster with few channels a group"


@pytest.mark.parametrize(
    "case, operator, dtype, reason",
    [
        (GROUPS, "fprop", torch.float32, FEW_OF_GROUP),
        (GROUPS, "dgrad", torch.float32, FEW_OF_GROUP),
        (GROUPS, "fprop", torch.float16, None),
        (dataclasses.replace(GROUPS, N=4), "fprop", torch.float32, "mma is faster with few multiply-adds"),
        (dataclasses.replace(GROUPS, C=1024, K=1024), "fprop", torch.float32, FEW_OF_GROUP),
        (dataclasses.replace(GROUPS, C=1088), "fprop", torch.float32, None),
        (dataclasses.replace(GROUPS, K=1088), "fprop", torch.float32, None),
        (dataclasses.replace(GROUPS, C=16, K=16, N=256, groups=1), "fprop", torch.float32, None),
    ],
    ids=str,
)
def test_gather_yields_to_mma(gather_plans, case, operator, dtype, reason):
    assert gather_plans("yields", operator, case, dtype) == reason
    gather_plans.library.let_mma_take(ctypes.c_double(1e30))
    try:
        assert gather_plans("yields", operator, case, dtype) == (None if reason == FEW_OF_GROUP else reason)
    finally:
        gather_plans.library.let_mma_take(ctypes.c_double(0))
    gather_plans.library.let_mma_refuse(True)
    try:
        assert gather_plans("yields", operator, case, dtype) is None
    finally:
        gather_plans.library.let_mma_refuse(False)


WIDENS = Case(32, 160, 7, 7, 960, 1, 1)  # 2^27.8 multiply-adds


@pytest.mark.parametrize(
    "case, operator, strides, yields",
    [
        (WIDENS, "fprop", {}, False),
        (dataclasses.replace(WIDENS, N=17), "fprop", {}, True),
        (dataclasses.replace(WIDENS, C=161), "fprop", {}, True),
        (dataclasses.replace(WIDENS, K=639, N=44), "fprop", {}, True),
        (dataclasses.replace(WIDENS, H=14, W=14, stride=(2, 2)), "fprop", {}, True),
        (dataclasses.replace(WIDENS, C=320, K=1920, N=16, groups=2), "fprop", {}, True),
        (WIDENS, "dgrad", {}, True),
    ],
    ids=str,
)
def test_gather_yields_unless_channels_become_many(gather_plans, case, operator, strides, yields):
    reason = "mma is faster with few multiply-adds" if yields else None
    assert gather_plans("yields", operator, case, torch.float32, strides=strides) == reason


@pytest.mark.parametrize(
    "case, slower, faster",
    [
        (WIDENS, False, True),
        (dataclasses.replace(WIDENS, N=8), True, True),  # 2^25.8 multiply-adds
        (dataclasses.replace(WIDENS, N=64), False, False),  # 2^28.8
        (Case(8, 2048, 7, 7, 512, 1, 1), False, True),  # 2^28.6, but few pixels
        (Case(32, 64, 28, 28, 64, 1, 1, stride=(2, 2)), None, None),
    ],
    ids=str,
)
def test_gather_yields_to_pointwise_in_channels_last(gather_plans, case, slower, faster):
    """By the estimates, unless multiply-adds or pixels decide; at a stride as ever."""
    strides = {"x": torch.empty(case.x_shape, device="meta").to(memory_format=torch.channels_last).stride()}
    by_estimates, by_mma = "pointwise is faster by the estimates", "mma is faster with few multiply-adds"
    for cycles, yields in ((1e9, slower), (1, faster)):
        gather_plans.library.let_pointwise_take(ctypes.c_double(cycles))
        try:
            reason = gather_plans("yields", "fprop", case, torch.float32, strides=strides)
        finally:
            gather_plans.library.let_pointwise_take(ctypes.c_double(0))
        assert reason == (by_mma if yields is None else by_estimates if yields else None)


FEW_FILTERS = Case(64, 96, 56, 56, 24, 1, 1)


@pytest.mark.parametrize(
    "case, settings, yields",
    [
        (FEW_FILTERS, {}, True),
        (dataclasses.replace(FEW_FILTERS, K=25), {}, False),
        (dataclasses.replace(FEW_FILTERS, S=3), {}, False),
        (dataclasses.replace(FEW_FILTERS, C=192, K=48, groups=2), {}, False),
        (FEW_FILTERS, {"operator": "dgrad"}, False),
        (FEW_FILTERS, {"dtype": torch.float16}, False),
        (FEW_FILTERS, {"strides": {"x": (96 * 56 * 56, 1, 96 * 56, 96)}}, False),
    ],
    ids=str,
)
def test_gather_yields_to_pointwise(gather_plans, case, settings, yields):
    settings = {"operator": "fprop", "dtype": torch.float32, **settings}
    reason = "pointwise is faster with few output channels" if yields else None
    assert gather_plans("yields", case=case, **settings) == reason
    for refuses in (True, False):
        gather_plans.library.let_pointwise(refuses, not refuses)
        try:
            assert gather_plans("yields", case=case, **settings) is None
        finally:
            gather_plans.library.let_pointwise(False, False)


def random_phased_cases(count: int, seed: int) -> Iterator[tuple[Case, str, torch.dtype]]:
    """Of the same kind, but all of them what a copy of x holds in phases."""
    rng = random.Random(seed)
    while count > 0:
        C, K = rng.choice([8, 31, 63, 64, 65, 100, 128, 200]), rng.choice([8, 31, 64, 100, 128, 200, 300])
        H, W = (rng.choice([rng.randint(1, 8), rng.randint(1, 33), rng.randint(1, 70), 300]) for _ in range(2))
        R, S = rng.choice([(3, 3), (3, 3), (2, 2), (2, 3), (5, 4), (7, 7), (rng.randint(2, 7), rng.randint(2, 7))])
        padding = tuple(rng.choices([0, 0, 1, 1, 2, 3, 4], k=2))
        case = Case(rng.choice([1, 2, 3, 5, 8, 40]), C, H, W, K, R, S, (2, 2), padding)
        if case.y_shape[2] > 1 and case.y_shape[3] > 1:  # else there is no stride
            yield case, "fprop", torch.float32
            count -= 1


def random_landing_cases(count: int, seed: int) -> Iterator[tuple[Case, str, torch.dtype]]:
    """Of the same kind, but all of them what may be contained on its way, if tensors are aligned."""
    rng = random.Random(seed)
    while count > 0:
        C, K = (rng.choice([8, 31, 64, 65, 100, 128, 200, 300]) for _ in range(2))
        H, W, padding = rng.randint(1, 70), 4 * rng.randint(7, 40), rng.choice([1, 1, 1, 3])
        R, stride, kind = rng.randint(1, 4), (1, 1), rng.random()
        if kind < 0.1:
            W, padding = W + 2, 2  # rows of y are fours, those of x are not
        elif kind < 0.3:
            R = 3  # narrow tiles
            W, padding = rng.choice([(W, padding) for W in (13, 14, 25, 26, 27, 28, 28)] + [(16, 0), (12, 2)])
        elif kind < 0.6:
            R, stride = 3, (2, 2)
            H = rng.choice([H, rng.randint(1, 16)])
            W, padding = rng.choice([(56, 1), (28, 1)] * 3 + [(56, 0), (52, 3)])
        case = Case(rng.choice([1, 2, 3, 5]), C, H, W, K, R, 3, stride, (rng.randint(0, 3), padding))
        if case.y_shape[2] > 0:
            yield case, rng.choice(["fprop", "fprop", "dgrad"]) if stride == (1, 1) else "fprop", torch.float32
            count -= 1


def random_apart_cases(count: int, seed: int) -> Iterator[tuple[Case, str, torch.dtype]]:
    """Of the same kind, but with taps that lie apart, nearly all within the reach of boxes."""
    rng = random.Random(seed)
    while count > 0:
        groups = rng.choice([1, 1, 1, 2])
        C, K = (groups * rng.choice([8, 30, 32, 36, 64, 100, 128, 300]) for _ in range(2))
        H, W = (rng.choice([rng.randint(1, 20), rng.randint(1, 50), 65]) for _ in range(2))
        R, S = rng.choice([(3, 3), (3, 3), (3, 3), (1, 3), (2, 1), (4, 5)])
        drawn = rng.randint(2, 20), rng.randint(2, 20)
        dilation = rng.choice([drawn, (1, 6), (12, 12), (36, 36), (64, 64), (130, 130)])
        padding = tuple(
            rng.choice([0, d * (taps - 1) // 2, d * (taps - 1)]) for d, taps in zip(dilation, (R, S), strict=True)
        )
        stride = rng.choice([(1, 1)] * 7 + [(2, 1)])
        case = Case(rng.choice([1, 2, 3, 8, 30]), C, H, W, K, R, S, stride, padding, dilation, groups)
        operator = rng.choice(["fprop", "fprop", "dgrad"]) if stride == (1, 1) else "fprop"
        if min(case.y_shape) > 0:
            yield case, operator, rng.choice([torch.float32, torch.float32, torch.float32, torch.float16])
            count -= 1


def random_image_cases(count: int, seed: int) -> Iterator[tuple[Case, str, torch.dtype]]:
    """1x1 of images whose pixels are no fours, but which follow one another, if tensors are contiguous and aligned."""
    rng = random.Random(seed)
    while count > 0:
        groups = rng.choice([1, 1, 1, 2])
        C, K = (groups * rng.choice([32, 64, 96, 100, 128, 160, 256]) for _ in range(2))
        sizes = [5, 7, 7, 9, 10, 13, rng.randint(1, 17), rng.choice([33, 1001, 3001])]
        H, W = (rng.choice(sizes) for _ in range(2))
        if H * W % 4:
            case = Case(rng.choice([1, 2, 3, 5, 8, 40]), C, H, W, K, 1, 1, groups=groups)
            yield case, rng.choice(["fprop", "dgrad"]), torch.float32
            count -= 1


def cases_of_plans() -> Iterator[tuple[int, tuple[Case, str, torch.dtype]]]:
    kinds = (
        random_landing_cases(700, seed=2),
        random_gather_cases(3000, seed=0),
        random_phased_cases(300, seed=0),
        random_apart_cases(400, seed=0),
        random_image_cases(400, seed=0),
        # Phases of one tap, which are chosen if x is large.
        [(Case(64, 64, 16, 14, 64, 2, 2, (2, 2), (2, 2)), "fprop", torch.float32)] * 20,
    )
    return enumerate(itertools.chain(*kinds))


GATHER_KINDS = {
    *(f"points, x by {how}" for how in ("single", "pixels", "images", "channels")),
    *(f"windows, x by {how}" for how in ("single", "channels")),
    *(
        f"{kind}, {what} of y by {how}"
        for kind in ("points", "windows")
        for what in ("channels", "pixels")
        for how in ("fours", "one")
    ),
    "points, channels of y by boxes",
    "windows, channels of y by boxes",
    *(f"{kind}, {which} tiles in parts" for kind in ("points", "windows") for which in ("some", "all")),
    "x copied",
    *(f"two blocks an SM, tiles of {size} pixels by {x}" for size in (64, 128) for x in ("fours", "boxes")),
    *(f"two blocks an SM, tiles of {size} pixels by boxes of a copy" for size in (64, 128)),
    *(f"two blocks an SM, {which} tiles in parts" for which in ("some", "all")),
    *(
        f"{kind}, three warpgroups{how}{parts}"
        for kind, how in (
            *(("points", how) for how in ("", ", 64 channels by boxes", ", contained")),
            ("windows", ", contained"),
        )
        for parts in ("", ", tiles in parts")
    ),
    "points, three warpgroups, 64 channels by fours",
    "packed lines",
    "whole lines",
    "a part of a line",
    "several images",
    "several images with less than no gap",
    *(
        f"{kind}, contained{how}"
        for kind in ("points", "windows")
        for how in ("", ", channels filled up", ", tiles in parts")
    ),
    "contained, groups",
    "contained, groups as one",
    "phases of points",
    "phases of points, tiles in parts",
    *(f"phases of windows, by {boxes}" for boxes in ("a box", "boxes", "rows")),
    "phases of windows, tiles in parts",
    *(f"phases of x{how}" for how in ("", ", channels filled up", ", tiles in parts", ", of one tap")),
    "1x1 by rows",
    "1x1 by rows at a stride",
    *(
        f"contained on its way, shared {what}{layout}"
        for what in ("pixels", "channels")
        for layout in ("", ", channels_last")
    ),
    *(f"contained on its way, {what} that are not there" for what in ("rows", "columns")),
    *(
        f"contained on its way, {rows} rows at most of {columns} columns{layout}"
        for rows, columns in ((7, 32), (8, 32), (7, 28))
        for layout in ("", ", channels_last")
    ),
    "contained on its way, 14 rows at most of 14 columns, channels_last",
    *(
        f"contained on its way, {rows} rows at most of {columns} columns, stride 2"
        for rows, columns in ((7, 28), (14, 14), (7, 14))
    ),
    *(f"contained on its way, staged {often}" for often in ("at once", "twice")),
    "contained on its way, channels filled up",
    "weights by boxes",
    "taps apart",
    "taps apart, x copied",
    "taps apart, groups",
    *(f"taps apart, {which} tiles in parts" for which in ("some", "all")),
}


def test_gather_plans_are_sound(gather_plans):
    """Each output in one tile, each tap where the convolution says, all in 227 KiB, aligned: every shape of a tile."""
    planned = []
    for seed, (case, operator, dtype) in cases_of_plans():
        fault = gather_plans.fault(operator, case, dtype, seed)
        assert not fault, f"{operator} of {case}, {dtype}, seed {seed}: {fault}"
        planned.append(fault is not None)
    assert sum(planned) > 0.9 * len(planned)
    assert set(gather_plans.library.gather_seen().decode().splitlines()) >= GATHER_KINDS


@pytest.mark.parametrize("mutation", GATHER_PLAN_MUTATIONS)
def test_gather_plan_checks_see_what_is_wrong(gather_plans, mutation):
    with mutated(gather_plans.library, GATHER_PLAN_MUTATIONS, mutation):
        assert any(
            gather_plans.fault(operator, case, dtype, seed) for seed, (case, operator, dtype) in cases_of_plans()
        )


def test_gather_divides_without_a_division(gather_plans):
    """Quotients around each multiple that is an end of something, of ints as large as there are."""
    most = 2**31 - 1
    powers = [2**i + j for i in range(31) for j in (-1, 0, 1)]
    rng = random.Random(0)
    divisors = {*range(1, 130), *powers, most, most - 1, most // 2, most // 3, 46341, 715827883}
    divisors |= {int(2 ** rng.uniform(0, 31)) for _ in range(300)}
    for by in (by for by in divisors if 1 <= by <= most):
        times = {0, 1, 2, most // by, most // by - 1, most // by // 2, rng.randint(0, most // by)}
        numbers = {number * by + j for number in times for j in (-1, 0, 1)} | {*powers, most, rng.randint(0, most)}
        for number in numbers:
            if 0 <= number <= most:
                assert gather_plans.library.gather_divide(number, by) == number // by, (number, by)


# A tile's share of reading x is as small as there are tiles of other channels beside it, so that twice the output
# channels may halve the estimate of what is one round of tiles. Twice the images may make sums come in fours, which is
# what splitting the reduction asks for.
LEAST_GROWTH = {"N": 0.5, "in": 1.0, "out": 0.5}


def groups_as_one(case: Case, operator: str) -> int:
    """How many groups gather may multiply as one of 64 input channels."""
    in_channels = (case.C if operator == "fprop" else case.K) // case.groups
    several = 64 // in_channels if case.groups > 1 and 64 % in_channels == 0 else 1
    return several if case.groups % several == 0 else 1


def contained_channels(case: Case, operator: str) -> int:
    """The fewer ones of inputs and outputs of a group as it is multiplied."""
    return groups_as_one(case, operator) * min(case.C, case.K) // case.groups


def test_gather_estimates_grow_with_the_work(gather_plans):
    aligned = ctypes.c_uint64(0), ctypes.c_uint64(0)
    for case, operator, dtype in random_gather_cases(2000, seed=1):
        once = gather_plans("cycles", operator, case, dtype, *aligned)
        sides = {"N": "N", "C": "in" if operator == "fprop" else "out", "K": "out" if operator == "fprop" else "in"}
        for letter, side in sides.items():
            double = dataclasses.replace(case, **{letter: 2 * getattr(case, letter)})
            twice = gather_plans("cycles", operator, double, dtype, *aligned)
            if groups_as_one(case, operator) < groups_as_one(double, operator):
                continue  # those of twice the channels are fewer to multiply
            if contained_channels(case, operator) < 64 <= contained_channels(double, operator):
                continue  # fewer are not contained
            # More images may leave no tile that fits.
            assert twice >= LEAST_GROWTH[side] * once or (letter == "N" and twice == 0), f"{operator} of {double}"


def test_gather_describes_its_configuration(gather_plans):
    """Whole and in the 320 bytes that the binding has for it."""
    by_tma = 0
    contained = [(case, "fprop", torch.float32) for case in GATHER_CONTAINED_CASES]
    for case, operator, dtype in [*random_gather_cases(300, seed=4), *contained]:
        if gather_plans("refusal", operator, case, dtype) is None:
            text = gather_plans("describe", operator, case, dtype)
            if "multiplied by tma" in text:
                assert re.fullmatch(
                    r"in scaled fp16, (\d+ groups as one, )?x copied, multiplied by tma: tile of \d+ channels x "
                    r"(\d+ pixels, by taps|\d+ lines x \d+ columns, by windows), x in \d of \d+ bytes, .*Mcycles",
                    text.replace(" stages", ""),
                )
                by_tma += 1
                continue
            assert re.fullmatch(
                r"(in scaled fp16, (\d+ groups as one, )?)?(x copied, |x in phases, )?"
                r"tile of \d+ channels x (\d+ pixels|\d+ lines x \d+ columns), "
                r"x by [\w ]+ in \d stages of \d+ bytes, "
                r".*, \d+ blocks for \d+ tiles, \d+ of them in \d+ parts, about [\d.e+-]+ Mcycles",
                text,
            )
    assert by_tma >= 3
    assert "in scaled fp16, 4 groups as one, " in gather_plans("describe", "fprop", GROUPS_AS_ONE, torch.float32)
    text = gather_plans("describe", "fprop", GATHER_LANDING_CASES[0], torch.float32)
    assert text.startswith("in scaled fp16, x contained on its way, tile of 64 channels x 14 rows x 32 columns, ")


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_gather_points_take_as_many_stages_of_both_operands_as_fit(gather_plans, memory_format):
    text = gather_plans("describe", "fprop", Case(32, 1024, 14, 14, 256, 1, 1), torch.float32, memory_format)
    assert re.search(r"tile of 128 channels x 128 pixels, x by [\w ]+ in 6 stages of \d+ bytes, weights in 6 of ", text)


GATHER_REFUSALS = [
    (dataclasses.replace(GATHER_CASE, N=12), "fprop", torch.float32, {}, None),
    (dataclasses.replace(GATHER_CASE, N=12), "fprop", torch.float32, {"tf32": False}, "full float32"),
    (GATHER_CASE, "fprop", torch.float16, {"tf32": False}, None),
    (dataclasses.replace(GATHER_CASE, N=1), "fprop", torch.float32, {}, "full float32"),  # by uses_tf32()
    (GATHER_CASE, "fprop", torch.float64, {}, "float64"),
    (GATHER_CASE, "wgrad", torch.float16, {}, "outputs and input gradients only"),
    (GATHER_CASE, "bgrad", torch.float16, {}, "outputs and input gradients only"),
    (GATHER_CASE, "dgrad", torch.float16, {}, "stride 1"),
    (Case(1, 16, 80, 80, 16, 3, 3, stride=(1, 2)), "dgrad", torch.float16, {}, "stride 1"),
    (Case(1, 16, 3, 80, 16, 3, 3, stride=(2, 1)), "dgrad", torch.float16, {}, None),  # one row: no stride in it
    (Case(1, 7, 80, 80, 16, 1, 1), "fprop", torch.float16, {}, "8 input channels"),
    (Case(1, 7, 80, 80, 16, 1, 1), "dgrad", torch.float16, {}, "8 input channels"),
    (Case(1, 16, 80, 80, 14, 1, 1, groups=2), "fprop", torch.float16, {}, "8 output channels"),
    (Case(1, 16, 80, 80, 16, 3, 3, groups=16), "fprop", torch.float16, {}, "8 input channels"),
    (Case(1, 16, 300, 300, 16, 3, 3, dilation=(100, 100)), "fprop", torch.float16, {}, "does not fit"),
    (GATHER_CASE, "fprop", torch.float16, {"capability": 80}, "Hopper"),
    (GATHER_CASE, "fprop", torch.float16, {"capability": 100}, "Hopper"),
    (GATHER_CASE, "fprop", torch.float16, {"capability": 0}, "Hopper"),
]


@pytest.mark.parametrize("case, operator, dtype, settings, text", GATHER_REFUSALS, ids=str)
def test_gather_says_what_it_refuses(gather_plans, case, operator, dtype, settings, text):
    settings = dict(settings)
    gather_plans.library.set_capability(settings.pop("capability", 90))
    try:
        refusal = gather_plans("refusal", operator, case, dtype, **settings)
    finally:
        gather_plans.library.set_capability(90)
    assert (refusal is None) == (text is None), refusal
    assert text is None or text in refusal


@pytest.mark.parametrize("dtype", WGMMA_DTYPES, ids=str)
def test_gather_cases_are_gathers(gather_plans, dtype):
    """That the cases for the GPU do not miss the engine."""
    for case in GATHER_CASES:
        taken_ones = {name for name in WGMMA_OPERATORS if gather_plans("refusal", name, case, dtype) is None}
        assert taken_ones == gather_operators(case), case


def gather_texts(gather_plans: GatherPlans, case: Case, layout: str) -> Iterator[tuple[str, str]]:
    """What is to be run of a case in fp32, by operators."""
    tensors = {"x": torch.empty(case.x_shape, device="meta"), "dy": torch.empty(case.y_shape, device="meta")}
    strides = {name: tensor.stride() for name, tensor in in_layout(tensors, layout).items()}
    for operator in gather_operators(case):
        yield operator, gather_plans("describe", operator, case, torch.float32, strides=strides)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_contains_what_the_gpu_tests_say(gather_plans, layout):
    for case in GATHER_CONTAINED_CASES:
        for operator, text in gather_texts(gather_plans, case, layout):
            assert text.startswith("in scaled fp16, "), f"{operator} of {case}: {text}"


def test_gather_contains_on_its_way_what_the_gpu_tests_say(gather_plans):
    told = set()
    wanted = [(case, "contiguous") for case in GATHER_LANDING_CASES] + [(GATHER_LANDING_CHANNELS, "channels_last")]
    for case, layout in wanted:
        for operator, text in gather_texts(gather_plans, case, layout):
            assert text.startswith("in scaled fp16, x contained on its way, "), f"{operator} of {case}: {text}"
            channels, columns = re.search(r"tile of (\d+) channels x \d+ rows x (\d+) columns", text).groups()
            told.add((int(channels), int(columns), *case.stride))
    assert told == {(64, 32, 1, 1), (128, 32, 1, 1), (128, 28, 1, 1), (128, 14, 1, 1), (128, 28, 2, 2), (128, 14, 2, 2)}


def test_gather_has_tma_multiply_what_the_gpu_tests_say(gather_plans):
    """Contained operands of each memory format, by windows and by taps, at a stride and not; some by gather itself."""
    told, shared = set(), False
    for case, layout in itertools.product(GATHER_CONTAINED_CASES, LAYOUTS):
        for operator, text in gather_texts(gather_plans, case, layout):
            assert text.startswith("in scaled fp16, x copied, "), f"{operator} of {case}: {text}"
            by_tma = re.search(r"multiplied by tma: tile of \d+ channels x .*?, by (windows|taps), ", text)
            told.add((layout, by_tma[1] if by_tma else None, case.stride))
            shared |= by_tma is not None and int(re.search(r"(\d+) of which share one", text)[1]) > 1
    assert {way[:2] for way in told} == set(itertools.product(LAYOUTS, ("windows", "taps", None)))
    assert {way[1:] for way in told} >= {("windows", (1, 1)), ("windows", (2, 2)), ("taps", (2, 2)), (None, (1, 1))}
    assert shared


def test_gather_takes_boxes_at_a_stride_where_the_gpu_tests_say(gather_plans):
    for case in GATHER_STRIDED_CASES:
        text = dict(gather_texts(gather_plans, case, "channels_last"))["fprop"]
        assert text.startswith("x in phases, ") == (case.R > 1), f"{case}: {text}"
        assert "x by boxes" in text, f"{case}: {text}"


def test_gather_has_three_warpgroups_multiply_what_the_gpu_tests_say(gather_plans):
    """Tiles of 192 pixels: no others have so many."""
    told = set()
    for case, layout in itertools.product(GATHER_WIDE_CASES, LAYOUTS):
        for _, text in gather_texts(gather_plans, case, layout):
            found = re.search(r"tile of (\d+) channels x 192 pixels, x by (boxes|fours) .* of them in (\d) parts", text)
            if found:
                channels, by, parts = found.groups()
                told.add((int(channels), by, "in scaled fp16" in text, "x copied" in text, case.R, int(parts) > 1))
    assert told == {
        (128, "boxes", False, False, 1, False),
        (128, "boxes", False, False, 1, True),
        (128, "boxes", False, True, 1, False),
        (128, "boxes", True, True, 1, False),
        (128, "boxes", True, True, 3, True),
        (64, "boxes", False, False, 1, False),
        (64, "fours", False, False, 1, False),
    }


def test_gather_takes_images_where_the_gpu_tests_say(gather_plans):
    """Both kinds of tiles, and tiles in parts."""
    told = set()
    for case in GATHER_IMAGES_GPU_CASES:
        for _, text in gather_texts(gather_plans, case, "contiguous"):
            found = re.search(r"tile of (\d+) channels x \d+ pixels, x by images .* of them in (\d) parts", text)
            if found:
                told.add(tuple(map(int, found.groups())))
    assert {channels for channels, _ in told} == {128, 256}
    assert {parts for _, parts in told} > {1}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_takes_boxes_of_a_tap_where_the_gpu_tests_say(gather_plans, layout):
    for case in GATHER_APART_CASES:
        for operator, text in gather_texts(gather_plans, case, layout):
            assert text.startswith("x copied, ") == (layout == "contiguous"), f"{operator} of {case}: {text}"
            assert "x by boxes of a tap in " in text, f"{operator} of {case}: {text}"


# Points and windows, several images in a tile and several tiles, more channels than a stage and than a tile, groups.
GATHER_SHIM_CASES = [
    (Case(3, 40, 12, 12, 72, 1, 1), "fprop"),
    (Case(2, 72, 9, 13, 24, 1, 1, stride=(2, 3), padding=(1, 0)), "fprop"),
    (Case(9, 16, 5, 6, 130, 3, 3, stride=(2, 2), padding=(1, 1)), "fprop"),
    (Case(2, 24, 17, 21, 16, 2, 3, stride=(3, 1), dilation=(1, 2), groups=2), "fprop"),
    (Case(3, 64, 7, 7, 40, 3, 3, padding=(1, 1)), "dgrad"),
    (Case(5, 32, 8, 8, 96, 1, 1, groups=2), "dgrad"),
    (Case(9, 136, 7, 7, 300, 1, 1), "fprop"),
]

GATHER_LANDING = range(12, 21)
GATHER_BY_TMA = range(24, 35)  # behind them, what tma multiplies, by its own shapes of a tile

# Channels of a tile of these, rows of a warpgroup, columns, and the stride.
LANDING_TILES = {
    12: (64, 7, 32, 1),
    13: (64, 8, 32, 1),
    14: (128, 7, 32, 1),
    15: (128, 8, 32, 1),
    16: (128, 7, 28, 1),
    17: (128, 14, 14, 1),
    18: (128, 7, 28, 2),
    19: (128, 14, 14, 2),
    20: (128, 7, 14, 2),
}


def landing_shapes(operator: str, case: Case, layout: str) -> list[int]:
    """Those of 128 channels have a kernel for filters of three rows only. Of fewer columns than 32 planes have one tile
    a row, if any; at a stride of 2 there are some of planes only, of whole rows. In channels_last eight rows of two
    warpgroups leave no room for three rows of a filter.
    """
    wanted = (case.y_shape if operator == "fprop" else case.x_shape)[3]

    def takes(channels: int, rows: int, columns: int, stride: int) -> bool:
        if case.stride != (stride, stride) or (channels == 128 and case.R != 3) or columns - columns // 8 > wanted:
            return False
        if layout == "channels_last":
            return stride == 1 and ((channels, rows) != (64, 8) or case.R < 3)
        if stride == 2:
            return (case.W, case.padding[1]) == (2 * columns, 1)
        return wanted % 4 == 0 and (columns == 32 or columns >= wanted)

    return [shape for shape, tile in LANDING_TILES.items() if takes(*tile)]


GATHER_CUT_UP = (2, 4, 7, 8, 9, 11, 21, 22, 23)  # those whose tiles may all be cut up into parts
# Cases of every Source but the one of any, in its order: single words, fours of pixels, images, channels, boxes, boxes
# of phases of x and boxes of a tap. 16 bits have neither images nor the last two. The shape of half a stage, in which
# pieces of channels are apart, takes neither 1x1 nor boxes: it has cases of its own.
GATHER_SOURCES = (
    (Case(3, 42, 9, 13, 72, 1, 1, stride=(2, 1)), "contiguous"),
    (Case(3, 40, 12, 12, 72, 1, 1), "contiguous"),
    (Case(9, 128, 5, 9, 72, 1, 1), "contiguous"),
    (Case(3, 40, 9, 7, 72, 1, 1, stride=(2, 1)), "channels_last"),  # rows too short for boxes
    (Case(3, 72, 9, 9, 136, 2, 3, padding=(1, 0)), "channels_last"),
    (Case(3, 72, 9, 15, 136, 3, 3, stride=(2, 2), padding=(1, 1)), "channels_last"),
    (Case(2, 72, 24, 24, 136, 3, 3, padding=(10, 10), dilation=(10, 10)), "channels_last"),
)
GATHER_ANY, GATHER_HALF_A_STAGE = len(GATHER_SOURCES), 3
GATHER_IMAGES, GATHER_CHANNELS, GATHER_BOXES, GATHER_PHASES, GATHER_TAPS = range(2, 7)
GATHER_SHAPES_OF_PHASES, GATHER_SHAPES_OF_IMAGES = (0, 1, 4), (0, 4)
GATHER_SOURCES_16 = [
    (shape, source, GATHER_ANY)
    for shape in GATHER_SHAPES_16
    for source in range(GATHER_PHASES)
    if source != GATHER_IMAGES
]
GATHER_SOURCES_32 = [
    (shape, source, source)
    for shape in GATHER_SHAPES
    for source in range(GATHER_ANY)
    if shape in GATHER_SHAPES_OF_PHASES
    or source in ((0, GATHER_CHANNELS) if shape == GATHER_HALF_A_STAGE else range(GATHER_PHASES))
    if shape in GATHER_SHAPES_OF_IMAGES or source != GATHER_IMAGES  # others have single words of these, or a copy
]


@pytest.mark.parametrize(
    "shape, source, of_kernel, dtype",
    [(*one, torch.float32) for one in GATHER_SOURCES_32] + [(*one, torch.float16) for one in GATHER_SOURCES_16],
    ids=str,
)
def test_gather_shim_runs_each_kernel(gather_shim, shape, source, of_kernel, dtype):
    """Each shape of a tile with x by each way there is for it; for the others there is no plan."""
    case, layout = GATHER_SOURCES[source]
    if shape == GATHER_HALF_A_STAGE:
        case = Case(2, case.C, 9, 8, 136, 3, 3)
    if shape in GATHER_POINTS and case.R > 1:
        assert gather_shim.fault("fprop", case, dtype, shape, layout, seed=2) is None
        case = dataclasses.replace(case, K=56, R=1, S=1, padding=(0, 0))
    if not gather_shim.library.gather_sources(shape) >> of_kernel & 1:
        assert gather_shim.fault("fprop", case, dtype, shape, layout, seed=2) is None
        return
    for seed in (2, 9):  # tensors at aligned addresses
        with by_images(gather_shim) if source == GATHER_IMAGES else contextlib.nullcontext():
            assert gather_shim.fault("fprop", case, dtype, shape, layout, seed) == ""
        assert ctypes.c_int.in_dll(gather_shim.library, "latest_source").value == source
        (kernel,) = (name for name in gather_shim.launched() if "gather_kernel" in name)
        assert f"SourceE{of_kernel}E" in kernel


# Tiles of some pixels of one image, of two and of many, channels of less than a tile, groups; few and many stages.
GATHER_IMAGES_CASES = [
    (Case(9, 128, 5, 9, 72, 1, 1), "fprop"),
    (Case(2, 64, 11, 17, 300, 1, 1), "fprop"),
    (Case(21, 136, 3, 7, 320, 1, 1), "dgrad"),
    (Case(6, 256, 7, 7, 272, 1, 1, groups=2), "fprop"),
    (Case(1, 288, 5, 7, 40, 1, 1), "fprop"),
]


@contextlib.contextmanager
def by_images(gather_shim: GatherShim) -> Iterator[None]:
    """Runs have x by images or no plan, as what copies it may be faster by the estimate."""
    wants_images = ctypes.c_int.in_dll(gather_shim.library, "wants_images")
    wants_images.value = 1
    try:
        yield
    finally:
        wants_images.value = 0


# Of a case in a shape of a tile: parts of a tile, on a GPU of so many SMs. Of tiles of 256 channels only those of the
# last turn may be parts.
GATHER_IMAGES_RUNS = [
    *((number, shape, 1, 3) for number in range(5) for shape in GATHER_SHAPES_OF_IMAGES),
    *((number, 4, splits, 72) for number, splits in ((0, 2), (0, 4), (2, 3), (3, 2), (4, 3))),
    (3, 0, 2, 4),
]


@pytest.mark.parametrize("number, shape, splits, sms", GATHER_IMAGES_RUNS)
def test_gather_shim_exact_by_images(gather_shim, number, shape, splits, sms):
    case, operator = GATHER_IMAGES_CASES[number]
    with by_images(gather_shim), gather_shim.splitting(splits, sms):
        # Tensors at any alignment: there is a plan for those that are aligned.
        faults = [gather_shim.fault(operator, case, torch.float32, shape, "contiguous", seed) for seed in range(6)]
    assert set(faults) == {"", None}, faults
    assert gather_shim.parts() == splits


# Tiles that images end in, fewer channels than a stage, more than a tile and more than all stages, groups, a copy of x.
GATHER_POINTS_CASES = [
    (Case(1, 8, 4, 4, 8, 1, 1), "fprop"),
    (Case(3, 40, 12, 12, 72, 1, 1), "fprop"),
    (Case(7, 136, 6, 10, 132, 1, 1), "dgrad"),
    (Case(5, 264, 8, 8, 300, 1, 1), "fprop"),
    (Case(5, 136, 8, 8, 64, 1, 1, groups=2), "dgrad"),
    (Case(5, 72, 13, 11, 136, 1, 1, stride=(2, 3), padding=(1, 0)), "fprop"),
    (Case(9, 40, 17, 17, 40, 1, 1), "dgrad"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", GATHER_POINTS)
@pytest.mark.parametrize("number", range(len(GATHER_POINTS_CASES)))
def test_gather_shim_exact_with_one_multiplying_warpgroup_or_three(gather_shim, number, shape, layout):
    """Integers, of whole tiles and of parts."""
    case, operator = GATHER_POINTS_CASES[number]
    faults = []
    for splits in (0, 2, 3):
        with gather_shim.splitting(splits):
            # Tensors at aligned addresses, and y behind them.
            faults += [gather_shim.fault(operator, case, torch.float32, shape, layout, seed) for seed in (2, 9, 13)]
    assert set(faults) <= {"", None}, f"{operator} of {case}, shape {shape}: {faults}"
    wanted = case.stride == (1, 1) or layout == "contiguous"  # at a stride a copy, or pieces
    if shape == GATHER_POINTS[1]:  # by fours of pixels only
        wanted = layout == "contiguous" and case.stride == (1, 1) and case.H * case.W % 4 == 0
    elif shape == GATHER_POINTS[3] and layout == "contiguous":  # by boxes only, of a copy; that is for want of fours
        wanted = case.stride != (1, 1) or case.H * case.W % 4 != 0
    elif shape == GATHER_POINTS[4] and layout == "channels_last":  # of one tile of channels
        wanted = wanted and (case.K if operator == "fprop" else case.C) // case.groups <= 64
    assert ("" in faults[:3]) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(GATHER_SHIM_CASES)))
def test_gather_shim_exact(gather_shim, number, layout, dtype):
    """Integers through every role: each shape of a tile in turn."""
    case, operator = GATHER_SHIM_CASES[number]
    for seed in (2 * number, 2 * number + 1):
        turn = seed + number + LAYOUTS.index(layout)
        shape, fault = gather_shim.fault_in_turn(operator, case, dtype, turn, layout, seed)
        assert fault == "", f"{operator} of {case}, shape {shape}, seed {seed}: {fault}"


# Points, also at a stride and beyond the edge, and windows; channels in eights and not; several tiles, and stages;
# groups, several as one and one by one.
GATHER_SHIM_CONTAINED_CASES = [
    (Case(3, 40, 12, 12, 72, 1, 1), "fprop"),
    (Case(2, 75, 9, 13, 24, 1, 1, stride=(2, 3), padding=(1, 0)), "fprop"),
    (Case(5, 33, 8, 9, 104, 1, 1, padding=(1, 0)), "dgrad"),
    (Case(9, 136, 7, 7, 300, 1, 1), "fprop"),
    (Case(9, 17, 5, 6, 130, 3, 3, stride=(2, 2), padding=(1, 1)), "fprop"),
    (Case(3, 64, 7, 7, 40, 3, 3, padding=(1, 1)), "dgrad"),
    (Case(2, 72, 17, 21, 16, 2, 3, stride=(3, 1), dilation=(1, 2)), "fprop"),
    (Case(2, 64, 9, 10, 72, 3, 3, padding=(1, 1), groups=8), "fprop"),
    (Case(3, 128, 7, 8, 72, 3, 3, padding=(1, 1), groups=4), "fprop"),
    (Case(2, 96, 8, 9, 128, 1, 1, groups=4), "dgrad"),
    (Case(2, 128, 6, 7, 260, 2, 2, groups=2), "fprop"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(GATHER_SHIM_CONTAINED_CASES)))
def test_gather_shim_exact_when_contained(gather_shim, number, layout):
    """Integers in scaled fp16: each shape of a tile in turn, x from aligned addresses and others."""
    case, operator = GATHER_SHIM_CONTAINED_CASES[number]
    for turn, seed in enumerate((2, 3, 10)):  # tensors at aligned addresses, 8 and 4 bytes behind them
        shape = GATHER_CONTAINED[(turn + number + LAYOUTS.index(layout)) % len(GATHER_CONTAINED)]
        fault = gather_shim.fault(operator, case, torch.float32, shape, layout, seed)
        assert fault == "", f"{operator} of {case}, shape {shape}, seed {seed}: {fault}"


# Groups as one whose outputs are whole tiles, and more of them.
GATHER_SHIM_TMA_CASES = [
    *GATHER_SHIM_CONTAINED_CASES,
    (Case(2, 128, 9, 10, 128, 3, 3, stride=(2, 2), padding=(1, 1), groups=8), "fprop"),
    (Case(1, 128, 6, 7, 256, 2, 2, groups=2), "fprop"),
    (Case(2, 128, 7, 5, 128, 3, 3, padding=(1, 1), groups=4), "dgrad"),
]


@contextlib.contextmanager
def tma_wishes(gather_shim: GatherShim, windows: int, splits: int = 1) -> Iterator[None]:
    """Runs bring a copy of x by windows or by taps, and share a tile among so many blocks."""
    values = [ctypes.c_int.in_dll(gather_shim.library, name) for name in ("tma_windows", "tma_splits")]
    values[0].value, values[1].value = windows, splits
    try:
        yield
    finally:
        values[0].value, values[1].value = -1, 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(GATHER_SHIM_TMA_CASES)))
def test_gather_shim_exact_when_multiplied_by_tma(gather_shim, number, layout):
    """Integers in scaled fp16, which tma multiplies: by windows and by taps, each with every third tile."""
    case, operator = GATHER_SHIM_TMA_CASES[number]
    ways = set()
    for windows, shape in itertools.product((0, 1), GATHER_BY_TMA):
        if (shape + windows + number) % 3 and case.groups == 1:
            continue
        with tma_wishes(gather_shim, windows):
            fault = gather_shim.fault(operator, case, torch.float32, shape, layout, 10 * number + shape)
        assert fault in (None, ""), f"{operator} of {case}, shape {shape}, windows {windows}: {fault}"
        if fault == "":
            assert [name for name in gather_shim.launched() if "tma_kernel" in name]
            ways.add(windows)
    outputs = case.K if operator == "fprop" else case.C
    as_one = groups_as_one(case, operator)
    whole = as_one == case.groups or outputs // case.groups * as_one % 64 == 0
    windows = case.stride in ((1, 1), (2, 2)) and case.R * case.S > 1
    assert ways == ({0, 1} if windows else {0}) if whole else not ways


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_gather_shim_exact_when_multiplied_by_tma_in_parts(gather_shim, splits):
    case = Case(1, 520, 6, 7, 72, 3, 3, padding=(1, 1))
    runs = 0
    for layout, windows, shape in itertools.product(LAYOUTS, (0, 1), GATHER_BY_TMA):
        with tma_wishes(gather_shim, windows, splits):
            fault = gather_shim.fault("fprop", case, torch.float32, shape, layout, shape)
        assert fault in (None, ""), f"{layout}, shape {shape}, windows {windows}: {fault}"
        runs += fault == ""
    assert runs >= 8


GATHER_SHIM_LANDING_CASES = [
    (Case(2, 40, 12, 36, 72, 3, 3, padding=(1, 1)), "fprop"),
    (Case(1, 24, 33, 32, 136, 3, 3, padding=(1, 1)), "fprop"),
    (Case(2, 16, 9, 68, 40, 2, 3, padding=(0, 1)), "fprop"),
    (Case(3, 130, 5, 28, 33, 1, 3, padding=(0, 1)), "dgrad"),
    (Case(1, 9, 17, 60, 24, 3, 3, padding=(2, 3)), "fprop"),
    (Case(1, 70, 6, 28, 16, 4, 3, padding=(1, 1)), "fprop"),
    # In narrow tiles, and at a stride of 2: rows that are staged at once and twice, as many as there may be and fewer.
    (Case(2, 24, 9, 28, 136, 3, 3, padding=(1, 1)), "fprop"),
    (Case(1, 20, 16, 24, 40, 3, 3, padding=(0, 3)), "dgrad"),
    (Case(2, 40, 17, 56, 130, 3, 3, stride=(2, 2), padding=(1, 1)), "fprop"),
    (Case(1, 16, 28, 56, 24, 3, 3, stride=(2, 2), padding=(0, 1)), "fprop"),
    (Case(2, 9, 4, 56, 16, 3, 3, stride=(2, 2), padding=(2, 1)), "fprop"),
    (Case(2, 24, 28, 28, 130, 3, 3, stride=(2, 2), padding=(1, 1)), "fprop"),
    (Case(1, 17, 39, 28, 20, 3, 3, stride=(2, 2), padding=(0, 1)), "fprop"),
]


def landing_case(number: int, layout: str) -> tuple[Case, str]:
    """Such a case, in channels_last with channels by fours and rows as they are."""
    case, operator = GATHER_SHIM_LANDING_CASES[number]
    if layout == "channels_last":
        case = dataclasses.replace(case, C=-(-case.C // 4) * 4, K=-(-case.K // 4) * 4, W=case.W + number % 4)
    return case, operator


# Every shape of a tile that the case has.
GATHER_SHIM_LANDING_RUNS = [
    (number, shape, layout)
    for number, layout in itertools.product(range(len(GATHER_SHIM_LANDING_CASES)), LAYOUTS)
    for shape in landing_shapes(*landing_case(number, layout)[::-1], layout)
]


def test_gather_shim_runs_all_that_lands():
    runs = {(shape, layout) for _, shape, layout in GATHER_SHIM_LANDING_RUNS}
    assert runs == {*itertools.product(GATHER_LANDING, LAYOUTS)} - {
        (17, "contiguous"),
        *((shape, "channels_last") for shape in (18, 19, 20)),
    }


@pytest.mark.parametrize("number, shape, layout", GATHER_SHIM_LANDING_RUNS)
def test_gather_shim_exact_when_contained_on_its_way(gather_shim, number, shape, layout):
    case, operator = landing_case(number, layout)
    channels, rows, columns, stride = LANDING_TILES[shape]
    kernel = f"landing_kernelILi{channels}ELi{columns}ELi{rows}ELi{stride}ELb{int(layout == 'channels_last')}E"
    for seed in (2, 13):  # tensors at aligned addresses; at once, and as late as it may be
        fault = gather_shim.fault(operator, case, torch.float32, shape, layout, seed)
        assert fault == "", f"{operator} of {case}, shape {shape}, seed {seed}: {fault}"
        assert [name for name in gather_shim.launched() if kernel in name]


@pytest.mark.parametrize("shape", [12, 15])
def test_gather_shim_contains_long_rows_in_pairs(gather_shim, shape):
    """Weights of so many channels that a block has two rows of them and twice as many threads."""
    case = Case(1, 528, 2, 28, 40, 3, 3, padding=(1, 1))
    for seed in (2, 13):
        assert gather_shim.fault("fprop", case, torch.float32, shape, "contiguous", seed) == ""
        assert [name for name in gather_shim.launched() if "contain_rows_kernel" in name]


# In phases: points and windows, of fewer channels than a block and of several blocks, several images in a tile and
# several tiles, of one box and two, of boxes of rows.
GATHER_SHIM_PHASED_CASES = [
    Case(5, 70, 8, 10, 40, 3, 3, padding=(1, 1)),
    Case(3, 64, 9, 11, 72, 3, 3, padding=(0, 2)),
    Case(7, 24, 6, 7, 40, 2, 2),
    Case(4, 130, 5, 8, 24, 2, 2, padding=(3, 1)),
    Case(2, 16, 13, 12, 40, 5, 4, padding=(2, 3)),
    Case(3, 8, 15, 14, 130, 7, 7, padding=(3, 3)),
    Case(2, 9, 14, 15, 24, 7, 7, padding=(0, 1)),
    Case(2, 72, 20, 6, 16, 2, 3, padding=(1, 0)),
    Case(2, 16, 33, 30, 24, 3, 3, padding=(0, 1)),
    Case(1, 16, 5, 300, 24, 3, 3, padding=(1, 1)),
    Case(3, 128, 9, 10, 48, 3, 3, padding=(1, 1), groups=4),
    Case(2, 128, 7, 8, 72, 2, 2, padding=(1, 0), groups=2),
]
GATHER_SHIM_PHASED_CASES = [dataclasses.replace(case, stride=(2, 2)) for case in GATHER_SHIM_PHASED_CASES]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(GATHER_SHIM_PHASED_CASES)))
def test_gather_shim_exact_in_phases(gather_shim, number, layout):
    """By each way of containing x that the layout has, where tensors are aligned and where not."""
    case, seen = GATHER_SHIM_PHASED_CASES[number], set()
    for turn, seed in enumerate((2, 3)):  # aligned, and 8 bytes behind that
        shape = GATHER_CONTAINED[(turn + number + LAYOUTS.index(layout)) % len(GATHER_CONTAINED)]
        fault = gather_shim.fault("fprop", case, torch.float32, shape, layout, seed)
        assert fault == "", f"{case}, shape {shape}, seed {seed}: {fault}"
        seen |= gather_shim.contained_by()
    eights = layout == "channels_last" and case.C % 8 == 0
    pairs = layout == "contiguous" and case.W % 2 == 0
    assert (8 if eights else 2 if pairs else 1) in seen


@pytest.mark.parametrize("number, splits", [(0, 3), (0, 4), (1, 2), (3, 3), (3, 4), (8, 2)])
def test_gather_shim_exact_in_phases_and_parts(gather_shim, number, splits):
    """Parts of the reduction start at any phase."""
    case = GATHER_SHIM_PHASED_CASES[number]
    with gather_shim.splitting(splits, sms=72):
        faults = [gather_shim.fault("fprop", case, torch.float32, i, LAYOUTS[i % 2], i) for i in GATHER_CONTAINED]
    assert set(faults) <= {"", None}  # as many tiles as SMs are not cut up
    assert "" in faults


# Of x itself, in channels_last: channels that fill blocks and not, several images in a tile and several tiles, padding
# that is odd or even or larger than the filter, odd rows and columns, phases of one tap, boxes as large as they may be.
GATHER_SHIM_PHASES_OF_X = [
    Case(5, 36, 8, 18, 40, 3, 3, padding=(1, 1)),
    Case(3, 64, 9, 17, 136, 3, 3, padding=(0, 2)),
    Case(30, 8, 6, 34, 40, 2, 2),  # few enough pixels would be read as they are
    Case(16, 100, 5, 14, 24, 2, 2, padding=(3, 2)),
    Case(2, 12, 13, 21, 40, 5, 5, padding=(2, 3)),
    Case(2, 36, 15, 20, 24, 7, 4, padding=(3, 0)),
    Case(2, 72, 20, 19, 16, 2, 3, padding=(4, 1)),
    Case(1, 16, 5, 254, 24, 3, 3, padding=(1, 1)),
]
GATHER_SHIM_PHASES_OF_X = [dataclasses.replace(case, stride=(2, 2)) for case in GATHER_SHIM_PHASES_OF_X]


@pytest.mark.parametrize("number", range(len(GATHER_SHIM_PHASES_OF_X)))
def test_gather_shim_exact_in_phases_of_x(gather_shim, number):
    case = GATHER_SHIM_PHASES_OF_X[number]
    for turn, seed in enumerate((2, 9)):  # at aligned addresses; at once, and as late as it may be
        shape = GATHER_SHAPES_OF_PHASES[(turn + number) % 3]
        fault = gather_shim.fault("fprop", case, torch.float32, shape, "channels_last", seed)
        assert fault == "", f"{case}, shape {shape}, seed {seed}: {fault}"
        assert ctypes.c_int.in_dll(gather_shim.library, "latest_source").value == GATHER_PHASES


@pytest.mark.parametrize("number, splits", [(0, 3), (0, 8), (1, 2), (3, 3), (4, 4)])
def test_gather_shim_exact_in_phases_of_x_and_parts(gather_shim, number, splits):
    """Parts of the reduction start at any phase."""
    case, faults = GATHER_SHIM_PHASES_OF_X[number], []
    with gather_shim.splitting(splits, sms=72):
        for shape in (shape for shape in GATHER_SHAPES_OF_PHASES if shape != 0):  # without phases that one may be
            faults.append(gather_shim.fault("fprop", case, torch.float32, shape, "channels_last", 2))
            if faults[-1] is not None:
                assert ctypes.c_int.in_dll(gather_shim.library, "latest_source").value == GATHER_PHASES
    assert set(faults) <= {"", None}  # as many tiles as SMs are not cut up
    assert "" in faults


# Padding that is no multiple of the stride and more than that, rows and columns that nobody reads, one step or both,
# groups; the largest step of a box, and one that is larger.
GATHER_SHIM_ROWS_OF_POINTS = [
    (Case(3, 36, 9, 19, 72, 1, 1, stride=(2, 2)), GATHER_BOXES),
    (Case(2, 64, 11, 26, 24, 1, 1, stride=(3, 3), padding=(1, 2)), GATHER_BOXES),
    (Case(5, 32, 7, 8, 40, 1, 1, stride=(2, 1)), GATHER_BOXES),
    (Case(2, 128, 5, 33, 40, 1, 1, stride=(1, 4), padding=(1, 5), groups=2), GATHER_BOXES),
    (Case(2, 8, 3, 70, 24, 1, 1, stride=(2, 8)), GATHER_BOXES),
    (Case(2, 40, 9, 17, 24, 1, 3, stride=(2, 2), padding=(0, 1)), GATHER_BOXES),
    (Case(2, 40, 9, 27, 24, 3, 1, stride=(1, 3), padding=(1, 2)), GATHER_BOXES),
    (Case(2, 8, 3, 80, 24, 1, 1, stride=(2, 9)), GATHER_CHANNELS),
    (Case(2, 40, 9, 12, 24, 1, 1, stride=(2, 2)), GATHER_CHANNELS),  # rows that are too short
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("number", range(len(GATHER_SHIM_ROWS_OF_POINTS)))
def test_gather_shim_exact_by_rows_of_points(gather_shim, number, dtype):
    case, source = GATHER_SHIM_ROWS_OF_POINTS[number]
    shapes = (0, 4) if source != GATHER_BOXES else (0, 1, 2, 4)
    for turn, seed in enumerate((2, 9)):
        shape = (turn + number) % 2 if dtype == torch.float16 else shapes[(turn + number) % len(shapes)]
        fault = gather_shim.fault("fprop", case, dtype, shape, "channels_last", seed)
        assert fault == "", f"{case}, shape {shape}, seed {seed}: {fault}"
        if dtype == torch.float32 or case.C % 8 == 0:
            assert ctypes.c_int.in_dll(gather_shim.library, "latest_source").value == source


# Taps as far apart as they may be, and further apart than the image is large; one axis only; several images in a tile
# and several tiles; channels that fill a stage and not; groups; no padding, some, and so much that y is larger than x.
GATHER_SHIM_TAPS_APART = [
    (Case(3, 36, 9, 11, 40, 3, 3, padding=(4, 4), dilation=(4, 4)), "fprop"),
    (Case(2, 64, 20, 17, 72, 3, 3, padding=(6, 5), dilation=(6, 5)), "dgrad"),
    (Case(5, 40, 7, 7, 136, 3, 3, padding=(12, 12), dilation=(12, 12)), "fprop"),
    (Case(1, 100, 3, 34, 24, 1, 3, padding=(0, 16), dilation=(1, 16)), "fprop"),
    (Case(2, 32, 30, 4, 24, 3, 1, dilation=(13, 1)), "fprop"),
    (Case(1, 32, 30, 31, 24, 2, 2, padding=(28, 0), dilation=(28, 29)), "fprop"),
    (Case(2, 64, 13, 14, 48, 3, 3, padding=(5, 5), dilation=(5, 5), groups=2), "fprop"),
    (Case(1, 8, 2, 130, 8, 1, 3, padding=(0, 127), dilation=(1, 127)), "fprop"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(GATHER_SHIM_TAPS_APART)))
def test_gather_shim_exact_with_taps_apart(gather_shim, number, layout):
    """By boxes of what a tap reads, of x or of a copy, in every shape of a tile that has them, whole and cut up."""
    case, operator = GATHER_SHIM_TAPS_APART[number]
    by_taps = 0
    for shape, splits in itertools.product((0, 2, 4), (0, 2)):
        with gather_shim.splitting(splits):
            for seed in (2, 9):  # at aligned addresses; at once, and as late as it may be
                fault = gather_shim.fault(operator, case, torch.float32, shape, layout, seed)
                if fault is not None:
                    assert fault == "", f"{operator} of {case}, shape {shape}, {splits} parts, seed {seed}: {fault}"
                    by_taps += ctypes.c_int.in_dll(gather_shim.library, "latest_source").value == GATHER_TAPS
    assert by_taps > 0


ADVERSE_GATHER_CASES = [
    ("fprop", Case(3, 40, 12, 12, 72, 1, 3, padding=(0, 1)), "contiguous"),
    ("fprop", Case(9, 16, 5, 6, 130, 3, 3, padding=(1, 1)), "channels_last"),
    ("dgrad", Case(3, 64, 7, 7, 40, 3, 3, padding=(1, 1)), "contiguous"),
    ("fprop", Case(2, 25, 17, 21, 300, 2, 3, stride=(3, 1), dilation=(1, 2)), "contiguous"),
    ("fprop", Case(9, 72, 12, 12, 300, 2, 1), "channels_last"),
    ("dgrad", Case(5, 33, 8, 9, 104, 1, 1, padding=(1, 0)), "channels_last"),
    ("fprop", Case(3, 70, 13, 11, 72, 1, 1, stride=(2, 3), padding=(1, 0)), "channels_last"),
    ("fprop", Case(3, 70, 13, 14, 72, 3, 3, stride=(2, 2), padding=(1, 1)), "contiguous"),
    ("fprop", Case(5, 16, 9, 12, 40, 5, 4, stride=(2, 2), padding=(0, 3)), "channels_last"),
    ("fprop", Case(2, 33, 11, 9, 24, 2, 2, stride=(2, 2), padding=(1, 0)), "contiguous"),
    ("fprop", Case(3, 128, 9, 10, 40, 3, 3, padding=(1, 1), groups=8), "contiguous"),
    ("fprop", Case(3, 128, 11, 9, 48, 3, 3, stride=(2, 2), padding=(1, 1), groups=4), "channels_last"),
    ("dgrad", Case(2, 96, 8, 9, 128, 1, 1, groups=4), "contiguous"),
]
# Contained on their way, by each shape of a tile: fewer rows than a tile and more, columns and channels that are not
# there, more channels of y than a tile has.
ADVERSE_LANDING_CASES = [
    ("fprop", Case(2, 24, 5, 36, 40, 3, 3, padding=(1, 1)), "contiguous"),
    ("fprop", Case(2, 33, 8, 32, 130, 3, 3, padding=(2, 3)), "contiguous"),
    ("fprop", Case(2, 24, 5, 37, 40, 3, 3, padding=(1, 1)), "channels_last"),
    ("fprop", Case(2, 20, 33, 28, 24, 3, 3, stride=(2, 2), padding=(1, 1)), "contiguous"),
    ("dgrad", Case(2, 24, 11, 32, 40, 3, 3, padding=(1, 1)), "contiguous"),
    ("fprop", Case(3, 16, 17, 28, 72, 2, 3, padding=(0, 1)), "contiguous"),
    ("dgrad", Case(2, 36, 12, 30, 20, 2, 3, padding=(1, 1)), "channels_last"),
    ("fprop", Case(2, 20, 19, 56, 24, 3, 3, stride=(2, 2), padding=(1, 1)), "contiguous"),
    ("fprop", Case(2, 24, 15, 14, 40, 3, 3, padding=(1, 1)), "channels_last"),
    ("dgrad", Case(2, 24, 9, 26, 20, 3, 3, padding=(1, 1)), "channels_last"),
]
ADVERSE_PHASES = 7  # the first of them with phases
ADVERSE_GROUPS = 10  # and with groups


@pytest.mark.parametrize("number, kind", [*enumerate(ADVERSE)])
def test_gather_shim_contains_what_fits_and_does_the_rest_again(gather_shim, number, kind):
    """As of the wgmma engine; but of x single values are mended, and weights that do not fit take everything along."""
    operator, case, layout = ADVERSE_GATHER_CASES[number % len(ADVERSE_GATHER_CASES)]
    tensors = adverse_tensors(case, kind, operator)
    out = gather_shim.result(operator, case, tensors, layout, GATHER_CONTAINED[number % len(GATHER_CONTAINED)], number)
    check_bounds(case, {operator: out}, tensors, tf32={operator})
    done = gather_shim.done_again()
    if kind in CONTAINED_KINDS:
        assert done == 0
    elif kind in MARKED_KINDS:
        assert done != 0  # the sample of tensors as small as these sees some of them, and takes another scale
    else:
        assert done == ALL_AGAIN or kind == "faint channel"


# Of those above what tma takes: groups as one whose outputs are no whole tiles are not.
ADVERSE_TMA = [number for number in range(len(ADVERSE_GATHER_CASES)) if number < ADVERSE_GROUPS]


@pytest.mark.parametrize("number, kind", [*enumerate(ADVERSE)])
def test_gather_shim_contains_what_fits_for_tma(gather_shim, number, kind):
    operator, case, layout = ADVERSE_GATHER_CASES[ADVERSE_TMA[number % len(ADVERSE_TMA)]]
    tensors = adverse_tensors(case, kind, operator)
    shape = GATHER_BY_TMA[number % len(GATHER_BY_TMA)]
    out = gather_shim.result(operator, case, tensors, layout, shape, number)
    check_bounds(case, {operator: out}, tensors, tf32={operator})
    done = gather_shim.done_again()
    if kind in CONTAINED_KINDS:
        assert done == 0
    elif kind in MARKED_KINDS:
        assert done != 0
    else:
        assert done == ALL_AGAIN or kind == "faint channel"


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("number", [1, 5])
def test_gather_shim_gives_up_what_tma_would_multiply(gather_shim, number, splits):
    """All of a call is done again, once, and tma stores nothing; of a cluster no block waits for another one."""
    operator, case, layout = ADVERSE_GATHER_CASES[number]
    case = dataclasses.replace(case, N=1, C=case.C + 64, K=case.K + 64)
    tensors = adverse_tensors(case, "dead weights", operator)
    with tma_wishes(gather_shim, -1, splits):
        out = gather_shim.result(operator, case, tensors, layout, GATHER_BY_TMA[-1], number)
    assert gather_shim.done_again() == ALL_AGAIN
    check_bounds(case, {operator: out}, tensors, tf32={operator})


@pytest.mark.parametrize("value", [1e-9, math.nan], ids=str)
@pytest.mark.parametrize("number", ADVERSE_TMA)
def test_gather_shim_mends_what_tma_multiplied(gather_shim, number, value):
    operator, case, layout = ADVERSE_GATHER_CASES[number]
    tensors = misfit_tensors(operator, case, value)
    out = gather_shim.result(operator, case, tensors, layout, GATHER_BY_TMA[number], number)
    places, copied = misfit_places(operator, case)
    assert gather_shim.done_again() == (copied if case.R * case.S == 1 else len(places))  # of phases all of x
    check_misfits(operator, case, out, tensors)


@pytest.mark.parametrize("shape", GATHER_CONTAINED)
@pytest.mark.parametrize("number", [1, 5])
def test_gather_shim_gives_up(gather_shim, number, shape):
    """All of a call is done again, once: what would have to be mended beside it is not."""
    operator, case, layout = ADVERSE_GATHER_CASES[number]
    tensors = adverse_tensors(case, "dead weights", operator)
    tensors[OPERANDS[operator][0]][-1, 3, 3, 3] = 1e-9
    out = gather_shim.result(operator, case, tensors, layout, shape, number)
    assert gather_shim.done_again() == ALL_AGAIN
    check_bounds(case, {operator: out}, tensors, tf32={operator})


def check_mending(
    gather_shim: GatherShim, number: int, value: float, seeds: Iterable[int], landing: bool = False
) -> None:
    """Right, whatever the order in which threads come, and the same bits in each."""
    operator, case, layout = (ADVERSE_LANDING_CASES if landing else ADVERSE_GATHER_CASES)[number]
    shapes = landing_shapes(operator, case, layout) if landing else GATHER_CONTAINED
    tensors, first = misfit_tensors(operator, case, value), None
    for seed in seeds:
        out = gather_shim.result(operator, case, tensors, layout, shapes[number % len(shapes)], seed)
        assert gather_shim.done_again() == misfit_places(operator, case)[1]
        check_misfits(operator, case, out, tensors)
        first = out if first is None else first
        assert same_values(out, first)


@pytest.mark.parametrize("value", [1e-9, 3e-40, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("number", range(len(ADVERSE_GATHER_CASES)))
def test_gather_shim_mends(gather_shim, number, value):
    check_mending(gather_shim, number, value, seeds=(number,) if value != 1e-9 else range(3))


@pytest.mark.parametrize("value", [1e-9, math.nan], ids=str)
@pytest.mark.parametrize("number", range(len(ADVERSE_LANDING_CASES)))
def test_gather_shim_mends_what_lands(gather_shim, number, value):
    check_mending(gather_shim, number, value, seeds=(number,) if value != 1e-9 else range(2), landing=True)


@pytest.mark.parametrize("number, kind", [*enumerate(ADVERSE)])
def test_gather_shim_contains_on_its_way_what_fits(gather_shim, number, kind):
    """As where it is copied: see above."""
    operator, case, layout = ADVERSE_LANDING_CASES[number % len(ADVERSE_LANDING_CASES)]
    tensors = adverse_tensors(case, kind, operator)
    shapes = landing_shapes(operator, case, layout)
    out = gather_shim.result(operator, case, tensors, layout, shapes[number // 2 % len(shapes)], number)
    check_bounds(case, {operator: out}, tensors, tf32={operator})
    done = gather_shim.done_again()
    if kind in CONTAINED_KINDS:
        assert done == 0
    elif kind in MARKED_KINDS:
        assert done != 0
    else:
        assert done == ALL_AGAIN or kind == "faint channel"


def check_list_of_what_lands(gather_shim: GatherShim, too_many: int, shape: int) -> None:
    """Of one value more all is done again, by weights that nobody knew would be wanted."""
    case = Case(2, 24, 9, 28, 16, 3, 3, padding=(1, 1))
    if LANDING_TILES[shape][3] == 2:
        case = dataclasses.replace(case, W=2 * LANDING_TILES[shape][2], stride=(2, 2))
    layout = "contiguous" if shape in landing_shapes("fprop", case, "contiguous") else "channels_last"
    tensors = make_tensors(case, torch.float32, normal)
    tensors["x"].zero_()
    tensors["x"][0] = 1
    count = ctypes.c_int.in_dll(gather_shim.library, "most_listed").value + too_many
    tensors["x"][1].view(-1)[5 : 5 + count] = torch.linspace(1e-9, 2e-9, count)
    tensors["bias"].zero_()
    out = gather_shim.result("fprop", case, tensors, layout, shape, shape)
    check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"})
    assert gather_shim.done_again() == (ALL_AGAIN if too_many else count)


@pytest.mark.parametrize("shape", GATHER_LANDING)
@pytest.mark.parametrize("too_many", [0, 1])
def test_gather_shim_lists_as_much_as_it_can_of_what_lands(gather_shim, too_many, shape):
    check_list_of_what_lands(gather_shim, too_many, shape)


def test_gather_shim_mends_what_the_sample_missed(gather_shim):
    """A value that is larger than the scale has room for: at the first of some places that the sample does not see."""
    case = Case(9, 72, 12, 12, 40, 3, 3)
    tensors = make_tensors(case, torch.float32, normal)
    plain = tensors["x"].clone()
    for column in range(12):
        tensors["x"].copy_(plain)[5, 40, 6, column] = -1e9
        out = gather_shim.result("fprop", case, tensors, "contiguous", GATHER_CONTAINED[2], column)
        check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"})
        if gather_shim.done_again() != ALL_AGAIN:
            break
    assert gather_shim.done_again() == 1


def test_gather_shim_mends_beside_a_large_bias(gather_shim):
    """Many small products are added up before they meet what they would vanish in one by one."""
    case = Case(2, 40, 6, 6, 16, 3, 3)
    tensors = make_tensors(case, torch.float32, normal)
    tensors["x"].zero_()
    tensors["x"][0] = 1
    tensors["x"][1, :25, 2:5, 2:5] = 1e-9
    tensors["w"].abs_()
    tensors["bias"].fill_(0.1)
    out = gather_shim.result("fprop", case, tensors, "contiguous", GATHER_CONTAINED[0], 0)
    assert gather_shim.done_again() == 25 * 9
    check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("too_many", [0, 1])
def test_gather_shim_mends_as_many_as_it_can_list(gather_shim, too_many, layout):
    case = Case(2, 24, 9, 9, 16, 2, 1)
    tensors = make_tensors(case, torch.float32, normal)
    tensors["x"].zero_()
    tensors["x"][0] = 1
    count = ctypes.c_int.in_dll(gather_shim.library, "most_listed").value + too_many
    tensors["x"][1].view(-1)[:count] = torch.linspace(1e-9, 2e-9, count)
    tensors["bias"].zero_()
    out = gather_shim.result("fprop", case, tensors, layout, GATHER_CONTAINED[too_many], 0)
    check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"})
    assert gather_shim.done_again() == (ALL_AGAIN if too_many else count)


@pytest.mark.parametrize("value", [None, 1e-9, math.nan], ids=str)
@pytest.mark.parametrize("shape", [shape for shape in GATHER_CUT_UP if shape not in GATHER_POINTS])
def test_gather_shim_splits_the_reduction(gather_shim, shape, value):
    """Parts of it, the last one shorter; what is mended comes behind their sum."""
    case = Case(4, 160, 12, 9, 72, 3, 3, padding=(1, 1))
    tensors = make_tensors(case, torch.float32, normal)
    if value is not None:
        tensors["x"][2, 97, 5, 4] = value
    layout = "channels_last" if shape == 2 else "contiguous"  # single words may not be
    with gather_shim.splitting(3, sms=72):
        out = gather_shim.result("fprop", case, tensors, layout, shape, shape)
    assert gather_shim.parts() == 3
    assert gather_shim.done_again() == (value is not None and shape in GATHER_CONTAINED)
    if value is None or math.isfinite(value):
        check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"})
    else:
        expected = references(case, tensors)["fprop"]
        assert same_values(out.isnan(), expected.isnan())
        assert torch.allclose(out.double(), expected, rtol=1e-3, atol=0.2, equal_nan=True)


@pytest.mark.parametrize("splits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", GATHER_CUT_UP)
def test_gather_shim_exact_in_clusters(gather_shim, shape, splits):
    """Parts of the reduction whose blocks read each other's sums, and store their shares of the channels."""
    taps = (3, 3) if shape in GATHER_CONTAINED else (1, 1)
    for channels in (136, 56):
        case, faults = Case(2, 64 * splits - 8, 8, 9, channels, *taps, padding=(taps[0] // 2, taps[0] // 2)), {}
        with gather_shim.splitting(splits, sms=72):
            for seed in range(4):  # tensors at any alignment, as not every shape of a tile takes them
                layout = LAYOUTS[seed % 2]
                fault = gather_shim.fault("fprop", case, torch.float32, shape, layout, seed)
                if fault is not None:
                    assert gather_shim.parts() == splits
                    faults.setdefault(layout, set()).add(fault)
        assert faults
        assert all(found == {""} for found in faults.values()), faults
        # Of several tiles of channels that one has planes only.
        assert shape != GATHER_POINTS[4] or set(faults) == set(LAYOUTS[: 2 if channels <= 64 else 1])


def test_gather_shim_exact_in_clusters_of_the_last_turn(gather_shim):
    """Blocks that have a whole tile before their part of another one: the only parts of tiles of 256 channels."""
    case, shape = Case(4, 120, 8, 9, 136, 1, 1), 0
    for sms, parts in ((2, 2), (3, 1)):  # three tiles
        with gather_shim.splitting(parts, sms):
            faults = [gather_shim.fault("fprop", case, torch.float32, shape, "channels_last", i) for i in range(6)]
        assert "" in faults
        assert set(faults) <= {"", None}
        assert gather_shim.parts() == parts


# Rows of sixteens, too long for a tile: a tile is some of their columns, in the last one of a row fewer, and its lines
# are those of two images, or of the last one and none.
GATHER_SHIM_LINES = [Case(3, 24, 3, 290, 24, 3, 3, padding=(1, 0)), Case(2, 16, 3, 396, 72, 2, 3, padding=(0, 3))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [*GATHER_WINDOWS, *GATHER_CONTAINED])
def test_gather_shim_exact_where_boxes_store_lines(gather_shim, shape, layout):
    by_boxes = []
    for case in GATHER_SHIM_LINES:
        for seed in (2, 9):  # tensors at aligned addresses
            fault = gather_shim.fault("fprop", case, torch.float32, shape, layout, seed)
            assert not fault, f"{case}, shape {shape}, seed {seed}: {fault}"
            by_boxes.append(fault == "" and ctypes.c_int.in_dll(gather_shim.library, "latest_boxes").value == 1)
    # Windows come by single words where channels are no neighbours, which shapes of a tile have not for all that.
    assert any(by_boxes) or (layout == "contiguous" and shape < 2) or shape == GATHER_HALF_A_STAGE


def check_mending_of_all_that_lands(gather_shim: GatherShim) -> None:
    for seed, number in itertools.product(range(12), range(len(ADVERSE_LANDING_CASES))):
        check_mending(gather_shim, number, 1e-9, seeds=(seed,), landing=True)


@pytest.mark.parametrize("mutation", [mutation for mutation in GATHER_MUTATIONS if "land" in mutation])
def test_gather_shim_sees_what_is_missing_of_what_lands(mutation, gather_shim):
    with mutated(gather_shim.library, GATHER_MUTATIONS, mutation), pytest.raises(AssertionError):
        check_mending_of_all_that_lands(gather_shim)


@pytest.mark.parametrize("mutation", [mutation for mutation in GATHER_MUTATIONS if "by tma" in mutation])
def test_gather_shim_sees_what_is_missing_of_what_tma_multiplies(mutation, gather_shim):
    case = Case(4, 72, 6, 9, 136, 3, 3, padding=(1, 1))

    def are_right() -> bool:
        runs = [*itertools.product((0, 1), LAYOUTS, (1, 2, 3, 4))]
        faults = []
        for windows, layout, seed in runs:
            with tma_wishes(gather_shim, windows):
                faults.append(gather_shim.fault("fprop", case, torch.float32, GATHER_BY_TMA[-2], layout, seed))
        tensors = make_tensors(case, torch.float32, integers)
        tensors["w"] *= 2.0 ** (torch.arange(case.K) % 4).view(-1, 1, 1, 1)  # scales that differ
        out = gather_shim.result("fprop", case, tensors, "contiguous", GATHER_BY_TMA[-2], 0)
        return set(faults) == {""} and torch.equal(out, references(case, tensors)["fprop"].float())

    assert are_right()
    with mutated(gather_shim.library, GATHER_MUTATIONS, mutation):
        assert not are_right()


@pytest.mark.parametrize("mutation", [mutation for mutation in GATHER_MUTATIONS if "cluster" in mutation])
def test_gather_shim_sees_what_is_missing_of_clusters(mutation, gather_shim):
    case = Case(2, 200, 12, 9, 136, 3, 3, padding=(1, 1))
    with mutated(gather_shim.library, GATHER_MUTATIONS, mutation), gather_shim.splitting(2, sms=12):
        assert any(
            gather_shim.fault_in_turn("fprop", case, torch.float32, seed, "channels_last", seed)[1]
            for seed in (1, 3, 5, 4, 7, 9)
        )


@pytest.mark.parametrize("mutation", [mutation for mutation in GATHER_MUTATIONS if "images" in mutation])
def test_gather_shim_sees_what_is_missing_of_images(mutation, gather_shim):
    case, operator = GATHER_IMAGES_CASES[0]
    with by_images(gather_shim), mutated(gather_shim.library, GATHER_MUTATIONS, mutation):
        assert any(gather_shim.fault(operator, case, torch.float32, 4, "contiguous", seed) for seed in (2, 9))


@pytest.mark.parametrize(
    "mutation", [mutation for mutation in GATHER_MUTATIONS if not re.search("land|cluster|by tma|images", mutation)]
)
def test_gather_shim_sees_what_is_missing(mutation, gather_shim):
    """The shim itself: what is left out shows in one of a few runs."""
    cases = [
        (Case(3, 40, 12, 12, 72, 1, 1), "contiguous", torch.float16),
        (Case(9, 72, 12, 12, 72, 1, 1), "channels_last", torch.float32),
        (Case(9, 72, 5, 6, 130, 3, 3, padding=(1, 1)), "contiguous", torch.float16),
        (Case(4, 40, 5, 6, 24, 2, 3), "channels_last", torch.float32),
    ]
    splits, contained = 0, False
    special = {
        "x itself": (GATHER_SHIM_PHASES_OF_X[0], "channels_last", torch.float32),
        "copies": (Case(9, 136, 7, 7, 300, 1, 1), "contiguous", torch.float32),
        "first tile of channels": (Case(9, 72, 5, 6, 300, 1, 1), "channels_last", torch.float16),
    }
    cases = [case for words, case in special.items() if words in mutation] or cases
    if "phase" in mutation:
        cases, contained = [(GATHER_SHIM_PHASED_CASES[0], "contiguous", torch.float32)], True
    if "start of a part" in mutation:
        splits = 4
    if "box" in mutation:
        cases = cases[1:2]
    if "lines" in mutation:
        cases = [(case, layout, torch.float32) for case in GATHER_SHIM_LINES for layout in LAYOUTS]
    elif "planes" in mutation or "next image" in mutation:  # 81 boxes of 16 pixels, or some with pixels of two images
        size = 12 if "planes" in mutation else 10
        cases = [(Case(9, 72, size, 12, 72, 1, 1), "contiguous", torch.float32)]
    if "all again" in mutation:
        with mutated(gather_shim.library, GATHER_MUTATIONS, mutation), pytest.raises(AssertionError):
            check_list_of_what_lands(gather_shim, 1, GATHER_LANDING[0])
        return
    if re.match("contains|leaves|mends", mutation):
        kinds = {"phase": ADVERSE_PHASES, "group": ADVERSE_GROUPS, "eights": 1, "share": 4}
        number = next((number for kind, number in kinds.items() if kind in mutation), 2)
        with mutated(gather_shim.library, GATHER_MUTATIONS, mutation), pytest.raises(AssertionError):
            check_mending(gather_shim, number, 1e-9, seeds=range(6))
        return
    with (
        mutated(gather_shim.library, GATHER_MUTATIONS, mutation),
        gather_shim.splitting(splits, sms=72 if splits > 0 else 3),
    ):
        assert any(
            gather_shim.fault("fprop", case, dtype, GATHER_CONTAINED[seed % len(GATHER_CONTAINED)], layout, seed)
            if contained
            else gather_shim.fault_in_turn("fprop", case, dtype, seed, layout, seed)[1]
            for seed in (1, 3, 5, 4, 7, 9)
            for case, layout, dtype in cases
        )
