// Binding between PyTorch and the engines: argument checks, choice of an engine, output tensors, workspace, and the
// Python module.
//
//   py_conv2d()      screen -> parse arguments -> forward(), the operator, or None for a call that Python handles
//   conv2d_cuda()    the operator's CUDA kernel, which operators.cpp registers
//   forward()        check -> Problem -> launch
//   backward()       check -> Problem -> launch, one launch per wanted gradient
//
// The module uses CPython's METH_FASTCALL and parses arguments itself instead of pybind11, since the host time of a
// call bounds small convolutions (docs/lab/operators.md).
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/conv2d.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <atomic>
#include <limits>
#include <optional>
#include <string>

#include "choice.cuh"
#include "engines.cuh"
#include "operators.h"
#include "screening.h"
#include "tf32_switch.h"

namespace modelnew {
namespace {

using Pair = std::array<int64_t, 2>;

// Settings of a call.
struct Settings {
  Pair stride, padding, dilation;
  int64_t groups;
};

// The engine of force_engine(), or null. It is global, since autograd runs backward passes in threads of its own.
std::atomic<const Engine*> forced_engine{nullptr};

const char* name_of(Operator op) {
  switch (op) {
    case Operator::kFprop:
      return "forward";
    case Operator::kDgrad:
      return "dgrad";
    case Operator::kWgrad:
      return "wgrad";
    case Operator::kBgrad:
      return "bgrad";
  }
  return "";
}

// Text of messages is built without streams: if a toolchain links libstdc++ statically (g++ -static-libstdc++), the
// process has two copies of it, and writing a number to a stream crashes (docs/lab/operators.md).

std::string text_of(const char* text) { return text; }
std::string text_of(const std::string& text) { return text; }
std::string text_of(int64_t number) { return std::to_string(number); }
std::string text_of(at::ScalarType type) { return c10::toString(type); }
std::string text_of(const at::Device& device) { return device.str(); }

std::string text_of(at::IntArrayRef sizes) {
  std::string text;
  for (int64_t size : sizes) text += (text.empty() ? "[" : ", ") + std::to_string(size);
  return text.empty() ? "[]" : text + "]";
}

template <typename... Parts>
std::string concatenate(const Parts&... parts) {
  std::string text;
  (text.append(text_of(parts)), ...);
  return text;
}

// Checks of arguments follow. Arguments that do not form a convolution go to PyTorch's own operator, which raises.

std::optional<DType> served_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kDouble:
      return DType::kFloat64;
    default:
      return std::nullopt;
  }
}

void require_served_dtype(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias) {
  // PyTorch raises its own error for unequal dtypes.
  if (x.scalar_type() != w.scalar_type() || (bias.defined() && bias.scalar_type() != x.scalar_type())) return;
  TORCH_CHECK_NOT_IMPLEMENTED(served_dtype(x.scalar_type()).has_value(),
                              concatenate("modelnew: conv2d has no kernels for ", x.scalar_type(),
                                          " tensors on CUDA, only for float32, float16, bfloat16 and float64; convert "
                                          "the input and the weight to one of these"));
}

std::string describe_call(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias, const Settings& s) {
  return concatenate("input ", x.sizes(), ", weight ", w.sizes(), ", ", bias.defined() ? "a bias" : "no bias", ", ",
                     x.scalar_type(), ", stride (", s.stride[0], ", ", s.stride[1], "), padding (", s.padding[0], ", ",
                     s.padding[1], "), dilation (", s.dilation[0], ", ", s.dilation[1], "), groups ", s.groups);
}

