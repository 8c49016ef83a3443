// mma_wgrad engine: weight gradients on the tensor cores of any GPU since Ampere, by mma.sync. It is made for groups of
// few channels; fp16, bf16 and fp32 (TF32, or full accuracy from two TF32 parts), any strides, filter, dilation.
//
// A block owns up to 64 channels of y and those of x that they meet, several groups if they are small, and a share of
// the pixels, a tile of them at a time:
//
//     shared memory   dy [pixel of the tile][64 channels]     two stages of both, filled by cp.async, or through
//                     x  [pixel of the window][64 channels]   registers where channels are no neighbours in memory
//
//     unit of a warp  16 channels of y x 16 of x x up to 9 taps: sums stay in registers
//
//         channels of x    0       16      32      48         with 16 channels a group and fewer, the diagonal alone;
//        channels of y 0   | unit 0|       |       |          what two groups would have in common is not stored
//                     16   |       | unit 1|       |
//                     32   |       |       | unit 2|
//
// An operand's pixels need not be neighbours: each lane says where its rows of eight channels begin (ldmatrix), so that
// a tap is a distance in the window. Pixels that a tile lacks have zeros for dy and meet a pixel of zeros, as a zero
// times NaN would not vanish.
//
// Full fp32 accuracy: see mma.cu. Where a sum is not finite then, sum_kernel multiplies and adds anew.
//
// Splits of the pixels are added by sum_kernel in double and in order.
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstdio>

#include "device.cuh"
#include "engines.cuh"
#include "memo.cuh"
#endif

#include "async_copy.cuh"
#include "block_sum.cuh"
#include "divisor.cuh"
#include "numerics.cuh"
#include "problem.cuh"
#include "ptx.cuh"
#include "tf32.cuh"

