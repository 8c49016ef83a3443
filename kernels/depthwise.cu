// Depthwise engine: convolutions in which every output channel reads one input channel. fp32, fp16 and bf16, with fp32
// sums. Here are the forward and, without a stride, dgrad, which is the same with the filter turned round; other
// gradients are in depthwise_grad.cuh.
//
//   ring_kernel         NCHW without gaps, filters of 3x3 and 7x7: rows through a ring in shared memory, windows in
//                       registers
//   planes_kernel       other NCHW, and 5x5: planes through shared memory, sliding windows in registers
//   planes_any_kernel   NCHW and any other strides, any filter, stride and dilation
//   pixels_kernel       channels_last, 3x3, 5x5 and 7x7: lanes along channels, sliding windows fed from global memory
//   queue_kernel        the same of 16 bits, and 7x7 at a stride: windows by way of shared memory, more under way
//   pixels_any_kernel   channels_last, any filter, stride and dilation
//
// Memory traffic bounds these problems up to 5x5, multiply-adds from 7x7 on. Speed depends on bytes under way (many
// loads before the first wait), memory read once and in whole sectors, and little but multiply-adds. x leaves the L2
// cache first: otherwise dirty lines of others have to be written to make room. Measurements: docs/lab/depthwise.md.
//
// Sums of up to 64 products are one chain, longer ones chains of at most 64, added with compensation. Padding is left
// out as in PyTorch's own depthwise kernels, where a zero would make NaN of an Inf: rows outside the image are skipped,
// columns are zeros; where a weight is Inf or NaN, the same kernels take every product by itself (exact_sum).
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "engines.cuh"
#include "memo.cuh"
#endif

#include "async_copy.cuh"
#include "depthwise_grad.cuh"
#include "numerics.cuh"
#include "problem.cuh"
#include "ptx.cuh"

namespace modelnew {
namespace depthwise {

using depthwise_grad::is_channels_last, depthwise_grad::kChunk, depthwise_grad::kMostBlocks, depthwise_grad::kThreads;

// A block stays within the 48 KB of shared memory that every GPU grants without being asked: four or more blocks run on
// an SM, one loading while others multiply.
constexpr int kSharedBytes = 48 * 1024;

// One image axis: output i reads input i*stride + t*dilation + origin for tap t, if that is in [0, inputs).
struct Axis {
  int outputs, inputs, taps, stride, dilation, origin;
};

// dx[h] takes dy[h + pad - r*dilation]: with t = taps - 1 - r this runs from left to right. With a single output
// position the stride is never taken: 1 stands for it, however large it is.
MODELNEW_HOST_DEVICE inline Axis make_axis(Operator op, int x_size, int y_size, int taps, int stride, int pad,
                                           int dilation) {
  if (op == Operator::kDgrad)
    return {x_size, y_size, taps, y_size == 1 ? 1 : stride, dilation, pad - (taps - 1) * dilation};
  return {y_size, x_size, taps, y_size == 1 ? 1 : stride, dilation, -pad};
}

// How finished outputs leave planes_kernel and planes_any_kernel.
enum class Store : int {
  kVectors,  // four neighbours at once, to addresses that allow it
  kRuns,     // by way of shared memory, the block's outputs being one run in memory
  kSingly
};

// A block of the planes kernels: `planes` planes, or some rows and columns of one. A thread owns band_rows rows.
struct Tile {
  int planes;              // of the output
  int bands, band_rows;    // of each plane
  int groups;              // of columns: threads side by side
  int tile_p, tile_q;      // outputs of each plane
  int tiles_p, tiles_q;    // of one plane
  int64_t tiles;           // of all
  int in_planes, in_rows;  // staged, at most
  int pitch;               // floats of a staged row
  int w_pitch;             // floats of a staged filter
  int x_floats, w_floats;
  bool whole;    // all rows of a plane are staged
  bool by_runs;  // what is staged is one run in memory
  Store store;
  int smem_bytes;
};

// A block of ring_kernel: `planes` channels of some images, one after the other, all rows or a band, `steps` at a time.
struct Ring {
  int planes, groups, threads;  // a thread for each group of columns and each split of a plane; whole warps
  int splits, split_rows;       // of a band's outputs: several only if a chunk is all of an image's planes
  int sets;                     // of channels
  int parts;                    // of the images
  int bands, band_rows;         // of each image's outputs
  int steps, slots;
  bool whole;                 // a chunk is all of an image's planes, one run in memory
  bool pairs;                 // columns are read two at a time
  int lanes;                  // threads that copy one run
  int in_pitch, out_pitch;    // elements from plane to plane in shared memory
  int in_vector, out_vector;  // bytes that are copied at once
  int slot_bytes, out_bytes;  // the latter also has room for the filters
  int64_t blocks;
  int smem_bytes;
};

// A block of the pixels kernels: `lanes` threads side by side own neighbouring channels, and there are `items` of them.
// An item is a group of columns in a band of rows of an image. queue_kernel numbers its threads through: blocks have as
// many as they have threads, and begin and end within items.
struct Strip {
  int lanes, items;
  int chunks;  // of channels
  int groups, bands, band_rows;
  int w_pitch;
  int queue_shape;  // of kQueueShapes
  int64_t blocks;
  int smem_bytes;
};

// The outputs of a thread of queue_kernel, the steps that it has under way, and the blocks that its registers leave
// room for on an SM. Those have up to 144 KB under way, part of it twice, as neighbours' windows overlap.
struct QueueShape {
  int taps, stride, channels, columns, depth, blocks_per_sm;

  MODELNEW_HOST_DEVICE constexpr int window() const { return (columns - 1) * stride + taps; }
  MODELNEW_HOST_DEVICE constexpr int open() const { return (taps + stride - 1) / stride; }
  MODELNEW_HOST_DEVICE constexpr int slot_bytes() const { return stride * window() * kThreads * channels * 2; }
  MODELNEW_HOST_DEVICE constexpr int queue_bytes() const { return depth * slot_bytes(); }
};
constexpr QueueShape kQueueShapes[] = {{3, 1, 4, 4, 4, 4}, {3, 1, 2, 4, 4, 6}, {3, 2, 4, 4, 2, 4}, {3, 2, 2, 4, 2, 6},
                                       {5, 1, 2, 4, 4, 4}, {5, 2, 2, 4, 2, 4}, {7, 1, 2, 2, 4, 3}, {7, 2, 2, 2, 2, 3}};
constexpr int kQueueShapeCount = sizeof(kQueueShapes) / sizeof(kQueueShapes[0]);
constexpr int kMostQueueLanes = 48;  // of a block, as their filters have to come first
constexpr int queue_smem_bytes(const QueueShape& shape, int lanes) {
  return shape.queue_bytes() + lanes * shape.channels * shape.taps * shape.taps * 2;
}
constexpr bool queues_fit(int number) {
  return number == kQueueShapeCount ||
         (queue_smem_bytes(kQueueShapes[number], kMostQueueLanes) <= kSharedBytes && queues_fit(number + 1));
}
static_assert(queues_fit(0), "what every GPU grants");
constexpr int pixels_blocks_per_sm(int taps, int stride) { return taps == 7 && stride == 2 ? 3 : 4; }  // by registers

struct Params {
  const void *in_ptr, *w_ptr, *bias_ptr;
  void* out_ptr;
  int64_t in_stride[4], out_stride[4];  // image, channel, row, column
  int64_t w_stride_k, w_stride_r, w_stride_s;
  Axis rows, columns;
  int64_t images;
  int channels;    // of the output
  int multiplier;  // outputs for each input channel
  bool flipped;    // the filter
  Tile tile;
  Ring ring;
  Strip strip;
};

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

using depthwise_grad::least, depthwise_grad::most, depthwise_grad::Pack;

// Neighbours rounded to the tensor's type: 16-bit ones two at a time.
template <int SIZE>
__device__ inline void narrow_all(const float (&value)[SIZE], Pack<float, SIZE>& stored) {
#pragma unroll
  for (int i = 0; i < SIZE; ++i) stored.element[i] = value[i];
}

template <typename Storage, int SIZE>
__device__ inline void narrow_all(const float (&value)[SIZE], Pack<Storage, SIZE>& stored) {
  if constexpr (SIZE == 1) {
    narrow(value[0], stored.element[0]);
  } else {
#pragma unroll
    for (int i = 0; i < SIZE; i += 2) {
      const uint32_t pair = narrow_pair(value[i], value[i + 1], Storage{});
      stored.element[i].bits = static_cast<uint16_t>(pair & 0xffffu);
      stored.element[i + 1].bits = static_cast<uint16_t>(pair >> 16);
    }
  }
}

template <typename Storage>
__device__ inline float load_bias(const Params& params, int k) {
  return params.bias_ptr ? widen(static_cast<const Storage*>(params.bias_ptr)[k]) : 0.f;
}

// ---- Staging, NCHW ----
//
// Shared memory of a block:
//
//     flag     whether a weight is Inf or NaN
//     x        [input plane][row][pitch] floats, from the first column that an output reads, zeros outside the image
//     w        [output plane][w_pitch] floats
//     y        [output plane][row][column] as in memory, if outputs leave by runs
//
//        pitch
//      <------------------->
//      0 0 x x x x x x x 0 0 .      rows of a plane below one another, planes behind one another: element e of a run
//      0 0 x x x x x x x 0 0 .      in memory goes to e + (e / W) * (pitch - W) + left
//      0 0 x x x x x x x 0 0 .

constexpr int kFlagBytes = 16;

struct Place {
  int64_t first_plane, first_in;  // of the output, of the input
  int planes, in_planes;
  int p, q, rows_p;        // first output, and how many rows of them
  int first_row, in_rows;  // staged
  int first_column;        // the input column that staged column 0 holds
};

__device__ inline Place locate(const Params& params, unsigned block) {
  const Tile& tile = params.tile;
  Place at;
  const int64_t planes = params.images * params.channels;
  at.q = static_cast<int>(block % tile.tiles_q) * tile.tile_q;
  block /= tile.tiles_q;
  at.p = static_cast<int>(block % tile.tiles_p) * tile.tile_p;
  at.first_plane = static_cast<int64_t>(block / tile.tiles_p) * tile.planes;
  at.planes = static_cast<int>(planes - at.first_plane < tile.planes ? planes - at.first_plane : tile.planes);
  at.first_in = at.first_plane / params.multiplier;
  at.in_planes = static_cast<int>((at.first_plane + at.planes - 1) / params.multiplier - at.first_in) + 1;
  at.rows_p = least(params.rows.outputs - at.p, tile.tile_p);
  const int first = at.p * params.rows.stride + params.rows.origin;
  const int behind = first + (at.rows_p - 1) * params.rows.stride + (params.rows.taps - 1) * params.rows.dilation + 1;
  at.first_row = tile.whole ? 0 : most(first, 0);
  at.in_rows = tile.whole ? params.rows.inputs : most(least(behind, params.rows.inputs) - at.first_row, 0);
  at.first_column = at.q * params.columns.stride + params.columns.origin;
  return at;
}

// A run of `count` elements as 16-byte packs, with what lies before the first and behind the last whole one.
template <typename Storage>
struct Run {
  static constexpr int SIZE = 16 / sizeof(Storage);
  int head, packs, tail_first;

