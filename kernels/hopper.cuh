// Instructions of Hopper (sm_90a) and a few loads and stores, each as one small function: cp.async, mbarriers, TMA,
// clusters, programmatic dependent launch, wgmma, ldmatrix and stmatrix. PTX ISA 8.0, so that CUDA 12.1 assembles them.
//
// Shared memory is addressed by 32-bit numbers, as these instructions want it. Measurements: docs/lab/hopper.md.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cstdint>
#endif
#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <type_traits>
#endif

#include "numerics.cuh"

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

// Loads from an im2col map: pixels from (j, k) of image l on, shifted by (move_j, move_k), channels from i on.
__device__ __forceinline__ void load_columns(const BoxMap& map, uint32_t to_smem, int i, int j, int k, int l,
                                             int move_j, int move_k, uint32_t barrier) {
  asm volatile(
      "{\n.reg .b16 move_j, move_k;\ncvt.u16.u32 move_j, %7;\ncvt.u16.u32 move_k, %8;\n"
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6], {move_j, move_k};\n}" ::"r"(to_smem),
      "l"(&map), "r"(i), "r"(j), "r"(k), "r"(l), "r"(barrier), "r"(move_j), "r"(move_k)
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

// Clusters: blocks that read one another's shared memory.

__device__ __forceinline__ void cluster_sync() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The last barrier of a cluster: it orders no memory, as the threads have read what they need.
__device__ __forceinline__ void cluster_leave() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Loads from the shared memory of block `rank` of the cluster, at the same address as in this block.
__device__ __forceinline__ float4 load_cluster_4(uint32_t address, int rank) {
  float4 value{};
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
      : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
      : "r"(address), "r"(rank)
      : "memory");
#endif
  return value;
}

__device__ __forceinline__ float load_cluster(uint32_t address, int rank) {
  float value = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, [there];\n}"
               : "=f"(value)
               : "r"(address), "r"(rank)
               : "memory");
#endif
  return value;
}

// Sums over the 2, 4 or 8 blocks of a cluster in their order. All loads precede the additions to overlap their latency.
__device__ __forceinline__ float4 add_cluster_4(uint32_t address, int blocks) {
  float4 sum{}, parts[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) parts[i] = i < blocks ? load_cluster_4(address, i) : float4{};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum.x += parts[i].x;
    sum.y += parts[i].y;
    sum.z += parts[i].z;
    sum.w += parts[i].w;
  }
  return sum;
}

__device__ __forceinline__ float add_cluster(uint32_t address, int blocks) {
  float sum = 0;
#pragma unroll 1
  for (int rank = 0; rank < blocks; rank += 4) {
    float parts[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) parts[i] = rank + i < blocks ? load_cluster(address, rank + i) : 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += parts[i];
  }
  return sum;
}

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
// Halves: rows of 64 bytes. Quarters: rows of 32 bytes. kLoadRows: rows of 128 bytes, swizzled like those to be stored.
enum class BoxUse { kStore, kStoreHalves, kStoreQuarters, kLoad, kLoadRows, kLoadHalves };

// Finds a function of the driver at run time, because libcuda is not linked.
template <typename Function>
Function driver_function(const char* name) {
  void* function = nullptr;
#if CUDART_VERSION >= 12050
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
#else
  cudaGetDriverEntryPoint(name, &function, cudaEnableDefault);
#endif
  return reinterpret_cast<Function>(function);
}

// Retries with a context. A thread that has not called the runtime yet, such as autograd's at its first gradient, may
// have none, and the driver then refuses to encode a map.
template <typename Make>
cudaError_t with_context(const Make& make) {
  if (make() == CUDA_SUCCESS) return cudaSuccess;
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess || cudaSetDevice(device) != cudaSuccess) return cudaErrorInvalidValue;
  return make() == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Sizes and box are in elements of 2 or 4 bytes; strides are in bytes, multiples of 16, and omit the first dimension.
