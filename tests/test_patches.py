"""The patches engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.cases import (
    DTYPES,
    LAYOUTS,
    OPERATOR_NUMBER,
    VIEWS,
    Case,
    check_exact,
    in_layout,
    integers,
    is_channels_last,
    make_tensors,
    references,
)
from tests.emulation import mutated
from tests.engines import ShimEngine
from tests.mutations import PATCHES_MUTATIONS

# Filters of multiples of 16 bytes and others; pixels that no patch has; an axis of one tap, or of one output; runs of a
# row in x that are aligned and not; several images.
PATCHES_CASES = [
    Case(2, 3, 8, 12, 5, 4, 4, stride=(4, 4)),
    Case(3, 2, 9, 17, 4, 4, 8, stride=(4, 8)),
    Case(2, 3, 14, 21, 4, 7, 7, stride=(7, 7)),
    Case(1, 5, 6, 7, 3, 2, 3, stride=(2, 3)),
    Case(2, 4, 5, 8, 4, 1, 4, stride=(1, 4)),
    Case(2, 4, 9, 6, 4, 3, 1, stride=(3, 1)),
    Case(2, 3, 5, 16, 4, 4, 4, stride=(9, 4)),
    Case(2, 3, 6, 8, 4, 6, 8, stride=(1, 1)),
    Case(1, 8, 8, 8, 4, 2, 2, stride=(2, 2)),
    Case(2, 1, 6, 8, 3, 3, 4, stride=(3, 4)),
]


def patches_tensors(case: Case, dtype: torch.dtype, layout: str, w_layout: str) -> dict[str, Tensor]:
    tensors = in_layout(make_tensors(case, dtype, integers), layout)
    views = {
        "contiguous": lambda w: w,
        "channels_last": VIEWS["channels_last"],
        "apart": lambda w: w.repeat(1, 1, 1, 2),
    }
    w = views[w_layout](tensors["w"])
    return tensors | {"w": w[..., : case.S]}


@pytest.mark.parametrize("w_layout", [*LAYOUTS, "apart"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", PATCHES_CASES, ids=str)
def test_patches_exact(patches_shim, case, layout, w_layout):
    """Integers, for x and weights of any order."""
    for dtype in DTYPES[:3]:
        tensors = patches_tensors(case, dtype, layout, w_layout)
        results = patches_shim(case, tensors)
        assert set(results) == {"fprop"}
        check_exact(case, results, tensors)


@pytest.mark.parametrize("view", VIEWS)
def test_patches_take_any_strides(patches_shim, view):
    for case in PATCHES_CASES[:3]:
        tensors = make_tensors(case, torch.float32, integers)
        tensors |= {name: VIEWS[view](tensors[name]) for name in ("x", "w")}
        check_exact(case, patches_shim(case, tensors), tensors)


@pytest.mark.parametrize("mutation", PATCHES_MUTATIONS)
def test_patches_tests_see_what_is_wrong(mutation, patches_shim):
    def with_room(tensor: Tensor) -> Tensor:
        """In the middle of much else: what is wrong may read far outside."""
        room = tensor.new_full((tensor.numel() + 2000,), math.nan)
        room[1000 : tensor.numel() + 1000] = (
            tensor.permute(0, 2, 3, 1).flatten() if is_channels_last(tensor) else tensor.flatten()
        )
        inside = room[1000:][: tensor.numel()]
        if is_channels_last(tensor):
            N, C, H, W = tensor.shape
            return inside.view(N, H, W, C).permute(0, 3, 1, 2)
        return inside.view(tensor.shape)

    def is_right(case: Case, layout: str, w_layout: str) -> bool:
        tensors = patches_tensors(case, torch.float32, layout, w_layout)
        tensors |= {"x": with_room(tensors["x"])}
        out = torch.full(case.y_shape, math.nan)
        with contextlib.suppress(AssertionError):
            patches_shim.run("fprop", case, tensors, False, out)
        return torch.equal(out.double(), references(case, tensors)["fprop"])

    kinds = list(itertools.product(PATCHES_CASES, LAYOUTS, LAYOUTS))
    assert all(is_right(*kind) for kind in kinds)
    with mutated(patches_shim.library, PATCHES_MUTATIONS, mutation):
        assert not all(is_right(*kind) for kind in kinds)


PATCHES_CASE = Case(2, 3, 32, 32, 8, 16, 16, stride=(16, 16))


@pytest.mark.parametrize(
    "case, operator, text",
    [
        (PATCHES_CASE, "fprop", None),
        (PATCHES_CASE, "dgrad", "outputs only"),
        (PATCHES_CASE, "wgrad", "outputs only"),
        (dataclasses.replace(PATCHES_CASE, stride=(16, 15)), "fprop", "a stride equal to the filter size"),
        (dataclasses.replace(PATCHES_CASE, padding=(0, 8)), "fprop", "a stride equal to the filter size"),
        (dataclasses.replace(PATCHES_CASE, H=64, dilation=(2, 1)), "fprop", "a stride equal to the filter size"),
        (dataclasses.replace(PATCHES_CASE, R=1, S=1, stride=(1, 1)), "fprop", "larger than 1x1"),
        (dataclasses.replace(PATCHES_CASE, C=6, groups=2), "fprop", "one group"),
        (Case(1 << 11, 3, 224, 224, 8, 16, 16, stride=(16, 16)), "fprop", "512 MB"),
    ],
    ids=str,
)
def test_patches_say_what_they_refuse(patches_shim, case, operator, text):
    shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
    fields = ShimEngine.fields(case, {k: torch.empty(v, device="meta") for k, v in shapes.items()}, False)
    refusal = patches_shim.library.engine_refusal(OPERATOR_NUMBER[operator], fields)
    assert (refusal is None) == (text is None), refusal
    assert text is None or text in refusal.decode()


def test_patches_yield_to_who_takes_them_whole(patches_shim):
    """And refuse what nobody takes the rest of."""
    yields, let_take = patches_shim.library.patches_yields, patches_shim.library.let_take
    yields.restype, let_take.argtypes = ctypes.c_char_p, [ctypes.c_bool, ctypes.c_bool]

    def reason(images: int, channels: int = 768, R: int = 16, dtype: torch.dtype = torch.float32) -> bytes | None:
        case = Case(images, 3, 224, 224, channels, R, R, stride=(R, R))
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        tensors = {name: torch.empty(shape, device="meta", dtype=dtype) for name, shape in shapes.items()}
        return yields(0, ShimEngine.fields(case, tensors, True))

    assert reason(1) is None
    assert reason(1, 100) == b"another engine may be faster with few multiply-adds"
    try:
        let_take(False, False)
        case = Case(7, 3, 32, 32, 8, 16, 16, stride=(16, 16))
        text = patches_shim.refuses("fprop", case, make_tensors(case, torch.float32, integers))
        assert text == b"no other engine computes the 1x1 convolution of the copy"
        let_take(True, True)
        assert reason(2) == b"another engine computes the problem without a copy of x"  # another size, as who takes a problem is remembered
        let_take(False, True)  # stem alone, which in 16 bits is slow with large filters
        for number, dtype in enumerate(DTYPES[:3]):
            assert (reason(3 + number, dtype=dtype) is None) == (dtype != torch.float32)
            assert reason(8 + number, R=4, dtype=dtype) == b"another engine computes the problem without a copy of x"
    finally:
        let_take(True, False)
