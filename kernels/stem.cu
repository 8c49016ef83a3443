// stem engine: few input channels on Hopper's tensor cores, for fp32, fp16 and bf16 tensors: the first layer of a
// network, and the input gradient of 1x1 filters with few output channels, the last layer of networks that segment
// images. One launch, no workspace. Deterministic: one sum an output, in one order.
//
// GEMM view: rows = output pixels, columns = output channels, reduction = (channel, r, quad, term). A quad is four
// neighbouring taps of a row of the filter; the last one of a row is filled up with zero weights. Channels that are
// neighbours in memory belong to the taps: a row of the filter is then S * C terms, (r, quad, term), and x is one plane
// of C times as many columns.
//
//   x window:  [channel][row][column], all that the tile's outputs read, by one box (a bulk copy, zeros outside of x)
//
//   +-------- columns --------+
//   | l l . a a a a . . . . . |     word of x = word of the output + offset of the quad + term
//   | . . . b b b b . . . . . |
//   +-------------------------+     l: words in front of a row, because boxes start at multiples of 16 bytes
//
// The tensor core takes 8 terms at a time, a step: quads a and b. A lane of wgmma's operand in registers has terms t
// and t + 4 of rows n and n + 8, so it loads single words, number t of quad a and of quad b, for two outputs. The
// offsets of quads are parameters of the kernel, and so in uniform registers: four loads a step, and no instruction for
// addresses. Loads meet all banks where neighbouring outputs are 1, 2 or 6 words apart, half of them where they are 3
// or 4.
//
//   w:   [step][quad][channel][term] x 4 bytes, resident: of the second operand, rows of 16 bytes. Every block packs
//        its own while its first window is on its way.
//
// One block an SM, for the life of the launch, in tiles of the same output channels, 20 warps in two roles:
//
//   16 warps   four warpgroups, each with every fourth block of 64 outputs: operands from the window, wgmma, then each
//              warp stages and stores its own 16 outputs
//   4 warps    one thread orders boxes of x; under the TF32 contract all of them round the window in place, once for
//              each value and not for each of its products. They load single values where no box can
//
//   memory --box--> window --(rounded)--> registers --> wgmma --> registers --> staging --boxes--> memory
//                                w, resident ------------^
//
// Tensors of 16 bits take one product, which is exact: TF32 has 8 bits of exponent and 10 of mantissa, so that all that
// fp16 and bf16 hold, also what is subnormal there, are operands as they are. Their boxes come to a landing of their
// own; the four warps widen what is there into a window, where rounding stands above, and the landing is free for the
// next box. Weights and bias are widened as they are packed, sums narrowed as they are staged: once, to nearest even.
//
//   memory --box--> landing --(widened)--> window --> registers --> wgmma --> ...
//
// wgmma with 16-bit operands would take twice as many terms at a time, but in words of two, and a pixel of three values
// starts within a word every other time. This is untested.
//
// Full fp32 accuracy takes three products: v = first + rest, both TF32, and rest*first + first*rest + first*first, of 8
// terms at a time, which are then added up by ordinary additions, because the tensor core truncates (as in mma.cu).
//
// Inf and NaN: where one lies beside a row of taps, a zero weight makes NaN of it; the rest of an Inf is NaN, and a
// value near the largest rounds to Inf. Whatever is not finite at the end is computed again, by multiply-adds, in
// exact_output.
//
// y is stored by boxes of 16 pixels x 32 channels (of 16 bits, all channels of the tile), in either memory format, so
// that each warp goes on by itself. Which row of the operand is which output is free: a lane's two rows are
// neighbouring pixels, staged by 8 bytes (of 16 bits, by 4).
//
// Bound by memory with one product: loads and stores share the bandwidth, and the instructions around wgmma are nearly
// as long. With three products the additions between them and wgmma bound it. Measurements: docs/lab/stem.md.
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstdio>

#include "device.cuh"
#include "engines.cuh"
#include "memo.cuh"
#endif

#include "async_copy.cuh"
#include "correlation.cuh"
#include "divisor.cuh"
#include "numerics.cuh"
#include "problem.cuh"
#include "ptx.cuh"
#include "tensor_map.cuh"
#include "tf32.cuh"
#include "wgmma.cuh"

