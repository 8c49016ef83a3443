#include "gather.cu"
#include "tma.cu"

using namespace modelnew;
using namespace modelnew::gather;
#include "planner.h"

static int64_t offset_of(const int64_t (&stride)[4], int64_t n, int64_t row, int64_t column) {
  return n * stride[0] + row * stride[2] + column * stride[3];
}

// setmaxnreg takes multiples of 8 and only hands on what a block started with.
template <typename Format>
static void check_registers(int warpgroups) {
  const int multiply = Format::multiply_registers(warpgroups), gather = Format::gather_registers(warpgroups);
  const int of_block = start_registers(warpgroups) * threads_of(warpgroups);
  CHECK(blocks_per_sm(warpgroups) * of_block <= 64 << 10);
  CHECK(multiply % 8 == 0 && multiply < 256 && gather % 8 == 0 && gather >= 24);
  CHECK((warpgroups * multiply + gather) * 128 <= of_block);
}

// Here and below `of` is what the plan is of, a copy of x where it has one, and `bytes` are those of a value that it
// reads or writes.
static void check_memory(const Plan& plan) {
  const SharedLayout layout = shared_layout(plan);
  const int blocks = blocks_per_sm(plan.warpgroups);
  CHECK(plan.warpgroups >= 1 && plan.warpgroups <= 3 && blocks == (plan.warpgroups == 1 ? 2 : 1));
  check_registers<Tf32>(plan.warpgroups);
  check_registers<Contained>(plan.warpgroups);
  check_registers<Again>(plan.warpgroups);
  // The system takes 1 KB for each block of an SM.
  CHECK(blocks * (layout.end + 1024) <= 228 << 10 && layout.end == plan.smem_bytes);
  CHECK(plan.x_stages >= 2 && plan.x_stages <= kMaxStages);
  CHECK(plan.w_stages >= (plan.resident ? 1 : 3) && plan.w_stages <= kMaxStages);
  CHECK(plan.x_stage_bytes > 0 && plan.w_stage_bytes == plan.pieces * plan.tile_n * 16);
  CHECK(multiples(16, {layout.x_ring, plan.x_stage_bytes, layout.w_ring, plan.w_stage_bytes}));
  CHECK(layout.staging >= 4 * kMaxStages * 8);  // behind the barriers
  const int staging = plan.boxes ? 4 * (plan.in_phases ? 1 : 2) * kBoxStagingBytes : kStagingBytes;
  CHECK(layout.table - layout.staging >= plan.warpgroups * staging);
  if (plan.boxes) CHECK(multiples(1024, {layout.staging, kBoxStagingBytes}));
  const int64_t tables = plan.in_boxes || plan.in_images ? 0 : 2 * ceil_div(plan.slots, 32) * 32 * 4;
  CHECK(layout.x_ring - layout.table >= tables);
  CHECK(layout.w_ring - layout.x_ring == plan.x_stages * plan.x_stage_bytes);
  CHECK(layout.end - layout.w_ring == plan.w_stages * plan.w_stage_bytes);
  if (plan.splits > 1) CHECK(layout.x_ring + 4 * tile_pixels(plan) * plan.tile_n <= plan.smem_bytes);
}

