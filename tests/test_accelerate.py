"""accelerate() never makes a network slower: how it decides, what it times, and what it leaves alone.

Without a GPU, decisions are tested with times that the test makes up, and passes on the CPU.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import re
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import modelnew
from test_modelnew import Plain, X, Zoo, convolutions, derived, everything_about, identity, no_change
from tests.cases import gpu

FORK_RNG = torch.random.fork_rng


@pytest.fixture
def paper_gpu(monkeypatch) -> None:
    """A GPU that exists on paper only, for networks on the CPU."""
    monkeypatch.setattr(modelnew, "_cuda_devices", lambda *_: [torch.device("cuda", 0)])
    monkeypatch.setattr(modelnew, "_synchronize", no_change)
    monkeypatch.setattr(modelnew, "_built_extension", no_change)
    monkeypatch.setattr(torch.random, "fork_rng", lambda *_, **__: contextlib.nullcontext())


class Times:
    """Stands in for what measures: made-up milliseconds, for PyTorch's convolution and for ours.

    `layers` has a pair for each call of a layer in a pass. The network takes `rest` and what its layers take, and a
    layer on modelnew `extra` besides.
    """

    def __init__(self, layers: dict[str, list[tuple[float, float]]], rest: float = 10.0, extra: float = 0.0) -> None:
        self.layers, self.rest, self.extra = layers, rest, extra
        self.passes: list[tuple[str, ...]] = []  # the layers on modelnew in each
        self.disturbed: Callable[[int], float] = lambda _: 0.0

    def install(self, monkeypatch: pytest.MonkeyPatch, network: nn.Module) -> None:
        self.network = network
        monkeypatch.setattr(modelnew, "_layers_ms", lambda _, **__: self.layers_ms())
        monkeypatch.setattr(modelnew, "_network_ms", lambda _: (1.0, self.network_ms()))

    def on_modelnew(self, name: str) -> bool:
        return isinstance(self.network.get_submodule(name), modelnew.Conv2d)

    def layers_ms(self) -> dict[tuple[str, int], float]:
        self.passes.append(tuple(name for name in self.layers if self.on_modelnew(name)))
        more = self.disturbed(len(self.passes))
        return {
            (name, index): pair[self.on_modelnew(name)] + more
            for name, calls in self.layers.items()
            for index, pair in enumerate(calls)
        }

    def network_ms(self) -> float:
        extra = self.extra * sum(map(self.on_modelnew, self.layers))
        return self.rest + extra + sum(self.layers_ms().values())


def three_layers() -> nn.Sequential:
    """The last one is called twice in a pass."""
    network = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), Plain(4), nn.Conv2d(4, 4, 1)).eval()
    return network.append(network[2])


def accelerated(network: nn.Module) -> list[bool]:
    return [isinstance(layer, modelnew.Conv2d) for layer in list(network)[:3]]


FASTER, EQUAL, SLOWER = (1.0, 0.5), (1.0, 1.029), (1.0, 1.031)


@pytest.fixture
def timed(paper_gpu, monkeypatch) -> Callable[..., Times]:
    """Gives a network these times, a pair for each layer of three_layers(); the last layer's are of its two calls."""

    def install(network: nn.Module, first: tuple, second: tuple, third: list[tuple], **settings: float) -> Times:
        times = Times({"0": [first], "1": [second], "2": third}, **settings)
        times.install(monkeypatch, network)
        return times

    return install