  __device__ Run(const Storage* first, int count) {
    const int misaligned = static_cast<int>(reinterpret_cast<uint64_t>(first) / sizeof(Storage) % SIZE);
    head = least((SIZE - misaligned) % SIZE, count);
    packs = (count - head) / SIZE;
    tail_first = head + packs * SIZE;
  }
};

// Stages a run. All loads of a batch are under way before the first store.
template <typename Storage>
__device__ inline void stage_run(float* x_smem, const Params& params, const Place& at) {
  using Vector = Pack<Storage, Run<Storage>::SIZE>;
  constexpr int SIZE = Run<Storage>::SIZE, BATCH = 32 / SIZE;
  const int width = params.columns.inputs, gap = params.tile.pitch - width, left = -at.first_column;
  const int count = at.in_planes * at.in_rows * width;
  const int channels = params.channels / params.multiplier;
  const int64_t image = at.first_in / channels, channel = at.first_in % channels;
  const Storage* const in_ptr = static_cast<const Storage*>(params.in_ptr) + image * params.in_stride[0] +
                                channel * params.in_stride[1] + static_cast<int64_t>(at.first_row) * width;
  const Run<Storage> run(in_ptr, count);
  const Vector* const packs = reinterpret_cast<const Vector*>(in_ptr + run.head);
  // e / width is exact as (e * inverse) >> 31 while e * width < 2^31.
  const uint32_t inverse = (0x80000000u + width - 1) / width;
  const auto row_of = [&](int e) { return static_cast<int>(static_cast<uint64_t>(e) * inverse >> 31); };

  for (int batch = 0; batch == 0 || batch < run.packs; batch += BATCH * kThreads) {
    const int first = batch + static_cast<int>(threadIdx.x);
    Vector value[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      value[i] = load_if(first + i * kThreads < run.packs, packs + (first + i * kThreads));
    if (batch == 0) {
      const int fours = at.in_planes * at.in_rows * params.tile.pitch / 4;
#pragma unroll 4
      for (int i = threadIdx.x; i < fours; i += kThreads)
        reinterpret_cast<Pack<float, 4>*>(x_smem)[i] = Pack<float, 4>{};
      __syncthreads();  // zeros are in place before x comes over them
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (first + i * kThreads >= run.packs) break;
      const int e = run.head + (first + i * kThreads) * SIZE, row = row_of(e);
      int column = e - row * width;
      float* target = x_smem + (e + row * gap + left);
      if (column + SIZE <= width) {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) target[j] = widen(value[i].element[j]);
      } else {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) {
          *target++ = widen(value[i].element[j]);
          const bool ends = ++column == width;
          target += ends ? gap : 0;
          column = ends ? 0 : column;
        }
      }
    }
  }
  const int i = threadIdx.x;
  const int single = i < run.head ? i : run.tail_first + i - run.head;  // head and tail, an element a thread
  if (single < count && i < 2 * SIZE) {
    const int row = row_of(single);
    x_smem[single + row * gap + left] = widen(in_ptr[single]);
  }
}

// Stages element by element, whatever the strides, lanes along columns.
template <typename Storage>
__device__ inline void stage_singly(float* x_smem, const Params& params, const Place& at) {
  constexpr int BATCH = 8;
  const int pitch = params.tile.pitch, rows = at.in_rows, count = at.in_planes * rows * pitch;
  const int channels = params.channels / params.multiplier;
  const int64_t image = at.first_in / channels;
  const int first_channel = static_cast<int>(at.first_in % channels);
  const Storage* const in_ptr = static_cast<const Storage*>(params.in_ptr) + image * params.in_stride[0];
  for (int first = threadIdx.x; first < count; first += BATCH * kThreads) {
    Storage value[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int e = first + i * kThreads, line = e / pitch, plane = line / rows;
      const int row = at.first_row + line % rows, column = at.first_column + e % pitch;
      const int channel = first_channel + plane;
      const bool inside = (e < count) & is_within(column, params.columns.inputs);
      value[i] = load_if(inside,
                         in_ptr + (channel / channels * params.in_stride[0] + channel % channels * params.in_stride[1] +
                                   row * params.in_stride[2] + column * params.in_stride[3]));
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (first + i * kThreads < count) x_smem[first + i * kThreads] = widen(value[i]);
  }
}

// Stages `filters` filters from that of output channel `first_k` on, wrapping round behind the last channel, as rows of
// `row_pitch` floats. Raises the flag for a weight that is not finite.
template <typename Storage>
__device__ inline void stage_filters(float* w_smem, int* flag, const Params& params, int first_k, int filters, int R,
                                     int S, int row_pitch, int w_pitch) {
  const Storage* const w_ptr = static_cast<const Storage*>(params.w_ptr);
  const int taps = R * S;
  bool finite = true;
  for (int i = threadIdx.x; i < filters * taps; i += kThreads) {
    const int filter = i / taps, tap = i % taps, r = tap / S, s = tap % S;
    const int64_t k = (first_k + filter) % params.channels;
    const int from_r = params.flipped ? R - 1 - r : r, from_s = params.flipped ? S - 1 - s : s;
    const float weight = widen(w_ptr[k * params.w_stride_k + from_r * params.w_stride_r + from_s * params.w_stride_s]);
    w_smem[filter * w_pitch + r * row_pitch + s] = weight;
    finite &= is_finite(weight);
  }
  if (!finite) *flag = 1;
}

// The sum of one output over the taps that meet rows from first_row on, `rows` of them, and no others. `product(r, s,
// row, column)` is that of tap (r, s), which reads this row and column.
template <typename Product>
__device__ inline float exact_sum(const Params& params, int first_row, int rows, int p, int q, const Product& product) {
  float acc = 0, total = 0;
  int terms = 0;
#pragma unroll 1
  for (int r = 0; r < params.rows.taps; ++r) {
    const int row = p * params.rows.stride + r * params.rows.dilation + params.rows.origin - first_row;
    if (!is_within(row, rows)) continue;
#pragma unroll 1
    for (int s = 0; s < params.columns.taps; ++s) {
      const int column = q * params.columns.stride + s * params.columns.dilation + params.columns.origin;
      if (!is_within(column, params.columns.inputs)) continue;
      acc += product(r, s, row, column);
      if (++terms % kChunk == 0) add_chunk(acc, total);
    }
  }
  add_chunk(acc, total);
  return total + acc;
}

// The same from a plane in shared memory.
__device__ inline float exact_sum(const float* x_plane, const float* w, int row_pitch, const Params& params,
                                  const Place& at, int p, int q) {
  return exact_sum(params, at.first_row, at.in_rows, p, q, [&](int r, int s, int row, int column) {
    return w[r * row_pitch + s] * x_plane[row * params.tile.pitch + column - at.first_column];
  });
}

// Where a thread of the planes kernels writes: its plane and tile's first output, in shared memory if by runs.
template <typename Storage>
struct Target {
  Storage* first;
  int64_t row_stride, column_stride;
  float bias;

  __device__ void store(int p, int q, float value) const {
    narrow(value + bias, first[p * row_stride + q * column_stride]);
  }
};

// State that the threads of a block of the planes kernels share.
template <typename Storage>
struct Stage {
  int* flag;
  float *x_smem, *w_smem;
  Storage *y_smem, *run_ptr;  // a block's outputs, if they leave by runs: both equally misaligned
};

template <typename Storage>
__device__ inline Storage* plane_pointer(const Params& params, int64_t plane, int p, int q) {
  return static_cast<Storage*>(params.out_ptr) +
         (plane / params.channels * params.out_stride[0] + plane % params.channels * params.out_stride[1] +
          p * params.out_stride[2] + q * params.out_stride[3]);
}

template <typename Storage>
__device__ inline Stage<Storage> stage(unsigned char* smem, const Params& params, const Place& at, int row_pitch) {
  Stage<Storage> staged;
  staged.flag = reinterpret_cast<int*>(smem);
  staged.x_smem = reinterpret_cast<float*>(smem + kFlagBytes);
  staged.w_smem = staged.x_smem + params.tile.x_floats;
  staged.run_ptr = plane_pointer<Storage>(params, at.first_plane, at.p, at.q);
  staged.y_smem = reinterpret_cast<Storage*>(staged.w_smem + params.tile.w_floats) +
                  reinterpret_cast<uint64_t>(staged.run_ptr) % 16 / sizeof(Storage);
  if (threadIdx.x == 0) *staged.flag = 0;
  if (params.tile.by_runs) {
    stage_run<Storage>(staged.x_smem, params, at);  // with a barrier
  } else {
    stage_singly<Storage>(staged.x_smem, params, at);
    __syncthreads();  // the flag is down before somebody raises it
  }
  stage_filters<Storage>(staged.w_smem, staged.flag, params, static_cast<int>(at.first_plane % params.channels),
                         at.planes, params.rows.taps, params.columns.taps, row_pitch, params.tile.w_pitch);
  __syncthreads();  // x, w and the flag are complete
  return staged;
}

template <typename Storage>
__device__ inline Target<Storage> make_target(const Stage<Storage>& staged, const Params& params, const Place& at,
                                              int plane) {
  const int64_t out_plane = at.first_plane + plane;
  const float bias = load_bias<Storage>(params, static_cast<int>(out_plane % params.channels));
  const int width = params.columns.outputs;
  if (params.tile.store == Store::kRuns) return {staged.y_smem + plane * at.rows_p * width, width, 1, bias};
  return {plane_pointer<Storage>(params, out_plane, at.p, at.q), params.out_stride[2], params.out_stride[3], bias};
}

// Brings a block's outputs from shared memory to where they belong, 16 bytes a thread.
template <typename Storage>
__device__ inline void store_run(const Stage<Storage>& staged, int count) {
  using Vector = Pack<Storage, Run<Storage>::SIZE>;
  __syncthreads();  // everybody's outputs are there
  const Run<Storage> run(staged.run_ptr, count);
  Vector* const to = reinterpret_cast<Vector*>(staged.run_ptr + run.head);
  const Vector* const from = reinterpret_cast<const Vector*>(staged.y_smem + run.head);
#pragma unroll 4
  for (int i = threadIdx.x; i < run.packs; i += kThreads) to[i] = from[i];
  const int i = threadIdx.x;
  const int single = i < run.head ? i : run.tail_first + i - run.head;
  if (single < count && i < 2 * Run<Storage>::SIZE) staged.run_ptr[single] = staged.y_smem[single];
}

// ---- planes_kernel ----
//
// A thread owns COLUMNS neighbouring columns of a band and walks down its input rows. Each row, read from shared memory
// 16 bytes at a time, goes into every output row that it belongs to; OPEN of them are under way. With 3 taps:
//
//      input row i   -> output i - 2 += w[2] * x      acc[0], complete: stored
//                       output i - 1 += w[1] * x      acc[1], acc[0] of the next row
//                       output i     += w[0] * x      acc[2], acc[1] of the next row
//
// With a stride of 2, a step takes two input rows and completes one output row; tap a + 2m of row a of a step belongs
// to the output that opened m steps ago.
template <int TAPS_, int STRIDE_, typename Storage_>
struct PlanesConfig {
  using Storage = Storage_;
  static constexpr int TAPS = TAPS_, STRIDE = STRIDE_, COLUMNS = 4;
  static constexpr int OPEN = (TAPS + STRIDE - 1) / STRIDE, WINDOW = (COLUMNS - 1) * STRIDE + TAPS;
  static constexpr int BLOCKS_PER_SM = TAPS == 7 ? 4 : TAPS == 5 ? 5 : 6;  // TAPS^2 weights are in registers
  static_assert(TAPS * TAPS <= kChunk, "an output is one chunk");
};

template <typename Config>
__global__ void __launch_bounds__(kThreads, Config::BLOCKS_PER_SM) planes_kernel(const Params params) {
  using Storage = typename Config::Storage;
  constexpr int TAPS = Config::TAPS, STRIDE = Config::STRIDE, COLUMNS = Config::COLUMNS, OPEN = Config::OPEN;
  extern __shared__ __align__(16) unsigned char modelnew_smem[];

  const Tile& tile = params.tile;
  const Place at = locate(params, blockIdx.x);
  const Stage<Storage> staged = stage<Storage>(modelnew_smem, params, at, TAPS);

  const int group = threadIdx.x % tile.groups, line = static_cast<int>(threadIdx.x) / tile.groups;
  const int plane = line / tile.bands, first_p = line % tile.bands * tile.band_rows, first_q = group * COLUMNS;
  const int outputs_p = least(at.rows_p - first_p, tile.band_rows);
  const int outputs_q = least(params.columns.outputs - at.q - first_q, COLUMNS);
  if ((plane < at.planes) & (outputs_p > 0) & (outputs_q > 0)) {
    const int64_t out_plane = at.first_plane + plane;
    const int in_plane = static_cast<int>(out_plane / params.multiplier - at.first_in);
    const float* const x_plane = staged.x_smem + in_plane * at.in_rows * tile.pitch;
    const float* const w = staged.w_smem + plane * tile.w_pitch;
    const Target<Storage> target = make_target(staged, params, at, plane);

    if (*staged.flag) {
#pragma unroll 1
      for (int i = 0; i < outputs_p; ++i)
#pragma unroll 1
        for (int j = 0; j < outputs_q; ++j)
          target.store(first_p + i, first_q + j,
                       exact_sum(x_plane, w, TAPS, params, at, at.p + first_p + i, at.q + first_q + j));
    } else {
      float w_frag[TAPS][TAPS];
#pragma unroll
      for (int r = 0; r < TAPS; ++r)
#pragma unroll
        for (int s = 0; s < TAPS; ++s) w_frag[r][s] = w[r * TAPS + s];
      float acc[OPEN][COLUMNS] = {};
      int row = (at.p + first_p) * STRIDE + params.rows.origin - at.first_row;
      const float* x_row = x_plane + row * tile.pitch + first_q * STRIDE;
      Storage* out_row = target.first + first_p * target.row_stride + first_q * target.column_stride;
      const bool by_vectors = tile.store == Store::kVectors;
      const auto multiply = [&](int a) {
        float x_frag[round_up(Config::WINDOW, 4)];
#pragma unroll
        for (int j = 0; j < round_up(Config::WINDOW, 4); j += 4) {
          const Pack<float, 4> four = *reinterpret_cast<const Pack<float, 4>*>(x_row + a * tile.pitch + j);
#pragma unroll
          for (int i = 0; i < 4; ++i) x_frag[j + i] = four.element[i];
        }
#pragma unroll
        for (int m = OPEN - 1; m >= 0; --m)
          if (a + m * STRIDE < TAPS)
#pragma unroll
            for (int s = 0; s < TAPS; ++s)
#pragma unroll
              for (int j = 0; j < COLUMNS; ++j)
                acc[OPEN - 1 - m][j] += w_frag[a + m * STRIDE][s] * x_frag[j * STRIDE + s];
      };
      const auto end_step = [&](int step) {
        if (step >= 0) {
          if (by_vectors) {
            float output[COLUMNS];
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) output[j] = acc[0][j] + target.bias;
            Pack<Storage, COLUMNS> four;
            narrow_all(output, four);
            *reinterpret_cast<Pack<Storage, COLUMNS>*>(out_row) = four;
          } else {
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
              if (j < outputs_q) narrow(acc[0][j] + target.bias, out_row[j * target.column_stride]);
          }
          out_row += target.row_stride;
        }
#pragma unroll
        for (int m = 0; m < OPEN; ++m)
#pragma unroll
          for (int j = 0; j < COLUMNS; ++j) acc[m][j] = m + 1 < OPEN ? acc[m + 1 < OPEN ? m + 1 : 0][j] : 0.f;
      };
      // Rows above the image, rows of it, rows below: without a branch around the multiply-adds, sums change registers
      // in them and need no moves.
      int step = 1 - OPEN;
#pragma unroll 1
      for (; (step < outputs_p) & (row + STRIDE <= 0); ++step, row += STRIDE, x_row += STRIDE * tile.pitch)
        end_step(step);
#pragma unroll 1
      for (; (step < outputs_p) & (row < at.in_rows); ++step, row += STRIDE, x_row += STRIDE * tile.pitch) {
#pragma unroll
        for (int a = 0; a < STRIDE; ++a)
          if (STRIDE == 1 || is_within(row + a, at.in_rows)) multiply(a);
        end_step(step);
      }
#pragma unroll 1
      for (; step < outputs_p; ++step) end_step(step);
    }
  }
  if (tile.store == Store::kRuns) store_run(staged, at.planes * at.rows_p * params.columns.outputs);
}

// ---- ring_kernel ----
//
// The windows of planes_kernel for planes that lie densely in memory, 7 columns a thread: image sides tend to be
// multiples of 7, and lanes an odd number of words apart meet different banks. Since an input row is needed only while
// it enters the sums, shared memory holds no image but a ring of chunks of rows, unpadded as they are in memory: copies
// need no arithmetic and are under way all the time, weights are loaded once for many images.
//
//      memory --cp.async--> slot 0 |  chunk i + 1  |  under way
//                           slot 1 |  chunk i      |--windows--> sums --> | outputs of chunk i | --16 bytes--> memory
//
// A step takes STRIDE input rows and completes at most one output row. Columns outside the image can be the first and
// last EDGE of a window: the last group of columns ends with the image, and may repeat outputs of the one before.
// Blocks on an SM, of kThreads threads each, as registers allow that hold TAPS^2 weights.
MODELNEW_HOST_DEVICE constexpr int ring_blocks_per_sm(int taps) { return taps == 7 ? 3 : 6; }

template <int TAPS_, int STRIDE_, typename Storage_>
struct RingConfig {
  using Storage = Storage_;
  static constexpr int TAPS = TAPS_, STRIDE = STRIDE_, COLUMNS = 7, EDGE = TAPS / 2;
  static constexpr int OPEN = (TAPS + STRIDE - 1) / STRIDE, WINDOW = (COLUMNS - 1) * STRIDE + TAPS;
  static constexpr int BLOCKS_PER_SM = ring_blocks_per_sm(TAPS);
  static_assert(TAPS * TAPS <= kChunk, "an output is one chunk");
  static_assert(COLUMNS % 2 == 1, "no bank conflicts");
  static_assert(2 * EDGE <= WINDOW, "edges do not meet");
};

// The steps of a band, and the input rows that they take. Step i completes output row i of the band.
struct Steps {
  int first, count, first_row;
};

MODELNEW_HOST_DEVICE inline Steps band_steps(const Axis& rows, int open, int first_p, int outputs_p) {
  const int row = first_p * rows.stride + rows.origin;
  const int skipped = row < 0 ? -row / rows.stride : 0;  // nothing but rows above the image
  return {1 - open + skipped, outputs_p + open - 1 - skipped, row + skipped * rows.stride};
}

// Some of them, and those of their input rows that exist.
struct Chunk {
  int step, behind;  // first step, last one + 1
  int row, first_row, rows;
};

MODELNEW_HOST_DEVICE inline Chunk chunk_of(const Axis& rows, const Steps& steps, int chunk, int chunk_steps) {
  const int first = chunk * chunk_steps, behind = least(first + chunk_steps, steps.count);
  Chunk at;
  at.step = steps.first + first;
  at.behind = steps.first + behind;
  at.row = steps.first_row + first * rows.stride;
  at.first_row = least(most(at.row, 0), rows.inputs);
  at.rows = least(steps.first_row + behind * rows.stride, rows.inputs) - at.first_row;
  return at;
}

// Runs of bytes between memory and shared memory, each copied by `lanes` threads.
struct Runs {
  int first, step, count;  // which of them are this thread's
  int lane, lanes;
  bool whole;  // a single run, of all threads: warps take turns at kRingBatch pieces of 32 vectors, distances constant
};

constexpr int kRingBatch = 4;

template <int BYTES>
__device__ inline void fetch_runs(const Runs& runs, uint32_t to_smem, int to_pitch, const char* from, int64_t pitch,
                                  int bytes, uint64_t policy) {
  if (runs.whole) {
    for (int i = (runs.lane / 32 * 32 * kRingBatch + runs.lane % 32) * BYTES; i < bytes;
         i += runs.lanes * kRingBatch * BYTES) {
      const uint32_t to = to_smem + i;
      const char* const piece = from + i;
#pragma unroll
      for (int k = 0; k < kRingBatch; ++k)
        if (i + k * 32 * BYTES < bytes)
          hopper::copy_async<BYTES>(to + k * 32 * BYTES, piece + k * 32 * BYTES, BYTES, policy);
    }
    return;
  }
  for (int run = runs.first; run < runs.count; run += runs.step)
    for (int i = runs.lane * BYTES; i < bytes; i += runs.lanes * BYTES)
      hopper::copy_async<BYTES>(to_smem + run * to_pitch + i, from + run * pitch + i, BYTES, policy);
}

template <int BYTES>
__device__ inline void write_runs(const Runs& runs, char* to, int64_t pitch, const char* from_smem, int from_pitch,
                                  int bytes) {
  using Vector = Pack<uint32_t, BYTES / 4>;
  // A batch's loads come before its first store.
  const auto write = [&](const char* piece_smem, char* piece, int i, int distance) {
    Vector value[kRingBatch];
#pragma unroll
    for (int k = 0; k < kRingBatch; ++k)
      value[k] = load_if(i + k * distance < bytes, reinterpret_cast<const Vector*>(piece_smem + k * distance));
#pragma unroll
    for (int k = 0; k < kRingBatch; ++k)
      if (i + k * distance < bytes) *reinterpret_cast<Vector*>(piece + k * distance) = value[k];
  };
  if (runs.whole) {
    for (int i = (runs.lane / 32 * 32 * kRingBatch + runs.lane % 32) * BYTES; i < bytes;
         i += runs.lanes * kRingBatch * BYTES)
      write(from_smem + i, to + i, i, 32 * BYTES);
    return;
  }
  const int step = runs.lanes * BYTES;
  for (int run = runs.first; run < runs.count; run += runs.step)
    for (int i = runs.lane * BYTES; i < bytes; i += kRingBatch * step)
      write(from_smem + run * from_pitch + i, to + run * pitch + i, i, step);
}

template <bool VALUE_>
struct Flag {
  static constexpr bool VALUE = VALUE_;
};

// A row's columns from `first_column` on, `x_row` pointing at the first one; zeros outside the image. In pairs that
// begin with columns of an even number, in an image of an even number of them: both are inside or neither is.
template <typename Config, bool PAIRS>
__device__ inline void load_window(float (&x_frag)[Config::WINDOW], const typename Config::Storage* x_row,
                                   int first_column, int W, bool exists) {
  using Storage = typename Config::Storage;
  constexpr int WINDOW = Config::WINDOW, EDGE = Config::EDGE, SINGLES = PAIRS ? WINDOW % 2 : WINDOW;
  const auto is_inside = [&](int j) {
    bool inside = exists;
    if (j < EDGE) inside &= first_column + j >= 0;
    if (j >= WINDOW - EDGE) inside &= first_column + j < W;
    return inside;
  };
#pragma unroll
  for (int j = 0; j < SINGLES; ++j) x_frag[j] = is_inside(j) ? widen(x_row[j]) : 0.f;
#pragma unroll
  for (int j = SINGLES; j < WINDOW; j += 2) {
    const Pack<Storage, 2> pair = load_if(is_inside(j), reinterpret_cast<const Pack<Storage, 2>*>(x_row + j));
    x_frag[j] = widen(pair.element[0]);
    x_frag[j + 1] = widen(pair.element[1]);
  }
}

// exact_sum, from global memory. `w` points at the first tap of one channel's filter.
template <typename Storage, typename Weight>
__device__ inline float exact_sum_of_pixel(const Storage* in_ptr, const Weight* w, int tap_pitch, const Params& params,
                                           int p, int q) {
  return exact_sum(params, 0, params.rows.inputs, p, q, [&](int r, int s, int row, int column) {
    return widen(w[(r * params.columns.taps + s) * tap_pitch]) *
           widen(in_ptr[row * params.in_stride[2] + column * params.in_stride[3]]);
  });
}

template <typename Config>
__global__ void __launch_bounds__(kThreads, Config::BLOCKS_PER_SM) ring_kernel(const Params params) {
  using Storage = typename Config::Storage;
  constexpr int TAPS = Config::TAPS, STRIDE = Config::STRIDE, COLUMNS = Config::COLUMNS, OPEN = Config::OPEN;
  constexpr int WINDOW = Config::WINDOW, BYTES = sizeof(Storage);
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  const Ring& ring = params.ring;
  int* const flag = reinterpret_cast<int*>(modelnew_smem);
  Storage* const y_smem = reinterpret_cast<Storage*>(modelnew_smem + kFlagBytes);
  float* const w_smem = reinterpret_cast<float*>(y_smem);  // until the first outputs
  Storage* const x_smem = reinterpret_cast<Storage*>(modelnew_smem + kFlagBytes + ring.out_bytes);

  // The block's channels, images and rows.
  const int thread = threadIdx.x, H = params.rows.inputs, W = params.columns.inputs, P = params.rows.outputs;
  const int Q = params.columns.outputs;
  const int first_k = static_cast<int>(blockIdx.x % ring.sets) * ring.planes;
  const int band = static_cast<int>(blockIdx.x / ring.sets % ring.bands);
  const int64_t part = blockIdx.x / ring.sets / ring.bands;
  const int64_t first_n = params.images * part / ring.parts, behind_n = params.images * (part + 1) / ring.parts;
  const int planes = least(ring.planes, params.channels - first_k);
  const int first_p = band * ring.band_rows, outputs_p = least(ring.band_rows, P - first_p);
  const Steps steps = band_steps(params.rows, OPEN, first_p, outputs_p);

  const Runs runs = {thread / ring.lanes, ring.threads / ring.lanes, ring.whole ? 1 : planes, thread % ring.lanes,
                     ring.lanes,          TAPS == 3 && ring.whole};
  const int run_planes = ring.whole ? planes : 1;
  // x is streamed, evict_first: it displaces itself, not others' lines in L2, which may have to be written first.
  const uint64_t policy = hopper::evict_first();
  int64_t ordered_n = first_n;
  int ordered_step = 0, ordered_slot = 0;
  // Orders the next chunk into the next slot.
  const auto order = [&] {
    if (ordered_n < behind_n) {
      const Chunk chunk = chunk_of(params.rows, steps, ordered_step, ring.steps);
      const uint32_t to = hopper::smem_address(x_smem) + ordered_slot * ring.slot_bytes;
      const char* const from = static_cast<const char*>(params.in_ptr) +
                               (((ordered_n * params.channels + first_k) * H + chunk.first_row) * W) * BYTES;
      const int64_t pitch = static_cast<int64_t>(H) * W * BYTES;
      const int bytes = run_planes * chunk.rows * W * BYTES, to_pitch = ring.in_pitch * BYTES;
      if (ring.in_vector == 16)
        fetch_runs<16>(runs, to, to_pitch, from, pitch, bytes, policy);
      else if (ring.in_vector == 8)
        fetch_runs<8>(runs, to, to_pitch, from, pitch, bytes, policy);
      else
        fetch_runs<4>(runs, to, to_pitch, from, pitch, bytes, policy);
      ordered_slot = ordered_slot + 1 == ring.slots ? 0 : ordered_slot + 1;
      if (++ordered_step * ring.steps >= steps.count) {
        ordered_step = 0;
        ++ordered_n;
      }
    }
    hopper::copies_commit();
  };
  for (int slot = 0; slot < ring.slots; ++slot) order();

  // Filters: all loads are under way before the first store.
  {
    const int weights = planes * TAPS * TAPS;
    const Storage* const w_ptr =
        static_cast<const Storage*>(params.w_ptr) + static_cast<int64_t>(first_k) * TAPS * TAPS;
    Storage value[TAPS * TAPS];
#pragma unroll
    for (int i = 0; i < TAPS * TAPS; ++i)
      value[i] = load_if(thread + i * ring.threads < weights, w_ptr + (thread + i * ring.threads));
    if (thread == 0) *flag = 0;
    __syncthreads();  // the flag is down before somebody raises it
    bool finite = true;
#pragma unroll
    for (int i = 0; i < TAPS * TAPS; ++i) {
      const int e = thread + i * ring.threads;
      if (e >= weights) break;
      const int tap = e % (TAPS * TAPS);
      const float weight = widen(value[i]);
      w_smem[params.flipped ? e - tap + (TAPS * TAPS - 1 - tap) : e] = weight;
      finite &= is_finite(weight);
    }
    if (!finite) *flag = 1;
    __syncthreads();  // w and the flag are complete
  }

  const int plane = thread / (ring.groups * ring.splits), split = thread / ring.groups % ring.splits;
  const int first_q = least(thread % ring.groups * COLUMNS, Q - COLUMNS);
  const int own_p = split * ring.split_rows, own_rows = least(ring.split_rows, outputs_p - own_p);
  const bool exists = plane < planes;
  const float bias = exists ? load_bias<Storage>(params, first_k + plane) : 0.f;
  const float* const w = w_smem + (exists ? plane : 0) * TAPS * TAPS;
  if (*flag) {
    hopper::copies_wait<0>();  // nothing comes behind the block's end
    if (!exists) return;
#pragma unroll 1
    for (int64_t n = first_n; n < behind_n; ++n) {
      const Storage* const in_plane =
          static_cast<const Storage*>(params.in_ptr) + (n * params.channels + first_k + plane) * H * W;
      Storage* const out_plane =
          plane_pointer<Storage>(params, n * params.channels + first_k + plane, first_p + own_p, first_q);
#pragma unroll 1
      for (int i = 0; i < own_rows; ++i)
#pragma unroll 1
        for (int j = 0; j < COLUMNS; ++j)
          narrow(exact_sum_of_pixel(in_plane, w, 1, params, first_p + own_p + i, first_q + j) + bias,
                 out_plane[i * Q + j]);
    }
    return;
  }

  float w_frag[TAPS][TAPS];
#pragma unroll
  for (int r = 0; r < TAPS; ++r)
#pragma unroll
    for (int s = 0; s < TAPS; ++s) w_frag[r][s] = w[r * TAPS + s];
  const int first_column = first_q * STRIDE + params.columns.origin;
  const Steps own = band_steps(params.rows, OPEN, first_p + own_p, own_rows);
  int slot = 0;
#pragma unroll 1
  for (int64_t n = first_n; n < behind_n; ++n) {
    float acc[OPEN][COLUMNS] = {};
#pragma unroll 1
    for (int i = 0; i * ring.steps < steps.count; ++i) {
      const Chunk chunk = chunk_of(params.rows, steps, i, ring.steps);
      const int first_output = most(chunk.step, 0);
      if (ring.slots == 1)
        hopper::copies_wait<0>();
      else if (ring.slots == 2)
        hopper::copies_wait<1>();
      else
        hopper::copies_wait<2>();
      __syncthreads();  // the chunk is there, and the outputs before it have left
      if (exists) {
        // With a whole image in a chunk, a thread has its own steps.
        int row = ring.whole ? own.first_row : chunk.row, step = ring.whole ? own.first : chunk.step;
        const int behind = ring.whole ? own.first + own.count : chunk.behind;
        const Storage* x_row = x_smem + (slot * ring.slot_bytes / BYTES + plane * ring.in_pitch +
                                         (row - chunk.first_row) * W + first_column);
        Storage* y_row = y_smem + (plane * ring.out_pitch + own_p * Q + first_q);
        const auto end_step = [&] {
          if (step >= 0) {
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) narrow(acc[0][j] + bias, y_row[j]);
            y_row += Q;
          }
#pragma unroll
          for (int m = 0; m < OPEN; ++m)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) acc[m][j] = m + 1 < OPEN ? acc[m + 1 < OPEN ? m + 1 : 0][j] : 0.f;
          ++step;
          row += STRIDE;
          x_row += STRIDE * W;
        };
        const auto multiply = [&](auto pairs) {
        // Without a branch around the multiply-adds, sums change registers in them and need no moves.
#pragma unroll 1
          while ((step < behind) & (row < H)) {
#pragma unroll
            for (int a = 0; a < STRIDE; ++a) {
              float x_frag[WINDOW];
              load_window<Config, decltype(pairs)::VALUE>(x_frag, x_row + a * W, first_column, W,
                                                          STRIDE == 1 || is_within(row + a, H));
#pragma unroll
              for (int m = OPEN - 1; m >= 0; --m)
                if (a + m * STRIDE < TAPS)
#pragma unroll
                  for (int s = 0; s < TAPS; ++s)
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j)
                      acc[OPEN - 1 - m][j] += w_frag[a + m * STRIDE][s] * x_frag[j * STRIDE + s];
            }
            end_step();
          }
        };
        if (STRIDE == 2 && ring.pairs)
          multiply(Flag<STRIDE == 2>{});
        else
          multiply(Flag<false>{});
#pragma unroll 1
        while (step < behind) end_step();
      }
      __syncthreads();  // the outputs are complete, and nobody needs the slot
      order();
      slot = slot + 1 == ring.slots ? 0 : slot + 1;
      if (chunk.behind > first_output) {
        char* const to = static_cast<char*>(params.out_ptr) +
                         (((n * params.channels + first_k) * P + first_p + first_output) * Q) * BYTES;
        const char* const from = reinterpret_cast<const char*>(y_smem);
        const int64_t pitch = static_cast<int64_t>(P) * Q * BYTES;
        const int bytes = run_planes * (chunk.behind - first_output) * Q * BYTES, from_pitch = ring.out_pitch * BYTES;
        if (ring.out_vector == 16)
          write_runs<16>(runs, to, pitch, from, from_pitch, bytes);
        else if (ring.out_vector == 8)
          write_runs<8>(runs, to, pitch, from, from_pitch, bytes);
        else
          write_runs<4>(runs, to, pitch, from, from_pitch, bytes);
      }
    }
  }
}

