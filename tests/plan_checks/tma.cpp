#include "tma.cu"

using namespace modelnew;
using namespace modelnew::tma;
#include "planner.h"
#include "tma_columns.h"

// What is wrong with the numbers of a plan, or nothing.
static std::string fault_of_numbers(const Grouped& of, const Plan& plan, int sms) {
  const SharedLayout layout = shared_layout(plan);
  const TileShape& shape = plan.shape;
  if (layout.end > plan.smem_bytes || plan.smem_bytes > 232448) return "shared memory";
  if (layout.staging % 1024 || layout.x % 1024 || layout.w % 1024 || layout.barriers % 8) return "alignment of a part";
  if (plan.x_stage_bytes % 1024 || plan.w_stage_bytes % 1024) return "alignment of stages";
  // A warpgroup has half of the channels, or all of them; for threads it stages 64 at a time.
  const int own = shape.together ? shape.channels / 2 : shape.channels;
  const int staged = 2 * shape.slots * (plan.by_threads ? 64 : own);
  if (staged_bytes(plan) < staged || (!plan.by_threads && staged_bytes(plan) % 1024)) return "a warpgroup's staging";
  if (layout.x < layout.staging + 2 * staged_bytes(plan)) return "room for staging";
  const int slots = plan.windows ? plan.box_rows * plan.box_columns : shape.slots;
  if (plan.x_bytes != 128 * slots || plan.w_stage_bytes != 128 * shape.channels) return "bytes of a stage";
  if (plan.x_bytes >= 1 << 20 || plan.w_stage_bytes >= 1 << 20) return "more bytes than a barrier can expect";
  if (layout.w < layout.x + plan.x_stages * plan.x_stage_bytes || plan.x_stage_bytes < plan.x_bytes)
    return "room for x";
  if (layout.barriers < layout.w + plan.w_stages * plan.w_stage_bytes) return "room for weights";
  if (layout.end < layout.barriers + 8 * (4 * kMostStages + 2)) return "room for barriers";
  for (int stages : {plan.x_stages, plan.w_stages})
    if (stages < 2 || stages > kMostStages) return "stages";
  const int step_h = plan.windows ? of.stride_h : 1, step_w = plan.windows ? of.stride_w : 1;
  for (int side : {plan.box_rows * step_h, plan.box_columns * step_w, plan.tile_lines, plan.tile_columns,
                   shape.channels})
    if (side < 1 || side > 256) return "the side of a box";
  if (!covers(plan.tiles_k, shape.channels, of.out_channels)) return "tiles of channels";
  const int64_t blocks_c = (of.in_channels + 63) / 64;
  if (plan.x_steps != blocks_c * plan.loads || plan.w_steps != blocks_c * of.R * of.S) return "steps";
  if (plan.splits == 1 ? plan.blocks != std::min(plan.tiles, sms) : plan.blocks != plan.tiles * plan.splits)
    return "blocks of the launch";
  // Of clusters of more than two blocks not all SMs are one's.
  if (plan.blocks > (plan.splits > 2 ? sms * 10 / 11 : sms)) return "more blocks than run at once";
  if (plan.splits > 1 && layout.x + 4 * shape.slots * part_pitch(shape) > plan.smem_bytes) return "room for parts";
  if (part_pitch(shape) < shape.channels) return "a part that overlaps";
  for (int part = 0, next = 0; part < plan.splits; ++part) {
    const Share share = share_of(plan, part);
    if (share.first != next || share.last <= share.first) return "parts of the reduction";
    next = share.last;
    if (part + 1 == plan.splits && next != plan.x_steps) return "steps in no part";
  }
  // A tile's outputs read the same channels of x; of merged groups these are 64, and no parts are added up.
  if (of.groups > 1 && (of.in_channels % 64 || of.block_out % shape.channels)) return "a tile of several groups";
  if (of.groups > 1 && of.own_in < 64 && (plan.splits > 1 || plan.direct || of.in_channels != 64))
    return "merged groups in another way than is mended";
  return plan.cycles > 0 ? "" : "no estimate";
}

