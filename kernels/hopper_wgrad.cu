// hopper_wgrad engine: the weight gradient on Hopper's tensor cores (wgmma), of 16-bit tensors, and of fp32 under the
// TF32 contract or in full accuracy. Any memory format; planes of 16 bits are copied to channels_last first.
// Deterministic: sums are added in a fixed order.
//
//   dw[k, r, s, c] = sum over pixels (n, p, q) of dy[n, p, q, k] * x[n, p*stride_h - pad_h + r*dilation_h, .., c]
//
//   hopper_wgrad_copy_kernel   x or dy in NCHW -> channels_last, where needed
//   hopper_wgrad_kernel        sums over a part of the pixels -> workspace, in fp32
//   hopper_wgrad_add_kernel    sums of all parts -> dw
//
// GEMM: rows = output channels, columns = input channels, for each tap of its own; reduction = pixels. The sums of all
// taps of a tile stay in registers, so that each pixel of dy, and of x, comes from memory once for them.
//
//   x    [chunk of 8 channels][pixel of the window] x 16 bytes: what wgmma reads along columns. A tap is a shift of the
//        start address, by whole slots. At a stride, phases of x lie one behind another
//   dy   [pixel][channel], or [channel][pixel] in fp32; warps bring it to registers
//
//        columns + halo = pitch
//      +-------------+           Rows of outputs lie at the pitch of x. Where dy has no pixel there are zeros, and each
//      | o  o  o  o  | .  .      tap of all pixels of a stage is at one distance. Inf or NaN in the halo makes NaN of
//      | o  o  o  o  | .  .      such a zero: a thread that finds one among its sums takes its products anew.
//      +-------------+ .  .      Steps of wgmma are 16 slots each, through the ends of rows.
//        .  .  .  .    .  .
//
// Blocks of 12 warps:
//
//   warps 0-7   multiply. Tiles of 128 output channels: each of two warpgroups has 64 of them. Tiles of 64: the
//               warpgroups take steps by turns, and each one leaves sums of its own
//   warps 8-11  load, by tables of the stage's pixels: cp.async where bytes stay as they are, else registers
//
// A sum is split after kMostChained pixels, because the tensor core truncates when it adds.
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstdio>

#include "device.cuh"
#include "engines.cuh"
#include "memo.cuh"
#endif

#include "channels_last.cuh"
#include "divisor.cuh"
#include "numerics.cuh"
#include "problem.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "wgmma.cuh"

