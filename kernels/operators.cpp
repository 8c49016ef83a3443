// The operators conv2d and conv2d_backward: schemas, autocast, autograd, batching, and kernels for CPU and Meta.
// PyTorch's dispatcher calls these dispatch keys from top to bottom; no step enters Python.
//
//   Autocast             casts the arguments, each weight once per autocast context
//   FuncTorchBatched     PyTorch's own convolution, which has a batching rule (vmap)
//   Autograd             Forward, Backward; PyTorch's own convolution under torch.func and in forward mode
//   CUDA | CPU | Meta    kernels of binding.cpp | PyTorch's own convolution | sizes and strides only
//
// The file includes no Python and no CUDA headers, so that it compiles and is tested without a GPU and without nvcc.
#include "operators.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/convolution_backward.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#define MODELNEW_TORCH_BEFORE(minor) (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < (minor))

// aten's convolution takes symbolic strides, dilations and groups from torch 2.2 on.
#if MODELNEW_TORCH_BEFORE(2)
#define MODELNEW_INTS(values) C10_AS_INTARRAYREF_SLOW(values)
#define MODELNEW_INT(value) (value).guard_int(__FILE__, __LINE__)
#else
#define MODELNEW_INTS(values) values
#define MODELNEW_INT(value) value
#endif

namespace modelnew {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::SymInt;
using c10::SymIntArrayRef;

using Conv2d = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, SymIntArrayRef, SymIntArrayRef,
                      SymIntArrayRef, SymInt);
using Conv2dBackward = Gradients(const Tensor&, const Tensor&, const Tensor&, SymIntArrayRef, SymIntArrayRef,
                                 SymIntArrayRef, SymInt, Mask);

// The two operators in one namespace. A library may register several namespaces (a module and pasted files). A kernel
// calls the operators of its own namespace, so that no graph or cache refers to another one.
struct Operators {
  c10::TypedOperatorHandle<Conv2d> conv2d;
  c10::TypedOperatorHandle<Conv2dBackward> backward;
};

// The operators of the namespace that was registered first.
const Operators* first_operators = nullptr;

// Returns a kernel with PyTorch's signature, with the operators that it calls bound.
template <typename Result, typename... Arguments>
auto bind_operators(const Operators* operators, Result (*kernel)(const Operators*, Arguments...)) {
  return [=](Arguments... arguments) { return kernel(operators, arguments...); };
}

Tensor or_undefined(const OptionalTensor& tensor) { return tensor.has_value() ? *tensor : Tensor(); }

// PyTorch's own convolution follows, with the signatures of the operators.

// PyTorch's batching rule for a batch of weights divides by groups before any check (docs/lab/operators.md).
void require_groups(const SymInt& groups) { TORCH_CHECK(groups > 0, "non-positive groups is not supported"); }

Tensor aten_conv2d(const Tensor& x, const Tensor& w, const OptionalTensor& bias, SymIntArrayRef stride,
                   SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups) {
  require_groups(groups);
  return at::conv2d_symint(x, w, bias, MODELNEW_INTS(stride), padding, MODELNEW_INTS(dilation), MODELNEW_INT(groups));
}

Gradients aten_backward(const Tensor& dy, const Tensor& x, const Tensor& w, SymIntArrayRef stride,
                        SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups, Mask wanted) {
  require_groups(groups);
  if (x.dim() == 3) {
    auto [dx, dw, db] = aten_backward(dy.unsqueeze(0), x.unsqueeze(0), w, stride, padding, dilation, groups, wanted);
    return {wanted[0] ? dx.squeeze(0) : dx, dw, db};
  }
  const std::array<SymInt, 1> bias_size{w.sym_size(0)};
  const std::array<SymInt, 2> output_padding{0, 0};
  auto [dx, dw, db] = at::convolution_backward_symint(dy, x, w, SymIntArrayRef(bias_size), MODELNEW_INTS(stride),
                                                      padding, MODELNEW_INTS(dilation), /*transposed=*/false,
                                                      output_padding, MODELNEW_INT(groups), wanted);
  const auto or_nothing = [&](const Tensor& gradient, bool is_wanted) {
    return is_wanted ? gradient : at::empty({0}, x.options());
  };
  return {or_nothing(dx, wanted[0]), or_nothing(dw, wanted[1]), or_nothing(db, wanted[2])};
}

// CPU kernels follow: PyTorch's own convolution with the strides of the CUDA kernels.

// Returns the tensor with exactly the strides of a memory format. An unbatched tensor counts as a batch of one.
Tensor in_format(const Tensor& tensor, at::MemoryFormat format) {
  if (tensor.dim() == 3) return in_format(tensor.unsqueeze(0), format).squeeze(0);
  Tensor exact = at::empty_symint(tensor.sym_sizes(), tensor.options(), format);
  return tensor.sym_strides() == exact.sym_strides() ? tensor : exact.copy_(tensor);
}

