#include "mma.cu"

using namespace modelnew;
using namespace modelnew::mma;
#include "planner.h"

static void check_numbers(const Correlation& of, const Plan& plan, const Device& device) {
  const int ring = ring_start(plan);
  const int64_t words = int64_t{plan.stages} * (plan.x_words + plan.w_words) + plan.window_words;
  const int slice = staging_words(plan.out_channels_last, plan.tile_m, plan.tile_n);
  CHECK(plan.smem_bytes <= device.smem_bytes && plan.smem_bytes == 4 * shared_words(plan));
  CHECK(2 * kMaxStages <= kTable && kTable + plan.depth <= ring);  // barriers and terms in front of the ring
  CHECK(4 * (ring + words) <= plan.smem_bytes && 4 * (ring + plan.warps_k * slice) <= plan.smem_bytes);
  CHECK(slice >= (plan.out_channels_last ? plan.tile_n * channels_pitch(plan.tile_m)
                                         : plan.tile_m * pixels_pitch(plan.tile_n)));
  CHECK(multiples(32, {ring, plan.x_words, plan.w_words}));
  CHECK(plan.stages >= 1 && plan.stages <= std::min(kMaxStages, plan.split_chunks));
  CHECK(plan.stages > 1 || plan.split_chunks == 1);  // no chunk is loaded where one is read

  const int terms = plan.channels * plan.taps;
  CHECK(plan.taps == of.R * of.S && plan.depth % 8 == 0 && plan.depth >= terms && plan.depth < terms + 8);
  CHECK(covers(plan.chunks, plan.channels, of.in_channels));
  CHECK(covers(plan.splits, plan.split_chunks, plan.chunks));
  CHECK(plan.splits == 1 || device.has_clusters_and_tma);
  CHECK(plan.splits * plan.split_rows == plan.tile_m && 1 << plan.split_bits == plan.splits);
  CHECK(plan.out_vector << plan.piece_bits == (plan.out_channels_last ? plan.split_rows : plan.tile_n));
  CHECK(plan.tile_p >= 1 && plan.tile_q >= 1 && plan.tile_p * plan.tile_q <= plan.tile_n);
  CHECK((!plan.x_bulk && !plan.w_bulk) || device.has_clusters_and_tma);
  CHECK(plan.x_copies != Copies::kBox || plan.x_bulk);
  CHECK(plan.w_copies != Copies::kBox || plan.w_bulk);
  CHECK(plan.w_words >= (plan.tile_m - 1) * plan.w_pitch + plan.depth);
  CHECK(plan.cycles > 0);
}

// Every output is one tile's.
static void check_tiles(const Params& params) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int64_t rows = of.groups * of.N * plan.tiles_m;
  Owned owned(rows * of.P * of.Q);
  CHECK(plan.tiles == rows * plan.tiles_p * plan.tiles_q && is_int(plan.tiles));
  for (int number = 0; number < plan.tiles; ++number) {
    const Tile tile = locate_tile(params, number);
    CHECK(within(tile.group, of.groups) && within(tile.n, of.N) && within(tile.p, of.P) && within(tile.q, of.Q));
    CHECK(within(tile.m, of.out_channels) && tile.m % plan.tile_m == 0);
    const int64_t row = (tile.group * of.N + tile.n) * plan.tiles_m + tile.m / plan.tile_m;
    for (int p = tile.p; p < std::min(of.P, tile.p + plan.tile_p); ++p)
      for (int q = tile.q; q < std::min(of.Q, tile.q + plan.tile_q); ++q)
        CHECK(owned.take((row * of.P + p) * of.Q + q));
  }
  CHECK(owned.all());
}

