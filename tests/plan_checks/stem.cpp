#include "stem.cu"

using namespace modelnew;
using namespace modelnew::stem;
#include "planner.h"

static void check_numbers(const Correlation& of, const Plan& plan, const Format& format) {
  const bool exact = format.exact;
  const SharedLayout layout = shared_layout(plan, format);
  const int staging = plan.stores == Stores::kSingle ? 0 : 16 * 16 * plan.tile_k * format.bytes;  // of 16 warps
  const int landing = format.bytes == 4 ? 0 : plan.x_bytes / 2;
  CHECK(layout.end == plan.smem_bytes && plan.smem_bytes <= kSharedMemory);
  CHECK(layout.bias >= 3 * 8 * kStages && layout.weights >= layout.bias + 4 * plan.tile_k);  // behind the barriers
  CHECK(layout.staging >= layout.weights + (exact ? 2 : 1) * plan.steps * 8 * plan.tile_k * 4);
  CHECK(layout.x >= layout.staging + staging && layout.landing >= layout.x + kStages * plan.x_bytes);
  CHECK(layout.end >= layout.landing + landing);
  CHECK(layout.weights % 16 == 0 && layout.staging % 1024 == 0);
  CHECK(multiples(128, {layout.x, layout.landing, window_bytes(plan)}));
  CHECK(16 * plan.tile_k < 1 << 18 && (plan.tile_k == 32 || plan.tile_k == 64));  // a descriptor's distance of quads
  CHECK(plan.x_bytes % 16 == 0 && plan.x_bytes < 1 << 20);                        // what a barrier can expect
  CHECK(plan.x_bytes == 4 * (plan.lines ? 1 : of.in_channels) * plan.rows * plan.columns);
  CHECK(plan.blocks % plan.tiles_k == 0 && within(plan.blocks / plan.tiles_k - 1, plan.tiles));
  CHECK(covers(plan.tiles_k, plan.tile_k, of.out_channels));
  CHECK(2 * plan.steps >= plan.quads && std::max(plan.quads, 2 * plan.steps) <= kMostQuads);
  if (!exact) CHECK(plan.steps % kGroupSteps == 0 && (format.bytes == 2 || plan.steps / kGroupSteps % 2 == 1));
  CHECK(plan.cycles > 0);
}

// Every output is one tile's.
static void check_tiles(const Params& params) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  Owned owned(of.N * of.P * of.Q);
  CHECK(plan.tiles == of.N * plan.tiles_p * plan.tiles_q);
  for (int number = 0; number < plan.tiles; ++number) {
    const Tile tile = locate_tile(params, number);
    CHECK(within(tile.n, of.N) && within(tile.p, of.P) && within(tile.q, of.Q));
    for (int p = tile.p; p < std::min(of.P, tile.p + plan.tile_p); ++p)
      for (int q = tile.q; q < std::min(of.Q, tile.q + plan.tile_q); ++q)
        CHECK(owned.take((int64_t{tile.n} * of.P + p) * of.Q + q));
  }
  CHECK(owned.all());
}

// Every tap of every channel is one term's, and the words that a tile's outputs read are those of x. The address is in
// values, of which `piece` are 16 bytes.
static void check_reads(const Params& params, const Tile& tile, int64_t address, const Format& format) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int64_t w0 = int64_t{tile.q} * of.stride_w - of.pad_w, first_column = w0 * plan.pixel_words - plan.lead;
  const int outputs = plan.tile_p * plan.tile_q, every = std::max(1, outputs / 48);
  CHECK(plan.row_terms == of.S * (plan.lines ? of.in_channels : 1));
  Owned owned(of.in_channels * of.R * of.S);
  for (int i = 0; i < plan.quads; ++i) {
    const Quad quad = locate_quad(params, i);
    CHECK(params.offsets[i] % 4 == 0);
    for (int t = 0; t < kQuad; ++t) {
      const int term = quad.first + t;
      const int64_t channel = plan.lines ? term % of.in_channels : quad.channel;
      const int64_t s = plan.lines ? term / of.in_channels : term;
      if (term < plan.row_terms) {
        CHECK(channel < of.in_channels && quad.r < of.R && s < of.S);
        CHECK(owned.take((channel * of.R + quad.r) * of.S + s));
      }
      for (int from = 0; from < outputs + every; from += every) {
        const int m = std::min(from, outputs - 1);  // some, the last one among them
        const int row = m / plan.tile_q, column = m % plan.tile_q;
        const int64_t word = int64_t{row} * of.stride_h * plan.columns + params.offsets[i] / 4 + t * plan.term_words +
                             int64_t{column} * of.stride_w * plan.pixel_words;
        CHECK(within(4 * word, plan.x_bytes));
        if (term >= plan.row_terms) continue;
        CHECK(first_column + word % plan.columns ==
              (w0 + column * of.stride_w + s * of.dilation_w) * plan.pixel_words + (plan.lines ? channel : 0));
        CHECK(word / plan.columns % plan.rows == row * of.stride_h + quad.r * of.dilation_h);
        CHECK(word / plan.columns / plan.rows == (plan.lines ? 0 : channel));
      }
    }
  }
  CHECK(owned.all());
  for (int i = plan.quads; i < 2 * plan.steps + (format.exact ? 2 : 0); ++i) CHECK(params.offsets[i] == 0);
  if (format.bytes == 2) CHECK(plan.columns % 2 == 0 && params.by_pairs.divisor == plan.columns / 2u);
  if (!plan.in_box) {
    CHECK(!plan.lines && plan.lead == 0);
    return;
  }
  const int piece = 16 / format.bytes;
  const int64_t all[] = {of.N, of.in_channels, of.H, of.W};
  CHECK(plan.columns <= 256 && plan.rows <= 256);
  CHECK(multiples(piece, {plan.columns, int64_t{of.W} * plan.pixel_words, first_column, address}));
  CHECK(steps_of_boxes(of.in_stride, all, piece, {0, 2}));
  if (plan.lines) {
    CHECK(of.in_stride[1] == 1 && of.in_stride[3] == of.in_channels && (of.S == 1 || of.dilation_w == 1));
  } else {
    CHECK(of.in_stride[3] == 1 && steps_of_boxes(of.in_stride, all, piece, {1}));
  }
}

