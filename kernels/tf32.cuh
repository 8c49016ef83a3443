// mma.sync in TF32, available since Ampere, and the split of fp32 values into its operands. Its sums are truncated:
// full fp32 accuracy allows few terms per instruction sum.
#pragma once

#include "numerics.cuh"

namespace modelnew {

// d[16, 8] += a[16, 8] b[8, 8], TF32.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// d[16, 8] += a[16, 16] b[16, 8], of 16-bit values.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Half) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], BFloat16) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Splits v = first + rest, or rounds it to `first` alone; the tensor core ignores the bits behind TF32's. If v is Inf,
// NaN or too large to be rounded, the rest is NaN or Inf. Subnormal rests are rounded to multiples of 2^-136, TF32's
// smallest number: truncated, they would be the largest error of all.
template <bool EXACT>
__device__ __forceinline__ void split(uint32_t v, uint32_t& first, uint32_t& rest) {
  if constexpr (EXACT) {
    constexpr float kRounds = 0x1.8p-113f;  // the distance of whose neighbours is that number
    first = v + 0x1000u;
    rest = float_bits(bits_float(v) - bits_float(first & ~0x1fffu) + kRounds - kRounds);
  } else {
    first = float_bits(round_to_tf32(bits_float(v)));
  }
}

// is_finite() without arithmetic: by the exponent field.
__device__ __forceinline__ bool has_finite_bits(float value) {
  return (float_bits(value) & 0x7f800000u) != 0x7f800000u;
}

}  // namespace modelnew
