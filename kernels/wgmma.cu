// wgmma engine: implicit GEMM on Hopper's tensor cores, stride 1. Deterministic: one sum an output, in one order.
//
//   pack_operands   w -> the bytes that shared memory wants, in the order in which the main kernel takes them
//   wgmma_kernel    y from x (fprop) and dx from dy (dgrad)
//
// GEMM view: rows = output channels, columns = output pixels, reduction = (channel block, r, s, channel). No im2col:
// the pixels of a tile with its halo lie in shared memory in pieces of 16 bytes (8 channels of 16 bits or 4 of fp32),
//
//   x stage:   [piece][row][pixel] x 16 bytes       w:   [step][2 pieces][tile_k rows] x 16 bytes
//
// and a filter tap (r, s) reads them from r*dilation_h rows and s*dilation_w pixels further on: wgmma takes rows of an
// operand that are 16 bytes apart, so a tap is a shift of its start address. No bank conflicts, no swizzle.
//
// One block an SM, for the life of the launch, 12 warps in three roles:
//
//   warps 0-7    two warpgroups multiply: each 64 channels x 256 pixels in 128 registers a thread, then store them
//   warps 8-10   convert: x from memory in pairs of pixels, rounded (TF32), transposed into the pieces of a stage;
//                pixels of the padding and channels that are not there become 0
//   warp 11      one thread orders bulk copies of packed weights
//
//   memory --convert--> x ring --+
//                                +--> wgmma --> registers --> staging, a part for each warp --> memory
//   packed --bulk copy-> w ring -+
//
// Rings are handed over by mbarriers, and the second warpgroup keeps behind the first (head_start), so that one may
// store while the other keeps the tensor cores busy. Weights that fit as a whole stay in shared memory (`resident`).
//
// Stores: memory wants whole lines of 128 bytes (H200: 3.75 TB/s for 512 bytes a warp from a line boundary on, 2.1 from
// elsewhere, 1.0 from accumulators straight to memory). Rows of y start anywhere, each channel at an alignment of its
// own. Hence a block walks along a row, and from row to row, through a run of tiles that lie one after another in
// memory (a unit), stores whole lines only and carries the unfinished last line of every channel over to the next tile,
// in registers; just the ends of a run are stored by smaller pieces.
//
// Where the time goes: ms, median of 9 calls in a row, H200, 2026-11-20 (bench.py, with a cold cache, reads up to 8%
// more). The first row is this file; rows two to four leave parts of earlier revisions out, which had the same loop
// over the steps (everything: 1.80 / 3.68, 1.15 / 2.29, 0.88 / 1.59). Cases N, C, K, filter, image; fp16 / TF32.
//
//                                   16, 16, 128, 3x3, 1024^2   8, 64, 128, 3x3, 512x1024   8, 64, 128, 5x7, 512x256
//   everything                      1.74 / 3.72                1.13 / 2.35                 0.82 / 1.61
//   without loading x               1.57 / 3.13                1.01 / 1.92                 0.78 / 1.48
//   without storing y               0.98 / 1.97                0.93 / 1.93                 0.79 / 1.43
//   without either                  0.80 / 1.54                0.80 / 1.49                 0.70 / 1.34
//   floor (memory or arithmetic)    1.04 / 2.07                0.68 / 1.32                 0.65 / 1.25
//
// The tensor cores alone come near their rate. What separates the first case from its floor is the time in which a
// warpgroup stores and does not multiply: about 700 instructions a warp at 6 cycles each, waiting for shared memory
// that wgmma keeps busy (62% of its bandwidth), 4000 cycles a tile beside 1150 to 2300 of multiplying; in the second
// the three converting warps as well, at 80 instructions for 8 channels x 32 positions. Tried, and no faster
// (times of the revision in which it was tried):
//
//   16 warps with wgmma of n = 128 (four to convert, three to send bulk copies): 2.85, 1.23 and 0.85 ms in fp16;
//     n = 128 costs nothing by itself, but the storing warps took 1900 cycles for 8 channels x 512 bytes
//   bulk copies ordered by the multiplying warps, eight lanes or one: 90 to 140 cycles each, 2.0, 1.2 and 0.86 ms
//   a thread of a multiplying warp that copies weights: ptxas serialises wgmma (C7520)
//   commits of one, two or five steps in place of three: 1.52, 1.21, 1.31 ms in the second case
//   more or no head start: within 2%; x past the L1 cache: 20% slower in the first case; stores without .cs: 10% slower
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

constexpr int kMultiplyWarps = 8;
constexpr int kConvertWarps = 3;
constexpr int kThreads = 32 * (kMultiplyWarps + kConvertWarps + 1);
// A thread starts with 168 registers: wgmma with n = 256 compiles for no less than 154, so three warpgroups are the
// most.
constexpr int kMultiplyRegisters = 184;
constexpr int kConvertRegisters = 136;
static_assert(2 * 128 * kMultiplyRegisters + 128 * kConvertRegisters <= 65536, "an SM has no more");

constexpr int kTilePixels = 256;  // of a warpgroup: rows x columns
constexpr int kStepBytes = 32;    // of the reduction, for one wgmma: 16 channels of 16 bits or 8 of fp32
constexpr int kLine = 128;        // of the L2 cache: what a store should fill
constexpr int kPlanes = 8;        // output channels that a warp stages at a time

constexpr int kMaxStages = 20;  // of either ring
constexpr int kBarrierBytes = 1024;
constexpr int kSharedBytes = 232448;  // what a block may have on sm_90

// A warp stages 8 planes x 512 bytes at a time, 256 pixels of 16 bits or 128 of 32. A plane takes a line more, for the
// shift of its start; planes are 4 or 8 words apart modulo the 32 banks, so that stores of accumulators, 8 planes x 16
// bytes or 4 planes x 32 bytes at a time, meet little conflict.
constexpr int kPartBytes = 512;
MODELNEW_HOST_DEVICE constexpr int staged_plane_bytes(int element_bytes) {
  return kPartBytes + kLine + (element_bytes == 2 ? 16 : 32);
}

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
  int tiles;                                 // of all images and groups, for one tile of output channels
  int unit_tiles, units;                     // a unit is a run of tiles, row by row and image by image
  int x_rows, x_pitch;                       // a stage: rows and pixels of one piece
  int lead;                                  // unused pixels at the left of a stage, so that pairs of pixels start even
  int x_stages, block_steps, channel_steps;  // steps of the reduction along the channels: of a stage, of all
  int w_stages, group_steps;                 // steps of one bulk copy; no stages: resident
  int head_start;                            // groups of steps by which the first warpgroup keeps ahead of the second
  bool x_pairs;                              // pairs of pixels of 16 bits are aligned in x
  bool y_pairs;                              // pairs of pixels are aligned in y
  bool y_runs;                               // columns of y are neighbours
  bool y_flat;                               // and so are the end of a row and the start of the next
  bool y_vectors;                            // 16-byte pieces of a row are aligned in y
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
  int staging, x_ring, w_ring, end;
};

