"""The depthwise engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import ctypes
import itertools
import math
import random
import re
import subprocess
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from tests.cases import (
    DTYPES,
    KERNELS,
    LAYOUTS,
    ONE_TO_ONE_CASES,
    OPERATOR_NUMBER,
    QUEUE_CASES,
    VIEWS,
    WINDOW_CASES,
    Case,
    any_exponent,
    before_guard_page,
    check_bounds,
    check_exact,
    depthwise_case,
    equal,
    huge,
    in_layout,
    input_pointers,
    integers,
    make_tensors,
    margins_intact,
    named,
    normal,
    random_depthwise_cases,
    shifted,
    tiny,
    wide,
    with_margins,
    without_padding,
)
from tests.emulation import mutated
from tests.engines import ShimEngine
from tests.mutations import DEPTHWISE_MUTATIONS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ONE_TO_ONE_CASES, ids=str)
def test_depthwise_shim_exact(depthwise_shim, case, layout):
    for dtype in DTYPES[:3]:
        tensors = in_layout(make_tensors(case, dtype, integers), layout)
        results = depthwise_shim(case, tensors)
        assert "fprop" in results
        check_exact(case, results, tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
def test_depthwise_shim_exact_at_random(depthwise_shim, seed, layout):
    for case in random_depthwise_cases(20, seed):
        tensors = in_layout(make_tensors(case, random.Random(seed).choice(DTYPES[:3]), integers), layout)
        check_exact(case, depthwise_shim(case, tensors), tensors)


DEPTHWISE_ROUNDING_CASES = [
    depthwise_case(2, 6, 20, 33, 3, 3, padding=(1, 1)),
    depthwise_case(1, 4, 20, 20, 7, 7, padding=(3, 3)),
    depthwise_case(1, 2, 28, 30, 21, 19, padding=(10, 9)),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fill", [normal, wide, tiny, huge, any_exponent, equal], ids=named)
@pytest.mark.parametrize("case", DEPTHWISE_ROUNDING_CASES, ids=str)
def test_depthwise_shim_rounding_fp32(depthwise_shim, case, fill, layout):
    tensors = in_layout(make_tensors(case, torch.float32, fill), layout)
    check_bounds(case, depthwise_shim(case, tensors, tf32=True), tensors, tf32=())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", DEPTHWISE_ROUNDING_CASES, ids=str)
def test_depthwise_shim_rounding_16_bit(depthwise_shim, case, dtype, layout):
    tensors = in_layout(make_tensors(case, dtype, normal), layout)
    check_bounds(case, depthwise_shim(case, tensors), tensors, tf32=())


@pytest.mark.parametrize("view", VIEWS)
def test_depthwise_shim_takes_any_strides(depthwise_shim, view):
    for case in (
        depthwise_case(2, 6, 9, 10, 3, 3, padding=(1, 1)),
        depthwise_case(2, 3, 9, 10, 3, 2, times=2, stride=(1, 2), padding=(1, 1)),
    ):
        tensors = make_tensors(case, torch.float32, integers)
        plain = tensors["x"], tensors["dy"]
        tensors |= {name: VIEWS[view](tensors[name]) for name in ("x", "w", "dy")}
        for operator, place, out in (("fprop", "dy", plain[1]), ("dgrad", "x", plain[0])):
            if not depthwise_shim.refuses(operator, case, tensors | {place: out}):
                result = with_margins(torch.full_like(out, math.nan))
                check_exact(case, {operator: depthwise_shim.run(operator, case, tensors, False, result)}, tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("elements", [1, 2, 3, 5])
def test_depthwise_shim_takes_operands_that_begin_anywhere(depthwise_shim, elements, layout):
    """And writes outputs there: vectors only where they may be."""
    for case in (
        depthwise_case(2, 6, 12, 12, 3, 3, padding=(1, 1)),
        depthwise_case(2, 6, 14, 14, 7, 7, padding=(3, 3)),
    ):
        for dtype in DTYPES[:3]:
            tensors = make_tensors(case, dtype, integers)
            order, back = ((0, 2, 3, 1), (0, 3, 1, 2)) if layout == "channels_last" else ((0, 1, 2, 3),) * 2
            move = lambda tensor, order=order, back=back: shifted(tensor.permute(order), elements).permute(back)  # noqa: E731
            moved = (
                tensors | {name: move(tensors[name]) for name in ("x", "dy")} | {"w": shifted(tensors["w"], elements)}
            )
            out = move(torch.full_like(tensors["dy"], math.nan))
            check_exact(case, {"fprop": depthwise_shim.run("fprop", case, moved, False, out)}, tensors)


def test_depthwise_ring_in_any_shape(depthwise_shim):
    """Chunks of one step to all, 1 to 3 slots, images and rows divided among blocks, few planes and many."""
    rng = random.Random(0)
    ran = 0
    while ran < 100:
        R, stride = rng.choice([3, 7]), rng.choice([1, 2])
        H, W = (rng.choice([7, 8, 14, 15, 16, 28, 33, 40]) for _ in range(2))
        padding = rng.choice([(R // 2, R // 2), (rng.randint(0, R // 2), rng.randint(0, R // 2))])
        if min(H, W) + 2 * min(padding) < R:
            continue
        case = depthwise_case(
            rng.randint(1, 5), rng.choice([1, 3, 8, 12, 40]), H, W, R, R, stride=(stride, stride), padding=padding
        )
        operator = rng.choice(["fprop", "dgrad"])
        if operator == "dgrad" and stride > 1:
            continue
        tensors = make_tensors(case, rng.choice(DTYPES[:3]), integers, seed=ran)
        out = with_margins(torch.full_like(tensors["dy" if operator == "fprop" else "x"], math.nan))
        wish = (ctypes.c_int * 6)(*(rng.choice([0, rng.randint(1, most)]) for most in (20, 20, 12, 3, 5, 9)))
        pointers = (ctypes.c_void_p * 5)(*input_pointers(operator, tensors), out.data_ptr())
        fields = ShimEngine.fields(case, tensors, False)
        code = depthwise_shim.library.depthwise_ring(OPERATOR_NUMBER[operator], fields, pointers, wish)
        if code == -1:
            continue
        ran += 1
        assert code == 0, (case, list(wish), depthwise_shim.library.simt_message())
        check_exact(case, {operator: out}, tensors)
        assert margins_intact(out), (case, list(wish))


@pytest.mark.parametrize("case", QUEUE_CASES, ids=str)
def test_depthwise_queue_in_any_shape(depthwise_shim, case):
    """Bands of one row to all, outputs between margins, both gradients' directions."""
    shapes_reached = set()
    for dtype, band_rows in itertools.product([torch.float16, torch.bfloat16], [1, 2, 5, case.y_shape[2]]):
        tensors = in_layout(make_tensors(case, dtype, integers), "channels_last")
        for shape, (operator, place) in itertools.product(range(16), (("fprop", "dy"), ("dgrad", "x"))):
            if operator == "dgrad" and max(case.stride) > 1:
                continue
            out = VIEWS["channels_last"](with_margins(torch.full_like(tensors[place].contiguous(), math.nan)))
            pointers = (ctypes.c_void_p * 5)(*input_pointers(operator, tensors), out.data_ptr())
            fields = ShimEngine.fields(case, tensors, False)
            number = OPERATOR_NUMBER[operator]
            code = depthwise_shim.library.depthwise_queue(number, fields, pointers, shape, band_rows)
            if code == -1:  # of another filter
                continue
            assert code == 0, (operator, shape, band_rows, depthwise_shim.library.simt_message())
            check_exact(case, {operator: out}, tensors)
            assert margins_intact(out.permute(0, 2, 3, 1) if not out.is_contiguous() else out)
            shapes_reached.add(shape)
    assert len(shapes_reached) == (2 if case.w_shape[2] == 3 and case.x_shape[1] % 4 == 0 else 1)


