"""numerics.cuh and problem.cuh as plain C++: conversions, and which contract holds."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cases import DTYPES, OPERANDS, OPERATOR_NUMBER, Case, round_to_tf32, same_values
from tests.emulation import built_beside_the_tests, compile_shared, cpp
from tests.engines import meta_tensors, problem_fields


def build_host_numerics(folder: Path) -> ctypes.CDLL:
    library = compile_shared(cpp("plan_checks/numerics.cpp"), folder, "-O2")
    library.rule_uses_tf32.restype = library.scale.restype = ctypes.c_bool
    return library


host_numerics = built_beside_the_tests("host_numerics", build_host_numerics)


def convert(function: Callable, values: Tensor, dtype: torch.dtype) -> Tensor:
    result = torch.empty(values.shape, dtype=dtype)
    function(ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(result.data_ptr()), ctypes.c_int64(values.numel()))
    return result


def float_samples() -> Tensor:
    """Random bit patterns (every exponent, NaN and Inf among them), and all neighbours of values that 16 bits hold."""
    patterns = torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(0)).int()
    halves = torch.arange(-(2**15), 2**15).short().view(torch.float16).float().view(torch.int32)
    bfloats = torch.arange(-(2**15), 2**15).int() << 16
    steps = torch.tensor([-1, 0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001], dtype=torch.int32)
    near = torch.stack([halves, bfloats]).unsqueeze(-1) + steps
    special = torch.tensor([0x7FFFFFFF, 0x7F800000, 0x7F7FFFFF, 1, 0], dtype=torch.int32)
    return torch.cat([patterns, near.flatten(), special]).view(torch.float32)


@pytest.mark.parametrize("name, dtype", [("half", torch.float16), ("bfloat16", torch.bfloat16)])
def test_16_bit_conversions_are_torchs(host_numerics, name, dtype):
    every = torch.arange(-(2**15), 2**15).short().view(dtype)
    assert same_values(convert(getattr(host_numerics, f"widen_{name}"), every, torch.float32), every.float())
    samples = float_samples()
    assert same_values(convert(getattr(host_numerics, f"narrow_{name}"), samples, dtype), samples.to(dtype))


def test_tf32_rounding(host_numerics):
    """Ties away from zero; Inf and NaN stay, also the NaN whose bits would carry into the sign."""
    samples = float_samples()
    expected = torch.where(samples.isfinite(), round_to_tf32(samples), samples)
    assert same_values(convert(host_numerics.round_all, samples, torch.float32), expected)


def samples_near_fp16(exponent: int, *edges: float) -> Tensor:
    """All kinds of values, many of which 2^exponent takes into the range of fp16, or to those edges of it."""
    exponents = torch.randint(-20, 20, (1 << 18,), generator=torch.Generator().manual_seed(1))
    mantissas = float_samples()[: 1 << 18].view(torch.int32) & -0x7F800001
    near = (mantissas | (127 + exponents.int() - exponent).clamp(0, 254) << 23).view(torch.float32)
    steps = torch.arange(-0x2002, 0x2003, dtype=torch.int32)
    scaled = torch.tensor([edge / 2.0**exponent for edge in edges])
    beside = (scaled.view(torch.int32).unsqueeze(-1) + steps).flatten().view(torch.float32)
    return torch.cat([float_samples(), near, beside, -beside])


EXPONENTS = [-100, -20, -1, 0, 1, 13, 60, 100]


def contained(library: ctypes.CDLL, samples: Tensor, exponent: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Samples times 2^exponent in one part of fp16 or two, and whether each fits."""
    first, rest, fits = torch.empty_like(samples), torch.empty_like(samples), torch.empty(samples.shape).bool()
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (samples, first, rest, fits))
    library.contain_all(*pointers, ctypes.c_int64(samples.numel()), exponent, parts)
    assert fits.sum() > 1 << 16
    return first.double(), rest.double(), fits


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_fp16_contains_tf32(host_numerics, exponent):
    """Exactly the value rounded to TF32, wherever the watch says that it fits: zeros and normal numbers of fp16."""
    samples = samples_near_fp16(exponent, 2.0**-14, 2.0**16)
    first, _, fits = contained(host_numerics, samples, exponent, 1)
    rounded = torch.where(samples.isfinite(), round_to_tf32(samples), samples).double() * 2.0**exponent
    small = samples.double().abs() * 2.0**exponent < 2.0**-14  # as it is, unrounded
    assert torch.equal(fits, (samples == 0) | (~small & (rounded.abs() < 2.0**16)))
    assert torch.equal(first[fits], rounded[fits])


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_two_parts_of_fp16_contain_fp32(host_numerics, exponent):
    """To 2^-23, from 2^-13 on; and the first part to 2^-11: a product without that of the rests is right to 2^-21."""
    samples = samples_near_fp16(exponent, 2.0**-13, 65520.0)
    first, rest, fits = contained(host_numerics, samples, exponent, 2)
    values = samples.double() * 2.0**exponent
    assert torch.equal(fits, (samples == 0) | ((values.abs() >= 2.0**-13) & (values.abs() < 65520)))
    values, first, rest = values[fits], first[fits], rest[fits]
    assert torch.equal(first, values.half().double())
    assert ((first - values).abs() <= values.abs() * 2.0**-11).all()
    assert ((first + rest / 2048 - values).abs() <= values.abs() * 2.0**-23).all()


