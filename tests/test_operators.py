"""The operators conv2d and conv2d_backward: what PyTorch does with an operator, done with these, and the ways to them.

Every test runs on the operators as they are here (of the compiled extension on a machine with a GPU, compositions of
PyTorch's own without one) and, for the CPU, on those of kernels/operators.cpp with their CPU kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import os
import shutil
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import cpp_extension
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import modelnew
from tests.cases import GPU_MARKS, KERNELS, RICH_CALL, TESTS, Call, assert_same, gpu, gradients, tf32_switch

pytestmark = pytest.mark.xdist_group("operators")

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])

CALLS = [
    RICH_CALL,
    Call("plain", (2, 4, 6, 5), (3, 4, 3, 2)),
    Call("unbatched", (4, 6, 5), (3, 4, 3, 2), {"padding": (1, 1)}, bias=3),
    Call("depthwise", (2, 3, 6, 5), (6, 1, 2, 3), {"padding": (1, 1), "groups": 3}, bias=6),
]


def settings(kwargs: dict) -> tuple:
    """stride, padding, dilation, groups as the operator's schema wants them."""
    return tuple(kwargs.get(name, default) for name, default in
                 (("stride", (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1)), ("groups", 1)))  # fmt: skip


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> types.ModuleType:
    """kernels/operators.cpp and screening.h, compiled for the CPU."""
    folder = tmp_path_factory.mktemp("operators")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.pathsep.join([os.environ["PATH"], os.path.dirname(modelnew._find_ninja())]))
        module = cpp_extension.load(
            "operators_on_cpu",
            [str(TESTS / "operators_on_cpu.cpp")],
            extra_include_paths=[str(KERNELS)],
            extra_cflags=["-O1", "-fvisibility=hidden"],  # smaller objects, and hence sooner than -O0
            build_directory=str(folder),
        )
        module.register_operators("modelnew_cpu")
        patch.setattr(modelnew, "_operators", torch.ops.modelnew_cpu)
        modelnew._register_flop_formulas()
    return module


@pytest.fixture
def routed(native, monkeypatch) -> None:
    """modelnew.conv2d takes CPU tensors for a GPU's and the CPU's operators for the extension's."""
    monkeypatch.setattr(modelnew, "_extension", None)
    monkeypatch.setattr(modelnew, "_operators", torch.ops.modelnew_cpu)
    monkeypatch.setattr(modelnew, "_any_cuda", lambda *arguments: any(isinstance(a, Tensor) for a in arguments))


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to call a convolution: the operator of a namespace, or the public function, on the CPU also `routed`."""

    name: str
    device: str
    namespace: str = "modelnew"

    @property
    def operators(self) -> Any:
        return getattr(torch.ops, self.namespace)

    @property
    def is_operator(self) -> bool:
        return self.name in ("operator", "native")

    @property
    def keeps_operator(self) -> bool:
        """Whether PyTorch sees an operator of ours rather than what it consists of."""
        return self.device == "cuda" or self.namespace == "modelnew_cpu"

    def conv2d(
        self, x: Tensor, w: Tensor, bias: Tensor | None = None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1
    ) -> Tensor:
        function = self.operators.conv2d if self.is_operator else modelnew.conv2d
        return function(x, w, bias, stride, padding, dilation, groups)


WAYS = [Way("function", "cpu"), Way("operator", "cpu"), Way("native", "cpu", "modelnew_cpu"),
        Way("routed", "cpu", "modelnew_cpu"), Way("function", "cuda"), Way("operator", "cuda")]  # fmt: skip


def fixture_of(chosen: Callable[[Way], bool]) -> Callable:
    marked = [(way, GPU_MARKS if way.device == "cuda" else ()) for way in WAYS if chosen(way)]

    @pytest.fixture(params=[pytest.param(way, id=f"{way.name}-{way.device}", marks=marks) for way, marks in marked])
    def fixture(request: pytest.FixtureRequest) -> Way:
        if request.param.name in ("native", "routed"):
            request.getfixturevalue(request.param.name)
        return request.param

    return fixture


way = fixture_of(lambda way: True)
operators = fixture_of(lambda way: way.is_operator)
kept = fixture_of(lambda way: way.keeps_operator)  # elsewhere PyTorch's own operators run


class Log(TorchDispatchMode):
    """Writes down which operators are called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((str(function), args))
        return function(*args, **(kwargs or {}))

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