namespace modelnew {
namespace mma_wgrad {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kChannels = 64;      // of a block, of y and of x each
constexpr int kTile = 16;          // channels of a unit, of y and of x each
constexpr int kMostUnits = 16;     // of a block's channels
constexpr int kMostTaps = 9;       // of a unit
constexpr int kMostPixels = 8192;  // of a chain of sums; in full fp32, which adds every eight, a quarter
constexpr int kUnit = kTile * kTile;
constexpr int kSlots = 4;                                  // sums of a thread of sum_kernel, loaded at once
constexpr int kMostSide = 1 << 10, kMostImages = 1 << 10;  // of a tile and its window: pack_pixel

// How operands lie in shared memory: pixels are a PITCH apart, so that eight of them meet all banks.
template <typename Storage_, bool EXACT_>
struct Format {
  using Storage = Storage_;
  static constexpr bool EXACT = EXACT_;
  static constexpr int BYTES = sizeof(Storage), STEP = BYTES == 2 ? 16 : 8;  // pixels of a product
  static constexpr int PIECE = 16 / BYTES, PIECES = kChannels / PIECE;       // a copy's channels, and a pixel's copies
  static constexpr int PITCH = kChannels * BYTES + (BYTES == 2 ? 16 : 32);
  static constexpr int LANE_PIXELS = BYTES == 2 ? 1 : 2;  // of a step, whose address a lane needs
};

struct Plan {
  int images, tile_p, tile_q;      // of a tile of pixels
  int tiles_p, tiles_q, tiles;     // of an image; of all
  int pixels, steps;               // of a tile; products that they take
  int window_h, window_w, window;  // rows and columns of x of an image of the tile; all its pixels
  bool pieces;                     // filled by copies of 16 bytes
  int pair_groups;                 // groups of a block; 0: a group is divided among blocks, in k_parts and c_parts
  int k_parts, c_parts;
  int pairs;                            // blocks of channels
  int units, block_units, unit_blocks;  // of a block's channels, those of them that a block computes, blocks for all
  int taps, tap_chunks;                 // of a unit
  unsigned char unit[kMostUnits];       // 4 * tile of y's channels + tile of x's
  int warp_parts;                       // warps that divide a unit's pixels
  int splits, split_tiles;              // of the tiles; tiles of a split
  int64_t slots;                        // sums of a split
  int64_t blocks;
  int stage_bytes, smem_bytes;
  Divisor by_image, by_row, by_window_image, by_window_row;  // pixels of a tile, and of its window
};

struct Params {
  const void *x_ptr, *dy_ptr;
  float* partial_ptr;  // [split][pair][unit][chunk of taps][tap][channel of y][channel of x]
  void* out_ptr;
  int64_t x_stride[4], dy_stride[4], w_stride[4];
  int64_t N;
  int H, W, P, Q, R, S, groups, group_c, group_k;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  Plan plan;
};

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// The channels of a block: the first of y and of x, and how many. Those of one group are `step_k` and `step_c`.
struct Pair {
  int first_k, first_c, count_k, count_c, step_k, step_c;
};

MODELNEW_HOST_DEVICE inline Pair locate_pair(const Params& params, int pair) {
  const Plan& plan = params.plan;
  if (plan.pair_groups > 0) {
    const int first = pair * plan.pair_groups;
    const int groups = params.groups - first < plan.pair_groups ? params.groups - first : plan.pair_groups;
    return {first * params.group_k,  first * params.group_c, groups * params.group_k,
            groups * params.group_c, params.group_k,         params.group_c};
  }
  const int group = pair / (plan.k_parts * plan.c_parts);
  const int k = pair / plan.c_parts % plan.k_parts * kChannels, c = pair % plan.c_parts * kChannels;
  const auto most = [](int count) { return count < kChannels ? count : kChannels; };
  return {group * params.group_k + k,
          group * params.group_c + c,
          most(params.group_k - k),
          most(params.group_c - c),
          kChannels,
          kChannels};
}

// The first pixel of a tile.
struct Place {
  int64_t n;
  int p, q;
};

__device__ inline Place locate_tile(const Plan& plan, int tile) {
  const int rows = tile / plan.tiles_q;
  return {static_cast<int64_t>(rows / plan.tiles_p) * plan.images, rows % plan.tiles_p * plan.tile_p,
          tile % plan.tiles_q * plan.tile_q};
}

__device__ inline Place next_tile(const Params& params, Place at) {
  at.q += params.plan.tile_q;
  if (at.q < params.Q) return at;
  at.q = 0;
  at.p += params.plan.tile_p;
  if (at.p < params.P) return at;
  return {at.n + params.plan.images, 0, 0};
}

// A pixel of a tile or window: image, row, column. Negative if there is none.
MODELNEW_HOST_DEVICE inline int pack_pixel(int image, int row, int column) {
  return (image << 20) + (row << 10) + column;
}

// Fills [pixel][64 channels], `count` of them, from a tensor; `source` is the first channel of the first pixel.
template <typename Format, typename Exists>
__device__ inline void fill(uint32_t to_smem, const typename Format::Storage* source, int64_t channel_stride, int count,
                            int pixels, bool pieces, const int* offset_of, const Exists& exists) {
  using Storage = typename Format::Storage;
  constexpr int PIECE = Format::PIECE, PIECES = Format::PIECES;
  if (pieces) {
    const int channel = static_cast<int>(threadIdx.x) % PIECES * PIECE;
    for (int pixel = threadIdx.x / PIECES; pixel < pixels; pixel += kThreads / PIECES) {
      const bool copied = (channel < count) & exists(pixel);
      hopper::copy_async<16>(to_smem + pixel * Format::PITCH + channel * Format::BYTES,
                             copied ? source + (offset_of[pixel] + channel) : source, copied ? 16 : 0);
    }
    return;
  }
  constexpr int BATCH = 2;  // of pieces: all their loads are under way before the first store
  for (int piece = threadIdx.x / 32; piece < PIECES; piece += kWarps)
#pragma unroll 1
    for (int first = threadIdx.x % 32; first < pixels; first += BATCH * 32) {
      Storage values[BATCH][PIECE];
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int pixel = first + j * 32;
        const bool loaded = pixel < pixels && exists(pixel);
        const Storage* from = source + (loaded ? offset_of[pixel] + piece * PIECE * channel_stride : 0);
#pragma unroll
        for (int i = 0; i < PIECE; ++i, from += channel_stride)
          values[j][i] = load_if(loaded & (piece * PIECE + i < count), from);
      }
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        uint32_t words[4];
        memcpy(words, values[j], sizeof words);
        if (first + j * 32 < pixels)
          hopper::store_shared_4(to_smem + (first + j * 32) * Format::PITCH + piece * 16, words);
      }
    }
}

// 16 channels of the pixels of a step, as mma.sync takes them: words 0 and 2 are of the first eight channels.
template <typename Format>
__device__ __forceinline__ void load_operand(uint32_t (&words)[4], const uint32_t (&pixel)[Format::LANE_PIXELS]) {
  if constexpr (Format::BYTES == 2) {
    hopper::load_matrix_transposed(words, pixel[0]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) hopper::load_shared(words[i], pixel[i / 2] + i % 2 * 8 * Format::BYTES);
  }
}

// The bytes that a lane adds to a pixel's address.
template <typename Format>
__device__ __forceinline__ uint32_t lane_bytes() {
  const unsigned lane = threadIdx.x % 32;
  return Format::BYTES == 2 ? lane / 8 % 2 * 16 : lane / 4 * 4;
}

// An operand, split if two parts are wanted.
template <typename Format>
struct Operand {
  uint32_t first[4], rest[4];

  __device__ __forceinline__ void load(const uint32_t (&pixel)[Format::LANE_PIXELS]) {
    load_operand<Format>(first, pixel);
    if constexpr (Format::BYTES == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) split<Format::EXACT>(first[i], first[i], rest[i]);
    }
  }
};