MODELNEW_HOST_DEVICE inline int total_steps(const Correlation& of, const Plan& plan) {
  return of.R * of.S * plan.channel_steps;
}

MODELNEW_HOST_DEVICE inline int x_piece_bytes(const Plan& plan) { return plan.x_rows * plan.x_pitch * 16; }
MODELNEW_HOST_DEVICE inline int x_stage_bytes(const Plan& plan) { return plan.block_steps * 2 * x_piece_bytes(plan); }
MODELNEW_HOST_DEVICE inline int step_bytes(const Plan& plan) { return plan.tile_k * kStepBytes; }

MODELNEW_HOST_DEVICE inline SharedLayout shared_layout(const Correlation& of, const Plan& plan, int element_bytes) {
  SharedLayout layout{};
  layout.staging = kBarrierBytes;
  layout.x_ring = layout.staging + kMultiplyWarps * kPlanes * staged_plane_bytes(element_bytes);
  layout.x_ring = (layout.x_ring + 127) / 128 * 128;
  layout.w_ring = layout.x_ring + plan.x_stages * x_stage_bytes(plan);
  layout.end =
      layout.w_ring + (plan.w_stages > 0 ? plan.w_stages * plan.group_steps : total_steps(of, plan)) * step_bytes(plan);
  return layout;
}

// ---- The walk: which tiles a block computes, in which order. Every role takes the same one. ----

struct Tile {
  int group, tile_k, n;
  int p, q;                   // its upper left output
  int run_p, run_q;           // where the run began that its rows belong to
  bool run_starts, run_ends;  // nothing carried over from the tile before, to the tile behind
};

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
    bool run_starts = false;
    if (++column == plan.tiles_q) {
      column = 0;
      run_starts = !plan.y_flat;
      if (++row == plan.tiles_p) {
        row = 0;
        run_starts = true;
        if (++tile.n == of.N) {
          tile.n = 0;
          ++tile.group;
        }
      }
    }
    place(plan, run_starts);
  }

 private:
  MODELNEW_HOST_DEVICE void start_unit(const Correlation& of, const Plan& plan) {
    if (unit >= plan.units) return;
    const int part = unit / plan.tiles_k;
    tile.tile_k = unit - part * plan.tiles_k;
    const int first = part * plan.unit_tiles;
    left = plan.unit_tiles < plan.tiles - first ? plan.unit_tiles : plan.tiles - first;
    const int row_of_all = first / plan.tiles_q;
    column = first - row_of_all * plan.tiles_q;
    const int image = row_of_all / plan.tiles_p;
    row = row_of_all - image * plan.tiles_p;
    tile.group = image / static_cast<int>(of.N);
    tile.n = image - tile.group * static_cast<int>(of.N);
    place(plan, true);
  }

  MODELNEW_HOST_DEVICE void place(const Plan& plan, bool run_starts) {
    tile.p = row * plan.tile_p;
    tile.q = column * plan.tile_q;
    tile.run_starts = run_starts;
    tile.run_ends = left == 1 || (column == plan.tiles_q - 1 && (!plan.y_flat || row == plan.tiles_p - 1));
    if (run_starts) {
      tile.run_p = tile.p;
      tile.run_q = tile.q;
    }
  }
};

template <typename Visit>
MODELNEW_HOST_DEVICE inline void for_each_tile(const Correlation& of, const Plan& plan, int block, Visit&& visit) {
  Walk walk;
  for (walk.start(of, plan, block); !walk.done(plan); walk.next(of, plan)) visit(walk.tile);
}

#if defined(__CUDACC__)

// ---- Device code ----

// A place in a ring and the parity of its current round.
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Addresses in shared memory. Barriers of 8 bytes: x_full, x_empty, w_full, w_empty, kMaxStages of each, and the two of
// the head start.
struct Shared {
  uint32_t base;
  SharedLayout layout;

  __device__ __forceinline__ uint32_t x_full(int slot) const { return base + 8 * slot; }
  __device__ __forceinline__ uint32_t x_empty(int slot) const { return base + 8 * (kMaxStages + slot); }
  __device__ __forceinline__ uint32_t w_full(int slot) const { return base + 8 * (2 * kMaxStages + slot); }
  __device__ __forceinline__ uint32_t w_empty(int slot) const { return base + 8 * (3 * kMaxStages + slot); }
  __device__ __forceinline__ uint32_t ahead() const { return base + 8 * (4 * kMaxStages); }
  __device__ __forceinline__ uint32_t behind() const { return base + 8 * (4 * kMaxStages + 1); }
  __device__ __forceinline__ uint32_t x_ring() const { return base + layout.x_ring; }
  __device__ __forceinline__ uint32_t w_ring() const { return base + layout.w_ring; }
};
static_assert((4 * kMaxStages + 2) * 8 <= kBarrierBytes, "room for all barriers");

// -- Convert: memory -> x ring --
//
// A stage is cut into parts of 8 channels (an octet) x 32 positions, which the warps share out. A position, of one
// lane, is two neighbouring pixels (16 bits, where pairs are aligned in x) or one. All lanes of a warp have the
// channels in common, so stepping from one to the next costs them an addition. A warp loads a batch of parts into
// registers while it stores the batch before to shared memory, across stages and tiles: what limits it then is the
// number of its instructions, not the latency of memory.

// One channel of one position; 0 where there is none. In assembly, so that the load stays where it is written and its
// address out of the condition.
template <typename Element, int PIXELS>
__device__ __forceinline__ uint32_t load_position(const uint8_t* address, bool exists) {
  uint32_t word;
  if constexpr (sizeof(Element) * PIXELS == 4) {
    asm volatile(
        "{\n.reg .pred exists;\nsetp.ne.b32 exists, %2, 0;\nmov.b32 %0, 0;\n@exists ld.global.nc.L2::256B.b32 %0, "
        "[%1];\n}"
        : "=r"(word)
        : "l"(address), "r"(static_cast<int>(exists)));
  } else {
    uint16_t half_word;
    asm volatile(
        "{\n.reg .pred exists;\nsetp.ne.b32 exists, %2, 0;\nmov.b16 %0, 0;\n@exists ld.global.nc.b16 %0, [%1];\n}"
        : "=h"(half_word)
        : "l"(address), "r"(static_cast<int>(exists)));
    word = half_word;
  }
  return word;
}