# Values and gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_values_and_gradients(call, way):
    tensors = call.tensors(way.device)
    for wanted in (tensors, tensors[:1], tensors[1:2]):
        ours, theirs = way.conv2d(*tensors, **call.kwargs), F.conv2d(*tensors, **call.kwargs)
        assert_same(ours, theirs)
        assert_same(gradients(ours, wanted), gradients(theirs, wanted))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_gradcheck_twice(call, way):
    """First and second derivatives against finite differences, in every combination of inputs."""
    tensors = [tensor for tensor in call.tensors(way.device) if tensor is not None]
    function = functools.partial(way.conv2d, **call.kwargs)
    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


def test_gradients_of_gradients_without_some(way):
    """Second derivatives where only one first derivative was asked for."""
    for wanted in ([0], [1], [2], [0, 2]):
        tensors = RICH_CALL.tensors(way.device)
        seconds = []
        for convolution in (way.conv2d, F.conv2d):
            y = convolution(*tensors, **RICH_CALL.kwargs).square()
            firsts = torch.autograd.grad(y.sum(), [tensors[i] for i in wanted], create_graph=True)
            loss = sum(first.square().sum() for first in firsts)
            seconds.append(torch.autograd.grad(loss, tensors))
        torch.testing.assert_close(*seconds)


@pytest.mark.parametrize("bias", [None, 6], ids=["no bias", "bias"])
def test_only_requested_gradients_are_computed(bias, kept):
    """The mask is what a pass asks for, not what requires a gradient, which here is everything."""
    call = dataclasses.replace(RICH_CALL, bias=bias)
    tensors = [tensor for tensor in call.tensors(kept.device) if tensor is not None]
    for i, wanted in enumerate(tensors):
        y = kept.conv2d(*tensors, **call.kwargs)
        with Log() as log:
            torch.autograd.grad(y.sum(), wanted)
        masks = [list(args[-1]) for name, args in log.calls if name.endswith(".conv2d_backward.default")]
        assert masks == [[j == i for j in range(3)]]


def test_lists_of_one_number_stand_for_both_axes(operators):
    tensors = CALLS[1].tensors(operators.device)
    ours, theirs = operators.conv2d(*tensors, [2], [1], [1], 1), F.conv2d(*tensors, 2, 1)
    assert_same(ours, theirs)
    assert_same(gradients(ours, tensors), gradients(theirs, tensors))
    for wrong, requires_grad in itertools.product(([], [1, 1, 1]), (False, True)):
        with pytest.raises(RuntimeError):
            operators.conv2d(*CALLS[1].tensors(operators.device, requires_grad=requires_grad), wrong, [1], [1], 1)


