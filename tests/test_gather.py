"""The gather engine's kernels without a GPU: ways in which x comes, containing, what is done again, clusters."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
from collections.abc import Sequence

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
    make_tensors,
    normal,
    reference,
    same_values,
)
from tests.engines import (
    ALL_AGAIN,
    GATHER_BY_TMA,
    GATHER_CONTAINED,
    GATHER_LANDING,
    GATHER_POINTS,
    GATHER_SHAPES,
    GATHER_SHAPES_16,
    GATHER_WINDOWS,
    EmulatedGather,
)
from tests.problems import check_misfits, misfit_places, misfit_tensors

FP32, FP16 = torch.float32, torch.float16


def groups_as_one(case: Case, operator: str) -> int:
    """How many groups gather may multiply as one of 64 input channels."""
    in_channels = (case.C if operator == "fprop" else case.K) // case.groups
    several = 64 // in_channels if case.groups > 1 and 64 % in_channels == 0 else 1
    return several if case.groups % several == 0 else 1


# Channels of a tile of what is contained on its way, rows of a warpgroup, columns, and the stride.
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


# ---- Ways in which x comes. Cases of every Source but the one of any, in its order: single words, fours of pixels,
# images, channels, boxes, boxes of phases of x and boxes of a tap. 16 bits have neither images nor the last two. The
# shape of half a stage, in which pieces of channels are apart, takes neither 1x1 nor boxes: it has cases of its own.
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
# Shape of a tile, source, and that of its kernel. Others have single words of images and phases, or a copy.
GATHER_KERNELS = [
    (shape, source, source, FP32)
    for shape, source in itertools.product(GATHER_SHAPES, range(GATHER_ANY))
    if shape in GATHER_SHAPES_OF_PHASES
    or source in ((0, GATHER_CHANNELS) if shape == GATHER_HALF_A_STAGE else range(GATHER_PHASES))
    if shape in GATHER_SHAPES_OF_IMAGES or source != GATHER_IMAGES
] + [
    (shape, source, GATHER_ANY, FP16)
    for shape, source in itertools.product(GATHER_SHAPES_16, (0, 1, GATHER_CHANNELS, GATHER_BOXES))
]


@pytest.mark.parametrize("shape, source, of_kernel, dtype", GATHER_KERNELS, ids=str)
def test_gather_shim_runs_each_kernel(gather_shim, shape, source, of_kernel, dtype):
    """Each shape of a tile with x by each way there is for it; for the others there is no plan."""
    case, layout = GATHER_SOURCES[source]
    if shape == GATHER_HALF_A_STAGE:
        case = Case(2, case.C, 9, 8, 136, 3, 3)
    settings = {"shape": shape, "shift": 0}
    if shape in GATHER_POINTS and case.R > 1:
        assert gather_shim.fault("fprop", case, layout, 2, dtype, **settings) is None
        case = dataclasses.replace(case, K=56, R=1, S=1, padding=(0, 0))
    gather_shim.library.gather_sources.restype = ctypes.c_uint
    if not gather_shim.library.gather_sources(shape) >> of_kernel & 1:
        assert gather_shim.fault("fprop", case, layout, 2, dtype, **settings) is None
        return
    for seed in (0, 1):  # at once, and as late as it may be
        fault = gather_shim.fault("fprop", case, layout, seed, dtype, **settings, images=source == GATHER_IMAGES)
        assert fault == ""
        assert gather_shim.last("latest_source") == source
        (kernel,) = (name for name in gather_shim.launched() if "gather_kernel" in name)
        assert f"SourceE{of_kernel}E" in kernel


# ---- Exact runs: problems, shapes of a tile that take turns, and what is expected of how x comes.
# Tiles of some pixels of one image, of two and of many, channels of less than a tile, groups; few and many stages.
GATHER_IMAGES_CASES = [
    (Case(9, 128, 5, 9, 72, 1, 1), "fprop"),
    (Case(2, 64, 11, 17, 300, 1, 1), "fprop"),
    (Case(21, 136, 3, 7, 320, 1, 1), "dgrad"),
    (Case(6, 256, 7, 7, 272, 1, 1, groups=2), "fprop"),
    (Case(1, 288, 5, 7, 40, 1, 1), "fprop"),
]
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
    settings = {"shape": shape, "splits": splits, "sms": sms, "images": 1}
    # There is a plan for tensors that are aligned.
    faults = [gather_shim.fault(operator, case, "contiguous", seed, shift=seed // 2, **settings) for seed in range(4)]
    assert set(faults) == {"", None}, faults
    assert gather_shim.last("latest_parts") == splits


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
    faults = [
        gather_shim.fault(operator, case, layout, seed, shift=shift, shape=shape, splits=splits)
        for splits, seed, shift in ((0, 2, 0), (2, 9, 0), (3, 13, 1))
    ]
    assert set(faults) <= {"", None}, f"{operator} of {case}, shape {shape}: {faults}"
    wanted = case.stride == (1, 1) or layout == "contiguous"  # at a stride a copy, or pieces
    if shape == GATHER_POINTS[1]:  # by fours of pixels only
        wanted = layout == "contiguous" and case.stride == (1, 1) and case.H * case.W % 4 == 0
    elif shape == GATHER_POINTS[3] and layout == "contiguous":  # by boxes only, of a copy; that is for want of fours
        wanted = case.stride != (1, 1) or case.H * case.W % 4 != 0
    elif shape == GATHER_POINTS[4] and layout == "channels_last":  # of one tile of channels
        wanted = wanted and (case.K if operator == "fprop" else case.C) // case.groups <= 64
    assert (faults[0] == "") == wanted


# In scaled fp16. Points, also at a stride and beyond the edge, and windows; channels in eights and not; several tiles,
# and stages; groups, several as one and one by one.
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
# In phases: points and windows, of fewer channels than a block and of several blocks, several images in a tile and
# several tiles, of one box and two, of boxes of rows.
GATHER_SHIM_PHASED_CASES = [
    Case(5, 70, 8, 10, 40, 3, 3, (2, 2), padding=(1, 1)),
    Case(3, 64, 9, 11, 72, 3, 3, (2, 2), padding=(0, 2)),
    Case(7, 24, 6, 7, 40, 2, 2, (2, 2)),
    Case(4, 130, 5, 8, 24, 2, 2, (2, 2), padding=(3, 1)),
    Case(2, 16, 13, 12, 40, 5, 4, (2, 2), padding=(2, 3)),
    Case(3, 8, 15, 14, 130, 7, 7, (2, 2), padding=(3, 3)),
    Case(2, 9, 14, 15, 24, 7, 7, (2, 2), padding=(0, 1)),
    Case(2, 72, 20, 6, 16, 2, 3, (2, 2), padding=(1, 0)),
    Case(2, 16, 33, 30, 24, 3, 3, (2, 2), padding=(0, 1)),
    Case(1, 16, 5, 300, 24, 3, 3, (2, 2), padding=(1, 1)),
    Case(3, 128, 9, 10, 48, 3, 3, (2, 2), padding=(1, 1), groups=4),
    Case(2, 128, 7, 8, 72, 2, 2, (2, 2), padding=(1, 0), groups=2),
]
# Of x itself, in channels_last: channels that fill blocks and not, several images in a tile and several tiles, padding
# that is odd or even or larger than the filter, odd rows and columns, phases of one tap, boxes as large as they may be.
GATHER_SHIM_PHASES_OF_X = [
    Case(5, 36, 8, 18, 40, 3, 3, (2, 2), padding=(1, 1)),
    Case(3, 64, 9, 17, 136, 3, 3, (2, 2), padding=(0, 2)),
    Case(30, 8, 6, 34, 40, 2, 2, (2, 2)),  # few enough pixels would be read as they are
    Case(16, 100, 5, 14, 24, 2, 2, (2, 2), padding=(3, 2)),
    Case(2, 12, 13, 21, 40, 5, 5, (2, 2), padding=(2, 3)),
    Case(2, 36, 15, 20, 24, 7, 4, (2, 2), padding=(3, 0)),
    Case(2, 72, 20, 19, 16, 2, 3, (2, 2), padding=(4, 1)),
    Case(1, 16, 5, 254, 24, 3, 3, (2, 2), padding=(1, 1)),
]
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
# Problem, operator, memory format, type, shapes of a tile that take turns, the source of x (None: any).
GATHER_EXACT = [
    *((*one, layout, FP32, GATHER_CONTAINED, None) for one in GATHER_SHIM_CONTAINED_CASES for layout in LAYOUTS),
    *(
        (case, "fprop", layout, FP32, GATHER_CONTAINED, None)
        for case, layout in itertools.product(GATHER_SHIM_PHASED_CASES, LAYOUTS)
    ),
    *(
        (case, "fprop", "channels_last", FP32, (0, 1) if case.N == 16 else (1, 4, 0), GATHER_PHASES)
        for case in GATHER_SHIM_PHASES_OF_X
    ),
    *(
        (case, "fprop", "channels_last", dtype, shapes if source == GATHER_BOXES else shapes[::3], source)
        for case, source in GATHER_SHIM_ROWS_OF_POINTS
        for dtype, shapes in ((FP32, (0, 1, 2, 4)), (FP16, (0, 1)))
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(GATHER_EXACT)), ids=lambda number: f"{number}: {GATHER_EXACT[number][0]}")
def test_gather_shim_exact_by_each_way(gather_shim, number):
    """Integers: at aligned addresses, 8 and 4 bytes behind them; at once, and as late as it may be."""
    case, operator, layout, dtype, shapes, source = GATHER_EXACT[number]
    aligned = [(2, 0), (9, 0)] if source is not None else [(2, 0), (3, 2), (10, 1)]
    contained_by = set()
    for turn, (seed, shift) in enumerate(aligned):
        shape = shapes[(turn + number) % len(shapes)]
        fault = gather_shim.fault(operator, case, layout, seed, dtype, shift=shift, shape=shape)
        assert fault == "", f"{operator} of {case}, shape {shape}, seed {seed}: {fault}"
        contained_by |= gather_shim.contained_by()
        if source is not None and (dtype == FP32 or case.C % 8 == 0):
            assert gather_shim.last("latest_source") == source
    if shapes is GATHER_CONTAINED and case in GATHER_SHIM_PHASED_CASES:
        eights = layout == "channels_last" and case.C % 8 == 0
        pairs = layout == "contiguous" and case.W % 2 == 0
        assert (8 if eights else 2 if pairs else 1) in contained_by


# Parts of the reduction start at any phase.
GATHER_PHASES_IN_PARTS = [
    *((GATHER_SHIM_PHASED_CASES[n], splits, GATHER_CONTAINED) for n, splits in ((0, 3), (0, 4), (1, 2), (3, 3))),
    *((GATHER_SHIM_PHASES_OF_X[n], splits, (1, 4)) for n, splits in ((0, 3), (0, 8), (1, 2), (3, 3), (4, 4))),
]


@pytest.mark.parametrize("case, splits, shapes", GATHER_PHASES_IN_PARTS, ids=str)
def test_gather_shim_exact_in_phases_and_parts(gather_shim, case, splits, shapes):
    faults = []
    for shape in shapes:
        layout = LAYOUTS[shape % 2] if shapes is GATHER_CONTAINED else "channels_last"
        settings = {"shape": shape, "splits": splits, "sms": 72, "shift": 0}
        faults.append(gather_shim.fault("fprop", case, layout, shape, **settings))
        if faults[-1] == "" and shapes is not GATHER_CONTAINED:
            assert gather_shim.last("latest_source") == GATHER_PHASES
    assert set(faults) <= {"", None}  # as many tiles as SMs are not cut up
    assert "" in faults


# Groups as one whose outputs are whole tiles, and more of them.
GATHER_SHIM_TMA_CASES = [
    *GATHER_SHIM_CONTAINED_CASES,
    (Case(2, 128, 9, 10, 128, 3, 3, stride=(2, 2), padding=(1, 1), groups=8), "fprop"),
    (Case(1, 128, 6, 7, 256, 2, 2, groups=2), "fprop"),
    (Case(2, 128, 7, 5, 128, 3, 3, padding=(1, 1), groups=4), "dgrad"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(GATHER_SHIM_TMA_CASES)))
def test_gather_shim_exact_when_multiplied_by_tma(gather_shim, number, layout):
    """Integers in scaled fp16, which tma multiplies: by windows and by taps, each with every third tile."""
    case, operator = GATHER_SHIM_TMA_CASES[number]
    ways = set()
    for windows, shape in itertools.product((0, 1), GATHER_BY_TMA):
        if (shape + windows + number) % 3 and case.groups == 1:
            continue
        fault = gather_shim.fault(operator, case, layout, 10 * number + shape, shape=shape, windows=windows)
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
        settings = {"shape": shape, "windows": windows, "tma_splits": splits}
        fault = gather_shim.fault("fprop", case, layout, shape, **settings)
        assert fault in (None, ""), f"{layout}, {settings}: {fault}"
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
assert {(shape, layout) for _, shape, layout in GATHER_SHIM_LANDING_RUNS} == {
    *itertools.product(GATHER_LANDING, LAYOUTS)
} - {(17, "contiguous"), *((shape, "channels_last") for shape in (18, 19, 20))}


@pytest.mark.parametrize("number, shape, layout", GATHER_SHIM_LANDING_RUNS)
def test_gather_shim_exact_when_contained_on_its_way(gather_shim, number, shape, layout):
    case, operator = landing_case(number, layout)
    channels, rows, columns, stride = LANDING_TILES[shape]
    kernel = f"landing_kernelILi{channels}ELi{columns}ELi{rows}ELi{stride}ELb{int(layout == 'channels_last')}E"
    for seed in (2, 13):  # at once, and as late as it may be
        fault = gather_shim.fault(operator, case, layout, seed, shift=0, shape=shape)
        assert fault == "", f"{operator} of {case}, shape {shape}, seed {seed}: {fault}"
        assert [name for name in gather_shim.launched() if kernel in name]


@pytest.mark.parametrize("shape", [12, 15])
def test_gather_shim_contains_long_rows_in_pairs(gather_shim, shape):
    """Weights of so many channels that a block has two rows of them and twice as many threads."""
    case = Case(1, 528, 2, 28, 40, 3, 3, padding=(1, 1))
    for seed in (2, 13):
        assert gather_shim.fault("fprop", case, "contiguous", seed, shift=0, shape=shape) == ""
        assert [name for name in gather_shim.launched() if "contain_rows_kernel" in name]


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
    for shape, (splits, seed) in itertools.product((0, 2, 4), ((0, 2), (2, 9))):
        fault = gather_shim.fault(operator, case, layout, seed, shift=0, shape=shape, splits=splits)
        assert fault in (None, ""), f"{operator} of {case}, shape {shape}, {splits} parts: {fault}"
        by_taps += fault == "" and gather_shim.last("latest_source") == GATHER_TAPS
    assert by_taps > 0


# Rows of sixteens, too long for a tile: a tile is some of their columns, in the last one of a row fewer, and its lines
# are those of two images, or of the last one and none.
GATHER_SHIM_LINES = [Case(3, 24, 3, 290, 24, 3, 3, padding=(1, 0)), Case(2, 16, 3, 396, 72, 2, 3, padding=(0, 3))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [*GATHER_WINDOWS, *GATHER_CONTAINED])
def test_gather_shim_exact_where_boxes_store_lines(gather_shim, shape, layout):
    by_boxes = []
    for case, seed in zip(GATHER_SHIM_LINES, (2, 9), strict=True):
        fault = gather_shim.fault("fprop", case, layout, seed, shift=0, shape=shape)
        assert not fault, f"{case}, shape {shape}, seed {seed}: {fault}"
        by_boxes.append(fault == "" and gather_shim.last("latest_boxes") == 1)
    # Windows come by single words where channels are no neighbours, which shapes of a tile have not for all that.
    assert any(by_boxes) or (layout == "contiguous" and shape < 2) or shape == GATHER_HALF_A_STAGE


# ---- Values that fp16 does not hold: they are mended, or all is done again.
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
# What tma takes of them: groups as one whose outputs are no whole tiles are not.
ADVERSE_TMA_CASES = ADVERSE_GATHER_CASES[:10]
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
ADVERSE_WAYS = {
    "copied": (ADVERSE_GATHER_CASES, lambda *_: GATHER_CONTAINED),
    "multiplied by tma": (ADVERSE_TMA_CASES, lambda *_: GATHER_BY_TMA),
    "on its way": (ADVERSE_LANDING_CASES, landing_shapes),
}


def adverse(way: str, number: int) -> tuple[str, Case, str, int]:
    """Operator, problem, memory format and shape of a tile."""
    cases, shapes_of = ADVERSE_WAYS[way]
    operator, case, layout = cases[number % len(cases)]
    shapes: Sequence[int] = shapes_of(operator, case, layout)
    return operator, case, layout, shapes[(number // 2 if way == "on its way" else number) % len(shapes)]


@pytest.mark.parametrize("number, kind", [*enumerate(ADVERSE)])
@pytest.mark.parametrize("way", ADVERSE_WAYS)
def test_gather_shim_contains_what_fits_and_does_the_rest_again(gather_shim, way, number, kind):
    """As of the wgmma engine; but of x single values are mended, and weights that do not fit take everything along."""
    operator, case, layout, shape = adverse(way, number)
    tensors = adverse_tensors(case, kind, operator)
    out = gather_shim.result(operator, case, tensors, layout, shape=shape, seed=number)
    check_bounds(case, {operator: out}, tensors, tf32={operator})
    done = gather_shim.done_again()
    if kind in CONTAINED_KINDS:
        assert done == 0
    elif kind in MARKED_KINDS:
        assert done != 0  # the sample of tensors as small as these sees some of them, and takes another scale
    else:
        assert done == ALL_AGAIN or kind == "faint channel"


MENDED_RUNS = [
    (way, number, value)
    for way, of in ADVERSE_WAYS.items()
    for number in range(len(of[0]))
    for value in ((1e-9, 3e-40, math.nan, math.inf) if way == "copied" else (1e-9, math.nan))
]


@pytest.mark.parametrize("way, number, value", MENDED_RUNS, ids=str)
def test_gather_shim_mends(gather_shim, way, number, value):
    """Right, whatever the order in which threads come, and the same bits in each."""
    operator, case, layout, shape = adverse(way, number)
    tensors, first = misfit_tensors(operator, case, value), None
    places, copied = misfit_places(operator, case)
    # Of phases that tma multiplies all of x is copied.
    expected = len(places) if way == "multiplied by tma" and case.R * case.S > 1 else copied
    for seed in (number,) if value != 1e-9 or way == "multiplied by tma" else range(2):
        out = gather_shim.result(operator, case, tensors, layout, shape=shape, seed=seed)
        assert gather_shim.done_again() == expected
        check_misfits(operator, case, out, tensors)
        first = out if first is None else first
        assert same_values(out, first)


GIVEN_UP = [
    *((number, {"shape": shape}) for number in (1, 5) for shape in GATHER_CONTAINED),
    *((number, {"shape": GATHER_BY_TMA[-1], "tma_splits": splits}) for number in (1, 5) for splits in (1, 2)),
]


@pytest.mark.parametrize("number, settings", GIVEN_UP, ids=str)
def test_gather_shim_gives_up(gather_shim, number, settings):
    """All of a call is done again, once: what would have to be mended beside it is not, tma stores nothing, and of a
    cluster no block waits for another one.
    """
    operator, case, layout = ADVERSE_GATHER_CASES[number]
    if "tma_splits" in settings:
        case = dataclasses.replace(case, N=1, C=case.C + 64, K=case.K + 64)
    tensors = adverse_tensors(case, "dead weights", operator)
    tensors[OPERANDS[operator][0]][-1, 3, 3, 3] = 1e-9
    out = gather_shim.result(operator, case, tensors, layout, seed=number, **settings)
    assert gather_shim.done_again() == ALL_AGAIN
    check_bounds(case, {operator: out}, tensors, tf32={operator})


def ones_beside_zeros(case: Case) -> dict[str, torch.Tensor]:
    """x of which the last images are zeros, the first one ones."""
    tensors = make_tensors(case, FP32, normal)
    tensors["x"].zero_()
    tensors["x"][0] = 1
    tensors["bias"].zero_()
    return tensors


LISTED_RUNS = [
    *((Case(2, 24, 9, 9, 16, 2, 1), layout, GATHER_CONTAINED[0]) for layout in LAYOUTS),
    *(
        (case, layout, shape)
        for shape, (_, _, columns, stride) in LANDING_TILES.items()
        for case in [Case(2, 24, 9, 28 if stride == 1 else 2 * columns, 16, 3, 3, (stride, stride), padding=(1, 1))]
        for layout in ["contiguous" if shape in landing_shapes("fprop", case, "contiguous") else "channels_last"]
    ),
]


@pytest.mark.parametrize("too_many", [0, 1])
@pytest.mark.parametrize("case, layout, shape", LISTED_RUNS, ids=str)
def test_gather_shim_lists_as_much_as_it_can(gather_shim, case, layout, shape, too_many):
    """Of one value more all is done again, by weights that nobody knew would be wanted."""
    tensors = ones_beside_zeros(case)
    count = gather_shim.last("most_listed") + too_many
    tensors["x"][1].view(-1)[5 : 5 + count] = torch.linspace(1e-9, 2e-9, count)
    out = gather_shim.result("fprop", case, tensors, layout, shape=shape, seed=shape)
    check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"})
    assert gather_shim.done_again() == (ALL_AGAIN if too_many else count)


def test_gather_shim_mends_what_the_sample_missed(gather_shim):
    """A value that is larger than the scale has room for: at the first of some places that the sample does not see."""
    case = Case(9, 72, 12, 12, 40, 3, 3)
    tensors = make_tensors(case, FP32, normal)
    plain = tensors["x"].clone()
    for column in range(12):
        tensors["x"].copy_(plain)[5, 40, 6, column] = -1e9
        out = gather_shim.result("fprop", case, tensors, shape=GATHER_CONTAINED[2], seed=column)
        check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"})
        if gather_shim.done_again() != ALL_AGAIN:
            break
    assert gather_shim.done_again() == 1


def test_gather_shim_mends_beside_a_large_bias(gather_shim):
    """Many small products are added up before they meet what they would vanish in one by one."""
    case = Case(2, 40, 6, 6, 16, 3, 3)
    tensors = ones_beside_zeros(case)
    tensors["x"][1, :25, 2:5, 2:5] = 1e-9
    tensors["w"].abs_()
    tensors["bias"].fill_(0.1)
    out = gather_shim.result("fprop", case, tensors, shape=GATHER_CONTAINED[0])
    assert gather_shim.done_again() == 25 * 9
    check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"})


# ---- Parts of the reduction, whose blocks are a cluster.
GATHER_CUT_UP = (2, 4, 7, 8, 9, 11, 21, 22, 23)  # shapes whose tiles may all be cut up into parts


@pytest.mark.parametrize("value", [None, 1e-9, math.nan], ids=str)
@pytest.mark.parametrize("shape", [shape for shape in GATHER_CUT_UP if shape not in GATHER_POINTS])
def test_gather_shim_splits_the_reduction(gather_shim, shape, value):
    """Parts of it, the last one shorter; what is mended comes behind their sum."""
    case = Case(4, 160, 12, 9, 72, 3, 3, padding=(1, 1))
    tensors = make_tensors(case, FP32, normal)
    if value is not None:
        tensors["x"][2, 97, 5, 4] = value
    layout = "channels_last" if shape == 2 else "contiguous"  # single words may not be
    out = gather_shim.result("fprop", case, tensors, layout, shape=shape, seed=shape, splits=3, sms=72)
    assert gather_shim.last("latest_parts") == 3
    assert gather_shim.done_again() == (value is not None and shape in GATHER_CONTAINED)
    if value is None or math.isfinite(value):
        check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"})
    else:
        expected = reference("fprop", case, tensors)
        assert same_values(out.isnan(), expected.isnan())
        assert torch.allclose(out.double(), expected, rtol=1e-3, atol=0.2, equal_nan=True)


def faults_in_clusters(gather_shim: EmulatedGather, case: Case, shape: int, splits: int) -> dict[str, set[str]]:
    """Of plans in so many parts, by memory formats; tensors at any alignment, as not every shape takes them."""
    faults: dict[str, set[str]] = {}
    for seed, (layout, shift) in enumerate(itertools.product(LAYOUTS, (0, 1))):
        fault = gather_shim.fault("fprop", case, layout, seed, shift=shift, shape=shape, splits=splits, sms=72)
        if fault is not None:
            assert gather_shim.last("latest_parts") == splits
            faults.setdefault(layout, set()).add(fault)
    return faults


@pytest.mark.parametrize("splits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", GATHER_CUT_UP)
def test_gather_shim_exact_in_clusters(gather_shim, shape, splits):
    """Parts of the reduction whose blocks read each other's sums, and store their shares of the channels."""
    taps = (1, 3) if shape in GATHER_CONTAINED and splits < 4 else (1, 1)
    channels = 136 if (shape + splits) % 2 else 56
    case = Case(2, 64 * splits - 8, 8, 9, channels, *taps, padding=(taps[0] // 2, taps[0] // 2))
    faults = faults_in_clusters(gather_shim, case, shape, splits)
    assert faults
    assert all(found == {""} for found in faults.values()), faults
    # Of several tiles of channels that one has planes only.
    assert shape != GATHER_POINTS[4] or set(faults) == set(LAYOUTS[: 2 if channels <= 64 else 1])


def test_gather_shim_exact_in_clusters_of_the_last_turn(gather_shim):
    """Blocks that have a whole tile before their part of another one: the only parts of tiles of 256 channels."""
    case = Case(4, 120, 8, 9, 136, 1, 1)
    for sms, parts in ((2, 2), (3, 1)):  # three tiles
        settings = {"shape": 0, "splits": parts, "sms": sms, "shift": 0}
        assert {gather_shim.fault("fprop", case, "channels_last", seed, **settings) for seed in range(3)} == {""}
        assert gather_shim.last("latest_parts") == parts
