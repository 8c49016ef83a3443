#include "mma.cu"

using namespace modelnew;
using namespace modelnew::mma;
#include "planner.h"

static Params params_of(const Correlation& of, const Plan& plan) {
  Params params{};
  params.of = of;
  params.plan = plan;
  set_divisors(params);
  return params;
}

// What is wrong with the numbers of a plan, or nothing.
static std::string fault_of_numbers(const Correlation& of, const Plan& plan, const Device& device) {
  const int ring = ring_start(plan), stage = plan.x_words + plan.w_words;
  if (plan.smem_bytes > device.smem_bytes || plan.smem_bytes != 4 * shared_words(plan)) return "shared memory";
  const int64_t words = int64_t{plan.stages} * stage + plan.window_words;
  if (4 * (ring + words) > plan.smem_bytes) return "room for the ring";
  const int slice = staging_words(plan.out_channels_last, plan.tile_m, plan.tile_n), staging = plan.warps_k * slice;
  if (slice < (plan.out_channels_last ? channels_pitch(plan.tile_m) : plan.tile_m) *
                  (plan.out_channels_last ? plan.tile_n : pixels_pitch(plan.tile_n)))
    return "sums in staging";
  if (4 * (ring + staging) > plan.smem_bytes) return "room for staging";
  if (ring < kTable + plan.depth || 2 * kMaxStages > kTable) return "room for the table and barriers";
  if (ring % 32 || plan.x_words % 32 || plan.w_words % 32) return "stages that are not aligned";
  if (plan.stages < 1 || plan.stages > kMaxStages || plan.stages > plan.split_chunks) return "stages";
  if (plan.stages == 1 && plan.split_chunks > 1) return "a chunk that is loaded where one is read";

  const int terms = plan.channels * plan.taps;
  if (plan.taps != of.R * of.S || plan.depth % 8 || plan.depth < terms || plan.depth >= terms + 8) return "terms";
  if (int64_t{plan.chunks} * plan.channels < of.in_channels || (plan.chunks - 1) * plan.channels >= of.in_channels)
    return "channels in no chunk, or a chunk without";
  if (int64_t{plan.splits} * plan.split_chunks < plan.chunks || (plan.splits - 1) * plan.split_chunks >= plan.chunks)
    return "chunks in no part, or a part without";
  if (plan.splits > 1 && !device.has_clusters_and_tma) return "a cluster without Hopper";
  if (plan.splits * plan.split_rows != plan.tile_m || 1 << plan.split_bits != plan.splits) return "rows of a part";
  if (plan.out_vector << plan.piece_bits != (plan.out_channels_last ? plan.split_rows : plan.tile_n))
    return "pieces of a row of outputs";
  if (plan.tile_p * plan.tile_q > plan.tile_n || plan.tile_p < 1 || plan.tile_q < 1) return "pixels of a tile";
  if ((plan.x_bulk || plan.w_bulk) && !device.has_clusters_and_tma) return "bulk copies without Hopper";
  if ((plan.x_copies == Copies::kBox && !plan.x_bulk) || (plan.w_copies == Copies::kBox && !plan.w_bulk))
    return "boxes that are no bulk copies";
  if (plan.w_words < (plan.tile_m - 1) * plan.w_pitch + plan.depth) return "rows of weights beyond their stage";
  if (!(plan.cycles > 0)) return "no estimate";
  return "";
}

// What is wrong with the tiles, or nothing: every output is one tile's.
static std::string fault_of_tiles(const Params& params) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int64_t rows = of.groups * of.N * plan.tiles_m;
  std::vector<uint8_t> owned(rows * of.P * of.Q);
  if (plan.tiles != rows * plan.tiles_p * plan.tiles_q) return "tiles in all";
  for (int64_t number = 0; number < plan.tiles; ++number) {
    const Tile tile = locate_tile(params, static_cast<int>(number));
    if (tile.group < 0 || tile.group >= of.groups || tile.n < 0 || tile.n >= of.N || tile.m % plan.tile_m ||
        tile.m < 0 || tile.m >= of.out_channels || tile.p < 0 || tile.p >= of.P || tile.q < 0 || tile.q >= of.Q)
      return "a tile outside";
    const int64_t row = (tile.group * of.N + tile.n) * plan.tiles_m + tile.m / plan.tile_m;
    for (int p = tile.p; p < std::min(of.P, tile.p + plan.tile_p); ++p)
      for (int q = tile.q; q < std::min(of.Q, tile.q + plan.tile_q); ++q)
        if (owned[(row * of.P + p) * of.Q + q]++) return "an output twice";
  }
  return once_each(owned) ? "" : "an output never";
}

