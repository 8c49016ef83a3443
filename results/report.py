"""What bench.py shows and stores: provenance, tables, comparisons, pictures, README's table and README.md here."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PICTURE = ROOT / "docs" / "speedup.svg"
MARKERS = ("<!-- bench:begin -->", "<!-- bench:end -->")
FORMAT = 2  # of the JSON documents
NOTES = (
    "Floor: the bytes read and written at the read and fill rates, or the operations at the matrix rate, whichever is "
    "longer. The matrix rate is the type's own, for TF32 float16's, for fp32 a third of float16's.",
    "Error: of the whole result, relative to float64. Worst: of any element, in multiples of its bound.",
    "Allclose: ours to PyTorch's at rtol = atol = 1e-4.",
    "Training: the loss is the mean over the last 20 steps, PyTorch's the lowest and highest of five networks that "
    "nn.Conv2d trains and that differ by rounding alone. Allowed is their highest loss plus their spread plus 1%. "
    "Held-out loss, accuracy and times are those of ours and of the first of the five.",
)


def new_document(kind: str, settings: dict[str, Any], ceilings: dict[str, Any] | None = None) -> dict[str, Any]:
    """A run of "layers", "networks" or "training" without rows."""
    return {"format": FORMAT, "kind": kind, "machine": describe_machine(), "settings": settings,
            "ceilings": ceilings, "rows": []}  # fmt: skip


def describe_machine() -> dict[str, Any]:
    """Device, date and versions."""
    on_gpu = torch.cuda.is_available()
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": on_gpu,
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn_version(torch.backends.cudnn.version()) if on_gpu else None,
        "driver": output_of(*query) if on_gpu else None,
        "commit": output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
    }


def cudnn_version(number: int) -> str:
    """91900 -> "9.19.0", 8902 -> "8.9.2" (before 9 the major version has three digits behind it, not four)."""
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def output_of(*command: str) -> str | None:
    """The first line that a command prints, None if there is no such command or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0].strip() or None


def header(document: dict[str, Any]) -> list[str]:
    """What was run, and on what."""
    machine, settings, ceilings = document["machine"], document["settings"], document["ceilings"]
    versions = [("torch", "torch"), ("CUDA", "cuda"), ("cuDNN", "cudnn"), ("driver", "driver"), ("commit", "commit")]
    lines = [", ".join([machine["device"], *(f"{label} {machine[key]}" for label, key in versions if machine[key]),
                        machine["date"]])]  # fmt: skip
    how = f"median of {settings['repeats']}"
    if machine["gpu"]:
        how += f", cold L2; torch.backends.cudnn.benchmark {'on' if settings['cudnn_benchmark'] else 'off'}"
        how += f"; a rest of {settings['rest_ms']:g} ms before each call" if settings["rest_ms"] else ""
    how += f"; engine {settings['engine']} forced" if settings["engine"] else ""
    if document["kind"] == "layers":
        how += f"; inputs {settings['inputs']}, seed {settings['seed']}"
    if document["kind"] == "training":
        how += f"; {settings['width']} channels in the first layer, {settings['held_out']} images held out"
        how += "; every convolution by modelnew, slower ones too"
    lines.append(how)
    if ceilings:
        memory = ", ".join(f"{name} {ceilings[f'{name}_gbs']:.0f}" for name in ("copy", "fill", "read"))
        matmul = ", ".join(f"{name} {rounded(rate, 3)}" for name, rate in ceilings["matmul_tflops"].items())
        lines.append(f"rates of this run: {memory} GB/s; PyTorch's matrix product: {matmul} TFLOP/s")
    return lines


def rounded(value: float, digits: int) -> str:
    """At least so many significant digits, never an exponent."""
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(value)))}f}"


class Column(NamedTuple):
    title: str
    text: Callable[[dict[str, Any]], str]
    wide: bool = False  # shown on demand
    left: bool = False  # aligned to the left