namespace modelnew {
namespace stem {

// ---- Geometry, host and device ----

constexpr int kMostChannels = 7;  // of x: more are a matter for engines whose steps are channels
constexpr int kWarpgroups = 4;    // that multiply (docs/lab/stem.md)
constexpr int kLoadingThreads = 128, kThreads = 128 * kWarpgroups + kLoadingThreads;
// Registers of a thread, out of 96 that each has at first.
constexpr int kMultiplyingRegisters = 112, kLoadingRegisters = 32;
static_assert(kWarpgroups * kMultiplyingRegisters + kLoadingRegisters <= 96 * (kWarpgroups + 1),
              "registers are given back before they are taken");
constexpr int kBlock = 64;       // outputs of a warpgroup at a time
constexpr int kQuad = 4;         // terms
constexpr int kMostQuads = 256;  // of which offsets are parameters of the kernel
constexpr int kGroupSteps = 3;   // of one product: while these are multiplied, as many are loaded (7x7 has 7 * 3)
constexpr int kStages = 2;       // windows: one is multiplied, the next one comes
constexpr int kMostTileChannels = 64;
constexpr int kSharedBytes = 232448;  // of a block
constexpr int kBoxPixels = 16;        // of a box of y

// Storage type of the tensors, and the number of products.
struct Format {
  int bytes;   // of a value
  bool exact;  // three products of parts
};

// A warp has a box of y for each so many channels of its tile: a pixel's are 128 bytes, or all that there are.
MODELNEW_HOST_DEVICE constexpr int box_channels(int bytes, int tile_k) {
  return 128 / bytes < tile_k ? 128 / bytes : tile_k;
}

// How y is stored.
enum class Stores : int {
  kPlanes,        // boxes of [channel][pixel]
  kChannelsLast,  // boxes of [pixel][channel]
  kSingle         // single values
};

struct Plan {
  int tile_k, tile_p, tile_q;     // channels, rows and columns of a tile
  int tiles_k, tiles_p, tiles_q;  // of all channels, of an image
  int tiles;                      // of all images, of the same channels
  int blocks;                     // of the launch, a multiple of tiles_k
  bool lines;                     // channels of x belong to the taps
  int row_terms, row_quads;       // of a row of the filter
  int quads, steps;               // of the reduction
  int rows, columns, lead;        // of a window, in words; words in front of a row
  int pixel_words, term_words;    // from a neighbour to the next one in a window
  int x_bytes;                    // of a window
  bool in_box;
  Stores stores;
  bool run;  // outputs of a tile are neighbours in memory beyond the ends of rows
  int smem_bytes;
  double cycles;  // estimate
};

struct Params {
  const void *in_ptr, *w_ptr, *bias_ptr;
  void* out_ptr;
  Correlation of;
  Plan plan;
  Divisor by_tiles_q, by_tiles_p, by_tile_q, by_rows, by_filter_quads, by_row_quads;
  uint32_t offsets[kMostQuads + 2];  // of quads, in bytes; a step more than there is may be loaded
  Divisor by_pairs;                  // of values of 16 bits in a line of a window
  hopper::BoxMap in_map, out_map;
};

// A block's shared memory: where its parts start. Barriers come first.
struct SharedLayout {
  int bias, weights, staging, x, landing, end;
};

constexpr int kBias = 64;
static_assert(3 * kStages * 8 <= kBias, "room for barriers");

MODELNEW_HOST_DEVICE inline int window_bytes(const Plan& plan) { return (plan.x_bytes + 127) / 128 * 128; }
MODELNEW_HOST_DEVICE inline int weight_bytes(const Plan& plan) { return plan.steps * 2 * kQuad * plan.tile_k * 4; }

// Weights that are split come in two parts, one behind the other. Values of 16 bits land before they are widened.
MODELNEW_HOST_DEVICE inline SharedLayout shared_layout(const Plan& plan, const Format& format) {
  SharedLayout layout{};
  layout.bias = kBias;
  layout.weights = (kBias + 4 * kMostTileChannels + 127) / 128 * 128;
  layout.staging = (layout.weights + (format.exact ? 2 : 1) * weight_bytes(plan) + 1023) / 1024 * 1024;
  const int staged_pixels = plan.stores == Stores::kSingle ? 0 : 4 * kWarpgroups * kBoxPixels;
  layout.x = layout.staging + staged_pixels * plan.tile_k * format.bytes;
  layout.landing = layout.x + kStages * window_bytes(plan);
  layout.end = layout.landing + (format.bytes == 4 ? 0 : plan.x_bytes / 4 * format.bytes);
  return layout;
}

struct Tile {
  int n, p, q;
};

// The last tile of y comes first: what reads y next finds its first values in the L2 cache.
MODELNEW_HOST_DEVICE inline Tile locate_tile(const Params& params, int number) {
  const Plan& plan = params.plan;
  const int from_start = plan.tiles - 1 - number;
  const int row = quotient(from_start, params.by_tiles_q), image = quotient(row, params.by_tiles_p);
  return {image, (row - image * plan.tiles_p) * plan.tile_p, (from_start - row * plan.tiles_q) * plan.tile_q};
}

// The channel and the row of the filter that a quad belongs to, and its first term in that row.
struct Quad {
  int channel, r, first;
};

MODELNEW_HOST_DEVICE inline Quad locate_quad(const Params& params, int i) {
  const int channel = quotient(i, params.by_filter_quads);
  const int of_filter = i - channel * static_cast<int>(params.by_filter_quads.divisor);
  const int r = quotient(of_filter, params.by_row_quads);
  return {channel, r, kQuad * (of_filter - r * params.plan.row_quads)};
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// ---- Device code ----

// mbarriers of a window: its bytes have come, its values are rounded or widened, all have read it.
struct Barriers {
  uint32_t full, rounded, empty;

  __device__ __forceinline__ Barriers(uint32_t smem, int stage)
      : full(smem + 24 * stage), rounded(full + 8), empty(full + 16) {}
};

// -- Pack: w -> [step][quad][channel][term], by all threads --

__device__ __forceinline__ float load_wide(const float* from) { return __ldg(from); }

template <typename T>
__device__ __forceinline__ float load_wide(const T* from) {
  return widen(T{__ldg(&from->bits)});
}

template <typename T, bool EXACT>
__device__ __forceinline__ void pack_weights(const Params& params, int first_k, const SharedLayout& layout,
                                             uint8_t* smem) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int channels = min(plan.tile_k, of.out_channels - first_k);
  // Lanes have 4 terms of 8 channels: sectors of w, and all banks.
#pragma unroll 1
  for (int i = warp_id; i < 2 * plan.steps; i += kThreads / 32) {
    const Quad quad = locate_quad(params, i);
    const int term = quad.first + lane_id % 4;
    const int s = plan.lines ? term / of.in_channels : term;
    const int channel = plan.lines ? term - s * of.in_channels : quad.channel;
    const bool exists = i < plan.quads && term < plan.row_terms;
    const T* const from = static_cast<const T*>(params.w_ptr) + channel * of.w_stride_in + quad.r * of.w_stride_r +
                          s * of.w_stride_s + (first_k + lane_id / 4) * of.w_stride_out;
    uint32_t* const to = reinterpret_cast<uint32_t*>(smem + layout.weights) + i * kQuad * plan.tile_k + lane_id;
#pragma unroll 8
    for (int k = 0; k < plan.tile_k; k += 8) {
      const float value = exists && k + lane_id / 4 < channels ? load_wide(from + k * of.w_stride_out) : 0.0f;
      uint32_t first, rest = 0;
      split<EXACT>(float_bits(value), first, rest);
      to[kQuad * k] = first;
      if constexpr (EXACT) to[kQuad * k + weight_bytes(plan) / 4] = tf32_operand(rest);
    }
  }
  if (params.bias_ptr != nullptr && static_cast<int>(threadIdx.x) < channels)
    reinterpret_cast<float*>(smem + layout.bias)[threadIdx.x] =
        load_wide(static_cast<const T*>(params.bias_ptr) + first_k + threadIdx.x);
}

// -- Load and round or widen x, by the last four warps --

// Single values of 16 bits, two neighbours a thread. All of a batch are on their way before one is waited for.
template <typename T>
__device__ __forceinline__ void load_pairs(const Params& params, const Tile& tile, int h, int w, uint32_t to) {
  constexpr int BATCH = 4;
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int of_line = plan.columns / 2, pairs = of_line * plan.rows * of.in_channels;
  const T* const image = static_cast<const T*>(params.in_ptr) + tile.n * of.in_stride[0];
#pragma unroll 1
  for (int first = threadIdx.x % 128; first < pairs; first += BATCH * kLoadingThreads) {
    uint32_t words[BATCH][2];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int pair = first + i * kLoadingThreads, line = quotient(pair, params.by_pairs);
      const int channel = quotient(line, params.by_rows);
      const int in_h = h + line - channel * plan.rows, in_w = w + 2 * (pair - line * of_line);
      const bool row_exists = pair < pairs && in_h >= 0 && in_h < of.H;
      const T* const from = image + channel * of.in_stride[1] + in_h * of.in_stride[2] + in_w * of.in_stride[3];
      hopper::load_2(from, row_exists && in_w >= 0 && in_w < of.W, words[i][0]);
      hopper::load_2(from + of.in_stride[3], row_exists && in_w >= -1 && in_w + 1 < of.W, words[i][1]);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int pair = first + i * kLoadingThreads;
      if (pair < pairs) hopper::store_shared(to + 4 * pair, words[i][0] | words[i][1] << 16);
    }
  }
}

template <typename T>
__device__ __forceinline__ void load_window(const Params& params, const Tile& tile, uint32_t to, uint32_t full) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int h = tile.p * of.stride_h - of.pad_h, w = tile.q * of.stride_w - of.pad_w;
  if (plan.in_box) {
    if (threadIdx.x % 128 != 0) return;
    hopper::barrier_arrive_expecting(full, plan.x_bytes / 4 * static_cast<int>(sizeof(T)));
    if (plan.lines)
      hopper::load_box(params.in_map, to, w * of.in_channels - plan.lead, h, tile.n, 0, full);
    else
      hopper::load_box(params.in_map, to, w - plan.lead, h, 0, tile.n, full);
    return;
  }
  if constexpr (sizeof(T) == 2) {
    load_pairs<T>(params, tile, h, w, to);
    hopper::barrier_arrive(full);
  } else {
    // A warp takes a row.
    const int lane_id = threadIdx.x % 32;
    const int64_t step = 32 * of.in_stride[3];
    const T* const image = static_cast<const T*>(params.in_ptr) + tile.n * of.in_stride[0];
#pragma unroll 1
    for (int line = threadIdx.x % 128 / 32; line < plan.rows * of.in_channels; line += kLoadingThreads / 32) {
      const int channel = quotient(line, params.by_rows), in_h = h + line - channel * plan.rows;
      const bool row_exists = in_h >= 0 && in_h < of.H;
      const T* from = image + channel * of.in_stride[1] + in_h * of.in_stride[2] + (w + lane_id) * of.in_stride[3];
      const uint32_t line_smem = to + 4 * line * plan.columns;
#pragma unroll 4
      for (int column = lane_id; column < plan.columns; column += 32, from += step) {
        const bool exists = row_exists && static_cast<unsigned>(w + column) < static_cast<unsigned>(of.W);
        hopper::copy_async<4>(line_smem + 4 * column, exists ? from : params.in_ptr, exists ? 4 : 0);
      }
    }
    hopper::copies_arrive(full);
  }
}

