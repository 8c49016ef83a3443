#include "pointwise.cu"

using namespace modelnew;
using namespace modelnew::pointwise;
#include "planner.h"

// What is wrong with the numbers of a plan, or nothing.
static std::string fault_of_numbers(const Problem& problem, const Plan& plan, const Device& device, bool exact) {
  const bool staged = plan.stage_terms > 0;
  const int threads = staged ? staged_threads(plan.row_bits) : 32 * plan.slices << plan.row_bits;
  if (shared_bytes(plan) > device.shared_bytes || threads > (exact ? 256 : 512)) return "a block that is too large";
  if (plan.block_columns != (staged ? 64 : 32) || (staged && plan.column_tiles > 65535)) return "columns of a block";
  if (staged && (exact || plan.slices != 1 || plan.split_bits != 0 || plan.row_bits > 1)) return "stages, but which";
  if (staged && (plan.loads != Loads::kFours || plan.out_vector != 4)) return "stages of single values";
  if (staged && (plan.stage_terms * kStages != problem.C || plan.stage_terms % 8 != 0)) return "terms of no stage";
  if (block_rows(plan) % splits_of(plan) != 0) return "rows of a share";
  const int64_t pixels = problem.N * problem.P * problem.Q;
  if (plan.rows != (plan.pixel_rows ? pixels : problem.K) || plan.columns != (plan.pixel_rows ? problem.K : pixels))
    return "rows and columns of y";
  if (!covers(plan.row_tiles, block_rows(plan), plan.rows) ||
      !covers(plan.column_tiles, plan.block_columns, plan.columns))
    return "tiles that y does not have, or too few";
  const int64_t steps = ceil_div(problem.C, kTerms);
  if (int64_t{plan.slice_steps} * plan.slices * splits_of(plan) < steps) return "steps of no slice";
  // Blocks of a cluster may have none, but of several slices half have some.
  if (plan.slices > 1 && int64_t{plan.slices} * splits_of(plan) >= 2 * steps) return "slices without steps";
  // In full every 8 terms are an addition, which all may err to the same side.
  if (exact && plan.slice_steps > 128 && plan.slices * splits_of(plan) < 4) return "too long a sum";
  return plan.cycles > 0 ? "" : "no estimate";
}

// What is wrong with where a plan finds x, w and y, or nothing: some places, from the problem itself, first and last
// among them. Addresses are in words.
static std::string fault_of_places(const Problem& problem, const Params& params, const Alignment& at, int seed) {
  const Plan& plan = params.plan;
  std::mt19937 random(seed);
  const int64_t pixels = problem.N * problem.P * problem.Q;
  const auto drawn = [&](int i, int64_t most) { return i == 0 ? 0 : i == 1 ? most - 1 : random() % most; };
  const auto x = [&](int64_t pixel, int64_t c) {
    const int64_t row = pixel / problem.Q % problem.P * problem.stride_h, column = pixel % problem.Q * problem.stride_w;
    return pixel / problem.Q / problem.P * problem.x_stride[0] + c * problem.x_stride[1] + row * problem.x_stride[2] +
           column * problem.x_stride[3];
  };
  const auto w = [&](int64_t k, int64_t c) { return k * problem.w_stride[0] + c * problem.w_stride[1]; };
  const auto y = [&](int64_t pixel, int64_t k) {
    return pixel / problem.Q / problem.P * problem.y_stride[0] + k * problem.y_stride[1] +
           pixel / problem.Q % problem.P * problem.y_stride[2] + pixel % problem.Q * problem.y_stride[3];
  };
  // Whether four values that begin at a multiple of 4 are neighbours and 16 bytes.
  const auto are_four = [](int64_t address, int64_t size, int64_t i, const auto& offset_of) {
    if (size % 4 != 0) return false;
    const int64_t first = offset_of(i / 4 * 4);
    for (int j = 1; j < 4; ++j)
      if (offset_of(i / 4 * 4 + j) != first + j) return false;
    return (address + first) % 4 == 0;
  };
  if (plan.pixel_rows != (plan.loads == Loads::kChannelsLast)) return "rows of another kind than loads";
  for (int i = 0; i < 40; ++i) {
    const int64_t pixel = drawn(i, pixels), c = drawn(i, problem.C), k = drawn(i, problem.K);
    const Place place = place_of_pixel(params, static_cast<int>(pixel));
    if (place.x + c * params.x_channel != x(pixel, c)) return "another place of x";
    if (k * params.w_out + c * params.w_in != w(k, c)) return "another place of w";
    if (place.y + k * params.y_channel != y(pixel, k)) return "another place of y";
    if (plan.pixel_rows && params.y_channel != 1) return "channels of y that are no neighbours";
    const int64_t plane = problem.P * problem.Q, image = pixel / plane, in_plane = pixel % plane;
    if (plan.stage_terms > 0 && image * params.x_image + in_plane + c * params.x_channel != x(pixel, c))
      return "another place of x in stages";
    if (plan.stage_terms > 0 && image * params.y_image + in_plane + k * params.y_channel != y(pixel, k))
      return "another place of y behind stages";
    const auto channel_of_w = [&](int64_t channel) { return w(k, channel); };
    const auto channel_of_x = [&](int64_t channel) { return x(pixel, channel); };
    const auto pixel_of_x = [&](int64_t other) { return x(other, c); };
    const auto channel_of_y = [&](int64_t channel) { return y(pixel, channel); };
    const auto pixel_of_y = [&](int64_t other) { return y(other, k); };
    if (plan.loads != Loads::kSingle && !are_four(at.w, problem.C, c, channel_of_w)) return "fours of w astray";
    if (plan.loads == Loads::kFours && !are_four(at.x, pixels, pixel, pixel_of_x)) return "fours of x astray";
    if (plan.loads == Loads::kChannelsLast && !are_four(at.x, problem.C, c, channel_of_x)) return "channels astray";
    if (plan.out_vector != 4) continue;
    if (plan.pixel_rows ? !are_four(at.y, problem.K, k, channel_of_y) : !are_four(at.y, pixels, pixel, pixel_of_y))
      return "fours of y astray";
  }
  return plan.out_vector == 1 || plan.out_vector == 4 ? "" : "neither fours nor single values";
}

