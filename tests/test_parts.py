"""Engines that give parts to others, at the limits of that: see emulation/parts.h."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.cases import Case, integers, make_tensors, reference


def test_patches_refuses_without_an_engine_for_the_rest(patches_shim):
    patches_shim.set("takes_the_rest", 0)
    try:
        case = Case(7, 3, 32, 32, 8, 16, 16, stride=(16, 16))
        assert "no other engine" in patches_shim.refusal("fprop", case)
    finally:
        patches_shim.set("takes_the_rest", 1)


@pytest.mark.parametrize(
    "limit, most", [*(("kMostDenseBytes", most) for most in (1, 1500, 4000)), ("kMostSpreadValues", 1)]
)
def test_strided_fills_few_images_at_a_time_and_large_ones_in_place(strided_shim, limit, most):
    value = ctypes.c_int64.in_dll(strided_shim.library, f"limit_{limit}")
    before, value.value = value.value, most
    try:
        for case in (Case(5, 8, 9, 10, 8, 1, 1, stride=(2, 2)), Case(7, 8, 3, 7, 16, 2, 1, stride=(3, 2))):
            tensors = make_tensors(case, torch.float32, integers)
            dx = strided_shim.result("dgrad", case, tensors)
            assert torch.equal(dx, reference("dgrad", case, tensors).to(dx.dtype))
    finally:
        value.value = before
