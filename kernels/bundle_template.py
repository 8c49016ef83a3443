"""The Python code of a bundle. bundle() in modelnew.py replaces this docstring and sets the constants in capitals."""

import contextlib
import hashlib
import inspect
import os
import re

import torch
from torch import nn
from torch.utils import cpp_extension


class _ModelNewConv2d(nn.Conv2d):
    """nn.Conv2d that runs the kernels of this file on CUDA tensors."""

    def _conv_forward(self, x, weight, bias):
        if not x.is_cuda:
            return super()._conv_forward(x, weight, bias)
        return _modelnew.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class ModelNew(nn.Module):
    """A model of one 2-D convolution, with the arguments and initialisation of nn.Conv2d, but bias=False by default.

    `self.conv2d` is the layer. CUDA tensors run the kernels of this file, all others PyTorch's own convolution.
    Arguments that the file has no kernels for raise ValueError.
    """

    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1, bias=False):
        super().__init__()
        self.conv2d = _ModelNewConv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups=groups, bias=bias
        )

    def forward(self, x):
        """Apply the convolution to [N, C, H, W]. Return [N, K, P, Q]."""
        return self.conv2d(x)


def _modelnew_build():
    """Compile the kernels, once for each directory of extensions, and load them."""
    import fcntl  # absent on Windows, which supports CPU tensors only

    capability = torch.cuda.get_device_capability()
    if _MODELNEW_CAPABILITY not in (None, capability):
        raise RuntimeError(
            f"this file is for GPUs of compute capability {_MODELNEW_CAPABILITY}, but this one has {capability}"
        )
    architecture = "90a" if capability == (9, 0) else f"{capability[0]}{capability[1]}"
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions")
    root = os.path.abspath(os.environ.get("TORCH_EXTENSIONS_DIR") or default)
    # The name depends on the directory, since PyTorch builds a name only once in a process.
    texts, versions = (_MODELNEW_BINDING, _MODELNEW_KERNELS), (torch.__version__, torch.version.cuda)
    what = texts, versions, architecture, root
    name = "modelnew_" + hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    folder = os.path.join(root, name)
    os.makedirs(folder, exist_ok=True)
    keywords = inspect.signature(cpp_extension.load_inline).parameters
    # The kernels need no PyTorch headers. Only newer versions of load_inline can omit them.
    bare = {"no_implicit_headers": True} if "no_implicit_headers" in keywords else {}
    flags = ["-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fvisibility=hidden", *_modelnew_split_flags()]
    flags.append(f"-gencode=arch=compute_{architecture},code=sm_{architecture}")
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(open(os.path.join(folder, "flock"), "w"))
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also if the process is killed
        left = os.path.join(folder, "lock")  # PyTorch's lock file: one left by a killed build would block for ever
        if os.path.exists(left):
            os.remove(left)
        stack.callback(os.environ.update, dict(os.environ))
        stack.callback(os.environ.pop, "TORCH_CUDA_ARCH_LIST", None)
        os.environ["TORCH_CUDA_ARCH_LIST"] = "8.0"  # PyTorch reads it, and before 2.9 adds it to the flags
        return cpp_extension.load_inline(
            name=name,
            cpp_sources=[_MODELNEW_BINDING],
            cuda_sources=[_MODELNEW_KERNELS],
            extra_cflags=["-O2", "-fvisibility=hidden"],
            extra_cuda_cflags=flags,
            build_directory=folder,
            with_cuda=True,
            **bare,
        )


def _modelnew_split_flags():
    """Return nvcc's flag to optimise kernels in parallel, if this is CUDA 12.4 or later."""
    header = os.path.join(cpp_extension.CUDA_HOME or "", "include", "cuda.h")
    with open(header if os.path.exists(header) else os.devnull, encoding="utf-8") as file:
        version = re.search(r"#define CUDA_VERSION (\d+)", file.read())
    return ["--split-compile=0"] if version and int(version[1]) >= 12040 else []


_MODELNEW_CAPABILITY = None
_MODELNEW_BINDING = None
_MODELNEW_KERNELS = None

_modelnew = _modelnew_build() if torch.cuda.is_available() else None
