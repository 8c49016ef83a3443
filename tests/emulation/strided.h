// What the strided engine gives its parts to: one that takes no stride, and does the rest as direct.

#include "idle_engines.h"

extern "C" {
int parts_launched = 0;  // so far
}
namespace modelnew {
static const char* refuse_strides(const Problem& problem, Operator) {
  return problem.stride_h > 1 || problem.stride_w > 1 || problem.pad_h < 0 || problem.pad_w < 0 ? "a stride" : nullptr;
}
static cudaError_t launch_part(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  ++parts_launched;
  return direct::launch(op, problem, pointers, stream);
}
const Engine kDilatedEngine{"dilated", refuse_all, nullptr, nullptr, nullptr};
const Engine kWgmmaEngine{"wgmma", refuse_all, nullptr, nullptr, nullptr};
const Engine kGatherEngine{"gather", refuse_strides, direct::workspace_bytes, launch_part, direct::describe};
const Engine kStemEngine{"stem", refuse_all, nullptr, nullptr, nullptr};
const Engine kMmaEngine{"mma", refuse_all, nullptr, nullptr, nullptr};
}  // namespace modelnew
extern "C" const char* strided_yields(int op, const int64_t* fields) {
  return modelnew::strided::yields(make_problem(fields), as_operator(op));
}
