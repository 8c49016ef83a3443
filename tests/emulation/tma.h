#include "problem_fields.h"

namespace modelnew {
static const char* refuse_all(const Problem&, Operator) { return "everything"; }
const Engine kWgmmaEngine{"wgmma", refuse_all, nullptr, nullptr, nullptr};
const Engine kGatherEngine{"gather", refuse_all, nullptr, nullptr, nullptr};
const Engine kDirectEngine{"direct", refuse_all, nullptr, nullptr, nullptr};
}  // namespace modelnew
using namespace modelnew;
using namespace modelnew::tma;

extern "C" {
int way = 0;  // of the last run: by columns, by windows, of planes as they are; and whether planes are copied
}

// Plans this tile, way, number of blocks a tile (-1: any) and runs it: on a GPU of three SMs, whose blocks have several
// tiles each, or of many. -1 if there is no such plan, else the error.
extern "C" int run_wished(int op, const int64_t* fields, void* const* pointers, const int* wishes, int seed) {
  const int shape = wishes[0], windows = wishes[1], splits = wishes[2], direct = wishes[3];
  const Problem problem = make_problem(fields);
  const Operator which = static_cast<Operator>(op);
  Params params{};
  params.in_ptr = which == Operator::kDgrad ? pointers[3] : pointers[0];
  params.bias_ptr = which == Operator::kDgrad ? nullptr : pointers[2];
  params.out_ptr = pointers[4];
  params.of = grouped(correlation_of_problem(problem, which));
  const auto address = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  const Alignment alignment{address(params.in_ptr), address(pointers[1]), address(params.out_ptr)};
  const int sms = splits > 1 ? 64 : 3;
  if (!make_plan(params.of, sms, alignment, params.plan, {shape, windows, splits, direct})) return -1;
  const Plan plan = params.plan;
  way = (plan.direct ? 2 : plan.windows) + 4 * plan.copied;
  std::vector<uint8_t> space(packed_bytes(params.of, plan) + copied_bytes(params.of, plan) + 256, 0xff);
  void* const workspace = space.data() + (256 - address(space.data()) % 256);
  return simt_run(seed, plan.splits > 1, [&] {
    Params once = params;
    return run<Half>(pointers[1], workspace, once, nullptr);  // of bfloat16 it is the same code
  });
}
