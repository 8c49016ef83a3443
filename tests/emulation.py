"""Kernels and planners, compiled by g++ beside the tests, to run on the CPU; C++ is in emulation/ and plan_checks/."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.cases import KERNELS, TESTS


def cpp(name: str) -> str:
    """The text of a C++ file under tests/."""
    return (TESTS / name).read_text()


SIMT_HEADER = cpp("emulation/simt.h")

# A launch's head: kernel, or kernel<arguments>, before its <<<configuration>>>.
KERNEL_LAUNCH = re.compile(r"([\w:]+(?:<[^;{}()]*>)?)\s*<<<(.*?)>>>", re.DOTALL)

DYNAMIC_SMEM = re.compile(r"extern __shared__ __align__\(\d+\) (?:unsigned char|uint8_t) (\w+)\[\];")

# The fields of Problem travel as one array of int64 in this order: see emulation/problem_fields.h.
PROBLEM_FIELDS = [
    "N", "C", "H", "W", "K", "R", "S", "P", "Q", "groups", "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h",
    "dilation_w", "dtype", "tf32_allowed", *(f"{tensor}_stride[{i}]" for tensor in "xwy" for i in range(4)),
]  # fmt: skip


# Compilers run beside tests that change PATH and other variables: they get those of the start.
ENVIRONMENT = dict(os.environ)
HAS_GXX = shutil.which("g++") is not None
INCLUDES = ("-I.", *(f"-I{folder}" for folder in (KERNELS, TESTS / "emulation", TESTS / "plan_checks")))


def compile_shared(source: str, folder: Path, *flags: str) -> ctypes.CDLL:
    """A C++ text as a loaded shared library, which may be there already: see `builds`."""
    if not HAS_GXX:
        pytest.skip("needs g++")
    folder.mkdir(parents=True, exist_ok=True)
    library, written = folder / "library.so", folder / "source.cpp"
    if not (library.exists() and written.read_text() == source):
        written.write_text(source)
        command = ["g++", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Werror", *INCLUDES, *flags]
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
FOLDERS: dict[str, str] = {}  # in which they build


def built_beside_the_tests(name: str, build: Callable[[Path], Any], folder: str | None = None) -> Callable:
    """A session's fixture of what g++ compiles in a folder: see `builds`."""
    BUILDS[name], FOLDERS[name] = build, f"build_{folder or name}"

    @pytest.fixture(scope="session", name=name)
    def fixture(builds: dict[str, Future]) -> Any:
        return builds[name].result()

    return fixture


def wanted_by(item: pytest.Item) -> Iterator[str]:
    """Its fixtures, and those of the engine that it is parametrised with (see planner and emulated)."""
    yield from item.fixturenames
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    for fixture, kind in (("planner", "plans"), ("emulated", "shim")):
        if fixture in parameters:
            yield f"{parameters[fixture]}_{kind}"


@pytest.fixture(scope="session", autouse=True)
def builds(request, tmp_path_factory) -> Iterator[dict[str, Future]]:
    """All that these tests need, one after another, in their order: most tests use one core, and g++ takes minutes.

    Workers of pytest-xdist share a folder: who comes first compiles, the others go on with the next one and load it
    later. So each build must work in the folder that it left. All are asked at the end: who needs one depends on how
    tests are shared.
    """
    names = dict.fromkeys(name for item in request.session.items for name in wanted_by(item) if name in BUILDS)
    shared = shared_folder(request.config, tmp_path_factory)

    futures, ended = {name: Future() for name in names}, threading.Event()

    def build(name: str, blocking: bool) -> bool:
        with open(shared / f"{FOLDERS[name]}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))  # until it is closed
            except BlockingIOError:
                return False
            try:
                futures[name].set_result(BUILDS[name](shared / FOLDERS[name]))
            except BaseException as error:  # those that skip are no Exceptions
                futures[name].set_exception(error)
        return True

    def build_all() -> None:
        for blocking in (False, True):  # what another process builds comes last
            for name in names:
                if not ended.is_set() and not futures[name].done():
                    build(name, blocking)

    thread = threading.Thread(target=build_all, daemon=True)
    thread.start()
    yield futures
    ended.set()
    thread.join()
    for future in futures.values():
        if future.done() and isinstance(future.exception(), Exception):
            future.result()


def is_worker(config: pytest.Config) -> bool:
    """Whether this is one of several processes of pytest-xdist that share the tests."""
    return hasattr(config, "workerinput")


def shared_folder(config: pytest.Config, factory: pytest.TempPathFactory) -> Path:
    """A folder of all processes that share the tests."""
    return factory.getbasetemp().parent if is_worker(config) else factory.getbasetemp()


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


HOPPER_STAND_IN = cpp("emulation/hopper.h")
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