// The boxes in which a tile's outputs are stored.
static void check_stores(const Params& params, const Tile& tile, int64_t address, int piece) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  if (plan.stores == Stores::kSingle) return;
  const bool channels_last = plan.stores == Stores::kChannelsLast;
  const int64_t step = channels_last ? of.out_stride[3] : 1, plane = int64_t{of.P} * of.Q;
  const auto place = [&](int64_t m) {  // of output m of the tile, or -1
    const int64_t p = tile.p + m / plan.tile_q, q = tile.q + m % plan.tile_q;
    return p < of.P && q < of.Q ? p * of.out_stride[2] + q * of.out_stride[3] : int64_t{-1};
  };
  CHECK((channels_last ? of.out_channels : plan.run ? plane : of.Q) % piece == 0);
  CHECK(channels_last ? of.out_stride[1] == 1 : of.out_channels == 1 || of.out_stride[1] % piece == 0);
  CHECK(address % piece == 0 && (of.N == 1 || of.out_stride[0] % piece == 0));
  if (channels_last && (plan.run ? plane : of.Q) > 1) CHECK(step % piece == 0);
  for (int first = 0; first < plan.tile_p * plan.tile_q; first += kBoxPixels) {
    const int64_t start = place(first), in_run = int64_t{tile.p} * of.Q + first;
    CHECK((plan.run ? in_run < plane : start >= 0) == (start >= 0));
    if (start < 0) continue;
    CHECK(channels_last || start % piece == 0);
    for (int i = 0; i < kBoxPixels; ++i) {
      const bool clipped = plan.run ? in_run + i >= plane : tile.q + first % plan.tile_q + i >= of.Q;
      if (!clipped) CHECK(first + i < plan.tile_p * plan.tile_q && place(first + i) == start + i * step);
    }
  }
}

static bool check_plans(const Problem& problem, Operator op, const Addresses& at, std::mt19937& random) {
  const int bytes = element_bytes(problem.dtype);
  const Format format{bytes, bytes == 4 && !problem.tf32_allowed};
  const Device device{random() % 3 == 0 ? 3 : kSms};
  bool any = false;
  for (int i = 0; i < 8; ++i) {
    plan_in_hand = "plan " + std::to_string(i);
    Params params{};
    params.of = correlation_of_problem(problem, op);
    const Plan& plan = params.plan;
    // 0: the planner's choice.
    const int tile_k = i == 0 ? 0 : 32 << random() % 2, tile_p = i == 0 ? 0 : 1 + random() % 9;
    const int tile_q = i == 0 ? 0 : i % 2 ? params.of.Q : 16 * (1 + random() % 8);
    if (!make_plan(params.of, format, device, {at.in, at.out}, params.plan, tile_k, tile_p, tile_q)) continue;
    any = true;
    if (i > 0) CHECK(plan.tile_k == tile_k && plan.tile_p == tile_p && plan.tile_q == tile_q);
    set_numbers(params);
    NOTE_VALUES(plan.stores, 0, 1, 2);
    NOTE(plan.in_box);
    NOTE(plan.lines);
    NOTE(plan.run);
    NOTE(plan.lead > 0);
    check_numbers(params.of, plan, format);
    check_tiles(params);
    for (const int number : some_of(plan.tiles, 3, random)) {
      const Tile tile = locate_tile(params, number);
      check_reads(params, tile, at.in / bytes, format);
      check_stores(params, tile, at.out / bytes, 16 / bytes);
    }
  }
  return any;
}
