"""The gather engine's kernels without a GPU: ways in which x comes, containing, what is done again, clusters."""

from __future__ import annotations

import ctypes
import dataclasses
import math

import pytest
import torch

from tests.cases import (
    ADVERSE,
    LAYOUTS,
    OPERANDS,
    Case,
    adverse_tensors,
    check_bounds,
    check_exact,
    integers,
    make_tensors,
    normal,
    same_values,
)
from tests.engines import (
    FP16,
    GATHER_ALL_AGAIN,
    GATHER_BY_TMA,
    GATHER_CONTAINED,
    GATHER_LANDING,
    GATHER_POINTS,
    GATHER_SHAPES,
    GATHER_SHAPES_16,
    GATHER_STACKED,
    GATHER_WINDOWS,
    TF32,
    Runs,
    check_adverse,
    of_operator,
    settings_of,
)
from tests.problems import check_misfits, misfit_places, misfit_tensors

# ---- Ways in which x comes, by Source: single words, fours of pixels, images, channels, boxes, boxes of phases of x,
# boxes of a tap. 16 bits have neither images nor the last two. The shape of half a stage, in which pieces of channels
# are apart, takes neither 1x1 nor boxes: it has a case of its own.
GATHER_SOURCES = (
    (Case(3, 42, 9, 13, 72, 1, 1, stride=(2, 1)), "contiguous"),
    (Case(3, 40, 12, 12, 72, 1, 1), "contiguous"),
    (Case(9, 128, 5, 9, 72, 1, 1), "contiguous"),
    (Case(3, 40, 9, 7, 72, 1, 1, stride=(2, 1)), "channels_last"),  # rows too short for boxes
    (Case(3, 72, 9, 9, 136, 2, 3, padding=(1, 0)), "channels_last"),
    (Case(3, 72, 9, 15, 136, 3, 3, stride=(2, 2), padding=(1, 1)), "channels_last"),
    (Case(2, 72, 24, 24, 136, 3, 3, padding=(10, 10), dilation=(10, 10)), "channels_last"),
)
GATHER_IMAGES, GATHER_CHANNELS, GATHER_BOXES, GATHER_PHASES, GATHER_TAPS, GATHER_ANY = range(2, 8)
GATHER_HALF_A_STAGE = 3


@pytest.mark.parametrize("source", range(GATHER_ANY))
@pytest.mark.parametrize("shape", GATHER_SHAPES)
def test_gather_shim_runs_each_kernel(gather_shim, shape, source):
    """Each shape of a tile with x by each way that it has a kernel for; otherwise another way, or no plan."""
    case, layout = GATHER_SOURCES[source]
    if shape == GATHER_HALF_A_STAGE:
        case = Case(2, case.C, 9, 8, 136, 3, 3)
    elif shape in GATHER_POINTS and case.R > 1:
        case = dataclasses.replace(case, K=56, R=1, S=1, padding=(0, 0))
    gather_shim.library.gather_sources.restype = ctypes.c_uint
    kernels = gather_shim.library.gather_sources(shape)
    settings = {"shape": shape, "shift": 0, "images": source == GATHER_IMAGES}
    of_fp16 = shape in GATHER_SHAPES_16 and source < GATHER_PHASES and source != GATHER_IMAGES
    for dtype, of_kernel in [(torch.float32, source)] + of_fp16 * [(torch.float16, GATHER_ANY)]:
        fault = gather_shim.fault("fprop", case, layout, shape + source, dtype, **settings)
        if kernels >> of_kernel & 1:
            assert (fault, gather_shim.last("latest_source")) == ("", source)
            (kernel,) = (name for name in gather_shim.launched() if "gather_kernel" in name)
            assert f"SourceE{of_kernel}E" in kernel
        else:
            assert fault in (None, "")