// Larger numbers would overflow the ints of a Problem, or int64 arithmetic with them.
void require_int_range(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias, const Settings& s) {
  constexpr int64_t kLimit = std::numeric_limits<int>::max() / 4;
  bool fits = s.groups <= kLimit;
  for (int axis : {0, 1}) {
    fits = fits && s.stride[axis] <= kLimit && s.padding[axis] <= kLimit && s.dilation[axis] <= kLimit;
  }
  for (int64_t axis = 1; axis < x.dim(); ++axis) fits = fits && x.size(axis) <= kLimit;
  for (int64_t axis = 0; axis < w.dim(); ++axis) fits = fits && w.size(axis) <= kLimit;
  TORCH_CHECK_NOT_IMPLEMENTED(fits, concatenate("modelnew: conv2d takes sizes and settings up to ", kLimit,
                                                " (any batch size), but got ", describe_call(x, w, bias, s)));
}

// explain() also accepts meta tensors, in place of tensors on the current GPU.
bool can_be_explained(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias, const Settings& s) {
  return (x.is_cuda() || x.is_meta()) && valid<int64_t>(x, w, bias, s.stride, s.padding, s.dilation, s.groups);
}

bool valid_on_cuda(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias, const Settings& s) {
  return x.is_cuda() && can_be_explained(x, w, bias, s);
}

// Calls PyTorch's operator with arguments that are not valid_on_cuda(), so that the error is the one of this PyTorch
// version. If PyTorch accepts them, an empty result is returned and any other one is an error.
at::Tensor result_of_pytorch(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias, const Settings& s) {
  at::Tensor y = at::conv2d(x, w, bias, s.stride, s.padding, s.dilation, s.groups);
  TORCH_CHECK_NOT_IMPLEMENTED(y.numel() == 0,
                              concatenate("modelnew: conv2d has no kernel for ", describe_call(x, w, bias, s)));
  return y;
}

void copy_strides(const at::Tensor& tensor, int64_t (&strides)[4]) {
  for (int axis = 0; axis < 4; ++axis) strides[axis] = tensor.stride(axis);
}

// Images of one pixel under 1x1 filters are a row of pixels of one image. Engines have tiles of pixels, of one image or
// of few.
void join_single_pixels(Problem& p) {
  const bool single = p.H == 1 && p.W == 1 && p.P == 1 && p.Q == 1 && p.R == 1 && p.S == 1;
  // A stride leaves nothing out here, but the contract's size rule knows of it.
  const bool plain = p.pad_h == 0 && p.pad_w == 0 && p.stride_h == 1 && p.stride_w == 1;
  if (!single || !plain || p.N > std::numeric_limits<int>::max() / 4) return;
  p.W = p.Q = static_cast<int>(p.N);
  p.N = 1;
  p.x_stride[3] = p.x_stride[0];
  p.y_stride[3] = p.y_stride[0];
}

// Returns the problem of valid arguments with a batch dimension. `y` is the output or its gradient.
Problem problem_of(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y, const Settings& s) {
  Problem problem{};
  problem.N = x.size(0);
  problem.C = static_cast<int>(x.size(1));
  problem.H = static_cast<int>(x.size(2));
  problem.W = static_cast<int>(x.size(3));
  problem.K = static_cast<int>(w.size(0));
  problem.R = static_cast<int>(w.size(2));
  problem.S = static_cast<int>(w.size(3));
  problem.P = static_cast<int>(y.size(2));
  problem.Q = static_cast<int>(y.size(3));
  problem.groups = static_cast<int>(s.groups);
  problem.stride_h = static_cast<int>(s.stride[0]);
  problem.stride_w = static_cast<int>(s.stride[1]);
  problem.pad_h = static_cast<int>(s.padding[0]);
  problem.pad_w = static_cast<int>(s.padding[1]);
  problem.dilation_h = static_cast<int>(s.dilation[0]);
  problem.dilation_w = static_cast<int>(s.dilation[1]);
  copy_strides(x, problem.x_stride);
  copy_strides(w, problem.w_stride);
  copy_strides(y, problem.y_stride);
  problem.dtype = *served_dtype(x.scalar_type());
  problem.tf32_allowed = tf32_allowed();
  join_single_pixels(problem);
  return problem;
}

