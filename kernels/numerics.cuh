// Storage types, conversions and TF32 rounding, with the same bits on the host and on every GPU.
//
// 16-bit floats are plain bit patterns: CUDA's headers for them are slow to compile, and torch's build disables half of
// their operators. PTX instructions are used where they exist; the integer code beside them runs on hosts and older
// GPUs, and tests compare the two. Measurements: docs/lab/hopper.md.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cstdint>
#include <cstring>
#endif

#include "problem.cuh"

namespace modelnew {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

// The DType of a storage type, as a template argument of an Instance.
template <typename Type>
constexpr int kTypeId = static_cast<int>(sizeof(Type) == 8 ? DType::kFloat64 : DType::kFloat32);
template <>
inline constexpr int kTypeId<Half> = static_cast<int>(DType::kFloat16);
template <>
inline constexpr int kTypeId<BFloat16> = static_cast<int>(DType::kBFloat16);

MODELNEW_HOST_DEVICE inline uint32_t float_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

MODELNEW_HOST_DEVICE inline float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// Rounds to nearest, ties away from zero, to TF32's 10 explicit mantissa bits, as cuDNN's default kernels do with both
// operands (docs/lab/hopper.md). Inf and NaN stay as they are: adding the rounding constant to the NaN 0x7fffffff would
// carry into the sign.
MODELNEW_HOST_DEVICE inline float round_to_tf32(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
#else
  const uint32_t bits = float_bits(value);
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  return finite ? bits_float((bits + 0x1000u) & ~0x1fffu) : value;
#endif
}

// Rounds for a tensor core, which ignores the bits behind TF32's: they may be anything. This takes two instructions,
// the conversion three (sm_90). A NaN of ignored bits alone (0x7f800001) would become Inf; no arithmetic produces one.
MODELNEW_HOST_DEVICE inline uint32_t tf32_operand(uint32_t bits) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return fabsf(__uint_as_float(bits)) < __uint_as_float(0x7f800000u) ? bits + 0x1000u : bits;
#else
  return float_bits(round_to_tf32(bits_float(bits)));
#endif
}

MODELNEW_HOST_DEVICE inline float widen(float value) { return value; }
MODELNEW_HOST_DEVICE inline double widen(double value) { return value; }
MODELNEW_HOST_DEVICE inline float widen(BFloat16 value) { return bits_float(static_cast<uint32_t>(value.bits) << 16); }

MODELNEW_HOST_DEVICE inline float widen(Half value) {
#if defined(__CUDA_ARCH__)
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);  // Inf, NaN
  if (magnitude >= 0x0400u) return bits_float(sign | ((magnitude << 13) + 0x38000000u));         // normal
  const float subnormal = static_cast<float>(magnitude) * 5.9604644775390625e-8f;                // times 2^-24, exact
  return sign ? -subnormal : subnormal;
#endif
}

// Rounds a sum to the tensor's type, to nearest even.
MODELNEW_HOST_DEVICE inline void narrow(float value, float& stored) { stored = value; }
MODELNEW_HOST_DEVICE inline void narrow(double value, double& stored) { stored = value; }

MODELNEW_HOST_DEVICE inline void narrow(float value, BFloat16& stored) {
  const uint32_t bits = float_bits(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = is_nan ? bits | 0x00400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
  stored.bits = static_cast<uint16_t>(rounded >> 16);
}

MODELNEW_HOST_DEVICE inline void narrow(float value, Half& stored) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(stored.bits) : "f"(value));
#else
  const uint32_t bits = float_bits(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7fffu;  // NaN, as cvt writes it
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;  // 65520 and more round to Inf
  } else if (magnitude >= 0x38800000u) {
    half = (magnitude - 0x38000000u + 0x0fffu + (magnitude >> 13 & 1u)) >> 13;
  } else {
    // Subnormal: adding 0.5 puts the last kept bit, 2^-24, at the end of the float's mantissa and rounds there.
    half = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  }
  stored.bits = static_cast<uint16_t>(sign | half);
#endif
}

