"""What modelnew promises its users, one section for each layer; engines without a GPU, the build, bundles in tests/.

    modelnew against torch          conv2d, Conv2d, ModelNew: values, gradients, errors, state
    Networks                        accelerate, restore and their report, the ResNet-50 in examples/; how accelerate
                                    decides is in tests/test_accelerate.py
    The engines on the GPU          numerics of every engine, streams, graphs, devices; what concerns a single engine
                                    is in tests/test_engines_gpu.py
    Packaging

Tests marked `gpu` skip without a GPU; everything else runs without one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
import os
import pickle
import shutil
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import modelnew
from tests.cases import (
    DEVICES,
    DTYPES,
    ENGINES,
    EXACT_CASES,
    FILLS,
    KERNEL_FILES,
    ONE_TO_ONE_CASES,
    OPERANDS,
    OTHER_FILLS,
    ROOT,
    ROUNDING_CASES,
    VIEWS,
    Call,
    Case,
    assert_same,
    check_bounds,
    check_exact,
    depthwise_case,
    gpu,
    gradients,
    integers,
    make_tensors,
    named,
    normal,
    on_gpu,
    random_cases,
    random_depthwise_cases,
    references,
    tf32_switch,
    under_a_tf32_step,
)

# torch's own test suite, parts of which run here, forbids to set torch.backends' switches once it is imported.
with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ImportError):
    patch.setattr(torch.backends, "disable_global_flags", lambda: None)
    import torch.testing._internal.common_utils


# modelnew against torch ----------------------------------------------------------------------------------------------


# Each spelling that F.conv2d takes. Numbers are in double: so close to PyTorch's that only an error in kind can differ.
CALLS = [
    Call("plain", (2, 4, 9, 10), (6, 4, 3, 2)),
    Call("bias", (2, 4, 9, 10), (6, 4, 3, 2), bias=6),
    Call("unbatched", (4, 9, 10), (6, 4, 3, 3), {"padding": 1}, bias=6),
    Call("ints", (2, 4, 9, 10), (6, 2, 3, 3), {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}),
    Call("tuples", (2, 4, 9, 10), (6, 4, 3, 2), {"stride": (2, 1), "padding": (0, 3), "dilation": (1, 2)}),
    Call("lists", (2, 4, 9, 10), (6, 4, 3, 2), {"stride": [1, 2], "padding": [2, 0], "dilation": [2, 1]}),
    Call("one-element tuples", (2, 4, 9, 10), (6, 4, 3, 2), {"stride": (2,), "padding": (1,), "dilation": [1]}),
    Call("torch.Size", (2, 4, 9, 10), (6, 4, 3, 2), {"padding": torch.Size([1, 2])}),
    Call("valid", (2, 4, 9, 10), (6, 4, 3, 2), {"padding": "valid", "stride": 2}),
    Call("same, odd filter", (2, 4, 9, 10), (6, 4, 3, 5), {"padding": "same"}, bias=6),
    Call("same, even filter", (2, 4, 9, 10), (6, 4, 2, 4), {"padding": "same"}, bias=6),
    Call("same, dilated", (4, 9, 10), (6, 2, 2, 3), {"padding": "same", "dilation": (3, 2), "groups": 2}),
    Call("depthwise", (2, 4, 9, 10), (8, 1, 3, 3), {"groups": 4, "padding": 1}, bias=8),
    Call("no images", (0, 4, 9, 10), (6, 4, 3, 3), bias=6),
    Call("no input channels", (2, 0, 9, 10), (6, 0, 3, 3)),
]

# Wrong in one way each.
BAD_CALLS = [
    Call("input of rank 2", (9, 10), (6, 4, 3, 3)),
    Call("input of rank 5", (1, 2, 4, 9, 10), (6, 4, 3, 3)),
    Call("weight of rank 3", (2, 4, 9, 10), (6, 4, 3)),
    Call("channels differ", (2, 5, 9, 10), (6, 4, 3, 3)),
    Call("groups do not divide", (2, 4, 9, 10), (5, 2, 3, 3), {"groups": 2}),
    Call("no groups", (2, 4, 9, 10), (6, 4, 3, 3), {"groups": 0}),
    Call("stride 0", (2, 4, 9, 10), (6, 4, 3, 3), {"stride": 0}),
    Call("negative stride", (2, 4, 9, 10), (6, 4, 3, 3), {"stride": (1, -1)}),
    Call("negative padding", (2, 4, 9, 10), (6, 4, 3, 3), {"padding": -1}),
    Call("dilation 0", (2, 4, 9, 10), (6, 4, 3, 3), {"dilation": 0}),
    Call("filter too large", (2, 4, 9, 10), (6, 4, 12, 3), {"padding": 1}),
    Call("dilated filter too large", (4, 9, 10), (6, 4, 3, 3), {"dilation": 6}),
    Call("bias of wrong length", (2, 4, 9, 10), (6, 4, 3, 3), bias=5),
    Call("same with stride", (2, 4, 9, 10), (6, 4, 3, 3), {"padding": "same", "stride": 2}),
    Call("same, even filter, input of rank 2", (9, 10), (6, 4, 2, 2), {"padding": "same"}),
    Call("unknown padding", (2, 4, 9, 10), (6, 4, 3, 3), {"padding": "full"}),
    Call("three strides", (2, 4, 9, 10), (6, 4, 3, 3), {"stride": (1, 1, 1)}),
    Call("image without rows", (2, 4, 0, 10), (6, 4, 3, 3)),
    Call("filter without rows", (2, 4, 9, 10), (6, 4, 0, 3)),
]


def outcome(function: Callable, *args: object, **kwargs: object) -> tuple[object, ...]:
    """("ok", result), or the exception's type and text."""
    try:
        return "ok", function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


def check_same_error(ours: Callable, theirs: Callable, *args: object, **kwargs: object) -> None:
    expected = outcome(theirs, *args, **kwargs)
    assert expected[0] != "ok"
    assert outcome(ours, *args, **kwargs) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_conv2d_is_torchs(call, device):
    tensors = call.tensors(device)
    ours, theirs = modelnew.conv2d(*tensors, **call.kwargs), F.conv2d(*tensors, **call.kwargs)
    assert_same(ours, theirs)
    assert_same(gradients(ours, tensors), gradients(theirs, tensors))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", BAD_CALLS, ids=str)
