"""Problems, references, bounds, fills and layouts: what all numerical tests share."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import math
import mmap
import random
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modelnew

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
KERNELS = ROOT / "kernels"
ENGINE_SOURCES = sorted(path for path in KERNELS.glob("*.cu") if path.name != "bundle_template.cu")  # and listed.cu
KERNEL_FILES = sorted(path for path in KERNELS.iterdir() if path.suffix in (".cpp", ".cu", ".cuh", ".h"))

GPU_MARKS = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))
DEVICES = ["cpu", pytest.param("cuda", marks=GPU_MARKS)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def gpu(test: Callable) -> Callable:
    """Marks a test that needs a GPU."""
    return functools.reduce(lambda marked, mark: mark(marked), GPU_MARKS, test)


@contextlib.contextmanager
def tf32_switch(allowed: bool) -> Iterator[None]:
    """PyTorch's switch for cuDNN's convolutions, by whichever name this torch has for it."""
    switch = getattr(torch.backends.cudnn, "conv", torch.backends.cudnn)
    named_anew = hasattr(switch, "fp32_precision")
    name, value = ("fp32_precision", "tf32" if allowed else "ieee") if named_anew else ("allow_tf32", allowed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(switch, name, value)
        yield


@pytest.fixture
def fp32_contract() -> Iterator[None]:
    """Float32 convolutions in full precision."""
    with tf32_switch(False):
        yield


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem in cuDNN's letters; w is [K, C/groups, R, S]."""

    N: int
    C: int
    H: int
    W: int
    K: int
    R: int
    S: int
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def __str__(self) -> str:
        text = f"N{self.N} C{self.C} {self.H}x{self.W} K{self.K} {self.R}x{self.S}"
        pairs = (("s", self.stride, (1, 1)), ("p", self.padding, (0, 0)), ("d", self.dilation, (1, 1)))
        text += "".join(f" {name}{value[0]}{value[1]}" for name, value, default in pairs if value != default)
        return text + (f" g{self.groups}" if self.groups > 1 else "")

    @property
    def kwargs(self) -> dict:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.N, self.C, self.H, self.W)

    @property
    def w_shape(self) -> tuple[int, ...]:
        return (self.K, self.C // self.groups, self.R, self.S)

    @property
    def y_shape(self) -> tuple[int, ...]:
        spans = zip((self.H, self.W), self.padding, self.dilation, (self.R, self.S), self.stride, strict=True)
        return (self.N, self.K, *((size + 2 * pad - d * (r - 1) - 1) // s + 1 for size, pad, d, r, s in spans))

    @property
    def multiply_adds(self) -> int:
        return math.prod(self.y_shape) * math.prod(self.w_shape[1:])

    def tf32_operators(self, dtype: torch.dtype, allowed: bool, least: dict[str, int] | None = None) -> set[str]:
        """Operators under the TF32 contract, by the rule of kernels/problem.cuh: where cuDNN uses TF32 as well."""
        if dtype != torch.float32 or not allowed:
            return set()
        stem = self.C in (3, 4) and self.groups == 1 and self.K >= 64 and self.N >= 8
        if stem and self.R * self.S >= 49:
            of_resnet = (self.C, self.R, self.S) == (3, 7, 7) and self.K in (64, 128) and self.multiply_adds >= 2**25
            large = self.multiply_adds >= 2**29
            return {name for name, uses in {"fprop": of_resnet, "wgrad": large}.items() if uses}
        limits = dict(least or LEAST_TF32_WORK)
        if min(self.C, self.K) // self.groups < 8:
            of_four = {self.C // self.groups, self.K // self.groups} <= {4, 8} and self.R * self.S > 1
            steps = [s for s, outputs in zip(self.stride, self.y_shape[2:], strict=True) if outputs > 1]
            if not of_four or self.groups % 16 != 0 or max(steps, default=1) > 1:
                return set()
            del limits["wgrad"]
        if least is None and self.groups == 1:
            if (self.R, self.S) == (1, 1) and max(self.stride) > 1:
                limits["fprop"] = 2**29
            elif min(self.C, self.K) >= 64:
                limits["fprop"] = 2**24
        return {name for name, limit in limits.items() if self.multiply_adds >= limit}

    def reduction(self, operator: str) -> int:
        """How many products make up one element of the operator's result."""
        P, Q = self.y_shape[2:]
        taps = self.R * self.S
        lengths = {"fprop": self.C // self.groups * taps, "dgrad": self.K // self.groups * taps}
        return lengths.get(operator, self.N * P * Q)


# Multiply-adds below which float32 stays float32, whatever PyTorch's switch says.
LEAST_TF32_WORK = {"fprop": 2**27, "dgrad": 2**27, "wgrad": 2**29}

# The two tensors that each operator multiplies; bgrad only sums dy.
OPERANDS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


def product(operator: str, case: Case, first: Tensor, second: Tensor) -> Tensor:
    """The operator's result in float64, from its two operands (see OPERANDS)."""
    first, second = first.double(), second.double()
    if operator == "fprop":
        return F.conv2d(first, second, **case.kwargs)
    if operator == "dgrad":
        return nn.grad.conv2d_input(case.x_shape, second, first, **case.kwargs)
    return nn.grad.conv2d_weight(second, case.w_shape, first, **case.kwargs)


def reference(operator: str, case: Case, tensors: dict[str, Tensor]) -> Tensor:
    """y (with a bias if there is one), dx, dw or db in float64."""
    if operator == "bgrad":
        return tensors["dy"].double().sum((0, 2, 3))
    exact = product(operator, case, *(tensors[name] for name in OPERANDS[operator]))
    return exact + tensors["bias"].double().view(-1, 1, 1) if operator == "fprop" and "bias" in tensors else exact


def references(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reference of each operator."""
    return {operator: reference(operator, case, tensors) for operator in OPERATOR_NUMBER}


def relative_bound(case: Case, operator: str, dtype: torch.dtype, tf32: bool) -> float:
    """The factor of conv(|x|, |w|) in the numerical contract."""
    n = case.reduction(operator)
    if dtype == torch.float64:
        return (n + 16) * 2.0**-52  # ours and the reference's
    if tf32:
        return 2.0**-10 + 2.0**-22 + (n + 16) * 2.0**-24
    return 2.0**-21 + (64 + n / 64) * 2.0**-24


def error_bound(case: Case, operator: str, tensors: dict[str, Tensor], result: Tensor, tf32: bool) -> Tensor:
    """Element-wise bound of |result - float64 reference|; `tf32` says which contract holds."""
    dtype, result = result.dtype, result.double().abs()
    if operator == "bgrad":
        scale = tensors["dy"].double().abs().sum((0, 2, 3))
        offsets, bias = torch.zeros_like(scale), torch.zeros_like(scale)
    else:
        first, second = (tensors[key].double().abs() for key in OPERANDS[operator])
        scale = product(operator, case, first, second)
        offsets = product(operator, case, torch.ones_like(first), second)
        offsets += product(operator, case, first, torch.ones_like(second))
        bias = tensors["bias"].double().abs().view(-1, 1, 1) if operator == "fprop" else torch.zeros(())
    bound = relative_bound(case, operator, dtype, tf32) * scale
    if dtype == torch.float64:
        return bound + 2.0**-51 * (result + bias.to(result))
    bound = bound + 2.0**-137 * offsets + 2.0**-126 + 2.0**-23 * (result + bias.to(result))
    if dtype != torch.float32:  # one rounding at the end
        info = torch.finfo(dtype)
        bound = bound + info.eps / 2 * result * (1 + info.eps) + info.smallest_normal * info.eps / 2
    return bound


# A fill is a function (shape, generator) -> float32 tensor on the generator's device: a GPU draws large operands much
# faster than a CPU.
def positive(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device)


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def whole(low: int, end: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(low, end, shape, generator=generator, device=generator.device)


def integers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Small integers, whose sums stay exact in every accumulator: results must be bit for bit right."""
    return whole(-3, 4, shape, generator).float()


def wide(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Magnitudes over 40 binades, both signs: a global norm would not see a wrong small element."""
    return normal(shape, generator) * torch.exp2(40 * positive(shape, generator) - 20)


def tiny(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Products around float32's smallest normal number."""
    return normal(shape, generator) * 2.0**-63


def huge(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Sums that stay just below float32's largest number."""
    return normal(shape, generator) * 2.0**54


def any_exponent(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """From the smallest subnormal number to 2^30."""
    exponents = whole(-149, 31, shape, generator)
    return (normal(shape, generator).double() * torch.exp2(exponents.double())).float()


def specks(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Less than 1, but here and there values that are far smaller or larger: parts of a tensor have none of them."""
    exponents = whole(-60, 12, shape, generator).where(whole(0, 300, shape, generator) == 0, -8)
    return normal(shape, generator) * torch.exp2(exponents.float())


def under_a_tf32_step(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Just below a step of TF32 and all positive: truncating the operands errs by twice what rounding may."""
    steps = whole(0, 8, shape, generator)
    return 1 + (steps + 1) * 2.0**-10 - 2.0**-20


def tf32_ties(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Half-way between two TF32 numbers, both signs: ties go away from zero."""
    steps = whole(0, 8, shape, generator) + 0.5
    signs = whole(0, 2, shape, generator) * 2 - 1
    return signs * (1 + steps * 2.0**-10)


def equal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Each addition to a long sum rounds the same way: in one single chain the errors add up instead of averaging."""
    return torch.full(shape, 0.7)


# Operands that fp16 cannot contain, or not all of them: each kind changes normal ones, and weights of size 1e-2.
def with_few(*values: float) -> Callable[[Tensor, Tensor], None]:
    """Changes the first and the last element and a few others, so few that a sample of them sees none."""

    def change(x: Tensor, _: Tensor) -> None:
        generator = torch.Generator().manual_seed(x.numel())
        inner = torch.randint(x.numel(), (3 * len(values) - 2,), generator=generator).tolist()
        x.view(-1)[[0, *inner, -1]] = torch.tensor(values, device=x.device).repeat(3)

    return change


def of_size(size: float) -> Callable[[Tensor, Tensor], None]:
    """A whole image, and weights of the opposite size."""

    def change(x: Tensor, w: Tensor) -> None:
        x[-1] = (x[-1].double() * size).float()
        w.copy_((w.double() / size).clamp(-1e37, 1e37).float())

    return change


def faint_channel(x: Tensor, w: Tensor) -> None:
    """A million times smaller than its neighbours, and every other filter selects it."""
    x[:, 3] *= 1e-6
    w[::2, torch.arange(w.shape[1]) != 3] = 0


ADVERSE = {
    "1e-30 beside 1e30": with_few(1e-30, 1e30),
    "few small": with_few(1e-9, -1e-12),
    "few large": with_few(1e6, -1e9),
    "few denormals": with_few(1e-40, -3e-45),
    "one outlier": with_few(1e38),
    **{f"image of {size:g}": of_size(size) for size in (1e-38, 1e-20, 1e-10, 1e10, 1e20, 1e36)},
    "faint channel": faint_channel,
    "dead weights": lambda x, w: w[1::2, ::3].fill_(1e-20),
    "faint output channel": lambda x, w: w[-1].mul_(1e-20),
    "zero rows": lambda x, w: (x[:, :, ::2].zero_(), w[1].zero_()),
    "zero images": lambda x, w: x[-1].zero_(),
    "all zero": lambda x, w: (x.zero_(), w.zero_()),
}


def adverse_tensors(case: Case, kind: str, operator: str, device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
    """Operands of fprop or dgrad, changed; of wgrad x."""
    tensors = make_tensors(case, torch.float32, normal, device, seed)
    tensors["w"] *= 1e-2
    ADVERSE[kind](tensors[{"fprop": "x", "dgrad": "dy", "wgrad": "x"}[operator]], tensors["w"])
    return tensors


def round_to_tf32(value: Tensor) -> Tensor:
    """Float32 rounded to 10 mantissa bits, to nearest, ties away from zero."""
    return ((value.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def make_tensors(
    case: Case, dtype: torch.dtype, fill: Callable, device: str = "cpu", seed: int = 0
) -> dict[str, Tensor]:
    """x, w, bias and dy of a case. NaN lies before and behind each of them, for kernels that read too far."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = {"x": case.x_shape, "w": case.w_shape, "bias": (case.K,), "dy": case.y_shape}
    return {name: with_margins(fill(shape, generator).to(dtype).to(device)) for name, shape in shapes.items()}


MARGIN = 64


def with_margins(tensor: Tensor) -> Tensor:
    """A copy with NaN before and behind it in memory."""
    storage = tensor.new_full((tensor.numel() + 2 * MARGIN,), math.nan)
    inner = storage[MARGIN:-MARGIN].view(tensor.shape)
    return inner.copy_(tensor)


def margins_intact(tensor: Tensor) -> bool:
    """Whether the margins of a tensor made by with_margins are still NaN."""
    storage = torch.as_strided(tensor, (tensor.numel() + 2 * MARGIN,), (1,), tensor.storage_offset() - MARGIN)
    return bool(storage[:MARGIN].isnan().all() and storage[-MARGIN:].isnan().all())


def check_exact(case: Case, results: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Bit for bit the float64 result, rounded once to the tensor's type."""
    for operator, result in results.items():
        assert result.dtype == tensors["x"].dtype
        expected = reference(operator, case, tensors)
        assert torch.equal(result, expected.to(result.dtype)), f"{operator} of {case}"


def check_bounds(case: Case, results: dict[str, Tensor], tensors: dict[str, Tensor], tf32: Collection[str]) -> None:
    """Every element within the numerical contract; `tf32` are the operators under the TF32 contract."""
    for operator, result in results.items():
        error = (result.double() - reference(operator, case, tensors)).abs()
        bound = error_bound(case, operator, tensors, result, operator in tf32)
        assert (error <= bound).all(), f"{operator} of {case}: {(error / bound).max():.3g} times the bound"


DTYPE_NUMBER = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
OPERATOR_NUMBER = {"fprop": 0, "dgrad": 1, "wgrad": 2, "bgrad": 3}

# TF32 holds for large problems; in the shim for those it can run.
LEAST_TF32_WORK_IN_SHIM = dict.fromkeys(LEAST_TF32_WORK, 2**20)


def input_pointers(operator: str, tensors: dict[str, Tensor]) -> list[int | None]:
    """Addresses of x, w, bias and dy as far as an operator reads them."""
    reads = {"fprop": ("x", "w", "bias"), "dgrad": ("w", "dy"), "wgrad": ("x", "dy"), "bgrad": ("dy",)}[operator]
    given = [tensors.get(name) if name in reads else None for name in ("x", "w", "bias", "dy")]
    return [None if tensor is None else tensor.data_ptr() for tensor in given]


def is_channels_last(tensor: Tensor) -> bool:
    """Whether it is and is not contiguous as well."""
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


# Each case has a geometry of its own; its other numbers are odd or prime.
DENSE_CASES = [
    Case(1, 1, 1, 1, 1, 1, 1),
    Case(3, 7, 5, 11, 13, 1, 1),
    Case(2, 3, 7, 11, 5, 3, 2),
    Case(2, 4, 9, 14, 6, 2, 5, stride=(2, 1), padding=(1, 3)),
    Case(1, 2, 10, 12, 3, 3, 3, padding=(3, 1), dilation=(2, 3)),
    Case(1, 3, 11, 8, 4, 3, 4, stride=(3, 2), padding=(2, 4), dilation=(2, 1)),
    Case(1, 5, 13, 9, 7, 1, 1, stride=(2, 3)),  # rows and columns that no filter meets
    Case(1, 2, 12, 15, 3, 2, 2, stride=(5, 4), padding=(1, 0)),  # the same between filters
    Case(1, 3, 6, 7, 2, 3, 3, stride=(2, 2), padding=(2, 2), dilation=(2, 2)),  # phases of dx without a tap
    Case(1, 2, 19, 20, 2, 3, 3, stride=(4, 6), padding=(3, 2), dilation=(2, 3)),  # stride and dilation share divisors
    Case(2, 2, 5, 6, 3, 5, 6),  # one output
    Case(3, 8, 8, 1, 12, 1, 1, stride=(1, 3)),  # a stride over a single column
    Case(1, 8, 4, 5, 8, 2, 2, stride=(8388608, 1)),  # a stride whose multiples leave 32 bits
    Case(1, 2, 4, 5, 2, 2, 2, stride=(4202600, 536870911), groups=2),
    Case(1, 2, 40, 3, 2, 2, 2, stride=(37, 1), padding=(2, 0)),  # more phases of dx than filter rows
    Case(1, 2, 2, 3, 3, 4, 3, padding=(4, 3)),  # more padding than image
    Case(1, 1, 4, 150, 2, 1, 131),  # a filter row longer than a chunk of the sum
    Case(1, 3, 3, 301, 2, 3, 3),  # an image wider than any tile
    Case(1, 3, 301, 3, 2, 3, 3, padding=(1, 1)),  # and one higher
    Case(2, 6, 7, 8, 9, 3, 3, padding=(1, 1), groups=3),
    Case(2, 20, 6, 10, 2, 1, 1),  # 1x1 to 2, 4 and 8 channels, with sums of one and of several chunks
    Case(1, 37, 4, 135, 3, 1, 1),
]


def depthwise_case(N: int, C: int, H: int, W: int, R: int, S: int, times: int = 1, **settings: tuple) -> Case:
    return Case(N, C, H, W, C * times, R, S, groups=C, **settings)


DEPTHWISE_CASES = [
    depthwise_case(2, 5, 9, 17, 3, 3, padding=(1, 1)),
    depthwise_case(1, 3, 70, 131, 3, 3),
    depthwise_case(1, 3, 21, 22, 3, 2, times=3, padding=(1, 0)),
    depthwise_case(2, 4, 15, 13, 5, 5, times=2, stride=(2, 2), padding=(2, 2)),
    depthwise_case(1, 2, 30, 17, 3, 3, stride=(2, 1), padding=(2, 2), dilation=(2, 3)),
    depthwise_case(1, 2, 37, 41, 11, 9, padding=(5, 4)),
    depthwise_case(1, 2, 17, 131, 7, 7, padding=(3, 2)),
    depthwise_case(2, 2, 33, 65, 3, 3, times=2, padding=(1, 1)),
    depthwise_case(1, 1, 9, 9, 3, 3, times=6, padding=(1, 1)),  # one input channel without groups
]
# Channels around tiles of 4, 16, 64 and 128, pixels around tiles of 128 and 512.
TILE_CASES = [
    Case(1, C, H, W, K, R, R, padding=(R // 2, R // 2))
    for (C, K), (H, W, R) in itertools.product(
        [(3, 5), (15, 4), (17, 15), (8, 64), (1, 65), (16, 63), (65, 2), (2, 129)],
        [(8, 16, 3), (1, 127, 1), (3, 43, 3), (19, 27, 1)],
    )
]


def drawn(draw: Callable) -> Callable:
    """From a function that draws a problem, or a tuple that begins with one, or None: a list of those with outputs."""

    @functools.wraps(draw)
    def draw_many(count: int, seed: int, **settings: object) -> list:
        rng, found = random.Random(seed), []
        while len(found) < count:
            one = draw(rng, **settings)
            if one and min((one if isinstance(one, Case) else one[0]).y_shape) > 0:
                found.append(one)
        return found

    return draw_many


def pair(rng: random.Random, low: int, high: int) -> tuple[int, int]:
    return rng.randint(low, high), rng.randint(low, high)


@drawn
def random_cases(rng: random.Random) -> Case:
    """Small problems of any kind."""
    groups = rng.choice([1, 1, 1, 2, 3])
    (H, W), (R, S), (C, K) = pair(rng, 1, 24), pair(rng, 1, 6), pair(rng, 1, 6)
    N, stride, padding, dilation = rng.randint(1, 3), pair(rng, 1, 4), pair(rng, 0, 5), pair(rng, 1, 3)
    return Case(N, C * groups, H, W, K * groups, R, S, stride, padding, dilation, groups)


EXACT_CASES = DENSE_CASES + DEPTHWISE_CASES + TILE_CASES + random_cases(40, seed=0)


def same_values(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))


# Long and short reductions, a depthwise one, a strided one; large enough that TF32 holds where the switch allows it.
ROUNDING_CASES = [
    Case(1, 9, 40, 37, 11, 5, 4, padding=(2, 1)),
    Case(2, 70, 12, 13, 10, 3, 3, stride=(2, 1), padding=(1, 1)),
    Case(1, 6, 40, 33, 6, 3, 3, padding=(1, 1), groups=6),
    Case(1, 512, 5, 6, 40, 3, 3),
]
FILLS = [normal, wide, tiny, huge, any_exponent, specks, under_a_tf32_step, tf32_ties, equal]
# float16 holds no wide range of sums.
OTHER_FILLS = [
    pytest.param(dtype, fill, id=f"{dtype} {fill.__name__}")
    for dtype, fill in itertools.product(DTYPES[1:], (normal, wide))
    if (dtype, fill) != (torch.float16, wide)
]


def named(value: object) -> str | None:
    return getattr(value, "__name__", None)


VIEWS = {
    "channels_last": lambda tensor: with_margins(tensor.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "sliced": lambda tensor: with_margins(F.pad(tensor, (2, 3, 1, 2), value=math.nan))[:, :, 1:-2, 2:-3],
    "every other": lambda tensor: with_margins(tensor.repeat_interleave(2, 3))[..., ::2],
    "transposed": lambda tensor: with_margins(tensor.transpose(0, 3)).transpose(0, 3),
    "expanded": lambda tensor: with_margins(tensor[:1, :, :, :1]).expand_as(tensor),
}


def without_padding(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """y, dx and dw of positive operands as sums over taps that meet the image: Inf times padding's zeros is no NaN."""
    results = {}
    for operator, names in OPERANDS.items():
        first, second = (tensors[name].double() for name in names)
        marks = product(operator, case, first.isinf(), torch.ones_like(second))
        marks += product(operator, case, torch.ones_like(first), second.isinf())
        finite = product(operator, case, first.nan_to_num(posinf=0), second.nan_to_num(posinf=0))
        results[operator] = finite.masked_fill(marks > 0, math.inf).float()
    return results


def before_guard_page(tensor: Tensor) -> Tensor:
    """A copy that ends where readable memory ends."""
    size, page = tensor.numel() * tensor.element_size(), mmap.PAGESIZE
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    no_access = ctypes.c_int(0)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + pages * page), ctypes.c_size_t(page), no_access) == 0
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=pages * page - size)
    return flat.view(tensor.shape).copy_(tensor)


# The depthwise engine. Columns around groups of 4 and 5, rows around bands, planes that one block takes many or few of,
# images wider and higher than a block, R != S, strides, dilations, more padding than filter, more outputs than inputs.
WINDOW_CASES = [
    depthwise_case(N, C, H, W, R, R, stride=(stride, stride), padding=(R // 2, R // 2))
    for (N, C), (H, W), (R, stride) in itertools.product(
        [(2, 34), (3, 2)],
        [(7, 7), (14, 14), (28, 28), (5, 3), (9, 17), (1, 1)],
        [(3, 1), (3, 2), (5, 1), (5, 2), (7, 1)],
    )
]
# Multiples of the 4 or 2 channels of one thread: 16-bit channels_last. Numbers of lanes that do not fill warps, several
# chunks of them and a prime number, images that are smaller than a window, bands of one row and of many.
QUEUE_CASES = [
    depthwise_case(N, C, H, W, taps, taps, stride=(stride, stride), padding=padding)
    for filters, images in [
        (
            [(3, 1), (3, 2)],
            [(2, 36, 9, 13, (1, 1)), (1, 260, 7, 7, (1, 1)), (1, 212, 5, 6, (0, 1)), (3, 4, 41, 17, (2, 0)),
             (2, 8, 1, 2, (4, 3)), (1, 22, 10, 9, (1, 1))],
        ),
        (
            [(5, 1), (5, 2), (7, 1), (7, 2)],
            [(2, 38, 9, 13, (3, 3)), (1, 130, 7, 7, (2, 3)), (2, 2, 23, 8, (0, 1)), (1, 6, 1, 2, (6, 5))],
        ),
    ]
    for (taps, stride), (N, C, H, W, padding) in itertools.product(filters, images)
]  # fmt: skip
ONE_TO_ONE_CASES = [
    *WINDOW_CASES,
    *QUEUE_CASES,
    *DEPTHWISE_CASES,
    depthwise_case(1, 2, 113, 56, 7, 7, padding=(3, 3)),
    depthwise_case(1, 1, 3, 921, 3, 3, padding=(1, 1)),  # wider than a block's threads
    depthwise_case(1, 3, 900, 6, 5, 5, padding=(2, 2)),  # higher than shared memory
    depthwise_case(2, 2, 6, 7, 3, 3, padding=(5, 6)),  # outputs that meet no input
    depthwise_case(3, 50, 6, 6, 3, 3, times=2, padding=(1, 1)),  # blocks that begin within an input's outputs
    depthwise_case(2, 8, 19, 26, 3, 3, padding=(3, 3), dilation=(3, 3)),
    depthwise_case(1, 2, 14, 40, 5, 4, padding=(4, 5), dilation=(2, 4), stride=(3, 1)),
    depthwise_case(1, 2, 33, 35, 31, 29, padding=(15, 14)),  # sums of many chunks
    depthwise_case(1, 2, 9, 70, 1, 64, padding=(0, 31)),
    depthwise_case(2, 3, 5, 6, 5, 6),  # one output
    # Dense planes from 7 outputs wide on: strips of 7 and the rest, runs that allow vectors of 16, 8 and 4 bytes.
    depthwise_case(3, 12, 20, 26, 3, 3, padding=(1, 1)),
    depthwise_case(2, 5, 12, 20, 7, 7, padding=(3, 2)),
    depthwise_case(2, 8, 22, 28, 7, 7, stride=(2, 2), padding=(3, 3)),
    depthwise_case(1, 2, 4, 5, 2, 2, stride=(4202600, 536870911)),
]
LAYOUTS = ["contiguous", "channels_last"]


def in_layout(tensors: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    if layout == "contiguous":
        return tensors
    return tensors | {name: VIEWS["channels_last"](tensors[name]) for name in ("x", "dy")}


@drawn
def random_depthwise_cases(rng: random.Random, most: int = 24) -> Case:
    R, S = rng.choice([(3, 3), (5, 5), (7, 7), pair(rng, 1, 9)])
    stride = rng.choice([(1, 1), (2, 2), pair(rng, 1, 4)])
    N, C, (H, W) = rng.randint(1, 3), rng.randint(1, most), pair(rng, 1, 2 * most)
    times, padding = rng.choice([1, 1, 2]), (rng.randint(0, R), rng.randint(0, S))
    dilation = rng.choice([(1, 1), pair(rng, 1, 3)])
    return depthwise_case(N, C, H, W, R, S, times, stride=stride, padding=padding, dilation=dilation)


def shifted(tensor: Tensor, elements: int) -> Tensor:
    """A copy that starts so many elements behind an aligned address, NaN before and behind it."""
    behind = with_margins(torch.cat([tensor.new_full((elements,), math.nan), tensor.flatten()]))
    return behind[elements:].view(tensor.shape)


# Kinds of adverse data that are contained all the same, or but for a few tiles.
CONTAINED_KINDS = {"zero rows", "zero images", "all zero", "faint output channel"}
MARKED_KINDS = {"1e-30 beside 1e30", "few small", "few large", "few denormals", "one outlier"}


def in_wider(tensor: Tensor, channels: int, behind: int) -> Tensor:
    """The same as some channels of a tensor that has so many more, with so many values behind each plane."""
    images, own, height, width = tensor.shape
    size = (images, own + channels, height * width + behind)
    wide = torch.full(size, math.nan, dtype=tensor.dtype, device=tensor.device)
    return wide[:, 4 : 4 + own, : height * width].unflatten(2, (height, width)).copy_(tensor)


@dataclasses.dataclass(frozen=True)
class Call:
    """Shapes and keyword arguments of one conv2d call, with a name that says what is special about it."""

    name: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    kwargs: dict = dataclasses.field(default_factory=dict)
    bias: int | None = None

    def __str__(self) -> str:
        return self.name

    def tensors(
        self, device: str, dtype: torch.dtype = torch.float64, requires_grad: bool = True
    ) -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(0)
        shapes = [self.x, self.w] + ([] if self.bias is None else [(self.bias,)])
        made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]
        return [tensor.requires_grad_(requires_grad) for tensor in made] + [None] * (3 - len(made))


# One case with everything in it. Sizes differ from one another; dx has rows that no filter meets.
RICH_CALL = Call(
    "rich", (2, 4, 8, 9), (6, 2, 3, 2), {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "groups": 2}, bias=6
)


def gradients(y: Tensor, tensors: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    wanted = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    weights = torch.arange(y.numel(), dtype=y.dtype, device=y.device).view(y.shape) % 7 - 3
    return torch.autograd.grad(y, wanted, weights)


def assert_same(ours: object, theirs: object) -> None:
    """Equal up to float64 rounding, in dtype, shape and memory format as well."""
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
    assert all(a.is_contiguous() == b.is_contiguous() for a, b in pairs)


ENGINES = list(modelnew._ENGINE_NAMES)


def computed(
    engine: str | None, case: Case, tensors: dict[str, Tensor], tf32: bool, operators: Collection[str]
) -> dict[str, Tensor]:
    """Results of these operators through the public functions; if an engine is named, it is forced for each of them."""
    wanted = {name: op for name, op in (("x", "dgrad"), ("w", "wgrad"), ("bias", "bgrad")) if op in operators}
    x, w, bias = (
        tensors[name].detach().requires_grad_(name in wanted) if name in tensors else None
        for name in ("x", "w", "bias")
    )

    def forced(yes: bool) -> contextlib.AbstractContextManager:
        return modelnew.force_engine(engine) if engine and yes else contextlib.nullcontext()

    with tf32_switch(tf32), poisoned_memory():
        with forced("fprop" in operators):
            y = modelnew.conv2d(x, w, bias, **case.kwargs)
        results = {"fprop": y.detach()} if "fprop" in operators else {}
        if wanted:
            leaves = [leaf for leaf in (x, w, bias) if leaf is not None and leaf.requires_grad]
            with forced(True):
                results |= zip(wanted.values(), torch.autograd.grad(y, leaves, tensors["dy"]), strict=True)
    return results


def on_gpu(
    case: Case, tensors: dict[str, Tensor], tf32_allowed: bool = False, engine: str | None = None
) -> dict[str, Tensor]:
    """y, dx, dw and db of a case; if an engine is named, those that it takes."""
    operators = taken(engine, case, tensors, tf32_allowed)
    return computed(engine, case, tensors, tf32_allowed, operators) if operators else {}


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors are full of NaN, so that elements which nobody writes show (torch 2.2 and later)."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def taken(engine: str | None, case: Case, tensors: dict[str, Tensor], tf32_allowed: bool) -> set[str]:
    """Operators of a case that the engine takes. All if none is named, or the last one: it must take them."""
    if engine in (None, ENGINES[-1]):
        return set(OPERATOR_NUMBER)
    with tf32_switch(tf32_allowed):
        text = modelnew.explain(tensors["x"], tensors["w"], tensors["bias"], **case.kwargs)
    lines = {"fprop": "forward", "dgrad": "dgrad", "wgrad": "wgrad", "bgrad": "bgrad"}
    takes = re.compile(rf"{engine};|.*; could be forced: (\w+, )*{engine}\b")
    return {
        operator for operator, line in lines.items() if re.search(rf"^{line}: ({takes.pattern})", text, re.MULTILINE)
    }


hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
