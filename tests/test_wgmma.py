"""The wgmma engine without a GPU: plans and, thread by thread, kernels."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from tests.cases import (
    ADVERSE,
    CONTAINED_KINDS,
    MARKED_KINDS,
    Case,
    adverse_tensors,
    check_bounds,
    check_exact,
    integers,
    make_tensors,
    normal,
    reference,
    same_values,
)
from tests.engines import WGMMA_SPLIT_CONFIGURATIONS

# Weights that are streamed, and x that boxes can load: whole chunks and rests of one row, of several, of several steps;
# rests alone; a last block of channels that is not full; blocks of channels; groups.
CHUNK_CASES = [
    ("fprop", Case(1, 64, 4, 264, 128, 3, 3), 40),
    ("fprop", Case(1, 64, 8, 264, 128, 4, 3, padding=(1, 1)), 32),
    ("dgrad", Case(2, 100, 6, 132, 72, 3, 3, padding=(0, 3)), 33),
    ("fprop", Case(1, 120, 5, 68, 128, 3, 3, padding=(1, 2)), 34),
    ("fprop", Case(1, 128, 3, 140, 256, 3, 3, padding=(0, 1), groups=2), 32),
]


@pytest.mark.parametrize("number", range(len(CHUNK_CASES)))
def test_wgmma_shim_loads_chunks(wgmma_shim, number):
    operator, case, configuration = CHUNK_CASES[number]
    assert wgmma_shim.fault(operator, case, "contiguous", number, shift=0, configuration=configuration) == ""
    assert wgmma_shim.last("chunks") == 1


ADVERSE_SHIM_CASES = [
    ("fprop", Case(2, 16, 6, 300, 128, 3, 3), 32),
    ("fprop", Case(2, 16, 6, 300, 128, 3, 3), 40),
    ("dgrad", Case(2, 70, 12, 150, 40, 3, 4, padding=(1, 2)), 33),
    ("fprop", Case(2, 18, 13, 70, 140, 2, 2, groups=2, dilation=(2, 1)), 38),
]
ADVERSE_SPLIT_CASES = [
    ("fprop", Case(2, 16, 6, 300, 128, 3, 3), 64),
    ("fprop", Case(2, 16, 6, 300, 128, 3, 3), 72),
    ("dgrad", Case(2, 70, 12, 150, 40, 3, 4, padding=(1, 2)), 69),
    ("fprop", Case(2, 18, 13, 70, 140, 2, 2, groups=2, dilation=(2, 1)), 66),
]


# All kinds as TF32, every other one in full: a GPU does all.
ADVERSE_RUNS = [
    *(pytest.param(ADVERSE_SHIM_CASES, number, kind, id=f"{kind}, tf32") for number, kind in enumerate(ADVERSE)),
    *(
        pytest.param(ADVERSE_SPLIT_CASES, number, kind, id=f"{kind}, fp32")
        for number, kind in enumerate([*ADVERSE][::2])
    ),
]


@pytest.mark.parametrize("cases, number, kind", ADVERSE_RUNS)
def test_wgmma_shim_contains_what_fits_and_does_the_rest_again(wgmma_shim, cases, number, kind):
    """Within the contract, whatever the data; and the tiles that are done twice are those that have to be, or few."""
    operator, case, configuration = cases[number % len(cases)]
    tensors = adverse_tensors(case, kind, operator)
    tf32 = cases is ADVERSE_SHIM_CASES
    out = wgmma_shim.result(operator, case, tensors, tf32=tf32, seed=number, configuration=configuration)
    check_bounds(case, {operator: out}, tensors, tf32={operator} if tf32 else ())
    done, of = wgmma_shim.last("done_again"), wgmma_shim.last("of_tiles")
    if kind in CONTAINED_KINDS:
        assert done == 0
    elif kind in MARKED_KINDS:
        assert done > 0  # the sample of tensors as small as these sees some of them
    else:
        assert done == of


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
    ],
)
def test_wgmma_shim_marks_the_tiles_whose_windows_have_it(wgmma_shim, configuration, column, tiles, value):
    """Those of three rows, and of two columns if it lies in the halo; and no sample sees these places."""
    case = Case(2, 16, 9, 600, 128, 3, 3)
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
    case, flat = Case(1, 16, 9, 300, 72, 3, 3, padding=(1, 1)), Case(2, 16, 1, 300, 72, 3, 3, padding=(1, 1))
    plain, tensors = (make_tensors(of, torch.float32, integers) for of in (case, flat))
    last = {name: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for name, t in plain.items()}
    y = torch.full(case.y_shape, math.nan).contiguous(memory_format=torch.channels_last)
    tensors["x"] = F.pad(tensors["x"], (0, 1, 0, 1), value=math.nan)[:, :, :1, :300]
    runs = [(case, last, y), (flat, tensors, torch.full(flat.y_shape, math.nan))]
    for seed, (of, operands, out) in itertools.product(range(2), runs):
        out.fill_(math.nan)
        tf32 = configuration not in WGMMA_SPLIT_CONFIGURATIONS
        message = wgmma_shim.run("fprop", of, operands, out, tf32=tf32, seed=seed, configuration=configuration)
        assert message == "" or (message is None and configuration == 16 and of is case)
        if message == "":
            check_exact(of, {"fprop": out}, operands)


