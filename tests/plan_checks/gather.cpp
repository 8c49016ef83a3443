#include "gather.cu"
#include "tma.cu"

using namespace modelnew;
using namespace modelnew::gather;
#include "planner.h"

static int64_t offset_of(const int64_t (&stride)[4], int64_t n, int64_t row, int64_t column) {
  return n * stride[0] + row * stride[2] + column * stride[3];
}

// What is wrong with the numbers of a plan, or nothing. Here and below `of` is what the plan is of, a copy of x where
// it has one, and `bytes` are those of a value that it reads or writes.
static std::string fault_of_numbers(const Phased& of, const Plan& plan, int bytes) {
  const SharedLayout layout = shared_layout(plan);
  const int channels = 16 / bytes;
  const bool planes = plan.planes;
  // Of each block of an SM the system takes 1 KB.
  const int on_sm = blocks_per_sm(plan.warpgroups);
  if (plan.warpgroups < 1 || plan.warpgroups > 3 || on_sm != (plan.warpgroups == 1 ? 2 : 1))
    return "blocks of an SM";
  // What a thread may have is a multiple of 8, and a block starts with all that it gives and takes.
  const auto have_registers = [&](int multiply, int gather) {
    const int start = start_registers(plan.warpgroups), threads = threads_of(plan.warpgroups) * on_sm;
    return start * threads <= 64 << 10 && multiply % 8 == 0 && gather % 8 == 0 && gather >= 24 && multiply < 256 &&
           (plan.warpgroups * multiply + gather) * 128 * on_sm <= start * threads;
  };
  const int w = plan.warpgroups;
  if (!have_registers(Tf32::multiply_registers(w), Tf32::gather_registers(w)) ||
      !have_registers(Contained::multiply_registers(w), Contained::gather_registers(w)) ||
      !have_registers(Again::multiply_registers(w), Again::gather_registers(w)))
    return "registers";
  if (on_sm * (layout.end + 1024) > 228 << 10 || layout.end != plan.smem_bytes) return "shared memory";
  if (plan.x_stage_bytes <= 0 || plan.w_stage_bytes <= 0) return "stages of nothing";
  if (on_sm > 1 && (!plan.points || bytes != 4)) return "two blocks an SM, but not of points in fp32";
  if (tile_pixels(plan) != 64 * plan.warpgroups * plan.blocks_m) return "pixels of a tile";
  if (plan.x_stages < 2 || plan.x_stages > kMaxStages) return "stages of x";
  if (plan.w_stages > kMaxStages || plan.w_stages < (plan.resident ? 1 : 3)) return "stages of weights";
  if (plan.x_stages > kFewStages && (!plan.points || plan.x_stages != plan.w_stages))
    return "many stages of one operand only";
  if (plan.resident && (plan.w_stages != plan.iterations || plan.splits > 1 || of.groups > 1 || !plan.points))
    return "weights that stay, but not all";
  if (plan.resident && plan.blocks < plan.units && plan.blocks % plan.tiles_n != 0)
    return "weights that stay for tiles of other channels";
  if (layout.x_ring % 16 || plan.x_stage_bytes % 16 || layout.w_ring % 16 || plan.w_stage_bytes % 16)
    return "stages that are not aligned";
  if (plan.boxes && (layout.staging % 1024 || kBoxStagingBytes % 1024)) return "staging of boxes";
  if (layout.staging < 4 * kMaxStages * 8) return "room for barriers";
  const int staging = plan.boxes ? 4 * (plan.in_phases ? 1 : 2) * kBoxStagingBytes : kStagingBytes;
  if (layout.table - layout.staging < plan.warpgroups * staging) return "room for staging";
  if (!plan.in_boxes && !plan.in_images && layout.x_ring - layout.table < 2 * ceil_div(plan.slots, 32) * 32 * 4)
    return "room for tables";
  if (layout.w_ring - layout.x_ring != plan.x_stages * plan.x_stage_bytes) return "the size of the x ring";
  if (layout.end - layout.w_ring != plan.w_stages * plan.w_stage_bytes) return "the size of the w ring";
  if (plan.contained && (!plan.copied || !plan.in_boxes || bytes != 2)) return "contained, but not boxes of a copy";
  // Of each image that 64 pixels so many times have some of, wherever they start.
  const int64_t plane = int64_t{of.P} * of.Q;
  const int64_t images = plan.in_images ? 1 + ceil_div(tile_pixels(plan) - 1, plane) : 1;
  const int64_t x_bytes = planes          ? images * plan.pieces * channels * plan.plane_slots * 4
                          : plan.in_boxes ? int64_t{plan.x_boxes} * plan.box_slots * 128
                                          : int64_t{plan.pieces} * plan.piece_slots * 16;
  if (plan.in_boxes) {
    if (layout.x_ring % 1024 || plan.x_stage_bytes != ceil_div(x_bytes, 1024) * 1024 || !plan.rows)
      return "stages of boxes";
    if (plan.x_boxes < 1 || plan.box_slots < 1 || plan.box_slots > 256) return "boxes of x";
    if (plan.box_step < 1 || plan.box_step > 8 || plan.box_slots * plan.box_step > 256) return "steps of boxes";
    if (plan.in_phases ? bytes != 4 || plan.copied || plan.points || plan.dense_slots || plan.box_step != 2
                       : plan.dense_slots && plan.box_step != 1)
      return "boxes of something else";
    // In the order of pieces of a slot the number of the slot in the stage counts, not that in the box.
    if (plan.apart ? plan.x_boxes != 1 || plan.box_slots != plan.slots || plan.dense_slots
        : plan.dense_slots ? plan.box_slots % 8 || int64_t{plan.x_boxes - 1} * plan.box_slots >= plan.slots ||
                               int64_t{plan.x_boxes} * plan.box_slots < plan.slots
                         : plan.box_slots != plan.pitch || int64_t{plan.x_boxes} * plan.pitch != plan.slots)
      return "slots of boxes";
  } else if (plan.dense_slots || plan.in_phases || plan.apart) {
    return "slots as in memory, phases of x or taps apart, but no boxes";
  }
  if (plan.apart != (plan.points && of.R * of.S > 1)) return "points of taps, or none";
  if (plan.apart && (bytes != 4 || plan.contained || on_sm != 1 || of.stride_h != 1 || of.stride_w != 1))
    return "taps of something else";
  if (plan.x_stage_bytes < x_bytes || plan.w_stage_bytes != plan.pieces * plan.tile_n * 16) return "bytes of a stage";
  if (plan.piece_slots < plan.slots || plan.plane_slots < (plan.in_images ? plane : tile_pixels(plan)))
    return "slots of a piece";
  if (plan.in_images && (bytes != 4 || !planes || of.R * of.S != 1 || of.in_channels % 32 || images > 32))
    return "images of something else";
  if (plan.in_images && (plan.plane_slots != plane || plan.image_words != 32 * plane)) return "words of an image";

  if (int64_t{plan.blocks_c} * plan.pieces * channels < of.in_channels) return "channels in no block";
  if (int64_t{plan.blocks_c - 1} * plan.pieces * channels >= of.in_channels) return "a block without channels";
  const int64_t stages = phases_of(of.phases) > 1 ? stages_before(of.phases, plan.blocks_c)
                                                  : int64_t{plan.blocks_c} * of.R * of.S;
  if (plan.iterations != stages) return "stages of weights in all";
  if (plan.tiles_n != ceil_div(of.out_channels, plan.tile_n)) return "tiles of channels";
  if (!plan.points && !plan.packed && plan.tile_p * plan.tile_q > tile_pixels(plan))
    return "more pixels than a tile has";
  if (plan.planes != (bytes == 4 && plan.points && plan.loads != Loads::kChannels)) return "planes";
  if (plan.splits < 1 || plan.splits != ceil_div(plan.blocks_c, plan.split_blocks)) return "parts of the reduction";
  const int64_t cut_up = plan.tiles - plan.whole_tiles;
  const int at_once = on_sm * 132;
  if (plan.whole_tiles % at_once && plan.whole_tiles != plan.tiles) return "whole tiles that do not fill all SMs";
  if (plan.splits > 1 ? cut_up < 1 || cut_up >= at_once : cut_up != 0) return "tiles that are cut up";
  if (plan.units != plan.whole_tiles + cut_up * plan.splits) return "units of work";
  if (plan.splits > 1) {
    if (plan.splits > 8 || plan.blocks % plan.splits) return "a cluster";
    if (cut_up * plan.splits > plan.blocks) return "two parts of a block";
    if (plan.whole_tiles % plan.blocks) return "parts of a tile that are not one cluster's";
    if (shared_layout(plan).x_ring + 4 * tile_pixels(plan) * plan.tile_n > plan.smem_bytes) return "room for sums";
    if (plan.splits > 2 && plan.blocks > 0.88 * at_once) return "clusters that do not run at once";
  }
  if (plan.tiles != int64_t{plan.tiles_m} * plan.tiles_n * of.groups) return "tiles in all";
  if (plan.blocks < 1 || plan.blocks > plan.units || plan.blocks > at_once) return "blocks";
  if (!(plan.cycles > 0)) return "no estimate";
  return "";
}