// 16 bytes out of the words of 8 channels. 16 bits: all channels of one pixel, `which` of two if a word holds two.
// fp32: the first or the last four channels, rounded.
template <typename Element, int PIXELS>
__device__ __forceinline__ uint4 piece_of(const uint32_t (&words)[8], int which) {
  if constexpr (sizeof(Element) == 2) {
    const uint32_t select = which == 0 ? 0x5410 : 0x7632;
    return make_uint4(__byte_perm(words[0], words[1], select), __byte_perm(words[2], words[3], select),
                      __byte_perm(words[4], words[5], select), __byte_perm(words[6], words[7], select));
  } else {
    const auto rounded = [&](int c) { return float_bits(round_to_tf32(bits_float(words[4 * which + c]))); };
    return make_uint4(rounded(0), rounded(1), rounded(2), rounded(3));
  }
}

// Parts of a batch, 8 words of registers each: 27 KB are on their way to the three warps. The 26 parts of a stage of 3
// x 258 pixels are one batch of each.
constexpr int kBatch = 9;
constexpr int kFirstHalf = 5;  // of a batch
static_assert(kFirstHalf < kBatch, "two halves");

template <typename Element, int PIXELS>
struct Converter {
  static constexpr int STEP_CHANNELS = kStepBytes / sizeof(Element);
  static constexpr int PIECES = 8 * sizeof(Element) / 16;  // that 8 channels fill
  static_assert(PIXELS == 1 || sizeof(Element) == 2, "a word holds two pixels of 16 bits or one of 32");

  const Params& params;
  const Shared& shared;
  uint8_t* smem;
  int warp_id, lane_id;
  int row_positions, positions, position_parts;
  uint32_t by_octet, by_row;  // ceil(2^32 / position_parts), / row_positions: divide what is < 2^16

  // The batch to load next: parts first, first + kConvertWarps, ... of the stage that starts at channel step `step`.
  Walk walk;
  int step, first;
  int h0, w0;
  const uint8_t* stage_ptr;  // the first pixel of the stage, inside the image or not, in its first channel
  // Where each of its positions lies in x from there on, and a bit that says whether that is inside the image. Where a
  // stage is one batch, this is worked out once, the bits once a tile, and few instructions remain.
  uint32_t offset[kBatch];
  uint32_t inside;

  __device__ __forceinline__ Converter(const Params& params, const Shared& shared, uint8_t* smem, int warp_id)
      : params(params), shared(shared), smem(smem), warp_id(warp_id) {
    const Plan& plan = params.plan;
    lane_id = threadIdx.x % 32;
    row_positions = plan.x_pitch / PIXELS;
    positions = plan.x_rows * row_positions;
    position_parts = (positions + 31) / 32;
    by_octet = 0xffffffffu / position_parts + 1;
    by_row = 0xffffffffu / row_positions + 1;
    walk.start(params.of, plan, blockIdx.x);
    step = 0;
    first = warp_id;
    enter_tile();
    prepare();
    look();
  }

  __device__ __forceinline__ int parts(int at_step) const {
    return min(params.plan.block_steps, params.plan.channel_steps - at_step) * (STEP_CHANNELS / 8) * position_parts;
  }

  __device__ __forceinline__ void enter_tile() {
    const Correlation& of = params.of;
    h0 = walk.tile.p - of.pad_h;
    w0 = walk.tile.q - of.pad_w - params.plan.lead;
    stage_ptr =
        static_cast<const uint8_t*>(params.in_ptr) +
        (walk.tile.n * of.in_stride[0] + static_cast<int64_t>(walk.tile.group) * of.in_channels * of.in_stride[1] +
         h0 * of.in_stride[2] + w0 * of.in_stride[3]) *
            static_cast<int64_t>(sizeof(Element));
  }

  // Part i of the batch.
  struct Position {
    int octet, row, column;
    bool exists;
  };
  __device__ __forceinline__ Position position_of(int i) const {
    const int part = first + i * kConvertWarps;
    const int octet = __umulhi(part, by_octet);
    const int position = (part - octet * position_parts) * 32 + lane_id;
    const int row = __umulhi(position, by_row);
    return {octet, row, PIXELS * (position - row * row_positions), part < parts(step) && position < positions};
  }

  __device__ __forceinline__ void prepare() {
    const Correlation& of = params.of;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const Position at = position_of(i);
      offset[i] = static_cast<uint32_t>(
          (at.octet * 8 * of.in_stride[1] + at.row * of.in_stride[2] + at.column * of.in_stride[3]) * sizeof(Element));
    }
  }

  __device__ __forceinline__ void look() {
    inside = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const Position at = position_of(i);
      const bool is_inside = at.exists && static_cast<unsigned>(h0 + at.row) < static_cast<unsigned>(params.of.H) &&
                             static_cast<unsigned>(w0 + at.column) < static_cast<unsigned>(params.of.W);
      inside |= static_cast<uint32_t>(is_inside) << i;
    }
  }

  // Goes on to the next batch; false when there is none.
  __device__ __forceinline__ bool next() {
    const Plan& plan = params.plan;
    const int before = parts(step);
    first += kBatch * kConvertWarps;
    if (first < before) {
      prepare();
      look();
      return true;
    }
    first = warp_id;
    step += plan.block_steps;
    const bool new_tile = step >= plan.channel_steps;
    if (new_tile) {
      step = 0;
      walk.next(params.of, plan);
      if (walk.done(plan)) return false;
      enter_tile();
    } else {
      stage_ptr += plan.block_steps * STEP_CHANNELS * params.of.in_stride[1] * static_cast<int64_t>(sizeof(Element));
    }
    if (before > kBatch * kConvertWarps || before != parts(step)) {
      prepare();
      look();
    } else if (new_tile) {
      look();
    }
    return true;
  }

  template <bool ALL_CHANNELS, int BEGIN, int END>
  __device__ __forceinline__ void load(uint32_t (&words)[kBatch][8]) const {
    const int64_t channel_bytes = params.of.in_stride[1] * sizeof(Element);
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
      const int octet = ALL_CHANNELS ? 0 : __umulhi(first + i * kConvertWarps, by_octet);
      const int channels = params.of.in_channels - step * STEP_CHANNELS - octet * 8;
      const uint8_t* address = stage_ptr + offset[i];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        words[i][c] = load_position<Element, PIXELS>(address, (inside >> i & 1) && (ALL_CHANNELS || c < channels));
        address += channel_bytes;
        asm("" : "+l"(address));  // one addition a channel; the compiler would rather multiply for each
      }
    }
  }

  template <int BEGIN, int END>
  __device__ __forceinline__ void store(uint8_t* stage, int first_part, int stage_parts,
                                        const uint32_t (&words)[kBatch][8]) const {
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
      const int part = first_part + i * kConvertWarps;
      const int octet = __umulhi(part, by_octet);
      const int position = (part - octet * position_parts) * 32 + lane_id;
      const bool exists = part < stage_parts && position < positions;
      uint4* to = reinterpret_cast<uint4*>(stage) + PIXELS * (octet * PIECES * positions + position);
      // Lanes that write 32 bytes apart: every other four of them start with the second pixel, so that eight lanes meet
      // all banks.
      const int swap = PIXELS == 2 ? lane_id / 4 % 2 : 0;
      const uint4 one = piece_of<Element, PIXELS>(words[i], swap);
      if (exists) to[swap] = one;
      if constexpr (PIXELS * PIECES == 2) {
        const uint4 other = piece_of<Element, PIXELS>(words[i], 1 - swap);
        if (exists) to[PIXELS == 2 ? 1 - swap : positions] = other;
      }
    }
  }

  template <bool ALL_CHANNELS>
  __device__ __forceinline__ void run() {
    const Plan& plan = params.plan;
    RingPosition at;
    uint32_t words[kBatch][8];
    load<ALL_CHANNELS, 0, kFirstHalf>(words);
    load<ALL_CHANNELS, kFirstHalf, kBatch>(words);
    for (bool more = true; more;) {
      // What is in the registers now.
      const int loaded_first = first, loaded_parts = parts(step);
      uint8_t* stage = smem + shared.layout.x_ring + at.slot * x_stage_bytes(plan);
      more = next();
      if (loaded_first == warp_id) hopper::barrier_wait(shared.x_empty(at.slot), at.parity ^ 1);
      // By halves, so that one is on its way while the other is stored.
      store<0, kFirstHalf>(stage, loaded_first, loaded_parts, words);
      if (more) load<ALL_CHANNELS, 0, kFirstHalf>(words);
      store<kFirstHalf, kBatch>(stage, loaded_first, loaded_parts, words);
      if (more) load<ALL_CHANNELS, kFirstHalf, kBatch>(words);
      if (loaded_first + kBatch * kConvertWarps >= loaded_parts) {
        hopper::fence_async();
        __syncwarp();  // all lanes have stored and fenced before one of them tells
        if (lane_id == 0) hopper::barrier_arrive(shared.x_full(at.slot));
        at.advance(plan.x_stages);
      }
    }
  }
};

