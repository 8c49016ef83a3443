// Stand-ins for CUDA, for the host code of wgmma.cu and ptx.cuh; the test sets the GPU.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

extern "C" {
int simt_mutation = 0;  // what takes place of a text made by with_mutations
}
#define __device__
#define __forceinline__ inline
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidConfiguration = 9, cudaErrorNoDevice = 100 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
inline int stand_in_capability = 90;  // 0: no GPU at all
inline cudaError_t cudaGetDevice(int* device) {
  *device = stand_in_capability;  // what a device is capable of never changes
  return stand_in_capability != 0 ? cudaSuccess : cudaErrorNoDevice;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount            ? 132
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? (stand_in_capability == 90   ? 232448
                                                                     : stand_in_capability == 80 ? 166912
                                                                                                 : 101376)
           : attribute == cudaDevAttrComputeCapabilityMajor       ? stand_in_capability / 10
                                                                  : stand_in_capability % 10;
  return cudaSuccess;
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int);
struct float4 { float x, y, z, w; };
unsigned long long __cvta_generic_to_shared(const void*);
void __nanosleep(unsigned);
void __threadfence();
unsigned __shfl_xor_sync(unsigned, unsigned, int);
int __shfl_sync(unsigned, int, int);
