// The current GPU, as engines plan for it. Host only.
#pragma once

#include <cuda_runtime_api.h>

namespace modelnew {

struct Gpu { int number, capability, sms, smem_bytes; };  // capability: times 10; smem_bytes: a block's, at most

// Zeros without a GPU. A thread queries CUDA only after a switch to another GPU: queries add up (docs/lab/hopper.md).
inline Gpu current_gpu() {
  thread_local Gpu latest{-1, 0, 0, 0};
  int number = 0, major = 0, minor = 0;
  if (cudaGetDevice(&number) != cudaSuccess) return {};
  if (number != latest.number) {
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, number);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, number);
    cudaDeviceGetAttribute(&latest.sms, cudaDevAttrMultiProcessorCount, number);
    cudaDeviceGetAttribute(&latest.smem_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, number);
    latest.capability = 10 * major + minor;
    latest.number = number;
  }
  return latest;
}

// Returns the compute capability, times 10, and sets `sms`; returns 0 and leaves `sms` without a GPU.
inline int find_gpu(int& sms) {
  const Gpu gpu = current_gpu();
  if (gpu.capability > 0) sms = gpu.sms;
  return gpu.capability;
}

// Lets blocks have all shared memory: other threads may launch a larger plan. Once, as it takes a fifth of a launch.
template <typename Kernel>
cudaError_t allow_all_shared_memory(Kernel kernel) {
  thread_local struct { Kernel kernel; int gpu; } latest[64];
  auto& allowed = latest[reinterpret_cast<size_t>(kernel) / 16 % 64];
  const Gpu gpu = current_gpu();
  if (allowed.kernel == kernel && allowed.gpu == gpu.number) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, gpu.smem_bytes);
  if (error == cudaSuccess) allowed = {kernel, gpu.number};
  return error;
}

}  // namespace modelnew
