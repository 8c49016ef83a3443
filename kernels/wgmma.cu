// wgmma engine: implicit GEMM on Hopper's tensor cores, stride 1. Deterministic: one sum an output, in one order.
//
//   pack_operands   w -> the bytes that shared memory wants, in the order in which the main kernel takes them
//   wgmma_kernel    y from x (fprop) and dx from dy (dgrad)
//
// GEMM view: rows = output channels, columns = output pixels, reduction = (channel block, r, s, channel). No im2col:
// the pixels of a tile with its halo lie in shared memory in pieces of 16 bytes (8 channels of 16 bits or 4 of fp32),
//
//   row of x:  [piece][pixel] x 16 bytes            w:   [step][2 pieces][64 channels] x 16 bytes
//
// and a filter tap (r, s) reads them from a row further down and s*dilation_w pixels further on: wgmma takes rows of an
// operand that are 16 bytes apart, so a tap is a shift of its start address. No bank conflicts, no swizzle.
//
// One block an SM, for the life of the launch, 12 or 16 warps in three roles:
//
//   8 warps      two warpgroups multiply: each 64 channels x 256 pixels in 128 registers a thread, then store them
//   or 12        three, in turn, 64 channels x 128 pixels in 64 registers: where weights stay for good
//   3 warps      convert: x from memory in pairs of pixels, rounded (TF32), transposed into the pieces of a row; pixels
//                of the padding and channels that are not there become 0. They also work out the tiles
//   1 warp       one thread orders bulk copies of packed weights; where these stay for good it converts as well
//
//   memory --convert--> x ring --+
//                                +--> wgmma --> registers --> staging --> memory
//   packed --bulk copy-> w ring -+
//
// Rings are handed over by mbarriers. The warpgroups take turns: one multiplies a block of channels, alone and at the
// full rate of the tensor cores, while the others store theirs. Weights that fit as a whole stay in shared memory.
//
// The x ring has rows of the image, so a block that walks down a column of tiles converts every row once (`down`). It
// needs all channels of all rows of its window at once. Otherwise it walks along the rows of y:
//
// Stores: memory wants whole sectors of 32 bytes (H200: 3.69 TB/s for 512 bytes a warp from a sector boundary on, 3.0
// from half a sector on, 1.0 from accumulators straight to memory). Rows of y start anywhere, each channel at an
// alignment of its own. Hence a block walks along a row, and from row to row, through a run of tiles that lie one after
// another in memory (a unit), stores whole sectors only and carries the unfinished one of every channel over to the
// next tile, in shared memory; just the ends of a run are stored by smaller pieces. Downwards every tile is alone and
// its ends are shared with its neighbours.
//
// NOT YET RUN ON A GPU: three warpgroups, records of tiles, whole sectors with 16 bits, batches that skip a half. All
// times below are of revisions before.
//
// Where the time goes: ms, median of 9 calls in a row, H200, 2026-11-20 (bench.py, with a cold cache, reads a few per
// cent more; GPUs differ by 4%). Rows two and three are of an earlier revision of the store, which was slower by 0.2 in
// the first case, with the same loop over the steps. Cases N, C, K, filter, image; fp16 / TF32.
//
//                                   16, 16, 128, 3x3, 1024^2   8, 64, 128, 3x3, 512x1024   8, 64, 128, 5x7, 512x256
//   everything                      1.62 / 3.74                0.95 / 2.27                 0.79 / 1.44
//   without storing y               1.01 / 1.78                0.80 / 1.89                 0.76 / 1.37
//   without storing, loading x      0.82 / 1.37                0.74 / -                    0.67 / 1.29
//   floor (memory or arithmetic)    1.04 / 2.07                0.68 / 1.32                 0.65 / 1.25
//
// What bounds the first case is the path of one warpgroup. Cycles a tile, read by a clock in the kernel (fp16 / TF32,
// with two warpgroups, 1.61 / 3.50 ms, 2026-11-21):
//
//                                        first case        second case      third case (fp16)
//   waits for rows, works out places     385 /   415       490 / 8700       3200
//   waits for its turn                    95 /   265       500 / 4400       9100
//   orders steps of wgmma               1100 /  2570      5000 / 9500      18400
//   waits for the last ones              555 /   585       535 / 2400       2800
//   stores                              2650 /  7380      4400 / 5800       3700
//   walks on                             830 /  1115       970 / 2100       1900
//
// That revision takes 1.64 ms in the first case on another GPU (fp16), and there 1.57 without multiplying, 1.41 without
// storing to memory (but with staging), 1.52 with stores that stay in the L2 cache, 1.57 with x from the L1 cache, 1.54
// with both, 0.94 without staging and storing: no single resource is full. The second case with fp32 waits for the
// converting warps, a quarter of whose time goes into finding out where a batch lies. And with fp16 the second and
// third case meet the power cap: they run at 1.53 and 1.57 GHz, the others at 1.73 to 1.78 (cycles over time). Kept
// busy for a second, every case drops to 1.2 to 1.9 GHz and is 2 to 19% slower.
//
// Tried, and no faster (times of the revision in which it was tried):
//
//   wgmma in a loop that is not unrolled: ptxas commits each by itself and every wait is a wait for all; two warpgroups
//     at a time hid that, one alone ran at half the rate (0.97 instead of 0.67 ms in the third case)
//   groups of 9 steps in place of 6, and of 4: up to 4% slower, so are no turns; the turn given back later: the same
//   x prefetched into the L2 cache three tiles ahead: the same, TF32 10% slower
//   units from 62 to 496 tiles in the first case: within 2%; shorter ones slower, one tile 2.9 ms
//   16 warps with wgmma of n = 128 (four to convert, three to send bulk copies): 2.85, 1.23 and 0.85 ms in fp16;
//     n = 128 costs nothing by itself, but the storing warps took 1900 cycles for 8 channels x 512 bytes
//   bulk copies ordered by the multiplying warps, eight lanes or one: 90 to 140 cycles each, 2.0, 1.2 and 0.86 ms
//   a thread of a multiplying warp that copies weights: ptxas serialises wgmma (C7520)
//   storing a tile while the next one is multiplied, by ordinary stores between groups (1.64), or by bulk copies, 16 a
//     warp from uniform registers (1.77): copies of 512 bytes take 31 to 37 cycles each in the copy engine
//   walking on while the last steps run: 1.65
//   x past the L1 cache: 20% slower in the first case; stores without .cs: 10% slower
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstdio>

#include "engines.cuh"
#endif

#include "hopper.cuh"
#include "numerics.cuh"
#include "problem.cuh"

namespace modelnew {
namespace wgmma {

constexpr int kServiceWarps = 4;  // convert x; the last one may copy weights instead
MODELNEW_HOST_DEVICE constexpr int threads(int warpgroups) { return 128 * warpgroups + 32 * kServiceWarps; }

// Registers of a thread. Four warpgroups start with 128 each, which suits all of them. Three start with 168, and wgmma
// with n = 256 compiles for no less than 154: the multiplying ones take more.
constexpr int kMultiplyRegisters = 192;
constexpr int kConvertRegisters = 120;
static_assert(2 * kMultiplyRegisters + kConvertRegisters <= 3 * 168, "what one gives back the others take");

constexpr int kTilePixels = 256;  // rows x columns
constexpr int kStepBytes = 32;    // of the reduction, for one wgmma: 16 channels of 16 bits or 8 of fp32
constexpr int kPlanes = 8;        // output channels that a warp stages at a time, at least

// Steps of one bulk copy and of one commit, at most: enough cycles to issue the next ones. With narrow tiles there are
// more instructions to a step.
constexpr int kGroupSteps = 6;
constexpr int kNarrowGroupSteps = 3;
MODELNEW_HOST_DEVICE constexpr int most_group_steps(int tile_q) {
  return tile_q >= 128 ? kGroupSteps : kNarrowGroupSteps;
}

constexpr int kMaxRows = 32;    // of the x ring
constexpr int kMaxStages = 16;  // of the w ring
constexpr int kBarrierBytes = 1024;
constexpr int kRecordBytes = 512;
constexpr int kSharedBytes = 232448;  // what a block may have on sm_90
constexpr int kGroupChannels = 64;    // output channels of a warpgroup

// A tile is shared out to warpgroups: 64 channels x 256 pixels to each of two. To each of three, in turn, 64 channels x
// 128 columns.
MODELNEW_HOST_DEVICE constexpr int shares(int warpgroups) { return warpgroups == 3 ? 4 : 2; }
MODELNEW_HOST_DEVICE constexpr int share_columns(int tile_q, int warpgroups) { return warpgroups == 3 ? 128 : tile_q; }

// A warp stages 512 bytes of each plane at a time, or 256 where its share is no wider. In front of them a plane has
// room for half a sector, behind them for the shift of its start; planes are 12 or 8 words apart modulo the 32 banks,
// so that stores of accumulators, 8 planes x 16 bytes or 4 planes x 32 bytes at a time, meet little conflict.
constexpr int kSector = 32;  // of memory: what a store should fill
MODELNEW_HOST_DEVICE constexpr int part_bytes(int warpgroups, int element_bytes) {
  return warpgroups == 3 && element_bytes == 2 ? 256 : 512;
}
MODELNEW_HOST_DEVICE constexpr int staged_plane_bytes(int warpgroups, int element_bytes) {
  return part_bytes(warpgroups, element_bytes) + (element_bytes == 2 ? 48 : 32);
}
MODELNEW_HOST_DEVICE constexpr int staging_part_bytes(int planes, int warpgroups, int element_bytes) {
  return planes * staged_plane_bytes(warpgroups, element_bytes) + 16;  // a carried sector is read as a whole
}
// Carried sectors of 16 planes, for the warps of two shares that lie side by side.
constexpr int kCarriedBytes = 16 * kSector;

// What the kernel computes: y from x and w, or dx from dy and w seen as the same thing (filter flipped, channel axes
// swapped, and with a padding that may be negative).
struct Correlation {
  int64_t N;
  int groups, in_channels, out_channels;  // channels of one group
  int H, W, P, Q, R, S;                   // in, out, taps
  int pad_h, pad_w, dilation_h, dilation_w;
  int64_t in_stride[4], out_stride[4];
  int64_t w_stride_group, w_stride_out, w_stride_in, w_stride_r, w_stride_s;
  bool flipped;
};

// How it is cut up. All roles of the kernel derive their loops from this, so they agree.
struct Plan {
  int tile_k;          // output channels of a block: 128, or 64 where the warpgroups share the channels, not the rows
  int tile_p, tile_q;  // rows of a block, columns
  int tiles_p, tiles_q, tiles_k;
  int tiles;                         // of all images and groups, for one tile of output channels
  bool down;                         // a unit runs down the image and keeps the rows of x that it needs again
  int unit_tiles, units;             // a unit is a run of tiles: down a column or row by row, and image by image
  int x_rows, x_pitch;               // the window of a tile: rows, and pixels of one piece of a row
  int lead;                          // unused pixels at the left of a row, so that pairs of pixels start even
  int x_slots;                       // rows of the x ring
  int blocks_c, block_steps;         // blocks of input channels, their steps at a tap: what a row of the ring has
  int warpgroups;                    // that multiply: 3 where weights are resident and a row has all channels, or 2
  int convert_warps;                 // 3, or 4 where weights stay the same for a block's life
  int staged_planes, staging_parts;  // of a warp: 8, or all 16; one for each warp, or for two that take turns
  int w_stages;                      // of the w ring; none: weights are resident
  int groups, group_steps;           // a block's steps are committed, and their weights copied, in groups; how many of
  int large_groups;                  // them have group_steps, the others have one less
  bool x_pairs;                      // pairs of pixels are aligned in x
  bool x_simple;                     // and the last block of channels is as full as the others
  bool y_pairs;                      // pairs of pixels are aligned in y
  bool y_runs;                       // columns of y are neighbours
  bool y_flat;                       // and so are the end of a row and the start of the next
  bool y_vectors;                    // 16-byte pieces of a row are aligned in y
  int blocks, smem_bytes;
  double cycles;  // estimate
};

struct Params {
  const void *in_ptr, *packed_ptr, *bias_ptr;
  void* out_ptr;
  Correlation of;
  Plan plan;
};

// Where the parts of a block's shared memory start.
struct SharedLayout {
  int records, carried, staging, x_ring, w_ring, end;
};

MODELNEW_HOST_DEVICE inline int total_steps(const Correlation& of, const Plan& plan) {
  return of.R * of.S * plan.blocks_c * plan.block_steps;
}

MODELNEW_HOST_DEVICE inline int x_row_bytes(const Plan& plan) { return plan.block_steps * 2 * plan.x_pitch * 16; }

constexpr int kWeightStepBytes = kGroupChannels * kStepBytes;  // of one warpgroup

MODELNEW_HOST_DEVICE inline SharedLayout shared_layout(const Correlation& of, const Plan& plan, int element_bytes) {
  SharedLayout layout{};
  layout.records = kBarrierBytes;
  layout.carried = layout.records + kRecordBytes;
  layout.staging = layout.carried + 8 * kCarriedBytes;
  layout.x_ring =
      layout.staging + plan.staging_parts * staging_part_bytes(plan.staged_planes, plan.warpgroups, element_bytes);
  layout.w_ring = layout.x_ring + plan.x_slots * x_row_bytes(plan);
  const int steps =
      plan.w_stages > 0 ? plan.w_stages * plan.group_steps : total_steps(of, plan) * (plan.tile_k / kGroupChannels);
  // A tile wider than y reads on behind its rows of x, and stores nothing of what comes of that.
  const int weight_bytes = steps * kWeightStepBytes;
  layout.end = layout.w_ring + (weight_bytes > plan.tile_q * 16 ? weight_bytes : plan.tile_q * 16);
  return layout;
}

// ---- The walk: which tiles a block computes, in which order. Every role takes the same one. ----

struct Tile {
  int group, tile_k, n;
  int p, q;                   // its upper left output
  bool run_starts, run_ends;  // nothing carried over from the tile before, to the tile behind
  bool continues, goes_on;    // its window lies tile_p rows below that of the tile before; the next one's below its own
  bool last;                  // of the block
  int behind;                 // outputs of a row that precede it in its run, or kFarBehind
};
constexpr int kFarBehind = 64;  // more than a sector

struct Walk {
  Tile tile;
  int unit, left, row, column;