@pytest.mark.parametrize("formats", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_memory_formats(dtype, formats, kept):
    """y and dx are channels_last if x or w is, but not in float64; dw is as w is. Meta tensors agree in strides."""
    call = Call("", (2, 4, 6, 5), (3, 4, 3, 2), {"padding": (1, 1)})
    x, w = (
        tensor.detach().contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        for tensor, last in zip(call.tensors(kept.device, dtype), formats, strict=False)
    )
    y, grads = value_and_gradients(kept.conv2d, x, w, call.kwargs)
    last = any(formats) and dtype != torch.float64
    for tensor, expected in ((y, last), (grads[0], last), (grads[1], formats[1])):
        assert tensor.is_contiguous(memory_format=torch.channels_last if expected else torch.contiguous_format)
    if kept.device == "cuda":
        theirs, their_grads = value_and_gradients(F.conv2d, x, w, call.kwargs)
        assert (y.stride(), grads[0].stride()) == (theirs.stride(), their_grads[0].stride())
    if kept.is_operator:
        meta, meta_grads = value_and_gradients(kept.conv2d, x.to("meta"), w.to("meta"), call.kwargs)
        assert [t.stride() for t in (y, *grads)] == [t.stride() for t in (meta, *meta_grads)]


def value_and_gradients(convolution: Callable, x: Tensor, w: Tensor, kwargs: dict) -> tuple[Tensor, tuple]:
    leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = convolution(*leaves, **kwargs)
    return y, torch.autograd.grad(y, leaves, torch.ones_like(y))


# Compiled, exported, counted -----------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with 2.4")
def test_opcheck(operators):
    x, w, bias = RICH_CALL.tensors(operators.device)
    channels_last = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    for each in (x, channels_last):
        torch.library.opcheck(operators.operators.conv2d.default, (each, w, bias, *settings(RICH_CALL.kwargs)))
    for call, mask in ((RICH_CALL, [False, True, True]), (CALLS[2], [True, False, True])):
        x, w, bias = call.tensors(operators.device)
        dy = torch.randn_like(operators.conv2d(x, w, bias, **call.kwargs)).requires_grad_()
        arguments = (dy, x, w, *settings(call.kwargs), mask)
        torch.library.opcheck(operators.operators.conv2d_backward.default, arguments)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(dynamic, way):
    """One graph, forward and backward, for new sizes as well; it holds our operator."""
    torch._dynamo.reset()
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: list) -> Callable:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    conv2d = way.operators.conv2d if way.is_operator else modelnew.conv2d

    @torch.compile(fullgraph=True, dynamic=dynamic, backend=backend)
    def compiled(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return conv2d(x, w, bias, (2, 1), (1, 2), (1, 2), 2)  # RICH_CALL's; torch 2.1 makes variables of others

    for x_shape in ((5, 4, 8, 9), (7, 4, 8, 9), (7, 4, 11, 10)):  # dynamic shapes take sizes that are equal for one
        tensors = dataclasses.replace(RICH_CALL, x=x_shape).tensors(way.device)
        ours, theirs = compiled(*tensors), F.conv2d(*tensors, **RICH_CALL.kwargs)
        assert_same(ours, theirs)
        assert_same(gradients(ours, tensors), gradients(theirs, tensors))
    if way.keeps_operator:
        targets = set().union(*graphs)
        assert {f"{way.namespace}.conv2d.default", f"{way.namespace}.conv2d_backward.default"} <= targets
    if dynamic:
        assert len(graphs) == 2


@pytest.mark.skipif(TORCH < (2, 6), reason="compiled autograd reads C++ functions from 2.6 on")
def test_compiled_autograd(kept):
    torch._dynamo.reset()
    tensors = RICH_CALL.tensors(kept.device)
    eager = gradients(kept.conv2d(*tensors, **RICH_CALL.kwargs), tensors)
    y = kept.conv2d(*tensors, **RICH_CALL.kwargs)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        assert_same(gradients(y, tensors), eager)


@gpu
@pytest.mark.parametrize("freezing", [False, True], ids=["default", "freezing"])
def test_compile_with_inductor(freezing):
    pytest.importorskip("triton")
    import torch._inductor.config

    torch._dynamo.reset()
    model = nn.Sequential(modelnew.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), modelnew.Conv2d(6, 4, 1)).eval()
    model = model.to("cuda", torch.float64)
    x = torch.randn(2, 4, 9, 10, dtype=torch.float64, device="cuda")
    with torch.no_grad(), torch._inductor.config.patch(freezing=freezing):
        assert_same(torch.compile(model, fullgraph=True)(x), model(x))


@gpu
def test_overload_reads_its_arguments_itself():
    """Compiled code calls the overload, in front of which the extension stands. It may hide nothing of PyTorch's."""
    x, w, bias = RICH_CALL.tensors("cuda")
    overload, numbers = torch.ops.modelnew.conv2d.default, settings(RICH_CALL.kwargs)
    theirs = F.conv2d(x, w, bias, *numbers)
    assert_same(overload(x.detach(), w.detach(), bias.detach(), *map(list, numbers[:3]), numbers[3]), theirs.detach())
    assert_same(overload(x, w, bias=bias, stride=numbers[0], padding=numbers[1], dilation=numbers[2], groups=2), theirs)
    dy = torch.ones_like(theirs)
    expected = torch.autograd.grad(theirs, [x, w, bias], dy)
    assert_same(torch.autograd.grad(overload(x, w, bias, *numbers), [x, w, bias], dy), expected)
    for mask in ([True, True, True], [False, True, False], [1, 0, 1]):
        ours = torch.ops.modelnew.conv2d_backward.default(dy, x.detach(), w.detach(), *numbers, mask)
        for got, wanted, gradient in zip(ours, mask, expected, strict=True):
            if wanted:
                assert_same(got, gradient)
            assert wanted or got.numel() == 0
    with Log() as log:
        overload(x.detach(), w.detach(), None, *numbers)
    assert "modelnew.conv2d.default" in log.names()
    with pytest.raises(RuntimeError):
        overload(x, w)


