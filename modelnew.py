"""A two-dimensional convolution on CUDA kernels of its own, compiled for the GPU at hand when this module is imported.

    from modelnew import ModelNew, Conv2d, conv2d, accelerate

    y = conv2d(x, weight, bias, stride=1, padding=1)  # PyTorch's conv2d by signature, result, gradients and errors
    layer = Conv2d(64, 128, 3)                        # nn.Conv2d by signature and state_dict
    model = ModelNew(64, 128, 3)                      # a Model that holds its parameters in `self.conv2d`
    network, report = accelerate(network, example)    # every nn.Conv2d of a network; restore(network) undoes it

float32, float16, bfloat16 and float64; any strides; TF32 or full fp32 as PyTorch's own switches say at each call.
CPU tensors run PyTorch's own convolution. Without a GPU, importing this module compiles nothing.

The file reads downwards: sources, build, operator, modules, networks, bundle.
"""

import argparse
import contextlib
import copyreg
import ctypes
import dataclasses
import functools
import glob
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import runpy
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import flop_counter
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "Conv2d",
    "ConvProblem",
    "LayerReport",
    "ModelNew",
    "Report",
    "accelerate",
    "bundle",
    "conv2d",
    "explain",
    "force_engine",
    "restore",
]

# ---- Sources ----


def _kernel_folder() -> Path:
    """The folder kernels/; an installed modelnew has it as modelnew_kernels/."""
    here = Path(__file__).absolute().parent
    for folder in (here / "modelnew_kernels", here / "kernels"):
        if (folder / "binding.cpp").is_file():
            return folder
    raise ImportError(f"modelnew found no kernel sources beside {__file__}; install it again")


def _read_sources() -> dict[str, str]:
    """Text of every C++ and CUDA file in kernels/, by file name."""
    files = (file for file in sorted(_kernel_folder().iterdir()) if file.suffix in (".cpp", ".cu", ".cuh", ".h"))
    return {file.name: file.read_text(encoding="utf-8") for file in files}


_sources = _read_sources()
_namespace = "modelnew"  # of torch.ops

# Literals are matched too, so that `//` inside a string does not start a comment.
_LITERAL_OR_COMMENT = re.compile(
    r'''R"([^\s()]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|'(?:[^'\\\n]|\\.[^'\n]*)'|//[^\n]*|/\*.*?\*/''', re.DOTALL
)


def _without_comments(text: str) -> str:
    """C++ text without comments, blank lines and indentation, none of which changes the machine code.

    A blank line after a backslash stays, since it ends the line that the backslash continues.
    """
    text = _LITERAL_OR_COMMENT.sub(lambda match: " " if match[0][0] == "/" else match[0], text)
    lines = [line.strip() for line in text.splitlines()]
    return "\n".join(line for line, before in zip(lines, ["", *lines], strict=False) if line or before.endswith("\\"))


# ---- Build ----


class _Environment:
    """A `with` block during which some environment variables have other values."""

    def __init__(self, **variables: str):
        self._variables = variables

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._variables}
        os.environ.update(self._variables)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Build(NamedTuple):
    """Everything that goes into one build of a library; `name` carries a digest of all of it."""

    name: str
    what: str  # for messages
    capabilities: list[tuple[int, int]]
    sources: dict[str, str]
    units: list[str]  # the sources that are compiled, each by itself, the longest first
    cpp_flags: list[str]
    cuda_flags: list[str]
    is_extension: bool = True  # of torch, else a library by itself
    cache: str = ""  # the directory of finished libraries
    cuda_home: str | None = None

    @property
    def library(self) -> str:
        """Where the finished library lies. It gets there by a rename, so that it is complete if it exists."""
        return os.path.join(self.cache, f"{self.name}.so")


def _gpu_capabilities() -> list[tuple[int, int]]:
    """Compute capabilities of the visible GPUs, each once, ascending."""
    return sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})


def _architecture(capability: tuple[int, int]) -> str:
    """nvcc's number for a GPU. Hopper's wgmma instructions exist in the architecture-specific 90a alone."""
    return "90a" if capability == (9, 0) else f"{capability[0]}{capability[1]}"


def _gencode(capability: tuple[int, int]) -> str:
    """nvcc's flag for a GPU."""
    architecture = _architecture(capability)
    return f"-gencode=arch=compute_{architecture},code=sm_{architecture}"


def _find_cuda_home() -> str | None:
    """The CUDA toolkit's directory: CUDA_HOME, CUDA_PATH, that of the nvcc on PATH, or /usr/local/cuda.

    torch looks in the same places but takes the nvcc on PATH at its word, even if it is a link or a script that lies
    outside of its toolkit. Here a directory counts only if it has CUDA's headers as well.
    """
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return named if shutil.which("nvcc", path=os.path.join(named, "bin")) else None
    on_path = shutil.which("nvcc")
    compilers = [on_path, os.path.realpath(on_path)] if on_path else []
    homes = [os.path.dirname(os.path.dirname(nvcc)) for nvcc in (*compilers, "/usr/local/cuda/bin/nvcc")]
    needed = (os.path.join("bin", "nvcc"), os.path.join("include", "cuda_runtime_api.h"))
    complete = (home for home in homes if all(os.path.isfile(os.path.join(home, file)) for file in needed))
    return next(complete, None)


def _find_host_compiler() -> str | None:
    """Path of the C++ compiler that torch calls."""
    return shutil.which(os.environ.get("CXX", "c++"))


def _find_ninja() -> str | None:
    """Path of ninja: on PATH, or beside this Python, as in a virtual environment that was not activated."""
    return shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))


def _nvcc_release(cuda_home: str) -> tuple[int, int]:
    """CUDA version of a toolkit's nvcc, such as (13, 0). Starts a process, so only cold builds ask."""
    nvcc = os.path.join(cuda_home, "bin", "nvcc")
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"{nvcc} --version failed with exit status {done.returncode}; "
            "set CUDA_HOME to a CUDA toolkit whose nvcc runs"
        )
    release = re.search(r"release (\d+)\.(\d+)", done.stdout)
    if release is None:
        raise RuntimeError(f"{nvcc} --version names no CUDA release; set CUDA_HOME to a CUDA toolkit")
    return int(release[1]), int(release[2])


def _cores() -> int:
    """How many compilers may run at once: one a core that this process may use, at most torch's MAX_JOBS."""
    cores, most = len(os.sched_getaffinity(0)), os.environ.get("MAX_JOBS", "")
    return min(cores, int(most)) if most.isdigit() and int(most) > 0 else cores


def _splits_compilation(release: tuple[int, int], cores: int) -> bool:
    """Whether nvcc optimises several kernels of a unit at once, which changes none of them."""
    return cores > 1 and release >= (12, 4)  # older releases do not have --split-compile, or were not tried


def _file_identity(path: str | None) -> list[Any]:
    """What changes when a compiler is replaced, without starting it: real path, size and time of change.

    Whole seconds, since container images keep no more of a file's time.
    """
    if path is None:
        return []
    real = os.path.realpath(path)
    status = os.stat(real)
    return [real, status.st_size, int(status.st_mtime)]


def _cache_directory() -> str:
    """Where finished extensions are kept: torch's own place for them."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions")
    return os.path.join(os.environ.get("TORCH_EXTENSIONS_DIR") or default, "modelnew")


def _cpp_standard() -> str:
    """The C++ standard of torch's headers."""
    return "c++20" if tuple(int(number) for number in torch.__version__.split(".")[:2]) >= (2, 12) else "c++17"


def _cpp_flags() -> list[str]:
    """Flags for units that include torch, but for directories and the extension's name."""
    # Hidden symbols: two versions of this extension in one process (a bundle beside the module) must share nothing.
    hidden = ["-O2", "-fPIC", "-fvisibility=hidden"]
    return [f"-std={_cpp_standard()}", *hidden, f"-D_GLIBCXX_USE_CXX11_ABI={torch.compiled_with_cxx11_abi():d}"]


def _cuda_flags(capabilities: list[tuple[int, int]]) -> list[str]:
    """Flags for units that nvcc compiles. These do not include torch, and their flags do not depend on it."""
    common = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    threads = [f"--threads={len(capabilities)}"] if len(capabilities) > 1 else []
    return [*common, *map(_gencode, capabilities), *threads]


# What torch and nvcc read from the environment besides the compilers' places. torch gives CC to nvcc as -ccbin.
_COMPILER_VARIABLES = ("CC", "PYTORCH_NVCC", "NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")

# Engines that refuse every problem off Hopper, and the unit that replaces them where no GPU is a Hopper GPU.
_HOPPER_UNITS = frozenset({"gather.cu", "stem.cu", "tma.cu", "tma_wgrad.cu", "wgmma.cu", "wgrad.cu"})
_UNIT_WITHOUT_HOPPER = "without_hopper.cpp"

# Units of bundle() alone: the dry run, the binding of a bundle and the end of its kernels.
_DRY_RUN, _BUNDLE_BINDING, _BUNDLE_END = "dry_run.cpp", "bundle_template.cpp", "bundle_template.cu"

# CPU seconds of each unit, of a unit that is not listed and of the link, and the share of the longest unit that stays
# serial. They are fitted to the builds in docs/lab/build.md.
_UNIT_SECONDS = {
    "gather.cu": 100,
    "wgmma.cu": 72,
    "tma.cu": 69,
    "depthwise.cu": 35,
    "wgrad.cu": 25,
    "binding.cpp": 20,
    "operators.cpp": 15,
    "direct.cu": 14,
    "mma.cu": 12,
}
_SHORT_UNIT_SECONDS, _LINK_SECONDS, _SERIAL_SHARE, _DRY_RUN_SECONDS = 5, 3, 0.16, 20


def _unit_seconds(unit: str) -> int:
    return _UNIT_SECONDS.get(unit, _SHORT_UNIT_SECONDS)


def _units(sources: Iterable[str], capabilities: list[tuple[int, int]]) -> list[str]:
    """The sources to compile for these GPUs, the longest first."""
    left_out = {_UNIT_WITHOUT_HOPPER} if (9, 0) in capabilities else _HOPPER_UNITS
    left_out = {_DRY_RUN, _BUNDLE_BINDING, _BUNDLE_END, *left_out}
    names = sorted(name for name in sources if name.endswith((".cpp", ".cu")) and name not in left_out)
    return sorted(names, key=_unit_seconds, reverse=True)


def _plan_build(sources: dict[str, str], capabilities: list[tuple[int, int]]) -> _Build:
    """The extension's build for these GPUs, this torch and the compilers at hand.

    Starts no process, takes milliseconds.
    """
    targets = ", ".join(f"sm_{_architecture(capability)}" for capability in capabilities)
    units, flags = _units(sources, capabilities), (_cpp_flags(), _cuda_flags(capabilities))
    torchs = [torch.__version__, torch.version.git_version, torch.version.cuda, sysconfig.get_config_var("SOABI")]
    build = _Build("modelnew", f"the kernels for {targets}", capabilities, sources, units, *flags)
    return _named(build, torchs)


def _plan_dry_run(sources: dict[str, str]) -> _Build:
    """The build of kernels/dry_run.cpp: the engines' host code, whose device code is never run."""
    units = [_DRY_RUN, *(name for name in _units(sources, [(9, 0)]) if name.endswith(".cu"))]
    define, hidden = "-DMODELNEW_DRY_RUN", "-fvisibility=hidden"
    cpp_flags = ["-std=c++17", "-O1", "-fPIC", hidden, define]
    cuda_flags = ["-std=c++17", "-O0", "-Xcicc=-O0", "-gencode=arch=compute_80,code=compute_80"]
    cuda_flags += ["--expt-relaxed-constexpr", f"-Xcompiler=-fPIC,{hidden}", define]
    flags = cpp_flags, cuda_flags
    return _named(_Build("modelnew_dry_run", "the planner of bundle()", [(8, 0)], sources, units, *flags, False), [])


