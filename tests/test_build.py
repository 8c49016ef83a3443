"""Tests of the build of the kernels: digest, units, locks, progress and messages.

Most tests run with a fake machine: shell scripts for compilers, a patched torch.cuda that reports a GPU, and a
load_inline that writes a file. ninja is the real one.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import modelnew
from tests.emulation import GXX
from tests.engines import Emulated

NINJA = modelnew._find_ninja()

# A fake compiler: it prints its version, or logs its command line, waits, and fails or writes an object file, and then
# logs how many compilers have started.
COMPILER = """#!/bin/sh
folder='{folder}'
if [ "$1" = --version ]; then echo '{version}'; exit; fi
echo "$0 $*" >> "$folder/commands"
while [ $# -gt 1 ]; do
  if [ "$1" = -c ]; then source=$2; fi
  if [ "$1" = -o ]; then object=$2; fi
  shift
done
if [ -e "$folder/seconds" ]; then read seconds < "$folder/seconds"; /bin/sleep "$seconds"; fi
if [ -e "$folder/failure" ]; then /bin/cat "$folder/failure"; exit 1; fi
/usr/bin/wc -l < "$folder/commands" >> "$folder/started"
echo object > "$object"
echo "$source" >> "$folder/compiled"
"""

SOURCES = {
    "binding.cpp": '#include "a.cuh"\nint binding;\n',
    "direct.cu": '#include "a.cuh"\nint direct = 1;  // an engine\n',
    "a.cuh": "/* what two\n   files need */\nint a();\n",
}
UNITS = ["kernels/binding.cpp", "kernels/direct.cu"]


class FakeTools:
    """A fake machine with a GPU, a CUDA toolkit and compilers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.folder = monkeypatch, folder
        self.cuda_home = folder / "cuda"
        self.nvcc = self.cuda_home / "bin" / "nvcc"
        self.compiler = folder / "bin" / "c++"
        self.cache = folder / "cache"
        self.set_nvcc("release 13.0, V13.0.88")
        self.program(self.compiler, "12.2.0")
        (folder / "bin" / "ninja").symlink_to(NINJA)
        (self.cuda_home / "include").mkdir()
        (self.cuda_home / "include" / "cuda_runtime_api.h").touch()
        for name, value in {
            "CUDA_HOME": self.cuda_home,
            "PATH": folder / "bin",
            "TORCH_EXTENSIONS_DIR": self.cache,
        }.items():
            monkeypatch.setenv(name, str(value))
        for name in ("CXX", "MAX_JOBS", "MODELNEW_QUIET", *modelnew._COMPILER_VARIABLES):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: torch.cuda.device_count() > 0)
        self.set_gpus((9, 0))
        monkeypatch.setattr(sys, "executable", str(folder / "bin" / "python"))
        monkeypatch.setattr(modelnew, "_sources", SOURCES)
        monkeypatch.setattr(modelnew, "_load_inline", self.load_inline)
        monkeypatch.setattr(
            modelnew, "_import_library", lambda path: types.SimpleNamespace(__file__=path, text=Path(path).read_text())
        )

    def program(self, path: Path, version: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(COMPILER.format(folder=self.folder, version=version))
        path.chmod(0o755)

    def set_nvcc(self, release: str) -> None:
        self.program(self.nvcc, f"Cuda compilation tools, {release}")

    def set_gpus(self, *capabilities: tuple[int, int]) -> None:
        self.monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        self.monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])

    def load_inline(self, name: str, build_directory: str, **keywords: object) -> None:
        """Link the objects to a library, as torch's load_inline does."""
        objects = [Path(build_directory, flag).read_text().strip() for flag in keywords["extra_ldflags"]]
        Path(build_directory, f"{name}.so").write_text(" ".join(objects))
        self.linked = {"name": name, "environment": dict(os.environ), **keywords}

    def lines(self, log: str) -> list[str]:
        """Return the lines that compilers have logged so far, in all processes."""
        path = self.folder / log
        return path.read_text().splitlines() if path.exists() else []

    @property
    def compiled(self) -> list[str]:
        return sorted(self.lines("compiled"))

    def set(self, name: str, value: object) -> None:
        """Set the compilers' behaviour: wait `seconds`, or fail with the text `failure`."""
        (self.folder / name).write_text(f"{value}\n")

    def plan(self, **sources: str) -> modelnew._Build:
        """Return the build of small sources. A keyword such as a_cuh replaces the source a.cuh."""
        changed = {name.replace("_", "."): text for name, text in sources.items()}
        return modelnew._plan_build(SOURCES | changed, modelnew._gpu_capabilities())

    def open(self) -> types.SimpleNamespace:
        return modelnew._open_or_build(self.plan())

    @property
    def left(self) -> set[str]:
        """Suffixes of the files in the directory of finished libraries."""
        folder = self.cache / "modelnew"
        return {path.suffix for path in folder.iterdir()} if folder.exists() else set()