Tensor batched(const Tensor& x) { return x.dim() == 3 ? x.unsqueeze(0) : x; }

Tensor conv2d_cpu(const Tensor& x, const Tensor& w, const OptionalTensor& bias, SymIntArrayRef stride,
                  SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return in_format(aten_conv2d(x, w, bias, stride, padding, dilation, groups), output_format(batched(x), w));
}

Gradients backward_cpu(const Tensor& dy, const Tensor& x, const Tensor& w, SymIntArrayRef stride,
                       SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups, Mask wanted) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto [dx, dw, db] = aten_backward(dy, x, w, stride, padding, dilation, groups, wanted);
  return {wanted[0] ? in_format(dx, output_format(batched(x), w)) : dx,
          wanted[1] ? in_format(dw, format_of(w)) : dw, db};
}

// Meta kernels follow: the sizes and strides of the CUDA kernels' results, without data.

Tensor conv2d_meta(const Tensor& x, const Tensor& w, const OptionalTensor& bias, SymIntArrayRef stride,
                   SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups) {
  if (!valid<SymInt>(x, w, or_undefined(bias), stride, padding, dilation, groups)) {
    return aten_conv2d(x, w, bias, stride, padding, dilation, groups);  // raises PyTorch's error
  }
  const Tensor batch = batched(x);
  const Tensor y = at::empty_symint(output_sizes<SymInt>(batch, w, stride, padding, dilation), x.options(),
                                    output_format(batch, w));
  return x.dim() == 3 ? y.squeeze(0) : y;
}

Gradients backward_meta(const Tensor&, const Tensor& x, const Tensor& w, SymIntArrayRef, SymIntArrayRef,
                        SymIntArrayRef, SymInt, Mask wanted) {
  auto [dx, dw, db] = empty_gradients<SymInt>(batched(x), w, wanted);
  return {wanted[0] && x.dim() == 3 ? dx.squeeze(0) : dx, dw, db};
}

// Autograd kernels follow.

// Returns whether torch.func or forward-mode AD is active. C++ autograd Functions support neither; PyTorch's own
// operators support both.
bool transforms_active(std::initializer_list<const Tensor*> tensors) {
  return c10::impl::tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerBackMode) ||
         std::any_of(tensors.begin(), tensors.end(),
                     [](const Tensor* tensor) { return tensor->defined() && tensor->_fw_grad(/*level=*/0).defined(); });
}