static void note(const Plan& plan) {
  const char* const loads[] = {"fours", "fours of weights", "fours of channels", "single values"};
  seen.insert(std::string("by ") + loads[static_cast<int>(plan.loads)]);
  seen.insert("y by " + std::to_string(plan.out_vector));
  seen.insert(std::to_string(plan.slices) + " slices");
  seen.insert(std::to_string(splits_of(plan)) + " splits");
  if (plan.stage_terms > 0)
    seen.insert(std::to_string(block_rows(plan)) + " rows, stages of " + std::to_string(plan.stage_terms));
}

extern "C" {
double plan_cycles(int op, const int64_t* fields, uint64_t x, uint64_t w, uint64_t y) {
  const Problem problem = make_problem(fields);
  Device device{};
  current_device(device);
  Plan plan{};
  const bool exact = !uses_tf32(problem, as_operator(op));
  return make_plan(flattened(problem), exact, device, Alignment{x, w, y}, plan) ? plan.cycles : 0;
}
// Plans for tensors at these addresses, on the GPU that was set, the best one and all that can be forced: null if there
// is none, else what is wrong, or "".
const char* plan_fault(int, const int64_t* fields, uint64_t x, uint64_t w, uint64_t y, int seed) {
  std::string fault;
  const Problem problem = make_problem(fields);
  const Correlation of = flattened(problem);
  const bool exact = !problem.tf32_allowed;
  Device device{};
  current_device(device);
  Plan best{};
  if (!make_plan(of, exact, device, Alignment{x, w, y}, best)) return nullptr;
  if (best.split_bits > 0 && !device.has_clusters) return "a cluster without Hopper";
  note(best);
  for (int i = -1; i < 3 * 4 * 5 + 2; ++i) {
    Plan plan = best;
    const bool staged = i >= 3 * 4 * 5;
    const int row_bits = i % 3, split_bits = staged ? 0 : i / 3 % 4, slices = staged ? 1 : 1 << i / 12;
    if (i >= 0 && !make_plan(of, exact, device, Alignment{x, w, y}, plan, staged, row_bits, split_bits, slices))
      continue;
    if (i >= 0 && (plan.row_bits != row_bits || plan.split_bits != split_bits || plan.slices != slices ||
                   (plan.stage_terms > 0) != staged))
      return "another plan than the forced one";
    fault = fault_of_numbers(problem, plan, device, exact);
    if (fault.empty() && (i < 0 || staged))
      fault = fault_of_places(problem, make_params(of, plan), Alignment{x / 4, w / 4, y / 4}, seed);
    const bool large = problem.P * problem.Q >= (problem.C < 256 ? 784 : 2048);  // enough for stages
    const bool may_be = staged ? large : device.has_clusters || split_bits == 0;
    if (fault.empty() && plan.cycles < best.cycles && may_be) fault = "not the best plan";
    if (fault.empty() && i < 0 && plan.stage_terms > 0 && !large) fault = "stages of small planes";
    if (!fault.empty()) return told(fault, "plan " + std::to_string(i));
  }
  return "";
}
}