// ---- planes_any_kernel ----
//
// Filters that are not held in registers: a thread owns ROWS x COLUMNS outputs and goes over the filter, TAPS taps of a
// row at a time, read as one piece. Without a stride, its columns are a dilation apart: neighbouring taps then read
// neighbouring ones of the same values, which stay in registers. COLUMNS is odd, so that lanes side by side, COLUMNS
// words apart, meet different banks.
//
//      x_frag   . . . . . . . .        columns first_q + {0, 1, ... 7} * dilation of an input row
//      tap 0    ^ ^ ^ ^ ^
//      tap 1      ^ ^ ^ ^ ^
//      tap 3          ^ ^ ^ ^ ^
template <typename Storage_, bool SLIDES_>
struct PlanesAnyConfig {
  using Storage = Storage_;
  static constexpr bool SLIDES = SLIDES_;
  static constexpr int ROWS = 4, COLUMNS = 5, TAPS = 4, BLOCKS_PER_SM = 4;
  static_assert(COLUMNS % 2 == 1, "no bank conflicts");
};

template <typename Config>
struct AnySums {
  static constexpr int ROWS = Config::ROWS, COLUMNS = Config::COLUMNS;
  float acc[ROWS][COLUMNS], total[ROWS][COLUMNS];
  float x_frag[ROWS][COLUMNS - 1 + Config::TAPS];

  __device__ void end_chunk() {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) add_chunk(acc[i][j], total[i][j]);
  }

  // TAPS taps from x_plane[x_row[i] + offset] on.
  template <int TAPS>
  __device__ void multiply(const float* w, const float* x_plane, const int (&x_row)[ROWS], const bool (&inside)[ROWS],
                           int offset, int output_step, int tap_step) {
    float w_frag[TAPS];
    if constexpr (TAPS == 4) {
      const Pack<float, 4> four = *reinterpret_cast<const Pack<float, 4>*>(w);
#pragma unroll
      for (int s = 0; s < TAPS; ++s) w_frag[s] = four.element[s];
    } else {
#pragma unroll
      for (int s = 0; s < TAPS; ++s) w_frag[s] = w[s];
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (!inside[i]) continue;
      if constexpr (Config::SLIDES) {
#pragma unroll
        for (int s = 0; s < TAPS; ++s)
          x_frag[i][COLUMNS - 1 + s] = x_plane[x_row[i] + offset + (COLUMNS - 1 + s) * tap_step];
#pragma unroll
        for (int s = 0; s < TAPS; ++s)
#pragma unroll
          for (int j = 0; j < COLUMNS; ++j) acc[i][j] += w_frag[s] * x_frag[i][j + s];
#pragma unroll
        for (int j = 0; j < COLUMNS - 1; ++j) x_frag[i][j] = x_frag[i][j + TAPS];
      } else {
#pragma unroll
        for (int s = 0; s < TAPS; ++s)
#pragma unroll
          for (int j = 0; j < COLUMNS; ++j)
            acc[i][j] += w_frag[s] * x_plane[x_row[i] + offset + j * output_step + s * tap_step];
      }
    }
  }
};