std::array<int64_t, 4> sizes_of_y(const at::Tensor& x, const at::Tensor& w, const Settings& s) {
  return output_sizes<int64_t>(x, w, s.stride, s.padding, s.dilation);
}

// Returns the forced engine, or the first one of the table that runs the problem.
const Engine& engine_for(const Problem& problem, Operator op) {
  const Engine* const forced = forced_engine;
  if (forced != nullptr) {
    const char* refusal = forced->refusal(problem, op);
    TORCH_CHECK(refusal == nullptr, concatenate("modelnew: engine '", forced->name, "' is forced but cannot take the ",
                                                name_of(op), " of this problem: ", refusal));
    return *forced;
  }
  thread_local Memo<const Engine*> memo;
  const Engine* const chosen = first_of(kEngines, problem, op, memo);
  TORCH_CHECK_NOT_IMPLEMENTED(chosen != nullptr,
                              concatenate("modelnew: no engine takes the ", name_of(op), " of this problem"));
  return *chosen;
}

std::string describe_problem(const Problem& p) {
  return concatenate("x[", p.N, ", ", p.C, ", ", p.H, ", ", p.W, "], w[", p.K, ", ", p.C / p.groups, ", ", p.R, ", ",
                     p.S, "], y[", p.N, ", ", p.K, ", ", p.P, ", ", p.Q, "], stride (", p.stride_h, ", ", p.stride_w,
                     "), padding (", p.pad_h, ", ", p.pad_w, "), dilation (", p.dilation_h, ", ", p.dilation_w,
                     "), groups ", p.groups);
}

// Runs one operator on the device's current stream. The workspace is freed at once: torch's caching allocator reuses
// its memory only for later work on the same stream.
void launch(Operator op, const Problem& problem, Pointers pointers, const at::TensorOptions& options) {
  const Engine& engine = engine_for(problem, op);
  at::Tensor workspace;
  if (const int64_t bytes = engine.workspace_bytes(problem, op, pointers); bytes > 0) {
    workspace = at::empty({bytes}, options.dtype(at::kByte));
    pointers.workspace = workspace.data_ptr();
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(options.device().index());
  const cudaError_t error = engine.launch(op, problem, pointers, stream);
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clear the error, or CUDA reports it again at the next launch of any library
  TORCH_CHECK(false, concatenate("modelnew: engine '", engine.name, "' failed in the ", name_of(op), " of ",
                                 describe_problem(problem), ": ", cudaGetErrorString(error)));
}

// The engines require a contiguous bias.
at::Tensor packed_bias(const at::Tensor& bias) { return bias.defined() ? bias.contiguous() : bias; }

at::Tensor forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias, const Settings& s) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  require_served_dtype(x, w, bias);
  require_int_range(x, w, bias, s);
  if (!valid_on_cuda(x, w, bias, s)) return result_of_pytorch(x, w, bias, s);
  if (x.dim() == 3) return forward(x.unsqueeze(0), w, bias, s).squeeze(0);

  const c10::cuda::CUDAGuard device_guard(x.device());
  at::Tensor y = at::empty(sizes_of_y(x, w, s), x.options(), output_format(x, w));
  if (y.numel() == 0) return y;
  const at::Tensor bias_run = packed_bias(bias);
  Pointers pointers{};
  pointers.x = x.const_data_ptr();
  pointers.w = w.const_data_ptr();
  pointers.bias = bias_run.defined() ? bias_run.const_data_ptr() : nullptr;
  pointers.out = y.data_ptr();
  launch(Operator::kFprop, problem_of(x, w, y, s), pointers, x.options());
  return y;
}