// The order of the reduction and the weights of a tile. Here and below addresses are in words.
static void check_weights(const Params& params, const Tile& tile, int64_t address) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int terms = plan.channels * plan.taps, rows = std::min(plan.tile_m, of.out_channels - tile.m);
  std::vector<int64_t> offsets(terms);
  Owned owned(terms);
  for (int i = 0; i < terms; ++i) {
    const Term term = locate_term(params, i);
    CHECK(within(term.channel, plan.channels) && within(term.r, of.R) && within(term.s, of.S));
    CHECK(owned.take((term.channel * of.R + term.r) * of.S + term.s));
    const int r = of.flipped ? of.R - 1 - term.r : term.r, s = of.flipped ? of.S - 1 - term.s : term.s;
    offsets[i] = term.channel * of.w_stride_in + r * of.w_stride_r + s * of.w_stride_s;
    if (plan.natural && term.channel < of.in_channels) CHECK(offsets[i] == i);
  }
  const int64_t first = address + tile.group * of.w_stride_group + tile.m * of.w_stride_out;
  const bool fours = plan.w_copies == Copies::kFours;
  if (fours || plan.w_copies == Copies::kWords) {
    CHECK(plan.w_pieces * (fours ? 4 : 1) == terms && plan.w_pitch >= plan.depth);
    CHECK(plan.w_row_step * plan.w_pieces + plan.w_piece_step == kThreads && plan.w_piece_step < plan.w_pieces);
  }
  for (int chunk = 0; chunk < plan.chunks && fours; ++chunk)
    for (int i = 0; i < terms; ++i) {
      if (chunk * plan.channels + locate_term(params, i).channel >= of.in_channels) continue;
      CHECK(offsets[i] == offsets[i / 4 * 4] + i % 4);
      for (int row = 0; row < std::min(rows, 4) && i % 4 == 0; ++row)
        CHECK((first + chunk * plan.channels * of.w_stride_in + row * of.w_stride_out + offsets[i]) % 4 == 0);
    }
  if (plan.w_copies == Copies::kRun) {
    CHECK(plan.chunks == 1 && of.w_stride_out == terms && plan.w_pitch == terms && first % 4 == 0);
    CHECK(!plan.w_bulk || rows * terms % 4 == 0);
  }
  if (plan.w_copies != Copies::kBox) return;
  const int64_t row = int64_t{tile.group} * of.out_channels + tile.m;
  CHECK(!of.flipped && address % 4 == 0 && plan.w_pitch % 4 == 0 && plan.tile_m <= 256);
  CHECK(first == address + row * of.w_stride_out);
  CHECK(of.groups * of.out_channels == 1 || of.w_stride_out % 4 == 0);
  if (plan.taps_first) {
    CHECK(of.w_stride_in == 1 && plan.w_pitch == terms && plan.depth == terms);
    CHECK(plan.channels % 4 == 0 && plan.taps <= 256 && of.w_stride_s % 4 == 0);
    for (int tap = 0; tap < plan.taps; ++tap) CHECK(offsets[tap * plan.channels] == tap * of.w_stride_s);
  } else {
    CHECK(plan.natural && plan.w_pitch <= 256 && plan.w_pitch >= plan.depth);
    CHECK(plan.chunks == 1 || terms % 4 == 0);
  }
}

// The first row and column of a tile's window, by those of the image.
static std::pair<int64_t, int64_t> start_of_window(const Correlation& of, const Plan& plan, const Tile& tile) {
  if (plan.x_copies == Copies::kRun) return {0, 0};
  return {int64_t{tile.p} * of.stride_h - of.pad_h,
          int64_t{tile.q} * of.stride_w - of.pad_w - (plan.lines ? 0 : plan.lead)};
}

