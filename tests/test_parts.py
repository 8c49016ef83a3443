"""The engines that give parts of a problem to others, without a GPU: dilated, patches and strided."""

from __future__ import annotations

import math
import re

import pytest
import torch

from tests.cases import VIEWS, Case, check_exact, integers, make_tensors
from tests.problems import DILATED_CASES, PATCHES_CASES


@pytest.mark.parametrize("case, parts", [(DILATED_CASES[0], 4), (DILATED_CASES[1], 2), (DILATED_CASES[2], 1)])
def test_dilated_launches_few_parts(dilated_shim, case, parts):
    """One for each phase, or for a batch of phases of an image; and one in all where a tap is left."""
    before = dilated_shim.last("parts_launched")
    tensors = make_tensors(case, torch.float32, integers)
    assert dilated_shim.run("fprop", case, tensors, torch.empty(case.y_shape)) == ""
    assert dilated_shim.last("parts_launched") - before == parts
    assert re.match(rf"\d+ of 3x3 taps in {parts} parts, ", dilated_shim.describes("fprop", case))


@pytest.mark.parametrize("case", PATCHES_CASES, ids=str)
def test_patches_takes_weights_with_gaps(patches_shim, case):
    tensors = make_tensors(case, torch.float32, integers)
    for w in (VIEWS["channels_last"](tensors["w"]), tensors["w"].repeat(1, 1, 1, 2)[..., : case.S]):
        out = torch.full(case.y_shape, math.nan)
        assert patches_shim.run("fprop", case, tensors | {"w": w}, out) == ""
        check_exact(case, {"fprop": out}, tensors)


def test_patches_refuses_what_nobody_takes_the_rest_of(patches_shim):
    patches_shim.set("nobody_takes_the_rest", 1)
    try:
        case = Case(7, 3, 32, 32, 8, 16, 16, stride=(16, 16))
        assert "no other engine" in patches_shim.refusal("fprop", case)
    finally:
        patches_shim.set("nobody_takes_the_rest", 0)
