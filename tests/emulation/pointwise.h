#include "run.h"
using namespace modelnew::pointwise;

extern "C" {
int loads = 0, out_vector = 0, stage_terms = 0;  // of the last run
}

// Stages or none, this many rows, splits and slices (-1, -1, -1 and 0: any) on a GPU of three SMs, as TF32 if that is
// allowed.
extern "C" int run_wished(int, const int64_t* fields, void* const* pointers, const int* wishes, int seed) {
  const int staged = wishes[0], row_bits = wishes[1], split_bits = wishes[2], slices = wishes[3];
  const Problem problem = make_problem(fields);
  const Correlation of = flattened(problem);
  const Alignment alignment{address(pointers[0]), address(pointers[1]), address(pointers[4])};
  Plan plan{};
  const Device device{3, true, 232448};
  if (!make_plan(of, !problem.tf32_allowed, device, alignment, plan, staged, row_bits, split_bits, slices)) return -1;
  loads = static_cast<int>(plan.loads), out_vector = plan.out_vector, stage_terms = plan.stage_terms;
  Params params = make_params(of, plan);
  params.x_ptr = static_cast<const float*>(pointers[0]);
  params.w_ptr = static_cast<const float*>(pointers[1]);
  params.bias_ptr = static_cast<const float*>(pointers[2]);
  params.out_ptr = static_cast<float*>(pointers[4]);
  const auto may_read = [](const float* from, const int64_t (&stride)[4], int64_t a, int64_t b, int64_t c, int64_t d) {
    const int64_t last = (a - 1) * stride[0] + (b - 1) * stride[1] + (c - 1) * stride[2] + (d - 1) * stride[3];
    simt::readable.push_back({reinterpret_cast<const char*>(from), reinterpret_cast<const char*>(from + last + 1)});
  };
  simt::readable.clear();
  may_read(params.x_ptr, problem.x_stride, problem.N, problem.C, problem.H, problem.W);
  may_read(params.w_ptr, problem.w_stride, problem.K, problem.C, 1, 1);
  if (params.bias_ptr != nullptr) may_read(params.bias_ptr, {1, 0, 0, 0}, problem.K, 1, 1, 1);
  const auto launch = [&] {
    return problem.tf32_allowed ? run<false>(params, nullptr) : run<true>(params, nullptr);
  };
  return simt_run(seed, plan.split_bits > 0, launch);
}
