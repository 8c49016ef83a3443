// cp.async with sizes and cache policies, whose arrival an mbarrier may count, and loads of words. GPUs before sm_80
// copy at once.
#pragma once

#include "ptx.cuh"

namespace modelnew {
namespace hopper {

// Loads 4, 8 or 16 bytes of read-only global memory, or 0 where `exist` is false. They do not ask for what follows.
__device__ __forceinline__ void load_words(const void* address, bool exist, uint32_t (&words)[1]) {
  asm volatile("{\n.reg .pred exist;\nsetp.ne.b32 exist, %2, 0;\nmov.b32 %0, 0;\n@exist ld.global.nc.b32 %0, [%1];\n}"
               : "=&r"(words[0])
               : "l"(address), "r"(static_cast<int>(exist)));
}

__device__ __forceinline__ void load_words(const void* address, bool exist, uint32_t (&words)[2]) {
  asm volatile(
      "{\n.reg .pred exist;\nsetp.ne.b32 exist, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
      "@exist ld.global.nc.v2.b32 {%0, %1}, [%2];\n}"
      : "=&r"(words[0]), "=&r"(words[1])
      : "l"(address), "r"(static_cast<int>(exist)));
}

__device__ __forceinline__ void load_words(const void* address, bool exist, uint32_t (&words)[4]) {
  asm volatile(
      "{\n.reg .pred exist;\nsetp.ne.b32 exist, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@exist ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
      : "l"(address), "r"(static_cast<int>(exist)));
}

// Copies the first `size` of BYTES and fills the rest with zeros. GPUs before sm_80 copy words synchronously.
template <int BYTES>
__device__ __forceinline__ void copy_async(uint32_t to_smem, const void* address, int size) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#pragma unroll
  for (int i = 0; i < BYTES / 4; ++i) {
    const uint32_t word = 4 * i < size ? static_cast<const uint32_t*>(address)[i] : 0;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to_smem + 4 * i), "r"(word) : "memory");
  }
#else
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to_smem), "l"(address), "r"(size)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(to_smem), "l"(address), "n"(BYTES),
                 "r"(size)
                 : "memory");
#endif
}

// A cache policy for streamed data: it leaves L2 first.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

template <int BYTES>
__device__ __forceinline__ void copy_async(uint32_t to_smem, const void* address, int size, uint64_t policy) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  copy_async<BYTES>(to_smem, address, size);
#else
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to_smem),
                 "l"(address), "r"(size), "l"(policy)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global.L2::cache_hint.L2::128B [%0], [%1], %2, %3, %4;" ::"r"(to_smem),
                 "l"(address), "n"(BYTES), "r"(size), "l"(policy)
                 : "memory");
#endif
}

// Arrives at an mbarrier once all earlier copies of this thread are complete.
__device__ __forceinline__ void copies_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace hopper
}  // namespace modelnew
