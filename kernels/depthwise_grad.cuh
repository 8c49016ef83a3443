// Gradients of depthwise convolutions: dw, and dx where a stride or several outputs of a channel keep it from being a
// forward convolution. fp32, fp16 and bf16, with sums in fp32 whose chunks are added with compensation.
//
//   wgrad_kernel      dw of a block's channels over a share of the pixels -> [split][k][tap] doubles
//   finish_kernel     the splits' sum, in order -> dw
//   dgrad_kernel      dx at a stride of 2: filters of 3x3, 5x5 and 7x7
//   dgrad_any_kernel  dx of any other
//
// A thread owns a channel and walks down a band of rows of some columns, its operands in registers. Threads side by
// side own neighbouring channels (channels_last) or columns (other memory), so that loads are whole sectors; what two
// threads read comes from the L1 cache the second time. Measurements: docs/lab/depthwise.md.
//
// Padding is left out as in the forward: a product of an Inf and the zero of padding would be NaN. The fast loops
// multiply such zeros. A thread of wgrad_kernel that finds NaN or Inf in its sums, or one of dgrad_kernel that finds it
// in its weights, takes all products anew, one by one.
#pragma once

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

namespace modelnew {
namespace depthwise_grad {

constexpr int kThreads = 128;
constexpr int kChunk = 64;
constexpr int kSegment = 8;                            // taps of a row of a filter that is not compiled as a whole
constexpr int kSharedBytes = kThreads * kSegment * 8;  // for add_rows, of a row of a filter

// One image axis: output i reads input i*stride + t*dilation - pad for tap t.
struct Axis {
  int inputs, outputs, taps, stride, dilation, pad;
};

// How channels and pixels are divided among blocks. An item is a thread's columns in a band of rows. Items are
// numbered: columns first, then bands of rows, phases of rows, images. Phases: with a dilation of d, every d-th row and
// column are a convolution of their own, without a dilation.
struct Share {
  bool by_channels;   // threads side by side own neighbouring channels
  int lanes, items;   // channels of a block, and threads for each
  int chunks, parts;  // of all channels, of a filter
  int splits;         // of the items
  int phases_h, phases_w, bands, band_rows, groups;
  unsigned all_items;  // of a channel
  int64_t blocks;
  Divisor by_columns, by_phases_w, by_bands, by_phases_h;  // columns: items of a band
};

struct Params {
  const void *x_ptr, *w_ptr, *dy_ptr;
  void* out_ptr;                                   // dw or dx
  double* partial_ptr;                             // [split][k][r][s]
  int64_t x_stride[4], w_stride[4], dy_stride[4];  // of dx in dgrad, of dw in wgrad
  Axis rows, columns;
  int64_t images;
  int K, multiplier;
  bool pairs;  // dgrad_kernel stores two columns at once
  Share share;
};

// A filter of a kernel template: `columns` of a thread, and the rows and columns of x that it holds in a step, which it
// loads one by one, or two or four at once.
struct Shape {
  int taps_r, taps_s, stride, columns, at_once;
  int channels, bytes;  // of a thread; of an element

  MODELNEW_HOST_DEVICE constexpr int step_rows() const { return stride == 2 ? 2 : 1; }
  MODELNEW_HOST_DEVICE constexpr int open() const { return (taps_r + step_rows() - 1) / step_rows(); }
  // Columns that are loaded in front of the window, whose padding is half a filter.
  MODELNEW_HOST_DEVICE constexpr int lead() const { return (at_once - taps_s / 2 % at_once) % at_once; }
  MODELNEW_HOST_DEVICE constexpr int loads() const {
    const int window = stride == 0 ? columns * taps_s : (columns - 1) * stride + taps_s;
    return (lead() + window + at_once - 1) / at_once;
  }
  MODELNEW_HOST_DEVICE constexpr int smem_bytes() const {
    return kSharedBytes + kThreads * taps_r * taps_s * channels * 4;
  }
  // Bytes of a step's operands, and steps whose operands are under way.
  MODELNEW_HOST_DEVICE constexpr int step_bytes() const {
    return (step_rows() * loads() * at_once + columns) * channels * bytes;
  }
  MODELNEW_HOST_DEVICE constexpr int ahead() const {
    return taps_r != 3 || step_bytes() > 56 ? 1 : stride == 2 || columns * channels > 4 ? 2 : 3;
  }
  // Blocks that run on an SM at once, as registers allow.
  MODELNEW_HOST_DEVICE constexpr int blocks_per_sm() const {
    const int outputs = columns * channels;
    if (taps_r == 7) return outputs > 1 ? 3 : 4;
    if (taps_r == 5) return 4;
    return outputs == 1 ? 6 : outputs > 4 || stride == 2 || channels * bytes == 8 ? 4 : 5;
  }
};

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

MODELNEW_HOST_DEVICE inline int least(int a, int b) { return a < b ? a : b; }
MODELNEW_HOST_DEVICE inline int most(int a, int b) { return a < b ? b : a; }

// The place `count` steps of so many bytes away. Offsets of 32 bits without a sign take two instructions less.
template <typename Storage>
__device__ inline const Storage* moved(const Storage* place, int bytes, int count) {
  return reinterpret_cast<const Storage*>(reinterpret_cast<const char*>(place) +
                                          static_cast<unsigned>(bytes) * static_cast<unsigned>(count));
}

// Neighbours in memory, moved at once.
template <typename Storage, int SIZE>
struct alignas(SIZE * sizeof(Storage)) Pack {
  Storage element[SIZE];
};

// Neighbours in memory as they were loaded. Elements of 16 bits in registers of their own would be waited for at once.
template <typename Storage, int SIZE>
struct Raw {
  uint32_t word[(SIZE * sizeof(Storage) + 3) / 4];