  MODELNEW_HOST_DEVICE void start(const Correlation& of, const Plan& plan, int block) {
    unit = block;
    start_unit(of, plan);
  }

  MODELNEW_HOST_DEVICE bool done(const Plan& plan) const { return unit >= plan.units; }

  MODELNEW_HOST_DEVICE void next(const Correlation& of, const Plan& plan) {
    if (--left == 0) {
      unit += plan.blocks;
      start_unit(of, plan);
      return;
    }
    bool run_starts = plan.down, continues = plan.down;
    bool next_row = plan.down;
    if (!plan.down && ++column == plan.tiles_q) {
      column = 0;
      run_starts = !plan.y_flat;
      next_row = true;
    }
    if (next_row && ++row == plan.tiles_p) {
      row = 0;
      run_starts = true;
      continues = false;
      if (++tile.n == of.N) {
        tile.n = 0;
        ++tile.group;
      }
    }
    const int behind = tile.behind + (plan.tile_q < of.Q - tile.q ? plan.tile_q : of.Q - tile.q);
    tile.behind = behind < kFarBehind ? behind : kFarBehind;
    place(plan, run_starts, continues);
  }

 private:
  MODELNEW_HOST_DEVICE void start_unit(const Correlation& of, const Plan& plan) {
    if (unit >= plan.units) return;
    const int part = unit / plan.tiles_k;
    tile.tile_k = unit - part * plan.tiles_k;
    int row_of_all;
    if (plan.down) {
      // Neighbouring blocks take neighbouring columns: their lines of y meet.
      const int band = part / plan.tiles_q, rows = plan.tiles / plan.tiles_q;
      column = part - band * plan.tiles_q;
      row_of_all = band * plan.unit_tiles;
      left = plan.unit_tiles < rows - row_of_all ? plan.unit_tiles : rows - row_of_all;
    } else {
      const int first = part * plan.unit_tiles;
      left = plan.unit_tiles < plan.tiles - first ? plan.unit_tiles : plan.tiles - first;
      row_of_all = first / plan.tiles_q;
      column = first - row_of_all * plan.tiles_q;
    }
    const int image = row_of_all / plan.tiles_p;
    row = row_of_all - image * plan.tiles_p;
    tile.group = image / static_cast<int>(of.N);
    tile.n = image - tile.group * static_cast<int>(of.N);
    place(plan, true, false);
  }

  MODELNEW_HOST_DEVICE void place(const Plan& plan, bool run_starts, bool continues) {
    tile.p = row * plan.tile_p;
    tile.q = column * plan.tile_q;
    tile.continues = continues;
    tile.goes_on = plan.down && left > 1 && row < plan.tiles_p - 1;
    tile.last = left == 1 && unit + plan.blocks >= plan.units;
    tile.run_starts = run_starts;
    if (run_starts) tile.behind = 0;
    tile.run_ends = plan.down || left == 1 || (column == plan.tiles_q - 1 && (!plan.y_flat || row == plan.tiles_p - 1));
  }
};

template <typename Visit>
MODELNEW_HOST_DEVICE inline void for_each_tile(const Correlation& of, const Plan& plan, int block, Visit&& visit) {
  Walk walk;
  for (walk.start(of, plan, block); !walk.done(plan); walk.next(of, plan)) visit(walk.tile);
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// ---- Device code ----

// What divides numbers below 2^16 by one below 2^15.
__device__ __forceinline__ uint32_t reciprocal(uint32_t divisor) { return 0x80000000u / divisor + 1; }
__device__ __forceinline__ int quotient(int number, uint32_t by) { return __umulhi(2 * number + 1, by); }

// A place in a ring and the parity of its current round.
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;

  // Without a branch.
  __device__ __forceinline__ void next(int slots) {
    const bool round = ++slot == slots;
    slot = round ? 0 : slot;
    parity ^= round;
  }

  // By no more than the ring has.
  __device__ __forceinline__ void skip(int slots, int count) {
    slot += count;
    const bool round = slot >= slots;
    slot -= round ? slots : 0;
    parity ^= round;
  }

  __device__ __forceinline__ void advance(int slots, int count = 1) {
    slot += count;
    while (slot >= slots) {
      slot -= slots;
      parity ^= 1;
    }
  }
};

// What the multiplying warps have to know of a tile. One of the converting warps writes it down before the first row of
// the tile is there: to work it out takes a warp several hundred cycles, which the others have not got.
struct alignas(16) TileRecord {
  int64_t out;        // offset of its first output in the first of its channels
  int rows, columns;  // of outputs from there on: to the end of the image, to the end of the tile
  int channel;        // first of all groups
  int channels;       // of its group from there on
  int weights;        // which: group and tile of channels
  int flags;          // and what is behind

  static constexpr int kRunEnds = 1, kGoesOn = 2, kLast = 4, kBehindShift = 3;
};
static_assert(sizeof(TileRecord) == 32, "two loads");

// Records are of tiles that have rows in the ring, three at most (see the end of `complete`), and of the two that are
// being loaded.
constexpr int kRecords = kRecordBytes / sizeof(TileRecord);
static_assert(kRecords >= 8, "more than five");

// Addresses in shared memory. Barriers of 8 bytes: x_full and x_empty, kMaxRows of each, w_full and w_empty, kMaxStages
// of each, the turns of the warpgroups, those of two warps that share a part of staging, and what is carried over.
struct Shared {
  static constexpr int kTurns = 8 * (2 * kMaxRows + 2 * kMaxStages);

  uint32_t base;
  SharedLayout layout;