// What is wrong with the tiles, or nothing: every output is one slot's of one tile, which stores it where it belongs.
// The address is in values.
static std::string fault_of_tiles(const Params& params, int64_t address) {
  const Grouped& of = params.of;
  const Plan& plan = params.plan;
  const int64_t plane = int64_t{of.P} * of.Q, pixels = of.N * plane, filled = (plane + 63) / 64 * 64;
  const int slots = plan.shape.slots, vector = plan.planes && plan.splits == 1 ? plan.out_vector : 1;
  if (plan.windows && (plan.tile_lines - 1) * plan.pitch + plan.tile_columns > slots) return "outputs without a slot";
  if (plan.windows ? plan.tile_columns % vector || plan.pitch % std::min(vector, 2) : slots % vector) return "runs";
  if (vector > 1 && of.out_channels > 1 && of.out_stride[1] % vector) return "channels of y astray";
  std::vector<uint8_t> owned(plan.tiles_k * pixels);
  std::vector<int64_t> places(slots);
  for (int number = 0; number < plan.tiles; ++number) {
    const Tile tile = locate_tile(params, number);
    if (tile.k % plan.shape.channels || tile.k < 0 || tile.k >= of.out_channels) return "a tile outside";
    if (tile.n < 0 || tile.p < 0 || tile.q < 0) return "a tile in front of y";
    uint8_t* const of_channels = &owned[tile.k / plan.shape.channels * pixels];
    for (int slot = 0; slot < slots; ++slot) {
      int64_t n = tile.n, p = tile.p + slot / plan.pitch, q = tile.q + slot % plan.pitch;
      bool exists = slot / plan.pitch < plan.tile_lines && slot % plan.pitch < plan.tile_columns;
      if (!plan.windows) {
        const int64_t at = tile.q + slot, image = plan.direct ? filled : plane;
        n = at / image, p = at % image / of.Q, q = at % image % of.Q;
      }
      exists &= n < of.N && p < of.P && q < of.Q;
      places[slot] = place_of_slot(params, tile, slot);
      if ((places[slot] >= 0) != exists) return "an output that is not stored, or another that is";
      if (!exists) continue;
      if (places[slot] != n * of.out_stride[0] + p * of.out_stride[2] + q * of.out_stride[3]) return "elsewhere in y";
      if (of_channels[(n * of.P + p) * of.Q + q]++) return "an output twice";
      if (!plan.by_threads && (address + places[slot]) % 8) return "a pixel of y astray";
    }
    for (int first = 0; vector > 1 && first < slots; first += vector) {
      int slot = first;
      if (plan.windows) {
        const int runs = plan.tile_columns / vector, line = first / vector / runs;
        if (line >= plan.tile_lines) break;
        slot = line * plan.pitch + first / vector % runs * vector;
      }
      if (places[slot] >= 0 && (address + places[slot]) % vector) return "outputs of planes astray";
      for (int i = 0; i < vector; ++i)
        if (places[slot + i] != (places[slot] < 0 ? -1 : places[slot] + i)) return "outputs that are no neighbours";
    }
  }
  return once_each(owned) ? "" : "an output never";
}

// What is wrong with the order of the reduction, or nothing: every tap once, and it reads what the convolution says.
static std::string fault_of_taps(const Params& params) {
  const Grouped& of = params.of;
  const Plan& plan = params.plan;
  const SharedLayout layout = shared_layout(plan);
  std::vector<uint8_t> there(of.R * of.S);
  int next = 0;
  for (int i = 0; i < plan.loads; ++i) {
    const Load& load = params.load[i];
    if (load.first_tap != next || load.taps < 1) return "taps of a stage";
    next += load.taps;
    for (int t = load.first_tap; t < next; ++t) {
      if (t >= of.R * of.S) return "a tap too many";
      const Tap& tap = params.tap[t];
      if (tap.r >= of.R || tap.s >= of.S || there[tap.r * of.S + tap.s]++) return "a tap twice";
      const int64_t last = layout.x + int64_t{plan.x_stages - 1} * plan.x_stage_bytes;
      if (tap.shift < 0 || last + (tap.shift + plan.shape.slots) * 128 > plan.smem_bytes)
        return "a slot outside shared memory";
      const bool turned = plan.transposed && of.flipped;  // taps as w has them
      const int row = (turned ? of.R - 1 - tap.r : tap.r) * of.dilation_h;
      const int column = (turned ? of.S - 1 - tap.s : tap.s) * of.dilation_w;
      if (!plan.windows) {
        if (load.row != row || load.column != column || tap.shift != 0) return "another tap than its columns have";
        continue;
      }
      // From the tile's first output on, in rows and columns of x.
      for (int line = 0; line < plan.tile_lines; ++line)
        for (int at = 0; at < plan.tile_columns; ++at) {
          const int slot = line * plan.pitch + at + tap.shift;
          if (slot >= plan.box_rows * plan.box_columns) return "a slot behind the window";
          if (load.row + slot / plan.box_columns * of.stride_h != line * of.stride_h + row) return "another row of x";
          if (load.column + slot % plan.box_columns * of.stride_w != at * of.stride_w + column)
            return "another column of x";
        }
    }
  }
  return next == of.R * of.S ? "" : "a tap never";
}

