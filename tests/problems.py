"""Problems of single engines, chosen and at random."""

from __future__ import annotations

import dataclasses
import math
import random
import re

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import (
    OPERANDS,
    Case,
    check_bounds,
    drawn,
    make_tensors,
    normal,
    pair,
    product,
    same_values,
    tiny,
    wide,
)

WGMMA_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WGMMA_OPERATORS = ["fprop", "dgrad"]
# wgmma takes this, and refuses problems that differ from it in one way; 2^27 multiply-adds are enough for TF32.
WGMMA_CASE = Case(2, 40, 130, 202, 130, 3, 3)
MEMORY_ORDERS = [(3, 2, 1, 0), (3, 2, 1, 0), (1, 3, 2, 0), (1, 3, 2, 0), (2, 3, 1, 0)]


def any_strides(shape: tuple[int, ...], order: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """Strides of a tensor of its own, contiguous or channels_last, or of a part of a larger one."""
    part, strides, step = rng.random() < 0.3, [0] * 4, 1
    for dimension in order:
        strides[dimension] = step
        step *= shape[dimension] + (rng.choice([0, 0, 1, 4, 8]) if part else 0)
        step *= rng.choice([1, 1, 1, 1, 3, 2**20]) if part and rng.random() < 0.1 else 1
    return tuple(strides)


def two_of(rng: random.Random, *values: int) -> tuple[int, int]:
    return rng.choice(values), rng.choice(values)


def sides(rng: random.Random, *most: int) -> list[int]:
    """Sizes of images: one pixel, a few, multiples of 4, and any up to the largest."""
    few = [1, rng.randint(1, 8), rng.randint(7, 16), 4 * rng.randint(1, 14)]
    return [rng.choice([*few, rng.randint(1, size), size]) for size in most]


@drawn
def random_gather_cases(rng: random.Random) -> tuple[Case, str, torch.dtype]:
    """Images from one pixel to several tiles, many of them in a tile; half of the filters 1x1, strides, groups."""
    operator, groups = rng.choice(WGMMA_OPERATORS), rng.choice([1, 1, 1, 2, 3, 4])
    C, K = (groups * rng.choice([8, 9, 12, 16, 31, 32, 40, 64, 65, 100, 128, 200]) for _ in range(2))
    N = rng.choice([1, 2, 3, 5, 8, 40])
    H, W = sides(rng, 60, rng.randint(61, 300))
    R, S = rng.choice([(1, 1), (1, 1), (1, 1), (3, 3), (2, 2), pair(rng, 1, 5)])
    stride = two_of(rng, 1, 2, 3) if operator == "fprop" else (1, 1)
    padding, dilation = two_of(rng, 0, 0, 0, 1, 2, 3), two_of(rng, 1, 1, 2, 3)
    return Case(N, C, H, W, K, R, S, stride, padding, dilation, groups), operator, rng.choice(WGMMA_DTYPES)


# gather takes this, and refuses problems that differ from it in one way.
GATHER_CASE = Case(8, 40, 56, 56, 72, 3, 3, stride=(2, 2), padding=(1, 1))


def misfit_places(operator: str, case: Case) -> tuple[list[tuple[int, ...]], int]:
    """Places of a few values in x or dy, and how many of them a copy has: for 1x1 filters those that are read, and in
    phases those in pairs of rows and columns that are read in part.

    One output reads the first two, two channels of a pixel, by its first tap, and the next two by its last one. The
    others are at corners of the first and the last image.
    """
    taps, stride, padding = (case.R, case.S), case.stride, case.padding
    shape, outputs = case.x_shape, case.y_shape[2:]
    if operator == "dgrad":
        stride, shape, outputs = (1, 1), case.y_shape, case.x_shape[2:]
        padding = tuple(d * (t - 1) - p for d, t, p in zip(case.dilation, taps, case.padding, strict=True))
    N, C, *sizes = shape
    middle = [out // 2 * step - pad for out, step, pad in zip(outputs, stride, padding, strict=True)]
    first = [max(place, 0) for place in middle]
    last = [min(m + d * (t - 1), size - 1) for m, d, t, size in zip(middle, case.dilation, taps, sizes, strict=True)]
    in_last = [(C // 2, *first), (C // 2 + 1, *first), (0, *last), (C - 1, *last), (C - 1, 0, 0), (1, -1, -1)]
    places = [(N - 1, c, h % sizes[0], w % sizes[1]) for c, h, w in in_last] + [(0, 2, 0, sizes[1] - 1)]

    def is_read(place: tuple[int, ...]) -> bool:
        steps = [(at + pad, step, out) for at, pad, step, out in zip(place[2:], padding, stride, outputs, strict=True)]
        return all(at % step == 0 and 0 <= at < step * out for at, step, out in steps)

    def is_in_pairs(place: tuple[int, ...]) -> bool:
        axes = zip(place[2:], padding, taps, outputs, strict=True)
        return all((at + pad % 2) // 2 <= (2 * (out - 1) - pad + tap - 1) // 2 + pad % 2 for at, pad, tap, out in axes)

    assert len(set(places)) == len(places)
    if stride == (2, 2) and min(taps) > 1 and case.dilation == (1, 1):
        return places, sum(map(is_in_pairs, places))
    return places, len(places) if taps != (1, 1) else sum(map(is_read, places))


def misfit_tensors(operator: str, case: Case, value: float, device: str = "cpu") -> dict[str, Tensor]:
    """Operands with a few values that do not fit, which are all that some outputs see: the others are ones or zeros."""
    tensors = make_tensors(case, torch.float32, normal, device)
    x = tensors[OPERANDS[operator][0]]
    x.zero_()
    x[0] = 1
    for i, place in enumerate(misfit_places(operator, case)[0]):
        x[place] = value * (1 + i / 8)
    tensors["bias"].zero_()
    return tensors


def check_misfits(operator: str, case: Case, out: Tensor, tensors: dict[str, Tensor]) -> None:
    """NaN and Inf where the reference has them, which the CPU computes; the rest within the contract.

    Only the first and the last image have values, if there are more.
    """
    ends = [0, case.N - 1]
    assert not out[1:-1].any()
    case, out = dataclasses.replace(case, N=2), out[ends].cpu()
    tensors = {name: (tensor[ends] if name in ("x", "dy") else tensor).cpu() for name, tensor in tensors.items()}
    expected = product(operator, case, *(tensors[name] for name in OPERANDS[operator]))
    finite = expected.isfinite()
    assert same_values(out[~finite], expected[~finite].float())
    rest = {name: tensor.nan_to_num(0.0, 0.0, 0.0) for name, tensor in tensors.items()}
    without = product(operator, case, *(rest[name] for name in OPERANDS[operator])).float()
    check_bounds(case, {operator: torch.where(finite, out, without)}, rest, tf32={operator})


def mma_strides(shape: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """Strides of any tensor, also of expanded ones."""
    strides = any_strides(shape, rng.choice(MEMORY_ORDERS), rng)
    return tuple(0 if rng.random() < 0.02 else stride for stride in strides)


REFUSAL = re.compile(r"\w[\w ,.()'^-]+")


@drawn
def random_mma_cases(rng: random.Random) -> tuple[Case, str]:
    """Anything small: few channels and many, one pixel and lines of several tiles, large filters, groups."""
    operator, groups = rng.choice(WGMMA_OPERATORS), rng.choice([1, 1, 1, 1, 2, 3])
    channels = [1, 2, 3, 4, 5, 7, 8, 16, 31, 64, 100, 128, 130, 257] if groups == 1 else [8, 9, 12, 16, 31, 64]
    C, K = (groups * rng.choice(channels) for _ in range(2))
    N = rng.choice([1, 1, 2, 3, 5])
    H, W = (
        rng.choice([1, rng.randint(1, 8), rng.randint(7, 16), 4 * rng.randint(1, 8), rng.randint(1, most)])
        for most in (41, rng.choice([60, 300, 1030]))
    )
    R, S = rng.choice([(1, 1), (1, 1), (3, 3), (3, 3), (2, 2), (7, 7), pair(rng, 1, 12)])
    stride = two_of(rng, 1, 1, 2, 3, 4) if operator == "fprop" else (1, 1)
    padding, dilation = two_of(rng, 0, 0, 1, 2, 3, 5), two_of(rng, 1, 1, 1, 2, 3, 13)
    return Case(N, C, H, W, K, R, S, stride, padding, dilation, groups), operator


@drawn
def random_pointwise_cases(rng: random.Random) -> Case:
    """1x1 filters, few channels and many, one pixel to some thousands, at a stride or not; half of them for stages."""
    if rng.random() < 0.5:
        N, C, size = rng.choice([1, 2, 3]), rng.choice([64, 128, 256]), rng.choice([14, 28, 46, 56])
        return Case(N, C, size, size, rng.choice([33, 64, 128, 160, 256]), 1, 1)
    C, K = (rng.choice([1, 2, 3, 4, 7, 8, 16, 31, 64, 100, 128, 256, 500, 1024, 2048, 9000]) for _ in range(2))
    H, W = (rng.choice([1, 4, 7, 8, 14, 28, 56, rng.randint(1, 60)]) for _ in range(2))
    stride = rng.choice([(1, 1), (1, 1), (2, 2), pair(rng, 1, 4)])
    return Case(rng.choice([1, 1, 2, 3, 8]), C, H, W, K, 1, 1, stride)


@drawn
def random_wgrad_cases(rng: random.Random) -> Case:
    """Any number of images and channels; most with the strides, padding and dilation that most networks have."""
    groups = rng.choice([1, 1, 1, 2, 4])
    C, K = (groups * rng.choice([rng.randint(1, 20), rng.randint(16, 600)]) for _ in range(2))
    N, H = rng.choice([1, rng.randint(1, 300)]), rng.choice([7, 14, 28, 56, rng.randint(1, 300)])
    R, S = rng.choice([(1, 1), (3, 3), pair(rng, 1, 12)])
    if rng.random() < 0.6:
        stride = rng.choice([(1, 1), (2, 2)])
        return Case(N, C, H, H, K, R, S, stride, (R // 2, S // 2), groups=groups)
    W, stride, padding, dilation = rng.randint(1, 300), pair(rng, 1, 4), pair(rng, 0, 6), pair(rng, 1, 3)
    return Case(N, C, H, W, K, R, S, stride, padding, dilation, groups)


def dy_before_nan(dy: Tensor, rows: bool) -> Tensor:
    """The same in rows (or images) that begin at multiples of 16 bytes and end between them, NaN behind each."""
    flat = dy if rows else dy.flatten(2)
    padded = F.pad(flat, (0, -flat.shape[-1] % 8 + 8), value=math.nan)[..., : flat.shape[-1]]
    return padded if rows else padded.unflatten(2, dy.shape[2:])


@drawn
def random_stem_cases(rng: random.Random) -> Case:
    """Few channels; one pixel and lines of several tiles, filters from 1x1 to patches, any stride."""
    C, K = rng.choice([1, 2, 3, 3, 3, 4, 5, 7]), rng.choice([1, 2, 8, 31, 32, 33, 64, 65, 96, 200])
    H, W = sides(rng, 41, rng.choice([60, 300, 530]))
    R, S = rng.choice([(1, 1), (3, 3), (3, 3), (4, 4), (7, 7), pair(rng, 1, 12)])
    stride = rng.choice([(1, 1), (2, 2), (4, 4), two_of(rng, 1, 2, 3, 5, 70)])
    padding, dilation = two_of(rng, 0, 0, 1, 2, 3, 5), two_of(rng, 1, 1, 1, 2, 3, 13)
    return Case(rng.choice([1, 1, 2, 3]), C, H, W, K, R, S, stride, padding, dilation)


# Types of tensors, and the switch where they have one.
STEM_CONTRACTS = [(torch.float32, False), (torch.float32, True), (torch.float16, True), (torch.bfloat16, True)]


def near_the_smallest(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Some are subnormal in float16, and so are most products of two."""
    return normal(shape, generator) * 2.0**-10


# Values within the range of 16 bits.
STEM_16_BIT_FILLS = [
    *((torch.float16, fill) for fill in (normal, near_the_smallest)),
    *((torch.bfloat16, fill) for fill in (normal, wide, tiny)),
]

PLANES, PIXELS = (3, 2, 1, 0), (1, 3, 2, 0)  # orders of dimensions in memory


def gapped_strides(shape: tuple[int, ...], order: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """Strides of a tensor of its own, or of a part of a larger one: gaps behind pixels, rows, images or planes."""
    part, strides, step = rng.random() < 0.4, [0] * 4, 1
    for number, dimension in enumerate(order):
        strides[dimension] = step
        step *= shape[dimension]
        if part and (order == PIXELS or number > 0 or rng.random() < 0.1):
            step += rng.choice([0, 0, 8, 8, 24, 1] if rng.random() < 0.5 else [0])
    return tuple(strides)


@drawn
def random_tma_cases(rng: random.Random) -> tuple[Case, str]:
    """One pixel to several tiles, filters up to 7x7, any stride; channels in eights and others."""
    operator = rng.choice(WGMMA_OPERATORS)
    eights = [8, 16, 24, 64, 72, 128, 136, 8 * rng.randint(1, 37)]
    others = [1, 3, 9, 65, 100, 300, rng.randint(1, 300)] if rng.random() < 0.3 else []
    C, K = (rng.choice([*eights, *others]) for _ in range(2))
    H, W = sides(rng, 60, rng.choice([60, 300]))
    N = min(rng.choice([1, 1, 2, 3, rng.randint(1, 40)]), max(1, 20000 // (H * W)))
    R, S = rng.choice([(1, 1), (1, 1), (3, 3), (3, 3), (2, 2), (7, 7), pair(rng, 1, 7)])
    stride = rng.choice([(1, 1), (1, 1), (2, 2), (2, 2), two_of(rng, 1, 2, 3, 8, 9, 70)])
    padding = two_of(rng, 0, 0, 1, 1, 2, 3, 5)
    dilation = rng.choice([(1, 1), (1, 1), (10, 12), two_of(rng, 1, 2, 3, 13)])
    halos = tuple(step * (taps - 1) for step, taps in zip(dilation, (R, S), strict=True))
    if rng.random() < 0.4:  # outputs as many as inputs
        padding = tuple(halo // 2 for halo in halos)
    elif rng.random() < 0.7:
        padding = tuple(map(min, padding, halos))
    groups = 1
    if rng.random() < 1 / 8:
        own, other = rng.choice([(64, 64), (64, 128), (32, 32), (16, 32), (24, 24), (12, 20), (8, 8), (4, 8), (2, 2)])
        groups = rng.choice([2, 3, 4, 8, 9, 32])
        C, K = (own * groups, other * groups) if operator == "fprop" else (other * groups, own * groups)
    case = Case(N, C, H, W, K, R, S, stride, padding, dilation, groups)
    if operator == "dgrad" and max(stride) > 2:  # with a stride where it is never taken
        stride = tuple(1 if size > 1 else step for size, step in zip(case.y_shape[2:], stride, strict=True))
        case = dataclasses.replace(case, stride=stride)
    return case, operator


@drawn
def random_wgmma_cases(rng: random.Random) -> Case:
    """Any filter up to 7x7, channels and columns around the tiles' and the stages' sizes, padding of any size."""
    groups = rng.choice([1, 1, 1, 2, 3])
    C, K = (groups * rng.choice([8, 9, 16, 17, 31, 40, 64, 65, 100, 130, 300]) for _ in range(2))
    W = rng.choice([32, 33, 63, 64, 65, 127, 129, 255, 256, 257, 300, 513, 1030])
    N, H, R, S = rng.choice([1, 1, 2, 5, 13]), rng.randint(1, 60), rng.randint(1, 7), rng.randint(1, 7)
    padding, dilation = two_of(rng, *range(10)), two_of(rng, 1, 1, 2, 3)
    return Case(N, C, H, W, K, R, S, (1, 1), padding, dilation, groups)


@drawn
def small_wgmma_cases(rng: random.Random) -> tuple[Case, str, torch.dtype] | None:
    """A few tiles each: one to three rows of them, ragged channels, filters, padding, dilation, groups."""
    groups, R, S = rng.choice([1, 1, 1, 2]), rng.randint(1, 3), rng.randint(1, 4)
    C, K = groups * rng.choice([8, 9, 16, 16, 24, 40, 64]), groups * rng.choice([8, 20, 64, 100, 128, 130, 200])
    H, W = rng.randint(R, 9), rng.choice([rng.randint(32, 92), rng.randint(100, 300), rng.randint(250, 600)])
    padding, dilation = (rng.randint(0, 1), rng.randint(0, 2)), (rng.choice([1, 1, 2]), rng.choice([1, 1, 2]))
    case = Case(rng.randint(1, 2), C, H, W, K, R, S, (1, 1), padding, dilation, groups)
    return (case, rng.choice(WGMMA_OPERATORS), rng.choice(WGMMA_DTYPES)) if case.y_shape[3] >= 32 else None


@drawn
def random_ways_of_gather(rng: random.Random, way: str) -> tuple[Case, str, torch.dtype] | None:
    """Problems for one way in which x may come: a copy in phases, contained on its way, by a tap, or by an image."""
    groups = rng.choice([1, 1, 1, 2]) if way in ("tap", "image") else 1
    C, K = (groups * rng.choice([8, 31, 32, 36, 64, 65, 100, 128, 200, 256, 300]) for _ in range(2))
    H, W, N = rng.randint(1, 70), rng.choice([rng.randint(1, 50), 300]), rng.choice([1, 2, 3, 5, 8, 40])
    R, S = rng.choice([(3, 3), (3, 3), (2, 2), (2, 3), (5, 4), pair(rng, 2, 7)])
    stride, padding, dilation, dtype = (1, 1), two_of(rng, 0, 0, 1, 1, 2, 3, 4), (1, 1), torch.float32
    if way == "phases":
        H, stride = rng.choice([rng.randint(1, 8), H]), (2, 2)
    elif way == "tap":  # taps that lie apart, nearly all within the reach of boxes
        (H, W), (R, S) = pair(rng, 1, 65), rng.choice([(3, 3), (3, 3), (3, 3), (1, 3), (2, 1), (4, 5)])
        dilation = rng.choice([pair(rng, 2, 20), (1, 6), (12, 12), (36, 36), (64, 64), (130, 130)])
        padding = tuple(rng.choice([0, d * (t - 1) // 2, d * (t - 1)]) for d, t in zip(dilation, (R, S), strict=True))
        stride, dtype = rng.choice([(1, 1)] * 7 + [(2, 1)]), rng.choice([torch.float32] * 3 + [torch.float16])
    elif way == "image":  # pixels that are no fours
        H, W = (rng.choice([5, 7, 7, 9, 10, 13, rng.randint(1, 17), rng.choice([33, 1001, 3001])]) for _ in range(2))
        R, S, padding = 1, 1, (0, 0)
        if H * W % 4 == 0:
            return None
    else:
        W, R, S, kind, columns = 4 * rng.randint(7, 40), rng.randint(1, 4), 3, rng.random(), rng.choice([1, 1, 1, 3])
        if kind < 0.1:
            W, columns = W + 2, 2  # rows of y are fours, those of x are not
        elif kind < 0.3:  # narrow tiles
            R, (W, columns) = 3, rng.choice([*((W, columns) for W in (13, 14, 25, 26, 27, 28, 28)), (16, 0), (12, 2)])
        elif kind < 0.6:
            R, stride, (W, columns) = 3, (2, 2), rng.choice([(56, 1), (28, 1)] * 3 + [(56, 0), (52, 3)])
            H = rng.choice([H, rng.randint(1, 16)])
        padding = rng.randint(0, 3), columns
    case = Case(N, C, H, W, K, R, S, stride, padding, dilation, groups)
    if way == "phases" and min(case.y_shape[2:]) == 1:  # there is no stride
        return None
    return case, rng.choice(["fprop", "fprop", "dgrad"]) if stride == (1, 1) else "fprop", dtype


def cases_of_gather_plans() -> list[tuple[Case, str, torch.dtype]]:
    ways = {"landing": 700, "phases": 300, "tap": 400, "image": 400}
    return [
        *random_gather_cases(3000, seed=0),
        *(case for way, count in ways.items() for case in random_ways_of_gather(count, seed=0, way=way)),
        # Phases of one tap, which are chosen if x is large.
        *[(Case(64, 64, 16, 14, 64, 2, 2, (2, 2), (2, 2)), "fprop", torch.float32)] * 20,
    ]


@drawn
def random_dilated_cases(rng: random.Random) -> Case:
    """Filters that reach as far as the image or farther, with any padding."""
    groups, dilation = rng.choice([1, 1, 2]), pair(rng, 1, 9)
    N, C, K = rng.choice([1, 2, 7]), groups * rng.randint(1, 4), groups * rng.randint(1, 5)
    H, W, R, S = rng.randint(3, 24), rng.randint(1, 20), rng.choice([1, 2, 3, 3, 4]), rng.choice([1, 2, 3, 3])
    stride = rng.choice([1, 1, 1, 2]), rng.choice([1, 1, 2])
    padding = tuple(rng.choice([0, d, rng.randint(0, 20)]) for d in dilation)
    return Case(N, C, H, W, K, R, S, stride, padding, dilation, groups)


@drawn
def random_strided_cases(rng: random.Random) -> Case:
    (H, W), (R, S), (C, K) = pair(rng, 1, 20), pair(rng, 1, 5), pair(rng, 1, 9)
    return Case(rng.randint(1, 2), C, H, W, K, R, S, pair(rng, 1, 4), pair(rng, 0, 5), pair(rng, 1, 3))


# Phases of all images and of one; the pyramid of a network for segmentation in small, of which most taps are idle; as
# many rows as phases; a padding that is no multiple of the dilation, or wider than the image.
DILATED_CASES = [
    Case(7, 3, 13, 11, 4, 3, 3, padding=(4, 4), dilation=(4, 4)),
    Case(1, 3, 13, 11, 4, 3, 3, padding=(6, 6), dilation=(6, 6)),
    Case(2, 3, 7, 7, 4, 3, 3, padding=(9, 9), dilation=(9, 9)),
    Case(2, 2, 6, 5, 3, 2, 1, padding=(3, 0), dilation=(6, 1)),
    Case(1, 4, 8, 6, 2, 5, 3, padding=(17, 2), dilation=(4, 2), groups=2),
    Case(1, 2, 7, 5, 3, 2, 1, padding=(1, 0), dilation=(3, 1)),  # phases of as many rows of y, but not of x
    Case(1, 2, 9, 7, 3, 2, 2, padding=(0, 2), dilation=(2, 8)),  # a tap meets the last column alone
]
# Weight gradients by taps: the pyramid in small; strides, of one axis or over a single output; paddings, dilations and
# taps that differ between axes, on odd sizes; taps that one output meets; outputs that meet nothing but padding.
DILATED_WGRAD_CASES = [
    Case(3, 4, 9, 9, 5, 3, 3, padding=(6, 6), dilation=(6, 6)),
    Case(2, 3, 13, 11, 4, 3, 3, stride=(2, 2), padding=(4, 4), dilation=(4, 4)),
    Case(2, 4, 15, 10, 6, 3, 2, stride=(1, 2), padding=(5, 1), dilation=(3, 4), groups=2),
    Case(2, 3, 11, 7, 4, 2, 5, stride=(3, 1), padding=(2, 7), dilation=(5, 2)),
    Case(1, 3, 5, 12, 4, 1, 3, stride=(7, 1), padding=(0, 3), dilation=(1, 3)),
    Case(2, 2, 7, 6, 3, 3, 3, padding=(6, 1), dilation=(6, 1)),
    Case(1, 2, 4, 5, 3, 2, 2, padding=(5, 6), dilation=(2, 3)),
    Case(1, 4, 17, 14, 4, 8, 8, padding=(7, 0), dilation=(2, 1), groups=4),
]
# Filters of multiples of 16 bytes and others; pixels that no patch has; an axis of one tap, or of one output; runs of a
# row in x that are aligned and not; several images.
PATCHES_CASES = [
    Case(2, 3, 8, 12, 5, 4, 4, stride=(4, 4)),
    Case(3, 2, 9, 17, 4, 4, 8, stride=(4, 8)),
    Case(2, 3, 14, 21, 4, 7, 7, stride=(7, 7)),
    Case(2, 4, 5, 8, 4, 1, 4, stride=(1, 4)),
    Case(2, 4, 9, 6, 4, 3, 1, stride=(3, 1)),
    Case(2, 3, 5, 16, 4, 4, 4, stride=(9, 4)),
    Case(2, 3, 6, 8, 4, 6, 8, stride=(1, 1)),
]
STRIDED_CASES = [
    Case(2, 9, 7, 9, 10, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(2, 9, 8, 10, 8, 1, 1, stride=(2, 2)),  # phases of zeros
    Case(1, 8, 12, 15, 8, 2, 2, stride=(4, 3), padding=(1, 0)),  # rows that no filter meets
    Case(1, 8, 6, 7, 8, 3, 3, stride=(2, 2), padding=(2, 2), dilation=(2, 2)),  # the same taps for all that any meets
    Case(2, 16, 9, 8, 24, 3, 3, stride=(1, 2), padding=(0, 1), groups=2),
    Case(1, 8, 5, 30, 8, 4, 3, stride=(9, 2), padding=(0, 1)),  # one row of outputs
    # Phases of zeros: vectors of 16 bytes and of fewer, several planes a block and several blocks a plane.
    Case(2, 16, 12, 16, 8, 1, 1, stride=(2, 2)),
    Case(3, 12, 9, 12, 8, 1, 2, stride=(2, 3)),
    Case(1, 8, 131, 129, 8, 1, 1, stride=(2, 2)),
    Case(2, 8, 3, 10, 8, 1, 1, stride=(1, 4)),
    Case(1, 8, 2, 9001, 8, 1, 1, stride=(2, 2)),  # blocks within a row
]