def test_bad_calls_raise_what_torch_raises(call, device):
    check_same_error(modelnew.conv2d, F.conv2d, *call.tensors(device), **call.kwargs)


@pytest.mark.parametrize("device", DEVICES)
def test_mixed_dtypes_and_devices_raise_what_torch_raises(device):
    x, w, bias = CALLS[1].tensors(device, requires_grad=False)
    mixed = [(x.float(), w, bias), (x, w.half(), bias), (x, w, bias.float()), (x.float(), w.float(), bias)]
    if device == "cuda":
        mixed += [(x, w.cpu(), None), (x.cpu(), w, None), (x, w, bias.cpu())]
    for tensors in mixed:
        check_same_error(modelnew.conv2d, F.conv2d, *tensors)


ONES = (torch.ones(1, 1, 3, 3), torch.ones(1, 1, 1, 1))
WRONG_ARGUMENTS = {
    "lists for tensors": ([[1.0]], ONES[1]),
    "strings for tensors": ("x", "w"),
    "no weight": (ONES[0], None),
    "a bias that is a number": (*ONES, 1.0),
    "a fractional stride": (*ONES, None, 1.5),
    "a bool for a stride": (*ONES, None, True),
    "an array for a padding": (*ONES, None, 1, np.ones(2)),
    "no groups": (*ONES, None, 1, 0, 1, None),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arguments", WRONG_ARGUMENTS)
def test_wrong_arguments_raise_type_errors(arguments, device):
    """Up to the list of what was received: we hand PyTorch the defaults as well."""
    given = [value.to(device) if isinstance(value, Tensor) else value for value in WRONG_ARGUMENTS[arguments]]
    theirs, ours = outcome(F.conv2d, *given), outcome(modelnew.conv2d, *given)
    assert ours[0] is theirs[0] is TypeError
    assert ours[1].split(" - got")[0].split("must be")[0] == theirs[1].split(" - got")[0].split("must be")[0]


def test_cpu_serves_what_torch_serves():
    """Dtypes that only the GPU kernels do not know; a forced engine concerns CUDA tensors alone."""
    for dtype in (torch.complex64, torch.int32):
        x, w, _ = CALLS[0].tensors("cpu", dtype, requires_grad=False)
        with modelnew.force_engine("direct"):
            assert torch.equal(modelnew.conv2d(x, w), F.conv2d(x, w))
        assert "PyTorch" in modelnew.explain(x, w)
    with pytest.raises(ValueError, match="warp-drive"), modelnew.force_engine("warp-drive"):
        pass


def test_signatures():
    names = list(inspect.signature(modelnew.conv2d).parameters)
    assert names == ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
    parameters = inspect.signature(modelnew.ModelNew).parameters
    assert list(parameters) == ["in_channels", "out_channels", "kernel_size", *names[3:], "bias"]
    assert [parameter.default for parameter in parameters.values()][3:] == [1, 0, 1, 1, False]


# PyTorch's own test suite, which comes inside its wheel.


@pytest.fixture(scope="module")
def conv2d_opinfo():
    methods = pytest.importorskip("torch.testing._internal.common_methods_invocations", exc_type=ImportError)
    return next(info for info in methods.op_db if info.name == "nn.functional.conv2d")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_opinfo_samples(conv2d_opinfo, device, dtype, fp32_contract):
    for sample in conv2d_opinfo.sample_inputs(device, dtype, requires_grad=True):
        tensors = [sample.input, *(arg for arg in sample.args if isinstance(arg, Tensor))]
        ours = modelnew.conv2d(sample.input, *sample.args, **sample.kwargs)
        theirs = F.conv2d(sample.input, *sample.args, **sample.kwargs)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradients(ours, tensors), gradients(theirs, tensors), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_opinfo_error_inputs(conv2d_opinfo, device):
    for bad in conv2d_opinfo.error_inputs(device):
        sample = bad.sample_input
        with pytest.raises(bad.error_type, match=bad.error_regex):
            modelnew.conv2d(sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_moduleinfo_samples(device, training):
    modules = pytest.importorskip("torch.testing._internal.common_modules", exc_type=ImportError)
    info = next(info for info in modules.module_db if info.module_cls is nn.Conv2d)
    options = {"device": device, "dtype": torch.float64, "requires_grad": True, "training": training}
    for sample in info.module_inputs_func(info, **options):
        created, called = sample.constructor_input, sample.forward_input
        results = []
        for layer_class in (modelnew.Conv2d, nn.Conv2d):
            torch.manual_seed(0)
            layer = layer_class(*created.args, **created.kwargs).to(device, torch.float64).train(training)
            y = layer(*called.args, **called.kwargs)
            results.append((y, *gradients(y, [*called.args, *layer.parameters()])))
        assert_same(*results)


# Layers. Each set of arguments takes another way through nn.Conv2d.
LAYER_ARGUMENTS = [
    {"kernel_size": 3},
    {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 2), "dilation": 2, "groups": 2, "bias": False},
    {"kernel_size": (2, 3), "padding": "same"},
    {"kernel_size": 3, "padding": "valid"},
    {"kernel_size": 3, "padding": (2, 1), "padding_mode": "reflect"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "replicate", "stride": 2},
    {"kernel_size": 3, "padding": "same", "padding_mode": "circular"},
    {"kernel_size": 3, "dtype": torch.float64},
]


class Model(nn.Module):
    """What ModelNew stands in for."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: object, bias: bool = False, **kwargs: object
    ) -> None:
        super().__init__()
        self.conv2d = nn.Conv2d(in_channels, out_channels, kernel_size, bias=bias, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2d(x)


def twins(ours: type[nn.Module], theirs: type[nn.Module], device: str, **kwargs: object) -> list[nn.Module]:
    """One of each, made from the same seed."""
    layers = []
    for layer_class in (ours, theirs):
        torch.manual_seed(42)
        layers.append(layer_class(4, 6, **kwargs).to(device))
    return layers


def layer_pairs() -> list:
    """(ours, theirs, arguments), for both of our layers."""
    pairs = [(modelnew.Conv2d, nn.Conv2d, arguments) for arguments in LAYER_ARGUMENTS]
    models = [arguments for arguments in LAYER_ARGUMENTS if not arguments.keys() & {"padding_mode", "dtype"}]
    pairs += [(modelnew.ModelNew, Model, arguments) for arguments in models]
    return [pytest.param(*pair, id=f"{pair[0].__name__} {pair[2]}") for pair in pairs]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ours, theirs, arguments", layer_pairs())
def test_layers_are_torchs(ours, theirs, arguments, device):
    """Same text, random draws, state and numbers, and state that moves freely between the two."""
    layer, reference = twins(ours, theirs, device, **arguments)
    assert repr(layer).replace("ModelNew", "Model") == repr(reference)
    assert list(layer.state_dict()) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value)
    layer, reference = layer.double(), reference.double()
    x = torch.randn(2, 4, 9, 10, dtype=torch.float64, device=device)
    assert_same(layer(x), reference(x))
    other = theirs(4, 6, **arguments).to(device, torch.float64)
    layer.load_state_dict(other.state_dict(), strict=True)
    assert_same(layer(x), other(x))


@pytest.mark.parametrize("ours, theirs", [(modelnew.Conv2d, nn.Conv2d), (modelnew.ModelNew, Model)], ids=named)
def test_bad_layers_raise_what_torch_raises(ours, theirs):
    same = {"padding": "same", "stride": 2}
    for bad in ({"groups": 3}, {"groups": 0}, same, {"padding": "full"}, {"kernel_size": None}):
        check_same_error(ours, theirs, 4, 6, **{"kernel_size": 3} | bad)


def copies(model: nn.Module, folder: Path) -> list[nn.Module]:
    torch.save(model, folder / "model.pt")
    pickled = [pickle.loads(pickle.dumps(model, protocol)) for protocol in (0, 2, pickle.DEFAULT_PROTOCOL)]
    return [copy.deepcopy(model), *pickled, torch.load(folder / "model.pt", weights_only=False)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer_class", [modelnew.Conv2d, modelnew.ModelNew], ids=named)
def test_layers_survive_copying_and_storing(layer_class, device, tmp_path):
    layer = layer_class(4, 6, 3, padding=1, bias=True).to(device)
    x = torch.randn(2, 4, 9, 10, device=device)
    expected = layer(x)
    for twin in copies(layer, tmp_path):
        assert torch.equal(twin(x), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_model_uses_its_parameters_as_they_are(device):
    """Nothing derived from a weight outlives the call."""
    model = modelnew.ModelNew(4, 6, 3, bias=True).to(device, torch.float64)
    layer, x = model.conv2d, torch.randn(2, 4, 9, 10, dtype=torch.float64, device=device)
    for change in (
        lambda: None,
        lambda: layer.weight.detach().mul_(2),
        lambda: setattr(layer.bias, "data", torch.ones_like(layer.bias)),
        lambda: setattr(layer, "weight", nn.Parameter(torch.randn_like(layer.weight))),
        lambda: setattr(layer, "bias", None),
    ):
        change()
        assert_same(model(x), F.conv2d(x, layer.weight, layer.bias))


@pytest.mark.parametrize("ours, theirs", [(modelnew.Conv2d, nn.Conv2d), (modelnew.ModelNew, Model)], ids=named)
@pytest.mark.parametrize("device", DEVICES)
def test_parametrizations(device, ours, theirs):
    """For two steps: pruning computes its weight anew before each, in a hook."""
    x = torch.randn(2, 4, 9, 10, dtype=torch.float64, device=device)
    for parametrize in (
        nn.utils.parametrizations.weight_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: layer.register_forward_hook(plus_one),
    ):
        pair = [model.double() for model in twins(ours, theirs, device, kernel_size=3)]
        for model in pair:
            parametrize(getattr(model, "conv2d", model))
        for _ in range(2):
            assert_same(*(model(x) for model in pair))
            assert_same(*(gradients(model(x), list(model.parameters())) for model in pair))


# Networks ------------------------------------------------------------------------------------------------------------


class Plain(nn.Conv2d):
    """A user's layer that computes what nn.Conv2d does."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, padding=1)
        self.note = "mine"


class Zoo(nn.Module):
    """Convolutions with whatever people do to them, for [N, 4, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        # The older ways of normalising weights warn that they are old.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.old_norms = nn.Sequential(
                nn.utils.weight_norm(nn.Conv2d(4, 4, 3, padding=1)), nn.utils.spectral_norm(nn.Conv2d(4, 4, 1))
            )
        self.norms = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, (1, 3), groups=2)),
            nn.utils.parametrizations.spectral_norm(Plain(4)),
        )
        self.pruned = prune.l1_unstructured(nn.Conv2d(4, 4, 3, padding="same"), "weight", 0.5)
        self.twice = nn.Conv2d(4, 4, 3, stride=2, padding=1, padding_mode="circular")
        self.again = self.twice  # the same module
        self.tied = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.tied.weight = self.twice.weight  # another module, the same parameter
        self.frozen = nn.Conv2d(4, 4, 1, bias=False).requires_grad_(False)
        self.dropout = nn.Dropout(0.5)
        self.bn = nn.BatchNorm2d(4)
        self.tied.mark = "a user's attribute"
        # Every dictionary of hooks has one.
        self.frozen.register_forward_pre_hook(twice_the_input)
        self.frozen.register_forward_hook(plus_one)
        self.frozen.register_full_backward_hook(no_change)
        self.frozen.register_full_backward_pre_hook(no_change)
        self.frozen.register_state_dict_pre_hook(no_change)
        self.frozen._register_state_dict_hook(no_change)
        self.frozen._register_load_state_dict_pre_hook(no_change)
        self.frozen.register_load_state_dict_post_hook(no_change)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pruned(self.norms(self.old_norms(x)))
        x = self.again(self.twice(input=x)) + self.tied(self.tied(x))
        return self.dropout(self.bn(self.frozen(x)))


def twice_the_input(_, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (2 * inputs[0],)


def plus_one(_, __, y: Tensor) -> Tensor:
    return y + 1


def no_change(*_: object) -> None:
    pass


ZOO_LAYERS = 8  # convolutions of the zoo, each module once
ZOO_CALLS = 10  # and how often they run

X = torch.randn(3, 4, 9, 10)


@pytest.fixture
def ours_called(monkeypatch) -> list:
    """Grows with every call of modelnew.conv2d: on a CPU results tell nothing about who computed them."""
    called, conv2d = [], modelnew.conv2d
    monkeypatch.setattr(modelnew, "conv2d", lambda *args: called.append(args) or conv2d(*args))
    return called


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The result and all gradients of a training step that draws the same random numbers each time."""
    torch.manual_seed(2)
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def everything_about(model: nn.Module) -> list:
    """Identities of all that users can hold of a model, class names excepted."""
    found: list = []
    for name, module in model.named_modules(remove_duplicate=False):
        found.append((name, id(module), module.training))
        for key, value in vars(module).items():
            found.append((name, key, id(value)))  # the dictionaries of parameters, hooks and so on are the same objects
            found += [(name, key, k, id(v)) for k, v in value.items()] if isinstance(value, dict) else []
    return found


def test_accelerate_changes_who_computes_and_nothing_else(ours_called):
    model, twin = Zoo(), Zoo()  # no copy: torch cannot copy weights that a norm or pruning computed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, classes = everything_about(model), [type(layer) for layer in convolutions(model)]
    state = model.state_dict()
    assert modelnew.restore(model) is model  # to no effect
    assert everything_about(model) == before
    returned, report = modelnew.accelerate(model)
    assert returned is model
    ours = [type(layer) for layer in convolutions(model)]
    assert modelnew.accelerate(model)[1] == report  # once more
    assert [type(layer) for layer in convolutions(model)] == ours
    assert everything_about(model) == before
    assert all(isinstance(layer, modelnew.Conv2d) for layer in convolutions(model))
    assert isinstance(model.norms[1], Plain)
    assert [row.replaced for row in report.layers] == [True] * ZOO_LAYERS
    assert list(model.state_dict()) == list(state)
    assert model.state_dict()._metadata == state._metadata
    results = step(model, X)
    assert len(ours_called) == ZOO_CALLS
    for ours, theirs in zip(results, step(twin, X), strict=True):
        assert torch.equal(ours, theirs)
    assert len(ours_called) == ZOO_CALLS
    optimizer.step()
    assert not torch.equal(model.twice.weight, twin.twice.weight)
    twin.load_state_dict(model.state_dict())
    for _ in range(2):
        modelnew.restore(model)
        assert [type(layer) for layer in convolutions(model)] == classes
    assert torch.equal(step(model, X)[0], step(twin, X)[0])
    assert len(ours_called) == ZOO_CALLS


def test_a_model_that_is_a_layer_and_one_without_any(ours_called):
    layer = nn.Conv2d(4, 6, 3)
    returned, report = modelnew.accelerate(layer, torch.randn(4, 9, 10))
    assert returned is layer
    assert (report.layers[0].name, report.layers[0].convolution) == ("", "C4 K6 3x3, 9x10")
    assert "the network itself" in str(report)
    assert len(ours_called) == 1
    assert type(modelnew.restore(layer)) is nn.Conv2d
    _, report = modelnew.accelerate(nn.Linear(4, 4), torch.randn(1, 4))
    assert "no nn.Conv2d" in str(report)
    assert report.layers == ()


def test_copies_are_accelerated_too_and_can_be_restored(tmp_path, ours_called):
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), Plain(4), modelnew.Conv2d(4, 4, 3))
    model[0].mark = "a user's attribute"
    model, _ = modelnew.accelerate(model)
    x = torch.randn(2, 4, 9, 10)
    expected = model(x)
    for twin in copies(model, tmp_path):
        assert [type(layer) for layer in twin] == [type(layer) for layer in model]
        ours_called.clear()
        assert torch.equal(twin(x), expected)
        assert len(ours_called) == 3
        assert (twin[0].mark, twin[1].note) == ("a user's attribute", "mine")
        modelnew.restore(twin)
        assert [type(layer) for layer in twin] == [nn.Conv2d, Plain, modelnew.Conv2d]
        assert torch.equal(twin(x), expected)
        assert all(isinstance(layer, modelnew.Conv2d) for layer in model)


