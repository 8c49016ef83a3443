// Sums over parts of the pixels, as blocks leave them in the workspace -> dw. A block has some input channels of all
// taps of a few output channels, and a thread adds four neighbouring channels of a tap at a time; where a block has few
// of them, threads share the parts. Sums come to dw by way of shared memory, unless dw has four channels side by side,
// too. Deterministic: the order of additions, of doubles, is fixed.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <algorithm>
#endif

#include "divisor.cuh"
#include "numerics.cuh"
#include "problem.cuh"
#include "ptx.cuh"

namespace modelnew {
namespace hopper {

constexpr int kAddThreads = 256, kMostAddChannels = 64, kMostAddSums = 4096;  // of a block
constexpr int kAddQuads = 2, kFewBlocks = 512;  // of a thread at a time; fewer blocks leave memory idle
constexpr int kMostAddTaps = 7168;              // of a filter: sums of four channels find room in shared memory

// Pixels of one sum on the tensor core, which truncates when it adds. dw of 16 bits is rounded more than that.
MODELNEW_HOST_DEVICE constexpr int64_t most_chained(bool of_16_bits) { return of_16_bits ? 1 << 15 : 1 << 13; }

struct WeightSums {
  const float* sums_ptr;  // [part][output channel][tap][input channel]
  void* dw_ptr;
  const int* done;  // as Pointers have it
  int64_t part, row, w_stride[4];  // steps: the first two in sums
  int parts, C, S, taps, row_channels;  // the latter: columns of a tap
  int K, block_k, channels, shares;     // of a block, the middle ones; of parts
  int group_padding;                    // rows of sums that a group has beyond its channels
  int R, own_S;                         // of dw; S and taps are what a fold leaves
  bool by_fours, planes;                // dw has four channels side by side; its filters are [C][R][S] without gaps
  Divisor by_blocks_c, by_quads, by_taps, by_channels, by_of_k, by_s, by_group_k, by_fold_h, by_fold_w;
};

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// Adds parts `share`, `share` + shares and so on of QUADS times four sums, from `first` on, and calls use(row, channel,
// sums) with each four: row is a tap of an output channel of the block.
template <int QUADS, typename Use>
__device__ __forceinline__ void add_parts(const WeightSums& params, int first, int quads, int share, const float* from,
                                          int first_k, const Use& use) {
  int row[QUADS], c[QUADS];
  const float* of[QUADS];
  double own[QUADS][4] = {};
#pragma unroll
  for (int i = 0; i < QUADS; ++i) {
    const int quad = first + i * kAddThreads < quads ? first + i * kAddThreads : first;
    row[i] = quotient(4 * quad, params.by_channels), c[i] = 4 * quad - row[i] * params.channels;
    const int in_block = quotient(row[i], params.by_taps), k = min(first_k + in_block, params.K - 1);
    const int64_t row_k = k + quotient(k, params.by_group_k) * static_cast<int64_t>(params.group_padding);
    of[i] = from + row_k * params.row + (row[i] - in_block * params.taps) * params.row_channels + c[i];
  }
#pragma unroll(4 / QUADS)
  for (int part = share; part < params.parts; part += params.shares) {
    float4 values[QUADS];
#pragma unroll
    for (int i = 0; i < QUADS; ++i) values[i] = *reinterpret_cast<const float4*>(of[i] + part * params.part);
#pragma unroll
    for (int i = 0; i < QUADS; ++i)
      own[i][0] += values[i].x, own[i][1] += values[i].y, own[i][2] += values[i].z, own[i][3] += values[i].w;
  }
#pragma unroll
  for (int i = 0; i < QUADS; ++i)
    if (i == 0 || first + i * kAddThreads < quads) use(row[i], c[i], own[i]);
}

template <typename Stored>
__global__ void __launch_bounds__(kAddThreads, 4) weight_sums_kernel(const __grid_constant__ WeightSums params) {
  extern __shared__ __align__(16) uint8_t modelnew_weight_sums_smem[];
  const int of_k = params.taps * params.channels, pitch = params.channels + 4;  // rows begin in other banks
  float* const sums = reinterpret_cast<float*>(modelnew_weight_sums_smem);  // [output channel][tap][channel]
  double* const shares = reinterpret_cast<double*>(sums + params.block_k * params.taps * pitch);  // [thread][4]
  const int thread = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
  const int column = quotient(block, params.by_blocks_c), first_k = column * params.block_k;
  const int first_c = (block - column * static_cast<int>(params.by_blocks_c.divisor)) * params.channels;
  const int block_k = min(params.K - first_k, params.block_k), quads = params.block_k * of_k / 4;
  const float* const from = params.sums_ptr + first_c;
  Stored* const to = static_cast<Stored*>(params.dw_ptr);
  wait_for_prerequisites();
  if (params.done != nullptr && *params.done != 0) return;
  if (params.shares > 1) {
    const int share = quotient(thread, params.by_quads);
    if (share < params.shares)
      add_parts<1>(params, thread - share * quads, quads, share, from, first_k, [&](int, int, const double(&own)[4]) {
#pragma unroll
        for (int j = 0; j < 4; ++j) shares[4 * thread + j] = own[j];
      });
    __syncthreads();  // all shares are there
#pragma unroll 1
    for (int i = thread; i < 4 * quads; i += kAddThreads) {
      double sum = 0;
#pragma unroll 1
      for (int other = 0; other < params.shares; ++other) sum += shares[4 * quads * other + i];
      const int row = quotient(i, params.by_channels);
      sums[row * pitch + i - row * params.channels] = static_cast<float>(sum);
    }
  } else {
#pragma unroll 1
    for (int quad = thread; quad < quads; quad += kAddQuads * kAddThreads)
      add_parts<kAddQuads>(params, quad, quads, 0, from, first_k, [&](int row, int c, const double(&own)[4]) {
        struct alignas(4 * sizeof(Stored)) Four {
          Stored value[4];
        } four;
        if (params.by_fours) {
          const int in_block = quotient(row, params.by_taps), tap = row - in_block * params.taps;
          const int r = quotient(tap, params.by_s), s = tap - r * params.S;
#pragma unroll
          for (int j = 0; j < 4; ++j) narrow(static_cast<float>(own[j]), four.value[j]);
          if (in_block < block_k && first_c + c < params.C)
            *reinterpret_cast<Four*>(to + (first_k + in_block) * params.w_stride[0] + r * params.w_stride[2] +
                                     s * params.w_stride[3] + first_c + c) = four;
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[row * pitch + c + j] = static_cast<float>(own[j]);
        }
      });
    if (params.by_fours) return;
  }
  __syncthreads();  // all sums are there
#pragma unroll 1
  for (int i = thread; i < block_k * of_k; i += kAddThreads) {
    const int in_block = quotient(i, params.by_of_k), of = i - in_block * of_k;
    const int of_channels = quotient(of, params.by_taps), tap = of - of_channels * params.taps;
    const int c = first_c + of_channels;
    if (c >= params.C) continue;
    int64_t place = first_c * params.taps + of;
    if (!params.planes) {
      const int fold_h = static_cast<int>(params.by_fold_h.divisor), row_c = quotient(c, params.by_fold_w);
      const int fold_w = static_cast<int>(params.by_fold_w.divisor), own_c = quotient(row_c, params.by_fold_h);
      const int r = quotient(tap, params.by_s), s = tap - r * params.S;
      const int own_r = (r - own_c) * fold_h + row_c, own_s = (s - row_c) * fold_w + c;
      if (own_r >= params.R || own_s >= params.own_S) continue;
      place = own_c * params.w_stride[1] + own_r * params.w_stride[2] + own_s * params.w_stride[3];
    }
    narrow(sums[(in_block * params.taps + tap) * pitch + of_channels],
           to[(first_k + in_block) * params.w_stride[0] + place]);
  }
}

// Adds `parts` sums of the weights of `planned`, [groups x rows][R*S][row_channels or more], and stores them as dw of
// `problem`. The two differ by a fold: so many taps of a column and of a row are channels in the former.
template <typename Stored>
cudaError_t add_weights(const Problem& problem, const Problem& planned, int fold_h, int fold_w, WeightSums add,
                        int rows, cudaStream_t stream) {
  const int group_k = problem.K / problem.groups;
  add.K = problem.K, add.R = problem.R, add.own_S = problem.S, add.part = add.row * problem.groups * rows;
  add.group_padding = rows - group_k, add.by_group_k = make_divisor(group_k);
  std::copy_n(problem.w_stride, 4, add.w_stride);
  add.C = planned.C / planned.groups, add.S = planned.S, add.taps = planned.R * planned.S;
  for (add.channels = kMostAddChannels; add.channels > 4; add.channels /= 2)
    if (add.row_channels % add.channels == 0 && add.channels * add.taps <= kMostAddSums &&
        (add.channels <= 16 || problem.K * ceil_div(add.C, add.channels) >= kFewBlocks))
      break;
  const int64_t of_k = int64_t{add.taps} * add.channels;
  add.block_k = static_cast<int>(std::clamp<int64_t>(4 * kAddQuads * kAddThreads / of_k, 1,
                                                     std::max(1, problem.K * add.C / add.channels / kFewBlocks)));
  const int64_t quads = add.block_k * of_k / 4;
  add.shares = static_cast<int>(std::clamp<int64_t>(kAddThreads / quads, 1, ceil_div(add.parts, 2)));
  add.by_of_k = make_divisor(of_k), add.by_channels = make_divisor(add.channels);
  add.by_blocks_c = make_divisor(ceil_div(add.C, add.channels)), add.by_quads = make_divisor(quads);
  add.by_taps = make_divisor(add.taps), add.by_s = make_divisor(planned.S);
  add.by_fold_h = make_divisor(std::max(fold_h, 1)), add.by_fold_w = make_divisor(std::max(fold_w, 1));
  const auto fours = [](int64_t step, int size) { return size == 1 || step % 4 == 0; };
  const int64_t (&w)[4] = add.w_stride;
  add.by_fours = fold_h + fold_w == 0 && w[1] == 1 && add.C % 4 == 0 && fours(w[0], problem.K) &&
                 fours(w[2], problem.R) && fours(w[3], problem.S) &&
                 reinterpret_cast<uint64_t>(add.dw_ptr) % (4 * sizeof(Stored)) == 0;
  add.planes = fold_h + fold_w == 0 && (w[3] == 1 || add.S == 1) && (w[2] == add.S || planned.R == 1) &&
               (w[1] == add.taps || add.C == 1);
  const unsigned blocks = static_cast<unsigned>(ceil_div(add.K, add.block_k) * add.by_blocks_c.divisor);
  const size_t bytes = add.block_k * add.taps * (add.channels + 4) * sizeof(float) +
                       (add.shares > 1 ? kAddThreads * 4 * sizeof(double) : 0);
  const auto kernel = weight_sums_kernel<Stored>;
  const cudaError_t error = allow_all_shared_memory(kernel);  // filters may have many taps
  return error != cudaSuccess ? error : launch_early(kernel, blocks, kAddThreads, bytes, stream, add);
}

#endif  // device code, launcher

}  // namespace hopper
}  // namespace modelnew
