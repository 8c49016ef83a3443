// The GPU in use, as engines plan for it. Host only.
#pragma once

#include <cuda_runtime_api.h>

namespace modelnew {

// Its compute capability, times 10, and how many SMs it has; 0 and nothing without one. A thread asks again only when
// it has changed to another GPU: these questions take about a microsecond (H200, 2026-11-23), several times a call.
inline int find_gpu(int& sms) {
  struct Gpu {
    int number, capability, sms;
  };
  thread_local Gpu latest{-1, 0, 0};
  int number = 0, major = 0, minor = 0;
  if (cudaGetDevice(&number) != cudaSuccess) return 0;
  if (number != latest.number) {
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, number);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, number);
    cudaDeviceGetAttribute(&latest.sms, cudaDevAttrMultiProcessorCount, number);
    latest.capability = 10 * major + minor;
    latest.number = number;
  }
  sms = latest.sms;
  return latest.capability;
}

}  // namespace modelnew
