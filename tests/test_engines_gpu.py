"""Single engines on a GPU: exact on integers and within the contract, in all their ways; graphs, determinism."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import modelnew
from tests.cases import (
    ADVERSE,
    FILLS,
    KERNELS,
    LAYOUTS,
    OPERANDS,
    VIEWS,
    Case,
    adverse_tensors,
    check_bounds,
    check_exact,
    computed,
    equal,
    error_bound,
    gpu,
    hopper,
    in_layout,
    in_wider,
    integers,
    make_tensors,
    margins_intact,
    normal,
    positive,
    product,
    reference,
    round_to_tf32,
    shifted,
    tf32_switch,
    tf32_ties,
    under_a_tf32_step,
    wide,
)
from tests.problems import (
    GATHER_CASE,
    STEM_16_BIT_FILLS,
    STEM_CONTRACTS,
    WGMMA_CASE,
    WGMMA_OPERATORS,
    check_misfits,
    dy_before_nan,
    misfit_tensors,
    near_the_smallest,
)

FP32, TF32, FP16, BF16 = (torch.float32, False), (torch.float32, True), (torch.float16, True), (torch.bfloat16, True)
ALL_TYPES = [TF32, FP16, BF16]
WGMMA_TYPES = [*ALL_TYPES, FP32]
HALVES = [FP16, BF16]
# The other engines, or those that they give parts to, need Hopper.
ANY_GPU = ("direct", "mma", "mma_wgrad", "patches", "pointwise")


def hopper_gpu(test: Callable) -> Callable:
    """Marks a test that needs a Hopper GPU."""
    return gpu(hopper(test))


def named_or_text(value: object) -> str | None:
    """The name of a function; nothing for a list of problems or for views."""
    return getattr(value, "__name__", None) or (str(value) if not isinstance(value, (list, dict)) else "")


# ---- Problems. The planners' choices for them, on a Hopper GPU of 132 SMs, cover all kinds of plans that larger tables
# reached: shapes of a tile, ways to load and to store, numbers of parts.
MMA_CASES = [
    Case(1, 3, 224, 224, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(1, 3, 61, 67, 20, 5, 5, stride=(2, 3), padding=(2, 1)),
    Case(1, 256, 14, 14, 256, 3, 3, padding=(1, 1)),
    Case(1, 2048, 7, 7, 512, 1, 1),
    Case(4, 256, 8, 8, 100, 3, 3),
    Case(2, 100, 31, 29, 72, 3, 2, stride=(1, 2), padding=(2, 0), dilation=(1, 3)),
    Case(8, 64, 57, 60, 2, 1, 1),
    Case(16, 64, 96, 96, 64, 3, 3, padding=(1, 1)),
    Case(3, 48, 20, 24, 80, 3, 3, stride=(2, 1), padding=(1, 1), groups=2),
]
# Stems of networks in small and similar problems; the first three are under the TF32 contract where that is allowed.
# Sides of 4 x 7 or 16 pixels, odd ones, lines longer than a box, ragged channels.
STEM_CASES = [
    Case(8, 3, 56, 56, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(9, 3, 64, 96, 128, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(9, 3, 113, 127, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(40, 1, 28, 28, 33, 5, 5, padding=(2, 2)),
    Case(1, 7, 33, 40, 70, 5, 5, stride=(1, 2), padding=(4, 1)),
    Case(2, 2, 40, 513, 64, 3, 7, padding=(1, 3), dilation=(1, 2)),
    Case(300, 6, 2, 1, 100, 2, 3, padding=(0, 1)),
]
STEM_GRADIENTS = [Case(2, 64, 57, 60, 2, 1, 1), Case(3, 33, 20, 24, 7, 1, 1), Case(300, 40, 4, 4, 1, 1, 1)]
POINTWISE_CASES = [
    Case(N, C, H, W, K, 1, 1)
    for N, C, H, W, K in [
        (1, 64, 56, 56, 256), (2, 128, 30, 30, 200), (1, 256, 56, 56, 128), (1, 64, 56, 56, 160), (1, 128, 28, 28, 256),
        (1, 256, 56, 56, 64), (1, 1024, 14, 14, 256), (1, 2048, 7, 7, 512), (1, 3008, 8, 12, 128), (3, 37, 20, 24, 50),
        (64, 2048, 1, 1, 1000), (8, 144, 27, 31, 1022), (8, 16, 15, 16, 9), (2, 5, 9, 301, 1),
    ]
] + [Case(4, 112, 31, 29, 72, 1, 1, stride=(1, 2))]  # fmt: skip
# wgmma takes these in the forward and in dgrad, which swaps the channels, under every contract: 2^27 multiply-adds, 32
# columns.
WGMMA_CASES = [
    WGMMA_CASE,
    # Channels of both sides a few beside the pieces, steps and tiles.
    Case(1, 9, 301, 259, 31, 3, 3, padding=(1, 1)),
    Case(1, 17, 90, 130, 100, 3, 3, padding=(1, 1)),
    # Filters, dilations and paddings of all shapes: dgrad pads by what is left of them, which may be less than nothing.
    Case(2, 40, 185, 131, 72, 1, 1),
    Case(1, 40, 40, 133, 72, 5, 7, padding=(4, 0)),
    Case(1, 40, 55, 132, 72, 2, 4, padding=(0, 3), dilation=(3, 2)),
    Case(1, 40, 50, 140, 72, 3, 3, padding=(5, 7), dilation=(1, 3)),
    Case(1, 300, 20, 40, 65, 6, 7, padding=(3, 3)),
    # Groups.
    Case(2, 80, 60, 100, 130, 3, 3, padding=(1, 1), groups=2),
    Case(2, 51, 101, 130, 93, 3, 3, padding=(0, 1), groups=3),
    # Boxes load x of fp32, with rests of several sizes.
    Case(2, 64, 45, 264, 128, 3, 3),
    # Rows of taps in one product, of 16 bits and in full: streamed weights, rings of two rows, rows by single values.
    Case(3, 16, 150, 600, 128, 3, 3),
    Case(2, 200, 67, 517, 11, 3, 3, padding=(2, 1)),
    Case(2, 32, 200, 300, 40, 3, 5, padding=(1, 2), groups=2),
    # One row; and images one after another of one tile each.
    Case(4, 100, 1, 513, 130, 3, 3, padding=(1, 1)),
    Case(70, 40, 7, 36, 72, 3, 3),
    # Columns around every tile's width, with an odd number of rows.
    *(
        Case(1, 40, (2**27 // (Q * 65 * 40 * 9) + 1) | 1, Q, 65, 3, 3, padding=(1, 1))
        for Q in (32, 63, 65, 129, 256, 300, 513)
    ),
    # The other shapes of a tile, with 64 and with 128 channels, rightwards and downwards.
    *(
        Case(N, C, H, W, K, R, R, padding=(R // 2, R // 2))
        for N, C, H, W, K, R in [
            (8, 16, 65, 32, 130, 3), (2, 16, 130, 64, 130, 3), (8, 16, 130, 128, 130, 1), (2, 16, 130, 64, 64, 3),
            (8, 72, 65, 32, 64, 3), (2, 72, 130, 32, 130, 3), (8, 16, 65, 128, 64, 3), (8, 72, 33, 64, 130, 1),
            (8, 40, 101, 32, 130, 1),
        ]
    ),
]  # fmt: skip
# gather takes these under every contract: 2^27 multiply-adds, 2^29 of 1x1 at a stride. In fp32 some are contained in
# advance: windows and points, at a stride and not, channels that are multiples of 8 and others.
GATHER_CONTAINED_CASES = [
    Case(20, 140, 31, 29, 260, 3, 2, padding=(2, 0), dilation=(1, 3)),
    Case(12, 140, 57, 57, 264, 3, 3, stride=(2, 2), padding=(1, 0)),
    Case(40, 1000, 14, 14, 1100, 1, 1),
    Case(24, 140, 30, 28, 264, 5, 4, stride=(2, 2), padding=(2, 3)),  # pairs of columns
    Case(8, 518, 7, 7, 500, 3, 3, padding=(1, 1)),  # tiles that blocks share; weights of taps in no fours
]
# In fp32 these are contained on their way, by tiles of each width but one, with rows, columns and channels that are not
# there; the last but one by tiles of that width, in channels_last only.
GATHER_LANDING_CASES = [
    Case(40, 64, 40, 124, 64, 3, 3, padding=(1, 1)),
    Case(22, 70, 62, 60, 66, 3, 3, padding=(1, 1)),
    Case(24, 72, 50, 60, 72, 2, 3, padding=(1, 3)),
    Case(64, 128, 28, 28, 128, 3, 3, padding=(1, 1)),
    Case(32, 128, 56, 56, 128, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(64, 256, 28, 28, 256, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(256, 256, 14, 14, 256, 3, 3, padding=(1, 1)),
    Case(24, 66, 64, 124, 72, 3, 3),  # pairs of rows of dy
    Case(24, 80, 62, 122, 16, 3, 3, padding=(1, 2)),  # rows of taps that stack
]
GATHER_SCALED_CASES = [*GATHER_CONTAINED_CASES, *GATHER_LANDING_CASES]
# In fp32 boxes of a tap load these.
GATHER_APART_CASES = [
    Case(8, 128, 33, 33, 136, 3, 3, padding=(12, 12), dilation=(12, 12)),
    Case(3, 100, 40, 61, 260, 3, 3, padding=(18, 36), dilation=(18, 36)),
    Case(20, 128, 28, 30, 128, 3, 3, padding=(8, 10), dilation=(8, 10), groups=2),
]
# Groups of 4 channels: 16 of them are multiplied as one.
GATHER_FOURS = [
    Case(20, 64, 56, 56, 64, 3, 3, padding=(1, 1), groups=16),
    Case(30, 64, 40, 43, 128, 5, 3, padding=(2, 0), groups=16),
]
GATHER_CASES = [
    dataclasses.replace(GATHER_CASE, N=12),
    Case(16, 256, 14, 14, 260, 1, 1),
    Case(35, 72, 57, 55, 130, 1, 1, stride=(2, 1), padding=(1, 0)),
    Case(5, 100, 31, 29, 136, 3, 2, padding=(2, 0), dilation=(1, 3)),
    Case(16, 96, 28, 28, 192, 5, 5, stride=(2, 3), padding=(2, 2), groups=2),
    Case(50, 512, 14, 14, 64, 1, 1, groups=2),
    Case(4, 72, 35, 306, 136, 3, 3, padding=(1, 0)),  # long rows of sixteens, by boxes
    # In channels_last boxes load these at a stride: phases of x itself, and the rows that 1x1 filters read.
    Case(16, 64, 57, 55, 136, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(40, 64, 57, 55, 260, 1, 1, stride=(2, 2)),
    Case(64, 36, 85, 83, 300, 1, 1, stride=(3, 3), padding=(1, 0)),
    # fp32 in planes, image by image.
    Case(64, 384, 13, 15, 264, 1, 1),
    Case(60, 448, 7, 7, 576, 1, 1, groups=2),
    # Tiles of three multiplying warpgroups, in one memory format or both.
    Case(40, 772, 21, 21, 136, 1, 1),
    Case(11, 520, 15, 15, 772, 3, 3, stride=(2, 2), padding=(1, 1)),
    *GATHER_SCALED_CASES,
]
# Patch embeddings in small: filters of multiples of 16 bytes and not, pixels in no patch.
GPU_PATCHES_CASES = [
    Case(5, 3, 64, 70, 200, 16, 16, stride=(16, 16)),
    Case(3, 3, 56, 58, 136, 14, 14, stride=(14, 14)),
    Case(3, 1, 33, 40, 64, 3, 5, stride=(3, 5)),
]
# Few channels of dx, so many tiles that its own kernel takes them.
GPU_STEM_GRADIENTS = [
    Case(36, 3, 64, 130, 20, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(140, 1, 31, 33, 9, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(70, 4, 40, 64, 12, 4, 4, stride=(2, 2), padding=(1, 3)),
    Case(140, 3, 17, 62, 17, 5, 5, stride=(2, 2), padding=(2, 2)),
    Case(20, 3, 33, 130, 20, 3, 3, padding=(1, 1)),
    Case(30, 1, 20, 64, 18, 5, 5, padding=(2, 0)),
    Case(30, 4, 18, 40, 9, 7, 7, padding=(3, 3)),
]
# Strips of rows, several images in a stage, strides, dilations, groups, few input channels, ragged edges of every tile,
# several parts.
# Weight gradients that are large enough for TF32.
GPU_CONTAINED_WGRAD_CASES = [
    Case(16, 72, 40, 40, 136, 3, 3, padding=(1, 1)),
    Case(32, 100, 57, 43, 130, 3, 2, stride=(2, 1), padding=(2, 1), dilation=(1, 2)),
    Case(64, 256, 29, 28, 192, 1, 1, stride=(2, 2), padding=(1, 0)),
]
GPU_WGRAD_CASES = [
    Case(3, 64, 28, 28, 64, 3, 3, padding=(1, 1)),
    Case(5, 96, 14, 14, 300, 1, 1),
    Case(9, 80, 7, 7, 136, 1, 1),
    Case(4, 32, 28, 30, 64, 1, 1, stride=(2, 2)),
    Case(2, 24, 33, 29, 40, 5, 4, stride=(2, 3), padding=(2, 1), dilation=(1, 2)),
    Case(3, 64, 20, 20, 96, 3, 3, padding=(1, 1), groups=2),
    Case(2, 3, 64, 60, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(8, 3, 112, 112, 72, 16, 16, stride=(16, 16)),
    Case(8, 4, 90, 88, 70, 11, 11, stride=(4, 4), padding=(2, 2)),
    Case(4, 1, 40, 44, 32, 5, 3, stride=(2, 3), padding=(2, 1)),
    Case(2, 30, 19, 21, 20, 3, 3, padding=(2, 2), dilation=(3, 2)),
    Case(1, 16, 5, 3, 17, 1, 1),
    Case(8, 64, 4, 4, 64, 3, 3, stride=(2, 2), padding=(1, 1)),  # planes of dy are less than 16 bytes
    Case(2, 64, 2, 1, 64, 1, 1),
    # Large enough for TF32.
    Case(16, 128, 28, 28, 256, 3, 3, padding=(1, 1)),
    Case(256, 512, 7, 7, 136, 1, 1),
    Case(32, 256, 28, 28, 264, 1, 1),
    Case(33, 100, 30, 30, 300, 1, 1),
    Case(32, 264, 28, 28, 512, 1, 1, stride=(2, 2)),
    Case(64, 128, 7, 7, 264, 3, 3, padding=(1, 1)),
    Case(32, 128, 56, 56, 192, 1, 1, stride=(2, 2)),
]
# Groups of 4, 24, 32 and of all channels; tiles of several images and parts of one; the last one large enough for TF32.
GPU_MMA_WGRAD_CASES = [
    Case(8, 128, 28, 28, 128, 3, 3, padding=(1, 1), groups=32),
    Case(4, 120, 30, 28, 120, 3, 3, stride=(2, 2), padding=(1, 1), groups=5),
    Case(6, 1024, 7, 7, 1024, 3, 3, padding=(1, 1), groups=32),
    Case(3, 72, 19, 21, 80, 3, 3, padding=(1, 1)),
    Case(2, 60, 17, 40, 90, 5, 4, stride=(1, 2), padding=(2, 1), dilation=(2, 1), groups=3),
    Case(9, 64, 14, 14, 96, 1, 1, groups=4),
    Case(64, 96, 28, 28, 96, 3, 3, padding=(1, 1), groups=3),
]
GPU_WGRAD_VIEWED = [
    Case(3, 20, 12, 16, 24, 3, 3, padding=(1, 1)),
    *(Case(2, 16, 8, 8, 40, 1, 1, stride=(step, step)) for step in (1, 2)),
]
# Phases with every number of taps, and without any; a filter that leaves rows out, dilation, groups.
GPU_STRIDED_CASES = [
    Case(3, 64, 28, 30, 72, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(2, 40, 33, 29, 24, 5, 4, stride=(3, 2), padding=(2, 1)),
    Case(2, 24, 30, 31, 40, 3, 3, stride=(2, 1), padding=(2, 2), dilation=(2, 2)),
    Case(2, 64, 20, 20, 96, 3, 3, stride=(2, 2), padding=(1, 1), groups=2),
    # Large enough for TF32.
    Case(32, 128, 28, 28, 128, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(64, 256, 28, 28, 128, 1, 1, stride=(2, 2)),
    # Phases of zeros: other vectors, several blocks a plane, groups, taps that leave gaps.
    Case(8, 64, 129, 65, 64, 1, 1, stride=(2, 2)),
    Case(16, 128, 56, 56, 128, 1, 1, stride=(3, 2), groups=2),
    Case(3, 72, 30, 34, 40, 2, 3, stride=(4, 4), padding=(1, 0)),
]
# Phases of all images and of one, by several engines; a single tap that is left; fewer rows than phases.
GPU_DILATED_CASES = [
    Case(3, 64, 28, 28, 64, 3, 3, padding=(24, 24), dilation=(24, 24)),
    Case(1, 72, 65, 65, 40, 3, 3, padding=(36, 36), dilation=(36, 36)),
    Case(2, 64, 14, 14, 256, 3, 3, padding=(24, 24), dilation=(24, 24)),
    Case(40, 96, 30, 26, 64, 3, 3, padding=(9, 2), dilation=(12, 9)),
]
# Weight gradients by taps, each with enough work: in full fp32, in TF32 all taps or the middle one alone; strides, axes
# that differ, groups of many channels and of few.
GPU_DILATED_WGRAD_CASES = [
    Case(16, 64, 28, 28, 64, 3, 3, padding=(12, 12), dilation=(12, 12)),
    Case(16, 128, 60, 60, 128, 1, 3, padding=(0, 8), dilation=(1, 8)),
    Case(32, 128, 33, 33, 128, 3, 3, padding=(16, 16), dilation=(16, 16)),
    Case(8, 72, 41, 37, 136, 3, 5, stride=(2, 1), padding=(3, 6), dilation=(5, 3)),
    Case(8, 128, 41, 43, 96, 2, 3, stride=(2, 2), padding=(4, 9), dilation=(8, 9)),
    Case(8, 128, 30, 26, 192, 3, 3, padding=(4, 9), dilation=(4, 9), groups=2),
    Case(8, 64, 30, 26, 64, 3, 2, padding=(2, 1), dilation=(2, 3), groups=4),
]
# Gradients to x at a stride, of which gather contains dy and tma multiplies each phase of dx.
GATHER_PHASES_OF_DX = [
    Case(32, 128, 28, 28, 128, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(16, 64, 57, 40, 72, 5, 4, stride=(2, 2), padding=(2, 1)),
    Case(8, 72, 41, 60, 64, 3, 3, stride=(1, 2), padding=(0, 1), dilation=(2, 1)),
]
# Blocks of channels in full and ragged, several tiles of output channels and few, points, halos, strides with phases
# and without, dilation, rows longer than a tile, few tiles with long reductions.
TMA_CASES = [
    Case(3, 72, 13, 17, 136, 3, 3, padding=(1, 1)),
    Case(4, 128, 28, 28, 128, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(40, 64, 16, 24, 256, 1, 1),
    Case(2, 512, 7, 7, 2048, 1, 1),
    Case(1, 2048, 7, 7, 512, 1, 1),
    Case(2, 512, 7, 7, 512, 3, 3, padding=(1, 1)),
    Case(3, 64, 15, 15, 64, 7, 7, stride=(3, 2), padding=(3, 3)),
    Case(1, 16, 3, 1000, 8, 2, 2),
    Case(2, 320, 64, 64, 320, 3, 3, padding=(1, 1)),
    # Rows of taps that meet nothing but padding.
    Case(3, 136, 65, 65, 72, 3, 3, padding=(24, 24), dilation=(24, 24)),
    Case(8, 64, 33, 20, 64, 3, 3, stride=(2, 1), padding=(36, 3), dilation=(36, 3)),
    # Strides along an axis with one output, where they lead nowhere.
    Case(3, 16, 4, 4, 72, 3, 3, stride=(2, 2)),
    Case(2, 8, 300, 1, 8, 4, 1),
    # Outputs that boxes cannot store.
    Case(3, 72, 13, 17, 131, 3, 3, padding=(1, 1)),
    # Groups: merged, the last merged one in part; more outputs than inputs; as they are.
    Case(3, 256, 28, 30, 256, 3, 3, padding=(1, 1), groups=32),
    Case(2, 144, 17, 13, 288, 5, 3, padding=(2, 1), groups=9),
    Case(3, 256, 13, 14, 384, 3, 3, padding=(1, 1), groups=2),
    Case(2, 320, 16, 16, 320, 1, 1, groups=5),
    # As many groups as begin at multiples of 8 channels.
    Case(2, 96, 14, 14, 96, 7, 2, padding=(4, 2), dilation=(2, 2), groups=8),
    Case(3, 80, 15, 13, 128, 3, 3, stride=(2, 2), padding=(2, 2), groups=4),
    # Tiles of fewer than 64 channels.
    Case(3, 120, 28, 30, 120, 3, 3, padding=(1, 1), groups=5),
    Case(2, 240, 14, 17, 336, 5, 3, padding=(2, 1), groups=6),
]
TMA_PLANES_CASES = [
    *TMA_CASES,
    Case(3, 7, 20, 30, 19, 5, 3),
    Case(2, 13, 9, 11, 1, 3, 3, padding=(1, 1)),
    Case(5, 72, 4, 4, 16, 4, 4),
]
TMA_UNGROUPED = [case for case in TMA_PLANES_CASES if case.groups == 1]
TMA_EIGHTS = [case for case in TMA_UNGROUPED if case.C % 8 == 0 and case.K % 8 == 0]

Views = Mapping[str, Callable[[Tensor], Tensor]]  # of x, w and dy
LAST = VIEWS["channels_last"]
IN_LAYOUT: dict[str, Views] = {"contiguous": {}, "channels_last": {"x": LAST, "dy": LAST}}
WITH_WEIGHTS: dict[str, Views] = {"contiguous": {}, "channels_last": {"x": LAST, "w": LAST, "dy": LAST}}
ALL_LAYOUTS = IN_LAYOUT | {"all in channels_last": WITH_WEIGHTS["channels_last"]}
SHIFTS = {f"begins at {elements}": functools.partial(shifted, elements=elements) for elements in (1, 2, 4)}
ONE_FOR_ALL = {
    "one image": lambda tensor: tensor[:1].expand_as(tensor),
    "one channel": lambda tensor: tensor[:, :1].expand_as(tensor),
}
SOME_VIEWS = {name: VIEWS[name] for name in ("channels_last", "sliced", "every other", "transposed")} | {
    "contiguous": lambda tensor: tensor,
    "off by one": SHIFTS["begins at 1"],
    "one image": ONE_FOR_ALL["one image"],
}


def of_names(views: Mapping[str, Callable], *subsets: Sequence[str]) -> dict[str, Views]:
    """Each view of all tensors of each subset."""
    return {f"{view} of {','.join(names)}": dict.fromkeys(names, views[view]) for view in views for names in subsets}


XW_VIEWS = of_names(SOME_VIEWS, "xw") | {
    "x in channels_last": {"x": LAST},  # y is, too, but not w
    "w in channels_last": {"w": LAST},  # y is, too, but not x
}
# Rows of weights within larger ones, of which the rest is NaN.
IN_WIDER_ROWS = {"rows": lambda w: F.pad(w, (0, 0, 0, 0, 0, 3), value=math.nan)[:, : w.shape[1]]}
WIDER_ROWS = of_names(IN_WIDER_ROWS | {"rows of pixels": lambda w: IN_WIDER_ROWS["rows"](LAST(w))}, "w")
ROWS, IMAGES = (functools.partial(dy_before_nan, rows=rows) for rows in (True, False))
WIDER = {"x": lambda tensor: in_wider(tensor, 12, 4), "w": lambda tensor: in_wider(tensor, 4, 0)}


def last_from(tensor: Tensor, elements: int) -> Tensor:
    """In channels_last, so many elements behind an aligned address: boxes reach no address that is odd."""
    return shifted(tensor.permute(0, 2, 3, 1), elements).permute(0, 3, 1, 2)


ODD = {f"channels_last from {elements}": functools.partial(last_from, elements=elements) for elements in (1, 2, 4)}


def merges(case: Case) -> bool:
    """Whether tma takes the groups of a dgrad, as they are or several as one."""
    together = max(1, 64 // (case.K // case.groups))
    return case.groups == 1 or all(channels // case.groups * together % 64 == 0 for channels in (case.C, case.K))


def operators_of(engine: str, case: Case) -> set[str]:
    """What an engine takes of the cases that it has here."""
    if engine in ("mma_wgrad", "hopper_wgrad", "tma_wgrad", "strided", "direct"):
        return {"dgrad"} if engine in ("strided", "direct") else {"wgrad"}
    if engine == "gather" and case in GATHER_PHASES_OF_DX:
        return {"dgrad"}
    if engine == "stem" and case in STEM_GRADIENTS:
        return {"dgrad"}
    if engine == "dilated" and case in GPU_DILATED_WGRAD_CASES:
        return {"wgrad"}
    both = engine in ("wgmma", "dilated") or (engine in ("gather", "mma", "tma") and case.stride == (1, 1))
    if engine == "tma":  # channels_last only with channels that are multiples of 8
        in_phases = case.stride == (2, 2) and case.groups == 1 and min(case.R, case.S, *case.y_shape[2:]) > 1
        both = (both or in_phases) and merges(case) and (case.K % 8 == 0 or case.C % 8 != 0)
    return {"fprop", "dgrad"} if both else {"fprop"}


def forced(
    engine: str, case: Case, tensors: dict[str, Tensor], tf32: bool, operators: Collection[str] = ()
) -> dict[str, Tensor]:
    """Results of an engine for sure, of these operators or of all that it takes."""
    return computed(engine, case, tensors, tf32, operators or operators_of(engine, case))


def changed(tensors: dict[str, Tensor], views: Views) -> dict[str, Tensor]:
    return tensors | {name: view(tensors[name]) for name, view in views.items()}


def of_engines(table: Iterable[tuple]) -> list:
    """Parameters that start with an engine, which may be Hopper's."""
    return [pytest.param(*one, marks=() if one[0] in ANY_GPU else hopper) for one in table]


