// wgmma, the matrix instruction of a warpgroup (sm_90a): descriptors of operands in shared memory, fences and waits,
// and one struct for each form of the instruction.
#pragma once

#include "numerics.cuh"
#include "ptx.cuh"

namespace modelnew {
namespace hopper {

// wgmma: acc[64, N] (+)= a[64, 32 bytes] b[N, 32 bytes], by the four warps of a warpgroup.
//
// Both operands lie in shared memory without swizzle, as 16-byte pieces (8 values of 16 bits, 4 of TF32): rows are 16
// bytes apart, and the two halves along the reduction `leading_byte_offset` (LBO) apart.
//
// Accumulators: acc[4*j + 2*i + e] of thread t is row 16*(t/32) + t%32/4 + 8*i, column 8*j + 2*(t%4) + e.

// A descriptor's lower half is in units of 16 bytes: adding 1 moves the operand by one row. Its upper half is
// kDescriptorHigh, the stride byte offset (SBO): groups of 8 rows are 128 bytes apart.
constexpr uint32_t kDescriptorHigh = 128 / 16;

// Upper half for an operand with rows in the 128-byte swizzle (kLoadRows). Groups of 8 rows are 1024 bytes apart, the
// operand starts at a multiple of 1024, and a step of 32 bytes along the reduction adds 2 to the lower half.
constexpr uint32_t kRowsDescriptorHigh = 1024 / 16 | 1u << 30;

// A number known to the compiler.
template <int N>
struct Count {
  static constexpr int kValue = N;
};

// Removes the number of the block from a shared-memory address in a cluster: a descriptor has no room for it.
__device__ __forceinline__ uint32_t of_own_block(uint32_t address) { return address & 0x3ffff; }

__device__ __forceinline__ uint32_t descriptor(uint32_t address, uint32_t leading_byte_offset) {
  return address / 16 | leading_byte_offset / 16 << 16;
}

__device__ __forceinline__ void wgmma_fence() {
#if defined(MODELNEW_SM90A)
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wgmma_commit() {
#if defined(MODELNEW_SM90A)
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until all but the latest PENDING committed groups are complete.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
#if defined(MODELNEW_SM90A)
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}

// Clears accumulators if the first wgmma adds to them. Otherwise it overwrites them, but ptxas of CUDA 12.1 takes them
// for uninitialised unless they are cleared, and then serialises every wgmma (C7515); that of 13.0 does not.
template <bool ADDS = false, typename Sums>
__device__ __forceinline__ void wgmma_start(Sums& sums) {
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ < 13
  constexpr bool kClears = true;
#else
  constexpr bool kClears = ADDS;
#endif
  float* const sum = reinterpret_cast<float*>(&sums);
#pragma unroll
  for (int i = 0; kClears && i < static_cast<int>(sizeof sums / sizeof *sum); ++i) sum[i] = 0;
}

// Keeps the compiler from reading `acc` before the preceding wgmma_wait.
template <int COUNT>
__device__ __forceinline__ void wgmma_settle(float (&acc)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

template <typename Operand, int N>
struct Wgmma;

#define MODELNEW_NAMES_4 "%0, %1, %2, %3"
#define MODELNEW_NAMES_8 MODELNEW_NAMES_4 ", %4, %5, %6, %7"
#define MODELNEW_NAMES_16 MODELNEW_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MODELNEW_NAMES_24 MODELNEW_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MODELNEW_NAMES_28 MODELNEW_NAMES_24 ", %24, %25, %26, %27"
#define MODELNEW_NAMES_32 MODELNEW_NAMES_28 ", %28, %29, %30, %31"
#define MODELNEW_NAMES_48 MODELNEW_NAMES_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MODELNEW_NAMES_52 MODELNEW_NAMES_48 ", %48, %49, %50, %51"
#define MODELNEW_NAMES_56 MODELNEW_NAMES_52 ", %52, %53, %54, %55"
#define MODELNEW_NAMES_60 MODELNEW_NAMES_56 ", %56, %57, %58, %59"
#define MODELNEW_NAMES_64 MODELNEW_NAMES_60 ", %60, %61, %62, %63"
#define MODELNEW_NAMES_68 MODELNEW_NAMES_64 ", %64, %65, %66, %67"
#define MODELNEW_NAMES_72 MODELNEW_NAMES_68 ", %68, %69, %70, %71"
#define MODELNEW_NAMES_96 MODELNEW_NAMES_72                                          \
  ", %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87" \
  ", %88, %89, %90, %91, %92, %93, %94, %95"
#define MODELNEW_NAMES_104 MODELNEW_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define MODELNEW_NAMES_112 MODELNEW_NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define MODELNEW_NAMES_116 MODELNEW_NAMES_112 ", %112, %113, %114, %115"
#define MODELNEW_NAMES_128 MODELNEW_NAMES_116 ", %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define MODELNEW_ACC_4(i) "+f"(acc[(i)]), "+f"(acc[(i) + 1]), "+f"(acc[(i) + 2]), "+f"(acc[(i) + 3])
#define MODELNEW_ACC_8(i) MODELNEW_ACC_4(i), MODELNEW_ACC_4((i) + 4)
#define MODELNEW_ACC_24(i) MODELNEW_ACC_16(i), MODELNEW_ACC_8((i) + 16)
#define MODELNEW_ACC_16(i) MODELNEW_ACC_4(i), MODELNEW_ACC_4((i) + 4), MODELNEW_ACC_4((i) + 8), MODELNEW_ACC_4((i) + 12)
#define MODELNEW_ACC_32(i) MODELNEW_ACC_16(i), MODELNEW_ACC_16((i) + 16)
#define MODELNEW_ACC_64(i) MODELNEW_ACC_32(i), MODELNEW_ACC_32((i) + 32)
#define MODELNEW_ACC_72(i) MODELNEW_ACC_64(i), MODELNEW_ACC_4((i) + 64), MODELNEW_ACC_4((i) + 68)
#define MODELNEW_ACC_96(i) MODELNEW_ACC_64(i), MODELNEW_ACC_32((i) + 64)
#define MODELNEW_ACC_48(i) MODELNEW_ACC_32(i), MODELNEW_ACC_16((i) + 32)
#define MODELNEW_ACC_128(i) MODELNEW_ACC_64(i), MODELNEW_ACC_64((i) + 64)

// COUNT accumulators per thread; A, B, KEEP: the operand numbers that follow them. Without `keep`, acc is overwritten.
#define MODELNEW_WGMMA(STRUCT, OPERAND, N, COUNT, A, B, KEEP, TYPES, SIGNS)                                          \
  template <>                                                                                                        \
  struct STRUCT<OPERAND, N> {                                                                                        \
    static __device__ __forceinline__ void multiply(float (&acc)[COUNT], uint32_t a, uint32_t b, int keep,           \
                                                    uint32_t high = kDescriptorHigh) {                               \
      const uint64_t a_operand = static_cast<uint64_t>(high) << 32 | a;                                              \
      const uint64_t b_operand = static_cast<uint64_t>(high) << 32 | b;                                              \
      asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " KEEP ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N TYPES \
                   " {" MODELNEW_NAMES_##COUNT "}, " A ", " B ", keep, " SIGNS ";\n}\n"                              \
                   : MODELNEW_ACC_##COUNT(0)                                                                         \
                   : "l"(a_operand), "l"(b_operand), "r"(keep));                                                     \
    }                                                                                                                \
  };
#define MODELNEW_WGMMA_SHAPES(OPERAND, TYPES, SIGNS)                  \
  MODELNEW_WGMMA(Wgmma, OPERAND, 32, 16, "%16", "%17", "%18", TYPES, SIGNS)  \
  MODELNEW_WGMMA(Wgmma, OPERAND, 64, 32, "%32", "%33", "%34", TYPES, SIGNS)  \
  MODELNEW_WGMMA(Wgmma, OPERAND, 128, 64, "%64", "%65", "%66", TYPES, SIGNS) \
  MODELNEW_WGMMA(Wgmma, OPERAND, 256, 128, "%128", "%129", "%130", TYPES, SIGNS)

#if defined(MODELNEW_SM90A)
MODELNEW_WGMMA_SHAPES(Half, "k16.f32.f16.f16", "1, 1, 0, 0")
MODELNEW_WGMMA_SHAPES(BFloat16, "k16.f32.bf16.bf16", "1, 1, 0, 0")
MODELNEW_WGMMA_SHAPES(float, "k8.f32.tf32.tf32", "1, 1")
#endif

// wgmma with `a` in registers, where ldmatrix puts the 16 rows of each warp.
template <typename Operand, int N>
struct WgmmaRegisters;

#define MODELNEW_WGMMA_REGISTERS(OPERAND, N, COUNT, A, B, KEEP, TYPES, SIGNS) \
  MODELNEW_WGMMA_REGISTERS_OF(WgmmaRegisters, OPERAND, N, COUNT, A, B, KEEP, TYPES, SIGNS)
#define MODELNEW_WGMMA_REGISTERS_OF(STRUCT, OPERAND, N, COUNT, A, B, KEEP, TYPES, SIGNS)                             \
  template <>                                                                                                        \
  struct STRUCT<OPERAND, N> {                                                                                        \
    static __device__ __forceinline__ void multiply(float (&acc)[COUNT], const uint32_t (&a)[4], uint32_t b,         \
                                                    int keep, uint32_t b_high = kDescriptorHigh) {                   \
      const uint64_t b_operand = static_cast<uint64_t>(b_high) << 32 | b;                                            \
      asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " KEEP ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N TYPES \
                   " {" MODELNEW_NAMES_##COUNT "}, {" A "}, " B ", keep, " SIGNS ";\n}\n"                            \
                   : MODELNEW_ACC_##COUNT(0)                                                                         \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_operand), "r"(keep));                         \
    }                                                                                                                \
  };
#define MODELNEW_WGMMA_REGISTERS_SHAPES(OPERAND, TYPES, SIGNS)                                 \
  MODELNEW_WGMMA_REGISTERS(OPERAND, 32, 16, "%16, %17, %18, %19", "%20", "%21", TYPES, SIGNS)  \
  MODELNEW_WGMMA_REGISTERS(OPERAND, 64, 32, "%32, %33, %34, %35", "%36", "%37", TYPES, SIGNS)  \
  MODELNEW_WGMMA_REGISTERS(OPERAND, 128, 64, "%64, %65, %66, %67", "%68", "%69", TYPES, SIGNS) \
  MODELNEW_WGMMA_REGISTERS(OPERAND, 144, 72, "%72, %73, %74, %75", "%76", "%77", TYPES, SIGNS)  \
  MODELNEW_WGMMA_REGISTERS(OPERAND, 192, 96, "%96, %97, %98, %99", "%100", "%101", TYPES, SIGNS) \
  MODELNEW_WGMMA_REGISTERS(OPERAND, 256, 128, "%128, %129, %130, %131", "%132", "%133", TYPES, SIGNS)

#if defined(MODELNEW_SM90A)
MODELNEW_WGMMA_REGISTERS_SHAPES(Half, "k16.f32.f16.f16", "1, 1, 0")
MODELNEW_WGMMA_REGISTERS_SHAPES(BFloat16, "k16.f32.bf16.bf16", "1, 1, 0")
MODELNEW_WGMMA_REGISTERS_SHAPES(float, "k8.f32.tf32.tf32", "1, 1")
#endif

// The same with a `b` that is contiguous along N: chunks of eight columns, the upper half of the descriptor apart, each
// [step of the reduction] x 16 bytes, and eight steps LBO further on the next ones.
template <typename Operand, int N>
struct WgmmaRegistersTransposed;

#if defined(MODELNEW_SM90A)
#define MODELNEW_WGMMA_REGISTERS_TRANSPOSED(OPERAND, N, COUNT, A, B, KEEP, TYPES) \
  MODELNEW_WGMMA_REGISTERS_OF(WgmmaRegistersTransposed, OPERAND, N, COUNT, A, B, KEEP, TYPES, "1, 1, 1")
#define MODELNEW_WGMMA_REGISTERS_TRANSPOSED_SHAPES(OPERAND, TYPES) \
  MODELNEW_WGMMA_REGISTERS_TRANSPOSED(OPERAND, 8, 4, "%4, %5, %6, %7", "%8", "%9", TYPES) \
  MODELNEW_WGMMA_REGISTERS_TRANSPOSED(OPERAND, 16, 8, "%8, %9, %10, %11", "%12", "%13", TYPES) \
  MODELNEW_WGMMA_REGISTERS_TRANSPOSED(OPERAND, 32, 16, "%16, %17, %18, %19", "%20", "%21", TYPES) \
  MODELNEW_WGMMA_REGISTERS_TRANSPOSED(OPERAND, 48, 24, "%24, %25, %26, %27", "%28", "%29", TYPES) \
  MODELNEW_WGMMA_REGISTERS_TRANSPOSED(OPERAND, 64, 32, "%32, %33, %34, %35", "%36", "%37", TYPES) \
  MODELNEW_WGMMA_REGISTERS_TRANSPOSED(OPERAND, 96, 48, "%48, %49, %50, %51", "%52", "%53", TYPES) \
  MODELNEW_WGMMA_REGISTERS_TRANSPOSED(OPERAND, 128, 64, "%64, %65, %66, %67", "%68", "%69", TYPES) \
  MODELNEW_WGMMA_REGISTERS_TRANSPOSED(OPERAND, 256, 128, "%128, %129, %130, %131", "%132", "%133", TYPES)
MODELNEW_WGMMA_REGISTERS_TRANSPOSED_SHAPES(Half, "k16.f32.f16.f16")
MODELNEW_WGMMA_REGISTERS_TRANSPOSED_SHAPES(BFloat16, "k16.f32.bf16.bf16")
#endif

}  // namespace hopper
}  // namespace modelnew
