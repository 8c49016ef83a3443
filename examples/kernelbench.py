"""One file for one problem: writes it, runs it beside the reference as evaluation scripts do, and compares.

    python examples/kernelbench.py                  # problems 55, 56 and 63 of KernelBench, level 1
    python examples/kernelbench.py reference.py     # a script of your own with Model, get_inputs, get_init_inputs
    python examples/kernelbench.py --keep FOLDER    # leaves the written files there

Needs a CUDA GPU. Each file is compiled in a directory of its own when it is run, which takes about half a minute.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = dict(os.environ)  # without the build directories below, so that the planner of bundle() is built once

REFERENCE = '''import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1, bias=False):
        super().__init__()
        self.conv2d = nn.Conv2d(in_channels, out_channels, kernel_size, stride=stride, padding=padding,
                                dilation=dilation, groups=groups, bias=bias)

    def forward(self, x):
        return self.conv2d(x)


def get_inputs():
    return [torch.rand({N}, {C}, {H}, {W})]


def get_init_inputs():
    return [{C}, {K}, ({R}, {S})]
'''

# N C H W K R S
PROBLEMS = {
    "55": (8, 64, 512, 1024, 128, 3, 3),
    "56": (8, 64, 512, 256, 128, 5, 7),
    "63": (16, 16, 1024, 1024, 128, 3, 3),
}


def made(names: dict, constructor: str) -> torch.nn.Module:
    """The named model, its weights drawn after a fixed seed."""
    torch.manual_seed(42)
    return names[constructor](*names["get_init_inputs"]()).cuda()


def milliseconds(models: list[torch.nn.Module], inputs: list[torch.Tensor], runs: int = 20) -> list[float]:
    """The median time of a forward of each, in turn."""
    times: list[list[float]] = [[] for _ in models]
    for _ in range(runs):
        for model, own in zip(models, times, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            model(*inputs)
            end.record()
            end.synchronize()
            own.append(begin.elapsed_time(end))
    return [statistics.median(own) for own in times]


def evaluate(name: str, reference: Path, folder: Path) -> bool:
    """Writes the file for a reference script, runs both and prints a line. True if the results are close."""
    written = folder / f"{name}_modelnew.py"
    command = [sys.executable, ROOT / "modelnew.py", "bundle", "--for", reference, "-o", written]
    subprocess.run(list(map(str, command)), check=True, env=ENVIRONMENT)
    names: dict = {}
    exec(reference.read_text(), names)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / f"{name}_build")
    start = time.perf_counter()
    exec(written.read_text(), names)
    seconds = time.perf_counter() - start

    models = [made(names, "Model"), made(names, "ModelNew")]
    torch.manual_seed(42)
    inputs = [x.cuda() for x in names["get_inputs"]()]
    expected, y = (model(*inputs) for model in models)
    close = torch.allclose(y, expected, rtol=1e-4, atol=1e-4)
    difference = (y - expected).abs().max().item()
    del y, expected
    before, after = milliseconds(models, inputs)
    lines = len(written.read_text().splitlines())
    print(
        f"{name:12}{lines:7} lines, built in {seconds:5.1f} s   PyTorch {before:7.3f} ms, this {after:7.3f} ms, "
        f"{before / after:5.2f}x   largest difference {difference:.1e}, close: {close}",
        flush=True,
    )
    return close


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scripts", nargs="*", type=Path, help="reference scripts (default: problems 55, 56 and 63)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where to leave what is written")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernelbench.py needs a CUDA GPU")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        references = {script.stem: script for script in options.scripts}
        if not references:
            for name, sizes in PROBLEMS.items():
                references[name] = folder / f"{name}.py"
                references[name].write_text(REFERENCE.format(**dict(zip("NCHWKRS", sizes, strict=True))))
        close = [evaluate(name, reference, folder) for name, reference in references.items()]
    sys.exit(0 if all(close) else "a result differs from PyTorch's")


if __name__ == "__main__":
    main()
