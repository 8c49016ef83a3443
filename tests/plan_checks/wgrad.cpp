#include "wgrad.cu"

using namespace modelnew;
using namespace modelnew::wgrad;
// The estimate that engines compare counts copies as well, which problems above a size do without.
static double estimate(const Problem& problem, Operator) { return make_plan(problem, nullptr, nullptr, 132).cycles; }
#include "planner.h"

// Every pixel is in one stage of an image, with every tap and all channels of a tile.
static void check_window(const Problem& p, const Plan& plan) {
  const Window& window = plan.window;
  const int bytes = element_bytes(p.dtype), of_stage = kStageWords * 4 / bytes, taps = p.R * p.S;
  CHECK(window.columns <= window.pitch && window.rows * window.pitch <= window.plane);
  CHECK(window.channels * window.plane * bytes <= plan.layout.places);
  CHECK(plan.layout.places + 4 * of_stage + 4 <= plan.layout.dy);
  CHECK(multiples(window.values, {window.pitch, window.plane}));
  Owned owned(int64_t{p.P} * p.Q);
  for (int stage = 0; stage < window.stages_of_image; ++stage) {
    const int strip = stage / window.stages_of_strip, first = stage % window.stages_of_strip * of_stage;
    const int first_q = strip * window.width, first_p = first / window.width;
    CHECK((first_q * p.stride_w - p.pad_w - window.lead) % window.values == 0);
    for (int i = 0; i < of_stage; ++i) {
      const int y = (first + i) / window.width, column = (first + i) % window.width;
      if (y >= p.P || first_q + column >= p.Q) continue;
      CHECK(owned.take(int64_t{y} * p.Q + first_q + column));
      CHECK((y - first_p) * p.stride_h + (p.R - 1) * p.dilation_h < window.rows);
      CHECK(window.lead + column * p.stride_w + (p.S - 1) * p.dilation_w < window.columns);
    }
  }
  CHECK(owned.all());
  for (int64_t e = 0; e < columns_of(p); e += kTileE)
    CHECK((std::min<int64_t>(e + kTileE, columns_of(p)) - 1) / taps - e / taps < window.channels);
}

// Plans for x and dy so many bytes behind aligned addresses.
static bool check_plans(const Problem& problem, Operator, const Addresses& at, std::mt19937&) {
  const void *x = reinterpret_cast<const void*>(4096 + at.in), *dy = reinterpret_cast<const void*>(4096 + at.w);
  const Plan plan = make_plan(problem, x, dy, kSms);
  const Prepared prepared = prepare(problem, x, dy);
  const Problem& p = prepared.problem;
  const Layout& layout = plan.layout;
  NOTE(plan.has_boxes);
  NOTE(prepared.copies_x && prepared.copies_dy);
  NOTE(prepared.merges);
  NOTE(plan.parts == 2);
  NOTE(plan.has_window && plan.window.strips > 1);
  NOTE(stores_dw(problem, plan));
  CHECK(plan.prepared.copies_x == prepared.copies_x && plan.prepared.copies_dy == prepared.copies_dy);
  CHECK(copied_bytes(plan) % 16 == 0);
  CHECK(layout.bytes <= kSmemBytes && layout.stages >= kLeastStages && layout.stages <= kMostStages);
  CHECK(layout.copies % 16 == 0 && layout.barriers % 8 == 0 && layout.dy % 16 == 0);
  if (plan.has_boxes) CHECK(multiples(1024, {layout.dy, layout.stage_bytes}));
  CHECK(covers(plan.splits, plan.stages_per_split, plan.stages));
  CHECK(int64_t{plan.tiles_k} * plan.tile_k >= group_k_of(p) && int64_t{plan.tiles_e} * kTileE >= columns_of(p));
  CHECK(plan.cycles > 0);
  if (plan.has_window || plan.has_boxes) CHECK(plan.stages == p.N * plan.window.stages_of_image);
  if (plan.has_window) check_window(p, plan);
  return true;
}