  // Zeros, if `exist` is false.
  __device__ void load(const Storage* from, bool exist) {
    if constexpr (SIZE * sizeof(Storage) == 2)
      hopper::load_2(from, exist, word[0]);
    else
      hopper::load_words(from, exist, word);
  }
  __device__ float operator[](int i) const {
    if constexpr (sizeof(Storage) == 4)
      return bits_float(word[i]);
    else
      return widen(Storage{static_cast<uint16_t>(word[i / 2] >> i % 2 * 16)});
  }
};

// A thread of a block: its channel, counted from the block's first one, and its number among those of that channel.
struct Worker {
  int lane, item;
};

__device__ inline Worker make_worker(const Share& share) {
  const int thread = threadIdx.x;
  return share.by_channels ? Worker{thread % share.lanes, thread / share.lanes}
                           : Worker{thread / share.items, thread % share.items};
}

// Where an item lies in y, or in dx in pairs of rows: its first row and column, and its rows.
struct Place {
  int64_t n;
  int row, rows, column;
};

__device__ inline Place locate(const Share& share, unsigned item, int all_rows, int columns) {
  const auto rest_of = [](int& number, const Divisor& by) {  // leaves the quotient
    const int all = number;
    number = quotient(all, by);
    return all - number * static_cast<int>(by.divisor);
  };
  int rest = static_cast<int>(item), group = rest_of(rest, share.by_columns);
  const int phase_w = rest_of(group, share.by_phases_w), band = rest_of(rest, share.by_bands);
  const int phase_h = rest_of(rest, share.by_phases_h);
  Place at;
  at.n = rest;
  at.column = phase_w + group * columns * share.phases_w;
  at.row = phase_h + band * share.band_rows * share.phases_h;
  at.rows = least(share.band_rows, quotient(all_rows - at.row + share.phases_h - 1, share.by_phases_h));
  return at;
}

// ---- wgrad_kernel ----
//
// Each row of x, as it comes, is multiplied by the rows of dy that it meets, OPEN of them in registers. With 3 taps:
//
//      row i of x   dw[0] += dy[i] * x     dw[1] += dy[i - 1] * x     dw[2] += dy[i - 2] * x
//
// With a stride of 2, a step takes two rows of x and one of dy. A filter that is not compiled as a whole is divided
// among blocks, kSegment taps of a row each (OPEN is 1), and a STRIDE of 0 stands for any.
template <int TAPS_R_, int TAPS_S_, int STRIDE_, int COLUMNS_, int AT_ONCE_, int CHANNELS_, typename Storage_>
struct WgradConfig {
  using Storage = Storage_;
  static constexpr Shape kShape{TAPS_R_, TAPS_S_, STRIDE_, COLUMNS_, AT_ONCE_, CHANNELS_, sizeof(Storage_)};
  static_assert(kShape.loads() <= 32, "a bit for each load");
  static_assert(COLUMNS_ % AT_ONCE_ == 0, "whole loads of dy");
  static_assert(CHANNELS_ == 1 || AT_ONCE_ == 1, "one kind of vectors");
};

// The sum of all products of tap (r, s) that exist, over every next_item-th item.
template <typename Storage>
__device__ inline double exact_sum(const Params& params, const Storage* x_plane, const Storage* dy_plane, int r, int s,
                                   int own_columns, unsigned first_item, unsigned next_item) {
  const Share& share = params.share;
  const Axis &rows = params.rows, &columns = params.columns;
  double sum = 0;
#pragma unroll 1
  for (unsigned item = first_item; item < share.all_items; item += next_item) {
    const Place at = locate(share, item, rows.outputs, own_columns);
#pragma unroll 1
    for (int i = 0; i < at.rows; ++i) {
      const int p = at.row + i * share.phases_h, h = p * rows.stride - rows.pad + r * rows.dilation;
      if (!is_within(h, rows.inputs)) continue;
#pragma unroll 1
      for (int j = 0; j < own_columns; ++j) {
        const int q = at.column + j * share.phases_w, w = q * columns.stride - columns.pad + s * columns.dilation;
        if (q >= columns.outputs || !is_within(w, columns.inputs)) continue;
        sum += static_cast<double>(
                   widen(dy_plane[at.n * params.dy_stride[0] + p * params.dy_stride[2] + q * params.dy_stride[3]])) *
               widen(x_plane[at.n * params.x_stride[0] + h * params.x_stride[2] + w * params.x_stride[3]]);
      }
    }
  }
  return sum;
}

template <typename Config>
__global__ void __launch_bounds__(kThreads, Config::kShape.blocks_per_sm()) wgrad_kernel(const Params params) {
  using Storage = typename Config::Storage;
  constexpr Shape kShape = Config::kShape;
  constexpr int TAPS_R = kShape.taps_r, TAPS_S = kShape.taps_s, STRIDE = kShape.stride, COLUMNS = kShape.columns;
  constexpr int STEP_ROWS = kShape.step_rows(), OPEN = kShape.open(), LEAD = kShape.lead(), LOADS = kShape.loads();
  constexpr int AT_ONCE = kShape.at_once, CHANNELS = kShape.channels, SUMS = TAPS_S * CHANNELS;
  constexpr int WIDE = AT_ONCE * CHANNELS;  // elements of a load
  constexpr int AHEAD = kShape.ahead();
  constexpr bool ROTATES = AHEAD % OPEN == 0;  // rows of dy keep their registers
  using Loaded = Raw<Storage, WIDE>;
  extern __shared__ __align__(16) unsigned char modelnew_smem[];

  const Share& share = params.share;
  const Axis &rows = params.rows, &columns = params.columns;
  const Worker worker = make_worker(share);
  unsigned rest = blockIdx.x;
  const unsigned split = rest % share.splits;
  rest /= share.splits;
  const int part = static_cast<int>(rest % share.parts), chunk = static_cast<int>(rest / share.parts);
  const int segments = (columns.taps + TAPS_S - 1) / TAPS_S;  // of a row
  const int first_r = part / segments, first_s = part % segments * TAPS_S;
  const int k = (chunk * share.lanes + worker.lane) * CHANNELS;
  const bool exists = (worker.lane < share.lanes) & (worker.item < share.items) & (k < params.K);
  const Storage* const x_plane = static_cast<const Storage*>(params.x_ptr) + k / params.multiplier * params.x_stride[1];
  const Storage* const dy_plane = static_cast<const Storage*>(params.dy_ptr) + k * params.dy_stride[1];

  // Steps between what a thread reads: rows of x, its columns of x and dy.
  const int row_step = TAPS_R == 1 ? rows.stride : rows.dilation;
  const int64_t x_down = row_step * params.x_stride[2], dy_down = share.phases_h * params.dy_stride[2];
  constexpr int BYTES = sizeof(Storage);
  const int dy_right = hopper::in_register(AT_ONCE * share.phases_w * static_cast<int>(params.dy_stride[3]) * BYTES);
  const int x_right = static_cast<int>(params.x_stride[3]) * BYTES,
            load_right = hopper::in_register(AT_ONCE * columns.dilation * x_right);
  const int output_right = hopper::in_register(columns.stride * x_right);
  // The first column of load i, counted from the window's first one.
  const auto column_of = [&](int i) {
    return STRIDE == 0 ? i / TAPS_S * columns.stride + i % TAPS_S * columns.dilation : i * AT_ONCE * columns.dilation;
  };

  float acc[TAPS_R][SUMS] = {};                                                                    // [r][s, channel]
  float* const total_smem = reinterpret_cast<float*>(modelnew_smem + kSharedBytes) + threadIdx.x;  // [tap][thread]
#pragma unroll
  for (int i = 0; i < TAPS_R * SUMS; ++i) total_smem[i * kThreads] = 0;
  const auto end_chunk = [&] {
#pragma unroll
    for (int r = 0; r < TAPS_R; ++r) {
#pragma unroll
      for (int s = 0; s < SUMS; ++s) add_chunk(acc[r][s], total_smem[(r * SUMS + s) * kThreads]);
      asm volatile("" ::: "memory");  // a row at a time: all totals at once would not fit into registers
    }
  };
  hopper::wait_for_prerequisites();
  hopper::launch_dependents();
  int terms = 0;
  const unsigned first_item = exists ? split * share.items + worker.item : share.all_items;
  const unsigned next_item = share.splits * share.items;
#pragma unroll 1
  for (unsigned item = first_item; item < share.all_items; item += next_item) {
    const Place at = locate(share, item, rows.outputs, COLUMNS);
    const int first_h = at.row * rows.stride - rows.pad + first_r * rows.dilation;
    const int first_w = at.column * columns.stride - columns.pad + first_s * columns.dilation - LEAD;
    unsigned x_inside = 0, dy_inside = 0;  // a bit for each load
#pragma unroll
    for (int i = 0; i < LOADS; ++i) x_inside |= is_within(first_w + column_of(i), columns.inputs) ? 1u << i : 0u;
#pragma unroll
    for (int j = 0; j < COLUMNS; j += AT_ONCE)
      dy_inside |= at.column + j * share.phases_w < columns.outputs ? 1u << j / AT_ONCE : 0u;

    // The steps that meet the image.
    const int above = first_h < 0 ? (row_step - 1 - first_h) / row_step : 0;  // rows
    const int all = first_h < rows.inputs ? (rows.inputs - first_h + row_step - 1) / row_step : 0;
    int step = above / STEP_ROWS;
    const int behind = least(at.rows + OPEN - 1, (all + STEP_ROWS - 1) / STEP_ROWS);
    int h = first_h + step * STEP_ROWS * row_step;
    const Storage* x_row =
        x_plane + (at.n * params.x_stride[0] + h * params.x_stride[2] + first_w * params.x_stride[3]);
    const Storage* dy_row = dy_plane + (at.n * params.dy_stride[0] +
                                        (at.row + static_cast<int64_t>(step) * share.phases_h) * params.dy_stride[2] +
                                        at.column * params.dy_stride[3]);
    const auto load_dy = [&](int row, const Storage* source, Loaded(&to)[COLUMNS / AT_ONCE]) {
#pragma unroll
      for (int i = 0; i < COLUMNS / AT_ONCE; ++i)
        to[i].load(moved(source, dy_right, i), is_within(row, at.rows) & (dy_inside >> i & 1));
    };
    // Loads the rows of a step, the next one of those that are loaded. Columns outside the image stay zeros.
    Loaded x_ahead[AHEAD][STEP_ROWS][LOADS], dy_ahead[AHEAD][COLUMNS / AT_ONCE];
    const auto load = [&](int of_step, Loaded(&x_to)[STEP_ROWS][LOADS], Loaded(&dy_to)[COLUMNS / AT_ONCE]) {
#pragma unroll
      for (int a = 0; a < STEP_ROWS; ++a, h += row_step, x_row += x_down) {
        const bool exists = (of_step < behind) & (STEP_ROWS == 1 || is_within(h, rows.inputs));
        const unsigned inside = exists ? x_inside : 0;
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
          x_to[a][i].load(STRIDE == 0 ? moved(moved(x_row, output_right, i / TAPS_S), load_right, i % TAPS_S)
                                      : moved(x_row, load_right, i),
                          inside >> i & 1);
      }
      load_dy(of_step, dy_row, dy_to);
      dy_row += dy_down;
    };
    float dy_frag[OPEN][COLUMNS * CHANNELS];  // rows step, step - 1 ...
    {
      Loaded dy_before[OPEN][COLUMNS / AT_ONCE];
#pragma unroll
      for (int m = 1; m < OPEN; ++m) load_dy(step - m, dy_row - m * dy_down, dy_before[m]);
#pragma unroll
      for (int u = 0; u < AHEAD; ++u) load(step + u, x_ahead[u], dy_ahead[u]);
#pragma unroll
      for (int m = 1; m < OPEN; ++m)
#pragma unroll
        for (int j = 0; j < COLUMNS * CHANNELS; ++j)
          dy_frag[ROTATES ? OPEN - m : m - 1][j] = dy_before[m][j / WIDE][j % WIDE];
    }
#pragma unroll 1
    while (step < behind) {
#pragma unroll
      for (int u = 0; u < AHEAD; ++u) {
        if (u > 0 && step >= behind) break;
        float x_frag[STEP_ROWS][LOADS * WIDE];
        const auto place = [&](int m) { return ROTATES ? (u - m + OPEN) % OPEN : m; };  // of row step - m
#pragma unroll
        for (int m = ROTATES ? 0 : OPEN - 1; m > 0; --m)
#pragma unroll
          for (int j = 0; j < COLUMNS * CHANNELS; ++j) dy_frag[m][j] = dy_frag[m - 1][j];
#pragma unroll
        for (int j = 0; j < COLUMNS * CHANNELS; ++j) dy_frag[place(0)][j] = dy_ahead[u][j / WIDE][j % WIDE];
#pragma unroll
        for (int a = 0; a < STEP_ROWS; ++a)
#pragma unroll
          for (int j = 0; j < LOADS * WIDE; ++j) x_frag[a][j] = x_ahead[u][a][j / WIDE][j % WIDE];
        if (AHEAD == 1) load(step + AHEAD, x_ahead[u], dy_ahead[u]);
#pragma unroll
        for (int a = 0; a < STEP_ROWS; ++a)
#pragma unroll
          for (int m = 0; m < OPEN; ++m)
            if (a + m * STEP_ROWS < TAPS_R)
#pragma unroll
              for (int s = 0; s < SUMS; ++s)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
                  const int tap = s / CHANNELS, column = STRIDE == 0 ? j * TAPS_S + tap : LEAD + j * STRIDE + tap;
                  acc[a + m * STEP_ROWS < TAPS_R ? a + m * STEP_ROWS : 0][s] +=
                      dy_frag[place(m)][j * CHANNELS + s % CHANNELS] * x_frag[a][column * CHANNELS + s % CHANNELS];
                }
        if (AHEAD > 1) load(step + AHEAD, x_ahead[u], dy_ahead[u]);
        ++step;
        terms += COLUMNS;
        if (terms + COLUMNS > kChunk) {
          end_chunk();
          terms = 0;
        }
      }
    }
  }

