#include "run.h"
using namespace modelnew::wgmma;

extern "C" {
int done_again = 0, of_tiles = 0;  // of the last run with contained operands
int chunks = 0, rows_stacked = 0;  // whether the last run loads x by boxes, multiplies rows of taps as one
}

// One configuration, on a GPU of three SMs.
extern "C" int run_wished(int op, const int64_t* fields, void* const* pointers, const int* wishes, int seed) {
  const int configuration = wishes[0];
  const Problem problem = make_problem(fields);
  const Operator which = as_operator(op);
  Params params{};
  set_pointers(params, op, pointers);
  const Alignment alignment{address(params.in_ptr), address(params.out_ptr)};
  const Device device{3};
  const int bytes = element_bytes(problem.dtype);
  const Precision precision{bytes, bytes == 4 && !problem.tf32_allowed};
  Planned planned{correlation_of(problem, which), {}, {}, true, device.sms};
  const UnitCorrelation& of = planned.of;
  Plan& plan = planned.plan;
  if (!make_plan(of, precision, device, alignment, configuration, plan)) return -1;
  if (plan.contained == 1 && !plan_again(of, device, alignment, plan, planned.again)) return -1;
  Workspace workspace(workspace_layout(problem, which, planned).end);
  const int tiles = plan.tiles * plan.tiles_k;
  const bool contained = plan.contained != 0;
  chunks = plan.chunks;
  rows_stacked = stacked(plan);
  const Pointers operands{pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], workspace.data()};
  const auto launch = [&] { return run_plan({which, problem, operands, planned}, params, nullptr); };
  const int code = simt_run(seed, false, launch);
  if (contained) {
    const Control& control = *reinterpret_cast<const Control*>(workspace.data());
    done_again = control.all_again != 0 ? tiles : static_cast<int>(control.listed);
    of_tiles = tiles;
  }
  return unless_overrun(code, workspace);
}
