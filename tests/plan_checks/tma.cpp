#include "tma.cu"

using namespace modelnew;
using namespace modelnew::tma;
#include "planner.h"
#include "tma_columns.h"

static void check_memory(const Plan& plan) {
  const SharedLayout layout = shared_layout(plan);
  const TileShape& shape = plan.shape;
  CHECK(layout.end <= plan.smem_bytes && plan.smem_bytes <= kSharedMemory && layout.barriers % 8 == 0);
  CHECK(multiples(1024, {layout.staging, layout.x, layout.w, plan.x_stage_bytes, plan.w_stage_bytes}));
  // A warpgroup has half of the channels, or all of them; for threads it stages 64 at a time.
  const int own_channels = shape.together ? shape.channels / 2 : shape.channels;
  CHECK(staged_bytes(plan) >= 2 * shape.slots * (plan.by_threads ? 64 : own_channels));
  CHECK(plan.by_threads || staged_bytes(plan) % 1024 == 0);
  CHECK(layout.x >= layout.staging + 2 * staged_bytes(plan));
  const int slots = plan.windows ? plan.box_rows * plan.box_columns : shape.slots;
  CHECK(plan.block_channels > 0 && plan.block_channels <= 64 && plan.block_channels % 8 == 0);
  CHECK(plan.x_bytes == 2 * plan.block_channels * slots && plan.w_stage_bytes == 128 * shape.channels);
  CHECK(plan.w_bytes > 0 && plan.w_bytes <= plan.w_stage_bytes && plan.w_bytes % (2 * plan.block_channels) == 0);
  CHECK(std::max(plan.x_bytes, plan.w_stage_bytes) < 1 << 20);  // what a barrier can expect
  CHECK(plan.x_stage_bytes >= plan.x_bytes && layout.w >= layout.x + plan.x_stages * plan.x_stage_bytes);
  CHECK(layout.barriers >= layout.w + plan.w_stages * plan.w_stage_bytes);
  CHECK(layout.end >= layout.barriers + 8 * (4 * kMostStages + 2));
  for (int stages : {plan.x_stages, plan.w_stages}) CHECK(stages >= 2 && stages <= kMostStages);
  CHECK(part_pitch(shape) >= shape.channels);
  if (plan.splits > 1) CHECK(layout.x + 4 * shape.slots * part_pitch(shape) <= plan.smem_bytes);
}

static void check_numbers(const Grouped& of, const Plan& plan, int sms) {
  const TileShape& shape = plan.shape;
  const int step_h = plan.windows ? of.stride_h : 1, step_w = plan.windows ? of.stride_w : 1;
  for (int side : {plan.box_rows * step_h, plan.box_columns * step_w, plan.tile_lines, plan.tile_columns,
                   shape.channels})
    CHECK(side >= 1 && side <= 256);
  CHECK(covers(plan.tiles_k, plan.step_k, of.out_channels) && plan.step_k <= shape.channels);
  const int64_t blocks_c = ceil_div(of.in_channels, plan.block_channels);
  for (int block = 0; block < blocks_c; ++block) {  // steps of 16 channels: as many as there are
    const int channels = std::min(plan.block_channels, of.in_channels - block * plan.block_channels);
    CHECK((block < plan.whole_blocks ? 4 : plan.short_steps) == ceil_div(channels, 16));
  }
  int taps = 0;  // those of phases that there are
  for (int i = 0; i < plan.phases; ++i) taps += out_phase(of, i).taps();
  CHECK(plan.x_steps == blocks_c * plan.loads && plan.w_steps == blocks_c * taps);
  CHECK(taps == of.R * of.S || of.P < of.up_h || of.Q < of.up_w);
  CHECK(plan.blocks == (plan.splits == 1 ? std::min(plan.tiles, sms) : plan.tiles * plan.splits));
  int next = 0;
  for (int part = 0; part < plan.splits; ++part) {
    const Share share = share_of(plan, part);
    CHECK(share.first == next && share.last > next);
    next = share.last;
  }
  if (plan.splits > 1) CHECK(next == plan.x_steps);
  // Channels that a tile has beyond its own are stored by threads or direct boxes, which leave them out, or they do not
  // exist. Of merged groups no parts are added up.
  if (plan.step_k < shape.channels) CHECK(plan.by_threads || plan.direct || plan.tiles_k == 1);
  const bool shares_stage = of.groups > 1 && of.own_in % 64 != 0;
  CHECK(of.merged() == shares_stage);
  if (shares_stage) CHECK(plan.splits == 1 && !plan.direct && plan.packed && of.in_channels <= 64);
  CHECK(of.groups == 1 || of.in_channels % 8 == 0 || of.in_channels >= of.groups * of.own_in);  // boxes begin there
  CHECK(plan.cycles > 0 && plan.met > 0 && plan.met <= 1 && plan.leaves_out == (plan.met < 1));
  CHECK(!plan.leaves_out || !plan.windows);
}