bool gradient_wanted(std::initializer_list<const Tensor*> tensors) {
  return c10::GradMode::is_enabled() &&
         std::any_of(tensors.begin(), tensors.end(),
                     [](const Tensor* tensor) { return tensor->defined() && tensor->requires_grad(); });
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Settings and operators that Forward and Backward save for their backward().
class SavedSettings {
 public:
  // Saves all values in one entry of saved_data, since each entry costs an allocation.
  static void save(AutogradContext* context, const Operators* operators, SymIntArrayRef stride, SymIntArrayRef padding,
                   SymIntArrayRef dilation, const SymInt& groups, bool has_bias) {
    std::vector<SymInt> values;
    values.reserve(9);
    for (const SymIntArrayRef pair : {stride, padding, dilation}) {
      for (const size_t axis : {0, 1}) values.push_back(on_axis(pair, axis));
    }
    values.push_back(groups);
    values.emplace_back(has_bias);
    values.emplace_back(reinterpret_cast<int64_t>(operators));
    context->saved_data["settings"] = std::move(values);
  }

  explicit SavedSettings(AutogradContext* context) : values_(list(context->saved_data["settings"])) {}

  SymIntArrayRef stride() const { return pair(0); }
  SymIntArrayRef padding() const { return pair(2); }
  SymIntArrayRef dilation() const { return pair(4); }
  const SymInt& groups() const { return values_[6]; }
  bool has_bias() const { return values_[7] != 0; }
  const Operators& operators() const {
    return *reinterpret_cast<const Operators*>(values_[8].guard_int(__FILE__, __LINE__));
  }

 private:
  // An IValue stores a list without symbolic numbers as plain integers.
  static std::vector<SymInt> list(const c10::IValue& value) {
    if (!value.isIntList()) return value.toSymIntVector();
    const std::vector<int64_t> numbers = value.toIntVector();
    return {numbers.begin(), numbers.end()};
  }

  SymIntArrayRef pair(size_t first) const { return SymIntArrayRef(values_.data() + first, 2); }

  std::vector<SymInt> values_;
};

// Computes dx, dw and db from dy, x and w, and can be differentiated itself.
struct Backward : torch::autograd::Function<Backward> {
  static constexpr bool is_traceable = true;  // for compiled autograd

  static variable_list forward(AutogradContext* context, const Operators* operators, const Tensor& dy, const Tensor& x,
                               const Tensor& w, SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                               const SymInt& groups, Mask wanted) {
    context->save_for_backward({dy, x, w});
    SavedSettings::save(context, operators, stride, padding, dilation, groups, /*has_bias=*/false);
    context->set_materialize_grads(false);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [dx, dw, db] = operators->backward.call(dy, x, w, stride, padding, dilation, groups, wanted);
    variable_list gradients{dx, dw, db}, unwanted;
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (!wanted[i]) unwanted.push_back(gradients[i]);
    }
    context->mark_non_differentiable(unwanted);
    return gradients;
  }

  // dx is bilinear in dy and w, dw is bilinear in dy and x, db is linear in dy: each derivative is a convolution again.
  static variable_list backward(AutogradContext* context, variable_list second) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &dy = saved[0], &x = saved[1], &w = saved[2], &ddx = second[0], &ddw = second[1], &ddb = second[2];
    const SavedSettings s(context);
    const auto convolve = [&](const Tensor& input, const Tensor& weight) {
      return s.operators().conv2d.call(input, weight, OptionalTensor(), s.stride(), s.padding(), s.dilation(),
                                       s.groups());
    };
    const auto differentiate = [&](const Tensor& input, const Tensor& weight, Mask wanted) {
      return s.operators().backward.call(dy, input, weight, s.stride(), s.padding(), s.dilation(), s.groups(), wanted);
    };
    Tensor grad_dy, grad_x, grad_w;
    if (context->needs_input_grad(0)) {
      const auto add = [&](const Tensor& term) { grad_dy = grad_dy.defined() ? grad_dy + term : term; };
      if (ddx.defined()) add(convolve(ddx, w));
      if (ddw.defined()) add(convolve(x, ddw));
      if (ddb.defined()) add(ddb.reshape({-1, 1, 1}).expand_as(dy));
    }
    if (context->needs_input_grad(1) && ddw.defined()) {
      grad_x = std::get<0>(differentiate(x, ddw, {true, false, false}));
    }
    if (context->needs_input_grad(2) && ddx.defined()) {
      grad_w = std::get<1>(differentiate(ddx, w, {false, true, false}));
    }
    return {{}, grad_dy, grad_x, grad_w, {}, {}, {}, {}, {}};
  }
};

struct Forward : torch::autograd::Function<Forward> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* context, const Operators* operators, const Tensor& x, const Tensor& w,
                        const OptionalTensor& bias, SymIntArrayRef stride, SymIntArrayRef padding,
                        SymIntArrayRef dilation, const SymInt& groups) {
    context->save_for_backward({x, w});
    SavedSettings::save(context, operators, stride, padding, dilation, groups, or_undefined(bias).defined());
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return operators->conv2d.call(x, w, bias, stride, padding, dilation, groups);
  }

  static variable_list backward(AutogradContext* context, variable_list dy) {
    const variable_list saved = context->get_saved_variables();
    const SavedSettings s(context);
    // needs_input_grad() tells what this backward needs, not what requires a gradient. An absent bias has no
    // index.
    const Mask wanted{context->needs_input_grad(0), context->needs_input_grad(1),
                      s.has_bias() && context->needs_input_grad(2)};
    auto [dx, dw, db] = s.operators().backward.call(dy[0], saved[0], saved[1], s.stride(), s.padding(), s.dilation(),
                                                    s.groups(), wanted);
    return {{}, wanted[0] ? dx : Tensor(), wanted[1] ? dw : Tensor(), wanted[2] ? db : Tensor(), {}, {}, {}, {}};
  }
};

Tensor conv2d_autograd(const Operators* operators, const Tensor& x, const Tensor& w, const OptionalTensor& bias,
                       SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups) {
  const Tensor b = or_undefined(bias);
  if (transforms_active({&x, &w, &b})) return aten_conv2d(x, w, bias, stride, padding, dilation, groups);
  if (gradient_wanted({&x, &w, &b})) return Forward::apply(operators, x, w, bias, stride, padding, dilation, groups);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return operators->conv2d.call(x, w, bias, stride, padding, dilation, groups);
}

