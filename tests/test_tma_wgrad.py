"""The tma_wgrad engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math

import pytest
import torch

from tests.cases import VIEWS, Case, integers, make_tensors, references
from tests.emulation import mutated
from tests.mutations import TMA_WGRAD_MUTATIONS, TMA_WGRAD_PLAN_MUTATIONS
from tests.problems import pixel_strides, random_tma_cases

# Ragged channels on both sides, a stride, a dilation, points, images of one pixel.
TMA_WGRAD_SHIM_CASES = [
    Case(2, 24, 7, 9, 72, 3, 3, padding=(1, 1)),
    Case(3, 136, 5, 6, 136, 1, 1),
    Case(2, 8, 12, 11, 16, 5, 3, stride=(2, 3), padding=(2, 1)),
    Case(1, 72, 10, 10, 64, 2, 3, padding=(2, 0), dilation=(3, 2)),
    Case(70, 16, 1, 1, 8, 1, 1),
    Case(3, 8, 4, 4, 72, 3, 3, stride=(2, 2)),
    Case(3, 72, 9, 4, 8, 3, 3, stride=(2, 2), padding=(1, 0)),
    Case(3, 16, 3, 9, 8, 1, 1, stride=(8, 2)),
]
# Channels that are no multiples of 8, which planes alone may have.
TMA_WGRAD_SHIM_PLANES = [
    *TMA_WGRAD_SHIM_CASES[:5],
    Case(2, 13, 9, 8, 67, 3, 3, padding=(1, 1)),
    Case(3, 3, 12, 7, 5, 3, 2, stride=(2, 1)),
]


@pytest.mark.parametrize("number", range(len(TMA_WGRAD_SHIM_PLANES)))
def test_tma_wgrad_shim_exact_from_planes(tma_wgrad_shim, number):
    case = TMA_WGRAD_SHIM_PLANES[number]
    for seed, (channels, blocks) in enumerate(itertools.product((128, 64), (1, 3))):
        fault = tma_wgrad_shim.fault("wgrad", case, "contiguous", 10 * number + seed, channels=channels, blocks=blocks)
        assert fault == "", f"{case}, {channels}, {blocks}: {fault}"


@pytest.mark.parametrize("pixels", ["x", "dy"])
def test_tma_wgrad_shim_exact_from_planes_and_pixels(tma_wgrad_shim, pixels):
    """One of the two is copied."""
    case = TMA_WGRAD_SHIM_CASES[0]
    tensors = make_tensors(case, torch.float16, integers)
    expected = references(case, tensors)["wgrad"].half()
    tensors[pixels] = VIEWS["channels_last"](tensors[pixels])
    out = torch.full_like(expected, math.nan)
    assert tma_wgrad_shim.run("wgrad", case, tensors, out) == ""
    assert torch.equal(out, expected)


@pytest.mark.parametrize("number", range(len(TMA_WGRAD_SHIM_CASES)))
def test_tma_wgrad_shim_exact(tma_wgrad_shim, number):
    case = TMA_WGRAD_SHIM_CASES[number]
    for seed, (channels, blocks) in enumerate(itertools.product((128, 64), (1, 2, 3, 4))):
        dtype = (torch.float16, torch.bfloat16)[(number + blocks) % 2]
        for parts in (0, 2):
            wishes = {"channels": channels, "blocks": blocks, "parts": parts}
            fault = tma_wgrad_shim.fault("wgrad", case, "channels_last", 10 * number + seed, dtype, **wishes)
            assert fault == "" or (fault is None and parts), f"{case}, {dtype}, {wishes}: {fault}"


@pytest.mark.parametrize("mutation", TMA_WGRAD_MUTATIONS)
def test_tma_wgrad_shim_sees_what_is_missing(tma_wgrad_shim, mutation):
    def are_right() -> bool:
        case = Case(9, 24, 9, 10, 72, 3, 3, padding=(1, 1))
        one_stage = Case(1, 24, 5, 5, 72, 3, 3, padding=(1, 1))  # for two warpgroups by turns
        runs = [(case, 64, 1), (case, 64, 3), (case, 128, 1), (one_stage, 64, 1)]
        layout = "contiguous" if mutation.startswith("copies") else "channels_last"
        return all(
            tma_wgrad_shim.fault("wgrad", case, layout, seed, channels=channels, blocks=blocks) == ""
            for seed, (case, channels, blocks) in itertools.product(range(1, 4), runs)
        )

    assert are_right()
    with mutated(tma_wgrad_shim.library, TMA_WGRAD_MUTATIONS, mutation):
        assert not are_right()


TMA_WGRAD_KINDS = {
    *(f"tile of {channels} x {blocks}" for channels in (64, 128) for blocks in (1, 2, 3, 4)),
    *("parts", "several jobs", "the longest chains", "copies of both", "a copy of one"),
}


def test_tma_wgrad_plans_are_sound(tma_wgrad_plans):
    """Each pixel of each tile once, in short chains; planes and, in channels_last, what boxes reach, nothing else."""
    planned, count = 0, 4000
    for seed, (case, _) in enumerate(random_tma_cases(count, seed=0)):
        fault = tma_wgrad_plans.fault("wgrad", case, seed)
        assert not fault, f"{case}, seed {seed}: {fault}"
        planned += fault is not None
    assert planned > 0.4 * count
    assert tma_wgrad_plans.seen() >= TMA_WGRAD_KINDS


@pytest.mark.parametrize("mutation", TMA_WGRAD_PLAN_MUTATIONS)
def test_tma_wgrad_plan_checks_see_what_is_wrong(tma_wgrad_plans, mutation):
    cases = enumerate(random_tma_cases(4000, seed=0))
    with mutated(tma_wgrad_plans.library, TMA_WGRAD_PLAN_MUTATIONS, mutation):
        assert any(tma_wgrad_plans.fault("wgrad", case, seed) for seed, (case, _) in cases)


@pytest.mark.parametrize("strides_of", [pixel_strides, lambda _: {}], ids=["channels_last", "contiguous"])
def test_tma_wgrad_estimates_grow_with_the_work(tma_wgrad_plans, strides_of):
    aligned, grown, settings = [ctypes.c_uint64(0)] * 3, 0, {"dtype": torch.float16}
    for case, _ in random_tma_cases(1000, seed=1):
        if case.C % 8 or case.K % 8:
            continue
        if tma_wgrad_plans("refusal", "wgrad", case, strides=strides_of(case), **settings) is not None:
            continue
        once = tma_wgrad_plans("cycles", "wgrad", case, *aligned, strides=strides_of(case), **settings)
        for letter in "NCK":
            double = dataclasses.replace(case, **{letter: 2 * getattr(case, letter)})
            twice = tma_wgrad_plans("cycles", "wgrad", double, *aligned, strides=strides_of(double), **settings)
            assert twice >= once > 0, f"{double}: {twice} after {once}"
            grown += twice > once
    assert grown > 1000
