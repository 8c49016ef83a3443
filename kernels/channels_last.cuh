// Tensors of 16 bits in channels_last, for engines whose operands come by tensor copies (TMA): what boxes ask of a
// tensor, and columns (im2col), which number the outputs of all images and find what a tap of each reads.
#pragma once

#include "hopper.cuh"
#include "problem.cuh"

namespace modelnew {
namespace hopper {

// Stages in turns.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  MODELNEW_HOST_DEVICE void next(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  MODELNEW_HOST_DEVICE void skip(int count, int stages) {
    const int turns = (stage + count) / stages;
    stage += count - turns * stages;
    parity ^= turns & 1;
  }
};

// Steps that boxes can take: multiples of 16 bytes, and not none.
inline bool in_eights(int64_t step, bool matters) { return !matters || (step > 0 && step % 8 == 0); }

inline bool has_pixels_of_eights(const int64_t (&stride)[4], int64_t images, int channels, int rows, int columns) {
  return channels % 8 == 0 && stride[1] == 1 && in_eights(stride[0], images > 1) && in_eights(stride[2], rows > 1) &&
         in_eights(stride[3], columns > 1);
}

// Of a dimension of a map.
inline uint64_t step_bytes(int64_t stride, int64_t size) { return static_cast<uint64_t>(size > 1 ? 2 * stride : 16); }

struct Axis {
  int size, outputs, taps, stride, pad, dilation;  // a stride that is never taken is 1
};

// As make_columns_map has them, of width and height.
struct Columns {
  int first[2], last[2], steps[2], farthest_tap[2];
};

// `last` is where exactly the last output begins. The usual corner, pad - (taps - 1) * dilation, gives as many outputs
// as fit; with a stride that is never taken there are fewer.
inline Columns columns_of(const Axis& width, const Axis& height) {
  // To an int: no map reaches beyond 1000 anyway.
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

// Corners of an image are 8 bits with a sign, offsets of taps 8 without.
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
