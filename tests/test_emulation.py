"""The emulation itself: a kernel that is right runs, and classical mistakes in it show."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.cases import margins_intact, with_margins
from tests.emulation import built_beside_the_tests, compile_simt, cpp, left_out, mutated, with_mutations

TOY_KERNEL = cpp("emulation/toy.cu")

TOY_MUTATIONS = {
    "first barrier dropped": left_out("__syncthreads();  // first"),
    "second barrier dropped": left_out("__syncthreads();  // second"),
    "divergent barrier": ("__syncthreads();  // first", "if (!MUTATED || threadIdx.x < 32) __syncthreads();  // first"),
    "early return": ("float sum = 0;", "float sum = 0; if (MUTATED && i >= params.n) return;"),
    "read one too far": ("blockDim.x - 1 - threadIdx.x", "blockDim.x - !MUTATED - threadIdx.x"),
    "written beyond shared memory": ("tile[threadIdx.x] =", "tile[threadIdx.x + MUTATED] ="),
    "more shared memory than granted": ("64 * sizeof(float)", "MUTATED ? 50000 : 64 * sizeof(float)"),
}


def build_toy_shim(folder: Path) -> ctypes.CDLL:
    return compile_simt(with_mutations(TOY_KERNEL, TOY_MUTATIONS), folder)


toy_shim = built_beside_the_tests("toy_shim", build_toy_shim)


def toy_is_right(library: ctypes.CDLL, n: int = 200) -> bool:
    values = torch.arange(5 * n, dtype=torch.float32).view(5, n)
    result = with_margins(torch.empty(n))
    code = library.toy(ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(result.data_ptr()), n)
    assert margins_intact(result)
    return code == 0 and torch.equal(result, F.pad(values.sum(0), (0, -n % 64)).view(-1, 64).flip(1).reshape(-1)[:n])


@pytest.mark.parametrize("mutation", TOY_MUTATIONS)
def test_shim_catches_what_a_gpu_would_punish(mutation, toy_shim):
    """The shim itself: a right kernel runs, before and after, and each classical mistake in it shows."""
    assert toy_is_right(toy_shim)
    with mutated(toy_shim, TOY_MUTATIONS, mutation):
        assert not toy_is_right(toy_shim)
    assert toy_is_right(toy_shim)
