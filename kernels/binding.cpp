// Between PyTorch and the engines: checks, engine table, output tensors and workspace. The only file that knows torch.
//
//   conv2d()  screen -> arguments -> forward()      eager calls; answers None or False where Python has to do more
//   forward()            check -> Problem -> launch  below autograd
//   backward()           check -> Problem -> launch  below autograd, one launch per wanted gradient
//
// A CPython module by hand instead of pybind11's binding layer, with METH_FASTCALL and hand-written argument parsing:
// small convolutions live on the host time of a call (bench.py --host).
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/python_variable.h>  // HANDLE_TH_ERRORS comes along

#include <array>
#include <limits>
#include <optional>
#include <string>

#include "choice.cuh"
#include "engines.cuh"

namespace modelnew {
namespace {

// Tried in this order: the first engine that neither refuses a problem nor yields it to a later one runs it; the last
// one takes everything.
const Engine* const kEngines[] = {&kPatchesEngine, &kDilatedEngine,   &kTmaEngine,       &kWgmmaEngine,
                                  &kGatherEngine,  &kStemEngine,      &kDepthwiseEngine, &kPointwiseEngine,
                                  &kMmaEngine,     &kStridedEngine,   &kTmaWgradEngine,  &kWgradEngine,
                                  &kDirectEngine};

using Pair = std::array<int64_t, 2>;

// What a call says besides its tensors.
struct Settings {
  Pair stride, padding, dilation;
  int64_t groups;
  bool tf32_allowed;
  const Engine* forced;  // null: the table decides
};

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

// ---- Text ----
//
// No streams: a toolchain that links libstdc++ into every library (g++ -static-libstdc++, seen on one of our machines)
// leaves two copies of it in the process, and a number sent to a stream crashes between them.

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

// ---- Checks ----

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
  // Unequal dtypes are a mix-up, which PyTorch words itself.
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

// Everything larger would overflow the ints of a Problem, or the int64 arithmetic on them.
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

int64_t output_size(int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  return (size + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
}

bool valid_axis(int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  return size > 0 && kernel > 0 && stride > 0 && dilation > 0 && padding >= 0 &&
         size + 2 * padding >= dilation * (kernel - 1) + 1;
}

// Whether this is a convolution at all. It says nothing about why not: PyTorch does, see result_of_pytorch().
bool valid(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias, const Settings& s) {
  if ((x.dim() != 4 && x.dim() != 3) || w.dim() != 4 || s.groups <= 0) return false;
  const int64_t C = x.size(-3), K = w.size(0);
  const bool one_kind = x.scalar_type() == w.scalar_type() && x.device() == w.device() && x.is_cuda();
  const bool channels = C > 0 && K > 0 && C == w.size(1) * s.groups && K % s.groups == 0;
  const bool bias_fits = !bias.defined() || (bias.dim() == 1 && bias.size(0) == K &&
                                             bias.scalar_type() == x.scalar_type() && bias.device() == x.device());
  return one_kind && channels && bias_fits &&
         valid_axis(x.size(-2), w.size(2), s.stride[0], s.padding[0], s.dilation[0]) &&
         valid_axis(x.size(-1), w.size(3), s.stride[1], s.padding[1], s.dilation[1]);
}

// For arguments that are not valid(): PyTorch's own operator on the very same ones, so that the type and the wording
// of the error are those of the PyTorch at hand. What PyTorch accepts all the same is its result if that is empty.
at::Tensor result_of_pytorch(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias, const Settings& s) {
  at::Tensor y = at::conv2d(x, w, bias, s.stride, s.padding, s.dilation, s.groups);
  TORCH_CHECK_NOT_IMPLEMENTED(y.numel() == 0,
                              concatenate("modelnew: conv2d has no kernel for ", describe_call(x, w, bias, s)));
  return y;
}

// ---- Problem ----

void copy_strides(const at::Tensor& tensor, int64_t (&strides)[4]) {
  for (int axis = 0; axis < 4; ++axis) strides[axis] = tensor.stride(axis);
}

// The problem of valid arguments with a batch dimension; `y` is the output or its gradient.
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
  problem.tf32_allowed = s.tf32_allowed;
  return problem;
}

// [N, K, P, Q] of valid arguments with a batch dimension.
std::array<int64_t, 4> output_sizes(const at::Tensor& x, const at::Tensor& w, const Settings& s) {
  return {x.size(0), w.size(0), output_size(x.size(2), w.size(2), s.stride[0], s.padding[0], s.dilation[0]),
          output_size(x.size(3), w.size(3), s.stride[1], s.padding[1], s.dilation[1])};
}

// PyTorch's rule for the output of a convolution: channels_last if the input or the weight is, but not in float64.
at::MemoryFormat output_format(const at::Tensor& x, const at::Tensor& w) {
  const bool channels_last = x.suggest_memory_format() == at::MemoryFormat::ChannelsLast ||
                             w.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  return channels_last && x.scalar_type() != at::kDouble ? at::MemoryFormat::ChannelsLast
                                                         : at::MemoryFormat::Contiguous;
}

// ---- Engines ----

const Engine& engine_for(const Problem& problem, Operator op, const Engine* forced) {
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

// Runs one operator on the device's current stream. The workspace goes back to torch's allocator at once: it hands the
// memory out again only to work that is queued behind this launch on the same stream.
void launch(Operator op, const Problem& problem, Pointers pointers, const at::TensorOptions& options,
            const Engine* forced) {
  const Engine& engine = engine_for(problem, op, forced);
  at::Tensor workspace;
  if (const int64_t bytes = engine.workspace_bytes(problem, op, pointers); bytes > 0) {
    workspace = at::empty({bytes}, options.dtype(at::kByte));
    pointers.workspace = workspace.data_ptr();
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(options.device().index());
  const cudaError_t error = engine.launch(op, problem, pointers, stream);
  if (error == cudaSuccess) return;
  cudaGetLastError();  // forget it, or CUDA reports it once more at somebody else's next launch
  TORCH_CHECK(false, concatenate("modelnew: engine '", engine.name, "' failed in the ", name_of(op), " of ",
                                 describe_problem(problem), ": ", cudaGetErrorString(error)));
}

// The engines read the bias as one run of K elements.
at::Tensor packed_bias(const at::Tensor& bias) { return bias.defined() ? bias.contiguous() : bias; }

at::Tensor forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias, const Settings& s) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  require_served_dtype(x, w, bias);
  require_int_range(x, w, bias, s);
  if (!valid(x, w, bias, s)) return result_of_pytorch(x, w, bias, s);
  if (x.dim() == 3) return forward(x.unsqueeze(0), w, bias, s).squeeze(0);

  const c10::cuda::CUDAGuard device_guard(x.device());
  at::Tensor y = at::empty(output_sizes(x, w, s), x.options(), output_format(x, w));
  if (y.numel() == 0) return y;
  const at::Tensor bias_run = packed_bias(bias);
  Pointers pointers{};
  pointers.x = x.const_data_ptr();
  pointers.w = w.const_data_ptr();
  pointers.bias = bias_run.defined() ? bias_run.const_data_ptr() : nullptr;
  pointers.out = y.data_ptr();
  launch(Operator::kFprop, problem_of(x, w, y, s), pointers, x.options(), s.forced);
  return y;
}

struct Gradients {
  at::Tensor dx, dw, db;  // undefined where not wanted
};

void require_output_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w, const Settings& s) {
  const at::Tensor no_bias;
  TORCH_CHECK(valid(x, w, no_bias, s),
              concatenate("modelnew: conv2d's backward got invalid arguments: ", describe_call(x, w, no_bias, s)));
  const auto expected = output_sizes(x.dim() == 3 ? x.unsqueeze(0) : x, w, s);
  const at::IntArrayRef sizes = at::IntArrayRef(expected).slice(x.dim() == 3 ? 1 : 0);
  TORCH_CHECK(dy.sizes() == sizes && dy.scalar_type() == x.scalar_type() && dy.device() == x.device(),
              concatenate("modelnew: conv2d's backward expected a gradient of size ", sizes, ", ", x.scalar_type(),
                          " on ", x.device(), ", but got ", dy.sizes(), ", ", dy.scalar_type(), " on ", dy.device()));
}

Gradients gradients_of_nothing(const at::Tensor& x, const at::Tensor& w, const std::array<bool, 3>& wanted) {
  Gradients gradients;
  if (wanted[0]) gradients.dx = at::empty(x.sizes(), x.options(), x.suggest_memory_format()).zero_();
  if (wanted[1]) gradients.dw = at::empty(w.sizes(), w.options(), w.suggest_memory_format()).zero_();
  if (wanted[2]) gradients.db = at::empty({w.size(0)}, w.options()).zero_();
  return gradients;
}

Gradients backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w, const Settings& s,
                   const std::array<bool, 3>& wanted) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor no_bias;
  require_served_dtype(x, w, no_bias);
  require_int_range(x, w, no_bias, s);
  if (x.numel() == 0 || w.numel() == 0) return gradients_of_nothing(x, w, wanted);
  require_output_gradient(dy, x, w, s);
  if (x.dim() == 3) {
    Gradients gradients = backward(dy.unsqueeze(0), x.unsqueeze(0), w, s, wanted);
    if (wanted[0]) gradients.dx = gradients.dx.squeeze(0);
    return gradients;
  }

  const c10::cuda::CUDAGuard device_guard(x.device());
  Gradients gradients;
  // The strides of a Problem are those of the gradient where an operator writes one in place of reading x or w.
  const auto compute = [&](Operator op, const at::Tensor& out, const at::Tensor& as_x, const at::Tensor& as_w) {
    Pointers pointers{};
    if (op == Operator::kWgrad) pointers.x = x.const_data_ptr();
    if (op == Operator::kDgrad) pointers.w = w.const_data_ptr();
    pointers.dy = dy.const_data_ptr();
    pointers.out = out.data_ptr();
    launch(op, problem_of(as_x, as_w, dy, s), pointers, x.options(), s.forced);
  };
  if (wanted[0]) {
    gradients.dx = at::empty(x.sizes(), x.options(), x.suggest_memory_format());
    compute(Operator::kDgrad, gradients.dx, gradients.dx, w);
  }
  if (wanted[1]) {
    gradients.dw = at::empty(w.sizes(), w.options(), w.suggest_memory_format());
    compute(Operator::kWgrad, gradients.dw, x, gradients.dw);
  }
  if (wanted[2]) {
    gradients.db = at::empty({w.size(0)}, w.options());
    compute(Operator::kBgrad, gradients.db, x, w);
  }
  return gradients;
}

