"""The dilated engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import contextlib
import ctypes
import math
import random
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.cases import LAYOUTS, Case, check_exact, in_layout, integers, make_tensors, references
from tests.emulation import mutated
from tests.engines import ShimEngine
from tests.mutations import DILATED_MUTATIONS
from tests.problems import REFUSAL


def random_dilated_cases(count: int, seed: int) -> Iterator[Case]:
    """Filters that reach as far as the image or farther, with any padding; others than these are among them."""
    rng = random.Random(seed)
    while count > 0:
        groups = rng.choice([1, 1, 2])
        dilation = (rng.randint(1, 9), rng.randint(1, 9))
        case = Case(
            rng.choice([1, 2, 7]),
            groups * rng.randint(1, 4),
            rng.randint(3, 24),
            rng.randint(1, 20),
            groups * rng.randint(1, 5),
            rng.choice([1, 2, 3, 3, 4]),
            rng.choice([1, 2, 3, 3]),
            stride=(rng.choice([1, 1, 1, 2]), rng.choice([1, 1, 2])),
            padding=(
                rng.choice([0, dilation[0], rng.randint(0, 20)]),
                rng.choice([0, dilation[1], rng.randint(0, 20)]),
            ),
            dilation=dilation,
            groups=groups,
        )
        if min(case.y_shape) > 0:
            count -= 1
            yield case


def check_dilated(shim: ShimEngine, case: Case, layout: str) -> set[str]:
    tensors = in_layout(make_tensors(case, torch.float32, integers), layout)
    results = shim(case, tensors)
    check_exact(case, results, tensors)
    return set(results)


# Phases of all images and of one; the pyramid of a network for segmentation in small, of which most taps are idle; as
# many rows as phases; a padding that is no multiple of the dilation, or wider than the image.
DILATED_CASES = [
    Case(7, 3, 13, 11, 4, 3, 3, padding=(4, 4), dilation=(4, 4)),
    Case(1, 3, 13, 11, 4, 3, 3, padding=(6, 6), dilation=(6, 6)),
    Case(2, 3, 7, 7, 4, 3, 3, padding=(9, 9), dilation=(9, 9)),
    Case(2, 2, 6, 5, 3, 2, 1, padding=(3, 0), dilation=(6, 1)),
    Case(2, 2, 9, 9, 3, 3, 3, padding=(5, 1), dilation=(3, 2)),
    Case(1, 4, 8, 6, 2, 5, 3, padding=(17, 2), dilation=(4, 2), groups=2),
    Case(3, 2, 5, 9, 3, 3, 3, stride=(2, 2), padding=(6, 1), dilation=(6, 1)),
    Case(1, 2, 7, 5, 3, 2, 1, padding=(1, 0), dilation=(3, 1)),  # phases of as many rows of y, but not of x
    Case(1, 2, 9, 7, 3, 2, 2, padding=(0, 2), dilation=(2, 8)),  # a tap meets the last column alone
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", DILATED_CASES, ids=str)
def test_dilated_exact(dilated_shim, case, layout):
    assert "fprop" in check_dilated(dilated_shim, case, layout)


def test_dilated_exact_at_random(dilated_shim):
    taken = [check_dilated(dilated_shim, case, LAYOUTS[0]) for case in random_dilated_cases(300, seed=0)]
    assert sum("fprop" in operators for operators in taken) > 100
    assert sum("dgrad" in operators for operators in taken) > 80


@pytest.mark.parametrize("case, parts", [(DILATED_CASES[0], 4), (DILATED_CASES[1], 2), (DILATED_CASES[2], 1)])
def test_dilated_launches_few_parts(dilated_shim, case, parts):
    """One for each phase, or for a batch of phases of an image; and one in all where a tap is left."""
    launched = ctypes.c_int.in_dll(dilated_shim.library, "parts_launched")
    before = launched.value
    tensors = make_tensors(case, torch.float32, integers)
    dilated_shim.run("fprop", case, tensors, False, torch.empty(case.y_shape))
    assert launched.value - before == parts
    text = dilated_shim.describes("fprop", case, tensors)
    assert re.match(rf"\d+ of 3x3 taps in {parts} parts, the first of \d+ x \d+ rows by gather: ", text), text


@pytest.mark.parametrize("mutation", DILATED_MUTATIONS)
def test_dilated_tests_see_what_is_wrong(mutation, dilated_shim):
    def with_room(tensor: Tensor) -> Tensor:
        """In the middle of much else: what is wrong may read and write far outside."""
        room = tensor.new_full((tensor.numel() + (2 << 20),), math.nan)
        room[1 << 20 : tensor.numel() + (1 << 20)] = tensor.flatten()
        return room[1 << 20 :][: tensor.numel()].view(tensor.shape)

    def is_right(case: Case) -> bool:
        tensors = {name: with_room(one) for name, one in make_tensors(case, torch.float32, integers).items()}
        out = with_room(torch.full(case.y_shape, math.nan))
        with contextlib.suppress(AssertionError):
            dilated_shim.run("fprop", case, tensors, False, out)
        return torch.equal(out.double(), references(case, tensors)["fprop"])

    assert all(map(is_right, DILATED_CASES))
    with mutated(dilated_shim.library, DILATED_MUTATIONS, mutation):
        assert not all(map(is_right, DILATED_CASES))


@pytest.mark.parametrize(
    "case, operator, text",
    [
        (Case(2, 3, 9, 9, 4, 3, 3, dilation=(2, 2)), "wgrad", "outputs and input gradients only"),
        (Case(2, 3, 9, 9, 4, 3, 3), "fprop", "dilation_h greater than 1"),
        (Case(2, 3, 9, 9, 4, 3, 3, dilation=(1, 2)), "fprop", "dilation_h greater than 1"),
        (Case(2, 3, 1, 9, 4, 3, 3, padding=(1, 1), dilation=(1, 2)), "fprop", "dilation_h greater than 1"),  # idle, but near
        (Case(2, 3, 9, 9, 4, 3, 3, padding=(4, 4), dilation=(4, 4), stride=(2, 1)), "fprop", "stride_h of 1"),
        (Case(2, 3, 9, 9, 4, 3, 3, padding=(1, 1), dilation=(4, 4)), "fprop", "at most the number of rows"),
        (Case(1, 3, 999, 1, 4, 2, 1, dilation=(300, 1)), "fprop", "at most 256"),
        (Case(2, 3, 1, 9, 4, 2, 3, padding=(9, 0), dilation=(19, 2)), "fprop", "falls into the padding"),
    ],
)
def test_dilated_says_what_it_refuses(dilated_shim, case, operator, text):
    refusal = dilated_shim.refuses(operator, case, make_tensors(case, torch.float32, integers))
    assert REFUSAL.fullmatch(refusal.decode())
    assert text in refusal.decode()


def test_dilated_yields_to_who_is_as_fast(dilated_shim):
    """To an engine that takes it whole, unless the estimates of parts are far less; or to direct, by the work."""
    yields, set_whole = dilated_shim.library.dilated_yields, dilated_shim.library.set_whole_cycles
    yields.restype, set_whole.argtypes = ctypes.c_char_p, [ctypes.c_double, ctypes.c_char]

    def fields_of(images: int) -> ctypes.Array:
        case = Case(images, 256, 28, 28, 256, 3, 3, padding=(24, 24), dilation=(24, 24))
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        return ShimEngine.fields(case, tensors, True)

    for images, expected in ((1, b"direct is faster if the parts have few multiply-adds"), (32, None)):
        assert yields(0, fields_of(images)) == expected
    # Others, because who takes a problem is remembered.
    # By mma less is enough, as gather does not take them whole; of gather by taps a part takes 8250 more.
    bounds = {b"w": (1400, 1600), b"m": (850, 950), b"g": (9800, 10200)}
    asked = (2, 4, b"w"), (33, 24, b"w"), (3, 6, b"m"), (34, 24, b"m"), (4, 8, b"g"), (35, 24, b"g")
    for images, parts, taker in asked:
        try:
            for cycles, faster in zip(bounds[taker], (False, True), strict=True):
                set_whole(cycles * parts, taker)
                assert yields(0, fields_of(images)) == (None if faster else b"an engine that computes the problem as a whole is as fast")
        finally:
            set_whole(0, b"\0")
