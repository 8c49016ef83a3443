"""The pointwise engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import re

import pytest
import torch

from tests.cases import (
    LAYOUTS,
    VIEWS,
    Case,
    check_bounds,
    check_exact,
    in_wider,
    integers,
    make_tensors,
    references,
    with_margins,
)
from tests.emulation import mutated
from tests.engines import PointwiseShim, spreads
from tests.mutations import POINTWISE_MUTATIONS, POINTWISE_PLAN_MUTATIONS
from tests.problems import POINTWISE_CASES, check_refusal, layout_strides, random_pointwise_cases

POINTWISE_KINDS = {
    *(f"by {loads}" for loads in ("fours", "fours of weights", "fours of channels", "single values")),
    *("y by 1", "y by 4"),
    *(f"{number} slices" for number in (1, 2, 4, 8, 16)),
    *(f"{number} splits" for number in (1, 2, 4, 8)),
    *(f"{rows} rows, stages of {terms}" for rows in (32, 64) for terms in (16, 32, 64)),
}


def test_pointwise_plans_are_sound(pointwise_plans):
    """For tensors of any strides at any addresses: y and the reduction whole, loads and stores where they may be."""
    planned, count = 0, 6000
    for seed, case in enumerate(random_pointwise_cases(count, seed=0)):
        fault = pointwise_plans.fault("fprop", case, seed)
        assert not fault, f"{case}, seed {seed}: {fault}"
        planned += fault is not None
    assert planned > 0.9 * count
    assert pointwise_plans.seen() >= POINTWISE_KINDS


@pytest.mark.parametrize("mutation", POINTWISE_PLAN_MUTATIONS)
def test_pointwise_plan_checks_see_what_is_wrong(pointwise_plans, mutation):
    cases = enumerate(random_pointwise_cases(6000, seed=0))
    with mutated(pointwise_plans.library, POINTWISE_PLAN_MUTATIONS, mutation):
        assert any(pointwise_plans.fault("fprop", case, seed) for seed, case in cases)


def test_pointwise_estimates_grow_with_the_work(pointwise_plans):
    aligned, staged = [ctypes.c_uint64(0)] * 3, 0
    for case, tf32 in itertools.product(random_pointwise_cases(1000, seed=1), (False, True)):
        once = pointwise_plans("cycles", "fprop", case, *aligned, tf32=tf32)
        staged += "in stages" in pointwise_plans("describe", "fprop", case, tf32=tf32)
        for letter in "NCK":
            double = dataclasses.replace(case, **{letter: 2 * getattr(case, letter)})
            if case.tf32_operators(torch.float32, tf32) != double.tf32_operators(torch.float32, tf32):
                continue  # three products are one where there is enough to multiply
            twice = pointwise_plans("cycles", "fprop", double, *aligned, tf32=tf32)
            # More channels may be loaded by fours where fewer were not.
            assert twice >= (1 if letter == "N" else 0.9) * once, f"{double}: {twice} after {once}"
    assert staged > 50


def test_pointwise_describes_its_configuration(pointwise_plans):
    for case, tf32 in itertools.product(random_pointwise_cases(300, seed=4), (False, True)):
        text = pointwise_plans("describe", "fprop", case, tf32=tf32)
        assert re.fullmatch(
            r"(one product|three products of parts), tile of \d+ (channels x \d+ pixels|pixels x \d+ channels), by "
            r"(fours( of weights| of channels| in stages)?|single values), y by (fours|single values), \d+ tiles for "
            r"\d blocks of \d+ slices each, about [\d.e+-]+ Mcycles",
            text,
        ), text
        assert text.startswith("one product") == ("fprop" in case.tf32_operators(torch.float32, tf32))


@pytest.mark.parametrize(
    "capability, C, size, K, stages",
    [
        *((capability, 256, 56, 128, capability in (80, 87, 90, 100)) for capability in (80, 86, 87, 89, 90, 100, 120)),
        *((capability, 128, 56, 128, True) for capability in (80, 86, 90, 120)),
        (90, 256, 46, 128, True),
        (90, 256, 44, 128, False),  # below 2048 pixels
        (90, 128, 28, 512, True),
        (90, 128, 26, 512, False),  # below 784
    ],
)
def test_pointwise_stages_where_there_is_room(pointwise_plans, capability, C, size, K, stages):
    case = Case(1, C, size, size, K, 1, 1)
    text = pointwise_plans("describe", "fprop", case, tf32=True, capability=capability)
    assert text.startswith("one product")
    assert ("in stages" in text) == stages, text


# What the engine leaves to others, and what looks alike and is its own.
POINTWISE_CASE = Case(2, 64, 9, 10, 40, 1, 1)
POINTWISE_REFUSALS = [
    (POINTWISE_CASE, "fprop", {}, None),
    (POINTWISE_CASE, "fprop", {"capability": 80}, None),
    (POINTWISE_CASE, "fprop", {"capability": 120}, None),
    (POINTWISE_CASE, "fprop", {"capability": 75}, "Ampere"),
    (POINTWISE_CASE, "fprop", {"capability": 0}, "Ampere"),
    (POINTWISE_CASE, "fprop", {"dtype": torch.float16}, "float32 only"),
    (POINTWISE_CASE, "fprop", {"dtype": torch.float64}, "float32 only"),
    *((POINTWISE_CASE, operator, {}, "outputs only") for operator in ("dgrad", "wgrad", "bgrad")),
    (dataclasses.replace(POINTWISE_CASE, stride=(3, 2), dilation=(5, 7)), "fprop", {}, None),
    (dataclasses.replace(POINTWISE_CASE, S=2), "fprop", {}, "1x1 filters only"),
    (dataclasses.replace(POINTWISE_CASE, R=3), "fprop", {}, "1x1 filters only"),
    (dataclasses.replace(POINTWISE_CASE, groups=2), "fprop", {}, "one group only"),
    (dataclasses.replace(POINTWISE_CASE, padding=(0, 1)), "fprop", {}, "no padding"),
    (dataclasses.replace(POINTWISE_CASE, padding=(1, 0)), "fprop", {}, "no padding"),
    (POINTWISE_CASE, "fprop", {"strides": {"x": (2**29, 2**24, 2**10, 1)}}, r"fewer than 2^30"),
    (POINTWISE_CASE, "fprop", {"strides": {"w": (2**26, 1, 1, 1)}}, r"fewer than 2^30"),
    (POINTWISE_CASE, "fprop", {"strides": {"dy": (1, 2**26, 1, 1)}}, r"fewer than 2^30"),
    (Case(2**21, 2, 32, 32, 2, 1, 1), "fprop", {"strides": {"x": (0, 1, 0, 0), "dy": (0, 1, 0, 0)}}, "2^30"),
    (Case(1, 64, 2**12, 2**11, 64, 1, 1), "fprop", {}, None),
    (Case(1, 64, 2**13, 2**12, 64, 1, 1), "fprop", {}, "fewer than 2^30"),
]


@pytest.mark.parametrize("case, operator, settings, text", POINTWISE_REFUSALS, ids=str)
def test_pointwise_says_what_it_refuses(pointwise_plans, case, operator, settings, text):
    check_refusal(pointwise_plans("refusal", operator, case, **settings), text)


# One pixel, one channel, one term, a tile and one more or less of each, images whose pixels come by fours and not,
# strides, and several steps: as many as slices and blocks, fewer, and more.
POINTWISE_SHIM_CASES = [
    Case(2, 16, 4, 8, 32, 1, 1),
    Case(1, 48, 6, 6, 33, 1, 1),
    Case(3, 32, 3, 5, 31, 1, 1),
    Case(2, 48, 9, 8, 12, 1, 1, stride=(2, 1)),
    Case(1, 64, 7, 15, 40, 1, 1, stride=(2, 2)),
    Case(1, 31, 4, 16, 20, 1, 1),
    Case(5, 112, 1, 1, 10, 1, 1),
    Case(1, 1, 5, 7, 2, 1, 1),
    Case(2, 4, 3, 11, 1, 1, 1, stride=(1, 3)),
    Case(1, 132, 2, 2, 8, 1, 1),
]
# Bits of rows, bits of splits and slices; in TF32 a block has up to 16 warps, in full 8.
POINTWISE_SHIM_PLANS = [
    (0, 0, 1), (0, 0, 4), (1, 0, 2), (2, 0, 1), (0, 1, 1), (0, 2, 2), (1, 3, 1), (2, 1, 2), (0, 0, 8),
    (0, 0, 16), (0, 3, 1),
]  # fmt: skip


@pytest.mark.xdist_group("pointwise_shim_exact")  # its cases are counted together
@pytest.mark.parametrize("number", range(len(POINTWISE_SHIM_CASES)))
def test_pointwise_shim_exact(pointwise_shim, number):
    """Integers under both contracts: the plans in turn, and where one is for larger problems the planner's."""
    case = POINTWISE_SHIM_CASES[number]
    for seed, (layout, tf32) in enumerate([*itertools.product(LAYOUTS, (True, False))] * 5, start=20 * number):
        plan = POINTWISE_SHIM_PLANS[seed % len(POINTWISE_SHIM_PLANS)]
        wishes = dict(zip(pointwise_shim.wishes, (0, *plan), strict=True))
        fault = pointwise_shim.fault("fprop", case, layout, seed, tf32=tf32, **wishes)
        if fault is None:
            fault = pointwise_shim.fault("fprop", case, layout, seed, tf32=tf32)
        else:
            POINTWISE_SEEN.add(plan)
        assert fault == "", f"{case}, {layout}, tf32 {tf32}, {wishes}, seed {seed}: {fault}"
        POINTWISE_SEEN.add((tf32, pointwise_shim.last("loads"), pointwise_shim.last("out_vector")))
    if number == len(POINTWISE_SHIM_CASES) - 1 and len(POINTWISE_SEEN) > 20:  # not this case alone
        assert {*itertools.product((True, False), range(4), (1, 4)), *POINTWISE_SHIM_PLANS} == POINTWISE_SEEN