__device__ __forceinline__ void round_window(const Plan& plan, uint8_t* window) {
  uint4* const fours = reinterpret_cast<uint4*>(window);
#pragma unroll 4
  for (int i = threadIdx.x % 128; i < window_bytes(plan) / 16; i += kLoadingThreads) {
    uint4 four = fours[i];
    four.x = tf32_operand(four.x);
    four.y = tf32_operand(four.y);
    four.z = tf32_operand(four.z);
    four.w = tf32_operand(four.w);
    fours[i] = four;
  }
}

template <typename T>
__device__ __forceinline__ void widen_window(const Plan& plan, const uint8_t* landing, uint8_t* window) {
  const auto low = [](uint32_t pair) { return float_bits(widen(T{static_cast<uint16_t>(pair & 0xffffu)})); };
  const auto high = [](uint32_t pair) { return float_bits(widen(T{static_cast<uint16_t>(pair >> 16)})); };
#pragma unroll 4
  for (int i = threadIdx.x % 128; i < plan.x_bytes / 16; i += kLoadingThreads) {
    const uint2 pairs = reinterpret_cast<const uint2*>(landing)[i];
    reinterpret_cast<uint4*>(window)[i] = make_uint4(low(pairs.x), high(pairs.x), low(pairs.y), high(pairs.y));
  }
}

// The first window has been ordered. Of values of 16 bits the next one comes while this one, widened, is multiplied,
// and lies there when a place for it is free.
template <typename T, bool EXACT>
__device__ __forceinline__ void load(const Params& params, const SharedLayout& layout, uint8_t* smem, int first_tile,
                                     int tile_step) {
  const Plan& plan = params.plan;
  const uint32_t base = hopper::smem_address(smem);
  if (EXACT && plan.in_box && threadIdx.x % 128 != 0) return;
  int count = 0;
#pragma unroll 1
  for (int number = first_tile; number < plan.tiles; number += tile_step, ++count) {
    const int stage = count % kStages, next = (count + 1) % kStages, phase = count / kStages & 1;
    const Barriers barriers(base, stage), of_next(base, next);
    if constexpr (!EXACT) {
      hopper::barrier_wait(barriers.full, phase);
      uint8_t* const window = smem + layout.x + stage * window_bytes(plan);
      if constexpr (sizeof(T) == 2) {
        hopper::barrier_wait_idly(barriers.empty, phase ^ 1);
        widen_window<T>(plan, smem + layout.landing, window);
      } else {
        round_window(plan, window);
      }
      hopper::fence_async();  // before the next box comes here
      hopper::barrier_arrive(barriers.rounded);
    }
    if (number + tile_step >= plan.tiles) break;
    uint32_t to = base + layout.landing;
    if constexpr (sizeof(T) == 2) {
      hopper::barrier_wait(barriers.rounded, phase);  // all have read what landed
    } else {
      hopper::barrier_wait_idly(of_next.empty, ((count + 1) / kStages & 1) ^ 1);
      to = base + layout.x + next * window_bytes(plan);
    }
    load_window<T>(params, locate_tile(params, number + tile_step), to, of_next.full);
  }
}

// -- Multiply, and store --

// One output by multiply-adds, a row of the filter at a time: for Inf and NaN.
template <typename T>
__device__ __noinline__ float exact_output(const Params& params, int n, int k, int p, int q) {
  const Correlation& of = params.of;
  const T* const x = static_cast<const T*>(params.in_ptr) + n * of.in_stride[0];
  const T* const w = static_cast<const T*>(params.w_ptr) + k * of.w_stride_out;
  float sum = 0;
#pragma unroll 1
  for (int c = 0; c < of.in_channels; ++c) {
#pragma unroll 1
    for (int r = 0; r < of.R; ++r) {
      const int in_h = p * of.stride_h - of.pad_h + r * of.dilation_h;
      float row = 0;
#pragma unroll 1
      for (int s = 0; s < of.S; ++s) {
        const int in_w = q * of.stride_w - of.pad_w + s * of.dilation_w;
        const bool exists = in_h >= 0 && in_h < of.H && in_w >= 0 && in_w < of.W;  // else 0, also times an Inf
        row = fmaf(exists ? widen(x[c * of.in_stride[1] + in_h * of.in_stride[2] + in_w * of.in_stride[3]]) : 0.0f,
                   widen(w[c * of.w_stride_in + r * of.w_stride_r + s * of.w_stride_s]), row);
      }
      sum += row;
    }
  }
  return sum;
}

// Sums of a thread's two outputs, [channel / 8][output][channel % 2], see wgmma.cuh.
template <int TILE_K>
using Sums = float[TILE_K / 2];

// The words of x of a step; `pixel`: where those of the thread's two outputs start, at its term of a quad.
__device__ __forceinline__ void load_words(const Params& params, const uint32_t (&pixel)[2], int step,
                                           uint32_t (&words)[4]) {
#pragma unroll
  for (int quad = 0; quad < 2; ++quad) {
    const uint32_t offset = params.offsets[2 * step + quad];
#pragma unroll
    for (int i = 0; i < 2; ++i) hopper::load_shared(words[2 * quad + i], pixel[i] + offset);
  }
}

template <typename T, int TILE_K>
__device__ __forceinline__ void multiply(const Params& params, const uint32_t (&pixel)[2], uint32_t weights,
                                         Sums<TILE_K>& acc) {
  uint32_t a[2][kGroupSteps][4];
  const auto order = [&](int step, uint32_t (&words)[kGroupSteps][4], bool first) {
#pragma unroll
    for (int i = 0; i < kGroupSteps; ++i) load_words(params, pixel, step + i, words[i]);
    hopper::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kGroupSteps; ++i)
      hopper::WgmmaRegisters<float, TILE_K>::multiply(acc, words[i], weights + (step + i) * 2 * TILE_K,
                                                      !first || i > 0);
    hopper::wgmma_commit();
  };
  order(0, a[0], true);
  // Groups of fp32 are of an odd number of steps: one product is for 7x7 filters of 3 channels only.
#pragma unroll 1
  for (int step = kGroupSteps; step < params.plan.steps; step += 2 * kGroupSteps) {
    order(step, a[1], false);
    hopper::wgmma_wait<1>();  // a[0] may be overwritten
    if constexpr (sizeof(T) == 2) {
      if (step + kGroupSteps >= params.plan.steps) break;
    }
    order(step + kGroupSteps, a[0], false);
    hopper::wgmma_wait<1>();  // a[1] may be overwritten
  }
  hopper::wgmma_wait<0>();
  hopper::wgmma_settle(acc);
}