  float finite = 0;  // or NaN, if a sum is not
#pragma unroll
  for (int r = 0; r < TAPS_R; ++r)
#pragma unroll
    for (int s = 0; s < SUMS; ++s) finite += (total_smem[(r * SUMS + s) * kThreads] + acc[r][s]) * 0.f;
  if (finite != 0) {
#pragma unroll
    for (int r = 0; r < TAPS_R; ++r)
#pragma unroll
      for (int s = 0; s < SUMS; ++s) acc[r][s] = 0;
#pragma unroll 1
    for (int i = 0; i < TAPS_R * SUMS; ++i)
      total_smem[i * kThreads] = static_cast<float>(
          exact_sum<Storage>(params, x_plane + i % CHANNELS, dy_plane + i % CHANNELS, first_r + i / SUMS,
                             first_s + i % SUMS / CHANNELS, COLUMNS, first_item, next_item));
  }

  double* const smem = reinterpret_cast<double*>(modelnew_smem);
  const int filter = rows.taps * columns.taps, first_k = chunk * share.lanes * CHANNELS;
  const int lanes = least(share.lanes, (params.K - first_k) / CHANNELS);
  double* const partial_ptr = params.partial_ptr + (static_cast<int64_t>(split) * params.K + first_k) * filter;
#pragma unroll
  for (int i = 0; i < TAPS_R * CHANNELS; ++i) {
    const int r = i / CHANNELS, channel = i % CHANNELS;
    double sum[TAPS_S];
#pragma unroll
    for (int s = 0; s < TAPS_S; ++s)
      sum[s] = static_cast<double>(total_smem[(r * SUMS + s * CHANNELS + channel) * kThreads]) +
               acc[r][s * CHANNELS + channel];
    add_rows<kThreads>(sum, worker.item, worker.lane, share.items, share.lanes, smem);
    for (int j = threadIdx.x; j < TAPS_S * lanes; j += kThreads) {
      const int lane = j / TAPS_S, s = j % TAPS_S;
      if (first_s + s < columns.taps)
        partial_ptr[(lane * CHANNELS + channel) * filter + (first_r + r) * columns.taps + first_s + s] =
            smem[s * kThreads + lane];
    }
  }
}

// blockIdx.x numbers tiles of neighbouring elements of dw.
template <typename Storage>
__global__ void __launch_bounds__(kThreads) finish_kernel(const Params params) {
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  double* const smem = reinterpret_cast<double*>(modelnew_smem);
  const int rows = rows_of_splits(params.share.splits), tile = kThreads / rows;
  const int row = static_cast<int>(threadIdx.x) / tile, column = static_cast<int>(threadIdx.x) % tile;
  const int filter = params.rows.taps * params.columns.taps;
  const int64_t elements = static_cast<int64_t>(params.K) * filter;
  const int64_t element = static_cast<int64_t>(blockIdx.x) * tile + column;
  double sum[1] = {};
  hopper::wait_for_prerequisites();
  if (element < elements) {
#pragma unroll 8
    for (int split = row; split < params.share.splits; split += rows)
      sum[0] += params.partial_ptr[split * elements + element];
  }
  add_rows<kThreads>(sum, row, column, rows, tile, smem);
  if (row != 0 || element >= elements) return;
  const int k = static_cast<int>(element / filter), tap = static_cast<int>(element % filter);
  const int r = tap / params.columns.taps, s = tap % params.columns.taps;
  narrow(
      static_cast<float>(smem[column]),
      static_cast<Storage*>(params.out_ptr)[k * params.w_stride[0] + r * params.w_stride[2] + s * params.w_stride[3]]);
}

// ---- dgrad_kernel ----
//
// At a stride of 2, a row or column of dx meets every second tap: those of its own parity, counted with the padding. A
// thread owns 2 * COLUMNS columns of dx and walks down pairs of rows; OPEN rows of dy are in registers.
//
//      columns of dx, with padding   2j     w[.][0] dy[j] + w[.][2] dy[j - 1] + ...
//                                    2j+1   w[.][1] dy[j] + w[.][3] dy[j - 1] + ...
//
// The parity of a thread's first column is the same in all calls, see dgrad_shift.
template <int TAPS_, int COLUMNS_, typename Storage_>
struct DgradConfig {
  using Storage = Storage_;
  static constexpr int TAPS = TAPS_, COLUMNS = COLUMNS_, OPEN = (TAPS + 1) / 2, WINDOW = COLUMNS + OPEN - 1;
  static constexpr int AHEAD = COLUMNS == 1 ? OPEN : 1;  // rows of dy under way, as registers allow
  static constexpr int PARITY = TAPS / 2 % 2;
  static_assert(TAPS * TAPS <= kChunk, "an output is one chunk");
};

MODELNEW_HOST_DEVICE constexpr int dgrad_blocks_per_sm(int taps) { return taps == 7 ? 3 : taps == 5 ? 4 : 6; }

// Columns of dx by which groups begin before it, so that padding of half a filter leaves groups of even columns.
MODELNEW_HOST_DEVICE inline int dgrad_shift(int taps, int pad) { return (pad + taps / 2) % 2; }

// dx at one pixel: all products that exist.
template <typename Storage>
__device__ inline float exact_dx(const Params& params, int64_t n, int c, int h, int w) {
  const Axis &rows = params.rows, &columns = params.columns;
  float acc = 0, total = 0;
  int terms = 0;
#pragma unroll 1
  for (int k = c * params.multiplier; k < (c + 1) * params.multiplier; ++k) {
    const Storage* const w_ptr = static_cast<const Storage*>(params.w_ptr) + k * params.w_stride[0];
    const Storage* const dy_ptr =
        static_cast<const Storage*>(params.dy_ptr) + n * params.dy_stride[0] + k * params.dy_stride[1];
#pragma unroll 1
    for (int r = 0; r < rows.taps; ++r) {
      const int above = h + rows.pad - r * rows.dilation, p = above / rows.stride;
      if (above < 0 || p * rows.stride != above || p >= rows.outputs) continue;
#pragma unroll 1
      for (int s = 0; s < columns.taps; ++s) {
        const int left = w + columns.pad - s * columns.dilation, q = left / columns.stride;
        if (left < 0 || q * columns.stride != left || q >= columns.outputs) continue;
        acc += widen(w_ptr[r * params.w_stride[2] + s * params.w_stride[3]]) *
               widen(dy_ptr[p * params.dy_stride[2] + q * params.dy_stride[3]]);
        if (++terms % kChunk == 0) add_chunk(acc, total);
      }
    }
  }
  add_chunk(acc, total);
  return total + acc;
}

// The channel of a thread of the dgrad kernels, and the first of its items; all_items if there is no such channel.
struct Task {
  int c;
  unsigned item, items;
};

__device__ inline Task make_task(const Params& params) {
  const Share& share = params.share;
  const Worker worker = make_worker(share);
  const int c = static_cast<int>(blockIdx.x / share.splits) * share.lanes + worker.lane;
  const bool exists = (worker.lane < share.lanes) & (worker.item < share.items) & (c < params.K / params.multiplier);
  return {c, exists ? blockIdx.x % share.splits * share.items + worker.item : share.all_items,
          static_cast<unsigned>(share.splits) * share.items};
}

template <typename Config>
__global__ void __launch_bounds__(kThreads, dgrad_blocks_per_sm(Config::TAPS)) dgrad_kernel(const Params params) {
  using Storage = typename Config::Storage;
  constexpr int TAPS = Config::TAPS, COLUMNS = Config::COLUMNS, OPEN = Config::OPEN, WINDOW = Config::WINDOW;
  constexpr int PARITY = Config::PARITY, AHEAD = Config::AHEAD;
  using Pair = Pack<Storage, 2>;
  const Task task = make_task(params);
  const Axis &rows = params.rows, &columns = params.columns;
  if (task.item >= params.share.all_items) return;
  const int dy_right = hopper::in_register(static_cast<int>(params.dy_stride[3] * sizeof(Storage)));
  const int64_t dx_right = params.x_stride[3];
  const int c = task.c, first_pair = rows.pad / 2, pairs = (rows.pad + rows.inputs - 1) / 2 - first_pair + 1;

  float w_frag[TAPS][TAPS], finite = 0;  // or NaN, if a weight is not
  {
    const Storage* const w_ptr = static_cast<const Storage*>(params.w_ptr) + c * params.w_stride[0];
    Storage weight[TAPS][TAPS];
#pragma unroll
    for (int r = 0; r < TAPS; ++r)
#pragma unroll
      for (int s = 0; s < TAPS; ++s) weight[r][s] = w_ptr[r * params.w_stride[2] + s * params.w_stride[3]];
#pragma unroll
    for (int r = 0; r < TAPS; ++r)
#pragma unroll
      for (int s = 0; s < TAPS; ++s) {
        w_frag[r][s] = widen(weight[r][s]);
        finite += w_frag[r][s] * 0.f;
      }
  }
#pragma unroll 1
  for (unsigned item = task.item; item < params.share.all_items; item += task.items) {
    const Place at = locate(params.share, item, pairs, COLUMNS);
    const int first_w = 2 * at.column - dgrad_shift(TAPS, columns.pad);
    const int first_q = (first_w + columns.pad - PARITY) / 2 - (OPEN - 1) + PARITY;
    int i = first_pair + at.row, h = 2 * i - rows.pad;
    Storage* dx_row = static_cast<Storage*>(params.out_ptr) + (at.n * params.x_stride[0] + c * params.x_stride[1] +
                                                               h * params.x_stride[2] + first_w * params.x_stride[3]);
    if (finite != 0) {
#pragma unroll 1
      for (int row = 0; row < 2 * at.rows; ++row)
#pragma unroll 1
        for (int j = 0; j < 2 * COLUMNS; ++j)
          if (is_within(h + row, rows.inputs) && is_within(first_w + j, columns.inputs))
            narrow(exact_dx<Storage>(params, at.n, c, h + row, first_w + j),
                   dx_row[row * params.x_stride[2] + j * params.x_stride[3]]);
      continue;
    }
    unsigned inside = 0;  // a bit for each column
#pragma unroll
    for (int j = 0; j < WINDOW; ++j) inside |= is_within(first_q + j, columns.outputs) ? 1u << j : 0u;
    const Storage* dy_row =
        static_cast<const Storage*>(params.dy_ptr) + (at.n * params.dy_stride[0] + c * params.dy_stride[1] +
                                                      i * params.dy_stride[2] + first_q * params.dy_stride[3]);
    const auto load = [&](int p, const Storage* source, Storage(&to)[WINDOW]) {
#pragma unroll
      for (int j = 0; j < WINDOW; ++j)
        to[j] = load_if(is_within(p, rows.outputs) & (inside >> j & 1), moved(source, dy_right, j));
    };
    Storage ahead[AHEAD][WINDOW], before[OPEN - 1][WINDOW];
    float dy_frag[OPEN][WINDOW];  // row i in place i minus the first one, modulo OPEN
#pragma unroll
    for (int m = 1; m < OPEN; ++m) load(i - m, dy_row - m * params.dy_stride[2], before[m - 1]);
    const int behind = i + at.rows;
    int next = i;  // row that is loaded
    const auto load_next = [&](Storage(&to)[WINDOW]) {
      load(next < behind ? next : -1, dy_row, to);
      ++next;
      dy_row += params.dy_stride[2];
    };
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) load_next(ahead[u]);
#pragma unroll
    for (int m = 1; m < OPEN; ++m)
#pragma unroll
      for (int j = 0; j < WINDOW; ++j) dy_frag[OPEN - m][j] = widen(before[m - 1][j]);
#pragma unroll 1
    while (i < behind) {
      // OPEN pairs, so that rows of dy keep their registers.
#pragma unroll
      for (int u = 0; u < OPEN; ++u, ++i) {
        if (i >= behind) break;
#pragma unroll
        for (int j = 0; j < WINDOW; ++j) dy_frag[u][j] = widen(ahead[u % AHEAD][j]);
        load_next(ahead[u % AHEAD]);
#pragma unroll
        for (int a = 0; a < 2; ++a, ++h, dx_row += params.x_stride[2]) {
          float dx[2 * COLUMNS] = {};
#pragma unroll
          for (int r = a; r < TAPS; r += 2)
#pragma unroll
            for (int j = 0; j < 2 * COLUMNS; ++j)
#pragma unroll
              for (int s = (j + PARITY) % 2; s < TAPS; s += 2)
                dx[j] +=
                    w_frag[r][s] * dy_frag[(u - r / 2 + OPEN) % OPEN][(j + PARITY) / 2 - s / 2 + OPEN - 1 - PARITY];
          if (!is_within(h, rows.inputs)) continue;
          if (params.pairs) {
#pragma unroll
            for (int j = 0; j < 2 * COLUMNS; j += 2) {
              Pair pair;
              narrow(dx[j], pair.element[0]);
              narrow(dx[j + 1], pair.element[1]);
              if (first_w + j < columns.inputs) *reinterpret_cast<Pair*>(dx_row + j) = pair;
            }
          } else {
#pragma unroll
            for (int j = 0; j < 2 * COLUMNS; ++j)
              if (is_within(first_w + j, columns.inputs)) narrow(dx[j], dx_row[j * dx_right]);
          }
        }
      }
    }
  }
}

