// Stand-ins for the CUDA runtime, for engines that are compiled with MODELNEW_DRY_RUN. They launch nothing, report the
// GPU in `gpu`, and store the instances that launchers record. A library includes this header once.
#pragma once
#include <cuda_runtime_api.h>

#include <string>

#include "instances.cuh"

namespace modelnew {
namespace {

struct Gpu {
  int capability, sms;  // compute capability, times 10
  int group;            // SMs of a GPC, which limits clusters; 0: the counts of an H200
};

Gpu gpu{};
std::string recorded;  // one line for each instance: kernel and template arguments

}  // namespace

void record(const Instance& instance) {
  recorded += instance.kernel;
  for (int argument : instance.arguments) recorded += " " + std::to_string(argument);
  recorded += "\n";
}

}  // namespace modelnew

using modelnew::gpu;

extern "C" {

cudaError_t CUDARTAPI cudaGetDevice(int* number) {
  *number = 100 * (1000 * gpu.capability + gpu.sms) + gpu.group;  // device.cuh queries again if the number changes
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = gpu.capability / 10;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = gpu.capability % 10;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = gpu.sms;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:  // CUDA programming guide, technical specifications
      *value = (gpu.capability == 80 || gpu.capability == 87 ? 163 : gpu.capability / 10 == 8 || gpu.capability >= 120
                    ? 99 : gpu.capability >= 90 ? 227 : 64) << 10;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}

// An H200 reports 66, 30 and 15 clusters of 2, 4 and 8 blocks. GPUs of one model differ in the sizes of their GPCs.
cudaError_t CUDARTAPI cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t* config) {
  const int size = static_cast<int>(config->attrs[0].val.clusterDim.x);
  if (gpu.group == 0 && gpu.sms == 132) {
    *clusters = size == 2 ? 66 : size == 4 ? 30 : 15;
  } else {
    const int group = gpu.group == 0 ? 18 : gpu.group;
    *clusters = gpu.sms / group * (group / size) + gpu.sms % group / size;
  }
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaGetLastError() { return cudaSuccess; }
cudaError_t CUDARTAPI cudaSetDevice(int) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return cudaSuccess; }

// Engines ask for driver functions that encode tensor maps.
static int succeed() { return 0; }
#if CUDART_VERSION >= 12050
cudaError_t CUDARTAPI cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                                       cudaDriverEntryPointQueryResult*) {
#else
cudaError_t CUDARTAPI cudaGetDriverEntryPoint(const char*, void** function, unsigned long long,
                                              cudaDriverEntryPointQueryResult*) {
#endif
  *function = reinterpret_cast<void*>(succeed);
  return cudaSuccess;
}

// nvcc generates calls of these functions for <<<>>> and for the registration of kernels. If
// __cudaPushCallConfiguration() fails, the generated code does not launch.
unsigned __cudaPushCallConfiguration() { return 1; }
void* __cudaRegisterFatBinary() { return nullptr; }
int __cudaPopCallConfiguration() { return 0; }
int __cudaRegisterFatBinaryEnd() { return 0; }
int __cudaUnregisterFatBinary() { return 0; }
int __cudaRegisterFunction() { return 0; }
int __cudaRegisterVar() { return 0; }
int __cudaInitModule() { return 0; }
int __cudaLaunchKernel() { return 0; }
int __cudaGetKernel() { return 0; }

}  // extern "C"
