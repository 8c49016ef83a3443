"""The Python code of a bundle: bundle() in modelnew.py fills in the constants in capitals and adds the kernels."""

import contextlib
import ctypes
import fcntl
import hashlib
import inspect
import os

import torch
from torch import nn
from torch.utils.cpp_extension import load_inline


class ModelNew(nn.Module):
    """A model of one convolution: nn.Conv2d's arguments and initialisation, without a bias unless asked for.

    The parameters are those of `self.conv2d`, read at every call. CUDA tensors run the kernels below, others PyTorch's.
    """

    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1, bias=False):
        super().__init__()
        self.conv2d = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups=groups, bias=bias
        )

    def forward(self, x):
        """[N, C, H, W] to [N, K, P, Q]."""
        layer = self.conv2d
        if not x.is_cuda:
            return self.conv2d(x)
        settings = layer.stride, layer.padding, layer.dilation, layer.groups
        return _ModelnewConv2d.apply(x, layer.weight, layer.bias, *settings)


class _ModelnewConv2d(torch.autograd.Function):
    """The convolution and its gradients, a launch of the kernels each."""

    FPROP, DGRAD, WGRAD, BGRAD = range(4)  # the kernels' Operator

    @staticmethod
    def forward(ctx, x, w, bias, *settings):
        row = _modelnew_row(x, w, bias, *settings)
        x, w, bias = map(_modelnew_operand, (x, w, bias))
        y = _modelnew_output(x, w, *settings)
        _modelnew_launch(_ModelnewConv2d.FPROP, row, settings, y, x=x, w=w, bias=bias, y=y)
        ctx.save_for_backward(x, w)
        ctx.call = row, settings
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        (x, w), wanted, dy = ctx.saved_tensors, ctx.needs_input_grad, _modelnew_operand(dy)
        dx = torch.empty_like(x) if wanted[0] else None
        dw = torch.empty_like(w) if wanted[1] else None
        db = dy.new_empty(dy.shape[1]) if wanted[2] else None
        if dx is not None:
            _modelnew_launch(_ModelnewConv2d.DGRAD, *ctx.call, dx, x=dx, w=w, y=dy)
        if dw is not None:
            _modelnew_launch(_ModelnewConv2d.WGRAD, *ctx.call, dw, x=x, w=dw, y=dy)
        if db is not None:
            _modelnew_launch(_ModelnewConv2d.BGRAD, *ctx.call, db, x=x, w=w, y=dy)
        return dx, dw, db, None, None, None, None


def _modelnew_row(x, w, bias, stride, padding, dilation, groups):
    """The problem's row in the kernels' table of engines. Raises ValueError for what this file is not for."""
    tensors = [t for t in (x, w, bias) if t is not None]
    known = all(t.dtype == x.dtype and t.device == x.device for t in tensors) and x.dtype in _MODELNEW_DTYPES
    settings = bias is not None, stride, padding, dilation, groups, str(x.dtype)
    if known and _MODELNEW_PROBLEMS is not None:
        row = _MODELNEW_PROBLEMS.get((tuple(x.shape), tuple(w.shape), *settings))
    else:  # a file for all problems
        known = known and x.dim() == 4 and not isinstance(padding, str) and x.shape[1] == w.shape[1] * groups
        row = 0 if known and min(_modelnew_output_size(x, w, stride, padding, dilation)) > 0 else None
    if row is None:
        sizes = ", ".join(f"{t.dtype} {list(t.shape)} on {t.device}" for t in tensors)
        served = "any valid ones" if _MODELNEW_PROBLEMS is None else "; ".join(map(str, _MODELNEW_PROBLEMS))
        raise ValueError(
            f"ModelNew got input, weight and bias {sizes}, stride {stride}, padding {padding}, dilation {dilation}, "
            f"groups {groups}; this file has kernels for input, weight, whether there is a bias, stride, padding, "
            f"dilation, groups and dtype: {served}"
        )
    return row


def _modelnew_operand(tensor):
    """A tensor as the kernels were chosen for it: contiguous and aligned, where they are chosen for given problems."""
    if tensor is None or _MODELNEW_PROBLEMS is None or (tensor.is_contiguous() and tensor.data_ptr() % 256 == 0):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _modelnew_output_size(x, w, stride, padding, dilation):
    """(P, Q)"""
    padded = (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (w.shape[2 + i] - 1) for i in (0, 1))
    return tuple((size - 1) // stride[i] + 1 for i, size in enumerate(padded))


def _modelnew_output(x, w, stride, padding, dilation, groups):
    size = x.shape[0], w.shape[0], *_modelnew_output_size(x, w, stride, padding, dilation)
    channels_last = x.dtype != torch.float64 and any(
        t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous() for t in (x, w)
    )
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format)


