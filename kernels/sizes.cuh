// Converts an array of int64, by which bundles and dry runs describe a problem, to a Problem. Host only.
#pragma once

#include "problem.cuh"

namespace modelnew {

// The order is N C H W K R S P Q groups; stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w; DType; whether TF32
// is allowed; four strides, in elements, of each of x, w and y.
inline Problem problem_of_sizes(const int64_t* sizes) {
  Problem p{};
  p.N = sizes[0];
  int* const members[] = {&p.C,      &p.H,        &p.W,        &p.K,     &p.R,     &p.S,          &p.P,         &p.Q,
                          &p.groups, &p.stride_h, &p.stride_w, &p.pad_h, &p.pad_w, &p.dilation_h, &p.dilation_w};
  for (int i = 0; i < 15; ++i) *members[i] = static_cast<int>(sizes[i + 1]);
  p.dtype = static_cast<DType>(sizes[16]);
  p.tf32_allowed = sizes[17] != 0;
  for (int i = 0; i < 4; ++i) {
    p.x_stride[i] = sizes[18 + i];
    p.w_stride[i] = sizes[22 + i];
    p.y_stride[i] = sizes[26 + i];
  }
  return p;
}

}  // namespace modelnew