template <typename Config>
__global__ void __launch_bounds__(kThreads, Config::BLOCKS_PER_SM) planes_any_kernel(const Params params) {
  using Storage = typename Config::Storage;
  constexpr int ROWS = Config::ROWS, COLUMNS = Config::COLUMNS, TAPS = Config::TAPS;
  extern __shared__ __align__(16) unsigned char modelnew_smem[];

  const Tile& tile = params.tile;
  const Place at = locate(params, blockIdx.x);
  const int R = params.rows.taps, S = params.columns.taps, row_pitch = round_up(S, TAPS);
  const Stage<Storage> staged = stage<Storage>(modelnew_smem, params, at, row_pitch);

  // Threads side by side: phase of the dilation first, then groups of COLUMNS columns.
  const int spacing = Config::SLIDES ? params.columns.dilation : 1;
  const int group = threadIdx.x % tile.groups, line = static_cast<int>(threadIdx.x) / tile.groups;
  const int plane = line / tile.bands, first_p = line % tile.bands * ROWS;
  const int first_q = group / spacing * COLUMNS * spacing + group % spacing;
  const int outputs_p = least(at.rows_p - first_p, ROWS);
  if ((plane < at.planes) & (outputs_p > 0) & (at.q + first_q < params.columns.outputs)) {
    const int64_t out_plane = at.first_plane + plane;
    const int in_plane = static_cast<int>(out_plane / params.multiplier - at.first_in);
    const float* const x_plane = staged.x_smem + in_plane * at.in_rows * tile.pitch;
    const float* const w = staged.w_smem + plane * tile.w_pitch;
    const Target<Storage> target = make_target(staged, params, at, plane);
    const auto store = [&](int i, int j, float value) {
      const int q = first_q + j * spacing;
      if ((i < outputs_p) & (at.q + q < params.columns.outputs)) target.store(first_p + i, q, value);
    };

    if (*staged.flag) {
#pragma unroll 1
      for (int i = 0; i < ROWS; ++i)
#pragma unroll 1
        for (int j = 0; j < COLUMNS; ++j)
          store(i, j, exact_sum(x_plane, w, row_pitch, params, at, at.p + first_p + i, at.q + first_q + j * spacing));
    } else {
      AnySums<Config> sums;
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) sums.acc[i][j] = sums.total[i][j] = 0;
      const int tap_step = params.columns.dilation, output_step = spacing * params.columns.stride;
      const int first_row = (at.p + first_p) * params.rows.stride + params.rows.origin - at.first_row;
      int terms = 0;
#pragma unroll 1
      for (int r = 0; r < R; ++r) {
        if (terms + S > kChunk) {
          sums.end_chunk();
          terms = 0;
        }
        terms += S;
        int x_row[ROWS];
        bool inside[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
          const int row = first_row + i * params.rows.stride + r * params.rows.dilation;
          inside[i] = (i < outputs_p) & is_within(row, at.in_rows);
          x_row[i] = (inside[i] ? row : 0) * tile.pitch + first_q * params.columns.stride;
          if (Config::SLIDES && inside[i]) {
#pragma unroll
            for (int j = 0; j < COLUMNS - 1; ++j) sums.x_frag[i][j] = x_plane[x_row[i] + j * tap_step];
          }
        }
        const float* w_row = w + r * row_pitch;
        int s = 0;
#pragma unroll 1
        for (; s + TAPS <= S; s += TAPS)
          sums.template multiply<TAPS>(w_row + s, x_plane, x_row, inside, s * tap_step, output_step, tap_step);
#pragma unroll 1
        for (; s < S; ++s)
          sums.template multiply<1>(w_row + s, x_plane, x_row, inside, s * tap_step, output_step, tap_step);
      }
      sums.end_chunk();
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) store(i, j, sums.total[i][j] + sums.acc[i][j]);
    }
  }
  if (tile.store == Store::kRuns) store_run(staged, at.planes * at.rows_p * params.columns.outputs);
}

// ---- pixels_kernel ----
//
// The windows of planes_kernel, fed from global memory: lanes own neighbouring channels (CHANNELS of them each), so a
// warp's load is one run. The input rows of a step are loaded a step ahead. Threads of a block are neighbours along a
// row of the image, and the columns that two of them read come from L1 the second time; the filters of a block's
// channels are turned from [channel][tap] to one register a tap by way of shared memory.
template <int TAPS_, int STRIDE_, int CHANNELS_, typename Storage_>
struct PixelsConfig {
  using Storage = Storage_;
  static constexpr int TAPS = TAPS_, STRIDE = STRIDE_, CHANNELS = CHANNELS_, COLUMNS = 4;
  static constexpr int OPEN = (TAPS + STRIDE - 1) / STRIDE, WINDOW = (COLUMNS - 1) * STRIDE + TAPS;
  static constexpr int STEPS = TAPS == 3 && STRIDE == 1 ? 2 : 1;  // at once
  static constexpr int BLOCKS_PER_SM = pixels_blocks_per_sm(TAPS, STRIDE);
  static_assert(TAPS * TAPS <= kChunk, "an output is one chunk");
};

// Where a thread of the pixels kernels works.
struct Spot {
  int64_t n;
  int k, p, q;
  bool exists;
};

__device__ inline Spot locate_spot(const Params& params, unsigned block, int channels, int columns) {
  const Strip& strip = params.strip;
  const int lane = threadIdx.x % strip.lanes, item = static_cast<int>(threadIdx.x) / strip.lanes;
  Spot spot;
  spot.k = (static_cast<int>(block % strip.chunks) * strip.lanes + lane) * channels;
  int64_t rest = static_cast<int64_t>(block / strip.chunks) * strip.items + item;
  spot.q = static_cast<int>(rest % strip.groups) * columns;
  rest /= strip.groups;
  spot.p = static_cast<int>(rest % strip.bands) * strip.band_rows;
  spot.n = rest / strip.bands;
  spot.exists = (item < strip.items) & (spot.k < params.channels) & (spot.n < params.images);
  return spot;
}

// Output rows that a step adds to, in registers: the first one is complete then, and makes room for another.
template <int OPEN, int COLUMNS, int CHANNELS>
struct OpenRows {
  float acc[OPEN][COLUMNS][CHANNELS] = {};

  // x: the rows of a step.
  template <int TAPS, int STRIDE, typename Channels, int WINDOW>
  __device__ __forceinline__ void multiply(const float (&w_frag)[CHANNELS][TAPS][TAPS],
                                           const Channels (&x_frag)[STRIDE][WINDOW]) {
#pragma unroll
    for (int a = 0; a < STRIDE; ++a)
#pragma unroll
      for (int m = OPEN - 1; m >= 0; --m)
        if (a + m * STRIDE < TAPS)
#pragma unroll
          for (int s = 0; s < TAPS; ++s)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
              for (int v = 0; v < CHANNELS; ++v)
                acc[OPEN - 1 - m][j][v] += w_frag[v][a + m * STRIDE][s] * widen(x_frag[a][j * STRIDE + s].element[v]);
  }

  template <typename Storage>
  __device__ __forceinline__ void store_first(Storage* out_row, int64_t column_stride, int columns,
                                              const float (&bias)[CHANNELS]) const {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      float output[CHANNELS];
#pragma unroll
      for (int v = 0; v < CHANNELS; ++v) output[v] = acc[0][j][v] + bias[v];
      Pack<Storage, CHANNELS> outputs;
      narrow_all(output, outputs);
      if (j < columns) *reinterpret_cast<Pack<Storage, CHANNELS>*>(out_row + j * column_stride) = outputs;
    }
  }

  __device__ __forceinline__ void drop_first() {
#pragma unroll
    for (int m = 0; m < OPEN; ++m)
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
        for (int v = 0; v < CHANNELS; ++v) acc[m][j][v] = m + 1 < OPEN ? acc[m + 1 < OPEN ? m + 1 : 0][j][v] : 0.f;
  }
};

template <typename Config>
__global__ void __launch_bounds__(kThreads, Config::BLOCKS_PER_SM) pixels_kernel(const Params params) {
  using Storage = typename Config::Storage;
  constexpr int TAPS = Config::TAPS, STRIDE = Config::STRIDE, CHANNELS = Config::CHANNELS, OPEN = Config::OPEN;
  constexpr int COLUMNS = Config::COLUMNS, WINDOW = Config::WINDOW, STEPS = Config::STEPS, ROWS = STEPS * STRIDE;
  using Channels = Pack<Storage, CHANNELS>;
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  int* const flag = reinterpret_cast<int*>(modelnew_smem);
  float* const w_smem = reinterpret_cast<float*>(modelnew_smem + kFlagBytes);

  const Strip& strip = params.strip;
  const Spot spot = locate_spot(params, blockIdx.x, CHANNELS, COLUMNS);
  const Storage* const in_ptr = static_cast<const Storage*>(params.in_ptr) + spot.n * params.in_stride[0] + spot.k;
  const int first_row = spot.p * STRIDE + params.rows.origin, first_column = spot.q * STRIDE + params.columns.origin;
  const int64_t row_stride = params.in_stride[2], column_stride = params.in_stride[3];

  // The first step that meets the image; those before it leave nothing but the bias.
  const int skipped = first_row < 0 ? -first_row / ROWS : 0;
  int step = 1 - OPEN + skipped * STEPS, row = first_row + skipped * ROWS;
  unsigned columns_inside = 0;  // a bit for each column of the window
#pragma unroll
  for (int j = 0; j < WINDOW; ++j)
    columns_inside |= spot.exists & is_within(first_column + j, params.columns.inputs) ? 1u << j : 0u;
  // Loads the rows of the step that begins at `row`.
  const Storage* row_ptr = in_ptr + (row * row_stride + first_column * column_stride);
  Channels ahead[ROWS][WINDOW];
  const auto load = [&] {
#pragma unroll
    for (int a = 0; a < ROWS; ++a, row_ptr += row_stride) {
      const unsigned inside = is_within(row + a, params.rows.inputs) ? columns_inside : 0;
#pragma unroll
      for (int j = 0; j < WINDOW; ++j)
        ahead[a][j] = load_if(inside >> j & 1, reinterpret_cast<const Channels*>(row_ptr + j * column_stride));
    }
  };
  load();

  if (threadIdx.x == 0) *flag = 0;
  __syncthreads();  // the flag is down before somebody raises it
  const int first_k = static_cast<int>(blockIdx.x % strip.chunks) * strip.lanes * CHANNELS;
  stage_filters<Storage>(w_smem, flag, params, first_k, least(strip.lanes * CHANNELS, params.channels - first_k), TAPS,
                         TAPS, TAPS, strip.w_pitch);
  __syncthreads();  // w and the flag are complete
  if (!spot.exists) return;

  const int outputs_p = least(params.rows.outputs - spot.p, strip.band_rows);
  const int outputs_q = least(params.columns.outputs - spot.q, COLUMNS);
  Storage* out_row = static_cast<Storage*>(params.out_ptr) + spot.n * params.out_stride[0] + spot.k +
                     (spot.p * params.out_stride[2] + spot.q * params.out_stride[3]);
  const float* const w = w_smem + static_cast<int>(threadIdx.x) % strip.lanes * CHANNELS * strip.w_pitch;
  float bias[CHANNELS];
#pragma unroll
  for (int v = 0; v < CHANNELS; ++v) bias[v] = load_bias<Storage>(params, spot.k + v);

  if (*flag) {
#pragma unroll 1
    for (int i = 0; i < outputs_p; ++i)
#pragma unroll 1
      for (int j = 0; j < outputs_q; ++j)
#pragma unroll
        for (int v = 0; v < CHANNELS; ++v)
          narrow(exact_sum_of_pixel(in_ptr + v, w + v * strip.w_pitch, 1, params, spot.p + i, spot.q + j) + bias[v],
                 out_row[i * params.out_stride[2] + j * params.out_stride[3] + v]);
    return;
  }

  float w_frag[CHANNELS][TAPS][TAPS];
#pragma unroll
  for (int v = 0; v < CHANNELS; ++v)
#pragma unroll
    for (int r = 0; r < TAPS; ++r)
#pragma unroll
      for (int s = 0; s < TAPS; ++s) w_frag[v][r][s] = w[v * strip.w_pitch + r * TAPS + s];
  OpenRows<OPEN, COLUMNS, CHANNELS> open;
  const auto end_step = [&](int step) {
    if ((step >= 0) & (step < outputs_p)) {
      open.store_first(out_row, params.out_stride[3], outputs_q, bias);
      out_row += params.out_stride[2];
    }
    open.drop_first();
  };
  // Steps above the image, steps that meet it, steps below. Rows outside, in a step with others inside, are zeros.
#pragma unroll 1
  for (int above = 0; above < least(step, outputs_p); ++above) end_step(above);
#pragma unroll 1
  for (; (step < outputs_p) & (row < params.rows.inputs); step += STEPS) {
    Channels x_frag[STEPS][STRIDE][WINDOW];
#pragma unroll
    for (int a = 0; a < ROWS; ++a)
#pragma unroll
      for (int j = 0; j < WINDOW; ++j) x_frag[a / STRIDE][a % STRIDE][j] = ahead[a][j];
    row += ROWS;
    load();
#pragma unroll
    for (int u = 0; u < STEPS; ++u) {
      open.multiply(w_frag, x_frag[u]);
      end_step(step + u);
    }
  }
#pragma unroll 1
  for (; step < outputs_p; ++step) end_step(step);
}

// ---- queue_kernel ----
//
// pixels_kernel for 16-bit tensors. So many bytes have to be under way that registers do not hold them: each thread
// copies its own windows into shared memory, DEPTH steps ahead, and reads nothing but what it has copied, so that it
// waits for nobody. Threads are numbered through, lanes first: all are busy, however many lanes there are.
//
//      queue    [slot][row of a step][column of the window][thread]    CHANNELS elements each: no bank conflicts
//      w        [channel][tap] as in memory, of the block's channels
//
// Columns that two threads read come from L1 the second time, but at the ends of a block.
template <int SHAPE, typename Storage_>
struct QueueConfig {
  using Storage = Storage_;
  static constexpr QueueShape kShape = kQueueShapes[SHAPE];
  static constexpr int BYTES = kShape.channels * sizeof(Storage);  // of a copy
  static_assert(kShape.taps * kShape.taps <= kChunk, "an output is one chunk");
  static_assert(BYTES == 4 || BYTES == 8, "what copies by way of L1 take");
};