# Engines, problems, views of operands, types and whether TF32 is allowed.
EXACT = [
    ("gather", GATHER_CASES, ALL_LAYOUTS, ALL_TYPES),
    ("gather", GATHER_APART_CASES, IN_LAYOUT, [TF32]),
    ("gather", GATHER_FOURS, IN_LAYOUT, [TF32]),
    ("gather", GATHER_PHASES_OF_DX, ALL_LAYOUTS, [TF32]),
    ("gather", [Case(2, 64, 40, 70, 64, 3, 7, padding=(13, 39), dilation=(13, 13))], of_names(ODD, "x"), [TF32]),
    ("mma", MMA_CASES, of_names(SOME_VIEWS, ("x", "w", "dy")), [FP32, TF32]),
    ("mma_wgrad", GPU_MMA_WGRAD_CASES, ALL_LAYOUTS, WGMMA_TYPES),
    ("mma_wgrad", GPU_MMA_WGRAD_CASES[:2], of_names(SOME_VIEWS, ("x", "dy")), [FP32, FP16]),
    ("patches", GPU_PATCHES_CASES, WITH_WEIGHTS, ALL_TYPES),
    ("direct", GPU_STEM_GRADIENTS, ALL_LAYOUTS, [FP32, *HALVES]),
    ("hopper_wgrad", GPU_WGRAD_CASES, IN_LAYOUT, [*ALL_TYPES, FP32]),
    ("hopper_wgrad", GPU_WGRAD_VIEWED, of_names(VIEWS | SHIFTS, ("x", "dy"), ("x",), ("dy",)), ALL_TYPES),
    ("hopper_wgrad", [Case(2, 40, 8, 8, 24, 3, 3, padding=(1, 1), groups=2)], of_names(SHIFTS, "x", ("dy",)), HALVES),
    ("hopper_wgrad", [Case(2, 8, 6, 70, 8, 3, 3, padding=(1, 1))], {"rows before NaN": {"dy": ROWS}}, ALL_TYPES),
    ("hopper_wgrad", [Case(2, 8, 6, 7, 8, 3, 3, padding=(1, 1))], {"images before NaN": {"dy": IMAGES}}, ALL_TYPES),
    ("strided", GPU_STRIDED_CASES, IN_LAYOUT, ALL_TYPES),
    ("dilated", GPU_DILATED_CASES, IN_LAYOUT, WGMMA_TYPES),
    ("dilated", GPU_DILATED_WGRAD_CASES, ALL_LAYOUTS, WGMMA_TYPES),
    ("tma", TMA_CASES, of_names({"channels_last": LAST}, ("x", "dy"), ("x", "w", "dy")), HALVES),
    ("tma", TMA_PLANES_CASES, {"contiguous": {}} | of_names(SHIFTS, "x"), HALVES),
    ("tma", TMA_CASES[:1], of_names(ODD, "xw"), [FP16]),
    ("tma", [Case(3, 13, 8, 16, 11, 1, 1)], of_names(ONE_FOR_ALL, "x") | WIDER_ROWS, HALVES),
    ("tma_wgrad", TMA_EIGHTS, WITH_WEIGHTS | of_names({"channels_last": LAST}, "x", ("dy",)), HALVES),
    ("tma_wgrad", GPU_CONTAINED_WGRAD_CASES, ALL_LAYOUTS | of_names(SHIFTS | ONE_FOR_ALL, "x", ("dy",)), [FP32, TF32]),
    # Planes are copied: those that begin anywhere, one image or channel for all.
    ("tma_wgrad", TMA_UNGROUPED, of_names(SHIFTS, "x", ("dy",)) | of_names(ONE_FOR_ALL, "x"), HALVES),
    # Planes in place, where 1x1 filters read them whole and they begin at multiples of 16 bytes.
    (
        "tma_wgrad",
        [Case(3, 72, 8, 17, 136, 1, 1), Case(40, 200, 28, 28, 70, 1, 1)],
        WITH_WEIGHTS | of_names(SHIFTS, "x") | of_names(ONE_FOR_ALL, "x"),
        HALVES,
    ),
    ("stem", STEM_CASES, XW_VIEWS, STEM_CONTRACTS),
    ("stem", STEM_GRADIENTS, ALL_LAYOUTS | of_names(SHIFTS, ("dy",)), STEM_CONTRACTS),
    ("pointwise", POINTWISE_CASES, XW_VIEWS | of_names(SHIFTS, "x") | {"in wider ones": WIDER}, [FP32, TF32]),
    ("wgmma", WGMMA_CASES, {"contiguous": {}}, WGMMA_TYPES),
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


SINGLE_PIXELS = [
    Case(5, 33, 1, 1, 19, 1, 1), Case(128, 96, 1, 1, 240, 1, 1), Case(3, 8, 1, 1, 16, 1, 1, stride=(2, 3)),
    Case(40, 48, 1, 1, 64, 1, 1, groups=4), Case(9, 24, 1, 1, 24, 1, 1, groups=24),
    Case(7, 16, 1, 1, 8, 3, 3, padding=(1, 1)),
]  # fmt: skip


@gpu
@pytest.mark.parametrize("case", SINGLE_PIXELS, ids=str)
@pytest.mark.parametrize("changes", [{}, {"x": ONE_FOR_ALL["one image"]}, {"dy": ONE_FOR_ALL["one channel"]}])
@pytest.mark.parametrize("dtype, tf32", [FP32, *ALL_TYPES, (torch.float64, True)], ids=named_or_text)
def test_gpu_images_of_one_pixel(case, changes, dtype, tf32):
    """They are a row of pixels to the engines, whatever lies between them."""
    tensors = changed(make_tensors(case, dtype, integers, "cuda"), changes)
    check_exact(case, computed(None, case, tensors, tf32, {"fprop", "dgrad", "wgrad", "bgrad"}), tensors)


FILLS_16 = {dtype: [fill for of, fill in STEM_16_BIT_FILLS if of == dtype] for dtype, _ in HALVES}
FEW_FILLS = [wide, under_a_tf32_step, near_the_smallest]  # for other layouts than contiguous ones
ROUNDING = [
    ("gather", GATHER_APART_CASES, IN_LAYOUT, [TF32]),
    ("gather", GATHER_FOURS, IN_LAYOUT, [TF32]),
    ("gather", GATHER_PHASES_OF_DX, IN_LAYOUT, [TF32]),
    ("mma_wgrad", GPU_MMA_WGRAD_CASES, IN_LAYOUT, WGMMA_TYPES),
    ("patches", GPU_PATCHES_CASES, WITH_WEIGHTS, ALL_TYPES),
    ("direct", GPU_STEM_GRADIENTS, IN_LAYOUT, [FP32, *HALVES]),
    ("pointwise", POINTWISE_CASES, IN_LAYOUT, [FP32, TF32]),
    ("stem", STEM_CASES, IN_LAYOUT, STEM_CONTRACTS),
    ("stem", STEM_GRADIENTS, IN_LAYOUT, STEM_CONTRACTS),
    ("strided", GPU_STRIDED_CASES, IN_LAYOUT, ALL_TYPES),
    ("tma", TMA_CASES, IN_LAYOUT, HALVES),
    ("hopper_wgrad", GPU_WGRAD_CASES, IN_LAYOUT, [*ALL_TYPES, FP32]),
    ("dilated", GPU_DILATED_WGRAD_CASES, IN_LAYOUT, WGMMA_TYPES),
    ("tma_wgrad", TMA_EIGHTS, {"channels_last": WITH_WEIGHTS["channels_last"]}, HALVES),
    ("tma_wgrad", GPU_CONTAINED_WGRAD_CASES, IN_LAYOUT, [FP32, TF32]),
]
ROUNDING_RUNS = [
    (engine, cases, view, changes, dtype, tf32, fill)
    for engine, cases, views, contracts in ROUNDING
    for (view, changes), (dtype, tf32) in itertools.product(views.items(), contracts)
    for fill in (FILLS if dtype == torch.float32 else FILLS_16[dtype])
    if view == "contiguous" or fill in FEW_FILLS
]


@gpu
@pytest.mark.parametrize("engine, cases, view, views, dtype, tf32, fill", of_engines(ROUNDING_RUNS), ids=named_or_text)
def test_gpu_rounding(engine, cases, view, views, dtype, tf32, fill):
    """Each contract, element by element; and the same bits every time."""
    for case in cases:
        tensors = changed(make_tensors(case, dtype, fill, "cuda"), views)
        results = forced(engine, case, tensors, tf32)
        check_bounds(case, results, tensors, case.tf32_operators(dtype, tf32))
        again = forced(engine, case, tensors, tf32)
        assert all(torch.equal(again[name], result) for name, result in results.items()), case


# Engines, the operator, problems, types and whether TF32 is allowed.
SPREADING = [
    ("mma", "fprop", [case for case in MMA_CASES if case.N < 16], [FP32, TF32]),
    ("pointwise", "fprop", [case for case in POINTWISE_CASES if case.K > 1], [FP32, TF32]),
    ("stem", "fprop", [case for case in STEM_CASES if case.C > 2], STEM_CONTRACTS),
    ("tma", "fprop", [case for case in TMA_CASES if case.groups == 32 or case.C in (72, 256, 512)], HALVES),
    *(
        ("wgmma", operator, [Case(2, 40, 66, 132, 72, 3, 5, padding=(1, 2), dilation=(2, 1))], WGMMA_TYPES)
        for operator in WGMMA_OPERATORS
    ),
    ("mma_wgrad", "wgrad", GPU_MMA_WGRAD_CASES[:4], WGMMA_TYPES),
    ("hopper_wgrad", "wgrad", [Case(64, 32, 24, 24, 136, 3, 3, padding=(1, 1))], [FP32, TF32]),
    ("hopper_wgrad", "wgrad", [Case(32, 128, 28, 28, 192, 1, 1)], [FP32, TF32]),
    *(
        ("tma_wgrad", "wgrad", [case], [FP32, TF32])
        for case in (Case(64, 32, 24, 24, 136, 3, 3, padding=(1, 1)), Case(32, 128, 28, 28, 192, 1, 1))
    ),
]
SPREADING_RUNS = [(*one, *contract) for *one, contracts in SPREADING for contract in contracts]


@gpu
@pytest.mark.parametrize("special", [-math.inf, math.nan], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("engine, operator, cases, dtype, tf32", of_engines(SPREADING_RUNS), ids=named_or_text)
def test_gpu_spreads_nan_and_inf(engine, operator, cases, dtype, tf32, layout, special):
    """To those outputs that read it, from both operands or, in wgmma, the first; zeros of the padding are factors."""
    for case in cases:
        tensors = make_tensors(case, dtype, positive, "cuda")
        first, second = (tensors[name] for name in OPERANDS[operator])
        first[0, 1, min(5, first.shape[2] - 1), min(3, first.shape[3] - 1)] = special
        if engine != "wgmma":
            second[1, 2, 0, 0] = special
        # In float64, where the CPU has no kernels that leave padding out.
        expected = reference(operator, case, {name: tensor.cpu() for name, tensor in tensors.items()}).to(dtype)
        result = forced(engine, case, in_layout(tensors, layout), tf32, {operator})[operator].cpu()
        assert not expected.isfinite().all()
        assert torch.equal(result.isnan(), expected.isnan()), case
        assert torch.equal(result.isinf(), expected.isinf()), case
        torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2, equal_nan=True)


# In the last one of wgmma as TF32 boxes load x; in the very last one rows of taps share a product, in dgrad.
ADVERSE_RUNS = [
    ("gather", GATHER_SCALED_CASES, True),
    ("gather", GATHER_PHASES_OF_DX[1:], True),
    ("gather", GATHER_FOURS, True),
    *(("tma_wgrad", GPU_CONTAINED_WGRAD_CASES, tf32) for tf32 in (True, False)),
    *(("wgmma", [WGMMA_CASE, Case(2, 64, 40, 264, 128, 3, 3, padding=(1, 0))], tf32) for tf32 in (True, False)),
    ("wgmma", [Case(2, 16, 90, 333, 128, 3, 3, padding=(1, 0))], False),
]


@hopper_gpu
@pytest.mark.parametrize("kind", ADVERSE)
@pytest.mark.parametrize("engine, cases, tf32", ADVERSE_RUNS, ids=named_or_text)
def test_gpu_keeps_the_contract_where_fp16_does_not_fit(engine, cases, tf32, kind):
    for case, layout in itertools.product(cases, LAYOUTS if engine != "wgmma" else LAYOUTS[:1]):
        for operator in operators_of(engine, case):
            tensors = in_layout(adverse_tensors(case, kind, operator, "cuda"), layout)
            results = forced(engine, case, tensors, tf32, {operator})
            check_bounds(case, results, tensors, tf32={operator} if tf32 else ())


@hopper_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [1e-9, math.nan, math.inf], ids=str)
def test_gpu_gather_mends(value, layout):
    for case in [*GATHER_SCALED_CASES, *GATHER_PHASES_OF_DX]:
        for operator in operators_of("gather", case):
            tensors = in_layout(misfit_tensors(operator, case, value, "cuda"), layout)
            check_misfits(operator, case, forced("gather", case, tensors, True, {operator})[operator], tensors)