def _named(build: _Build, versions: list[Any]) -> _Build:
    """The build with digests in its name: of what is compiled, flags and versions, and of the compilers at hand."""
    cuda_home = _find_cuda_home()
    files = _with_headers(build.sources, build.units)
    what = [{name: _without_comments(build.sources[name]) for name in sorted(files)}, build.cpp_flags, build.cuda_flags]
    tools = [
        [_file_identity(cuda_home and os.path.join(cuda_home, "bin", "nvcc")), _file_identity(_find_host_compiler())],
        [os.environ.get(name) for name in _COMPILER_VARIABLES],
    ]
    name = f"{build.name}_{_digest([what, versions])}_{_digest(tools)}"
    return build._replace(name=name, cache=_cache_directory(), cuda_home=cuda_home)


def _with_headers(sources: dict[str, str], files: Iterable[str]) -> list[str]:
    """The files, each after those that it includes."""
    order: dict[str, None] = {}

    def visit(file: str) -> None:
        if file in sources and file not in order:
            for header in re.findall(r'^ *#include "(.*)"', sources[file], re.MULTILINE):
                visit(header)
            order[file] = None

    for file in files:
        visit(file)
    return list(order)


def _digest(ingredients: Any) -> str:
    return hashlib.sha256(json.dumps(ingredients).encode()).hexdigest()[:16]


def _say(text: str, passing: bool = False) -> None:
    """Prints one line to stderr, unless MODELNEW_QUIET is set. On a terminal the next line replaces a `passing` one."""
    if os.environ.get("MODELNEW_QUIET", "0") in ("", "0"):
        replaced = sys.stderr.isatty()
        front, end = "\r\x1b[K" if replaced else "", "" if replaced and passing else "\n"
        print(f"{front}modelnew: {text}", end=end, file=sys.stderr, flush=True)


def _find_library(build: _Build) -> str | None:
    """Path of the finished extension, or None. Without compilers here, those that built it may be any."""
    if build.cuda_home is not None and _find_host_compiler() is not None:
        return build.library if os.path.exists(build.library) else None
    same = glob.glob(os.path.join(glob.escape(build.cache), f"{build.name.rpartition('_')[0]}_*.so"))
    return max(same, key=os.path.getmtime, default=None)


def _import_library(path: str) -> ModuleType:
    """Imports a finished library; the module has the name of the file."""
    spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(path))[0], path)
    try:
        module = importlib.util.module_from_spec(spec)  # opens the library
        spec.loader.exec_module(module)
    except Exception as error:
        raise RuntimeError(f"{path} cannot be loaded ({error}); delete it, and it is built again") from error
    return module


def _open_or_build(build: _Build) -> ModuleType:
    """The extension, compiled first if this build does not exist yet."""
    return _import_library(_find_library(build) or _build_once(build))


def _build_once(build: _Build) -> str:
    """Path of the library, compiled first if this build does not exist yet, by one of several processes at once."""
    import fcntl  # not on Windows, where CPU tensors work

    try:
        os.makedirs(build.cache, exist_ok=True)
        lock = open(f"{build.library}.lock", "a")  # noqa: SIM115 - closed by the `with` below
    except OSError as error:
        raise RuntimeError(
            f"the directory for compiled kernels, {build.cache}, cannot be written ({error}); "
            "set TORCH_EXTENSIONS_DIR to a directory that can"
        ) from error
    with lock:  # closing the file, also by being killed, gives the lock back
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another process, which is compiling the same kernels")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise RuntimeError(
                f"{build.cache} lies on a file system without locks ({error}); "
                "set TORCH_EXTENSIONS_DIR to a directory on another one"
            ) from error
        if not os.path.exists(build.library):
            _compile(build, _require_tools(build))
        return build.library


def _require_tools(build: _Build) -> tuple[int, int]:
    """nvcc's release; RuntimeError with a sentence on what to do when a tool is missing or does not fit."""
    torch_cuda = torch.version.cuda if build.is_extension else None  # which a library by itself need not fit
    if build.cuda_home is None:
        raise RuntimeError(
            f"no CUDA toolkit with nvcc was found; install CUDA {torch_cuda or '12 or 13'} and set CUDA_HOME to its "
            "directory"
        )
    if _find_host_compiler() is None:
        if "CXX" in os.environ:
            raise RuntimeError(
                f"no C++ compiler was found: CXX is {os.environ['CXX']!r}, but must be one installed program, "
                "without arguments"
            )
        raise RuntimeError("no C++ compiler was found; install g++, or set CXX to your compiler")
    if _find_ninja() is None:
        raise RuntimeError("ninja was not found; get it with: pip install ninja")
    if importlib.util.find_spec("setuptools") is None:  # torch.utils.cpp_extension imports it
        raise RuntimeError("no module named 'setuptools' was found; get it with: pip install setuptools")
    release = _nvcc_release(build.cuda_home)
    if torch_cuda is not None and str(release[0]) != torch_cuda.split(".")[0]:
        raise RuntimeError(
            f"the nvcc in {build.cuda_home} belongs to CUDA {release[0]}.{release[1]}, but this PyTorch to CUDA "
            f"{torch_cuda}; install a CUDA {torch_cuda.split('.')[0]} toolkit and set CUDA_HOME to its directory"
        )
    return release


def _compile(build: _Build, nvcc_release: tuple[int, int]) -> None:
    """Compiles the extension and moves it to its place. To be called while holding the lock of this build."""
    # Remove the directories that killed builds left.
    for left in glob.glob(os.path.join(glob.escape(build.cache), f"{build.name}.*.build")):
        shutil.rmtree(left, ignore_errors=True)
    cores = _cores()
    split = build.is_extension and _splits_compilation(nvcc_release, cores)
    expected = _expected_seconds(build, cores, split)
    _say(f"compiling {build.what}, once for this machine; about {expected} s")
    start = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(".build", f"{build.name}.", build.cache, ignore_cleanup_errors=True) as directory,
        _Environment(**_build_environment(build)),
    ):
        _compile_units(build, directory, cores, split)
        os.replace((_link if build.is_extension else _link_alone)(build, directory), build.library)
    _say(f"compiled in {time.perf_counter() - start:.0f} s")


def _expected_seconds(build: _Build, cores: int, split: bool) -> int:
    """Estimated wall time: the cores share the work of all units, beside the serial share of the longest one.

    Where nvcc does not split a unit, no build is shorter than the longest unit.
    """
    if not build.is_extension:
        return round(_LINK_SECONDS + _DRY_RUN_SECONDS / cores)
    targets = {".cpp": 1, ".cu": len(build.capabilities)}
    seconds = [_unit_seconds(unit) * targets[os.path.splitext(unit)[1]] for unit in build.units]
    shared = sum(seconds) / cores + _SERIAL_SHARE * max(seconds)
    return round(_LINK_SECONDS + (shared if split else max(shared, *seconds)))


def _compile_units(build: _Build, directory: str, cores: int, split: bool) -> None:
    """Compiles all units side by side, each to an object file in the directory.

    If this process is killed, ninja may keep running; it can write only into this build's own directory.
    """
    folder = os.path.join(directory, "kernels")
    os.mkdir(folder)
    for name, text in build.sources.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
    with open(os.path.join(directory, "build.ninja"), "w", encoding="utf-8") as file:
        file.write(_ninja_file(build, cores if split else 1))
    start, printed = time.perf_counter(), []
    with contextlib.ExitStack() as stack:
        command = [_find_ninja(), "-j", str(cores)]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
        ninja = stack.enter_context(subprocess.Popen(command, cwd=directory, **pipe))
        stack.callback(ninja.terminate)  # without effect, unless this process is interrupted
        for line in ninja.stdout:
            progress = re.match(r"\[(\d+/\d+)\] kernels/", line)
            if progress is None:
                printed.append(line)
            else:
                _say(f"{progress[1]} units compiled, {time.perf_counter() - start:.0f} s", passing=True)
        if ninja.wait() != 0:
            _say(f"compiling failed after {time.perf_counter() - start:.0f} s")  # ends a terminal's line of progress
            raise RuntimeError("".join(printed))


def _ninja_file(build: _Build, splits: int) -> str:
    """The text of build.ninja: one object for each unit."""
    from torch.utils import cpp_extension

    nvcc = [*build.cuda_flags, *([f"--split-compile={splits}"] if splits > 1 else [])]
    nvcc += ["-ccbin", os.environ["CC"]] if "CC" in os.environ else []
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include", scheme="posix_prefix")]
    cuda_include = os.path.join(build.cuda_home, "include")
    if cuda_include != "/usr/include":  # which the compiler knows; as -isystem it hides C++'s own headers
        includes.append(cuda_include)
    cxx = [_find_host_compiler(), *build.cpp_flags, f"-DTORCH_EXTENSION_NAME={build.name}"]
    cxx += [argument for path in includes for argument in ("-isystem", path)]
    # PYTORCH_NVCC is a shell's words, such as "ccache nvcc".
    compiler = os.environ.get("PYTORCH_NVCC") or shlex.quote(os.path.join(build.cuda_home, "bin", "nvcc"))
    lines = []
    for suffix, command in (("cu", f"{compiler} {shlex.join(nvcc)}"), ("cpp", shlex.join(cxx))):
        escaped = command.replace("$", "$$")
        lines += [f"rule {suffix}", f"  command = {escaped} -c $in -o $out", "  description = $in"]
    lines += [f"build {unit}.o: {unit.rpartition('.')[2]} kernels/{unit}" for unit in build.units]
    return "\n".join(lines) + "\n"


def _link(build: _Build, directory: str) -> str:
    """Has torch link the objects with its own libraries; returns the path of the extension.

    load_inline builds a name only once in a process: a second build of it becomes NAME_v1. A fresh name for each build
    avoids that. Importers do not see this name: the binding is compiled with that of the build.
    """
    name = f"{build.name}_{time.time_ns()}"
    _load_inline(
        name=name,
        cpp_sources=["// All code is in the objects that this file is linked with.\n"],
        extra_ldflags=[f"{unit}.o" for unit in build.units],  # it links in the build directory
        build_directory=directory,
        with_cuda=True,
        is_python_module=False,
    )
    return os.path.join(directory, f"{name}.so")


def _link_alone(build: _Build, directory: str) -> str:
    """Links the objects into a library that needs no other; returns its path."""
    path = os.path.join(directory, "linked.so")
    objects = [os.path.join(directory, f"{unit}.o") for unit in build.units]
    # -Bsymbolic: the library's own functions in place of the CUDA runtime that the process may have.
    command = [_find_host_compiler(), "-shared", "-pthread", "-Wl,--no-undefined,-Bsymbolic", "-o", path, *objects]
    linked = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if linked.returncode != 0:
        raise RuntimeError(linked.stdout)
    return path


def _build_environment(build: _Build) -> dict[str, str]:
    """Environment variables for ninja and torch during a build."""
    return {
        "CUDA_HOME": build.cuda_home,
        "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(_find_ninja())]),
        # torch compiles nothing for a GPU, but reads this list and refuses what it does not know.
        "TORCH_CUDA_ARCH_LIST": "8.0",
        "NINJA_STATUS": "[%f/%t] ",
    }


