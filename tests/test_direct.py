"""The direct engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import ctypes
import functools
import math
import struct

import pytest
import torch
import torch.nn.functional as F

from tests.cases import (
    DENSE_CASES,
    DTYPES,
    LEAST_TF32_WORK_IN_SHIM,
    OPERANDS,
    VIEWS,
    Case,
    before_guard_page,
    check_exact,
    in_wider,
    integers,
    make_tensors,
    margins_intact,
    references,
    shifted,
    under_a_tf32_step,
    with_margins,
    without_padding,
)
from tests.engines import Emulated


def test_direct_shim_without_bias(direct_shim):
    case = DENSE_CASES[2]
    tensors = make_tensors(case, torch.float32, integers)
    y = direct_shim(case, {name: tensors[name] for name in ("x", "w", "dy")})["fprop"]
    assert torch.equal(y, F.conv2d(tensors["x"], tensors["w"], **case.kwargs))


def test_direct_shim_propagates_nan_and_inf(direct_shim):
    """Into exactly the elements that read them; under TF32 too, and for the NaN with all bits set."""
    case = Case(1, 16, 40, 37, 8, 3, 3)
    assert case.tf32_operators(torch.float32, True, LEAST_TF32_WORK_IN_SHIM) == set(OPERANDS)
    for special in (math.inf, -math.inf, struct.unpack("f", b"\xff\xff\xff\x7f")[0]):
        tensors = make_tensors(case, torch.float32, under_a_tf32_step)
        tensors["x"][0, 3, 5, 7] = tensors["dy"][0, 2, 30, 4] = special
        results, expected = direct_shim(case, tensors, tf32=True), references(case, tensors)
        for operator, result in results.items():
            assert torch.equal(result.isnan(), expected[operator].isnan()), operator
            assert torch.equal(result.isinf(), expected[operator].isinf()), operator


@pytest.mark.parametrize("infinite", ["w", "dy"])
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 2, 9, 11, 2, 3, 3, padding=(1, 1), groups=2),
        Case(1, 2, 9, 11, 2, 5, 5, padding=(2, 2), groups=2),
        Case(1, 2, 9, 11, 2, 7, 7, padding=(3, 4), groups=2),
        Case(1, 2, 9, 12, 2, 3, 3, stride=(2, 1), padding=(1, 1), groups=2),
        Case(1, 2, 9, 12, 2, 3, 2, padding=(2, 1), dilation=(2, 3), groups=2),
    ],
    ids=str,
)
def test_direct_shim_skips_padding_in_depthwise(case, infinite, direct_shim):
    """As PyTorch does in depthwise convolutions; an Inf multiplied by the zero of padding would be NaN."""
    tensors = make_tensors(case, torch.float32, lambda shape, generator: torch.rand(shape, generator=generator) + 0.5)
    tensors.pop("bias")
    tensors[infinite][..., -1, -1] = math.inf
    tensors[infinite][..., 0, 0] = math.inf
    expected, results = without_padding(case, tensors), direct_shim(case, tensors)
    for operator, result in expected.items():
        assert not result.isnan().any()
        torch.testing.assert_close(results[operator], result, rtol=1e-5, atol=1e-5)


def test_direct_shim_beyond_one_launch(direct_shim):
    """Images in several launches, all pixels of dw in one block."""
    lowered = {"kMostBlocks": 5, "kWeightGradBlocks": 1, "kDepthwiseWgradBlocks": 1}
    limits = [ctypes.c_int64.in_dll(direct_shim.library, f"limit_{name}") for name in lowered]
    before = [limit.value for limit in limits]
    for limit, value in zip(limits, lowered.values(), strict=True):
        limit.value = value
    try:
        check_small_launches(direct_shim)
    finally:
        for limit, value in zip(limits, before, strict=True):
            limit.value = value


def check_small_launches(direct_shim: Emulated) -> None:
    for case in (
        Case(7, 3, 9, 10, 5, 3, 3, padding=(1, 1)),
        Case(6, 2, 12, 11, 3, 2, 3, stride=(2, 2)),
        Case(11, 1, 40, 37, 1, 3, 3, padding=(1, 1)),
    ):
        tensors = make_tensors(case, torch.float32, integers)
        check_exact(case, direct_shim(case, tensors), tensors)


# Rows shorter than a load; channels that fill no load, alone or several pixels together; strips of a row; several
# splits by planes and by pixels; single pixels.
BIAS_SHAPES = [(2, 65, 1, 3), (3, 21, 5, 4), (2, 6, 3, 1), (1, 2, 90, 130), (7, 136, 8, 13), (1, 1, 30, 300)]
BIAS_SHAPES += [(33, 24, 1, 1), (5, 24, 7, 7), (2, 40, 3, 16), (3, 300, 2, 5), (1, 1030, 3, 3)]
LAST = VIEWS["channels_last"]
BIAS_VIEWS = VIEWS | {
    "ends where memory does": before_guard_page,
    "ends where memory does, channels_last": lambda dy: before_guard_page(dy.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "sliced, channels_last": lambda dy: VIEWS["sliced"](dy.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "gaps behind planes": lambda dy: in_wider(dy, 4, 3),
    "the same images": lambda dy: dy[:1].expand_as(dy),
    **{f"shifted by {by}": functools.partial(shifted, elements=by) for by in (0, 1, 2, 3, 5)},
    "shifted, channels_last": lambda dy: shifted(dy.permute(0, 2, 3, 1), 3).permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("view", BIAS_VIEWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_gradient_of_any_strides(direct_shim, dtype, view):
    """Exact on integers: every element is added once, and nothing else is."""
    for N, K, P, Q in BIAS_SHAPES:
        case = Case(N, 1, P, Q, K, 1, 1)
        tensors = make_tensors(case, dtype, integers)
        tensors["dy"] = BIAS_VIEWS[view](tensors["dy"])
        out = with_margins(torch.full((K,), math.nan, dtype=dtype))
        assert direct_shim.run("bgrad", case, tensors, out) == "", case
        assert torch.equal(out, tensors["dy"].double().sum((0, 2, 3)).to(dtype)), case
        assert margins_intact(out)