template <typename Format>
__device__ __forceinline__ void multiply(float (&sums)[4], const Operand<Format>& a, const Operand<Format>& b,
                                         int half) {
  const uint32_t b_first[2] = {b.first[half], b.first[half + 2]};
  if constexpr (Format::BYTES == 2) {
    multiply_add(sums, a.first, b_first, typename Format::Storage{});
  } else if constexpr (Format::EXACT) {
    const uint32_t b_rest[2] = {b.rest[half], b.rest[half + 2]};
    float products[4] = {};
    multiply_add(products, a.first, b_rest);
    multiply_add(products, a.rest, b_first);
    multiply_add(products, a.first, b_first);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += products[i];
  } else {
    multiply_add(sums, a.first, b_first);
  }
}

// blockIdx.x = (pair, unit block, chunk of taps, split).
template <typename Format, int TAPS>
__global__ void __launch_bounds__(kThreads, 2) mma_wgrad_kernel(const Params params) {
  using Storage = typename Format::Storage;
  constexpr int PITCH = Format::PITCH, STEP = Format::STEP, LANE_PIXELS = Format::LANE_PIXELS;
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  const Plan& plan = params.plan;
  unsigned rest = blockIdx.x;
  const int split = static_cast<int>(rest % plan.splits);
  rest /= plan.splits;
  const int chunk = static_cast<int>(rest % plan.tap_chunks);
  rest /= plan.tap_chunks;
  const int unit_block = static_cast<int>(rest % plan.unit_blocks);
  const int pair_number = static_cast<int>(rest / plan.unit_blocks);
  const Pair pair = locate_pair(params, pair_number);

  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, padded = plan.steps * STEP;
  const uint32_t stages = hopper::smem_address(modelnew_smem), zeros = stages + 2 * plan.stage_bytes;
  // Tables of the tile's pixels and of its window's: the distance from the first one in the tensor, and image, row and
  // column (pack_pixel).
  int* const pixel_offset = reinterpret_cast<int*>(modelnew_smem + 2 * plan.stage_bytes + PITCH);
  int* const window_offset = pixel_offset + padded;
  int* const pixel_table = window_offset + plan.window;
  int* const window_table = pixel_table + padded;
  int* const place_table = window_table + plan.window;  // of a pixel in the window
  for (int i = thread; i < padded; i += kThreads) {
    const int image = quotient(i, plan.by_image), of_image = i - image * plan.tile_p * plan.tile_q;
    const int row = quotient(of_image, plan.by_row), column = of_image - row * plan.tile_q;
    pixel_table[i] = i < plan.pixels ? pack_pixel(image, row, column) : -1;
    pixel_offset[i] =
        static_cast<int>(image * params.dy_stride[0] + row * params.dy_stride[2] + column * params.dy_stride[3]);
    place_table[i] = (image * plan.window_h + row * params.stride_h) * plan.window_w + column * params.stride_w;
  }
  for (int i = thread; i < plan.window; i += kThreads) {
    const int image = quotient(i, plan.by_window_image), of_image = i - image * plan.window_h * plan.window_w;
    const int row = quotient(of_image, plan.by_window_row), column = of_image - row * plan.window_w;
    window_table[i] = pack_pixel(image, row, column);
    window_offset[i] =
        static_cast<int>(image * params.x_stride[0] + row * params.x_stride[2] + column * params.x_stride[3]);
  }
  for (int i = thread; i < PITCH / 16; i += kThreads) {
    const uint32_t none[4] = {};
    hopper::store_shared_4(zeros + i * 16, none);
  }
  __syncthreads();  // the tables are complete
  hopper::wait_for_prerequisites();

  const Storage* const x_ptr = static_cast<const Storage*>(params.x_ptr) + pair.first_c * params.x_stride[1];
  const Storage* const dy_ptr = static_cast<const Storage*>(params.dy_ptr) + pair.first_k * params.dy_stride[1];
  const auto fill_stage = [&](uint32_t stage, const Place& at, bool exists) {
    if (exists) {
      const int first_h = at.p * params.stride_h - params.pad_h, first_w = at.q * params.stride_w - params.pad_w;
      const Storage* const dy_tile =
          dy_ptr + (at.n * params.dy_stride[0] + at.p * params.dy_stride[2] + at.q * params.dy_stride[3]);
      const Storage* const x_tile =
          x_ptr + (at.n * params.x_stride[0] + first_h * params.x_stride[2] + first_w * params.x_stride[3]);
      const int images = params.N - at.n < plan.images ? static_cast<int>(params.N - at.n) : plan.images;
      fill<Format>(stage, dy_tile, params.dy_stride[1], pair.count_k, padded, plan.pieces, pixel_offset,
                   [&](int pixel) {
                     const int packed = pixel_table[pixel];
                     return (packed >= 0) & (packed >> 20 < images) & (at.p + (packed >> 10 & 1023) < params.P) &
                            (at.q + (packed & 1023) < params.Q);
                   });
      fill<Format>(stage + padded * PITCH, x_tile, params.x_stride[1], pair.count_c, plan.window, plan.pieces,
                   window_offset, [&](int pixel) {
                     const int packed = window_table[pixel];
                     return (packed >> 20 < images) & is_within(first_h + (packed >> 10 & 1023), params.H) &
                            is_within(first_w + (packed & 1023), params.W);
                   });
    }
    hopper::copies_commit();
  };

  const int own = warp % plan.block_units, part = warp / plan.block_units;
  const int unit_number = unit_block * plan.block_units + own;
  const bool busy = (part < plan.warp_parts) & (unit_number < plan.units);
  const int unit = plan.unit[busy ? unit_number : 0];
  const uint32_t a_bytes = lane_bytes<Format>() + unit / 4 * kTile * Format::BYTES;
  const uint32_t b_bytes = lane_bytes<Format>() + unit % 4 * kTile * Format::BYTES;
  uint32_t reach[TAPS];  // of a tap in the window, in bytes
#pragma unroll
  for (int t = 0; t < TAPS; ++t) {
    const int tap = chunk * TAPS + t, r = tap / params.S, s = tap % params.S;
    reach[t] = r < params.R ? (r * params.dilation_h * plan.window_w + s * params.dilation_w) * PITCH : 0;
  }
  float sums[TAPS][2][4] = {};

  const int first_tile = split * plan.split_tiles;
  const int tiles = plan.tiles - first_tile < plan.split_tiles ? plan.tiles - first_tile : plan.split_tiles;
  Place at = locate_tile(plan, first_tile), after = at;
  fill_stage(stages, at, true);
  uint32_t stage = stages;
#pragma unroll 1
  for (int tile = 1; tile <= tiles; ++tile, at = after) {
    const uint32_t next = stages + (stage == stages ? plan.stage_bytes : 0);
    after = next_tile(params, at);
    fill_stage(next, after, tile < tiles);
    hopper::copies_wait<1>();
    __syncthreads();  // the stage is complete
#pragma unroll 1
    for (int step = busy ? part : plan.steps; step < plan.steps; step += plan.warp_parts) {
      uint32_t a_pixel[LANE_PIXELS], b_pixel[LANE_PIXELS], exists[LANE_PIXELS];
#pragma unroll
      for (int i = 0; i < LANE_PIXELS; ++i) {
        const int pixel = step * STEP + (Format::BYTES == 2 ? lane / 16 * 8 + lane % 8 : lane % 4 + 4 * i);
        const int packed = pixel_table[pixel];
        exists[i] = (packed >= 0) & (at.n + (packed >> 20) < params.N) & (at.p + (packed >> 10 & 1023) < params.P) &
                    (at.q + (packed & 1023) < params.Q);
        a_pixel[i] = stage + pixel * PITCH + a_bytes;
        b_pixel[i] = (exists[i] ? stage + (padded + place_table[pixel]) * PITCH : zeros) + b_bytes;
      }
      Operand<Format> a;
      a.load(a_pixel);
#pragma unroll
      for (int t = 0; t < TAPS; ++t) {
        uint32_t at_tap[LANE_PIXELS];
#pragma unroll
        for (int i = 0; i < LANE_PIXELS; ++i) at_tap[i] = b_pixel[i] + reach[t] * exists[i];
        Operand<Format> b;
        b.load(at_tap);
        multiply(sums[t][0], a, b, 0);
        multiply(sums[t][1], a, b, 1);
      }
    }
    __syncthreads();  // nobody needs the stage
    stage = next;
  }
  hopper::copies_wait<0>();
  hopper::launch_dependents();  // not before the tiles: docs/lab/wgrad.md
  // The first warp of a unit adds what the others have, [warp][sum][lane].
  float* const sums_smem = reinterpret_cast<float*>(modelnew_smem) + lane;
  const auto each_sum = [&](const auto& visit) {
#pragma unroll
    for (int i = 0; i < TAPS * 8; ++i) visit(sums[i / 8][i / 4 % 2][i % 4], i * 32);
  };
  if (busy && part > 0)
    each_sum([&](float sum, int at_sum) { sums_smem[(warp - plan.block_units) * (TAPS * kUnit) + at_sum] = sum; });
  __syncthreads();  // the sums are there
  if (!busy || part > 0) return;
  for (int other = 1; other < plan.warp_parts; ++other)
    each_sum([&](float& sum, int at_sum) {
      sum += sums_smem[(warp + (other - 1) * plan.block_units) * (TAPS * kUnit) + at_sum];
    });
  float* const slots =
      params.partial_ptr + split * plan.slots +
      ((static_cast<int64_t>(pair_number) * plan.units + unit_number) * plan.tap_chunks + chunk) * (TAPS * kUnit);
#pragma unroll
  for (int t = 0; t < TAPS; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *reinterpret_cast<float2*>(slots + t * kUnit + (lane / 4 + i % 2 * 8) * kTile + i / 2 * 8 + lane % 4 * 2) =
          make_float2(sums[t][i / 2][i % 2 * 2], sums[t][i / 2][i % 2 * 2 + 1]);
}

// An element of dw, or none.
struct Element {
  bool exists;
  int k, c, r, s;  // c in the group, and x_c in x
  int x_c;
};

// kSlots neighbours: of one output channel and tap, by the first one's input channel.
struct Elements {
  bool exist;  // those of a channel of k's group
  int k, r, s;
  int c, x_c, of_group;  // in the filter, in x, and counted from the first one of k's group in this pair
  int group_c, count_c;  // channels that k's group has, and that are left in the pair

  __device__ Element operator[](int i) const {
    const bool exists = exist && is_within(of_group + i, group_c) && i < count_c;
    return {exists, k, c + i, r, s, x_c + i};
  }
};

__device__ inline Elements locate_slots(const Params& params, unsigned slot) {
  const Plan& plan = params.plan;
  unsigned rest = slot / kUnit;
  const int t = static_cast<int>(rest % plan.taps);
  rest /= plan.taps;
  const int tap = static_cast<int>(rest % plan.tap_chunks) * plan.taps + t;
  rest /= plan.tap_chunks;
  const int unit = plan.unit[rest % plan.units];
  const Pair pair = locate_pair(params, static_cast<int>(rest / plan.units));
  const int k = unit / 4 * kTile + static_cast<int>(slot % kUnit / kTile);
  const int c = unit % 4 * kTile + static_cast<int>(slot % kTile), of_group = c - k / pair.step_k * pair.step_c;
  return {slot < plan.slots && tap < params.R * params.S && k < pair.count_k,
          pair.first_k + k,
          tap / params.S,
          tap % params.S,
          pair.first_c % params.group_c + of_group,
          pair.first_c + c,
          of_group,
          pair.step_c,
          pair.count_c - c};
}

// The products of an element of dw that this thread takes of those of a block, padding and all.
template <typename Storage>
__device__ inline double exact_products(const Params& params, const Element& of) {
  const Storage* const x_plane = static_cast<const Storage*>(params.x_ptr) + of.x_c * params.x_stride[1];
  const Storage* const dy_plane = static_cast<const Storage*>(params.dy_ptr) + of.k * params.dy_stride[1];
  const int64_t pixels = params.N * params.P * params.Q;
  double sum = 0;
#pragma unroll 1
  for (int64_t pixel = threadIdx.x; pixel < pixels; pixel += kThreads) {
    const int64_t row = pixel / params.Q, n = row / params.P;
    const int p = static_cast<int>(row - n * params.P), q = static_cast<int>(pixel - row * params.Q);
    const int h = p * params.stride_h - params.pad_h + of.r * params.dilation_h;
    const int w = q * params.stride_w - params.pad_w + of.s * params.dilation_w;
    const float x =
        widen(load_if(is_within(h, params.H) && is_within(w, params.W),
                      x_plane + (n * params.x_stride[0] + h * params.x_stride[2] + w * params.x_stride[3])));
    sum += static_cast<double>(
               widen(dy_plane[n * params.dy_stride[0] + p * params.dy_stride[2] + q * params.dy_stride[3]])) *
           x;
  }
  return sum;
}

// blockIdx.x numbers tiles of neighbouring slots, four for each thread of a row.
template <typename Storage>
__global__ void __launch_bounds__(kThreads) sum_kernel(const Params params) {
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  double* const smem = reinterpret_cast<double*>(modelnew_smem);
  const Plan& plan = params.plan;
  const int rows = rows_of_splits(plan.splits), columns = kThreads / rows,
            row = static_cast<int>(threadIdx.x) / columns;
  const unsigned first = blockIdx.x * columns * kSlots, slot = first + threadIdx.x % columns * kSlots;
  double sum[kSlots] = {};
  hopper::wait_for_prerequisites();
  if (slot < plan.slots) {
#pragma unroll 8
    for (int split = row; split < plan.splits; split += rows) {
      const float4 partial = *reinterpret_cast<const float4*>(params.partial_ptr + (split * plan.slots + slot));
      sum[0] += partial.x;
      sum[1] += partial.y;
      sum[2] += partial.z;
      sum[3] += partial.w;
    }
  }
  add_rows<kThreads>(sum, row, static_cast<int>(threadIdx.x) % columns, rows, columns, smem);
  const auto store = [&](const Element& at, double value) {
    narrow(static_cast<float>(value),
           static_cast<Storage*>(params.out_ptr)[at.k * params.w_stride[0] + at.c * params.w_stride[1] +
                                                 at.r * params.w_stride[2] + at.s * params.w_stride[3]]);
  };
  bool finite = true;
  if (row == 0) {
    const Elements own = locate_slots(params, slot);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const double all = smem[i * kThreads + threadIdx.x];
      if (own[i].exists) store(own[i], all);
      finite &= all - all == 0;
    }
  }
  if constexpr (sizeof(Storage) == 4) {
    if (!__syncthreads_or(!finite)) return;
#pragma unroll 1
    for (int i = 0; i < columns * kSlots; ++i) {
      const Element at = locate_slots(params, first + i - i % kSlots)[i % kSlots];
      if (!at.exists) continue;
      const double exact[1] = {exact_products<Storage>(params, at)};
      add_rows<kThreads>(exact, threadIdx.x, 0, kThreads, 1, smem);
      if (threadIdx.x == 0) store(at, smem[0]);
    }
  }
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

constexpr int64_t kMostBlocks = 0x7fffffff;
constexpr int kSharedBytes = (163 << 10) / 2 - 1024;  // two blocks run on an SM of sm_80

// Shared memory of a plan of so many pixels.
inline bool complete(const Problem& problem, int bytes, Plan& plan) {
  const int step = bytes == 2 ? 16 : 8, pitch = kChannels * bytes + (bytes == 2 ? 16 : 32);
  plan.tiles_p = static_cast<int>(ceil_div(problem.P, plan.tile_p));
  plan.tiles_q = static_cast<int>(ceil_div(problem.Q, plan.tile_q));
  const int64_t tiles = ceil_div(problem.N, plan.images) * plan.tiles_p * plan.tiles_q;
  plan.pixels = plan.images * plan.tile_p * plan.tile_q;
  plan.steps = static_cast<int>(ceil_div(plan.pixels, step));
  const int64_t rows = int64_t{plan.tile_p - 1} * problem.stride_h + int64_t{problem.R - 1} * problem.dilation_h + 1;
  const int64_t columns = int64_t{plan.tile_q - 1} * problem.stride_w + int64_t{problem.S - 1} * problem.dilation_w + 1;
  if (rows >= kMostSide || columns >= kMostSide || plan.images >= kMostImages || tiles > kMostBlocks / 2) return false;
  plan.tiles = static_cast<int>(tiles);
  plan.window_h = static_cast<int>(rows);
  plan.window_w = static_cast<int>(columns);
  const int64_t window = plan.images * rows * columns, padded = int64_t{plan.steps} * step;
  const auto reach = [&](const int64_t (&stride)[4], int64_t height, int64_t width) {
    return plan.images * stride[0] + height * stride[2] + width * stride[3];
  };
  if (std::max(reach(problem.x_stride, rows, columns), reach(problem.y_stride, plan.tile_p, plan.tile_q)) > kMostBlocks)
    return false;
  const int64_t stage = (padded + window) * pitch;
  const int64_t all = 2 * stage + pitch + 4 * (3 * padded + 2 * window);
  if (all > kSharedBytes) return false;
  plan.window = static_cast<int>(window);
  plan.stage_bytes = static_cast<int>(stage);
  plan.smem_bytes = static_cast<int>(all);
  return true;
}

// Demands on a plan beyond being the cheapest one; zeros demand nothing.
struct Wish {
  int images, tile_p, tile_q, splits;
};

inline bool make_plan(const Problem& problem, bool aligned, int sms, Plan& plan, const Wish& wish = {}) {
  const int bytes = element_bytes(problem.dtype), piece = 16 / bytes;
  const int group_c = problem.C / problem.groups, group_k = problem.K / problem.groups;
  plan = {};
  if (std::max(group_c, group_k) <= kChannels) {
    plan.pair_groups = std::min(problem.groups, kChannels / std::max(group_c, group_k));
    plan.k_parts = plan.c_parts = 1;
    plan.pairs = static_cast<int>(ceil_div(problem.groups, plan.pair_groups));
  } else {
    plan.k_parts = static_cast<int>(ceil_div(group_k, kChannels));
    plan.c_parts = static_cast<int>(ceil_div(group_c, kChannels));
    const int64_t pairs = int64_t{problem.groups} * plan.k_parts * plan.c_parts;
    if (pairs > kMostBlocks) return false;
    plan.pairs = static_cast<int>(pairs);
  }
  const int count_k = plan.pair_groups > 0 ? plan.pair_groups * group_k : std::min(group_k, kChannels);
  const int count_c = plan.pair_groups > 0 ? plan.pair_groups * group_c : std::min(group_c, kChannels);
  for (int k = 0; k < count_k; k += kTile)
    for (int c = 0; c < count_c; c += kTile) {
      const bool one = plan.pair_groups == 0;
      const int last_k = std::min(k + kTile, count_k) - 1;
      const int first_c = one ? 0 : k / group_k * group_c, behind_c = one ? count_c : (last_k / group_k + 1) * group_c;
      if (c < behind_c && c + kTile > first_c)
        plan.unit[plan.units++] = static_cast<unsigned char>(k / kTile * 4 + c / kTile);
    }
  plan.unit_blocks = static_cast<int>(ceil_div(plan.units, kWarps));
  plan.block_units = static_cast<int>(ceil_div(plan.units, plan.unit_blocks));
  plan.warp_parts = kWarps / plan.block_units;
  const int64_t filter = int64_t{problem.R} * problem.S;
  plan.taps = filter == 1 ? 1 : kMostTaps;
  if (filter > kMostBlocks) return false;
  plan.tap_chunks = static_cast<int>(ceil_div(filter, plan.taps));
  const auto whole = [&](const int64_t (&stride)[4]) {
    return stride[1] == 1 && stride[0] % piece == 0 && stride[2] % piece == 0 && stride[3] % piece == 0;
  };
  plan.pieces = aligned && whole(problem.x_stride) && whole(problem.y_stride) && problem.C % piece == 0 &&
                problem.K % piece == 0 && count_c % piece == 0 && count_k % piece == 0 &&
                (plan.pair_groups > 0 || (group_c % piece == 0 && group_k % piece == 0));

  // The cheapest tile: products, and pixels that are staged.
  const int most_pixels = bytes == 2 ? 128 : 64;
  Plan best{};
  double best_cost = -1;
  for (int most_q = std::min(problem.Q, most_pixels), tile_q = 0; most_q > 0; most_q = tile_q - 1) {
    tile_q = wish.tile_q > 0 ? wish.tile_q : static_cast<int>(ceil_div(problem.Q, ceil_div(problem.Q, most_q)));
    for (int tile_p = wish.tile_p > 0 ? wish.tile_p : std::min(problem.P, most_pixels / tile_q); tile_p > 0; --tile_p) {
      plan.images = 1;
      if (tile_p >= problem.P && tile_q >= problem.Q)
        plan.images = static_cast<int>(std::min<int64_t>(problem.N, most_pixels / (tile_p * tile_q)));
      if (wish.images > 0) plan.images = wish.images;
      plan.tile_p = tile_p;
      plan.tile_q = tile_q;
      if (complete(problem, bytes, plan)) {
        const double products = 40.0 * plan.steps,
                     staged = 0.5 * plan.window + 0.5 * plan.steps * (bytes == 2 ? 16 : 8);
        const double cost = plan.tiles * (std::max(products, staged * (plan.pieces ? 2 : 6)) + 200);
        if (best_cost < 0 || cost < best_cost) best = plan, best_cost = cost;
      }
      if (wish.tile_p > 0) break;
    }
    if (wish.tile_q > 0) break;
  }
  if (best_cost < 0) return false;
  plan = best;
  plan.by_image = make_divisor(int64_t{plan.tile_p} * plan.tile_q);
  plan.by_row = make_divisor(plan.tile_q);
  plan.by_window_image = make_divisor(int64_t{plan.window_h} * plan.window_w);
  plan.by_window_row = make_divisor(plan.window_w);
  plan.slots = int64_t{plan.pairs} * plan.units * plan.tap_chunks * plan.taps * kUnit;
  const int64_t rounds = int64_t{plan.pairs} * plan.unit_blocks * plan.tap_chunks;
  // Partial sums cost twice as much as operands, at most, but for chains of sums that would be too long.
  const int64_t read =
      problem.N * (int64_t{problem.C} * problem.H * problem.W + int64_t{problem.K} * problem.P * problem.Q);
  const int64_t most = std::max<int64_t>(2, 2 * read * bytes / (plan.slots * 4));
  const bool exact = problem.dtype == DType::kFloat32 && !uses_tf32(problem, Operator::kWgrad);
  const int64_t chain = int64_t{exact ? kMostPixels / 4 : kMostPixels} * plan.warp_parts;
  const int64_t chains = ceil_div(int64_t{plan.tiles} * plan.pixels, chain);
  const int64_t room = std::max<int64_t>(1, kMostCopiedBytes / (plan.slots * 4));
  const int64_t wanted = std::max(std::min(most, ceil_div(2 * int64_t{sms}, rounds)), std::min(chains, room));
  const int64_t splits = std::min<int64_t>(plan.tiles, wish.splits > 0 ? wish.splits : wanted);
  plan.split_tiles = static_cast<int>(ceil_div(plan.tiles, splits));
  plan.splits = static_cast<int>(ceil_div(plan.tiles, plan.split_tiles));
  const int shared_sums =
      (plan.warp_parts - 1) * plan.block_units * plan.taps * kUnit * static_cast<int>(sizeof(float));
  plan.smem_bytes = std::max(plan.smem_bytes, shared_sums);
  plan.blocks = rounds * plan.splits;
  return plan.blocks <= kMostBlocks && plan.slots <= kMostBlocks;
}

struct Planned {
  bool exists;
  Plan plan;
};

inline bool is_aligned(const Pointers& pointers) {
  return (reinterpret_cast<uint64_t>(pointers.x) | reinterpret_cast<uint64_t>(pointers.dy)) % 16 == 0;
}

inline const Planned& plan_of(const Problem& problem, bool aligned) {
  thread_local Memo<Planned> memo;
  int sms = 108;  // where there is no GPU
  const int gpu = find_gpu(sms);
  return memo.get(key_of(problem, Operator::kWgrad, !aligned, 0, 0, gpu, sms), [&] {
    Planned planned{};
    planned.exists = make_plan(problem, aligned, sms, planned.plan);
    return planned;
  });
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (op != Operator::kWgrad) return "it computes gradients to weights only";
  if (problem.dtype == DType::kFloat64) return "it has no float64";
  int sms = 0;
  if (find_gpu(sms) < 80) return "it needs compute capability 8.0";
  constexpr int64_t kMostPositions = int64_t{1} << 28;
  if (problem.H + 2 * static_cast<int64_t>(problem.pad_h) >= kMostPositions ||
      problem.W + 2 * static_cast<int64_t>(problem.pad_w) >= kMostPositions)
    return "a padded image side of 2^28 pixels or more";
  return plan_of(problem, false).exists ? nullptr : "no tile of it fits into shared memory, or it takes too many";
}

inline const char* yields(const Problem& problem, Operator op) {
  int sms = 0;
  const int group_c = problem.C / problem.groups, group_k = problem.K / problem.groups;
  if (std::min(group_c, group_k) == 1) return "it is made for groups of several channels";
  const bool few = problem.groups > 1 && std::max(group_c, group_k) < kChannels;
  return find_gpu(sms) == 90 && !few && kHopperWgradEngine.refusal(problem, op) == nullptr
             ? "hopper_wgrad has faster instructions"
             : nullptr;
}

inline int64_t workspace_bytes(const Problem& problem, Operator, const Pointers& pointers) {
  const Plan& plan = plan_of(problem, is_aligned(pointers)).plan;
  return plan.splits * plan.slots * static_cast<int64_t>(sizeof(float));
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

template <typename Format, int TAPS>
inline cudaError_t run(const Params& params, cudaStream_t stream) {
  using Storage = typename Format::Storage;
  constexpr Instance kInstance{"mma_wgrad_kernel", {kTypeId<Storage>, Format::EXACT, TAPS}};
  record(kInstance);
  if constexpr (!is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    const auto kernel = mma_wgrad_kernel<Format, TAPS>;
    const Plan& plan = params.plan;
    cudaError_t error = allow_all_shared_memory(kernel);
    if (error != cudaSuccess) return error;
    error = hopper::launch_early(kernel, static_cast<unsigned>(plan.blocks), kThreads, plan.smem_bytes, stream, params);
    if (error != cudaSuccess) return error;
    const unsigned tiles =
        static_cast<unsigned>(ceil_div(plan.slots, kSlots * (kThreads / rows_of_splits(plan.splits))));
    return hopper::launch_early(sum_kernel<Storage>, tiles, kThreads, kSlots * kThreads * sizeof(double), stream,
                                params);
  }
}

template <typename Format>
inline cudaError_t run(const Params& params, cudaStream_t stream) {
  return params.plan.taps == 1 ? run<Format, 1>(params, stream) : run<Format, kMostTaps>(params, stream);
}

inline cudaError_t launch_planned(const Problem& problem, const Pointers& pointers, const Plan& plan,
                                  cudaStream_t stream) {
  Params params{};
  params.x_ptr = pointers.x;
  params.dy_ptr = pointers.dy;
  params.partial_ptr = static_cast<float*>(pointers.workspace);
  params.out_ptr = pointers.out;
  std::copy_n(problem.x_stride, 4, params.x_stride);
  std::copy_n(problem.y_stride, 4, params.dy_stride);
  std::copy_n(problem.w_stride, 4, params.w_stride);
  params.N = problem.N;
  params.H = problem.H, params.W = problem.W, params.P = problem.P, params.Q = problem.Q;
  params.R = problem.R, params.S = problem.S, params.groups = problem.groups;
  params.group_c = problem.C / problem.groups, params.group_k = problem.K / problem.groups;
  params.stride_h = problem.stride_h, params.stride_w = problem.stride_w;
  params.pad_h = problem.pad_h, params.pad_w = problem.pad_w;
  params.dilation_h = problem.dilation_h, params.dilation_w = problem.dilation_w;
  params.plan = plan;
  switch (problem.dtype) {
    case DType::kFloat32:
      return uses_tf32(problem, Operator::kWgrad) ? run<Format<float, false>>(params, stream)
                                                  : run<Format<float, true>>(params, stream);
    case DType::kFloat16:
      return run<Format<Half, false>>(params, stream);
    case DType::kBFloat16:
      return run<Format<BFloat16, false>>(params, stream);
    case DType::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

inline cudaError_t launch(Operator, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  const Planned& planned = plan_of(problem, is_aligned(pointers));
  return planned.exists ? launch_planned(problem, pointers, planned.plan, stream) : cudaErrorInvalidConfiguration;
}

#endif  // launchers

inline void describe(const Problem& problem, Operator, char* text, size_t text_size) {
  const Plan& plan = plan_of(problem, true).plan;
  snprintf(
      text, text_size,
      "tile of %d x %d x %d pixels, filled by %s, %d units of 16 x 16 channels a block, %d warps a unit, %d splits, "
      "%d bytes of shared memory, %lld blocks",
      plan.images, plan.tile_p, plan.tile_q, plan.pieces ? "copies" : "elements", plan.block_units, plan.warp_parts,
      plan.splits, plan.smem_bytes, static_cast<long long>(plan.blocks));
}

#endif  // host

}  // namespace mma_wgrad

#if (defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)) && !defined(__CUDACC_RTC__)
extern const Engine kMmaWgradEngine{"mma_wgrad",       mma_wgrad::refusal,  mma_wgrad::workspace_bytes,
                                    mma_wgrad::launch, mma_wgrad::describe, mma_wgrad::yields};
#endif

}  // namespace modelnew