// Every output is one slot's of one tile, which stores it where it belongs. The address is in values.
static void check_tiles(const Params& params, int64_t address) {
  const Grouped& of = params.of;
  const Plan& plan = params.plan;
  const int64_t plane = int64_t{of.P} * of.Q, pixels = of.N * plane;
  const int64_t image = plan.direct ? ceil_div(plane, 64) * 64 : plane;  // slots of it, without windows
  const int slots = plan.shape.slots, vector = plan.planes && plan.splits == 1 ? plan.out_vector : 1;
  if (plan.windows) CHECK((plan.tile_lines - 1) * plan.pitch + plan.tile_columns <= slots);
  CHECK(plan.windows ? plan.tile_columns % vector == 0 && plan.pitch % std::min(vector, 2) == 0 : slots % vector == 0);
  if (of.out_channels > 1) CHECK(vector == 1 || of.out_stride[1] % vector == 0);
  Owned owned(plan.tiles_k * pixels);
  for (int number = 0; number < plan.tiles; ++number) {
    const Tile tile = locate_tile(params, number);
    CHECK(within(tile.k, of.out_channels) && tile.k % plan.step_k == 0);
    CHECK(tile.end_k == std::min(tile.k + plan.step_k, of.out_channels));
    // All groups of a tile read the stages that it loads.
    const int first_c = tile.k / of.block_out * of.in_channels, group = tile.k / of.own_out;
    CHECK(group * of.own_in >= first_c);
    CHECK((tile.end_k - 1) / of.own_out * of.own_in + of.own_in <= first_c + of.in_channels);
    CHECK(tile.n >= 0 && tile.p >= 0 && tile.q >= 0);
    std::vector<std::vector<int64_t>> lines(plan.windows ? plan.tile_lines : 1);  // places of their slots
    for (int slot = 0; slot < slots; ++slot) {
      const int line = slot / plan.pitch, column = slot % plan.pitch;
      const Phase& phase = params.phase[tile.phase];
      int64_t n = tile.n, p = (tile.p + line) * of.up_h + phase.row, q = (tile.q + column) * of.up_w + phase.column;
      const bool in_tile = !plan.windows || (line < plan.tile_lines && column < plan.tile_columns);
      if (!plan.windows) {
        const int64_t at = tile.q + slot;
        n = at / image, p = at % image / of.Q, q = at % image % of.Q;
      }
      const bool exists = in_tile && n < of.N && p < of.P && q < of.Q;
      const int64_t place = place_of_slot(params, tile, slot);
      CHECK((place >= 0) == exists);
      if (in_tile) lines[plan.windows ? line : 0].push_back(place);
      if (!exists) continue;
      CHECK(place == n * of.out_stride[0] + p * of.out_stride[2] + q * of.out_stride[3]);
      CHECK(owned.take(tile.k / plan.step_k * pixels + (n * of.P + p) * of.Q + q));
      CHECK(plan.by_threads || plan.direct || (address + place) % 8 == 0);
    }
    for (const std::vector<int64_t>& places : lines) {
      CHECK(vector == 1 || are_runs(places, vector));
      for (size_t i = 0; i < places.size(); i += vector) CHECK(places[i] < 0 || (address + places[i]) % vector == 0);
    }
  }
  CHECK(owned.all());
}

