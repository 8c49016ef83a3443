#include "wgmma.cu"

using namespace modelnew;
using namespace modelnew::wgmma;
#include "planner.h"

static const Guard kNoGuard{};

// What is wrong with the numbers of a plan, or nothing.
static std::string fault_of_numbers(const UnitCorrelation& of, const Plan& plan, int bytes) {
  const SharedLayout layout = shared_layout(of, plan, bytes);
  // In 64 bits, unlike the layout.
  const int64_t row_bytes = int64_t{plan.block_steps} * 2 * plan.x_pitch * 16;
  const int fp16_parts = plan.contained == 2 ? 2 : 1;
  if (layout.w_ring - layout.x_ring != fp16_parts * plan.x_slots * row_bytes) return "the size of the x ring";
  if (plan.smem_bytes > 232448 || layout.end != plan.smem_bytes) return "shared memory";
  if (layout.end - layout.w_ring < plan.tile_q * 16) return "too little behind the rows of x";

  if (plan.x_slots < plan.x_rows || plan.x_slots > kMaxRows) return "rows of the x ring";
  const int group_rows = plan.tile_k == 128 ? plan.tile_p : plan.tile_p / 2, tile_pixels = group_rows * plan.tile_q;
  const int multiplied_bytes = plan.contained != 0 ? 2 : bytes;
  if (plan.contained != 0 && bytes != 4) return "16 bits contained in 16 bits";
  const bool small = group_rows == 1 && multiplied_bytes == 4 && plan.down && plan.y_runs;
  if (plan.contained == 2 ? tile_pixels != 128 : tile_pixels != 256 && !(tile_pixels == 128 && small))
    return "pixels of a tile";
  if (plan.contained == 2 && layout.carried - layout.finish < 8 * 16 * 8) return "room for factors and biases";
  const bool one_part = plan.down && plan.contained == 2;
  if (!one_part && layout.raw - layout.carried < 8 * 16 * 32) return "room for carried sectors";
  if (group_rows > 1 && plan.x_slots % plan.x_rows != 0) return "a window that wraps round the ring";
  if (plan.x_rows != plan.tile_p + (of.R - 1) * of.dilation_h) return "rows of a window";
  const int columns = std::min(plan.tile_q, of.Q) + (of.S - 1) * of.dilation_w;
  const int even = plan.chunks ? 4 : 2;
  if (plan.lead < 0 || plan.lead >= even || (of.pad_w + plan.lead) % even != 0) return "pixels that start odd";
  if (plan.x_pitch % 2 != 0 || plan.x_pitch < plan.lead + columns) return "pixels of a row";
  if (plan.w_stages != 0 && (plan.w_stages < 4 || plan.w_stages > kMaxStages)) return "stages of weights";

  const int64_t steps = int64_t{plan.blocks_c} * plan.block_steps, channels = 32 / multiplied_bytes;
  const int64_t needed = ceil_div(of.in_channels, channels);
  if (plan.blocks_c < 1 || plan.block_steps < 1 || steps < needed) return "channels that no block has";
  if (16 * steps > 17 * needed) return "too many channels of zeros";
  if (plan.x_simple && !plan.chunks && (!plan.x_pairs || steps * channels != of.in_channels))
    return "x that is not that simple";
  if (plan.chunks) {
    if (plan.contained != 1 || !plan.x_boxes || plan.w_stages == 0 || plan.convert_warps != 3) return "chunks of x";
    if (of.groups > 1 && steps * channels != of.in_channels) return "chunks that reach into the next group";
    if (layout.raw % 128 != 0 || layout.notes - layout.raw < 6 * 4096 || layout.x_ring - layout.notes < 6 * 16)
      return "room for chunks";
    if (plan.whole_chunks * 64 + plan.rest_pixels != plan.x_pitch) return "pixels in no chunk";
    const int rest_lanes = plan.rest_pixels / 2 * plan.rest_rows * plan.rest_pieces / 2;
    const int rest_bytes = plan.rest_columns * 4 * plan.rest_rows * plan.rest_pieces * 8;
    if (plan.rest_pixels > 0) {
      if (plan.rest_columns < plan.rest_pixels || plan.rest_columns % 4 != 0) return "columns of rests";
      if (rest_lanes < 1 || rest_lanes > 32 || rest_bytes > 4096) return "the size of rests";
      if (plan.rest_pieces % 2 != 0 || plan.rest_pieces < 2 || plan.rest_pieces > 2 * plan.block_steps)
        return "pieces of rests";
      if (plan.rest_rows != 1 && (plan.down || plan.rest_rows != plan.x_rows)) return "rows of rests";
    }
  }

  const int64_t block_steps = int64_t{of.R} * of.S * plan.block_steps;
  const int64_t weight_bytes = plan.w_stages > 0 ? int64_t{plan.w_stages} * plan.group_steps * 64 * 32
                                                 : block_steps * plan.blocks_c * plan.tile_k * 32;
  if (layout.end - layout.w_ring < fp16_parts * weight_bytes) return "room for weights";
  if (plan.group_steps < 1 || plan.group_steps > most_group_steps(plan.tile_q, plan.contained))
    return "steps of a group";
  if (plan.contained == 2 && plan.group_steps * channels > 64) return "too long a sum on tensor cores";
  if (plan.large_groups < 1 || plan.large_groups > plan.groups) return "groups with all their steps";
  if (plan.group_steps == 1 && plan.large_groups != plan.groups) return "groups without steps";
  if (int64_t{plan.groups} * (plan.group_steps - 1) + plan.large_groups != block_steps) return "steps of all groups";

  const int64_t images = of.N * of.groups, tiles = images * plan.tiles_p * plan.tiles_q;
  if (plan.tiles != tiles || plan.unit_tiles < 1 || plan.blocks < 1 || plan.blocks > std::min(plan.units, 132))
    return "tiles, units or blocks";
  const int64_t parts = plan.down ? ceil_div(images * plan.tiles_p, plan.unit_tiles) * plan.tiles_q
                                  : ceil_div(tiles, plan.unit_tiles);
  if (plan.units != plan.tiles_k * parts) return "the number of units";
  if (plan.down) {
    if (plan.blocks_c != 1) return "downwards with blocks of channels";
    if (group_rows != 1) return "downwards with several rows for a warpgroup";
    if (plan.x_slots < plan.x_rows + plan.tile_p) return "no room for the rows that the next tile adds";
  }
  if (plan.boxes != 0) {
    if (!plan.y_flat || plan.w_stages != 0 || plan.boxes > 8 || plan.boxes != 1 << plan.log_boxes) return "boxes";
    const int staging_bytes = layout.records - layout.staging;
    if (layout.staging % 1024 != 0 || staging_bytes != kMultiplyWarps * box_bytes(plan.contained))
      return "staging of boxes";
    if (of.out_channels % plan.boxes || plan.boxes * of.out_stride[1] * bytes % 32) return "channels aligned unlike";
    if (of.groups > 1 && of.out_channels % 128) return "boxes that reach into the next group";
    // Every channel is in one row of the weights, and no box has others than those aligned alike.
    std::vector<int> rows(256);
    for (int row = 0; row < 256; ++row) {
      const int k = bytes == 2 ? channel_of_row<2>(row, plan.boxes) : channel_of_row<4>(row, plan.boxes);
      if (k < 0 || k >= 256 || rows[k]++ || k / 128 != row / 128 || k % plan.boxes != row / 16 % 8 % plan.boxes)
        return "rows of the weights";
    }
  }
  const bool lines_up = of.out_stride[3] == 1 && of.out_stride[2] == of.Q && plan.tile_p == 1;
  if (plan.y_flat && !lines_up) return "runs beyond a row that ends";

  if (plan.convert_warps != 3 && plan.convert_warps != 4) return "warps that convert";
  // The fourth one would else copy weights, and only simple x is shared among four.
  const bool same_weights = plan.w_stages == 0 && of.groups == 1 && plan.blocks % plan.tiles_k == 0;
  if (plan.convert_warps == 4 && !(same_weights && plan.x_simple)) return "nobody to copy weights";
  if (plan.staging_parts != kMultiplyWarps && !(plan.staging_parts == kMultiplyWarps / 2 && plan.down && plan.y_runs))
    return "warps that stage where another one does, and take no turns";
  const int raw_bytes = plan.contained != 0 ? plan.convert_warps * raw_parts(plan.contained) * kRawPartBytes : 0;
  if (layout.x_ring - layout.raw < raw_bytes) return "room for x on its way";
  return "";
}