void require_output_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w, const Settings& s) {
  const at::Tensor no_bias;
  TORCH_CHECK(valid_on_cuda(x, w, no_bias, s),
              concatenate("modelnew: conv2d's backward got invalid arguments: ", describe_call(x, w, no_bias, s)));
  const auto expected = sizes_of_y(x.dim() == 3 ? x.unsqueeze(0) : x, w, s);
  const at::IntArrayRef sizes = at::IntArrayRef(expected).slice(x.dim() == 3 ? 1 : 0);
  TORCH_CHECK(dy.sizes() == sizes && dy.scalar_type() == x.scalar_type() && dy.device() == x.device(),
              concatenate("modelnew: conv2d's backward expected a gradient of size ", sizes, ", ", x.scalar_type(),
                          " on ", x.device(), ", but got ", dy.sizes(), ", ", dy.scalar_type(), " on ", dy.device()));
}

Gradients backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w, const Settings& s,
                   const Mask& wanted) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor no_bias;
  require_served_dtype(x, w, no_bias);
  require_int_range(x, w, no_bias, s);
  const bool nothing = x.numel() == 0 || w.numel() == 0;
  if (!nothing) require_output_gradient(dy, x, w, s);
  if (x.dim() == 3) {
    auto [dx, dw, db] = backward(dy.unsqueeze(0), x.unsqueeze(0), w, s, wanted);
    return {wanted[0] ? dx.squeeze(0) : dx, dw, db};
  }

  const c10::cuda::CUDAGuard device_guard(x.device());
  const Gradients gradients = empty_gradients<int64_t>(x, w, wanted);
  const auto& [dx, dw, db] = gradients;
  if (nothing) {
    for (const at::Tensor& gradient : {dx, dw, db}) gradient.zero_();
    return gradients;
  }
  // x_stride and w_stride of a Problem are those of the gradient if the operator writes it (problem.cuh).
  const auto compute = [&](Operator op, const at::Tensor& out, const at::Tensor& as_x, const at::Tensor& as_w) {
    Pointers pointers{};
    if (op == Operator::kWgrad) pointers.x = x.const_data_ptr();
    if (op == Operator::kDgrad) pointers.w = w.const_data_ptr();
    pointers.dy = dy.const_data_ptr();
    pointers.out = out.data_ptr();
    launch(op, problem_of(as_x, as_w, dy, s), pointers, x.options());
  };
  if (wanted[0]) compute(Operator::kDgrad, dx, dx, w);
  if (wanted[1]) compute(Operator::kWgrad, dw, x, dw);
  if (wanted[2]) compute(Operator::kBgrad, db, x, w);
  return gradients;
}

// The CUDA kernels of the operators in torch.ops follow.

Settings settings_of(at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  const auto pair = [](at::IntArrayRef numbers) { return Pair{on_axis(numbers, 0), on_axis(numbers, 1)}; };
  return {pair(stride), pair(padding), pair(dilation), groups};
}

at::Tensor conv2d_cuda(const at::Tensor& x, const at::Tensor& w, const OptionalTensor& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  return forward(x, w, bias.has_value() ? *bias : at::Tensor(), settings_of(stride, padding, dilation, groups));
}

Gradients backward_cuda(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w, at::IntArrayRef stride,
                        at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups, Mask wanted) {
  return backward(dy, x, w, settings_of(stride, padding, dilation, groups), wanted);
}

constexpr DeviceKernels kCudaKernels{conv2d_cuda, backward_cuda};

// Returns explain()'s text about the precision of an operator.
const char* contract_of(const Problem& problem, Operator op) {
  if (problem.dtype != DType::kFloat32) return "operands as they are";
  if (uses_tf32(problem, op)) return "tf32, as PyTorch's switch allows";
  if (!problem.tf32_allowed) return "fp32, as PyTorch's switch demands";
  return "fp32, because the problem is small or C/groups or K/groups below 8";
}