static void check_stage_of_x(const Phased& of, const Plan& plan, int bytes) {
  const int64_t plane = int64_t{of.P} * of.Q, pixels = tile_pixels(plan);
  // Wherever these pixels start, no more images have some of them.
  const int64_t images = plan.in_images ? 1 + ceil_div(pixels - 1, plane) : 1;
  const int64_t x_bytes = plan.planes     ? images * plan.pieces * (16 / bytes) * plan.plane_slots * 4
                          : plan.in_boxes ? int64_t{plan.x_boxes} * plan.box_slots * 128
                                          : int64_t{plan.pieces} * plan.piece_slots * 16;
  CHECK(pixels == 64 * plan.warpgroups * plan.blocks_m);
  CHECK(plan.x_stage_bytes >= x_bytes);
  CHECK(plan.piece_slots >= plan.slots && plan.plane_slots >= (plan.in_images ? plane : pixels));
  CHECK(plan.planes == (bytes == 4 && plan.points && plan.loads != Loads::kChannels));
  CHECK(plan.apart == (plan.points && of.R * of.S > 1));
  if (plan.warpgroups == 1) CHECK(plan.points && bytes == 4 && !plan.apart);
  if (plan.contained) CHECK(plan.copied && plan.in_boxes && bytes == 2 && !plan.apart);
  if (plan.in_images) {
    CHECK(plan.planes && of.R * of.S == 1 && of.in_channels % 32 == 0 && images <= 32);
    CHECK(plan.plane_slots == plane && plan.image_words == 32 * plane);
  }
  if (!plan.in_boxes) {
    CHECK(!plan.dense_slots && !plan.in_phases && !plan.apart);
    return;
  }
  CHECK(plan.rows && shared_layout(plan).x_ring % 1024 == 0 && plan.x_stage_bytes % 1024 == 0);
  CHECK(plan.box_step >= 1 && plan.box_step <= 8 && plan.box_slots * plan.box_step <= 256);
  if (plan.in_phases) CHECK(bytes == 4 && !plan.copied && !plan.points && !plan.dense_slots && plan.box_step == 2);
  if (plan.dense_slots) CHECK(plan.box_step == 1);
  // The order of pieces depends on the number of a slot in its stage, not in its box.
  if (plan.apart) {
    CHECK(bytes == 4 && of.stride_h == 1 && of.stride_w == 1);
    CHECK(plan.x_boxes == 1 && plan.box_slots == plan.slots);
  } else if (plan.dense_slots) {
    CHECK(plan.box_slots % 8 == 0 && covers(plan.x_boxes, plan.box_slots, plan.slots));
  } else {
    CHECK(plan.box_slots == plan.pitch && plan.x_boxes * plan.pitch == plan.slots);
  }
}

static void check_units(const Phased& of, const Plan& plan, int bytes) {
  CHECK(covers(plan.blocks_c, int64_t{plan.pieces} * (16 / bytes), of.in_channels));
  CHECK(covers(plan.tiles_n, plan.tile_n, of.out_channels));
  CHECK(covers(plan.splits, plan.split_blocks, plan.blocks_c));
  CHECK(plan.iterations == (phases_of(of.phases) > 1 ? stages_before(of.phases, plan.blocks_c)
                                                     : int64_t{plan.blocks_c} * of.R * of.S));
  if (!plan.points && !plan.packed) CHECK(plan.tile_p * plan.tile_q <= tile_pixels(plan));
  const int64_t cut_up = plan.tiles - plan.whole_tiles;
  CHECK(plan.tiles == int64_t{plan.tiles_m} * plan.tiles_n * of.groups);
  CHECK(plan.units == plan.whole_tiles + cut_up * plan.splits);
  CHECK(within(plan.blocks - 1, std::min(plan.units, blocks_per_sm(plan.warpgroups) * kSms)));
  if (plan.splits > 1) {  // each block of a cluster has one part of a tile
    CHECK(plan.splits <= 8 && plan.blocks % plan.splits == 0 && plan.whole_tiles % plan.blocks == 0);
    CHECK(cut_up > 0 && cut_up * plan.splits <= plan.blocks);
  } else {
    CHECK(cut_up == 0);
  }
  if (plan.resident) {  // all tiles of a block have the same channels
    CHECK(plan.w_stages == plan.iterations && plan.splits == 1 && of.groups == 1 && plan.points);
    CHECK(plan.blocks >= plan.units || plan.blocks % plan.tiles_n == 0);
  }
  CHECK(plan.cycles > 0);
}

// Every output is one tile's, in every block of channels.
static void check_tiles(const Phased& of, const Plan& plan) {
  const int64_t pixels = of.N * of.P * of.Q;
  std::vector<int> blocks_of(of.groups * plan.tiles_n * pixels);
  Owned parts(plan.units - plan.whole_tiles);
  for (int unit = 0; unit < plan.units; ++unit) {
    const Tile tile = locate_tile(plan, unit);
    CHECK(within(tile.group, of.groups) && within(tile.n_block, plan.tiles_n));
    CHECK(tile.first_block % plan.split_blocks == 0 && tile.blocks >= 1);
    CHECK(tile.first_block + tile.blocks <= plan.blocks_c);
    if (tile.part >= 0) {
      const Tile first = locate_tile(plan, unit - tile.part % plan.splits);
      CHECK(first.first == tile.first && first.q == tile.q);
      CHECK(first.n_block == tile.n_block && first.group == tile.group);
      CHECK(part_of_tile(plan, tile.part) == tile.part % plan.splits);
      CHECK(parts.take(tile.part));
    }
    const int64_t image = first_image(plan, tile);
    for (int m = 0; m < tile_pixels(plan); ++m) {
      int n, p, q;
      if (!locate_output(of, plan, tile, image, m, n, p, q)) continue;
      CHECK(n >= 0 && within(image + n, of.N) && within(p, of.P) && within(q, of.Q));
      const int64_t pixel = ((image + n) * of.P + p) * of.Q + q;
      blocks_of[(int64_t{tile.group} * plan.tiles_n + tile.n_block) * pixels + pixel] += tile.blocks;
    }
  }
  CHECK(parts.all());
  CHECK(std::count(blocks_of.begin(), blocks_of.end(), plan.blocks_c) == static_cast<int64_t>(blocks_of.size()));
}