@pytest.mark.parametrize("layer_class", [modelnew.Conv2d, modelnew.ModelNew])
def test_export_of_layers(layer_class, way, monkeypatch):
    """Saved, loaded, and run for another batch size."""
    if not hasattr(torch.export, "Dim"):
        pytest.skip("torch.export takes dynamic shapes from 2.2 on")
    if way.is_operator:
        monkeypatch.setattr(modelnew, "conv2d", way.conv2d)
    layer = layer_class(4, 6, 3, padding=1).to(way.device, torch.float64)
    x, other = (torch.randn(N, 4, 9, 10, dtype=torch.float64, device=way.device) for N in (2, 5))
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    if way.keeps_operator:
        assert any(f"{way.namespace}.conv2d" in str(node.target) for node in program.graph.nodes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert_same((loaded.module() if hasattr(loaded, "module") else loaded)(other), layer(other))


@pytest.mark.parametrize("call", [RICH_CALL, CALLS[2]], ids=str)
def test_meta_and_fake_tensors(call, way):
    """Shapes, dtypes and strides without data, as the real call gives them."""
    x, w, bias = call.tensors(way.device, torch.float32, requires_grad=False)
    channels_last = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
    for x_like in (x, channels_last):
        real = way.conv2d(x_like, w, bias, **call.kwargs)
        with FakeTensorMode() as mode:
            fake = way.conv2d(*(mode.from_tensor(tensor) for tensor in (x_like, w, bias)), **call.kwargs)
        meta = way.conv2d(*(tensor.to("meta") for tensor in (x_like, w, bias)), **call.kwargs)
        assert fake.device == real.device
        assert meta.device.type == "meta"
        for abstract in (fake, meta):
            assert (abstract.shape, abstract.dtype) == (real.shape, real.dtype)
            if way.name == "native" or (way.is_operator and way.device == "cuda") or abstract.is_cuda:
                assert abstract.stride() == real.stride()


def test_meta_tensors_raise_what_real_ones_do(operators):
    x, w, _ = CALLS[1].tensors("meta")
    for bad in ((x, w[:, :2]), (x[:, :, :1], w), (x[0, 0], w)):
        with pytest.raises(RuntimeError):
            operators.conv2d(*bad)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_flops_are_counted(call, way):
    """As for PyTorch's convolution, forward and backward."""
    counted = []
    for convolution in (way.conv2d, F.conv2d):
        tensors = call.tensors(way.device)
        with FlopCounterMode(display=False) as counter:
            convolution(*tensors, **call.kwargs).sum().backward()
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


# Autocast, torch.func, forward mode ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, way):
    """float32 goes to autocast's dtype, float64 stays, and gradients come back in the parameters' dtype."""
    if way.device == "cpu" and dtype == torch.float16 and TORCH < (2, 4):
        pytest.skip("autocast to float16 on CPUs came with torch 2.4")
    for given in (torch.float32, torch.float64):
        tensors = RICH_CALL.tensors(way.device, given)
        with torch.autocast(way.device, dtype):
            ours, theirs = way.conv2d(*tensors, **RICH_CALL.kwargs), F.conv2d(*tensors, **RICH_CALL.kwargs)
        assert ours.dtype == theirs.dtype == (dtype if given == torch.float32 else given)
        # PyTorch may round once more, before it adds the bias.
        tolerance = 2 * torch.finfo(ours.dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        for mine, other in zip(gradients(ours, tensors), gradients(theirs, tensors), strict=True):
            torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("trained", [True, False])
def test_autocast_casts_a_weight_once(trained, way):
    """Three calls of a layer in one context: as many casts as with PyTorch's convolution."""
    casts = []
    for convolution in (way.conv2d, F.conv2d):
        x, w, bias = RICH_CALL.tensors(way.device, torch.float32, requires_grad=trained)
        with Log() as log, torch.autocast(way.device, torch.bfloat16):
            for _ in range(3):
                convolution(x.detach(), w, bias, **RICH_CALL.kwargs)
        casts.append(log.names().count("aten._to_copy.default"))
    assert casts[0] == casts[1] == (3 + 2 if trained else 9)


def test_func_transforms(way):
    x, w, bias = RICH_CALL.tensors(way.device, requires_grad=False)
    xs, ws = torch.stack([x, 2 * x, x - 1]), torch.stack([w, w + 1, -w])
    ours, theirs = (functools.partial(each, **RICH_CALL.kwargs) for each in (way.conv2d, F.conv2d))

    def tangent(f: Callable) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            return torch.autograd.forward_ad.unpack_dual(f(dual, w)).tangent

    for transform in (
        tangent,
        lambda f: torch.func.vmap(f, in_dims=(0, None, None))(xs, w, bias),
        lambda f: torch.func.vmap(f, in_dims=(0, 0, None))(xs, ws, bias),
        lambda f: torch.func.vmap(f, in_dims=(-1, None, None))(xs.movedim(0, -1), w, bias),
        lambda f: torch.func.grad(lambda w: f(x, w, bias).square().sum())(w),
        lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x, w, bias).square().sum()))(xs),
        lambda f: torch.func.jvp(f, (x, w, bias), (x, w + 1, bias))[1],
        lambda f: torch.func.jacrev(lambda b: f(x[:1], w, b))(bias),
        lambda f: torch.func.hessian(lambda w: f(x[:1, :, :3, :3], w, bias).square().sum())(w),
    ):
        assert_same(transform(ours), transform(theirs))


