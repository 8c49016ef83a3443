"""What nvcc and CUDA 12.1's compiler make of the kernels: warnings, spills, instructions, links."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import modelnew
from tests.cases import ENGINE_SOURCES, KERNELS, TESTS
from tests.emulation import KERNEL_LAUNCH, cpp
from tests.engines import OTHER_UNITS
from tests.machine_code import GATES, SPILL_GATE, check_binding, needs_nvcc, run_nvcc

SPILL = re.compile(r"Function properties for (\w+)\n +\d+ bytes stack frame, ([1-9]\d*) bytes spill stores")

# ptxas does not warn but remarks when it makes each wgmma wait for the one before (C7511, C7515, C7520), adds waits of
# its own (C7517), or leaves out a setmaxnreg (C7508).
WGMMA_REMARKS = re.compile(r"\(C75\d\d\)|serialized|setmaxnreg")


def most_spilled(function: str, gate: str) -> int:
    """The bytes that a kernel may spill: a few registers of mma, more with split operands (three accumulators each).

    And of hopper_wgrad in full accuracy, with two sums for each of 16 channels and nine taps, in two parts,
    and in TF32 with tiles of 256 channels: outside of steps.
    """
    if re.search("wgmma_kernelI.*6FormatIfNS_4HalfELi2E", function):
        return 700
    if "6FormatIfNS_8BFloat16ELi3ELb1ELb0EEELi2ELi9EE" in function:
        return 64
    if "6FormatIfNS_8BFloat16ELi2ELb1ELb1EEELi4ELi9EE" in function:
        return 48
    if "6FormatIfNS_8BFloat16ELi2ELb1E" in function or "6FormatIffLi1ELb0ELb0EEELi32E" in function:
        return 8
    is_mma = "mma_kernel" in function.replace("wgmma", "")
    return 0 if not is_mma else 96 if gate == "sm_120" else 64


@needs_nvcc
@pytest.mark.parametrize("source, gate", GATES, ids=lambda value: getattr(value, "name", value))
def test_nvcc_compiles_without_spills(nvcc_runs, source, gate):
    _, code, output = nvcc_runs(source, gate)
    assert code == 0, output
    spills = SPILL.findall(output)
    assert len(re.findall(r" [1-9]\d* bytes spill stores", output)) == len(spills)
    assert not [(function, spilled) for function, spilled in spills if int(spilled) > most_spilled(function, gate)]
    assert not WGMMA_REMARKS.search(output), output


CUOBJDUMP = shutil.which("cuobjdump") or next(
    (str(path) for path in Path(sys.prefix).glob("lib/python*/site-packages/nvidia/cu*/bin/cuobjdump")), None
)
HOPPER_UNITS = {unit.removesuffix(".cu") for unit in modelnew._HOPPER_UNITS}


@needs_nvcc
@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump")
@pytest.mark.parametrize("engine", sorted(HOPPER_UNITS | {"mma", "pointwise"}))
def test_tensor_cores_are_in_the_machine_code(nvcc_runs, engine):
    """Every instance of a kernel `<engine>_kernel` multiplies on them; on sm_80 there is nothing of Hopper's."""
    tools = os.environ | {"PATH": f"{Path(CUOBJDUMP).parent}{os.pathsep}{os.environ['PATH']}"}  # it calls nvdisasm
    for gate in ("sm_90a", "sm_80"):
        output, code, printed = nvcc_runs(KERNELS / f"{engine}.cu", gate)
        assert code == 0, printed
        command = [CUOBJDUMP, "-sass", "-arch", gate, str(output)]
        text = subprocess.run(command, capture_output=True, text=True, check=True, env=tools).stdout
        functions = text.split("Function : ")[1:]
        kernels = [function for function in functions if f"{engine}_kernel" in function.split(maxsplit=1)[0]]
        assert kernels
        assert gate == "sm_90a" or not re.search(r"\b(HGMMA|USETMAXREG|UBLKCP|UTMALDG|UTMASTG|UCGABAR_ARV)\b", text)
        if gate == "sm_90a" or engine not in HOPPER_UNITS:
            instruction = re.compile(r"\bHGMMA\b" if engine in HOPPER_UNITS else r"\bHMMA\b")
            assert all(map(instruction.search, kernels))


@needs_nvcc
def test_spill_gate_sees_spills(tmp_path):
    run = run_nvcc(TESTS / "machine_code/spill.cu", tmp_path / "spill.o", "-arch=sm_90", *SPILL_GATE)
    assert run.returncode == 0, run.stdout
    assert [name for name, _ in SPILL.findall(run.stdout)] == ["_Z5spillPf"], run.stdout


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