// Each output reads at each term what the convolution says, by the register of a lane and the table.
static void check_reads(const Params& params, const Tile& tile) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const auto [h0, w0] = start_of_window(of, plan, tile);
  const bool channels_last = plan.pixel_words != 1;
  const int window = plan.x_copies == Copies::kPlanes ? plan.window_words : plan.x_words;
  const int terms = plan.channels * plan.taps, padded = terms != plan.depth;
  if (channels_last) {
    CHECK(plan.channel_words == 1 && plan.row_words >= plan.columns * plan.pixel_words);
    CHECK(plan.lines || plan.row_words == plan.columns * plan.pixel_words);
    CHECK(plan.pixel_words >= plan.channels + (padded && !plan.lines));
  } else {
    CHECK(plan.row_words == plan.columns && plan.channel_words >= plan.rows * plan.columns);
  }
  CHECK(window >= (plan.lines      ? int64_t{1 + padded} * plan.rows * plan.row_words
                   : channels_last ? int64_t{plan.rows} * plan.row_words
                                   : int64_t{plan.channels + padded} * plan.channel_words));
  for (int pixel = 0; pixel < plan.tile_n; ++pixel) {
    const int line = pixel / plan.tile_q, column = pixel % plan.tile_q, p = tile.p + line, q = tile.q + column;
    const bool exists = line < plan.tile_p && p < of.P && q < of.Q;
    const int64_t start = line < plan.tile_p ? int64_t{line} * plan.row_step * plan.row_words +
                                                   int64_t{column} * plan.column_step * plan.pixel_words
                                             : 0;
    for (int i = 0; i < plan.depth; ++i) {
      const Term term = locate_term(params, i);
      const int64_t row_of_term = int64_t{term.r} * of.dilation_h, column_of_term = int64_t{term.s} * of.dilation_w;
      const int64_t word = start + (i >= terms ? plan.zeros
                                               : int64_t{term.channel} * plan.channel_words + plan.lead +
                                                     row_of_term * plan.row_words + column_of_term * plan.pixel_words);
      CHECK(within(word, window + (exists ? 0 : plan.w_words)));  // outputs that do not exist are computed all the same
      if (!exists) continue;
      // The element that lies there: row and column of the window, and channel.
      int64_t row, at, channel;
      if (plan.lines) {
        const int64_t in_row = word % plan.row_words - plan.lead;
        row = word / plan.row_words, at = in_row / plan.pixel_words, channel = in_row % plan.pixel_words;
      } else {
        const int64_t place = channels_last ? word / plan.pixel_words : word % plan.channel_words;
        channel = channels_last ? word % plan.pixel_words : word / plan.channel_words;
        row = place / plan.columns, at = place % plan.columns;
      }
      if (i >= terms) {
        CHECK(plan.lines ? row >= plan.rows : channel == plan.channels);
        continue;
      }
      CHECK(channel == term.channel && row < plan.rows);
      CHECK(h0 + row * plan.in_row_step == int64_t{p} * of.stride_h - of.pad_h + row_of_term);
      CHECK(w0 + at * plan.in_column_step == int64_t{q} * of.stride_w - of.pad_w + column_of_term);
    }
  }
}

static void check_run_or_planes(const Correlation& of, const Plan& plan, int64_t image) {
  const int64_t plane = int64_t{of.H} * of.W;
  CHECK(of.in_stride[3] == 1 && (of.H == 1 || of.in_stride[2] == of.W) && of.in_stride[1] == plane);
  CHECK(plan.plane == plane && (plan.x_copies != Copies::kRun || plan.channel_words == plane));
  CHECK(plan.x_words >= plan.channels * plane && plan.channels * plane % 4 == 0);
  for (int c = 0; c < of.in_channels; c += plan.channels) CHECK((image + c * plane) % 4 == 0);
  CHECK(plan.x_bulk ? of.in_channels % plan.channels == 0 : of.in_channels * plane % 4 == 0);
}

// Copies by threads, of words or of 16 bytes, which are inside an image or outside.
static void check_copies_of_threads(const Correlation& of, const Plan& plan, const Tile& tile, int64_t image) {
  const auto [h0, w0] = start_of_window(of, plan, tile);
  const bool channels_last = plan.pixel_words != 1;
  const int width = plan.x_copies == Copies::kWords ? 1 : 4, last = std::min(of.in_channels, 2 * plan.channels) - 1;
  CHECK(plan.entries == plan.rows * plan.row_entries);
  if (channels_last) {
    CHECK(plan.x_pieces == plan.channels / width && plan.row_entries == plan.columns);
    if (width == 4) CHECK(of.in_stride[1] == 1 && multiples(4, {of.in_channels, plan.channels, plan.pixel_words}));
  } else {
    CHECK(plan.row_entries * width == plan.columns && plan.channel_words % width == 0);
    if (width == 4) CHECK(of.in_stride[3] == 1 && plan.columns % 4 == 0);
  }
  if (width == 1) return;
  for (int c : {0, channels_last ? last / 4 * 4 : last})
    for (int row = 0; row < plan.rows; ++row)
      for (int at = 0; at < plan.columns; at += channels_last ? 1 : 4) {
        const int64_t h = h0 + int64_t{row} * plan.in_row_step, w = w0 + int64_t{at} * plan.in_column_step;
        CHECK(channels_last || (w % 4 == 0 && of.W % 4 == 0));
        if (within(h, of.H) && within(w, of.W))
          CHECK((image + c * of.in_stride[1] + h * of.in_stride[2] + w * of.in_stride[3]) % 4 == 0);
      }
}