# Decisions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_layers_that_take_over_3_per_cent_longer_go_back(timed, training):
    network = three_layers().train(training)
    times = timed(network, SLOWER, EQUAL, [FASTER] * 2)
    _, report = modelnew.accelerate(network, X)
    assert [type(network[0]), *accelerated(network)] == [nn.Conv2d, False, True, True]
    first, second, third, fourth = report.layers
    assert (first.replaced, first.before_ms, first.after_ms) == (False, 1.0, 1.031)
    assert first.reason == "slower than PyTorch's convolution: 1.0310 ms against 1.0000 ms"
    assert (second.replaced, second.reason, second.after_ms) == (True, "", 1.029)
    assert third == fourth
    assert (third.replaced, third.before_ms, third.after_ms) == (True, 1.0, 0.5)
    # The network is timed as it is now against PyTorch's everywhere.
    assert (report.before_ms, report.after_ms) == (pytest.approx(14), pytest.approx(10 + 1 + 1.029 + 1))
    text = str(report)
    assert "2 of 3 convolutions run on modelnew" in text
    assert re.search(r"^0 .* 1\.0000 +1\.0310 +0\.97x$", text, re.MULTILINE)
    assert f"  0: {first.reason}" in text
    assert ("forward and backward" in text) == training
    # Passes with PyTorch's convolution and with ours alternate.
    assert set(times.passes[::2]) == {()}
    ours = times.passes[1::2]
    assert ours == [("0", "1", "2")] * (len(ours) - modelnew._TIMED_RUNS) + [("1", "2")] * modelnew._TIMED_RUNS


@pytest.mark.parametrize("second, stays", [((2.0, 1.6), True), ((2.0, 2.0), False)])
def test_all_calls_of_a_layer_count_together(timed, second, stays):
    network = three_layers()
    times = timed(network, EQUAL, EQUAL, [(1.0, 1.4), second])
    times.disturbed = lambda count: 100.0 if count % 10 == 4 else 0.0  # a few passes of ours: the median decides
    _, report = modelnew.accelerate(network, X)
    assert accelerated(network) == [True, True, stays]
    rows = [row for row in report.layers if row.name == "2"]
    assert [(row.before_ms, row.after_ms) for row in rows] == [(1.0, 1.4), second]
    assert [row.replaced for row in rows] == [stays] * 2
    if not stays:
        assert {row.reason for row in rows} == {"slower than PyTorch's convolution: 3.4000 ms against 3.0000 ms"}


@pytest.mark.parametrize("wrap", [nn.Identity, nn.utils.parametrizations.weight_norm], ids=["plain", "parametrized"])
def test_layers_of_an_earlier_call_go_back_too(timed, monkeypatch, wrap):
    """And compiled code, which may hold the old classes, is forgotten."""
    network = three_layers()
    for layer in list(network)[:2]:
        wrap(layer)
    classes = [type(layer) for layer in network]
    modelnew.accelerate(network)
    assert accelerated(network) == [True] * 3
    timed(network, SLOWER, SLOWER, [FASTER] * 2)
    forgotten = []
    monkeypatch.setattr(modelnew, "_forget_compiled", forgotten.append)
    _, report = modelnew.accelerate(network, X)
    assert forgotten == [network]
    assert [type(layer) for layer in list(network)[:2]] == classes[:2]
    assert [row.replaced for row in report.layers] == [False, False, True, True]
    modelnew.restore(network)
    assert [type(layer) for layer in network] == classes


@pytest.mark.parametrize("extra, goes", [(0.09, False), (0.11, True)])  # a network of 10 + 3 * 1.5 + 0.5 ms
def test_a_network_that_is_still_slower_goes_back_as_a_whole(timed, extra, goes):
    network = three_layers()
    modelnew.accelerate(network[1])
    timed(network, (1.5, 1.5), (1.5, 1.5), [(1.5, 1.5), (0.5, 0.5)], extra=extra)
    _, report = modelnew.accelerate(network, X)
    assert accelerated(network) == [not goes] * 3
    assert (report.before_ms, report.after_ms) == (pytest.approx(15), pytest.approx(15 + 3 * extra))
    reason = "the network as a whole was slower: 15.3300 ms against 15.0000 ms" if goes else ""
    assert [(row.replaced, row.reason) for row in report.layers] == [(not goes, reason)] * 4
    assert (f"all layers are PyTorch's again: {reason}" in report.notes) == goes
    assert [type(layer) is Plain for layer in network] == [False, goes, False, False]