def test_copies_of_parametrized_layers_are_their_own():
    """Copies share the class that torch made for the parametrized layer."""
    model = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 6, 3))
    shared = type(model)
    twin = copy.deepcopy(model)
    modelnew.accelerate(model)
    assert type(twin) is shared
    assert not issubclass(shared, modelnew.Conv2d)
    third = copy.deepcopy(model)
    assert isinstance(third, modelnew.Conv2d)
    modelnew.restore(third)
    assert type(third) is shared
    x = torch.randn(1, 4, 5, 5)
    assert torch.equal(model(x), third(x))
    with pytest.raises(RuntimeError, match="only supported through state_dict"):  # as torch says of its own
        pickle.dumps(model)


@pytest.mark.parametrize("make", [lambda: nn.Conv2d(4, 4, 3, padding=1), lambda: Plain(4)], ids=["nn.Conv2d", "mine"])
def test_parametrizations_come_and_go_on_accelerated_layers(make, ours_called):
    """In every order in which the four actions can happen."""
    actions = {
        "add": nn.utils.parametrizations.weight_norm,
        "remove": lambda layer: nn.utils.parametrize.remove_parametrizations(layer, "weight"),
        "accelerate": modelnew.accelerate,
        "restore": modelnew.restore,
    }
    x = torch.randn(2, 4, 9, 10)
    for order in itertools.permutations(actions):
        added, removed, accelerated, restored = map(order.index, actions)
        if added > removed or accelerated > restored:
            continue
        layer = make()
        original, expected = type(layer), layer(x)
        for now, action in enumerate(order):
            actions[action](layer)
            ours_called.clear()
            torch.testing.assert_close(layer(x), expected)
            assert len(ours_called) == (accelerated <= now < restored)
            assert isinstance(layer, original)
            assert nn.utils.parametrize.is_parametrized(layer) == (added <= now < removed)
        assert type(layer) is original