# ---- Exact runs.
# Points and windows, several images in a tile and several tiles, more channels than a stage and than a tile, groups;
# more stages than there is room for.
GATHER_SHIM_CASES = [
    (Case(3, 40, 12, 12, 72, 1, 1), "fprop"),
    (Case(2, 72, 9, 13, 24, 1, 1, stride=(2, 3), padding=(1, 0)), "fprop"),
    (Case(9, 16, 5, 6, 130, 3, 3, stride=(2, 2), padding=(1, 1)), "fprop"),
    (Case(2, 24, 17, 21, 16, 2, 3, stride=(3, 1), dilation=(1, 2), groups=2), "fprop"),
    (Case(3, 64, 7, 7, 40, 3, 3, padding=(1, 1)), "dgrad"),
    (Case(5, 32, 8, 8, 96, 1, 1, groups=2), "dgrad"),
    (Case(9, 136, 7, 7, 300, 1, 1), "fprop"),
    (Case(1, 100, 8, 6, 40, 3, 3, padding=(1, 1)), "fprop"),
    (Case(1, 520, 8, 7, 40, 1, 1), "fprop"),
]
# By images: tiles of some pixels of one image, of two and of many, fewer channels than a tile, groups; few and many
# stages.
GATHER_IMAGES_CASES = [
    (Case(9, 128, 5, 9, 72, 1, 1), "fprop"), (Case(2, 64, 11, 17, 300, 1, 1), "fprop"),
    (Case(21, 136, 3, 7, 320, 1, 1), "dgrad"), (Case(6, 256, 7, 7, 272, 1, 1, groups=2), "fprop"),
    (Case(1, 288, 5, 7, 40, 1, 1), "fprop"),
]  # fmt: skip
# Tiles that images end in, fewer channels than a stage, more than a tile and more than all stages, groups.
GATHER_POINTS_CASES = [
    (Case(1, 8, 4, 4, 8, 1, 1), "fprop"),
    (Case(3, 40, 12, 12, 72, 1, 1), "fprop"),
    (Case(7, 136, 6, 10, 132, 1, 1), "dgrad"),
    (Case(5, 264, 8, 8, 300, 1, 1), "fprop"),
    (Case(5, 136, 8, 8, 64, 1, 1, groups=2), "dgrad"),
]
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
    (Case(2, 64, 9, 10, 64, 3, 3, padding=(1, 1), groups=16), "fprop"),
    (Case(2, 64, 6, 9, 128, 2, 3, padding=(1, 1), groups=16), "dgrad"),
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
    Case(1, 9, 14, 15, 24, 7, 7, (2, 2), padding=(0, 1)),
    Case(2, 16, 33, 30, 24, 3, 3, (2, 2), padding=(0, 1)),
    Case(1, 16, 5, 300, 24, 3, 3, (2, 2), padding=(1, 1)),
    Case(3, 128, 9, 10, 48, 3, 3, (2, 2), padding=(1, 1), groups=4),
    Case(2, 128, 7, 8, 72, 2, 2, (2, 2), padding=(1, 0), groups=2),
]
# Phases of x itself, in channels_last: channels that fill blocks and not, several images in a tile and several tiles,
# odd, even and large padding, odd rows and columns, phases of one tap, boxes of the largest size.
GATHER_SHIM_PHASES_OF_X = [
    Case(5, 36, 8, 18, 40, 3, 3, (2, 2), padding=(1, 1)),
    Case(3, 64, 9, 17, 136, 3, 3, (2, 2), padding=(0, 2)),
    Case(30, 8, 6, 34, 40, 2, 2, (2, 2)),  # few enough pixels would be read as they are
    Case(8, 100, 5, 14, 24, 2, 2, (2, 2), padding=(3, 2)),
    Case(2, 12, 13, 21, 40, 5, 5, (2, 2), padding=(2, 3)),
    Case(2, 36, 15, 20, 24, 7, 4, (2, 2), padding=(3, 0)),
    Case(1, 16, 5, 254, 24, 3, 3, (2, 2), padding=(1, 1)),
]
# Padding that is no multiple of the stride and more than that, rows and columns that nobody reads, one step or both,
# groups; the largest step of a box, and one that is larger.
GATHER_SHIM_ROWS_OF_POINTS = [
    Case(3, 36, 9, 19, 72, 1, 1, stride=(2, 2)),
    Case(2, 64, 11, 26, 24, 1, 1, stride=(3, 3), padding=(1, 2)),
    Case(2, 128, 5, 33, 40, 1, 1, stride=(1, 4), padding=(1, 5), groups=2),
    Case(2, 8, 3, 70, 24, 1, 1, stride=(2, 8)),
    Case(2, 40, 9, 17, 24, 1, 3, stride=(2, 2), padding=(0, 1)),
    Case(2, 8, 3, 80, 24, 1, 1, stride=(2, 9)),
    Case(2, 40, 9, 12, 24, 1, 1, stride=(2, 2)),  # rows that are too short
]
# Groups as one whose outputs are whole tiles, and more of them.
GATHER_SHIM_TMA_CASES = [
    *GATHER_SHIM_CONTAINED_CASES[:8],
    (Case(2, 128, 9, 10, 128, 3, 3, stride=(2, 2), padding=(1, 1), groups=8), "fprop"),
    (Case(1, 128, 6, 7, 256, 2, 2, groups=2), "fprop"),
    (Case(2, 128, 7, 5, 128, 3, 3, padding=(1, 1), groups=4), "dgrad"),
    # Phases of dx.
    (Case(2, 72, 9, 12, 40, 3, 3, stride=(2, 2), padding=(1, 1)), "dgrad"),
    (Case(1, 24, 8, 7, 70, 2, 3, stride=(2, 1), padding=(1, 2)), "dgrad"),
    (Case(2, 128, 7, 6, 128, 3, 2, stride=(2, 2), padding=(1, 0), groups=2), "dgrad"),
]
GATHER_SHIM_LANDING_CASES = [
    (Case(2, 40, 12, 36, 72, 3, 3, padding=(1, 1)), "fprop"),
    (Case(1, 24, 33, 32, 136, 3, 3, padding=(1, 1)), "fprop"),
    (Case(2, 16, 9, 68, 40, 2, 3, padding=(0, 1)), "fprop"),
    (Case(3, 130, 5, 28, 33, 1, 3, padding=(0, 1)), "dgrad"),
    (Case(1, 9, 17, 60, 24, 3, 3, padding=(2, 3)), "fprop"),
    (Case(1, 70, 6, 28, 16, 4, 3, padding=(1, 1)), "fprop"),
    # Weights of so many channels that a block has two rows of them and twice as many threads.
    (Case(1, 528, 1, 28, 8, 1, 3, padding=(0, 1)), "fprop"),
    # In narrow tiles, and at a stride of 2: rows that are staged at once and twice, as many as there may be and fewer.
    (Case(2, 24, 9, 28, 136, 3, 3, padding=(1, 1)), "fprop"),
    (Case(1, 20, 16, 24, 40, 3, 3, padding=(0, 3)), "dgrad"),
    (Case(2, 40, 17, 56, 130, 3, 3, stride=(2, 2), padding=(1, 1)), "fprop"),
    (Case(1, 16, 28, 56, 24, 3, 3, stride=(2, 2), padding=(0, 1)), "fprop"),
    (Case(2, 9, 4, 56, 16, 3, 3, stride=(2, 2), padding=(2, 1)), "fprop"),
    (Case(2, 24, 28, 28, 130, 3, 3, stride=(2, 2), padding=(1, 1)), "fprop"),
    (Case(1, 17, 39, 28, 20, 3, 3, stride=(2, 2), padding=(0, 1)), "fprop"),
]
# Rows of x that begin at a multiple of 16 bytes in pairs alone, the even or the odd ones of a window.
GATHER_SHIM_PAIRS_OF_ROWS = [
    (Case(2, 72, 12, 36, 40, 3, 3), "dgrad"),
    (Case(2, 130, 40, 64, 24, 3, 3), "dgrad"),
    (Case(1, 24, 10, 34, 40, 3, 3, padding=(1, 2)), "fprop"),
    (Case(2, 17, 36, 66, 136, 3, 3, padding=(2, 0)), "fprop"),
    (Case(1, 20, 13, 60, 24, 2, 3), "dgrad"),
    (Case(3, 9, 2, 30, 16, 3, 3, padding=(1, 4)), "fprop"),
]
# Up to 16 output channels, whose rows of taps stack; tiles that are full and not; pairs of rows.
GATHER_SHIM_STACKED = [
    (Case(2, 40, 12, 36, 16, 3, 3, padding=(1, 1)), "fprop"),
    (Case(1, 24, 33, 32, 9, 3, 3, padding=(1, 1)), "fprop"),
    (Case(2, 10, 25, 68, 40, 3, 3, padding=(1, 1)), "dgrad"),
    (Case(2, 16, 12, 36, 72, 3, 3), "dgrad"),
    (Case(1, 17, 40, 66, 12, 3, 3, padding=(2, 0)), "fprop"),
    (Case(2, 33, 5, 28, 8, 3, 3, padding=(0, 1)), "fprop"),
]
# Taps as far apart as they may be, and further apart than the image is large; one axis only; several images in a tile
# and several tiles; channels that fill a stage and not; groups; no padding, some, and so much that y is larger than x.
GATHER_SHIM_TAPS_APART = [
    (Case(3, 36, 9, 11, 40, 3, 3, padding=(4, 4), dilation=(4, 4)), "fprop"),
    (Case(2, 64, 20, 17, 72, 3, 3, padding=(6, 5), dilation=(6, 5)), "dgrad"),
    (Case(5, 40, 7, 7, 136, 3, 3, padding=(12, 12), dilation=(12, 12)), "fprop"),
    (Case(1, 100, 3, 34, 24, 1, 3, padding=(0, 16), dilation=(1, 16)), "fprop"),
    (Case(1, 32, 30, 31, 24, 2, 2, padding=(28, 0), dilation=(28, 29)), "fprop"),
    (Case(2, 64, 13, 14, 48, 3, 3, padding=(5, 5), dilation=(5, 5), groups=2), "fprop"),
    (Case(1, 8, 2, 130, 8, 1, 3, padding=(0, 127), dilation=(1, 127)), "fprop"),
]
# Rows of sixteens, too long for a tile: a tile is some of their columns, in the last one of a row fewer, and its lines
# are those of two images, or of the last one and none.
GATHER_SHIM_LINES = [Case(3, 24, 3, 290, 24, 1, 3), Case(2, 16, 3, 396, 72, 2, 3, padding=(0, 3))]