  __device__ __forceinline__ uint32_t x_full(int slot) const { return base + 8 * slot; }
  __device__ __forceinline__ uint32_t x_empty(int slot) const { return base + 8 * (kMaxRows + slot); }
  __device__ __forceinline__ uint32_t w_full(int slot) const { return base + 8 * (2 * kMaxRows + slot); }
  __device__ __forceinline__ uint32_t w_empty(int slot) const { return base + 8 * (2 * kMaxRows + kMaxStages + slot); }
  __device__ __forceinline__ uint32_t turn(int warpgroup_id) const { return base + kTurns + 8 * warpgroup_id; }
  __device__ __forceinline__ uint32_t staging_turn(int warp_id) const { return base + kTurns + 8 * (3 + warp_id); }
  __device__ __forceinline__ uint32_t carried(int which) const { return base + kTurns + 8 * (11 + which); }
  __device__ __forceinline__ uint32_t x_ring() const { return base + layout.x_ring; }
  __device__ __forceinline__ uint32_t w_ring() const { return base + layout.w_ring; }
};
static_assert(Shared::kTurns + 8 * (11 + 8) <= kBarrierBytes, "room for all barriers");

// -- Copy weights: packed -> w ring, by one thread --

// All weights of a tile.
__device__ __forceinline__ void copy_resident_weights(const Params& params, const Shared& shared, int wanted) {
  constexpr int kPiece = 16384;
  const int bytes = total_steps(params.of, params.plan) * params.plan.tile_k * kStepBytes;
  const uint8_t* from = static_cast<const uint8_t*>(params.packed_ptr) + static_cast<int64_t>(wanted) * bytes;
  hopper::barrier_arrive_expecting(shared.w_full(0), bytes);
  for (int offset = 0; offset < bytes; offset += kPiece)
    hopper::bulk_load(shared.w_ring() + offset, from + offset, min(kPiece, bytes - offset), shared.w_full(0));
}

__device__ __forceinline__ void copy_weights(const Params& params, const Shared& shared) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int64_t group_bytes = static_cast<int64_t>(total_steps(of, plan)) * kWeightStepBytes;
  const int groups = plan.tile_k / kGroupChannels;
  RingPosition at;
  int resident = -1;
  for_each_tile(of, plan, blockIdx.x, [&](const Tile& tile) {
    const int wanted = tile.group * plan.tiles_k + tile.tile_k;
    if (plan.w_stages == 0) {
      if (wanted == resident) return;
      resident = wanted;
      hopper::barrier_wait_idly(shared.w_empty(0), at.parity ^ 1);
      copy_resident_weights(params, shared, wanted);
      at.next(1);
      return;
    }
    const uint8_t* from = static_cast<const uint8_t*>(params.packed_ptr) + wanted * groups * group_bytes;
    for (int block = 0; block < plan.blocks_c; ++block) {
      for (int warpgroup_id = 0; warpgroup_id < 2; ++warpgroup_id) {
        const uint8_t* piece = from + (groups == 2 ? warpgroup_id * group_bytes : 0);
        for (int i = 0; i < plan.groups; ++i) {
          const int bytes = (plan.group_steps - (i >= plan.large_groups)) * kWeightStepBytes;
          hopper::barrier_wait_idly(shared.w_empty(at.slot), at.parity ^ 1);
          hopper::barrier_arrive_expecting(shared.w_full(at.slot), bytes);
          hopper::bulk_load(shared.w_ring() + at.slot * plan.group_steps * kWeightStepBytes, piece, bytes,
                            shared.w_full(at.slot));
          piece += bytes;
          at.next(plan.w_stages);
        }
      }
      from += of.R * of.S * plan.block_steps * kWeightStepBytes;
    }
  });
}

// -- Convert: memory -> x ring --
//
// A fill is the rows that a tile adds to the ring, all of its window or those by which it lies lower. Its items, in the
// order of their places in the ring, are pieces of two neighbouring pixels (where pairs are aligned in x) or of one; 32
// of them, a part, are the work of a warp at a time, and the warps take turns. A warp loads a batch of parts into
// registers while it stores the batch before to shared memory, across fills and tiles: what limits it then is the
// number of its instructions, not the latency of memory.

// One channel of PIXELS neighbouring pixels; 0 where there are none.
template <typename Element, int PIXELS>
__device__ __forceinline__ void load_pixels(const uint8_t* address, bool exist, uint32_t* words) {
  if constexpr (sizeof(Element) * PIXELS == 8)
    hopper::load_8(address, exist, words[0], words[1]);
  else if constexpr (sizeof(Element) * PIXELS == 4)
    hopper::load_4(address, exist, words[0]);
  else
    hopper::load_2(address, exist, words[0]);
}

// The piece of pixel `which`: all its channels, rounded (TF32). `words` has those of each channel one after another.
template <typename Element, int PIXELS>
__device__ __forceinline__ uint4 piece_of(const uint32_t (&words)[8], int which) {
  if constexpr (sizeof(Element) == 2) {
    const uint32_t select = which == 0 ? 0x5410 : 0x7632;
    return make_uint4(__byte_perm(words[0], words[1], select), __byte_perm(words[2], words[3], select),
                      __byte_perm(words[4], words[5], select), __byte_perm(words[6], words[7], select));
  } else {
    const auto rounded = [&](int c) {
      const uint32_t word = PIXELS == 2 && which != 0 ? words[2 * c + 1] : words[PIXELS * c];
      return float_bits(round_to_tf32(bits_float(word)));
    };
    return make_uint4(rounded(0), rounded(1), rounded(2), rounded(3));
  }
}

// Parts of a batch, 8 words of registers each: 18 KB are on their way to three warps. As many as registers allow.
MODELNEW_HOST_DEVICE constexpr int batch(int warpgroups, int element_bytes) {
  return warpgroups == 2 && element_bytes == 4 ? 6 : 7;
}

template <typename Element, int PIXELS, bool ALL_CHANNELS, int WARPS, int BATCH>
struct Converter {
  static constexpr int FIRST_HALF = (BATCH + 1) / 2;
  static constexpr int CHANNELS = 16 / sizeof(Element);            // of a piece
  static constexpr int WORDS = sizeof(Element) == 2 ? 1 : PIXELS;  // of one channel of an item
  static constexpr int PART_BYTES = 32 * PIXELS * 16;              // in the ring
  static constexpr int STEP_CHANNELS = kStepBytes / sizeof(Element);

  const Params& params;
  const Shared& shared;
  uint8_t* smem;
  int warp_id, lane_id;
  int row_pieces, row_items;  // items of a piece of a row, of a row
  uint32_t by_row, by_piece;  // reciprocals of these

  // The batch to load next: parts first, first + WARPS, ... of the fill of `block`.
  Walk walk;
  int block, first;
  int rows, h0, w0;         // of the fill
  const uint8_t* fill_ptr;  // its first pixel, inside the image or not, in its first channel
  // Where each of its items lies in x from there on, and a bit that says whether that is inside the image. Where all
  // fills are of one batch, the offsets are worked out once, the bits once a tile, and few instructions remain.
  uint32_t offset[BATCH];
  uint32_t inside;
  int number;  // of the tile

  __device__ __forceinline__ Converter(const Params& params, const Shared& shared, uint8_t* smem, int warp_id)
      : params(params), shared(shared), smem(smem), warp_id(warp_id) {
    const Plan& plan = params.plan;
    lane_id = threadIdx.x % 32;
    row_pieces = plan.x_pitch / PIXELS;
    row_items = 2 * plan.block_steps * row_pieces;
    by_row = reciprocal(row_items);
    by_piece = reciprocal(row_pieces);
    walk.start(params.of, plan, blockIdx.x);
    block = 0;
    first = warp_id;
    number = 0;
    enter_tile();
    look<true>();
  }

  // Of the tile.
  __device__ __forceinline__ void write_record() const {
    const Correlation& of = params.of;
    const Plan& plan = params.plan;
    const Tile& tile = walk.tile;
    TileRecord record;
    const int k = tile.tile_k * plan.tile_k;
    record.channel = tile.group * of.out_channels + k;
    record.out = tile.n * of.out_stride[0] + record.channel * of.out_stride[1] + tile.p * of.out_stride[2] +
                 tile.q * of.out_stride[3];
    record.rows = of.P - tile.p;
    record.columns = min(plan.tile_q, of.Q - tile.q);
    record.channels = of.out_channels - k;
    record.weights = tile.group * plan.tiles_k + tile.tile_k;
    record.flags = (tile.run_ends ? TileRecord::kRunEnds : 0) | (tile.goes_on ? TileRecord::kGoesOn : 0) |
                   (tile.last ? TileRecord::kLast : 0) | tile.behind << TileRecord::kBehindShift;
    reinterpret_cast<TileRecord*>(smem + shared.layout.records)[number % kRecords] = record;
  }

  __device__ __forceinline__ int parts() const { return (rows * row_items + 31) / 32; }

  __device__ __forceinline__ void enter_tile() {
    const Correlation& of = params.of;
    const Plan& plan = params.plan;
    rows = walk.tile.continues ? plan.tile_p : plan.x_rows;
    h0 = walk.tile.p - of.pad_h + plan.x_rows - rows;
    w0 = walk.tile.q - of.pad_w - plan.lead;
    fill_ptr =
        static_cast<const uint8_t*>(params.in_ptr) +
        (walk.tile.n * of.in_stride[0] + static_cast<int64_t>(walk.tile.group) * of.in_channels * of.in_stride[1] +
         h0 * of.in_stride[2] + w0 * of.in_stride[3]) *
            static_cast<int64_t>(sizeof(Element));
    if (warp_id == WARPS - 1 && lane_id == 0) write_record();
    ++number;
  }

  // Part i of the batch.
  struct Item {
    int row, piece, column;
    bool exists;
  };
  __device__ __forceinline__ Item item_of(int i) const {
    const int item = (first + i * WARPS) * 32 + lane_id;
    const int row = quotient(item, by_row);
    const int in_row = item - row * row_items;
    const int piece = quotient(in_row, by_piece);
    return {row, piece, PIXELS * (in_row - piece * row_pieces), row < rows};
  }

  // The last batch of a fill may well be less than half a batch.
  __device__ __forceinline__ bool has_second_half() const { return first + FIRST_HALF * WARPS < parts(); }

  // Where the items of the batch lie, where that is not known already, and which are inside the image.
  template <bool ALL>
  __device__ __forceinline__ void look() {
    inside = 0;
    look_at_parts<ALL, 0, FIRST_HALF>();
    if (has_second_half()) look_at_parts<ALL, FIRST_HALF, BATCH>();
  }

  template <bool ALL, int BEGIN, int END>
  __device__ __forceinline__ void look_at_parts() {
    const Correlation& of = params.of;
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
      const Item at = item_of(i);
      if constexpr (ALL)
        offset[i] = static_cast<uint32_t>(
            (at.piece * CHANNELS * of.in_stride[1] + at.row * of.in_stride[2] + at.column * of.in_stride[3]) *
            sizeof(Element));
      const bool is_inside = at.exists && static_cast<unsigned>(h0 + at.row) < static_cast<unsigned>(of.H) &&
                             static_cast<unsigned>(w0 + at.column) < static_cast<unsigned>(of.W);
      inside |= static_cast<uint32_t>(is_inside) << i;
    }
  }

  // Goes on to the next batch; false when there is none.
  __device__ __forceinline__ bool next() {
    const Plan& plan = params.plan;
    const int before = parts();
    first += BATCH * WARPS;
    if (first < before) {
      look<true>();
      return true;
    }
    first = warp_id;
    const bool new_tile = ++block == plan.blocks_c;
    if (new_tile) {
      block = 0;
      walk.next(params.of, plan);
      if (walk.done(plan)) return false;
      enter_tile();
    } else {
      fill_ptr += plan.block_steps * STEP_CHANNELS * params.of.in_stride[1] * static_cast<int64_t>(sizeof(Element));
    }
    if (before > BATCH * WARPS || before != parts())
      look<true>();
    else if (new_tile)
      look<false>();
    return true;
  }