// -- Copy weights: packed -> w ring, by one thread --

__device__ __forceinline__ void copy_weights(const Params& params, const Shared& shared) {
  constexpr int kPiece = 16384;
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int bytes_of_step = step_bytes(plan);
  const int64_t tile_bytes = static_cast<int64_t>(total_steps(of, plan)) * bytes_of_step;
  RingPosition at;
  int64_t resident = -1;
  for_each_tile(of, plan, blockIdx.x, [&](const Tile& tile) {
    const int64_t wanted = static_cast<int64_t>(tile.group) * plan.tiles_k + tile.tile_k;
    const uint8_t* from = static_cast<const uint8_t*>(params.packed_ptr) + wanted * tile_bytes;
    if (plan.w_stages == 0) {
      if (wanted == resident) return;
      resident = wanted;
      hopper::barrier_wait_idly(shared.w_empty(0), at.parity ^ 1);
      hopper::barrier_arrive_expecting(shared.w_full(0), static_cast<int>(tile_bytes));
      for (int offset = 0; offset < tile_bytes; offset += kPiece) {
        hopper::bulk_load(shared.w_ring() + offset, from + offset, min(kPiece, static_cast<int>(tile_bytes) - offset),
                          shared.w_full(0));
      }
      at.advance(1);
      return;
    }
    for (int step = 0; step < plan.channel_steps; step += plan.block_steps) {
      const int steps = of.R * of.S * min(plan.block_steps, plan.channel_steps - step);
      for (int first = 0; first < steps; first += plan.group_steps) {
        const int bytes = min(plan.group_steps, steps - first) * bytes_of_step;
        hopper::barrier_wait_idly(shared.w_empty(at.slot), at.parity ^ 1);
        hopper::barrier_arrive_expecting(shared.w_full(at.slot), bytes);
        hopper::bulk_load(shared.w_ring() + at.slot * plan.group_steps * bytes_of_step, from, bytes,
                          shared.w_full(at.slot));
        from += bytes;
        at.advance(plan.w_stages);
      }
    }
  });
}

// -- Store: accumulators -> staging -> memory --

// One warp's view of its part of a tile.
struct Store {
  uint8_t* staging;  // of this warp: kPlanes x staged_plane_bytes
  int warp_in_group, lane_id;
  int first_k;  // of this warpgroup in the tile
  int first_p;
};

template <typename Element>
__device__ __forceinline__ void store_pair(Element* to, float first, float second, bool together) {
  if constexpr (sizeof(Element) == 4) {
    if (together) {
      *reinterpret_cast<float2*>(to) = make_float2(first, second);
    } else {
      to[0] = first;
      to[1] = second;
    }
  } else {
    const uint32_t pair = narrow_pair(first, second, Element{});
    if (together) {
      *reinterpret_cast<uint32_t*>(to) = pair;
    } else {
      to[0].bits = static_cast<uint16_t>(pair);
      to[1].bits = static_cast<uint16_t>(pair >> 16);
    }
  }
}

// Of channel k of a group.
template <typename Element>
__device__ __forceinline__ float bias_of(const Params& params, int group, int k) {
  if (params.bias_ptr == nullptr || k >= params.of.out_channels) return 0.0f;
  return widen(static_cast<const Element*>(params.bias_ptr)[group * params.of.out_channels + k]);
}