def _load_inline(build_directory: str, **keywords: Any) -> None:
    """torch.utils.cpp_extension.load_inline, imported late because that alone can take half a second."""
    from torch.utils import cpp_extension

    # cpp_extension reads CUDA_HOME when it is imported, which somebody may have done before.
    cpp_extension.CUDA_HOME = os.environ.get("CUDA_HOME", cpp_extension.CUDA_HOME)
    if "no_implicit_headers" in inspect.signature(cpp_extension.load_inline).parameters:
        keywords["no_implicit_headers"] = True
    else:  # before torch 2.8: an empty header replaces the one that is included, which costs 13 s
        headers = os.path.join(build_directory, "headers")
        os.makedirs(os.path.join(headers, "torch"))
        open(os.path.join(headers, "torch", "extension.h"), "w").close()
        keywords["extra_include_paths"] = [headers]
    cpp_extension.load_inline(build_directory=build_directory, **keywords)


# What the compilers and linkers say, and what to do about it.
_KNOWN_FAILURES = {
    "cannot find -lcudart": "the linker cannot find CUDA's runtime library, libcudart; "
    "set CUDA_HOME to a complete CUDA toolkit, one with a lib64 directory",
    "Unsupported gpu architecture": "this nvcc is too old or too new for the GPU; "
    "install a CUDA toolkit that supports it and set CUDA_HOME to its directory",
    "No space left on device": "a disk is full; free some space, or set TORCH_EXTENSIONS_DIR, and TMPDIR for the "
    "compilers' own files, to directories on another one",
    "unsupported GNU version": "this nvcc does not support the installed C++ compiler; "
    "install an older g++ and set CXX and CC to it",
    "Python.h: No such file": "Python's C headers are missing; install them (package python3-dev or the like)",
}


def _reason(error: Exception) -> str:
    """Why there is no extension, in one sentence where the cause is known."""
    text = str(error)
    for symptom, sentence in _KNOWN_FAILURES.items():
        if symptom in text:
            return sentence
    if "\n" not in text:
        return text or repr(error)
    lines = text.splitlines()
    errors = [line for line in lines if re.search(r"\berror\b|\bfatal\b|undefined reference", line)]
    return "\n".join(["building the kernels failed:", *(errors or lines)[:20]])


def _load_extension() -> tuple[ModuleType | None, str]:
    """The extension, or None and the reason. Raises nothing: CPU tensors work on machines that cannot build."""
    if torch.version.cuda is None:
        return None, "this PyTorch was built without CUDA; install one with CUDA"
    if not torch.cuda.is_available():
        return None, "PyTorch sees no CUDA GPU; check the driver and CUDA_VISIBLE_DEVICES"
    try:
        return _open_or_build(_plan_build(_sources, _gpu_capabilities())), ""
    except Exception as error:  # whatever it is, CPU tensors go on
        reason = _reason(error)
    _say(f"no kernels, so CUDA tensors will raise an error: {reason}")
    return None, reason


def _built_extension() -> ModuleType:
    """The extension, or RuntimeError with the reason why there is none."""
    if _extension is None:
        raise RuntimeError(f"modelnew has no compiled kernels for CUDA tensors: {_extension_error}")
    return _extension


# ---- Operator ----
#
# Two ways lead to the kernels. Eager calls go straight into the extension, which hands plain tensors to a kernel and
# what else it knows to PyTorch's dispatcher. Compiled code, and what the extension leaves to Python, calls operators
# in torch.ops, see kernels/operators.cpp.

# PyTorch's own, for what is not ours: CPU tensors, and arguments that it can explain better.
_pytorch_conv2d: Callable[..., Tensor] = torch.conv2d

# True while torch.compile reads the code (it replaces the call by a constant). torch 2.1 has it under another name.
_is_dynamo_compiling: Callable[[], bool] = (
    getattr(torch.compiler, "is_dynamo_compiling", None) or torch._utils.is_compiling
)
# The same, and also true while torch.export runs it.
_is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling


def conv2d(
    input: Tensor,  # noqa: A002 - PyTorch's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor:
    """PyTorch's functional conv2d on this module's kernels: the same arguments, result, gradients and errors.

    Args:
        input: [N, C, H, W] or [C, H, W].
        weight: [K, C/groups, R, S], of input's dtype and device.
        bias: [K].
        padding: also 'valid' or 'same'.

    Returns:
        [N, K, P, Q] or [K, P, Q]; channels_last if the input or the weight is, but not in float64.

    CUDA tensors run our kernels (float32, float16, bfloat16, float64), all others PyTorch's own convolution.
    """
    if _extension is not None and not _is_dynamo_compiling():
        y = _extension.conv2d(input, weight, bias, stride, padding, dilation, groups)
        if y is not None:
            return y
    return _general_conv2d(input, weight, bias, stride, padding, dilation, groups)


def _general_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: Any
) -> Tensor:
    """conv2d() for every kind of tensor and argument that PyTorch knows."""
    arguments = x, weight, bias, stride, padding, dilation, groups
    ours = _any_cuda(x, weight) and not _overridden(x, weight, bias)
    prepared = _prepare(*arguments) if ours else None
    if prepared is None:
        return _pytorch_conv2d(*arguments)
    if isinstance(padding, str):  # with numbers in its place, the short way may be open
        return conv2d(*prepared)
    return _operators.conv2d(*prepared)


def _any_cuda(*arguments: Any) -> bool:
    return any(isinstance(argument, Tensor) and argument.is_cuda for argument in arguments)


def _overridden(*arguments: Any) -> bool:
    """Whether a tensor subclass or a function mode is to see torch.conv2d, and PyTorch's function to run.

    PyTorch's abstract tensors are none of these, nor are its tracers' modes and `with torch.device(...)`, which acts on
    factories alone. In compiled code no mode is.
    """
    for argument in arguments:
        kind = type(argument)
        plain = kind is Tensor or kind is nn.Parameter or not isinstance(argument, Tensor)
        if not plain and not kind.__module__.startswith("torch._subclasses."):
            return True
    if _is_compiling():
        return False
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    kinds = [type(mode) for mode in modes]
    return any(kind is not DeviceContext and not kind.__module__.startswith("torch.fx.") for kind in kinds)


_Pair = tuple[int, int]
_Arguments = tuple[Tensor, Tensor, Tensor | None, _Pair, _Pair, _Pair, int]


def _prepare(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: Any
) -> _Arguments | None:
    """The arguments as the kernels take them, with numbers instead of a named padding.

    None for what is not a convolution's arguments at all: the error is PyTorch's to word.
    """
    tensors = isinstance(x, Tensor) and isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
    strides, dilations, count = _pair(stride), _pair(dilation), _integer(groups)
    if not tensors or strides is None or dilations is None or count is None:
        return None
    if isinstance(padding, str) and padding == "same":
        sized = x.dim() in (3, 4) and weight.dim() == 4 and min(weight.shape[2:]) >= 1
        if strides != (1, 1) or min(dilations) < 1 or not sized:
            return None
        x, paddings = _pad_same(x, weight, dilations)
    else:
        paddings = (0, 0) if isinstance(padding, str) and padding == "valid" else _pair(padding)
    return None if paddings is None else (x, weight, bias, strides, paddings, dilations, count)


def _integer(value: Any) -> int | None:
    """An int of anything that PyTorch takes for one, NumPy's ints among them but not bools, or None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, torch.SymInt)):  # asked first: torch.compile cannot look for methods of its symbols
        return value
    scalar = isinstance(value, Tensor) or not hasattr(value, "__len__")  # NumPy's arrays have an __index__, too
    return value.__index__() if scalar and hasattr(value, "__index__") else None


def _pair(value: Any) -> _Pair | None:
    """Two ints of an int or a sequence of one or two, or None."""
    items = value if isinstance(value, (tuple, list)) else (value,)
    if len(items) not in (1, 2):
        return None
    first, last = _integer(items[0]), _integer(items[-1])
    return None if first is None or last is None else (first, last)


def _pad_same(x: Tensor, weight: Tensor, dilation: _Pair) -> tuple[Tensor, _Pair]:
    """padding='same' as PyTorch does it: half before, half after, and an odd rest after, as zeros in the input."""
    total_h, total_w = dilation[0] * (weight.shape[2] - 1), dilation[1] * (weight.shape[3] - 1)
    if total_h % 2 or total_w % 2:
        x = torch.constant_pad_nd(x, [0, total_w % 2, 0, total_h % 2])
    return x, (total_h // 2, total_w // 2)


def _composed_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """The operator conv2d where there is no extension: PyTorch's own, for all but a GPU's tensors.

    Fake ones are no exception: code compiled with them would run, and be cached, without our kernels.
    """
    if x.is_cuda:
        _built_extension()
    return torch.ops.aten.conv2d(x, weight, bias, *settings)


def _composed_backward(
    dy: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int, mask: list[bool]
) -> tuple[Tensor, ...]:
    """The operator conv2d_backward where there is no extension; what is not wanted has no elements."""
    if x.dim() == 3:
        batched = dy.unsqueeze(0), x.unsqueeze(0), weight
        dx, dw, db = _composed_backward(*batched, stride, padding, dilation, groups, mask)
        return dx.squeeze(0) if mask[0] else dx, dw, db
    gradients = torch.ops.aten.convolution_backward(
        dy, x, weight, [weight.shape[0]], stride, padding, dilation, False, [0, 0], groups, mask
    )
    return tuple(g if wanted else x.new_empty(0) for g, wanted in zip(gradients, mask, strict=True))


def _register_operators() -> None:
    """Defines conv2d and conv2d_backward in this code's namespace of torch.ops, once in a process.

    The extension defines and implements them, see kernels/operators.cpp. Without one they have the same schemas and are
    compositions of PyTorch's operators.
    """
    if _extension is not None:
        # Compositions of a copy of this code whose build failed: PyTorch would decompose an operator that has any.
        vars(_operators).pop("compositions", None)
        _extension.register_operators(_namespace, DeviceContext)
        first = vars(_operators).setdefault("library", _extension.__file__)
        if first != _extension.__file__:
            _say(f"compiled code and gradients of this process run the kernels of {first}, which it loaded first")
        elif "entries" not in vars(_operators):
            _stand_in_front()
    elif not hasattr(_operators, "conv2d"):
        settings = "SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation, SymInt groups"
        tags = {"tags": torch.Tag.needs_fixed_stride_order} if hasattr(torch.Tag, "needs_fixed_stride_order") else {}
        schemas = torch.library.Library(_namespace, "FRAGMENT")
        schemas.define(f"conv2d(Tensor input, Tensor weight, Tensor? bias, {settings}) -> Tensor", **tags)
        schemas.define(
            f"conv2d_backward(Tensor grad_output, Tensor input, Tensor weight, {settings}, bool[3] output_mask)"
            " -> (Tensor, Tensor, Tensor)",
            **tags,
        )
        compositions = torch.library.Library(_namespace, "IMPL")
        for key in ("CompositeImplicitAutograd", "FuncTorchBatched"):
            compositions.impl("conv2d", _composed_conv2d, key)
            compositions.impl("conv2d_backward", _composed_backward, key)
        # Operators die with their Library, and torch.ops outlives whatever runs this code.
        _operators.schemas, _operators.compositions = schemas, compositions
    _register_flop_formulas()


def _stand_in_front() -> None:
    """Puts the extension in front of what compiled code calls, an overload of each operator.

    An overload reads its arguments by the schema, which takes longer than the rest of the call: docs/lab/operators.md.
    """
    operators = _operators.conv2d, _operators.conv2d_backward
    for operator in operators:
        vars(operator).pop("default", None)  # an overload is hashed by what is replaced here: change none in use
    overloads = [operator.default for operator in operators]
    _operators.entries = _extension.entries(*(overload._op for overload in overloads))
    for overload, entry in zip(overloads, _operators.entries, strict=True):
        overload._op = entry


def _register_flop_formulas() -> None:
    """Has torch.utils.flop_counter count the operators as it counts PyTorch's convolution."""

    def batched(shape: Any) -> Any:
        return shape if len(shape) == 4 else (1, *shape)

    # Some versions of torch wrap the formulas so that they take tensors.
    conv_flop, conv_backward_flop = map(inspect.unwrap, (flop_counter.conv_flop, flop_counter.conv_backward_flop))

    def forward(x: Any, w: Any, bias: Any, *settings: Any, out_shape: Any, **_: Any) -> int:
        return conv_flop(batched(x), w, bias, *settings[:3], False, out_shape=batched(out_shape))

    def backward(dy: Any, x: Any, w: Any, *settings_and_mask: Any, out_shape: Any, **_: Any) -> int:
        *settings, groups, mask = settings_and_mask
        shapes = (batched(out_shape[0]), *out_shape[1:])
        settings += [False, [0, 0], groups, mask]
        return conv_backward_flop(batched(dy), batched(x), w, None, *settings, out_shape=shapes)

    for operator, formula in ((_operators.conv2d, forward), (_operators.conv2d_backward, backward)):
        if not hasattr(flop_counter, "register_flop_formula"):  # torch 2.1
            flop_counter.flop_mapping[operator] = formula
        elif operator not in flop_counter.flop_registry:
            flop_counter.register_flop_formula(operator)(formula)