// ---- explain() ----

const char* contract_of(const Problem& problem, Operator op) {
  if (problem.dtype != DType::kFloat32) return "operands as they are";
  if (uses_tf32(problem, op)) return "tf32, as PyTorch's switch allows";
  if (!problem.tf32_allowed) return "fp32, as PyTorch's switch demands";
  return "fp32, because the problem is small or C/groups or K/groups below 8";
}

std::string explain_operator(const Problem& problem, Operator op, const Engine* forced) {
  const Engine& chosen = engine_for(problem, op, forced);
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
  if (!valid(x, w, bias, s)) {
    result_of_pytorch(x, w, bias, s);
    return "the output has no elements: nothing is launched\n";
  }
  if (x.dim() == 3) return explain(x.unsqueeze(0), w, bias, s);
  if (x.size(0) == 0) return "the batch is empty: nothing is launched\n";
  // Only the strides of y matter here; a meta tensor has them without memory.
  const at::Tensor y = at::empty(output_sizes(x, w, s), x.options().device(at::kMeta), output_format(x, w));
  const Problem problem = problem_of(x, w, y, s);
  std::string text = concatenate(describe_problem(problem), ", ", x.scalar_type(), "\n");
  for (Operator op : {Operator::kFprop, Operator::kDgrad, Operator::kWgrad}) {
    text += explain_operator(problem, op, s.forced);
  }
  if (bias.defined()) text += explain_operator(problem, Operator::kBgrad, s.forced);
  return text;
}

