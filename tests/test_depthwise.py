"""The depthwise engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import ctypes
import itertools
import math
import random
import re

import pytest
import torch

from tests.cases import (
    DTYPES,
    LAYOUTS,
    OPERATOR_NUMBER,
    QUEUE_CASES,
    VIEWS,
    check_exact,
    depthwise_case,
    in_layout,
    input_pointers,
    integers,
    make_tensors,
    margins_intact,
    with_margins,
)
from tests.engines import PLACES, arranged, problem_fields


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("elements", [1, 2, 3, 5])
def test_depthwise_shim_takes_operands_that_begin_anywhere(depthwise_shim, elements, layout):
    """And writes outputs there: vectors only where they may be."""
    for case in (
        depthwise_case(2, 6, 12, 12, 3, 3, padding=(1, 1)),
        depthwise_case(2, 6, 14, 14, 7, 7, padding=(3, 3)),
        depthwise_case(2, 6, 16, 24, 5, 5, stride=(2, 2), padding=(2, 2)),
    ):
        for dtype, (operator, place) in itertools.product(DTYPES[:3], list(PLACES.items())[:3]):
            tensors = make_tensors(case, dtype, integers)
            layouts = {"x": layout, "dy": layout, "w": "contiguous"}
            moved = tensors | {name: arranged(tensors[name], of, elements) for name, of in layouts.items()}
            out = arranged(torch.full_like(tensors[place], math.nan), layouts[place], elements)
            assert depthwise_shim.run(operator, case, moved, out) == ""
            check_exact(case, {operator: out}, tensors)


def test_depthwise_ring_in_any_shape(depthwise_shim):
    """Chunks of one step to all, 1 to 3 slots, images and rows divided among blocks, few planes and many."""
    rng = random.Random(0)
    ran = 0
    while ran < 100:
        R, stride = rng.choice([3, 7]), rng.choice([1, 2])
        H, W = (rng.choice([7, 8, 14, 15, 16, 28, 33, 40]) for _ in range(2))
        padding = rng.choice([(R // 2, R // 2), (rng.randint(0, R // 2), rng.randint(0, R // 2))])
        if min(H, W) + 2 * min(padding) < R:
            continue
        case = depthwise_case(
            rng.randint(1, 5), rng.choice([1, 3, 8, 12, 40]), H, W, R, R, stride=(stride, stride), padding=padding
        )
        operator = rng.choice(["fprop", "dgrad"])
        if operator == "dgrad" and stride > 1:
            continue
        tensors = make_tensors(case, rng.choice(DTYPES[:3]), integers, seed=ran)
        out = with_margins(torch.full_like(tensors["dy" if operator == "fprop" else "x"], math.nan))
        wish = (ctypes.c_int * 6)(*(rng.choice([0, rng.randint(1, most)]) for most in (20, 20, 12, 3, 5, 9)))
        pointers = (ctypes.c_void_p * 5)(*input_pointers(operator, tensors), out.data_ptr())
        fields = problem_fields(case, tensors, False)
        code = depthwise_shim.library.depthwise_ring(OPERATOR_NUMBER[operator], fields, pointers, wish)
        if code == -1:
            continue
        ran += 1
        assert code == 0, (case, list(wish), depthwise_shim.library.simt_message())
        check_exact(case, {operator: out}, tensors)
        assert margins_intact(out), (case, list(wish))


@pytest.mark.parametrize("case", QUEUE_CASES, ids=str)
def test_depthwise_queue_in_any_shape(depthwise_shim, case):
    """Bands of one row to all, outputs between margins, both gradients' directions."""
    shapes_reached = set()
    for dtype, band_rows in itertools.product([torch.float16, torch.bfloat16], [1, 2, 5, case.y_shape[2]]):
        tensors = in_layout(make_tensors(case, dtype, integers), "channels_last")
        for shape, (operator, place) in itertools.product(range(16), (("fprop", "dy"), ("dgrad", "x"))):
            if operator == "dgrad" and max(case.stride) > 1:
                continue
            out = VIEWS["channels_last"](with_margins(torch.full_like(tensors[place].contiguous(), math.nan)))
            pointers = (ctypes.c_void_p * 5)(*input_pointers(operator, tensors), out.data_ptr())
            fields = problem_fields(case, tensors, False)
            number = OPERATOR_NUMBER[operator]
            code = depthwise_shim.library.depthwise_queue(number, fields, pointers, shape, band_rows)
            if code == -1:  # of another filter
                continue
            assert code == 0, (operator, shape, band_rows, depthwise_shim.library.simt_message())
            check_exact(case, {operator: out}, tensors)
            assert margins_intact(out.permute(0, 2, 3, 1) if not out.is_contiguous() else out)
            shapes_reached.add(shape)
    assert len(shapes_reached) == (2 if case.w_shape[2] == 3 and case.x_shape[1] % 4 == 0 else 1)


def test_depthwise_has_a_plan_for_every_problem_of_its_kind(depthwise_shim):
    """Random ones: a tile within 48 KB of shared memory and 2^31 blocks, in both layouts."""
    rng = random.Random(0)
    size = lambda most: int(2 ** rng.uniform(0, math.log2(most)))  # noqa: E731
    planned = 0
    while planned < 3000:
        R, S = rng.choice([(3, 3), (5, 5), (7, 7), (size(31), size(31))])
        case = depthwise_case(
            size(1 << 20), size(4096), size(2048), size(2048), R, S, rng.choice([1, 1, 2, 5]),
            stride=rng.choice([(1, 1), (2, 2), (size(8), size(8))]), padding=(rng.randint(0, R), rng.randint(0, S)),
            dilation=rng.choice([(1, 1), (1, 1), (size(4), size(4))]),
        )  # fmt: skip
        if min(case.y_shape) <= 0 or math.prod(case.x_shape) > 1 << 40:
            continue
        planned += 1
        settings = {"dtype": rng.choice(DTYPES[:3]), "layout": rng.choice(LAYOUTS)}
        for operator in ("fprop", "dgrad", "wgrad"):
            refusal = depthwise_shim.refusal(operator, case, **settings)
            if refusal is None:
                text = depthwise_shim.describes(operator, case, **settings)
                smem, blocks = map(int, re.search(r"(\d+) bytes of shared memory, (\d+) blocks", text).groups())
                assert 0 <= smem <= 48 << 10
                assert 0 < blocks < 1 << 31
            else:
                assert operator == "dgrad" or "2^31" in refusal or max(case.dilation) > 1, (case, refusal)
