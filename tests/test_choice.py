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

from tests.cases import DTYPES, KERNELS, OPERATOR_NUMBER, Case, in_layout
from tests.emulation import mutated
from tests.engines import (
    ShimEngine,
)
from tests.mutations import CHOICE_MUTATIONS, CHOICE_OF_WGRAD_MUTATIONS
from tests.problems import (
    REFUSAL,
    random_gather_cases,
    random_mma_cases,
    random_pointwise_cases,
    random_stem_cases,
    random_tma_cases,
)


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
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        tensors = in_layout(tensors, "channels_last" if row["problem"].get("channels_last") else "contiguous")
        name = library.choose(OPERATOR_NUMBER[operator], ShimEngine.fields(case, tensors, True)).decode()
        # One that is not there took 1.5 times as long as the one that was chosen then, or was not tried.
        result.append(row["us"].get(name, 1.5 * max(row["us"].values())) / min(row["us"].values()))
    return result


def test_chosen_engines_are_near_the_fastest(choice):
    """Where another one would be faster that is little; and without a rule for few output channels it is more."""
    ratios = times_over_the_fastest(choice, "h200-engines.json")
    mean = statistics.geometric_mean(ratios)
    assert len(ratios) > 500
    assert mean < 1.01
    assert max(ratios) < 1.35
    with mutated(choice, CHOICE_MUTATIONS, "direct with few output channels and few outputs"):
        assert statistics.geometric_mean(times_over_the_fastest(choice, "h200-engines.json")) > mean + 0.01


def test_chosen_engines_of_wgrad_are_near_the_fastest(choice):
    """Of planes of 16 bits, which one engine copies; it is more if that one never yields, or always does."""
    args = ("h100-wgrad-engines.json", "wgrad", torch.float16)
    ratios = times_over_the_fastest(choice, *args)
    assert len(ratios) > 100
    assert statistics.geometric_mean(ratios) < 1.015
    assert max(ratios) < 1.25
    for mutation in CHOICE_OF_WGRAD_MUTATIONS:
        with mutated(choice, CHOICE_MUTATIONS | CHOICE_OF_WGRAD_MUTATIONS, mutation):
            assert statistics.geometric_mean(times_over_the_fastest(choice, *args)) > 1.1


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
    shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
    tensors = {name: torch.empty(shape, dtype=torch.float16, device="meta") for name, shape in shapes.items()}
    fields = ShimEngine.fields(case, in_layout(tensors, layout), True)
    assert choice.choose(OPERATOR_NUMBER["wgrad"], fields).decode() == engine


def test_every_problem_has_an_engine(
    gather_plans, stem_plans, pointwise_plans, mma_plans, tma_plans, tma_wgrad_plans, direct_shim
):
    """The others refuse in a sentence or have a plan, whatever the addresses are; direct takes what is left."""
    rng, aligned = random.Random(3), [ctypes.c_uint64(0)] * 3
    taken_by = dict.fromkeys(["gather", "stem", "pointwise", "mma", "tma", "tma_wgrad"], 0)
    planes = itertools.chain(
        ((case, dtype) for case, _, dtype in random_gather_cases(4000, seed=2)),
        ((case, torch.float32) for case in random_pointwise_cases(2500, seed=2)),
        ((case, DTYPES[number % 3]) for number, case in enumerate(random_stem_cases(1500, seed=2))),
        ((case, torch.float32) for case, _ in random_mma_cases(4000, seed=2)),
    )
    pixels = ((case, DTYPES[1 + number % 2]) for number, (case, _) in enumerate(random_tma_cases(4000, seed=2)))
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
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        settings = {}
        if layout == "channels_last":
            tensors = in_layout(tensors, layout)
            settings["strides"] = {name: tensor.stride() for name, tensor in tensors.items()}
        for operator in OPERATOR_NUMBER:
            assert direct_shim.refuses(operator, case, tensors) is None
            places = [ctypes.c_uint64(rng.choice([0, 1, 2, 4]) * dtype.itemsize) for _ in range(3)]
            for engine, plans, at in (
                # Pixels elsewhere may be others', of taps far apart.
                ("gather", gather_plans, [dtype, *(places if layout == "contiguous" else aligned)[:2]]),
                ("stem", stem_plans, places),
                ("pointwise", pointwise_plans, places),
                ("mma", mma_plans, places),
                ("tma", tma_plans, aligned),  # elsewhere a call is others'
                ("tma_wgrad", tma_wgrad_plans, aligned),
            ):
                refusal = plans("refusal", operator, case, dtype=dtype, **settings)
                if refusal is None:
                    taken_by[engine] += 1
                    of_type = {} if engine == "gather" else {"dtype": dtype}
                    estimate = plans("cycles", operator, case, *at, **of_type, **settings)
                    assert estimate > 0, f"{operator} of {case}, {dtype}, by {engine}"
                else:
                    assert REFUSAL.fullmatch(refusal), refusal
    assert min(taken_by.values()) > 2000