def test_scales_take_the_largest_value_where_it_belongs(host_numerics):
    exponent = ctypes.c_int()
    for field, to in itertools.product(range(256), (13, 14)):
        allowed = host_numerics.scale(field, to, ctypes.byref(exponent))
        assert allowed == (0 < field < 255 and abs(to + 127 - field) <= 100)
        assert exponent.value == (to + 127 - field if allowed else 0)


# Both sides of the rule's thresholds: 8 channels a group, 2^27 multiply-adds, 2^29 in wgrad, 2^24 of 64 channels in the
# forward but 2^29 of 1x1 at a stride; a huge problem; stems; weight gradients of filters of 49 taps from 3 channels.
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 8, 515, 515, 64, 4, 4),
        Case(1, 7, 515, 515, 64, 4, 4),
        Case(1, 56, 515, 515, 64, 4, 4, groups=8),
        Case(1, 128, 128, 256, 128, 1, 1),
        Case(1, 128, 128, 255, 128, 1, 1),
        Case(1, 128, 128, 63, 128, 1, 1),
        Case(1, 64, 64, 64, 64, 1, 1),
        Case(1, 64, 64, 63, 64, 1, 1),
        Case(1, 64, 64, 66, 63, 1, 1),
        Case(8, 64, 255, 256, 256, 1, 1, stride=(1, 2)),
        Case(8, 64, 256, 256, 512, 1, 1, stride=(2, 1)),
        Case(40000, 4096, 300, 300, 4096, 1, 1),
        Case(8, 3, 40, 40, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
        Case(8, 3, 38, 38, 64, 7, 7, stride=(2, 2), padding=(3, 3)),  # 2^24.7 multiply-adds
        Case(7, 3, 224, 224, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
        Case(8, 3, 224, 224, 128, 7, 7, padding=(3, 3)),
        Case(8, 4, 224, 224, 64, 7, 7, padding=(3, 3)),
        Case(8, 3, 224, 224, 768, 16, 16, stride=(16, 16)),
        Case(8, 3, 224, 224, 63, 16, 16, stride=(8, 8)),
        Case(8, 3, 112, 112, 128, 7, 7, stride=(4, 4), padding=(3, 3)),  # 2^26.8 multiply-adds
        Case(8, 3, 224, 224, 64, 6, 8, padding=(3, 3)),
        Case(8, 2, 224, 224, 64, 7, 8, padding=(3, 3)),
        *(Case(32, 4 * g, 56, 56, 4 * g, 3, 3, padding=(1, 1), groups=g) for g in (16, 24, 32)),
        Case(1, 128, 56, 56, 128, 3, 3, padding=(1, 1), groups=32),
        Case(32, 128, 56, 56, 256, 3, 3, padding=(1, 1), groups=32),
        Case(32, 128, 112, 112, 128, 3, 3, stride=(2, 2), padding=(1, 1), groups=32),
        Case(64, 128, 56, 56, 128, 1, 1, groups=32),
        Case(32, 192, 56, 56, 128, 3, 3, padding=(1, 1), groups=32),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_which_contract_holds(host_numerics, case, dtype):
    for allowed in (False, True):
        fields = problem_fields(case, meta_tensors(case, dtype), allowed)
        expected = case.tf32_operators(dtype, allowed)
        for name in OPERANDS:
            assert host_numerics.rule_uses_tf32(OPERATOR_NUMBER[name], fields) == (name in expected)