DETERMINISTIC = [
    *(("gather", case, TF32) for case in GATHER_CASES),
    *(
        ("wgmma", case, contract)
        for case in (Case(8, 40, 66, 257, 130, 3, 3), Case(8, 72, 65, 64, 64, 3, 3, padding=(1, 1)))
        for contract in WGMMA_TYPES
    ),
    *(("tma_wgrad", GPU_CONTAINED_WGRAD_CASES[0], contract) for contract in (FP32, TF32)),
]


@hopper_gpu
@pytest.mark.parametrize("engine, case, contract", DETERMINISTIC, ids=str)
def test_gpu_is_deterministic(engine, case, contract):
    """Also where few values do not fit into fp16 and are corrected."""
    tensors = make_tensors(case, contract[0], normal, "cuda")
    if engine != "wgmma":
        tensors = adverse_tensors(case, "few small", "wgrad" if engine == "tma_wgrad" else "fprop", "cuda")
    first = forced(engine, case, tensors, contract[1])
    for _ in range(50):
        again = forced(engine, case, tensors, contract[1])
        assert all(torch.equal(first[name], again[name]) for name in first)


@gpu
def test_gpu_forced_engines_say_what_they_refuse():
    x, w = (torch.ones(shape, device="cuda", requires_grad=True) for shape in ((2, 16, 9, 10), (24, 16, 1, 1)))
    with modelnew.force_engine("pointwise"):
        with pytest.raises(RuntimeError, match=r"'pointwise' is forced but cannot take the forward .*no padding"):
            modelnew.conv2d(x, w, padding=1)
        y = modelnew.conv2d(x, w)
        with pytest.raises(RuntimeError, match=r"'pointwise' is forced but cannot take the wgrad .*outputs only"):
            torch.autograd.grad(y.sum(), w)


