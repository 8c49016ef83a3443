// 16-bit tensors in channels_last for engines that load operands by TMA: requirements of boxes, and copies of NCHW
// planes, and of pixels that boxes cannot read, into this format.
#pragma once

#include "divisor.cuh"
#include "problem.cuh"
#include "ptx.cuh"

namespace modelnew {
namespace hopper {

// Whether a TMA box accepts a stride: a positive multiple of 16 bytes. It does not matter along a dimension of size 1.
inline bool in_eights(int64_t step, bool matters) { return !matters || (step > 0 && step % 8 == 0); }

// Whether TMA boxes can read a tensor without a copy.
inline bool is_in_place(const int64_t (&stride)[4], int64_t images, int channels, int rows, int columns,
                        uint64_t address) {
  return channels % 8 == 0 && stride[1] == 1 && in_eights(stride[0], images > 1) && in_eights(stride[2], rows > 1) &&
         in_eights(stride[3], columns > 1) && address % 16 == 0;
}

// Stride of a map's dimension, in bytes.
inline uint64_t step_bytes(int64_t stride, int64_t size) { return static_cast<uint64_t>(size > 1 ? 2 * stride : 16); }

// [image][plane][pixel] -> [image][pixel][channel], with channels padded by zeros to a multiple of 8 (planes_copy.cuh).
struct PlanesCopy {
  const void *from_ptr, *end_ptr;  // end: behind the last value
  void* to_ptr;
  int64_t image, plane, pixel;  // strides, in elements
  int pixels, channels, row_channels;
  Divisor by_tiles, by_channel_tiles;
  int64_t blocks;
};

constexpr int kCopyThreads = 256, kCopyTile = 64;

// From pixel to pixel of an image, in elements, if all are as far apart.
inline int64_t pixel_step(const int64_t (&stride)[4], int rows, int columns) {
  return columns > 1 ? stride[3] : rows > 1 ? stride[2] : 1;
}

inline bool are_lines(const int64_t (&stride)[4], int rows, int columns) {
  return rows == 1 || columns == 1 || stride[2] == stride[3] * columns;
}

inline bool are_planes(const int64_t (&stride)[4], int rows, int columns) {
  return are_lines(stride, rows, columns) && pixel_step(stride, rows, columns) == 1;
}

// Channels per pixel, bytes and strides of a copy.
inline int copied_channels(int channels) { return (channels + 7) / 8 * 8; }

inline int64_t copied_bytes(int64_t images, int channels, int rows, int columns) {
  return 2 * images * rows * columns * copied_channels(channels);
}

inline bool can_copy(const int64_t (&stride)[4], int64_t images, int channels, int rows, int columns) {
  return are_lines(stride, rows, columns) && int64_t{rows} * columns < 1 << 30 &&
         copied_bytes(images, channels, rows, columns) <= kMostCopiedBytes;
}

inline void set_copied_strides(int channels, int rows, int columns, int64_t (&stride)[4]) {
  stride[1] = 1;
  stride[3] = copied_channels(channels);
  stride[2] = stride[3] * columns;
  stride[0] = stride[2] * rows;
}

inline PlanesCopy make_planes_copy(const void* from, const int64_t (&stride)[4], int64_t images, int channels, int rows,
                                   int columns, void* to) {
  const int row_channels = copied_channels(channels), pixels = rows * columns;
  const int64_t step = pixel_step(stride, rows, columns);
  const int64_t behind = (images - 1) * stride[0] + (channels - 1) * stride[1] + (pixels - 1) * step + 1;
  const int64_t tiles = ceil_div(pixels, row_channels == 8 ? kCopyThreads : kCopyTile);
  const int64_t channel_tiles = ceil_div(row_channels, kCopyTile), blocks = images * tiles * channel_tiles;
  return {from, static_cast<const uint16_t*>(from) + behind, to, stride[0], stride[1], step, pixels, channels,
          row_channels, make_divisor(tiles), make_divisor(channel_tiles), blocks};
}

}  // namespace hopper
}  // namespace modelnew
