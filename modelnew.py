"""2-D convolution for PyTorch with hand-written CUDA kernels, compiled for the visible GPUs at the first import.

    from modelnew import ModelNew, Conv2d, conv2d, accelerate

    y = conv2d(x, weight, bias, stride=1, padding=1)  # arguments, result, gradients and errors of F.conv2d
    layer = Conv2d(64, 128, 3)                        # arguments, parameters and state_dict of nn.Conv2d
    model = ModelNew(64, 128, 3)                      # one convolution, with its parameters in `self.conv2d`
    network, report = accelerate(network, example)    # moves nn.Conv2d layers to modelnew; restore(network) undoes it

The kernels support float32, float16, bfloat16 and float64 tensors of any strides. PyTorch's switches choose TF32 or
full fp32 at each call. CPU tensors run PyTorch's own convolution. Without a GPU, the import compiles nothing.

The sections of this file: sources, build, operator, modules and functions, networks, bundle.
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
    """Return the folder of the kernel sources: kernels/ in a checkout, modelnew_kernels/ in an installation."""
    here = Path(__file__).absolute().parent
    for folder in (here / "modelnew_kernels", here / "kernels"):
        if (folder / "binding.cpp").is_file():
            return folder
    raise ImportError(f"modelnew found no kernel sources beside {__file__}; install it again")


def _read_sources() -> dict[str, str]:
    """Return the text of every C++ and CUDA file in kernels/, by file name."""
    files = (file for file in sorted(_kernel_folder().iterdir()) if file.suffix in (".cpp", ".cu", ".cuh", ".h"))
    return {file.name: file.read_text(encoding="utf-8") for file in files}


_sources = _read_sources()
_namespace = "modelnew"  # in torch.ops

# The pattern also matches literals, so that `//` inside a string does not start a comment.
_LITERAL_OR_COMMENT = re.compile(
    r'''R"([^\s()]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|'(?:[^'\\\n]|\\.[^'\n]*)'|//[^\n]*|/\*.*?\*/''', re.DOTALL
)


def _without_comments(text: str) -> str:
    """Remove comments, blank lines and indentation from C++ text. The machine code does not depend on them.

    A blank line after a backslash stays, since it ends the continued line.
    """
    text = _LITERAL_OR_COMMENT.sub(lambda match: " " if match[0][0] == "/" else match[0], text)
    lines = [line.strip() for line in text.splitlines()]
    return "\n".join(line for line, before in zip(lines, ["", *lines], strict=False) if line or before.endswith("\\"))


# ---- Build ----


class _Environment:
    """Context manager that sets environment variables and restores them at the end."""

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
    """Inputs of one build of a library. `name` contains digests of the inputs."""

    name: str
    what: str  # description for messages
    capabilities: list[tuple[int, int]]  # compute capabilities
    sources: dict[str, str]  # text by file name
    units: list[str]  # sources to compile, each to an object file, longest first
    cpp_flags: list[str]
    cuda_flags: list[str]
    is_extension: bool = True  # False: a plain shared library, not linked with torch
    cache: str = ""  # directory of finished libraries
    cuda_home: str | None = None

    @property
    def library(self) -> str:
        """Path of the finished library. A rename puts it there, so an existing file is complete."""
        return os.path.join(self.cache, f"{self.name}.so")


def _gpu_capabilities() -> list[tuple[int, int]]:
    """Return the compute capabilities of the visible GPUs, without duplicates, in ascending order."""
    return sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})


def _architecture(capability: tuple[int, int]) -> str:
    """Return nvcc's name of a GPU architecture. Hopper's wgmma instructions need the architecture-specific 90a."""
    return "90a" if capability == (9, 0) else f"{capability[0]}{capability[1]}"


def _gencode(capability: tuple[int, int]) -> str:
    """Return nvcc's -gencode flag for a compute capability."""
    architecture = _architecture(capability)
    return f"-gencode=arch=compute_{architecture},code=sm_{architecture}"


def _find_cuda_home() -> str | None:
    """Return the CUDA toolkit's directory, or None: CUDA_HOME, CUDA_PATH, that of the nvcc on PATH, /usr/local/cuda.

    torch searches the same places, but accepts an nvcc on PATH that is a link or a script outside of its toolkit.
    This function also requires CUDA's headers in the directory, unless CUDA_HOME or CUDA_PATH names it.
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
    """Return the path of the C++ compiler that torch calls, or None."""
    return shutil.which(os.environ.get("CXX", "c++"))


def _find_ninja() -> str | None:
    """Return the path of ninja on PATH or beside this Python (a virtual environment that is not activated), or None."""
    return shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))


def _nvcc_release(cuda_home: str) -> tuple[int, int]:
    """Return the CUDA version of a toolkit's nvcc, such as (13, 0). It starts a process, so only builds call it."""
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
    """Return the number of compilers to run at once: the cores that this process may use, at most MAX_JOBS."""
    cores, most = len(os.sched_getaffinity(0)), os.environ.get("MAX_JOBS", "")
    return min(cores, int(most)) if most.isdigit() and int(most) > 0 else cores


def _splits_compilation(release: tuple[int, int], cores: int) -> bool:
    """Return whether nvcc optimises the kernels of a unit in parallel. The machine code stays the same."""
    return cores > 1 and release >= (12, 4)  # older releases lack --split-compile or were not tested


def _file_identity(path: str | None) -> list[Any]:
    """Return real path, size and modification time of a compiler, which change when it is replaced.

    The time is in whole seconds, since container images store no fractions.
    """
    if path is None:
        return []
    real = os.path.realpath(path)
    status = os.stat(real)
    return [real, status.st_size, int(status.st_mtime)]


def _cache_directory() -> str:
    """Return the directory of finished libraries: modelnew/ in torch's directory of extensions."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions")
    return os.path.join(os.environ.get("TORCH_EXTENSIONS_DIR") or default, "modelnew")


def _cpp_standard() -> str:
    """Return the C++ standard that torch's headers need."""
    return "c++20" if tuple(int(number) for number in torch.__version__.split(".")[:2]) >= (2, 12) else "c++17"


def _cpp_flags() -> list[str]:
    """Return the flags for .cpp units, without include directories and the extension's name."""
    # Symbols are hidden, so that two versions of the extension in one process (module and bundle) share nothing.
    hidden = ["-O2", "-fPIC", "-fvisibility=hidden"]
    return [f"-std={_cpp_standard()}", *hidden, f"-D_GLIBCXX_USE_CXX11_ABI={torch.compiled_with_cxx11_abi():d}"]


def _cuda_flags(capabilities: list[tuple[int, int]]) -> list[str]:
    """Return the flags for .cu units. These units do not include torch's headers."""
    common = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    threads = [f"--threads={len(capabilities)}"] if len(capabilities) > 1 else []
    return [*common, *map(_gencode, capabilities), *threads]


# Environment variables that change compilers or their flags. CC is passed to nvcc as -ccbin, as in torch.
_COMPILER_VARIABLES = ("CC", "PYTORCH_NVCC", "NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")

# Engines that need a Hopper GPU, and the unit that replaces them in builds for other GPUs.
_HOPPER_UNITS = frozenset({"gather.cu", "hopper_wgrad.cu", "stem.cu", "tma.cu", "tma_wgrad.cu", "wgmma.cu"})
_UNIT_WITHOUT_HOPPER = "without_hopper.cpp"

# Files that only bundle() uses: the dry run, the binding of a bundle, and the end of its kernels.
_DRY_RUN, _BUNDLE_BINDING, _BUNDLE_END = "dry_run.cpp", "bundle_template.cpp", "bundle_template.cu"

# CPU seconds of units and of the link, and the share of the longest unit that --split-compile leaves serial.
# Measurements: docs/lab/build.md.
_UNIT_SECONDS = {
    "gather.cu": 100,
    "wgmma.cu": 72,
    "tma.cu": 69,
    "depthwise.cu": 66,
    "hopper_wgrad.cu": 25,
    "binding.cpp": 20,
    "operators.cpp": 15,
    "direct.cu": 14,
    "mma.cu": 12,
    "mma_wgrad.cu": 12,
}
_SHORT_UNIT_SECONDS, _LINK_SECONDS, _SERIAL_SHARE, _DRY_RUN_SECONDS = 5, 3, 0.16, 20