static void check_box(const Correlation& of, const Plan& plan, int64_t address) {
  const int64_t all[] = {of.N, int64_t{of.groups} * of.in_channels, of.H, of.W};
  if (plan.lines) {  // all channels of a row
    CHECK(of.groups == 1 && of.in_stride[1] == 1 && of.in_stride[3] == of.in_channels && plan.chunks == 1);
    CHECK(plan.row_words % 4 == 0 && plan.row_words <= 256 && plan.rows <= 256);
    CHECK(plan.x_bulk_words == plan.rows * plan.row_words);
    CHECK(address % 4 == 0 && steps_of_boxes(of.in_stride, all, 4, {0, 2}));
    CHECK(plan.in_row_step == 1 && plan.in_column_step == 1);
    return;
  }
  const bool channels_last = plan.pixel_words != 1;
  const int sizes[] = {plan.columns, plan.rows, channels_last ? plan.pixel_words : plan.channels};
  for (int size : sizes) CHECK(size >= 1 && size <= 256);
  CHECK(plan.x_bulk_words == int64_t{sizes[0]} * sizes[1] * sizes[2]);
  CHECK(!channels_last || plan.channels * plan.taps == plan.depth);  // no box brings the padding of the reduction
  // A box's tensor may have every so manieth row or column of the image.
  CHECK(plan.in_row_step == 1 || (of.pad_h == 0 && plan.in_row_step == of.stride_h));
  CHECK(plan.in_column_step == 1 || (of.pad_w == 0 && plan.in_column_step == of.stride_w));
  CHECK(address % 4 == 0 && (of.N == 1 || of.in_stride[0] % 4 == 0));
  CHECK(steps_of_boxes(of.in_stride, all, 1, {0, 1, 2, 3}));  // not those of an expanded tensor
}

static void check_copies(const Params& params, const Tile& tile, int64_t address) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int64_t image = address + tile.n * of.in_stride[0] + int64_t{tile.group} * of.in_channels * of.in_stride[1];
  if (plan.x_copies == Copies::kRun || plan.x_copies == Copies::kPlanes) {
    check_run_or_planes(of, plan, image);
  } else if (plan.lines || plan.x_copies == Copies::kBox) {
    if (plan.lines) CHECK(((tile.q * of.stride_w - of.pad_w) * of.in_channels - plan.lead) % 4 == 0);
    check_box(of, plan, address);
  } else {
    check_copies_of_threads(of, plan, tile, image);
  }
}

static void check_writes(const Params& params, const Tile& tile, int64_t address) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  CHECK(plan.out_vector == 1 || plan.out_vector == 4);
  if (plan.out_vector == 1) return;
  std::vector<int64_t> offsets(plan.tile_n, -1);
  for (int p = tile.p; p < std::min(of.P, tile.p + plan.tile_p); ++p)
    for (int q = tile.q; q < std::min(of.Q, tile.q + plan.tile_q); ++q)
      offsets[(p - tile.p) * plan.tile_q + q - tile.q] = p * of.out_stride[2] + q * of.out_stride[3];
  const bool channels_last = plan.out_channels_last;
  CHECK(channels_last ? of.out_stride[1] == 1 && multiples(4, {of.out_channels, plan.split_rows})
                      : are_runs(offsets, 4));
  const int step = channels_last ? 4 : 1;
  for (int pixel = 0; pixel < plan.tile_n; pixel += channels_last ? 1 : 4)
    for (int m = tile.m; m < std::min(of.out_channels, tile.m + plan.tile_m) && offsets[pixel] >= 0; m += step) {
      const int64_t channel = int64_t{tile.group} * of.out_channels + m;
      CHECK((address + tile.n * of.out_stride[0] + channel * of.out_stride[1] + offsets[pixel]) % 4 == 0);
    }
}

