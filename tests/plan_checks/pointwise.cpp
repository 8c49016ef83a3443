#include "pointwise.cu"

using namespace modelnew;
using namespace modelnew::pointwise;
#include "planner.h"

static void check_numbers(const Problem& problem, const Plan& plan, const Device& device, bool exact) {
  const bool staged = plan.stage_terms > 0;
  const int threads = staged ? staged_threads(plan.row_bits) : 32 * plan.slices << plan.row_bits;
  CHECK(shared_bytes(plan) <= device.shared_bytes && threads <= (exact ? 256 : 512));
  CHECK(plan.block_columns == (staged ? 64 : 32) && block_rows(plan) % splits_of(plan) == 0);
  if (staged) {
    CHECK(!exact && plan.slices == 1 && plan.split_bits == 0 && plan.row_bits <= 1 && plan.column_tiles <= 65535);
    CHECK(plan.loads == Loads::kFours && plan.out_vector == 4);
    CHECK(plan.stage_terms * kStages == problem.C && plan.stage_terms % 8 == 0);
  }
  const int64_t pixels = problem.N * problem.P * problem.Q, steps = ceil_div(problem.C, kTerms);
  CHECK(plan.rows == (plan.pixel_rows ? pixels : problem.K) && plan.columns == (plan.pixel_rows ? problem.K : pixels));
  CHECK(covers(plan.row_tiles, block_rows(plan), plan.rows));
  CHECK(covers(plan.column_tiles, plan.block_columns, plan.columns));
  const int64_t slices = int64_t{plan.slices} * splits_of(plan);
  CHECK(plan.slice_steps * slices >= steps);
  // In full accuracy every 8 terms are an addition, which all may err to the same side.
  CHECK(!exact || plan.slice_steps <= 128 || slices >= 4);
  CHECK(plan.cycles > 0);
}

// Where a plan finds x, w and y: some places, from the problem itself, first and last among them.
static void check_places(const Problem& problem, const Params& params, const Addresses& at, std::mt19937& random) {
  const Plan& plan = params.plan;
  const int64_t plane = problem.P * problem.Q, pixels = problem.N * plane;
  const auto drawn = [&](int i, int64_t most) { return i == 0 ? 0 : i == 1 ? most - 1 : random() % most; };
  const auto offset_of = [&](const int64_t (&stride)[4], int64_t pixel, int64_t channel, int step_h, int step_w) {
    return pixel / plane * stride[0] + channel * stride[1] + pixel / problem.Q % problem.P * step_h * stride[2] +
           pixel % problem.Q * step_w * stride[3];
  };
  const auto x = [&](int64_t pixel, int64_t c) {
    return offset_of(problem.x_stride, pixel, c, problem.stride_h, problem.stride_w);
  };
  const auto w = [&](int64_t k, int64_t c) { return k * problem.w_stride[0] + c * problem.w_stride[1]; };
  const auto y = [&](int64_t pixel, int64_t k) { return offset_of(problem.y_stride, pixel, k, 1, 1); };
  // Whether four values that begin at a multiple of 4 are neighbours and 16 bytes.
  const auto are_four = [](uint64_t address, int64_t size, int64_t i, const auto& offset) {
    const int64_t first = i / 4 * 4;
    return size % 4 == 0 && (address + 4 * offset(first)) % 16 == 0 &&
           are_runs({offset(first), offset(first + 1), offset(first + 2), offset(first + 3)}, 4);
  };
  CHECK(plan.pixel_rows == (plan.loads == Loads::kChannelsLast) && (plan.out_vector == 1 || plan.out_vector == 4));
  for (int i = 0; i < 40; ++i) {
    const int64_t pixel = drawn(i, pixels), c = drawn(i, problem.C), k = drawn(i, problem.K);
    const Place place = place_of_pixel(params, static_cast<int>(pixel));
    CHECK(place.x + c * params.x_channel == x(pixel, c) && place.y + k * params.y_channel == y(pixel, k));
    CHECK(k * params.w_out + c * params.w_in == w(k, c));
    CHECK(!plan.pixel_rows || params.y_channel == 1);
    if (plan.stage_terms > 0) {
      const int64_t image = pixel / plane, in_plane = pixel % plane;
      CHECK(image * params.x_image + in_plane + c * params.x_channel == x(pixel, c));
      CHECK(image * params.y_image + in_plane + k * params.y_channel == y(pixel, k));
    }
    const auto pixel_of_x = [&](int64_t other) { return x(other, c); };
    const auto channel_of_x = [&](int64_t channel) { return x(pixel, channel); };
    const auto channel_of_w = [&](int64_t channel) { return w(k, channel); };
    const auto pixel_of_y = [&](int64_t other) { return y(other, k); };
    const auto channel_of_y = [&](int64_t channel) { return y(pixel, channel); };
    if (plan.loads != Loads::kSingle) CHECK(are_four(at.w, problem.C, c, channel_of_w));
    if (plan.loads == Loads::kFours) CHECK(are_four(at.in, pixels, pixel, pixel_of_x));
    if (plan.loads == Loads::kChannelsLast) CHECK(are_four(at.in, problem.C, c, channel_of_x));
    if (plan.out_vector == 1) continue;
    CHECK(plan.pixel_rows ? are_four(at.out, problem.K, k, channel_of_y)
                          : are_four(at.out, pixels, pixel, pixel_of_y));
  }
}

static bool check_plans(const Problem& problem, Operator, const Addresses& at, std::mt19937& random) {
  const Correlation of = flattened(problem);
  const bool exact = !problem.tf32_allowed;
  Device device{};
  current_device(device);
  Plan best{};
  if (!make_plan(of, exact, device, {at.in, at.w, at.out}, best)) return false;
  CHECK(best.split_bits == 0 || device.has_clusters);
  NOTE_VALUES(best.loads, 0, 1, 2, 3);
  NOTE_VALUES(best.slices, 1, 2, 4, 8, 16);
  NOTE_VALUES(best.split_bits, 0, 1, 2, 3);
  NOTE_VALUES(best.stage_terms, 0, 16, 32, 64);
  NOTE(best.out_vector == 4);
  for (int i = -1; i < 3 * 4 * 5 + 2; ++i) {
    plan_in_hand = "plan " + std::to_string(i);
    const bool staged = i >= 3 * 4 * 5;
    const int row_bits = i % 3, split_bits = staged ? 0 : i / 3 % 4, slices = staged ? 1 : 1 << i / 12;
    Plan plan = best;
    if (i >= 0) {
      if (!make_plan(of, exact, device, {at.in, at.w, at.out}, plan, staged, row_bits, split_bits, slices)) continue;
      CHECK(plan.row_bits == row_bits && plan.split_bits == split_bits && plan.slices == slices);
      CHECK((plan.stage_terms > 0) == staged);
    }
    check_numbers(problem, plan, device, exact);
    if (i < 0 || staged) check_places(problem, make_params(of, plan), at, random);
  }
  return true;
}
