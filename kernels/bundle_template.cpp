// Binding of a bundle: conv2d() for Python, with gradients.
//
//   conv2d()       finds the problem, or raises ValueError if the file has no kernels for it
//   Convolution    autograd function: forward and backward
//   run()          sizes and addresses -> workspace -> launch
//
// If bundle() in modelnew.py defines MODELNEW_PROBLEMS, the file supports these problems only. Their kernels are chosen
// for contiguous operands that are aligned to 256 bytes; other operands are copied.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <string>
#include <variant>
#include <vector>

#include "tf32_switch.h"

// bundle_template.cu defines these two functions.
extern "C" int64_t modelnew_workspace_bytes(int op, int row, const int64_t* sizes, const void* const* pointers);
extern "C" const char* modelnew_launch(int op, int row, const int64_t* sizes, const void* const* pointers,
                                       void* stream);

namespace modelnew {
namespace {

using at::Tensor;
using OptionalTensor = c10::optional<Tensor>;
using Pair = std::array<int64_t, 2>;
using Sizes = std::array<int64_t, 4>;

struct Settings {
  Pair stride, padding, dilation;
  int64_t groups;
};

struct ProblemRow {
  Sizes x, w;
  bool bias;
  Settings settings;
  at::ScalarType dtype;
};

#if defined(MODELNEW_PROBLEMS)
constexpr bool kForAll = false;
const ProblemRow kRows[] = {MODELNEW_PROBLEMS};
#else
constexpr bool kForAll = true;
const std::array<ProblemRow, 0> kRows{};
#endif

enum Operator : int { kFprop, kDgrad, kWgrad, kBgrad };  // as in problem.cuh

Pair output_size(at::IntArrayRef x, at::IntArrayRef w, const Settings& s) {
  Pair size{};
  for (int i : {0, 1}) {
    const int64_t steps = x[2 + i] + 2 * s.padding[i] - s.dilation[i] * (w[2 + i] - 1) - 1;
    size[i] = steps < 0 ? 0 : steps / s.stride[i] + 1;
  }
  return size;
}

// Returns the number of a dtype in the kernels' DType, or -1.
int dtype_number(at::ScalarType type) {
  return type == at::kFloat ? 0 : type == at::kHalf ? 1 : type == at::kBFloat16 ? 2 : type == at::kDouble ? 3 : -1;
}

// Returns whether sizes and settings fit together and into the kernels' 32-bit numbers. The batch size has no limit.
bool is_convolution(at::IntArrayRef x, at::IntArrayRef w, const Settings& s) {
  constexpr int64_t kMost = 0x7fffffff / 4;
  const auto within = [](int64_t value, int64_t least) { return value >= least && value <= kMost; };
  bool valid = within(s.groups, 1);
  for (int i : {0, 1}) valid = valid && within(s.stride[i], 1) && within(s.padding[i], 0) && within(s.dilation[i], 1);
  for (int i : {1, 2, 3}) valid = valid && within(x[i], 1);
  for (int64_t size : w) valid = valid && within(size, 1);
  if (!valid || x[1] != w[1] * s.groups || w[0] % s.groups != 0) return false;
  const Pair size = output_size(x, w, s);
  return size[0] > 0 && size[1] > 0;
}

// Returns the row of the problem in kRows, 0 in a file for all problems, or -1.
int find_row(const Tensor& x, const Tensor& w, const OptionalTensor& bias, const Settings& s) {
  const auto fits = [&](const Tensor& t) { return t.scalar_type() == x.scalar_type() && t.device() == x.device(); };
  if (x.dim() != 4 || w.dim() != 4 || dtype_number(x.scalar_type()) < 0 || !fits(w)) return -1;
  if (bias.has_value() && (!fits(*bias) || bias->dim() != 1 || bias->size(0) != w.size(0))) return -1;
  if (kForAll) return is_convolution(x.sizes(), w.sizes(), s) ? 0 : -1;
  int row = 0;
  for (const ProblemRow& known : kRows) {
    const Settings& k = known.settings;
    if (x.sizes() == at::IntArrayRef(known.x) && w.sizes() == at::IntArrayRef(known.w) &&
        bias.has_value() == known.bias && s.stride == k.stride && s.padding == k.padding && s.dilation == k.dilation &&
        s.groups == k.groups && x.scalar_type() == known.dtype)
      return row;
    ++row;
  }
  return -1;
}

std::string text_of(at::IntArrayRef sizes) {
  std::string text;
  for (int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

std::string text_of(const Settings& s) {
  return ", stride " + text_of(s.stride) + ", padding " + text_of(s.padding) + ", dilation " + text_of(s.dilation) +
         ", groups " + std::to_string(s.groups);
}

std::string text_of(const Tensor& tensor) {
  return std::string(c10::toString(tensor.scalar_type())) + text_of(tensor.sizes()) + " on " + tensor.device().str();
}

std::string text_of(const ProblemRow& row) {
  const std::string type = c10::toString(row.dtype);
  return "input " + type + text_of(row.x) + ", weight " + type + text_of(row.w) +
         (row.bias ? ", a bias" : ", no bias") + text_of(row.settings);
}

// Returns the tensor, or a contiguous, aligned copy if the kernels need one.
Tensor operand(const Tensor& tensor) {
  const bool fits = tensor.is_contiguous() && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 256 == 0;
  return kForAll || fits ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

// Returns the strides for the kernels. Kernels for given problems are chosen for the default strides, from which those
// of a contiguous tensor may differ in dimensions of size 1.
Sizes strides_of(const Tensor& t) {
  if (kForAll) return {t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
  return {t.size(1) * t.size(2) * t.size(3), t.size(2) * t.size(3), t.size(3), 1};
}

// Runs an operator on the current stream and writes `out`, which is also given as y in fprop, x in dgrad, w in wgrad.
void run(Operator op, int64_t row, const Settings& s, const Tensor& x, const Tensor& w, const Tensor& bias,
         const Tensor& y, const Tensor& out) {
  if (x.numel() == 0 || y.numel() == 0) {
    out.zero_();
    return;
  }
  const c10::cuda::CUDAGuard device_guard(out.device());
  std::array<int64_t, 30> sizes = {x.size(0),       x.size(1),      x.size(2),
                                   x.size(3),       w.size(0),      w.size(2),
                                   w.size(3),       y.size(2),      y.size(3),
                                   s.groups,        s.stride[0],    s.stride[1],
                                   s.padding[0],    s.padding[1],   s.dilation[0],
                                   s.dilation[1],   dtype_number(x.scalar_type()), tf32_allowed()};
  auto end = sizes.begin() + 18;
  for (const Tensor& tensor : {x, w, y}) {
    const Sizes strides = strides_of(tensor);
    end = std::copy(strides.begin(), strides.end(), end);
  }
  const void* pointers[] = {x.data_ptr(), w.data_ptr(), bias.defined() ? bias.data_ptr() : nullptr,
                            y.data_ptr(), out.data_ptr(), nullptr};
  Tensor workspace;
  if (const int64_t bytes = modelnew_workspace_bytes(op, static_cast<int>(row), sizes.data(), pointers); bytes > 0) {
    workspace = at::empty({bytes}, out.options().dtype(at::kByte));
    pointers[5] = workspace.data_ptr();
  }
  void* const stream = c10::cuda::getCurrentCUDAStream().stream();
  const char* const error = modelnew_launch(op, static_cast<int>(row), sizes.data(), pointers, stream);
  TORCH_CHECK(error == nullptr, std::string("the kernels cannot run: ") + (error == nullptr ? "" : error));
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Convolution : torch::autograd::Function<Convolution> {
  static Tensor forward(AutogradContext* context, const Tensor& x_given, const Tensor& w_given,
                        const OptionalTensor& bias_given, int64_t row, const Settings& s) {
    const Tensor x = operand(x_given), w = operand(w_given);
    const Tensor bias = bias_given.has_value() ? operand(bias_given->contiguous()) : Tensor();
    const auto [P, Q] = output_size(x.sizes(), w.sizes(), s);
    constexpr auto kChannelsLast = at::MemoryFormat::ChannelsLast;
    const bool last = kForAll && x.scalar_type() != at::kDouble &&
                      (x.suggest_memory_format() == kChannelsLast || w.suggest_memory_format() == kChannelsLast);
    const Tensor y = at::empty({x.size(0), w.size(0), P, Q}, x.options(),
                               last ? kChannelsLast : at::MemoryFormat::Contiguous);
    run(kFprop, row, s, x, w, bias, y, y);
    context->save_for_backward({x, w});
    context->saved_data["call"] = std::vector<int64_t>{row, s.stride[0], s.stride[1], s.padding[0], s.padding[1],
                                                       s.dilation[0], s.dilation[1], s.groups, bias.defined()};
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    TORCH_CHECK_NOT_IMPLEMENTED(!c10::GradMode::is_enabled(),
                                "this file has no second derivatives: call backward() without create_graph");
    const std::vector<int64_t> call = context->saved_data["call"].toIntVector();
    const Settings s{{call[1], call[2]}, {call[3], call[4]}, {call[5], call[6]}, call[7]};
    const variable_list saved = context->get_saved_variables();
    const Tensor dy = operand(gradients[0]), &x = saved[0], &w = saved[1];
    Tensor dx, dw, db;
    if (context->needs_input_grad(0)) {
      dx = at::empty_like(x);
      run(kDgrad, call[0], s, dx, w, Tensor(), dy, dx);
    }
    if (context->needs_input_grad(1)) {
      dw = at::empty_like(w);
      run(kWgrad, call[0], s, x, dw, Tensor(), dy, dw);
    }
    if (call[8] != 0 && context->needs_input_grad(2)) {
      db = at::empty({w.size(0)}, dy.options());
      run(kBgrad, call[0], s, x, w, Tensor(), dy, db);
    }
    return {dx, dw, db, {}, {}};
  }
};

Tensor conv2d(const Tensor& x, const Tensor& w, const OptionalTensor& bias, const Pair& stride,
              const std::variant<Pair, std::string>& padding, const Pair& dilation, int64_t groups) {
  TORCH_CHECK_VALUE(padding.index() == 0, "ModelNew takes padding in numbers, not by name");
  const Settings s{stride, std::get<Pair>(padding), dilation, groups};
  const int row = find_row(x, w, bias, s);
  if (row < 0) {
    std::string message = "ModelNew got input " + text_of(x) + ", weight " + text_of(w) + ", " +
                          (bias.has_value() ? "bias " + text_of(*bias) : "no bias") + text_of(s) +
                          (kForAll ? ", which is no convolution [N, C, H, W] of tensors of one type on one GPU"
                                   : "; this file has kernels for:");
    for (const ProblemRow& known : kRows) message += " " + text_of(known) + ";";
    TORCH_CHECK_VALUE(false, message);
  }
  return Convolution::apply(x, w, bias, row, s);
}

}  // namespace
}  // namespace modelnew

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("conv2d", &modelnew::conv2d, pybind11::call_guard<pybind11::gil_scoped_release>());
}