def test_layers_made_as_ours_are_not_judged(timed):
    network = three_layers()
    network[0] = modelnew.Conv2d(4, 4, 3, padding=1)
    timed(network, (9.0, 9.0), SLOWER, [FASTER] * 2)
    _, report = modelnew.accelerate(network.eval(), X)
    assert accelerated(network) == [True, False, True]
    assert (report.layers[0].before_ms, report.layers[0].after_ms) == (None, 9.0)


def test_a_failure_while_timing_leaves_the_network_as_it_was(timed):
    network = three_layers()
    modelnew.accelerate(network[1])
    classes = [type(layer) for layer in network]
    times = timed(network, SLOWER, SLOWER, [FASTER] * 2)
    times.disturbed = lambda count: 0 / (count < 39)  # fails after the choice, with PyTorch's classes
    with pytest.raises(ZeroDivisionError):
        modelnew.accelerate(network, X)
    assert [type(layer) for layer in network] == classes


# Passes ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Outputs:
    logits: Tensor
    loss: Tensor | None = None


@pytest.fixture
def passes(paper_gpu, monkeypatch) -> None:
    """Passes run, and layers are not timed."""
    monkeypatch.setattr(modelnew, "_layers_ms", lambda example, **_: example.run() or {})


class Nested(nn.Module):
    """Uses each of its layers in another part of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 1) for _ in range(6)])
        self.unused = nn.Conv2d(4, 4, 1)
        self.frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        a, b, c, d, e, f = (layer(x) for layer in self.layers)
        named = collections.namedtuple("Named", "a")(b)
        return (
            a, [named, {"c": c}], collections.OrderedDict(d=[d]), Outputs(e), types.MappingProxyType({"f": (f,)}),
            x.long(), None, "text", self.frozen(x), f.detach(),
        )  # fmt: skip


def test_outputs_may_be_nested(monkeypatch):
    network, gradients = Nested(), []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kw: gradients.extend(grad(*args, **kw)))
    modelnew._Pass(network, ((X,), {}), modelnew._trained(network), []).run()
    names = [name for name, p in network.named_parameters() if p.requires_grad]
    assert len(gradients) == len(names) == 14
    for name, gradient in zip(names, gradients, strict=True):
        assert (gradient is None) == name.startswith("unused"), name


def test_passes_with_gradients_leave_parameters_alone(passes):
    """Neither .grad nor hooks of parameters, such as those of optimizers inside the backward pass, see them."""
    network = three_layers().train()
    called = []
    for p in network.parameters():
        p.grad = torch.ones_like(p)
        p.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
    backward = []

    def watch_gradient(_: nn.Module, __: tuple, y: Tensor) -> None:
        y.register_hook(lambda dy: backward.append(dy.shape))  # raises without gradients

    network[1].register_forward_hook(watch_gradient)
    modelnew.accelerate(network, X)
    assert not called
    assert len(backward) == 2 * (2 + 2 * modelnew._TIMED_RUNS)  # none of the pass that only watches
    for p in network.parameters():
        assert torch.equal(p.grad, torch.ones_like(p))


@pytest.mark.parametrize("why", ["evaluation", "no_grad", "frozen"])
def test_forward_alone_counts_where_nothing_trains(passes, monkeypatch, why):
    network = three_layers().train(why != "evaluation").requires_grad_(why != "frozen")
    enabled = []
    network[0].register_forward_hook(lambda *_: enabled.append(torch.is_grad_enabled()))
    monkeypatch.setattr(torch.autograd, "grad", lambda *_, **__: pytest.fail("a backward pass ran"))
    with torch.set_grad_enabled(why != "no_grad"):
        _, report = modelnew.accelerate(network, X)
    assert not any(enabled)
    assert "forward and backward" not in str(report)


@pytest.mark.parametrize("example, message", [(torch.ones(2, 5, 9, 10), "channels"), (X, "no gradient, please")])
def test_passes_that_fail_leave_the_network_as_it_was(passes, example, message):
    def fail(_: Tensor) -> None:
        raise RuntimeError("no gradient, please")

    network = Zoo()
    network.bn.register_forward_hook(lambda _, __, y: y.register_hook(fail) and None)
    about, state = everything_about(network), copy.deepcopy(network.state_dict())
    with pytest.raises(RuntimeError, match=message):
        modelnew.accelerate(network, example)
    assert not any(isinstance(layer, modelnew.Conv2d) for layer in convolutions(network))
    assert everything_about(network) == about
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())


def test_every_pass_casts_the_weights(passes):
    """With casts that autocast keeps, some passes would have less to do."""
    network, casts = nn.Sequential(nn.Conv2d(4, 4, 1)), []
    network[0].register_forward_hook(lambda _, __, y: casts.append(y.grad_fn.next_functions[1][0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        modelnew.accelerate(network, X)
    assert len(casts) == len(set(casts)) > 2 * modelnew._TIMED_RUNS


def test_distributed_data_parallel_trains_its_module(paper_gpu, monkeypatch):
    """Its reducer would wait for gradients to arrive in the parameters."""

    class Parallel(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            assert not torch.is_grad_enabled()
            return super().forward(x)

    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", Parallel)
    network = Parallel(collections.OrderedDict(module=three_layers().train()))
    Times({"module.0": [SLOWER], "module.1": [EQUAL], "module.2": [FASTER] * 2}).install(monkeypatch, network)
    monkeypatch.setattr(modelnew, "_network_ms", lambda example: example.run() or (1.0, 1.0))
    _, report = modelnew.accelerate(network, X)
    assert [row.name for row in report.layers if not row.replaced] == ["module.0"]
    modelnew.accelerate(network.eval(), X)


class FakeClock:
    """CUDA's events and the host's clock, which goes on by a millisecond whenever it is read."""

    ms = 0

    def read(self) -> int:
        self.ms += 1
        return self.ms

    def event(self, **_: bool) -> types.SimpleNamespace:
        event = types.SimpleNamespace(elapsed_time=lambda end: end.ms - event.ms)
        event.record = lambda _: setattr(event, "ms", self.read())
        return event


@pytest.fixture
def clock(paper_gpu, monkeypatch) -> FakeClock:
    """Our convolution takes 4 ms forward and 7 backward, PyTorch's takes no time, an event a millisecond."""
    clock = FakeClock()
    monkeypatch.setattr(modelnew, "time", types.SimpleNamespace(perf_counter=lambda: clock.read() / 1e3))
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "current_stream", no_change)
    monkeypatch.setattr(torch.cuda, "_sleep", no_change)

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(_, y):
            clock.ms += 4
            return y.clone()

        @staticmethod
        def backward(_, dy):
            clock.ms += 7
            return dy

    def slow(x: Tensor, *arguments: Any) -> Tensor:
        """Single images give a view, as PyTorch's convolution does."""
        y = Slow.apply(F.conv2d(x if x.dim() == 4 else x[None], *arguments))
        return y if x.dim() == 4 else y.squeeze(0)

    monkeypatch.setattr(modelnew, "_any_cuda", lambda *_: True)
    monkeypatch.setattr(modelnew, "_reason_by_engine", lambda *_: "")
    monkeypatch.setattr(modelnew, "explain", lambda *_: "the problem\nforward: wgmma; tf32; 128x128\n")
    monkeypatch.setattr(modelnew, "conv2d", slow)
    return clock