namespace modelnew {
namespace hopper_wgrad {

// ---- Geometry, host and device ----

constexpr int kStepPixels = 16;
constexpr int kMultiplyingThreads = 256, kLoadingThreads = 128, kThreads = kMultiplyingThreads + kLoadingThreads;
constexpr int kMultiplyingRegisters = 216, kLoadingRegisters = 72;  // per thread, from 168 at launch
static_assert(2 * kMultiplyingRegisters + kLoadingRegisters <= 3 * 168, "no more registers than the block has");
constexpr int kSharedBytes = 232448;
constexpr int kMostStages = 6, kMostAhead = 2;      // kMostAhead: stages under way beside the one that is waited for
[[maybe_unused]] constexpr float kScale = 0x1p24f;  // of either operand in fp32
constexpr int64_t kMostChained = 8192;              // pixels of one sum on the tensor core
constexpr int64_t kMostSumBytes = int64_t{1} << 30;
constexpr int64_t kMostElements = 0x7fffffff;  // from pixel to pixel of a stage
constexpr int kAddThreads = 256;
constexpr int kMostSide = 1 << 10;  // of a window and images of a stage: pack_pixel

// Chunks of eight input channels and taps of a tile, which a kernel is compiled for: as many as have room for sums, in
// full fp32 accuracy for two of each.
struct TileShape {
  int chunks, taps;
};
constexpr TileShape kTileShapes[] = {{4, 9}, {12, 3}, {32, 1}, {1, 25}, {16, 1}, {8, 1}, {2, 9}, {6, 3}, {1, 9}};
constexpr int kTileShapeCount = sizeof kTileShapes / sizeof kTileShapes[0];
constexpr int kMostExact = 18;                       // chunks times taps that have room for two sums
[[maybe_unused]] constexpr int kMostExactSteps = 6;  // of wgmma, whose sums are added to others by ordinary additions

MODELNEW_HOST_DEVICE constexpr bool is_compiled(const TileShape& shape, int parts) {
  const bool exact_only = shape.chunks == 6 || (shape.chunks == 1 && shape.taps == 9);
  return parts == 3 ? shape.chunks * shape.taps <= kMostExact : !exact_only;
}

// How tensors are multiplied: 16 bits as they are; fp32 as the sum of bf16 values, the first and rests: two, with 16
// bits together, for TF32's contract, three for full accuracy. Products of rests that are too small are left out.
template <typename Stored_, typename Operand_, int PARTS_>
struct Format {
  using Stored = Stored_;    // in memory
  using Operand = Operand_;  // of wgmma
  static constexpr int BYTES = sizeof(Stored), PARTS = PARTS_;
};

struct Plan {
  bool copies_x, copies_dy;
  int bytes, parts_of_x;     // of a value in memory; how many values of 16 bits it is multiplied as
  bool dy_rows;              // dy lies as [channel][pixel] in shared memory, otherwise as [pixel][channel]
  bool dy_pieces, x_pieces;  // 16 bytes of a pixel's channels are loaded at once
  int channels;              // of y, of a tile: 128, or 64 of which warpgroups take steps by turns
  TileShape shape;
  int blocks_c, blocks_t, tiles_k;  // tiles along input channels, taps, output channels
  int span_r, span_s;               // rows and columns of taps in a window
  int images, rows, columns;        // outputs of a stage
  int pitch, steps;                 // slots of a row; steps of an image
  int phases_h, phases_w, slots;    // of x; slots of a phase of an image
  int tiles_p, tiles_q, tiles;      // stages of an image, and of all
  int parts, jobs, grid;
  int stages, ahead, dy_pitch, dy_bytes, chunk_bytes, stage_bytes;  // chunk: of x
  int smem_bytes;
  double cycles;
};

struct Params {
  Plan plan;
  const void *x_ptr, *dy_ptr;
  int64_t x_stride[4], dy_stride[4];
  int64_t N;
  int group_c, H, W, group_k, P, Q, R, S;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  float* sums_ptr;  // [part][output channel][tap][input channel], whole tiles
  int64_t rows;     // output channels of those, of all groups
  Divisor by_tiles, by_group_tiles, by_tiles_k, by_blocks_t, by_tiles_p, by_tiles_q, by_pitch, by_slots, by_image_slots,
      by_steps;
};

struct AddParams {
  const float* sums_ptr;
  void* dw_ptr;
  int64_t part, row;  // steps in sums
  int64_t w_stride[4];
  int parts, C, S, row_channels;  // the latter: columns of a tap
  int64_t weights;                // of dw
  int group_padding;              // rows of sums that a group has beyond its channels
  Divisor by_c, by_taps, by_s, by_group_k;
};

// Parts of sums that a part of the pixels has.
MODELNEW_HOST_DEVICE inline int sums_of_part(const Plan& plan) { return plan.channels == 64 ? 2 : 1; }

MODELNEW_HOST_DEVICE inline int row_channels(const Plan& plan) { return plan.blocks_c * plan.shape.chunks * 8; }

// Bytes from row to row of dy, so that what lanes load at once meets all banks: eight pixels of 16 bytes; four pairs of
// pixels and eight channels of fp32; or four channels and pairs of pixels.
MODELNEW_HOST_DEVICE inline int dy_pitch(const Plan& plan) {
  const int pixels = plan.images * plan.steps * kStepPixels;
  return plan.dy_rows ? (pixels + 23) / 32 * 128 + 32 : plan.bytes * plan.channels + 16;
}

MODELNEW_HOST_DEVICE inline int phases_of(const Plan& plan) { return plan.phases_h * plan.phases_w; }

struct Job {
  int group, tile_k, block_c, block_t, part, first_tile, last_tile;
};

// Neighbouring blocks have tiles of the same pixels, which the L2 cache then serves.
MODELNEW_HOST_DEVICE inline Job locate_job(const Params& params, int number) {
  const Plan& plan = params.plan;
  const int part = quotient(number, params.by_tiles);
  const int of_all = number - part * static_cast<int>(params.by_tiles.divisor);
  const int group = quotient(of_all, params.by_group_tiles);
  const int tile = of_all - group * static_cast<int>(params.by_group_tiles.divisor);
  const int column = quotient(tile, params.by_tiles_k), block_c = quotient(column, params.by_blocks_t);
  return {group,
          tile - column * plan.tiles_k,
          block_c,
          column - block_c * plan.blocks_t,
          part,
          static_cast<int>(static_cast<int64_t>(part) * plan.tiles / plan.parts),
          static_cast<int>(static_cast<int64_t>(part + 1) * plan.tiles / plan.parts)};
}

// The first output of a stage.
struct Place {
  int64_t n;
  int p, q;
};

MODELNEW_HOST_DEVICE inline Place locate_tile(const Params& params, int tile) {
  const Plan& plan = params.plan;
  const int row = quotient(tile, params.by_tiles_q), image = quotient(row, params.by_tiles_p);
  return {int64_t{image} * plan.images, (row - image * plan.tiles_p) * plan.rows,
          (tile - row * plan.tiles_q) * plan.columns};
}

// The first tap whose pixels the window of a block of taps has.
struct Tap {
  int r, s;
};

MODELNEW_HOST_DEVICE inline Tap first_tap(const Params& params, int block_t) {
  const int tap = block_t * params.plan.shape.taps, r = tap / params.S;
  return {r, params.plan.span_s == params.S ? 0 : tap - r * params.S};
}

// The slot of x, in a stage, of the first output's tap: in which phase, and how far.
MODELNEW_HOST_DEVICE inline int slot_of_tap(const Params& params, const Tap& first, int tap) {
  const Plan& plan = params.plan;
  const int r = tap / params.S, s = tap - r * params.S;
  const int h = (r - first.r) * params.dilation_h, w = (s - first.s) * params.dilation_w;
  const int phase = h % params.stride_h * plan.phases_w + w % params.stride_w;
  return phase * plan.slots + h / params.stride_h * plan.pitch + w / params.stride_w;
}

// A pixel of a stage: image, row and column, from the first output's on. Negative if there is none.
MODELNEW_HOST_DEVICE inline int pack_pixel(int image, int row, int column) {
  return (image << 20) + (row << 10) + column;
}

MODELNEW_HOST_DEVICE inline int dy_pixel(const Params& params, int number) {
  const Plan& plan = params.plan;
  const int step = number / kStepPixels, image = quotient(step, params.by_steps);
  const int slot = number - image * plan.steps * kStepPixels, row = quotient(slot, params.by_pitch);
  const int column = slot - row * plan.pitch;
  return row < plan.rows && column < plan.columns ? pack_pixel(image, row, column) : -1;
}

MODELNEW_HOST_DEVICE inline int x_pixel(const Params& params, int number) {
  const Plan& plan = params.plan;
  const int image = quotient(number, params.by_image_slots);
  number -= image * static_cast<int>(params.by_image_slots.divisor);
  const int phase = quotient(number, params.by_slots), slot = number - phase * plan.slots;
  const int row = quotient(slot, params.by_pitch), column = slot - row * plan.pitch;
  const int phase_h = phase / plan.phases_w;
  if (row >= plan.rows + (plan.span_r - 1) * params.dilation_h / params.stride_h) return -1;  // behind the window
  return pack_pixel(image, row * params.stride_h + phase_h, column * params.stride_w + phase - phase_h * plan.phases_w);
}

// Of a block: stages first, [dy][x] each, then tables of pixels, then barriers.
struct SharedLayout {
  int dy_table, x_table, barriers, end;
};

MODELNEW_HOST_DEVICE inline SharedLayout shared_layout(const Plan& plan) {
  SharedLayout layout{};
  layout.dy_table = plan.stages * plan.stage_bytes;
  layout.x_table = layout.dy_table + plan.images * plan.steps * kStepPixels * 8;
  layout.barriers = layout.x_table + plan.images * phases_of(plan) * plan.slots * 8;
  layout.end = layout.barriers + 16 * kMostStages;
  return layout;
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// ---- Device code ----

struct Shared {
  uint32_t base;
  SharedLayout layout;

  __device__ __forceinline__ uint32_t full(int stage) const { return base + layout.barriers + 16 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return base + layout.barriers + 16 * stage + 8; }
};

// A pixel's number and distance from the first output's, in the tensor.
struct Entry {
  int packed, offset;
};

template <typename PixelOf>
__device__ __forceinline__ void fill_table(uint8_t* smem, int count, const int64_t (&stride)[4], const PixelOf& of) {
  Entry* const table = reinterpret_cast<Entry*>(smem);
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int packed = of(i);
    const int64_t offset = (packed >> 20) * stride[0] + (packed >> 10 & 1023) * stride[2] + (packed & 1023) * stride[3];
    table[i] = {packed, packed < 0 ? 0 : static_cast<int>(offset)};
  }
}

__device__ __forceinline__ int loading_thread() { return static_cast<int>(threadIdx.x) - kMultiplyingThreads; }

// Copies `pieces` pieces of BYTES bytes of the channels of each pixel of a table; what does not exist becomes zeros.
template <int BYTES, typename Stored, typename To, typename Exists>
__device__ __forceinline__ void copy_pixels(const Entry* table, int count, int pieces, const Stored* first,
                                            int64_t channel_step, int channels_left, const To& to,
                                            const Exists& exists) {
  constexpr int VALUES = BYTES / static_cast<int>(sizeof(Stored));
  const int piece = loading_thread() % pieces;
  const Stored* const own = first + piece * VALUES * channel_step;
  const bool has_channel = piece * VALUES < channels_left;
#pragma unroll 1
  for (int i = loading_thread() / pieces; i < count; i += kLoadingThreads / pieces) {
    const Entry entry = table[i];
    const bool copied = has_channel & (entry.packed >= 0) & exists(entry.packed);
    hopper::copy_async<BYTES>(to(i, piece), copied ? own + entry.offset : first, copied ? BYTES : 0);
  }
}

// The same of fp32 to rows of pixels; neighbouring threads have neighbouring pixels.
template <typename Exists>
__device__ __forceinline__ void copy_rows(const Entry* table, int count, int channels, const float* first,
                                          int64_t channel_step, int channels_left, uint32_t to, int pitch,
                                          const Exists& exists) {
#pragma unroll 1
  for (int i = loading_thread(); i < count; i += kLoadingThreads) {
    const Entry entry = table[i];
    const bool copied = (entry.packed >= 0) & exists(entry.packed);
    const float* from = first + (copied ? entry.offset : 0);
    uint32_t at = to + 4 * i;
#pragma unroll 8
    for (int k = 0; k < channels; ++k, from += channel_step, at += pitch)
      hopper::copy_async<4>(at, from, copied & (k < channels_left) ? 4 : 0);
  }
}

// The same of 16 bits one by one, in pairs of channels to [pixel][channel].
template <typename Exists>
__device__ __forceinline__ void copy_values(const Entry* table, int count, int channels, const uint16_t* first,
                                            int64_t channel_step, int channels_left, uint32_t to, int pitch,
                                            const Exists& exists) {
  constexpr int BATCH = 8;  // pairs whose loads are under way
  const int pairs = channels / 2, all = count * pairs;
#pragma unroll 1
  for (int number = loading_thread(); number < all; number += BATCH * kLoadingThreads) {
    uint32_t low[BATCH], high[BATCH], place[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const int own = number + j * kLoadingThreads;
      const int pair = channel_step == 1 ? own % pairs : own / count;
      const int i = channel_step == 1 ? own / pairs : own - pair * count;
      const Entry entry = own < all ? table[i] : Entry{-1, 0};
      const bool loaded = (entry.packed >= 0) & exists(entry.packed);
      const uint16_t* const from = first + (loaded ? entry.offset + 2 * pair * channel_step : 0);
      hopper::load_2(from, loaded & (2 * pair < channels_left), low[j]);
      hopper::load_2(from + channel_step, loaded & (2 * pair + 1 < channels_left), high[j]);
      place[j] = own < all ? to + i * pitch + pair * 4 : 0;
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j)
      if (place[j] != 0) hopper::store_shared(place[j], low[j] | high[j] << 16);
  }
}

// Two neighbours as pairs of bf16, of which parts[i][at] are the i-th. Both operands are scaled, as otherwise bf16
// would lack the smallest numbers; what then becomes too large is found among the sums.
template <int PARTS>
__device__ __forceinline__ void split(float low, float high, uint32_t (&parts)[PARTS][4], int at) {
  low *= kScale;
  high *= kScale;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    parts[i][at] = narrow_pair(low, high, BFloat16{});
    low -= bits_float(parts[i][at] << 16);
    high -= bits_float(parts[i][at] & 0xffff0000u);
  }
}

// Brings pixels of x to chunks of eight channels, fp32 in parts. Neighbouring threads have neighbouring chunks, SIDE of
// them, or neighbouring pixels.
template <typename Format, int CHUNKS, typename Exists>
__device__ __forceinline__ void pack_pixels(const Entry* table, int count, const Plan& plan,
                                            const typename Format::Stored* first, int64_t channel_step,
                                            int channels_left, uint32_t to, const Exists& exists) {
  constexpr int BATCH = 2, PARTS = Format::PARTS, SIDE = CHUNKS & -CHUNKS;  // BATCH: pieces whose loads are under way
  uint32_t words[BATCH][2][4], place[BATCH];                                // words: a value each
  const auto load_piece = [&](int j, const Entry& entry, int i, int chunk, bool is_piece) {
    const bool loaded = is_piece && entry.packed >= 0 && exists(entry.packed);
    const auto* const from = first + (loaded ? entry.offset + 8 * chunk * channel_step : 0);
    place[j] = is_piece ? to + chunk * plan.chunk_bytes + i * 16 : 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const bool exist = loaded & (8 * chunk + c < channels_left);
      uint32_t& word = words[j][c / 4][c % 4];
      if constexpr (Format::BYTES == 2)
        hopper::load_2(from + c * channel_step, exist, word);
      else if (!plan.x_pieces)
        hopper::load_4(from + c * channel_step, exist, word);
      else if (c % 4 == 0)
        hopper::load_words(from + c, exist, words[j][c / 4]);
    }
  };
  const auto store_pieces = [&] {
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      uint32_t parts[PARTS][4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const uint32_t low = words[j][c / 2][c % 2 * 2], high = words[j][c / 2][c % 2 * 2 + 1];
        if constexpr (Format::BYTES == 2)
          parts[0][c] = low | high << 16;
        else
          split(bits_float(low), bits_float(high), parts, c);
      }
      if (place[j] == 0) continue;
#pragma unroll
      for (int i = 0; i < PARTS; ++i) hopper::store_shared_4(place[j] + i * CHUNKS * plan.chunk_bytes, parts[i]);
    }
  };
  if (channel_step == 1) {
    constexpr int STEP = kLoadingThreads / SIDE;
#pragma unroll 1
    for (int chunk = loading_thread() % SIDE; chunk < CHUNKS; chunk += SIDE)
#pragma unroll 1
      for (int i = loading_thread() / SIDE; i < count; i += BATCH * STEP) {
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
          const int own = i + j * STEP;
          load_piece(j, own < count ? table[own] : Entry{-1, 0}, own, chunk, own < count);
        }
        store_pieces();
      }
  } else {
#pragma unroll 1
    for (int i = loading_thread(); i < count; i += kLoadingThreads) {
      const Entry entry = table[i];
#pragma unroll 1
      for (int chunk = 0; chunk < CHUNKS; chunk += BATCH) {
#pragma unroll
        for (int j = 0; j < BATCH; ++j) load_piece(j, entry, i, chunk + j, chunk + j < CHUNKS);
        store_pieces();
      }
    }
  }
}