// Tiles of one row: whole lines, see the top of this file. Eight channels (planes) at a time, by parts of 512 bytes.
// All offsets count bytes from the line in which a part begins in its plane:
//
//              <- line ->                    <- line ->
//   staged:   [carried|new        ...               |new ]
//   stored:   [-----------------  ...  -------------]           the rest is carried over
template <typename Element>
__device__ __forceinline__ void store_runs(const Params& params, const Store& store, const Tile& tile,
                                           const float (&bias)[2], const float (&acc)[1][128], uint4 (&carry)[2][2]) {
  constexpr int kSize = sizeof(Element);
  constexpr int kColumns = kPartBytes / kSize;
  constexpr int kPlaneBytes = staged_plane_bytes(kSize);
  constexpr int kLineMask = ~(kLine - 1);
  const Correlation& of = params.of;
  const int lane_id = store.lane_id;
  const int p = tile.p + store.first_p;
  if (p >= of.P) return;
  const int columns = min(params.plan.tile_q, of.Q - tile.q);
  const int64_t tile_behind = ((tile.p - tile.run_p) * of.out_stride[2] + tile.q - tile.run_q) * kSize;
  const int first_k = store.first_k + 16 * store.warp_in_group;
  const int64_t plane_stride = of.out_stride[1] * kSize;
  const uint64_t tile_address = reinterpret_cast<uint64_t>(params.out_ptr) +
                                (static_cast<int64_t>(tile.n) * of.out_stride[0] +
                                 (static_cast<int64_t>(tile.group) * of.out_channels + first_k) * of.out_stride[1] +
                                 p * of.out_stride[2] + tile.q) *
                                    kSize;

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int planes = min(of.out_channels - first_k - 8 * half, kPlanes);
#pragma unroll
    for (int part = 0; part < kTilePixels / kColumns; ++part) {
      const int bytes = min(columns - part * kColumns, kColumns) * kSize;
      if (bytes <= 0) break;
      const uint64_t address = tile_address + 8 * half * plane_stride + part * kPartBytes;
      // How far back the run reaches, as far as it matters.
      const int run_behind = tile_behind + part * kPartBytes < kLine ? static_cast<int>(tile_behind) : kLine;
      const bool run_starts = tile.run_starts && part == 0;
      const bool run_ends = tile.run_ends && columns <= (part + 1) * kColumns;

      // Four lanes stage a plane; eight at a time take over what is carried of one.
      __syncwarp();  // the part before has been read
      if (!run_starts) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          *reinterpret_cast<uint4*>(store.staging + (4 * i + lane_id / 8) * kPlaneBytes + lane_id % 8 * 16) =
              carry[half][i];
      }
      __syncwarp();  // the carried line ends in bytes that the new pixels overwrite
      const int shift = static_cast<int>(address + lane_id / 4 * plane_stride) & ~kLineMask;
      Element* pixels =
          reinterpret_cast<Element*>(store.staging + lane_id / 4 * kPlaneBytes + shift) + 2 * (lane_id % 4);
      const auto stage = [&](bool pairs, float added) {
#pragma unroll
        for (int i = 0; i < kColumns / 8; ++i) {
          const int j = part * (kColumns / 8) + i;
          store_pair(pixels + 8 * i, acc[0][4 * j + 2 * half] + added, acc[0][4 * j + 2 * half + 1] + added, pairs);
        }
      };
      if (!params.plan.y_pairs)
        stage(false, bias[half]);
      else if (params.bias_ptr != nullptr)
        stage(true, bias[half]);
      else
        stage(true, -0.0f);  // which the compiler leaves out
      __syncwarp();          // all pixels are staged

      // 16 bytes a lane, and some planes at a time: their loads from shared memory are on their way together.
      constexpr int kTogether = kSize == 2 ? 4 : 1;
#pragma unroll
      for (int first_plane = 0; first_plane < kPlanes; first_plane += kTogether) {
#pragma unroll
        for (int first = 0; first < kPartBytes + kLine; first += 32 * 16) {
          // The second round is for what exceeds 512 bytes: at the end of a run only, where less than a line may go.
          if (first == kPartBytes && !run_ends) break;
          uint4 pieces[kTogether];
#pragma unroll
          for (int i = 0; i < kTogether; ++i)
            pieces[i] = *reinterpret_cast<const uint4*>(store.staging + (first_plane + i) * kPlaneBytes + first +
                                                        lane_id % (first == 0 ? 32 : kLine / 16) * 16);
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            const uint64_t begin = address + (first_plane + i) * plane_stride;
            const int begin_offset = static_cast<int>(begin) & ~kLineMask;
            const int end = first_plane + i < planes ? begin_offset + bytes : 0;
            const int store_to = end & (run_ends ? ~15 : kLineMask);
            const int offset = first + lane_id * 16;
            if (offset >= begin_offset - run_behind && offset < store_to)
              __stcs(reinterpret_cast<uint4*>((begin & ~static_cast<uint64_t>(kLine - 1)) + offset), pieces[i]);
          }
          asm volatile("" ::: "memory");  // no further loads ahead: registers are short
        }
      }

      // The ends of a run, element by element: of all planes at once, four lanes each.
      if (run_behind < kLine || run_ends) {
        const uint64_t begin = address + lane_id / 4 * plane_stride;
        const int begin_offset = static_cast<int>(begin) & ~kLineMask;
        const int end = begin_offset + bytes;
        const int store_from = max(begin_offset - run_behind, 0);
        const int store_to = run_ends ? end : end & kLineMask;
        uint8_t* line = reinterpret_cast<uint8_t*>(begin - begin_offset);
        const uint8_t* staged = store.staging + lane_id / 4 * kPlaneBytes;
        const int head_end = min((store_from + 15) & ~15, store_to);
        const int tail_from = max(head_end, store_to & ~15);
#pragma unroll
        for (int i = 0; i < 16; i += 4 * kSize) {
          const int head = store_from + i + lane_id % 4 * kSize, tail = tail_from + i + lane_id % 4 * kSize;
          if (lane_id / 4 < planes && head < head_end)
            *reinterpret_cast<Element*>(line + head) = *reinterpret_cast<const Element*>(staged + head);
          if (lane_id / 4 < planes && tail < store_to)
            *reinterpret_cast<Element*>(line + tail) = *reinterpret_cast<const Element*>(staged + tail);
        }
      }
      if (!run_ends) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int plane = 4 * i + lane_id / 8;
          const int end = (static_cast<int>(address + plane * plane_stride) & ~kLineMask) + bytes;
          carry[half][i] = *reinterpret_cast<const uint4*>(store.staging + plane * kPlaneBytes + (end & kLineMask) +
                                                           lane_id % 8 * 16);
        }
      }
    }
  }
}

// Tiles of several rows, and y of any strides: 16 bytes a lane where rows are aligned, else element by element.
template <typename Element, int TILE_P, int TILE_Q>
__device__ __forceinline__ void store_rows(const Params& params, const Store& store, const Tile& tile,
                                           const float (&bias)[2], const float (&acc)[TILE_P][TILE_Q / 2]) {
  constexpr int kSize = sizeof(Element);
  constexpr int kVector = 16 / kSize;
  constexpr int kPixels = kPartBytes / kSize;
  constexpr int kPlaneBytes = staged_plane_bytes(kSize);
  const Correlation& of = params.of;
  const int lane_id = store.lane_id;
  const int p0 = tile.p + store.first_p;

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first_k = store.first_k + 16 * store.warp_in_group + 8 * half;
#pragma unroll
    for (int part = 0; part < kTilePixels / kPixels; ++part) {
      Element* pixels = reinterpret_cast<Element*>(store.staging + lane_id / 4 * kPlaneBytes) + 2 * (lane_id % 4);
      __syncwarp();  // the part before has been read
#pragma unroll
      for (int i = 0; i < kPixels / 8; ++i) {
        const int row = (part * kPixels + 8 * i) / TILE_Q, j = (part * kPixels + 8 * i) % TILE_Q / 8;
        store_pair(pixels + 8 * i, acc[row][4 * j + 2 * half] + bias[half], acc[row][4 * j + 2 * half + 1] + bias[half],
                   true);
      }
      __syncwarp();  // all pixels are staged
      for (int plane = 0; plane < kPlanes && first_k + plane < of.out_channels; ++plane) {
        const Element* staged = reinterpret_cast<const Element*>(store.staging + plane * kPlaneBytes);
        Element* out = static_cast<Element*>(params.out_ptr) + static_cast<int64_t>(tile.n) * of.out_stride[0] +
                       (static_cast<int64_t>(tile.group) * of.out_channels + first_k + plane) * of.out_stride[1];
        const auto p_of = [&](int pixel) { return p0 + (part * kPixels + pixel) / TILE_Q; };
        const auto q_of = [&](int pixel) { return tile.q + (part * kPixels + pixel) % TILE_Q; };
        if (params.plan.y_vectors) {
          const int pixel = lane_id * kVector, p = p_of(pixel), q = q_of(pixel);
          if (p < of.P && q < of.Q)
            *reinterpret_cast<uint4*>(out + p * of.out_stride[2] + q) = *reinterpret_cast<const uint4*>(staged + pixel);
        } else {
          for (int pixel = lane_id; pixel < kPixels; pixel += 32) {
            const int p = p_of(pixel), q = q_of(pixel);
            if (p < of.P && q < of.Q) out[p * of.out_stride[2] + q * of.out_stride[3]] = staged[pixel];
          }
        }
      }
    }
  }
}

