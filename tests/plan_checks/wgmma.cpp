#include "wgmma.cu"

using namespace modelnew;
using namespace modelnew::wgmma;
#include "planner.h"

static const Guard kNoGuard{};

static int rows_of_warpgroup(const Plan& plan) { return plan.tile_k == 128 ? plan.tile_p : plan.tile_p / 2; }

static void check_memory(const UnitCorrelation& of, const Plan& plan, int bytes) {
  const SharedLayout layout = shared_layout(of, plan, bytes);
  const int64_t fp16_parts = plan.contained == 2 ? 2 : 1, row_bytes = int64_t{plan.block_steps} * 2 * plan.x_pitch * 16;
  CHECK(layout.end == plan.smem_bytes && plan.smem_bytes <= kSharedMemory);
  CHECK(layout.w_ring - layout.x_ring == fp16_parts * plan.x_slots * row_bytes);
  CHECK(layout.end - layout.w_ring >= plan.tile_q * 16);  // products reach so far behind the rows of x
  const int64_t steps = int64_t{stacked(plan) ? 1 : of.R} * of.S * plan.block_steps;
  const int64_t weight_bytes = plan.w_stages > 0 ? int64_t{plan.w_stages} * plan.group_steps * 64 * 32
                                                 : steps * plan.blocks_c * std::max(plan.tile_k, 64) * 32;
  CHECK(layout.end - layout.w_ring >= fp16_parts * weight_bytes);
  CHECK(plan.w_stages == 0 || (plan.w_stages >= 4 && plan.w_stages <= kMaxStages));
  if (plan.contained == 2) CHECK(layout.carried - layout.finish >= 8 * 16 * 8);
  if (!plan.down || (plan.contained != 2 && !stacked(plan))) CHECK(layout.handed - layout.carried >= 8 * 16 * 32);
  if (stacked(plan)) CHECK(layout.raw - layout.handed >= 2 * 16 * plan.tile_q * 4);
  CHECK(plan.convert_warps == 3 || plan.convert_warps == 4);
  // The fourth one would else copy weights, and only simple x is shared among four.
  const bool same_weights = plan.w_stages == 0 && of.groups == 1 && plan.blocks % plan.tiles_k == 0;
  if (plan.convert_warps == 4) CHECK(same_weights && plan.x_simple);
  // Warps that stage where another one does take turns.
  CHECK(plan.staging_parts == kMultiplyWarps ||
        (plan.staging_parts == (stacked(plan) ? 1 : kMultiplyWarps / 2) && plan.down && plan.y_runs));
  if (plan.contained != 0)
    CHECK(layout.x_ring - layout.raw >= plan.convert_warps * raw_parts(plan.contained) * kRawPartBytes);
  if (plan.boxes != 0) {
    CHECK(layout.staging % 1024 == 0);
    CHECK(layout.records - layout.staging == kMultiplyWarps * box_bytes(plan.contained));
  }
  if (plan.chunks) {
    CHECK(layout.raw % 128 == 0 && layout.notes - layout.raw >= 6 * 4096 && layout.x_ring - layout.notes >= 6 * 16);
  }
}