def _unit_seconds(unit: str) -> int:
    return _UNIT_SECONDS.get(unit, _SHORT_UNIT_SECONDS)


def _units(sources: Iterable[str], capabilities: list[tuple[int, int]]) -> list[str]:
    """Return the sources to compile for these compute capabilities, longest first."""
    left_out = {_UNIT_WITHOUT_HOPPER} if (9, 0) in capabilities else _HOPPER_UNITS
    left_out = {_DRY_RUN, _BUNDLE_BINDING, _BUNDLE_END, *left_out}
    names = sorted(name for name in sources if name.endswith((".cpp", ".cu")) and name not in left_out)
    return sorted(names, key=_unit_seconds, reverse=True)


def _plan_build(sources: dict[str, str], capabilities: list[tuple[int, int]]) -> _Build:
    """Return the build of the extension for these GPUs, this torch and the installed compilers.

    This starts no process and takes milliseconds.
    """
    targets = ", ".join(f"sm_{_architecture(capability)}" for capability in capabilities)
    units, flags = _units(sources, capabilities), (_cpp_flags(), _cuda_flags(capabilities))
    torchs = [torch.__version__, torch.version.git_version, torch.version.cuda, sysconfig.get_config_var("SOABI")]
    build = _Build("modelnew", f"the kernels for {targets}", capabilities, sources, units, *flags)
    return _named(build, torchs)


def _plan_dry_run(sources: dict[str, str]) -> _Build:
    """Return the build of kernels/dry_run.cpp with the engines' host code. Its device code never runs."""
    units = [_DRY_RUN, *(name for name in _units(sources, [(9, 0)]) if name.endswith(".cu"))]
    define, hidden = "-DMODELNEW_DRY_RUN", "-fvisibility=hidden"
    cpp_flags = ["-std=c++17", "-O1", "-fPIC", hidden, define]
    cuda_flags = ["-std=c++17", "-O0", "-Xcicc=-O0", "-gencode=arch=compute_80,code=compute_80"]
    cuda_flags += ["--expt-relaxed-constexpr", f"-Xcompiler=-fPIC,{hidden}", define]
    flags = cpp_flags, cuda_flags
    return _named(_Build("modelnew_dry_run", "the planner of bundle()", [(8, 0)], sources, units, *flags, False), [])


def _named(build: _Build, versions: list[Any]) -> _Build:
    """Return the build with its name, cache and toolkit set.

    The name gets two digests: one of sources, flags and versions, one of the installed compilers.
    """
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
    """Return the files and the headers that they include, each after its own includes."""
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
    """Print a line to stderr, unless MODELNEW_QUIET is set. On a terminal the next line replaces a `passing` line.

    MODELNEW_QUIET hides all lines that begin with `modelnew: `, warnings included.
    """
    if os.environ.get("MODELNEW_QUIET", "0") in ("", "0"):
        replaced = sys.stderr.isatty()
        front, end = "\r\x1b[K" if replaced else "", "" if replaced and passing else "\n"
        print(f"{front}modelnew: {text}", end=end, file=sys.stderr, flush=True)


def _find_library(build: _Build) -> str | None:
    """Return the path of the finished library, or None.

    Without nvcc or a C++ compiler on this machine, this is the newest build with the same first digest.
    """
    if build.cuda_home is not None and _find_host_compiler() is not None:
        return build.library if os.path.exists(build.library) else None
    same = glob.glob(os.path.join(glob.escape(build.cache), f"{build.name.rpartition('_')[0]}_*.so"))
    return max(same, key=os.path.getmtime, default=None)


def _import_library(path: str) -> ModuleType:
    """Import a finished library as a module with the file's name. A library that does not load raises RuntimeError."""
    spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(path))[0], path)
    try:
        module = importlib.util.module_from_spec(spec)  # opens the library
        spec.loader.exec_module(module)
    except Exception as error:
        raise RuntimeError(f"{path} cannot be loaded ({error}); delete it, and it is built again") from error
    return module


def _open_or_build(build: _Build) -> ModuleType:
    """Return the extension, and compile it first if it is not built yet."""
    return _import_library(_find_library(build) or _build_once(build))


def _build_once(build: _Build) -> str:
    """Return the path of the library. If it is not built yet, one process compiles it and the others wait."""
    import fcntl  # absent on Windows, which supports CPU tensors only

    try:
        os.makedirs(build.cache, exist_ok=True)
        lock = open(f"{build.library}.lock", "a")  # noqa: SIM115 - closed by the `with` below
    except OSError as error:
        raise RuntimeError(
            f"the directory for compiled kernels, {build.cache}, cannot be written ({error}); "
            "set TORCH_EXTENSIONS_DIR to a directory that can"
        ) from error
    with lock:  # the lock is released when the file is closed, also if the process is killed
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
    """Return nvcc's release. Raise RuntimeError with advice if a tool is missing or does not fit."""
    torch_cuda = torch.version.cuda if build.is_extension else None  # a plain library is independent of torch
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
    """Compile the library and move it to its place. The caller holds the lock of this build."""
    # Remove the directories of builds that were killed.
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
    """Return the estimated wall time: CPU seconds of all units over the cores, plus the longest unit's serial share.

    Without --split-compile the build takes at least as long as the longest unit.
    """
    if not build.is_extension:
        return round(_LINK_SECONDS + _DRY_RUN_SECONDS / cores)
    targets = {".cpp": 1, ".cu": len(build.capabilities)}
    seconds = [_unit_seconds(unit) * targets[os.path.splitext(unit)[1]] for unit in build.units]
    shared = sum(seconds) / cores + _SERIAL_SHARE * max(seconds)
    return round(_LINK_SECONDS + (shared if split else max(shared, *seconds)))


