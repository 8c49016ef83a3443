// Direct engine: any convolution on any GPU, with ordinary multiply-adds. Deterministic: no atomics, sums in one order.
//
//   correlate      y from x (fprop) and dx from dy (dgrad), see correlate.cuh
//   depthwise      the same with one input channel for each output, through shared memory
//   points         the same for 1x1 filters to at most 8 channels of fp32: every pixel is read once, into registers
//   stem_dgrad     dx of few channels, see stem_dgrad.cuh
//   weight_grad    dw from x and dy
//   depthwise_wgrad   the same with one input channel for each output
//   add_partials   [split][element] doubles -> dw
//   bias_grad      db from dy, see bias_grad.cuh
//
// fp32, fp16 and bf16 tensors are staged in shared memory as fp32 (rounded to TF32 there where that contract holds) and
// multiplied by FFMA: products of TF32 or 16-bit operands are then exact. fp64 tensors use double throughout.
// Sums run in chunks of at most kChunk terms; the chunks are added with compensation, or in double: rounding errors
// grow with kChunk, not with the length of the sum. The storage type is a run-time switch around the staging loops: it
// costs one uniform branch a stage, and each kernel is compiled once for all types but double.
//
// Bound by instruction issue; where one input channel makes an output, by memory traffic. Measurements:
// docs/lab/direct.md.
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstdio>
#include <type_traits>

#include "device.cuh"
#include "engines.cuh"
#endif

#include "bias_grad.cuh"
#include "block_sum.cuh"
#include "correlate.cuh"
#include "stem_dgrad.cuh"

