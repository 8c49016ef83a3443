#include "run.h"
IDLE(kHopperWgradEngine)
using namespace modelnew::mma_wgrad;

// A tile and a number of splits on a GPU of three SMs.
extern "C" int run_wished(int op, const int64_t* fields, void* const* pointers, const int* wishes, int seed) {
  const Problem problem = make_problem(fields);
  if (as_operator(op) != Operator::kWgrad) return -1;
  Pointers all = {pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], nullptr};
  Plan plan{};
  if (!make_plan(problem, is_aligned(all), 3, plan, {wishes[0], wishes[1], wishes[2], wishes[3]})) return -1;
  Workspace workspace(plan.splits * plan.slots * static_cast<int64_t>(sizeof(float)));
  all.workspace = workspace.data();
  const int code = simt_run(seed, false, [&] { return launch_planned(problem, all, plan, nullptr); });
  return unless_overrun(code, workspace);
}