template <typename Storage>
__global__ void __launch_bounds__(kThreads) dgrad_any_kernel(const Params params) {
  const Task task = make_task(params);
#pragma unroll 1
  for (unsigned item = task.item; item < params.share.all_items; item += task.items) {
    const Place at = locate(params.share, item, params.rows.inputs, 1);
    for (int h = at.row; h < at.row + at.rows; ++h)
      narrow(exact_dx<Storage>(params, at.n, task.c, h, at.column),
             static_cast<Storage*>(params.out_ptr)[at.n * params.x_stride[0] + task.c * params.x_stride[1] +
                                                   h * params.x_stride[2] + at.column * params.x_stride[3]]);
  }
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

enum class Kernel { kWgrad, kDgrad, kDgradAny };

struct Plan {
  bool exists;
  Kernel kernel;
  Shape shape;  // of wgrad_kernel; dgrad_kernel takes taps_r and columns
  Params params;
};

constexpr int64_t kMostBlocks = 0x7fffffff;
constexpr int64_t kCachedBytes = 32 << 20;           // operands of which most stay in the L2 cache of 40 to 60 MB
constexpr int kWholeColumns = 4, kDenseColumns = 1;  // of a thread whose neighbours own channels, or columns

// Columns of a thread that owns two channels, as registers allow.
constexpr int pairs_columns(int stride, int bytes) { return stride == 1 && bytes == 2 ? 4 : 2; }

constexpr int kMostAtOnce = 4;  // columns of a thread that loads them at once

inline bool is_channels_last(const Problem& problem) {
  return problem.C > 1 && problem.x_stride[1] == 1 && problem.y_stride[1] == 1;
}

// Whether rows are dense and begin at multiples of `size` elements, in memory that begins at such a one.
inline bool in_vectors(int size, const int64_t (&stride)[4], int width) {
  return stride[3] == 1 && stride[0] % size == 0 && stride[1] % size == 0 && stride[2] % size == 0 && width % size == 0;
}

// The filter of a problem, if it is compiled as a whole for these strides and dilations, else a part of a row.
inline Shape wgrad_shape(const Params& params, int bytes, bool aligned) {
  const Axis &h = params.rows, &w = params.columns;
  const bool square = h.taps == w.taps && h.stride == w.stride && (h.taps == 3 || h.taps == 5 || h.taps == 7);
  const bool dense = h.dilation == 1 && w.dilation == 1;
  if (!square || (h.stride != 1 && (h.stride != 2 || !dense)))
    return w.stride == 1 ? Shape{1, kSegment, 1, params.share.by_channels ? kWholeColumns : kDenseColumns, 1, 1, bytes}
                         : Shape{1, kSegment, 0, 1, 1, 1, bytes};
  // Columns that are loaded at once. Twos pay where a load of 16 bits costs as much as the products of its element.
  const auto in = [&](int size) {
    return aligned && !params.share.by_channels && dense && w.pad == w.taps / 2 &&
           in_vectors(size, params.x_stride, w.inputs) && in_vectors(size, params.dy_stride, w.outputs);
  };
  const int at_once = in(kMostAtOnce) ? kMostAtOnce : bytes == 2 && h.stride == 1 && h.taps < 7 && in(2) ? 2 : 1;
  const auto even = [](const int64_t (&stride)[4]) {
    return stride[0] % 2 == 0 && stride[2] % 2 == 0 && stride[3] % 2 == 0;
  };
  const bool pairs = aligned && params.share.by_channels && h.taps == 3 && params.multiplier == 1 &&
                     params.K % 2 == 0 && even(params.x_stride) && even(params.dy_stride);
  if (pairs) return {3, 3, h.stride, pairs_columns(h.stride, bytes), 1, 2, bytes};
  if (params.share.by_channels && h.taps > 3) return {h.taps, w.taps, h.stride, kWholeColumns / h.stride, 1, 1, bytes};
  return {h.taps, w.taps, h.stride, at_once, at_once, 1, bytes};
}

// Limits on how a problem is divided.
struct Limits {
  int channel_bytes;  // of a thread's channels that are neighbours
  int least_band;     // rows of a band
  int extra_rows;     // steps of a band, beyond its rows, that cost as much
  int blocks_per_sm, sms;
  int64_t most_splits;  // that pay
  bool by_memory;       // and not by arithmetic
};

// Divides channels and items among blocks, so that the busiest SM has least to do. `rows` and `columns` of an image,
// the latter in groups.
inline void divide(const Problem& problem, int channels, int rows, int columns, const Limits& limits, Share& share) {
  constexpr int kStartRows = 6;  // what an item and a block cost besides their steps, in steps
  const int64_t rows_of_phase = ceil_div(rows, share.phases_h);
  share.groups = static_cast<int>(ceil_div(columns, share.phases_w));
  const int64_t strips = problem.N * share.phases_h * share.phases_w * share.groups;  // as high as the image
  double best = -1;
  const auto consider = [&](int64_t band_rows, int lanes) {
    Share next = share;
    next.band_rows = static_cast<int>(band_rows);
    next.bands = static_cast<int>(ceil_div(rows_of_phase, band_rows));
    const int64_t items = strips * next.bands;
    next.lanes =
        lanes > 0 ? lanes : static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(channels, kThreads / items)));
    next.items = kThreads / next.lanes;
    next.chunks = static_cast<int>(ceil_div(channels, next.lanes));
    const int64_t rounds = ceil_div(items, next.items), blocks_of_round = int64_t{next.chunks} * share.parts;
    const int64_t most_blocks = int64_t{limits.blocks_per_sm} * limits.sms;
    for (const int64_t wanted : {most_blocks / blocks_of_round, ceil_div(most_blocks, blocks_of_round)}) {
      const int64_t most = std::max<int64_t>(1, std::min({rounds, limits.most_splits, wanted}));
      const int64_t rounds_of_block = ceil_div(rounds, most);
      next.splits = static_cast<int>(ceil_div(rounds, rounds_of_block));
      next.blocks = blocks_of_round * next.splits;
      next.all_items = items < (int64_t{1} << 31) ? static_cast<unsigned>(items) : 0;
      const double steps =
          static_cast<double>(rounds_of_block * (band_rows + limits.extra_rows + kStartRows) + kStartRows);
      // An SM with fewer blocks than it could hold is not much faster.
      const double busy = std::max(0.75, static_cast<double>(ceil_div(next.blocks, limits.sms)) / limits.blocks_per_sm);
      // Narrow pieces of pixels make bad use of memory's bursts.
      const double waste =
          lanes > 0 && lanes < channels ? (limits.by_memory ? 32.0 : 8.0) / (lanes * limits.channel_bytes) : 0;
      const double cost = steps * busy * (1 + waste);
      if (best < 0 || cost < best) best = cost, share = next;
    }
  };
  const int64_t least_band = std::min<int64_t>(rows_of_phase, limits.least_band);
  for (int64_t band_rows = rows_of_phase;; band_rows = std::max(least_band, (band_rows + 1) / 2)) {
    if (!share.by_channels) consider(band_rows, 0);
    if (share.by_channels && channels <= kThreads) consider(band_rows, channels);
    // Whole sectors, as an SM that stores a part of one makes memory read the rest.
    for (int lanes = share.by_channels ? 64 : 0; lanes >= 32 / limits.channel_bytes; lanes -= 32 / limits.channel_bytes)
      if (lanes < channels) consider(band_rows, lanes);
    if (band_rows == least_band) break;
  }
}