def with_own(name: str, value: object) -> nn.Conv2d:
    """A layer with this attribute."""
    layer = nn.Conv2d(4, 4, 3)
    setattr(layer, name, value)
    return layer


def derived(**methods: Callable) -> nn.Conv2d:
    """A layer of a class with these methods."""
    return type("Derived", (nn.Conv2d,), methods)(4, 4, 3)


def identity(_: nn.Module, x: Tensor, *__: Tensor) -> Tensor:
    return x


class Wrapped(nn.Parameter):
    """A parameter that brings operators of its own, as DTensor does."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


class NoSubclasses(nn.Conv2d):
    def __init_subclass__(cls) -> None:
        raise TypeError("no subclasses, please")


LEFT_ALONE = {
    "own forward": (lambda: derived(forward=identity), "Derived, has a forward of its own"),
    "own _conv_forward": (lambda: derived(_conv_forward=identity), "Derived, has a _conv_forward of its own"),
    "forward on the instance": (lambda: with_own("forward", abs), "forward of its own, set on the instance"),
    "_conv_forward on the instance": (lambda: with_own("_conv_forward", abs), "_conv_forward of its own, set on"),
    "lazy": (lambda: nn.LazyConv2d(4, 3), "not initialised yet"),
    "before quantization": (
        lambda: with_own("qconfig", torch.ao.quantization.default_qconfig),
        "prepared for quantization",
    ),
    "quantization-aware": (
        lambda: torch.ao.nn.qat.Conv2d(4, 4, 3, qconfig=torch.ao.quantization.get_default_qat_qconfig()),
        "torch.ao.nn.qat.modules.conv.Conv2d, has a forward of its own",
    ),
    "TorchScript": (lambda: torch.jit.script(nn.Conv2d(4, 4, 3)), "TorchScript compiled it"),
    "complex": (lambda: nn.Conv2d(4, 4, 3, dtype=torch.complex64), "parameters are complex64"),
    "tensor subclass": (lambda: with_own("weight", Wrapped(torch.randn(4, 4, 3, 3))), "of type Wrapped"),
    "no subclasses": (lambda: NoSubclasses(4, 4, 3), "no subclasses, please"),
    "ours": (lambda: modelnew.Conv2d(4, 4, 3), "made as a modelnew.Conv2d"),
}


@pytest.mark.filterwarnings("ignore:.*(deprecated|Complex).*")
@pytest.mark.parametrize("make, reason", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_computes_something_else_is_left_alone_and_reported(make, reason):
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Sequential(make()))
    layer = model[1][0]
    cls, before = type(layer), dict(vars(layer))
    _, report = modelnew.accelerate(model)
    assert (type(layer), dict(vars(layer))) == (cls, before)
    row = report.layers[1]
    assert (row.name, row.replaced) == ("1.0", False)
    assert reason in row.reason
    assert f"1.0: {row.reason}" in str(report)
    assert report.layers[0].replaced
    assert "1 of 2 convolutions" in str(report)
    modelnew.restore(model)
    assert (type(layer), type(model[0])) == (cls, nn.Conv2d)


@pytest.mark.parametrize("name", ["forward", "_conv_forward"])
def test_a_patched_nn_conv2d_is_left_alone(name, monkeypatch):
    """Some patch the class for all layers at once, as for images that wrap around."""
    layer = nn.Conv2d(4, 4, 3)
    monkeypatch.setattr(nn.Conv2d, name, identity)
    _, report = modelnew.accelerate(layer)
    assert type(layer) is nn.Conv2d
    assert f"has a {name} of its own" in report.layers[0].reason


def test_lazy_layers_are_accelerated_once_they_exist():
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3), nn.LazyConv2d(4, 3)), torch.randn(1, 4, 9, 9)
    _, report = modelnew.accelerate(model, x)
    assert "would initialise the lazy modules" in str(report)
    assert isinstance(model[1].weight, nn.UninitializedParameter)
    model(x)
    _, report = modelnew.accelerate(model, x)
    assert [(row.replaced, row.engine) for row in report.layers] == [(True, "PyTorch")] * 2


def test_example_leaves_no_trace():
    model = Zoo()
    model(X).sum().backward()  # so that there are gradients, and weights that weight_norm computed
    model.frozen.eval()
    about, state = everything_about(model), copy.deepcopy(model.state_dict())
    computed, random_state = model.old_norms[0].weight, torch.random.get_rng_state()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    _, report = modelnew.accelerate(model, X)
    assert len(report.layers) == ZOO_CALLS
    assert everything_about(model) == about
    assert model.old_norms[0].weight is computed
    assert computed.grad_fn is not None
    assert torch.equal(torch.random.get_rng_state(), random_state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert grad is None or torch.equal(p.grad, grad)


class Keeping(nn.Module):
    """Keeps its last result, counts in a new buffer each time, and takes a second argument: whether both layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Conv2d(4, 2, (1, 2), stride=(1, 2))
        self.register_buffer("count", torch.zeros(()))
        self.calls = []

    def forward(self, x: Tensor, both: bool = False) -> Tensor:
        self.count = self.count + 1
        self.calls.append(torch.is_grad_enabled())
        self.last = self.second(self.first(self.first(x))) if both else self.first(x)
        return self.last


