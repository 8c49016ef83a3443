// wgmma with operands of 16 bits that lie across the reduction, in rows of 128 bytes, as TMA brings the pixels of
// channels_last tensors.
#pragma once

#include "wgmma.cuh"

namespace modelnew {
namespace hopper {

// wgmma with a transposed `b` of 16 bits, which is contiguous along N: swizzled rows of 128 bytes hold 64 columns, the
// next 64 columns are LBO bytes further, and 8 rows of the reduction are 1024 bytes apart.
template <typename Operand, int N>
struct WgmmaTransposed;

// wgmma with a transposed `a`, contiguous along its 64 rows, and with both operands transposed.
template <typename Operand, int N>
struct WgmmaFirstTransposed;
template <typename Operand, int N>
struct WgmmaBothTransposed;

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
#endif

}  // namespace hopper
}  // namespace modelnew
