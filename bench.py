"""Measures modelnew.conv2d against PyTorch's own convolution (cuDNN on a GPU): right first, then fast.

    python bench.py                                    the three reference cases, forward
    python bench.py --backward --precision tf32 fp32   also the gradients, under both of PyTorch's precision settings
    python bench.py --suite depthwise --dtype float16  another list of layers, another dtype
    python bench.py --suite resnet50 --batch 1 32      a network's distinct convolutions, a row for each batch
    python bench.py --suite unet --channels-last       x and the weight in channels_last, on both sides
    python bench.py --case 8,64,128,3,3,56,56,1,1      N,C,K,R,S,H,W[,stride,pad,dilation,groups], any number of times
    python bench.py --rest 0                           sustained load, where the GPU's power cap decides
    python bench.py --host                             host time of a call, for small convolutions
    python bench.py --json results/h200.json --readme  keep the numbers and rewrite README's table from them
    python bench.py --readme results/*.json            only rewrite README's table, from kept numbers

Each row is one pass of one layer. Our result is computed into memory filled with NaN, compared with float64 element by
element, and only then timed: ours and PyTorch's in turn in one run, before every call a pause and the L2 cache
overwritten, CUDA events around every call, median of the calls. The floor is the least time that the traffic and the
arithmetic need at the rates that this very run measured. Without a GPU the suites run scaled down on the CPU, where
modelnew is PyTorch.

Exit code 0: every row was right. 1: some row was wrong or could not run; no time is printed for it. 2: bad arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent
MARKERS = ("<!-- bench:begin -->", "<!-- bench:end -->")
SEED = 42
FORMAT = 1  # of the JSON documents
MOST_ROWS_SHOWN = 20  # of a table in README; longer ones are folded

# Before each timed call. Without a pause the calls before it decide: the check's float64 products and both sides' own
# calls hold an H200 at its power cap, at 1.2 to 1.9 GHz as read there, which made the same kernels up to 19% slower
# within a second (2026-11-21).
REST_MS = 20
MIN_REPEATS = 3  # quartiles need as many
FORWARD, DGRAD, WGRAD = "forward", "dgrad", "wgrad"
CASE_FORM = "N,C,K,R,S,H,W[,stride,pad,dilation,groups]"


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """(vertical, horizontal)"""
    return (value, value) if isinstance(value, int) else value


@dataclass(frozen=True)
class Case:
    """One layer: x[N,C,H,W], w[K,C/groups,R,S], y[N,K,P,Q].

    Stride, pad and dilation are given as one number or as (vertical, horizontal), and kept as the latter.
    """

    name: str
    N: int
    C: int
    K: int
    R: int
    S: int
    H: int
    W: int
    stride: int | tuple[int, int] = 1
    pad: int | tuple[int, int] = 0
    dilation: int | tuple[int, int] = 1
    groups: int = 1
    bias: bool = False

    def __post_init__(self) -> None:
        for name in ("stride", "pad", "dilation"):
            object.__setattr__(self, name, pair(getattr(self, name)))  # the dataclass is frozen

    @property
    def P(self) -> int:
        return (self.H + 2 * self.pad[0] - self.dilation[0] * (self.R - 1) - 1) // self.stride[0] + 1

    @property
    def Q(self) -> int:
        return (self.W + 2 * self.pad[1] - self.dilation[1] * (self.S - 1) - 1) // self.stride[1] + 1

    @property
    def flop(self) -> float:
        """Floating point operations of one pass (all three take the same), two for each multiply-add; no bias."""
        return 2.0 * self.N * self.K * self.P * self.Q * (self.C // self.groups) * self.R * self.S

    @property
    def shape(self) -> str:
        text = f"N{self.N} C{self.C} K{self.K} {self.R}x{self.S}, {self.H}x{self.W}"
        for name, (vertical, horizontal), usual in (
            ("stride", self.stride, 1),
            ("pad", self.pad, 0),
            ("dilation", self.dilation, 1),
        ):
            if vertical != horizontal:
                text += f", {name} {vertical}x{horizontal}"
            elif vertical != usual:
                text += f", {name} {vertical}"
        return text + (f", groups {self.groups}" if self.groups > 1 else "") + (", bias" if self.bias else "")

    @property
    def options(self) -> dict[str, int | tuple[int, int]]:
        """The keyword arguments of conv2d."""
        return {"stride": self.stride, "padding": self.pad, "dilation": self.dilation, "groups": self.groups}


# The layers of networks are written for one image; DEFAULTS or --batch says how many there are.
SUITES: dict[str, tuple[Case, ...]] = {
    #                 name      N   C    K   R  S   H     W
    "reference": (
        Case("P63", 16, 16, 128, 3, 3, 1024, 1024),
        Case("P55", 8, 64, 128, 3, 3, 512, 1024),
        Case("P56", 8, 64, 128, 5, 7, 512, 256),
    ),
    "depthwise": (
        Case("dw3x3", 16, 64, 64, 3, 3, 512, 512, groups=64),
        Case("dw3x3s2", 16, 64, 64, 3, 3, 512, 512, stride=2, pad=1, groups=64),
        Case("dw5x5", 16, 64, 64, 5, 5, 512, 512, pad=2, groups=64),
        Case("dw7x7", 16, 64, 64, 7, 7, 512, 512, pad=3, groups=64),
        Case("dw7x7s2", 16, 64, 64, 7, 7, 512, 512, stride=2, pad=3, groups=64),
    ),
    "smoke": (
        Case("odd", 2, 13, 17, 3, 5, 37, 41),
        Case("same", 1, 32, 32, 3, 3, 33, 65, pad=1),
        Case("1x1", 3, 40, 24, 1, 1, 19, 23),
        Case("stem", 2, 3, 16, 7, 7, 61, 67, stride=2, pad=3),
        Case("dilated", 2, 16, 24, 3, 3, 31, 29, stride=2, pad=2, dilation=2),
        Case("grouped", 2, 24, 36, 3, 3, 27, 35, pad=1, groups=3),
        Case("depthwise", 2, 20, 20, 5, 5, 40, 24, pad=2, groups=20),
    ),
    # ResNet-50 v1.5, which strides in its 3x3; each distinct convolution once, called after where torchvision's model
    # first has it. l1.conv3 is also layer1's downsample.
    "resnet50": (
        Case("conv1", 1, 3, 64, 7, 7, 224, 224, stride=2, pad=3),
        Case("l1.0.conv1", 1, 64, 64, 1, 1, 56, 56),
        Case("l1.conv2", 1, 64, 64, 3, 3, 56, 56, pad=1),
        Case("l1.conv3", 1, 64, 256, 1, 1, 56, 56),
        Case("l1.1.conv1", 1, 256, 64, 1, 1, 56, 56),
        Case("l2.0.conv1", 1, 256, 128, 1, 1, 56, 56),
        Case("l2.0.conv2", 1, 128, 128, 3, 3, 56, 56, stride=2, pad=1),
        Case("l2.conv3", 1, 128, 512, 1, 1, 28, 28),
        Case("l2.down", 1, 256, 512, 1, 1, 56, 56, stride=2),
        Case("l2.1.conv1", 1, 512, 128, 1, 1, 28, 28),
        Case("l2.1.conv2", 1, 128, 128, 3, 3, 28, 28, pad=1),
        Case("l3.0.conv1", 1, 512, 256, 1, 1, 28, 28),
        Case("l3.0.conv2", 1, 256, 256, 3, 3, 28, 28, stride=2, pad=1),
        Case("l3.conv3", 1, 256, 1024, 1, 1, 14, 14),
        Case("l3.down", 1, 512, 1024, 1, 1, 28, 28, stride=2),
        Case("l3.1.conv1", 1, 1024, 256, 1, 1, 14, 14),
        Case("l3.1.conv2", 1, 256, 256, 3, 3, 14, 14, pad=1),
        Case("l4.0.conv1", 1, 1024, 512, 1, 1, 14, 14),
        Case("l4.0.conv2", 1, 512, 512, 3, 3, 14, 14, stride=2, pad=1),
        Case("l4.conv3", 1, 512, 2048, 1, 1, 7, 7),
        Case("l4.down", 1, 1024, 2048, 1, 1, 14, 14, stride=2),
        Case("l4.1.conv1", 1, 2048, 512, 1, 1, 7, 7),
        Case("l4.1.conv2", 1, 512, 512, 3, 3, 7, 7, pad=1),
    ),
    # U-Net with padding 1 on 512x512 images: 3 to 1024 channels, 512 to 64 pixels. The encoder's four levels have 512,
    # 256, 128 and 64 pixels, and the bottleneck stays at 64, where the classic network pools once more, to 32. Decoder
    # layers read the level below and the skip connection, concatenated; their second convolution is the encoder's.
    "unet": (
        Case("enc1a", 1, 3, 64, 3, 3, 512, 512, pad=1),
        Case("enc1b", 1, 64, 64, 3, 3, 512, 512, pad=1),
        Case("enc2a", 1, 64, 128, 3, 3, 256, 256, pad=1),
        Case("enc2b", 1, 128, 128, 3, 3, 256, 256, pad=1),
        Case("enc3a", 1, 128, 256, 3, 3, 128, 128, pad=1),
        Case("enc3b", 1, 256, 256, 3, 3, 128, 128, pad=1),
        Case("enc4a", 1, 256, 512, 3, 3, 64, 64, pad=1),
        Case("enc4b", 1, 512, 512, 3, 3, 64, 64, pad=1),
        Case("mid_a", 1, 512, 1024, 3, 3, 64, 64, pad=1),
        Case("mid_b", 1, 1024, 1024, 3, 3, 64, 64, pad=1),
        Case("dec4a", 1, 1024, 512, 3, 3, 64, 64, pad=1),
        Case("dec3a", 1, 512, 256, 3, 3, 128, 128, pad=1),
        Case("dec2a", 1, 256, 128, 3, 3, 256, 256, pad=1),
        Case("dec1a", 1, 128, 64, 3, 3, 512, 512, pad=1),
        Case("last", 1, 64, 2, 1, 1, 512, 512),
    ),
    # The depthwise convolutions of MobileNetV2 at 224x224.
    "mobilenet": (
        Case("m32", 1, 32, 32, 3, 3, 112, 112, pad=1, groups=32),
        Case("m96s2", 1, 96, 96, 3, 3, 112, 112, stride=2, pad=1, groups=96),
        Case("m144", 1, 144, 144, 3, 3, 56, 56, pad=1, groups=144),
        Case("m144s2", 1, 144, 144, 3, 3, 56, 56, stride=2, pad=1, groups=144),
        Case("m192", 1, 192, 192, 3, 3, 28, 28, pad=1, groups=192),
        Case("m192s2", 1, 192, 192, 3, 3, 28, 28, stride=2, pad=1, groups=192),
        Case("m384", 1, 384, 384, 3, 3, 14, 14, pad=1, groups=384),
        Case("m576", 1, 576, 576, 3, 3, 14, 14, pad=1, groups=576),
        Case("m576s2", 1, 576, 576, 3, 3, 14, 14, stride=2, pad=1, groups=576),
        Case("m960", 1, 960, 960, 3, 3, 7, 7, pad=1, groups=960),
    ),
    # The depthwise convolutions of ConvNeXt-T at 224x224.
    "convnext": (
        Case("c96", 1, 96, 96, 7, 7, 56, 56, pad=3, groups=96),
        Case("c192", 1, 192, 192, 7, 7, 28, 28, pad=3, groups=192),
        Case("c384", 1, 384, 384, 7, 7, 14, 14, pad=3, groups=384),
        Case("c768", 1, 768, 768, 7, 7, 7, 7, pad=3, groups=768),
    ),
    # DeepLabV3 on ResNet-50, torchvision's, on images of 520x520: what it has at an eighth of their size. These are
    # layers 3 and 4, dilated instead of strided, and what follows but for the branch of a single pixel.
    "deeplab": (
        Case("d3.0.conv1", 1, 512, 256, 1, 1, 65, 65),
        Case("d3.0.conv2", 1, 256, 256, 3, 3, 65, 65, pad=1),
        Case("d3.down", 1, 512, 1024, 1, 1, 65, 65),
        Case("d3.conv3", 1, 256, 1024, 1, 1, 65, 65),
        Case("d3.1.conv1", 1, 1024, 256, 1, 1, 65, 65),
        Case("d3.1.conv2", 1, 256, 256, 3, 3, 65, 65, pad=2, dilation=2),
        Case("d4.0.conv1", 1, 1024, 512, 1, 1, 65, 65),
        Case("d4.0.conv2", 1, 512, 512, 3, 3, 65, 65, pad=2, dilation=2),
        Case("d4.down", 1, 1024, 2048, 1, 1, 65, 65),
        Case("d4.conv3", 1, 512, 2048, 1, 1, 65, 65),
        Case("d4.1.conv1", 1, 2048, 512, 1, 1, 65, 65),
        Case("d4.1.conv2", 1, 512, 512, 3, 3, 65, 65, pad=4, dilation=4),
        Case("aspp1", 1, 2048, 256, 1, 1, 65, 65),
        Case("aspp12", 1, 2048, 256, 3, 3, 65, 65, pad=12, dilation=12),
        Case("aspp24", 1, 2048, 256, 3, 3, 65, 65, pad=24, dilation=24),
        Case("aspp36", 1, 2048, 256, 3, 3, 65, 65, pad=36, dilation=36),
        Case("project", 1, 1280, 256, 1, 1, 65, 65),
        Case("classify", 1, 256, 21, 1, 1, 65, 65),
    ),
    # The 3x3 convolutions of ResNeXt-101 32x8d, in 32 groups of 8 to 64 channels.
    "resnext": (
        Case("x256", 1, 256, 256, 3, 3, 56, 56, pad=1, groups=32),
        Case("x512s2", 1, 512, 512, 3, 3, 56, 56, stride=2, pad=1, groups=32),
        Case("x512", 1, 512, 512, 3, 3, 28, 28, pad=1, groups=32),
        Case("x1024s2", 1, 1024, 1024, 3, 3, 28, 28, stride=2, pad=1, groups=32),
        Case("x1024", 1, 1024, 1024, 3, 3, 14, 14, pad=1, groups=32),
        Case("x2048s2", 1, 2048, 2048, 3, 3, 14, 14, stride=2, pad=1, groups=32),
        Case("x2048", 1, 2048, 2048, 3, 3, 7, 7, pad=1, groups=32),
    ),
    # What Vision Transformers begin with (ViT-B/16, B/32, L/14 and H/14), and a Swin Transformer, like a ConvNeXt.
    "vit": (
        Case("b16", 1, 3, 768, 16, 16, 224, 224, stride=16, bias=True),
        Case("b32", 1, 3, 768, 32, 32, 224, 224, stride=32, bias=True),
        Case("l14", 1, 3, 1024, 14, 14, 224, 224, stride=14, bias=True),
        Case("h14", 1, 3, 1280, 14, 14, 224, 224, stride=14, bias=True),
        Case("swin", 1, 3, 96, 4, 4, 224, 224, stride=4, bias=True),
    ),
    # KernelBench's level 1, by the number of the problem, as of its commit 423217d; 86 is a pair of convolutions.
    "kernelbench": (
        Case("kb50", 256, 3, 96, 11, 11, 224, 224, stride=4, pad=2, bias=True),
        Case("kb62", 8, 32, 64, 5, 9, 512, 512),
        Case("kb80", 8, 32, 64, 5, 9, 512, 512, pad=(2, 4), dilation=(2, 3)),
        Case("kb82", 16, 64, 64, 3, 3, 512, 512, groups=64),
        Case("kb83", 64, 8, 8, 3, 1, 512, 512, groups=8),
        Case("kb84", 64, 128, 128, 3, 3, 256, 512, groups=128),
        Case("kb85", 32, 128, 128, 3, 7, 128, 256, groups=128),
        Case("kb86dw", 16, 64, 64, 3, 3, 512, 512, pad=1, groups=64),
        Case("kb86pw", 16, 64, 128, 1, 1, 512, 512),
        Case("kb87", 16, 64, 128, 1, 1, 1024, 1024),
    ),
}


class Defaults(NamedTuple):
    """What a suite runs with unless the command line says otherwise."""

    batches: tuple[int, ...] = ()  # each layer once for each of them; none: every case has its own N
    repeats: int = 25
    rest_ms: float = REST_MS


# Networks have many rows, and calls of 10 to 500 us. No pauses: after one the host takes longer than the 0.1 ms of the
# overwriting to launch a call, and clocks are low, so that it is the launch that is timed (H200, 2026-11-22, depthwise
# 3x3 of 960 channels at 7x7, 128 images: 133 us after a pause, 30 us without).
DEFAULTS: dict[str, Defaults] = {
    "resnet50": Defaults(batches=(1, 32, 256), repeats=15, rest_ms=0),
    "unet": Defaults(batches=(1, 16), repeats=15, rest_ms=0),
    "mobilenet": Defaults(batches=(128,), repeats=15, rest_ms=0),
    "convnext": Defaults(batches=(128,), repeats=15, rest_ms=0),
    "deeplab": Defaults(batches=(1, 8), repeats=15, rest_ms=0),
    "resnext": Defaults(batches=(1, 32), repeats=15, rest_ms=0),
    "vit": Defaults(batches=(1, 64), repeats=15, rest_ms=0),
    "kernelbench": Defaults(repeats=15),
}

# Small enough that a GPU is done with it sooner than a host can launch the next one.
HOST_CASE = Case("tiny", 1, 16, 16, 3, 3, 8, 8, pad=1)


@dataclass(frozen=True)
class Job:
    """One row to measure."""

    case: Case
    direction: str
    dtype: str
    precision: str  # PyTorch's setting for fp32 tensors
    batch: int | None = None  # which of a suite's batches this row is of
    channels_last: bool = False

    @property
    def name(self) -> str:
        """One for each row of a suite: the case's, with the batch where the suite runs at several."""
        return self.case.name if self.batch is None else f"{self.case.name}/{self.batch}"

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format


