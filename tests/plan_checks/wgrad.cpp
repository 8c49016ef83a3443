#include <cstring>
#include <type_traits>

extern "C" {
int simt_mutation = 0;  // the number of the one that takes place, see with_mutations
}

#include "wgrad.cu"
#include "problem_fields.h"

using namespace modelnew;
using namespace modelnew::wgrad;

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

extern "C" {
const char* wgrad_refusal(int op, const int64_t* fields) {
  return refusal(make_problem(fields), static_cast<Operator>(op));
}
const char* wgrad_yields(int op, const int64_t* fields) {
  return yields(make_problem(fields), static_cast<Operator>(op));
}
const char* wgrad_describe(int op, const int64_t* fields) {
  static char text[512];
  describe(make_problem(fields), static_cast<Operator>(op), text, sizeof text);
  return text;
}
double wgrad_cycles(const int64_t* fields) {
  const Problem problem = make_problem(fields);
  return make_plan(problem, nullptr, nullptr, 132).cycles;
}
// Bits of what the plan is like, and what is wrong with it, of operands so many bytes behind an aligned address.
const char* wgrad_fault(const int64_t* fields, int64_t x_at, int64_t dy_at, int* kind) {
  const Problem original = make_problem(fields);
  const void *x = reinterpret_cast<const void*>(4096 + x_at), *dy = reinterpret_cast<const void*>(4096 + dy_at);
  const Plan plan = make_plan(original, x, dy, 132);
  const Prepared prepared = prepare(original, x, dy);
  const Problem& p = prepared.problem;
  const Layout& layout = plan.layout;
  *kind = plan.has_window | plan.has_boxes << 1 | plan.prepared.copies_x << 2 | plan.prepared.copies_dy << 3 |
          prepared.merges << 4 | (plan.splits > 1) << 5 | (plan.parts == 2) << 6 |
          (plan.has_window && plan.window.strips > 1) << 7 | stores_dw(original, plan) << 8;
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
}
