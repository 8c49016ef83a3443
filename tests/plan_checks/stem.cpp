#include "stem.cu"

using namespace modelnew;
using namespace modelnew::stem;
#include "planner.h"

// What is wrong with the numbers of a plan, or nothing.
static std::string fault_of_numbers(const Correlation& of, const Plan& plan, const Format& format,
                                    const Device& device) {
  const bool exact = format.exact;
  const SharedLayout layout = shared_layout(plan, format);
  const int staging = plan.stores == Stores::kSingle ? 0 : 16 * 16 * plan.tile_k * format.bytes;  // of 16 warps
  const int landing = format.bytes == 4 ? 0 : plan.x_bytes / 2;
  if (layout.end != plan.smem_bytes || plan.smem_bytes > 232448) return "shared memory";
  if (layout.bias < 3 * 8 * kStages || layout.weights < layout.bias + 4 * plan.tile_k) return "room for the bias";
  if (layout.staging < layout.weights + (exact ? 2 : 1) * plan.steps * 8 * plan.tile_k * 4) return "room for weights";
  if (layout.x < layout.staging + staging || layout.landing < layout.x + kStages * plan.x_bytes) return "room for x";
  if (layout.end < layout.landing + landing) return "room for x as it comes";
  if (layout.weights % 16 || layout.staging % 1024 || layout.x % 128 || window_bytes(plan) % 128) return "alignment";
  if (layout.landing % 128) return "alignment of x as it comes";
  // Of a descriptor, the distance of a step's quads.
  if (16 * plan.tile_k >= 1 << 18 || (plan.tile_k != 32 && plan.tile_k != 64)) return "channels of a tile";
  if (plan.x_bytes >= 1 << 20) return "more bytes than a barrier can expect";
  if (plan.blocks % plan.tiles_k || plan.blocks < plan.tiles_k || plan.blocks / plan.tiles_k > plan.tiles)
    return "blocks without a tile";
  if (plan.tiles_k <= device.sms && plan.blocks > device.sms) return "more blocks than run at once";
  if (!covers(plan.tiles_k, plan.tile_k, of.out_channels)) return "tiles of channels";
  if (2 * plan.steps < plan.quads || plan.quads > kMostQuads || 2 * plan.steps > kMostQuads) return "steps";
  if (!exact && plan.steps % kGroupSteps) return "groups of steps";
  if (!exact && format.bytes == 4 && plan.steps / kGroupSteps % 2 == 0) return "groups of two";
  return plan.cycles > 0 ? "" : "no estimate";
}

// What is wrong with the tiles, or nothing: every output is one tile's.
static std::string fault_of_tiles(const Params& params) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  std::vector<uint8_t> owned(of.N * of.P * of.Q);
  if (plan.tiles != of.N * plan.tiles_p * plan.tiles_q) return "tiles in all";
  for (int number = 0; number < plan.tiles; ++number) {
    const Tile tile = locate_tile(params, number);
    if (tile.n < 0 || tile.n >= of.N || tile.p < 0 || tile.p >= of.P || tile.q < 0 || tile.q >= of.Q)
      return "a tile outside";
    for (int p = tile.p; p < std::min(of.P, tile.p + plan.tile_p); ++p)
      for (int q = tile.q; q < std::min(of.Q, tile.q + plan.tile_q); ++q)
        if (owned[(int64_t{tile.n} * of.P + p) * of.Q + q]++) return "an output twice";
  }
  return once_each(owned) ? "" : "an output never";
}

// What is wrong with the order of the reduction, or nothing: every tap of every channel once.
static std::string fault_of_quads(const Params& params) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  if (plan.row_terms != of.S * (plan.lines ? of.in_channels : 1)) return "terms of a row";
  std::vector<uint8_t> there(of.in_channels * of.R * of.S);
  for (int i = 0; i < plan.quads; ++i) {
    const Quad quad = locate_quad(params, i);
    for (int term = quad.first; term < std::min(quad.first + kQuad, plan.row_terms); ++term) {
      const int channel = plan.lines ? term % of.in_channels : quad.channel;
      const int s = plan.lines ? term / of.in_channels : term;
      if (channel >= of.in_channels || quad.r >= of.R || s >= of.S) return "a term outside";
      if (there[(channel * of.R + quad.r) * of.S + s]++) return "a term twice";
    }
  }
  return once_each(there) ? "" : "a term never";
}