// What is wrong with the tiles, or nothing: every output is one tile's, in every block of channels.
static std::string fault_of_tiles(const Phased& of, const Plan& plan) {
  const int64_t pixels = of.N * of.P * of.Q;
  std::vector<int> owned(of.groups * plan.tiles_n * pixels);
  std::set<int64_t> parts;
  for (int unit = 0; unit < plan.units; ++unit) {
    const Tile tile = locate_tile(plan, unit);
    if (tile.group < 0 || tile.group >= of.groups || tile.n_block < 0 || tile.n_block >= plan.tiles_n)
      return "a tile outside";
    if (tile.first_block % plan.split_blocks || tile.blocks < 1 || tile.first_block + tile.blocks > plan.blocks_c)
      return "blocks of channels of a tile";
    if (tile.part >= 0) {
      const Tile of_cluster = locate_tile(plan, unit - tile.part % plan.splits);
      if (of_cluster.first != tile.first || of_cluster.q != tile.q || of_cluster.n_block != tile.n_block ||
          of_cluster.group != tile.group)
        return "parts of a tile that are no neighbours";
      if (part_of_tile(plan, tile.part) != tile.part % plan.splits) return "the number of a part in its tile";
    }
    if (tile.part < 0 ? tile.blocks != plan.blocks_c : !parts.insert(tile.part).second) return "the number of a part";
    const int64_t image = first_image(plan, tile);
    for (int m = 0; m < tile_pixels(plan); ++m) {
      int n, p, q;
      if (!locate_output(of, plan, tile, image, m, n, p, q)) continue;
      if (n < 0 || image + n >= of.N || p < 0 || p >= of.P || q < 0 || q >= of.Q) return "an output outside";
      const int64_t pixel = ((image + n) * of.P + p) * of.Q + q;
      owned[(int64_t{tile.group} * plan.tiles_n + tile.n_block) * pixels + pixel] += tile.blocks;
    }
    if (unit == 0 && owned[pixels - 1] == 0) return "the last pixels do not come first";
  }
  if (static_cast<int>(parts.size()) != plan.units - plan.whole_tiles || (!parts.empty() && *parts.begin() != 0))
    return "parts";
  return std::count(owned.begin(), owned.end(), plan.blocks_c) == static_cast<int64_t>(owned.size())
             ? ""
             : "blocks of channels of an output never or twice";
}