  template <int BEGIN, int END>
  __device__ __forceinline__ void load(uint32_t (&words)[BATCH][8]) const {
    const int64_t channel_bytes = params.of.in_stride[1] * sizeof(Element);
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
      const int piece = ALL_CHANNELS ? 0 : item_of(i).piece;
      const int channels = params.of.in_channels - block * params.plan.block_steps * STEP_CHANNELS - piece * CHANNELS;
      const uint8_t* address = fill_ptr + offset[i];
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) {
        load_pixels<Element, PIXELS>(address, (inside >> i & 1) && (ALL_CHANNELS || c < channels),
                                     words[i] + c * WORDS);
        address += channel_bytes;
        asm("" : "+l"(address));  // one addition a channel; the compiler would rather multiply for each
      }
    }
  }

  // `place`: of the fill, in bytes from the start of the ring.
  template <int BEGIN, int END>
  __device__ __forceinline__ void store(int place, int first_part, int items, const uint32_t (&words)[BATCH][8]) const {
    const int ring_bytes = params.plan.x_slots * x_row_bytes(params.plan);
    uint8_t* ring = smem + shared.layout.x_ring;
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
      const int item = (first_part + i * WARPS) * 32 + lane_id;
      int at = place + item * PIXELS * 16;
      if (at >= ring_bytes) at -= ring_bytes;
      uint4* to = reinterpret_cast<uint4*>(ring + at);
      // Lanes that write 32 bytes apart: every other four of them start with the second pixel, so that eight lanes meet
      // all banks.
      const int swap = PIXELS == 2 ? lane_id / 4 % 2 : 0;
      const uint4 one = piece_of<Element, PIXELS>(words[i], swap);
      if (item < items) to[swap] = one;
      if constexpr (PIXELS == 2) {
        const uint4 other = piece_of<Element, PIXELS>(words[i], 1 - swap);
        if (item < items) to[1 - swap] = other;
      }
    }
  }

  __device__ __forceinline__ void run() {
    const Plan& plan = params.plan;
    RingPosition fill;         // its first row
    RingPosition empty, full;  // the next row to wait for, to tell of
    uint32_t words[BATCH][8];
    load<0, FIRST_HALF>(words);
    if (has_second_half()) load<FIRST_HALF, BATCH>(words);
    int waited = 0, told = 0;  // rows of the fill
    for (bool more = true; more;) {
      // What is in the registers now.
      const int loaded_first = first, loaded_rows = rows, loaded_parts = parts();
      const int items = loaded_rows * row_items;
      const int place = fill.slot * x_row_bytes(plan);
      more = next();
      const int behind = loaded_first + BATCH * WARPS;
      const bool fill_ends = behind >= loaded_parts;
      // All rows of the fill in the end, also those in which this warp has no part: nobody gets a round ahead.
      const int touched = fill_ends ? loaded_rows : quotient((behind - WARPS) * 32 + 31, by_row) + 1;
      for (; waited < touched; ++waited) {
        hopper::barrier_wait(shared.x_empty(empty.slot), empty.parity ^ 1);
        empty.advance(plan.x_slots);
      }
      // By halves, so that one is on its way while the other is stored.
      store<0, FIRST_HALF>(place, loaded_first, items, words);
      if (more) load<0, FIRST_HALF>(words);
      if (loaded_first + FIRST_HALF * WARPS < loaded_parts) store<FIRST_HALF, BATCH>(place, loaded_first, items, words);
      if (more && has_second_half()) load<FIRST_HALF, BATCH>(words);
      const int done = fill_ends ? loaded_rows : quotient(behind * 32, by_row);
      if (told < done) {
        hopper::fence_async();
        __syncwarp();  // all lanes have stored and fenced before one of them tells
        for (; told < done; ++told) {
          if (lane_id == 0) hopper::barrier_arrive(shared.x_full(full.slot));
          full.advance(plan.x_slots);
        }
      }
      if (fill_ends) {
        fill.advance(plan.x_slots, loaded_rows);
        waited = told = 0;
      }
    }
  }
};

// -- Store: accumulators -> staging -> memory --

// One warp's view of its share of a tile.
struct Store {
  uint8_t* staging;  // of this warp
  uint4* carried;    // unfinished sectors, of this lane
  int lane_id;
  int first_k, first_p, first_q;  // in the tile
};

// Two neighbouring pixels as memory has them.
template <typename Element>
struct Packed;
template <>
struct Packed<float> {
  using Pair = float2;
};
template <>
struct Packed<Half> {
  using Pair = uint32_t;
};
template <>
struct Packed<BFloat16> {
  using Pair = uint32_t;
};
template <typename Element>
using PackedPair = typename Packed<Element>::Pair;

template <typename Element>
__device__ __forceinline__ PackedPair<Element> pack_pair(float first, float second) {
  if constexpr (sizeof(Element) == 4)
    return make_float2(first, second);
  else
    return narrow_pair(first, second, Element{});
}

__device__ __forceinline__ uint32_t select(bool first, uint32_t a, uint32_t b) { return first ? a : b; }
__device__ __forceinline__ float2 select(bool first, float2 a, float2 b) {
  return make_float2(first ? a.x : b.x, first ? a.y : b.y);
}

// Shares of one row. All 16 channels (planes) of a warp at a time with 16 bits, 8 with fp32, by parts of 512 bytes or
// 256. Offsets count bytes from the boundary at or before which a part begins in its plane: a sector of 32 bytes, or
// one of 16 bytes where a run starts.
//
//              <- sector ->                <- sector ->
//   staged:   [carried|new        ...               |new ]
//   stored:   [-----------------  ...  -------------]           the rest is carried over
//
// In staging the new pixels of all planes begin at offset % 16 behind half a sector, so that lanes meet few conflicts.
template <typename Element, int WARPGROUPS, int SHARE_Q>
__device__ __forceinline__ void store_runs(const Params& params, const Store& store, const TileRecord& tile,
                                           const float (&bias)[2], const float (&acc)[1][SHARE_Q / 2]) {
  constexpr int kSize = sizeof(Element);
  constexpr int kPartBytes = part_bytes(WARPGROUPS, kSize);
  constexpr int kColumns = kPartBytes / kSize;
  constexpr int kPlaneBytes = staged_plane_bytes(WARPGROUPS, kSize);
  constexpr int kAtOnce = kSize == 2 ? 2 * kPlanes : kPlanes;
  constexpr int kLanes = kPartBytes / 16;  // that store a plane
  constexpr int kRows = 32 / kLanes;       // planes that a warp stores at a time
  constexpr int kTogether = 2;             // times that: those whose loads from shared memory are on their way together
  static_assert(SHARE_Q % kColumns == 0 && kAtOnce % (kRows * kTogether) == 0, "whole parts");
  const int lane_id = store.lane_id;
  const int columns = min(SHARE_Q, tile.columns - store.first_q);
  if (store.first_p >= tile.rows || columns <= 0) return;
  const Correlation& of = params.of;
  const int64_t plane_stride = of.out_stride[1] * kSize;
  const uint64_t share_address =
      reinterpret_cast<uint64_t>(params.out_ptr) +
      (tile.out + store.first_k * of.out_stride[1] + store.first_p * of.out_stride[2] + store.first_q) * kSize;
  uint8_t* const staged = store.staging + kSector / 2;

#pragma unroll
  for (int first_half = 0; first_half < 2; first_half += kAtOnce / kPlanes) {
    const int planes = min(tile.channels - store.first_k - 8 * first_half, kAtOnce);
    if (planes <= 0) break;
#pragma unroll
    for (int part = 0; part < SHARE_Q / kColumns; ++part) {
      const int bytes = min(columns - part * kColumns, kColumns) * kSize;
      if (bytes <= 0) break;
      const uint64_t address = share_address + 8 * first_half * plane_stride + part * kPartBytes;
      const int behind =
          min(((tile.flags >> TileRecord::kBehindShift) + store.first_q + part * kColumns) * kSize, kSector);
      const bool run_ends =
          (tile.flags & TileRecord::kRunEnds) != 0 && tile.columns <= store.first_q + (part + 1) * kColumns;
      uint32_t begin = static_cast<uint32_t>(address), stride = static_cast<uint32_t>(plane_stride);
      asm volatile("" : "+r"(begin), "+r"(stride));

      // Two lanes have the carried sector of a plane, 16 bytes each.
      const bool carries = kAtOnce == 16 || lane_id / 16 == first_half;
      const int carried_plane = lane_id / 2 % kAtOnce;
      const auto sector_of = [&](int byte) {  // of the part: where it lies in staging
        const uint32_t carried_begin = begin + carried_plane * stride;
        const uint32_t sectors = ((carried_begin & (kSector - 1)) + byte) & ~(kSector - 1u);
        return reinterpret_cast<uint4*>(staged + carried_plane * kPlaneBytes + lane_id % 2 * 16 - (carried_begin & 16) +
                                        sectors);
      };
      __syncwarp();  // the part before has been read
      if (behind > 0) {
        if (carries) *sector_of(0) = *store.carried;
        __syncwarp();  // its last bytes are overwritten by new pixels
      }

      // Four lanes stage 8 pixels of a plane at a time.
#pragma unroll
      for (int half = first_half; half < first_half + kAtOnce / kPlanes; ++half) {
        const int plane = 8 * (half - first_half) + lane_id / 4;
        const int shift = static_cast<int>((begin + plane * stride) & 15);
        uint8_t* const to_plane = staged + plane * kPlaneBytes;
        const auto value_of = [&](int i, int which, float added) {
          return acc[0][4 * (part * (kColumns / 8) + i) + 2 * half + which] + added;
        };
        const auto stage = [&](float added) {
          if constexpr (kSize == 2) {
            // Shifted pairs of pixels reach into the next 16 bytes: those lanes stage the pair of the 8 pixels before
            // instead, so that no bank is met twice.
            const int in_group = shift + lane_id % 4 * 4;
            const bool later = in_group >= 16;
            uint8_t* const to = to_plane + (in_group & 15);
            uint32_t before = 0;
#pragma unroll
            for (int i = 0; i < kColumns / 8; ++i) {
              const uint32_t pair = narrow_pair(value_of(i, 0, added), value_of(i, 1, added), Element{});
              if (i > 0 || !later) *reinterpret_cast<uint32_t*>(to + 16 * i) = later ? before : pair;
              before = pair;
            }
            if (later) *reinterpret_cast<uint32_t*>(to + kPartBytes) = before;
          } else {
            uint8_t* const to = to_plane + shift + lane_id % 4 * 8;
#pragma unroll
            for (int i = 0; i < kColumns / 8; ++i)
              *reinterpret_cast<float2*>(to + 32 * i) = make_float2(value_of(i, 0, added), value_of(i, 1, added));
          }
        };
        if (!params.plan.y_pairs) {
          Element* const pixels = reinterpret_cast<Element*>(to_plane + shift) + 2 * (lane_id % 4);
#pragma unroll
          for (int i = 0; i < kColumns / 8; ++i) {
            narrow(value_of(i, 0, bias[half]), pixels[8 * i]);
            narrow(value_of(i, 1, bias[half]), pixels[8 * i + 1]);
          }
        } else if (params.bias_ptr != nullptr) {
          stage(bias[half]);
        } else {
          stage(-0.0f);  // which the compiler leaves out
        }
      }
      __syncwarp();  // all pixels are staged

      // 16 bytes a lane of every plane, from its boundary on. `to` is opaque, or the compiler would split it into a
      // part of the warp and one of the lane, for more and slower instructions.
      const int mask = behind == 0 ? 15 : kSector - 1;
      const bool head = behind < kSector;  // the first piece or sector is not all ours
      const int place = lane_id % kLanes * 16, own_row = lane_id / kLanes;
      uint64_t to = address + own_row * plane_stride + (place & ~mask);
      asm volatile("" : "+l"(to));
      const int in_boundary = place & mask;
      // A lane stores its piece if the shift of the plane is more than this: if the piece and the sector it lies in are
      // all there, and all of this run.
      const int end = head && place <= mask ? kSector : (place | mask) - bytes;
      const uint8_t* const own_piece = staged + own_row * kPlaneBytes + place;
      const auto piece_at = [&](int plane, uint64_t to_plane) {
        return *reinterpret_cast<const uint4*>(own_piece + plane * kPlaneBytes -
                                               (static_cast<uint32_t>(to_plane) & mask & ~15));
      };
      const auto store_piece = [&](uint64_t to_plane, const uint4& piece) {
        if (end < (static_cast<int>(to_plane) & mask))
          __stcs(reinterpret_cast<uint4*>((to_plane >> 32 << 32) | (static_cast<uint32_t>(to_plane) & ~mask) |
                                          in_boundary),
                 piece);
      };
      if (planes == kAtOnce) {
#pragma unroll
        for (int first = 0; first < kAtOnce; first += kRows * kTogether) {
          uint4 pieces[kTogether];
          uint64_t places[kTogether];
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            places[i] = to;
            pieces[i] = piece_at(first + i * kRows, to);
            to += kRows * plane_stride;
            asm volatile("" : "+l"(to));
          }
#pragma unroll
          for (int i = 0; i < kTogether; ++i) store_piece(places[i], pieces[i]);
        }
      } else {
#pragma unroll 1
        for (int plane = 0; plane + own_row < planes; plane += kRows, to += kRows * plane_stride)
          store_piece(to, piece_at(plane, to));
      }

      // What begins or ends inside a sector: four lanes a plane, by words where these are aligned.
      const auto store_ends = [&](auto word) {
        constexpr int kWord = sizeof(word);
#pragma unroll 1
        for (int plane = lane_id / 4; plane < planes; plane += 8) {
          const uint64_t plane_address = address + plane * plane_stride;
          const int offset = static_cast<int>(plane_address) & mask;
          const uint8_t* const from = staged + plane * kPlaneBytes - (offset & ~15);
          uint8_t* const boundary = reinterpret_cast<uint8_t*>(plane_address - offset);
          const int last = offset + bytes, whole = last & ~mask;
          const int head_end = head ? min(mask + 1, run_ends ? last : whole) : 0;
          const int tail = max(whole, head_end);
          for (int at = lane_id % 4 * kWord; at <= mask; at += 4 * kWord) {
            if (at >= offset - behind && at < head_end)
              *reinterpret_cast<decltype(word)*>(boundary + at) = *reinterpret_cast<const decltype(word)*>(from + at);
            if (run_ends && tail + at < last)
              *reinterpret_cast<decltype(word)*>(boundary + tail + at) =
                  *reinterpret_cast<const decltype(word)*>(from + tail + at);
          }
        }
      };
      if (mask == 15 && run_ends && params.plan.y_pairs && bytes % 16 == 0) {
        // One piece of 16 bytes in all, head and tail: a word a lane.
#pragma unroll
        for (int first = 0; first < kAtOnce; first += 8) {
          const int plane = first + lane_id / 4;
          const uint64_t plane_address = address + plane * plane_stride;
          const int offset = static_cast<int>(plane_address) & 15, word = lane_id % 4 * 4;
          const int at = word < offset ? word + bytes : word;
          if (plane < planes)
            *reinterpret_cast<uint32_t*>(plane_address - offset + at) =
                *reinterpret_cast<const uint32_t*>(staged + plane * kPlaneBytes + at);
        }
      } else if (head || run_ends) {
        if (kSize == 4 || (params.plan.y_pairs && columns % 2 == 0))
          store_ends(uint32_t{});
        else
          store_ends(uint16_t{});
      }
      asm volatile("" : "+r"(begin));  // or what sector_of has worked out above would take registers
      if (!run_ends && carries) *store.carried = *sector_of(bytes);
    }
  }
}