POINTWISE_SEEN: set[tuple[int, ...]] = set()  # plans, and contracts with loads and stores, in the runs above


# Stages of 16, 32 and 64 terms; rows and pixels that fill tiles and do not, of one image and several.
POINTWISE_STAGED_CASES = [
    Case(2, 64, 5, 8, 40, 1, 1),
    Case(1, 64, 8, 16, 64, 1, 1),
    Case(3, 128, 2, 10, 33, 1, 1),
    Case(1, 128, 12, 12, 100, 1, 1),
    Case(1, 256, 12, 12, 35, 1, 1),
]


@pytest.mark.parametrize("case", POINTWISE_STAGED_CASES, ids=str)
def test_pointwise_shim_stages(pointwise_shim, case):
    """Integers, at addresses that are multiples of 16 bytes and, where there is no such plan, at others."""
    for row_bits in (0, 1):
        faults = {
            pointwise_shim.fault("fprop", case, "contiguous", seed, tf32=True, staged=1, row_bits=row_bits)
            for seed in range(6)
        }
        assert faults in ({""}, {"", None}), f"{case}, {row_bits}: {faults}"
        assert pointwise_shim.last("stage_terms") == case.C // 4


def stages_of_slices_are_right(pointwise_shim: PointwiseShim) -> bool:
    case = Case(2, 64, 5, 8, 40, 1, 1)
    tensors = make_tensors(case, torch.float32, integers)
    tensors |= {"x": in_wider(tensors["x"], 12, 4), "w": in_wider(tensors["w"], 4, 0)}
    out = in_wider(torch.full(case.y_shape, math.nan), 5, 8)
    if pointwise_shim.run("fprop", case, tensors, out, tf32=True, staged=1) != "":
        return False
    return torch.equal(out.double(), references(case, tensors)["fprop"])