// What is wrong with the walks of all blocks, or nothing: every tile once; runs that do not break off, nor go on where
// memory does not; windows kept exactly where the next one lies below.
static std::string fault_of_walks(const UnitCorrelation& of, const Plan& plan) {
  const int64_t images = of.N * of.groups * plan.tiles_k, tiles = int64_t{plan.tiles_p} * plan.tiles_q;
  std::vector<char> owned(images * tiles);
  for (int block = 0; block < plan.blocks; ++block) {
    Tile last{};
    last.run_ends = true;
    bool first = true;
    std::string fault;
    for_each_tile(of, plan, Agenda{kNoGuard, false}, block, [&](const Tile& tile) {
      if (!fault.empty()) return;
      const int row = tile.p / plan.tile_p, column = tile.q / plan.tile_q;
      if (tile.p % plan.tile_p || tile.q % plan.tile_q || tile.p >= of.P || tile.q >= of.Q || tile.p < 0 ||
          tile.q < 0 || tile.group < 0 || tile.group >= of.groups || tile.n < 0 || tile.n >= of.N ||
          tile.tile_k < 0 || tile.tile_k >= plan.tiles_k) {
        fault = "a tile outside";
        return;
      }
      const int64_t image = (int64_t{tile.group} * of.N + tile.n) * plan.tiles_k + tile.tile_k;
      if (owned[image * tiles + row * plan.tiles_q + column]++) fault = "a tile twice";
      const bool same = !first && tile.group == last.group && tile.n == last.n && tile.tile_k == last.tile_k;
      if (tile.run_starts != last.run_ends) fault = "a run that starts before another ends";
      if (!tile.run_starts) {
        const bool next = tile.p == last.p && tile.q == last.q + plan.tile_q;
        const bool wraps = plan.y_flat && tile.p == last.p + plan.tile_p && tile.q == 0 && last.q + plan.tile_q >= of.Q;
        if (!same || !(next || wraps)) fault = "a run of tiles that are not neighbours";
      }
      if (plan.down && !(tile.run_starts && tile.run_ends)) fault = "downwards and not a run of its own";
      if (!plan.down && tile.goes_on) fault = "rightwards and goes on downwards";
      const bool below = same && tile.q == last.q && tile.p == last.p + plan.tile_p;
      if (tile.continues && !below) fault = "a window that continues another one than that above";
      if (tile.continues != (!first && last.goes_on)) fault = "rows kept for nothing, or not kept";
      // The weights that a block copies before its first tile, if nobody is left to copy others.
      if (plan.convert_warps == 4 && (tile.tile_k != block % plan.tiles_k || tile.group != 0))
        fault = "weights that nobody copies";
      last = tile;
      first = false;
    });
    if (!fault.empty()) return fault;
    if (first) return "a block without a tile";
    if (!last.run_ends) return "a run that never ends";
    if (last.goes_on) return "the last tile goes on";
  }
  return once_each(owned) ? "" : "a tile never";
}

