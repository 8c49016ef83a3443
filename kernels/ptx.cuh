// PTX instructions of Ampere and Hopper (sm_90a), each as one small function: cp.async, mbarriers, TMA copies, fences,
// setmaxnreg, programmatic dependent launch, ldmatrix and stmatrix, and a few loads and stores. wgmma is in wgmma.cuh;
// async_copy.cuh, cluster.cuh and im2col_map.cuh have what fewer engines use. PTX ISA 8.0, so that CUDA 12.1 assembles
// them.
//
// Shared memory is addressed by 32-bit numbers, as these instructions want it. Measurements: docs/lab/hopper.md.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cstdint>
#endif
#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
#include <cuda_runtime_api.h>

#include <type_traits>

#include "device.cuh"
#endif

// Defined where the compiler may emit wgmma and setmaxnreg: on sm_90a, not on plain sm_90, which torch below 2.9
// builds.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MODELNEW_SM90A 1
#endif

namespace modelnew {
namespace hopper {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Tells the compiler that all lanes of a warp hold the same number, such as the warp's own (docs/lab/hopper.md).
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Keeps the compiler from computing a number again, or loading a kernel's parameter, wherever it is used.
template <typename Number>
__device__ __forceinline__ Number in_register(Number number) {
  asm("" : "+r"(number));
  return number;
}

// Loads of read-only global memory, of the given number of bytes; 0 where `exist` is false. They are in assembly so
// that the load stays where it is written and its address outside of the condition.

__device__ __forceinline__ void load_8(const void* address, bool exist, uint32_t& low, uint32_t& high) {
  asm volatile(
      "{\n.reg .pred exist;\nsetp.ne.b32 exist, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
      "@exist ld.global.nc.L2::256B.v2.b32 {%0, %1}, [%2];\n}"
      : "=&r"(low), "=&r"(high)
      : "l"(address), "r"(static_cast<int>(exist)));
}

__device__ __forceinline__ void load_4(const void* address, bool exist, uint32_t& word) {
  asm volatile(
      "{\n.reg .pred exist;\nsetp.ne.b32 exist, %2, 0;\nmov.b32 %0, 0;\n@exist ld.global.nc.L2::256B.b32 %0, [%1];\n}"
      : "=&r"(word)
      : "l"(address), "r"(static_cast<int>(exist)));
}

__device__ __forceinline__ void load_2(const void* address, bool exist, uint32_t& word) {
  uint16_t half_word;
  asm volatile("{\n.reg .pred exist;\nsetp.ne.b32 exist, %2, 0;\nmov.b16 %0, 0;\n@exist ld.global.nc.b16 %0, [%1];\n}"
               : "=&h"(half_word)
               : "l"(address), "r"(static_cast<int>(exist)));
  word = half_word;
}

// Asynchronous copies to shared memory. The issuing thread sees them after copies_wait, others after a barrier as well.

template <int BYTES>
__device__ __forceinline__ void copy_later(uint32_t to_smem, const void* address, bool exist) {
  asm volatile("cp.async.ca.shared.global.L2::256B [%0], [%1], %2, %3;" ::"r"(to_smem), "l"(address), "n"(BYTES),
               "r"(exist ? BYTES : 0)
               : "memory");
}

// Puts this thread's copies since the last commit into one group.
__device__ __forceinline__ void copies_commit() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING>
__device__ __forceinline__ void copies_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// A barrier of whole warps, `threads` in all. Barrier 0 is the one of __syncthreads.
__device__ __forceinline__ void named_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The same. Returns whether one of the threads has brought a true.
__device__ __forceinline__ bool named_barrier_any(int number, int threads, bool own) {
  int any = own;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\nbar.red.or.pred p, %1, %2, p;\nselp.b32 %0, 1, 0, p;\n}"
               : "+r"(any)
               : "r"(number), "r"(threads)
               : "memory");
  return any != 0;
}