// ---- Arguments from Python ----

bool parse_int(PyObject* object, int64_t& value) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

// An int for both axes, or a tuple or list of one or two.
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

// stride, padding, dilation, groups as PyTorch's conv2d takes them, then tf32_allowed and forced_engine.
constexpr Py_ssize_t kSettings = 6;

bool parse_settings(PyObject* const* args, Settings& s) {
  if (!parse_pair(args[0], s.stride) || !parse_pair(args[1], s.padding) || !parse_pair(args[2], s.dilation) ||
      !parse_int(args[3], s.groups)) {
    return false;
  }
  s.tf32_allowed = args[4] == Py_True;
  s.forced = engine_named(args[5]);
  return true;
}

void require_count(Py_ssize_t received, Py_ssize_t expected) {
  TORCH_CHECK_TYPE(received == expected, concatenate("modelnew: expected ", static_cast<int64_t>(expected),
                                                     " arguments, but got ", static_cast<int64_t>(received)));
}

Settings required_settings(PyObject* const* args) {
  Settings settings{};
  TORCH_CHECK_TYPE(parse_settings(args, settings), "modelnew: stride, padding and dilation are ints or pairs of ints");
  return settings;
}

const at::Tensor& required_tensor(PyObject* object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object),
                   concatenate("modelnew: expected a tensor, but got ", Py_TYPE(object)->tp_name));
  return THPVariable_Unpack(object);
}