// Three products. A warpgroup waits for each step: the other ones multiply meanwhile.
template <int TILE_K>
__device__ __forceinline__ void multiply_exactly(const Params& params, const uint32_t (&pixel)[2], uint32_t weights,
                                                 Sums<TILE_K>& acc) {
  using Multiply = hopper::WgmmaRegisters<float, TILE_K>;
  const uint32_t rests = weights + static_cast<uint32_t>(weight_bytes(params.plan)) / 16;
  uint32_t words[4];
  load_words(params, pixel, 0, words);
#pragma unroll
  for (float& sum : acc) sum = 0;
#pragma unroll 1
  for (int step = 0; step < params.plan.steps; ++step) {
    uint32_t a[4], a_rest[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      split<true>(words[e], a[e], a_rest[e]);
      // Rounded: truncation of a rest near the smallest number errs by 2^-136, twice the bound (docs/lab/stem.md).
      a_rest[e] = tf32_operand(a_rest[e]);
    }
    const uint32_t row = step * 2 * TILE_K;
    Sums<TILE_K> part;
    hopper::wgmma_fence();
    Multiply::multiply(part, a_rest, weights + row, 0);
    Multiply::multiply(part, a, rests + row, 1);
    Multiply::multiply(part, a, weights + row, 1);
    hopper::wgmma_commit();
    load_words(params, pixel, step + 1, words);
    hopper::wgmma_wait<0>();
    hopper::wgmma_settle(part);
#pragma unroll
    for (int i = 0; i < TILE_K / 2; ++i) acc[i] += part[i];
  }
}

// The two outputs of a thread, in its tile. Those that do not exist have the place of the last one that does.
struct Outputs {
  int row[2], column[2];
  bool exist[2];

  __device__ __forceinline__ Outputs(const Params& params, int first) {
    const int last = params.plan.tile_p * params.plan.tile_q - 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = first + threadIdx.x % 32 / 4 * 2 + i, place = min(m, last);
      exist[i] = m <= last;
      row[i] = quotient(place, params.by_tile_q);
      column[i] = place - row[i] * params.plan.tile_q;
    }
  }
};

// Sums that are not finite, without a bias.
template <typename T, int TILE_K>
__device__ __forceinline__ void repair(const Params& params, const Tile& tile, const Outputs& outputs, int first_k,
                                       Sums<TILE_K>& acc) {
  float probe = 0;
#pragma unroll
  for (float sum : acc) probe = fmaf(sum, 0.0f, probe);
  if (probe == 0) return;
#pragma unroll 1
  for (int i = 0; i < TILE_K / 2; ++i) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < TILE_K / 2; ++j) sum = i == j ? acc[j] : sum;
    const bool second = i % 4 >= 2;
    const int p = tile.p + (second ? outputs.row[1] : outputs.row[0]);
    const int q = tile.q + (second ? outputs.column[1] : outputs.column[0]);
    const int k = first_k + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    if (has_finite_bits(sum) || k >= params.of.out_channels || p >= params.of.P || q >= params.of.Q) continue;
    sum = exact_output<T>(params, tile.n, k, p, q);
#pragma unroll
    for (int j = 0; j < TILE_K / 2; ++j) acc[j] = i == j ? sum : acc[j];
  }
}

template <typename T, int TILE_K>
__device__ __forceinline__ void store_single(const Params& params, const Tile& tile, const Outputs& outputs,
                                             int first_k, const float* bias, const Sums<TILE_K>& acc) {
  const Correlation& of = params.of;
  const int channel = threadIdx.x % 4 * 2, channels = of.out_channels - first_k;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int p = tile.p + outputs.row[i], q = tile.q + outputs.column[i];
    if (!outputs.exist[i] || p >= of.P || q >= of.Q) continue;
    T* const to = static_cast<T*>(params.out_ptr) + tile.n * of.out_stride[0] + p * of.out_stride[2] +
                  q * of.out_stride[3] + (first_k + channel) * of.out_stride[1];
#pragma unroll
    for (int j = 0; j < TILE_K / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int k = 8 * j + channel + e;
        if (k < channels)
          narrow(acc[4 * j + 2 * i + e] + (bias == nullptr ? 0.0f : bias[k]), to[(8 * j + e) * of.out_stride[1]]);
      }
    }
  }
}

// Channels in [channel / 8][output][channel % 2], as sums are, of a warp's 16 outputs as a box of [channel][pixel]: a
// thread has two neighbouring pixels.
template <typename T, int COUNT>
__device__ __forceinline__ void stage_planes(uint8_t* box, const float (&values)[COUNT]) {
  const int lane_id = threadIdx.x % 32, channel = lane_id % 4 * 2, pixel = lane_id / 4 * 2;
  if constexpr (sizeof(T) == 4) {
    // Piece number i, four pixels, of channel k lies at place i ^ k / 2 % 4 of its 64 bytes. Every other lane stages
    // the second one of its two channels first, so that neighbouring lanes meet different halves of the banks.
    const bool odd_first = lane_id % 2 != 0;
    uint8_t* const to = box + (channel + odd_first) * 64 + (pixel / 4 ^ lane_id % 4) * 16 + pixel % 4 * 4;
    const int to_other = odd_first ? -64 : 64;
#pragma unroll
    for (int j = 0; j < COUNT / 4; ++j) {
      const float2 even = make_float2(values[4 * j], values[4 * j + 2]);
      const float2 odd = make_float2(values[4 * j + 1], values[4 * j + 3]);
      *reinterpret_cast<float2*>(to + 8 * j * 64) = odd_first ? odd : even;
      *reinterpret_cast<float2*>(to + 8 * j * 64 + to_other) = odd_first ? even : odd;
    }
  } else {
    // A channel's 32 bytes, as they are. Two lanes of four stage the second one of their channels first: channels 0, 2,
    // 5 and 7 meet all banks.
    const bool odd_first = lane_id % 4 >= 2;
    uint8_t* const to = box + (channel + odd_first) * 32 + pixel * 2;
    const int to_other = odd_first ? -32 : 32;
#pragma unroll
    for (int j = 0; j < COUNT / 4; ++j) {
      const uint32_t even = narrow_pair(values[4 * j], values[4 * j + 2], T{});
      const uint32_t odd = narrow_pair(values[4 * j + 1], values[4 * j + 3], T{});
      *reinterpret_cast<uint32_t*>(to + 8 * j * 32) = odd_first ? odd : even;
      *reinterpret_cast<uint32_t*>(to + 8 * j * 32 + to_other) = odd_first ? even : odd;
    }
  }
}

