"""The direct engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import ctypes
import math
import struct

import torch

from tests.cases import (
    LEAST_TF32_WORK_IN_SHIM,
    OPERANDS,
    Case,
    check_exact,
    integers,
    make_tensors,
    references,
    under_a_tf32_step,
)


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


def test_direct_shim_beyond_one_launch(direct_shim):
    """Images in several launches, all pixels of dw in one block."""
    lowered = {"kMostBlocks": 5, "kWeightGradBlocks": 1, "kDepthwiseWgradBlocks": 1}
    limits = [ctypes.c_int64.in_dll(direct_shim.library, f"limit_{name}") for name in lowered]
    before = [limit.value for limit in limits]
    for limit, value in zip(limits, lowered.values(), strict=True):
        limit.value = value
    try:
        for case in (
            Case(7, 3, 9, 10, 5, 3, 3, padding=(1, 1)),
            Case(6, 2, 12, 11, 3, 2, 3, stride=(2, 2)),
            Case(11, 1, 40, 37, 1, 3, 3, padding=(1, 1)),
        ):
            tensors = make_tensors(case, torch.float32, integers)
            check_exact(case, direct_shim(case, tensors), tensors)
    finally:
        for limit, value in zip(limits, before, strict=True):
            limit.value = value