// -- Multiply: x ring, w ring -> accumulators --

template <typename Element, int TILE_Q>
__device__ __forceinline__ void multiply(const Params& params, const Shared& shared, uint8_t* smem, int warpgroup_id) {
#if defined(MODELNEW_SM90A)
  constexpr int TILE_P = kTilePixels / TILE_Q;
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int lane_id = threadIdx.x % 32;
  const int warp_id = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const bool split_k = plan.tile_k == 128;  // the warpgroups take different channels of the same pixels

  Store store;
  store.staging = smem + shared.layout.staging + warp_id * kPlanes * staged_plane_bytes(sizeof(Element));
  store.warp_in_group = warp_id % 4;
  store.lane_id = lane_id;
  store.first_p = split_k ? 0 : warpgroup_id * TILE_P;

  // In units of 16 bytes, as descriptors count.
  const int piece_pixels = plan.x_rows * plan.x_pitch;
  const uint32_t a_base =
      hopper::descriptor(shared.w_ring() + (split_k ? warpgroup_id * 64 * 16 : 0), plan.tile_k * 16);
  const uint32_t b_base =
      hopper::descriptor(shared.x_ring(), piece_pixels * 16) + plan.lead + store.first_p * plan.x_pitch;
  const uint32_t a_step = step_bytes(plan) / 16, b_step = 2 * piece_pixels;
  const uint32_t x_stage = x_stage_bytes(plan) / 16, w_stage = plan.group_steps * a_step;
  const uint32_t row_step = of.dilation_h * plan.x_pitch;

  const auto release = [&](uint32_t barrier) {
    if (lane_id == 0) hopper::barrier_arrive(barrier);
  };

  float acc[TILE_P][TILE_Q / 2];
  RingPosition x_at, w_at;
  uint32_t turn = 0;
  // The unfinished lines of the 16 channels of this warp: each lane has 16 bytes of four of them.
  uint4 carry[2][2] = {};
  int64_t resident = -1;
  for_each_tile(of, plan, blockIdx.x, [&](const Tile& tile) {
    const int64_t wanted = static_cast<int64_t>(tile.group) * plan.tiles_k + tile.tile_k;
    if (plan.w_stages == 0 && wanted != resident) {
      if (resident >= 0) release(shared.w_empty(0));
      resident = wanted;
      hopper::barrier_wait(shared.w_full(0), w_at.parity);
      w_at.advance(1);
    }
    // The second warpgroup starts a tile when the first is `head_start` groups into it. Left alone, both would finish
    // at the same time, since they wait for the same data, and the tensor cores would idle while both store. The first
    // does not run on to the next signal before the second has seen this one: a parity tells just two phases apart.
    int until_signal = -1;
    if (warpgroup_id == 0) {
      until_signal = plan.head_start;
    } else {
      hopper::barrier_wait(shared.ahead(), turn);
      release(shared.behind());
      turn ^= 1;
    }
    store.first_k = tile.tile_k * plan.tile_k + (split_k ? warpgroup_id * 64 : 0);
    const int k = store.first_k + 16 * store.warp_in_group + lane_id / 4;
    const float bias[2] = {bias_of<Element>(params, tile.group, k), bias_of<Element>(params, tile.group, k + 8)};

    uint32_t a = a_base;
    int keep = 0;                     // the first step overwrites the accumulators
    uint32_t x_held = 0, w_held = 0;  // barriers to arrive on when the steps in flight are done, 0: none
    for (int step = 0; step < plan.channel_steps; step += plan.block_steps) {
      const int block_steps = min(plan.block_steps, plan.channel_steps - step);
      const int steps = of.R * of.S * block_steps;
      hopper::barrier_wait(shared.x_full(x_at.slot), x_at.parity);
      uint32_t b_row = b_base + x_at.slot * x_stage;
      uint32_t b = b_row;
      int channel = 0, s = 0;
      for (int first = 0; first < steps; first += plan.group_steps) {
        const int group = min(plan.group_steps, steps - first);
        if (plan.w_stages > 0) {
          hopper::barrier_wait(shared.w_full(w_at.slot), w_at.parity);
          a = a_base + w_at.slot * w_stage;
        }
        hopper::wgmma_fence();
        for (int i = 0; i < group; ++i) {
#pragma unroll
          for (int row = 0; row < TILE_P; ++row) {
            hopper::Wgmma<Element, TILE_Q>::multiply(acc[row], a, b + channel * b_step + row * plan.x_pitch, keep);
          }
          keep = 1;
          a += a_step;
          if (++channel == block_steps) {
            channel = 0;
            b += of.dilation_w;
            if (++s == of.S) {
              s = 0;
              b = b_row += row_step;
            }
          }
        }
        hopper::wgmma_commit();
        if (--until_signal == 0) {
          hopper::barrier_wait(shared.behind(), turn ^ 1);
          release(shared.ahead());
          turn ^= 1;
        }
        // The group before this one is done: what only it read is free.
        hopper::wgmma_wait<1>();
        if (w_held != 0) release(w_held);
        if (x_held != 0) release(x_held);
        x_held = first + group == steps ? shared.x_empty(x_at.slot) : 0;
        if (plan.w_stages > 0) {
          w_held = shared.w_empty(w_at.slot);
          w_at.advance(plan.w_stages);
        }
      }
      x_at.advance(plan.x_stages);
    }
    hopper::wgmma_wait<0>();
    if (w_held != 0) release(w_held);
    release(x_held);
#pragma unroll
    for (int row = 0; row < TILE_P; ++row) hopper::wgmma_settle(acc[row]);

    if constexpr (TILE_P == 1) {
      if (plan.y_runs) {
        store_runs<Element>(params, store, tile, bias, acc, carry);
        return;
      }
    }
    store_rows<Element, TILE_P, TILE_Q>(params, store, tile, bias, acc);
  });
#endif
}