// The same as a box of [pixel][channel].
template <typename T, int COUNT>
__device__ __forceinline__ void stage_pixels(uint8_t* box, const float (&values)[COUNT]) {
  const int lane_id = threadIdx.x % 32, channel = lane_id % 4 * 2, pixel = lane_id / 4 * 2;
  if constexpr (sizeof(T) == 4) {
    // Piece number i, four channels, of a pixel lies at place i ^ pixel % 8 of its 128 bytes.
#pragma unroll
    for (int j = 0; j < COUNT / 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<float2*>(box + (pixel + i) * 128 + ((2 * j + channel / 4) ^ (pixel + i) % 8) * 16 +
                                   channel % 4 * 4) = make_float2(values[4 * j + 2 * i], values[4 * j + 2 * i + 1]);
    }
  } else {
    // Piece number i, eight channels, of a pixel lies at place i ^ pixel % 8 of its 128 bytes, or of its 64 bytes at
    // i ^ pixel / 2 % 4. Half of the lanes stage their second pixel first, so that pixels differ modulo 8.
    constexpr int ROW = 4 * COUNT, PIECES = ROW / 16;
    const bool odd_first = lane_id >= 16;
    const int first = pixel + odd_first, other = pixel + !odd_first;
#pragma unroll
    for (int j = 0; j < COUNT / 4; ++j) {
      const uint32_t even = narrow_pair(values[4 * j], values[4 * j + 1], T{});
      const uint32_t odd = narrow_pair(values[4 * j + 2], values[4 * j + 3], T{});
      const auto place = [&](int row) {
        return reinterpret_cast<uint32_t*>(box + row * ROW + (j ^ row * ROW / 128 % PIECES) * 16 + channel * 2);
      };
      *place(first) = odd_first ? odd : even;
      *place(other) = odd_first ? even : odd;
    }
  }
}

// A warp's 16 outputs, from number `first` of the tile on.
template <typename T, int TILE_K>
__device__ __forceinline__ void store_boxes(const Params& params, const Tile& tile, int first, int first_k,
                                            const float* bias, uint8_t* staging, const Sums<TILE_K>& acc) {
  constexpr int BYTES = sizeof(T), BOX_CHANNELS = box_channels(BYTES, TILE_K);
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int lane_id = threadIdx.x % 32, channel = lane_id % 4 * 2;
  // Where they are: in the run of the image, or in a row.
  int row = 0, column;
  bool exist;
  if (plan.run) {
    column = tile.p * of.Q + first;
    exist = first < plan.tile_p * plan.tile_q && column < of.P * of.Q;
  } else {
    row = quotient(first, params.by_tile_q);
    column = tile.q + first - row * plan.tile_q;
    exist = row < plan.tile_p && tile.p + row < of.P && column < of.Q;
    row += tile.p;
  }
#pragma unroll
  for (int chunk = 0; chunk < TILE_K / BOX_CHANNELS; ++chunk) {
    uint8_t* const box = staging + chunk * kBoxPixels * BOX_CHANNELS * BYTES;
    float values[BOX_CHANNELS / 2];
#pragma unroll
    for (int i = 0; i < BOX_CHANNELS / 2; ++i) values[i] = acc[BOX_CHANNELS / 2 * chunk + i];
    if (bias != nullptr) {
#pragma unroll
      for (int j = 0; j < BOX_CHANNELS / 8; ++j) {
        const float2 added = *reinterpret_cast<const float2*>(bias + BOX_CHANNELS * chunk + 8 * j + channel);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          values[4 * j + 2 * i] += added.x;
          values[4 * j + 2 * i + 1] += added.y;
        }
      }
    }
    if (lane_id == 0) hopper::bulk_stores_wait_read<TILE_K / BOX_CHANNELS - 1>();
    __syncwarp();  // the box that was here has been read
    if (plan.stores == Stores::kPlanes)
      stage_planes<T>(box, values);
    else
      stage_pixels<T>(box, values);
    hopper::fence_async();
    __syncwarp();  // all of it is staged
    if (lane_id == 0) {
      const int k = first_k + BOX_CHANNELS * chunk;
      if (exist && k < of.out_channels) {
        if (plan.stores == Stores::kPlanes)
          hopper::store_box<false>(params.out_map, box, column, row, k, tile.n);
        else
          hopper::store_box(params.out_map, box, k, column, row, tile.n);
      }
      hopper::bulk_stores_commit();
    }
  }
}

template <typename T, bool EXACT, int TILE_K>
__device__ __forceinline__ void compute(const Params& params, const SharedLayout& layout, uint8_t* smem, int warpgroup,
                                        int first_k, int first_tile, int tile_step) {
  const Plan& plan = params.plan;
  const uint32_t base = hopper::smem_address(smem);
  const int warp_id = hopper::uniform(threadIdx.x % 128 / 32), lane_id = threadIdx.x % 32;
  const uint32_t weights = hopper::descriptor(base + layout.weights, 16 * TILE_K);
  const float* const bias = params.bias_ptr == nullptr ? nullptr : reinterpret_cast<const float*>(smem + layout.bias);
  uint8_t* const staging =
      smem + layout.staging + (warpgroup * 4 + warp_id) * kBoxPixels * TILE_K * static_cast<int>(sizeof(T));
  const int blocks_m = (plan.tile_p * plan.tile_q + kBlock - 1) / kBlock;
  // The stride of a single row or column may be anything.
  const uint32_t row_bytes = 4u * params.of.stride_h * plan.columns,
                 pixel_bytes = 4u * params.of.stride_w * plan.pixel_words;
  int count = 0;
#pragma unroll 1
  for (int number = first_tile; number < plan.tiles; number += tile_step, ++count) {
    const Tile tile = locate_tile(params, number);
    const int stage = count % kStages;
    const Barriers barriers(base, stage);
    const uint32_t window = base + layout.x + stage * window_bytes(plan) + 4 * (lane_id % 4) * plan.term_words;
    hopper::barrier_wait(EXACT ? barriers.full : barriers.rounded, count / kStages & 1);
#pragma unroll 1
    for (int block = warpgroup; block < blocks_m; block += kWarpgroups) {
      const int first = block * kBlock + warp_id * kBoxPixels;
      const Outputs outputs(params, first);
      uint32_t pixel[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) pixel[i] = window + outputs.row[i] * row_bytes + outputs.column[i] * pixel_bytes;
      Sums<TILE_K> acc;
      if constexpr (EXACT)
        multiply_exactly<TILE_K>(params, pixel, weights, acc);
      else
        multiply<T, TILE_K>(params, pixel, weights, acc);
      if (block + kWarpgroups >= blocks_m) hopper::barrier_arrive(barriers.empty);
      repair<T, TILE_K>(params, tile, outputs, first_k, acc);
      __syncwarp();  // wgmma wants whole warps
      if (plan.stores == Stores::kSingle)
        store_single<T, TILE_K>(params, tile, outputs, first_k, bias, acc);
      else
        store_boxes<T, TILE_K>(params, tile, first, first_k, bias, staging, acc);
    }
    if (warpgroup >= blocks_m) hopper::barrier_arrive(barriers.empty);
  }
  if (lane_id == 0) hopper::bulk_stores_wait_read<0>();  // shared memory stays until then
}

