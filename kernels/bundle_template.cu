// Functions that a bundle's binding calls, at the end of its kernels. For given problems bundle() in modelnew.py
// defines MODELNEW_CHOSEN: for each problem, without and with TF32, the engine of each Operator. Otherwise the engine
// table decides.
#include "choice.cuh"
#include "sizes.cuh"

namespace modelnew {
namespace {

const Engine* choose(const Problem& problem, Operator op, int row) {
#if defined(MODELNEW_CHOSEN)
  static const Engine* const kChosen[][2][4] = {MODELNEW_CHOSEN};
  return kChosen[row][problem.tf32_allowed][static_cast<int>(op)];
#else
  static_cast<void>(row);
  thread_local Memo<const Engine*> memo;
  return first_of(kEngines, problem, op, memo);
#endif
}

Pointers pointers_of(const void* const* p) {
  return {p[0], p[1], p[2], p[3], const_cast<void*>(p[4]), const_cast<void*>(p[5])};
}

}  // namespace
}  // namespace modelnew

// Returns the bytes of workspace of a launch. `row` is a row of MODELNEW_CHOSEN, `sizes` are those of
// problem_of_sizes(), `pointers` are x, w, bias, y or dy, the result, and the workspace, which is not set yet.
extern "C" int64_t modelnew_workspace_bytes(int op, int row, const int64_t* sizes, const void* const* pointers) {
  using namespace modelnew;
  const Problem problem = problem_of_sizes(sizes);
  const Engine* const engine = choose(problem, static_cast<Operator>(op), row);
  return engine == nullptr ? 0 : engine->workspace_bytes(problem, static_cast<Operator>(op), pointers_of(pointers));
}

// Launches on the current device. Returns null, or the reason why it did not.
extern "C" const char* modelnew_launch(int op, int row, const int64_t* sizes, const void* const* pointers,
                                       void* stream) {
  using namespace modelnew;
  const Problem problem = problem_of_sizes(sizes);
  const Engine* const engine = choose(problem, static_cast<Operator>(op), row);
  if (engine == nullptr) return "no engine takes the problem";
  const cudaError_t error = engine->launch(static_cast<Operator>(op), problem, pointers_of(pointers),
                                           static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clear the error, or CUDA reports it again at the next launch of any library
#if defined(MODELNEW_INSTANCES)
  if (error == cudaErrorInvalidConfiguration)
    return "this file lacks a kernel that a GPU with this number of SMs needs; write it anew on this GPU";
#endif
  return cudaGetErrorString(error);
}