// `aligned`: tensors begin where two (dgrad) or four (wgrad) elements may be moved at once.
inline Plan make_plan(const Problem& problem, Operator op, bool aligned, int sms) {
  const auto axis = [](int inputs, int outputs, int taps, int stride, int dilation, int pad) {
    return Axis{inputs, outputs, taps, taken_stride(stride, outputs), taps == 1 ? 1 : dilation, pad};
  };
  Plan plan{};
  Params& params = plan.params;
  Share& share = params.share;
  params.rows = axis(problem.H, problem.P, problem.R, problem.stride_h, problem.dilation_h, problem.pad_h);
  params.columns = axis(problem.W, problem.Q, problem.S, problem.stride_w, problem.dilation_w, problem.pad_w);
  params.images = problem.N;
  params.K = problem.K;
  params.multiplier = problem.K / problem.C;
  std::copy_n(problem.x_stride, 4, params.x_stride);
  std::copy_n(problem.w_stride, 4, params.w_stride);
  std::copy_n(problem.y_stride, 4, params.dy_stride);
  const Axis &rows = params.rows, &columns = params.columns;
  share.by_channels = is_channels_last(problem);
  share.parts = share.phases_h = share.phases_w = 1;
  const int own_columns = share.by_channels ? kWholeColumns : kDenseColumns;
  const int64_t bytes = element_bytes(problem.dtype) * problem.N *
                        (int64_t{problem.C} * problem.H * problem.W + int64_t{problem.K} * problem.P * problem.Q);
  const bool is_large = bytes > kCachedBytes;
  if (op == Operator::kWgrad) {
    plan.kernel = Kernel::kWgrad;
    plan.shape = wgrad_shape(params, element_bytes(problem.dtype), aligned);
    const bool whole = plan.shape.taps_r > 1;
    share.parts = whole ? 1 : static_cast<int>(rows.taps * ceil_div(columns.taps, kSegment));
    share.phases_h = whole ? std::min(rows.dilation, rows.outputs) : 1;
    share.phases_w = plan.shape.stride == 1 ? std::min(columns.dilation, columns.outputs) : 1;
    // Partial sums are a quarter of what is read, or few.
    const int64_t elements = int64_t{problem.K} * problem.R * problem.S;
    const int64_t most_splits = std::max<int64_t>(8, bytes / 4 / (elements * 8));
    const int64_t units = ceil_div(ceil_div(columns.outputs, share.phases_w), plan.shape.columns) * share.phases_w;
    const int open = plan.shape.open();
    divide(problem, problem.K / plan.shape.channels, rows.outputs, static_cast<int>(units),
           {element_bytes(problem.dtype) * plan.shape.channels, std::max(4, open), open - 1, plan.shape.blocks_per_sm(),
            sms, most_splits, is_large && rows.taps <= 3},
           share);
  } else {
    const bool square = rows.taps == columns.taps && rows.stride == 2 && columns.stride == 2;
    const bool compiled = square && (rows.taps == 3 || rows.taps == 5 || rows.taps == 7);
    const bool dense = rows.dilation == 1 && columns.dilation == 1;
    plan.kernel = compiled && dense && params.multiplier == 1 ? Kernel::kDgrad : Kernel::kDgradAny;
    const bool in_pairs = plan.kernel == Kernel::kDgrad;
    plan.shape = in_pairs ? Shape{rows.taps, columns.taps, 2, own_columns, 1, 1, 0} : Shape{};
    const int shift = dgrad_shift(columns.taps, columns.pad);
    params.pairs = aligned && shift == 0 && problem.W % 2 == 0 && problem.x_stride[3] == 1 &&
                   problem.x_stride[0] % 2 == 0 && problem.x_stride[1] % 2 == 0 && problem.x_stride[2] % 2 == 0;
    const int pairs = (rows.pad + problem.H - 1) / 2 - rows.pad / 2 + 1;
    const int64_t units = in_pairs ? ceil_div(problem.W + shift, 2 * own_columns) : problem.W;
    divide(problem, problem.C, in_pairs ? pairs : problem.H, static_cast<int>(units),
           {element_bytes(problem.dtype), in_pairs ? rows.taps : 1, in_pairs ? rows.taps / 2 : 0,
            in_pairs ? dgrad_blocks_per_sm(rows.taps) : 16, sms, kMostBlocks, is_large},
           share);
  }
  share.by_columns = make_divisor(int64_t{share.groups} * share.phases_w);
  share.by_phases_w = make_divisor(share.phases_w);
  share.by_bands = make_divisor(share.bands);
  share.by_phases_h = make_divisor(share.phases_h);
  // 32 steps along a row, as many as there are loads, are a 32-bit number of bytes in the kernels.
  const int64_t widest = int64_t{std::max(columns.stride, columns.dilation)} * element_bytes(problem.dtype);
  const bool near = std::max(problem.x_stride[3], problem.y_stride[3]) <= kMostBlocks / (32 * widest);
  plan.exists = share.all_items > 0 && share.blocks <= kMostBlocks && near;
  return plan;
}