@pytest.fixture
def tools(monkeypatch, tmp_path) -> Iterator[FakeTools]:
    if NINJA is None:
        pytest.skip("needs ninja")
    return FakeTools(monkeypatch, tmp_path)


# The digest ----------------------------------------------------------------------------------------------------------

DIGEST_INGREDIENTS = {
    "a kernel": lambda tools: tools.plan(direct_cu="int other;"),
    "a header": lambda tools: tools.plan(a_cuh="int other;"),
    "the binding": lambda tools: tools.plan(binding_cpp="int other;"),
    "the GPU": lambda tools: tools.set_gpus((8, 0)),
    "another GPU": lambda tools: tools.set_gpus((8, 0), (9, 0)),
    "torch": lambda tools: tools.monkeypatch.setattr(torch, "__version__", "9.9.9"),
    "torch's CUDA": lambda tools: tools.monkeypatch.setattr(torch.version, "cuda", "13.1"),
    "nvcc": lambda tools: tools.set_nvcc("release 13.1, V13.1.1"),
    "the host compiler": lambda tools: tools.program(tools.compiler, "13.3.0, another one"),
    "nvcc's extra flags": lambda tools: tools.monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G"),
    "our own flags": lambda tools: tools.monkeypatch.setattr(modelnew, "_cpp_flags", lambda: ["-O1"]),
    "what nvcc calls the GPU": lambda tools: tools.monkeypatch.setattr(modelnew, "_architecture", lambda gpu: "90"),
    "torch's C++ ABI": lambda tools: tools.monkeypatch.setattr(torch, "compiled_with_cxx11_abi", lambda: False),
    "Python's ABI": lambda tools: tools.monkeypatch.setattr(modelnew.sysconfig, "get_config_var", lambda name: "cp399"),
}


@pytest.mark.parametrize("ingredient", DIGEST_INGREDIENTS)
def test_name_changes_with(tools, ingredient):
    before = tools.plan().name
    assert tools.plan().name == before
    changed = DIGEST_INGREDIENTS[ingredient](tools)
    assert (changed if isinstance(changed, modelnew._Build) else tools.plan()).name != before


def test_name_does_not_change_with_what_does_not_matter(tools):
    before = tools.plan().name
    reworded = '// First.\n#include "a.cuh"  // "why"\n/* It\'s\n\n*/  int direct = 1; /**/\n'
    assert tools.plan(direct_cu=reworded, a_cuh="int a();").name == before
    for name, value in {"TORCH_CUDA_ARCH_LIST": "8.9", "MODELNEW_QUIET": "1", "MAX_JOBS": "1"}.items():
        tools.monkeypatch.setenv(name, value)
    for program in (tools.nvcc, tools.compiler):  # containers keep whole seconds of a file's time
        seconds = int(program.stat().st_mtime)
        os.utime(program, (seconds, seconds))
    assert tools.plan().name == before


def test_comments_are_found_and_nothing_else():
    code = """
      a = b / c;  // comment "
      s = "// no \\" comment /*"; t = '"'; /* comment ' */ u = '\\'';
      n = 1'000'000;  // it's one
      r = R"(// no "comment)"; v = R"x(/* no )" */ comment)x";
    """
    assert modelnew._without_comments(code).splitlines() == [
        "a = b / c;",
        """s = "// no \\" comment /*"; t = '"';   u = '\\'';""",
        "n = 1'000'000;",
        'r = R"(// no "comment)"; v = R"x(/* no )" */ comment)x";',
    ]
    # A backslash before a blank line ends a macro.
    one, two = (modelnew._without_comments(f"#define A 1 \\\n{rest}") for rest in ("int b;\n", "\nint b;\n"))
    assert one != two