// mbarriers: a phase ends when `count` arrivals and all expected bytes are in.

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase of this parity has ended. On a fresh mbarrier the phase of parity 1, before the first, has ended.
__device__ __forceinline__ bool barrier_ended(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define MODELNEW_TEST_WAIT "test_wait"
#else
#define MODELNEW_TEST_WAIT "try_wait"
#endif
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "mbarrier." MODELNEW_TEST_WAIT
      ".parity.shared::cta.b64 ended, [%1], %2;\n"
      "selp.u32 %0, 1, 0, ended;\n"
      "}\n"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (!barrier_ended(barrier, parity)) {
  }
}

// barrier_wait for threads that are not urgent: polling takes issue slots from other warps.
__device__ __forceinline__ void barrier_wait_idly(uint32_t barrier, uint32_t parity) {
  while (!barrier_ended(barrier, parity)) __nanosleep(64);
}

// Makes this thread's stores to shared memory visible to wgmma and bulk copies, the async proxy of Hopper.
__device__ __forceinline__ void fence_async() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Makes this thread's stores to global memory visible to bulk copies of the same kernel.
__device__ __forceinline__ void fence_async_memory() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// Waits until other blocks have raised an atomic counter in global memory to `least`. Writes that they fenced before
// are visible afterwards.
__device__ __forceinline__ void wait_for_count(const uint32_t* count, uint32_t least) {
  while (*static_cast<const volatile uint32_t*>(count) < least) __nanosleep(64);
  __threadfence();
}

// Bulk copies from global to shared memory. Addresses and sizes are multiples of 16 bytes.

__device__ __forceinline__ void bulk_load(uint32_t to_smem, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to_smem),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// TMA boxes: bulk copies between shared memory and a tensor of four dimensions.
//
// Rows of a box (its first dimension) lie one after another in shared memory. Elements outside the tensor load as 0 and
// are not stored, provided that rows of the tensor are multiples of 16 bytes (docs/lab/hopper.md). A box starts at a
// multiple of 16 bytes in global memory; a load elsewhere is an illegal instruction. In shared memory a loaded box
// starts at a multiple of 128 bytes, a stored one at a multiple of 1024.
//
// Rows to be stored have 128, 64 or 32 bytes and are swizzled, so that warps which store a column of 16-byte pieces
// meet all banks. Piece i of row r lies at
//
//   row of 128 bytes: i ^ r % 8        of 64 bytes: i ^ (r / 2) % 4        of 32 bytes: i

constexpr int kBoxRowBytes = 128;

struct alignas(64) BoxMap {
  uint64_t opaque[16];
};

// LEAVES_FIRST: the output is streamed and must not displace x from L2. It is wrong for parts of 128-byte lines whose
// other parts are written later.
template <bool LEAVES_FIRST = true>
__device__ __forceinline__ void store_box(const BoxMap& map, const void* from, int i, int j, int k, int l) {
  if constexpr (LEAVES_FIRST)
    asm volatile(
        "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], "
        "policy;\n}" ::"l"(&map),
        "r"(smem_address(from)), "r"(i), "r"(j), "r"(k), "r"(l)
        : "memory");
  else
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(smem_address(from)), "r"(i), "r"(j), "r"(k), "r"(l)
                 : "memory");
}

__device__ __forceinline__ void load_box(const BoxMap& map, uint32_t to_smem, int i, int j, int k, int l,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(to_smem),
      "l"(&map), "r"(i), "r"(j), "r"(k), "r"(l), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const BoxMap& map) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