template <typename Config>
__global__ void __launch_bounds__(kThreads, Config::kShape.blocks_per_sm) queue_kernel(const Params params) {
  using Storage = typename Config::Storage;
  constexpr QueueShape kShape = Config::kShape;
  constexpr int TAPS = kShape.taps, STRIDE = kShape.stride, CHANNELS = kShape.channels, OPEN = kShape.open();
  constexpr int COLUMNS = kShape.columns, WINDOW = kShape.window(), DEPTH = kShape.depth, BYTES = Config::BYTES;
  constexpr int SLOT_BYTES = kShape.slot_bytes(), QUEUE_BYTES = kShape.queue_bytes(), FILTER = TAPS * TAPS;
  using Channels = Pack<Storage, CHANNELS>;
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  const Storage* const w_smem = reinterpret_cast<const Storage*>(modelnew_smem + QUEUE_BYTES);

  // The thread's channels, columns, rows and image.
  const Strip& strip = params.strip;
  const unsigned chunk = blockIdx.x % strip.chunks, number = blockIdx.x / strip.chunks * kThreads + threadIdx.x;
  unsigned item = number / strip.lanes;
  const int lane = static_cast<int>(number % strip.lanes);
  const int first_k = static_cast<int>(chunk) * strip.lanes * CHANNELS, k = first_k + lane * CHANNELS;
  const int q = static_cast<int>(item % strip.groups) * COLUMNS;
  item /= strip.groups;
  const int p = static_cast<int>(item % strip.bands) * strip.band_rows;
  const int64_t n = item / strip.bands;
  const bool exists = (n < params.images) & (k < params.channels);
  const int outputs_p = exists ? least(params.rows.outputs - p, strip.band_rows) : 0;
  const int outputs_q = least(params.columns.outputs - q, COLUMNS);

  // Steps above the image that complete no output of the band are left out, those below it are no copies.
  const int first_row = p * STRIDE + params.rows.origin, first_column = q * STRIDE + params.columns.origin;
  const int skipped = first_row < 0 ? least(-first_row / STRIDE, OPEN - 1) : 0;
  int step = 1 - OPEN + skipped, row = first_row + skipped * STRIDE;
  unsigned columns_inside = 0;  // BYTES for each column of the window, a bit each
#pragma unroll
  for (int j = 0; j < WINDOW; ++j)
    columns_inside |= is_within(first_column + j, params.columns.inputs) ? static_cast<unsigned>(BYTES) << j : 0u;
  const int64_t row_stride = params.in_stride[2], column_stride = params.in_stride[3];
  const Storage* const in_ptr = static_cast<const Storage*>(params.in_ptr) + n * params.in_stride[0] + k;
  const Storage* row_ptr = in_ptr + (row * row_stride + first_column * column_stride);
  const uint64_t policy = hopper::evict_first();
  const uint32_t queue_smem = hopper::smem_address(modelnew_smem) + threadIdx.x * BYTES;

  int to_order = outputs_p - step;  // steps
  if (row + to_order * STRIDE > params.rows.inputs + STRIDE - 1)
    to_order = most((params.rows.inputs + STRIDE - 1 - row) / STRIDE, 0);
  if (!exists) to_order = 0;
  const int behind = step + to_order;  // the first step that is no copy
  const auto order = [&](int slot) {
    if (to_order > 0) {
      --to_order;
#pragma unroll
      for (int a = 0; a < STRIDE; ++a, ++row, row_ptr += row_stride) {
        const unsigned inside = is_within(row, params.rows.inputs) ? columns_inside : 0;
#pragma unroll
        for (int j = 0; j < WINDOW; ++j)
          hopper::copy_async<BYTES>(queue_smem + slot + (a * WINDOW + j) * kThreads * BYTES,
                                    row_ptr + j * column_stride, static_cast<int>(inside >> j & BYTES), policy);
      }
    }
    hopper::copies_commit();
  };
  {
    const int packs = least(strip.lanes, params.channels / CHANNELS - static_cast<int>(chunk) * strip.lanes) * FILTER;
    const Channels* const w_ptr =
        reinterpret_cast<const Channels*>(static_cast<const Storage*>(params.w_ptr) + int64_t{first_k} * FILTER);
#pragma unroll 1
    for (int i = threadIdx.x; i < packs; i += kThreads)
      hopper::copy_async<BYTES>(hopper::smem_address(w_smem) + i * BYTES, w_ptr + i, BYTES, policy);
  }
#pragma unroll 1
  for (int slot = 0; slot < DEPTH; ++slot) order(slot * SLOT_BYTES);
  float bias[CHANNELS];
#pragma unroll
  for (int v = 0; v < CHANNELS; ++v) bias[v] = exists ? load_bias<Storage>(params, k + v) : 0.f;
  hopper::copies_wait<DEPTH - 1>();
  __syncthreads();  // everybody's part of w is there
  if (!exists) return;

  float w_frag[CHANNELS][TAPS][TAPS];
  float finite = 0;  // or NaN, if a weight is not
  {
    const Channels* const w = reinterpret_cast<const Channels*>(w_smem + lane * CHANNELS * FILTER);
    Storage weight[CHANNELS * FILTER];
#pragma unroll
    for (int i = 0; i < FILTER; ++i) {
      const Channels pack = w[i];
#pragma unroll
      for (int v = 0; v < CHANNELS; ++v) weight[i * CHANNELS + v] = pack.element[v];
    }
#pragma unroll
    for (int v = 0; v < CHANNELS; ++v)
#pragma unroll
      for (int tap = 0; tap < FILTER; ++tap) {
        // Both values and a choice: an index that is chosen would put them into local memory.
        const float forward = widen(weight[v * FILTER + tap]), turned = widen(weight[v * FILTER + FILTER - 1 - tap]);
        w_frag[v][tap / TAPS][tap % TAPS] = params.flipped ? turned : forward;
        finite += w_frag[v][tap / TAPS][tap % TAPS] * 0.f;
      }
  }
  Storage* out_row = static_cast<Storage*>(params.out_ptr) + n * params.out_stride[0] + k +
                     (p * params.out_stride[2] + q * params.out_stride[3]);
  if (finite != 0) {
    hopper::copies_wait<0>();  // nothing comes behind the block's end
    const int tap_pitch = params.flipped ? -1 : 1;
#pragma unroll 1
    for (int v = 0; v < CHANNELS; ++v) {
      const Storage* const w = w_smem + ((lane * CHANNELS + v) * FILTER + (params.flipped ? FILTER - 1 : 0));
      const float bias_of_channel = load_bias<Storage>(params, k + v);
#pragma unroll 1
      for (int i = 0; i < outputs_p; ++i)
#pragma unroll 1
        for (int j = 0; j < outputs_q; ++j)
          narrow(exact_sum_of_pixel(in_ptr + v, w, tap_pitch, params, p + i, q + j) + bias_of_channel,
                 out_row[i * params.out_stride[2] + j * params.out_stride[3] + v]);
    }
    return;
  }

  OpenRows<OPEN, COLUMNS, CHANNELS> open;
  const auto end_step = [&] {
    if (step >= 0) {
      open.store_first(out_row, params.out_stride[3], outputs_q, bias);
      out_row += params.out_stride[2];
    }
    open.drop_first();
    ++step;
  };
  int slot = 0;
#pragma unroll 1
  while (step < behind) {
    hopper::copies_wait<DEPTH - 1>();
    const Channels* const x_smem = reinterpret_cast<const Channels*>(modelnew_smem + slot) + threadIdx.x;
    Channels x_frag[STRIDE][WINDOW];
#pragma unroll
    for (int a = 0; a < STRIDE; ++a)
#pragma unroll
      for (int j = 0; j < WINDOW; ++j) x_frag[a][j] = x_smem[(a * WINDOW + j) * kThreads];
    order(slot);
    slot = slot + SLOT_BYTES == QUEUE_BYTES ? 0 : slot + SLOT_BYTES;
    open.multiply(w_frag, x_frag);
    end_step();
  }
#pragma unroll 1
  while (step < outputs_p) end_step();
}

// ---- pixels_any_kernel ----
//
// Lanes own neighbouring channels, a thread COLUMNS outputs of a row and one after the other all rows of its band.
// Filters lie in shared memory as [tap][lane]: no bank conflicts. Without a stride, a thread's columns are a dilation
// apart, and each tap needs one new value.
template <typename Storage_, bool SLIDES_>
struct PixelsAnyConfig {
  using Storage = Storage_;
  static constexpr bool SLIDES = SLIDES_;
  static constexpr int COLUMNS = 8, BLOCKS_PER_SM = SLIDES ? 6 : 5;
};

template <typename Config>
__global__ void __launch_bounds__(kThreads, Config::BLOCKS_PER_SM) pixels_any_kernel(const Params params) {
  using Storage = typename Config::Storage;
  constexpr int COLUMNS = Config::COLUMNS;
  constexpr bool SLIDES = Config::SLIDES;
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  int* const flag = reinterpret_cast<int*>(modelnew_smem);
  float* const w_smem = reinterpret_cast<float*>(modelnew_smem + kFlagBytes);

  const Strip& strip = params.strip;
  const int R = params.rows.taps, S = params.columns.taps, lanes = strip.lanes;
  const int spacing = SLIDES ? params.columns.dilation : 1;
  Spot spot = locate_spot(params, blockIdx.x, 1, 1);
  spot.q = spot.q / spacing * COLUMNS * spacing + spot.q % spacing;

  if (threadIdx.x == 0) *flag = 0;
  __syncthreads();  // the flag is down before somebody raises it
  const int first_k = static_cast<int>(blockIdx.x % strip.chunks) * lanes;
  bool finite = true;
  for (int i = threadIdx.x; i < lanes * R * S; i += kThreads) {
    const int filter = i / (R * S), tap = i % (R * S);
    const int r = params.flipped ? R - 1 - tap / S : tap / S, s = params.flipped ? S - 1 - tap % S : tap % S;
    const float weight =
        widen(load_if(first_k + filter < params.channels,
                      static_cast<const Storage*>(params.w_ptr) +
                          ((first_k + filter) * params.w_stride_k + r * params.w_stride_r + s * params.w_stride_s)));
    w_smem[tap * lanes + filter] = weight;
    finite &= is_finite(weight);
  }
  if (!finite) *flag = 1;
  __syncthreads();  // w and the flag are complete
  if (!spot.exists | (spot.q >= params.columns.outputs)) return;

  const Storage* const in_ptr = static_cast<const Storage*>(params.in_ptr) + spot.n * params.in_stride[0] +
                                spot.k / params.multiplier * params.in_stride[1];
  const float* const w = w_smem + static_cast<int>(threadIdx.x) % lanes;
  const float bias = load_bias<Storage>(params, spot.k);
  const int outputs_p = least(params.rows.outputs - spot.p, strip.band_rows);
  const int first_column = spot.q * params.columns.stride + params.columns.origin;
  const int output_step = spacing * params.columns.stride, tap_step = params.columns.dilation;
#pragma unroll 1
  for (int p = spot.p; p < spot.p + outputs_p; ++p) {
    Storage* const out_row = static_cast<Storage*>(params.out_ptr) + spot.n * params.out_stride[0] +
                             spot.k * params.out_stride[1] + p * params.out_stride[2];
    const auto store = [&](int j, float value) {
      const int q = spot.q + j * spacing;
      if (q < params.columns.outputs) narrow(value + bias, out_row[q * params.out_stride[3]]);
    };
    if (*flag) {
#pragma unroll 1
      for (int j = 0; j < COLUMNS; ++j) store(j, exact_sum_of_pixel(in_ptr, w, lanes, params, p, spot.q + j * spacing));
      continue;
    }
    float acc[COLUMNS] = {}, total[COLUMNS] = {};
    const auto end_chunk = [&] {
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) add_chunk(acc[j], total[j]);
    };
    int terms = 0;
#pragma unroll 1
    for (int r = 0; r < R; ++r) {
      const int row = p * params.rows.stride + r * params.rows.dilation + params.rows.origin;
      if (!is_within(row, params.rows.inputs)) continue;
      if (terms + S > kChunk) {
        end_chunk();
        terms = 0;
      }
      terms += S;
      const Storage* const x_row = in_ptr + row * params.in_stride[2];
      const auto load = [&](int column) {
        return widen(load_if(is_within(column, params.columns.inputs), x_row + column * params.in_stride[3]));
      };
      float x_frag[COLUMNS];
      if (SLIDES) {
#pragma unroll
        for (int j = 0; j < COLUMNS - 1; ++j) x_frag[j] = load(first_column + j * tap_step);
      }
#pragma unroll 2
      for (int s = 0; s < S; ++s) {
        const float w_frag = w[(r * S + s) * lanes];
        if (SLIDES) {
          x_frag[COLUMNS - 1] = load(first_column + (COLUMNS - 1 + s) * tap_step);
        } else {
#pragma unroll
          for (int j = 0; j < COLUMNS; ++j) x_frag[j] = load(first_column + j * output_step + s * tap_step);
        }
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) acc[j] += w_frag * x_frag[j];
#pragma unroll
        for (int j = 0; j < COLUMNS - 1; ++j) x_frag[j] = x_frag[j + 1];
      }
    }
    end_chunk();
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) store(j, total[j] + acc[j]);
  }
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// ---- Plans ----

enum class Kernel { kPlanes, kPlanesAny, kRing, kPixels, kPixelsAny, kQueue };

struct Plan {
  bool exists;
  Kernel kernel;
  bool slides;
  Tile tile;
  Ring ring;
  Strip strip;
  double cost;
};

constexpr int kVectorColumns = 4, kRingColumns = 7, kAnyRows = 4, kAnyColumns = 5, kPixelColumns = 4,
              kAnyPixelColumns = 8;

inline Axis row_axis(const Problem& problem, Operator op) {
  return make_axis(op, problem.H, problem.P, problem.R, problem.stride_h, problem.pad_h, problem.dilation_h);
}

inline Axis column_axis(const Problem& problem, Operator op) {
  return make_axis(op, problem.W, problem.Q, problem.S, problem.stride_w, problem.pad_w, problem.dilation_w);
}

// Square filters whose weights registers hold, and what of the two axes has to be the same.
inline bool is_windowed(const Axis& rows, const Axis& columns) {
  const bool square = rows.taps == columns.taps && rows.stride == columns.stride;
  const bool dense = rows.dilation == 1 && columns.dilation == 1;
  return square && dense && (rows.taps == 3 || rows.taps == 5 || rows.taps == 7) && rows.stride <= 2;
}

inline bool is_multiple(const int64_t (&strides)[4], int dimensions, int of) {
  for (int i = 0; i < 4; ++i)
    if (dimensions >> i & 1 && strides[i] % of != 0) return false;
  return true;
}

// Whether planes lie behind one another in memory, and the rows in them.
inline bool is_packed(const int64_t (&stride)[4], int64_t images, int channels, int height, int width, int planes) {
  const int64_t plane = static_cast<int64_t>(height) * width;
  const bool rows_packed = (stride[3] == 1 || width == 1) && (stride[2] == width || height == 1);
  const bool planes_packed = (stride[1] == plane || channels == 1) && (stride[0] == channels * plane || images == 1);
  return rows_packed && (planes == 1 || planes_packed);
}

// Multiply-adds and other instructions of one thread, roughly; to rank tiles with, and never fitted to times.
struct Slots {
  double once, step;
  int extra_steps;
};

constexpr double kMultiprocessors = 132;  // for ranking alone: what is computed does not depend on it

// In cycles of an SM, if instructions bound it: blocks take turns, and the last thread of all ends late.
inline double cycles(double blocks, double block_slots, double thread_slots) {
  return std::max(1.0,
                  blocks / kMultiprocessors < 8
                      ? static_cast<double>(static_cast<int64_t>((blocks + kMultiprocessors - 1) / kMultiprocessors))
                      : blocks / kMultiprocessors) *
             block_slots / 128 +
         2 * thread_slots;
}

// Quantities that all candidates for a tile share.
struct TileWork {
  const Problem& problem;
  Operator op;
  Axis rows, columns;
  bool windowed, slides, aligned;
  int multiplier, channels;
  const int64_t (&in_stride)[4], (&out_stride)[4];

  int thread_rows() const { return kAnyRows; }
  int thread_columns() const { return windowed ? kVectorColumns : kAnyColumns; }
  int spacing() const { return !windowed && slides ? columns.dilation : 1; }
};

