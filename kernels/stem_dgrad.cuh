// stem_dgrad, part of the direct engine: the gradient to an input of few channels, as the first layers of networks have
// them, at a stride of 1 or 2. Full fp32 by multiply-adds; sums run in chunks of at most kChunk terms (numerics.cuh).
//
// At a stride of 2 each tap meets one of 2x2 pixels of dx, and they read the same window of dy. With 7 taps and a
// padding of 3:
//
//   row of dy        i-1  i  i+1  i+2
//   tap of row 2i     5   3   1    -
//   of row 2i + 1     6   4   2    0
//
// A thread owns four such blocks side by side, or eight pixels, and all channels of them: a tap's weights, one load of
// shared memory, are multiplied so many times. What meets what the compiler knows. Tiles of 32 x 64 or 16 x 64 pixels:
//
//   dy --(kFilters channels at a time)--> shared memory [channel][row][column]   --+
//   w  --------------------------------> shared memory [channel][tap] x 16 bytes --+--> FFMA --> registers --> dx
//                                        totals of chunks
//
// Bound by instruction issue. Measurements: docs/lab/direct.md.
#pragma once

#include "correlate.cuh"

namespace modelnew {
namespace direct {
namespace stem_dgrad {

constexpr int kThreads = 128;
constexpr int kLanes = 8, kColumns = 8;       // threads of a row of a tile; pixels of dx of each, side by side
constexpr int kTileRows = kThreads / kLanes;  // of threads

template <int VALUE>
struct Constant {
  static constexpr int value = VALUE;
};

// The taps of an axis at a stride, whose padding is ODD above a multiple of it.
template <int TAPS, int STRIDE, int ODD>
struct Taps {
  static constexpr int kBlocks = kColumns / STRIDE, kTileColumns = kLanes * kBlocks;
  // Output channels of the convolution, of a stage. Blocks may have 64 KB on every GPU; 4x4 filters need registers.
  static constexpr int kFilters = TAPS == 4 || (TAPS == 7 && STRIDE == 1) ? 4 : 8;
  // A phase of rows of dx has a first tap, a count of taps, and a reach: the row of dy that the first tap reads,
  // counted from block i's own.
  MODELNEW_HOST_DEVICE static constexpr int first(int phase) { return (phase + ODD) % STRIDE; }
  MODELNEW_HOST_DEVICE static constexpr int count(int phase) { return (TAPS - first(phase) + STRIDE - 1) / STRIDE; }
  MODELNEW_HOST_DEVICE static constexpr int reach(int phase) { return (phase + ODD - first(phase)) / STRIDE; }
  MODELNEW_HOST_DEVICE static constexpr int most() { return (TAPS + STRIDE - 1) / STRIDE; }  // of a phase
  MODELNEW_HOST_DEVICE static constexpr int low() {
    const int of_first = reach(0) - count(0), of_last = reach(STRIDE - 1) - count(STRIDE - 1);
    return 1 + (of_first < of_last ? of_first : of_last);
  }
  MODELNEW_HOST_DEVICE static constexpr int window() {
    const int of_last = reach(STRIDE - 1);
    return (reach(0) > of_last ? reach(0) : of_last) - low() + 1;
  }
  // Values of a row and of all rows of a channel of dy in shared memory.
  MODELNEW_HOST_DEVICE static constexpr int pitch() { return (kTileColumns + window() - 1 + 3) / 4 * 4; }
  // Four planes are 16 banks more than a multiple of all: threads store two fours of a pixel at once.
  MODELNEW_HOST_DEVICE static constexpr int plane() { return ((kTileRows + window() - 1) * pitch() + 3) / 8 * 8 + 4; }
  MODELNEW_HOST_DEVICE static constexpr int staged() { return kFilters * (plane() + TAPS * TAPS * 4); }
  // Bytes of shared memory of a block, with the totals of these channels of dx.
  static constexpr int bytes(int channels) {
    return (staged() + STRIDE * kColumns * channels * kThreads) * static_cast<int>(sizeof(float));
  }
  // The tap by which a row reads row number `place` of the window, or -1.
  MODELNEW_HOST_DEVICE static constexpr int tap(int phase, int place) {
    const int number = reach(phase) - low() - place;
    return number >= 0 && number < count(phase) ? first(phase) + STRIDE * number : -1;
  }
};

struct Params {
  const void *dy_ptr, *w_ptr;
  void* dx_ptr;
  int64_t dy_stride[4], dx_stride[4], w_stride[4];
  int H, W, K, P, Q;
  int first_p, first_q;  // what the window of block 0 begins with
  int tiles_h, tiles_w;
  bool channels_last, in_vectors;  // dx; its runs may be stored by 16 bytes
  bool in_pieces;                  // dy: the channels of a stage are neighbours, and may be loaded by pieces
  DType dtype;
};

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// Neighbouring values of dx, `count` of them.
template <typename Storage, int VALUES>
__device__ __forceinline__ void store_run(const float (&values)[VALUES], int count, bool in_vectors, Storage* to) {
  constexpr int kSize = 16 / static_cast<int>(sizeof(Storage));
  struct alignas(16) Piece {
    Storage value[kSize];
  };
  if (in_vectors && count == VALUES) {
#pragma unroll
    for (int i = 0; i < VALUES / kSize; ++i) {
      Piece piece;
#pragma unroll
      for (int j = 0; j < kSize; ++j) narrow(values[i * kSize + j], piece.value[j]);
      reinterpret_cast<Piece*>(to)[i] = piece;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < VALUES; ++i) {
    if (i < count) narrow(values[i], to[i]);
  }
}

template <int TAPS, int STRIDE, int ODD, int CHANNELS>
__global__ void __launch_bounds__(kThreads, CHANNELS == 4 ? 3 : 4)
    stem_dgrad_kernel(const __grid_constant__ Params params) {
  using Axis = Taps<TAPS, STRIDE, ODD>;
  constexpr int kWindow = Axis::window(), kPitch = Axis::pitch(), kPlane = Axis::plane(), kAllTaps = TAPS * TAPS;
  constexpr int kBlocks = Axis::kBlocks, kTileColumns = Axis::kTileColumns, kFilters = Axis::kFilters;
  constexpr int kReads = (kBlocks + kWindow - 1 + 3) / 4 * 4;  // values of a row of dy that a thread loads
  static_assert(kPitch >= (kLanes - 1) * kBlocks + kReads, "it loads fours");
  constexpr int kMostTerms = Axis::most() * Axis::most();  // of a filter
  constexpr int kChunkFilters = kChunk / kMostTerms >= 4 ? 4 : kChunk / kMostTerms >= 2 ? 2 : 1;
  static_assert(kMostTerms <= kChunk, "a filter's terms are a chunk at most");
  extern __shared__ __align__(16) unsigned char stem_dgrad_smem[];
  float* const dy_smem = reinterpret_cast<float*>(stem_dgrad_smem);
  float* const w_smem = dy_smem + kFilters * kPlane;

  const int thread = static_cast<int>(threadIdx.x), column = thread % kLanes, row = thread / kLanes;
  int tile = static_cast<int>(blockIdx.x);
  const int tile_w = tile % params.tiles_w;
  tile /= params.tiles_w;
  const int tile_h = tile % params.tiles_h, n = tile / params.tiles_h;
  const int first_i = tile_h * kTileRows, first_j = tile_w * kTileColumns;
  float acc[STRIDE][kColumns][CHANNELS] = {};
  float* const totals = w_smem + kFilters * kAllTaps * 4 + thread;
  const auto place = [](int a, int j, int c) { return ((a * kColumns + j) * CHANNELS + c) * kThreads; };
  for (int i = 0; i < STRIDE * kColumns * CHANNELS; ++i) totals[i * kThreads] = 0;
  const auto end_chunk = [&] {
#pragma unroll
    for (int a = 0; a < STRIDE; ++a)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) add_chunk(acc[a][j][c], totals[place(a, j, c)]);
  };
  for (int first_k = 0; first_k < params.K; first_k += kFilters) {
    __syncthreads();  // the stage before has been read
    with_storage<float>(params.dtype, [&](auto tag) {
      using Storage = decltype(tag);
      // In channels_last neighbouring threads load a pixel's pieces of up to 16 bytes, whole sectors of memory in fp32.
      const auto stage = [&](auto piece_channels) {
        constexpr int kPiece = decltype(piece_channels)::value;
        constexpr int kNeighbours = kPiece == 1 ? 1 : kFilters / kPiece, kEach = kPiece == 1 ? kFilters : 1;
        struct alignas(kPiece * sizeof(Storage)) Piece {
          Storage value[kPiece];
        };
#pragma unroll 2
        for (int i = thread; i < kNeighbours * kPlane; i += kThreads) {
          const int pixel = i / kNeighbours, first = i % kNeighbours * kPiece;
          const int p = params.first_p + first_i + pixel / kPitch, q = params.first_q + first_j + pixel % kPitch;
          const bool exists = is_within(p, params.P) && is_within(q, params.Q);
          const Storage* const from = static_cast<const Storage*>(params.dy_ptr) + n * params.dy_stride[0] +
                                      (first_k + first) * params.dy_stride[1] + p * params.dy_stride[2] +
                                      q * params.dy_stride[3];
          Piece pieces[kEach];
#pragma unroll
          for (int k = 0; k < kEach; ++k)
            pieces[k] = load_if(exists && first_k + first + k < params.K,
                                reinterpret_cast<const Piece*>(from + k * params.dy_stride[1]));
#pragma unroll
          for (int k = 0; k < kFilters / kNeighbours; ++k)
            dy_smem[(first + k) * kPlane + pixel] = widen(pieces[k / kPiece].value[k % kPiece]);
        }
      };
      if (params.in_pieces)
        stage(Constant<sizeof(Storage) == 2 ? kFilters : 4>{});
      else
        stage(Constant<1>{});
      for (int i = thread; i < kFilters * kAllTaps * 4; i += kThreads) {
        const int c = i % 4, tap = i / 4 % kAllTaps, k = first_k + i / (4 * kAllTaps);
        const int64_t from = k * params.w_stride[0] + c * params.w_stride[1] + tap / TAPS * params.w_stride[2] +
                             tap % TAPS * params.w_stride[3];
        w_smem[i] = widen(load_if(k < params.K && c < CHANNELS, static_cast<const Storage*>(params.w_ptr) + from));
      }
    });
    __syncthreads();  // it is there
#pragma unroll 1
    for (int k = 0; k < kFilters; ++k) {
      const float* const dy_rows = dy_smem + k * kPlane + row * kPitch + column * kBlocks;
      const float4* const w_taps = reinterpret_cast<const float4*>(w_smem) + k * kAllTaps;
#pragma unroll
      for (int down = 0; down < kWindow; ++down) {
        float dy[kReads];
#pragma unroll
        for (int i = 0; i < kReads; i += 4)
          reinterpret_cast<float4&>(dy[i]) = *reinterpret_cast<const float4*>(dy_rows + down * kPitch + i);
#pragma unroll
        for (int a = 0; a < STRIDE; ++a) {
          if (Axis::tap(a, down) < 0) continue;
#pragma unroll
          for (int right = 0; right < kWindow; ++right)
#pragma unroll
            for (int b = 0; b < STRIDE; ++b) {
              if (Axis::tap(b, right) < 0) continue;
              const float4 four = w_taps[Axis::tap(a, down) * TAPS + Axis::tap(b, right)];
              const float w[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
              for (int j = 0; j < kBlocks; ++j)
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c)
                  acc[a][STRIDE * j + b][c] = fmaf(w[c], dy[j + right], acc[a][STRIDE * j + b][c]);
            }
        }
      }
      if (k % kChunkFilters == kChunkFilters - 1) end_chunk();
    }
  }

  with_storage<float>(params.dtype, [&](auto tag) {
    using Storage = decltype(tag);
    const int w = STRIDE * (first_j + column * kBlocks);
    const int columns = params.W - w < kColumns ? params.W - w : kColumns;
#pragma unroll
    for (int a = 0; a < STRIDE; ++a) {
      const int h = STRIDE * (first_i + row) + a;
      if (h >= params.H || columns <= 0) break;
      Storage* const to = static_cast<Storage*>(params.dx_ptr) + n * params.dx_stride[0] + h * params.dx_stride[2] +
                          w * params.dx_stride[3];
      if (params.channels_last) {
        float run[kColumns * CHANNELS];
#pragma unroll
        for (int i = 0; i < kColumns * CHANNELS; ++i) {
          const int j = i / CHANNELS, c = i % CHANNELS;
          run[i] = totals[place(a, j, c)] + acc[a][j][c];
        }
        store_run(run, columns * CHANNELS, params.in_vectors, to);
      } else {
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
          float run[kColumns];
#pragma unroll
          for (int j = 0; j < kColumns; ++j) run[j] = totals[place(a, j, c)] + acc[a][j][c];
          store_run(run, columns, params.in_vectors, to + c * params.dx_stride[1]);
        }
      }
    }
  });
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// Calls use(TAPS, STRIDE, CHANNELS), as constants, if there is a kernel of them.
template <typename Use>
bool with_kernel(const Problem& problem, const Use& use) {
  const auto with_channels = [&](auto taps, auto stride) {
    switch (problem.C) {
      case 1:
        return use(taps, stride, Constant<1>{});
      case 2:
        return use(taps, stride, Constant<2>{});
      case 3:
        return use(taps, stride, Constant<3>{});
      case 4:
        return use(taps, stride, Constant<4>{});
    }
    return false;
  };
  const auto with_stride = [&](auto taps) {
    return problem.stride_h == 1 ? with_channels(taps, Constant<1>{}) : with_channels(taps, Constant<2>{});
  };
  switch (problem.R) {
    case 3:
      return with_stride(Constant<3>{});
    case 4:
      return with_stride(Constant<4>{});
    case 5:
      return with_stride(Constant<5>{});
    case 7:
      return with_stride(Constant<7>{});
  }
  return false;
}

// The padding at a stride of 2 is odd, as usual with so many taps, or even.
constexpr int odd_of(int taps, int stride) { return stride == 1 || taps == 5 ? 0 : 1; }

inline int64_t tiles_h(const Problem& problem) { return ceil_div(problem.H, problem.stride_h * kTileRows); }
inline int64_t tiles_w(const Problem& problem) { return ceil_div(problem.W, kLanes * kColumns); }
inline int64_t tiles_of(const Problem& problem) { return problem.N * tiles_h(problem) * tiles_w(problem); }

// Fewer tiles leave most SMs without one.
constexpr int64_t kLeastTiles = 16, kMostTiles = int64_t{1} << 31;

inline bool takes(const Problem& problem, Operator op) {
  const int64_t (&dx)[4] = problem.x_stride;
  const int stride = problem.stride_h, odd = odd_of(problem.R, stride);
  const bool square = problem.R == problem.S && (stride == 1 || stride == 2) && problem.stride_w == stride &&
                      problem.dilation_h == 1 && problem.dilation_w == 1;
  const bool known = problem.pad_h >= 0 && problem.pad_w >= 0 && problem.pad_h % stride == odd &&
                     problem.pad_w % stride == odd;
  const bool side_by_side = dx[3] == 1 || ((dx[1] == 1 || problem.C == 1) && dx[3] == problem.C);
  return op == Operator::kDgrad && problem.dtype != DType::kFloat64 && problem.groups == 1 && square && known &&
         side_by_side && tiles_of(problem) >= kLeastTiles && tiles_of(problem) < kMostTiles &&
         with_kernel(problem, [](auto, auto, auto) { return true; });
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

inline cudaError_t launch(const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  Params params{pointers.dy, pointers.w, pointers.out};
  std::copy_n(problem.y_stride, 4, params.dy_stride);
  std::copy_n(problem.x_stride, 4, params.dx_stride);
  std::copy_n(problem.w_stride, 4, params.w_stride);
  params.H = problem.H, params.W = problem.W, params.K = problem.K, params.P = problem.P, params.Q = problem.Q;
  params.tiles_h = static_cast<int>(tiles_h(problem)), params.tiles_w = static_cast<int>(tiles_w(problem));
  params.channels_last = problem.x_stride[3] != 1;
  params.dtype = problem.dtype;
  const int values = 16 / element_bytes(problem.dtype);
  const auto in_vectors = [&](int64_t step, int64_t size) { return size == 1 || step % values == 0; };
  params.in_vectors = reinterpret_cast<uint64_t>(pointers.out) % 16 == 0 &&
                      in_vectors(params.dx_stride[0], problem.N) && in_vectors(params.dx_stride[2], problem.H) &&
                      (params.channels_last || in_vectors(params.dx_stride[1], problem.C));
  const int64_t (&dy)[4] = problem.y_stride;
  params.in_pieces = dy[1] == 1 && problem.K % values == 0 && in_vectors(dy[0], problem.N) &&
                     in_vectors(dy[2], problem.P) && in_vectors(dy[3], problem.Q) &&
                     reinterpret_cast<uint64_t>(pointers.dy) % 16 == 0;
  cudaError_t error = cudaSuccess;
  with_kernel(problem, [&](auto taps, auto stride, auto channels) {
    constexpr int kTaps = decltype(taps)::value, kStride = decltype(stride)::value, kOdd = odd_of(kTaps, kStride);
    using Axis = Taps<kTaps, kStride, kOdd>;
    params.first_p = (problem.pad_h - kOdd) / kStride + Axis::low();
    params.first_q = (problem.pad_w - kOdd) / kStride + Axis::low();
    constexpr int kChannels = decltype(channels)::value;
    const auto kernel = stem_dgrad_kernel<kTaps, kStride, kOdd, kChannels>;
    static_assert(Axis::bytes(kChannels) <= 64 << 10, "what every GPU has");
    error = allow_all_shared_memory(kernel);
    if (error == cudaSuccess)
      kernel<<<static_cast<unsigned>(tiles_of(problem)), kThreads, Axis::bytes(kChannels), stream>>>(params);
    return true;
  });
  return error == cudaSuccess ? cudaGetLastError() : error;
}

#endif  // launcher

#endif  // host

}  // namespace stem_dgrad
}  // namespace direct
}  // namespace modelnew