// Puts this thread's bulk stores since the last commit into one group.
__device__ __forceinline__ void bulk_stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but the latest PENDING groups have been read from shared memory. Waiting for their arrival in global
// memory costs the L1 cache: the compiler adds an instruction that invalidates it.
template <int PENDING>
__device__ __forceinline__ void bulk_stores_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Programmatic dependent launch: the launch of a kernel is hidden behind its predecessor.
//
// A kernel launched early may start once every block of its predecessor has ended or called launch_dependents. Before
// it touches memory that earlier kernels use, it calls wait_for_prerequisites, which returns when the predecessor is
// complete and its stores are visible. Some thread of every block must do so, because the end of this kernel then
// implies the end of all kernels before it. Another library's kernel that is launched early in front of ours must do so
// as well.
//
// The first kernel of a call may be launched early, too. It waits before anything else and only then calls
// launch_dependents. Hence the second kernel need not wait for memory from before the call: none of its blocks starts
// before all blocks of the first kernel have waited. A GPU test covers this transitive visibility; the CUDA manual
// promises it only to kernels that wait themselves.
//
// The last kernel of a call never calls launch_dependents, because the next call may follow: doing so cost up to a wave
// for each call (docs/lab/hopper.md).

__device__ __forceinline__ void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900  // plain sm_90 has them, too: kernels launched early must wait there
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_prerequisites() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
// Launches a kernel early, in clusters of `of_cluster` blocks; after its predecessor on other GPUs than Hopper's.
template <typename... Params>
cudaError_t launch_early_in_clusters(void (*kernel)(Params...), unsigned blocks, unsigned of_cluster, int threads,
                                     size_t smem_bytes, cudaStream_t stream,
                                     const std::remove_const_t<Params>&... params) {
  cudaLaunchAttribute attributes[2]{};
  int sms = 0;
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = find_gpu(sms) == 90;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = of_cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = of_cluster > 1 ? 2 : attributes[0].val.programmaticStreamSerializationAllowed ? 1 : 0;
  void* arguments[] = {const_cast<std::remove_const_t<Params>*>(&params)...};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

template <typename... Params>
cudaError_t launch_early(void (*kernel)(Params...), unsigned blocks, int threads, size_t smem_bytes,
                         cudaStream_t stream, const std::remove_const_t<Params>&... params) {
  return launch_early_in_clusters(kernel, blocks, 1, threads, smem_bytes, stream, params...);
}
#endif

// Register reallocation between warpgroups (setmaxnreg): one gives registers back, another takes them.

template <int COUNT>
__device__ __forceinline__ void registers_give_back() {
#if defined(MODELNEW_SM90A)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

template <int COUNT>
__device__ __forceinline__ void registers_take() {
#if defined(MODELNEW_SM90A)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

// The largest value of all lanes: one instruction since sm_80.
__device__ __forceinline__ uint32_t warp_max(uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, value);
#else
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(~0u, value, distance);
    value = other > value ? other : value;
  }
  return value;
#endif
}

__device__ __forceinline__ void load_shared(uint32_t& word, uint32_t address) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_shared_2(uint32_t (&words)[2], uint32_t address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_shared_4(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_shared_half(uint32_t& word, uint32_t address) {
  uint16_t half_word;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(half_word) : "r"(address) : "memory");
  word = half_word;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t address, const uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

// Loads 16 rows x 32 bytes of shared memory as the `a` of WgmmaRegisters. Lane l addresses row l % 16 of the first 16
// bytes (l < 16) or of the last.
__device__ __forceinline__ void load_matrix(uint32_t (&a)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

// Loads the same operand transposed, from 16 rows of 16 values of 16 bits. Lane l addresses 8 values of row
// l / 16 * 8 + l % 8: the first ones if l / 8 is even, else the last.
__device__ __forceinline__ void load_matrix_transposed(uint32_t (&a)[4], uint32_t address) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
#endif
}

// Stores four blocks of 8 x 8 values of 16 bits. A lane holds, in words[i], columns 2*(l%4) and 2*(l%4) + 1 of row l/4;
// lane l addresses row l % 8, 16 bytes, of block l / 8.
__device__ __forceinline__ void store_matrix(uint32_t address, const uint32_t (&words)[4]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
#endif
}

// Stores four blocks of 8 x 8 values transposed: lane l addresses column l % 8, 16 bytes, of block l / 8. A lane holds
// the same values as for store_matrix.
__device__ __forceinline__ void store_matrix_transposed(uint32_t address, const uint32_t (&words)[4]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
#endif
}

}  // namespace hopper
}  // namespace modelnew
