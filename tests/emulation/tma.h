#include "run.h"

IDLE(kWgmmaEngine) IDLE(kGatherEngine) IDLE(kDirectEngine) IDLE(kStemEngine)
using namespace modelnew::tma;

extern "C" {
int way = 0;  // of the last run: by columns, by windows, of planes as they are; and whether planes are copied
}

// This tile, way and number of blocks a tile (-1: any), on a GPU of three SMs, whose blocks have several tiles each, or
// of many.
extern "C" int run_wished(int op, const int64_t* fields, void* const* pointers, const int* wishes, int seed) {
  const int shape = wishes[0], windows = wishes[1], splits = wishes[2], direct = wishes[3];
  const Problem problem = make_problem(fields);
  const Operator which = as_operator(op);
  Params params{};
  set_pointers(params, op, pointers);
  if (which == Operator::kDgrad) params.bias_ptr = nullptr;
  params.of = grouped(correlation_of_problem(problem, which));
  const Alignment alignment{address(params.in_ptr), address(pointers[1]), address(params.out_ptr)};
  const int sms = splits > 1 ? 64 : 3;
  if (!make_plan(params.of, sms, alignment, params.plan, {shape, windows, splits, direct})) return -1;
  const Plan plan = params.plan;
  way = (plan.direct ? 2 : plan.windows) + 4 * plan.copied;
  Workspace workspace(packed_bytes(params.of, plan) + copied_bytes(params.of, plan));
  const int code = simt_run(seed, plan.splits > 1, [&] {
    Params once = params;
    return run<Half>(pointers[1], workspace.data(), once, nullptr);  // that of bfloat16 is the same code
  });
  return unless_overrun(code, workspace);
}