def parse_case(text: str) -> Case:
    """The case that CASE_FORM describes; ValueError says what is wrong with it."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of whole numbers {CASE_FORM}") from None
    if not 7 <= len(numbers) <= 11:
        raise ValueError(f"{text!r} has {len(numbers)} numbers, not 7 to 11: {CASE_FORM}")
    case = Case(text, *numbers)
    if min(numbers[:8]) < 1 or min(case.pad) < 0 or min(case.dilation) < 1 or case.groups < 1:
        raise ValueError(f"{text!r}: sizes, stride, dilation and groups must be positive, pad non-negative")
    if case.C % case.groups or case.K % case.groups:
        raise ValueError(f"{text!r}: groups {case.groups} must divide C {case.C} and K {case.K}")
    if case.P < 1 or case.Q < 1:
        raise ValueError(f"{text!r}: the {case.R}x{case.S} filter is larger than the padded {case.H}x{case.W} input")
    return case


def scaled_down(case: Case) -> Case:
    """The case for a CPU: one image, a 64th of its pixels but no side cut below 64; channels and filter as they are."""
    return replace(case, N=1, H=max(min(case.H, 64), case.H // 8), W=max(min(case.W, 64), case.W // 8))


# The floor: what traffic and arithmetic cost at the rates that this run measured.


@dataclass(frozen=True)
class Ceilings:
    """Rates that the machine reached in this run: memory in GB/s (copy counts reads and writes), matmul in TFLOP/s."""

    copy_gbs: float
    fill_gbs: float
    read_gbs: float
    matmul_size: int
    matmul_tflops: dict[str, float]  # "float16", "bfloat16", "tf32", "float32", "float64"

    def matrix_rate(self, contract: str) -> float:
        """TFLOP/s at which a convolution under this contract could multiply.

        TF32 and fp16 carry the same 10 mantissa bits, so that fp16 operands serve the TF32 contract at fp16's rate.
        Full fp32 takes three fp16 products for one (high times high and the two cross terms), or plain fp32.
        The rates are cuBLAS's. A bare loop of Hopper's wgmma reaches about 12% more (fp16 on an H200: 900 TFLOP/s, not
        772), so that a convolution may pass this floor a little.
        """
        rates = self.matmul_tflops
        if contract == "tf32":
            return rates["float16"]
        if contract == "fp32":
            return max(rates["float32"], rates.get("float16", 0.0) / 3)
        return rates[contract]


class Traffic(NamedTuple):
    """Bytes that a pass cannot avoid reading and writing."""

    read: float
    written: float


def touched_rows(case: Case) -> int:
    """How many of the H input rows any filter row meets (with a stride, perhaps not all)."""
    return touched(case.H, case.P, case.R, case.stride[0], case.pad[0], case.dilation[0])


def touched_columns(case: Case) -> int:
    """The same for the W columns."""
    return touched(case.W, case.Q, case.S, case.stride[1], case.pad[1], case.dilation[1])


def touched(size: int, outputs: int, taps: int, stride: int, pad: int, dilation: int) -> int:
    """Along one axis: at how many of `size` places any of `outputs` filters has any of its `taps`."""
    places = {output * stride - pad + tap * dilation for output in range(outputs) for tap in range(taps)}
    return len(places & set(range(size)))


def traffic(case: Case, direction: str, itemsize: int, channels_last: bool = False) -> Traffic:
    """Least traffic of a pass: every operand once, of x the rows that matter.

    In channels_last also only the columns that matter: the channels of a pixel lie together, mostly more than the 32
    bytes that memory is read by. Else the columns between come along.
    """
    pixels = touched_rows(case) * (touched_columns(case) if channels_last else case.W)
    whole_x = case.N * case.C * case.H * case.W * itemsize
    x = case.N * case.C * pixels * itemsize
    w = case.K * (case.C // case.groups) * case.R * case.S * itemsize
    y = case.N * case.K * case.P * case.Q * itemsize
    bias = case.K * case.bias * itemsize
    return {FORWARD: Traffic(x + w + bias, y), DGRAD: Traffic(y + w, whole_x), WGRAD: Traffic(x + y, w)}[direction]


class Floor(NamedTuple):
    memory_ms: float
    arithmetic_ms: float

    @property
    def ms(self) -> float:
        return max(self)


def floor(case: Case, direction: str, contract: str, ceilings: Ceilings, channels_last: bool = False) -> Floor:
    """The times below which neither the traffic nor the arithmetic of this pass can be done at the measured rates."""
    moved = traffic(case, direction, type_info(contract).bits // 8, channels_last)
    memory_ms = moved.written / ceilings.fill_gbs / 1e6 + moved.read / ceilings.read_gbs / 1e6
    return Floor(memory_ms, case.flop / ceilings.matrix_rate(contract) / 1e9)


def type_info(contract: str) -> torch.finfo:
    """The tensors' type: tf32 and fp32 are the two contracts of float32, the others are called like their type."""
    return torch.finfo(torch.float32 if contract in ("tf32", "fp32") else getattr(torch, contract))