template <typename T, bool EXACT, int TILE_K>
__global__ void __launch_bounds__(kThreads, 1) stem_kernel(const __grid_constant__ Params params) {
#if defined(MODELNEW_SM90A)
  extern __shared__ __align__(1024) uint8_t modelnew_stem_smem[];
  uint8_t* const smem = modelnew_stem_smem;
  const Plan& plan = params.plan;
  const uint32_t base = hopper::smem_address(smem);
  const SharedLayout layout = shared_layout(plan, Format{sizeof(T), EXACT});
  // Blocks of different channels take the same tiles at the same time, so that x comes from memory once.
  const int first_tile = blockIdx.x / plan.tiles_k, tile_step = gridDim.x / plan.tiles_k;
  const int first_k = (blockIdx.x - first_tile * plan.tiles_k) * TILE_K;
  const int warpgroup = hopper::uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      const Barriers barriers(base, stage);
      hopper::barrier_init(barriers.full, plan.in_box ? 1 : kLoadingThreads);
      hopper::barrier_init(barriers.rounded, kLoadingThreads);
      hopper::barrier_init(barriers.empty, 128 * kWarpgroups);
    }
    hopper::fence_async();  // boxes arrive at them
  }
  __syncthreads();  // barriers are there
  if (warpgroup == kWarpgroups)
    load_window<T>(params, locate_tile(params, first_tile), base + (sizeof(T) == 2 ? layout.landing : layout.x),
                   Barriers(base, 0).full);
  pack_weights<T, EXACT>(params, first_k, layout, smem);
  // wgmma reads them.
  hopper::fence_async();
  __syncthreads();  // weights are there
  if (warpgroup == kWarpgroups) {
    hopper::registers_give_back<kLoadingRegisters>();
    load<T, EXACT>(params, layout, smem, first_tile, tile_step);
  } else {
    hopper::registers_take<kMultiplyingRegisters>();
    compute<T, EXACT, TILE_K>(params, layout, smem, warpgroup, first_k, first_tile, tile_step);
  }
#endif
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// ---- Host: how to cut it up ----

struct Device {
  int sms;
};

// Addresses of the tensors; zeros, before they are known, stand for aligned ones.
struct Alignment {
  uint64_t in, out;
};

constexpr int kTileChannels[] = {32, 64};
// One product of fp32 tensors is asked for with 64 and 128 output channels.
inline int least_tile_channels(const Format& format) { return format.bytes == 4 && !format.exact ? 64 : 32; }
constexpr int kMostTileRows = 16;               // more are slower (docs/lab/stem.md)
constexpr int kMostBoxSide = 256;

// Constants of the estimate, in cycles of an SM at 1.75 GHz, chosen by hand from times of fp32 tensors; those of 16
// bits are not measured (docs/lab/stem.md).
constexpr double kCallCycles = 9000, kTileCycles = 500, kBlockCycles = 250;
constexpr double kAloneCycles = 800;  // of a block of outputs by a warpgroup that waits for nothing else
// Bytes a cycle.
constexpr double kStoreRate = 38, kSingleRate = 10, kLoadRate = 30, kPackRate = 20;
constexpr double kLineCycles = 300, kWordsCycles = 155;  // of a warp: a line by words, and every 32 of them

// Cycles for 64 outputs, where all warpgroups multiply and where one does.
struct StepCycles {
  double shared, alone;
};

// One product in tiles of 32 channels, of 16 bits, is taken for no faster than of 64: not measured.
inline StepCycles step_cycles(bool exact, int tile_k) {
  return !exact ? StepCycles{38, 75} : tile_k == 32 ? StepCycles{105, 240} : StepCycles{140, 700};
}

inline bool complete(const Correlation& of, const Format& format, const Device& device, const Alignment& address,
                     int tile_k, int tile_p, int tile_q, Plan& plan) {
  const int piece = 16 / format.bytes;  // values of 16 bytes
  const auto whole = [&](int64_t stride, int64_t size) { return size == 1 || (stride % piece == 0 && stride > 0); };
  plan = Plan{};
  plan.tile_k = tile_k;
  plan.tile_p = tile_p;
  plan.tile_q = tile_q;
  plan.tiles_k = static_cast<int>(ceil_div(of.out_channels, tile_k));
  plan.tiles_p = static_cast<int>(ceil_div(of.P, tile_p));
  plan.tiles_q = static_cast<int>(ceil_div(of.Q, tile_q));
  const int64_t tiles = of.N * plan.tiles_p * plan.tiles_q;
  if (tiles > 1 << 30) return false;
  plan.tiles = static_cast<int>(tiles);
  const int of_same_channels = std::max(1, std::min(device.sms / plan.tiles_k, plan.tiles));
  plan.blocks = of_same_channels * plan.tiles_k;

  // x: a box, of planes or of lines of all channels, or single words.
  const int64_t rows = int64_t{tile_p - 1} * of.stride_h + int64_t{of.R - 1} * of.dilation_h + 1;
  const int dilation_w = of.S == 1 ? 1 : of.dilation_w;
  const auto set_columns = [&](bool lines, int lead) {
    const int64_t row_terms = int64_t{of.S} * (lines ? of.in_channels : 1);
    if (row_terms > kQuad * kMostQuads) return false;
    plan.lines = lines;
    plan.lead = lead;
    plan.row_terms = static_cast<int>(row_terms);
    plan.row_quads = static_cast<int>(ceil_div(row_terms, kQuad));
    plan.pixel_words = lines ? of.in_channels : 1;
    plan.term_words = lines ? 1 : dilation_w;
    const int64_t columns = lead + int64_t{tile_q - 1} * of.stride_w * plan.pixel_words +
                            int64_t{kQuad * plan.row_quads - 1} * plan.term_words + 1;
    const int64_t planes = lines ? 1 : of.in_channels;
    if (columns > kSharedBytes || rows > kSharedBytes || planes * rows * columns > kSharedBytes / 4) return false;
    plan.columns = round_up(static_cast<int>(columns), piece);
    return true;
  };
  // Tiles are whole rows, or of a multiple of 16 columns: all their boxes start alike.
  const auto set_box = [&](bool lines) {
    const int64_t words = lines ? of.in_channels : 1;  // of a pixel
    if ((of.W + 2 * int64_t{of.pad_w}) * words + kMostBoxSide >= int64_t{1} << 31) return false;
    const int lead = static_cast<int>((piece - of.pad_w * words % piece) % piece);
    return set_columns(lines, lead) && plan.columns <= kMostBoxSide;
  };
  const bool aligned_rows =
      address.in % 16 == 0 && whole(of.in_stride[0], of.N) && whole(of.in_stride[2], of.H) && rows <= kMostBoxSide;
  // Boxes end where rows do only if rows are multiples of 16 bytes: else a store overwrites memory
  // (docs/lab/hopper.md).
  const bool planes = of.in_stride[3] == 1 && of.W % piece == 0 && whole(of.in_stride[1], of.in_channels);
  const bool lines = of.in_stride[1] == 1 && of.in_stride[3] == of.in_channels && dilation_w == 1 &&
                     int64_t{of.W} * of.in_channels % piece == 0;
  plan.in_box = aligned_rows && (planes ? set_box(false) : lines && set_box(true));
  if (!plan.in_box && !set_columns(false, 0)) return false;
  plan.rows = static_cast<int>(rows);
  const int window_planes = plan.lines ? 1 : of.in_channels;
  plan.x_bytes = 4 * window_planes * plan.rows * plan.columns;
  const int64_t quads = int64_t{window_planes} * of.R * plan.row_quads;
  if (quads > kMostQuads) return false;
  plan.quads = static_cast<int>(quads);
  const int groups = static_cast<int>(ceil_div(plan.quads, 2 * kGroupSteps));
  plan.steps = format.exact        ? static_cast<int>(ceil_div(plan.quads, 2))
               : format.bytes == 4 ? (groups | 1) * kGroupSteps
                                   : groups * kGroupSteps;
  if (2 * plan.steps > kMostQuads) return false;

  // y: 16 outputs of a box are neighbours in a run of whole rows, or in a row.
  const bool channels_last = of.out_stride[1] == 1 && of.out_channels > 1;
  const int64_t pixel = channels_last ? of.out_stride[3] : 1;
  const bool dense =
      (of.P == 1 || of.out_stride[2] == of.Q * pixel) && (int64_t{of.P} + kMostTileRows) * of.Q < int64_t{1} << 31;
  plan.run = tile_q == of.Q && dense && (plan.tiles_p == 1 || tile_p * tile_q % kBoxPixels == 0);
  const bool in_rows = tile_q % kBoxPixels == 0 && whole(of.out_stride[2], of.P);
  const int64_t row = plan.run ? int64_t{of.P} * of.Q : of.Q;  // of outputs that are neighbours
  const bool aligned_out = address.out % 16 == 0 && whole(of.out_stride[0], of.N) &&
                           (channels_last ? of.out_channels % piece == 0 && whole(of.out_stride[3], row)
                                          : (of.Q == 1 || of.out_stride[3] == 1) && row % piece == 0 &&
                                                whole(of.out_stride[1], of.out_channels));
  plan.stores = !aligned_out || !(plan.run || in_rows) ? Stores::kSingle
                : channels_last                        ? Stores::kChannelsLast
                                                       : Stores::kPlanes;
  plan.smem_bytes = shared_layout(plan, format).end;
  if (plan.smem_bytes > kSharedBytes) return false;

  const int64_t blocks_m = ceil_div(tile_p * tile_q, kBlock);
  const StepCycles step = step_cycles(format.exact, tile_k);
  const double store = kBlock * tile_k * (plan.stores == Stores::kSingle ? 4 / kSingleRate : format.bytes / kStoreRate);
  const double lines_of_a_warp = static_cast<double>(window_planes) * plan.rows / (kLoadingThreads / 32);
  const double load = plan.in_box ? plan.x_bytes / 4.0 * format.bytes / kLoadRate
                                  : lines_of_a_warp * (kLineCycles + kWordsCycles * ceil_div(plan.columns, 32));
  const double shared = static_cast<double>(blocks_m) * (kBlockCycles + plan.steps * step.shared + store);
  const double alone =
      static_cast<double>(ceil_div(blocks_m, kWarpgroups)) * (kAloneCycles + plan.steps * step.alone + 2 * store);
  plan.cycles = kCallCycles + weight_bytes(plan) * (format.exact ? 2 : 1) / kPackRate + load +
                static_cast<double>(ceil_div(plan.tiles, of_same_channels) * ceil_div(plan.blocks, device.sms)) *
                    (kTileCycles + std::max({load, shared, alone}));
  return true;
}