// What is wrong with the order of the reduction and with the weights of a tile, or nothing. The address is in words.
static std::string fault_of_weights(const Params& params, const Tile& tile, int64_t address) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int terms = plan.channels * plan.taps, rows = std::min(plan.tile_m, of.out_channels - tile.m);
  const auto offset_of = [&](const Term& term) {
    const int r = of.flipped ? of.R - 1 - term.r : term.r, s = of.flipped ? of.S - 1 - term.s : term.s;
    return term.channel * of.w_stride_in + r * of.w_stride_r + s * of.w_stride_s;
  };
  std::vector<uint8_t> there(terms);
  for (int i = 0; i < terms; ++i) {
    const Term term = locate_term(params, i);
    if (term.channel < 0 || term.channel >= plan.channels || term.r < 0 || term.r >= of.R || term.s < 0 ||
        term.s >= of.S)
      return "a term outside";
    if (there[(term.channel * of.R + term.r) * of.S + term.s]++) return "a term twice";
    if (plan.natural && term.channel < of.in_channels && offset_of(term) != i) return "another order than that of w";
    const Term four = locate_term(params, i / 4 * 4);
    if (plan.w_copies == Copies::kFours && term.channel < of.in_channels && offset_of(term) != offset_of(four) + i % 4)
      return "fours of weights that are no neighbours";
  }
  const int64_t first = address + tile.group * of.w_stride_group + tile.m * of.w_stride_out;
  const int64_t chunk_step = plan.channels * of.w_stride_in;
  const int width = plan.w_copies == Copies::kFours ? 4 : 1;
  if (plan.w_copies == Copies::kWords || plan.w_copies == Copies::kFours) {
    if (plan.w_pieces * width != terms || plan.w_pitch < plan.depth) return "pieces of a row of weights";
    if (plan.w_row_step * plan.w_pieces + plan.w_piece_step != kThreads || plan.w_piece_step >= plan.w_pieces)
      return "steps of a thread";
  }
  if (width == 4)
    for (int chunk = 0; chunk < plan.chunks; ++chunk)
      for (int row = 0; row < std::min(rows, 4); ++row)
        for (int i = 0; i < terms; i += 4) {
          const Term term = locate_term(params, i);
          if (chunk * plan.channels + term.channel >= of.in_channels) continue;
          const int64_t place = first + chunk * chunk_step + row * of.w_stride_out + offset_of(term);
          if (place % 4) return "fours of weights astray";
        }
  if (plan.w_copies == Copies::kRun) {
    if (plan.chunks != 1 || of.w_stride_out != terms || plan.w_pitch != terms || first % 4) return "a run of weights";
    if (plan.w_bulk && rows * terms % 4) return "a bulk copy of a part of 16 bytes";
  }
  if (plan.w_copies != Copies::kBox) return "";
  const int64_t row = int64_t{tile.group} * of.out_channels + tile.m;
  if (of.flipped || address % 4 || plan.w_pitch % 4 || plan.tile_m > 256) return "a box of weights";
  if (tile.group * of.w_stride_group + tile.m * of.w_stride_out != row * of.w_stride_out) return "rows of no matrix";
  if (int64_t{of.groups} * of.out_channels > 1 && of.w_stride_out % 4) return "rows of a matrix astray";
  if (plan.taps_first) {
    if (of.w_stride_in != 1 || plan.w_pitch != terms || plan.depth != terms) return "a box with gaps";
    if (plan.channels % 4 || plan.taps > 256 || of.w_stride_s % 4) return "the size of a box of weights";
    for (int i = 0; i < plan.taps; ++i)
      if (offset_of(locate_term(params, i * plan.channels)) != i * of.w_stride_s) return "taps that are no row";
    return "";
  }
  if (!plan.natural || plan.w_pitch > 256 || plan.w_pitch < plan.depth) return "a box of rows";
  return plan.chunks > 1 && terms % 4 ? "a box that starts astray" : "";
}

