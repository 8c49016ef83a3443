"""The wgmma engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.cases import ADVERSE, Case, check_bounds, check_exact, integers, make_tensors, normal, reference, same_values
from tests.engines import WGMMA_SPLIT_CONFIGURATIONS, check_adverse

# Configurations as TF32 and in full.
ADVERSE_CASES = [
    ("fprop", Case(2, 16, 4, 300, 128, 3, 3), 32, 64),
    ("fprop", Case(2, 16, 4, 300, 128, 3, 3), 40, 72),
    ("dgrad", Case(2, 70, 5, 150, 40, 3, 4, padding=(1, 2)), 33, 69),
    ("fprop", Case(2, 18, 7, 70, 140, 2, 2, groups=2, dilation=(2, 1)), 38, 66),
    ("fprop", Case(2, 32, 9, 150, 12, 3, 3), 36, 81),
]
# All kinds as TF32, every other one in full: a GPU does all.
ADVERSE_RUNS = [
    *((number, kind, True) for number, kind in enumerate(ADVERSE)),
    *((number, kind, False) for number, kind in enumerate([*ADVERSE][::2])),
]


@pytest.mark.parametrize("number, kind, tf32", ADVERSE_RUNS)
def test_wgmma_shim_contains_what_fits_and_does_the_rest_again(wgmma_shim, number, kind, tf32):
    """The tiles that are done twice are those that have to be, or few."""
    operator, case, as_tf32, in_full = ADVERSE_CASES[number % len(ADVERSE_CASES)]
    check_adverse(wgmma_shim, operator, case, kind, tf32=tf32, seed=number, configuration=as_tf32 if tf32 else in_full)


@pytest.mark.parametrize(
    "configuration, column, tiles, value",
    [
        (32, 300, 3, 1e-12),
        (32, 257, 6, 1e9),
        (40, 580, 3, 3e-42),
        (40, 257, 6, -1e-12),
        (64, 300, 3, 1e-12),
        (64, 257, 6, math.nan),
        (72, 580, 3, 3e-42),
        (72, 257, 6, -math.inf),
        (81, 300, 2, 1e-12),
        (81, 257, 4, math.nan),
    ],
)
def test_wgmma_shim_marks_the_tiles_whose_windows_have_it(wgmma_shim, configuration, column, tiles, value):
    """Those of three rows, and of two columns if it lies in the halo; and no sample sees these places."""
    case = Case(2, 16, 7, 600, 16 if configuration == 81 else 128, 3, 3)
    tensors = make_tensors(case, torch.float32, normal)
    tensors["x"][1, 5, 4, column] = value
    tf32 = configuration not in WGMMA_SPLIT_CONFIGURATIONS
    out = wgmma_shim.result("fprop", case, tensors, tf32=tf32, seed=column, configuration=configuration)
    if math.isfinite(value):
        check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"} if tf32 else ())
    else:
        expected = reference("fprop", case, tensors)
        finite = expected.isfinite()
        assert same_values(out[~finite], expected[~finite].float())
        assert torch.allclose(out[finite].double(), expected[finite], rtol=1e-5, atol=1e-4)
    assert wgmma_shim.last("done_again") == tiles


@pytest.mark.parametrize("configuration", [0, 8, 12, 16, 32, 33, 40, 44, 64, 65, 72, 76])
def test_wgmma_shim_exact_in_other_strides(wgmma_shim, configuration):
    """Channels last; and images of one row in wider ones: the distance of rows, an odd number, must not matter."""
    case, flat = Case(1, 16, 5, 300, 72, 3, 3, padding=(1, 1)), Case(2, 16, 1, 300, 72, 3, 3, padding=(1, 1))
    plain, tensors = (make_tensors(of, torch.float32, integers) for of in (case, flat))
    last = {name: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for name, t in plain.items()}
    y = torch.full(case.y_shape, math.nan).contiguous(memory_format=torch.channels_last)
    tensors["x"] = F.pad(tensors["x"], (0, 1, 0, 1), value=math.nan)[:, :, :1, :300]
    runs = [(case, last, y), (flat, tensors, torch.full(flat.y_shape, math.nan))]
    for seed, (of, operands, out) in enumerate(runs, configuration):
        tf32 = configuration not in WGMMA_SPLIT_CONFIGURATIONS
        message = wgmma_shim.run("fprop", of, operands, out, tf32=tf32, seed=seed, configuration=configuration)
        assert message == "" or (message is None and configuration == 16 and of is case)
        if message == "":
            check_exact(of, {"fprop": out}, operands)


@pytest.mark.parametrize("scales", [(1, 1e-2, 1e2), (1e2, 1, 0)])
def test_wgmma_shim_adds_up_rows_of_taps_of_any_size(wgmma_shim, scales):
    """Rows of taps in one product are scaled alike, whichever has the largest weight."""
    case = Case(1, 32, 8, 140, 12, 3, 3, padding=(1, 1))
    tensors = make_tensors(case, torch.float32, normal)
    tensors["w"] *= torch.tensor(scales)[:, None]
    out = wgmma_shim.result("fprop", case, tensors, tf32=False, seed=3, configuration=81)
    check_bounds(case, {"fprop": out}, tensors, tf32=())
    assert wgmma_shim.last("done_again") == 0
