"""Trains the same small network twice, with nn.Conv2d and accelerated: autocast, channels_last, torch.compile if asked.

    python examples/train.py --steps 200 --compile

The images are synthetic: each shows a stripe pattern, and the class is its direction. Losses agree as far as rounding
allows, which grows from step to step.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modelnew


def network(classes: int) -> nn.Module:
    """A plain residual-free network of 3x3 convolutions, 64 to 256 channels."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, classes))


def stripes(batch: int, size: int, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images [batch, 3, size, size] in channels_last, and their classes."""
    device = generator.device
    labels = torch.randint(classes, (batch,), generator=generator, device=device)
    angles = labels[:, None, None] * torch.pi / classes
    line = torch.arange(size, device=device) * 0.7
    pattern = torch.sin(line[None, :, None] * torch.cos(angles) + line[None, None, :] * torch.sin(angles))
    noise = torch.randn(batch, 3, size, size, generator=generator, device=device)
    return (pattern[:, None] + noise).contiguous(memory_format=torch.channels_last), labels


def train(accelerated: bool, options: argparse.Namespace, device: str) -> tuple[list[float], float]:
    """The loss of each step and the time of a step in ms, the first ten left out."""
    torch.manual_seed(0)
    generator = torch.Generator(device).manual_seed(1)
    model = network(options.classes).to(device, memory_format=torch.channels_last).train()
    autocast = torch.autocast(device, torch.bfloat16)
    images, _ = stripes(options.batch, options.size, options.classes, generator)
    if accelerated:
        with autocast:  # the decision is made for what will run
            model, report = modelnew.accelerate(model, images)
        print(report)
    step_model = torch.compile(model) if options.compile else model
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    losses, begin = [], 0.0
    for step in range(options.steps):
        if step == min(10, options.steps - 1):
            float(losses[-1] if losses else 0)  # waits for the GPU
            begin = time.perf_counter()
        images, labels = stripes(options.batch, options.size, options.classes, generator)
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            loss = F.cross_entropy(step_model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = [loss.item() for loss in losses]
    return losses, (time.perf_counter() - begin) * 1e3 / max(1, options.steps - min(10, options.steps - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=64, help="height and width of the images")
    parser.add_argument("--classes", type=int, default=8)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    (theirs, their_ms), (ours, our_ms) = (train(accelerated, options, device) for accelerated in (False, True))
    print("step    nn.Conv2d    accelerated")
    for step in range(0, options.steps, max(1, options.steps // 10)):
        print(f"{step:4}  {theirs[step]:11.4f}  {ours[step]:13.4f}")
    print(f"a step takes {their_ms:.2f} ms with nn.Conv2d, {our_ms:.2f} ms accelerated")


if __name__ == "__main__":
    main()
