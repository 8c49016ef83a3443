// Positions in rings of stages in shared memory, each with the parity of its mbarriers' current phase: a consumer waits
// for "full" with `parity`, a producer for "empty" with `parity ^ 1`.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cstdint>
#endif

namespace modelnew {

struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }

  // By at most `slots`.
  __device__ __forceinline__ void skip(int slots, int count) {
    slot += count;
    const bool round = slot >= slots;
    slot -= round ? slots : 0;
    parity ^= round;
  }

  // By any count: a loop for few rounds, a division for many.
  __device__ __forceinline__ void advance(int slots, int count = 1) {
    slot += count;
    while (slot >= slots) {
      slot -= slots;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void advance_far(int slots, int count) {
    const int rounds = (slot + count) / slots;
    slot += count - rounds * slots;
    parity ^= rounds & 1;
  }
};

}  // namespace modelnew
