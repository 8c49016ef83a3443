"""The mma engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import re

import pytest
import torch

from tests.cases import LAYOUTS, Case, check_bounds, equal, make_tensors
from tests.emulation import PROBLEM_FIELDS, mutated
from tests.engines import ShimEngine, spreads
from tests.mutations import MMA_MUTATIONS, MMA_PLAN_MUTATIONS
from tests.problems import MMA_CASES, WGMMA_OPERATORS, check_refusal, layout_strides, random_mma_cases

MMA_KINDS = {
    *(f"shape {number}" for number in range(5)),
    *(f"{number} parts" for number in (1, 2, 4, 8)),
    *(f"planes of x by {how}" for how in ("words", "fours", "boxes in bulk", "runs", "runs in bulk", "planes")),
    *(f"pixels of x by {how}" for how in ("words", "fours", "boxes in bulk")),
    *(f"w by {how}" for how in ("words", "fours", "boxes in bulk", "runs", "runs in bulk")),
    *(f"taps of w by {how}" for how in ("words", "fours", "boxes in bulk")),
    *(
        "y by 1",
        "y by 4",
        "pixels of y by 1",
        "pixels of y by 4",
        "lead",
        "a ring that turns",
        "planes of x by planes in bulk",
        "lines of x by boxes in bulk",
    ),
}


def test_mma_plans_are_sound(mma_plans):
    """Each output once, each term once and where the convolution says, all of it in shared memory and aligned."""
    planned, count = 0, 3000
    for seed, (case, operator) in enumerate(random_mma_cases(count, seed=0)):
        fault = mma_plans.fault(operator, case, seed)
        assert not fault, f"{operator} of {case}, seed {seed}: {fault}"
        planned += fault is not None
    assert planned > 0.9 * count
    assert mma_plans.seen() >= MMA_KINDS


@pytest.mark.parametrize("mutation", MMA_PLAN_MUTATIONS)
def test_mma_plan_checks_see_what_is_wrong(mma_plans, mutation):
    cases = enumerate(random_mma_cases(3000, seed=0))
    with mutated(mma_plans.library, MMA_PLAN_MUTATIONS, mutation):
        assert any(mma_plans.fault(operator, case, seed) for seed, (case, operator) in cases)


def test_mma_divides_exactly(mma_plans):
    assert mma_plans.library.mma_wrong_divisor(0) == 0


def test_memo_tells_problems_apart_and_forgets_none_of_a_network(mma_plans):
    case = Case(2, 12, 13, 14, 15, 3, 4, (2, 1), (1, 2), (1, 2), groups=3)
    tensors = make_tensors(case, torch.float32, equal)
    fields = ShimEngine.fields(case, tensors, False)
    fault = mma_plans.library.mma_fault_of_memo
    fault.restype = ctypes.c_char_p
    assert fault(fields, len(PROBLEM_FIELDS), 0) == b""


# More channels may need a smaller chunk or tile, which is estimated better, or leave none that fits.
LEAST_MMA_GROWTH = 0.75


def test_mma_estimates_grow_with_the_work(mma_plans):
    aligned = [ctypes.c_uint64(0)] * 3
    for case, operator in random_mma_cases(1000, seed=1):
        if mma_plans("refusal", operator, case) is not None:
            continue
        once = mma_plans("cycles", operator, case, *aligned)
        for letter in "NCK":
            double = dataclasses.replace(case, **{letter: 2 * getattr(case, letter)})
            twice = mma_plans("cycles", operator, double, *aligned)
            refused = mma_plans("refusal", operator, double) is not None
            assert refused or twice >= LEAST_MMA_GROWTH * once, f"{operator} of {double}: {twice} after {once}"


def test_mma_clusters_find_room_at_once(mma_plans):
    """Where there are few tiles, on a GPU with room for as many clusters as an H200 has, for fewer, or for none."""
    for case in (
        Case(1, 256, 28, 28, 256, 3, 3, stride=(2, 2), padding=(1, 1)),
        Case(1, 512, 14, 14, 512, 3, 3, stride=(2, 2), padding=(1, 1)),
        Case(1, 512, 7, 7, 512, 3, 3, padding=(1, 1)),
    ):
        for tf32, room in itertools.product((True, False), ((66, 30, 15), (60, 28, 12), (66, 30, -1))):
            assert mma_plans("waiting", "fprop", case, *room, tf32=tf32) == 0, (case, tf32, room)


def test_mma_describes_its_configuration(mma_plans):
    """Whole and in the 320 bytes that the binding has for it."""
    for case, operator in random_mma_cases(300, seed=4):
        for tf32 in (False, True):
            if mma_plans("refusal", operator, case, tf32=tf32) is None:
                assert re.fullmatch(
                    r"(one product|three products of parts), tile of \d+ channels x \d+ x \d+ pixels, \d stages of \d+ "
                    r"channels, \d+ bytes of shared memory, x by [a-z ]+, weights by [a-z ]+, y by [a-z ]+, "
                    r"\d+ tiles for \d blocks each, about [\d.e+-]+ Mcycles",
                    mma_plans("describe", operator, case, tf32=tf32),
                )


# What the engine leaves to others, and what looks alike and is its own.
MMA_CASE = Case(1, 3, 56, 57, 64, 7, 7, stride=(2, 2), padding=(3, 3))
MMA_REFUSALS = [
    (MMA_CASE, "fprop", {}, None),
    (MMA_CASE, "fprop", {"capability": 80}, None),
    (MMA_CASE, "fprop", {"capability": 120}, None),
    (MMA_CASE, "fprop", {"capability": 75}, "Ampere"),
    (MMA_CASE, "fprop", {"capability": 0}, "Ampere"),
    (MMA_CASE, "fprop", {"dtype": torch.float16}, "float32 only"),
    (MMA_CASE, "fprop", {"dtype": torch.float64}, "float32 only"),
    (MMA_CASE, "dgrad", {}, "stride 1"),
    (MMA_CASE, "wgrad", {}, "outputs and input gradients only"),
    (MMA_CASE, "bgrad", {}, "outputs and input gradients only"),
    (Case(1, 16, 3, 80, 16, 3, 3, stride=(2, 1)), "dgrad", {}, None),  # one row: no stride in it
    (Case(1, 14, 9, 9, 16, 3, 3, groups=2), "fprop", {}, "groups of at least 8"),
    (Case(1, 16, 9, 9, 14, 3, 3, groups=2), "fprop", {}, "groups of at least 8"),
    (Case(1, 16, 900, 900, 16, 3, 3, dilation=(100, 100)), "fprop", {}, "does not fit"),
    (Case(1, 1, 20000, 20000, 1, 16384, 16384), "fprop", {}, "does not fit"),
]


@pytest.mark.parametrize("case, operator, settings, text", MMA_REFUSALS, ids=str)
def test_mma_says_what_it_refuses(mma_plans, case, operator, settings, text):
    check_refusal(mma_plans("refusal", operator, case, **settings), text)


# direct needs 2^21 taps of outputs and 2^26 multiply-adds.
@pytest.mark.parametrize(
    "case, operator, yields",
    [
        (Case(4, 64, 256, 256, 3, 3, 3, padding=(1, 1)), "fprop", True),
        (Case(3, 64, 256, 256, 3, 3, 3, padding=(1, 1)), "fprop", False),
        (Case(8, 320, 64, 64, 4, 3, 3, padding=(1, 1)), "fprop", False),
        (Case(64, 320, 64, 64, 4, 3, 3, padding=(1, 1)), "fprop", True),
        (Case(64, 320, 64, 64, 5, 3, 3, padding=(1, 1)), "fprop", False),
        (Case(4, 3, 256, 256, 64, 3, 3, padding=(1, 1)), "dgrad", True),
        (Case(3, 3, 256, 256, 64, 3, 3, padding=(1, 1)), "dgrad", False),
        (Case(4, 3, 256, 256, 9, 3, 3, padding=(1, 1)), "dgrad", False),  # few multiply-adds
        (Case(2, 64, 256, 256, 6, 3, 3, padding=(1, 1), groups=2), "fprop", True),
        (Case(1, 64, 256, 256, 6, 3, 3, padding=(1, 1), groups=2), "fprop", False),
    ],
    ids=str,
)
def test_mma_yields_with_few_output_channels(mma_plans, case, operator, yields):
    assert mma_plans("yields", operator, case) == ("direct is faster with few output channels" if yields else None)


# Few channels and several chunks of them, stems, points, small images with padding and without, lines longer than a
# tile, ragged channels, groups. Rows of x in fours (36 columns) and not, with an odd padding and with a stride.
MMA_SHIM_CASES = [
    (Case(2, 3, 19, 36, 20, 7, 7, stride=(2, 2), padding=(3, 3)), "fprop"),
    (Case(1, 40, 5, 36, 17, 3, 3, padding=(1, 1)), "fprop"),
    (Case(2, 36, 9, 9, 24, 1, 1), "fprop"),
    (Case(1, 64, 6, 6, 40, 3, 3), "fprop"),
    (Case(2, 20, 6, 6, 24, 3, 3, padding=(1, 1)), "fprop"),
    (Case(1, 5, 2, 300, 35, 2, 3, padding=(0, 2), dilation=(1, 2)), "fprop"),
    (Case(2, 16, 13, 12, 18, 1, 1, stride=(2, 3), padding=(0, 1)), "fprop"),
    (Case(1, 24, 9, 20, 36, 1, 3, stride=(2, 1), groups=2), "fprop"),
    (Case(1, 17, 5, 32, 24, 3, 3, padding=(1, 1)), "dgrad"),
    (Case(1, 16, 7, 7, 36, 3, 2, padding=(0, 1), groups=2), "dgrad"),
]


@pytest.mark.xdist_group("mma_shim_exact")  # its cases are counted together
@pytest.mark.parametrize("number", range(len(MMA_SHIM_CASES)))
def test_mma_shim_exact(mma_shim, number):
    """Integers, with Hopper's features and without, under both contracts: each shape of a tile in turn."""
    case, operator = MMA_SHIM_CASES[number]
    for seed, (layout, hopper) in enumerate(itertools.product(LAYOUTS, (True, False))):
        settings = {"shape": (seed + number) % 5, "hopper": hopper, "tf32": (seed + number) % 3 == 0}
        fault = mma_shim.fault(operator, case, layout, 3 * number + seed + 1, **settings)
        MMA_COPIES.update((name, mma_shim.last(name)) for name in ("x_copies", "w_copies"))
        assert fault == "", f"{operator} of {case}, {layout}, {settings}, seed {3 * number + seed + 1}: {fault}"
    if number == len(MMA_SHIM_CASES) - 1 and len(MMA_COPIES) > 2:  # not this case alone
        kinds = {*(("x_copies", i) for i in range(5)), *(("w_copies", i) for i in range(4))}
        assert kinds == MMA_COPIES