// What is wrong with what a tile reads, or nothing: each output at each tap what the convolution says.
static std::string fault_of_reads(const Phased& of, const Plan& plan, const Tile& tile, int bytes, uint64_t in) {
  const SharedLayout layout = shared_layout(plan);
  const int64_t image = first_image(plan, tile);
  const int channels = 16 / bytes, pixels = tile_pixels(plan);
  const bool planes = plan.planes;
  const int64_t plane = int64_t{of.P} * of.Q;
  const auto address = [&](int channel, int64_t offset) {
    const int64_t of_all = int64_t{tile.group} * of.in_channels + channel;
    return in + (image * of.in_stride[0] + of_all * of.in_stride[1] + offset) * bytes;
  };
  std::vector<int> taken(std::max(plan.piece_slots, plan.plane_slots));
  std::vector<int64_t> offsets(pixels, -1);  // of points, in their order; what is outside is -1 here as in the table
  const auto fault_of_offset = [&](int64_t offset) -> std::string {
    if (offset < 0 || offset >= int64_t{1} << 31) return "an offset that is no int";
    if (plan.loads == Loads::kChannels) {
      if (of.in_stride[1] != 1 || of.in_channels % channels) return "pieces that are not channels";
      for (int channel = 0; channel < of.in_channels; channel += channels)
        if (address(channel, offset) % 16) return "pieces that are not aligned";
    }
    return "";
  };
  // A copy has pixel after pixel, all channels of each: boxes go by its strides, and what writes it by these numbers.
  const auto is_pixel = [&](int64_t number, int64_t offset) {
    return image * of.in_stride[0] + offset == number * of.groups * of.in_channels;
  };
  int64_t first_pixel = -1;  // of slot 0, where those of a tile are as in memory
  for (int m = 0; m < pixels; ++m) {
    int n, p, q;
    const bool exists = locate_output(of, plan, tile, image, m, n, p, q);
    const int first = slot_of_output(of, plan, tile, image, m);
    if (plan.dense_slots && exists) {
      const int64_t line = (image + n) * of.H + int64_t{p} * of.stride_h;
      const int64_t pixel = line * of.W + int64_t{q} * of.stride_w;
      if (of.pad_h != 0 || of.pad_w != 0) return "slots as in memory, where no padding is";
      if (first_pixel < 0) first_pixel = pixel - first;
      if (first_pixel < 0 || pixel - first != first_pixel) return "slots that are not as in memory";
    }
    if (plan.in_images) {
      if (!exists) continue;
      // Channel after channel of 32, as they lie in memory, and each image behind the one before it.
      const int64_t word = word_of_point(plan, tile, image, m), before = 32 * int64_t{n} * of.H * of.W;
      for (int channel = 0; channel < of.in_channels; ++channel) {
        const int block = channel / 32, in_block = channel % 32;
        const uint64_t there = address(channel, offset_of(of.in_stride, n, p, q));
        const uint64_t copied = address(32 * block, n * of.in_stride[0]);  // from here on, for a stage
        if (copied % 16) return "copies of images that are not aligned";
        if (there != copied + 4 * (word - before + int64_t{in_block} * of.H * of.W)) return "another word of an image";
      }
      if (4 * (word + 31 * plane) >= plan.x_stage_bytes) return "words behind a stage";
      continue;
    }
    if (plan.points) {
      const int slots = planes ? plan.plane_slots : plan.piece_slots;
      if (first < 0 || first >= slots || taken[first]++) return "slots of points";
      const int64_t h = int64_t{p} * of.stride_h - of.pad_h, w = int64_t{q} * of.stride_w - of.pad_w;
      if (plan.apart) {
        if (first != m) return "slots of taps that are not in the order of outputs";
        for (int tap = 0; exists && tap < of.R * of.S; ++tap) {
          const int64_t row = h + tap / of.S * of.dilation_h, column = w + tap % of.S * of.dilation_w;
          if (row < 0 || row >= of.H || column < 0 || column >= of.W) continue;
          const int64_t offset = offset_of(of.in_stride, n, row, column);
          if (plan.copied && !is_pixel(((image + n) * of.H + row) * of.W + column, offset))
            return "another pixel of the copy";
          if (const std::string fault = fault_of_offset(offset); !fault.empty()) return fault;
        }
        continue;
      }
      if (!exists || (!plan.copied && (h < 0 || h >= of.H || w < 0 || w >= of.W))) continue;
      offsets[m] = offset_of(of.in_stride, n, h, w);
      if (plan.copied && !is_pixel(((image + n) * of.P + p) * of.Q + q, offsets[m])) return "another pixel of the copy";
      if (const std::string fault = fault_of_offset(offsets[m]); !fault.empty()) return fault;
      continue;
    }
    for (int r = 0; r < of.R; ++r)
      for (int s = 0; s < of.S; ++s) {
        const int64_t slot = first + int64_t{r} * of.dilation_h * plan.pitch + int64_t{s} * of.dilation_w;
        if (!exists) {  // it is multiplied all the same
          const int64_t last = layout.x_ring + int64_t{plan.x_stages - 1} * plan.x_stage_bytes;
          const int64_t byte = plan.rows ? slot * 128 + 112 : (int64_t{plan.pieces - 1} * plan.piece_slots + slot) * 16;
          if (slot < 0 || last + byte + 16 > layout.end) return "an address outside shared memory";
          continue;
        }
        if (slot < 0 || slot >= plan.slots) return "a slot outside";
        int in_n, h, w;
        const bool inside = locate_slot(of, plan, tile, image, static_cast<int>(slot), in_n, h, w);
        const int64_t true_h = int64_t{p} * of.stride_h - of.pad_h + int64_t{r} * of.dilation_h;
        const int64_t true_w = int64_t{q} * of.stride_w - of.pad_w + int64_t{s} * of.dilation_w;
        if (inside != (true_h >= 0 && true_h < of.H && true_w >= 0 && true_w < of.W)) return "the edge of an image";
        if (inside && (in_n != n || h != true_h || w != true_w)) return "another place of x";
      }
  }
  for (int slot = 0; slot < plan.slots && !plan.points; ++slot) {
    int n, h, w, row_n, row_h, row_w;
    const bool inside = locate_slot(of, plan, tile, image, slot, n, h, w);
    if (plan.in_boxes && !plan.dense_slots) {
      // Columns of a phase are as far apart as they have to be.
      locate_slot(of, plan, tile, image, slot / plan.pitch * plan.pitch, row_n, row_h, row_w);
      const int step = plan.in_phases ? 1 : plan.box_step;
      if (n != row_n || h != row_h || w != row_w + slot % plan.pitch * step) return "slots of a box that are no row";
    }
    if (!inside) continue;
    if (n < 0 || image + n >= of.N || h < 0 || h >= of.H || w < 0 || w >= of.W) return "x outside";
    if (plan.dense_slots && ((image + n) * of.H + h) * of.W + w != first_pixel + slot)
      return "another pixel than memory has in this place";
    const int64_t offset = offset_of(of.in_stride, n, h, w);
    if (plan.copied && !is_pixel(((image + n) * of.H + h) * of.W + w, offset)) return "another pixel of the copy";
    if (const std::string fault = fault_of_offset(offset); !fault.empty()) return fault;
  }
  if (plan.loads != Loads::kPixels) return "";
  if (!plan.points) return "fours of pixels in windows";
  for (int m = 0; m < pixels; m += 4)
    for (int j = 0; j < 4; ++j) {
      if (offsets[m + j] != (offsets[m] < 0 ? -1 : offsets[m] + j)) return "fours of pixels that are no neighbours";
      for (int channel = 0; channel < of.in_channels && offsets[m] >= 0; ++channel)
        if (address(channel, offsets[m]) % (4 * bytes)) return "fours of pixels that are not aligned";
    }
  return "";
}