def time_of(who: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: rounded(row[f"{who}_ms"], 4)


def spread_of(who: str) -> Callable[[dict[str, Any]], str]:
    """Half the interquartile range in per cent of the median."""
    return lambda row: f"{50 * (row[f'{who}_q3_ms'] - row[f'{who}_q1_ms']) / row[f'{who}_ms']:.1f}%"


def accuracy(row: dict[str, Any]) -> str:
    return "ok" if not row["failure"] else "FAILED"


def pass_of(row: dict[str, Any]) -> str:
    """Pass, contract and layout, or a network's mode. fp32 (tf32): a layer that cuDNN computes in fp32 anyway."""
    if "mode" in row:
        return row["mode"]
    setting = " (tf32)" if row["contract"] == "fp32" and row["precision"] == "tf32" else ""
    return f"{row['pass']} {row['contract']}{setting}{' NHWC' if row['channels_last'] else ''}"


def held_out(what: str, form: str) -> Callable[[dict[str, Any]], str]:
    """Ours and PyTorch's on images that were not trained on."""
    return lambda row: form.format(*(row[f"{who}_held_out_{what}"] for who in ("ours", "peer")))


def images_per_second(row: dict[str, Any]) -> str:
    return " / ".join(f"{1e3 * row['batch'] / row[f'{who}_ms']:.0f}" for who in ("ours", "peer"))


TIMES = (
    Column("ours ms", time_of("ours")),
    Column("PyTorch ms", time_of("peer")),
    Column("speed-up", lambda row: f"{row['speedup']:.2f}x"),
)
COLUMNS = {
    "layers": (
        Column("case", lambda row: f"{row['name']}: {row['shape']}" if row["suite"] else row["shape"], left=True),
        Column("pass", pass_of, left=True),
        *TIMES,
        Column("% of floor", lambda row: f"{row['floor_percent']:.0f}"),
        Column("error", accuracy),
        Column("engine", lambda row: row["engine"], wide=True),
        Column("± ours", spread_of("ours"), wide=True),
        Column("± PyTorch", spread_of("peer"), wide=True),
        Column("TFLOP/s", lambda row: rounded(row["flop"] / row["ours_ms"] / 1e9, 3), wide=True),
        Column("GB/s", lambda row: rounded(row["bytes"] / row["ours_ms"] / 1e6, 3), wide=True),
        Column("error / PyTorch's", lambda row: f"{row['ours_error']:.2e} / {row['peer_error']:.2e}", wide=True),
        Column("worst / PyTorch's", lambda row: f"{row['ours_worst']:.3f} / {row['peer_worst']:.3f}", wide=True),
        Column("allclose", lambda row: {True: "yes", False: "no", None: "-"}[row["allclose"]], wide=True),
    ),
    "networks": (
        Column("network", lambda row: row["name"], left=True),
        Column("mode", pass_of, left=True),
        Column("images", lambda row: str(row["batch"])),
        Column("replaced", lambda row: f"{row['replaced']} of {row['convolutions']}"),
        *TIMES,
        Column("error", accuracy),
        Column("± ours", spread_of("ours"), wide=True),
        Column("± PyTorch", spread_of("peer"), wide=True),
        Column("error / PyTorch's", lambda row: f"{row['ours_error']:.2e} / {row['peer_error']:.2e}", wide=True),
        Column("peak MB / PyTorch's", lambda row: f"{row['ours_peak_mb']:.0f} / {row['peer_peak_mb']:.0f}", wide=True),
    ),
    "training": (
        Column("network", lambda row: row["name"], left=True),
        Column("mode", pass_of, left=True),
        Column("loss", lambda row: f"{row['ours_loss']:.4f}"),
        Column("PyTorch's", lambda row: " to ".join(f"{of(row['peer_tail_losses']):.4f}" for of in (min, max))),
        Column("allowed", lambda row: f"{row['allowed']:.4f}"),
        Column("held-out loss", held_out("loss", "{:.4f} / {:.4f}")),
        Column("accuracy", held_out("accuracy", "{:.1%} / {:.1%}")),
        *TIMES,
        Column("error", accuracy),
        Column("images/s / PyTorch's", images_per_second, wide=True),
        Column("steps", lambda row: str(row["steps"]), wide=True),
        Column("replaced", lambda row: f"{row['replaced']} of {row['convolutions']}", wide=True),
    ),
}


def table(columns: Sequence[Column], rows: Sequence[dict[str, Any]], markdown: bool = False) -> list[str]:
    """The lines of a table; a failed row has names and the error only."""
    names = [column.left or column.text is accuracy for column in columns]
    lines = [[column.title for column in columns]] + [
        [column.text(row) if known or not row["failure"] else "" for column, known in zip(columns, names, strict=True)]
        for row in rows
    ]
    if markdown:
        lines.insert(1, ["---" if column.left else "---:" for column in columns])
        return ["| " + " | ".join(line) + " |" for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    align = [str.ljust if column.left else str.rjust for column in columns]
    return ["  ".join(put(*cell) for put, *cell in zip(align, line, widths, strict=True)).rstrip() for line in lines]


def grouped(rows: Iterable[dict[str, Any]], key: Callable[[dict[str, Any]], Any]) -> dict[Any, list[dict[str, Any]]]:
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def mean_speedup(rows: Sequence[dict[str, Any]]) -> float:
    return statistics.geometric_mean(row["speedup"] for row in rows)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Geometric means of the speed-ups, the worst row and the accuracy."""
    measured = [row for row in rows if not row["failure"]]
    if not measured:
        return "Nothing measured."
    means = ", ".join(f"{name} {mean_speedup(group):.2f}x" for name, group in grouped(measured, pass_of).items())
    slowest = min(measured, key=lambda row: row["speedup"])
    if "allowed" in measured[0]:
        worst = max(measured, key=lambda row: row["ours_loss"] / row["allowed"])
        errors = f"Nearest to what is allowed: {worst['ours_loss']:.4f} of {worst['allowed']:.4f}, {pass_of(worst)}."
    else:
        worst = max(measured, key=lambda row: row["error_ratio"])
        errors = f"Largest error beside PyTorch's: {worst['error_ratio']:.3f} times, {worst['name']} {pass_of(worst)}."
    return (
        f"Geometric mean of the speed-up over {len(measured)} rows: {mean_speedup(measured):.2f}x ({means}). "
        f"Worst row: {slowest['name']} {pass_of(slowest)}, {slowest['speedup']:.2f}x. {errors}"
    )


def load(path: Path) -> dict[str, Any]:
    """A stored run; SystemExit if this is none."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("format") != FORMAT:
        sys.exit(f"{path}: not a run of this bench (format {FORMAT})")
    return document


def stored() -> dict[Path, dict[str, Any]]:
    """All runs in results/, by their files. Other JSON files there are records of single experiments."""
    documents = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    return {path: document for path, document in documents.items() if document.get("format") == FORMAT}


def text(document: dict[str, Any], wide: bool) -> list[str]:
    """A run for the terminal: header, table and means."""
    rows = document["rows"]
    shown = [column for column in COLUMNS[document["kind"]] if wide or not column.wide]
    failures = [f"{row['name']} {row.get('pass', '')}: {row['failure']}" for row in rows if row["failure"]]
    return ["", *header(document), "", *table(shown, rows), "", *failures, summary(rows)]


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Our times in two runs, row by row, the largest changes first."""

    def key(row: dict[str, Any]) -> tuple[str, str]:
        return row["name"], pass_of(row) + row.get("dtype", "")

    old = {key(row): row for row in before["rows"] if not row["failure"]}
    both = [row | {"old": old[key(row)]} for row in after["rows"] if not row["failure"] and key(row) in old]
    both.sort(key=lambda row: row["old"]["ours_ms"] / row["ours_ms"])
    columns = (
        Column("name", lambda row: row["name"], left=True),
        Column("pass", pass_of, left=True),
        Column("before ms", lambda row: rounded(row["old"]["ours_ms"], 4)),
        Column("after ms", time_of("ours")),
        Column("before / after", lambda row: f"{row['old']['ours_ms'] / row['ours_ms']:.3f}"),
        Column("speed-up before", lambda row: f"{row['old']['speedup']:.2f}x"),
        Column("after", lambda row: f"{row['speedup']:.2f}x"),
    )
    if not both:
        return ["The two runs have no row in common."]
    means = [statistics.geometric_mean(row["old"][f"{who}_ms"] / row[f"{who}_ms"] for row in both)
             for who in ("ours", "peer")]  # fmt: skip
    lines = [*header(before), *header(after), "", *table(columns, both), ""]
    if before["machine"]["device"] != after["machine"]["device"]:
        lines.append("The devices differ: only the speed-ups can be compared.")
    return [*lines, f"Mean of before / after over {len(both)} rows: ours {means[0]:.3f}, PyTorch {means[1]:.3f}."]


def plot(documents: Sequence[dict[str, Any]], path: Path) -> None:
    """The losses of a training run, or speed-ups as bars, as an SVG or PNG file."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot needs matplotlib: pip install 'modelnew[bench]'")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "modelnew", "font.size": 9})
    rows = [row for document in documents for row in document["rows"] if not row["failure"]]
    training = documents[0]["kind"] == "training"
    panels = (1, len(rows)) if training else (1, 1)
    figure, axes = pyplot.subplots(*panels, figsize=(11, 3.8), layout="constrained", sharey=True, squeeze=False)
    if training:
        draw_losses(axes[0], rows)
    else:
        draw_speedups(axes[0, 0], rows)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    machine = documents[0]["machine"]
    title = f"{machine['device']}, torch {machine['torch']}, cuDNN {machine['cudnn']}"
    figure.legend(handles, labels, ncols=len(labels), frameon=False, loc="outside upper center", title=title)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    print(f"drew {path}", file=sys.stderr)