WAITING = [
    ("gather", Case(64, 64, 112, 112, 64, 1, 1)),
    ("gather", Case(64, 128, 56, 56, 128, 3, 3, stride=(2, 2), padding=(1, 1))),
    ("gather", Case(64, 64, 112, 112, 64, 3, 3, padding=(1, 1))),
    ("stem", Case(64, 3, 224, 224, 64, 7, 7, stride=(2, 2), padding=(3, 3))),
    ("mma", Case(16, 64, 56, 56, 64, 3, 3, padding=(1, 1))),
    ("pointwise", Case(16, 64, 112, 112, 64, 1, 1)),
]


@hopper_gpu
@pytest.mark.parametrize("last", ["x", "w"])
@pytest.mark.parametrize("engine, case", WAITING, ids=str)
def test_gpu_waits_for_what_wrote_its_operands(engine, case, last):
    """gather's first kernel is launched early: behind kernels, in graphs behind nothing, a memset and two streams.

    Operands differ each time by an exact factor, so that old values in an SM's cache show.
    """
    tensors = make_tensors(case, torch.float32, normal, "cuda")
    operands = {name: torch.empty_like(tensors[name]) for name in ("x", "w")}
    side, factor = torch.cuda.Stream(), torch.ones((), device="cuda")

    def write(name: str) -> None:
        operands[name].fill_(math.nan)
        torch.mul(tensors[name], factor if name == last else 1.0, out=operands[name])

    def result(before: str = "kernels") -> Tensor:
        if before != "nothing":
            write("w" if last == "x" else "x")
        if before == "streams":
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                write(last)
            torch.cuda.current_stream().wait_stream(side)
        elif before != "nothing":
            write(last)
        if before == "memset":
            torch.empty(1 << 20, device="cuda").zero_()
        return modelnew.conv2d(operands["x"], operands["w"], None, **case.kwargs)

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
                write("x")  # in front of the graph that writes nothing itself
                write("w")
                graph.replay()
                assert torch.equal(out, expected * factor), before