// What is wrong with what a tile writes, or nothing.
static std::string fault_of_writes(const Phased& of, const Plan& plan, const Tile& tile, int bytes, uint64_t out) {
  const int64_t image = first_image(plan, tile);
  const int first_k = tile.n_block * plan.tile_n, channels = std::min(plan.tile_n, of.out_channels - first_k);
  const int64_t channel_of_all = int64_t{tile.group} * of.out_channels + first_k;
  std::vector<int64_t> offsets(tile_pixels(plan), -1);
  for (int m = 0; m < tile_pixels(plan); ++m) {
    int n, p, q;
    if (!locate_output(of, plan, tile, image, m, n, p, q)) continue;
    offsets[m] = offset_of(of.out_stride, n, p, q);
    if (offsets[m] < 0 || offsets[m] >= int64_t{1} << 31) return "an offset that is no int";
    const int64_t number = first_output(plan, tile) + m, plane = int64_t{of.P} * of.Q;
    const int64_t expected = plan.out_channels_last
                                 ? number * of.out_stride[3]
                                 : number / plane * of.out_stride[0] + number % plane * of.out_stride[3];
    if (plan.boxes && (plan.points || plan.packed) && expected != image * of.out_stride[0] + offsets[m])
      return "boxes of pixels that do not follow one another";
  }
  // Of lines a box has 16 outputs of a row, or none.
  const int64_t step = plan.out_channels_last ? of.out_stride[3] : 1;
  for (int m = 0; m < tile_pixels(plan) && plan.boxes && !plan.points && !plan.packed; ++m)
    if (offsets[m] != (offsets[m / 16 * 16] < 0 ? -1 : offsets[m / 16 * 16] + m % 16 * step))
      return "boxes of pixels of several rows";
  if (plan.boxes) {
    if (bytes != 4 || out % 16) return "boxes of other tensors";
    if (plan.out_channels_last) {
      if (channel_of_all % 4) return "boxes of channels that are not aligned";
      if (of.N * of.P * of.Q > 1 && of.out_stride[3] % 4) return "boxes of pixels that are not aligned";
    } else {
      if (of.out_stride[3] != 1 || of.P * of.Q % 4) return "boxes of pixels that are no neighbours";
      if (of.P * of.Q < 16) return "boxes of three images";
      if (of.out_stride[1] % 4 || (of.N > 1 && of.out_stride[0] % 4)) return "boxes of planes that are not aligned";
      for (int m = 0; m < tile_pixels(plan); m += 4)
        if (offsets[m] >= 0 && (image * of.out_stride[0] + offsets[m]) % 4) return "boxes that start between fours";
    }
    if (of.groups > 1 && channels % kStagedChannels) return "boxes that reach into the next group";
  }
  if (plan.out_channels_last && of.out_stride[1] != 1) return "channels that are no neighbours";
  if (plan.vector != 4) return plan.vector == 1 ? "" : "neither fours nor single values";
  if (plan.out_channels_last && channels % 4) return "fours of channels that do not exist";
  for (int m = 0; m < tile_pixels(plan); ++m) {
    if (!plan.out_channels_last && offsets[m] != (offsets[m / 4 * 4] < 0 ? -1 : offsets[m / 4 * 4] + m % 4))
      return "fours of pixels of y that are no neighbours";
    if (offsets[m] < 0 || (m % 4 && !plan.out_channels_last)) continue;
    for (int k = 0; k < channels; k += plan.out_channels_last ? 4 : 1) {
      const int64_t offset = image * of.out_stride[0] + (channel_of_all + k) * of.out_stride[1] + offsets[m];
      if ((out + offset * bytes) % (4 * bytes)) return "fours of y that are not aligned";
    }
  }
  return "";
}

// All of it: every tile, and of a few at random what they read and write.
static std::string fault_of_plan(const Phased& of, const Plan& plan, int in_bytes, int out_bytes, uint64_t in,
                                 uint64_t out, std::mt19937& shuffler) {
  std::string fault = fault_of_numbers(of, plan, in_bytes);
  if (fault.empty()) fault = fault_of_tiles(of, plan);
  for (int i = 0; i < 4 && fault.empty(); ++i) {
    const int units = plan.units;
    const Tile tile = locate_tile(plan, i == 0 ? 0 : i == 1 ? units - 1 : static_cast<int>(shuffler() % units));
    fault = fault_of_reads(of, plan, tile, in_bytes, in);
    if (fault.empty()) fault = fault_of_writes(of, plan, tile, out_bytes, out);
  }
  return fault;
}

// Tiles of what lands, as their kernels have them.
struct LandingNumbers {
  int tile_n, rows, columns, stride;
  int pitch, product_slots;        // of a row, of both products
  int landed_rows, plane_columns;  // of all boxes of a window; 0 columns: no planes
  int pixel_columns;               // in channels_last; 0: not there
  int staged_rows;                 // at a time
};
constexpr LandingNumbers kLandingNumbers[] = {
    {64, 7, 32, 1, 34, 240, 16, 40, 34, 7},  {64, 8, 32, 1, 34, 272, 18, 40, 34, 8},
    {128, 7, 32, 1, 34, 240, 9, 40, 34, 7},  {128, 8, 32, 1, 34, 272, 10, 40, 34, 8},
    {128, 7, 28, 1, 30, 208, 9, 36, 30, 7},  {128, 14, 14, 1, 16, 224, 16, 0, 16, 14},
    {128, 7, 28, 2, 30, 208, 16, 56, 0, 4},  {128, 14, 14, 2, 16, 224, 32, 28, 0, 4},
    {128, 7, 14, 2, 16, 112, 16, 28, 0, 4},
};
static_assert(std::size(kTileShapes) == 12 + std::size(kLandingNumbers) + 3, "all tiles of what lands");

// What is wrong with the shared memory of what lands, or nothing.
static std::string fault_of_landing_layout(const Phased& of, const Plan& plan, const LandingNumbers& tile) {
  const Landing& landing = plan.landing;
  const LandingLayout layout = landing_layout(plan);
  const bool shares = tile.tile_n == 128, channels_last = landing.shape.channels_last;
  const auto up = [](int bytes) { return (bytes + 511) / 512 * 512; };  // where the order of pieces starts anew
  if (layout.end != plan.smem_bytes || layout.end > 232448) return "shared memory";
  if (layout.staging < 56 * 8 || layout.staging % 1024) return "room for barriers";
  const int staged_bytes = channels_last ? up(64 * tile.columns * tile.staged_rows) : 16 * 128 * tile.staged_rows;
  if (layout.landed - layout.staging != 4 * staged_bytes) return "staging";
  const int landed_bytes = channels_last ? 64 * tile.pixel_columns * tile.landed_rows
                                         : 8 * tile.plane_columns * tile.landed_rows * 4;
  if (landed_bytes == 0) return "no kernel of this layout";
  if (layout.landed % 512 || landing.stage_bytes % 128) return "landed boxes";
  if (landing.stage_bytes != (channels_last ? up(landed_bytes) : landed_bytes)) return "landed boxes";
  if (layout.x_ring - layout.landed != landing.stages * landing.stage_bytes) return "the ring of landed boxes";
  if (layout.x_ring % 16 || plan.x_stage_bytes != 2 * 16 * landing.slots) return "windows";
  if (layout.w_ring - layout.x_ring != plan.x_stages * plan.x_stage_bytes) return "the ring of windows";
  // Of a step, or of a row of taps of it.
  if (landing.w_stages_of_step != (shares ? 3 : 1)) return "stages of weights of a step";
  if (layout.w_ring % 16 || plan.w_stage_bytes != (shares ? 1 : of.R) * 3 * 2 * 16 * tile.tile_n) return "weights";
  if (layout.end - layout.w_ring != plan.w_stages * plan.w_stage_bytes) return "the ring of weights";
  if (landing.stages < 2 || landing.stages > 4 || plan.x_stages < 2 || plan.x_stages > 4) return "stages";
  return plan.w_stages < (shares ? 3 : 2) || plan.w_stages > (shares ? 6 : 4) ? "stages of weights" : "";
}