// What is wrong with where x, w and y come from and go to, or nothing. `of`: with x as the call has it.
static std::string fault_of_operands(const Grouped& of, const Plan& plan, const Alignment& address) {
  const auto whole = [](int64_t stride, int64_t size) { return size == 1 || (stride > 0 && stride % 8 == 0); };
  const auto planes = [](const int64_t (&stride)[4], int rows, int columns) {
    return (columns == 1 || stride[3] == 1) && (rows == 1 || stride[2] == columns);
  };
  if ((plan.planes || plan.copied) && !planes(of.in_stride, of.H, of.W)) return "no planes";
  if (plan.planes) {
    if (!planes(of.out_stride, of.P, of.Q)) return "no planes";
    if (address.out % (2 * plan.out_vector)) return "y astray";
    if (plan.direct == plan.copied) return "planes that are both multiplied and copied, or neither";
  } else {
    if (plan.direct) return "pixels as if they were planes";
    if (!plan.copied && !has_pixels_for_boxes(of.in_stride, address.in, {of.N, of.all_in, of.H, of.W}))
      return "pixels of x astray";
    if (plan.out_vector != 1) return "channels of pixels as if they were planes";
  }
  if (!plan.by_threads) {
    if (plan.planes || !has_pixels_for_boxes(of.out_stride, address.out, {of.N, of.out_channels, of.P, of.Q}))
      return "pixels of y astray";
  }
  if (plan.direct) {
    if (of.R * of.S != 1 || of.stride_h != 1 || of.stride_w != 1 || of.pad_h != 0 || of.pad_w != 0 || of.H != of.P ||
        of.W != of.Q)
      return "outputs that are not those of their own pixel";
    if (address.in % 16 || of.H * of.W % 8 || !whole(of.in_stride[0], of.N) || !whole(of.in_stride[1], of.all_in))
      return "planes of x astray";
  } else if (of.pad_h < 0 || of.pad_w < 0) {
    return "x that begins in front of its first row";
  }
  if (plan.windows) {
    const bool strided = of.stride_h == 2 && of.stride_w == 2 && of.dilation_h == 1 && of.dilation_w == 1;
    if (plan.pitch != plan.box_columns || (!strided && (of.stride_h != 1 || of.stride_w != 1))) return "no window";
  } else if (!plan.direct) {
    const hopper::Axis axes[2] = {{of.W, of.Q, of.S, of.stride_w, of.pad_w, of.dilation_w},
                                  {of.H, of.P, of.R, of.stride_h, of.pad_h, of.dilation_h}};
    const std::string fault = fault_of_columns(hopper::columns_of(of), axes);
    if (!fault.empty()) return fault;
  }
  // The map of weights and that of the copy, as far as they reach.
  const int64_t row = packed_row_channels(of), channels = (of.all_in + 7) / 8 * 8;
  if (row < of.in_channels || row % 8) return "rows of weights";
  if (plan.packed) {
    const int64_t bytes = packed_bytes(of, plan);
    if (bytes < 2 * of.out_channels * of.R * of.S * row) return "room for weights that are packed";
    if (plan.copied && bytes % 16) return "a copy astray";
  } else if (plan.transposed) {
    if (of.groups != 1 || of.w_stride_out != 1 || of.out_channels % 8 || address.w % 16)
      return "weights as they are, transposed";
    if (!whole(of.w_stride_in, of.in_channels) || !whole(of.w_stride_r, of.R) || !whole(of.w_stride_s, of.S))
      return "rows of transposed weights astray";
  } else {
    if (of.flipped || of.own_in != of.in_channels || of.w_stride_in != 1 || of.in_channels % 8 || address.w % 16)
      return "weights as they are";
    if (!whole(of.w_stride_out, of.out_channels) || !whole(of.w_stride_r, of.R) || !whole(of.w_stride_s, of.S))
      return "rows of weights astray";
  }
  if (plan.copied) {
    const Grouped copy = of_copy(of);
    const int64_t (&stride)[4] = copy.in_stride;
    const int64_t last = (of.N - 1) * stride[0] + (of.H - 1) * stride[2] + (of.W - 1) * stride[3];
    if (!plan.packed || copy.all_in != channels || copied_bytes(of, plan) < 2 * (last + channels))
      return "room for the copy";
    if (copied_bytes(of, plan) > int64_t{512} << 20) return "a copy that is too large";
  }
  return "";
}