// A tile of which each output reads at each tap what the convolution says.
struct Reads {
  const Phased& of;
  const Plan& plan;
  const Tile& tile;
  const int bytes;
  const uint64_t in;
  const int64_t image = first_image(plan, tile);

  uint64_t address(int channel, int64_t offset) const {
    const int64_t of_all = int64_t{tile.group} * of.in_channels + channel;
    return in + (image * of.in_stride[0] + of_all * of.in_stride[1] + offset) * bytes;
  }

  // Checks where a pixel is. A copy has pixel after pixel, all channels of each: boxes go by its strides, and what
  // writes it by these numbers.
  int64_t offset_of_pixel(int64_t n, int64_t h, int64_t w, int height, int width) const {
    const int64_t offset = offset_of(of.in_stride, n, h, w), number = ((image + n) * height + h) * width + w;
    CHECK(is_int(offset));
    if (plan.copied) CHECK(image * of.in_stride[0] + offset == number * of.groups * of.in_channels);
    if (plan.loads == Loads::kChannels) {
      const int channels = 16 / bytes;
      CHECK(of.in_stride[1] == 1 && of.in_channels % channels == 0);
      for (int channel = 0; channel < of.in_channels; channel += channels)
        CHECK(address(channel, offset) % 16 == 0);
    }
    return offset;
  }

  // Images lie in a stage as in memory, 32 channels of each, one behind the other.
  void check_images() const {
    for (int m = 0; m < tile_pixels(plan); ++m) {
      int n, p, q;
      if (!locate_output(of, plan, tile, image, m, n, p, q)) continue;
      const int64_t plane = int64_t{of.H} * of.W, word = word_of_point(plan, tile, image, m), before = 32 * n * plane;
      CHECK(4 * (word + 31 * plane) < plan.x_stage_bytes);
      for (int channel = 0; channel < of.in_channels; ++channel) {
        const uint64_t copied_from = address(channel / 32 * 32, n * of.in_stride[0]);
        CHECK(copied_from % 16 == 0);
        CHECK(address(channel, offset_of(of.in_stride, n, p, q)) ==
              copied_from + 4 * (word - before + channel % 32 * plane));
      }
    }
  }

  void check_points() const {
    Owned slots(std::max(plan.piece_slots, plan.plane_slots));
    std::vector<int64_t> offsets(tile_pixels(plan), -1);
    for (int m = 0; m < tile_pixels(plan); ++m) {
      const int slot = slot_of_output(of, plan, tile, image, m);
      CHECK(within(slot, plan.planes ? plan.plane_slots : plan.piece_slots) && slots.take(slot));
      if (plan.apart) CHECK(slot == m);
      int n, p, q;
      if (!locate_output(of, plan, tile, image, m, n, p, q)) continue;
      for (int tap = 0; tap < of.R * of.S; ++tap) {
        const int64_t h = int64_t{p} * of.stride_h - of.pad_h + tap / of.S * of.dilation_h;
        const int64_t w = int64_t{q} * of.stride_w - of.pad_w + tap % of.S * of.dilation_w;
        if (within(h, of.H) && within(w, of.W)) offsets[m] = offset_of_pixel(n, h, w, of.H, of.W);
      }
    }
    if (plan.loads != Loads::kPixels) return;
    CHECK(are_runs(offsets, 4));
    for (size_t m = 0; m < offsets.size(); m += 4)
      for (int channel = 0; channel < of.in_channels && offsets[m] >= 0; ++channel)
        CHECK(address(channel, offsets[m]) % (4 * bytes) == 0);
  }

