"""ResNet-50 with modelnew: logits against nn.Conv2d's and float64's, and images per second before and after.

    python examples/resnet50.py                                  batch 64, float32, NCHW, eager
    python examples/resnet50.py --channels-last --dtype float16

Weights are random: neither the logits' errors nor the times need trained ones. On a CPU, where modelnew is PyTorch, it
is a small check that all layers are found. Python has to find modelnew: `pip install .`, or PYTHONPATH=. before it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import modelnew


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 beside a shortcut. The stride is in the 3x3, which makes it version 1.5."""

    EXPANSION = 4

    def __init__(self, inplanes: int, planes: int, stride: int) -> None:
        super().__init__()
        outplanes = planes * self.EXPANSION
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, outplanes, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outplanes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inplanes != outplanes:
            shortcut = nn.Conv2d(inplanes, outplanes, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outplanes))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + shortcut)


class ResNet50(nn.Module):
    """[N, 3, H, W] to [N, classes]; the names of the parameters are torchvision's."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self.stage(64, 64, blocks=3, stride=1)
        self.layer2 = self.stage(256, 128, blocks=4, stride=2)
        self.layer3 = self.stage(512, 256, blocks=6, stride=2)
        self.layer4 = self.stage(1024, 512, blocks=3, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * Bottleneck.EXPANSION, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            # 0 is what training best begins with, but would hide the block. At 1, untrained blocks amplify rounding
            # errors: 3.6e-5 in the logits of 8 images of 96x96 in float32, instead of 1.3e-6 (CPU, 2026-11-22).
            if isinstance(module, Bottleneck):
                nn.init.constant_(module.bn3.weight, 0.2)

    @staticmethod
    def stage(inplanes: int, planes: int, blocks: int, stride: int) -> nn.Sequential:
        rest = [Bottleneck(planes * Bottleneck.EXPANSION, planes, 1) for _ in range(blocks - 1)]
        return nn.Sequential(Bottleneck(inplanes, planes, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


@torch.no_grad()
def calibrated(network: ResNet50, x: Tensor) -> ResNet50:
    """The network in eval mode, with the batch norm statistics of x: those of a new one let activations grow."""
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the statistics become those of what it sees, without what was there before
        norm.reset_running_stats()
    network.train()(x)
    for norm in norms:
        norm.momentum = 0.1
    return network.eval()


@torch.no_grad()
def relative_error(network: nn.Module, x: Tensor, exact: Tensor) -> float:
    """Of the logits, in the norm of all of them."""
    return float((network(x).double() - exact).norm() / exact.norm())


@torch.no_grad()
def images_per_second(network: nn.Module, x: Tensor, repeats: int) -> float:
    """From the median time of a pass, launches included; the GPU is idle before and after each."""
    times = []
    for run in range(-3, repeats):  # three to warm up
        torch.cuda.synchronize()
        start = time.perf_counter()
        network(x)
        torch.cuda.synchronize()
        times += [time.perf_counter() - start] if run >= 0 else []
    return x.shape[0] / statistics.median(times)


@torch.no_grad()
def float64_logits(network: ResNet50, x: Tensor, chunk: int = 16) -> Tensor:
    """The same weights and inputs, computed in float64 by PyTorch, a few images at a time for the memory's sake."""
    exact = ResNet50(network.fc.out_features).to(x.device, torch.float64).eval()
    exact.load_state_dict(network.state_dict())
    return torch.cat([exact(part.double()) for part in x.split(chunk)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, help="images at a time (default: 64, on a CPU 2)")
    parser.add_argument("--size", type=int, help="their height and width (default: 224, on a CPU 64)")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--channels-last", action="store_true", help="network and images in torch.channels_last")
    parser.add_argument("--repeats", type=int, default=30, help="timed passes, of which the median counts")
    args = parser.parse_args(arguments)
    gpu = torch.cuda.is_available()
    batch, size = args.batch or (64 if gpu else 2), args.size or (224 if gpu else 64)
    torch.backends.cudnn.benchmark = True  # cuDNN's fastest, not its first guess
    torch.manual_seed(42)
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    device = torch.device("cuda" if gpu else "cpu")
    x = torch.randn(batch, 3, size, size, device=device)
    network = calibrated(ResNet50().to(device), x)
    x = x.to(getattr(torch, args.dtype), memory_format=layout)
    network = network.to(device, x.dtype, memory_format=layout)

    exact = float64_logits(network, x)
    error_before = relative_error(network, x, exact)
    speed_before = images_per_second(network, x, args.repeats) if gpu else None
    network, report = modelnew.accelerate(network, x)
    error_after = relative_error(network, x, exact)
    print(report)
    print(f"error of the logits against float64: nn.Conv2d {error_before:.2e}, modelnew {error_after:.2e}")
    if gpu:
        speed_after = images_per_second(network, x, args.repeats)
        speed_up = speed_after / speed_before
        print(f"images per second: nn.Conv2d {speed_before:.0f}, modelnew {speed_after:.0f}: {speed_up:.2f}x")
    # The slack is for float32's roundings, whose sums differ by chance with the order of summation.
    return 0 if error_after <= 1.05 * error_before + 2e-7 else 1


if __name__ == "__main__":
    sys.exit(main())
