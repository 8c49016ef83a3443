// Decides whether a call from Python may skip PyTorch's dispatcher.
//
//   kKernel      plain GPU tensors without gradients: run a kernel directly
//   kDispatcher  gradients, autocast, torch.func, dispatch modes, mixed devices: call the operator
//   kPython      tensor subclasses and function modes, which must see torch.conv2d, and tensors not on the device:
//                return to Python
#pragma once
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>  // includes HANDLE_TH_ERRORS

namespace modelnew {

enum class Way { kKernel, kDispatcher, kPython };

// A call is plain if the dispatch keys of its tensors and of the thread are only those of plain tensors of the device.
// Any other feature of PyTorch, also a future one, adds a key and leads to the operator. The profiler adds no key: it
// records the kernels of a plain call, but no operator.
class Screening {
 public:
  // `device_context`: torch.utils._device.DeviceContext.
  Screening(c10::DeviceType device, PyObject* device_context) : device_(device), device_context_(device_context) {}

  // Adds an argument: a tensor or None.
  void add(PyObject* object) {
    if (object == Py_None) return;
    if (!THPVariable_CheckExact(object)) {
      exact_ = false;
      return;
    }
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (!tensor.defined()) {
      exact_ = false;
      return;
    }
    on_device_ = on_device_ || tensor.device().type() == device_;
    differentiable_ = differentiable_ || tensor.requires_grad();
    has_tangent_ = has_tangent_ || tensor._fw_grad(/*level=*/0).defined();
    keys_ = keys_ | tensor.key_set();
  }

  Way way() const {
    if (!exact_ || !on_device_ || function_mode_active()) return Way::kPython;
    const c10::impl::LocalDispatchKeySet thread = c10::impl::tls_local_dispatch_key_set();
    c10::DispatchKeySet keys = (keys_ | thread.included_) - thread.excluded_;
    const bool gradient_wanted = differentiable_ && c10::GradMode::is_enabled() &&
                                 keys.has(c10::DispatchKey::AutogradFunctionality);
    const bool plain = (keys.raw_repr() & ~plain_keys().raw_repr()) == 0;
    return plain && !gradient_wanted && !has_tangent_ ? Way::kKernel : Way::kDispatcher;
  }

 private:
  // `with torch.device(...)` and torch.set_default_device() are function modes that change factories only.
  bool function_mode_active() const {
    if (!at::impl::torch_function_mode_enabled()) return false;
    for (int64_t i = 0; i < at::impl::PythonTorchFunctionTLS::stack_len(); ++i) {
      PyObject* mode = at::impl::PythonTorchFunctionTLS::get_stack_at(i)->ptr(getPyInterpreter());
      if (reinterpret_cast<PyObject*>(Py_TYPE(mode)) != device_context_) return true;
    }
    return false;
  }

  c10::DispatchKeySet plain_keys() const {
    using c10::DispatchKey;
    const auto backend = device_ == c10::kCUDA ? c10::BackendComponent::CUDABit : c10::BackendComponent::CPUBit;
    return c10::DispatchKeySet({DispatchKey::Dense, DispatchKey::AutogradFunctionality, DispatchKey::ADInplaceOrView,
                                DispatchKey::BackendSelect}) |
           c10::DispatchKeySet(backend);
  }

  const c10::DeviceType device_;
  PyObject* const device_context_;
  c10::DispatchKeySet keys_;
  bool exact_ = true;
  bool on_device_ = false;
  bool differentiable_ = false;
  bool has_tangent_ = false;
};

}  // namespace modelnew
