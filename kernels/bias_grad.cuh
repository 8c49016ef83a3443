// The gradient of the bias: db[k] is the sum of dy[n, k, p, q] over images and pixels, in double and rounded once. Of
// 16-bit values, those of a load or of kBatch pixels are added in fp32 first.
//
// Reading dy is all the work, so each layout is read along its memory, 16 bytes a load where it is dense:
//
//   planes_kernel     [n][k][pixel]: `lanes` threads sum a channel, a block those of neighbouring planes
//   pixels_kernel     [pixel][k], channels_last: a thread sums the channels of one load, at every `groups`-th pixel
//   partials_kernel   [split][k] -> db, where several blocks share a channel
//
// All sums are taken in a fixed order. Measurements: docs/lab/direct.md.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>
#endif

#include "block_sum.cuh"
#include "numerics.cuh"
#include "problem.cuh"

namespace modelnew {
namespace bias_grad {

constexpr int kThreads = 256;
constexpr int kBatch = 4;         // loads of a thread that are issued back to back
constexpr int kPartialLanes = 8;  // channels of a block of partials_kernel

struct Params {
  const void* dy_ptr;
  const void* end_ptr;  // behind the last element of dy
  double* partial_ptr;  // [split][K]; null: the only split writes db
  void* out_ptr;        // [K]
  int K, splits;
  int repeats;           // pixels_kernel takes so many pixels as one, with K * repeats channels: whole loads
  int lanes;             // threads side by side, along a strip of a plane or along the channels of a pixel
  int groups;            // kThreads / lanes
  bool aligned;          // planes_kernel: all strips begin and end at multiples of 16 bytes
  int64_t channel_step;  // steps are in elements of dy
  // Sums run over N x P x Q, with the smallest step last. Axes that follow one another in memory are one.
  int64_t sizes[3], steps[3];
  // planes_kernel cuts the last axis into strips, pixels_kernel takes all three as one list of pixels.
  int64_t strip_size, strips_per_row;
  int64_t items, items_per_split;  // strips or pixels
};

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// One load: a value, or 16 bytes of them as whole registers, because extracting a 16-bit value waits for the load.
template <typename Storage, int COUNT>
struct LoadOf {
  static_assert(sizeof(Storage) * COUNT == sizeof(uint4));
  using Type = uint4;
};
template <typename Storage>
struct LoadOf<Storage, 1> {
  using Type = Storage;
};
template <typename Storage, int COUNT>
using Loaded = typename LoadOf<Storage, COUNT>::Type;

// The type of short sums. Converting every 16-bit value to double would take longer than reading it.
template <typename Storage>
struct ShortSum {
  using Type = float;
};
template <>
struct ShortSum<float> {
  using Type = double;
};
template <>
struct ShortSum<double> {
  using Type = double;
};

template <typename Storage>
__device__ inline void store(double sum, void* out_ptr, int k) {
  using Wide = decltype(widen(Storage{}));
  narrow(static_cast<Wide>(sum), static_cast<Storage*>(out_ptr)[k]);
}

template <typename Storage>
__device__ inline void store_split(double sum, const Params& params, int split, int k) {
  if (params.partial_ptr != nullptr)
    params.partial_ptr[static_cast<int64_t>(split) * params.K + k] = sum;
  else
    store<Storage>(sum, params.out_ptr, k);
}

// blockIdx.x = (split, tile of channels). A strip may begin at any element: its threads load the aligned vectors in
// which it lies and add what belongs to it. COUNT is 1 if the elements of a strip are not neighbours in memory.
template <typename Storage, int COUNT>
__global__ void __launch_bounds__(kThreads, 4) planes_kernel(const Params params) {
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  using Sum = typename ShortSum<Storage>::Type;
  const unsigned tiles = gridDim.x / params.splits;
  const int split = static_cast<int>(blockIdx.x / tiles), tile = static_cast<int>(blockIdx.x % tiles);
  const int lane = static_cast<int>(threadIdx.x) % params.lanes, group = static_cast<int>(threadIdx.x) / params.lanes;
  const int k = tile * params.groups + group;
  const bool exists = group < params.groups && k < params.K;
  const int64_t first = split * params.items_per_split;
  const int64_t end = first + params.items_per_split < params.items ? first + params.items_per_split : params.items;

  double sum[kBatch] = {};
  for (int64_t strip = first; strip < end && exists; ++strip) {
    const int64_t row = params.strips_per_row == 1 ? strip : strip / params.strips_per_row;
    const int64_t outer = params.sizes[1] == 1 ? row : row / params.sizes[1];
    const int64_t begin = (strip - row * params.strips_per_row) * params.strip_size;
    const int64_t left = params.sizes[2] - begin;
    const int size = static_cast<int>(left < params.strip_size ? left : params.strip_size);
    const Storage* const strip_ptr = static_cast<const Storage*>(params.dy_ptr) + k * params.channel_step +
                                     outer * params.steps[0] + (row - outer * params.sizes[1]) * params.steps[1] +
                                     begin * params.steps[2];
    const uint64_t address = reinterpret_cast<uint64_t>(strip_ptr);
    const int excess = static_cast<int>(address % (sizeof(Storage) * COUNT) / sizeof(Storage));
    // The first and the last vector of dy may reach out of it. They are not loaded: their elements, up to `front` and
    // from `back` on, are added one by one.
    const int front = strip_ptr - excess < params.dy_ptr ? (COUNT - excess < size ? COUNT - excess : size) : 0;
    const int last = (size - 1 + excess) / COUNT * COUNT - excess;
    const int end_of_vectors = COUNT == 1 || strip_ptr + last + COUNT <= params.end_ptr ? size : last;
    const int back = end_of_vectors > front ? end_of_vectors : front;
    for (int position = lane * COUNT - excess; position < end_of_vectors; position += kBatch * params.lanes * COUNT) {
      Loaded<Storage, COUNT> loaded[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = position + i * params.lanes * COUNT;
        const Storage* const source = strip_ptr + at * (COUNT == 1 ? params.steps[2] : 1);
        const bool whole = at < end_of_vectors && (at >= 0 || front == 0);
        loaded[i] = load_if(whole, reinterpret_cast<const Loaded<Storage, COUNT>*>(source));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = position + i * params.lanes * COUNT;
        Storage values[COUNT];
        memcpy(values, &loaded[i], sizeof values);
        Sum of_load = 0;
        if (params.aligned) {
          of_load = widen(values[0]);
#pragma unroll
          for (int j = 1; j < COUNT; ++j) of_load += widen(values[j]);
        } else {
#pragma unroll
          for (int j = 0; j < COUNT; ++j)
            if (is_within(at + j, size)) of_load += widen(values[j]);
        }
        sum[i] += of_load;
      }
    }
    for (int at = lane; at < front; at += params.lanes) sum[0] += widen(strip_ptr[at]);
    for (int at = back + lane; at < size; at += params.lanes) sum[0] += widen(strip_ptr[at]);
  }
  static_assert(kBatch == 4, "all are added");
  const double all[1] = {(sum[0] + sum[1]) + (sum[2] + sum[3])};
  double* const smem = reinterpret_cast<double*>(modelnew_smem);
  add_rows<kThreads>(all, lane, group, params.lanes, params.groups, smem);
  const int stored = tile * params.groups + static_cast<int>(threadIdx.x);
  if (static_cast<int>(threadIdx.x) < params.groups && stored < params.K)
    store_split<Storage>(smem[threadIdx.x], params, split, stored);
}

// blockIdx.x = (split, tile of channels).
template <typename Storage, int COUNT>
__global__ void __launch_bounds__(kThreads, 4) pixels_kernel(const Params params) {
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  using Sum = typename ShortSum<Storage>::Type;
  const unsigned tiles = gridDim.x / params.splits;
  const int split = static_cast<int>(blockIdx.x / tiles), tile = static_cast<int>(blockIdx.x % tiles);
  const int lane = static_cast<int>(threadIdx.x) % params.lanes, group = static_cast<int>(threadIdx.x) / params.lanes;
  const int channels = params.K * params.repeats, channel = (tile * params.lanes + lane) * COUNT;
  const bool exists = group < params.groups && channel < channels;
  const int64_t first = split * params.items_per_split;
  const int64_t end = first + params.items_per_split < params.items ? first + params.items_per_split : params.items;
  const bool even = params.sizes[0] == 1 && params.sizes[1] == 1;
  const Storage* const dy_ptr = static_cast<const Storage*>(params.dy_ptr);

  double sum[COUNT] = {};
  for (int64_t pixel = first + group; pixel < end && exists; pixel += kBatch * params.groups) {
    Loaded<Storage, COUNT> loaded[kBatch];
    const auto offset = [&](int64_t m) {
      if (even) return m * params.steps[2];
      const int64_t row = m / params.sizes[2], outer = row / params.sizes[1];
      return outer * params.steps[0] + (row - outer * params.sizes[1]) * params.steps[1] +
             (m - row * params.sizes[2]) * params.steps[2];
    };
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t m = pixel + i * params.groups;
      loaded[i] = load_if(m < end, reinterpret_cast<const Loaded<Storage, COUNT>*>(dy_ptr + channel + offset(m)));
    }
    Storage values[kBatch][COUNT];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) memcpy(values[i], &loaded[i], sizeof values[i]);
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      Sum of_batch = widen(values[0][j]);
#pragma unroll
      for (int i = 1; i < kBatch; ++i) of_batch += widen(values[i][j]);
      sum[j] += of_batch;
    }
  }
  double* const smem = reinterpret_cast<double*>(modelnew_smem);
  add_rows<kThreads>(sum, group, lane, params.groups, params.lanes, smem);
  const int all = params.lanes * COUNT, step = params.repeats == 1 ? all : params.K, first_k = tile * all;
  for (int i = threadIdx.x; i < step && first_k + i < params.K; i += kThreads) {
    double of_channel = 0;
    for (int at = i; at < all; at += step) of_channel += smem[at % COUNT * kThreads + at / COUNT];
    if (params.repeats > 1 && split == 0)  // pixels that are left when so many are taken as one
      for (const Storage* rest = dy_ptr + params.items * all + i; rest < params.end_ptr; rest += params.K)
        of_channel += widen(*rest);
    store_split<Storage>(of_channel, params, split, first_k + i);
  }
}

