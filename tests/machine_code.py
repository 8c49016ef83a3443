"""Runs of nvcc beside the tests."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from tests.cases import ENGINE_SOURCES, KERNELS
from tests.emulation import is_worker

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
