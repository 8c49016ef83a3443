// im2col tensor maps, by which the Tensor Memory Accelerator loads columns of pixels.
#pragma once

#include "tensor_map.cuh"

namespace modelnew {
namespace hopper {

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

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
// An im2col map of [image][row][column][channel], elements of 2 or 4 bytes. A load brings `channels`, of 128 bytes at
// most, of `pixels` consecutive pixels, row by row and image by image, as BoxUse::kLoadRows. In each image pixels run
// from column and row `first` (negative: in the padding) to `last` relative to its end, every steps-th of them.
inline cudaError_t make_columns_map(const void* tensor, int element_bytes, const uint64_t (&sizes)[4],
                                    const uint64_t (&strides)[3], const int (&first)[2], const int (&last)[2],
                                    const int (&steps)[2], uint32_t channels, uint32_t pixels, BoxMap& map) {
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
  if (encode == nullptr) return cudaErrorNotSupported;
  const uint32_t element_strides[4] = {1, static_cast<uint32_t>(steps[0]), static_cast<uint32_t>(steps[1]), 1};
  const auto make = [&] {
    return encode(reinterpret_cast<CUtensorMap*>(&map),
                  element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT32, 4,
                  const_cast<void*>(tensor), sizes, strides, first, last, channels, pixels,
                  element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  return with_context(make);
}
#endif

}  // namespace hopper
}  // namespace modelnew