// Narrows two values into one word, the first in the lower half.
template <typename Number>
MODELNEW_HOST_DEVICE inline uint32_t narrow_pair(float first, float second, Number) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t pair;
  if constexpr (kTypeId<Number> == kTypeId<Half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#else
  Number low, high;
  narrow(first, low);
  narrow(second, high);
  return low.bits | static_cast<uint32_t>(high.bits) << 16;
#endif
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// Loads a value, or returns zero. The caller computes the address either way, so that the compiler emits one predicated
// load instead of a branch, and a series of loads is issued back to back.
template <typename Storage>
__device__ inline Storage load_if(bool condition, const Storage* source) {
  Storage value{};
  if (condition) value = *source;
  return value;
}

template <typename Acc>
__device__ inline bool is_finite(Acc value) {
  return value - value == Acc(0);
}

// Ends a chunk: total += acc. The next chunk starts from the rounding error of that addition (Fast2Sum, exact while
// |total| >= |acc|), so that only sums within chunks lose accuracy. An error that is not finite is dropped, because it
// would turn an Inf into NaN (docs/lab/direct.md).
template <typename Acc>
__device__ inline void add_chunk(Acc& acc, Acc& total) {
  const Acc sum = total + acc;
  const Acc error = acc - (sum - total);
  acc = is_finite(error) ? error : Acc(0);
  total = sum;
}

// 16 bytes of operands: values of 16 bits as they are, fp32 rounded to TF32.
template <typename Stored, int COUNT>
__device__ __forceinline__ uint4 operand_piece(Stored (&values)[COUNT]) {
  if constexpr (sizeof(Stored) == 4) {
#pragma unroll
    for (float& value : values) value = round_to_tf32(value);
  }
  uint4 piece;
  memcpy(&piece, values, sizeof piece);
  return piece;
}

#endif

// Scaled fp16, fp16 as a container for TF32.
//
// Both types have 10 explicit mantissa bits. A value rounded to TF32 and multiplied by a power of two that brings it
// into fp16's normal range, 2^-14 to 65504, is therefore the same operand at twice the rate. Values out of that range
// must be found and multiplied otherwise: a Watch inspects everything that is converted.

// 2^exponent, from -126 to 127.
MODELNEW_HOST_DEVICE inline float power_of_two(int exponent) {
  return bits_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// Scales are 2^-100 to 2^100: a product with one is exact where it fits, and the 2^-149 to which contain_pair lifts a
// zero vanishes.
constexpr int kMostExponent = 100;

// Finds the scale 2^exponent that brings values with this exponent field to 2^to .. 2^(to + 1). Returns false if there
// is no allowed one.
MODELNEW_HOST_DEVICE inline bool scale_exponent(uint32_t field, int to, int& exponent) {
  const int wanted = to + 127 - static_cast<int>(field);
  const bool allowed = field != 0 && field != 255 && wanted >= -kMostExponent && wanted <= kMostExponent;
  exponent = allowed ? wanted : 0;
  return allowed;
}

// Rounds two values, given as bits, to TF32, multiplies them by `scale` and packs them. The conversion rounds ties to
// even, therefore `| 1` lifts values above a tie; it is rounded off from all others, also from zero.
MODELNEW_HOST_DEVICE inline uint32_t contain_pair(uint32_t first, uint32_t second, float scale) {
  return narrow_pair(bits_float(first | 1) * scale, bits_float(second | 1) * scale, Half{});
}

// Two fp16 parts as a container for fp32.
//
// A value times such a scale, v, is first + rest / 2^11. `first` is v rounded to fp16, to nearest, and leaves at most
// 2^-11 of v, 12 bits and a sign. Multiplied by 2^11, which keeps it in fp16's range, and rounded, the rest is within
// 2^-23 of v. This holds from v = 2^-13 on, because rounding the rest errs there by at most half of fp16's smallest
// number, scaled back: 2^-25 * 2^-11. Without the product of two rests, a product is within 2^-21.

constexpr float kRestScale = 2048;

MODELNEW_HOST_DEVICE inline uint32_t split_pair(uint32_t first, uint32_t second, float scale) {
  return narrow_pair(bits_float(first) * scale, bits_float(second) * scale, Half{});
}

// The rests that belong to first parts.
MODELNEW_HOST_DEVICE inline uint32_t split_rest(uint32_t first, uint32_t second, float scale, uint32_t first_parts) {
  const auto rest = [&](uint32_t bits, uint32_t first_part) {
    return (bits_float(bits) * scale - widen(Half{static_cast<uint16_t>(first_part)})) * kRestScale;  // exact
  };
  return narrow_pair(rest(first, first_parts & 0xffffu), rest(second, first_parts >> 16), Half{});
}

// Exponent field of the smallest value that fits into so many parts once multiplied by 2^exponent, plus `exponent`.
MODELNEW_HOST_DEVICE constexpr int least_contained_exponent(int parts) { return 127 - (parts == 2 ? 13 : 14); }

// The bits of that smallest value, turned as in Watch::see.
MODELNEW_HOST_DEVICE inline uint32_t least_contained(int exponent, int parts) {
  return 0u - 2 * (static_cast<uint32_t>(least_contained_exponent(parts) - exponent) << 23);
}

// Finds out whether all converted values fit. Zero fits; Inf and NaN, whose containers are Inf or NaN, do not.
struct Watch {
  uint32_t least = 0;  // largest turned value: zero turns into 0, small magnitudes into large numbers
  uint32_t most = 0;   // largest magnitude of each half of a container

  MODELNEW_HOST_DEVICE void see(uint32_t bits) {
    const uint32_t turned = 0u - 2 * bits;
    least = least > turned ? least : turned;
  }

  MODELNEW_HOST_DEVICE void see_contained(uint32_t pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
    asm("max.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(most) : "r"(pair));
#else
    const uint32_t low = pair & 0x7fffu, high = pair & 0x7fff0000u;
    const uint32_t most_low = most & 0xffffu, most_high = most & 0xffff0000u;
    most = (low > most_low ? low : most_low) | (high > most_high ? high : most_high);
#endif
  }

  template <typename Four>
  MODELNEW_HOST_DEVICE void see_contained(const Four& pairs) {
    see_contained(pairs.x);
    see_contained(pairs.y);
    see_contained(pairs.z);
    see_contained(pairs.w);
  }

  MODELNEW_HOST_DEVICE bool fits(uint32_t least_allowed) const {
    return least <= least_allowed && (most & 0x7fffu) < 0x7c00u && (most >> 16 & 0x7fffu) < 0x7c00u;
  }
};

}  // namespace modelnew