// Rows, pixels and channels of x.
static void check_window(const UnitCorrelation& of, const Plan& plan, int bytes) {
  const int group_rows = rows_of_warpgroup(plan), tile_pixels = group_rows * plan.tile_q;
  const int multiplied_bytes = plan.contained != 0 ? 2 : bytes, channels = 32 / multiplied_bytes;
  const int64_t steps = int64_t{plan.blocks_c} * plan.block_steps;
  CHECK(plan.contained == 0 || bytes == 4);
  const bool small = group_rows == 1 && multiplied_bytes == 4 && plan.down && plan.y_runs;
  CHECK(plan.contained == 2 ? tile_pixels == 128 : tile_pixels == 256 || (tile_pixels == 128 && small));
  CHECK(plan.x_rows == plan.tile_p + (of.R - 1) * of.dilation_h);
  // A batch of 32 pairs of pixels, times 7 parts or of split operands 2, times 4 warps, reaches into two rows at most.
  const bool long_rows = plan.block_steps * plan.x_pitch >= (plan.contained == 2 ? 2 : 7) * 4 * 32;
  CHECK(plan.x_slots >= (stacked(plan) && long_rows ? 2 : plan.x_rows) && plan.x_slots <= kMaxRows);
  CHECK(group_rows == 1 || plan.x_slots % plan.x_rows == 0);  // windows do not wrap round the ring
  if (plan.down) {  // the rows that the next tile adds find room
    CHECK(plan.blocks_c == 1 && group_rows == 1 && (stacked(plan) || plan.x_slots >= plan.x_rows + plan.tile_p));
  }
  const int columns = std::min(plan.tile_q, of.Q) + (of.S - 1) * of.dilation_w, even = plan.chunks ? 4 : 2;
  CHECK(within(plan.lead, even) && (of.pad_w + plan.lead) % even == 0);
  CHECK(plan.x_pitch % 2 == 0 && plan.x_pitch >= plan.lead + columns);
  CHECK(plan.blocks_c >= 1 && plan.block_steps >= 1 && steps * channels >= of.in_channels);
  if (plan.x_simple && !plan.chunks) CHECK(plan.x_pairs && steps * channels == of.in_channels);
  if (!plan.chunks) return;
  CHECK(plan.contained == 1 && plan.x_boxes && plan.w_stages > 0 && plan.convert_warps == 3);
  CHECK(of.groups == 1 || steps * channels == of.in_channels);
  CHECK(plan.whole_chunks * 64 + plan.rest_pixels == plan.x_pitch);
  if (plan.rest_pixels == 0) return;
  const int rest_lanes = plan.rest_pixels / 2 * plan.rest_rows * plan.rest_pieces / 2;
  CHECK(plan.rest_columns >= plan.rest_pixels && plan.rest_columns % 4 == 0 && rest_lanes >= 1 && rest_lanes <= 32);
  CHECK(plan.rest_columns * 4 * plan.rest_rows * plan.rest_pieces * 8 <= 4096);
  CHECK(plan.rest_pieces % 2 == 0 && plan.rest_pieces >= 2 && plan.rest_pieces <= 2 * plan.block_steps);
  CHECK(plan.rest_rows == 1 || (!plan.down && plan.rest_rows == plan.x_rows));
}

static void check_work(const UnitCorrelation& of, const Plan& plan, int bytes) {
  if (stacked(plan)) CHECK(of.R == 3 && of.dilation_h == 1 && plan.tile_p == 2 && plan.down && plan.y_runs);
  if (stacked(plan) && plan.contained == 2) CHECK(plan.tiles_k == 1);
  const int64_t block_steps = int64_t{stacked(plan) ? 1 : of.R} * of.S * plan.block_steps;
  CHECK(plan.group_steps >= 1 && plan.group_steps <= most_group_steps(plan.tile_q, plan.contained));
  CHECK(plan.contained != 2 || plan.group_steps * 16 <= 64);  // terms that tensor cores add up
  CHECK(plan.large_groups >= 1 && plan.large_groups <= plan.groups);
  CHECK(int64_t{plan.groups} * (plan.group_steps - 1) + plan.large_groups == block_steps);
  CHECK(plan.group_steps > 1 || plan.large_groups == plan.groups);

  const int64_t images = of.N * of.groups;
  CHECK(plan.tiles == images * plan.tiles_p * plan.tiles_q && plan.unit_tiles >= 1);
  CHECK(plan.units == plan.tiles_k * (plan.down ? ceil_div(images * plan.tiles_p, plan.unit_tiles) * plan.tiles_q
                                                : ceil_div(plan.tiles, plan.unit_tiles)));
  CHECK(within(plan.blocks - 1, std::min(plan.units, kSms)));
  if (plan.y_flat) CHECK(of.out_stride[3] == 1 && of.out_stride[2] == of.Q && plan.tile_p == 1);
  if (plan.boxes == 0) return;
  CHECK(plan.y_flat && plan.w_stages == 0 && plan.boxes <= 8 && plan.boxes == 1 << plan.log_boxes);
  CHECK(of.out_channels % plan.boxes == 0 && plan.boxes * of.out_stride[1] * bytes % 32 == 0);
  CHECK(of.groups == 1 || of.out_channels % 128 == 0);
  // Every channel is in one row of the weights, and a box has those that are aligned alike.
  Owned channels(256);
  for (int row = 0; row < 256; ++row) {
    const int k = bytes == 2 ? channel_of_row<2>(row, plan.boxes) : channel_of_row<4>(row, plan.boxes);
    CHECK(channels.take(k) && k / 128 == row / 128 && k % plan.boxes == row / 16 % 8 % plan.boxes);
  }
}

