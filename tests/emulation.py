"""Kernels and planners, compiled by g++ beside the tests, to run on the CPU; C++ is in emulation/ and plan_checks/."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import modelnew
from tests.cases import KERNELS, TESTS


def cpp(name: str) -> str:
    """The text of a C++ file under tests/."""
    return (TESTS / name).read_text()


# A launch's head: kernel, or kernel<arguments>, before its <<<configuration>>>.
KERNEL_LAUNCH = re.compile(r"([\w:]+(?:<[^;{}()]*>)?)\s*<<<(.*?)>>>", re.DOTALL)

DYNAMIC_SMEM = re.compile(r"extern __shared__ __align__\(\d+\) (?:unsigned char|uint8_t) (\w+)\[\];")

# The fields of Problem travel as one array of int64 in this order: see emulation/problem_fields.h.
PROBLEM_FIELDS = [
    "N", "C", "H", "W", "K", "R", "S", "P", "Q", "groups", "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h",
    "dilation_w", "dtype", "tf32_allowed", *(f"{tensor}_stride[{i}]" for tensor in "xwy" for i in range(4)),
]  # fmt: skip


# Builds run beside tests that change PATH, other variables and what modelnew holds: they get those of the start.
ENVIRONMENT = dict(os.environ)
GXX = shutil.which("g++")
SOURCES = modelnew._sources
INCLUDES = ("-I.", *(f"-I{folder}" for folder in (KERNELS, TESTS / "emulation", TESTS / "plan_checks")))


def compile_shared(source: str, folder: Path, *flags: str) -> ctypes.CDLL:
    """A C++ text as a loaded shared library, which may be there already: see `builds`."""
    if GXX is None:
        pytest.skip("needs g++")
    folder.mkdir(parents=True, exist_ok=True)
    library, written = folder / "library.so", folder / "source.cpp"
    if not (library.exists() and written.read_text() == source):
        written.write_text(source)
        command = [GXX, "-std=c++17", "-shared", "-fPIC", "-Wall", "-Werror", *INCLUDES, *flags]
        command += ["source.cpp", "-o", "part.so"]
        done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (folder / "part.so").rename(library)
    return ctypes.CDLL(str(library))


INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')


def amalgamate(sources: dict[str, str], names: Iterable[str]) -> str:
    """One translation unit of the named files, with their own headers pasted in where they are first included.

    `#line` makes the compiler report errors at the place in the file under kernels/.
    """
    included: set[str] = set()

    def expand(name: str) -> Iterator[str]:
        included.add(name)
        yield f'#line 1 "kernels/{name}"'
        for number, line in enumerate(sources[name].splitlines(), 1):
            include = INCLUDE.match(line)
            if include is None:
                yield "" if line.strip() == "#pragma once" else line
            elif include[1] in included:
                yield ""
            else:
                yield from expand(include[1])
                yield f'#line {number + 1} "kernels/{name}"'

    return "\n".join(line for name in names for line in expand(name)) + "\n"


def compile_simt(source: str, folder: Path) -> ctypes.CDLL:
    """A CUDA text, kernels and launchers, as a library that runs on the CPU."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cuda_runtime_api.h").write_text(cpp("emulation/simt.h"))
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
FOLDERS: dict[str, str] = {}  # in which they build


def built_beside_the_tests(name: str, build: Callable[[Path], Any], folder: str | None = None) -> Callable:
    """A session's fixture of what g++ compiles in a folder: see `builds`."""
    BUILDS[name], FOLDERS[name] = build, f"build_{folder or name}"

    @pytest.fixture(scope="session", name=name)
    def fixture(builds: dict[str, Future]) -> Any:
        return builds[name].result()

    return fixture


def wanted_by(item: pytest.Item) -> Iterator[str]:
    """Its fixtures, and what planner, emulated and nvcc_runs give for its parameters."""
    yield from item.fixturenames
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    for fixture, kind in (("planner", "plans"), ("emulated", "shim")):
        if fixture in parameters:
            yield f"{parameters[fixture]}_{kind}"
    if "nvcc_runs" in item.fixturenames:
        asked = [parameters[name] for name in ("source", "engine", "gate") if name in parameters]
        parts = ["nvcc", *(getattr(value, "stem", value) for value in asked)]
        yield from (name for name in BUILDS if all(f"_{part}_" in f"_{name}_" for part in parts))


@pytest.fixture(scope="session", autouse=True)
def builds(request, tmp_path_factory) -> Iterator[dict[str, Future]]:
    """All that these tests need, built one after another in their order beside the tests, most of which use one core.

    Workers of pytest-xdist share a folder: the first one to come compiles, and the others load the result later. Each
    build must therefore work in the folder that it left. At the end all are built that are asked for, because which
    worker needs one depends on how tests are shared out.
    """
    names = dict.fromkeys(name for item in request.session.items for name in wanted_by(item) if name in BUILDS)
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    futures, ended = {name: Future() for name in names}, threading.Event()

    def build(name: str) -> bool:
        """Whether it is built, here or before: not if another process is at it."""
        with open(shared / f"{FOLDERS[name]}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
            except BlockingIOError:
                return False
            try:
                futures[name].set_result(BUILDS[name](shared / FOLDERS[name]))
            except BaseException as error:  # pytest.skip raises one that is no Exception
                futures[name].set_exception(error)
        return True

    def build_all() -> None:
        while not ended.is_set() and (left := [name for name in names if not futures[name].done()]):
            if not any(build(name) for name in left):
                time.sleep(0.2)

    thread = threading.Thread(target=build_all, daemon=True)
    thread.start()
    yield futures
    ended.set()
    thread.join()
    for future in futures.values():
        if future.done() and isinstance(future.exception(), Exception):
            future.result()


HOPPER_STAND_IN = cpp("emulation/copies.h") + cpp("emulation/hopper.h")
WGMMA_STAND_INS = cpp("plan_checks/cuda.h")


def compile_plans(
    engine: str,
    entry_points: str,
    folder: Path,
    *edits: tuple[str, str],
    transform: Callable[[str], str] = lambda source: source,
) -> ctypes.CDLL:
    """The host part of an engine, which `entry_points` include, as a library: first edited, then transformed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cuda_runtime_api.h").write_text(WGMMA_STAND_INS)
    source = (KERNELS / f"{engine}.cu").read_text()
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (folder / f"{engine}.cu").write_text(transform(source))
    flags = ("-O2", "-fno-gnu-unique", "-include", "cuda_runtime_api.h", "-Wno-unknown-pragmas")
    return compile_shared(entry_points, folder, *flags)