at::Tensor optional_tensor(PyObject* object) { return object == Py_None ? at::Tensor() : required_tensor(object); }

PyObject* wrap(const at::Tensor& tensor) {
  if (tensor.defined()) return THPVariable_Wrap(tensor);
  Py_RETURN_NONE;
}

// ---- The short way in ----

enum class Screen { kPlain, kNeedsAutograd, kExotic };

// Whether a call may skip PyTorch's dispatcher. One comparison decides: the dispatch keys of the tensors and of this
// thread hold nothing but those of plain CUDA tensors. Whatever PyTorch has or will have besides (Python modes and
// subclasses, functorch, autocast, tracing, fake, functional, batched, conjugate, sparse or quantized tensors, another
// device) shows as a further key, so that it is turned away without being named here. The profiler is none of these: it
// sees the kernels of such a call, but no operator.
class Screening {
 public:
  void add(PyObject* object) {
    if (object == Py_None) return;
    if (!THPVariable_CheckExact(object)) {
      exotic_ = true;
      return;
    }
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (!tensor.defined() || !tensor.is_cuda() || tensor._fw_grad(/*level=*/0).defined()) {
      exotic_ = true;
      return;
    }
    keys_ = keys_ | tensor.key_set();
    requires_grad_ = requires_grad_ || tensor.requires_grad();
  }

  Screen verdict() const {
    if (exotic_ || at::impl::torch_function_mode_enabled()) return Screen::kExotic;
    const c10::impl::LocalDispatchKeySet thread = c10::impl::tls_local_dispatch_key_set();
    c10::DispatchKeySet keys = (keys_ | thread.included_) - thread.excluded_;
    if ((keys.raw_repr() & ~plain_keys()) != 0) return Screen::kExotic;
    const bool above_autograd = keys.has(c10::DispatchKey::AutogradFunctionality);
    const bool autograd = above_autograd && requires_grad_ && c10::GradMode::is_enabled();
    return autograd ? Screen::kNeedsAutograd : Screen::kPlain;
  }

