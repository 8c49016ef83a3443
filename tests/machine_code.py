"""Runs of nvcc beside the tests."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from torch.utils import cpp_extension

import modelnew
from tests.cases import ENGINE_SOURCES, KERNELS
from tests.emulation import ENVIRONMENT, built_beside_the_tests

NVCC = shutil.which("nvcc")  # at the start, as ENVIRONMENT is
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc on PATH")

# The language standard concerns the front end and the architecture the back end, so one pair of each is enough. sm_90a
# is compiled as users compile it, several kernels at once, which assigns registers differently. One engine stands for
# architectures after Hopper; CUDA 12.1 compiles for those before, see test_machine_code.py.
NVCC_GATES = {
    "sm_90a": ["-std=c++20", "-gencode=arch=compute_90a,code=sm_90a", "--split-compile=2"],
    "sm_80": ["-std=c++17", "-gencode=arch=compute_80,code=sm_80"],
    "sm_120": ["-std=c++17", "-gencode=arch=compute_120,code=sm_120"],
}
LONGEST_FIRST = sorted(ENGINE_SOURCES, key=lambda source: -modelnew._unit_seconds(source.name))
GATES = [(source, gate) for gate in ("sm_90a", "sm_80") for source in LONGEST_FIRST]
GATES.append((KERNELS / "mma.cu", "sm_120"))
# Makes ptxas tell of register spills.
SPILL_GATE = ["-Xptxas", "-v"]


def run_nvcc(source: Path, output: Path, *flags: str) -> subprocess.CompletedProcess:
    """Nvcc as load_inline calls it, with warnings as errors."""
    command = [NVCC, *cpp_extension.COMMON_NVCC_FLAGS, "--compiler-options", "-fPIC", "-Werror", "all-warnings"]
    command += ["--threads", "0", *flags, f"-I{KERNELS}", "-c", str(source), "-o", str(output)]
    return subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def compile_unit(source: Path, gate: str, folder: Path) -> tuple[Path, int, str]:
    """An object file, which may be there already, the exit status and what was printed: see `builds`."""
    if NVCC is None:
        pytest.skip("needs nvcc")
    folder.mkdir(exist_ok=True)
    output, printed = folder / "unit.o", folder / "printed"
    if not printed.exists():
        run = run_nvcc(source, output, *NVCC_GATES[gate], *SPILL_GATE)
        printed.write_text(f"{run.returncode}\n{run.stdout}")
    code, _, text = printed.read_text().partition("\n")
    return output, int(code), text


def check_binding(source: Path, folder: Path, *flags: str) -> None:
    """Check the syntax of a binding against this torch; if it has no CUDA, one header of its CUDA build is missing."""
    stand_in = folder / "c10/cuda/impl/cuda_cmake_macros.h"
    stand_in.parent.mkdir(parents=True, exist_ok=True)
    stand_in.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    headers = [*cpp_extension.include_paths(), sysconfig.get_path("include"), f"{modelnew._find_cuda_home()}/include"]
    command = [modelnew._find_host_compiler(), *modelnew._cpp_flags(), "-Wall", "-Werror", "-fsyntax-only", *flags]
    command += ["-DTORCH_EXTENSION_NAME=modelnew_test", *(f"-isystem{path}" for path in headers)]
    run = subprocess.run([*command, f"-isystem{folder}", str(source)], env=ENVIRONMENT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


for _source, _gate in GATES:
    built_beside_the_tests(f"nvcc_{_source.stem}_{_gate}", functools.partial(compile_unit, _source, _gate))


@pytest.fixture(scope="session")
def nvcc_runs(builds: dict[str, Future]) -> Callable[[Path, str], tuple[Path, int, str]]:
    """What compile_unit says of a source and a gate."""
    return lambda source, gate: builds[f"nvcc_{source.stem}_{gate}"].result()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait for nvcc come last."""
    items.sort(key=lambda item: "nvcc_runs" in getattr(item, "fixturenames", ()))