// What is wrong with a plan that does again what another one marks, or nothing: its tiles have other numbers, or it
// takes a list of them, here of every third one, otherwise.
static std::string fault_of_again(const UnitCorrelation& of, const Plan& plan, const Plan& again) {
  if (plan.tile_k != again.tile_k || plan.tile_p != again.tile_p || plan.tile_q != again.tile_q) return "other tiles";
  if (again.down || again.contained != 0) return "a plan that takes no list";
  if (again.convert_warps == 4 && again.tiles_k > 1) return "nobody to copy the weights of a list";
  using Place = std::array<int, 5>;
  const auto place = [](const Tile& tile) { return Place{tile.group, tile.tile_k, tile.n, tile.p, tile.q}; };
  std::map<uint32_t, Place> places;
  for (int block = 0; block < plan.blocks; ++block)
    for (Walk walk(of, plan, Agenda{kNoGuard, false}, block); !walk.done(); walk.next())
      if (!places.emplace(walk.number(), place(walk.tile)).second) return "a number of two tiles";
  if (places.rbegin()->first + 1 != places.size()) return "a number of no tile";
  std::vector<uint32_t> list;
  for (const auto& [number, tile] : places)
    if (number % 3 == 1) list.push_back(number);
  Control control{};
  control.listed = list.size();
  Guard guard{};
  guard.control = &control;
  guard.list = list.data();
  std::set<Place> left;
  for (uint32_t number : list) left.insert(places[number]);
  bool alone = true;
  for (int block = 0; block < again.blocks; ++block)
    for_each_tile(of, again, Agenda{guard, true}, block, [&](const Tile& tile) {
      alone &= left.erase(place(tile)) == 1 && tile.run_starts && tile.run_ends && !tile.continues && !tile.goes_on;
    });
  return alone && left.empty() ? "" : "a list that is not done tile by tile";
}