inline bool make_plan(const Correlation& of, const Format& format, const Device& device, const Alignment& address,
                      Plan& best, int forced_tile_k = 0, int forced_tile_p = 0, int forced_tile_q = 0) {
  bool found = false;
  const auto consider = [&](int tile_k, int tile_p, int tile_q) {
    if (forced_tile_p > 0 && tile_p != forced_tile_p) return;
    if (forced_tile_q > 0 && tile_q != forced_tile_q) return;
    Plan plan;
    if (!complete(of, format, device, address, tile_k, tile_p, tile_q, plan)) return;
    if (found && plan.cycles >= best.cycles) return;
    best = plan;
    found = true;
  };
  for (int tile_k : kTileChannels) {
    const int least = least_tile_channels(format);
    if (tile_k < least || (forced_tile_k > 0 ? tile_k != forced_tile_k : tile_k > least && of.out_channels <= least))
      continue;
    for (int tile_p = 1; tile_p <= std::min(of.P, kMostTileRows); ++tile_p) {
      consider(tile_k, tile_p, of.Q);
      const int most = std::min(kMostBoxSide, round_up(std::min(of.Q, kMostBoxSide), kBoxPixels));
      for (int tile_q = kBoxPixels; tile_q <= most; tile_q += kBoxPixels)
        if (tile_q != of.Q) consider(tile_k, tile_p, tile_q);
    }
  }
  return found;
}

// Null, or why not. Without a GPU: the sizes alone decide.
inline const char* refusal_of_problem(const Problem& problem, Operator op) {
  if (op != Operator::kFprop && op != Operator::kDgrad) return "it computes outputs and input gradients only";
  // A filter of several taps is flipped.
  const bool points = problem.R == 1 && problem.S == 1 && problem.pad_h == 0 && problem.pad_w == 0;
  if (op == Operator::kDgrad && (!points || has_stride(problem)))
    return "it computes input gradients of 1x1 filters without a stride or padding only";
  if (problem.dtype == DType::kFloat64) return "it has no float64";
  if (problem.groups != 1) return "it takes one group only";
  if ((op == Operator::kDgrad ? problem.K : problem.C) > kMostChannels)
    return "it takes up to 7 input channels only, or output channels in an input gradient";
  return nullptr;
}

inline Format format_of(const Problem& problem, Operator op) {
  return {element_bytes(problem.dtype), problem.dtype == DType::kFloat32 && !uses_tf32(problem, op)};
}

struct Planned {
  Correlation of;
  Plan plan;
  bool found;
};

inline const Planned& plan_of(const Problem& problem, Operator op, const Alignment& address) {
  thread_local Memo<Planned> memo;
  Device device{};
  const int gpu = find_gpu(device.sms);
  return memo.get(key_of(problem, op, address.in, 0, address.out, gpu, device.sms), [&] {
    Planned planned{};
    planned.of = correlation_of_problem(problem, op);
    planned.found = make_plan(planned.of, format_of(problem, op), device, address, planned.plan);
    return planned;
  });
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (const char* reason = refusal_of_problem(problem, op)) return reason;
  Device device{};
  if (find_gpu(device.sms) != 90) return "it needs a Hopper GPU (compute capability 9.0)";
  // Addresses are not known yet: whether boxes can be had depends on them.
  thread_local Memo<bool> memo;
  const bool fits = memo.get(key_of(problem, op, 0, 0, 0, 90, device.sms), [&] {
    const Correlation of = correlation_of_problem(problem, op);
    Plan plan;
    for (const Alignment& address : {Alignment{0, 0}, Alignment{0, 4}, Alignment{4, 0}, Alignment{4, 4}})
      if (!make_plan(of, format_of(problem, op), device, address, plan)) return false;
    return true;
  });
  return fits ? nullptr : "it finds no tile that fits into shared memory beside the weights, or needs over 2^30 tiles";
}

inline double cycles(const Problem& problem, Operator op) { return plan_of(problem, op, Alignment{}).plan.cycles; }

// Outputs up to which mma is faster (docs/lab/stem.md).
constexpr int64_t kFewOutputs = int64_t{1} << 20;

// Multiply-adds up to which direct may be faster with 16-bit tensors, which mma does not compute (docs/lab/stem.md).
constexpr double kFewMultiplyAdds = 1 << 26;

// Ratio of estimates from which mma is preferred: with large filters at a large stride few outputs share a window, and
// hardly any of it is multiplied at a time (docs/lab/stem.md).
constexpr double kFarSlower = 2;

