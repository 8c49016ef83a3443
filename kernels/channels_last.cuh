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

inline bool has_pixels_of_eights(const int64_t (&stride)[4], int64_t images, int channels, int rows, int columns) {
  return channels % 8 == 0 && stride[1] == 1 && in_eights(stride[0], images > 1) && in_eights(stride[2], rows > 1) &&
         in_eights(stride[3], columns > 1);
}

// Whether TMA boxes can read a tensor without a copy.
inline bool is_in_place(const int64_t (&stride)[4], int64_t images, int channels, int rows, int columns,
                        uint64_t address) {
  return has_pixels_of_eights(stride, images, channels, rows, columns) && address % 16 == 0;
}

// Stride of a map's dimension, in bytes.
inline uint64_t step_bytes(int64_t stride, int64_t size) { return static_cast<uint64_t>(size > 1 ? 2 * stride : 16); }

// Copies of NCHW planes.

// [image][plane][pixel] -> [image][pixel][channel], with channels padded by zeros to a multiple of 8. A block
// transposes 64 channels x 64 pixels: it reads along pixels, or along channels where pixels lie far apart, and writes
// along channels.
struct PlanesCopy {
  const void* from_ptr;
  void* to_ptr;
  int64_t image, plane, pixel;  // strides, in elements
  int pixels, channels, row_channels, vector;
  Divisor by_tiles, by_channel_tiles;
};

constexpr int kCopyThreads = 256, kCopyTile = 64;
constexpr int kCopyBytes = kCopyTile * (kCopyTile + 2) * 2;  // shared memory of a block

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

template <int VECTOR>
__device__ __forceinline__ void copy_tile(const PlanesCopy& params, int block, uint16_t* smem) {
  struct alignas(2 * VECTOR) Values {
    uint16_t value[VECTOR];
  };
  constexpr int kPitch = kCopyTile + 2, kRuns = kCopyTile / VECTOR;
  const int row = quotient(block, params.by_tiles), first_pixel = (block - row * params.by_tiles.divisor) * kCopyTile;
  const int n = quotient(row, params.by_channel_tiles);
  const int first_channel = (row - n * params.by_channel_tiles.divisor) * kCopyTile;
  const uint16_t* const from = static_cast<const uint16_t*>(params.from_ptr) + n * params.image;
  Values loaded[kCopyTile * kRuns / kCopyThreads];
  const bool along_channels = VECTOR == 1 && params.pixel > 8;  // along fewer, lanes would idle
  const auto row_of = [&](int item) { return along_channels ? item % kCopyTile : item / kRuns; };
  const auto column_of = [&](int item) { return along_channels ? item / kCopyTile : item % kRuns * VECTOR; };
#pragma unroll
  for (int i = 0; i < kCopyTile * kRuns / kCopyThreads; ++i) {
    const int item = i * kCopyThreads + threadIdx.x, channel = first_channel + row_of(item);
    const int pixel = first_pixel + column_of(item);
    loaded[i] = Values{};
    if (channel < params.channels && pixel < params.pixels)
      loaded[i] = *reinterpret_cast<const Values*>(from + channel * params.plane + pixel * params.pixel);
  }
#pragma unroll
  for (int i = 0; i < kCopyTile * kRuns / kCopyThreads; ++i) {
    const int item = i * kCopyThreads + threadIdx.x;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) smem[row_of(item) * kPitch + column_of(item) + v] = loaded[i].value[v];
  }
  __syncthreads();  // the tile is there: all loads are in shared memory
  uint16_t* const to = static_cast<uint16_t*>(params.to_ptr) +
                       (static_cast<int64_t>(n) * params.pixels + first_pixel) * params.row_channels + first_channel;
#pragma unroll
  for (int i = 0; i < kCopyTile * 8 / kCopyThreads; ++i) {
    const int item = i * kCopyThreads + threadIdx.x, pixel = item / 8, channel = item % 8 * 8;
    if (first_pixel + pixel >= params.pixels || first_channel + channel >= params.row_channels) continue;
    uint4 piece;
    uint32_t* const words = &piece.x;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      words[j] = smem[(channel + 2 * j) * kPitch + pixel] | smem[(channel + 2 * j + 1) * kPitch + pixel] << 16;
    *reinterpret_cast<uint4*>(to + static_cast<int64_t>(pixel) * params.row_channels + channel) = piece;
  }
}

// Up to eight channels: a thread has all of a pixel.
__device__ __forceinline__ void copy_pixels(const PlanesCopy& params, int block) {
  const int n = quotient(block, params.by_tiles);
  const int pixel = (block - n * static_cast<int>(params.by_tiles.divisor)) * kCopyThreads + threadIdx.x;
  if (pixel >= params.pixels) return;
  const uint16_t* const from =
      static_cast<const uint16_t*>(params.from_ptr) + n * params.image + pixel * params.pixel;
  const auto channel = [&](int c) -> uint32_t { return c < params.channels ? from[c * params.plane] : 0; };
  const uint4 piece = {channel(0) | channel(1) << 16, channel(2) | channel(3) << 16, channel(4) | channel(5) << 16,
                       channel(6) | channel(7) << 16};
  static_cast<uint4*>(params.to_ptr)[static_cast<int64_t>(n) * params.pixels + pixel] = piece;
}

__device__ __forceinline__ void copy_planes(const PlanesCopy& params, int block, uint16_t* smem) {
  if (params.row_channels == 8)
    copy_pixels(params, block);
  else if (params.vector == 8)
    copy_tile<8>(params, block, smem);
  else if (params.vector == 4)
    copy_tile<4>(params, block, smem);
  else
    copy_tile<1>(params, block, smem);
}

#endif  // device code

// Number of neighbouring values of a plane that one vector load may take.
inline int vector_of(const int64_t (&stride)[4], int64_t images, int channels, int run, uint64_t address) {
  const auto is = [&](int vector) {
    return run % vector == 0 && address % (2 * vector) == 0 && (images == 1 || stride[0] % vector == 0) &&
           (channels == 1 || stride[1] % vector == 0);
  };
  return is(8) ? 8 : is(4) ? 4 : is(2) ? 2 : 1;
}

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

// Describes a copy and the number of blocks that it takes.
inline PlanesCopy make_planes_copy(const void* from, const int64_t (&stride)[4], int64_t images, int channels, int rows,
                                   int columns, void* to, int64_t& blocks) {
  const int row_channels = copied_channels(channels), pixels = rows * columns;
  const int64_t step = pixel_step(stride, rows, columns);
  const int64_t pixel_tiles = ceil_div(pixels, row_channels == 8 ? kCopyThreads : kCopyTile);
  const int64_t channel_tiles = ceil_div(row_channels, kCopyTile);
  blocks = images * pixel_tiles * channel_tiles;
  const int vector =
      step == 1 ? vector_of(stride, images, channels, pixels, reinterpret_cast<uint64_t>(from)) : 1;
  return {from,   to,       stride[0],    stride[1], step,
          pixels, channels, row_channels, vector,    make_divisor(pixel_tiles), make_divisor(channel_tiles)};
}

}  // namespace hopper
}  // namespace modelnew
