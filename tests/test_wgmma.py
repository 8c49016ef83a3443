"""The wgmma engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import random
import re
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from tests.cases import (
    ADVERSE,
    CONTAINED_KINDS,
    MARKED_KINDS,
    Case,
    adverse_tensors,
    check_bounds,
    check_exact,
    integers,
    make_tensors,
    margins_intact,
    normal,
    references,
    same_values,
    with_margins,
)
from tests.emulation import mutated
from tests.engines import WGMMA_SPLIT_CONFIGURATIONS
from tests.mutations import WGMMA_MUTATIONS
from tests.problems import (
    WGMMA_CANDIDATES,
    WGMMA_CASE,
    WGMMA_CASES,
    WGMMA_DTYPES,
    WGMMA_OPERATORS,
    WGMMA_PRECISIONS,
    wgmma_tile,
    wgmma_tiles,
)


def random_wgmma_cases(count: int, seed: int) -> list[Case]:
    """Any filter up to 7x7, channels and columns around the tiles' and the stages' sizes, padding of any size."""
    rng = random.Random(seed)

    def draw() -> Case:
        groups = rng.choice([1, 1, 1, 2, 3])
        C, K = (groups * rng.choice([8, 9, 16, 17, 31, 40, 64, 65, 100, 130, 300]) for _ in range(2))
        W = rng.choice([32, 33, 63, 64, 65, 127, 129, 255, 256, 257, 300, 513, 1030])
        N, H, R, S = rng.choice([1, 1, 2, 5, 13]), rng.randint(1, 60), rng.randint(1, 7), rng.randint(1, 7)
        padding, dilation = rng.choices(range(10), k=2), rng.choices([1, 1, 2, 3], k=2)
        return Case(N, C, H, W, K, R, S, (1, 1), tuple(padding), tuple(dilation), groups)

    cases = (draw() for _ in itertools.count())
    return list(itertools.islice((case for case in cases if min(case.y_shape) > 0), count))


# What has been wrong once: a last block of channels that takes fewer groups of steps than the others; x at an odd
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

# By number: four widths of a tile, of 128 or 64 channels, rightwards; the widest of both downwards, as the others have
# several rows of pixels a warpgroup. TF32 also has 128 pixels downwards, and the others with contained operands; fp32
# in full the three narrow ones of half the size. -1 is the planner's choice.
WGMMA_CONFIGURATIONS = {-1, *range(8), 8, 12}
WGMMA_FP32_CONFIGURATIONS = {16, *(32 + number for number in WGMMA_CONFIGURATIONS if number >= 0)}


def wgmma_configurations(dtype: torch.dtype, tf32: bool = True) -> set[int]:
    if dtype == torch.float32 and not tf32:
        return {-1} | WGMMA_SPLIT_CONFIGURATIONS
    return WGMMA_CONFIGURATIONS | (WGMMA_FP32_CONFIGURATIONS if dtype == torch.float32 else set())


@pytest.mark.parametrize("operator", WGMMA_OPERATORS)
@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
def test_wgmma_plans_are_sound(wgmma_plans, dtype, tf32, operator):
    """Each tile once, runs without a break, windows kept where they go on, all in 227 KiB: every configuration."""
    rng, planned = random.Random(0), set()
    for case in HARD_WGMMA_CASES + random_wgmma_cases(1000, seed=0):
        if wgmma_plans("refusal", operator, case, torch.float16) is not None:
            continue
        memory_format = rng.choice([torch.contiguous_format] * 4 + [torch.channels_last])
        fields = wgmma_plans.fields(case, dtype, tf32, memory_format)
        for configuration in range(-1, 96):
            for address in (0, dtype.itemsize):
                places = ctypes.c_uint64(address), ctypes.c_uint64(rng.choice([0, 16, dtype.itemsize]))
                fault = wgmma_plans.call("fault", operator, fields, configuration, *places)
                assert not fault, f"{operator} of {case}, configuration {configuration}, {places}: {fault}"
                planned |= {configuration} if fault is not None else set()
    assert planned == wgmma_configurations(dtype, tf32)


@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
def test_wgmma_estimates_grow_with_the_batch(wgmma_plans, dtype, tf32):
    for case, operator in itertools.product(random_wgmma_cases(1000, seed=1), WGMMA_OPERATORS):
        by_size = dtype == torch.float32 and tf32 and case.multiply_adds < 2**27  # whether it is TF32
        if not by_size and wgmma_plans("refusal", operator, case, torch.float16) is None:
            once = wgmma_plans("cycles", operator, case, dtype, tf32=tf32)
            twice = wgmma_plans("cycles", operator, dataclasses.replace(case, N=2 * case.N), dtype, tf32=tf32)
            assert 0 < once <= twice, f"{operator} of {case}"


# The project's reference cases, and whether they go downwards, where rings of 6 rows of 256 columns and 64 channels
# would leave no room for weights. 16 channels take longest to store, which is faster in runs.
@pytest.mark.parametrize(
    "case, down",
    [
        (Case(16, 16, 1024, 1024, 128, 3, 3), False),
        (Case(8, 64, 512, 1024, 128, 3, 3), True),
        (Case(8, 64, 512, 256, 128, 5, 7), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
def test_wgmma_tiles_of_the_reference_cases(wgmma_plans, case, down, dtype, tf32):
    direction = "downwards" if down else "rightwards"
    described = wgmma_plans("describe", "fprop", case, dtype, tf32=tf32)
    assert wgmma_tile(described) == (128, 256 if tf32 else 128, direction)
    assert described.startswith("in scaled fp16, ") == (dtype == torch.float32 and tf32)
    assert described.startswith("in two parts of scaled fp16, ") == (not tf32)
    # No channels of dx are left idle; how many columns a tile has is the planner's to estimate.
    channels, _, _ = wgmma_tile(wgmma_plans("describe", "dgrad", case, dtype, tf32=tf32))
    assert channels == 64


def test_wgmma_describes_its_configuration(wgmma_plans):
    """Whole and in the 320 bytes that the binding has for it."""
    weights = r"(resident weights|weights in \d+ stages of \d+ bytes)"
    cases = itertools.product(random_wgmma_cases(100, seed=2), WGMMA_OPERATORS, WGMMA_DTYPES, (True, False))
    for case, operator, dtype, tf32 in cases:
        if wgmma_plans("refusal", operator, case, dtype, tf32=tf32) is None:
            assert re.fullmatch(
                r"(in (two parts of )?scaled fp16, )?tile of (64|128) channels x \d+ x (32|64|128|256) pixels, "
                r"(downwards|rightwards), "
                rf"\d+ input channels a row of \d+, {weights}, (boxes, |boxes of every \d\w\w channel, )?"
                r"\d+ bytes of shared memory, \d+ blocks, units of \d+ tiles, about [\d.e+-]+ Mcycles",
                wgmma_plans("describe", operator, case, dtype, tf32=tf32),
            )


WGMMA_REFUSALS = [
    (WGMMA_CASE, "fprop", torch.float32, {}, None),
    (WGMMA_CASE, "fprop", torch.float32, {"tf32": False}, None),
    (Case(1, 40, 30, 42, 40, 3, 3), "fprop", torch.float32, {}, "2^25 multiply-adds"),
    (Case(1, 40, 66, 66, 23, 3, 3), "fprop", torch.float32, {}, None),
    (Case(1, 40, 66, 66, 22, 3, 3), "dgrad", torch.float32, {"tf32": False}, "2^25 multiply-adds"),
    (Case(1, 40, 66, 66, 23, 3, 3), "dgrad", torch.float32, {"tf32": False}, None),
    (Case(8, 63, 130, 202, 65, 1, 1), "fprop", torch.float32, {"tf32": False}, "64 terms"),
    (Case(8, 63, 130, 202, 65, 1, 1), "dgrad", torch.float32, {"tf32": False}, None),
    (Case(8, 63, 130, 202, 65, 1, 1), "fprop", torch.float32, {}, None),
    (Case(1, 40, 30, 40, 40, 3, 3), "fprop", torch.float16, {"tf32": False}, None),
    (WGMMA_CASE, "fprop", torch.float64, {}, "float64"),
    (WGMMA_CASE, "wgrad", torch.float16, {}, "outputs and input gradients only"),
    (WGMMA_CASE, "bgrad", torch.float16, {}, "outputs and input gradients only"),
    (Case(1, 16, 80, 80, 16, 3, 3, stride=(2, 1)), "fprop", torch.float16, {}, "stride 1"),
    (Case(1, 16, 80, 80, 16, 3, 3, stride=(1, 2)), "dgrad", torch.float16, {}, "stride 1"),
    (Case(1, 16, 3, 80, 16, 3, 3, stride=(2, 1)), "fprop", torch.float16, {}, None),  # one row: no stride in it
    (Case(1, 16, 80, 33, 16, 3, 3), "fprop", torch.float16, {}, "32 columns"),
    (Case(1, 16, 80, 33, 16, 3, 3), "dgrad", torch.float16, {}, None),
    (Case(1, 16, 80, 31, 16, 3, 3, padding=(0, 2)), "fprop", torch.float16, {}, None),
    (Case(1, 16, 80, 31, 16, 3, 3, padding=(0, 2)), "dgrad", torch.float16, {}, "32 columns"),
    (Case(1, 7, 80, 80, 16, 3, 3), "fprop", torch.float16, {}, "8 input channels"),
    (Case(1, 7, 80, 80, 16, 3, 3), "dgrad", torch.float16, {}, "8 output channels"),
    (Case(1, 16, 80, 80, 14, 3, 3, groups=2), "fprop", torch.float16, {}, "8 output channels"),
    (Case(1, 16, 80, 80, 14, 3, 3, groups=2), "dgrad", torch.float16, {}, "8 input channels"),
    (Case(1, 16, 80, 80, 16, 3, 3, groups=16), "fprop", torch.float16, {}, "8 input channels"),
    (Case(1, 16, 300, 300, 16, 3, 3, dilation=(100, 100)), "fprop", torch.float16, {}, "does not fit"),
    (WGMMA_CASE, "fprop", torch.float16, {"capability": 80}, "Hopper"),
    (WGMMA_CASE, "fprop", torch.float16, {"capability": 89}, "Hopper"),
    (WGMMA_CASE, "fprop", torch.float16, {"capability": 100}, "Hopper"),
    (WGMMA_CASE, "fprop", torch.float16, {"capability": 0}, "Hopper"),
]


@pytest.mark.parametrize("case, operator, dtype, settings, text", WGMMA_REFUSALS, ids=str)
def test_wgmma_says_what_it_refuses(wgmma_plans, case, operator, dtype, settings, text):
    settings = dict(settings)
    wgmma_plans.library.set_capability(settings.pop("capability", 90))
    try:
        refusal = wgmma_plans("refusal", operator, case, dtype, **settings)
    finally:
        wgmma_plans.library.set_capability(90)
    assert (refusal is None) == (text is None), refusal
    assert text is None or text in refusal


# 2^29 multiply-adds are where mma is slower again; of TF32 gather has what has no long rows, or few values.
@pytest.mark.parametrize(
    "case, settings, to",
    [
        (Case(1, 64, 130, 258, 128, 3, 3), {"tf32": False}, None),
        (Case(1, 64, 50, 58, 128, 3, 3), {"tf32": False}, "mma"),
        (Case(1, 64, 50, 58, 128, 3, 3), {}, "gather"),  # few outputs
        (Case(1, 32, 259, 258, 128, 3, 3), {}, None),
        (Case(1, 32, 258, 258, 128, 3, 3), {}, "gather"),  # 2^23 outputs
        (Case(1, 64, 8, 34, 128, 3, 3), {}, "mma"),  # too small for TF32
        (Case(1, 64, 50, 58, 128, 3, 3), {"dtype": torch.float16}, None),
        (Case(1, 64, 130, 258, 128, 1, 1), {}, "gather"),
        (Case(1, 64, 130, 258, 128, 1, 1), {"tf32": False}, "mma"),
        (Case(4, 64, 130, 258, 128, 1, 1), {"tf32": False}, None),
        (Case(1, 64, 50, 58, 128, 3, 3), {"memory_format": torch.channels_last}, "gather"),
        (Case(1, 64, 50, 58, 128, 3, 3), {"memory_format": torch.channels_last, "tf32": False}, "mma"),
    ],
    ids=str,
)
def test_wgmma_yields_to_what_is_faster(wgmma_plans, case, settings, to):
    settings = dict(settings)
    dtype = settings.pop("dtype", torch.float32)
    reason = wgmma_plans("yields", "fprop", case, dtype, **settings)
    assert (reason is None) == (to is None), reason
    assert to is None or reason.startswith(f"{to} is faster")
    wgmma_plans.library.let_others_refuse(True)
    try:
        assert wgmma_plans("yields", "fprop", case, dtype, **settings) is None
    finally:
        wgmma_plans.library.let_others_refuse(False)


MANY_CHANNELS = Case(32, 128, 130, 130, 128, 3, 3)


@pytest.mark.parametrize(
    "case, operators",
    [
        (MANY_CHANNELS, ("fprop", "dgrad")),
        (dataclasses.replace(MANY_CHANNELS, C=127), ("dgrad",)),
        (dataclasses.replace(MANY_CHANNELS, K=127), ("fprop",)),
        (dataclasses.replace(MANY_CHANNELS, K=64, N=40), ("fprop",)),
        (dataclasses.replace(MANY_CHANNELS, K=63, N=40), ()),
        (dataclasses.replace(MANY_CHANNELS, C=256, K=256, groups=2), ()),
        (dataclasses.replace(MANY_CHANNELS, R=9, S=1), ("fprop", "dgrad")),
        (dataclasses.replace(MANY_CHANNELS, R=5, S=2), ()),
        # 2^28 values of dy, and more; there are fewer of x.
        (dataclasses.replace(MANY_CHANNELS, N=64, K=256), ("fprop", "dgrad")),
        (dataclasses.replace(MANY_CHANNELS, N=65, K=256), ("fprop",)),
        (Case(128, 128, 128, 128, 128, 3, 3), ("fprop", "dgrad")),
        (Case(129, 128, 128, 128, 128, 3, 3), ("dgrad",)),
    ],
    ids=str,
)
def test_wgmma_yields_with_many_channels(wgmma_plans, case, operators):
    for operator in ("fprop", "dgrad"):
        reason = wgmma_plans("yields", operator, case, torch.float32)
        assert reason == ("gather is faster with many input channels" if operator in operators else None)
        assert wgmma_plans("yields", operator, case, torch.float16) is None
        assert wgmma_plans("yields", operator, case, torch.float32, tf32=False) is None


SOME_CHANNELS = Case(50, 64, 130, 130, 64, 3, 3)


@pytest.mark.parametrize(
    "case, yields",
    [
        (SOME_CHANNELS, True),
        (dataclasses.replace(SOME_CHANNELS, N=51), False),  # of x and y together 108 million values
        (dataclasses.replace(SOME_CHANNELS, C=63), False),
        (dataclasses.replace(SOME_CHANNELS, K=63), False),
        (dataclasses.replace(SOME_CHANNELS, N=20, C=128, K=128, groups=2), False),
        (dataclasses.replace(SOME_CHANNELS, R=9, S=1), True),
        (dataclasses.replace(SOME_CHANNELS, R=5, S=2), False),
        (dataclasses.replace(SOME_CHANNELS, N=30, K=127), True),
        (dataclasses.replace(SOME_CHANNELS, N=40, K=127), False),
    ],
    ids=str,
)
def test_wgmma_yields_with_some_channels_and_few_values(wgmma_plans, case, yields):
    for operator in ("fprop", "dgrad"):
        reason = wgmma_plans("yields", operator, case, torch.float32)
        assert reason == ("gather is faster with few values" if yields else None)
        assert wgmma_plans("yields", operator, case, torch.float16) is None
        assert wgmma_plans("yields", operator, case, torch.float32, tf32=False) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("lands", [True, False])
@pytest.mark.parametrize("cycles", [1, 1e30])
@pytest.mark.parametrize("R", [3, 2])
def test_wgmma_yields_where_x_is_contained_on_its_way(wgmma_plans, R, cycles, lands, tf32, dtype):
    """To what gather contains on its way: 3x3, as measured; other filters by the estimates."""
    case = dataclasses.replace(SOME_CHANNELS, N=64, R=R)
    wgmma_plans.library.let_gather_land(lands)
    wgmma_plans.library.let_others_take(ctypes.c_double(cycles))
    try:
        reason = wgmma_plans("yields", "fprop", case, dtype, tf32=tf32)
    finally:
        wgmma_plans.library.let_gather_land(False)
        wgmma_plans.library.let_others_take(ctypes.c_double(1e30))
    expected = None
    if tf32 and dtype == torch.float32:
        if lands and (R == 3 or cycles == 1):
            expected = "gather is faster where it scales x to fp16 while loading it"
        elif cycles == 1:
            expected = "gather is faster by the estimates"
    assert reason == expected


@pytest.mark.parametrize(
    "channels, dtype, memory_format, yields",
    [
        ({}, torch.float16, torch.channels_last, True),
        ({}, torch.bfloat16, torch.channels_last, True),
        ({"C": 24}, torch.float16, torch.channels_last, True),
        ({"C": 16}, torch.float16, torch.channels_last, False),
        ({"C": 60}, torch.float16, torch.channels_last, False),
        ({"groups": 2}, torch.float16, torch.channels_last, False),
        ({}, torch.float16, torch.contiguous_format, False),
        ({}, torch.float32, torch.channels_last, False),  # in full accuracy
    ],
    ids=str,
)
def test_wgmma_yields_in_channels_last_of_16_bits(wgmma_plans, channels, dtype, memory_format, yields):
    case = dataclasses.replace(SOME_CHANNELS, **channels)
    reason = wgmma_plans("yields", "fprop", case, dtype, tf32=False, memory_format=memory_format)
    assert reason == ("gather is faster in channels_last" if yields else None)


@pytest.mark.parametrize(
    "case, of_own, yields",
    [
        (dataclasses.replace(SOME_CHANNELS, N=64), 1.29, True),
        (dataclasses.replace(SOME_CHANNELS, N=64), 1.31, False),
        (dataclasses.replace(SOME_CHANNELS, N=64, K=63), 1.29, False),
        (dataclasses.replace(SOME_CHANNELS, N=64, C=128, K=128, groups=2), 1.29, False),
        (dataclasses.replace(SOME_CHANNELS, N=64, R=5), 1.29, False),
    ],
    ids=str,
)
def test_wgmma_yields_by_the_estimates(wgmma_plans, case, of_own, yields):
    """To gather, unless that takes far longer by its estimate."""
    cycles = wgmma_plans("cycles", "fprop", case, torch.float32)
    wgmma_plans.library.let_others_take(ctypes.c_double(of_own * cycles))
    try:
        reason = wgmma_plans("yields", "fprop", case, torch.float32)
    finally:
        wgmma_plans.library.let_others_take(ctypes.c_double(1e30))
    assert reason == ("gather is faster by the estimates" if yields else None)


@pytest.mark.parametrize(
    "dilation, of_own, yields",
    [
        ((12, 12), 1.29, True),
        ((1, 12), 1.29, True),
        ((12, 1), 1.29, True),
        ((12, 12), 1.31, False),
        ((1, 1), 1.29, False),
    ],
)
def test_wgmma_yields_where_taps_lie_far_apart(wgmma_plans, dilation, of_own, yields):
    """To mma, where gather does not take them."""
    case = dataclasses.replace(SOME_CHANNELS, dilation=dilation)
    cycles = wgmma_plans("cycles", "fprop", case, torch.float32)
    wgmma_plans.library.let_gather_refuse(True)
    wgmma_plans.library.let_mma_take(ctypes.c_double(of_own * cycles))
    try:
        assert wgmma_plans("yields", "fprop", case, torch.float16) is None
        reason = wgmma_plans("yields", "fprop", case, torch.float32)
        wgmma_plans.library.let_others_refuse(True)
        assert wgmma_plans("yields", "fprop", case, torch.float32) is None
    finally:
        wgmma_plans.library.let_others_refuse(False)
        wgmma_plans.library.let_gather_refuse(False)
        wgmma_plans.library.let_mma_take(ctypes.c_double(1e30))
    assert reason == ("mma is faster where taps lie far apart" if yields else None)


@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
def test_wgmma_cases_are_wgmmas(wgmma_plans, dtype, tf32):
    """That the cases for the GPU do not miss the engine, or some tile of it, or one of its directions."""
    for case, operator in itertools.product(WGMMA_CASES, WGMMA_OPERATORS):
        if not tf32 and min(case.C, case.K) // case.groups * case.R * case.S < 64:
            continue
        assert wgmma_plans("refusal", operator, case, dtype, tf32=tf32) is None, f"{operator} of {case}"
    for case in WGMMA_CANDIDATES:
        if tf32 or case.C * case.R * case.S >= 64:
            assert wgmma_plans("refusal", "fprop", case, dtype, tf32=tf32) is None, case
    tiles = {wgmma_tile(wgmma_plans("describe", "fprop", case, dtype, tf32=tf32)) for case in WGMMA_CANDIDATES}
    assert tiles == wgmma_tiles(dtype, tf32)


def small_wgmma_cases(count: int, seed: int) -> Iterator[tuple[Case, str, torch.dtype]]:
    """A few tiles each: one to three rows of them, ragged channels, filters, padding, dilation, groups."""
    rng = random.Random(seed)
    while count > 0:
        groups, R, S = rng.choice([1, 1, 1, 2]), rng.randint(1, 3), rng.randint(1, 4)
        C, K = groups * rng.choice([8, 9, 16, 16, 24, 40, 64]), groups * rng.choice([8, 20, 64, 100, 128, 130, 200])
        H, W = rng.randint(R, 9), rng.choice([rng.randint(32, 92), rng.randint(100, 300), rng.randint(250, 600)])
        padding, dilation = (rng.randint(0, 1), rng.randint(0, 2)), (rng.choice([1, 1, 2]), rng.choice([1, 1, 2]))
        case = Case(rng.randint(1, 2), C, H, W, K, R, S, (1, 1), padding, dilation, groups)
        if min(case.y_shape) > 0 and case.y_shape[3] >= 32:
            yield case, rng.choice(WGMMA_OPERATORS), rng.choice(WGMMA_DTYPES)
            count -= 1


@pytest.mark.parametrize("configuration", sorted(wgmma_configurations(torch.float32) | WGMMA_SPLIT_CONFIGURATIONS))
def test_wgmma_shim_exact(wgmma_shim, configuration):
    runs, only_fp32 = 0, configuration >= 16
    count = 6 if not only_fp32 else 2 if 64 <= configuration < 72 else 4  # these take every case
    for number, (case, operator, dtype) in enumerate(small_wgmma_cases(count, seed=configuration)):
        dtype = torch.float32 if only_fp32 else dtype
        fault = wgmma_shim.fault(operator, case, dtype, configuration, seed=number)
        assert not fault, f"{operator} of {case}, {dtype}, seed {number}: {fault}"
        runs += fault is not None
    assert runs >= 2


# Weights that are streamed, and x that boxes can load: whole chunks and rests of one row, of several, of several steps;
# rests alone; a last block of channels that is not full; blocks of channels; groups.
CHUNK_CASES = [
    ("fprop", Case(1, 64, 4, 264, 128, 3, 3), 40),
    ("fprop", Case(1, 64, 8, 264, 128, 4, 3, padding=(1, 1)), 32),
    ("dgrad", Case(2, 100, 6, 132, 72, 3, 3, padding=(0, 3)), 33),
    ("fprop", Case(1, 120, 5, 68, 128, 3, 3, padding=(1, 2)), 34),
    ("fprop", Case(1, 128, 3, 140, 256, 3, 3, padding=(0, 1), groups=2), 32),
]


@pytest.mark.parametrize("number", range(len(CHUNK_CASES)))
def test_wgmma_shim_loads_chunks(wgmma_shim, number):
    operator, case, configuration = CHUNK_CASES[number]
    tensors = make_tensors(case, torch.float32, integers, seed=number)
    expected = references(case, tensors)[operator]
    out = with_margins(torch.full(expected.shape, math.nan))
    assert wgmma_shim.run(operator, case, tensors, configuration, number, out) == ""
    assert ctypes.c_int.in_dll(wgmma_shim.library, "chunks").value == 1
    assert torch.equal(out, expected.float())
    assert margins_intact(out)


ADVERSE_SHIM_CASES = [
    ("fprop", Case(2, 16, 6, 300, 128, 3, 3), 32),
    ("fprop", Case(2, 16, 6, 300, 128, 3, 3), 40),
    ("dgrad", Case(2, 70, 12, 150, 40, 3, 4, padding=(1, 2)), 33),
    ("fprop", Case(2, 18, 13, 70, 140, 2, 2, groups=2, dilation=(2, 1)), 38),
]
ADVERSE_SPLIT_CASES = [
    ("fprop", Case(2, 16, 6, 300, 128, 3, 3), 64),
    ("fprop", Case(2, 16, 6, 300, 128, 3, 3), 72),
    ("dgrad", Case(2, 70, 12, 150, 40, 3, 4, padding=(1, 2)), 69),
    ("fprop", Case(2, 18, 13, 70, 140, 2, 2, groups=2, dilation=(2, 1)), 66),
]


# All kinds as TF32, every other one in full: a GPU does all.
ADVERSE_RUNS = [
    *(pytest.param(ADVERSE_SHIM_CASES, number, kind, id=f"{kind}, tf32") for number, kind in enumerate(ADVERSE)),
    *(
        pytest.param(ADVERSE_SPLIT_CASES, number, kind, id=f"{kind}, fp32")
        for number, kind in enumerate([*ADVERSE][::2])
    ),
]


@pytest.mark.parametrize("cases, number, kind", ADVERSE_RUNS)
def test_wgmma_shim_contains_what_fits_and_does_the_rest_again(wgmma_shim, cases, number, kind):
    """Within the contract, whatever the data; and the tiles that are done twice are those that have to be, or few."""
    operator, case, configuration = cases[number % len(cases)]
    tensors = adverse_tensors(case, kind, operator)
    out = with_margins(torch.full({"fprop": case.y_shape, "dgrad": case.x_shape}[operator], math.nan))
    assert wgmma_shim.run(operator, case, tensors, configuration, number, out) == ""
    check_bounds(case, {operator: out}, tensors, tf32={operator} if cases is ADVERSE_SHIM_CASES else ())
    assert margins_intact(out)
    done, of = (ctypes.c_int.in_dll(wgmma_shim.library, name).value for name in ("done_again", "of_tiles"))
    if kind in CONTAINED_KINDS:
        assert done == 0
    elif kind in MARKED_KINDS:
        assert done > 0  # the sample of tensors as small as these sees some of them
    else:
        assert done == of


@pytest.mark.parametrize(
    "configuration, column, tiles, value",
    [
        (32, 300, 3, 1e-12),
        (32, 257, 6, 1e9),
        (40, 580, 3, 3e-42),
        (40, 257, 6, -1e-12),
        (64, 300, 3, 1e-12),
        (64, 257, 6, math.nan),
        (72, 580, 3, 3e-42),
        (72, 257, 6, -math.inf),
    ],
)
def test_wgmma_shim_marks_the_tiles_whose_windows_have_it(wgmma_shim, configuration, column, tiles, value):
    """Those of three rows, and of two columns if it lies in the halo; and no sample sees these places."""
    case = Case(2, 16, 9, 600, 128, 3, 3)
    tensors = make_tensors(case, torch.float32, normal)
    tensors["x"][1, 5, 4, column] = value
    out = with_margins(torch.full(case.y_shape, math.nan))
    assert wgmma_shim.run("fprop", case, tensors, configuration, seed=column, out=out) == ""
    tf32 = configuration not in WGMMA_SPLIT_CONFIGURATIONS
    if math.isfinite(value):
        check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"} if tf32 else ())
    else:
        expected = references(case, tensors)["fprop"]
        finite = expected.isfinite()
        assert same_values(out[~finite], expected[~finite].float())
        assert torch.allclose(out[finite].double(), expected[finite], rtol=1e-5, atol=1e-4)
    assert ctypes.c_int.in_dll(wgmma_shim.library, "done_again").value == tiles


@pytest.mark.parametrize("configuration", [0, 8, 12, 16, 32, 33, 40, 44, 64, 65, 72, 76])
def test_wgmma_shim_exact_in_other_strides(wgmma_shim, configuration):
    """Channels last; and images of one row in wider ones: the distance of rows, an odd number, must not matter."""
    case, flat = Case(1, 16, 9, 300, 72, 3, 3, padding=(1, 1)), Case(2, 16, 1, 300, 72, 3, 3, padding=(1, 1))
    plain, tensors = (make_tensors(of, torch.float32, integers) for of in (case, flat))
    last = {name: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for name, t in plain.items()}
    y = torch.full(case.y_shape, math.nan).contiguous(memory_format=torch.channels_last)
    tensors["x"] = F.pad(tensors["x"], (0, 1, 0, 1), value=math.nan)[:, :, :1, :300]
    runs = [(case, last, y), (flat, tensors, torch.full(flat.y_shape, math.nan))]
    for seed, (of, operands, out) in itertools.product(range(2), runs):
        out.fill_(math.nan)
        message = wgmma_shim.run("fprop", of, operands, configuration, seed, out)
        assert message == "" or (message is None and configuration == 16 and of is case)
        if message == "":
            check_exact(of, {"fprop": out}, operands)


@pytest.mark.parametrize("mutation", WGMMA_MUTATIONS)
def test_wgmma_shim_sees_what_is_missing(mutation, wgmma_shim):
    """The shim itself: a synchronisation that is left out shows in one of a few runs."""
    cases = [
        (Case(2, 64, 9, 300, 128, 3, 3), -1, torch.float16),
        (Case(2, 16, 9, 600, 128, 3, 3), 0, torch.float16),
        (Case(1, 16, 16, 300, 128, 3, 3), 8, torch.float16),
        (Case(1, 72, 9, 300, 128, 3, 3), 1, torch.float32),
        (Case(2, 16, 9, 600, 128, 3, 3), 0, torch.float32),
    ]
    if "adds up" in mutation:
        cases = [(Case(1, 16, 9, 300, 128, 3, 3), 64, torch.float32)]
    elif "box" in mutation:
        cases = [cases[1], cases[4]]
    with mutated(wgmma_shim.library, WGMMA_MUTATIONS, mutation):
        assert any(
            wgmma_shim.fault("fprop", case, dtype, configuration, seed)
            for seed in range(6)
            for case, configuration, dtype in cases
        )