// What is wrong with a plan by which x is contained on its way, or nothing: all of it.
static std::string fault_of_landing(const Phased& of, const Plan& plan, uint64_t in, uint64_t out) {
  const Landing& landing = plan.landing;
  const LandingShape& shape = landing.shape;
  const bool channels_last = shape.channels_last;
  const auto numbers = std::find_if(std::begin(kLandingNumbers), std::end(kLandingNumbers), [&](const auto& one) {
    return one.tile_n == plan.tile_n && one.rows == plan.blocks_m && one.columns == plan.tile_q &&
           one.stride == of.stride_h;
  });
  if (numbers == std::end(kLandingNumbers)) return "no kernel of such a tile";
  const auto [tile_n, rows, columns, stride, pitch, product_slots, landed_rows, plane_columns, pixel_columns,
              staged_rows] = *numbers;
  const bool whole_rows = stride == 2;
  if (shape.tile_n != tile_n || shape.rows != rows || shape.columns != columns || shape.stride != stride)
    return "another kernel";
  if (shape.shares() != (tile_n == 128)) return "channels of a tile";
  if (shape.shares() && of.R != 3) return "rows of a filter that the kernel does not know";
  const int warpgroups = shape.shares() ? 1 : 2;
  if (!plan.contained || plan.copied || plan.in_boxes || plan.in_phases || of.groups != 1) return "another plan";
  if (of.S != 3 || of.stride_w != stride || of.dilation_h * of.dilation_w != 1) return "another filter";
  if (std::string fault = fault_of_landing_layout(of, plan, *numbers); !fault.empty()) return fault;
  if (landing.steps * 16 < of.in_channels || (landing.steps - 1) * 16 >= of.in_channels) return "steps";
  if (plan.iterations != ceil_div(of.in_channels, 16) * of.R * of.S) return "stages of weights in all";
  if (plan.tiles_n != ceil_div(of.out_channels, plan.tile_n) || plan.pieces != 2) return "packed weights";
  if (plan.units != plan.tiles || plan.blocks != std::min(132, plan.units)) return "units of work";
  // What is side by side, by fours, and the others by fours of these.
  const auto in_fours = [&](const int64_t (&stride)[4], int channels, int rows, int columns) {
    const int64_t sizes[4] = {of.N, channels, rows, columns};
    const int side_by_side = channels_last ? 1 : 3;
    bool are = stride[side_by_side] == 1 && sizes[side_by_side] % 4 == 0;
    for (int i = 0; i < 4; ++i) are &= i == side_by_side || sizes[i] == 1 || stride[i] % 4 == 0;
    return are;
  };
  if (in % 16 || !in_fours(of.in_stride, of.in_channels, of.H, of.W)) return "boxes of x that are not aligned";
  // Rows of 14 columns of a plane are no sixteens of bytes.
  if (plan.boxes != (channels_last || columns > 14)) return "boxes of y, or none";
  if (plan.boxes && (out % 16 || !in_fours(of.out_stride, of.out_channels, of.P, of.Q)))
    return "boxes of y that are not aligned";
  if (of.N * of.H * of.W * ceil_div(of.in_channels, 8) * 8 >= int64_t{1} << 31) return "places that are no ints";
  if (warpgroups * landing.rows != landing.span || landing.rows > rows) return "rows of a tile";
  if (shape.staged_rows() != staged_rows || landing.rows > 4 * staged_rows) return "rows that are never staged";
  // Staged rows of planes are of 32 columns, whose rest would be another tile's.
  if (!channels_last && columns < 32 && plan.tiles_q != 1) return "boxes of y that overlap";
  const int window_rows = stride * (landing.span - 1) + of.R, window_columns = stride * (columns - 1) + 3;
  if (landing.window_rows != window_rows || window_rows > landed_rows) return "rows of a window";
  // Boxes of whole rows, of which four are one, have all columns of x and nothing else.
  if (whole_rows && (of.W != plane_columns || of.pad_w != 1 || of.W + of.pad_w > window_columns))
    return "rows that are not those of a box";
  if (whole_rows && of.H > 1 && of.in_stride[2] != of.W) return "rows that do not follow one another";
  if (shape.box_rows() != (whole_rows ? 4 : landed_rows) || shape.boxes() != (whole_rows ? landed_rows / 4 : 1) ||
      (whole_rows && shape.box_bytes() != 8 * 4 * plane_columns * 4))
    return "boxes of rows";
  if (!whole_rows && landing.lead + window_columns > (channels_last ? pixel_columns : plane_columns))
    return "columns that do not land";
  // What slots hold of a window: its rows and columns, each of them once.
  std::vector<std::pair<int, int>> held(landing.slots, {-1, -1});
  for (int row = 0; row < window_rows; ++row)
    for (int column = 0; column < window_columns; ++column) {
      const int slot = shape.slot_of(row, column);
      if (slot < 0 || slot >= landing.slots || held[slot].first >= 0) return "a slot outside the window, or of two";
      held[slot] = {row, column};
    }
  // Of phases neighbouring columns are stored at once.
  if (whole_rows && std::abs(shape.slot_of(0, 1) - shape.slot_of(0, 0)) % 8 != 4) return "banks of two phases";
  for (int r = 0; r < of.R; ++r)
    for (int s = 0; s < of.S; ++s)
      if ((landing.span - landing.rows) * pitch + shape.slot_of(r, s) + product_slots > landing.slots)
        return "slots behind the window";
  std::vector<int> owned(of.N * of.P * of.Q * plan.tiles_n), listed(of.N * of.H * of.W), read(of.N * of.H * of.W);
  for (int unit = 0; unit < plan.units; ++unit) {
    const LandingTile tile = locate_landing(plan, unit);
    if (tile.n < 0 || tile.n >= of.N || tile.n_block < 0 || tile.n_block >= plan.tiles_n) return "a tile outside";
    if (channels_last || whole_rows ? landing.lead != 0 : (tile.q - of.pad_w - landing.lead) % 4 || landing.lead < 0)
      return "a box that starts between fours";
    if (whole_rows ? tile.q != 0 : tile.q % 4 && !channels_last) return "a box of y that starts between fours";
    const int first_h = tile.p * stride - of.pad_h, first_w = tile.q * stride - of.pad_w;
    const auto place = [&](int h, int w) { return (static_cast<int64_t>(tile.n) * of.H + h) * of.W + w; };
    for (int row = 0; row < landing.span; ++row)
      for (int column = 0; column < columns; ++column) {
        const int p = tile.p + row, q = tile.q + column;
        if (p >= of.P || q >= of.Q) continue;
        const int own_row = row % landing.rows, m = own_row * pitch + column;
        if (m >= product_slots || column >= pitch) return "an output that is no row of the product";
        ++owned[((int64_t{tile.n} * of.P + p) * of.Q + q) * plan.tiles_n + tile.n_block];
        for (int r = 0; r < of.R; ++r)
          for (int s = 0; s < of.S; ++s) {
            const int slot = (row - own_row) * pitch + shape.slot_of(r, s) + m;
            if (slot >= landing.slots || held[slot].first < 0) return "a tap outside the window";
            const int h = first_h + held[slot].first, w = first_w + held[slot].second;
            if (h != p * stride - of.pad_h + r || w != q * stride - of.pad_w + s) return "another place of x";
            if (h >= 0 && h < of.H && w >= 0 && w < of.W) read[place(h, w)] = 1;
          }
      }
    for (int row = 0; row < window_rows; ++row)
      for (int column = 0; column < window_columns; ++column) {
        const int h = first_h + row, w = first_w + column;
        if (h < 0 || h >= of.H || w < 0 || w >= of.W) continue;
        listed[place(h, w)] += lists(of, plan, tile, row, column);
      }
  }
  if (!once_each(owned)) return "an output never or twice";
  for (size_t i = 0; i < listed.size(); ++i)
    if (listed[i] > 1 || listed[i] < read[i]) return "a value that is listed never or twice";
  return plan.cycles > 0 ? "" : "no estimate";
}