static void note(const Grouped& of, const Plan& plan) {
  if (of.groups > 1) seen.insert(of.own_in < of.in_channels ? "merged groups" : "groups");
  const std::string tensors = plan.planes ? "planes: " : "pixels: ", parts = plan.splits > 1 ? "parts of " : "";
  seen.insert(tensors + parts + (plan.direct ? "planes as they are" : !plan.windows ? "columns" :
                                 of.stride_h == 2 ? "phases" : "windows"));
  const TileShape& shape = plan.shape;
  seen.insert(tensors + "tile of " + std::to_string(shape.channels) + " x " + std::to_string(shape.slots));
  seen.insert(tensors + std::to_string(plan.splits) + " parts");
  if (plan.planes) seen.insert((plan.windows ? "lines of " : "y by ") + std::to_string(plan.out_vector));
  if (!plan.planes) seen.insert(plan.packed ? "w packed" : plan.transposed ? "w transposed" : "w as it is");
  if (!plan.planes && plan.copied) seen.insert("planes to anywhere");
  if (!plan.planes) seen.insert(tensors + (plan.by_threads ? "y by threads" : "y by boxes"));
}

extern "C" {
double plan_cycles(int op, const int64_t* fields, uint64_t in, uint64_t w, uint64_t out) {
  const Planned& planned = plan_of(make_problem(fields), as_operator(op), Alignment{in, w, out});
  return planned.found ? planned.plan.cycles : 0;
}
// The plan for tensors at these addresses, on a GPU of few SMs or of many, and some that are asked for: null if there
// is none, else what is wrong, or "".
const char* plan_fault(int op, const int64_t* fields, uint64_t in, uint64_t w, uint64_t out, int seed) {
  std::string fault;
  const Problem problem = make_problem(fields);
  const Operator which = as_operator(op);
  if (refusal_of_problem(problem, which) != nullptr) return nullptr;
  std::mt19937 random(seed);
  const auto any_of = [&](std::initializer_list<int> values) { return values.begin()[random() % values.size()]; };
  const int sms = any_of({3, 64, 132});
  const Alignment address{in, w, out};
  const Grouped of = grouped(correlation_of_problem(problem, which));
  Plan best{};
  const bool found = make_plan(of, sms, address, best);
  for (int i = 0; i < 8; ++i) {
    Wishes wishes{};
    if (i > 0) {
      wishes = {any_of({-1, static_cast<int>(random() % kTileShapeCount)}), any_of({-1, 0, 1}),
                any_of({0, 0, 1, 2, 4, 8}), any_of({-1, 0, 1})};
    }
    Params params{};
    if (!make_plan(of, sms, address, params.plan, wishes)) continue;
    if (!found) return "a plan only where one is asked for";
    const Plan& plan = params.plan;
    const TileShape& shape = plan.shape;
    const auto is = [](int wish, bool has) { return wish < 0 || wish == has; };
    const TileShape& wished = kTileShapes[wishes.shape < 0 ? 0 : wishes.shape];
    const bool same = shape.channels == wished.channels && shape.slots == wished.slots &&
                      shape.together == wished.together;
    if ((wishes.shape >= 0 && !same) || !is(wishes.windows, plan.windows) || !is(wishes.direct, plan.direct) ||
        (wishes.splits > 0 && plan.splits != wishes.splits))
      return "another plan than was asked for";
    note(of, plan);
    params.of = plan.copied ? of_copy(of) : of;
    set_numbers(params);
    fault = fault_of_numbers(params.of, plan, sms);
    if (fault.empty()) fault = fault_of_operands(of, plan, address);
    if (fault.empty()) fault = fault_of_taps(params);
    if (fault.empty()) fault = fault_of_tiles(params, out / 2);
    if (fault.empty() && plan.cycles < best.cycles) fault = "not the best plan";
    if (!fault.empty()) return told(fault, "plan " + std::to_string(i) + " for " + std::to_string(sms) + " SMs");
  }
  return found ? "" : nullptr;
}
}