def test_pointwise_shim_stages_slices(pointwise_shim):
    assert stages_of_slices_are_right(pointwise_shim)


@pytest.mark.parametrize("view", [*VIEWS, "one image"])
def test_pointwise_shim_takes_any_strides(pointwise_shim, view):
    """Of x, of w and of y."""
    change = VIEWS.get(view, lambda tensor: tensor[:1].expand_as(tensor))
    for number, case in enumerate((Case(2, 20, 5, 8, 36, 1, 1), Case(3, 16, 7, 9, 33, 1, 1, stride=(2, 1)))):
        tensors = make_tensors(case, torch.float32, integers)
        changed = [{"x"}, {"w"}, {"dy"}, {"x", "w", "dy"}]
        for names in changed if view not in ("expanded", "one image") else changed[:2]:
            viewed = tensors | {name: change(tensors[name]) for name in names - {"dy"}}
            out = torch.full(case.y_shape, math.nan)
            out = change(out) if "dy" in names else with_margins(out)
            for tf32, split_bits in itertools.product((False, True), (0, 1)):
                out.fill_(math.nan)
                wishes = {"tf32": tf32, "staged": 0, "split_bits": split_bits}
                message = pointwise_shim.run("fprop", case, viewed, out, seed=number, **wishes)
                assert message == "", f"{case}, {names}: {message}"
                check_exact(case, {"fprop": out}, viewed)