static std::string fault_of(const UnitCorrelation& of, const Plan& plan, int bytes) {
  const std::string fault = fault_of_numbers(of, plan, bytes);
  return fault.empty() ? fault_of_walks(of, plan) : fault;
}

extern "C" {
double plan_cycles(int op, const int64_t* fields, uint64_t in, uint64_t, uint64_t out) {
  const Planned& planned = plan_of(make_problem(fields), as_operator(op), Alignment{in, out});
  return planned.found ? planned.plan.cycles : 0;
}
// Plans every configuration for tensors at these addresses: null if there is none, else what is wrong, or "". fp32
// tensors in full if TF32 is not allowed, else as TF32, however small the problem.
const char* plan_fault(int op, const int64_t* fields, uint64_t in, uint64_t, uint64_t out, int) {
  const Problem problem = make_problem(fields);
  const UnitCorrelation of = correlation_of(problem, as_operator(op));
  const int bytes = element_bytes(problem.dtype);
  const Precision precision{bytes, bytes == 4 && !problem.tf32_allowed};
  const std::string contract = precision.exact ? "in full, " : bytes == 4 ? "as TF32, " : "16 bits, ";
  bool any = false;
  for (int configuration = -1; configuration < 96; ++configuration) {
    Plan plan{}, again{};
    if (!make_plan(of, precision, Device{kSms}, Alignment{in, out}, configuration, plan)) continue;
    any = true;
    seen.insert(contract + std::to_string(configuration));
    std::string fault = fault_of(of, plan, bytes);
    if (fault.empty() && precision.exact != (plan.contained == 2)) fault = "not as precise as asked for";
    if (fault.empty() && plan.contained == 1) {
      if (!plan_again(of, Device{kSms}, Alignment{in, out}, plan, again)) fault = "nothing to do tiles again by";
      if (fault.empty()) fault = fault_of(of, again, bytes);
      if (fault.empty()) fault = fault_of_again(of, plan, again);
    }
    if (!fault.empty()) return told(fault, "configuration " + std::to_string(configuration));
  }
  return any ? "" : nullptr;
}
}