// What is wrong with the words that a tile's outputs read, or nothing; and with the box that brings them. The address
// is in values.
static std::string fault_of_window(const Params& params, const Tile& tile, int64_t address, const Format& format) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int64_t w0 = int64_t{tile.q} * of.stride_w - of.pad_w;
  const int64_t first_column = w0 * plan.pixel_words - plan.lead;
  if (plan.x_bytes != 4 * (plan.lines ? 1 : of.in_channels) * plan.rows * plan.columns) return "bytes of a window";
  const int outputs = plan.tile_p * plan.tile_q, every = std::max(1, outputs / 48);
  for (int i = 0; i < outputs + every; i += every) {
    const int m = std::min(i, outputs - 1);  // some, the last one among them
    const int row = m / plan.tile_q, column = m % plan.tile_q;
    const int64_t start = int64_t{row} * of.stride_h * plan.columns + int64_t{column} * of.stride_w * plan.pixel_words;
    for (int i = 0; i < plan.quads; ++i) {
      const Quad quad = locate_quad(params, i);
      if (params.offsets[i] % 4) return "an offset of no word";
      for (int t = 0; t < kQuad; ++t) {
        const int64_t word = start + params.offsets[i] / 4 + t * plan.term_words;
        if (word < 0 || 4 * word >= plan.x_bytes) return "a word outside";
        const int term = quad.first + t;
        if (term >= plan.row_terms) continue;
        const int64_t channel = plan.lines ? term % of.in_channels : quad.channel;
        const int64_t s = plan.lines ? term / of.in_channels : term;
        const int64_t in_column = first_column + word % plan.columns, in_row = word / plan.columns % plan.rows;
        const int64_t expected = (w0 + column * of.stride_w + s * of.dilation_w) * plan.pixel_words;
        if (in_column != expected + (plan.lines ? channel : 0)) return "another column of x";
        if (in_row != row * of.stride_h + quad.r * of.dilation_h) return "another row of x";
        if (word / plan.columns / plan.rows != (plan.lines ? 0 : channel)) return "another channel";
      }
    }
    for (int i = plan.quads; i < 2 * plan.steps + (format.exact ? 2 : 0); ++i)
      if (params.offsets[i] != 0) return "an offset of no quad";
  }
  if (plan.x_bytes % 16) return "a window of no whole vectors";
  if (format.bytes == 2 && (plan.columns % 2 || params.by_pairs.divisor != plan.columns / 2u)) return "pairs of a line";
  if (!plan.in_box) return plan.lines || plan.lead ? "words of a line" : "";
  const int piece = 16 / format.bytes;
  if (plan.columns % piece || plan.columns > 256 || plan.rows > 256) return "the size of a box";
  if (of.W * plan.pixel_words % piece) return "rows that end within 16 bytes";
  if (first_column % piece || address % piece) return "a box that starts astray";
  const auto whole = [&](int64_t stride, int64_t size) { return size == 1 || (stride > 0 && stride % piece == 0); };
  if (!whole(of.in_stride[0], of.N) || !whole(of.in_stride[2], of.H)) return "rows of a box astray";
  if (plan.lines ? of.in_stride[1] != 1 || of.in_stride[3] != of.in_channels || (of.S > 1 && of.dilation_w != 1)
                 : of.in_stride[3] != 1 || !whole(of.in_stride[1], of.in_channels))
    return "columns that are no neighbours";
  return "";
}

// What is wrong with the boxes in which a tile's outputs are stored, or nothing. The address is in values, of which
// `piece` are 16 bytes.
static std::string fault_of_stores(const Params& params, const Tile& tile, int64_t address, int piece) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  if (plan.stores == Stores::kSingle) return "";
  const bool channels_last = plan.stores == Stores::kChannelsLast;
  const auto place = [&](int64_t m) {  // of output m of the tile, or -1
    const int64_t p = tile.p + m / plan.tile_q, q = tile.q + m % plan.tile_q;
    return p < of.P && q < of.Q ? p * of.out_stride[2] + q * of.out_stride[3] : int64_t{-1};
  };
  const int64_t step = channels_last ? of.out_stride[3] : 1;
  const int64_t end = channels_last ? of.out_channels : plan.run ? int64_t{of.P} * of.Q : of.Q;
  if (end % piece) return "an end within 16 bytes";
  if (channels_last ? of.out_stride[1] != 1 : of.out_channels > 1 && of.out_stride[1] % piece) return "channels astray";
  if (address % piece || (of.N > 1 && of.out_stride[0] % piece)) return "images astray";
  if (channels_last && int64_t{of.P} * of.Q > 1 && (plan.run || of.Q > 1) && step % piece) return "pixels astray";
  for (int first = 0; first < plan.tile_p * plan.tile_q; first += kBoxPixels) {
    const int64_t start = place(first);
    // As the kernel has it.
    const int64_t in_run = int64_t{tile.p} * of.Q + first;
    const bool exist = plan.run ? in_run < int64_t{of.P} * of.Q : start >= 0;
    if (exist != (start >= 0)) return "a box of nothing, or outputs without a box";
    if (!exist) continue;
    if (!channels_last && start % piece) return "a box astray";
    for (int i = 0; i < kBoxPixels; ++i) {
      const bool clipped = plan.run ? in_run + i >= int64_t{of.P} * of.Q : tile.q + first % plan.tile_q + i >= of.Q;
      if (clipped) continue;
      if (first + i >= plan.tile_p * plan.tile_q) return "another tile's outputs";
      if (place(first + i) != start + i * step) return "outputs that are no neighbours";
    }
  }
  return "";
}

