"""The mma engine without a GPU: what it does unlike others."""

from __future__ import annotations

import ctypes
import itertools

import torch

from tests.cases import OPERATOR_NUMBER, Case, equal, make_tensors
from tests.emulation import PROBLEM_FIELDS
from tests.engines import meta_tensors, problem_fields


def test_mma_divides_exactly(mma_plans):
    assert mma_plans.library.mma_wrong_divisor(0) == 0


def test_memo_tells_problems_apart_and_forgets_none_of_a_network(mma_plans):
    case = Case(2, 12, 13, 14, 15, 3, 4, (2, 1), (1, 2), (1, 2), groups=3)
    fields = problem_fields(case, make_tensors(case, torch.float32, equal), False)
    fault = mma_plans.library.mma_fault_of_memo
    fault.restype = ctypes.c_char_p
    assert fault(fields, len(PROBLEM_FIELDS), 0) == b""


def test_mma_clusters_find_room_at_once(mma_plans):
    """Where there are few tiles, on a GPU with room for as many clusters as an H200 has, for fewer, or for none."""
    for case in (
        Case(1, 256, 28, 28, 256, 3, 3, stride=(2, 2), padding=(1, 1)),
        Case(1, 512, 14, 14, 512, 3, 3, stride=(2, 2), padding=(1, 1)),
        Case(1, 512, 7, 7, 512, 3, 3, padding=(1, 1)),
    ):
        for tf32, room in itertools.product((True, False), ((66, 30, 15), (60, 28, 12), (66, 30, -1))):
            fields = problem_fields(case, meta_tensors(case), tf32)
            assert mma_plans.library.mma_waiting(OPERATOR_NUMBER["fprop"], fields, *room) == 0, (case, tf32, room)