class Stateful(nn.Module):
    """Adds to what the pass before computed, with its graph, and skips a layer at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)])
        self.state, self.called = torch.zeros(()), []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        chosen = self.layers[torch.randint(2, (), dtype=torch.int64)]
        self.called.append((chosen, float(self.count), bool(torch.any(self.state))))
        self.state = self.state + chosen(x)
        return self.state


def test_all_passes_begin_alike(clock, monkeypatch):
    monkeypatch.setattr(torch.random, "fork_rng", lambda _: FORK_RNG([]))  # that of the CPU
    network = Stateful()
    _, report = modelnew.accelerate(network, X)
    assert len(network.called) == 1 + 2 * (2 + 2 * modelnew._TIMED_RUNS)
    assert len(set(network.called)) == 1
    assert network.called[0][1:] == (1.0, False)
    assert "not called with this example: layers." in str(report)
    assert not torch.any(network.state)


class InPlace(nn.Module):
    """Changes the outputs of its layers in place; the second layer gets single images, the third one stays."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.third = derived(forward=identity)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return self.third(torch.stack([self.second(image).relu_() for image in x]))

    def block(self, x: Tensor) -> Tensor:
        return F.relu_(self.first(x))


@pytest.mark.parametrize("training", [False, True])
def test_times_are_of_forward_and_backward(clock, training):
    network = InPlace().train(training)
    _, report = modelnew.accelerate(network, X[:2], keep_slower=True)
    assert [row.name for row in report.layers] == ["first", "second", "second", "third"]
    before, after = (2, 13) if training else (1, 5)
    for row in report.layers[:3]:
        assert (row.before_ms, row.after_ms) == (before, after)
        assert (row.engine, row.explanation) == ("wgmma", "forward: wgmma; tf32; 128x128")
        assert (row.replaced, row.reason) == (True, "")
    assert report.layers[3][-4:] == (None, "", None, None)  # engine, explanation and times
    assert report.before_ms == pytest.approx(2)
    assert report.after_ms == pytest.approx(2 + 3 * (11 if training else 4))
    assert re.search(rf"^first .* wgmma +{before}\.0000 +{after}\.0000 +0\.\d\dx$", str(report), re.MULTILINE)
    assert re.search(rf"^whole network +2\.0000 +{report.after_ms:.4f} +0\.\d\dx$", str(report), re.MULTILINE)
    for layer in (network.first, network.second):
        assert isinstance(layer, modelnew.Conv2d)
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks


def test_what_checkpointing_computes_again_counts(clock):
    network = InPlace(checkpointed=True)
    _, report = modelnew.accelerate(network, X[:2])
    assert [row.name for row in report.layers] == ["first", "second", "second", "third"]
    assert (report.layers[0].before_ms, report.layers[0].after_ms) == (2, 13)
    ours, theirs = re.search(r"(\S+) ms against (\S+) ms", report.layers[0].reason).groups()
    # The second forward ends either with an event of its own or where checkpointing breaks it off.
    assert (float(ours), float(theirs)) in ((13, 2), (18, 3))


# Without an example ---------------------------------------------------------------------------------------------------


class FakeExtension:
    """Plans as the test says: an engine for each pass."""

    def __init__(self, contract: str = "operands as they are", **engines: str) -> None:
        self.contract = contract
        self.engines = {"forward": "tma", "dgrad": "tma", "wgrad": "wgrad"} | engines
        self.asked: list[tuple] = []

    def explain(self, *arguments: Any) -> str:
        self.asked.append(arguments)
        lines = [f"{name}: {engine}; {self.contract}; tile" for name, engine in self.engines.items()]
        return "\n".join(["the problem", *lines, "bgrad: direct; bias_grad: 1 splits", ""])


@pytest.fixture
def judged(monkeypatch) -> Callable[..., modelnew.LayerReport]:
    """Accelerates a network with that extension, as if it were on a GPU, and returns the first row of the report."""
    monkeypatch.setattr(modelnew, "_any_cuda", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())

    def accelerate(
        network: nn.Module, extension: FakeExtension, capability: tuple[int, int] = (9, 0), **kwargs: Any
    ) -> modelnew.LayerReport:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(modelnew, "_extension", extension)
        row = modelnew.accelerate(network, **kwargs)[1].layers[0]
        assert isinstance(network.get_submodule(row.name), modelnew.Conv2d) == row.replaced
        assert (row.before_ms, row.after_ms, row.engine) == (None, None, None)
        return row

    return accelerate