// Every tap comes once and reads what the convolution says.
static void check_taps(const Params& params) {
  const Grouped& of = params.of;
  const Plan& plan = params.plan;
  const int64_t last_stage = shared_layout(plan).x + int64_t{plan.x_stages - 1} * plan.x_stage_bytes;
  Owned owned(of.R * of.S);
  int next = 0;
  for (int i = 0; i < plan.loads * plan.phases; ++i) {
    const Load& load = params.load[i];
    const Phase& phase = params.phase[plan.phases > 1 ? i : 0];
    CHECK(load.first_tap == next && load.taps >= 1 && next + load.taps <= of.R * of.S);
    for (; next < load.first_tap + load.taps; ++next) {
      const Tap& tap = params.tap[next];
      CHECK(tap.r < of.R && tap.s < of.S && owned.take(tap.r * of.S + tap.s));
      CHECK(tap.shift >= 0 && last_stage + (tap.shift + plan.shape.slots) * 128 <= plan.smem_bytes);
      const bool turned = plan.transposed && of.flipped;  // taps as w has them
      const int row = (turned ? of.R - 1 - tap.r : tap.r) * of.dilation_h;
      const int column = (turned ? of.S - 1 - tap.s : tap.s) * of.dilation_w;
      if (!plan.windows) CHECK(load.row == row && load.column == column && tap.shift == 0);
      // From the tile's first output on, in rows and columns of x.
      for (int line = 0; line < plan.tile_lines && plan.windows; ++line)
        for (int at = 0; at < plan.tile_columns; ++at) {
          const int slot = line * plan.pitch + at + tap.shift;
          CHECK(slot < plan.box_rows * plan.box_columns);
          const int h = load.row - of.pad_h + slot / plan.box_columns * of.stride_h;
          const int w = load.column - of.pad_w + slot % plan.box_columns * of.stride_w;
          CHECK(h * of.up_h == (line * of.up_h + phase.row) * of.stride_h - of.pad_h + row);
          CHECK(w * of.up_w == (at * of.up_w + phase.column) * of.stride_w - of.pad_w + column);
        }
    }
  }
  CHECK(owned.all() || of.P < of.up_h || of.Q < of.up_w);
}

// Here and below `of` has x as the call has it.
static void check_x_and_y(const Grouped& of, const Plan& plan, const Addresses& at) {
  const int64_t x_sizes[] = {of.N, of.all_in, of.H, of.W}, y_sizes[] = {of.N, of.out_channels, of.P, of.Q};
  if (plan.planes) CHECK(has_planes(of.in_stride, of.H, of.W));
  if (plan.copied) CHECK(has_lines(of.in_stride, of.H, of.W));
  NOTE(plan.copied && !has_planes(of.in_stride, of.H, of.W));
  if (plan.planes) {
    CHECK(has_planes(of.out_stride, of.P, of.Q) && at.out % (2 * plan.out_vector) == 0);
    CHECK(plan.direct != plan.copied && plan.direct != plan.by_threads);
  } else {
    CHECK(!plan.direct && plan.out_vector == 1);
    CHECK(plan.copied || has_pixels_for_boxes(of.in_stride, at.in, x_sizes));
    CHECK(plan.by_threads || has_pixels_for_boxes(of.out_stride, at.out, y_sizes));
  }
  if (plan.direct) {  // outputs are those of their own pixel
    CHECK(of.R * of.S == 1 && of.stride_h == 1 && of.stride_w == 1 && of.pad_h == 0 && of.pad_w == 0);
    CHECK(of.H == of.P && of.W == of.Q && of.H * of.W % 8 == 0);
    CHECK(at.in % 16 == 0 && steps_of_boxes(of.in_stride, x_sizes, 8, {0, 1}));
    CHECK(at.out % 16 == 0 && steps_of_boxes(of.out_stride, y_sizes, 8, {0, 1}));
  } else {
    CHECK(of.pad_h >= 0 && of.pad_w >= 0);
  }
  if (plan.windows) {
    const bool phases = of.stride_h == 2 && of.stride_w == 2 && of.dilation_h == 1 && of.dilation_w == 1;
    CHECK(plan.pitch == plan.box_columns && (phases || (of.stride_h == 1 && of.stride_w == 1)));
  } else if (!plan.direct) {
    CHECK(are_columns(hopper::columns_of(of), {{of.W, of.Q, of.S, of.stride_w, of.pad_w, of.dilation_w},
                                               {of.H, of.P, of.R, of.stride_h, of.pad_h, of.dilation_h}}));
  }
}