def test_units_are_those_of_the_gpus():
    """Builds for other GPUs than Hopper replace Hopper's engines by a stand-in."""
    of_bundles = {"dry_run.cpp", "bundle_template.cpp", "bundle_template.cu"}
    every = {name for name in modelnew._sources if name.endswith((".cpp", ".cu"))} - of_bundles
    for gpus in ([(9, 0)], [(8, 0), (9, 0)]):
        assert set(modelnew._units(modelnew._sources, gpus)) == every - {"without_hopper.cpp"}
    assert set(modelnew._units(modelnew._sources, [(8, 0), (12, 0)])) == every - modelnew._HOPPER_UNITS
    assert set(modelnew._UNIT_SECONDS) < every


# A build -------------------------------------------------------------------------------------------------------------


def test_build_once_then_import(tools, capsys):
    tools.monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert tools.open().text == "object object"
    said = capsys.readouterr().err.splitlines()
    assert [re.sub(r"\d+ s\b", "SECONDS", line) for line in said] == [
        "modelnew: compiling the kernels for sm_90a, once for this machine; about SECONDS",
        "modelnew: 1/2 units compiled, SECONDS",
        "modelnew: 2/2 units compiled, SECONDS",
        "modelnew: compiled in SECONDS",
    ]
    assert tools.compiled == UNITS
    assert tools.left == {".so", ".lock"}
    assert tools.open().text == "object object"
    assert tools.compiled == UNITS
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_progress_in_one_line(tools, capsys):
    tools.monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    tools.open()
    shown = capsys.readouterr().err
    assert shown.count("\n") == 2
    assert re.search(r"s\n\r\x1b\[Kmodelnew: 1/2 units compiled, \d+ s\r\x1b\[Kmodelnew: 2/2 units", shown)
    shutil.rmtree(tools.cache)
    tools.monkeypatch.setenv("MODELNEW_QUIET", "1")
    tools.open()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("version, standard", [("2.1.2+cu121", "c++17"), ("2.11.0", "c++17"), ("2.12.0a0", "c++20")])
def test_compilers_get_what_they_need(tools, version, standard):
    tools.monkeypatch.setattr(torch, "__version__", version)
    tools.set_gpus((8, 0), (9, 0))
    tools.open()
    (nvcc,) = (line.split() for line in tools.lines("commands") if line.startswith(str(tools.nvcc)))
    (compiler,) = (line.split() for line in tools.lines("commands") if line.startswith(str(tools.compiler)))
    assert {"--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden"} <= set(nvcc)
    assert [flag for flag in nvcc if "gencode" in flag] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]
    assert not any("torch" in flag for flag in nvcc)
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    assert {"-fPIC", "-fvisibility=hidden", f"-std={standard}", abi} <= set(compiler)
    assert f"-DTORCH_EXTENSION_NAME={tools.plan().name}" in compiler
    included = {path for flag, path in itertools.pairwise(compiler) if flag == "-isystem"}
    assert {*cpp_extension.include_paths(), str(tools.cuda_home / "include")} <= included


def test_the_systems_own_headers_are_not_put_before_those_of_the_compiler(tools):
    """If CUDA is a package of the system, its headers are in /usr/include with all others."""
    build = tools.plan()._replace(cuda_home="/usr")
    assert not re.search(r"-isystem /usr/include( |$)", modelnew._ninja_file(build, 1), re.MULTILINE)


def test_torch_is_asked_for_tools(tools):
    """torch gets no GPU that it does not know, and TORCH_CUDA_ARCH_LIST of the environment is ignored."""
    tools.monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.9;not-an-arch")
    tools.set_gpus((99, 9))
    tools.open()
    assert tools.linked["environment"]["TORCH_CUDA_ARCH_LIST"] == "8.0"
    assert tools.linked["environment"]["CUDA_HOME"] == str(tools.cuda_home)
    assert "cuda_sources" not in tools.linked
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "8.9;not-an-arch"


def test_tools_have_any_name(tools):
    tools.cuda_home.rename(tools.folder / "cu 'da$")
    tools.monkeypatch.setenv("CUDA_HOME", str(tools.folder / "cu 'da$"))
    tools.monkeypatch.setenv("CC", "g $c c")
    assert tools.open().text == "object object"
    assert "-ccbin g $c c" in "".join(tools.lines("commands"))