inline const char* yields(const Problem& problem, Operator op) {
  if (direct_has_points(problem, op)) return "direct is faster with 1x1 filters to few channels, as it reads x once";
  const int in_channels = op == Operator::kDgrad ? problem.K : problem.C;
  const int out_channels = op == Operator::kDgrad ? problem.C : problem.K;
  if (out_channels <= 4) return "mma or direct may be faster with few output channels";
  if (in_channels == 1 && out_channels <= 16) return "depthwise is faster with few channels out of one";
  if (problem.dtype != DType::kFloat32)
    return multiply_adds(problem) <= kFewMultiplyAdds ? "direct may be faster with few multiply-adds" : nullptr;
  if (problem.N * out_channels * problem.P * problem.Q <= kFewOutputs) return "mma is faster with few outputs";
  if (kMmaEngine.refusal(problem, op) == nullptr && cycles(problem, op) > kFarSlower * kMmaEngine.cycles(problem, op))
    return "mma is faster with filters that fill shared memory";
  return nullptr;
}

inline int64_t workspace_bytes(const Problem&, Operator, const Pointers&) { return 0; }

inline void set_numbers(Params& params) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  params.by_tiles_q = make_divisor(plan.tiles_q);
  params.by_tiles_p = make_divisor(plan.tiles_p);
  params.by_tile_q = make_divisor(plan.tile_q);
  params.by_rows = make_divisor(plan.rows);
  params.by_filter_quads = make_divisor(int64_t{of.R} * plan.row_quads);
  params.by_row_quads = make_divisor(plan.row_quads);
  params.by_pairs = make_divisor((plan.columns + 1) / 2);
  for (int i = 0; i < plan.quads; ++i) {
    const Quad quad = locate_quad(params, i);
    const int row = quad.channel * plan.rows + quad.r * of.dilation_h;
    params.offsets[i] = 4 * (row * plan.columns + quad.first * plan.term_words + plan.lead);
  }
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// x and y as boxes want them.
inline cudaError_t make_maps(int value_bytes, Params& params) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const auto bytes = [&](int64_t stride, int64_t size) {
    return static_cast<uint64_t>(size > 1 ? value_bytes * stride : 16);
  };
  const uint64_t N = of.N;
  if (plan.in_box) {
    const uint64_t C = of.in_channels, H = of.H, W = of.W;
    const uint64_t row = bytes(of.in_stride[2], of.H), image = bytes(of.in_stride[0], of.N);
    const uint32_t columns = plan.columns, rows = plan.rows, channels = of.in_channels;
    const auto make = [&](const uint64_t (&sizes)[4], const uint64_t (&strides)[3], const uint32_t (&box)[4]) {
      return hopper::make_box_map(hopper::BoxUse::kLoad, params.in_ptr, value_bytes, sizes, strides, box,
                                  params.in_map);
    };
    const cudaError_t error = plan.lines ? make({W * C, H, N, 1}, {row, image, 16}, {columns, rows, 1, 1})
                                         : make({W, H, C, N}, {row, bytes(of.in_stride[1], of.in_channels), image},
                                                {columns, rows, channels, 1});
    if (error != cudaSuccess) return error;
  }
  if (plan.stores == Stores::kSingle) return cudaSuccess;
  const uint64_t K = of.out_channels, P = plan.run ? 1 : of.P;
  const uint64_t Q = plan.run ? static_cast<uint64_t>(of.P) * of.Q : of.Q;
  const uint64_t row = bytes(of.out_stride[2], P), image = bytes(of.out_stride[0], of.N);
  const uint32_t channels = box_channels(value_bytes, plan.tile_k);
  const bool planes = plan.stores == Stores::kPlanes;
  const uint32_t row_bytes = (planes ? kBoxPixels : channels) * value_bytes;
  const hopper::BoxUse use = row_bytes == 128  ? hopper::BoxUse::kStore
                             : row_bytes == 64 ? hopper::BoxUse::kStoreHalves
                                               : hopper::BoxUse::kStoreQuarters;
  const auto make = [&](const uint64_t (&sizes)[4], const uint64_t (&strides)[3], const uint32_t (&box)[4]) {
    return hopper::make_box_map(use, params.out_ptr, value_bytes, sizes, strides, box, params.out_map);
  };
  return planes ? make({Q, P, K, N}, {row, bytes(of.out_stride[1], of.out_channels), image},
                       {kBoxPixels, 1, channels, 1})
                : make({K, Q, P, N}, {bytes(of.out_stride[3], Q), row, image}, {channels, kBoxPixels, 1, 1});
}

template <typename T, bool EXACT, int TILE_K>
cudaError_t run_kernel(const Params& params, cudaStream_t stream) {
  constexpr Instance kInstance{"stem_kernel", {kTypeId<T>, EXACT, TILE_K}};
  record(kInstance);
  if constexpr (!is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    const auto kernel = stem_kernel<T, EXACT, TILE_K>;
    const cudaError_t error = allow_all_shared_memory(kernel);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(params.plan.blocks), kThreads, params.plan.smem_bytes, stream>>>(params);
    return cudaGetLastError();
  }
}

template <typename T, bool EXACT>
cudaError_t run(Params& params, cudaStream_t stream) {
  set_numbers(params);
  const cudaError_t error = make_maps(sizeof(T), params);
  if (error != cudaSuccess) return error;
  if constexpr (EXACT || sizeof(T) == 2) {
    if (params.plan.tile_k == 32) return run_kernel<T, EXACT, 32>(params, stream);
  }
  return run_kernel<T, EXACT, 64>(params, stream);
}

inline cudaError_t run(DType dtype, bool exact, Params& params, cudaStream_t stream) {
  if (dtype == DType::kFloat16) return run<Half, false>(params, stream);
  if (dtype == DType::kBFloat16) return run<BFloat16, false>(params, stream);
  return exact ? run<float, true>(params, stream) : run<float, false>(params, stream);
}

inline cudaError_t launch(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  Params params{};
  params.in_ptr = op == Operator::kDgrad ? pointers.dy : pointers.x;
  params.w_ptr = pointers.w;
  params.bias_ptr = op == Operator::kDgrad ? nullptr : pointers.bias;
  params.out_ptr = pointers.out;
  const Alignment address{reinterpret_cast<uint64_t>(params.in_ptr), reinterpret_cast<uint64_t>(pointers.out)};
  const Planned& planned = plan_of(problem, op, address);
  if (!planned.found) return cudaErrorInvalidConfiguration;
  params.of = planned.of;
  params.plan = planned.plan;
  return run(problem.dtype, format_of(problem, op).exact, params, stream);
}

#endif  // launchers

inline void describe(const Problem& problem, Operator op, char* text, size_t text_size) {
  const Plan& plan = plan_of(problem, op, Alignment{}).plan;
  const char* const stores[] = {"boxes of planes", "boxes of pixels", "single values"};
  snprintf(text, text_size,
           "%s, tile of %d channels x %d x %d pixels, %d steps of 8 terms, %d bytes of shared memory, x by %s, y by "
           "%s, %lld tiles for %d blocks, about %.3g Mcycles",
           format_of(problem, op).exact ? "three products of parts" : "one product", plan.tile_k, plan.tile_p,
           plan.tile_q, plan.steps, plan.smem_bytes,
           !plan.in_box ? "single values"
           : plan.lines ? "boxes of lines"
                        : "boxes",
           stores[static_cast<int>(plan.stores)], static_cast<long long>(plan.tiles) * plan.tiles_k, plan.blocks,
           plan.cycles * 1e-6);
}

#endif  // host

}  // namespace stem

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
extern const Engine kStemEngine{"stem",         stem::refusal, stem::workspace_bytes, stem::launch,
                                stem::describe, stem::yields,  stem::cycles};
#endif

}  // namespace modelnew
