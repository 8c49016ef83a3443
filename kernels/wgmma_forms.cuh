// Forms of wgmma that fewer engines use: operands that lie across the reduction, in rows of 128 bytes, as TMA brings
// the pixels of channels_last tensors; and widths that suit rows of images.
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

#define MODELNEW_ACC_28(i) \
  MODELNEW_ACC_16(i), MODELNEW_ACC_4((i) + 16), MODELNEW_ACC_4((i) + 20), MODELNEW_ACC_4((i) + 24)
#define MODELNEW_ACC_52(i) MODELNEW_ACC_32(i), MODELNEW_ACC_16((i) + 32), MODELNEW_ACC_4((i) + 48)
#define MODELNEW_ACC_56(i) MODELNEW_ACC_52(i), MODELNEW_ACC_4((i) + 52)
#define MODELNEW_ACC_60(i) MODELNEW_ACC_56(i), MODELNEW_ACC_4((i) + 56)
#define MODELNEW_ACC_68(i) MODELNEW_ACC_64(i), MODELNEW_ACC_4((i) + 64)
#define MODELNEW_ACC_104(i) MODELNEW_ACC_96(i), MODELNEW_ACC_4((i) + 96), MODELNEW_ACC_4((i) + 100)
#define MODELNEW_ACC_112(i) MODELNEW_ACC_96(i), MODELNEW_ACC_16((i) + 96)
#define MODELNEW_ACC_116(i) MODELNEW_ACC_112(i), MODELNEW_ACC_4((i) + 112)

#define MODELNEW_WGMMA_MORE_SHAPES(OPERAND, TYPES, SIGNS)                 \
  MODELNEW_WGMMA(Wgmma, OPERAND, 96, 48, "%48", "%49", "%50", TYPES, SIGNS)      \
  MODELNEW_WGMMA(Wgmma, OPERAND, 112, 56, "%56", "%57", "%58", TYPES, SIGNS)     \
  MODELNEW_WGMMA(Wgmma, OPERAND, 120, 60, "%60", "%61", "%62", TYPES, SIGNS)     \
  MODELNEW_WGMMA(Wgmma, OPERAND, 192, 96, "%96", "%97", "%98", TYPES, SIGNS)     \
  MODELNEW_WGMMA(Wgmma, OPERAND, 208, 104, "%104", "%105", "%106", TYPES, SIGNS) \
  MODELNEW_WGMMA(Wgmma, OPERAND, 224, 112, "%112", "%113", "%114", TYPES, SIGNS) \
  MODELNEW_WGMMA(Wgmma, OPERAND, 232, 116, "%116", "%117", "%118", TYPES, SIGNS)

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
MODELNEW_WGMMA_MORE_SHAPES(Half, "k16.f32.f16.f16", "1, 1, 0, 0")
MODELNEW_WGMMA(Wgmma, Half, 136, 68, "%68", "%69", "%70", "k16.f32.f16.f16", "1, 1, 0, 0")
MODELNEW_WGMMA_MORE_SHAPES(BFloat16, "k16.f32.bf16.bf16", "1, 1, 0, 0")
MODELNEW_WGMMA_REGISTERS(Half, 56, 28, "%28, %29, %30, %31", "%32", "%33", "k16.f32.f16.f16", "1, 1, 0")
MODELNEW_WGMMA_REGISTERS(Half, 104, 52, "%52, %53, %54, %55", "%56", "%57", "k16.f32.f16.f16", "1, 1, 0")
MODELNEW_WGMMA_REGISTERS(Half, 112, 56, "%56, %57, %58, %59", "%60", "%61", "k16.f32.f16.f16", "1, 1, 0")
MODELNEW_WGMMA_REGISTERS(Half, 120, 60, "%60, %61, %62, %63", "%64", "%65", "k16.f32.f16.f16", "1, 1, 0")
MODELNEW_WGMMA_REGISTERS(Half, 136, 68, "%68, %69, %70, %71", "%72", "%73", "k16.f32.f16.f16", "1, 1, 0")
#endif

}  // namespace hopper
}  // namespace modelnew
