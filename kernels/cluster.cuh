// Clusters of Hopper: blocks that read one another's shared memory, and their launch.
#pragma once

#include "ptx.cuh"

namespace modelnew {
namespace hopper {

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

}  // namespace hopper
}  // namespace modelnew
