"""The pointwise engine without a GPU: operands that come in stages."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cases import Case, check_exact, in_wider, integers, make_tensors

# Stages of 16, 32 and 64 terms; rows and pixels that fill tiles and do not, of one image and several.
POINTWISE_STAGED_CASES = [
    Case(2, 64, 5, 8, 40, 1, 1),
    Case(1, 64, 8, 16, 64, 1, 1),
    Case(3, 128, 2, 10, 33, 1, 1),
    Case(1, 128, 12, 12, 100, 1, 1),
    Case(1, 256, 12, 12, 35, 1, 1),
]


@pytest.mark.parametrize("case", POINTWISE_STAGED_CASES, ids=str)
def test_pointwise_shim_stages(pointwise_shim, case):
    """Integers, at addresses that are multiples of 16 bytes and, where there is no such plan, at others."""
    for row_bits in (0, 1):
        faults = {
            pointwise_shim.fault("fprop", case, "contiguous", seed, tf32=True, shift=shift, staged=1, row_bits=row_bits)
            for seed, shift in ((0, 0), (1, 0), (2, 1))
        }
        assert faults == {"", None}, f"{case}, {row_bits}: {faults}"
        assert pointwise_shim.last("stage_terms") == case.C // 4


def test_pointwise_shim_stages_slices(pointwise_shim):
    """Operands and outputs that are parts of larger tensors."""
    case = Case(2, 64, 5, 8, 40, 1, 1)
    tensors = make_tensors(case, torch.float32, integers)
    tensors |= {"x": in_wider(tensors["x"], 12, 4), "w": in_wider(tensors["w"], 4, 0)}
    out = in_wider(torch.full(case.y_shape, math.nan), 5, 8)
    assert pointwise_shim.run("fprop", case, tensors, out, tf32=True, staged=1) == ""
    check_exact(case, {"fprop": out}, tensors)
