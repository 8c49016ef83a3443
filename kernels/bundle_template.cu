// The end of a bundle's kernels: what its Python code calls through ctypes. bundle() in modelnew.py defines, before all
// else, MODELNEW_CHOSEN: for each problem that the bundle is for, with TF32 not allowed and allowed, the engine of each
// Operator. Without it the table of all engines is asked.
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

}  // namespace
}  // namespace modelnew

#define MODELNEW_EXPORTED extern "C" __attribute__((visibility("default")))

// `row`: of MODELNEW_CHOSEN; `sizes`: as problem_of_sizes() has them; `pointers`: without the workspace.
MODELNEW_EXPORTED int64_t modelnew_workspace_bytes(int op, int row, const int64_t* sizes,
                                                   const modelnew::Pointers* pointers) {
  using namespace modelnew;
  const Problem problem = problem_of_sizes(sizes);
  const Engine* const engine = choose(problem, static_cast<Operator>(op), row);
  return engine == nullptr ? 0 : engine->workspace_bytes(problem, static_cast<Operator>(op), *pointers);
}

// Launches on the current device; null, or why it did not.
MODELNEW_EXPORTED const char* modelnew_launch(int op, int row, const int64_t* sizes,
                                              const modelnew::Pointers* pointers, cudaStream_t stream) {
  using namespace modelnew;
  const Problem problem = problem_of_sizes(sizes);
  const Engine* const engine = choose(problem, static_cast<Operator>(op), row);
  if (engine == nullptr) return "no engine takes the problem";
  const cudaError_t error = engine->launch(static_cast<Operator>(op), problem, *pointers, stream);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // else CUDA reports it once more at somebody's next launch
  return cudaGetErrorString(error);
}