static void check_w_and_workspace(const Grouped& of, const Plan& plan, const Addresses& at) {
  const int64_t row = packed_row_channels(of), channels = ceil_div(of.all_in, 8) * 8;
  const int64_t strides[] = {of.w_stride_out, of.w_stride_in, of.w_stride_r, of.w_stride_s};
  const int64_t sizes[] = {of.out_channels, of.in_channels, of.R, of.S};
  CHECK(row >= of.in_channels && row % 8 == 0);
  if (plan.packed) {
    CHECK(packed_bytes(of, plan) >= 2 * of.out_channels * of.R * of.S * row);
    CHECK(!plan.copied || packed_bytes(of, plan) % 16 == 0);
  } else if (plan.transposed) {
    CHECK(of.groups == 1 && of.w_stride_out == 1 && of.out_channels % 8 == 0 && at.w % 16 == 0);
    CHECK(steps_of_boxes(strides, sizes, 8, {1, 2, 3}));
  } else {
    CHECK(!of.flipped && of.own_in == of.in_channels && of.w_stride_in == 1 && of.in_channels % 8 == 0);
    CHECK(at.w % 16 == 0 && steps_of_boxes(strides, sizes, 8, {0, 2, 3}));
  }
  if (!plan.copied) return;
  const Grouped copy = of_copy(of);
  const int64_t (&stride)[4] = copy.in_stride;
  const int64_t last = (of.N - 1) * stride[0] + (of.H - 1) * stride[2] + (of.W - 1) * stride[3];
  CHECK((plan.packed || of.all_in % 8 == 0) && copy.all_in == channels && copied_bytes(of, plan) >= 2 * (last + channels));
  CHECK(copied_bytes(of, plan) <= kMostCopiedBytes);
}

// Plans for a GPU of few SMs or of many.
static bool check_plans(const Problem& problem, Operator op, const Addresses& at, std::mt19937& random) {
  if (refusal_of_problem(problem, op) != nullptr) return false;
  const auto any_of = [&](std::initializer_list<int> values) { return values.begin()[random() % values.size()]; };
  const int sms = any_of({3, 64, kSms});
  const Grouped of = grouped(correlation_of_problem(problem, op));
  bool found = false;
  for (int i = 0; i < 8; ++i) {
    plan_in_hand = "plan " + std::to_string(i) + " for " + std::to_string(sms) + " SMs";
    Wishes wishes{};  // the planner's choice
    if (i > 0) {
      wishes = {any_of({-1, static_cast<int>(random() % kTileShapeCount)}), any_of({-1, 0, 1}),
                any_of({0, 0, 1, 2, 4, 8}), any_of({-1, 0, 1})};
    }
    Params params{};
    const Plan& plan = params.plan;
    if (!make_plan(of, sms, {at.in, at.w, at.out}, params.plan, wishes)) continue;
    CHECK(i == 0 || found);
    found = true;
    const TileShape& wished = wishes.shape < 0 ? plan.shape : kTileShapes[wishes.shape];
    CHECK(plan.shape.channels == wished.channels && plan.shape.slots == wished.slots);
    CHECK(plan.shape.together == wished.together);
    CHECK(wishes.windows < 0 || wishes.windows == plan.windows);
    CHECK(wishes.direct < 0 || wishes.direct == plan.direct);
    CHECK(wishes.splits == 0 || wishes.splits == plan.splits);
    NOTE_VALUES(plan.shape.slots, 64, 128, 192, 208, 224, 232, 256);
    NOTE_VALUES(plan.splits, 1, 2, 4, 8);
    NOTE_VALUES(plan.out_vector, 1, 2, 4, 8);
    NOTE(plan.direct && plan.transposed);
    NOTE(plan.copied && plan.transposed);
    NOTE(plan.direct && plan.splits > 1);
    NOTE(plan.windows && of.stride_h == 2);
    NOTE(!plan.planes && plan.copied);
    NOTE(plan.transposed);
    NOTE(plan.packed);
    NOTE(plan.by_threads);
    NOTE(of.merged());
    params.of = plan.copied ? of_copy(of) : of;
    set_numbers(params);
    check_memory(plan);
    check_numbers(params.of, plan, sms);
    check_x_and_y(of, plan, at);
    check_w_and_workspace(of, plan, at);
    check_taps(params);
    check_tiles(params, at.out / 2);
  }
  return found;
}
