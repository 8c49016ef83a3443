"""bench.py and the examples: what is measured, that a wrong result is never timed, what becomes of stored runs."""

from __future__ import annotations

import contextlib
import json
import math
import runpy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bench
import modelnew
from bench import Case
from examples import networks
from results import report
from test_modelnew import gpu

SMALL = "2,3,4,3,3,9,10"
# Sizes 1 and primes, R != S, H != W; rows and columns that no filter meets, between outputs and between taps.
CASES = [
    Case("plain", 2, 3, 5, 3, 2, 7, 11),
    Case("grouped", 3, 4, 6, 2, 3, 13, 9, 2, 1, 1, 2),
    Case("dilated", 1, 2, 2, 3, 3, 10, 12, 3, 2, 2, 2),
    Case("strided 1x1", 1, 2, 3, 1, 1, 12, 11, 5),
    Case("axes apart", 2, 4, 6, 2, 3, 13, 17, (1, 3), (3, 0), (2, 4), 2),
    Case("tall gaps", 1, 3, 2, 2, 4, 19, 10, (4, 1), (0, 5), (9, 1)),
    Case("wide gaps", 1, 3, 2, 4, 2, 10, 19, (1, 4), (5, 0), (1, 8), bias=True),
]


@pytest.fixture
def no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # the bench sets it; this restores it


@pytest.fixture
def run_bench(no_gpu, capsys):
    """Runs a command line on the CPU; exit code and printed lines."""

    def run(*arguments: str) -> tuple[int, list[str]]:
        repeats = [] if {"--list", "training"} & {*arguments} else ["--repeats", "3"]
        code = bench.main([*arguments, *repeats])
        return code, capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("budget", [1, 1 << 30])