def test_pointwise_shim_keeps_the_contract_in_long_sums(pointwise_shim):
    """Products that are all the same, of the size at which additions err most."""
    case = Case(1, 8192, 1, 4, 4, 1, 1)
    tensors = make_tensors(case, torch.float32, lambda shape, _: torch.full(shape, 0.24446875))
    tensors["w"].fill_(1)
    assert pointwise_shim.fault("fprop", case, "contiguous", 0, staged=0, slices=1, split_bits=0) is None
    out = torch.full(case.y_shape, math.nan)
    assert pointwise_shim.run("fprop", case, tensors, out, slices=4, split_bits=0) == ""
    check_bounds(case, {"fprop": out}, tensors, tf32=())


POINTWISE_SPREADING_CASES = [Case(1, 32, 7, 20, 40, 1, 1), Case(1, 32, 7, 9, 40, 1, 1), Case(1, 19, 7, 8, 40, 1, 1)]


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pointwise_shim_spreads_nan_and_inf_to_those_that_read_them(pointwise_shim, layout, tf32):
    for case, split_bits in itertools.product(POINTWISE_SPREADING_CASES, (0, 1)):
        assert spreads(pointwise_shim, case, tf32, layout, staged=0, split_bits=split_bits), case
    if tf32 and layout == "contiguous":
        case = Case(1, 64, 7, 20, 40, 1, 1)
        assert all(spreads(pointwise_shim, case, tf32, layout, staged=1, row_bits=row_bits) for row_bits in (0, 1))


# Five steps for two slices and for eight, and for two blocks and four; single values of few terms.
POINTWISE_TELLING_RUNS = [
    (Case(1, 80, 4, 9, 20, 1, 1), layout, seed, {"split_bits": split_bits, "slices": slices})
    for layout, seed in itertools.product(LAYOUTS, (0, 1))
    for split_bits, slices in [(0, 2), (0, 8), (1, 1), (2, 1)]
] + [(Case(1, 19, 3, 5, 20, 1, 1), "contiguous", 0, {"slices": 1})]
POINTWISE_TELLING_RUNS += [
    (POINTWISE_STAGED_CASES[i], "contiguous", seed, {"staged": 1, "row_bits": row_bits, "tf32": True})
    for i, row_bits, seed in itertools.product((0, 2), (0, 1), range(4))
]


@pytest.mark.parametrize("mutation", POINTWISE_MUTATIONS)
def test_pointwise_shim_sees_what_is_missing(mutation, pointwise_shim):
    """The shim itself: what is left out shows in one of a few runs, which are right without it."""

    def are_right() -> bool:
        if "again" in mutation:
            return all(spreads(pointwise_shim, POINTWISE_SPREADING_CASES[0], False, layout) for layout in LAYOUTS)
        return stages_of_slices_are_right(pointwise_shim) and all(  # without a plan where addresses are not aligned
            pointwise_shim.fault("fprop", case, layout, seed, **plan) in ("", None)
            for case, layout, seed, plan in POINTWISE_TELLING_RUNS
        )

    assert are_right()
    with mutated(pointwise_shim.library, POINTWISE_MUTATIONS, mutation):
        assert not are_right()


def test_pointwise_cases_reach_every_way(pointwise_plans):
    """That the cases for the GPU do not miss a way to load or store under a contract, or a number of blocks."""
    told = set()
    for case, tf32, layout in itertools.product(POINTWISE_CASES, (False, True), LAYOUTS):
        settings = {"strides": layout_strides(case, layout), "tf32": tf32}
        assert pointwise_plans("refusal", "fprop", case, **settings) is None, case
        text = pointwise_plans("describe", "fprop", case, **settings)
        contract, loads, stores, blocks, slices = re.search(
            r"^(one|three) .* by ([a-z ]+), y by ([a-z ]+), .* for (\d) blocks of (\d+) slices", text
        ).groups()
        told |= {(contract, loads, stores), (contract, f"{blocks} blocks"), (contract, f"{slices} slices")}
        if loads == "fours in stages":
            told.add((re.search(r"tile of \d+", text)[0], case.C // 4))
    ways = {
        *itertools.product(("fours of weights", "fours of channels", "single values"), ("fours", "single values")),
        ("fours", "fours"),
    }
    assert told == {
        *((contract, *way) for contract in ("one", "three") for way in ways),
        *((contract, f"{number} blocks") for contract in ("one", "three") for number in (1, 2, 4, 8)),
        *((contract, f"{number} slices") for contract in ("one", "three") for number in (1, 2, 4, 8)),
        ("one", "16 slices"),
        ("one", "fours in stages", "fours"),
        *itertools.product(("tile of 32", "tile of 64"), (16, 32, 64)),
    }, told