// Tiles of several rows, and y of any strides: 16 bytes a lane where rows are aligned, else element by element.
template <typename Element, int TILE_P, int TILE_Q>
__device__ __forceinline__ void store_rows(const Params& params, const Store& store, const TileRecord& tile,
                                           const float (&bias)[2], const float (&acc)[TILE_P][TILE_Q / 2]) {
  constexpr int kSize = sizeof(Element);
  constexpr int kVector = 16 / kSize;
  constexpr int kPixels = 512 / kSize;
  constexpr int kPlaneBytes = staged_plane_bytes(2, kSize);
  const Correlation& of = params.of;
  const int lane_id = store.lane_id;

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first_k = store.first_k + 8 * half;
#pragma unroll
    for (int part = 0; part < kTilePixels / kPixels; ++part) {
      Element* pixels = reinterpret_cast<Element*>(store.staging + lane_id / 4 * kPlaneBytes) + 2 * (lane_id % 4);
      __syncwarp();  // the part before has been read
#pragma unroll
      for (int i = 0; i < kPixels / 8; ++i) {
        const int row = (part * kPixels + 8 * i) / TILE_Q, j = (part * kPixels + 8 * i) % TILE_Q / 8;
        *reinterpret_cast<PackedPair<Element>*>(pixels + 8 * i) =
            pack_pair<Element>(acc[row][4 * j + 2 * half] + bias[half], acc[row][4 * j + 2 * half + 1] + bias[half]);
      }
      __syncwarp();  // all pixels are staged
      Element* const out = static_cast<Element*>(params.out_ptr) + tile.out + first_k * of.out_stride[1];
      const auto row_of = [&](int pixel) { return store.first_p + (part * kPixels + pixel) / TILE_Q; };
      const auto column_of = [&](int pixel) { return (part * kPixels + pixel) % TILE_Q; };
      if (params.plan.y_vectors) {
        const int pixel = lane_id * kVector, p = row_of(pixel), q = column_of(pixel);
        const bool exist = p < tile.rows && q < tile.columns;
        Element* to = out + p * of.out_stride[2] + q;
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane, to += of.out_stride[1]) {
          if (exist && first_k + plane < tile.channels)
            *reinterpret_cast<uint4*>(to) =
                *reinterpret_cast<const uint4*>(store.staging + plane * kPlaneBytes + lane_id * 16);
        }
      } else {
#pragma unroll 1
        for (int plane = 0; plane < kPlanes && first_k + plane < tile.channels; ++plane) {
          const Element* const staged = reinterpret_cast<const Element*>(store.staging + plane * kPlaneBytes);
#pragma unroll 1
          for (int pixel = lane_id; pixel < kPixels; pixel += 32) {
            const int p = row_of(pixel), q = column_of(pixel);
            if (p < tile.rows && q < tile.columns)
              out[plane * of.out_stride[1] + p * of.out_stride[2] + q * of.out_stride[3]] = staged[pixel];
          }
        }
      }
    }
  }
}

// -- Multiply: x ring, w ring -> accumulators --
//
// The warpgroups take turns: one multiplies a block of channels for its share of a tile, alone, at the full rate of the
// tensor cores, while the others finish their steps and store. Two of them take the same share of every tile. Three of
// them go round: more time to store, and where memory bounds the whole, more stores on their way.
//
//   shares of a tile (64 channels x 128 columns)   0 | 2        warpgroup   0 1 2 0 | 1 2 0 1 | 2 0 1 2 | 0 1 2 0 | ...
//                                                  --+--        share       0 1 2 3 | 0 1 2 3 | 0 1 2 3 | 0 1 2 3 | ...
//                                                  1 | 3
template <int N>
struct Count {
  static constexpr int kValue = N;
};