template <typename Format, int CHUNKS>
__device__ __forceinline__ void load(const Params& params, const Shared& shared, const uint8_t* smem) {
  using Stored = typename Format::Stored;
  const Plan& plan = params.plan;
  const Entry* const dy_table = reinterpret_cast<const Entry*>(smem + shared.layout.dy_table);
  const Entry* const x_table = reinterpret_cast<const Entry*>(smem + shared.layout.x_table);
  const int dy_pixels = plan.images * plan.steps * kStepPixels;
  const int x_pixels = plan.images * phases_of(plan) * plan.slots;
  constexpr int SIDE = CHUNKS & -CHUNKS;  // chunks side by side, a power of 2
  hopper::wait_for_prerequisites();
  RingPosition ring, ready;
  int under_way = 0;
  const auto hand_over = [&] {
    hopper::fence_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) hopper::barrier_arrive(shared.full(ready.slot));
    ready.next(plan.stages);
  };
#pragma unroll 1
  for (int number = blockIdx.x; number < plan.jobs; number += gridDim.x) {
    const Job job = locate_job(params, number);
    const int of_group_k = job.tile_k * plan.channels, of_group_c = job.block_c * CHUNKS * 8;
    const int first_k = job.group * params.group_k + of_group_k, first_c = job.group * params.group_c + of_group_c;
    const Tap tap = first_tap(params, job.block_t);
    const int k_left = params.group_k - of_group_k, c_left = params.group_c - of_group_c;
#pragma unroll 1
    for (int tile = job.first_tile; tile < job.last_tile; ++tile) {
      const Place at = locate_tile(params, tile);
      const int images = params.N - at.n < plan.images ? static_cast<int>(params.N - at.n) : plan.images;
      const int first_h = at.p * params.stride_h - params.pad_h + tap.r * params.dilation_h;
      const int first_w = at.q * params.stride_w - params.pad_w + tap.s * params.dilation_w;
      const Stored* const dy =
          static_cast<const Stored*>(params.dy_ptr) + (at.n * params.dy_stride[0] + first_k * params.dy_stride[1] +
                                                       at.p * params.dy_stride[2] + at.q * params.dy_stride[3]);
      const Stored* const x =
          static_cast<const Stored*>(params.x_ptr) + (at.n * params.x_stride[0] + first_c * params.x_stride[1] +
                                                      first_h * params.x_stride[2] + first_w * params.x_stride[3]);
      const auto dy_exists = [&](int packed) {
        return (packed >> 20 < images) & (at.p + (packed >> 10 & 1023) < params.P) &
               (at.q + (packed & 1023) < params.Q);
      };
      const auto x_exists = [&](int packed) {
        return (packed >> 20 < images) & is_within(first_h + (packed >> 10 & 1023), params.H) &
               is_within(first_w + (packed & 1023), params.W);
      };
      hopper::barrier_wait(shared.empty(ring.slot), ring.parity ^ 1);
      const uint32_t stage = shared.base + ring.slot * plan.stage_bytes, x_stage = stage + plan.dy_bytes;
      const auto dy_place = [&](int i, int piece) { return stage + i * plan.dy_pitch + piece * 16; };
      if (plan.dy_pieces) {
        copy_pixels<16>(dy_table, dy_pixels, plan.channels * Format::BYTES / 16, dy, 1, k_left, dy_place, dy_exists);
      } else if constexpr (Format::BYTES == 2) {
        copy_values(dy_table, dy_pixels, plan.channels, reinterpret_cast<const uint16_t*>(dy), params.dy_stride[1],
                    k_left, stage, plan.dy_pitch, dy_exists);
      } else if (plan.dy_rows) {
        copy_rows(dy_table, dy_pixels, plan.channels, dy, params.dy_stride[1], k_left, stage, plan.dy_pitch, dy_exists);
      } else {
        copy_pixels<4>(
            dy_table, dy_pixels, plan.channels, dy, params.dy_stride[1], k_left,
            [&](int i, int piece) { return stage + i * plan.dy_pitch + piece * 4; }, dy_exists);
      }
      if (Format::BYTES == 2 && plan.x_pieces) {
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; chunk += SIDE)
          copy_pixels<16>(
              x_table, x_pixels, SIDE, x + 8 * chunk, 1, c_left - 8 * chunk,
              [&](int i, int piece) { return x_stage + (chunk + piece) * plan.chunk_bytes + i * 16; }, x_exists);
      } else {
        pack_pixels<Format, CHUNKS>(x_table, x_pixels, plan, x, params.x_stride[1], c_left, x_stage, x_exists);
      }
      hopper::copies_commit();
      ring.next(plan.stages);
      if (++under_way > plan.ahead) {
        if (plan.ahead == 2)
          hopper::copies_wait<2>();
        else
          hopper::copies_wait<1>();
        hand_over();
      }
    }
  }
  hopper::copies_wait<0>();
  for (int i = under_way < plan.ahead ? under_way : plan.ahead; i > 0; --i) hand_over();
}