@pytest.mark.parametrize("splits", [2, 4])
def test_mma_shim_adds_up_over_a_cluster(mma_shim, splits):
    case = Case(1, 128 * splits, 3, 5, 20, 1, 1)
    assert [mma_shim.fault("fprop", case, layout, splits, shape=1, splits=splits) for layout in LAYOUTS] == ["", ""]


MMA_COPIES: set[tuple[str, int]] = set()  # what brought x and w in the runs above

MMA_SPREADING_CASE = Case(1, 16, 7, 20, 20, 3, 3)


def test_mma_shim_keeps_the_contract_in_long_sums(mma_shim):
    """Products that are all the same, of the size at which additions err most: in two sums at least."""
    case = Case(1, 8192, 1, 4, 4, 1, 1)
    tensors = make_tensors(case, torch.float32, lambda shape, _: torch.full(shape, 0.24446875))
    tensors["w"].fill_(1)
    assert mma_shim.fault("fprop", case, "contiguous", 0, tf32=False, shape=1, splits=1) is None
    for wishes in ({"shape": 0}, {"shape": 1, "splits": 2}):
        out = torch.full(case.y_shape, math.nan)
        assert mma_shim.run("fprop", case, tensors, out, tf32=False, **wishes) == ""
        check_bounds(case, {"fprop": out}, tensors, tf32=())