@pytest.mark.parametrize("groups", [0, -1])
def test_vmap_without_groups_raises(groups, kept):
    """PyTorch's rule for a batch of weights divides by the groups, and the process ends."""
    x, w, _ = CALLS[1].tensors(kept.device, requires_grad=False)
    dy, others = torch.ones(2, 3, 4, 4).to(x), ((1, 1), (0, 0), (1, 1), groups, [True] * 3)
    functions = [lambda w: kept.operators.conv2d_backward(dy, x, w, *others)]
    for padding in [(0, 0)] if kept.is_operator else [(0, 0), "valid", "same"]:
        functions.append(functools.partial(kept.conv2d, x, padding=padding, groups=groups))
    for function in functions:
        with pytest.raises(RuntimeError, match="non-positive groups is not supported"):
            torch.func.vmap(function)(torch.stack([w, w]))


# Ways to a kernel ----------------------------------------------------------------------------------------------------


class Tracker(torch.Tensor):
    """A subclass that notes the functions it passes through."""

    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


class FunctionLog(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def test_screening(native):
    """Which calls from Python go to a kernel at once, which to the dispatcher, and which Python looks at."""
    x, w, bias = RICH_CALL.tensors("cpu", requires_grad=False)
    leaf = w.clone().requires_grad_()
    way = functools.partial(native.way, DeviceContext)
    inside: list[str] = []

    def look(*tensors: Tensor) -> Tensor:
        inside.append(way(*tensors))
        return tensors[0].sum()

    assert way(x, w, bias) == way(x, w, None) == "kernel"
    assert way(x, leaf, None) == way(x, nn.Parameter(w), None) == "dispatcher"
    with torch.no_grad():
        assert way(x, leaf, None) == way(x, nn.Parameter(w), None) == "kernel"
    with torch.inference_mode():
        assert way(x, w, None) == way(x, w * 1, None) == "kernel"
    with torch.autocast("cpu", torch.bfloat16):
        assert way(x, w, None) == "dispatcher"
    torch.func.vmap(look, in_dims=(0, None))(x, w)
    torch.func.grad(look)(x, w)
    assert inside == ["dispatcher", "dispatcher"]
    with torch.autograd.forward_ad.dual_level():
        assert way(torch.autograd.forward_ad.make_dual(x, x), w, None) == "dispatcher"
    with Log():
        assert way(x, w, None) == "dispatcher"
    negative = torch._neg_view(torch.randn(2, 4, 8, 9, dtype=torch.complex64).real)
    assert way(negative, w, None) == way(x.to("meta"), w, None) == "dispatcher"
    with FakeTensorMode() as mode:
        assert way(mode.from_tensor(x), mode.from_tensor(w), None) == "python"
    assert way(x.to("meta"), w.to("meta"), None) == way(x.as_subclass(Tracker), w, None) == way([1.0], w) == "python"
    with torch.device("cpu"), torch.device("meta"):  # default devices are function modes as well
        assert way(x, w, None) == "kernel"
    with FunctionLog(), torch.device("cpu"):
        assert way(x, w, None) == "python"


@pytest.mark.parametrize("padding", [0, (1, 1), "same"], ids=str)
def test_subclasses_and_function_modes_see_torch_conv2d_once(padding, routed):
    x, w, _ = CALLS[1].tensors("cpu", requires_grad=False)
    Tracker.seen.clear()
    y = modelnew.conv2d(x.as_subclass(Tracker), w, padding=padding)
    assert isinstance(y, Tracker)
    assert [function for function in Tracker.seen if "conv" in str(function)] == [torch.conv2d]
    with torch.device("cpu"), FunctionLog() as mode, Log() as log:
        modelnew.conv2d(x, w, padding=padding)
    assert [function for function in mode.seen if "conv" in str(function)] == [torch.conv2d]
    assert not any("modelnew" in name for name in log.names())
    with torch.device("meta"), Log() as log:  # where factories make tensors is no matter of ours
        assert_same(modelnew.conv2d(x, w, padding=padding), F.conv2d(x, w, padding=padding))
    assert "modelnew_cpu.conv2d.default" in log.names()


def test_per_sample_gradients(routed):
    """Expanded weights are a tensor subclass of PyTorch's, known to torch.conv2d alone."""
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    layer = modelnew.Conv2d(4, 3, 3, dtype=torch.float64)
    x = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    call_for_per_sample_grads(layer)(x).sum().backward()
    for i in range(2):
        expected = torch.autograd.grad(F.conv2d(x[i : i + 1], layer.weight, layer.bias).sum(), layer.weight)[0]
        torch.testing.assert_close(layer.weight.grad_sample[i], expected)


@pytest.mark.skipif(TORCH < (2, 5), reason="DTensor is public from torch 2.5 on")
def test_dtensor(routed, tmp_path):
    """Tensors spread over processes are a subclass, for which PyTorch has rules of its own convolution alone."""
    tensor = pytest.importorskip("torch.distributed.tensor")
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x, w, bias = (t.detach() for t in Call("", (2, 4, 6, 5), (3, 4, 3, 2), bias=3).tensors("cpu"))
        spread = [tensor.distribute_tensor(each, mesh, [tensor.Replicate()]) for each in (x, w, bias)]
        assert_same(modelnew.conv2d(*spread).to_local(), F.conv2d(x, w, bias))
    finally:
        torch.distributed.destroy_process_group()


def test_unknown_batch_is_traced(kept):
    """A batch whose size is data, in both layouts: nothing asks whether it is empty."""
    if TORCH < (2, 6):
        pytest.skip("torch.compile asks itself before")
    torch._dynamo.reset()
    x, w, _ = CALLS[1].tensors(kept.device, torch.float32, requires_grad=False)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x: Tensor, chosen: Tensor) -> Tensor:
        return kept.operators.conv2d(x[chosen], w, None, (1, 1), (1, 1), (1, 1), 1)

    chosen = torch.tensor([True, False], device=kept.device)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), tf32_switch(False):
        for memory_format in (torch.contiguous_format, torch.channels_last):
            each = x.contiguous(memory_format=memory_format)
            y = compiled(each, chosen)
            torch.testing.assert_close(y, F.conv2d(x[:1], w, padding=1))
            assert y.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_keeps_the_operator(mode, routed):
    """Its tracer pushes function modes, which are none of the user's."""
    x, w, _ = CALLS[1].tensors("cpu", requires_grad=False)
    traced = make_fx(lambda x, w: modelnew.conv2d(x, w), tracing_mode=mode)(x, w)
    assert "modelnew_cpu.conv2d.default" in [str(node.target) for node in traced.graph.nodes]