// Completes a tile of which planes, bands, band_rows, groups and tiles_q are given. False if it does not fit.
inline bool complete(const TileWork& work, Tile& tile) {
  const Axis &rows = work.rows, &columns = work.columns;
  const int64_t all_planes = work.problem.N * work.channels;
  tile.tile_p = tile.bands * tile.band_rows;
  tile.tile_q = tile.groups * work.thread_columns();
  tile.tiles_p = static_cast<int>(ceil_div(rows.outputs, tile.tile_p));
  tile.tiles = ceil_div(all_planes, tile.planes) * tile.tiles_p * tile.tiles_q;
  tile.whole = tile.planes > 1;
  tile.in_planes = tile.planes % work.multiplier == 0 ? tile.planes / work.multiplier
                                                      : (tile.planes - 1) / work.multiplier + (tile.planes > 1 ? 2 : 1);
  const int64_t span_h = static_cast<int64_t>(std::min(tile.tile_p, rows.outputs) - 1) * rows.stride +
                         static_cast<int64_t>(rows.taps - 1) * rows.dilation + 1;
  tile.in_rows = static_cast<int>(tile.whole ? rows.inputs : std::min<int64_t>(rows.inputs, span_h));

  // Columns that threads read, also those of outputs that do not exist.
  int64_t span_w;
  if (work.windowed) {
    const int window = (kVectorColumns - 1) * columns.stride + columns.taps;
    span_w = static_cast<int64_t>(tile.groups - 1) * kVectorColumns * columns.stride + round_up(window, 4);
  } else {
    span_w = static_cast<int64_t>(tile.tile_q - 1) * columns.stride +
             static_cast<int64_t>(columns.taps - 1) * columns.dilation + 1;
  }
  const int64_t left = -static_cast<int64_t>(columns.origin);
  tile.by_runs = left >= 0 && tile.tiles_q == 1 && left + columns.inputs < kSharedBytes &&
                 is_packed(work.in_stride, work.problem.N, work.channels / work.multiplier, rows.inputs, columns.inputs,
                           tile.in_planes);
  if (tile.by_runs) span_w = std::max(span_w, left + columns.inputs);
  if (span_w > kSharedBytes / 4) return false;
  tile.pitch = round_up(static_cast<int>(span_w), 4);

  const int64_t taps = static_cast<int64_t>(rows.taps) * columns.taps;
  if (taps > kSharedBytes / 4) return false;
  tile.w_pitch = work.windowed ? static_cast<int>(taps) | 1 : rows.taps * round_up(columns.taps, 4);
  const int64_t x_floats = static_cast<int64_t>(tile.in_planes) * tile.in_rows * tile.pitch;
  const int64_t w_floats = round_up(tile.planes * tile.w_pitch, 4);
  const int64_t bytes = kFlagBytes + 4 * (x_floats + w_floats);
  if (bytes > kSharedBytes) return false;
  tile.x_floats = static_cast<int>(x_floats);
  tile.w_floats = static_cast<int>(w_floats);
  tile.smem_bytes = static_cast<int>(bytes);

  const int64_t outputs = static_cast<int64_t>(tile.planes) * std::min(tile.tile_p, rows.outputs) * columns.outputs;
  const int64_t y_bytes = outputs * element_bytes(work.problem.dtype) + 16;
  const bool out_packed = tile.tiles_q == 1 && is_packed(work.out_stride, work.problem.N, work.channels, rows.outputs,
                                                         columns.outputs, tile.planes);
  if (work.windowed && work.aligned && columns.outputs % kVectorColumns == 0 && work.out_stride[3] == 1 &&
      is_multiple(work.out_stride, 7, kVectorColumns)) {
    tile.store = Store::kVectors;
  } else if (out_packed && bytes + y_bytes <= kSharedBytes) {
    tile.store = Store::kRuns;
    tile.smem_bytes += static_cast<int>(round_up(static_cast<int>(y_bytes), 16));
  } else {
    tile.store = Store::kSingly;
  }
  return tile.smem_bytes <= kSharedBytes && tile.tiles <= kMostBlocks;
}

inline double tile_cost(const TileWork& work, const Tile& tile) {
  const double taps = static_cast<double>(work.rows.taps) * work.columns.taps;
  const int open = static_cast<int>(ceil_div(work.rows.taps, work.rows.stride));
  const double thread = work.windowed
                            ? 250 + 1.5 * taps + (tile.band_rows + open - 1) * (kVectorColumns * taps + 30)
                            : 350 + kAnyRows * kAnyColumns * taps * (work.slides ? 1.25 : 2.2) + 40 * work.rows.taps;
  const double threads =
      32 * static_cast<double>(ceil_div(static_cast<int64_t>(tile.planes) * tile.bands * tile.groups, 32));
  const double moved = 1.0 * tile.x_floats * (tile.by_runs ? 5 : 40) + 8.0 * tile.w_floats +
                       static_cast<double>(tile.planes) * tile.tile_p * work.columns.outputs / tile.tiles_q *
                           (tile.store == Store::kSingly ? 60 : 1);
  // Few warps on an SM leave it waiting: blocks of the shared memory of sm_90, at most 16 warps for 7x7, 24 for others.
  const double blocks = std::min(16.0, 227.0 * 1024 / (tile.smem_bytes + 1024));
  const double warps = std::min(work.rows.taps == 7 ? 16.0 : 24.0, blocks * threads / 32);
  return cycles(static_cast<double>(tile.tiles), threads * thread + moved, thread) * (1 + 8 / warps);
}

// Bands of how many rows are tried: whole columns of an image, halves of them, thirds ... `part` counts from 0.
inline int band_candidate(int rows, int part, int only_rows) {
  constexpr int kParts[] = {1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024};
  constexpr int kCount = sizeof kParts / sizeof *kParts;
  if (only_rows != 0) return part == 0 ? only_rows : 0;
  return part < kCount && (part == 0 || kParts[part - 1] < rows) ? static_cast<int>(ceil_div(rows, kParts[part])) : 0;
}

// Ranks the plans of ring_kernel, in cycles of an SM of an H200; a fit (docs/lab/depthwise.md).
struct RingModel {
  double launch = 6200;   // of whatever kernel, and until the first bytes are there
  double bytes = 16;      // from and to memory, a cycle
  double line = 110;      // bytes more, since runs begin and end within lines
  double latency = 1400;  // of memory under load
  double block = 620;     // until a block's weights are in registers
  double chunk = 200;     // instructions of a warp
  double stall = 2.2;     // cycles from one instruction of a warp to its next one, with the scheduler to itself
};

// Demands on a plan beyond being the cheapest one; zeros demand nothing.
struct Wish {
  bool any;  // the first one that is found
  int band_rows, planes;
  bool tiles;  // not ring_kernel
  int steps, slots, parts, split_rows;
  int queue_shape;  // the number of one, and one more
  RingModel model;
};

// The cheapest of some forty tiles; `cost` is negative if none fits.
inline Tile choose_tile(const TileWork& work, const Wish& wish, double& cost) {
  Tile best{};
  cost = -1;
  const int spacing = work.spacing(), rows = work.rows.outputs;
  if (spacing > kThreads) return best;
  const int64_t units = ceil_div(work.columns.outputs, int64_t{work.thread_columns()} * spacing);
  const auto consider = [&](const Tile& candidate) {
    Tile tile = candidate;
    if (!complete(work, tile)) return false;
    const double found = tile_cost(work, tile);
    if (cost < 0 || found < cost) best = tile, cost = found;
    return true;
  };
  // Whole rows of the image if possible, else halves of them, and so on.
  for (int64_t tiles_q = ceil_div(units, kThreads / spacing); tiles_q < 2 * units && cost < 0; tiles_q *= 2) {
    Tile tile{};
    tile.groups = static_cast<int>(ceil_div(units, tiles_q)) * spacing;
    tile.tiles_q = static_cast<int>(ceil_div(units * spacing, tile.groups));
    for (int part = 0; int band_rows = band_candidate(rows, part, wish.band_rows); ++part) {
      if (!work.windowed && part > 0) break;
      tile.band_rows = work.windowed ? band_rows : kAnyRows;
      const int64_t bands = ceil_div(rows, tile.band_rows);
      // Several planes, as many as so many warps serve.
      if (bands * tile.groups <= kThreads && tile.tiles_q == 1) {
        tile.bands = static_cast<int>(bands);
        int64_t most_planes = work.problem.N * work.channels;
        if (wish.planes != 0) most_planes = std::min<int64_t>(most_planes, wish.planes);
        for (int threads = kThreads; threads >= 32; threads -= 32) {
          const int64_t planes = std::min(threads / (bands * tile.groups), most_planes);
          if (planes <= 1) break;
          tile.planes = static_cast<int>(planes);
          consider(tile);
          if (wish.any && cost >= 0) return best;
        }
      }
      // Some bands of one.
      tile.planes = 1;
      int64_t some = std::min<int64_t>(bands, kThreads / tile.groups);
      for (int fit = 0; some >= 1 && fit < 2; some /= 2) {
        tile.bands = static_cast<int>(ceil_div(bands, ceil_div(bands, some)));
        fit += consider(tile);
        if (wish.any && cost >= 0) return best;
      }
    }
  }
  return best;
}

// Whether ring_kernel is for a problem whose tensors begin where vectors may: dense planes, a filter whose weights
// registers hold, padding that a window's edges cover, and as many columns as a thread owns.
inline bool ring_takes(const Problem& problem, Operator op, const Axis& rows, const Axis& columns) {
  const bool compiled = (rows.taps == 3 || rows.taps == 7) && rows.stride <= 2;
  const bool square = rows.taps == columns.taps && rows.stride == columns.stride;
  if (!compiled || !square || rows.dilation != 1 || columns.dilation != 1 || problem.K != problem.C) return false;
  const int edge = rows.taps / 2;
  const int right = (columns.outputs - 1) * columns.stride + columns.taps - 1 + columns.origin - (columns.inputs - 1);
  if (rows.origin > 0 || rows.origin < -edge || columns.origin > 0 || columns.origin < -edge || right > edge)
    return false;
  const bool dgrad = op == Operator::kDgrad;
  return columns.outputs >= kRingColumns && columns.outputs <= kRingColumns * kThreads && problem.w_stride[3] == 1 &&
         problem.w_stride[2] == columns.taps && (problem.w_stride[0] == rows.taps * columns.taps || problem.K == 1) &&
         is_packed(dgrad ? problem.y_stride : problem.x_stride, problem.N, problem.C, rows.inputs, columns.inputs, 2) &&
         is_packed(dgrad ? problem.x_stride : problem.y_stride, problem.N, problem.C, rows.outputs, columns.outputs, 2);
}

// Bytes to copy at once, if runs begin and end at multiples of `bytes`; zero if not even four.
inline int vector_of(int64_t bytes) { return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 0; }

// From plane to plane in shared memory, so that the groups of the next plane meet the banks that those of this one, a
// multiple of 7 elements apart, leave free.
inline int ring_pitch(int64_t elements, int groups, int stride, int vector, int element) {
  int target = stride;
  while (2 * target <= stride * groups) target *= 2;
  const int period = 128 / element, at_once = vector / element;
  target = round_up(target, at_once) % period;
  const int least_pitch = round_up(static_cast<int>(elements), at_once);
  return groups >= 32 ? least_pitch : least_pitch + (target + period - least_pitch % period) % period;
}

// Completes a ring of which planes, threads, steps, slots, parts, band_rows and split_rows are given, if it fits.
inline bool complete(const Problem& problem, const Axis& rows, const Axis& columns, Ring& ring) {
  const int element = element_bytes(problem.dtype), open = static_cast<int>(ceil_div(rows.taps, rows.stride));
  ring.groups = static_cast<int>(ceil_div(columns.outputs, kRingColumns));
  ring.sets = static_cast<int>(ceil_div(problem.C, ring.planes));
  ring.bands = static_cast<int>(ceil_div(rows.outputs, ring.band_rows));
  const int all_steps = band_steps(rows, open, 0, ring.band_rows).count;
  ring.whole = ring.bands == 1 && ring.steps >= all_steps;
  ring.steps = std::min(ring.steps, ring.band_rows + open - 1);
  ring.split_rows = ring.whole ? std::min(ring.split_rows, rows.outputs) : ring.band_rows;
  ring.splits = ring.whole ? static_cast<int>(ceil_div(rows.outputs, ring.split_rows)) : 1;
  if (int64_t{ring.planes} * ring.groups * ring.splits > ring.threads) return false;
  ring.pairs = columns.stride == 2 && columns.inputs % 2 == 0 && columns.origin % 2 != 0;
  const int64_t in_run = static_cast<int64_t>(columns.inputs) * (ring.whole ? rows.inputs : 1) * element;
  const int64_t out_run = static_cast<int64_t>(columns.outputs) * (ring.whole ? rows.outputs : 1) * element;
  const int runs = ring.whole ? ring.planes | problem.C : 1;  // divided by the powers of two that divide both
  ring.in_vector = vector_of(in_run * runs);
  ring.out_vector = vector_of(out_run * runs);
  if (ring.in_vector == 0 || ring.out_vector == 0) return false;
  const int64_t in_rows = std::min(ring.steps * rows.stride, rows.inputs);
  const int64_t in_elements = in_rows * columns.inputs;
  const int64_t out_elements = static_cast<int64_t>(std::min(ring.steps, ring.band_rows)) * columns.outputs;
  if (std::max(in_elements, out_elements) * element > kSharedBytes) return false;
  ring.in_pitch = static_cast<int>(in_elements);
  ring.out_pitch = static_cast<int>(out_elements);
  if (!ring.whole) {
    ring.in_pitch = ring_pitch(in_elements, ring.groups, rows.stride, ring.in_vector, element);
    ring.out_pitch = ring_pitch(out_elements, ring.groups, 1, ring.out_vector, element);
  }
  ring.lanes = ring.threads;
  if (!ring.whole && ring.planes > 1)
    for (ring.lanes = 32; ring.lanes > 8 && ring.lanes * ring.planes > ring.threads;) ring.lanes /= 2;
  const int64_t slot_bytes = int64_t{ring.planes} * ring.in_pitch * element;
  const int64_t out_bytes = int64_t{ring.planes} * std::max(ring.out_pitch * element, rows.taps * columns.taps * 4);
  const int64_t bytes = kFlagBytes + (out_bytes + 15) / 16 * 16 + (slot_bytes + 15) / 16 * 16 * ring.slots;
  if (bytes > kSharedBytes) return false;
  ring.slot_bytes = round_up(static_cast<int>(slot_bytes), 16);
  ring.out_bytes = round_up(static_cast<int>(out_bytes), 16);
  ring.smem_bytes = static_cast<int>(bytes);
  ring.blocks = static_cast<int64_t>(ring.sets) * ring.parts * ring.bands;
  return ring.blocks <= kMostBlocks;
}

// Blocks that an SM of sm_90 has room for: BLOCKS_PER_SM of kThreads by their registers, 32 at most, and 227 KB.
inline double ring_resident(const Axis& rows, const Ring& ring) {
  const int by_registers = ring_blocks_per_sm(rows.taps) * kThreads / ring.threads;
  return std::min({32, by_registers, 227 * 1024 / (ring.smem_bytes + 1024)});
}

// Cycles in which shared memory gives a warp what it asks for when it loads a window.
inline double ring_window_cycles(const Axis& columns, const Ring& ring, int element) {
  const int loads = ((kRingColumns - 1) * columns.stride + columns.taps) / (ring.pairs ? 2 : 1);
  const int bytes = ring.pairs ? 2 * element : element, at_once = bytes == 8 ? 16 : 32;  // lanes
  const int threads = std::min(32, ring.planes * ring.groups * ring.splits);
  double cycles = 0;
  for (int first = 0; first < threads; first += at_once) {
    int lanes[32] = {}, worst = 0;  // that meet a bank
    for (int thread = first; thread < std::min(first + at_once, threads); ++thread) {
      const int plane = thread / (ring.groups * ring.splits), split = thread / ring.groups % ring.splits;
      const int column = std::min(thread % ring.groups * kRingColumns, columns.outputs - kRingColumns) * columns.stride;
      const int64_t at =
          int64_t{plane} * ring.in_pitch + int64_t{split} * ring.split_rows * columns.stride * columns.inputs + column;
      worst = std::max(worst, ++lanes[at * element / 4 % 32]);
    }
    cycles += worst;
  }
  return loads * cycles;
}

