#include "wgrad.cu"

using namespace modelnew;
using namespace modelnew::wgrad;
#include "planner.h"

// What is wrong with a window, or null: every pixel of every stage of an image, with every tap and all channels.
static const char* fault_of_window(const Problem& p, const Plan& plan) {
  const Window& window = plan.window;
  const int bytes = element_bytes(p.dtype), of_stage = kStageWords * 4 / bytes, taps = p.R * p.S;
  if (window.columns > window.pitch || window.rows * window.pitch > window.plane) return "rows that overlap";
  if (window.channels * window.plane * bytes > plan.layout.places) return "places in the window";
  if (plan.layout.places + 4 * of_stage + 4 > plan.layout.dy) return "dy in the places";
  if (window.pitch % window.values != 0 || window.plane % window.values != 0) return "copies that do not align";
  int64_t pixels = 0;
  for (int stage = 0; stage < window.stages_of_image; ++stage) {
    const int strip = stage / window.stages_of_strip, first = stage % window.stages_of_strip * of_stage;
    const int first_q = strip * window.width, first_p = first / window.width;
    if ((first_q * p.stride_w - p.pad_w - window.lead) % window.values != 0) return "a window that does not align";
    for (int i = 0; i < of_stage; ++i) {
      const int y = (first + i) / window.width, column = (first + i) % window.width;
      if (y >= p.P || first_q + column >= p.Q) continue;
      ++pixels;
      if ((y - first_p) * p.stride_h + (p.R - 1) * p.dilation_h >= window.rows) return "a row behind the window";
      if (window.lead + column * p.stride_w + (p.S - 1) * p.dilation_w >= window.columns)
        return "a column behind the window";
    }
  }
  if (pixels != int64_t{p.P} * p.Q) return "pixels in no stage, or in two";
  for (int64_t e = 0; e < columns_of(p); e += kTileE) {
    const int64_t last = std::min<int64_t>(e + kTileE, columns_of(p)) - 1;
    if (last / taps - e / taps >= window.channels) return "a channel behind the window";
  }
  return nullptr;
}

// What is wrong with a plan, or null.
static const char* fault_of_plan(const Problem& original, const Plan& plan, const Prepared& prepared) {
  const Problem& p = prepared.problem;
  const Layout& layout = plan.layout;
  if (plan.prepared.copies_x != prepared.copies_x || plan.prepared.copies_dy != prepared.copies_dy) return "copies";
  if (copied_bytes(plan) % 16 != 0) return "what lies behind copies";
  if (layout.bytes > kSmemBytes || layout.stages < kLeastStages || layout.stages > kMostStages) return "shared memory";
  if (layout.copies % 16 != 0 || layout.barriers % 8 != 0 || layout.dy % 16 != 0) return "what does not align";
  if (plan.has_boxes && (layout.dy % 1024 != 0 || layout.stage_bytes % 1024 != 0)) return "boxes that do not align";
  if (plan.splits * plan.stages_per_split < plan.stages) return "stages left out";
  if ((plan.splits - 1) * plan.stages_per_split >= plan.stages) return "an empty split";
  if (int64_t{plan.tiles_k} * plan.tile_k < group_k_of(p) || int64_t{plan.tiles_e} * kTileE < columns_of(p))
    return "tiles";
  if (!(plan.cycles > 0)) return "cycles";
  if (!plan.has_window && !plan.has_boxes) return nullptr;
  if (plan.stages != p.N * plan.window.stages_of_image) return "stages";
  return plan.has_window ? fault_of_window(p, plan) : nullptr;
}

static void note(const Problem& original, const Plan& plan, const Prepared& prepared) {
  if (plan.has_window) seen.insert("window");
  if (plan.has_boxes) seen.insert("boxes");
  if (plan.prepared.copies_x) seen.insert("a copy of x");
  if (plan.prepared.copies_dy) seen.insert("a copy of dy");
  if (prepared.merges) seen.insert("merged images");
  if (plan.splits > 1) seen.insert("splits");
  if (plan.parts == 2) seen.insert("two parts");
  if (plan.has_window && plan.window.strips > 1) seen.insert("strips");
  if (stores_dw(original, plan)) seen.insert("dw stored directly");
}

extern "C" {
double plan_cycles(int, const int64_t* fields, uint64_t, uint64_t, uint64_t) {
  return make_plan(make_problem(fields), nullptr, nullptr, kSms).cycles;
}
// Plans for x and dy so many bytes behind aligned addresses: what is wrong, or "".
const char* plan_fault(int, const int64_t* fields, uint64_t x_at, uint64_t dy_at, uint64_t, int) {
  const Problem problem = make_problem(fields);
  const void *x = reinterpret_cast<const void*>(4096 + x_at), *dy = reinterpret_cast<const void*>(4096 + dy_at);
  const Plan plan = make_plan(problem, x, dy, kSms);
  const Prepared prepared = prepare(problem, x, dy);
  note(problem, plan, prepared);
  const char* const fault = fault_of_plan(problem, plan, prepared);
  return fault == nullptr ? "" : fault;
}
}
