#include "run.h"

bool modelnew::direct_has_points(const Problem&, Operator) { return false; }
bool modelnew::direct_has_stem_dgrad(const modelnew::Problem&, modelnew::Operator) { return false; }
using namespace modelnew::stem;

extern "C" {
int x_loads = 0, y_stores = 0;  // of the last run
}

// This tile (0: any) on a GPU of three SMs, as TF32 if that is allowed.
extern "C" int run_wished(int op, const int64_t* fields, void* const* pointers, const int* wishes, int seed) {
  const int tile_k = wishes[0], tile_p = wishes[1], tile_q = wishes[2];
  const Problem problem = make_problem(fields);
  Params params{};
  set_pointers(params, op, pointers);
  params.w_ptr = pointers[1];
  params.of = correlation_of_problem(problem, static_cast<Operator>(op));
  const Alignment alignment{address(params.in_ptr), address(pointers[4])};
  const Format format{element_bytes(problem.dtype), problem.dtype == DType::kFloat32 && !problem.tf32_allowed};
  if (!make_plan(params.of, format, Device{3}, alignment, params.plan, tile_k, tile_p, tile_q)) return -1;
  x_loads = params.plan.in_box ? 1 + params.plan.lines : 0, y_stores = static_cast<int>(params.plan.stores);
  return simt_run(seed, false, [&] { return run(problem.dtype, format.exact, params, nullptr); });
}
