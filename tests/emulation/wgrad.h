#include "problem_fields.h"

using namespace modelnew;
using namespace modelnew::wgrad;

extern "C" {
int latest[13] = {};  // of the latest run, see WgradShim.names
const char* simt_message() { return simt::message.c_str(); }
}

// Plans this tile and so many splits (0: any) on a GPU of three SMs and runs that: -1 if there is no such plan, else
// the error.
extern "C" int wgrad_run(const int64_t* fields, void* const* pointers, int tile_k, int splits, int seed) {
  simt::independent = true;
  simt::before_block = simt::begin_block;
  simt::between_rounds = simt::do_some;
  simt::late = seed % 2;
  simt::shuffler.seed(seed);
  const Problem problem = make_problem(fields);
  Pointers operands = {pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], nullptr};
  const Plan plan = make_plan(problem, operands.x, operands.dy, 3, tile_k, splits);
  if (plan.cycles < 0) return -1;
  Workspace workspace(workspace_bytes_of(problem, plan));
  operands.workspace = workspace.data();
  const Prepared prepared = prepare(problem, operands.x, operands.dy);
  const void* const x = prepared.copies_x ? nullptr : operands.x;
  const void* const dy = prepared.copies_dy ? nullptr : operands.dy;
  const int loaders = plan.tile_k / 2 * plan.parts >= 128 ? 4 : 8;
  const int groups = plan.has_boxes ? loaders / (plan.layout.stages < loaders / 2 + 2 ? 4 : 2) : 1;
  const int of_group = (groups > 1 ? plan.layout.stages : plan.layout.stages - 1) / groups;
  const int all[] = {static_cast<int>(x_copies_of(prepared.problem, plan, x)),
                     static_cast<int>(dy_copies_of(prepared.problem, plan)),
                     plan.prepared.copies_x,
                     plan.prepared.copies_dy,
                     prepared.merges,
                     static_cast<int>(plan.splits),
                     stores_dw(problem, plan),
                     plan.has_window && plan.window.strips > 1,
                     has_words_of_dy(prepared.problem, plan, dy),
                     is_channels_last(prepared.problem),
                     plan.has_window && plan.window.values * element_bytes(problem.dtype) == 16,
                     loaders * 10 + groups,
                     std::max(1, std::min(of_group, kMostAhead))};
  std::copy(std::begin(all), std::end(all), latest);
  const int code = launch_plan(problem, operands, plan, nullptr);
  return code == 0 && !workspace.intact() ? -2 : code;
}
