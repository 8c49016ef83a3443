"""bundle(): what the pasted file holds, what evaluation scripts see of it, and that its kernels are those it needs.

Without a GPU the kernels' host code runs over stand-ins for the CUDA runtime, as in the dry run that chooses engines.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import itertools
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import modelnew
from tests.cases import DEVICES, KERNELS, ROOT, TESTS, gpu, tf32_switch
from tests.machine_code import check_binding

pytestmark = pytest.mark.xdist_group("bundle")  # one process makes the bundles and waits for the dry run's build

ConvProblem = modelnew.ConvProblem

P55 = ConvProblem((8, 64, 512, 1024), (128, 64, 3, 3))
P56 = ConvProblem((8, 64, 512, 256), (128, 64, 5, 7))
P63 = ConvProblem((16, 16, 1024, 1024), (128, 16, 3, 3))
KERNELBENCH = {"55": P55, "56": P56, "63": P63}

needs_nvcc = pytest.mark.skipif(
    modelnew._find_cuda_home() is None or modelnew._find_ninja() is None or modelnew._find_host_compiler() is None,
    reason="needs nvcc, ninja and a C++ compiler for the dry run",
)

# A problem as KernelBench poses it, with module globals that a careless bundle would overwrite.
REFERENCE = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel_size: tuple, stride: int = 1, padding: int = 0,
                 dilation: int = 1, groups: int = 1, bias: bool = False):
        super(Model, self).__init__()
        self.conv2d = nn.Conv2d(in_channels, out_channels, kernel_size, stride=stride, padding=padding,
                                dilation=dilation, groups=groups, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv2d(x)

batch_size = 3
in_channels = 16
out_channels = 64
kernel_size = (3, 5)
width = 128
height = 126

def get_inputs():
    return [torch.rand(batch_size, in_channels, height, width)]

def get_init_inputs():
    return [in_channels, out_channels, kernel_size]
"""
REFERENCE_PROBLEM = ConvProblem((3, 16, 126, 128), (64, 16, 3, 5), False, (1, 1), (0, 0), (1, 1), 1)

# KernelBench's static checker (its kernel_static_checker.py) rejects these or warns of them. It looks at code without
# comments; here the whole text must be free of them.
FORBIDDEN = {
    "exception handlers": r"\btry\s*:|\bexcept\b",
    "the word pass": r"\bpass\b",
    "future imports": r"__future__",
    "compute layers": r"torch\.nn\.(?!(Module(List|Dict)?|parameter|Parameter(List|Dict)?|init)\b)",
    "torch's operators": r"\btorch\.(mm|bmm|matmul|einsum|conv([123]d|_transpose[123]d)?|(avg|max)_pool[123]d|relu|tanh"
    r"|sigmoid|softmax|linear|clamp|dropout|logsumexp)(?=\s*\(|\s|$)",
    "torch's functions": r"\bnn\.functional\.\w+|\bF\.(conv|linear|relu|gelu|softmax|dropout|(max|avg)_pool|\w+_norm)",
    "streams": r"cuda\.Stream\s*\(|with\s+torch\.cuda\.stream|\.wait_stream\s*\(|\.record_stream\s*\(",
    "threads": r"\bthreading\b|multiprocessing|concurrent\.futures|PoolExecutor",
    "tensor subclasses": r"_make_subclass|class\s+\w+.*\((torch\.)?Tensor\)|torch\.Tensor\.__new__",
    "patched timers": r"(cuda\.Event|\.record|\.elapsed_time|synchronize|time\.perf_counter|time\.time)\s*=",
    "half precision": r"__float2half(_rn)?\s*\(|\(\s*__half\s*\)\s*[\w>.-]|static_cast\s*<\s*(__half|half)\s*>\s*\("
    r"|\.half\s*\(|\.float16\s*\(|\.to\s*\(\s*(dtype\s*=\s*)?torch\.(float16|half)\b",
}


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Bundles by name: of all problems, of KernelBench's, and of the reference's above."""
    made = {"all": modelnew.bundle()}
    if not needs_nvcc.args[0]:
        problems = {**KERNELBENCH, "reference": REFERENCE_PROBLEM}
        made |= {name: modelnew.bundle([problem], arch="9.0") for name, problem in problems.items()}
    return made


def literal(text: str, name: str) -> str:
    """The value of one of a bundle's constants."""
    start = text.index(f"_MODELNEW_{name} = r'''") + len(f"_MODELNEW_{name} = r'''")
    return text[start : text.index("'''", start)]