template <typename Element, int TILE_Q, int WARPGROUPS>
__device__ __forceinline__ void multiply(const Params& params, const Shared& shared, uint8_t* smem, int warpgroup_id) {
#if defined(MODELNEW_SM90A)
  constexpr int SHARE_Q = share_columns(TILE_Q, WARPGROUPS);
  constexpr int SHARE_P = kTilePixels / TILE_Q;
  constexpr int kShares = shares(WARPGROUPS);
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int lane_id = threadIdx.x % 32;
  const int warp_id = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const bool split_k = plan.tile_k == 128;  // the warpgroups take different channels of the same pixels

  Store store;
  store.staging = smem + shared.layout.staging +
                  warp_id % plan.staging_parts * staging_part_bytes(plan.staged_planes, WARPGROUPS, sizeof(Element));
  store.lane_id = lane_id;

  // In units of 16 bytes, as descriptors count.
  constexpr uint32_t kStep = kWeightStepBytes / 16;
  const uint32_t a_base = hopper::descriptor(shared.w_ring(), kGroupChannels * 16);
  const uint32_t b_base = hopper::descriptor(shared.x_ring(), plan.x_pitch * 16) + plan.lead;
  const uint32_t x_row = x_row_bytes(plan) / 16;
  const int row_steps = of.S * plan.block_steps;
  const uint32_t by_row = reciprocal(row_steps), by_tap = reciprocal(plan.block_steps);
  const uint32_t w_stage = plan.group_steps * kStep;
  const bool streamed = plan.w_stages > 0;
  uint32_t a_share = split_k ? total_steps(of, plan) * kStep : 0;  // from the weights of a share to the next one's
  asm volatile("" : "+r"(a_share));                                // worked out here, once

  const auto release = [&](uint32_t barrier) {
    if (lane_id == 0) hopper::barrier_arrive(barrier);
  };

  float acc[SHARE_P][SHARE_Q / 2];
  RingPosition x_at;  // the first row of the window
  RingPosition w_at;
  uint32_t turn = warpgroup_id == 0 ? 1 : 0, staging_turn = turn;
  const auto groups_of = [&](int steps) {
    return plan.group_steps == steps       ? plan.large_groups
           : plan.group_steps == steps + 1 ? plan.groups - plan.large_groups
                                           : 0;
  };
  const int groups_of_6 = groups_of(6), groups_of_5 = groups_of(5), groups_of_4 = groups_of(4);
  const int groups_of_3 = groups_of(3), groups_of_2 = groups_of(2), groups_of_1 = groups_of(1);
  if (warpgroup_id == 1 && streamed) w_at.advance(plan.w_stages, plan.groups);
  int resident = -1;
  // The record of the tile, in shared memory: read again where it is needed, which is cheaper than to keep it.
  const TileRecord* const records = reinterpret_cast<const TileRecord*>(smem + shared.layout.records);
  const TileRecord* record = records;
  int number = 0;  // of the next tile
  int flags = 0;
  bool enters = true;
  uint32_t next_share = warpgroup_id;
  for (;;) {
    const uint32_t share = WARPGROUPS == 3 ? next_share : warpgroup_id;
    next_share = share + WARPGROUPS;
    const bool leaves = next_share >= kShares;  // the tile, after this share
    // Of two shares one has other channels, or other rows where there are 64 channels.
    const int second = static_cast<int>(share % 2);
    store.first_k = (split_k ? second * kGroupChannels : 0) + 16 * (warp_id % 4);
    store.first_p = split_k ? 0 : second * SHARE_P;
    store.first_q = static_cast<int>(share / 2) * SHARE_Q;
    const int carried = 4 * second + warp_id % 4;
    store.carried = reinterpret_cast<uint4*>(smem + shared.layout.carried + carried * kCarriedBytes) + lane_id;
    float bias[2] = {-0.0f, -0.0f};  // which changes nothing
    uint32_t a = a_base + second * a_share;
    int keep = 0;  // the first step overwrites the accumulators
    for (int block = 0; block < plan.blocks_c; ++block) {
      if (lane_id < plan.x_rows) {
        const bool round = x_at.slot + lane_id >= plan.x_slots;
        hopper::barrier_wait(shared.x_full(x_at.slot + lane_id - (round ? plan.x_slots : 0)), x_at.parity ^ round);
      }
      __syncwarp();
      if (enters) {
        enters = false;
        record = records + number % kRecords;
        ++number;
        flags = record->flags;
        const int weights = record->weights;
        if (!streamed && weights != resident) {
          if (resident >= 0) release(shared.w_empty(0));
          resident = weights;
          hopper::barrier_wait(shared.w_full(0), w_at.parity);
          w_at.next(1);
        }
      }
      if (block == 0 && params.bias_ptr != nullptr) {
        for (int i = 0; i < 2; ++i) {
          const int k = store.first_k + lane_id / 4 + 8 * i;
          if (k < record->channels) bias[i] = widen(static_cast<const Element*>(params.bias_ptr)[record->channel + k]);
        }
      }
      // Lane j works out where step first + j of the block reads.
      int first = 0, in_place = 0;  // steps: of the next group; of those, in `place`
      uint32_t place;
      const auto find_places = [&] {
        const int step = first + lane_id;
        const int r = quotient(step, by_row);
        const int in_row = step - r * row_steps;
        const int s = quotient(in_row, by_tap);
        int slot = x_at.slot + store.first_p + r * of.dilation_h;
        if (slot >= plan.x_slots) slot -= plan.x_slots;
        place = b_base + slot * x_row + store.first_q + s * of.dilation_w +
                (in_row - s * plan.block_steps) * 2 * plan.x_pitch;
        in_place = 0;
      };
      find_places();

      // Groups of COUNT steps and their commit, in straight-line code: in a loop that it does not unroll ptxas commits
      // every wgmma by itself, and to wait for all but the latest group would be to wait for everything. While one
      // group is multiplied the next one has to be issued: what a group costs in instructions decides.
      uint32_t w_done = 0, w_latest = 0;  // barriers to arrive on when the group before the latest, the latest is done
      const auto multiply_groups = [&](auto count, int groups) {
        constexpr int COUNT = decltype(count)::kValue;
        for (int i = 0; i < groups; ++i) {
          if (in_place + COUNT > 32) find_places();
          uint32_t b[COUNT];
#pragma unroll
          for (int j = 0; j < COUNT; ++j) b[j] = __shfl_sync(~0u, place, in_place + j);
          if (streamed) {
            hopper::barrier_wait(shared.w_full(w_at.slot), w_at.parity);
            a = a_base + w_at.slot * w_stage;
          }
          hopper::wgmma_wait<1>();
          if (w_done != 0) release(w_done);

          hopper::wgmma_fence();
#pragma unroll
          for (int j = 0; j < COUNT; ++j) {
#pragma unroll
            for (int row = 0; row < SHARE_P; ++row)
              hopper::Wgmma<Element, SHARE_Q>::multiply(acc[row], a + j * kStep, b[j] + row * x_row, j == 0 ? keep : 1);
          }
          hopper::wgmma_commit();
          keep = 1;
          a += COUNT * kStep;
          first += COUNT;
          in_place += COUNT;
          if (streamed) {
            w_done = w_latest;
            w_latest = shared.w_empty(w_at.slot);
            w_at.next(plan.w_stages);
          }
        }
      };
      hopper::barrier_wait(shared.turn(warpgroup_id), turn);
      turn ^= 1;
      if constexpr (most_group_steps(TILE_Q) >= 4) {
        multiply_groups(Count<6>{}, groups_of_6);
        multiply_groups(Count<5>{}, groups_of_5);
        multiply_groups(Count<4>{}, groups_of_4);
      }
      multiply_groups(Count<3>{}, groups_of_3);
      multiply_groups(Count<2>{}, groups_of_2);
      multiply_groups(Count<1>{}, groups_of_1);
      release(shared.turn(warpgroup_id == WARPGROUPS - 1 ? 0 : warpgroup_id + 1));

      // Rows of the window that the next tile does not need.
      const int drop = flags & TileRecord::kGoesOn ? plan.tile_p : plan.x_rows;
      hopper::wgmma_wait<0>();
      if (w_done != 0) release(w_done);
      if (w_latest != 0) release(w_latest);
      if (lane_id < drop) {
        const int slot = x_at.slot + lane_id;
        hopper::barrier_arrive(shared.x_empty(slot >= plan.x_slots ? slot - plan.x_slots : slot));
      }
      if (leaves) x_at.skip(plan.x_slots, drop);
      if (streamed) w_at.advance(plan.w_stages, plan.groups);  // those of the other warpgroup
    }
#pragma unroll
    for (int row = 0; row < SHARE_P; ++row) hopper::wgmma_settle(acc[row]);

    const TileRecord tile = *record;
    bool rows = true;
    if constexpr (SHARE_P == 1) {
      if (plan.y_runs) {
        rows = false;
        if constexpr (WARPGROUPS == 3) {
          // Another warpgroup stores the share on the left: two a tile, hence the parity.
          hopper::barrier_wait(shared.carried(carried), share / 2 ^ 1);
          store_runs<Element, WARPGROUPS, SHARE_Q>(params, store, tile, bias, acc);
          __syncwarp();  // all lanes have put down what they carry
          release(shared.carried(carried));
        } else {
          const bool shared_staging = plan.staging_parts < 4 * WARPGROUPS;
          if (shared_staging) hopper::barrier_wait(shared.staging_turn(warp_id), staging_turn);
          staging_turn ^= 1;
          store_runs<Element, WARPGROUPS, SHARE_Q>(params, store, tile, bias, acc);
          if (shared_staging) hopper::barrier_arrive(shared.staging_turn(warp_id ^ 4));
        }
      }
    }
    if constexpr (WARPGROUPS == 2) {
      if (rows) store_rows<Element, SHARE_P, SHARE_Q>(params, store, tile, bias, acc);
    }
    if (leaves) {
      if (flags & TileRecord::kLast) break;
      next_share -= kShares;
      enters = true;
    }
  }
#endif
}

template <typename Element, int TILE_Q, int WARPGROUPS>
__global__ void __launch_bounds__(threads(WARPGROUPS), 1) wgmma_kernel(const __grid_constant__ Params params) {
#if defined(MODELNEW_SM90A)
  extern __shared__ __align__(128) unsigned char modelnew_wgmma_smem[];
  const Shared shared{hopper::smem_address(modelnew_wgmma_smem),
                      shared_layout(params.of, params.plan, sizeof(Element))};
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kMaxRows; ++slot) {
      hopper::barrier_init(shared.x_full(slot), params.plan.convert_warps);
      hopper::barrier_init(shared.x_empty(slot), 4 * shares(WARPGROUPS));
    }
    for (int slot = 0; slot < kMaxStages; ++slot) {
      hopper::barrier_init(shared.w_full(slot), 1);
      hopper::barrier_init(shared.w_empty(slot), params.plan.w_stages > 0 ? 4 : 4 * WARPGROUPS);
    }
    for (int warpgroup_id = 0; warpgroup_id < WARPGROUPS; ++warpgroup_id)
      hopper::barrier_init(shared.turn(warpgroup_id), 4);
    for (int warp_id = 0; warp_id < 8; ++warp_id) {
      hopper::barrier_init(shared.staging_turn(warp_id), 32);
      hopper::barrier_init(shared.carried(warp_id), 1);
    }
    hopper::fence_async();  // bulk copies complete on these barriers
    if (params.plan.convert_warps == kServiceWarps)
      copy_resident_weights(params, shared, static_cast<int>(blockIdx.x) % params.plan.tiles_k);
  }
  __syncthreads();  // barriers exist before anybody waits on one

  const int warp_id = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp_id < 4 * WARPGROUPS) {
    if constexpr (WARPGROUPS == 2) hopper::registers_take<kMultiplyRegisters>();
    multiply<Element, TILE_Q, WARPGROUPS>(params, shared, modelnew_wgmma_smem, warp_id / 4);
  } else {
    if constexpr (WARPGROUPS == 2) hopper::registers_give_back<kConvertRegisters>();
    const int service_warp = warp_id - 4 * WARPGROUPS;
    constexpr int kBatch = batch(WARPGROUPS, sizeof(Element));
    if (service_warp >= params.plan.convert_warps) {
      if (threadIdx.x % 32 == 0) copy_weights(params, shared);
    } else if (!params.plan.x_simple) {
      Converter<Element, 1, false, 3, kBatch>(params, shared, modelnew_wgmma_smem, service_warp).run();
    } else if (params.plan.convert_warps == 3) {
      Converter<Element, 2, true, 3, kBatch>(params, shared, modelnew_wgmma_smem, service_warp).run();
    } else {
      Converter<Element, 2, true, 4, kBatch>(params, shared, modelnew_wgmma_smem, service_warp).run();
    }
  }
#endif
}

// ---- Packing ----

constexpr int kPackThreads = 256;

struct PackOperandsParams {
  const void* w_ptr;
  void* packed_ptr;
  Correlation of;
  int tiles_k, blocks_c, block_steps;  // tiles of 64 output channels
  int64_t pieces;
};