inline const Plan& plan_of(const Problem& problem, Operator op, bool aligned) {
  thread_local Memo<Plan> memo;
  int sms = 108;  // where there is no GPU
  const int gpu = find_gpu(sms);
  return memo.get(key_of(problem, op, 0, 0, !aligned, gpu, sms), [&] { return make_plan(problem, op, aligned, sms); });
}

inline const char* refusal(const Problem& problem, Operator op) {
  return plan_of(problem, op, false).exists ? nullptr
                                            : "more than 2^31 - 1 blocks, parts of images, or bytes between columns";
}

// Whether tensors begin where so many of their elements may be moved at once as the plan would like.
inline bool is_aligned(const Problem& problem, Operator op, const Pointers& pointers) {
  const int bytes = element_bytes(problem.dtype);
  const uint64_t read = reinterpret_cast<uint64_t>(pointers.x) | reinterpret_cast<uint64_t>(pointers.dy);
  return op == Operator::kWgrad ? read % (kMostAtOnce * bytes) == 0
                                : reinterpret_cast<uint64_t>(pointers.out) % (2 * bytes) == 0;
}

inline int64_t workspace_bytes(const Problem& problem, Operator op, const Pointers& pointers) {
  if (op != Operator::kWgrad) return 0;
  const Share& share = plan_of(problem, op, is_aligned(problem, op, pointers)).params.share;
  return share.splits * static_cast<int64_t>(sizeof(double)) * problem.K * problem.R * problem.S;
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

template <typename Config>
inline cudaError_t run_wgrad(const Params& params, cudaStream_t stream) {
  using Storage = typename Config::Storage;
  constexpr Shape kShape = Config::kShape;
  constexpr Instance kInstance{
      "wgrad_kernel",
      {kTypeId<Storage>, kShape.taps_r, kShape.stride, kShape.columns, kShape.at_once, kShape.channels}};
  record(kInstance);
  if constexpr (!is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    constexpr int kSmemBytes = kShape.smem_bytes();
    const cudaError_t error = hopper::launch_early(wgrad_kernel<Config>, static_cast<unsigned>(params.share.blocks),
                                                   kThreads, kSmemBytes, stream, params);
    if (error != cudaSuccess) return error;
    const int64_t elements = static_cast<int64_t>(params.K) * params.rows.taps * params.columns.taps;
    const unsigned tiles = static_cast<unsigned>(ceil_div(elements, kThreads / rows_of_splits(params.share.splits)));
    return hopper::launch_early(finish_kernel<Storage>, tiles, kThreads, kThreads * sizeof(double), stream, params);
  }
}

template <typename Config>
inline cudaError_t run_dgrad(const Params& params, cudaStream_t stream) {
  constexpr Instance kInstance{"dgrad_kernel", {kTypeId<typename Config::Storage>, Config::TAPS, Config::COLUMNS}};
  record(kInstance);
  if constexpr (!is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    dgrad_kernel<Config><<<static_cast<unsigned>(params.share.blocks), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  }
}

template <typename Storage, int TAPS, int STRIDE>
inline cudaError_t run_wgrad_of(const Plan& plan, cudaStream_t stream) {
  const Params& params = plan.params;
  if (plan.shape.at_once == kMostAtOnce)
    return run_wgrad<WgradConfig<TAPS, TAPS, STRIDE, kMostAtOnce, kMostAtOnce, 1, Storage>>(params, stream);
  if constexpr (sizeof(Storage) == 2 && STRIDE == 1 && TAPS < 7) {
    if (plan.shape.at_once == 2) return run_wgrad<WgradConfig<TAPS, TAPS, 1, 2, 2, 1, Storage>>(params, stream);
  }
  if constexpr (TAPS == 3) {
    if (plan.shape.channels == 2)
      return run_wgrad<WgradConfig<3, 3, STRIDE, pairs_columns(STRIDE, sizeof(Storage)), 1, 2, Storage>>(params,
                                                                                                         stream);
  } else if (params.share.by_channels) {
    return run_wgrad<WgradConfig<TAPS, TAPS, STRIDE, kWholeColumns / STRIDE, 1, 1, Storage>>(params, stream);
  }
  return run_wgrad<WgradConfig<TAPS, TAPS, STRIDE, kDenseColumns, 1, 1, Storage>>(params, stream);
}

template <typename Storage, int TAPS>
inline cudaError_t run_wgrad_of(const Plan& plan, cudaStream_t stream) {
  return plan.shape.stride == 1 ? run_wgrad_of<Storage, TAPS, 1>(plan, stream)
                                : run_wgrad_of<Storage, TAPS, 2>(plan, stream);
}

template <typename Storage, int COLUMNS>
inline cudaError_t run_dgrad_of(const Plan& plan, cudaStream_t stream) {
  const Params& params = plan.params;
  return plan.shape.taps_r == 3   ? run_dgrad<DgradConfig<3, COLUMNS, Storage>>(params, stream)
         : plan.shape.taps_r == 5 ? run_dgrad<DgradConfig<5, COLUMNS, Storage>>(params, stream)
                                  : run_dgrad<DgradConfig<7, COLUMNS, Storage>>(params, stream);
}

template <typename Storage>
inline cudaError_t run(const Plan& plan, cudaStream_t stream) {
  const Params& params = plan.params;
  if (plan.kernel == Kernel::kDgradAny) {
    dgrad_any_kernel<Storage><<<static_cast<unsigned>(params.share.blocks), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  }
  const bool by_channels = params.share.by_channels;
  if (plan.kernel == Kernel::kDgrad)
    return by_channels ? run_dgrad_of<Storage, kWholeColumns>(plan, stream)
                       : run_dgrad_of<Storage, kDenseColumns>(plan, stream);
  const Shape& shape = plan.shape;
  if (shape.taps_r == 1)
    return shape.stride == 0 ? run_wgrad<WgradConfig<1, kSegment, 0, 1, 1, 1, Storage>>(params, stream)
           : by_channels     ? run_wgrad<WgradConfig<1, kSegment, 1, kWholeColumns, 1, 1, Storage>>(params, stream)
                             : run_wgrad<WgradConfig<1, kSegment, 1, kDenseColumns, 1, 1, Storage>>(params, stream);
  return shape.taps_r == 3   ? run_wgrad_of<Storage, 3>(plan, stream)
         : shape.taps_r == 5 ? run_wgrad_of<Storage, 5>(plan, stream)
                             : run_wgrad_of<Storage, 7>(plan, stream);
}

inline cudaError_t launch(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  Plan plan = plan_of(problem, op, is_aligned(problem, op, pointers));
  if (!plan.exists) return cudaErrorInvalidConfiguration;
  plan.params.x_ptr = pointers.x;
  plan.params.w_ptr = pointers.w;
  plan.params.dy_ptr = pointers.dy;
  plan.params.out_ptr = pointers.out;
  plan.params.partial_ptr = static_cast<double*>(pointers.workspace);
  switch (problem.dtype) {
    case DType::kFloat32:
      return run<float>(plan, stream);
    case DType::kFloat16:
      return run<Half>(plan, stream);
    case DType::kBFloat16:
      return run<BFloat16>(plan, stream);
    case DType::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

#endif  // launchers

inline void describe(const Problem& problem, Operator op, char* text, size_t text_size) {
  const Plan& plan = plan_of(problem, op, true);
  const Share& share = plan.params.share;
  static constexpr const char* kNames[] = {"wgrad", "dgrad", "dgrad_any"};
  snprintf(text, text_size,
           "%s: %d channels of %d threads, side by side by %s, %d parts of a filter, bands of %d rows, %d splits, %d "
           "bytes of shared memory, %lld blocks",
           kNames[static_cast<int>(plan.kernel)], share.lanes, share.items, share.by_channels ? "channels" : "columns",
           share.parts, share.band_rows, share.splits, op == Operator::kWgrad ? plan.shape.smem_bytes() : 0,
           static_cast<long long>(share.blocks));
}

#endif  // host

}  // namespace depthwise_grad
}  // namespace modelnew
