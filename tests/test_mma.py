"""The mma engine without a GPU: what it does unlike others."""

from __future__ import annotations

import ctypes

import torch

from tests.cases import Case, equal, make_tensors
from tests.emulation import PROBLEM_FIELDS
from tests.engines import problem_fields


def test_mma_divides_exactly(mma_plans):
    assert mma_plans.library.mma_wrong_divisor(0) == 0


def test_memo_tells_problems_apart_and_forgets_none_of_a_network(mma_plans):
    case = Case(2, 12, 13, 14, 15, 3, 4, (2, 1), (1, 2), (1, 2), groups=3)
    fields = problem_fields(case, make_tensors(case, torch.float32, equal), False)
    fault = mma_plans.library.mma_fault_of_memo
    fault.restype = ctypes.c_char_p
    assert fault(fields, len(PROBLEM_FIELDS), 0) == b""
