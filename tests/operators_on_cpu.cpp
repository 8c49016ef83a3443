// The operators with their CPU kernels, and the screening of calls as if the CPU were the GPU: a Python module for tests.
// One unit, since most of its time goes into PyTorch's headers.
#include "operators.cpp"
#include "screening.h"

namespace {

// register_operators(name)
PyObject* py_register_operators(PyObject*, PyObject* name) {
  HANDLE_TH_ERRORS
  modelnew::register_operators(PyUnicode_AsUTF8(name), /*cuda=*/nullptr);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// way(DeviceContext, *tensors or None) -> "kernel", "dispatcher" or "python"
PyObject* py_way(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  modelnew::Screening screening(c10::kCPU, PyTuple_GET_ITEM(args, 0));
  for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(args); ++i) screening.add(PyTuple_GET_ITEM(args, i));
  const char* const names[] = {"kernel", "dispatcher", "python"};
  return PyUnicode_FromString(names[static_cast<int>(screening.way())]);
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"register_operators", py_register_operators, METH_O, nullptr},
    {"way", py_way, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

#define INIT_OF(name) PyInit_##name
#define INIT(name) INIT_OF(name)

PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)(void) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "operators_on_cpu", nullptr, -1,     methods,
                                   nullptr,               nullptr,            nullptr, nullptr};
  return PyModule_Create(&definition);
}