// Of the workspace with parts of at least so many bytes: what is wrong, or nothing.
static std::string fault_of_layout(const WorkspaceLayout& layout, const Plan& plan, int64_t rows, int64_t packed_bytes,
                                   int64_t packed_again_bytes, int64_t copied_bytes) {
  if ((layout.samples | layout.list | layout.w_factors | layout.packed | layout.packed_again | layout.copied) % 16)
    return "parts of the workspace that are not aligned";
  if (layout.packed_again - layout.packed < packed_bytes) return "room for weights";
  if (layout.end - layout.copied < copied_bytes) return "room for the copy of x";
  const int64_t more = 7 * 128 + sizeof(ContainedControl) + 4 * kSampleBlocks + kMostListed * sizeof(Listed) + 4 * rows;
  if (layout.end > packed_bytes + packed_again_bytes + copied_bytes + more) return "room for what no kernel uses";
  if (!plan.contained) return "";
  if (layout.samples < static_cast<int64_t>(sizeof(ContainedControl))) return "room for what kernels tell each other";
  if (layout.list - layout.samples < 4 * kSampleBlocks) return "room for samples";
  if (layout.w_factors - layout.list < static_cast<int64_t>(kMostListed * sizeof(Listed))) return "room for the list";
  if (layout.packed - layout.w_factors < 4 * rows) return "room for factors";
  return layout.copied - layout.packed_again < packed_again_bytes ? "room for weights packed again" : "";
}

// What is wrong with phases along one axis, or nothing: each tap of the filter is one of a phase's, which reads from
// its rows what the filter read. They are those of a copy, or (H > 0) of that many rows of x itself.
static std::string fault_of_axis(int R, int stride, int pad, int P, int H, int phases, const int (&first)[2],
                                 const int (&taps)[2], int own_R, int own_H, int own_pad) {
  if (phases != 2 || stride != 1) return "the number of phases";
  // Row p * 2 - pad + r of x is row `(r - pad) >> 1` behind p of phase `(r - pad) & 1`; a copy starts at p == 0.
  const int start = -pad >> 1;
  int seen_taps = 0;
  for (int phase = 0; phase < 2; ++phase) {
    if (taps[phase] < 1 || first[phase] < 0 || first[phase] + taps[phase] > own_R) return "taps of a phase";
    for (int i = 0; i < taps[phase]; ++i, ++seen_taps) {
      const int r = 2 * (start + first[phase] + i) + phase + pad;
      if (r < 0 || r >= R) return "a tap that the filter has not";
    }
  }
  if (seen_taps != R) return "taps in no phase";
  if (own_R != ((R - 1 - pad) >> 1) - start + 1) return "the size of a filter by phases";
  if (H > 0) return 2 * own_H - H != H % 2 ? "pairs of rows" : own_pad != -start ? "the padding of phases" : "";
  return own_H == P + own_R - 1 && own_pad == 0 ? "" : "the size of a copy in phases";
}

// Of a copy, or of phases of x itself: blocks have so many channels.
static std::string fault_of_phases(const Phased& of, const Phased& own, int block, int blocks_c) {
  const Phases& phases = own.phases;
  const bool wanted = of.stride_h == 2 && of.stride_w == 2 && of.R > 1 && of.S > 1 && of.dilation_h == 1 &&
                      of.dilation_w == 1, from_x = block == 32;
  if ((phases_of(phases) > 1) != wanted) return "phases, or none";
  if (!wanted) return "";
  std::string fault = fault_of_axis(of.R, own.stride_h, of.pad_h, of.P, from_x ? of.H : 0, phases.rows,
                                    phases.first_r, phases.r, own.R, own.H, own.pad_h);
  if (fault.empty())
    fault = fault_of_axis(of.S, own.stride_w, of.pad_w, of.Q, from_x ? of.W : 0, phases.columns, phases.first_s,
                          phases.s, own.S, own.W, own.pad_w);
  if (!fault.empty()) return fault;
  if (own.in_channels != 4 * ceil_div(of.in_channels, block) * block || blocks_c % 4) return "channels of phases";
  if (from_x && !std::equal(own.in_stride, own.in_stride + 4, of.in_stride)) return "strides of another tensor";
  if (stages_before(phases, 0) != 0) return "stages before the first one";
  for (int block = 0; block < blocks_c; ++block)
    if (stages_before(phases, block + 1) - stages_before(phases, block) !=
        phases.r[block % 4 / 2] * phases.s[block % 2])
      return "stages of a block";
  return stages_before(phases, blocks_c) == blocks_c / 4 * of.R * of.S ? "" : "stages of all blocks";
}

