// The current GPU, as engines plan for it. Host only.
#pragma once

#include <cuda_runtime_api.h>

namespace modelnew {

// Returns the compute capability, times 10, and sets `sms`; returns 0 without a GPU. A thread queries CUDA only after
// it has switched to another GPU: queries add up over a call (docs/lab/hopper.md).
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