// Returns explain()'s line about one operator.
std::string explain_operator(const Problem& problem, Operator op) {
  const Engine* const forced = forced_engine;
  const Engine& chosen = engine_for(problem, op);
  char configuration[320] = "";
  chosen.describe(problem, op, configuration, sizeof configuration);
  std::string text = concatenate(name_of(op), ": ", chosen.name, forced != nullptr ? " (forced)" : "");
  if (op != Operator::kBgrad) text += concatenate("; ", contract_of(problem, op));
  text += concatenate("; ", configuration);
  if (forced == nullptr) {
    for (const Engine* const* engine = kEngines; *engine != &chosen; ++engine) {
      text += concatenate("; not ", (*engine)->name, ": ", reason_against(**engine, problem, op));
    }
    std::string others;
    for (const Engine* engine : kEngines) {
      if (engine == &chosen || engine->refusal(problem, op) != nullptr) continue;
      others += concatenate(others.empty() ? "" : ", ", engine->name);
    }
    if (!others.empty()) text += concatenate("; could be forced: ", others);
  }
  return text + "\n";
}

std::string explain(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias, const Settings& s) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  require_served_dtype(x, w, bias);
  require_int_range(x, w, bias, s);
  if (!can_be_explained(x, w, bias, s)) {
    result_of_pytorch(x, w, bias, s);
    return "the output has no elements: nothing is launched\n";
  }
  if (x.dim() == 3) return explain(x.unsqueeze(0), w, bias, s);
  if (x.size(0) == 0) return "the batch is empty: nothing is launched\n";
  // explain() needs strides only, which meta tensors have without memory.
  const auto strided = [&](at::IntArrayRef sizes, at::MemoryFormat format) {
    return at::empty(sizes, x.options().device(at::kMeta), format);
  };
  const at::Tensor y = strided(sizes_of_y(x, w, s), output_format(x, w));
  const at::Tensor dx = strided(x.sizes(), output_format(x, w)), dw = strided(w.sizes(), w.suggest_memory_format());
  std::string text = concatenate(describe_problem(problem_of(x, w, y, s)), ", ", x.scalar_type(), "\n",
                                 explain_operator(problem_of(x, w, y, s), Operator::kFprop),
                                 explain_operator(problem_of(dx, w, y, s), Operator::kDgrad),
                                 explain_operator(problem_of(x, dw, y, s), Operator::kWgrad));
  if (bias.defined()) text += explain_operator(problem_of(x, w, y, s), Operator::kBgrad);
  return text;
}

// Parsers of Python arguments follow. They return false for any other type, which PyTorch or Python code handles.

// Larger numbers are left to the operator, which rejects them. SymInt does not hold all of them.
bool parse_int(PyObject* object, int64_t& value) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  constexpr int64_t kLargest = std::numeric_limits<int>::max();
  return overflow == 0 && value >= -kLargest && value <= kLargest;
}

// Accepts an int for both axes, or a tuple or list of one or two ints.
bool parse_pair(PyObject* object, Pair& pair) {
  if (PyTuple_CheckExact(object) || PyList_CheckExact(object)) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
    PyObject** items = PySequence_Fast_ITEMS(object);
    return (size == 1 || size == 2) && parse_int(items[0], pair[0]) && parse_int(items[size - 1], pair[1]);
  }
  if (!parse_int(object, pair[0])) return false;
  pair[1] = pair[0];
  return true;
}

const Engine* engine_named(PyObject* name) {
  if (name == Py_None) return nullptr;
  const char* text = PyUnicode_AsUTF8(name);
  if (text == nullptr) throw python_error();
  for (const Engine* engine : kEngines) {
    if (std::string(engine->name) == text) return engine;
  }
  TORCH_CHECK_VALUE(false, concatenate("modelnew: there is no engine '", text, "'"));
}

// Arguments of conv2d: three tensors, then stride, padding, dilation and groups, as in PyTorch.
constexpr Py_ssize_t kArguments = 7;

bool parse_settings(PyObject* const* args, Settings& s) {
  return parse_pair(args[3], s.stride) && parse_pair(args[4], s.padding) && parse_pair(args[5], s.dilation) &&
         parse_int(args[6], s.groups);
}