// One thread writes one piece of 16 bytes: the channels of one output channel at one tap.
template <typename Element>
__global__ void __launch_bounds__(kPackThreads) pack_operands_kernel(const PackOperandsParams params) {
  constexpr int kChunk = 16 / sizeof(Element);
  const Correlation& of = params.of;
  const int taps = of.R * of.S;
  const int64_t piece = blockIdx.x * static_cast<int64_t>(kPackThreads) + threadIdx.x;
  if (piece >= params.pieces) return;

  // [group][64 channels][block][tap][step of the block][2][channel]
  const int row = static_cast<int>(piece % kGroupChannels);
  int64_t rest = piece / kGroupChannels;
  const int half = static_cast<int>(rest % 2);
  rest /= 2;
  const int step = static_cast<int>(rest % params.block_steps);
  rest /= params.block_steps;
  const int tap = static_cast<int>(rest % taps);
  rest /= taps;
  const int block = static_cast<int>(rest % params.blocks_c);
  rest /= params.blocks_c;
  const int tile = static_cast<int>(rest % params.tiles_k);
  const int group = static_cast<int>(rest / params.tiles_k);
  const int channel = (2 * (block * params.block_steps + step) + half) * kChunk;
  const int r = of.flipped ? of.R - 1 - tap / of.S : tap / of.S;
  const int s = of.flipped ? of.S - 1 - tap % of.S : tap % of.S;
  const int k = tile * kGroupChannels + row;

  const Element* from = static_cast<const Element*>(params.w_ptr) + group * of.w_stride_group + k * of.w_stride_out +
                        channel * of.w_stride_in + r * of.w_stride_r + s * of.w_stride_s;
  Element values[kChunk];
#pragma unroll
  for (int c = 0; c < kChunk; ++c) {
    const bool exists = k < of.out_channels && channel + c < of.in_channels;
    if constexpr (sizeof(Element) == 2)
      values[c].bits = exists ? from[c * of.w_stride_in].bits : 0;
    else
      values[c] = exists ? round_to_tf32(from[c * of.w_stride_in]) : 0.0f;
  }
  uint4 packed;
  memcpy(&packed, values, sizeof packed);
  static_cast<uint4*>(params.packed_ptr)[piece] = packed;
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// ---- Host: what to compute ----

inline Correlation correlation_of(const Problem& problem, Operator op) {
  Correlation of{};
  const int group_c = problem.C / problem.groups, group_k = problem.K / problem.groups;
  of.N = problem.N;
  of.groups = problem.groups;
  of.R = problem.R;
  of.S = problem.S;
  of.dilation_h = problem.dilation_h;
  of.dilation_w = problem.dilation_w;
  of.w_stride_group = group_k * problem.w_stride[0];
  of.w_stride_r = problem.w_stride[2];
  of.w_stride_s = problem.w_stride[3];
  of.flipped = op == Operator::kDgrad;
  if (op == Operator::kDgrad) {
    of.in_channels = group_k;
    of.out_channels = group_c;
    of.H = problem.P;
    of.W = problem.Q;
    of.P = problem.H;
    of.Q = problem.W;
    of.pad_h = problem.dilation_h * (problem.R - 1) - problem.pad_h;
    of.pad_w = problem.dilation_w * (problem.S - 1) - problem.pad_w;
    of.w_stride_out = problem.w_stride[1];
    of.w_stride_in = problem.w_stride[0];
    std::copy_n(problem.y_stride, 4, of.in_stride);
    std::copy_n(problem.x_stride, 4, of.out_stride);
  } else {
    of.in_channels = group_c;
    of.out_channels = group_k;
    of.H = problem.H;
    of.W = problem.W;
    of.P = problem.P;
    of.Q = problem.Q;
    of.pad_h = problem.pad_h;
    of.pad_w = problem.pad_w;
    of.w_stride_out = problem.w_stride[0];
    of.w_stride_in = problem.w_stride[1];
    std::copy_n(problem.x_stride, 4, of.in_stride);
    std::copy_n(problem.y_stride, 4, of.out_stride);
  }
  return of;
}

// ---- Host: how to cut it up ----
//
// Few configurations: four shapes of a tile, two ways to share it. Each is completed, rejected if it does not fit, and
// scored in cycles of an SM; the smallest estimate wins.

constexpr int kShapes[] = {256, 128, 64, 32};  // columns; rows make up 256 pixels

// Bytes a cycle of one SM when all 132 write (H200: 3.7 TB/s in runs of 512 bytes).
constexpr double kWriteBytesPerCycle = 16;
constexpr double kWritePartsPerCycle = 9;  // tiles that are alone in their run, 2.1 TB/s

// Cycles of a warpgroup that stores, and of the converting warps.
constexpr double kStoreCyclesPerByte = 5;
constexpr double kConvertCyclesPerByte = 0.1;

// What an image costs beside its tiles in a unit that runs down, in tiles: the first window has to be filled.
constexpr double kRestartTiles = 0.4;

// Of x, at most, in the window of one tile.
constexpr int kWindowBytes = 52 * 1024;

// wgmma reads both operands from shared memory; narrow ones are bound by that: cycles over those of n = 256, for n of
// kShapes. Estimates.
constexpr double kNarrowCost[] = {1.0, 1.2, 1.5, 2.2};

struct Device {
  int sms;
};

inline int64_t even(int64_t value) { return value + (value & 1); }

// Completes a plan whose tile is chosen; false when it does not fit.
inline bool complete(const Correlation& of, int element_size, const Device& device, int shape, int tile_k, Plan& plan) {
  const int step_channels = kStepBytes / element_size;
  plan.tile_k = tile_k;
  plan.tile_q = kShapes[shape];
  const int group_rows = kTilePixels / plan.tile_q;
  plan.tile_p = tile_k == 64 ? 2 * group_rows : group_rows;
  plan.tiles_p = static_cast<int>(ceil_div(of.P, plan.tile_p));
  plan.tiles_q = static_cast<int>(ceil_div(of.Q, plan.tile_q));
  plan.tiles_k = static_cast<int>(ceil_div(of.out_channels, tile_k));
  if (static_cast<int64_t>(plan.tiles_p) * plan.tiles_q > 1 << 30) return false;

  plan.lead = of.pad_w & 1;
  const int64_t rows = plan.tile_p + (of.R - 1) * static_cast<int64_t>(of.dilation_h);
  // Pixels behind the last column of y may be missing: what is read in their place is not stored.
  const int64_t columns = std::min(plan.tile_q, of.Q);
  const int64_t pitch = even(columns + (of.S - 1) * static_cast<int64_t>(of.dilation_w) + plan.lead);
  if (rows > kMaxRows || pitch > kSharedBytes || rows * pitch * 16 * 2 > kSharedBytes) return false;
  plan.x_rows = static_cast<int>(rows);
  plan.x_pitch = static_cast<int>(pitch);

  // A row of the ring has all channels or, where that does not fit twice, equal blocks of them.
  const int channel_steps = static_cast<int>(ceil_div(of.in_channels, step_channels));
  const int64_t taps = static_cast<int64_t>(of.R) * of.S;
  plan.block_steps = channel_steps;
  if (!plan.down) {
    // All blocks have the same number of steps; some of the last one's may multiply zeros, if few.
    const int64_t most_steps = kWindowBytes / (rows * 2 * pitch * 16);
    plan.block_steps = static_cast<int>(std::max<int64_t>(std::min<int64_t>(most_steps, channel_steps), 1));
    while (ceil_div(channel_steps, plan.block_steps) * plan.block_steps * 16 > channel_steps * 17) --plan.block_steps;
  }
  plan.blocks_c = static_cast<int>(ceil_div(channel_steps, plan.block_steps));
  const int64_t pass_steps = taps * plan.block_steps;
  if (pass_steps >= 1 << 16 || pass_steps * plan.blocks_c * plan.tile_k * kStepBytes > int64_t{1} << 30) return false;
  if (rows * pitch * 32 * plan.block_steps > kSharedBytes) return false;
  plan.x_simple = plan.x_pairs && of.in_channels % (plan.block_steps * step_channels) == 0;
  // Offsets within a fill are 32 bits wide.
  if ((plan.block_steps * step_channels * of.in_stride[1] + rows * of.in_stride[2] + pitch * of.in_stride[3]) *
          element_size >=
      int64_t{1} << 32)
    return false;
  plan.groups = static_cast<int>(ceil_div(pass_steps, most_group_steps(plan.tile_q)));
  plan.group_steps = static_cast<int>(ceil_div(pass_steps, plan.groups));
  plan.large_groups = static_cast<int>(pass_steps - static_cast<int64_t>(plan.groups) * (plan.group_steps - 1));

  // Shared memory: the least of everything, then more in the order of its use.
  const auto fits = [&] { return shared_layout(of, plan, element_size).end <= kSharedBytes; };
  // Where a tile has several rows, its window has to lie in one piece.
  if (plan.down && group_rows > 1) return false;
  const int unit_slots = plan.down ? plan.tile_p : plan.x_rows;
  const int least_slots = plan.down ? plan.x_rows + plan.tile_p : plan.x_rows;
  if (least_slots > kMaxRows) return false;
  plan.x_slots = least_slots;
  // Three warpgroups where they can: a part of staging for each of their warps. All planes of 16 bits have room; where
  // nothing is carried over, and only two warpgroups take turns, two warps share one.
  plan.staged_planes = element_size == 2 && group_rows == 1 && plan.y_runs ? 2 * kPlanes : kPlanes;
  plan.w_stages = 0;
  plan.warpgroups = 3;
  plan.staging_parts = 12;
  if (group_rows > 1 || !plan.y_runs || plan.blocks_c > 1 || !fits()) {
    plan.warpgroups = 2;
    plan.staging_parts = plan.staged_planes == 2 * kPlanes && plan.down ? 4 : 8;
    if (!fits()) plan.w_stages = 4;
    if (!fits()) return false;
  }
  const auto grow = [&](int& count, int by, int most) {
    while (count + by <= most) {
      count += by;
      if (!fits()) {
        count -= by;
        return;
      }
    }
  };
  if (!plan.down) grow(plan.x_slots, unit_slots, std::min(2 * plan.x_rows, kMaxRows));
  if (plan.w_stages > 0) grow(plan.w_stages, 1, 6);
  grow(plan.x_slots, unit_slots, std::min(least_slots + 2 * unit_slots, kMaxRows));
  if (plan.w_stages > 0) grow(plan.w_stages, 1, kMaxStages);
  plan.smem_bytes = shared_layout(of, plan, element_size).end;
  // Units: long runs to store, but all SMs busy to the end. Rows share their input with neighbouring rows: where the
  // rows that all blocks work on do not fit into half of the L2 cache, neighbouring blocks take neighbouring rows.
  plan.y_flat = !plan.down && plan.y_runs && group_rows == 1 && tile_k == 128 && of.out_stride[2] == of.Q;
  const int64_t images = of.N * of.groups;
  const int64_t tiles = images * plan.tiles_p * plan.tiles_q;
  if (tiles * plan.tiles_k > int64_t{1} << 30) return false;
  plan.tiles = static_cast<int>(tiles);
  const auto parts_of = [&](int64_t unit_tiles) {
    return plan.down ? ceil_div(images * plan.tiles_p, unit_tiles) * plan.tiles_q : ceil_div(tiles, unit_tiles);
  };
  const double row_window = static_cast<double>(plan.x_rows) * of.W * of.in_channels * element_size * device.sms;
  // With what it costs to fill the first window of a unit and of each image in it.
  const auto tiles_with_restarts = [&](int64_t unit_tiles) {
    return unit_tiles + (plan.down ? kRestartTiles * ceil_div(unit_tiles, plan.tiles_p) : 0.0);
  };
  double least_tiles = 1e30;
  const auto consider = [&](int64_t unit_tiles) {
    const int64_t rounds = ceil_div(plan.tiles_k * parts_of(unit_tiles), device.sms);
    const double tiles = rounds * tiles_with_restarts(unit_tiles);
    if (tiles < least_tiles * 0.98) {
      least_tiles = tiles;
      plan.unit_tiles = static_cast<int>(unit_tiles);
    }
  };
  if (plan.down) {
    // All lengths that differ, in rows of all images, but not so long that blocks are left without a unit.
    const int64_t rows = images * plan.tiles_p, columns = plan.tiles_k * plan.tiles_q;
    const int64_t least_units = std::min<int64_t>(ceil_div(device.sms, columns), rows);
    for (int64_t tiles = ceil_div(rows, least_units);; tiles = ceil_div(rows, ceil_div(rows, tiles - 1))) {
      consider(tiles);
      if (tiles <= 1) break;
    }
  } else {
    if (plan.y_flat && row_window < 25e6) {
      for (int rounds = 1; rounds <= 4; ++rounds)
        consider(ceil_div(tiles, std::max<int64_t>(rounds * device.sms / plan.tiles_k, 1)));
    }
    consider(plan.tiles_q);
    for (int parts = 2; parts <= plan.tiles_q; parts *= 2) consider(ceil_div(plan.tiles_q, parts));
    consider(1);
  }
  plan.units = static_cast<int>(plan.tiles_k * parts_of(plan.unit_tiles));
  plan.blocks = static_cast<int>(std::min(plan.units, device.sms));
  // Resident weights stay the same where all units of a block have the same output channels.
  if (plan.w_stages == 0 && plan.blocks > plan.tiles_k) plan.blocks -= plan.blocks % plan.tiles_k;
  plan.convert_warps = plan.x_simple && plan.w_stages == 0 && of.groups == 1 && plan.blocks % plan.tiles_k == 0 ? 4 : 3;

  // 256 cycles a step of a whole tile. While one warpgroup stores, another multiplies its last block, or two others do.
  const bool runs = plan.y_flat || (!plan.down && plan.unit_tiles > 1);
  const double multiply = 256.0 * kNarrowCost[shape] * taps * plan.blocks_c * plan.block_steps;
  const double store = kTilePixels * element_size * kStoreCyclesPerByte;
  const double turn = 128.0 * kNarrowCost[shape] * taps * plan.block_steps;
  const double bubble = plan.warpgroups == 3 ? std::max(store / 2 - turn, 0.0) * 4 / 3 : std::max(store - turn, 0.0);
  const double new_rows =
      plan.down ? plan.tile_p + (rows - plan.tile_p) / static_cast<double>(plan.unit_tiles) : static_cast<double>(rows);
  const double convert = kConvertCyclesPerByte * plan.blocks_c * plan.block_steps * 2 * new_rows * pitch * 16;
  const double write = 128.0 * kTilePixels * element_size / (runs ? kWriteBytesPerCycle : kWritePartsPerCycle);
  const double waves = static_cast<double>(ceil_div(plan.units, plan.blocks)) * tiles_with_restarts(plan.unit_tiles);
  plan.cycles = waves * (std::max({multiply + bubble, convert, write}) + 200);
  return true;
}

// The address of a tensor matters by its alignment only; planning without one assumes that of an allocation.
struct Alignment {
  uint64_t in, out;
};

// Sets what the kernel may assume about addresses: true only where it holds for every element it concerns.
inline void set_alignments(const Correlation& of, int element_size, const Alignment& address, Plan& plan) {
  const auto multiples = [&](const int64_t (&stride)[4], int64_t images, int64_t channels, int64_t rows,
                             int64_t of_what) {
    return (images == 1 || stride[0] % of_what == 0) && (channels == 1 || stride[1] % of_what == 0) &&
           (rows == 1 || stride[2] % of_what == 0);
  };
  const int64_t in_channels = static_cast<int64_t>(of.groups) * of.in_channels;
  const int64_t out_channels = static_cast<int64_t>(of.groups) * of.out_channels;
  const bool out_dense = of.out_stride[3] == 1;
  plan.x_pairs = of.in_stride[3] == 1 && of.W % 2 == 0 && address.in % (2 * element_size) == 0 &&
                 multiples(of.in_stride, of.N, in_channels, of.H, 2);
  plan.y_runs = out_dense;
  plan.y_pairs =
      out_dense && address.out % (2 * element_size) == 0 && multiples(of.out_stride, of.N, out_channels, of.P, 2);
  const int vector = 16 / element_size;
  plan.y_vectors = out_dense && of.Q % vector == 0 && address.out % 16 == 0 &&
                   multiples(of.out_stride, of.N, out_channels, of.P, vector);
}

// The best plan, or one of the configurations that tests force by number: shape + 4 * (64 channels a tile) + 8 * down.
constexpr int kConfigurations = 16;

inline bool make_plan(const Correlation& of, int element_size, const Device& device, const Alignment& address,
                      int forced, Plan& best) {
  bool found = false;
  for (int configuration = 0; configuration < kConfigurations; ++configuration) {
    if (forced >= 0 && forced != configuration) continue;
    Plan plan{};
    set_alignments(of, element_size, address, plan);
    plan.down = configuration / 8 != 0;
    if (!complete(of, element_size, device, configuration % 4, configuration / 4 % 2 ? 64 : 128, plan)) continue;
    if (!found || plan.cycles < best.cycles) best = plan;
    found = true;
  }
  return found;
}

// Null, or why not. Without a GPU: the sizes alone decide.
inline const char* refusal_of_problem(const Problem& problem, Operator op) {
  if (op != Operator::kFprop && op != Operator::kDgrad) return "it computes outputs and input gradients only";
  if (problem.dtype == DType::kFloat64) return "it has no float64";
  if (problem.dtype == DType::kFloat32 && !uses_tf32(problem, op))
    return "it multiplies float32 as TF32 only, which this call does not allow";
  if ((problem.stride_h != 1 && problem.P > 1) || (problem.stride_w != 1 && problem.Q > 1))
    return "it takes stride 1 only";
  const Correlation of = correlation_of(problem, op);
  if (of.Q < 32) return "it takes outputs of at least 32 columns";
  if (of.in_channels < 8) return "it takes at least 8 input channels a group";
  if (of.out_channels < 8) return "it takes at least 8 output channels a group";
  return nullptr;
}

inline int current_device(Device& device) {
  int number = 0, major = 0, minor = 0;
  if (cudaGetDevice(&number) != cudaSuccess) return 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, number);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, number);
  cudaDeviceGetAttribute(&device.sms, cudaDevAttrMultiProcessorCount, number);
  return 10 * major + minor;
}

