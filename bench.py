"""Measures modelnew beside PyTorch's own convolution (cuDNN): correct first, then timed.

    python bench.py                                 KernelBench's problems 55, 56 and 63, forward, TF32
    python bench.py run --suite resnet50 unet       the distinct convolutions of networks
    python bench.py run --suite resnet50 --batch 1 32 --backward --channels-last --dtype float16
    python bench.py run --case 8,64,128,3,3,56,56,1,1    N,C,K,R,S,H,W[,stride,pad,dilation,groups]
    python bench.py networks resnet50 --mode tf32 train-amp-nhwc    whole networks, before and after accelerate()
    python bench.py training --json results/h200-training.json    losses of a ResNet-18 beside nn.Conv2d's
    python bench.py compare before.json after.json  how two stored runs differ
    python bench.py plot results/h200-networks.json the picture in README
    python bench.py render                          README's table, results/README.md and pictures, from results/

`run` measures one pass of one layer a row. Our result goes to memory that is filled with NaN and is compared with
float64, element by element; only a correct one is timed: ours and PyTorch's in turn, the L2 cache overwritten before
each call, median of CUDA events. The floor is the least time that the traffic and the arithmetic take at the rates that
this run measured. `training` trains from the same weights on the same batches and compares the losses (judge()).
Without a GPU everything runs scaled down on the CPU, where modelnew is PyTorch.

Exit code 0: every row is correct; 1: a row is wrong or could not run, its time is not printed; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.networks import DEFAULT_MODES, MODES, NETWORKS, Mode, gradients_or_output, step_of
from results import report

SEED = 42
TAIL = 20  # last steps of a training run, over which losses are averaged
PEERS = 5  # trainings with nn.Conv2d that ours is compared with
REST_MS = 20  # before a timed call; without it the power cap lowers the clocks (docs/performance.md)
FORWARD, DGRAD, WGRAD, BGRAD = "forward", "dgrad", "wgrad", "bgrad"
REAL = ("float32", "float16", "bfloat16", "float64")
CASE_FORM = "N,C,K,R,S,H,W[,stride,pad,dilation,groups]"
NO_GPU = "No GPU: PyTorch's convolution on the CPU beside itself, scaled down. This says nothing about speed."


# Layers and networks.


@dataclass(frozen=True)
class Case:
    """One layer: x[N,C,H,W], w[K,C/groups,R,S], y[N,K,P,Q]; stride, pad and dilation are (vertical, horizontal)."""

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
            value = getattr(self, name)
            object.__setattr__(self, name, (value, value) if isinstance(value, int) else tuple(value))

    @property
    def P(self) -> int:
        return (self.H + 2 * self.pad[0] - self.dilation[0] * (self.R - 1) - 1) // self.stride[0] + 1

    @property
    def Q(self) -> int:
        return (self.W + 2 * self.pad[1] - self.dilation[1] * (self.S - 1) - 1) // self.stride[1] + 1

    @property
    def flop(self) -> float:
        """Floating point operations of any of the passes, two for each multiply-add."""
        return 2.0 * self.N * self.K * self.P * self.Q * (self.C // self.groups) * self.R * self.S

    @property
    def shape(self) -> str:
        text = f"N{self.N} C{self.C} K{self.K} {self.R}x{self.S}, {self.H}x{self.W}"
        for name, usual in (("stride", 1), ("pad", 0), ("dilation", 1)):
            vertical, horizontal = getattr(self, name)
            if (vertical, horizontal) != (usual, usual):
                text += f", {name} {vertical}" + (f"x{horizontal}" if vertical != horizontal else "")
        return text + (f", groups {self.groups}" if self.groups > 1 else "") + (", bias" if self.bias else "")

    @property
    def options(self) -> dict[str, int | tuple[int, int]]:
        """The keyword arguments of conv2d."""
        return {"stride": self.stride, "padding": self.pad, "dilation": self.dilation, "groups": self.groups}


# Lists of single layers. The layers of each of NETWORKS are a suite as well.
LAYERS: dict[str, tuple[Case, ...]] = {
    #                  name    N   C   K   R  S  H     W
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


def record(name: str, batch: int) -> list[Case]:
    """Each distinct nn.Conv2d of a network as a case, called after the first layer of its kind and the batch.

    Forward hooks read the sizes while the network runs on meta tensors, which have no data.
    """
    network = NETWORKS[name]
    with torch.device("meta"):
        model, images = network.model().eval(), torch.empty(batch, 3, network.size, network.size)
    names, found = {layer: name for name, layer in model.named_modules()}, {}  # found: the first name of each case

    def keep(layer: nn.Module, inputs: tuple[Tensor], _: Tensor) -> None:
        found.setdefault(case_of(layer, *inputs), names[layer])

    for layer in names:
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(keep)
    with torch.no_grad():
        model(images)
    return [replace(case, name=f"{name}/{batch}") for case, name in found.items()]


def case_of(layer: nn.Conv2d, x: Tensor) -> Case:
    """The case, without a name, of a layer on an input."""
    pad = layer.padding
    if isinstance(pad, str):  # "same" (of odd filters) or "valid"
        pad = tuple(d * (k - 1) // 2 * (pad == "same") for d, k in zip(layer.dilation, layer.kernel_size, strict=True))
    N, C, H, W = x.shape
    return Case("", N, C, layer.out_channels, *layer.kernel_size, H, W, layer.stride, pad, layer.dilation,
                layer.groups, layer.bias is not None)  # fmt: skip


def parse_case(text: str) -> Case:
    """The case that CASE_FORM describes; the error says what is wrong with it."""
    wrong = argparse.ArgumentTypeError
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise wrong(f"{text!r} is not a list of whole numbers {CASE_FORM}") from None
    if not 7 <= len(numbers) <= 11:
        raise wrong(f"{text!r} has {len(numbers)} numbers, not 7 to 11: {CASE_FORM}")
    case = Case(text, *numbers)
    if min(numbers[:8]) < 1 or min(case.pad) < 0 or min(case.dilation) < 1 or case.groups < 1:
        raise wrong(f"{text!r}: sizes, stride, dilation and groups must be positive, pad non-negative")
    if case.C % case.groups or case.K % case.groups:
        raise wrong(f"{text!r}: groups {case.groups} must divide C {case.C} and K {case.K}")
    if case.P < 1 or case.Q < 1:
        raise wrong(f"{text!r}: the {case.R}x{case.S} filter is larger than the padded {case.H}x{case.W} input")
    return case


def scaled_down(case: Case) -> Case:
    """The case for a CPU: one image, an eighth of each side but no side cut below 64."""
    return replace(case, N=1, H=max(min(case.H, 64), case.H // 8), W=max(min(case.W, 64), case.W // 8))


@dataclass(frozen=True)
class Job:
    """One row to measure."""

    case: Case
    direction: str
    dtype: str
    precision: str  # PyTorch's setting for fp32 tensors
    suite: str = ""
    channels_last: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        return {"suite": self.suite, "name": self.case.name, "shape": self.case.shape, "case": asdict(self.case),
                "pass": self.direction, "dtype": self.dtype, "precision": self.precision,
                "channels_last": self.channels_last}  # fmt: skip


# The floor: what traffic and arithmetic cost at the rates that this run measured.


@dataclass(frozen=True)
class Ceilings:
    """Rates that the machine reached in this run: memory in GB/s (copy counts reads and writes), matmul in TFLOP/s."""

    copy_gbs: float
    fill_gbs: float
    read_gbs: float
    matmul_tflops: dict[str, float]  # "float16", "bfloat16", "tf32", "float32", "float64"

    def rate(self, contract: str, depthwise: bool) -> float:
        """TFLOP/s at which a convolution under this contract could multiply; wgmma may be some 12% above cuBLAS's rate.

        TF32 carries fp16's 10 mantissa bits, so that fp16's rate bounds it; fp32 takes three fp16 products for one. A
        depthwise convolution is no matrix product: multiply-adds compute it.
        """
        rates = self.matmul_tflops
        if contract == "fp32" or (depthwise and contract != "float64"):
            return max(rates["float32"], 0 if depthwise else rates.get("float16", 0) / 3)
        return rates["float16" if contract == "tf32" else contract]


def touched(size: int, outputs: int, taps: int, stride: int, pad: int, dilation: int) -> int:
    """Along one axis: at how many of `size` places any of `outputs` filters has any of its `taps`."""
    return len({o * stride - pad + t * dilation for o in range(outputs) for t in range(taps)} & set(range(size)))


def traffic(case: Case, direction: str, itemsize: int, channels_last: bool = False) -> tuple[float, float]:
    """Bytes (read, written) that a pass cannot avoid: every operand once, of x the rows that matter.

    In channels_last also only the columns that matter: the channels of a pixel lie together, mostly more than the 32
    bytes of a memory sector. In NCHW the columns between come along.
    """
    rows = touched(case.H, case.P, case.R, case.stride[0], case.pad[0], case.dilation[0])
    columns = touched(case.W, case.Q, case.S, case.stride[1], case.pad[1], case.dilation[1])
    whole_x = case.N * case.C * case.H * case.W * itemsize
    x = case.N * case.C * rows * (columns if channels_last else case.W) * itemsize
    w = case.K * (case.C // case.groups) * case.R * case.S * itemsize
    y = case.N * case.K * case.P * case.Q * itemsize
    bias = case.K * case.bias * itemsize
    return {FORWARD: (x + w + bias, y), DGRAD: (y + w, whole_x), WGRAD: (x + y, w), BGRAD: (y, bias)}[direction]


def type_info(contract: str) -> torch.finfo:
    """The tensors' type: tf32 and fp32 are the two contracts of float32, the others are called like their type."""
    return torch.finfo(torch.float32 if contract in ("tf32", "fp32") else getattr(torch, contract))


