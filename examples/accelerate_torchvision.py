"""Accelerates a network of torchvision: which layers run on modelnew, what that changes, how much time it saves.

    python examples/accelerate_torchvision.py --model resnet50 --dtype float16 --channels-last
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import modelnew


def milliseconds(call: Callable[[], object], device: str, runs: int = 20) -> float:
    """The median time of a call, after two that do not count."""
    times = []
    for _ in range(runs + 2):
        begin = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="a name that torchvision.models knows")
    parser.add_argument("--weights", default=None, help="torchvision's name of trained weights (default: random ones)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--channels-last", action="store_true")
    options = parser.parse_args()
    from torchvision import models

    device = "cuda" if torch.cuda.is_available() else "cpu"
    layout = torch.channels_last if options.channels_last else torch.contiguous_format
    like = {"device": device, "dtype": getattr(torch, options.dtype), "memory_format": layout}
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    network = models.get_model(options.model, weights=options.weights).eval().to(**like)
    images = torch.randn(options.batch, 3, options.size, options.size).to(**like)

    with torch.inference_mode():
        before, before_ms = network(images), milliseconds(lambda: network(images), device)
        network, report = modelnew.accelerate(network, images)
        after, after_ms = network(images), milliseconds(lambda: network(images), device)
    print(report)
    same = (before.argmax(1) == after.argmax(1)).float().mean().item()
    error = ((after.double() - before.double()).norm() / before.double().norm()).item()
    print(f"the same top class in {same:.1%} of {options.batch} images, logits differ by {error:.1e}")
    print(f"{before_ms:.2f} ms with nn.Conv2d, {after_ms:.2f} ms now: {before_ms / after_ms:.2f} times as fast")


if __name__ == "__main__":
    main()
