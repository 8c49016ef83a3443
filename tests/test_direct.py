"""The direct engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import itertools
import math
import re
import struct
import subprocess

import pytest
import torch
import torch.nn.functional as F

from tests.cases import (
    DENSE_CASES,
    DEPTHWISE_CASES,
    DTYPES,
    EXACT_CASES,
    FILLS,
    KERNELS,
    LEAST_TF32_WORK_IN_SHIM,
    OPERANDS,
    OPERATOR_NUMBER,
    OTHER_FILLS,
    ROUNDING_CASES,
    VIEWS,
    Case,
    before_guard_page,
    check_bounds,
    check_exact,
    integers,
    make_tensors,
    named,
    references,
    round_to_tf32,
    under_a_tf32_step,
    without_padding,
)
from tests.engines import right


@pytest.mark.parametrize("case", EXACT_CASES, ids=str)
def test_direct_shim_exact(direct_shim, case):
    tensors = make_tensors(case, torch.float32, integers)
    check_exact(case, direct_shim(case, tensors), tensors)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", DENSE_CASES[:10] + DEPTHWISE_CASES[:5], ids=str)
def test_direct_shim_exact_other_dtypes(direct_shim, case, dtype):
    tensors = make_tensors(case, dtype, integers)
    check_exact(case, direct_shim(case, tensors), tensors)


@pytest.mark.parametrize("fill", FILLS, ids=named)
@pytest.mark.parametrize("tf32", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("case", ROUNDING_CASES, ids=str)
def test_direct_shim_rounding_fp32(direct_shim, case, tf32, fill):
    tensors = make_tensors(case, torch.float32, fill)
    operators = case.tf32_operators(torch.float32, tf32, LEAST_TF32_WORK_IN_SHIM)
    results = direct_shim(case, tensors, tf32)
    check_bounds(case, results, tensors, operators)
    # More exactly: fp32 sums of operands that were rounded, both of them, to nearest with ties away from zero.
    rounded = {name: round_to_tf32(tensor) if name != "bias" else tensor for name, tensor in tensors.items()}
    check_bounds(case, {name: results[name] for name in operators}, rounded, tf32=())


@pytest.mark.parametrize("dtype, fill", OTHER_FILLS)
@pytest.mark.parametrize("case", ROUNDING_CASES, ids=str)
def test_direct_shim_rounding_other_dtypes(direct_shim, case, dtype, fill):
    tensors = make_tensors(case, dtype, fill)
    check_bounds(case, direct_shim(case, tensors, tf32=True), tensors, tf32=())


@pytest.mark.parametrize("view", VIEWS)
def test_direct_shim_takes_any_strides(direct_shim, view):
    case = Case(2, 6, 9, 10, 9, 3, 2, stride=(1, 2), padding=(1, 1), groups=3)
    tensors = make_tensors(case, torch.float32, integers)
    tensors |= {name: VIEWS[view](tensors[name]) for name in ("x", "w", "dy")}
    check_exact(case, direct_shim(case, tensors), tensors)


def test_direct_shim_writes_any_strides(direct_shim):
    case = Case(2, 4, 9, 10, 6, 3, 2, padding=(1, 1))
    tensors = make_tensors(case, torch.float32, integers)
    results = {}
    for operator, shape in {"fprop": case.y_shape, "dgrad": case.x_shape, "wgrad": case.w_shape}.items():
        out = VIEWS["channels_last"](torch.full(shape, math.nan))
        results[operator] = direct_shim.run(operator, case, tensors, False, out)
    check_exact(case, results, tensors)


def test_direct_shim_without_bias(direct_shim):
    case = DENSE_CASES[2]
    tensors = make_tensors(case, torch.float32, integers)
    y = direct_shim(case, {name: tensors[name] for name in ("x", "w", "dy")})["fprop"]
    assert torch.equal(y, F.conv2d(tensors["x"], tensors["w"], **case.kwargs))


def test_direct_shim_propagates_nan_and_inf(direct_shim):
    """Into exactly the elements that read them; under TF32 too, and for the NaN with all bits set."""
    case = Case(1, 16, 40, 37, 8, 3, 3)
    assert case.tf32_operators(torch.float32, True, LEAST_TF32_WORK_IN_SHIM) == set(OPERANDS)
    for special in (math.inf, -math.inf, struct.unpack("f", b"\xff\xff\xff\x7f")[0]):
        tensors = make_tensors(case, torch.float32, under_a_tf32_step)
        tensors["x"][0, 3, 5, 7] = tensors["dy"][0, 2, 30, 4] = special
        results, expected = direct_shim(case, tensors, tf32=True), references(case, tensors)
        for operator, result in results.items():
            assert torch.equal(result.isnan(), expected[operator].isnan()), operator
            assert torch.equal(result.isinf(), expected[operator].isinf()), operator


@pytest.mark.parametrize("infinite", ["w", "dy"])
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 2, 9, 11, 2, 3, 3, padding=(1, 1), groups=2),
        Case(1, 2, 9, 11, 2, 5, 5, padding=(2, 2), groups=2),
        Case(1, 2, 9, 11, 2, 7, 7, padding=(3, 4), groups=2),
        Case(1, 2, 9, 12, 2, 3, 3, stride=(2, 1), padding=(1, 1), groups=2),
        Case(1, 2, 9, 12, 2, 3, 2, padding=(2, 1), dilation=(2, 3), groups=2),
    ],
    ids=str,
)
def test_direct_shim_skips_padding_in_depthwise(case, infinite, direct_shim):
    """As PyTorch does in depthwise convolutions; an Inf multiplied by the zero of padding would be NaN."""
    tensors = make_tensors(case, torch.float32, lambda shape, generator: torch.rand(shape, generator=generator) + 0.5)
    tensors.pop("bias")
    tensors[infinite][..., -1, -1] = math.inf
    tensors[infinite][..., 0, 0] = math.inf
    expected, results = without_padding(case, tensors), direct_shim(case, tensors)
    for operator, result in expected.items():
        assert not result.isnan().any()
        torch.testing.assert_close(results[operator], result, rtol=1e-5, atol=1e-5)


def test_direct_shim_cases_reach_every_kernel(direct_shim):
    """Every instance of a kernel that is compiled is also run, on integers, by the tests above."""
    for case, dtype in itertools.product(EXACT_CASES, (torch.float32, torch.float64)):
        direct_shim(case, make_tensors(case, dtype, integers))
    symbols = subprocess.run(["nm", "-D", direct_shim.library._name], capture_output=True, text=True, check=True).stdout
    kernels = set(re.findall(r"\b_ZN8modelnew(?:\d+[a-z]+)*\d+[a-z_]+_kernel[IE]\S*", symbols))
    assert kernels == set(direct_shim.library.simt_launched().decode().split())


def test_direct_says_what_it_refuses(direct_shim):
    """Only what its 32-bit positions cannot number; the forward of a problem may run where a gradient does not."""
    most = 1 << 28
    for case, fprop, dgrad in (
        (Case(1, 1, most - 1, 1, 1, 1, 1), None, None),
        (Case(1, 1, most, 1, 1, 1, 1), "image side", "image side"),
        (Case(1, 1, 1, 5, 1, 1, 1, padding=(0, most)), "image side", "image side"),
        (Case(1, 1, 1 << 14, 1 << 14, 1, 1 << 14, 1 << 14), "filter", "filter"),
        (Case(1, 64, 12001, 6001, 64, 1, 1, stride=(6000, 6000), groups=64), None, "stride"),
        (Case(1, 8, 12001, 6001, 8, 1, 1, stride=(6000, 6000), groups=8), None, None),
    ):
        tensors = {
            "x": torch.empty(case.x_shape, device="meta"),
            "w": torch.empty(case.K, case.C // case.groups, case.R, case.S, device="meta"),
            "dy": torch.empty(case.y_shape, device="meta"),
        }
        fields = direct_shim.fields(case, tensors, False)
        for operator, text in (("fprop", fprop), ("dgrad", dgrad)):
            refusal = direct_shim.library.engine_refusal(OPERATOR_NUMBER[operator], fields)
            assert (text is None) == (refusal is None), (case, operator, refusal)
            assert text is None or text in refusal.decode()


def test_direct_shim_beyond_one_launch(direct_shim_of_small_launches):
    """Images in several launches, all pixels of dw in one block."""
    engine = direct_shim_of_small_launches
    for case in (
        Case(7, 3, 9, 10, 5, 3, 3, padding=(1, 1)),
        Case(6, 2, 12, 11, 3, 2, 3, stride=(2, 2)),
        Case(11, 1, 40, 37, 1, 3, 3, padding=(1, 1)),
    ):
        tensors = make_tensors(case, torch.float32, integers)
        check_exact(case, engine(case, tensors), tensors)


def test_every_barrier_of_direct_is_needed_and_tested(direct_shim):
    """Without any one of its barriers, the direct engine fails a test above."""
    files = {name: (KERNELS / name).read_text().splitlines() for name in ("direct.cu", "correlate.cuh")}
    barriers = [
        (name, number)
        for name, lines in files.items()
        for number, line in enumerate(lines, start=1)
        if "__syncthreads();" in line
    ]
    try:
        for name, number in barriers:
            direct_shim.library.simt_ignore_barrier(number)
            assert not all(right(direct_shim, case) for case in EXACT_CASES), f"{name}:{number} can go unnoticed"
    finally:
        direct_shim.library.simt_ignore_barrier(0)


@pytest.mark.parametrize("case", DENSE_CASES + DEPTHWISE_CASES, ids=str)
def test_direct_shim_reads_nothing_behind_its_operands(direct_shim, case):
    tensors = {name: before_guard_page(tensor) for name, tensor in make_tensors(case, torch.float32, integers).items()}
    check_exact(case, direct_shim(case, tensors), tensors)
