#include "run.h"

IDLE(kHopperWgradEngine) IDLE(kDirectEngine)
using namespace modelnew::tma_wgrad;

// This tile in so many parts (0: any), on a GPU of three SMs.
extern "C" int run_wished(int, const int64_t* fields, void* const* pointers, const int* wishes, int seed) {
  const int channels = wishes[0], blocks = wishes[1], parts = wishes[2];
  const Problem problem = make_problem(fields);
  Plan plan;
  if (!make_plan(problem, 3, {address(pointers[0]), address(pointers[3])}, plan, channels, blocks, parts)) return -1;
  Workspace workspace(sum_bytes(plan) + copied_bytes(problem, plan));
  const Pointers all = {pointers[0], nullptr, nullptr, pointers[3], pointers[4], workspace.data()};
  const int code = simt_run(seed, false, [&] {
    return problem.dtype == DType::kFloat16 ? run<Half>(problem, plan, all, nullptr)
                                            : run<BFloat16>(problem, plan, all, nullptr);
  });
  return unless_overrun(code, workspace);
}