// Groups as they are multiplied: several as one, of 64 channels, where there are so many.
static std::string fault_of_groups(const Phased& of, const Phased& own) {
  const int several = of.groups > 1 && 64 % of.in_channels == 0 ? 64 / of.in_channels : 1;
  if (own.merged != (of.groups % several == 0 ? several : 1)) return "groups as one";
  const bool all = own.groups * own.merged == of.groups && own.in_channels == own.merged * of.in_channels &&
                   own.out_channels == own.merged * of.out_channels;
  return all ? "" : "channels of groups as one";
}

// What is wrong with what tma is to multiply, or nothing.
static std::string fault_of_tma(const Phased& of, const Plan& plan, uint64_t out) {
  const Phased copy = copied(of, true, true);
  if (!plan.contained || !plan.copied || plan.lands || plan.splits != 1 || !(plan.cycles > 0)) return "another plan";
  if (phases_of(copy.phases) != 1) return "a copy in phases";
  if (copy.in_channels % 8 || copy.in_channels < merged(of).in_channels) return "channels of the copy";
  const tma::Planned planned = tma::plan_contained(copy, 132, out);
  if (!planned.found || !planned.plan.contained) return "no plan of tma's";
  const int taps = copy.R * copy.S, pieces = copy.in_channels / 8, channels = copy.groups * copy.out_channels;
  const int64_t rows = packed_rows(copy, plan.tile_n);
  if (rows < channels || rows % kMostRowsOfBlock) return "rows of weights";
  if (plan.iterations * plan.pieces != taps * pieces || tma::packed_row_channels(planned.of) != copy.in_channels)
    return "a row of weights";
  return "";
}

static void note(const Phased& of, const Plan& plan) {
  if (plan.by_tma) {
    seen.insert(std::string("contained, by tma") + (of.in_channels % 8 ? ", channels filled up" : ""));
    if (of.groups > 1) seen.insert(merged(of).merged > 1 ? "by tma, groups as one" : "by tma, groups");
    if (has_phases(of)) seen.insert("by tma, a stride");
    return;
  }
  const char* const loads[] = {"single", "pixels", "channels"};
  const std::string kind = plan.points ? "points" : "windows";
  seen.insert(kind + ", x by " + (plan.in_images ? "images" : loads[static_cast<int>(plan.loads)]));
  seen.insert(kind + (plan.out_channels_last ? ", channels of y by " : ", pixels of y by ") +
              (plan.boxes ? "boxes" : plan.vector == 4 ? "fours" : "one"));
  const char* const parts = plan.whole_tiles > 0 ? ", some tiles in parts" : ", all tiles in parts";
  if (plan.splits > 1) seen.insert(kind + parts);
  if (plan.warpgroups == 3) {
    const char* const small = plan.in_boxes ? ", 64 channels by boxes" : ", 64 channels by fours";
    const char* const how = plan.contained ? ", contained" : plan.tile_n == 64 ? small : "";
    seen.insert(kind + ", three warpgroups" + how + (plan.splits > 1 ? ", tiles in parts" : ""));
  }
  if (plan.warpgroups == 1) {
    seen.insert("two blocks an SM, tiles of " + std::to_string(tile_pixels(plan)) + " pixels by " +
                (plan.in_boxes ? "boxes" : "fours") + (plan.copied ? " of a copy" : ""));
    if (plan.splits > 1) seen.insert(std::string("two blocks an SM") + parts);
  }
  if (plan.lands) {
    const char* const layout = plan.landing.shape.channels_last ? ", channels_last" : "";
    const char* const what = plan.landing.shape.shares() ? "pixels" : "channels";
    seen.insert(std::string("contained on its way, shared ") + what + layout);
    seen.insert("contained on its way, " + std::to_string(plan.blocks_m) + " rows at most of " +
                std::to_string(plan.tile_q) + " columns" + (of.stride_h == 2 ? ", stride 2" : layout));
    if (of.in_channels % 16) seen.insert("contained on its way, channels filled up");
    if (of.P % plan.landing.span) seen.insert("contained on its way, rows that are not there");
    if (of.Q % plan.tile_q) seen.insert("contained on its way, columns that are not there");
    if (of.stride_h == 2) seen.insert(std::string("contained on its way, staged ") +
                                      (plan.landing.rows > 4 ? "twice" : "at once"));
    return;
  }
  if (plan.contained) {
    seen.insert(kind + ", contained" + (of.in_channels % 8 ? ", channels filled up" : ""));
    if (of.groups > 1) seen.insert(merged(of).merged > 1 ? "contained, groups as one" : "contained, groups");
    if (plan.splits > 1) seen.insert(kind + ", contained, tiles in parts");
    if (phases_of(copied(of).phases) > 1) {
      const char* const by = !plan.dense_slots ? ", by rows" : plan.x_boxes > 1 ? ", by boxes" : ", by a box";
      seen.insert("phases of " + kind + (plan.points ? "" : by));
      if (plan.splits > 1) seen.insert("phases of " + kind + ", tiles in parts");
    }
  } else if (plan.apart) {
    seen.insert(std::string("taps apart") + (plan.copied ? ", x copied" : ""));
    if (plan.splits > 1) seen.insert(std::string("taps apart") + parts);
    if (of.groups > 1) seen.insert("taps apart, groups");
  } else if (plan.copied) {
    seen.insert("x copied");
  } else if (plan.in_phases) {
    const std::string filled = of.in_channels % 32 ? ", channels filled up" : "";
    seen.insert("phases of x" + (plan.splits > 1 ? ", tiles in parts" : filled));
    if (of.R == 2 && of.S == 2 && of.pad_h % 2 == 0 && of.pad_w % 2 == 0) seen.insert("phases of x, of one tap");
  } else if (plan.in_boxes && !plan.points) {
    if (of.R * of.S == 1) seen.insert(plan.box_step > 1 ? "1x1 by rows at a stride" : "1x1 by rows");
  }
  if (plan.w_in_boxes) seen.insert("weights by boxes");
  if (plan.points) return;
  seen.insert(plan.packed ? "packed lines" : plan.tile_q < of.Q ? "a part of a line" : "whole lines");
  if (plan.tile_p > of.P) seen.insert(plan.gap < 0 ? "several images with less than no gap" : "several images");
}