HALF = {"dtype": torch.float16}


@pytest.mark.parametrize(
    "slow, training, stays",
    [
        (["forward"], False, "forward"),
        (["dgrad", "wgrad"], False, ""),
        (["wgrad"], True, "wgrad"),
        (["dgrad"], True, "dgrad"),
        (["forward", "dgrad", "wgrad"], True, "forward and dgrad and wgrad"),
        ([], True, ""),
    ],
)
def test_layers_that_would_run_on_plain_multiply_adds_stay(judged, slow, training, stays):
    layer = nn.Conv2d(8, 8, 3, groups=8, **HALF).train(training)
    row = judged(layer, FakeExtension(**dict.fromkeys(slow, "direct")))
    assert row.replaced == (not stays)
    assert row.reason == (stays and (
        f"at 32 images of 56x56 its {stays} would run on plain multiply-adds (engine direct), "
        "PyTorch's on tensor cores; give accelerate() an example input to decide by time"))  # fmt: skip


def test_gradients_that_nothing_needs_are_not_judged(judged):
    slow = FakeExtension(wgrad="direct")
    frozen, trained = nn.Conv2d(8, 8, 3, **HALF).requires_grad_(False), nn.Conv2d(8, 8, 3, **HALF)
    assert judged(nn.Sequential(frozen, trained), slow).replaced
    assert type(trained) is nn.Conv2d
    assert not judged(frozen, FakeExtension(forward="direct")).replaced
    with torch.no_grad():
        assert judged(nn.Conv2d(8, 8, 3, **HALF), slow).replaced
    assert not judged(nn.Conv2d(8, 8, 3, **HALF), slow).replaced


def test_layers_stay_only_where_pytorch_uses_tensor_cores(judged):
    tf32, fp32 = "tf32, as PyTorch's switch allows", "fp32, as PyTorch's switch demands"
    slow = {"forward": "direct"}
    for dtype, contract, capability, replaced in (
        (torch.float16, "operands as they are", (9, 0), False),
        (torch.bfloat16, "operands as they are", (8, 0), False),
        (torch.float16, "operands as they are", (7, 5), True),
        (torch.float32, tf32, (8, 0), False),
        (torch.float32, tf32, (7, 5), True),
        (torch.float32, fp32, (9, 0), True),
        (torch.float64, "operands as they are", (9, 0), True),
    ):
        row = judged(nn.Conv2d(8, 8, 3, dtype=dtype), FakeExtension(contract, **slow), capability)
        assert row.replaced == replaced, (dtype, contract, capability)


def test_autocasts_type_is_judged(judged, monkeypatch):
    monkeypatch.setattr(modelnew, "_autocast_dtype", lambda: torch.bfloat16)
    extension = FakeExtension(forward="direct")
    assert not judged(nn.Conv2d(8, 8, 3), extension).replaced
    assert [t.dtype for t in extension.asked[0][:3]] == [torch.bfloat16] * 3
    assert judged(nn.Conv2d(8, 8, 3, dtype=torch.float64), extension).replaced


def test_keep_slower_judges_nothing(judged):
    extension = FakeExtension(forward="direct")
    assert judged(nn.Conv2d(8, 8, 3, **HALF), extension, keep_slower=True).replaced
    assert not extension.asked
    accelerated_earlier = nn.Conv2d(8, 8, 3, **HALF)
    modelnew.accelerate(accelerated_earlier, keep_slower=True)
    assert not judged(accelerated_earlier, extension).replaced


