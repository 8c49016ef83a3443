// Correlations by ordinary multiply-adds: y from x (fprop) and dx from dy (dgrad), as kernels for two units. direct.cu
// computes whole problems, listed.cu single tiles for another engine.
//
//   pack_weights       w -> the order, type and rounding in which correlate stages it
//   correlate          all tiles
//   correlate_listed   tiles on a list
//
// dgrad has no kernel of its own: dx is a correlation of dy with the flipped filter. With a stride, the rows of dx fall
// into `stride_h` phases; all rows of a phase meet the same filter rows, and the phase has stride 1 (Window).
//
// Bound by instruction issue. Measurements: docs/lab/direct.md.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cuda_runtime_api.h>

#include <algorithm>
#endif

#include "numerics.cuh"
#include "problem.cuh"

namespace modelnew {
namespace direct {

constexpr int kChunk = 64;

// Shared memory of a block: 48 KB, which every GPU grants without an attribute.
constexpr int kSharedBytes = 48 * 1024;

// Geometry, for host and device.

// One image axis of the convolution as the forward operator sees it.
struct Axis {
  int x_size, y_size, taps, stride, pad, dilation;
};

MODELNEW_HOST_DEVICE inline Axis make_axis(int x_size, int y_size, int taps, int stride, int pad, int dilation) {
  return {x_size, y_size, taps, taken_stride(stride, y_size), pad, dilation};
}

// One axis of a correlation: output position i reads input position i*stride + origin + t*tap_step for tap t, with
// weight tap first_tap + t*tap_stride, and is written to output_origin + i*output_step. Input positions outside
// [0, input_size) count as 0.
struct Window {
  int outputs, output_origin, output_step;
  int input_size, stride, origin;
  int taps, tap_step, first_tap, tap_stride;
};

MODELNEW_HOST_DEVICE inline Window fprop_window(const Axis& axis) {
  return {axis.y_size, 0, 1, axis.x_size, axis.stride, -axis.pad, axis.taps, axis.dilation, 0, 1};
}

// dx at position h = phase + i*stride takes dy at (h + pad - r*dilation) / stride where that division is exact. The
// taps r for which it is are first, first + every, first + 2*every ...; in falling order they read dy from left to
// right.
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

// The part of a window's input that a stage holds along one axis. With all taps at once it is the span of input that
// the tile touches; tap by tap it is just the positions that the tap reads. The latter also suits a single tap with a
// stride, because it loads nothing in between.
struct StageAxis {
  int taps;         // taps that a stage serves
  int size;         // staged positions
  int input_step;   // input positions between two staged ones
  int output_step;  // staged positions between neighbouring outputs
  int tap_step;     // staged positions between neighbouring taps
};

MODELNEW_HOST_DEVICE inline StageAxis stage_axis(const Window& window, int tile, bool tap_by_tap) {
  if (tap_by_tap || window.taps <= 1) return {1, tile, window.stride, 1, 0};
  const int64_t size =
      (tile - 1) * static_cast<int64_t>(window.stride) + (window.taps - 1) * static_cast<int64_t>(window.tap_step) + 1;
  // Larger sizes do not fit into shared memory either; the bound keeps the number within an int.
  const int bounded = static_cast<int>(size < kSharedBytes ? size : kSharedBytes);
  return {window.taps, bounded, 1, window.stride, window.tap_step};
}

// Parameters of correlate and depthwise. `in` and `out` are x and y for fprop, dy and dx for dgrad.
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

// Device code that the kernels share.

struct TileOrigin {
  int n, group, k, p, q, phase_h, phase_w;
};

// Tiles over the same part of the image are neighbours in launch order: they find x in L2.
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

// Threads of a block in kernels that stream memory once.
constexpr int kReduceThreads = 256;

// Converts a loaded value to an operand.
template <typename Acc, typename Storage>
__device__ inline Acc to_operand(Storage value, bool round) {
  const auto wide = widen(value);
  if constexpr (sizeof(Acc) == 8)
    return wide;
  else
    return round ? round_to_tf32(wide) : wide;
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

// A 16-byte piece of shared memory.
template <typename Acc>
struct alignas(16) Vector {
  static constexpr int SIZE = 16 / sizeof(Acc);
  Acc element[SIZE];
};

// Copies a window of the input into shared memory, [channel][row][column], zero outside the image. Lanes run along
// columns. Each thread steps through its positions without divisions and keeps BATCH loads in flight, which alone hide
// their latency (docs/lab/direct.md).
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

// correlate.
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

// Weights are packed once a call, in the order and rounding of stages, which then copy 16 bytes at a time.
struct PackParams {
  CorrelateParams of;
  void* packed_ptr;  // [group][tile of output channels][input channel][r][s][TILE_K]
  int64_t elements;
  int tile_k;
  TileList list;  // if given and empty, packing is skipped
};

// One thread per packed element. Output channels beyond the last are zeros.
template <typename Acc>
__global__ void __launch_bounds__(kReduceThreads) pack_weights_kernel(const PackParams params) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kReduceThreads + threadIdx.x;
  if (i >= params.elements || (params.list.all != nullptr && *params.list.all == 0 && *params.list.count == 0)) return;
  const CorrelateParams& of = params.of;
  int64_t rest = i / params.tile_k;
  const int s = static_cast<int>(rest % of.columns.taps);
  rest /= of.columns.taps;
  const int r = static_cast<int>(rest % of.rows.taps);
  rest /= of.rows.taps;
  const int c = static_cast<int>(rest % of.in_channels);
  rest /= of.in_channels;
  const int k = static_cast<int>(rest % of.tiles_k) * params.tile_k + static_cast<int>(i % params.tile_k);
  const int64_t group = rest / of.tiles_k;
  const int64_t offset =
      group * of.w_stride_group + k * of.w_stride_out + c * of.w_stride_in + r * of.w_stride_r + s * of.w_stride_s;
  with_storage<Acc>(of.dtype, [&](auto tag) {
    using Storage = decltype(tag);
    const Storage value = load_if(k < of.out_channels, static_cast<const Storage*>(of.w_ptr) + offset);
    static_cast<Acc*>(params.packed_ptr)[i] = to_operand<Acc>(value, of.round_to_tf32);
  });
}

// Copies the packed weights of one stage, 16 bytes per thread and step. packed_ptr points at the first input channel of
// the tile in this stage; a stage takes `taps` taps of the filter, in the order of the window.
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

