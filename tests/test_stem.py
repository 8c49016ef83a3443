"""The stem engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import re

import pytest
import torch

from tests.cases import (
    DTYPES,
    FILLS,
    LAYOUTS,
    VIEWS,
    Case,
    check_bounds,
    check_exact,
    in_layout,
    integers,
    make_tensors,
    named,
    references,
    under_a_tf32_step,
    with_margins,
)
from tests.emulation import mutated
from tests.engines import spreads
from tests.mutations import STEM_MUTATIONS, STEM_PLAN_MUTATIONS
from tests.problems import (
    STEM_16_BIT_FILLS,
    STEM_CASES,
    STEM_CONTRACTS,
    check_refusal,
    layout_strides,
    random_stem_cases,
)

STEM_KINDS = {
    f"{bits} bits: {kind}"
    for bits in (16, 32)
    for kind in (
        *(f"x by {how}" for how in ("planes", "lines", "single values")),
        *(f"{what} of y by {how}" for what in ("runs", "rows") for how in ("planes", "pixels", "single values")),
        *(f"tile of {channels} channels" for channels in (32, 64)),
        *("lead", "parts of rows"),
    )
}


def test_stem_plans_are_sound(stem_plans):
    """Each output once, each term once and where the convolution says, loads and stores where boxes may be."""
    planned, count = 0, 2500
    for seed, case in enumerate(random_stem_cases(count, seed=0)):
        fault = stem_plans.fault("fprop", case, seed)
        assert not fault, f"{case}, seed {seed}: {fault}"
        planned += fault is not None
    assert planned > 0.5 * count  # a third are for a GPU that the engine does not take
    assert stem_plans.seen() >= STEM_KINDS


@pytest.mark.parametrize("mutation", STEM_PLAN_MUTATIONS)
def test_stem_plan_checks_see_what_is_wrong(stem_plans, mutation):
    cases = enumerate(random_stem_cases(1500, seed=0))
    with mutated(stem_plans.library, STEM_PLAN_MUTATIONS, mutation):
        assert any(stem_plans.fault("fprop", case, seed) for seed, case in cases)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_stem_estimates_grow_with_the_work(stem_plans, dtype):
    aligned = [ctypes.c_uint64(0)] * 3
    for case in random_stem_cases(400, seed=1):
        if stem_plans("refusal", "fprop", case, dtype=dtype) is not None:
            continue
        once = stem_plans("cycles", "fprop", case, *aligned, dtype=dtype)
        for letter in "NK":
            double = dataclasses.replace(case, **{letter: 2 * getattr(case, letter)})
            twice = stem_plans("cycles", "fprop", double, *aligned, dtype=dtype)
            # More channels may be stored by boxes where fewer are not, or in larger tiles.
            assert twice >= (1 if letter == "N" else 0.7) * once, f"{double}: {twice} after {once}"


def test_stem_describes_its_configuration(stem_plans):
    told = 0
    for case, (dtype, tf32) in itertools.product(random_stem_cases(200, seed=4), STEM_CONTRACTS):
        if stem_plans("refusal", "fprop", case, dtype=dtype, tf32=tf32) is None:
            text = stem_plans("describe", "fprop", case, dtype=dtype, tf32=tf32)
            assert re.fullmatch(
                r"(one product|three products of parts), tile of (32|64) channels x \d+ x \d+ pixels, \d+ steps of 8 "
                r"terms, \d+ bytes of shared memory, x by (boxes( of lines)?|single values), y by (boxes of "
                r"planes|boxes of pixels|single values), \d+ tiles for \d+ blocks, about [\d.e+-]+ Mcycles",
                text,
            ), text
            one_product = dtype != torch.float32 or "fprop" in case.tf32_operators(dtype, tf32)
            assert text.startswith("one product") == one_product
            told += 1
    assert told > 400


# What the engine leaves to others, and what looks alike and is its own.
STEM_CASE = Case(8, 3, 224, 224, 64, 7, 7, stride=(2, 2), padding=(3, 3))
STEM_REFUSALS = [
    (STEM_CASE, "fprop", {}, None),
    *((STEM_CASE, "fprop", {"capability": capability}, "Hopper") for capability in (0, 80, 89, 100, 120)),
    (STEM_CASE, "fprop", {"dtype": torch.float16}, None),
    (STEM_CASE, "fprop", {"dtype": torch.bfloat16}, None),
    (STEM_CASE, "fprop", {"dtype": torch.float64}, "no float64"),
    *((STEM_CASE, operator, {}, "outputs only") for operator in ("dgrad", "wgrad", "bgrad")),
    (dataclasses.replace(STEM_CASE, C=7), "fprop", {}, None),
    (dataclasses.replace(STEM_CASE, C=8), "fprop", {}, "7 input channels"),
    (dataclasses.replace(STEM_CASE, C=6, groups=2), "fprop", {}, "one group only"),
    (dataclasses.replace(STEM_CASE, dilation=(3, 5)), "fprop", {}, None),
    (dataclasses.replace(STEM_CASE, R=16, S=16, stride=(16, 16)), "fprop", {}, "no tile"),
    (dataclasses.replace(STEM_CASE, dilation=(30, 30)), "fprop", {}, "no tile"),
    (Case(1, 1, 20000, 20000, 1, 16384, 16384), "fprop", {}, "no tile"),
    (Case(1, 7, 1, 4, 64, 1, 2**29 - 1, padding=(0, 2**28)), "fprop", {"strides": {"x": (28, 1, 28, 7)}}, "no tile"),
    (Case(1, 3, 9, 9, 64, 1, 1, dilation=(2**20, 2**20)), "fprop", {}, None),
    (Case(1, 1, 2**28, 2**28, 1, 1, 1, stride=(2**28, 2**28)), "fprop", {}, None),
    (Case(2**28, 1, 8, 8, 40, 3, 3, padding=(1, 1)), "fprop", {}, None),
    (Case(2**31, 1, 8, 8, 40, 3, 3, padding=(1, 1)), "fprop", {}, "no tile"),
]


@pytest.mark.parametrize("case, operator, settings, text", STEM_REFUSALS, ids=str)
def test_stem_says_what_it_refuses(stem_plans, case, operator, settings, text):
    check_refusal(stem_plans("refusal", operator, case, **settings), text)


@pytest.mark.parametrize(
    "case, text",
    [
        (STEM_CASE, None),
        (dataclasses.replace(STEM_CASE, N=1), "few outputs"),
        (Case(8, 3, 66, 66, 32, 3, 3), "few outputs"),  # 2^20 of them
        (Case(8, 3, 66, 66, 33, 3, 3), None),
        (dataclasses.replace(STEM_CASE, N=64, K=4), "few output channels"),
        (dataclasses.replace(STEM_CASE, N=64, K=5), None),
        (dataclasses.replace(STEM_CASE, N=64, C=1, K=16), "few channels out of one"),
        (dataclasses.replace(STEM_CASE, N=64, C=1, K=17), None),
    ],
    ids=str,
)
def test_stem_yields_to_what_is_faster(stem_plans, case, text):
    for tf32 in (False, True):
        check_refusal(stem_plans("yields", "fprop", case, tf32=tf32), text)


@pytest.mark.parametrize(
    "case, text",
    [
        (STEM_CASE, None),
        (dataclasses.replace(STEM_CASE, N=1), None),  # few outputs, but of 147 products each
        (Case(8, 3, 66, 66, 33, 3, 3), "few multiply-adds"),
        (Case(2, 2, 257, 257, 64, 2, 2), "few multiply-adds"),  # 2^26 of them
        (Case(2, 2, 257, 258, 64, 2, 2), None),
        (dataclasses.replace(STEM_CASE, N=64, K=4), "few output channels"),
        (dataclasses.replace(STEM_CASE, N=64, C=1, K=16), "few channels out of one"),
        (dataclasses.replace(STEM_CASE, N=64, C=1, K=17), None),
    ],
    ids=str,
)
def test_stem_of_16_bits_yields_to_what_is_faster(stem_plans, case, text):
    for dtype in (torch.float16, torch.bfloat16):
        check_refusal(stem_plans("yields", "fprop", case, dtype=dtype), text)


def test_stem_yields_where_mma_is_far_faster(stem_plans):
    cycles = stem_plans("cycles", "fprop", STEM_CASE, *[ctypes.c_uint64(0)] * 3)
    set_mma_cycles = stem_plans.library.set_mma_cycles
    set_mma_cycles.argtypes = [ctypes.c_double]
    try:
        for share, text in ((0.51, None), (0.49, "filters that fill shared memory")):
            set_mma_cycles(share * cycles)
            check_refusal(stem_plans("yields", "fprop", STEM_CASE), text)
    finally:
        set_mma_cycles(1e18)


# Stems of networks in small, one channel and seven, quads that are full and not, dilation, rows that are longer than a
# box, images of one pixel; rows of y that boxes can store, alone or in runs, and others.
STEM_SHIM_CASES = [
    (Case(2, 3, 19, 36, 40, 7, 7, stride=(2, 2), padding=(3, 3)), {}),
    (Case(2, 3, 21, 32, 64, 7, 7, stride=(2, 2), padding=(3, 3)), {"tile_k": 64, "tile_p": 3, "tile_q": 16}),
    (Case(1, 4, 9, 32, 33, 3, 3, padding=(1, 1)), {"tile_k": 64, "tile_p": 2, "tile_q": 32}),
    (Case(3, 2, 12, 12, 24, 3, 3), {"tile_p": 8, "tile_q": 10}),
    (Case(2, 3, 16, 24, 70, 4, 4, stride=(4, 4)), {"tile_k": 64}),
    (Case(1, 5, 3, 300, 35, 2, 3, padding=(0, 2), dilation=(1, 2)), {}),
    (Case(2, 7, 8, 9, 20, 1, 1), {}),
    (Case(3, 1, 28, 28, 8, 5, 5, padding=(2, 2)), {"tile_p": 4, "tile_q": 16}),
    (Case(1, 3, 23, 30, 100, 11, 11, stride=(4, 4), padding=(2, 2)), {"tile_k": 32}),
    (Case(5, 3, 1, 1, 130, 3, 2, padding=(1, 1)), {}),
]


@pytest.mark.xdist_group("stem_shim_exact")  # its cases are counted together
@pytest.mark.parametrize("number", range(len(STEM_SHIM_CASES)))
def test_stem_shim_exact(stem_shim, number):
    """Integers of all types, under both contracts and in both memory formats, at any addresses."""
    case, wishes = STEM_SHIM_CASES[number]
    runs = [*itertools.product(LAYOUTS, reversed(STEM_CONTRACTS))] * 2
    for seed, (layout, (dtype, tf32)) in enumerate(runs, start=16 * number):
        settings = {"dtype": dtype, "tf32": tf32}
        fault = stem_shim.fault("fprop", case, layout, seed, **settings, **wishes)
        if fault is None:  # the tile is for boxes
            fault = stem_shim.fault("fprop", case, layout, seed, **settings)
        assert fault == "", f"{case}, {layout}, {settings}, {wishes}, seed {seed}: {fault}"
        kind = tf32 if dtype == torch.float32 else "16 bits"
        STEM_SEEN.add((kind, stem_shim.last("x_loads"), stem_shim.last("y_stores")))
    if number == len(STEM_SHIM_CASES) - 1 and len(STEM_SEEN) > 9:  # not this case alone
        # No box, one of planes, one of lines; boxes of planes, of pixels, none.
        ways = {(0, 0), (0, 1), (0, 2), (1, 0), (1, 2), (2, 1), (2, 2)}
        missing = {(kind, *way) for kind in (True, False, "16 bits") for way in ways} - STEM_SEEN
        assert not missing, missing


STEM_SEEN: set[tuple[object, ...]] = set()  # contracts, loads and stores in the runs above


@pytest.mark.parametrize("view", [*VIEWS, "one image"])
def test_stem_shim_takes_any_strides(stem_shim, view):
    """Of x, of w and of y."""
    change = VIEWS.get(view, lambda tensor: tensor[:1].expand_as(tensor))
    cases = (Case(2, 3, 9, 16, 36, 3, 3, padding=(1, 1)), Case(3, 4, 7, 9, 33, 2, 4))
    for number, (case, dtype) in enumerate(itertools.product(cases, DTYPES[:3])):
        tensors = make_tensors(case, dtype, integers)
        changed = [{"x"}, {"w"}, {"dy"}, {"x", "w", "dy"}]
        for names in changed if view not in ("expanded", "one image") else changed[:2]:
            viewed = tensors | {name: change(tensors[name]) for name in names - {"dy"}}
            out = torch.full(case.y_shape, math.nan, dtype=dtype)
            out = change(out) if "dy" in names else with_margins(out)
            for tf32 in (False, True) if dtype == torch.float32 else (True,):
                out.fill_(math.nan)
                message = stem_shim.run("fprop", case, viewed, out, tf32=tf32, seed=number)
                assert message == "", f"{case}, {names}: {message}"
                check_exact(case, {"fprop": out}, viewed)


STEM_ROUNDING_CASE = Case(2, 3, 12, 20, 34, 7, 7, stride=(2, 2), padding=(3, 3))


@pytest.mark.parametrize("fill", FILLS, ids=named)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stem_shim_rounding(stem_shim, layout, fill):
    """Both contracts, element by element. (Sums are those of this processor, not of a tensor core.)"""
    tensors = in_layout(make_tensors(STEM_ROUNDING_CASE, torch.float32, fill), layout)
    for tf32 in (False, True):
        out = torch.full(STEM_ROUNDING_CASE.y_shape, math.nan)
        assert stem_shim.run("fprop", STEM_ROUNDING_CASE, tensors, out, tf32=tf32) == ""
        check_bounds(STEM_ROUNDING_CASE, {"fprop": out}, tensors, tf32=("fprop",) if tf32 else ())


@pytest.mark.parametrize("dtype, fill", STEM_16_BIT_FILLS, ids=named)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stem_shim_rounding_of_16_bits(stem_shim, layout, dtype, fill):
    tensors = in_layout(make_tensors(STEM_ROUNDING_CASE, dtype, fill), layout)
    out = torch.full_like(tensors["dy"], math.nan)
    assert stem_shim.run("fprop", STEM_ROUNDING_CASE, tensors, out) == ""
    check_bounds(STEM_ROUNDING_CASE, {"fprop": out}, tensors, tf32=())


# Quads with a term that no output reads, in rows that others read.
STEM_SPREADING_CASES = [Case(1, 4, 7, 20, 40, 3, 3), Case(1, 5, 7, 13, 33, 2, 3, padding=(1, 1), stride=(1, 2))]


@pytest.mark.parametrize("dtype, tf32", STEM_CONTRACTS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stem_shim_spreads_nan_and_inf_to_those_that_read_them(stem_shim, layout, dtype, tf32):
    for case in STEM_SPREADING_CASES:
        assert spreads(stem_shim, case, tf32, layout, dtype), case


# More tiles than stages, on three SMs; boxes of planes and of pixels, one of a warp and two.
STEM_TELLING_RUNS = [
    (
        Case(6, 3, 13, 32, channels, 5, 3, padding=(2, 1)),
        layout,
        seed,
        {"dtype": dtype, "tf32": tf32, "tile_k": tile_k, "tile_p": 2},
    )
    for layout, seed, (dtype, tf32) in itertools.product(LAYOUTS, (1, 3), STEM_CONTRACTS[:3])
    for channels, tile_k in ((40, 64), (32, 32))
    if tile_k == 64 or not tf32 or dtype != torch.float32
]


@pytest.mark.parametrize("mutation", STEM_MUTATIONS)
def test_stem_shim_sees_what_is_missing(mutation, stem_shim):
    """The shim itself: what is left out shows in one of a few runs, which are right without it."""

    def are_right() -> bool:
        if "again" in mutation:
            return all(spreads(stem_shim, STEM_SPREADING_CASES[0], False, layout) for layout in LAYOUTS)
        if "round" in mutation and "before" not in mutation:
            tensors = make_tensors(STEM_ROUNDING_CASE, torch.float32, under_a_tf32_step)
            out = torch.full(STEM_ROUNDING_CASE.y_shape, math.nan)
            assert stem_shim.run("fprop", STEM_ROUNDING_CASE, tensors, out, tf32=True) == ""
            exact = references(STEM_ROUNDING_CASE, tensors)["fprop"]
            return bool(((out - exact).abs() <= 1e-4 * exact).all())
        return all(
            stem_shim.fault("fprop", case, layout, seed, **settings) == ""
            for case, layout, seed, settings in STEM_TELLING_RUNS
        )

    assert are_right()
    with mutated(stem_shim.library, STEM_MUTATIONS, mutation):
        assert not are_right()


def test_stem_cases_reach_every_way(stem_plans):
    """That the cases for the GPU do not miss a way to load or store under a contract."""
    told = set()
    for case, (dtype, tf32), layout in itertools.product(STEM_CASES, STEM_CONTRACTS[:3], LAYOUTS):
        settings = {"strides": layout_strides(case, layout), "dtype": dtype, "tf32": tf32}
        assert stem_plans("refusal", "fprop", case, **settings) is None, case
        text = stem_plans("describe", "fprop", case, **settings)
        way = re.search(r"^(one|three) .* of (\d+) channels .* x by ([a-z ]+), y by ([a-z ]+),", text).groups()
        told.add(way if dtype == torch.float32 else ("16 bits", *way[1:]))
    for contract in ("one", "three", "16 bits"):
        ways = {way[1:] for way in told if way[0] == contract}
        assert {(x, y) for _, x, y in ways} >= {
            ("boxes", "boxes of planes"),
            ("boxes of lines", "boxes of pixels"),
            ("single values", "single values"),
            ("single values", "boxes of pixels"),
        }, told
    for contract in ("three", "16 bits"):
        assert {channels for of, channels, *_ in told if of == contract} == {"32", "64"}
