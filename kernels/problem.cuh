// One 2-D convolution as every engine sees it: sizes, strides and rules, without torch.
//
//   y[n, k, p, q] = bias[k] + sum over c, r, s of
//                   w[k, c, r, s] * x[n, group(k) * C/groups + c, p*stride_h - pad_h + r*dilation_h, q*stride_w - ...]
//
// Upper case is a size, the same letter in lower case indexes that dimension (cuDNN's letters). This is plain C++: the
// binding, the kernels and the tests without a GPU include it alike. Measurements: docs/lab/hopper.md.
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

// Computes y, dx (gradient to x), dw (gradient to w) or db (gradient to bias). CUTLASS's names.
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
  bool tf32_allowed;  // PyTorch's switch at the time of the call
};

// Raw device pointers of one launch. `out` is y, dx, dw or db; pointers that an operator does not read are null.
struct Pointers {
  const void* x;
  const void* w;
  const void* bias;
  const void* dy;
  void* out;
  void* workspace;
  const int* done;  // where it is not 0 nothing is left to do; null: all is
};

// Output tiles to compute: those on a list in global memory, or all. The number of a tile is
// (((group * N + image) * rows of tiles + row) * columns of tiles + column) * tiles_k + tile of a group's channels.
struct TileList {
  const uint32_t *all, *count;  // *all != 0: all tiles; *count: length of the list
  const uint32_t* numbers;
  int tile_k, tile_p, tile_q;  // channels, rows, columns: 128 channels x 128 pixels or 64 x 256
};

// Whether an index lies in a dimension: the unsigned comparison tests both ends at once.
MODELNEW_HOST_DEVICE inline bool is_within(int position, int size) {
  return static_cast<unsigned>(position) < static_cast<unsigned>(size);
}

MODELNEW_HOST_DEVICE inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
MODELNEW_HOST_DEVICE constexpr int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

MODELNEW_HOST_DEVICE inline int greatest_common_divisor(int a, int b) {
  while (b != 0) {
    const int rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// The stride over a single output position has no effect: 1 stands for it, however large it is.
MODELNEW_HOST_DEVICE inline int taken_stride(int stride, int outputs) { return outputs == 1 ? 1 : stride; }
inline bool has_stride(const Problem& problem) {
  return taken_stride(problem.stride_h, problem.P) != 1 || taken_stride(problem.stride_w, problem.Q) != 1;
}

// Bytes of a copy of x, dy or w in the workspace, at most.
constexpr int64_t kMostCopiedBytes = 1 << 30;

// Multiply-adds, the same number for fprop, dgrad and wgrad.
inline double multiply_adds(const Problem& problem) {
  return static_cast<double>(problem.N) * problem.P * problem.Q * problem.K * (problem.C / problem.groups) * problem.R *
         problem.S;
}

constexpr double kLeastStem = 1 << 25;  // multiply-adds (docs/lab/hopper.md)

// Returns which contract holds for fp32 tensors while TF32 is allowed. true: operands are rounded to TF32; false: full
// fp32.
//
// cuDNN leaves TF32 where C/groups < 8 and where the problem is small, and users compare with cuDNN. More accuracy than
// cuDNN's is welcome, less is a defect. Hence these limits: above them cuDNN hardly ever computes in fp32. Exceptions,
// where cuDNN uses TF32: the stem of a ResNet, weight gradients of large filters from 3 or 4 channels, and many groups
// of 4 channels without a stride, but for their weight gradients. The survey is in docs/lab/hopper.md.
inline bool uses_tf32(const Problem& problem, Operator op) {
  const int channels = problem.C / problem.groups, filters = problem.K / problem.groups;
  const bool stem = op == Operator::kFprop && problem.groups == 1 && channels == 3 &&
                    (filters == 64 || filters == 128) && problem.R == 7 && problem.S == 7 && problem.N >= 8;
  const bool stem_gradient = op == Operator::kWgrad && problem.groups == 1 && (channels == 3 || channels == 4) &&
                             filters >= 64 && problem.R * problem.S >= 49 && problem.N >= 8;
  if (problem.dtype != DType::kFloat32 || !problem.tf32_allowed) return false;
  if (stem && multiply_adds(problem) >= kLeastStem) return true;
  const bool fours = op != Operator::kWgrad && problem.groups % 16 == 0 && (channels == 4 || channels == 8) &&
                     (filters == 4 || filters == 8) && problem.R * problem.S > 1 && !has_stride(problem);
  if ((channels < 8 || filters < 8) && !stem_gradient && !fours) return false;
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