# Timing.


class Clock:
    """Times calls one by one: with CUDA events and a cold L2 on a GPU, with the host's clock on a CPU."""

    def __init__(self, device: torch.device, rest_ms: float = 0) -> None:
        """Before every timed call a GPU rests for `rest_ms`, or 0: it runs without a pause, up to its power cap."""
        self.device = device
        self.rest_ms = rest_ms
        self.scratch: Tensor | None = None
        if device.type == "cuda":
            l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
            # Eight times the L2: nothing survives in it, and writing it takes the GPU so long (0.1 ms on an H200)
            # that the host has launched the timed call before the GPU comes to it.
            self.scratch = torch.empty(max(8 * l2_bytes, 128 << 20), dtype=torch.uint8, device=device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release_memory(self) -> None:
        """Gives cached memory back, so that the last row's large tensors do not split up the next one's."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def milliseconds(self, calls: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
        """Runs the calls in turn `repeats` times, after two untimed rounds; returns one list of times for each call."""
        for _ in range(2):
            for call in calls:
                call()
        if self.scratch is None:
            return self._host_milliseconds(calls, repeats)
        spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
        for _ in range(repeats):
            for call, spans_of_call in zip(calls, spans, strict=True):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                if self.rest_ms > 0:
                    self.synchronize()
                    time.sleep(self.rest_ms / 1e3)
                self.scratch.zero_()
                begin.record()
                call()
                end.record()
                spans_of_call.append((begin, end))
        self.synchronize()
        return [[begin.elapsed_time(end) for begin, end in spans_of_call] for spans_of_call in spans]

    @staticmethod
    def _host_milliseconds(calls: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(repeats):
            for call, times_of_call in zip(calls, times, strict=True):
                begin = time.perf_counter()
                call()
                times_of_call.append((time.perf_counter() - begin) * 1e3)
        return times


class Timing(NamedTuple):
    """Median and quartiles of one call's times, in milliseconds."""

    ms: float
    q1_ms: float
    q3_ms: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Timing:
        q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive")
        return cls(median, q1, q3)


@contextlib.contextmanager
def fp32_precision(switch: Any, setting: str) -> Iterator[None]:
    """Sets a torch.backends switch to "tf32" or "fp32" and puts it back afterwards.

    From 2.9 on PyTorch has `fp32_precision`, and merely reading the older `allow_tf32` may raise once that was set.
    """
    name = "fp32_precision" if hasattr(switch, "fp32_precision") else "allow_tf32"
    values = {"tf32": "tf32", "fp32": "ieee"} if name == "fp32_precision" else {"tf32": True, "fp32": False}
    before = getattr(switch, name)
    setattr(switch, name, values[setting])
    try:
        yield
    finally:
        setattr(switch, name, before)


def switch_name() -> str:
    return f"torch.backends.cudnn.{'conv.fp32_precision' if hasattr(torch.backends.cudnn, 'conv') else 'allow_tf32'}"


def convolution_switch() -> Any:
    """Where the precision of cuDNN's convolutions is set: in older torch together with the rest of cuDNN's."""
    return getattr(torch.backends.cudnn, "conv", torch.backends.cudnn)


def measure_ceilings(clock: Clock, dtypes: Iterable[str]) -> Ceilings:
    """Memory and matrix rates, the best of several runs each. On a CPU only the matrix rates of `dtypes`."""
    on_gpu = clock.device.type == "cuda"
    memory_bytes = torch.cuda.get_device_properties(clock.device).total_memory if on_gpu else 1 << 30
    copy, fill, read = memory_rates(clock, min(2 << 30, memory_bytes // 16))
    if not on_gpu:
        return Ceilings(copy, fill, read, 512, {dtype: matmul_rate(clock, dtype, 512) for dtype in dtypes})
    size = 8192 if memory_bytes > 12 << 30 else 4096
    with fp32_precision(torch.backends.cuda.matmul, "fp32"):
        rates = {dtype: matmul_rate(clock, dtype, size) for dtype in ("float16", "bfloat16", "float32", "float64")}
    with fp32_precision(torch.backends.cuda.matmul, "tf32"):
        rates["tf32"] = matmul_rate(clock, "float32", size)
    return Ceilings(copy, fill, read, size, rates)


def best_seconds(clock: Clock, call: Callable[[], Any]) -> float:
    return min(clock.milliseconds([call], 8)[0]) / 1e3


def memory_rates(clock: Clock, size: int) -> tuple[float, float, float]:
    """GB/s of a copy (bytes read plus bytes written), of a fill and of a reduction over `size` bytes."""
    source = torch.ones(size // 4, device=clock.device)
    target = torch.empty_like(source)
    copy = 2 * size / best_seconds(clock, lambda: target.copy_(source)) / 1e9
    fill = size / best_seconds(clock, lambda: target.fill_(1.0)) / 1e9
    read = size / best_seconds(clock, lambda: source.sum()) / 1e9
    # A copy reads as well: where the reduction is slower at it, the copy's rate is the better ceiling.
    return copy, fill, max(read, copy)


def matmul_rate(clock: Clock, dtype: str, size: int) -> float:
    """TFLOP/s of a square matrix product of normal random numbers (a GPU multiplies zeros faster)."""
    a, b = (torch.randn(size, size, device=clock.device).to(getattr(torch, dtype)) for _ in range(2))
    return 2 * size**3 / best_seconds(clock, lambda: a @ b) / 1e12


# The float64 reference and what may differ from it.


class Piece(NamedTuple):
    """A part of a result: where it lies, its float64 value, and the same sum over absolute values."""

    index: tuple[slice, ...]
    value: Tensor
    magnitude: Tensor


@dataclass(frozen=True)
class Operands:
    x: Tensor
    w: Tensor
    dy: Tensor | None  # only where a gradient is asked for
    bias: Tensor | None = None


def chunks(case: Case, budget_bytes: int, bytes_per_row: int) -> Iterator[tuple[slice, int, int]]:
    """Cuts the outputs into (images, first row, end row) of at most about `budget_bytes`, rows in order."""
    rows = max(1, min(case.P, budget_bytes // bytes_per_row))
    images = max(1, budget_bytes // (bytes_per_row * case.P)) if rows == case.P else 1
    for n in range(0, case.N, images):
        for p in range(0, case.P, rows):
            yield slice(n, min(n + images, case.N)), p, min(p + rows, case.P)


class Float64Reference:
    """The exact pass as float64 matrix products over unfolded pieces of the input: no convolution library involved.

    Columns are [images, groups, C/groups*R*S, rows*Q]. P63 is twice 616 GFLOP: about 0.1 s on an H200.
    """

    def __init__(self, case: Case, operands: Operands) -> None:
        self.case = case
        self.operands = operands
        self.window = {"kernel_size": (case.R, case.S), "dilation": case.dilation, "stride": case.stride}
        # [groups, K/groups, C/groups*R*S]
        self.filters = operands.w.double().reshape(case.groups, case.K // case.groups, -1)
        if operands.x.is_cuda:
            total_bytes = torch.cuda.get_device_properties(operands.x.device).total_memory
            self.budget_bytes = min(2 << 30, total_bytes // 32)
        else:
            self.budget_bytes = 256 << 20

    def pieces(self, direction: str) -> Iterator[Piece]:
        """The result of the pass, piece by piece."""
        return {FORWARD: self._forward, DGRAD: self._dgrad, WGRAD: self._wgrad}[direction]()

    def _columns(self, images: slice, p_begin: int, p_end: int) -> Tensor:
        """The inputs of output rows p_begin to p_end."""
        case = self.case
        pad_h, pad_w = case.pad
        x = F.pad(self.operands.x[images].double(), (pad_w, pad_w, pad_h, pad_h))
        rows = x[:, :, self._input_rows(p_begin, p_end)]
        return F.unfold(rows, **self.window).reshape(x.shape[0], case.groups, self.filters.shape[2], -1)

    def _input_rows(self, p_begin: int, p_end: int) -> slice:
        """The rows of the padded input that output rows p_begin to p_end read."""
        stride, dilation = self.case.stride[0], self.case.dilation[0]
        return slice(p_begin * stride, (p_end - 1) * stride + dilation * (self.case.R - 1) + 1)

    def _output_gradient(self, images: slice, p_begin: int, p_end: int) -> Tensor:
        """dy as [images, groups, K/groups, rows*Q]."""
        dy = self.operands.dy[images, :, p_begin:p_end].double()
        return dy.reshape(dy.shape[0], self.case.groups, self.filters.shape[1], -1)

    def _chunks(self, elements_per_row: int) -> Iterator[tuple[slice, int, int]]:
        return chunks(self.case, self.budget_bytes, 8 * elements_per_row)

    def _forward(self) -> Iterator[Piece]:
        case = self.case
        for images, p_begin, p_end in self._chunks(case.Q * max(case.C * case.R * case.S, case.K)):
            columns = self._columns(images, p_begin, p_end)
            shape = (columns.shape[0], case.K, p_end - p_begin, case.Q)
            value = (self.filters @ columns).reshape(shape)
            magnitude = (self.filters.abs() @ columns.abs_()).reshape(shape)
            if self.operands.bias is not None:  # one more product, of the bias and 1
                bias = self.operands.bias.double()[:, None, None]
                value += bias
                magnitude += bias.abs()
            yield Piece((images, slice(None), slice(p_begin, p_end)), value, magnitude)

    def _dgrad(self) -> Iterator[Piece]:
        case = self.case
        pad_h, pad_w = case.pad
        transposed = self.filters.transpose(1, 2)
        for images, p_begin, p_end in self._chunks(case.Q * max(case.C * case.R * case.S, case.K)):
            if p_begin == 0:
                padded = (images.stop - images.start, case.C, case.H + 2 * pad_h, case.W + 2 * pad_w)
                value, magnitude = torch.zeros(2, *padded, dtype=torch.float64, device=self.filters.device)
            rows = self._input_rows(p_begin, p_end)
            dy = self._output_gradient(images, p_begin, p_end)
            for total, columns in ((value, transposed @ dy), (magnitude, transposed.abs() @ dy.abs())):
                size = (rows.stop - rows.start, total.shape[3])
                total[:, :, rows] += F.fold(columns.flatten(1, 2), size, **self.window)
            if p_end == case.P:
                inner = (..., slice(pad_h, pad_h + case.H), slice(pad_w, pad_w + case.W))
                yield Piece((images,), value[inner], magnitude[inner])

    def _wgrad(self) -> Iterator[Piece]:
        case = self.case
        shape = tuple(self.operands.w.shape)
        value, magnitude = torch.zeros(2, *self.filters.shape, dtype=torch.float64, device=self.filters.device)
        # One product for each output row: a single product over all pixels would be one long, narrow reduction.
        for images, p_begin, p_end in self._chunks(
            max(case.Q * case.C * case.R * case.S, case.Q * case.K, case.K * self.filters.shape[2])
        ):
            columns = self._by_row(self._columns(images, p_begin, p_end))
            dy = self._by_row(self._output_gradient(images, p_begin, p_end))
            value += (dy @ columns.transpose(-1, -2)).sum((0, 2))
            magnitude += (dy.abs() @ columns.abs().transpose(-1, -2)).sum((0, 2))
        yield Piece((slice(None),), value.reshape(shape), magnitude.reshape(shape))

    def _by_row(self, pixels: Tensor) -> Tensor:
        """[images, groups, channels, rows*Q] -> [images, groups, rows, channels, Q]."""
        return pixels.unflatten(3, (-1, self.case.Q)).transpose(2, 3)


class Bound(NamedTuple):
    """|y - y64| <= magnitude * conv(|x|,|w|) + value * |y64| + absolute, for every element."""

    magnitude: float
    value: float
    absolute: float


def error_bound(contract: str, reduction: int) -> Bound:
    """The element-wise contract for sums of `reduction` products.

    For operands near the denormal range the contract allows more; the operands here are nowhere near it.
    """
    info = type_info(contract)
    if contract == "tf32":  # both operands rounded to 10 bits, fp32 accumulation
        return Bound(2**-10 + 2**-22 + (reduction + 16) * 2**-24, 2**-23, 2**-126)
    if contract == "fp32":
        return Bound(2**-21 + (64 + reduction / 64) * 2**-24, 2**-23, 2**-126)
    if contract == "float64":  # the reference rounds as often as we do
        return Bound(2 * (reduction + 16) * 2**-53, 2**-52, info.tiny)
    # 16-bit operands as they are, fp32 accumulation, one rounding to the output's type.
    return Bound((reduction + 16) * 2**-24, info.eps / 2 + 2**-23, info.tiny * info.eps)


# The bound of a sum grows with its length and says little about a weight gradient, a sum over millions of pixels.
# So the relative error of the whole result is held as well; random data stay far below (rounding errors average out).
RELATIVE_LIMITS = {"tf32": 2**-10, "fp32": 1e-5, "float16": 2**-10, "bfloat16": 2**-7, "float64": 1e-13}


def reduction_length(case: Case, direction: str) -> int:
    """How many products make one element of the result (at most, where there is padding or a stride)."""
    if direction == WGRAD:
        return case.N * case.P * case.Q
    return (case.C if direction == FORWARD else case.K) // case.groups * case.R * case.S


@dataclass
class Errors:
    """What a result is off by: the relative Frobenius norm, and the largest error as a multiple of its bound."""

    squares: float = 0.0
    worst: float = 0.0
    relative: float = math.nan

    def add(self, result: Tensor, piece: Piece, bound: Bound) -> None:
        error = (result[piece.index].double() - piece.value).abs_()
        self.squares += error.square().sum().item()
        allowed = piece.magnitude * bound.magnitude + piece.value.abs() * bound.value + bound.absolute
        worst = (error / allowed).max().item()
        if math.isnan(worst) or worst > self.worst:  # once NaN, it stays: nothing is greater
            self.worst = worst

    def within(self, relative_limit: float) -> bool:
        """Comparisons that NaN fails."""
        return self.worst <= 1.0 and self.relative <= relative_limit


def compare(
    job: Job, operands: Operands, contract: str, ours: Tensor, peer: Tensor
) -> tuple[Errors, Errors, bool | None]:
    """Both results against float64, and whether they are close to each other as evaluation scripts ask (at 1e-4).

    That last is None for 16-bit types, whose own rounding is coarser.
    """
    bound = error_bound(contract, reduction_length(job.case, job.direction))
    our_errors, peer_errors, squares, close = Errors(), Errors(), 0.0, True
    for piece in Float64Reference(job.case, operands).pieces(job.direction):
        squares += piece.value.square().sum().item()
        our_errors.add(ours, piece, bound)
        peer_errors.add(peer, piece, bound)
        close = close and torch.allclose(ours[piece.index], peer[piece.index], rtol=1e-4, atol=1e-4)
    for errors in (our_errors, peer_errors):
        errors.relative = math.sqrt(errors.squares / squares) if squares else errors.squares
    return our_errors, peer_errors, close if type_info(contract).bits > 16 else None


# One row.


@dataclass(frozen=True)
class Settings:
    """What one run was asked for, apart from its cases."""

    data: str
    repeats: int
    engine: str | None
    rest_ms: float
    channels_last: bool = False
    cudnn_benchmark: bool = True
    seed: int = SEED


def library() -> Any:
    """modelnew, imported late: its import compiles the kernels, which --help and --readme FILE do not need."""
    import modelnew

    return modelnew


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors are full of NaN here (integers: of their largest value), so that what a kernel leaves out shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def memory_is_poisoned(device: torch.device) -> bool:
    """Whether this torch fills new tensors so (2.2 and later do)."""
    with poisoned_memory():
        return bool(torch.empty(8, device=device).isnan().all())


def wide(*shape: int, **options: Any) -> Tensor:
    """Magnitudes over 40 binades, which no float16 holds."""
    return torch.randn(*shape, **options) * torch.exp2(40 * torch.rand(*shape, **options) - 20)


def specks(*shape: int, **options: Any) -> Tensor:
    """Uniform, but for one value in 2^17 that is too small for float16: rarely does a sample of 2^16 see one."""
    x = torch.rand(*shape, **options)
    places = torch.randint(x.numel(), (x.numel() >> 17,), device=x.device)
    x.view(-1)[places] = 1e-12
    return x


# How x may be drawn, and what the report says of it.
DATA: dict[str, tuple[Callable[..., Tensor], str]] = {
    "rand": (torch.rand, "torch.rand"),
    "randn": (torch.randn, "torch.randn"),
    "wide": (wide, "torch.randn times 2^-20 to 2^20"),
    "specks": (specks, "torch.rand, one value in 2^17 replaced by 1e-12"),
}


def draw_operands(job: Job, data: str, device: torch.device) -> Operands:
    """x drawn as asked, w and bias as nn.Conv2d draws them, dy normal; 16-bit ones are rounded from float32."""
    torch.manual_seed(SEED)
    case = job.case
    target = getattr(torch, job.dtype)
    drawn = torch.float64 if job.dtype == "float64" else torch.float32
    layer = torch.nn.Conv2d(case.C, case.K, (case.R, case.S), groups=case.groups, bias=case.bias, dtype=drawn)
    layer.requires_grad_(False).to(device, target, memory_format=job.memory_format)
    draw, _ = DATA[data]

    def finish(tensor: Tensor) -> Tensor:
        return tensor.to(target, memory_format=job.memory_format)

    x = finish(draw(case.N, case.C, case.H, case.W, dtype=drawn, device=device))
    dy = None
    if job.direction != FORWARD:
        dy = finish(torch.randn(case.N, case.K, case.P, case.Q, dtype=drawn, device=device))
    return Operands(x, layer.weight.detach(), dy, None if layer.bias is None else layer.bias.detach())


def pass_alone(convolve: Callable[..., Tensor], job: Job, operands: Operands) -> Callable[[], Tensor]:
    """A call that runs one pass alone; a gradient through autograd, in a graph that holds that gradient only."""
    options = job.case.options
    if job.direction == FORWARD:
        return lambda: convolve(operands.x, operands.w, operands.bias, **options)
    x = operands.x.detach().requires_grad_(job.direction == DGRAD)
    w = operands.w.detach().requires_grad_(job.direction == WGRAD)
    y = convolve(x, w, operands.bias, **options)
    wanted = x if job.direction == DGRAD else w
    return lambda: torch.autograd.grad(y, wanted, operands.dy, retain_graph=True)[0]


def measure(job: Job, settings: Settings, ceilings: Ceilings, clock: Clock) -> dict[str, Any]:
    """One row of the table: checked, then timed. In a wrong row `failure` says why, and there are no times."""
    clock.release_memory()
    operands = draw_operands(job, settings.data, clock.device)
    forced = library().force_engine(settings.engine) if settings.engine else contextlib.nullcontext()
    with fp32_precision(convolution_switch(), job.precision), forced:
        row = engine_and_contract(job, operands)
        contract = row["contract"]
        with poisoned_memory():
            ours = pass_alone(library().conv2d, job, operands)
            result = ours()
        peer = pass_alone(F.conv2d, job, operands)
        row |= check(job, operands, contract, result, peer())
        del result
        if row["failure"] is None:
            times = clock.milliseconds([ours, peer], settings.repeats)
            # Only then: cuDNN chooses by the memory that is free.
            del ours, peer
            clock.release_memory()
            copy = copy_of_as_many_bytes(moved_bytes(job, contract), clock.device)
            times += clock.milliseconds([copy], settings.repeats)
            row |= rates(job, contract, ceilings, *map(Timing.of, times))
    return row


def copy_of_as_many_bytes(count: float, device: torch.device) -> Callable[[], Tensor]:
    """A call that reads half of `count` bytes and writes the other half, as a plain copy of fp32 values."""
    source = torch.ones(max(1, round(count / 8)), device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def moved_bytes(job: Job, contract: str) -> float:
    """What a pass must read and write."""
    return sum(traffic(job.case, job.direction, type_info(contract).bits // 8, job.channels_last))


def engine_and_contract(job: Job, operands: Operands) -> dict[str, str]:
    """Which engine runs this pass and which accuracy it promises, as explain() says."""
    text = str(library().explain(operands.x, operands.w, operands.bias, **job.case.options))
    engine, contract = parse_explanation(text, job.direction)
    if job.dtype != "float32":
        contract = job.dtype
    elif contract is None:
        contract = job.precision
    return {"engine": engine, "contract": contract, "explanation": text}


def parse_explanation(text: str, direction: str) -> tuple[str, str | None]:
    """(engine, "tf32" or "fp32") of one pass in explain()'s text; ("PyTorch", None) where the pass has no line."""
    found = re.search(rf"^\s*{direction}:\s*(\w+)(.*)$", text, re.MULTILINE)
    if not found:
        return "PyTorch", None
    contract = re.search(r"\b(tf32|fp32)\b", found[2])
    return found[1], contract[1] if contract else None


def check(job: Job, operands: Operands, contract: str, result: Tensor, peer_result: Tensor) -> dict[str, Any]:
    """Errors of both results, and in `failure` what is wrong with ours, if anything."""
    if result.shape != peer_result.shape or result.dtype != peer_result.dtype:
        ours, peers = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (result, peer_result))
        return {"failure": f"wrong: the result is {ours}, PyTorch's is {peers}"}
    ours, peers, close = compare(job, operands, contract, result, peer_result)
    wrong = f"wrong: error {ours.worst:.3g} times its bound at worst, relative error of the whole {ours.relative:.3g}"
    return {
        "failure": None if ours.within(RELATIVE_LIMITS[contract]) else wrong,
        "ours_error": ours.relative,
        "ours_worst": ours.worst,
        "peer_error": peers.relative,
        "peer_worst": peers.worst,
        "error_ratio": error_ratio(ours.relative, peers.relative),
        "allclose": close,
    }


def error_ratio(ours: float, peers: float) -> float:
    """How many times as far from float64 as theirs our result is; two exact ones are even."""
    if peers > 0:
        return ours / peers
    return math.inf if ours > 0 else 1.0


def rates(job: Job, contract: str, ceilings: Ceilings, ours: Timing, peer: Timing, copy: Timing) -> dict[str, Any]:
    """What follows from the times."""
    least = floor(job.case, job.direction, contract, ceilings, job.channels_last)
    moved = moved_bytes(job, contract)
    return {
        **{f"{who}_{name}": value for who, timing in (("ours", ours), ("peer", peer), ("copy", copy))
           for name, value in timing._asdict().items()},
        "speedup": peer.ms / ours.ms,
        "flop": job.case.flop,
        "bytes": moved,
        "tflops": job.case.flop / ours.ms / 1e9,
        "gbs": moved / ours.ms / 1e6,
        "floor_memory_ms": least.memory_ms,
        "floor_arithmetic_ms": least.arithmetic_ms,
        "floor_percent": 100 * least.ms / ours.ms,
    }


def measure_host(clock: Clock) -> list[dict[str, Any]]:
    """Host time of one eager call of a small convolution, in microseconds, without and with a graph being recorded.

    Batches of calls in turn, each batch so short that the launch queue never fills and the host never waits for the
    GPU; the median of the batches.
    """
    calls, batches = 100, 60
    job = Job(HOST_CASE, FORWARD, "float32", "tf32")
    rows = []
    for with_gradients in (False, True):
        operands = draw_operands(job, "rand", clock.device)
        operands.w.requires_grad_(with_gradients)
        times: list[list[float]] = [[], []]
        contenders = [pass_alone(convolve, job, operands) for convolve in (library().conv2d, F.conv2d)]
        for batch, (index, call) in itertools.product(range(batches + 2), enumerate(contenders)):
            clock.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            if batch >= 2:  # the first ones warm up
                times[index].append((time.perf_counter() - begin) / calls * 1e6)
        ours, peer = map(statistics.median, times)
        rows.append({"shape": HOST_CASE.shape, "gradients": with_gradients, "ours_us": ours, "peer_us": peer})
    return rows


# What a run leaves: a document of plain values, stored as JSON, from which the tables and the picture are made.


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Device, date and versions."""
    on_gpu = device.type == "cuda"
    cudnn = torch.backends.cudnn.version() if on_gpu else None
    return {
        "gpu": on_gpu,
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else cudnn_version(cudnn),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "commit": output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
    }


def cudnn_version(number: int) -> str:
    """91900 -> "9.19.0", 8902 -> "8.9.2" (before 9, a digit less for the major version's rest)."""
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def output_of(*command: str) -> str | None:
    """The first line a command prints, None when there is no such command or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0].strip() or None


def peer_name(document: dict[str, Any]) -> str:
    return "cuDNN" if document["machine"]["gpu"] else "PyTorch"


def header(document: dict[str, Any]) -> list[str]:
    """What was run, and on what."""
    machine, settings, ceilings = document["machine"], document["settings"], document["ceilings"]
    versions = [("torch", "torch"), ("CUDA", "cuda"), ("cuDNN", "cudnn"), ("driver", "driver"), ("commit", "commit")]
    known = ", ".join(f"{label} {machine[key]}" for label, key in versions if machine[key])
    forced = f", engine {settings['engine']} forced" if settings["engine"] else ""
    channels_last = ", in channels_last" if settings.get("channels_last") else ""
    cold = ", cold L2" if machine["gpu"] else ""
    rest_ms = settings.get("rest_ms", 0) if machine["gpu"] else 0
    rest = f", after a rest of {rest_ms:g} ms" if rest_ms else ""
    poison = "" if settings["poisoned"] else " (checked without NaN in new memory: this torch cannot fill it)"
    lines = [
        f"{machine['device']}, {known}, {machine['date']}",
        f"inputs {DATA[settings['data']][1]}, seed {settings['seed']}{channels_last}; median of {settings['repeats']}, "
        f"± half the interquartile range{cold}{rest}{forced}{poison}",
    ]
    if machine["gpu"]:
        lines.append(f"float32 convolutions set to {' and '.join(settings['precision'])} by {settings['switch']}")
        if "cudnn_benchmark" in settings:  # older documents do not say; it was on
            lines[-1] += f"; torch.backends.cudnn.benchmark {'on' if settings['cudnn_benchmark'] else 'off'}"
    if ceilings:
        memory = ", ".join(f"{name} {ceilings[f'{name}_gbs']:.0f}" for name in ("copy", "fill", "read"))
        matmul = ", ".join(f"{name} {rounded(rate, 3)}" for name, rate in ceilings["matmul_tflops"].items())
        size = ceilings["matmul_size"]
        lines.append(f"rates of this run: {memory} GB/s; PyTorch's {size}^3 matrix product: {matmul} TFLOP/s")
    return lines


NOTES = (
    "floor: bytes read and written at the read and fill rates or operations at the matrix rate, the longer one",
    "matrix rate: the type's own; for tf32 float16's, for fp32 a third of float16's (or float32's, if higher)",
    "error: of the whole result, relative to float64; worst: of any element, in multiples of its bound; ours / theirs",
    "allclose: ours to theirs at rtol = atol = 1e-4",
)
COLUMNS = ("case", "pass", "contract", "engine", "ours ms", "{peer} ms", "speed-up", "TFLOP/s", "GB/s", "% of floor",
           "error / {peer}", "worst / {peer}", "allclose")  # fmt: skip
NAME_COLUMNS = 4  # aligned to the left


def column_titles(peer: str) -> list[str]:
    return [title.format(peer=peer) for title in COLUMNS]


def cells(row: dict[str, Any]) -> list[str]:
    """A row's texts, one for each of COLUMNS; a failed row has no numbers."""
    # fp32 under TF32's setting: where cuDNN itself stays in fp32, so do we.
    setting = " (tf32)" if row["contract"] == "fp32" and row["precision"] == "tf32" else ""
    start = [row["name"], row["pass"], contract_text(row, setting), row["engine"]]
    if row["failure"]:
        return start + ["FAILED"] + [""] * (len(COLUMNS) - len(start) - 1)
    return [
        *start,
        with_spread(row, "ours"),
        with_spread(row, "peer"),
        f"{row['speedup']:.2f}x",
        rounded(row["tflops"], 3),
        rounded(row["gbs"], 3),
        f"{row['floor_percent']:.1f}",
        f"{row['ours_error']:.2e} / {row['peer_error']:.2e}",
        f"{row['ours_worst']:.3f} / {row['peer_worst']:.3f}",
        {True: "yes", False: "no", None: "-"}[row["allclose"]],
    ]


def contract_text(row: dict[str, Any], setting: str = "") -> str:
    """The contract, and NHWC for rows in channels_last."""
    return row["contract"] + setting + (" NHWC" if row.get("channels_last") else "")


def with_spread(row: dict[str, Any], who: str) -> str:
    """Median in four digits and half the interquartile range in per cent of it."""
    ms = row[f"{who}_ms"]
    spread = 50 * (row[f"{who}_q3_ms"] - row[f"{who}_q1_ms"]) / ms
    return f"{rounded(ms, 4)} ±{spread:.1f}%"


def rounded(value: float, digits: int) -> str:
    """At least so many significant digits, never an exponent."""
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(value)))}f}"


def terminal_table(rows: Sequence[dict[str, Any]], peer: str) -> list[str]:
    """Columns aligned with spaces: names to the left, numbers to the right."""
    lines = [column_titles(peer), *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    align = [str.ljust] * NAME_COLUMNS + [str.rjust] * (len(widths) - NAME_COLUMNS)
    return ["  ".join(put(*cell) for put, *cell in zip(align, line, widths, strict=True)) for line in lines]


def markdown_table(rows: Sequence[dict[str, Any]], peer: str) -> list[str]:
    titles = column_titles(peer)
    rule = ["---"] * NAME_COLUMNS + ["---:"] * (len(titles) - NAME_COLUMNS)
    return ["| " + " | ".join(line) + " |" for line in (titles, rule, *map(cells, rows))]


def legend(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Names and shapes of the cases, each once with all its batches; a case given on the command line is called by its
    numbers."""
    batches: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        batch, _, image = row["shape"].partition(" ")
        batches.setdefault((row.get("layer", row["name"]), image), {})[batch] = None
    return [f"{name}: {', '.join(ns)} {image}" for (name, image), ns in batches.items()]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """The geometric mean of the speed-ups, over all rows, by pass and contract and by batch; worst rows; accuracy."""
    measured = [row for row in rows if not row["failure"]]
    if not measured:
        return "Nothing measured."
    by_contract = grouped(measured, lambda row: f"{row['pass']} {contract_text(row)}")
    means = ", ".join(f"{name} {mean_speedup(group):.2f}x" for name, group in by_contract.items())
    sentences = [
        f"Geometric mean of the speed-up over {len(measured)} rows: {mean_speedup(measured):.2f}x ({means}).",
        f"Worst row: {worst_row(measured)}.",
    ]
    by_batch = grouped((row for row in measured if row.get("batch")), lambda row: f"batch {row['batch']}")
    if len(by_batch) > 1:
        groups = (f"{name} {mean_speedup(group):.2f}x, worst {worst_row(group)}" for name, group in by_batch.items())
        sentences.append(f"By batch: {'; '.join(groups)}.")
    if "error_ratio" in measured[0]:  # older documents do not have it
        least_accurate = max(measured, key=lambda row: row["error_ratio"])
        ratio = f"{least_accurate['error_ratio']:.3f}, {row_title(least_accurate)}"
        sentences.append(f"Accuracy: worst ratio of our error to theirs {ratio}.")
    if all(is_bound_by_memory(row) for row in measured):
        mean = statistics.geometric_mean(row["peer_ms"] / row["copy_ms"] for row in measured)
        sentences.append(f"Plain copies of as many bytes, in the same run, would be {mean:.2f}x.")
    return " ".join(sentences)


def is_bound_by_memory(row: dict[str, Any]) -> bool:
    """Whether memory sets a row's floor, and a copy says how near one gets to it with so few or so many bytes."""
    return "copy_ms" in row and row["floor_memory_ms"] > row["floor_arithmetic_ms"]  # older documents have no copy


def grouped(rows: Iterable[dict[str, Any]], key: Callable[[dict[str, Any]], str]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def mean_speedup(rows: Sequence[dict[str, Any]]) -> float:
    return statistics.geometric_mean(row["speedup"] for row in rows)


def row_title(row: dict[str, Any]) -> str:
    return f"{row['name']} {row['pass']} {contract_text(row)}"


def worst_row(rows: Sequence[dict[str, Any]]) -> str:
    worst = min(rows, key=lambda row: row["speedup"])
    return f"{row_title(worst)}, {worst['speedup']:.2f}x"


def host_lines(document: dict[str, Any]) -> list[str]:
    return [
        f"host time per call ({row['shape']}, {'with' if row['gradients'] else 'without'} gradients): "
        f"ours {row['ours_us']:.1f} us, F.conv2d {row['peer_us']:.1f} us, {row['ours_us'] - row['peer_us']:+.1f} us"
        for row in document["host"]
    ]


def readme_section(documents: Sequence[dict[str, Any]]) -> str:
    """README's results in Markdown: for each document what was run, the table and the means; then what it all means."""
    blocks = []
    for document in documents:
        rows = document["rows"]
        blocks.append(bullets(header(document)))
        if rows:
            table = "\n".join(markdown_table(rows, peer_name(document)))
            folded = f"<details><summary>{len(rows)} rows</summary>\n\n{table}\n\n</details>"
            blocks += [folded if len(rows) > MOST_ROWS_SHOWN else table, summary(rows)]
        if document["host"]:
            blocks.append(bullets(host_lines(document)))
    shapes = legend([row for document in documents for row in document["rows"]])
    return "\n\n".join([*blocks, bullets([*shapes, *NOTES])])


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def replace_between_markers(text: str, section: str) -> str:
    """`text` with what lies between MARKERS replaced; ValueError unless each marker is there once and in order."""
    begin, end = MARKERS
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the text needs one {begin} and after it one {end}")
    return f"{text.partition(begin)[0]}{begin}\n{section}\n{end}{text.partition(end)[2]}"


def load_document(path: Path) -> dict[str, Any]:
    """A stored run; SystemExit when this is not what --json writes on a machine with a GPU."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("format") != FORMAT or not document["machine"]["gpu"]:
        sys.exit(f"{path}: not a run of this bench (format {FORMAT}) on a GPU")
    return document


def write_readme(documents: Sequence[dict[str, Any]]) -> None:
    """Puts the results between README's markers."""
    path = ROOT / "README.md"
    text = replace_between_markers(path.read_text(encoding="utf-8"), readme_section(documents))
    path.write_text(text, encoding="utf-8")
    print(f"rewrote the results in {path}", file=sys.stderr)


def load_pyplot() -> Any:
    """matplotlib.pyplot without a display; SystemExit with what to install."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install 'modelnew[bench]', or in this folder pip install '.[bench]'")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_roofline(document: dict[str, Any], pyplot: Any, path: Path) -> None:
    """TFLOP/s over flop per byte: memory's slope, a roof for each matrix rate, ours filled and the peer's hollow."""
    ceilings, rows = document["ceilings"], [row for row in document["rows"] if not row["failure"]]
    if not rows:
        print(f"nothing measured: {path} not drawn", file=sys.stderr)
        return
    tflops_per_intensity = ceilings["copy_gbs"] / 1e3
    roofs = ceilings["matmul_tflops"]
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    intensities = [row["flop"] / row["bytes"] for row in rows]
    left = min(*intensities, 1.0) / 2
    right = 2 * max(*intensities, max(roofs.values()) / tflops_per_intensity)
    for name, rate in roofs.items():
        ridge = rate / tflops_per_intensity
        axes.plot([left, ridge, right], [left * tflops_per_intensity, rate, rate], color="0.7", linewidth=1)
        axes.annotate(f"{name} {rate:.3g}", (right, rate), ha="right", va="bottom", fontsize=8, color="0.4")
    styles = {contract: f"C{i}" for i, contract in enumerate(dict.fromkeys(row["contract"] for row in rows))}
    for row, intensity in zip(rows, intensities, strict=True):
        color = styles[row["contract"]]
        peer_tflops = row["flop"] / row["peer_ms"] / 1e9
        axes.plot([intensity] * 2, [row["tflops"], peer_tflops], color=color, linewidth=0.5)
        axes.plot(intensity, row["tflops"], "o", color=color)
        axes.plot(intensity, peer_tflops, "o", color=color, fillstyle="none")
        axes.annotate(f" {row['name']} {row['pass']}", (intensity, row["tflops"]), fontsize=8, va="top")
    for contract, color in styles.items():
        axes.plot([], [], "o", color=color, label=f"{contract}, ours")
        axes.plot([], [], "o", color=color, fillstyle="none", label=f"{contract}, {peer_name(document)}")
    axes.set(xscale="log", yscale="log", xlabel="flop per byte of least traffic", ylabel="TFLOP/s",
             title=f"{document['machine']['device']}, copy {ceilings['copy_gbs']:.0f} GB/s")  # fmt: skip
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    print(f"drew {path}", file=sys.stderr)


# The command line.

NO_GPU = "No GPU: PyTorch's convolution on the CPU, against itself, suites scaled down. It says nothing about speed."


def case_argument(text: str) -> Case:
    try:
        return parse_case(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def batch_argument(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def repeats_argument(text: str) -> int:
    if not text.isdecimal() or int(text) < MIN_REPEATS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {MIN_REPEATS}")
    return int(text)


def rest_argument(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a pause")
    return value


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--suite", action="append", choices=SUITES, default=[],
        help="a list of layers, or a network's (default: reference); repeatable")  # fmt: skip
    add("--batch", nargs="+", type=batch_argument, default=[], metavar="N",
        help="images in x: each layer of the suites is a row for each (default: the suite's own)")  # fmt: skip
    add("--case", action="append", type=case_argument, default=[], metavar=CASE_FORM,
        help="a layer of your own, never scaled down; repeatable")  # fmt: skip
    add("--dtype", nargs="+", choices=("float32", "float16", "bfloat16", "float64"), default=["float32"])
    add("--precision", nargs="+", choices=("tf32", "fp32"), default=["tf32"],
        help="PyTorch's setting for float32 convolutions (default: tf32, as PyTorch's own)")  # fmt: skip
    add("--channels-last", action="store_true", help="x and the weight in channels_last, for ours and cuDNN's alike")
    add("--cudnn-benchmark", action=argparse.BooleanOptionalAction, default=True,
        help="cuDNN measures its algorithms (default), or takes the one it expects to be fastest")  # fmt: skip
    add("--backward", action="store_true", help="rows for the gradients to input and weight as well, each alone")
    add("--engine", metavar="NAME", help="force one of modelnew's engines")
    add("--data", choices=tuple(DATA), default="rand",
        help="how x is drawn: uniform (default), normal, over 40 binades, uniform but for few tiny values")  # fmt: skip
    add("--repeats", type=repeats_argument, metavar="N", help="timed calls of each (default: 25; of a network's 15)")
    add("--rest", type=rest_argument, metavar="MS",
        help=f"pause before a timed call of the GPU (default: {REST_MS}; of resnet50's 5; 0: sustained)")  # fmt: skip
    add("--host", action="store_true", help="host time per call; without --suite or --case nothing else")
    add("--json", type=Path, metavar="FILE", help="store all numbers of this run")
    add("--readme", nargs="*", type=Path, metavar="FILE.json",
        help="rewrite README's results, from this run or, measuring nothing, from the files given")  # fmt: skip
    add("--plot", type=Path, metavar="FILE", help="draw a roofline picture of this run (needs matplotlib)")
    args = parser.parse_args(argv)
    if args.readme and (args.json or args.plot):
        parser.error("--readme with files measures nothing: --json and --plot have nothing to store or draw")
    if args.batch and not args.suite:
        parser.error("--batch is for the layers of a --suite; a --case has its own N")
    # Of several lists, those that want the most decide.
    defaults = [DEFAULTS.get(suite, Defaults()) for suite in args.suite]
    if args.case or not args.suite:
        defaults.append(Defaults())
    if args.repeats is None:
        args.repeats = max(default.repeats for default in defaults)
    if args.rest is None:
        args.rest = max(default.rest_ms for default in defaults)
    return args


def suite_cases(suite: str, batches: Sequence[int]) -> list[tuple[Case, int | None]]:
    """The suite's cases, for each batch all of them; with the batch, or None where each has its own N."""
    batches = batches or DEFAULTS.get(suite, Defaults()).batches
    if not batches:
        return [(case, None) for case in SUITES[suite]]
    return [(replace(case, N=batch), batch) for batch in dict.fromkeys(batches) for case in SUITES[suite]]


def jobs(args: argparse.Namespace, on_gpu: bool) -> list[Job]:
    """Every row that the command line asks for."""
    suites = dict.fromkeys(args.suite or ([] if args.case or args.host else ["reference"]))
    cases = [
        (case if on_gpu else scaled_down(case), batch)
        for suite in suites
        for case, batch in suite_cases(suite, args.batch)
    ]
    cases += [(case, None) for case in args.case]
    directions = (FORWARD, DGRAD, WGRAD) if args.backward else (FORWARD,)
    precisions = args.precision if on_gpu else ["fp32"]  # there is no TF32 on a CPU
    return [
        Job(case, direction, dtype, precision, batch, args.channels_last)
        for dtype in args.dtype
        for precision in (precisions if dtype == "float32" else precisions[:1])
        for case, batch in cases
        for direction in directions
    ]


def measure_all(todo: Sequence[Job], settings: Settings, ceilings: Ceilings, clock: Clock) -> list[dict[str, Any]]:
    """All rows, with progress on stderr. A row that cannot run is a failed row, not the end."""
    rows = []
    for number, job in enumerate(todo, 1):
        title = f"[{number}/{len(todo)}] {job.name} {job.direction} {job.dtype} {job.precision}"
        print(f"{title} ...", end="", file=sys.stderr, flush=True)
        begin = time.perf_counter()
        try:
            result = measure(job, settings, ceilings, clock)
        except (RuntimeError, ValueError) as error:  # refused by a forced engine, out of memory, failed launch
            result = {"failure": f"{type(error).__name__}: {error}", "engine": settings.engine or "?", "contract": "?"}
        identity = {"name": job.name, "layer": job.case.name, "batch": job.batch, "shape": job.case.shape,
                    "case": asdict(job.case), "pass": job.direction, "dtype": job.dtype, "precision": job.precision,
                    "channels_last": job.channels_last}  # fmt: skip
        rows.append(identity | result)
        outcome = result["failure"] or f"{result['ours_ms']:.3g} ms, {result['speedup']:.2f}x"
        print(f" {outcome} ({time.perf_counter() - begin:.1f} s)", file=sys.stderr, flush=True)
    return rows


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measures what was asked for and returns the document."""
    clock = Clock(device, args.rest)
    settings = Settings(args.data, args.repeats, args.engine, args.rest, args.channels_last, args.cudnn_benchmark)
    todo = jobs(args, device.type == "cuda")
    library()  # builds the kernels now rather than inside the first row
    ceilings = None
    if todo:
        print("measuring the machine's own rates ...", file=sys.stderr, flush=True)
        ceilings = measure_ceilings(clock, args.dtype)
    return {
        "format": FORMAT,
        "machine": describe_machine(device),
        "settings": asdict(settings)
        | {"precision": args.precision, "switch": switch_name(), "poisoned": memory_is_poisoned(device)},
        "ceilings": asdict(ceilings) if ceilings else None,
        "rows": measure_all(todo, settings, ceilings, clock),
        "host": measure_host(clock) if args.host else [],
    }


def report(document: dict[str, Any]) -> None:
    """Header, table and means on stdout."""
    rows = document["rows"]
    print("\n".join(["", *header(document)]))
    if rows:
        print("\n".join([*NOTES, "", *legend(rows), "", *terminal_table(rows, peer_name(document))]))
    failures = [f"{row['name']} {row['pass']} {row['dtype']}: {row['failure']}" for row in rows if row["failure"]]
    print("\n".join(["", *failures, *host_lines(document), *([summary(rows)] if rows else [])]))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.readme:
        write_readme([load_document(path) for path in args.readme])
        return 0
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        print(NO_GPU, flush=True)
        if args.readme is not None:
            sys.exit("--readme: README shows what a GPU measured")
    pyplot = load_pyplot() if args.plot else None
    torch.backends.cudnn.benchmark = args.cudnn_benchmark
    document = run(args, torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if args.readme is not None:
        write_readme([document])
    if pyplot:
        draw_roofline(document, pyplot, args.plot)
    report(document)
    if not on_gpu:
        print(NO_GPU)
    return 1 if any(row["failure"] for row in document["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
