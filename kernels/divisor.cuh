// Division by run-time constants in three instructions instead of some twenty: multiply high and shift.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cstdint>
#endif

#include "problem.cuh"

namespace modelnew {

// Divides numbers from 0 to 2^31 - 1.
struct Divisor {
  uint32_t divisor, multiplier, shift;
};

MODELNEW_HOST_DEVICE inline Divisor make_divisor(int64_t divisor) {
  uint32_t bits = 0;
  while ((int64_t{1} << bits) < divisor) ++bits;
  // 2^(31 + bits) / divisor, rounded up, is below 2^32.
  const uint64_t multiplier = ((uint64_t{1} << (31 + bits)) + divisor - 1) / divisor;
  return {static_cast<uint32_t>(divisor), static_cast<uint32_t>(multiplier), bits - 1};
}

// The upper half of a product.
MODELNEW_HOST_DEVICE inline uint32_t multiply_high(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
#endif
}

MODELNEW_HOST_DEVICE inline int quotient(int number, const Divisor& by) {
  if (by.divisor == 1) return number;
  return static_cast<int>(multiply_high(static_cast<uint32_t>(number), by.multiplier) >> by.shift);
}

// The reciprocal of a divisor below 2^15 that the device computes itself, by which quotient() divides numbers below
// 2^16 in two instructions.
MODELNEW_HOST_DEVICE inline uint32_t reciprocal(uint32_t divisor) { return 0x80000000u / divisor + 1; }
MODELNEW_HOST_DEVICE inline int quotient(int number, uint32_t by) {
  return static_cast<int>(multiply_high(2 * number + 1, by));
}

}  // namespace modelnew
