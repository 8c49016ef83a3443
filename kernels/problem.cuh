// One 2-D convolution, as every engine sees it: sizes, strides and rules, without torch.
//
//   y[n, k, p, q] = bias[k] + sum over c, r, s of
//                   w[k, c, r, s] * x[n, group(k) * C/groups + c, p*stride_h - pad_h + r*dilation_h, q*stride_w - ...]
//
// Upper case is a size, the same letter in lower case indexes that dimension (cuDNN's letters).
// Everything here is plain C++: the binding, the kernels and the tests without a GPU include it alike.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cstddef>
#include <cstdint>
#endif

#if defined(__CUDACC__)
#define MODELNEW_HOST_DEVICE __host__ __device__
#else
#define MODELNEW_HOST_DEVICE
#endif

namespace modelnew {

enum class DType : int { kFloat32, kFloat16, kBFloat16, kFloat64 };

constexpr int element_bytes(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// What is computed: y, dx (gradient to x), dw (gradient to w), db (gradient to bias). CUTLASS's names.
enum class Operator : int { kFprop, kDgrad, kWgrad, kBgrad };

struct Problem {
  // Sizes. C and K count all groups; w is [K, C/groups, R, S].
  int64_t N;
  int C, H, W, K, R, S, P, Q;
  int groups;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  // Steps between neighbours of each dimension, in elements; zero for an expanded dimension.
  // y_stride is dy's in the backward operators; x_stride is dx's in dgrad and w_stride is dw's in wgrad.
  int64_t x_stride[4], w_stride[4], y_stride[4];
  DType dtype;
  bool tf32_allowed;  // PyTorch's switch, as it read at this call
};

// Raw device pointers of one launch. `out` is y, dx, dw or db; what an operator does not read is null.
struct Pointers {
  const void* x;
  const void* w;
  const void* bias;
  const void* dy;
  void* out;
  void* workspace;
};

// Tiles of outputs, those on a list in memory or all of them. The number of a tile is
// (((group * N + image) * rows of tiles + row) * columns of tiles + column) * tiles_k + tile of a group's channels.
struct TileList {
  const uint32_t *all, *count;  // not 0: all of them; how many are on the list
  const uint32_t* numbers;
  int tile_k, tile_p, tile_q;  // 128 channels x 128 pixels or 64 x 256: so many channels, rows, columns
};

MODELNEW_HOST_DEVICE inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Multiply-adds of fprop, dgrad and wgrad alike.
inline double multiply_adds(const Problem& problem) {
  return static_cast<double>(problem.N) * problem.P * problem.Q * problem.K * (problem.C / problem.groups) * problem.R *
         problem.S;
}

constexpr double kLeastStem = 1 << 25;  // multiply-adds

// Which contract holds for fp32 tensors while TF32 is allowed: true = operands rounded to TF32, false = full fp32.
//
// cuDNN itself leaves TF32 where C/groups < 8 (every depthwise problem, C 1 and C 5, an 11x11 stem with C 3) and where
// the problem is small, and users compare with what cuDNN does. More exact than cuDNN is welcome, less exact is a
// defect: the limits lie where cuDNN has all but given up fp32. H200, torch 2.11, cuDNN 9.19, 2026-11-20, dense
// 1x1 and 3x3 with C = K of 8 to 512, images of 4 to 112 pixels, batch 1 to 64: of the problems with at least 2^27
// multiply-adds cuDNN ran 2 of 74 in fp32 in the forward (8 and 16 channels) and 2 in dgrad, of those with 2^29 2 of 34
// in wgrad; below these limits it mixes both (112 of the 192 smaller ones had a TF32 forward). With 2 output channels
// it stayed with fp32 too (1x1 of 64 channels to 2, 16 images of 512x512, 2026-11-22); 3 to 7 were not tried.
//
// 700 random dense forwards, C and K of 8 to 2048 independently, filters of 1, 3 and 5, strides of 1 and 2, 2^23 to
// 2^29 multiply-adds, 2026-11-22: with at least 64 channels on both sides and 2^24 multiply-adds 249 of 251 ran in TF32
// (but for two of 64 channels to 2048), 1x1 filters at a stride aside. Of these 8 of 14 ran in fp32 from 2^27 on.
//
// The stem of a ResNet is an exception: of 900 forwards with 1 to 7 channels, filters of 3 to 16, strides of 1 to 16,
// 16 to 128 output channels, 2^25 to 2^35 multiply-adds, 2026-11-22, cuDNN ran all 31 in TF32 that had 7x7 filters from
// 3 channels to 64 or 128 and 8 images or more, in channels_last as well (all 10 that were tried); others it mixes.
inline bool uses_tf32(const Problem& problem, Operator op) {
  const int channels = problem.C / problem.groups, filters = problem.K / problem.groups;
  const bool stem = op == Operator::kFprop && problem.groups == 1 && channels == 3 &&
                    (filters == 64 || filters == 128) && problem.R == 7 && problem.S == 7 && problem.N >= 8;
  if (problem.dtype != DType::kFloat32 || !problem.tf32_allowed) return false;
  if (stem && multiply_adds(problem) >= kLeastStem) return true;
  if (channels < 8 || filters < 8) return false;
  double least = op == Operator::kWgrad ? 1 << 29 : 1 << 27;
  if (op == Operator::kFprop && problem.groups == 1) {
    const bool points = problem.R == 1 && problem.S == 1;
    if (points && (problem.stride_h > 1 || problem.stride_w > 1))
      least = 1 << 29;
    else if (channels >= 64 && filters >= 64)
      least = 1 << 24;
  }
  return multiply_adds(problem) >= least;
}

}  // namespace modelnew