  void check_windows() const {
    const SharedLayout layout = shared_layout(plan);
    CHECK(plan.loads != Loads::kPixels);
    std::set<int64_t> before_slots;  // numbers of pixels, where slots are as in memory: less that of the slot
    for (int m = 0; m < tile_pixels(plan); ++m) {
      int n, p, q;
      const bool exists = locate_output(of, plan, tile, image, m, n, p, q);
      const int first = slot_of_output(of, plan, tile, image, m);
      for (int r = 0; r < of.R; ++r)
        for (int s = 0; s < of.S; ++s) {
          const int64_t slot = first + int64_t{r} * of.dilation_h * plan.pitch + int64_t{s} * of.dilation_w;
          if (!exists) {  // it is multiplied all the same
            const int64_t last_stage = layout.x_ring + int64_t{plan.x_stages - 1} * plan.x_stage_bytes;
            const int64_t byte = plan.rows ? slot * 128 + 112 : (plan.piece_slots * (plan.pieces - 1) + slot) * 16;
            CHECK(slot >= 0 && last_stage + byte + 16 <= layout.end);
            continue;
          }
          CHECK(within(slot, plan.slots));
          int in_n, h, w;
          const bool inside = locate_slot(of, plan, tile, image, static_cast<int>(slot), in_n, h, w);
          const int64_t true_h = int64_t{p} * of.stride_h - of.pad_h + int64_t{r} * of.dilation_h;
          const int64_t true_w = int64_t{q} * of.stride_w - of.pad_w + int64_t{s} * of.dilation_w;
          CHECK(inside == (within(true_h, of.H) && within(true_w, of.W)));
          if (inside) CHECK(in_n == n && h == true_h && w == true_w);
        }
    }
    for (int slot = 0; slot < plan.slots; ++slot) {
      int n, h, w, row_n, row_h, row_w;
      const bool inside = locate_slot(of, plan, tile, image, slot, n, h, w);
      if (plan.in_boxes && !plan.dense_slots) {  // a box is a row; of a phase its columns are one apart
        locate_slot(of, plan, tile, image, slot / plan.pitch * plan.pitch, row_n, row_h, row_w);
        CHECK(n == row_n && h == row_h && w == row_w + slot % plan.pitch * (plan.in_phases ? 1 : plan.box_step));
      }
      if (!inside) continue;
      CHECK(n >= 0 && within(image + n, of.N) && within(h, of.H) && within(w, of.W));
      if (plan.dense_slots) before_slots.insert(((image + n) * of.H + h) * of.W + w - slot);
      offset_of_pixel(n, h, w, of.H, of.W);
    }
    if (!plan.dense_slots) return;
    CHECK(of.pad_h == 0 && of.pad_w == 0 && before_slots.size() == 1 && *before_slots.begin() >= 0);
  }

  void check() const {
    if (plan.in_images) {
      check_images();
    } else if (plan.points) {
      check_points();
    } else {
      check_windows();
    }
  }
};

static void check_writes(const Phased& of, const Plan& plan, const Tile& tile, int bytes, uint64_t out) {
  const int64_t image = first_image(plan, tile), plane = int64_t{of.P} * of.Q;
  const int first_k = tile.n_block * plan.tile_n, channels = std::min(plan.tile_n, of.out_channels - first_k);
  const int64_t channel_of_all = int64_t{tile.group} * of.out_channels + first_k;
  const bool channels_last = plan.out_channels_last, follow = plan.points || plan.packed;
  std::vector<int64_t> offsets(tile_pixels(plan), -1);
  for (int m = 0; m < tile_pixels(plan); ++m) {
    int n, p, q;
    if (!locate_output(of, plan, tile, image, m, n, p, q)) continue;
    offsets[m] = offset_of(of.out_stride, n, p, q);
    CHECK(is_int(offsets[m]));
    const int64_t number = first_output(plan, tile) + m;
    const int64_t followed = channels_last ? number * of.out_stride[3]
                                           : number / plane * of.out_stride[0] + number % plane * of.out_stride[3];
    if (plan.boxes && follow) CHECK(followed == image * of.out_stride[0] + offsets[m]);
  }
  if (plan.boxes) {
    CHECK(bytes == 4 && out % 16 == 0);
    if (of.groups > 1) CHECK(channels % kStagedChannels == 0);
    // A box has 16 outputs of a row of y, or of two images at most where outputs follow one another.
    if (!follow) CHECK(are_runs(offsets, 16, channels_last ? of.out_stride[3] : 1));
    if (channels_last) {
      CHECK(channel_of_all % 4 == 0 && (of.N * plane == 1 || of.out_stride[3] % 4 == 0));
    } else {
      CHECK(of.out_stride[3] == 1 && plane % 4 == 0 && plane >= 16);
      CHECK(of.out_stride[1] % 4 == 0 && (of.N == 1 || of.out_stride[0] % 4 == 0));
      for (int m = 0; m < tile_pixels(plan); m += 4)
        CHECK(offsets[m] < 0 || (image * of.out_stride[0] + offsets[m]) % 4 == 0);
    }
  }
  if (channels_last) CHECK(of.out_stride[1] == 1);
  CHECK(plan.vector == 1 || plan.vector == 4);
  if (plan.vector == 1) return;
  CHECK(channels_last ? channels % 4 == 0 : are_runs(offsets, 4));
  for (int m = 0; m < tile_pixels(plan); m += channels_last ? 1 : 4)
    for (int k = 0; k < channels && offsets[m] >= 0; k += channels_last ? 4 : 1) {
      const int64_t offset = image * of.out_stride[0] + (channel_of_all + k) * of.out_stride[1] + offsets[m];
      CHECK((out + offset * bytes) % (4 * bytes) == 0);
    }
}

