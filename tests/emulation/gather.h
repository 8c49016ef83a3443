#include "run.h"
using namespace modelnew::gather;

extern "C" {
int done_again = 0;     // of the latest run: values of x that did not fit, or -1: everything
int latest_parts = 1;   // of a tile of the latest run, which are a cluster
int most_listed = kMostListed;
int latest_source = -1;  // how x came in the latest run
int latest_boxes = 0;    // whether y of tiles of lines was stored by boxes in it

unsigned gather_sources(int shape) { return kTileShapes[shape].sources; }
}

// One shape of a tile, behind gather's own those of tma; parts of the reduction (0: any), on a GPU of so many SMs; x by
// images or not at all; and products of tma by windows or not (-1: any), with so many blocks a tile.
extern "C" int run_wished(int op, const int64_t* fields, void* const* pointers, const int* wishes, int seed) {
  const int shape = wishes[0], forced_splits = wishes[1], sms = wishes[2], wants_images = wishes[3];
  const int tma_windows = wishes[4], tma_splits = wishes[5];
  simt::launched.clear();
  const Problem problem = make_problem(fields);
  const Operator which = as_operator(op);
  Params params{};
  set_pointers(params, op, pointers);
  params.of = phased_of(problem, which);
  const Alignment alignment{address(params.in_ptr), address(params.out_ptr)};
  const int bytes = element_bytes(problem.dtype);
  constexpr int kShapes = static_cast<int>(std::size(kTileShapes));
  const int tma_shape = shape - kShapes;
  if (tma_shape >= tma::kTileShapeCount) return -1;
  if (wants_images) {
    const int splits = std::max(forced_splits, 1);
    const Cut cut{Cut::kImages, 1, 1};
    if (!complete(params.of, bytes, Device{sms}, alignment, kTileShapes[shape], splits, cut, false, params.plan) ||
        !params.plan.in_images)
      return -1;
    params.plan.by = divisors(params.of, params.plan);
  } else if (!make_plan(params.of, bytes, Device{sms}, alignment, std::min(shape, kShapes), params.plan,
                        forced_splits)) {
    return -1;
  }
  const Plan plan = params.plan;
  tma::Planned by_tma{tma::grouped_products(as_planned(params.of, plan)), {}, false};
  const tma::Wishes asked{tma_shape, tma_windows, tma_splits, -1};
  const int tma_sms = tma_splits > 1 ? 64 : sms;
  if (plan.by_tma) {
    by_tma.found = tma::make_contained_plan(by_tma.of, tma_sms, alignment.out, by_tma.plan, asked);
    if (!by_tma.found) return -1;
  }
  const auto multiply_by_tma = [&](const ContainedProducts& products) {
    return tma::run_contained(by_tma, products, nullptr);
  };
  latest_source = static_cast<int>(source_of_plan(plan));
  latest_boxes = plan.boxes && !plan.points && !plan.packed;
  Agains again{};
  latest_parts = plan.splits;
  if (plan.contained && !plan_again(params.of, Device{sms}, alignment, again)) return -1;
  Workspace workspace(workspace_layout(params.of, plan, again, bytes).end);
  const int code = simt_run(seed, plan.splits > 1 || by_tma.plan.splits > 1, [&] {
    Params of_run = params;
    return bytes == 4 ? run<float>(pointers[1], workspace.data(), again, of_run, multiply_by_tma, nullptr)
                      : run<Half>(pointers[1], workspace.data(), again, of_run, multiply_by_tma, nullptr);
  });
  ContainedControl control{};
  if (plan.contained) std::memcpy(&control, workspace.data(), sizeof control);
  const bool all = control.all_again != 0 || control.listed > kMostListed;
  done_again = all ? -1 : static_cast<int>(control.listed);
  return unless_overrun(code, workspace);
}
