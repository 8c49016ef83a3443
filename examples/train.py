"""Trains a ResNet-18 twice, with nn.Conv2d and accelerated: autocast, channels_last, torch.compile if asked.

    python examples/train.py --steps 200 --compile

The images are synthetic and of CIFAR's size: random crops of ten patterns, with noise. Losses agree as far as rounding
allows, which grows from step to step. `python bench.py training` stores such losses in four modes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modelnew


class Block(nn.Module):
    """A basic residual block (He et al.): two 3x3 convolutions, the first one at the stride."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Sequential):
    """ResNet-18 as used on CIFAR, a 3x3 filter at a stride of 1 first and no pooling: [N, 3, 32, 32] to [N, 10]."""

    def __init__(self, width: int = 64) -> None:
        layers = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        inputs = width
        for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
            inputs = outputs
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def draw_batches(count: int, batch: int, device: str | torch.device) -> list[tuple[Tensor, Tensor]]:
    """Batches of images [batch, 3, 32, 32] and their classes, the same ones on every machine: a CPU draws them.

    A class is a smooth pattern of 40x40. An image is a random crop of it, flipped or not, and four times as much noise.
    """
    generator = torch.Generator().manual_seed(1)
    patterns = F.avg_pool2d(torch.randn(10, 3, 44, 44, generator=generator), 5, 1) * 5  # of variance 1
    line, batches = torch.arange(32), []
    for _ in range(count):
        labels = torch.randint(10, (batch,), generator=generator)
        top, left, flipped = (torch.randint(n, (batch, 1), generator=generator) for n in (9, 9, 2))
        rows, columns = top + line, left + torch.where(flipped == 1, 31 - line, line)
        images = patterns[labels[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        images = images.contiguous() + 4 * torch.randn(batch, 3, 32, 32, generator=generator)
        batches.append((images.to(device), labels.to(device)))
    return batches


def step_of(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], autocast: bool) -> Callable[[], Tensor]:
    """A call that trains on the next batch, forward, backward and SGD, and returns the loss."""
    optimizer, remaining = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), iter(batches)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))

    def step() -> Tensor:
        images, labels = next(remaining)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach()

    return step


def train(accelerated: bool, options: argparse.Namespace, device: str) -> tuple[list[float], float]:
    """The loss of each step and the time of a step in ms, the first ten left out."""
    torch.manual_seed(0)
    model = ResNet18(options.width).to(device, memory_format=torch.channels_last)
    batches = draw_batches(options.steps, options.batch, device)
    batches = [(images.contiguous(memory_format=torch.channels_last), labels) for images, labels in batches]
    if accelerated:
        with torch.autocast(device, torch.bfloat16):  # the decision is made for what will run
            model, report = modelnew.accelerate(model, batches[0][0])
        print(report)
    step = step_of(torch.compile(model) if options.compile else model, batches, autocast=True)
    untimed = min(10, options.steps - 1)
    losses = [step() for _ in range(untimed)]
    float(losses[-1] if losses else 0)  # waits for the GPU
    begin = time.perf_counter()
    losses += [step() for _ in range(options.steps - untimed)]
    losses = [loss.item() for loss in losses]
    return losses, (time.perf_counter() - begin) * 1e3 / (options.steps - untimed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer")
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