# dilated.cu has no kernel. gather.cu and wgmma.cu are for Hopper alone and take long to compile to
# nothing elsewhere; direct.cu and listed.cu use nothing of Hopper. sm_80 differs from both others in mma.cu alone.
RTC_ARCHS = dict.fromkeys(("gather.cu", "wgmma.cu"), ("90a",)) | dict.fromkeys(("direct.cu", "listed.cu"), ("70",))
RTC_ARCHS |= {"mma.cu": ("70", "80", "90a"), "dilated.cu": ()}
RTC_TARGETS = [(source, arch) for source in ENGINE_SOURCES for arch in RTC_ARCHS.get(source.name, ("70", "90a"))]
RTC_HOST_PARTS = cpp("machine_code/rtc_host_parts.h")


def named_kernel(name: str, params: str, *all_arguments: str) -> str:
    lines = (f"template __global__ void modelnew::{name}<{arguments}>({params});\n" for arguments in all_arguments)
    return "".join(lines)


# The launchers of patches.cu and strided.cu ask other engines: they stay hidden, and their kernels are named.
NAMED_KERNELS = {
    "patches.cu": named_kernel(
        "patches::patches_kernel", "modelnew::patches::Params", "uint32_t, true", "uint16_t, false"
    ),
    "strided.cu": named_kernel(
        "strided::strided_fill_kernel",
        "const __grid_constant__ modelnew::strided::Fill",
        "uint32_t, 4, true",
        "uint16_t, 4, false",
    )
    + named_kernel(
        "strided::strided_spread_kernel",
        "const __grid_constant__ modelnew::strided::Spread",
        "uint32_t",
        "uint16_t",
    ),
}

# Planners are compiled as device code as well, unless nothing refers to them.
ENGINE_TABLE = re.compile(r"^extern const Engine k\w+Engine\{[^;]*;", re.MULTILINE)

# One of several template instances with the same code is enough, and fp16 stands for bf16: patterns of calls, and what
# replaces them.
RTC_FEWER = {
    "mma.cu": {r"return run_kernel<Shape[124], EXACT>\(.*;": "return cudaErrorUnknown;"},
    "depthwise.cu": {
        r"run<(?:float|BFloat16)>\(.*;": "cudaErrorUnknown;",
        r"run_(?:planes|ring|pixels)<\w+<(?:3, 1|5, 1|7, 2)\b[^>]*>>\(params, stream\)": "cudaErrorUnknown",
        r"run_queue<SHAPE \+ 1, Storage>\(params, stream\);": "cudaErrorUnknown;",
        r"run_wgrad<\w+<[15],.*\(params, stream\);": "cudaErrorUnknown;",
    },
    "gather.cu": {
        # Shapes of a tile for 16 bits, for fp32 by images and taps, with one multiplying warpgroup, of operands that
        # are contained on their way, with three warpgroups; and the kernel that does calls again has all other sources.
        r"std::make_index_sequence<sizeof\(kTileShapes\).*>;": "std::index_sequence<1, 4, 11, 17, 22>;",
        r"kBy(Single|Pixels|Channels|Boxes|Phases)(?= \||\})": "0u",
        r"kByMost(?= \||\})": "kByTaps",
    },
    "tma.cu": {
        r"return (run_source<|run_kernel<Half, SHAPE,)": r"if constexpr (SHAPE % 5 == 0) return \1",
    },
    "wgmma.cu": {
        r"if constexpr \(kPixels == 256\) return .*;|return run_kernel<Format, kPixels / 32, 32>.*;": "",
        r"return run_kernel<Format, kPixels / 128, 128>": r"if constexpr (Format::CONTAINED > 0) \g<0>",
        r"return run_kernel<Format, kPixels / 64, 64>": (
            r"if constexpr (Format::CONTAINED == 0 && sizeof(typename Format::Stored) == 2) \g<0>"
        ),
    },
    "hopper_wgrad.cu": {
        r"return run_kernel<Format, SHAPE>": r"if constexpr (SHAPE % 4 == 0) return run_kernel<Format, SHAPE>",
    },
}


