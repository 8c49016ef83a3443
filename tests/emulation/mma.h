#include "run.h"
using namespace modelnew::mma;

extern "C" {
int x_copies = 0, w_copies = 0;  // of the last run
}

// One shape of a tile on a GPU of three SMs, as TF32 if that is allowed.
extern "C" int run_wished(int op, const int64_t* fields, void* const* pointers, const int* wishes, int seed) {
  const int shape = wishes[0], hopper = wishes[1], splits = wishes[2];
  const Problem problem = make_problem(fields);
  Params params{};
  set_pointers(params, op, pointers);
  params.w_ptr = static_cast<const float*>(pointers[1]);
  params.tf32 = problem.tf32_allowed;
  params.of = correlation_of_problem(problem, as_operator(op));
  flatten_points(params.of);
  const Alignment alignment{address(params.in_ptr), address(params.w_ptr), address(params.out_ptr)};
  const Device device{3, static_cast<int>(simt::kMaxSmemBytes), hopper != 0, {}};
  if (!make_plan(params.of, params.tf32, device, alignment, params.plan, shape, splits)) return -1;
  x_copies = static_cast<int>(params.plan.x_copies), w_copies = static_cast<int>(params.plan.w_copies);
  const auto launch = [&] { return params.tf32 ? run<false>(params, nullptr) : run<true>(params, nullptr); };
  return simt_run(seed, params.plan.splits > 1, launch);
}
