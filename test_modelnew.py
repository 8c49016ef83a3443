"""Tests of modelnew, one section for each layer.

    Cases, references and bounds    what all numerical tests share
    Kernels on the CPU              problem.cuh, numerics.cuh, the engines under a SIMT shim, wgmma's plans
    Compile gates                   nvcc for every architecture, CUDA 12.1, register spills
    modelnew against torch          conv2d, Conv2d, ModelNew: values, gradients, errors, state
    Networks                        accelerate, restore and their report, the ResNet-50 in examples/; how accelerate
                                    decides is in tests/test_accelerate.py
    The engines on the GPU          numerics of every engine, streams, graphs, devices
    bench.py and packaging

Tests marked `gpu` skip without a GPU; everything else runs without one.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import fcntl
import functools
import inspect
import itertools
import json
import math
import mmap
import os
import pickle
import random
import re
import shlex
import shutil
import statistics
import struct
import subprocess
import sys
import sysconfig
import time
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils import cpp_extension

import modelnew

# torch's own test suite, parts of which run here, forbids to set torch.backends' switches once it is imported.
with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ImportError):
    patch.setattr(torch.backends, "disable_global_flags", lambda: None)
    import torch.testing._internal.common_utils

# Without a GPU operands are small, and compilers run beside the tests: torch's threads, which spin where they wait for
# one another, took most of the time of some tests.
if not torch.cuda.is_available():
    torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent
KERNELS = ROOT / "kernels"
ENGINE_SOURCES = sorted(path for path in KERNELS.glob("*.cu") if path.name != "bundle_template.cu")  # and listed.cu
KERNEL_FILES = sorted(path for path in KERNELS.iterdir() if path.suffix in (".cpp", ".cu", ".cuh", ".h"))

GPU_MARKS = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))
DEVICES = ["cpu", pytest.param("cuda", marks=GPU_MARKS)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def gpu(test: Callable) -> Callable:
    """Marks a test that needs a GPU."""
    return functools.reduce(lambda marked, mark: mark(marked), GPU_MARKS, test)


@contextlib.contextmanager
def tf32_switch(allowed: bool) -> Iterator[None]:
    """PyTorch's switch for cuDNN's convolutions, by whichever name this torch has for it."""
    switch = getattr(torch.backends.cudnn, "conv", torch.backends.cudnn)
    name, value = (
        ("fp32_precision", "tf32" if allowed else "ieee")
        if hasattr(switch, "fp32_precision")
        else ("allow_tf32", allowed)
    )
    before = getattr(switch, name)
    setattr(switch, name, value)
    try:
        yield
    finally:
        setattr(switch, name, before)


@pytest.fixture
def fp32_contract() -> Iterator[None]:
    """Float32 convolutions in full precision."""
    with tf32_switch(False):
        yield


# Cases, references and bounds ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem in cuDNN's letters; w is [K, C/groups, R, S]."""

    N: int
    C: int
    H: int
    W: int
    K: int
    R: int
    S: int
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def __str__(self) -> str:
        text = f"N{self.N} C{self.C} {self.H}x{self.W} K{self.K} {self.R}x{self.S}"
        for name, value, default in (
            ("s", self.stride, (1, 1)),
            ("p", self.padding, (0, 0)),
            ("d", self.dilation, (1, 1)),
        ):
            text += f" {name}{value[0]}{value[1]}" if value != default else ""
        return text + (f" g{self.groups}" if self.groups > 1 else "")

    @property
    def kwargs(self) -> dict:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.N, self.C, self.H, self.W)

    @property
    def w_shape(self) -> tuple[int, ...]:
        return (self.K, self.C // self.groups, self.R, self.S)

    @property
    def y_shape(self) -> tuple[int, ...]:
        spans = zip((self.H, self.W), self.padding, self.dilation, (self.R, self.S), self.stride, strict=True)
        return (self.N, self.K, *((size + 2 * pad - d * (r - 1) - 1) // s + 1 for size, pad, d, r, s in spans))

    @property
    def multiply_adds(self) -> int:
        return math.prod(self.y_shape) * math.prod(self.w_shape[1:])

    def tf32_operators(self, dtype: torch.dtype, allowed: bool, least: dict[str, int] | None = None) -> set[str]:
        """Operators under the TF32 contract, by the rule of kernels/problem.cuh: where cuDNN uses TF32 as well."""
        if dtype != torch.float32 or not allowed:
            return set()
        stem = (self.C, self.R, self.S, self.groups) == (3, 7, 7, 1) and self.K in (64, 128) and self.N >= 8
        if stem and self.multiply_adds >= 2**25:
            return {"fprop"}
        if min(self.C, self.K) // self.groups < 8:
            return set()
        limits = dict(least or LEAST_TF32_WORK)
        if least is None and self.groups == 1:
            if (self.R, self.S) == (1, 1) and max(self.stride) > 1:
                limits["fprop"] = 2**29
            elif min(self.C, self.K) >= 64:
                limits["fprop"] = 2**24
        return {name for name, limit in limits.items() if self.multiply_adds >= limit}

    def reduction(self, operator: str) -> int:
        """How many products make up one element of the operator's result."""
        P, Q = self.y_shape[2:]
        taps = self.R * self.S
        lengths = {"fprop": self.C // self.groups * taps, "dgrad": self.K // self.groups * taps}
        return lengths.get(operator, self.N * P * Q)


# Multiply-adds below which float32 stays float32, whatever PyTorch's switch says.
LEAST_TF32_WORK = {"fprop": 2**27, "dgrad": 2**27, "wgrad": 2**29}

# The two tensors that each operator multiplies; bgrad only sums dy.
OPERANDS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


def product(operator: str, case: Case, first: Tensor, second: Tensor) -> Tensor:
    """The operator's result in float64, from its two operands (see OPERANDS)."""
    first, second = first.double(), second.double()
    if operator == "fprop":
        return F.conv2d(first, second, **case.kwargs)
    if operator == "dgrad":
        return nn.grad.conv2d_input(case.x_shape, second, first, **case.kwargs)
    return nn.grad.conv2d_weight(second, case.w_shape, first, **case.kwargs)


def references(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """y, dx, dw, db in float64, under their operators' names."""
    exact = {name: product(name, case, *(tensors[key] for key in keys)) for name, keys in OPERANDS.items()}
    exact["fprop"] += tensors["bias"].double().view(-1, 1, 1)
    exact["bgrad"] = tensors["dy"].double().sum((0, 2, 3))
    return exact


def relative_bound(case: Case, operator: str, dtype: torch.dtype, tf32: bool) -> float:
    """The factor of conv(|x|, |w|) in the numerical contract."""
    n = case.reduction(operator)
    if dtype == torch.float64:
        return (n + 16) * 2.0**-52  # ours and the reference's
    if tf32:
        return 2.0**-10 + 2.0**-22 + (n + 16) * 2.0**-24
    return 2.0**-21 + (64 + n / 64) * 2.0**-24


def error_bound(case: Case, operator: str, tensors: dict[str, Tensor], result: Tensor, tf32: bool) -> Tensor:
    """Element-wise bound of |result - float64 reference|; `tf32` says which contract holds."""
    dtype, result = result.dtype, result.double().abs()
    if operator == "bgrad":
        scale = tensors["dy"].double().abs().sum((0, 2, 3))
        offsets, bias = torch.zeros_like(scale), torch.zeros_like(scale)
    else:
        first, second = (tensors[key].double().abs() for key in OPERANDS[operator])
        scale = product(operator, case, first, second)
        ones_first, ones_second = torch.ones_like(first), torch.ones_like(second)
        offsets = product(operator, case, ones_first, second) + product(operator, case, first, ones_second)
        bias = tensors["bias"].double().abs().view(-1, 1, 1) if operator == "fprop" else torch.zeros(())
    bound = relative_bound(case, operator, dtype, tf32) * scale
    if dtype == torch.float64:
        return bound + 2.0**-51 * (result + bias.to(result))
    bound = bound + 2.0**-137 * offsets + 2.0**-126 + 2.0**-23 * (result + bias.to(result))
    if dtype != torch.float32:  # one rounding at the end
        info = torch.finfo(dtype)
        bound = bound + info.eps / 2 * result * (1 + info.eps) + info.smallest_normal * info.eps / 2
    return bound


# A fill is a function (shape, generator) -> float32 tensor on the CPU.


def integers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Small integers, whose sums stay exact in every accumulator: results must be bit for bit right."""
    return torch.randint(-3, 4, shape, generator=generator).float()


def positive(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator)


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def wide(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Magnitudes over 40 binades, both signs: a global norm would not see a wrong small element."""
    return torch.randn(shape, generator=generator) * torch.exp2(40 * torch.rand(shape, generator=generator) - 20)


def tiny(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Products around float32's smallest normal number."""
    return torch.randn(shape, generator=generator) * 2.0**-63


def huge(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Sums that stay just below float32's largest number."""
    return torch.randn(shape, generator=generator) * 2.0**54


def any_exponent(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """From the smallest subnormal number to 2^30, which it meets in products."""
    exponents = torch.randint(-149, 31, shape, generator=generator)
    return (torch.randn(shape, generator=generator).double() * torch.exp2(exponents.double())).float()


def under_a_tf32_step(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Just below a step of TF32 and all positive: truncating the operands errs by twice what rounding may."""
    steps = torch.randint(0, 8, shape, generator=generator)
    return 1 + (steps + 1) * 2.0**-10 - 2.0**-20


def tf32_ties(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Half-way between two TF32 numbers, both signs: ties go away from zero."""
    steps = torch.randint(0, 8, shape, generator=generator) + 0.5
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return signs * (1 + steps * 2.0**-10)


def equal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Each addition to a long sum rounds the same way: in one single chain the errors add up instead of averaging."""
    return torch.full(shape, 0.7)


# Operands that fp16 cannot contain, or not all of them: what becomes of normal ones, and of weights of size 1e-2. Few
# enough elements are changed, where it says so, that a sample of them sees none.


def few(tensor: Tensor, count: int = 3) -> tuple[Tensor, ...]:
    """Places of a few elements, the first and the last among them."""
    generator = torch.Generator().manual_seed(tensor.numel())
    inner = torch.randint(tensor.numel(), (count - 2,), generator=generator).tolist()
    return torch.unravel_index(torch.tensor([0, *inner, tensor.numel() - 1]).to(tensor.device), tensor.shape)


def with_few(*values: float) -> Callable[[Tensor, Tensor], None]:
    def change(x: Tensor, _: Tensor) -> None:
        x[few(x, 3 * len(values))] = torch.tensor(values, device=x.device).repeat(3)

    return change


def of_size(size: float) -> Callable[[Tensor, Tensor], None]:
    """A whole image, and weights of the opposite size."""

    def change(x: Tensor, w: Tensor) -> None:
        x[-1] = (x[-1].double() * size).float()
        w.copy_((w.double() / size).clamp(-1e37, 1e37).float())

    return change


def faint_channel(x: Tensor, w: Tensor) -> None:
    """A million times smaller than its neighbours, and weights that select it."""
    x[:, 3] *= 1e-6
    selects = torch.arange(w.shape[0]) % 2 == 0
    chosen = w[selects, 3].clone()
    w[selects] = 0
    w[selects, 3] = chosen


def dead_weights(_: Tensor, w: Tensor) -> None:
    w[1::2, ::3] = 1e-20


def faint_output_channel(_: Tensor, w: Tensor) -> None:
    w[-1] *= 1e-20


def zero_rows(x: Tensor, w: Tensor) -> None:
    x[:, :, ::2] = 0
    w[1] = 0


def zero_images(x: Tensor, _: Tensor) -> None:
    x[-1] = 0


def all_zero(x: Tensor, w: Tensor) -> None:
    x.zero_()
    w.zero_()


ADVERSE = {
    "1e-30 beside 1e30": with_few(1e-30, 1e30),
    "few small": with_few(1e-9, -1e-12),
    "few large": with_few(1e6, -1e9),
    "few denormals": with_few(1e-40, -3e-45),
    "one outlier": with_few(1e38),
    **{f"image of {size:g}": of_size(size) for size in (1e-38, 1e-20, 1e-10, 1e10, 1e20, 1e36)},
    "faint channel": faint_channel,
    "dead weights": dead_weights,
    "faint output channel": faint_output_channel,
    "zero rows": zero_rows,
    "zero images": zero_images,
    "all zero": all_zero,
}


def adverse_tensors(case: Case, kind: str, operator: str, device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
    """Operands of fprop or dgrad, changed."""
    tensors = make_tensors(case, torch.float32, normal, device, seed)
    tensors["w"] *= 1e-2
    ADVERSE[kind](tensors[{"fprop": "x", "dgrad": "dy"}[operator]], tensors["w"])
    return tensors


def round_to_tf32(value: Tensor) -> Tensor:
    """Float32 rounded to 10 mantissa bits, to nearest, ties away from zero."""
    return ((value.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def make_tensors(
    case: Case, dtype: torch.dtype, fill: Callable, device: str = "cpu", seed: int = 0
) -> dict[str, Tensor]:
    """x, w, bias and dy of a case. NaN lies before and behind each of them, for kernels that read too far."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": case.x_shape, "w": case.w_shape, "bias": (case.K,), "dy": case.y_shape}
    return {name: with_margins(fill(shape, generator).to(dtype).to(device)) for name, shape in shapes.items()}


MARGIN = 64


def with_margins(tensor: Tensor) -> Tensor:
    """A copy with NaN before and behind it in memory."""
    storage = tensor.new_full((tensor.numel() + 2 * MARGIN,), math.nan)
    inner = storage[MARGIN:-MARGIN].view(tensor.shape)
    return inner.copy_(tensor)


def margins_intact(tensor: Tensor) -> bool:
    """Whether nobody wrote around a tensor made by with_margins."""
    storage = torch.as_strided(tensor, (tensor.numel() + 2 * MARGIN,), (1,), tensor.storage_offset() - MARGIN)
    return bool(storage[:MARGIN].isnan().all() and storage[-MARGIN:].isnan().all())


def check_exact(case: Case, results: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Bit for bit the float64 result, rounded once to the tensor's type."""
    expected = references(case, tensors)
    for operator, result in results.items():
        assert result.dtype == tensors["x"].dtype
        assert torch.equal(result, expected[operator].to(result.dtype)), f"{operator} of {case}"


def check_bounds(case: Case, results: dict[str, Tensor], tensors: dict[str, Tensor], tf32: Collection[str]) -> None:
    """Every element within the numerical contract; `tf32` are the operators under the TF32 contract."""
    expected = references(case, tensors)
    for operator, result in results.items():
        error = (result.double() - expected[operator]).abs()
        bound = error_bound(case, operator, tensors, result, operator in tf32)
        assert (error <= bound).all(), f"{operator} of {case}: {(error / bound).max():.3g} times the bound"


# Kernels on the CPU --------------------------------------------------------------------------------------------------

SIMT_HEADER = r"""
// CUDA's execution model on one CPU thread, for kernels that synchronise by __syncthreads alone: one fibre for each
// thread of a block, resumed in shuffled order from barrier to barrier. Shared memory starts as NaN in every block.
#pragma once
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __syncthreads() simt::barrier(__LINE__)

extern "C" {
int simt_mutation = 0;  // the number of the one that takes place, see with_mutations
}

using cudaStream_t = void*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

constexpr size_t kStackBytes = 128 << 10, kDefaultSmemBytes = 48 << 10, kMaxSmemBytes = 232448, kMarginBytes = 1024;
constexpr unsigned char kPoison = 0xff;  // four of them are a NaN
constexpr int kExited = -1, kWaiting = -2;

// The block's shared memory, 227 KiB as on sm_90, and a margin behind it in which stray writes are seen.
alignas(128) inline unsigned char smem[kMaxSmemBytes + kMarginBytes];

struct Fibre {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  jmp_buf suspended;
  bool started = false;
  int line = 0;  // of the barrier it waits at
  const unsigned* place = nullptr;  // where it waits for another value than this one
  unsigned value = 0;

  bool waits() const { return place != nullptr && *place == value; }
};

inline std::vector<Fibre> fibres;
inline std::function<void()> body;
inline jmp_buf scheduler;
inline std::mt19937 shuffler;
inline std::map<const void*, size_t> smem_limits;
inline cudaError_t last_error = cudaSuccess;
inline std::string message;
inline std::set<std::string> launched;  // symbols of the kernels that ran
inline int ignored_barrier = 0;  // its line; to see what its absence does
inline size_t granted_bytes = 0;  // of shared memory, to the launch

// For kernels whose threads wait for one another in other ways: they run independently, each until it has to wait.
inline bool independent = false;
inline uint64_t progress = 0;  // counts whatever somebody may wait for
inline std::function<void()> before_block = [] {};
inline std::function<bool()> between_rounds = [] { return false; };  // whether something is still on its way
constexpr int kPatience = 1000;  // rounds without progress

inline void suspend(int line) {
  Fibre& fibre = fibres[threadIdx.x];
  fibre.line = line;
  if (_setjmp(fibre.suspended) == 0) _longjmp(scheduler, 1);
}

// For as long as a place has this value. The scheduler looks at it, which is cheaper than to resume the thread.
inline void wait_while(const unsigned& place, unsigned value) {
  Fibre& fibre = fibres[threadIdx.x];
  fibre.place = &place, fibre.value = value;
  while (place == value) suspend(kWaiting);
  fibre.place = nullptr;
}

inline void barrier(int line) {
  if (line != ignored_barrier) suspend(line);
}

// A fibre outlives its block: it waits at kExited for the next one, so that switching needs no system call.
inline void fibre_main() {
  for (;;) {
    body();
    suspend(kExited);
  }
}

inline void fail(const std::string& what) {
  if (last_error == cudaSuccess) message = what;
  last_error = cudaErrorLaunchFailure;
  fibres.clear();
}

// The same from within a thread, which does not go on.
inline void complain(const std::string& what) {
  if (last_error == cudaSuccess) message = what + ", thread " + std::to_string(threadIdx.x);
  last_error = cudaErrorLaunchFailure;
  for (;;) suspend(kWaiting);
}

inline void on_signal(int signal_number) { _longjmp(scheduler, 1 + signal_number); }

// Runs one thread up to its next barrier. False when it died of a bad access.
inline bool resume(unsigned thread) {
  threadIdx.x = thread;
  if (int cause = _setjmp(scheduler)) {
    if (cause == 1) return true;
    fail("signal " + std::to_string(cause - 1) + " (misaligned or wild access) in thread " +
         std::to_string(threadIdx.x) + " of block " + std::to_string(blockIdx.x));
    return false;
  }
  Fibre& fibre = fibres[thread];
  if (fibre.started) _longjmp(fibre.suspended, 1);
  fibre.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fibre.stack.get();
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, fibre_main, 0);
  setcontext(&context);
  return false;
}

// Threads of some warps, round by round, in shuffled order, until all have ended. Some warps are faster than others.
inline bool run_independently(const std::vector<unsigned>& order) {
  int patience = kPatience;
  std::vector<unsigned> of_round;
  unsigned often[32];  // of 32 rounds
  for (unsigned& times : often) times = 1u << shuffler() % 6;
  for (size_t ended = 0; ended < order.size();) {
    const uint64_t before = progress;
    bool runs[32];
    for (int warp = 0; warp < 32; ++warp) runs[warp] = shuffler() % 32 < often[warp];
    of_round.clear();
    for (unsigned thread : order)
      if (runs[thread / 32] && fibres[thread].line != kExited) of_round.push_back(thread);
    std::shuffle(of_round.begin(), of_round.end(), shuffler);
    for (unsigned thread : of_round) {
      if (fibres[thread].waits()) continue;
      if (!resume(thread)) return false;
      if (fibres[thread].line == kExited) ++ended, ++progress;
    }
    const bool waits = !between_rounds() && progress == before;
    patience = waits ? patience - 1 : kPatience;
    if (patience == 0) {
      fail("threads that wait for one another for ever");
      return false;
    }
    if (last_error != cudaSuccess) {
      fibres.clear();
      return false;
    }
  }
  return true;
}

// All threads from barrier to barrier.
inline bool run_in_step(std::vector<unsigned>& order) {
  do {
    std::shuffle(order.begin(), order.end(), shuffler);
    for (unsigned thread : order)
      if (!resume(thread)) return false;
    for (unsigned thread : order)
      if (fibres[thread].line != fibres[order[0]].line) {
        fail("divergent barrier: lines " + std::to_string(fibres[thread].line) + " and " +
             std::to_string(fibres[order[0]].line) + " (-1 is the end of the kernel)");
        return false;
      }
  } while (fibres[order[0]].line != kExited);
  return true;
}

inline bool run_block(size_t smem_bytes) {
  unsigned char* const end = smem + smem_bytes;
  std::memset(smem, kPoison, smem_bytes + kMarginBytes);
  granted_bytes = smem_bytes;
  std::vector<unsigned> order(blockDim.x);
  std::iota(order.begin(), order.end(), 0u);
  for (unsigned thread : order) fibres[thread].line = 0, fibres[thread].place = nullptr;
  before_block();
  if (!(independent ? run_independently(order) : run_in_step(order))) return false;
  if (std::any_of(end, end + kMarginBytes, [](unsigned char byte) { return byte != kPoison; })) {
    fail("write beyond the shared memory asked for");
    return false;
  }
  return true;
}

inline void run(const void* kernel, dim3 grid, dim3 block, size_t smem_bytes) {
  const size_t limit = smem_limits.count(kernel) ? smem_limits[kernel] : kDefaultSmemBytes;
  const bool flat = grid.z * block.y * block.z == 1;
  const bool fits = grid.x > 0 && grid.x <= 0x7fffffffu && grid.y > 0 && grid.y <= 0xffffu;
  if (!flat || !fits || block.x == 0 || block.x > 1024 || smem_bytes > limit) {
    message = "bad launch configuration";
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  if (Dl_info info; dladdr(kernel, &info) && info.dli_sname) launched.insert(info.dli_sname);
  gridDim = grid, blockDim = block;
  if (fibres.size() < block.x) fibres.resize(block.x);
  std::vector<unsigned> blocks(grid.x * grid.y);
  std::iota(blocks.begin(), blocks.end(), 0u);
  std::shuffle(blocks.begin(), blocks.end(), shuffler);

  struct sigaction mine = {}, old[3];
  const int caught[3] = {SIGSEGV, SIGBUS, SIGILL};
  mine.sa_handler = on_signal;
  mine.sa_flags = SA_NODEFER;
  for (int i = 0; i < 3; ++i) sigaction(caught[i], &mine, &old[i]);
  for (unsigned index : blocks) {
    blockIdx.x = index % grid.x, blockIdx.y = index / grid.x;
    if (!run_block(smem_bytes)) break;
  }
  for (int i = 0; i < 3; ++i) sigaction(caught[i], &old[i], nullptr);
}

template <class... Parameters>
struct Launch {
  void (*kernel)(Parameters...);
  dim3 grid, block;
  size_t smem_bytes;
  template <class... Arguments>
  void operator()(const Arguments&... arguments) const {
    body = [&] { kernel(arguments...); };
    run(reinterpret_cast<const void*>(kernel), grid, block, smem_bytes);
  }
};

// kernel<<<grid, block, smem_bytes, stream>>>(arguments) becomes simt::launch(kernel, grid, ...)(arguments).
template <class... Parameters>
Launch<Parameters...> launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t smem_bytes = 0,
                             cudaStream_t = nullptr) {
  return {kernel, grid, block, smem_bytes};
}

}  // namespace simt

inline cudaError_t cudaPeekAtLastError() { return simt::last_error; }
inline cudaError_t cudaGetLastError() { return std::exchange(simt::last_error, cudaSuccess); }
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int value) {
  if (value < 0 || static_cast<size_t>(value) > simt::kMaxSmemBytes) return cudaErrorInvalidValue;
  simt::smem_limits[reinterpret_cast<const void*>(kernel)] = value;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* place, int value, size_t bytes, cudaStream_t) {
  std::memset(place, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 4 : static_cast<int>(simt::kMaxSmemBytes);
  return cudaSuccess;
}
"""

TOY_KERNEL = r"""
#include <cuda_runtime_api.h>
namespace modelnew {
struct Params { const float* in; float* out; int n; };

// out[i] = sum over the rounds of the element opposite to i in its block.
template <int ROUNDS>
__global__ void __launch_bounds__(64) reverse_kernel(const Params params) {
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  float* tile = reinterpret_cast<float*>(modelnew_smem);
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = 0;
  for (int round = 0; round < ROUNDS; ++round) {
    tile[threadIdx.x] = i < params.n ? params.in[round * params.n + i] : 0.f;
    __syncthreads();  // first
    sum += tile[blockDim.x - 1 - threadIdx.x];
    __syncthreads();  // second
  }
  if (i < params.n) params.out[i] = sum;
}
}  // namespace modelnew

extern "C" int toy(const float* in, float* out, int n) {
  const modelnew::Params params = {in, out, n};
  modelnew::reverse_kernel<5><<<(n + 63) / 64, 64, 64 * sizeof(float), nullptr>>>(params);
  return cudaGetLastError();
}
"""

# A launch's head: kernel, or kernel<arguments>, before its <<<configuration>>>.
KERNEL_LAUNCH = re.compile(r"([\w:]+(?:<[^;{}()]*>)?)\s*<<<(.*?)>>>", re.DOTALL)

DYNAMIC_SMEM = re.compile(r"extern __shared__ __align__\(\d+\) (?:unsigned char|uint8_t) (\w+)\[\];")

# C entry points around an engine. The fields of Problem travel as one array of int64, in PROBLEM_FIELDS' order.
PROBLEM_FIELDS = [
    "N", "C", "H", "W", "K", "R", "S", "P", "Q", "groups", "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h",
    "dilation_w", "dtype", "tf32_allowed", *(f"{tensor}_stride[{i}]" for tensor in "xwy" for i in range(4)),
]  # fmt: skip
PROBLEM_FROM_FIELDS = (
    "static modelnew::Problem make_problem(const int64_t* fields) {\n  modelnew::Problem problem{};\n"
    + "".join(
        f"  problem.{name} = static_cast<std::remove_reference_t<decltype(problem.{name})>>(fields[{i}]);\n"
        for i, name in enumerate(PROBLEM_FIELDS)
    )
    + "  return problem;\n}\n"
)
ENGINE_ENTRY_POINTS = (
    r"""
#include <type_traits>
"""
    + PROBLEM_FROM_FIELDS
    + r"""
static const modelnew::Engine& kEngine = modelnew::ENGINE;
static modelnew::Operator as_operator(int op) { return static_cast<modelnew::Operator>(op); }
extern "C" {
const char* engine_refusal(int op, const int64_t* fields) {
  return kEngine.refusal(make_problem(fields), as_operator(op));
}
int64_t engine_workspace_bytes(int op, const int64_t* fields) {
  return kEngine.workspace_bytes(make_problem(fields), as_operator(op), modelnew::Pointers{});
}
const char* engine_describe(int op, const int64_t* fields) {
  static char text[512];
  kEngine.describe(make_problem(fields), as_operator(op), text, sizeof text);
  return text;
}
int engine_launch(int op, const int64_t* fields, void* const* pointers) {
  const modelnew::Pointers all = {pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], pointers[5]};
  return kEngine.launch(as_operator(op), make_problem(fields), all, nullptr);
}
const char* simt_message() { return simt::message.c_str(); }
const char* simt_launched() {
  static std::string names;
  names.clear();
  for (const std::string& name : simt::launched) names += name + "\n";
  return names.c_str();
}
void simt_ignore_barrier(int line) { simt::ignored_barrier = line; }
void simt_seed(int seed) { simt::shuffler.seed(seed); }
}
"""
)

DTYPE_NUMBER = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
OPERATOR_NUMBER = {"fprop": 0, "dgrad": 1, "wgrad": 2, "bgrad": 3}


def compile_shared(source: str, folder: Path, *flags: str) -> ctypes.CDLL:
    """A C++ text as a loaded shared library, which may be there already: see `builds`."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder.mkdir(parents=True, exist_ok=True)
    library, written = folder / "library.so", folder / "source.cpp"
    if not (library.exists() and written.read_text() == source):
        written.write_text(source)
        command = ["g++", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Werror", f"-I{folder}", f"-I{KERNELS}", *flags]
        done = subprocess.run([*command, "source.cpp", "-o", "part.so"], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (folder / "part.so").rename(library)
    return ctypes.CDLL(str(library))


INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')


def amalgamate(sources: dict[str, str], names: Iterable[str]) -> str:
    """One translation unit of the named files, with their own headers pasted in where they are first included.

    `#line` makes the compiler report errors at the place in the file under kernels/.
    """
    included: set[str] = set()
    return "\n".join(line for name in names for line in expand(sources, name, included)) + "\n"


def expand(sources: dict[str, str], name: str, included: set[str]) -> list[str]:
    """Lines of one file, its includes expanded unless `included` (which grows) has them already."""
    included.add(name)
    lines = [f'#line 1 "kernels/{name}"']
    for number, line in enumerate(sources[name].splitlines(), 1):
        include = INCLUDE.match(line)
        if include is None:
            lines.append("" if line.strip() == "#pragma once" else line)
        elif include[1] in included:
            lines.append("")
        else:
            lines += [*expand(sources, include[1], included), f'#line {number + 1} "kernels/{name}"']
    return lines


def compile_simt(source: str, folder: Path) -> ctypes.CDLL:
    """A CUDA text, kernels and launchers, as a library that runs on the CPU."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cuda_runtime_api.h").write_text(SIMT_HEADER)
    source = KERNEL_LAUNCH.sub(r"simt::launch(\1, \2)", source)
    source = DYNAMIC_SMEM.sub(r"unsigned char* const \1 = simt::smem;", source)
    # Vector accesses must be aligned on a GPU: here they trap. Multiply-adds are fused as nvcc does.
    sanitize = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
    fuse = ("-march=native", "-ffp-contract=fast")
    emulation = ("-DMODELNEW_HOST_EMULATION", "-include", "cuda_runtime_api.h", "-Wno-unknown-pragmas")
    # Without -fno-gnu-unique all libraries of a process would share the shim's state. Where the compiler fortifies
    # unless told otherwise (Ubuntu's), to jump from stack to stack would abort.
    flags = ("-O1", "-fno-gnu-unique", "-U_FORTIFY_SOURCE")
    return compile_shared(source, folder, *flags, *emulation, *sanitize, *fuse)


BUILDS: dict[str, Callable[[Path], Any]] = {}


def built_beside_the_tests(build: Callable[[Path], Any]) -> Callable:
    """A session's fixture of what g++ compiles in a folder: see `builds`."""
    BUILDS[build.__name__] = build

    @pytest.fixture(scope="session", name=build.__name__)
    def fixture(builds: dict[str, Future]) -> Any:
        return builds[build.__name__].result()

    return fixture


@pytest.fixture(scope="session", autouse=True)
def builds(request, tmp_path_factory) -> Iterator[dict[str, Future]]:
    """All that these tests need, one after another, in their order: most tests use one core, and g++ takes a minute.

    Workers of pytest-xdist share a folder: who comes first compiles, the others wait for that and load it. So each
    build must work in the folder that it left. All are asked at the end: who needs one depends on how tests are shared.
    """
    names = dict.fromkeys(name for item in request.session.items for name in item.fixturenames if name in BUILDS)
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if is_worker(request.config) else own

    def build(name: str) -> Any:
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            return BUILDS[name](shared / f"build_{name}")

    with ThreadPoolExecutor(max_workers=1) as pool:
        futures = {name: pool.submit(build, name) for name in names}
        yield futures
        pool.shutdown(cancel_futures=True)
    for future in futures.values():
        if not future.cancelled() and isinstance(future.exception(), Exception):  # not those that skip
            future.result()


def is_worker(config: pytest.Config) -> bool:
    """Whether this is one of several processes of pytest-xdist that share the tests."""
    return hasattr(config, "workerinput")


def left_out(text: str) -> tuple[str, str]:
    """The mutation that does without a statement, by what it begins with."""
    return text, f"if (!MUTATED) {text}"


def with_mutations(source: str, mutations: dict[str, tuple[str, str]], start: int = 1) -> str:
    """A text in which one mutation takes place at a time, or none: to compile it for each would take minutes.

    A mutation is a text and what stands in its place, in which MUTATED says whether it takes place.
    """
    for number, (name, (old, new)) in enumerate(mutations.items(), start):
        assert old in source, name
        source = source.replace(old, new.replace("MUTATED", f"(simt_mutation == {number})"))
    return source


@contextlib.contextmanager
def mutated(library: ctypes.CDLL, mutations: dict[str, tuple[str, str]], name: str) -> Iterator[None]:
    mutation = ctypes.c_int.in_dll(library, "simt_mutation")
    mutation.value = [*mutations].index(name) + 1
    try:
        yield
    finally:
        mutation.value = 0


TOY_MUTATIONS = {
    "first barrier dropped": left_out("__syncthreads();  // first"),
    "second barrier dropped": left_out("__syncthreads();  // second"),
    "divergent barrier": ("__syncthreads();  // first", "if (!MUTATED || threadIdx.x < 32) __syncthreads();  // first"),
    "early return": ("float sum = 0;", "float sum = 0; if (MUTATED && i >= params.n) return;"),
    "read one too far": ("blockDim.x - 1 - threadIdx.x", "blockDim.x - !MUTATED - threadIdx.x"),
    "written beyond shared memory": ("tile[threadIdx.x] =", "tile[threadIdx.x + MUTATED] ="),
    "more shared memory than granted": ("64 * sizeof(float)", "MUTATED ? 50000 : 64 * sizeof(float)"),
}


@built_beside_the_tests
def toy_shim(folder: Path) -> ctypes.CDLL:
    return compile_simt(with_mutations(TOY_KERNEL, TOY_MUTATIONS), folder)


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


# TF32 holds for large problems; in the shim for those it can run.
LEAST_TF32_WORK_IN_SHIM = dict.fromkeys(LEAST_TF32_WORK, 2**20)


def input_pointers(operator: str, tensors: dict[str, Tensor]) -> list[int | None]:
    """Addresses of x, w, bias and dy as far as an operator reads them."""
    reads = {"fprop": ("x", "w", "bias"), "dgrad": ("w", "dy"), "wgrad": ("x", "dy"), "bgrad": ("dy",)}[operator]
    return [
        tensors[name].data_ptr() if name in reads and name in tensors else None for name in ("x", "w", "bias", "dy")
    ]


# Runs ring_kernel in a shape of the caller's choice, or says -1.
DEPTHWISE_ENTRY_POINTS = r"""
extern "C" int depthwise_ring(int op, const int64_t* fields, void* const* pointers, const int* wish) {
  using namespace modelnew;
  const Problem problem = make_problem(fields);
  const depthwise::Plan plan = depthwise::make_plan(
      problem, as_operator(op), true, {false, wish[0], wish[1], false, wish[2], wish[3], wish[4], wish[5], {}});
  if (!plan.exists || plan.kernel != depthwise::Kernel::kRing) return -1;
  const Pointers all = {pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], nullptr};
  return depthwise::launch_planned(as_operator(op), problem, all, plan, nullptr);
}

// The same for queue_kernel, a shape of it and the height of its bands.
extern "C" int depthwise_queue(int op, const int64_t* fields, void* const* pointers, int shape, int band_rows) {
  using namespace modelnew;
  const Problem problem = make_problem(fields);
  depthwise::Wish wish{false, band_rows};
  wish.queue_shape = shape + 1;
  const depthwise::Plan plan = depthwise::make_plan(problem, as_operator(op), true, wish);
  if (!plan.exists || plan.kernel != depthwise::Kernel::kQueue) return -1;
  const Pointers all = {pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], nullptr};
  return depthwise::launch_planned(as_operator(op), problem, all, plan, nullptr);
}
"""

# hopper.cuh as far as an engine of the same kind takes it: copies that happen as late as they may.
COPIES_STAND_IN = r"""
#include <deque>

#include "numerics.cuh"

namespace simt {
struct OrderedCopy {
  uint32_t to;
  const void* from;
  int bytes, group;
};
inline std::deque<OrderedCopy> ordered[1024];
inline int groups[1024];
inline const bool copies_begin_anew = [] {
  before_block = [] {
    for (int thread = 0; thread < 1024; ++thread) ordered[thread].clear(), groups[thread] = 0;
  };
  return true;
}();
}  // namespace simt

namespace modelnew {
namespace hopper {
inline uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - simt::smem);
}
inline uint64_t evict_first() { return 0; }
template <int BYTES>
void copy_async(uint32_t to, const void* from, int size, uint64_t) {
  const bool aligned = (to | reinterpret_cast<uint64_t>(from)) % BYTES == 0;
  if ((size != BYTES && size != 0) || !aligned || to + BYTES > simt::granted_bytes) simt::complain("a wild copy");
  simt::ordered[threadIdx.x].push_back({to, size == 0 ? nullptr : from, BYTES, simt::groups[threadIdx.x]});
}
inline void copies_commit() { ++simt::groups[threadIdx.x]; }
template <int PENDING>
void copies_wait() {
  auto& mine = simt::ordered[threadIdx.x];
  for (; !mine.empty() && mine.front().group < simt::groups[threadIdx.x] - PENDING; mine.pop_front())
    if (mine.front().from != nullptr)
      std::memcpy(simt::smem + mine.front().to, mine.front().from, mine.front().bytes);
    else
      std::memset(simt::smem + mine.front().to, 0, mine.front().bytes);
}
}  // namespace hopper
}  // namespace modelnew
"""


DEPTHWISE_MUTATIONS = {
    "weights taken for finite": left_out("if (!finite) *flag = 1;\n}"),
    "rows above the image multiplied": ("(row + STRIDE <= 0); ++step", "(row + STRIDE <= (MUTATED ? -2 : 0)); ++step"),
    "an output too many": ("if (j < outputs_q) narrow(", "if (MUTATED || j < outputs_q) narrow("),
    "a column behind the image": ("inside &= first_column + j < W;", "inside &= first_column + j < W + MUTATED;"),
    "a chunk not waited for": (
        "hopper::copies_wait<2>();",
        "(MUTATED ? hopper::copies_wait<3> : hopper::copies_wait<2>)();",
    ),
    "halo not cleared": left_out("reinterpret_cast<Pack<float, 4>*>(x_smem)[i] = Pack<float, 4>{};"),
    "queue: weights taken for finite": ("if (finite != 0) {", "if (!MUTATED && finite != 0) {"),
    "queue: a step not waited for": (
        "hopper::copies_wait<DEPTH - 1>();\n    const",
        "(MUTATED ? hopper::copies_wait<DEPTH> : hopper::copies_wait<DEPTH - 1>)();\n    const",
    ),
    "queue: a column behind the image": (
        "columns_inside |= is_within(first_column + j, params.columns.inputs)",
        "columns_inside |= is_within(first_column + j, params.columns.inputs + MUTATED)",
    ),
    "queue: a step too many": ("int to_order = outputs_p - step;", "int to_order = outputs_p - step + MUTATED;"),
}


class ShimEngine:
    """An engine that synchronises by __syncthreads alone, compiled by g++ and run thread by thread."""

    def __init__(self, folder: Path, name: str = "direct", mutations: Sequence[tuple] = (), **constants: int) -> None:
        """`constants` replaces the values of constants in the source, to reach what takes large problems."""
        files = [f"{name}.cu", *(["direct.cu"] if name in ("dilated", "patches", "strided") else [])]
        source = amalgamate({**modelnew._sources, "hopper.cuh": COPIES_STAND_IN}, files)
        replacements = {rf"\b{constant} = \w+;": f"{constant} = {value};" for constant, value in constants.items()}
        replacements[r"\b1 << 29 : 1 << 27;"] = "1 << 20 : 1 << 20;"
        replacements |= {rf"\bleast = 1 << {bits};": "least = 1 << 20;" for bits in (24, 29)}
        replacements |= {re.escape(old): new for old, new in mutations}
        for pattern, replacement in replacements.items():
            source, found = re.subn(pattern, replacement, source)
            assert found == 1, pattern
        of_engine = {
            "depthwise": DEPTHWISE_MUTATIONS,
            "dilated": DILATED_MUTATIONS,
            "patches": PATCHES_MUTATIONS,
            "strided": STRIDED_MUTATIONS,
        }
        source = with_mutations(source, of_engine.get(name, {}))
        source = f"#define ENGINE k{name.capitalize()}Engine\n{source}"
        self.operators = tuple(OPERATOR_NUMBER) if name == "direct" else ("fprop", "dgrad")
        more = {
            "depthwise": DEPTHWISE_ENTRY_POINTS,
            "dilated": DILATED_STAND_INS,
            "patches": PATCHES_STAND_INS,
            "strided": STRIDED_STAND_INS,
        }
        entry_points = ENGINE_ENTRY_POINTS + more.get(name, "")
        self.library = compile_simt(source + '#line 1 "entry_points"\n' + entry_points, folder)
        for name in ("engine_refusal", "engine_describe", "simt_message", "simt_launched"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.engine_workspace_bytes.restype = ctypes.c_int64

    @staticmethod
    def fields(case: Case, tensors: dict[str, Tensor], tf32: bool) -> ctypes.Array:
        x, w, y = tensors["x"], tensors["w"], tensors["dy"]
        values = [*case.x_shape, case.K, case.R, case.S, *case.y_shape[2:], case.groups]
        values += [*case.stride, *case.padding, *case.dilation, DTYPE_NUMBER[x.dtype], tf32]
        values += [*x.stride(), *w.stride(), *y.stride()]
        return (ctypes.c_int64 * len(PROBLEM_FIELDS))(*values)

    def run(self, operator: str, case: Case, tensors: dict[str, Tensor], tf32: bool, out: Tensor) -> Tensor:
        """Runs one operator. `tensors` are x, w, dy (y's strides in fprop) and perhaps bias; `out` takes its place."""
        number = OPERATOR_NUMBER[operator]
        place = {"fprop": "dy", "dgrad": "x", "wgrad": "w"}
        fields = self.fields(case, tensors | ({place[operator]: out} if operator in place else {}), tf32)
        assert self.library.engine_refusal(number, fields) is None
        assert self.library.engine_describe(number, fields)
        bytes_needed = self.library.engine_workspace_bytes(number, fields)
        workspace = with_margins(torch.full((-(-bytes_needed // 8),), math.nan, dtype=torch.float64))
        pointers = (ctypes.c_void_p * 6)(*input_pointers(operator, tensors), out.data_ptr(), workspace.data_ptr())
        code = self.library.engine_launch(number, fields, pointers)
        assert code == 0, f"{operator} of {case}: error {code}, {self.library.simt_message().decode()}"
        assert margins_intact(workspace)
        return out

    def __call__(self, case: Case, tensors: dict[str, Tensor], tf32: bool = False) -> dict[str, Tensor]:
        """All four operators or those that the engine takes, into outputs filled with NaN, strided like x, w and dy."""
        places = {"fprop": "dy", "dgrad": "x", "wgrad": "w", "bgrad": "bias"}
        results = {}
        for operator in self.operators:
            shape = (case.K,) if operator == "bgrad" else tensors[places[operator]].shape
            if operator in OPERANDS and self.refuses(operator, case, tensors) and len(self.operators) < 4:
                continue
            out = with_margins(tensors["x"].new_full(shape, math.nan))
            if len(shape) == 4 and is_channels_last(tensors[places[operator]]):
                out = VIEWS["channels_last"](out)
            results[operator] = self.run(operator, case, tensors, tf32, out)
            inner = out.permute(0, 2, 3, 1) if not out.is_contiguous() else out
            assert margins_intact(inner), f"{operator} of {case} writes outside its output"
        return results

    def refuses(self, operator: str, case: Case, tensors: dict[str, Tensor]) -> str | None:
        """Why the engine refuses an operator, whose output would be strided like the tensor in its place."""
        return self.library.engine_refusal(OPERATOR_NUMBER[operator], self.fields(case, tensors, False))

    def describes(self, operator: str, case: Case, tensors: dict[str, Tensor]) -> str:
        return self.library.engine_describe(OPERATOR_NUMBER[operator], self.fields(case, tensors, False)).decode()


def is_channels_last(tensor: Tensor) -> bool:
    """Unambiguously."""
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


@built_beside_the_tests
def direct_shim(folder: Path) -> ShimEngine:
    few_points = ("kLeastPoints = 1 << 17;", "kLeastPoints = 1;")
    return ShimEngine(folder, mutations=[few_points])


@built_beside_the_tests
def depthwise_shim(folder: Path) -> ShimEngine:
    return ShimEngine(folder, "depthwise")


# Engines that two others ask and that never take anything.
IDLE_ENGINES = r"""
namespace modelnew {
static const char* refuse_all(const Problem&, Operator) { return "everything"; }
const Engine kTmaEngine{"tma", refuse_all, nullptr, nullptr, nullptr};
const Engine kDepthwiseEngine{"depthwise", refuse_all, nullptr, nullptr, nullptr};
const Engine kPointwiseEngine{"pointwise", refuse_all, nullptr, nullptr, nullptr};
}  // namespace modelnew
"""

# What the dilated engine gives its parts to: one that takes no dilation down the columns, and does the rest as direct.
DILATED_STAND_INS = (
    IDLE_ENGINES
    + r"""
extern "C" {
int parts_launched = 0;  // so far
}
namespace modelnew {
// Who takes whole problems: nobody, or m, w or g for mma, wgmma or gather, and how long that takes.
static char taker = 0;
static double whole_cycles = 0;
static const char* refuse_dilated(const Problem& problem, Operator) {
  return problem.dilation_h > 1 && problem.R > 1 && taker != 'g' ? "dilated" : nullptr;
}
bool gather_takes_taps_apart(const Problem& problem, Operator) { return taker == 'g' && problem.dilation_h > 1; }
static cudaError_t launch_part(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  ++parts_launched;
  return direct::launch(op, problem, pointers, stream);
}
static const char* refuse_by_mma(const Problem& problem, Operator) {
  return taker != 'm' || problem.dilation_h == 1 ? "it is told to" : nullptr;
}
static const char* refuse_by_wgmma(const Problem& problem, Operator) {
  return taker != 'w' || problem.dilation_h == 1 ? "it is told to" : nullptr;
}
static double cycles_of_whole(const Problem&, Operator) { return whole_cycles; }
static double cycles_by_gather(const Problem& problem, Operator) {
  return problem.dilation_h > 1 ? whole_cycles : 1000;
}
const Engine kWgmmaEngine{"wgmma", refuse_by_wgmma, nullptr, nullptr, nullptr, nullptr, cycles_of_whole};
const Engine kGatherEngine{"gather",         refuse_dilated, direct::workspace_bytes, launch_part,
                           direct::describe, nullptr,        cycles_by_gather};
const Engine kStemEngine{"stem", refuse_all, nullptr, nullptr, nullptr};
const Engine kMmaEngine{"mma", refuse_by_mma, nullptr, nullptr, nullptr, nullptr, cycles_of_whole};
}  // namespace modelnew
extern "C" {
void set_whole_cycles(double cycles, char by) {
  modelnew::whole_cycles = cycles;
  modelnew::taker = by;
}
const char* dilated_yields(int op, const int64_t* fields) {
  return modelnew::dilated::yields(make_problem(fields), as_operator(op));
}
}
"""
)

DILATED_MUTATIONS = {
    "a padding too much": ("(other - shifted) / d};", "(other - shifted) / d + MUTATED};"),
    "another phase of x": ("run.first_x * p.x_stride[2];", "(run.first_x + MUTATED) * p.x_stride[2];"),
    "images of another distance": ("of.y_stride[0] = p.y_stride[2];", "if (!MUTATED) of.y_stride[0] = p.y_stride[2];"),
    "rows that follow one another": left_out("of.x_stride[2] *= p.dilation_h;"),
    "phases of unlike images in one batch": (
        "run.rows_x == last.rows_x",
        "(MUTATED || run.rows_x == last.rows_x)",
    ),
    "phases of unlike padding in one batch": ("run.pad == last.pad", "(MUTATED || run.pad == last.pad)"),
    "the first tap of all": ("rows.first * p.w_stride[2] +", "rows.first * p.w_stride[2] * !MUTATED +"),
    "a tap too few": ("(int64_t{size} - 1 + pad) / dilation);", "(int64_t{size} - 1 + pad - MUTATED) / dilation);"),
    "only the first part": ("if (!use(part)) return false;", "if (!use(part) || MUTATED) return false;"),
}


# What the patches engine gives the rest to, and who takes nothing else; one that may take whole problems.
PATCHES_STAND_INS = (
    IDLE_ENGINES
    + r"""
namespace modelnew {
static bool gather_takes = true, stem_takes = false;
static const char* refuse_others(const Problem& problem, Operator) {
  return problem.R * problem.S == 1 && gather_takes ? nullptr : "it is told to";
}
static const char* refuse_unless_told(const Problem&, Operator) { return stem_takes ? nullptr : "it is told to"; }
const Engine kGatherEngine{"gather",         refuse_others, direct::workspace_bytes, direct::launch,
                           direct::describe, nullptr,       nullptr};
const Engine kStemEngine{"stem", refuse_unless_told, nullptr, nullptr, nullptr};
const Engine kWgmmaEngine{"wgmma", refuse_all, nullptr, nullptr, nullptr};
const Engine kMmaEngine{"mma", refuse_all, nullptr, nullptr, nullptr};
}  // namespace modelnew
extern "C" {
void let_take(bool gather, bool stem) {
  modelnew::gather_takes = gather;
  modelnew::stem_takes = stem;
}
const char* patches_yields(int op, const int64_t* fields) {
  return modelnew::patches::yields(make_problem(fields), as_operator(op));
}
}
"""
)

PATCHES_MUTATIONS = {
    "patches of the next row": (
        "params.row = stride[2] * problem.R;",
        "params.row = stride[2] * (problem.R + MUTATED);",
    ),
    "patches of every column": (
        "params.column = stride[3] * problem.S;",
        "params.column = stride[3] * (MUTATED ? 1 : problem.S);",
    ),
    "another order than that of the weights": ("!= Lie::kPixels) return", "!= Lie::kPixels || MUTATED) return"),
    "rows of pixels that are not side by side": (
        "if (stride[3] == C * stride[1]) return",
        "if (stride[3] == C * stride[1] || MUTATED) return",
    ),
    "values behind a patch": ("first + i < params.values ?", "first + i < params.values || MUTATED ?"),
    "weights that are not filled up": (
        "|| row_of(problem) != values_of(problem);",
        "|| (!MUTATED && row_of(problem) != values_of(problem));",
    ),
}


# What the strided engine gives its parts to: one that takes no stride, and does the rest as direct.
STRIDED_STAND_INS = (
    IDLE_ENGINES
    + r"""
extern "C" {
int parts_launched = 0;  // so far
}
namespace modelnew {
static const char* refuse_strides(const Problem& problem, Operator) {
  return problem.stride_h > 1 || problem.stride_w > 1 || problem.pad_h < 0 || problem.pad_w < 0 ? "a stride" : nullptr;
}
static cudaError_t launch_part(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  ++parts_launched;
  return direct::launch(op, problem, pointers, stream);
}
const Engine kDilatedEngine{"dilated", refuse_all, nullptr, nullptr, nullptr};
const Engine kWgmmaEngine{"wgmma", refuse_all, nullptr, nullptr, nullptr};
const Engine kGatherEngine{"gather", refuse_strides, direct::workspace_bytes, launch_part, direct::describe};
const Engine kStemEngine{"stem", refuse_all, nullptr, nullptr, nullptr};
const Engine kMmaEngine{"mma", refuse_all, nullptr, nullptr, nullptr};
}  // namespace modelnew
extern "C" const char* strided_yields(int op, const int64_t* fields) {
  return modelnew::strided::yields(make_problem(fields), as_operator(op));
}
"""
)

STRIDED_MUTATIONS = {
    "a padding too much": ("* dilation) / stride);\n", "* dilation) / stride) + MUTATED;\n"),
    "the first tap of all": ("row.first * p.w_stride[2] +", "row.first * p.w_stride[2] * !MUTATED +"),
    "taps side by side": left_out("of.w_stride[3] *= column.step;"),
    "rows side by side": left_out("of.x_stride[2] *= stride_h;"),
    "columns of the first phase": ("b * p.x_stride[3],", "b * !MUTATED * p.x_stride[3],"),
    "taps as far apart as before": ("dilation / common;\n", "dilation / (MUTATED ? 1 : common);\n"),
    "a row too few": ("ceil_div(size - number, stride));", "ceil_div(size - number - MUTATED, stride));"),
    "no zeros": ("if (idle_phases(problem) > 0) {", "if (!MUTATED && idle_phases(problem) > 0) {"),
    "only the first part": ("if (!use(part)) return false;", "if (!use(part)) return false; if (MUTATED) return true;"),
}


@built_beside_the_tests
def strided_shim(folder: Path) -> ShimEngine:
    return ShimEngine(folder, "strided")


@built_beside_the_tests
def patches_shim(folder: Path) -> ShimEngine:
    return ShimEngine(folder, "patches")


@built_beside_the_tests
def dilated_shim(folder: Path) -> ShimEngine:
    return ShimEngine(folder, "dilated")


# Each case bends the geometry in a way of its own; the integers in it are odd or prime where nothing else asks.
DENSE_CASES = [
    Case(1, 1, 1, 1, 1, 1, 1),
    Case(3, 7, 5, 11, 13, 1, 1),
    Case(2, 3, 7, 11, 5, 3, 2),
    Case(2, 4, 9, 14, 6, 2, 5, stride=(2, 1), padding=(1, 3)),
    Case(1, 2, 10, 12, 3, 3, 3, padding=(3, 1), dilation=(2, 3)),
    Case(1, 3, 11, 8, 4, 3, 4, stride=(3, 2), padding=(2, 4), dilation=(2, 1)),
    Case(1, 5, 13, 9, 7, 1, 1, stride=(2, 3)),  # rows and columns that no filter meets
    Case(1, 2, 12, 15, 3, 2, 2, stride=(5, 4), padding=(1, 0)),  # the same between filters
    Case(1, 3, 6, 7, 2, 3, 3, stride=(2, 2), padding=(2, 2), dilation=(2, 2)),  # phases of dx without a tap
    Case(1, 2, 19, 20, 2, 3, 3, stride=(4, 6), padding=(3, 2), dilation=(2, 3)),  # stride and dilation share divisors
    Case(2, 2, 5, 6, 3, 5, 6),  # one output
    Case(1, 8, 4, 5, 8, 2, 2, stride=(8388608, 1)),  # a stride whose multiples leave 32 bits
    Case(1, 2, 4, 5, 2, 2, 2, stride=(4202600, 536870911), groups=2),
    Case(1, 2, 40, 3, 2, 2, 2, stride=(37, 1), padding=(2, 0)),  # more phases of dx than filter rows
    Case(1, 2, 2, 3, 3, 4, 3, padding=(4, 3)),  # more padding than image
    Case(1, 1, 4, 150, 2, 1, 131),  # a filter row longer than a chunk of the sum
    Case(1, 1, 33, 35, 2, 31, 29, padding=(15, 14)),
    Case(1, 3, 3, 301, 2, 3, 3),  # an image wider than any tile
    Case(1, 3, 301, 3, 2, 3, 3, padding=(1, 1)),  # and one higher
    Case(2, 6, 7, 8, 9, 3, 3, padding=(1, 1), groups=3),
    Case(1, 8, 5, 5, 4, 2, 3, groups=2, stride=(1, 2), padding=(0, 1)),
]
DEPTHWISE_CASES = [
    Case(2, 5, 9, 17, 5, 3, 3, padding=(1, 1), groups=5),
    Case(1, 3, 70, 131, 3, 3, 3, groups=3),
    Case(1, 3, 21, 22, 9, 3, 2, padding=(1, 0), groups=3),  # three outputs for each input channel
    Case(2, 4, 15, 13, 8, 5, 5, stride=(2, 2), padding=(2, 2), groups=4),
    Case(1, 2, 30, 17, 2, 3, 3, stride=(2, 1), padding=(2, 2), dilation=(2, 3), groups=2),
    Case(1, 2, 37, 41, 2, 11, 9, padding=(5, 4), groups=2),
    Case(2, 3, 40, 37, 3, 5, 5, padding=(2, 2), groups=3),
    Case(1, 2, 17, 131, 2, 7, 7, padding=(3, 2), groups=2),
    Case(2, 2, 33, 65, 4, 3, 3, padding=(1, 1), groups=2),
    Case(1, 1, 9, 9, 6, 3, 3, padding=(1, 1)),  # one input channel without groups
]
# Channels around tiles of 4, 16, 64 and 128, pixels around tiles of 128 and 512.
TILE_CASES = [
    Case(1, C, H, W, K, R, R, padding=(R // 2, R // 2))
    for (C, K), (H, W, R) in itertools.product(
        [(3, 5), (15, 4), (17, 15), (8, 64), (1, 65), (16, 63), (65, 2), (2, 129)],
        [(8, 16, 3), (1, 127, 1), (3, 43, 3), (19, 27, 1)],
    )
]


def random_cases(count: int, seed: int) -> list[Case]:
    """Small problems of any kind, for what nobody thought of."""
    rng = random.Random(seed)

    def pair(low: int, high: int) -> tuple[int, int]:
        return rng.randint(low, high), rng.randint(low, high)

    def draw() -> Case:
        groups = rng.choice([1, 1, 1, 2, 3])
        (H, W), (R, S), (C, K) = pair(1, 24), pair(1, 6), pair(1, 6)
        return Case(
            rng.randint(1, 3), C * groups, H, W, K * groups, R, S, pair(1, 4), pair(0, 5), pair(1, 3), groups
        )  # fmt: skip

    cases = (draw() for _ in itertools.count())
    return list(itertools.islice((case for case in cases if min(case.y_shape) > 0), count))


# 1x1 to 2, 4 and 8 channels, with sums of one and of several chunks.
POINT_CASES = [Case(2, 20, 6, 10, 2, 1, 1), Case(1, 37, 4, 135, 3, 1, 1), Case(2, 7, 2, 34, 7, 1, 1)]
EXACT_CASES = DENSE_CASES + DEPTHWISE_CASES + TILE_CASES + POINT_CASES + random_cases(40, seed=0)


@built_beside_the_tests
def host_numerics(folder: Path) -> ctypes.CDLL:
    """The conversions of numerics.cuh and the rules of problem.cuh, as plain C++."""
    loop = "  for (int64_t i = 0; i < count; ++i)"
    source = f"""
        #include <initializer_list>
        #include <type_traits>
        #include "numerics.cuh"
        {PROBLEM_FROM_FIELDS}
        using namespace modelnew;
        extern "C" {{
        bool rule_uses_tf32(int op, const int64_t* fields) {{
          return uses_tf32(make_problem(fields), static_cast<Operator>(op));
        }}
        void round_all(const float* in, float* out, int64_t count) {{ {loop} out[i] = round_to_tf32(in[i]); }}
        void widen_half(const Half* in, float* out, int64_t count) {{ {loop} out[i] = widen(in[i]); }}
        void widen_bfloat16(const BFloat16* in, float* out, int64_t count) {{ {loop} out[i] = widen(in[i]); }}
        void narrow_half(const float* in, Half* out, int64_t count) {{ {loop} narrow(in[i], out[i]); }}
        void narrow_bfloat16(const float* in, BFloat16* out, int64_t count) {{ {loop} narrow(in[i], out[i]); }}
        // Contained times 2^exponent, and whether that is watched to fit, in either half of a pair.
        void contain_all(const float* in, float* out, bool* fits, int64_t count, int exponent) {{
          {loop} {{
            const uint32_t bits = float_bits(in[i]), one = float_bits(1.0f / power_of_two(exponent));
            const uint32_t pair = i % 2 == 0 ? contain_pair(bits, one, power_of_two(exponent))
                                             : contain_pair(one, bits, power_of_two(exponent));
            out[i] = widen(Half{{static_cast<uint16_t>(i % 2 == 0 ? pair : pair >> 16)}});
            Watch watch;
            for (uint32_t seen : {{one, bits, one}}) watch.see(seen);
            for (uint32_t seen : {{0u, pair, 0x3c003c00u}}) watch.see_contained(seen);
            fits[i] = watch.fits(least_contained(exponent, 1));
          }}
        }}
        // The same in two parts.
        void split_all(const float* in, float* first, float* rest, bool* fits, int64_t count, int exponent) {{
          const float scale = power_of_two(exponent);
          {loop} {{
            const uint32_t bits = float_bits(in[i]), one = float_bits(1.0f / scale);
            const uint32_t low = i % 2 == 0 ? bits : one, high = i % 2 == 0 ? one : bits;
            const uint32_t firsts = split_pair(low, high, scale), rests = split_rest(low, high, scale, firsts);
            first[i] = widen(Half{{static_cast<uint16_t>(i % 2 == 0 ? firsts : firsts >> 16)}});
            rest[i] = widen(Half{{static_cast<uint16_t>(i % 2 == 0 ? rests : rests >> 16)}});
            Watch watch;
            for (uint32_t seen : {{one, bits, one}}) watch.see(seen);
            for (uint32_t seen : {{0u, firsts, 0x3c003c00u}}) watch.see_contained(seen);
            fits[i] = watch.fits(least_contained(exponent, 2));
          }}
        }}
        bool scale(uint32_t field, int to, int* exponent) {{ return scale_exponent(field, to, *exponent); }}
        }}
    """
    library = compile_shared(source, folder, "-O2")
    library.rule_uses_tf32.restype = library.scale.restype = ctypes.c_bool
    return library


def convert(function: Callable, values: Tensor, dtype: torch.dtype) -> Tensor:
    result = torch.empty(values.shape, dtype=dtype)
    function(ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(result.data_ptr()), ctypes.c_int64(values.numel()))
    return result


def float_samples() -> Tensor:
    """Random bit patterns (every exponent, NaN and Inf among them), and all neighbours of values that 16 bits hold."""
    patterns = torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(0)).int()
    halves = torch.arange(-(2**15), 2**15).short().view(torch.float16).float().view(torch.int32)
    bfloats = torch.arange(-(2**15), 2**15).int() << 16
    steps = torch.tensor([-1, 0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001], dtype=torch.int32)
    near = torch.stack([halves, bfloats]).unsqueeze(-1) + steps
    special = torch.tensor([0x7FFFFFFF, 0x7F800000, 0x7F7FFFFF, 1, 0], dtype=torch.int32)
    return torch.cat([patterns, near.flatten(), special]).view(torch.float32)


def same_values(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))


@pytest.mark.parametrize("name, dtype", [("half", torch.float16), ("bfloat16", torch.bfloat16)])
def test_16_bit_conversions_are_torchs(host_numerics, name, dtype):
    every = torch.arange(-(2**15), 2**15).short().view(dtype)
    assert same_values(convert(getattr(host_numerics, f"widen_{name}"), every, torch.float32), every.float())
    samples = float_samples()
    assert same_values(convert(getattr(host_numerics, f"narrow_{name}"), samples, dtype), samples.to(dtype))


def test_tf32_rounding(host_numerics):
    """Ties away from zero; Inf and NaN stay, also the NaN whose bits would carry into the sign."""
    samples = float_samples()
    expected = torch.where(samples.isfinite(), round_to_tf32(samples), samples)
    assert same_values(convert(host_numerics.round_all, samples, torch.float32), expected)


def samples_near_fp16(exponent: int, *edges: float) -> Tensor:
    """All kinds of values, many of which 2^exponent takes into the range of fp16, or to those edges of it."""
    exponents = torch.randint(-20, 20, (1 << 18,), generator=torch.Generator().manual_seed(1))
    mantissas = float_samples()[: 1 << 18].view(torch.int32) & -0x7F800001
    near = (mantissas | (127 + exponents.int() - exponent).clamp(0, 254) << 23).view(torch.float32)
    steps = torch.arange(-0x2002, 0x2003, dtype=torch.int32)
    scaled = torch.tensor([edge / 2.0**exponent for edge in edges])
    beside = (scaled.view(torch.int32).unsqueeze(-1) + steps).flatten().view(torch.float32)
    return torch.cat([float_samples(), near, beside, -beside])


@pytest.mark.parametrize("exponent", [-100, -20, -1, 0, 1, 13, 60, 100])
def test_fp16_contains_tf32(host_numerics, exponent):
    """Exactly the value rounded to TF32, wherever the watch says that it fits: zeros and normal numbers of fp16."""
    samples = samples_near_fp16(exponent, 2.0**-14, 2.0**16)
    contained, fits = torch.empty_like(samples), torch.empty(samples.shape, dtype=torch.bool)
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (samples, contained, fits))
    host_numerics.contain_all(*pointers, ctypes.c_int64(samples.numel()), exponent)
    rounded = torch.where(samples.isfinite(), round_to_tf32(samples), samples).double() * 2.0**exponent
    small = samples.double().abs() * 2.0**exponent < 2.0**-14  # as it is, unrounded
    expected = (samples == 0) | (~small & (rounded.abs() < 2.0**16))
    assert torch.equal(fits, expected)
    assert fits.sum() > 1 << 16
    assert torch.equal(contained[fits].double(), rounded[fits])


@pytest.mark.parametrize("exponent", [-100, -20, -1, 0, 1, 13, 60, 100])
def test_two_parts_of_fp16_contain_fp32(host_numerics, exponent):
    """To 2^-23, from 2^-13 on; and the first part to 2^-11: a product without that of the rests is right to 2^-21."""
    samples = samples_near_fp16(exponent, 2.0**-13, 65520.0)
    first, rest, fits = torch.empty_like(samples), torch.empty_like(samples), torch.empty(samples.shape).bool()
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (samples, first, rest, fits))
    host_numerics.split_all(*pointers, ctypes.c_int64(samples.numel()), exponent)
    values = samples.double() * 2.0**exponent
    expected = (samples == 0) | ((values.abs() >= 2.0**-13) & (values.abs() < 65520))
    assert torch.equal(fits, expected)
    assert fits.sum() > 1 << 16
    values, first, rest = values[fits], first[fits].double(), rest[fits].double()
    assert torch.equal(first, values.half().double())
    assert ((first - values).abs() <= values.abs() * 2.0**-11).all()
    assert ((first + rest / 2048 - values).abs() <= values.abs() * 2.0**-23).all()


def test_scales_take_the_largest_value_where_it_belongs(host_numerics):
    exponent = ctypes.c_int()
    for field, to in itertools.product(range(256), (13, 14)):
        allowed = host_numerics.scale(field, to, ctypes.byref(exponent))
        assert allowed == (0 < field < 255 and abs(to + 127 - field) <= 100)
        assert exponent.value == (to + 127 - field if allowed else 0)


# Both sides of the rule's thresholds: 8 channels a group, 2^27 multiply-adds, 2^29 in wgrad, 2^24 of 64 channels in the
# forward but 2^29 of 1x1 at a stride; a huge problem; and stems.
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 8, 515, 515, 64, 4, 4),
        Case(1, 7, 515, 515, 64, 4, 4),
        Case(1, 64, 515, 515, 64, 4, 4, groups=8),
        Case(1, 56, 515, 515, 64, 4, 4, groups=8),
        Case(1, 128, 128, 256, 128, 1, 1),
        Case(1, 128, 128, 255, 128, 1, 1),
        Case(1, 128, 128, 64, 128, 1, 1),
        Case(1, 128, 128, 63, 128, 1, 1),
        Case(1, 64, 64, 64, 64, 1, 1),
        Case(1, 64, 64, 63, 64, 1, 1),
        Case(1, 63, 64, 66, 64, 1, 1),
        Case(1, 64, 64, 66, 63, 1, 1),
        Case(2, 64, 64, 64, 64, 1, 1, groups=2),
        Case(8, 64, 255, 256, 256, 1, 1, stride=(1, 2)),
        Case(8, 64, 256, 256, 512, 1, 1, stride=(2, 1)),
        Case(8, 64, 256, 256, 256, 1, 2, stride=(2, 2)),
        Case(40000, 4096, 300, 300, 4096, 1, 1),
        Case(8, 3, 40, 40, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
        Case(8, 3, 38, 38, 64, 7, 7, stride=(2, 2), padding=(3, 3)),  # 2^24.7 multiply-adds
        Case(7, 3, 224, 224, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
        Case(8, 3, 224, 224, 128, 7, 7, padding=(3, 3)),
        Case(8, 3, 224, 224, 96, 7, 7, padding=(3, 3)),
        Case(8, 4, 224, 224, 64, 7, 7, padding=(3, 3)),
        Case(8, 3, 224, 224, 64, 7, 5, padding=(3, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_which_contract_holds(host_numerics, case, dtype):
    shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    for allowed in (False, True):
        fields, expected = ShimEngine.fields(case, tensors, allowed), case.tf32_operators(dtype, allowed)
        for name in OPERANDS:
            assert host_numerics.rule_uses_tf32(OPERATOR_NUMBER[name], fields) == (name in expected)


@pytest.mark.parametrize("case", EXACT_CASES, ids=str)
def test_direct_shim_exact(direct_shim, case):
    tensors = make_tensors(case, torch.float32, integers)
    check_exact(case, direct_shim(case, tensors), tensors)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", DENSE_CASES[:10] + DEPTHWISE_CASES[:5], ids=str)
def test_direct_shim_exact_other_dtypes(direct_shim, case, dtype):
    tensors = make_tensors(case, dtype, integers)
    check_exact(case, direct_shim(case, tensors), tensors)


# Long and short reductions, a depthwise one, a strided one; large enough that TF32 holds where the switch allows it.
ROUNDING_CASES = [
    Case(1, 9, 40, 37, 11, 5, 4, padding=(2, 1)),
    Case(2, 70, 12, 13, 10, 3, 3, stride=(2, 1), padding=(1, 1)),
    Case(1, 6, 40, 33, 6, 3, 3, padding=(1, 1), groups=6),
    Case(1, 512, 5, 6, 40, 3, 3),
]
FILLS = [normal, wide, tiny, huge, any_exponent, under_a_tf32_step, tf32_ties, equal]
# float16 holds no wide range of sums.
OTHER_FILLS = [
    pytest.param(dtype, fill, id=f"{dtype} {fill.__name__}")
    for dtype, fill in itertools.product(DTYPES[1:], (normal, wide))
    if (dtype, fill) != (torch.float16, wide)
]


def named(value: object) -> str | None:
    return getattr(value, "__name__", None)


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


VIEWS = {
    "channels_last": lambda tensor: with_margins(tensor.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "sliced": lambda tensor: with_margins(F.pad(tensor, (2, 3, 1, 2), value=math.nan))[:, :, 1:-2, 2:-3],
    "every other": lambda tensor: with_margins(tensor.repeat_interleave(2, 3))[..., ::2],
    "transposed": lambda tensor: with_margins(tensor.transpose(0, 3)).transpose(0, 3),
    "expanded": lambda tensor: with_margins(tensor[:1, :, :, :1]).expand_as(tensor),
}


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


def without_padding(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """y, dx and dw of a depthwise case as sums over taps that meet the image, whatever Inf the others would meet."""
    x, w, dy = tensors["x"], tensors["w"], tensors["dy"]
    window = {"kernel_size": (case.R, case.S), "dilation": case.dilation, "padding": case.padding}
    shape = (case.N, case.C, case.R * case.S, -1)
    columns = F.unfold(x, stride=case.stride, **window).view(shape)
    meets = F.unfold(torch.ones_like(x), stride=case.stride, **window).view(shape) > 0
    taps, pixels = w.view(1, case.C, -1, 1), dy.view(case.N, case.C, 1, -1)
    zero = torch.zeros(())
    spread = torch.where(meets, taps * pixels, zero).view(case.N, case.C * case.R * case.S, -1)
    return {
        "fprop": torch.where(meets, taps * columns, zero).sum(2).view(case.y_shape),
        "dgrad": F.fold(spread, x.shape[2:], stride=case.stride, **window),
        "wgrad": torch.where(meets, pixels * columns, zero).sum((0, 3)).view(case.w_shape),
    }


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


@built_beside_the_tests
def direct_shim_of_small_launches(folder: Path) -> ShimEngine:
    """With limits that small problems exceed."""
    return ShimEngine(folder, kMostBlocks=5, kWeightGradBlocks=1, kDepthwiseWgradBlocks=1)


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


def right(engine: ShimEngine, case: Case) -> bool:
    tensors = make_tensors(case, torch.float32, integers)
    try:
        check_exact(case, engine(case, tensors), tensors)
    except AssertionError:
        return False
    return True


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


def before_guard_page(tensor: Tensor) -> Tensor:
    """A copy that ends where readable memory ends."""
    size, page = tensor.numel() * tensor.element_size(), mmap.PAGESIZE
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    no_access = ctypes.c_int(0)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + pages * page), ctypes.c_size_t(page), no_access) == 0
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=pages * page - size)
    return flat.view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("case", DENSE_CASES + DEPTHWISE_CASES, ids=str)
def test_direct_shim_reads_nothing_behind_its_operands(direct_shim, case):
    tensors = {name: before_guard_page(tensor) for name, tensor in make_tensors(case, torch.float32, integers).items()}
    check_exact(case, direct_shim(case, tensors), tensors)


# The depthwise engine. Columns around groups of 4 and 5, rows around bands, planes that one block takes many or few of,
# images wider and higher than a block, R != S, strides, dilations, more padding than filter, more outputs than inputs.
def depthwise_case(N: int, C: int, H: int, W: int, R: int, S: int, times: int = 1, **settings: tuple) -> Case:
    return Case(N, C, H, W, C * times, R, S, groups=C, **settings)


WINDOW_CASES = [
    depthwise_case(N, C, H, W, R, R, stride=(stride, stride), padding=(R // 2, R // 2))
    for (N, C), (H, W), (R, stride) in itertools.product(
        [(2, 34), (3, 2)],
        [(7, 7), (14, 14), (28, 28), (5, 3), (9, 17), (1, 1)],
        [(3, 1), (3, 2), (5, 1), (5, 2), (7, 1)],
    )
]
# Dense planes from 7 outputs wide on: strips of 7 and what is left, runs that allow vectors of 16, 8 and 4 bytes.
RING_CASES = [
    depthwise_case(3, 12, 20, 26, 3, 3, padding=(1, 1)),
    depthwise_case(2, 9, 17, 16, 3, 3, stride=(2, 2), padding=(1, 1)),
    depthwise_case(2, 5, 12, 20, 7, 7, padding=(3, 2)),
    depthwise_case(1, 6, 19, 30, 3, 3, stride=(2, 2), padding=(1, 0)),
    depthwise_case(3, 8, 14, 14, 7, 7, padding=(3, 3)),
    depthwise_case(2, 8, 22, 28, 7, 7, stride=(2, 2), padding=(3, 3)),
]
# Multiples of the 4 or 2 channels of one thread: 16-bit channels_last. Lanes that no warp is a multiple of, several
# chunks of them and a prime number, images that are smaller than a window, bands of one row and of many.
QUEUE_CASES = [
    depthwise_case(N, C, H, W, taps, taps, stride=(stride, stride), padding=padding)
    for (taps, stride), (N, C, H, W, padding) in [
        *itertools.product(
            [(3, 1), (3, 2)],
            [
                (2, 36, 9, 13, (1, 1)),
                (1, 260, 7, 7, (1, 1)),
                (1, 212, 5, 6, (0, 1)),
                (3, 4, 41, 17, (2, 0)),
                (2, 8, 1, 2, (4, 3)),
                (1, 22, 10, 9, (1, 1)),
            ],
        ),
        *itertools.product(
            [(5, 1), (5, 2), (7, 1), (7, 2)],
            [(2, 38, 9, 13, (3, 3)), (1, 130, 7, 7, (2, 3)), (2, 2, 23, 8, (0, 1)), (1, 6, 1, 2, (6, 5))],
        ),
    ]
]
ONE_TO_ONE_CASES = [
    *WINDOW_CASES,
    *QUEUE_CASES,
    depthwise_case(1, 2, 112, 112, 3, 3, padding=(1, 1)),
    depthwise_case(1, 2, 113, 56, 7, 7, padding=(3, 3)),
    depthwise_case(1, 2, 61, 59, 3, 3, stride=(2, 2)),
    depthwise_case(1, 1, 3, 921, 3, 3, padding=(1, 1)),  # wider than a block's threads
    depthwise_case(1, 3, 900, 6, 5, 5, padding=(2, 2)),  # higher than shared memory
    depthwise_case(2, 2, 6, 7, 3, 3, padding=(5, 6)),  # outputs that meet no input
    depthwise_case(2, 2, 6, 8, 3, 3, stride=(2, 2), padding=(6, 5)),
    depthwise_case(1, 5, 12, 13, 3, 3, times=3, padding=(1, 1)),
    depthwise_case(3, 50, 6, 6, 3, 3, times=2, padding=(1, 1)),  # blocks that begin within an input's outputs
    depthwise_case(2, 4, 15, 13, 5, 5, times=2, stride=(2, 2), padding=(2, 2)),
    depthwise_case(1, 3, 21, 22, 3, 2, padding=(1, 0)),
    depthwise_case(1, 4, 17, 23, 2, 5, padding=(1, 2), stride=(1, 2)),
    depthwise_case(2, 2, 30, 17, 3, 3, stride=(2, 1), padding=(2, 2), dilation=(2, 3)),
    depthwise_case(2, 8, 19, 26, 3, 3, padding=(3, 3), dilation=(3, 3)),
    depthwise_case(1, 2, 14, 40, 5, 4, padding=(4, 5), dilation=(2, 4), stride=(3, 1)),
    depthwise_case(1, 2, 37, 41, 11, 9, padding=(5, 4)),
    depthwise_case(1, 2, 33, 35, 31, 29, padding=(15, 14)),  # sums of many chunks
    depthwise_case(1, 2, 9, 70, 1, 64, padding=(0, 31)),
    depthwise_case(2, 3, 7, 7, 13, 13, padding=(6, 6)),
    depthwise_case(2, 3, 5, 6, 5, 6),  # one output
    depthwise_case(2, 3, 9, 9, 7, 7, stride=(2, 2), padding=(3, 3)),
    *RING_CASES,
    depthwise_case(1, 2, 4, 5, 2, 2, stride=(4202600, 536870911)),
]
LAYOUTS = ["contiguous", "channels_last"]


def in_layout(tensors: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    if layout == "contiguous":
        return tensors
    return tensors | {name: VIEWS["channels_last"](tensors[name]) for name in ("x", "dy")}


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


def random_depthwise_cases(count: int, seed: int, most: int = 24) -> list[Case]:
    rng = random.Random(seed)

    def draw() -> Case:
        R, S = rng.choice([(3, 3), (5, 5), (7, 7), (rng.randint(1, 9), rng.randint(1, 9))])
        steps = rng.choice([(1, 1), (2, 2), (rng.randint(1, 4), rng.randint(1, 4))])
        return depthwise_case(
            rng.randint(1, 3), rng.randint(1, most), rng.randint(1, 2 * most), rng.randint(1, 2 * most), R, S,
            rng.choice([1, 1, 2]), stride=steps, padding=(rng.randint(0, R), rng.randint(0, S)),
            dilation=rng.choice([(1, 1), (rng.randint(1, 3), rng.randint(1, 3))]),
        )  # fmt: skip

    cases = (draw() for _ in itertools.count())
    return list(itertools.islice((case for case in cases if min(case.y_shape) > 0), count))


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


# hopper.cuh for the CPU, and what else a kernel of warps with roles of their own takes: every thread runs until it has
# to wait. What is asynchronous on a GPU happens here as late as it may or, in every other run, at once.
HOPPER_STAND_IN = r"""
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include <array>
#include <deque>

#include "numerics.cuh"

#define MODELNEW_SM90A 1

namespace simt {

inline bool late = false;  // whether what is asynchronous happens late

struct Barrier {
  int count, pending;
  int64_t bytes;  // still to come
  uint32_t phase;
};
inline std::map<uint32_t, Barrier> barriers;

inline Barrier& barrier_at(uint32_t address) {
  const auto found = barriers.find(address);
  if (found == barriers.end()) complain("a barrier that nobody initialised");
  return found->second;
}

inline void end_phase_if_due(Barrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.count;
}

inline void arrive(uint32_t address, int64_t bytes = 0) {
  Barrier& barrier = barrier_at(address);
  if (barrier.pending <= 0) complain("one arrival too many");
  --barrier.pending;
  barrier.bytes += bytes;
  end_phase_if_due(barrier);
  ++progress;
}

inline void check_shared(uint32_t address, size_t bytes) {
  if (address % 16 != 0 || address + bytes > granted_bytes) complain("a wild address in shared memory");
}

// From where to where loads by __ldg may go; if nothing is said, anywhere.
inline std::vector<std::pair<const char*, const char*>> readable;

inline void check_readable(const void* from, size_t bytes) {
  const auto first = static_cast<const char*>(from);
  bool inside = readable.empty();
  for (const auto& [start, end] : readable) inside |= first >= start && first + bytes <= end;
  if (!inside) complain("a load outside of what it may read");
}

// Bulk copies on their way.
struct Copy {
  uint32_t to, barrier;
  std::vector<uint8_t> bytes;
};
inline std::deque<Copy> copies;

inline unsigned copy_delay = 1;  // rounds, on average

inline bool copy_some() {
  while (!copies.empty() && (!late || shuffler() % copy_delay == 0)) {
    if (late) std::swap(copies.front(), copies[shuffler() % copies.size()]);  // they come in any order
    const Copy copy = copies.front();
    copies.pop_front();
    std::copy(copy.bytes.begin(), copy.bytes.end(), smem + copy.to);
    Barrier& barrier = barriers.at(copy.barrier);
    barrier.bytes -= static_cast<int>(copy.bytes.size());
    end_phase_if_due(barrier);
    ++progress;
  }
  return !copies.empty();
}

// What a thread has ordered, in groups: done at the latest when it waits for them.
struct Ordered {
  struct One {
    std::function<void()> run;
    int group;
  };
  std::deque<One> all;
  int groups = 0;  // committed

  void order(std::function<void()> run) { all.push_back({std::move(run), groups}); }
  void do_first() {
    all.front().run();
    all.pop_front();
  }
  void clear() {
    all.clear();
    groups = 0;
  }
  void wait(int pending) {
    while (!all.empty() && all.front().group < groups - pending) do_first();
  }
};
inline Ordered multiplications[1024], own_copies[1024];
// Of few threads: those are gone through in every round.
inline std::map<unsigned, Ordered> bulk_stores;
inline std::map<unsigned, std::deque<std::function<void()>>> arriving;  // copies of threads, with arrivals behind them

// Threads that meet: those of a warp or of the block.
struct Meeting {
  unsigned waiting = 0, round = 0;
  void attend(unsigned threads) {
    const unsigned mine = round;
    if (++waiting == threads) {
      waiting = 0;
      ++round;
      ++progress;
    } else {
      wait_while(round, mine);
    }
  }
};
// All threads of a cluster that have not ended meet: of its blocks, of which only one runs at a time, this one's.
inline Meeting cluster_meeting;
inline void attend_cluster() {
  const unsigned mine = cluster_meeting.round;
  ++cluster_meeting.waiting;
  ++progress;
  wait_while(cluster_meeting.round, mine);
}
inline void meet_in_cluster() {
  const auto lives = [](const Fibre& fibre) { return fibre.line != kExited; };
  const auto threads = std::count_if(fibres.begin(), fibres.begin() + blockDim.x, lives);
  if (cluster_meeting.waiting == 0 || cluster_meeting.waiting < threads) return;
  cluster_meeting.waiting = 0;
  ++cluster_meeting.round;
  ++progress;
}

inline bool do_some() {
  meet_in_cluster();
  bool left = copy_some();
  for (auto& [thread, of_thread] : bulk_stores) {
    while (!of_thread.all.empty() && (!late || shuffler() % copy_delay == 0)) of_thread.do_first();
    left |= !of_thread.all.empty();
  }
  for (auto& [thread, of_thread] : arriving) {
    while (!of_thread.empty() && (!late || shuffler() % copy_delay == 0)) {
      of_thread.front()();
      of_thread.pop_front();
    }
    left |= !of_thread.empty();
  }
  return left;
}

inline Meeting block_meeting, warp_meetings[32], named_meetings[16];
inline uint64_t shuffled[32][32];

// Blocks run one after another, so a cluster of them runs twice: what a block shows of its shared memory at first, the
// others read the second time. Without `again` there are none.
inline bool again = false;
inline unsigned of_cluster = 1;                               // blocks of one, if that was said at the launch
inline std::map<unsigned, std::vector<unsigned char>> shown;  // by blocks

inline float shown_by(unsigned block, uint32_t address) {
  const auto found = shown.find(block);
  float value = NAN;
  if (found != shown.end()) std::memcpy(&value, &found->second[address], sizeof value);
  return value;
}

// Who has waited for all that was launched before, and whether that is what was launched before a call.
inline std::vector<bool> waited;
inline bool first_of_call = false;
inline bool allows_next = false;  // the latest kernel: that the next one is launched before its end

inline void begin_block() {
  waited.assign(blockDim.x, false);
  barriers.clear();
  copies.clear();
  copy_delay = 1u << shuffler() % 9;
  block_meeting = cluster_meeting = {};
  for (Meeting& meeting : warp_meetings) meeting = {};
  for (Meeting& meeting : named_meetings) meeting = {};
  bulk_stores.clear();
  arriving.clear();
  for (unsigned thread = 0; thread < blockDim.x; ++thread) multiplications[thread].clear(), own_copies[thread].clear();
}

}  // namespace simt

#undef __syncthreads
#define __syncthreads() simt::block_meeting.attend(blockDim.x)
inline int __syncthreads_or(int vote) {
  static int votes = 0;
  votes |= vote != 0;
  simt::block_meeting.attend(blockDim.x);
  const int any = votes;
  simt::block_meeting.attend(blockDim.x);
  votes = 0;
  return any;
}
inline void __syncwarp() { simt::warp_meetings[threadIdx.x / 32].attend(32); }
template <typename Value>
Value __shfl_sync(unsigned, Value value, int lane) {
  const unsigned warp = threadIdx.x / 32;
  std::memcpy(&simt::shuffled[warp][threadIdx.x % 32], &value, sizeof value);
  __syncwarp();
  std::memcpy(&value, &simt::shuffled[warp][lane & 31], sizeof value);
  __syncwarp();
  return value;
}
template <typename Value>
Value __shfl_down_sync(unsigned mask, Value value, int by) {
  const int lane = threadIdx.x % 32;
  return __shfl_sync(mask, value, lane + by < 32 ? lane + by : lane);
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
inline bool __any_sync(unsigned, bool value) {
  uint64_t(&values)[32] = simt::shuffled[threadIdx.x / 32];
  values[threadIdx.x % 32] = value;
  __syncwarp();
  const bool any = std::any_of(values, values + 32, [](uint64_t one) { return one != 0; });
  __syncwarp();
  return any;
}
// Threads change at waits only, so these are whole.
template <typename Value, typename Other>
Value atomicAdd(Value* place, Other value) {
  return std::exchange(*place, *place + static_cast<Value>(value));
}
template <typename Value, typename Other>
Value atomicMax(Value* place, Other value) {
  return std::exchange(*place, std::max(*place, static_cast<Value>(value)));
}
inline unsigned atomicOr(unsigned* place, unsigned value) { return std::exchange(*place, *place | value); }
inline unsigned atomicExch(unsigned* place, unsigned value) { return std::exchange(*place, value); }
inline void __threadfence() {}
template <typename Value>
Value __ldg(const Value* from) {
  simt::check_readable(from, sizeof(Value));
  return *from;
}
template <typename Value>
Value __ldcg(const Value* from) {
  return *from;
}
inline void __stcs(uint4* to, const uint4& value) { *to = value; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
// What an engine is given, as large as it says: full of what was there before, as is what follows.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) : bytes_(bytes), words_((bytes + 15) / 16 + 64, uint4{~0u, ~0u, ~0u, ~0u}) {}
  uint8_t* data() { return reinterpret_cast<uint8_t*>(words_.data()); }
  bool intact() {
    return std::all_of(data() + bytes_, data() + words_.size() * sizeof(uint4), [](uint8_t b) { return b == 255; });
  }

 private:
  int64_t bytes_;
  std::vector<uint4> words_;
};
using std::max;
using std::min;

namespace modelnew {
namespace hopper {

inline uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - simt::smem);
}

inline int uniform(int value) {
  const int first = __shfl_sync(~0u, value, 0);
  if (first != value) simt::complain("lanes that differ");
  return first;
}

inline void load_8(const void* address, bool exist, uint32_t& low, uint32_t& high) {
  const uint2 words = exist ? *reinterpret_cast<const uint2*>(address) : uint2{0, 0};
  low = words.x, high = words.y;
}
inline void load_4(const void* address, bool exist, uint32_t& word) {
  word = exist ? *reinterpret_cast<const uint32_t*>(address) : 0;
}
inline void load_2(const void* address, bool exist, uint32_t& word) {
  word = exist ? *reinterpret_cast<const uint16_t*>(address) : 0;
}

// The first `size` of BYTES, and zeros for the rest.
template <int BYTES>
void copy_async(uint32_t to, const void* from, int size) {
  if (to % BYTES != 0 || to + BYTES > simt::granted_bytes) simt::complain("a wild address in shared memory");
  if (size < 0 || size > BYTES) simt::complain("more than a copy");
  if (size > 0 && reinterpret_cast<uint64_t>(from) % BYTES != 0) simt::complain("a copy that is not aligned");
  if (size > 0) simt::check_readable(from, size);
  const auto run = [=] {
    std::memset(simt::smem + to, 0, BYTES);
    if (size > 0) std::memcpy(simt::smem + to, from, size);  // an address that nobody reads may be any
  };
  if (simt::late)
    simt::own_copies[threadIdx.x].order(run);
  else
    run();
}
template <int BYTES>
void copy_later(uint32_t to, const void* from, bool exist) {
  copy_async<BYTES>(to, from, exist ? BYTES : 0);
}
inline void copies_commit() { ++simt::own_copies[threadIdx.x].groups; }
template <int PENDING>
void copies_wait() {
  simt::own_copies[threadIdx.x].wait(PENDING);
}

inline void barrier_init(uint32_t barrier, int count) { simt::barriers[barrier] = {count, count, 0, 0}; }
inline void barrier_arrive(uint32_t barrier) { simt::arrive(barrier); }
inline void copies_arrive(uint32_t barrier) {
  auto& mine = simt::own_copies[threadIdx.x].all;
  auto& queue = simt::arriving[threadIdx.x];
  for (auto& one : mine) queue.push_back(std::move(one.run));
  mine.clear();
  queue.push_back([=] { simt::arrive(barrier); });
  ++simt::progress;
}
inline void barrier_arrive_expecting(uint32_t barrier, int bytes) { simt::arrive(barrier, bytes); }
inline bool barrier_ended(uint32_t barrier, uint32_t parity) {
  return simt::barrier_at(barrier).phase != (parity & 1);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  simt::wait_while(simt::barrier_at(barrier).phase, parity & 1);
}
inline void barrier_wait_idly(uint32_t barrier, uint32_t parity) { barrier_wait(barrier, parity); }
inline void fence_async() {}
inline void fence_async_memory() {}
inline void wait_for_count(const uint32_t* count, uint32_t least) {  // blocks run one after another
  if (*count < least) simt::complain("a block that waits for those behind it");
}

inline void cluster_sync() {
  if (!simt::again) simt::complain("a cluster");
  simt::attend_cluster();
  if (simt::shown.count(blockIdx.x) == 0)
    simt::shown[blockIdx.x] = std::vector<unsigned char>(simt::smem, simt::smem + simt::granted_bytes);
  simt::attend_cluster();
}
inline void cluster_leave() { simt::attend_cluster(); }
inline float4 load_cluster_4(uint32_t address, int rank) {
  simt::check_shared(address, 16);
  const unsigned block = blockIdx.x / simt::of_cluster * simt::of_cluster + rank;
  if (static_cast<unsigned>(rank) >= simt::of_cluster) simt::complain("a block of another cluster");
  float values[4];
  for (int i = 0; i < 4; ++i) values[i] = simt::shown_by(block, address + 4 * i);
  return {values[0], values[1], values[2], values[3]};
}
inline float4 add_cluster_4(uint32_t address, int blocks) {
  simt::check_shared(address, 16);
  float sums[4] = {};
  for (int rank = 0; rank < blocks; ++rank) {
    for (int i = 0; i < 4; ++i) sums[i] += simt::shown_by(blockIdx.x / blocks * blocks + rank, address + 4 * i);
  }
  return {sums[0], sums[1], sums[2], sums[3]};
}
inline float add_cluster(uint32_t address, int blocks) {
  const float4 sums = add_cluster_4(address / 16 * 16, blocks);
  return address % 16 == 0 ? sums.x : address % 16 == 4 ? sums.y : address % 16 == 8 ? sums.z : sums.w;
}

inline void launch_dependents() {
  if (simt::first_of_call && !simt::waited[threadIdx.x])
    simt::complain("the next kernel is allowed before what was launched before this call has ended");
  simt::allows_next = true;
}
inline void wait_for_prerequisites() { simt::waited[threadIdx.x] = true; }
template <typename... Params>
cudaError_t launch_early_in_clusters(void (*kernel)(Params...), unsigned blocks, unsigned of_cluster, int threads,
                                     size_t smem_bytes, cudaStream_t stream,
                                     const std::remove_const_t<Params>&... params) {
  if (blocks % of_cluster != 0) return cudaErrorInvalidConfiguration;
  simt::allows_next = false;
  simt::of_cluster = of_cluster;
  simt::launch(kernel, blocks, threads, smem_bytes, stream)(params...);
  simt::first_of_call = false;
  return cudaGetLastError();
}
template <typename... Params>
cudaError_t launch_early(void (*kernel)(Params...), unsigned blocks, int threads, size_t smem_bytes,
                         cudaStream_t stream, const std::remove_const_t<Params>&... params) {
  return launch_early_in_clusters(kernel, blocks, 1, threads, smem_bytes, stream, params...);
}

inline void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  simt::check_shared(to, bytes);
  if (bytes % 16 != 0 || reinterpret_cast<uint64_t>(from) % 16 != 0) simt::complain("a bulk copy that is not aligned");
  const uint8_t* const first = static_cast<const uint8_t*>(from);
  simt::copies.push_back({to, barrier, {first, first + bytes}});
}

constexpr int kBoxRowBytes = 128;
struct BoxMap {
  uint8_t* tensor;
  int element_bytes;
  uint64_t sizes[4], strides[4];
  uint32_t box[4], steps[4];  // of so many elements; from one to the next
  uint32_t pieces;        // of 16 bytes in a row whose order is that of store_box, or 0
  int first[2], last[2];  // of columns: their ends, of columns and rows of an image
  uint32_t pixels;
};
enum class BoxUse { kStore, kStoreHalves, kStoreQuarters, kLoad, kLoadRows, kLoadHalves };
inline cudaError_t make_box_map(BoxUse use, const void* tensor, int element_bytes, const uint64_t (&sizes)[4],
                                const uint64_t (&strides)[3], const uint32_t (&box)[4], BoxMap& map,
                                uint32_t step = 1, uint32_t step_2 = 1) {
  map = {static_cast<uint8_t*>(const_cast<void*>(tensor)), element_bytes};
  const uint32_t row_bytes = box[0] * element_bytes;
  bool right = reinterpret_cast<uint64_t>(tensor) % 16 == 0;
  const bool quarters = use == BoxUse::kStoreQuarters;
  map.pieces = use == BoxUse::kLoad || quarters                          ? 0
               : use == BoxUse::kStoreHalves || use == BoxUse::kLoadHalves ? 4
                                                                           : 8;
  right &= map.pieces > 0 ? row_bytes == map.pieces * 16 : quarters ? row_bytes == 32 : row_bytes % 16 == 0;
  map.strides[0] = element_bytes;
  for (int i = 0; i < 4; ++i) {
    if (i > 0) map.strides[i] = strides[i - 1];
    map.sizes[i] = sizes[i], map.box[i] = box[i];
    right &= sizes[i] >= 1 && sizes[i] <= uint64_t{1} << 32 && box[i] >= 1 && box[i] <= 256;
    right &= i == 0 || (map.strides[i] % 16 == 0 && map.strides[i] < uint64_t{1} << 40);
  }
  // A box is so many elements of memory, of which it has every so manieth.
  right &= step >= 1 && step <= 8 && box[1] % step == 0 && step_2 >= 1 && step_2 <= 8 && box[2] % step_2 == 0;
  map.steps[0] = map.steps[3] = 1;
  map.steps[1] = step;
  map.steps[2] = step_2;
  for (int i = 0; i < 4; ++i) map.box[i] = box[i] / map.steps[i];
  if (!right) simt::complain("a map of boxes that the driver would refuse");
  return right ? cudaSuccess : static_cast<cudaError_t>(1);
}
inline cudaError_t make_columns_map(const void* tensor, int element_bytes, const uint64_t (&sizes)[4],
                                    const uint64_t (&strides)[3], const int (&first)[2], const int (&last)[2],
                                    const int (&steps)[2], uint32_t pixels, BoxMap& map) {
  const uint32_t channels = kBoxRowBytes / element_bytes;
  const cudaError_t error =
      make_box_map(BoxUse::kLoadRows, tensor, element_bytes, sizes, strides, {channels, 1, 1, 1}, map);
  map.pixels = pixels;
  bool right = error == cudaSuccess && pixels >= 1 && pixels <= 1024;
  for (int i = 0; i < 2; ++i) {
    map.first[i] = first[i], map.last[i] = last[i], map.steps[1 + i] = steps[i];
    right &= steps[i] >= 1 && steps[i] <= 8;
    right &= first[i] >= -128 && first[i] <= 127 && last[i] >= -128 && last[i] <= 127;
    right &= first[i] <= static_cast<int64_t>(sizes[1 + i]) - 1 + last[i];
  }
  if (!right) simt::complain("a map of columns that the driver would refuse");
  return right ? cudaSuccess : static_cast<cudaError_t>(1);
}
inline void prefetch_map(const BoxMap&) {}
// Visits all elements of a box: its place in memory, or null outside the tensor, its row and its number in there.
template <typename Visit>
void for_each_in_box(const BoxMap& map, const int64_t (&first)[4], const Visit& visit) {
  if (first[0] * map.element_bytes % 16 != 0) simt::complain("a box that is not aligned in memory");
  // Rows that end within 16 bytes are overwritten beyond that (H200, 2026-11-23), and may be read.
  const int64_t end = static_cast<int64_t>(map.sizes[0]);
  if (first[0] < end && first[0] + map.box[0] > end && end * map.element_bytes % 16 != 0)
    simt::complain("rows of a box that end within 16 bytes");
  const uint32_t rows = map.box[1] * map.box[2] * map.box[3];
  for (uint32_t row = 0; row < rows; ++row)
    for (uint32_t element = 0; element < map.box[0]; ++element) {
      const uint32_t inside[4] = {element, row % map.box[1], row / map.box[1] % map.box[2],
                                  row / map.box[1] / map.box[2]};
      uint8_t* place = map.tensor;
      bool exists = true;
      for (int i = 0; i < 4; ++i) {
        const int64_t at = first[i] + int64_t{inside[i]} * map.steps[i];
        exists &= at >= 0 && static_cast<uint64_t>(at) < map.sizes[i];
        place += at * map.strides[i];
      }
      visit(exists ? place : nullptr, row, element);
    }
}
inline uint32_t box_bytes(const BoxMap& map) {
  return map.box[0] * map.box[1] * map.box[2] * map.box[3] * map.element_bytes;
}
inline void store_box_now(const BoxMap& map, uint32_t from, const int64_t (&first)[4]) {
  simt::check_shared(from, box_bytes(map));
  // Where the order of pieces, if there is one, starts anew.
  const uint32_t pieces = max(map.pieces, 1u);
  if (from % (kBoxRowBytes * pieces) != 0) simt::complain("a box that is not aligned in shared memory");
  for_each_in_box(map, first, [&](uint8_t* to, uint32_t row, uint32_t element) {
    uint32_t place = (row * map.box[0] + element) * map.element_bytes;
    place ^= place / kBoxRowBytes % pieces * 16;
    if (to != nullptr) std::memcpy(to, simt::smem + from + place, map.element_bytes);
  });
}
inline void load_box(const BoxMap& map, uint32_t to, int i, int j, int k, int l, uint32_t barrier) {
  simt::check_shared(to, box_bytes(map));
  if (to % 128 != 0) simt::complain("a box that is not aligned in shared memory");
  std::vector<uint8_t> loaded(box_bytes(map));
  for_each_in_box(map, {i, j, k, l}, [&](const uint8_t* from, uint32_t row, uint32_t element) {
    uint32_t place = (row * map.box[0] + element) * map.element_bytes;
    // The order of pieces goes by the address.
    if (map.pieces > 0) place ^= (place + to) / kBoxRowBytes % map.pieces * 16;
    for (int byte = 0; byte < map.element_bytes; ++byte) loaded[place + byte] = from != nullptr ? from[byte] : 0;
  });
  simt::copies.push_back({to, barrier, loaded});
}
inline void load_columns(const BoxMap& map, uint32_t to, int i, int j, int k, int l, int move_j, int move_k,
                         uint32_t barrier) {
  simt::check_shared(to, map.pixels * kBoxRowBytes);
  if (to % 128 != 0) simt::complain("columns that are not aligned in shared memory");
  const int in_16_bytes = 16 / map.element_bytes, channels = kBoxRowBytes / map.element_bytes;
  if (i % in_16_bytes != 0 || map.sizes[0] % in_16_bytes != 0) simt::complain("columns that are not aligned in memory");
  if (move_j < 0 || move_j > 255 || move_k < 0 || move_k > 255) simt::complain("columns that move too far");
  std::vector<uint8_t> loaded(map.pixels * kBoxRowBytes);
  int at[2] = {j, k};
  const int64_t end[2] = {static_cast<int64_t>(map.sizes[1]) + map.last[0],
                          static_cast<int64_t>(map.sizes[2]) + map.last[1]};
  for (int axis = 0; axis < 2; ++axis)
    if (at[axis] < map.first[axis] || at[axis] >= end[axis]) simt::complain("columns that begin outside");
  for (uint32_t pixel = 0; pixel < map.pixels; ++pixel) {
    const int64_t place[4] = {i, int64_t{at[0]} + move_j, int64_t{at[1]} + move_k, l};
    for (int channel = 0; channel < channels; ++channel) {
      const uint8_t* from = map.tensor;
      bool exists = true;
      for (int axis = 0; axis < 4; ++axis) {
        const int64_t number = place[axis] + (axis == 0 ? channel : 0);
        exists &= number >= 0 && static_cast<uint64_t>(number) < map.sizes[axis];
        from += number * map.strides[axis];
      }
      const uint32_t byte =
          (pixel * kBoxRowBytes + channel * map.element_bytes) ^ (pixel + to / kBoxRowBytes) % 8 * 16;
      if (exists) std::memcpy(&loaded[byte], from, map.element_bytes);
    }
    if ((at[0] += map.steps[1]) < end[0]) continue;
    at[0] = map.first[0];
    if ((at[1] += map.steps[2]) < end[1]) continue;
    at[1] = map.first[1];
    ++l;
  }
  simt::copies.push_back({to, barrier, loaded});
}
template <bool LEAVES_FIRST = true>
void store_box(const BoxMap& map, const void* from, int i, int j, int k, int l) {
  const auto run = [&map, from, i, j, k, l] { store_box_now(map, smem_address(from), {i, j, k, l}); };
  simt::bulk_stores[threadIdx.x].order(run);
}
inline void bulk_stores_commit() { ++simt::bulk_stores[threadIdx.x].groups; }
template <int PENDING>
void bulk_stores_wait_read() {
  simt::bulk_stores[threadIdx.x].wait(PENDING);
}

template <int COUNT>
void registers_give_back() {}
template <int COUNT>
void registers_take() {}

inline uint32_t of_own_block(uint32_t address) { return address; }
inline uint32_t descriptor(uint32_t address, uint32_t half_distance) {
  return address / 16 | half_distance / 16 << 16;
}
inline void wgmma_fence() {}
inline void wgmma_commit() { ++simt::multiplications[threadIdx.x].groups; }
template <int PENDING>
void wgmma_wait() {
  simt::multiplications[threadIdx.x].wait(PENDING);
  __syncwarp();  // the instruction is the whole warp's
}
template <typename Sums>
void wgmma_start(Sums& sums) {
  std::fill_n(reinterpret_cast<float*>(&sums), sizeof sums / sizeof(float), NAN);
}
template <int COUNT>
void wgmma_settle(float (&)[COUNT]) {}

// Most of what the tests compute: by the processor's instruction where it has one.
template <typename Operand>
float value_of(Operand operand) {
  return widen(operand);
}
// The bits that TF32 does not have may be anything.
inline float value_of(float operand) { return bits_float(float_bits(operand) & ~0x1fffu); }
template <typename Operand>
void widen_16_bytes(const unsigned char* from, float* to) {
  Operand values[16 / sizeof(Operand)];
  std::memcpy(values, from, sizeof values);
  for (const Operand& value : values) *to++ = value_of(value);
}
#if defined(__F16C__)
template <>
inline void widen_16_bytes<Half>(const unsigned char* from, float* to) {
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from))));
}
#endif

constexpr uint32_t kDescriptorHigh = 128 / 16, kRowsDescriptorHigh = 1024 / 16 | 1u << 30;

// A row of an operand, 32 bytes along the reduction: 16 bytes in each of two places; or of rows of 128 bytes in the
// order of boxes, which goes by the address; or down such rows.
enum class Lies { kPieces, kRows, kTransposed };
template <typename Operand>
void read_operand_row(Lies lies, uint32_t operand, int row, float (&values)[32 / sizeof(Operand)]) {
  if (operand & 0xc000) simt::complain("a descriptor beyond shared memory");
  constexpr int kHalf = 16 / sizeof(Operand);
  const uint32_t begin = (operand & 0x3fff) * 16, distance = (operand >> 16) * 16;
  const auto in_order = [](uint32_t address) { return address ^ address / 128 % 8 * 16; };
  if (lies == Lies::kTransposed) {
    for (int k = 0; k < 2 * kHalf; ++k) {
      const uint32_t address = in_order(begin + row / 64 * distance + k * 128 + row % 64 * sizeof(Operand));
      simt::check_shared(address / 16 * 16, 16);
      Operand value;
      std::memcpy(&value, simt::smem + address, sizeof value);
      values[k] = value_of(value);
    }
    return;
  }
  for (int half = 0; half < 2; ++half) {
    const uint32_t address =
        lies == Lies::kRows ? in_order(begin + row * 128 + half * 16) : begin + half * distance + row * 16;
    simt::check_shared(address, 16);
    widen_16_bytes<Operand>(simt::smem + address, values + half * kHalf);
  }
}

template <typename Operand, int N>
struct Wgmma {
  static void multiply(float (&acc)[N / 2], uint32_t a, uint32_t b, int keep, uint32_t high = kDescriptorHigh) {
    if (high != kDescriptorHigh && high != kRowsDescriptorHigh) simt::complain("an unknown descriptor");
    const Lies lies = high == kRowsDescriptorHigh ? Lies::kRows : Lies::kPieces;
    order(acc, a, b, keep, lies, lies);
  }

  static void order(float (&acc)[N / 2], uint32_t a, uint32_t b, int keep, Lies a_lies, Lies b_lies) {
    float* const sums = acc;
    const auto run = [=] { multiply_now(sums, a, b, keep, a_lies, b_lies); };
    if (simt::late)
      simt::multiplications[threadIdx.x].order(run);
    else
      run();
  }

  static void read_row(uint32_t operand, int row, float (&values)[32 / sizeof(Operand)]) {
    read_operand_row<Operand>(Lies::kPieces, operand, row, values);
  }

  static void multiply_now(float* acc, uint32_t a, uint32_t b, int keep, Lies a_lies, Lies b_lies) {
    constexpr int kSteps = 32 / sizeof(Operand);
    const int thread = threadIdx.x % 128;
    float weights[2][kSteps];
    for (int i = 0; i < 2; ++i)
      read_operand_row<Operand>(a_lies, a, 16 * (thread / 32) + thread % 32 / 4 + 8 * i, weights[i]);
    for (int j = 0; j < N / 8; ++j)
      for (int e = 0; e < 2; ++e) {
        float pixel[kSteps];
        read_operand_row<Operand>(b_lies, b, 8 * j + 2 * (thread % 4) + e, pixel);
        for (int i = 0; i < 2; ++i) {
          float sum = keep ? acc[4 * j + 2 * i + e] : 0;
          for (int k = 0; k < kSteps; ++k) sum += weights[i][k] * pixel[k];
          acc[4 * j + 2 * i + e] = sum;
        }
      }
  }
};
template <typename Operand, int N>
struct WgmmaTransposed {
  static void multiply(float (&acc)[N / 2], uint32_t a, uint32_t b, int keep, uint32_t high) {
    if (high != kRowsDescriptorHigh) simt::complain("an unknown descriptor");
    Wgmma<Operand, N>::order(acc, a, b, keep, Lies::kRows, Lies::kTransposed);
  }
};
template <typename Operand, int N>
struct WgmmaFirstTransposed {
  static void multiply(float (&acc)[N / 2], uint32_t a, uint32_t b, int keep, uint32_t high) {
    if (high != kRowsDescriptorHigh) simt::complain("an unknown descriptor");
    Wgmma<Operand, N>::order(acc, a, b, keep, Lies::kTransposed, Lies::kRows);
  }
};
template <typename Operand, int N>
struct WgmmaBothTransposed {
  static void multiply(float (&acc)[N / 2], uint32_t a, uint32_t b, int keep, uint32_t high) {
    if (high != kRowsDescriptorHigh) simt::complain("an unknown descriptor");
    Wgmma<Operand, N>::order(acc, a, b, keep, Lies::kTransposed, Lies::kTransposed);
  }
};

inline void named_barrier(int number, int threads) { simt::named_meetings[number].attend(threads); }

// Blocks of 8 x 8 values of 16 bits that the lanes of a warp hold, two of a row each, to pieces of 16 bytes.
inline void store_blocks(uint32_t address, const uint32_t (&words)[4], bool transposed) {
  static uint32_t shown[32][32][4];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::memcpy(shown[warp][lane], words, sizeof words);
  simt::check_shared(address, 16);
  __syncwarp();
  uint16_t piece[8];
  for (int i = 0; i < 8; ++i) {
    const int row = transposed ? i : lane % 8, column = transposed ? lane % 8 : i;
    piece[i] = static_cast<uint16_t>(shown[warp][4 * row + column / 2][lane / 8] >> column % 2 * 16);
  }
  std::memcpy(simt::smem + address, piece, sizeof piece);
  __syncwarp();
}
inline void store_matrix(uint32_t address, const uint32_t (&words)[4]) { store_blocks(address, words, false); }
inline void store_matrix_transposed(uint32_t address, const uint32_t (&words)[4]) {
  store_blocks(address, words, true);
}

// The same with rows of `a` in the registers of four threads each, and rows of `b` as read_row(row, values) has them.
template <typename Operand, int N, typename ReadRow>
void multiply_registers(float (&acc)[N / 2], const uint32_t (&a)[4], int keep, const ReadRow& read_row) {
  static uint32_t words[32][32][4];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::memcpy(words[warp][lane], a, sizeof a);
  __syncwarp();
  constexpr int kSteps = 32 / sizeof(Operand), kWord = 4 / sizeof(Operand);
  std::array<std::array<float, kSteps>, 2> rows;
  for (int i = 0; i < 2; ++i)
    for (int k = 0; k < kSteps; ++k) {
      const uint32_t& word = words[warp][lane / 4 * 4 + k / kWord % 4][i + 2 * (k / kWord / 4)];
      Operand value;
      std::memcpy(&value, reinterpret_cast<const uint8_t*>(&word) + k % kWord * sizeof value, sizeof value);
      rows[i][k] = value_of(value);
    }
  __syncwarp();
  float* const sums = acc;
  const auto run = [=] {
    for (int j = 0; j < N / 8; ++j)
      for (int e = 0; e < 2; ++e) {
        float weights[kSteps];
        read_row(8 * j + 2 * (lane % 4) + e, weights);
        for (int i = 0; i < 2; ++i) {
          float sum = keep ? sums[4 * j + 2 * i + e] : 0;
          for (int k = 0; k < kSteps; ++k) sum += rows[i][k] * weights[k];
          sums[4 * j + 2 * i + e] = sum;
        }
      }
  };
  if (simt::late)
    simt::multiplications[threadIdx.x].order(run);
  else
    run();
}

// With `b` as pieces of 16 bytes, or as rows of 128 bytes in the order of boxes.
template <typename Operand, int N>
struct WgmmaRegisters {
  static constexpr int kSteps = 32 / sizeof(Operand);

  static void read_row(uint32_t operand, bool rows, int row, float (&values)[kSteps]) {
    if (!rows) return Wgmma<Operand, N>::read_row(operand, row, values);
    const uint32_t begin = (operand & 0x3fff) * 16;
    if (begin % 1024 > 96) simt::complain("an operand that does not begin with a group of eight rows");
    read_operand_row<Operand>(Lies::kRows, operand, row, values);
  }

  static void multiply(float (&acc)[N / 2], const uint32_t (&a)[4], uint32_t b, int keep,
                       uint32_t b_high = kDescriptorHigh) {
    if (b_high != kDescriptorHigh && b_high != kRowsDescriptorHigh) simt::complain("an unknown descriptor");
    const bool rows = b_high == kRowsDescriptorHigh;
    multiply_registers<Operand, N>(acc, a, keep, [=](int row, auto& values) { read_row(b, rows, row, values); });
  }
};

inline uint32_t warp_max(uint32_t value) {
  uint64_t(&values)[32] = simt::shuffled[threadIdx.x / 32];
  values[threadIdx.x % 32] = value;
  __syncwarp();
  const uint64_t largest = *std::max_element(values, values + 32);
  __syncwarp();
  return static_cast<uint32_t>(largest);
}

inline void check_words(uint32_t address, uint32_t bytes) {
  if (address % bytes != 0 || address + bytes > simt::granted_bytes)
    simt::complain("a wild address in shared memory");
}
inline void load_shared(uint32_t& word, uint32_t address) {
  check_words(address, 4);
  std::memcpy(&word, simt::smem + address, 4);
}
inline void store_shared(uint32_t address, uint32_t word) {
  check_words(address, 4);
  std::memcpy(simt::smem + address, &word, 4);
}
inline void load_matrix(uint32_t (&a)[4], uint32_t address) {
  static uint32_t addresses[32][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  simt::check_shared(address, 16);
  addresses[warp][lane] = address;
  __syncwarp();
  for (int e = 0; e < 4; ++e) load_shared(a[e], addresses[warp][8 * e + lane / 4] + lane % 4 * 4);
  __syncwarp();
}

}  // namespace hopper
}  // namespace modelnew
"""

# What wgmma.cu and hopper.cuh want of CUDA while the host compiles the plans in them; the GPU is what the test says.
WGMMA_STAND_INS = """
#pragma once
#define __device__
#define __forceinline__ inline
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidConfiguration = 9, cudaErrorNoDevice = 100 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
inline int stand_in_capability = 90;  // 0: no GPU at all
inline cudaError_t cudaGetDevice(int* device) {
  *device = stand_in_capability;  // what a device is capable of never changes
  return stand_in_capability != 0 ? cudaSuccess : cudaErrorNoDevice;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount            ? 132
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? (stand_in_capability == 90 ? 232448 : 101376)
           : attribute == cudaDevAttrComputeCapabilityMajor       ? stand_in_capability / 10
                                                                  : stand_in_capability % 10;
  return cudaSuccess;
}
struct float4 { float x, y, z, w; };
unsigned long long __cvta_generic_to_shared(const void*);
void __nanosleep(unsigned);
void __threadfence();
unsigned __shfl_xor_sync(unsigned, unsigned, int);
int __shfl_sync(unsigned, int, int);
"""

WGMMA_ENTRY_POINTS = (
    """
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "wgmma.cu"
"""
    + PROBLEM_FROM_FIELDS
    + r"""
using namespace modelnew;
using namespace modelnew::wgmma;

// The direct engine's share, whatever it is.
int64_t modelnew::listed_workspace_bytes(const Problem&, Operator) { return 12345; }

// Engines further down the table, which take everything or nothing.
static bool others_refuse = false;
static const char* refuse(const Problem&, Operator) { return others_refuse ? "it is told to" : nullptr; }
static double others_cycles = 1e30;
static double estimate(const Problem&, Operator) { return others_cycles; }
static bool gather_is_to_land = false;
bool modelnew::gather_lands(const Problem&, Operator) { return gather_is_to_land; }
static bool gather_refuses = false;
static const char* gather_refusal(const Problem& problem, Operator op) {
  return gather_refuses ? "it is told to" : refuse(problem, op);
}
static double mma_cycles = 1e30;
static double cycles_of_mma(const Problem&, Operator) { return mma_cycles; }
const Engine modelnew::kGatherEngine{"gather", gather_refusal, nullptr, nullptr, nullptr, nullptr, estimate};
const Engine modelnew::kMmaEngine{"mma", refuse, nullptr, nullptr, nullptr, nullptr, cycles_of_mma};

static const Guard kNoGuard{};

// What is wrong with the numbers of a plan, or nothing.
static std::string fault_of_numbers(const Correlation& of, const Plan& plan, int bytes) {
  const SharedLayout layout = shared_layout(of, plan, bytes);
  // In 64 bits, unlike the layout.
  const int64_t row_bytes = int64_t{plan.block_steps} * 2 * plan.x_pitch * 16;
  const int fp16_parts = plan.contained == 2 ? 2 : 1;
  if (layout.w_ring - layout.x_ring != fp16_parts * plan.x_slots * row_bytes) return "the size of the x ring";
  if (plan.smem_bytes > 232448 || layout.end != plan.smem_bytes) return "shared memory";
  if (layout.end - layout.w_ring < plan.tile_q * 16) return "too little behind the rows of x";

  if (plan.x_slots < plan.x_rows || plan.x_slots > kMaxRows) return "rows of the x ring";
  const int group_rows = plan.tile_k == 128 ? plan.tile_p : plan.tile_p / 2, tile_pixels = group_rows * plan.tile_q;
  const int multiplied_bytes = plan.contained != 0 ? 2 : bytes;
  if (plan.contained != 0 && bytes != 4) return "16 bits contained in 16 bits";
  const bool small = group_rows == 1 && multiplied_bytes == 4 && plan.down && plan.y_runs;
  if (plan.contained == 2 ? tile_pixels != 128 : tile_pixels != 256 && !(tile_pixels == 128 && small))
    return "pixels of a tile";
  if (plan.contained == 2 && layout.carried - layout.finish < 8 * 16 * 8) return "room for factors and biases";
  const bool one_part = plan.down && plan.contained == 2;
  if (!one_part && layout.raw - layout.carried < 8 * 16 * 32) return "room for carried sectors";
  if (group_rows > 1 && plan.x_slots % plan.x_rows != 0) return "a window that wraps round the ring";
  if (plan.x_rows != plan.tile_p + (of.R - 1) * of.dilation_h) return "rows of a window";
  const int columns = std::min(plan.tile_q, of.Q) + (of.S - 1) * of.dilation_w;
  const int even = plan.chunks ? 4 : 2;
  if (plan.lead < 0 || plan.lead >= even || (of.pad_w + plan.lead) % even != 0) return "pixels that start odd";
  if (plan.x_pitch % 2 != 0 || plan.x_pitch < plan.lead + columns) return "pixels of a row";
  if (plan.w_stages != 0 && (plan.w_stages < 4 || plan.w_stages > kMaxStages)) return "stages of weights";

  const int64_t steps = int64_t{plan.blocks_c} * plan.block_steps, channels = 32 / multiplied_bytes;
  const int64_t needed = ceil_div(of.in_channels, channels);
  if (plan.blocks_c < 1 || plan.block_steps < 1 || steps < needed) return "channels that no block has";
  if (16 * steps > 17 * needed) return "too many channels of zeros";
  if (plan.x_simple && !plan.chunks && (!plan.x_pairs || steps * channels != of.in_channels))
    return "x that is not that simple";
  if (plan.chunks) {
    if (plan.contained != 1 || !plan.x_boxes || plan.w_stages == 0 || plan.convert_warps != 3) return "chunks of x";
    if (of.groups > 1 && steps * channels != of.in_channels) return "chunks that reach into the next group";
    if (layout.raw % 128 != 0 || layout.notes - layout.raw < 6 * 4096 || layout.x_ring - layout.notes < 6 * 16)
      return "room for chunks";
    if (plan.whole_chunks * 64 + plan.rest_pixels != plan.x_pitch) return "pixels in no chunk";
    const int rest_lanes = plan.rest_pixels / 2 * plan.rest_rows * plan.rest_pieces / 2;
    const int rest_bytes = plan.rest_columns * 4 * plan.rest_rows * plan.rest_pieces * 8;
    if (plan.rest_pixels > 0) {
      if (plan.rest_columns < plan.rest_pixels || plan.rest_columns % 4 != 0) return "columns of rests";
      if (rest_lanes < 1 || rest_lanes > 32 || rest_bytes > 4096) return "the size of rests";
      if (plan.rest_pieces % 2 != 0 || plan.rest_pieces < 2 || plan.rest_pieces > 2 * plan.block_steps)
        return "pieces of rests";
      if (plan.rest_rows != 1 && (plan.down || plan.rest_rows != plan.x_rows)) return "rows of rests";
    }
  }

  const int64_t block_steps = int64_t{of.R} * of.S * plan.block_steps;
  const int64_t weight_bytes = plan.w_stages > 0 ? int64_t{plan.w_stages} * plan.group_steps * 64 * 32
                                                 : block_steps * plan.blocks_c * plan.tile_k * 32;
  if (layout.end - layout.w_ring < fp16_parts * weight_bytes) return "room for weights";
  if (plan.group_steps < 1 || plan.group_steps > most_group_steps(plan.tile_q, plan.contained))
    return "steps of a group";
  if (plan.contained == 2 && plan.group_steps * channels > 64) return "too long a sum on tensor cores";
  if (plan.large_groups < 1 || plan.large_groups > plan.groups) return "groups with all their steps";
  if (plan.group_steps == 1 && plan.large_groups != plan.groups) return "groups without steps";
  if (int64_t{plan.groups} * (plan.group_steps - 1) + plan.large_groups != block_steps) return "steps of all groups";

  const int64_t images = of.N * of.groups, tiles = images * plan.tiles_p * plan.tiles_q;
  if (plan.tiles != tiles || plan.unit_tiles < 1 || plan.blocks < 1 || plan.blocks > std::min(plan.units, 132))
    return "tiles, units or blocks";
  const int64_t parts = plan.down ? ceil_div(images * plan.tiles_p, plan.unit_tiles) * plan.tiles_q
                                  : ceil_div(tiles, plan.unit_tiles);
  if (plan.units != plan.tiles_k * parts) return "the number of units";
  if (plan.down) {
    if (plan.blocks_c != 1) return "downwards with blocks of channels";
    if (group_rows != 1) return "downwards with several rows for a warpgroup";
    if (plan.x_slots < plan.x_rows + plan.tile_p) return "no room for the rows that the next tile adds";
  }
  if (plan.boxes != 0) {
    if (!plan.y_flat || plan.w_stages != 0 || plan.boxes > 8 || plan.boxes != 1 << plan.log_boxes) return "boxes";
    const int staging_bytes = layout.records - layout.staging;
    if (layout.staging % 1024 != 0 || staging_bytes != kMultiplyWarps * box_bytes(plan.contained))
      return "staging of boxes";
    if (of.out_channels % plan.boxes || plan.boxes * of.out_stride[1] * bytes % 32) return "channels aligned unlike";
    if (of.groups > 1 && of.out_channels % 128) return "boxes that reach into the next group";
    // Every channel is in one row of the weights, and no box has others than those aligned alike.
    std::vector<int> rows(256);
    for (int row = 0; row < 256; ++row) {
      const int k = bytes == 2 ? channel_of_row<2>(row, plan.boxes) : channel_of_row<4>(row, plan.boxes);
      if (k < 0 || k >= 256 || rows[k]++ || k / 128 != row / 128 || k % plan.boxes != row / 16 % 8 % plan.boxes)
        return "rows of the weights";
    }
  }
  const bool lines_up = of.out_stride[3] == 1 && of.out_stride[2] == of.Q && plan.tile_p == 1;
  if (plan.y_flat && !lines_up) return "runs beyond a row that ends";

  if (plan.convert_warps != 3 && plan.convert_warps != 4) return "warps that convert";
  // The fourth one would else copy weights, and only simple x is shared among four.
  const bool same_weights = plan.w_stages == 0 && of.groups == 1 && plan.blocks % plan.tiles_k == 0;
  if (plan.convert_warps == 4 && !(same_weights && plan.x_simple)) return "nobody to copy weights";
  if (plan.staging_parts != kMultiplyWarps && !(plan.staging_parts == kMultiplyWarps / 2 && plan.down && plan.y_runs))
    return "warps that stage where another one does, and take no turns";
  const int raw_bytes = plan.contained != 0 ? plan.convert_warps * raw_parts(plan.contained) * kRawPartBytes : 0;
  if (layout.x_ring - layout.raw < raw_bytes) return "room for x on its way";
  return "";
}

// What is wrong with the walks of all blocks, or nothing: every tile once; runs that do not break off, nor go on where
// memory does not; windows kept exactly where the next one lies below.
static std::string fault_of_walks(const Correlation& of, const Plan& plan) {
  const int64_t images = of.N * of.groups * plan.tiles_k, tiles = int64_t{plan.tiles_p} * plan.tiles_q;
  std::vector<char> seen(images * tiles);
  for (int block = 0; block < plan.blocks; ++block) {
    Tile last{};
    last.run_ends = true;
    bool first = true;
    std::string fault;
    for_each_tile(of, plan, Agenda{kNoGuard, false}, block, [&](const Tile& tile) {
      if (!fault.empty()) return;
      const int row = tile.p / plan.tile_p, column = tile.q / plan.tile_q;
      if (tile.p % plan.tile_p || tile.q % plan.tile_q || tile.p >= of.P || tile.q >= of.Q || tile.p < 0 ||
          tile.q < 0 || tile.group < 0 || tile.group >= of.groups || tile.n < 0 || tile.n >= of.N ||
          tile.tile_k < 0 || tile.tile_k >= plan.tiles_k) {
        fault = "a tile outside";
        return;
      }
      const int64_t image = (int64_t{tile.group} * of.N + tile.n) * plan.tiles_k + tile.tile_k;
      if (seen[image * tiles + row * plan.tiles_q + column]++) fault = "a tile twice";
      const bool same = !first && tile.group == last.group && tile.n == last.n && tile.tile_k == last.tile_k;
      if (tile.run_starts != last.run_ends) fault = "a run that starts before another ends";
      if (!tile.run_starts) {
        const bool next = tile.p == last.p && tile.q == last.q + plan.tile_q;
        const bool wraps = plan.y_flat && tile.p == last.p + plan.tile_p && tile.q == 0 && last.q + plan.tile_q >= of.Q;
        if (!same || !(next || wraps)) fault = "a run of tiles that are not neighbours";
      }
      if (plan.down && !(tile.run_starts && tile.run_ends)) fault = "downwards and not a run of its own";
      if (!plan.down && tile.goes_on) fault = "rightwards and goes on downwards";
      const bool below = same && tile.q == last.q && tile.p == last.p + plan.tile_p;
      if (tile.continues && !below) fault = "a window that continues another one than that above";
      if (tile.continues != (!first && last.goes_on)) fault = "rows kept for nothing, or not kept";
      // The weights that a block copies before its first tile, if nobody is left to copy others.
      if (plan.convert_warps == 4 && (tile.tile_k != block % plan.tiles_k || tile.group != 0))
        fault = "weights that nobody copies";
      last = tile;
      first = false;
    });
    if (!fault.empty()) return fault;
    if (first) return "a block without a tile";
    if (!last.run_ends) return "a run that never ends";
    if (last.goes_on) return "the last tile goes on";
  }
  for (char count : seen)
    if (count != 1) return "a tile never";
  return "";
}

// What is wrong with a plan that does again what another one marks, or nothing: its tiles have other numbers, or it
// takes a list of them, here of every third one, otherwise.
static std::string fault_of_again(const Correlation& of, const Plan& plan, const Plan& again) {
  if (plan.tile_k != again.tile_k || plan.tile_p != again.tile_p || plan.tile_q != again.tile_q) return "other tiles";
  if (again.down || again.contained != 0) return "a plan that takes no list";
  if (again.convert_warps == 4 && again.tiles_k > 1) return "nobody to copy the weights of a list";
  using Place = std::array<int, 5>;
  const auto place = [](const Tile& tile) { return Place{tile.group, tile.tile_k, tile.n, tile.p, tile.q}; };
  std::map<uint32_t, Place> places;
  for (int block = 0; block < plan.blocks; ++block)
    for (Walk walk(of, plan, Agenda{kNoGuard, false}, block); !walk.done(); walk.next())
      if (!places.emplace(walk.number(), place(walk.tile)).second) return "a number of two tiles";
  if (places.rbegin()->first + 1 != places.size()) return "a number of no tile";
  std::vector<uint32_t> list;
  for (const auto& [number, tile] : places)
    if (number % 3 == 1) list.push_back(number);
  Control control{};
  control.listed = list.size();
  Guard guard{};
  guard.control = &control;
  guard.list = list.data();
  std::set<Place> left;
  for (uint32_t number : list) left.insert(places[number]);
  bool alone = true;
  for (int block = 0; block < again.blocks; ++block)
    for_each_tile(of, again, Agenda{guard, true}, block, [&](const Tile& tile) {
      alone &= left.erase(place(tile)) == 1 && tile.run_starts && tile.run_ends && !tile.continues && !tile.goes_on;
    });
  return alone && left.empty() ? "" : "a list that is not done tile by tile";
}

static std::string fault_of(const Correlation& of, const Plan& plan, int bytes) {
  const std::string fault = fault_of_numbers(of, plan, bytes);
  return fault.empty() ? fault_of_walks(of, plan) : fault;
}

extern "C" {
void set_capability(int capability) { stand_in_capability = capability; }
void let_others_refuse(bool refuse) { others_refuse = refuse; }
void let_others_take(double cycles) { others_cycles = cycles; }
void let_gather_refuse(bool refuses) { gather_refuses = refuses; }
void let_mma_take(double cycles) { mma_cycles = cycles; }
void let_gather_land(bool lands) { gather_is_to_land = lands; }
const char* wgmma_yields(int op, const int64_t* fields) {
  return yields(make_problem(fields), static_cast<Operator>(op));
}
const char* wgmma_refusal(int op, const int64_t* fields) {
  return refusal(make_problem(fields), static_cast<Operator>(op));
}
const char* wgmma_describe(int op, const int64_t* fields) {
  static char text[320];  // as the binding has it
  describe(make_problem(fields), static_cast<Operator>(op), text, sizeof text);
  return text;
}
double wgmma_cycles(int op, const int64_t* fields) {
  const Planned& planned = plan_of(make_problem(fields), static_cast<Operator>(op), Alignment{});
  return planned.found ? planned.plan.cycles : 0;
}
// Plans one configuration for tensors at these addresses: null if it does not fit, else what is wrong, or "". fp32
// tensors in full if TF32 is not allowed, else as TF32, however small the problem.
const char* wgmma_fault(int op, const int64_t* fields, int configuration, uint64_t in, uint64_t out) {
  static std::string fault;
  const Problem problem = make_problem(fields);
  const Correlation of = correlation_of(problem, static_cast<Operator>(op));
  Plan plan{};
  const int bytes = element_bytes(problem.dtype);
  const Precision precision{bytes, bytes == 4 && !problem.tf32_allowed};
  if (!make_plan(of, precision, Device{132}, Alignment{in, out}, configuration, plan)) return nullptr;
  fault = fault_of(of, plan, bytes);
  Plan again{};
  if (fault.empty() && precision.exact != (plan.contained == 2)) fault = "not as precise as asked for";
  if (fault.empty() && plan.contained == 1) {
    if (!plan_again(of, Device{132}, Alignment{in, out}, plan, again)) fault = "nothing to do tiles again by";
    if (fault.empty()) fault = fault_of(of, again, bytes);
    if (fault.empty()) fault = fault_of_again(of, plan, again);
  }
  return fault.c_str();
}
}
"""
)


def compile_plans(
    engine: str, entry_points: str, mutations: dict[str, tuple[str, str]], folder: Path, *edits: tuple[str, str]
) -> ctypes.CDLL:
    """The host part of an engine, which `entry_points` include, as a library; see with_mutations. Edits come first."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cuda_runtime_api.h").write_text(WGMMA_STAND_INS)
    source = (KERNELS / f"{engine}.cu").read_text()
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    for name, (old, _) in mutations.items():
        assert source.count(old) == 1, name
    (folder / f"{engine}.cu").write_text(with_mutations(source, mutations))
    flags = ("-O2", "-fno-gnu-unique", "-include", "cuda_runtime_api.h", "-Wno-unknown-pragmas")
    return compile_shared(entry_points, folder, *flags)


class WgmmaPlans:
    """The host part of the wgmma engine, for a GPU of 132 SMs that is not there."""

    def __init__(self, folder: Path) -> None:
        self.library = compile_plans("wgmma", WGMMA_ENTRY_POINTS, {}, folder)
        for name in ("wgmma_refusal", "wgmma_yields", "wgmma_describe", "wgmma_fault"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.wgmma_cycles.restype = ctypes.c_double

    def __call__(
        self,
        function: str,
        operator: str,
        case: Case,
        dtype: torch.dtype,
        *more: object,
        tf32: bool = True,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> str | float | None:
        """One of the entry points, for tensors that only have strides."""
        return self.call(function, operator, self.fields(case, dtype, tf32, memory_format), *more)

    @staticmethod
    def fields(case: Case, dtype: torch.dtype, tf32: bool, memory_format: torch.memory_format) -> ctypes.Array:
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        tensors = {
            name: torch.empty(shape, dtype=dtype, device="meta", memory_format=memory_format)
            for name, shape in shapes.items()
        }
        return ShimEngine.fields(case, tensors, tf32)

    def call(self, function: str, operator: str, fields: ctypes.Array, *more: object) -> str | float | None:
        result = getattr(self.library, f"wgmma_{function}")(OPERATOR_NUMBER[operator], fields, *more)
        return result.decode() if isinstance(result, bytes) else result


@built_beside_the_tests
def wgmma_plans(folder: Path) -> WgmmaPlans:
    return WgmmaPlans(folder)


WGMMA_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WGMMA_OPERATORS = ["fprop", "dgrad"]


def wgmma_tile(text: str) -> tuple[int, int, str] | None:
    """Channels, columns and direction of the tile that the first mention of wgmma in a text is about."""
    found = re.search(r"tile of (\d+) channels x \d+ x (\d+) pixels, (downwards|rightwards)", text)
    return (int(found[1]), int(found[2]), found[3]) if found else None


def random_wgmma_cases(count: int, seed: int) -> list[Case]:
    """Any filter up to 7x7, channels and columns around the tiles' and the stages' sizes, padding of any size."""
    rng = random.Random(seed)

    def draw() -> Case:
        groups = rng.choice([1, 1, 1, 2, 3])
        C, K = (groups * rng.choice([8, 9, 16, 17, 31, 40, 64, 65, 100, 130, 300]) for _ in range(2))
        W = rng.choice([32, 33, 63, 64, 65, 127, 129, 255, 256, 257, 300, 513, 1030])
        N, H, R, S = rng.choice([1, 1, 2, 5, 13]), rng.randint(1, 60), rng.randint(1, 7), rng.randint(1, 7)
        padding, dilation = rng.choices(range(10), k=2), rng.choices([1, 1, 2, 3], k=2)
        return Case(N, C, H, W, K, R, S, (1, 1), tuple(padding), tuple(dilation), groups)

    cases = (draw() for _ in itertools.count())
    return list(itertools.islice((case for case in cases if min(case.y_shape) > 0), count))


# What has been wrong once: a last block of channels that takes fewer groups of steps than the others; x at an odd
# address, where another tile is the best, with more packed weights; rows of so many channels that 32 bits cannot count
# the bytes of a ring of them. And more tiles of output channels than blocks, so that none keeps its weights.
HARD_WGMMA_CASES = [
    Case(13, 40, 13, 513, 300, 1, 3, padding=(2, 5), dilation=(2, 3)),
    Case(13, 40, 44, 1030, 9, 3, 1, padding=(3, 2), dilation=(1, 2)),
    Case(13, 100, 4, 32, 130, 7, 6, padding=(5, 5), dilation=(2, 2)),
    Case(1, 2**20 - 16, 1, 300, 64, 1, 1),
    Case(1, 2**19 - 16, 1, 3300, 64, 1, 2, dilation=(1, 3000)),
    Case(2, 16, 5, 66, 17000, 1, 1),
]

# By number: four widths of a tile, of 128 or 64 channels, rightwards; the widest of both downwards, as the others have
# several rows of pixels a warpgroup. TF32 also has 128 pixels downwards, and the others with contained operands; fp32
# in full the three narrow ones of half the size. -1 is the planner's choice.
WGMMA_CONFIGURATIONS = {-1, *range(8), 8, 12}
WGMMA_FP32_CONFIGURATIONS = {16, *(32 + number for number in WGMMA_CONFIGURATIONS if number >= 0)}
WGMMA_SPLIT_CONFIGURATIONS = {64, 65, 66, 68, 69, 70, 72, 76}

# How fp32 tensors are multiplied, beside 16-bit ones: as TF32, or in full.
WGMMA_PRECISIONS = [
    *(pytest.param(dtype, True, id=str(dtype)) for dtype in WGMMA_DTYPES),
    pytest.param(torch.float32, False, id="in full"),
]


def wgmma_configurations(dtype: torch.dtype, tf32: bool = True) -> set[int]:
    if dtype == torch.float32 and not tf32:
        return {-1} | WGMMA_SPLIT_CONFIGURATIONS
    return WGMMA_CONFIGURATIONS | (WGMMA_FP32_CONFIGURATIONS if dtype == torch.float32 else set())


@pytest.mark.parametrize("operator", WGMMA_OPERATORS)
@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
def test_wgmma_plans_are_sound(wgmma_plans, dtype, tf32, operator):
    """Each tile once, runs without a break, windows kept where they go on, all in 227 KiB: every configuration."""
    rng, planned = random.Random(0), set()
    for case in HARD_WGMMA_CASES + random_wgmma_cases(1000, seed=0):
        if wgmma_plans("refusal", operator, case, torch.float16) is not None:
            continue
        memory_format = rng.choice([torch.contiguous_format] * 4 + [torch.channels_last])
        fields = wgmma_plans.fields(case, dtype, tf32, memory_format)
        for configuration in range(-1, 96):
            for address in (0, dtype.itemsize):
                places = ctypes.c_uint64(address), ctypes.c_uint64(rng.choice([0, 16, dtype.itemsize]))
                fault = wgmma_plans.call("fault", operator, fields, configuration, *places)
                assert not fault, f"{operator} of {case}, configuration {configuration}, {places}: {fault}"
                planned |= {configuration} if fault is not None else set()
    assert planned == wgmma_configurations(dtype, tf32)


@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
def test_wgmma_estimates_grow_with_the_batch(wgmma_plans, dtype, tf32):
    for case, operator in itertools.product(random_wgmma_cases(1000, seed=1), WGMMA_OPERATORS):
        by_size = dtype == torch.float32 and tf32 and case.multiply_adds < 2**27  # whether it is TF32
        if not by_size and wgmma_plans("refusal", operator, case, torch.float16) is None:
            once = wgmma_plans("cycles", operator, case, dtype, tf32=tf32)
            twice = wgmma_plans("cycles", operator, dataclasses.replace(case, N=2 * case.N), dtype, tf32=tf32)
            assert 0 < once <= twice, f"{operator} of {case}"


# The project's reference cases, and whether they go downwards, where rings of 6 rows of 256 columns and 64 channels
# would leave no room for weights. 16 channels take longest to store, which is faster in runs.
@pytest.mark.parametrize(
    "case, down",
    [
        (Case(16, 16, 1024, 1024, 128, 3, 3), False),
        (Case(8, 64, 512, 1024, 128, 3, 3), True),
        (Case(8, 64, 512, 256, 128, 5, 7), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
def test_wgmma_tiles_of_the_reference_cases(wgmma_plans, case, down, dtype, tf32):
    direction = "downwards" if down else "rightwards"
    described = wgmma_plans("describe", "fprop", case, dtype, tf32=tf32)
    assert wgmma_tile(described) == (128, 256 if tf32 else 128, direction)
    assert described.startswith("in scaled fp16, ") == (dtype == torch.float32 and tf32)
    assert described.startswith("in two parts of scaled fp16, ") == (not tf32)
    # No channels of dx are left idle; how many columns a tile has is the planner's to estimate.
    channels, _, _ = wgmma_tile(wgmma_plans("describe", "dgrad", case, dtype, tf32=tf32))
    assert channels == 64


def test_wgmma_describes_its_configuration(wgmma_plans):
    """Whole and in the 320 bytes that the binding has for it."""
    weights = r"(resident weights|weights in \d+ stages of \d+ bytes)"
    cases = itertools.product(random_wgmma_cases(100, seed=2), WGMMA_OPERATORS, WGMMA_DTYPES, (True, False))
    for case, operator, dtype, tf32 in cases:
        if wgmma_plans("refusal", operator, case, dtype, tf32=tf32) is None:
            assert re.fullmatch(
                r"(in (two parts of )?scaled fp16, )?tile of (64|128) channels x \d+ x (32|64|128|256) pixels, "
                r"(downwards|rightwards), "
                rf"\d+ input channels a row of \d+, {weights}, (boxes, |boxes of every \d\w\w channel, )?"
                r"\d+ bytes of shared memory, \d+ blocks, units of \d+ tiles, about [\d.e+-]+ Mcycles",
                wgmma_plans("describe", operator, case, dtype, tf32=tf32),
            )


# What the engine leaves to others, and what looks alike and is its own. Sizes are those of tests/GPU: 2^27 and more.
WGMMA_CASE = Case(2, 40, 130, 202, 130, 3, 3)
WGMMA_REFUSALS = [
    (WGMMA_CASE, "fprop", torch.float32, {}, None),
    (WGMMA_CASE, "fprop", torch.float32, {"tf32": False}, None),
    (Case(1, 40, 30, 42, 40, 3, 3), "fprop", torch.float32, {}, "2^25 multiply-adds"),
    (Case(1, 40, 66, 66, 23, 3, 3), "fprop", torch.float32, {}, None),
    (Case(1, 40, 66, 66, 22, 3, 3), "dgrad", torch.float32, {"tf32": False}, "2^25 multiply-adds"),
    (Case(1, 40, 66, 66, 23, 3, 3), "dgrad", torch.float32, {"tf32": False}, None),
    (Case(8, 63, 130, 202, 65, 1, 1), "fprop", torch.float32, {"tf32": False}, "64 terms"),
    (Case(8, 63, 130, 202, 65, 1, 1), "dgrad", torch.float32, {"tf32": False}, None),
    (Case(8, 63, 130, 202, 65, 1, 1), "fprop", torch.float32, {}, None),
    (Case(1, 40, 30, 40, 40, 3, 3), "fprop", torch.float16, {"tf32": False}, None),
    (WGMMA_CASE, "fprop", torch.float64, {}, "float64"),
    (WGMMA_CASE, "wgrad", torch.float16, {}, "outputs and input gradients only"),
    (WGMMA_CASE, "bgrad", torch.float16, {}, "outputs and input gradients only"),
    (Case(1, 16, 80, 80, 16, 3, 3, stride=(2, 1)), "fprop", torch.float16, {}, "stride 1"),
    (Case(1, 16, 80, 80, 16, 3, 3, stride=(1, 2)), "dgrad", torch.float16, {}, "stride 1"),
    (Case(1, 16, 3, 80, 16, 3, 3, stride=(2, 1)), "fprop", torch.float16, {}, None),  # one row: no stride in it
    (Case(1, 16, 80, 33, 16, 3, 3), "fprop", torch.float16, {}, "32 columns"),
    (Case(1, 16, 80, 33, 16, 3, 3), "dgrad", torch.float16, {}, None),
    (Case(1, 16, 80, 31, 16, 3, 3, padding=(0, 2)), "fprop", torch.float16, {}, None),
    (Case(1, 16, 80, 31, 16, 3, 3, padding=(0, 2)), "dgrad", torch.float16, {}, "32 columns"),
    (Case(1, 7, 80, 80, 16, 3, 3), "fprop", torch.float16, {}, "8 input channels"),
    (Case(1, 7, 80, 80, 16, 3, 3), "dgrad", torch.float16, {}, "8 output channels"),
    (Case(1, 16, 80, 80, 14, 3, 3, groups=2), "fprop", torch.float16, {}, "8 output channels"),
    (Case(1, 16, 80, 80, 14, 3, 3, groups=2), "dgrad", torch.float16, {}, "8 input channels"),
    (Case(1, 16, 80, 80, 16, 3, 3, groups=16), "fprop", torch.float16, {}, "8 input channels"),
    (Case(1, 16, 300, 300, 16, 3, 3, dilation=(100, 100)), "fprop", torch.float16, {}, "does not fit"),
    (WGMMA_CASE, "fprop", torch.float16, {"capability": 80}, "Hopper"),
    (WGMMA_CASE, "fprop", torch.float16, {"capability": 89}, "Hopper"),
    (WGMMA_CASE, "fprop", torch.float16, {"capability": 100}, "Hopper"),
    (WGMMA_CASE, "fprop", torch.float16, {"capability": 0}, "Hopper"),
]


@pytest.mark.parametrize("case, operator, dtype, settings, text", WGMMA_REFUSALS, ids=str)
def test_wgmma_says_what_it_refuses(wgmma_plans, case, operator, dtype, settings, text):
    settings = dict(settings)
    wgmma_plans.library.set_capability(settings.pop("capability", 90))
    try:
        refusal = wgmma_plans("refusal", operator, case, dtype, **settings)
    finally:
        wgmma_plans.library.set_capability(90)
    assert (refusal is None) == (text is None), refusal
    assert text is None or text in refusal


# 2^29 multiply-adds are where mma is slower again; of TF32 gather has what has no long rows, or few values.
@pytest.mark.parametrize(
    "case, settings, to",
    [
        (Case(1, 64, 130, 258, 128, 3, 3), {"tf32": False}, None),
        (Case(1, 64, 50, 58, 128, 3, 3), {"tf32": False}, "mma"),
        (Case(1, 64, 50, 58, 128, 3, 3), {}, "gather"),  # few outputs
        (Case(1, 32, 259, 258, 128, 3, 3), {}, None),
        (Case(1, 32, 258, 258, 128, 3, 3), {}, "gather"),  # 2^23 outputs
        (Case(1, 64, 8, 34, 128, 3, 3), {}, "mma"),  # too small for TF32
        (Case(1, 64, 50, 58, 128, 3, 3), {"dtype": torch.float16}, None),
        (Case(1, 64, 130, 258, 128, 1, 1), {}, "gather"),
        (Case(1, 64, 130, 258, 128, 1, 1), {"tf32": False}, "mma"),
        (Case(4, 64, 130, 258, 128, 1, 1), {"tf32": False}, None),
        (Case(1, 64, 50, 58, 128, 3, 3), {"memory_format": torch.channels_last}, "gather"),
        (Case(1, 64, 50, 58, 128, 3, 3), {"memory_format": torch.channels_last, "tf32": False}, "mma"),
    ],
    ids=str,
)
def test_wgmma_yields_to_what_is_faster(wgmma_plans, case, settings, to):
    settings = dict(settings)
    dtype = settings.pop("dtype", torch.float32)
    reason = wgmma_plans("yields", "fprop", case, dtype, **settings)
    assert (reason is None) == (to is None), reason
    assert to is None or reason.startswith(f"{to} is faster")
    wgmma_plans.library.let_others_refuse(True)
    try:
        assert wgmma_plans("yields", "fprop", case, dtype, **settings) is None
    finally:
        wgmma_plans.library.let_others_refuse(False)


MANY_CHANNELS = Case(32, 128, 130, 130, 128, 3, 3)


@pytest.mark.parametrize(
    "case, operators",
    [
        (MANY_CHANNELS, ("fprop", "dgrad")),
        (dataclasses.replace(MANY_CHANNELS, C=127), ("dgrad",)),
        (dataclasses.replace(MANY_CHANNELS, K=127), ("fprop",)),
        (dataclasses.replace(MANY_CHANNELS, K=64, N=40), ("fprop",)),
        (dataclasses.replace(MANY_CHANNELS, K=63, N=40), ()),
        (dataclasses.replace(MANY_CHANNELS, C=256, K=256, groups=2), ()),
        (dataclasses.replace(MANY_CHANNELS, R=9, S=1), ("fprop", "dgrad")),
        (dataclasses.replace(MANY_CHANNELS, R=5, S=2), ()),
        # 2^28 values of dy, and more; there are fewer of x.
        (dataclasses.replace(MANY_CHANNELS, N=64, K=256), ("fprop", "dgrad")),
        (dataclasses.replace(MANY_CHANNELS, N=65, K=256), ("fprop",)),
        (Case(128, 128, 128, 128, 128, 3, 3), ("fprop", "dgrad")),
        (Case(129, 128, 128, 128, 128, 3, 3), ("dgrad",)),
    ],
    ids=str,
)
def test_wgmma_yields_with_many_channels(wgmma_plans, case, operators):
    for operator in ("fprop", "dgrad"):
        reason = wgmma_plans("yields", operator, case, torch.float32)
        assert reason == ("gather is faster with many input channels" if operator in operators else None)
        assert wgmma_plans("yields", operator, case, torch.float16) is None
        assert wgmma_plans("yields", operator, case, torch.float32, tf32=False) is None


SOME_CHANNELS = Case(50, 64, 130, 130, 64, 3, 3)


@pytest.mark.parametrize(
    "case, yields",
    [
        (SOME_CHANNELS, True),
        (dataclasses.replace(SOME_CHANNELS, N=51), False),  # of x and y together 108 million values
        (dataclasses.replace(SOME_CHANNELS, C=63), False),
        (dataclasses.replace(SOME_CHANNELS, K=63), False),
        (dataclasses.replace(SOME_CHANNELS, N=20, C=128, K=128, groups=2), False),
        (dataclasses.replace(SOME_CHANNELS, R=9, S=1), True),
        (dataclasses.replace(SOME_CHANNELS, R=5, S=2), False),
        (dataclasses.replace(SOME_CHANNELS, N=30, K=127), True),
        (dataclasses.replace(SOME_CHANNELS, N=40, K=127), False),
    ],
    ids=str,
)
def test_wgmma_yields_with_some_channels_and_few_values(wgmma_plans, case, yields):
    for operator in ("fprop", "dgrad"):
        reason = wgmma_plans("yields", operator, case, torch.float32)
        assert reason == ("gather is faster with few values" if yields else None)
        assert wgmma_plans("yields", operator, case, torch.float16) is None
        assert wgmma_plans("yields", operator, case, torch.float32, tf32=False) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("lands", [True, False])
@pytest.mark.parametrize("cycles", [1, 1e30])
@pytest.mark.parametrize("R", [3, 2])
def test_wgmma_yields_where_x_is_contained_on_its_way(wgmma_plans, R, cycles, lands, tf32, dtype):
    """To what gather contains on its way: 3x3, as measured; other filters by the estimates."""
    case = dataclasses.replace(SOME_CHANNELS, N=64, R=R)
    wgmma_plans.library.let_gather_land(lands)
    wgmma_plans.library.let_others_take(ctypes.c_double(cycles))
    try:
        reason = wgmma_plans("yields", "fprop", case, dtype, tf32=tf32)
    finally:
        wgmma_plans.library.let_gather_land(False)
        wgmma_plans.library.let_others_take(ctypes.c_double(1e30))
    expected = None
    if tf32 and dtype == torch.float32:
        if lands and (R == 3 or cycles == 1):
            expected = "gather is faster where it contains x on its way"
        elif cycles == 1:
            expected = "gather is faster by the estimates"
    assert reason == expected


@pytest.mark.parametrize(
    "channels, dtype, memory_format, yields",
    [
        ({}, torch.float16, torch.channels_last, True),
        ({}, torch.bfloat16, torch.channels_last, True),
        ({"C": 24}, torch.float16, torch.channels_last, True),
        ({"C": 16}, torch.float16, torch.channels_last, False),
        ({"C": 60}, torch.float16, torch.channels_last, False),
        ({"groups": 2}, torch.float16, torch.channels_last, False),
        ({}, torch.float16, torch.contiguous_format, False),
        ({}, torch.float32, torch.channels_last, False),  # in full accuracy
    ],
    ids=str,
)
def test_wgmma_yields_in_channels_last_of_16_bits(wgmma_plans, channels, dtype, memory_format, yields):
    case = dataclasses.replace(SOME_CHANNELS, **channels)
    reason = wgmma_plans("yields", "fprop", case, dtype, tf32=False, memory_format=memory_format)
    assert reason == ("gather is faster in channels_last" if yields else None)


@pytest.mark.parametrize(
    "case, of_own, yields",
    [
        (dataclasses.replace(SOME_CHANNELS, N=64), 1.29, True),
        (dataclasses.replace(SOME_CHANNELS, N=64), 1.31, False),
        (dataclasses.replace(SOME_CHANNELS, N=64, K=63), 1.29, False),
        (dataclasses.replace(SOME_CHANNELS, N=64, C=128, K=128, groups=2), 1.29, False),
        (dataclasses.replace(SOME_CHANNELS, N=64, R=5), 1.29, False),
    ],
    ids=str,
)
def test_wgmma_yields_by_the_estimates(wgmma_plans, case, of_own, yields):
    """To gather, unless that takes far longer by its estimate."""
    cycles = wgmma_plans("cycles", "fprop", case, torch.float32)
    wgmma_plans.library.let_others_take(ctypes.c_double(of_own * cycles))
    try:
        reason = wgmma_plans("yields", "fprop", case, torch.float32)
    finally:
        wgmma_plans.library.let_others_take(ctypes.c_double(1e30))
    assert reason == ("gather is faster by the estimates" if yields else None)


@pytest.mark.parametrize(
    "dilation, of_own, yields",
    [
        ((12, 12), 1.29, True),
        ((1, 12), 1.29, True),
        ((12, 1), 1.29, True),
        ((12, 12), 1.31, False),
        ((1, 1), 1.29, False),
    ],
)
def test_wgmma_yields_where_taps_lie_far_apart(wgmma_plans, dilation, of_own, yields):
    """To mma, where gather does not take them."""
    case = dataclasses.replace(SOME_CHANNELS, dilation=dilation)
    cycles = wgmma_plans("cycles", "fprop", case, torch.float32)
    wgmma_plans.library.let_gather_refuse(True)
    wgmma_plans.library.let_mma_take(ctypes.c_double(of_own * cycles))
    try:
        assert wgmma_plans("yields", "fprop", case, torch.float16) is None
        reason = wgmma_plans("yields", "fprop", case, torch.float32)
        wgmma_plans.library.let_others_refuse(True)
        assert wgmma_plans("yields", "fprop", case, torch.float32) is None
    finally:
        wgmma_plans.library.let_others_refuse(False)
        wgmma_plans.library.let_gather_refuse(False)
        wgmma_plans.library.let_mma_take(ctypes.c_double(1e30))
    assert reason == ("mma is faster where taps lie far apart" if yields else None)


# Cases that wgmma takes in forward and dgrad under every contract of its own: 2^27 multiply-adds, 32 columns.
WGMMA_CASES = [
    WGMMA_CASE,
    # Channels of both sides a few beside the pieces, steps and tiles.
    Case(1, 9, 301, 259, 31, 3, 3, padding=(1, 1)),
    Case(1, 31, 301, 260, 9, 3, 3, padding=(1, 1)),
    Case(1, 17, 90, 130, 100, 3, 3, padding=(1, 1)),
    Case(1, 100, 91, 131, 17, 3, 3, padding=(1, 1)),
    Case(2, 65, 40, 66, 130, 3, 3),
    Case(2, 130, 40, 66, 65, 3, 3),
    # Filters, dilations and paddings of all shapes: dgrad pads by what is left of them, less than nothing if need be.
    Case(2, 40, 185, 131, 72, 1, 1),
    Case(2, 40, 65, 132, 72, 1, 3),
    Case(2, 40, 65, 513, 64, 1, 3, padding=(0, 1)),
    Case(2, 40, 65, 132, 72, 3, 1, padding=(2, 0)),
    Case(1, 40, 41, 134, 72, 7, 5, padding=(1, 4)),
    Case(1, 40, 40, 133, 72, 5, 7, padding=(4, 0)),
    Case(1, 40, 55, 132, 72, 2, 4, padding=(0, 3), dilation=(3, 2)),
    Case(1, 40, 50, 140, 72, 3, 3, padding=(5, 7), dilation=(1, 3)),
    Case(1, 40, 50, 139, 72, 3, 2, padding=(4, 3)),
    Case(3, 72, 110, 142, 40, 1, 1, padding=(3, 2)),
    Case(1, 300, 20, 40, 65, 6, 7, padding=(3, 3)),
    # Groups.
    Case(2, 80, 60, 100, 130, 3, 3, padding=(1, 1), groups=2),
    Case(2, 51, 101, 130, 93, 3, 3, padding=(0, 1), groups=3),
    # Boxes load x of fp32, with rests of several sizes.
    Case(2, 64, 45, 264, 128, 3, 3),
    Case(1, 100, 30, 396, 136, 3, 5, padding=(1, 3)),
    Case(1, 256, 21, 148, 192, 2, 3, padding=(0, 1), groups=2),
    # One row; and images one after another of one tile each.
    Case(3, 130, 1, 600, 130, 1, 5),
    Case(4, 100, 1, 513, 130, 3, 3, padding=(1, 1)),
    Case(70, 40, 7, 36, 72, 3, 3),
    # Columns around every tile's width, with an odd number of rows.
    *(
        Case(1, 40, (2**27 // (Q * 65 * 40 * 9) + 1) | 1, Q, 65, 3, 3, padding=(1, 1))
        for Q in (32, 33, 63, 64, 65, 127, 129, 255, 256, 257, 300, 513)
    ),
]

# Among these are all shapes of a tile, with 64 and with 128 channels, in both directions, by the planner's own choice.
# Downwards it goes where x takes longer to convert than to multiply.
WGMMA_CANDIDATES = [
    case
    for case in (
        *(
            Case(N, C, H, W, K, R, R, padding=(R // 2, R // 2))
            for (N, C, K), H, W, R in itertools.product(
                itertools.product((2, 8), (16, 72), (64, 130)), (33, 65, 130), (32, 64, 128, 256, 300), (1, 3)
            )
        ),
        Case(2, 24, 145, 200, 8, 3, 4, padding=(1, 2)),
        Case(2, 72, 36, 200, 65, 1, 5, padding=(0, 2)),
        Case(8, 40, 101, 32, 130, 1, 1),
        Case(1, 64, 40, 258, 130, 3, 3, padding=(1, 1)),
    )
    if 2**27 <= case.multiply_adds <= 2**30
]


def wgmma_tiles(dtype: torch.dtype, tf32: bool = True) -> set[tuple[int, int, str]]:
    if not tf32:
        across = itertools.product((64, 128), (32, 64, 128), ("rightwards",))
        return {*across, (64, 128, "downwards"), (128, 128, "downwards")}
    return {
        *itertools.product((64, 128), (32, 64, 128, 256), ("rightwards",)),
        *itertools.product((64, 128), (256,), ("downwards",)),
        *([(128, 128, "downwards")] if dtype == torch.float32 else []),
    }


@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
def test_wgmma_cases_are_wgmmas(wgmma_plans, dtype, tf32):
    """That the cases for the GPU do not miss the engine, or some tile of it, or one of its directions."""
    for case, operator in itertools.product(WGMMA_CASES, WGMMA_OPERATORS):
        if not tf32 and min(case.C, case.K) // case.groups * case.R * case.S < 64:
            continue
        assert wgmma_plans("refusal", operator, case, dtype, tf32=tf32) is None, f"{operator} of {case}"
    for case in WGMMA_CANDIDATES:
        if tf32 or case.C * case.R * case.S >= 64:
            assert wgmma_plans("refusal", "fprop", case, dtype, tf32=tf32) is None, case
    tiles = {wgmma_tile(wgmma_plans("describe", "fprop", case, dtype, tf32=tf32)) for case in WGMMA_CANDIDATES}
    assert tiles == wgmma_tiles(dtype, tf32)


WGMMA_SHIM_ENTRY_POINTS = (
    """
#include <type_traits>
"""
    + PROBLEM_FROM_FIELDS
    + r"""
using namespace modelnew;
using namespace modelnew::wgmma;

extern "C" {
int done_again = 0, of_tiles = 0;  // of the last run with contained operands
int chunks = 0;                    // whether the last run loads x by boxes
}

// Plans one configuration on a GPU of three SMs and runs it: -1 if it does not fit, else the error.
extern "C" int wgmma_run(int op, const int64_t* fields, void* const* pointers, int configuration, int seed) {
  simt::independent = true;
  simt::before_block = simt::begin_block;
  simt::between_rounds = simt::do_some;
  simt::late = seed % 2;
  simt::shuffler.seed(seed);
  const Problem problem = make_problem(fields);
  const Operator which = static_cast<Operator>(op);
  Params params{};
  params.in_ptr = which == Operator::kDgrad ? pointers[3] : pointers[0];
  params.bias_ptr = pointers[2];
  params.out_ptr = pointers[4];
  const auto address = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  const Alignment alignment{address(params.in_ptr), address(params.out_ptr)};
  const Device device{3};
  const int bytes = element_bytes(problem.dtype);
  const Precision precision{bytes, bytes == 4 && !problem.tf32_allowed};
  Planned planned{correlation_of(problem, which), {}, {}, true, device.sms};
  const Correlation& of = planned.of;
  Plan& plan = planned.plan;
  if (!make_plan(of, precision, device, alignment, configuration, plan)) return -1;
  if (plan.contained == 1 && !plan_again(of, device, alignment, plan, planned.again)) return -1;
  Workspace workspace(workspace_layout(problem, which, planned).end);
  const int tiles = plan.tiles * plan.tiles_k;
  const bool contained = plan.contained != 0;
  chunks = plan.chunks;
  const Pointers operands{pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], workspace.data()};
  const int code = run_plan({which, problem, operands, planned}, params, nullptr);
  if (!workspace.intact()) return -2;
  if (contained) {
    const Control& control = *reinterpret_cast<const Control*>(workspace.data());
    done_again = control.all_again != 0 ? tiles : static_cast<int>(control.listed);
    of_tiles = tiles;
  }
  return code;
}
extern "C" const char* simt_message() { return simt::message.c_str(); }
"""
)


# In place of listed.cu.
OTHER_ENGINE = """
namespace modelnew {
int64_t listed_workspace_bytes(const Problem&, Operator) { return 0; }
cudaError_t launch_listed(Operator, const Problem&, const Pointers&, const TileList&, int, cudaStream_t) {
  return cudaSuccess;
}
}
"""


# Each takes away what some other warp relies on.
WGMMA_MUTATIONS = {
    "reads rows before they are there": left_out("hopper::barrier_wait(shared.x_full("),
    "overwrites rows in use": left_out("hopper::barrier_wait(shared.x_empty("),
    "reads weights before they are there": left_out("hopper::barrier_wait(shared.w_full(w"),
    "overwrites weights in use": left_out("hopper::barrier_wait_idly(shared.w_empty(at"),
    "stages where another warp does": left_out("hopper::barrier_wait(shared.staging_turn("),
    "stores before the last steps are done": left_out("hopper::wgmma_wait<0>();"),
    "stages where a box is read": (
        "hopper::bulk_stores_wait_read<0>();\n      else",
        "(MUTATED ? hopper::bulk_stores_commit : hopper::bulk_stores_wait_read<0>)();\n      else",
    ),
    "stages where the last boxes are read": left_out("if (lane_id == 0) hopper::bulk_stores_wait_read<0>();"),
    "leaves before its boxes are read": left_out("hopper::bulk_stores_wait_read<0>();  // shared memory"),
    "stores before all is staged": left_out("__syncwarp();  // all pixels are staged"),
    "keeps a row": ("if (lane_id < drop) {", "if (lane_id < drop - MUTATED) {"),
    "adds up a group before it is done": left_out("hopper::wgmma_wait<1>();\n            if (w_latest"),
}


class WgmmaShim:
    """The wgmma engine, compiled by g++ and run thread by thread: roles, barriers, copies and the matrix instruction.

    What a GPU orders less strictly than this (memory as other threads see it, the asynchronous proxy) it does not show.
    """

    def __init__(self, folder: Path) -> None:
        # Both meet at barriers as hopper.cuh has them.
        files = ["wgmma.cu", "listed.cu"]
        source = amalgamate({**modelnew._sources, "hopper.cuh": HOPPER_STAND_IN}, files)
        source = with_mutations(source, WGMMA_MUTATIONS)
        self.library = compile_simt(source + '#line 1 "entry_points"\n' + WGMMA_SHIM_ENTRY_POINTS, folder)
        self.library.simt_message.restype = ctypes.c_char_p

    def run(
        self, operator: str, case: Case, tensors: dict[str, Tensor], configuration: int, seed: int, out: Tensor
    ) -> str | None:
        """Runs fprop or dgrad of one configuration into `out`: None if there is no such plan, else what went wrong."""
        tf32 = configuration not in WGMMA_SPLIT_CONFIGURATIONS
        fields = ShimEngine.fields(case, tensors | {{"fprop": "dy", "dgrad": "x"}[operator]: out}, tf32)
        pointers = (ctypes.c_void_p * 5)(*input_pointers(operator, tensors), out.data_ptr())
        code = self.library.wgmma_run(OPERATOR_NUMBER[operator], fields, pointers, configuration, seed)
        if code == -1:
            return None
        return "" if code == 0 else f"error {code}, {self.library.simt_message().decode()}"

    def fault(self, operator: str, case: Case, dtype: torch.dtype, configuration: int, seed: int) -> str | None:
        """What is wrong with a run on integers, with a bias or without and at any alignment, or an empty text."""
        rng = random.Random(seed)
        tensors = make_tensors(case, dtype, integers, seed=seed)
        shift = rng.choice([0, 0, 0, 1, 2, 3])  # elements
        tensors = {name: shifted(tensor, shift) for name, tensor in tensors.items()}
        expected = references(case, tensors)[operator]
        if operator == "fprop" and rng.random() < 0.5:
            expected -= tensors.pop("bias").double().view(-1, 1, 1)
        out = shifted(tensors["x"].new_full(expected.shape, math.nan), rng.choice([0, 0, 0, 1, 2, 3]))
        message = self.run(operator, case, tensors, configuration, seed, out)
        if message == "" and not torch.equal(out, expected.to(dtype)):
            message = f"{(out != expected.to(dtype)).sum()} of {out.numel()} outputs are wrong"
        if message == "" and not margins_intact(out):
            message = "written outside the output"
        return message


def shifted(tensor: Tensor, elements: int) -> Tensor:
    """A copy that starts so many elements behind an aligned address, NaN before and behind it."""
    behind = with_margins(torch.cat([tensor.new_full((elements,), math.nan), tensor.flatten()]))
    return behind[elements:].view(tensor.shape)


@built_beside_the_tests
def wgmma_shim(folder: Path) -> WgmmaShim:
    return WgmmaShim(folder)


def small_wgmma_cases(count: int, seed: int) -> Iterator[tuple[Case, str, torch.dtype]]:
    """A few tiles each: one to three rows of them, ragged channels, filters, padding, dilation, groups."""
    rng = random.Random(seed)
    while count > 0:
        groups, R, S = rng.choice([1, 1, 1, 2]), rng.randint(1, 3), rng.randint(1, 4)
        C, K = groups * rng.choice([8, 9, 16, 16, 24, 40, 64]), groups * rng.choice([8, 20, 64, 100, 128, 130, 200])
        H, W = rng.randint(R, 9), rng.choice([rng.randint(32, 92), rng.randint(100, 300), rng.randint(250, 600)])
        padding, dilation = (rng.randint(0, 1), rng.randint(0, 2)), (rng.choice([1, 1, 2]), rng.choice([1, 1, 2]))
        case = Case(rng.randint(1, 2), C, H, W, K, R, S, (1, 1), padding, dilation, groups)
        if min(case.y_shape) > 0 and case.y_shape[3] >= 32:
            yield case, rng.choice(WGMMA_OPERATORS), rng.choice(WGMMA_DTYPES)
            count -= 1


@pytest.mark.parametrize("configuration", sorted(wgmma_configurations(torch.float32) | WGMMA_SPLIT_CONFIGURATIONS))
def test_wgmma_shim_exact(wgmma_shim, configuration):
    runs, only_fp32 = 0, configuration >= 16
    count = 6 if not only_fp32 else 2 if 64 <= configuration < 72 else 4  # these take every case
    for number, (case, operator, dtype) in enumerate(small_wgmma_cases(count, seed=configuration)):
        dtype = torch.float32 if only_fp32 else dtype
        fault = wgmma_shim.fault(operator, case, dtype, configuration, seed=number)
        assert not fault, f"{operator} of {case}, {dtype}, seed {number}: {fault}"
        runs += fault is not None
    assert runs >= 2


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
    tensors = make_tensors(case, torch.float32, integers, seed=number)
    expected = references(case, tensors)[operator]
    out = with_margins(torch.full(expected.shape, math.nan))
    assert wgmma_shim.run(operator, case, tensors, configuration, number, out) == ""
    assert ctypes.c_int.in_dll(wgmma_shim.library, "chunks").value == 1
    assert torch.equal(out, expected.float())
    assert margins_intact(out)


# Kinds of adverse data that are contained all the same, or but for a few tiles.
CONTAINED_KINDS = {"zero rows", "zero images", "all zero", "faint output channel"}
MARKED_KINDS = {"1e-30 beside 1e30", "few small", "few large", "few denormals", "one outlier"}
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
    out = with_margins(torch.full({"fprop": case.y_shape, "dgrad": case.x_shape}[operator], math.nan))
    assert wgmma_shim.run(operator, case, tensors, configuration, number, out) == ""
    check_bounds(case, {operator: out}, tensors, tf32={operator} if cases is ADVERSE_SHIM_CASES else ())
    assert margins_intact(out)
    done, of = (ctypes.c_int.in_dll(wgmma_shim.library, name).value for name in ("done_again", "of_tiles"))
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
    out = with_margins(torch.full(case.y_shape, math.nan))
    assert wgmma_shim.run("fprop", case, tensors, configuration, seed=column, out=out) == ""
    tf32 = configuration not in WGMMA_SPLIT_CONFIGURATIONS
    if math.isfinite(value):
        check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"} if tf32 else ())
    else:
        expected = references(case, tensors)["fprop"]
        finite = expected.isfinite()
        assert same_values(out[~finite], expected[~finite].float())
        assert torch.allclose(out[finite].double(), expected[finite], rtol=1e-5, atol=1e-4)
    assert ctypes.c_int.in_dll(wgmma_shim.library, "done_again").value == tiles


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
        message = wgmma_shim.run("fprop", of, operands, configuration, seed, out)
        assert message == "" or (message is None and configuration == 16 and of is case)
        if message == "":
            check_exact(of, {"fprop": out}, operands)


@pytest.mark.parametrize("mutation", WGMMA_MUTATIONS)
def test_wgmma_shim_sees_what_is_missing(mutation, wgmma_shim):
    """The shim itself: a synchronisation that is left out shows in one of a few runs."""
    cases = [
        (Case(2, 64, 9, 300, 128, 3, 3), -1, torch.float16),
        (Case(2, 16, 9, 600, 128, 3, 3), 0, torch.float16),
        (Case(1, 16, 16, 300, 128, 3, 3), 8, torch.float16),
        (Case(1, 72, 9, 300, 128, 3, 3), 1, torch.float32),
        (Case(2, 16, 9, 600, 128, 3, 3), 0, torch.float32),
    ]
    if "adds up" in mutation:
        cases = [(Case(1, 16, 9, 300, 128, 3, 3), 64, torch.float32)]
    elif "box" in mutation:
        cases = [cases[1], cases[4]]
    with mutated(wgmma_shim.library, WGMMA_MUTATIONS, mutation):
        assert any(
            wgmma_shim.fault("fprop", case, dtype, configuration, seed)
            for seed in range(6)
            for case, configuration, dtype in cases
        )


# The gather engine without a GPU --------------------------------------------------------------------------------------

GATHER_ENTRY_POINTS = (
    """
#include <algorithm>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

extern "C" {
int simt_mutation = 0;  // the number of the one that takes place, see with_mutations
}

#include "gather.cu"
#include "tma.cu"
"""
    + PROBLEM_FROM_FIELDS
    + r"""
using namespace modelnew;
using namespace modelnew::gather;

static std::set<std::string> seen;  // kinds of plans

static int64_t offset_of(const int64_t (&stride)[4], int64_t n, int64_t row, int64_t column) {
  return n * stride[0] + row * stride[2] + column * stride[3];
}

// What is wrong with the numbers of a plan, or nothing. Here and below `of` is what the plan is of, a copy of x where
// it has one, and `bytes` are those of a value that it reads or writes.
static std::string fault_of_numbers(const Phased& of, const Plan& plan, int bytes) {
  const SharedLayout layout = shared_layout(plan);
  const int channels = 16 / bytes;
  const bool planes = plan.planes;
  // Of each block of an SM the system takes 1 KB.
  const int on_sm = blocks_per_sm(plan.warpgroups);
  if (plan.warpgroups < 1 || plan.warpgroups > 3 || on_sm != (plan.warpgroups == 1 ? 2 : 1))
    return "blocks of an SM";
  // What a thread may have is a multiple of 8, and a block starts with all that it gives and takes.
  const auto have_registers = [&](int multiply, int gather) {
    const int start = start_registers(plan.warpgroups), threads = threads_of(plan.warpgroups) * on_sm;
    return start * threads <= 64 << 10 && multiply % 8 == 0 && gather % 8 == 0 && gather >= 24 && multiply < 256 &&
           (plan.warpgroups * multiply + gather) * 128 * on_sm <= start * threads;
  };
  const int w = plan.warpgroups;
  if (!have_registers(Tf32::multiply_registers(w), Tf32::gather_registers(w)) ||
      !have_registers(Contained::multiply_registers(w), Contained::gather_registers(w)) ||
      !have_registers(Again::multiply_registers(w), Again::gather_registers(w)))
    return "registers";
  if (on_sm * (layout.end + 1024) > 228 << 10 || layout.end != plan.smem_bytes) return "shared memory";
  if (plan.x_stage_bytes <= 0 || plan.w_stage_bytes <= 0) return "stages of nothing";
  if (on_sm > 1 && (!plan.points || bytes != 4)) return "two blocks an SM, but not of points in fp32";
  if (tile_pixels(plan) != 64 * plan.warpgroups * plan.blocks_m) return "pixels of a tile";
  if (plan.x_stages < 2 || plan.x_stages > kMaxStages) return "stages of x";
  if (plan.w_stages > kMaxStages || plan.w_stages < (plan.resident ? 1 : 3)) return "stages of weights";
  if (plan.x_stages > kFewStages && (!plan.points || plan.x_stages != plan.w_stages))
    return "many stages of one operand only";
  if (plan.resident && (plan.w_stages != plan.iterations || plan.splits > 1 || of.groups > 1 || !plan.points))
    return "weights that stay, but not all";
  if (plan.resident && plan.blocks < plan.units && plan.blocks % plan.tiles_n != 0)
    return "weights that stay for tiles of other channels";
  if (layout.x_ring % 16 || plan.x_stage_bytes % 16 || layout.w_ring % 16 || plan.w_stage_bytes % 16)
    return "stages that are not aligned";
  if (plan.boxes && (layout.staging % 1024 || kBoxStagingBytes % 1024)) return "staging of boxes";
  if (layout.staging < 4 * kMaxStages * 8) return "room for barriers";
  const int staging = plan.boxes ? 4 * (plan.in_phases ? 1 : 2) * kBoxStagingBytes : kStagingBytes;
  if (layout.table - layout.staging < plan.warpgroups * staging) return "room for staging";
  if (!plan.in_boxes && !plan.in_images && layout.x_ring - layout.table < 2 * ceil_div(plan.slots, 32) * 32 * 4)
    return "room for tables";
  if (layout.w_ring - layout.x_ring != plan.x_stages * plan.x_stage_bytes) return "the size of the x ring";
  if (layout.end - layout.w_ring != plan.w_stages * plan.w_stage_bytes) return "the size of the w ring";
  if (plan.contained && (!plan.copied || !plan.in_boxes || bytes != 2)) return "contained, but not boxes of a copy";
  // Of each image that 64 pixels so many times have some of, wherever they start.
  const int64_t plane = int64_t{of.P} * of.Q;
  const int64_t images = plan.in_images ? 1 + ceil_div(tile_pixels(plan) - 1, plane) : 1;
  const int64_t x_bytes = planes          ? images * plan.pieces * channels * plan.plane_slots * 4
                          : plan.in_boxes ? int64_t{plan.x_boxes} * plan.box_slots * 128
                                          : int64_t{plan.pieces} * plan.piece_slots * 16;
  if (plan.in_boxes) {
    if (layout.x_ring % 1024 || plan.x_stage_bytes != ceil_div(x_bytes, 1024) * 1024 || !plan.rows)
      return "stages of boxes";
    if (plan.x_boxes < 1 || plan.box_slots < 1 || plan.box_slots > 256) return "boxes of x";
    if (plan.box_step < 1 || plan.box_step > 8 || plan.box_slots * plan.box_step > 256) return "steps of boxes";
    if (plan.in_phases ? bytes != 4 || plan.copied || plan.points || plan.dense_slots || plan.box_step != 2
                       : plan.dense_slots && plan.box_step != 1)
      return "boxes of something else";
    // In the order of pieces of a slot the number of the slot in the stage counts, not that in the box.
    if (plan.apart ? plan.x_boxes != 1 || plan.box_slots != plan.slots || plan.dense_slots
        : plan.dense_slots ? plan.box_slots % 8 || int64_t{plan.x_boxes - 1} * plan.box_slots >= plan.slots ||
                               int64_t{plan.x_boxes} * plan.box_slots < plan.slots
                         : plan.box_slots != plan.pitch || int64_t{plan.x_boxes} * plan.pitch != plan.slots)
      return "slots of boxes";
  } else if (plan.dense_slots || plan.in_phases || plan.apart) {
    return "slots as in memory, phases of x or taps apart, but no boxes";
  }
  if (plan.apart != (plan.points && of.R * of.S > 1)) return "points of taps, or none";
  if (plan.apart && (bytes != 4 || plan.contained || on_sm != 1 || of.stride_h != 1 || of.stride_w != 1))
    return "taps of something else";
  if (plan.x_stage_bytes < x_bytes || plan.w_stage_bytes != plan.pieces * plan.tile_n * 16) return "bytes of a stage";
  if (plan.piece_slots < plan.slots || plan.plane_slots < (plan.in_images ? plane : tile_pixels(plan)))
    return "slots of a piece";
  if (plan.in_images && (bytes != 4 || !planes || of.R * of.S != 1 || of.in_channels % 32 || images > 32))
    return "images of something else";
  if (plan.in_images && (plan.plane_slots != plane || plan.image_words != 32 * plane)) return "words of an image";

  if (int64_t{plan.blocks_c} * plan.pieces * channels < of.in_channels) return "channels in no block";
  if (int64_t{plan.blocks_c - 1} * plan.pieces * channels >= of.in_channels) return "a block without channels";
  const int64_t stages = phases_of(of.phases) > 1 ? stages_before(of.phases, plan.blocks_c)
                                                  : int64_t{plan.blocks_c} * of.R * of.S;
  if (plan.iterations != stages) return "stages of weights in all";
  if (plan.tiles_n != ceil_div(of.out_channels, plan.tile_n)) return "tiles of channels";
  if (!plan.points && !plan.packed && plan.tile_p * plan.tile_q > tile_pixels(plan))
    return "more pixels than a tile has";
  if (plan.planes != (bytes == 4 && plan.points && plan.loads != Loads::kChannels)) return "planes";
  if (plan.splits < 1 || plan.splits != ceil_div(plan.blocks_c, plan.split_blocks)) return "parts of the reduction";
  const int64_t cut_up = plan.tiles - plan.whole_tiles;
  const int at_once = on_sm * 132;
  if (plan.whole_tiles % at_once && plan.whole_tiles != plan.tiles) return "whole tiles that do not fill all SMs";
  if (plan.splits > 1 ? cut_up < 1 || cut_up >= at_once : cut_up != 0) return "tiles that are cut up";
  if (plan.units != plan.whole_tiles + cut_up * plan.splits) return "units of work";
  if (plan.splits > 1) {
    if (plan.splits > 8 || plan.blocks % plan.splits) return "a cluster";
    if (cut_up * plan.splits > plan.blocks) return "two parts of a block";
    if (plan.whole_tiles % plan.blocks) return "parts of a tile that are not one cluster's";
    if (shared_layout(plan).x_ring + 4 * tile_pixels(plan) * plan.tile_n > plan.smem_bytes) return "room for sums";
    if (plan.splits > 2 && plan.blocks > 0.88 * at_once) return "clusters that do not run at once";
  }
  if (plan.tiles != int64_t{plan.tiles_m} * plan.tiles_n * of.groups) return "tiles in all";
  if (plan.blocks < 1 || plan.blocks > plan.units || plan.blocks > at_once) return "blocks";
  if (!(plan.cycles > 0)) return "no estimate";
  return "";
}

// What is wrong with the tiles, or nothing: every output is one tile's, in every block of channels.
static std::string fault_of_tiles(const Phased& of, const Plan& plan) {
  const int64_t pixels = of.N * of.P * of.Q;
  std::vector<int> owned(of.groups * plan.tiles_n * pixels);
  std::set<int64_t> parts;
  for (int unit = 0; unit < plan.units; ++unit) {
    const Tile tile = locate_tile(plan, unit);
    if (tile.group < 0 || tile.group >= of.groups || tile.n_block < 0 || tile.n_block >= plan.tiles_n)
      return "a tile outside";
    if (tile.first_block % plan.split_blocks || tile.blocks < 1 || tile.first_block + tile.blocks > plan.blocks_c)
      return "blocks of channels of a tile";
    if (tile.part >= 0) {
      const Tile of_cluster = locate_tile(plan, unit - tile.part % plan.splits);
      if (of_cluster.first != tile.first || of_cluster.q != tile.q || of_cluster.n_block != tile.n_block ||
          of_cluster.group != tile.group)
        return "parts of a tile that are no neighbours";
      if (part_of_tile(plan, tile.part) != tile.part % plan.splits) return "the number of a part in its tile";
    }
    if (tile.part < 0 ? tile.blocks != plan.blocks_c : !parts.insert(tile.part).second) return "the number of a part";
    const int64_t image = first_image(plan, tile);
    for (int m = 0; m < tile_pixels(plan); ++m) {
      int n, p, q;
      if (!locate_output(of, plan, tile, image, m, n, p, q)) continue;
      if (n < 0 || image + n >= of.N || p < 0 || p >= of.P || q < 0 || q >= of.Q) return "an output outside";
      const int64_t pixel = ((image + n) * of.P + p) * of.Q + q;
      owned[(int64_t{tile.group} * plan.tiles_n + tile.n_block) * pixels + pixel] += tile.blocks;
    }
    if (unit == 0 && owned[pixels - 1] == 0) return "the last pixels do not come first";
  }
  if (static_cast<int>(parts.size()) != plan.units - plan.whole_tiles || (!parts.empty() && *parts.begin() != 0))
    return "parts";
  return std::count(owned.begin(), owned.end(), plan.blocks_c) == static_cast<int64_t>(owned.size())
             ? ""
             : "blocks of channels of an output never or twice";
}

// What is wrong with what a tile reads, or nothing: each output at each tap what the convolution says.
static std::string fault_of_reads(const Phased& of, const Plan& plan, const Tile& tile, int bytes, uint64_t in) {
  const SharedLayout layout = shared_layout(plan);
  const int64_t image = first_image(plan, tile);
  const int channels = 16 / bytes, pixels = tile_pixels(plan);
  const bool planes = plan.planes;
  const int64_t plane = int64_t{of.P} * of.Q;
  const auto address = [&](int channel, int64_t offset) {
    const int64_t of_all = int64_t{tile.group} * of.in_channels + channel;
    return in + (image * of.in_stride[0] + of_all * of.in_stride[1] + offset) * bytes;
  };
  std::vector<int> taken(std::max(plan.piece_slots, plan.plane_slots));
  std::vector<int64_t> offsets(pixels, -1);  // of points, in their order; what is outside is -1 here as in the table
  const auto fault_of_offset = [&](int64_t offset) -> std::string {
    if (offset < 0 || offset >= int64_t{1} << 31) return "an offset that is no int";
    if (plan.loads == Loads::kChannels) {
      if (of.in_stride[1] != 1 || of.in_channels % channels) return "pieces that are not channels";
      for (int channel = 0; channel < of.in_channels; channel += channels)
        if (address(channel, offset) % 16) return "pieces that are not aligned";
    }
    return "";
  };
  // A copy has pixel after pixel, all channels of each: boxes go by its strides, and what writes it by these numbers.
  const auto is_pixel = [&](int64_t number, int64_t offset) {
    return image * of.in_stride[0] + offset == number * of.groups * of.in_channels;
  };
  int64_t first_pixel = -1;  // of slot 0, where those of a tile are as in memory
  for (int m = 0; m < pixels; ++m) {
    int n, p, q;
    const bool exists = locate_output(of, plan, tile, image, m, n, p, q);
    const int first = slot_of_output(of, plan, tile, image, m);
    if (plan.dense_slots && exists) {
      const int64_t line = (image + n) * of.H + int64_t{p} * of.stride_h;
      const int64_t pixel = line * of.W + int64_t{q} * of.stride_w;
      if (of.pad_h != 0 || of.pad_w != 0) return "slots as in memory, where no padding is";
      if (first_pixel < 0) first_pixel = pixel - first;
      if (first_pixel < 0 || pixel - first != first_pixel) return "slots that are not as in memory";
    }
    if (plan.in_images) {
      if (!exists) continue;
      // Channel after channel of 32, as they lie in memory, and each image behind the one before it.
      const int64_t word = word_of_point(plan, tile, image, m), before = 32 * int64_t{n} * of.H * of.W;
      for (int channel = 0; channel < of.in_channels; ++channel) {
        const int block = channel / 32, in_block = channel % 32;
        const uint64_t there = address(channel, offset_of(of.in_stride, n, p, q));
        const uint64_t copied = address(32 * block, n * of.in_stride[0]);  // from here on, for a stage
        if (copied % 16) return "copies of images that are not aligned";
        if (there != copied + 4 * (word - before + int64_t{in_block} * of.H * of.W)) return "another word of an image";
      }
      if (4 * (word + 31 * plane) >= plan.x_stage_bytes) return "words behind a stage";
      continue;
    }
    if (plan.points) {
      const int slots = planes ? plan.plane_slots : plan.piece_slots;
      if (first < 0 || first >= slots || taken[first]++) return "slots of points";
      const int64_t h = int64_t{p} * of.stride_h - of.pad_h, w = int64_t{q} * of.stride_w - of.pad_w;
      if (plan.apart) {
        if (first != m) return "slots of taps that are not in the order of outputs";
        for (int tap = 0; exists && tap < of.R * of.S; ++tap) {
          const int64_t row = h + tap / of.S * of.dilation_h, column = w + tap % of.S * of.dilation_w;
          if (row < 0 || row >= of.H || column < 0 || column >= of.W) continue;
          const int64_t offset = offset_of(of.in_stride, n, row, column);
          if (plan.copied && !is_pixel(((image + n) * of.H + row) * of.W + column, offset))
            return "another pixel of the copy";
          if (const std::string fault = fault_of_offset(offset); !fault.empty()) return fault;
        }
        continue;
      }
      if (!exists || (!plan.copied && (h < 0 || h >= of.H || w < 0 || w >= of.W))) continue;
      offsets[m] = offset_of(of.in_stride, n, h, w);
      if (plan.copied && !is_pixel(((image + n) * of.P + p) * of.Q + q, offsets[m])) return "another pixel of the copy";
      if (const std::string fault = fault_of_offset(offsets[m]); !fault.empty()) return fault;
      continue;
    }
    for (int r = 0; r < of.R; ++r)
      for (int s = 0; s < of.S; ++s) {
        const int64_t slot = first + int64_t{r} * of.dilation_h * plan.pitch + int64_t{s} * of.dilation_w;
        if (!exists) {  // it is multiplied all the same
          const int64_t last = layout.x_ring + int64_t{plan.x_stages - 1} * plan.x_stage_bytes;
          const int64_t byte = plan.rows ? slot * 128 + 112 : (int64_t{plan.pieces - 1} * plan.piece_slots + slot) * 16;
          if (slot < 0 || last + byte + 16 > layout.end) return "an address outside shared memory";
          continue;
        }
        if (slot < 0 || slot >= plan.slots) return "a slot outside";
        int in_n, h, w;
        const bool inside = locate_slot(of, plan, tile, image, static_cast<int>(slot), in_n, h, w);
        const int64_t true_h = int64_t{p} * of.stride_h - of.pad_h + int64_t{r} * of.dilation_h;
        const int64_t true_w = int64_t{q} * of.stride_w - of.pad_w + int64_t{s} * of.dilation_w;
        if (inside != (true_h >= 0 && true_h < of.H && true_w >= 0 && true_w < of.W)) return "the edge of an image";
        if (inside && (in_n != n || h != true_h || w != true_w)) return "another place of x";
      }
  }
  for (int slot = 0; slot < plan.slots && !plan.points; ++slot) {
    int n, h, w, row_n, row_h, row_w;
    const bool inside = locate_slot(of, plan, tile, image, slot, n, h, w);
    if (plan.in_boxes && !plan.dense_slots) {
      // Columns of a phase are as far apart as they have to be.
      locate_slot(of, plan, tile, image, slot / plan.pitch * plan.pitch, row_n, row_h, row_w);
      const int step = plan.in_phases ? 1 : plan.box_step;
      if (n != row_n || h != row_h || w != row_w + slot % plan.pitch * step) return "slots of a box that are no row";
    }
    if (!inside) continue;
    if (n < 0 || image + n >= of.N || h < 0 || h >= of.H || w < 0 || w >= of.W) return "x outside";
    if (plan.dense_slots && ((image + n) * of.H + h) * of.W + w != first_pixel + slot)
      return "another pixel than memory has in this place";
    const int64_t offset = offset_of(of.in_stride, n, h, w);
    if (plan.copied && !is_pixel(((image + n) * of.H + h) * of.W + w, offset)) return "another pixel of the copy";
    if (const std::string fault = fault_of_offset(offset); !fault.empty()) return fault;
  }
  if (plan.loads != Loads::kPixels) return "";
  if (!plan.points) return "fours of pixels in windows";
  for (int m = 0; m < pixels; m += 4)
    for (int j = 0; j < 4; ++j) {
      if (offsets[m + j] != (offsets[m] < 0 ? -1 : offsets[m] + j)) return "fours of pixels that are no neighbours";
      for (int channel = 0; channel < of.in_channels && offsets[m] >= 0; ++channel)
        if (address(channel, offsets[m]) % (4 * bytes)) return "fours of pixels that are not aligned";
    }
  return "";
}

// What is wrong with what a tile writes, or nothing.
static std::string fault_of_writes(const Phased& of, const Plan& plan, const Tile& tile, int bytes, uint64_t out) {
  const int64_t image = first_image(plan, tile);
  const int first_k = tile.n_block * plan.tile_n, channels = std::min(plan.tile_n, of.out_channels - first_k);
  const int64_t channel_of_all = int64_t{tile.group} * of.out_channels + first_k;
  std::vector<int64_t> offsets(tile_pixels(plan), -1);
  for (int m = 0; m < tile_pixels(plan); ++m) {
    int n, p, q;
    if (!locate_output(of, plan, tile, image, m, n, p, q)) continue;
    offsets[m] = offset_of(of.out_stride, n, p, q);
    if (offsets[m] < 0 || offsets[m] >= int64_t{1} << 31) return "an offset that is no int";
    const int64_t number = first_output(plan, tile) + m, plane = int64_t{of.P} * of.Q;
    const int64_t expected = plan.out_channels_last
                                 ? number * of.out_stride[3]
                                 : number / plane * of.out_stride[0] + number % plane * of.out_stride[3];
    if (plan.boxes && (plan.points || plan.packed) && expected != image * of.out_stride[0] + offsets[m])
      return "boxes of pixels that do not follow one another";
  }
  // Of lines a box has 16 outputs of a row, or none.
  const int64_t step = plan.out_channels_last ? of.out_stride[3] : 1;
  for (int m = 0; m < tile_pixels(plan) && plan.boxes && !plan.points && !plan.packed; ++m)
    if (offsets[m] != (offsets[m / 16 * 16] < 0 ? -1 : offsets[m / 16 * 16] + m % 16 * step))
      return "boxes of pixels of several rows";
  if (plan.boxes) {
    if (bytes != 4 || out % 16) return "boxes of other tensors";
    if (plan.out_channels_last) {
      if (channel_of_all % 4) return "boxes of channels that are not aligned";
      if (of.N * of.P * of.Q > 1 && of.out_stride[3] % 4) return "boxes of pixels that are not aligned";
    } else {
      if (of.out_stride[3] != 1 || of.P * of.Q % 4) return "boxes of pixels that are no neighbours";
      if (of.P * of.Q < 16) return "boxes of three images";
      if (of.out_stride[1] % 4 || (of.N > 1 && of.out_stride[0] % 4)) return "boxes of planes that are not aligned";
      for (int m = 0; m < tile_pixels(plan); m += 4)
        if (offsets[m] >= 0 && (image * of.out_stride[0] + offsets[m]) % 4) return "boxes that start between fours";
    }
    if (of.groups > 1 && channels % kStagedChannels) return "boxes that reach into the next group";
  }
  if (plan.out_channels_last && of.out_stride[1] != 1) return "channels that are no neighbours";
  if (plan.vector != 4) return plan.vector == 1 ? "" : "neither fours nor single values";
  if (plan.out_channels_last && channels % 4) return "fours of channels that do not exist";
  for (int m = 0; m < tile_pixels(plan); ++m) {
    if (!plan.out_channels_last && offsets[m] != (offsets[m / 4 * 4] < 0 ? -1 : offsets[m / 4 * 4] + m % 4))
      return "fours of pixels of y that are no neighbours";
    if (offsets[m] < 0 || (m % 4 && !plan.out_channels_last)) continue;
    for (int k = 0; k < channels; k += plan.out_channels_last ? 4 : 1) {
      const int64_t offset = image * of.out_stride[0] + (channel_of_all + k) * of.out_stride[1] + offsets[m];
      if ((out + offset * bytes) % (4 * bytes)) return "fours of y that are not aligned";
    }
  }
  return "";
}

// All of it: every tile, and of a few at random what they read and write.
static std::string fault_of_plan(const Phased& of, const Plan& plan, int in_bytes, int out_bytes, uint64_t in,
                                 uint64_t out, std::mt19937& shuffler) {
  std::string fault = fault_of_numbers(of, plan, in_bytes);
  if (fault.empty()) fault = fault_of_tiles(of, plan);
  for (int i = 0; i < 4 && fault.empty(); ++i) {
    const int units = plan.units;
    const Tile tile = locate_tile(plan, i == 0 ? 0 : i == 1 ? units - 1 : static_cast<int>(shuffler() % units));
    fault = fault_of_reads(of, plan, tile, in_bytes, in);
    if (fault.empty()) fault = fault_of_writes(of, plan, tile, out_bytes, out);
  }
  return fault;
}

// Tiles of what lands, as their kernels have them.
struct LandingNumbers {
  int tile_n, rows, columns, stride;
  int pitch, product_slots;        // of a row, of both products
  int landed_rows, plane_columns;  // of all boxes of a window; 0 columns: no planes
  int pixel_columns;               // in channels_last; 0: not there
  int staged_rows;                 // at a time
};
constexpr LandingNumbers kLandingNumbers[] = {
    {64, 7, 32, 1, 34, 240, 16, 40, 34, 7},  {64, 8, 32, 1, 34, 272, 18, 40, 34, 8},
    {128, 7, 32, 1, 34, 240, 9, 40, 34, 7},  {128, 8, 32, 1, 34, 272, 10, 40, 34, 8},
    {128, 7, 28, 1, 30, 208, 9, 36, 30, 7},  {128, 14, 14, 1, 16, 224, 16, 0, 16, 14},
    {128, 7, 28, 2, 30, 208, 16, 56, 0, 4},  {128, 14, 14, 2, 16, 224, 32, 28, 0, 4},
    {128, 7, 14, 2, 16, 112, 16, 28, 0, 4},
};
static_assert(std::size(kTileShapes) == 12 + std::size(kLandingNumbers) + 3, "all tiles of what lands");

// What is wrong with the shared memory of what lands, or nothing.
static std::string fault_of_landing_layout(const Phased& of, const Plan& plan, const LandingNumbers& tile) {
  const Landing& landing = plan.landing;
  const LandingLayout layout = landing_layout(plan);
  const bool shares = tile.tile_n == 128, channels_last = landing.shape.channels_last;
  const auto up = [](int bytes) { return (bytes + 511) / 512 * 512; };  // where the order of pieces starts anew
  if (layout.end != plan.smem_bytes || layout.end > 232448) return "shared memory";
  if (layout.staging < 56 * 8 || layout.staging % 1024) return "room for barriers";
  const int staged_bytes = channels_last ? up(64 * tile.columns * tile.staged_rows) : 16 * 128 * tile.staged_rows;
  if (layout.landed - layout.staging != 4 * staged_bytes) return "staging";
  const int landed_bytes = channels_last ? 64 * tile.pixel_columns * tile.landed_rows
                                         : 8 * tile.plane_columns * tile.landed_rows * 4;
  if (landed_bytes == 0) return "no kernel of this layout";
  if (layout.landed % 512 || landing.stage_bytes % 128) return "landed boxes";
  if (landing.stage_bytes != (channels_last ? up(landed_bytes) : landed_bytes)) return "landed boxes";
  if (layout.x_ring - layout.landed != landing.stages * landing.stage_bytes) return "the ring of landed boxes";
  if (layout.x_ring % 16 || plan.x_stage_bytes != 2 * 16 * landing.slots) return "windows";
  if (layout.w_ring - layout.x_ring != plan.x_stages * plan.x_stage_bytes) return "the ring of windows";
  // Of a step, or of a row of taps of it.
  if (landing.w_stages_of_step != (shares ? 3 : 1)) return "stages of weights of a step";
  if (layout.w_ring % 16 || plan.w_stage_bytes != (shares ? 1 : of.R) * 3 * 2 * 16 * tile.tile_n) return "weights";
  if (layout.end - layout.w_ring != plan.w_stages * plan.w_stage_bytes) return "the ring of weights";
  if (landing.stages < 2 || landing.stages > 4 || plan.x_stages < 2 || plan.x_stages > 4) return "stages";
  return plan.w_stages < (shares ? 3 : 2) || plan.w_stages > (shares ? 6 : 4) ? "stages of weights" : "";
}

// What is wrong with a plan by which x is contained on its way, or nothing: all of it.
static std::string fault_of_landing(const Phased& of, const Plan& plan, uint64_t in, uint64_t out) {
  const Landing& landing = plan.landing;
  const LandingShape& shape = landing.shape;
  const bool channels_last = shape.channels_last;
  const auto numbers = std::find_if(std::begin(kLandingNumbers), std::end(kLandingNumbers), [&](const auto& one) {
    return one.tile_n == plan.tile_n && one.rows == plan.blocks_m && one.columns == plan.tile_q &&
           one.stride == of.stride_h;
  });
  if (numbers == std::end(kLandingNumbers)) return "no kernel of such a tile";
  const auto [tile_n, rows, columns, stride, pitch, product_slots, landed_rows, plane_columns, pixel_columns,
              staged_rows] = *numbers;
  const bool whole_rows = stride == 2;
  if (shape.tile_n != tile_n || shape.rows != rows || shape.columns != columns || shape.stride != stride)
    return "another kernel";
  if (shape.shares() != (tile_n == 128)) return "channels of a tile";
  if (shape.shares() && of.R != 3) return "rows of a filter that the kernel does not know";
  const int warpgroups = shape.shares() ? 1 : 2;
  if (!plan.contained || plan.copied || plan.in_boxes || plan.in_phases || of.groups != 1) return "another plan";
  if (of.S != 3 || of.stride_w != stride || of.dilation_h * of.dilation_w != 1) return "another filter";
  if (std::string fault = fault_of_landing_layout(of, plan, *numbers); !fault.empty()) return fault;
  if (landing.steps * 16 < of.in_channels || (landing.steps - 1) * 16 >= of.in_channels) return "steps";
  if (plan.iterations != ceil_div(of.in_channels, 16) * of.R * of.S) return "stages of weights in all";
  if (plan.tiles_n != ceil_div(of.out_channels, plan.tile_n) || plan.pieces != 2) return "packed weights";
  if (plan.units != plan.tiles || plan.blocks != std::min(132, plan.units)) return "units of work";
  // What is side by side, by fours, and the others by fours of these.
  const auto in_fours = [&](const int64_t (&stride)[4], int channels, int rows, int columns) {
    const int64_t sizes[4] = {of.N, channels, rows, columns};
    const int side_by_side = channels_last ? 1 : 3;
    bool are = stride[side_by_side] == 1 && sizes[side_by_side] % 4 == 0;
    for (int i = 0; i < 4; ++i) are &= i == side_by_side || sizes[i] == 1 || stride[i] % 4 == 0;
    return are;
  };
  if (in % 16 || !in_fours(of.in_stride, of.in_channels, of.H, of.W)) return "boxes of x that are not aligned";
  // Rows of 14 columns of a plane are no sixteens of bytes.
  if (plan.boxes != (channels_last || columns > 14)) return "boxes of y, or none";
  if (plan.boxes && (out % 16 || !in_fours(of.out_stride, of.out_channels, of.P, of.Q)))
    return "boxes of y that are not aligned";
  if (of.N * of.H * of.W * ceil_div(of.in_channels, 8) * 8 >= int64_t{1} << 31) return "places that are no ints";
  if (warpgroups * landing.rows != landing.span || landing.rows > rows) return "rows of a tile";
  if (shape.staged_rows() != staged_rows || landing.rows > 4 * staged_rows) return "rows that are never staged";
  // Staged rows of planes are of 32 columns, whose rest would be another tile's.
  if (!channels_last && columns < 32 && plan.tiles_q != 1) return "boxes of y that overlap";
  const int window_rows = stride * (landing.span - 1) + of.R, window_columns = stride * (columns - 1) + 3;
  if (landing.window_rows != window_rows || window_rows > landed_rows) return "rows of a window";
  // Boxes of whole rows, of which four are one, have all columns of x and nothing else.
  if (whole_rows && (of.W != plane_columns || of.pad_w != 1 || of.W + of.pad_w > window_columns))
    return "rows that are not those of a box";
  if (whole_rows && of.H > 1 && of.in_stride[2] != of.W) return "rows that do not follow one another";
  if (shape.box_rows() != (whole_rows ? 4 : landed_rows) || shape.boxes() != (whole_rows ? landed_rows / 4 : 1) ||
      (whole_rows && shape.box_bytes() != 8 * 4 * plane_columns * 4))
    return "boxes of rows";
  if (!whole_rows && landing.lead + window_columns > (channels_last ? pixel_columns : plane_columns))
    return "columns that do not land";
  // What slots hold of a window: its rows and columns, each of them once.
  std::vector<std::pair<int, int>> held(landing.slots, {-1, -1});
  for (int row = 0; row < window_rows; ++row)
    for (int column = 0; column < window_columns; ++column) {
      const int slot = shape.slot_of(row, column);
      if (slot < 0 || slot >= landing.slots || held[slot].first >= 0) return "a slot outside the window, or of two";
      held[slot] = {row, column};
    }
  // Of phases neighbouring columns are stored at once.
  if (whole_rows && std::abs(shape.slot_of(0, 1) - shape.slot_of(0, 0)) % 8 != 4) return "banks of two phases";
  for (int r = 0; r < of.R; ++r)
    for (int s = 0; s < of.S; ++s)
      if ((landing.span - landing.rows) * pitch + shape.slot_of(r, s) + product_slots > landing.slots)
        return "slots behind the window";
  std::vector<int> owned(of.N * of.P * of.Q * plan.tiles_n), listed(of.N * of.H * of.W), read(of.N * of.H * of.W);
  for (int unit = 0; unit < plan.units; ++unit) {
    const LandingTile tile = locate_landing(plan, unit);
    if (tile.n < 0 || tile.n >= of.N || tile.n_block < 0 || tile.n_block >= plan.tiles_n) return "a tile outside";
    if (channels_last || whole_rows ? landing.lead != 0 : (tile.q - of.pad_w - landing.lead) % 4 || landing.lead < 0)
      return "a box that starts between fours";
    if (whole_rows ? tile.q != 0 : tile.q % 4 && !channels_last) return "a box of y that starts between fours";
    const int first_h = tile.p * stride - of.pad_h, first_w = tile.q * stride - of.pad_w;
    const auto place = [&](int h, int w) { return (static_cast<int64_t>(tile.n) * of.H + h) * of.W + w; };
    for (int row = 0; row < landing.span; ++row)
      for (int column = 0; column < columns; ++column) {
        const int p = tile.p + row, q = tile.q + column;
        if (p >= of.P || q >= of.Q) continue;
        const int own_row = row % landing.rows, m = own_row * pitch + column;
        if (m >= product_slots || column >= pitch) return "an output that is no row of the product";
        ++owned[((int64_t{tile.n} * of.P + p) * of.Q + q) * plan.tiles_n + tile.n_block];
        for (int r = 0; r < of.R; ++r)
          for (int s = 0; s < of.S; ++s) {
            const int slot = (row - own_row) * pitch + shape.slot_of(r, s) + m;
            if (slot >= landing.slots || held[slot].first < 0) return "a tap outside the window";
            const int h = first_h + held[slot].first, w = first_w + held[slot].second;
            if (h != p * stride - of.pad_h + r || w != q * stride - of.pad_w + s) return "another place of x";
            if (h >= 0 && h < of.H && w >= 0 && w < of.W) read[place(h, w)] = 1;
          }
      }
    for (int row = 0; row < window_rows; ++row)
      for (int column = 0; column < window_columns; ++column) {
        const int h = first_h + row, w = first_w + column;
        if (h < 0 || h >= of.H || w < 0 || w >= of.W) continue;
        listed[place(h, w)] += lists(of, plan, tile, row, column);
      }
  }
  for (int once : owned)
    if (once != 1) return "an output never or twice";
  for (size_t i = 0; i < listed.size(); ++i)
    if (listed[i] > 1 || listed[i] < read[i]) return "a value that is listed never or twice";
  return plan.cycles > 0 ? "" : "no estimate";
}

// Of the workspace with parts of at least so many bytes: what is wrong, or nothing.
static std::string fault_of_layout(const WorkspaceLayout& layout, const Plan& plan, int64_t rows, int64_t packed_bytes,
                                   int64_t packed_again_bytes, int64_t copied_bytes) {
  if ((layout.samples | layout.list | layout.w_factors | layout.packed | layout.packed_again | layout.copied) % 16)
    return "parts of the workspace that are not aligned";
  if (layout.packed_again - layout.packed < packed_bytes) return "room for weights";
  if (layout.end - layout.copied < copied_bytes) return "room for the copy of x";
  const int64_t more = 7 * 128 + sizeof(ContainedControl) + 4 * kSampleBlocks + kMostListed * sizeof(Listed) + 4 * rows;
  if (layout.end > packed_bytes + packed_again_bytes + copied_bytes + more) return "room for what no kernel uses";
  if (!plan.contained) return "";
  if (layout.samples < static_cast<int64_t>(sizeof(ContainedControl))) return "room for what kernels tell each other";
  if (layout.list - layout.samples < 4 * kSampleBlocks) return "room for samples";
  if (layout.w_factors - layout.list < static_cast<int64_t>(kMostListed * sizeof(Listed))) return "room for the list";
  if (layout.packed - layout.w_factors < 4 * rows) return "room for factors";
  return layout.copied - layout.packed_again < packed_again_bytes ? "room for weights packed again" : "";
}

// What is wrong with phases along one axis, or nothing: each tap of the filter is one of a phase's, which reads from
// its rows what the filter read. They are those of a copy, or (H > 0) of that many rows of x itself.
static std::string fault_of_axis(int R, int stride, int pad, int P, int H, int phases, const int (&first)[2],
                                 const int (&taps)[2], int own_R, int own_H, int own_pad) {
  if (phases != 2 || stride != 1) return "the number of phases";
  // Row p * 2 - pad + r of x is row `(r - pad) >> 1` behind p of phase `(r - pad) & 1`; a copy starts at p == 0.
  const int start = -pad >> 1;
  int seen_taps = 0;
  for (int phase = 0; phase < 2; ++phase) {
    if (taps[phase] < 1 || first[phase] < 0 || first[phase] + taps[phase] > own_R) return "taps of a phase";
    for (int i = 0; i < taps[phase]; ++i, ++seen_taps) {
      const int r = 2 * (start + first[phase] + i) + phase + pad;
      if (r < 0 || r >= R) return "a tap that the filter has not";
    }
  }
  if (seen_taps != R) return "taps in no phase";
  if (own_R != ((R - 1 - pad) >> 1) - start + 1) return "the size of a filter by phases";
  if (H > 0) return 2 * own_H - H != H % 2 ? "pairs of rows" : own_pad != -start ? "the padding of phases" : "";
  return own_H == P + own_R - 1 && own_pad == 0 ? "" : "the size of a copy in phases";
}

// Of a copy, or of phases of x itself: blocks have so many channels.
static std::string fault_of_phases(const Phased& of, const Phased& own, int block, int blocks_c) {
  const Phases& phases = own.phases;
  const bool wanted = of.stride_h == 2 && of.stride_w == 2 && of.R > 1 && of.S > 1 && of.dilation_h == 1 &&
                      of.dilation_w == 1, from_x = block == 32;
  if ((phases_of(phases) > 1) != wanted) return "phases, or none";
  if (!wanted) return "";
  std::string fault = fault_of_axis(of.R, own.stride_h, of.pad_h, of.P, from_x ? of.H : 0, phases.rows,
                                    phases.first_r, phases.r, own.R, own.H, own.pad_h);
  if (fault.empty())
    fault = fault_of_axis(of.S, own.stride_w, of.pad_w, of.Q, from_x ? of.W : 0, phases.columns, phases.first_s,
                          phases.s, own.S, own.W, own.pad_w);
  if (!fault.empty()) return fault;
  if (own.in_channels != 4 * ceil_div(of.in_channels, block) * block || blocks_c % 4) return "channels of phases";
  if (from_x && !std::equal(own.in_stride, own.in_stride + 4, of.in_stride)) return "strides of another tensor";
  if (stages_before(phases, 0) != 0) return "stages before the first one";
  for (int block = 0; block < blocks_c; ++block)
    if (stages_before(phases, block + 1) - stages_before(phases, block) !=
        phases.r[block % 4 / 2] * phases.s[block % 2])
      return "stages of a block";
  return stages_before(phases, blocks_c) == blocks_c / 4 * of.R * of.S ? "" : "stages of all blocks";
}

// Groups as they are multiplied: several as one, of 64 channels, where there are so many.
static std::string fault_of_groups(const Phased& of, const Phased& own) {
  const int several = of.groups > 1 && 64 % of.in_channels == 0 ? 64 / of.in_channels : 1;
  if (own.merged != (of.groups % several == 0 ? several : 1)) return "groups as one";
  const bool all = own.groups * own.merged == of.groups && own.in_channels == own.merged * of.in_channels &&
                   own.out_channels == own.merged * of.out_channels;
  return all ? "" : "channels of groups as one";
}

// What is wrong with what tma is to multiply, or nothing.
static std::string fault_of_tma(const Phased& of, const Plan& plan, uint64_t out) {
  const Phased copy = copied(of, true, true);
  if (!plan.contained || !plan.copied || plan.lands || plan.splits != 1 || !(plan.cycles > 0)) return "another plan";
  if (phases_of(copy.phases) != 1) return "a copy in phases";
  if (copy.in_channels % 8 || copy.in_channels < merged(of).in_channels) return "channels of the copy";
  const tma::Planned planned = tma::plan_contained(copy, 132, out);
  if (!planned.found || !planned.plan.contained) return "no plan of tma's";
  const int taps = copy.R * copy.S, pieces = copy.in_channels / 8, channels = copy.groups * copy.out_channels;
  const int64_t rows = packed_rows(copy, plan.tile_n);
  if (rows < channels || rows % kMostRowsOfBlock) return "rows of weights";
  if (plan.iterations * plan.pieces != taps * pieces || tma::packed_row_channels(planned.of) != copy.in_channels)
    return "a row of weights";
  return "";
}

static void note(const Phased& of, const Plan& plan) {
  if (simt_mutation != 0) return;  // kinds are those of the engine as it is
  if (plan.by_tma) {
    seen.insert(std::string("contained, by tma") + (of.in_channels % 8 ? ", channels filled up" : ""));
    if (of.groups > 1) seen.insert(merged(of).merged > 1 ? "by tma, groups as one" : "by tma, groups");
    if (has_phases(of)) seen.insert("by tma, a stride");
    return;
  }
  const char* const loads[] = {"single", "pixels", "channels"};
  const std::string kind = plan.points ? "points" : "windows";
  seen.insert(kind + ", x by " + (plan.in_images ? "images" : loads[static_cast<int>(plan.loads)]));
  seen.insert(kind + (plan.out_channels_last ? ", channels of y by " : ", pixels of y by ") +
              (plan.boxes ? "boxes" : plan.vector == 4 ? "fours" : "one"));
  const char* const parts = plan.whole_tiles > 0 ? ", some tiles in parts" : ", all tiles in parts";
  if (plan.splits > 1) seen.insert(kind + parts);
  if (plan.warpgroups == 3) {
    const char* const small = plan.in_boxes ? ", 64 channels by boxes" : ", 64 channels by fours";
    const char* const how = plan.contained ? ", contained" : plan.tile_n == 64 ? small : "";
    seen.insert(kind + ", three warpgroups" + how + (plan.splits > 1 ? ", tiles in parts" : ""));
  }
  if (plan.warpgroups == 1) {
    seen.insert("two blocks an SM, tiles of " + std::to_string(tile_pixels(plan)) + " pixels by " +
                (plan.in_boxes ? "boxes" : "fours") + (plan.copied ? " of a copy" : ""));
    if (plan.splits > 1) seen.insert(std::string("two blocks an SM") + parts);
  }
  if (plan.lands) {
    const char* const layout = plan.landing.shape.channels_last ? ", channels_last" : "";
    const char* const what = plan.landing.shape.shares() ? "pixels" : "channels";
    seen.insert(std::string("contained on its way, shared ") + what + layout);
    seen.insert("contained on its way, " + std::to_string(plan.blocks_m) + " rows at most of " +
                std::to_string(plan.tile_q) + " columns" + (of.stride_h == 2 ? ", stride 2" : layout));
    if (of.in_channels % 16) seen.insert("contained on its way, channels filled up");
    if (of.P % plan.landing.span) seen.insert("contained on its way, rows that are not there");
    if (of.Q % plan.tile_q) seen.insert("contained on its way, columns that are not there");
    if (of.stride_h == 2) seen.insert(std::string("contained on its way, staged ") +
                                      (plan.landing.rows > 4 ? "twice" : "at once"));
    return;
  }
  if (plan.contained) {
    seen.insert(kind + ", contained" + (of.in_channels % 8 ? ", channels filled up" : ""));
    if (of.groups > 1) seen.insert(merged(of).merged > 1 ? "contained, groups as one" : "contained, groups");
    if (plan.splits > 1) seen.insert(kind + ", contained, tiles in parts");
    if (phases_of(copied(of).phases) > 1) {
      const char* const by = !plan.dense_slots ? ", by rows" : plan.x_boxes > 1 ? ", by boxes" : ", by a box";
      seen.insert("phases of " + kind + (plan.points ? "" : by));
      if (plan.splits > 1) seen.insert("phases of " + kind + ", tiles in parts");
    }
  } else if (plan.apart) {
    seen.insert(std::string("taps apart") + (plan.copied ? ", x copied" : ""));
    if (plan.splits > 1) seen.insert(std::string("taps apart") + parts);
    if (of.groups > 1) seen.insert("taps apart, groups");
  } else if (plan.copied) {
    seen.insert("x copied");
  } else if (plan.in_phases) {
    const std::string filled = of.in_channels % 32 ? ", channels filled up" : "";
    seen.insert("phases of x" + (plan.splits > 1 ? ", tiles in parts" : filled));
    if (of.R == 2 && of.S == 2 && of.pad_h % 2 == 0 && of.pad_w % 2 == 0) seen.insert("phases of x, of one tap");
  } else if (plan.in_boxes && !plan.points) {
    if (of.R * of.S == 1) seen.insert(plan.box_step > 1 ? "1x1 by rows at a stride" : "1x1 by rows");
  }
  if (plan.w_in_boxes) seen.insert("weights by boxes");
  if (plan.points) return;
  seen.insert(plan.packed ? "packed lines" : plan.tile_q < of.Q ? "a part of a line" : "whole lines");
  if (plan.tile_p > of.P) seen.insert(plan.gap < 0 ? "several images with less than no gap" : "several images");
}

// As it is for problems that it takes.
static bool mma_refuses = false;
static const char* refuse(const Problem&, Operator) { return mma_refuses ? "it is told to" : nullptr; }
static double mma_cycles = 0;
static double estimate(const Problem&, Operator) { return mma_cycles; }
const Engine modelnew::kMmaEngine{"mma", refuse, nullptr, nullptr, nullptr, nullptr, estimate};
static bool pointwise_refuses = false, pointwise_yields = false;
static const char* pointwise_refusal(const Problem& problem, Operator) {
  return pointwise_refuses || problem.R * problem.S > 1 ? "it is told to" : nullptr;
}
static const char* pointwise_reason(const Problem&, Operator) { return pointwise_yields ? "it is told to" : nullptr; }
static double pointwise_cycles = 0;
static double estimate_of_pointwise(const Problem&, Operator) { return pointwise_cycles; }
const Engine modelnew::kPointwiseEngine{"pointwise", pointwise_refusal, nullptr, nullptr, nullptr, pointwise_reason,
                                        estimate_of_pointwise};

extern "C" {
void set_capability(int capability) { stand_in_capability = capability; }
void let_pointwise(bool refuse, bool yield) {
  pointwise_refuses = refuse;
  pointwise_yields = yield;
}
void let_pointwise_take(double cycles) { pointwise_cycles = cycles; }
void let_mma_refuse(bool refuses) { mma_refuses = refuses; }
void let_mma_take(double cycles) { mma_cycles = cycles; }
int gather_divide(int number, int by) { return quotient(number, make_divisor(by)); }
const char* gather_yields(int op, const int64_t* fields) {
  return yields(make_problem(fields), static_cast<Operator>(op));
}
const char* gather_refusal(int op, const int64_t* fields) {
  return refusal(make_problem(fields), static_cast<Operator>(op));
}
const char* gather_describe(int op, const int64_t* fields) {
  static char text[320];  // as the binding has it
  describe(make_problem(fields), static_cast<Operator>(op), text, sizeof text);
  return text;
}
const char* gather_seen() {
  static std::string all;
  all.clear();
  for (const std::string& kind : seen) all += kind + "\n";
  return all.c_str();
}
double gather_cycles(int op, const int64_t* fields, uint64_t in, uint64_t out) {
  const Problem problem = make_problem(fields);
  Plan plan{};
  const Phased of = phased_of(problem, static_cast<Operator>(op));
  return make_plan(of, element_bytes(problem.dtype), Device{132}, Alignment{in, out}, -1, plan) ? plan.cycles : 0;
}
// Plans every shape of a tile and the best one for tensors at these addresses: null if there is none, else what is
// wrong, or "".
const char* gather_fault(int op, const int64_t* fields, uint64_t in, uint64_t out, int seed) {
  static std::string fault;
  fault.clear();
  std::mt19937 shuffler(seed);
  const Problem problem = make_problem(fields);
  const Phased of = phased_of(problem, static_cast<Operator>(op));
  const int bytes = element_bytes(problem.dtype);
  bool any = false, checked_again = false;
  Plan again{};
  const bool has_again = bytes == 4 && plan_again(of, Device{132}, Alignment{in, out}, again);
  constexpr int kShapes = static_cast<int>(std::size(kTileShapes));  // and, behind them, what tma multiplies
  for (int shape = -1; shape <= kShapes; ++shape) {
    Plan plan{};
    const int splits = shape >= 0 && shape < kShapes && shuffler() % 4 == 0 ? 2 : 0;  // else as many as it likes
    if (!make_plan(of, bytes, Device{132}, Alignment{in, out}, shape, plan, splits)) {
      // Windows may be too large for shared memory; points are not.
      const bool copies = shape >= 0 && shape < kShapes && kTileShapes[shape].contained && !kTileShapes[shape].lands;
      const bool may = copies && may_contain(of, bytes) && has_again;
      if (may && of.R * of.S == 1 && splits == 0) return "points that are not contained";
      continue;
    }
    any = true;
    note(of, plan);
    const Phased grouped = plan.contained ? merged(of) : of;
    const auto packed = [](const Phased& groups, const Plan& all) {
      return int64_t{groups.groups} * all.tiles_n * all.iterations * all.pieces * all.tile_n * 16;
    };
    const int64_t pixels = of.N * (of.R * of.S == 1 ? int64_t{of.P} * of.Q : int64_t{of.H} * of.W);
    const bool phased = plan.contained && !plan.lands && !plan.by_tma && phases_of(copied(of).phases) > 1;
    // Pairs of rows or columns, from that of the first tap of the first output to that of the last one's last tap.
    const auto pairs = [](int outputs, int taps, int pad) {
      return ((2 * (outputs - 1) + taps - 1 - pad) >> 1) - (-pad >> 1) + 1;
    };
    const int64_t fours = of.N * pairs(of.P, of.R, of.pad_h) * pairs(of.Q, of.S, of.pad_w);
    const int64_t copied_x = plan.lands       ? 0
                             : phased         ? fours * 4 * grouped.groups * ceil_div(grouped.in_channels, 64) * 128
                             : plan.contained ? pixels * grouped.groups * ceil_div(grouped.in_channels, 8) * 16
                             : plan.copied  ? pixels * of.groups * of.in_channels * bytes
                                            : 0;
    const int64_t rows = packed_rows(grouped, plan.tile_n), packed_again = plan.contained ? packed(of, again) : 0;
    const WorkspaceLayout layout = workspace_layout(of, plan, again, bytes);
    fault = fault_of_layout(layout, plan, rows, packed(grouped, plan), packed_again, copied_x);
    if (plan.contained && fault.empty()) fault = fault_of_groups(of, grouped);
    if (plan.contained && contained_bytes(of, plan.by_tma) < copied_x) fault = "bytes of the copy";
    if (plan.contained && !plan.lands && !plan.by_tma && fault.empty())
      fault = fault_of_phases(grouped, copied(of), 64, plan.blocks_c);
    if (plan.lands && (phases_of(numbered(of).phases) != 1 || numbered(of).H != of.H || numbered(of).W != of.W ||
                       numbered(of).in_channels != ceil_div(of.in_channels, 8) * 8))
      fault = "places of values that are listed";
    if (plan.in_phases && fault.empty()) fault = fault_of_phases(of, in_phases(of), 32, plan.blocks_c);
    if (plan.w_in_boxes) {
      const bool one_tap = of.R * of.S == 1 && of.groups == 1 && of.w_stride_in == 1 && of.w_stride_out % 8 == 0;
      if (!one_tap || bytes != 2 || plan.copied) fault = "boxes of other weights";
      if (shared_layout(plan).w_ring % 1024 || plan.w_stage_bytes != 128 * plan.tile_n) fault = "boxes of weights";
    }
    if (plan.in_phases && (of.groups != 1 || of.flipped || of.in_channels % 4 || of.in_stride[1] != 1))
      fault = "phases of another tensor";
    const Source source = plan.by_tma ? Source::kBoxes : source_of_plan(plan);
    if (bytes == 4 ? source == Source::kAny : shape > 1 || plan.in_phases) fault = "no such kernel";
    if (plan.by_tma != (shape == kShapes) && shape >= 0) fault = "by tma, or not";
    if (bytes == 4 && shape >= 0 && !plan.by_tma && !(kTileShapes[shape].sources & bit(source)))
      fault = "no kernel of this shape";
    const bool between_groups = of.groups != 1 && grouped.in_channels % 64 != 0;
    if (plan.contained && (bytes != 4 || between_groups)) fault = "operands that are not to be contained";
    if (plan.contained && !checked_again && fault.empty()) {
      checked_again = true;
      fault = has_again ? fault_of_plan(of, again, bytes, bytes, in, out, shuffler) : "nothing to do all again";
      if (again.splits != 1 || again.copied) fault = "parts, or a copy, of what is done again";
      // The list in order, and for each warp which of it an output reads.
      const size_t to_mend = kMostListed * (sizeof(Listed) + kThreads / 32);
      if (kBarrierBytes + to_mend > static_cast<size_t>(again.smem_bytes)) fault = "room to mend";
    }
    if (fault.empty() && plan.lands) {
      fault = fault_of_landing(of, plan, in, out);
    } else if (fault.empty() && plan.by_tma) {
      fault = fault_of_tma(of, plan, out);
    } else if (fault.empty()) {
      const Phased own = plan.copied ? copied(of, plan.contained) : plan.in_phases ? in_phases(of) : of;
      fault = fault_of_plan(own, plan, plan.contained ? 2 : bytes, bytes, plan.copied ? 0 : in, out, shuffler);
    }
    if (!fault.empty()) {
      fault += ", shape " + std::to_string(shape) + " of a tile";
      return fault.c_str();
    }
  }
  return any ? "" : nullptr;
}
}
"""
)


MEMORY_ORDERS = [(3, 2, 1, 0), (3, 2, 1, 0), (1, 3, 2, 0), (1, 3, 2, 0), (2, 3, 1, 0)]


def any_strides(shape: tuple[int, ...], order: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """Of a tensor of its own, contiguous or channels_last, or of a part of a larger one."""
    part, strides, step = rng.random() < 0.3, [0] * 4, 1
    for dimension in order:
        strides[dimension] = step
        step *= shape[dimension] + (rng.choice([0, 0, 1, 4, 8]) if part else 0)
        step *= rng.choice([1, 1, 1, 1, 3, 2**20]) if part and rng.random() < 0.1 else 1
    return tuple(strides)


# Each puts something out of place, by one as a rule.
GATHER_PLAN_MUTATIONS = {
    "an image too few of a tile": ("(of.P * of.Q) + 2 : 0;", "(of.P * of.Q) + 2 - MUTATED : 0;"),
    "images with gaps between channels": ("of.in_stride[1] == plane", "(MUTATED || of.in_stride[1] == plane)"),
    "images at odd addresses": ("out_bytes == 4 && aligned_in &&", "out_bytes == 4 && (MUTATED || aligned_in) &&"),
    "images of some of a stage's channels": (
        "of.in_channels % (plan.pieces * channels) == 0))\n    return false;",
        "(MUTATED || of.in_channels % (plan.pieces * channels) == 0)))\n    return false;",
    ),
    "a row too few between images": (
        "plan.gap = static_cast<int>(gap);",
        "plan.gap = static_cast<int>(gap) - MUTATED;",
    ),
    "rows too short": (
        "plan.pitch = static_cast<int>(pitch);",
        "plan.pitch = static_cast<int>(pitch) - MUTATED;",
    ),
    "quarters that overlap": (
        "m % 4 * (tile_pixels(plan) / 4 + 2)",
        "m % 4 * (tile_pixels(plan) / 4 + (MUTATED ? -1 : 2))",
    ),
    "y as if it were aligned": (
        "plan.vector = aligned_out && fours",
        "plan.vector = (MUTATED || aligned_out) && fours",
    ),
    "x as if it were aligned": (
        "dense_points && address.in % (4 * in_bytes) == 0",
        "dense_points && (MUTATED || address.in % (4 * in_bytes) == 0)",
    ),
    "a workspace without room for weights": (
        "layout.packed + aligned(packed_bytes(plan.contained ? merged(of) : of, plan));",
        "layout.packed + (MUTATED ? 0 : aligned(packed_bytes(plan.contained ? merged(of) : of, plan)));",
    ),
    "packed tiles that start a line too early": (
        "const int most_skipped = plan.packed ? of.Q",
        "const int most_skipped = plan.packed ? of.Q / (MUTATED ? 2 : 1)",
    ),
    "parts of channels that overlap": (
        "tile.first_block = part_of_tile(plan, tile.part) * plan.split_blocks;",
        "tile.first_block = part_of_tile(plan, tile.part) * (plan.split_blocks - MUTATED);",
    ),
    "a list that is too short": (
        "aligned(kMostListed * static_cast",
        "aligned(kMostListed / (MUTATED ? 2 : 1) * static_cast",
    ),
    "a copy whose channels are not filled up": left_out("result.in_channels = (source.in_channels + 7) / 8 * 8;"),
    "a workspace without room for the copy": (
        "layout.copied + aligned(bytes_of_copy);",
        "layout.copied + aligned(bytes_of_copy / (MUTATED ? 2 : 1));",
    ),
    "a workspace with room for a copy that is not made": (
        ": plan.copied    ? copied_bytes(of, element_bytes)",
        ": plan.copied || MUTATED ? copied_bytes(of, element_bytes)",
    ),
    "groups as one whose channels fill more than a stage": (
        "kContainedBlock / of.in_channels;",
        "kContainedBlock / of.in_channels * (MUTATED ? 2 : 1);",
    ),
    "points that skip what their copy has not": left_out("result.stride_h = result.stride_w = 1;"),
    "lines of the copy too short": ("result.W * channels;", "(result.W - MUTATED) * channels;"),
    "clusters whose blocks have more than one part": (
        "parts <= plan.blocks && (splits == 2",
        "(MUTATED || parts <= plan.blocks) && (splits == 2",
    ),
    "more clusters than run at once": (
        "plan.blocks <= kClusterShare * at_once",
        "plan.blocks <= (MUTATED ? 1 : kClusterShare) * at_once",
    ),
    "parts of what is done again": ("address, kAgainShape, 1, 0", "address, kAgainShape, MUTATED ? 0 : 1, 0"),
    "phases whose first tap is the next one": (
        "first[phase] = (r - pad - phase) / 2 + start;",
        "first[phase] = (r - pad - phase) / 2 + start + MUTATED;",
    ),
    "windows of phases that start too late": (
        "const int start = (pad + 1) / 2,",
        "const int start = (pad + !MUTATED) / 2,",
    ),
    "a copy in phases without its last row": (
        "result.H = of.P + result.R - 1;",
        "result.H = of.P + result.R - 1 - MUTATED;",
    ),
    "phases that share stages": (
        "* phases.s[(phase - 1) % 2];",
        "* phases.s[(phase - !MUTATED) % 2];",
    ),
    "phases of channels that are no blocks": (
        "const int blocks = (of.in_channels + block_channels - 1) / block_channels;",
        "const int blocks = MUTATED ? std::max(1, of.in_channels / block_channels)"
        " : (of.in_channels + block_channels - 1) / block_channels;",
    ),
    "boxes of more slots than there may be": (
        "ceil_div(plan.slots, 256)",
        "ceil_div(plan.slots, MUTATED ? 512 : 256)",
    ),
    "boxes of planes so small that they are of three images": (
        "of.P * of.Q >= kLeastBoxedPlane",
        "of.P * of.Q >= (MUTATED ? 8 : kLeastBoxedPlane)",
    ),
    "boxes that start in the middle of eight slots": (
        "ceil_div(ceil_div(plan.slots, plan.x_boxes), 8)) * 8",
        "ceil_div(ceil_div(plan.slots, plan.x_boxes), MUTATED ? 1 : 8)) * (MUTATED ? 1 : 8)",
    ),
    "phases of x that start a pair too late": (
        "result.pad_h = (of.pad_h + 1) / 2;",
        "result.pad_h = (of.pad_h + !MUTATED) / 2;",
    ),
    "phases of x without its last column": ("result.W = (of.W + 1) / 2;", "result.W = (of.W + !MUTATED) / 2;"),
    "boxes of more columns than there may be": (
        "plan.pitch * plan.box_step <= 256",
        "plan.pitch * (MUTATED ? 1 : plan.box_step) <= 256",
    ),
    "boxes of neighbouring columns at a stride": (
        "from_phases ? 2 : plan.in_column_step;",
        "from_phases ? 2 : MUTATED ? 1 : plan.in_column_step;",
    ),
    "windows that start between fours": (
        "shape.channels_last || shape.whole_rows() ? 0 : -of.pad_w & 3;",
        "shape.channels_last || shape.whole_rows() || MUTATED ? 0 : -of.pad_w & 3;",
    ),
    "tiles of more rows than what lands has": (
        "(shape.window_rows() - of.R) / shape.stride",
        "(shape.window_rows() - (MUTATED ? 1 : of.R)) / shape.stride",
    ),
    "windows without what a wgmma reads behind their end": (
        "std::max(landing.window_rows * shape.pitch(), last)",
        "std::max(landing.window_rows * shape.pitch(), MUTATED ? 0 : last)",
    ),
    "boxes of whole rows that are apart": (
        "(of.in_stride[2] == of.W || of.H == 1)",
        "(MUTATED || of.in_stride[2] == of.W || of.H == 1)",
    ),
    "boxes of whole rows that have more columns": (
        "of.W == shape.box_columns() && of.pad_w == kWholeRowsPadding &&",
        "(MUTATED || (of.W == shape.box_columns() && of.pad_w == kWholeRowsPadding)) &&",
    ),
    "boxes of y that end in another tile": (
        "!landing.shape.channels_last && of.Q > shape.columns",
        "!landing.shape.channels_last && of.Q > shape.columns && !MUTATED",
    ),
    "boxes of y from anywhere": (
        "of.P, of.Q) || address.out % 16 != 0))",
        "of.P, of.Q) || (!MUTATED && address.out % 16 != 0)))",
    ),
    "values that two tiles list": (
        "row < landing.shape.stride * landing.span ||",
        "row < landing.shape.stride * landing.span + MUTATED ||",
    ),
    "values that no tile lists at a stride": (
        "(row < landing.shape.stride * landing.span",
        "(row < (MUTATED ? 1 : landing.shape.stride) * landing.span",
    ),
    "values that the last tile of a row does not list": (
        "column < landing.shape.stride * plan.tile_q || tile.q",
        "column < landing.shape.stride * plan.tile_q || MUTATED ? true && column < landing.shape.stride * plan.tile_q"
        " : tile.q",
    ),
    "taps apart of other strides": (
        "return stride == 1 && pad >= -127",
        "return (MUTATED || stride == 1) && pad >= -127",
    ),
    "slots as in memory of whole lines": (
        "phases_of(of.phases) > 1 && plan.packed)",
        "phases_of(of.phases) > 1 && (MUTATED || plan.packed))",
    ),
}


class GatherPlans:
    """The host part of the gather engine, for a GPU of 132 SMs that is not there."""

    def __init__(self, folder: Path) -> None:
        self.library = compile_plans("gather", GATHER_ENTRY_POINTS, GATHER_PLAN_MUTATIONS, folder)
        for name in ("gather_refusal", "gather_yields", "gather_describe", "gather_fault", "gather_seen"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.gather_cycles.restype = ctypes.c_double

    def __call__(
        self,
        function: str,
        operator: str,
        case: Case,
        dtype: torch.dtype,
        *more: object,
        tf32: bool = True,
        strides: dict[str, tuple[int, ...]] | None = None,
    ) -> str | float | None:
        """One of the entry points, for tensors that only have strides: contiguous ones unless others are named."""
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        for name, of_tensor in (strides or {}).items():
            tensors[name] = tensors[name].as_strided(shapes[name], of_tensor)
        fields = ShimEngine.fields(case, tensors, tf32)
        result = getattr(self.library, f"gather_{function}")(OPERATOR_NUMBER[operator], fields, *more)
        return result.decode() if isinstance(result, bytes) else result

    def fault(self, operator: str, case: Case, dtype: torch.dtype, seed: int) -> str | None:
        """What is wrong with its plans for tensors of any strides at any addresses."""
        rng = random.Random(seed)
        order = rng.choice(MEMORY_ORDERS)  # more often than not of both
        other = rng.choice([order, rng.choice(MEMORY_ORDERS)])
        strides = {"x": any_strides(case.x_shape, order, rng), "dy": any_strides(case.y_shape, other, rng)}
        places = [ctypes.c_uint64(rng.choice([0, 0, 0, 1, 2, 4, 8]) * dtype.itemsize) for _ in range(2)]
        return self("fault", operator, case, dtype, *places, seed, strides=strides)


@built_beside_the_tests
def gather_plans(folder: Path) -> GatherPlans:
    return GatherPlans(folder)


GROUPS = Case(32, 512, 28, 28, 512, 3, 3, padding=(1, 1), groups=64)
GROUPS_AS_ONE = dataclasses.replace(GROUPS, groups=32)
FEW_OF_GROUP = "mma is faster with few channels a group"


@pytest.mark.parametrize(
    "case, operator, dtype, reason",
    [
        (GROUPS, "fprop", torch.float32, FEW_OF_GROUP),
        (GROUPS, "dgrad", torch.float32, FEW_OF_GROUP),
        (GROUPS, "fprop", torch.float16, None),
        (dataclasses.replace(GROUPS, N=4), "fprop", torch.float32, "mma is faster with few multiply-adds"),
        (dataclasses.replace(GROUPS, C=1024, K=1024), "fprop", torch.float32, FEW_OF_GROUP),
        (dataclasses.replace(GROUPS, C=1088), "fprop", torch.float32, None),
        (dataclasses.replace(GROUPS, K=1088), "fprop", torch.float32, None),
        (dataclasses.replace(GROUPS, C=16, K=16, N=256, groups=1), "fprop", torch.float32, None),
    ],
    ids=str,
)
def test_gather_yields_to_mma(gather_plans, case, operator, dtype, reason):
    assert gather_plans("yields", operator, case, dtype) == reason
    gather_plans.library.let_mma_take(ctypes.c_double(1e30))
    try:
        assert gather_plans("yields", operator, case, dtype) == (None if reason == FEW_OF_GROUP else reason)
    finally:
        gather_plans.library.let_mma_take(ctypes.c_double(0))
    gather_plans.library.let_mma_refuse(True)
    try:
        assert gather_plans("yields", operator, case, dtype) is None
    finally:
        gather_plans.library.let_mma_refuse(False)


WIDENS = Case(32, 160, 7, 7, 960, 1, 1)  # 2^27.8 multiply-adds


@pytest.mark.parametrize(
    "case, operator, strides, yields",
    [
        (WIDENS, "fprop", {}, False),
        (dataclasses.replace(WIDENS, N=17), "fprop", {}, True),
        (dataclasses.replace(WIDENS, C=161), "fprop", {}, True),
        (dataclasses.replace(WIDENS, K=639, N=44), "fprop", {}, True),
        (dataclasses.replace(WIDENS, H=14, W=14, stride=(2, 2)), "fprop", {}, True),
        (dataclasses.replace(WIDENS, C=320, K=1920, N=16, groups=2), "fprop", {}, True),
        (WIDENS, "dgrad", {}, True),
    ],
    ids=str,
)
def test_gather_yields_unless_channels_become_many(gather_plans, case, operator, strides, yields):
    reason = "mma is faster with few multiply-adds" if yields else None
    assert gather_plans("yields", operator, case, torch.float32, strides=strides) == reason


@pytest.mark.parametrize(
    "case, slower, faster",
    [
        (WIDENS, False, True),
        (dataclasses.replace(WIDENS, N=8), True, True),  # 2^25.8 multiply-adds
        (dataclasses.replace(WIDENS, N=64), False, False),  # 2^28.8
        (Case(8, 2048, 7, 7, 512, 1, 1), False, True),  # 2^28.6, but few pixels
        (Case(32, 64, 28, 28, 64, 1, 1, stride=(2, 2)), None, None),
    ],
    ids=str,
)
def test_gather_yields_to_pointwise_in_channels_last(gather_plans, case, slower, faster):
    """By the estimates, unless multiply-adds or pixels decide; at a stride as ever."""
    strides = {"x": torch.empty(case.x_shape, device="meta").to(memory_format=torch.channels_last).stride()}
    by_estimates, by_mma = "pointwise is faster by the estimates", "mma is faster with few multiply-adds"
    for cycles, yields in ((1e9, slower), (1, faster)):
        gather_plans.library.let_pointwise_take(ctypes.c_double(cycles))
        try:
            reason = gather_plans("yields", "fprop", case, torch.float32, strides=strides)
        finally:
            gather_plans.library.let_pointwise_take(ctypes.c_double(0))
        assert reason == (by_mma if yields is None else by_estimates if yields else None)


FEW_FILTERS = Case(64, 96, 56, 56, 24, 1, 1)


@pytest.mark.parametrize(
    "case, settings, yields",
    [
        (FEW_FILTERS, {}, True),
        (dataclasses.replace(FEW_FILTERS, K=25), {}, False),
        (dataclasses.replace(FEW_FILTERS, S=3), {}, False),
        (dataclasses.replace(FEW_FILTERS, C=192, K=48, groups=2), {}, False),
        (FEW_FILTERS, {"operator": "dgrad"}, False),
        (FEW_FILTERS, {"dtype": torch.float16}, False),
        (FEW_FILTERS, {"strides": {"x": (96 * 56 * 56, 1, 96 * 56, 96)}}, False),
    ],
    ids=str,
)
def test_gather_yields_to_pointwise(gather_plans, case, settings, yields):
    settings = {"operator": "fprop", "dtype": torch.float32, **settings}
    reason = "pointwise is faster with few output channels" if yields else None
    assert gather_plans("yields", case=case, **settings) == reason
    for refuses in (True, False):
        gather_plans.library.let_pointwise(refuses, not refuses)
        try:
            assert gather_plans("yields", case=case, **settings) is None
        finally:
            gather_plans.library.let_pointwise(False, False)


def random_gather_cases(count: int, seed: int) -> Iterator[tuple[Case, str, torch.dtype]]:
    """Images from one pixel to several tiles, many of them in a tile; half of the filters 1x1, strides, groups."""
    rng = random.Random(seed)
    while count > 0:
        operator, groups = rng.choice(WGMMA_OPERATORS), rng.choice([1, 1, 1, 2, 3, 4])
        C, K = (groups * rng.choice([8, 9, 12, 16, 31, 32, 40, 64, 65, 100, 128, 200]) for _ in range(2))
        N = rng.choice([1, 2, 3, 5, 8, 40])
        H, W = (
            rng.choice([rng.randint(1, 8), rng.randint(1, 16), 4 * rng.randint(1, 8), rng.randint(1, 60), most])
            for most in (60, rng.randint(61, 300))
        )
        R, S = rng.choice([(1, 1), (1, 1), (1, 1), (3, 3), (2, 2), (rng.randint(1, 5), rng.randint(1, 5))])
        stride = tuple(rng.choices([1, 2, 3], k=2)) if operator == "fprop" else (1, 1)
        padding = tuple(rng.choices([0, 0, 0, 1, 2, 3], k=2))
        case = Case(N, C, H, W, K, R, S, stride, padding, tuple(rng.choices([1, 1, 2, 3], k=2)), groups)
        if min(case.y_shape) > 0:
            yield case, operator, rng.choice(WGMMA_DTYPES)
            count -= 1


def random_phased_cases(count: int, seed: int) -> Iterator[tuple[Case, str, torch.dtype]]:
    """Of the same kind, but all of them what a copy of x holds in phases."""
    rng = random.Random(seed)
    while count > 0:
        C, K = rng.choice([8, 31, 63, 64, 65, 100, 128, 200]), rng.choice([8, 31, 64, 100, 128, 200, 300])
        H, W = (rng.choice([rng.randint(1, 8), rng.randint(1, 33), rng.randint(1, 70), 300]) for _ in range(2))
        R, S = rng.choice([(3, 3), (3, 3), (2, 2), (2, 3), (5, 4), (7, 7), (rng.randint(2, 7), rng.randint(2, 7))])
        padding = tuple(rng.choices([0, 0, 1, 1, 2, 3, 4], k=2))
        case = Case(rng.choice([1, 2, 3, 5, 8, 40]), C, H, W, K, R, S, (2, 2), padding)
        if case.y_shape[2] > 1 and case.y_shape[3] > 1:  # else there is no stride
            yield case, "fprop", torch.float32
            count -= 1


def random_landing_cases(count: int, seed: int) -> Iterator[tuple[Case, str, torch.dtype]]:
    """Of the same kind, but all of them what may be contained on its way, if tensors are aligned."""
    rng = random.Random(seed)
    while count > 0:
        C, K = (rng.choice([8, 31, 64, 65, 100, 128, 200, 300]) for _ in range(2))
        H, W, padding = rng.randint(1, 70), 4 * rng.randint(7, 40), rng.choice([1, 1, 1, 3])
        R, stride, kind = rng.randint(1, 4), (1, 1), rng.random()
        if kind < 0.1:
            W, padding = W + 2, 2  # rows of y are fours, those of x are not
        elif kind < 0.3:
            R = 3  # narrow tiles
            W, padding = rng.choice([(W, padding) for W in (13, 14, 25, 26, 27, 28, 28)] + [(16, 0), (12, 2)])
        elif kind < 0.6:
            R, stride = 3, (2, 2)
            H = rng.choice([H, rng.randint(1, 16)])
            W, padding = rng.choice([(56, 1), (28, 1)] * 3 + [(56, 0), (52, 3)])
        case = Case(rng.choice([1, 2, 3, 5]), C, H, W, K, R, 3, stride, (rng.randint(0, 3), padding))
        if case.y_shape[2] > 0:
            yield case, rng.choice(["fprop", "fprop", "dgrad"]) if stride == (1, 1) else "fprop", torch.float32
            count -= 1


def random_apart_cases(count: int, seed: int) -> Iterator[tuple[Case, str, torch.dtype]]:
    """Of the same kind, but with taps that lie apart, nearly all within the reach of boxes."""
    rng = random.Random(seed)
    while count > 0:
        groups = rng.choice([1, 1, 1, 2])
        C, K = (groups * rng.choice([8, 30, 32, 36, 64, 100, 128, 300]) for _ in range(2))
        H, W = (rng.choice([rng.randint(1, 20), rng.randint(1, 50), 65]) for _ in range(2))
        R, S = rng.choice([(3, 3), (3, 3), (3, 3), (1, 3), (2, 1), (4, 5)])
        drawn = rng.randint(2, 20), rng.randint(2, 20)
        dilation = rng.choice([drawn, (1, 6), (12, 12), (36, 36), (64, 64), (130, 130)])
        padding = tuple(
            rng.choice([0, d * (taps - 1) // 2, d * (taps - 1)]) for d, taps in zip(dilation, (R, S), strict=True)
        )
        stride = rng.choice([(1, 1)] * 7 + [(2, 1)])
        case = Case(rng.choice([1, 2, 3, 8, 30]), C, H, W, K, R, S, stride, padding, dilation, groups)
        operator = rng.choice(["fprop", "fprop", "dgrad"]) if stride == (1, 1) else "fprop"
        if min(case.y_shape) > 0:
            yield case, operator, rng.choice([torch.float32, torch.float32, torch.float32, torch.float16])
            count -= 1


def random_image_cases(count: int, seed: int) -> Iterator[tuple[Case, str, torch.dtype]]:
    """1x1 of images whose pixels are no fours, but which follow one another, if tensors are contiguous and aligned."""
    rng = random.Random(seed)
    while count > 0:
        groups = rng.choice([1, 1, 1, 2])
        C, K = (groups * rng.choice([32, 64, 96, 100, 128, 160, 256]) for _ in range(2))
        sizes = [5, 7, 7, 9, 10, 13, rng.randint(1, 17), rng.choice([33, 1001, 3001])]
        H, W = (rng.choice(sizes) for _ in range(2))
        if H * W % 4:
            case = Case(rng.choice([1, 2, 3, 5, 8, 40]), C, H, W, K, 1, 1, groups=groups)
            yield case, rng.choice(["fprop", "dgrad"]), torch.float32
            count -= 1


def cases_of_plans() -> Iterator[tuple[int, tuple[Case, str, torch.dtype]]]:
    kinds = (
        random_landing_cases(700, seed=2),
        random_gather_cases(3000, seed=0),
        random_phased_cases(300, seed=0),
        random_apart_cases(400, seed=0),
        random_image_cases(400, seed=0),
        # Phases of one tap, which are chosen if x is large.
        [(Case(64, 64, 16, 14, 64, 2, 2, (2, 2), (2, 2)), "fprop", torch.float32)] * 20,
    )
    return enumerate(itertools.chain(*kinds))


GATHER_KINDS = {
    *(f"points, x by {how}" for how in ("single", "pixels", "images", "channels")),
    *(f"windows, x by {how}" for how in ("single", "channels")),
    *(
        f"{kind}, {what} of y by {how}"
        for kind in ("points", "windows")
        for what in ("channels", "pixels")
        for how in ("fours", "one")
    ),
    "points, channels of y by boxes",
    "windows, channels of y by boxes",
    *(f"{kind}, {which} tiles in parts" for kind in ("points", "windows") for which in ("some", "all")),
    "x copied",
    *(f"two blocks an SM, tiles of {size} pixels by {x}" for size in (64, 128) for x in ("fours", "boxes")),
    *(f"two blocks an SM, tiles of {size} pixels by boxes of a copy" for size in (64, 128)),
    *(f"two blocks an SM, {which} tiles in parts" for which in ("some", "all")),
    *(
        f"{kind}, three warpgroups{how}{parts}"
        for kind, how in (
            *(("points", how) for how in ("", ", 64 channels by boxes", ", contained")),
            ("windows", ", contained"),
        )
        for parts in ("", ", tiles in parts")
    ),
    "points, three warpgroups, 64 channels by fours",
    "packed lines",
    "whole lines",
    "a part of a line",
    "several images",
    "several images with less than no gap",
    *(
        f"{kind}, contained{how}"
        for kind in ("points", "windows")
        for how in ("", ", channels filled up", ", tiles in parts")
    ),
    "contained, groups",
    "contained, groups as one",
    "phases of points",
    "phases of points, tiles in parts",
    *(f"phases of windows, by {boxes}" for boxes in ("a box", "boxes", "rows")),
    "phases of windows, tiles in parts",
    *(f"phases of x{how}" for how in ("", ", channels filled up", ", tiles in parts", ", of one tap")),
    "1x1 by rows",
    "1x1 by rows at a stride",
    *(
        f"contained on its way, shared {what}{layout}"
        for what in ("pixels", "channels")
        for layout in ("", ", channels_last")
    ),
    *(f"contained on its way, {what} that are not there" for what in ("rows", "columns")),
    *(
        f"contained on its way, {rows} rows at most of {columns} columns{layout}"
        for rows, columns in ((7, 32), (8, 32), (7, 28))
        for layout in ("", ", channels_last")
    ),
    "contained on its way, 14 rows at most of 14 columns, channels_last",
    *(
        f"contained on its way, {rows} rows at most of {columns} columns, stride 2"
        for rows, columns in ((7, 28), (14, 14), (7, 14))
    ),
    *(f"contained on its way, staged {often}" for often in ("at once", "twice")),
    "contained on its way, channels filled up",
    "weights by boxes",
    "taps apart",
    "taps apart, x copied",
    "taps apart, groups",
    *(f"taps apart, {which} tiles in parts" for which in ("some", "all")),
}


def test_gather_plans_are_sound(gather_plans):
    """Each output in one tile, each tap where the convolution says, all in 227 KiB, aligned: every shape of a tile."""
    planned = []
    for seed, (case, operator, dtype) in cases_of_plans():
        fault = gather_plans.fault(operator, case, dtype, seed)
        assert not fault, f"{operator} of {case}, {dtype}, seed {seed}: {fault}"
        planned.append(fault is not None)
    assert sum(planned) > 0.9 * len(planned)
    assert set(gather_plans.library.gather_seen().decode().splitlines()) >= GATHER_KINDS


@pytest.mark.parametrize("mutation", GATHER_PLAN_MUTATIONS)
def test_gather_plan_checks_see_what_is_wrong(gather_plans, mutation):
    with mutated(gather_plans.library, GATHER_PLAN_MUTATIONS, mutation):
        assert any(
            gather_plans.fault(operator, case, dtype, seed) for seed, (case, operator, dtype) in cases_of_plans()
        )


def test_gather_divides_without_a_division(gather_plans):
    """Quotients around each multiple that is an end of something, of ints as large as there are."""
    most = 2**31 - 1
    powers = [2**i + j for i in range(31) for j in (-1, 0, 1)]
    rng = random.Random(0)
    divisors = {*range(1, 130), *powers, most, most - 1, most // 2, most // 3, 46341, 715827883}
    divisors |= {int(2 ** rng.uniform(0, 31)) for _ in range(300)}
    for by in (by for by in divisors if 1 <= by <= most):
        times = {0, 1, 2, most // by, most // by - 1, most // by // 2, rng.randint(0, most // by)}
        numbers = {number * by + j for number in times for j in (-1, 0, 1)} | {*powers, most, rng.randint(0, most)}
        for number in numbers:
            if 0 <= number <= most:
                assert gather_plans.library.gather_divide(number, by) == number // by, (number, by)


# A tile's share of reading x is as small as there are tiles of other channels beside it, so that twice the output
# channels may halve the estimate of what is one round of tiles. Twice the images may make sums come in fours, which is
# what splitting the reduction asks for.
LEAST_GROWTH = {"N": 0.5, "in": 1.0, "out": 0.5}


def groups_as_one(case: Case, operator: str) -> int:
    """How many groups gather may multiply as one of 64 input channels."""
    in_channels = (case.C if operator == "fprop" else case.K) // case.groups
    several = 64 // in_channels if case.groups > 1 and 64 % in_channels == 0 else 1
    return several if case.groups % several == 0 else 1


def contained_channels(case: Case, operator: str) -> int:
    """The fewer ones of inputs and outputs of a group as it is multiplied."""
    return groups_as_one(case, operator) * min(case.C, case.K) // case.groups


def test_gather_estimates_grow_with_the_work(gather_plans):
    aligned = ctypes.c_uint64(0), ctypes.c_uint64(0)
    for case, operator, dtype in random_gather_cases(2000, seed=1):
        once = gather_plans("cycles", operator, case, dtype, *aligned)
        sides = {"N": "N", "C": "in" if operator == "fprop" else "out", "K": "out" if operator == "fprop" else "in"}
        for letter, side in sides.items():
            double = dataclasses.replace(case, **{letter: 2 * getattr(case, letter)})
            twice = gather_plans("cycles", operator, double, dtype, *aligned)
            if groups_as_one(case, operator) < groups_as_one(double, operator):
                continue  # those of twice the channels are fewer to multiply
            if contained_channels(case, operator) < 64 <= contained_channels(double, operator):
                continue  # fewer are not contained
            # More images may leave no tile that fits.
            assert twice >= LEAST_GROWTH[side] * once or (letter == "N" and twice == 0), f"{operator} of {double}"


def test_gather_describes_its_configuration(gather_plans):
    """Whole and in the 320 bytes that the binding has for it."""
    by_tma = 0
    contained = [(case, "fprop", torch.float32) for case in GATHER_CONTAINED_CASES]
    for case, operator, dtype in [*random_gather_cases(300, seed=4), *contained]:
        if gather_plans("refusal", operator, case, dtype) is None:
            text = gather_plans("describe", operator, case, dtype)
            if "multiplied by tma" in text:
                assert re.fullmatch(
                    r"in scaled fp16, (\d+ groups as one, )?x copied, multiplied by tma: tile of \d+ channels x "
                    r"(\d+ pixels, by taps|\d+ lines x \d+ columns, by windows), x in \d of \d+ bytes, .*Mcycles",
                    text.replace(" stages", ""),
                )
                by_tma += 1
                continue
            assert re.fullmatch(
                r"(in scaled fp16, (\d+ groups as one, )?)?(x copied, |x in phases, )?"
                r"tile of \d+ channels x (\d+ pixels|\d+ lines x \d+ columns), "
                r"x by [\w ]+ in \d stages of \d+ bytes, "
                r".*, \d+ blocks for \d+ tiles, \d+ of them in \d+ parts, about [\d.e+-]+ Mcycles",
                text,
            )
    assert by_tma >= 3
    assert "in scaled fp16, 4 groups as one, " in gather_plans("describe", "fprop", GROUPS_AS_ONE, torch.float32)
    text = gather_plans("describe", "fprop", GATHER_LANDING_CASES[0], torch.float32)
    assert text.startswith("in scaled fp16, x contained on its way, tile of 64 channels x 14 rows x 32 columns, ")


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_gather_points_take_as_many_stages_of_both_operands_as_fit(gather_plans, memory_format):
    text = gather_plans("describe", "fprop", Case(32, 1024, 14, 14, 256, 1, 1), torch.float32, memory_format)
    assert re.search(r"tile of 128 channels x 128 pixels, x by [\w ]+ in 6 stages of \d+ bytes, weights in 6 of ", text)


# What the engine leaves to others, and what looks alike and is its own.
GATHER_CASE = Case(8, 40, 56, 56, 72, 3, 3, stride=(2, 2), padding=(1, 1))
GATHER_REFUSALS = [
    (dataclasses.replace(GATHER_CASE, N=12), "fprop", torch.float32, {}, None),
    (dataclasses.replace(GATHER_CASE, N=12), "fprop", torch.float32, {"tf32": False}, "full float32"),
    (GATHER_CASE, "fprop", torch.float16, {"tf32": False}, None),
    (dataclasses.replace(GATHER_CASE, N=1), "fprop", torch.float32, {}, "full float32"),  # by uses_tf32()
    (GATHER_CASE, "fprop", torch.float64, {}, "float64"),
    (GATHER_CASE, "wgrad", torch.float16, {}, "outputs and input gradients only"),
    (GATHER_CASE, "bgrad", torch.float16, {}, "outputs and input gradients only"),
    (GATHER_CASE, "dgrad", torch.float16, {}, "stride 1"),
    (Case(1, 16, 80, 80, 16, 3, 3, stride=(1, 2)), "dgrad", torch.float16, {}, "stride 1"),
    (Case(1, 16, 3, 80, 16, 3, 3, stride=(2, 1)), "dgrad", torch.float16, {}, None),  # one row: no stride in it
    (Case(1, 7, 80, 80, 16, 1, 1), "fprop", torch.float16, {}, "8 input channels"),
    (Case(1, 7, 80, 80, 16, 1, 1), "dgrad", torch.float16, {}, "8 input channels"),
    (Case(1, 16, 80, 80, 14, 1, 1, groups=2), "fprop", torch.float16, {}, "8 output channels"),
    (Case(1, 16, 80, 80, 16, 3, 3, groups=16), "fprop", torch.float16, {}, "8 input channels"),
    (Case(1, 16, 300, 300, 16, 3, 3, dilation=(100, 100)), "fprop", torch.float16, {}, "does not fit"),
    (GATHER_CASE, "fprop", torch.float16, {"capability": 80}, "Hopper"),
    (GATHER_CASE, "fprop", torch.float16, {"capability": 100}, "Hopper"),
    (GATHER_CASE, "fprop", torch.float16, {"capability": 0}, "Hopper"),
]


@pytest.mark.parametrize("case, operator, dtype, settings, text", GATHER_REFUSALS, ids=str)
def test_gather_says_what_it_refuses(gather_plans, case, operator, dtype, settings, text):
    settings = dict(settings)
    gather_plans.library.set_capability(settings.pop("capability", 90))
    try:
        refusal = gather_plans("refusal", operator, case, dtype, **settings)
    finally:
        gather_plans.library.set_capability(90)
    assert (refusal is None) == (text is None), refusal
    assert text is None or text in refusal


# What gather takes under every contract of its own: 2^27 multiply-adds at least, 2^29 of 1x1 at a stride. Of these fp32
# is contained: windows and points, at a stride and not, channels that are eights and others.
GATHER_CONTAINED_CASES = [
    Case(20, 140, 31, 29, 260, 3, 2, padding=(2, 0), dilation=(1, 3)),
    Case(12, 140, 57, 57, 264, 3, 3, stride=(2, 2), padding=(1, 0)),
    Case(40, 1000, 14, 14, 1100, 1, 1),
    Case(64, 1024, 14, 14, 512, 1, 1, stride=(2, 2)),
    Case(24, 140, 30, 28, 264, 5, 4, stride=(2, 2), padding=(2, 3)),  # pairs of columns
    Case(128, 328, 20, 20, 640, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(8, 518, 7, 7, 500, 3, 3, padding=(1, 1)),  # tiles that blocks share; weights of taps in no fours
]
# And these, in channels_last, come by boxes at a stride: phases of x itself, channels that fill blocks and not, and
# rows of what 1x1 filters read.
GATHER_STRIDED_CASES = [
    Case(16, 64, 57, 55, 136, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(20, 36, 55, 57, 130, 3, 3, stride=(2, 2), padding=(0, 1)),
    Case(20, 36, 41, 43, 130, 5, 5, stride=(2, 2), padding=(2, 1)),
    Case(9, 64, 63, 61, 264, 5, 5, stride=(2, 2), padding=(1, 3)),
    Case(40, 64, 57, 55, 260, 1, 1, stride=(2, 2)),
    Case(64, 36, 85, 83, 300, 1, 1, stride=(3, 3), padding=(1, 0)),
]
# And these are contained on their way, by tiles of each width but one, with rows, columns and channels that are not
# there; and by that one, in channels_last only.
GATHER_LANDING_CASES = [
    Case(44, 64, 56, 56, 64, 3, 3, padding=(1, 1)),
    Case(40, 64, 40, 124, 64, 3, 3, padding=(1, 1)),
    Case(22, 70, 62, 60, 66, 3, 3, padding=(1, 1)),
    Case(24, 72, 50, 60, 72, 2, 3, padding=(1, 3)),
    Case(64, 128, 28, 28, 128, 3, 3, padding=(1, 1)),
    Case(32, 128, 56, 56, 128, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(48, 72, 55, 56, 120, 3, 3, stride=(2, 2), padding=(0, 1)),
    Case(64, 256, 28, 28, 256, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(128, 128, 27, 28, 120, 3, 3, stride=(2, 2), padding=(1, 1)),
]
GATHER_LANDING_CHANNELS = Case(256, 256, 14, 14, 256, 3, 3, padding=(1, 1))
# And these, in fp32 and planes, image by image.
GATHER_IMAGES_GPU_CASES = [
    Case(64, 384, 13, 15, 264, 1, 1),
    Case(190, 1536, 7, 9, 320, 1, 1),
    Case(60, 448, 7, 7, 576, 1, 1, groups=2),
]
# These have tiles of three multiplying warpgroups, in one memory format or both.
GATHER_WIDE_CASES = [
    Case(20, 260, 19, 19, 260, 1, 1),
    Case(40, 100, 13, 13, 772, 1, 1),
    Case(24, 520, 21, 21, 200, 1, 1),
    Case(40, 772, 21, 21, 136, 1, 1),
    Case(9, 328, 15, 15, 520, 3, 3, padding=(1, 1)),
    Case(11, 520, 15, 15, 772, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(16, 64, 57, 56, 60, 1, 1),
    Case(64, 64, 28, 28, 48, 1, 1),
]
# And these, in fp32, come by boxes of a tap.
GATHER_APART_CASES = [
    Case(8, 128, 33, 33, 136, 3, 3, padding=(12, 12), dilation=(12, 12)),
    Case(3, 100, 40, 61, 260, 3, 3, padding=(18, 36), dilation=(18, 36)),
    Case(20, 128, 28, 30, 128, 3, 3, padding=(8, 10), dilation=(8, 10), groups=2),
]
GATHER_CASES = [
    dataclasses.replace(GATHER_CASE, N=12),
    Case(16, 256, 14, 14, 260, 1, 1),
    Case(35, 72, 57, 55, 130, 1, 1, stride=(2, 1), padding=(1, 0)),
    Case(40, 128, 7, 7, 200, 3, 3, padding=(1, 1)),
    Case(5, 100, 31, 29, 136, 3, 2, padding=(2, 0), dilation=(1, 3)),
    Case(16, 96, 28, 28, 192, 5, 5, stride=(2, 3), padding=(2, 2), groups=2),
    Case(50, 512, 14, 14, 64, 1, 1, groups=2),
    Case(4, 72, 35, 306, 136, 3, 3, padding=(1, 0)),  # long rows of sixteens, by boxes
    *GATHER_CONTAINED_CASES,
    *GATHER_STRIDED_CASES,
    *GATHER_LANDING_CASES,
    GATHER_LANDING_CHANNELS,
    *GATHER_IMAGES_GPU_CASES,
    *GATHER_WIDE_CASES,
]


def gather_operators(case: Case) -> set[str]:
    return {"fprop"} | ({"dgrad"} if case.stride == (1, 1) else set())


@pytest.mark.parametrize("dtype", WGMMA_DTYPES, ids=str)
def test_gather_cases_are_gathers(gather_plans, dtype):
    """That the cases for the GPU do not miss the engine."""
    for case in GATHER_CASES:
        taken_ones = {name for name in WGMMA_OPERATORS if gather_plans("refusal", name, case, dtype) is None}
        assert taken_ones == gather_operators(case), case


def gather_texts(gather_plans: GatherPlans, case: Case, layout: str) -> Iterator[tuple[str, str]]:
    """What is to be run of a case in fp32, by operators."""
    tensors = {"x": torch.empty(case.x_shape, device="meta"), "dy": torch.empty(case.y_shape, device="meta")}
    strides = {name: tensor.stride() for name, tensor in in_layout(tensors, layout).items()}
    for operator in gather_operators(case):
        yield operator, gather_plans("describe", operator, case, torch.float32, strides=strides)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_contains_what_the_gpu_tests_say(gather_plans, layout):
    for case in GATHER_CONTAINED_CASES:
        for operator, text in gather_texts(gather_plans, case, layout):
            assert text.startswith("in scaled fp16, "), f"{operator} of {case}: {text}"


def test_gather_contains_on_its_way_what_the_gpu_tests_say(gather_plans):
    told = set()
    wanted = [(case, "contiguous") for case in GATHER_LANDING_CASES] + [(GATHER_LANDING_CHANNELS, "channels_last")]
    for case, layout in wanted:
        for operator, text in gather_texts(gather_plans, case, layout):
            assert text.startswith("in scaled fp16, x contained on its way, "), f"{operator} of {case}: {text}"
            channels, columns = re.search(r"tile of (\d+) channels x \d+ rows x (\d+) columns", text).groups()
            told.add((int(channels), int(columns), *case.stride))
    assert told == {(64, 32, 1, 1), (128, 32, 1, 1), (128, 28, 1, 1), (128, 14, 1, 1), (128, 28, 2, 2), (128, 14, 2, 2)}


def test_gather_has_tma_multiply_what_the_gpu_tests_say(gather_plans):
    """Contained operands of each memory format, by windows and by taps, at a stride and not; some by gather itself."""
    told, shared = set(), False
    for case, layout in itertools.product(GATHER_CONTAINED_CASES, LAYOUTS):
        for operator, text in gather_texts(gather_plans, case, layout):
            assert text.startswith("in scaled fp16, x copied, "), f"{operator} of {case}: {text}"
            by_tma = re.search(r"multiplied by tma: tile of \d+ channels x .*?, by (windows|taps), ", text)
            told.add((layout, by_tma[1] if by_tma else None, case.stride))
            shared |= by_tma is not None and int(re.search(r"(\d+) of which share one", text)[1]) > 1
    assert {way[:2] for way in told} == set(itertools.product(LAYOUTS, ("windows", "taps", None)))
    assert {way[1:] for way in told} >= {("windows", (1, 1)), ("windows", (2, 2)), ("taps", (2, 2)), (None, (1, 1))}
    assert shared


def test_gather_takes_boxes_at_a_stride_where_the_gpu_tests_say(gather_plans):
    for case in GATHER_STRIDED_CASES:
        text = dict(gather_texts(gather_plans, case, "channels_last"))["fprop"]
        assert text.startswith("x in phases, ") == (case.R > 1), f"{case}: {text}"
        assert "x by boxes" in text, f"{case}: {text}"


def test_gather_has_three_warpgroups_multiply_what_the_gpu_tests_say(gather_plans):
    """Tiles of 192 pixels: no others have so many."""
    told = set()
    for case, layout in itertools.product(GATHER_WIDE_CASES, LAYOUTS):
        for _, text in gather_texts(gather_plans, case, layout):
            found = re.search(r"tile of (\d+) channels x 192 pixels, x by (boxes|fours) .* of them in (\d) parts", text)
            if found:
                channels, by, parts = found.groups()
                told.add((int(channels), by, "in scaled fp16" in text, "x copied" in text, case.R, int(parts) > 1))
    assert told == {
        (128, "boxes", False, False, 1, False),
        (128, "boxes", False, False, 1, True),
        (128, "boxes", False, True, 1, False),
        (128, "boxes", True, True, 1, False),
        (128, "boxes", True, True, 3, True),
        (64, "boxes", False, False, 1, False),
        (64, "fours", False, False, 1, False),
    }


def test_gather_takes_images_where_the_gpu_tests_say(gather_plans):
    """Both kinds of tiles, and tiles in parts."""
    told = set()
    for case in GATHER_IMAGES_GPU_CASES:
        for _, text in gather_texts(gather_plans, case, "contiguous"):
            found = re.search(r"tile of (\d+) channels x \d+ pixels, x by images .* of them in (\d) parts", text)
            if found:
                told.add(tuple(map(int, found.groups())))
    assert {channels for channels, _ in told} == {128, 256}
    assert {parts for _, parts in told} > {1}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_takes_boxes_of_a_tap_where_the_gpu_tests_say(gather_plans, layout):
    for case in GATHER_APART_CASES:
        for operator, text in gather_texts(gather_plans, case, layout):
            assert text.startswith("x copied, ") == (layout == "contiguous"), f"{operator} of {case}: {text}"
            assert "x by boxes of a tap in " in text, f"{operator} of {case}: {text}"


GATHER_SHIM_ENTRY_POINTS = (
    """
#include <type_traits>
"""
    + PROBLEM_FROM_FIELDS
    + r"""
using namespace modelnew;
using namespace modelnew::gather;

extern "C" {
int done_again = 0;     // of the latest run: values of x that did not fit, or -1: everything
int forced_splits = 0;  // parts of the reduction, or 0: any
int sms = 3;            // of the GPU that is planned for
int latest_parts = 1;   // of a tile of the latest run, which are a cluster
int most_listed = kMostListed;
int latest_source = -1;  // how x came in the latest run
int latest_boxes = 0;    // whether y of tiles of lines was stored by boxes in it
int wants_images = 0;    // x by images, or not at all

// Of what tma multiplies, which come behind gather's own shapes of a tile.
int tma_windows = -1, tma_splits = 1;  // -1: as the plan likes it

unsigned gather_sources(int shape) { return kTileShapes[shape].sources; }
}

// Plans one shape of a tile on a GPU of a few SMs and runs it: -1 if it does not fit, else the error.
extern "C" int gather_run(int op, const int64_t* fields, void* const* pointers, int shape, int seed) {
  simt::independent = true;
  simt::before_block = simt::begin_block;
  simt::between_rounds = simt::do_some;
  simt::late = seed % 2;
  simt::launched.clear();
  const Problem problem = make_problem(fields);
  const Operator which = static_cast<Operator>(op);
  Params params{};
  params.in_ptr = which == Operator::kDgrad ? pointers[3] : pointers[0];
  params.bias_ptr = pointers[2];
  params.out_ptr = pointers[4];
  params.of = phased_of(problem, which);
  const auto address = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  const Alignment alignment{address(params.in_ptr), address(params.out_ptr)};
  const int bytes = element_bytes(problem.dtype);
  constexpr int kShapes = static_cast<int>(std::size(kTileShapes));
  const int tma_shape = shape - kShapes;
  if (tma_shape >= tma::kTileShapeCount) return -1;
  if (wants_images) {
    const int splits = std::max(forced_splits, 1);
    const Cut cut{Cut::kImages, 1, 1};
    if (!complete(params.of, bytes, Device{sms}, alignment, kTileShapes[shape], splits, cut, false, params.plan) ||
        !params.plan.in_images)
      return -1;
    params.plan.by = divisors(params.of, params.plan);
  } else if (!make_plan(params.of, bytes, Device{sms}, alignment, std::min(shape, kShapes), params.plan,
                        forced_splits)) {
    return -1;
  }
  const Plan plan = params.plan;
  tma::Planned by_tma{tma::grouped_products(as_planned(params.of, plan)), {}, false};
  const tma::Wishes wishes{tma_shape, tma_windows, tma_splits, -1};
  const int tma_sms = tma_splits > 1 ? 64 : sms;
  if (plan.by_tma) {
    by_tma.found = tma::make_contained_plan(by_tma.of, tma_sms, alignment.out, by_tma.plan, wishes);
    if (!by_tma.found) return -1;
  }
  const auto multiply_by_tma = [&](const ContainedProducts& products) {
    return tma::run_contained(by_tma, products, nullptr);
  };
  latest_source = static_cast<int>(source_of_plan(plan));
  latest_boxes = plan.boxes && !plan.points && !plan.packed;
  Plan again{};
  latest_parts = plan.splits;
  if (plan.contained && !plan_again(params.of, Device{sms}, alignment, again)) return -1;
  Workspace workspace(workspace_layout(params.of, plan, again, bytes).end);
  simt::again = plan.splits > 1 || by_tma.plan.splits > 1;
  simt::shown.clear();
  cudaError_t error = cudaSuccess;
  for (int i = 0; i <= simt::again && error == cudaSuccess; ++i) {
    simt::shuffler.seed(seed);
    simt::first_of_call = true;
    Params of_run = params;
    std::fill(std::begin(turns), std::end(turns), 0u);
    error = bytes == 4 ? run<float>(pointers[1], workspace.data(), again, of_run, multiply_by_tma, nullptr)
                       : run<Half>(pointers[1], workspace.data(), again, of_run, multiply_by_tma, nullptr);
  }
  if (!workspace.intact()) return -2;
  if (error == cudaSuccess && simt::allows_next) {
    simt::message = "the next call is allowed before this one has ended";
    return cudaErrorLaunchFailure;
  }
  ContainedControl control{};
  if (plan.contained) std::memcpy(&control, workspace.data(), sizeof control);
  const bool all = control.all_again != 0 || control.listed > kMostListed;
  done_again = all ? -1 : static_cast<int>(control.listed);
  return error;
}
extern "C" {
const char* gather_launched() {  // in the latest run, mangled
  static std::string names;
  names.clear();
  for (const std::string& name : simt::launched) names += name + "\n";
  return names.c_str();
}
}
"""
)

# What gather.cu has in assembly of its own.
GATHER_ASSEMBLY = {
    r'asm volatile\("st\.shared\.v4[^;]*;[^;]*;': (
        "simt::check_shared(address, 16); const uint32_t words[4] = {a, b, c, d}; "
        "std::memcpy(simt::smem + address, words, 16);"
    ),
}


# Each takes away what some other warp relies on, or moves what another one reads.
GATHER_MUTATIONS = {
    "reads x before it is there": left_out("hopper::barrier_wait(shared.x_full("),
    "overwrites weights in use": left_out("hopper::barrier_wait_idly(shared.w_empty(at"),
    "stores before the last steps are done": left_out("hopper::wgmma_wait<0>();"),
    "reads points elsewhere": (
        "m % 4 * (tile_pixels(plan) / 4 + 2)",
        "m % 4 * (tile_pixels(plan) / 4 + 2 - MUTATED)",
    ),
    "stages where a box is read": (
        "if (lane == 0) hopper::bulk_stores_wait_read<BUFFERS - 1>();\n      __syncwarp();  // the buffer",
        "if (lane == 0 && !MUTATED) hopper::bulk_stores_wait_read<BUFFERS - 1>();\n      __syncwarp();  // the buffer",
    ),
    "stages where a box of planes is read": (
        "if (lane == 0) hopper::bulk_stores_wait_read<BUFFERS - 1>();\n      __syncwarp();  // the planes",
        "if (lane == 0 && !MUTATED) hopper::bulk_stores_wait_read<BUFFERS - 1>();\n      __syncwarp();  // the planes",
    ),
    "stores a box of planes before all is staged": left_out("__syncwarp();  // all planes are staged"),
    "stores the next image's first pixels as another channel's box": (
        "pieces[piece ^ lane / 2 % 4]",
        "pieces[piece ^ (MUTATED ? 0 : lane / 2 % 4)]",
    ),
    "puts a cluster's sums where the other warpgroup still reads": left_out(
        "named_barrier(kMultiplyBarrier, 128 * WARPGROUPS);  // nobody reads the rings any more"
    ),
    "adds up a cluster's sums before they are there": left_out("hopper::cluster_sync();  // the sums of all blocks"),
    "adds up all of a cluster but the last one": (
        "sums[0] += fours[part][mb][i].x;",
        "if (!MUTATED || first + part < splits - 1) sums[0] += fours[part][mb][i].x;",
    ),
    "packs channels of images as neighbours": (
        "first = in_row + before * (Format::CHANNELS - 1);",
        "first = in_row + before * (Format::CHANNELS - 1) + MUTATED * (in_row - before) % 8;",
    ),
    "reads the next of several images where this one would go on": (
        "return n * plan.image_words + in_images - n * plan.plane_slots;",
        "return MUTATED ? in_images : n * plan.image_words + in_images - n * plan.plane_slots;",
    ),
    "expects less of images than comes": ("images * image_bytes);", "(images - MUTATED) * image_bytes);"),
    "stores another block's share of a cluster": (
        "const Share own{rank * kChunks / splits,",
        "const Share own{(rank + MUTATED) * kChunks / splits,",
    ),
    "contains rows of weights before they are measured": left_out("__syncthreads();  // all have seen their weights"),
    "contains rows of weights from the row beside": (
        "of_piece = staged + in_block * contain.row_pitch",
        "of_piece = staged + (in_block ^ MUTATED) * contain.row_pitch",
    ),
    "contains a whole piece of weights where a group ends": (
        "if (piece.first <= 0 && piece.end >= 8) {",
        "if (piece.first <= 0 && (MUTATED || piece.end >= 8)) {",
    ),
    "stores what was staged of every other channel": (
        "staged + i * DISTANCE * kPixelsPitch;",
        "staged + i * (DISTANCE >> MUTATED) * kPixelsPitch;",
    ),
    "leaves out the last channel of what was staged": (
        "if (exists && k + i * DISTANCE < channels) {",
        "if (exists && k + i * DISTANCE < channels - MUTATED) {",
    ),
    "adds the bias of another channel": ("widen(bias[k + i * DISTANCE])", "widen(bias[k + i * (DISTANCE >> MUTATED)])"),
    "stages the bias of another channel": ("staged_bias[k] = added(k);", "staged_bias[k] = added(k ^ MUTATED);"),
    "contains weights of the next group as this one's": (
        "piece.first <= c && c < piece.end ? of_piece",
        "(MUTATED || piece.first <= c) && c < piece.end ? of_piece",
    ),
    "mends outputs of other groups": (
        "misfit.c < least || misfit.c >=",
        "(!MUTATED && misfit.c < least) || misfit.c >=",
    ),
    "contains x before all of it is there": (
        "if constexpr (VECTOR != 8) {\n    __syncthreads();",
        "if constexpr (VECTOR != 8) {\n    if (!MUTATED) __syncthreads();",
    ),
    "leaves what does not fit in the copy, by pixels": (
        "reinterpret_cast<Half*>(shared[row])[channel] = Half{};",
        "reinterpret_cast<Half*>(shared[row])[channel].bits *= MUTATED;",
    ),
    "leaves what does not fit in the copy, by eights": (
        "static_cast<Half*>(copy.out_ptr)[place] = Half{};",
        "static_cast<Half*>(copy.out_ptr)[place].bits *= MUTATED;",
    ),
    "mends in the order in which values came": (
        "shared.list[before] = {",
        "shared.list[MUTATED ? i : before] = {",
    ),
    "mends before the list is there": left_out("__syncthreads();  // the list is in order"),
    "mends before one has looked at the list": left_out("__syncwarp();  // all of the list has been looked at"),
    "mends the next output too early": left_out("__syncwarp();  // the next output's do not overtake them"),
    "mends once for each value": ("is_first && reads[i] == 0", "is_first && (MUTATED || reads[i] == 0)"),
    "packs before what came before has ended": left_out("hopper::wait_for_prerequisites();  // whoever wrote w and x"),
    "contains before what came before has ended": left_out(
        "hopper::wait_for_prerequisites();  // whoever wrote x and w"
    ),
    "allows the next call before it has ended": (
        "if (Format::CONTAINED) hopper::launch_dependents",
        "if (MUTATED || Format::CONTAINED) hopper::launch_dependents",
    ),
    "mends another share of the channels than its own": (
        "is_first ? 32 * share + lane",
        "is_first ? 32 * (MUTATED ? 0 : share) + lane",
    ),
    "mends values of one phase as another's": (
        "source_pixel(copy, pixel, channel / phase_channels)",
        "source_pixel(copy, pixel, MUTATED ? 0 : channel / phase_channels)",
    ),
    "reads phases from the next slot on": (
        "shift = phases.first_r[row_phase] * plan.pitch + phases.first_s[column_phase];",
        "shift = phases.first_r[row_phase] * plan.pitch + phases.first_s[column_phase] + MUTATED;",
    ),
    "packs taps of phases one over another": (
        "down.tap * phases.s[right.phase] + right.tap",
        "down.tap * phases.s[right.phase] + (MUTATED ? 0 : right.tap)",
    ),
    "contains phases of columns one over another": (
        "return place + (phase + row % kRowsOfPixel) * phase_channels;",
        "return place + (phase + (MUTATED ? 0 : row % kRowsOfPixel)) * phase_channels;",
    ),
    "loads the first phase at the start of a part": (
        "int phase = tile.first_block & (phases - 1);",
        "int phase = MUTATED ? 0 : tile.first_block & (phases - 1);",
    ),
    "multiplies by the first phase at the start of a part": (
        "phase = phased ? tile.first_block & (phases_of(phases) - 1) : 0;",
        "phase = phased && !MUTATED ? tile.first_block & (phases_of(phases) - 1) : 0;",
    ),
    "loads even rows of x itself for odd ones": (
        "h = 2 * h + row_phase;",
        "h = 2 * h + (MUTATED ? 0 : row_phase);",
    ),
    "loads even columns of x itself for odd ones": (
        "w = 2 * w + column_phase;",
        "w = 2 * w + (MUTATED ? 0 : column_phase);",
    ),
    "stores boxes of lines that are not there into the next image": (
        "pixels.exist && first + 16",
        "(MUTATED || pixels.exist) && first + 16",
    ),
    "stores boxes of all lines as the first one's": ("first = p * of.Q + q;", "first = (MUTATED ? 0 : p) * of.Q + q;"),
    "reads what lands before it has": left_out("hopper::barrier_wait_idly(shared.landed_full("),
    "lands where something else is still read": left_out("hopper::barrier_wait_idly(shared.landed_empty("),
    "puts what landed into windows in use": left_out("hopper::barrier_wait_idly(shared.x_empty("),
    "gives back what landed before all have read it": left_out("__syncwarp();  // what has landed has been read"),
    "stages what landed where a box is read": left_out("hopper::barrier_wait(shared.staged_empty("),
    "stores what landed before all is staged": left_out("__syncwarp();  // all channels are staged"),
    "leaves in a window what landed and does not fit": (
        "reinterpret_cast<Half*>(window + to)[c] = Half{};",
        "reinterpret_cast<Half*>(window + to)[c].bits *= MUTATED;",
    ),
    "copies weights of what lands where others are read": left_out(
        "hopper::barrier_wait_idly(shared.w_empty(w.slot()),"
    ),
    "multiplies what landed by weights that are not there": (
        "if (kShares || r == 0) hopper::barrier_wait(shared.w_full(",
        "if ((kShares || r == 0) && !MUTATED) hopper::barrier_wait(shared.w_full(",
    ),
    "multiplies even columns of what landed by taps of odd ones": (
        "kShape.slot_of(r, s) + i * kSlots",
        "kShape.slot_of(r, kShape.stride == 2 && MUTATED ? s / 2 * 2 : s) + i * kSlots",
    ),
    "puts odd columns of what landed where even ones are": (
        "Shape::kShape.phase_slots() - 1);",
        "Shape::kShape.phase_slots() - !MUTATED);",
    ),
    "puts halves of the channels of what landed the other way round": (
        "(2 * piece + four) * 16",
        "(2 * (piece ^ MUTATED) + four) * 16",
    ),
    "leaves what lies beside landed rows as it was": (
        "i < shared.layout.w_ring;",
        "i < shared.layout.w_ring && !MUTATED;",
    ),
    "lists what landed of all boxes as of the first one": (
        "row = from / kBoxWords * kShape.box_rows();",
        "row = MUTATED ? 0 : from / kBoxWords * kShape.box_rows();",
    ),
    "lists what landed of the second of two pieces as of the first one": (
        "const int from = pixels[i].from + (kShape.channels_last ? 0 : j);",
        "const int from = pixels[i].from + (kShape.channels_last || MUTATED ? 0 : j);",
    ),
    "stores the rest of the rows that landed where the first ones are": (
        "tile.p + own_row + kFirstRow;",
        "tile.p + own_row + (MUTATED ? 0 : kFirstRow);",
    ),
    "stages the rest of what landed where the first rows are read": (
        "if (lane == 0) hopper::bulk_stores_wait_read<0>();\n      __syncwarp();  // the rows before",
        "if (lane == 0 && !MUTATED) hopper::bulk_stores_wait_read<0>();\n      __syncwarp();  // the rows before",
    ),
    "stages the rest of what landed before the first rows have been read": left_out(
        "__syncwarp();  // the rows before have been read"
    ),
    "does all again without the first piece of a part": (
        "number = first + static_cast<int>(threadIdx.x)",
        "number = first + MUTATED + static_cast<int>(threadIdx.x)",
    ),
    "lists what landed in each window": ("if (own) list_misfit", "if (own || MUTATED) list_misfit"),
    "brings weights of the first tile of channels": (
        "tile.n_block * plan.tile_n, 0, 0, shared",
        "(MUTATED ? 0 : tile.n_block) * plan.tile_n, 0, 0, shared",
    ),
    "copies x from elsewhere": ("from[channel * of.in_stride[1]]", "from[(channel + MUTATED) * of.in_stride[1]]"),
    "by tma: undoes the scale of another channel": (
        "params.w_factors[channel] * x_factor",
        "params.w_factors[channel ^ MUTATED] * x_factor",
    ),
    "by tma: packs pieces of a row in another order": (
        "piece_of_all = number - tap * params.pieces;",
        "piece_of_all = number - tap * params.pieces; if (MUTATED) piece_of_all = params.pieces - 1 - piece_of_all;",
    ),
    "by tma: stages floats where others are read": left_out(
        "__syncwarp();  // floats of the run before have been read"
    ),
    "by tma: stores floats before all are staged": left_out("__syncwarp();  // all floats of the run are staged"),
}


class GatherShim:
    """The gather engine in fp32 and fp16, compiled by g++ and run thread by thread, as WgmmaShim runs the other one."""

    def __init__(self, folder: Path) -> None:
        headers = {**modelnew._sources, "hopper.cuh": HOPPER_STAND_IN + MMA_INSTRUCTION}
        # tma multiplies some contained operands.
        source = with_mutations(amalgamate(headers, ["gather.cu", "tma.cu"]), GATHER_MUTATIONS)
        for pattern, replacement in GATHER_ASSEMBLY.items():
            source, found = re.subn(pattern, lambda _, text=replacement: text, source)
            assert found == 1, pattern
        source = source.replace("run<BFloat16>(", "run<Half>(")  # the same code
        self.library = compile_simt(source + '#line 1 "entry_points"\n' + GATHER_SHIM_ENTRY_POINTS, folder)
        for name in ("simt_message", "gather_launched"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.gather_sources.restype = ctypes.c_uint

    def fault(self, operator: str, case: Case, dtype: torch.dtype, shape: int, layout: str, seed: int) -> str | None:
        """What is wrong with a run on integers, with a bias or without and at any alignment, or an empty text.

        None if there is no plan of this shape of a tile.
        """
        rng = random.Random(seed)
        tensors = make_tensors(case, dtype, integers, seed=seed)
        expected = references(case, tensors)[operator]
        if operator == "fprop" and rng.random() < 0.5:
            expected -= tensors.pop("bias").double().view(-1, 1, 1)
        shift = rng.choice([0, 0, 0, 1, 2])  # elements
        tensors = {name: shifted(tensor, shift) for name, tensor in tensors.items()}
        inner = shifted(tensors["x"].new_full(expected.shape, math.nan), rng.choice([0, 0, 0, 1, 2]))
        out = inner
        if layout == "channels_last":
            for name in ("x", "dy"):
                tensors[name] = shifted(tensors[name].permute(0, 2, 3, 1), shift).permute(0, 3, 1, 2)
            N, K, P, Q = expected.shape
            out = inner.view(N, P, Q, K).permute(0, 3, 1, 2)
        if rng.random() < 0.5:
            tensors["w"] = shifted(tensors["w"].permute(0, 2, 3, 1), shift).permute(0, 3, 1, 2)
        fields = ShimEngine.fields(case, tensors | {{"fprop": "dy", "dgrad": "x"}[operator]: out}, True)
        pointers = (ctypes.c_void_p * 5)(*input_pointers(operator, tensors), out.data_ptr())
        code = self.library.gather_run(OPERATOR_NUMBER[operator], fields, pointers, shape, seed)
        if code != 0:
            return None if code == -1 else f"error {code}, {self.library.simt_message().decode()}"
        if self.done_again() != 0:
            return "integers that are not contained"
        if shape in GATHER_CONTAINED:
            vectors = contain_vectors(operator, case, tensors[OPERANDS[operator][0]])
            if not self.contained_by() <= vectors:
                return f"contained by {self.contained_by()}, not by {vectors}"
        if not torch.equal(out, expected.to(dtype)):
            return f"{(out != expected.to(dtype)).sum()} of {out.numel()} outputs are wrong"
        return "" if margins_intact(inner) else "written outside the output"

    def run(
        self, operator: str, case: Case, tensors: dict[str, Tensor], shape: int, seed: int, out: Tensor
    ) -> str | None:
        """Runs fprop or dgrad of one shape of a tile into `out`: None if there is no plan, else what went wrong."""
        fields = ShimEngine.fields(case, tensors | {{"fprop": "dy", "dgrad": "x"}[operator]: out}, True)
        pointers = (ctypes.c_void_p * 5)(*input_pointers(operator, tensors), out.data_ptr())
        code = self.library.gather_run(OPERATOR_NUMBER[operator], fields, pointers, shape, seed)
        if code == -1:
            return None
        return "" if code == 0 else f"error {code}, {self.library.simt_message().decode()}"

    def result(
        self, operator: str, case: Case, tensors: dict[str, Tensor], layout: str, shape: int, seed: int
    ) -> Tensor:
        """y or dx of a run that is to succeed, with all tensors in this layout."""
        N, K, P, Q = {"fprop": case.y_shape, "dgrad": case.x_shape}[operator]
        inner = out = with_margins(torch.full((N, K, P, Q), math.nan))
        if layout == "channels_last":
            tensors = {name: VIEWS["channels_last"](t) if t.dim() == 4 else t for name, t in tensors.items()}
            out = inner.view(N, P, Q, K).permute(0, 3, 1, 2)
        assert self.run(operator, case, tensors, shape, seed, out) == ""
        assert margins_intact(inner)
        return out

    def fault_in_turn(
        self, operator: str, case: Case, dtype: torch.dtype, turn: int, layout: str, seed: int
    ) -> tuple[int, str]:
        """A shape of a tile, none of contained operands, and its fault: the first one from this one on with a plan."""
        shapes = GATHER_SHAPES if dtype == torch.float32 else GATHER_SHAPES_16
        for i in range(len(shapes)):
            shape = shapes[(turn + i) % len(shapes)]
            fault = self.fault(operator, case, dtype, shape, layout, seed)
            if fault is not None:
                return shape, fault
        raise AssertionError("no shape of a tile has a plan")

    def launched(self) -> list[str]:
        """The kernels of the latest run, as their symbols have them."""
        return self.library.gather_launched().decode().splitlines()

    def contained_by(self) -> set[int]:
        """How many values of x the latest run's contain_kernel took at once."""
        return {
            int(vector) for vector in re.findall(r"contain_kernelILi(\d)E", self.library.gather_launched().decode())
        }

    @contextlib.contextmanager
    def splitting(self, count: int, sms: int = 3) -> Iterator[None]:
        """Runs cut tiles up into so many parts of the reduction, on a GPU of so many SMs; 0: as the plan likes it."""
        of_library = [ctypes.c_int.in_dll(self.library, name) for name in ("forced_splits", "sms")]
        before = [value.value for value in of_library]
        for value, new in zip(of_library, (count, sms), strict=True):
            value.value = new
        try:
            yield
        finally:
            for value, old in zip(of_library, before, strict=True):
                value.value = old

    def parts(self) -> int:
        """Of a tile of the latest run, at most."""
        return ctypes.c_int.in_dll(self.library, "latest_parts").value

    def done_again(self) -> int:
        """Of the latest run: how many values of x were mended, or ALL_AGAIN."""
        return ctypes.c_int.in_dll(self.library, "done_again").value


ALL_AGAIN = -1


def contain_vectors(operator: str, case: Case, x: Tensor) -> set[int]:
    """How many values of x contain_kernel may take at once: as many as lie side by side."""
    (C, H, W), (of_image, of_channel, of_row, of_column), address = x.shape[1:], x.stride(), x.data_ptr()
    taps, strides = (case.R, case.S), case.stride if operator == "fprop" else (1, 1)
    if of_channel == 1 and C % 8 == 0 and (of_image | of_row | of_column) % 4 == 0 and address % 16 == 0:
        return {8}
    dense = of_column == 1 and of_row == W and (of_channel | of_image) % 4 == 0 and H * W % 4 == 0 and address % 16 == 0
    if dense and strides == (1, 1):
        return {4} if taps == (1, 1) and case.padding == (0, 0) else {1} if taps == (1, 1) else {1, 4}
    phased = strides == (2, 2) and min(taps) > 1 and case.dilation == (1, 1)
    pairs = of_column == 1 and (of_image | of_channel | of_row | W) % 2 == 0 and address % 8 == 0
    return {2} if phased and pairs else {1}


@built_beside_the_tests
def gather_shim(folder: Path) -> GatherShim:
    return GatherShim(folder)


# Points and windows, several images in a tile and several tiles, more channels than a stage and than a tile, groups.
GATHER_SHIM_CASES = [
    (Case(3, 40, 12, 12, 72, 1, 1), "fprop"),
    (Case(2, 72, 9, 13, 24, 1, 1, stride=(2, 3), padding=(1, 0)), "fprop"),
    (Case(9, 16, 5, 6, 130, 3, 3, stride=(2, 2), padding=(1, 1)), "fprop"),
    (Case(2, 24, 17, 21, 16, 2, 3, stride=(3, 1), dilation=(1, 2), groups=2), "fprop"),
    (Case(3, 64, 7, 7, 40, 3, 3, padding=(1, 1)), "dgrad"),
    (Case(5, 32, 8, 8, 96, 1, 1, groups=2), "dgrad"),
    (Case(9, 136, 7, 7, 300, 1, 1), "fprop"),
]


# Of kTileShapes: those of fp32, the first two of 16 bits as well, those of contained operands, of fp32 again those of
# blocks with one multiplying warpgroup or three, for points only, and those of operands that are contained on their
# way.
GATHER_WINDOWS, GATHER_SHAPES_16 = range(5), range(2)
GATHER_CONTAINED, GATHER_POINTS = (5, 6, 7, 8, 22), (9, 10, 11, 21, 23)
GATHER_LANDING = range(12, 21)
GATHER_BY_TMA = range(24, 35)  # behind them, what tma multiplies, by its own shapes of a tile
GATHER_SHAPES = [*GATHER_WINDOWS, *GATHER_POINTS]
# Channels of a tile of these, rows of a warpgroup, columns, and the stride.
LANDING_TILES = {
    12: (64, 7, 32, 1),
    13: (64, 8, 32, 1),
    14: (128, 7, 32, 1),
    15: (128, 8, 32, 1),
    16: (128, 7, 28, 1),
    17: (128, 14, 14, 1),
    18: (128, 7, 28, 2),
    19: (128, 14, 14, 2),
    20: (128, 7, 14, 2),
}


def landing_shapes(operator: str, case: Case, layout: str) -> list[int]:
    """Those of 128 channels have a kernel for filters of three rows only. Of fewer columns than 32 planes have one tile
    a row, if any; at a stride of 2 there are some of planes only, of whole rows. In channels_last eight rows of two
    warpgroups leave no room for three rows of a filter.
    """
    wanted = (case.y_shape if operator == "fprop" else case.x_shape)[3]

    def takes(channels: int, rows: int, columns: int, stride: int) -> bool:
        if case.stride != (stride, stride) or (channels == 128 and case.R != 3) or columns - columns // 8 > wanted:
            return False
        if layout == "channels_last":
            return stride == 1 and ((channels, rows) != (64, 8) or case.R < 3)
        if stride == 2:
            return (case.W, case.padding[1]) == (2 * columns, 1)
        return wanted % 4 == 0 and (columns == 32 or columns >= wanted)

    return [shape for shape, tile in LANDING_TILES.items() if takes(*tile)]


GATHER_CUT_UP = (2, 4, 7, 8, 9, 11, 21, 22, 23)  # those whose tiles may all be cut up into parts
# Cases of every Source but the one of any, in its order: single words, fours of pixels, images, channels, boxes, boxes
# of phases of x and boxes of a tap. 16 bits have neither images nor the last two. The shape of half a stage, in which
# pieces of channels are apart, takes neither 1x1 nor boxes: it has cases of its own.
GATHER_SOURCES = (
    (Case(3, 42, 9, 13, 72, 1, 1, stride=(2, 1)), "contiguous"),
    (Case(3, 40, 12, 12, 72, 1, 1), "contiguous"),
    (Case(9, 128, 5, 9, 72, 1, 1), "contiguous"),
    (Case(3, 40, 9, 7, 72, 1, 1, stride=(2, 1)), "channels_last"),  # rows too short for boxes
    (Case(3, 72, 9, 9, 136, 2, 3, padding=(1, 0)), "channels_last"),
    (Case(3, 72, 9, 15, 136, 3, 3, stride=(2, 2), padding=(1, 1)), "channels_last"),
    (Case(2, 72, 24, 24, 136, 3, 3, padding=(10, 10), dilation=(10, 10)), "channels_last"),
)
GATHER_ANY, GATHER_HALF_A_STAGE = len(GATHER_SOURCES), 3
GATHER_IMAGES, GATHER_CHANNELS, GATHER_BOXES, GATHER_PHASES, GATHER_TAPS = range(2, 7)
GATHER_SHAPES_OF_PHASES, GATHER_SHAPES_OF_IMAGES = (0, 1, 4), (0, 4)
GATHER_SOURCES_16 = [
    (shape, source, GATHER_ANY)
    for shape in GATHER_SHAPES_16
    for source in range(GATHER_PHASES)
    if source != GATHER_IMAGES
]
GATHER_SOURCES_32 = [
    (shape, source, source)
    for shape in GATHER_SHAPES
    for source in range(GATHER_ANY)
    if shape in GATHER_SHAPES_OF_PHASES
    or source in ((0, GATHER_CHANNELS) if shape == GATHER_HALF_A_STAGE else range(GATHER_PHASES))
    if shape in GATHER_SHAPES_OF_IMAGES or source != GATHER_IMAGES  # others have single words of these, or a copy
]


@pytest.mark.parametrize(
    "shape, source, of_kernel, dtype",
    [(*one, torch.float32) for one in GATHER_SOURCES_32] + [(*one, torch.float16) for one in GATHER_SOURCES_16],
    ids=str,
)
def test_gather_shim_runs_each_kernel(gather_shim, shape, source, of_kernel, dtype):
    """Each shape of a tile with x by each way there is for it; for the others there is no plan."""
    case, layout = GATHER_SOURCES[source]
    if shape == GATHER_HALF_A_STAGE:
        case = Case(2, case.C, 9, 8, 136, 3, 3)
    if shape in GATHER_POINTS and case.R > 1:
        assert gather_shim.fault("fprop", case, dtype, shape, layout, seed=2) is None
        case = dataclasses.replace(case, K=56, R=1, S=1, padding=(0, 0))
    if not gather_shim.library.gather_sources(shape) >> of_kernel & 1:
        assert gather_shim.fault("fprop", case, dtype, shape, layout, seed=2) is None
        return
    for seed in (2, 9):  # tensors at aligned addresses
        with by_images(gather_shim) if source == GATHER_IMAGES else contextlib.nullcontext():
            assert gather_shim.fault("fprop", case, dtype, shape, layout, seed) == ""
        assert ctypes.c_int.in_dll(gather_shim.library, "latest_source").value == source
        (kernel,) = (name for name in gather_shim.launched() if "gather_kernel" in name)
        assert f"SourceE{of_kernel}E" in kernel


# Tiles of some pixels of one image, of two and of many, channels of less than a tile, groups; few and many stages.
GATHER_IMAGES_CASES = [
    (Case(9, 128, 5, 9, 72, 1, 1), "fprop"),
    (Case(2, 64, 11, 17, 300, 1, 1), "fprop"),
    (Case(21, 136, 3, 7, 320, 1, 1), "dgrad"),
    (Case(6, 256, 7, 7, 272, 1, 1, groups=2), "fprop"),
    (Case(1, 288, 5, 7, 40, 1, 1), "fprop"),
]


@contextlib.contextmanager
def by_images(gather_shim: GatherShim) -> Iterator[None]:
    """Runs have x by images or no plan, as what copies it may be faster by the estimate."""
    wants_images = ctypes.c_int.in_dll(gather_shim.library, "wants_images")
    wants_images.value = 1
    try:
        yield
    finally:
        wants_images.value = 0


# Of a case in a shape of a tile: parts of a tile, on a GPU of so many SMs. Of tiles of 256 channels only those of the
# last turn may be parts.
GATHER_IMAGES_RUNS = [
    *((number, shape, 1, 3) for number in range(5) for shape in GATHER_SHAPES_OF_IMAGES),
    *((number, 4, splits, 72) for number, splits in ((0, 2), (0, 4), (2, 3), (3, 2), (4, 3))),
    (3, 0, 2, 4),
]


@pytest.mark.parametrize("number, shape, splits, sms", GATHER_IMAGES_RUNS)
def test_gather_shim_exact_by_images(gather_shim, number, shape, splits, sms):
    case, operator = GATHER_IMAGES_CASES[number]
    with by_images(gather_shim), gather_shim.splitting(splits, sms):
        # Tensors at any alignment: there is a plan for those that are aligned.
        faults = [gather_shim.fault(operator, case, torch.float32, shape, "contiguous", seed) for seed in range(6)]
    assert set(faults) == {"", None}, faults
    assert gather_shim.parts() == splits


# Tiles that images end in, fewer channels than a stage, more than a tile and more than all stages, groups, a copy of x.
GATHER_POINTS_CASES = [
    (Case(1, 8, 4, 4, 8, 1, 1), "fprop"),
    (Case(3, 40, 12, 12, 72, 1, 1), "fprop"),
    (Case(7, 136, 6, 10, 132, 1, 1), "dgrad"),
    (Case(5, 264, 8, 8, 300, 1, 1), "fprop"),
    (Case(5, 136, 8, 8, 64, 1, 1, groups=2), "dgrad"),
    (Case(5, 72, 13, 11, 136, 1, 1, stride=(2, 3), padding=(1, 0)), "fprop"),
    (Case(9, 40, 17, 17, 40, 1, 1), "dgrad"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", GATHER_POINTS)
@pytest.mark.parametrize("number", range(len(GATHER_POINTS_CASES)))
def test_gather_shim_exact_with_one_multiplying_warpgroup_or_three(gather_shim, number, shape, layout):
    """Integers, of whole tiles and of parts."""
    case, operator = GATHER_POINTS_CASES[number]
    faults = []
    for splits in (0, 2, 3):
        with gather_shim.splitting(splits):
            # Tensors at aligned addresses, and y behind them.
            faults += [gather_shim.fault(operator, case, torch.float32, shape, layout, seed) for seed in (2, 9, 13)]
    assert set(faults) <= {"", None}, f"{operator} of {case}, shape {shape}: {faults}"
    wanted = case.stride == (1, 1) or layout == "contiguous"  # at a stride a copy, or pieces
    if shape == GATHER_POINTS[1]:  # by fours of pixels only
        wanted = layout == "contiguous" and case.stride == (1, 1) and case.H * case.W % 4 == 0
    elif shape == GATHER_POINTS[3] and layout == "contiguous":  # by boxes only, of a copy; that is for want of fours
        wanted = case.stride != (1, 1) or case.H * case.W % 4 != 0
    elif shape == GATHER_POINTS[4] and layout == "channels_last":  # of one tile of channels
        wanted = wanted and (case.K if operator == "fprop" else case.C) // case.groups <= 64
    assert ("" in faults[:3]) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(GATHER_SHIM_CASES)))
def test_gather_shim_exact(gather_shim, number, layout, dtype):
    """Integers through every role: each shape of a tile in turn."""
    case, operator = GATHER_SHIM_CASES[number]
    for seed in (2 * number, 2 * number + 1):
        turn = seed + number + LAYOUTS.index(layout)
        shape, fault = gather_shim.fault_in_turn(operator, case, dtype, turn, layout, seed)
        assert fault == "", f"{operator} of {case}, shape {shape}, seed {seed}: {fault}"


# Points, also at a stride and beyond the edge, and windows; channels in eights and not; several tiles, and stages;
# groups, several as one and one by one.
GATHER_SHIM_CONTAINED_CASES = [
    (Case(3, 40, 12, 12, 72, 1, 1), "fprop"),
    (Case(2, 75, 9, 13, 24, 1, 1, stride=(2, 3), padding=(1, 0)), "fprop"),
    (Case(5, 33, 8, 9, 104, 1, 1, padding=(1, 0)), "dgrad"),
    (Case(9, 136, 7, 7, 300, 1, 1), "fprop"),
    (Case(9, 17, 5, 6, 130, 3, 3, stride=(2, 2), padding=(1, 1)), "fprop"),
    (Case(3, 64, 7, 7, 40, 3, 3, padding=(1, 1)), "dgrad"),
    (Case(2, 72, 17, 21, 16, 2, 3, stride=(3, 1), dilation=(1, 2)), "fprop"),
    (Case(2, 64, 9, 10, 72, 3, 3, padding=(1, 1), groups=8), "fprop"),
    (Case(3, 128, 7, 8, 72, 3, 3, padding=(1, 1), groups=4), "fprop"),
    (Case(2, 96, 8, 9, 128, 1, 1, groups=4), "dgrad"),
    (Case(2, 128, 6, 7, 260, 2, 2, groups=2), "fprop"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(GATHER_SHIM_CONTAINED_CASES)))
def test_gather_shim_exact_when_contained(gather_shim, number, layout):
    """Integers in scaled fp16: each shape of a tile in turn, x from aligned addresses and others."""
    case, operator = GATHER_SHIM_CONTAINED_CASES[number]
    for turn, seed in enumerate((2, 3, 10)):  # tensors at aligned addresses, 8 and 4 bytes behind them
        shape = GATHER_CONTAINED[(turn + number + LAYOUTS.index(layout)) % len(GATHER_CONTAINED)]
        fault = gather_shim.fault(operator, case, torch.float32, shape, layout, seed)
        assert fault == "", f"{operator} of {case}, shape {shape}, seed {seed}: {fault}"


# Groups as one whose outputs are whole tiles, and more of them.
GATHER_SHIM_TMA_CASES = [
    *GATHER_SHIM_CONTAINED_CASES,
    (Case(2, 128, 9, 10, 128, 3, 3, stride=(2, 2), padding=(1, 1), groups=8), "fprop"),
    (Case(1, 128, 6, 7, 256, 2, 2, groups=2), "fprop"),
    (Case(2, 128, 7, 5, 128, 3, 3, padding=(1, 1), groups=4), "dgrad"),
]


@contextlib.contextmanager
def tma_wishes(gather_shim: GatherShim, windows: int, splits: int = 1) -> Iterator[None]:
    """Runs bring a copy of x by windows or by taps, and share a tile among so many blocks."""
    values = [ctypes.c_int.in_dll(gather_shim.library, name) for name in ("tma_windows", "tma_splits")]
    values[0].value, values[1].value = windows, splits
    try:
        yield
    finally:
        values[0].value, values[1].value = -1, 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(GATHER_SHIM_TMA_CASES)))
def test_gather_shim_exact_when_multiplied_by_tma(gather_shim, number, layout):
    """Integers in scaled fp16, which tma multiplies: by windows and by taps, each with every third tile."""
    case, operator = GATHER_SHIM_TMA_CASES[number]
    ways = set()
    for windows, shape in itertools.product((0, 1), GATHER_BY_TMA):
        if (shape + windows + number) % 3 and case.groups == 1:
            continue
        with tma_wishes(gather_shim, windows):
            fault = gather_shim.fault(operator, case, torch.float32, shape, layout, 10 * number + shape)
        assert fault in (None, ""), f"{operator} of {case}, shape {shape}, windows {windows}: {fault}"
        if fault == "":
            assert [name for name in gather_shim.launched() if "tma_kernel" in name]
            ways.add(windows)
    outputs = case.K if operator == "fprop" else case.C
    as_one = groups_as_one(case, operator)
    whole = as_one == case.groups or outputs // case.groups * as_one % 64 == 0
    windows = case.stride in ((1, 1), (2, 2)) and case.R * case.S > 1
    assert ways == ({0, 1} if windows else {0}) if whole else not ways


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_gather_shim_exact_when_multiplied_by_tma_in_parts(gather_shim, splits):
    case = Case(1, 520, 6, 7, 72, 3, 3, padding=(1, 1))
    runs = 0
    for layout, windows, shape in itertools.product(LAYOUTS, (0, 1), GATHER_BY_TMA):
        with tma_wishes(gather_shim, windows, splits):
            fault = gather_shim.fault("fprop", case, torch.float32, shape, layout, shape)
        assert fault in (None, ""), f"{layout}, shape {shape}, windows {windows}: {fault}"
        runs += fault == ""
    assert runs >= 8


GATHER_SHIM_LANDING_CASES = [
    (Case(2, 40, 12, 36, 72, 3, 3, padding=(1, 1)), "fprop"),
    (Case(1, 24, 33, 32, 136, 3, 3, padding=(1, 1)), "fprop"),
    (Case(2, 16, 9, 68, 40, 2, 3, padding=(0, 1)), "fprop"),
    (Case(3, 130, 5, 28, 33, 1, 3, padding=(0, 1)), "dgrad"),
    (Case(1, 9, 17, 60, 24, 3, 3, padding=(2, 3)), "fprop"),
    (Case(1, 70, 6, 28, 16, 4, 3, padding=(1, 1)), "fprop"),
    # In narrow tiles, and at a stride of 2: rows that are staged at once and twice, as many as there may be and fewer.
    (Case(2, 24, 9, 28, 136, 3, 3, padding=(1, 1)), "fprop"),
    (Case(1, 20, 16, 24, 40, 3, 3, padding=(0, 3)), "dgrad"),
    (Case(2, 40, 17, 56, 130, 3, 3, stride=(2, 2), padding=(1, 1)), "fprop"),
    (Case(1, 16, 28, 56, 24, 3, 3, stride=(2, 2), padding=(0, 1)), "fprop"),
    (Case(2, 9, 4, 56, 16, 3, 3, stride=(2, 2), padding=(2, 1)), "fprop"),
    (Case(2, 24, 28, 28, 130, 3, 3, stride=(2, 2), padding=(1, 1)), "fprop"),
    (Case(1, 17, 39, 28, 20, 3, 3, stride=(2, 2), padding=(0, 1)), "fprop"),
]


def landing_case(number: int, layout: str) -> tuple[Case, str]:
    """Such a case, in channels_last with channels by fours and rows as they are."""
    case, operator = GATHER_SHIM_LANDING_CASES[number]
    if layout == "channels_last":
        case = dataclasses.replace(case, C=-(-case.C // 4) * 4, K=-(-case.K // 4) * 4, W=case.W + number % 4)
    return case, operator


# Every shape of a tile that the case has.
GATHER_SHIM_LANDING_RUNS = [
    (number, shape, layout)
    for number, layout in itertools.product(range(len(GATHER_SHIM_LANDING_CASES)), LAYOUTS)
    for shape in landing_shapes(*landing_case(number, layout)[::-1], layout)
]


def test_gather_shim_runs_all_that_lands():
    runs = {(shape, layout) for _, shape, layout in GATHER_SHIM_LANDING_RUNS}
    assert runs == {*itertools.product(GATHER_LANDING, LAYOUTS)} - {
        (17, "contiguous"),
        *((shape, "channels_last") for shape in (18, 19, 20)),
    }


@pytest.mark.parametrize("number, shape, layout", GATHER_SHIM_LANDING_RUNS)
def test_gather_shim_exact_when_contained_on_its_way(gather_shim, number, shape, layout):
    case, operator = landing_case(number, layout)
    channels, rows, columns, stride = LANDING_TILES[shape]
    kernel = f"landing_kernelILi{channels}ELi{columns}ELi{rows}ELi{stride}ELb{int(layout == 'channels_last')}E"
    for seed in (2, 13):  # tensors at aligned addresses; at once, and as late as it may be
        fault = gather_shim.fault(operator, case, torch.float32, shape, layout, seed)
        assert fault == "", f"{operator} of {case}, shape {shape}, seed {seed}: {fault}"
        assert [name for name in gather_shim.launched() if kernel in name]


@pytest.mark.parametrize("shape", [12, 15])
def test_gather_shim_contains_long_rows_in_pairs(gather_shim, shape):
    """Weights of so many channels that a block has two rows of them and twice as many threads."""
    case = Case(1, 528, 2, 28, 40, 3, 3, padding=(1, 1))
    for seed in (2, 13):
        assert gather_shim.fault("fprop", case, torch.float32, shape, "contiguous", seed) == ""
        assert [name for name in gather_shim.launched() if "contain_rows_kernel" in name]


# In phases: points and windows, of fewer channels than a block and of several blocks, several images in a tile and
# several tiles, of one box and two, of boxes of rows.
GATHER_SHIM_PHASED_CASES = [
    Case(5, 70, 8, 10, 40, 3, 3, padding=(1, 1)),
    Case(3, 64, 9, 11, 72, 3, 3, padding=(0, 2)),
    Case(7, 24, 6, 7, 40, 2, 2),
    Case(4, 130, 5, 8, 24, 2, 2, padding=(3, 1)),
    Case(2, 16, 13, 12, 40, 5, 4, padding=(2, 3)),
    Case(3, 8, 15, 14, 130, 7, 7, padding=(3, 3)),
    Case(2, 9, 14, 15, 24, 7, 7, padding=(0, 1)),
    Case(2, 72, 20, 6, 16, 2, 3, padding=(1, 0)),
    Case(2, 16, 33, 30, 24, 3, 3, padding=(0, 1)),
    Case(1, 16, 5, 300, 24, 3, 3, padding=(1, 1)),
    Case(3, 128, 9, 10, 48, 3, 3, padding=(1, 1), groups=4),
    Case(2, 128, 7, 8, 72, 2, 2, padding=(1, 0), groups=2),
]
GATHER_SHIM_PHASED_CASES = [dataclasses.replace(case, stride=(2, 2)) for case in GATHER_SHIM_PHASED_CASES]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(GATHER_SHIM_PHASED_CASES)))
def test_gather_shim_exact_in_phases(gather_shim, number, layout):
    """By each way of containing x that the layout has, where tensors are aligned and where not."""
    case, seen = GATHER_SHIM_PHASED_CASES[number], set()
    for turn, seed in enumerate((2, 3)):  # aligned, and 8 bytes behind that
        shape = GATHER_CONTAINED[(turn + number + LAYOUTS.index(layout)) % len(GATHER_CONTAINED)]
        fault = gather_shim.fault("fprop", case, torch.float32, shape, layout, seed)
        assert fault == "", f"{case}, shape {shape}, seed {seed}: {fault}"
        seen |= gather_shim.contained_by()
    eights = layout == "channels_last" and case.C % 8 == 0
    pairs = layout == "contiguous" and case.W % 2 == 0
    assert (8 if eights else 2 if pairs else 1) in seen


@pytest.mark.parametrize("number, splits", [(0, 3), (0, 4), (1, 2), (3, 3), (3, 4), (8, 2)])
def test_gather_shim_exact_in_phases_and_parts(gather_shim, number, splits):
    """Parts of the reduction start at any phase."""
    case = GATHER_SHIM_PHASED_CASES[number]
    with gather_shim.splitting(splits, sms=72):
        faults = [gather_shim.fault("fprop", case, torch.float32, i, LAYOUTS[i % 2], i) for i in GATHER_CONTAINED]
    assert set(faults) <= {"", None}  # as many tiles as SMs are not cut up
    assert "" in faults


# Of x itself, in channels_last: channels that fill blocks and not, several images in a tile and several tiles, padding
# that is odd or even or larger than the filter, odd rows and columns, phases of one tap, boxes as large as they may be.
GATHER_SHIM_PHASES_OF_X = [
    Case(5, 36, 8, 18, 40, 3, 3, padding=(1, 1)),
    Case(3, 64, 9, 17, 136, 3, 3, padding=(0, 2)),
    Case(30, 8, 6, 34, 40, 2, 2),  # few enough pixels would be read as they are
    Case(16, 100, 5, 14, 24, 2, 2, padding=(3, 2)),
    Case(2, 12, 13, 21, 40, 5, 5, padding=(2, 3)),
    Case(2, 36, 15, 20, 24, 7, 4, padding=(3, 0)),
    Case(2, 72, 20, 19, 16, 2, 3, padding=(4, 1)),
    Case(1, 16, 5, 254, 24, 3, 3, padding=(1, 1)),
]
GATHER_SHIM_PHASES_OF_X = [dataclasses.replace(case, stride=(2, 2)) for case in GATHER_SHIM_PHASES_OF_X]


@pytest.mark.parametrize("number", range(len(GATHER_SHIM_PHASES_OF_X)))
def test_gather_shim_exact_in_phases_of_x(gather_shim, number):
    case = GATHER_SHIM_PHASES_OF_X[number]
    for turn, seed in enumerate((2, 9)):  # at aligned addresses; at once, and as late as it may be
        shape = GATHER_SHAPES_OF_PHASES[(turn + number) % 3]
        fault = gather_shim.fault("fprop", case, torch.float32, shape, "channels_last", seed)
        assert fault == "", f"{case}, shape {shape}, seed {seed}: {fault}"
        assert ctypes.c_int.in_dll(gather_shim.library, "latest_source").value == GATHER_PHASES


@pytest.mark.parametrize("number, splits", [(0, 3), (0, 8), (1, 2), (3, 3), (4, 4)])
def test_gather_shim_exact_in_phases_of_x_and_parts(gather_shim, number, splits):
    """Parts of the reduction start at any phase."""
    case, faults = GATHER_SHIM_PHASES_OF_X[number], []
    with gather_shim.splitting(splits, sms=72):
        for shape in (shape for shape in GATHER_SHAPES_OF_PHASES if shape != 0):  # without phases that one may be
            faults.append(gather_shim.fault("fprop", case, torch.float32, shape, "channels_last", 2))
            if faults[-1] is not None:
                assert ctypes.c_int.in_dll(gather_shim.library, "latest_source").value == GATHER_PHASES
    assert set(faults) <= {"", None}  # as many tiles as SMs are not cut up
    assert "" in faults


# Padding that is no multiple of the stride and more than that, rows and columns that nobody reads, one step or both,
# groups; the largest step of a box, and one that is larger.
GATHER_SHIM_ROWS_OF_POINTS = [
    (Case(3, 36, 9, 19, 72, 1, 1, stride=(2, 2)), GATHER_BOXES),
    (Case(2, 64, 11, 26, 24, 1, 1, stride=(3, 3), padding=(1, 2)), GATHER_BOXES),
    (Case(5, 32, 7, 8, 40, 1, 1, stride=(2, 1)), GATHER_BOXES),
    (Case(2, 128, 5, 33, 40, 1, 1, stride=(1, 4), padding=(1, 5), groups=2), GATHER_BOXES),
    (Case(2, 8, 3, 70, 24, 1, 1, stride=(2, 8)), GATHER_BOXES),
    (Case(2, 40, 9, 17, 24, 1, 3, stride=(2, 2), padding=(0, 1)), GATHER_BOXES),
    (Case(2, 40, 9, 27, 24, 3, 1, stride=(1, 3), padding=(1, 2)), GATHER_BOXES),
    (Case(2, 8, 3, 80, 24, 1, 1, stride=(2, 9)), GATHER_CHANNELS),
    (Case(2, 40, 9, 12, 24, 1, 1, stride=(2, 2)), GATHER_CHANNELS),  # rows that are too short
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("number", range(len(GATHER_SHIM_ROWS_OF_POINTS)))
def test_gather_shim_exact_by_rows_of_points(gather_shim, number, dtype):
    case, source = GATHER_SHIM_ROWS_OF_POINTS[number]
    shapes = (0, 4) if source != GATHER_BOXES else (0, 1, 2, 4)
    for turn, seed in enumerate((2, 9)):
        shape = (turn + number) % 2 if dtype == torch.float16 else shapes[(turn + number) % len(shapes)]
        fault = gather_shim.fault("fprop", case, dtype, shape, "channels_last", seed)
        assert fault == "", f"{case}, shape {shape}, seed {seed}: {fault}"
        if dtype == torch.float32 or case.C % 8 == 0:
            assert ctypes.c_int.in_dll(gather_shim.library, "latest_source").value == source


# Taps as far apart as they may be, and further apart than the image is large; one axis only; several images in a tile
# and several tiles; channels that fill a stage and not; groups; no padding, some, and so much that y is larger than x.
GATHER_SHIM_TAPS_APART = [
    (Case(3, 36, 9, 11, 40, 3, 3, padding=(4, 4), dilation=(4, 4)), "fprop"),
    (Case(2, 64, 20, 17, 72, 3, 3, padding=(6, 5), dilation=(6, 5)), "dgrad"),
    (Case(5, 40, 7, 7, 136, 3, 3, padding=(12, 12), dilation=(12, 12)), "fprop"),
    (Case(1, 100, 3, 34, 24, 1, 3, padding=(0, 16), dilation=(1, 16)), "fprop"),
    (Case(2, 32, 30, 4, 24, 3, 1, dilation=(13, 1)), "fprop"),
    (Case(1, 32, 30, 31, 24, 2, 2, padding=(28, 0), dilation=(28, 29)), "fprop"),
    (Case(2, 64, 13, 14, 48, 3, 3, padding=(5, 5), dilation=(5, 5), groups=2), "fprop"),
    (Case(1, 8, 2, 130, 8, 1, 3, padding=(0, 127), dilation=(1, 127)), "fprop"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(GATHER_SHIM_TAPS_APART)))
def test_gather_shim_exact_with_taps_apart(gather_shim, number, layout):
    """By boxes of what a tap reads, of x or of a copy, in every shape of a tile that has them, whole and cut up."""
    case, operator = GATHER_SHIM_TAPS_APART[number]
    by_taps = 0
    for shape, splits in itertools.product((0, 2, 4), (0, 2)):
        with gather_shim.splitting(splits):
            for seed in (2, 9):  # at aligned addresses; at once, and as late as it may be
                fault = gather_shim.fault(operator, case, torch.float32, shape, layout, seed)
                if fault is not None:
                    assert fault == "", f"{operator} of {case}, shape {shape}, {splits} parts, seed {seed}: {fault}"
                    by_taps += ctypes.c_int.in_dll(gather_shim.library, "latest_source").value == GATHER_TAPS
    assert by_taps > 0


ADVERSE_GATHER_CASES = [
    ("fprop", Case(3, 40, 12, 12, 72, 1, 3, padding=(0, 1)), "contiguous"),
    ("fprop", Case(9, 16, 5, 6, 130, 3, 3, padding=(1, 1)), "channels_last"),
    ("dgrad", Case(3, 64, 7, 7, 40, 3, 3, padding=(1, 1)), "contiguous"),
    ("fprop", Case(2, 25, 17, 21, 300, 2, 3, stride=(3, 1), dilation=(1, 2)), "contiguous"),
    ("fprop", Case(9, 72, 12, 12, 300, 2, 1), "channels_last"),
    ("dgrad", Case(5, 33, 8, 9, 104, 1, 1, padding=(1, 0)), "channels_last"),
    ("fprop", Case(3, 70, 13, 11, 72, 1, 1, stride=(2, 3), padding=(1, 0)), "channels_last"),
    ("fprop", Case(3, 70, 13, 14, 72, 3, 3, stride=(2, 2), padding=(1, 1)), "contiguous"),
    ("fprop", Case(5, 16, 9, 12, 40, 5, 4, stride=(2, 2), padding=(0, 3)), "channels_last"),
    ("fprop", Case(2, 33, 11, 9, 24, 2, 2, stride=(2, 2), padding=(1, 0)), "contiguous"),
    ("fprop", Case(3, 128, 9, 10, 40, 3, 3, padding=(1, 1), groups=8), "contiguous"),
    ("fprop", Case(3, 128, 11, 9, 48, 3, 3, stride=(2, 2), padding=(1, 1), groups=4), "channels_last"),
    ("dgrad", Case(2, 96, 8, 9, 128, 1, 1, groups=4), "contiguous"),
]
# Contained on their way, by each shape of a tile: fewer rows than a tile and more, columns and channels that are not
# there, more channels of y than a tile has.
ADVERSE_LANDING_CASES = [
    ("fprop", Case(2, 24, 5, 36, 40, 3, 3, padding=(1, 1)), "contiguous"),
    ("fprop", Case(2, 33, 8, 32, 130, 3, 3, padding=(2, 3)), "contiguous"),
    ("fprop", Case(2, 24, 5, 37, 40, 3, 3, padding=(1, 1)), "channels_last"),
    ("fprop", Case(2, 20, 33, 28, 24, 3, 3, stride=(2, 2), padding=(1, 1)), "contiguous"),
    ("dgrad", Case(2, 24, 11, 32, 40, 3, 3, padding=(1, 1)), "contiguous"),
    ("fprop", Case(3, 16, 17, 28, 72, 2, 3, padding=(0, 1)), "contiguous"),
    ("dgrad", Case(2, 36, 12, 30, 20, 2, 3, padding=(1, 1)), "channels_last"),
    ("fprop", Case(2, 20, 19, 56, 24, 3, 3, stride=(2, 2), padding=(1, 1)), "contiguous"),
    ("fprop", Case(2, 24, 15, 14, 40, 3, 3, padding=(1, 1)), "channels_last"),
    ("dgrad", Case(2, 24, 9, 26, 20, 3, 3, padding=(1, 1)), "channels_last"),
]
ADVERSE_PHASES = 7  # the first of them with phases
ADVERSE_GROUPS = 10  # and with groups


@pytest.mark.parametrize("number, kind", [*enumerate(ADVERSE)])
def test_gather_shim_contains_what_fits_and_does_the_rest_again(gather_shim, number, kind):
    """As of the wgmma engine; but of x single values are mended, and weights that do not fit take everything along."""
    operator, case, layout = ADVERSE_GATHER_CASES[number % len(ADVERSE_GATHER_CASES)]
    tensors = adverse_tensors(case, kind, operator)
    out = gather_shim.result(operator, case, tensors, layout, GATHER_CONTAINED[number % len(GATHER_CONTAINED)], number)
    check_bounds(case, {operator: out}, tensors, tf32={operator})
    done = gather_shim.done_again()
    if kind in CONTAINED_KINDS:
        assert done == 0
    elif kind in MARKED_KINDS:
        assert done != 0  # the sample of tensors as small as these sees some of them, and takes another scale
    else:
        assert done == ALL_AGAIN or kind == "faint channel"


# Of those above what tma takes: groups as one whose outputs are no whole tiles are not.
ADVERSE_TMA = [number for number in range(len(ADVERSE_GATHER_CASES)) if number < ADVERSE_GROUPS]


@pytest.mark.parametrize("number, kind", [*enumerate(ADVERSE)])
def test_gather_shim_contains_what_fits_for_tma(gather_shim, number, kind):
    operator, case, layout = ADVERSE_GATHER_CASES[ADVERSE_TMA[number % len(ADVERSE_TMA)]]
    tensors = adverse_tensors(case, kind, operator)
    shape = GATHER_BY_TMA[number % len(GATHER_BY_TMA)]
    out = gather_shim.result(operator, case, tensors, layout, shape, number)
    check_bounds(case, {operator: out}, tensors, tf32={operator})
    done = gather_shim.done_again()
    if kind in CONTAINED_KINDS:
        assert done == 0
    elif kind in MARKED_KINDS:
        assert done != 0
    else:
        assert done == ALL_AGAIN or kind == "faint channel"


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("number", [1, 5])
def test_gather_shim_gives_up_what_tma_would_multiply(gather_shim, number, splits):
    """All of a call is done again, once, and tma stores nothing; of a cluster no block waits for another one."""
    operator, case, layout = ADVERSE_GATHER_CASES[number]
    case = dataclasses.replace(case, N=1, C=case.C + 64, K=case.K + 64)
    tensors = adverse_tensors(case, "dead weights", operator)
    with tma_wishes(gather_shim, -1, splits):
        out = gather_shim.result(operator, case, tensors, layout, GATHER_BY_TMA[-1], number)
    assert gather_shim.done_again() == ALL_AGAIN
    check_bounds(case, {operator: out}, tensors, tf32={operator})


@pytest.mark.parametrize("value", [1e-9, math.nan], ids=str)
@pytest.mark.parametrize("number", ADVERSE_TMA)
def test_gather_shim_mends_what_tma_multiplied(gather_shim, number, value):
    operator, case, layout = ADVERSE_GATHER_CASES[number]
    tensors = misfit_tensors(operator, case, value)
    out = gather_shim.result(operator, case, tensors, layout, GATHER_BY_TMA[number], number)
    places, copied = misfit_places(operator, case)
    assert gather_shim.done_again() == (copied if case.R * case.S == 1 else len(places))  # of phases all of x
    check_misfits(operator, case, out, tensors)


@pytest.mark.parametrize("shape", GATHER_CONTAINED)
@pytest.mark.parametrize("number", [1, 5])
def test_gather_shim_gives_up(gather_shim, number, shape):
    """All of a call is done again, once: what would have to be mended beside it is not."""
    operator, case, layout = ADVERSE_GATHER_CASES[number]
    tensors = adverse_tensors(case, "dead weights", operator)
    tensors[OPERANDS[operator][0]][-1, 3, 3, 3] = 1e-9
    out = gather_shim.result(operator, case, tensors, layout, shape, number)
    assert gather_shim.done_again() == ALL_AGAIN
    check_bounds(case, {operator: out}, tensors, tf32={operator})


def misfit_places(operator: str, case: Case) -> tuple[list[tuple[int, ...]], int]:
    """Where a few values of x or dy lie, and how many of them a copy has: of 1x1 filters just what these read, and of
    phases the pairs of rows and columns that have some of it.

    One output reads the first two, two channels of a pixel, by its first tap, and the next two by its last one. The
    others are at corners of the first and the last image.
    """
    taps, stride, padding = (case.R, case.S), case.stride, case.padding
    shape, outputs = case.x_shape, case.y_shape[2:]
    if operator == "dgrad":
        stride, shape, outputs = (1, 1), case.y_shape, case.x_shape[2:]
        padding = tuple(d * (t - 1) - p for d, t, p in zip(case.dilation, taps, case.padding, strict=True))
    N, C, *sizes = shape
    middle = [out // 2 * step - pad for out, step, pad in zip(outputs, stride, padding, strict=True)]
    first = [max(place, 0) for place in middle]
    last = [min(m + d * (t - 1), size - 1) for m, d, t, size in zip(middle, case.dilation, taps, sizes, strict=True)]
    in_last = [(C // 2, *first), (C // 2 + 1, *first), (0, *last), (C - 1, *last), (C - 1, 0, 0), (1, -1, -1)]
    places = [(N - 1, c, h % sizes[0], w % sizes[1]) for c, h, w in in_last] + [(0, 2, 0, sizes[1] - 1)]

    def is_read(place: tuple[int, ...]) -> bool:
        steps = [(at + pad, step, out) for at, pad, step, out in zip(place[2:], padding, stride, outputs, strict=True)]
        return all(at % step == 0 and 0 <= at < step * out for at, step, out in steps)

    def is_in_pairs(place: tuple[int, ...]) -> bool:
        axes = zip(place[2:], padding, taps, outputs, strict=True)
        return all((at + pad % 2) // 2 <= (2 * (out - 1) - pad + tap - 1) // 2 + pad % 2 for at, pad, tap, out in axes)

    assert len(set(places)) == len(places)
    if stride == (2, 2) and min(taps) > 1 and case.dilation == (1, 1):
        return places, sum(map(is_in_pairs, places))
    return places, len(places) if taps != (1, 1) else sum(map(is_read, places))


def misfit_tensors(operator: str, case: Case, value: float, device: str = "cpu") -> dict[str, Tensor]:
    """Operands with a few values that do not fit, which are all that some outputs see: the others are ones or zeros."""
    tensors = make_tensors(case, torch.float32, normal, device)
    x = tensors[OPERANDS[operator][0]]
    x.zero_()
    x[0] = 1
    for i, place in enumerate(misfit_places(operator, case)[0]):
        x[place] = value * (1 + i / 8)
    tensors["bias"].zero_()
    return tensors


def check_misfits(operator: str, case: Case, out: Tensor, tensors: dict[str, Tensor]) -> None:
    """NaN and Inf where the reference has them, which the CPU works out; the rest within the contract."""
    out, tensors = out.cpu(), {name: tensor.cpu() for name, tensor in tensors.items()}
    expected = product(operator, case, *(tensors[name] for name in OPERANDS[operator]))
    finite = expected.isfinite()
    assert same_values(out[~finite], expected[~finite].float())
    rest = {name: tensor.nan_to_num(0.0, 0.0, 0.0) for name, tensor in tensors.items()}
    without = product(operator, case, *(rest[name] for name in OPERANDS[operator])).float()
    check_bounds(case, {operator: torch.where(finite, out, without)}, rest, tf32={operator})


def check_mending(
    gather_shim: GatherShim, number: int, value: float, seeds: Iterable[int], landing: bool = False
) -> None:
    """Right, whatever the order in which threads come, and the same bits in each."""
    operator, case, layout = (ADVERSE_LANDING_CASES if landing else ADVERSE_GATHER_CASES)[number]
    shapes = landing_shapes(operator, case, layout) if landing else GATHER_CONTAINED
    tensors, first = misfit_tensors(operator, case, value), None
    for seed in seeds:
        out = gather_shim.result(operator, case, tensors, layout, shapes[number % len(shapes)], seed)
        assert gather_shim.done_again() == misfit_places(operator, case)[1]
        check_misfits(operator, case, out, tensors)
        first = out if first is None else first
        assert same_values(out, first)


@pytest.mark.parametrize("value", [1e-9, 3e-40, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("number", range(len(ADVERSE_GATHER_CASES)))
def test_gather_shim_mends(gather_shim, number, value):
    check_mending(gather_shim, number, value, seeds=(number,) if value != 1e-9 else range(3))


@pytest.mark.parametrize("value", [1e-9, math.nan], ids=str)
@pytest.mark.parametrize("number", range(len(ADVERSE_LANDING_CASES)))
def test_gather_shim_mends_what_lands(gather_shim, number, value):
    check_mending(gather_shim, number, value, seeds=(number,) if value != 1e-9 else range(2), landing=True)


@pytest.mark.parametrize("number, kind", [*enumerate(ADVERSE)])
def test_gather_shim_contains_on_its_way_what_fits(gather_shim, number, kind):
    """As where it is copied: see above."""
    operator, case, layout = ADVERSE_LANDING_CASES[number % len(ADVERSE_LANDING_CASES)]
    tensors = adverse_tensors(case, kind, operator)
    shapes = landing_shapes(operator, case, layout)
    out = gather_shim.result(operator, case, tensors, layout, shapes[number // 2 % len(shapes)], number)
    check_bounds(case, {operator: out}, tensors, tf32={operator})
    done = gather_shim.done_again()
    if kind in CONTAINED_KINDS:
        assert done == 0
    elif kind in MARKED_KINDS:
        assert done != 0
    else:
        assert done == ALL_AGAIN or kind == "faint channel"


def check_list_of_what_lands(gather_shim: GatherShim, too_many: int, shape: int) -> None:
    """Of one value more all is done again, by weights that nobody knew would be wanted."""
    case = Case(2, 24, 9, 28, 16, 3, 3, padding=(1, 1))
    if LANDING_TILES[shape][3] == 2:
        case = dataclasses.replace(case, W=2 * LANDING_TILES[shape][2], stride=(2, 2))
    layout = "contiguous" if shape in landing_shapes("fprop", case, "contiguous") else "channels_last"
    tensors = make_tensors(case, torch.float32, normal)
    tensors["x"].zero_()
    tensors["x"][0] = 1
    count = ctypes.c_int.in_dll(gather_shim.library, "most_listed").value + too_many
    tensors["x"][1].view(-1)[5 : 5 + count] = torch.linspace(1e-9, 2e-9, count)
    tensors["bias"].zero_()
    out = gather_shim.result("fprop", case, tensors, layout, shape, shape)
    check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"})
    assert gather_shim.done_again() == (ALL_AGAIN if too_many else count)


@pytest.mark.parametrize("shape", GATHER_LANDING)
@pytest.mark.parametrize("too_many", [0, 1])
def test_gather_shim_lists_as_much_as_it_can_of_what_lands(gather_shim, too_many, shape):
    check_list_of_what_lands(gather_shim, too_many, shape)


def test_gather_shim_mends_what_the_sample_missed(gather_shim):
    """A value that is larger than the scale has room for: at the first of some places that the sample does not see."""
    case = Case(9, 72, 12, 12, 40, 3, 3)
    tensors = make_tensors(case, torch.float32, normal)
    plain = tensors["x"].clone()
    for column in range(12):
        tensors["x"].copy_(plain)[5, 40, 6, column] = -1e9
        out = gather_shim.result("fprop", case, tensors, "contiguous", GATHER_CONTAINED[2], column)
        check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"})
        if gather_shim.done_again() != ALL_AGAIN:
            break
    assert gather_shim.done_again() == 1


def test_gather_shim_mends_beside_a_large_bias(gather_shim):
    """Many small products are added up before they meet what they would vanish in one by one."""
    case = Case(2, 40, 6, 6, 16, 3, 3)
    tensors = make_tensors(case, torch.float32, normal)
    tensors["x"].zero_()
    tensors["x"][0] = 1
    tensors["x"][1, :25, 2:5, 2:5] = 1e-9
    tensors["w"].abs_()
    tensors["bias"].fill_(0.1)
    out = gather_shim.result("fprop", case, tensors, "contiguous", GATHER_CONTAINED[0], 0)
    assert gather_shim.done_again() == 25 * 9
    check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("too_many", [0, 1])
def test_gather_shim_mends_as_many_as_it_can_list(gather_shim, too_many, layout):
    case = Case(2, 24, 9, 9, 16, 2, 1)
    tensors = make_tensors(case, torch.float32, normal)
    tensors["x"].zero_()
    tensors["x"][0] = 1
    count = ctypes.c_int.in_dll(gather_shim.library, "most_listed").value + too_many
    tensors["x"][1].view(-1)[:count] = torch.linspace(1e-9, 2e-9, count)
    tensors["bias"].zero_()
    out = gather_shim.result("fprop", case, tensors, layout, GATHER_CONTAINED[too_many], 0)
    check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"})
    assert gather_shim.done_again() == (ALL_AGAIN if too_many else count)


@pytest.mark.parametrize("value", [None, 1e-9, math.nan], ids=str)
@pytest.mark.parametrize("shape", [shape for shape in GATHER_CUT_UP if shape not in GATHER_POINTS])
def test_gather_shim_splits_the_reduction(gather_shim, shape, value):
    """Parts of it, the last one shorter; what is mended comes behind their sum."""
    case = Case(4, 160, 12, 9, 72, 3, 3, padding=(1, 1))
    tensors = make_tensors(case, torch.float32, normal)
    if value is not None:
        tensors["x"][2, 97, 5, 4] = value
    layout = "channels_last" if shape == 2 else "contiguous"  # single words may not be
    with gather_shim.splitting(3, sms=72):
        out = gather_shim.result("fprop", case, tensors, layout, shape, shape)
    assert gather_shim.parts() == 3
    assert gather_shim.done_again() == (value is not None and shape in GATHER_CONTAINED)
    if value is None or math.isfinite(value):
        check_bounds(case, {"fprop": out}, tensors, tf32={"fprop"})
    else:
        expected = references(case, tensors)["fprop"]
        assert same_values(out.isnan(), expected.isnan())
        assert torch.allclose(out.double(), expected, rtol=1e-3, atol=0.2, equal_nan=True)


@pytest.mark.parametrize("splits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", GATHER_CUT_UP)
def test_gather_shim_exact_in_clusters(gather_shim, shape, splits):
    """Parts of the reduction whose blocks read each other's sums, and store their shares of the channels."""
    taps = (3, 3) if shape in GATHER_CONTAINED else (1, 1)
    for channels in (136, 56):
        case, faults = Case(2, 64 * splits - 8, 8, 9, channels, *taps, padding=(taps[0] // 2, taps[0] // 2)), {}
        with gather_shim.splitting(splits, sms=72):
            for seed in range(4):  # tensors at any alignment, as not every shape of a tile takes them
                layout = LAYOUTS[seed % 2]
                fault = gather_shim.fault("fprop", case, torch.float32, shape, layout, seed)
                if fault is not None:
                    assert gather_shim.parts() == splits
                    faults.setdefault(layout, set()).add(fault)
        assert faults
        assert all(found == {""} for found in faults.values()), faults
        # Of several tiles of channels that one has planes only.
        assert shape != GATHER_POINTS[4] or set(faults) == set(LAYOUTS[: 2 if channels <= 64 else 1])


def test_gather_shim_exact_in_clusters_of_the_last_turn(gather_shim):
    """Blocks that have a whole tile before their part of another one: the only parts of tiles of 256 channels."""
    case, shape = Case(4, 120, 8, 9, 136, 1, 1), 0
    for sms, parts in ((2, 2), (3, 1)):  # three tiles
        with gather_shim.splitting(parts, sms):
            faults = [gather_shim.fault("fprop", case, torch.float32, shape, "channels_last", i) for i in range(6)]
        assert "" in faults
        assert set(faults) <= {"", None}
        assert gather_shim.parts() == parts


# Rows of sixteens, too long for a tile: a tile is some of their columns, in the last one of a row fewer, and its lines
# are those of two images, or of the last one and none.
GATHER_SHIM_LINES = [Case(3, 24, 3, 290, 24, 3, 3, padding=(1, 0)), Case(2, 16, 3, 396, 72, 2, 3, padding=(0, 3))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [*GATHER_WINDOWS, *GATHER_CONTAINED])
def test_gather_shim_exact_where_boxes_store_lines(gather_shim, shape, layout):
    by_boxes = []
    for case in GATHER_SHIM_LINES:
        for seed in (2, 9):  # tensors at aligned addresses
            fault = gather_shim.fault("fprop", case, torch.float32, shape, layout, seed)
            assert not fault, f"{case}, shape {shape}, seed {seed}: {fault}"
            by_boxes.append(fault == "" and ctypes.c_int.in_dll(gather_shim.library, "latest_boxes").value == 1)
    # Windows come by single words where channels are no neighbours, which shapes of a tile have not for all that.
    assert any(by_boxes) or (layout == "contiguous" and shape < 2) or shape == GATHER_HALF_A_STAGE


def check_mending_of_all_that_lands(gather_shim: GatherShim) -> None:
    for seed, number in itertools.product(range(12), range(len(ADVERSE_LANDING_CASES))):
        check_mending(gather_shim, number, 1e-9, seeds=(seed,), landing=True)


@pytest.mark.parametrize("mutation", [mutation for mutation in GATHER_MUTATIONS if "land" in mutation])
def test_gather_shim_sees_what_is_missing_of_what_lands(mutation, gather_shim):
    with mutated(gather_shim.library, GATHER_MUTATIONS, mutation), pytest.raises(AssertionError):
        check_mending_of_all_that_lands(gather_shim)


@pytest.mark.parametrize("mutation", [mutation for mutation in GATHER_MUTATIONS if "by tma" in mutation])
def test_gather_shim_sees_what_is_missing_of_what_tma_multiplies(mutation, gather_shim):
    case = Case(4, 72, 6, 9, 136, 3, 3, padding=(1, 1))

    def are_right() -> bool:
        runs = [*itertools.product((0, 1), LAYOUTS, (1, 2, 3, 4))]
        faults = []
        for windows, layout, seed in runs:
            with tma_wishes(gather_shim, windows):
                faults.append(gather_shim.fault("fprop", case, torch.float32, GATHER_BY_TMA[-2], layout, seed))
        tensors = make_tensors(case, torch.float32, integers)
        tensors["w"] *= 2.0 ** (torch.arange(case.K) % 4).view(-1, 1, 1, 1)  # scales that differ
        out = gather_shim.result("fprop", case, tensors, "contiguous", GATHER_BY_TMA[-2], 0)
        return set(faults) == {""} and torch.equal(out, references(case, tensors)["fprop"].float())

    assert are_right()
    with mutated(gather_shim.library, GATHER_MUTATIONS, mutation):
        assert not are_right()


@pytest.mark.parametrize("mutation", [mutation for mutation in GATHER_MUTATIONS if "cluster" in mutation])
def test_gather_shim_sees_what_is_missing_of_clusters(mutation, gather_shim):
    case = Case(2, 200, 12, 9, 136, 3, 3, padding=(1, 1))
    with mutated(gather_shim.library, GATHER_MUTATIONS, mutation), gather_shim.splitting(2, sms=12):
        assert any(
            gather_shim.fault_in_turn("fprop", case, torch.float32, seed, "channels_last", seed)[1]
            for seed in (1, 3, 5, 4, 7, 9)
        )


@pytest.mark.parametrize("mutation", [mutation for mutation in GATHER_MUTATIONS if "images" in mutation])
def test_gather_shim_sees_what_is_missing_of_images(mutation, gather_shim):
    case, operator = GATHER_IMAGES_CASES[0]
    with by_images(gather_shim), mutated(gather_shim.library, GATHER_MUTATIONS, mutation):
        assert any(gather_shim.fault(operator, case, torch.float32, 4, "contiguous", seed) for seed in (2, 9))


@pytest.mark.parametrize(
    "mutation", [mutation for mutation in GATHER_MUTATIONS if not re.search("land|cluster|by tma|images", mutation)]
)
def test_gather_shim_sees_what_is_missing(mutation, gather_shim):
    """The shim itself: what is left out shows in one of a few runs."""
    cases = [
        (Case(3, 40, 12, 12, 72, 1, 1), "contiguous", torch.float16),
        (Case(9, 72, 12, 12, 72, 1, 1), "channels_last", torch.float32),
        (Case(9, 72, 5, 6, 130, 3, 3, padding=(1, 1)), "contiguous", torch.float16),
        (Case(4, 40, 5, 6, 24, 2, 3), "channels_last", torch.float32),
    ]
    splits, contained = 0, False
    special = {
        "x itself": (GATHER_SHIM_PHASES_OF_X[0], "channels_last", torch.float32),
        "copies": (Case(9, 136, 7, 7, 300, 1, 1), "contiguous", torch.float32),
        "first tile of channels": (Case(9, 72, 5, 6, 300, 1, 1), "channels_last", torch.float16),
    }
    cases = [case for words, case in special.items() if words in mutation] or cases
    if "phase" in mutation:
        cases, contained = [(GATHER_SHIM_PHASED_CASES[0], "contiguous", torch.float32)], True
    if "start of a part" in mutation:
        splits = 4
    if "box" in mutation:
        cases = cases[1:2]
    if "lines" in mutation:
        cases = [(case, layout, torch.float32) for case in GATHER_SHIM_LINES for layout in LAYOUTS]
    elif "planes" in mutation or "next image" in mutation:  # 81 boxes of 16 pixels, or some with pixels of two images
        size = 12 if "planes" in mutation else 10
        cases = [(Case(9, 72, size, 12, 72, 1, 1), "contiguous", torch.float32)]
    if "all again" in mutation:
        with mutated(gather_shim.library, GATHER_MUTATIONS, mutation), pytest.raises(AssertionError):
            check_list_of_what_lands(gather_shim, 1, GATHER_LANDING[0])
        return
    if re.match("contains|leaves|mends", mutation):
        kinds = {"phase": ADVERSE_PHASES, "group": ADVERSE_GROUPS, "eights": 1, "share": 4}
        number = next((number for kind, number in kinds.items() if kind in mutation), 2)
        with mutated(gather_shim.library, GATHER_MUTATIONS, mutation), pytest.raises(AssertionError):
            check_mending(gather_shim, number, 1e-9, seeds=range(6))
        return
    with (
        mutated(gather_shim.library, GATHER_MUTATIONS, mutation),
        gather_shim.splitting(splits, sms=72 if splits > 0 else 3),
    ):
        assert any(
            gather_shim.fault("fprop", case, dtype, GATHER_CONTAINED[seed % len(GATHER_CONTAINED)], layout, seed)
            if contained
            else gather_shim.fault_in_turn("fprop", case, dtype, seed, layout, seed)[1]
            for seed in (1, 3, 5, 4, 7, 9)
            for case, layout, dtype in cases
        )


# The mma engine without a GPU -----------------------------------------------------------------------------------------

MMA_ENTRY_POINTS = (
    """
#include <cstring>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

extern "C" {
int simt_mutation = 0;  // the number of the one that takes place, see with_mutations
}

#include "mma.cu"
bool modelnew::direct_has_points(const Problem&, Operator) { return false; }
"""
    + PROBLEM_FROM_FIELDS
    + r"""
using namespace modelnew;
using namespace modelnew::mma;

static std::set<std::string> seen;  // kinds of plans

static Params params_of(const Correlation& of, const Plan& plan) {
  Params params{};
  params.of = of;
  params.plan = plan;
  set_divisors(params);
  return params;
}

// What is wrong with the numbers of a plan, or nothing.
static std::string fault_of_numbers(const Correlation& of, const Plan& plan, const Device& device) {
  const int ring = ring_start(plan), stage = plan.x_words + plan.w_words;
  if (plan.smem_bytes > device.smem_bytes || plan.smem_bytes != 4 * shared_words(plan)) return "shared memory";
  const int64_t words = int64_t{plan.stages} * stage + plan.window_words;
  if (4 * (ring + words) > plan.smem_bytes) return "room for the ring";
  const int slice = staging_words(plan.out_channels_last, plan.tile_m, plan.tile_n), staging = plan.warps_k * slice;
  if (slice < (plan.out_channels_last ? channels_pitch(plan.tile_m) : plan.tile_m) *
                  (plan.out_channels_last ? plan.tile_n : pixels_pitch(plan.tile_n)))
    return "sums in staging";
  if (4 * (ring + staging) > plan.smem_bytes) return "room for staging";
  if (ring < kTable + plan.depth || 2 * kMaxStages > kTable) return "room for the table and barriers";
  if (ring % 32 || plan.x_words % 32 || plan.w_words % 32) return "stages that are not aligned";
  if (plan.stages < 1 || plan.stages > kMaxStages || plan.stages > plan.split_chunks) return "stages";
  if (plan.stages == 1 && plan.split_chunks > 1) return "a chunk that is loaded where one is read";

  const int terms = plan.channels * plan.taps;
  if (plan.taps != of.R * of.S || plan.depth % 8 || plan.depth < terms || plan.depth >= terms + 8) return "terms";
  if (int64_t{plan.chunks} * plan.channels < of.in_channels || (plan.chunks - 1) * plan.channels >= of.in_channels)
    return "channels in no chunk, or a chunk without";
  if (int64_t{plan.splits} * plan.split_chunks < plan.chunks || (plan.splits - 1) * plan.split_chunks >= plan.chunks)
    return "chunks in no part, or a part without";
  if (plan.splits > 1 && !device.hopper) return "a cluster without Hopper";
  if (plan.splits * plan.split_rows != plan.tile_m || 1 << plan.split_bits != plan.splits) return "rows of a part";
  if (plan.out_vector << plan.piece_bits != (plan.out_channels_last ? plan.split_rows : plan.tile_n))
    return "pieces of a row of outputs";
  if (plan.tile_p * plan.tile_q > plan.tile_n || plan.tile_p < 1 || plan.tile_q < 1) return "pixels of a tile";
  if ((plan.x_bulk || plan.w_bulk) && !device.hopper) return "bulk copies without Hopper";
  if ((plan.x_copies == Copies::kBox && !plan.x_bulk) || (plan.w_copies == Copies::kBox && !plan.w_bulk))
    return "boxes that are no bulk copies";
  if (plan.w_words < (plan.tile_m - 1) * plan.w_pitch + plan.depth) return "rows of weights beyond their stage";
  if (!(plan.cycles > 0)) return "no estimate";
  return "";
}

// What is wrong with the tiles, or nothing: every output is one tile's.
static std::string fault_of_tiles(const Params& params) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int64_t rows = of.groups * of.N * plan.tiles_m;
  std::vector<uint8_t> owned(rows * of.P * of.Q);
  if (plan.tiles != rows * plan.tiles_p * plan.tiles_q) return "tiles in all";
  for (int64_t number = 0; number < plan.tiles; ++number) {
    const Tile tile = locate_tile(params, static_cast<int>(number));
    if (tile.group < 0 || tile.group >= of.groups || tile.n < 0 || tile.n >= of.N || tile.m % plan.tile_m ||
        tile.m < 0 || tile.m >= of.out_channels || tile.p < 0 || tile.p >= of.P || tile.q < 0 || tile.q >= of.Q)
      return "a tile outside";
    const int64_t row = (tile.group * of.N + tile.n) * plan.tiles_m + tile.m / plan.tile_m;
    for (int p = tile.p; p < std::min(of.P, tile.p + plan.tile_p); ++p)
      for (int q = tile.q; q < std::min(of.Q, tile.q + plan.tile_q); ++q)
        if (owned[(row * of.P + p) * of.Q + q]++) return "an output twice";
  }
  return std::count(owned.begin(), owned.end(), 1) == static_cast<int64_t>(owned.size()) ? "" : "an output never";
}

// What is wrong with the order of the reduction and with the weights of a tile, or nothing. The address is in words.
static std::string fault_of_weights(const Params& params, const Tile& tile, int64_t address) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int terms = plan.channels * plan.taps, rows = std::min(plan.tile_m, of.out_channels - tile.m);
  const auto offset_of = [&](const Term& term) {
    const int r = of.flipped ? of.R - 1 - term.r : term.r, s = of.flipped ? of.S - 1 - term.s : term.s;
    return term.channel * of.w_stride_in + r * of.w_stride_r + s * of.w_stride_s;
  };
  std::vector<uint8_t> there(terms);
  for (int i = 0; i < terms; ++i) {
    const Term term = locate_term(params, i);
    if (term.channel < 0 || term.channel >= plan.channels || term.r < 0 || term.r >= of.R || term.s < 0 ||
        term.s >= of.S)
      return "a term outside";
    if (there[(term.channel * of.R + term.r) * of.S + term.s]++) return "a term twice";
    if (plan.natural && term.channel < of.in_channels && offset_of(term) != i) return "another order than that of w";
    const Term four = locate_term(params, i / 4 * 4);
    if (plan.w_copies == Copies::kFours && term.channel < of.in_channels && offset_of(term) != offset_of(four) + i % 4)
      return "fours of weights that are no neighbours";
  }
  const int64_t first = address + tile.group * of.w_stride_group + tile.m * of.w_stride_out;
  const int64_t chunk_step = plan.channels * of.w_stride_in;
  const int width = plan.w_copies == Copies::kFours ? 4 : 1;
  if (plan.w_copies == Copies::kWords || plan.w_copies == Copies::kFours) {
    if (plan.w_pieces * width != terms || plan.w_pitch < plan.depth) return "pieces of a row of weights";
    if (plan.w_row_step * plan.w_pieces + plan.w_piece_step != kThreads || plan.w_piece_step >= plan.w_pieces)
      return "steps of a thread";
  }
  if (width == 4)
    for (int chunk = 0; chunk < plan.chunks; ++chunk)
      for (int row = 0; row < std::min(rows, 4); ++row)
        for (int i = 0; i < terms; i += 4) {
          const Term term = locate_term(params, i);
          if (chunk * plan.channels + term.channel >= of.in_channels) continue;
          const int64_t place = first + chunk * chunk_step + row * of.w_stride_out + offset_of(term);
          if (place % 4) return "fours of weights astray";
        }
  if (plan.w_copies == Copies::kRun) {
    if (plan.chunks != 1 || of.w_stride_out != terms || plan.w_pitch != terms || first % 4) return "a run of weights";
    if (plan.w_bulk && rows * terms % 4) return "a bulk copy of a part of 16 bytes";
  }
  if (plan.w_copies != Copies::kBox) return "";
  const int64_t row = int64_t{tile.group} * of.out_channels + tile.m;
  if (of.flipped || address % 4 || plan.w_pitch % 4 || plan.tile_m > 256) return "a box of weights";
  if (tile.group * of.w_stride_group + tile.m * of.w_stride_out != row * of.w_stride_out) return "rows of no matrix";
  if (int64_t{of.groups} * of.out_channels > 1 && of.w_stride_out % 4) return "rows of a matrix astray";
  if (plan.taps_first) {
    if (of.w_stride_in != 1 || plan.w_pitch != terms || plan.depth != terms) return "a box with gaps";
    if (plan.channels % 4 || plan.taps > 256 || of.w_stride_s % 4) return "the size of a box of weights";
    for (int i = 0; i < plan.taps; ++i)
      if (offset_of(locate_term(params, i * plan.channels)) != i * of.w_stride_s) return "taps that are no row";
    return "";
  }
  if (!plan.natural || plan.w_pitch > 256 || plan.w_pitch < plan.depth) return "a box of rows";
  return plan.chunks > 1 && terms % 4 ? "a box that starts astray" : "";
}

// What is wrong with what a tile reads, or nothing: each output at each term what the convolution says, by the register
// of a lane and the table; and what brings it there. The address is in words.
static std::string fault_of_window(const Params& params, const Tile& tile, int64_t address) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const bool run = plan.x_copies == Copies::kRun, planes = plan.x_copies == Copies::kPlanes;
  const int64_t h0 = run ? 0 : int64_t{tile.p} * of.stride_h - of.pad_h;
  const int64_t w0 = run ? 0 : int64_t{tile.q} * of.stride_w - of.pad_w - (plan.lines ? 0 : plan.lead);
  const bool channels_last = plan.pixel_words != 1;
  const int window = planes ? plan.window_words : plan.x_words, terms = plan.channels * plan.taps;
  if (channels_last ? plan.channel_words != 1 || plan.row_words < plan.columns * plan.pixel_words ||
                          (!plan.lines && plan.row_words != plan.columns * plan.pixel_words)
                    : plan.row_words != plan.columns || plan.channel_words < plan.rows * plan.columns)
    return "words of a window";
  const bool padded = terms != plan.depth;
  const int64_t all_words = plan.lines      ? int64_t{1 + padded} * plan.rows * plan.row_words
                            : channels_last ? int64_t{plan.rows} * plan.row_words
                                            : int64_t{plan.channels + padded} * plan.channel_words;
  if (all_words > window || (channels_last && plan.pixel_words < plan.channels + (padded && !plan.lines)))
    return "room for the window";
  for (int pixel = 0; pixel < plan.tile_n; ++pixel) {
    const int line = pixel / plan.tile_q, column = pixel % plan.tile_q;
    const int64_t start = line < plan.tile_p ? int64_t{line} * plan.row_step * plan.row_words +
                                                   int64_t{column} * plan.column_step * plan.pixel_words
                                             : 0;
    const int64_t p = tile.p + line, q = tile.q + column;
    const bool exists = line < plan.tile_p && p < of.P && q < of.Q;
    for (int i = 0; i < plan.depth; ++i) {
      const Term term = locate_term(params, i);
      const int row_of_term = term.r * of.dilation_h, column_of_term = term.s * of.dilation_w;
      const int64_t offset = i < terms ? int64_t{term.channel} * plan.channel_words + row_of_term * plan.row_words +
                                             column_of_term * plan.pixel_words + plan.lead
                                       : plan.zeros;
      const int64_t word = start + offset;
      // Outputs that do not exist are computed all the same.
      if (word < 0 || word >= window + plan.w_words) return "a word outside";
      if (!exists) continue;
      if (word >= window) return "a word behind the window";
      if (plan.lines) {
        const int64_t row = word / plan.row_words, at = (word % plan.row_words - plan.lead) / plan.pixel_words;
        if (i >= terms ? row < plan.rows : row >= plan.rows) return "padding of the reduction among channels";
        if (i >= terms) continue;
        if ((word % plan.row_words - plan.lead) % plan.pixel_words != term.channel) return "another channel";
        if (h0 + row != p * of.stride_h - of.pad_h + int64_t{term.r} * of.dilation_h ||
            w0 + at != q * of.stride_w - of.pad_w + int64_t{term.s} * of.dilation_w)
          return "another place of x";
        continue;
      }
      const int64_t in_channel = channels_last ? word % plan.pixel_words : word / plan.channel_words;
      if (i >= terms) {
        if (in_channel != plan.channels) return "padding of the reduction among channels";
        continue;
      }
      const int64_t place = channels_last ? word / plan.pixel_words : word % plan.channel_words;
      const int64_t row = place / plan.columns, at = place % plan.columns;
      if (in_channel != term.channel || row >= plan.rows) return "another channel";
      if (h0 + row * plan.in_row_step != p * of.stride_h - of.pad_h + int64_t{term.r} * of.dilation_h ||
          w0 + at * plan.in_column_step != q * of.stride_w - of.pad_w + int64_t{term.s} * of.dilation_w)
        return "another place of x";
    }
  }

  const int64_t image = address + tile.n * of.in_stride[0] + int64_t{tile.group} * of.in_channels * of.in_stride[1];
  if (run || planes) {
    const int64_t plane = int64_t{of.H} * of.W;
    if (of.in_stride[3] != 1 || (of.H > 1 && of.in_stride[2] != of.W) || of.in_stride[1] != plane) return "no run";
    if (plan.plane != plane || (run && plan.channel_words != plane)) return "words of a plane";
    if (plan.x_words < plan.channels * plane || plan.channels * plane % 4) return "room for a run";
    for (int c = 0; c < of.in_channels; c += plan.channels)
      if ((image + c * plane) % 4) return "a run astray";
    if (plan.x_bulk ? of.in_channels % plan.channels : of.in_channels * plane % 4) return "the end of a run";
    return "";
  }
  if (plan.lines) {
    if (of.groups != 1 || of.in_stride[1] != 1 || of.in_stride[3] != of.in_channels || plan.chunks != 1)
      return "no line";
    if (((tile.q * of.stride_w - of.pad_w) * of.in_channels - plan.lead) % 4)
      return "a line that starts astray";
    if (plan.row_words % 4 || plan.row_words > 256 || plan.rows > 256) return "the size of a box";
    if (plan.x_bulk_words != plan.rows * plan.row_words) return "bytes that the barrier expects";
    if (address % 4 || (of.N > 1 && (of.in_stride[0] % 4 || of.in_stride[0] <= 0)) ||
        (of.H > 1 && (of.in_stride[2] % 4 || of.in_stride[2] <= 0)))
      return "lines astray";
    return plan.in_row_step == 1 && plan.in_column_step == 1 ? "" : "rows that no box has";
  }
  const int width = plan.x_copies == Copies::kWords ? 1 : 4;
  if (width == 4) {  // 16 bytes are inside an image or outside
    for (int c : {0, std::max(0, std::min(of.in_channels, 2 * plan.channels) - 1)})
      for (int row = 0; row < plan.rows; ++row)
        for (int at = 0; at < plan.columns; at += channels_last ? 1 : 4) {
          const int64_t h = h0 + int64_t{row} * plan.in_row_step, w = w0 + int64_t{at} * plan.in_column_step;
          if (!channels_last && (w % 4 || of.W % 4)) return "fours at the edge of an image";
          if (h < 0 || h >= of.H || w < 0 || w >= of.W) continue;
          const int64_t channel = channels_last ? c / 4 * 4 : c;
          const int64_t place = channel * of.in_stride[1] + h * of.in_stride[2] + w * of.in_stride[3];
          if ((image + place) % 4) return "fours of x astray";
        }
    if (channels_last ? of.in_stride[1] != 1 || of.in_channels % 4 || plan.channels % 4 || plan.pixel_words % 4
                      : of.in_stride[3] != 1 || plan.columns % 4)
      return "fours that are no neighbours";
  }
  if (plan.x_copies != Copies::kBox) {
    const int pieces = channels_last ? plan.channels / width : 1;
    if (channels_last ? plan.x_pieces != pieces || plan.row_entries != plan.columns
                      : plan.row_entries * width != plan.columns || plan.channel_words % width)
      return "copies of a row";
    return plan.entries == plan.rows * plan.row_entries ? "" : "copies of a window";
  }
  const int sizes[] = {plan.columns, plan.rows, channels_last ? plan.pixel_words : plan.channels};
  for (int size : sizes)
    if (size < 1 || size > 256) return "the size of a box";
  if (terms != plan.depth && channels_last) return "a box where padding is";
  const int64_t box = int64_t{sizes[0]} * sizes[1] * sizes[2];
  if (box != plan.x_bulk_words)
    return "bytes that the barrier expects";
  // Every so many-th row of the image is one of the box's tensor.
  if ((plan.in_row_step != 1 && (of.pad_h || plan.in_row_step != of.stride_h)) ||
      (plan.in_column_step != 1 && (of.pad_w || plan.in_column_step != of.stride_w)))
    return "rows that no box has";
  if (address % 4 || (of.N > 1 && of.in_stride[0] % 4)) return "images astray";
  const int64_t all[] = {of.N, int64_t{of.groups} * of.in_channels, of.H, of.W};
  for (int i = 0; i < 4; ++i)
    if (all[i] > 1 && of.in_stride[i] <= 0) return "a box of an expanded tensor";
  return "";
}

// What is wrong with what a tile writes four at a time, or nothing. The address is in words.
static std::string fault_of_writes(const Params& params, const Tile& tile, int64_t address) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  if (plan.out_vector == 1) return "";
  if (plan.out_vector != 4) return "neither fours nor single values";
  const int lines = std::min(plan.tile_p, of.P - tile.p), columns = std::min(plan.tile_q, of.Q - tile.q);
  const auto offset_of = [&](int pixel) -> int64_t {
    const int line = pixel / plan.tile_q, column = pixel % plan.tile_q;
    if (line >= lines || column >= columns) return -1;
    return (tile.p + line) * of.out_stride[2] + (tile.q + column) * of.out_stride[3];
  };
  if (plan.out_channels_last) {  // fours of channels, of each pixel
    if (of.out_stride[1] != 1 || of.out_channels % 4 || plan.split_rows % 4) return "fours of y that are no neighbours";
    for (int pixel = 0; pixel < plan.tile_n; ++pixel) {
      const int64_t first = offset_of(pixel);
      if (first >= 0 && (address + tile.n * of.out_stride[0] + first) % 4) return "fours of y astray";
    }
    return "";
  }
  for (int pixel = 0; pixel < plan.tile_n; pixel += 4) {
    const int64_t first = offset_of(pixel);
    for (int j = 1; j < 4; ++j)
      if (offset_of(pixel + j) != (first < 0 ? -1 : first + j)) return "fours of y that are no neighbours";
    for (int m = tile.m; m < std::min(of.out_channels, tile.m + plan.tile_m) && first >= 0; ++m) {
      const int64_t channel = int64_t{tile.group} * of.out_channels + m;
      if ((address + tile.n * of.out_stride[0] + channel * of.out_stride[1] + first) % 4) return "fours of y astray";
    }
  }
  return "";
}

static void note(const Plan& plan) {
  if (simt_mutation != 0) return;  // kinds are those of the engine as it is
  const std::string names[] = {"words", "fours", "runs", "boxes", "planes"};
  const std::string kind = plan.lines ? "lines of " : plan.pixel_words == 1 ? "planes of " : "pixels of ";
  const std::string order = plan.taps_first ? "taps of " : "";
  seen.insert(kind + "x by " + names[static_cast<int>(plan.x_copies)] + (plan.x_bulk ? " in bulk" : ""));
  seen.insert(order + "w by " + names[static_cast<int>(plan.w_copies)] + (plan.w_bulk ? " in bulk" : ""));
  seen.insert("shape " + std::to_string(plan.shape));
  seen.insert(std::to_string(plan.splits) + " parts");
  seen.insert((plan.out_channels_last ? "pixels of y by " : "y by ") + std::to_string(plan.out_vector));
  if (plan.lead > 0) seen.insert("lead");
  if (plan.chunks > plan.stages) seen.insert("a ring that turns");
}

extern "C" {
void set_capability(int capability) { stand_in_capability = capability; }
const char* mma_refusal(int op, const int64_t* fields) {
  return refusal(make_problem(fields), static_cast<Operator>(op));
}
const char* mma_yields(int op, const int64_t* fields) {
  return yields(make_problem(fields), static_cast<Operator>(op));
}
const char* mma_describe(int op, const int64_t* fields) {
  static char text[321];
  std::memset(text, 'x', sizeof text);
  describe(make_problem(fields), static_cast<Operator>(op), text, 320);  // as the binding has it
  return text[320] == 'x' && std::memchr(text, 0, 320) ? text : "written too far";
}
const char* mma_seen() {
  static std::string all;
  all.clear();
  for (const std::string& kind : seen) all += kind + "\n";
  return all.c_str();
}
// How many clusters find no room at first, on a GPU of 132 SMs that has room for so many of 2, 4 and 8 blocks.
int mma_waiting(int op, const int64_t* fields, int of_2, int of_4, int of_8) {
  const Problem problem = make_problem(fields);
  Correlation of = correlation_of_problem(problem, static_cast<Operator>(op));
  flatten_points(of);
  const Device device{132, 232448, true, {0, of_2, of_4, of_8}};
  Plan plan{};
  if (!make_plan(of, problem.tf32_allowed, device, Alignment{}, plan) || plan.splits == 1) return -1;
  const int room = device.clusters[plan.split_bits] * (plan.smem_bytes <= device.smem_bytes / 2 - 1024 ? 2 : 1);
  return std::max(0, static_cast<int>(plan.tiles) - room);
}
int mma_shape(int op, const int64_t* fields) {
  return plan_of(make_problem(fields), static_cast<Operator>(op), Alignment{}).plan.shape;
}
double mma_cycles(int op, const int64_t* fields, uint64_t in, uint64_t w, uint64_t out) {
  const Planned& planned = plan_of(make_problem(fields), static_cast<Operator>(op), Alignment{in, w, out});
  return planned.found ? planned.plan.cycles : 0;
}
// Plans for tensors at these addresses, on the GPU that was set, the best way and every shape and number of parts: null
// if there is no plan, else what is wrong, or "". All tiles, and of a few at random what they read and write.
const char* mma_fault(int op, const int64_t* fields, uint64_t in, uint64_t w, uint64_t out, int seed) {
  static std::string fault;
  std::mt19937 shuffler(seed);
  const Problem problem = make_problem(fields);
  Correlation of = correlation_of_problem(problem, static_cast<Operator>(op));
  flatten_points(of);
  Device device{};
  current_device(device);
  bool any = false;
  for (int i = -1; i < 4 * kShapeCount; i += i < 0 ? 1 : 1 + shuffler() % 4) {
    Plan plan{};
    const int shape = i < 0 ? -1 : i / 4, splits = i < 0 ? 0 : 1 << i % 4;
    if (!make_plan(of, problem.tf32_allowed, device, Alignment{in, w, out}, plan, shape, splits)) continue;
    any = true;
    note(plan);
    const Params params = params_of(of, plan);
    fault = fault_of_numbers(of, plan, device);
    if (fault.empty()) fault = fault_of_tiles(params);
    for (int j = 0; j < 3 && fault.empty(); ++j) {
      const int64_t number = j == 0 ? 0 : j == 1 ? plan.tiles - 1 : shuffler() % plan.tiles;
      const Tile tile = locate_tile(params, static_cast<int>(number));
      fault = fault_of_weights(params, tile, w / 4);
      if (fault.empty()) fault = fault_of_window(params, tile, in / 4);
      if (fault.empty()) fault = fault_of_writes(params, tile, out / 4);
    }
    if (!fault.empty()) {
      fault += ", shape " + std::to_string(shape) + ", " + std::to_string(splits) + " parts";
      return fault.c_str();
    }
  }
  return any ? "" : nullptr;
}
// A divisor by which a quotient is wrong, or 0.
int mma_wrong_divisor(int seed) {
  std::mt19937 random(seed);
  for (int i = 0; i < 20000; ++i) {
    const int drawn = 1 + (random() >> (1 + i % 31));
    const int divisor = i < 5000 ? i + 1 : i < 5031 ? 1 << (i - 5000) : i == 5031 ? 2147483647 : drawn;
    const Divisor by = make_divisor(divisor);
    const int64_t most = 2147483647, any = random() >> 1, multiple = any / divisor * divisor;
    for (int64_t number : {int64_t{0}, multiple - 1, multiple, multiple + 1, any, most})
      if (number >= 0 && number <= most && quotient(static_cast<int>(number), by) != number / divisor) return divisor;
  }
  return 0;
}
// What is wrong with keys of problems that differ in one field, address or GPU, or with what a memo remembers of them.
const char* mma_fault_of_memo(const int64_t* fields, int count, int seed) {
  std::mt19937 random(seed);
  std::vector<ProblemKey> keys;
  for (int i = -1; i < count + 3 + 1 + 2; ++i) {
    std::vector<int64_t> changed(fields, fields + count);
    if (i >= 0 && i < count) changed[i] = i == count - 13 ? !changed[i] : changed[i] + 1;
    const auto at = [&](int j) { return i == count + j ? uint64_t{16} : uint64_t{0}; };
    const Operator op = i == count + 3 ? Operator::kDgrad : Operator::kFprop;
    keys.push_back(key_of(make_problem(changed.data()), op, at(0), at(1), at(2), 90 - (i == count + 4),
                          132 - (i == count + 5)));
  }
  if (std::set<ProblemKey>(keys.begin(), keys.end()).size() != keys.size()) return "two problems of one key";
  const size_t different = keys.size();
  for (int i = 0; i < 2000; ++i) keys.push_back(keys[random() % different]), keys.back()[34] = 1000 + i;
  // A network of 600 problems, in their order.
  Memo<int> of_network;
  int computed = 0;
  for (int i = 0; i < 3 * 600; ++i)
    if (of_network.get(keys[i % 600], [&] { return ++computed, i % 600; }) != i % 600) return "another problem's";
  if (computed != 600) return "a problem of a network that was forgotten";
  // More of them than a memo takes, in any order.
  Memo<int> memo;
  for (int i = 0; i < 20000; ++i) {
    const int number = random() % keys.size();
    if (memo.get(keys[number], [&] { return number; }) != number) return "another problem's, of many";
  }
  return "";
}
}
"""
)


def mma_strides(shape: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """Of any tensor, and of expanded ones."""
    strides = any_strides(shape, rng.choice(MEMORY_ORDERS), rng)
    return tuple(0 if rng.random() < 0.02 else stride for stride in strides)


# Each puts something out of place.
MMA_PLAN_MUTATIONS = {
    "no columns for alignment": ("plan.lead = lead_of(1);", "plan.lead = MUTATED ? 0 : lead_of(1);"),
    "boxes of any size": (
        "x_boxes && rows <= 256 && plan.columns <= 256",
        "x_boxes && (MUTATED || (rows <= 256 && plan.columns <= 256))",
    ),
    "w as if it were aligned": (
        "address.w % 16 == 0 && fours(of.w_stride_out, of.out_channels)",
        "(MUTATED || address.w % 16 == 0) && fours(of.w_stride_out, MUTATED ? 1 : of.out_channels)",
    ),
    "taps in the order of memory": (
        "!plan.taps_first && !of.flipped && (of.S",
        "!plan.taps_first && (MUTATED || !of.flipped) && (of.S",
    ),
}
REFUSAL = re.compile(r"(it|a tile) [\w ,.()^-]+")


class MmaPlans:
    """The host part of the mma engine, for a GPU of 132 SMs that is not there."""

    engine, entry_points, mutations = "mma", MMA_ENTRY_POINTS, MMA_PLAN_MUTATIONS
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32,)
    edits: ClassVar[Sequence[tuple[str, str]]] = ()

    def __init__(self, folder: Path) -> None:
        self.library = compile_plans(self.engine, self.entry_points, self.mutations, folder, *self.edits)
        for name in ("refusal", "describe", "fault", "seen"):
            self.entry(name).restype = ctypes.c_char_p
        if hasattr(self.library, f"{self.engine}_yields"):
            self.entry("yields").restype = ctypes.c_char_p
        self.entry("cycles").restype = ctypes.c_double

    def entry(self, name: str) -> Callable:
        return getattr(self.library, f"{self.engine}_{name}")

    def seen(self) -> set[str]:
        """Kinds of plans that were looked at."""
        return set(self.entry("seen")().decode().splitlines())

    def __call__(
        self,
        function: str,
        operator: str,
        case: Case,
        *more: object,
        dtype: torch.dtype = torch.float32,
        tf32: bool = False,
        strides: dict[str, tuple[int, ...]] | None = None,
        capability: int = 90,
    ) -> str | float | None:
        """One of the entry points, for tensors that only have strides: contiguous ones unless others are named."""
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        for name, of_tensor in (strides or {}).items():
            tensors[name] = tensors[name].as_strided(shapes[name], of_tensor)
        fields = ShimEngine.fields(case, tensors, tf32)
        self.library.set_capability(capability)
        result = self.entry(function)(OPERATOR_NUMBER[operator], fields, *more)
        return result.decode() if isinstance(result, bytes) else result

    def fault(self, operator: str, case: Case, seed: int) -> str | None:
        """What is wrong with its plans for tensors of any strides at any addresses."""
        rng = random.Random(seed)
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        settings = {
            "strides": {name: mma_strides(shape, rng) for name, shape in shapes.items()},
            "capability": rng.choice([90, 90, 80]),
            "tf32": rng.random() < 0.5,
        }
        aligned = (ctypes.c_uint64(0) for _ in range(3))
        shifts = [rng.choice([0, 0, 0, 0, 1, 2, 4]) for _ in range(3)]
        settings["dtype"] = rng.choice(self.dtypes)
        places = [ctypes.c_uint64(settings["dtype"].itemsize * shift) for shift in shifts]
        refused = self("refusal", operator, case, **settings)
        if refused is None:
            assert self("cycles", operator, case, *aligned, **settings) > 0
            fault = self("fault", operator, case, *places, seed, **settings)
            return "no plan at these addresses" if fault is None else fault
        assert REFUSAL.fullmatch(refused), refused
        return None


@built_beside_the_tests
def mma_plans(folder: Path) -> MmaPlans:
    return MmaPlans(folder)


def random_mma_cases(count: int, seed: int) -> Iterator[tuple[Case, str]]:
    """Anything small: few channels and many, one pixel and lines of several tiles, large filters, groups."""
    rng = random.Random(seed)
    while count > 0:
        operator, groups = rng.choice(WGMMA_OPERATORS), rng.choice([1, 1, 1, 1, 2, 3])
        channels = [1, 2, 3, 4, 5, 7, 8, 16, 31, 64, 100, 128, 130, 257] if groups == 1 else [8, 9, 12, 16, 31, 64]
        C, K = (groups * rng.choice(channels) for _ in range(2))
        N = rng.choice([1, 1, 2, 3, 5])
        H, W = (
            rng.choice([1, rng.randint(1, 8), rng.randint(7, 16), 4 * rng.randint(1, 8), rng.randint(1, most)])
            for most in (41, rng.choice([60, 300, 1030]))
        )
        R, S = rng.choice([(1, 1), (1, 1), (3, 3), (3, 3), (2, 2), (7, 7), (rng.randint(1, 12), rng.randint(1, 12))])
        stride = tuple(rng.choices([1, 1, 2, 3, 4], k=2)) if operator == "fprop" else (1, 1)
        padding = tuple(rng.choices([0, 0, 1, 2, 3, 5], k=2))
        dilation = tuple(rng.choices([1, 1, 1, 2, 3, 13], k=2))
        case = Case(N, C, H, W, K, R, S, stride, padding, dilation, groups)
        if min(case.y_shape) > 0:
            yield case, operator
            count -= 1


MMA_KINDS = {
    *(f"shape {number}" for number in range(5)),
    *(f"{number} parts" for number in (1, 2, 4, 8)),
    *(f"planes of x by {how}" for how in ("words", "fours", "boxes in bulk", "runs", "runs in bulk", "planes")),
    *(f"pixels of x by {how}" for how in ("words", "fours", "boxes in bulk")),
    *(f"w by {how}" for how in ("words", "fours", "boxes in bulk", "runs", "runs in bulk")),
    *(f"taps of w by {how}" for how in ("words", "fours", "boxes in bulk")),
    *(
        "y by 1",
        "y by 4",
        "pixels of y by 1",
        "pixels of y by 4",
        "lead",
        "a ring that turns",
        "planes of x by planes in bulk",
        "lines of x by boxes in bulk",
    ),
}


def test_mma_plans_are_sound(mma_plans):
    """Each output once, each term once and where the convolution says, all of it in shared memory and aligned."""
    planned, count = 0, 3000
    for seed, (case, operator) in enumerate(random_mma_cases(count, seed=0)):
        fault = mma_plans.fault(operator, case, seed)
        assert not fault, f"{operator} of {case}, seed {seed}: {fault}"
        planned += fault is not None
    assert planned > 0.9 * count
    assert mma_plans.seen() >= MMA_KINDS


@pytest.mark.parametrize("mutation", MMA_PLAN_MUTATIONS)
def test_mma_plan_checks_see_what_is_wrong(mma_plans, mutation):
    cases = enumerate(random_mma_cases(3000, seed=0))
    with mutated(mma_plans.library, MMA_PLAN_MUTATIONS, mutation):
        assert any(mma_plans.fault(operator, case, seed) for seed, (case, operator) in cases)


def test_mma_divides_exactly(mma_plans):
    assert mma_plans.library.mma_wrong_divisor(0) == 0


def test_memo_tells_problems_apart_and_forgets_none_of_a_network(mma_plans):
    case = Case(2, 12, 13, 14, 15, 3, 4, (2, 1), (1, 2), (1, 2), groups=3)
    tensors = make_tensors(case, torch.float32, equal)
    fields = ShimEngine.fields(case, tensors, False)
    fault = mma_plans.library.mma_fault_of_memo
    fault.restype = ctypes.c_char_p
    assert fault(fields, len(PROBLEM_FIELDS), 0) == b""


# More channels may need a smaller chunk or tile, which is estimated better, or leave none that fits.
LEAST_MMA_GROWTH = 0.75


def test_mma_estimates_grow_with_the_work(mma_plans):
    aligned = [ctypes.c_uint64(0)] * 3
    for case, operator in random_mma_cases(1000, seed=1):
        if mma_plans("refusal", operator, case) is not None:
            continue
        once = mma_plans("cycles", operator, case, *aligned)
        for letter in "NCK":
            double = dataclasses.replace(case, **{letter: 2 * getattr(case, letter)})
            twice = mma_plans("cycles", operator, double, *aligned)
            refused = mma_plans("refusal", operator, double) is not None
            assert refused or twice >= LEAST_MMA_GROWTH * once, f"{operator} of {double}: {twice} after {once}"


def test_mma_clusters_find_room_at_once(mma_plans):
    """Where there are few tiles, on a GPU with room for as many clusters as an H200 has, for fewer, or for none."""
    for case in (
        Case(1, 256, 28, 28, 256, 3, 3, stride=(2, 2), padding=(1, 1)),
        Case(1, 512, 14, 14, 512, 3, 3, stride=(2, 2), padding=(1, 1)),
        Case(1, 512, 7, 7, 512, 3, 3, padding=(1, 1)),
    ):
        for tf32, room in itertools.product((True, False), ((66, 30, 15), (60, 28, 12), (66, 30, -1))):
            assert mma_plans("waiting", "fprop", case, *room, tf32=tf32) == 0, (case, tf32, room)


def test_mma_describes_its_configuration(mma_plans):
    """Whole and in the 320 bytes that the binding has for it."""
    for case, operator in random_mma_cases(300, seed=4):
        for tf32 in (False, True):
            if mma_plans("refusal", operator, case, tf32=tf32) is None:
                assert re.fullmatch(
                    r"(one product|three products of parts), tile of \d+ channels x \d+ x \d+ pixels, \d stages of \d+ "
                    r"channels, \d+ bytes of shared memory, x by [a-z ]+, weights by [a-z ]+, y by [a-z ]+, "
                    r"\d+ tiles for \d blocks each, about [\d.e+-]+ Mcycles",
                    mma_plans("describe", operator, case, tf32=tf32),
                )


# What the engine leaves to others, and what looks alike and is its own.
MMA_CASE = Case(1, 3, 56, 57, 64, 7, 7, stride=(2, 2), padding=(3, 3))
MMA_REFUSALS = [
    (MMA_CASE, "fprop", {}, None),
    (MMA_CASE, "fprop", {"capability": 80}, None),
    (MMA_CASE, "fprop", {"capability": 120}, None),
    (MMA_CASE, "fprop", {"capability": 75}, "Ampere"),
    (MMA_CASE, "fprop", {"capability": 0}, "Ampere"),
    (MMA_CASE, "fprop", {"dtype": torch.float16}, "float32 only"),
    (MMA_CASE, "fprop", {"dtype": torch.float64}, "float32 only"),
    (MMA_CASE, "dgrad", {}, "stride 1"),
    (MMA_CASE, "wgrad", {}, "outputs and input gradients only"),
    (MMA_CASE, "bgrad", {}, "outputs and input gradients only"),
    (Case(1, 16, 3, 80, 16, 3, 3, stride=(2, 1)), "dgrad", {}, None),  # one row: no stride in it
    (Case(1, 14, 9, 9, 16, 3, 3, groups=2), "fprop", {}, "groups of at least 8"),
    (Case(1, 16, 9, 9, 14, 3, 3, groups=2), "fprop", {}, "groups of at least 8"),
    (Case(1, 16, 900, 900, 16, 3, 3, dilation=(100, 100)), "fprop", {}, "does not fit"),
    (Case(1, 1, 20000, 20000, 1, 16384, 16384), "fprop", {}, "does not fit"),
]


@pytest.mark.parametrize("case, operator, settings, text", MMA_REFUSALS, ids=str)
def test_mma_says_what_it_refuses(mma_plans, case, operator, settings, text):
    check_refusal(mma_plans("refusal", operator, case, **settings), text)


# direct needs 2^21 taps of outputs and 2^26 multiply-adds.
@pytest.mark.parametrize(
    "case, operator, yields",
    [
        (Case(4, 64, 256, 256, 3, 3, 3, padding=(1, 1)), "fprop", True),
        (Case(3, 64, 256, 256, 3, 3, 3, padding=(1, 1)), "fprop", False),
        (Case(8, 320, 64, 64, 4, 3, 3, padding=(1, 1)), "fprop", False),
        (Case(64, 320, 64, 64, 4, 3, 3, padding=(1, 1)), "fprop", True),
        (Case(64, 320, 64, 64, 5, 3, 3, padding=(1, 1)), "fprop", False),
        (Case(4, 3, 256, 256, 64, 3, 3, padding=(1, 1)), "dgrad", True),
        (Case(3, 3, 256, 256, 64, 3, 3, padding=(1, 1)), "dgrad", False),
        (Case(4, 3, 256, 256, 9, 3, 3, padding=(1, 1)), "dgrad", False),  # few multiply-adds
        (Case(2, 64, 256, 256, 6, 3, 3, padding=(1, 1), groups=2), "fprop", True),
        (Case(1, 64, 256, 256, 6, 3, 3, padding=(1, 1), groups=2), "fprop", False),
    ],
    ids=str,
)
def test_mma_yields_with_few_output_channels(mma_plans, case, operator, yields):
    assert mma_plans("yields", operator, case) == ("direct is faster with few output channels" if yields else None)


def check_refusal(refusal: str | None, text: str | None) -> None:
    assert (refusal is None) == (text is None), refusal
    assert text is None or text in refusal


MMA_SHIM_ENTRY_POINTS = (
    """
#include <type_traits>
"""
    + PROBLEM_FROM_FIELDS
    + r"""
using namespace modelnew;
using namespace modelnew::mma;

extern "C" {
int x_copies = 0, w_copies = 0;  // of the last run
}

// Plans one shape of a tile on a GPU of three SMs and runs it, as TF32 if that is allowed, however small the problem:
// -1 if it does not fit, else the error.
extern "C" int mma_run(int op, const int64_t* fields, void* const* pointers, int shape, bool hopper, int splits,
                       int seed) {
  const Problem problem = make_problem(fields);
  const Operator which = static_cast<Operator>(op);
  Params params{};
  params.in_ptr = static_cast<const float*>(which == Operator::kDgrad ? pointers[3] : pointers[0]);
  params.w_ptr = static_cast<const float*>(pointers[1]);
  params.bias_ptr = static_cast<const float*>(pointers[2]);
  params.out_ptr = static_cast<float*>(pointers[4]);
  params.tf32 = problem.tf32_allowed;
  params.of = correlation_of_problem(problem, which);
  flatten_points(params.of);
  const auto address = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  const Alignment alignment{address(params.in_ptr), address(params.w_ptr), address(params.out_ptr)};
  const Device device{3, static_cast<int>(simt::kMaxSmemBytes), hopper, {}};
  if (!make_plan(params.of, params.tf32, device, alignment, params.plan, shape, splits)) return -1;
  x_copies = static_cast<int>(params.plan.x_copies), w_copies = static_cast<int>(params.plan.w_copies);
  const auto launch = [&] { return params.tf32 ? run<false>(params, nullptr) : run<true>(params, nullptr); };
  return simt_run(seed, params.plan.splits > 1, launch);
}
"""
)

# mma.sync: the lanes of a warp show one another their operands, of which it takes what TF32 has.
MMA_INSTRUCTION = r"""
extern "C" {
int recomputed = 0;  // outputs of the last run, by exact_output
const char* simt_message() { return simt::message.c_str(); }
}
inline unsigned turns[1024];
inline void simt_multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static uint32_t shown[32][2][32][6];  // of each warp, in turns: nobody writes where another lane may still read
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t(&words)[32][6] = shown[warp][turns[threadIdx.x]++ % 2];
  std::copy(a, a + 4, words[lane]);
  std::copy(b, b + 2, words[lane] + 4);
  __syncwarp();
  const auto value = [&](unsigned of_lane, int word) { return modelnew::bits_float(words[of_lane][word] & ~0x1fffu); };
  for (int i = 0; i < 4; ++i) {
    double sum = d[i];
    const unsigned row = lane / 4 * 4, column = (lane % 4 * 2 + i % 2) * 4;  // lanes that have them
    for (int k = 0; k < 8; ++k)
      sum += double{value(row + k % 4, i / 2 + k / 4 * 2)} * value(column + k % 4, 4 + k / 4);
    d[i] = static_cast<float>(sum);
  }
}
// A launch, or what stands for one of clusters; copies of odd seeds come late.
template <typename Launch>
int simt_run(int seed, bool clusters, Launch launch) {
  simt::independent = true;
  simt::before_block = simt::begin_block;
  simt::between_rounds = simt::do_some;
  simt::late = seed % 2;
  simt::shuffler.seed(seed);
  simt::again = clusters;
  simt::shown.clear();
  int code = 0;
  for (int i = 0; i <= clusters && code == 0; ++i) {
    recomputed = 0;
    std::fill(std::begin(turns), std::end(turns), 0u);
    code = launch();
  }
  return code;
}
"""

# Each takes away what others rely on, or leaves out a part of the sum.
MMA_MUTATIONS = {
    "no zeros outside an image": ("exists ? 4 * WORDS : 0);", "MUTATED || exists ? 4 * WORDS : 0);"),
    "another column in front": (
        "column * plan.pixel_words + plan.lead",
        "column * plan.pixel_words + (MUTATED ? 0 : plan.lead)",
    ),
    "reads a chunk before it is there": left_out("hopper::barrier_wait(barriers + 8 * slot"),
    "overwrites a chunk in use": left_out("__syncthreads();  // nobody reads chunk i - 1"),
    "Inf is not computed again": ("if (__syncthreads_or(!finite))", "if (__syncthreads_or(!MUTATED && !finite))"),
    "a product dropped": left_out("multiply_add(d, a_rest[i][m], b[i]);"),
}


class MmaShim:
    """The mma engine, compiled by g++ and run thread by thread, as WgmmaShim runs the other one."""

    engine, entry_points, mutations = "mma", MMA_SHIM_ENTRY_POINTS, MMA_MUTATIONS
    # What a run can ask of a plan, and what it asks for if it is not told.
    wishes: ClassVar[dict[str, int]] = {"shape": -1, "hopper": True, "splits": 1}

    def __init__(self, folder: Path) -> None:
        stand_in = HOPPER_STAND_IN + MMA_INSTRUCTION
        source = amalgamate({**modelnew._sources, "hopper.cuh": stand_in}, [f"{self.engine}.cu"])
        source = with_mutations(source, self.mutations)
        source, found = re.subn(r'asm\("mma\.sync[^;]*;[^;]*;', "simt_multiply_add(d, a, b);", source)
        assert found == 1
        source, found = re.subn(r"(__noinline__ float exact_output\(.*?\) \{)", r"\1 ++recomputed;", source)
        assert found == 1
        self.library = compile_simt(source + '#line 1 "entry_points"\n' + self.entry_points, folder)
        self.library.simt_message.restype = ctypes.c_char_p

    def last(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, name).value

    def run(
        self,
        operator: str,
        case: Case,
        tensors: dict[str, Tensor],
        out: Tensor,
        *,
        tf32: bool = False,
        seed: int = 0,
        **wishes: int,
    ) -> str | None:
        """Runs fprop or dgrad into `out`: None if there is no such plan, else what went wrong."""
        assert wishes.keys() <= self.wishes.keys()
        fields = ShimEngine.fields(case, tensors | {{"fprop": "dy", "dgrad": "x"}[operator]: out}, tf32)
        pointers = (ctypes.c_void_p * 5)(*input_pointers(operator, tensors), out.data_ptr())
        run = getattr(self.library, f"{self.engine}_run")
        code = run(OPERATOR_NUMBER[operator], fields, pointers, *(self.wishes | wishes).values(), seed)
        if code == -1:
            return None
        return "" if code == 0 else f"error {code}, {self.library.simt_message().decode()}"

    def fault(
        self,
        operator: str,
        case: Case,
        layout: str,
        seed: int,
        dtype: torch.dtype = torch.float32,
        **settings: object,
    ) -> str | None:
        """What is wrong with a run on integers, with a bias or without and at any alignment, or an empty text."""
        rng = random.Random(seed)
        tensors = make_tensors(case, dtype, integers, seed=seed)
        # More bits than TF32 has: of weights, or of what they meet.
        if dtype == torch.float32 and not settings.get("tf32"):
            tensors[rng.choice(["w", {"fprop": "x", "dgrad": "dy"}[operator]])] *= 1025
        expected = references(case, tensors)[operator]
        if operator == "fprop" and rng.random() < 0.5:
            expected -= tensors.pop("bias").double().view(-1, 1, 1)
        shift = rng.choice([0, 0, 0, 1, 2])  # elements
        order, back = ((0, 2, 3, 1), (0, 3, 1, 2)) if layout == "channels_last" else ((0, 1, 2, 3),) * 2
        for name in tensors.keys() - {"bias"}:
            tensors[name] = shifted(tensors[name].permute(order), shift).permute(back)
        inner = shifted(torch.full_like(expected, math.nan).to(dtype).permute(order), rng.choice([0, 0, 0, 1, 2]))
        out = inner.permute(back)
        message = self.run(operator, case, tensors, out, seed=seed, **settings)
        if message != "":
            return message
        if not torch.equal(out, expected.to(dtype)):
            return f"{(out != expected.to(dtype)).sum()} of {out.numel()} outputs are wrong"
        if self.last("recomputed"):
            return f"{self.last('recomputed')} outputs are not finite at first"
        return "" if margins_intact(inner) else "written outside the output"


@built_beside_the_tests
def mma_shim(folder: Path) -> MmaShim:
    return MmaShim(folder)


# Few channels and several chunks of them, stems, points, small images with padding and without, lines longer than a
# tile, ragged channels, groups. Rows of x in fours (36 columns) and not, with an odd padding and with a stride.
MMA_SHIM_CASES = [
    (Case(2, 3, 19, 36, 20, 7, 7, stride=(2, 2), padding=(3, 3)), "fprop"),
    (Case(1, 40, 5, 36, 17, 3, 3, padding=(1, 1)), "fprop"),
    (Case(2, 36, 9, 9, 24, 1, 1), "fprop"),
    (Case(1, 64, 6, 6, 40, 3, 3), "fprop"),
    (Case(2, 20, 6, 6, 24, 3, 3, padding=(1, 1)), "fprop"),
    (Case(1, 5, 2, 300, 35, 2, 3, padding=(0, 2), dilation=(1, 2)), "fprop"),
    (Case(2, 16, 13, 12, 18, 1, 1, stride=(2, 3), padding=(0, 1)), "fprop"),
    (Case(1, 24, 9, 20, 36, 1, 3, stride=(2, 1), groups=2), "fprop"),
    (Case(1, 17, 5, 32, 24, 3, 3, padding=(1, 1)), "dgrad"),
    (Case(1, 16, 7, 7, 36, 3, 2, padding=(0, 1), groups=2), "dgrad"),
]


@pytest.mark.xdist_group("mma_shim_exact")  # its cases are counted together
@pytest.mark.parametrize("number", range(len(MMA_SHIM_CASES)))
def test_mma_shim_exact(mma_shim, number):
    """Integers, with Hopper's features and without, under both contracts: each shape of a tile in turn."""
    case, operator = MMA_SHIM_CASES[number]
    for seed, (layout, hopper) in enumerate(itertools.product(LAYOUTS, (True, False))):
        settings = {"shape": (seed + number) % 5, "hopper": hopper, "tf32": (seed + number) % 3 == 0}
        fault = mma_shim.fault(operator, case, layout, 3 * number + seed + 1, **settings)
        MMA_COPIES.update((name, mma_shim.last(name)) for name in ("x_copies", "w_copies"))
        assert fault == "", f"{operator} of {case}, {layout}, {settings}, seed {3 * number + seed + 1}: {fault}"
    if number == len(MMA_SHIM_CASES) - 1 and len(MMA_COPIES) > 2:  # not this case alone
        kinds = {*(("x_copies", i) for i in range(5)), *(("w_copies", i) for i in range(4))}
        assert kinds == MMA_COPIES


@pytest.mark.parametrize("splits", [2, 4])
def test_mma_shim_adds_up_over_a_cluster(mma_shim, splits):
    case = Case(1, 128 * splits, 3, 5, 20, 1, 1)
    assert [mma_shim.fault("fprop", case, layout, splits, shape=1, splits=splits) for layout in LAYOUTS] == ["", ""]


MMA_COPIES: set[tuple[str, int]] = set()  # what brought x and w in the runs above


def spreads(
    shim: MmaShim,
    case: Case,
    tf32: bool,
    layout: str = "contiguous",
    dtype: torch.dtype = torch.float32,
    **wishes: int,
) -> bool:
    """Whether Inf, NaN and what only rounds to Inf come to those outputs that PyTorch has them in."""
    largest = torch.finfo(torch.float32).max
    for special in (math.inf, -math.inf, struct.unpack("f", b"\xff\xff\xff\x7f")[0], largest):
        if special == largest and (tf32 or dtype != torch.float32):
            continue
        tensors = make_tensors(case, dtype, under_a_tf32_step)
        tensors["w"] *= 1e-2
        if dtype == torch.float32:
            tensors["x"].view(torch.int32)[0, 3, 5, 7] = torch.tensor(special).view(torch.int32).item()
        else:
            tensors["x"][0, 3, 5, 7] = special
        tensors["w"][2, 1, 0, 0] = special if special != largest else 1
        expected = references(case, tensors)["fprop"]
        tensors |= {"dy": torch.full(case.y_shape, math.nan, dtype=dtype)}
        tensors = in_layout(tensors, layout)
        out = tensors["dy"]
        assert shim.run("fprop", case, tensors, out, tf32=tf32, **wishes) == ""
        right = torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.isinf(), expected.isinf())
        finite = expected.isfinite()
        right &= torch.equal(out.sign()[expected.isinf()].double(), expected.sign()[expected.isinf()])
        rtol = 1e-2 if dtype != torch.float32 else 1e-3 if tf32 else 1e-6
        if not right or not torch.allclose(out[finite].double(), expected[finite], rtol=rtol):
            return False
    return True


MMA_SPREADING_CASE = Case(1, 16, 7, 20, 20, 3, 3)


def test_mma_shim_keeps_the_contract_in_long_sums(mma_shim):
    """Products that are all the same, of the size at which additions err most: in two sums at least."""
    case = Case(1, 8192, 1, 4, 4, 1, 1)
    tensors = make_tensors(case, torch.float32, lambda shape, _: torch.full(shape, 0.24446875))
    tensors["w"].fill_(1)
    assert mma_shim.fault("fprop", case, "contiguous", 0, tf32=False, shape=1, splits=1) is None
    for wishes in ({"shape": 0}, {"shape": 1, "splits": 2}):
        out = torch.full(case.y_shape, math.nan)
        assert mma_shim.run("fprop", case, tensors, out, tf32=False, **wishes) == ""
        check_bounds(case, {"fprop": out}, tensors, tf32=())


@pytest.mark.parametrize("tf32", [False, True])
def test_mma_shim_spreads_nan_and_inf_to_those_that_read_them(mma_shim, tf32):
    assert spreads(mma_shim, MMA_SPREADING_CASE, tf32, shape=1)


@pytest.mark.parametrize("mutation", MMA_MUTATIONS)
def test_mma_shim_sees_what_is_missing(mutation, mma_shim):
    """The shim itself: what is left out shows in one of a few runs."""
    # Rounds of a ring of words and of one of boxes; without the mutation they are right.
    cases = [Case(1, 300, 4, W, 20, 1, 1, padding=(1, 1)) for W in (9, 12)]
    with mutated(mma_shim.library, MMA_MUTATIONS, mutation):
        assert (
            not spreads(mma_shim, MMA_SPREADING_CASE, False, shape=1)
            if "Inf" in mutation
            else any(
                mma_shim.fault("fprop", case, "contiguous", seed, shape=1)
                for seed in (1, 3, 5, 2, 7, 9)
                for case in cases
            )
        )


# The pointwise engine without a GPU -----------------------------------------------------------------------------------

POINTWISE_ENTRY_POINTS = (
    """
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <type_traits>

extern "C" {
int simt_mutation = 0;  // the number of the one that takes place, see with_mutations
}

#include "pointwise.cu"
"""
    + PROBLEM_FROM_FIELDS
    + r"""
using namespace modelnew;
using namespace modelnew::pointwise;

static std::set<std::string> seen;  // kinds of plans

// What is wrong with the numbers of a plan, or nothing.
static std::string fault_of_numbers(const Problem& problem, const Plan& plan, const Device& device, bool exact) {
  const bool staged = plan.stage_terms > 0;
  const int threads = staged ? staged_threads(plan.row_bits) : 32 * plan.slices << plan.row_bits;
  if (shared_bytes(plan) > device.shared_bytes || threads > (exact ? 256 : 512)) return "a block that is too large";
  if (plan.block_columns != (staged ? 64 : 32) || (staged && plan.column_tiles > 65535)) return "columns of a block";
  if (staged && (exact || plan.slices != 1 || plan.split_bits != 0 || plan.row_bits > 1)) return "stages, but which";
  if (staged && (plan.loads != Loads::kFours || plan.out_vector != 4)) return "stages of single values";
  if (staged && (plan.stage_terms * kStages != problem.C || plan.stage_terms % 8 != 0)) return "terms of no stage";
  if (block_rows(plan) % splits_of(plan) != 0) return "rows of a share";
  const int64_t pixels = problem.N * problem.P * problem.Q;
  if (plan.rows != (plan.pixel_rows ? pixels : problem.K) || plan.columns != (plan.pixel_rows ? problem.K : pixels))
    return "rows and columns of y";
  const auto covers = [](int64_t tiles, int64_t size, int64_t all) { return tiles == (all + size - 1) / size; };
  if (!covers(plan.row_tiles, block_rows(plan), plan.rows) ||
      !covers(plan.column_tiles, plan.block_columns, plan.columns))
    return "tiles that y does not have, or too few";
  const int64_t steps = ceil_div(problem.C, kTerms);
  if (int64_t{plan.slice_steps} * plan.slices * splits_of(plan) < steps) return "steps of no slice";
  // Blocks of a cluster may have none, but of several slices half have some.
  if (plan.slices > 1 && int64_t{plan.slices} * splits_of(plan) >= 2 * steps) return "slices without steps";
  // In full every 8 terms are an addition, which all may err to the same side.
  if (exact && plan.slice_steps > 128 && plan.slices * splits_of(plan) < 4) return "too long a sum";
  return plan.cycles > 0 ? "" : "no estimate";
}

// What is wrong with where a plan finds x, w and y, or nothing: some places, from the problem itself, first and last
// among them. Addresses are in words.
static std::string fault_of_places(const Problem& problem, const Params& params, const Alignment& at, int seed) {
  const Plan& plan = params.plan;
  std::mt19937 random(seed);
  const int64_t pixels = problem.N * problem.P * problem.Q;
  const auto drawn = [&](int i, int64_t most) { return i == 0 ? 0 : i == 1 ? most - 1 : random() % most; };
  const auto x = [&](int64_t pixel, int64_t c) {
    const int64_t row = pixel / problem.Q % problem.P * problem.stride_h, column = pixel % problem.Q * problem.stride_w;
    return pixel / problem.Q / problem.P * problem.x_stride[0] + c * problem.x_stride[1] + row * problem.x_stride[2] +
           column * problem.x_stride[3];
  };
  const auto w = [&](int64_t k, int64_t c) { return k * problem.w_stride[0] + c * problem.w_stride[1]; };
  const auto y = [&](int64_t pixel, int64_t k) {
    return pixel / problem.Q / problem.P * problem.y_stride[0] + k * problem.y_stride[1] +
           pixel / problem.Q % problem.P * problem.y_stride[2] + pixel % problem.Q * problem.y_stride[3];
  };
  // Whether four values that begin at a multiple of 4 are neighbours and 16 bytes.
  const auto are_four = [](int64_t address, int64_t size, int64_t i, const auto& offset_of) {
    if (size % 4 != 0) return false;
    const int64_t first = offset_of(i / 4 * 4);
    for (int j = 1; j < 4; ++j)
      if (offset_of(i / 4 * 4 + j) != first + j) return false;
    return (address + first) % 4 == 0;
  };
  if (plan.pixel_rows != (plan.loads == Loads::kChannelsLast)) return "rows of another kind than loads";
  for (int i = 0; i < 40; ++i) {
    const int64_t pixel = drawn(i, pixels), c = drawn(i, problem.C), k = drawn(i, problem.K);
    const Place place = place_of_pixel(params, static_cast<int>(pixel));
    if (place.x + c * params.x_channel != x(pixel, c)) return "another place of x";
    if (k * params.w_out + c * params.w_in != w(k, c)) return "another place of w";
    if (place.y + k * params.y_channel != y(pixel, k)) return "another place of y";
    if (plan.pixel_rows && params.y_channel != 1) return "channels of y that are no neighbours";
    const int64_t plane = problem.P * problem.Q, image = pixel / plane, in_plane = pixel % plane;
    if (plan.stage_terms > 0 && image * params.x_image + in_plane + c * params.x_channel != x(pixel, c))
      return "another place of x in stages";
    if (plan.stage_terms > 0 && image * params.y_image + in_plane + k * params.y_channel != y(pixel, k))
      return "another place of y behind stages";
    const auto channel_of_w = [&](int64_t channel) { return w(k, channel); };
    const auto channel_of_x = [&](int64_t channel) { return x(pixel, channel); };
    const auto pixel_of_x = [&](int64_t other) { return x(other, c); };
    const auto channel_of_y = [&](int64_t channel) { return y(pixel, channel); };
    const auto pixel_of_y = [&](int64_t other) { return y(other, k); };
    if (plan.loads != Loads::kSingle && !are_four(at.w, problem.C, c, channel_of_w)) return "fours of w astray";
    if (plan.loads == Loads::kFours && !are_four(at.x, pixels, pixel, pixel_of_x)) return "fours of x astray";
    if (plan.loads == Loads::kChannelsLast && !are_four(at.x, problem.C, c, channel_of_x)) return "channels astray";
    if (plan.out_vector != 4) continue;
    if (plan.pixel_rows ? !are_four(at.y, problem.K, k, channel_of_y) : !are_four(at.y, pixels, pixel, pixel_of_y))
      return "fours of y astray";
  }
  return plan.out_vector == 1 || plan.out_vector == 4 ? "" : "neither fours nor single values";
}

static void note(const Plan& plan) {
  if (simt_mutation != 0) return;  // kinds are those of the engine as it is
  const char* const loads[] = {"fours", "fours of weights", "fours of channels", "single values"};
  seen.insert(std::string("by ") + loads[static_cast<int>(plan.loads)]);
  seen.insert("y by " + std::to_string(plan.out_vector));
  seen.insert(std::to_string(plan.slices) + " slices");
  seen.insert(std::to_string(splits_of(plan)) + " splits");
  if (plan.stage_terms > 0)
    seen.insert(std::to_string(block_rows(plan)) + " rows, stages of " + std::to_string(plan.stage_terms));
}

extern "C" {
void set_capability(int capability) { stand_in_capability = capability; }
const char* pointwise_refusal(int op, const int64_t* fields) {
  return refusal(make_problem(fields), static_cast<Operator>(op));
}
const char* pointwise_describe(int op, const int64_t* fields) {
  static char text[321];
  std::memset(text, 'x', sizeof text);
  describe(make_problem(fields), static_cast<Operator>(op), text, 320);  // as the binding has it
  return text[320] == 'x' && std::memchr(text, 0, 320) ? text : "written too far";
}
const char* pointwise_seen() {
  static std::string all;
  all.clear();
  for (const std::string& kind : seen) all += kind + "\n";
  return all.c_str();
}
double pointwise_cycles(int op, const int64_t* fields, uint64_t x, uint64_t w, uint64_t y) {
  const Problem problem = make_problem(fields);
  Device device{};
  current_device(device);
  Plan plan{};
  const bool exact = !uses_tf32(problem, static_cast<Operator>(op));
  return make_plan(flattened(problem), exact, device, Alignment{x, w, y}, plan) ? plan.cycles : 0;
}
// Plans for tensors at these addresses, on the GPU that was set, the best one and all that can be forced: null if there
// is none, else what is wrong, or "".
const char* pointwise_fault(int, const int64_t* fields, uint64_t x, uint64_t w, uint64_t y, int seed) {
  static std::string fault;
  const Problem problem = make_problem(fields);
  const Correlation of = flattened(problem);
  const bool exact = !problem.tf32_allowed;
  Device device{};
  current_device(device);
  Plan best{};
  if (!make_plan(of, exact, device, Alignment{x, w, y}, best)) return nullptr;
  if (best.split_bits > 0 && !device.hopper) return "a cluster without Hopper";
  note(best);
  for (int i = -1; i < 3 * 4 * 5 + 2; ++i) {
    Plan plan = best;
    const bool staged = i >= 3 * 4 * 5;
    const int row_bits = i % 3, split_bits = staged ? 0 : i / 3 % 4, slices = staged ? 1 : 1 << i / 12;
    if (i >= 0 && !make_plan(of, exact, device, Alignment{x, w, y}, plan, staged, row_bits, split_bits, slices))
      continue;
    if (i >= 0 && (plan.row_bits != row_bits || plan.split_bits != split_bits || plan.slices != slices ||
                   (plan.stage_terms > 0) != staged))
      return "another plan than the forced one";
    fault = fault_of_numbers(problem, plan, device, exact);
    if (fault.empty() && (i < 0 || staged))
      fault = fault_of_places(problem, make_params(of, plan), Alignment{x / 4, w / 4, y / 4}, seed);
    const bool large = problem.P * problem.Q >= (problem.C < 256 ? 784 : 2048);  // enough for stages
    const bool may_be = staged ? large : device.hopper || split_bits == 0;
    if (fault.empty() && plan.cycles < best.cycles && may_be) fault = "not the best plan";
    if (fault.empty() && i < 0 && plan.stage_terms > 0 && !large) fault = "stages of small planes";
    if (!fault.empty()) {
      fault += ", plan " + std::to_string(i);
      return fault.c_str();
    }
  }
  return "";
}
}
"""
)


# Each puts something out of place.
POINTWISE_PLAN_MUTATIONS = {
    "w as if it were aligned": ("address.w % 16 == 0;", "(MUTATED || address.w % 16 == 0);"),
    "planes of x astray": (
        "fours(of.in_stride[1], of.in_channels) &&",
        "(MUTATED || fours(of.in_stride[1], of.in_channels)) &&",
    ),
    "pixels of x astray": ("fours(of.in_stride[3], of.W)", "(MUTATED || fours(of.in_stride[3], of.W))"),
    "y as if it were aligned": ("aligned_out && out_fours ? 4", "(MUTATED || aligned_out) && out_fours ? 4"),
    "a step too few": ("ceil_div(steps, plan.slices", "ceil_div(steps - (MUTATED && steps > 1), plan.slices"),
    "a row too few": ("ceil_div(plan.rows, block", "ceil_div(plan.rows - MUTATED, block"),
    "every pixel of a row": ("(of.in_stride[3]) * of.stride_w", "(of.in_stride[3]) * (MUTATED ? 1 : of.stride_w)"),
    "not the best": ("plan.cycles >= best.cycles", "(MUTATED || plan.cycles >= best.cycles)"),
    "stages of several lines": ("if (of.P != 1) return", "if (!MUTATED && of.P != 1) return"),
    "stages where y is no fours": ("&& plan.out_vector == 4;", "&& (MUTATED || plan.out_vector == 4);"),
    "stages in full accuracy": ("if (exact || !fours)", "if ((!MUTATED && exact) || !fours)"),
}


class PointwisePlans(MmaPlans):
    """The host part of the pointwise engine, in the same way."""

    engine, entry_points, mutations = "pointwise", POINTWISE_ENTRY_POINTS, POINTWISE_PLAN_MUTATIONS


@built_beside_the_tests
def pointwise_plans(folder: Path) -> PointwisePlans:
    return PointwisePlans(folder)


def random_pointwise_cases(count: int, seed: int) -> Iterator[Case]:
    """1x1 filters, few channels and many, one pixel to some thousands, half at a stride; then as many for stages."""
    rng = random.Random(seed)
    for number in range(count):
        if number % 2 == 1:
            C, size = rng.choice([64, 128, 256]), rng.choice([14, 28, 46, 56])
            yield Case(rng.choice([1, 2, 3]), C, size, size, rng.choice([33, 64, 128, 160, 256]), 1, 1)
            continue
        C, K = (rng.choice([1, 2, 3, 4, 7, 8, 16, 31, 64, 100, 128, 256, 500, 1024, 2048, 9000]) for _ in range(2))
        H, W = (rng.choice([1, 4, 7, 8, 14, 28, 56, rng.randint(1, 60)]) for _ in range(2))
        stride = rng.choice([(1, 1), (1, 1), (2, 2), (rng.randint(1, 4), rng.randint(1, 4))])
        yield Case(rng.choice([1, 1, 2, 3, 8]), C, H, W, K, 1, 1, stride)


POINTWISE_KINDS = {
    *(f"by {loads}" for loads in ("fours", "fours of weights", "fours of channels", "single values")),
    *("y by 1", "y by 4"),
    *(f"{number} slices" for number in (1, 2, 4, 8, 16)),
    *(f"{number} splits" for number in (1, 2, 4, 8)),
    *(f"{rows} rows, stages of {terms}" for rows in (32, 64) for terms in (16, 32, 64)),
}


def test_pointwise_plans_are_sound(pointwise_plans):
    """For tensors of any strides at any addresses: y and the reduction whole, loads and stores where they may be."""
    planned, count = 0, 6000
    for seed, case in enumerate(random_pointwise_cases(count, seed=0)):
        fault = pointwise_plans.fault("fprop", case, seed)
        assert not fault, f"{case}, seed {seed}: {fault}"
        planned += fault is not None
    assert planned > 0.9 * count
    assert pointwise_plans.seen() >= POINTWISE_KINDS


@pytest.mark.parametrize("mutation", POINTWISE_PLAN_MUTATIONS)
def test_pointwise_plan_checks_see_what_is_wrong(pointwise_plans, mutation):
    cases = enumerate(random_pointwise_cases(6000, seed=0))
    with mutated(pointwise_plans.library, POINTWISE_PLAN_MUTATIONS, mutation):
        assert any(pointwise_plans.fault("fprop", case, seed) for seed, case in cases)


def test_pointwise_estimates_grow_with_the_work(pointwise_plans):
    aligned, staged = [ctypes.c_uint64(0)] * 3, 0
    for case, tf32 in itertools.product(random_pointwise_cases(1000, seed=1), (False, True)):
        once = pointwise_plans("cycles", "fprop", case, *aligned, tf32=tf32)
        staged += "in stages" in pointwise_plans("describe", "fprop", case, tf32=tf32)
        for letter in "NCK":
            double = dataclasses.replace(case, **{letter: 2 * getattr(case, letter)})
            if case.tf32_operators(torch.float32, tf32) != double.tf32_operators(torch.float32, tf32):
                continue  # three products are one where there is enough to multiply
            twice = pointwise_plans("cycles", "fprop", double, *aligned, tf32=tf32)
            # More channels may be loaded by fours where fewer were not.
            assert twice >= (1 if letter == "N" else 0.9) * once, f"{double}: {twice} after {once}"
    assert staged > 50


def test_pointwise_describes_its_configuration(pointwise_plans):
    for case, tf32 in itertools.product(random_pointwise_cases(300, seed=4), (False, True)):
        text = pointwise_plans("describe", "fprop", case, tf32=tf32)
        assert re.fullmatch(
            r"(one product|three products of parts), tile of \d+ (channels x \d+ pixels|pixels x \d+ channels), by "
            r"(fours( of weights| of channels| in stages)?|single values), y by (fours|single values), \d+ tiles for "
            r"\d blocks of \d+ slices each, about [\d.e+-]+ Mcycles",
            text,
        ), text
        assert text.startswith("one product") == ("fprop" in case.tf32_operators(torch.float32, tf32))


@pytest.mark.parametrize(
    "capability, C, size, K, stages",
    [
        *((capability, 256, 56, 128, capability in (80, 87, 90, 100)) for capability in (80, 86, 87, 89, 90, 100, 120)),
        *((capability, 128, 56, 128, True) for capability in (80, 86, 90, 120)),
        (90, 256, 46, 128, True),
        (90, 256, 44, 128, False),  # below 2048 pixels
        (90, 128, 28, 512, True),
        (90, 128, 26, 512, False),  # below 784
    ],
)
def test_pointwise_stages_where_there_is_room(pointwise_plans, capability, C, size, K, stages):
    case = Case(1, C, size, size, K, 1, 1)
    text = pointwise_plans("describe", "fprop", case, tf32=True, capability=capability)
    assert text.startswith("one product")
    assert ("in stages" in text) == stages, text


# What the engine leaves to others, and what looks alike and is its own.
POINTWISE_CASE = Case(2, 64, 9, 10, 40, 1, 1)
POINTWISE_REFUSALS = [
    (POINTWISE_CASE, "fprop", {}, None),
    (POINTWISE_CASE, "fprop", {"capability": 80}, None),
    (POINTWISE_CASE, "fprop", {"capability": 120}, None),
    (POINTWISE_CASE, "fprop", {"capability": 75}, "Ampere"),
    (POINTWISE_CASE, "fprop", {"capability": 0}, "Ampere"),
    (POINTWISE_CASE, "fprop", {"dtype": torch.float16}, "float32 only"),
    (POINTWISE_CASE, "fprop", {"dtype": torch.float64}, "float32 only"),
    *((POINTWISE_CASE, operator, {}, "outputs only") for operator in ("dgrad", "wgrad", "bgrad")),
    (dataclasses.replace(POINTWISE_CASE, stride=(3, 2), dilation=(5, 7)), "fprop", {}, None),
    (dataclasses.replace(POINTWISE_CASE, S=2), "fprop", {}, "1x1 filters only"),
    (dataclasses.replace(POINTWISE_CASE, R=3), "fprop", {}, "1x1 filters only"),
    (dataclasses.replace(POINTWISE_CASE, groups=2), "fprop", {}, "one group only"),
    (dataclasses.replace(POINTWISE_CASE, padding=(0, 1)), "fprop", {}, "no padding"),
    (dataclasses.replace(POINTWISE_CASE, padding=(1, 0)), "fprop", {}, "no padding"),
    (POINTWISE_CASE, "fprop", {"strides": {"x": (2**29, 2**24, 2**10, 1)}}, r"fewer than 2^30"),
    (POINTWISE_CASE, "fprop", {"strides": {"w": (2**26, 1, 1, 1)}}, r"fewer than 2^30"),
    (POINTWISE_CASE, "fprop", {"strides": {"dy": (1, 2**26, 1, 1)}}, r"fewer than 2^30"),
    (Case(2**21, 2, 32, 32, 2, 1, 1), "fprop", {"strides": {"x": (0, 1, 0, 0), "dy": (0, 1, 0, 0)}}, "2^30"),
    (Case(1, 64, 2**12, 2**11, 64, 1, 1), "fprop", {}, None),
    (Case(1, 64, 2**13, 2**12, 64, 1, 1), "fprop", {}, "fewer than 2^30"),
]


@pytest.mark.parametrize("case, operator, settings, text", POINTWISE_REFUSALS, ids=str)
def test_pointwise_says_what_it_refuses(pointwise_plans, case, operator, settings, text):
    check_refusal(pointwise_plans("refusal", operator, case, **settings), text)


POINTWISE_SHIM_ENTRY_POINTS = (
    """
#include <type_traits>
"""
    + PROBLEM_FROM_FIELDS
    + r"""
using namespace modelnew;
using namespace modelnew::pointwise;

extern "C" {
int loads = 0, out_vector = 0, stage_terms = 0;  // of the last run
}

// Plans stages or none, this many rows, splits and slices (-1, -1, -1 and 0: any) on a GPU of three SMs and runs that,
// as TF32 if it is allowed, however small the problem: -1 if there is no such plan, else the error.
extern "C" int pointwise_run(int, const int64_t* fields, void* const* pointers, int staged, int row_bits,
                             int split_bits, int slices, int seed) {
  const Problem problem = make_problem(fields);
  const Correlation of = flattened(problem);
  const auto address = [&](int i) { return reinterpret_cast<uint64_t>(pointers[i]); };
  const Alignment alignment{address(0), address(1), address(4)};
  Plan plan{};
  const Device device{3, true, most_shared_bytes(90)};
  if (!make_plan(of, !problem.tf32_allowed, device, alignment, plan, staged, row_bits, split_bits, slices)) return -1;
  loads = static_cast<int>(plan.loads), out_vector = plan.out_vector, stage_terms = plan.stage_terms;
  Params params = make_params(of, plan);
  params.x_ptr = static_cast<const float*>(pointers[0]);
  params.w_ptr = static_cast<const float*>(pointers[1]);
  params.bias_ptr = static_cast<const float*>(pointers[2]);
  params.out_ptr = static_cast<float*>(pointers[4]);
  const auto may_read = [](const float* from, const int64_t (&stride)[4], int64_t a, int64_t b, int64_t c, int64_t d) {
    const int64_t last = (a - 1) * stride[0] + (b - 1) * stride[1] + (c - 1) * stride[2] + (d - 1) * stride[3];
    simt::readable.push_back({reinterpret_cast<const char*>(from), reinterpret_cast<const char*>(from + last + 1)});
  };
  simt::readable.clear();
  may_read(params.x_ptr, problem.x_stride, problem.N, problem.C, problem.H, problem.W);
  may_read(params.w_ptr, problem.w_stride, problem.K, problem.C, 1, 1);
  if (params.bias_ptr != nullptr) may_read(params.bias_ptr, {1, 0, 0, 0}, problem.K, 1, 1, 1);
  const auto launch = [&] {
    return problem.tf32_allowed ? run<false>(params, nullptr) : run<true>(params, nullptr);
  };
  return simt_run(seed, plan.split_bits > 0, launch);
}
"""
)

# Each takes away what others rely on, looks where nothing is, or leaves out a part of the sum.
POINTWISE_MUTATIONS = {
    "adds up before all is there": left_out("__syncthreads();  // sums of all slices"),
    "rows that do not exist": ("+ n, plan.rows - 1);", "+ n, plan.rows - (MUTATED ? -31 : 1));"),
    "columns that do not exist": ("existing = min(column, last);", "existing = min(column, last + 31 * MUTATED);"),
    "filters that do not exist": ("existing * params.w_out", "(MUTATED ? column : existing) * params.w_out"),
    "single terms that do not exist": ("|| AHEAD + i < left;", "|| MUTATED || AHEAD + i < left;"),
    "begins behind the end": (
        "min((rank * plan.slices + slice) * plan.slice_steps, steps)",
        "min((rank * plan.slices + slice) * plan.slice_steps, MUTATED ? 1000000 : steps)",
    ),
    "the last slice left out": ("j < 4; ++j) add(parts[j]);", "j < 4 - MUTATED; ++j) add(parts[j]);"),
    "the last columns left out": ("stores = column < plan.columns;", "stores = column + 4 * MUTATED < plan.columns;"),
    "reads other blocks' sums early": left_out("hopper::cluster_sync();"),
    "another block's rows": ("row = own_row + rank * share;", "row = own_row + (rank + MUTATED) * share;"),
    "Inf is not computed again": ("if (!is_finite(sum))", "if (!MUTATED && !is_finite(sum))"),
    "computes another channel again": (
        "exact_output(params, row, column + i)",
        "exact_output(params, row - MUTATED * (row > 0), column + i)",
    ),
    "computes another pixel again": (
        "exact_output(params, column + i, row)",
        "exact_output(params, column + i, row - MUTATED * (row > 0))",
    ),
    "a product dropped": left_out("multiply_add(d, a[m], b_rest);"),
    "stages before they are there": (
        "hopper::copies_wait<kStages - 1>();",
        "(MUTATED ? hopper::copies_wait<8> : hopper::copies_wait<kStages - 1>)();",
    ),
    "stages that other threads copy": left_out("__syncthreads();          // what all threads have copied"),
    "rows of stages from before w": ("a_row + i * A_APART,", "a_row + i * A_APART - 100 * MUTATED,"),
    "pixels of stages that do not exist": ("params.columns - 4)", "params.columns + 60 * MUTATED - 4)"),
    "the next image": ("return image * of_image", "return (image + MUTATED) * of_image"),
    "the next image of y": ("2), params.y_image)", "2), params.y_image + 4 * MUTATED)"),
    "planes of x as those of y": (
        "i * B_APART) * params.x_channel",
        "i * B_APART) * (MUTATED ? params.y_channel : params.x_channel)",
    ),
    "filters one behind the other": (
        "1) * params.w_out + a_term)",
        "1) * (MUTATED ? kStages * TERMS : params.w_out) + a_term)",
    ),
    "the last pair left out": ("column + 8 * j >= params.columns)", "column + 8 * j + 2 * MUTATED >= params.columns)"),
    "another row's bias": ("min(row + 8 * i, params.rows - 1)", "min(row + 8 * i + MUTATED, params.rows - 1)"),
}


class PointwiseShim(MmaShim):
    """The pointwise engine in the same way."""

    engine, entry_points, mutations = "pointwise", POINTWISE_SHIM_ENTRY_POINTS, POINTWISE_MUTATIONS
    wishes: ClassVar[dict[str, int]] = {"staged": -1, "row_bits": -1, "split_bits": -1, "slices": 0}


@built_beside_the_tests
def pointwise_shim(folder: Path) -> PointwiseShim:
    return PointwiseShim(folder)


# One pixel, one channel, one term, a tile and one more or less of each, images whose pixels come by fours and not,
# strides, and several steps: as many as slices and blocks, fewer, and more.
POINTWISE_SHIM_CASES = [
    Case(2, 16, 4, 8, 32, 1, 1),
    Case(1, 48, 6, 6, 33, 1, 1),
    Case(3, 32, 3, 5, 31, 1, 1),
    Case(2, 48, 9, 8, 12, 1, 1, stride=(2, 1)),
    Case(1, 64, 7, 15, 40, 1, 1, stride=(2, 2)),
    Case(1, 31, 4, 16, 20, 1, 1),
    Case(5, 112, 1, 1, 10, 1, 1),
    Case(1, 1, 5, 7, 2, 1, 1),
    Case(2, 4, 3, 11, 1, 1, 1, stride=(1, 3)),
    Case(1, 132, 2, 2, 8, 1, 1),
]
# Bits of rows, bits of splits and slices; in TF32 a block has up to 16 warps, in full 8.
POINTWISE_SHIM_PLANS = [
    (0, 0, 1), (0, 0, 4), (1, 0, 2), (2, 0, 1), (0, 1, 1), (0, 2, 2), (1, 3, 1), (2, 1, 2), (0, 0, 8),
    (0, 0, 16), (0, 3, 1),
]  # fmt: skip


@pytest.mark.xdist_group("pointwise_shim_exact")  # its cases are counted together
@pytest.mark.parametrize("number", range(len(POINTWISE_SHIM_CASES)))
def test_pointwise_shim_exact(pointwise_shim, number):
    """Integers under both contracts: the plans in turn, and where one is for larger problems the planner's."""
    case = POINTWISE_SHIM_CASES[number]
    for seed, (layout, tf32) in enumerate([*itertools.product(LAYOUTS, (True, False))] * 5, start=20 * number):
        plan = POINTWISE_SHIM_PLANS[seed % len(POINTWISE_SHIM_PLANS)]
        wishes = dict(zip(pointwise_shim.wishes, (0, *plan), strict=True))
        fault = pointwise_shim.fault("fprop", case, layout, seed, tf32=tf32, **wishes)
        if fault is None:
            fault = pointwise_shim.fault("fprop", case, layout, seed, tf32=tf32)
        else:
            POINTWISE_SEEN.add(plan)
        assert fault == "", f"{case}, {layout}, tf32 {tf32}, {wishes}, seed {seed}: {fault}"
        POINTWISE_SEEN.add((tf32, pointwise_shim.last("loads"), pointwise_shim.last("out_vector")))
    if number == len(POINTWISE_SHIM_CASES) - 1 and len(POINTWISE_SEEN) > 20:  # not this case alone
        assert {*itertools.product((True, False), range(4), (1, 4)), *POINTWISE_SHIM_PLANS} == POINTWISE_SEEN


POINTWISE_SEEN: set[tuple[int, ...]] = set()  # plans, and contracts with loads and stores, in the runs above


# Stages of 16, 32 and 64 terms; rows and pixels that fill tiles and do not, of one image and several.
POINTWISE_STAGED_CASES = [
    Case(2, 64, 5, 8, 40, 1, 1),
    Case(1, 64, 8, 16, 64, 1, 1),
    Case(3, 128, 2, 10, 33, 1, 1),
    Case(1, 128, 12, 12, 100, 1, 1),
    Case(1, 256, 12, 12, 35, 1, 1),
]


@pytest.mark.parametrize("case", POINTWISE_STAGED_CASES, ids=str)
def test_pointwise_shim_stages(pointwise_shim, case):
    """Integers, at addresses that are multiples of 16 bytes and, where there is no such plan, at others."""
    for row_bits in (0, 1):
        faults = {
            pointwise_shim.fault("fprop", case, "contiguous", seed, tf32=True, staged=1, row_bits=row_bits)
            for seed in range(6)
        }
        assert faults in ({""}, {"", None}), f"{case}, {row_bits}: {faults}"
        assert pointwise_shim.last("stage_terms") == case.C // 4


def in_wider(tensor: Tensor, channels: int, behind: int) -> Tensor:
    """The same as some channels of a tensor that has so many more, with so many values behind each plane."""
    images, own, height, width = tensor.shape
    size = (images, own + channels, height * width + behind)
    wide = torch.full(size, math.nan, dtype=tensor.dtype, device=tensor.device)
    return wide[:, 4 : 4 + own, : height * width].unflatten(2, (height, width)).copy_(tensor)


def stages_of_slices_are_right(pointwise_shim: PointwiseShim) -> bool:
    case = Case(2, 64, 5, 8, 40, 1, 1)
    tensors = make_tensors(case, torch.float32, integers)
    tensors |= {"x": in_wider(tensors["x"], 12, 4), "w": in_wider(tensors["w"], 4, 0)}
    out = in_wider(torch.full(case.y_shape, math.nan), 5, 8)
    if pointwise_shim.run("fprop", case, tensors, out, tf32=True, staged=1) != "":
        return False
    return torch.equal(out.double(), references(case, tensors)["fprop"])


def test_pointwise_shim_stages_slices(pointwise_shim):
    assert stages_of_slices_are_right(pointwise_shim)


@pytest.mark.parametrize("view", [*VIEWS, "one image"])
def test_pointwise_shim_takes_any_strides(pointwise_shim, view):
    """Of x, of w and of y."""
    change = VIEWS.get(view, lambda tensor: tensor[:1].expand_as(tensor))
    for number, case in enumerate((Case(2, 20, 5, 8, 36, 1, 1), Case(3, 16, 7, 9, 33, 1, 1, stride=(2, 1)))):
        tensors = make_tensors(case, torch.float32, integers)
        changed = [{"x"}, {"w"}, {"dy"}, {"x", "w", "dy"}]
        for names in changed if view not in ("expanded", "one image") else changed[:2]:
            viewed = tensors | {name: change(tensors[name]) for name in names - {"dy"}}
            out = torch.full(case.y_shape, math.nan)
            out = change(out) if "dy" in names else with_margins(out)
            for tf32, split_bits in itertools.product((False, True), (0, 1)):
                out.fill_(math.nan)
                wishes = {"tf32": tf32, "staged": 0, "split_bits": split_bits}
                message = pointwise_shim.run("fprop", case, viewed, out, seed=number, **wishes)
                assert message == "", f"{case}, {names}: {message}"
                check_exact(case, {"fprop": out}, viewed)


def test_pointwise_shim_keeps_the_contract_in_long_sums(pointwise_shim):
    """Products that are all the same, of the size at which additions err most."""
    case = Case(1, 8192, 1, 4, 4, 1, 1)
    tensors = make_tensors(case, torch.float32, lambda shape, _: torch.full(shape, 0.24446875))
    tensors["w"].fill_(1)
    assert pointwise_shim.fault("fprop", case, "contiguous", 0, staged=0, slices=1, split_bits=0) is None
    out = torch.full(case.y_shape, math.nan)
    assert pointwise_shim.run("fprop", case, tensors, out, slices=4, split_bits=0) == ""
    check_bounds(case, {"fprop": out}, tensors, tf32=())


POINTWISE_SPREADING_CASES = [Case(1, 32, 7, 20, 40, 1, 1), Case(1, 32, 7, 9, 40, 1, 1), Case(1, 19, 7, 8, 40, 1, 1)]


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pointwise_shim_spreads_nan_and_inf_to_those_that_read_them(pointwise_shim, layout, tf32):
    for case, split_bits in itertools.product(POINTWISE_SPREADING_CASES, (0, 1)):
        assert spreads(pointwise_shim, case, tf32, layout, staged=0, split_bits=split_bits), case
    if tf32 and layout == "contiguous":
        case = Case(1, 64, 7, 20, 40, 1, 1)
        assert all(spreads(pointwise_shim, case, tf32, layout, staged=1, row_bits=row_bits) for row_bits in (0, 1))


# Five steps for two slices and for eight, and for two blocks and four; single values of few terms.
POINTWISE_TELLING_RUNS = [
    (Case(1, 80, 4, 9, 20, 1, 1), layout, seed, {"split_bits": split_bits, "slices": slices})
    for layout, seed in itertools.product(LAYOUTS, (0, 1))
    for split_bits, slices in [(0, 2), (0, 8), (1, 1), (2, 1)]
] + [(Case(1, 19, 3, 5, 20, 1, 1), "contiguous", 0, {"slices": 1})]
POINTWISE_TELLING_RUNS += [
    (POINTWISE_STAGED_CASES[i], "contiguous", seed, {"staged": 1, "row_bits": row_bits, "tf32": True})
    for i, row_bits, seed in itertools.product((0, 2), (0, 1), range(4))
]


@pytest.mark.parametrize("mutation", POINTWISE_MUTATIONS)
def test_pointwise_shim_sees_what_is_missing(mutation, pointwise_shim):
    """The shim itself: what is left out shows in one of a few runs, which are right without it."""

    def are_right() -> bool:
        if "again" in mutation:
            return all(spreads(pointwise_shim, POINTWISE_SPREADING_CASES[0], False, layout) for layout in LAYOUTS)
        return stages_of_slices_are_right(pointwise_shim) and all(  # without a plan where addresses are not aligned
            pointwise_shim.fault("fprop", case, layout, seed, **plan) in ("", None)
            for case, layout, seed, plan in POINTWISE_TELLING_RUNS
        )

    assert are_right()
    with mutated(pointwise_shim.library, POINTWISE_MUTATIONS, mutation):
        assert not are_right()


# The dilated engine, whose parts direct computes ----------------------------------------------------------------------


def random_dilated_cases(count: int, seed: int) -> Iterator[Case]:
    """Filters that reach as far as the image or farther, with any padding; others than these are among them."""
    rng = random.Random(seed)
    while count > 0:
        groups = rng.choice([1, 1, 2])
        dilation = (rng.randint(1, 9), rng.randint(1, 9))
        case = Case(
            rng.choice([1, 2, 7]),
            groups * rng.randint(1, 4),
            rng.randint(3, 24),
            rng.randint(1, 20),
            groups * rng.randint(1, 5),
            rng.choice([1, 2, 3, 3, 4]),
            rng.choice([1, 2, 3, 3]),
            stride=(rng.choice([1, 1, 1, 2]), rng.choice([1, 1, 2])),
            padding=(
                rng.choice([0, dilation[0], rng.randint(0, 20)]),
                rng.choice([0, dilation[1], rng.randint(0, 20)]),
            ),
            dilation=dilation,
            groups=groups,
        )
        if min(case.y_shape) > 0:
            count -= 1
            yield case


def check_dilated(shim: ShimEngine, case: Case, layout: str) -> set[str]:
    tensors = in_layout(make_tensors(case, torch.float32, integers), layout)
    results = shim(case, tensors)
    check_exact(case, results, tensors)
    return set(results)


# Phases of all images and of one; the pyramid of a network for segmentation in small, of which most taps are idle; as
# many rows as phases; a padding that is no multiple of the dilation, or wider than the image.
DILATED_CASES = [
    Case(7, 3, 13, 11, 4, 3, 3, padding=(4, 4), dilation=(4, 4)),
    Case(1, 3, 13, 11, 4, 3, 3, padding=(6, 6), dilation=(6, 6)),
    Case(2, 3, 7, 7, 4, 3, 3, padding=(9, 9), dilation=(9, 9)),
    Case(2, 2, 6, 5, 3, 2, 1, padding=(3, 0), dilation=(6, 1)),
    Case(2, 2, 9, 9, 3, 3, 3, padding=(5, 1), dilation=(3, 2)),
    Case(1, 4, 8, 6, 2, 5, 3, padding=(17, 2), dilation=(4, 2), groups=2),
    Case(3, 2, 5, 9, 3, 3, 3, stride=(2, 2), padding=(6, 1), dilation=(6, 1)),
    Case(1, 2, 7, 5, 3, 2, 1, padding=(1, 0), dilation=(3, 1)),  # phases of as many rows of y, but not of x
    Case(1, 2, 9, 7, 3, 2, 2, padding=(0, 2), dilation=(2, 8)),  # a tap meets the last column alone
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", DILATED_CASES, ids=str)
def test_dilated_exact(dilated_shim, case, layout):
    assert "fprop" in check_dilated(dilated_shim, case, layout)


def test_dilated_exact_at_random(dilated_shim):
    taken = [check_dilated(dilated_shim, case, LAYOUTS[0]) for case in random_dilated_cases(300, seed=0)]
    assert sum("fprop" in operators for operators in taken) > 100
    assert sum("dgrad" in operators for operators in taken) > 80


@pytest.mark.parametrize("case, parts", [(DILATED_CASES[0], 4), (DILATED_CASES[1], 2), (DILATED_CASES[2], 1)])
def test_dilated_launches_few_parts(dilated_shim, case, parts):
    """One for each phase, or for a batch of phases of an image; and one in all where a tap is left."""
    launched = ctypes.c_int.in_dll(dilated_shim.library, "parts_launched")
    before = launched.value
    tensors = make_tensors(case, torch.float32, integers)
    dilated_shim.run("fprop", case, tensors, False, torch.empty(case.y_shape))
    assert launched.value - before == parts
    text = dilated_shim.describes("fprop", case, tensors)
    assert re.match(rf"\d+ of 3x3 taps in {parts} parts, the first of \d+ x \d+ rows by gather: ", text), text


@pytest.mark.parametrize("mutation", DILATED_MUTATIONS)
def test_dilated_tests_see_what_is_wrong(mutation, dilated_shim):
    def with_room(tensor: Tensor) -> Tensor:
        """In the middle of much else: what is wrong may read and write far outside."""
        room = tensor.new_full((tensor.numel() + (2 << 20),), math.nan)
        room[1 << 20 : tensor.numel() + (1 << 20)] = tensor.flatten()
        return room[1 << 20 :][: tensor.numel()].view(tensor.shape)

    def is_right(case: Case) -> bool:
        tensors = {name: with_room(one) for name, one in make_tensors(case, torch.float32, integers).items()}
        out = with_room(torch.full(case.y_shape, math.nan))
        with contextlib.suppress(AssertionError):
            dilated_shim.run("fprop", case, tensors, False, out)
        return torch.equal(out.double(), references(case, tensors)["fprop"])

    assert all(map(is_right, DILATED_CASES))
    with mutated(dilated_shim.library, DILATED_MUTATIONS, mutation):
        assert not all(map(is_right, DILATED_CASES))


@pytest.mark.parametrize(
    "case, operator, text",
    [
        (Case(2, 3, 9, 9, 4, 3, 3, dilation=(2, 2)), "wgrad", "outputs and input gradients only"),
        (Case(2, 3, 9, 9, 4, 3, 3), "fprop", "far apart only"),
        (Case(2, 3, 9, 9, 4, 3, 3, dilation=(1, 2)), "fprop", "far apart only"),
        (Case(2, 3, 1, 9, 4, 3, 3, padding=(1, 1), dilation=(1, 2)), "fprop", "far apart only"),  # idle, but near
        (Case(2, 3, 9, 9, 4, 3, 3, padding=(4, 4), dilation=(4, 4), stride=(2, 1)), "fprop", "a stride of 1"),
        (Case(2, 3, 9, 9, 4, 3, 3, padding=(1, 1), dilation=(4, 4)), "fprop", "as many rows as there are"),
        (Case(1, 3, 999, 1, 4, 2, 1, dilation=(300, 1)), "fprop", "up to 256"),
        (Case(2, 3, 1, 9, 4, 2, 3, padding=(9, 0), dilation=(19, 2)), "fprop", "meet the image"),
    ],
)
def test_dilated_says_what_it_refuses(dilated_shim, case, operator, text):
    refusal = dilated_shim.refuses(operator, case, make_tensors(case, torch.float32, integers))
    assert REFUSAL.fullmatch(refusal.decode())
    assert text in refusal.decode()


def test_dilated_yields_to_who_is_as_fast(dilated_shim):
    """To an engine that takes it whole, unless the estimates of parts are far less; or to direct, by the work."""
    yields, set_whole = dilated_shim.library.dilated_yields, dilated_shim.library.set_whole_cycles
    yields.restype, set_whole.argtypes = ctypes.c_char_p, [ctypes.c_double, ctypes.c_char]

    def fields_of(images: int) -> ctypes.Array:
        case = Case(images, 256, 28, 28, 256, 3, 3, padding=(24, 24), dilation=(24, 24))
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        return ShimEngine.fields(case, tensors, True)

    for images, expected in ((1, b"direct is faster with little work in a part"), (32, None)):
        assert yields(0, fields_of(images)) == expected
    # Others, because who takes a problem is remembered.
    # By mma less is enough, as gather does not take them whole; of gather by taps a part takes 8250 more.
    bounds = {b"w": (1400, 1600), b"m": (850, 950), b"g": (9800, 10200)}
    asked = (2, 4, b"w"), (33, 24, b"w"), (3, 6, b"m"), (34, 24, b"m"), (4, 8, b"g"), (35, 24, b"g")
    for images, parts, taker in asked:
        try:
            for cycles, faster in zip(bounds[taker], (False, True), strict=True):
                set_whole(cycles * parts, taker)
                assert yields(0, fields_of(images)) == (None if faster else b"an engine that takes it whole is as fast")
        finally:
            set_whole(0, b"\0")


# The wgrad engine's plans -------------------------------------------------------------------------------------------

WGRAD_ENTRY_POINTS = (
    """
#include <cstring>
#include <type_traits>

extern "C" {
int simt_mutation = 0;  // the number of the one that takes place, see with_mutations
}

#include "wgrad.cu"
"""
    + PROBLEM_FROM_FIELDS
    + r"""
using namespace modelnew;
using namespace modelnew::wgrad;

// What is wrong with a window, or null: every pixel of every stage of an image, with every tap and all channels.
static const char* fault_of_window(const Problem& p, const Plan& plan) {
  const Window& window = plan.window;
  const int bytes = element_bytes(p.dtype), of_stage = kStageWords * 4 / bytes, taps = p.R * p.S;
  if (window.columns > window.pitch || window.rows * window.pitch > window.plane) return "rows that overlap";
  if (window.channels * window.plane * bytes > plan.layout.places) return "places in the window";
  if (plan.layout.places + 4 * of_stage + 4 > plan.layout.dy) return "dy in the places";
  if (window.pitch % window.values != 0 || window.plane % window.values != 0) return "copies that do not align";
  int64_t pixels = 0;
  for (int stage = 0; stage < window.stages_of_image; ++stage) {
    const int strip = stage / window.stages_of_strip, first = stage % window.stages_of_strip * of_stage;
    const int first_q = strip * window.width, first_p = first / window.width;
    if ((first_q * p.stride_w - p.pad_w - window.lead) % window.values != 0) return "a window that does not align";
    for (int i = 0; i < of_stage; ++i) {
      const int y = (first + i) / window.width, column = (first + i) % window.width;
      if (y >= p.P || first_q + column >= p.Q) continue;
      ++pixels;
      if ((y - first_p) * p.stride_h + (p.R - 1) * p.dilation_h >= window.rows) return "a row behind the window";
      if (window.lead + column * p.stride_w + (p.S - 1) * p.dilation_w >= window.columns)
        return "a column behind the window";
    }
  }
  if (pixels != int64_t{p.P} * p.Q) return "pixels in no stage, or in two";
  for (int64_t e = 0; e < columns_of(p); e += kTileE) {
    const int64_t last = std::min<int64_t>(e + kTileE, columns_of(p)) - 1;
    if (last / taps - e / taps >= window.channels) return "a channel behind the window";
  }
  return nullptr;
}

extern "C" {
const char* wgrad_refusal(int op, const int64_t* fields) {
  return refusal(make_problem(fields), static_cast<Operator>(op));
}
const char* wgrad_yields(int op, const int64_t* fields) {
  return yields(make_problem(fields), static_cast<Operator>(op));
}
const char* wgrad_describe(int op, const int64_t* fields) {
  static char text[512];
  describe(make_problem(fields), static_cast<Operator>(op), text, sizeof text);
  return text;
}
double wgrad_cycles(const int64_t* fields) {
  const Problem problem = make_problem(fields);
  return make_plan(problem, nullptr, nullptr, 132).cycles;
}
// Bits of what the plan is like, and what is wrong with it, of operands so many bytes behind an aligned address.
const char* wgrad_fault(const int64_t* fields, int64_t x_at, int64_t dy_at, int* kind) {
  const Problem original = make_problem(fields);
  const void *x = reinterpret_cast<const void*>(4096 + x_at), *dy = reinterpret_cast<const void*>(4096 + dy_at);
  const Plan plan = make_plan(original, x, dy, 132);
  const Prepared prepared = prepare(original, x, dy);
  const Problem& p = prepared.problem;
  const Layout& layout = plan.layout;
  *kind = plan.has_window | plan.has_boxes << 1 | plan.prepared.copies_x << 2 | plan.prepared.copies_dy << 3 |
          prepared.merges << 4 | (plan.splits > 1) << 5 | (plan.parts == 2) << 6 |
          (plan.has_window && plan.window.strips > 1) << 7 | stores_dw(original, plan) << 8;
  if (plan.prepared.copies_x != prepared.copies_x || plan.prepared.copies_dy != prepared.copies_dy) return "copies";
  if (copied_bytes(plan) % 16 != 0) return "what lies behind copies";
  if (layout.bytes > kSmemBytes || layout.stages < kLeastStages || layout.stages > kMostStages) return "shared memory";
  if (layout.copies % 16 != 0 || layout.barriers % 8 != 0 || layout.dy % 16 != 0) return "what does not align";
  if (plan.has_boxes && (layout.dy % 1024 != 0 || layout.stage_bytes % 1024 != 0)) return "boxes that do not align";
  if (plan.splits * plan.stages_per_split < plan.stages) return "stages left out";
  if ((plan.splits - 1) * plan.stages_per_split >= plan.stages) return "an empty split";
  if (int64_t{plan.tiles_k} * plan.tile_k < group_k_of(p) || int64_t{plan.tiles_e} * kTileE < columns_of(p))
    return "tiles";
  if (!(plan.cycles > 0)) return "cycles";
  if (!plan.has_window && !plan.has_boxes) return nullptr;
  if (plan.stages != p.N * plan.window.stages_of_image) return "stages";
  return plan.has_window ? fault_of_window(p, plan) : nullptr;
}
}
"""
)

WGRAD_MUTATIONS = {
    "a row too few": ("- 2) / window.width + 1;", "- 2) / window.width + !MUTATED;"),
    "a channel too few": ("(kTileE + taps - 2) / taps + 1);", "(kTileE + taps - 2) / taps + !MUTATED);"),
    "no lead": ("% window.values) % window.values);", "% window.values) % window.values * !MUTATED);"),
    "columns of one tap": ("* problem.stride_w + S_reach + 1;", "* problem.stride_w + S_reach * !MUTATED + 1;"),
    "boxes anywhere": ("whole(x_bytes + places_bytes);", "whole(x_bytes + places_bytes) + 16 * MUTATED;"),
    "a stage too few": ("plan.splits = ceil_div(stages,", "plan.splits = ceil_div(stages - MUTATED,"),
}


class WgradPlans:
    """The host part of the wgrad engine, for a GPU of 132 SMs that is not there."""

    def __init__(self, folder: Path) -> None:
        self.library = compile_plans("wgrad", WGRAD_ENTRY_POINTS, WGRAD_MUTATIONS, folder)
        for name in ("wgrad_refusal", "wgrad_yields", "wgrad_describe", "wgrad_fault"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.wgrad_cycles.restype = ctypes.c_double

    def fields(self, case: Case, dtype: torch.dtype, layout: str, tf32: bool = True) -> ctypes.Array:
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        return ShimEngine.fields(case, in_layout(tensors, layout), tf32)

    def says(self, what: str, operator: str, case: Case, dtype: torch.dtype = torch.float32) -> str | None:
        result = getattr(self.library, f"wgrad_{what}")(OPERATOR_NUMBER[operator], self.fields(case, dtype, LAYOUTS[0]))
        return None if result is None else result.decode()

    def faults(self, count: int, seed: int) -> tuple[list[tuple], set[int]]:
        """Of random problems: what is wrong with their plans, and which bits of `kind` were seen."""
        rng, kind, found, kinds = random.Random(seed), ctypes.c_int(), [], set()
        for _ in range(count):
            case = random_wgrad_case(rng)
            dtype = rng.choice(DTYPES[:3])
            if min(case.y_shape) < 1:
                continue
            fields = self.fields(case, dtype, rng.choice(LAYOUTS), rng.random() < 0.7)
            if self.library.wgrad_refusal(OPERATOR_NUMBER["wgrad"], fields) is not None:
                continue
            behind = [rng.choice((0, 0, 2, 4, 8)) // dtype.itemsize * dtype.itemsize for _ in range(2)]
            fault = self.library.wgrad_fault(fields, *map(ctypes.c_int64, behind), ctypes.byref(kind))
            if fault is not None:
                found.append((case, dtype, fault))
            kinds |= {bit for bit in range(9) if kind.value >> bit & 1}
        return found, kinds


def random_wgrad_case(rng: random.Random) -> Case:
    groups = rng.choice((1, 1, 1, 2, 4))
    channels = lambda: rng.choice((rng.randint(1, 20), rng.randint(16, 600))) * groups  # noqa: E731
    side = rng.choice((7, 14, 28, 56, rng.randint(1, 300)))
    taps = rng.choice(((1, 1), (3, 3), (rng.randint(1, 12), rng.randint(1, 12))))
    few = rng.random() < 0.6  # strides, padding and dilation as most have them
    pair = lambda low, high: (rng.randint(low, high), rng.randint(low, high))  # noqa: E731
    return Case(
        rng.choice((1, rng.randint(1, 300))),
        channels(),
        side,
        side if few else rng.randint(1, 300),
        channels(),
        *taps,
        stride=rng.choice(((1, 1), (2, 2))) if few else pair(1, 4),
        padding=(taps[0] // 2, taps[1] // 2) if few else pair(0, 6),
        dilation=(1, 1) if few else pair(1, 3),
        groups=groups,
    )


@built_beside_the_tests
def wgrad_plans(folder: Path) -> WgradPlans:
    return WgradPlans(folder)


def test_wgrad_plans_are_sound(wgrad_plans):
    """And there is one of each kind."""
    faults, kinds = wgrad_plans.faults(3000, seed=0)
    assert faults == []
    assert kinds == set(range(9))


@pytest.mark.parametrize("mutation", WGRAD_MUTATIONS)
def test_wgrad_plans_are_seen_to_be_wrong(mutation, wgrad_plans):
    with mutated(wgrad_plans.library, WGRAD_MUTATIONS, mutation):
        faults, _ = wgrad_plans.faults(600, seed=1)
    assert faults


def test_wgrad_estimates_grow_with_the_batch(wgrad_plans):
    rng = random.Random(2)
    for _ in range(100):
        case = random_wgrad_case(rng)
        if min(case.y_shape) < 1:
            continue
        fields = [
            wgrad_plans.fields(dataclasses.replace(case, N=case.N * times), torch.float32, LAYOUTS[0])
            for times in (1, 2, 4)
        ]
        if any(wgrad_plans.library.wgrad_refusal(OPERATOR_NUMBER["wgrad"], one) for one in fields):
            continue
        cycles = [wgrad_plans.library.wgrad_cycles(one) for one in fields]
        # Where more images are TF32's a stage takes less; else a batch may fill the GPU's last turn.
        ends = [dataclasses.replace(case, N=case.N * times) for times in (1, 4)]
        if len({"wgrad" in end.tf32_operators(torch.float32, True) for end in ends}) == 1:
            assert cycles[1] > 0.97 * cycles[0]
            assert cycles[2] > 0.97 * cycles[1]


@pytest.mark.parametrize(
    "case, operator, dtype, text",
    [
        (Case(1, 8, 9, 9, 8, 3, 3), "fprop", torch.float32, "it computes gradients to weights only"),
        (Case(1, 8, 9, 9, 8, 3, 3), "wgrad", torch.float64, "it has no float64"),
        (Case(1, 8, 40, 40, 8, 16, 16), "wgrad", torch.float32, "it takes filters of up to 30 rows and columns"),
        (Case(2, 8, 32768, 32768, 8, 1, 1), "wgrad", torch.float32, "it counts up to 2^30 pixels only"),
        (Case(1, 32768, 1, 1, 65536, 1, 1), "wgrad", torch.float32, "it counts up to 2^30 weights only"),
    ],
)
def test_wgrad_says_what_it_refuses(wgrad_plans, case, operator, dtype, text):
    assert wgrad_plans.says("refusal", operator, case, dtype).startswith(text)


def test_wgrad_yields_with_few_channels_and_little_work(wgrad_plans):
    for case, yields in (
        (Case(32, 64, 56, 56, 64, 3, 3, padding=(1, 1)), False),
        (Case(32, 64, 56, 56, 64, 3, 3, padding=(1, 1), groups=64), True),
        (Case(2, 8, 8, 8, 8, 3, 3, padding=(1, 1)), True),
    ):
        assert (wgrad_plans.says("yields", "wgrad", case) is not None) == yields


def test_wgrad_describes_its_configuration(wgrad_plans):
    text = wgrad_plans.says("describe", "wgrad", Case(256, 512, 7, 7, 2048, 1, 1))
    assert text == "8 x 4 tiles of 256 output channels x 128 weights, 4 splits of the pixels, x and dy copied"
    text = wgrad_plans.says("describe", "wgrad", Case(1, 64, 9, 9, 64, 3, 3))
    assert text.endswith(" splits of the pixels, in two parts, x and dy copied")


# The strided engine, whose parts direct computes ----------------------------------------------------------------------

STRIDED_CASES = [
    Case(2, 9, 7, 9, 10, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(2, 9, 8, 10, 8, 1, 1, stride=(2, 2)),  # phases of zeros
    Case(1, 8, 13, 9, 9, 5, 4, stride=(3, 2), padding=(2, 3)),
    Case(1, 8, 12, 15, 8, 2, 2, stride=(4, 3), padding=(1, 0)),  # rows that no filter meets
    Case(1, 8, 6, 7, 8, 3, 3, stride=(2, 2), padding=(2, 2), dilation=(2, 2)),  # the same taps for all that any meets
    Case(1, 8, 19, 20, 8, 3, 3, stride=(4, 2), padding=(6, 3), dilation=(2, 3)),
    Case(2, 16, 9, 8, 24, 3, 3, stride=(1, 2), padding=(0, 1), groups=2),
    Case(1, 8, 5, 30, 8, 4, 3, stride=(9, 2), padding=(0, 1)),  # one row of outputs
]


def dgrad_of_strided(engine: ShimEngine, case: Case, layout: str, dtype: torch.dtype = torch.float32) -> bool:
    tensors = in_layout(make_tensors(case, dtype, integers), layout)
    out = torch.full_like(tensors["x"], math.nan)
    result = engine.run("dgrad", case, tensors, False, out)
    return torch.equal(result, references(case, tensors)["dgrad"].to(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", STRIDED_CASES, ids=str)
def test_strided_exact(strided_shim, case, layout):
    assert dgrad_of_strided(strided_shim, case, layout)
    assert dgrad_of_strided(strided_shim, case, layout, torch.float16)


def test_strided_exact_at_random(strided_shim):
    rng, taken = random.Random(0), 0
    for _ in range(200):
        pair = lambda low, high: (rng.randint(low, high), rng.randint(low, high))  # noqa: E731
        (H, W), (R, S) = pair(1, 20), pair(1, 5)
        case = Case(
            rng.randint(1, 2), rng.randint(1, 9), H, W, rng.randint(1, 9), R, S, pair(1, 4), pair(0, 5), pair(1, 3)
        )
        if min(case.y_shape) < 1:
            continue
        fields = ShimEngine.fields(case, make_tensors(case, torch.float32, integers), False)
        if strided_shim.library.engine_refusal(OPERATOR_NUMBER["dgrad"], fields) is not None:
            continue
        taken += 1
        assert dgrad_of_strided(strided_shim, case, LAYOUTS[0]), case
    assert taken > 60


@pytest.mark.parametrize("mutation", STRIDED_MUTATIONS)
def test_strided_tests_see_what_is_wrong(mutation, strided_shim):
    with mutated(strided_shim.library, STRIDED_MUTATIONS, mutation):
        assert not all(dgrad_of_strided(strided_shim, case, LAYOUTS[0]) for case in STRIDED_CASES)


@pytest.mark.parametrize(
    "case, operator, text",
    [
        (STRIDED_CASES[0], "fprop", "it computes input gradients only"),
        (Case(1, 8, 9, 9, 8, 3, 3), "dgrad", "it takes strides only"),
        (Case(1, 8, 9, 9, 8, 9, 9, stride=(2, 2)), "dgrad", "it takes strides only"),  # one output
        (Case(1, 8, 30, 30, 8, 3, 3, stride=(5, 4)), "dgrad", "it takes up to 16 phases of the input only"),
    ],
)
def test_strided_says_what_it_refuses(strided_shim, case, operator, text):
    tensors = make_tensors(case, torch.float32, integers)
    assert strided_shim.refuses(operator, case, tensors).decode() == text


def test_strided_yields_with_little_work(strided_shim):
    for case, yields in (
        (Case(1, 64, 56, 56, 64, 3, 3, stride=(2, 2), padding=(1, 1)), True),
        (Case(32, 64, 56, 56, 64, 3, 3, stride=(2, 2), padding=(1, 1)), False),
        (Case(256, 4, 56, 56, 64, 3, 3, stride=(2, 2), padding=(1, 1)), True),
    ):
        tensors = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        fields = ShimEngine.fields(case, {k: torch.empty(v, device="meta") for k, v in tensors.items()}, True)
        strided_shim.library.strided_yields.restype = ctypes.c_char_p
        assert (strided_shim.library.strided_yields(OPERATOR_NUMBER["dgrad"], fields) is not None) == yields


# The wgrad engine without a GPU ---------------------------------------------------------------------------------------

# What it takes beside HOPPER_STAND_IN.
WGRAD_STAND_INS = r"""
#define __shared__ static

extern "C" {
int64_t most_copied_bytes = 512 << 20;
}

namespace modelnew {
namespace hopper {

template <int COUNT>
void load_words(uint32_t (&words)[COUNT], uint32_t address) {
  check_words(address, sizeof words);
  std::memcpy(words, simt::smem + address, sizeof words);
}
inline void load_shared_2(uint32_t (&words)[2], uint32_t address) { load_words(words, address); }
inline void load_shared_4(uint32_t (&words)[4], uint32_t address) { load_words(words, address); }
inline void load_shared_half(uint32_t& word, uint32_t address) {
  check_words(address, 2);
  word = 0;
  std::memcpy(&word, simt::smem + address, 2);
}
inline void store_shared_4(uint32_t address, const uint32_t (&words)[4]) {
  check_words(address, 16);
  std::memcpy(simt::smem + address, words, 16);
}
// A lane gets two rows of its column of each matrix of 8x8.
inline void load_matrix_transposed(uint32_t (&a)[4], uint32_t address) {
  static uint32_t addresses[32][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  check_words(address, 16);
  addresses[warp][lane] = address;
  __syncwarp();
  for (int e = 0; e < 4; ++e) {
    uint16_t values[2];
    for (int i = 0; i < 2; ++i)
      std::memcpy(&values[i], simt::smem + addresses[warp][8 * e + lane % 4 * 2 + i] + lane / 4 * 2, 2);
    a[e] = values[0] | static_cast<uint32_t>(values[1]) << 16;
  }
  __syncwarp();
}

}  // namespace hopper
}  // namespace modelnew
"""

# Rows of a box that end within 16 bytes are loaded up to there, as they lie in memory: nobody says that they are not.
WGRAD_BOXES = {
    'simt::complain("rows of a box that end within 16 bytes");': "{}",
    "exists &= at >= 0 && static_cast<uint64_t>(at) < map.sizes[i];": (
        "const uint64_t rest = 16 / map.element_bytes - 1, whole = (map.sizes[0] + rest) / (rest + 1) * (rest + 1);\n"
        "        exists &= at >= 0 && static_cast<uint64_t>(at) < (i == 0 ? whole : map.sizes[i]);"
    ),
}

WGRAD_SHIM_ENTRY_POINTS = (
    """
#include <type_traits>
"""
    + PROBLEM_FROM_FIELDS
    + r"""
using namespace modelnew;
using namespace modelnew::wgrad;

extern "C" {
int latest[13] = {};  // of the latest run, see WgradShim.names
const char* simt_message() { return simt::message.c_str(); }
}

// Plans this tile and so many splits (0: any) on a GPU of three SMs and runs that: -1 if there is no such plan, else
// the error.
extern "C" int wgrad_run(const int64_t* fields, void* const* pointers, int tile_k, int splits, int seed) {
  simt::independent = true;
  simt::before_block = simt::begin_block;
  simt::between_rounds = simt::do_some;
  simt::late = seed % 2;
  simt::shuffler.seed(seed);
  const Problem problem = make_problem(fields);
  Pointers operands = {pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], nullptr};
  const Plan plan = make_plan(problem, operands.x, operands.dy, 3, tile_k, splits);
  if (plan.cycles < 0) return -1;
  Workspace workspace(workspace_bytes_of(problem, plan));
  operands.workspace = workspace.data();
  const Prepared prepared = prepare(problem, operands.x, operands.dy);
  const void* const x = prepared.copies_x ? nullptr : operands.x;
  const void* const dy = prepared.copies_dy ? nullptr : operands.dy;
  const int loaders = plan.tile_k / 2 * plan.parts >= 128 ? 4 : 8;
  const int groups = plan.has_boxes ? loaders / (plan.layout.stages < loaders / 2 + 2 ? 4 : 2) : 1;
  const int of_group = (groups > 1 ? plan.layout.stages : plan.layout.stages - 1) / groups;
  const int all[] = {static_cast<int>(x_copies_of(prepared.problem, plan, x)),
                     static_cast<int>(dy_copies_of(prepared.problem, plan)),
                     plan.prepared.copies_x,
                     plan.prepared.copies_dy,
                     prepared.merges,
                     static_cast<int>(plan.splits),
                     stores_dw(problem, plan),
                     plan.has_window && plan.window.strips > 1,
                     has_words_of_dy(prepared.problem, plan, dy),
                     is_channels_last(prepared.problem),
                     plan.has_window && plan.window.values * element_bytes(problem.dtype) == 16,
                     loaders * 10 + groups,
                     std::max(1, std::min(of_group, kMostAhead))};
  std::copy(std::begin(all), std::end(all), latest);
  const int code = launch_plan(problem, operands, plan, nullptr);
  return code == 0 && !workspace.intact() ? -2 : code;
}
"""
)

# Each takes away what others rely on, or takes something for something else.
WGRAD_SHIM_MUTATIONS = {
    "multiplies before a stage is there": left_out("hopper::barrier_wait(ring.full(), ring.parity);"),
    "overwrites a stage in use, by boxes": left_out("hopper::barrier_wait(ordered.empty(),"),
    "overwrites a stage in use": left_out("hopper::barrier_wait(ring.empty(), ring.parity ^ 1);"),
    "rounds dy before it is there": left_out("hopper::barrier_wait(ring.landed(), ring.parity);"),
    "gives a stage before its copies are there": (
        "hopper::copies_wait<1>();",
        "(MUTATED ? hopper::copies_wait<8> : hopper::copies_wait<1>)();",
    ),
    "gives the only stage before its copies are there": (
        "hopper::copies_wait<0>();",
        "(MUTATED ? hopper::copies_wait<8> : hopper::copies_wait<0>)();",
    ),
    "gives one of three stages before its copies are there": (
        "hopper::copies_wait<kMostAhead - 1>();",
        "(MUTATED ? hopper::copies_wait<8> : hopper::copies_wait<kMostAhead - 1>)();",
    ),
    "gives a stage without its copies": left_out("hopper::copies_arrive(ring.full());"),
    "gives a stage before all lanes have stored": (
        "hopper::fence_async();\n    __syncwarp();",
        "hopper::fence_async();\n    if (!MUTATED) __syncwarp();",
    ),
    "gives back before it is multiplied": left_out("hopper::wgmma_wait<0>();\n      hopper::wgmma_settle(sums"),
    "adds up a stage before it is done": left_out("hopper::wgmma_wait<0>();\n        hopper::wgmma_settle(acc"),
    "multiplies before the table is there": left_out("__syncthreads();\n\n  if (warp < kMultiplyingWarps)"),
    "rows of padding as they lie": (
        "first_row + copy[i][1] < static_cast<unsigned>(params.H)",
        "(MUTATED || first_row + copy[i][1] < static_cast<unsigned>(params.H))",
    ),
    "columns of padding as they lie": (
        "first_column + copy[i][2] < static_cast<unsigned>(params.W)",
        "(MUTATED || first_column + copy[i][2] < static_cast<unsigned>(params.W))",
    ),
    "padding as it lies": (
        "return (exist & of.needs) == of.needs;",
        "return MUTATED || (exist & of.needs) == of.needs;",
    ),
    "pixels of no output": (
        "? static_cast<uint32_t>(place * BYTES) : kNowhere",
        "|| MUTATED ? place * BYTES : kNowhere",
    ),
    "a channel that is not there": ("exist ? static_cast<uint32_t>(row) : kNoRow", "exist || MUTATED ? row : kNoRow"),
    "the next row of dy": (
        "box[1] = params.image_is_row ? 0 : first_p;",
        "box[1] = params.image_is_row ? 0 : first_p + MUTATED;",
    ),
    "the next strip of dy": ("? first : strip_q;", "? first : strip_q * !MUTATED;"),
    "the first image's dy": (
        "      box[3] = n;\n    }\n    expected",
        "      box[3] = n * !MUTATED;\n    }\n    expected",
    ),
    "the first tile's dy": ("box[2] = first_k_of_all;", "box[2] = first_k_of_all * !MUTATED;"),
    "the first group's x": (
        "group * params.group_c * params.x_stride[1]",
        "group * !MUTATED * params.group_c * params.x_stride[1]",
    ),
    "output channels that are not there": (
        "return first_k + k < params.group_k;",
        "return MUTATED || first_k + k < params.group_k;",
    ),
    "a filter left out": ("own_k < params.group_k && own_e", "own_k < params.group_k - MUTATED && own_e"),
    "a weight left out": ("&& own_e < params.columns)", "&& own_e < params.columns - MUTATED)"),
    "a product dropped": left_out(
        "Multiply::multiply(acc, a[step], dy_operand(dy_stage + params.layout.part_bytes, step)"
    ),
    "x itself for its rest": (
        "Multiply::multiply(acc, rest[step],",
        "Multiply::multiply(acc, MUTATED ? a[step] : rest[step],",
    ),
    "x that is not rounded": (
        "a[step][i] = tf32_operand(a[step][i]);",
        "if (!MUTATED) a[step][i] = tf32_operand(a[step][i]);",
    ),
    "dy that is not rounded": (
        "first[i] = tf32_operand(words[i]);",
        "first[i] = MUTATED ? words[i] : tf32_operand(words[i]);",
    ),
    "a NaN of rests": ("turn == 0 || fabsf", "MUTATED || turn == 0 || fabsf"),
    "a split left out": ("i < params.splits; i += WAYS", "i < params.splits - MUTATED; i += WAYS"),
    "splits of one thread": ("for (int i = 1; i < WAYS; ++i)", "for (int i = 1; i < WAYS * !MUTATED; ++i)"),
    "the first image in all of a row": (
        "from[image * params.stride[0] +",
        "from[image * !MUTATED * params.stride[0] +",
    ),
    "copies pixels behind an image": (
        "quotient(pixel, params.by_plane);\n      pixel -=",
        "quotient(pixel, params.by_plane);\n      if (!MUTATED) pixel -=",
    ),
}


class WgradShim:
    """The wgrad engine, compiled by g++ and run thread by thread, as WgmmaShim runs the other one."""

    names = (
        "x", "dy", "copies_x", "copies_dy", "merges", "splits", "direct", "strips", "whole_words", "taps_first",
        "sixteen_bytes", "groups", "ahead",
    )  # fmt: skip

    def __init__(self, folder: Path) -> None:
        stand_in = HOPPER_STAND_IN
        for old, new in WGRAD_BOXES.items():
            assert stand_in.count(old) == 1
            stand_in = stand_in.replace(old, new)
        headers = {**modelnew._sources, "hopper.cuh": stand_in + WGRAD_STAND_INS}
        source = with_mutations(amalgamate(headers, ["wgrad.cu"]), WGRAD_SHIM_MUTATIONS)
        # Small problems as TF32, too; and what is too large to be copied may be small.
        for old, new in (
            (" 1 << 29 : 1 << 27;", " 1 << 12 : 1 << 12;"),
            ("constexpr int64_t kMostCopiedBytes = 512 << 20;", "#define kMostCopiedBytes most_copied_bytes"),
        ):
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        self.library = compile_simt(source + '#line 1 "entry_points"\n' + WGRAD_SHIM_ENTRY_POINTS, folder)
        self.library.simt_message.restype = ctypes.c_char_p

    def latest(self) -> dict[str, int]:
        """What the latest run was like."""
        return dict(zip(self.names, (ctypes.c_int * 13).in_dll(self.library, "latest"), strict=True))

    def run(
        self,
        case: Case,
        tensors: dict[str, Tensor],
        out: Tensor,
        tf32: bool,
        seed: int,
        tile_k: int = 0,
        splits: int = 0,
    ) -> str | None:
        """Runs wgrad into `out`: None if there is no such plan, else what went wrong."""
        fields = ShimEngine.fields(case, tensors | {"w": out}, tf32)
        pointers = (ctypes.c_void_p * 5)(*input_pointers("wgrad", tensors), out.data_ptr())
        code = self.library.wgrad_run(fields, pointers, tile_k, splits, seed)
        if code == -1:
            return None
        return "" if code == 0 else f"error {code}, {self.library.simt_message().decode()}"

    def fault(
        self, case: Case, dtype: torch.dtype, layouts: str, seed: int, tf32: bool = True, shift: int = 0, **wishes: int
    ) -> str | None:
        """What is wrong with a run on integers, or an empty text. `layouts`: c or l (last) for x, dy and dw each."""
        tensors = make_tensors(case, dtype, integers, seed=seed)
        if dtype == torch.float32 and not tf32:  # more bits than TF32 has
            tensors["x" if seed % 2 else "dy"] *= 1025
        orders = [((0, 1, 2, 3), (0, 1, 2, 3)) if one == "c" else ((0, 2, 3, 1), (0, 3, 1, 2)) for one in layouts]
        # What no output sees may be anything.
        seen = nn.grad.conv2d_input(case.x_shape, torch.ones(case.w_shape), torch.ones(case.y_shape), **case.kwargs)
        tensors["x"][seen == 0] = math.nan
        for name, (order, back) in zip(("x", "dy"), orders, strict=False):
            tensors[name] = shifted(tensors[name].permute(order), shift).permute(back)
        expected = references(case, tensors)["wgrad"].to(dtype)
        order, back = orders[2]
        inner = with_margins(torch.full_like(expected, math.nan).permute(order))
        out = inner.permute(back)
        message = self.run(case, tensors, out, tf32, seed, **wishes)
        if message != "":
            return message
        if not torch.equal(out, expected):
            return f"{(out != expected).sum()} of {out.numel()} weights are wrong"
        return "" if margins_intact(inner) else "written outside the output"


@built_beside_the_tests
def wgrad_shim(folder: Path) -> WgradShim:
    return WgradShim(folder)


# Windows with boxes of dy and without, strips of rows, images without gaps, filters that leave pixels out, groups,
# words and channels one by one, windows that do not fit and one of which three stages do, in a tile of 256; pixels that
# no output sees; ragged edges of all tiles.
WGRAD_SHIM_CASES = [
    Case(3, 12, 12, 12, 20, 3, 3, padding=(1, 1)),
    Case(2, 9, 5, 72, 17, 3, 2, padding=(1, 0)),
    Case(1, 10, 6, 68, 70, 1, 3, padding=(0, 1)),
    Case(9, 20, 7, 7, 70, 1, 1),
    Case(5, 16, 8, 8, 72, 1, 1),
    Case(3, 20, 19, 20, 24, 1, 1, stride=(2, 2), padding=(1, 0)),
    Case(6, 8, 7, 7, 30, 3, 3, padding=(1, 1)),
    Case(2, 10, 29, 28, 12, 5, 4, stride=(2, 3), padding=(2, 1), dilation=(1, 2)),
    Case(2, 32, 9, 10, 140, 3, 3, padding=(1, 1), groups=2),
    Case(1, 5, 33, 60, 9, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(1, 16, 40, 40, 9, 3, 3, dilation=(15, 4)),
    Case(1, 16, 24, 34, 20, 3, 3, dilation=(8, 1)),
    Case(2, 24, 8, 12, 3, 3, 3, padding=(1, 1), groups=3),
    Case(2, 8, 10, 12, 20, 2, 2, stride=(3, 3)),
    Case(3, 8, 8, 10, 2, 1, 1, groups=2),
]
WGRAD_PRECISIONS = [(torch.float32, True), (torch.float32, False), (torch.float16, True), (torch.bfloat16, True)]
WGRAD_TF32_WORK = dict.fromkeys(LEAST_TF32_WORK, 2**12)  # see WgradShim
WGRAD_SEEN: list[dict] = []  # what the runs of these were like


@pytest.mark.xdist_group("wgrad_shim_exact")  # its cases are counted together
@pytest.mark.parametrize("number", range(len(WGRAD_SHIM_CASES)))
def test_wgrad_shim_exact(wgrad_shim, number):
    """Integers in all precisions and memory formats, at any addresses, by every tile and in a few splits."""
    case, rng = WGRAD_SHIM_CASES[number], random.Random(number)
    some = [(("cl", "lc")[(number + i) % 2], precision) for i, precision in enumerate(WGRAD_PRECISIONS)]
    runs = [*itertools.product(("cc", "ll"), WGRAD_PRECISIONS), *some]
    for i, (layouts, (dtype, tf32)) in enumerate(runs):
        exact = dtype == torch.float32 and "wgrad" not in case.tf32_operators(dtype, tf32, WGRAD_TF32_WORK)
        largest = 128 if exact else 256
        tile_k = largest if case.dilation == (8, 1) else min(largest, rng.choice((0, 64, 128, 256)))
        layouts += rng.choice("cl")
        seed = 2 * i + ((i + number) % 4 > 0)  # what can be late mostly is
        settings = {"seed": seed, "tf32": tf32, "shift": (0, 1, 0, 2, 0, 0, 4, 0)[(i + number) % 8] if i < 8 else 0}
        settings |= {"tile_k": tile_k, "splits": rng.choice((0, 1, 1, 3, 6))}
        fault = wgrad_shim.fault(case, dtype, layouts, **settings)
        assert fault == "", f"{case}, {layouts}, {dtype}, {settings}: {fault}"
        WGRAD_SEEN.append({"dtype": dtype, "tf32": tf32, "late": seed % 2} | wgrad_shim.latest())
    if number == len(WGRAD_SHIM_CASES) - 1 and len(WGRAD_SEEN) > 100:  # not this case alone
        check_wgrad_ways(WGRAD_SEEN)


def check_wgrad_ways(seen: list[dict]) -> None:
    """That every way in which operands come and sums go was there, and those that come by copies late as well."""

    def ways(*names: str, **among: object) -> set[tuple]:
        return {tuple(one[name] for name in names) for one in seen if one.items() >= among.items()}

    words, runs, channels, window = range(4)
    dy_words, dy_boxes, dy_channels = range(3)
    for dtype, tf32 in WGRAD_PRECISIONS:
        of_x = {(words, dy_words), (words, dy_channels), (channels, dy_words), (channels, dy_channels)}
        of_x |= {(runs, dy_boxes), (window, dy_boxes), (window, dy_channels)}
        assert of_x <= ways("x", "dy", dtype=dtype, tf32=tf32)
        assert {(words,), (runs,), (channels,), (window,)} <= ways("x", dtype=dtype, tf32=tf32, late=1)
    assert {(window, dy_words), (runs, dy_words), (runs, dy_channels)} <= ways("x", "dy")
    assert ways("copies_x", "copies_dy", "merges") == {(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)}
    assert {1, 3, 6} <= {splits for (splits,) in ways("splits")}
    assert ways("direct", "taps_first") == {*itertools.product((0, 1), (0, 1))}
    assert ways("strips", "dy", x=window) >= {(1, dy_boxes), (1, dy_channels)}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert ways("sixteen_bytes", dtype=dtype, x=window) == {(0,), (1,)}
    assert ways("whole_words", dtype=torch.float16, dy=dy_words) == {(0,), (1,)}
    # Eight loading warps or four, of which so many load a stage each; stages that each of those has under way.
    assert ways("groups", dy=dy_boxes) == {(84,), (82,), (42,), (41,)}
    assert ways("ahead", dy=dy_boxes) == {(1,), (2,), (3,)}


def wgrad_keeps_the_contract(shim: WgradShim, case: Case, layouts: tuple[str, ...] = (*LAYOUTS,)) -> bool:
    """In TF32, with values that rounding changes, in full fp32 accuracy and in 16 bits."""
    fills = [under_a_tf32_step, tf32_ties, wide]
    runs = [*itertools.product([torch.float32], fills, (True, False)), (torch.bfloat16, wide, True)]
    for number, ((dtype, fill, tf32), layout) in enumerate(itertools.product(runs, layouts)):
        tensors = in_layout(make_tensors(case, dtype, fill), layout)
        out = torch.full(case.w_shape, math.nan, dtype=dtype)
        assert shim.run(case, tensors, out, tf32, number, splits=number % 2 + 1) == ""
        of_tf32 = ("wgrad",) if dtype == torch.float32 and tf32 else ()
        if of_tf32 and fill is under_a_tf32_step:  # rounding changes these by 2^-20, truncating by 2^-10
            exact = product("wgrad", case, tensors["dy"], tensors["x"])
            if not torch.allclose(out.double(), exact, rtol=1e-4):
                return False
        try:
            check_bounds(case, {"wgrad": out}, tensors, of_tf32)
        except AssertionError:
            return False
    return True


@pytest.mark.parametrize("case", [WGRAD_SHIM_CASES[0], WGRAD_SHIM_CASES[4]], ids=str)
def test_wgrad_shim_rounding(wgrad_shim, case):
    """Element by element. (Sums are those of this processor, not of a tensor core.)"""
    assert wgrad_keeps_the_contract(wgrad_shim, case)


def wgrad_spreads(shim: WgradShim, case: Case, tf32: bool, layout: str) -> bool:
    """Whether one Inf or NaN, in a corner of x, which not all taps see, or in dy, comes to what it should."""
    for special, (name, at) in itertools.product((math.inf, -math.inf, math.nan), (("x", (1, 3)), ("dy", (1, 5)))):
        tensors = make_tensors(case, torch.float32, positive)
        tensors[name][at][(0, 0) if name == "x" else (4, 3)] = special
        expected = product("wgrad", case, tensors["dy"], tensors["x"])
        out = torch.full(case.w_shape, math.nan)
        assert shim.run(case, in_layout(tensors, layout), out, tf32, seed=1) == ""
        assert not expected.isfinite().all()
        if not torch.equal(out.isnan(), expected.isnan()) or not torch.equal(out.isinf(), expected.isinf()):
            return False
        finite = expected.isfinite()
        if not torch.allclose(out[finite].double(), expected[finite], rtol=1e-3 if tf32 else 1e-6):
            return False
    return True


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [WGRAD_SHIM_CASES[0], WGRAD_SHIM_CASES[4]], ids=str)
def test_wgrad_shim_spreads_nan_and_inf(wgrad_shim, case, layout, tf32):
    assert wgrad_spreads(wgrad_shim, case, tf32, layout)


def test_wgrad_shim_takes_any_strides(wgrad_shim):
    """Of x and dy, or of one of them, and of dw."""
    case = Case(2, 8, 6, 12, 10, 3, 3, padding=(1, 1))
    for number, (view, names) in enumerate(itertools.product(VIEWS, (("x", "dy"), ("x",), ("dy",)))):
        dtype, tf32 = WGRAD_PRECISIONS[number % 4]
        tensors = make_tensors(case, dtype, integers, seed=number)
        changed = tensors | {name: VIEWS[view](tensors[name]) for name in names}
        out = torch.full(case.w_shape, math.nan, dtype=dtype)
        out = out if view == "expanded" else VIEWS[view](out)
        message = wgrad_shim.run(case, changed, out, tf32, number, splits=number % 3)
        assert message == "", f"{view} {names}, {dtype}: {message}"
        check_exact(case, {"wgrad": out}, changed)


def dy_before_nan(dy: Tensor, rows: bool) -> Tensor:
    """The same in rows (or images) that begin at multiples of 16 bytes and end between them, NaN behind each."""
    flat = dy if rows else dy.flatten(2)
    padded = F.pad(flat, (0, -flat.shape[-1] % 8 + 8), value=math.nan)[..., : flat.shape[-1]]
    return padded if rows else padded.unflatten(2, dy.shape[2:])


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_wgrad_shim_takes_rows_with_nan_behind(wgrad_shim, dtype, rows):
    case = Case(2, 8, 6, 70 if rows else 7, 8, 3, 3, padding=(1, 1))
    tensors = make_tensors(case, dtype, integers)
    changed = tensors | {"dy": dy_before_nan(tensors["dy"], rows)}
    out = torch.full(case.w_shape, math.nan, dtype=dtype)
    assert wgrad_shim.run(case, changed, out, True, 1) == ""
    check_exact(case, {"wgrad": out}, tensors)


# In the first two the copy of dy is one of images as rows without gaps, although x is none.
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 40, 35, 35, 4, 1, 1),
        Case(2, 40, 69, 69, 4, 1, 1, stride=(2, 2)),
        Case(2, 40, 29, 31, 4, 1, 1),
        Case(2, 40, 35, 36, 4, 1, 1),
        Case(2, 40, 35, 35, 4, 3, 3),
        Case(2, 4, 35, 35, 40, 3, 3),
    ],
    ids=str,
)
def test_wgrad_shim_exact_where_copies_would_be_too_large(wgrad_shim, case):
    """Of x or of dy."""
    most = ctypes.c_int64.in_dll(wgrad_shim.library, "most_copied_bytes")
    before, most.value = most.value, 60_000
    try:
        faults = [wgrad_shim.fault(case, dtype, "ccc", seed=1, tile_k=64) for dtype in (torch.float32, torch.float16)]
    finally:
        most.value = before
    assert faults == ["", ""]


def test_wgrad_refuses_other_gpus(wgrad_plans):
    capability = ctypes.c_int.in_dll(wgrad_plans.library, "stand_in_capability")
    refusals = []
    try:
        for capability.value in (90, 80, 100, 0):
            refusals.append(wgrad_plans.says("refusal", "wgrad", WGRAD_SHIM_CASES[0]))
    finally:
        capability.value = 90
    assert refusals == [None] + ["it runs on Hopper (sm_90) only"] * 3


def wgrad_stays_inside(shim: WgradShim, case: Case, dtype: torch.dtype) -> bool:
    """In all memory formats, with operands that end where memory does."""
    for last in itertools.product((False, True), (False, True)):
        tensors = make_tensors(case, dtype, integers)
        for name, is_last in zip(("x", "dy"), last, strict=True):
            order, back = ((0, 2, 3, 1), (0, 3, 1, 2)) if is_last else ((0, 1, 2, 3),) * 2
            tensors[name] = before_guard_page(tensors[name].permute(order)).permute(back)
        out = torch.full(case.w_shape, math.nan, dtype=dtype)
        # Nothing is late: a copy that is done for a thread has nobody to blame.
        if shim.run(case, tensors, out, True, seed=0, tile_k=64) != "":
            return False
        check_exact(case, {"wgrad": out}, tensors)
    return True


@pytest.mark.parametrize("number", [3, 5, 6, 8, 11, 14])
def test_wgrad_shim_reads_nothing_behind_its_operands(wgrad_shim, number):
    dtype = WGRAD_PRECISIONS[number % 4][0]
    assert wgrad_stays_inside(wgrad_shim, WGRAD_SHIM_CASES[number], dtype)


# A few cases by their numbers: boxes by 2 and 4 groups of warps and by one, with 1 to 3 stages of each under way; words
# and channels; both kinds of rests.
WGRAD_TELLING_RUNS = [
    (case, layouts, dtype, {"seed": seed + more, "tf32": tf32, "tile_k": tile_k, "splits": splits})
    for seed in (1, 3)
    for case, layouts, dtype, tf32, tile_k, splits, more in (
        (4, "ccc", torch.float32, True, 64, 1, 0),
        (6, "ccc", torch.float32, True, 64, 6, 0),
        (0, "ccc", torch.float16, True, 64, 1, 0),
        (3, "ccc", torch.float32, True, 64, 1, 0),
        (2, "ccl", torch.float32, False, 64, 1, 0),
        (2, "ccl", torch.float32, False, 64, 1, 1),
        (1, "ccc", torch.float32, True, 256, 1, 0),
        (11, "ccc", torch.float32, True, 64, 1, 0),
        (13, "ccc", torch.float32, True, 64, 1, 0),
        (5, "llc", torch.float32, True, 64, 1, 0),
        (8, "ccc", torch.float32, True, 64, 3, 0),
        (0, "lll", torch.float32, False, 64, 1, 0),
        (8, "clc", torch.float32, True, 64, 2, 0),
    )
]


def wgrad_is_right(shim: WgradShim, mutation: str) -> bool:
    """By what tells whether this one takes place."""
    case = WGRAD_SHIM_CASES[0]
    if "rounded" in mutation:
        return wgrad_keeps_the_contract(shim, case, LAYOUTS[:1])
    if "Inf" in mutation or "NaN" in mutation:
        return wgrad_spreads(shim, case, False, LAYOUTS[0])
    if "not there" in mutation:
        return wgrad_stays_inside(shim, WGRAD_SHIM_CASES[8], torch.float32)
    return all(
        shim.fault(WGRAD_SHIM_CASES[number], dtype, layouts, **settings) == ""
        for number, layouts, dtype, settings in WGRAD_TELLING_RUNS
    )


def test_wgrad_shim_is_right_where_something_may_be_missing(wgrad_shim):
    assert all(wgrad_is_right(wgrad_shim, mutation) for mutation in ("rounded", "Inf", "not there", ""))


@pytest.mark.parametrize("mutation", WGRAD_SHIM_MUTATIONS)
def test_wgrad_shim_sees_what_is_missing(mutation, wgrad_shim):
    """The shim itself: what is left out, or taken for something else, shows in one of a few runs."""
    with mutated(wgrad_shim.library, WGRAD_SHIM_MUTATIONS, mutation):
        assert not wgrad_is_right(wgrad_shim, mutation)


# The patches engine, whose 1x1 convolutions direct computes -----------------------------------------------------------

# Filters of multiples of 16 bytes and others; pixels that no patch has; an axis of one tap, or of one output; runs of a
# row in x that are aligned and not; several images.
PATCHES_CASES = [
    Case(2, 3, 8, 12, 5, 4, 4, stride=(4, 4)),
    Case(3, 2, 9, 17, 4, 4, 8, stride=(4, 8)),
    Case(2, 3, 14, 21, 4, 7, 7, stride=(7, 7)),
    Case(1, 5, 6, 7, 3, 2, 3, stride=(2, 3)),
    Case(2, 4, 5, 8, 4, 1, 4, stride=(1, 4)),
    Case(2, 4, 9, 6, 4, 3, 1, stride=(3, 1)),
    Case(2, 3, 5, 16, 4, 4, 4, stride=(9, 4)),
    Case(2, 3, 6, 8, 4, 6, 8, stride=(1, 1)),
    Case(1, 8, 8, 8, 4, 2, 2, stride=(2, 2)),
    Case(2, 1, 6, 8, 3, 3, 4, stride=(3, 4)),
]


def patches_tensors(case: Case, dtype: torch.dtype, layout: str, w_layout: str) -> dict[str, Tensor]:
    tensors = in_layout(make_tensors(case, dtype, integers), layout)
    views = {
        "contiguous": lambda w: w,
        "channels_last": VIEWS["channels_last"],
        "apart": lambda w: w.repeat(1, 1, 1, 2),
    }
    w = views[w_layout](tensors["w"])
    return tensors | {"w": w[..., : case.S]}


@pytest.mark.parametrize("w_layout", [*LAYOUTS, "apart"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", PATCHES_CASES, ids=str)
def test_patches_exact(patches_shim, case, layout, w_layout):
    """Integers, for x and weights of any order."""
    for dtype in DTYPES[:3]:
        tensors = patches_tensors(case, dtype, layout, w_layout)
        results = patches_shim(case, tensors)
        assert set(results) == {"fprop"}
        check_exact(case, results, tensors)


@pytest.mark.parametrize("view", VIEWS)
def test_patches_take_any_strides(patches_shim, view):
    for case in PATCHES_CASES[:3]:
        tensors = make_tensors(case, torch.float32, integers)
        tensors |= {name: VIEWS[view](tensors[name]) for name in ("x", "w")}
        check_exact(case, patches_shim(case, tensors), tensors)


@pytest.mark.parametrize("mutation", PATCHES_MUTATIONS)
def test_patches_tests_see_what_is_wrong(mutation, patches_shim):
    def with_room(tensor: Tensor) -> Tensor:
        """In the middle of much else: what is wrong may read far outside."""
        room = tensor.new_full((tensor.numel() + 2000,), math.nan)
        room[1000 : tensor.numel() + 1000] = (
            tensor.permute(0, 2, 3, 1).flatten() if is_channels_last(tensor) else tensor.flatten()
        )
        inside = room[1000:][: tensor.numel()]
        if is_channels_last(tensor):
            N, C, H, W = tensor.shape
            return inside.view(N, H, W, C).permute(0, 3, 1, 2)
        return inside.view(tensor.shape)

    def is_right(case: Case, layout: str, w_layout: str) -> bool:
        tensors = patches_tensors(case, torch.float32, layout, w_layout)
        tensors |= {"x": with_room(tensors["x"])}
        out = torch.full(case.y_shape, math.nan)
        with contextlib.suppress(AssertionError):
            patches_shim.run("fprop", case, tensors, False, out)
        return torch.equal(out.double(), references(case, tensors)["fprop"])

    kinds = list(itertools.product(PATCHES_CASES, LAYOUTS, LAYOUTS))
    assert all(is_right(*kind) for kind in kinds)
    with mutated(patches_shim.library, PATCHES_MUTATIONS, mutation):
        assert not all(is_right(*kind) for kind in kinds)


PATCHES_CASE = Case(2, 3, 32, 32, 8, 16, 16, stride=(16, 16))


@pytest.mark.parametrize(
    "case, operator, text",
    [
        (PATCHES_CASE, "fprop", None),
        (PATCHES_CASE, "dgrad", "outputs only"),
        (PATCHES_CASE, "wgrad", "outputs only"),
        (dataclasses.replace(PATCHES_CASE, stride=(16, 15)), "fprop", "whose stride is their size"),
        (dataclasses.replace(PATCHES_CASE, padding=(0, 8)), "fprop", "whose stride is their size"),
        (dataclasses.replace(PATCHES_CASE, H=64, dilation=(2, 1)), "fprop", "whose stride is their size"),
        (dataclasses.replace(PATCHES_CASE, R=1, S=1, stride=(1, 1)), "fprop", "larger than 1x1"),
        (dataclasses.replace(PATCHES_CASE, C=6, groups=2), "fprop", "one group"),
        (Case(1 << 11, 3, 224, 224, 8, 16, 16, stride=(16, 16)), "fprop", "512 MB"),
    ],
    ids=str,
)
def test_patches_say_what_they_refuse(patches_shim, case, operator, text):
    shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
    fields = ShimEngine.fields(case, {k: torch.empty(v, device="meta") for k, v in shapes.items()}, False)
    refusal = patches_shim.library.engine_refusal(OPERATOR_NUMBER[operator], fields)
    assert (refusal is None) == (text is None), refusal
    assert text is None or text in refusal.decode()


def test_patches_yield_to_who_takes_them_whole(patches_shim):
    """And refuse what nobody takes the rest of."""
    yields, let_take = patches_shim.library.patches_yields, patches_shim.library.let_take
    yields.restype, let_take.argtypes = ctypes.c_char_p, [ctypes.c_bool, ctypes.c_bool]

    def reason(images: int, channels: int = 768, R: int = 16, dtype: torch.dtype = torch.float32) -> bytes | None:
        case = Case(images, 3, 224, 224, channels, R, R, stride=(R, R))
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        tensors = {name: torch.empty(shape, device="meta", dtype=dtype) for name, shape in shapes.items()}
        return yields(0, ShimEngine.fields(case, tensors, True))

    assert reason(1) is None
    assert reason(1, 100) == b"another engine may be faster with few multiply-adds"
    try:
        let_take(False, False)
        case = Case(7, 3, 32, 32, 8, 16, 16, stride=(16, 16))
        text = patches_shim.refuses("fprop", case, make_tensors(case, torch.float32, integers))
        assert text == b"no other engine takes what is left"
        let_take(True, True)
        assert reason(2) == b"an engine takes it whole"  # another size, as who takes a problem is remembered
        let_take(False, True)  # stem alone, which in 16 bits is slow with large filters
        for number, dtype in enumerate(DTYPES[:3]):
            assert (reason(3 + number, dtype=dtype) is None) == (dtype != torch.float32)
            assert reason(8 + number, R=4, dtype=dtype) == b"an engine takes it whole"
    finally:
        let_take(True, False)


# Which engine is chosen -----------------------------------------------------------------------------------------------

# All engines that are asked before direct, but for depthwise, which takes other problems than these.
CHOICE_ENTRY_POINTS = (
    r"""
#include <cmath>
#include <cstring>
#include <string>
#include <type_traits>

extern "C" {
int simt_mutation = 0;  // the number of the one that takes place, see with_mutations
}

#include "gather.cu"
#include "wgmma.cu"
#include "stem.cu"
#include "pointwise.cu"
#include "mma.cu"
#include "dilated.cu"
#include "patches.cu"
#include "strided.cu"
#include "tma.cu"
#include "tma_wgrad.cu"
#include "wgrad.cu"

namespace modelnew {
bool direct_has_points(const Problem&, Operator) { return false; }
bool gather_lands(const Problem& problem, Operator op) {
  return gather::plan_of(problem, op, gather::Alignment{}).plan.lands;
}
bool gather_takes_taps_apart(const Problem& problem, Operator op) {
  return gather::plan_of(problem, op, gather::Alignment{}).plan.apart;
}
int64_t listed_workspace_bytes(const Problem&, Operator) { return 0; }
static const char* refuse(const Problem&, Operator) { return "it takes other problems"; }
const Engine kGatherEngine{"gather", gather::refusal, nullptr, nullptr, nullptr, gather::yields, gather::cycles};
const Engine kWgmmaEngine{"wgmma", wgmma::refusal, nullptr, nullptr, nullptr, wgmma::yields, wgmma::cycles};
const Engine kStemEngine{"stem", stem::refusal, nullptr, nullptr, nullptr, stem::yields, stem::cycles};
const Engine kDepthwiseEngine{"depthwise", refuse, nullptr, nullptr, nullptr};
const Engine kPointwiseEngine{"pointwise", pointwise::refusal, nullptr,          nullptr,
                              nullptr,     pointwise::yields,  pointwise::cycles};
const Engine kMmaEngine{"mma", mma::refusal, nullptr, nullptr, nullptr, mma::yields, mma::cycles};
const Engine kDilatedEngine{"dilated", dilated::refusal, nullptr, nullptr, nullptr, dilated::yields};
const Engine kPatchesEngine{"patches", patches::refusal, nullptr, nullptr, nullptr, patches::yields};
const Engine kStridedEngine{"strided", strided::refusal, nullptr, nullptr, nullptr, strided::yields};
const Engine kTmaEngine{"tma", tma::refusal, nullptr, nullptr, nullptr, tma::yields, tma::cycles};
const Engine kTmaWgradEngine{"tma_wgrad", tma_wgrad::refusal, nullptr, nullptr, nullptr, tma_wgrad::yields};
const Engine kWgradEngine{"wgrad", wgrad::refusal, nullptr, nullptr, nullptr, wgrad::yields, wgrad::cycles};
const Engine kDirectEngine{"direct", [](const Problem&, Operator) -> const char* { return nullptr; }, nullptr, nullptr,
                           nullptr};
}  // namespace modelnew
"""
    + PROBLEM_FROM_FIELDS
    + r"""
using namespace modelnew;
extern "C" const char* choose(int op, const int64_t* fields) {
  Memo<const Engine*> memo;  // nothing is remembered from mutation to mutation
  return first_of({ENGINES}, make_problem(fields), static_cast<Operator>(op), memo)->name;
}
"""
)


CHOICE_MUTATIONS = {
    "direct with few output channels and few outputs": (
        "taps >= kLeastTapsOfFewChannels)",
        "(MUTATED || taps >= kLeastTapsOfFewChannels))",
    ),
}
CHOICE_OF_WGRAD_MUTATIONS = {
    "copies whatever it takes": (
        "if (kWgradEngine.cycles(problem, op) < kCyclesOfWgrad",
        "if (!MUTATED && kWgradEngine.cycles(problem, op) < kCyclesOfWgrad",
    ),
    "never copies": ("< kCyclesOfWgrad * plan.cycles)", "< kCyclesOfWgrad * (MUTATED ? 1e9 : plan.cycles))"),
}


def choice_library(folder: Path) -> ctypes.CDLL:
    """The choice among the engines, in the binding's order, on an H200 that is not there."""
    table = re.search(r"kEngines\[\] = \{([^}]*)\}", (KERNELS / "engines.cuh").read_text())[1]
    # How many clusters of 2, 4 and 8 blocks find room at once.
    clusters = "".join(f"  device.clusters[{bits}] = {count};\n" for bits, count in ((1, 66), (2, 30), (3, 15)))
    edit = ("  static_cast<void>(device);\n", clusters)
    source, start = (KERNELS / "tma_wgrad.cu").read_text(), len(CHOICE_MUTATIONS) + 1
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tma_wgrad.cu").write_text(with_mutations(source, CHOICE_OF_WGRAD_MUTATIONS, start))
    library = compile_plans("mma", CHOICE_ENTRY_POINTS.replace("ENGINES", table), CHOICE_MUTATIONS, folder, edit)
    library.choose.restype = ctypes.c_char_p
    return library


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


@built_beside_the_tests
def choice(folder: Path) -> ctypes.CDLL:
    return choice_library(folder)


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


# The stem engine without a GPU ----------------------------------------------------------------------------------------

STEM_ENTRY_POINTS = (
    """
#include <cstring>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

extern "C" {
int simt_mutation = 0;  // the number of the one that takes place, see with_mutations
}

#include "stem.cu"
bool modelnew::direct_has_points(const Problem&, Operator) { return false; }
static double mma_cycles = 1e18;
static double cycles_of_mma(const modelnew::Problem&, modelnew::Operator) { return mma_cycles; }
static const char* never_refuse(const modelnew::Problem&, modelnew::Operator) { return nullptr; }
const modelnew::Engine modelnew::kMmaEngine{"mma", never_refuse, nullptr, nullptr, nullptr, nullptr, cycles_of_mma};
"""
    + PROBLEM_FROM_FIELDS
    + r"""
using namespace modelnew;
using namespace modelnew::stem;

static std::set<std::string> seen;  // kinds of plans

// What is wrong with the numbers of a plan, or nothing.
static std::string fault_of_numbers(const Correlation& of, const Plan& plan, const Format& format,
                                    const Device& device) {
  const bool exact = format.exact;
  const SharedLayout layout = shared_layout(plan, format);
  const int staging = plan.stores == Stores::kSingle ? 0 : 16 * 16 * plan.tile_k * format.bytes;  // of 16 warps
  const int landing = format.bytes == 4 ? 0 : plan.x_bytes / 2;
  if (layout.end != plan.smem_bytes || plan.smem_bytes > 232448) return "shared memory";
  if (layout.bias < 3 * 8 * kStages || layout.weights < layout.bias + 4 * plan.tile_k) return "room for the bias";
  if (layout.staging < layout.weights + (exact ? 2 : 1) * plan.steps * 8 * plan.tile_k * 4) return "room for weights";
  if (layout.x < layout.staging + staging || layout.landing < layout.x + kStages * plan.x_bytes) return "room for x";
  if (layout.end < layout.landing + landing) return "room for x as it comes";
  if (layout.weights % 16 || layout.staging % 1024 || layout.x % 128 || window_bytes(plan) % 128) return "alignment";
  if (layout.landing % 128) return "alignment of x as it comes";
  // Of a descriptor, the distance of a step's quads.
  if (16 * plan.tile_k >= 1 << 18 || (plan.tile_k != 32 && plan.tile_k != 64)) return "channels of a tile";
  if (plan.x_bytes >= 1 << 20) return "more bytes than a barrier can expect";
  if (plan.blocks % plan.tiles_k || plan.blocks < plan.tiles_k || plan.blocks / plan.tiles_k > plan.tiles)
    return "blocks without a tile";
  if (plan.tiles_k <= device.sms && plan.blocks > device.sms) return "more blocks than run at once";
  if (int64_t{plan.tiles_k} * plan.tile_k < of.out_channels || (plan.tiles_k - 1) * plan.tile_k >= of.out_channels)
    return "tiles of channels";
  if (2 * plan.steps < plan.quads || plan.quads > kMostQuads || 2 * plan.steps > kMostQuads) return "steps";
  if (!exact && plan.steps % kGroupSteps) return "groups of steps";
  if (!exact && format.bytes == 4 && plan.steps / kGroupSteps % 2 == 0) return "groups of two";
  return plan.cycles > 0 ? "" : "no estimate";
}

// What is wrong with the tiles, or nothing: every output is one tile's.
static std::string fault_of_tiles(const Params& params) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  std::vector<uint8_t> owned(of.N * of.P * of.Q);
  if (plan.tiles != of.N * plan.tiles_p * plan.tiles_q) return "tiles in all";
  for (int number = 0; number < plan.tiles; ++number) {
    const Tile tile = locate_tile(params, number);
    if (tile.n < 0 || tile.n >= of.N || tile.p < 0 || tile.p >= of.P || tile.q < 0 || tile.q >= of.Q)
      return "a tile outside";
    for (int p = tile.p; p < std::min(of.P, tile.p + plan.tile_p); ++p)
      for (int q = tile.q; q < std::min(of.Q, tile.q + plan.tile_q); ++q)
        if (owned[(int64_t{tile.n} * of.P + p) * of.Q + q]++) return "an output twice";
  }
  for (uint8_t owners : owned)
    if (owners != 1) return "an output never";
  return "";
}

// What is wrong with the order of the reduction, or nothing: every tap of every channel once.
static std::string fault_of_quads(const Params& params) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  if (plan.row_terms != of.S * (plan.lines ? of.in_channels : 1)) return "terms of a row";
  std::vector<uint8_t> there(of.in_channels * of.R * of.S);
  for (int i = 0; i < plan.quads; ++i) {
    const Quad quad = locate_quad(params, i);
    for (int term = quad.first; term < std::min(quad.first + kQuad, plan.row_terms); ++term) {
      const int channel = plan.lines ? term % of.in_channels : quad.channel;
      const int s = plan.lines ? term / of.in_channels : term;
      if (channel >= of.in_channels || quad.r >= of.R || s >= of.S) return "a term outside";
      if (there[(channel * of.R + quad.r) * of.S + s]++) return "a term twice";
    }
  }
  for (uint8_t times : there)
    if (times != 1) return "a term never";
  return "";
}

// What is wrong with the words that a tile's outputs read, or nothing; and with the box that brings them. The address
// is in values.
static std::string fault_of_window(const Params& params, const Tile& tile, int64_t address, const Format& format) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int64_t w0 = int64_t{tile.q} * of.stride_w - of.pad_w;
  const int64_t first_column = w0 * plan.pixel_words - plan.lead;
  if (plan.x_bytes != 4 * (plan.lines ? 1 : of.in_channels) * plan.rows * plan.columns) return "bytes of a window";
  const int outputs = plan.tile_p * plan.tile_q, every = std::max(1, outputs / 48);
  for (int i = 0; i < outputs + every; i += every) {
    const int m = std::min(i, outputs - 1);  // some, the last one among them
    const int row = m / plan.tile_q, column = m % plan.tile_q;
    const int64_t start = int64_t{row} * of.stride_h * plan.columns + int64_t{column} * of.stride_w * plan.pixel_words;
    for (int i = 0; i < plan.quads; ++i) {
      const Quad quad = locate_quad(params, i);
      if (params.offsets[i] % 4) return "an offset of no word";
      for (int t = 0; t < kQuad; ++t) {
        const int64_t word = start + params.offsets[i] / 4 + t * plan.term_words;
        if (word < 0 || 4 * word >= plan.x_bytes) return "a word outside";
        const int term = quad.first + t;
        if (term >= plan.row_terms) continue;
        const int64_t channel = plan.lines ? term % of.in_channels : quad.channel;
        const int64_t s = plan.lines ? term / of.in_channels : term;
        const int64_t in_column = first_column + word % plan.columns, in_row = word / plan.columns % plan.rows;
        const int64_t expected = (w0 + column * of.stride_w + s * of.dilation_w) * plan.pixel_words;
        if (in_column != expected + (plan.lines ? channel : 0)) return "another column of x";
        if (in_row != row * of.stride_h + quad.r * of.dilation_h) return "another row of x";
        if (word / plan.columns / plan.rows != (plan.lines ? 0 : channel)) return "another channel";
      }
    }
    for (int i = plan.quads; i < 2 * plan.steps + (format.exact ? 2 : 0); ++i)
      if (params.offsets[i] != 0) return "an offset of no quad";
  }
  if (plan.x_bytes % 16) return "a window of no whole vectors";
  if (format.bytes == 2 && (plan.columns % 2 || params.by_pairs.divisor != plan.columns / 2u)) return "pairs of a line";
  if (!plan.in_box) return plan.lines || plan.lead ? "words of a line" : "";
  const int piece = 16 / format.bytes;
  if (plan.columns % piece || plan.columns > 256 || plan.rows > 256) return "the size of a box";
  if (of.W * plan.pixel_words % piece) return "rows that end within 16 bytes";
  if (first_column % piece || address % piece) return "a box that starts astray";
  const auto whole = [&](int64_t stride, int64_t size) { return size == 1 || (stride > 0 && stride % piece == 0); };
  if (!whole(of.in_stride[0], of.N) || !whole(of.in_stride[2], of.H)) return "rows of a box astray";
  if (plan.lines ? of.in_stride[1] != 1 || of.in_stride[3] != of.in_channels || (of.S > 1 && of.dilation_w != 1)
                 : of.in_stride[3] != 1 || !whole(of.in_stride[1], of.in_channels))
    return "columns that are no neighbours";
  return "";
}

// What is wrong with the boxes in which a tile's outputs are stored, or nothing. The address is in values, of which
// `piece` are 16 bytes.
static std::string fault_of_stores(const Params& params, const Tile& tile, int64_t address, int piece) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  if (plan.stores == Stores::kSingle) return "";
  const bool channels_last = plan.stores == Stores::kChannelsLast;
  const auto place = [&](int64_t m) {  // of output m of the tile, or -1
    const int64_t p = tile.p + m / plan.tile_q, q = tile.q + m % plan.tile_q;
    return p < of.P && q < of.Q ? p * of.out_stride[2] + q * of.out_stride[3] : int64_t{-1};
  };
  const int64_t step = channels_last ? of.out_stride[3] : 1;
  const int64_t end = channels_last ? of.out_channels : plan.run ? int64_t{of.P} * of.Q : of.Q;
  if (end % piece) return "an end within 16 bytes";
  if (channels_last ? of.out_stride[1] != 1 : of.out_channels > 1 && of.out_stride[1] % piece) return "channels astray";
  if (address % piece || (of.N > 1 && of.out_stride[0] % piece)) return "images astray";
  if (channels_last && int64_t{of.P} * of.Q > 1 && (plan.run || of.Q > 1) && step % piece) return "pixels astray";
  for (int first = 0; first < plan.tile_p * plan.tile_q; first += kBoxPixels) {
    const int64_t start = place(first);
    // As the kernel has it.
    const int64_t in_run = int64_t{tile.p} * of.Q + first;
    const bool exist = plan.run ? in_run < int64_t{of.P} * of.Q : start >= 0;
    if (exist != (start >= 0)) return "a box of nothing, or outputs without a box";
    if (!exist) continue;
    if (!channels_last && start % piece) return "a box astray";
    for (int i = 0; i < kBoxPixels; ++i) {
      const bool clipped = plan.run ? in_run + i >= int64_t{of.P} * of.Q : tile.q + first % plan.tile_q + i >= of.Q;
      if (clipped) continue;
      if (first + i >= plan.tile_p * plan.tile_q) return "another tile's outputs";
      if (place(first + i) != start + i * step) return "outputs that are no neighbours";
    }
  }
  return "";
}

static void note(const Plan& plan, int bytes) {
  if (simt_mutation != 0) return;  // kinds are those of the engine as it is
  const char* const stores[] = {"planes", "pixels", "single values"};
  const std::string of = std::to_string(8 * bytes) + " bits: ";
  seen.insert(of + "x by " + (!plan.in_box ? "single values" : plan.lines ? "lines" : "planes"));
  seen.insert(of + (plan.run ? "runs" : "rows") + " of y by " + stores[static_cast<int>(plan.stores)]);
  seen.insert(of + "tile of " + std::to_string(plan.tile_k) + " channels");
  if (plan.lead > 0) seen.insert(of + "lead");
  if (plan.tiles_q > 1) seen.insert(of + "parts of rows");
}

extern "C" {
void set_capability(int capability) { stand_in_capability = capability; }
const char* stem_refusal(int op, const int64_t* fields) {
  return refusal(make_problem(fields), static_cast<Operator>(op));
}
const char* stem_yields(int op, const int64_t* fields) {
  return yields(make_problem(fields), static_cast<Operator>(op));
}
const char* stem_describe(int op, const int64_t* fields) {
  static char text[321];
  std::memset(text, 'x', sizeof text);
  describe(make_problem(fields), static_cast<Operator>(op), text, 320);  // as the binding has it
  return text[320] == 'x' && std::memchr(text, 0, 320) ? text : "written too far";
}
const char* stem_seen() {
  static std::string all;
  all.clear();
  for (const std::string& kind : seen) all += kind + "\n";
  return all.c_str();
}
void set_mma_cycles(double cycles) { mma_cycles = cycles; }
double stem_cycles(int op, const int64_t* fields, uint64_t x, uint64_t, uint64_t y) {
  const Problem problem = make_problem(fields);
  const Operator which = static_cast<Operator>(op);
  Plan plan{};
  const Correlation of = correlation_of_problem(problem, which);
  return make_plan(of, format_of(problem, which), Device{132}, Alignment{x, y}, plan) ? plan.cycles : 0;
}
// The plan for tensors at these addresses, and some that are forced: null if there is none, else what is wrong, or "".
const char* stem_fault(int, const int64_t* fields, uint64_t x, uint64_t, uint64_t y, int seed) {
  static std::string fault;
  const Problem problem = make_problem(fields);
  const int bytes = element_bytes(problem.dtype);
  const Format format{bytes, bytes == 4 && !problem.tf32_allowed};
  const Device device{seed % 3 == 0 ? 3 : 132};
  std::mt19937 random(seed);
  Params params{};
  params.of = correlation_of_problem(problem, Operator::kFprop);
  Plan best{};
  // One product is asked for here where the contract has three, which come in smaller tiles, too.
  const bool smaller_tiles = format.exact || bytes == 2;
  if (!make_plan(params.of, format, device, Alignment{x, y}, best)) return smaller_tiles ? nullptr : "";
  for (int i = 0; i < 8; ++i) {
    params.plan = best;
    const int tile_k = 32 << random() % 2, tile_p = 1 + random() % 9;
    const int tile_q = i % 2 ? params.of.Q : 16 * (1 + random() % 8);
    if (i > 0 && !make_plan(params.of, format, device, Alignment{x, y}, params.plan, tile_k, tile_p, tile_q)) continue;
    const Plan& plan = params.plan;
    if (i > 0 && (plan.tile_k != tile_k || plan.tile_p != tile_p || plan.tile_q != tile_q)) return "another plan";
    std::fill(std::begin(params.offsets), std::end(params.offsets), 0u);
    set_numbers(params);
    note(plan, bytes);
    fault = fault_of_numbers(params.of, plan, format, device);
    if (fault.empty()) fault = fault_of_tiles(params);
    if (fault.empty()) fault = fault_of_quads(params);
    for (int j = 0; j < 3 && fault.empty(); ++j) {
      const Tile tile = locate_tile(params, j == 0 ? 0 : j == 1 ? plan.tiles - 1 : random() % plan.tiles);
      fault = fault_of_window(params, tile, x / bytes, format);
      if (fault.empty()) fault = fault_of_stores(params, tile, y / bytes, 16 / bytes);
    }
    const bool of_few = tile_k == 64 && problem.K <= 32;  // which is not considered
    if (fault.empty() && plan.cycles < best.cycles && !of_few) fault = "not the best plan";
    if (!fault.empty()) {
      fault += ", plan " + std::to_string(i);
      return fault.c_str();
    }
  }
  return "";
}
}
"""
)

# Each puts something out of place.
STEM_PLAN_MUTATIONS = {
    "x as if it were aligned": ("address.in % 16 == 0 &&", "(MUTATED || address.in % 16 == 0) &&"),
    "planes of x astray": (
        "&& whole(of.in_stride[1], of.in_channels);",
        "&& (MUTATED || whole(of.in_stride[1], of.in_channels));",
    ),
    "no words in front of a row": ("lead = static_cast<int>((piece", "lead = static_cast<int>(MUTATED ? 0 : (piece"),
    "the last quad as short as its row": (
        "kQuad * plan.row_quads - 1",
        "(MUTATED ? plan.row_terms : kQuad * plan.row_quads) - 1",
    ),
    "boxes of any size": ("&& plan.columns <= kMostBoxSide;", "&& (MUTATED || plan.columns <= kMostBoxSide);"),
    "y as if it were aligned": ("address.out % 16 == 0 &&", "(MUTATED || address.out % 16 == 0) &&"),
    "boxes over the ends of tiles": (
        "tile_p * tile_q % kBoxPixels == 0)",
        "MUTATED || tile_p * tile_q % kBoxPixels == 0)",
    ),
    "pixels of y astray": ("whole(of.out_stride[3], row)", "(MUTATED || whole(of.out_stride[3], row))"),
    "y that ends within 16 bytes": ("row % piece == 0 &&", "(MUTATED || row % piece == 0) &&"),
    "x that ends within 16 bytes": ("of.W % piece == 0 &&", "(MUTATED || of.W % piece == 0) &&"),
    "pieces of as many values of any size": ("piece = 16 / format.bytes", "piece = MUTATED ? 4 : 16 / format.bytes"),
    "no room for x as it comes": ("(format.bytes == 4 ? 0 :", "(MUTATED || format.bytes == 4 ? 0 :"),
    "a tile too few": ("ceil_div(of.Q, tile_q)", "ceil_div(of.Q - (MUTATED && of.Q > 1), tile_q)"),
    "not the best": ("plan.cycles >= best.cycles", "(MUTATED || plan.cycles >= best.cycles)"),
}


class StemPlans(MmaPlans):
    """The host part of the stem engine, in the same way."""

    engine, entry_points, mutations = "stem", STEM_ENTRY_POINTS, STEM_PLAN_MUTATIONS
    dtypes: ClassVar[Sequence[torch.dtype]] = DTYPES[:3]


@built_beside_the_tests
def stem_plans(folder: Path) -> StemPlans:
    return StemPlans(folder)


def random_stem_cases(count: int, seed: int) -> Iterator[Case]:
    """Few channels; one pixel and lines of several tiles, filters from 1x1 to patches, any stride."""
    rng = random.Random(seed)
    while count > 0:
        C, K = rng.choice([1, 2, 3, 3, 3, 4, 5, 7]), rng.choice([1, 2, 8, 31, 32, 33, 64, 65, 96, 200])
        H, W = (
            rng.choice([1, rng.randint(1, 16), 4 * rng.randint(1, 14), rng.randint(1, most)])
            for most in (41, rng.choice([60, 300, 530]))
        )
        R, S = rng.choice([(1, 1), (3, 3), (3, 3), (4, 4), (7, 7), (rng.randint(1, 12), rng.randint(1, 12))])
        stride = rng.choice([(1, 1), (2, 2), (4, 4), tuple(rng.choices([1, 2, 3, 5, 70], k=2))])
        padding = tuple(rng.choices([0, 0, 1, 2, 3, 5], k=2))
        dilation = tuple(rng.choices([1, 1, 1, 2, 3, 13], k=2))
        case = Case(rng.choice([1, 1, 2, 3]), C, H, W, K, R, S, stride, padding, dilation)
        if min(case.y_shape) > 0:
            yield case
            count -= 1


STEM_KINDS = {
    f"{bits} bits: {kind}"
    for bits in (16, 32)
    for kind in (
        *(f"x by {how}" for how in ("planes", "lines", "single values")),
        *(f"{what} of y by {how}" for what in ("runs", "rows") for how in ("planes", "pixels", "single values")),
        *(f"tile of {channels} channels" for channels in (32, 64)),
        *("lead", "parts of rows"),
    )
}


def test_stem_plans_are_sound(stem_plans):
    """Each output once, each term once and where the convolution says, loads and stores where boxes may be."""
    planned, count = 0, 2500
    for seed, case in enumerate(random_stem_cases(count, seed=0)):
        fault = stem_plans.fault("fprop", case, seed)
        assert not fault, f"{case}, seed {seed}: {fault}"
        planned += fault is not None
    assert planned > 0.5 * count  # a third are for a GPU that the engine does not take
    assert stem_plans.seen() >= STEM_KINDS


@pytest.mark.parametrize("mutation", STEM_PLAN_MUTATIONS)
def test_stem_plan_checks_see_what_is_wrong(stem_plans, mutation):
    cases = enumerate(random_stem_cases(1500, seed=0))
    with mutated(stem_plans.library, STEM_PLAN_MUTATIONS, mutation):
        assert any(stem_plans.fault("fprop", case, seed) for seed, case in cases)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_stem_estimates_grow_with_the_work(stem_plans, dtype):
    aligned = [ctypes.c_uint64(0)] * 3
    for case in random_stem_cases(400, seed=1):
        if stem_plans("refusal", "fprop", case, dtype=dtype) is not None:
            continue
        once = stem_plans("cycles", "fprop", case, *aligned, dtype=dtype)
        for letter in "NK":
            double = dataclasses.replace(case, **{letter: 2 * getattr(case, letter)})
            twice = stem_plans("cycles", "fprop", double, *aligned, dtype=dtype)
            # More channels may be stored by boxes where fewer are not, or in larger tiles.
            assert twice >= (1 if letter == "N" else 0.7) * once, f"{double}: {twice} after {once}"


# Types of tensors, and the switch where they have one.
STEM_CONTRACTS = [(torch.float32, False), (torch.float32, True), (torch.float16, True), (torch.bfloat16, True)]


def test_stem_describes_its_configuration(stem_plans):
    told = 0
    for case, (dtype, tf32) in itertools.product(random_stem_cases(200, seed=4), STEM_CONTRACTS):
        if stem_plans("refusal", "fprop", case, dtype=dtype, tf32=tf32) is None:
            text = stem_plans("describe", "fprop", case, dtype=dtype, tf32=tf32)
            assert re.fullmatch(
                r"(one product|three products of parts), tile of (32|64) channels x \d+ x \d+ pixels, \d+ steps of 8 "
                r"terms, \d+ bytes of shared memory, x by (boxes( of lines)?|single values), y by (boxes of "
                r"planes|boxes of pixels|single values), \d+ tiles for \d+ blocks, about [\d.e+-]+ Mcycles",
                text,
            ), text
            one_product = dtype != torch.float32 or "fprop" in case.tf32_operators(dtype, tf32)
            assert text.startswith("one product") == one_product
            told += 1
    assert told > 400


# What the engine leaves to others, and what looks alike and is its own.
STEM_CASE = Case(8, 3, 224, 224, 64, 7, 7, stride=(2, 2), padding=(3, 3))
STEM_REFUSALS = [
    (STEM_CASE, "fprop", {}, None),
    *((STEM_CASE, "fprop", {"capability": capability}, "Hopper") for capability in (0, 80, 89, 100, 120)),
    (STEM_CASE, "fprop", {"dtype": torch.float16}, None),
    (STEM_CASE, "fprop", {"dtype": torch.bfloat16}, None),
    (STEM_CASE, "fprop", {"dtype": torch.float64}, "no float64"),
    *((STEM_CASE, operator, {}, "outputs only") for operator in ("dgrad", "wgrad", "bgrad")),
    (dataclasses.replace(STEM_CASE, C=7), "fprop", {}, None),
    (dataclasses.replace(STEM_CASE, C=8), "fprop", {}, "7 input channels"),
    (dataclasses.replace(STEM_CASE, C=6, groups=2), "fprop", {}, "one group only"),
    (dataclasses.replace(STEM_CASE, dilation=(3, 5)), "fprop", {}, None),
    (dataclasses.replace(STEM_CASE, R=16, S=16, stride=(16, 16)), "fprop", {}, "no tile"),
    (dataclasses.replace(STEM_CASE, dilation=(30, 30)), "fprop", {}, "no tile"),
    (Case(1, 1, 20000, 20000, 1, 16384, 16384), "fprop", {}, "no tile"),
    (Case(1, 7, 1, 4, 64, 1, 2**29 - 1, padding=(0, 2**28)), "fprop", {"strides": {"x": (28, 1, 28, 7)}}, "no tile"),
    (Case(1, 3, 9, 9, 64, 1, 1, dilation=(2**20, 2**20)), "fprop", {}, None),
    (Case(1, 1, 2**28, 2**28, 1, 1, 1, stride=(2**28, 2**28)), "fprop", {}, None),
    (Case(2**28, 1, 8, 8, 40, 3, 3, padding=(1, 1)), "fprop", {}, None),
    (Case(2**31, 1, 8, 8, 40, 3, 3, padding=(1, 1)), "fprop", {}, "no tile"),
]


@pytest.mark.parametrize("case, operator, settings, text", STEM_REFUSALS, ids=str)
def test_stem_says_what_it_refuses(stem_plans, case, operator, settings, text):
    check_refusal(stem_plans("refusal", operator, case, **settings), text)


@pytest.mark.parametrize(
    "case, text",
    [
        (STEM_CASE, None),
        (dataclasses.replace(STEM_CASE, N=1), "few outputs"),
        (Case(8, 3, 66, 66, 32, 3, 3), "few outputs"),  # 2^20 of them
        (Case(8, 3, 66, 66, 33, 3, 3), None),
        (dataclasses.replace(STEM_CASE, N=64, K=4), "few output channels"),
        (dataclasses.replace(STEM_CASE, N=64, K=5), None),
        (dataclasses.replace(STEM_CASE, N=64, C=1, K=16), "few channels out of one"),
        (dataclasses.replace(STEM_CASE, N=64, C=1, K=17), None),
    ],
    ids=str,
)
def test_stem_yields_to_what_is_faster(stem_plans, case, text):
    for tf32 in (False, True):
        check_refusal(stem_plans("yields", "fprop", case, tf32=tf32), text)


@pytest.mark.parametrize(
    "case, text",
    [
        (STEM_CASE, None),
        (dataclasses.replace(STEM_CASE, N=1), None),  # few outputs, but of 147 products each
        (Case(8, 3, 66, 66, 33, 3, 3), "few multiply-adds"),
        (Case(2, 2, 257, 257, 64, 2, 2), "few multiply-adds"),  # 2^26 of them
        (Case(2, 2, 257, 258, 64, 2, 2), None),
        (dataclasses.replace(STEM_CASE, N=64, K=4), "few output channels"),
        (dataclasses.replace(STEM_CASE, N=64, C=1, K=16), "few channels out of one"),
        (dataclasses.replace(STEM_CASE, N=64, C=1, K=17), None),
    ],
    ids=str,
)
def test_stem_of_16_bits_yields_to_what_is_faster(stem_plans, case, text):
    for dtype in (torch.float16, torch.bfloat16):
        check_refusal(stem_plans("yields", "fprop", case, dtype=dtype), text)


def test_stem_yields_where_mma_is_far_faster(stem_plans):
    cycles = stem_plans("cycles", "fprop", STEM_CASE, *[ctypes.c_uint64(0)] * 3)
    set_mma_cycles = stem_plans.library.set_mma_cycles
    set_mma_cycles.argtypes = [ctypes.c_double]
    try:
        for share, text in ((0.51, None), (0.49, "filters that fill shared memory")):
            set_mma_cycles(share * cycles)
            check_refusal(stem_plans("yields", "fprop", STEM_CASE), text)
    finally:
        set_mma_cycles(1e18)


STEM_SHIM_ENTRY_POINTS = (
    """
#include <type_traits>
"""
    + PROBLEM_FROM_FIELDS
    + r"""
bool modelnew::direct_has_points(const Problem&, Operator) { return false; }
using namespace modelnew;
using namespace modelnew::stem;

extern "C" {
int x_loads = 0, y_stores = 0;  // of the last run
}

// Plans this tile (0: any) on a GPU of three SMs and runs that, as TF32 if it is allowed, however small the problem: -1
// if there is no such plan, else the error.
extern "C" int stem_run(int, const int64_t* fields, void* const* pointers, int tile_k, int tile_p, int tile_q,
                        int seed) {
  const Problem problem = make_problem(fields);
  Params params{};
  params.in_ptr = pointers[0];
  params.w_ptr = pointers[1];
  params.bias_ptr = pointers[2];
  params.out_ptr = pointers[4];
  params.of = correlation_of_problem(problem, Operator::kFprop);
  const Alignment address{reinterpret_cast<uint64_t>(pointers[0]), reinterpret_cast<uint64_t>(pointers[4])};
  const Format format{element_bytes(problem.dtype), problem.dtype == DType::kFloat32 && !problem.tf32_allowed};
  if (!make_plan(params.of, format, Device{3}, address, params.plan, tile_k, tile_p, tile_q)) return -1;
  x_loads = params.plan.in_box ? 1 + params.plan.lines : 0, y_stores = static_cast<int>(params.plan.stores);
  return simt_run(seed, false, [&] { return run(problem.dtype, format.exact, params, nullptr); });
}
"""
)

# Each takes away what others rely on, or leaves out a part of the sum.
STEM_MUTATIONS = {
    "multiplies before x is there": left_out("hopper::barrier_wait(EXACT ? barriers.full"),
    "rounds before x is there": left_out("hopper::barrier_wait(barriers.full,"),
    "overwrites x in use": left_out("hopper::barrier_wait_idly(of_next.empty"),
    "widens over x in use": left_out("hopper::barrier_wait_idly(barriers.empty"),
    "lands where x is read": left_out("hopper::barrier_wait(barriers.rounded, phase"),
    "multiplies before weights are there": left_out("__syncthreads();  // weights are there"),
    "stages where a box is read": left_out("if (lane_id == 0) hopper::bulk_stores_wait_read<TILE_K"),
    "stores before all is staged": left_out("__syncwarp();  // all of it is staged"),
    "leaves before its boxes are read": left_out("if (lane_id == 0) hopper::bulk_stores_wait_read<0>();  // shared"),
    "stores before the last steps are done": left_out("hopper::wgmma_wait<0>();\n  hopper::wgmma_settle(acc"),
    "adds up a step before it is done": left_out("hopper::wgmma_wait<0>();\n    hopper::wgmma_settle(part"),
    "a product dropped": left_out("Multiply::multiply(part, a, rests + row, 1);"),
    "does not round": left_out("four.y = tf32_operand(four.y);"),
    "Inf is not computed again": ("if (probe == 0) return;", "if (MUTATED || probe == 0) return;"),
    "computes another channel again": (
        "exact_output<T>(params, tile.n, k, p, q)",
        "exact_output<T>(params, tile.n, k - MUTATED * (k > 0), p, q)",
    ),
    "computes another pixel again": (
        "const int in_w = q * of.stride_w - of.pad_w + s",
        "const int in_w = (q - MUTATED * (q > 0)) * of.stride_w - of.pad_w + s",
    ),
}


class StemShim(MmaShim):
    """The stem engine in the same way: barriers, boxes and wgmma as WgmmaShim has them."""

    engine, entry_points, mutations = "stem", STEM_SHIM_ENTRY_POINTS, STEM_MUTATIONS
    wishes: ClassVar[dict[str, int]] = {"tile_k": 0, "tile_p": 0, "tile_q": 0}


@built_beside_the_tests
def stem_shim(folder: Path) -> StemShim:
    return StemShim(folder)


# Stems of networks in small, one channel and seven, quads that are full and not, dilation, rows that are longer than a
# box, images of one pixel; rows of y that boxes can store, alone or in runs, and others.
STEM_SHIM_CASES = [
    (Case(2, 3, 19, 36, 40, 7, 7, stride=(2, 2), padding=(3, 3)), {}),
    (Case(2, 3, 21, 32, 64, 7, 7, stride=(2, 2), padding=(3, 3)), {"tile_k": 64, "tile_p": 3, "tile_q": 16}),
    (Case(1, 4, 9, 32, 33, 3, 3, padding=(1, 1)), {"tile_k": 64, "tile_p": 2, "tile_q": 32}),
    (Case(3, 2, 12, 12, 24, 3, 3), {"tile_p": 8, "tile_q": 10}),
    (Case(2, 3, 16, 24, 70, 4, 4, stride=(4, 4)), {"tile_k": 64}),
    (Case(1, 5, 3, 300, 35, 2, 3, padding=(0, 2), dilation=(1, 2)), {}),
    (Case(2, 7, 8, 9, 20, 1, 1), {}),
    (Case(3, 1, 28, 28, 8, 5, 5, padding=(2, 2)), {"tile_p": 4, "tile_q": 16}),
    (Case(1, 3, 23, 30, 100, 11, 11, stride=(4, 4), padding=(2, 2)), {"tile_k": 32}),
    (Case(5, 3, 1, 1, 130, 3, 2, padding=(1, 1)), {}),
]


@pytest.mark.xdist_group("stem_shim_exact")  # its cases are counted together
@pytest.mark.parametrize("number", range(len(STEM_SHIM_CASES)))
def test_stem_shim_exact(stem_shim, number):
    """Integers of all types, under both contracts and in both memory formats, at any addresses."""
    case, wishes = STEM_SHIM_CASES[number]
    runs = [*itertools.product(LAYOUTS, reversed(STEM_CONTRACTS))] * 2
    for seed, (layout, (dtype, tf32)) in enumerate(runs, start=16 * number):
        settings = {"dtype": dtype, "tf32": tf32}
        fault = stem_shim.fault("fprop", case, layout, seed, **settings, **wishes)
        if fault is None:  # the tile is for boxes
            fault = stem_shim.fault("fprop", case, layout, seed, **settings)
        assert fault == "", f"{case}, {layout}, {settings}, {wishes}, seed {seed}: {fault}"
        kind = tf32 if dtype == torch.float32 else "16 bits"
        STEM_SEEN.add((kind, stem_shim.last("x_loads"), stem_shim.last("y_stores")))
    if number == len(STEM_SHIM_CASES) - 1 and len(STEM_SEEN) > 9:  # not this case alone
        # No box, one of planes, one of lines; boxes of planes, of pixels, none.
        ways = {(0, 0), (0, 1), (0, 2), (1, 0), (1, 2), (2, 1), (2, 2)}
        missing = {(kind, *way) for kind in (True, False, "16 bits") for way in ways} - STEM_SEEN
        assert not missing, missing


STEM_SEEN: set[tuple[object, ...]] = set()  # contracts, loads and stores in the runs above


@pytest.mark.parametrize("view", [*VIEWS, "one image"])
def test_stem_shim_takes_any_strides(stem_shim, view):
    """Of x, of w and of y."""
    change = VIEWS.get(view, lambda tensor: tensor[:1].expand_as(tensor))
    cases = (Case(2, 3, 9, 16, 36, 3, 3, padding=(1, 1)), Case(3, 4, 7, 9, 33, 2, 4))
    for number, (case, dtype) in enumerate(itertools.product(cases, DTYPES[:3])):
        tensors = make_tensors(case, dtype, integers)
        changed = [{"x"}, {"w"}, {"dy"}, {"x", "w", "dy"}]
        for names in changed if view not in ("expanded", "one image") else changed[:2]:
            viewed = tensors | {name: change(tensors[name]) for name in names - {"dy"}}
            out = torch.full(case.y_shape, math.nan, dtype=dtype)
            out = change(out) if "dy" in names else with_margins(out)
            for tf32 in (False, True) if dtype == torch.float32 else (True,):
                out.fill_(math.nan)
                message = stem_shim.run("fprop", case, viewed, out, tf32=tf32, seed=number)
                assert message == "", f"{case}, {names}: {message}"
                check_exact(case, {"fprop": out}, viewed)


def near_the_smallest(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Of float16: some are subnormal there, and most products of two."""
    return normal(shape, generator) * 2.0**-10


# What 16 bits hold.
STEM_16_BIT_FILLS = [
    *((torch.float16, fill) for fill in (normal, near_the_smallest)),
    *((torch.bfloat16, fill) for fill in (normal, wide, tiny)),
]
STEM_ROUNDING_CASE = Case(2, 3, 12, 20, 34, 7, 7, stride=(2, 2), padding=(3, 3))


@pytest.mark.parametrize("fill", FILLS, ids=named)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stem_shim_rounding(stem_shim, layout, fill):
    """Both contracts, element by element. (Sums are those of this processor, not of a tensor core.)"""
    tensors = in_layout(make_tensors(STEM_ROUNDING_CASE, torch.float32, fill), layout)
    for tf32 in (False, True):
        out = torch.full(STEM_ROUNDING_CASE.y_shape, math.nan)
        assert stem_shim.run("fprop", STEM_ROUNDING_CASE, tensors, out, tf32=tf32) == ""
        check_bounds(STEM_ROUNDING_CASE, {"fprop": out}, tensors, tf32=("fprop",) if tf32 else ())


@pytest.mark.parametrize("dtype, fill", STEM_16_BIT_FILLS, ids=named)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stem_shim_rounding_of_16_bits(stem_shim, layout, dtype, fill):
    tensors = in_layout(make_tensors(STEM_ROUNDING_CASE, dtype, fill), layout)
    out = torch.full_like(tensors["dy"], math.nan)
    assert stem_shim.run("fprop", STEM_ROUNDING_CASE, tensors, out) == ""
    check_bounds(STEM_ROUNDING_CASE, {"fprop": out}, tensors, tf32=())


# Quads with a term that no output reads, in rows that others read.
STEM_SPREADING_CASES = [Case(1, 4, 7, 20, 40, 3, 3), Case(1, 5, 7, 13, 33, 2, 3, padding=(1, 1), stride=(1, 2))]


@pytest.mark.parametrize("dtype, tf32", STEM_CONTRACTS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stem_shim_spreads_nan_and_inf_to_those_that_read_them(stem_shim, layout, dtype, tf32):
    for case in STEM_SPREADING_CASES:
        assert spreads(stem_shim, case, tf32, layout, dtype), case


# More tiles than stages, on three SMs; boxes of planes and of pixels, one of a warp and two.
STEM_TELLING_RUNS = [
    (
        Case(6, 3, 13, 32, channels, 5, 3, padding=(2, 1)),
        layout,
        seed,
        {"dtype": dtype, "tf32": tf32, "tile_k": tile_k, "tile_p": 2},
    )
    for layout, seed, (dtype, tf32) in itertools.product(LAYOUTS, (1, 3), STEM_CONTRACTS[:3])
    for channels, tile_k in ((40, 64), (32, 32))
    if tile_k == 64 or not tf32 or dtype != torch.float32
]


@pytest.mark.parametrize("mutation", STEM_MUTATIONS)
def test_stem_shim_sees_what_is_missing(mutation, stem_shim):
    """The shim itself: what is left out shows in one of a few runs, which are right without it."""

    def are_right() -> bool:
        if "again" in mutation:
            return all(spreads(stem_shim, STEM_SPREADING_CASES[0], False, layout) for layout in LAYOUTS)
        if "round" in mutation and "before" not in mutation:
            tensors = make_tensors(STEM_ROUNDING_CASE, torch.float32, under_a_tf32_step)
            out = torch.full(STEM_ROUNDING_CASE.y_shape, math.nan)
            assert stem_shim.run("fprop", STEM_ROUNDING_CASE, tensors, out, tf32=True) == ""
            exact = references(STEM_ROUNDING_CASE, tensors)["fprop"]
            return bool(((out - exact).abs() <= 1e-4 * exact).all())
        return all(
            stem_shim.fault("fprop", case, layout, seed, **settings) == ""
            for case, layout, seed, settings in STEM_TELLING_RUNS
        )

    assert are_right()
    with mutated(stem_shim.library, STEM_MUTATIONS, mutation):
        assert not are_right()


# The tma engines without a GPU ----------------------------------------------------------------------------------------

TMA_SHIM_ENTRY_POINTS = (
    """
#include <type_traits>
"""
    + PROBLEM_FROM_FIELDS
    + r"""
namespace modelnew {
static const char* refuse_all(const Problem&, Operator) { return "everything"; }
const Engine kWgmmaEngine{"wgmma", refuse_all, nullptr, nullptr, nullptr};
const Engine kGatherEngine{"gather", refuse_all, nullptr, nullptr, nullptr};
const Engine kDirectEngine{"direct", refuse_all, nullptr, nullptr, nullptr};
}  // namespace modelnew
using namespace modelnew;
using namespace modelnew::tma;

extern "C" {
int way = 0;  // of the last run: by columns, by windows, of planes as they are; and whether planes are copied
}

// Plans this tile, way, number of blocks a tile (-1: any) and runs it: on a GPU of three SMs, whose blocks have several
// tiles each, or of many. -1 if there is no such plan, else the error.
extern "C" int tma_run(int op, const int64_t* fields, void* const* pointers, int shape, int windows, int splits,
                       int direct, int seed) {
  const Problem problem = make_problem(fields);
  const Operator which = static_cast<Operator>(op);
  Params params{};
  params.in_ptr = which == Operator::kDgrad ? pointers[3] : pointers[0];
  params.bias_ptr = which == Operator::kDgrad ? nullptr : pointers[2];
  params.out_ptr = pointers[4];
  params.of = grouped(correlation_of_problem(problem, which));
  const auto address = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  const Alignment alignment{address(params.in_ptr), address(pointers[1]), address(params.out_ptr)};
  const int sms = splits > 1 ? 64 : 3;
  if (!make_plan(params.of, sms, alignment, params.plan, {shape, windows, splits, direct})) return -1;
  const Plan plan = params.plan;
  way = (plan.direct ? 2 : plan.windows) + 4 * plan.copied;
  std::vector<uint8_t> space(packed_bytes(params.of, plan) + copied_bytes(params.of, plan) + 256, 0xff);
  void* const workspace = space.data() + (256 - address(space.data()) % 256);
  return simt_run(seed, plan.splits > 1, [&] {
    Params once = params;
    return problem.dtype == DType::kFloat16 ? run<Half>(pointers[1], workspace, once, nullptr)
                                            : run<BFloat16>(pointers[1], workspace, once, nullptr);
  });
}
"""
)

# Each takes away what others rely on, or leaves out a part of the sum.
TMA_MUTATIONS = {
    "multiplies before x is there": left_out("hopper::barrier_wait(shared.x_full(x.stage)"),
    "multiplies before weights are there": left_out("hopper::barrier_wait(shared.w_full(w.stage)"),
    "overwrites x in use": left_out("hopper::barrier_wait(shared.x_empty(ring.stage)"),
    "overwrites weights in use": left_out("hopper::barrier_wait(shared.w_empty(ring.stage)"),
    "does not wait for its turn": left_out("hopper::barrier_wait(shared.turn(warpgroup), turn)"),
    "gives stages back too early": ("hopper::wgmma_wait<1>();", "if (!MUTATED) hopper::wgmma_wait<1>();"),
    "stages where a box is read": (
        "if (stores) hopper::bulk_stores_wait_read<0>();\n    warpgroup_sync",
        "if (stores && !MUTATED) hopper::bulk_stores_wait_read<0>();\n    warpgroup_sync",
    ),
    "stores before all is staged": left_out("warpgroup_sync(warpgroup);  // all of it is staged"),
    "shifts a tap too far": (
        "params.tap[load.first_tap + t].shift *",
        "(params.tap[load.first_tap + t].shift + MUTATED) *",
    ),
    "mistakes one phase for the other": (
        "load = {static_cast<int16_t>(row),",
        "load = {static_cast<int16_t>(MUTATED ? row ^ 1 : row),",
    ),
    "stages another piece": ("(piece ^ row % 8) * 16", "(piece ^ (MUTATED ? 0 : row % 8)) * 16"),
    "stores what lies between lines": (
        "column < plan.tile_columns && line",
        "(MUTATED || column < plan.tile_columns) && line",
    ),
    "adds up all parts but one": (
        "hopper::add_cluster_4(address, plan.splits)",
        "hopper::add_cluster_4(address, plan.splits - MUTATED)",
    ),
    "multiplies the filter as it is": (
        "const bool flipped = plan.transposed && of.flipped;",
        "const bool flipped = plan.transposed && of.flipped && !MUTATED;",
    ),
    "packs the filter as it is": (
        "params.flipped ? params.R - 1 - r : r",
        "params.flipped && !MUTATED ? params.R - 1 - r : r",
    ),
    "copies before the tile is there": left_out("__syncthreads();  // the tile is there"),
    "reads planes of the first image": ("pixel, c, image, 0, full", "pixel, c, MUTATED ? 0 : image, 0, full"),
    "reads channels of the first groups": (
        "quotient(tile.k, params.by_block_out) * of.in_channels",
        "(MUTATED ? 0 : quotient(tile.k, params.by_block_out)) * of.in_channels",
    ),
    "packs weights of other groups": (
        "exists && of_c == group - quotient(group, params.by_merged) * merged;",
        "exists && (MUTATED || of_c == group - quotient(group, params.by_merged) * merged);",
    ),
}


class TmaShim(MmaShim):
    """The tma engine in the same way: boxes, columns and wgmma as WgmmaShim has them."""

    engine, entry_points, mutations = "tma", TMA_SHIM_ENTRY_POINTS, TMA_MUTATIONS
    wishes: ClassVar[dict[str, int]] = {"shape": -1, "windows": -1, "splits": 1, "direct": -1}

    def __init__(self, folder: Path) -> None:
        stand_in = HOPPER_STAND_IN + MMA_INSTRUCTION
        source = amalgamate({**modelnew._sources, "hopper.cuh": stand_in}, [f"{self.engine}.cu"])
        source = with_mutations(source, self.mutations)
        self.library = compile_simt(source + '#line 1 "entry_points"\n' + self.entry_points, folder)
        self.library.simt_message.restype = ctypes.c_char_p

    def run(
        self,
        operator: str,
        case: Case,
        tensors: dict[str, Tensor],
        out: Tensor,
        *,
        seed: int = 0,
        **wishes: int,
    ) -> str | None:
        """Runs an operator into `out`: None if there is no such plan, else what went wrong."""
        assert wishes.keys() <= self.wishes.keys()
        place = {"fprop": "dy", "dgrad": "x", "wgrad": "w"}[operator]
        fields = ShimEngine.fields(case, tensors | {place: out}, True)
        pointers = (ctypes.c_void_p * 5)(*input_pointers(operator, tensors), out.data_ptr())
        run = getattr(self.library, f"{self.engine}_run")
        code = run(OPERATOR_NUMBER[operator], fields, pointers, *(self.wishes | wishes).values(), seed)
        if code == -1:
            return None
        return "" if code == 0 else f"error {code}, {self.library.simt_message().decode()}"

    def fault(
        self,
        operator: str,
        case: Case,
        layout: str,
        seed: int,
        dtype: torch.dtype = torch.float16,
        *,
        gaps: bool = False,
        **wishes: int,
    ) -> str | None:
        """What is wrong with a run on integers, with a bias or without, or an empty text; None without such a plan.

        Gaps: between all columns of what is written.

        What is written and planes are at any alignment, what is read in channels_last at such as boxes want. Weights
        lie in either way.
        """
        rng = random.Random(seed)
        tensors = make_tensors(case, dtype, integers, seed=seed)
        expected = references(case, tensors)[operator]
        if operator == "fprop" and rng.random() < 0.5:
            expected -= tensors.pop("bias").double().view(-1, 1, 1)
        pixels = layout == "channels_last"
        order, back = ((0, 2, 3, 1), (0, 3, 1, 2)) if pixels else ((0, 1, 2, 3),) * 2
        shifts = [0, 8] if pixels or wishes.get("direct") == 1 else [0, 0, 8, 4, 2, 1]
        for name in ("x", "dy"):
            tensors[name] = shifted(tensors[name].permute(order), rng.choice(shifts)).permute(back)
        if rng.random() < 0.7:
            tensors["w"] = VIEWS["channels_last"](tensors["w"])
        if operator == "wgrad":
            order, back = rng.choice([((0, 2, 3, 1), (0, 3, 1, 2)), ((0, 1, 2, 3),) * 2])
        shift = rng.choice([0, 0, 8, 8, 2] if operator != "wgrad" and pixels else shifts)
        room = torch.full((*expected.shape[:3], expected.shape[3] * (1 + gaps)), math.nan, dtype=dtype)
        inner = shifted(room.permute(order), shift)
        out = inner.permute(back)[..., :: 1 + gaps]
        between = inner.permute(back)[..., 1::2] if gaps else room
        message = self.run(operator, case, tensors, out, seed=seed, **wishes)
        if message != "":
            return message
        if not torch.equal(out, expected.to(dtype)):
            return f"{(out != expected.to(dtype)).sum()} of {out.numel()} outputs are wrong"
        return "" if margins_intact(inner) and between.isnan().all() else "written outside the output"


@built_beside_the_tests
def tma_shim(folder: Path) -> TmaShim:
    return TmaShim(folder)


# Several blocks of channels, ragged ones, one and two tiles of output channels; points and pixels left out; halos, a
# dilation, phases of a stride of 2, filters with sides of 2; images of one pixel, lines longer than a tile.
TMA_SHIM_CASES = [
    (Case(2, 72, 6, 9, 136, 3, 3, padding=(1, 1)), "fprop"),
    (Case(3, 136, 5, 8, 40, 1, 1), "fprop"),
    (Case(2, 64, 9, 12, 64, 3, 3, stride=(2, 2), padding=(1, 1)), "fprop"),
    (Case(1, 8, 11, 13, 24, 5, 3, stride=(2, 2), padding=(2, 0)), "fprop"),
    (Case(2, 24, 9, 10, 72, 3, 3, padding=(2, 3), dilation=(2, 3)), "fprop"),
    (Case(1, 16, 3, 270, 8, 2, 2), "fprop"),
    (Case(2, 40, 9, 9, 16, 1, 1, stride=(3, 2)), "fprop"),
    (Case(5, 16, 1, 1, 8, 3, 3, padding=(1, 1)), "fprop"),
    (Case(2, 24, 7, 8, 72, 3, 3, padding=(1, 1)), "dgrad"),
    (Case(2, 72, 8, 8, 136, 1, 1), "dgrad"),
    (Case(3, 16, 4, 4, 72, 3, 3, stride=(2, 2)), "fprop"),
    (Case(3, 72, 9, 4, 16, 3, 3, stride=(2, 2), padding=(1, 0)), "fprop"),
    (Case(3, 16, 3, 9, 8, 1, 1, stride=(8, 2)), "fprop"),
    (Case(3, 16, 4, 4, 72, 3, 3, stride=(2, 2)), "dgrad"),
    (Case(2, 13, 8, 8, 11, 1, 1), "fprop"),
    (Case(2, 8, 300, 1, 8, 4, 1), "fprop"),
    (Case(2, 72, 7, 9, 19, 3, 3, padding=(1, 1)), "fprop"),
    (Case(5, 24, 6, 7, 131, 1, 1), "fprop"),
    # Groups: merged, of one block and of several, the last of them in part; more outputs than inputs; as they are.
    (Case(2, 192, 6, 9, 192, 3, 3, padding=(1, 1), groups=12), "fprop"),
    (Case(2, 80, 7, 8, 160, 3, 3, stride=(2, 2), padding=(1, 1), groups=5), "fprop"),
    (Case(2, 72, 7, 9, 72, 3, 3, padding=(1, 1), groups=9), "dgrad"),
    (Case(2, 128, 6, 8, 256, 1, 1, groups=2), "fprop"),
]
TMA_SHAPES = range(11)


@pytest.mark.parametrize("number", range(len(TMA_SHIM_CASES)))
def test_tma_shim_exact(tma_shim, number):
    """Integers of both types in both memory formats, in every way there is and in each with every third tile."""
    case, operator = TMA_SHIM_CASES[number]
    seen = set()
    for way, wishes in enumerate([{"windows": 0, "direct": 0}, {"windows": 1, "direct": 0}, {"direct": 1}]):
        for i, layout in enumerate(LAYOUTS):
            for shape in list(TMA_SHAPES)[(number + way + i) % 3 :: 3] if case.groups == 1 else TMA_SHAPES:
                seed = 100 * number + 10 * shape + way
                dtype = (torch.float16, torch.bfloat16)[(shape + i) % 2]
                fault = tma_shim.fault(operator, case, layout, seed, dtype, shape=shape, **wishes)
                assert fault in (None, ""), f"{case}, {layout}, {wishes}, {shape}, {dtype}, seed {seed}: {fault}"
                if fault == "":
                    seen.add((layout, tma_shim.last("way") % 4))
    # With a single output a stride is never taken.
    stride = tuple(1 if size == 1 else step for size, step in zip(case.y_shape[2:], case.stride, strict=True))
    ways = {0} | ({1} if case.R * case.S > 1 and stride in ((1, 1), (2, 2)) else set())
    layouts = LAYOUTS if case.H * case.W > 1 else LAYOUTS[1:]  # of one pixel a layout is both, at any alignment
    layouts = layouts if case.C % 8 == 0 else LAYOUTS[:1]
    assert seen >= {(layout, way) for layout in layouts for way in ways}
    points = case.R * case.S == 1 and case.stride == (1, 1) and case.H * case.W % 8 == 0
    assert (("contiguous", 2) in seen) == points


@pytest.mark.parametrize("number", [0, 1, 8, 9, 18, 20])
def test_tma_shim_writes_between_gaps(tma_shim, number):
    """As a part of a strided dgrad is written, in both memory formats."""
    case, operator = TMA_SHIM_CASES[number]
    for layout in LAYOUTS:
        faults = [tma_shim.fault(operator, case, layout, number, gaps=True, shape=shape) for shape in TMA_SHAPES]
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
    for seed, (case, operator, wishes) in enumerate(cases):
        runs = 0
        for layout, shape in itertools.product(LAYOUTS, (2, 3, 9, 10)):
            fault = tma_shim.fault(operator, case, layout, 10 * seed + shape, shape=shape, splits=splits, **wishes)
            assert fault in (None, ""), f"{case}, {layout}, {wishes}, {shape}: {fault}"
            runs += fault == ""
        assert runs >= (1 if "windows" not in wishes else 2), case


@pytest.mark.parametrize("mutation", TMA_MUTATIONS)
def test_tma_shim_sees_what_is_missing(tma_shim, mutation):
    """The shim itself: what is left out shows in one of a few runs, which are right without it."""
    halo = Case(2, 136, 6, 9, 200, 3, 3, padding=(1, 1))
    runs: list[tuple] = [
        (halo, "fprop", "channels_last", {"windows": 1, "shape": 10}),
        (halo, "fprop", "channels_last", {"windows": 0, "shape": 10}),
        (halo, "fprop", "channels_last", {"windows": 0, "shape": 2}),
    ]
    if "groups" in mutation:
        runs = [(*TMA_SHIM_CASES[18], "channels_last", {"shape": 10})]
    elif "box is read" in mutation:  # with several tiles for each warpgroup
        runs = [(Case(23, 16, 6, 9, 200, 1, 1), "fprop", "channels_last", {"shape": 10})]
    elif "phase" in mutation:
        runs = [(TMA_SHIM_CASES[2][0], "fprop", "channels_last", {"windows": 1})]
    elif "part" in mutation:
        runs = [(halo, "fprop", "channels_last", {"splits": 2, "shape": 10})]
    elif "multiplies the filter" in mutation:  # of the GPU's way
        runs = [(*TMA_SHIM_CASES[8], "channels_last", {"shape": 10})]
    elif "pack" in mutation:
        runs = [(*TMA_SHIM_CASES[8], "channels_last", {"shape": 4})]
    elif "planes of the first" in mutation:
        runs = [(TMA_SHIM_CASES[1][0], "fprop", "contiguous", {"direct": 1})]
    elif "planes" in mutation or "copies" in mutation:
        runs = [(halo, "fprop", "contiguous", {"direct": 0})]

    def are_right() -> bool:
        return all(
            tma_shim.fault(operator, case, layout, seed, **wishes) == ""
            for seed in range(1, 4)
            for case, operator, layout, wishes in runs
        )

    assert are_right()
    with mutated(tma_shim.library, TMA_MUTATIONS, mutation):
        assert not are_right()


TMA_WGRAD_SHIM_ENTRY_POINTS = (
    """
#include <type_traits>
"""
    + PROBLEM_FROM_FIELDS
    + r"""
namespace modelnew {
static const char* refuse_all(const Problem&, Operator) { return "everything"; }
const Engine kWgradEngine{"wgrad", refuse_all, nullptr, nullptr, nullptr};
const Engine kDirectEngine{"direct", refuse_all, nullptr, nullptr, nullptr};
}  // namespace modelnew
using namespace modelnew;
using namespace modelnew::tma_wgrad;

// Plans this tile in so many parts (0: any) on a GPU of three SMs and runs it: -1 if there is no such plan.
extern "C" int tma_wgrad_run(int, const int64_t* fields, void* const* pointers, int channels, int blocks, int parts,
                             int seed) {
  const Problem problem = make_problem(fields);
  const auto address = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  Plan plan;
  if (!make_plan(problem, 3, {address(pointers[0]), address(pointers[3])}, plan, channels, blocks, parts)) return -1;
  const int64_t bytes = sum_bytes(plan) + copied_bytes(problem, plan);
  std::vector<float> room(bytes / 4 + 4, std::numeric_limits<float>::quiet_NaN());
  Pointers all{};
  all.x = pointers[0];
  all.dy = pointers[3];
  all.out = pointers[4];
  all.workspace = room.data() + (16 - address(room.data()) % 16) % 16 / 4;
  return simt_run(seed, false, [&] {
    return problem.dtype == DType::kFloat16 ? run<Half>(problem, plan, all, nullptr)
                                            : run<BFloat16>(problem, plan, all, nullptr);
  });
}
"""
)

TMA_WGRAD_MUTATIONS = {
    "multiplies before a stage is there": left_out("hopper::barrier_wait(shared.full(ring.stage)"),
    "overwrites a stage in use": left_out("hopper::barrier_wait(shared.empty(ring.stage)"),
    "gives stages back too early": ("hopper::wgmma_wait<1>();", "if (!MUTATED) hopper::wgmma_wait<1>();"),
    "an odd number of stages by turns": (
        "plan.stages -= plan.stages % 2;",
        "plan.stages -= MUTATED ? 0 : plan.stages % 2;",
    ),
    "leaves sums of no stage as they are": ("if (!keep) {", "if (!keep && !MUTATED) {"),
    "adds up all parts but one": ("part < params.parts;", "part < params.parts - MUTATED;"),
    "takes another tap": ("move_w[i] = s * params.dilation_w;", "move_w[i] = (MUTATED ? 0 : s) * params.dilation_w;"),
    "copies before the tile is there": left_out("__syncthreads();  // the tile is there"),
    "copies dy over x": (
        "to += hopper::copied_bytes(problem.N",
        "to += MUTATED ? 0 : hopper::copied_bytes(problem.N",
    ),
    "copies the first channels only": (
        "if (channel < params.channels && pixel",
        "if (channel < (MUTATED ? 8 : params.channels) && pixel",
    ),
}


class TmaWgradShim(TmaShim):
    engine, entry_points, mutations = "tma_wgrad", TMA_WGRAD_SHIM_ENTRY_POINTS, TMA_WGRAD_MUTATIONS
    wishes: ClassVar[dict[str, int]] = {"channels": 0, "blocks": 0, "parts": 0}


@built_beside_the_tests
def tma_wgrad_shim(folder: Path) -> TmaWgradShim:
    return TmaWgradShim(folder)


# Ragged channels on both sides, a stride, a dilation, points, images of one pixel.
TMA_WGRAD_SHIM_CASES = [
    Case(2, 24, 7, 9, 72, 3, 3, padding=(1, 1)),
    Case(3, 136, 5, 6, 136, 1, 1),
    Case(2, 8, 12, 11, 16, 5, 3, stride=(2, 3), padding=(2, 1)),
    Case(1, 72, 10, 10, 64, 2, 3, padding=(2, 0), dilation=(3, 2)),
    Case(70, 16, 1, 1, 8, 1, 1),
    Case(3, 8, 4, 4, 72, 3, 3, stride=(2, 2)),
    Case(3, 72, 9, 4, 8, 3, 3, stride=(2, 2), padding=(1, 0)),
    Case(3, 16, 3, 9, 8, 1, 1, stride=(8, 2)),
]
# Channels that are no multiples of 8, which planes alone may have.
TMA_WGRAD_SHIM_PLANES = [
    *TMA_WGRAD_SHIM_CASES[:5],
    Case(2, 13, 9, 8, 67, 3, 3, padding=(1, 1)),
    Case(3, 3, 12, 7, 5, 3, 2, stride=(2, 1)),
]


@pytest.mark.parametrize("number", range(len(TMA_WGRAD_SHIM_PLANES)))
def test_tma_wgrad_shim_exact_from_planes(tma_wgrad_shim, number):
    case = TMA_WGRAD_SHIM_PLANES[number]
    for seed, (channels, blocks) in enumerate(itertools.product((128, 64), (1, 3))):
        fault = tma_wgrad_shim.fault("wgrad", case, "contiguous", 10 * number + seed, channels=channels, blocks=blocks)
        assert fault == "", f"{case}, {channels}, {blocks}: {fault}"


@pytest.mark.parametrize("pixels", ["x", "dy"])
def test_tma_wgrad_shim_exact_from_planes_and_pixels(tma_wgrad_shim, pixels):
    """One of the two is copied."""
    case = TMA_WGRAD_SHIM_CASES[0]
    tensors = make_tensors(case, torch.float16, integers)
    expected = references(case, tensors)["wgrad"].half()
    tensors[pixels] = VIEWS["channels_last"](tensors[pixels])
    out = torch.full_like(expected, math.nan)
    assert tma_wgrad_shim.run("wgrad", case, tensors, out) == ""
    assert torch.equal(out, expected)


@pytest.mark.parametrize("number", range(len(TMA_WGRAD_SHIM_CASES)))
def test_tma_wgrad_shim_exact(tma_wgrad_shim, number):
    case = TMA_WGRAD_SHIM_CASES[number]
    for seed, (channels, blocks) in enumerate(itertools.product((128, 64), (1, 2, 3, 4))):
        dtype = (torch.float16, torch.bfloat16)[(number + blocks) % 2]
        for parts in (0, 2):
            wishes = {"channels": channels, "blocks": blocks, "parts": parts}
            fault = tma_wgrad_shim.fault("wgrad", case, "channels_last", 10 * number + seed, dtype, **wishes)
            assert fault == "" or (fault is None and parts), f"{case}, {dtype}, {wishes}: {fault}"


@pytest.mark.parametrize("mutation", TMA_WGRAD_MUTATIONS)
def test_tma_wgrad_shim_sees_what_is_missing(tma_wgrad_shim, mutation):
    def are_right() -> bool:
        case = Case(9, 24, 9, 10, 72, 3, 3, padding=(1, 1))
        one_stage = Case(1, 24, 5, 5, 72, 3, 3, padding=(1, 1))  # for two warpgroups by turns
        runs = [(case, 64, 1), (case, 64, 3), (case, 128, 1), (one_stage, 64, 1)]
        layout = "contiguous" if mutation.startswith("copies") else "channels_last"
        return all(
            tma_wgrad_shim.fault("wgrad", case, layout, seed, channels=channels, blocks=blocks) == ""
            for seed, (case, channels, blocks) in itertools.product(range(1, 4), runs)
        )

    assert are_right()
    with mutated(tma_wgrad_shim.library, TMA_WGRAD_MUTATIONS, mutation):
        assert not are_right()


# Behind "using namespace" of an engine's: columns as both engines have them.
TMA_COLUMNS_CHECK = r"""
// What is wrong with columns, or nothing: of each axis they number its outputs, each where the convolution has it, in
// bounds that maps have.
static std::string fault_of_columns(const hopper::Columns& columns, const hopper::Axis (&axes)[2]) {
  const auto is_corner = [](int64_t value) { return value >= -128 && value <= 127; };
  for (int i = 0; i < 2; ++i) {
    const hopper::Axis& axis = axes[i];
    const int step = columns.steps[i];
    if (!is_corner(columns.first[i]) || !is_corner(columns.last[i])) return "corners that maps do not have";
    if (step < 1 || step > 8) return "steps that maps do not have";
    if (int64_t{axis.taps - 1} * axis.dilation > 255) return "taps that columns do not reach";
    int outputs = 0;
    for (int64_t at = columns.first[i]; at < int64_t{axis.size} + columns.last[i]; at += step, ++outputs)
      if (at != int64_t{outputs} * axis.stride - axis.pad) return "a column elsewhere in x";
    if (outputs != axis.outputs) return "columns that are not as many as outputs";
  }
  return "";
}
// Whether boxes take a tensor of pixels, whose address is in bytes.
static bool has_pixels_for_boxes(const int64_t (&stride)[4], uint64_t address, const int64_t (&sizes)[4]) {
  bool has = stride[1] == 1 && sizes[1] % 8 == 0 && address % 16 == 0;
  for (int i : {0, 2, 3}) has &= sizes[i] == 1 || (stride[i] > 0 && stride[i] % 8 == 0);
  return has;
}
"""

TMA_ENTRY_POINTS = (
    """
#include <cstring>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

extern "C" {
int simt_mutation = 0;  // the number of the one that takes place, see with_mutations
}

#include "tma.cu"
namespace modelnew {
static const char* refuse_all(const Problem&, Operator) { return "everything"; }
const Engine kWgmmaEngine{"wgmma", refuse_all, nullptr, nullptr, nullptr};
const Engine kGatherEngine{"gather", refuse_all, nullptr, nullptr, nullptr};
const Engine kDirectEngine{"direct", refuse_all, nullptr, nullptr, nullptr};
}  // namespace modelnew
"""
    + PROBLEM_FROM_FIELDS
    + r"""
using namespace modelnew;
using namespace modelnew::tma;
"""
    + TMA_COLUMNS_CHECK
    + r"""
static std::set<std::string> seen;  // kinds of plans

// What is wrong with the numbers of a plan, or nothing.
static std::string fault_of_numbers(const Grouped& of, const Plan& plan, int sms) {
  const SharedLayout layout = shared_layout(plan);
  const TileShape& shape = plan.shape;
  if (layout.end > plan.smem_bytes || plan.smem_bytes > 232448) return "shared memory";
  if (layout.staging % 1024 || layout.x % 1024 || layout.w % 1024 || layout.barriers % 8) return "alignment of a part";
  if (plan.x_stage_bytes % 1024 || plan.w_stage_bytes % 1024) return "alignment of stages";
  // A warpgroup has half of the channels, or all of them; for threads it stages 64 at a time.
  const int own = shape.together ? shape.channels / 2 : shape.channels;
  const int staged = 2 * shape.slots * (plan.by_threads ? 64 : own);
  if (staged_bytes(plan) < staged || (!plan.by_threads && staged_bytes(plan) % 1024)) return "a warpgroup's staging";
  if (layout.x < layout.staging + 2 * staged_bytes(plan)) return "room for staging";
  const int slots = plan.windows ? plan.box_rows * plan.box_columns : shape.slots;
  if (plan.x_bytes != 128 * slots || plan.w_stage_bytes != 128 * shape.channels) return "bytes of a stage";
  if (plan.x_bytes >= 1 << 20 || plan.w_stage_bytes >= 1 << 20) return "more bytes than a barrier can expect";
  if (layout.w < layout.x + plan.x_stages * plan.x_stage_bytes || plan.x_stage_bytes < plan.x_bytes)
    return "room for x";
  if (layout.barriers < layout.w + plan.w_stages * plan.w_stage_bytes) return "room for weights";
  if (layout.end < layout.barriers + 8 * (4 * kMostStages + 2)) return "room for barriers";
  for (int stages : {plan.x_stages, plan.w_stages})
    if (stages < 2 || stages > kMostStages) return "stages";
  const int step_h = plan.windows ? of.stride_h : 1, step_w = plan.windows ? of.stride_w : 1;
  for (int side : {plan.box_rows * step_h, plan.box_columns * step_w, plan.tile_lines, plan.tile_columns,
                   shape.channels})
    if (side < 1 || side > 256) return "the side of a box";
  const int64_t in_tiles = int64_t{plan.tiles_k} * shape.channels;
  if (in_tiles < of.out_channels || in_tiles - shape.channels >= of.out_channels)
    return "tiles of channels";
  const int64_t blocks_c = (of.in_channels + 63) / 64;
  if (plan.x_steps != blocks_c * plan.loads || plan.w_steps != blocks_c * of.R * of.S) return "steps";
  if (plan.splits == 1 ? plan.blocks != std::min(plan.tiles, sms) : plan.blocks != plan.tiles * plan.splits)
    return "blocks of the launch";
  // Of clusters of more than two blocks not all SMs are one's.
  if (plan.blocks > (plan.splits > 2 ? sms * 10 / 11 : sms)) return "more blocks than run at once";
  if (plan.splits > 1 && layout.x + 4 * shape.slots * part_pitch(shape) > plan.smem_bytes) return "room for parts";
  if (part_pitch(shape) < shape.channels) return "a part that overlaps";
  for (int part = 0, next = 0; part < plan.splits; ++part) {
    const Share share = share_of(plan, part);
    if (share.first != next || share.last <= share.first) return "parts of the reduction";
    next = share.last;
    if (part + 1 == plan.splits && next != plan.x_steps) return "steps in no part";
  }
  // A tile's outputs read the same channels of x; of merged groups these are 64, and no parts are added up.
  if (of.groups > 1 && (of.in_channels % 64 || of.block_out % shape.channels)) return "a tile of several groups";
  if (of.groups > 1 && of.own_in < 64 && (plan.splits > 1 || plan.direct || of.in_channels != 64))
    return "merged groups in another way than is mended";
  return plan.cycles > 0 ? "" : "no estimate";
}

// What is wrong with the tiles, or nothing: every output is one slot's of one tile, which stores it where it belongs.
// The address is in values.
static std::string fault_of_tiles(const Params& params, int64_t address) {
  const Grouped& of = params.of;
  const Plan& plan = params.plan;
  const int64_t plane = int64_t{of.P} * of.Q, pixels = of.N * plane, filled = (plane + 63) / 64 * 64;
  const int slots = plan.shape.slots, vector = plan.planes && plan.splits == 1 ? plan.out_vector : 1;
  if (plan.windows && (plan.tile_lines - 1) * plan.pitch + plan.tile_columns > slots) return "outputs without a slot";
  if (plan.windows ? plan.tile_columns % vector || plan.pitch % std::min(vector, 2) : slots % vector) return "runs";
  if (vector > 1 && of.out_channels > 1 && of.out_stride[1] % vector) return "channels of y astray";
  std::vector<uint8_t> owned(plan.tiles_k * pixels);
  std::vector<int64_t> places(slots);
  for (int number = 0; number < plan.tiles; ++number) {
    const Tile tile = locate_tile(params, number);
    if (tile.k % plan.shape.channels || tile.k < 0 || tile.k >= of.out_channels) return "a tile outside";
    if (tile.n < 0 || tile.p < 0 || tile.q < 0) return "a tile in front of y";
    uint8_t* const of_channels = &owned[tile.k / plan.shape.channels * pixels];
    for (int slot = 0; slot < slots; ++slot) {
      int64_t n = tile.n, p = tile.p + slot / plan.pitch, q = tile.q + slot % plan.pitch;
      bool exists = slot / plan.pitch < plan.tile_lines && slot % plan.pitch < plan.tile_columns;
      if (!plan.windows) {
        const int64_t at = tile.q + slot, image = plan.direct ? filled : plane;
        n = at / image, p = at % image / of.Q, q = at % image % of.Q;
      }
      exists &= n < of.N && p < of.P && q < of.Q;
      places[slot] = place_of_slot(params, tile, slot);
      if ((places[slot] >= 0) != exists) return "an output that is not stored, or another that is";
      if (!exists) continue;
      if (places[slot] != n * of.out_stride[0] + p * of.out_stride[2] + q * of.out_stride[3]) return "elsewhere in y";
      if (of_channels[(n * of.P + p) * of.Q + q]++) return "an output twice";
      if (!plan.by_threads && (address + places[slot]) % 8) return "a pixel of y astray";
    }
    for (int first = 0; vector > 1 && first < slots; first += vector) {
      int slot = first;
      if (plan.windows) {
        const int runs = plan.tile_columns / vector, line = first / vector / runs;
        if (line >= plan.tile_lines) break;
        slot = line * plan.pitch + first / vector % runs * vector;
      }
      if (places[slot] >= 0 && (address + places[slot]) % vector) return "outputs of planes astray";
      for (int i = 0; i < vector; ++i)
        if (places[slot + i] != (places[slot] < 0 ? -1 : places[slot] + i)) return "outputs that are no neighbours";
    }
  }
  for (uint8_t owners : owned)
    if (owners != 1) return "an output never";
  return "";
}

// What is wrong with the order of the reduction, or nothing: every tap once, and it reads what the convolution says.
static std::string fault_of_taps(const Params& params) {
  const Grouped& of = params.of;
  const Plan& plan = params.plan;
  const SharedLayout layout = shared_layout(plan);
  std::vector<uint8_t> there(of.R * of.S);
  int next = 0;
  for (int i = 0; i < plan.loads; ++i) {
    const Load& load = params.load[i];
    if (load.first_tap != next || load.taps < 1) return "taps of a stage";
    next += load.taps;
    for (int t = load.first_tap; t < next; ++t) {
      if (t >= of.R * of.S) return "a tap too many";
      const Tap& tap = params.tap[t];
      if (tap.r >= of.R || tap.s >= of.S || there[tap.r * of.S + tap.s]++) return "a tap twice";
      const int64_t last = layout.x + int64_t{plan.x_stages - 1} * plan.x_stage_bytes;
      if (tap.shift < 0 || last + (tap.shift + plan.shape.slots) * 128 > plan.smem_bytes)
        return "a slot outside shared memory";
      const bool turned = plan.transposed && of.flipped;  // taps as w has them
      const int row = (turned ? of.R - 1 - tap.r : tap.r) * of.dilation_h;
      const int column = (turned ? of.S - 1 - tap.s : tap.s) * of.dilation_w;
      if (!plan.windows) {
        if (load.row != row || load.column != column || tap.shift != 0) return "another tap than its columns have";
        continue;
      }
      // From the tile's first output on, in rows and columns of x.
      for (int line = 0; line < plan.tile_lines; ++line)
        for (int at = 0; at < plan.tile_columns; ++at) {
          const int slot = line * plan.pitch + at + tap.shift;
          if (slot >= plan.box_rows * plan.box_columns) return "a slot behind the window";
          if (load.row + slot / plan.box_columns * of.stride_h != line * of.stride_h + row) return "another row of x";
          if (load.column + slot % plan.box_columns * of.stride_w != at * of.stride_w + column)
            return "another column of x";
        }
    }
  }
  return next == of.R * of.S ? "" : "a tap never";
}

// What is wrong with where x, w and y come from and go to, or nothing. `of`: with x as the call has it.
static std::string fault_of_operands(const Grouped& of, const Plan& plan, const Alignment& address) {
  const auto whole = [](int64_t stride, int64_t size) { return size == 1 || (stride > 0 && stride % 8 == 0); };
  const auto planes = [](const int64_t (&stride)[4], int rows, int columns) {
    return (columns == 1 || stride[3] == 1) && (rows == 1 || stride[2] == columns);
  };
  if ((plan.planes || plan.copied) && !planes(of.in_stride, of.H, of.W)) return "no planes";
  if (plan.planes) {
    if (!planes(of.out_stride, of.P, of.Q)) return "no planes";
    if (address.out % (2 * plan.out_vector)) return "y astray";
    if (plan.direct == plan.copied) return "planes that are both multiplied and copied, or neither";
  } else {
    if (plan.direct) return "pixels as if they were planes";
    if (!plan.copied && !has_pixels_for_boxes(of.in_stride, address.in, {of.N, of.all_in, of.H, of.W}))
      return "pixels of x astray";
    if (plan.out_vector != 1) return "channels of pixels as if they were planes";
  }
  if (!plan.by_threads) {
    if (plan.planes || !has_pixels_for_boxes(of.out_stride, address.out, {of.N, of.out_channels, of.P, of.Q}))
      return "pixels of y astray";
  }
  if (plan.direct) {
    if (of.R * of.S != 1 || of.stride_h != 1 || of.stride_w != 1 || of.pad_h != 0 || of.pad_w != 0 || of.H != of.P ||
        of.W != of.Q)
      return "outputs that are not those of their own pixel";
    if (address.in % 16 || of.H * of.W % 8 || !whole(of.in_stride[0], of.N) || !whole(of.in_stride[1], of.all_in))
      return "planes of x astray";
  } else if (of.pad_h < 0 || of.pad_w < 0) {
    return "x that begins in front of its first row";
  }
  if (plan.windows) {
    const bool strided = of.stride_h == 2 && of.stride_w == 2 && of.dilation_h == 1 && of.dilation_w == 1;
    if (plan.pitch != plan.box_columns || (!strided && (of.stride_h != 1 || of.stride_w != 1))) return "no window";
  } else if (!plan.direct) {
    const hopper::Axis axes[2] = {{of.W, of.Q, of.S, of.stride_w, of.pad_w, of.dilation_w},
                                  {of.H, of.P, of.R, of.stride_h, of.pad_h, of.dilation_h}};
    const std::string fault = fault_of_columns(columns_of(of), axes);
    if (!fault.empty()) return fault;
  }
  // The map of weights and that of the copy, as far as they reach.
  const int64_t row = packed_row_channels(of), channels = (of.all_in + 7) / 8 * 8;
  if (row < of.in_channels || row % 8) return "rows of weights";
  if (plan.packed) {
    const int64_t bytes = packed_bytes(of, plan);
    if (bytes < 2 * of.out_channels * of.R * of.S * row) return "room for weights that are packed";
    if (plan.copied && bytes % 16) return "a copy astray";
  } else if (plan.transposed) {
    if (of.groups != 1 || of.w_stride_out != 1 || of.out_channels % 8 || address.w % 16)
      return "weights as they are, transposed";
    if (!whole(of.w_stride_in, of.in_channels) || !whole(of.w_stride_r, of.R) || !whole(of.w_stride_s, of.S))
      return "rows of transposed weights astray";
  } else {
    if (of.flipped || of.own_in != of.in_channels || of.w_stride_in != 1 || of.in_channels % 8 || address.w % 16)
      return "weights as they are";
    if (!whole(of.w_stride_out, of.out_channels) || !whole(of.w_stride_r, of.R) || !whole(of.w_stride_s, of.S))
      return "rows of weights astray";
  }
  if (plan.copied) {
    const Grouped copy = of_copy(of);
    const int64_t (&stride)[4] = copy.in_stride;
    const int64_t last = (of.N - 1) * stride[0] + (of.H - 1) * stride[2] + (of.W - 1) * stride[3];
    if (!plan.packed || copy.all_in != channels || copied_bytes(of, plan) < 2 * (last + channels))
      return "room for the copy";
    if (copied_bytes(of, plan) > int64_t{512} << 20) return "a copy that is too large";
  }
  return "";
}

static void note(const Grouped& of, const Plan& plan) {
  if (simt_mutation != 0) return;  // kinds are those of the engine as it is
  if (of.groups > 1) seen.insert(of.own_in < of.in_channels ? "merged groups" : "groups");
  const std::string tensors = plan.planes ? "planes: " : "pixels: ", parts = plan.splits > 1 ? "parts of " : "";
  seen.insert(tensors + parts + (plan.direct ? "planes as they are" : !plan.windows ? "columns" :
                                 of.stride_h == 2 ? "phases" : "windows"));
  const TileShape& shape = plan.shape;
  seen.insert(tensors + "tile of " + std::to_string(shape.channels) + " x " + std::to_string(shape.slots));
  seen.insert(tensors + std::to_string(plan.splits) + " parts");
  if (plan.planes) seen.insert((plan.windows ? "lines of " : "y by ") + std::to_string(plan.out_vector));
  if (!plan.planes) seen.insert(plan.packed ? "w packed" : plan.transposed ? "w transposed" : "w as it is");
  if (!plan.planes && plan.copied) seen.insert("planes to anywhere");
  if (!plan.planes) seen.insert(tensors + (plan.by_threads ? "y by threads" : "y by boxes"));
}

extern "C" {
void set_capability(int capability) { stand_in_capability = capability; }
const char* tma_refusal(int op, const int64_t* fields) {
  return refusal(make_problem(fields), static_cast<Operator>(op));
}
const char* tma_describe(int op, const int64_t* fields) {
  static char text[321];
  std::memset(text, 'x', sizeof text);
  describe(make_problem(fields), static_cast<Operator>(op), text, 320);  // as the binding has it
  return text[320] == 'x' && std::memchr(text, 0, 320) ? text : "written too far";
}
const char* tma_seen() {
  static std::string all;
  all.clear();
  for (const std::string& kind : seen) all += kind + "\n";
  return all.c_str();
}
double tma_cycles(int op, const int64_t* fields, uint64_t in, uint64_t w, uint64_t out) {
  const Planned& planned = plan_of(make_problem(fields), static_cast<Operator>(op), Alignment{in, w, out});
  return planned.found ? planned.plan.cycles : 0;
}
// The plan for tensors at these addresses, on a GPU of few SMs or of many, and some that are asked for: null if there
// is none, else what is wrong, or "".
const char* tma_fault(int op, const int64_t* fields, uint64_t in, uint64_t w, uint64_t out, int seed) {
  static std::string fault;
  const Problem problem = make_problem(fields);
  const Operator which = static_cast<Operator>(op);
  if (refusal_of_problem(problem, which) != nullptr) return nullptr;
  std::mt19937 random(seed);
  const auto any_of = [&](std::initializer_list<int> values) { return values.begin()[random() % values.size()]; };
  const int sms = any_of({3, 64, 132});
  const Alignment address{in, w, out};
  const Grouped of = grouped(correlation_of_problem(problem, which));
  Plan best{};
  const bool found = make_plan(of, sms, address, best);
  for (int i = 0; i < 8; ++i) {
    Wishes wishes{};
    if (i > 0) {
      wishes = {any_of({-1, static_cast<int>(random() % kTileShapeCount)}), any_of({-1, 0, 1}),
                any_of({0, 0, 1, 2, 4, 8}), any_of({-1, 0, 1})};
    }
    Params params{};
    if (!make_plan(of, sms, address, params.plan, wishes)) continue;
    if (!found) return "a plan only where one is asked for";
    const Plan& plan = params.plan;
    const TileShape& shape = plan.shape;
    const auto is = [](int wish, bool has) { return wish < 0 || wish == has; };
    const TileShape& wished = kTileShapes[wishes.shape < 0 ? 0 : wishes.shape];
    const bool same = shape.channels == wished.channels && shape.slots == wished.slots &&
                      shape.together == wished.together;
    if ((wishes.shape >= 0 && !same) || !is(wishes.windows, plan.windows) || !is(wishes.direct, plan.direct) ||
        (wishes.splits > 0 && plan.splits != wishes.splits))
      return "another plan than was asked for";
    note(of, plan);
    params.of = plan.copied ? of_copy(of) : of;
    set_numbers(params);
    fault = fault_of_numbers(params.of, plan, sms);
    if (fault.empty()) fault = fault_of_operands(of, plan, address);
    if (fault.empty()) fault = fault_of_taps(params);
    if (fault.empty()) fault = fault_of_tiles(params, out / 2);
    if (fault.empty() && plan.cycles < best.cycles) fault = "not the best plan";
    if (!fault.empty()) {
      fault += ", plan " + std::to_string(i) + " for " + std::to_string(sms) + " SMs";
      return fault.c_str();
    }
  }
  return found ? "" : nullptr;
}
}
"""
)

# Which slot is which output is the device's to say, but for both: the host compiles it as well.
TMA_PLAN_EDITS = [
    ("struct Output {", "#endif\nstruct Output {"),
    (
        "// Sums of a warp's 16 channels -> [channel][slot],",
        "#if 0\n// Sums of a warp's 16 channels -> [channel][slot],",
    ),
]

# Each puts something out of place.
TMA_PLAN_MUTATIONS = {
    "taps without their dilation": (
        "r / phases * of.dilation_h * plan.pitch",
        "r / phases * (MUTATED ? 1 : of.dilation_h) * plan.pitch",
    ),
    "phases that are one": (
        "int r = phase_h; r < of.R; r += phases",
        "int r = phase_h; r < of.R; r += MUTATED ? 1 : phases",
    ),
    "columns of another tap": ("add(r * of.dilation_h, s", "add(r * (MUTATED ? 1 : of.dilation_h), s"),
    "columns at another stride": ("{of.W, of.Q, of.S, of.stride_w,", "{of.W, of.Q, of.S, MUTATED ? 1 : of.stride_w,"),
    "columns where outputs have gaps": (
        "(plan.planes || has_dense_outputs(of))",
        "(MUTATED || plan.planes || has_dense_outputs(of))",
    ),
    "stages that begin anywhere": (
        "round_up(plan.x_bytes, kRowsAligned)",
        "round_up(plan.x_bytes, MUTATED ? 1 : kRowsAligned)",
    ),
    "boxes of any size": ("kMostBoxSide / (strided ? 2 : 1)", "kMostBoxSide / (strided && !MUTATED ? 2 : 1)"),
    "nothing behind the last window": (
        "+ (plan.x_stages - 1) * plan.x_stage_bytes + read);",
        "+ (plan.x_stages - 1) * plan.x_stage_bytes + (MUTATED ? 0 : read));",
    ),
    "a tile too few": (
        "ceil_div(of.Q, plan.tile_columns)",
        "ceil_div(of.Q - (MUTATED && of.Q > 1), plan.tile_columns)",
    ),
    "a line too many": ("/ plan.pitch + 1, of.P,", "/ plan.pitch + 1 + MUTATED, of.P,"),
    "parts of no step": ("plan.splits > plan.x_steps ||", "(plan.splits > plan.x_steps && !MUTATED) ||"),
    "clusters that wait": ("plan.tiles > room / plan.splits", "plan.tiles > (MUTATED ? sms : room) / plan.splits"),
    "x as if it were aligned": ("of.H, of.W, address.in);", "of.H, of.W, MUTATED ? 0 : address.in);"),
    "y as if it were aligned": ("of.P, of.Q, address.out);", "of.P, of.Q, MUTATED ? 0 : address.out);"),
    "planes as if they were aligned": (
        "of.H * of.W, address.in) == 8 &&",
        "of.H * of.W, MUTATED ? 0 : address.in) == 8 &&",
    ),
    "runs over the ends of lines": (
        "plan.pitch % 2 == 0 && of.Q % plan.tile_columns == 0",
        "MUTATED || (plan.pitch % 2 == 0 && of.Q % plan.tile_columns == 0)",
    ),
    "the filter as it is": ("return !of.flipped &&", "return (MUTATED || !of.flipped) &&"),
    "the filter not turned": ("if (flipped) r = of.R", "if (flipped && !MUTATED) r = of.R"),
    "no room for channels that are filled up": (
        "packed_row_channels(const Grouped& of) { return round_up(of.in_channels, 8)",
        "packed_row_channels(const Grouped& of) { return round_up(of.in_channels, MUTATED ? 1 : 8)",
    ),
    "not the best": ("plan.cycles >= best.cycles", "(MUTATED || plan.cycles >= best.cycles)"),
    "tiles of several groups": (
        "of.groups > 1 && of.block_out % plan.shape.channels != 0",
        "!MUTATED && of.groups > 1 && of.block_out % plan.shape.channels != 0",
    ),
    "parts of merged groups": (
        "!may_split(plan.shape) || of.merged()",
        "!may_split(plan.shape) || (!MUTATED && of.merged())",
    ),
}


PLANES, PIXELS = (3, 2, 1, 0), (1, 3, 2, 0)  # orders of dimensions in memory


def gapped_strides(shape: tuple[int, ...], order: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """Of a tensor of its own, or of a part of a larger one: gaps behind pixels, rows and images, or behind planes."""
    part, strides, step = rng.random() < 0.4, [0] * 4, 1
    for number, dimension in enumerate(order):
        strides[dimension] = step
        step *= shape[dimension]
        if part and (order == PIXELS or number > 0 or rng.random() < 0.1):
            step += rng.choice([0, 0, 8, 8, 24, 1] if rng.random() < 0.5 else [0])
    return tuple(strides)


class TmaPlans(MmaPlans):
    """The host part of the tma engine, in the same way."""

    engine, entry_points, mutations = "tma", TMA_ENTRY_POINTS, TMA_PLAN_MUTATIONS
    edits: ClassVar[Sequence[tuple[str, str]]] = TMA_PLAN_EDITS
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float16, torch.bfloat16)

    def fault(self, operator: str, case: Case, seed: int) -> str | None:
        """What is wrong with its plans for planes or pixels, of their own or of larger tensors, at any addresses."""
        rng = random.Random(seed)
        order = rng.choice([PLANES, PIXELS])
        other = order if rng.random() < 0.95 else rng.choice(MEMORY_ORDERS)
        strides = {
            "x": gapped_strides(case.x_shape, order, rng),
            "w": any_strides(case.w_shape, rng.choice([*MEMORY_ORDERS, (0, 3, 2, 1)]), rng),
            "dy": gapped_strides(case.y_shape, other, rng),
        }
        shifts = [0, 0, 8, 4, 2, 1] if order == PLANES else [0] * 12 + [8, 8, 4, 1]
        places = [ctypes.c_uint64(2 * rng.choice(shifts)) for _ in range(3)]
        return self("fault", operator, case, *places, seed, strides=strides, dtype=rng.choice(self.dtypes))


def pixel_strides(case: Case) -> dict[str, tuple[int, ...]]:
    """Strides of tensors in channels_last."""
    shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
    return {name: (H * W * C, 1, W * C, C) for name, (_, C, H, W) in shapes.items()}


@built_beside_the_tests
def tma_plans(folder: Path) -> TmaPlans:
    return TmaPlans(folder)


def random_tma_cases(count: int, seed: int) -> Iterator[tuple[Case, str]]:
    """One pixel to several tiles, filters up to 7x7, any stride; channels in eights and others."""
    rng = random.Random(seed)
    while count > 0:
        operator = rng.choice(WGMMA_OPERATORS)
        eights = [8, 16, 24, 64, 72, 128, 136, 8 * rng.randint(1, 37)]
        others = [1, 3, 9, 65, 100, 300, rng.randint(1, 300)] if rng.random() < 0.3 else []
        C, K = (rng.choice([*eights, *others]) for _ in range(2))
        H, W = (
            rng.choice([1, rng.randint(1, 8), rng.randint(7, 16), 4 * rng.randint(1, 8), rng.randint(most // 2, most)])
            for most in (60, rng.choice([60, 300]))
        )
        N = min(rng.choice([1, 1, 2, 3, rng.randint(1, 40)]), max(1, 20000 // (H * W)))
        R, S = rng.choice([(1, 1), (1, 1), (3, 3), (3, 3), (2, 2), (7, 7), (rng.randint(1, 7), rng.randint(1, 7))])
        stride = rng.choice([(1, 1), (1, 1), (2, 2), (2, 2), tuple(rng.choices([1, 2, 3, 8, 9, 70], k=2))])
        padding = tuple(rng.choices([0, 0, 1, 1, 2, 3, 5], k=2))
        dilation = rng.choice([(1, 1), (1, 1), (10, 12), tuple(rng.choices([1, 2, 3, 13], k=2))])
        halos = tuple(step * (taps - 1) for step, taps in zip(dilation, (R, S), strict=True))
        if rng.random() < 0.4:  # outputs as many as inputs
            padding = tuple(halo // 2 for halo in halos)
        elif rng.random() < 0.7:
            padding = tuple(map(min, padding, halos))
        case = Case(N, C, H, W, K, R, S, stride, padding, dilation)
        if min(case.y_shape) <= 0:
            continue
        if count % 8 == 0:
            own, other = rng.choice([(64, 64), (64, 128), (32, 32), (16, 32), (8, 8), (4, 4), (4, 8), (2, 2)])
            groups = rng.choice([2, 3, 4, 8, 9, 32])
            C, K = (own, other) if operator == "fprop" else (other, own)
            case = dataclasses.replace(case, C=C * groups, K=K * groups, groups=groups)
        if operator == "dgrad":  # with a stride where it is never taken
            stride = tuple(1 if size > 1 else step for size, step in zip(case.y_shape[2:], stride, strict=True))
            case = dataclasses.replace(case, stride=stride)
        yield case, operator
        count -= 1


TMA_KINDS = {
    *(
        f"{tensors}: {kind}"
        for tensors in ("planes", "pixels")
        for kind in (
            *(f"{parts}{way}" for parts in ("", "parts of ") for way in ("columns", "windows", "phases")),
            *(f"tile of 128 x {slots}" for slots in (64, 128, 192, 256)),
            *(f"tile of 64 x {slots}" for slots in (64, 128, 192, 208, 224, 232, 256)),
            *(f"{splits} parts" for splits in (1, 2, 4, 8)),
        )
    ),
    *("planes: planes as they are", "planes: parts of planes as they are", "w packed", "w as it is"),
    *("w transposed", "pixels: y by threads", "pixels: y by boxes", "groups", "merged groups", "planes to anywhere"),
    *(f"{run} {vector}" for run in ("y by", "lines of") for vector in (1, 2, 4, 8)),
}


def test_tma_plans_are_sound(tma_plans):
    """Each output once, each tap once and where the convolution says, boxes where they may be, all in shared memory."""
    planned, count = 0, 6000
    for seed, (case, operator) in enumerate(random_tma_cases(count, seed=0)):
        fault = tma_plans.fault(operator, case, seed)
        assert not fault, f"{operator} of {case}, seed {seed}: {fault}"
        planned += fault is not None
    assert planned > 0.6 * count  # others have channels or addresses that are no eights
    assert tma_plans.seen() >= TMA_KINDS


@pytest.mark.parametrize("mutation", TMA_PLAN_MUTATIONS)
def test_tma_plan_checks_see_what_is_wrong(tma_plans, mutation):
    cases = enumerate(random_tma_cases(6000, seed=0))
    with mutated(tma_plans.library, TMA_PLAN_MUTATIONS, mutation):
        assert any(tma_plans.fault(operator, case, seed) for seed, (case, operator) in cases)


@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=str)
def test_tma_estimates_grow_with_the_work(tma_plans, dtype):
    aligned, grown = [ctypes.c_uint64(0)] * 3, 0
    for number, (case, operator) in enumerate(random_tma_cases(1000, seed=1)):
        settings = {"dtype": dtype, "strides": pixel_strides(case) if number % 2 else {}}
        if tma_plans("refusal", operator, case, **settings) is not None:
            continue
        once = tma_plans("cycles", operator, case, *aligned, **settings)
        for letter in "NCK":
            double = dataclasses.replace(case, **{letter: 2 * getattr(case, letter)})
            settings["strides"] = pixel_strides(double) if number % 2 else {}
            if letter != "N" and tma_plans("refusal", operator, double, **settings) is not None:
                continue  # more channels may leave no room for a copy
            twice = tma_plans("cycles", operator, double, *aligned, **settings)
            # With as many channels as boxes want single pixels need no copy, and in channels_last filters of
            # gradients are not packed.
            single = case.H * case.W == 1 and math.prod(case.y_shape[2:]) == 1
            least = 0.5 if (single or number % 2) and getattr(case, letter) % 8 else 1
            assert twice >= least * once > 0, f"{operator} of {double}: {twice} after {once}"
            grown += twice > once
    assert grown > 1000


TMA_WGRAD_ENTRY_POINTS = (
    """
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

extern "C" {
int simt_mutation = 0;  // the number of the one that takes place, see with_mutations
}

#include "tma_wgrad.cu"
namespace modelnew {
static const char* refuse_all(const Problem&, Operator) { return "everything"; }
const Engine kWgradEngine{"wgrad", refuse_all, nullptr, nullptr, nullptr};
const Engine kDirectEngine{"direct", refuse_all, nullptr, nullptr, nullptr};
}  // namespace modelnew
"""
    + PROBLEM_FROM_FIELDS
    + r"""
using namespace modelnew;
using namespace modelnew::tma_wgrad;
"""
    + TMA_COLUMNS_CHECK
    + r"""
static std::set<std::string> seen;  // kinds of plans

// What is wrong with the numbers of a plan, or nothing.
static std::string fault_of_numbers(const Problem& problem, const Plan& plan, int sms) {
  const int64_t pixels = problem.N * problem.P * problem.Q, blocks_c = (problem.C + 63) / 64;
  const int64_t of_taps = int64_t{problem.R} * problem.S * blocks_c;
  if ((plan.channels != 64 && plan.channels != 128) || plan.blocks < 1 || plan.blocks > 4) return "no kernel's tile";
  if (plan.stage_bytes != (plan.channels / 64 + plan.blocks) * 64 * 128) return "bytes of a stage";
  if (plan.stages < 2 || plan.stages > kMostStages) return "stages";
  if (plan.channels == 64 && plan.stages % 2) return "an odd number of stages by turns";
  if (plan.smem_bytes < plan.stages * plan.stage_bytes + 2 * kMostStages * 8) return "room for stages and barriers";
  if (plan.smem_bytes > 232448) return "shared memory";
  const auto covers = [](int64_t tiles, int64_t size, int64_t all) {
    return tiles * size >= all && (tiles - 1) * size < all;
  };
  if (!covers(plan.tiles_k, plan.channels, problem.K)) return "tiles of channels";
  if (plan.blocks_c != blocks_c || !covers(plan.tiles_e, plan.blocks, of_taps)) return "tiles of weights";
  if (!covers(plan.steps, 64, pixels)) return "steps";
  if (plan.jobs != int64_t{plan.tiles_k} * plan.tiles_e * plan.parts || plan.parts < 1) return "jobs";
  if (plan.grid != std::min(plan.jobs, sms)) return "blocks of the launch";
  return plan.cycles > 0 ? "" : "no estimate";
}

// What is wrong with the jobs, or nothing: each tile of each part is one's, the parts have each pixel once, no chain of
// sums is too long and all sums find room.
static std::string fault_of_jobs(const Problem& problem, const Plan& plan) {
  Params params{};
  params.plan = plan;
  params.by_tiles = make_divisor(int64_t{plan.tiles_k} * plan.tiles_e);
  params.by_tiles_k = make_divisor(plan.tiles_k);
  const int64_t rows = int64_t{plan.tiles_k} * plan.channels, columns = row_columns(plan), sums = sums_of(plan);
  const int of_part = plan.channels == 64 ? 2 : 1;  // each warpgroup's own
  std::vector<uint8_t> owned(plan.jobs);
  std::vector<int> first(plan.parts, -1), last(plan.parts, -1);
  for (int number = 0; number < plan.jobs; ++number) {
    const Job job = locate_job(params, number);
    if (job.tile_k < 0 || job.tile_k >= plan.tiles_k || job.tile_e < 0 || job.tile_e >= plan.tiles_e || job.part < 0 ||
        job.part >= plan.parts)
      return "a job outside";
    if (owned[(job.part * plan.tiles_e + job.tile_e) * plan.tiles_k + job.tile_k]++) return "a tile twice";
    if (first[job.part] >= 0 && (first[job.part] != job.first_step || last[job.part] != job.last_step))
      return "tiles of a part that have other pixels";
    first[job.part] = job.first_step;
    last[job.part] = job.last_step;
    const int64_t part = int64_t{of_part} * job.part + of_part - 1;
    const int64_t row = part * rows + (job.tile_k + 1) * plan.channels - 1;
    if (row * columns + (int64_t{job.tile_e} + 1) * plan.blocks * 64 > sums) return "sums without room";
    const int64_t chain = (int64_t{job.last_step} - job.first_step + of_part - 1) / of_part * 64;
    if (chain > kMostChained) return "a chain that is too long";
  }
  for (int part = 0, next = 0; part < plan.parts; ++part) {
    if (first[part] != next || last[part] <= next) return "pixels of a part";
    next = last[part];
    if (part + 1 == plan.parts && next != plan.steps) return "pixels of no part";
  }
  // What is added up.
  const int64_t taps = int64_t{problem.R} * problem.S;
  if (problem.K > rows || (taps - 1) * plan.blocks_c * 64 + problem.C > columns) return "weights without sums";
  return "";
}

static void note(const Plan& plan) {
  if (simt_mutation != 0) return;  // kinds are those of the engine as it is
  seen.insert("tile of " + std::to_string(plan.channels) + " x " + std::to_string(plan.blocks));
  if (plan.copies_x && plan.copies_dy) seen.insert("copies of both");
  if (plan.copies_x != plan.copies_dy) seen.insert("a copy of one");
  if (plan.parts > 1) seen.insert("parts");
  if (plan.jobs > plan.grid) seen.insert("several jobs");
  const int64_t most = kMostChained * plan.parts * sums_of_part(plan);
  if (int64_t{plan.steps} * 64 > most - most / 8) seen.insert("the longest chains");
}

extern "C" {
void set_capability(int capability) { stand_in_capability = capability; }
const char* tma_wgrad_refusal(int op, const int64_t* fields) {
  return refusal(make_problem(fields), static_cast<Operator>(op));
}
const char* tma_wgrad_describe(int op, const int64_t* fields) {
  static char text[321];
  std::memset(text, 'x', sizeof text);
  describe(make_problem(fields), static_cast<Operator>(op), text, 320);  // as the binding has it
  return text[320] == 'x' && std::memchr(text, 0, 320) ? text : "written too far";
}
const char* tma_wgrad_seen() {
  static std::string all;
  all.clear();
  for (const std::string& kind : seen) all += kind + "\n";
  return all.c_str();
}
double tma_wgrad_cycles(int, const int64_t* fields, uint64_t x, uint64_t dy, uint64_t) {
  const Planned& planned = plan_of(make_problem(fields), Alignment{x, dy});
  return planned.found ? planned.plan.cycles : 0;
}
// The plan for tensors at these addresses, on a GPU of few SMs or of many, and some that are asked for: null if there
// is none, else what is wrong, or "".
const char* tma_wgrad_fault(int, const int64_t* fields, uint64_t x, uint64_t dy, uint64_t, int seed) {
  static std::string fault;
  const Problem p = make_problem(fields);
  std::mt19937 random(seed);
  const int sms = seed % 3 == 0 ? 3 : seed % 3 == 1 ? 64 : 132;
  const hopper::Axis of_x[2] = {{p.W, p.Q, p.S, p.Q == 1 ? 1 : p.stride_w, p.pad_w, p.dilation_w},
                                {p.H, p.P, p.R, p.P == 1 ? 1 : p.stride_h, p.pad_h, p.dilation_h}};
  const hopper::Axis of_dy[2] = {{p.Q, p.Q, 1, 1, 0, 1}, {p.P, p.P, 1, 1, 0, 1}};
  const bool in_place_x = has_pixels_for_boxes(p.x_stride, x, {p.N, p.C, p.H, p.W});
  const bool in_place_dy = has_pixels_for_boxes(p.y_stride, dy, {p.N, p.K, p.P, p.Q});
  const auto are_planes = [](const int64_t (&stride)[4], int rows, int columns) {
    return (columns == 1 || stride[3] == 1) && (rows == 1 || stride[2] == columns);
  };
  const bool may = (in_place_x || are_planes(p.x_stride, p.H, p.W)) &&
                   (in_place_dy || are_planes(p.y_stride, p.P, p.Q)) &&
                   fault_of_columns(columns_of_dy(p), of_dy).empty();
  const std::string fault_of_x = fault_of_columns(hopper::columns_of(of_x[0], of_x[1]), of_x);
  Plan best{};
  const bool found = make_plan(p, sms, Alignment{x, dy}, best);
  if (found && (best.copies_x == in_place_x || best.copies_dy == in_place_dy)) return "a copy too many or too few";
  if (found != (may && fault_of_x.empty())) {
    fault = !found ? "nothing that stands in its way" : !may ? "tensors that boxes do not take" : fault_of_x;
    return fault.c_str();
  }
  if (found && !fault_of_columns(columns_of_x(p), of_x).empty()) return "columns of x";
  for (int i = 0; i < 6 && found; ++i) {
    Plan plan = best;
    const int channels = 64 * static_cast<int>(random() % 3), blocks = random() % (kMostBlocks + 1);
    const int parts = random() % 2 ? 0 : best.parts + static_cast<int>(random() % 3) - 1;
    if (i > 0 && !make_plan(p, sms, Alignment{x, dy}, plan, channels, blocks, parts)) continue;
    if (i > 0 && ((channels > 0 && plan.channels != channels) || (blocks > 0 && plan.blocks != blocks) ||
                  (parts > 0 && plan.parts != parts)))
      return "another plan than was asked for";
    note(plan);
    fault = fault_of_numbers(p, plan, sms);
    if (fault.empty()) fault = fault_of_jobs(p, plan);
    if (fault.empty() && plan.cycles < best.cycles) fault = "not the best plan";
    if (!fault.empty()) {
      fault += ", plan " + std::to_string(i) + " for " + std::to_string(sms) + " SMs";
      return fault.c_str();
    }
  }
  return found ? "" : nullptr;
}
}
"""
)

TMA_WGRAD_PLAN_MUTATIONS = {
    "an odd number of stages by turns": (
        "if (channels == 64) plan.stages",
        "if (channels == 64 && !MUTATED) plan.stages",
    ),
    "more stages than there is room for": ("(kSharedBytes - barriers) /", "(kSharedBytes + (MUTATED ? 16384 : 0)) /"),
    "chains of any length": ("least = ceil_div(pixels,", "least = MUTATED ? 1 : ceil_div(pixels,"),
    "sums of one warpgroup": ("return plan.channels == 64 ? 2 : 1;", "return plan.channels == 64 && !MUTATED ? 2 : 1;"),
    "a tile too few": (
        "ceil_div(taps * plan.blocks_c, blocks)",
        "ceil_div(taps * plan.blocks_c - (MUTATED && taps > 1), blocks)",
    ),
    "whole stages only": (
        "(ceil_div(pixels, kStagePixels))",
        "(std::max<int64_t>(pixels - (MUTATED ? 63 : 0) + 63, 64) / 64)",
    ),
    "x as if it were aligned": ("problem.H, problem.W, address.x);", "problem.H, problem.W, MUTATED ? 0 : address.x);"),
    "dy as if it were aligned": (
        "problem.P, problem.Q, address.dy);",
        "problem.P, problem.Q, MUTATED ? 0 : address.dy);",
    ),
    "any channels of dy": (
        "is_in_place(problem.y_stride, problem.N, problem.K,",
        "is_in_place(problem.y_stride, problem.N, MUTATED ? 8 : problem.K,",
    ),
    "planes with gaps": ("if (!in_place_x && !can_copy", "if (!MUTATED && !in_place_x && !can_copy"),
    "strides that are never taken": (
        "return outputs == 1 ? 1 : stride;",
        "return outputs == 1 && !MUTATED ? 1 : stride;",
    ),
    "filters that no map reaches": (
        "if (!hopper::can_map(columns_of_x(problem)))",
        "if (!MUTATED && !hopper::can_map(columns_of_x(problem)))",
    ),
    "not the best": ("plan.cycles >= best.cycles", "(MUTATED || plan.cycles >= best.cycles)"),
}


class TmaWgradPlans(TmaPlans):
    """The host part of the tma_wgrad engine, in the same way."""

    engine, entry_points, mutations = "tma_wgrad", TMA_WGRAD_ENTRY_POINTS, TMA_WGRAD_PLAN_MUTATIONS
    edits: ClassVar[Sequence[tuple[str, str]]] = ()


@built_beside_the_tests
def tma_wgrad_plans(folder: Path) -> TmaWgradPlans:
    return TmaWgradPlans(folder)


TMA_WGRAD_KINDS = {
    *(f"tile of {channels} x {blocks}" for channels in (64, 128) for blocks in (1, 2, 3, 4)),
    *("parts", "several jobs", "the longest chains", "copies of both", "a copy of one"),
}


def test_tma_wgrad_plans_are_sound(tma_wgrad_plans):
    """Each pixel of each tile once, in short chains; planes and, in channels_last, what boxes reach, nothing else."""
    planned, count = 0, 4000
    for seed, (case, _) in enumerate(random_tma_cases(count, seed=0)):
        fault = tma_wgrad_plans.fault("wgrad", case, seed)
        assert not fault, f"{case}, seed {seed}: {fault}"
        planned += fault is not None
    assert planned > 0.4 * count
    assert tma_wgrad_plans.seen() >= TMA_WGRAD_KINDS


@pytest.mark.parametrize("mutation", TMA_WGRAD_PLAN_MUTATIONS)
def test_tma_wgrad_plan_checks_see_what_is_wrong(tma_wgrad_plans, mutation):
    cases = enumerate(random_tma_cases(4000, seed=0))
    with mutated(tma_wgrad_plans.library, TMA_WGRAD_PLAN_MUTATIONS, mutation):
        assert any(tma_wgrad_plans.fault("wgrad", case, seed) for seed, (case, _) in cases)


@pytest.mark.parametrize("strides_of", [pixel_strides, lambda _: {}], ids=["channels_last", "contiguous"])
def test_tma_wgrad_estimates_grow_with_the_work(tma_wgrad_plans, strides_of):
    aligned, grown, settings = [ctypes.c_uint64(0)] * 3, 0, {"dtype": torch.float16}
    for case, _ in random_tma_cases(1000, seed=1):
        if case.C % 8 or case.K % 8:
            continue
        if tma_wgrad_plans("refusal", "wgrad", case, strides=strides_of(case), **settings) is not None:
            continue
        once = tma_wgrad_plans("cycles", "wgrad", case, *aligned, strides=strides_of(case), **settings)
        for letter in "NCK":
            double = dataclasses.replace(case, **{letter: 2 * getattr(case, letter)})
            twice = tma_wgrad_plans("cycles", "wgrad", double, *aligned, strides=strides_of(double), **settings)
            assert twice >= once > 0, f"{double}: {twice} after {once}"
            grown += twice > once
    assert grown > 1000


def test_tma_engines_describe_their_configurations(tma_plans, tma_wgrad_plans):
    """Whole and in the 320 bytes that the binding has for it."""
    told = dict.fromkeys(("tma", "tma_wgrad"), 0)
    for number, (case, operator) in enumerate(random_tma_cases(400, seed=4)):
        settings = {"dtype": DTYPES[1 + number % 2], "strides": pixel_strides(case) if number % 3 else {}}
        if tma_plans("refusal", operator, case, **settings) is None:
            text = tma_plans("describe", operator, case, **settings)
            assert re.fullmatch(
                r"(x copied, |x in planes, |)tile of (64|128) channels x (\d+ lines x \d+ columns, by windows|\d+ "
                r"pixels, by taps), x in \d stages of \d+ bytes, weights (packed, |)in \d of \d+, \d+ blocks for "
                r"\d+ tiles, [1248] of which share one, about [\d.e+-]+ Mcycles",
                text,
            ), text
            told["tma"] += 1
        if tma_wgrad_plans("refusal", "wgrad", case, **settings) is None:
            text = tma_wgrad_plans("describe", "wgrad", case, **settings)
            assert re.fullmatch(
                r"((x|dy|x and dy) copied, |)tile of (64|128) output channels x [1-4] blocks of 64 weights, \d stages "
                r"of 64 pixels and \d+ bytes, \d+ blocks for \d+ tiles in \d+ parts, about [\d.e+-]+ Mcycles",
                text,
            ), text
            told["tma_wgrad"] += 1
    assert min(told.values()) > 100


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


# Compile gates -------------------------------------------------------------------------------------------------------

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")

# The language standard concerns the front end and the architecture the back end, so one full list of architectures is
# enough. sm_90a is compiled as users compile it, several kernels at once, which names registers otherwise. The two
# commands run side by side: about 1 minute on 2 cores.
NVCC_GATES = {
    # Ampere and the newest that this nvcc knows; what is older is compiled by CUDA 12.1 below.
    "C++17, sm_80 and sm_120": ["-std=c++17", *(f"-gencode=arch=compute_{n},code=sm_{n}" for n in (80, 120))],
    "C++20, sm_90a": ["-std=c++20", "-gencode=arch=compute_90a,code=sm_90a", "--split-compile=2"],
}
# ptxas tells of register spills. Split operands take three sets of accumulators; what is needed once a tile beside them
# has to wait in local memory, in a few hundred bytes.
SPILL_GATE = ["-Xptxas", "-v"]
SPILL = re.compile(r"Function properties for (\w+)\n +\d+ bytes stack frame, ([1-9]\d*) bytes spill stores")
SPLIT_FORMAT, SPLIT_BY_BOXES = "6FormatIfNS_4HalfELi2EE", "6FormatIfNS_4HalfELi2EEELi1ELi128E"
MOST_SPLIT_SPILL = 700
MOST_MMA_SPILL, MOST_MMA_SPILL_120 = 64, 96  # of 128 registers; a gate with sm_120 has the second
SPILLING_KERNEL = """
__global__ void __launch_bounds__(1024, 2) spill(float* p) {
  float v[64];
  #pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 64; ++i) p[i * 1024 + threadIdx.x] = v[i] * v[63 - i];
}
"""

# ptxas only remarks on it when it makes each wgmma wait for the one before (C7511, C7515, C7520: a number for each
# reason), adds waits of its own (C7517), or leaves out a setmaxnreg (C7508).
WGMMA_REMARKS = re.compile(r"\(C75\d\d\)|serialized|setmaxnreg")
SLOW_WGMMA_KERNEL = """
#include "numerics.cuh"
#include "hopper.cuh"
using namespace modelnew;
__global__ void multiply(float* p, int steps) {
#if defined(MODELNEW_SM90A)
  float acc[32];
  for (int i = 0; i < 32; ++i) acc[i] = p[i * 128 + threadIdx.x];
  for (int i = 0; i < steps; ++i) {
    hopper::wgmma_fence();
    hopper::Wgmma<Half, 64>::multiply(acc, i, i, 1);
    hopper::wgmma_commit();
    BEHIND_A_COMMIT
  }
  hopper::wgmma_wait<0>();
  for (int i = 0; i < 32; ++i) p[i * 128 + threadIdx.x] = acc[i];
#endif
}
"""


def nvcc_command(source: Path, output: Path, *flags: str) -> list[str]:
    """Nvcc as load_inline calls it, with warnings as errors."""
    common = [
        *cpp_extension.COMMON_NVCC_FLAGS,
        "--compiler-options",
        "-fPIC",
        "-Werror",
        "all-warnings",
        "--threads",
        "0",
    ]
    return ["nvcc", *common, *flags, f"-I{KERNELS}", "-c", str(source), "-o", str(output)]


def run_nvcc(source: Path, output: Path, *flags: str) -> subprocess.CompletedProcess:
    command = nvcc_command(source, output, *flags)
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


class NvccRuns:
    """Runs of nvcc, one after another beside the tests: most of these use one core, and nvcc takes minutes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.objects = folder, {}
        lines = []
        for source in ENGINE_SOURCES:
            for number, (gate, flags) in enumerate(NVCC_GATES.items()):
                output = folder / f"{source.stem}{number}.o"
                self.objects[source.name, gate] = output
                command = shlex.join(nvcc_command(source, output, *flags, *SPILL_GATE))
                lines.append(f"{command} > {output}.log 2>&1; echo $? > {output}.part; mv {output}.part {output}.code")
        self.process = subprocess.Popen(["sh", "-c", "\n".join(lines)])

    def __call__(self, source: str, gate: str) -> tuple[Path, int, str]:
        """Waits for a run: its object file, its exit status and what it printed."""
        output = self.objects[source, gate]
        code = Path(f"{output}.code")
        while not code.exists():
            assert self.process.poll() is None or code.exists(), "nvcc was not run"
            time.sleep(0.1)
        return output, int(code.read_text()), Path(f"{output}.log").read_text()


@pytest.fixture(scope="session")
def nvcc_runs(tmp_path_factory) -> Iterator[NvccRuns]:
    runs = NvccRuns(tmp_path_factory.mktemp("nvcc"))
    yield runs
    runs.process.kill()


@pytest.fixture(scope="session", autouse=True)
def nvcc_beside_the_tests(request) -> None:
    wanted = any("nvcc_runs" in item.fixturenames for item in request.session.items)
    if shutil.which("nvcc") and wanted and not is_worker(request.config):  # which worker runs them is not known yet
        request.getfixturevalue("nvcc_runs")


@pytest.mark.xdist_group("nvcc")
@needs_nvcc
@pytest.mark.parametrize("gate", NVCC_GATES)
@pytest.mark.parametrize("source", ENGINE_SOURCES, ids=lambda path: path.name)
def test_nvcc_compiles_without_spills(nvcc_runs, source, gate):
    _, code, output = nvcc_runs(source.name, gate)
    assert code == 0, output
    spills = SPILL.findall(output)
    assert len(re.findall(r" [1-9]\d* bytes spill stores", output)) == len(spills)
    for function, spilled in spills:
        assert SPLIT_FORMAT in function or "mma_kernel" in function.replace("wgmma", ""), spills
        most = MOST_MMA_SPILL_120 if "sm_120" in gate else MOST_MMA_SPILL
        assert int(spilled) <= (MOST_SPLIT_SPILL if SPLIT_FORMAT in function else most), spills
    assert not WGMMA_REMARKS.search(output), output


CUOBJDUMP = shutil.which("cuobjdump") or next(
    (str(path) for path in Path(sys.prefix).glob("lib/python*/site-packages/nvidia/cu*/bin/cuobjdump")), None
)


def machine_code(nvcc_runs: Callable, engine: str, arch: str, *others: str) -> dict[str, list[str]]:
    """Names of the instructions in each instance of an engine's main kernel, and of others, for one architecture."""
    output, code, printed = nvcc_runs(f"{engine}.cu", next(gate for gate in NVCC_GATES if arch in gate))
    assert code == 0, printed
    tools = os.environ | {"PATH": f"{Path(CUOBJDUMP).parent}{os.pathsep}{os.environ['PATH']}"}  # it calls nvdisasm
    command = [CUOBJDUMP, "-sass", "-arch", arch, str(output)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=tools).stdout
    _, *functions = re.split(r"Function : ", text)
    instruction = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)", re.MULTILINE)
    names = (function.split(maxsplit=1)[0] for function in functions)
    return {
        name: instruction.findall(function)
        for name, function in zip(names, functions, strict=True)
        if any(f"{kernel}_kernel" in name for kernel in (engine, *others))
    }


@pytest.mark.xdist_group("nvcc")
@needs_nvcc
@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_wgmma_is_in_the_machine_code(nvcc_runs, arch):
    """Every instance multiplies on tensor cores and moves registers on sm_90a; elsewhere there is nothing in it."""
    kernels = machine_code(nvcc_runs, "wgmma", arch)
    assert len(kernels) == (len(WGMMA_DTYPES) + 1) * 4 + 1 + 3
    for name, instructions in kernels.items():
        if arch == "sm_90a":
            # Only tiles of 256 columns are stored by boxes, and those of 128 of split operands.
            assert {"HGMMA", "USETMAXREG", "UBLKCP", "SYNCS"} <= set(instructions), name
            assert ("UTMASTG" in instructions) == ("Li256E" in name or SPLIT_BY_BOXES in name), name
        else:
            assert set(instructions) <= {"LDC", "MOV", "EXIT", "BRA", "NOP"}, name


@pytest.mark.xdist_group("nvcc")
@needs_nvcc
@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_gather_is_in_the_machine_code(nvcc_runs, arch):
    """The same: a kernel has the instructions of the ways in which x comes to it, and no others."""
    kernels = machine_code(nvcc_runs, "gather", arch)
    contained = {name for name in kernels if "FormatIfNS_4HalfE" in name}
    source_of = {name: re.search(r"SourceE(\d)E", name)[1] for name in kernels}
    # Shapes of a tile by sources, in their order: single words, fours of pixels, images, channels, boxes, phases and
    # taps in fp32; and of any source two shapes in each of the 16-bit types, and what does contained operands again.
    assert sorted(source_of.values()) == sorted("0" * 3 + "1" * 8 + "2" * 2 + "3" * 3 + "4" * 13 + "56" * 3 + "7" * 5)
    assert [source_of[name] for name in contained] == ["4"] * 5
    for name, instructions in kernels.items():
        if arch == "sm_90a":
            assert {"HGMMA", "USETMAXREG", "UBLKCP", "SYNCS"} <= set(instructions), name
            assert ("UTMALDG" in instructions) == (source_of[name] in "4567"), name
            assert ("LDGSTS" in instructions) == (source_of[name] in "0137"), name
            assert ("LDSM" in instructions) == (source_of[name] not in "12"), name  # these have single words only
        else:
            assert set(instructions) <= {"LDC", "MOV", "EXIT", "BRA", "NOP"}, name


@pytest.mark.xdist_group("nvcc")
@needs_nvcc
@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_mma_is_in_the_machine_code(nvcc_runs, arch):
    """Every instance multiplies on tensor cores and copies asynchronously; in bulk, and with clusters, on Hopper."""
    kernels = machine_code(nvcc_runs, "mma", arch)
    assert len(kernels) == 5 * 2
    hopper_only = {"UBLKCP", "UTMALDG", "UCGABAR_ARV"}
    for name, instructions in kernels.items():
        assert {"HMMA", "LDGSTS", "LDS"} <= set(instructions), name
        assert hopper_only & set(instructions) == (hopper_only if arch == "sm_90a" else set()), name


@pytest.mark.xdist_group("nvcc")
@needs_nvcc
@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_pointwise_is_in_the_machine_code(nvcc_runs, arch):
    """The same, from memory to registers, by 16 bytes but for single values, or in stages. Clusters are Hopper's."""
    kernels = machine_code(nvcc_runs, "pointwise", arch, "staged")
    staged = {name: set(instructions) for name, instructions in kernels.items() if "staged_kernel" in name}
    assert len(staged) == 2 * 3
    assert len(kernels) - len(staged) == 4 * 2
    for name, instructions in staged.items():
        assert {"HMMA", "LDGSTS", "LDSM", "LDS"} <= instructions, name
        assert not {"STS", "UCGABAR_ARV"} & instructions, name
    for name in kernels.keys() - staged.keys():
        instructions = kernels[name]
        assert {"HMMA", "LDG", "LDS", "STS"} <= set(instructions), name
        assert "LDGSTS" not in instructions, name
        assert ("UCGABAR_ARV" in instructions) == (arch == "sm_90a"), name


@pytest.mark.xdist_group("nvcc")
@needs_nvcc
@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_stem_is_in_the_machine_code(nvcc_runs, arch):
    """Every instance multiplies on tensor cores, between boxes, and moves registers on sm_90a; elsewhere nothing."""
    kernels = machine_code(nvcc_runs, "stem", arch)
    assert len(kernels) == 2 + 1 + 2 * 2
    for name, instructions in kernels.items():
        if arch == "sm_90a":
            assert {"HGMMA", "USETMAXREG", "UTMALDG", "UTMASTG", "SYNCS"} <= set(instructions), name
            assert ("LDGSTS" in instructions) == ("kernelIf" in name), name  # which copies no 16 bits
        else:
            assert set(instructions) <= {"LDC", "MOV", "EXIT", "BRA", "NOP"}, name


@needs_nvcc
def test_spill_gate_sees_spills(tmp_path):
    source = tmp_path / "spill.cu"
    source.write_text(SPILLING_KERNEL)
    run = run_nvcc(source, tmp_path / "spill.o", "-arch=sm_90", *SPILL_GATE)
    assert run.returncode == 0, run.stdout
    assert [name for name, _ in SPILL.findall(run.stdout)] == ["_Z5spillPf"], run.stdout


@needs_nvcc
@pytest.mark.parametrize(
    "behind_a_commit, passes",
    [
        ("hopper::wgmma_wait<1>();", True),
        ("hopper::wgmma_wait<1>(); acc[0] += 1;", False),
        ("if (!p[i]) return;", False),
    ],
)
def test_remarks_on_slow_wgmma_are_seen(tmp_path, behind_a_commit, passes):
    source = tmp_path / "slow.cu"
    source.write_text(SLOW_WGMMA_KERNEL.replace("BEHIND_A_COMMIT", behind_a_commit))
    run = run_nvcc(source, tmp_path / "slow.o", *NVCC_GATES["C++20, sm_90a"], *SPILL_GATE)
    assert run.returncode == 0, run.stdout
    assert (WGMMA_REMARKS.search(run.stdout) is None) == passes, run.stdout


# CUDA 12.1, the oldest that torch 2.1 comes with: its runtime compiler and assembler, as the Makefile installs them.
CUDA121 = Path(sys.prefix) / "cuda-12.1" / "nvidia"
NVRTC, PTXAS = CUDA121 / "cuda_nvrtc/lib/libnvrtc.so.12", CUDA121 / "cuda_nvcc/bin/ptxas"

# NVRTC compiles device code only. Launchers become device functions, and each launch instantiates its kernel.
RTC_HEADERS = {
    "cstdint": """
        #pragma once
        using int16_t = short; using int32_t = int; using int64_t = long long;
        using uint8_t = unsigned char; using uint16_t = unsigned short;
        using uint32_t = unsigned; using uint64_t = unsigned long long;
    """,
    "cstddef": "",
    "cstring": "",
    "cstdio": "template <class... T> int snprintf(T...) { return 0; }",
    "cstdlib": "",
    "cmath": "",
    "algorithm": """
        #pragma once
        namespace std {
        using ::cbrt;
        using ::ceil;
        using ::floor;
        template <class In, class T> In find(In from, In end, const T& value) {
          while (from != end && !(*from == value)) ++from;
          return from;
        }
        template <class T> constexpr T abs(T a) { return a < 0 ? -a : a; }
        template <class T> constexpr T max(initializer_list<T> all) {
          T most = *all.begin();
          for (const T& one : all) most = most < one ? one : most;
          return most;
        }
        template <class T> constexpr T min(initializer_list<T> all) {
          T least = *all.begin();
          for (const T& one : all) least = one < least ? one : least;
          return least;
        }
        template <class T> constexpr T min(T a, T b) { return b < a ? b : a; }
        template <class T> constexpr T max(T a, T b) { return a < b ? b : a; }
        template <class In, class N, class Out> Out copy_n(In in, N n, Out out) {
          for (N i = 0; i < n; ++i) *out++ = *in++;
          return out;
        }
        }
    """,
    "cuda_runtime_api.h": """
        #pragma once
        #define cudaGetLastError() cudaSuccess
        #define cudaGetDevice(number) cudaSuccess
        #define cudaDeviceGetAttribute(value, attribute, number) cudaSuccess
        #define cudaFuncSetAttribute(kernel, attribute, value) cudaSuccess
        #define cudaMemsetAsync(place, value, bytes, stream) cudaSuccess
        #define cudaLaunchKernelEx(config, kernel, params) (rtc::launch(kernel, 1, 1), cudaSuccess)
        #define cudaOccupancyMaxActiveClusters(found, kernel, config) (*(found) = 1, cudaSuccess)
        namespace rtc {
        struct Launch { template <class... T> void operator()(const T&...) const {} };
        template <class Kernel> Launch launch(Kernel*, dim3, dim3, size_t = 0, cudaStream_t = nullptr) { return {}; }
        }
        namespace modelnew {
        namespace hopper {
        struct BoxMap;
        enum class BoxUse { kStore, kStoreHalves, kStoreQuarters, kLoad, kLoadRows, kLoadHalves };
        template <class... T> cudaError_t make_box_map(T&&...) { return cudaSuccess; }
        template <class... T> cudaError_t make_columns_map(T&&...) { return cudaSuccess; }
        template <class Kernel, class... Params>
        cudaError_t launch_early(Kernel*, unsigned, int, size_t, cudaStream_t, const Params&...) { return cudaSuccess; }
        template <class Kernel, class... Params>
        cudaError_t launch_early_in_clusters(Kernel*, unsigned, unsigned, int, size_t, cudaStream_t, const Params&...) {
          return cudaSuccess;
        }
        struct ClusterLaunch {
          int config;
          ClusterLaunch(unsigned, int, int, int, cudaStream_t) {}
        };
        }
        }
    """,
    "type_traits": """
        #pragma once
        namespace std {
        template <class A, class B> constexpr bool is_same_v = false;
        template <class A> constexpr bool is_same_v<A, A> = true;
        }
    """,
    "utility": """
        #pragma once
        namespace std {
        template <size_t... NUMBERS> struct index_sequence {};
        template <size_t COUNT, size_t... NUMBERS> struct Counted : Counted<COUNT - 1, COUNT - 1, NUMBERS...> {};
        template <size_t... NUMBERS> struct Counted<0, NUMBERS...> { using type = index_sequence<NUMBERS...>; };
        template <size_t COUNT> using make_index_sequence = typename Counted<COUNT>::type;
        }
    """,
}


def nvrtc_ptx(source: str, *options: str) -> str:
    """PTX from CUDA 12.1's NVRTC; the compiler's log in the AssertionError. Leaves the thread in an ASCII locale."""
    nvrtc = ctypes.CDLL(str(NVRTC))
    texts = lambda strings: (ctypes.c_char_p * len(strings))(*(text.encode() for text in strings))  # noqa: E731
    program = ctypes.c_void_p()
    headers = (len(RTC_HEADERS), texts(RTC_HEADERS.values()), texts(RTC_HEADERS.keys()))
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", *headers) == 0

    def fetch(what: str) -> str:
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return buffer.value.decode()

    assert nvrtc.nvrtcCompileProgram(program, len(options), texts(options)) == 0, fetch("ProgramLog")
    return fetch("PTX")


# Of the other engines sm_80 has what sm_70 has; two have no kernel, and two take long to have none before Hopper.
# direct has nothing of Hopper's.
RTC_TARGETS = [
    (source, arch)
    for source, arch in itertools.product(ENGINE_SOURCES, ("70", "80", "90a"))
    if source.name not in ("dilated.cu", "strided.cu")
    and (arch == "90a" or source.name not in ("gather.cu", "wgmma.cu"))
    and (arch != "90a" or source.name not in ("direct.cu", "listed.cu"))
    and (arch != "80" or source.name in ("direct.cu", "mma.cu", "pointwise.cu"))
]
# What of an engine's headers is for the host alone, in other words.
RTC_HOST_PARTS = """
namespace modelnew {
Correlation correlation_of_problem(const Problem&, Operator) { return {}; }
void flatten_points(Correlation&) {}
struct ProblemKey {};
template <class... T> ProblemKey key_of(const T&...) { return {}; }
bool direct_has_points(const Problem&, Operator) { return false; }
template <class... T> bool can_multiply_contained(const T&...) { return false; }
template <class... T> cudaError_t multiply_contained(const T&...) { return {}; }
template <class... T> void describe_contained(const T&...) {}
template <class Value> struct Memo {
  Value value;
  template <class Compute> const Value& get(const ProblemKey&, const Compute& compute) { return value = compute(); }
};
}
"""

RTC_CHOICE = """
#include "divisor.cuh"
namespace modelnew {
template <int COUNT>
const Engine* first_of(const Engine* const (&)[COUNT], const Problem&, Operator, Memo<const Engine*>&) {
  return nullptr;
}
inline const char* reason_against(const Engine&, const Problem&, Operator) { return ""; }
}
"""


@pytest.fixture(scope="module")
def rtc_runs() -> Iterator[dict[tuple[str, str], Future]]:
    """PTX of every engine for every architecture, compiled in threads of their own."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        runs = {}
        for source, arch in RTC_TARGETS:
            correlate = (KERNELS / "correlate.cuh").read_text().replace("#pragma once", "")
            text = source.read_text().replace('#include "correlate.cuh"', correlate)
            text = KERNEL_LAUNCH.sub(r"rtc::launch(\1, \2)", text)
            # Launchers are hidden from NVRTC; here they are wanted.
            text = "#include <cstdint>\n" + text.replace("__CUDACC_RTC__", "MODELNEW_NEVER_DEFINED")
            text += OTHER_ENGINE if source.name == "wgmma.cu" else ""
            memo = '#include "memo.cuh"' if "memo.cuh" in text else '#include "correlation.cuh"'
            if source.name == "patches.cu":
                # It asks other engines, once it knows what an engine is.
                text = text.replace('#include "choice.cuh"\n', "").replace('#include "divisor.cuh"', RTC_CHOICE)
                memo = '#include "engines.cuh"'
                text = text.replace(memo, f"{memo}\n{memo.replace('engines', 'correlation')}{RTC_HOST_PARTS}")
            else:
                text = text.replace(memo, '#include "correlation.cuh"' + RTC_HOST_PARTS)
            if source.name == "mma.cu":
                text = re.sub(r"return run_kernel<Shape[124], EXACT>\(.*;", "return cudaErrorUnknown;", text)
            # Each type is the same code again, and takes as long; one kernel is of 16 bits alone.
            if source.name == "depthwise.cu":
                dropped = "float|BFloat16" if arch == "70" else "BFloat16"
                text = re.sub(rf"run<(?:{dropped})>\(.*;", "cudaErrorUnknown;", text)
            if source.name == "depthwise.cu" and arch == "70":  # one shape of the same code
                text = text.replace("run_queue<SHAPE + 1, Storage>(params, stream);", "cudaErrorUnknown;")
            if arch == "90a":  # narrow tiles are the same code again, and half of the time
                text = re.sub(r"return run_kernel<Format, kPixels / (64|32), \1>.*;", "return cudaErrorUnknown;", text)
                # So are those of one row of 256 columns: of the ones of 16 bits.
                two_bytes = "(kPixels == 256 && sizeof(typename Format::Stored) == 2) return"
                text = text.replace("(kPixels == 256) return", two_bytes)
                # Of gather one shape of a tile of fp32, by single values, of fp16, of contained operands and of two
                # blocks an SM, and those of three warpgroups; and what is done again, which has code for all ways in
                # which x comes. Of what is contained on its way tiles of seven rows of 64 channels, the narrowest ones
                # in channels_last and the widest ones at a stride of 2.
                all_shapes = "std::make_index_sequence<sizeof(kTileShapes) / sizeof(TileShape)>"
                assert text.count(all_shapes) == (source.name == "gather.cu")
                text = text.replace(all_shapes, "std::index_sequence<1, 4, 7, 8, 11, 12, 17, 18, 21, 22, 23>")
                text = re.sub(r"kBy(Pixels|Channels|Boxes|Phases)(?= \||\})", "0u", text)
                text = re.sub(r"kByMost(?= \||\})", "kByTaps", text)
                text = re.sub(r"return run<(?:BFloat16|Bf16)>\(.*;", "return cudaErrorUnknown;", text)
                text = re.sub(r"error = run_tile<BFloat16>\(.*;", "error = cudaErrorUnknown;", text)
                # Of tma every third tile.
                by_shape = r"return (run_source<|run_kernel<Half, SHAPE,)"
                text = re.sub(by_shape, r"if constexpr (SHAPE % 3 == 0) return \1", text)
            # Functions of the host are compiled for the GPU, which has no variables of threads.
            options = ["--std=c++17", f"--gpu-architecture=compute_{arch}", "--device-as-default-execution-space"]
            options.append("-Dthread_local=")
            runs[source.name, arch] = pool.submit(nvrtc_ptx, text, *options, f"-I{KERNELS}")
        yield runs


@pytest.mark.xdist_group("rtc")
@pytest.mark.skipif(not (NVRTC.exists() and PTXAS.exists()), reason="needs CUDA 12.1's wheels, see Makefile")
@pytest.mark.parametrize("source, arch", RTC_TARGETS, ids=lambda value: getattr(value, "name", value))
def test_device_code_under_cuda_12_1(rtc_runs, source, arch, tmp_path):
    ptx = rtc_runs[source.name, arch].result()
    kernels = set(re.findall(r"__global__ void [^;{]*?(\w+_kernel)\(", source.read_text()))
    assert kernels <= set(re.findall(r"[a-z_]+_kernel(?=I|E)", ptx)), "a kernel that nothing launches"
    (tmp_path / "kernels.ptx").write_text(ptx)
    command = [PTXAS, f"-arch=sm_{arch}", tmp_path / "kernels.ptx", "-o", tmp_path / "kernels.cubin"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not WGMMA_REMARKS.search(done.stdout + done.stderr), done.stdout + done.stderr


# Every engine that the binding's table names, and what the stand-ins say where Hopper's are left out.
LINKED_ENTRY_POINTS = """
#include "engines.cuh"
using namespace modelnew;
const Engine* const engines[] = {ENGINES};
extern "C" const char* name_of(int engine) { return engines[engine]->name; }
extern "C" const char* refusal_of(int engine) { return engines[engine]->refusal(Problem(), Operator::kFprop); }
extern "C" bool asks_gather() {
  return gather_lands(Problem(), Operator::kFprop) || gather_takes_taps_apart(Problem(), Operator::kFprop);
}
"""


@pytest.mark.xdist_group("nvcc")
@needs_nvcc
@pytest.mark.parametrize("capability, gate", zip([(8, 0), (9, 0)], NVCC_GATES, strict=True))
def test_units_of_a_gpu_link(nvcc_runs, capability, gate, tmp_path):
    """Nothing that the units need is missing or there twice, and off Hopper its engines refuse."""
    units = [u for u in modelnew._units(modelnew._sources, [capability]) if u not in ("binding.cpp", "operators.cpp")]
    objects = [nvcc_runs(unit, gate)[0] for unit in units if unit.endswith(".cu")]
    engines = ", ".join(f"&k{name.title().replace('_', '')}Engine" for name in modelnew._ENGINE_NAMES)
    (tmp_path / "entry.cpp").write_text(LINKED_ENTRY_POINTS.replace("ENGINES", engines))
    cuda_home = Path(modelnew._find_cuda_home())
    command = ["g++", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-z,defs", f"-I{KERNELS}"]
    command += [f"-I{cuda_home}/include", tmp_path / "entry.cpp", *objects]
    command += [KERNELS / unit for unit in units if unit.endswith(".cpp")]
    command += [f"-L{cuda_home}/lib64", f"-Wl,-rpath,{cuda_home}/lib64", "-lcudart", "-o", tmp_path / "linked.so"]
    linked = subprocess.run(command, capture_output=True, text=True)
    assert linked.returncode == 0, linked.stderr
    library = ctypes.CDLL(str(tmp_path / "linked.so"))
    library.name_of.restype = library.refusal_of.restype = ctypes.c_char_p
    names = [library.name_of(number).decode() for number in range(len(modelnew._ENGINE_NAMES))]
    assert tuple(names) == modelnew._ENGINE_NAMES
    hopper = {unit.removesuffix(".cu") for unit in modelnew._HOPPER_UNITS}
    assert hopper < set(names)
    if capability == (8, 0):
        for number in (names.index(name) for name in hopper):
            assert library.refusal_of(number) == b"it needs a Hopper GPU (compute capability 9.0)"
        assert not library.asks_gather()


@built_beside_the_tests
def binding_run(folder: Path) -> subprocess.CompletedProcess:
    """Against this torch, CPU build or not: only a header that says how torch's CUDA was built may be missing there."""
    stand_in = folder / "c10/cuda/impl/cuda_cmake_macros.h"
    stand_in.parent.mkdir(parents=True, exist_ok=True)
    stand_in.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    torch_home = Path(torch.__file__).parent
    includes = [KERNELS, Path(modelnew._find_cuda_home()) / "include", sysconfig.get_path("include")]
    system = [torch_home / "include", torch_home / "include/torch/csrc/api/include", folder]
    command = ["g++", f"-std={modelnew._cpp_standard()}", "-fsyntax-only", "-Wall", "-Wextra", "-Wno-unused-parameter"]
    command += ["-Werror", "-DTORCH_EXTENSION_NAME=modelnew_test", *(f"-I{path}" for path in includes)]
    command += [argument for path in system for argument in ("-isystem", str(path))]
    return subprocess.run([*command, str(KERNELS / "binding.cpp")], capture_output=True, text=True)


@pytest.mark.skipif(modelnew._find_cuda_home() is None, reason="needs CUDA's headers")
def test_binding_compiles(binding_run):
    assert binding_run.returncode == 0, binding_run.stderr


@pytest.mark.parametrize("name", ["binding.cpp", "operators.cpp", "operators.h", "screening.h"])
def test_binding_uses_no_streams(name):
    """Toolchains that link libstdc++ statically crash in std::ostream, which torch's copy has initialised otherwise."""
    assert not re.search(r"#\s*include\s*<(sstream|iostream|fstream|ostream)>", (KERNELS / name).read_text())


@pytest.mark.parametrize(
    "path", [path for path in KERNEL_FILES if path.suffix in (".cu", ".cuh")], ids=lambda path: path.name
)
def test_torch_stays_above_the_binding(path):
    """Torch headers cost more compile time than all kernels together, once nvcc sees them."""
    assert not re.search(r"#\s*include\s*[<\"](torch|ATen|c10|pybind11|Python)", path.read_text())


# modelnew against torch ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """Shapes and keyword arguments of one conv2d call, with a name that says what is special about it."""

    name: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    kwargs: dict = dataclasses.field(default_factory=dict)
    bias: int | None = None

    def __str__(self) -> str:
        return self.name

    def tensors(
        self, device: str, dtype: torch.dtype = torch.float64, requires_grad: bool = True
    ) -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(0)
        shapes = [self.x, self.w] + ([] if self.bias is None else [(self.bias,)])
        made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]
        return [tensor.requires_grad_(requires_grad) for tensor in made] + [None] * (3 - len(made))


# Each spelling that F.conv2d takes. Numbers are in double: so close to PyTorch's that only an error in kind can differ.
CALLS = [
    Call("plain", (2, 4, 9, 10), (6, 4, 3, 2)),
    Call("bias", (2, 4, 9, 10), (6, 4, 3, 2), bias=6),
    Call("unbatched", (4, 9, 10), (6, 4, 3, 3), {"padding": 1}, bias=6),
    Call("ints", (2, 4, 9, 10), (6, 2, 3, 3), {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}),
    Call("tuples", (2, 4, 9, 10), (6, 4, 3, 2), {"stride": (2, 1), "padding": (0, 3), "dilation": (1, 2)}),
    Call("lists", (2, 4, 9, 10), (6, 4, 3, 2), {"stride": [1, 2], "padding": [2, 0], "dilation": [2, 1]}),
    Call("one-element tuples", (2, 4, 9, 10), (6, 4, 3, 2), {"stride": (2,), "padding": (1,), "dilation": [1]}),
    Call("torch.Size", (2, 4, 9, 10), (6, 4, 3, 2), {"padding": torch.Size([1, 2])}),
    Call("valid", (2, 4, 9, 10), (6, 4, 3, 2), {"padding": "valid", "stride": 2}),
    Call("same, odd filter", (2, 4, 9, 10), (6, 4, 3, 5), {"padding": "same"}, bias=6),
    Call("same, even filter", (2, 4, 9, 10), (6, 4, 2, 4), {"padding": "same"}, bias=6),
    Call("same, dilated", (4, 9, 10), (6, 2, 2, 3), {"padding": "same", "dilation": (3, 2), "groups": 2}),
    Call("depthwise", (2, 4, 9, 10), (8, 1, 3, 3), {"groups": 4, "padding": 1}, bias=8),
    Call("no images", (0, 4, 9, 10), (6, 4, 3, 3), bias=6),
    Call("no input channels", (2, 0, 9, 10), (6, 0, 3, 3)),
]

# One case with everything in it. Sizes differ from one another; dx has rows that no filter meets.
RICH_CALL = Call(
    "rich", (2, 4, 8, 9), (6, 2, 3, 2), {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "groups": 2}, bias=6
)

# Wrong in one way each.
BAD_CALLS = [
    Call("input of rank 2", (9, 10), (6, 4, 3, 3)),
    Call("input of rank 5", (1, 2, 4, 9, 10), (6, 4, 3, 3)),
    Call("weight of rank 3", (2, 4, 9, 10), (6, 4, 3)),
    Call("channels differ", (2, 5, 9, 10), (6, 4, 3, 3)),
    Call("channels differ in groups", (2, 4, 9, 10), (6, 4, 3, 3), {"groups": 2}),
    Call("groups do not divide", (2, 4, 9, 10), (5, 2, 3, 3), {"groups": 2}),
    Call("no groups", (2, 4, 9, 10), (6, 4, 3, 3), {"groups": 0}),
    Call("negative groups", (2, 4, 9, 10), (6, 4, 3, 3), {"groups": -1}),
    Call("stride 0", (2, 4, 9, 10), (6, 4, 3, 3), {"stride": 0}),
    Call("negative stride", (2, 4, 9, 10), (6, 4, 3, 3), {"stride": (1, -1)}),
    Call("negative padding", (2, 4, 9, 10), (6, 4, 3, 3), {"padding": -1}),
    Call("dilation 0", (2, 4, 9, 10), (6, 4, 3, 3), {"dilation": 0}),
    Call("filter too large", (2, 4, 9, 10), (6, 4, 12, 3), {"padding": 1}),
    Call("dilated filter too large", (4, 9, 10), (6, 4, 3, 3), {"dilation": 6}),
    Call("bias of wrong length", (2, 4, 9, 10), (6, 4, 3, 3), bias=5),
    Call("same with stride", (2, 4, 9, 10), (6, 4, 3, 3), {"padding": "same", "stride": 2}),
    Call("same, even filter, input of rank 2", (9, 10), (6, 4, 2, 2), {"padding": "same"}),
    Call("same, even filter without rows", (2, 4, 9, 10), (6, 4, 0, 2), {"padding": "same"}),
    Call("unknown padding", (2, 4, 9, 10), (6, 4, 3, 3), {"padding": "full"}),
    Call("three strides", (2, 4, 9, 10), (6, 4, 3, 3), {"stride": (1, 1, 1)}),
    Call("image without rows", (2, 4, 0, 10), (6, 4, 3, 3)),
    Call("filter without rows", (2, 4, 9, 10), (6, 4, 0, 3)),
]


def outcome(function: Callable, *args: object, **kwargs: object) -> tuple[object, ...]:
    """("ok", result), or the exception's type and text."""
    try:
        return "ok", function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


def gradients(y: Tensor, tensors: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    wanted = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    weights = torch.arange(y.numel(), dtype=y.dtype, device=y.device).view(y.shape) % 7 - 3
    return torch.autograd.grad(y, wanted, weights)


def assert_same(ours: object, theirs: object) -> None:
    """Equal up to float64 rounding, in dtype, shape and memory format as well."""
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    for a, b in zip(
        ours if isinstance(ours, tuple) else (ours,), theirs if isinstance(theirs, tuple) else (theirs,), strict=True
    ):
        assert a.is_contiguous() == b.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_conv2d_is_torchs(call, device):
    tensors = call.tensors(device)
    ours, theirs = modelnew.conv2d(*tensors, **call.kwargs), F.conv2d(*tensors, **call.kwargs)
    assert_same(ours, theirs)
    assert_same(gradients(ours, tensors), gradients(theirs, tensors))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", BAD_CALLS, ids=str)
def test_bad_calls_raise_what_torch_raises(call, device):
    tensors = call.tensors(device)
    theirs = outcome(F.conv2d, *tensors, **call.kwargs)
    assert theirs[0] != "ok"
    assert outcome(modelnew.conv2d, *tensors, **call.kwargs) == theirs


@pytest.mark.parametrize("device", DEVICES)
def test_mixed_dtypes_raise_what_torch_raises(device):
    x, w, bias = CALLS[1].tensors(device, requires_grad=False)
    for mixed in ((x.float(), w, bias), (x, w.half(), bias), (x, w, bias.float()), (x.float(), w.float(), bias)):
        theirs = outcome(F.conv2d, *mixed)
        assert theirs[0] != "ok"
        assert outcome(modelnew.conv2d, *mixed) == theirs


@gpu
def test_mixed_devices_raise_what_torch_raises():
    x, w, bias = CALLS[1].tensors("cpu", requires_grad=False)
    for mixed in ((x.cuda(), w, None), (x, w.cuda(), None), (x.cuda(), w.cuda(), bias)):
        theirs = outcome(F.conv2d, *mixed)
        assert theirs[0] != "ok"
        assert outcome(modelnew.conv2d, *mixed) == theirs


WRONG_ARGUMENTS = {
    "lists for tensors": ([[1.0]], torch.ones(1, 1, 1, 1)),
    "strings for tensors": ("x", "w"),
    "no weight": (torch.ones(1, 1, 3, 3), None),
    "a bias that is a number": (torch.ones(1, 1, 3, 3), torch.ones(1, 1, 1, 1), 1.0),
    "a fractional stride": (torch.ones(1, 1, 3, 3), torch.ones(1, 1, 1, 1), None, 1.5),
    "a bool for a stride": (torch.ones(1, 1, 3, 3), torch.ones(1, 1, 1, 1), None, True),
    "an array for a padding": (torch.ones(1, 1, 3, 3), torch.ones(1, 1, 1, 1), None, 1, np.ones(2)),
    "no groups": (torch.ones(1, 1, 3, 3), torch.ones(1, 1, 1, 1), None, 1, 0, 1, None),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arguments", WRONG_ARGUMENTS)
def test_wrong_arguments_raise_type_errors(arguments, device):
    """Up to the list of what was received: we hand PyTorch the defaults as well."""
    given = [value.to(device) if isinstance(value, Tensor) else value for value in WRONG_ARGUMENTS[arguments]]
    theirs, ours = outcome(F.conv2d, *given), outcome(modelnew.conv2d, *given)
    assert ours[0] is theirs[0] is TypeError
    assert ours[1].split(" - got")[0].split("must be")[0] == theirs[1].split(" - got")[0].split("must be")[0]


def test_cpu_serves_what_torch_serves():
    """Dtypes that only the GPU kernels do not know."""
    for dtype in (torch.complex64, torch.int32):
        x, w, _ = CALLS[0].tensors("cpu", dtype, requires_grad=False)
        assert torch.equal(modelnew.conv2d(x, w), F.conv2d(x, w))


def test_signatures():
    assert str(inspect.signature(modelnew.conv2d).replace(return_annotation=inspect.Signature.empty)).count("=") == 5
    names = list(inspect.signature(modelnew.conv2d).parameters)
    assert names == ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
    parameters = inspect.signature(modelnew.ModelNew).parameters
    assert [(name, parameter.default) for name, parameter in parameters.items()][3:] == [
        ("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1), ("bias", False),
    ]  # fmt: skip
    assert list(parameters)[:3] == ["in_channels", "out_channels", "kernel_size"]


# PyTorch's own test suite, which comes inside its wheel.


@pytest.fixture(scope="module")
def conv2d_opinfo():
    methods = pytest.importorskip("torch.testing._internal.common_methods_invocations", exc_type=ImportError)
    return next(info for info in methods.op_db if info.name == "nn.functional.conv2d")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_opinfo_samples(conv2d_opinfo, device, dtype, fp32_contract):
    for sample in conv2d_opinfo.sample_inputs(device, dtype, requires_grad=True):
        tensors = [sample.input, *(arg for arg in sample.args if isinstance(arg, Tensor))]
        ours = modelnew.conv2d(sample.input, *sample.args, **sample.kwargs)
        theirs = F.conv2d(sample.input, *sample.args, **sample.kwargs)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradients(ours, tensors), gradients(theirs, tensors), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_opinfo_error_inputs(conv2d_opinfo, device):
    for bad in conv2d_opinfo.error_inputs(device):
        sample = bad.sample_input
        with pytest.raises(bad.error_type, match=bad.error_regex):
            modelnew.conv2d(sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_moduleinfo_samples(device, training):
    modules = pytest.importorskip("torch.testing._internal.common_modules", exc_type=ImportError)
    info = next(info for info in modules.module_db if info.module_cls is nn.Conv2d)
    options = {"device": device, "dtype": torch.float64, "requires_grad": True, "training": training}
    for sample in info.module_inputs_func(info, **options):
        created, called = sample.constructor_input, sample.forward_input
        layers = []
        for layer_class in (modelnew.Conv2d, nn.Conv2d):
            torch.manual_seed(0)
            layers.append(layer_class(*created.args, **created.kwargs).to(device, torch.float64).train(training))
        ours, theirs = (layer(*called.args, **called.kwargs) for layer in layers)
        assert_same(ours, theirs)
        grads = [
            gradients(y, [*called.args, *layer.parameters()]) for y, layer in zip((ours, theirs), layers, strict=True)
        ]
        assert_same(*grads)


# Layers. Each set of arguments takes another way through nn.Conv2d.
LAYER_ARGUMENTS = [
    {"kernel_size": 3},
    {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 2), "dilation": 2, "groups": 2, "bias": False},
    {"kernel_size": (2, 3), "padding": "same"},
    {"kernel_size": 3, "padding": "valid"},
    {"kernel_size": 3, "padding": (2, 1), "padding_mode": "reflect"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "replicate", "stride": 2},
    {"kernel_size": 3, "padding": "same", "padding_mode": "circular"},
    {"kernel_size": 3, "dtype": torch.float64},
]


class Model(nn.Module):
    """What ModelNew stands in for."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: object, bias: bool = False, **kwargs: object
    ) -> None:
        super().__init__()
        self.conv2d = nn.Conv2d(in_channels, out_channels, kernel_size, bias=bias, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2d(x)


def twins(ours: type[nn.Module], theirs: type[nn.Module], device: str, **kwargs: object) -> list[nn.Module]:
    """One of each, made from the same seed."""
    layers = []
    for layer_class in (ours, theirs):
        torch.manual_seed(42)
        layers.append(layer_class(4, 6, **kwargs).to(device))
    return layers


def layer_pairs() -> list:
    """(ours, theirs, arguments), for both of our layers."""
    pairs = [(modelnew.Conv2d, nn.Conv2d, arguments) for arguments in LAYER_ARGUMENTS]
    models = [arguments for arguments in LAYER_ARGUMENTS if not arguments.keys() & {"padding_mode", "dtype"}]
    pairs += [(modelnew.ModelNew, Model, arguments) for arguments in models]
    return [pytest.param(*pair, id=f"{pair[0].__name__} {pair[2]}") for pair in pairs]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ours, theirs, arguments", layer_pairs())
def test_layers_are_torchs(ours, theirs, arguments, device):
    """Same random draws, same state, same numbers, and state that moves freely between the two."""
    layer, reference = twins(ours, theirs, device, **arguments)
    assert list(layer.state_dict()) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value)
    layer, reference = layer.double(), reference.double()
    x = torch.randn(2, 4, 9, 10, dtype=torch.float64, device=device)
    assert_same(layer(x), reference(x))
    other = theirs(4, 6, **arguments).to(device, torch.float64)
    layer.load_state_dict(other.state_dict(), strict=True)
    assert_same(layer(x), other(x))


@pytest.mark.parametrize("ours, theirs", [(modelnew.Conv2d, nn.Conv2d), (modelnew.ModelNew, Model)], ids=named)
def test_bad_layers_raise_what_torch_raises(ours, theirs):
    for bad in (
        {"groups": 3},
        {"groups": 0},
        {"padding": "same", "stride": 2},
        {"padding": "full"},
        {"kernel_size": None},
    ):
        arguments = {"kernel_size": 3} | bad
        expected = outcome(theirs, 4, 6, **arguments)
        assert expected[0] != "ok"
        assert outcome(ours, 4, 6, **arguments) == expected


def test_conv2d_layer_is_an_nn_conv2d():
    layer = modelnew.Conv2d(4, 6, 3, padding=1)
    assert isinstance(layer, nn.Conv2d)
    assert repr(layer) == repr(nn.Conv2d(4, 6, 3, padding=1))
    assert outcome(modelnew.Conv2d, 4, 6, 3, padding_mode="mirror") == outcome(
        nn.Conv2d, 4, 6, 3, padding_mode="mirror"
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer_class", [modelnew.Conv2d, modelnew.ModelNew], ids=named)
def test_layers_survive_copying_and_storing(layer_class, device, tmp_path):
    layer = layer_class(4, 6, 3, padding=1, bias=True).to(device)
    x = torch.randn(2, 4, 9, 10, device=device)
    expected = layer(x)
    torch.save(layer, tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", **({"weights_only": False} if torch.__version__ >= "2.4" else {}))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(twin(x), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_model_uses_its_parameters_as_they_are(device):
    """Nothing derived from a weight outlives the call."""
    model = modelnew.ModelNew(4, 6, 3, bias=True).to(device, torch.float64)
    x = torch.randn(2, 4, 9, 10, dtype=torch.float64, device=device)

    def check() -> None:
        assert_same(model(x), F.conv2d(x, model.conv2d.weight, model.conv2d.bias))

    check()
    with torch.no_grad():
        model.conv2d.weight.mul_(2)
        check()
        model.conv2d.bias.data = torch.ones_like(model.conv2d.bias)
        check()
    model.conv2d.weight = nn.Parameter(torch.randn_like(model.conv2d.weight))
    check()
    model.conv2d.bias = None
    check()


@pytest.mark.parametrize("device", DEVICES)
def test_parametrizations(device):
    x = torch.randn(2, 4, 9, 10, dtype=torch.float64, device=device)
    for parametrize in (
        nn.utils.parametrizations.weight_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ):
        layer, reference = twins(modelnew.Conv2d, nn.Conv2d, device, kernel_size=3, dtype=torch.float64)
        parametrize(layer), parametrize(reference)
        assert_same(layer(x), reference(x))
        grads = [gradients(each(x), list(each.parameters())) for each in (layer, reference)]
        assert_same(*grads)


@pytest.mark.parametrize("device", DEVICES)
def test_memory_formats_are_torchs(device):
    """channels_last where the input or the weight is; an expanded input gives a contiguous result."""
    x, w, _ = Call("", (2, 4, 9, 10), (6, 4, 3, 3)).tensors(device, requires_grad=False)
    last = functools.partial(torch.Tensor.contiguous, memory_format=torch.channels_last)
    for a, b in ((last(x), w), (x, last(w)), (last(x), last(w)), (x[:1, :, :1, :1].expand(2, 4, 9, 10), w)):
        ours, theirs = modelnew.conv2d(a, b), F.conv2d(a, b)
        assert ours.stride() == theirs.stride()
        assert_same(ours, theirs)


def test_explain_and_force_engine_on_the_cpu():
    x, w, bias = CALLS[1].tensors("cpu", requires_grad=False)
    assert "PyTorch" in modelnew.explain(x, w, bias)
    with pytest.raises(ValueError, match="warp-drive"), modelnew.force_engine("warp-drive"):
        pass
    with modelnew.force_engine("direct"):  # concerns CUDA tensors alone
        assert torch.equal(modelnew.conv2d(x, w, bias), F.conv2d(x, w, bias))


def test_engine_names_are_the_tables():
    """Those that force_engine knows without a build, and those in the binding's table."""
    table = re.search(r"kEngines\[\] = \{(.*?)\}", (KERNELS / "engines.cuh").read_text(), re.DOTALL)[1]
    names = [re.sub(r"\B[A-Z]", r"_\g<0>", name).lower() for name in re.findall(r"&k(\w+)Engine", table)]
    assert tuple(names) == modelnew._ENGINE_NAMES
    assert {path.stem for path in ENGINE_SOURCES} == {*names, "listed"}


# Networks ------------------------------------------------------------------------------------------------------------


class Plain(nn.Conv2d):
    """A user's layer that computes what nn.Conv2d does."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, padding=1)
        self.note = "mine"

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.note}"


class OwnForward(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnConvolution(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean(), bias)


class NoSubclasses(nn.Conv2d):
    def __init_subclass__(cls) -> None:
        raise TypeError("no subclasses, please")


class Zoo(nn.Module):
    """Convolutions with whatever people do to them, for [N, 4, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        # The older ways of normalising weights warn that they are old.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.old_norms = nn.Sequential(
                nn.utils.weight_norm(nn.Conv2d(4, 4, 3, padding=1)), nn.utils.spectral_norm(nn.Conv2d(4, 4, 1))
            )
        self.norms = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, (1, 3), groups=2)),
            nn.utils.parametrizations.spectral_norm(Plain(4)),
        )
        self.pruned = prune.l1_unstructured(nn.Conv2d(4, 4, 3, padding="same"), "weight", 0.5)
        self.twice = nn.Conv2d(4, 4, 3, stride=2, padding=1, padding_mode="circular")
        self.again = self.twice  # the same module
        self.tied = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.tied.weight = self.twice.weight  # another module, the same parameter
        self.frozen = nn.Conv2d(4, 4, 1, bias=False).requires_grad_(False)
        self.dropout = nn.Dropout(0.5)
        self.bn = nn.BatchNorm2d(4)
        self.tied.mark = "a user's attribute"
        # Every dictionary of hooks has one.
        self.frozen.register_forward_pre_hook(twice_the_input)
        self.frozen.register_forward_hook(plus_one)
        self.frozen.register_full_backward_hook(no_change)
        self.frozen.register_full_backward_pre_hook(no_change)
        self.frozen.register_state_dict_pre_hook(no_change)
        self.frozen._register_state_dict_hook(no_change)
        self.frozen._register_load_state_dict_pre_hook(no_change)
        self.frozen.register_load_state_dict_post_hook(no_change)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pruned(self.norms(self.old_norms(x)))
        x = self.again(self.twice(input=x)) + self.tied(self.tied(x))
        return self.dropout(self.bn(self.frozen(x)))


def twice_the_input(_, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (2 * inputs[0],)


def plus_one(_, __, y: Tensor) -> Tensor:
    return y + 1


def no_change(*_: object) -> None:
    pass


ZOO_LAYERS = 8  # convolutions of the zoo, each module once
ZOO_CALLS = 10  # and how often they run


@pytest.fixture
def zoo() -> tuple[nn.Module, Tensor]:
    return Zoo(), torch.randn(2, 4, 9, 10)


@pytest.fixture
def ours_called(monkeypatch) -> list:
    """Grows with every call of modelnew.conv2d: on a CPU results tell nothing about who computed them."""
    called, conv2d = [], modelnew.conv2d
    monkeypatch.setattr(modelnew, "conv2d", lambda *args: called.append(args) or conv2d(*args))
    return called


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The result and all gradients of a training step that draws the same random numbers each time."""
    torch.manual_seed(2)
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def everything_about(model: nn.Module) -> list:
    """Identities of all that users can hold of a model, class names excepted."""
    found: list = []
    for name, module in model.named_modules(remove_duplicate=False):
        found.append((name, id(module), module.training))
        for key, value in vars(module).items():
            found.append((name, key, id(value)))  # the dictionaries of parameters, hooks and so on are the same objects
            found += [(name, key, k, id(v)) for k, v in value.items()] if isinstance(value, dict) else []
    return found


def test_accelerate_changes_who_computes_and_nothing_else(zoo, ours_called):
    model, x = zoo
    twin = Zoo()  # no copy: torch cannot copy weights that a norm or pruning computed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, classes = everything_about(model), [type(layer) for layer in convolutions(model)]
    state = model.state_dict()
    returned, report = modelnew.accelerate(model)
    assert returned is model
    assert everything_about(model) == before
    assert all(isinstance(layer, modelnew.Conv2d) for layer in convolutions(model))
    assert isinstance(model.norms[1], Plain)
    assert [row.replaced for row in report.layers] == [True] * ZOO_LAYERS
    assert list(model.state_dict()) == list(state)
    assert model.state_dict()._metadata == state._metadata
    results = step(model, x)
    assert len(ours_called) == ZOO_CALLS
    for ours, theirs in zip(results, step(twin, x), strict=True):
        assert torch.equal(ours, theirs)
    assert len(ours_called) == ZOO_CALLS
    optimizer.step()
    assert not torch.equal(model.twice.weight, twin.twice.weight)
    twin.load_state_dict(model.state_dict())
    assert modelnew.restore(model) is model
    assert [type(layer) for layer in convolutions(model)] == classes
    assert torch.equal(step(model, x)[0], step(twin, x)[0])
    assert len(ours_called) == ZOO_CALLS


def test_accelerating_twice_and_restoring_twice_is_harmless(zoo):
    model, _ = zoo
    classes = [type(layer) for layer in convolutions(model)]
    modelnew.restore(model)
    assert [type(layer) for layer in convolutions(model)] == classes
    _, first = modelnew.accelerate(model)
    accelerated = [type(layer) for layer in convolutions(model)]
    _, second = modelnew.accelerate(model)
    assert [type(layer) for layer in convolutions(model)] == accelerated
    assert first == second
    for _ in range(2):
        modelnew.restore(model)
        assert [type(layer) for layer in convolutions(model)] == classes


def test_a_model_that_is_a_layer(ours_called):
    layer = nn.Conv2d(4, 6, 3)
    returned, report = modelnew.accelerate(layer, torch.randn(4, 9, 10))
    assert returned is layer
    assert report.layers[0].name == ""
    assert report.layers[0].convolution == "C4 K6 3x3, 9x10"
    assert "the network itself" in str(report)
    assert len(ours_called) == 1
    assert type(modelnew.restore(layer)) is nn.Conv2d


def stored(model: nn.Module, path: Path) -> nn.Module:
    torch.save(model, path)
    return torch.load(path, **({"weights_only": False} if torch.__version__ >= "2.4" else {}))


@pytest.mark.parametrize("how", ["deepcopy", "pickle 0", "pickle 2", "pickle", "save"])
def test_copies_are_accelerated_too_and_can_be_restored(how, tmp_path, ours_called):
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), Plain(4), modelnew.Conv2d(4, 4, 3))
    model[0].mark = "a user's attribute"
    model, _ = modelnew.accelerate(model)
    x = torch.randn(2, 4, 9, 10)
    expected = model(x)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "save":
        twin = stored(model, tmp_path / "model.pt")
    else:
        protocol = [int(digit) for digit in how.split()[1:]]
        twin = pickle.loads(pickle.dumps(model, *protocol))
    assert [type(layer) for layer in twin] == [type(layer) for layer in model]
    ours_called.clear()
    assert torch.equal(twin(x), expected)
    assert len(ours_called) == 3
    assert (twin[0].mark, twin[1].note) == ("a user's attribute", "mine")
    modelnew.restore(twin)
    assert [type(layer) for layer in twin] == [nn.Conv2d, Plain, modelnew.Conv2d]
    assert torch.equal(twin(x), expected)
    assert all(isinstance(layer, modelnew.Conv2d) for layer in model)


def test_copies_of_parametrized_layers_are_their_own():
    """Copies share the class that torch made for the parametrized layer."""
    model = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 6, 3))
    shared = type(model)
    twin = copy.deepcopy(model)
    modelnew.accelerate(model)
    assert type(twin) is shared
    assert not issubclass(shared, modelnew.Conv2d)
    third = copy.deepcopy(model)
    assert isinstance(third, modelnew.Conv2d)
    modelnew.restore(third)
    assert type(third) is shared
    x = torch.randn(1, 4, 5, 5)
    assert torch.equal(model(x), third(x))
    with pytest.raises(RuntimeError, match="only supported through state_dict"):  # as torch says of its own
        pickle.dumps(model)


@pytest.mark.parametrize("make", [lambda: nn.Conv2d(4, 4, 3, padding=1), lambda: Plain(4)], ids=["nn.Conv2d", "mine"])
def test_parametrizations_come_and_go_on_accelerated_layers(make, ours_called):
    def add(layer: nn.Module) -> None:
        nn.utils.parametrizations.weight_norm(layer)

    def remove(layer: nn.Module) -> None:
        nn.utils.parametrize.remove_parametrizations(layer, "weight")

    x = torch.randn(2, 4, 9, 10)
    # Every order in which the four can happen.
    orders = [order for order in itertools.permutations("arAR") if order.index("a") < order.index("r")]
    orders = [order for order in orders if order.index("A") < order.index("R")]
    assert len(orders) == 6
    for order in orders:
        layer = make()
        original, expected = type(layer), layer(x)
        for action in order:
            {"a": add, "r": remove, "A": modelnew.accelerate, "R": modelnew.restore}[action](layer)
            ours_called.clear()
            torch.testing.assert_close(layer(x), expected)
            accelerated = order.index("A") <= order.index(action) < order.index("R")
            assert len(ours_called) == accelerated
            assert isinstance(layer, original)
            assert nn.utils.parametrize.is_parametrized(layer) == (
                order.index("a") <= order.index(action) < order.index("r")
            )
        assert type(layer) is original


def with_own(name: str) -> nn.Module:
    layer = nn.Conv2d(4, 4, 3)
    setattr(layer, name, lambda x, *_: x)
    return layer


def prepared_for_quantization() -> nn.Module:
    layer = nn.Conv2d(4, 4, 3)
    layer.qconfig = torch.ao.quantization.default_qconfig
    return layer


def trained_for_quantization() -> nn.Module:
    return torch.ao.nn.qat.Conv2d(4, 4, 3, qconfig=torch.ao.quantization.get_default_qat_qconfig())


class Wrapped(nn.Parameter):
    """A parameter that brings operators of its own, as DTensor does."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


def with_wrapped_weight() -> nn.Module:
    layer = nn.Conv2d(4, 4, 3)
    layer.weight = Wrapped(torch.randn(4, 4, 3, 3))
    return layer


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is old
        return torch.jit.script(nn.Conv2d(4, 4, 3))


LEFT_ALONE = {
    "own forward": (lambda: OwnForward(4, 4, 3), "OwnForward, has a forward of its own"),
    "own _conv_forward": (lambda: OwnConvolution(4, 4, 3), "OwnConvolution, has a _conv_forward of its own"),
    "own forward, parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(OwnForward(4, 4, 3)),
        "has a forward of its own",
    ),
    "forward on the instance": (lambda: with_own("forward"), "forward of its own, set on the instance"),
    "_conv_forward on the instance": (lambda: with_own("_conv_forward"), "_conv_forward of its own, set on"),
    "lazy": (lambda: nn.LazyConv2d(4, 3), "not initialised yet"),
    "before quantization": (prepared_for_quantization, "prepared for quantization"),
    "quantization-aware": (trained_for_quantization, "torch.ao.nn.qat.modules.conv.Conv2d, has a forward of its own"),
    "TorchScript": (scripted, "TorchScript compiled it"),
    "complex": (lambda: nn.Conv2d(4, 4, 3, dtype=torch.complex64), "parameters are complex64"),
    "tensor subclass": (with_wrapped_weight, "of type Wrapped"),
    "no subclasses": (lambda: NoSubclasses(4, 4, 3), "no subclasses, please"),
    "ours": (lambda: modelnew.Conv2d(4, 4, 3), "made as a modelnew.Conv2d"),
}


@pytest.mark.filterwarnings("ignore:.*(deprecated|Complex).*")
@pytest.mark.parametrize("make, reason", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_computes_something_else_is_left_alone_and_reported(make, reason):
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Sequential(make()))
    layer = model[1][0]
    cls, before = type(layer), dict(vars(layer))
    _, report = modelnew.accelerate(model)
    assert (type(layer), dict(vars(layer))) == (cls, before)
    row = report.layers[1]
    assert (row.name, row.replaced) == ("1.0", False)
    assert reason in row.reason
    assert f"1.0: {row.reason}" in str(report)
    assert report.layers[0].replaced
    assert "1 of 2 convolutions" in str(report)
    modelnew.restore(model)
    assert (type(layer), type(model[0])) == (cls, nn.Conv2d)


@pytest.mark.parametrize("name", ["forward", "_conv_forward"])
def test_a_patched_nn_conv2d_is_left_alone(name, monkeypatch):
    """Some patch the class for all layers at once, as for images that wrap around."""
    layer = nn.Conv2d(4, 4, 3)
    monkeypatch.setattr(nn.Conv2d, name, lambda self, x, *_: x)
    _, report = modelnew.accelerate(layer)
    assert type(layer) is nn.Conv2d
    assert f"has a {name} of its own" in report.layers[0].reason


def test_lazy_layers_are_accelerated_once_they_exist():
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3), nn.LazyConv2d(4, 3)), torch.randn(1, 4, 9, 9)
    _, report = modelnew.accelerate(model, x)
    assert "would initialise the lazy modules" in str(report)
    assert isinstance(model[1].weight, nn.UninitializedParameter)
    model(x)
    assert type(model[1]) is nn.Conv2d
    _, report = modelnew.accelerate(model, x)
    assert [row.engine for row in report.layers] == ["PyTorch"] * 2
    modelnew.restore(model)
    assert [type(layer) for layer in model] == [nn.Conv2d] * 2


def test_example_leaves_no_trace(zoo):
    model, x = zoo
    model(x).sum().backward()  # so that there are gradients, and weights that weight_norm computed
    model.frozen.eval()
    about, state = everything_about(model), copy.deepcopy(model.state_dict())
    computed, random_state = model.old_norms[0].weight, torch.random.get_rng_state()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    _, report = modelnew.accelerate(model, x)
    assert len(report.layers) == ZOO_CALLS
    assert everything_about(model) == about
    assert model.old_norms[0].weight is computed
    assert computed.grad_fn is not None
    assert torch.equal(torch.random.get_rng_state(), random_state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert grad is None or torch.equal(p.grad, grad)
    # The test sees what a pass does change.
    torch.manual_seed(3)
    random_state = torch.random.get_rng_state()
    model(x)
    assert not torch.equal(torch.random.get_rng_state(), random_state)
    for key in ("bn.running_mean", "bn.num_batches_tracked", "norms.1.parametrizations.weight.0._u"):
        assert not torch.equal(model.state_dict()[key], state[key])


class Keeping(nn.Module):
    """Keeps its last result, counts in a new buffer each time, and takes a second argument: whether both layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Conv2d(4, 2, (1, 2), stride=(1, 2))
        self.register_buffer("count", torch.zeros(()))
        self.calls = []

    def forward(self, x: Tensor, both: bool = False) -> Tensor:
        self.count = self.count + 1
        self.calls.append(torch.is_grad_enabled())
        self.last = self.second(self.first(self.first(x))) if both else self.first(x)
        return self.last


X = torch.randn(3, 4, 9, 10)


@pytest.mark.parametrize(
    "example, second",
    [(X, False), ((X,), False), ((X, True), True), ({"x": X}, False), ({"both": True, "x": X}, True)],
    ids=["tensor", "tuple of one", "tuple", "dict of one", "dict"],
)
def test_report_has_a_row_for_each_call(example, second):
    model = Keeping()
    _, report = modelnew.accelerate(model, example)
    first = ("first", "N3 C4 K4 3x3, 9x10, pad 1, groups 2", "float32", "PyTorch")
    other = ("second", "N3 C4 K2 1x2, 9x10, stride 1x2" if second else "C4 K2 1x2, stride 1x2", "float32")
    rows = [(row.name, row.convolution, row.dtype, row.engine) for row in report.layers]
    assert rows == [first] * (1 + second) + [(*other, "PyTorch" if second else None)]
    assert model.calls == [False]
    assert not hasattr(model, "last")
    assert model.count == 0
    assert ("not called with this example: second" in str(report)) == (not second)
    assert "nothing was timed" in str(report)
    assert (report.before_ms, report.after_ms) == (None, None)
    for row in rows:
        assert any(line.split()[0] == row[0] and row[1] in line for line in str(report).splitlines())


def test_without_an_example_nothing_runs():
    model = Keeping()
    _, report = modelnew.accelerate(model)
    assert model.calls == []
    assert [(row.engine, row.explanation) for row in report.layers] == [(None, "")] * 2


@pytest.mark.parametrize("arguments", [(nn.Conv2d,), ("model",), (nn.Conv2d(4, 4, 3), [X]), (nn.Conv2d(4, 4, 3), 3)])
def test_accelerate_and_restore_take_modules_and_examples(arguments):
    with pytest.raises(TypeError, match=r"torch\.nn\.Module|example_input must be"):
        modelnew.accelerate(*arguments)
    if not isinstance(arguments[0], nn.Module):
        with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
            modelnew.restore(arguments[0])
    else:
        assert type(arguments[0]) is nn.Conv2d


def test_an_example_that_fails_leaves_the_network_as_it_was(zoo):
    model, _ = zoo
    classes, about = [type(layer) for layer in convolutions(model)], everything_about(model)
    with pytest.raises(RuntimeError, match="channels"):
        modelnew.accelerate(model, torch.randn(2, 5, 9, 10))
    assert [type(layer) for layer in convolutions(model)] == classes
    assert everything_about(model) == about


def test_without_kernels_a_network_on_a_gpu_stays_as_it_is(monkeypatch):
    """accelerate() must not make a network that works one that raises."""
    monkeypatch.setattr(modelnew, "_extension", None)
    monkeypatch.setattr(modelnew, "_extension_error", "for a test")
    monkeypatch.setattr(modelnew, "_any_cuda", lambda *_: True)
    layer = nn.Conv2d(4, 4, 3)
    with pytest.raises(RuntimeError, match="for a test"):
        modelnew.accelerate(layer)
    assert type(layer) is nn.Conv2d


def test_a_network_without_convolutions():
    _, report = modelnew.accelerate(nn.Linear(4, 4), torch.randn(1, 4))
    assert "no nn.Conv2d" in str(report)
    assert report.layers == ()


def test_compiled_networks(ours_called):
    compilations = []
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()).eval(), torch.randn(1, 4, 9, 9)
    compiled = torch.compile(model, backend=lambda graph, _: compilations.append(graph) or graph.forward)
    expected = compiled(x)
    for action, count in ((modelnew.accelerate, 2), (modelnew.restore, 3)):
        action(compiled)
        assert torch.equal(compiled(x), expected)
        assert len(compilations) == count, "stale code runs"
    returned, report = modelnew.accelerate(compiled, x)
    assert returned is compiled
    assert isinstance(model[0], modelnew.Conv2d)
    assert [(row.name, row.engine) for row in report.layers] == [("0", "PyTorch")]
    assert len(compilations) == 3, "the example was compiled"
    assert len(ours_called) >= 1


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch.compiler.set_stance came with 2.6")
def test_compiled_parts_of_a_network_run_eagerly_on_the_example():
    """Compiled code does not call the hooks that look at a layer's input."""
    compilations = []
    part = torch.compile(nn.Conv2d(4, 4, 3), backend=lambda graph, _: compilations.append(graph) or graph.forward)
    model = nn.Sequential(part, nn.Conv2d(4, 4, 3))
    _, report = modelnew.accelerate(model, X)
    assert [(row.name, row.engine) for row in report.layers] == [("0._orig_mod", "PyTorch"), ("1", "PyTorch")]
    assert not compilations
    model(X)
    assert compilations


@pytest.fixture
def process_group(tmp_path) -> Iterator[None]:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("needs gloo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("first", ["accelerate", "wrap"])
def test_distributed_data_parallel(first, process_group, ours_called):
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()), torch.randn(2, 4, 9, 10)
    expected = step(model, x)
    if first == "accelerate":
        modelnew.accelerate(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    modelnew.accelerate(wrapped, x)
    ours_called.clear()
    for ours, theirs in zip(step(wrapped, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(ours_called) == 1


def test_fully_sharded_layers(process_group, ours_called):
    """fully_shard puts a class of its own over the layer's, and leaves parameters that only torch's operators know."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("fully_shard came with 2.6")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    x = torch.randn(2, 4, 9, 10)
    layer, other = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
    modelnew.accelerate(layer)
    fsdp.fully_shard(layer, mesh=mesh)
    layer(x).sum().backward()
    assert len(ours_called) == 1
    modelnew.restore(layer)
    assert type(layer).__name__ == "FSDPConv2d"
    assert not isinstance(layer, modelnew.Conv2d)
    layer(x).sum().backward()
    fsdp.fully_shard(other, mesh=mesh)
    _, report = modelnew.accelerate(other)
    assert "DTensor: accelerate before sharding" in report.layers[0].reason
    assert len(ours_called) == 1


class FakeClock:
    """CUDA's events and the host's clock, which goes on by a millisecond whenever it is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ms = 0
        monkeypatch.setattr(modelnew, "time", types.SimpleNamespace(perf_counter=lambda: self.read() / 1e3))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", no_change)
        monkeypatch.setattr(torch.cuda, "_sleep", no_change)

    def read(self) -> int:
        self.ms += 1
        return self.ms

    def convolve(self, *args: object) -> Tensor:
        """Takes 4 ms; PyTorch's takes no time."""
        self.ms += 4
        return F.conv2d(*args)


class FakeEvent:
    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    def record(self, _: object) -> None:
        self.ms = self.clock.read()

    def elapsed_time(self, end: FakeEvent) -> int:
        return end.ms - self.ms


def test_times_before_and_after_are_not_mixed_up(monkeypatch):
    """On a GPU that exists on paper only."""
    clock = FakeClock(monkeypatch)
    for name, stand_in in {
        "_any_cuda": lambda *_: True,
        "_cuda_devices": lambda *_: [torch.device("cuda", 0)],
        "_synchronize": no_change,
        "_built_extension": no_change,
        "_TIMED_RUNS": 3,
        "conv2d": clock.convolve,
        "explain": lambda *_: "the problem\nforward: wgmma; tf32; 128x128\ndgrad: direct; tf32; 1x1\n",
    }.items():
        monkeypatch.setattr(modelnew, name, stand_in)
    monkeypatch.setattr(torch.random, "fork_rng", lambda _: contextlib.nullcontext())
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), OwnForward(4, 4, 1), modelnew.Conv2d(4, 4, 1)
    )
    model.append(model[0])
    _, report = modelnew.accelerate(model.eval(), X, keep_slower=True)
    rows = {}
    for row in report.layers:
        rows.setdefault(row.name, []).append(row)
    assert [len(calls) for calls in rows.values()] == [2, 1, 1]
    for row in rows["0"]:
        assert (row.before_ms, row.after_ms) == (1, 5)
        assert (row.engine, row.explanation) == ("wgmma", "forward: wgmma; tf32; 128x128")
    assert (rows["2"][0].before_ms, rows["2"][0].after_ms, rows["2"][0].engine) == (None, None, None)
    assert (rows["3"][0].before_ms, rows["3"][0].engine) == (None, "wgmma")  # it has no time before
    assert rows["3"][0].after_ms == 5
    assert report.before_ms == pytest.approx(2 + 4)
    assert report.after_ms == pytest.approx(2 + 3 * 4)
    assert re.search(r"^0 .* wgmma +1\.0000 +5\.0000 +0\.20x$", str(report), re.MULTILINE)
    assert re.search(r"^whole network +6\.0000 +14\.0000 +0\.43x$", str(report), re.MULTILINE)
    assert isinstance(model[0], modelnew.Conv2d)
    assert all(not layer._forward_hooks and not layer._forward_pre_hooks for layer in model)


@gpu
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_gpu_report_says_what_ran_and_how_long(autocast):
    model = nn.Sequential(
        nn.Conv2d(16, 64, 3, padding=1), nn.BatchNorm2d(64), nn.Dropout(0.1), nn.Conv2d(64, 64, 3, groups=64)
    ).cuda()
    x = torch.randn(4, 16, 128, 128, device="cuda")
    state, random_state = copy.deepcopy(model.state_dict()), torch.cuda.get_rng_state()
    with torch.autocast("cuda", enabled=autocast):
        _, report = modelnew.accelerate(model, x)
        layer = model[0]
        cast = torch.float16 if autocast else torch.float32
        expected = modelnew.explain(x.to(cast), layer.weight.to(cast), layer.bias.to(cast), padding=1)
    assert f"\n{report.layers[0].explanation}\n" in expected
    assert expected.partition("forward: ")[2].startswith(report.layers[0].engine)
    assert [row.dtype for row in report.layers] == [str(cast).removeprefix("torch.")] * 2
    for row in report.layers:
        assert 0 < row.before_ms < report.before_ms
        assert 0 < row.after_ms < report.after_ms
    assert torch.equal(torch.cuda.get_rng_state(), random_state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])
    x = x.double()
    ours = model.double().eval()(x)
    assert_same(ours, modelnew.restore(model)(x))


# The engines on the GPU ----------------------------------------------------------------------------------------------

ENGINES = list(modelnew._ENGINE_NAMES)


def on_gpu(
    case: Case, tensors: dict[str, Tensor], tf32_allowed: bool = False, engine: str | None = None
) -> dict[str, Tensor]:
    """y, dx, dw and db of a case through the public functions; if an engine is named, forced, those that it takes."""
    operators = taken(engine, case, tensors, tf32_allowed)
    wanted = {name: op for name, op in (("x", "dgrad"), ("w", "wgrad"), ("bias", "bgrad")) if op in operators}
    x, w, bias = (tensors[name].detach().requires_grad_(name in wanted) for name in ("x", "w", "bias"))

    def forced(yes: bool) -> contextlib.AbstractContextManager:
        return modelnew.force_engine(engine) if engine and yes else contextlib.nullcontext()

    results = {}
    with tf32_switch(tf32_allowed), poisoned_memory():
        if operators:
            with forced("fprop" in operators):
                y = modelnew.conv2d(x, w, bias, **case.kwargs)
            results["fprop"] = y.detach()
        if wanted:
            with forced(True):
                leaves = [tensor for tensor in (x, w, bias) if tensor.requires_grad]
                results |= zip(wanted.values(), torch.autograd.grad(y, leaves, tensors["dy"]), strict=True)
    return {operator: result for operator, result in results.items() if operator in operators}


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors are full of NaN, so that elements which nobody writes show (torch 2.2 and later)."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def taken(engine: str | None, case: Case, tensors: dict[str, Tensor], tf32_allowed: bool) -> set[str]:
    """Operators of a case that the engine takes. All if none is named, or the last one: it must take them."""
    if engine in (None, ENGINES[-1]):
        return set(OPERATOR_NUMBER)
    with tf32_switch(tf32_allowed):
        text = modelnew.explain(tensors["x"], tensors["w"], tensors["bias"], **case.kwargs)
    lines = {"fprop": "forward", "dgrad": "dgrad", "wgrad": "wgrad", "bgrad": "bgrad"}
    takes = re.compile(rf"{engine};|.*; could be forced: (\w+, )*{engine}\b")
    return {
        operator for operator, line in lines.items() if re.search(rf"^{line}: ({takes.pattern})", text, re.MULTILINE)
    }


@gpu
def test_extension_is_built():
    assert modelnew._extension is not None, modelnew._extension_error
    assert tuple(modelnew._extension.engine_names()) == modelnew._ENGINE_NAMES


# Larger than a shim can run: tiles of 64 and 16 channels, of 128 and 512 pixels, from one element short to one more.
GPU_TILE_CASES = [
    Case(2, C, H, W, K, R, S, padding=(R // 2, S // 2))
    for (C, K), (H, W), (R, S) in [
        ((64, 64), (16, 128), (3, 3)),
        ((63, 65), (17, 127), (3, 3)),
        ((65, 63), (15, 129), (1, 1)),
        ((16, 128), (23, 511), (3, 5)),
        ((17, 15), (31, 513), (5, 3)),
        ((128, 16), (7, 7), (7, 7)),
        ((3, 64), (64, 65), (7, 7)),
        ((256, 257), (14, 13), (3, 3)),
        ((256, 2048), (80, 81), (3, 3)),  # so many tiles of dw that no block shares its pixels with another
    ]
]
# Layers of MobileNetV2 and ConvNeXt, and a filter of RepLKNet.
GPU_DEPTHWISE_CASES = [
    depthwise_case(N, C, H, H, R, R, stride=(stride, stride), padding=(R // 2, R // 2))
    for N, C, H, R, stride in [
        (3, 32, 112, 3, 1),
        (3, 96, 112, 3, 2),
        (5, 144, 56, 3, 1),
        (5, 144, 56, 3, 2),
        (7, 192, 28, 3, 2),
        (9, 384, 14, 3, 1),
        (9, 576, 14, 3, 2),
        (33, 960, 7, 3, 1),
        (5, 96, 56, 7, 1),
        (9, 192, 28, 7, 1),
        (17, 384, 14, 7, 1),
        (33, 768, 7, 7, 1),
        (3, 240, 28, 5, 1),
        (2, 128, 56, 31, 1),
    ]
]
GPU_EXACT_CASES = EXACT_CASES + GPU_TILE_CASES + ONE_TO_ONE_CASES + GPU_DEPTHWISE_CASES + random_cases(40, seed=1)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_gpu_exact(engine, dtype):
    """Integers, bit for bit, over every geometry; one test for each engine and dtype, since the cases are quick."""
    for case in GPU_EXACT_CASES:
        tensors = make_tensors(case, dtype, integers, "cuda")
        if results := on_gpu(case, tensors, engine=engine):
            check_exact(case, results, tensors)


@gpu
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_gpu_depthwise_exact_in_channels_last(dtype):
    for case in ONE_TO_ONE_CASES + GPU_DEPTHWISE_CASES + random_depthwise_cases(40, seed=9, most=70):
        tensors = make_tensors(case, dtype, integers, "cuda")
        tensors |= {name: tensors[name].to(memory_format=torch.channels_last) for name in ("x", "dy")}
        results = on_gpu(case, tensors, engine="depthwise")
        assert "fprop" in results
        check_exact(case, results, tensors)


# The project's reference shapes, smaller in what only takes time, a stem, and reductions from 27 to 4608 products.
GPU_ROUNDING_CASES = [
    *ROUNDING_CASES,
    Case(2, 16, 66, 258, 128, 3, 3),
    Case(1, 64, 34, 130, 128, 3, 3),
    Case(1, 64, 36, 70, 128, 5, 7),
    Case(1, 512, 14, 14, 64, 3, 3, padding=(1, 1)),
    Case(4, 3, 112, 112, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(2, 64, 56, 56, 256, 1, 1),
    Case(8, 128, 56, 57, 128, 3, 3, padding=(1, 1), groups=4),
    Case(2, 96, 40, 41, 96, 7, 7, padding=(3, 3), groups=96),
]


@gpu
@pytest.mark.parametrize("fill", FILLS, ids=named)
@pytest.mark.parametrize("tf32_allowed", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("engine", [None, *ENGINES])
def test_gpu_rounding_fp32(engine, tf32_allowed, fill):
    """Both contracts, element by element."""
    for case in GPU_ROUNDING_CASES:
        tensors = make_tensors(case, torch.float32, fill, "cuda")
        if results := on_gpu(case, tensors, tf32_allowed, engine):
            check_bounds(case, results, tensors, case.tf32_operators(torch.float32, tf32_allowed))


@gpu
@pytest.mark.parametrize("dtype, fill", OTHER_FILLS)
@pytest.mark.parametrize("engine", [None, *ENGINES])
def test_gpu_rounding_other_dtypes(engine, dtype, fill):
    for case in GPU_ROUNDING_CASES:
        tensors = make_tensors(case, dtype, fill, "cuda")
        if results := on_gpu(case, tensors, True, engine):
            check_bounds(case, results, tensors, tf32=())


@gpu
def test_gpu_agrees_with_cudnn_under_both_settings():
    """What users compare with: cuDNN, in whose noise ours must lie when both follow the same switch."""
    for case in (Case(2, 16, 130, 258, 128, 3, 3), Case(1, 64, 66, 130, 128, 3, 3), Case(1, 64, 68, 70, 128, 5, 7)):
        x = torch.rand(case.x_shape, device="cuda")
        w = nn.Conv2d(case.C, case.K, (case.R, case.S)).weight.detach().cuda()
        for allowed in (True, False):
            with tf32_switch(allowed):
                torch.testing.assert_close(modelnew.conv2d(x, w), F.conv2d(x, w), rtol=1e-4, atol=1e-4)


@gpu
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("engine", ENGINES)
def test_gpu_takes_any_strides(engine, view):
    for case in (Case(2, 6, 9, 10, 9, 3, 2, stride=(1, 2), padding=(1, 1), groups=3), Case(2, 32, 19, 23, 40, 3, 3)):
        tensors = make_tensors(case, torch.float32, integers, "cuda")
        tensors |= {name: VIEWS[view](tensors[name]) for name in ("x", "w", "dy")}
        if results := on_gpu(case, tensors, engine=engine):
            check_exact(case, results, tensors)


@gpu
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("special", [math.inf, -math.inf, struct.unpack("f", b"\xff\xff\xff\x7f")[0]], ids=str)
def test_gpu_propagates_nan_and_inf(engine, special):
    case = Case(2, 64, 66, 130, 128, 3, 3)
    assert case.tf32_operators(torch.float32, True) == set(OPERANDS)
    for allowed in (False, True):
        tensors = make_tensors(case, torch.float32, under_a_tf32_step, "cuda")
        tensors["x"].view(torch.int32)[1, 3, 5, 7] = torch.tensor(special).view(torch.int32).item()
        tensors["dy"][0, 2, 30, 4] = special
        results, expected = on_gpu(case, tensors, allowed, engine), references(case, tensors)
        for name, result in results.items():
            assert torch.equal(result.isnan(), expected[name].isnan()), name
            assert torch.equal(result.isinf(), expected[name].isinf()), name


hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def on_wgmma(case: Case, tensors: dict[str, Tensor], tf32: bool = True) -> dict[str, Tensor]:
    """y and dx of a case, by wgmma for sure."""
    results = on_gpu(case, tensors, tf32, "wgmma")
    assert set(results) == set(WGMMA_OPERATORS), f"wgmma does not take {case}"
    return results


def on_gather(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """y and, if it has no stride, dx of a case. Forced, as wgmma comes before it in the table."""
    results, x = {}, tensors["x"].detach().requires_grad_()
    with tf32_switch(True), poisoned_memory(), modelnew.force_engine("gather"):
        y = modelnew.conv2d(x, tensors["w"], tensors["bias"], **case.kwargs)
        results["fprop"] = y.detach()
        if "dgrad" in gather_operators(case):
            (results["dgrad"],) = torch.autograd.grad(y, x, tensors["dy"])
    return results


@gpu
@hopper
@pytest.mark.parametrize("dtype", WGMMA_DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", GATHER_CASES, ids=str)
def test_gpu_gather_exact(case, layout, dtype):
    tensors = in_layout(make_tensors(case, dtype, integers, "cuda"), layout)
    check_exact(case, on_gather(case, tensors), tensors)
    tensors["w"] = VIEWS["channels_last"](tensors["w"])
    check_exact(case, on_gather(case, tensors), tensors)


@gpu
@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", GATHER_APART_CASES, ids=str)
def test_gpu_gather_with_taps_apart(case, layout):
    """Exact, and within the contract's bounds."""
    for fill in (integers, *FILLS):
        tensors = in_layout(make_tensors(case, torch.float32, fill, "cuda"), layout)
        results = on_gather(case, tensors)
        if fill is integers:
            check_exact(case, results, tensors)
        else:
            check_bounds(case, results, tensors, case.tf32_operators(torch.float32, True))


@gpu
@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ADVERSE)
def test_gpu_gather_keeps_the_contract_where_fp16_does_not_fit(kind, layout):
    for case in GATHER_CASES:
        for operator in gather_operators(case):
            tensors = in_layout(adverse_tensors(case, kind, operator, "cuda"), layout)
            result = on_gather(case, tensors)[operator]
            check_bounds(case, {operator: result}, tensors, tf32={operator})


@gpu
@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [1e-9, math.nan, math.inf], ids=str)
def test_gpu_gather_mends(value, layout):
    for case in [*GATHER_CONTAINED_CASES, *GATHER_LANDING_CASES[1:], GATHER_LANDING_CHANNELS]:
        for operator in gather_operators(case):
            tensors = in_layout(misfit_tensors(operator, case, value, "cuda"), layout)
            check_misfits(operator, case, on_gather(case, tensors)[operator], tensors)


@gpu
@hopper
@pytest.mark.parametrize("last", ["x", "w"])
@pytest.mark.parametrize(
    "engine, case",
    [
        ("gather", Case(64, 64, 112, 112, 64, 1, 1)),
        ("gather", Case(64, 128, 56, 56, 128, 3, 3, stride=(2, 2), padding=(1, 1))),
        ("gather", Case(64, 64, 112, 112, 64, 3, 3, padding=(1, 1))),
        ("stem", Case(64, 3, 224, 224, 64, 7, 7, stride=(2, 2), padding=(3, 3))),
        ("mma", Case(16, 64, 56, 56, 64, 3, 3, padding=(1, 1))),
        ("mma", Case(4, 512, 14, 14, 512, 3, 3, stride=(2, 2), padding=(1, 1))),
        ("pointwise", Case(16, 64, 112, 112, 64, 1, 1)),
        ("pointwise", Case(2, 512, 28, 28, 256, 1, 1)),
    ],
    ids=str,
)
def test_gpu_waits_for_what_wrote_its_operands(engine, case, last):
    """gather's first kernel is launched early: behind kernels, in graphs behind nothing, a memset and two streams.

    What is written differs each time, by an exact factor, so that what an SM has still cached is seen to be old.
    """
    tensors = make_tensors(case, torch.float32, normal, "cuda")
    x, w = torch.empty_like(tensors["x"]), torch.empty_like(tensors["w"])
    side = torch.cuda.Stream()
    factor = torch.ones((), device="cuda")

    def written(name: str, to: Tensor) -> None:
        to.fill_(math.nan)
        torch.mul(tensors[name], factor if name == last else 1.0, out=to)

    def result(before: str = "kernels") -> Tensor:
        for name, to in [("w", w), ("x", x)] if last == "x" else [("x", x), ("w", w)]:
            if before == "streams" and name == last:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    written(name, to)
                torch.cuda.current_stream().wait_stream(side)
            elif before != "nothing":
                written(name, to)
        if before == "memset":
            torch.empty(1 << 20, device="cuda").zero_()
        return modelnew.conv2d(x, w, None, **case.kwargs)

    with tf32_switch(True), modelnew.force_engine(engine):
        expected = modelnew.conv2d(tensors["x"], tensors["w"], None, **case.kwargs)
        assert expected.isfinite().all()
        for _ in range(20):
            factor.mul_(2)
            assert torch.equal(result(), expected * factor)
        for before in ("kernels", "nothing", "memset", "streams"):
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = result(before)
            for _ in range(5):
                out.fill_(math.nan)
                factor.mul_(2)
                written("x", x)  # in front of the graph that writes nothing itself
                written("w", w)
                graph.replay()
                assert torch.equal(out, expected * factor), before


@gpu
@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case",
    [
        Case(64, 64, 56, 56, 64, 1, 1),
        Case(64, 64, 57, 57, 64, 1, 1),
        Case(64, 128, 28, 28, 128, 3, 3, padding=(1, 1)),
        Case(32, 64, 112, 112, 64, 3, 3, padding=(1, 1)),
        Case(8, 128, 65, 65, 128, 3, 3, padding=(4, 4), dilation=(4, 4)),
    ],
    ids=str,
)
def test_gpu_calls_read_what_calls_before_wrote(case, layout):
    """Four calls one right behind another, whose results lie where those of the round before did."""
    tensors = in_layout(make_tensors(case, torch.float32, normal, "cuda"), layout)
    x, w = tensors["x"], tensors["w"]
    to = [torch.empty_like(x) for _ in range(4)]
    with tf32_switch(True):

        def chain(of: Tensor) -> Tensor:
            for out in to:
                torch.cuda.synchronize()  # to begin with, each call by itself
                out.copy_(modelnew.conv2d(of, w, None, **case.kwargs))
                of = out
            return of.clone()

        expected = chain(x)
        assert expected.isfinite().all()
        assert expected.any()
        for i in range(10):
            factor = 2.0**i
            y = x * factor
            for _ in range(4):
                y = modelnew.conv2d(y, w, None, **case.kwargs)
            assert torch.equal(y, expected * factor)


@gpu
@hopper
def test_gpu_gather_is_deterministic():
    for case in GATHER_CASES:
        tensors = adverse_tensors(case, "few small", "fprop", "cuda")
        first = on_gather(case, tensors)
        for _ in range(30):
            again = on_gather(case, tensors)
            assert all(torch.equal(first[name], again[name]) for name in first)


# By the planner's choice these reach, on a Hopper GPU of 132 SMs, every shape of a tile, 1, 2, 4 and 8 blocks for one,
# and what brings x and w there; the test below tells.
MMA_CASES = [
    Case(1, 3, 224, 224, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(1, 3, 61, 67, 20, 5, 5, stride=(2, 3), padding=(2, 1)),
    Case(1, 64, 56, 56, 64, 3, 3, padding=(1, 1)),
    Case(1, 256, 14, 14, 256, 3, 3, padding=(1, 1)),
    Case(1, 512, 7, 7, 512, 3, 3, padding=(1, 1)),
    Case(1, 2048, 7, 7, 512, 1, 1),
    Case(4, 256, 8, 8, 100, 3, 3),
    Case(1, 128, 28, 28, 512, 1, 1),
    Case(2, 100, 31, 29, 72, 3, 2, stride=(1, 2), padding=(2, 0), dilation=(1, 3)),
    Case(8, 64, 57, 60, 2, 1, 1),
    Case(2, 16, 300, 500, 8, 3, 3, padding=(1, 1)),
    Case(16, 64, 96, 96, 64, 3, 3, padding=(1, 1)),
    Case(3, 48, 20, 24, 80, 3, 3, stride=(2, 1), padding=(1, 1), groups=2),
    Case(16, 8, 90, 90, 16, 1, 1),
]
MMA_VIEWS = {name: VIEWS[name] for name in ("channels_last", "sliced", "every other")} | {
    "contiguous": lambda tensor: tensor,
    "off by one": lambda tensor: shifted(tensor, 1),
    "one image": lambda tensor: tensor[:1].expand_as(tensor),
}


def test_mma_cases_reach_every_way(mma_plans):
    """That the cases for the GPU do not miss a shape of a tile, or a kind of copy, or a number of blocks."""
    told = set()
    for case, operator, layout in itertools.product(MMA_CASES, WGMMA_OPERATORS, LAYOUTS):
        if operator == "dgrad" and case.stride != (1, 1):
            continue
        strides = layout_strides(case, layout)
        assert mma_plans("refusal", operator, case, strides=strides) is None, case
        text = mma_plans("describe", operator, case, strides=strides)
        by_x, by_w, blocks = re.search(r" x by ([a-z ]+), weights by ([a-z ]+),.*for (\d) blocks", text).groups()
        shape = mma_plans("shape", operator, case, strides=strides)
        told |= {f"shape {shape}", f"x by {by_x}", f"w by {by_w}", f"{blocks} blocks"}
    assert told >= {
        *(f"shape {number}" for number in range(5)),
        *(f"x by {how}" for how in ("boxes", "lines", "planes", "runs", "single values")),
        *(f"w by {how}" for how in ("boxes", "runs", "single values")),
        *(f"{number} blocks" for number in (1, 2, 4, 8)),
    }, told


def layout_strides(case: Case, layout: str) -> dict[str, tuple[int, ...]]:
    """Those of x, w and dy in channels_last; nothing for contiguous ones."""
    shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
    return {
        name: torch.empty(shape, device="meta").to(memory_format=torch.channels_last).stride()
        for name, shape in shapes.items()
        if layout == "channels_last"
    }


def on_mma(case: Case, tensors: dict[str, Tensor], tf32: bool) -> dict[str, Tensor]:
    """y, and dx where there is no stride, by mma for sure."""
    results, x = {}, tensors["x"].detach().requires_grad_()
    with tf32_switch(tf32), poisoned_memory(), modelnew.force_engine("mma"):
        y = modelnew.conv2d(x, tensors["w"], tensors.get("bias"), **case.kwargs)
        results["fprop"] = y.detach()
        if case.stride == (1, 1):
            (results["dgrad"],) = torch.autograd.grad(y, x, tensors["dy"])
    return results


@gpu
@pytest.mark.parametrize("tf32", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("view", MMA_VIEWS)
@pytest.mark.parametrize("case", MMA_CASES, ids=str)
def test_gpu_mma_exact(case, view, tf32):
    """Forced. In full with more bits than TF32 has; twice the same bits."""
    tensors = make_tensors(case, torch.float32, integers, "cuda")
    full = set(WGMMA_OPERATORS) - case.tf32_operators(torch.float32, tf32)
    if full == set(WGMMA_OPERATORS):
        tensors["w"] *= 65
    tensors |= {name: MMA_VIEWS[view](tensors[name]) for name in ("x", "w", "dy")}
    results = on_mma(case, tensors, tf32)
    check_exact(case, results, tensors)
    again = on_mma(case, tensors, tf32)
    assert all(torch.equal(again[name], result) for name, result in results.items())


@gpu
@pytest.mark.parametrize("tf32", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan], ids=str)
def test_gpu_mma_spreads_nan_and_inf(special, tf32):
    """Also where an Inf meets padding: its zeros are factors, as in any GEMM."""
    for case in MMA_CASES:
        check_spreading(case, special, lambda tensors, case=case: on_mma(case, tensors, tf32)["fprop"])


def check_spreading(
    case: Case, special: float, run: Callable[[dict[str, Tensor]], Tensor], dtype: torch.dtype = torch.float32
) -> None:
    """That a value comes to those outputs that read it, from x and from w."""
    tensors = make_tensors(case, dtype, positive, "cuda")
    tensors["x"][0, 1, min(5, case.H - 1), min(3, case.W - 1)] = tensors["w"][1, 2, 0, 0] = special
    # In float64, where the CPU has no kernels that leave padding out.
    expected = F.conv2d(*(tensors[name].cpu().double() for name in ("x", "w", "bias")), **case.kwargs).to(dtype)
    y = run(tensors).cpu()
    assert torch.equal(y.isnan(), expected.isnan()), case
    assert torch.equal(y.isinf(), expected.isinf()), case
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2, equal_nan=True)


def on_engine(engine: str, case: Case, tensors: dict[str, Tensor], tf32: bool) -> Tensor:
    """y, by this engine for sure."""
    with tf32_switch(tf32), poisoned_memory(), modelnew.force_engine(engine):
        return modelnew.conv2d(tensors["x"], tensors["w"], tensors.get("bias"), **case.kwargs)


def check_forced_exact(
    engine: str,
    case: Case,
    views: dict[str, Callable],
    tf32: bool,
    device: str = "cuda",
    dtype: torch.dtype = torch.float32,
) -> None:
    """In full with more bits than TF32 has; with a bias and without, twice the same bits."""
    tensors = make_tensors(case, dtype, integers, device)
    if dtype == torch.float32 and "fprop" not in case.tf32_operators(torch.float32, tf32):
        tensors["w"] *= 1025
    tensors |= {name: change(tensors[name]) for name, change in views.items()}
    y = on_engine(engine, case, tensors, tf32)
    check_exact(case, {"fprop": y}, tensors)
    assert torch.equal(on_engine(engine, case, tensors, tf32), y)
    del tensors["bias"]
    expected = product("fprop", case, tensors["x"], tensors["w"]).to(dtype)
    assert torch.equal(on_engine(engine, case, tensors, tf32), expected)


def check_forced_rounding(
    engine: str,
    cases: list[Case],
    layout: str,
    tf32: bool,
    fill: Callable,
    device: str = "cuda",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Both contracts, element by element; and the same bits every time."""
    for case in cases:
        tensors = in_layout(make_tensors(case, dtype, fill, device), layout)
        y = on_engine(engine, case, tensors, tf32)
        check_bounds(case, {"fprop": y}, tensors, case.tf32_operators(dtype, tf32))
        assert all(torch.equal(on_engine(engine, case, tensors, tf32), y) for _ in range(5))


def check_forced_spreading(
    engine: str, cases: list[Case], layout: str, tf32: bool, special: float, dtype: torch.dtype = torch.float32
) -> None:
    for case in cases:
        run = functools.partial(on_engine, engine, case, tf32=tf32)
        check_spreading(case, special, lambda tensors, run=run: run(in_layout(tensors, layout)), dtype)


# Phases of all images and of one, by several engines; one tap that is left; rows of fewer than all phases.
# Patch embeddings in small: filters of multiples of 16 bytes and not, pixels in no patch.
GPU_PATCHES_CASES = [
    Case(5, 3, 64, 70, 200, 16, 16, stride=(16, 16)),
    Case(3, 3, 56, 58, 136, 14, 14, stride=(14, 14)),
    Case(2, 4, 64, 64, 72, 32, 32, stride=(32, 32)),
    Case(3, 1, 33, 40, 64, 3, 5, stride=(3, 5)),
]


@gpu
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", GPU_PATCHES_CASES, ids=str)
def test_gpu_patches(case, layout, dtype):
    """Exact, and within the contract's bounds."""
    fills = {torch.float32: FILLS, torch.float16: [normal], torch.bfloat16: [normal, wide]}[dtype]
    for fill in (integers, *fills):
        tensors = in_layout(make_tensors(case, dtype, fill, "cuda"), layout)
        tensors["w"] = VIEWS["channels_last"](tensors["w"]) if layout == "channels_last" else tensors["w"]
        results = on_gpu(case, tensors, True, "patches")
        assert set(results) == {"fprop"}
        check_exact(case, results, tensors) if fill is integers else check_bounds(case, results, tensors, tf32=())


@gpu
@hopper
def test_gpu_patches_run_what_a_vision_transformer_begins_with():
    for (R, K), dtype in itertools.product(((16, 768), (14, 1024), (32, 768)), (torch.float32, torch.float16)):
        x = torch.randn(8, 3, 224, 224, device="cuda", dtype=dtype)
        w = torch.randn(K, 3, R, R, device="cuda", dtype=dtype)
        with tf32_switch(True):
            assert "\nforward: patches; " in modelnew.explain(x, w, stride=R)


# Windows with boxes of dy and without, strips of rows, copies of x and of dy, images without gaps, filters that leave
# pixels out, groups, words and channels one by one; ragged edges of every tile, and several splits.
GPU_WGRAD_CASES = [
    Case(3, 64, 28, 28, 64, 3, 3, padding=(1, 1)),
    Case(2, 20, 40, 96, 136, 3, 3, padding=(1, 1)),
    Case(2, 16, 30, 70, 72, 3, 3, padding=(1, 0)),
    Case(5, 96, 14, 14, 300, 1, 1),
    Case(9, 80, 7, 7, 136, 1, 1),
    Case(6, 40, 7, 7, 64, 3, 3, padding=(1, 1)),
    Case(4, 32, 28, 30, 64, 1, 1, stride=(2, 2)),
    Case(2, 24, 33, 29, 40, 5, 4, stride=(2, 3), padding=(2, 1), dilation=(1, 2)),
    Case(3, 64, 20, 20, 96, 3, 3, padding=(1, 1), groups=2),
    Case(2, 3, 64, 60, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(2, 30, 19, 21, 20, 3, 3, padding=(2, 2), dilation=(3, 2)),
    Case(1, 130, 9, 9, 270, 3, 3),
    Case(1, 16, 5, 3, 17, 1, 1),
]


def wgrad_of(case: Case, tensors: dict[str, Tensor], tf32: bool) -> Tensor:
    results = on_gpu(case, tensors, tf32, "wgrad")
    assert set(results) == {"wgrad"}
    return results["wgrad"]


@gpu
@hopper
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", GPU_WGRAD_CASES, ids=str)
def test_gpu_wgrad(case, layout, dtype):
    """Exact, within the contract's bounds, and the same bits every time; TF32 where the problem is large enough."""
    fills = {torch.float32: FILLS, torch.float16: [normal], torch.bfloat16: [normal, wide]}[dtype]
    for fill in (integers, *fills):
        tensors = in_layout(make_tensors(case, dtype, fill, "cuda"), layout)
        result = {"wgrad": wgrad_of(case, tensors, True)}
        check_exact(case, result, tensors) if fill is integers else check_bounds(case, result, tensors, tf32=())
        assert all(torch.equal(wgrad_of(case, tensors, True), result["wgrad"]) for _ in range(3))


@gpu
@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case",
    [
        Case(16, 128, 28, 28, 256, 3, 3, padding=(1, 1)),
        Case(2, 64, 126, 250, 128, 3, 3),
        Case(64, 256, 14, 14, 320, 1, 1),
        Case(256, 512, 7, 7, 136, 1, 1),
        Case(64, 128, 7, 7, 264, 3, 3, padding=(1, 1)),
        Case(32, 128, 56, 56, 192, 1, 1, stride=(2, 2)),
        Case(8, 64, 57, 61, 72, 5, 3, stride=(2, 1), padding=(2, 1)),
    ],
    ids=str,
)
def test_gpu_wgrad_as_tf32(case, layout):
    for fill in (integers, *FILLS):
        tensors = in_layout(make_tensors(case, torch.float32, fill, "cuda"), layout)
        for tf32 in (True, False):
            operators = case.tf32_operators(torch.float32, tf32)
            assert ("wgrad" in operators) == tf32
            result = {"wgrad": wgrad_of(case, tensors, tf32)}
            check_exact(case, result, tensors) if fill is integers else check_bounds(case, result, tensors, operators)


@gpu
@hopper
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    "case",
    [Case(3, 20, 12, 16, 24, 3, 3, padding=(1, 1)), Case(2, 16, 8, 8, 40, 1, 1), Case(2, 12, 9, 9, 16, 1, 1, (2, 2))],
    ids=str,
)
def test_gpu_wgrad_takes_any_strides(case, view, dtype):
    tensors = make_tensors(case, dtype, integers, "cuda")
    for names in (("x", "dy"), ("x",), ("dy",)):
        changed = tensors | {name: VIEWS[view](tensors[name]) for name in names}
        check_exact(case, {"wgrad": wgrad_of(case, changed, True)}, changed)


@gpu
@hopper
@pytest.mark.parametrize("elements", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize(
    "case", [Case(3, 20, 12, 16, 24, 3, 3, padding=(1, 1)), Case(2, 16, 8, 8, 40, 1, 1)], ids=str
)
def test_gpu_wgrad_takes_operands_that_begin_anywhere(case, dtype, elements):
    tensors = make_tensors(case, dtype, integers, "cuda")
    for names in (("x", "dy"), ("x",), ("dy",)):
        changed = tensors | {name: shifted(tensors[name], elements) for name in names}
        check_exact(case, {"wgrad": wgrad_of(case, changed, True)}, changed)


@gpu
@hopper
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_gpu_wgrad_takes_rows_with_nan_behind(dtype, rows):
    case = Case(2, 8, 6, 70 if rows else 7, 8, 3, 3, padding=(1, 1))
    tensors = make_tensors(case, dtype, integers, "cuda")
    changed = tensors | {"dy": dy_before_nan(tensors["dy"], rows)}
    check_exact(case, {"wgrad": wgrad_of(case, changed, True)}, tensors)


@gpu
@hopper
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_wgrad_propagates_nan_and_inf(layout, tf32, special):
    """One in x, in a corner that not all taps see, and one in dy."""
    for case in (Case(64, 32, 24, 24, 136, 3, 3, padding=(1, 1)), Case(128, 64, 16, 14, 300, 1, 1)):
        for name, at in (("x", (1, 3, 0, 0)), ("dy", (2, 5, 4, 3))):
            tensors = make_tensors(case, torch.float32, positive, "cuda")
            tensors[name][at] = special
            result = wgrad_of(case, in_layout(tensors, layout), tf32).cpu()
            # In float64, where the CPU has no kernels that leave padding out.
            first, second = tensors["dy"].cpu().double(), tensors["x"].cpu().double()
            expected = nn.grad.conv2d_weight(second, case.w_shape, first, **case.kwargs).float()
            assert not expected.isfinite().all()
            assert torch.equal(result.isnan(), expected.isnan())
            assert torch.equal(result.isinf(), expected.isinf())


FIRST_GRADIENT = """
import sys, threading, torch, modelnew
torch.manual_seed(0)
engine, x, w = sys.argv[1], torch.randn(8, 64, 56, 56, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda")
dy = torch.randn(8, 64, 56, 56, device="cuda")
torch.cuda.synchronize()
x.requires_grad_(engine == "gather")
w.requires_grad_(engine == "wgrad")
y = modelnew.conv2d(x, w, padding=1)
with modelnew.force_engine(engine):
    (gradient,) = torch.autograd.grad(y, x if engine == "gather" else w, dy)
print(gradient.isfinite().all().item())
"""


@gpu
@hopper
@pytest.mark.parametrize("engine", ["wgrad", "gather"])
def test_gpu_first_gradient_of_a_process(engine):
    """Computed in a thread of autograd's own, which has called nothing of CUDA's before."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(KERNELS.parent), *sys.path])}
    command = [sys.executable, "-c", FIRST_GRADIENT, engine]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["True"], done.stderr


@gpu
@hopper
@pytest.mark.parametrize(
    "case", [Case(8, 64, 28, 28, 96, 3, 3, padding=(1, 1)), Case(8, 64, 7, 7, 136, 1, 1)], ids=str
)
def test_gpu_wgrad_in_a_graph(case):
    """Copies and sums are made anew at every replay."""
    tensors = make_tensors(case, torch.float32, integers, "cuda")
    expected = wgrad_of(case, tensors, True).clone()
    x, dy, w = tensors["x"], tensors["dy"], tensors["w"].detach().requires_grad_()
    with tf32_switch(True):

        def result() -> Tensor:
            y = modelnew.conv2d(x, w, None, **case.kwargs)
            with modelnew.force_engine("wgrad"):
                return torch.autograd.grad(y, w, dy)[0]

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            result()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = result()
        for _ in range(5):
            out.fill_(math.nan)
            dy.mul_(2)
            expected.mul_(2)
            graph.replay()
            assert torch.equal(out, expected)


# Phases with every number of taps, and without any; a filter that leaves rows out, dilation, groups.
GPU_STRIDED_CASES = [
    Case(3, 64, 28, 30, 72, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(4, 48, 15, 14, 136, 1, 1, stride=(2, 2)),
    Case(2, 40, 33, 29, 24, 5, 4, stride=(3, 2), padding=(2, 1)),
    Case(2, 16, 21, 40, 64, 2, 2, stride=(2, 2)),
    Case(2, 24, 30, 31, 40, 3, 3, stride=(2, 1), padding=(2, 2), dilation=(2, 2)),
    Case(2, 64, 20, 20, 96, 3, 3, stride=(2, 2), padding=(1, 1), groups=2),
]


@gpu
@hopper
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", GPU_STRIDED_CASES, ids=str)
def test_gpu_strided(case, layout, dtype):
    """Exact, and within the contract's bounds."""
    fills = {torch.float32: FILLS, torch.float16: [normal], torch.bfloat16: [normal, wide]}[dtype]
    for fill in (integers, *fills):
        tensors = in_layout(make_tensors(case, dtype, fill, "cuda"), layout)
        results = on_gpu(case, tensors, True, "strided")
        assert set(results) == {"dgrad"}
        check_exact(case, results, tensors) if fill is integers else check_bounds(case, results, tensors, tf32=())


@gpu
@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case",
    [
        Case(32, 128, 28, 28, 128, 3, 3, stride=(2, 2), padding=(1, 1)),
        Case(64, 256, 28, 28, 128, 1, 1, stride=(2, 2)),
    ],
    ids=str,
)
def test_gpu_strided_as_tf32(case, layout):
    """Chosen, and exact where operands have no more bits than TF32."""
    for fill in (integers, normal):
        tensors = in_layout(make_tensors(case, torch.float32, fill, "cuda"), layout)
        with tf32_switch(True):
            assert "\ndgrad: strided; " in modelnew.explain(tensors["x"], tensors["w"], **case.kwargs)
        results = {"dgrad": on_gpu(case, tensors, True)["dgrad"]}
        check_exact(case, results, tensors) if fill is integers else check_bounds(case, results, tensors, {"dgrad"})


GPU_DILATED_CASES = [
    Case(3, 64, 28, 28, 64, 3, 3, padding=(24, 24), dilation=(24, 24)),
    Case(1, 72, 65, 65, 40, 3, 3, padding=(36, 36), dilation=(36, 36)),
    Case(2, 64, 14, 14, 256, 3, 3, padding=(24, 24), dilation=(24, 24)),
    Case(40, 96, 30, 26, 64, 3, 3, padding=(9, 2), dilation=(12, 9)),
]


@gpu
@hopper
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", GPU_DILATED_CASES, ids=str)
def test_gpu_dilated_exact(case, layout, dtype):
    for tf32 in (False, True) if dtype == torch.float32 else (True,):
        tensors = in_layout(make_tensors(case, dtype, integers, "cuda"), layout)
        results = on_gpu(case, tensors, tf32, "dilated")
        assert set(results) == {"fprop", "dgrad"}
        check_exact(case, results, tensors)


@gpu
@hopper
@pytest.mark.parametrize("elements", [1, 2])
def test_gpu_gather_leaves_taps_that_no_box_reaches_to_others(elements):
    """Of taps far apart, whose tensors in channels_last begin at odd addresses."""
    case = Case(2, 64, 40, 70, 64, 3, 7, padding=(13, 39), dilation=(13, 13))
    x = lambda x: shifted(x.permute(0, 2, 3, 1), elements).permute(0, 3, 1, 2)  # noqa: E731
    check_forced_exact("gather", case, {"x": x}, True)


@gpu
@hopper
def test_gpu_dilated_runs_far_taps_of_networks():
    """The pyramid of DeepLabV3, in parts or with a box for each tap."""
    images, w = torch.randn(8, 2048, 65, 65, device="cuda"), torch.randn(256, 2048, 3, 3, device="cuda")
    for count, dilation, engine in ((1, 36, "dilated"), (8, 12, "dilated"), (8, 24, "gather"), (8, 36, "gather")):
        settings = {"padding": dilation, "dilation": dilation}
        x = images[:count]
        with tf32_switch(True):
            assert f"\nforward: {engine}; tf32" in modelnew.explain(x, w, **settings)
            y = modelnew.conv2d(x, w, **settings)
        expected = F.conv2d(x[:1].double(), w.double(), **settings)
        scale = F.conv2d(x[:1].abs().double(), w.abs().double(), **settings)
        assert ((y[:1] - expected).abs() <= 2.0**-10 * scale).all()


# Blocks of channels in full and ragged, several tiles of output channels and few, points, halos, strides with phases
# and without, dilation, images of one pixel and of rows longer than a tile, few tiles with long reductions.
TMA_CASES = [
    Case(3, 72, 13, 17, 136, 3, 3, padding=(1, 1)),
    Case(2, 64, 56, 56, 64, 3, 3, padding=(1, 1)),
    Case(4, 128, 28, 28, 128, 3, 3, stride=(2, 2), padding=(1, 1)),
    Case(33, 256, 14, 14, 264, 1, 1),
    Case(40, 64, 16, 24, 256, 1, 1),
    Case(2, 512, 7, 7, 2048, 1, 1),
    Case(1, 2048, 7, 7, 512, 1, 1),
    Case(2, 512, 7, 7, 512, 3, 3, padding=(1, 1)),
    Case(2, 8, 40, 41, 16, 5, 3, stride=(2, 2), padding=(2, 0)),
    Case(2, 40, 33, 30, 200, 3, 3, padding=(12, 6), dilation=(12, 6)),
    Case(3, 64, 15, 15, 64, 7, 7, stride=(3, 2), padding=(3, 3)),
    Case(2, 24, 9, 9, 144, 1, 1, stride=(2, 2)),
    Case(1, 16, 3, 1000, 8, 2, 2),
    Case(70, 16, 1, 1, 8, 3, 3, padding=(1, 1)),
    Case(2, 320, 64, 64, 320, 3, 3, padding=(1, 1)),
    Case(2, 64, 100, 300, 24, 3, 3, padding=(1, 1)),
    # Strides that are never taken, and pixels that they would have led to.
    Case(3, 16, 4, 4, 72, 3, 3, stride=(2, 2)),
    Case(3, 72, 9, 4, 16, 3, 3, stride=(2, 2), padding=(1, 0)),
    Case(3, 16, 3, 9, 8, 1, 1, stride=(8, 2)),
    Case(2, 8, 300, 1, 8, 4, 1),
    # Outputs that no box takes.
    Case(3, 72, 13, 17, 131, 3, 3, padding=(1, 1)),
    Case(4, 64, 40, 50, 2, 1, 1),
    Case(1, 512, 9, 9, 255, 1, 1),
    # Groups: merged, the last of them in part; more outputs than inputs, points, as they are.
    Case(3, 256, 28, 30, 256, 3, 3, padding=(1, 1), groups=32),
    Case(2, 512, 14, 14, 512, 3, 3, stride=(2, 2), padding=(1, 1), groups=32),
    Case(2, 144, 17, 13, 288, 5, 3, padding=(2, 1), groups=9),
    Case(3, 128, 12, 14, 128, 1, 1, groups=8),
    Case(2, 40, 9, 11, 40, 3, 3, padding=(2, 2), dilation=(2, 2), groups=20),
    Case(3, 256, 13, 14, 384, 3, 3, padding=(1, 1), groups=2),
    Case(2, 320, 16, 16, 320, 1, 1, groups=5),
]
TMA_PLANES_CASES = [
    *TMA_CASES,
    Case(3, 7, 20, 30, 19, 5, 3),
    Case(2, 13, 9, 11, 1, 3, 3, padding=(1, 1)),
    Case(2, 13, 8, 8, 11, 1, 1),
    Case(5, 72, 4, 4, 16, 4, 4),
]
HALVES = (torch.float16, torch.bfloat16)


def of_pixels(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return in_layout(tensors, "channels_last") | {"w": VIEWS["channels_last"](tensors["w"])}


@gpu
@hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", TMA_CASES, ids=str)
def test_gpu_tma_exact(case, dtype):
    pixels = VIEWS["channels_last"]
    for views in ({"x": pixels, "w": pixels}, {"x": pixels}):
        check_forced_exact("tma", case, views, True, dtype=dtype)


@gpu
@hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", TMA_PLANES_CASES, ids=str)
def test_gpu_tma_exact_in_planes(case, dtype):
    for shift in (0, 1, 2, 4):
        check_forced_exact("tma", case, {"x": functools.partial(shifted, elements=shift)}, True, dtype=dtype)


@gpu
@hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gpu_tma_takes_views_of_planes(dtype):
    """One image or channel for all, which no box can take; rows of weights in larger ones, of which the rest is NaN."""
    case = Case(3, 13, 8, 16, 11, 1, 1)
    wider = lambda w: F.pad(w, (0, 0, 0, 0, 0, 3), value=math.nan)[:, : case.C]  # noqa: E731
    for views in (
        {"x": lambda x: x[:1].expand_as(x)},
        {"x": lambda x: x[:, :1].expand_as(x)},
        {"w": wider},
        {"w": lambda w: wider(w.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))},
    ):
        check_forced_exact("tma", case, views, True, dtype=dtype)


@gpu
@hopper
@pytest.mark.parametrize("dtype, fill", STEM_16_BIT_FILLS, ids=named)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_tma_rounding(layout, dtype, fill):
    check_forced_rounding("tma", TMA_CASES, layout, True, fill, dtype=dtype)


@gpu
@hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", TMA_CASES, ids=str)
def test_gpu_tma_gradients_are_exact(case, layout, dtype):
    """dx by tma where there is no stride, dw by tma_wgrad, whatever took the forward."""
    tensors = make_tensors(case, dtype, integers, "cuda")
    if layout == "channels_last":
        tensors = of_pixels(tensors)
    exact = references(case, tensors)
    in_eights = layout == "contiguous" or case.K % 8 == 0
    merged = max(1, 64 // (case.K // case.groups))
    merges = case.groups == 1 or all(channels // case.groups * merged % 64 == 0 for channels in (case.C, case.K))
    engines = {"dgrad": "tma"} if case.stride == (1, 1) and in_eights and merges else {}
    engines |= {"wgrad": "tma_wgrad"} if in_eights and case.groups == 1 else {}
    for operator, engine in engines.items():
        name = OPERANDS_OF_GRADIENT[operator]
        leaf = tensors[name].detach().requires_grad_()
        y = modelnew.conv2d(**{"input": tensors["x"], "weight": tensors["w"]} | {WORDS[name]: leaf}, **case.kwargs)
        with poisoned_memory(), modelnew.force_engine(engine):
            (gradient,) = torch.autograd.grad(y, leaf, tensors["dy"])
        assert torch.equal(gradient, exact[operator].to(dtype)), operator


OPERANDS_OF_GRADIENT = {"dgrad": "x", "wgrad": "w"}
WORDS = {"x": "input", "w": "weight"}


@gpu
@hopper
@pytest.mark.parametrize("dtype, fill", STEM_16_BIT_FILLS, ids=named)
def test_gpu_tma_wgrad_rounding(dtype, fill):
    for case in (case for case in TMA_CASES if case.K % 8 == 0 and case.groups == 1):
        tensors = of_pixels(make_tensors(case, dtype, fill, "cuda"))
        w = tensors["w"].detach().requires_grad_()
        y = modelnew.conv2d(tensors["x"], w, **case.kwargs)
        with poisoned_memory(), modelnew.force_engine("tma_wgrad"):
            gradients = [torch.autograd.grad(y, w, tensors["dy"], retain_graph=True)[0] for _ in range(3)]
        check_bounds(case, {"wgrad": gradients[0]}, tensors, ())
        assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


@gpu
@hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", TMA_PLANES_CASES, ids=str)
def test_gpu_tma_wgrad_copies_planes(case, dtype):
    """That begin anywhere; one image or channel for all; x or dy alone."""
    views: list[dict[str, Callable]] = [{"x": functools.partial(shifted, elements=shift)} for shift in (1, 2, 4)]
    views += [{"dy": change["x"]} for change in views]
    views += [{"x": lambda x: x[:1].expand_as(x)}, {"x": lambda x: x[:, :1].expand_as(x)}]
    views += [{name: VIEWS["channels_last"]} for name, size in (("x", case.C), ("dy", case.K)) if size % 8 == 0]
    for changes in views if case.groups == 1 else []:
        tensors = make_tensors(case, dtype, integers, "cuda")
        tensors |= {name: change(tensors[name]) for name, change in changes.items()}
        w = tensors["w"].detach().requires_grad_()
        y = modelnew.conv2d(tensors["x"], w, **case.kwargs)
        with poisoned_memory(), modelnew.force_engine("tma_wgrad"):
            (dw,) = torch.autograd.grad(y, w, tensors["dy"])
        check_exact(case, {"wgrad": dw}, tensors)


@gpu
@hopper
@pytest.mark.parametrize("elements", [1, 2, 4])
def test_gpu_tma_leaves_what_no_box_reaches_to_others(elements):
    """Tensors in channels_last at odd addresses are right all the same, forward and backward."""
    case = Case(3, 40, 13, 17, 72, 3, 3, padding=(1, 1))
    tensors = make_tensors(case, torch.float16, integers, "cuda")
    for name in ("x", "w", "dy"):
        tensors[name] = shifted(tensors[name].permute(0, 2, 3, 1), elements).permute(0, 3, 1, 2)
    assert "\nforward: tma;" in modelnew.explain(tensors["x"], tensors["w"], **case.kwargs)
    x, w = (tensors[name].detach().requires_grad_() for name in ("x", "w"))
    with poisoned_memory():
        y = modelnew.conv2d(x, w, tensors["bias"], **case.kwargs)
        dx, dw = torch.autograd.grad(y, (x, w), tensors["dy"])
    check_exact(case, {"fprop": y, "dgrad": dx, "wgrad": dw}, tensors)


@gpu
@hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan], ids=str)
def test_gpu_tma_spreads_nan_and_inf(special, layout, dtype):
    cases = [TMA_CASES[0], TMA_CASES[3], TMA_CASES[7], *(case for case in TMA_CASES if case.groups == 32)]
    check_forced_spreading("tma", cases, layout, True, special, dtype)


@gpu
@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_tma_in_a_graph_reads_new_data(layout):
    """Nothing that derives from x or w outlives a call."""
    case = Case(2, 512, 7, 7, 512, 3, 3, padding=(1, 1))  # in parts of the reduction
    tensors = make_tensors(case, torch.float16, integers, "cuda")
    if layout == "channels_last":
        tensors = of_pixels(tensors)
    x, w = tensors["x"], tensors["w"]
    with modelnew.force_engine("tma"):
        modelnew.conv2d(x, w, **case.kwargs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = modelnew.conv2d(x, w, **case.kwargs)
    for seed in range(1, 4):
        fresh = make_tensors(case, torch.float16, integers, "cuda", seed=seed)
        x.copy_(fresh["x"])
        w.copy_(fresh["w"])
        graph.replay()
        assert torch.equal(y, product("fprop", case, x, w).half())


# Stems of networks in small and what is like them, on all ways to load and to store; the first four are under the TF32
# contract where that is allowed. Sides of 4 x 7 or 16 pixels, odd ones, lines longer than a box, ragged channels.
STEM_CASES = [
    Case(8, 3, 56, 56, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(9, 3, 64, 96, 128, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(11, 3, 45, 45, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(9, 3, 113, 127, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(2, 3, 70, 64, 64, 3, 3, padding=(1, 1)),
    Case(3, 3, 75, 75, 32, 3, 3, stride=(2, 2)),
    Case(2, 3, 64, 224, 96, 4, 4, stride=(4, 4)),
    Case(40, 1, 28, 28, 33, 5, 5, padding=(2, 2)),
    Case(2, 4, 64, 64, 320, 3, 3, padding=(1, 1)),
    Case(2, 3, 99, 67, 96, 11, 11, stride=(4, 4), padding=(2, 2)),
    Case(1, 7, 33, 40, 70, 5, 5, stride=(1, 2), padding=(4, 1)),
    Case(2, 2, 40, 513, 64, 3, 7, padding=(1, 3), dilation=(1, 2)),
    Case(30, 3, 8, 8, 24, 1, 1),
    Case(1, 5, 30, 1000, 17, 1, 7, stride=(3, 1)),
    Case(300, 6, 2, 1, 100, 2, 3, padding=(0, 1)),
]
STEM_VIEWS = {
    **{name: {"x": view, "w": view} for name, view in MMA_VIEWS.items()},
    "transposed": {"x": VIEWS["transposed"], "w": VIEWS["transposed"]},
    "x in channels_last": {"x": VIEWS["channels_last"]},  # y is, too, but not w
    "w in channels_last": {"w": VIEWS["channels_last"]},  # y is, too, but not x
}


def test_stem_cases_reach_every_way(stem_plans):
    """That the cases for the GPU do not miss a way to load or store under a contract."""
    told = set()
    for case, (dtype, tf32), layout in itertools.product(STEM_CASES, STEM_CONTRACTS[:3], LAYOUTS):
        settings = {"strides": layout_strides(case, layout), "dtype": dtype, "tf32": tf32}
        assert stem_plans("refusal", "fprop", case, **settings) is None, case
        text = stem_plans("describe", "fprop", case, **settings)
        way = re.search(r"^(one|three) .* of (\d+) channels .* x by ([a-z ]+), y by ([a-z ]+),", text).groups()
        told.add(way if dtype == torch.float32 else ("16 bits", *way[1:]))
    for contract in ("one", "three", "16 bits"):
        ways = {way[1:] for way in told if way[0] == contract}
        assert {(x, y) for _, x, y in ways} >= {
            ("boxes", "boxes of planes"),
            ("boxes of lines", "boxes of pixels"),
            ("single values", "single values"),
            ("single values", "boxes of pixels"),
        }, told
    for contract in ("three", "16 bits"):
        assert {channels for of, channels, *_ in told if of == contract} == {"32", "64"}


@gpu
@hopper
@pytest.mark.parametrize("dtype, tf32", STEM_CONTRACTS, ids=str)
@pytest.mark.parametrize("view", STEM_VIEWS)
@pytest.mark.parametrize("case", STEM_CASES, ids=str)
def test_gpu_stem_exact(case, view, dtype, tf32):
    check_forced_exact("stem", case, STEM_VIEWS[view], tf32, dtype=dtype)


@gpu
@hopper
@pytest.mark.parametrize("fill", FILLS, ids=named)
@pytest.mark.parametrize("tf32", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_stem_rounding(layout, tf32, fill):
    check_forced_rounding("stem", STEM_CASES, layout, tf32, fill)


@gpu
@hopper
@pytest.mark.parametrize("dtype, fill", STEM_16_BIT_FILLS, ids=named)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_stem_rounding_of_16_bits(layout, dtype, fill):
    check_forced_rounding("stem", STEM_CASES, layout, True, fill, dtype=dtype)


@gpu
@hopper
@pytest.mark.parametrize("dtype, tf32", STEM_CONTRACTS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan], ids=str)
def test_gpu_stem_spreads_nan_and_inf(special, layout, dtype, tf32):
    cases = [case for case in STEM_CASES if case.C > 2]
    check_forced_spreading("stem", cases, layout, tf32, special, dtype)


@gpu
@hopper
def test_gpu_forced_stem_says_what_it_refuses():
    x, w = torch.randn(2, 6, 19, 20, device="cuda"), torch.randn(24, 6, 3, 3, device="cuda", requires_grad=True)
    refused = r"'stem' is forced but cannot take the forward .*"
    with modelnew.force_engine("stem"):
        with pytest.raises(RuntimeError, match=refused + "one group only"):
            modelnew.conv2d(x, w[:, :3], groups=2)
        with pytest.raises(RuntimeError, match=refused + "7 input channels"):
            modelnew.conv2d(torch.cat([x, x], 1), torch.cat([w, w], 1))
        with pytest.raises(RuntimeError, match=refused + "no float64"):
            modelnew.conv2d(x.double(), w.double())
        y = modelnew.conv2d(x, w)
        with pytest.raises(RuntimeError, match=r"'stem' is forced but cannot take the wgrad .*outputs only"):
            y.sum().backward()


@gpu
@hopper
def test_gpu_forced_stem_without_images():
    case = Case(0, 3, 9, 10, 24, 3, 3)
    assert on_engine("stem", case, make_tensors(case, torch.float32, normal, "cuda"), True).shape == case.y_shape


@gpu
@hopper
def test_gpu_stem_more_than_2_to_the_31_elements():
    """In the output, by boxes and by single values."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free GPU memory")
    for size in (1024, 1023):
        case = Case(34, 3, size, size, 64, 3, 3, padding=(1, 1))
        assert math.prod(case.y_shape) > 2**31
        tensors = make_tensors(dataclasses.replace(case, N=1), torch.float32, integers, "cuda")
        x = tensors["x"].repeat(case.N, 1, 1, 1)
        y = on_engine("stem", case, tensors | {"x": x}, False)
        check_exact(dataclasses.replace(case, N=1), {"fprop": y[-1:]}, tensors)
        assert all(torch.equal(image, y[-1]) for image in y)


# By the planner's choice these reach, on a Hopper GPU of 132 SMs and under both contracts, all ways to load and to
# store, 1, 2, 4 and 8 blocks for a tile, all slices and all stages; the test below tells.
POINTWISE_CASES = [
    Case(1, 64, 56, 56, 256, 1, 1),
    Case(2, 128, 28, 28, 512, 1, 1),
    Case(2, 128, 30, 30, 200, 1, 1),
    Case(1, 256, 56, 56, 128, 1, 1),
    Case(1, 64, 56, 56, 160, 1, 1),
    Case(1, 128, 28, 28, 256, 1, 1),
    Case(1, 256, 56, 56, 64, 1, 1),
    Case(2, 64, 56, 56, 64, 1, 1),
    Case(4, 64, 56, 56, 64, 1, 1),
    Case(1, 256, 14, 14, 1024, 1, 1),
    Case(1, 1024, 14, 14, 256, 1, 1),
    Case(1, 2048, 7, 7, 512, 1, 1),
    Case(1, 3008, 8, 12, 128, 1, 1),
    Case(1, 2048, 6, 4, 400, 1, 1),
    Case(4, 112, 31, 29, 72, 1, 1, stride=(1, 2)),
    Case(1, 1024, 32, 32, 2048, 1, 1, stride=(2, 2)),
    Case(64, 2048, 1, 1, 1000, 1, 1),
    Case(3, 37, 20, 24, 50, 1, 1),
    Case(8, 131, 27, 32, 1021, 1, 1),
    Case(8, 144, 27, 31, 1022, 1, 1),
    Case(8, 16, 15, 16, 9, 1, 1),
    Case(16, 64, 60, 60, 64, 1, 1),
    Case(2, 5, 9, 301, 1, 1, 1),
]
POINTWISE_VIEWS = {
    **{name: {"x": view, "w": view} for name, view in MMA_VIEWS.items()},
    "transposed": {"x": VIEWS["transposed"], "w": VIEWS["transposed"]},
    "x in channels_last": {"x": VIEWS["channels_last"]},
    "w in channels_last": {"w": VIEWS["channels_last"]},  # y is, too, but not x
    "x off by one": {"x": MMA_VIEWS["off by one"]},
    "in wider ones": {"x": lambda tensor: in_wider(tensor, 12, 4), "w": lambda tensor: in_wider(tensor, 4, 0)},
}


def test_pointwise_cases_reach_every_way(pointwise_plans):
    """That the cases for the GPU do not miss a way to load or store under a contract, or a number of blocks."""
    told = set()
    for case, tf32, layout in itertools.product(POINTWISE_CASES, (False, True), LAYOUTS):
        settings = {"strides": layout_strides(case, layout), "tf32": tf32}
        assert pointwise_plans("refusal", "fprop", case, **settings) is None, case
        text = pointwise_plans("describe", "fprop", case, **settings)
        contract, loads, stores, blocks, slices = re.search(
            r"^(one|three) .* by ([a-z ]+), y by ([a-z ]+), .* for (\d) blocks of (\d+) slices", text
        ).groups()
        told |= {(contract, loads, stores), (contract, f"{blocks} blocks"), (contract, f"{slices} slices")}
        if loads == "fours in stages":
            told.add((re.search(r"tile of \d+", text)[0], case.C // 4))
    ways = {
        *itertools.product(("fours of weights", "fours of channels", "single values"), ("fours", "single values")),
        ("fours", "fours"),
    }
    assert told == {
        *((contract, *way) for contract in ("one", "three") for way in ways),
        *((contract, f"{number} blocks") for contract in ("one", "three") for number in (1, 2, 4, 8)),
        *((contract, f"{number} slices") for contract in ("one", "three") for number in (1, 2, 4, 8)),
        ("one", "16 slices"),
        ("one", "fours in stages", "fours"),
        *itertools.product(("tile of 32", "tile of 64"), (16, 32, 64)),
    }, told


@gpu
@pytest.mark.parametrize("tf32", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("view", POINTWISE_VIEWS)
@pytest.mark.parametrize("case", POINTWISE_CASES, ids=str)
def test_gpu_pointwise_exact(case, view, tf32):
    check_forced_exact("pointwise", case, POINTWISE_VIEWS[view], tf32)


@gpu
@pytest.mark.parametrize("fill", FILLS, ids=named)
@pytest.mark.parametrize("tf32", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_pointwise_rounding(layout, tf32, fill):
    check_forced_rounding("pointwise", POINTWISE_CASES, layout, tf32, fill)


@gpu
@pytest.mark.parametrize("tf32", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan], ids=str)
def test_gpu_pointwise_spreads_nan_and_inf(special, layout, tf32):
    check_forced_spreading("pointwise", [case for case in POINTWISE_CASES if case.K > 1], layout, tf32, special)


@gpu
def test_gpu_forced_pointwise_says_what_it_refuses():
    x, w = torch.randn(2, 16, 9, 10, device="cuda"), torch.randn(24, 16, 1, 1, device="cuda", requires_grad=True)
    refused = r"'pointwise' is forced but cannot take the forward .*"
    with modelnew.force_engine("pointwise"):
        for settings, reason in (({"padding": 1}, "no padding"), ({"groups": 2}, "one group only")):
            with pytest.raises(RuntimeError, match=refused + reason):
                modelnew.conv2d(x, w[:, :8] if "groups" in settings else w, **settings)
        with pytest.raises(RuntimeError, match=refused + "1x1 filters only"):
            modelnew.conv2d(x, torch.randn(24, 16, 1, 3, device="cuda"))
        with pytest.raises(RuntimeError, match=refused + "float32 only"):
            modelnew.conv2d(x.double(), w.double())
        y = modelnew.conv2d(x, w)
        with pytest.raises(RuntimeError, match=r"'pointwise' is forced but cannot take the wgrad .*outputs only"):
            y.sum().backward()


@gpu
def test_gpu_forced_pointwise_without_images():
    case = Case(0, 16, 9, 10, 24, 1, 1)
    assert on_engine("pointwise", case, make_tensors(case, torch.float32, normal, "cuda"), True).shape == case.y_shape


@gpu
@hopper
@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
@pytest.mark.parametrize("case", WGMMA_CASES, ids=str)
def test_gpu_wgmma_exact(case, dtype, tf32):
    if not tf32 and min(case.C, case.K) // case.groups * case.R * case.S < 64:
        pytest.skip("sums too short for it")
    tensors = make_tensors(case, dtype, integers, "cuda")
    check_exact(case, on_wgmma(case, tensors, tf32), tensors)
    assert all(margins_intact(tensor) for tensor in tensors.values())


@gpu
@hopper
@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
def test_gpu_wgmma_exact_without_bias(dtype, tf32):
    """Of tiles that store whole lines, and of others."""
    for case in (WGMMA_CASE, Case(8, 40, 66, 64, 130, 3, 3, padding=(1, 1))):
        tensors = make_tensors(case, dtype, integers, "cuda")
        with tf32_switch(tf32), modelnew.force_engine("wgmma"), poisoned_memory():
            y = modelnew.conv2d(tensors["x"], tensors["w"], **case.kwargs)
        assert torch.equal(y, product("fprop", case, tensors["x"], tensors["w"]).to(dtype))


@gpu
@hopper
@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
def test_gpu_wgmma_exact_in_every_tile(wgmma_plans, dtype, tf32):
    """One case for each tile and direction that the planner can choose, as it tells without a GPU."""
    cases: dict[tuple[int, int, str], Case] = {}
    for case in WGMMA_CANDIDATES:
        if wgmma_plans("refusal", "fprop", case, dtype, tf32=tf32) is None:
            cases.setdefault(wgmma_tile(wgmma_plans("describe", "fprop", case, dtype, tf32=tf32)), case)
    assert set(cases) == wgmma_tiles(dtype, tf32)
    for case in cases.values():
        tensors = make_tensors(case, dtype, integers, "cuda")
        check_exact(case, on_gpu(case, tensors, tf32, "wgmma"), tensors)


# The alignments that change how pixels are loaded: even rows of x at an odd address, besides strides of any kind.
WGMMA_VIEWS = VIEWS | {"off by one": lambda tensor: with_margins(F.pad(tensor.flatten(), (1, 0)))[1:].view_as(tensor)}


@gpu
@hopper
@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
@pytest.mark.parametrize("view", WGMMA_VIEWS)
def test_gpu_wgmma_takes_any_strides(view, dtype, tf32):
    for case in (Case(2, 40, 66, 132, 72, 3, 3, padding=(1, 1)), Case(2, 40, 67, 258, 65, 3, 2, padding=(1, 2))):
        plain = make_tensors(case, dtype, integers, "cuda")
        for names in (("x",), ("w",), ("dy",), ("x", "w", "dy")):
            tensors = plain | {name: WGMMA_VIEWS[view](plain[name]) for name in names}
            check_exact(case, on_wgmma(case, tensors, tf32), tensors)


@gpu
@hopper
@pytest.mark.parametrize("fill", [normal, wide, under_a_tf32_step, tf32_ties, equal], ids=named)
@pytest.mark.parametrize("case", [WGMMA_CASE, Case(1, 300, 20, 66, 65, 6, 7, padding=(3, 3))], ids=str)
def test_gpu_wgmma_rounds_operands_to_nearest(case, fill):
    """Beside the contract: fp32 sums of operands that were rounded, both of them, with ties away from zero."""
    tensors = make_tensors(case, torch.float32, fill, "cuda")
    results = on_wgmma(case, tensors)
    check_bounds(case, results, tensors, tf32=WGMMA_OPERATORS)
    rounded = {name: round_to_tf32(tensor) if name != "bias" else tensor for name, tensor in tensors.items()}
    expected = references(case, rounded)
    for operator, result in results.items():
        scale = product(operator, case, *(rounded[name].double().abs() for name in OPERANDS[operator]))
        added = rounded["bias"].double().abs().view(-1, 1, 1) if operator == "fprop" else 0
        # The contract without the part of the rounding of operands.
        sums = (relative_bound(case, operator, torch.float32, tf32=True) - 2.0**-10) * scale
        bound = sums + 2.0**-126 + 2.0**-23 * (result.double().abs() + added)
        error = (result.double() - expected[operator]).abs()
        assert (error <= bound).all(), f"{operator}: {(error / bound).max():.3g} times the bound"


@gpu
@hopper
@pytest.mark.parametrize("fill", [normal, positive], ids=named)
@pytest.mark.parametrize(
    "case, most",
    [
        (Case(2, 16, 130, 518, 128, 3, 3), 1.5e-7),
        (Case(1, 64, 66, 262, 128, 3, 3), 2e-7),
        (Case(1, 64, 68, 134, 128, 5, 7), 2.5e-7),
        (Case(1, 512, 34, 66, 64, 3, 3), 3e-7),
    ],
    ids=str,
)
def test_gpu_wgmma_in_full_is_more_exact_than_cudnn(case, most, fill):
    """Of the whole result, also where all is positive, so that what tensor cores cut off adds up."""
    tensors = make_tensors(case, torch.float32, fill, "cuda")
    x, w = tensors["x"], tensors["w"]
    with tf32_switch(False), modelnew.force_engine("wgmma"), poisoned_memory():
        y = modelnew.conv2d(x, w, **case.kwargs)
    expected = product("fprop", case, x, w)
    assert ((y.double() - expected).norm() / expected.norm()).item() <= most


@gpu
@hopper
def test_gpu_wgmma_in_full_keeps_small_products_beside_large_ones():
    """One large product and 63 that lie at the end of its mantissa: what tensor cores align before they add."""
    case = Case(1, 64, 64, 128, 64, 1, 1)
    for binades in range(18, 27):
        tensors = make_tensors(case, torch.float32, equal, "cuda")
        tensors["x"][:] = (1 - 2.0**-10) * 2.0**-binades
        tensors["x"][:, 5] = 1
        for name in ("w", "dy"):
            tensors[name][:] = 1
        results = on_wgmma(case, tensors, tf32=False)
        check_bounds(case, {"fprop": results["fprop"]}, tensors, tf32=())


def put(special: float | str, tensor: Tensor, place: tuple[int, ...]) -> None:
    """Writes one element: a number, or a NaN with "all bits" set, or with all "but the sign"."""
    if isinstance(special, float):
        tensor[place] = special
    else:
        bits = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
        bits[place] = -1 if special == "all bits" else torch.iinfo(bits.dtype).max


@gpu
@hopper
@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan, "all bits", "but the sign"], ids=str)
def test_gpu_wgmma_spreads_nan_and_inf_to_those_that_read_them(special, dtype, tf32):
    """And leaves all other elements as they are. Corners, edges and an inner pixel, of channels in several pieces."""
    case = Case(2, 40, 66, 132, 72, 3, 5, padding=(1, 2), dilation=(2, 1))
    tensors = make_tensors(case, dtype, under_a_tf32_step, "cuda")
    clean = on_wgmma(case, tensors, tf32)
    for operator, name in (("fprop", "x"), ("dgrad", "dy")):
        N, C, H, W = (size - 1 for size in tensors[name].shape)
        for place in ((0, 0, 0, 0), (N, C, H, W), (1, 17, 31, 77), (0, C, 0, W), (1, 7, H, 0)):
            spoilt = tensors | {name: tensors[name].clone()}
            put(special, spoilt[name], place)
            marks = torch.zeros_like(tensors[name])
            marks[place] = 1
            reached = product(operator, case, marks, torch.ones_like(tensors["w"])) > 0
            assert reached.any()
            result = on_wgmma(case, spoilt, tf32)[operator]
            infinite = isinstance(special, float) and math.isinf(special)
            assert torch.equal(result.isinf() if infinite else result.isnan(), reached)
            if tf32:
                assert torch.equal(result[~reached], clean[operator][~reached])
            else:  # what shares a tile with it is computed by other means
                torch.testing.assert_close(result[~reached], clean[operator][~reached], rtol=1e-5, atol=1e-5)


@gpu
@hopper
@pytest.mark.parametrize("tf32", [True, False], ids=["tf32", "fp32"])
@pytest.mark.parametrize("kind", ADVERSE)
def test_gpu_wgmma_keeps_the_contract_where_fp16_does_not_fit(kind, tf32):
    # In the last one boxes load x.
    for case in (WGMMA_CASE, Case(2, 16, 130, 518, 128, 3, 3), Case(2, 64, 40, 264, 128, 3, 3, padding=(1, 0))):
        for operator in WGMMA_OPERATORS:
            tensors = adverse_tensors(case, kind, operator, "cuda")
            result = on_wgmma(case, tensors, tf32)[operator]
            check_bounds(case, {operator: result}, tensors, tf32={operator} if tf32 else ())


@gpu
@hopper
@pytest.mark.parametrize("engine, tf32", [("wgmma", True), ("wgmma", False), ("gather", True)])
def test_cuda_graph_replays_with_data_of_another_size(engine, tf32):
    """What is contained, what is done again and by what x is scaled is found out anew in every replay."""
    case = Case(2, 16, 130, 518, 128, 3, 3) if engine == "wgmma" else GATHER_CONTAINED_CASES[1]
    fresh = [adverse_tensors(case, kind, "fprop", "cuda", seed) for seed, kind in enumerate([*ADVERSE, "few small"])]
    static = {name: tensor.clone() for name, tensor in fresh[0].items()}
    with tf32_switch(tf32), modelnew.force_engine(engine):
        warm_up = torch.cuda.Stream()
        with torch.cuda.stream(warm_up):
            modelnew.conv2d(static["x"], static["w"], static["bias"], **case.kwargs)
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = modelnew.conv2d(static["x"], static["w"], static["bias"], **case.kwargs)
        for tensors in fresh:
            for name, tensor in tensors.items():
                static[name].copy_(tensor)
            graph.replay()
            check_bounds(case, {"fprop": y}, tensors, tf32={"fprop"} if tf32 else ())


@gpu
@hopper
@pytest.mark.parametrize("dtype, tf32", WGMMA_PRECISIONS)
def test_gpu_wgmma_is_deterministic(dtype, tf32):
    for case in (Case(8, 40, 66, 257, 130, 3, 3), Case(8, 72, 65, 64, 64, 3, 3, padding=(1, 1))):
        tensors = make_tensors(case, dtype, normal, "cuda")
        first = on_wgmma(case, tensors, tf32)
        for _ in range(100):
            again = on_wgmma(case, tensors, tf32)
            assert all(torch.equal(first[name], again[name]) for name in first)


@gpu
@hopper
def test_gpu_wgmma_more_than_2_to_the_31_elements():
    """In the output of the forward, then in the input of dgrad; references in chunks of channels."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (
        torch.randint(-3, 4, shape, device="cuda", generator=generator).half()
        for shape in ((1, 8, 4096, 4100), (130, 8, 1, 1))
    )
    expected = torch.zeros(x.shape, device="cuda")
    with tf32_switch(False), modelnew.force_engine("wgmma"):
        y = modelnew.conv2d(x.requires_grad_(), w)
        assert y.numel() > 2**31
        (dx,) = torch.autograd.grad(y, x, y.detach())
    for k in range(0, 130, 10):
        part = F.conv2d(x.detach().double(), w[k : k + 10].double())
        assert torch.equal(y.detach()[:, k : k + 10], part.half())
        expected += F.conv_transpose2d(part, w[k : k + 10].double()).float()
    assert torch.equal(dx, expected.half())


@gpu
@hopper
def test_gpu_forced_wgmma_says_what_it_refuses():
    x = torch.ones(1, 16, 80, 80, dtype=torch.half, device="cuda", requires_grad=True)
    w = torch.ones(16, 16, 3, 3, dtype=torch.half, device="cuda", requires_grad=True)
    with modelnew.force_engine("wgmma"):
        with pytest.raises(RuntimeError, match=r"'wgmma' is forced but cannot take the forward .*stride 1 only"):
            modelnew.conv2d(x, w, stride=2)
        y = modelnew.conv2d(x, w)
        with pytest.raises(RuntimeError, match=r"'wgmma' is forced but cannot take the wgrad .*input gradients only"):
            y.sum().backward()


@gpu
def test_gpu_results_are_the_same_every_time():
    case = Case(4, 32, 57, 61, 48, 3, 3, padding=(1, 1))
    for dtype in DTYPES:
        tensors = make_tensors(case, dtype, normal, "cuda")
        first = on_gpu(case, tensors, True)
        for _ in range(3):
            again = on_gpu(case, tensors, True)
            assert all(torch.equal(first[name], again[name]) for name in first)


@gpu
def test_gpu_without_images():
    """Empty results, and gradients that are zero."""
    case = Case(0, 4, 9, 10, 6, 3, 3)
    results = on_gpu(case, make_tensors(case, torch.float32, normal, "cuda"))
    assert results["fprop"].shape == case.y_shape
    assert results["dgrad"].shape == case.x_shape
    assert torch.equal(results["wgrad"], torch.zeros(case.w_shape, device="cuda"))
    assert torch.equal(results["bgrad"], torch.zeros(case.K, device="cuda"))


@gpu
def test_gpu_more_than_2_to_the_31_elements():
    """Offsets beyond 32 bits, in the input, in the output and in both gradients. Half precision: 4.3 GB a tensor."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free GPU memory")
    size = 46400  # 46400^2 > 2^31
    x = torch.zeros(1, 1, size, size, dtype=torch.half, device="cuda")
    x[0, 0, -3:, -300:] = 1
    x[0, 0, 0, :300] = 2
    w = torch.full((1, 1, 1, 1), 3.0, dtype=torch.half, device="cuda")
    x.requires_grad_(), w.requires_grad_()
    y = modelnew.conv2d(x, w)
    assert torch.equal(y.detach(), 3 * x.detach())
    dx, dw = torch.autograd.grad(y, (x, w), x.detach())
    assert torch.equal(dx, 3 * x.detach())
    assert dw.item() == 3 * 300 + 4 * 300
    del y, dx
    # More elements in the output alone, from many channels.
    w = torch.arange(1030, dtype=torch.half, device="cuda").view(-1, 1, 1, 1)
    y = modelnew.conv2d(x.detach()[:, :, -1450:, -1450:], w)
    assert y.numel() > 2**31
    assert torch.equal(y[0, 1029, -3:, -300:], w[1029].expand(1, 3, 300)[0])
    assert not y[0, :, :-3].any()


@gpu
def test_unserved_dtypes_are_named():
    for dtype, name in {
        torch.complex64: "ComplexFloat",
        torch.int32: "Int",
        torch.int8: "Char",
        torch.bool: "Bool",
    }.items():
        x, w = torch.ones(1, 1, 3, 3, device="cuda").to(dtype), torch.ones(1, 1, 1, 1, device="cuda").to(dtype)
        with pytest.raises(NotImplementedError, match=rf"no kernels for {name} tensors"):
            modelnew.conv2d(x, w)


@gpu
def test_runs_on_the_current_stream():
    """A result that is right only if our kernels wait for the work before them on a stream of the user's."""
    case = Case(2, 16, 66, 130, 32, 3, 3)
    tensors = make_tensors(case, torch.float32, integers, "cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = {name: tensor * 1 for name, tensor in tensors.items()}
        results = on_gpu(case, late)
    stream.synchronize()
    check_exact(case, results, tensors)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_cuda_graph_replays_with_new_data(dtype):
    """Forward and backward captured once; replays see new inputs and new weights."""
    case = Case(2, 16, 40, 70, 24, 3, 3, padding=(1, 1))
    fresh = [make_tensors(case, dtype, integers, "cuda", seed) for seed in range(3)]
    static = {name: tensor.clone() for name, tensor in fresh[0].items()}

    def step() -> dict[str, Tensor]:
        x, w, bias = (static[name].detach().requires_grad_() for name in ("x", "w", "bias"))
        y = modelnew.conv2d(x, w, bias, **case.kwargs)
        return dict(
            zip(OPERATOR_NUMBER, (y.detach(), *torch.autograd.grad(y, (x, w, bias), static["dy"])), strict=True)
        )

    with tf32_switch(False):
        warm_up = torch.cuda.Stream()
        with torch.cuda.stream(warm_up):
            step()
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
    for tensors in fresh:
        for name, tensor in tensors.items():
            static[name].copy_(tensor)
        graph.replay()
        check_exact(case, results, tensors)


@gpu
def test_second_device():
    """Tensors on a device that is not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    case = Case(2, 16, 40, 70, 24, 3, 3, padding=(1, 1))
    tensors = make_tensors(case, torch.float32, integers, "cuda:1")
    assert torch.cuda.current_device() == 0
    results = on_gpu(case, tensors)
    assert all(result.device.index == 1 for result in results.values())
    check_exact(case, results, tensors)
    replicas = nn.parallel.replicate(modelnew.Conv2d(16, 24, 3).cuda(0), [0, 1])
    inputs = [torch.randn(2, 16, 9, 9, device=f"cuda:{index}") for index in range(2)]
    for replica, x, y in zip(replicas, inputs, nn.parallel.parallel_apply(replicas, inputs), strict=True):
        torch.testing.assert_close(y, F.conv2d(x, replica.weight, replica.bias), rtol=1e-3, atol=1e-3)


@gpu
def test_conjugate_and_negative_views():
    """Lazy negation is resolved before the kernels read memory."""
    z = torch.randn(2, 4, 9, 10, dtype=torch.complex64, device="cuda")
    x = torch._neg_view(z.real)
    w = torch.randn(6, 4, 3, 3, device="cuda")
    with tf32_switch(False):
        torch.testing.assert_close(modelnew.conv2d(x, w), F.conv2d(x.resolve_neg(), w), rtol=1e-5, atol=1e-5)


@gpu
def test_explain_tells_engine_contract_and_reason():
    case = Case(2, 64, 66, 130, 128, 3, 3)
    tensors = make_tensors(case, torch.float32, normal, "cuda")
    for allowed, contract in ((True, "tf32"), (False, "fp32")):
        with tf32_switch(allowed):
            text = modelnew.explain(tensors["x"], tensors["w"], tensors["bias"], **case.kwargs)
        for direction in ("forward", "dgrad", "wgrad", "bgrad"):
            line = next(line for line in text.splitlines() if line.startswith(f"{direction}: "))
            assert any(engine in line for engine in ENGINES)
        assert contract in text.lower()


@gpu
@pytest.mark.parametrize(
    "case, copied",
    [
        (Case(40, 64, 130, 130, 128, 3, 3), False),
        (Case(4, 64, 130, 130, 128, 3, 3), True),
        (Case(64, 256, 56, 56, 64, 1, 1), False),  # by gather, of x itself and in whole tiles
    ],
)
def test_workspace_of_a_forward_is_small(case, copied):
    """Packed weights and 1 MB at most beyond the output; for `gather` sums of parts and half of the input too."""
    tensors = make_tensors(case, torch.float32, normal, "cuda")
    modelnew.conv2d(tensors["x"], tensors["w"])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = modelnew.conv2d(tensors["x"], tensors["w"])
    extra = torch.cuda.max_memory_allocated() - before - y.numel() * y.element_size()
    of_gather = (32 << 20) + tensors["x"].numel() * 2 if copied and torch.cuda.get_device_capability()[0] == 9 else 0
    assert extra <= (1 << 20) + of_gather + 4 * tensors["w"].numel() * 4


# Packaging ----------------------------------------------------------------------------------------------------------

# Whoever imports this from an installed package sees the sources it would compile.
INSTALLED = """
import os, sys
import modelnew
assert os.path.dirname(modelnew.__file__) == sys.argv[1], modelnew.__file__
assert sorted(modelnew._sources) == sorted(sys.argv[2:]), sorted(modelnew._sources)
assert "class ModelNew" in modelnew.bundle()
"""


def test_installs_from_an_sdist(tmp_path):
    """From the tree to an sdist, from that to a folder of packages; what users of `pip install` get."""
    if int(pytest.importorskip("setuptools").__version__.split(".")[0]) < 64:
        pytest.skip("needs setuptools 64")
    pytest.importorskip("wheel")
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist")
    tree, site = tmp_path / "tree", tmp_path / "site"
    shutil.copytree(ROOT, tree, ignore=ignored)
    run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
    run([sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('dist')"], cwd=tree)
    (sdist,) = (tree / "dist").iterdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run([*pip, "--target", str(site), str(sdist)], cwd=tmp_path)
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} - {"__pycache__"} == {
        "modelnew.py",
        "modelnew_kernels",
    }
    names = [path.name for path in KERNEL_FILES]
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    run([sys.executable, "-c", INSTALLED, str(site), *names], cwd=tmp_path, env=environment)