bool parse_mask(PyObject* object, Mask& mask) {
  if (!PyList_CheckExact(object) || PyList_GET_SIZE(object) != static_cast<Py_ssize_t>(mask.size())) return false;
  for (size_t i = 0; i < mask.size(); ++i) {
    PyObject* const item = PyList_GET_ITEM(object, i);
    if (!PyBool_Check(item)) return false;
    mask[i] = item == Py_True;
  }
  return true;
}

void require_count(Py_ssize_t received, Py_ssize_t expected) {
  TORCH_CHECK_TYPE(received == expected, concatenate("modelnew: expected ", static_cast<int64_t>(expected),
                                                     " arguments, but got ", static_cast<int64_t>(received)));
}

const at::Tensor& required_tensor(PyObject* object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object),
                   concatenate("modelnew: expected a tensor, but got ", Py_TYPE(object)->tp_name));
  return THPVariable_Unpack(object);
}

at::Tensor optional_tensor(PyObject* object) { return object == Py_None ? at::Tensor() : required_tensor(object); }

// The functions of the Python module follow.

PyObject* device_context = nullptr;  // torch.utils._device.DeviceContext

// Returns the way of a call from its first three arguments, which are tensors or None.
Way way_of(PyObject* const* args) {
  Screening screening(c10::kCUDA, device_context);
  for (int i = 0; i < 3; ++i) screening.add(args[i]);
  return args[0] == Py_None || args[1] == Py_None ? Way::kPython : screening.way();
}

