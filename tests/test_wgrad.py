"""The wgrad engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from tests.cases import DTYPES, Case, check_exact, integers, make_tensors
from tests.problems import dy_before_nan


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_wgrad_shim_takes_rows_with_nan_behind(wgrad_shim, dtype, rows):
    case = Case(2, 8, 6, 70 if rows else 7, 8, 3, 3, padding=(1, 1))
    tensors = make_tensors(case, dtype, integers)
    changed = tensors | {"dy": dy_before_nan(tensors["dy"], rows)}
    out = torch.full(case.w_shape, math.nan, dtype=dtype)
    assert wgrad_shim.run("wgrad", case, changed, out, seed=1) == ""
    check_exact(case, {"wgrad": out}, tensors)


# In the first two the copy of dy is one of images as rows without gaps, although x is none.
@pytest.mark.parametrize(
    "case, dtype",
    [
        (Case(2, 40, 35, 35, 4, 1, 1), torch.float32),
        (Case(2, 40, 69, 69, 4, 1, 1, stride=(2, 2)), torch.float16),
        (Case(2, 40, 29, 31, 4, 1, 1), torch.float16),
        (Case(2, 40, 35, 36, 4, 1, 1), torch.float32),
        (Case(2, 40, 35, 35, 4, 3, 3), torch.float16),
        (Case(2, 4, 35, 35, 40, 3, 3), torch.float32),
    ],
    ids=str,
)
def test_wgrad_shim_exact_where_copies_would_be_too_large(wgrad_shim, case, dtype):
    """The copy is that of x or of dy."""
    most = ctypes.c_int64.in_dll(wgrad_shim.library, "most_copied_bytes")
    before, most.value = most.value, 60_000
    try:
        fault = wgrad_shim.fault("wgrad", case, ("contiguous",) * 3, 1, dtype, shift=0, tile_k=64)
    finally:
        most.value = before
    assert fault == ""