// All tiles, and what a few of them read and write.
static void check_multiplied(const Phased& of, const Plan& plan, int in_bytes, int out_bytes, const Addresses& at,
                             std::mt19937& random) {
  check_memory(plan);
  check_stage_of_x(of, plan, in_bytes);
  check_units(of, plan, in_bytes);
  check_tiles(of, plan);
  for (const int unit : some_of(plan.units, 4, random)) {
    const Tile tile = locate_tile(plan, unit);
    Reads{of, plan, tile, in_bytes, at.in}.check();
    check_writes(of, plan, tile, out_bytes, at.out);
  }
}

static void check_landing_memory(const Phased& of, const Plan& plan) {
  const Landing& landing = plan.landing;
  const LandingShape& shape = landing.shape;
  const LandingLayout layout = landing_layout(plan);
  CHECK(layout.end == plan.smem_bytes && layout.end <= kSharedMemory);
  CHECK(layout.staging >= 56 * 8);  // behind the barriers
  CHECK(layout.staging % 1024 == 0 && layout.landed % 512 == 0 && layout.x_ring % 16 == 0 && layout.w_ring % 16 == 0);
  CHECK(landing.stage_bytes % (shape.channels_last ? 512 : 128) == 0);
  CHECK(layout.landed - layout.staging >= 4 * shape.staged_rows() * shape.staged_row_bytes());
  CHECK(shape.boxes() * shape.box_rows() == shape.landed_rows() && shape.box_rows() <= 256);
  CHECK(landing.stage_bytes >= shape.boxes() * shape.box_bytes());
  CHECK(plan.x_stage_bytes == 2 * 16 * landing.slots);
  CHECK(landing.w_stages_of_step == (shape.shares() ? 3 : 1));  // a row of taps each, or all of them
  CHECK(plan.w_stage_bytes == (shape.shares() || shape.stacks() ? 1 : of.R) * 3 * 2 * 16 * plan.tile_n);
  CHECK(layout.x_ring - layout.landed == landing.stages * landing.stage_bytes);
  CHECK(layout.w_ring - layout.x_ring == plan.x_stages * plan.x_stage_bytes);
  CHECK(layout.end - layout.w_ring == plan.w_stages * plan.w_stage_bytes);
  CHECK(landing.stages >= 2 && landing.stages <= 4 && plan.x_stages >= 2 && plan.x_stages <= 4);
  CHECK(plan.w_stages >= (shape.shares() ? 3 : 2) && plan.w_stages <= (shape.shares() ? 6 : 4));
}

