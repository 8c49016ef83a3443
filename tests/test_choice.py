"""Which engine is chosen, and that there is one for every problem."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import random
import statistics

import pytest
import torch

from tests.cases import DTYPES, KERNELS, OPERATOR_NUMBER, Case
from tests.engines import meta_tensors, problem_fields
from tests.problems import (
    random_gather_cases,
    random_mma_cases,
    random_pointwise_cases,
    random_stem_cases,
    random_tma_cases,
)


def chosen(library: ctypes.CDLL, operator: str, case: Case, dtype: torch.dtype, layout: str) -> str:
    tensors = meta_tensors(case, dtype, layout) | {"w": meta_tensors(case, dtype)["w"]}
    return library.choose(OPERATOR_NUMBER[operator], problem_fields(case, tensors, True)).decode()


def times_over_the_fastest(
    library: ctypes.CDLL, file: str, operator: str = "fprop", dtype: torch.dtype = torch.float32
) -> list[float]:
    """Of the engines that are chosen, by the times of each engine in a file of results/."""
    result = []
    for row in json.loads((KERNELS.parent / "results" / file).read_text())["problems"]:
        sizes = {name: row["problem"][name] for name in ("N", "C", "H", "W", "K", "R", "S", "groups")}
        stride, dilation = row["problem"]["stride"], row["problem"]["dilation"]
        case = Case(
            **sizes, stride=(stride, stride), padding=tuple(row["problem"]["padding"]), dilation=(dilation, dilation)
        )
        layout = "channels_last" if row["problem"].get("channels_last") else "contiguous"
        name = chosen(library, operator, case, dtype, layout)
        # One that is not there took 1.5 times as long as the one that was chosen then, or was not tried.
        result.append(row["us"].get(name, 1.5 * max(row["us"].values())) / min(row["us"].values()))
    return result


def test_chosen_engines_are_near_the_fastest(choice):
    """Where another one would be faster that is little."""
    ratios = times_over_the_fastest(choice, "h200-engines.json")
    assert len(ratios) > 500
    assert statistics.geometric_mean(ratios) < 1.01
    assert max(ratios) < 1.35


def test_chosen_engines_of_wgrad_are_near_the_fastest(choice):
    """Of planes of 16 bits, which one engine copies."""
    args = ("h100-wgrad-engines.json", "wgrad", torch.float16)
    ratios = times_over_the_fastest(choice, *args)
    assert len(ratios) > 100
    assert statistics.geometric_mean(ratios) < 1.015
    assert max(ratios) < 1.25


@pytest.mark.parametrize(
    "case, layout, engine",
    [
        (Case(32, 256, 14, 14, 256, 3, 3, padding=(1, 1)), "contiguous", "tma_wgrad"),
        (Case(32, 256, 56, 56, 64, 1, 1), "contiguous", "wgrad"),
        (Case(1, 8, 7, 7, 8, 3, 3, padding=(1, 1)), "contiguous", "direct"),  # little to multiply
        (Case(16, 64, 64, 64, 2, 3, 3, padding=(1, 1)), "contiguous", "direct"),  # few output channels
        (Case(96, 1, 64, 64, 1, 21, 21, padding=(10, 10)), "contiguous", "direct"),  # a tap for each 64 columns
        (Case(1, 8, 512, 512, 8, 63, 63, padding=(31, 31)), "channels_last", "direct"),  # 1.7 GB of sums
        (Case(1, 8, 512, 512, 8, 31, 31, padding=(15, 15)), "channels_last", "tma_wgrad"),
    ],
    ids=str,
)
def test_chosen_engine_of_wgrad(choice, case, layout, engine):
    assert chosen(choice, "wgrad", case, torch.float16, layout) == engine


def test_every_problem_has_an_engine(
    gather_plans, stem_plans, pointwise_plans, mma_plans, tma_plans, tma_wgrad_plans, direct_shim
):
    """The others refuse in a sentence or have a plan; direct takes what is left."""
    rng, planners = random.Random(3), (gather_plans, stem_plans, pointwise_plans, mma_plans, tma_plans, tma_wgrad_plans)
    taken_by = {planner.engine: 0 for planner in planners}
    planes = itertools.chain(
        ((case, dtype) for case, _, dtype in random_gather_cases(1500, seed=2)),
        ((case, torch.float32) for case in random_pointwise_cases(800, seed=2)),
        ((case, DTYPES[number % 3]) for number, case in enumerate(random_stem_cases(800, seed=2))),
        ((case, torch.float32) for case, _ in random_mma_cases(1000, seed=2)),
    )
    pixels = ((case, DTYPES[1 + number % 2]) for number, (case, _) in enumerate(random_tma_cases(2500, seed=2)))
    cases = itertools.chain(
        zip(planes, itertools.repeat("contiguous"), strict=False),
        zip(pixels, itertools.repeat("channels_last"), strict=False),
    )
    for (case, dtype), layout in cases:
        if rng.random() < 0.2:  # depthwise, and few channels
            groups = rng.choice([1, case.C])
            case = dataclasses.replace(
                case, C=groups * rng.choice([1, 3, 7]), K=groups * rng.randint(1, 9), groups=groups
            )
        settings = {"dtype": dtype, "layout": layout}
        for operator in OPERATOR_NUMBER:
            assert direct_shim.refusal(operator, case, **settings) is None
            for planner in planners:
                if planner.refusal(operator, case, **settings) is None:
                    taken_by[planner.engine] += 1
                    assert planner.cycles(operator, case, **settings) > 0, f"{operator} of {case}, {settings}"
    assert min(taken_by.values()) > 500
