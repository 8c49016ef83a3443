"""What bench.py and the examples run: torchvision's networks, two that it lacks, inference and training steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UNet(nn.Module):
    """U-Net (Ronneberger et al.) with padded convolutions and batch norm: [N, 3, H, W] to [N, 2, H, W]."""

    def __init__(self, widths: Sequence[int] = (64, 128, 256, 512, 1024)) -> None:
        super().__init__()
        self.down = nn.ModuleList(self.block(a, b) for a, b in pairwise((3, *widths)))
        levels = [*pairwise(widths)][::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in levels)
        self.merge = nn.ModuleList(self.block(2 * a, a) for a, _ in levels)
        self.last = nn.Conv2d(widths[0], 2, 1)

    @staticmethod
    def block(a: int, b: int) -> nn.Module:
        layers = ((nn.Conv2d(c, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(True)) for c in (a, b))
        return nn.Sequential(*(layer for group in layers for layer in group))

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.down[0](x)]
        for block in self.down[1:]:
            skips.append(block(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.last(x)


class EDSR(nn.Module):
    """EDSR-baseline (Lim et al.), super-resolution by 2: 16 residual blocks of 64 channels at full size."""

    def __init__(self, blocks: int = 16, width: int = 64) -> None:
        super().__init__()
        conv = partial(nn.Conv2d, kernel_size=3, padding=1)
        self.head = conv(3, width)
        self.body = nn.ModuleList(
            nn.Sequential(conv(width, width), nn.ReLU(True), conv(width, width)) for _ in range(blocks)
        )
        self.tail = nn.Sequential(conv(width, 4 * width), nn.PixelShuffle(2), conv(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = start = self.head(x)
        for block in self.body:
            x = x + block(x)
        return self.tail(x + start)


class Network(NamedTuple):
    """What builds a network, or torchvision's name of it; images of a batch; height and width of an image."""

    build: Callable[[], nn.Module] | str
    batch: int
    size: int

    def model(self) -> nn.Module:
        return self.build() if callable(self.build) else torchvision_model(self.build)

    def calibrated(self, images: Tensor) -> nn.Module:
        """The network with random weights whose activations have the size of a trained one's.

        Batch norm takes its statistics from the images, and matrices that start as zero are drawn; dropout is off.
        """
        model = self.model().to(images.device).train()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = None  # the mean over all batches: of one
            elif isinstance(module, nn.Dropout) or type(module).__name__ == "StochasticDepth":
                module.eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1 and not parameter.any():
                    nn.init.normal_(parameter, std=0.02)
            model(images)
        return model


NETWORKS = {
    "resnet50": Network("resnet50", 32, 224),
    "resnext50": Network("resnext50_32x4d", 32, 224),
    "vgg16": Network("vgg16_bn", 32, 224),
    "mobilenet_v3": Network("mobilenet_v3_large", 128, 224),
    "efficientnet_v2": Network("efficientnet_v2_s", 32, 300),
    "efficientnet_b0": Network("efficientnet_b0", 64, 224),
    "convnext": Network("convnext_tiny", 32, 224),
    "deeplab": Network("deeplabv3_resnet50", 8, 513),
    "unet": Network(UNet, 4, 512),
    "edsr": Network(EDSR, 4, 256),
    "vit": Network("vit_b_16", 32, 224),
}


def torchvision_model(name: str) -> nn.Module:
    """A network of torchvision with random weights; SystemExit says how to install torchvision."""
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another PyTorch
        sys.exit(f"{name} needs torchvision for this PyTorch (pip install 'modelnew[bench]'): {error}")
    options = {"weights_backbone": None} if hasattr(models.segmentation, name) else {}
    return getattr(models.segmentation if options else models, name)(weights=None, **options)


class Mode(NamedTuple):
    """How a network runs: inference or a training step (forward, backward, SGD)."""

    train: bool = False
    dtype: torch.dtype = torch.float32  # of parameters and images, with TF32 allowed
    autocast: bool = False  # to bfloat16
    channels_last: bool = False


MODES = {
    "tf32": Mode(),
    "tf32-nhwc": Mode(channels_last=True),
    "fp16": Mode(dtype=torch.float16),
    "fp16-nhwc": Mode(dtype=torch.float16, channels_last=True),
    "bf16-nhwc": Mode(dtype=torch.bfloat16, channels_last=True),
    "train-tf32": Mode(train=True),
    "train-tf32-nhwc": Mode(train=True, channels_last=True),
    "train-amp": Mode(train=True, autocast=True),
    "train-amp-nhwc": Mode(train=True, autocast=True, channels_last=True),
}
DEFAULT_MODES = ("tf32", "tf32-nhwc", "fp16-nhwc", "train-tf32", "train-amp-nhwc")


def gradients_or_output(model: nn.Module, images: Tensor, how: Mode) -> Tensor:
    """The output, or in training all gradients, as one vector of float64."""
    y = step_of(model, images, how, learn=False)()
    values = [p.grad for p in model.parameters() if p.grad is not None] if how.train else [y]
    return torch.cat([value.detach().double().flatten() for value in values])


def step_of(model: nn.Module, images: Tensor, how: Mode, learn: bool = True) -> Callable[[], Tensor]:
    """A call that runs inference or a training step and returns the network's output; it learns next to nothing."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9)

    def step() -> Tensor:
        with torch.set_grad_enabled(how.train):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(images.device.type, torch.bfloat16, enabled=how.autocast):
                y = model(images)
                y = y["out"] if isinstance(y, dict) else y
            if how.train:
                y.to(torch.promote_types(y.dtype, torch.float32)).square().mean().backward()
                if learn:
                    optimizer.step()
            return y

    return step