template <typename Element, int TILE_Q>
__global__ void __launch_bounds__(kThreads, 1) wgmma_kernel(const __grid_constant__ Params params) {
#if defined(MODELNEW_SM90A)
  extern __shared__ __align__(128) unsigned char modelnew_wgmma_smem[];
  const Shared shared{hopper::smem_address(modelnew_wgmma_smem),
                      shared_layout(params.of, params.plan, sizeof(Element))};
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kMaxStages; ++slot) {
      hopper::barrier_init(shared.x_full(slot), kConvertWarps);
      hopper::barrier_init(shared.x_empty(slot), kMultiplyWarps);
      hopper::barrier_init(shared.w_full(slot), 1);
      hopper::barrier_init(shared.w_empty(slot), kMultiplyWarps);
    }
    hopper::barrier_init(shared.ahead(), kMultiplyWarps / 2);
    hopper::barrier_init(shared.behind(), kMultiplyWarps / 2);
    hopper::fence_async();  // bulk copies complete on these barriers
  }
  __syncthreads();  // barriers exist before anybody waits on one

  const int warp_id = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp_id < kMultiplyWarps) {
    hopper::registers_take<kMultiplyRegisters>();
    multiply<Element, TILE_Q>(params, shared, modelnew_wgmma_smem, warp_id / 4);
  } else {
    hopper::registers_give_back<kConvertRegisters>();
    if (warp_id == kMultiplyWarps + kConvertWarps) {
      if (threadIdx.x % 32 == 0) copy_weights(params, shared);
    } else {
      const bool all_channels = params.of.in_channels % (kStepBytes / static_cast<int>(sizeof(Element))) == 0;
      const int convert_warp = warp_id - kMultiplyWarps;
      if (sizeof(Element) == 2 && params.plan.x_pairs) {
        Converter<Element, 4 / sizeof(Element)> converter(params, shared, modelnew_wgmma_smem, convert_warp);
        if (all_channels)
          converter.template run<true>();
        else
          converter.template run<false>();
      } else {
        Converter<Element, 1> converter(params, shared, modelnew_wgmma_smem, convert_warp);
        if (all_channels)
          converter.template run<true>();
        else
          converter.template run<false>();
      }
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
  int tile_k, tiles_k, block_steps, channel_steps;
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

  // [group][tile][block][tap][step of the block][2][row]; only the last block may have fewer steps.
  const int row = static_cast<int>(piece % params.tile_k);
  int64_t rest = piece / params.tile_k;
  const int half = static_cast<int>(rest % 2);
  rest /= 2;
  const int total = taps * params.channel_steps;
  const int step = static_cast<int>(rest % total);
  rest /= total;
  const int tile = static_cast<int>(rest % params.tiles_k);
  const int group = static_cast<int>(rest / params.tiles_k);
  const int block = step / (taps * params.block_steps);
  const int in_block = step - block * taps * params.block_steps;
  const int steps = min(params.block_steps, params.channel_steps - block * params.block_steps);
  const int tap = in_block / steps;
  const int channel = (2 * (block * params.block_steps + in_block - tap * steps) + half) * kChunk;
  const int r = of.flipped ? of.R - 1 - tap / of.S : tap / of.S;
  const int s = of.flipped ? of.S - 1 - tap % of.S : tap % of.S;
  const int k = tile * params.tile_k + row;

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

// Steps of one bulk copy and of one commit: 4 x 256 cycles of both warpgroups hide the hand-over.
constexpr int kGroupSteps = 4;

// Steps that one warpgroup multiplies, at full speed, while the other stores.
constexpr int kHeadStartSteps = 12;

// Bytes a cycle of one SM when all 132 write (H200: 3.7 TB/s in runs of 512 bytes).
constexpr double kWriteBytesPerCycle = 16;

// wgmma reads both operands from shared memory; narrow ones are bound by that: cycles over those of n = 256, for n of
// kShapes. Counted from the bytes (10 to 24 KB for the work of one n = 256), not measured.
constexpr double kNarrowCost[] = {1.0, 1.02, 1.1, 1.6};

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

  plan.lead = element_size == 2 ? of.pad_w & 1 : 0;
  const int64_t rows = plan.tile_p + (of.R - 1) * static_cast<int64_t>(of.dilation_h);
  const int64_t pitch = even(plan.tile_q + (of.S - 1) * static_cast<int64_t>(of.dilation_w) + plan.lead);
  if (rows > kSharedBytes || pitch > kSharedBytes || rows * pitch * 16 * 2 * 2 > kSharedBytes) return false;
  plan.x_rows = static_cast<int>(rows);
  plan.x_pitch = static_cast<int>(pitch);

  // A stage: enough steps to hide its hand-over, few enough for three of them.
  plan.channel_steps = static_cast<int>(ceil_div(of.in_channels, step_channels));
  const int64_t taps = static_cast<int64_t>(of.R) * of.S;
  if (taps * plan.channel_steps * tile_k * kStepBytes > int64_t{1} << 30) return false;
  plan.block_steps = 1;
  const auto doubled_fits = [&] { return 2 * x_stage_bytes(plan) <= 40 * 1024; };
  while (plan.block_steps < plan.channel_steps && taps * plan.block_steps < 8 && doubled_fits()) plan.block_steps *= 2;
  plan.block_steps = std::min(plan.block_steps, plan.channel_steps);
  // Offsets within a stage are 32 bits wide.
  if ((plan.block_steps * step_channels * of.in_stride[1] + rows * of.in_stride[2] + pitch * of.in_stride[3]) *
          element_size >=
      int64_t{1} << 32)
    return false;
  const int steps = static_cast<int>(taps * plan.block_steps);
  plan.group_steps = static_cast<int>(ceil_div(steps, ceil_div(steps, kGroupSteps)));

  // Shared memory: the least of everything, then more in the order of its use.
  const auto fits = [&] { return shared_layout(of, plan, element_size).end <= kSharedBytes; };
  plan.x_stages = 2;
  plan.w_stages = 0;
  if (!fits()) plan.w_stages = 3;
  if (!fits()) return false;
  const auto grow = [&](int& count, int most) {
    while (count < most) {
      ++count;
      if (!fits()) {
        --count;
        return;
      }
    }
  };
  if (plan.w_stages > 0) grow(plan.w_stages, 6);
  grow(plan.x_stages, 4);
  if (plan.w_stages > 0) grow(plan.w_stages, kMaxStages);
  const int groups = static_cast<int>(plan.channel_steps / plan.block_steps * ceil_div(steps, plan.group_steps) +
                                      ceil_div(taps * (plan.channel_steps % plan.block_steps), plan.group_steps));
  plan.head_start = std::min(groups, static_cast<int>(ceil_div(kHeadStartSteps, plan.group_steps)));
  // Ahead by no more than the rings hold, or the first warpgroup would wait for what the second still needs.
  const int stage_groups = static_cast<int>(ceil_div(steps, plan.group_steps));
  plan.head_start = std::min(plan.head_start, (plan.x_stages - 1) * stage_groups);
  if (plan.w_stages > 0) plan.head_start = std::max(1, std::min(plan.head_start, plan.w_stages - 3));
  plan.smem_bytes = shared_layout(of, plan, element_size).end;

  // Units: long runs to store, but all SMs busy to the end. Rows share their input with neighbouring rows: where the
  // rows that all blocks work on do not fit into half of the L2 cache, neighbouring blocks take neighbouring rows.
  plan.y_flat = plan.y_runs && group_rows == 1 && tile_k == 128 && of.out_stride[2] == of.Q;
  const int64_t tiles = of.N * of.groups * plan.tiles_p * plan.tiles_q;
  if (tiles * plan.tiles_k > int64_t{1} << 30) return false;
  plan.tiles = static_cast<int>(tiles);
  const double row_window = static_cast<double>(plan.x_rows) * of.W * of.in_channels * element_size * device.sms;
  double least_waste = 1e30;
  const auto consider = [&](int64_t unit_tiles) {
    const int64_t units = plan.tiles_k * ceil_div(tiles, unit_tiles);
    const double waste =
        static_cast<double>(ceil_div(units, device.sms)) * unit_tiles * device.sms / (tiles * plan.tiles_k);
    if (waste < least_waste * 0.98) {
      least_waste = waste;
      plan.unit_tiles = static_cast<int>(unit_tiles);
    }
  };
  if (plan.y_flat && row_window < 25e6) {
    for (int rounds = 1; rounds <= 4; ++rounds)
      consider(ceil_div(tiles, std::max<int64_t>(rounds * device.sms / plan.tiles_k, 1)));
  }
  consider(plan.tiles_q);
  for (int parts = 2; parts <= plan.tiles_q; parts *= 2) consider(ceil_div(plan.tiles_q, parts));
  consider(1);
  plan.units = static_cast<int>(plan.tiles_k * ceil_div(tiles, plan.unit_tiles));
  plan.blocks = static_cast<int>(std::min(plan.units, device.sms));
  // Resident weights stay the same where all units of a block have the same output channels.
  if (plan.w_stages == 0 && plan.blocks > plan.tiles_k) plan.blocks -= plan.blocks % plan.tiles_k;

  // 256 cycles a step of both warpgroups. The other two numbers are estimates, never fitted: cycles a converted byte,
  // and what hand-overs and stores that nothing hides cost a tile.
  const double multiply = 256.0 * kNarrowCost[shape] * taps * plan.channel_steps;
  const double convert = 0.04 * plan.channel_steps * 2 * rows * pitch * 16;
  const double write = 128.0 * kTilePixels * element_size / kWriteBytesPerCycle;
  const double waves = static_cast<double>(ceil_div(plan.units, plan.blocks)) * plan.unit_tiles;
  plan.cycles = waves * (std::max({multiply, convert, write}) + 600);
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
  plan.x_pairs = element_size == 2 && of.in_stride[3] == 1 && of.W % 2 == 0 && address.in % (2 * element_size) == 0 &&
                 multiples(of.in_stride, of.N, in_channels, of.H, 2);
  plan.y_runs = out_dense;
  plan.y_pairs =
      out_dense && address.out % (2 * element_size) == 0 && multiples(of.out_stride, of.N, out_channels, of.P, 2);
  const int vector = 16 / element_size;
  plan.y_vectors = out_dense && of.Q % vector == 0 && address.out % 16 == 0 &&
                   multiples(of.out_stride, of.N, out_channels, of.P, vector);
}

// The best plan, or one of the configurations that tests force by number: shape + 4 * (64 channels a tile).
constexpr int kConfigurations = 8;

inline bool make_plan(const Correlation& of, int element_size, const Device& device, const Alignment& address,
                      int forced, Plan& best) {
  bool found = false;
  for (int configuration = 0; configuration < kConfigurations; ++configuration) {
    if (forced >= 0 && forced != configuration) continue;
    Plan plan{};
    set_alignments(of, element_size, address, plan);
    if (!complete(of, element_size, device, configuration % 4, configuration / 4 ? 64 : 128, plan)) continue;
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
  return static_cast<int64_t>(of.groups) * plan.tiles_k * total_steps(of, plan) * step_bytes(plan);
}

inline int64_t workspace_bytes(const Problem& problem, Operator op) {
  Correlation of{};
  Plan plan{};
  plan_of(problem, op, Alignment{}, of, plan);
  return packed_bytes(of, plan);
}

#if defined(__CUDACC__)

template <typename Element>
cudaError_t pack_operands(const void* w_ptr, void* packed_ptr, const Correlation& of, const Plan& plan,
                          cudaStream_t stream) {
  PackOperandsParams params{};
  params.w_ptr = w_ptr;
  params.packed_ptr = packed_ptr;
  params.of = of;
  params.tile_k = plan.tile_k;
  params.tiles_k = plan.tiles_k;
  params.block_steps = plan.block_steps;
  params.channel_steps = plan.channel_steps;
  params.pieces = packed_bytes(of, plan) / 16;
  const unsigned blocks = static_cast<unsigned>(ceil_div(params.pieces, kPackThreads));
  pack_operands_kernel<Element><<<blocks, kPackThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <typename Element, int TILE_Q>
cudaError_t run_kernel(const Params& params, cudaStream_t stream) {
  const auto kernel = wgmma_kernel<Element, TILE_Q>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, params.plan.smem_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<params.plan.blocks, kThreads, params.plan.smem_bytes, stream>>>(params);
  return cudaGetLastError();
}

template <typename Element>
cudaError_t run(const void* w_ptr, void* workspace, Params& params, cudaStream_t stream) {
  const cudaError_t error = pack_operands<Element>(w_ptr, workspace, params.of, params.plan, stream);
  if (error != cudaSuccess) return error;
  params.packed_ptr = workspace;
  switch (params.plan.tile_q) {
    case 256:
      return run_kernel<Element, 256>(params, stream);
    case 128:
      return run_kernel<Element, 128>(params, stream);
    case 64:
      return run_kernel<Element, 64>(params, stream);
    default:
      return run_kernel<Element, 32>(params, stream);
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
             plan.group_steps * step_bytes(plan));
  snprintf(text, text_size,
           "tile of %d channels x %d x %d pixels, %d input channels a stage of %d, %s, %d bytes of shared memory, "
           "%d blocks, units of %d tiles, about %.3g Mcycles",
           plan.tile_k, plan.tile_p, plan.tile_q, channels, plan.x_stages, weights, plan.smem_bytes, plan.blocks,
           plan.unit_tiles, plan.cycles * 1e-6);
}

#endif  // host

}  // namespace wgmma

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
extern const Engine kWgmmaEngine{"wgmma", wgmma::refusal, wgmma::workspace_bytes, wgmma::launch, wgmma::describe};
#endif

}  // namespace modelnew