CHAINED_CASES = [
    Case(64, 64, 56, 56, 64, 1, 1),
    Case(64, 128, 28, 28, 128, 3, 3, padding=(1, 1)),
    Case(32, 64, 112, 112, 64, 3, 3, padding=(1, 1)),
    Case(8, 128, 65, 65, 128, 3, 3, padding=(4, 4), dilation=(4, 4)),
]


@hopper_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CHAINED_CASES, ids=str)
def test_gpu_calls_read_what_calls_before_wrote(case, layout):
    """Four calls one right behind another, whose results lie where those of the round before did."""
    tensors = in_layout(make_tensors(case, torch.float32, normal, "cuda"), layout)

    def chain(y: Tensor, apart: bool = False) -> Tensor:
        for _ in range(4):
            if apart:
                torch.cuda.synchronize()
            y = modelnew.conv2d(y, tensors["w"], None, **case.kwargs)
        return y

    with tf32_switch(True):
        expected = chain(tensors["x"], apart=True).clone()
        assert expected.isfinite().all()
        assert expected.any()
        for i in range(10):
            assert torch.equal(chain(tensors["x"] * 2.0**i), expected * 2.0**i)


FIRST_GRADIENT = """
import sys, torch, modelnew
engine, shapes = sys.argv[1], ((8, 64, 56, 56), (64, 64, 3, 3), (8, 64, 56, 56))
x, w, dy = (torch.randn(shape, device="cuda") for shape in shapes)
torch.cuda.synchronize()
leaf = (x if engine == "gather" else w).requires_grad_()
y = modelnew.conv2d(x, w, padding=1)
with modelnew.force_engine(engine):
    (gradient,) = torch.autograd.grad(y, leaf, dy)
print(gradient.isfinite().all().item())
"""