extern "C" {
int gather_divide(int number, int by) { return quotient(number, make_divisor(by)); }
double plan_cycles(int op, const int64_t* fields, uint64_t in, uint64_t, uint64_t out) {
  const Problem problem = make_problem(fields);
  Plan plan{};
  const Phased of = phased_of(problem, as_operator(op));
  return make_plan(of, element_bytes(problem.dtype), Device{132}, Alignment{in, out}, -1, plan) ? plan.cycles : 0;
}
// Plans every shape of a tile and the best one for tensors at these addresses: null if there is none, else what is
// wrong, or "".
const char* plan_fault(int op, const int64_t* fields, uint64_t in, uint64_t, uint64_t out, int seed) {
  std::string fault;
  std::mt19937 shuffler(seed);
  const Problem problem = make_problem(fields);
  const Phased of = phased_of(problem, as_operator(op));
  const int bytes = element_bytes(problem.dtype);
  bool any = false, checked_again = false;
  Plan again{};
  const bool has_again = bytes == 4 && plan_again(of, Device{132}, Alignment{in, out}, again);
  constexpr int kShapes = static_cast<int>(std::size(kTileShapes));  // and, behind them, what tma multiplies
  for (int shape = -1; shape <= kShapes; ++shape) {
    Plan plan{};
    const int splits = shape >= 0 && shape < kShapes && shuffler() % 4 == 0 ? 2 : 0;  // else as many as it likes
    if (!make_plan(of, bytes, Device{132}, Alignment{in, out}, shape, plan, splits)) {
      // Windows may be too large for shared memory; points are not.
      const bool copies = shape >= 0 && shape < kShapes && kTileShapes[shape].contained && !kTileShapes[shape].lands;
      const bool may = copies && may_contain(of, bytes) && has_again;
      if (may && of.R * of.S == 1 && splits == 0) return "points that are not contained";
      continue;
    }
    any = true;
    note(of, plan);
    const Phased grouped = plan.contained ? merged(of) : of;
    const auto packed = [](const Phased& groups, const Plan& all) {
      return int64_t{groups.groups} * all.tiles_n * all.iterations * all.pieces * all.tile_n * 16;
    };
    const int64_t pixels = of.N * (of.R * of.S == 1 ? int64_t{of.P} * of.Q : int64_t{of.H} * of.W);
    const bool phased = plan.contained && !plan.lands && !plan.by_tma && phases_of(copied(of).phases) > 1;
    // Pairs of rows or columns, from that of the first tap of the first output to that of the last one's last tap.
    const auto pairs = [](int outputs, int taps, int pad) {
      return ((2 * (outputs - 1) + taps - 1 - pad) >> 1) - (-pad >> 1) + 1;
    };
    const int64_t fours = of.N * pairs(of.P, of.R, of.pad_h) * pairs(of.Q, of.S, of.pad_w);
    const int64_t copied_x = plan.lands       ? 0
                             : phased         ? fours * 4 * grouped.groups * ceil_div(grouped.in_channels, 64) * 128
                             : plan.contained ? pixels * grouped.groups * ceil_div(grouped.in_channels, 8) * 16
                             : plan.copied  ? pixels * of.groups * of.in_channels * bytes
                                            : 0;
    const int64_t rows = packed_rows(grouped, plan.tile_n), packed_again = plan.contained ? packed(of, again) : 0;
    const WorkspaceLayout layout = workspace_layout(of, plan, again, bytes);
    fault = fault_of_layout(layout, plan, rows, packed(grouped, plan), packed_again, copied_x);
    if (plan.contained && fault.empty()) fault = fault_of_groups(of, grouped);
    if (plan.contained && contained_bytes(of, plan.by_tma) < copied_x) fault = "bytes of the copy";
    if (plan.contained && !plan.lands && !plan.by_tma && fault.empty())
      fault = fault_of_phases(grouped, copied(of), 64, plan.blocks_c);
    if (plan.lands && (phases_of(numbered(of).phases) != 1 || numbered(of).H != of.H || numbered(of).W != of.W ||
                       numbered(of).in_channels != ceil_div(of.in_channels, 8) * 8))
      fault = "places of values that are listed";
    if (plan.in_phases && fault.empty()) fault = fault_of_phases(of, in_phases(of), 32, plan.blocks_c);
    if (plan.w_in_boxes) {
      const bool one_tap = of.R * of.S == 1 && of.groups == 1 && of.w_stride_in == 1 && of.w_stride_out % 8 == 0;
      if (!one_tap || bytes != 2 || plan.copied) fault = "boxes of other weights";
      if (shared_layout(plan).w_ring % 1024 || plan.w_stage_bytes != 128 * plan.tile_n) fault = "boxes of weights";
    }
    if (plan.in_phases && (of.groups != 1 || of.flipped || of.in_channels % 4 || of.in_stride[1] != 1))
      fault = "phases of another tensor";
    const Source source = plan.by_tma ? Source::kBoxes : source_of_plan(plan);
    if (bytes == 4 ? source == Source::kAny : shape > 1 || plan.in_phases) fault = "no such kernel";
    if (plan.by_tma != (shape == kShapes) && shape >= 0) fault = "by tma, or not";
    if (bytes == 4 && shape >= 0 && !plan.by_tma && !(kTileShapes[shape].sources & bit(source)))
      fault = "no kernel of this shape";
    const bool between_groups = of.groups != 1 && grouped.in_channels % 64 != 0;
    if (plan.contained && (bytes != 4 || between_groups)) fault = "operands that are not to be contained";
    if (plan.contained && !checked_again && fault.empty()) {
      checked_again = true;
      fault = has_again ? fault_of_plan(of, again, bytes, bytes, in, out, shuffler) : "nothing to do all again";
      if (again.splits != 1 || again.copied) fault = "parts, or a copy, of what is done again";
      // The list in order, and for each warp which of it an output reads.
      const size_t to_mend = kMostListed * (sizeof(Listed) + kThreads / 32);
      if (kBarrierBytes + to_mend > static_cast<size_t>(again.smem_bytes)) fault = "room to mend";
    }
    if (fault.empty() && plan.lands) {
      fault = fault_of_landing(of, plan, in, out);
    } else if (fault.empty() && plan.by_tma) {
      fault = fault_of_tma(of, plan, out);
    } else if (fault.empty()) {
      const Phased own = plan.copied ? copied(of, plan.contained) : plan.in_phases ? in_phases(of) : of;
      fault = fault_of_plan(own, plan, plan.contained ? 2 : bytes, bytes, plan.copied ? 0 : in, out, shuffler);
    }
    if (!fault.empty()) return told(fault, "shape " + std::to_string(shape) + " of a tile");
  }
  return any ? "" : nullptr;
}
}