  // Calls visit(j, p, q) for each pixel of this thread, as positions in the tile; beyond the tile p >= tile_p.
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
  // Offset of tap (0, 0) of each pixel in x_smem. A pixel beyond the tile reads pixel 0 and is not stored.
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
  int terms = 0;  // summed in acc
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
        __syncthreads();  // the previous stage has been read
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
            if (sizeof(Acc) == 4 && taps_s == 3 && stage_columns.tap_step == 1) {  // double would spill
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

// Computes the tiles on a list; each consists of several tiles of `params`, and blocks stride over them by gridDim.x.
// There is no stride, hence one phase. A short list leaves most of the GPU idle (docs/lab/direct.md).
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

#endif  // device

#if !defined(__CUDACC_RTC__)

// Choice of tiles: plain host code, the same for launch() and explain().

struct Tiling {
  int tile_p, tile_q, stage_channels;
  bool row_by_row, column_by_column;
  int64_t smem_bytes;
  double cost;  // issue slots of one warp lane over the whole image, for comparisons only
};

// The window of the phase with the most outputs and taps: tiles that hold it hold every phase.
inline Window widest_window(Operator op, const Axis& axis) {
  Window window = make_window(op, axis, 0);
  if (op == Operator::kDgrad) {
    const int divisor = greatest_common_divisor(axis.stride, axis.dilation);
    window.taps = (axis.taps - 1) / (axis.stride / divisor) + 1;
    window.tap_step = axis.dilation / divisor;
  }
  return window;
}

// Tries one tile shape and stages as many taps at once as shared memory allows. Returns false if none fits.
template <typename Config>
inline bool try_tiling(const Window& rows, const Window& columns, int in_channels, int tile_p, int tile_q,
                       double slots_per_tap, bool may_split_taps, Tiling& best) {
  using Acc = typename Config::Acc;
  // Estimates that rank tiles; they are not fitted to measurements.
  constexpr double kSlotsPerStaged = 16;  // position, bounds, load, round, store of one element
  constexpr double kSlotsPerStored = 8;   // the same for an output, mostly memory latency
  constexpr double kPartialSectors = 8;   // elements that an unaligned row wastes at its two ends
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

using WideK = CorrelateConfig<float, 8, 4, 8, 1, 2>;     // 64 channels x 128 pixels

enum class CorrelateKernel { kWideK, kNarrowK, kFewK, kDoubleK, kDepthwise, kDepthwiseDouble };

struct CorrelatePlan {
  CorrelateKernel kernel;
  int tile_k;
  Tiling tiling;
};

// Input and output channels of a correlation, in one group.
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

// Elements of the packed weights, padded to whole tiles; 0 for kernels that read w without packing.
inline int64_t packed_elements(const Problem& problem, Operator op, const CorrelatePlan& plan) {
  if (plan.kernel >= CorrelateKernel::kDepthwise) return 0;
  const Channels channels = correlate_channels(problem, op);
  return problem.groups * ceil_div(channels.out, plan.tile_k) * plan.tile_k * channels.in * problem.R * problem.S;
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

inline cudaError_t pack_weights(const CorrelateParams& correlate, void* packed_ptr, int tile_k, int64_t elements,
                                const TileList& list, cudaStream_t stream) {
  const PackParams params{correlate, packed_ptr, elements, tile_k, list};
  const int64_t blocks = ceil_div(elements, kReduceThreads);
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  if (correlate.dtype == DType::kFloat64)
    pack_weights_kernel<double><<<static_cast<unsigned>(blocks), kReduceThreads, 0, stream>>>(params);
  else
    pack_weights_kernel<float><<<static_cast<unsigned>(blocks), kReduceThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

#endif  // launcher

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

#endif  // host

}  // namespace direct
}  // namespace modelnew