def _modelnew_allows_tf32():
    """PyTorch's own switch, at this moment. Newer versions have it in cudnn.conv."""
    cudnn = torch.backends.cudnn
    newer = hasattr(cudnn, "conv") and hasattr(cudnn.conv, "fp32_precision")
    return cudnn.enabled and (cudnn.conv.fp32_precision == "tf32" if newer else cudnn.allow_tf32)


def _modelnew_launch(operator, row, settings, out, x, w, y, bias=None):
    """Runs an operator, on the current stream, into `out`, which may be any of the others."""
    if x.numel() == 0 or y.numel() == 0:
        out.zero_()
        return
    stride, padding, dilation, groups = settings
    sizes = [*x.shape, w.shape[0], *w.shape[2:], *y.shape[2:], groups, *stride, *padding, *dilation]
    sizes += [_MODELNEW_DTYPES[x.dtype], _modelnew_allows_tf32(), *x.stride(), *w.stride(), *y.stride()]
    pointers = [0 if t is None else t.data_ptr() for t in (x, w, bias, y, out)]
    library = _modelnew_library
    with torch.cuda.device(out.device):
        call = operator, row, (ctypes.c_int64 * len(sizes))(*sizes)
        bytes_needed = library.modelnew_workspace_bytes(*call, (ctypes.c_void_p * 6)(*pointers))
        workspace = torch.empty(bytes_needed, dtype=torch.uint8, device=out.device)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = library.modelnew_launch(*call, (ctypes.c_void_p * 6)(*pointers, workspace.data_ptr()), stream)
    if error is not None:
        raise RuntimeError(f"the kernels failed: {error.decode()} ({_MODELNEW_GPU})")


def _modelnew_build():
    """Compiles the kernels, once for a directory of extensions, and loads them."""
    capability = torch.cuda.get_device_capability()
    if _MODELNEW_CAPABILITY not in (None, capability):
        raise RuntimeError(f"this file is {_MODELNEW_GPU}, but this GPU has compute capability {capability}")
    architecture = "90a" if capability == (9, 0) else f"{capability[0]}{capability[1]}"
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions")
    root = os.path.abspath(os.environ.get("TORCH_EXTENSIONS_DIR") or default)
    # A name of its own for each directory: PyTorch builds a name once in a process.
    what = [_MODELNEW_KERNELS, _MODELNEW_FLAGS, torch.__version__, torch.version.cuda, architecture, root]
    name = "modelnew_" + hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    folder = os.path.join(root, name)
    os.makedirs(folder, exist_ok=True)
    keywords = inspect.signature(load_inline).parameters
    # The kernels need none of PyTorch's headers, whose inclusion only newer versions can be told to leave out.
    bare = {"no_implicit_headers": True} if "no_implicit_headers" in keywords else {}
    flags = ["-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fvisibility=hidden", *_MODELNEW_FLAGS]
    flags.append(f"-gencode=arch=compute_{architecture},code=sm_{architecture}")
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(open(os.path.join(folder, "flock"), "w"))
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back with the file, also by being killed
        left = os.path.join(folder, "lock")  # PyTorch's own: a killed build leaves it, and the next waits for ever
        if os.path.exists(left):
            os.remove(left)
        stack.callback(os.environ.update, dict(os.environ))
        stack.callback(os.environ.pop, "TORCH_CUDA_ARCH_LIST", None)
        os.environ["TORCH_CUDA_ARCH_LIST"] = "8.0"  # PyTorch reads it, and before 2.9 adds it to the flags
        load_inline(
            name=name,
            cpp_sources=["// The kernels are called through ctypes.\n"],
            cuda_sources=[_MODELNEW_KERNELS],
            extra_cuda_cflags=flags,
            build_directory=folder,
            with_cuda=True,
            is_python_module=False,
            **bare,
        )
    library = ctypes.CDLL(os.path.join(folder, f"{name}.so"))
    library.modelnew_workspace_bytes.restype = ctypes.c_int64
    library.modelnew_launch.restype = ctypes.c_char_p
    return library


_MODELNEW_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}  # the kernels' DType
_MODELNEW_PROBLEMS = {}
_MODELNEW_CAPABILITY = None
_MODELNEW_GPU = ""
_MODELNEW_FLAGS = []
_MODELNEW_KERNELS = ""

_modelnew_library = _modelnew_build() if torch.cuda.is_available() else None
