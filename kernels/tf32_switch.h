// Whether PyTorch's switches allow TF32 in a convolution at this moment.
#pragma once
#include <ATen/Context.h>

#include <optional>

namespace modelnew {

// PyTorch's switch has taken no argument, a name and an enumerator in turn; from 2.9 on it raises without one where the
// switches of cuDNN's operators differ.
inline bool read_switch(bool (at::Context::*allowed)() const) { return (at::globalContext().*allowed)(); }

template <typename Name>
bool read_switch(bool (at::Context::*allowed)(Name) const) {
  return (at::globalContext().*allowed)("conv");
}

template <typename Op>
bool read_switch(bool (at::Context::*allowed)(std::optional<Op>) const) {
  return (at::globalContext().*allowed)(Op::CONV);
}

inline bool tf32_allowed() {
  return at::globalContext().userEnabledCuDNN() && read_switch(&at::Context::allowTF32CuDNN);
}

}  // namespace modelnew
