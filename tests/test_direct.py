"""The direct engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import ctypes
import functools
import math

import pytest
import torch

from tests.cases import (
    DTYPES,
    VIEWS,
    Case,
    before_guard_page,
    check_exact,
    in_wider,
    integers,
    make_tensors,
    margins_intact,
    shifted,
    with_margins,
)


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


# Rows shorter than a load; channels that fill no load, alone or several pixels together; strips of a row; several
# splits by planes and by pixels; single pixels.
BIAS_SHAPES = [(2, 65, 1, 3), (3, 21, 5, 4), (2, 6, 3, 1), (1, 2, 90, 130), (7, 136, 8, 13), (1, 1, 30, 300)]
BIAS_SHAPES += [(33, 24, 1, 1), (5, 24, 7, 7), (2, 40, 3, 16), (3, 300, 2, 5), (1, 1030, 3, 3)]
BIAS_VIEWS = VIEWS | {
    "ends where memory does": before_guard_page,
    "gaps behind planes": lambda dy: in_wider(dy, 4, 3),
    "the same images": lambda dy: dy[:1].expand_as(dy),
    **{f"shifted by {by}": functools.partial(shifted, elements=by) for by in (0, 1, 2, 3, 5)},
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("view", BIAS_VIEWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_gradient_of_any_strides(direct_shim, dtype, view, last):
    """Exact on integers: every element is added once, and nothing else is."""
    for N, K, P, Q in BIAS_SHAPES:
        case = Case(N, 1, P, Q, K, 1, 1)
        tensors = make_tensors(case, dtype, integers)
        dy, change = tensors["dy"], BIAS_VIEWS[view]
        tensors["dy"] = change(dy.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if last else change(dy)
        out = with_margins(torch.full((K,), math.nan, dtype=dtype))
        assert direct_shim.run("bgrad", case, tensors, out) == "", case
        assert torch.equal(out, tensors["dy"].double().sum((0, 2, 3)).to(dtype)), case
        assert margins_intact(out)