 private:
  static uint64_t plain_keys() {
    static const uint64_t keys =
        c10::DispatchKeySet({c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCUDA, c10::DispatchKey::ADInplaceOrView,
                             c10::DispatchKey::BackendSelect})
            .raw_repr();
    return keys;
  }

  c10::DispatchKeySet keys_;
  bool exotic_ = false;
  bool requires_grad_ = false;
};

// ---- Python functions ----

// An allocation or a launch may wait for the GPU, and what the GPU waits for may need the GIL. The caller's references
// keep the tensors alive meanwhile.
at::Tensor forward_without_gil(PyObject* const* args, const Settings& settings) {
  const at::Tensor &x = required_tensor(args[0]), &w = required_tensor(args[1]);
  const at::Tensor bias = optional_tensor(args[2]);
  pybind11::gil_scoped_release no_gil;
  return forward(x, w, bias, settings);
}

// conv2d(input, weight, bias, *settings) -> Tensor; None: not for the short way; False: needs autograd.
PyObject* py_conv2d(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  require_count(count, 3 + kSettings);
  if (args[0] == Py_None || args[1] == Py_None) Py_RETURN_NONE;
  Screening screening;
  for (int i = 0; i < 3; ++i) screening.add(args[i]);
  const Screen verdict = screening.verdict();
  Settings settings{};
  if (verdict == Screen::kExotic || !parse_settings(args + 3, settings)) Py_RETURN_NONE;
  if (verdict == Screen::kNeedsAutograd) Py_RETURN_FALSE;
  return wrap(forward_without_gil(args, settings));
  END_HANDLE_TH_ERRORS
}

// plain(*tensors) -> bool: whether forward() and backward() may take these without PyTorch's dispatcher.
PyObject* py_plain(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Screening screening;
  for (Py_ssize_t i = 0; i < count; ++i) screening.add(args[i]);
  return PyBool_FromLong(screening.verdict() == Screen::kPlain);
  END_HANDLE_TH_ERRORS
}

// forward(input, weight, bias, *settings) -> Tensor
PyObject* py_forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  require_count(count, 3 + kSettings);
  return wrap(forward_without_gil(args, required_settings(args + 3)));
  END_HANDLE_TH_ERRORS
}

// backward(grad_output, input, weight, *settings, need_dx, need_dw, need_db) -> (dx, dw, db), None where not needed
PyObject* py_backward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  require_count(count, 3 + kSettings + 3);
  std::array<bool, 3> wanted{};
  for (int i = 0; i < 3; ++i) wanted[i] = args[3 + kSettings + i] == Py_True;
  const Settings settings = required_settings(args + 3);
  const at::Tensor &dy = required_tensor(args[0]), &x = required_tensor(args[1]), &w = required_tensor(args[2]);
  Gradients gradients;
  {
    pybind11::gil_scoped_release no_gil;  // see forward_without_gil
    gradients = backward(dy, x, w, settings, wanted);
  }
  return Py_BuildValue("(NNN)", wrap(gradients.dx), wrap(gradients.dw), wrap(gradients.db));
  END_HANDLE_TH_ERRORS
}

// explain(input, weight, bias, *settings) -> str
PyObject* py_explain(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  require_count(count, 3 + kSettings);
  const std::string text = explain(required_tensor(args[0]), required_tensor(args[1]), optional_tensor(args[2]),
                                   required_settings(args + 3));
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

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyCFunction as_c_function(FastFunction function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"conv2d", as_c_function(py_conv2d), METH_FASTCALL, nullptr},
    {"plain", as_c_function(py_plain), METH_FASTCALL, nullptr},
    {"forward", as_c_function(py_forward), METH_FASTCALL, nullptr},
    {"backward", as_c_function(py_backward), METH_FASTCALL, nullptr},
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

// TORCH_EXTENSION_NAME is load_inline's -D flag: the name that carries the digest of the build.
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
