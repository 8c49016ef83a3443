// Reads PyTorch's switches for TF32 in convolutions.
#pragma once
#include <ATen/Context.h>

#include <optional>

namespace modelnew {

// Versions of allowTF32CuDNN() take no argument, a name or an enumerator. From torch 2.9 on, a call without an argument
// raises if the switches of cuDNN's operators differ.
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