// All products of one sum of a job, one by one, padding and all.
template <typename Stored>
__device__ inline float exact_sum(const Params& params, const Job& job, int turns, int own_turn, int k, int c,
                                  int tap) {
  const Plan& plan = params.plan;
  const int r = tap / params.S, s = tap - r * params.S;
  const Stored* const x =
      static_cast<const Stored*>(params.x_ptr) + (job.group * params.group_c + c) * params.x_stride[1];
  const Stored* const dy =
      static_cast<const Stored*>(params.dy_ptr) + (job.group * params.group_k + k) * params.dy_stride[1];
  double sum = 0;
  int step = -1;
#pragma unroll 1
  for (int tile = job.first_tile; tile < job.last_tile; ++tile) {
    const Place at = locate_tile(params, tile);
#pragma unroll 1
    for (int i = 0; i < plan.images * plan.steps * kStepPixels; ++i) {
      if (i % kStepPixels == 0) ++step;
      const int packed = dy_pixel(params, i);
      const int p = at.p + (packed >> 10 & 1023), q = at.q + (packed & 1023);
      const int64_t n = at.n + (packed >> 20);
      if (step % turns != own_turn || packed < 0 || n >= params.N || p >= params.P || q >= params.Q) continue;
      const int h = p * params.stride_h - params.pad_h + r * params.dilation_h;
      const int w = q * params.stride_w - params.pad_w + s * params.dilation_w;
      const Stored value = load_if(is_within(h, params.H) && is_within(w, params.W),
                                   x + (n * params.x_stride[0] + h * params.x_stride[2] + w * params.x_stride[3]));
      sum +=
          static_cast<double>(widen(dy[n * params.dy_stride[0] + p * params.dy_stride[2] + q * params.dy_stride[3]])) *
          widen(value);
    }
  }
  return static_cast<float>(sum);
}