@pytest.mark.parametrize("tf32", [False, True])
def test_mma_shim_spreads_nan_and_inf_to_those_that_read_them(mma_shim, tf32):
    assert spreads(mma_shim, MMA_SPREADING_CASE, tf32, shape=1)


@pytest.mark.parametrize("mutation", MMA_MUTATIONS)
def test_mma_shim_sees_what_is_missing(mutation, mma_shim):
    """The shim itself: what is left out shows in one of a few runs."""
    # Rounds of a ring of words and of one of boxes; without the mutation they are right.
    cases = [Case(1, 300, 4, W, 20, 1, 1, padding=(1, 1)) for W in (9, 12)]
    with mutated(mma_shim.library, MMA_MUTATIONS, mutation):
        assert (
            not spreads(mma_shim, MMA_SPREADING_CASE, False, shape=1)
            if "Inf" in mutation
            else any(
                mma_shim.fault("fprop", case, "contiguous", seed, shape=1)
                for seed in (1, 3, 5, 2, 7, 9)
                for case in cases
            )
        )


def test_mma_cases_reach_every_way(mma_plans):
    """That the cases for the GPU do not miss a shape of a tile, or a kind of copy, or a number of blocks."""
    told = set()
    for case, operator, layout in itertools.product(MMA_CASES, WGMMA_OPERATORS, LAYOUTS):
        if operator == "dgrad" and case.stride != (1, 1):
            continue
        strides = layout_strides(case, layout)
        assert mma_plans("refusal", operator, case, strides=strides) is None, case
        text = mma_plans("describe", operator, case, strides=strides)
        by_x, by_w, blocks = re.search(r" x by ([a-z ]+), weights by ([a-z ]+),.*for (\d) blocks", text).groups()
        shape = mma_plans("shape", operator, case, strides=strides)
        told |= {f"shape {shape}", f"x by {by_x}", f"w by {by_w}", f"{blocks} blocks"}
    assert told >= {
        *(f"shape {number}" for number in range(5)),
        *(f"x by {how}" for how in ("boxes", "lines", "planes", "runs", "single values")),
        *(f"w by {how}" for how in ("boxes", "runs", "single values")),
        *(f"{number} blocks" for number in (1, 2, 4, 8)),
    }, told
