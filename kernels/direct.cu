// Direct engine: any convolution on any GPU, with ordinary multiply-adds. Deterministic: no atomics, sums in one order.
//
//   pack_weights   w -> the order, type and rounding in which correlate stages it
//   correlate      y from x (fprop) and dx from dy (dgrad); correlate_listed: just some tiles, for another engine
//   depthwise      the same with one input channel for each output, through shared memory
//   points         the same for 1x1 filters to at most 8 channels of fp32: every pixel is read once, into registers
//   weight_grad    dw from x and dy
//   sliding_wgrad, depthwise_wgrad   the same with one input channel for each output: 3x3, any filter
//   bias_grad      db from dy
//   add_partials   [split][element] doubles -> dw or db
//
// dgrad is no kernel of its own: dx is a correlation of dy with the flipped filter. With a stride, the rows of dx fall
// into `stride_h` phases; within one phase every row meets the same filter rows, and the problem has stride 1 (Window).
//
// fp32, fp16 and bf16 tensors are staged in shared memory as fp32 (rounded to TF32 there where that contract holds) and
// multiplied by FFMA: products of TF32 or 16-bit operands are then exact. fp64 tensors use double throughout.
// Sums run in chunks of at most kChunk terms; the chunks are added with compensation, or in double: rounding errors
// grow with kChunk, not with the length of the sum. The storage type is a run-time switch around the staging loops: it
// costs one uniform branch a stage, and each kernel is compiled once for all types but double.
//
// Bound by instruction issue; where one input channel makes an output, by memory traffic. Measured on an H200
// (2026-11-20; times by bench.py, issue slots by ncu one revision earlier, at 21.5 and 36.7 ms), cases by their size
// N, C, K, filter, image:
//
//   correlate       8, 64, 128, 3x3, 512x1024   21.8 ms   80% of the issue slots used, 54% of them by multiply-adds
//   weight_grad     the same                    36.5 ms   70% used; the rest waits for global loads and barriers
//   sliding_wgrad   16, 64, 64, 3x3, 512x512    1.17 ms   2.4 times what reading and writing alone take
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstdio>

#include "engines.cuh"
#endif

#include "numerics.cuh"
#include "problem.cuh"

