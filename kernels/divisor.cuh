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

MODELNEW_HOST_DEVICE inline int quotient(int number, const Divisor& by) {
  if (by.divisor == 1) return number;
#if defined(__CUDA_ARCH__)
  const uint32_t high = __umulhi(static_cast<uint32_t>(number), by.multiplier);
#else
  const uint32_t high = static_cast<uint32_t>(uint64_t{static_cast<uint32_t>(number)} * by.multiplier >> 32);
#endif
  return static_cast<int>(high >> by.shift);
}

}  // namespace modelnew