@gpu
def test_short_way_passes_nothing_by():
    x, w, _ = RICH_CALL.tensors("cuda", requires_grad=False)
    Tracker.seen.clear()
    assert isinstance(modelnew.conv2d(x.as_subclass(Tracker), w, **RICH_CALL.kwargs), Tracker)
    assert Tracker.seen.count(torch.conv2d) == 1
    with Log() as log:
        modelnew.conv2d(x, w, **RICH_CALL.kwargs)
    assert "modelnew.conv2d.default" in log.names()


@gpu
def test_default_device_runs_our_kernels():
    x, w, _ = CALLS[1].tensors("cuda", torch.float32, requires_grad=False)
    modelnew.conv2d(x, w)
    torch.set_default_device("cuda")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            modelnew.conv2d(x, w)
            torch.cuda.synchronize()
    finally:
        torch.set_default_device(None)
    kernels = [event.key for event in profile.key_averages() if "::" in event.key]
    assert kernels
    assert all("modelnew::" in kernel for kernel in kernels)


@gpu
def test_without_cudnn_float32_is_full_precision():
    x, w, _ = Call("", (2, 64, 40, 40), (64, 64, 3, 3)).tensors("cuda", torch.float32, requires_grad=False)
    contracts = []
    for enabled in (True, False):
        with torch.backends.cudnn.flags(enabled=enabled, benchmark=False, deterministic=False, allow_tf32=True):
            contracts.append(modelnew.explain(x, w).split("; ")[1])
    assert contracts[0].startswith("tf32")
    assert contracts[1].startswith("fp32")


