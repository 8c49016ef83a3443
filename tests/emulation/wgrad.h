#include "run.h"
using namespace modelnew::wgrad;

extern "C" {
// The latest run: how x and dy come, what is copied, where sums go, and how many warps load how far ahead.
int x_way, dy_way, copies_x, copies_dy, merges, run_splits, stores_directly, strips, whole_words, taps_first;
int sixteen_bytes, groups_of_warps, stages_ahead;
}

// This tile and so many splits (0: any), on a GPU of three SMs.
extern "C" int run_wished(int, const int64_t* fields, void* const* pointers, const int* wishes, int seed) {
  const int tile_k = wishes[0], splits = wishes[1];
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
  x_way = static_cast<int>(x_copies_of(prepared.problem, plan, x));
  dy_way = static_cast<int>(dy_copies_of(prepared.problem, plan));
  copies_x = plan.prepared.copies_x, copies_dy = plan.prepared.copies_dy, merges = prepared.merges;
  run_splits = static_cast<int>(plan.splits), stores_directly = stores_dw(problem, plan);
  strips = plan.has_window && plan.window.strips > 1, whole_words = has_words_of_dy(prepared.problem, plan, dy);
  taps_first = is_channels_last(prepared.problem);
  sixteen_bytes = plan.has_window && plan.window.values * element_bytes(problem.dtype) == 16;
  groups_of_warps = plan.has_boxes ? loaders * 10 + groups : 0;
  stages_ahead = plan.has_boxes ? std::max(1, std::min(of_group, kMostAhead)) : 0;
  const int code = simt_run(seed, false, [&] { return launch_plan(problem, operands, plan, nullptr); });
  return unless_overrun(code, workspace);
}
