"""The emulation itself: a kernel that is right runs, and classical mistakes in it show."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.cases import margins_intact, with_margins
from tests.emulation import built_beside_the_tests, compile_simt, cpp

# In the order of their numbers in toy.cu, from 1.
MUTATIONS = [
    "first barrier dropped",
    "second barrier dropped",
    "divergent barrier",
    "early return",
    "read one too far",
    "written beyond shared memory",
    "more shared memory than granted",
]


def build_toy_shim(folder: Path) -> ctypes.CDLL:
    return compile_simt(cpp("emulation/toy.cu"), folder)


toy_shim = built_beside_the_tests("toy_shim", build_toy_shim)


def toy_is_right(library: ctypes.CDLL, mutation: int, n: int = 200) -> bool:
    ctypes.c_int.in_dll(library, "simt_mutation").value = mutation
    values = torch.arange(5 * n, dtype=torch.float32).view(5, n)
    result = with_margins(torch.empty(n))
    code = library.toy(ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(result.data_ptr()), n)
    assert margins_intact(result)
    return code == 0 and torch.equal(result, F.pad(values.sum(0), (0, -n % 64)).view(-1, 64).flip(1).reshape(-1)[:n])


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_shim_catches_what_a_gpu_would_punish(mutation, toy_shim):
    """A right kernel runs, before and after, and each classical mistake in it shows."""
    assert toy_is_right(toy_shim, 0)
    assert not toy_is_right(toy_shim, MUTATIONS.index(mutation) + 1)
    assert toy_is_right(toy_shim, 0)
