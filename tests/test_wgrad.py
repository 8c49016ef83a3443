"""The wgrad engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import random

import pytest
import torch

from tests.cases import (
    DTYPES,
    LAYOUTS,
    LEAST_TF32_WORK,
    OPERATOR_NUMBER,
    VIEWS,
    Case,
    before_guard_page,
    check_bounds,
    check_exact,
    in_layout,
    integers,
    make_tensors,
    positive,
    product,
    tf32_ties,
    under_a_tf32_step,
    wide,
)
from tests.emulation import mutated
from tests.engines import WgradShim
from tests.mutations import WGRAD_MUTATIONS, WGRAD_SHIM_MUTATIONS
from tests.problems import dy_before_nan, random_wgrad_case


def test_wgrad_plans_are_sound(wgrad_plans):
    """And there is one of each kind."""
    faults, kinds = wgrad_plans.faults(3000, seed=0)
    assert faults == []
    assert kinds == set(range(9))


@pytest.mark.parametrize("mutation", WGRAD_MUTATIONS)
def test_wgrad_plans_are_seen_to_be_wrong(mutation, wgrad_plans):
    with mutated(wgrad_plans.library, WGRAD_MUTATIONS, mutation):
        faults, _ = wgrad_plans.faults(600, seed=1)
    assert faults


def test_wgrad_estimates_grow_with_the_batch(wgrad_plans):
    rng = random.Random(2)
    for _ in range(100):
        case = random_wgrad_case(rng)
        if min(case.y_shape) < 1:
            continue
        fields = [
            wgrad_plans.fields(dataclasses.replace(case, N=case.N * times), torch.float32, LAYOUTS[0])
            for times in (1, 2, 4)
        ]
        if any(wgrad_plans.library.wgrad_refusal(OPERATOR_NUMBER["wgrad"], one) for one in fields):
            continue
        cycles = [wgrad_plans.library.wgrad_cycles(one) for one in fields]
        # Where more images are TF32's a stage takes less; else a batch may fill the GPU's last turn.
        ends = [dataclasses.replace(case, N=case.N * times) for times in (1, 4)]
        if len({"wgrad" in end.tf32_operators(torch.float32, True) for end in ends}) == 1:
            assert cycles[1] > 0.97 * cycles[0]
            assert cycles[2] > 0.97 * cycles[1]


@pytest.mark.parametrize(
    "case, operator, dtype, text",
    [
        (Case(1, 8, 9, 9, 8, 3, 3), "fprop", torch.float32, "it computes gradients to weights only"),
        (Case(1, 8, 9, 9, 8, 3, 3), "wgrad", torch.float64, "it has no float64"),
        (Case(1, 8, 40, 40, 8, 16, 16), "wgrad", torch.float32, "the rows and columns of the filter together must be at most 30"),
        (Case(2, 8, 32768, 32768, 8, 1, 1), "wgrad", torch.float32, "y must have at most 2^30 pixels"),
        (Case(1, 32768, 1, 1, 65536, 1, 1), "wgrad", torch.float32, "w must have at most 2^30 elements"),
    ],
)
def test_wgrad_says_what_it_refuses(wgrad_plans, case, operator, dtype, text):
    assert wgrad_plans.says("refusal", operator, case, dtype).startswith(text)


def test_wgrad_yields_with_few_channels_and_little_work(wgrad_plans):
    for case, yields in (
        (Case(32, 64, 56, 56, 64, 3, 3, padding=(1, 1)), False),
        (Case(32, 64, 56, 56, 64, 3, 3, padding=(1, 1), groups=64), True),
        (Case(2, 8, 8, 8, 8, 3, 3, padding=(1, 1)), True),
    ):
        assert (wgrad_plans.says("yields", "wgrad", case) is not None) == yields


def test_wgrad_describes_its_configuration(wgrad_plans):
    text = wgrad_plans.says("describe", "wgrad", Case(256, 512, 7, 7, 2048, 1, 1))
    assert text == "8 x 4 tiles of 256 output channels x 128 weights, 4 splits of the pixels, x and dy copied"
    text = wgrad_plans.says("describe", "wgrad", Case(1, 64, 9, 9, 64, 3, 3))
    assert text.endswith(" splits of the pixels, in two parts, x and dy copied")


# Windows with boxes of dy and without, strips of rows, images without gaps, filters that leave pixels out, groups,
# words and channels one by one, windows that do not fit and one of which three stages do, in a tile of 256; pixels that
# no output sees; ragged edges of all tiles.
WGRAD_SHIM_CASES = [
    Case(3, 12, 12, 12, 20, 3, 3, padding=(1, 1)),
    Case(2, 9, 5, 72, 17, 3, 2, padding=(1, 0)),
    Case(1, 10, 6, 68, 70, 1, 3, padding=(0, 1)),
    Case(9, 20, 7, 7, 70, 1, 1),
    Case(5, 16, 8, 8, 72, 1, 1),
    Case(3, 20, 19, 20, 24, 1, 1, stride=(2, 2), padding=(1, 0)),
    Case(6, 8, 7, 7, 30, 3, 3, padding=(1, 1)),
    Case(2, 10, 29, 28, 12, 5, 4, stride=(2, 3), padding=(2, 1), dilation=(1, 2)),
    Case(2, 32, 9, 10, 140, 3, 3, padding=(1, 1), groups=2),
    Case(1, 5, 33, 60, 9, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(1, 16, 40, 40, 9, 3, 3, dilation=(15, 4)),
    Case(1, 16, 24, 34, 20, 3, 3, dilation=(8, 1)),
    Case(2, 24, 8, 12, 3, 3, 3, padding=(1, 1), groups=3),
    Case(2, 8, 10, 12, 20, 2, 2, stride=(3, 3)),
    Case(3, 8, 8, 10, 2, 1, 1, groups=2),
]
WGRAD_PRECISIONS = [(torch.float32, True), (torch.float32, False), (torch.float16, True), (torch.bfloat16, True)]
WGRAD_TF32_WORK = dict.fromkeys(LEAST_TF32_WORK, 2**12)  # see WgradShim
WGRAD_SEEN: list[dict] = []  # what the runs of these were like


@pytest.mark.xdist_group("wgrad_shim_exact")  # its cases are counted together
@pytest.mark.parametrize("number", range(len(WGRAD_SHIM_CASES)))
def test_wgrad_shim_exact(wgrad_shim, number):
    """Integers in all precisions and memory formats, at any addresses, by every tile and in a few splits."""
    case, rng = WGRAD_SHIM_CASES[number], random.Random(number)
    some = [(("cl", "lc")[(number + i) % 2], precision) for i, precision in enumerate(WGRAD_PRECISIONS)]
    runs = [*itertools.product(("cc", "ll"), WGRAD_PRECISIONS), *some]
    for i, (layouts, (dtype, tf32)) in enumerate(runs):
        exact = dtype == torch.float32 and "wgrad" not in case.tf32_operators(dtype, tf32, WGRAD_TF32_WORK)
        largest = 128 if exact else 256
        tile_k = largest if case.dilation == (8, 1) else min(largest, rng.choice((0, 64, 128, 256)))
        layouts += rng.choice("cl")
        seed = 2 * i + ((i + number) % 4 > 0)  # what can be late mostly is
        settings = {"seed": seed, "tf32": tf32, "shift": (0, 1, 0, 2, 0, 0, 4, 0)[(i + number) % 8] if i < 8 else 0}
        settings |= {"tile_k": tile_k, "splits": rng.choice((0, 1, 1, 3, 6))}
        fault = wgrad_shim.fault(case, dtype, layouts, **settings)
        assert fault == "", f"{case}, {layouts}, {dtype}, {settings}: {fault}"
        WGRAD_SEEN.append({"dtype": dtype, "tf32": tf32, "late": seed % 2} | wgrad_shim.latest())
    if number == len(WGRAD_SHIM_CASES) - 1 and len(WGRAD_SEEN) > 100:  # not this case alone
        check_wgrad_ways(WGRAD_SEEN)


def check_wgrad_ways(seen: list[dict]) -> None:
    """That every way in which operands come and sums go was there, and those that come by copies late as well."""

    def ways(*names: str, **among: object) -> set[tuple]:
        return {tuple(one[name] for name in names) for one in seen if one.items() >= among.items()}

    words, runs, channels, window = range(4)
    dy_words, dy_boxes, dy_channels = range(3)
    for dtype, tf32 in WGRAD_PRECISIONS:
        of_x = {(words, dy_words), (words, dy_channels), (channels, dy_words), (channels, dy_channels)}
        of_x |= {(runs, dy_boxes), (window, dy_boxes), (window, dy_channels)}
        assert of_x <= ways("x", "dy", dtype=dtype, tf32=tf32)
        assert {(words,), (runs,), (channels,), (window,)} <= ways("x", dtype=dtype, tf32=tf32, late=1)
    assert {(window, dy_words), (runs, dy_words), (runs, dy_channels)} <= ways("x", "dy")
    assert ways("copies_x", "copies_dy", "merges") == {(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)}
    assert {1, 3, 6} <= {splits for (splits,) in ways("splits")}
    assert ways("direct", "taps_first") == {*itertools.product((0, 1), (0, 1))}
    assert ways("strips", "dy", x=window) >= {(1, dy_boxes), (1, dy_channels)}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert ways("sixteen_bytes", dtype=dtype, x=window) == {(0,), (1,)}
    assert ways("whole_words", dtype=torch.float16, dy=dy_words) == {(0,), (1,)}
    # Eight loading warps or four, of which so many load a stage each; stages that each of those has under way.
    assert ways("groups", dy=dy_boxes) == {(84,), (82,), (42,), (41,)}
    assert ways("ahead", dy=dy_boxes) == {(1,), (2,), (3,)}


def wgrad_keeps_the_contract(shim: WgradShim, case: Case, layouts: tuple[str, ...] = (*LAYOUTS,)) -> bool:
    """In TF32, with values that rounding changes, in full fp32 accuracy and in 16 bits."""
    fills = [under_a_tf32_step, tf32_ties, wide]
    runs = [*itertools.product([torch.float32], fills, (True, False)), (torch.bfloat16, wide, True)]
    for number, ((dtype, fill, tf32), layout) in enumerate(itertools.product(runs, layouts)):
        tensors = in_layout(make_tensors(case, dtype, fill), layout)
        out = torch.full(case.w_shape, math.nan, dtype=dtype)
        assert shim.run(case, tensors, out, tf32, number, splits=number % 2 + 1) == ""
        of_tf32 = ("wgrad",) if dtype == torch.float32 and tf32 else ()
        if of_tf32 and fill is under_a_tf32_step:  # rounding changes these by 2^-20, truncating by 2^-10
            exact = product("wgrad", case, tensors["dy"], tensors["x"])
            if not torch.allclose(out.double(), exact, rtol=1e-4):
                return False
        try:
            check_bounds(case, {"wgrad": out}, tensors, of_tf32)
        except AssertionError:
            return False
    return True


@pytest.mark.parametrize("case", [WGRAD_SHIM_CASES[0], WGRAD_SHIM_CASES[4]], ids=str)
def test_wgrad_shim_rounding(wgrad_shim, case):
    """Element by element. (Sums are those of this processor, not of a tensor core.)"""
    assert wgrad_keeps_the_contract(wgrad_shim, case)


def wgrad_spreads(shim: WgradShim, case: Case, tf32: bool, layout: str) -> bool:
    """Whether one Inf or NaN, in a corner of x, which not all taps see, or in dy, comes to what it should."""
    for special, (name, at) in itertools.product((math.inf, -math.inf, math.nan), (("x", (1, 3)), ("dy", (1, 5)))):
        tensors = make_tensors(case, torch.float32, positive)
        tensors[name][at][(0, 0) if name == "x" else (4, 3)] = special
        expected = product("wgrad", case, tensors["dy"], tensors["x"])
        out = torch.full(case.w_shape, math.nan)
        assert shim.run(case, in_layout(tensors, layout), out, tf32, seed=1) == ""
        assert not expected.isfinite().all()
        if not torch.equal(out.isnan(), expected.isnan()) or not torch.equal(out.isinf(), expected.isinf()):
            return False
        finite = expected.isfinite()
        if not torch.allclose(out[finite].double(), expected[finite], rtol=1e-3 if tf32 else 1e-6):
            return False
    return True


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [WGRAD_SHIM_CASES[0], WGRAD_SHIM_CASES[4]], ids=str)
def test_wgrad_shim_spreads_nan_and_inf(wgrad_shim, case, layout, tf32):
    assert wgrad_spreads(wgrad_shim, case, tf32, layout)


def test_wgrad_shim_takes_any_strides(wgrad_shim):
    """Of x and dy, or of one of them, and of dw."""
    case = Case(2, 8, 6, 12, 10, 3, 3, padding=(1, 1))
    for number, (view, names) in enumerate(itertools.product(VIEWS, (("x", "dy"), ("x",), ("dy",)))):
        dtype, tf32 = WGRAD_PRECISIONS[number % 4]
        tensors = make_tensors(case, dtype, integers, seed=number)
        changed = tensors | {name: VIEWS[view](tensors[name]) for name in names}
        out = torch.full(case.w_shape, math.nan, dtype=dtype)
        out = out if view == "expanded" else VIEWS[view](out)
        message = wgrad_shim.run(case, changed, out, tf32, number, splits=number % 3)
        assert message == "", f"{view} {names}, {dtype}: {message}"
        check_exact(case, {"wgrad": out}, changed)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_wgrad_shim_takes_rows_with_nan_behind(wgrad_shim, dtype, rows):
    case = Case(2, 8, 6, 70 if rows else 7, 8, 3, 3, padding=(1, 1))
    tensors = make_tensors(case, dtype, integers)
    changed = tensors | {"dy": dy_before_nan(tensors["dy"], rows)}
    out = torch.full(case.w_shape, math.nan, dtype=dtype)
    assert wgrad_shim.run(case, changed, out, True, 1) == ""
    check_exact(case, {"wgrad": out}, tensors)


# In the first two the copy of dy is one of images as rows without gaps, although x is none.
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 40, 35, 35, 4, 1, 1),
        Case(2, 40, 69, 69, 4, 1, 1, stride=(2, 2)),
        Case(2, 40, 29, 31, 4, 1, 1),
        Case(2, 40, 35, 36, 4, 1, 1),
        Case(2, 40, 35, 35, 4, 3, 3),
        Case(2, 4, 35, 35, 40, 3, 3),
    ],
    ids=str,
)
def test_wgrad_shim_exact_where_copies_would_be_too_large(wgrad_shim, case):
    """Of x or of dy."""
    most = ctypes.c_int64.in_dll(wgrad_shim.library, "most_copied_bytes")
    before, most.value = most.value, 60_000
    try:
        faults = [wgrad_shim.fault(case, dtype, "ccc", seed=1, tile_k=64) for dtype in (torch.float32, torch.float16)]
    finally:
        most.value = before
    assert faults == ["", ""]


def test_wgrad_refuses_other_gpus(wgrad_plans):
    capability = ctypes.c_int.in_dll(wgrad_plans.library, "stand_in_capability")
    refusals = []
    try:
        for capability.value in (90, 80, 100, 0):
            refusals.append(wgrad_plans.says("refusal", "wgrad", WGRAD_SHIM_CASES[0]))
    finally:
        capability.value = 90
    assert refusals == [None] + ["it needs a Hopper GPU (compute capability 9.0)"] * 3


def wgrad_stays_inside(shim: WgradShim, case: Case, dtype: torch.dtype) -> bool:
    """In all memory formats, with operands that end where memory does."""
    for last in itertools.product((False, True), (False, True)):
        tensors = make_tensors(case, dtype, integers)
        for name, is_last in zip(("x", "dy"), last, strict=True):
            order, back = ((0, 2, 3, 1), (0, 3, 1, 2)) if is_last else ((0, 1, 2, 3),) * 2
            tensors[name] = before_guard_page(tensors[name].permute(order)).permute(back)
        out = torch.full(case.w_shape, math.nan, dtype=dtype)
        # Nothing is late: a copy that is done for a thread has nobody to blame.
        if shim.run(case, tensors, out, True, seed=0, tile_k=64) != "":
            return False
        check_exact(case, {"wgrad": out}, tensors)
    return True


@pytest.mark.parametrize("number", [3, 5, 6, 8, 11, 14])
def test_wgrad_shim_reads_nothing_behind_its_operands(wgrad_shim, number):
    dtype = WGRAD_PRECISIONS[number % 4][0]
    assert wgrad_stays_inside(wgrad_shim, WGRAD_SHIM_CASES[number], dtype)


# A few cases by their numbers: boxes by 2 and 4 groups of warps and by one, with 1 to 3 stages of each under way; words
# and channels; both kinds of rests.
WGRAD_TELLING_RUNS = [
    (case, layouts, dtype, {"seed": seed + more, "tf32": tf32, "tile_k": tile_k, "splits": splits})
    for seed in (1, 3)
    for case, layouts, dtype, tf32, tile_k, splits, more in (
        (4, "ccc", torch.float32, True, 64, 1, 0),
        (6, "ccc", torch.float32, True, 64, 6, 0),
        (0, "ccc", torch.float16, True, 64, 1, 0),
        (3, "ccc", torch.float32, True, 64, 1, 0),
        (2, "ccl", torch.float32, False, 64, 1, 0),
        (2, "ccl", torch.float32, False, 64, 1, 1),
        (1, "ccc", torch.float32, True, 256, 1, 0),
        (11, "ccc", torch.float32, True, 64, 1, 0),
        (13, "ccc", torch.float32, True, 64, 1, 0),
        (5, "llc", torch.float32, True, 64, 1, 0),
        (8, "ccc", torch.float32, True, 64, 3, 0),
        (0, "lll", torch.float32, False, 64, 1, 0),
        (8, "clc", torch.float32, True, 64, 2, 0),
    )
]


def wgrad_is_right(shim: WgradShim, mutation: str) -> bool:
    """By what tells whether this one takes place."""
    case = WGRAD_SHIM_CASES[0]
    if "rounded" in mutation:
        return wgrad_keeps_the_contract(shim, case, LAYOUTS[:1])
    if "Inf" in mutation or "NaN" in mutation:
        return wgrad_spreads(shim, case, False, LAYOUTS[0])
    if "not there" in mutation:
        return wgrad_stays_inside(shim, WGRAD_SHIM_CASES[8], torch.float32)
    return all(
        shim.fault(WGRAD_SHIM_CASES[number], dtype, layouts, **settings) == ""
        for number, layouts, dtype, settings in WGRAD_TELLING_RUNS
    )


def test_wgrad_shim_is_right_where_something_may_be_missing(wgrad_shim):
    assert all(wgrad_is_right(wgrad_shim, mutation) for mutation in ("rounded", "Inf", "not there", ""))


@pytest.mark.parametrize("mutation", WGRAD_SHIM_MUTATIONS)
def test_wgrad_shim_sees_what_is_missing(mutation, wgrad_shim):
    """The shim itself: what is left out, or taken for something else, shows in one of a few runs."""
    with mutated(wgrad_shim.library, WGRAD_SHIM_MUTATIONS, mutation):
        assert not wgrad_is_right(wgrad_shim, mutation)