# ---- Modules and functions for users ----


class ModelNew(nn.Module):
    """A model of one convolution, as nn.Conv2d is called and initialised, without a bias unless asked for.

    Its parameters are those of `self.conv2d`, an nn.Conv2d, read at every call; the kernels are this module's.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = False,
    ):
        super().__init__()
        self.conv2d = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups=groups, bias=bias
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] or [C, H, W] to [N, K, P, Q] or [K, P, Q]."""
        layer = self.conv2d
        return conv2d(x, layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)


class Conv2d(nn.Conv2d):
    """nn.Conv2d, all of its arguments included, with this module's kernels behind it."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)  # noqa: A001
            padding = 0
        return conv2d(input, weight, bias, self.stride, padding, self.dilation, self.groups)


def explain(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> str:
    """Which engine and configuration conv2d() and its gradients would use for these arguments, and why.

    The first line is the problem; then come lines that start with `forward: `, `dgrad: ` (gradient to the input),
    `wgrad: ` (to the weight) and, with a bias, `bgrad: `, each going on with the engine's name.

    Raises what conv2d() raises for the arguments, and RuntimeError for CUDA tensors if there are no kernels.
    """
    if not _any_cuda(input, weight):
        return "PyTorch's own convolution, since neither the input nor the weight is on a CUDA GPU\n"
    extension = _built_extension()
    prepared = _prepare(input, weight, bias, stride, padding, dilation, groups)
    if prepared is None:
        _pytorch_conv2d(input, weight, bias, stride, padding, dilation, groups)  # raises
        return "PyTorch's own convolution, which alone knows arguments of this kind\n"
    return extension.explain(*prepared)


# Of the table in kernels/binding.cpp, to be known without a build.
_ENGINE_NAMES = (
    "patches",
    "dilated",
    "tma",
    "wgmma",
    "gather",
    "stem",
    "depthwise",
    "pointwise",
    "mma",
    "strided",
    "tma_wgrad",
    "wgrad",
    "direct",
)


@contextlib.contextmanager
def force_engine(name: str) -> Iterator[None]:
    """In this `with` block every convolution, in every thread, runs on the named engine, forward and backward.

    One that the engine cannot take raises RuntimeError, an unknown name ValueError. For tests and benchmarks.
    """
    if name not in _ENGINE_NAMES:
        raise ValueError(f"modelnew has no engine {name!r}; it has {', '.join(map(repr, _ENGINE_NAMES))}")
    if _extension is None:
        yield
        return
    before = _extension.force_engine(name)
    try:
        yield
    finally:
        _extension.force_engine(before)


# ---- Networks ----
#
# accelerate() changes the class of a layer, in place, and restore() changes it back. Conv2d has no state of its own, so
# parameters and their ties, hooks, pruning, old weight_norm, attributes, optimizers, references by DDP and FSDP and the
# keys of state_dict stay what they are: the same objects. A new module in the place of the old one would lose whatever
# holds the old one. The new class knows what it was made from: nothing is written into the module, and copies know it.
#
#     nn.Conv2d                              AcceleratedConv2d(_Accelerated, Conv2d)
#     Mine(nn.Conv2d)                        AcceleratedMine(_Accelerated, Mine, Conv2d): Mine's methods come first
#     ParametrizedConv2d(nn.Conv2d)          ParametrizedAcceleratedConv2d(AcceleratedConv2d), see _rebuilt
#
# It works because nn.Conv2d.forward does nothing but call self._conv_forward. Where a class or an instance has one of
# the two of its own, a new base class would not be asked, or would change what is computed: such layers stay.


class LayerReport(NamedTuple):
    """One convolution of a network: a row for each of its calls in a pass of the example input, or one without."""

    name: str  # as in named_modules(), the first one if there are several; empty if the network is the layer
    replaced: bool  # by this call of accelerate() or an earlier one, and not put back
    reason: str  # why not, if it was not
    convolution: str  # its sizes, with those of the input if that is known
    dtype: str
    engine: str | None = None  # the forward pass's, before a layer was put back; None if nothing is known to have run
    explanation: str = ""  # explain()'s whole line about the forward pass
    before_ms: float | None = None  # medians, of PyTorch's convolution and of ours: in training mode with the gradients
    after_ms: float | None = None


class Report(NamedTuple):
    """The result of accelerate(). `str(report)` is a table to be read, the attributes are for programs."""

    layers: tuple[LayerReport, ...]  # all convolutions, also those of other kinds than nn.Conv2d
    before_ms: float | None  # medians for the whole network, with PyTorch's convolution in all layers that are replaced
    after_ms: float | None
    notes: tuple[str, ...]

    def __str__(self) -> str:
        replaced = [row for row in self.layers if row.replaced]
        other = {(row.name, row.reason): None for row in self.layers if not row.replaced}  # without repetitions
        count = len({row.name for row in self.layers})
        lines = [f"{len({row.name for row in replaced})} of {count} convolutions run on modelnew"]
        shown = [row for row in self.layers if row.replaced or row.engine]
        if shown:
            total = ("whole network", "", "", "", *_speed(self.before_ms, self.after_ms))
            cells = [(_shown(row.name), row.convolution, row.dtype, row.engine or "-",
                      *_speed(row.before_ms, row.after_ms)) for row in shown]  # fmt: skip
            titles = ("layer", "convolution", "type", "engine", "before ms", "after ms", "speed-up")
            lines += _table([titles, *cells, *([total] if self.after_ms is not None else [])])
        if other:
            lines += ["not replaced:", *(f"  {_shown(name)}: {reason}" for name, reason in other)]
        return "\n".join([*lines, *self.notes])


def _shown(name: str) -> str:
    return name or "(the network itself)"


def _speed(before: float | None, after: float | None) -> tuple[str, str, str]:
    """Two times and their quotient as texts."""
    times = ["-" if ms is None else f"{ms:.4f}" for ms in (before, after)]
    return times[0], times[1], f"{before / after:.2f}x" if before and after else "-"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines in columns, the last three, numbers, aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = len(widths) - 3
    return [
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


_Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


def accelerate(
    model: nn.Module,
    example_input: Tensor | tuple[Any, ...] | dict[str, Any] | None = None,
    *,
    keep_slower: bool = False,
) -> tuple[nn.Module, Report]:
    """Lets the nn.Conv2d of a network run on this module's kernels where that is faster, in place; restore() undoes it.

    Args:
        model: any module, an nn.Conv2d included. Its layers stay the same objects with the same parameters, hooks and
            state_dict, but their class becomes a subclass of modelnew.Conv2d as well as of what it was.
        example_input: what the network is called with: a tensor, a tuple of arguments or a dict of keyword arguments.
            The network then runs on it, once to see which engine each layer uses, and on a GPU some 40 times more to
            time layers and network with PyTorch's convolution and ours in turn. In training mode, with gradients
            enabled, these passes are forward and backward, with random gradients of the floating-point outputs; else
            they are forward only. Call accelerate() under torch.autocast if the network will run under it, and under
            torch.no_grad() to decide by the forward of a network in training mode. Buffers, such as the statistics of
            batch norm, and the random state are put back after each, and .grad is not touched. The network's own hooks
            are called in all of these passes. In training mode the module of a DistributedDataParallel runs without it.
        keep_slower: leaves layers replaced that are found slower.

    Returns:
        The model that was given, and a report to be printed, a row for each convolution. Layers stay as they are, and
        the report says why, if they are no nn.Conv2d, compute something else (a forward of their own, quantization),
        are of TorchScript, not initialised yet (nn.LazyConv2d) or have parameters that the kernels do not know.

    With an example on a GPU, a layer whose calls together take over 3% longer than with PyTorch's convolution goes back
    to the class that it had before any call of accelerate(). If the network still takes over 2% longer, all layers go
    back. A layer on a GPU that was not timed is judged at 32 images of 56x56: it goes back if a pass that it needs
    would run there on plain multiply-adds (engine direct) where PyTorch's runs on tensor cores.

    Raises TypeError for a model that is no nn.Module or an example of another type, RuntimeError for a network on a GPU
    if there are no kernels, and what the network raises for the example; the network is then as it was before.

    To be called before torch.compile, or on what it returned; code that was compiled before is then compiled again. But
    on what torch.fx has traced, not before it: its tracer looks into layers that are not torch's own. TorchScript does
    not know the kernels: call restore() before torch.jit.script. Eager-mode quantization (torch.ao.quantization.prepare
    and prepare_qat) gives the layers that it observes their own classes back; call restore() before fuse_modules and
    before quantizing graphs (torch.fx, torch.export), which know layers by their classes. A network that is pickled
    whole needs modelnew to be loaded; its state_dict does not.
    """
    _require_module(model)
    call = _example_call(example_input)
    network = _uncompiled(model)
    layers = {name: layer for name, layer in network.named_modules() if _kind(layer)}
    if any(_kind(layer) == "Conv2d" for layer in layers.values()) and _any_cuda(*network.parameters()):
        _built_extension()
    before = {name: type(layer) for name, layer in layers.items()}
    try:
        reasons = {name: _replace(layer) for name, layer in layers.items()}
        report = _report(network, layers, reasons, call, keep_slower)
    except BaseException:
        for name, layer in layers.items():
            _set_class(layer, before[name])
        raise
    if any(type(layer) is not before[name] for name, layer in layers.items()):
        _forget_compiled(model)
    return model, report


def restore(model: nn.Module) -> nn.Module:
    """Gives the layers that accelerate() changed, in this model or in one that it is a copy of, their classes back.

    Returns the model that was given. Layers that were made as modelnew.Conv2d stay that. Raises TypeError for a model
    that is no nn.Module.
    """
    _require_module(model)
    accelerated = [layer for layer in model.modules() if isinstance(layer, _Accelerated)]
    for layer in accelerated:
        _set_class(layer, _original_class(type(layer)))
    if accelerated:
        _forget_compiled(model)
    return model


def _require_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")


def _example_call(example: Any) -> _Call | None:
    """The arguments of a call of the network."""
    if example is None:
        return None
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, tuple):
        return example, {}
    if isinstance(example, dict):
        return (), example
    raise TypeError(
        "example_input must be a tensor, a tuple of arguments or a dict of keyword arguments, "
        f"not {type(example).__name__}"
    )


def _uncompiled(model: nn.Module) -> nn.Module:
    """The network that torch.compile(model) wraps. Asked without importing its machinery, which takes seconds."""
    return model._modules.get("_orig_mod", model)


def _forget_compiled(model: nn.Module) -> None:
    """Makes torch.compile read the network again. Not all of its versions see that a layer has another class."""
    if any("_orig_mod" in m._modules or getattr(m, "_compiled_call_impl", None) for m in model.modules()):
        torch.compiler.reset()


# Classes of torch.nn.modules.conv. A layer of any but the first stays, and the report calls it by these words.
_KINDS = {
    "Conv2d": "",
    "Conv1d": "a 1-d convolution",
    "Conv3d": "a 3-d convolution",
    "ConvTranspose1d": "a transposed convolution",
    "ConvTranspose2d": "a transposed convolution",
    "ConvTranspose3d": "a transposed convolution",
    "_ConvNd": "a convolution of another kind",
}


def _kind(layer: nn.Module) -> str:
    """Which of these classes a layer is of, or was before TorchScript compiled it; empty for other layers."""
    if isinstance(layer, torch.jit.ScriptModule):
        name = getattr(layer, "original_name", "")
        return name if name in _KINDS else ""
    names = (cls.__name__ for cls in type(layer).__mro__ if cls.__module__ == nn.Conv2d.__module__)
    return next((name for name in names if name in _KINDS), "")


# The methods of PyTorch's convolution. Kept here because some people patch nn.Conv2d itself.
_FORWARDS = {name: getattr(nn.Conv2d, name) for name in ("forward", "_conv_forward")}

_SERVED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # in the order of the kernels' DType
_AT_NAMES = ("at::kFloat", "at::kHalf", "at::kBFloat16", "at::kDouble")


def _reason_to_stay(layer: nn.Module) -> str:
    """Why a convolution that is none of ours cannot become one, or nothing."""
    cls = type(layer)
    parameters = list(layer.parameters())
    if isinstance(layer, torch.jit.ScriptModule):
        return "TorchScript compiled it"
    if any(map(nn.parameter.is_lazy, parameters)):
        return "not initialised yet: run the network once, then accelerate it again"
    for name, torchs in _FORWARDS.items():
        if name in vars(layer):
            return f"it has a {name} of its own, set on the instance"
        if getattr(cls, name) is not torchs:
            return f"its class, {cls.__module__}.{cls.__qualname__}, has a {name} of its own"
    if getattr(layer, "qconfig", None) is not None:
        return "it is prepared for quantization (it has a qconfig)"
    for parameter in parameters:
        # DTensor, quantized tensors and the like bring their own operators, of which ours is none.
        if type(parameter).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return f"its parameters are of type {type(parameter).__name__}: accelerate before sharding or quantizing"
        if parameter.dtype not in _SERVED_DTYPES:
            return f"its parameters are {_dtype_name(parameter)}"
    return ""


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _replace(layer: nn.Module) -> str:
    """Changes the class of a convolution, or says why not."""
    if isinstance(layer, _Accelerated):
        return ""
    if isinstance(layer, Conv2d):
        return "it was made as a modelnew.Conv2d"
    other = _KINDS[_kind(layer)]
    reason = f"{other}: only nn.Conv2d is served" if other else _reason_to_stay(layer)
    if not reason:
        try:
            _set_class(layer, _accelerated_class(type(layer)))
        except TypeError as error:  # a class that refuses subclasses, or whose objects cannot change class
            return f"its class cannot be extended: {error}"
    return reason


def _set_class(layer: nn.Module, cls: type) -> None:
    object.__setattr__(layer, "__class__", cls)  # past a __setattr__ of the layer's own


class _Accelerated:
    """Base of all classes that accelerate() makes."""

    _modelnew_original: type  # what the class was made from

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For copy and pickle, which look for a class by its name and would not find this one."""
        reduced = super().__reduce_ex__(max(protocol, 2))
        made_here = "_modelnew_original" in vars(type(self))
        if made_here and isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__:
            return _new_accelerated, (self._modelnew_original,), *reduced[2:]
        return reduced

    @property
    def qconfig(self) -> Any:
        """Eager-mode quantization sets it and finds layers by their class: setting it puts the class back."""
        return vars(self)["qconfig"] if "qconfig" in vars(self) else super().qconfig

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        if value is None:
            vars(self)["qconfig"] = None
        else:
            _set_class(self, _original_class(type(self)))
            self.qconfig = value

    @qconfig.deleter
    def qconfig(self) -> None:
        if vars(self).pop("qconfig", self) is self:
            raise AttributeError("qconfig")


