// The GPU in use, as engines plan for it. Host only.
#pragma once

#include <cuda_runtime_api.h>

namespace modelnew {

// Its compute capability, times 10, and how many SMs it has; 0 and nothing without one.
inline int find_gpu(int& sms) {
  int number = 0, major = 0, minor = 0;
  if (cudaGetDevice(&number) != cudaSuccess) return 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, number);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, number);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, number);
  return 10 * major + minor;
}

}  // namespace modelnew
