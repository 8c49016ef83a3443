"""Runs of nvcc beside the tests."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils import cpp_extension

import modelnew
from tests.cases import ENGINE_SOURCES, KERNELS
from tests.emulation import ENVIRONMENT, is_worker, shared_folder

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")

# The language standard concerns the front end and the architecture the back end, so one pair of each is enough. sm_90a
# is compiled as users compile it, several kernels at once, which names registers otherwise. The newest architecture
# that this nvcc knows gets one engine alone; what is older is compiled by CUDA 12.1, see test_machine_code.py.
NVCC_GATES = {
    "sm_90a": ["-std=c++20", "-gencode=arch=compute_90a,code=sm_90a", "--split-compile=2"],
    "sm_80": ["-std=c++17", "-gencode=arch=compute_80,code=sm_80"],
    "sm_120": ["-std=c++17", "-gencode=arch=compute_120,code=sm_120"],
}
LONGEST_FIRST = sorted(ENGINE_SOURCES, key=lambda source: -modelnew._unit_seconds(source.name))
GATES = [(source, gate) for gate in ("sm_90a", "sm_80") for source in LONGEST_FIRST]
GATES.append((KERNELS / "mma.cu", "sm_120"))
# ptxas tells of register spills. Split operands take three sets of accumulators; what is needed once a tile beside them
# has to wait in local memory, in a few hundred bytes.
SPILL_GATE = ["-Xptxas", "-v"]


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
    return subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


class NvccRuns:
    """Runs of nvcc, one after another beside the tests: most of these use one core, and nvcc takes minutes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.process = folder, None

    def object_of(self, source: Path, gate: str) -> Path:
        return self.folder / f"{source.stem}_{gate}.o"

    def start(self) -> None:
        lines = []
        for source, gate in GATES:
            output = self.object_of(source, gate)
            command = shlex.join(nvcc_command(source, output, *NVCC_GATES[gate], *SPILL_GATE))
            lines.append(f"{command} > {output}.log 2>&1; echo $? > {output}.part; mv {output}.part {output}.code")
        script = "\n".join([*lines, f"touch {self.folder / 'done'}"])
        self.process = subprocess.Popen(["sh", "-c", script], env=ENVIRONMENT)

    def __call__(self, source: Path, gate: str) -> tuple[Path, int, str]:
        """Waits for a run: its object file, its exit status and what it printed."""
        output = self.object_of(source, gate)
        code = Path(f"{output}.code")
        while not code.exists():
            assert not (self.folder / "done").exists() or code.exists(), "nvcc was not run"
            time.sleep(0.1)
        return output, int(code.read_text()), Path(f"{output}.log").read_text()


@pytest.fixture(scope="session", autouse=True)
def nvcc_beside_the_tests(request, tmp_path_factory) -> Iterator[NvccRuns | None]:
    """Of all processes that share the tests the first one starts them; it ends when they have."""
    wanted = any("nvcc_runs" in item.fixturenames for item in request.session.items)
    if not wanted or shutil.which("nvcc") is None:
        yield None
        return
    runs = NvccRuns(shared_folder(request.config, tmp_path_factory) / "nvcc")
    runs.folder.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (runs.folder / "started").touch(exist_ok=False)
        runs.start()
    yield runs
    if runs.process is not None:
        if not is_worker(request.config) or request.session.shouldstop or request.session.shouldfail:
            runs.process.kill()
        runs.process.wait()


@pytest.fixture(scope="session")
def nvcc_runs(nvcc_beside_the_tests) -> NvccRuns:
    return nvcc_beside_the_tests


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits for nvcc comes last."""
    items.sort(key=lambda item: "nvcc_runs" in getattr(item, "fixturenames", ()))