# The text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", FORBIDDEN)
def test_bundles_avoid(texts, what):
    for name, text in texts.items():
        found = [(name, line) for line in text.splitlines() if re.search(FORBIDDEN[what], line)]
        assert not found


def test_bundles_have_what_is_asked_for(texts):
    """And global names that no script has."""
    patterns = (r"__global__ void", "load_inline", r"threadIdx\.", r"__syncthreads\(", r"class ModelNew\(nn\.Module\)")
    for text in texts.values():
        assert all(re.search(pattern, text) for pattern in patterns)
        assert max(map(len, text.splitlines())) <= 120
        context: dict = {}
        exec(compile(text, "<string>", "exec"), context)
        names = {name for name, value in context.items() if not inspect.ismodule(value)}
        others = names - {"ModelNew", "__builtins__", "__doc__"}
        assert all(name.lower().startswith("_modelnew") for name in others), others
    assert {path.name for path in KERNELS.glob("*.cu")} <= set(files_of(texts["all"]))
    assert "Stand-ins" not in texts["all"]


def files_of(text: str) -> list[str]:
    return re.findall(r"^// ---- kernels/(\S+) ----$", text, re.MULTILINE)


@needs_nvcc
@pytest.mark.parametrize("name", KERNELBENCH)
def test_bundle_of_a_problem_is_short(texts, name):
    files = set(files_of(texts[name]))
    assert len(texts[name].splitlines()) <= 8000
    assert files >= {"wgmma.cu", "hopper_wgrad.cu", "listed.cu", "numerics.cuh"}
    assert not {"gather.cu", "direct.cu", "operators.cpp"} & files


# Problems ------------------------------------------------------------------------------------------------------------


NO_PROBLEMS = {
    "channels and groups": [{"weight": (8, 4, 3, 3)}],
    "its filter and image, do not fit": [{"input": (1, 8, 2, 2)}],
    "four sizes": [{"input": (8, 8, 8)}],
    "integers": [{"input": (1, 8, 8.5, 8)}, {"padding": "same"}],
    "floating-point one": [{"dtype": torch.int32}],
    "out of range": [
        {"input": (0, 8, 8, 8)}, {"input": (1, 8, 8, 1 << 31)}, {"stride": 0}, {"padding": -1}, {"groups": 0}
    ],
}  # fmt: skip


@pytest.mark.parametrize("text", NO_PROBLEMS)
def test_bundle_refuses_what_is_no_problem(text):
    for changes in NO_PROBLEMS[text]:
        with pytest.raises(ValueError, match=text):
            modelnew.bundle([ConvProblem((1, 8, 8, 8), (8, 8, 3, 3))._replace(**changes)], arch="9.0")


