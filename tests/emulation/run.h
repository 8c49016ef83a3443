// Shared by the entry points around an engine's kernels. Each has
//
//   int run_wished(int op, const int64_t* fields, void* const* pointers, const int* wishes, int seed)
//
// which plans as wished and runs that, however small the problem: -1 if there is no such plan, -2 if something was
// written around the workspace, else the error. Pointers: x, w, bias, dy and what is written. At odd seeds copies and
// products come late.
#pragma once
#include "problem_fields.h"

using namespace modelnew;

inline Operator as_operator(int op) { return static_cast<Operator>(op); }
inline uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }
inline int unless_overrun(int code, Workspace& workspace) { return code == 0 && !workspace.intact() ? -2 : code; }

// Sets what all engines' parameters have.
template <typename Params>
void set_pointers(Params& params, int op, void* const* pointers) {
  const auto set = [](auto& pointer, void* to) { pointer = static_cast<std::decay_t<decltype(pointer)>>(to); };
  set(params.in_ptr, as_operator(op) == Operator::kDgrad ? pointers[3] : pointers[0]);
  set(params.bias_ptr, pointers[2]);
  set(params.out_ptr, pointers[4]);
}

// An engine that takes nothing.
inline const char* refuse_all(const Problem&, Operator) { return "everything"; }
#define IDLE(name) const Engine modelnew::name{#name, refuse_all, nullptr, nullptr, nullptr};