# Registration --------------------------------------------------------------------------------------------------------


def test_python_and_cpp_define_the_same(native, fresh_namespace):
    namespace = fresh_namespace("modelnew_schemas")
    modelnew._register_operators()
    for name in ("conv2d", "conv2d_backward"):
        ours, theirs = (getattr(n, name).default for n in (namespace, torch.ops.modelnew_cpu))
        assert str(ours._schema).partition("::")[2] == str(theirs._schema).partition("::")[2]
        assert ours.tags == theirs.tags
        if TORCH >= (2, 3):  # torch.compile keeps the strides that the operators give and take
            assert torch.Tag.needs_fixed_stride_order in ours.tags
            assert getattr(torch.Tag, "flexible_layout", None) not in ours.tags


def test_registering_again_changes_nothing(native, tmp_path):
    """Neither by the same library nor by another one of the same operators."""
    before = torch.ops.modelnew_cpu.conv2d.default
    native.register_operators("modelnew_cpu")
    other = modelnew._import_library(shutil.copy(native.__file__, tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.register_operators("modelnew_cpu")
    assert torch.ops.modelnew_cpu.conv2d.default is before


@pytest.fixture
def fresh_namespace(monkeypatch) -> Callable[[str], Any]:
    """Has modelnew, without an extension, register its operators under another name."""
    monkeypatch.setattr(modelnew, "_extension", None)
    monkeypatch.setattr(modelnew, "_extension_error", "for a test")

    def use(name: str) -> Any:
        monkeypatch.setattr(modelnew, "_namespace", name)
        monkeypatch.setattr(modelnew, "_operators", getattr(torch.ops, name))
        return getattr(torch.ops, name)

    return use


def test_a_copy_without_kernels_does_not_stop_one_that_has_them(native, fresh_namespace, monkeypatch, capsys):
    """First PyTorch's own operators run, then those of the library, and a third copy says that they stay."""
    namespace = fresh_namespace("modelnew_late")
    x, w, bias = RICH_CALL.tensors("cpu")
    arguments = (x, w, bias, *settings(RICH_CALL.kwargs))

    def seen() -> set[str]:
        with Log() as log:
            namespace.conv2d(*arguments).sum().backward()
        return {name for name in log.names() if name.startswith("modelnew")}

    def register(file: str) -> None:
        extension = types.SimpleNamespace(
            __file__=file,
            register_operators=lambda name, _: native.register_operators(name),
            entries=lambda *originals: originals,
        )
        monkeypatch.setattr(modelnew, "_extension", extension)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            modelnew._register_operators()

    modelnew._register_operators()
    assert not seen()
    register("second.so")
    assert seen() == {"modelnew_late.conv2d.default", "modelnew_late.conv2d_backward.default"}
    register("second.so")
    assert capsys.readouterr().err == ""
    register("third.so")
    assert "second.so" in capsys.readouterr().err
    assert "modelnew_late.conv2d.default" in seen()


@pytest.mark.skipif(TORCH < (2, 5), reason="fake tensors of a GPU need one")
def test_without_kernels_a_gpus_tensors_raise(fresh_namespace):
    """PyTorch's own convolution never takes their place silently, nor in code that is traced with fake ones."""
    fresh_namespace("modelnew_without")
    modelnew._register_operators()
    with FakeTensorMode():
        x = torch.empty(2, 4, 6, 5, device="cuda")
        with pytest.raises(RuntimeError, match="for a test"):
            modelnew.conv2d(x, torch.empty(3, 4, 3, 2, device="cuda"))