def draw_speedups(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Bars: a group for each network or suite, a color for each mode or pass, and the line at 1."""
    groups = grouped(rows, lambda row: row["name"] if "mode" in row else row["suite"])
    series = {name: mean_speedup(of_series) for name, of_series in grouped(rows, pass_of).items()}
    width = 0.8 / len(series)
    for index, (name, mean) in enumerate(series.items()):
        heights = [[row for row in of_group if pass_of(row) == name] for of_group in groups.values()]
        places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(groups))]
        known = [(place, mean_speedup(found)) for place, found in zip(places, heights, strict=True) if found]
        axes.bar(*zip(*known, strict=True), width, label=f"{name}, mean {mean:.2f}")
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(groups)), [name.replace("_", "\n") for name in groups])
    axes.set_ylabel("speed-up over PyTorch")
    axes.spines[["top", "right"]].set_visible(False)


def draw_losses(panels: Sequence[Any], rows: Sequence[dict[str, Any]]) -> None:
    """The loss of each step: a panel for each mode, a line for each training."""
    for axes, row in zip(panels, rows, strict=True):
        for losses in (row["peer_losses"], *row["other_losses"]):
            label = "nn.Conv2d" if losses is row["peer_losses"] else None
            axes.semilogy(range(1, 1 + row["steps"]), losses, "C0-", linewidth=0.5, label=label)
        axes.semilogy(range(1, 1 + row["steps"]), row["ours_losses"], "C1--", linewidth=1, label="modelnew")
        axes.set(title=row["mode"], xlabel="step")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("loss")


def results_page(documents: dict[Path, dict[str, Any]]) -> str:
    """results/README.md: every stored run with its provenance, all columns and means."""
    parts = ["# Results", "Written by `python bench.py render` from the JSON files beside it; do not edit.",
             "\n".join(f"- {note}" for note in NOTES)]  # fmt: skip
    for path, document in documents.items():
        lines = "\n".join(table(COLUMNS[document["kind"]], document["rows"], markdown=True))
        parts += [f"## {path.stem}", "\n".join(f"- {line}" for line in header(document)), summary(document["rows"])]
        if document["kind"] == "training":
            parts += [f"![Losses of each step, with nn.Conv2d and modelnew]({path.stem}.svg)", lines]
        else:
            parts.append(f"<details><summary>{len(document['rows'])} rows</summary>\n\n{lines}\n\n</details>")
    return "\n\n".join(parts) + "\n"


SHOWN = {
    "reference": "KernelBench 55, 56, 63",
    "kernelbench": "ten others of KernelBench",
    "depthwise": "depthwise, 512x512",
    "resnet50": "ResNet-50",
    "unet": "U-Net, 512x512",
}


def short_table(documents: dict[Path, dict[str, Any]]) -> str:
    """README's table: a row for each of SHOWN, GPU, type and layout; geometric mean and worst speed-up of each pass."""
    types = {"tf32": "float32, TF32 allowed", "fp32": "float32, full"}
    rows = [row | {"gpu": document["machine"]["device"].split()[1]} for document in documents.values()
            if document["kind"] == "layers" and document["settings"]["data"] == "rand" for row in document["rows"]
            if row["suite"] in SHOWN and not row["failure"]]  # fmt: skip
    rows.sort(key=lambda row: [*SHOWN].index(row["suite"]))  # stable: by file within a suite

    def title(row: dict[str, Any]) -> tuple[str, ...]:
        name = types[row["precision"]] if row["dtype"] == "float32" else row["dtype"]
        return SHOWN[row["suite"]], row["gpu"], f"{name}{', channels_last' if row['channels_last'] else ''}"

    def cell(of_row: list[dict[str, Any]], direction: str) -> str:
        found = [row for row in of_row if row["pass"] == direction]
        return f"{mean_speedup(found):.2f} ({min(row['speedup'] for row in found):.2f})" if found else "-"

    lines = ["| layers of | GPU | type | forward | input gradient | weight gradient | error |", "|---" * 7 + "|"]
    for names, of_row in grouped(rows, title).items():
        passes = [cell(of_row, direction) for direction in ("forward", "dgrad", "wgrad")]
        error = statistics.geometric_mean(row["error_ratio"] for row in of_row)
        lines.append(f"| {' | '.join((*names, *passes))} | {error:.2f} |")
    return "\n".join(lines)


def replace_between_markers(page: str, section: str) -> str:
    """`page` with what lies between MARKERS replaced; ValueError unless each marker is there once and in order."""
    begin, end = MARKERS
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the text needs one {begin} and after it one {end}")
    return f"{page.partition(begin)[0]}{begin}\n{section}\n{end}{page.partition(end)[2]}"


def render() -> None:
    """Writes README's table and picture, results/README.md and its pictures of losses."""
    documents, readme = stored(), ROOT / "README.md"
    (RESULTS / "README.md").write_text(results_page(documents), encoding="utf-8")
    page = replace_between_markers(readme.read_text(encoding="utf-8"), short_table(documents))
    readme.write_text(page, encoding="utf-8")
    plot([document for document in documents.values() if document["kind"] == "networks"], PICTURE)
    for path, document in documents.items():
        if document["kind"] == "training":
            plot([document], path.with_suffix(".svg"))
