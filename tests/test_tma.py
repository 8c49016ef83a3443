"""The tma and tma_wgrad engines without a GPU: what they do unlike others."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from tests.cases import LAYOUTS, VIEWS, Case, integers, make_tensors, reference

# Halos, points, gradients, merged groups.
GAP_CASES = [
    (Case(2, 72, 6, 9, 136, 3, 3, padding=(1, 1)), "fprop"),
    (Case(3, 136, 5, 8, 40, 1, 1), "fprop"),
    (Case(2, 24, 7, 8, 72, 3, 3, padding=(1, 1)), "dgrad"),
    (Case(2, 72, 8, 8, 136, 1, 1), "dgrad"),
    (Case(2, 192, 6, 9, 192, 3, 3, padding=(1, 1), groups=12), "fprop"),
    (Case(2, 72, 7, 9, 72, 3, 3, padding=(1, 1), groups=9), "dgrad"),
]


@pytest.mark.parametrize("case, operator", GAP_CASES, ids=str)
def test_tma_shim_writes_between_gaps(tma_shim, case, operator):
    """As a part of a strided dgrad is written, in both memory formats."""
    for layout in LAYOUTS:
        faults = [tma_shim.fault(operator, case, layout, s, torch.float16, gaps=True, shape=s) for s in range(11)]
        assert not any(faults), faults
        assert faults.count("") >= 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tma_shim_keeps_inf_and_nan_in_their_groups(tma_shim, layout):
    """Merged groups, whose weights are zeros in between: in each way, by boxes and by threads, with all their tiles."""
    case = Case(2, 48, 6, 9, 48, 3, 3, padding=(1, 1), groups=6)
    ways = set()
    for special, shape, windows in itertools.product((math.inf, math.nan), (4, 6, 9, 10), (0, 1)):
        tensors = make_tensors(case, torch.float16, integers)
        tensors["x"][0, 9, 2, 3] = tensors["x"][1, 47, 5, 8] = tensors["w"][17, 3, 1, 1] = special
        expected = F.conv2d(*(tensors[name].double() for name in ("x", "w", "bias")), **case.kwargs).half()
        assert 0 < expected.isfinite().sum() < expected.numel()
        if layout == "channels_last":
            tensors |= {name: VIEWS[layout](tensors[name]) for name in ("x", "w")}
        out = torch.full(case.y_shape, math.nan, dtype=torch.float16)
        out = VIEWS[layout](out) if layout == "channels_last" else out
        message = tma_shim.run("fprop", case, tensors, out, shape=shape, windows=windows)
        assert message in (None, ""), message
        if message is None:
            continue
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
        ways.add((shape, windows))
    assert len(ways) >= 4


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_tma_shim_exact_in_parts(tma_shim, splits):
    """Clusters of blocks, each with a part of the reduction, in every way."""
    cases = [
        (Case(1, 136, 5, 7, 72, 3, 3, padding=(1, 1)), "fprop", {"windows": 0, "direct": 0}),
        (Case(1, 520, 6, 7, 40, 3, 3, padding=(1, 1)), "fprop", {"windows": 1, "direct": 0}),
        (Case(2, 520, 4, 6, 136, 1, 1), "fprop", {"direct": 1}),
        (Case(1, 40, 5, 6, 520, 3, 3, padding=(1, 1)), "dgrad", {"windows": 0, "direct": 0}),
    ]
    for case, operator, wishes in cases:
        runs = 0
        shapes = (2, 3, 9, 10) if "windows" not in wishes else (2, 9) if splits == 4 else (3, 10)
        for layout, shape in itertools.product(LAYOUTS, shapes):
            shift = 0 if "windows" not in wishes else None
            settings = {"shape": shape, "splits": splits, "shift": shift, **wishes}
            fault = tma_shim.fault(operator, case, layout, shape, torch.float16, **settings)
            assert fault in (None, ""), f"{case}, {layout}, {wishes}, {shape}: {fault}"
            runs += fault == ""
        assert runs >= 1, case


@pytest.mark.parametrize("pixels", ["x", "dy"])
def test_tma_wgrad_shim_exact_from_planes_and_pixels(tma_wgrad_shim, pixels):
    """One of the two is copied; channels of planes may be no eights."""
    for channels in (24, 13):
        case = Case(2, 24, 7, 9, channels, 3, 3, padding=(1, 1))
        tensors = make_tensors(case, torch.float16, integers)
        expected = reference("wgrad", case, tensors).half()
        if channels == 24 or pixels == "x":
            tensors[pixels] = VIEWS["channels_last"](tensors[pixels])
        out = torch.full_like(expected, math.nan)
        assert tma_wgrad_shim.run("wgrad", case, tensors, out) == ""
        assert torch.equal(out, expected)