JUDGED = {
    "same": (nn.Conv2d(8, 4, (3, 4), padding="same"), (32, 8, 56, 57), (1, 1)),
    "valid": (nn.Conv2d(8, 4, 3, padding="valid"), (32, 8, 56, 56), (0, 0)),
    "reflect": (nn.Conv2d(8, 4, 3, padding=(1, 2), padding_mode="reflect"), (32, 8, 58, 60), (0, 0)),
    "wide": (nn.Conv2d(8, 4, (3, 2), dilation=(40, 1), groups=2), (32, 8, 81, 56), (0, 0)),
    "far reflection": (nn.Conv2d(8, 4, 3, padding=60, padding_mode="reflect"), (32, 8, 181, 181), (0, 0)),
    "parametrized": (nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 4, 3, stride=2)), (32, 8, 56, 56), (0, 0)),
    "with buffers": (nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 4, 3)), (32, 8, 56, 56), (0, 0)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", JUDGED)
def test_what_the_extension_is_asked(judged, case):
    layer, shape, padding = copy.deepcopy(JUDGED[case])
    extension, state = FakeExtension(), copy.deepcopy(layer.state_dict())
    assert judged(layer, extension).replaced
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    ((x, weight, bias, *settings),) = extension.asked
    assert {t.device.type for t in (x, weight, bias)} == {"meta"}
    assert tuple(x.shape) == shape
    assert (weight.shape, bias.shape) == (layer.weight.shape, layer.bias.shape)
    assert settings == [layer.stride, padding, layer.dilation, layer.groups]


# All convolutions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Conv1d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"])
def test_other_convolutions_are_reported(name):
    _, report = modelnew.accelerate(nn.Sequential(nn.Conv2d(4, 4, 3), getattr(nn, name)(4, 6, 3, stride=2)))
    row = report.layers[1]
    kind, taps = "transposed" if "Transpose" in name else f"{name[-2]}-d", "x".join("3" * int(name[-2]))
    assert (row.name, row.replaced, row.dtype) == ("1", False, "float32")
    assert row.reason == f"a {kind} convolution: only nn.Conv2d is served"
    assert row.convolution == f"C4 K6 {taps}, stride 2"
    assert "1 of 2 convolutions run on modelnew" in str(report)
    assert f"  1: {row.reason}" in str(report)


# Quantization ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def quantization(monkeypatch) -> Iterator[types.ModuleType]:
    engines = [name for name in ("fbgemm", "qnnpack") if name in torch.backends.quantized.supported_engines]
    if not engines:
        pytest.skip("needs an engine for quantized operators")
    before, torch.backends.quantized.engine = torch.backends.quantized.engine, engines[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it moves to torchao, and what observers say
        yield torch.ao.quantization
    torch.backends.quantized.engine = before


def quantizable(quantization: types.ModuleType) -> nn.Sequential:
    torch.manual_seed(1)
    observed, also = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=2)
    network = nn.Sequential(
        quantization.QuantStub(), observed, nn.ReLU(), also, quantization.DeQuantStub(), nn.Conv2d(8, 4, 1)
    )
    network[-1].qconfig = None  # left out
    return network


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("aware", [False, True], ids=["after training", "in training"])
def test_accelerated_networks_are_quantized_as_others(quantization, aware, inplace):
    results = []
    for accelerate in (no_change, modelnew.accelerate):
        network = quantizable(quantization).train(aware)
        accelerate(network)
        assert hasattr(network[1], "qconfig") is False
        prepare = quantization.prepare_qat if aware else quantization.prepare
        config = quantization.get_default_qat_qconfig if aware else quantization.get_default_qconfig
        network.qconfig = config(torch.backends.quantized.engine)
        prepared = prepare(network, inplace=inplace)
        assert isinstance(prepared[-1], modelnew.Conv2d) == (accelerate is modelnew.accelerate)
        assert not isinstance(prepared[1], modelnew.Conv2d)
        prepared(X)
        converted = quantization.convert(prepared.eval())
        assert type(converted[3]).__module__.startswith("torch.ao.nn.quantized")
        results.append(converted(X))
    assert torch.equal(*results)