// A box spans box[1] elements of the second dimension and holds every `step`-th of them, likewise with `step_2` for the
// third; steps are at most 8 and divide the box.
inline cudaError_t make_box_map(BoxUse use, const void* tensor, int element_bytes, const uint64_t (&sizes)[4],
                                const uint64_t (&strides)[3], const uint32_t (&box)[4], BoxMap& map, uint32_t step = 1,
                                uint32_t step_2 = 1) {
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  if (encode == nullptr) return cudaErrorNotSupported;
  const uint32_t element_strides[4] = {1, step, step_2, 1};
  const auto make = [&] {
    return encode(reinterpret_cast<CUtensorMap*>(&map),
                  element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT32, 4,
                  const_cast<void*>(tensor), sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  use == BoxUse::kLoad || use == BoxUse::kStoreQuarters       ? CU_TENSOR_MAP_SWIZZLE_NONE
                  : use == BoxUse::kStoreHalves || use == BoxUse::kLoadHalves ? CU_TENSOR_MAP_SWIZZLE_64B
                                                                              : CU_TENSOR_MAP_SWIZZLE_128B,
                  use == BoxUse::kStore || use == BoxUse::kStoreHalves || use == BoxUse::kStoreQuarters
                      ? CU_TENSOR_MAP_L2_PROMOTION_NONE
                      : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  static_assert(sizeof(BoxMap) == sizeof(CUtensorMap), "the same");
  return with_context(make);
}

// An im2col map of [image][row][column][channel], elements of 2 or 4 bytes. A load brings 128 bytes of channels of
// `pixels` consecutive pixels, row by row and image by image, swizzled as BoxUse::kLoadRows. In each image pixels run
// from column and row `first` (negative: in the padding) to `last` relative to its end, every steps-th of them.
inline cudaError_t make_columns_map(const void* tensor, int element_bytes, const uint64_t (&sizes)[4],
                                    const uint64_t (&strides)[3], const int (&first)[2], const int (&last)[2],
                                    const int (&steps)[2], uint32_t pixels, BoxMap& map) {
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
  if (encode == nullptr) return cudaErrorNotSupported;
  const uint32_t element_strides[4] = {1, static_cast<uint32_t>(steps[0]), static_cast<uint32_t>(steps[1]), 1};
  const auto make = [&] {
    return encode(reinterpret_cast<CUtensorMap*>(&map),
                  element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT32, 4,
                  const_cast<void*>(tensor), sizes, strides, first, last, kBoxRowBytes / element_bytes, pixels,
                  element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  return with_context(make);
}
#endif

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
#if defined(MODELNEW_SM90A)
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_prerequisites() {
#if defined(MODELNEW_SM90A)
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
// Launches a kernel early, in clusters of `of_cluster` blocks.
template <typename... Params>
cudaError_t launch_early_in_clusters(void (*kernel)(Params...), unsigned blocks, unsigned of_cluster, int threads,
                                     size_t smem_bytes, cudaStream_t stream,
                                     const std::remove_const_t<Params>&... params) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = of_cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = of_cluster > 1 ? 2 : 1;
  void* arguments[] = {const_cast<std::remove_const_t<Params>*>(&params)...};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

template <typename... Params>
cudaError_t launch_early(void (*kernel)(Params...), unsigned blocks, int threads, size_t smem_bytes,
                         cudaStream_t stream, const std::remove_const_t<Params>&... params) {
  return launch_early_in_clusters(kernel, blocks, 1, threads, smem_bytes, stream, params...);
}

// The configuration of a launch in clusters of `of` blocks.
struct ClusterLaunch {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  ClusterLaunch(unsigned blocks, int of, int threads, int smem_bytes, cudaStream_t stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = of;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = smem_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;  // config points to attribute
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;
};
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

// wgmma: acc[64, N] (+)= a[64, 32 bytes] b[N, 32 bytes], by the four warps of a warpgroup.
//
// Both operands lie in shared memory without swizzle, as 16-byte pieces (8 values of 16 bits, 4 of TF32): rows are 16
// bytes apart, and the two halves along the reduction `half_distance` apart.
//
// Accumulators: acc[4*j + 2*i + e] of thread t is row 16*(t/32) + t%32/4 + 8*i, column 8*j + 2*(t%4) + e.

// A descriptor's lower half is in units of 16 bytes: adding 1 moves the operand by one row. Its upper half is
// kDescriptorHigh: groups of 8 rows are 128 bytes apart.
constexpr uint32_t kDescriptorHigh = 128 / 16;

// Upper half for an operand with swizzled rows of 128 bytes (kLoadRows). Groups of 8 rows are 1024 bytes apart, the
// operand starts at a multiple of 1024, and a step of 32 bytes along the reduction adds 2 to the lower half.
constexpr uint32_t kRowsDescriptorHigh = 1024 / 16 | 1u << 30;

// Removes the number of the block from a shared-memory address in a cluster: a descriptor has no room for it.
__device__ __forceinline__ uint32_t of_own_block(uint32_t address) { return address & 0x3ffff; }

__device__ __forceinline__ uint32_t descriptor(uint32_t address, uint32_t half_distance) {
  return address / 16 | half_distance / 16 << 16;
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

// Clears accumulators that the first wgmma overwrites. ptxas of CUDA 12.1 takes them for uninitialised otherwise, and
// then serialises every wgmma (C7515); that of 13.0 does not.
template <typename Sums>
__device__ __forceinline__ void wgmma_start(Sums& sums) {
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ < 13
  float* const sum = reinterpret_cast<float*>(&sums);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof sums / sizeof *sum); ++i) sum[i] = 0;
#else
  static_cast<void>(sums);
#endif
}

// Keeps the compiler from reading `acc` before the preceding wgmma_wait.
template <int COUNT>
__device__ __forceinline__ void wgmma_settle(float (&acc)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

template <typename Operand, int N>
struct Wgmma;

// wgmma with a transposed `b` of 16 bits, which is contiguous along N: swizzled rows of 128 bytes hold 64 columns, the
// next 64 columns are `half_distance` further, and 8 rows of the reduction are 1024 bytes apart.
template <typename Operand, int N>
struct WgmmaTransposed;

// wgmma with a transposed `a`, contiguous along its 64 rows, and with both operands transposed.
template <typename Operand, int N>
struct WgmmaFirstTransposed;
template <typename Operand, int N>
struct WgmmaBothTransposed;

#define MODELNEW_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MODELNEW_NAMES_28 MODELNEW_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27"
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
#define MODELNEW_ACC_16(i) MODELNEW_ACC_4(i), MODELNEW_ACC_4((i) + 4), MODELNEW_ACC_4((i) + 8), MODELNEW_ACC_4((i) + 12)
#define MODELNEW_ACC_28(i) \
  MODELNEW_ACC_16(i), MODELNEW_ACC_4((i) + 16), MODELNEW_ACC_4((i) + 20), MODELNEW_ACC_4((i) + 24)
#define MODELNEW_ACC_32(i) MODELNEW_ACC_16(i), MODELNEW_ACC_16((i) + 16)
#define MODELNEW_ACC_64(i) MODELNEW_ACC_32(i), MODELNEW_ACC_32((i) + 32)
#define MODELNEW_ACC_52(i) MODELNEW_ACC_32(i), MODELNEW_ACC_16((i) + 32), MODELNEW_ACC_4((i) + 48)
#define MODELNEW_ACC_56(i) MODELNEW_ACC_52(i), MODELNEW_ACC_4((i) + 52)
#define MODELNEW_ACC_60(i) MODELNEW_ACC_56(i), MODELNEW_ACC_4((i) + 56)
#define MODELNEW_ACC_68(i) MODELNEW_ACC_64(i), MODELNEW_ACC_4((i) + 64)
#define MODELNEW_ACC_72(i) MODELNEW_ACC_64(i), MODELNEW_ACC_4((i) + 64), MODELNEW_ACC_4((i) + 68)
#define MODELNEW_ACC_96(i) MODELNEW_ACC_64(i), MODELNEW_ACC_32((i) + 64)
#define MODELNEW_ACC_48(i) MODELNEW_ACC_32(i), MODELNEW_ACC_16((i) + 32)
#define MODELNEW_ACC_104(i) MODELNEW_ACC_96(i), MODELNEW_ACC_4((i) + 96), MODELNEW_ACC_4((i) + 100)
#define MODELNEW_ACC_112(i) MODELNEW_ACC_96(i), MODELNEW_ACC_16((i) + 96)
#define MODELNEW_ACC_116(i) MODELNEW_ACC_112(i), MODELNEW_ACC_4((i) + 112)
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
#define MODELNEW_WGMMA_MORE_SHAPES(OPERAND, TYPES, SIGNS)                 \
  MODELNEW_WGMMA(Wgmma, OPERAND, 96, 48, "%48", "%49", "%50", TYPES, SIGNS)      \
  MODELNEW_WGMMA(Wgmma, OPERAND, 112, 56, "%56", "%57", "%58", TYPES, SIGNS)     \
  MODELNEW_WGMMA(Wgmma, OPERAND, 120, 60, "%60", "%61", "%62", TYPES, SIGNS)     \
  MODELNEW_WGMMA(Wgmma, OPERAND, 192, 96, "%96", "%97", "%98", TYPES, SIGNS)     \
  MODELNEW_WGMMA(Wgmma, OPERAND, 208, 104, "%104", "%105", "%106", TYPES, SIGNS) \
  MODELNEW_WGMMA(Wgmma, OPERAND, 224, 112, "%112", "%113", "%114", TYPES, SIGNS) \
  MODELNEW_WGMMA(Wgmma, OPERAND, 232, 116, "%116", "%117", "%118", TYPES, SIGNS)

#define MODELNEW_WGMMA_TRANSPOSED(OPERAND, TYPES)                                                 \
  MODELNEW_WGMMA(WgmmaTransposed, OPERAND, 128, 64, "%64", "%65", "%66", TYPES, "1, 1, 0, 1")     \
  MODELNEW_WGMMA(WgmmaTransposed, OPERAND, 256, 128, "%128", "%129", "%130", TYPES, "1, 1, 0, 1") \
  MODELNEW_WGMMA(WgmmaFirstTransposed, OPERAND, 64, 32, "%32", "%33", "%34", TYPES, "1, 1, 1, 0") \
  MODELNEW_WGMMA(WgmmaFirstTransposed, OPERAND, 128, 64, "%64", "%65", "%66", TYPES, "1, 1, 1, 0") \
  MODELNEW_WGMMA(WgmmaBothTransposed, OPERAND, 64, 32, "%32", "%33", "%34", TYPES, "1, 1, 1, 1")  \
  MODELNEW_WGMMA(WgmmaBothTransposed, OPERAND, 128, 64, "%64", "%65", "%66", TYPES, "1, 1, 1, 1") \
  MODELNEW_WGMMA(WgmmaBothTransposed, OPERAND, 192, 96, "%96", "%97", "%98", TYPES, "1, 1, 1, 1") \
  MODELNEW_WGMMA(WgmmaBothTransposed, OPERAND, 256, 128, "%128", "%129", "%130", TYPES, "1, 1, 1, 1")

#if defined(MODELNEW_SM90A)
MODELNEW_WGMMA_TRANSPOSED(Half, "k16.f32.f16.f16")
MODELNEW_WGMMA_TRANSPOSED(BFloat16, "k16.f32.bf16.bf16")
MODELNEW_WGMMA_SHAPES(Half, "k16.f32.f16.f16", "1, 1, 0, 0")
MODELNEW_WGMMA_MORE_SHAPES(Half, "k16.f32.f16.f16", "1, 1, 0, 0")
MODELNEW_WGMMA(Wgmma, Half, 136, 68, "%68", "%69", "%70", "k16.f32.f16.f16", "1, 1, 0, 0")
MODELNEW_WGMMA_SHAPES(BFloat16, "k16.f32.bf16.bf16", "1, 1, 0, 0")
MODELNEW_WGMMA_MORE_SHAPES(BFloat16, "k16.f32.bf16.bf16", "1, 1, 0, 0")
MODELNEW_WGMMA_SHAPES(float, "k8.f32.tf32.tf32", "1, 1")
#endif

// wgmma with `a` in registers, where ldmatrix puts the 16 rows of each warp.
template <typename Operand, int N>
struct WgmmaRegisters;

#define MODELNEW_WGMMA_REGISTERS(OPERAND, N, COUNT, A, B, KEEP, TYPES, SIGNS)                                        \
  template <>                                                                                                        \
  struct WgmmaRegisters<OPERAND, N> {                                                                                \
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
MODELNEW_WGMMA_REGISTERS(Half, 56, 28, "%28, %29, %30, %31", "%32", "%33", "k16.f32.f16.f16", "1, 1, 0")
MODELNEW_WGMMA_REGISTERS(Half, 104, 52, "%52, %53, %54, %55", "%56", "%57", "k16.f32.f16.f16", "1, 1, 0")
MODELNEW_WGMMA_REGISTERS(Half, 112, 56, "%56, %57, %58, %59", "%60", "%61", "k16.f32.f16.f16", "1, 1, 0")
MODELNEW_WGMMA_REGISTERS(Half, 120, 60, "%60, %61, %62, %63", "%64", "%65", "k16.f32.f16.f16", "1, 1, 0")
MODELNEW_WGMMA_REGISTERS(Half, 136, 68, "%68, %69, %70, %71", "%72", "%73", "k16.f32.f16.f16", "1, 1, 0")
MODELNEW_WGMMA_REGISTERS_SHAPES(BFloat16, "k16.f32.bf16.bf16", "1, 1, 0")
MODELNEW_WGMMA_REGISTERS_SHAPES(float, "k8.f32.tf32.tf32", "1, 1")
#endif

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
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
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