// Cycles. Memory, or the blocks that an SM has room for: each waits for a chunk, multiplies and writes, image by image.
inline double ring_cost(const Problem& problem, const Axis& rows, const Axis& columns, const Ring& ring,
                        const RingModel& model) {
  const double taps = static_cast<double>(rows.taps) * columns.taps, warps = ring.threads / 32;
  const int open = static_cast<int>(ceil_div(rows.taps, rows.stride)), element = element_bytes(problem.dtype);
  const double window = ((kRingColumns - 1) * rows.stride + columns.taps) / (ring.pairs ? 2 : 1);
  const double steps = band_steps(rows, open, 0, ring.band_rows).count, chunks = std::ceil(steps / ring.steps);
  const double own_steps = ring.splits == 1 ? steps : ring.split_rows + open - 1;
  const double images = std::ceil(static_cast<double>(problem.N) / ring.parts);
  const double in_rows = std::min<double>(rows.inputs, steps * rows.stride);
  const double in_bytes = ring.planes * in_rows * columns.inputs * element;  // of an image
  const double out_bytes = static_cast<double>(ring.planes) * ring.band_rows * columns.outputs * element;
  const double runs = ring.whole ? 1 : ring.planes * chunks;

  const double a_step = kRingColumns * (taps + 3) + rows.stride * (1.2 * window + rows.taps) + 8;
  const double copies = (3 * in_bytes / ring.in_vector + 4 * out_bytes / ring.out_vector) / ring.threads;
  const double instructions = own_steps * a_step + copies + chunks * model.chunk;  // of a warp, for an image
  const double shared = own_steps * (rows.stride * ring_window_cycles(columns, ring, element) + kRingColumns);

  const double all = static_cast<double>(ring.blocks) / kMultiprocessors;  // blocks of an SM
  const double active = std::min(ring_resident(rows, ring), std::max(1.0, all)), rounds = all / active;
  const double computing = std::max(instructions * std::max(model.stall, active * warps / 4), shared * active * warps);
  const double block = model.block + images * (computing + chunks * model.latency / ring.slots);
  // The last one of few rounds is not full.
  const double blocks = (rounds > 4 ? rounds : (std::ceil(rounds) + rounds) / 2) * block;
  const double moved = in_bytes + out_bytes + 2 * runs * model.line;
  const double memory = std::max(1.0, all) * problem.N / ring.parts * moved / model.bytes;
  // The last chunk is multiplied while nobody loads.
  const double tail = instructions / chunks * model.stall;
  return model.launch + std::cbrt(blocks * blocks * blocks + memory * memory * memory) + tail;
}

// The cheapest of some hundreds of rings; `cost` is negative if none fits.
inline Ring choose_ring(const Problem& problem, const Axis& rows, const Axis& columns, const Wish& wish, double& cost) {
  constexpr int kSteps[] = {0x7fffffff, 16, 12, 8, 6, 4, 2, 1};
  const int groups = static_cast<int>(ceil_div(columns.outputs, kRingColumns));
  const int open = static_cast<int>(ceil_div(rows.taps, rows.stride));
  const int all_steps = band_steps(rows, open, 0, rows.outputs).count;
  const double images = static_cast<double>(std::min<int64_t>(problem.N, 1 << 24));
  Ring best{};
  cost = -1;
  const auto consider = [&](Ring ring) {
    ring.parts = 1;
    ring.band_rows = rows.outputs;
    if (!complete(problem, rows, columns, ring)) return;
    // A block for each image, or as many blocks as run at once, or some times more: parts of the images, then bands of
    // rows, each of some times the rows that its first output takes.
    for (int waves = 0; waves <= 4; waves = waves == 0 ? 1 : 2 * waves) {
      const double wanted = waves * kMultiprocessors * ring_resident(rows, ring) / ring.sets;
      const double bands = std::min(std::max(1.0, wanted / images), std::ceil(rows.outputs / (2.0 * open)));
      Ring parted = ring;
      parted.parts = static_cast<int>(wish.parts > 0 ? std::min<double>(wish.parts, images)
                                      : waves == 0   ? images
                                                     : std::max(1.0, std::min(wanted, images)));
      parted.band_rows = wish.band_rows > 0 ? std::min(wish.band_rows, rows.outputs)
                                            : static_cast<int>(std::ceil(rows.outputs / std::floor(bands)));
      if (!complete(problem, rows, columns, parted)) continue;
      const double found = ring_cost(problem, rows, columns, parted, wish.model);
      if (cost < 0 || found < cost) best = parted, cost = found;
    }
  };
  // As few warps as leave few lanes without a group.
  int threads = 32;
  for (int more = 32; more <= kThreads; more += 32)
    if (more / groups * groups * threads > threads / groups * groups * more * 1.1) threads = more;
  Ring ring{};
  for (ring.slots = wish.slots > 0 ? wish.slots : 1; ring.slots <= (wish.slots > 0 ? wish.slots : 3); ++ring.slots) {
    const int most_planes = std::min(wish.planes > 0 ? wish.planes : threads, std::min(threads / groups, problem.C));
    ring.threads = threads;
    ring.split_rows = rows.outputs;
    for (int halves = 1; halves <= 2 && most_planes / halves >= 1 && wish.split_rows == 0; ++halves)
      for (const int steps : kSteps) {
        ring.planes = most_planes / halves;
        ring.steps = std::min(wish.steps > 0 ? wish.steps : steps, all_steps);
        consider(ring);
        if (wish.steps > 0) break;
      }
    // All of an image's planes at once, and several threads for the columns of one. Small planes only: a chunk of some
    // rows of larger ones comes fast enough.
    constexpr int64_t kMostSplitBytes = 4096;
    const int64_t plane_bytes = int64_t{rows.inputs} * columns.inputs * element_bytes(problem.dtype);
    if (plane_bytes > kMostSplitBytes && wish.split_rows == 0) continue;
    ring.steps = wish.steps > 0 ? std::min(wish.steps, all_steps) : all_steps;
    for (int splits = 2; splits <= 8 && ring.steps == all_steps; ++splits) {
      ring.split_rows = wish.split_rows > 0 ? wish.split_rows : static_cast<int>(ceil_div(rows.outputs, splits));
      const int threads_of_plane = groups * static_cast<int>(ceil_div(rows.outputs, ring.split_rows));
      for (ring.threads = 32; ring.threads <= kThreads; ring.threads += 32) {
        ring.planes = std::min(ring.threads / threads_of_plane, problem.C);
        if (wish.planes > 0) ring.planes = std::min(ring.planes, wish.planes);
        if (ring.planes > 0) consider(ring);
      }
      if (wish.split_rows > 0) break;
    }
  }
  return best;
}

// Channels that a thread of pixels_kernel takes, zero if it is not for this problem.
inline int window_channels(const Problem& problem, Operator op, bool aligned) {
  if (!is_windowed(row_axis(problem, op), column_axis(problem, op)) || problem.K != problem.C) return 0;
  if (problem.R != 3) return 1;
  const bool pairs =
      aligned && problem.C % 2 == 0 && is_multiple(problem.x_stride, 13, 2) && is_multiple(problem.y_stride, 13, 2);
  return pairs ? 2 : 0;
}

// Cycles of an SM's blocks, of which it has room for `resident`: each issues its instructions, or waits.
inline double block_cycles(const Strip& strip, int resident, double instructions, double waiting) {
  const double all = static_cast<double>(strip.blocks) / kMultiprocessors;
  const double active = std::min<double>(resident, std::max(1.0, all)), rounds = all / active;
  // The last one of few rounds is not full.
  return (rounds > 4 ? rounds : (std::ceil(rounds) + rounds) / 2) * std::max(active * instructions, waiting);
}

// Ranks strips by the cycles of memory and of blocks, each times its cube root; a fit (docs/lab/depthwise.md).
inline double pixels_cost(const Problem& problem, const Axis& rows, const Axis& columns, const Strip& strip,
                          int channels) {
  constexpr double kThread = 200, kLoad = 6.8, kWeight = 39;  // instructions; for a pixel, and for a weight in turn
  constexpr double kStall = 3.1;                              // cycles from one instruction of a warp to its next one
  constexpr double kBytes = 18.3;                             // from and to memory, a cycle
  const int taps = rows.taps * columns.taps, open = static_cast<int>(ceil_div(rows.taps, rows.stride));
  const int window = (kPixelColumns - 1) * columns.stride + columns.taps;
  const double turned = kWeight * strip.lanes * channels * taps / kThreads, first = kPixelColumns * taps * channels;
  const double steps =
      (strip.band_rows + open - 1.0) * (kPixelColumns * taps * channels + kLoad * window * rows.stride);
  const double blocks = block_cycles(strip, pixels_blocks_per_sm(rows.taps, rows.stride),
                                     kThread + turned + first + steps, 2 * turned + first + kStall * steps);
  const int64_t bytes_wide = int64_t{strip.lanes} * channels * element_bytes(problem.dtype);
  const double narrow = (bytes_wide < 128 ? 1.055 : 1) * (bytes_wide < 64 ? 1.055 : 1) * (strip.lanes < 32 ? 1.07 : 1);
  const double broken = bytes_wide % 128 == 0 ? 1 : strip.chunks == 1 ? 1.025 : 1.05;  // lines of memory
  const double pixels = 1.0 * rows.inputs * columns.inputs + 1.0 * rows.outputs * columns.outputs;
  const double memory = static_cast<double>(problem.N) * problem.C * element_bytes(problem.dtype) * pixels /
                        kMultiprocessors / kBytes * narrow * broken;
  return blocks * std::cbrt(blocks) + memory * std::cbrt(memory);
}

inline Strip choose_strip(const Problem& problem, Operator op, int channels, bool slides, const Wish& wish,
                          double& best_cost) {
  const Axis rows = row_axis(problem, op), columns = column_axis(problem, op);
  const int taps = rows.taps * columns.taps;
  const int all_lanes =
      static_cast<int>(ceil_div(op == Operator::kDgrad ? problem.C : problem.K, std::max(channels, 1)));
  Strip best{};
  best_cost = -1;
  Strip strip{};
  const int spacing = channels == 0 && slides ? columns.dilation : 1;
  strip.groups = channels > 0
                     ? static_cast<int>(ceil_div(columns.outputs, kPixelColumns))
                     : static_cast<int>(ceil_div(columns.outputs, int64_t{kAnyPixelColumns} * spacing)) * spacing;
  strip.w_pitch = taps | 1;
  for (int lanes = std::min(8, all_lanes); lanes <= 64 && lanes < all_lanes + 8; lanes += 8) {
    strip.lanes = lanes;
    strip.items = kThreads / lanes;
    strip.chunks = static_cast<int>(ceil_div(all_lanes, lanes));
    const int64_t bytes = kFlagBytes + int64_t{4} * lanes * (channels > 0 ? channels * strip.w_pitch : taps);
    if (bytes > kSharedBytes) continue;
    strip.smem_bytes = static_cast<int>(bytes);
    for (int part = 0; (strip.band_rows = band_candidate(rows.outputs, part, wish.band_rows)) != 0; ++part) {
      strip.bands = static_cast<int>(ceil_div(rows.outputs, strip.band_rows));
      strip.blocks = ceil_div(problem.N * strip.bands * strip.groups, strip.items) * strip.chunks;
      const double thread = 200 + (4 + strip.band_rows * (slides ? 14.0 : 40.0)) * taps;
      const int bytes_wide = lanes * element_bytes(problem.dtype);
      const double narrow = bytes_wide < 64 ? 1.5 : bytes_wide < 128 ? 1.1 : 1;
      const double cost = channels > 0 ? pixels_cost(problem, rows, columns, strip, channels)
                                       : narrow * cycles(static_cast<double>(strip.blocks), kThreads * thread, thread);
      if (strip.blocks <= kMostBlocks && (best_cost < 0 || cost < best_cost)) best = strip, best_cost = cost;
      if (wish.any && best_cost >= 0) return best;
    }
  }
  return best;
}

// Whether a shape of queue_kernel is for a problem whose tensors and filters begin where vectors may.
inline bool queue_takes(const QueueShape& shape, const Problem& problem, Operator op) {
  const Axis rows = row_axis(problem, op), columns = column_axis(problem, op);
  const bool w_packed =
      problem.w_stride[0] == problem.R * problem.S && problem.w_stride[2] == problem.S && problem.w_stride[3] == 1;
  const auto is_for = [&](const Axis& axis) {
    return axis.taps == shape.taps && axis.stride == shape.stride && axis.dilation == 1;
  };
  return element_bytes(problem.dtype) == 2 && w_packed && problem.K == problem.C && is_for(rows) && is_for(columns) &&
         problem.C % shape.channels == 0 && is_multiple(problem.x_stride, 13, shape.channels) &&
         is_multiple(problem.y_stride, 13, shape.channels);
}

// Cycles: of memory, or of the blocks of an SM, each waiting for its steps or multiplying (docs/lab/depthwise.md).
inline double queue_cost(const QueueShape& shape, const Problem& problem, const Axis& rows, const Axis& columns,
                         const Strip& strip) {
  constexpr double kLaunch = 15500;  // of whatever kernel, and until the first bytes are there
  constexpr double kLatency = 1650;  // of memory under load
  constexpr double kBytes = 9.4;     // from and to memory, a cycle
  constexpr double kHalo = 0.69;     // of rows that two bands read: the rest comes from the L2 cache
  constexpr double kCopy = 13.6;     // instructions for a pixel of a window, but one for each channel
  constexpr double kWeight = 16;     // instructions for the weights that a thread copies for its block, each tap
  constexpr double kStall = 0.84;    // cycles from one instruction of a warp to its next one
  const double taps = static_cast<double>(rows.taps) * columns.taps, steps = strip.band_rows + shape.open() - 1;
  const double a_step =
      shape.columns * shape.channels * (taps + 2) + (kCopy + shape.channels) * shape.window() * shape.stride;
  const double copied = kWeight * strip.lanes * taps / kThreads, widened = 2 * shape.channels * taps;
  const double instructions = copied + widened + steps * a_step;
  const double waiting = kLatency + 2 * copied + widened + steps * std::max(kStall * a_step, kLatency / shape.depth);

  const int resident = std::min(shape.blocks_per_sm, 227 * 1024 / (strip.smem_bytes + 1024));
  const double blocks = block_cycles(strip, resident, instructions, waiting);
  const double pixels = 2.0 * static_cast<double>(problem.N) * problem.C;  // bytes of one, in all images
  const double read = strip.bands * ((strip.band_rows - 1.0) * rows.stride + rows.taps) / rows.inputs;  // times
  const double in_bytes = pixels * rows.inputs * columns.inputs * (1 + kHalo * std::max(0.0, read - 1));
  const double out_bytes = pixels * rows.outputs * columns.outputs;
  const double memory = (in_bytes + out_bytes) / kMultiprocessors / kBytes;
  return kLaunch + std::cbrt(blocks * blocks * blocks + memory * memory * memory);
}

// As choose_strip. Few lanes waste nothing, so that they may be any number, of at least two sectors: a divisor of all,
// unless others are much better, since lanes without channels cost next to nothing where memory is what counts.
inline Strip choose_queue(const Problem& problem, Operator op, const Wish& wish, double& best_cost) {
  const Axis rows = row_axis(problem, op), columns = column_axis(problem, op);
  Strip best{};
  best_cost = -1;
  for (int number = 0; number < kQueueShapeCount; ++number) {
    const QueueShape& shape = kQueueShapes[number];
    if (!queue_takes(shape, problem, op) || (wish.queue_shape > 0 && wish.queue_shape != number + 1)) continue;
    Strip strip{};
    strip.queue_shape = number;
    strip.groups = static_cast<int>(ceil_div(columns.outputs, shape.columns));
    const int all_lanes = problem.C / shape.channels, least_lanes = std::min(32 / shape.channels, all_lanes);
    for (int lanes = std::min(kMostQueueLanes, all_lanes); lanes >= least_lanes; --lanes) {
      strip.lanes = lanes;
      strip.chunks = static_cast<int>(ceil_div(all_lanes, lanes));
      strip.smem_bytes = queue_smem_bytes(shape, lanes);
      const int bytes_wide = lanes * shape.channels * 2;  // whole lines are best, then whole sectors
      const double shared = strip.chunks == 1 || bytes_wide % 128 == 0 ? 1 : bytes_wide % 32 == 0 ? 1.006 : 1.05;
      const double idle = 0.2 * (static_cast<double>(strip.chunks) * lanes / all_lanes - 1);
      for (int part = 0; (strip.band_rows = band_candidate(rows.outputs, part, wish.band_rows)) != 0; ++part) {
        strip.bands = static_cast<int>(ceil_div(rows.outputs, strip.band_rows));
        const int64_t items = problem.N * strip.bands * strip.groups;
        strip.blocks = ceil_div(items * lanes, kThreads) * strip.chunks;
        if (items * lanes > kMostBlocks - kThreads || strip.blocks > kMostBlocks) continue;
        const double cost = queue_cost(shape, problem, rows, columns, strip) * (shared + idle);
        if (best_cost < 0 || cost < best_cost) best = strip, best_cost = cost;
      }
    }
  }
  return best;
}

