#include "run.h"

IDLE(kMmaWgradEngine) IDLE(kDirectEngine)
const Engine modelnew::kHopperWgradEngine{"hopper_wgrad", refuse_all, hopper_wgrad::workspace_bytes,
                                          hopper_wgrad::launch, nullptr};
using namespace modelnew::tma_wgrad;

extern "C" {
int done = 1;  // by the latest run: 0 if hopper_wgrad computed dw, as operands did not fit into scaled fp16
int listed = 0;  // in the latest run: values that did not
}

// This tile in so many parts (0: any), on a GPU of three SMs.
extern "C" int run_wished(int op, const int64_t* fields, void* const* pointers, const int* wishes, int seed) {
  const int channels = wishes[0], blocks = wishes[1], parts = wishes[2];
  const Problem problem = make_problem(fields);
  Plan plan;
  const bool contained = problem.dtype == DType::kFloat32;
  if (contained ? !make_contained_plan(problem, 3, plan, channels, blocks, parts)
               : !make_plan(problem, 3, {address(pointers[0]), address(pointers[3])}, plan, channels, blocks, parts))
    return -1;
  Pointers all = {pointers[0], nullptr, nullptr, pointers[3], pointers[4], nullptr};
  Workspace workspace(bytes_of(problem, as_operator(op), plan, all));
  all.workspace = workspace.data();
  const int code = simt_run(seed, false, [&] {
    return contained                           ? run_contained(as_operator(op), problem, plan, all, nullptr)
           : problem.dtype == DType::kFloat16 ? run<Half>(problem, plan, all, nullptr)
                                               : run<BFloat16>(problem, plan, all, nullptr);
  });
  if (contained) {
    const GuardLayout& guard = *reinterpret_cast<const GuardLayout*>(workspace.data());
    done = guard.done;
    listed = static_cast<int>(guard.control[0].listed + guard.control[1].listed);
  }
  return unless_overrun(code, workspace);
}
