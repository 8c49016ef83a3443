// The geometry of im2col maps (im2col_map.cuh). A map enumerates the output pixels of all images, and yields for each
// the pixel that a filter tap reads. Host only.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cstdint>
#endif

namespace modelnew {
namespace hopper {

struct Axis {
  int size, outputs, taps, stride, pad, dilation;  // a stride over a single output is 1
};

// Arguments of make_columns_map, for width and height in this order.
struct Columns {
  int first[2], last[2], steps[2], farthest_tap[2];
};

// `last` is where the last output begins. The usual corner, pad - (taps - 1) * dilation, yields as many outputs as fit:
// too many if a stride over a single output was replaced by 1.
inline Columns columns_of(const Axis& width, const Axis& height) {
  // Clamps to an int. No map reaches beyond 1000: can_map refuses it.
  const auto clamped = [](int64_t value) {
    return static_cast<int>(value > 1000 ? 1000 : value < -1000 ? -1000 : value);
  };
  Columns columns{};
  const Axis* const axes[2] = {&width, &height};
  for (int i = 0; i < 2; ++i) {
    const Axis& axis = *axes[i];
    columns.first[i] = clamped(-int64_t{axis.pad});
    columns.last[i] = clamped(int64_t{axis.outputs - 1} * axis.stride + 1 - axis.size - axis.pad);
    columns.steps[i] = axis.stride;
    columns.farthest_tap[i] = clamped(int64_t{axis.taps - 1} * axis.dilation);
  }
  return columns;
}

template <typename AnyCorrelation>
Columns columns_of(const AnyCorrelation& of) {
  return columns_of({of.W, of.Q, of.S, of.stride_w, of.pad_w, of.dilation_w},
                    {of.H, of.P, of.R, of.stride_h, of.pad_h, of.dilation_h});
}

// Whether the fields of an im2col map hold the values: corners are signed 8-bit numbers, tap offsets unsigned ones.
inline bool can_map(const Columns& columns) {
  const auto is_corner = [](int value) { return value >= -128 && value <= 127; };
  bool can = true;
  for (int i = 0; i < 2; ++i) {
    can &= is_corner(columns.first[i]) && is_corner(columns.last[i]);
    can &= columns.farthest_tap[i] <= 255 && columns.steps[i] <= 8;
  }
  return can;
}

}  // namespace hopper
}  // namespace modelnew