Gradients backward_autograd(const Operators* operators, const Tensor& dy, const Tensor& x, const Tensor& w,
                            SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups,
                            Mask wanted) {
  if (transforms_active({&dy, &x, &w})) return aten_backward(dy, x, w, stride, padding, dilation, groups, wanted);
  if (gradient_wanted({&dy, &x, &w})) {
    const variable_list all = Backward::apply(operators, dy, x, w, stride, padding, dilation, groups, wanted);
    return {all[0], all[1], all[2]};
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return operators->backward.call(dy, x, w, stride, padding, dilation, groups, wanted);
}

// Autocast kernels. cached_cast() leaves float64 and tensors on other devices unchanged.
template <c10::DeviceType DEVICE, DispatchKey KEY>
Tensor conv2d_autocast(const Operators* operators, const Tensor& x, const Tensor& w, const OptionalTensor& bias,
                       SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups) {
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(KEY);
  const auto cast = [type = at::autocast::get_lower_precision_fp_from_device_type(DEVICE)](const auto& tensor) {
    return at::autocast::cached_cast(type, tensor, DEVICE);
  };
  return operators->conv2d.call(cast(x), cast(w), cast(bias), stride, padding, dilation, groups);
}

// The Library is never freed, since its destructor would unregister the operators.
torch::Library& library(torch::Library::Kind kind, const std::string& name, c10::optional<DispatchKey> key = {}) {
  return *new torch::Library(kind, name, key, __FILE__, __LINE__);
}

template <typename Conv2dKernel, typename BackwardKernel>
void add_kernels(const std::string& name, DispatchKey key, Conv2dKernel conv2d, BackwardKernel conv2d_backward) {
  torch::Library& kernels = library(torch::Library::IMPL, name, key);
  kernels.impl("conv2d", conv2d);
  kernels.impl("conv2d_backward", conv2d_backward);
}

// Without a compiled library, _register_operators() in modelnew.py defines the same schemas.
void define(const std::string& name) {
#if MODELNEW_TORCH_BEFORE(3)
  const std::vector<at::Tag> tags;
#else
  const std::vector<at::Tag> tags{at::Tag::needs_fixed_stride_order};  // torch.compile keeps channels_last
#endif
  const std::string settings = "SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation, SymInt groups";
  torch::Library& schemas = library(torch::Library::FRAGMENT, name);
  schemas.def(("conv2d(Tensor input, Tensor weight, Tensor? bias, " + settings + ") -> Tensor").c_str(), tags);
  schemas.def(("conv2d_backward(Tensor grad_output, Tensor input, Tensor weight, " + settings +
               ", bool[3] output_mask) -> (Tensor, Tensor, Tensor)")
                  .c_str(),
              tags);
}

}  // namespace

void register_operators(const std::string& name, const DeviceKernels* cuda) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  if (!dispatcher.findSchema({name + "::conv2d", ""}).has_value()) define(name);
  const auto conv2d = dispatcher.findSchemaOrThrow((name + "::conv2d").c_str(), "");
  const auto backward = dispatcher.findSchemaOrThrow((name + "::conv2d_backward").c_str(), "");
  const auto* const operators = new Operators{conv2d.typed<Conv2d>(), backward.typed<Conv2dBackward>()};  // never freed
  if (first_operators == nullptr) first_operators = operators;
  if (!conv2d.hasKernelForDispatchKey(DispatchKey::CPU)) {
    add_kernels(name, DispatchKey::CPU, conv2d_cpu, backward_cpu);
    add_kernels(name, DispatchKey::Meta, conv2d_meta, backward_meta);
    add_kernels(name, DispatchKey::Autograd, bind_operators(operators, conv2d_autograd),
                bind_operators(operators, backward_autograd));
    add_kernels(name, DispatchKey::FuncTorchBatched, aten_conv2d, aten_backward);
    library(torch::Library::IMPL, name, DispatchKey::AutocastCUDA)
        .impl("conv2d", bind_operators(operators, conv2d_autocast<c10::kCUDA, DispatchKey::AutocastCUDA>));
    library(torch::Library::IMPL, name, DispatchKey::AutocastCPU)
        .impl("conv2d", bind_operators(operators, conv2d_autocast<c10::kCPU, DispatchKey::AutocastCPU>));
  }
  if (cuda != nullptr && !conv2d.hasKernelForDispatchKey(DispatchKey::CUDA)) {
    add_kernels(name, DispatchKey::CUDA, cuda->conv2d, cuda->conv2d_backward);
  }
}

at::Tensor dispatch_conv2d(const at::Tensor& x, const at::Tensor& w, const OptionalTensor& bias, at::IntArrayRef stride,
                           at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  return first_operators->conv2d.call(x, w, bias, c10::fromIntArrayRefSlow(stride), c10::fromIntArrayRefSlow(padding),
                                      c10::fromIntArrayRefSlow(dilation), groups);
}

}  // namespace modelnew