// All tiles, and what a few of them read and write.
static bool check_plans(const Problem& problem, Operator op, const Addresses& at, std::mt19937& random) {
  Params params{};
  params.of = correlation_of_problem(problem, op);
  flatten_points(params.of);
  Device device{};
  current_device(device);
  bool any = false;
  for (int i = -1; i < 4 * kShapeCount; i += i < 0 ? 1 : 1 + random() % 4) {
    const int shape = i < 0 ? -1 : i / 4, splits = i < 0 ? 0 : 1 << i % 4;
    plan_in_hand = "shape " + std::to_string(shape) + ", " + std::to_string(splits) + " parts";
    params.plan = Plan{};
    const Alignment alignment{at.in, at.w, at.out};
    if (!make_plan(params.of, problem.tf32_allowed, device, alignment, params.plan, shape, splits)) continue;
    any = true;
    set_divisors(params);
    const Plan& plan = params.plan;
    NOTE_VALUES(plan.shape, 0, 1, 2, 3, 4);
    NOTE_VALUES(plan.splits, 1, 2, 4, 8);
    NOTE_VALUES(plan.x_copies, 0, 1, 2, 3, 4);
    NOTE_VALUES(plan.w_copies, 0, 1, 2, 3);
    NOTE(plan.x_bulk && plan.lines);
    NOTE(plan.w_bulk && plan.taps_first);
    NOTE(plan.out_vector == 4 && plan.out_channels_last);
    NOTE(plan.lead > 0 && plan.pixel_words == 1);
    NOTE(plan.chunks > plan.stages);
    check_numbers(params.of, plan, device);
    check_tiles(params);
    for (const int number : some_of(plan.tiles, 3, random)) {
      const Tile tile = locate_tile(params, number);
      check_weights(params, tile, at.w / 4);
      check_reads(params, tile);
      check_copies(params, tile, at.in / 4);
      check_writes(params, tile, at.out / 4);
    }
  }
  return any;
}

extern "C" {
// A divisor by which a quotient is wrong, or 0.
int mma_wrong_divisor(int seed) {
  std::mt19937 random(seed);
  const int64_t most = 2147483647;
  std::set<int64_t> divisors{most};
  for (int i = 0; i < 5000; ++i) divisors.insert({i + 1, static_cast<int64_t>(1 + (random() >> (1 + i % 31)))});
  for (int bits = 1; bits < 31; ++bits) divisors.insert({(1 << bits) - 1, 1 << bits, (1 << bits) + 1});
  for (const int64_t divisor : divisors) {
    const Divisor by = make_divisor(divisor);
    const int64_t any = random() >> 1;
    for (int64_t multiple : {int64_t{0}, divisor, any / divisor * divisor, most / divisor * divisor})
      for (int64_t number : {multiple - 1, multiple, multiple + 1, any, most})
        if (is_int(number) && quotient(static_cast<int>(number), by) != number / divisor) return divisor;
  }
  return 0;
}
// Keys differ for problems that differ in one field, address or GPU, and a memo finds what belongs to a key.
const char* mma_fault_of_memo(const int64_t* fields, int count, int seed) {
  return fault_of([&] {
    std::mt19937 random(seed);
    std::vector<ProblemKey> keys;
    for (int i = -1; i < count + 3 + 1 + 2; ++i) {
      std::vector<int64_t> changed(fields, fields + count);
      if (within(i, count)) changed[i] = i == count - 13 ? !changed[i] : changed[i] + 1;
      const auto at = [&](int j) { return uint64_t{i == count + j ? 16u : 0u}; };
      const Operator op = i == count + 3 ? Operator::kDgrad : Operator::kFprop;
      keys.push_back(key_of(make_problem(changed.data()), op, at(0), at(1), at(2), i == count + 4, i == count + 5));
    }
    const size_t different = keys.size();
    CHECK(std::set<ProblemKey>(keys.begin(), keys.end()).size() == different);
    for (int i = 0; i < 2000; ++i) keys.push_back(keys[random() % different]), keys.back()[34] = 1000 + i;
    // A network of 600 problems, in their order: none is forgotten.
    Memo<int> of_network;
    int computed = 0;
    for (int i = 0; i < 3 * 600; ++i)
      CHECK(of_network.get(keys[i % 600], [&] { return ++computed, i % 600; }) == i % 600);
    CHECK(computed == 600);
    // More of them than a memo takes, in any order.
    Memo<int> memo;
    for (int i = 0; i < 20000; ++i) {
      const int number = random() % keys.size();
      CHECK(memo.get(keys[number], [&] { return number; }) == number);
    }
  });
}
}