def _new_accelerated(original: type) -> nn.Module:
    """An accelerated layer without contents, for copy and pickle to fill."""
    cls = _extended(original)
    return cls.__new__(cls)


_PARAMETRIZE = "torch.nn.utils.parametrize"


def _accelerated_class(cls: type) -> type:
    """The class that a layer of class `cls` gets; for everything but parametrized layers always the same one."""
    if cls.__module__ != _PARAMETRIZE:
        return _extended(cls)
    base = next(parent for parent in cls.__mro__ if parent.__module__ != _PARAMETRIZE)
    return _rebuilt(cls, base, _extended(base))


@functools.cache
def _extended(cls: type) -> type:
    bases = (_Accelerated, Conv2d) if cls is nn.Conv2d else (_Accelerated, cls, Conv2d)
    contents = {"__module__": __name__, "__doc__": cls.__doc__, "_modelnew_original": cls}
    return type(cls)(f"Accelerated{cls.__name__}", bases, contents)


def _original_class(cls: type) -> type:
    """The class before accelerate(), also if parametrize or FSDP has put one of its own over ours since."""
    extended = next(parent for parent in cls.__mro__ if "_modelnew_original" in vars(parent))
    return _rebuilt(cls, extended, extended._modelnew_original)


def _rebuilt(cls: type, old: type, new: type) -> type:
    """`new`, or a class like `cls` that is derived from `new` instead of `old`.

    torch.nn.utils.parametrize makes a class for each module, keeps its properties there, and removes itself by deleting
    them and taking __bases__[0] for the module's class again; so neither another subclass on top of it nor one beside
    it would do. Changing its __bases__ would also change copies of the module, which share it.
    """
    if cls is old:
        return new
    bases = tuple(_rebuilt(base, old, new) if issubclass(base, old) else base for base in cls.__bases__)
    source = vars(cls).get("_modelnew_source")
    if source is not None and source.__bases__ == bases and _contents(source) == _contents(cls):
        return source  # nothing has happened since: exactly the class that it was
    name = cls.__name__.replace(old.__name__, new.__name__)  # ParametrizedConv2d: named for its base
    return type(cls)(name, bases, _contents(cls) | {"_modelnew_source": cls})


def _contents(cls: type) -> dict[str, Any]:
    """The contents of a class statement that would define this class."""
    added = ("__dict__", "__weakref__", "__slotnames__", "_modelnew_source")  # by Python, by copying an object, by us
    return {name: value for name, value in vars(cls).items() if name not in added}


# -- Passes of the example --

_TIMED_RUNS = 10  # of each kind; their median forgives a few that were disturbed

# How much longer than with PyTorch's convolution a layer and the network may take: what medians may be off by.
_LAYER_SLACK, _NETWORK_SLACK = 1.03, 1.02

_Rows = dict[str, list[LayerReport]]  # by layer, one for each of its calls in a pass
_Times = dict[tuple[str, int], float]  # milliseconds of each call, by (name, number), of each layer in a pass


class _Pass(NamedTuple):
    """How the network runs on the example."""

    network: nn.Module
    call: _Call
    trained: list[nn.Parameter]  # the backward pass computes their gradients; there is none without any
    devices: list[torch.device]  # GPUs that it is known to use

    def forward(self) -> Any:
        with torch.set_grad_enabled(bool(self.trained)):
            return self.network(*self.call[0], **self.call[1])

    def run(self) -> None:
        """Forward and backward; keeps nothing that they compute."""
        outputs = [y for y in _tensors(self.forward()) if y.is_floating_point() and y.grad_fn is not None]
        if outputs:
            gradients = [torch.randn_like(y) for y in outputs]
            with torch.autocast("cuda", enabled=False):
                # Unlike backward(), this leaves .grad and the hooks of parameters alone.
                torch.autograd.grad(outputs, self.trained, gradients, allow_unused=True)


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in what a network returns."""
    if isinstance(value, Tensor):
        yield value
        return
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    for part in parts:
        yield from _tensors(part)


def _trained(network: nn.Module) -> list[nn.Parameter]:
    """The parameters whose gradients count: none unless the network trains and the caller has gradients enabled."""
    training = network.training and torch.is_grad_enabled()
    return [parameter for parameter in network.parameters() if training and parameter.requires_grad]


def _report(
    network: nn.Module, layers: dict[str, nn.Module], reasons: dict[str, str], call: _Call | None, keep_slower: bool
) -> Report:
    """The report, from passes of the example if there is one; puts slower layers back."""
    ours = {name: layer for name, layer in layers.items() if isinstance(layer, Conv2d)}
    rows = {name: [_row(name, layer, reasons[name])] for name, layer in layers.items()}
    trained, notes, network_ms = _trained(network), [], (None, None)
    if not any(_kind(layer) == "Conv2d" for layer in layers.values()):
        notes.append("the network has no nn.Conv2d")
    if ours and call is not None and any(map(nn.parameter.is_lazy, network.parameters())):
        notes.append("the example was not run: it would initialise the lazy modules of the network")
    elif ours and call is not None:
        devices = _cuda_devices(network, call)
        # The reducer of DistributedDataParallel waits for a whole backward pass.
        parallel = trained and devices and isinstance(network, nn.parallel.DistributedDataParallel)
        example = _Pass(network.module if parallel else network, call, trained if devices else [], devices)
        with _eager():
            seen = _watched(example, ours, reasons)
            notes += [f"not called with this example: {_shown(name)}" for name in ours if name not in seen]
            rows |= seen
            if devices:
                network_ms, found = _judged_by_time(example, ours, rows, keep_slower)
                notes += found
            else:
                notes.append("on the CPU modelnew is PyTorch's own convolution: nothing was timed")
    # Filters of one pixel or one channel have both layouts: they are judged in the one that the others have.
    parameters = itertools.chain.from_iterable(layer.parameters() for layer in ours.values())
    last = any(_channels_last(parameter) and not parameter.is_contiguous() for parameter in parameters)
    for name, layer in ours.items():
        if not keep_slower and isinstance(layer, _Accelerated) and rows[name][0].after_ms is None:
            _put_back(layer, rows, name, _reason_by_engine(layer, bool(trained), last))
    return Report(tuple(itertools.chain.from_iterable(rows.values())), *network_ms, tuple(notes))


def _put_back(layer: nn.Module, rows: _Rows, name: str, reason: str) -> None:
    """Gives a layer its class back, if there is a reason, and notes it in the layer's rows."""
    if reason:
        _set_class(layer, _original_class(type(layer)))
        rows[name] = [row._replace(replaced=False, reason=reason) for row in rows[name]]


def _channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


_JUDGED_IMAGES, _JUDGED_SIZE = 32, 56  # where layers are judged that were not timed
_MOST_IMAGE_CHANNELS = 4