// Blocks walk over every tile once; runs do not break off, nor go on where memory does not; windows are kept exactly
// where the next one lies below.
static void check_walks(const UnitCorrelation& of, const Plan& plan) {
  const int64_t images = of.N * of.groups * plan.tiles_k, tiles = int64_t{plan.tiles_p} * plan.tiles_q;
  Owned owned(images * tiles);
  for (int block = 0; block < plan.blocks; ++block) {
    Tile last{};
    last.run_ends = true;
    bool first = true;
    for_each_tile(of, plan, Agenda{kNoGuard, false}, block, [&](const Tile& tile) {
      CHECK(within(tile.p, of.P) && within(tile.q, of.Q) && tile.p % plan.tile_p == 0 && tile.q % plan.tile_q == 0);
      CHECK(within(tile.group, of.groups) && within(tile.n, of.N) && within(tile.tile_k, plan.tiles_k));
      const int64_t image = (int64_t{tile.group} * of.N + tile.n) * plan.tiles_k + tile.tile_k;
      CHECK(owned.take(image * tiles + tile.p / plan.tile_p * plan.tiles_q + tile.q / plan.tile_q));
      const bool same = !first && tile.group == last.group && tile.n == last.n && tile.tile_k == last.tile_k;
      const bool below = same && tile.q == last.q && tile.p == last.p + plan.tile_p;
      const bool next = tile.p == last.p && tile.q == last.q + plan.tile_q;
      const bool wraps = plan.y_flat && tile.p == last.p + plan.tile_p && tile.q == 0 && last.q + plan.tile_q >= of.Q;
      CHECK(tile.run_starts == last.run_ends && (tile.run_starts || (same && (next || wraps))));
      CHECK(plan.down ? tile.run_starts && tile.run_ends : !tile.goes_on);
      CHECK(tile.continues == (!first && last.goes_on) && (!tile.continues || below));
      // The weights that a block copies before its first tile, if nobody is left to copy others.
      if (plan.convert_warps == 4) CHECK(tile.tile_k == block % plan.tiles_k && tile.group == 0);
      last = tile;
      first = false;
    });
    CHECK(!first && last.run_ends && !last.goes_on);
  }
  CHECK(owned.all());
}

static void check_plan(const UnitCorrelation& of, const Plan& plan, int bytes) {
  check_memory(of, plan, bytes);
  check_window(of, plan, bytes);
  check_work(of, plan, bytes);
  check_walks(of, plan);
}

// Every configuration: fp32 tensors in full accuracy if TF32 is not allowed, else as TF32, however small the problem.
static bool check_plans(const Problem& problem, Operator op, const Addresses& at, std::mt19937&) {
  const UnitCorrelation of = correlation_of(problem, op);
  const int bytes = element_bytes(problem.dtype);
  const Precision precision{bytes, bytes == 4 && !problem.tf32_allowed};
  const std::string contract = precision.exact ? "in full, " : bytes == 4 ? "as TF32, " : "16 bits, ";
  bool any = false;
  for (int configuration = -1; configuration < kAllConfigurations; ++configuration) {
    plan_in_hand = contract + std::to_string(configuration);
    Plan plan{}, again{};
    if (!make_plan(of, precision, Device{kSms}, {at.in, at.out}, configuration, plan)) continue;
    any = true;
    NOTE_VALUES(configuration, 0, 1, 2, 3, 4, 5, 6, 7, 8, 12);  // four widths by channels and directions
    NOTE_VALUES(configuration, 16, 32, 33, 34, 35, 36, 37, 38, 39, 40, 44);  // as TF32, the latter contained
    NOTE_VALUES(configuration, 64, 65, 66, 68, 69, 70, 72, 76);  // in full accuracy
    NOTE_VALUES(configuration, 17, 81);                          // rows of taps in one product
    check_plan(of, plan, bytes);
    CHECK(precision.exact == (plan.contained == 2));
    if (plan.contained != 1) continue;
    CHECK(plan_again(of, Device{kSms}, {at.in, at.out}, plan, again));
    check_plan(of, again, bytes);
    CHECK(plan.tile_k == again.tile_k && plan.tile_p == again.tile_p && plan.tile_q == again.tile_q);
    CHECK(!again.down && again.contained == 0 && (again.convert_warps == 3 || again.tiles_k == 1));  // takes a list
  }
  return any;
}