// A plan by which x is contained on its way.
static void check_landing(const Phased& of, const Plan& plan, const Addresses& at) {
  const Landing& landing = plan.landing;
  const LandingShape& shape = landing.shape;
  const bool channels_last = shape.channels_last, whole_rows = shape.whole_rows();
  CHECK(shape.has_kernel() && shape.gemm_rows() == plan.tile_n && shape.rows == plan.blocks_m);
  CHECK(shape.columns == plan.tile_q && shape.stride == of.stride_h);
  CHECK(plan.contained && !plan.copied && !plan.in_boxes && !plan.in_phases && of.groups == 1);
  CHECK(of.S == 3 && of.stride_w == of.stride_h && of.dilation_h == 1 && of.dilation_w == 1);
  if (shape.shares()) CHECK(of.R == 3);
  check_landing_memory(of, plan);
  const int rows_of_taps = shape.stacks() ? 1 : of.R;  // that a warp multiplies
  if (shape.stacks()) CHECK(of.R == 3 && of.out_channels <= 16);
  CHECK(covers(landing.steps, 16, of.in_channels) && plan.iterations == landing.steps * rows_of_taps * of.S);
  CHECK(covers(plan.tiles_n, plan.tile_n, of.out_channels) && plan.pieces == 2);
  CHECK(plan.units == plan.tiles && within(plan.blocks - 1, std::min(kSms, plan.units)) && plan.cycles > 0);
  const auto are_fours = [&](const int64_t (&stride)[4], int channels, int rows, int columns) {
    const int64_t sizes[4] = {of.N, channels, rows, columns};
    const int side_by_side = channels_last ? 1 : 3;
    return stride[side_by_side] == 1 && sizes[side_by_side] % 4 == 0 &&
           steps_of_boxes(stride, sizes, 4, {0, channels_last ? 3 : 1, 2});
  };
  // Pairs of rows, as one.
  const int pairs = shape.pairs;
  const int64_t in_stride[4] = {of.in_stride[0], of.in_stride[1], pairs * of.in_stride[2], of.in_stride[3]};
  CHECK(at.in % 16 == 0 && are_fours(in_stride, of.in_channels, of.H / pairs, of.W * pairs));
  CHECK(pairs == 1 || (of.in_stride[2] == of.W && of.H % 2 == 0 && landing.span % 2 == 0));
  // Rows of 14 columns of a plane are not multiples of 16 bytes.
  CHECK(plan.boxes == (channels_last || shape.columns > 14));
  if (plan.boxes) CHECK(at.out % 16 == 0 && are_fours(of.out_stride, of.out_channels, of.P, of.Q));
  CHECK(is_int(of.N * of.H * of.W * ceil_div(of.in_channels, 8) * 8));  // places in the list
  CHECK((shape.shares() ? 1 : 2) * landing.rows == landing.span && landing.rows <= shape.rows);
  CHECK(landing.rows <= 4 * shape.staged_rows());
  // Staged rows of planes have 32 columns, whose rest would be another tile's.
  if (!channels_last && shape.columns < 32) CHECK(plan.tiles_q == 1);
  const int window_rows = shape.stride * (landing.span - 1) + of.R;
  const int window_columns = shape.stride * (shape.columns - 1) + 3;
  CHECK(landing.window_rows == window_rows && window_rows <= shape.landed_rows());
  if (whole_rows) {  // boxes of four rows as one have all columns of x and nothing else
    CHECK(of.W == shape.box_columns() && of.pad_w == 1 && of.W + of.pad_w <= window_columns);
    CHECK(shape.box_rows() == 4 && (of.H == 1 || of.in_stride[2] == of.W));
  } else {
    for (int lead : landing.lead) CHECK(lead >= 0 && lead + window_columns <= shape.box_columns());
  }
  // A slot holds one row and column of the window.
  std::vector<std::pair<int, int>> held(landing.slots, {-1, -1});
  for (int row = 0; row < window_rows; ++row)
    for (int column = 0; column < window_columns; ++column) {
      const int slot = shape.slot_of(row, column);
      CHECK(within(slot, landing.slots) && held[slot].first < 0);
      held[slot] = {row, column};
    }
  const int last_row = (landing.span - landing.rows) * shape.pitch(), read_slots = 2 * shape.product_slots();
  for (int tap = 0; tap < rows_of_taps * of.S; ++tap)
    CHECK(last_row + shape.slot_of(tap / of.S, tap % of.S) + read_slots <= landing.slots);
  Owned owned(of.N * of.P * of.Q * plan.tiles_n);
  std::vector<int> listed(of.N * of.H * of.W), read(of.N * of.H * of.W);
  for (int unit = 0; unit < plan.units; ++unit) {
    const LandingTile tile = locate_landing(plan, unit);
    CHECK(within(tile.n, of.N) && within(tile.n_block, plan.tiles_n));
    for (int box = 0; box < pairs && !channels_last && !whole_rows; ++box) {
      const int of_pair = pairs == 1 ? 0 : (tile.p - of.pad_h + box) & 1;
      CHECK((of_pair * of.W + tile.q - of.pad_w - landing.lead[box]) % 4 == 0);
    }
    CHECK(whole_rows ? tile.q == 0 : channels_last || tile.q % 4 == 0);
    const int first_h = tile.p * shape.stride - of.pad_h, first_w = tile.q * shape.stride - of.pad_w;
    const auto place = [&](int h, int w) { return (static_cast<int64_t>(tile.n) * of.H + h) * of.W + w; };
    for (int row = 0; row < landing.span; ++row)
      for (int column = 0; column < shape.columns; ++column) {
        const int p = tile.p + row, q = tile.q + column;
        if (p >= of.P || q >= of.Q) continue;
        CHECK(owned.take(((int64_t{tile.n} * of.P + p) * of.Q + q) * plan.tiles_n + tile.n_block));
        const int in_warpgroup = row % landing.rows * shape.pitch() + column;
        CHECK(in_warpgroup < read_slots && column < shape.pitch());
        for (int r = 0; r < of.R; ++r)
          for (int s = 0; s < of.S; ++s) {
            const int slot = row / landing.rows * last_row + shape.slot_of(r, s) + in_warpgroup;
            if (shape.stacks()) CHECK(in_warpgroup + r * shape.pitch() < read_slots);
            CHECK(slot < landing.slots && held[slot].first >= 0);
            const int h = first_h + held[slot].first, w = first_w + held[slot].second;
            CHECK(h == p * shape.stride - of.pad_h + r && w == q * shape.stride - of.pad_w + s);
            if (within(h, of.H) && within(w, of.W)) read[place(h, w)] = 1;
          }
      }
    for (int row = 0; row < window_rows; ++row)
      for (int column = 0; column < window_columns; ++column) {
        const int h = first_h + row, w = first_w + column;
        if (within(h, of.H) && within(w, of.W)) listed[place(h, w)] += lists(of, plan, tile, row, column);
      }
  }
  CHECK(owned.all());
  for (size_t i = 0; i < listed.size(); ++i) CHECK(listed[i] <= 1 && listed[i] >= read[i]);
}

