"""Trains a small depthwise network on scikit-learn's digits twice, with nn.Conv2d and accelerated, from the same seed.

    pip install scikit-learn matplotlib
    python examples/digits.py --epochs 8 -o results/training/digits.json

In fp32 and under autocast to float16 with loss scaling. It prints test accuracies, and writes them with all losses and
a picture of the losses beside each other. Rounding differs, so the curves part after some hundred steps, as those of
two seeds would; how far is for the reader to judge, beside a third run that differs in the order of images alone.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modelnew

RUNS = {"nn.Conv2d": (False, 1), "modelnew": (True, 1), "nn.Conv2d, other order": (False, 2)}


def network() -> nn.Module:
    """From [N, 1, 32, 32] to 10 classes: depthwise filters of 3x3, 5x5 and 7x7, at strides of 1 and 2."""
    layers: list[nn.Module] = [nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    for inputs, outputs, size, stride in ((32, 64, 3, 1), (64, 64, 5, 2), (64, 128, 7, 1), (128, 128, 3, 2)):
        layers.append(nn.Conv2d(inputs, inputs, size, stride, size // 2, groups=inputs, bias=False))
        layers += [nn.BatchNorm2d(inputs), nn.Conv2d(inputs, outputs, 1, bias=False)]
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def digits(device: str) -> tuple[Tensor, Tensor]:
    """All 1797 images, enlarged to 32x32 and shuffled, and their classes."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images[order.numpy()], dtype=torch.float32, device=device)[:, None] / 16
    images = F.interpolate(images, (32, 32), mode="bilinear", align_corners=False)
    return images, torch.tensor(data.target[order.numpy()], device=device)


def train(accelerated: bool, order: int, half: bool, epochs: int, device: str) -> dict[str, Any]:
    """The loss of each step, and the accuracy on the quarter of the images that is not trained with."""
    torch.manual_seed(0)
    model = network().to(device)
    images, labels = digits(device)
    images = images.contiguous(memory_format=torch.channels_last) if half else images
    tests = len(labels) // 4
    if accelerated:
        model, _ = modelnew.accelerate(model, keep_slower=True)
    batches = (len(labels) - tests) // 64  # whole ones: a batch of few images would shake the statistics of BatchNorm
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)
    scaler = torch.amp.GradScaler(device, enabled=half and device == "cuda")
    autocast = torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16, enabled=half)
    generator = torch.Generator().manual_seed(order)
    losses = []
    for _ in range(epochs):
        for batch in (tests + torch.randperm(len(labels) - tests, generator=generator)).split(64)[:batches]:
            optimizer.zero_grad(set_to_none=True)
            with autocast:
                loss = F.cross_entropy(model(images[batch.to(device)]), labels[batch.to(device)])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            losses.append(loss.detach())
    with torch.no_grad(), autocast:
        right = (model.eval()(images[:tests]).argmax(1) == labels[:tests]).float().mean()
    return {"losses": [round(loss.item(), 5) for loss in losses], "accuracy": right.item()}


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """The losses, a panel for each precision."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "modelnew", "font.size": 9})
    figure, panels = pyplot.subplots(1, len(found), figsize=(11, 3.8), layout="constrained", sharey=True)
    for axes, (precision, runs) in zip(panels, found.items(), strict=True):
        for (name, run), style in zip(runs.items(), ("-", "--", ":"), strict=True):
            label = f"{name}, accuracy {100 * run['accuracy']:.1f}%"
            axes.semilogy(range(1, 1 + len(run["losses"])), run["losses"], style, linewidth=1, label=label)
        axes.set(title=precision, xlabel="step", ylabel="loss")
        axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("-o", "--output", type=Path, help="a JSON file; the picture goes beside it, as SVG")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    found: dict[str, dict[str, Any]] = {}
    for precision, half in (("fp32", False), ("float16, channels_last", True)):
        found[precision] = {name: train(*run, half, options.epochs, device) for name, run in RUNS.items()}
        for name, run in found[precision].items():
            print(f"{precision}: {name}: accuracy {100 * run['accuracy']:.2f}%, last loss {run['losses'][-1]:.4f}")
    if options.output is None:
        return
    options.output.parent.mkdir(parents=True, exist_ok=True)
    machine = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": time.strftime("%Y-%m-%d"),
        "epochs": options.epochs,
    }
    options.output.write_text(json.dumps({"machine": machine, "runs": found}) + "\n")
    draw(found, options.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