def test_a_layer_with_a_qconfig_is_pytorchs():
    layer = nn.Conv2d(4, 4, 1)
    modelnew.accelerate(layer)
    assert not hasattr(layer, "qconfig")
    layer.qconfig = None
    assert isinstance(layer, modelnew.Conv2d)
    del layer.qconfig
    assert not hasattr(layer, "qconfig")
    layer.qconfig = "anything"
    assert type(layer) is nn.Conv2d
    assert vars(layer)["qconfig"] == "anything"


# On a GPU -------------------------------------------------------------------------------------------------------------


class Trained(nn.Module):
    """Nested outputs, dropout, batch norm and a layer whose output is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Conv2d(16, 64, 3, padding=1), nn.BatchNorm2d(64), nn.Dropout(0.1)
        self.depthwise, self.last = nn.Conv2d(64, 64, 3, groups=64, padding=1), nn.Conv2d(64, 8, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.drop(self.norm(F.relu_(self.first(x))))
        return {"features": [F.relu_(self.depthwise(x))], "logits": Outputs(self.last(x))}


@gpu
@pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["NCHW", "NHWC"])
def test_gpu_decision_in_training_leaves_no_trace(autocast, layout):
    torch.manual_seed(0)
    network = Trained().cuda().to(memory_format=layout)
    x = torch.randn(8, 16, 64, 64, device="cuda").contiguous(memory_format=layout)
    called = []
    for p in network.parameters():
        p.grad = torch.ones_like(p)
        p.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
    state, random_state = copy.deepcopy(network.state_dict()), torch.cuda.get_rng_state()
    with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
        _, report = modelnew.accelerate(network, x)
        tensors = (tensor.to(autocast or torch.float32) for tensor in (x, network.first.weight, network.first.bias))
        expected = modelnew.explain(*tensors, padding=1)
        assert not called
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in network.parameters())
        assert torch.equal(torch.cuda.get_rng_state(), random_state)
        assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
        sum(y.float().sum() for y in modelnew._tensors(network(x))).backward()
    for layer in (network.first, network.depthwise, network.last):
        assert not torch.equal(layer.weight.grad, torch.ones_like(layer.weight))  # no cast without gradients was kept
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks
    assert "times are of forward and backward passes" in report.notes
    assert f"\n{report.layers[0].explanation}\n" in expected
    assert expected.partition("forward: ")[2].startswith(report.layers[0].engine)
    for row in report.layers:
        assert row.dtype == str(autocast or torch.float32).removeprefix("torch.")
        assert 0 < row.before_ms < report.before_ms
        assert row.after_ms > 0
        assert row.replaced == isinstance(network.get_submodule(row.name), modelnew.Conv2d)
        assert row.replaced or "slower" in row.reason
        assert row.after_ms <= 1.03 * row.before_ms or not row.replaced


@gpu
def test_gpu_passes_keep_no_memory():
    network, x = Trained().cuda(), torch.randn(8, 16, 64, 64, device="cuda")
    modelnew.accelerate(network, x)  # libraries keep workspaces from now on
    memory = torch.cuda.memory_allocated()
    modelnew.accelerate(network, x)
    deadline = time.monotonic() + 10  # autograd's thread may hold the last gradients for a moment
    while torch.cuda.memory_allocated() > memory and time.monotonic() < deadline:
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() <= memory


@gpu
def test_gpu_depthwise_layers_in_16_bits_are_judged_without_an_example():
    """By what explain() says of the engines, in training mode."""
    depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
    network = nn.Sequential(depthwise, nn.Conv2d(64, 64, 3)).cuda().half()
    arguments = modelnew._judged_arguments(depthwise, torch.float16, channels_last=False)
    x, weight, bias = (torch.empty_like(t, device="cuda") for t in arguments[:3])
    direct = "wgrad: direct;" in modelnew.explain(x, weight, bias, *arguments[3:])
    direct &= torch.cuda.get_device_capability() >= (8, 0)  # where PyTorch uses tensor cores
    _, report = modelnew.accelerate(network)
    assert report.layers[0].replaced != direct
    assert ("wgrad" in report.layers[0].reason) == direct