// The workspace has room for the list, for packed weights, also those of `again`, and for the copy, and little more.
static void check_workspace(const Phased& of, const Plan& plan, const Agains& again, int bytes, int64_t bytes_of_copy) {
  const auto packed = [](const Phased& groups, const Plan& plan) {
    return int64_t{groups.groups} * plan.tiles_n * plan.iterations * plan.pieces * plan.tile_n * 16;
  };
  const Phased grouped = plan.contained ? merged(of) : of;
  int64_t packed_again = 0;  // phases of y, one after another
  for (int i = 0; plan.contained && i < again.count; ++i)
    packed_again = std::max(packed_again, packed(again.each[i].of, again.each[i].plan));
  const WorkspaceLayout layout = workspace_layout(of, plan, again, bytes);
  const int64_t starts[] = {0,           layout.samples,      layout.list,   layout.w_factors,
                            layout.packed, layout.packed_again, layout.copied, layout.end};
  int64_t sizes[] = {sizeof(ContainedControl), 4 * kSampleBlocks, kMostListed * sizeof(Listed),
                     4 * packed_rows(grouped, plan.tile_n), packed(grouped, plan), packed_again, bytes_of_copy};
  int64_t all = 0;
  for (int i = 0; i < 7; ++i) {
    const bool needed = plan.contained || i == 4 || i == 6;
    CHECK(starts[i] % 16 == 0 && starts[i + 1] - starts[i] >= (needed ? sizes[i] : 0));
    all += needed ? sizes[i] : 0;
  }
  CHECK(layout.end <= all + 7 * 128);
}

// Checks of a plan whose products tma computes.
static void check_by_tma(const Phased& of, const Plan& plan, uint64_t out) {
  const Phased copy = copied(of, true, true);
  CHECK(plan.contained && plan.copied && !plan.lands && plan.splits == 1 && plan.cycles > 0);
  CHECK(phases_of(copy.phases) == 1 && copy.in_channels % 8 == 0 && copy.in_channels >= merged(of).in_channels);
  const tma::Planned planned = tma::plan_contained(copy, kSms, out);
  CHECK(planned.found && planned.plan.contained);
  const int64_t rows = packed_rows(copy, plan.tile_n);
  CHECK(rows >= copy.groups * copy.out_channels && rows % kMostRowsOfBlock == 0);
  CHECK(plan.iterations * plan.pieces == copy.R * copy.S * copy.in_channels / 8);
  CHECK(tma::packed_row_channels(planned.of) == copy.in_channels);
}

static void note(const Phased& of, const Plan& plan) {
  NOTE(plan.by_tma);
  NOTE(plan.lands);
  NOTE(plan.contained && merged(of).merged > 1);
  if (plan.lands) {
    const LandingShape& landing = plan.landing.shape;
    NOTE(landing.channels_last);
    NOTE_VALUES(landing.tile_n, 16, 64, 128);
    NOTE_VALUES(landing.columns, 14, 28, 32);
    NOTE_VALUES(landing.rows, 6, 7, 8, 14);
    NOTE_VALUES(landing.stride, 1, 2);
    NOTE_VALUES(landing.pairs, 1, 2);
  } else if (!plan.by_tma) {
    NOTE_VALUES(source_of_plan(plan), 0, 1, 2, 3, 4, 5, 6);
    NOTE_VALUES(plan.warpgroups, 1, 2, 3);
    NOTE(plan.splits > 1 && plan.points);
    NOTE(plan.splits > 1 && plan.whole_tiles > 0);
    NOTE(plan.contained && plan.points);
    NOTE(plan.contained && has_phases(of));
    NOTE(!plan.contained && plan.copied);
    NOTE(plan.boxes && plan.out_channels_last);
    NOTE(plan.vector == 4);
    NOTE(plan.w_in_boxes);
    NOTE(plan.resident);
    NOTE(plan.dense_slots);
    NOTE(plan.box_step > 1);
    NOTE(plan.packed);
    NOTE(plan.gap < 0);
  }
}