def _compile_units(build: _Build, directory: str, cores: int, split: bool) -> None:
    """Compile all units in parallel, each to an object file in the directory.

    If this process is killed, ninja may keep running, but it writes only to this build's own directory.
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
        stack.callback(ninja.terminate)  # has an effect only if this process is interrupted
        for line in ninja.stdout:
            progress = re.match(r"\[(\d+/\d+)\] kernels/", line)
            if progress is None:
                printed.append(line)
            else:
                _say(f"{progress[1]} units compiled, {time.perf_counter() - start:.0f} s", passing=True)
        if ninja.wait() != 0:
            _say(f"compiling failed after {time.perf_counter() - start:.0f} s")  # ends the terminal's progress line
            raise RuntimeError("".join(printed))


def _ninja_file(build: _Build, splits: int) -> str:
    """Return the text of build.ninja, with one object file for each unit."""
    from torch.utils import cpp_extension

    nvcc = [*build.cuda_flags, *([f"--split-compile={splits}"] if splits > 1 else [])]
    nvcc += ["-ccbin", os.environ["CC"]] if "CC" in os.environ else []
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include", scheme="posix_prefix")]
    cuda_include = os.path.join(build.cuda_home, "include")
    if cuda_include != "/usr/include":  # the compiler searches it anyway; -isystem would hide C++'s own headers
        includes.append(cuda_include)
    cxx = [_find_host_compiler(), *build.cpp_flags, f"-DTORCH_EXTENSION_NAME={build.name}"]
    cxx += [argument for path in includes for argument in ("-isystem", path)]
    # PYTORCH_NVCC is a shell command, such as "ccache nvcc".
    compiler = os.environ.get("PYTORCH_NVCC") or shlex.quote(os.path.join(build.cuda_home, "bin", "nvcc"))
    lines = []
    for suffix, command in (("cu", f"{compiler} {shlex.join(nvcc)}"), ("cpp", shlex.join(cxx))):
        escaped = command.replace("$", "$$")
        lines += [f"rule {suffix}", f"  command = {escaped} -c $in -o $out", "  description = $in"]
    lines += [f"build {unit}.o: {unit.rpartition('.')[2]} kernels/{unit}" for unit in build.units]
    return "\n".join(lines) + "\n"


def _link(build: _Build, directory: str) -> str:
    """Link the objects with torch's libraries by load_inline. Return the path of the extension.

    load_inline renames the second build of a name in a process to NAME_v1, so each build gets a new name. Importers do
    not see it: the binding is compiled with the name of the build.
    """
    name = f"{build.name}_{time.time_ns()}"
    _load_inline(
        name=name,
        cpp_sources=["// All code is in the objects that this file is linked with.\n"],
        extra_ldflags=[f"{unit}.o" for unit in build.units],  # relative: load_inline links in the build directory
        build_directory=directory,
        with_cuda=True,
        is_python_module=False,
    )
    return os.path.join(directory, f"{name}.so")


def _link_alone(build: _Build, directory: str) -> str:
    """Link the objects into a plain shared library. Return its path."""
    path = os.path.join(directory, "linked.so")
    objects = [os.path.join(directory, f"{unit}.o") for unit in build.units]
    # -Bsymbolic binds calls to the library's stand-ins instead of a CUDA runtime that the process has loaded.
    command = [_find_host_compiler(), "-shared", "-pthread", "-Wl,--no-undefined,-Bsymbolic", "-o", path, *objects]
    linked = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if linked.returncode != 0:
        raise RuntimeError(linked.stdout)
    return path


def _build_environment(build: _Build) -> dict[str, str]:
    """Return the environment variables for ninja and torch during a build."""
    return {
        "CUDA_HOME": build.cuda_home,
        "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(_find_ninja())]),
        # torch compiles nothing for a GPU here, but reads this list and rejects unknown entries.
        "TORCH_CUDA_ARCH_LIST": "8.0",
        "NINJA_STATUS": "[%f/%t] ",
    }


def _load_inline(build_directory: str, **keywords: Any) -> None:
    """Call torch.utils.cpp_extension.load_inline. The late import saves up to half a second at other times."""
    from torch.utils import cpp_extension

    # cpp_extension reads CUDA_HOME when it is imported, which may have happened earlier.
    cpp_extension.CUDA_HOME = os.environ.get("CUDA_HOME", cpp_extension.CUDA_HOME)
    if "no_implicit_headers" in inspect.signature(cpp_extension.load_inline).parameters:
        keywords["no_implicit_headers"] = True
    else:  # before torch 2.8: an empty file replaces torch/extension.h, which takes 13 s to compile
        headers = os.path.join(build_directory, "headers")
        os.makedirs(os.path.join(headers, "torch"))
        open(os.path.join(headers, "torch", "extension.h"), "w").close()
        keywords["extra_include_paths"] = [headers]
    cpp_extension.load_inline(build_directory=build_directory, **keywords)


# Output of compilers and linkers, and the advice for it.
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
    """Return the reason of a failed build: one sentence if the cause is known, else up to 20 lines of errors."""
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
    """Return the extension and "", or None and the reason. It never raises, since CPU tensors work without a build."""
    if torch.version.cuda is None:
        return None, "this PyTorch was built without CUDA; install one with CUDA"
    if not torch.cuda.is_available():
        return None, "PyTorch sees no CUDA GPU; check the driver and CUDA_VISIBLE_DEVICES"
    try:
        return _open_or_build(_plan_build(_sources, _gpu_capabilities())), ""
    except Exception as error:  # CPU tensors work after any failure
        reason = _reason(error)
    _say(f"no kernels, so CUDA tensors will raise an error: {reason}")
    return None, reason


def _built_extension() -> ModuleType:
    """Return the extension, or raise RuntimeError with the reason why there is none."""
    if _extension is None:
        raise RuntimeError(f"modelnew has no compiled kernels for CUDA tensors: {_extension_error}")
    return _extension


# ---- Operator ----
#
# Two paths lead to the kernels. Eager calls enter the extension, which runs a kernel for plain tensors and calls
# PyTorch's dispatcher for gradients, autocast and the like (kernels/screening.h). Compiled code, and calls that the
# extension declines, call the operators in torch.ops (kernels/operators.cpp).

# PyTorch's own convolution, for CPU tensors and for arguments whose error PyTorch words.
_pytorch_conv2d: Callable[..., Tensor] = torch.conv2d

# True while torch.compile traces, which replaces the call by a constant. torch 2.1 has it under another name.
_is_dynamo_compiling: Callable[[], bool] = (
    getattr(torch.compiler, "is_dynamo_compiling", None) or torch._utils.is_compiling
)
# Also true while torch.export traces.
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
    """Apply a 2-D convolution, with the arguments, result, gradients and errors of torch.nn.functional.conv2d.

    Args:
        input: [N, C, H, W] or [C, H, W]. On CUDA its dtype is float32, float16, bfloat16 or float64.
        weight: [K, C / groups, R, S], of the input's dtype and device.
        bias: [K], of the input's dtype and device, or None.
        stride: an int for both axes, or a pair (height, width).
        padding: an int, a pair, 'valid' or 'same'; 'same' needs stride 1.
        dilation: an int or a pair.
        groups: a divisor of C and of K.

    Returns:
        [N, K, P, Q] or [K, P, Q], of the input's dtype, or autocast's. It is channels_last if the input or the weight
        is, but not in float64; this is PyTorch's rule on CUDA.

    CUDA tensors run modelnew's kernels. Other tensors, and the cases listed in docs/integration.md (torch.func, tensor
    subclasses, function modes), run PyTorch's own convolution. PyTorch's switches choose TF32 or full fp32 for float32
    tensors; docs/accuracy.md states the error bounds.

    Raises:
        RuntimeError: CUDA tensors without compiled kernels, with the reason; or an engine that force_engine() names
            cannot compute the call.
        NotImplementedError: CUDA tensors of another dtype, or with a size or a setting over (2**31 - 1) // 4. The batch
            size has no limit.

        Arguments that do not fit together raise PyTorch's own errors.
    """
    if _extension is not None and not _is_dynamo_compiling():
        y = _extension.conv2d(input, weight, bias, stride, padding, dilation, groups)
        if y is not None:
            return y
    return _general_conv2d(input, weight, bias, stride, padding, dilation, groups)


def _general_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: Any
) -> Tensor:
    """Apply conv2d() to any kind of tensor and argument that PyTorch accepts."""
    arguments = x, weight, bias, stride, padding, dilation, groups
    ours = _any_cuda(x, weight) and not _overridden(x, weight, bias)
    prepared = _prepare(*arguments) if ours else None
    if prepared is None:
        return _pytorch_conv2d(*arguments)
    if isinstance(padding, str):  # with numbers instead, the extension may accept the call
        return conv2d(*prepared)
    return _operators.conv2d(*prepared)


def _any_cuda(*arguments: Any) -> bool:
    return any(isinstance(argument, Tensor) and argument.is_cuda for argument in arguments)


def _overridden(*arguments: Any) -> bool:
    """Return whether a tensor subclass or a function mode must see torch.conv2d. PyTorch's function runs then.

    Fake tensors, the modes of PyTorch's tracers and `with torch.device(...)`, which changes factories only, do not
    count. In compiled code no mode counts.
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
    """Return the arguments with pairs of ints for settings, and with numbers instead of a named padding.

    Return None for arguments of wrong types, for which PyTorch raises its own error.
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
    """Return an int for a value that PyTorch accepts as one (NumPy's ints, but not bools), or None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, torch.SymInt)):  # before hasattr, which torch.compile does not support for its symbols
        return value
    scalar = isinstance(value, Tensor) or not hasattr(value, "__len__")  # NumPy's arrays have __index__ as well
    return value.__index__() if scalar and hasattr(value, "__index__") else None


def _pair(value: Any) -> _Pair | None:
    """Return two ints for an int or a sequence of one or two, or None."""
    items = value if isinstance(value, (tuple, list)) else (value,)
    if len(items) not in (1, 2):
        return None
    first, last = _integer(items[0]), _integer(items[-1])
    return None if first is None or last is None else (first, last)


def _pad_same(x: Tensor, weight: Tensor, dilation: _Pair) -> tuple[Tensor, _Pair]:
    """Return the input and the padding of padding='same'. An odd total pads the input by one zero at the end."""
    total_h, total_w = dilation[0] * (weight.shape[2] - 1), dilation[1] * (weight.shape[3] - 1)
    if total_h % 2 or total_w % 2:
        x = torch.constant_pad_nd(x, [0, total_w % 2, 0, total_h % 2])
    return x, (total_h // 2, total_w // 2)


def _composed_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """Implement the operator conv2d without an extension: PyTorch's convolution, and an error for CUDA tensors.

    Fake CUDA tensors raise as well, since code compiled with them would be cached without modelnew's kernels.
    """
    if x.is_cuda:
        _built_extension()
    return torch.ops.aten.conv2d(x, weight, bias, *settings)


def _composed_backward(
    dy: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int, mask: list[bool]
) -> tuple[Tensor, ...]:
    """Implement the operator conv2d_backward without an extension. Unwanted gradients have no elements."""
    if x.dim() == 3:
        batched = dy.unsqueeze(0), x.unsqueeze(0), weight
        dx, dw, db = _composed_backward(*batched, stride, padding, dilation, groups, mask)
        return dx.squeeze(0) if mask[0] else dx, dw, db
    gradients = torch.ops.aten.convolution_backward(
        dy, x, weight, [weight.shape[0]], stride, padding, dilation, False, [0, 0], groups, mask
    )
    return tuple(g if wanted else x.new_empty(0) for g, wanted in zip(gradients, mask, strict=True))


def _register_operators() -> None:
    """Define conv2d and conv2d_backward in torch.ops, once in a process.

    The extension defines and implements them (kernels/operators.cpp). Without an extension they have the same schemas
    and are compositions of PyTorch's operators.
    """
    if _extension is not None:
        # Remove compositions of a copy of this module whose build failed, or PyTorch would decompose the operators.
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
        # A Library unregisters its operators when it is freed, so the namespace keeps a reference.
        _operators.schemas, _operators.compositions = schemas, compositions
    _register_flop_formulas()


def _stand_in_front() -> None:
    """Let the overloads that compiled code calls enter the extension first.

    Parsing arguments by the schema takes an overload longer than the rest of the call (docs/lab/operators.md).
    """
    operators = _operators.conv2d, _operators.conv2d_backward
    for operator in operators:
        vars(operator).pop("default", None)  # overloads are hashed by _op: replace it in a new overload only
    overloads = [operator.default for operator in operators]
    _operators.entries = _extension.entries(*(overload._op for overload in overloads))
    for overload, entry in zip(overloads, _operators.entries, strict=True):
        overload._op = entry


def _register_flop_formulas() -> None:
    """Register the operators with torch.utils.flop_counter, with the formulas of PyTorch's convolution."""

    def batched(shape: Any) -> Any:
        return shape if len(shape) == 4 else (1, *shape)

    # Some versions of torch wrap the formulas in functions of tensors.
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
    """A model of one 2-D convolution, with the arguments and initialisation of nn.Conv2d, but bias=False by default.

    `self.conv2d` is the layer, a modelnew.Conv2d; state_dict has conv2d.weight [K, C / groups, R, S] and, if asked for,
    conv2d.bias [K]. Dtypes, devices and errors are those of modelnew.conv2d().
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
        self.conv2d = Conv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups=groups, bias=bias
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the convolution to [N, C, H, W] or [C, H, W]. Return [N, K, P, Q] or [K, P, Q]."""
        return self.conv2d(x)


class Conv2d(nn.Conv2d):
    """nn.Conv2d on modelnew's kernels: the same arguments, parameters, initialisation, state_dict and padding modes.

    Inputs are [N, C, H, W] or [C, H, W], results [N, K, P, Q] or [K, P, Q]. Dtypes, devices and errors are those of
    modelnew.conv2d().
    """

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
    """Describe the engines and configurations that conv2d() and its gradients use for these arguments, and why.

    The arguments are those of conv2d(). No convolution runs. Autocast is ignored: cast the tensors first.

    Returns:
        Lines of text. The first line is the problem. The others begin with `forward: `, `dgrad: ` (gradient to the
        input), `wgrad: ` (to the weight) and, with a bias, `bgrad: `; the engine's name follows. For tensors that are
        not on a CUDA GPU, one line says that PyTorch's own convolution runs.

    Raises:
        RuntimeError: CUDA tensors without compiled kernels, or a forced engine that cannot compute a line's pass.

        Invalid arguments raise what conv2d() raises.
    """
    if not _any_cuda(input, weight):
        return "PyTorch's own convolution, since neither the input nor the weight is on a CUDA GPU\n"
    extension = _built_extension()
    prepared = _prepare(input, weight, bias, stride, padding, dilation, groups)
    if prepared is None:
        _pytorch_conv2d(input, weight, bias, stride, padding, dilation, groups)  # raises
        return "PyTorch's own convolution, which alone knows arguments of this kind\n"
    return extension.explain(*prepared)


# Names of kEngines in kernels/engines.cuh, in its order. They are repeated here, so that no build is needed.
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
    "mma_wgrad",
    "tma_wgrad",
    "hopper_wgrad",
    "direct",
)


@contextlib.contextmanager
def force_engine(name: str) -> Iterator[None]:
    """Context manager that runs all convolutions of the process on one engine, for tests and benchmarks.

    It acts on forward and backward passes and on all threads. Without compiled kernels it has no effect.

    Args:
        name: an engine of the table in docs/engines.md, such as 'direct'.

    Raises:
        ValueError: there is no engine of this name.

        Inside the block, a pass that the engine cannot compute raises RuntimeError.
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
# accelerate() changes the class of a layer in place, and restore() changes it back. modelnew.Conv2d has no state of its
# own, so parameters, hooks, pruning, old weight_norm, attributes, optimizers, references by DDP and FSDP and the keys
# of state_dict stay the same. A new module would lose all references to the old one. The new class stores the original
# class; nothing is stored in the module, so copies keep it.
#
#     original class                         accelerated class
#     nn.Conv2d                              AcceleratedConv2d(_Accelerated, Conv2d)
#     Mine(nn.Conv2d)                        AcceleratedMine(_Accelerated, Mine, Conv2d): Mine's methods come first
#     ParametrizedConv2d(nn.Conv2d)          ParametrizedAcceleratedConv2d(AcceleratedConv2d), see _rebuilt
#
# This works because nn.Conv2d.forward only calls self._conv_forward. A layer that overrides one of the two, in its
# class or on the instance, stays PyTorch's: the new base class would have no effect or would change the result.


class LayerReport(NamedTuple):
    """One call of a convolution of the network in accelerate()'s report.

    A layer has a row for each of its calls in a pass of the example input, and a single row without an example. Times
    are in milliseconds, medians of 10 passes on the GPU; training mode includes the gradients.
    """

    name: str  # the first name in named_modules(); empty if the network itself is the layer
    replaced: bool  # whether the layer runs on modelnew, by this call of accelerate() or an earlier one
    reason: str  # the reason why the layer is not replaced, or empty
    convolution: str  # sizes and settings, such as `N32 C64 K128 3x3, 56x56, stride 2, pad 1`
    dtype: str  # such as `float32`; under autocast that of the cast input
    engine: str | None = None  # engine of the forward pass before a layer was put back; None if it is not known
    explanation: str = ""  # explain()'s line about the forward pass, or its text without such a line
    before_ms: float | None = None  # time of PyTorch's convolution, or None if it was not timed
    after_ms: float | None = None  # time of modelnew's convolution, or None if it was not timed


class Report(NamedTuple):
    """The result of accelerate(). `print(report)` shows it as a table.

    Times are in milliseconds: medians of 10 passes of the whole network on the GPU, or None without such an example.
    """

    layers: tuple[LayerReport, ...]  # all convolutions, also those that are no nn.Conv2d
    before_ms: float | None  # with PyTorch's convolution in the layers that were not slower one by one
    after_ms: float | None  # with modelnew's convolution in the same layers
    notes: tuple[str, ...]  # sentences about the network as a whole

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
    """Return two times and their quotient as text."""
    times = ["-" if ms is None else f"{ms:.4f}" for ms in (before, after)]
    return times[0], times[1], f"{before / after:.2f}x" if before and after else "-"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the rows as lines of aligned columns. The last three columns, numbers, are aligned to the right."""
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
    """Run the nn.Conv2d layers of a network on modelnew's kernels where that is faster. restore() undoes it.

    The network changes in place: each layer gets a class that is derived from modelnew.Conv2d and from its old class.
    Modules, parameters, hooks and state_dict stay the same.

    Args:
        model: any nn.Module, which may itself be an nn.Conv2d.
        example_input: arguments of a call of the network: a tensor, a tuple of positional or a dict of keyword
            arguments. The network runs on it once to find the engine of each layer. On a GPU it runs 44 more times, to
            time layers and network with PyTorch's and modelnew's convolution in turn.
        keep_slower: whether layers stay replaced that are slower.

    Returns:
        The given model, and a Report with a row for each call of each convolution. The report names the reason for
        each layer that is not replaced: it is no nn.Conv2d, its class or instance overrides forward, it is quantized,
        compiled by TorchScript or not initialised (nn.LazyConv2d), its parameters have an unsupported type, or it is
        slower.

    Raises:
        TypeError: model is no nn.Module, or example_input has another type.
        RuntimeError: the network is on a GPU and there are no compiled kernels.

        An error of the network itself is raised after all layers have their old classes again.

    **Decision.** With an example on a GPU, a layer gets back its class from before any accelerate() if its calls in a
    pass take over 3% longer than with PyTorch's convolution. If the network still takes over 2% longer, all layers get
    it back. A layer on a GPU that was not timed is judged by its engines for 32 images of 56x56: it gets its class back
    if a pass that it needs runs on plain multiply-adds (engine direct) where PyTorch uses tensor cores.

    **Passes.** They are forward and backward, with random gradients of the floating-point outputs, if the network is in
    training mode, gradients are enabled and a parameter requires one; else they are forward only. Call accelerate()
    under torch.autocast if the network will run under it, and under torch.no_grad() to time the forward pass of a
    network in training mode. Buffers and the random state are restored after each pass, .grad is not changed. The
    network's hooks run in all passes. In training mode a DistributedDataParallel is timed by its inner module.

    **Other tools.** Call accelerate() before torch.compile or on its result, which is then compiled again; and after
    torch.fx.symbolic_trace, whose tracer enters layers that are not torch's own. Call restore() before
    torch.jit.script, fuse_modules and graph quantization (torch.fx, torch.export). Eager-mode quantization (prepare,
    prepare_qat) restores the layers that it observes by itself. Loading a network that was pickled as a whole needs
    modelnew; loading its state_dict does not.
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
    """Undo accelerate(): give all layers their old classes back, in place, also in a copy of an accelerated network.

    Layers that were created as modelnew.Conv2d stay as they are.

    Returns:
        The given model.

    Raises:
        TypeError: model is no nn.Module.
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
    """Return the positional and keyword arguments that an example input stands for."""
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
    """Return the network that torch.compile(model) wraps. An import of torch._dynamo would take seconds."""
    return model._modules.get("_orig_mod", model)


def _forget_compiled(model: nn.Module) -> None:
    """Discard compiled code. Some versions of torch.compile do not notice that a layer's class has changed."""
    if any("_orig_mod" in m._modules or getattr(m, "_compiled_call_impl", None) for m in model.modules()):
        torch.compiler.reset()


# Classes of torch.nn.modules.conv, and their names in the report. Only nn.Conv2d is replaced.
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
    """Return the name of a layer's class in _KINDS, also if TorchScript has compiled it; empty for other layers."""
    if isinstance(layer, torch.jit.ScriptModule):
        name = getattr(layer, "original_name", "")
        return name if name in _KINDS else ""
    names = (cls.__name__ for cls in type(layer).__mro__ if cls.__module__ == nn.Conv2d.__module__)
    return next((name for name in names if name in _KINDS), "")


# PyTorch's methods at import, since some programs patch nn.Conv2d later.
_FORWARDS = {name: getattr(nn.Conv2d, name) for name in ("forward", "_conv_forward")}

_SERVED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # in the order of the kernels' DType
_AT_NAMES = ("at::kFloat", "at::kHalf", "at::kBFloat16", "at::kDouble")


def _reason_to_stay(layer: nn.Module) -> str:
    """Return the reason why a layer cannot be replaced, or an empty text."""
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
        # DTensor, quantized tensors and the like implement operators themselves, but not modelnew's.
        if type(parameter).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return f"its parameters are of type {type(parameter).__name__}: accelerate before sharding or quantizing"
        if parameter.dtype not in _SERVED_DTYPES:
            return f"its parameters are {_dtype_name(parameter)}"
    return ""


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _replace(layer: nn.Module) -> str:
    """Change the class of a convolution. Return an empty text, or the reason why it stays."""
    if isinstance(layer, _Accelerated):
        return ""
    if isinstance(layer, Conv2d):
        return "it was made as a modelnew.Conv2d"
    other = _KINDS[_kind(layer)]
    reason = f"{other}: only nn.Conv2d is served" if other else _reason_to_stay(layer)
    if not reason:
        try:
            _set_class(layer, _accelerated_class(type(layer)))
        except TypeError as error:  # the class forbids subclasses, or its objects cannot change class
            return f"its class cannot be extended: {error}"
    return reason


def _set_class(layer: nn.Module, cls: type) -> None:
    object.__setattr__(layer, "__class__", cls)  # the layer's class may override __setattr__


class _Accelerated:
    """Base of all classes that accelerate() creates."""

    _modelnew_original: type  # the class before accelerate()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Support copy and pickle, which would look for the created class by its name."""
        reduced = super().__reduce_ex__(max(protocol, 2))
        made_here = "_modelnew_original" in vars(type(self))
        if made_here and isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__:
            return _new_accelerated, (self._modelnew_original,), *reduced[2:]
        return reduced

    @property
    def qconfig(self) -> Any:
        """The layer's qconfig. Eager-mode quantization sets it and needs the original class, so setting restores it."""
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
    """Return an empty accelerated layer, which copy and pickle fill."""
    cls = _extended(original)
    return cls.__new__(cls)


_PARAMETRIZE = "torch.nn.utils.parametrize"


def _accelerated_class(cls: type) -> type:
    """Return the accelerated class for a class. Parametrized layers have a class each, so theirs is not cached."""
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
    """Return the class before accelerate(), also if parametrize or FSDP has derived a class of its own since."""
    extended = next(parent for parent in cls.__mro__ if "_modelnew_original" in vars(parent))
    return _rebuilt(cls, extended, extended._modelnew_original)


def _rebuilt(cls: type, old: type, new: type) -> type:
    """Return a copy of class `cls` that is derived from `new` instead of `old`; `new` itself if `cls` is `old`.

    torch.nn.utils.parametrize creates a class for each module and keeps its properties there. To remove itself, it
    deletes them and sets the module's class to __bases__[0], so a further subclass would break it. A change of
    __bases__ would also change copies of the module, which share the class.
    """
    if cls is old:
        return new
    bases = tuple(_rebuilt(base, old, new) if issubclass(base, old) else base for base in cls.__bases__)
    source = vars(cls).get("_modelnew_source")
    if source is not None and source.__bases__ == bases and _contents(source) == _contents(cls):
        return source  # unchanged since: return the very same class
    name = cls.__name__.replace(old.__name__, new.__name__)  # ParametrizedConv2d contains its base's name
    return type(cls)(name, bases, _contents(cls) | {"_modelnew_source": cls})


def _contents(cls: type) -> dict[str, Any]:
    """Return the namespace of a class statement that would define this class."""
    added = ("__dict__", "__weakref__", "__slotnames__", "_modelnew_source")  # by Python, copyreg and _rebuilt
    return {name: value for name, value in vars(cls).items() if name not in added}


# -- Passes of the example --

_TIMED_RUNS = 10  # passes with each convolution; a median is robust against a few outliers

# Ratios to the time with PyTorch's convolution from which a layer and the network are slower. Medians scatter by less.
_LAYER_SLACK, _NETWORK_SLACK = 1.03, 1.02

_Rows = dict[str, list[LayerReport]]  # by layer, one for each of its calls in a pass
_Times = dict[tuple[str, int], float]  # milliseconds by layer and number of the call in a pass


class _Pass(NamedTuple):
    """A pass of the network over the example."""

    network: nn.Module
    call: _Call
    trained: list[nn.Parameter]  # parameters whose gradients are computed; if empty, there is no backward pass
    devices: list[torch.device]  # GPUs of parameters, buffers and arguments

    def forward(self) -> Any:
        with torch.set_grad_enabled(bool(self.trained)):
            return self.network(*self.call[0], **self.call[1])

    def run(self) -> None:
        """Run forward and backward, and discard the results."""
        outputs = [y for y in _tensors(self.forward()) if y.is_floating_point() and y.grad_fn is not None]
        if outputs:
            gradients = [torch.randn_like(y) for y in outputs]
            with torch.autocast("cuda", enabled=False):
                # Unlike backward(), this does not change .grad or call the hooks of parameters.
                torch.autograd.grad(outputs, self.trained, gradients, allow_unused=True)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in a network's output."""
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
    """Return the parameters to compute gradients of: none in eval mode or with gradients disabled."""
    training = network.training and torch.is_grad_enabled()
    return [parameter for parameter in network.parameters() if training and parameter.requires_grad]


def _report(
    network: nn.Module, layers: dict[str, nn.Module], reasons: dict[str, str], call: _Call | None, keep_slower: bool
) -> Report:
    """Return the report, from passes of the example if there is one, and restore the classes of slower layers."""
    ours = {name: layer for name, layer in layers.items() if isinstance(layer, Conv2d)}
    rows = {name: [_row(name, layer, reasons[name])] for name, layer in layers.items()}
    trained, notes, network_ms = _trained(network), [], (None, None)
    if not any(_kind(layer) == "Conv2d" for layer in layers.values()):
        notes.append("the network has no nn.Conv2d")
    if ours and call is not None and any(map(nn.parameter.is_lazy, network.parameters())):
        notes.append("the example was not run: it would initialise the lazy modules of the network")
    elif ours and call is not None:
        devices = _cuda_devices(network, call)
        # DistributedDataParallel's reducer expects a complete backward(), so the inner module runs alone.
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
    # Filters of one pixel or one channel fit both memory formats: they are judged in the format of the other filters.
    parameters = itertools.chain.from_iterable(layer.parameters() for layer in ours.values())
    last = any(_channels_last(parameter) and not parameter.is_contiguous() for parameter in parameters)
    for name, layer in ours.items():
        if not keep_slower and isinstance(layer, _Accelerated) and rows[name][0].after_ms is None:
            _put_back(layer, rows, name, _reason_by_engine(layer, bool(trained), last))
    return Report(tuple(itertools.chain.from_iterable(rows.values())), *network_ms, tuple(notes))


def _put_back(layer: nn.Module, rows: _Rows, name: str, reason: str) -> None:
    """If there is a reason, restore the layer's class and write the reason to its rows."""
    if reason:
        _set_class(layer, _original_class(type(layer)))
        rows[name] = [row._replace(replaced=False, reason=reason) for row in rows[name]]


def _channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


_JUDGED_IMAGES, _JUDGED_SIZE = 32, 56  # batch and image size for layers that were not timed
_MOST_IMAGE_CHANNELS = 4


def _reason_by_engine(layer: nn.Module, training: bool, channels_last: bool) -> str:
    """Return the reason why a layer that was not timed is likely to be slower than PyTorch's, or an empty text."""
    parameters = list(layer.parameters())
    weight = max(parameters, key=Tensor.numel, default=None)  # with a parametrization: its largest parameter
    if weight is None or not _any_cuda(weight) or torch.cuda.get_device_capability(weight.device) < (8, 0):
        return ""
    dtype = weight.dtype if weight.dtype == torch.float64 else _autocast_dtype() or weight.dtype
    arguments = _judged_arguments(layer, dtype, channels_last and _channels_last(weight))
    with torch.cuda.device(weight.device):
        lines = _built_extension().explain(*arguments).splitlines()
    # Layers of few input channels read images, whose gradient is rarely wanted.
    dgrad = training and layer.in_channels > _MOST_IMAGE_CHANNELS
    needed = {"forward": True, "dgrad": dgrad, "wgrad": training and any(p.requires_grad for p in parameters)}
    plans = {name: plan for name, _, plan in (line.partition(": ") for line in lines) if needed.get(name)}
    # cuDNN runs float32 on tensor cores under the TF32 contract, which explain() names for each pass.
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
    """Return a convolution's arguments on the meta device, for images of 56x56 or the next larger valid size.

    The layer's own weight is not read, since a parametrization would compute it and might change buffers.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    least = max(_JUDGED_SIZE, 1 + max(layer._reversed_padding_repeated_twice))  # reflection padding needs the latter
    size = [max(least, d * (r - 1) + 1) for r, d in zip(layer.kernel_size, layer.dilation, strict=True)]
    x = torch.empty((_JUDGED_IMAGES, layer.in_channels, *size), dtype=dtype, device="meta", memory_format=layout)
    filters = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
    weight = torch.empty(filters, dtype=dtype, device="meta", memory_format=layout)
    bias = None if layer._parameters.get("bias") is None else weight.new_empty(layer.out_channels)
    x, padding = _padded(layer, x)
    return _prepare(x, weight, bias, layer.stride, padding, layer.dilation, layer.groups)


def _padded(layer: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
    """Return the input and padding of a layer's convolution, after the layer's padding mode."""
    if layer.padding_mode == "zeros":
        return x, layer.padding
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), 0


def _row(name: str, layer: nn.Module, reason: str, x: Tensor | None = None) -> LayerReport:
    """Return a row without times. With the layer's input it contains the engine and explain()'s line."""
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
    # There is no such line if PyTorch's own convolution runs or, as for an empty batch, nothing runs.
    line = next((line for line in text.splitlines() if line.startswith("forward: ")), "")
    engine = line.removeprefix("forward: ").partition(";")[0] or ("PyTorch" if text.startswith("PyTorch") else None)
    return row._replace(dtype=_dtype_name(x), engine=engine, explanation=line or text.strip())


def _autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return the arguments of a convolution, cast as autocast does on a GPU if it is enabled."""
    dtype = _autocast_dtype() if tensors[0].is_cuda else None
    return [t if t is None or dtype is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def _autocast_dtype() -> torch.dtype | None:
    if not torch.is_autocast_enabled():
        return None
    # torch before 2.4 lacks get_autocast_dtype.
    return torch.get_autocast_dtype("cuda") if hasattr(torch, "get_autocast_dtype") else torch.get_autocast_gpu_dtype()


def _sizes(layer: nn.Module, x: Tensor | None = None) -> str:
    """Return sizes and settings as text, such as `N32 C64 K128 3x3, 56x56, stride 2, pad 1`."""

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
    """Run the network forward once and return rows from the inputs of its layers."""
    rows: _Rows = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            x = _first(arguments, keywords)
            if isinstance(x, Tensor):  # otherwise the layer raises
                rows.setdefault(name, []).append(_row(name, layer, reasons[name], x))

        return hook

    with contextlib.ExitStack() as hooks:
        for name, layer in layers.items():
            # This hook is registered last and called last, so it sees input and weight after the user's hooks.
            hooks.callback(layer.register_forward_pre_hook(watch(name), with_kwargs=True).remove)
        hooks.enter_context(_unchanged(example))
        example.forward()
    return rows


def _first(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return a layer's input from the arguments of its call."""
    return arguments[0] if arguments else keywords.get("input")


def _judged_by_time(
    example: _Pass, layers: dict[str, nn.Module], rows: _Rows, keep_slower: bool
) -> tuple[tuple[float, float], list[str]]:
    """Write times to the rows and restore slower layers. Return the network's times and notes."""
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
    """Return both times as text if the second one exceeds the first one by more than the slack, else an empty text."""
    return f"{after:.4f} ms against {before:.4f} ms" if after > slack * before else ""


def _sums(times: _Times) -> dict[str, float]:
    """Return the time of each layer in a pass, summed over its calls."""
    names = {name for name, _ in times}
    return {name: sum(ms for key, ms in times.items() if key[0] == name) for name in names}


def _medians(passes: list[dict[Any, float]]) -> dict[Any, float]:
    keys = dict.fromkeys(itertools.chain.from_iterable(passes))
    return {key: statistics.median(times[key] for times in passes if key in times) for key in keys}


def _in_turn(
    example: _Pass, layers: Iterable[nn.Module], measure: Callable[[_Pass], Any], runs: int
) -> tuple[list[Any], list[Any]]:
    """Return the results of `measure` with PyTorch's convolution in these accelerated layers, and with modelnew's.

    The two alternate, so both run at the same clocks, and with caches as the network leaves them. All passes start with
    the same random state, so that networks that skip layers at random skip the same ones.
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
    """Return the milliseconds until a pass is launched, and until it is complete on all of its GPUs."""
    _synchronize(example.devices)
    start = time.perf_counter()
    example.run()
    launched = time.perf_counter()
    _synchronize(example.devices)
    return (launched - start) * 1e3, (time.perf_counter() - start) * 1e3


_Spans = dict[tuple[str, torch.device], list[list[torch.cuda.Event]]]  # DataParallel runs a layer on several devices


def _layers_ms(example: _Pass, layers: dict[str, nn.Module], host_ms: float) -> _Times:
    """Return the times of all calls in one pass. `host_ms` is the time to launch a pass."""
    spans: _Spans = {}
    with contextlib.ExitStack() as hooks:
        for name, layer in layers.items():  # last pre-hook and first hook: the user's hooks are not timed
            timer = functools.partial(_mark_call, spans, name)
            hooks.callback(layer.register_forward_pre_hook(timer, with_kwargs=True).remove)
            hooks.callback(layer.register_forward_hook(timer, with_kwargs=True, prepend=True).remove)
        # The GPU sleeps until the host has launched the pass, or the times of short layers would be launch times.
        # Twice the host's time includes events and hooks; the argument is in cycles, at 2 GHz.
        torch.cuda._sleep(int(min(2 * host_ms, 1000) * 2e6))
        example.run()
    _synchronize(example.devices)
    times: _Times = {}
    for (name, _), calls in spans.items():
        first = sum(key[0] == name for key in times)
        for index, events in enumerate(calls, first):
            pairs = zip(events[::2], events[1::2], strict=False)  # a call that checkpointing stops early has no end
            times[name, index] = sum(begin.elapsed_time(end) for begin, end in pairs)
    return times


def _mark_call(
    spans: _Spans, name: str, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], *output: Tensor
) -> None:
    """Hook before and after a layer: record events at the start and end of its forward and backward."""
    x = _first(arguments, keywords)
    if not _any_cuda(x):
        return
    device = x.device  # the hooks below must not hold a reference to x
    calls = spans.setdefault((name, device), [])
    if not output:
        calls.append([])
    events = calls[-1]

    def mark(*_: Any) -> None:
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record(torch.cuda.current_stream(device))

    mark()
    node = output[0].grad_fn if output else None
    if node is not None and "Squeeze" in node.name():  # an unbatched input is a batch of one inside
        node = node.next_functions[0][0]
    if node is not None:  # a module's backward hooks would make the output a view, which forbids in-place operations
        node.register_prehook(mark)
        node.register_hook(mark)


def _synchronize(devices: list[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _cuda_devices(network: nn.Module, call: _Call) -> list[torch.device]:
    """Return the GPUs of parameters, buffers and arguments."""
    tensors = itertools.chain(network.parameters(), network.buffers(), call[0], call[1].values())
    return sorted({t.device for t in tensors if isinstance(t, Tensor) and t.is_cuda}, key=str)


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Return a context that disables torch.compile, so that hooks are called. torch before 2.6 cannot disable it."""
    needed = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")  # an import would take seconds
    return torch.compiler.set_stance("force_eager") if needed else contextlib.nullcontext()


@contextlib.contextmanager
def _unchanged(example: _Pass) -> Iterator[None]:
    """Context manager that restores buffers, tensors in plain attributes, and the random state after a pass.

    Old weight_norm and pruning store the computed weight, with its graph, in a plain attribute.
    """
    modules = list(example.network.modules())
    buffers = [(buffer, buffer.clone()) for buffer in example.network.buffers()]
    bindings = [dict(module._buffers) for module in modules]
    attributes = [_plain_tensors(module) for module in modules]
    with torch.random.fork_rng([device.index for device in example.devices]):
        try:
            yield
        finally:
            # Cached casts must not carry over: the next pass casts again, and casts without gradients are of no use.
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
# A bundle is one Python file that runs by itself: kernels/bundle_template.py with the kernel sources in a string. A dry
# run (kernels/dry_run.cpp) finds the engines of given problems: the engines' host code, linked with stand-ins for the
# CUDA runtime, plans for a GPU that need not be present and records the instances that it would launch.


class ConvProblem(NamedTuple):
    """A convolution for bundle(): sizes of the tensors, and settings as in conv2d().

    bundle() raises ValueError if the sizes and settings do not form a convolution with a non-empty output, or if one of
    them except N exceeds (2**31 - 1) // 4.
    """

    input: tuple[int, int, int, int]  # N, C, H, W
    weight: tuple[int, int, int, int]  # K, C / groups, R, S
    bias: bool = False  # whether there is a bias [K]
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, int] = 0  # no names
    dilation: int | tuple[int, int] = 1
    groups: int = 1
    dtype: torch.dtype = torch.float32  # also float16, bfloat16, float64


# SM counts by compute capability, from NVIDIA's data sheets. Engines are chosen for the first count; instances that the
# other counts launch are compiled as well.
_SM_COUNTS = {
    (8, 0): (108, 56),
    (8, 6): (84, 82, 80, 72, 70, 68, 48, 46, 38, 30, 28, 26),
    (8, 9): (142, 128, 114, 80, 76, 60, 58, 56, 46, 34, 24),
    (9, 0): (132, 114, 78),
    (10, 0): (148,),
    (12, 0): (188, 170, 84, 70, 48, 36),
}
# SMs of a GPC, which limits clusters. 0 stands for the counts of an H200; GPUs of one model differ in their GPCs.
_SM_GROUPS = (0, 18, 16, 14)

# Patterns that evaluation scripts reject or warn about, in code, comments and strings, to detect fake implementations.
# A bundle contains none of them.
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
    """Return the text of one Python file that defines ModelNew, to paste into evaluation scripts.

    Args:
        problems: convolutions to include. The file contains the engines that they use, forward and backward, with TF32
            and without, and compiles only the kernel instances that they launch. An engine that calls others, such as
            strided, brings all that it may call. The gradient to the input runs on the forward's engine where that can
            compute it, the one to a float32 weight on a single engine: the file is shorter then, these gradients may be
            slower. In the file, other arguments raise ValueError, and operands with other strides are copied. None: all
            engines, for any problem and memory format.
        arch: compute capability of the GPU that will run the file, such as "9.0". Default: the current GPU's.

    Returns:
        The text. It also runs under exec(), and compiles its kernels when it runs, once for each directory of
        extensions. It contains no pattern that evaluation scripts reject. Its own names but ModelNew begin with
        _modelnew or _MODELNEW.

    With problems, a dry run chooses the engines. It needs nvcc, a C++ compiler, ninja and setuptools, but no GPU if
    `arch` is given. Without problems, the call needs none of these.

    Raises:
        ValueError: an entry of problems is no convolution, problems is empty, arch is given without problems, or a
            source contains a pattern that evaluation scripts reject.
        RuntimeError: there is neither a GPU nor arch, arch is malformed or of an unknown GPU, or a tool for the dry run
            is missing or fails.
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
    """Return a problem as a hashable tuple with pairs for its settings. Raise ValueError if it is no convolution."""
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
    """Return P and Q."""
    x, w, _, stride, padding, dilation = key[:6]
    spans = (x[2 + i] + 2 * padding[i] - dilation[i] * (w[2 + i] - 1) - 1 for i in (0, 1))
    return tuple(span // step + 1 for span, step in zip(spans, stride, strict=True))


_MOST = (2**31 - 1) // 4  # limit of all sizes and settings but the batch size, as in kernels/binding.cpp


def _bundle_gpu(arch: str | None) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return the compute capability and the SM counts to plan for. The first count chooses the engines."""
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
    """Return the library of the dry run, and compile it first if it is not built yet."""
    build = _plan_dry_run(_sources)
    path = build.library if os.path.exists(build.library) else _build_once(build)
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise RuntimeError(f"{path} cannot be loaded ({error}); delete it, and it is built again") from error


def _sizes_for_kernels(key: tuple[Any, ...], tf32: bool) -> list[int]:
    """Return a problem of contiguous tensors in the format of kernels/sizes.cuh."""
    (N, C, H, W), (K, group_C, R, S), _, stride, padding, dilation, groups, dtype = key
    P, Q = _output_size(key)
    sizes = [N, C, H, W, K, R, S, P, Q, groups, *stride, *padding, *dilation, _SERVED_DTYPES.index(dtype), tf32]
    for shape in ((C, H, W), (group_C, R, S), (K, P, Q)):
        sizes += [math.prod(shape[i:]) for i in range(4)]  # strides
    return sizes


def _planned(
    key: tuple[Any, ...], tf32: bool, operator: int, gpu: tuple[int, int, int], engine: str = ""
) -> tuple[str, set[str]]:
    """Return the engine of a problem's operator and the instances that it launches, as C++ text.

    `operator` is the number of an Operator in kernels/problem.cuh; `gpu` is compute capability times 10, SM count and
    SMs of a GPC. A given engine is used instead of the chosen one.
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


def _planned_for_file(
    key: tuple[Any, ...], tf32: bool, operator: int, gpu: tuple[int, int, int]
) -> tuple[str, set[str]]:
    """Return the same, but with an engine less to paste where another one of the file can compute a gradient.

    That is the forward's for the gradient to the input, and hopper_wgrad for the gradient to a weight in float32, which
    tma_wgrad launches besides its own kernels.
    """
    planned = _planned(key, tf32, operator, gpu)
    other = planned[0]
    if operator == 1 and other != "direct":
        other = _planned(key, tf32, 0, gpu)[0]
    elif other == "tma_wgrad" and key[-1] == torch.float32:
        other = "hopper_wgrad"
    if other != planned[0]:
        with contextlib.suppress(ValueError):
            return _planned(key, tf32, operator, gpu, other)
    return planned


def _instance(line: str) -> str:
    """Return the C++ text of an instance for a line of the dry run."""
    kernel, *numbers = line.split()
    return f'{{"{kernel}", {{{", ".join(numbers)}}}}}'


def _kernels_for(keys: list[tuple[Any, ...]], capability: tuple[int, int], sm_counts: tuple[int, ...]) -> str:
    """Return the CUDA text for these problems: lists of engines and instances, then the files that define them."""
    rows, engines, instances = [], set(), set()
    first, *others = itertools.product([10 * capability[0] + capability[1]], sm_counts, _SM_GROUPS)
    for key in keys:
        chosen = []
        for tf32, operator in itertools.product((False, True), range(4)):
            if operator == 3 and not key[2]:  # bgrad without a bias
                chosen.append("nullptr")
                continue
            engine, launched = _planned_for_file(key, tf32, operator, first)
            instances |= launched.union(*(_planned(key, tf32, operator, gpu, engine)[1] for gpu in others))
            engines.add(engine)
            chosen.append(f"&k{''.join(map(str.capitalize, engine.split('_')))}Engine")
        rows.append(f"{{{{{', '.join(chosen[:4])}}}, \\\n   {{{', '.join(chosen[4:])}}}}}")
    files = {f"{engine}.cu" for engine in engines}
    kernels = {re.match(r'\{("\w+")', instance)[1] for instance in instances}
    for name, text in _sources.items():
        if name.endswith(".cu") and any(kernel in text for kernel in kernels):
            files.add(name)
    defines = [_define("INSTANCES", sorted(instances) or ['{"none", {}}']), _define("CHOSEN", rows)]
    return "\n".join([*defines, _one_text(_with_callees(files))])


def _define(name: str, items: Iterable[str]) -> str:
    """Return the definition of a macro that is a list, with one item a line."""
    return f"#define MODELNEW_{name}" + ",".join(f" \\\n  {item}" for item in items) + "\n"


def _problem_row(key: tuple[Any, ...]) -> str:
    """Return a problem as an initializer of ProblemRow in bundle_template.cpp."""
    (x, w), bias, pairs, groups, dtype = key[:2], key[2], key[3:6], key[6], key[7]
    numbers = ["{" + ", ".join(map(str, values)) + "}" for values in (x, w, *pairs)]
    settings = f"{{{', '.join(numbers[2:])}, {groups}}}"
    return f"{{{numbers[0]}, {numbers[1]}, {str(bias).lower()}, {settings}, {_AT_NAMES[_SERVED_DTYPES.index(dtype)]}}}"


_DECLARATION = re.compile(r"^(?!extern|using|template|inline)(\w+) (\w+)(\([^;{}]*\));", re.MULTILINE)
_ENGINE = re.compile(r"^extern const Engine (k\w+Engine)\{", re.MULTILINE)


@functools.cache
def _definers() -> dict[str, str]:
    """Return the .cu file of each engine, and of each function that a header declares, by name."""
    declared = {name for text in _sources.values() for _, name, _ in _DECLARATION.findall(text)}
    definers = {}
    for file, text in _sources.items():
        if file.endswith(".cu"):
            defined = set(_ENGINE.findall(text))
            defined |= declared & set(re.findall(r"^\w+ (\w+)\([^;{}]*\) \{", text, re.MULTILINE))
            definers |= dict.fromkeys(defined, file)
    return definers


def _used(file: str) -> set[str]:
    """Return the names in _definers() that a file mentions."""
    return set(re.findall(r"\w+", _without_comments(_sources[file]))) & _definers().keys()


def _with_callees(files: set[str]) -> set[str]:
    """Return the files and, for engines that choose other engines in a call, the files of all their choices."""
    wanted, found = set(files), set(files)
    while wanted:
        file = wanted.pop()
        chooses = '#include "choice.cuh"' in _sources[file] or file not in files
        new = {_definers()[name] for name in _used(file)} - found if chooses else set()
        wanted |= new
        found |= new
    return found


def _one_text(files: set[str]) -> str:
    """Return one text of the headers that these files include, and the files. Kernels end with bundle_template.cu."""
    last = sorted(files - {_BUNDLE_END}) + [_BUNDLE_END] * (_BUNDLE_BINDING not in files)
    headers = [file for file in _with_headers(_sources, last) if file not in last]
    parts = []
    for file in (*headers, *last):
        if file == _BUNDLE_END:
            parts.append(_stand_ins(files))
        text = re.sub(r'^#(pragma once|include ".*")\n', "", _sources[file], flags=re.MULTILINE)
        # A bundle explains nothing.
        text = re.sub(r"^inline void describe\(const Problem.*?^}\n\n", "", text, flags=re.MULTILINE | re.DOTALL)
        text = re.sub(r"\b\w+::describe\b(?=[,}])", "nullptr", text)
        parts.append(f"// ---- kernels/{file} ----\n\n{text}")
    return "\n".join(filter(None, parts))


def _stand_ins(files: set[str]) -> str:
    """Return definitions of the engines and functions that these files mention but do not contain."""
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
    """Return the docstring of a bundle."""
    what = "for any problem" if problems is None else "for given problems (MODELNEW_PROBLEMS)"
    return f'''"""ModelNew, a 2-D convolution with CUDA kernels of its own, in one file {what}.

Written by modelnew's bundle(). The file reads downwards: the model, the build, the binding with its gradients, and the
kernels: what the files of modelnew's folder kernels/ say, headers first.
"""
'''


def _problem_of_script(path: str) -> ConvProblem:
    """Return the problem of a reference script in KernelBench's format: Model(*get_init_inputs()) on get_inputs().

    The script runs on the meta device, without computation. Raise ValueError if it fails there, or if its Model is not
    a single nn.Conv2d named `conv2d` with the arguments of ModelNew.
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
    """Dispatch mode that records the operators that run: (operator, arguments, result)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, result))
        return result


def _literal(text: str) -> str:
    """Return a Python literal of a source text: a raw string over several lines if possible."""
    raw = f"r'''\n{text}'''"
    readable = "'''" not in text and not text.endswith(("'", "\\"))
    return raw if readable else repr(text)


def _require_pasteable(text: str) -> None:
    """Raise ValueError if an evaluation script would reject the text."""
    for what, pattern in _REJECTED.items():
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(pattern, line):
                raise ValueError(f"line {number} of the bundle looks like {what}, word it otherwise: {line.strip()}")
    missing = [word for word in ("__global__", "load_inline", "class ModelNew") if word not in text]
    if missing:
        raise ValueError(f"the bundle lacks {missing}")


def _build_ahead(machines: list[str]) -> None:
    """Build a library for each machine that --arch names, or for this machine, and print the paths.

    Raise RuntimeError with advice if that is not possible.
    """
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
    """Return a compute capability such as (9, 0) for "9.0"."""
    numbers = re.fullmatch(r"(\d+)\.(\d)", text)
    if numbers is None:
        raise RuntimeError(f"--arch takes compute capabilities such as 8.0 or 9.0, but got {text!r}")
    return int(numbers[1]), int(numbers[2])


def _main(arguments: list[str] | None = None) -> None:
    """Run the command line. A failure prints `modelnew: ` and a reason to stderr and exits with status 1."""
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


# These statements come last, since they call functions of all sections.
_operators = getattr(torch.ops, _namespace)

if __name__ == "__main__":
    _main()
else:
    _extension, _extension_error = _load_extension()
    _register_operators()