// What is wrong with what a tile reads, or nothing: each output at each term what the convolution says, by the register
// of a lane and the table; and what brings it there. The address is in words.
static std::string fault_of_window(const Params& params, const Tile& tile, int64_t address) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const bool run = plan.x_copies == Copies::kRun, planes = plan.x_copies == Copies::kPlanes;
  const int64_t h0 = run ? 0 : int64_t{tile.p} * of.stride_h - of.pad_h;
  const int64_t w0 = run ? 0 : int64_t{tile.q} * of.stride_w - of.pad_w - (plan.lines ? 0 : plan.lead);
  const bool channels_last = plan.pixel_words != 1;
  const int window = planes ? plan.window_words : plan.x_words, terms = plan.channels * plan.taps;
  if (channels_last ? plan.channel_words != 1 || plan.row_words < plan.columns * plan.pixel_words ||
                          (!plan.lines && plan.row_words != plan.columns * plan.pixel_words)
                    : plan.row_words != plan.columns || plan.channel_words < plan.rows * plan.columns)
    return "words of a window";
  const bool padded = terms != plan.depth;
  const int64_t all_words = plan.lines      ? int64_t{1 + padded} * plan.rows * plan.row_words
                            : channels_last ? int64_t{plan.rows} * plan.row_words
                                            : int64_t{plan.channels + padded} * plan.channel_words;
  if (all_words > window || (channels_last && plan.pixel_words < plan.channels + (padded && !plan.lines)))
    return "room for the window";
  for (int pixel = 0; pixel < plan.tile_n; ++pixel) {
    const int line = pixel / plan.tile_q, column = pixel % plan.tile_q;
    const int64_t start = line < plan.tile_p ? int64_t{line} * plan.row_step * plan.row_words +
                                                   int64_t{column} * plan.column_step * plan.pixel_words
                                             : 0;
    const int64_t p = tile.p + line, q = tile.q + column;
    const bool exists = line < plan.tile_p && p < of.P && q < of.Q;
    for (int i = 0; i < plan.depth; ++i) {
      const Term term = locate_term(params, i);
      const int row_of_term = term.r * of.dilation_h, column_of_term = term.s * of.dilation_w;
      const int64_t offset = i < terms ? int64_t{term.channel} * plan.channel_words + row_of_term * plan.row_words +
                                             column_of_term * plan.pixel_words + plan.lead
                                       : plan.zeros;
      const int64_t word = start + offset;
      // Outputs that do not exist are computed all the same.
      if (word < 0 || word >= window + plan.w_words) return "a word outside";
      if (!exists) continue;
      if (word >= window) return "a word behind the window";
      if (plan.lines) {
        const int64_t row = word / plan.row_words, at = (word % plan.row_words - plan.lead) / plan.pixel_words;
        if (i >= terms ? row < plan.rows : row >= plan.rows) return "padding of the reduction among channels";
        if (i >= terms) continue;
        if ((word % plan.row_words - plan.lead) % plan.pixel_words != term.channel) return "another channel";
        if (h0 + row != p * of.stride_h - of.pad_h + int64_t{term.r} * of.dilation_h ||
            w0 + at != q * of.stride_w - of.pad_w + int64_t{term.s} * of.dilation_w)
          return "another place of x";
        continue;
      }
      const int64_t in_channel = channels_last ? word % plan.pixel_words : word / plan.channel_words;
      if (i >= terms) {
        if (in_channel != plan.channels) return "padding of the reduction among channels";
        continue;
      }
      const int64_t place = channels_last ? word / plan.pixel_words : word % plan.channel_words;
      const int64_t row = place / plan.columns, at = place % plan.columns;
      if (in_channel != term.channel || row >= plan.rows) return "another channel";
      if (h0 + row * plan.in_row_step != p * of.stride_h - of.pad_h + int64_t{term.r} * of.dilation_h ||
          w0 + at * plan.in_column_step != q * of.stride_w - of.pad_w + int64_t{term.s} * of.dilation_w)
        return "another place of x";
    }
  }

  const int64_t image = address + tile.n * of.in_stride[0] + int64_t{tile.group} * of.in_channels * of.in_stride[1];
  if (run || planes) {
    const int64_t plane = int64_t{of.H} * of.W;
    if (of.in_stride[3] != 1 || (of.H > 1 && of.in_stride[2] != of.W) || of.in_stride[1] != plane) return "no run";
    if (plan.plane != plane || (run && plan.channel_words != plane)) return "words of a plane";
    if (plan.x_words < plan.channels * plane || plan.channels * plane % 4) return "room for a run";
    for (int c = 0; c < of.in_channels; c += plan.channels)
      if ((image + c * plane) % 4) return "a run astray";
    if (plan.x_bulk ? of.in_channels % plan.channels : of.in_channels * plane % 4) return "the end of a run";
    return "";
  }
  if (plan.lines) {
    if (of.groups != 1 || of.in_stride[1] != 1 || of.in_stride[3] != of.in_channels || plan.chunks != 1)
      return "no line";
    if (((tile.q * of.stride_w - of.pad_w) * of.in_channels - plan.lead) % 4)
      return "a line that starts astray";
    if (plan.row_words % 4 || plan.row_words > 256 || plan.rows > 256) return "the size of a box";
    if (plan.x_bulk_words != plan.rows * plan.row_words) return "bytes that the barrier expects";
    if (address % 4 || (of.N > 1 && (of.in_stride[0] % 4 || of.in_stride[0] <= 0)) ||
        (of.H > 1 && (of.in_stride[2] % 4 || of.in_stride[2] <= 0)))
      return "lines astray";
    return plan.in_row_step == 1 && plan.in_column_step == 1 ? "" : "rows that no box has";
  }
  const int width = plan.x_copies == Copies::kWords ? 1 : 4;
  if (width == 4) {  // 16 bytes are inside an image or outside
    for (int c : {0, std::max(0, std::min(of.in_channels, 2 * plan.channels) - 1)})
      for (int row = 0; row < plan.rows; ++row)
        for (int at = 0; at < plan.columns; at += channels_last ? 1 : 4) {
          const int64_t h = h0 + int64_t{row} * plan.in_row_step, w = w0 + int64_t{at} * plan.in_column_step;
          if (!channels_last && (w % 4 || of.W % 4)) return "fours at the edge of an image";
          if (h < 0 || h >= of.H || w < 0 || w >= of.W) continue;
          const int64_t channel = channels_last ? c / 4 * 4 : c;
          const int64_t place = channel * of.in_stride[1] + h * of.in_stride[2] + w * of.in_stride[3];
          if ((image + place) % 4) return "fours of x astray";
        }
    if (channels_last ? of.in_stride[1] != 1 || of.in_channels % 4 || plan.channels % 4 || plan.pixel_words % 4
                      : of.in_stride[3] != 1 || plan.columns % 4)
      return "fours that are no neighbours";
  }
  if (plan.x_copies != Copies::kBox) {
    const int pieces = channels_last ? plan.channels / width : 1;
    if (channels_last ? plan.x_pieces != pieces || plan.row_entries != plan.columns
                      : plan.row_entries * width != plan.columns || plan.channel_words % width)
      return "copies of a row";
    return plan.entries == plan.rows * plan.row_entries ? "" : "copies of a window";
  }
  const int sizes[] = {plan.columns, plan.rows, channels_last ? plan.pixel_words : plan.channels};
  for (int size : sizes)
    if (size < 1 || size > 256) return "the size of a box";
  if (terms != plan.depth && channels_last) return "a box where padding is";
  const int64_t box = int64_t{sizes[0]} * sizes[1] * sizes[2];
  if (box != plan.x_bulk_words)
    return "bytes that the barrier expects";
  // Every so many-th row of the image is one of the box's tensor.
  if ((plan.in_row_step != 1 && (of.pad_h || plan.in_row_step != of.stride_h)) ||
      (plan.in_column_step != 1 && (of.pad_w || plan.in_column_step != of.stride_w)))
    return "rows that no box has";
  if (address % 4 || (of.N > 1 && of.in_stride[0] % 4)) return "images astray";
  const int64_t all[] = {of.N, int64_t{of.groups} * of.in_channels, of.H, of.W};
  for (int i = 0; i < 4; ++i)
    if (all[i] > 1 && of.in_stride[i] <= 0) return "a box of an expanded tensor";
  return "";
}

