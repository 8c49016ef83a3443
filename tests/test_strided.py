"""The strided engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import ctypes
import math
import random

import pytest
import torch

from tests.cases import LAYOUTS, OPERATOR_NUMBER, Case, in_layout, integers, make_tensors, references
from tests.emulation import mutated
from tests.engines import ShimEngine
from tests.mutations import STRIDED_MUTATIONS

STRIDED_CASES = [
    Case(2, 9, 7, 9, 10, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(2, 9, 8, 10, 8, 1, 1, stride=(2, 2)),  # phases of zeros
    Case(1, 8, 13, 9, 9, 5, 4, stride=(3, 2), padding=(2, 3)),
    Case(1, 8, 12, 15, 8, 2, 2, stride=(4, 3), padding=(1, 0)),  # rows that no filter meets
    Case(1, 8, 6, 7, 8, 3, 3, stride=(2, 2), padding=(2, 2), dilation=(2, 2)),  # the same taps for all that any meets
    Case(1, 8, 19, 20, 8, 3, 3, stride=(4, 2), padding=(6, 3), dilation=(2, 3)),
    Case(2, 16, 9, 8, 24, 3, 3, stride=(1, 2), padding=(0, 1), groups=2),
    Case(1, 8, 5, 30, 8, 4, 3, stride=(9, 2), padding=(0, 1)),  # one row of outputs
]


def dgrad_of_strided(engine: ShimEngine, case: Case, layout: str, dtype: torch.dtype = torch.float32) -> bool:
    tensors = in_layout(make_tensors(case, dtype, integers), layout)
    out = torch.full_like(tensors["x"], math.nan)
    result = engine.run("dgrad", case, tensors, False, out)
    return torch.equal(result, references(case, tensors)["dgrad"].to(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", STRIDED_CASES, ids=str)
def test_strided_exact(strided_shim, case, layout):
    assert dgrad_of_strided(strided_shim, case, layout)
    assert dgrad_of_strided(strided_shim, case, layout, torch.float16)


def test_strided_exact_at_random(strided_shim):
    rng, taken = random.Random(0), 0
    for _ in range(200):
        pair = lambda low, high: (rng.randint(low, high), rng.randint(low, high))  # noqa: E731
        (H, W), (R, S) = pair(1, 20), pair(1, 5)
        case = Case(
            rng.randint(1, 2), rng.randint(1, 9), H, W, rng.randint(1, 9), R, S, pair(1, 4), pair(0, 5), pair(1, 3)
        )
        if min(case.y_shape) < 1:
            continue
        fields = ShimEngine.fields(case, make_tensors(case, torch.float32, integers), False)
        if strided_shim.library.engine_refusal(OPERATOR_NUMBER["dgrad"], fields) is not None:
            continue
        taken += 1
        assert dgrad_of_strided(strided_shim, case, LAYOUTS[0]), case
    assert taken > 60


@pytest.mark.parametrize("mutation", STRIDED_MUTATIONS)
def test_strided_tests_see_what_is_wrong(mutation, strided_shim):
    with mutated(strided_shim.library, STRIDED_MUTATIONS, mutation):
        assert not all(dgrad_of_strided(strided_shim, case, LAYOUTS[0]) for case in STRIDED_CASES)


@pytest.mark.parametrize(
    "case, operator, text",
    [
        (STRIDED_CASES[0], "fprop", "it computes input gradients only"),
        (Case(1, 8, 9, 9, 8, 3, 3), "dgrad", "it requires a stride greater than 1 along an axis with more than one output"),
        (Case(1, 8, 9, 9, 8, 9, 9, stride=(2, 2)), "dgrad", "it requires a stride greater than 1 along an axis with more than one output"),  # one output
        (Case(1, 8, 30, 30, 8, 3, 3, stride=(5, 4)), "dgrad", "it splits the input into at most 16 phases, stride_h times stride_w"),
    ],
)
def test_strided_says_what_it_refuses(strided_shim, case, operator, text):
    tensors = make_tensors(case, torch.float32, integers)
    assert strided_shim.refuses(operator, case, tensors).decode() == text


def test_strided_yields_with_little_work(strided_shim):
    for case, yields in (
        (Case(1, 64, 56, 56, 64, 3, 3, stride=(2, 2), padding=(1, 1)), True),
        (Case(32, 64, 56, 56, 64, 3, 3, stride=(2, 2), padding=(1, 1)), False),
        (Case(256, 4, 56, 56, 64, 3, 3, stride=(2, 2), padding=(1, 1)), True),
    ):
        tensors = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        fields = ShimEngine.fields(case, {k: torch.empty(v, device="meta") for k, v in tensors.items()}, True)
        strided_shim.library.strided_yields.restype = ctypes.c_char_p
        assert (strided_shim.library.strided_yields(OPERATOR_NUMBER["dgrad"], fields) is not None) == yields
