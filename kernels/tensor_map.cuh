// Tensor maps, by which TMA boxes address a tensor (ptx.cuh has the copies): the host encodes them through the driver.
// These describe boxes; im2col_map.cuh has those of columns of pixels.
#pragma once

#include "ptx.cuh"

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace modelnew {
namespace hopper {

// Halves: rows of 64 bytes. Quarters: rows of 32 bytes. kLoadRows: rows of 128 bytes, swizzled like those to be stored.
enum class BoxUse { kStore, kStoreHalves, kStoreQuarters, kLoad, kLoadRows, kLoadHalves, kLoadQuarters };

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
                  : use == BoxUse::kLoadQuarters                              ? CU_TENSOR_MAP_SWIZZLE_32B
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

}  // namespace hopper
}  // namespace modelnew

#endif