// What is wrong with what a tile writes four at a time, or nothing. The address is in words.
static std::string fault_of_writes(const Params& params, const Tile& tile, int64_t address) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  if (plan.out_vector == 1) return "";
  if (plan.out_vector != 4) return "neither fours nor single values";
  const int lines = std::min(plan.tile_p, of.P - tile.p), columns = std::min(plan.tile_q, of.Q - tile.q);
  const auto offset_of = [&](int pixel) -> int64_t {
    const int line = pixel / plan.tile_q, column = pixel % plan.tile_q;
    if (line >= lines || column >= columns) return -1;
    return (tile.p + line) * of.out_stride[2] + (tile.q + column) * of.out_stride[3];
  };
  if (plan.out_channels_last) {  // fours of channels, of each pixel
    if (of.out_stride[1] != 1 || of.out_channels % 4 || plan.split_rows % 4) return "fours of y that are no neighbours";
    for (int pixel = 0; pixel < plan.tile_n; ++pixel) {
      const int64_t first = offset_of(pixel);
      if (first >= 0 && (address + tile.n * of.out_stride[0] + first) % 4) return "fours of y astray";
    }
    return "";
  }
  for (int pixel = 0; pixel < plan.tile_n; pixel += 4) {
    const int64_t first = offset_of(pixel);
    for (int j = 1; j < 4; ++j)
      if (offset_of(pixel + j) != (first < 0 ? -1 : first + j)) return "fours of y that are no neighbours";
    for (int m = tile.m; m < std::min(of.out_channels, tile.m + plan.tile_m) && first >= 0; ++m) {
      const int64_t channel = int64_t{tile.group} * of.out_channels + m;
      if ((address + tile.n * of.out_stride[0] + channel * of.out_stride[1] + first) % 4) return "fours of y astray";
    }
  }
  return "";
}