@pytest.mark.parametrize(
    "example, second",
    [(X, False), ((X,), False), ((X, True), True), ({"x": X}, False), ({"both": True, "x": X}, True)],
    ids=["tensor", "tuple of one", "tuple", "dict of one", "dict"],
)
def test_report_has_a_row_for_each_call(example, second):
    model = Keeping()
    _, report = modelnew.accelerate(model, example)
    first = ("first", "N3 C4 K4 3x3, 9x10, pad 1, groups 2", "float32", "PyTorch")
    other = ("second", "N3 C4 K2 1x2, 9x10, stride 1x2" if second else "C4 K2 1x2, stride 1x2", "float32")
    rows = [(row.name, row.convolution, row.dtype, row.engine) for row in report.layers]
    assert rows == [first] * (1 + second) + [(*other, "PyTorch" if second else None)]
    assert model.calls == [False]
    assert not hasattr(model, "last")
    assert model.count == 0
    assert ("not called with this example: second" in str(report)) == (not second)
    assert "nothing was timed" in str(report)
    assert (report.before_ms, report.after_ms) == (None, None)
    for row in rows:
        assert any(line.split()[0] == row[0] and row[1] in line for line in str(report).splitlines())


def test_accelerate_and_restore_take_modules_and_examples():
    for model in (nn.Conv2d, "model"):
        for function in (modelnew.accelerate, modelnew.restore):
            with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
                function(model)
    layer = nn.Conv2d(4, 4, 3)
    for example in ([X], 3):
        with pytest.raises(TypeError, match="example_input must be"):
            modelnew.accelerate(layer, example)
        assert type(layer) is nn.Conv2d