@pytest.mark.parametrize("direction", [bench.FORWARD, bench.DGRAD, bench.WGRAD])
def test_reference_is_exact(case, budget, direction):
    """In pieces of any size, with the magnitudes that bounds are made of: autograd over unfolded inputs gives both."""
    job, with_dy = (bench.Job(case, each, "float64", "fp32") for each in (direction, bench.DGRAD))
    given = bench.draw_operands(with_dy, "randn", torch.device("cpu"))

    def unfolded(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        columns = F.unfold(x, (case.R, case.S), case.dilation, case.pad, case.stride)
        columns = columns.reshape(case.N, case.groups, -1, columns.shape[2])
        y = (w.reshape(case.groups, case.K // case.groups, -1) @ columns).reshape(case.N, case.K, case.P, case.Q)
        return y if bias is None else y + bias[:, None, None]

    expected = []
    for convert in (lambda t: t, torch.abs):
        x, w, dy = (convert(t).requires_grad_() for t in (given.x.clone(), given.w.clone(), given.dy))
        y = unfolded(x, w, None if given.bias is None else convert(given.bias))
        gradients = torch.autograd.grad(y, (x, w), dy)
        expected.append({bench.FORWARD: y, bench.DGRAD: gradients[0], bench.WGRAD: gradients[1]}[direction].detach())
    covered = torch.zeros_like(expected[0])
    for part, value, magnitude in bench.exact_pieces(job, given, budget):
        torch.testing.assert_close(value, expected[0][part])
        torch.testing.assert_close(magnitude, expected[1][part])
        covered[part] += 1
    assert (covered == 1).all()
    assert torch.backends.cudnn.enabled


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_floor_counts_what_must_move(case):
    """A pixel of x is read if any output's gradient reaches it."""
    options = {name: value for name, value in case.options.items() if name != "groups"}
    ones = torch.ones(1, 1, case.P, case.Q), torch.ones(1, 1, case.R, case.S)
    met = torch.nn.grad.conv2d_input((1, 1, case.H, case.W), ones[1], ones[0], **options)[0, 0] != 0
    w, y = case.K * case.C // case.groups * case.R * case.S, case.N * case.K * case.P * case.Q
    rows, pixels, x = (case.N * case.C * n for n in (case.W * int(met.any(1).sum()), int(met.sum()), met.numel()))
    b = case.K * case.bias
    assert bench.traffic(case, bench.FORWARD, 4) == (4 * (rows + w + b), 4 * y)
    assert bench.traffic(case, bench.FORWARD, 4, channels_last=True) == (4 * (pixels + w + b), 4 * y)
    assert bench.traffic(case, bench.DGRAD, 2) == (2 * (y + w), 2 * x)
    assert bench.traffic(case, bench.WGRAD, 8) == (8 * (rows + y), 8 * w)


def test_floor_is_the_longer_of_memory_and_arithmetic():
    ceilings = bench.Ceilings(4000, 5000, 4000, {"float16": 800.0, "float32": 50.0, "tf32": 400.0})
    job = bench.Job(Case("", 1, 64, 64, 3, 3, 56, 56, 1, 1), bench.FORWARD, "float32", "fp32")
    row = bench.rates(job, {"contract": "fp32", "ours_ms": 2.0, "peer_ms": 3.0}, ceilings)
    read, written = bench.traffic(job.case, bench.FORWARD, 4)
    assert row["floor_memory_ms"] == pytest.approx(read / 4000e6 + written / 5000e6)
    assert row["floor_arithmetic_ms"] == pytest.approx(job.case.flop / (800e9 / 3))
    assert row["floor_percent"] == pytest.approx(50 * max(row["floor_memory_ms"], row["floor_arithmetic_ms"]))
    assert (row["speedup"], *(ceilings.rate(of, depthwise=True) for of in ("tf32", "float16"))) == (1.5, 50, 50)


@pytest.mark.parametrize("contract", [*bench.REAL[1:], "tf32", "fp32"])
def test_an_error_just_above_its_bound_fails(contract):
    """One element is wrong by more than its bound; and a NaN is never right."""
    dtype = contract if contract in bench.REAL else "float32"
    job = bench.Job(CASES[0], bench.FORWARD, dtype, "fp32")
    given = bench.draw_operands(job, "randn", torch.device("cpu"))
    (piece,) = bench.exact_pieces(job, given)
    a, b, c = bench.error_bound(contract, bench.reduction_length(job.case, bench.FORWARD))
    allowed = piece[2][0, 0, 0, 0] * a + piece[1][0, 0, 0, 0].abs() * b + c
    for factor, right in ((0.9, True), (1.1, False), (math.nan, False)):
        y = piece[1].clone()  # float64, so that nothing but this is off
        y[0, 0, 0, 0] += allowed * factor
        assert (bench.check(job, given, contract, y, piece[1])["failure"] is None) == right


def out_of_memory(y: Tensor) -> Tensor:
    raise RuntimeError("out of memory")


WRONG = {
    "an error": out_of_memory,
    "one element": lambda y: y.index_put((torch.tensor(0),) * 4, y.flatten()[0] * 1.01 + 0.01),
    "a NaN": lambda y: y.index_put((torch.tensor(0),) * 4, torch.tensor(math.nan)),
    "the shape": lambda y: y[..., 1:],
    "the dtype": lambda y: y.double(),
    "never written": torch.empty_like,  # the bench has PyTorch fill new memory with NaN
}


@pytest.mark.parametrize("wrong", WRONG)
def test_no_time_for_a_wrong_result(run_bench, monkeypatch, wrong):
    """And it is not the end: the next case is measured."""
    if wrong == "never written" and torch.__version__ < "2.2":
        pytest.skip("this torch does not fill new memory")
    monkeypatch.setattr(modelnew, "conv2d", lambda *args, **kwargs: WRONG[wrong](F.conv2d(*args, **kwargs)))
    code, lines = run_bench("run", "--case", SMALL, "--case", "2,3,4,3,3,9,8", "--wide")
    rows = [line for line in lines if line.startswith("N2 C3 K4")]
    assert code == 1
    assert [row.split("forward")[1].split()[-1] for row in rows] == ["FAILED"] * 2
    assert sum("out of memory" in line for line in lines) == 2 * (wrong == "an error")


@pytest.mark.parametrize("channels_last", [False, True])
def test_both_sides_get_the_same_tensors(run_bench, monkeypatch, channels_last):
    seen = []
    for module in (modelnew, F):
        original = module.conv2d
        monkeypatch.setattr(module, "conv2d", lambda *a, o=original, **k: seen.append(a) or o(*a, **k))
    code, _ = run_bench("run", "--case", SMALL, *(["--channels-last"] if channels_last else []))
    measured = [(x, w) for x, w, *_ in seen if x.dtype == torch.float32]
    assert code == 0
    assert len({(x.data_ptr(), w.data_ptr()) for x, w in measured}) == 1
    assert measured[0][0].is_contiguous(memory_format=torch.channels_last) == channels_last


BAD_ARGUMENTS = {
    "run --case 1,2,3": "7 to 11",
    "run --case 1,2,3,3,3,8,x": "whole numbers",
    "run --case 0,2,3,3,3,8,8": "positive",
    "run --case 1,2,3,3,3,8,8,0": "positive",
    "run --case 1,2,3,3,3,8,8,1,-1": "non-negative",
    "run --case 1,3,4,3,3,8,8,1,0,1,2": "must divide",
    "run --case 1,2,3,9,3,8,8": "larger than",
    "run --repeats 2": "at least 3",
    "run --batch 2": "of a network",
    "run --suite unet --batch 0": "positive",
    "run --rest nan": "finite",
    "run --suite alexnet": "invalid choice",
    "networks unet --mode tf16": "invalid choice",
    "training --mode tf32": "invalid choice",
    "training --steps 4": "at least 5",
    "compare a.json": "after",
}


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_bad_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.main(arguments.split())
    assert BAD_ARGUMENTS[arguments] in capsys.readouterr().err


class Small(nn.Module):
    """Two layers of one kind, one called twice, one never; padding by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding="same", dilation=2)
        self.again = nn.Conv2d(8, 8, (1, 3), (1, 2), groups=4, bias=False)
        self.twin = nn.Conv2d(8, 8, (1, 3), (1, 2), groups=4, bias=False)
        self.unused = nn.Conv2d(8, 8, 1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        return self.again(y) + self.twin(y) + self.again(y)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(networks.NETWORKS, "unet", networks.Network(Small, 4, 16))


def test_layers_are_recorded_from_the_network(small):
    assert bench.record("unet", 5) == [
        Case("first/5", 5, 3, 8, 3, 3, 16, 16, 1, 2, 2, bias=True),
        Case("again/5", 5, 8, 8, 1, 3, 16, 16, (1, 2), groups=4),
    ]


@pytest.mark.parametrize("name, count", [("unet", 15), ("edsr", 4), ("resnet50", 23)])
def test_networks_have_their_known_layers(name, count):
    try:
        cases = bench.record(name, 1)
    except SystemExit:
        pytest.skip("no torchvision for this torch")
    assert len(cases) == count


@pytest.mark.parametrize("mode", ["tf32", "train-amp-nhwc"])
def test_networks_are_checked_and_timed(small, run_bench, tmp_path, mode):
    code, lines = run_bench("networks", "unet", "--mode", mode, "--json", str(tmp_path / "run.json"))
    (row,) = report.load(tmp_path / "run.json")["rows"]
    assert code == 0
    assert (row["convolutions"], row["mode"]) == (4, mode)
    assert 0 < row["ours_error"] < 0.1
    assert any(line.startswith("unet") and mode in line for line in lines)


def test_a_wrong_network_is_not_timed(small, run_bench, monkeypatch):
    accelerate = modelnew.accelerate

    def broken(model: nn.Module, images: Tensor) -> tuple:
        model.first.weight.data *= 1.5
        return accelerate(model, images)

    monkeypatch.setattr(modelnew, "accelerate", broken)
    code, lines = run_bench("networks", "unet", "--mode", "tf32")
    assert code == 1
    assert any("FAILED" in line for line in lines)


@pytest.fixture
def two_peers(monkeypatch) -> None:
    """Saves time."""
    monkeypatch.setattr(bench, "PEERS", 2)


@pytest.mark.parametrize("mode", ["train-tf32", "train-amp-nhwc"])
def test_training_learns_beside_pytorch(two_peers, run_bench, tmp_path, mode):
    """The loss falls, each loss is stored, and what is stored can be shown. On a CPU both sides are PyTorch."""
    path = tmp_path / "run.json"
    code, lines = run_bench("training", "--mode", mode, "--steps", "60", "--json", str(path), "--wide")
    document = report.load(path)
    (row,) = document["rows"]
    assert code == 0
    assert any(line.startswith("resnet18") and mode in line for line in lines)
    ours, peer, other = (row["ours_losses"], row["peer_losses"], *row["other_losses"])
    for losses, mean in zip((ours, peer, other), (row["ours_loss"], *row["peer_tail_losses"]), strict=True):
        assert len(losses) == row["steps"] == 60
        assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
        assert mean == pytest.approx(sum(losses[-bench.TAIL :]) / bench.TAIL)
    assert ours == pytest.approx(peer, rel=0.01)
    assert other[0] == pytest.approx(peer[0], rel=0.01)
    assert other != peer
    assert row["replaced"] == row["convolutions"] == 20
    assert "(run.svg)" in report.results_page({path: document})


def test_peers_start_from_weights_with_another_last_bit():
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64))
    before = [parameter.clone() for parameter in model.parameters()]
    peers = [[*bench.last_bits_changed(model, seed).parameters()] for seed in (1, 1, 2)]
    for old, new, same, again, other in zip(before, model.parameters(), *peers, strict=True):
        assert torch.equal(old, new)
        assert torch.equal(same, again)
        assert ((same == old) == (old == 0)).all()
        assert ((same - old).abs() <= 2.0**-22 * old.abs()).all()
        assert torch.equal(same, other) == (not old.any())


# Losses of the peers: highest 1.3, spread 0.3; allowed is 1.613.
@pytest.mark.parametrize("ours, peer, message", [
    (1.6129, 1.0, None), (0.5, 1.0, None), (1.6131, 1.0, "wrong: loss"), (math.nan, 1.0, "not finite"),
    (1.0, math.nan, "not finite"), (1.0, math.inf, "not finite"),
])  # fmt: skip
def test_our_loss_may_exceed_the_highest_by_the_spread(ours, peer, message):
    """A loss that is not finite fails wherever it stands: in ours, among the peers', on held-out images."""
    row = {"ours_losses": [9.0] + [ours] * bench.TAIL, "ours_loss": ours, "ours_held_out_loss": 5.0,
           "peer_losses": [9.0] + [1.1] * bench.TAIL, "peer_held_out_loss": 5.0,
           "other_losses": [[9.0] + [mean] * bench.TAIL for mean in (1.2, peer, 1.3)]}  # fmt: skip
    judged = bench.judge(row)
    assert message in judged["failure"] if message else judged["failure"] is None
    if math.isfinite(peer):
        assert judged["peer_tail_losses"] == pytest.approx([1.1, 1.2, 1.0, 1.3])
        assert (judged["peer_spread"], judged["allowed"]) == pytest.approx((0.3, 1.613))
    assert "not finite" in bench.judge(row | {"peer_held_out_loss": math.nan})["failure"]


@pytest.mark.parametrize("factor, steps, message", [(0, 60, "wrong: loss"), (math.nan, 5, "not finite")])
def test_a_wrong_gradient_fails_the_training(two_peers, run_bench, monkeypatch, factor, steps, message):
    """A CPU's rounding in bfloat16 drives peers further apart than this: float32."""
    accelerate = modelnew.accelerate

    def broken(model: nn.Module, **options: bool) -> tuple:
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d):
                layer.weight.register_hook(lambda gradient: gradient * factor)
        return accelerate(model, **options)

    monkeypatch.setattr(modelnew, "accelerate", broken)
    code, lines = run_bench("training", "--mode", "train-tf32-nhwc", "--steps", str(steps))
    assert code == 1
    assert any(message in line for line in lines)
    assert any(line.startswith("resnet18") and line.endswith("FAILED") for line in lines)


def test_filter_and_list(run_bench):
    """`run` is the default command."""
    code, lines = run_bench("--list", "--suite", "reference", "depthwise", "--filter", "P5|stride 2")
    assert code == 0
    assert [line.split(":")[0] for line in lines] == ["P55", "P56", "dw3x3s2", "dw7x7s2"]


def test_compare_sets_runs_side_by_side(run_bench, tmp_path, capsys):
    run_bench("run", "--case", SMALL, "--case", "1,2,3,3,3,9,8", "--json", str(tmp_path / "a.json"))
    document = report.load(tmp_path / "a.json")
    document["rows"][0]["ours_ms"] /= 2
    document["rows"].pop()
    (tmp_path / "b.json").write_text(json.dumps(document))
    assert bench.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    printed = capsys.readouterr().out
    assert "2.000" in printed
    assert "1 rows" in printed
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(SystemExit, match="not a run"):
        bench.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "c.json")])