// A step's 16 channels of a warp and 16 pixels of dy, as wgmma takes them, in parts. `address` is of the lane.
template <typename Format>
__device__ __forceinline__ void load_dy(const Plan& plan, uint32_t address, uint32_t (&a)[Format::PARTS][4]) {
  if constexpr (Format::BYTES == 2) {
    hopper::load_matrix_transposed(a[0], address);
  } else {
    uint32_t words[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int channel = i % 2 * 8, pixel = i / 2 * 8;
      if (plan.dy_rows) {
        hopper::load_shared_2(words[i], address + channel * plan.dy_pitch + pixel * 4);
      } else {
        const uint32_t from = address + pixel * plan.dy_pitch + channel * 4;
        hopper::load_shared(words[i][0], from);
        hopper::load_shared(words[i][1], from + plan.dy_pitch);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) split(bits_float(words[i][0]), bits_float(words[i][1]), a, i);
  }
}

template <typename Format, int CHUNKS, int TAPS>
__device__ __forceinline__ void multiply(const Params& params, const Shared& shared) {
  constexpr int COLUMNS = 8 * CHUNKS, PARTS = Format::PARTS;
  using Stored = typename Format::Stored;
  const Plan& plan = params.plan;
  const int warpgroup = hopper::uniform(threadIdx.x / 128);
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const bool by_turns = plan.channels == 64;
  const int turns = by_turns ? 2 : 1, pitch = plan.dy_pitch, steps = plan.images * plan.steps;
  const int own_channel = (by_turns ? 0 : 64 * warpgroup) + 16 * warp;
  const uint32_t own_dy = Format::BYTES == 2 ? (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 16 + 2 * own_channel
                          : plan.dy_rows     ? (own_channel + lane / 4) * pitch + lane % 4 * 8
                                             : lane % 4 * 2 * pitch + (own_channel + lane / 4) * 4;
  const uint32_t step_bytes = kStepPixels * (plan.dy_rows ? 4 : pitch);
  const uint32_t high = plan.chunk_bytes / 16, part = CHUNKS * high;  // part: slots from part to part of x
  hopper::wait_for_prerequisites();                                   // a preceding kernel may still read the workspace
  RingPosition ring;
#pragma unroll 1
  for (int number = blockIdx.x; number < plan.jobs; number += gridDim.x) {
    const Job job = locate_job(params, number);
    uint32_t tap_slots[TAPS];
#pragma unroll
    for (int t = 0; t < TAPS; ++t) {
      const int tap = job.block_t * TAPS + t, taps = params.R * params.S;
      tap_slots[t] = slot_of_tap(params, first_tap(params, job.block_t), tap < taps ? tap : taps - 1);
    }
    float acc[TAPS][COLUMNS / 2];
    int keep = 0;
    hopper::wgmma_start(acc);
    // Full accuracy: sums of chains of few steps, which ordinary additions add.
    [[maybe_unused]] float sums[PARTS == 3 ? TAPS : 1][PARTS == 3 ? COLUMNS / 2 : 1] = {};
    int chained = 0;
    const auto end_chain = [&] {
      if constexpr (PARTS == 3) {
#pragma unroll
        for (int t = 0; t < TAPS; ++t)
#pragma unroll
          for (int i = 0; i < COLUMNS / 2; ++i) sums[t][i] += keep != 0 ? acc[t][i] : 0;
        keep = chained = 0;
      }
    };
    int turn = by_turns ? warpgroup : 0;  // steps until the warpgroup's next one
#pragma unroll 1
    for (int tile = job.first_tile; tile < job.last_tile; ++tile, ring.next(plan.stages)) {
      hopper::barrier_wait(shared.full(ring.slot), ring.parity);
      const uint32_t a_stage = shared.base + ring.slot * plan.stage_bytes;
      const uint32_t b_stage = hopper::descriptor(a_stage + plan.dy_bytes, 128);
      int step = turn;
#pragma unroll 1
      for (; step < steps; step += turns) {
        if (PARTS == 3 && chained++ == kMostExactSteps) end_chain();
        const int image = quotient(step, params.by_steps), of_image = step - image * plan.steps;
        uint32_t a[PARTS][4];
        load_dy<Format>(plan, a_stage + own_dy + step * step_bytes, a);
        const uint32_t b = b_stage + image * static_cast<int>(params.by_image_slots.divisor) + of_image * kStepPixels;
        hopper::wgmma_fence();
        // The smallest products first; the taps in turn, as an instruction waits for the one before on the same sums.
#pragma unroll
        for (int order = PARTS - 1; order >= 0; --order)
#pragma unroll
          for (int i = order; i >= 0; --i)
#pragma unroll
            for (int t = 0; t < TAPS; ++t)
              hopper::WgmmaRegistersTransposed<typename Format::Operand, COLUMNS>::multiply(
                  acc[t], a[i], b + tap_slots[t] + (order - i) * part, order == PARTS - 1 && i == order ? keep : 1,
                  high);
        hopper::wgmma_commit();
        // The other warpgroup's products keep the tensor cores busy until this one has its next operands.
        hopper::wgmma_wait<0>();
#pragma unroll
        for (int t = 0; t < TAPS; ++t) hopper::wgmma_settle(acc[t]);
        keep = 1;
      }
      turn = step - steps;
      if (lane == 0) hopper::barrier_arrive(shared.empty(ring.slot));
    }
    const bool has_sums = keep != 0;
    end_chain();
    const auto sum_of = [&](int t, int i) {
      constexpr float kBack = PARTS == 1 ? 1 : 1 / (kScale * kScale);
      if constexpr (PARTS == 3) return sums[t][i] * kBack;
      return has_sums ? acc[t][i] * kBack : 0;  // a warpgroup that had no step still stores its sums
    };
    const int of_part = by_turns ? 2 * job.part + warpgroup : job.part;
    const int first_c = job.block_c * COLUMNS + lane % 4 * 2, channels = row_channels(plan);
    const int k = job.tile_k * plan.channels + own_channel + lane / 4;  // in the group
    const int64_t row_k = static_cast<int64_t>(job.group) * plan.tiles_k * plan.channels + k;
    const int64_t row = static_cast<int64_t>(params.R) * params.S * channels;
    float* const to = params.sums_ptr + (of_part * params.rows + row_k) * row + first_c;
    const auto place = [&](int t, int j, int i) {
      return to + 8 * i * row + (job.block_t * TAPS + t) * channels + 8 * j;
    };
    float finite = 0;  // or NaN, if a sum is not
    const int taps = params.R * params.S - job.block_t * TAPS;
#pragma unroll
    for (int t = 0; t < TAPS; ++t)
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float low = sum_of(t, 4 * j + 2 * i), high = sum_of(t, 4 * j + 2 * i + 1);
          finite += low * 0.f + high * 0.f;
          if (t < taps) *reinterpret_cast<float2*>(place(t, j, i)) = make_float2(low, high);
        }
    if (finite == 0) continue;
#pragma unroll 1
    for (int number = 0; number < TAPS * COLUMNS / 2; ++number) {
      const int t = number / (COLUMNS / 2), j = number / 4 % (COLUMNS / 8), i = number / 2 % 2, e = number % 2;
      const int own_k = k + 8 * i, c = first_c + 8 * j + e;
      if (t >= taps || own_k >= params.group_k || c >= params.group_c) continue;
      float& sum = place(t, j, i)[e];
      if (sum * 0.f != 0)
        sum = exact_sum<Stored>(params, job, turns, by_turns ? warpgroup : 0, own_k, c, job.block_t * TAPS + t);
    }
  }
}

template <typename Format, int CHUNKS, int TAPS>
__global__ void __launch_bounds__(kThreads, 1) hopper_wgrad_kernel(const __grid_constant__ Params params) {
#if defined(MODELNEW_SM90A)
  extern __shared__ __align__(1024) uint8_t modelnew_hopper_wgrad_smem[];
  const Plan& plan = params.plan;
  const Shared shared{hopper::smem_address(modelnew_hopper_wgrad_smem), shared_layout(plan)};
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int stage = 0; stage < plan.stages; ++stage) {
      hopper::barrier_init(shared.full(stage), kLoadingThreads / 32);
      hopper::barrier_init(shared.empty(stage), kMultiplyingThreads / 32);
    }
    hopper::fence_async();
  }
  fill_table(modelnew_hopper_wgrad_smem + shared.layout.dy_table, plan.images * plan.steps * kStepPixels,
             params.dy_stride, [&](int i) { return dy_pixel(params, i); });
  fill_table(modelnew_hopper_wgrad_smem + shared.layout.x_table, plan.images * phases_of(plan) * plan.slots,
             params.x_stride, [&](int i) { return x_pixel(params, i); });
  __syncthreads();  // barriers and tables are there
  if (threadIdx.x >= kMultiplyingThreads) {
    hopper::registers_give_back<kLoadingRegisters>();
    load<Format, CHUNKS>(params, shared, modelnew_hopper_wgrad_smem);
  } else {
    hopper::registers_take<kMultiplyingRegisters>();
    multiply<Format, CHUNKS, TAPS>(params, shared);
    hopper::launch_dependents();
  }
#endif
}

// Neighbouring threads have neighbouring input channels.
template <typename Stored>
__global__ void __launch_bounds__(kAddThreads) hopper_wgrad_add_kernel(const __grid_constant__ AddParams params) {
  hopper::wait_for_prerequisites();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kAddThreads + threadIdx.x;
  if (i >= params.weights) return;
  const int number = static_cast<int>(i), of_taps = quotient(number, params.by_c), c = number - of_taps * params.C;
  const int k = quotient(of_taps, params.by_taps), group = quotient(k, params.by_group_k),
            tap = of_taps - k * static_cast<int>(params.by_taps.divisor);
  const int r = quotient(tap, params.by_s), s = tap - r * params.S;
  const int64_t row = k + group * static_cast<int64_t>(params.group_padding);
  const float* from = params.sums_ptr + row * params.row + tap * params.row_channels + c;
  double sum = 0;
#pragma unroll 4
  for (int part = 0; part < params.parts; ++part) sum += from[part * params.part];
  narrow(static_cast<float>(sum), static_cast<Stored*>(params.dw_ptr)[k * params.w_stride[0] + c * params.w_stride[1] +
                                                                      r * params.w_stride[2] + s * params.w_stride[3]]);
}