def test_without_kernels_a_network_on_a_gpu_stays_as_it_is(monkeypatch):
    """accelerate() must not make a network that works one that raises."""
    monkeypatch.setattr(modelnew, "_extension", None)
    monkeypatch.setattr(modelnew, "_extension_error", "for a test")
    monkeypatch.setattr(modelnew, "_any_cuda", lambda *_: True)
    layer = nn.Conv2d(4, 4, 3)
    with pytest.raises(RuntimeError, match="for a test"):
        modelnew.accelerate(layer)
    assert type(layer) is nn.Conv2d
    _, report = modelnew.accelerate(nn.Conv1d(4, 4, 3))  # needs no kernels
    assert not report.layers[0].replaced


def test_compiled_networks(ours_called):
    compilations = []
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()).eval(), torch.randn(1, 4, 9, 9)
    compiled = torch.compile(model, backend=lambda graph, _: compilations.append(graph) or graph.forward)
    expected = compiled(x)
    for action, count in ((modelnew.accelerate, 2), (modelnew.restore, 3)):
        action(compiled)
        assert torch.equal(compiled(x), expected)
        assert len(compilations) == count, "stale code runs"
    returned, report = modelnew.accelerate(compiled, x)
    assert returned is compiled
    assert isinstance(model[0], modelnew.Conv2d)
    assert [(row.name, row.engine) for row in report.layers] == [("0", "PyTorch")]
    assert len(compilations) == 3, "the example was compiled"
    assert len(ours_called) >= 1


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch.compiler.set_stance came with 2.6")
def test_compiled_parts_of_a_network_run_eagerly_on_the_example():
    """Compiled code does not call the hooks that look at a layer's input."""
    compilations = []
    part = torch.compile(nn.Conv2d(4, 4, 3), backend=lambda graph, _: compilations.append(graph) or graph.forward)
    model = nn.Sequential(part, nn.Conv2d(4, 4, 3))
    _, report = modelnew.accelerate(model, X)
    assert [(row.name, row.engine) for row in report.layers] == [("0._orig_mod", "PyTorch"), ("1", "PyTorch")]
    assert not compilations
    model(X)
    assert compilations