# Parts of the reduction whose blocks read each other's sums, and store their shares of the channels; tiles of one block
# of channels and of several.
GATHER_CLUSTER_CASES = [
    Case(1, 504, 8, 8, 136, 1, 1),
    Case(1, 504, 8, 8, 56, 1, 1),
    Case(1, 504, 8, 9, 136, 1, 1),
    Case(1, 184, 8, 9, 56, 1, 3, padding=(0, 1)),
    Case(4, 120, 8, 9, 136, 1, 1),
]


def with_fours(cases: list[tuple[Case, str]]) -> list[tuple[Case, str]]:
    """The same with channels by fours, and rows that need not be."""
    return [
        (dataclasses.replace(case, C=-(-case.C // 4) * 4, K=-(-case.K // 4) * 4, W=case.W + number % 4), operator)
        for number, (case, operator) in enumerate(cases)
    ]


PLANES, PIXELS = LAYOUTS[:1], LAYOUTS[1:]
GATHER_CUT_UP = (2, 4, 7, 8, 9, 11, 21, 22, 23)  # shapes whose tiles may all be cut up into parts
# A GPU of 72 SMs cuts up few tiles. Of tiles of 256 channels only those of the last turn may be parts.
LAST_TURN = {"shape": 0, "splits": 2, "sms": 2, "shift": 0}
GATHER_RUNS = [
    Runs(
        GATHER_SHIM_CASES,
        6,
        settings_of(TF32, shape=GATHER_SHAPES) + settings_of(FP16, shape=GATHER_SHAPES_16),
        name="points and windows",
    ),
    Runs(
        GATHER_POINTS_CASES,
        5,
        settings_of(TF32, shape=GATHER_POINTS, shift=(0,)) + settings_of(TF32, shape=(9, 11), splits=(2,), shift=(0,)),
        name="points",
    ),
    Runs(
        of_operator("fprop", [Case(5, 72, 13, 11, 136, 1, 1, stride=(2, 3), padding=(1, 0))]),
        5,
        settings_of(TF32, shape=(9, 11, 21), shift=(0,)),
        layouts=PLANES,
        name="points of a copy",
    ),
    Runs(
        GATHER_IMAGES_CASES,
        6,
        settings_of(TF32, shape=(0, 4), images=(1,), splits=(1,), shift=(0,))
        + settings_of(TF32, shape=(4,), images=(1,), splits=(2, 3, 4), sms=(72,), shift=(0,))
        + [LAST_TURN | {"images": 1, "sms": 4}],
        {"latest_parts": {1, 2, 3, 4}},
        PLANES,
        name="images",
    ),
    Runs(
        [*GATHER_SHIM_CONTAINED_CASES, *of_operator("fprop", GATHER_SHIM_PHASED_CASES)],
        3,
        settings_of(TF32, shape=GATHER_CONTAINED),
        kernels=[f"contain_kernelILi{values}E" for values in (1, 2, 4, 8)],
        name="contained",
    ),
    Runs(
        of_operator("fprop", GATHER_SHIM_PHASES_OF_X),
        3,
        settings_of(TF32, shape=(0, 1, 4), shift=(0,)),
        {"latest_source": {GATHER_PHASES}},
        PIXELS,
        name="phases of x",
    ),
    Runs(
        of_operator("fprop", [GATHER_SHIM_PHASES_OF_X[0], Case(1, 130, 5, 8, 24, 2, 2, (2, 2), padding=(3, 1))]),
        6,
        settings_of(TF32, shape=(4, *GATHER_CONTAINED[2:]), splits=(2, 3, 4), sms=(72,), shift=(0,)),
        {"latest_source": {GATHER_PHASES}, "latest_parts": {2, 3, 4}},
        PIXELS,
        name="phases in parts",  # which may start at any phase
    ),
    Runs(
        of_operator("fprop", GATHER_SHIM_ROWS_OF_POINTS),
        3,
        settings_of(TF32, shape=(0, 1, 2, 4), shift=(0,)) + settings_of(FP16, shape=(0, 1), shift=(0,)),
        {"latest_source": {GATHER_BOXES, GATHER_CHANNELS}},
        PIXELS,
        name="rows of points",
    ),
    Runs(
        GATHER_SHIM_TMA_CASES,
        5,
        settings_of(TF32, shape=GATHER_BY_TMA, windows=(0, 1)),
        kernels=["tma_kernel"],
        name="multiplied by tma",
    ),
    Runs(
        of_operator("fprop", [Case(1, 520, 4, 5, 72, 1, 3, padding=(0, 1))]),
        16,
        settings_of(TF32, shape=(27, 28, 34, 35), windows=(0, 1), tma_splits=(2, 8)),
        name="multiplied by tma in parts",
    ),
    Runs(
        [of for number, of in enumerate(GATHER_SHIM_LANDING_CASES) if number != 8],
        3,
        settings_of(TF32, shape=[shape for shape in GATHER_LANDING if shape != 17], shift=(0,)),
        {},
        PLANES,
        ["landing_kernel", "contain_rows_kernel"],
        "contained on its way, planes",
    ),
    Runs(
        GATHER_SHIM_STACKED,
        4,
        settings_of(TF32, shape=(GATHER_STACKED,), shift=(0,)),
        {},
        PLANES,
        ["landing_kernel", "contain_rows_kernel"],
        "contained on its way, rows of taps stacked",
    ),
    Runs(
        GATHER_SHIM_PAIRS_OF_ROWS,
        4,
        settings_of(TF32, shape=(13, 15), shift=(0,)),
        {},
        PLANES,
        ["landing_kernel", "contain_rows_kernel"],
        "contained on its way, pairs of rows",
    ),
    Runs(
        with_fours([of for of in GATHER_SHIM_LANDING_CASES if of[0].stride == (1, 1)]),
        3,
        settings_of(TF32, shape=GATHER_LANDING[:6], shift=(0,)),
        {},
        PIXELS,
        ["landing_kernel", "contain_rows_kernel"],
        "contained on its way, pixels",
    ),
    Runs(
        GATHER_SHIM_TAPS_APART,
        3,
        settings_of(TF32, shape=(0, 2, 4), shift=(0,)) + settings_of(TF32, shape=(2, 4), splits=(2,), shift=(0,)),
        {"latest_source": {GATHER_TAPS}},
        name="taps apart",
    ),
    Runs(
        of_operator("fprop", GATHER_SHIM_LINES),
        6,
        settings_of(TF32, shape=[*GATHER_WINDOWS, *GATHER_CONTAINED], shift=(0,)),
        {"latest_boxes": {1}},
        name="lines that boxes store",
    ),
    Runs(
        of_operator("fprop", GATHER_CLUSTER_CASES),
        10,
        [*settings_of(TF32, shape=GATHER_CUT_UP, splits=(2, 3, 8), sms=(72,), shift=(0,)), LAST_TURN],
        {"latest_parts": {2, 3, 8}},
        name="clusters",
    ),
]


@pytest.mark.parametrize("runs", GATHER_RUNS, ids=str)
def test_gather_shim_is_exact(gather_shim, runs):
    runs.check(gather_shim)


def test_gather_shim_stacks_rows_of_taps_that_begin_anywhere(gather_shim):
    """Rows of a filter that do not begin at multiples of 16 bytes, although filters do."""
    case = Case(1, 24, 8, 32, 12, 3, 3, padding=(1, 1))
    tensors = make_tensors(case, torch.float32, integers)
    del tensors["bias"]
    weights = torch.empty(12, 4, 73)[:, :3, :72].unflatten(2, (3, 24)).permute(0, 3, 1, 2)
    assert weights.stride() == (292, 1, 73, 24)
    plain = tensors | {"w": weights.copy_(tensors["w"])}
    out = gather_shim.result("fprop", case, plain, tf32=True, shape=GATHER_STACKED)
    check_exact(case, {"fprop": out}, tensors)


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
# Contained on their way, by each shape of a tile: fewer rows than a tile and more, columns and channels that are not
# there, more channels of y than a tile has.
ADVERSE_LANDING_CASES = [
    ("fprop", Case(2, 24, 5, 36, 40, 3, 3, padding=(1, 1)), "contiguous", 14),
    ("fprop", Case(2, 33, 8, 32, 130, 3, 3, padding=(2, 3)), "contiguous", 15),
    ("fprop", Case(2, 24, 5, 37, 40, 3, 3, padding=(1, 1)), "channels_last", 15),
    ("fprop", Case(2, 20, 33, 28, 24, 3, 3, stride=(2, 2), padding=(1, 1)), "contiguous", 19),
    ("dgrad", Case(2, 24, 11, 32, 40, 3, 3, padding=(1, 1)), "contiguous", 12),
    ("fprop", Case(3, 16, 17, 28, 72, 2, 3, padding=(0, 1)), "contiguous", 13),
    ("dgrad", Case(2, 36, 12, 30, 20, 2, 3, padding=(1, 1)), "channels_last", 13),
    ("fprop", Case(2, 20, 19, 56, 24, 3, 3, stride=(2, 2), padding=(1, 1)), "contiguous", 18),
    ("fprop", Case(2, 24, 15, 14, 40, 3, 3, padding=(1, 1)), "channels_last", 17),
    ("dgrad", Case(2, 24, 9, 26, 20, 3, 3, padding=(1, 1)), "channels_last", 16),
    ("fprop", Case(2, 20, 17, 28, 24, 3, 3, stride=(2, 2), padding=(1, 1)), "contiguous", 20),
    ("dgrad", Case(2, 72, 12, 36, 40, 3, 3), "contiguous", 13),
    ("dgrad", Case(2, 16, 12, 36, 40, 3, 3), "contiguous", GATHER_STACKED),
    ("fprop", Case(2, 24, 14, 36, 12, 3, 3, padding=(1, 1)), "contiguous", GATHER_STACKED),
    ("fprop", Case(2, 24, 20, 66, 40, 3, 3, padding=(1, 0)), "contiguous", 15),
]
# In parts of the reduction, the last one shorter: what is mended comes behind their sum.
ADVERSE_PARTS_CASE = ("fprop", Case(2, 136, 4, 9, 40, 1, 3, padding=(0, 1)), "contiguous")
# Operator, problem, memory format, shape of a tile.
ADVERSE_PHASES_OF_DX = ("dgrad", Case(3, 40, 12, 11, 72, 3, 3, stride=(2, 2), padding=(1, 1)), "contiguous")
ADVERSE_WAYS = {
    "copied": [(*of, GATHER_CONTAINED[number % 5]) for number, of in enumerate(ADVERSE_GATHER_CASES)],
    "in parts": [(*ADVERSE_PARTS_CASE, shape) for shape in (7, 22)],
    # Not groups as one whose outputs are no whole tiles.
    "multiplied by tma": [(*of, GATHER_BY_TMA[number]) for number, of in enumerate(ADVERSE_GATHER_CASES[:10])],
    "phases of dx": [(*ADVERSE_PHASES_OF_DX, shape) for shape in (GATHER_BY_TMA[2], GATHER_BY_TMA[9])],
    "on its way": ADVERSE_LANDING_CASES,
}
IN_PARTS = {"splits": 3, "sms": 72}


ADVERSE_RUNS = [
    (way, number, kind)
    for way in ("copied", "multiplied by tma", "phases of dx", "on its way")
    for number, kind in enumerate(ADVERSE)
    # Every sum of dx has that channel.
    if (way, kind) != ("phases of dx", "faint output channel")
]


@pytest.mark.parametrize("way, number, kind", ADVERSE_RUNS)
def test_gather_shim_contains_what_fits_and_does_the_rest_again(gather_shim, way, number, kind):
    """Single values of x are mended; weights that do not fit take everything along."""
    ways = ADVERSE_WAYS[way]
    operator, case, layout, shape = ways[number % len(ways)]
    check_adverse(gather_shim, operator, case, kind, layout, shape=shape, seed=number)


MENDED_RUNS = [
    (way, number, value)
    for way, runs in ADVERSE_WAYS.items()
    for number in range(len(runs))
    for value in (1e-9, (3e-40, math.nan, math.inf)[number % 3])
]


@pytest.mark.parametrize("way, number, value", MENDED_RUNS)
def test_gather_shim_mends(gather_shim, way, number, value):
    """Right, whatever the order in which threads come, and the same bits in each."""
    operator, case, layout, shape = ADVERSE_WAYS[way][number]
    tensors, first = misfit_tensors(operator, case, value), None
    places, copied = misfit_places(operator, case)
    # All of x is copied where tma multiplies phases.
    expected = len(places) if way in ("multiplied by tma", "phases of dx") and case.R * case.S > 1 else copied
    for seed in range(2 if value == 1e-9 else 1):
        settings = {"shape": shape, "seed": seed} | (IN_PARTS if way == "in parts" else {})
        out = gather_shim.result(operator, case, tensors, layout, **settings)
        assert gather_shim.last("done_again") == expected
        check_misfits(operator, case, out, tensors)
        first = out if first is None else first
        assert same_values(out, first)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("shape", [*GATHER_CONTAINED, GATHER_BY_TMA[-1]])
def test_gather_shim_gives_up(gather_shim, shape, splits):
    """All of a call is done again, once: what would have to be mended beside it is not, tma stores nothing, and of a
    cluster no block waits for another one.
    """
    operator, case, layout = ADVERSE_GATHER_CASES[1 if (shape + splits) % 2 else 5]
    if shape in GATHER_BY_TMA:
        case = dataclasses.replace(case, N=1, C=case.C + 64, K=case.K + 64)
    tensors = adverse_tensors(case, "dead weights", operator)
    tensors[OPERANDS[operator][0]][-1, 3, 3, 3] = 1e-9
    out = gather_shim.result(operator, case, tensors, layout, shape=shape, tma_splits=splits)
    assert gather_shim.last("done_again") == GATHER_ALL_AGAIN
    check_bounds(case, {operator: out}, tensors, tf32={operator})


def ones_beside_zeros(case: Case) -> dict[str, torch.Tensor]:
    """x of which the last images are zeros, the first one ones."""
    tensors = make_tensors(case, torch.float32, normal)
    tensors["x"].zero_()
    tensors["x"][0] = 1
    tensors["bias"].zero_()
    return tensors


# By a copy, and on the way in windows of planes, of pixels, and of planes at a stride.
LISTED_RUNS = [
    *((Case(2, 24, 9, 9, 16, 2, 1), layout, GATHER_CONTAINED[0]) for layout in LAYOUTS),
    (Case(2, 24, 9, 28, 16, 3, 3, padding=(1, 1)), "contiguous", 12),
    (Case(2, 24, 9, 28, 16, 3, 3, padding=(1, 1)), "channels_last", 17),
    (Case(2, 24, 9, 56, 16, 3, 3, stride=(2, 2), padding=(1, 1)), "contiguous", 18),
]


@pytest.mark.parametrize("too_many", [0, 1])
@pytest.mark.parametrize("case, layout, shape", LISTED_RUNS, ids=str)
def test_gather_shim_lists_as_much_as_it_can(gather_shim, case, layout, shape, too_many):
    """With one value more all is done again, by weights that nothing announced."""
    tensors = ones_beside_zeros(case)
    count = gather_shim.last("most_listed") + too_many
    tensors["x"][1].view(-1)[5 : 5 + count] = torch.linspace(1e-9, 2e-9, count)
    out = gather_shim.result("fprop", case, tensors, layout, shape=shape, seed=shape)
    check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"})
    assert gather_shim.last("done_again") == (GATHER_ALL_AGAIN if too_many else count)


def test_gather_shim_mends_what_the_sample_missed(gather_shim):
    """A value that is larger than the scale has room for: at the first of some places that the sample does not see."""
    case = Case(9, 72, 12, 12, 40, 3, 3)
    tensors = make_tensors(case, torch.float32, normal)
    plain = tensors["x"].clone()
    for column in range(12):
        tensors["x"].copy_(plain)[5, 40, 6, column] = -1e9
        out = gather_shim.result("fprop", case, tensors, shape=GATHER_CONTAINED[2], seed=column)
        check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"})
        if gather_shim.last("done_again") != GATHER_ALL_AGAIN:
            break
    assert gather_shim.last("done_again") == 1


def test_gather_shim_mends_beside_a_large_bias(gather_shim):
    """Many small products are added up before they meet what they would vanish in one by one."""
    case = Case(2, 40, 6, 6, 16, 3, 3)
    tensors = ones_beside_zeros(case)
    tensors["x"][1, :25, 2:5, 2:5] = 1e-9
    tensors["w"].abs_()
    tensors["bias"].fill_(0.1)
    out = gather_shim.result("fprop", case, tensors, shape=GATHER_CONTAINED[0])
    assert gather_shim.last("done_again") == 25 * 9
    check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"})