inline bool plan_of(const Problem& problem, Operator op, const Alignment& address, Correlation& of, Plan& plan) {
  Device device{};
  current_device(device);
  of = correlation_of(problem, op);
  return make_plan(of, element_bytes(problem.dtype), device, address, -1, plan);
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (const char* reason = refusal_of_problem(problem, op)) return reason;
  Device device{};
  if (current_device(device) != 90) return "it needs a Hopper GPU (compute capability 9.0)";
  Correlation of{};
  Plan plan{};
  if (!plan_of(problem, op, Alignment{}, of, plan)) return "a tile with its halo does not fit into shared memory";
  return nullptr;
}

inline int64_t packed_bytes(const Correlation& of, const Plan& plan) {
  return static_cast<int64_t>(of.groups) * plan.tiles_k * total_steps(of, plan) * plan.tile_k * kStepBytes;
}

inline int64_t workspace_bytes(const Problem& problem, Operator op) {
  Correlation of{};
  Plan plan{};
  plan_of(problem, op, Alignment{}, of, plan);
  return packed_bytes(of, plan);
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

template <typename Element>
cudaError_t pack_operands(const void* w_ptr, void* packed_ptr, const Correlation& of, const Plan& plan,
                          cudaStream_t stream) {
  PackOperandsParams params{};
  params.w_ptr = w_ptr;
  params.packed_ptr = packed_ptr;
  params.of = of;
  params.tiles_k = plan.tiles_k * (plan.tile_k / kGroupChannels);
  params.blocks_c = plan.blocks_c;
  params.block_steps = plan.block_steps;
  params.pieces = packed_bytes(of, plan) / 16;
  const unsigned blocks = static_cast<unsigned>(ceil_div(params.pieces, kPackThreads));
  pack_operands_kernel<Element><<<blocks, kPackThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <typename Element, int TILE_Q, int WARPGROUPS>
cudaError_t run_kernel(const Params& params, cudaStream_t stream) {
  const auto kernel = wgmma_kernel<Element, TILE_Q, WARPGROUPS>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, params.plan.smem_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<params.plan.blocks, threads(WARPGROUPS), params.plan.smem_bytes, stream>>>(params);
  return cudaGetLastError();
}

template <typename Element>
cudaError_t run(const void* w_ptr, void* workspace, Params& params, cudaStream_t stream) {
  const cudaError_t error = pack_operands<Element>(w_ptr, workspace, params.of, params.plan, stream);
  if (error != cudaSuccess) return error;
  params.packed_ptr = workspace;
  if (params.plan.warpgroups == 3) return run_kernel<Element, 256, 3>(params, stream);
  switch (params.plan.tile_q) {
    case 256:
      return run_kernel<Element, 256, 2>(params, stream);
    case 128:
      return run_kernel<Element, 128, 2>(params, stream);
    case 64:
      return run_kernel<Element, 64, 2>(params, stream);
    default:
      return run_kernel<Element, 32, 2>(params, stream);
  }
}

inline cudaError_t launch(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  Params params{};
  params.in_ptr = op == Operator::kDgrad ? pointers.dy : pointers.x;
  params.bias_ptr = op == Operator::kDgrad ? nullptr : pointers.bias;
  params.out_ptr = pointers.out;
  const Alignment address{reinterpret_cast<uint64_t>(params.in_ptr), reinterpret_cast<uint64_t>(params.out_ptr)};
  if (!plan_of(problem, op, address, params.of, params.plan)) return cudaErrorInvalidConfiguration;
  switch (problem.dtype) {
    case DType::kFloat16:
      return run<Half>(pointers.w, pointers.workspace, params, stream);
    case DType::kBFloat16:
      return run<BFloat16>(pointers.w, pointers.workspace, params, stream);
    default:
      return run<float>(pointers.w, pointers.workspace, params, stream);
  }
}

#endif  // launchers

inline void describe(const Problem& problem, Operator op, char* text, size_t text_size) {
  Correlation of{};
  Plan plan{};
  plan_of(problem, op, Alignment{}, of, plan);
  const int channels = kStepBytes / element_bytes(problem.dtype) * plan.block_steps;
  char weights[64];
  if (plan.w_stages == 0)
    snprintf(weights, sizeof weights, "resident weights");
  else
    snprintf(weights, sizeof weights, "weights in %d stages of %d bytes", plan.w_stages,
             plan.group_steps * kWeightStepBytes);
  snprintf(
      text, text_size,
      "tile of %d channels x %d x %d pixels, %s, %d warpgroups, %d input channels a row of %d, %s, %d bytes of shared "
      "memory, %d blocks, units of %d tiles, about %.3g Mcycles",
      plan.tile_k, plan.tile_p, plan.tile_q, plan.down ? "downwards" : "rightwards", plan.warpgroups, channels,
      plan.x_slots, weights, plan.smem_bytes, plan.blocks, plan.unit_tiles, plan.cycles * 1e-6);
}

#endif  // host

}  // namespace wgmma

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
extern const Engine kWgmmaEngine{"wgmma", wgmma::refusal, wgmma::workspace_bytes, wgmma::launch, wgmma::describe};
#endif

}  // namespace modelnew