def test_plot_draws_all_kinds(small, two_peers, run_bench, tmp_path):
    pytest.importorskip("matplotlib")
    run_bench("run", "--case", SMALL, "--backward", "--json", str(tmp_path / "a.json"))
    run_bench("networks", "unet", "--mode", "tf32", "--json", str(tmp_path / "b.json"))
    run_bench("training", "--steps", "5", "--mode", "train-tf32", "train-amp", "--json", str(tmp_path / "c.json"))
    for run, picture in (("a.json", "a.png"), ("b.json", "b.svg"), ("c.json", "c.svg")):
        begin = b"\x89PNG" if picture.endswith("png") else b"<?xml"
        assert bench.main(["plot", str(tmp_path / run), "-o", str(tmp_path / picture)]) == 0
        assert (tmp_path / picture).read_bytes().startswith(begin)


def test_the_pages_are_what_render_writes():
    """README's table and results/README.md are those of the stored runs."""
    documents = report.stored()
    page = (report.ROOT / "README.md").read_text(encoding="utf-8")
    assert report.replace_between_markers(page, report.short_table(documents)) == page
    assert (report.RESULTS / "README.md").read_text(encoding="utf-8") == report.results_page(documents)


@pytest.mark.parametrize("arguments", ["quickstart.py", "train.py --steps 2 --batch 2 --width 8", "kernelbench.py"])
def test_examples_run_on_a_cpu(arguments, no_gpu, monkeypatch, capsys):
    """The last one needs a GPU, and is run by hand there: three builds take two minutes."""
    monkeypatch.setattr(sys, "argv", arguments.split())
    refused = arguments == "kernelbench.py"
    with pytest.raises(SystemExit, match="needs a CUDA GPU") if refused else contextlib.nullcontext():
        runpy.run_path(str(report.ROOT / "examples" / sys.argv[0]), run_name="__main__")
    assert refused or "convolutions run on modelnew" in capsys.readouterr().out


@gpu
@pytest.mark.parametrize("precision", ["tf32", "fp32"])
def test_gpu_bench(precision, capsys):
    cases = ["2,13,17,3,5,37,41", "2,3,16,7,7,61,67,2,3", "2,24,36,3,3,27,35,1,1,1,3", "2,20,20,5,5,40,24,1,2,1,20"]
    arguments = [word for case in cases for word in ("--case", case)]
    code = bench.main(["run", *arguments, "--backward", "--precision", precision, "--repeats", "3"])
    assert code == 0, capsys.readouterr().out
    assert "No GPU" not in capsys.readouterr().out


@gpu
def test_gpu_training():
    """All steps: midway, where losses fall steeply, two right trainings differ most."""
    assert bench.main(["training", "--mode", "train-amp-nhwc"]) == 0


@gpu
def test_gpu_bench_of_a_network(small):
    assert bench.main(["networks", "unet", "--mode", "tf32", "train-amp-nhwc", "--repeats", "3"]) == 0