def rtc_text(source: Path) -> str:
    """An engine as NVRTC takes it: launchers, which are hidden from it otherwise, are wanted here."""
    text = "#include <cstdint>\n" + source.read_text()
    if source.name in NAMED_KERNELS:
        return text + NAMED_KERNELS[source.name]
    for header in ("correlate.cuh", "bias_grad.cuh", "depthwise_grad.cuh", "stem_dgrad.cuh"):  # which have launchers
        before, include, behind = text.partition(f'#include "{header}"')
        if include:
            there = before + '#include "correlate.cuh"\n'  # which is there in any case
            lines = (KERNELS / header).read_text().replace("#pragma once", "").splitlines(keepends=True)
            own = [line for line in lines if not (line.startswith("#include") and line in there)]
            text = before + "".join(own) + behind
    text = text.replace("__CUDACC_RTC__", "MODELNEW_NEVER_DEFINED")
    text = KERNEL_LAUNCH.sub(r"rtc::launch(\1, \2)", text)
    text += OTHER_UNITS.get(source.name, "")
    memo = '#include "memo.cuh"' if "memo.cuh" in text else '#include "correlation.cuh"'
    text = text.replace(memo, '#include "correlation.cuh"' + RTC_HOST_PARTS)
    text = ENGINE_TABLE.sub("", text)
    text = re.sub(r"return run<(BFloat16|(Stacked)?Bf16)(, false)?>\(.*;", "return cudaErrorUnknown;", text)
    for pattern, replacement in RTC_FEWER.get(source.name, {}).items():
        text, found = re.subn(pattern, replacement, text)
        assert found > 0, pattern
    return text


@pytest.mark.skipif(not (NVRTC.exists() and PTXAS.exists()), reason="needs CUDA 12.1's wheels, see Makefile")
@pytest.mark.parametrize("source, arch", RTC_TARGETS, ids=lambda value: getattr(value, "name", value))
def test_device_code_under_cuda_12_1(source, arch, tmp_path):
    # Functions of the host are compiled for the GPU, which has no variables of threads.
    options = ["--std=c++17", f"--gpu-architecture=compute_{arch}", "--device-as-default-execution-space"]
    with ThreadPoolExecutor(1) as thread:  # whose locale may change
        ptx = thread.submit(nvrtc_ptx, rtc_text(source), *options, "-Dthread_local=", f"-I{KERNELS}").result()
    kernels = set(re.findall(r"__global__ void [^;{]*?(\w+_kernel)\(", source.read_text()))
    assert kernels <= set(re.findall(r"[a-z_]+_kernel(?=I|E)", ptx)), "a kernel that nothing launches"
    (tmp_path / "kernels.ptx").write_text(ptx)
    command = [PTXAS, f"-arch=sm_{arch}", tmp_path / "kernels.ptx", "-o", tmp_path / "kernels.cubin"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not WGMMA_REMARKS.search(done.stdout + done.stderr), done.stdout + done.stderr


@needs_nvcc
@pytest.mark.parametrize("capability, gate", [((8, 0), "sm_80"), ((9, 0), "sm_90a")])
def test_units_of_a_gpu_link(nvcc_runs, capability, gate, tmp_path):
    """Nothing that the units need is missing or there twice, and off Hopper its engines refuse."""
    units = [u for u in modelnew._units(modelnew._sources, [capability]) if u not in ("binding.cpp", "operators.cpp")]
    objects = [nvcc_runs(KERNELS / unit, gate)[0] for unit in units if unit.endswith(".cu")]
    engines = ", ".join(f"&k{name.title().replace('_', '')}Engine" for name in modelnew._ENGINE_NAMES)
    cuda_home = Path(modelnew._find_cuda_home())
    command = ["g++", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-z,defs", f"-I{KERNELS}"]
    command += [f"-DENGINES={engines}", f"-I{cuda_home}/include", TESTS / "machine_code/linked.cpp", *objects]
    command += [KERNELS / unit for unit in units if unit.endswith(".cpp")]
    command += [f"-L{cuda_home}/lib64", f"-Wl,-rpath,{cuda_home}/lib64", "-lcudart", "-o", tmp_path / "linked.so"]
    linked = subprocess.run(command, capture_output=True, text=True)
    assert linked.returncode == 0, linked.stderr
    library = ctypes.CDLL(str(tmp_path / "linked.so"))
    library.name_of.restype = library.refusal_of.restype = ctypes.c_char_p
    names = [library.name_of(number).decode() for number in range(len(modelnew._ENGINE_NAMES))]
    assert tuple(names) == modelnew._ENGINE_NAMES
    assert set(names) > HOPPER_UNITS
    if capability == (8, 0):
        for number in (names.index(name) for name in HOPPER_UNITS):
            assert library.refusal_of(number) == b"it needs a Hopper GPU (compute capability 9.0)"
        assert not library.asks_gather()


@pytest.mark.skipif(modelnew._find_cuda_home() is None, reason="needs CUDA's headers")
def test_binding_compiles(tmp_path):
    check_binding(KERNELS / "binding.cpp", tmp_path, f"-I{KERNELS}", "-Wextra", "-Wno-unused-parameter")


def test_kernels_may_have_all_shared_memory():
    """No call sets a limit of what its own plan needs: another thread may be about to launch the kernel with more."""
    callers = {path.name for path in KERNELS.iterdir() if "cudaFuncSetAttribute(" in path.read_text()}
    assert callers == {"device.cuh", "cuda_stand_ins.h"}