template <typename Storage>
__global__ void __launch_bounds__(kThreads) partials_kernel(const Params params) {
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  const int row = static_cast<int>(threadIdx.x) / kPartialLanes, column = static_cast<int>(threadIdx.x) % kPartialLanes;
  constexpr int ROWS = kThreads / kPartialLanes;
  const int k = static_cast<int>(blockIdx.x) * kPartialLanes + column;
  double sum[1] = {};
  if (k < params.K) {
#pragma unroll 8
    for (int split = row; split < params.splits; split += ROWS)
      sum[0] += params.partial_ptr[static_cast<int64_t>(split) * params.K + k];
  }
  double* const smem = reinterpret_cast<double*>(modelnew_smem);
  add_rows<kThreads>(sum, row, column, ROWS, kPartialLanes, smem);
  if (row == 0 && k < params.K) store<Storage>(smem[column], params.out_ptr, k);
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

struct Plan {
  Params params;
  bool by_pixels;
  int count;  // elements a load
  int64_t blocks;
};

// The number of threads that share so many loads, such that few of a block's threads and of their batches stay empty.
inline int fitting_lanes(int64_t loads, int64_t most_groups) {
  int best = kThreads;
  double most_useful = 0;
  for (int batches = 1; batches <= 8; ++batches) {
    const int64_t lanes = std::max<int64_t>(1, ceil_div(loads, batches * kBatch));
    if (lanes > kThreads) continue;
    const double useful = static_cast<double>(loads * std::min(kThreads / lanes, most_groups)) / batches;
    if (useful > most_useful * 1.05) {
      most_useful = useful;
      best = static_cast<int>(lanes);
    }
  }
  return best;
}

// The axes that are summed, sorted by their steps and joined where one continues another, in any memory format.
inline void join_axes(const Problem& problem, Params& params) {
  struct Axis {
    int64_t step, size;
  } axes[3] = {{problem.y_stride[0], problem.N}, {problem.y_stride[2], problem.P}, {problem.y_stride[3], problem.Q}};
  for (int round = 0; round < 2; ++round)
    for (int i = 0; i < 2; ++i)
      if (axes[i].step > axes[i + 1].step) std::swap(axes[i], axes[i + 1]);
  int last = 3;
  for (const Axis& axis : axes) {
    if (axis.size == 1) continue;
    if (last < 3 && axis.step == params.steps[last] * params.sizes[last]) {
      params.sizes[last] *= axis.size;
    } else {
      --last;
      params.steps[last] = axis.step;
      params.sizes[last] = axis.size;
    }
  }
  while (last > 0) params.sizes[--last] = 1;
}

// The plan depends on the problem and on where dy begins, never on the GPU: the same bits come out everywhere.
inline Plan make_plan(const Problem& problem, const void* dy_ptr) {
  constexpr int64_t kStripBytes = 16 << 10;
  // Blocks in all: as many as 132 SMs hold at once where pixels are split evenly, else more, so that the last ones are
  // small. Bytes that each reads at least; fewer than kLeastSplits of them do not pay for partials_kernel.
  constexpr int64_t kPixelBlocks = 528, kPlaneBlocks = 1056, kLeastBytes = 32 << 10, kLeastSplits = 3;
  const int bytes = element_bytes(problem.dtype), most_count = 16 / bytes;
  Plan plan{};
  Params& params = plan.params;
  params.K = problem.K;
  params.channel_step = problem.y_stride[1];
  join_axes(problem, params);
  plan.by_pixels = problem.K > 1 && params.channel_step == 1 && params.steps[2] != 1;
  params.repeats = 1;
  const bool dense = params.sizes[0] == 1 && params.sizes[1] == 1 && params.steps[2] == problem.K;
  const auto whole = [&](int64_t elements) { return elements % most_count == 0; };
  const bool begins_aligned = reinterpret_cast<uint64_t>(dy_ptr) % 16 == 0;
  const bool steps_aligned = begins_aligned && whole(params.steps[0]) && whole(params.steps[1]);
  int64_t tiles, item_bytes, blocks = kPlaneBlocks;
  if (plan.by_pixels) {
    const bool pixels_aligned = steps_aligned && whole(params.steps[2]) && whole(problem.K);
    plan.count = pixels_aligned || (dense && begins_aligned) ? most_count : 1;
    const int64_t channels = problem.K;
    while (channels * params.repeats % plan.count != 0) params.repeats *= 2;
    if (params.repeats > 1 && channels * params.repeats / plan.count > kThreads) params.repeats = plan.count = 1;
    params.items = params.sizes[0] * params.sizes[1] * params.sizes[2] / params.repeats;
    if (params.repeats > 1) params.steps[2] *= params.repeats;
    const int64_t loads = channels * params.repeats / plan.count;
    // A block that reads all pixels of its channels needs no split: it takes as many as kLeastBytes hold. Where that is
    // too much even for kFewLoads, pixels are split, and neighbouring threads read long pieces of them.
    constexpr int64_t kFewLoads = 8, kManyLoads = 128;
    const int64_t load_bytes = params.items * plan.count * bytes;
    const int64_t fitting = std::max(kFewLoads, std::min(kManyLoads, kLeastBytes / std::max<int64_t>(1, load_bytes)));
    const bool one_split = load_bytes * kFewLoads < kLeastSplits * kLeastBytes;
    tiles = params.repeats == 1 ? ceil_div(loads, one_split ? fitting : kManyLoads) : 1;
    blocks = kPixelBlocks;
    params.lanes = static_cast<int>(ceil_div(loads, tiles));
    item_bytes = params.lanes * plan.count * bytes;
  } else {
    plan.count = params.steps[2] == 1 ? most_count : 1;
    params.strips_per_row = ceil_div(params.sizes[2] * bytes, kStripBytes);
    const int64_t even_size = ceil_div(params.sizes[2], std::max<int64_t>(1, params.strips_per_row));
    params.strip_size = ceil_div(even_size, 16) * 16;
    params.items = params.sizes[0] * params.sizes[1] * params.strips_per_row;
    params.aligned = plan.count == 1 || (steps_aligned && whole(params.channel_step) && whole(params.sizes[2]));
    const int64_t size = std::min(params.sizes[2], params.strip_size);
    const int64_t loads = ceil_div(size + (params.aligned ? 0 : plan.count - 1), plan.count);
    params.lanes = fitting_lanes(loads, problem.K);
    tiles = ceil_div(problem.K, kThreads / params.lanes);
    item_bytes = size * bytes * std::min(problem.K, kThreads / params.lanes);
  }
  params.groups = kThreads / params.lanes;
  const int64_t parts = params.items * item_bytes / kLeastBytes, most = parts < kLeastSplits ? 1 : parts;
  params.items_per_split = std::max<int64_t>(1, ceil_div(params.items, std::min(most, ceil_div(blocks, tiles))));
  params.splits = static_cast<int>(std::max<int64_t>(1, ceil_div(params.items, params.items_per_split)));
  plan.blocks = tiles * params.splits;
  return plan;
}

inline int64_t workspace_bytes(const Problem& problem, const void* dy_ptr) {
  const Params params = make_plan(problem, dy_ptr).params;
  return params.splits == 1 ? 0 : params.splits * static_cast<int64_t>(sizeof(double)) * params.K;
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

template <typename Storage, int COUNT>
inline void run(const Plan& plan, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(plan.blocks);
  constexpr size_t kSmemBytes = kThreads * sizeof(double);
  if (plan.by_pixels)
    pixels_kernel<Storage, COUNT><<<blocks, kThreads, COUNT * kSmemBytes, stream>>>(plan.params);
  else
    planes_kernel<Storage, COUNT><<<blocks, kThreads, kSmemBytes, stream>>>(plan.params);
  if (plan.params.partial_ptr == nullptr) return;
  const unsigned tiles = static_cast<unsigned>(ceil_div(plan.params.K, kPartialLanes));
  partials_kernel<Storage><<<tiles, kThreads, kSmemBytes, stream>>>(plan.params);
}

template <typename Storage>
inline void run(const Plan& plan, cudaStream_t stream) {
  if (plan.count == 1)
    run<Storage, 1>(plan, stream);
  else
    run<Storage, 16 / sizeof(Storage)>(plan, stream);
}

inline cudaError_t launch(const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  Plan plan = make_plan(problem, pointers.dy);
  Params& params = plan.params;
  if (plan.blocks >= int64_t{1} << 31) return cudaErrorInvalidConfiguration;
  const int64_t (&step)[4] = problem.y_stride;
  const int64_t last =
      (problem.N - 1) * step[0] + (problem.K - 1) * step[1] + (problem.P - 1) * step[2] + (problem.Q - 1) * step[3];
  params.dy_ptr = pointers.dy;
  params.end_ptr = static_cast<const char*>(pointers.dy) + (last + 1) * element_bytes(problem.dtype);
  params.partial_ptr = params.splits == 1 ? nullptr : static_cast<double*>(pointers.workspace);
  params.out_ptr = pointers.out;
  switch (problem.dtype) {
    case DType::kFloat32:
      run<float>(plan, stream);
      break;
    case DType::kFloat16:
      run<Half>(plan, stream);
      break;
    case DType::kBFloat16:
      run<BFloat16>(plan, stream);
      break;
    case DType::kFloat64:
      run<double>(plan, stream);
      break;
  }
  return cudaGetLastError();
}

#endif  // launchers

#endif  // host

}  // namespace bias_grad
}  // namespace modelnew
