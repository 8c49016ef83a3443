// fprop (y from x and w) and dgrad with stride 1 (dx from dy and w) as one operation, a correlation.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <algorithm>
#endif

#include "problem.cuh"

namespace modelnew {

// For dgrad the filter is flipped, its channel axes are swapped, the padding may be negative, and the filter moves by 1
// over rows and columns that are `up` apart, with zeros between. Channels are a group's; strides are in elements.
struct Correlation {
  int64_t N;
  int groups, in_channels, out_channels, H, W, P, Q, R, S;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, up_h, up_w;
  int64_t in_stride[4], out_stride[4];
  int64_t w_stride_group, w_stride_out, w_stride_in, w_stride_r, w_stride_s;
  bool flipped;
};

#if !defined(__CUDACC_RTC__)

inline Correlation correlation_of_problem(const Problem& problem, Operator op) {
  const bool dgrad = op == Operator::kDgrad;
  const int group_c = problem.C / problem.groups, group_k = problem.K / problem.groups;
  Correlation of{};
  of.N = problem.N;
  of.groups = problem.groups;
  of.in_channels = dgrad ? group_k : group_c;
  of.out_channels = dgrad ? group_c : group_k;
  of.H = dgrad ? problem.P : problem.H;
  of.W = dgrad ? problem.Q : problem.W;
  of.P = dgrad ? problem.H : problem.P;
  of.Q = dgrad ? problem.W : problem.Q;
  of.R = problem.R;
  of.S = problem.S;
  of.dilation_h = problem.dilation_h;
  of.dilation_w = problem.dilation_w;
  of.pad_h = dgrad ? problem.dilation_h * (problem.R - 1) - problem.pad_h : problem.pad_h;
  of.pad_w = dgrad ? problem.dilation_w * (problem.S - 1) - problem.pad_w : problem.pad_w;
  of.stride_h = of.stride_w = of.up_h = of.up_w = 1;
  (dgrad ? of.up_h : of.stride_h) = taken_stride(problem.stride_h, problem.P);
  (dgrad ? of.up_w : of.stride_w) = taken_stride(problem.stride_w, problem.Q);
  std::copy_n(dgrad ? problem.y_stride : problem.x_stride, 4, of.in_stride);
  std::copy_n(dgrad ? problem.x_stride : problem.y_stride, 4, of.out_stride);
  of.w_stride_group = group_k * problem.w_stride[0];
  of.w_stride_out = problem.w_stride[dgrad ? 1 : 0];
  of.w_stride_in = problem.w_stride[dgrad ? 0 : 1];
  of.w_stride_r = problem.w_stride[2];
  of.w_stride_s = problem.w_stride[3];
  of.flipped = dgrad;
  return of;
}

// Views the image as one row of pixels, where a 1x1 filter reads every pixel and rows are contiguous.
inline void flatten_points(Correlation& of) {
  // Sizes are compared as well: a stride over a single output was replaced by 1, but may skip pixels.
  const bool same = of.R == 1 && of.S == 1 && of.stride_h == 1 && of.stride_w == 1 && of.pad_h == 0 && of.pad_w == 0 &&
                    of.H == of.P && of.W == of.Q;
  const auto dense = [&](const int64_t (&stride)[4]) { return of.H == 1 || stride[2] == of.W * stride[3]; };
  if (!same || !dense(of.in_stride) || !dense(of.out_stride)) return;
  const int64_t pixels = static_cast<int64_t>(of.H) * of.W;
  if (pixels > 1 << 30) return;
  of.W = of.Q = static_cast<int>(pixels);
  of.H = of.P = 1;
}

#endif

}  // namespace modelnew