// Checks operands that are contained, copied or taken in phases; returns the bytes of the copy. Phases and merged
// groups come from functions that kernels share, which the emulation runs.
static int64_t check_copy(const Phased& of, const Plan& plan, int bytes) {
  if (plan.in_phases) CHECK(of.groups == 1 && !of.flipped && of.in_channels % 4 == 0 && of.in_stride[1] == 1);
  if (plan.contained) CHECK(bytes == 4 && (of.groups == 1 || merged(of).in_channels % 64 == 0));
  if (!plan.copied) return 0;
  const Phased copy = copied(of, plan.contained, plan.by_tma);
  return of.N * copy.H * copy.W * copy.groups * copy.in_channels * (plan.contained ? 2 : bytes);
}

static bool check_plans(const Problem& problem, Operator op, const Addresses& at, std::mt19937& random) {
  const Phased of = phased_of(problem, op);
  const int bytes = element_bytes(problem.dtype);
  const Alignment alignment{at.in, at.out};
  plan_in_hand = "what does contained operands again";
  Agains again{};
  const bool has_again = bytes == 4 && plan_again(of, Device{kSms}, alignment, again);
  for (int i = 0; has_again && i < again.count; ++i) {
    const Plan& each = again.each[i].plan;
    check_multiplied(again.each[i].of, each, bytes, bytes, at, random);
    CHECK(each.splits == 1 && !each.copied);
    // The list in order: image, row, column, channel and value.
    CHECK(kBarrierBytes + kMostListed * 5 * sizeof(float) <= static_cast<size_t>(each.smem_bytes));
  }
  bool any = false;
  constexpr int kShapes = static_cast<int>(std::size(kTileShapes));  // and, behind them, what tma multiplies
  for (int shape = -1; shape <= kShapes; ++shape) {
    plan_in_hand = "shape " + std::to_string(shape);
    const int splits = shape >= 0 && shape < kShapes && random() % 4 == 0 ? 2 : 0;  // else as many as it likes
    Plan plan{};
    if (!make_plan(of, bytes, Device{kSms}, alignment, shape, plan, splits)) {
      // Windows may be too large for shared memory, points that may be contained are not.
      const bool copies = within(shape, kShapes) && kTileShapes[shape].contained && !kTileShapes[shape].lands;
      CHECK(!copies || of.R * of.S > 1 || has_out_phases(of) || splits > 0 || !has_again || !may_contain(of, bytes));
      continue;
    }
    any = true;
    note(of, plan);
    check_workspace(of, plan, again, bytes, check_copy(of, plan, bytes));
    if (plan.contained) CHECK(has_again);
    if (plan.w_in_boxes) {
      CHECK(of.R * of.S == 1 && of.groups == 1 && of.w_stride_in == 1 && of.w_stride_out % 8 == 0);
      CHECK(bytes == 2 && !plan.copied);
      CHECK(shared_layout(plan).w_ring % 1024 == 0 && plan.w_stage_bytes == 128 * plan.tile_n);
    }
    if (shape >= 0) CHECK(plan.by_tma == (shape == kShapes));
    const Source source = plan.by_tma ? Source::kBoxes : source_of_plan(plan);
    CHECK(bytes == 4 ? source != Source::kAny : shape <= 1 && !plan.in_phases);  // kernels that there are
    if (bytes == 4 && shape >= 0 && !plan.by_tma) CHECK(kTileShapes[shape].sources & bit(source));
    if (plan.lands) {
      check_landing(of, plan, at);
    } else if (plan.by_tma) {
      check_by_tma(of, plan, at.out);
    } else {
      const Addresses own{plan.copied ? 0 : at.in, at.w, at.out};
      check_multiplied(as_planned(of, plan), plan, plan.contained ? 2 : bytes, bytes, own, random);
    }
  }
  return any;
}
