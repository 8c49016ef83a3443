"""What nvcc and CUDA 12.1's compiler make of the kernels: warnings, spills, instructions, links."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import modelnew
from tests.cases import ENGINE_SOURCES, KERNEL_FILES, KERNELS, TESTS
from tests.emulation import KERNEL_LAUNCH, built_beside_the_tests, cpp
from tests.engines import OTHER_ENGINE
from tests.machine_code import NVCC_GATES, SPILL_GATE, needs_nvcc, run_nvcc
from tests.problems import WGMMA_DTYPES

SPILL = re.compile(r"Function properties for (\w+)\n +\d+ bytes stack frame, ([1-9]\d*) bytes spill stores")
SPLIT_FORMAT, SPLIT_BY_BOXES = "6FormatIfNS_4HalfELi2EE", "6FormatIfNS_4HalfELi2EEELi1ELi128E"
MOST_SPLIT_SPILL = 700
MOST_MMA_SPILL, MOST_MMA_SPILL_120 = 64, 96  # of 128 registers; a gate with sm_120 has the second
SPILLING_KERNEL = cpp("machine_code/spill.cu")

# ptxas only remarks on it when it makes each wgmma wait for the one before (C7511, C7515, C7520: a number for each
# reason), adds waits of its own (C7517), or leaves out a setmaxnreg (C7508).
WGMMA_REMARKS = re.compile(r"\(C75\d\d\)|serialized|setmaxnreg")
SLOW_WGMMA_KERNEL = cpp("machine_code/slow_wgmma.cu")


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
RTC_HEADERS = {path.name: path.read_text() for path in (TESTS / "machine_code/rtc").iterdir()}


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
RTC_HOST_PARTS = cpp("machine_code/rtc_host_parts.h")

RTC_CHOICE = cpp("machine_code/rtc_choice.h")


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


LINKED_ENTRY_POINTS = cpp("machine_code/linked.cpp")


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