static void note(const Plan& plan, int bytes) {
  const char* const stores[] = {"planes", "pixels", "single values"};
  const std::string of = std::to_string(8 * bytes) + " bits: ";
  seen.insert(of + "x by " + (!plan.in_box ? "single values" : plan.lines ? "lines" : "planes"));
  seen.insert(of + (plan.run ? "runs" : "rows") + " of y by " + stores[static_cast<int>(plan.stores)]);
  seen.insert(of + "tile of " + std::to_string(plan.tile_k) + " channels");
  if (plan.lead > 0) seen.insert(of + "lead");
  if (plan.tiles_q > 1) seen.insert(of + "parts of rows");
}

extern "C" {
double plan_cycles(int op, const int64_t* fields, uint64_t x, uint64_t, uint64_t y) {
  const Problem problem = make_problem(fields);
  const Operator which = as_operator(op);
  Plan plan{};
  const Correlation of = correlation_of_problem(problem, which);
  return make_plan(of, format_of(problem, which), Device{132}, Alignment{x, y}, plan) ? plan.cycles : 0;
}
// The plan for tensors at these addresses, and some that are forced: null if there is none, else what is wrong, or "".
const char* plan_fault(int, const int64_t* fields, uint64_t x, uint64_t, uint64_t y, int seed) {
  std::string fault;
  const Problem problem = make_problem(fields);
  const int bytes = element_bytes(problem.dtype);
  const Format format{bytes, bytes == 4 && !problem.tf32_allowed};
  const Device device{seed % 3 == 0 ? 3 : 132};
  std::mt19937 random(seed);
  Params params{};
  params.of = correlation_of_problem(problem, Operator::kFprop);
  Plan best{};
  // One product is asked for here where the contract has three, which come in smaller tiles, too.
  const bool smaller_tiles = format.exact || bytes == 2;
  if (!make_plan(params.of, format, device, Alignment{x, y}, best)) return smaller_tiles ? nullptr : "";
  for (int i = 0; i < 8; ++i) {
    params.plan = best;
    const int tile_k = 32 << random() % 2, tile_p = 1 + random() % 9;
    const int tile_q = i % 2 ? params.of.Q : 16 * (1 + random() % 8);
    if (i > 0 && !make_plan(params.of, format, device, Alignment{x, y}, params.plan, tile_k, tile_p, tile_q)) continue;
    const Plan& plan = params.plan;
    if (i > 0 && (plan.tile_k != tile_k || plan.tile_p != tile_p || plan.tile_q != tile_q)) return "another plan";
    std::fill(std::begin(params.offsets), std::end(params.offsets), 0u);
    set_numbers(params);
    note(plan, bytes);
    fault = fault_of_numbers(params.of, plan, format, device);
    if (fault.empty()) fault = fault_of_tiles(params);
    if (fault.empty()) fault = fault_of_quads(params);
    for (const int number : some_of(plan.tiles, 3, random)) {
      if (!fault.empty()) break;
      const Tile tile = locate_tile(params, number);
      fault = fault_of_window(params, tile, x / bytes, format);
      if (fault.empty()) fault = fault_of_stores(params, tile, y / bytes, 16 / bytes);
    }
    const bool of_few = tile_k == 64 && problem.K <= 32;  // which is not considered
    if (fault.empty() && plan.cycles < best.cycles && !of_few) fault = "not the best plan";
    if (!fault.empty()) return told(fault, "plan " + std::to_string(i));
  }
  return "";
}
}
