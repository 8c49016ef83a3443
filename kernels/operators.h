// The operators conv2d and conv2d_backward of torch.ops (operators.cpp), and size rules for kernels of all devices.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <array>
#include <string>
#include <tuple>

namespace modelnew {

using OptionalTensor = c10::optional<at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // dx, dw, db
using Mask = std::array<bool, 3>;                                  // wanted gradients

// Kernels of one device, which run below autograd. x and dy may lack the batch dimension.
struct DeviceKernels {
  at::Tensor (*conv2d)(const at::Tensor& x, const at::Tensor& w, const OptionalTensor& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups);
  // Unwanted gradients are tensors without elements.
  Gradients (*conv2d_backward)(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w, at::IntArrayRef stride,
                               at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups, Mask wanted);
};

// Registers torch.ops.<name>.conv2d and conv2d_backward, with these CUDA kernels unless `cuda` is null. Kernels that an
// earlier library of this process has registered stay.
void register_operators(const std::string& name, const DeviceKernels* cuda);

// Calls the operator conv2d through PyTorch's dispatcher (autocast, autograd, torch.func, modes). The namespace is the
// first one that this library registered.
at::Tensor dispatch_conv2d(const at::Tensor& x, const at::Tensor& w, const OptionalTensor& bias, at::IntArrayRef stride,
                           at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups);

// The rules below are templates for int64_t and SymInt.

inline at::IntArrayRef sizes_of(const at::Tensor& tensor, int64_t) { return tensor.sizes(); }
inline c10::SymIntArrayRef sizes_of(const at::Tensor& tensor, const c10::SymInt&) { return tensor.sym_sizes(); }

template <typename Int>
Int output_size(const Int& size, const Int& filter, const Int& stride, const Int& padding, const Int& dilation) {
  return (size + padding * 2 - dilation * (filter - 1) - 1) / stride + 1;
}

template <typename Int>
bool valid_axis(const Int& size, const Int& filter, const Int& stride, const Int& padding, const Int& dilation) {
  return size > 0 && filter > 0 && stride > 0 && dilation > 0 && padding >= 0 &&
         size + padding * 2 >= dilation * (filter - 1) + 1;
}

template <typename Int>
bool is_pair(c10::ArrayRef<Int> numbers) {
  return numbers.size() == 1 || numbers.size() == 2;
}

// Returns the value of an axis. A list of one number is for both axes, as in PyTorch. The message contains no numbers,
// since c10 formats them with streams, which may crash (binding.cpp).
template <typename Int>
const Int& on_axis(c10::ArrayRef<Int> numbers, size_t axis) {
  TORCH_CHECK(is_pair(numbers), "modelnew: stride, padding and dilation are ints or pairs of ints");
  return numbers[numbers.size() == 1 ? 0 : axis];
}

// Returns whether the arguments form a convolution with a non-empty kernel and image. For the error of invalid
// arguments, callers run PyTorch's own operator.
template <typename Int>
bool valid(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias, c10::ArrayRef<Int> stride,
           c10::ArrayRef<Int> padding, c10::ArrayRef<Int> dilation, const Int& groups) {
  if ((x.dim() != 4 && x.dim() != 3) || w.dim() != 4 || !(groups > 0)) return false;
  if (!is_pair(stride) || !is_pair(padding) || !is_pair(dilation)) return false;
  const c10::ArrayRef<Int> x_size = sizes_of(x, Int(0)).slice(x.dim() - 3), w_size = sizes_of(w, Int(0));
  const bool one_kind = x.scalar_type() == w.scalar_type() && x.device() == w.device();
  const bool channels =
      x_size[0] > 0 && w_size[0] > 0 && x_size[0] == w_size[1] * groups && w_size[0] % groups == 0;
  const bool bias_fits = !bias.defined() || (bias.dim() == 1 && sizes_of(bias, Int(0))[0] == w_size[0] &&
                                             bias.scalar_type() == x.scalar_type() && bias.device() == x.device());
  const auto axis_fits = [&](size_t axis) {
    return valid_axis(x_size[1 + axis], w_size[2 + axis], on_axis(stride, axis), on_axis(padding, axis),
                      on_axis(dilation, axis));
  };
  return one_kind && channels && bias_fits && axis_fits(0) && axis_fits(1);
}

// Returns [N, K, P, Q] of valid arguments with a batch dimension.
template <typename Int>
std::array<Int, 4> output_sizes(const at::Tensor& x, const at::Tensor& w, c10::ArrayRef<Int> stride,
                                c10::ArrayRef<Int> padding, c10::ArrayRef<Int> dilation) {
  const c10::ArrayRef<Int> x_size = sizes_of(x, Int(0)), w_size = sizes_of(w, Int(0));
  const auto on = [&](size_t axis) {
    return output_size(x_size[2 + axis], w_size[2 + axis], on_axis(stride, axis), on_axis(padding, axis),
                       on_axis(dilation, axis));
  };
  return {x_size[0], w_size[0], on(0), on(1)};
}

// Returns tensor.suggest_memory_format(). For symbolic sizes it repeats PyTorch's rule without a comparison of the
// batch size with zero, which tracing forbids for a batch of unknown size.
inline at::MemoryFormat format_of(const at::Tensor& tensor) {
  if (tensor.dim() != 4 || !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return tensor.suggest_memory_format();
  }
  const c10::SymIntArrayRef sizes = tensor.sym_sizes(), strides = tensor.sym_strides();
  c10::SymInt smallest = 1;
  for (const size_t axis : {1, 3, 2}) {  // from the innermost axis outwards
    if (sizes[axis] == 0 || strides[axis] < smallest) return at::MemoryFormat::Contiguous;
    smallest = sizes[axis] > 1 ? strides[axis] * sizes[axis] : strides[axis];
  }
  // N x 1 x 1 x 1 fits both formats. It counts as contiguous, as in PyTorch.
  return strides[0] >= smallest && smallest != strides[1] ? at::MemoryFormat::ChannelsLast
                                                          : at::MemoryFormat::Contiguous;
}

// Returns the format of the output and of the gradient to the input by PyTorch's rule on CUDA: channels_last if the
// input or the weight is, but not in float64.
inline at::MemoryFormat output_format(const at::Tensor& x, const at::Tensor& w) {
  const bool channels_last =
      format_of(x) == at::MemoryFormat::ChannelsLast || format_of(w) == at::MemoryFormat::ChannelsLast;
  return channels_last && x.scalar_type() != at::kDouble ? at::MemoryFormat::ChannelsLast
                                                         : at::MemoryFormat::Contiguous;
}

inline at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options, at::MemoryFormat format) {
  return at::empty(sizes, options, format);
}

inline at::Tensor empty(c10::SymIntArrayRef sizes, const at::TensorOptions& options, at::MemoryFormat format) {
  return at::empty_symint(sizes, options, format);
}

// Allocates the gradients of an input with a batch dimension. An unwanted gradient has no elements. The weight's
// gradient has the weight's format, so that autograd stores it without a copy.
template <typename Int>
Gradients empty_gradients(const at::Tensor& x, const at::Tensor& w, const Mask& wanted) {
  const auto gradient = [&](bool is_wanted, c10::ArrayRef<Int> sizes, at::MemoryFormat format) {
    return is_wanted ? empty(sizes, x.options(), format) : at::empty({0}, x.options());
  };
  const c10::ArrayRef<Int> w_size = sizes_of(w, Int(0));
  return {gradient(wanted[0], sizes_of(x, Int(0)), output_format(x, w)), gradient(wanted[1], w_size, format_of(w)),
          gradient(wanted[2], w_size.slice(0, 1), at::MemoryFormat::Contiguous)};
}

}  // namespace modelnew
