"""Which engine is chosen, and that there is one for every problem."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics

import pytest
import torch

from tests.cases import DTYPES, KERNELS, LAYOUTS, OPERATOR_NUMBER, Case
from tests.engines import meta_tensors, problem_fields
from tests.problems import (
    random_gather_cases,
    random_mma_cases,
    random_pointwise_cases,
    random_stem_cases,
    random_tma_cases,
)


# Files of results/ with the times of each engine; the least problems in them, and how much slower than the fastest the
# chosen engines may be, on average and at most.
@pytest.mark.parametrize(
    "file, operator, dtype, least, mean, most",
    [
        ("h200-engines.json", "fprop", torch.float32, 500, 1.01, 1.35),
    ],
)
def test_chosen_engines_are_near_the_fastest(choice, file, operator, dtype, least, mean, most):
    ratios = []
    for row in json.loads((KERNELS.parent / "results" / file).read_text())["problems"]:
        problem, times = row["problem"], row["us"]
        sizes = {name: problem[name] for name in ("N", "C", "H", "W", "K", "R", "S", "groups")}
        stride, dilation = problem["stride"], problem["dilation"]
        case = Case(**sizes, stride=(stride,) * 2, padding=tuple(problem["padding"]), dilation=(dilation,) * 2)
        layout = "channels_last" if problem.get("channels_last") else "contiguous"
        tensors = meta_tensors(case, dtype, layout) | {"w": meta_tensors(case, dtype)["w"]}
        name = choice.choose(OPERATOR_NUMBER[operator], problem_fields(case, tensors, True)).decode()
        # An engine without a time took 1.5 times as long as the one that was chosen then, or was not tried.
        ratios.append(times.get(name, 1.5 * max(times.values())) / min(times.values()))
    assert len(ratios) > least
    assert statistics.geometric_mean(ratios) < mean
    assert max(ratios) < most


# Planes of 16 bits. wgmma loads rows that begin between 16 bytes by single values or pairs; tma copies all of them.
@pytest.mark.parametrize(
    "case, operator, name",
    [
        *((Case(16, 128, 128, columns, 256, 3, 3, padding=(1, 1)), operator, "tma" if columns > 128 else "wgmma")
          for columns in (128, 129, 130, 132) for operator in ("fprop", "dgrad")),
        (Case(8, 64, 512, 1024, 128, 3, 3), "dgrad", "wgmma"),
        (Case(8, 64, 512, 256, 128, 5, 7), "dgrad", "wgmma"),
        (Case(8, 64, 512, 1023, 128, 3, 3), "dgrad", "tma"),
        (Case(8, 64, 512, 1024, 128, 3, 3), "wgrad", "hopper_wgrad"),
        (Case(32, 64, 129, 129, 256, 1, 1), "wgrad", "hopper_wgrad"),
        (Case(32, 64, 56, 56, 64, 1, 1), "wgrad", "tma_wgrad"),
    ],
    ids=str,
)  # fmt: skip
def test_planes_of_16_bits(choice, case, operator, name):
    fields = problem_fields(case, meta_tensors(case, torch.float16), True)
    assert choice.choose(OPERATOR_NUMBER[operator], fields).decode() == name


# Weight gradients of 16 bits in channels_last, by output channels: a tile of tma_wgrad has 128.
@pytest.mark.parametrize("channels, name", [(64, "hopper_wgrad"), (128, "tma_wgrad")])
def test_pixels_of_16_bits(choice, channels, name):
    case = Case(16, 64, 512, 512, channels, 3, 3, padding=(1, 1))
    fields = problem_fields(case, meta_tensors(case, torch.float16, "channels_last"), True)
    assert choice.choose(OPERATOR_NUMBER["wgrad"], fields).decode() == name


# Pyramids of networks for segmentation by taps; taps as near as this, and small layers, as a whole.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case, name",
    [
        *((Case(32, 2048, 65, 65, 256, 3, 3, padding=(d, d), dilation=(d, d)), "tma_wgrad") for d in (1, 12, 24, 36)),
        (Case(32, 512, 65, 65, 256, 3, 3, padding=(60, 60), dilation=(60, 60)), "dilated"),
        (Case(32, 2048, 65, 65, 256, 1, 1), "hopper_wgrad"),
        (Case(32, 64, 56, 56, 64, 3, 3, padding=(2, 2), dilation=(2, 2)), "tma_wgrad"),
        (Case(2, 64, 64, 64, 64, 3, 3, padding=(12, 12), dilation=(12, 12)), "hopper_wgrad"),
        (Case(1, 16, 20, 20, 16, 3, 3, padding=(6, 6), dilation=(6, 6)), "hopper_wgrad"),
        # No estimates to compare.
        (Case(32, 256, 65, 65, 256, 3, 3, padding=(4, 4), dilation=(4, 4), groups=16), "mma_wgrad"),
    ],
    ids=str,
)
def test_weight_gradients_of_far_taps_are_split(choice, case, name, layout):
    fields = problem_fields(case, meta_tensors(case, layout=layout), True)
    assert choice.choose(OPERATOR_NUMBER["wgrad"], fields).decode() == name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("distance", [12, 36, 60])
@pytest.mark.parametrize(
    "dtype, whole",
    [
        (torch.float32, {("contiguous", 12), ("channels_last", 12)}),  # in full accuracy
        (torch.float16, {("contiguous", 12), ("contiguous", 36)}),  # parts of planes would be copied
    ],
)
def test_weight_gradients_of_far_taps_are_split_by_contract(choice, dtype, whole, distance, layout):
    case = Case(32, 2048, 65, 65, 256, 3, 3, padding=(distance, distance), dilation=(distance, distance))
    fields = problem_fields(case, meta_tensors(case, dtype, layout), False)
    name = "tma_wgrad" if (layout, distance) in whole else "dilated"
    assert choice.choose(OPERATOR_NUMBER["wgrad"], fields).decode() == name


# Weight gradients of few multiply-adds, and gradients of 16 bits to few channels: tensor cores, though they multiply
# zeros, but for many pixels at a stride.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "operator, dtype, case, name",
    [
        ("wgrad", torch.float32, Case(1, 8, 8, 8, 8, 1, 1), "hopper_wgrad"),
        ("wgrad", torch.float32, Case(2, 16, 16, 16, 3, 3, 3, padding=(1, 1)), "hopper_wgrad"),
        ("dgrad", torch.float16, Case(16, 3, 512, 512, 64, 3, 3, padding=(1, 1)), "tma"),
        ("dgrad", torch.float16, Case(4, 2, 64, 64, 32, 5, 7, padding=(2, 3)), "tma"),
        ("dgrad", torch.float16, Case(2, 3, 224, 224, 64, 7, 7, stride=(2, 2), padding=(3, 3)), "tma"),
        ("dgrad", torch.float16, Case(32, 3, 224, 224, 64, 7, 7, stride=(2, 2), padding=(3, 3)), "direct"),
    ],
    ids=str,
)
def test_few_multiply_adds_and_few_channels(choice, operator, dtype, case, name, layout):
    fields = problem_fields(case, meta_tensors(case, dtype, layout), True)
    assert choice.choose(OPERATOR_NUMBER[operator], fields).decode() == name


def test_every_problem_has_an_engine(
    gather_plans, stem_plans, pointwise_plans, mma_plans, tma_plans, hopper_wgrad_plans, tma_wgrad_plans, direct_shim
):
    """The others refuse in a sentence or have a plan; direct takes what is left."""
    planners = (gather_plans, stem_plans, pointwise_plans, mma_plans, tma_plans, hopper_wgrad_plans)
    rng = random.Random(3)
    planes = [(case, dtype) for case, _, dtype in random_gather_cases(700, seed=2)]
    planes += [(case, torch.float32) for case in random_pointwise_cases(400, seed=2)]
    planes += [(case, rng.choice(DTYPES[:3])) for case in random_stem_cases(400, seed=2)]
    planes += [(case, torch.float32) for case, _ in random_mma_cases(500, seed=2)]
    pixels = [(case, rng.choice(DTYPES[1:3])) for case, _ in random_tma_cases(1200, seed=2)]
    taken_by = dict.fromkeys(planners, 0)
    problems = [(*problem, "contiguous") for problem in planes] + [(*problem, "channels_last") for problem in pixels]
    for case, dtype, layout in problems:
        if rng.random() < 0.2:  # depthwise, and few channels
            groups = rng.choice([1, case.C])
            channels = {"C": groups * rng.choice([1, 3, 7]), "K": groups * rng.randint(1, 9), "groups": groups}
            case = dataclasses.replace(case, **channels)
        for operator in OPERATOR_NUMBER:
            assert direct_shim.refusal(operator, case, dtype=dtype, layout=layout) is None
            for planner in planners:
                if planner.refusal(operator, case, dtype=dtype, layout=layout) is None:
                    taken_by[planner] += 1
                    cycles = planner.cycles(operator, case, dtype=dtype, layout=layout)
                    assert cycles > 0, f"{operator} of {case}, {dtype}, {layout}"
    assert min(taken_by.values()) > 200