namespace modelnew {
namespace direct {

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// ---- correlate: correlate.cuh ----

template <typename Config>
__global__ void __launch_bounds__(Config::THREADS, Config::BLOCKS_PER_SM)
    correlate_kernel(const CorrelateParams params) {
  correlate_tile<Config>(params, locate_tile(params, blockIdx.x, Config::TILE_K));
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
// before it has been used (docs/lab/direct.md).
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

template <typename Acc, typename Storage>
__device__ inline void add_products(double (&sum)[kDepthwiseTaps], const WeightGradParams& params, int k, int first_tap,
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
                    [&](auto tag) { add_products<Acc, decltype(tag)>(sum, params, k, first_tap, first_row, end_row); });
  const int all_taps = params.rows.taps * params.columns.taps;
  double* slots =
      params.partial_ptr + (static_cast<int64_t>(split) * params.groups * params.group_k + k) * all_taps + first_tap;
  double* const smem = reinterpret_cast<double*>(modelnew_smem);
  add_rows<kReduceThreads>(sum, threadIdx.x, 0, kReduceThreads, 1, smem);
  const int i = threadIdx.x;
  if (i < kDepthwiseTaps && first_tap + i < all_taps) slots[i] = smem[i * kReduceThreads];
}

// ---- add_partials ----

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

using NarrowK = CorrelateConfig<float, 8, 4, 2, 4, 2>;   // 16 x 512
using FewK = CorrelateConfig<float, 4, 4, 1, 4, 4>;      // 4 x 512
using DoubleK = CorrelateConfig<double, 4, 4, 4, 1, 3>;  // 16 x 128

// Chooses the tile of correlate among powers of two and the whole width, with at most TILE_PIXELS pixels.
template <typename Config>
inline Tiling correlate_tiling(const Window& rows, const Window& columns, int in_channels) {
  constexpr int FRAGMENT = Config::THREAD_K * Config::THREAD_PIXELS;
  // Per tap and thread: multiply-adds, two slots a pixel (address, load), loads of weights, the loop.
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

using Depthwise = DepthwiseConfig<float>;
using DepthwiseDouble = DepthwiseConfig<double>;

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

enum class WeightGradKernel { kTall, kWide, kDouble, kDepthwise };

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
    WeightGradPlan plan{};
    plan.kernel = WeightGradKernel::kDepthwise;
    plan.tiles_k = problem.K;
    plan.tiles_e = static_cast<int>(ceil_div(e, kDepthwiseTaps));
    plan.smem_bytes = kDepthwiseTaps * kReduceThreads * sizeof(double);
    constexpr int64_t kLeastStages = 32;  // rows: four a warp
    split_range(problem.N * problem.P, static_cast<int64_t>(plan.tiles_k) * plan.tiles_e, kDepthwiseWgradBlocks,
                problem.K * e, kLeastStages, plan.splits, plan.stages_per_split);
    return plan;
  }
  if (problem.dtype == DType::kFloat64) return weight_grad_plan<WeightGradDouble>(WeightGradKernel::kDouble, problem);
  const WeightGradPlan tall = weight_grad_plan<WeightGradTall>(WeightGradKernel::kTall, problem);
  const WeightGradPlan wide = weight_grad_plan<WeightGradWide>(WeightGradKernel::kWide, problem);
  // Both tiles hold 8192 elements: fewer tiles waste less.
  return tall.tiles_k * static_cast<int64_t>(tall.tiles_e) <= wide.tiles_k * static_cast<int64_t>(wide.tiles_e) ? tall
                                                                                                                : wide;
}

// ---- What the binding calls ----

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

inline int64_t workspace_bytes(const Problem& problem, Operator op, const Pointers& pointers) {
  constexpr int64_t kSlot = sizeof(double);
  if (op == Operator::kWgrad) return plan_weight_grad(problem).splits * weight_elements(problem) * kSlot;
  if (op == Operator::kBgrad) return bias_grad::workspace_bytes(problem, pointers.dy);
  if (stem_dgrad::takes(problem, op)) return 0;
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

inline cudaError_t add_partials(const Problem& problem, const Pointers& pointers, int splits, cudaStream_t stream) {
  AddPartialsParams params{};
  params.partial_ptr = static_cast<const double*>(pointers.workspace);
  params.out_ptr = pointers.out;
  params.elements = weight_elements(problem);
  params.C = problem.C / problem.groups;
  params.R = problem.R;
  params.S = problem.S;
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

  const bool depthwise = plan.kernel == WeightGradKernel::kDepthwise;
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
    case WeightGradKernel::kDepthwise:
      if (problem.dtype == DType::kFloat64)
        depthwise_wgrad_kernel<double><<<blocks, kReduceThreads, smem_bytes, stream>>>(params);
      else
        depthwise_wgrad_kernel<float><<<blocks, kReduceThreads, smem_bytes, stream>>>(params);
      break;
  }
  const cudaError_t error = cudaGetLastError();
  return error != cudaSuccess ? error : add_partials(problem, pointers, plan.splits, stream);
}

inline cudaError_t launch(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  if (op == Operator::kWgrad) return launch_weight_grad(problem, pointers, stream);
  if (op == Operator::kBgrad) return bias_grad::launch(problem, pointers, stream);
  const void* const in_ptr = op == Operator::kDgrad ? pointers.dy : pointers.x;
  const bool aligned = (reinterpret_cast<uint64_t>(in_ptr) | reinterpret_cast<uint64_t>(pointers.out)) % 16 == 0;
  if (aligned && takes_points(problem, op)) return launch_points(op, problem, pointers, stream);
  if (stem_dgrad::takes(problem, op)) return stem_dgrad::launch(problem, pointers, stream);
  return launch_correlate(op, problem, pointers, stream);
}

#endif  // launchers

inline void describe(const Problem& problem, Operator op, char* text, size_t text_size) {
  if (op == Operator::kBgrad) {
    const bias_grad::Plan plan = bias_grad::make_plan(problem, nullptr);
    snprintf(text, text_size, "bias_grad by %s: %d splits", plan.by_pixels ? "pixels" : "planes", plan.params.splits);
    return;
  }
  if (op == Operator::kWgrad) {
    static constexpr const char* kNames[] = {"weight_grad 128x64", "weight_grad 64x128", "weight_grad 32x64 double",
                                             "depthwise_wgrad"};
    const WeightGradPlan plan = plan_weight_grad(problem);
    snprintf(text, text_size, "%s: %d x %d tiles of dw, %d splits of the pixels", kNames[static_cast<int>(plan.kernel)],
             plan.tiles_k, plan.tiles_e, plan.splits);
    return;
  }
  if (takes_points(problem, op)) {
    snprintf(text, text_size, "points: all output channels of four pixels a thread");
    return;
  }
  if (stem_dgrad::takes(problem, op)) {
    snprintf(text, text_size, "stem_dgrad: all channels of 8 or 16 pixels a thread");
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
bool direct_has_stem_dgrad(const Problem& problem, Operator op) { return direct::stem_dgrad::takes(problem, op); }
#endif

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)
#if !defined(__CUDACC_RTC__)
extern const Engine kDirectEngine{"direct", direct::refusal, direct::workspace_bytes, direct::launch, direct::describe};
#endif
#endif

}  // namespace modelnew