@hopper_gpu
@pytest.mark.parametrize("engine", ["hopper_wgrad", "gather"])
def test_gpu_first_gradient_of_a_process(engine):
    """Computed in a thread of autograd's own, which has called nothing of CUDA's before."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(KERNELS.parent), *sys.path])}
    command = [sys.executable, "-c", FIRST_GRADIENT, engine]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["True"], done.stderr


# Small sums in parts of the reduction; copies and sums; scales, and values that fp16 does not hold.
GRAPHED = [
    *(("tma", "fprop", Case(2, 512, 7, 7, 512, 3, 3, padding=(1, 1)), layout, FP16) for layout in LAYOUTS),
    *(
        ("hopper_wgrad", "wgrad", case, "contiguous", TF32)
        for case in (Case(8, 64, 28, 28, 96, 3, 3, padding=(1, 1)), Case(8, 64, 7, 7, 136, 1, 1))
    ),
    *(("wgmma", "fprop", Case(2, 16, 130, 518, 128, 3, 3), "contiguous", contract) for contract in (TF32, FP32)),
    ("gather", "fprop", GATHER_CONTAINED_CASES[1], "contiguous", TF32),
    ("tma_wgrad", "wgrad", GPU_CONTAINED_WGRAD_CASES[0], "contiguous", TF32),
]


@hopper_gpu
@pytest.mark.parametrize("engine, operator, case, layout, contract", GRAPHED, ids=str)
def test_cuda_graph_replays_with_data_of_another_size(engine, operator, case, layout, contract):
    """Whatever derives from operands is computed anew in every replay."""
    dtype, tf32 = contract
    if engine in ("wgmma", "gather", "tma_wgrad"):
        kinds = enumerate([*ADVERSE, "few small"])
        fresh = [adverse_tensors(case, kind, operator, "cuda", seed) for seed, kind in kinds]
    else:
        fresh = [make_tensors(case, dtype, normal, "cuda", seed) for seed in range(4)]
    static = changed({name: tensor.clone() for name, tensor in fresh[0].items()}, WITH_WEIGHTS[layout])
    with torch.cuda.stream(torch.cuda.Stream()):
        forced(engine, case, static, tf32, {operator})
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = forced(engine, case, static, tf32, {operator})
    for tensors in fresh:
        for name, tensor in tensors.items():
            static[name].copy_(tensor)
        results[operator].fill_(math.nan)
        graph.replay()
        check_bounds(case, results, tensors, case.tf32_operators(dtype, tf32))


# More than 2^31 elements in the output, by boxes and by single values; in the output and in the input of dgrad. x is an
# image, or rows of one, so many times along a dimension.
LARGE = [
    ("stem", Case(1, 3, 1024, 1024, 64, 3, 3, padding=(1, 1)), FP32, 34, 0),
    ("stem", Case(1, 3, 1023, 1023, 64, 3, 3, padding=(1, 1)), FP32, 34, 0),
    ("wgmma", Case(1, 8, 64, 4100, 130, 1, 1), FP16, 64, 2),
]


@hopper_gpu
@pytest.mark.parametrize("engine, case, contract, times, dimension", LARGE, ids=str)
def test_gpu_more_than_2_to_the_31_elements(engine, case, contract, times, dimension):
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free GPU memory")
    tensors, operators = make_tensors(case, contract[0], integers, "cuda"), operators_of(engine, case)
    names = {OPERANDS[operator][0] for operator in operators}
    large = tensors | {name: torch.cat([tensors[name]] * times, dimension) for name in names}
    letter = "NCHW"[dimension]
    whole = dataclasses.replace(case, **{letter: times * getattr(case, letter)})
    assert math.prod(whole.y_shape) > 2**31
    for operator, result in forced(engine, whole, large, contract[1], operators).items():
        for part in result.split(result.shape[dimension] // times, dimension):
            check_exact(case, {operator: part}, tensors)


@hopper_gpu
@pytest.mark.parametrize("fill", [wide, under_a_tf32_step, tf32_ties], ids=named_or_text)
@pytest.mark.parametrize("case", [WGMMA_CASE, Case(1, 300, 20, 66, 65, 6, 7, padding=(3, 3))], ids=str)
def test_gpu_wgmma_rounds_operands_to_nearest(case, fill):
    """Beside the contract: fp32 sums of operands that were rounded, both of them, with ties away from zero."""
    tensors = make_tensors(case, torch.float32, fill, "cuda")
    results = forced("wgmma", case, tensors, True)
    check_bounds(case, results, tensors, tf32=WGMMA_OPERATORS)
    rounded = {name: round_to_tf32(tensor) if name != "bias" else tensor for name, tensor in tensors.items()}
    for operator, result in results.items():
        scale = product(operator, case, *(rounded[name].double().abs() for name in OPERANDS[operator]))
        # The contract without its term for the rounding of operands.
        bound = error_bound(case, operator, rounded, result, tf32=True) - 2.0**-10 * scale
        error = (result.double() - reference(operator, case, rounded)).abs()
        assert (error <= bound).all(), f"{operator}: {(error / bound).max():.3g} times the bound"


@hopper_gpu
def test_gpu_wgmma_in_full_keeps_small_products_beside_large_ones():
    """One large product and 63 that lie at the end of its mantissa: what tensor cores align before they add."""
    case = Case(1, 64, 64, 128, 64, 1, 1)
    for binades in range(18, 27):
        tensors = make_tensors(case, torch.float32, equal, "cuda")
        tensors["x"][:] = (1 - 2.0**-10) * 2.0**-binades
        tensors["x"][:, 5] = 1
        for name in ("w", "dy"):
            tensors[name][:] = 1
        check_bounds(case, forced("wgmma", case, tensors, False, {"fprop"}), tensors, tf32=())


@hopper_gpu
@pytest.mark.parametrize("fill", [normal, positive], ids=named_or_text)
def test_gpu_wgmma_in_full_is_as_exact_as_fp32(fill):
    """The whole result is closer than the contract says; also where all is positive, so that cut-off bits add up."""
    for case, most in (
        (Case(2, 16, 130, 518, 128, 3, 3), 1.5e-7),
        (Case(1, 64, 68, 134, 128, 5, 7), 2.5e-7),
        (Case(1, 512, 34, 66, 64, 3, 3), 3e-7),
    ):
        tensors = make_tensors(case, torch.float32, fill, "cuda")
        exact = reference("fprop", case, tensors)
        y = forced("wgmma", case, tensors, False, {"fprop"})["fprop"]
        assert (y - exact).norm() <= most * exact.norm(), case