def _reason_by_engine(layer: nn.Module, training: bool, channels_last: bool) -> str:
    """Why a layer that was not timed is likely to be slower than PyTorch's, or nothing."""
    parameters = list(layer.parameters())
    weight = max(parameters, key=Tensor.numel, default=None)  # or what a parametrization computes it from
    if weight is None or not _any_cuda(weight) or torch.cuda.get_device_capability(weight.device) < (8, 0):
        return ""
    dtype = weight.dtype if weight.dtype == torch.float64 else _autocast_dtype() or weight.dtype
    arguments = _judged_arguments(layer, dtype, channels_last and _channels_last(weight))
    with torch.cuda.device(weight.device):
        lines = _built_extension().explain(*arguments).splitlines()
    # Layers of so few channels read images, whose gradient is rarely wanted.
    dgrad = training and layer.in_channels > _MOST_IMAGE_CHANNELS
    needed = {"forward": True, "dgrad": dgrad, "wgrad": training and any(p.requires_grad for p in parameters)}
    plans = {name: plan for name, _, plan in (line.partition(": ") for line in lines) if needed.get(name)}
    # cuDNN runs float32 on tensor cores where the contract is TF32, which the lines say for each pass.
    half = dtype in (torch.float16, torch.bfloat16)
    slow = [name for name, plan in plans.items() if plan.startswith("direct;") and (half or "; tf32" in plan)]
    if not slow:
        return ""
    H, W = arguments[0].shape[2:]
    return (
        f"at {_JUDGED_IMAGES} images of {H}x{W} its {' and '.join(slow)} would run on plain multiply-adds "
        "(engine direct), PyTorch's on tensor cores; give accelerate() an example input to decide by time"
    )


def _judged_arguments(layer: nn.Module, dtype: torch.dtype, channels_last: bool) -> _Arguments:
    """A layer's convolution of images of the usual size, or the least one that its filter and padding take.

    The tensors are on the meta device. The layer's own weight is not read: a parametrization would compute it, and some
    change buffers then.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    least = max(_JUDGED_SIZE, 1 + max(layer._reversed_padding_repeated_twice))  # the latter is what reflection needs
    size = [max(least, d * (r - 1) + 1) for r, d in zip(layer.kernel_size, layer.dilation, strict=True)]
    x = torch.empty((_JUDGED_IMAGES, layer.in_channels, *size), dtype=dtype, device="meta", memory_format=layout)
    filters = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
    weight = torch.empty(filters, dtype=dtype, device="meta", memory_format=layout)
    bias = None if layer._parameters.get("bias") is None else weight.new_empty(layer.out_channels)
    x, padding = _padded(layer, x)
    return _prepare(x, weight, bias, layer.stride, padding, layer.dilation, layer.groups)


def _padded(layer: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
    """A layer's input and padding as its convolution gets them."""
    if layer.padding_mode == "zeros":
        return x, layer.padding
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), 0


def _row(name: str, layer: nn.Module, reason: str, x: Tensor | None = None) -> LayerReport:
    """A row without times; with the layer's input it says what runs."""
    weight = next(layer.parameters(), None)
    row = LayerReport(
        name,
        replaced=isinstance(layer, _Accelerated),
        reason=reason,
        convolution=_sizes(layer, x),
        dtype="" if weight is None else _dtype_name(weight),
    )
    if x is None:
        return row
    x, padding = _padded(layer, x)
    x, weight, bias = _autocast(x, layer.weight, layer.bias)
    text = explain(x, weight, bias, layer.stride, padding, layer.dilation, layer.groups)
    # Without such a line PyTorch's own convolution runs, or nothing, as for an empty batch.
    line = next((line for line in text.splitlines() if line.startswith("forward: ")), "")
    engine = line.removeprefix("forward: ").partition(";")[0] or ("PyTorch" if text.startswith("PyTorch") else None)
    return row._replace(dtype=_dtype_name(x), engine=engine, explanation=line or text.strip())


def _autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The arguments of a convolution as autocast, if it is on, casts them on a GPU."""
    dtype = _autocast_dtype() if tensors[0].is_cuda else None
    return [t if t is None or dtype is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def _autocast_dtype() -> torch.dtype | None:
    if not torch.is_autocast_enabled():
        return None
    # torch before 2.4 has only the latter.
    return torch.get_autocast_dtype("cuda") if hasattr(torch, "get_autocast_dtype") else torch.get_autocast_gpu_dtype()


def _sizes(layer: nn.Module, x: Tensor | None = None) -> str:
    """A convolution in words, such as `N32 C64 K128 3x3, 56x56, stride 2, pad 1`."""

    def each(value: Any) -> str:
        values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))

    text = f"C{layer.in_channels} K{layer.out_channels} {'x'.join(map(str, layer.kernel_size))}"
    if x is not None:
        batch = f"N{x.shape[0]} " if x.dim() == 4 else ""
        text = f"{batch}{text}, {x.shape[-2]}x{x.shape[-1]}"
    settings = (("stride", each(layer.stride), "1"), ("pad", each(layer.padding), "0"),
                ("output pad", each(layer.output_padding), "0"), ("dilation", each(layer.dilation), "1"),
                ("groups", str(layer.groups), "1"))  # fmt: skip
    text += "".join(f", {name} {value}" for name, value, usual in settings if value != usual)
    return text if layer.padding_mode == "zeros" else f"{text}, {layer.padding_mode}"


def _watched(example: _Pass, layers: dict[str, nn.Module], reasons: dict[str, str]) -> _Rows:
    """Runs the network forward once and looks at what its layers are called with."""
    rows: _Rows = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            x = _first(arguments, keywords)
            if isinstance(x, Tensor):  # else the layer raises
                rows.setdefault(name, []).append(_row(name, layer, reasons[name], x))

        return hook

    with contextlib.ExitStack() as hooks:
        for name, layer in layers.items():
            # Registered last, hence called last: it sees what hooks of the user's made of input and weight.
            hooks.callback(layer.register_forward_pre_hook(watch(name), with_kwargs=True).remove)
        hooks.enter_context(_unchanged(example))
        example.forward()
    return rows


def _first(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """A layer's input among the arguments of its call."""
    return arguments[0] if arguments else keywords.get("input")


def _judged_by_time(
    example: _Pass, layers: dict[str, nn.Module], rows: _Rows, keep_slower: bool
) -> tuple[tuple[float, float], list[str]]:
    """Writes times into the rows, puts slower layers back, and returns the network's times and what to note."""
    accelerated = {name: layer for name, layer in layers.items() if isinstance(layer, _Accelerated)}
    warm_up = _in_turn(example, accelerated.values(), _network_ms, 2)
    host_ms = max(side[-1][0] for side in warm_up)
    layers_ms = functools.partial(_layers_ms, layers=layers, host_ms=host_ms)
    passes = _in_turn(example, accelerated.values(), layers_ms, _TIMED_RUNS)
    before, after = map(_medians, passes)
    for name, calls in rows.items():
        keys = [(name, index) for index in range(len(calls))]
        rows[name] = [
            row._replace(before_ms=before.get(key) if row.replaced else None, after_ms=after.get(key))
            for key, row in zip(keys, calls, strict=True)
        ]
    before, after = (_medians([_sums(times) for times in side]) for side in passes)
    for name in () if keep_slower else accelerated.keys() & before.keys() & after.keys():
        slower = _slower(before[name], after[name], _LAYER_SLACK)
        _put_back(layers[name], rows, name, slower and f"slower than PyTorch's convolution: {slower}")
    chosen = {name: layer for name, layer in accelerated.items() if isinstance(layer, _Accelerated)}
    times = _in_turn(example, chosen.values(), _network_ms, _TIMED_RUNS)
    network_ms = tuple(statistics.median(ms for _, ms in side) for side in times)
    notes = ["times are of forward and backward passes"] if example.trained else []
    slower = chosen and not keep_slower and _slower(*network_ms, _NETWORK_SLACK)
    if slower:
        notes.append(f"all layers are PyTorch's again: the network as a whole was slower: {slower}")
        for name, layer in chosen.items():
            _put_back(layer, rows, name, f"the network as a whole was slower: {slower}")
    return network_ms, notes


def _slower(before: float, after: float, slack: float) -> str:
    """Both times, if the latter is longer by more than the slack."""
    return f"{after:.4f} ms against {before:.4f} ms" if after > slack * before else ""


def _sums(times: _Times) -> dict[str, float]:
    """The time of each layer in a pass."""
    names = {name for name, _ in times}
    return {name: sum(ms for key, ms in times.items() if key[0] == name) for name in names}


def _medians(passes: list[dict[Any, float]]) -> dict[Any, float]:
    keys = dict.fromkeys(itertools.chain.from_iterable(passes))
    return {key: statistics.median(times[key] for times in passes if key in times) for key in keys}


def _in_turn(
    example: _Pass, layers: Iterable[nn.Module], measure: Callable[[_Pass], Any], runs: int
) -> tuple[list[Any], list[Any]]:
    """Returns what `measure` does with PyTorch's convolution in these accelerated layers, and with ours.

    In turn: both meet the same clocks and, unlike in calls of a layer by itself, the caches as the network leaves them.
    All passes begin with the same random state, so networks that skip layers at random skip the same ones.
    """
    ours = [(layer, type(layer)) for layer in layers]
    theirs = [(layer, _original_class(cls)) for layer, cls in ours]
    results: tuple[list[Any], list[Any]] = ([], [])
    try:
        for _ in range(runs):
            for side, classes in zip(results, (theirs, ours), strict=True):
                for layer, cls in classes:
                    _set_class(layer, cls)
                with _unchanged(example):
                    side.append(measure(example))
    finally:
        for layer, cls in ours:
            _set_class(layer, cls)
    return results


def _network_ms(example: _Pass) -> tuple[float, float]:
    """Milliseconds until a pass was launched, and until it was done on all of its GPUs."""
    _synchronize(example.devices)
    start = time.perf_counter()
    example.run()
    launched = time.perf_counter()
    _synchronize(example.devices)
    return (launched - start) * 1e3, (time.perf_counter() - start) * 1e3


_Spans = dict[tuple[str, torch.device], list[list[torch.cuda.Event]]]  # DataParallel runs a layer on several devices


def _layers_ms(example: _Pass, layers: dict[str, nn.Module], host_ms: float) -> _Times:
    """The times of one pass; `host_ms` is what it takes to launch."""
    spans: _Spans = {}
    with contextlib.ExitStack() as hooks:
        for name, layer in layers.items():  # after all other hooks, and before them: around the layer's forward alone
            timer = functools.partial(_mark_call, spans, name)
            hooks.callback(layer.register_forward_pre_hook(timer, with_kwargs=True).remove)
            hooks.callback(layer.register_forward_hook(timer, with_kwargs=True, prepend=True).remove)
        # The GPU waits until the host is through, or else short layers would be as long as it takes to launch them:
        # twice its time, for the events and the hooks, at 2 GHz.
        torch.cuda._sleep(int(min(2 * host_ms, 1000) * 2e6))
        example.run()
    _synchronize(example.devices)
    times: _Times = {}
    for (name, _), calls in spans.items():
        first = sum(key[0] == name for key in times)
        for index, events in enumerate(calls, first):
            pairs = zip(events[::2], events[1::2], strict=False)  # a call that checkpointing breaks off has no end
            times[name, index] = sum(begin.elapsed_time(end) for begin, end in pairs)
    return times


