// Products of operands in scaled fp16 (contained operands, numerics.cuh): the interface between gather, which converts
// x and w, and tma, which multiplies them.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cuda_runtime_api.h>
#endif

#include "correlation.cuh"
#include "out_phases.cuh"
#include "problem.cuh"

namespace modelnew {

// State that the kernels of one call with contained operands share.
struct ContainedControl {
  uint32_t listed;     // out-of-range values of x on the list; more than kMostListed: too many
  uint32_t all_again;  // 1: a weight is out of range, or x has no scale
  int32_t x_exponent;  // x is scaled by 2^x_exponent
  // Parts of the weights, for each phase of y, that blocks of the `again` kernel have claimed and packed, where it
  // recomputes everything.
  uint32_t claimed[kMostOutPhases], packed[kMostOutPhases];
};
constexpr uint32_t kMostListed = 1024;

// Whether all operands of the call are contained, apart from the values on the list.
MODELNEW_HOST_DEVICE inline bool are_contained(const ContainedControl& control) {
  return control.all_again == 0 && control.listed <= kMostListed;
}

// Operands: x as a copy whose channels are a multiple of 8, weights as [output channel][r][s][channel], and y.
struct ContainedProducts {
  Correlation of;
  const void *in_ptr, *w_ptr;
  const float* w_factors;  // for each output channel, the factor that undoes its scale
  const ContainedControl* control;
  const void* bias_ptr;
  void* out_ptr;
};

#if !defined(__CUDACC_RTC__)

// tma's part, called by gather. `of` describes the copy, `out` is the address of y. `cycles` receives the estimated
// time of an SM without the conversion of operands.
bool can_multiply_contained(const Correlation& of, int sms, uint64_t out, double& cycles);
cudaError_t multiply_contained(const Problem&, Operator, const ContainedProducts&, cudaStream_t);
void describe_contained(const Problem&, Operator, const Correlation& of, char* text, size_t text_size);

#endif

}  // namespace modelnew