// `aligned`: the tensors begin where vectors may, `w_aligned`: so do the filters.
inline Plan make_plan(const Problem& problem, Operator op, bool aligned, const Wish& wish = {}, bool w_aligned = true) {
  Plan plan{};
  const Axis rows = row_axis(problem, op), columns = column_axis(problem, op);
  plan.slides = columns.stride == 1;
  if (is_channels_last(problem)) {
    if (aligned && w_aligned) {
      plan.kernel = Kernel::kQueue;
      plan.strip = choose_queue(problem, op, wish, plan.cost);
      plan.exists = plan.cost >= 0;
      if (plan.exists) return plan;
    }
    const int channels = window_channels(problem, op, aligned);
    plan.kernel = channels > 0 ? Kernel::kPixels : Kernel::kPixelsAny;
    plan.strip = choose_strip(problem, op, channels, plan.slides, wish, plan.cost);
    plan.exists = plan.cost >= 0;
    if (plan.exists) return plan;
  }
  // With wide planes of fp32 planes_kernel has as many bytes under way by fewer instructions (docs/lab/depthwise.md).
  constexpr int kMostRingColumns = 40;
  const bool wide =
      problem.dtype == DType::kFloat32 && rows.taps == 3 && rows.stride == 1 && columns.outputs > kMostRingColumns;
  if (aligned && !wish.tiles && (!wide || wish.any) && ring_takes(problem, op, rows, columns)) {
    plan.kernel = Kernel::kRing;
    plan.ring = choose_ring(problem, rows, columns, wish, plan.cost);
    plan.exists = plan.cost >= 0;
    if (plan.exists) return plan;
  }
  const bool dgrad = op == Operator::kDgrad;
  const bool windowed = is_windowed(rows, columns) && !(rows.taps == 7 && rows.stride == 2);
  const TileWork work = {problem,
                         op,
                         rows,
                         columns,
                         windowed,
                         plan.slides,
                         aligned,
                         problem.K / problem.C,
                         problem.K,
                         dgrad ? problem.y_stride : problem.x_stride,
                         dgrad ? problem.x_stride : problem.y_stride};
  plan.kernel = windowed ? Kernel::kPlanes : Kernel::kPlanesAny;
  plan.tile = choose_tile(work, wish, plan.cost);
  plan.exists = plan.cost >= 0;
  return plan;
}

// ---- What the binding calls ----

inline const Plan& plan_of(const Problem& problem, Operator op, bool aligned, bool w_aligned) {
  thread_local Memo<Plan> memo;
  return memo.get(key_of(problem, op, !aligned, !w_aligned, 0),
                  [&] { return make_plan(problem, op, aligned, {}, w_aligned); });
}

// Whether it takes kernels of its own: the gradient to x without a stride is a forward with the filter turned round.
inline bool is_gradient(const Problem& problem, Operator op) {
  return op == Operator::kWgrad || (op == Operator::kDgrad && (has_stride(problem) || problem.K != problem.C));
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (op == Operator::kBgrad) return "it computes no gradient to the bias";
  if (problem.C != problem.groups) return "more than one input channel in a group";
  if (problem.dtype == DType::kFloat64) return "float64";
  // Positions are 32-bit numbers in the kernels, with room for a tile beyond the image.
  constexpr int64_t kMostPositions = int64_t{1} << 28;
  if (problem.H + 2 * static_cast<int64_t>(problem.pad_h) >= kMostPositions ||
      problem.W + 2 * static_cast<int64_t>(problem.pad_w) >= kMostPositions)
    return "a padded image side of 2^28 pixels or more";
  if (problem.S > kChunk) return "a filter row of more than 64 taps";
  if (static_cast<int64_t>(problem.R) * problem.S > kSharedBytes / 4)
    return "a filter that does not fit into shared memory";
  if (is_gradient(problem, op)) return depthwise_grad::refusal(problem, op);
  thread_local Memo<bool> fits;
  if (!fits.get(key_of(problem, op, 0, 0, 0), [&] { return make_plan(problem, op, false, {true}).exists; }))
    return "no tile of it fits into shared memory, or it takes more than 2^31 - 1 of them";
  return nullptr;
}

// One channel to many (docs/lab/depthwise.md).
inline const char* yields(const Problem& problem, Operator op) {
  if (problem.groups > 1 || problem.K == 1 || op == Operator::kFprop) return nullptr;
  if (op == Operator::kDgrad) return "direct is faster where many channels meet one";
  const bool large = problem.R * problem.S >= 49 && kHopperWgradEngine.refusal(problem, op) == nullptr &&
                     kHopperWgradEngine.yields(problem, op) == nullptr;
  return large ? "hopper_wgrad is faster with one channel and large filters" : nullptr;
}

inline int64_t workspace_bytes(const Problem& problem, Operator op, const Pointers& pointers) {
  return is_gradient(problem, op) ? depthwise_grad::workspace_bytes(problem, op, pointers) : 0;
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

template <typename Config>
inline cudaError_t run_planes(const Params& params, cudaStream_t stream) {
  constexpr Instance kInstance{"planes_kernel", {kTypeId<typename Config::Storage>, Config::TAPS, Config::STRIDE}};
  record(kInstance);
  if constexpr (!is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    planes_kernel<Config>
        <<<static_cast<unsigned>(params.tile.tiles), kThreads, params.tile.smem_bytes, stream>>>(params);
    return cudaGetLastError();
  }
}

template <typename Config>
inline cudaError_t run_planes_any(const Params& params, cudaStream_t stream) {
  constexpr Instance kInstance{"planes_any_kernel", {kTypeId<typename Config::Storage>, Config::SLIDES}};
  record(kInstance);
  if constexpr (!is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    planes_any_kernel<Config>
        <<<static_cast<unsigned>(params.tile.tiles), kThreads, params.tile.smem_bytes, stream>>>(params);
    return cudaGetLastError();
  }
}

template <typename Config>
inline cudaError_t run_ring(const Params& params, cudaStream_t stream) {
  constexpr Instance kInstance{"ring_kernel", {kTypeId<typename Config::Storage>, Config::TAPS, Config::STRIDE}};
  record(kInstance);
  if constexpr (!is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    ring_kernel<Config>
        <<<static_cast<unsigned>(params.ring.blocks), params.ring.threads, params.ring.smem_bytes, stream>>>(params);
    return cudaGetLastError();
  }
}

template <typename Config>
inline cudaError_t run_pixels(const Params& params, cudaStream_t stream) {
  constexpr Instance kInstance{"pixels_kernel", {kTypeId<typename Config::Storage>, Config::TAPS, Config::STRIDE}};
  record(kInstance);
  if constexpr (!is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    pixels_kernel<Config>
        <<<static_cast<unsigned>(params.strip.blocks), kThreads, params.strip.smem_bytes, stream>>>(params);
    return cudaGetLastError();
  }
}

template <int SHAPE, typename Storage>
inline cudaError_t run_queue(const Params& params, cudaStream_t stream) {
  // float is never asked for: the plan is for 16 bits.
  if constexpr (sizeof(Storage) == 2 && SHAPE < kQueueShapeCount) {
    if (params.strip.queue_shape != SHAPE) return run_queue<SHAPE + 1, Storage>(params, stream);
    constexpr Instance kInstance{"queue_kernel", {kTypeId<Storage>, SHAPE}};
    record(kInstance);
    if constexpr (is_built(kInstance)) {
      const unsigned blocks = static_cast<unsigned>(params.strip.blocks);
      queue_kernel<QueueConfig<SHAPE, Storage>><<<blocks, kThreads, params.strip.smem_bytes, stream>>>(params);
      return cudaGetLastError();
    }
  }
  return cudaErrorInvalidConfiguration;
}

template <typename Config>
inline cudaError_t run_pixels_any(const Params& params, cudaStream_t stream) {
  constexpr Instance kInstance{"pixels_any_kernel", {kTypeId<typename Config::Storage>, Config::SLIDES}};
  record(kInstance);
  if constexpr (!is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    pixels_any_kernel<Config>
        <<<static_cast<unsigned>(params.strip.blocks), kThreads, params.strip.smem_bytes, stream>>>(params);
    return cudaGetLastError();
  }
}

template <typename Storage>
inline cudaError_t run(const Plan& plan, const Params& params, cudaStream_t stream) {
  const int variant = params.rows.taps * 10 + params.rows.stride;  // 31: 3x3 with stride 1
  switch (plan.kernel) {
    case Kernel::kPlanes:
      return variant == 31   ? run_planes<PlanesConfig<3, 1, Storage>>(params, stream)
             : variant == 32 ? run_planes<PlanesConfig<3, 2, Storage>>(params, stream)
             : variant == 51 ? run_planes<PlanesConfig<5, 1, Storage>>(params, stream)
             : variant == 52 ? run_planes<PlanesConfig<5, 2, Storage>>(params, stream)
                             : run_planes<PlanesConfig<7, 1, Storage>>(params, stream);
    case Kernel::kPlanesAny:
      return plan.slides ? run_planes_any<PlanesAnyConfig<Storage, true>>(params, stream)
                         : run_planes_any<PlanesAnyConfig<Storage, false>>(params, stream);
    case Kernel::kRing:
      return variant == 31   ? run_ring<RingConfig<3, 1, Storage>>(params, stream)
             : variant == 32 ? run_ring<RingConfig<3, 2, Storage>>(params, stream)
             : variant == 71 ? run_ring<RingConfig<7, 1, Storage>>(params, stream)
                             : run_ring<RingConfig<7, 2, Storage>>(params, stream);
    case Kernel::kPixels:
      return variant == 31   ? run_pixels<PixelsConfig<3, 1, 2, Storage>>(params, stream)
             : variant == 32 ? run_pixels<PixelsConfig<3, 2, 2, Storage>>(params, stream)
             : variant == 51 ? run_pixels<PixelsConfig<5, 1, 1, Storage>>(params, stream)
             : variant == 52 ? run_pixels<PixelsConfig<5, 2, 1, Storage>>(params, stream)
             : variant == 71 ? run_pixels<PixelsConfig<7, 1, 1, Storage>>(params, stream)
                             : run_pixels<PixelsConfig<7, 2, 1, Storage>>(params, stream);
    case Kernel::kQueue:
      return run_queue<0, Storage>(params, stream);
    case Kernel::kPixelsAny:
      return plan.slides ? run_pixels_any<PixelsAnyConfig<Storage, true>>(params, stream)
                         : run_pixels_any<PixelsAnyConfig<Storage, false>>(params, stream);
  }
  return cudaErrorInvalidConfiguration;
}

inline cudaError_t launch_planned(Operator op, const Problem& problem, const Pointers& pointers, const Plan& plan,
                                  cudaStream_t stream) {
  if (!plan.exists) return cudaErrorInvalidConfiguration;
  const bool dgrad = op == Operator::kDgrad;
  Params params{};
  params.in_ptr = dgrad ? pointers.dy : pointers.x;
  params.w_ptr = pointers.w;
  params.bias_ptr = dgrad ? nullptr : pointers.bias;
  params.out_ptr = pointers.out;
  std::copy_n(dgrad ? problem.y_stride : problem.x_stride, 4, params.in_stride);
  std::copy_n(dgrad ? problem.x_stride : problem.y_stride, 4, params.out_stride);
  params.w_stride_k = problem.w_stride[0];
  params.w_stride_r = problem.w_stride[2];
  params.w_stride_s = problem.w_stride[3];
  params.rows = row_axis(problem, op);
  params.columns = column_axis(problem, op);
  params.images = problem.N;
  params.channels = problem.K;
  params.multiplier = problem.K / problem.C;
  params.flipped = dgrad;
  params.tile = plan.tile;
  params.ring = plan.ring;
  params.strip = plan.strip;
  switch (problem.dtype) {
    case DType::kFloat32:
      return run<float>(plan, params, stream);
    case DType::kFloat16:
      return run<Half>(plan, params, stream);
    case DType::kBFloat16:
      return run<BFloat16>(plan, params, stream);
    case DType::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

inline bool is_aligned(Operator op, const Pointers& pointers) {
  const void* const in_ptr = op == Operator::kDgrad ? pointers.dy : pointers.x;
  return ((reinterpret_cast<uint64_t>(in_ptr) | reinterpret_cast<uint64_t>(pointers.out)) & 15) == 0;
}

inline cudaError_t launch(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  if (is_gradient(problem, op)) return depthwise_grad::launch(op, problem, pointers, stream);
  const bool w_aligned = reinterpret_cast<uint64_t>(pointers.w) % 8 == 0;
  return launch_planned(op, problem, pointers, plan_of(problem, op, is_aligned(op, pointers), w_aligned), stream);
}

#endif  // launchers

inline void describe(const Problem& problem, Operator op, char* text, size_t text_size) {
  if (is_gradient(problem, op)) return depthwise_grad::describe(problem, op, text, text_size);
  const Plan& plan = plan_of(problem, op, true, true);
  const Tile& tile = plan.tile;
  const Strip& strip = plan.strip;
  static constexpr const char* kStores[] = {"vectors", "runs", "single elements"};
  if (plan.kernel == Kernel::kPlanes || plan.kernel == Kernel::kPlanesAny)
    snprintf(
        text, text_size,
        "%s: tile of %d planes x %d x %d pixels, bands of %d rows, loads %s, stores %s, %d bytes of shared memory, "
        "%lld blocks",
        plan.kernel == Kernel::kPlanes ? "planes" : "planes_any", tile.planes, tile.tile_p, tile.tile_q, tile.band_rows,
        tile.by_runs ? "runs" : "single elements", kStores[static_cast<int>(tile.store)], tile.smem_bytes,
        static_cast<long long>(tile.tiles));
  else if (plan.kernel == Kernel::kRing)
    snprintf(
        text, text_size,
        "ring: %d planes of %d groups of columns, bands of %d rows, %d rows a thread, %d slots of %d steps%s, a block "
        "for %lld of %lld images, %d bytes of shared memory, %lld blocks",
        plan.ring.planes, plan.ring.groups, plan.ring.band_rows, plan.ring.split_rows, plan.ring.slots, plan.ring.steps,
        plan.ring.whole ? ", whole planes" : "", static_cast<long long>(ceil_div(problem.N, plan.ring.parts)),
        static_cast<long long>(problem.N), plan.ring.smem_bytes, static_cast<long long>(plan.ring.blocks));
  else
    snprintf(text, text_size, "%s: %d lanes of %d channels, bands of %d rows, %d bytes of shared memory, %lld blocks",
             plan.kernel == Kernel::kQueue    ? "queue"
             : plan.kernel == Kernel::kPixels ? "pixels"
                                              : "pixels_any",
             strip.lanes,
             plan.kernel == Kernel::kQueue    ? kQueueShapes[strip.queue_shape].channels
             : plan.kernel == Kernel::kPixels ? window_channels(problem, op, true)
                                              : 1,
             strip.band_rows, strip.smem_bytes, static_cast<long long>(strip.blocks));
}

#endif  // host

}  // namespace depthwise

#if (defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)) && !defined(__CUDACC_RTC__)
extern const Engine kDepthwiseEngine{"depthwise", depthwise::refusal, depthwise::workspace_bytes, depthwise::launch,
                                     depthwise::describe, depthwise::yields};
#endif

}  // namespace modelnew