def test_nvcc_may_be_called_by_another_program(tools):
    tools.program(tools.folder / "bin" / "cache", "1.0")
    tools.monkeypatch.setenv("PYTORCH_NVCC", f"cache {tools.nvcc}")
    tools.open()
    assert any(f"/cache {tools.nvcc} -" in line for line in tools.lines("commands"))


@pytest.mark.parametrize(
    "release, cores, jobs, split",
    [("12.1", 7, "", None), ("12.4", 7, "none", "7"), ("13.0", 7, "3", "3"), ("13.0", 1, "64", None)],
)
def test_build_uses_the_cores_that_it_may(tools, release, cores, jobs, split):
    tools.set_nvcc(f"release {release}, V{release}.88")
    tools.monkeypatch.setattr(torch.version, "cuda", release)
    tools.monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    tools.monkeypatch.setenv("MAX_JOBS", jobs)
    tools.open()
    assert re.findall(r"--split-compile=(\d+)", "".join(tools.lines("commands"))) == [split] * (split is not None)


# Failures ------------------------------------------------------------------------------------------------------------


def in_processes(tools: FakeTools, count: int) -> list[multiprocessing.Process]:
    """Start processes that open the build. They are forked, so that they share the fake machine and need no import."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=tools.open) for _ in range(count)]
    for process in processes:
        process.start()
    return processes


def wait_until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_processes_at_once_build_once(tools):
    """One of them compiles, all units side by side."""
    tools.monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    tools.set("seconds", 1)
    processes = in_processes(tools, 3)
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert tools.compiled == UNITS
    assert tools.lines("started") == ["2", "2"]


def test_a_killed_build_does_not_hang_the_next(tools):
    tools.set("seconds", 2)
    (process,) = in_processes(tools, 1)
    wait_until(lambda: tools.lines("commands"))
    process.kill()
    process.join(30)
    assert ".build" in tools.left
    (tools.folder / "seconds").unlink()
    assert tools.open().text == "object object"
    assert tools.left == {".so", ".lock"}
    # Compilers of the killed build may still run. They must not write to this directory.
    time.sleep(2.5)
    assert tools.left == {".so", ".lock"}
    assert tools.open().text == "object object"


def test_what_is_built_beside_the_tests_sees_no_fake(tools, tmp_path):
    """Another thread compiles engines while a test has its fake machine, in which there is no g++."""
    tools.monkeypatch.setattr(pytest, "skip", pytest.skip if GXX is None else pytest.fail)
    assert Emulated("dilated", tmp_path).library


def test_an_interrupted_build_stops_its_compilers(tools):
    def interrupt(text: str, passing: bool = False) -> None:
        if passing:
            raise KeyboardInterrupt

    tools.set("seconds", 0.3)
    started = []
    popen = subprocess.Popen
    tools.monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    tools.monkeypatch.setattr(modelnew, "_say", interrupt)
    processes = {"Popen": lambda *a, **k: started.append(popen(*a, **k)) or started[-1]}  # not other threads'
    tools.monkeypatch.setattr(modelnew, "subprocess", types.SimpleNamespace(**vars(subprocess) | processes))
    with pytest.raises(KeyboardInterrupt):
        tools.open()
    wait_until(lambda: started[-1].poll() is not None)
    assert tools.left == {".lock"}
    assert len(tools.compiled) < 2


def test_a_failed_build_leaves_nothing_that_looks_finished(tools, capsys):
    """It shows what the compiler says, and ends its line of progress on a terminal."""
    tools.monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    tools.set("failure", "kernels/direct.cu(17): error: expected a ;")
    assert "kernels/direct.cu(17): error: expected a ;" in modelnew._load_extension()[1]
    assert re.search(r"\r\x1b\[Kmodelnew: compiling failed after \d+ s\n", capsys.readouterr().err)
    assert tools.left == {".lock"}
    (tools.folder / "failure").unlink()
    with tools.monkeypatch.context() as patch:
        patch.setattr(modelnew, "_load_inline", failing(RuntimeError("Error building extension")))
        with pytest.raises(RuntimeError, match="Error building"):
            tools.open()
    assert tools.left == {".lock"}
    assert tools.open().text == "object object"


def failing(error: Exception) -> Callable:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


FULL_DISK = OSError(28, "No space left on device")
NO_CUDART = RuntimeError("Error building 'modelnew':\n/usr/bin/ld: cannot find -lcudart: No such file\n")
OBSTACLES = {
    "no ninja": (lambda tools: (tools.folder / "bin" / "ninja").unlink(), "pip install ninja"),
    "no nvcc": (lambda tools: tools.nvcc.unlink(), r"install CUDA 13\.0 and set CUDA_HOME"),
    "no compiler": (lambda tools: tools.compiler.unlink(), r"install g\+\+"),
    "nvcc of another CUDA": (
        lambda tools: tools.set_nvcc("release 12.4, V12.4.1"),
        r"CUDA 12\.4, but this PyTorch to CUDA 13\.0",
    ),
    "nvcc that says nothing": (lambda tools: tools.set_nvcc(""), "set CUDA_HOME"),
    "nvcc that fails": (
        lambda tools: tools.nvcc.write_text("#!/bin/sh\nexit 7\n"),
        "--version failed with exit status 7; set CUDA_HOME",
    ),
    "no CUDA runtime": (
        lambda tools: tools.monkeypatch.setattr(modelnew, "_load_inline", failing(NO_CUDART)),
        "set CUDA_HOME to a complete CUDA toolkit",
    ),
    "a compiler with arguments": (
        lambda tools: tools.monkeypatch.setenv("CXX", "ccache g++"),
        r"CXX is 'ccache g\+\+', but must be one installed program, without arguments",
    ),
    "no setuptools": (lambda tools: tools.monkeypatch.setitem(sys.modules, "setuptools", None), "install setuptools"),
    # A file in place of the directory cannot be written to by root either.
    "no cache": (lambda tools: tools.cache.touch(), "set TORCH_EXTENSIONS_DIR"),
    "a full disk": (
        lambda tools: tools.monkeypatch.setattr(modelnew.tempfile, "mkdtemp", failing(FULL_DISK)),
        "a disk is full.* TORCH_EXTENSIONS_DIR",
    ),
}
COMPILER_SAYS = {
    "nvcc fatal : Unsupported gpu architecture 'compute_90a'": "CUDA toolkit",
    "fatal error: Python.h: No such file or directory": "python3-dev",
    "/tmp/direct.ptx: No space left on device": "a disk is full",
}
for _text, _advice in COMPILER_SAYS.items():
    OBSTACLES[_text] = functools.partial(FakeTools.set, name="failure", value=_text), _advice


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_obstacles_get_one_clear_sentence(tools, obstacle, capsys):
    """The import succeeds and prints the reason. Calls with CUDA tensors and builds ahead of time raise it."""
    obstruct, advice = OBSTACLES[obstacle]
    obstruct(tools)
    extension, reason = modelnew._load_extension()
    assert extension is None
    assert re.search(advice, reason)
    assert "\n" not in reason
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if not re.search("compiling|units compiled", line)]) == 1
    tools.monkeypatch.setattr(modelnew, "_extension", None)
    tools.monkeypatch.setattr(modelnew, "_extension_error", reason)
    with pytest.raises(RuntimeError, match=advice):
        modelnew._built_extension()
    tools.set_gpus()
    with pytest.raises(SystemExit, match=f"^modelnew: .*{advice}") as raised:
        modelnew._main(["build", "--arch", "9.0"])
    assert "\n" not in raised.value.code


@pytest.mark.parametrize("content", ["", "text", "\x7fELF"])
def test_a_damaged_library_is_named(monkeypatch, tmp_path, content):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    planner = Path(modelnew._plan_dry_run(modelnew._sources).library)
    planner.parent.mkdir()
    for path, load in (
        (tmp_path / "modelnew_damaged.so", lambda: modelnew._import_library(str(tmp_path / "modelnew_damaged.so"))),
        (planner, modelnew._dry_run.__wrapped__),
    ):
        path.write_text(content)
        with pytest.raises(RuntimeError, match=rf"^{re.escape(str(path))} cannot be loaded \(.+\); delete it, "):
            load()


def test_without_a_gpu_import_is_silent_and_calls_explain(tools, capsys):
    tools.set_gpus()
    extension, reason = modelnew._load_extension()
    assert extension is None
    assert "no CUDA GPU" in reason
    tools.monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in modelnew._load_extension()[1]
    assert capsys.readouterr().err == ""
    assert tools.compiled == []


# Ahead of time -------------------------------------------------------------------------------------------------------


def test_what_is_built_ahead_is_what_an_import_looks_for(tools, capsys):
    tools.set_gpus()
    modelnew._main(["build", "--arch", "9.0", "8.0", "8.0,9.0"])
    printed = capsys.readouterr().out.split()
    for gpus, path in zip([[(9, 0)], [(8, 0)], [(9, 0), (8, 0), (8, 0)]], printed, strict=True):
        tools.set_gpus(*gpus)
        assert tools.plan().library == path
        assert tools.open().text == "object object"
    assert tools.compiled == sorted(UNITS * 3)
    tools.set_gpus((9, 0))
    modelnew._main(["build"])  # for the GPUs at hand
    assert capsys.readouterr().out.strip() == printed[0]


def test_what_is_built_ahead_needs_no_compilers_later(tools):
    """The last stage of a container image may lack compilers. The other inputs of the build must be the same."""
    tools.set_gpus()
    modelnew._main(["build", "--arch", "9.0"])
    tools.set_gpus((9, 0))
    text = Path(tools.plan().library).read_text()
    for program in (tools.compiler, tools.nvcc):
        program.unlink()
        assert tools.open().text == text
    tools.set_gpus((8, 0))
    with pytest.raises(RuntimeError, match="no CUDA toolkit"):
        tools.open()


def test_a_finished_build_is_only_read(tools):
    """A finished build is not locked, so its directory may be read-only."""
    tools.open()
    next((tools.cache / "modelnew").glob("*.lock")).unlink()
    assert tools.open().text == "object object"
    assert tools.left == {".so"}


@pytest.mark.parametrize(
    "arguments, text",
    [
        ([], "modelnew: PyTorch sees no GPU here; name those to build for, such as --arch 8.0 9.0"),
        (["--arch", "sm_90"], "modelnew: --arch takes compute capabilities such as 8.0 or 9.0, but got 'sm_90'"),
    ],
)
def test_build_says_what_it_lacks(tools, arguments, text):
    tools.set_gpus()
    with pytest.raises(SystemExit, match=f"^{re.escape(text)}$"):
        modelnew._main(["build", *arguments])
    tools.monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SystemExit, match="built without CUDA"):
        modelnew._main(["build", *arguments])


# Real compilers ------------------------------------------------------------------------------------------------------

TINY_SOURCES = {
    "binding.cpp": """
        #include <Python.h>
        #include "answer.cuh"
        #define INIT_OF(name) PyInit_##name
        #define INIT(name) INIT_OF(name)
        PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)(void) {
          static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tiny"};
          PyObject* module = PyModule_Create(&definition);
          PyModule_AddIntConstant(module, "answer", answer());
          return module;
        }
    """,
    "direct.cu": """
        #include "answer.cuh"
        __global__ void store(int* place) { *place = 42; }
        int answer() { return reinterpret_cast<void*>(&store) != nullptr ? 42 : 0; }
    """,
    "answer.cuh": "int answer();\n",
}


def test_builds_in_one_process(monkeypatch, tmp_path):
    """torch's load_inline builds in different relative directories, and again in one that was emptied.

    If torch was built without CUDA, empty libraries replace its CUDA libraries.
    """
    cuda_home = modelnew._find_cuda_home()
    if NINJA is None or cuda_home is None:
        pytest.skip("needs ninja and nvcc")
    if torch.version.cuda is None:
        monkeypatch.setattr(torch.version, "cuda", "{}.{}".format(*modelnew._nvcc_release(cuda_home)))
        for name in ("c10_cuda", "torch_cuda"):
            (tmp_path / f"lib{name}.a").write_text("!<arch>\n")
        monkeypatch.setenv("LIBRARY_PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("1", "it's 2", "1"):
        directory = tmp_path / name
        shutil.rmtree(directory, ignore_errors=True)
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", name)
        build = modelnew._plan_build(TINY_SOURCES, [(8, 0)])
        for _ in range(2):
            assert modelnew._open_or_build(build).answer == 42
        assert {path.suffix for path in (directory / "modelnew").iterdir()} == {".so", ".lock"}
