#include "problem_fields.h"

bool modelnew::direct_has_points(const Problem&, Operator) { return false; }
using namespace modelnew;
using namespace modelnew::stem;

extern "C" {
int x_loads = 0, y_stores = 0;  // of the last run
}

// Plans this tile (0: any) on a GPU of three SMs and runs that, as TF32 if it is allowed, however small the problem: -1
// if there is no such plan, else the error.
extern "C" int run_wished(int, const int64_t* fields, void* const* pointers, const int* wishes, int seed) {
  const int tile_k = wishes[0], tile_p = wishes[1], tile_q = wishes[2];
  const Problem problem = make_problem(fields);
  Params params{};
  params.in_ptr = pointers[0];
  params.w_ptr = pointers[1];
  params.bias_ptr = pointers[2];
  params.out_ptr = pointers[4];
  params.of = correlation_of_problem(problem, Operator::kFprop);
  const Alignment address{reinterpret_cast<uint64_t>(pointers[0]), reinterpret_cast<uint64_t>(pointers[4])};
  const Format format{element_bytes(problem.dtype), problem.dtype == DType::kFloat32 && !problem.tf32_allowed};
  if (!make_plan(params.of, format, Device{3}, address, params.plan, tile_k, tile_p, tile_q)) return -1;
  x_loads = params.plan.in_box ? 1 + params.plan.lines : 0, y_stores = static_cast<int>(params.plan.stores);
  return simt_run(seed, false, [&] { return run(problem.dtype, format.exact, params, nullptr); });
}