static void note(const Plan& plan) {
  const std::string names[] = {"words", "fours", "runs", "boxes", "planes"};
  const std::string kind = plan.lines ? "lines of " : plan.pixel_words == 1 ? "planes of " : "pixels of ";
  const std::string order = plan.taps_first ? "taps of " : "";
  seen.insert(kind + "x by " + names[static_cast<int>(plan.x_copies)] + (plan.x_bulk ? " in bulk" : ""));
  seen.insert(order + "w by " + names[static_cast<int>(plan.w_copies)] + (plan.w_bulk ? " in bulk" : ""));
  seen.insert("shape " + std::to_string(plan.shape));
  seen.insert(std::to_string(plan.splits) + " parts");
  seen.insert((plan.out_channels_last ? "pixels of y by " : "y by ") + std::to_string(plan.out_vector));
  if (plan.lead > 0) seen.insert("lead");
  if (plan.chunks > plan.stages) seen.insert("a ring that turns");
}

extern "C" {
// How many clusters find no room at first, on a GPU of 132 SMs that has room for so many of 2, 4 and 8 blocks.
int mma_waiting(int op, const int64_t* fields, int of_2, int of_4, int of_8) {
  const Problem problem = make_problem(fields);
  Correlation of = correlation_of_problem(problem, as_operator(op));
  flatten_points(of);
  const Device device{132, 232448, true, {0, of_2, of_4, of_8}};
  Plan plan{};
  if (!make_plan(of, problem.tf32_allowed, device, Alignment{}, plan) || plan.splits == 1) return -1;
  const int room = device.clusters[plan.split_bits] * (plan.smem_bytes <= device.smem_bytes / 2 - 1024 ? 2 : 1);
  return std::max(0, static_cast<int>(plan.tiles) - room);
}
double plan_cycles(int op, const int64_t* fields, uint64_t in, uint64_t w, uint64_t out) {
  const Planned& planned = plan_of(make_problem(fields), as_operator(op), Alignment{in, w, out});
  return planned.found ? planned.plan.cycles : 0;
}
// Plans for tensors at these addresses, on the GPU that was set, the best way and every shape and number of parts: null
// if there is no plan, else what is wrong, or "". All tiles, and of a few at random what they read and write.
const char* plan_fault(int op, const int64_t* fields, uint64_t in, uint64_t w, uint64_t out, int seed) {
  std::string fault;
  std::mt19937 shuffler(seed);
  const Problem problem = make_problem(fields);
  Correlation of = correlation_of_problem(problem, as_operator(op));
  flatten_points(of);
  Device device{};
  current_device(device);
  bool any = false;
  for (int i = -1; i < 4 * kShapeCount; i += i < 0 ? 1 : 1 + shuffler() % 4) {
    Plan plan{};
    const int shape = i < 0 ? -1 : i / 4, splits = i < 0 ? 0 : 1 << i % 4;
    if (!make_plan(of, problem.tf32_allowed, device, Alignment{in, w, out}, plan, shape, splits)) continue;
    any = true;
    note(plan);
    const Params params = params_of(of, plan);
    fault = fault_of_numbers(of, plan, device);
    if (fault.empty()) fault = fault_of_tiles(params);
    for (const int number : some_of(plan.tiles, 3, shuffler)) {
      if (!fault.empty()) break;
      const Tile tile = locate_tile(params, number);
      fault = fault_of_weights(params, tile, w / 4);
      if (fault.empty()) fault = fault_of_window(params, tile, in / 4);
      if (fault.empty()) fault = fault_of_writes(params, tile, out / 4);
    }
    if (!fault.empty())
      return told(fault, "shape " + std::to_string(shape) + ", " + std::to_string(splits) + " parts");
  }
  return any ? "" : nullptr;
}
// A divisor by which a quotient is wrong, or 0.
int mma_wrong_divisor(int seed) {
  std::mt19937 random(seed);
  for (int i = 0; i < 20000; ++i) {
    const int drawn = 1 + (random() >> (1 + i % 31));
    const int divisor = i < 5000 ? i + 1 : i < 5031 ? 1 << (i - 5000) : i == 5031 ? 2147483647 : drawn;
    const Divisor by = make_divisor(divisor);
    const int64_t most = 2147483647, any = random() >> 1, multiple = any / divisor * divisor;
    for (int64_t number : {int64_t{0}, multiple - 1, multiple, multiple + 1, any, most})
      if (number >= 0 && number <= most && quotient(static_cast<int>(number), by) != number / divisor) return divisor;
  }
  return 0;
}
// What is wrong with keys of problems that differ in one field, address or GPU, or with what a memo remembers of them.
const char* mma_fault_of_memo(const int64_t* fields, int count, int seed) {
  std::mt19937 random(seed);
  std::vector<ProblemKey> keys;
  for (int i = -1; i < count + 3 + 1 + 2; ++i) {
    std::vector<int64_t> changed(fields, fields + count);
    if (i >= 0 && i < count) changed[i] = i == count - 13 ? !changed[i] : changed[i] + 1;
    const auto at = [&](int j) { return i == count + j ? uint64_t{16} : uint64_t{0}; };
    const Operator op = i == count + 3 ? Operator::kDgrad : Operator::kFprop;
    keys.push_back(key_of(make_problem(changed.data()), op, at(0), at(1), at(2), 90 - (i == count + 4),
                          132 - (i == count + 5)));
  }
  if (std::set<ProblemKey>(keys.begin(), keys.end()).size() != keys.size()) return "two problems of one key";
  const size_t different = keys.size();
  for (int i = 0; i < 2000; ++i) keys.push_back(keys[random() % different]), keys.back()[34] = 1000 + i;
  // A network of 600 problems, in their order.
  Memo<int> of_network;
  int computed = 0;
  for (int i = 0; i < 3 * 600; ++i)
    if (of_network.get(keys[i % 600], [&] { return ++computed, i % 600; }) != i % 600) return "another problem's";
  if (computed != 600) return "a problem of a network that was forgotten";
  // More of them than a memo takes, in any order.
  Memo<int> memo;
  for (int i = 0; i < 20000; ++i) {
    const int number = random() % keys.size();
    if (memo.get(keys[number], [&] { return number; }) != number) return "another problem's, of many";
  }
  return "";
}
}