# Timing.


class Clock:
    """Times calls one by one: with CUDA events and a cold L2 on a GPU, with the host's clock on a CPU."""

    def __init__(self, device: torch.device, rest_ms: float = 0) -> None:
        """Before every timed call a GPU rests for `rest_ms`; 0: it runs without a pause, up to its power cap."""
        self.device, self.rest_ms, self.scratch = device, rest_ms, None
        if device.type == "cuda":
            l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
            # Eight times the L2: nothing survives in it.
            self.scratch = torch.empty(max(8 * l2_bytes, 128 << 20), dtype=torch.uint8, device=device)

    def release_memory(self) -> None:
        """Returns cached memory, so that the last row's large tensors do not split up the next one's."""
        if self.scratch is not None:
            torch.cuda.empty_cache()

    def milliseconds(self, calls: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
        """Runs the calls in turn `repeats` times, after two untimed rounds; returns one list of times for each call."""
        for call in [*calls, *calls]:
            call()
        timed = [[self._timed(call) for call in calls] for _ in range(repeats)]
        if self.scratch is not None:
            torch.cuda.synchronize(self.device)
        return [[elapsed() for elapsed in of_call] for of_call in zip(*timed, strict=True)]

    def _timed(self, call: Callable[[], Any]) -> Callable[[], float]:
        """Runs a call; what it returns gives the time, once the device is done."""
        if self.scratch is None:
            begin, _, end = time.perf_counter(), call(), time.perf_counter()
            return lambda: (end - begin) * 1e3
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self.rest_ms > 0:
            torch.cuda.synchronize(self.device)
            time.sleep(self.rest_ms / 1e3)
        torch.cuda._sleep(2_000_000)  # over 1 ms: autograd may take the host longer to launch than writing the L2
        self.scratch.zero_()
        begin.record()
        call()
        end.record()
        return lambda: begin.elapsed_time(end)


def quartiles(who: str, times: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of one call's times, in milliseconds, as fields of a row."""
    q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive")
    return {f"{who}_ms": median, f"{who}_q1_ms": q1, f"{who}_q3_ms": q3}


@contextlib.contextmanager
def switched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute and restores it."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def fp32_precision(owner: Any, setting: str) -> contextlib.AbstractContextManager[None]:
    """Sets the precision of float32 in torch.backends.cudnn or .cuda.matmul to "tf32" or "fp32".

    From 2.9 on PyTorch has `fp32_precision`, and merely reading the older `allow_tf32` may raise once that was set.
    """
    owner = getattr(owner, "conv", owner)  # cuDNN's convolutions have a switch of their own since 2.9
    if hasattr(owner, "fp32_precision"):
        return switched(owner, "fp32_precision", {"tf32": "tf32", "fp32": "ieee"}[setting])
    return switched(owner, "allow_tf32", setting == "tf32")


def measure_ceilings(clock: Clock, dtypes: Iterable[str]) -> Ceilings:
    """Memory and matrix rates, the best of several runs each. On a CPU matrix rates of `dtypes` and float32 only."""
    on_gpu = clock.device.type == "cuda"
    memory_bytes = torch.cuda.get_device_properties(clock.device).total_memory if on_gpu else 1 << 30
    side = 512 if not on_gpu else 8192 if memory_bytes > 12 << 30 else 4096

    def seconds(call: Callable[[], Any]) -> float:
        return min(clock.milliseconds([call], 8)[0]) / 1e3

    def matmul_tflops(dtype: str, setting: str = "fp32") -> float:
        # Normal random numbers: a GPU multiplies zeros faster.
        a, b = (torch.randn(side, side, device=clock.device).to(getattr(torch, dtype)) for _ in range(2))
        with fp32_precision(torch.backends.cuda.matmul, setting):
            return 2 * side**3 / seconds(lambda: a @ b) / 1e12

    size = min(2 << 30, memory_bytes // 16)
    source = torch.ones(size // 4, device=clock.device)
    target = torch.empty_like(source)
    copied = 2 * size / seconds(lambda: target.copy_(source)) / 1e9
    fill = size / seconds(lambda: target.fill_(1.0)) / 1e9
    read = max(copied, size / seconds(lambda: source.sum()) / 1e9)  # a copy reads as well, and may be the faster one
    matmul = {dtype: matmul_tflops(dtype) for dtype in (REAL if on_gpu else {*dtypes, "float32"})}
    return Ceilings(copied, fill, read, matmul | ({"tf32": matmul_tflops("float32", "tf32")} if on_gpu else {}))


# The float64 reference and what may differ from it.


@dataclass(frozen=True)
class Operands:
    x: Tensor
    w: Tensor
    dy: Tensor | None  # None in the forward pass
    bias: Tensor | None = None


def exact_pieces(job: Job, operands: Operands, budget_bytes: int = 1 << 30) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Parts of the pass in float64: which images (of a gradient to weight or bias: all of it), value, magnitude.

    The magnitude is the same sum over absolute values. cuDNN is off: ATen's own kernels compute, most by im2col and
    matrix products. `budget_bytes` bounds a part's tensors.
    """
    case, dtype = job.case, torch.float64
    images = max(1, budget_bytes // (8 * max(case.C * case.H * case.W, case.K * case.P * case.Q)))
    wanted = operands.bias if job.direction == BGRAD else operands.w
    summed = torch.zeros(2, *wanted.shape, dtype=dtype, device=wanted.device)
    for n in range(0, case.N, images):
        part = slice(n, min(n + images, case.N))
        results = []
        for absolute in (False, True):
            own = (operands.x[part], operands.w, None if operands.dy is None else operands.dy[part], operands.bias)
            wider = (None if t is None else t.to(dtype) for t in own)
            x, w, dy, bias = (t.abs() if absolute and t is not None else t for t in wider)
            with switched(torch.backends.cudnn, "enabled", False):
                if job.direction == FORWARD:
                    results.append(F.conv2d(x, w, bias, **case.options))
                elif job.direction == DGRAD:
                    results.append(torch.nn.grad.conv2d_input(x.shape, w, dy, **case.options))
                elif job.direction == WGRAD:
                    results.append(torch.nn.grad.conv2d_weight(x, w.shape, dy, **case.options))
                else:
                    results.append(dy.sum((0, 2, 3)))
        if job.direction in (WGRAD, BGRAD):
            summed += torch.stack(results)
        else:
            yield part, *results
    if job.direction in (WGRAD, BGRAD):
        yield slice(None), *summed


def error_bound(contract: str, reduction: int) -> tuple[float, float, float]:
    """The contract for sums of `reduction` products of operands far from the subnormal range, as (a, b, c):

    |y - y64| <= a * conv(|x|,|w|) + b * |y64| + c, for every element.
    """
    info = type_info(contract)
    if contract == "tf32":  # both operands rounded to 10 bits, fp32 accumulation
        return 2**-10 + 2**-22 + (reduction + 16) * 2**-24, 2**-23, 2**-126
    if contract == "fp32":
        return 2**-21 + (64 + reduction / 64) * 2**-24, 2**-23, 2**-126
    if contract == "float64":  # the reference rounds as often as we do
        return 2 * (reduction + 16) * 2**-53, 2**-52, info.tiny
    # 16-bit operands as they are, fp32 accumulation, one rounding to the output's type.
    return (reduction + 16) * 2**-24, info.eps / 2 + 2**-23, info.tiny * info.eps


# The bound of a sum grows with its length and says little about a weight gradient, a sum over millions of pixels.
# The relative error of the whole result is bounded as well; random data stay far below, since rounding averages out.
RELATIVE_LIMITS = {"tf32": 2**-10, "fp32": 1e-5, "float16": 2**-10, "bfloat16": 2**-7, "float64": 1e-13}


def reduction_length(case: Case, direction: str) -> int:
    """How many products make one element of the result (at most, where there is padding or a stride)."""
    if direction in (WGRAD, BGRAD):
        return case.N * case.P * case.Q
    return (case.C if direction == FORWARD else case.K) // case.groups * case.R * case.S


class Errors:
    """How far a result is off: the relative Frobenius norm, and the largest error as a multiple of its bound."""

    def __init__(self) -> None:
        self.squares = self.magnitude = self.worst = 0.0

    def add(self, result: Tensor, value: Tensor, magnitude: Tensor, bound: tuple[float, float, float]) -> None:
        error = (result.double() - value).abs_()
        self.squares += error.square().sum().item()
        self.magnitude += value.square().sum().item()
        allowed = magnitude * bound[0] + value.abs() * bound[1] + bound[2]
        worst = (error / allowed).max().item()
        if math.isnan(worst) or worst > self.worst:  # once NaN, it stays: nothing is greater
            self.worst = worst

    @property
    def relative(self) -> float:
        return math.sqrt(self.squares / self.magnitude) if self.magnitude else self.squares


def check(job: Job, operands: Operands, contract: str, ours: Tensor, peer: Tensor) -> dict[str, Any]:
    """Errors of both results against float64, and in `failure` what is wrong with ours, if anything.

    `allclose` says whether they are close to each other as evaluation scripts ask, at 1e-4; None for 16-bit types.
    """
    if ours.shape != peer.shape or ours.dtype != peer.dtype:
        shapes = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (ours, peer))
        return {"failure": "wrong: the result is {}, PyTorch's is {}".format(*shapes)}
    bound = error_bound(contract, reduction_length(job.case, job.direction))
    ours_off, peer_off, close = Errors(), Errors(), True
    for part, value, magnitude in exact_pieces(job, operands):
        ours_off.add(ours[part], value, magnitude, bound)
        peer_off.add(peer[part], value, magnitude, bound)
        close = close and torch.allclose(ours[part], peer[part], rtol=1e-4, atol=1e-4)
    right = ours_off.worst <= 1 and ours_off.relative <= RELATIVE_LIMITS[contract]  # NaN is neither
    wrong = f"wrong: error {ours_off.worst:.3g} times its bound, relative error of the whole {ours_off.relative:.3g}"
    return {
        "failure": None if right else wrong,
        "ours_error": ours_off.relative,
        "ours_worst": ours_off.worst,
        "peer_error": peer_off.relative,
        "peer_worst": peer_off.worst,
        "error_ratio": (ours_off.relative or 1e-300) / (peer_off.relative or 1e-300),  # two exact ones are even
        "allclose": close if type_info(contract).bits > 16 else None,
    }


# One layer.


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors are full of NaN here (from torch 2.2 on), so that what a kernel leaves out shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


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
    case, target = job.case, getattr(torch, job.dtype)
    drawn = torch.float64 if job.dtype == "float64" else torch.float32
    layout = torch.channels_last if job.channels_last else torch.contiguous_format
    layer = nn.Conv2d(case.C, case.K, (case.R, case.S), groups=case.groups, bias=case.bias, dtype=drawn)
    layer.requires_grad_(False).to(device, target, memory_format=layout)
    x, dy = DATA[data][0](case.N, case.C, case.H, case.W, dtype=drawn, device=device), None
    if job.direction != FORWARD:
        dy = torch.randn(case.N, case.K, case.P, case.Q, dtype=drawn, device=device).to(target, memory_format=layout)
    bias = None if layer.bias is None else layer.bias.detach()
    return Operands(x.to(target, memory_format=layout), layer.weight.detach(), dy, bias)


def pass_alone(convolve: Callable[..., Tensor], job: Job, operands: Operands) -> Callable[[], Tensor]:
    """A call that runs one pass alone; a gradient through autograd, in a graph that holds that gradient only."""
    options = job.case.options
    if job.direction == FORWARD:
        return lambda: convolve(operands.x, operands.w, operands.bias, **options)
    tensors = {DGRAD: operands.x, WGRAD: operands.w, BGRAD: operands.bias}
    tensors = {of: t if t is None else t.detach().requires_grad_(of == job.direction) for of, t in tensors.items()}
    y, wanted = convolve(*tensors.values(), **options), tensors[job.direction]
    return lambda: torch.autograd.grad(y, wanted, operands.dy, retain_graph=True)[0]


def measure(job: Job, settings: dict[str, Any], ceilings: Ceilings, clock: Clock) -> dict[str, Any]:
    """One row of the table: checked, then timed. In a wrong row `failure` says why, and there are no times."""
    import modelnew

    clock.release_memory()
    operands = draw_operands(job, settings["data"], clock.device)
    with fp32_precision(torch.backends.cudnn, job.precision), contextlib.ExitStack() as forced:
        row = engine_and_contract(job, operands)
        if engine := settings["engine"]:  # not before: explain() asks for all passes
            row["engine"] = forced.enter_context(modelnew.force_engine(engine)) or engine
        with poisoned_memory():
            ours = pass_alone(modelnew.conv2d, job, operands)
            result = ours()
        peer = pass_alone(F.conv2d, job, operands)
        row |= check(job, operands, row["contract"], result, peer())
        del result
        if row["failure"] is None:
            times = clock.milliseconds([ours, peer], settings["repeats"])
            row |= quartiles("ours", times[0]) | quartiles("peer", times[1])
            row |= rates(job, row, ceilings)
    return row


def engine_and_contract(job: Job, operands: Operands) -> dict[str, str]:
    """Which engine runs this pass and which accuracy it promises, as explain() says; "PyTorch" on a CPU."""
    import modelnew

    text = str(modelnew.explain(operands.x, operands.w, operands.bias, **job.case.options))
    line = re.search(rf"^\s*{job.direction}:\s*(\w+)(.*)$", text, re.MULTILINE)
    promised = re.search(r"\b(tf32|fp32)\b", line[2]) if line else None
    float32 = promised[1] if promised else "fp32" if job.direction == BGRAD else job.precision
    return {"engine": line[1] if line else "PyTorch", "contract": float32 if job.dtype == "float32" else job.dtype}


def rates(job: Job, row: dict[str, Any], ceilings: Ceilings) -> dict[str, Any]:
    """What follows from the times."""
    moved = traffic(job.case, job.direction, type_info(row["contract"]).bits // 8, job.channels_last)
    memory_ms = moved[0] / ceilings.read_gbs / 1e6 + moved[1] / ceilings.fill_gbs / 1e6
    flop = job.case.N * job.case.K * job.case.P * job.case.Q if job.direction == BGRAD else job.case.flop
    arithmetic_ms = flop / ceilings.rate(row["contract"], depthwise=job.case.groups == job.case.C) / 1e9
    return {
        "speedup": row["peer_ms"] / row["ours_ms"],
        "flop": flop,
        "bytes": sum(moved),
        "floor_memory_ms": memory_ms,
        "floor_arithmetic_ms": arithmetic_ms,
        "floor_percent": 100 * max(memory_ms, arithmetic_ms) / row["ours_ms"],
    }


# One network.


def measure_network(name: str, mode: str, turns: int, clock: Clock) -> dict[str, Any]:
    """A network with nn.Conv2d and after accelerate(), in turn: checked against float64, then timed.

    Random weights. Speed-up: median of the ratios of neighbouring times, which a busy host disturbs least.
    """
    import modelnew

    clock.release_memory()
    torch.manual_seed(SEED)
    network, how, on_gpu = NETWORKS[name], MODES[mode], clock.device.type == "cuda"
    layout = torch.channels_last if how.channels_last else torch.contiguous_format
    images = torch.randn(network.batch if on_gpu else 2, 3, network.size, network.size, device=clock.device)
    plain = network.calibrated(images)
    if not how.train:
        plain.eval()
    exact = gradients_or_output(copy.deepcopy(plain).double(), images.double(), Mode(how.train))
    plain, images = plain.to(dtype=how.dtype, memory_format=layout), images.to(how.dtype, memory_format=layout)
    with torch.autocast(clock.device.type, torch.bfloat16, enabled=how.autocast):
        accelerated, decided = modelnew.accelerate(copy.deepcopy(plain), images)
    results = (gradients_or_output(model, images, how) for model in (accelerated, plain))
    errors = [((result - exact).norm() / exact.norm()).item() for result in results]
    # Rounding grows at random through a deep network: an error below twice PyTorch's is as good as PyTorch's.
    row = {
        "batch": len(images),
        "convolutions": sum(isinstance(module, nn.Conv2d) for module in plain.modules()),
        "replaced": len({layer.name for layer in decided.layers if layer.replaced}),
        "ours_error": errors[0],
        "peer_error": errors[1],
        "error_ratio": (errors[0] or 1e-300) / (errors[1] or 1e-300),
        "failure": None if errors[0] <= 2 * errors[1] else f"wrong: error {errors[0]:.3g}, PyTorch's {errors[1]:.3g}",
    }
    if row["failure"] is None:
        steps = [step_of(model, images, how) for model in (accelerated, plain)]
        row |= {f"{who}_peak_mb": peak_mb(step, clock) for who, step in zip(("ours", "peer"), steps, strict=True)}
        ours, peer = clock.milliseconds(steps, turns)
        row |= quartiles("ours", ours) | quartiles("peer", peer)
        row["speedup"] = statistics.median(b / a for a, b in zip(ours, peer, strict=True))
    return row


def peak_mb(step: Callable[[], Any], clock: Clock) -> float:
    """Most memory that a step takes on a GPU besides what was there before, in MB."""
    if clock.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    return 0.0


# A training run.


class Training:
    """A network, the losses of its steps so far, and how it does on images that it is not trained on."""

    def __init__(self, model: nn.Module, how: Mode, batches: Sequence[tuple[Tensor, Tensor]], steps: int) -> None:
        """Trains on the first `steps` batches; the others are held out."""
        from examples.train import step_of

        layout = torch.channels_last if how.channels_last else torch.contiguous_format
        batches = [(images.contiguous(memory_format=layout), labels) for images, labels in batches]
        self.model, self.autocast, self.held_out = model.to(memory_format=layout), how.autocast, batches[steps:]
        self.next_loss, self.losses = step_of(self.model, batches[:steps], how.autocast), []

    def step(self) -> None:
        self.losses.append(self.next_loss())

    def results(self, who: str) -> dict[str, Any]:
        """Fields of a row: losses, their mean over the last TAIL steps, loss and accuracy on the held-out images."""
        labels = torch.cat([labels for _, labels in self.held_out])
        self.model.eval()
        with torch.no_grad(), torch.autocast(labels.device.type, torch.bfloat16, enabled=self.autocast):
            y = torch.cat([self.model(images).float() for images, _ in self.held_out])
        losses = [round(loss.item(), 5) for loss in self.losses]
        return {
            f"{who}_losses": losses,
            f"{who}_loss": statistics.fmean(losses[-TAIL:]),
            f"{who}_held_out_loss": F.cross_entropy(y, labels).item(),
            f"{who}_held_out_accuracy": (y.argmax(1) == labels).float().mean().item(),
        }


def judge(row: dict[str, Any]) -> dict[str, Any]:
    """The peers' mean losses over the last TAIL steps, how high ours may be, and in `failure` what is wrong, or None.

    Rounding drives right trainings apart; the peers, all with nn.Conv2d, differ by nothing else. Our mean may exceed
    their highest by their spread, highest minus lowest, plus 1% of the highest, since peers may agree. The highest of
    five values of a normal distribution lies on average 1.2 standard deviations above its mean and 2.3 above the lowest
    value, so that about 3.5 are allowed. As the spread itself varies, about one right training in 70 fails. No loss may
    be infinite or NaN.
    """
    peers = [row["peer_losses"], *row["other_losses"]]
    means = [statistics.fmean(losses[-TAIL:]) for losses in peers]
    spread, failure = max(means) - min(means), None
    allowed = 1.01 * max(means) + spread
    held_out = [row[f"{who}_held_out_loss"] for who in ("ours", "peer")]
    if not all(math.isfinite(loss) for losses in (row["ours_losses"], *peers, held_out) for loss in losses):
        failure = "wrong: a loss is not finite"
    elif not row["ours_loss"] <= allowed:
        failure = f"wrong: loss {row['ours_loss']:.4f}, nn.Conv2d's at most {max(means):.4f}, allowed {allowed:.4f}"
    return {"peer_tail_losses": means, "peer_spread": spread, "allowed": allowed, "failure": failure}


def last_bits_changed(model: nn.Module, seed: int) -> nn.Module:
    """A copy with each element of each parameter, all float32, multiplied by 1 plus or minus 2^-23 at random."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        signs = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
        parameter.data *= 1 + 2**-23 * signs.to(parameter)
    return model


def measure_training(mode: str, model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], steps: int,
                     clock: Clock) -> dict[str, Any]:  # fmt: skip
    """A network trained with nn.Conv2d, the first peer, and with all its convolutions on modelnew, in turn and timed.

    The other peers come before, from changed last bits, so that they differ also where nn.Conv2d is deterministic.
    """
    import modelnew

    def trained(seed: int) -> list[float]:
        clock.release_memory()
        other = Training(last_bits_changed(model, seed), MODES[mode], batches, steps)
        for _ in range(steps):
            other.step()
        return other.results("other")["other_losses"]

    others = [trained(seed) for seed in range(1, PEERS)]
    clock.release_memory()
    accelerated, decided = modelnew.accelerate(copy.deepcopy(model), keep_slower=True)
    ours, peer = (Training(network, MODES[mode], batches, steps) for network in (accelerated, copy.deepcopy(model)))
    times = clock.milliseconds([ours.step, peer.step], steps - 2)
    row = {"batch": len(batches[0][0]), "steps": steps, "replaced": sum(layer.replaced for layer in decided.layers),
           "convolutions": len(decided.layers)} | ours.results("ours") | peer.results("peer")  # fmt: skip
    row["other_losses"] = others
    row |= judge(row)
    if row["failure"] is None:
        row |= quartiles("ours", times[0]) | quartiles("peer", times[1])
        row["speedup"] = row["peer_ms"] / row["ours_ms"]
    return row


# The commands.


def suite_cases(suite: str, batches: Sequence[int]) -> list[Case]:
    """The cases of a suite, a network's for each batch."""
    if suite in LAYERS:
        return list(LAYERS[suite])
    return [case for batch in dict.fromkeys(batches or [NETWORKS[suite].batch]) for case in record(suite, batch)]


def jobs(args: argparse.Namespace, on_gpu: bool) -> list[Job]:
    """Every row that the command line asks for."""
    suites = dict.fromkeys(args.suite or ([] if args.case else ["reference"]))
    cases = [(suite, case) for suite in suites for case in suite_cases(suite, args.batch)]
    cases = [(suite, case if on_gpu else scaled_down(case)) for suite, case in cases] + [("", c) for c in args.case]
    directions = (FORWARD, DGRAD, WGRAD, BGRAD) if args.backward else (FORWARD,)
    precisions = args.precision if on_gpu else ["fp32"]  # there is no TF32 on a CPU
    return [
        Job(case, direction, dtype, precision, suite, args.channels_last)
        for dtype in args.dtype
        for precision in (precisions if dtype == "float32" else precisions[:1])
        for suite, case in cases
        if re.search(args.filter, f"{case.name}: {case.shape}")
        for direction in directions
        if direction != BGRAD or case.bias
    ]


def complete(document: dict[str, Any], todo: Sequence[tuple[dict[str, Any], Callable[[], dict[str, Any]]]],
             args: argparse.Namespace) -> int:  # fmt: skip
    """Measures all rows, with progress on stderr, prints them and returns the exit code.

    A row that cannot run is a failed row, not the end. The file is written after each row, so that none is lost.
    """
    rows = document["rows"]
    for number, (identity, measured) in enumerate(todo, 1):
        name = " ".join(str(identity[key]) for key in ("name", "pass", "dtype", "precision", "mode") if key in identity)
        print(f"[{number}/{len(todo)}] {name} ...", end="", file=sys.stderr, flush=True)
        begin = time.perf_counter()
        try:
            row = identity | measured()
        except (RuntimeError, ValueError) as error:  # refused by a forced engine, out of memory, failed launch
            row = identity | {"failure": f"{type(error).__name__}: {error}", "engine": "?", "contract": "?"}
        rows.append(row)
        outcome = row["failure"] or f"{row['ours_ms']:.3g} ms, {row['speedup']:.2f}x"
        print(f" {outcome} ({time.perf_counter() - begin:.1f} s)", file=sys.stderr, flush=True)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("\n".join(report.text(document, args.wide)))
    if not document["machine"]["gpu"]:
        print(NO_GPU)
    return 1 if any(row["failure"] for row in rows) else 0


def run(args: argparse.Namespace, device: torch.device) -> int:
    on_gpu = device.type == "cuda"
    todo = jobs(args, on_gpu or args.list)
    if args.list:
        print("\n".join(dict.fromkeys(f"{job.case.name}: {job.case.shape}" for job in todo)))
        return 0
    # Networks have many rows, and calls of 10 to 500 us: after a pause it is the launch that would be timed.
    of_networks = bool(args.suite) and not args.case and all(suite in NETWORKS for suite in args.suite)
    repeats = args.repeats or (15 if of_networks else 25)
    rest_ms = args.rest if args.rest is not None else 0 if of_networks else REST_MS
    settings = {"data": args.data, "inputs": DATA[args.data][1], "seed": SEED, "repeats": repeats, "rest_ms": rest_ms,
                "engine": args.engine, "cudnn_benchmark": args.cudnn_benchmark}  # fmt: skip
    torch.backends.cudnn.benchmark = args.cudnn_benchmark
    import modelnew  # noqa: F401  # builds the kernels now rather than inside the first row

    clock = Clock(device, rest_ms)
    ceilings = measure_ceilings(clock, args.dtype)
    document = report.new_document("layers", settings, asdict(ceilings))
    return complete(
        document, [(job.identity, lambda job=job: measure(job, settings, ceilings, clock)) for job in todo], args
    )


def networks(args: argparse.Namespace, device: torch.device) -> int:
    chosen = [(name, mode) for mode in args.mode for name in (args.names or NETWORKS) if re.search(args.filter, name)]
    if args.list:
        print("\n".join(f"{name}: {network}" for name, network in NETWORKS.items()))
        return 0
    torch.backends.cudnn.benchmark = True
    clock = Clock(device)
    settings = {"seed": SEED, "repeats": args.repeats, "rest_ms": 0, "engine": None, "cudnn_benchmark": True}
    todo = [({"name": n, "mode": m}, lambda n=n, m=m: measure_network(n, m, args.repeats, clock)) for n, m in chosen]
    with fp32_precision(torch.backends.cudnn, "tf32"), fp32_precision(torch.backends.cuda.matmul, "tf32"):
        return complete(report.new_document("networks", settings), todo, args)


def training(args: argparse.Namespace, device: torch.device) -> int:
    from examples.train import ResNet18, draw_batches

    torch.backends.cudnn.benchmark = True
    clock, steps = Clock(device), args.steps
    width, batch, held_out = (64, 128, 8) if device.type == "cuda" else (8, 32, 2)
    settings = {"seed": SEED, "repeats": steps - 2, "rest_ms": 0, "engine": None, "cudnn_benchmark": True,
                "width": width, "batch": batch, "held_out": held_out * batch}  # fmt: skip
    torch.manual_seed(SEED)
    model, batches = ResNet18(width).to(device), draw_batches(steps + held_out, batch, device)
    todo = [({"name": "resnet18", "mode": m}, lambda m=m: measure_training(m, model, batches, steps, clock))
            for m in args.mode]  # fmt: skip
    with fp32_precision(torch.backends.cudnn, "tf32"):
        return complete(report.new_document("training", settings), todo, args)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> Callable[..., Any]:
        return commands.add_parser(name, help=text, description=text).add_argument

    add = command("run", "measure layers, one by one (the default command)")
    add("--suite", nargs="+", choices=(*LAYERS, *NETWORKS), default=[], metavar="NAME", action="extend",
        help=f"layers, also of networks: {', '.join((*LAYERS, *NETWORKS))} (default: reference)")  # fmt: skip
    add("--batch", nargs="+", type=int, default=[], metavar="N", help="images for the layers of networks")
    add("--case", action="append", type=parse_case, default=[], metavar=CASE_FORM, help="a layer; repeatable")
    add("--dtype", nargs="+", choices=REAL, default=["float32"])
    add("--precision", nargs="+", choices=("tf32", "fp32"), default=["tf32"],
        help="PyTorch's setting for float32 convolutions (default: tf32, as PyTorch's own)")  # fmt: skip
    add("--channels-last", action="store_true", help="x and the weight in channels_last, on both sides")
    add("--backward", action="store_true", help="rows for the gradients to input, weight and bias as well, each alone")
    add("--engine", metavar="NAME", help="force one of modelnew's engines")
    add("--data", choices=tuple(DATA), default="rand", help="how x is drawn: " + "; ".join(DATA[d][1] for d in DATA))
    add("--rest", type=float, metavar="MS", help=f"pause before a timed call (default: {REST_MS}; networks: 0)")
    add("--cudnn-benchmark", action=argparse.BooleanOptionalAction, default=True, help="as torch.backends.cudnn's")
    add("--repeats", type=int, metavar="N", help="timed calls (default: 25; layers of networks: 15)")
    common = [add]
    common.append(add := command("networks", "measure whole networks before and after accelerate()"))
    add("names", nargs="*", choices=(*NETWORKS, []), metavar="NAME", help=f"{', '.join(NETWORKS)} (default: all)")
    add("--mode", nargs="+", choices=MODES, default=list(DEFAULT_MODES), metavar="MODE",
        help=f"inference or training steps: {', '.join(MODES)} (default: {', '.join(DEFAULT_MODES)})")  # fmt: skip
    add("--repeats", type=int, default=15, metavar="N", help="timed steps (default: 15)")
    for add in common:
        add("--filter", default="", metavar="REGEX", help="only rows whose name and shape match")
        add("--list", action="store_true", help="print names and shapes, measure nothing")
    common.append(add := command("training", "train a ResNet-18 for images of 32x32, losses beside nn.Conv2d's"))
    modes = [mode for mode, how in MODES.items() if how.train]
    add("--mode", nargs="+", choices=modes, default=modes, metavar="MODE", help=f"{', '.join(modes)} (default: all)")
    add("--steps", type=int, default=200, metavar="N", help="steps of SGD (default: 200)")
    for add in common:
        add("--wide", action="store_true", help="print all columns")
        add("--json", type=Path, metavar="FILE", help="store all numbers of this run")
    add = command("compare", "say how two stored runs differ")
    add("before", type=Path)
    add("after", type=Path)
    add = command("plot", "draw speed-ups as bars, or the losses of a training run (needs matplotlib)")
    add("files", nargs="+", type=Path, metavar="FILE.json")
    add("-o", "--output", type=Path, default=report.PICTURE, help="an SVG or PNG file (default: docs/speedup.svg)")
    command("render", "write README's table, results/README.md and all pictures from results/*.json")
    if not argv or argv[0] not in (*commands.choices, "-h", "--help"):
        argv = ["run", *argv]
    args = parser.parse_args(argv)
    if args.command == "run" and args.batch and not set(args.suite) & set(NETWORKS):
        parser.error("--batch is for the layers of a network; other layers have an N of their own")
    if args.command in ("run", "networks") and args.repeats is not None and args.repeats < 3:
        parser.error(f"--repeats {args.repeats} is not at least 3, as quartiles need")
    if args.command == "training" and args.steps < 5:
        parser.error(f"--steps {args.steps} is not at least 5: two that are not timed, and three for quartiles")
    if args.command == "run" and (min(args.batch, default=1) < 1 or not 0 <= (args.rest or 0) < math.inf):
        parser.error("--batch needs positive numbers and --rest a finite, non-negative one")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(sys.argv[1:] if argv is None else argv)
    if args.command == "compare":
        print("\n".join(report.compare(report.load(args.before), report.load(args.after))))
    elif args.command == "plot":
        report.plot([report.load(path) for path in args.files], args.output)
    elif args.command == "render":
        report.render()
    else:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        return {"run": run, "networks": networks, "training": training}[args.command](args, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