namespace modelnew {
namespace direct {

constexpr int kChunk = 64;

// A stage of one block stays within the 48 KB of shared memory that every GPU grants without being asked.
constexpr int kSharedBytes = 48 * 1024;

// ---- Geometry, host and device ----

// One image axis of the convolution as the forward operator sees it.
struct Axis {
  int x_size, y_size, taps, stride, pad, dilation;
};

// With a single output position the stride is never taken: 1 stands for it, however large it is.
MODELNEW_HOST_DEVICE inline Axis make_axis(int x_size, int y_size, int taps, int stride, int pad, int dilation) {
  return {x_size, y_size, taps, y_size == 1 ? 1 : stride, pad, dilation};
}

// One axis of a correlation: output position i reads input position i*stride + origin + t*tap_step for tap t, with
// weight tap first_tap + t*tap_stride, and is written to output_origin + i*output_step. Input positions outside
// [0, input_size) count as 0.
struct Window {
  int outputs, output_origin, output_step;
  int input_size, stride, origin;
  int taps, tap_step, first_tap, tap_stride;
};

MODELNEW_HOST_DEVICE inline int greatest_common_divisor(int a, int b) {
  while (b != 0) {
    const int rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

MODELNEW_HOST_DEVICE inline Window fprop_window(const Axis& axis) {
  return {axis.y_size, 0, 1, axis.x_size, axis.stride, -axis.pad, axis.taps, axis.dilation, 0, 1};
}

// dx at position h = phase + i*stride takes dy at (h + pad - r*dilation) / stride, where that division has no rest. The
// taps r that do so are first, first + every, first + 2*every ...; in falling order they read dy from left to right.
MODELNEW_HOST_DEVICE inline Window dgrad_window(const Axis& axis, int phase) {
  const int divisor = greatest_common_divisor(axis.stride, axis.dilation);
  const int every = axis.stride / divisor;
  int first = 0;
  while (first < every && first < axis.taps && (phase + axis.pad - first * axis.dilation) % axis.stride != 0) ++first;
  const int taps = first < every && first < axis.taps ? (axis.taps - 1 - first) / every + 1 : 0;
  const int tap_step = axis.dilation / divisor;
  const int outputs = phase < axis.x_size ? (axis.x_size - 1 - phase) / axis.stride + 1 : 0;
  const int origin = taps > 0 ? (phase + axis.pad - first * axis.dilation) / axis.stride - (taps - 1) * tap_step : 0;
  return {outputs, phase, axis.stride, axis.y_size, 1, origin, taps, tap_step, first + (taps - 1) * every, -every};
}

MODELNEW_HOST_DEVICE inline Window make_window(Operator op, const Axis& axis, int phase) {
  return op == Operator::kDgrad ? dgrad_window(axis, phase) : fprop_window(axis);
}

// Where output i of a window is written.
MODELNEW_HOST_DEVICE inline int64_t out_position(const Window& window, int i) {
  return window.output_origin + i * static_cast<int64_t>(window.output_step);
}

// How much of a window's input a stage holds along one axis. With all taps at once, the span of input that the tile
// touches; one tap at a time, just the positions that this tap reads (also the better way for a single tap with a
// stride: nothing in between is loaded).
struct StageAxis {
  int taps;         // taps a stage serves
  int size;         // staged positions
  int input_step;   // input positions between two staged ones
  int output_step;  // staged positions between neighbouring outputs
  int tap_step;     // staged positions between neighbouring taps
};

MODELNEW_HOST_DEVICE inline StageAxis stage_axis(const Window& window, int tile, bool tap_by_tap) {
  if (tap_by_tap || window.taps <= 1) return {1, tile, window.stride, 1, 0};
  const int64_t size =
      (tile - 1) * static_cast<int64_t>(window.stride) + (window.taps - 1) * static_cast<int64_t>(window.tap_step) + 1;
  // What does not fit into shared memory does not fit, by however much.
  const int bounded = static_cast<int>(size < kSharedBytes ? size : kSharedBytes);
  return {window.taps, bounded, 1, window.stride, window.tap_step};
}

// Everything correlate and depthwise need, by value. `in` and `out` are x and y for fprop, dy and dx for dgrad.
struct CorrelateParams {
  const void *in_ptr, *w_ptr, *bias_ptr;  // correlate: w_ptr is packed
  void* out_ptr;
  int64_t in_stride[4], out_stride[4];  // image, channel, row, column
  int64_t w_stride_group, w_stride_out, w_stride_in, w_stride_r, w_stride_s;
  Operator op;
  Axis rows, columns;
  int groups, in_channels, out_channels;  // channels of one group
  int phases_h, phases_w;
  int tile_p, tile_q, tiles_p, tiles_q, tiles_k;
  bool row_by_row, column_by_column;  // stages of one filter row / one filter column
  int stage_channels;
  DType dtype;
  bool round_to_tf32;
};

// ---- Device code shared by the kernels ----

struct TileOrigin {
  int n, group, k, p, q, phase_h, phase_w;
};

// Tiles of one place in the image are neighbours in launch order, so that they find x in L2.
MODELNEW_HOST_DEVICE inline TileOrigin locate_tile(const CorrelateParams& params, unsigned tile, int tile_k) {
  TileOrigin at;
  at.k = static_cast<int>(tile % params.tiles_k) * tile_k;
  tile /= params.tiles_k;
  at.q = static_cast<int>(tile % params.tiles_q) * params.tile_q;
  tile /= params.tiles_q;
  at.p = static_cast<int>(tile % params.tiles_p) * params.tile_p;
  tile /= params.tiles_p;
  at.group = static_cast<int>(tile % params.groups);
  tile /= params.groups;
  at.phase_w = static_cast<int>(tile % params.phases_w);
  tile /= params.phases_w;
  at.phase_h = static_cast<int>(tile % params.phases_h);
  at.n = static_cast<int>(tile / params.phases_h);
  return at;
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// Threads of the kernels that go through memory once.
constexpr int kReduceThreads = 256;

// From a loaded value to what is multiplied.
template <typename Acc, typename Storage>
__device__ inline Acc to_operand(Storage value, bool round) {
  const auto wide = widen(value);
  if constexpr (sizeof(Acc) == 8)
    return wide;
  else
    return round ? round_to_tf32(wide) : wide;
}

// One comparison for both ends.
MODELNEW_HOST_DEVICE inline bool is_within(int position, int size) {
  return static_cast<unsigned>(position) < static_cast<unsigned>(size);
}

template <typename Acc>
__device__ inline bool is_finite(Acc value) {
  return value - value == Acc(0);
}

// Zero where there is nothing to load. The address is computed by the caller either way: what is left is one predicated
// load, not a branch around the arithmetic, and a row of these goes out back to back.
template <typename Storage>
__device__ inline Storage load_if(bool condition, const Storage* source) {
  Storage value{};
  if (condition) value = *source;
  return value;
}

// Calls action(Storage{}) with the tensor's storage type.
template <typename Acc, typename Action>
__device__ inline void with_storage(DType dtype, const Action& action) {
  if constexpr (sizeof(Acc) == 8) {
    action(double{});
  } else if (dtype == DType::kFloat32) {
    action(float{});
  } else if (dtype == DType::kFloat16) {
    action(Half{});
  } else {
    action(BFloat16{});
  }
}

// Ends a chunk: total += acc. The next chunk starts from the rounding error of that addition (Fast2Sum), so that only
// the sums within chunks lose anything to speak of: the error is exact while |total| >= |acc|. (H200, 2026-11-20, dgrad
// with 4480 terms: 2.1e-7 relative without it, 1.45e-7 with it, at 3 to 5% of the time.) An error that is not finite
// (the total overflowed or holds an Inf) is dropped: it would turn the Inf into NaN.
template <typename Acc>
__device__ inline void add_chunk(Acc& acc, Acc& total) {
  const Acc sum = total + acc;
  const Acc error = acc - (sum - total);
  acc = is_finite(error) ? error : Acc(0);
  total = sum;
}

// A 16-byte piece of shared memory.
template <typename Acc>
struct alignas(16) Vector {
  static constexpr int SIZE = 16 / sizeof(Acc);
  Acc element[SIZE];
};

// Copies a window of the input into shared memory, [channel][row][column], zero outside the image. Lanes run along
// columns. Each thread steps through its positions without dividing, and has BATCH loads under way at a time: nothing
// else hides their latency. (H200, 2026-11-20: with one load at a time N 8, C 64, K 128, 3x3, 512x1024 took 51 ms.)
template <typename Acc, typename Storage, int THREADS>
__device__ inline void stage_window(Acc* smem, const Storage* in_ptr, const CorrelateParams& params,
                                    const StageAxis& rows, const StageAxis& columns, int row_origin, int column_origin,
                                    int row_limit, int column_limit, int channels) {
  constexpr int BATCH = 8;
  const int plane = rows.size * columns.size, elements = channels * plane;
  const int channel_advance = THREADS / plane, row_advance = THREADS % plane / columns.size;
  const int column_advance = THREADS % plane % columns.size;
  int channel = static_cast<int>(threadIdx.x) / plane, row = static_cast<int>(threadIdx.x) % plane / columns.size;
  int column = static_cast<int>(threadIdx.x) % plane % columns.size;
  for (int first = threadIdx.x; first < elements; first += BATCH * THREADS) {
    Storage value[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int in_row = row_origin + row * rows.input_step, in_column = column_origin + column * columns.input_step;
      const bool inside = (channel < channels) & is_within(in_row, row_limit) & is_within(in_column, column_limit);
      const Storage* source =
          in_ptr + (channel * params.in_stride[1] + in_row * params.in_stride[2] + in_column * params.in_stride[3]);
      value[i] = load_if(inside, source);
      column += column_advance;
      const int column_carry = column >= columns.size;
      column -= column_carry ? columns.size : 0;
      row += row_advance + column_carry;
      const int row_carry = row >= rows.size;
      row -= row_carry ? rows.size : 0;
      channel += channel_advance + row_carry;
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (first + i * THREADS < elements) smem[first + i * THREADS] = to_operand<Acc>(value[i], params.round_to_tf32);
  }
}

// ---- Points: 1x1 filters to few channels ----
//
// A thread owns four neighbouring pixels and all output channels of them. Memory traffic bounds it: the batches of
// loads, 16 bytes each, are what keeps enough of them under way.

constexpr int kMostPointChannels = 8, kPointThreads = 128, kPointBatch = 8;
constexpr int kPointChunk = 16;  // of a sum: in cuDNN's kernels for this it is not one chain either, and not as inexact
constexpr int64_t kLeastPoints = 1 << 17;  // with fewer, too few threads have loads under way

struct PointsParams {
  const float *in_ptr, *w_ptr, *bias_ptr;
  float* out_ptr;
  int64_t in_image, in_channel, out_image, out_channel, w_out, w_in;  // steps
  int in_channels, out_channels;
  int64_t pixels;  // of an image, a multiple of 4
};

// Dynamic shared memory: w as [input channel][CHANNELS], zeros beyond the last output channel. With two of these the
// first batch is on its way while the weights come, and from there on each channel is loaded as soon as the one a batch
// before it has been used. (us, one image of 512x512, a batch at a time / so: 64 to 2 27.0 / 25.1, to 4 28.0 / 26.2,
// but that spills on sm_80, to 8 27.5 / 31.4; 16 images to 2 261 / 260, to 8 297 / 349. H200, 2026-11-25, in a driver.)
template <int CHANNELS>
__global__ void __launch_bounds__(kPointThreads) points_kernel(const PointsParams params) {
  extern __shared__ __align__(16) unsigned char points_smem[];
  float* const w_smem = reinterpret_cast<float*>(points_smem);
  const int64_t pixel = 4 * (static_cast<int64_t>(blockIdx.x) * kPointThreads + threadIdx.x);
  const int channels = pixel < params.pixels ? params.in_channels : 0;
  const float* in = params.in_ptr + blockIdx.y * params.in_image + pixel;
  constexpr bool kRolls = CHANNELS == 2;
  Vector<float> x[kPointBatch];
  const auto load_batch = [&](int first) {
#pragma unroll
    for (int i = 0; i < kPointBatch; ++i) {
      x[i] = {};
      if (first + i < channels) x[i] = *reinterpret_cast<const Vector<float>*>(in + i * params.in_channel);
    }
    in += kPointBatch * params.in_channel;
  };
  if constexpr (kRolls) load_batch(0);
  for (int i = threadIdx.x; i < params.in_channels * CHANNELS; i += kPointThreads) {
    const int c = i / CHANNELS, k = i % CHANNELS;
    w_smem[i] = k < params.out_channels ? params.w_ptr[k * params.w_out + c * params.w_in] : 0.0f;
  }
  __syncthreads();
  if (channels == 0) return;
  float acc[CHANNELS][4] = {}, total[CHANNELS][4] = {};
#pragma unroll 1
  for (int first = 0; first < channels; first += kPointBatch) {
    if constexpr (!kRolls) load_batch(first);
#pragma unroll
    for (int i = 0; i < kPointBatch; ++i) {
      if (first + i >= channels) break;
#pragma unroll
      for (int k = 0; k < CHANNELS; ++k) {
        const float w = w_smem[(first + i) * CHANNELS + k];
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[k][j] = fmaf(w, x[i].element[j], acc[k][j]);
      }
      if constexpr (kRolls) {
        if (first + kPointBatch + i < channels) x[i] = *reinterpret_cast<const Vector<float>*>(in);
        in += params.in_channel;
      }
    }
    if ((first + kPointBatch) % kPointChunk == 0) {
#pragma unroll
      for (int k = 0; k < CHANNELS; ++k) {
#pragma unroll
        for (int j = 0; j < 4; ++j) add_chunk(acc[k][j], total[k][j]);
      }
    }
  }
  float* out = params.out_ptr + blockIdx.y * params.out_image + pixel;
#pragma unroll
  for (int k = 0; k < CHANNELS; ++k) {
    if (k >= params.out_channels) break;
    const float bias = params.bias_ptr != nullptr ? params.bias_ptr[k] : 0.0f;
    Vector<float> sum;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum.element[j] = total[k][j] + acc[k][j] + bias;
    *reinterpret_cast<Vector<float>*>(out + k * params.out_channel) = sum;
  }
}

// ---- correlate ----
//
// A block owns TILE_K output channels x (tile_p x tile_q) output pixels of one image, group and phase, and walks over
// the input channels in stages. Each warp owns THREAD_K channels; its lanes are neighbouring pixels:
//
//          Q, in tiles of tile_q                          the tile's pixels, row by row, 32 to a warp's step
//        +-------+-------+---+                         +--------------+--------------+-----
//      P | b0    | b2    | b4|                  TILE_K | warp 0       | warp 0       |        THREAD_K channels
//        +-------+-------+---+   b0, b1: the           +--------------+--------------+-----
//        | b6    | b8    |b10|   two tiles of          | warp 1       | warp 1       |        the next THREAD_K
//        +-------+-------+---+   K over one place      +--------------+--------------+-----
//
//     shared memory   w [input channel][tap][TILE_K]
//                     x [input channel][staged row][staged column]
//     registers       acc, total [THREAD_K][THREAD_PIXELS]
//
// For each tap a thread reads THREAD_K weights (the same for all lanes: one broadcast of 16 bytes at a time) and
// THREAD_PIXELS values of x (neighbouring words: no conflicts with stride 1), and does THREAD_K * THREAD_PIXELS
// multiply-adds. Stores are 128 bytes a warp, along a row of y.
template <typename Acc_, int THREAD_K_, int THREAD_PIXELS_, int WARPS_K_, int WARPS_PIXELS_, int BLOCKS_PER_SM_>
struct CorrelateConfig {
  using Acc = Acc_;
  static constexpr int THREAD_K = THREAD_K_, THREAD_PIXELS = THREAD_PIXELS_;
  static constexpr int WARPS_K = WARPS_K_, WARPS = WARPS_K_ * WARPS_PIXELS_, THREADS = 32 * WARPS;
  static constexpr int TILE_K = THREAD_K * WARPS_K, TILE_PIXELS = 32 * THREAD_PIXELS * WARPS_PIXELS_;
  static constexpr int BLOCKS_PER_SM = BLOCKS_PER_SM_;  // one block's loads and stores behind another's arithmetic
  static_assert(THREAD_K % Vector<Acc>::SIZE == 0, "weights are read 16 bytes at a time");
};

// Shared memory of one stage, in elements of the accumulator's type.
template <typename Config>
MODELNEW_HOST_DEVICE inline int64_t stage_elements(const StageAxis& rows, const StageAxis& columns, int channels) {
  return static_cast<int64_t>(channels) * (static_cast<int64_t>(rows.taps) * columns.taps * Config::TILE_K +
                                           static_cast<int64_t>(rows.size) * columns.size);
}

// Weights are packed once a call, so that a stage copies them 16 bytes at a time and rounds nothing.
struct PackParams {
  const void* w_ptr;
  void* packed_ptr;  // [group][tile of output channels][input channel][r][s][TILE_K]
  int64_t w_stride_group, w_stride_out, w_stride_in, w_stride_r, w_stride_s;
  int64_t elements;
  int out_channels, in_channels, R, S, tile_k, tiles_k;
  DType dtype;
  bool round_to_tf32;
  TileList list;  // if there is one, and nothing on it, nobody wants them
};

// One thread an element of packed. Output channels beyond the last are zeros.
template <typename Acc>
__global__ void __launch_bounds__(kReduceThreads) pack_weights_kernel(const PackParams params) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kReduceThreads + threadIdx.x;
  if (i >= params.elements || (params.list.all != nullptr && *params.list.all == 0 && *params.list.count == 0)) return;
  int64_t rest = i / params.tile_k;
  const int s = static_cast<int>(rest % params.S);
  rest /= params.S;
  const int r = static_cast<int>(rest % params.R);
  rest /= params.R;
  const int c = static_cast<int>(rest % params.in_channels);
  rest /= params.in_channels;
  const int k = static_cast<int>(rest % params.tiles_k) * params.tile_k + static_cast<int>(i % params.tile_k);
  const int64_t group = rest / params.tiles_k;
  const int64_t offset = group * params.w_stride_group + k * params.w_stride_out + c * params.w_stride_in +
                         r * params.w_stride_r + s * params.w_stride_s;
  with_storage<Acc>(params.dtype, [&](auto tag) {
    using Storage = decltype(tag);
    const Storage value = load_if(k < params.out_channels, static_cast<const Storage*>(params.w_ptr) + offset);
    static_cast<Acc*>(params.packed_ptr)[i] = to_operand<Acc>(value, params.round_to_tf32);
  });
}

// Copies one stage's packed weights, 16 bytes a thread and step. packed_ptr points at the tile's first input channel of
// this stage; a stage takes `taps` of the filter's, in the window's order.
template <typename Config>
__device__ inline void stage_weights(typename Config::Acc* w_smem, const typename Config::Acc* packed_ptr,
                                     const CorrelateParams& params, const Window& rows, const Window& columns,
                                     int first_r, int first_s, int taps_r, int taps_s, int channels) {
  using Piece = Vector<typename Config::Acc>;
  constexpr int PIECES = Config::TILE_K / Piece::SIZE, STEP = Config::THREADS / PIECES, BATCH = 4;
  const int piece = threadIdx.x % PIECES, taps = taps_r * taps_s, entries = channels * taps;
  const int c_advance = STEP / taps, r_advance = STEP % taps / taps_s, s_advance = STEP % taps % taps_s;
  const int first_entry = static_cast<int>(threadIdx.x) / PIECES;
  int c = first_entry / taps, r = first_entry % taps / taps_s, s = first_entry % taps % taps_s;
  for (int entry = first_entry; entry < entries; entry += BATCH * STEP) {
    Piece value[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int tap_r = rows.first_tap + (first_r + r) * rows.tap_stride;
      const int tap_s = columns.first_tap + (first_s + s) * columns.tap_stride;
      const int64_t index = (static_cast<int64_t>(c) * params.rows.taps + tap_r) * params.columns.taps + tap_s;
      value[i] = load_if(c < channels, reinterpret_cast<const Piece*>(packed_ptr) + (index * PIECES + piece));
      s += s_advance;
      const int s_carry = s >= taps_s;
      s -= s_carry ? taps_s : 0;
      r += r_advance + s_carry;
      const int r_carry = r >= taps_r;
      r -= r_carry ? taps_r : 0;
      c += c_advance + r_carry;
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (entry + i * STEP < entries) reinterpret_cast<Piece*>(w_smem)[(entry + i * STEP) * PIECES + piece] = value[i];
  }
}

// TAPS neighbouring taps of one filter row: with TAPS = 3 the addresses are computed once for three taps.
template <typename Config, int TAPS>
__device__ inline void multiply_taps(typename Config::Acc (&acc)[Config::THREAD_K][Config::THREAD_PIXELS],
                                     const typename Config::Acc* w_tap, const typename Config::Acc* x_row,
                                     const int (&x_offset)[Config::THREAD_PIXELS]) {
  using Acc = typename Config::Acc;
  constexpr int VECTOR = Vector<Acc>::SIZE;
#pragma unroll
  for (int s = 0; s < TAPS; ++s) {
    Vector<Acc> w_frag[Config::THREAD_K / VECTOR];
    Acc x_frag[Config::THREAD_PIXELS];
#pragma unroll
    for (int k = 0; k < Config::THREAD_K / VECTOR; ++k)
      w_frag[k] = reinterpret_cast<const Vector<Acc>*>(w_tap + s * Config::TILE_K)[k];
#pragma unroll
    for (int j = 0; j < Config::THREAD_PIXELS; ++j) x_frag[j] = x_row[x_offset[j] + s];
#pragma unroll
    for (int k = 0; k < Config::THREAD_K; ++k)
#pragma unroll
      for (int j = 0; j < Config::THREAD_PIXELS; ++j) acc[k][j] += w_frag[k / VECTOR].element[k % VECTOR] * x_frag[j];
  }
}

template <typename Config, typename Storage>
__device__ inline void store_tile(const typename Config::Acc (&total)[Config::THREAD_K][Config::THREAD_PIXELS],
                                  const Storage* bias_ptr, Storage* out_ptr, int64_t channel_stride,
                                  const int64_t (&pixel_offset)[Config::THREAD_PIXELS], int out_channels) {
#pragma unroll
  for (int k = 0; k < Config::THREAD_K; ++k, out_ptr += channel_stride) {
    if (k >= out_channels) return;
    const typename Config::Acc bias = bias_ptr ? widen(bias_ptr[k]) : 0;
#pragma unroll
    for (int j = 0; j < Config::THREAD_PIXELS; ++j)
      if (pixel_offset[j] >= 0) narrow(total[k][j] + bias, out_ptr[pixel_offset[j]]);
  }
}

template <typename Config>
__device__ __forceinline__ void correlate_tile(const CorrelateParams& params, const TileOrigin& at) {
  using Acc = typename Config::Acc;
  constexpr int THREAD_K = Config::THREAD_K, THREAD_PIXELS = Config::THREAD_PIXELS;
  extern __shared__ __align__(16) unsigned char modelnew_smem[];

  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int thread_k = warp_id % Config::WARPS_K * THREAD_K;
  const int first_pixel = warp_id / Config::WARPS_K * (32 * THREAD_PIXELS) + lane_id;

  const Window rows = make_window(params.op, params.rows, at.phase_h);
  const Window columns = make_window(params.op, params.columns, at.phase_w);
  const StageAxis stage_rows = stage_axis(rows, params.tile_p, params.row_by_row);
  const StageAxis stage_columns = stage_axis(columns, params.tile_q, params.column_by_column);
  const int taps_r = stage_rows.taps, taps_s = stage_columns.taps;
  const int plane = stage_rows.size * stage_columns.size;

  Acc* const w_smem = reinterpret_cast<Acc*>(modelnew_smem);
  Acc* const x_smem = w_smem + params.stage_channels * taps_r * taps_s * Config::TILE_K;

  // Calls visit(j, p, q) for each of my pixels, as positions in the tile; a pixel beyond the tile has p >= tile_p.
  const auto for_each_pixel = [&](const auto& visit) {
    int p = first_pixel / params.tile_q, q = first_pixel % params.tile_q;
#pragma unroll
    for (int j = 0; j < THREAD_PIXELS; ++j) {
      visit(j, p, q);
      q += 32 % params.tile_q;
      const int carry = q >= params.tile_q;
      q -= carry ? params.tile_q : 0;
      p += 32 / params.tile_q + carry;
    }
  };
  // Where tap (0, 0) of my pixels lies in x_smem. A pixel beyond the tile reads as pixel 0 and is not stored.
  int x_offset[THREAD_PIXELS];
  for_each_pixel([&](int j, int p, int q) {
    x_offset[j] =
        p < params.tile_p ? p * stage_rows.output_step * stage_columns.size + q * stage_columns.output_step : 0;
  });

  Acc acc[THREAD_K][THREAD_PIXELS], total[THREAD_K][THREAD_PIXELS];
#pragma unroll
  for (int k = 0; k < THREAD_K; ++k)
#pragma unroll
    for (int j = 0; j < THREAD_PIXELS; ++j) acc[k][j] = total[k][j] = 0;
  int terms = 0;  // in acc
  const auto end_chunk = [&] {
#pragma unroll
    for (int k = 0; k < THREAD_K; ++k)
#pragma unroll
      for (int j = 0; j < THREAD_PIXELS; ++j) add_chunk(acc[k][j], total[k][j]);
    terms = 0;
  };

  const int64_t in_offset =
      at.n * params.in_stride[0] + static_cast<int64_t>(at.group) * params.in_channels * params.in_stride[1];
  const int64_t filter_elements = static_cast<int64_t>(params.rows.taps) * params.columns.taps * Config::TILE_K;
  const Acc* const packed_ptr =
      static_cast<const Acc*>(params.w_ptr) +
      (static_cast<int64_t>(at.group) * params.tiles_k + at.k / Config::TILE_K) * params.in_channels * filter_elements;

  for (int r = 0; r < rows.taps; r += taps_r)
    for (int s = 0; s < columns.taps; s += taps_s)
      for (int c = 0; c < params.in_channels; c += params.stage_channels) {
        const int channels =
            params.in_channels - c < params.stage_channels ? params.in_channels - c : params.stage_channels;
        __syncthreads();  // nobody reads the stage before any more
        stage_weights<Config>(w_smem, packed_ptr + c * filter_elements, params, rows, columns, r, s, taps_r, taps_s,
                              channels);
        with_storage<Acc>(params.dtype, [&](auto tag) {
          using Storage = decltype(tag);
          stage_window<Acc, Storage, Config::THREADS>(
              x_smem, static_cast<const Storage*>(params.in_ptr) + in_offset + c * params.in_stride[1], params,
              stage_rows, stage_columns, at.p * rows.stride + rows.origin + r * rows.tap_step,
              at.q * columns.stride + columns.origin + s * columns.tap_step, rows.input_size, columns.input_size,
              channels);
        });
        __syncthreads();  // the stage is complete

        const Acc* w_tap = w_smem + thread_k;
        for (int channel = 0; channel < channels; ++channel)
          for (int tap_r = 0; tap_r < taps_r; ++tap_r) {
            const Acc* x_row = x_smem + channel * plane + tap_r * stage_rows.tap_step * stage_columns.size;
            if (sizeof(Acc) == 4 && taps_s == 3 && stage_columns.tap_step == 1) {  // in double it would spill
              multiply_taps<Config, 3>(acc, w_tap, x_row, x_offset);
              w_tap += 3 * Config::TILE_K;
            } else {
              for (int tap_s = 0; tap_s < taps_s; ++tap_s, w_tap += Config::TILE_K, x_row += stage_columns.tap_step)
                multiply_taps<Config, 1>(acc, w_tap, x_row, x_offset);
            }
            terms += taps_s;
            if (terms + taps_s > kChunk) end_chunk();
          }
      }
  end_chunk();

  int64_t pixel_offset[THREAD_PIXELS];
  for_each_pixel([&](int j, int p, int q) {
    const bool stored = p < params.tile_p && at.p + p < rows.outputs && at.q + q < columns.outputs;
    pixel_offset[j] = stored ? out_position(rows, at.p + p) * params.out_stride[2] +
                                   out_position(columns, at.q + q) * params.out_stride[3]
                             : -1;
  });
  with_storage<Acc>(params.dtype, [&](auto tag) {
    using Storage = decltype(tag);
    const int64_t first_channel = static_cast<int64_t>(at.group) * params.out_channels + at.k + thread_k;
    const Storage* bias_ptr = params.bias_ptr ? static_cast<const Storage*>(params.bias_ptr) + first_channel : nullptr;
    Storage* out_ptr =
        static_cast<Storage*>(params.out_ptr) + at.n * params.out_stride[0] + first_channel * params.out_stride[1];
    store_tile<Config>(total, bias_ptr, out_ptr, params.out_stride[1], pixel_offset,
                       params.out_channels - at.k - thread_k);
  });
}

template <typename Config>
__global__ void __launch_bounds__(Config::THREADS, Config::BLOCKS_PER_SM)
    correlate_kernel(const CorrelateParams params) {
  correlate_tile<Config>(params, locate_tile(params, blockIdx.x, Config::TILE_K));
}

// Tiles on a list, each of several of this kernel's, of `params`: blocks take them in turns. Without a stride, so there
// is one phase. A short list leaves most of the GPU idle: one tile of sums of 144, 576 or 4608 products takes 19, 65
// or 465 us (H200, 2026-11-22). Smaller pieces of it would help.
template <typename Config>
__global__ void __launch_bounds__(Config::THREADS, Config::BLOCKS_PER_SM)
    correlate_listed_kernel(const CorrelateParams params, const TileList list, const int images) {
  const int parts_k = list.tile_k / Config::TILE_K, parts = parts_k * (list.tile_p / params.tile_p);
  const unsigned tiles_k = (params.out_channels + list.tile_k - 1) / list.tile_k;
  const unsigned tiles_p = (params.tiles_p * params.tile_p + list.tile_p - 1) / list.tile_p;
  const bool all = *list.all != 0;
  const unsigned count = all ? params.groups * images * tiles_p * params.tiles_q * tiles_k : *list.count;
  for (unsigned i = blockIdx.x; i < count * parts; i += gridDim.x) {
    unsigned tile = all ? i / parts : list.numbers[i / parts];
    const int part = static_cast<int>(i % parts);
    TileOrigin at{};
    at.k = static_cast<int>(tile % tiles_k) * list.tile_k + part % parts_k * Config::TILE_K;
    tile /= tiles_k;
    at.q = static_cast<int>(tile % params.tiles_q) * list.tile_q;
    tile /= params.tiles_q;
    at.p = static_cast<int>(tile % tiles_p) * list.tile_p + part / parts_k * params.tile_p;
    tile /= tiles_p;
    at.n = static_cast<int>(tile % images);
    at.group = static_cast<int>(tile / images);
    if (at.k < params.out_channels && at.p < params.tiles_p * params.tile_p) correlate_tile<Config>(params, at);
  }
}

// Where a thread of depthwise works: its column, its band of rows.
struct Band {
  int column, first_row;
  bool exists;  // a tile cut short at the image's end leaves threads over
};

MODELNEW_HOST_DEVICE inline Band locate_band(int thread, int tile_p, int tile_q, int rows) {
  const int first_row = thread / tile_q * rows;
  return {thread % tile_q, first_row < tile_p ? first_row : 0, first_row < tile_p};
}

// ---- depthwise ----
//
// One output channel reads one input channel (fprop) or few (dgrad), with a filter of any shape, stride and dilation:
// the input window of a channel goes through shared memory, and each tap adds one staged value to each of a thread's
// ROWS outputs below one another (lanes on neighbouring words: no conflicts with stride 1).
template <typename Acc_>
struct DepthwiseConfig {
  using Acc = Acc_;
  static constexpr int ROWS = 8, THREADS = 256, TILE_PIXELS = ROWS * THREADS, TILE_K = 1;
  static constexpr int BLOCKS_PER_SM = sizeof(Acc) == 8 ? 2 : 3;
};

// Stores a band's outputs and adds the bias.
template <typename Storage, typename Acc, int ROWS>
__device__ inline void store_band(const Acc (&total)[ROWS], const CorrelateParams& params, const TileOrigin& at,
                                  const Band& band, const Window& rows, const Window& columns) {
  if (!band.exists || at.q + band.column >= columns.outputs) return;
  const int64_t channel = static_cast<int64_t>(at.group) * params.out_channels + at.k;
  const Acc bias = params.bias_ptr ? widen(static_cast<const Storage*>(params.bias_ptr)[channel]) : 0;
  Storage* out_ptr = static_cast<Storage*>(params.out_ptr) + at.n * params.out_stride[0] +
                     channel * params.out_stride[1] + out_position(columns, at.q + band.column) * params.out_stride[3];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int p = at.p + band.first_row + i;
    if (p < rows.outputs) narrow(total[i] + bias, out_ptr[out_position(rows, p) * params.out_stride[2]]);
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::THREADS, Config::BLOCKS_PER_SM)
    depthwise_kernel(const CorrelateParams params) {
  using Acc = typename Config::Acc;
  constexpr int ROWS = Config::ROWS;
  extern __shared__ __align__(16) unsigned char modelnew_smem[];

  const TileOrigin at = locate_tile(params, blockIdx.x, Config::TILE_K);
  const Window rows = make_window(params.op, params.rows, at.phase_h);
  const Window columns = make_window(params.op, params.columns, at.phase_w);
  const StageAxis stage_rows = stage_axis(rows, params.tile_p, false);
  const StageAxis stage_columns = stage_axis(columns, params.tile_q, false);
  const Band band = locate_band(threadIdx.x, params.tile_p, params.tile_q, ROWS);
  const int taps = rows.taps * columns.taps;

  Acc* const w_smem = reinterpret_cast<Acc*>(modelnew_smem);
  Acc* const x_smem = w_smem + taps;
  const int row_pitch = stage_rows.output_step * stage_columns.size;
  const int in_row = (at.p + band.first_row) * rows.stride + rows.origin;  // that tap (0, 0) of my first output reads
  const int in_column = (at.q + band.column) * columns.stride + columns.origin;
  const Acc* const my_x = x_smem + band.first_row * row_pitch + band.column * stage_columns.output_step;

  Acc acc[ROWS], total[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) acc[i] = total[i] = 0;
  int terms = 0;
  const auto end_chunk = [&] {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) add_chunk(acc[i], total[i]);
    terms = 0;
  };

  // A group's output channel at.k reads input channels first_in .. first_in + in_channels.
  const int64_t first_in = static_cast<int64_t>(at.group) * params.in_channels;
  const int64_t in_offset = at.n * params.in_stride[0] + first_in * params.in_stride[1];
  const int64_t w_offset = at.group * params.w_stride_group + at.k * params.w_stride_out;

  for (int c = 0; c < params.in_channels; ++c) {
    if (c > 0) __syncthreads();  // nobody reads the channel before any more
    with_storage<Acc>(params.dtype, [&](auto tag) {
      using Storage = decltype(tag);
      const Storage* w_ptr = static_cast<const Storage*>(params.w_ptr) + w_offset + c * params.w_stride_in;
      for (int tap = threadIdx.x; tap < taps; tap += Config::THREADS) {
        const int r = rows.first_tap + tap / columns.taps * rows.tap_stride;
        const int s = columns.first_tap + tap % columns.taps * columns.tap_stride;
        w_smem[tap] = widen(w_ptr[r * params.w_stride_r + s * params.w_stride_s]);
      }
      if (taps > 0)
        stage_window<Acc, Storage, Config::THREADS>(
            x_smem, static_cast<const Storage*>(params.in_ptr) + in_offset + c * params.in_stride[1], params,
            stage_rows, stage_columns, at.p * rows.stride + rows.origin, at.q * columns.stride + columns.origin,
            rows.input_size, columns.input_size, 1);
    });
    __syncthreads();  // the channel is staged

    for (int r = 0; r < rows.taps; ++r) {
      if (terms + columns.taps > kChunk) end_chunk();
      const Acc* x_tap = my_x + r * stage_rows.tap_step * stage_columns.size;
      for (int s = 0; s < columns.taps; ++s, x_tap += stage_columns.tap_step) {
        const Acc w_frag = w_smem[r * columns.taps + s];
        if (is_finite(w_frag)) {
#pragma unroll
          for (int i = 0; i < ROWS; ++i) acc[i] += w_frag * x_tap[i * row_pitch];
        } else if (is_within(in_column + s * columns.tap_step, columns.input_size)) {
          // Padding is skipped, as in PyTorch's depthwise kernels, where a zero would make NaN of an Inf.
#pragma unroll
          for (int i = 0; i < ROWS; ++i)
            if (is_within(in_row + i * rows.stride + r * rows.tap_step, rows.input_size))
              acc[i] += w_frag * x_tap[i * row_pitch];
        }
      }
      terms += columns.taps;
    }
  }
  end_chunk();

  with_storage<Acc>(params.dtype, [&](auto tag) { store_band<decltype(tag)>(total, params, at, band, rows, columns); });
}

// ---- weight_grad ----
//
// dw[k, e] = sum over pixels of dy[k, pixel] * x[e at pixel], where e numbers (c, r, s) as w does. A block owns
// TILE_K x TILE_E elements of dw and one of `splits` ranges of pixels, 32 pixels a stage:
//
//            e = (c, r, s): TILE_E, 32 lanes to a step
//          +--------------+--------------+
//   TILE_K | warp 0       | warp 0       |  THREAD_K channels of y, THREAD_E steps
//          +--------------+--------------+
//          | warp 1       | warp 1       |  ... 8 warps
//          +--------------+--------------+
//
//     shared memory   dy [32 pixels][TILE_K]    lanes = pixels when staged: global loads are coalesced along rows;
//                     x  [32 pixels][TILE_E]    odd pitch for x: stores and loads without conflicts
//     registers       acc, total [THREAD_K][THREAD_E]; a warp has one set of k (a broadcast), its lanes are
//                     neighbouring e
//
// The sum over millions of pixels: kChunk pixels in acc, chunks with compensation in total, and the splits in double
// and in order (add_partials).
template <typename Acc_, int THREAD_K_, int THREAD_E_, int X_BATCH_>
struct WeightGradConfig {
  using Acc = Acc_;
  static constexpr int THREAD_K = THREAD_K_, THREAD_E = THREAD_E_;
  static constexpr int WARPS = 8, THREADS = 32 * WARPS;
  static constexpr int TILE_K = THREAD_K * WARPS, TILE_E = THREAD_E * 32, TILE_PIXELS = 32;
  static constexpr int DY_PITCH = TILE_K + Vector<Acc>::SIZE, X_PITCH = TILE_E + 1;
  static constexpr int DY_BATCH = 4, X_BATCH = X_BATCH_;  // loads under way in a thread
  static constexpr int BLOCKS_PER_SM = 2;
  static_assert(TILE_K % (WARPS * DY_BATCH) == 0 && TILE_E % (WARPS * X_BATCH) == 0, "whole batches");
  static_assert(THREAD_K % Vector<Acc>::SIZE == 0, "dy is read 16 bytes at a time");
  static_assert(kChunk % TILE_PIXELS == 0, "a chunk is a whole number of stages");
};

struct WeightGradParams {
  const void *x_ptr, *dy_ptr;
  double* partial_ptr;  // [split][K * C/groups * R * S]
  int64_t x_stride[4], dy_stride[4];
  Axis rows, columns;
  int64_t N;
  int groups, group_c, group_k;  // channels of one group
  int tiles_k, tiles_e, splits;
  int64_t stages_per_split;
  DType dtype;
  bool round_to_tf32;
};

// One e of the tile, as the staging threads need it.
struct alignas(16) WeightGradTap {
  int64_t x_offset;
  int row, column;  // what the tap adds to a pixel's position in x
};

// A pixel of y, numbered through all images, and where it lies.
struct PixelCursor {
  int64_t n;
  int p, q;
};

MODELNEW_HOST_DEVICE inline PixelCursor locate_pixel(int64_t pixel, int P, int Q) {
  const int64_t row = pixel / Q;
  return {row / P, static_cast<int>(row % P), static_cast<int>(pixel % Q)};
}

MODELNEW_HOST_DEVICE inline void advance(PixelCursor& at, int pixels, int P, int Q) {
  at.q += pixels;
  while (at.q >= Q) {
    at.q -= Q;
    if (++at.p == P) {
      at.p = 0;
      ++at.n;
    }
  }
}

template <typename Config, typename Storage>
__device__ inline void stage_pixels(typename Config::Acc* dy_smem, typename Config::Acc* x_smem,
                                    const WeightGradTap* taps, const WeightGradParams& params, const PixelCursor& at,
                                    int first_k, int group) {
  using Acc = typename Config::Acc;
  const int warp_id = threadIdx.x / 32, pixel = threadIdx.x % 32;
  const bool exists = at.n < params.N;
  const int x_row = at.p * params.rows.stride - params.rows.pad,
            x_column = at.q * params.columns.stride - params.columns.pad;
  const int channels = params.group_k - first_k;
  const Storage* dy_ptr = static_cast<const Storage*>(params.dy_ptr) + at.n * params.dy_stride[0] +
                          (static_cast<int64_t>(group) * params.group_k + first_k + warp_id) * params.dy_stride[1] +
                          at.p * params.dy_stride[2] + at.q * params.dy_stride[3];
  const Storage* x_ptr = static_cast<const Storage*>(params.x_ptr) + at.n * params.x_stride[0] +
                         static_cast<int64_t>(group) * params.group_c * params.x_stride[1] +
                         x_row * params.x_stride[2] + x_column * params.x_stride[3];
  // Channels beyond the last load zeros: their sums are not stored.
#pragma unroll 1
  for (int first = warp_id; first < Config::TILE_K; first += Config::WARPS * Config::DY_BATCH) {
    Storage dy_value[Config::DY_BATCH];
#pragma unroll
    for (int i = 0; i < Config::DY_BATCH; ++i, dy_ptr += Config::WARPS * params.dy_stride[1])
      dy_value[i] = load_if(exists & (first + Config::WARPS * i < channels), dy_ptr);
#pragma unroll
    for (int i = 0; i < Config::DY_BATCH; ++i)
      dy_smem[pixel * Config::DY_PITCH + first + Config::WARPS * i] =
          to_operand<Acc>(dy_value[i], params.round_to_tf32);
  }
#pragma unroll 1
  for (int first = warp_id; first < Config::TILE_E; first += Config::WARPS * Config::X_BATCH) {
    Storage x_value[Config::X_BATCH];
#pragma unroll
    for (int i = 0; i < Config::X_BATCH; ++i) {
      const WeightGradTap tap = taps[first + Config::WARPS * i];
      const bool inside = exists & is_within(x_row + tap.row, params.rows.x_size) &
                          is_within(x_column + tap.column, params.columns.x_size);
      x_value[i] = load_if(inside, x_ptr + tap.x_offset);
    }
#pragma unroll
    for (int i = 0; i < Config::X_BATCH; ++i)
      x_smem[pixel * Config::X_PITCH + first + Config::WARPS * i] = to_operand<Acc>(x_value[i], params.round_to_tf32);
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::THREADS, Config::BLOCKS_PER_SM)
    weight_grad_kernel(const WeightGradParams params) {
  using Acc = typename Config::Acc;
  constexpr int THREAD_K = Config::THREAD_K, THREAD_E = Config::THREAD_E, VECTOR = Vector<Acc>::SIZE;
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  WeightGradTap* const taps = reinterpret_cast<WeightGradTap*>(modelnew_smem);
  Acc* const dy_smem = reinterpret_cast<Acc*>(taps + Config::TILE_E);
  Acc* const x_smem = dy_smem + Config::TILE_PIXELS * Config::DY_PITCH;

  unsigned tile = blockIdx.x;
  const int split = static_cast<int>(tile % params.splits);
  tile /= params.splits;
  const int64_t first_e = static_cast<int64_t>(tile % params.tiles_e) * Config::TILE_E;
  tile /= params.tiles_e;
  const int first_k = static_cast<int>(tile % params.tiles_k) * Config::TILE_K;
  const int group = static_cast<int>(tile / params.tiles_k);

  const int R = params.rows.taps, S = params.columns.taps;
  const int64_t all_e = static_cast<int64_t>(params.group_c) * R * S;
  for (int i = threadIdx.x; i < Config::TILE_E; i += Config::THREADS) {
    const int64_t e = first_e + i;
    const int c = static_cast<int>(e / (R * S)), r = static_cast<int>(e / S % R), s = static_cast<int>(e % S);
    const int row = r * params.rows.dilation, column = s * params.columns.dilation;
    // An e beyond the last is placed outside the image: it stages zeros.
    taps[i] = e < all_e ? WeightGradTap{c * params.x_stride[1] + row * params.x_stride[2] + column * params.x_stride[3],
                                        row, column}
                        : WeightGradTap{0, params.rows.x_size + params.rows.pad, 0};
  }
  __syncthreads();  // the table of taps is complete

  const int thread_k = static_cast<int>(threadIdx.x) / 32 * THREAD_K, lane_e = threadIdx.x % 32;
  Acc acc[THREAD_K][THREAD_E], total[THREAD_K][THREAD_E];
#pragma unroll
  for (int k = 0; k < THREAD_K; ++k)
#pragma unroll
    for (int e = 0; e < THREAD_E; ++e) acc[k][e] = total[k][e] = 0;

  const int64_t pixels = params.N * params.rows.y_size * params.columns.y_size;
  const int64_t first_pixel = split * params.stages_per_split * Config::TILE_PIXELS;
  const int64_t all_stages = (pixels - first_pixel + Config::TILE_PIXELS - 1) / Config::TILE_PIXELS;
  const int stages = static_cast<int>(all_stages < params.stages_per_split ? all_stages : params.stages_per_split);
  PixelCursor at = locate_pixel(first_pixel + threadIdx.x % 32, params.rows.y_size, params.columns.y_size);
  constexpr int CHUNK_STAGES = kChunk / Config::TILE_PIXELS;
#pragma unroll 1
  for (int stage = 1; stage <= stages; ++stage) {
    with_storage<Acc>(params.dtype, [&](auto tag) {
      stage_pixels<Config, decltype(tag)>(dy_smem, x_smem, taps, params, at, first_k, group);
    });
    advance(at, Config::TILE_PIXELS, params.rows.y_size, params.columns.y_size);
    __syncthreads();  // the stage is complete
#pragma unroll 1
    for (int i = 0; i < Config::TILE_PIXELS; ++i) {
      Vector<Acc> dy_frag[THREAD_K / VECTOR];
      Acc x_frag[THREAD_E];
#pragma unroll
      for (int k = 0; k < THREAD_K / VECTOR; ++k)
        dy_frag[k] = reinterpret_cast<const Vector<Acc>*>(dy_smem + i * Config::DY_PITCH + thread_k)[k];
#pragma unroll
      for (int e = 0; e < THREAD_E; ++e) x_frag[e] = x_smem[i * Config::X_PITCH + lane_e + e * 32];
#pragma unroll
      for (int k = 0; k < THREAD_K; ++k)
#pragma unroll
        for (int e = 0; e < THREAD_E; ++e) acc[k][e] += dy_frag[k / VECTOR].element[k % VECTOR] * x_frag[e];
    }
    if (stage % CHUNK_STAGES == 0 || stage == stages) {
#pragma unroll
      for (int k = 0; k < THREAD_K; ++k)
#pragma unroll
        for (int e = 0; e < THREAD_E; ++e) add_chunk(acc[k][e], total[k][e]);
    }
    __syncthreads();  // nobody reads this stage any more
  }

  double* slots = params.partial_ptr + split * (static_cast<int64_t>(params.groups) * params.group_k * all_e) +
                  (static_cast<int64_t>(group) * params.group_k + first_k + thread_k) * all_e + first_e + lane_e;
#pragma unroll
  for (int k = 0; k < THREAD_K; ++k)
#pragma unroll
    for (int e = 0; e < THREAD_E; ++e)
      if (first_k + thread_k + k < params.group_k && first_e + lane_e + e * 32 < all_e)
        slots[k * all_e + e * 32] = total[k][e];
}

// ---- depthwise_wgrad ----
//
// With one input channel for each k, dw[k] is R*S sums over pixels of products that need no tiling: a block owns TAPS
// elements of one dw[k] and one range of rows of y; a warp takes a row at a time, lanes along it, and reads x from
// global memory (neighbouring taps find it in L1). Partial sums: kChunk terms in acc, then double.
constexpr int kDepthwiseTaps = 9;

// Adds one double of each thread in a fixed order; thread 0 gets the sum.
template <int THREADS>
__device__ inline double block_sum(double value, double* smem) {
  static_assert((THREADS & (THREADS - 1)) == 0, "halving reaches one thread");
  __syncthreads();  // the sum before has been read
  smem[threadIdx.x] = value;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();  // the level above is complete
    if (static_cast<int>(threadIdx.x) < half) smem[threadIdx.x] += smem[threadIdx.x + half];
  }
  return threadIdx.x == 0 ? smem[0] : 0;
}

template <typename Acc, typename Storage>
__device__ inline void add_rows(double (&sum)[kDepthwiseTaps], const WeightGradParams& params, int k, int first_tap,
                                int64_t first_row, int64_t end_row) {
  constexpr int TAPS = kDepthwiseTaps, WARPS = kReduceThreads / 32;
  const int R = params.rows.taps, S = params.columns.taps, lane_id = threadIdx.x % 32;
  const int x_channel = k / params.group_k;
  int tap_row[TAPS], tap_column[TAPS];
#pragma unroll
  for (int i = 0; i < TAPS; ++i) {
    const int tap = first_tap + i;
    // A tap beyond the last lies outside every image.
    tap_row[i] = tap < R * S ? tap / S * params.rows.dilation : params.rows.x_size + params.rows.pad;
    tap_column[i] = tap % S * params.columns.dilation;
  }
  Acc acc[TAPS] = {};
  int terms = 0;
  for (int64_t row = first_row + threadIdx.x / 32; row < end_row; row += WARPS) {
    const int64_t n = row / params.rows.y_size;
    const int p = static_cast<int>(row % params.rows.y_size);
    const Storage* dy_ptr = static_cast<const Storage*>(params.dy_ptr) + n * params.dy_stride[0] +
                            k * params.dy_stride[1] + p * params.dy_stride[2];
    const Storage* x_ptr =
        static_cast<const Storage*>(params.x_ptr) + n * params.x_stride[0] + x_channel * params.x_stride[1];
    const int x_row = p * params.rows.stride - params.rows.pad;
    for (int q = lane_id; q < params.columns.y_size; q += 32) {
      const Acc dy = widen(dy_ptr[q * params.dy_stride[3]]);
      const int x_column = q * params.columns.stride - params.columns.pad;
      const auto meets = [&](int i) {
        return is_within(x_row + tap_row[i], params.rows.x_size) &
               is_within(x_column + tap_column[i], params.columns.x_size);
      };
      Storage x_value[TAPS];
#pragma unroll
      for (int i = 0; i < TAPS; ++i) {
        const int h = x_row + tap_row[i], w = x_column + tap_column[i];
        x_value[i] = load_if(meets(i), x_ptr + (h * params.x_stride[2] + w * params.x_stride[3]));
      }
      const bool finite = is_finite(dy);
#pragma unroll
      for (int i = 0; i < TAPS; ++i)
        // Padding is skipped, see depthwise; a finite dy may just as well meet its zeros.
        if (finite || meets(i)) acc[i] += dy * widen(x_value[i]);
      if (++terms == kChunk) {
#pragma unroll
        for (int i = 0; i < TAPS; ++i) {
          sum[i] += acc[i];
          acc[i] = 0;
        }
        terms = 0;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < TAPS; ++i) sum[i] += acc[i];
}

// blockIdx.x = (k, tap group, split); stages_per_split counts rows of y here.
template <typename Acc>
__global__ void __launch_bounds__(kReduceThreads) depthwise_wgrad_kernel(const WeightGradParams params) {
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  unsigned tile = blockIdx.x;
  const int split = static_cast<int>(tile % params.splits);
  tile /= params.splits;
  const int first_tap = static_cast<int>(tile % params.tiles_e) * kDepthwiseTaps;
  const int k = static_cast<int>(tile / params.tiles_e);
  const int64_t rows = params.N * params.rows.y_size, first_row = split * params.stages_per_split;
  const int64_t end_row = first_row + params.stages_per_split < rows ? first_row + params.stages_per_split : rows;

  double sum[kDepthwiseTaps] = {};
  with_storage<Acc>(params.dtype,
                    [&](auto tag) { add_rows<Acc, decltype(tag)>(sum, params, k, first_tap, first_row, end_row); });
  const int all_taps = params.rows.taps * params.columns.taps;
  double* slots =
      params.partial_ptr + (static_cast<int64_t>(split) * params.groups * params.group_k + k) * all_taps + first_tap;
#pragma unroll
  for (int i = 0; i < kDepthwiseTaps; ++i) {
    const double all = block_sum<kReduceThreads>(sum[i], reinterpret_cast<double*>(modelnew_smem));
    if (threadIdx.x == 0 && first_tap + i < all_taps) slots[i] = all;
  }
}

// ---- sliding_wgrad ----
//
// 3x3 with stride and dilation 1, where depthwise_wgrad would load each x nine times: a warp takes strips of 32 columns
// and kStripRows rows of y; each lane walks down its column with the 3x3 window of x in registers and loads three new
// values a row. Chunks are strips.
constexpr int kSlidingTaps = 3, kStripRows = 32;
static_assert(kStripRows <= kChunk, "a strip is one chunk");

template <typename Acc, typename Storage>
__device__ inline void add_strip(double (&sum)[kSlidingTaps * kSlidingTaps], const WeightGradParams& params,
                                 const Storage* x_ptr, const Storage* dy_ptr, int first_p, int q) {
  constexpr int TAPS = kSlidingTaps;
  constexpr int BATCH = 4, HALO = TAPS - 1;
  static_assert(kStripRows % BATCH == 0, "whole batches");
  const int x_row = first_p - params.rows.pad, x_column = q - params.columns.pad;
  x_ptr += x_row * params.x_stride[2] + x_column * params.x_stride[3];
  dy_ptr += first_p * params.dy_stride[2] + q * params.dy_stride[3];
  const auto load_row = [&](int h, Acc(&row)[TAPS]) {
#pragma unroll
    for (int s = 0; s < TAPS; ++s)
      row[s] = widen(load_if(is_within(h, params.rows.x_size) & is_within(x_column + s, params.columns.x_size),
                             x_ptr + s * params.x_stride[3]));
    x_ptr += params.x_stride[2];
  };
  Acc acc[TAPS][TAPS] = {}, x_frag[BATCH + HALO][TAPS];
#pragma unroll
  for (int r = 0; r < HALO; ++r) load_row(x_row + r, x_frag[r]);
#pragma unroll 1
  for (int first = first_p; first < first_p + kStripRows; first += BATCH) {
    Acc dy_frag[BATCH];
    const auto exists = [&](int p) { return (p < params.rows.y_size) & (q < params.columns.y_size); };
#pragma unroll
    for (int i = 0; i < BATCH; ++i, dy_ptr += params.dy_stride[2]) {
      load_row(first + i - params.rows.pad + HALO, x_frag[i + HALO]);
      dy_frag[i] = widen(load_if(exists(first + i), dy_ptr));
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (!exists(first + i)) continue;  // a zero for dy is not enough: x may be Inf
      const bool finite = is_finite(dy_frag[i]);
#pragma unroll
      for (int r = 0; r < TAPS; ++r)
#pragma unroll
        for (int s = 0; s < TAPS; ++s)
          // Padding is skipped, see depthwise; a finite dy may just as well meet its zeros.
          if (finite || (is_within(first + i - params.rows.pad + r, params.rows.x_size) &&
                         is_within(x_column + s, params.columns.x_size)))
            acc[r][s] += dy_frag[i] * x_frag[i + r][s];
    }
#pragma unroll
    for (int r = 0; r < HALO; ++r)
#pragma unroll
      for (int s = 0; s < TAPS; ++s) x_frag[r][s] = x_frag[BATCH + r][s];
  }
#pragma unroll
  for (int i = 0; i < TAPS * TAPS; ++i) sum[i] += acc[i / TAPS][i % TAPS];
}

// blockIdx.x = (k, split); stages_per_split counts strips here.
template <typename Acc>
__global__ void __launch_bounds__(kReduceThreads, sizeof(Acc) == 8 ? 1 : 2)
    sliding_wgrad_kernel(const WeightGradParams params) {
  constexpr int TAPS = kSlidingTaps * kSlidingTaps;
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  const int split = static_cast<int>(blockIdx.x % params.splits), k = static_cast<int>(blockIdx.x / params.splits);
  const int strips_p = (params.rows.y_size + kStripRows - 1) / kStripRows, strips_q = (params.columns.y_size + 31) / 32;
  const int64_t strips = params.N * strips_p * strips_q, first = split * params.stages_per_split;
  const int64_t end = first + params.stages_per_split < strips ? first + params.stages_per_split : strips;

  double sum[TAPS] = {};
  with_storage<Acc>(params.dtype, [&](auto tag) {
    using Storage = decltype(tag);
    for (int64_t strip = first + threadIdx.x / 32; strip < end; strip += kReduceThreads / 32) {
      const int64_t n = strip / strips_q / strips_p;
      const int first_p = static_cast<int>(strip / strips_q % strips_p) * kStripRows;
      const int q = static_cast<int>(strip % strips_q) * 32 + static_cast<int>(threadIdx.x) % 32;
      add_strip<Acc>(
          sum, params,
          static_cast<const Storage*>(params.x_ptr) + n * params.x_stride[0] + k / params.group_k * params.x_stride[1],
          static_cast<const Storage*>(params.dy_ptr) + n * params.dy_stride[0] + k * params.dy_stride[1], first_p, q);
    }
  });
  double* slots = params.partial_ptr + (static_cast<int64_t>(split) * params.groups * params.group_k + k) * TAPS;
#pragma unroll
  for (int i = 0; i < TAPS; ++i) {
    const double all = block_sum<kReduceThreads>(sum[i], reinterpret_cast<double*>(modelnew_smem));
    if (threadIdx.x == 0) slots[i] = all;
  }
}

// ---- bias_grad, add_partials ----

struct BiasGradParams {
  const void* dy_ptr;
  double* partial_ptr;  // [split][K]
  int64_t dy_stride[4];
  int64_t N;
  int K, P, Q, splits;
  int64_t rows_per_split;
  DType dtype;
};

// blockIdx.x = (k, split). One warp a row of dy; sums in double from the start: reading dy is what takes the time.
__global__ void __launch_bounds__(kReduceThreads) bias_grad_kernel(const BiasGradParams params) {
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  const int split = static_cast<int>(blockIdx.x % params.splits), k = static_cast<int>(blockIdx.x / params.splits);
  const int64_t rows = params.N * params.P, first_row = split * params.rows_per_split;
  const int64_t end_row = first_row + params.rows_per_split < rows ? first_row + params.rows_per_split : rows;
  double sum = 0;
  const auto add_rows_of = [&](auto tag) {
    using Storage = decltype(tag);
    for (int64_t row = first_row + threadIdx.x / 32; row < end_row; row += kReduceThreads / 32) {
      const Storage* dy_ptr = static_cast<const Storage*>(params.dy_ptr) + row / params.P * params.dy_stride[0] +
                              k * params.dy_stride[1] + row % params.P * params.dy_stride[2];
#pragma unroll 4
      for (int q = threadIdx.x % 32; q < params.Q; q += 32) sum += widen(dy_ptr[q * params.dy_stride[3]]);
    }
  };
  if (params.dtype == DType::kFloat64)
    add_rows_of(double{});
  else
    with_storage<float>(params.dtype, add_rows_of);
  const double all = block_sum<kReduceThreads>(sum, reinterpret_cast<double*>(modelnew_smem));
  if (threadIdx.x == 0) params.partial_ptr[static_cast<int64_t>(split) * params.K + k] = all;
}

struct AddPartialsParams {
  const double* partial_ptr;  // [split][k][c][r][s]
  void* out_ptr;
  int64_t out_stride[4];
  int64_t elements;
  int C, R, S, splits;
  DType dtype;
};

__global__ void __launch_bounds__(kReduceThreads) add_partials_kernel(const AddPartialsParams params) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kReduceThreads + threadIdx.x;
  if (i >= params.elements) return;
  double sum = 0;
  for (int split = 0; split < params.splits; ++split) sum += params.partial_ptr[split * params.elements + i];
  const int64_t s = i % params.S, r = i / params.S % params.R, c = i / params.S / params.R % params.C;
  const int64_t k = i / params.S / params.R / params.C;
  const int64_t at =
      k * params.out_stride[0] + c * params.out_stride[1] + r * params.out_stride[2] + s * params.out_stride[3];
  if (params.dtype == DType::kFloat64)
    narrow(sum, static_cast<double*>(params.out_ptr)[at]);
  else
    with_storage<float>(params.dtype, [&](auto tag) {
      narrow(static_cast<float>(sum), static_cast<decltype(tag)*>(params.out_ptr)[at]);
    });
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// ---- Choosing tiles: plain host code, the same for launch() and explain() ----

struct Tiling {
  int tile_p, tile_q, stage_channels;
  bool row_by_row, column_by_column;
  int64_t smem_bytes;
  double cost;  // issue slots of one warp lane over the whole image; only comparisons matter
};

// The window of the phase with the most outputs and the most taps: every phase fits into its tiles.
inline Window widest_window(Operator op, const Axis& axis) {
  Window window = make_window(op, axis, 0);
  if (op == Operator::kDgrad) {
    const int divisor = greatest_common_divisor(axis.stride, axis.dilation);
    window.taps = (axis.taps - 1) / (axis.stride / divisor) + 1;
    window.tap_step = axis.dilation / divisor;
  }
  return window;
}

// Tries one tile shape, staging as many taps at once as shared memory allows. False when nothing fits.
template <typename Config>
inline bool try_tiling(const Window& rows, const Window& columns, int in_channels, int tile_p, int tile_q,
                       double slots_per_tap, bool may_split_taps, Tiling& best) {
  using Acc = typename Config::Acc;
  // Estimates, to rank tiles with; none was fitted to times.
  constexpr double kSlotsPerStaged = 16;  // position, bounds, load, round, store of one element
  constexpr double kSlotsPerStored = 8;   // the same for an output, most of it waiting for memory
  constexpr double kPartialSectors = 8;   // elements: what a row that starts anywhere wastes at its two ends
  for (int split = 0; split < (may_split_taps ? 4 : 1); ++split) {
    const bool row_by_row = split & 1, column_by_column = split & 2;
    const StageAxis stage_rows = stage_axis(rows, tile_p, row_by_row);
    const StageAxis stage_columns = stage_axis(columns, tile_q, column_by_column);
    if (stage_columns.taps > kChunk) continue;  // a filter row is the smallest step between two chunks
    const int64_t one = stage_elements<Config>(stage_rows, stage_columns, 1) * static_cast<int64_t>(sizeof(Acc));
    if (one > kSharedBytes) continue;
    const int most = static_cast<int>(std::min<int64_t>(in_channels, kSharedBytes / one));
    const int stages = static_cast<int>(ceil_div(in_channels, most));
    const int stage_channels = static_cast<int>(ceil_div(in_channels, stages));
    const double stages_of_taps = static_cast<double>(std::max(rows.taps, 1)) * std::max(columns.taps, 1) /
                                  (static_cast<double>(stage_rows.taps) * stage_columns.taps);
    const double staged = stages_of_taps * (stage_rows.size * (stage_columns.size + kPartialSectors) +
                                            stage_rows.taps * stage_columns.taps * static_cast<double>(Config::TILE_K));
    const double stored = tile_p * (tile_q + kPartialSectors) * Config::TILE_K;
    const double cost = static_cast<double>(ceil_div(rows.outputs, tile_p)) * ceil_div(columns.outputs, tile_q) *
                        (in_channels * (slots_per_tap * rows.taps * columns.taps + kSlotsPerStaged * staged) +
                         kSlotsPerStored * stored);
    if (best.cost < 0 || cost < best.cost)
      best = {tile_p, tile_q, stage_channels, row_by_row, column_by_column, one * stage_channels, cost};
    return true;
  }
  return false;
}

// A correlate tile: any rows x columns of at most TILE_PIXELS; powers of two and the whole width are tried.
template <typename Config>
inline Tiling correlate_tiling(const Window& rows, const Window& columns, int in_channels) {
  constexpr int FRAGMENT = Config::THREAD_K * Config::THREAD_PIXELS;
  // Per tap and thread: the multiply-adds, two slots a pixel (address, load), the weights' loads, the loop.
  constexpr double kThreadSlots =
      FRAGMENT + 2 * Config::THREAD_PIXELS + Config::THREAD_K / Vector<typename Config::Acc>::SIZE + 4;
  Tiling best{};
  best.cost = -1;
  const auto consider = [&](int tile_q) {
    const int tile_p = std::min(Config::TILE_PIXELS / tile_q, rows.outputs);
    try_tiling<Config>(rows, columns, in_channels, std::max(tile_p, 1), tile_q, kThreadSlots * Config::THREADS, true,
                       best);
  };
  for (int tile_q = 4; tile_q <= Config::TILE_PIXELS && tile_q < std::max(8, 2 * columns.outputs); tile_q *= 2)
    consider(tile_q);
  if (columns.outputs > 0 && columns.outputs < Config::TILE_PIXELS) consider(columns.outputs);
  return best;
}

// Tiles of depthwise: `tile_q` columns and as many bands of ROWS as the block's threads make.
template <typename Config>
inline int band_rows(const Window& rows, int tile_q) {
  const int whole = static_cast<int>(ceil_div(std::max(rows.outputs, 1), Config::ROWS)) * Config::ROWS;
  return std::min(Config::TILE_PIXELS / tile_q, whole);
}

template <typename Config>
inline Tiling depthwise_tiling(const Window& rows, const Window& columns) {
  Tiling best{};
  best.cost = -1;
  for (int tile_q = 8; tile_q <= 128; tile_q *= 2)
    try_tiling<Config>(rows, columns, 1, band_rows<Config>(rows, tile_q), tile_q, 2.0 * Config::TILE_PIXELS, false,
                       best);
  return best;
}

using WideK = CorrelateConfig<float, 8, 4, 8, 1, 2>;     // 64 channels x 128 pixels
using NarrowK = CorrelateConfig<float, 8, 4, 2, 4, 2>;   // 16 x 512
using FewK = CorrelateConfig<float, 4, 4, 1, 4, 4>;      // 4 x 512
using DoubleK = CorrelateConfig<double, 4, 4, 4, 1, 3>;  // 16 x 128
using Depthwise = DepthwiseConfig<float>;
using DepthwiseDouble = DepthwiseConfig<double>;

enum class CorrelateKernel { kWideK, kNarrowK, kFewK, kDoubleK, kDepthwise, kDepthwiseDouble };

struct CorrelatePlan {
  CorrelateKernel kernel;
  int tile_k;
  Tiling tiling;
};

// What a correlation of one group reads and writes.
struct Channels {
  int in, out;
};

inline Channels correlate_channels(const Problem& problem, Operator op) {
  const int group_c = problem.C / problem.groups, group_k = problem.K / problem.groups;
  return op == Operator::kDgrad ? Channels{group_k, group_c} : Channels{group_c, group_k};
}

inline Axis row_axis(const Problem& problem) {
  return make_axis(problem.H, problem.P, problem.R, problem.stride_h, problem.pad_h, problem.dilation_h);
}

inline Axis column_axis(const Problem& problem) {
  return make_axis(problem.W, problem.Q, problem.S, problem.stride_w, problem.pad_w, problem.dilation_w);
}

template <typename Config>
inline void consider(CorrelateKernel kernel, const Tiling& tiling, int out_channels, CorrelatePlan& best) {
  if (tiling.cost < 0) return;
  Tiling scored = tiling;
  scored.cost *= static_cast<double>(ceil_div(out_channels, Config::TILE_K));
  if (best.tiling.cost < 0 || scored.cost < best.tiling.cost) best = {kernel, Config::TILE_K, scored};
}

inline CorrelatePlan plan_correlate(const Problem& problem, Operator op) {
  const Window rows = widest_window(op, row_axis(problem)), columns = widest_window(op, column_axis(problem));
  const auto [in_channels, out_channels] = correlate_channels(problem, op);
  const bool is_double = problem.dtype == DType::kFloat64;

  CorrelatePlan best{};
  best.tiling.cost = -1;
  // Few output channels that read one input channel each gain nothing from tiling over channels.
  constexpr int kMostOutputsPerInput = 4;
  if (problem.C == problem.groups && (op == Operator::kDgrad || out_channels <= kMostOutputsPerInput)) {
    if (is_double)
      consider<DepthwiseDouble>(CorrelateKernel::kDepthwiseDouble, depthwise_tiling<DepthwiseDouble>(rows, columns),
                                out_channels, best);
    else
      consider<Depthwise>(CorrelateKernel::kDepthwise, depthwise_tiling<Depthwise>(rows, columns), out_channels, best);
    if (best.tiling.cost >= 0) return best;  // else its window does not fit into shared memory
  }
  if (is_double) {
    consider<DoubleK>(CorrelateKernel::kDoubleK, correlate_tiling<DoubleK>(rows, columns, in_channels), out_channels,
                      best);
  } else {
    consider<WideK>(CorrelateKernel::kWideK, correlate_tiling<WideK>(rows, columns, in_channels), out_channels, best);
    consider<NarrowK>(CorrelateKernel::kNarrowK, correlate_tiling<NarrowK>(rows, columns, in_channels), out_channels,
                      best);
    consider<FewK>(CorrelateKernel::kFewK, correlate_tiling<FewK>(rows, columns, in_channels), out_channels, best);
  }
  return best;
}

using WeightGradTall = WeightGradConfig<float, 16, 2, 8>;    // 128 channels of y x 64 elements of (c, r, s)
using WeightGradWide = WeightGradConfig<float, 8, 4, 8>;     // 64 x 128
using WeightGradDouble = WeightGradConfig<double, 4, 2, 8>;  // 32 x 64

enum class WeightGradKernel { kTall, kWide, kDouble, kSliding, kDepthwise };

struct WeightGradPlan {
  WeightGradKernel kernel;
  int tiles_k, tiles_e, splits;
  int64_t stages_per_split, smem_bytes;
};

// The number of splits depends on the problem alone, never on the GPU: the same bits come out everywhere.
constexpr int64_t kWeightGradBlocks = 528;       // 2 waves of 2 blocks on 132 SMs
constexpr int64_t kDepthwiseWgradBlocks = 4224;  // 4 waves of 8
constexpr int64_t kMostPartialBytes = 256 << 20;

inline void split_range(int64_t stages, int64_t tiles, int64_t blocks, int64_t elements, int64_t least_stages,
                        int& splits, int64_t& stages_per_split) {
  const int64_t most = std::max<int64_t>(
      1,
      std::min(ceil_div(stages, least_stages), kMostPartialBytes / (elements * static_cast<int64_t>(sizeof(double)))));
  const int64_t wanted = std::min(most, ceil_div(blocks, tiles));
  stages_per_split = std::max<int64_t>(1, ceil_div(stages, wanted));
  splits = static_cast<int>(std::max<int64_t>(1, ceil_div(stages, stages_per_split)));
}

template <typename Config>
inline WeightGradPlan weight_grad_plan(WeightGradKernel kernel, const Problem& problem) {
  const int group_c = problem.C / problem.groups, group_k = problem.K / problem.groups;
  const int64_t e = static_cast<int64_t>(group_c) * problem.R * problem.S;
  WeightGradPlan plan{};
  plan.kernel = kernel;
  plan.tiles_k = static_cast<int>(ceil_div(group_k, Config::TILE_K));
  plan.tiles_e = static_cast<int>(ceil_div(e, Config::TILE_E));
  plan.smem_bytes = Config::TILE_E * sizeof(WeightGradTap) +
                    Config::TILE_PIXELS * (Config::DY_PITCH + Config::X_PITCH) * sizeof(typename Config::Acc);
  constexpr int64_t kLeastStages = 8;
  split_range(ceil_div(problem.N * problem.P * problem.Q, Config::TILE_PIXELS),
              static_cast<int64_t>(problem.groups) * plan.tiles_k * plan.tiles_e, kWeightGradBlocks, problem.K * e,
              kLeastStages, plan.splits, plan.stages_per_split);
  return plan;
}

inline WeightGradPlan plan_weight_grad(const Problem& problem) {
  const int group_c = problem.C / problem.groups;
  const int64_t e = static_cast<int64_t>(group_c) * problem.R * problem.S;
  if (group_c == 1) {
    const bool slides = problem.R == kSlidingTaps && problem.S == kSlidingTaps && problem.stride_h == 1 &&
                        problem.stride_w == 1 && problem.dilation_h == 1 && problem.dilation_w == 1;
    WeightGradPlan plan{};
    plan.kernel = slides ? WeightGradKernel::kSliding : WeightGradKernel::kDepthwise;
    plan.tiles_k = problem.K;
    plan.tiles_e = slides ? 1 : static_cast<int>(ceil_div(e, kDepthwiseTaps));
    plan.smem_bytes = kReduceThreads * sizeof(double);
    constexpr int64_t kLeastStages = 32;  // rows or strips: four a warp
    const int64_t strips = problem.N * ceil_div(problem.P, kStripRows) * ceil_div(problem.Q, 32);
    split_range(slides ? strips : problem.N * problem.P, static_cast<int64_t>(plan.tiles_k) * plan.tiles_e,
                kDepthwiseWgradBlocks, problem.K * e, kLeastStages, plan.splits, plan.stages_per_split);
    return plan;
  }
  if (problem.dtype == DType::kFloat64) return weight_grad_plan<WeightGradDouble>(WeightGradKernel::kDouble, problem);
  const WeightGradPlan tall = weight_grad_plan<WeightGradTall>(WeightGradKernel::kTall, problem);
  const WeightGradPlan wide = weight_grad_plan<WeightGradWide>(WeightGradKernel::kWide, problem);
  // Both tiles hold 8192 elements: fewer tiles waste less.
  return tall.tiles_k * static_cast<int64_t>(tall.tiles_e) <= wide.tiles_k * static_cast<int64_t>(wide.tiles_e) ? tall
                                                                                                                : wide;
}

struct BiasGradPlan {
  int splits;
  int64_t rows_per_split;
};

inline BiasGradPlan plan_bias_grad(const Problem& problem) {
  BiasGradPlan plan{};
  constexpr int64_t kLeastRows = 32;
  split_range(problem.N * problem.P, problem.K, kDepthwiseWgradBlocks, problem.K, kLeastRows, plan.splits,
              plan.rows_per_split);
  return plan;
}

// ---- What the binding calls ----

constexpr int64_t kMostBlocks = 0x7fffffff;

// The tiles of a correlation.
struct CorrelateGrid {
  int phases_h, phases_w, tiles_p, tiles_q, tiles_k;
  int64_t blocks_per_image;
};

inline CorrelateGrid correlate_grid(const Problem& problem, Operator op, const CorrelatePlan& plan) {
  const Axis rows = row_axis(problem), columns = column_axis(problem);
  const bool dgrad = op == Operator::kDgrad;
  CorrelateGrid grid{};
  grid.phases_h = dgrad ? std::min(rows.stride, rows.x_size) : 1;
  grid.phases_w = dgrad ? std::min(columns.stride, columns.x_size) : 1;
  grid.tiles_p = static_cast<int>(ceil_div(widest_window(op, rows).outputs, plan.tiling.tile_p));
  grid.tiles_q = static_cast<int>(ceil_div(widest_window(op, columns).outputs, plan.tiling.tile_q));
  grid.tiles_k = static_cast<int>(ceil_div(correlate_channels(problem, op).out, plan.tile_k));
  grid.blocks_per_image =
      static_cast<int64_t>(grid.phases_h) * grid.phases_w * grid.tiles_p * grid.tiles_q * grid.tiles_k * problem.groups;
  return grid;
}

inline const char* refusal(const Problem& problem, Operator op) {
  // Positions and taps are 32-bit numbers in the kernels, with room for a tile beyond the image.
  constexpr int64_t kMostPositions = int64_t{1} << 28;
  const int64_t padded_h = problem.H + 2 * static_cast<int64_t>(problem.pad_h);
  const int64_t padded_w = problem.W + 2 * static_cast<int64_t>(problem.pad_w);
  if (padded_h >= kMostPositions || padded_w >= kMostPositions) return "a padded image side of 2^28 pixels or more";
  if (static_cast<int64_t>(problem.R) * problem.S >= kMostPositions) return "a filter of 2^28 taps or more";
  // Only a gradient's phases, one for each step of a stride, can make that many tiles.
  constexpr int64_t kFewPhases = 1 << 12;
  if (op == Operator::kDgrad && static_cast<int64_t>(problem.stride_h) * problem.stride_w > kFewPhases &&
      correlate_grid(problem, op, plan_correlate(problem, op)).blocks_per_image > kMostBlocks)
    return "a stride so large that an image's gradient falls into 2^31 tiles or more";
  return nullptr;
}

// Whether points takes it, for tensors at multiples of 16 bytes.
inline bool takes_points(const Problem& problem, Operator op) {
  const auto [in_channels, out_channels] = correlate_channels(problem, op);
  const int64_t (&in)[4] = op == Operator::kDgrad ? problem.y_stride : problem.x_stride;
  const int64_t (&out)[4] = op == Operator::kDgrad ? problem.x_stride : problem.y_stride;
  const int64_t pixels = static_cast<int64_t>(problem.H) * problem.W;
  const auto dense = [&](const int64_t (&stride)[4]) {
    return stride[3] == 1 && (stride[2] == problem.W || problem.H == 1) && stride[0] % 4 == 0 && stride[1] % 4 == 0;
  };
  return (op == Operator::kFprop || op == Operator::kDgrad) && problem.dtype == DType::kFloat32 &&
         !uses_tf32(problem, op) && problem.groups == 1 && problem.R == 1 && problem.S == 1 && problem.H == problem.P &&
         problem.W == problem.Q && problem.pad_h == 0 && problem.pad_w == 0 && out_channels <= kMostPointChannels &&
         in_channels * kMostPointChannels * static_cast<int64_t>(sizeof(float)) <= kSharedBytes && pixels % 4 == 0 &&
         problem.N * pixels >= kLeastPoints && problem.N < 65536 && dense(in) && dense(out);
}

inline int64_t weight_elements(const Problem& problem) {
  return static_cast<int64_t>(problem.K) * (problem.C / problem.groups) * problem.R * problem.S;
}

// Of the packed weights, padded to whole tiles; 0 for the kernels that read w as it is.
inline int64_t packed_elements(const Problem& problem, Operator op, const CorrelatePlan& plan) {
  if (plan.kernel >= CorrelateKernel::kDepthwise) return 0;
  const Channels channels = correlate_channels(problem, op);
  return problem.groups * ceil_div(channels.out, plan.tile_k) * plan.tile_k * channels.in * problem.R * problem.S;
}

// Tiles of 128 pixels, in the shape that the list has.
inline CorrelatePlan listed_plan(const Problem& problem, Operator op, int tile_q) {
  CorrelatePlan plan{CorrelateKernel::kWideK, WideK::TILE_K, {}};
  plan.tiling.cost = -1;
  try_tiling<WideK>(widest_window(op, row_axis(problem)), widest_window(op, column_axis(problem)),
                    correlate_channels(problem, op).in, WideK::TILE_PIXELS / tile_q, tile_q, 1, true, plan.tiling);
  return plan;
}

inline int64_t workspace_bytes(const Problem& problem, Operator op, const Pointers&) {
  constexpr int64_t kSlot = sizeof(double);
  if (op == Operator::kWgrad) return plan_weight_grad(problem).splits * weight_elements(problem) * kSlot;
  if (op == Operator::kBgrad) return plan_bias_grad(problem).splits * static_cast<int64_t>(problem.K) * kSlot;
  const int64_t element_size = problem.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  return packed_elements(problem, op, plan_correlate(problem, op)) * element_size;
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

template <typename Config>
inline void run_correlate(const CorrelateParams& params, unsigned blocks, size_t smem_bytes, cudaStream_t stream) {
  correlate_kernel<Config><<<blocks, Config::THREADS, smem_bytes, stream>>>(params);
}

template <typename Config>
inline void run_depthwise(const CorrelateParams& params, unsigned blocks, size_t smem_bytes, cudaStream_t stream) {
  depthwise_kernel<Config><<<blocks, Config::THREADS, smem_bytes, stream>>>(params);
}

inline void run(CorrelateKernel kernel, const CorrelateParams& params, unsigned blocks, size_t smem_bytes,
                cudaStream_t stream) {
  switch (kernel) {
    case CorrelateKernel::kWideK:
      return run_correlate<WideK>(params, blocks, smem_bytes, stream);
    case CorrelateKernel::kNarrowK:
      return run_correlate<NarrowK>(params, blocks, smem_bytes, stream);
    case CorrelateKernel::kFewK:
      return run_correlate<FewK>(params, blocks, smem_bytes, stream);
    case CorrelateKernel::kDoubleK:
      return run_correlate<DoubleK>(params, blocks, smem_bytes, stream);
    case CorrelateKernel::kDepthwise:
      return run_depthwise<Depthwise>(params, blocks, smem_bytes, stream);
    case CorrelateKernel::kDepthwiseDouble:
      return run_depthwise<DepthwiseDouble>(params, blocks, smem_bytes, stream);
  }
}

inline cudaError_t pack_weights(const CorrelateParams& correlate, void* packed_ptr, int tile_k, int64_t elements,
                                const TileList& list, cudaStream_t stream) {
  PackParams params{};
  params.list = list;
  params.w_ptr = correlate.w_ptr;
  params.packed_ptr = packed_ptr;
  params.w_stride_group = correlate.w_stride_group;
  params.w_stride_out = correlate.w_stride_out;
  params.w_stride_in = correlate.w_stride_in;
  params.w_stride_r = correlate.w_stride_r;
  params.w_stride_s = correlate.w_stride_s;
  params.elements = elements;
  params.out_channels = correlate.out_channels;
  params.in_channels = correlate.in_channels;
  params.R = correlate.rows.taps;
  params.S = correlate.columns.taps;
  params.tile_k = tile_k;
  params.tiles_k = correlate.tiles_k;
  params.dtype = correlate.dtype;
  params.round_to_tf32 = correlate.round_to_tf32;
  const int64_t blocks = ceil_div(elements, kReduceThreads);
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  if (correlate.dtype == DType::kFloat64)
    pack_weights_kernel<double><<<static_cast<unsigned>(blocks), kReduceThreads, 0, stream>>>(params);
  else
    pack_weights_kernel<float><<<static_cast<unsigned>(blocks), kReduceThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

inline CorrelateParams correlate_params(Operator op, const Problem& problem, const Pointers& pointers,
                                        const CorrelatePlan& plan) {
  const CorrelateGrid grid = correlate_grid(problem, op, plan);
  const Channels channels = correlate_channels(problem, op);
  const bool dgrad = op == Operator::kDgrad;

  CorrelateParams params{};
  params.in_ptr = dgrad ? pointers.dy : pointers.x;
  params.w_ptr = pointers.w;
  params.bias_ptr = dgrad ? nullptr : pointers.bias;
  params.out_ptr = pointers.out;
  std::copy_n(dgrad ? problem.y_stride : problem.x_stride, 4, params.in_stride);
  std::copy_n(dgrad ? problem.x_stride : problem.y_stride, 4, params.out_stride);
  params.w_stride_group = problem.K / problem.groups * problem.w_stride[0];
  params.w_stride_out = problem.w_stride[dgrad ? 1 : 0];
  params.w_stride_in = problem.w_stride[dgrad ? 0 : 1];
  params.w_stride_r = problem.w_stride[2];
  params.w_stride_s = problem.w_stride[3];
  params.op = op;
  params.rows = row_axis(problem);
  params.columns = column_axis(problem);
  params.groups = problem.groups;
  params.in_channels = channels.in;
  params.out_channels = channels.out;
  params.phases_h = grid.phases_h;
  params.phases_w = grid.phases_w;
  params.tile_p = plan.tiling.tile_p;
  params.tile_q = plan.tiling.tile_q;
  params.tiles_p = grid.tiles_p;
  params.tiles_q = grid.tiles_q;
  params.tiles_k = grid.tiles_k;
  params.row_by_row = plan.tiling.row_by_row;
  params.column_by_column = plan.tiling.column_by_column;
  params.stage_channels = plan.tiling.stage_channels;
  params.dtype = problem.dtype;
  params.round_to_tf32 = uses_tf32(problem, op);
  return params;
}

inline cudaError_t launch_points(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  const bool dgrad = op == Operator::kDgrad;
  const auto [in_channels, out_channels] = correlate_channels(problem, op);
  const int64_t (&in)[4] = dgrad ? problem.y_stride : problem.x_stride;
  const int64_t (&out)[4] = dgrad ? problem.x_stride : problem.y_stride;
  PointsParams params{};
  params.in_ptr = static_cast<const float*>(dgrad ? pointers.dy : pointers.x);
  params.w_ptr = static_cast<const float*>(pointers.w);
  params.bias_ptr = static_cast<const float*>(dgrad ? nullptr : pointers.bias);
  params.out_ptr = static_cast<float*>(pointers.out);
  params.in_image = in[0];
  params.in_channel = in[1];
  params.out_image = out[0];
  params.out_channel = out[1];
  params.w_out = problem.w_stride[dgrad ? 1 : 0];
  params.w_in = problem.w_stride[dgrad ? 0 : 1];
  params.in_channels = in_channels;
  params.out_channels = out_channels;
  params.pixels = static_cast<int64_t>(problem.H) * problem.W;
  const dim3 blocks(static_cast<unsigned>(ceil_div(params.pixels / 4, kPointThreads)),
                    static_cast<unsigned>(problem.N));
  const int channels = out_channels <= 2 ? 2 : out_channels <= 4 ? 4 : 8;
  const size_t smem_bytes = static_cast<size_t>(in_channels) * channels * sizeof(float);
  if (channels == 2)
    points_kernel<2><<<blocks, kPointThreads, smem_bytes, stream>>>(params);
  else if (channels == 4)
    points_kernel<4><<<blocks, kPointThreads, smem_bytes, stream>>>(params);
  else
    points_kernel<8><<<blocks, kPointThreads, smem_bytes, stream>>>(params);
  return cudaGetLastError();
}

inline cudaError_t launch_correlate(Operator op, const Problem& problem, const Pointers& pointers,
                                    cudaStream_t stream) {
  const CorrelatePlan plan = plan_correlate(problem, op);
  const CorrelateGrid grid = correlate_grid(problem, op, plan);
  CorrelateParams params = correlate_params(op, problem, pointers, plan);
  if (const int64_t elements = packed_elements(problem, op, plan)) {
    const cudaError_t error = pack_weights(params, pointers.workspace, plan.tile_k, elements, TileList{}, stream);
    if (error != cudaSuccess) return error;
    params.w_ptr = pointers.workspace;
  }

  if (grid.blocks_per_image > kMostBlocks) return cudaErrorInvalidConfiguration;
  const int64_t images = kMostBlocks / grid.blocks_per_image;
  for (int64_t n = 0; n < problem.N; n += images) {
    const int64_t blocks = std::min(images, problem.N - n) * grid.blocks_per_image;
    CorrelateParams part = params;
    part.in_ptr = static_cast<const char*>(params.in_ptr) + n * params.in_stride[0] * element_bytes(problem.dtype);
    part.out_ptr = static_cast<char*>(params.out_ptr) + n * params.out_stride[0] * element_bytes(problem.dtype);
    run(plan.kernel, part, static_cast<unsigned>(blocks), plan.tiling.smem_bytes, stream);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

inline cudaError_t launch_listed(Operator op, const Problem& problem, const Pointers& pointers, const TileList& list,
                                 int sms, cudaStream_t stream) {
  const CorrelatePlan plan = listed_plan(problem, op, list.tile_q);
  if (plan.tiling.cost < 0) return cudaErrorInvalidConfiguration;
  CorrelateParams params = correlate_params(op, problem, pointers, plan);
  const cudaError_t error =
      pack_weights(params, pointers.workspace, plan.tile_k, packed_elements(problem, op, plan), list, stream);
  if (error != cudaSuccess) return error;
  params.w_ptr = pointers.workspace;
  correlate_listed_kernel<WideK><<<WideK::BLOCKS_PER_SM * sms, WideK::THREADS, plan.tiling.smem_bytes, stream>>>(
      params, list, static_cast<int>(problem.N));
  return cudaGetLastError();
}

inline cudaError_t add_partials(const Problem& problem, const Pointers& pointers, int splits, bool bias,
                                cudaStream_t stream) {
  AddPartialsParams params{};
  params.partial_ptr = static_cast<const double*>(pointers.workspace);
  params.out_ptr = pointers.out;
  params.elements = bias ? problem.K : weight_elements(problem);
  params.C = bias ? 1 : problem.C / problem.groups;
  params.R = bias ? 1 : problem.R;
  params.S = bias ? 1 : problem.S;
  if (bias)
    params.out_stride[0] = 1;
  else
    std::copy_n(problem.w_stride, 4, params.out_stride);
  params.splits = splits;
  params.dtype = problem.dtype;
  const unsigned blocks = static_cast<unsigned>(ceil_div(params.elements, kReduceThreads));
  add_partials_kernel<<<blocks, kReduceThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

inline cudaError_t launch_weight_grad(const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  const WeightGradPlan plan = plan_weight_grad(problem);
  WeightGradParams params{};
  params.x_ptr = pointers.x;
  params.dy_ptr = pointers.dy;
  params.partial_ptr = static_cast<double*>(pointers.workspace);
  std::copy_n(problem.x_stride, 4, params.x_stride);
  std::copy_n(problem.y_stride, 4, params.dy_stride);
  params.rows = row_axis(problem);
  params.columns = column_axis(problem);
  params.N = problem.N;
  params.groups = problem.groups;
  params.group_c = problem.C / problem.groups;
  params.group_k = problem.K / problem.groups;
  params.tiles_k = plan.tiles_k;
  params.tiles_e = plan.tiles_e;
  params.splits = plan.splits;
  params.stages_per_split = plan.stages_per_split;
  params.dtype = problem.dtype;
  params.round_to_tf32 = uses_tf32(problem, Operator::kWgrad);

  const bool depthwise = plan.kernel == WeightGradKernel::kDepthwise || plan.kernel == WeightGradKernel::kSliding;
  const int64_t all_blocks =
      static_cast<int64_t>(plan.tiles_k) * plan.tiles_e * plan.splits * (depthwise ? 1 : problem.groups);
  if (all_blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  const unsigned blocks = static_cast<unsigned>(all_blocks);
  const size_t smem_bytes = plan.smem_bytes;
  switch (plan.kernel) {
    case WeightGradKernel::kTall:
      weight_grad_kernel<WeightGradTall><<<blocks, WeightGradTall::THREADS, smem_bytes, stream>>>(params);
      break;
    case WeightGradKernel::kWide:
      weight_grad_kernel<WeightGradWide><<<blocks, WeightGradWide::THREADS, smem_bytes, stream>>>(params);
      break;
    case WeightGradKernel::kDouble:
      weight_grad_kernel<WeightGradDouble><<<blocks, WeightGradDouble::THREADS, smem_bytes, stream>>>(params);
      break;
    case WeightGradKernel::kSliding:
      if (problem.dtype == DType::kFloat64)
        sliding_wgrad_kernel<double><<<blocks, kReduceThreads, smem_bytes, stream>>>(params);
      else
        sliding_wgrad_kernel<float><<<blocks, kReduceThreads, smem_bytes, stream>>>(params);
      break;
    case WeightGradKernel::kDepthwise:
      if (problem.dtype == DType::kFloat64)
        depthwise_wgrad_kernel<double><<<blocks, kReduceThreads, smem_bytes, stream>>>(params);
      else
        depthwise_wgrad_kernel<float><<<blocks, kReduceThreads, smem_bytes, stream>>>(params);
      break;
  }
  const cudaError_t error = cudaGetLastError();
  return error != cudaSuccess ? error : add_partials(problem, pointers, plan.splits, false, stream);
}

inline cudaError_t launch_bias_grad(const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  const BiasGradPlan plan = plan_bias_grad(problem);
  BiasGradParams params{};
  params.dy_ptr = pointers.dy;
  params.partial_ptr = static_cast<double*>(pointers.workspace);
  std::copy_n(problem.y_stride, 4, params.dy_stride);
  params.N = problem.N;
  params.K = problem.K;
  params.P = problem.P;
  params.Q = problem.Q;
  params.splits = plan.splits;
  params.rows_per_split = plan.rows_per_split;
  params.dtype = problem.dtype;
  const int64_t blocks = static_cast<int64_t>(problem.K) * plan.splits;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  bias_grad_kernel<<<static_cast<unsigned>(blocks), kReduceThreads, kReduceThreads * sizeof(double), stream>>>(params);
  const cudaError_t error = cudaGetLastError();
  return error != cudaSuccess ? error : add_partials(problem, pointers, plan.splits, true, stream);
}

inline cudaError_t launch(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  if (op == Operator::kWgrad) return launch_weight_grad(problem, pointers, stream);
  if (op == Operator::kBgrad) return launch_bias_grad(problem, pointers, stream);
  const void* const in_ptr = op == Operator::kDgrad ? pointers.dy : pointers.x;
  const bool aligned = (reinterpret_cast<uint64_t>(in_ptr) | reinterpret_cast<uint64_t>(pointers.out)) % 16 == 0;
  if (aligned && takes_points(problem, op)) return launch_points(op, problem, pointers, stream);
  return launch_correlate(op, problem, pointers, stream);
}

#endif  // launchers

inline void describe(const Problem& problem, Operator op, char* text, size_t text_size) {
  if (op == Operator::kBgrad) {
    snprintf(text, text_size, "bias_grad: %d splits", plan_bias_grad(problem).splits);
    return;
  }
  if (op == Operator::kWgrad) {
    static constexpr const char* kNames[] = {"weight_grad 128x64", "weight_grad 64x128", "weight_grad 32x64 double",
                                             "sliding_wgrad 3x3", "depthwise_wgrad"};
    const WeightGradPlan plan = plan_weight_grad(problem);
    snprintf(text, text_size, "%s: %d x %d tiles of dw, %d splits of the pixels", kNames[static_cast<int>(plan.kernel)],
             plan.tiles_k, plan.tiles_e, plan.splits);
    return;
  }
  if (takes_points(problem, op)) {
    snprintf(text, text_size, "points: all output channels of four pixels a thread");
    return;
  }
  static constexpr const char* kNames[] = {"correlate",        "correlate", "correlate",
                                           "correlate double", "depthwise", "depthwise double"};
  const CorrelatePlan plan = plan_correlate(problem, op);
  snprintf(text, text_size,
           "%s: tile of %d channels x %d x %d pixels, %d input channels a stage, %d bytes of shared memory",
           kNames[static_cast<int>(plan.kernel)], plan.tile_k, plan.tiling.tile_p, plan.tiling.tile_q,
           plan.tiling.stage_channels, static_cast<int>(plan.tiling.smem_bytes));
}

#endif  // host

}  // namespace direct

#if !defined(__CUDACC_RTC__)
bool direct_has_points(const Problem& problem, Operator op) { return direct::takes_points(problem, op); }

int64_t listed_workspace_bytes(const Problem& problem, Operator op) {
  const direct::CorrelatePlan plan{direct::CorrelateKernel::kWideK, direct::WideK::TILE_K, {}};
  return direct::packed_elements(problem, op, plan) * static_cast<int64_t>(sizeof(float));
}
#endif

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)
#if !defined(__CUDACC_RTC__)
cudaError_t launch_listed(Operator op, const Problem& problem, const Pointers& pointers, const TileList& list, int sms,
                          cudaStream_t stream) {
  return direct::launch_listed(op, problem, pointers, list, sms, stream);
}

extern const Engine kDirectEngine{"direct", direct::refusal, direct::workspace_bytes, direct::launch, direct::describe};
#endif
#endif

}  // namespace modelnew