def _mark_call(
    spans: _Spans, name: str, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], *output: Tensor
) -> None:
    """A hook before and after a layer: adds events where its forward and its backward begin and end."""
    x = _first(arguments, keywords)
    if not _any_cuda(x):
        return
    device = x.device  # the hooks below must not keep x
    calls = spans.setdefault((name, device), [])
    if not output:
        calls.append([])
    events = calls[-1]

    def mark(*_: Any) -> None:
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record(torch.cuda.current_stream(device))

    mark()
    node = output[0].grad_fn if output else None
    if node is not None and "Squeeze" in node.name():  # PyTorch makes a batch of a single image
        node = node.next_functions[0][0]
    if node is not None:  # a module's backward hooks would make the output a view, which must not change in place
        node.register_prehook(mark)
        node.register_hook(mark)


def _synchronize(devices: list[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _cuda_devices(network: nn.Module, call: _Call) -> list[torch.device]:
    """GPUs that a pass is known to use."""
    tensors = itertools.chain(network.parameters(), network.buffers(), call[0], call[1].values())
    return sorted({t.device for t in tensors if isinstance(t, Tensor) and t.is_cuda}, key=str)


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Without torch.compile, which would read hooks instead of calling them. torch before 2.6 cannot do without it."""
    needed = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")  # importing it takes seconds
    return torch.compiler.set_stance("force_eager") if needed else contextlib.nullcontext()


@contextlib.contextmanager
def _unchanged(example: _Pass) -> Iterator[None]:
    """A `with` block whose pass leaves no trace in buffers, tensors that are plain attributes, and the random state.

    Plain attributes: old weight_norm and pruning keep there the weight that they compute, with its graph.
    """
    modules = list(example.network.modules())
    buffers = [(buffer, buffer.clone()) for buffer in example.network.buffers()]
    bindings = [dict(module._buffers) for module in modules]
    attributes = [_plain_tensors(module) for module in modules]
    with torch.random.fork_rng([device.index for device in example.devices]):
        try:
            yield
        finally:
            # The next pass casts the weights again, and casts that were made without gradients are of no use later.
            torch.clear_autocast_cache()
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)
            for module, bound, plain in zip(modules, bindings, attributes, strict=True):
                module._buffers.clear()
                module._buffers.update(bound)
                for name in _plain_tensors(module).keys() - plain.keys():
                    del vars(module)[name]
                vars(module).update(plain)


def _plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}


# ---- The bundle ----
#
# A bundle is one Python file that runs by itself: kernels/bundle_template.py, and the kernels in a string. The engines
# of given problems are found by a dry run (kernels/dry_run.cpp): their host code, linked with stand-ins for the CUDA
# runtime, plans for a GPU that need not be here and names the instances that it would launch.


class ConvProblem(NamedTuple):
    """A convolution, for bundle(): sizes of its tensors and settings, as conv2d() takes them."""

    input: tuple[int, int, int, int]  # N, C, H, W
    weight: tuple[int, int, int, int]  # K, C / groups, R, S
    bias: bool = False
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, int] = 0
    dilation: int | tuple[int, int] = 1
    groups: int = 1
    dtype: torch.dtype = torch.float32


# Numbers of SMs by compute capability, from NVIDIA's data sheets. The choice is made for the first one; instances that
# the others ask for are compiled as well.
_SM_COUNTS = {
    (8, 0): (108, 56),
    (8, 6): (84, 82, 80, 72, 70, 68, 48, 46, 38, 30, 28, 26),
    (8, 9): (142, 128, 114, 80, 76, 60, 58, 56, 46, 34, 24),
    (9, 0): (132, 114, 78),
    (10, 0): (148,),
    (12, 0): (188, 170, 84, 70, 48, 36),
}
# SMs of a group, within which clusters find room: as on an H200, and others, since GPUs of one model differ.
_SM_GROUPS = (0, 18, 16, 14)

# Spellings that evaluation scripts reject or warn about when they find them in a submission, in code, comments and
# strings alike. They are after fake implementations; a bundle does without these spellings instead of arguing.
_REJECTED = {
    "error handlers": r"(?i)\btry\s*:|\bexcept\b|\bpass\b",
    "statements that must come first in a file": r"__future__",
    "threads and processes": r"\bthreading\b|\bmultiprocessing\b|concurrent\.futures|PoolExecutor",
    "tensor subclasses": r"_make_subclass|class\s+\w+.*\((torch\.)?Tensor\)|Tensor\.__new__",
    "patched timers": r"(Event|Event\.record|Event\.elapsed_time|synchronize|perf_counter|time\.time)\s*=[^=]",
    "streams in Python": r"cuda\.Stream\s*\(|cuda\.stream\b|\.(wait|record)_stream\s*\(",
    "PyTorch's own layers": r"torch\.nn\.(?!Module\b|Parameter\b)|\bnn\.functional\.\w|\bF\.(conv|linear|pad)",
    "PyTorch's own operators": r"torch\.(conv\w*|mm|bmm|matmul|einsum|clamp|relu)(?=\s*\(|\s|$)",
    "loss of precision": r"__float2half(_rn)?\s*\(|\(\s*__half\s*\)|static_cast\s*<\s*(__)?half\s*>\s*\(|\.half\s*\(|"
    r"\.float16\s*\(|\.to\s*\(\s*(dtype\s*=\s*)?torch\.(float16|half)\b",
}


def bundle(problems: ConvProblem | Iterable[ConvProblem] | None = None, arch: str | None = None) -> str:
    """One Python file, as text, that defines ModelNew: for evaluation scripts that take one.

    Args:
        problems: the convolutions that the file is for. It has only the engines that these use, forward and backward,
            with TF32 allowed and not, as whole files (an engine that chooses others while it runs, such as strided,
            brings all that it may choose), and compiles only the instances that they launch. Other arguments raise
            ValueError there; operands of other strides are copied. None: all engines, for any problem in any format.
        arch: compute capability of the GPU that the file is for, such as "9.0". By default that of the current GPU.

    It runs by itself, also under exec() without a file, and compiles its kernels when it runs, once for a directory of
    extensions. Its names but ModelNew begin with _modelnew in any spelling.

    Raises ValueError for a problem that is none, for `arch` without problems, or if a source contains what evaluation
    scripts reject; RuntimeError if there is neither a GPU nor `arch`, or no nvcc and C++ compiler for the dry run that
    chooses the engines.
    """
    if isinstance(problems, ConvProblem):
        problems = [problems]
    binding, constants = _one_text({_BUNDLE_BINDING}), {}
    if problems is None:
        if arch is not None:
            raise ValueError("a bundle for all problems is for any GPU: arch goes with problems")
        kernels = _one_text({name for name in _sources if name.endswith(".cu")})
    else:
        keys = list(dict.fromkeys(map(_problem_key, problems)))
        if not keys:
            raise ValueError("problems must name at least one convolution; None stands for all")
        capability, sm_counts = _bundle_gpu(arch)
        kernels = _kernels_for(keys, capability, sm_counts)
        binding = f"{_define('PROBLEMS', map(_problem_row, keys))}\n{binding}"
        constants["CAPABILITY"] = repr(capability)
    constants |= {"BINDING": _literal(binding), "KERNELS": _literal(kernels)}
    text = (_kernel_folder() / "bundle_template.py").read_text(encoding="utf-8")
    for name, value in constants.items():
        text = text.replace(f"_MODELNEW_{name} = None\n", f"_MODELNEW_{name} = {value}\n")
    text = _bundle_note(problems) + text.partition('"""\n')[2]
    _require_pasteable(text)
    return text


def _problem_key(problem: ConvProblem) -> tuple[Any, ...]:
    """A problem with pairs of numbers for its settings, to be compared. Raises ValueError if it is no convolution."""
    pairs = [_pair(value) for value in (problem.stride, problem.padding, problem.dilation)]
    numbers = [_integer(value) for value in (*problem.input, *problem.weight, problem.groups)]
    if None in (*pairs, *numbers) or len(problem.input) != 4 or len(problem.weight) != 4:
        raise ValueError(f"{problem} is no problem: input and weight have four sizes, settings are integers")
    if problem.dtype not in _SERVED_DTYPES:
        raise ValueError(f"{problem} is no problem: its dtype must be a floating-point one of 16, 32 or 64 bits")
    limited, least = (*numbers[1:], *itertools.chain(*pairs)), (*[1] * 8, *[1] * 2, *[0] * 2, *[1] * 2)
    if numbers[0] < 1 or any(not low <= number <= _MOST for low, number in zip(least, limited, strict=True)):
        raise ValueError(f"{problem} is no problem: a size or a setting is out of range")
    (_, C, *_, K, group_C, _, _), groups = numbers[:8], numbers[8]
    key = tuple(numbers[:4]), tuple(numbers[4:8]), bool(problem.bias), *pairs, groups, problem.dtype
    if group_C * groups != C or K % groups != 0 or min(_output_size(key)) < 1:
        raise ValueError(f"{problem} is no problem: its channels and groups, or its filter and image, do not fit")
    return key


def _output_size(key: tuple[Any, ...]) -> tuple[int, int]:
    """P, Q"""
    x, w, _, stride, padding, dilation = key[:6]
    spans = (x[2 + i] + 2 * padding[i] - dilation[i] * (w[2 + i] - 1) - 1 for i in (0, 1))
    return tuple(span // step + 1 for span, step in zip(spans, stride, strict=True))


_MOST = (2**31 - 1) // 4  # the kernels' limit of all numbers but the batch size


def _bundle_gpu(arch: str | None) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Compute capability and numbers of SMs to plan for, the first of which decides."""
    capability = _capability(arch) if arch is not None else None
    own_sms: list[int] = []
    if torch.cuda.is_available():
        capability = capability or torch.cuda.get_device_capability()
        if capability == torch.cuda.get_device_capability():
            own_sms = [torch.cuda.get_device_properties().multi_processor_count]
    if capability is None:
        raise RuntimeError("PyTorch sees no GPU here; name the one that the file is for, such as arch 9.0")
    sm_counts = (*own_sms, *_SM_COUNTS.get(capability, ()))
    if not sm_counts:
        known = ", ".join(f"{major}.{minor}" for major, minor in _SM_COUNTS)
        raise RuntimeError(f"a bundle for compute capability {arch} is made on such a GPU; without it: {known}")
    return capability, sm_counts


@functools.cache
def _dry_run() -> ctypes.CDLL:
    build = _plan_dry_run(_sources)
    path = build.library if os.path.exists(build.library) else _build_once(build)
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise RuntimeError(f"{path} cannot be loaded ({error}); delete it, and it is built again") from error


def _sizes_for_kernels(key: tuple[Any, ...], tf32: bool) -> list[int]:
    """A problem as kernels/sizes.cuh has it, of contiguous tensors."""
    (N, C, H, W), (K, group_C, R, S), _, stride, padding, dilation, groups, dtype = key
    P, Q = _output_size(key)
    sizes = [N, C, H, W, K, R, S, P, Q, groups, *stride, *padding, *dilation, _SERVED_DTYPES.index(dtype), tf32]
    for shape in ((C, H, W), (group_C, R, S), (K, P, Q)):
        sizes += [math.prod(shape[i:]) for i in range(4)]  # strides
    return sizes


def _planned(
    key: tuple[Any, ...], tf32: bool, operator: int, gpu: tuple[int, int, int], engine: str = ""
) -> tuple[str, set[str]]:
    """The engine of a problem's operator (kernels' Operator) and the instances that it launches, as C++ text.

    `gpu`: as kernels/cuda_stand_ins.h has it. If an engine is named, it is the one.
    """
    sizes = _sizes_for_kernels(key, tf32)
    text = ctypes.create_string_buffer(1 << 16)
    dry_run = _dry_run().modelnew_dry_run
    dry_run.restype = ctypes.c_bool
    call = (*gpu, (ctypes.c_int64 * len(sizes))(*sizes), operator, key[2], engine.encode() or None)
    done = dry_run(*call, text, ctypes.c_size_t(len(text)))
    name, *instances = text.value.decode().splitlines()
    if not done:
        raise ValueError(f"{ConvProblem(*key)} cannot be planned: {name}")
    return name, set(map(_instance, instances))


def _instance(line: str) -> str:
    """An instance in C++, of a line of the dry run."""
    kernel, *numbers = line.split()
    return f'{{"{kernel}", {{{", ".join(numbers)}}}}}'


def _kernels_for(keys: list[tuple[Any, ...]], capability: tuple[int, int], sm_counts: tuple[int, ...]) -> str:
    """The CUDA text for these problems: which engines and instances, then the files that have them."""
    rows, engines, instances = [], set(), set()
    first, *others = itertools.product([10 * capability[0] + capability[1]], sm_counts, _SM_GROUPS)
    for key in keys:
        chosen = []
        for tf32, operator in itertools.product((False, True), range(4)):
            if operator == 3 and not key[2]:  # no bias, no gradient to it
                chosen.append("nullptr")
                continue
            engine, launched = _planned(key, tf32, operator, first)
            instances |= launched.union(*(_planned(key, tf32, operator, gpu, engine)[1] for gpu in others))
            engines.add(engine)
            chosen.append(f"&k{''.join(map(str.capitalize, engine.split('_')))}Engine")
        rows.append(f"{{{{{', '.join(chosen[:4])}}}, {{{', '.join(chosen[4:])}}}}}")
    files = {f"{engine}.cu" for engine in engines}
    kernels = {re.match(r'\{("\w+")', instance)[1] for instance in instances}
    for name, text in _sources.items():
        if name.endswith(".cu") and any(kernel in text for kernel in kernels):
            files.add(name)
    defines = [_define("INSTANCES", sorted(instances) or ['{"none", {}}']), _define("CHOSEN", rows)]
    return "\n".join([*defines, _one_text(_with_callees(files))])


def _define(name: str, items: Iterable[str]) -> str:
    """A macro that is a list, an item a line."""
    return f"#define MODELNEW_{name}" + ",".join(f" \\\n  {item}" for item in items) + "\n"


def _problem_row(key: tuple[Any, ...]) -> str:
    """A problem as bundle_template.cpp has it."""
    (x, w), bias, pairs, groups, dtype = key[:2], key[2], key[3:6], key[6], key[7]
    numbers = ["{" + ", ".join(map(str, values)) + "}" for values in (x, w, *pairs)]
    settings = f"{{{', '.join(numbers[2:])}, {groups}}}"
    return f"{{{numbers[0]}, {numbers[1]}, {str(bias).lower()}, {settings}, {_AT_NAMES[_SERVED_DTYPES.index(dtype)]}}}"


_DECLARATION = re.compile(r"^(?!extern|using|template|inline)(\w+) (\w+)(\([^;{}]*\));", re.MULTILINE)
_ENGINE = re.compile(r"^extern const Engine (k\w+Engine)\{", re.MULTILINE)


@functools.cache
def _definers() -> dict[str, str]:
    """The .cu file of every engine and of every function that a header declares for others."""
    declared = {name for text in _sources.values() for _, name, _ in _DECLARATION.findall(text)}
    definers = {}
    for file, text in _sources.items():
        if file.endswith(".cu"):
            defined = set(_ENGINE.findall(text))
            defined |= declared & set(re.findall(r"^\w+ (\w+)\([^;{}]*\) \{", text, re.MULTILINE))
            definers |= dict.fromkeys(defined, file)
    return definers


def _used(file: str) -> set[str]:
    """Which of these a file mentions."""
    return set(re.findall(r"\w+", _without_comments(_sources[file]))) & _definers().keys()


def _with_callees(files: set[str]) -> set[str]:
    """The files and, for engines that choose others when they are called, all that these may choose from."""
    wanted, found = set(files), set(files)
    while wanted:
        file = wanted.pop()
        chooses = '#include "choice.cuh"' in _sources[file] or file not in files
        new = {_definers()[name] for name in _used(file)} - found if chooses else set()
        wanted |= new
        found |= new
    return found


def _one_text(files: set[str]) -> str:
    """These files after the headers that they include, as one text; kernels with the end of every bundle's."""
    last = sorted(files - {_BUNDLE_END}) + [_BUNDLE_END] * (_BUNDLE_BINDING not in files)
    headers = [file for file in _with_headers(_sources, last) if file not in last]
    parts = []
    for file in (*headers, *last):
        if file == _BUNDLE_END:
            parts.append(_stand_ins(files))
        text = re.sub(r'^#(pragma once|include ".*")\n', "", _sources[file], flags=re.MULTILINE)
        parts.append(f"// ---- kernels/{file} ----\n\n{text}")
    return "\n".join(filter(None, parts))


def _stand_ins(files: set[str]) -> str:
    """Definitions of what these files mention of engines that are left out."""
    missing = {name for file in files for name in _used(file) if _definers()[name] not in files}
    lines = [
        f'extern const Engine {name}{{"{file[:-3]}", not_in_this_file}};'
        for name, file in sorted(_definers().items())
        if name in missing and name.endswith("Engine")
    ]
    for text in _sources.values():
        for kind, name, arguments in _DECLARATION.findall(text):
            if name in missing:
                failure = {"void": "", "cudaError_t": "  return cudaErrorNotSupported;\n"}.get(kind, "  return {};\n")
                lines.append(f"{kind} {name}{arguments} {{\n{failure}}}")
    if not lines:
        return ""
    refuse = 'const char* not_in_this_file(const Problem&, Operator) { return "it is not in this file"; }'
    first = ["// ---- Stand-ins for engines that are not in this file ----", "", "namespace modelnew {"]
    return "\n".join([*first, refuse, *lines, "}  // namespace modelnew", ""])


def _bundle_note(problems: Iterable[ConvProblem] | None) -> str:
    """A bundle's first lines."""
    what = "for any problem" if problems is None else "for given problems (MODELNEW_PROBLEMS)"
    return f'''"""ModelNew, a 2-D convolution with CUDA kernels of its own, in one file {what}.

Written by modelnew's bundle(). The file reads downwards: the model, the build, the binding with its gradients, and the
kernels: what the files of modelnew's folder kernels/ say, headers first.
"""
'''


def _problem_of_script(path: str) -> ConvProblem:
    """The problem of a reference script in KernelBench's form: Model(*get_init_inputs()) on get_inputs().

    The script runs on the meta device: nothing is computed. Raises ValueError if it cannot, or if its Model is not one
    nn.Conv2d, `conv2d`, that takes the arguments of ModelNew.
    """
    try:
        with torch.device("meta"), torch.no_grad():
            script = runpy.run_path(path)
            settings, inputs = list(script["get_init_inputs"]()), list(script["get_inputs"]())
            model, ours = script["Model"](*settings), ModelNew(*settings)
            with _Operators() as operators:
                output = model(*inputs)
    except Exception as error:
        raise ValueError(f"{path} does not run on the meta device: {type(error).__name__}: {error}") from error
    layer = getattr(model, "conv2d", None)
    if isinstance(layer, nn.Conv2d) and isinstance(layer.padding, str):
        raise ValueError(f"the Model of {path} names its padding, {layer.padding!r}: a bundle takes numbers")
    same = isinstance(layer, nn.Conv2d) and all(
        getattr(layer, name) == getattr(ours.conv2d, name) for name in (*nn.Conv2d.__constants__, "output_padding")
    )
    parameters = [{name: p.shape for name, p in m.named_parameters()} for m in (model, ours)]
    calls = operators.calls
    one = len(calls) == 1 and calls[0][0] is torch.ops.aten.convolution.default and calls[0][2] is output
    if not same or parameters[0] != parameters[1] or not one:
        seen = ", ".join(str(call[0]) for call in operators.calls[:5])
        raise ValueError(f"the Model of {path} is not one nn.Conv2d, `conv2d`, as ModelNew makes it; it runs {seen}")
    x, w, bias, stride, padding, dilation, _, _, groups = calls[0][1]
    settings = tuple(stride), tuple(padding), tuple(dilation), groups
    return ConvProblem(tuple(x.shape), tuple(w.shape), bias is not None, *settings, x.dtype)


class _Operators(TorchDispatchMode):
    """A `with` block that notes the operators that run: (operator, arguments, result)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, result))
        return result


def _literal(text: str) -> str:
    """A Python literal of a source text that can be read as that text, if possible."""
    raw = f"r'''\n{text}'''"
    readable = "'''" not in text and not text.endswith(("'", "\\"))
    return raw if readable else repr(text)


def _require_pasteable(text: str) -> None:
    """Raises ValueError if an evaluation script would reject the text."""
    for what, pattern in _REJECTED.items():
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(pattern, line):
                raise ValueError(f"line {number} of the bundle looks like {what}, word it otherwise: {line.strip()}")
    missing = [word for word in ("__global__", "load_inline", "class ModelNew") if word not in text]
    if missing:
        raise ValueError(f"the bundle lacks {missing}")


def _build_ahead(machines: list[str]) -> None:
    """Builds for machines as --arch names them; none means this one. RuntimeError: a sentence on what to do."""
    if torch.version.cuda is None:
        raise RuntimeError("this PyTorch was built without CUDA; install one with CUDA")
    wanted = [sorted({_capability(name) for name in machine.split(",")}) for machine in machines]
    if not wanted:
        wanted = [_gpu_capabilities()]
    if not wanted[0]:
        raise RuntimeError("PyTorch sees no GPU here; name those to build for, such as --arch 8.0 9.0")
    for capabilities in wanted:
        print(_open_or_build(_plan_build(_sources, capabilities)).__file__)


def _capability(text: str) -> tuple[int, int]:
    """(9, 0) of "9.0"."""
    numbers = re.fullmatch(r"(\d+)\.(\d)", text)
    if numbers is None:
        raise RuntimeError(f"--arch takes compute capabilities such as 8.0 or 9.0, but got {text!r}")
    return int(numbers[1]), int(numbers[2])


def _main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="modelnew.py", description="Tools around the modelnew module.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "build",
        help="compile the kernels ahead of time, on a machine with or without a GPU",
        description="Compiles the kernels to where `import modelnew` looks for them, and prints the paths.",
    )
    command.add_argument(
        "--arch",
        nargs="+",
        default=[],
        metavar="X.Y",
        help="compute capability of the GPUs to build for: one library for each, and one for a machine with several "
        "kinds if they are joined by commas (default: the GPUs of this machine)",
    )
    command = commands.add_parser(
        "bundle",
        help="write one file that can be pasted into evaluation scripts",
        description="Writes ModelNew and its kernels as one file. With --for only the kernels of one problem.",
    )
    command.add_argument(
        "--for",
        dest="script",
        metavar="FILE.py",
        help="a reference script in KernelBench's form: Model, get_init_inputs, get_inputs (default: all problems)",
    )
    command.add_argument("--arch", metavar="X.Y", help="compute capability of the GPU (default: that of this machine)")
    command.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: standard output)")
    options = parser.parse_args(arguments)
    try:
        if options.command == "build":
            _build_ahead(options.arch)
            return
        text = bundle(_problem_of_script(options.script) if options.script else None, options.arch)
        if options.output is None:
            sys.stdout.write(text)
        else:
            Path(options.output).write_text(text, encoding="utf-8")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        sys.exit(f"modelnew: {_reason(error)}")


# The last statements, so that everything is in place for them.
_operators = getattr(torch.ops, _namespace)

if __name__ == "__main__":
    _main()
else:
    _extension, _extension_error = _load_extension()
    _register_operators()