__global__ void __launch_bounds__(hopper::kCopyThreads)
    hopper_wgrad_copy_kernel(const __grid_constant__ hopper::PlanesCopy x,
                             const __grid_constant__ hopper::PlanesCopy dy, int x_blocks) {
  extern __shared__ __align__(16) uint8_t modelnew_hopper_wgrad_copy_smem[];
  uint16_t* const smem = reinterpret_cast<uint16_t*>(modelnew_hopper_wgrad_copy_smem);
  const int block = static_cast<int>(blockIdx.x);
  hopper::wait_for_prerequisites();
  hopper::launch_dependents();
  if (block < x_blocks)
    hopper::copy_planes(x, block, smem);
  else
    hopper::copy_planes(dy, block - x_blocks, smem);
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// ---- Host: plans ----

struct Alignment {
  uint64_t x, dy;
};

// The estimate, in cycles of an SM.
constexpr double kCallCycles = 12150, kJobCycles = 4000, kStageCycles = 120, kStageBytes = 32, kSumCycles = 0.3;
constexpr double kMemoryBytes = 9.3, kShorterShare = 0.29, kCopyCycles = 4270, kCopiedBytes = 31;

inline int64_t copied_bytes(const Problem& problem, const Plan& plan) {
  return (plan.copies_x ? hopper::copied_bytes(problem.N, problem.C, problem.H, problem.W) : 0) +
         (plan.copies_dy ? hopper::copied_bytes(problem.N, problem.K, problem.P, problem.Q) : 0);
}

inline int64_t sums_of(const Problem& problem, const Plan& plan) {
  return static_cast<int64_t>(plan.parts) * sums_of_part(plan) * problem.groups * plan.tiles_k * plan.channels *
         problem.R * problem.S * row_channels(plan);
}

// The sums in the workspace; copies come behind them.
inline int64_t sum_bytes(const Problem& problem, const Plan& plan) {
  return static_cast<int64_t>(sizeof(float)) * sums_of(problem, plan);
}

inline double estimate(const Problem& problem, int sms, const Plan& plan) {
  const double steps = plan.images * plan.steps / (plan.channels == 64 ? 2.0 : 1.0);
  const double products = steps * plan.shape.chunks * 8 * plan.shape.taps * plan.parts_of_x * (plan.parts_of_x + 1) / 2;
  const double loaded = plan.stage_bytes / kStageBytes;
  const double stages = static_cast<double>(ceil_div(plan.tiles, plan.parts));
  const double multiplied = static_cast<double>(ceil_div(plan.jobs, sms)) *
                            (stages * (std::max(products, loaded) + kStageCycles) + kJobCycles);
  const double pixels = static_cast<double>(problem.N) * problem.H * problem.W;
  const double bytes =
      plan.bytes * (pixels * problem.C + static_cast<double>(problem.N) * problem.P * problem.Q * problem.K);
  const double memory = bytes / sms / kMemoryBytes;
  const int64_t copied = copied_bytes(problem, plan);
  const double copying = copied == 0 ? 0 : kCopyCycles + 2.0 * copied / sms / kCopiedBytes;
  return kCallCycles + copying + std::max(multiplied, memory) + kShorterShare * std::min(multiplied, memory) +
         kSumCycles * sums_of(problem, plan) / sms;
}

// Demands on a plan beyond being the cheapest one; zeros, or -1 for the shape, demand nothing.
struct Wish {
  int shape = -1, channels = 0, parts = 0, images = 0, rows = 0, columns = 0;
};

// The numbers that follow from the outputs of a stage. Returns false where a stage does not fit.
inline bool complete(const Problem& problem, Plan& plan) {
  const int stride_h = taken_stride(problem.stride_h, problem.P), stride_w = taken_stride(problem.stride_w, problem.Q);
  const int taps = plan.shape.taps, R = problem.R, S = problem.S;
  const bool in_row = S % taps == 0, in_rows = taps % S == 0;  // a block's taps
  plan.span_r = in_row ? 1 : std::min(R, in_rows ? taps / S : (taps + S - 2) / S + 1);
  plan.span_s = in_row ? taps : S;
  const int64_t reach_h = int64_t{plan.span_r - 1} * problem.dilation_h;
  const int64_t reach_w = int64_t{plan.span_s - 1} * problem.dilation_w;
  const int64_t pitch = plan.columns + reach_w / stride_w;
  const int64_t window_h = (plan.rows + reach_h / stride_h) * stride_h, window_w = pitch * stride_w;
  if (window_h >= kMostSide || window_w >= kMostSide || plan.images >= kMostSide) return false;
  plan.pitch = static_cast<int>(pitch);
  plan.phases_h = static_cast<int>(std::min<int64_t>(stride_h, reach_h + 1));
  plan.phases_w = static_cast<int>(std::min<int64_t>(stride_w, reach_w + 1));
  plan.steps = static_cast<int>(ceil_div((plan.rows - 1) * plan.pitch + plan.columns, kStepPixels));
  const int64_t farthest = reach_h / stride_h * pitch + reach_w / stride_w;
  plan.slots = static_cast<int>(
      std::max<int64_t>((plan.rows + reach_h / stride_h) * pitch, plan.steps * kStepPixels + farthest));
  const int64_t all_slots = int64_t{plan.images} * phases_of(plan) * plan.slots;
  const int64_t pixels = int64_t{plan.images} * plan.steps * kStepPixels;
  // Lanes that copy neighbouring chunks of few pixels meet all banks.
  const int past = plan.shape.chunks % 8 == 0 ? 1 : 2;
  const int64_t chunk_slots = (all_slots + 7 - past) / 8 * 8 + past;
  plan.dy_pitch = dy_pitch(plan);
  plan.dy_bytes = static_cast<int>((plan.dy_rows ? plan.channels : pixels) * plan.dy_pitch);
  const int64_t stage = plan.dy_bytes + plan.parts_of_x * plan.shape.chunks * chunk_slots * 16;
  if (chunk_slots * 16 >= 1 << 18 || stage > kSharedBytes) return false;
  plan.chunk_bytes = static_cast<int>(chunk_slots * 16);
  plan.stage_bytes = static_cast<int>(stage);
  for (plan.stages = kMostStages; plan.stages > 2; --plan.stages) {
    plan.smem_bytes = shared_layout(plan).end;
    if (plan.smem_bytes <= kSharedBytes) break;
  }
  // Besides those under way one is multiplied, and one is given back only when the next one is.
  plan.ahead = std::min(kMostAhead, plan.stages - 2);
  if (plan.ahead <= 0) return false;
  const auto farthest_of = [&](const int64_t (&stride)[4], int64_t rows, int64_t columns) {
    return plan.images * stride[0] + rows * stride[2] + columns * stride[3];
  };
  if (farthest_of(problem.x_stride, window_h, window_w) > kMostElements ||
      farthest_of(problem.y_stride, plan.rows, plan.columns) > kMostElements)
    return false;
  plan.tiles_p = static_cast<int>(ceil_div(problem.P, plan.rows));
  plan.tiles_q = static_cast<int>(ceil_div(problem.Q, plan.columns));
  const int64_t tiles = ceil_div(problem.N, plan.images) * plan.tiles_p * plan.tiles_q;
  plan.tiles = static_cast<int>(tiles);
  return tiles < 1 << 30;
}

// Tries all numbers of parts.
inline void divide(const Problem& problem, int sms, const Wish& wish, Plan plan, Plan& best, bool& found) {
  const int64_t tiles = int64_t{problem.groups} * plan.tiles_k * plan.blocks_c * plan.blocks_t;
  const int64_t pixels = int64_t{plan.tiles} * plan.images * plan.steps * kStepPixels;
  const int64_t least = ceil_div(pixels, kMostChained * sums_of_part(plan));
  const int64_t most = std::max(least, ceil_div(4 * sms, tiles)), last = std::min<int64_t>(most, plan.tiles);
  for (int64_t parts = std::min<int64_t>(least, plan.tiles); parts <= last; ++parts) {
    if (wish.parts > 0 && parts != wish.parts) continue;
    if (tiles * parts >= 1 << 30) break;
    plan.parts = static_cast<int>(parts);
    if (sum_bytes(problem, plan) > kMostSumBytes) break;
    plan.jobs = static_cast<int>(tiles * parts);
    plan.grid = std::min(plan.jobs, sms);
    plan.cycles = estimate(problem, sms, plan);
    if (found && plan.cycles >= best.cycles) continue;
    best = plan;
    found = true;
  }
}

inline bool make_plan(const Problem& problem, int sms, const Alignment& address, Plan& best, const Wish& wish = {}) {
  const int64_t pixels = problem.N * problem.P * problem.Q, taps = int64_t{problem.R} * problem.S;
  const int group_c = problem.C / problem.groups, group_k = problem.K / problem.groups;
  Plan plan{};
  plan.bytes = element_bytes(problem.dtype);
  plan.parts_of_x = plan.bytes == 2 ? 1 : uses_tf32(problem, Operator::kWgrad) ? 2 : 3;
  // By pieces of 16 bytes, x by two of them in fp32, or after a copy of planes of 16 bits; else one by one.
  const auto prepare = [&](const int64_t (&stride)[4], int channels, int of_group, int rows, int columns,
                           uint64_t begin, int piece, bool& pieces, bool& copies) {
    const bool whole = problem.groups == 1 || of_group % piece == 0;
    pieces = whole && channels % piece == 0 && begin % 16 == 0 && stride[1] == 1;
    for (int i : {0, 2, 3}) pieces &= stride[i] % (16 / plan.bytes) == 0;
    copies = !pieces && whole && plan.bytes == 2 && hopper::can_copy(stride, problem.N, channels, rows, columns);
    pieces |= copies;
  };
  prepare(problem.x_stride, problem.C, group_c, problem.H, problem.W, address.x, 8, plan.x_pieces, plan.copies_x);
  prepare(problem.y_stride, problem.K, group_k, problem.P, problem.Q, address.dy, 16 / plan.bytes, plan.dy_pieces,
          plan.copies_dy);
  plan.dy_rows = plan.bytes == 4 && problem.y_stride[1] != 1;
  if (pixels >= int64_t{1} << 30 || taps * group_c * problem.K >= int64_t{1} << 30) return false;
  bool found = false;
  constexpr int kMostPixels = 256;  // of a stage
  for (int channels : {128, 64})
    for (int i = 0; i < kTileShapeCount; ++i) {
      plan.channels = channels;
      plan.shape = kTileShapes[i];
      if (!is_compiled(plan.shape, plan.parts_of_x)) continue;
      if (wish.shape >= 0 ? wish.shape != i : plan.shape.taps > 1 && taps == 1) continue;
      if (wish.channels > 0 && wish.channels != channels) continue;
      plan.tiles_k = static_cast<int>(ceil_div(group_k, channels));
      plan.blocks_c = static_cast<int>(ceil_div(group_c, 8 * plan.shape.chunks));
      plan.blocks_t = static_cast<int>(ceil_div(taps, plan.shape.taps));
      const auto consider = [&](int images, int rows, int columns) {
        if (images <= 0 || rows <= 0 || columns <= 0) return;
        plan.images = images;
        plan.rows = std::min(rows, problem.P);
        plan.columns = std::min(columns, problem.Q);
        if (complete(problem, plan)) divide(problem, sms, wish, plan, best, found);
      };
      if (wish.rows > 0) {
        consider(wish.images, wish.rows, wish.columns);
        continue;
      }
      for (int strips = 1; strips <= problem.Q; ++strips) {
        const int columns = static_cast<int>(ceil_div(problem.Q, strips));
        if (columns <= kMostPixels) {
          const int most = std::min(problem.P, kMostPixels / columns);
          for (int rows = most; rows > 0; rows = rows > 4 ? rows * 3 / 4 : rows - 1) consider(1, rows, columns);
          if (strips == 1 && most == problem.P)
            for (int images = kMostPixels / (columns * problem.P); images > 1; images /= 2)
              consider(static_cast<int>(std::min<int64_t>(images, problem.N)), problem.P, columns);
        }
        if (columns <= 32) break;
      }
    }
  return found;
}

inline Params make_params(const Problem& problem, const Plan& plan) {
  Params params{};
  params.plan = plan;
  std::copy_n(problem.x_stride, 4, params.x_stride);
  std::copy_n(problem.y_stride, 4, params.dy_stride);
  params.N = problem.N;
  params.group_c = problem.C / problem.groups, params.H = problem.H, params.W = problem.W;
  params.group_k = problem.K / problem.groups, params.P = problem.P, params.Q = problem.Q;
  params.R = problem.R, params.S = problem.S;
  params.stride_h = taken_stride(problem.stride_h, problem.P);
  params.stride_w = taken_stride(problem.stride_w, problem.Q);
  params.pad_h = problem.pad_h, params.pad_w = problem.pad_w;
  params.dilation_h = problem.dilation_h, params.dilation_w = problem.dilation_w;
  params.rows = int64_t{problem.groups} * plan.tiles_k * plan.channels;
  params.by_tiles = make_divisor(int64_t{problem.groups} * plan.tiles_k * plan.blocks_c * plan.blocks_t);
  params.by_group_tiles = make_divisor(int64_t{plan.tiles_k} * plan.blocks_c * plan.blocks_t);
  params.by_tiles_k = make_divisor(plan.tiles_k);
  params.by_blocks_t = make_divisor(plan.blocks_t);
  params.by_tiles_p = make_divisor(plan.tiles_p);
  params.by_tiles_q = make_divisor(plan.tiles_q);
  params.by_pitch = make_divisor(plan.pitch);
  params.by_slots = make_divisor(plan.slots);
  params.by_image_slots = make_divisor(int64_t{phases_of(plan)} * plan.slots);
  params.by_steps = make_divisor(plan.steps);
  return params;
}

struct Planned {
  Plan plan;
  bool found;
};

inline const Planned& plan_of(const Problem& problem, const Alignment& address) {
  thread_local Memo<Planned> memo;
  int sms = 0;
  const int gpu = find_gpu(sms);
  return memo.get(key_of(problem, Operator::kWgrad, address.x, address.dy, 0, gpu, sms), [&] {
    Planned planned{};
    planned.found = make_plan(problem, sms, address, planned.plan);
    return planned;
  });
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (op != Operator::kWgrad) return "it computes gradients to weights only";
  if (problem.dtype == DType::kFloat64) return "it has no float64";
  int sms = 0;
  if (find_gpu(sms) != 90) return "it needs a Hopper GPU (compute capability 9.0)";
  return plan_of(problem, Alignment{}).found
             ? nullptr
             : "no stage of it fits into shared memory, or it has too many pixels or weights";
}

inline Alignment alignment_of(const Pointers& pointers) {
  return {reinterpret_cast<uint64_t>(pointers.x), reinterpret_cast<uint64_t>(pointers.dy)};
}

// Fewest multiply-adds: below, launches take most of the time, and direct has fewer (docs/lab/wgrad.md).
constexpr double kLeastWork = 1 << 23;

inline const char* yields(const Problem& problem, Operator) {
  if (multiply_adds(problem) < kLeastWork) return "another engine may be faster with few multiply-adds";
  return problem.K / problem.groups < 4 ? "another engine may be faster with few output channels in a group" : nullptr;
}

inline int64_t workspace_bytes(const Problem& problem, Operator, const Pointers& pointers) {
  const Plan& plan = plan_of(problem, alignment_of(pointers)).plan;
  return sum_bytes(problem, plan) + copied_bytes(problem, plan);
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

template <typename Format, int SHAPE>
cudaError_t run_kernel(const Params& params, const AddParams& add, cudaStream_t stream) {
  constexpr TileShape kShape = kTileShapes[SHAPE];
  constexpr Instance kInstance{"hopper_wgrad_kernel", {kTypeId<typename Format::Stored>, Format::PARTS, SHAPE}};
  record(kInstance);
  if constexpr (!is_compiled(kShape, Format::PARTS) || !is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    const auto kernel = hopper_wgrad_kernel<Format, kShape.chunks, kShape.taps>;
    const Plan& plan = params.plan;
    // Always the maximum: host threads may launch one kernel with different plans, and the attribute is the kernel's.
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    error = hopper::launch_early(kernel, static_cast<unsigned>(plan.grid), kThreads, plan.smem_bytes, stream, params);
    if (error != cudaSuccess) return error;
    return hopper::launch_early(hopper_wgrad_add_kernel<typename Format::Stored>,
                                static_cast<unsigned>(ceil_div(add.weights, kAddThreads)), kAddThreads, 0, stream, add);
  }
}

template <typename Format, int SHAPE = 0>
cudaError_t run_shape(const Params& params, const AddParams& add, cudaStream_t stream) {
  if constexpr (SHAPE < kTileShapeCount) {
    const TileShape &shape = params.plan.shape, &own = kTileShapes[SHAPE];
    if (shape.chunks == own.chunks && shape.taps == own.taps) return run_kernel<Format, SHAPE>(params, add, stream);
    return run_shape<Format, SHAPE + 1>(params, add, stream);
  }
  return cudaErrorInvalidConfiguration;
}

// Copies what cannot be read in place, and lets `problem` and `pointers` describe the copies.
inline cudaError_t copy(const Plan& plan, Problem& problem, Pointers& pointers, cudaStream_t stream) {
  uint8_t* to = static_cast<uint8_t*>(pointers.workspace) + sum_bytes(problem, plan);
  const auto make = [&](const void*& from, int64_t (&stride)[4], int channels, int rows, int columns, int64_t& blocks) {
    const hopper::PlanesCopy made =
        hopper::make_planes_copy(from, stride, problem.N, channels, int64_t{rows} * columns, to, blocks);
    hopper::set_copied_strides(channels, rows, columns, stride);
    from = to;
    to += hopper::copied_bytes(problem.N, channels, rows, columns);
    return made;
  };
  hopper::PlanesCopy x{}, dy{};
  int64_t x_blocks = 0, dy_blocks = 0;
  if (plan.copies_x) x = make(pointers.x, problem.x_stride, problem.C, problem.H, problem.W, x_blocks);
  if (plan.copies_dy) dy = make(pointers.dy, problem.y_stride, problem.K, problem.P, problem.Q, dy_blocks);
  if (x_blocks + dy_blocks == 0) return cudaSuccess;
  return hopper::launch_early(hopper_wgrad_copy_kernel, static_cast<unsigned>(x_blocks + dy_blocks),
                              hopper::kCopyThreads, hopper::kCopyBytes, stream, x, dy, static_cast<int>(x_blocks));
}

template <typename Format>
cudaError_t run(Problem problem, const Plan& plan, Pointers pointers, cudaStream_t stream) {
  cudaError_t error = copy(plan, problem, pointers, stream);
  if (error != cudaSuccess) return error;
  Params params = make_params(problem, plan);
  params.x_ptr = pointers.x;
  params.dy_ptr = pointers.dy;
  params.sums_ptr = static_cast<float*>(pointers.workspace);
  AddParams add{};
  add.sums_ptr = params.sums_ptr;
  add.dw_ptr = pointers.out;
  add.row_channels = row_channels(plan);
  add.row = int64_t{problem.R} * problem.S * add.row_channels;
  add.part = add.row * params.rows;
  add.group_padding = plan.tiles_k * plan.channels - params.group_k;
  add.by_group_k = make_divisor(params.group_k);
  std::copy_n(problem.w_stride, 4, add.w_stride);
  add.parts = plan.parts * sums_of_part(plan);
  add.C = params.group_c;
  add.S = problem.S;
  add.weights = int64_t{problem.K} * params.group_c * problem.R * problem.S;
  add.by_c = make_divisor(params.group_c);
  add.by_taps = make_divisor(int64_t{problem.R} * problem.S);
  add.by_s = make_divisor(problem.S);
  return run_shape<Format>(params, add, stream);
}

inline cudaError_t run(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  switch (problem.dtype) {
    case DType::kFloat16:
      return run<Format<Half, Half, 1>>(problem, plan, pointers, stream);
    case DType::kBFloat16:
      return run<Format<BFloat16, BFloat16, 1>>(problem, plan, pointers, stream);
    case DType::kFloat32:
      return plan.parts_of_x == 2 ? run<Format<float, BFloat16, 2>>(problem, plan, pointers, stream)
                                  : run<Format<float, BFloat16, 3>>(problem, plan, pointers, stream);
    case DType::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

inline cudaError_t launch(Operator, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  const Planned& planned = plan_of(problem, alignment_of(pointers));
  return planned.found ? run(problem, planned.plan, pointers, stream) : cudaErrorInvalidConfiguration;
}

#endif  // launchers

inline void describe(const Problem& problem, Operator, char* text, size_t text_size) {
  const Plan& plan = plan_of(problem, Alignment{}).plan;
  snprintf(
      text, text_size,
      "%stile of %d output channels x %d input channels x %d taps, stages of %d x %d x %d pixels and %d bytes, %d of "
      "them, %d blocks for %d tiles in %d parts, about %.3g Mcycles",
      plan.copies_x && plan.copies_dy ? "x and dy copied, "
      : plan.copies_x                 ? "x copied, "
      : plan.copies_dy                ? "dy copied, "
                                      : "",
      plan.channels, 8 * plan.shape.chunks, plan.shape.taps, plan.images, plan.rows, plan.columns, plan.stage_bytes,
      plan.stages, plan.grid, plan.tiles_k * plan.blocks_c * plan.blocks_t, plan.parts, plan.cycles * 1e-6);
}

#endif  // host

}  // namespace hopper_wgrad

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
extern const Engine kHopperWgradEngine{"hopper_wgrad",       hopper_wgrad::refusal,  hopper_wgrad::workspace_bytes,
                                       hopper_wgrad::launch, hopper_wgrad::describe, hopper_wgrad::yields};
#endif

}  // namespace modelnew