// conv2d(input, weight, bias, stride, padding, dilation, groups) -> Tensor, or None if Python code handles the call
PyObject* py_conv2d(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  require_count(count, kArguments);
  const Way way = way_of(args);
  Settings s{};
  if (way == Way::kPython || !parse_settings(args, s)) Py_RETURN_NONE;
  const at::Tensor &x = THPVariable_Unpack(args[0]), &w = THPVariable_Unpack(args[1]);
  const at::Tensor bias = optional_tensor(args[2]);
  at::Tensor y;
  {
    // An allocation or a launch may wait for the GPU, which may wait for a thread that needs the GIL. The caller holds
    // references to the tensors.
    pybind11::gil_scoped_release no_gil;
    y = way == Way::kKernel ? forward(x, w, bias, s)
                            : dispatch_conv2d(x, w, bias, s.stride, s.padding, s.dilation, s.groups);
  }
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

// Replaces torch.ops.<name>.conv2d.default, which compiled code calls, since PyTorch takes longer to parse arguments by
// the schema than for the rest of the call (docs/lab/operators.md). Plain calls run a kernel, others call `original`.
PyObject* py_conv2d_entry(PyObject* original, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  Settings s{};
  if (names != nullptr || count != kArguments || way_of(args) != Way::kKernel || !parse_settings(args, s)) {
    return PyObject_Vectorcall(original, args, count, names);
  }
  const at::Tensor bias = optional_tensor(args[2]);
  at::Tensor y;
  {
    pybind11::gil_scoped_release no_gil;  // see py_conv2d
    y = forward(THPVariable_Unpack(args[0]), THPVariable_Unpack(args[1]), bias, s);
  }
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

// Replaces torch.ops.<name>.conv2d_backward.default, like py_conv2d_entry.
PyObject* py_backward_entry(PyObject* original, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  Settings s{};
  Mask wanted{};
  const bool known = names == nullptr && count == kArguments + 1 && args[2] != Py_None &&
                     way_of(args) == Way::kKernel && parse_settings(args, s) && parse_mask(args[kArguments], wanted);
  if (!known) return PyObject_Vectorcall(original, args, count, names);
  Gradients gradients;
  {
    pybind11::gil_scoped_release no_gil;  // see py_conv2d
    gradients = backward(THPVariable_Unpack(args[0]), THPVariable_Unpack(args[1]), THPVariable_Unpack(args[2]), s,
                         wanted);
  }
  const auto& [dx, dw, db] = gradients;
  return Py_BuildValue("(NNN)", THPVariable_Wrap(dx), THPVariable_Wrap(dw), THPVariable_Wrap(db));
  END_HANDLE_TH_ERRORS
}

// explain(input, weight, bias, stride, padding, dilation, groups) -> str
PyObject* py_explain(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  require_count(count, kArguments);
  Settings s{};
  TORCH_CHECK_TYPE(parse_settings(args, s), "modelnew: stride, padding and dilation are ints or pairs of ints");
  const std::string text =
      explain(required_tensor(args[0]), required_tensor(args[1]), optional_tensor(args[2]), s);
  return PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
  END_HANDLE_TH_ERRORS
}

// engine_names() -> tuple of str, in the order in which they are tried
PyObject* py_engine_names(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* names = PyTuple_New(std::size(kEngines));
  for (size_t i = 0; names != nullptr && i < std::size(kEngines); ++i) {
    PyTuple_SET_ITEM(names, static_cast<Py_ssize_t>(i), PyUnicode_FromString(kEngines[i]->name));
  }
  return names;
  END_HANDLE_TH_ERRORS
}

// force_engine(name or None) -> the name before, or None
PyObject* py_force_engine(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  require_count(count, 1);
  const Engine* const before = forced_engine.exchange(engine_named(args[0]));
  if (before == nullptr) Py_RETURN_NONE;
  return PyUnicode_FromString(before->name);
  END_HANDLE_TH_ERRORS
}

// register_operators(name, DeviceContext): registers torch.ops.<name>, see operators.h
PyObject* py_register_operators(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  require_count(count, 2);
  const char* name = PyUnicode_AsUTF8(args[0]);
  if (name == nullptr) throw python_error();
  Py_INCREF(args[1]);
  device_context = args[1];
  register_operators(name, &kCudaKernels);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

template <typename Function>
PyCFunction as_c_function(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// entries(original conv2d, original conv2d_backward) -> their replacements
PyObject* py_entries(PyObject*, PyObject* const* args, Py_ssize_t count) {
  static PyMethodDef conv2d = {"conv2d", as_c_function(py_conv2d_entry), METH_FASTCALL | METH_KEYWORDS, nullptr};
  static PyMethodDef backward = {"conv2d_backward", as_c_function(py_backward_entry), METH_FASTCALL | METH_KEYWORDS,
                                 nullptr};
  HANDLE_TH_ERRORS
  require_count(count, 2);
  return Py_BuildValue("(NN)", PyCFunction_New(&conv2d, args[0]), PyCFunction_New(&backward, args[1]));
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"conv2d", as_c_function(py_conv2d), METH_FASTCALL, nullptr},
    {"register_operators", as_c_function(py_register_operators), METH_FASTCALL, nullptr},
    {"entries", as_c_function(py_entries), METH_FASTCALL, nullptr},
    {"force_engine", as_c_function(py_force_engine), METH_FASTCALL, nullptr},
    {"explain", as_c_function(py_explain), METH_FASTCALL, nullptr},
    {"engine_names", py_engine_names, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace modelnew

#define MODELNEW_STRING_OF(name) #name
#define MODELNEW_STRING(name) MODELNEW_STRING_OF(name)
#define MODELNEW_INIT_OF(name) PyInit_##name
#define MODELNEW_INIT(name) MODELNEW_INIT_OF(name)

// TORCH_EXTENSION_NAME is defined by a -D flag of the build: the name with the digests.
PyMODINIT_FUNC MODELNEW_INIT(TORCH_EXTENSION_NAME)(void) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                   MODELNEW_STRING(TORCH_EXTENSION_NAME),
                                   nullptr,
                                   -1,
                                   modelnew::methods,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr};
  return PyModule_Create(&definition);
}
