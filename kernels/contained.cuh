// Products of contained operands (numerics.cuh): what gather, which contains them, and tma, which multiplies them, tell
// each other.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cuda_runtime_api.h>
#endif

#include "correlation.cuh"
#include "problem.cuh"

namespace modelnew {

// What the kernels of one call with contained operands tell each other.
struct ContainedControl {
  uint32_t listed;     // values of x that do not fit; more than kMostListed: they are too many
  uint32_t all_again;  // 1: some weight does not fit, or x has no scale
  int32_t x_exponent;  // x is scaled by two to the power of this
  // Parts of the weights that blocks of `again` have claimed to pack, where it does all again, and have packed.
  uint32_t claimed, packed;
};
constexpr uint32_t kMostListed = 256;

// All of the call's operands, but for those on the list.
MODELNEW_HOST_DEVICE inline bool are_contained(const ContainedControl& control) {
  return control.all_again == 0 && control.listed <= kMostListed;
}

// A copy of x, its channels in eights; weights, [output channel][r][s][channel]; and y.
struct ContainedProducts {
  Correlation of;
  const void *in_ptr, *w_ptr;
  const float* w_factors;  // of each output channel: what undoes its scale
  const ContainedControl* control;
  const void* bias_ptr;
  void* out_ptr;
};

#if !defined(__CUDACC_RTC__)

// By tma, for gather. `of` is that of the copy; `out`: address of y. How long it takes besides what is done to contain
// operands, estimated, in cycles of an SM.
bool can_multiply_contained(const Correlation& of, int sms, uint64_t out, double& cycles);
cudaError_t multiply_contained(const Problem&, Operator, const ContainedProducts&, cudaStream_t);
void describe_contained(const Problem&, Operator, const Correlation& of, char* text, size_t text_size);

#endif

}  // namespace modelnew