def test_bundle_wants_a_problem_and_a_gpu(monkeypatch):
    with pytest.raises(ValueError, match="at least one"):
        modelnew.bundle([], arch="9.0")
    with pytest.raises(RuntimeError, match="takes compute capabilities such as"):
        modelnew.bundle(P55, arch="hopper")
    with pytest.raises(ValueError, match="arch goes with problems"):
        modelnew.bundle(arch="9.0")
    with pytest.raises(RuntimeError, match=r"compute capability 11\.5 is made on such a GPU; without it: 8\.0, "):
        modelnew.bundle([P55], arch="11.5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"sees no GPU here; name the one .* arch 9\.0"):
        modelnew.bundle([P55])


def script(tmp_path: Path, old: str = "", new: str = "") -> str:
    assert old in REFERENCE
    (tmp_path / "reference.py").write_text(REFERENCE.replace(old, new) if old else REFERENCE)
    return str(tmp_path / "reference.py")


def test_script_is_read_without_computing(tmp_path):
    assert modelnew._problem_of_script(script(tmp_path)) == REFERENCE_PROBLEM
    huge = script(tmp_path, "batch_size = 3", "batch_size = 1 << 40")
    assert modelnew._problem_of_script(huge).input == (1 << 40, 16, 126, 128)
    settings = script(tmp_path, "kernel_size]", "3, 2, 1, 1, 4, True]")
    assert modelnew._problem_of_script(settings) == ConvProblem(
        (3, 16, 126, 128), (64, 4, 3, 3), True, (2, 2), (1, 1), (1, 1), 4
    )


@pytest.mark.parametrize(
    "replacement, text",
    [
        (("return self.conv2d(x)", "return self.conv2d(x).relu()"), "is not one nn.Conv2d.*relu"),
        (("self.conv2d", "self.convolution"), "is not one nn.Conv2d"),
        (("bias=bias)", "bias=True)"), "is not one nn.Conv2d"),
        (("[in_channels, out_channels, kernel_size]", "[16, 64, 3, 1, 'same']"), "names its padding, 'same'"),
        (("get_inputs", "inputs"), "does not run on the meta device: KeyError"),
        (("width)]", "width).cuda()]"), "does not run on the meta device"),
        (("import torch.nn as nn", "import torch.nn as nn; 1 / 0"), "ZeroDivisionError"),
    ],
)
def test_script_of_something_else_is_refused(tmp_path, replacement, text):
    with pytest.raises(ValueError, match=text):
        modelnew._problem_of_script(script(tmp_path, *replacement))


def test_bundle_command(texts, tmp_path, monkeypatch, capsys):
    """`python modelnew.py bundle`, to a file and to standard output, of all problems and of a script's."""
    subprocess.run([sys.executable, str(ROOT / "modelnew.py"), "bundle", "-o", "bundle.py"], check=True, cwd=tmp_path)
    assert (tmp_path / "bundle.py").read_text() == texts["all"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^modelnew: missing\.py does not run on the meta device: FileNotF"):
        modelnew._main(["bundle", "--for", "missing.py"])
    modelnew._main(["bundle"])
    assert capsys.readouterr().out == texts["all"]
    if "reference" in texts:
        script(tmp_path)
        modelnew._main(["bundle", "--for", "reference.py", "--arch", "9.0"])
        assert capsys.readouterr().out == texts["reference"]


# Under exec ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_bundle_under_exec(texts, device, monkeypatch, tmp_path):
    """As KernelBench does it: both sources in one dict, seeds 42, the same inputs. Twice in one process, beside the
    imported module, with an architecture list that fits no GPU here.
    """
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.9")
    built = set()
    for _ in range(2):
        context: dict = {}
        exec(compile(REFERENCE, "<string>", "exec"), context)
        before = dict(context)
        prepended = f"import os\nos.environ['TORCH_EXTENSIONS_DIR'] = {str(tmp_path)!r}\n"
        exec(compile(prepended + texts["reference" if device == "cuda" else "all"], "<string>", "exec"), context)
        for name in ("Model", "get_inputs", "get_init_inputs", "in_channels", "height", "torch", "nn"):
            assert context[name] is before[name], f"the bundle overwrites {name}"
        assert context["ModelNew"] is not modelnew.ModelNew
        torch.manual_seed(42)
        inputs, outputs = [tensor.to(device) for tensor in context["get_inputs"]()], []
        for model_class in (context["ModelNew"], context["Model"]):
            torch.manual_seed(42)
            outputs.append(model_class(*context["get_init_inputs"]()).to(device=device)(*inputs))
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
        outputs[0].sum().backward()
        built |= {(path, path.stat().st_mtime_ns) for path in tmp_path.glob("*/*.so")}
    assert len(built) == (device == "cuda")
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "8.9"


class FakeBuild:
    """A GPU on paper, and load_inline as the bundle calls it; `error` is raised by it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error: Exception | None = None
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(torch.utils.cpp_extension, "load_inline", self.load_inline)
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.9")

    def load_inline(
        self, name: str, cpp_sources: list, cuda_sources: list, build_directory: str, no_implicit_headers: bool, **other
    ) -> types.SimpleNamespace:
        arch_list, locked = os.environ.get("TORCH_CUDA_ARCH_LIST"), os.path.exists(f"{build_directory}/lock")
        self.calls.append(other | {"name": name, "folder": Path(build_directory), "list": arch_list, "locked": locked})
        if self.error is not None:
            raise self.error
        return types.SimpleNamespace(conv2d=lambda *arguments: arguments)


def test_bundle_builds_with_a_name_for_each_directory(texts, monkeypatch, tmp_path):
    """After a failed build, and after a killed one, which leaves a file `lock` that PyTorch waits for without end."""
    fake = FakeBuild(monkeypatch, tmp_path)
    for folder, error in (("1", RuntimeError("nvcc says no")), ("2", None), ("1", None)):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / folder))
        fake.error = error
        with pytest.raises(RuntimeError, match="nvcc says no") if error else contextlib.nullcontext():
            exec(texts["all"], {})
        call = fake.calls[-1]
        assert call["folder"] == tmp_path / folder / call["name"]
        assert not call["locked"]
        (call["folder"] / "lock").touch()
        assert call["list"] == "8.0"
        assert os.environ["TORCH_CUDA_ARCH_LIST"] == "8.9"
        assert "-gencode=arch=compute_90a,code=sm_90a" in call["extra_cuda_cflags"]
    names = [call["name"] for call in fake.calls]
    assert names[0] == names[2] != names[1]


@needs_nvcc
def test_bundle_of_another_gpu_says_so(texts, monkeypatch, tmp_path):
    fake = FakeBuild(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(RuntimeError, match=r"for GPUs of compute capability \(9, 0\), but this one has \(8, 0\)"):
        exec(texts["55"], {})
    exec(texts["all"], {})
    assert "-gencode=arch=compute_80,code=sm_80" in fake.calls[0]["extra_cuda_cflags"]


# The kernels ---------------------------------------------------------------------------------------------------------

# Problems in one file use different engines, and no engine calls one that only another problem brings.
POINTS = ConvProblem((32, 256, 56, 56), (64, 256, 1, 1))
DILATED = ConvProblem((2, 64, 64, 64), (64, 64, 3, 3), padding=12, dilation=12)
STEM = ConvProblem((32, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3)
DEPTHWISE = ConvProblem((32, 96, 56, 56), (96, 1, 5, 5), True, 2, 2, 1, 96)
GROUPS = ConvProblem((8, 64, 56, 56), (64, 8, 3, 3), padding=1, groups=8, dtype=torch.bfloat16)
PLANNED = {
    "55": ([P55], "9.0"),
    "several": ([P56, P63, ConvProblem((8, 64, 56, 56), (64, 64, 3, 3), bias=True, padding=1)], "9.0"),
    "points, dilated": ([POINTS, DILATED], "9.0"),
    "wgrad of dilated": ([ConvProblem((32, 2048, 65, 65), (256, 2048, 3, 3), padding=36, dilation=36)], "9.0"),
    "stem, depthwise, groups": ([STEM, DEPTHWISE, GROUPS], "9.0"),
    "strided": ([ConvProblem((32, 256, 56, 56), (512, 256, 3, 3), stride=2, padding=1)], "9.0"),
    "half": ([ConvProblem((32, 128, 28, 28), (128, 128, 3, 3), padding=1, dtype=torch.float16)], "9.0"),
    "double": ([ConvProblem((2, 8, 20, 20), (8, 8, 3, 3), dtype=torch.float64)], "8.0"),
    "ampere": ([P55, ConvProblem((4, 64, 56, 56), (64, 64, 1, 1))], "8.0"),
}


def compiled(command: list, output: Path) -> Path:
    subprocess.run([str(word) for word in (*command, "-o", output)], check=True)
    return output


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The object file that calls a bundle's kernels over stand-ins for the CUDA runtime."""
    flags = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-DMODELNEW_DRY_RUN", f"-I{KERNELS}"]
    command = [modelnew._find_host_compiler(), *flags, f"-I{modelnew._find_cuda_home()}/include"]
    return compiled([*command, "-c", TESTS / "bundle_on_cpu.cpp"], tmp_path_factory.mktemp("callers") / "cpu.o")


def compile_kernels(text: str, capability: tuple[int, int], folder: Path) -> Path:
    """The object file of a bundle's kernels. PTX of device code shows what does not compile, and is made quickly."""
    (folder / "kernels.cu").write_text(literal(text, "KERNELS"))
    architecture = f"compute_{modelnew._architecture(capability)}"
    flags = ["-std=c++17", "-O0", "-Xcicc=-O0", f"-gencode=arch={architecture},code={architecture}"]
    flags += ["--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden", "-DMODELNEW_DRY_RUN"]
    nvcc = f"{modelnew._find_cuda_home()}/bin/nvcc"
    return compiled([nvcc, *flags, "-c", folder / "kernels.cu"], folder / "kernels.o")


@needs_nvcc
@pytest.mark.parametrize("name", PLANNED)
def test_bundle_has_every_instance_that_its_problems_launch(name, callers, tmp_path):
    """And no others; and it launches what the library would, without a call of a stand-in for an engine."""
    problems, arch = PLANNED[name]
    text = modelnew.bundle(problems, arch=arch)
    capability, sm_counts = modelnew._bundle_gpu(arch)
    objects = compile_kernels(text, capability, tmp_path), callers
    link = [modelnew._find_host_compiler(), "-shared", "-pthread", "-Wl,--no-undefined,-Bsymbolic", *objects]
    library = ctypes.CDLL(str(compiled(link, tmp_path / "bundle.so")))
    library.run_bundle.restype = ctypes.c_bool
    gpus = [(10 * capability[0] + capability[1], sms, group) for sms in sm_counts for group in (0, 14, 16, 18)]
    launched = set()
    for row, problem in enumerate(problems):
        key = modelnew._problem_key(problem)
        for tf32, operator in itertools.product((False, True), range(4 if problem.bias else 3)):
            engine, _ = modelnew._planned_for_file(key, tf32, operator, gpus[0])
            sizes = modelnew._sizes_for_kernels(key, tf32)
            numbers, said = (ctypes.c_int64 * len(sizes))(*sizes), ctypes.create_string_buffer(1 << 14)
            for gpu_ in gpus:
                call = (*gpu_, numbers, operator, problem.bias, row, said, ctypes.c_size_t(len(said)))
                done = library.run_bundle(*call)
                instances = said.value.decode().splitlines()
                assert done, (problem, tf32, operator, gpu_, instances)
                expected = modelnew._planned(key, tf32, operator, gpu_, engine)[1]
                assert {modelnew._instance(line) for line in instances} == expected
                launched |= expected
    listed = re.findall(r'^  (\{"\w+", \{[\d, ]*\}\})', literal(text, "KERNELS"), re.MULTILINE)
    assert launched == {*listed} - {'{"none", {}}'}


@needs_nvcc
def test_binding_compiles_with_the_installed_torch(texts, tmp_path):
    (tmp_path / "binding.cpp").write_text(literal(texts["55"], "BINDING"))
    check_binding(tmp_path / "binding.cpp", tmp_path)


# On a GPU ------------------------------------------------------------------------------------------------------------


@gpu
@needs_nvcc
def test_gpu_bundles_of_several_problems_in_one_process(monkeypatch, tmp_path):
    """A build directory each: every file runs its own kernels, once built, with the library's results."""
    problems = [
        ConvProblem((4, 64, 64, 128), (128, 64, 3, 3)),
        ConvProblem((2, 16, 70, 70), (64, 16, 5, 7), bias=True, padding=(2, 3)),
        ConvProblem((8, 32, 28, 28), (32, 1, 3, 3), padding=1, groups=32, dtype=torch.float16),
        ConvProblem((8, 64, 28, 28), (128, 64, 1, 1), dtype=torch.float16),  # contiguous in either format
    ]
    contexts = []
    for number, problem in enumerate(problems):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / str(number)))
        contexts.append({})
        exec(modelnew.bundle([problem]), contexts[-1])
    for (context, problem), switch in itertools.product(zip(contexts, problems, strict=True), (False, True)):
        K, C, R, S = problem.weight
        arguments = (C * problem.groups, K, (R, S), problem.stride, problem.padding, 1, problem.groups, problem.bias)
        models = []
        for cls in (context["ModelNew"], modelnew.ModelNew):
            torch.manual_seed(1)
            models.append(cls(*arguments).to("cuda", problem.dtype))
        x = torch.randn(problem.input, device="cuda", dtype=problem.dtype, requires_grad=True)
        with tf32_switch(switch):
            results = []
            for model in models:
                y = model(x)
                dy = torch.sin(torch.arange(y.numel(), device="cuda")).view_as(y).to(problem.dtype)
                results.append([y, *torch.autograd.grad(y, [x, *model.parameters()], dy, retain_graph=True)])
            if problem.dtype == torch.float32:  # a file has one engine for this gradient, the library several
                with modelnew.force_engine("hopper_wgrad"):
                    (results[1][2],) = torch.autograd.grad(y, [model.conv2d.weight], dy)
            (y, dx, *others), (own_y, own_dx, *own) = results
            assert all(map(torch.equal, (y, *others), (own_y, *own)))
            assert (dx - own_dx).norm() <= 1e-3 * own_dx.norm()  # perhaps by another engine
            other = x.detach().to(memory_format=torch.channels_last)
            shifted = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view_as(x).copy_(x.detach())
            for memory_format in (torch.contiguous_format, torch.channels_last):
                models[0].to(memory_format=memory_format)
                assert all(torch.equal(models[0](given), results[0][0]) for given in (other, shifted))
            models[0](x).sum().backward()  # an expanded gradient
        with pytest.raises(ValueError, match="this file has kernels for"):
            models[0](x[:1])
        with pytest.raises(NotImplementedError, match="no second derivatives"):
            torch.autograd.grad(models[0](x).sum(), x, create_graph=True)
    assert len(list(tmp_path.glob("*/*/*.so"))) == len(problems)
