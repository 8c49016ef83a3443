#include "problem_fields.h"

using namespace modelnew;
using namespace modelnew::wgmma;

extern "C" {
int done_again = 0, of_tiles = 0;  // of the last run with contained operands
int chunks = 0;                    // whether the last run loads x by boxes
}

// Plans one configuration on a GPU of three SMs and runs it: -1 if it does not fit, else the error.
extern "C" int run_wished(int op, const int64_t* fields, void* const* pointers, const int* wishes, int seed) {
  const int configuration = wishes[0];
  simt::independent = true;
  simt::before_block = simt::begin_block;
  simt::between_rounds = simt::do_some;
  simt::late = seed % 2;
  simt::shuffler.seed(seed);
  const Problem problem = make_problem(fields);
  const Operator which = static_cast<Operator>(op);
  Params params{};
  params.in_ptr = which == Operator::kDgrad ? pointers[3] : pointers[0];
  params.bias_ptr = pointers[2];
  params.out_ptr = pointers[4];
  const auto address = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
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
  const Pointers operands{pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], workspace.data()};
  const int code = run_plan({which, problem, operands, planned}, params, nullptr);
  if (!workspace.intact()) return -2;
  if (contained) {
    const Control& control = *reinterpret_cast<const Control*>(workspace.data());
    done_again = control.all_again != 0 ? tiles : static_cast<int>(control.listed);
    of_tiles = tiles;
  }
  return code;
}