@pytest.fixture
def process_group(tmp_path) -> Iterator[None]:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("needs gloo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("first", ["accelerate", "wrap"])
def test_distributed_data_parallel(first, process_group, ours_called):
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()), torch.randn(2, 4, 9, 10)
    expected = step(model, x)
    if first == "accelerate":
        modelnew.accelerate(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    modelnew.accelerate(wrapped, x)
    ours_called.clear()
    for ours, theirs in zip(step(wrapped, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(ours_called) == 1


def test_fully_sharded_layers(process_group, ours_called):
    """fully_shard puts a class of its own over the layer's, and leaves parameters that only torch's operators know."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("fully_shard came with 2.6")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    x = torch.randn(2, 4, 9, 10)
    layer, other = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
    modelnew.accelerate(layer)
    fsdp.fully_shard(layer, mesh=mesh)
    layer(x).sum().backward()
    assert len(ours_called) == 1
    modelnew.restore(layer)
    assert type(layer).__name__ == "FSDPConv2d"
    assert not isinstance(layer, modelnew.Conv2d)
    layer(x).sum().backward()
    fsdp.fully_shard(other, mesh=mesh)
    _, report = modelnew.accelerate(other)
    assert "DTensor: accelerate before sharding" in report.layers[0].reason
    assert len(ours_called) == 1


# The engines on the GPU ----------------------------------------------------------------------------------------------


@gpu
def test_extension_is_built():
    assert modelnew._extension is not None, modelnew._extension_error
    assert tuple(modelnew._extension.engine_names()) == modelnew._ENGINE_NAMES


# Larger than a shim can run: tiles of 64 and 16 channels, of 128 and 512 pixels, from one element short to one more.
GPU_TILE_CASES = [
    Case(2, C, H, W, K, R, S, padding=(R // 2, S // 2))
    for (C, K), (H, W), (R, S) in [
        ((64, 64), (16, 128), (3, 3)),
        ((63, 65), (17, 127), (3, 3)),
        ((65, 63), (15, 129), (1, 1)),
        ((16, 128), (23, 511), (3, 5)),
        ((17, 15), (31, 513), (5, 3)),
        ((128, 16), (7, 7), (7, 7)),
        ((3, 64), (64, 65), (7, 7)),
        ((256, 257), (14, 13), (3, 3)),
        ((256, 2048), (80, 81), (3, 3)),  # so many tiles of dw that no block shares its pixels with another
    ]
]
# Layers of MobileNetV2 and ConvNeXt, and a filter of RepLKNet.
GPU_DEPTHWISE_CASES = [
    depthwise_case(N, C, H, H, R, R, stride=(stride, stride), padding=(R // 2, R // 2))
    for N, C, H, R, stride in [
        (3, 32, 112, 3, 1), (3, 96, 112, 3, 2), (5, 144, 56, 3, 1), (5, 144, 56, 3, 2), (7, 192, 28, 3, 2),
        (9, 384, 14, 3, 1), (9, 576, 14, 3, 2), (33, 960, 7, 3, 1), (5, 96, 56, 7, 1), (9, 192, 28, 7, 1),
        (17, 384, 14, 7, 1), (33, 768, 7, 7, 1), (3, 240, 28, 5, 1), (2, 128, 56, 31, 1),
    ]
]  # fmt: skip
GPU_EXACT_CASES = EXACT_CASES + GPU_TILE_CASES + ONE_TO_ONE_CASES + GPU_DEPTHWISE_CASES + random_cases(40, seed=1)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_gpu_exact(engine, dtype):
    """Integers, bit for bit, over every geometry; one test for each engine and dtype, since the cases are quick."""
    for case in GPU_EXACT_CASES:
        tensors = make_tensors(case, dtype, integers, "cuda")
        if results := on_gpu(case, tensors, engine=engine):
            check_exact(case, results, tensors)


@gpu
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_gpu_depthwise_exact_in_channels_last(dtype):
    for case in ONE_TO_ONE_CASES + GPU_DEPTHWISE_CASES + random_depthwise_cases(40, seed=9, most=70):
        tensors = make_tensors(case, dtype, integers, "cuda")
        tensors |= {name: tensors[name].to(memory_format=torch.channels_last) for name in ("x", "dy")}
        results = on_gpu(case, tensors, engine="depthwise")
        assert "fprop" in results
        check_exact(case, results, tensors)


# The project's reference shapes, smaller in what only takes time, a stem, and reductions from 27 to 4608 products.
GPU_ROUNDING_CASES = [
    *ROUNDING_CASES,
    Case(2, 16, 66, 258, 128, 3, 3),
    Case(1, 64, 34, 130, 128, 3, 3),
    Case(1, 64, 36, 70, 128, 5, 7),
    Case(1, 512, 14, 14, 64, 3, 3, padding=(1, 1)),
    Case(4, 3, 112, 112, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
    Case(2, 64, 56, 56, 256, 1, 1),
    Case(8, 128, 56, 57, 128, 3, 3, padding=(1, 1), groups=4),
    Case(2, 96, 40, 41, 96, 7, 7, padding=(3, 3), groups=96),
]


@gpu
@pytest.mark.parametrize("tf32_allowed", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("dtype, fill", [*((torch.float32, fill) for fill in FILLS), *OTHER_FILLS], ids=named)
@pytest.mark.parametrize("engine", [None, *ENGINES])
def test_gpu_rounding(engine, dtype, fill, tf32_allowed):
    """Both contracts, element by element; and the same bits every time."""
    for case in GPU_ROUNDING_CASES:
        tensors = make_tensors(case, dtype, fill, "cuda")
        if results := on_gpu(case, tensors, tf32_allowed, engine):
            check_bounds(case, results, tensors, case.tf32_operators(dtype, tf32_allowed))
            again = on_gpu(case, tensors, tf32_allowed, engine)
            assert all(torch.equal(again[name], result) for name, result in results.items()), case


@gpu
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("engine", ENGINES)
def test_gpu_takes_any_strides(engine, view):
    for case in (Case(2, 6, 9, 10, 9, 3, 2, stride=(1, 2), padding=(1, 1), groups=3), Case(2, 32, 19, 23, 40, 3, 3)):
        tensors = make_tensors(case, torch.float32, integers, "cuda")
        tensors |= {name: VIEWS[view](tensors[name]) for name in ("x", "w", "dy")}
        if results := on_gpu(case, tensors, engine=engine):
            check_exact(case, results, tensors)


@gpu
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("special", [math.inf, -math.inf, struct.unpack("f", b"\xff\xff\xff\x7f")[0]], ids=str)
def test_gpu_propagates_nan_and_inf(engine, special):
    case = Case(2, 64, 66, 130, 128, 3, 3)
    assert case.tf32_operators(torch.float32, True) == set(OPERANDS)
    for allowed in (False, True):
        tensors = make_tensors(case, torch.float32, under_a_tf32_step, "cuda")
        tensors["x"].view(torch.int32)[1, 3, 5, 7] = torch.tensor(special).view(torch.int32).item()
        tensors["dy"][0, 2, 30, 4] = special
        results, expected = on_gpu(case, tensors, allowed, engine), references(case, tensors)
        for name, result in results.items():
            assert torch.equal(result.isnan(), expected[name].isnan()), name
            assert torch.equal(result.isinf(), expected[name].isinf()), name


@gpu
def test_gpu_more_than_2_to_the_31_elements():
    """Offsets beyond 32 bits, in the input, in the output and in both gradients. Half precision: 4.3 GB a tensor."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free GPU memory")
    size = 46400  # 46400^2 > 2^31
    x = torch.zeros(1, 1, size, size, dtype=torch.half, device="cuda")
    x[0, 0, -3:, -300:] = 1
    x[0, 0, 0, :300] = 2
    w = torch.full((1, 1, 1, 1), 3.0, dtype=torch.half, device="cuda")
    x.requires_grad_(), w.requires_grad_()
    y = modelnew.conv2d(x, w)
    assert torch.equal(y.detach(), 3 * x.detach())
    dx, dw = torch.autograd.grad(y, (x, w), x.detach())
    assert torch.equal(dx, 3 * x.detach())
    assert dw.item() == 3 * 300 + 4 * 300
    del y, dx
    # More elements in the output alone, from many channels.
    w = torch.arange(1030, dtype=torch.half, device="cuda").view(-1, 1, 1, 1)
    y = modelnew.conv2d(x.detach()[:, :, -1450:, -1450:], w)
    assert y.numel() > 2**31
    assert torch.equal(y[0, 1029, -3:, -300:], w[1029].expand(1, 3, 300)[0])
    assert not y[0, :, :-3].any()


@gpu
@pytest.mark.parametrize("dtype, name", [("complex64", "ComplexFloat"), ("int32", "Int"), ("bool", "Bool")])
def test_unserved_dtypes_are_named(dtype, name):
    x, w = (ones.to("cuda", getattr(torch, dtype)) for ones in ONES)
    with pytest.raises(NotImplementedError, match=rf"no kernels for {name} tensors"):
        modelnew.conv2d(x, w)


@gpu
def test_runs_on_the_current_stream():
    """A result that is right only if our kernels wait for the work before them on a stream of the user's."""
    case = Case(2, 16, 66, 130, 32, 3, 3)
    tensors = make_tensors(case, torch.float32, integers, "cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = {name: tensor * 1 for name, tensor in tensors.items()}
        results = on_gpu(case, late)
    stream.synchronize()
    check_exact(case, results, tensors)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_cuda_graph_replays_with_new_data(dtype):
    """Forward and backward captured once; replays see new inputs and new weights."""
    case = Case(2, 16, 40, 70, 24, 3, 3, padding=(1, 1))
    fresh = [make_tensors(case, dtype, integers, "cuda", seed) for seed in range(3)]
    static = {name: tensor.clone() for name, tensor in fresh[0].items()}
    with torch.cuda.stream(torch.cuda.Stream()):
        on_gpu(case, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = on_gpu(case, static)
    for tensors in fresh:
        for name, tensor in tensors.items():
            static[name].copy_(tensor)
        for result in results.values():
            result.fill_(math.nan)
        graph.replay()
        check_exact(case, results, tensors)


@gpu
def test_second_device():
    """Tensors on a device that is not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    case = Case(2, 16, 40, 70, 24, 3, 3, padding=(1, 1))
    tensors = make_tensors(case, torch.float32, integers, "cuda:1")
    assert torch.cuda.current_device() == 0
    results = on_gpu(case, tensors)
    assert all(result.device.index == 1 for result in results.values())
    check_exact(case, results, tensors)
    replicas = nn.parallel.replicate(modelnew.Conv2d(16, 24, 3).cuda(0), [0, 1])
    inputs = [torch.randn(2, 16, 9, 9, device=f"cuda:{index}") for index in range(2)]
    for replica, x, y in zip(replicas, inputs, nn.parallel.parallel_apply(replicas, inputs), strict=True):
        torch.testing.assert_close(y, F.conv2d(x, replica.weight, replica.bias), rtol=1e-3, atol=1e-3)


@gpu
def test_conjugate_and_negative_views():
    """Lazy negation is resolved before the kernels read memory."""
    z = torch.randn(2, 4, 9, 10, dtype=torch.complex64, device="cuda")
    x = torch._neg_view(z.real)
    w = torch.randn(6, 4, 3, 3, device="cuda")
    with tf32_switch(False):
        torch.testing.assert_close(modelnew.conv2d(x, w), F.conv2d(x.resolve_neg(), w), rtol=1e-5, atol=1e-5)


@gpu
def test_explain_tells_engine_contract_and_reason():
    case = Case(2, 64, 66, 130, 128, 3, 3)
    tensors = make_tensors(case, torch.float32, normal, "cuda")
    for allowed, contract in ((True, "tf32"), (False, "fp32")):
        with tf32_switch(allowed):
            text = modelnew.explain(tensors["x"], tensors["w"], tensors["bias"], **case.kwargs)
        for direction in ("forward", "dgrad", "wgrad", "bgrad"):
            line = next(line for line in text.splitlines() if line.startswith(f"{direction}: "))
            assert any(engine in line for engine in ENGINES)
        assert contract in text.lower()


@gpu
@pytest.mark.parametrize(
    "case, copied",
    [
        (Case(40, 64, 130, 130, 128, 3, 3), False),
        (Case(4, 64, 130, 130, 128, 3, 3), True),
        (Case(64, 256, 56, 56, 64, 1, 1), False),  # by gather, of x itself and in whole tiles
    ],
)
def test_workspace_of_a_forward_is_small(case, copied):
    """Packed weights and 1 MB at most beyond the output; for `gather` sums of parts and half of the input too."""
    tensors = make_tensors(case, torch.float32, normal, "cuda")
    modelnew.conv2d(tensors["x"], tensors["w"])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = modelnew.conv2d(tensors["x"], tensors["w"])
    extra = torch.cuda.max_memory_allocated() - before - y.numel() * y.element_size()
    of_gather = (32 << 20) + tensors["x"].numel() * 2 if copied and torch.cuda.get_device_capability()[0] == 9 else 0
    assert extra <= (1 << 20) + of_gather + 4 * tensors["w"].numel() * 4


# Packaging ----------------------------------------------------------------------------------------------------------

# A package that is installed has the sources that it would compile.
INSTALLED = """
import os, sys
import modelnew
assert os.path.dirname(modelnew.__file__) == sys.argv[1], modelnew.__file__
assert sorted(modelnew._sources) == sorted(sys.argv[2:]), sorted(modelnew._sources)
assert "class ModelNew" in modelnew.bundle()
"""


def test_installs_from_an_sdist(tmp_path):
    """From the tree to an sdist, from that to a folder of packages; what users of `pip install` get."""
    if int(pytest.importorskip("setuptools").__version__.split(".")[0]) < 64:
        pytest.skip("needs setuptools 64")
    pytest.importorskip("wheel")
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist")
    tree, site = tmp_path / "tree", tmp_path / "site"
    shutil.copytree(ROOT, tree, ignore=ignored)
    run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
    run([sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('dist')"], cwd=tree)
    (sdist,) = (tree / "dist").iterdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run([*pip, "--target", str(site), str(sdist)], cwd=tmp_path)
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} - {"__pycache__"} == {
        "modelnew.py",
        "modelnew_kernels",
    }
    names = [path.name for path in KERNEL_FILES]
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    run([sys.executable, "-c", INSTALLED, str(site), *names], cwd=tmp_path, env=environment)