def test_depthwise_shim_without_bias(depthwise_shim):
    case = WINDOW_CASES[0]
    tensors = make_tensors(case, torch.float32, integers)
    y = depthwise_shim(case, {name: tensors[name] for name in ("x", "w", "dy")})["fprop"]
    assert torch.equal(y, F.conv2d(tensors["x"], tensors["w"], **case.kwargs))


PADDING_CASES = [
    depthwise_case(5, 70, 9, 11, 3, 3, padding=(1, 1)),
    depthwise_case(1, 2, 9, 11, 5, 5, padding=(2, 2)),
    depthwise_case(1, 2, 9, 11, 7, 7, padding=(3, 4)),
    depthwise_case(1, 2, 9, 12, 3, 3, stride=(2, 2), padding=(1, 1)),
    depthwise_case(5, 70, 9, 12, 3, 3, stride=(2, 1), padding=(1, 1)),
    depthwise_case(1, 2, 9, 12, 3, 2, padding=(2, 1), dilation=(2, 3)),
    depthwise_case(1, 2, 9, 12, 9, 11, padding=(4, 5)),
    depthwise_case(2, 6, 3, 921, 3, 3, padding=(1, 1)),
]


def skips_padding(
    engine: ShimEngine,
    case: Case,
    infinite: str,
    layout: str,
    corners: Sequence[int] = (0, -1),
    dtype: torch.dtype = torch.float32,
) -> bool:
    """Whether an Inf in w, x or dy, in these corners, is not multiplied by the zeros of padding."""
    tensors = make_tensors(case, dtype, lambda shape, generator: torch.rand(shape, generator=generator) + 0.5)
    tensors.pop("bias")
    for corner in corners:
        tensors[infinite][..., corner, corner] = math.inf
    tensors = in_layout(tensors, layout)
    expected = without_padding(case, {name: tensor.float() for name, tensor in tensors.items()})
    results, bound = engine(case, tensors), 1e-5 if dtype == torch.float32 else 1e-2
    assert not any(expected[operator].isnan().any() for operator in results)
    return bool(results) and all(
        torch.allclose(result.float(), expected[operator].reshape(result.shape), bound, bound)
        for operator, result in results.items()
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("infinite", ["w", "x", "dy"])
@pytest.mark.parametrize("case", PADDING_CASES, ids=str)
def test_depthwise_shim_skips_padding(case, infinite, layout, depthwise_shim):
    """As PyTorch does in depthwise convolutions; an Inf multiplied by the zero of padding would be NaN."""
    assert skips_padding(depthwise_shim, case, infinite, layout)


@pytest.mark.parametrize("infinite", ["w", "x", "dy"])
@pytest.mark.parametrize("case", QUEUE_CASES[::4], ids=str)
def test_depthwise_queue_skips_padding(case, infinite, depthwise_shim):
    assert skips_padding(depthwise_shim, case, infinite, "channels_last", dtype=torch.float16)


@pytest.mark.parametrize("case", ONE_TO_ONE_CASES[::3], ids=str)
def test_depthwise_shim_reads_nothing_behind_its_operands(depthwise_shim, case):
    tensors = {name: before_guard_page(tensor) for name, tensor in make_tensors(case, torch.float32, integers).items()}
    check_exact(case, depthwise_shim(case, tensors), tensors)


def test_depthwise_shim_cases_reach_every_kernel(depthwise_shim):
    for case, dtype, layout in itertools.product(
        ONE_TO_ONE_CASES[:5] + QUEUE_CASES + ONE_TO_ONE_CASES[-20:], DTYPES[:3], LAYOUTS
    ):
        depthwise_shim(case, in_layout(make_tensors(case, dtype, integers), layout))
    for case, dtype in itertools.product(QUEUE_CASES, DTYPES[1:3]):  # filters that begin where no vector may
        tensors = in_layout(make_tensors(case, dtype, integers), "channels_last")
        tensors["w"] = shifted(tensors["w"], 1)
        check_exact(case, depthwise_shim(case, tensors), tensors)
    library = depthwise_shim.library
    symbols = subprocess.run(["nm", "-D", library._name], capture_output=True, text=True, check=True).stdout
    kernels = set(re.findall(r"\b_ZN8modelnew(?:\d+[a-z]+)*\d+[a-z_]+_kernel[IE]\S*", symbols))
    assert kernels == set(library.simt_launched().decode().split())


def depthwise_is_right(engine: ShimEngine) -> bool:
    """In some of the cases above, in an order of threads that does not depend on what has run before."""
    cases = [*ONE_TO_ONE_CASES[:10], *ONE_TO_ONE_CASES[-20:-8]]
    engine.library.simt_seed(0)
    try:
        for case, layout in itertools.product(cases, LAYOUTS):
            tensors = in_layout(make_tensors(case, torch.float32, integers), layout)
            check_exact(case, engine(case, tensors), tensors)
        for case in QUEUE_CASES:
            tensors = in_layout(make_tensors(case, torch.float16, integers), "channels_last")
            check_exact(case, engine(case, tensors), tensors)
        if not all(skips_padding(engine, case, "w", "channels_last", [-1], torch.float16) for case in QUEUE_CASES[::4]):
            return False
        # The thread that takes the flag down is also the one that would raise it for the first weight.
        return all(
            skips_padding(engine, case, "w", layout, corners=[-1])
            for case, layout in itertools.product(PADDING_CASES, LAYOUTS)
        )
    except AssertionError:
        return False


def test_every_barrier_of_depthwise_is_needed_and_tested(depthwise_shim):
    lines = (KERNELS / "depthwise.cu").read_text().splitlines()
    barriers = [number for number, line in enumerate(lines, start=1) if "__syncthreads();" in line]
    assert depthwise_is_right(depthwise_shim)
    try:
        for number in barriers:
            depthwise_shim.library.simt_ignore_barrier(number)
            assert not depthwise_is_right(depthwise_shim), f"depthwise.cu:{number} can go unnoticed"
    finally:
        depthwise_shim.library.simt_ignore_barrier(0)


@pytest.mark.parametrize("mutation", DEPTHWISE_MUTATIONS)
def test_depthwise_shim_sees_what_is_missing(mutation, depthwise_shim):
    with mutated(depthwise_shim.library, DEPTHWISE_MUTATIONS, mutation):
        assert not depthwise_is_right(depthwise_shim)


def test_depthwise_has_a_plan_for_every_problem_of_its_kind(depthwise_shim):
    """10,000 random ones: a tile within 48 KB of shared memory and 2^31 blocks, in both layouts."""
    rng = random.Random(0)
    size = lambda most: int(2 ** rng.uniform(0, math.log2(most)))  # noqa: E731
    planned = 0
    while planned < 10000:
        R, S = rng.choice([(3, 3), (5, 5), (7, 7), (size(31), size(31))])
        case = depthwise_case(
            size(1 << 20), size(4096), size(2048), size(2048), R, S, rng.choice([1, 1, 2, 5]),
            stride=rng.choice([(1, 1), (2, 2), (size(8), size(8))]), padding=(rng.randint(0, R), rng.randint(0, S)),
            dilation=rng.choice([(1, 1), (1, 1), (size(4), size(4))]),
        )  # fmt: skip
        if min(case.y_shape) <= 0 or math.prod(case.x_shape) > 1 << 40:
            continue
        planned += 1
        dtype, layout = rng.choice(DTYPES[:3]), rng.choice(LAYOUTS)
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        if layout == "channels_last":
            tensors |= {name: tensors[name].to(memory_format=torch.channels_last) for name in ("x", "dy")}
        for operator in ("fprop", "dgrad"):
            refusal = depthwise_shim.refuses(operator, case, tensors)
            if refusal is None:
                text = depthwise_shim.describes(operator, case, tensors)
                smem, blocks = map(int, re.search(r"(\d+) bytes of shared memory, (\d+) blocks", text).groups())
                assert 0 < smem <= 48 << 10
                assert 0 < blocks < 1 << 31
            else:
                assert operator == "dgrad" or b"2^31" in refusal or max(case.dilation) > 1, (case, refusal)


def test_depthwise_says_what_it_refuses(depthwise_shim):
    most = 1 << 28
    for case, dtype, fprop, dgrad in (
        (depthwise_case(1, 4, 9, 9, 3, 3), torch.float32, None, None),
        (depthwise_case(1, 4, 9, 9, 3, 3), torch.float64, "float64", "float64"),
        (Case(1, 4, 9, 9, 4, 3, 3, groups=2), torch.float32, "input channel", "input channel"),
        (depthwise_case(1, 4, 9, 9, 3, 3, times=2), torch.float32, None, "several"),
        (depthwise_case(1, 4, 9, 9, 3, 3, stride=(1, 2)), torch.float32, None, "stride"),
        (depthwise_case(1, 4, 9, 99, 1, 65), torch.float32, "64 taps", "64 taps"),
        (depthwise_case(1, 1, most, 1, 1, 1), torch.float32, "image side", "image side"),
        (depthwise_case(1, 1, 900, 900, 400, 60), torch.float32, "shared memory", "shared memory"),
        (depthwise_case(1, 1, 9000, 9000, 3, 3, dilation=(1, 4000)), torch.float32, "shared memory", "shared memory"),
    ):
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        for operator, text in (("fprop", fprop), ("dgrad", dgrad), ("wgrad", "forward"), ("bgrad", "forward")):
            refusal = depthwise_shim.refuses(operator, case, tensors)
            assert (text is None) == (refusal is None), (case, operator, refusal)
            assert text is None or text in refusal.decode()
