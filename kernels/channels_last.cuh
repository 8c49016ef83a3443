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

// [image][plane][pixel] -> [image][pixel][channel], with channels padded by zeros to a multiple of 8. A block
// transposes 64 channels x 64 pixels:
//
//   x --16 bytes of a plane, wherever it begins, or single values--> [channel][pixel] in shared memory
//     --ldmatrix, transposed--> 8 channels of a pixel in a lane --> copy
struct PlanesCopy {
  const void *from_ptr, *end_ptr;  // end: behind the last value
  void* to_ptr;
  int64_t image, plane, pixel;  // strides, in elements
  int pixels, channels, row_channels;
  Divisor by_tiles, by_channel_tiles;
  int64_t blocks;
};

constexpr int kCopyThreads = 256, kCopyTile = 64;
constexpr int kCopyBytes = 590 * 16;  // shared memory of a block

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// Values `shift` to `shift` + 7 of sixteen, of 16 bits each.
__device__ __forceinline__ uint4 shifted(const uint4& low, const uint4& high, int shift) {
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int by = 4; by > 1; by /= 2)
#pragma unroll
    for (int i = 0; i < 8 - by / 2; ++i) words[i] = shift & by ? words[i + by / 2] : words[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = shift & 1 ? words[i] >> 16 | words[i + 1] << 16 : words[i];
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Eight values that are `step` apart and begin anywhere in memory: neighbours by 16 bytes. Values from `end` on may be
// anything.
__device__ __forceinline__ uint4 load_eight(const uint16_t* from, int64_t step, const void* begin, const void* end) {
  const int shift = static_cast<int>(reinterpret_cast<uint64_t>(from) / 2 % 8);
  const uint16_t *const first = from - shift, *const second = shift == 0 ? first : first + 8;
  if (step == 1 && first >= begin && second + 8 <= end) {
    const uint4 low = *reinterpret_cast<const uint4*>(first);
    return shift == 0 ? low : shifted(low, *reinterpret_cast<const uint4*>(second), shift);
  }
  const auto pair = [&](const uint16_t* two) -> uint32_t {
    return (two < end ? two[0] : 0) | (two + step < end ? two[step] : 0) << 16;
  };
  return make_uint4(pair(from), pair(from + 2 * step), pair(from + 4 * step), pair(from + 6 * step));
}

// Where a channel of a block begins in shared memory, in 16 bytes: ldmatrix reads two channels of each eight at once,
// which lie in different banks.
__device__ __forceinline__ int place_of_copied(int channel) { return 9 * channel + 2 * (channel / 8); }

__device__ __forceinline__ void copy_tile(const PlanesCopy& params, int block, uint8_t* smem) {
  const int row = quotient(block, params.by_tiles), first_pixel = (block - row * params.by_tiles.divisor) * kCopyTile;
  const int n = quotient(row, params.by_channel_tiles);
  const int first_channel = (row - n * params.by_channel_tiles.divisor) * kCopyTile;
  const uint16_t* const from = static_cast<const uint16_t*>(params.from_ptr) + n * params.image;
  constexpr int kPieces = kCopyTile / 8, kEach = kCopyTile * kPieces / kCopyThreads;
  // Neighbouring lanes have neighbouring pixels, or channels where pixels lie apart.
  const auto row_of = [&](int item) { return params.pixel == 1 ? item / kPieces : item % kCopyTile; };
  const auto piece_of = [&](int item) { return params.pixel == 1 ? item % kPieces : item / kCopyTile; };
  uint4 loaded[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int item = i * kCopyThreads + threadIdx.x, channel = first_channel + row_of(item);
    const int pixel = first_pixel + piece_of(item) * 8;
    loaded[i] = make_uint4(0, 0, 0, 0);
    if (channel < params.channels && pixel < params.pixels)
      loaded[i] = load_eight(from + channel * params.plane + pixel * params.pixel, params.pixel, params.from_ptr,
                             params.end_ptr);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int item = i * kCopyThreads + threadIdx.x;
    reinterpret_cast<uint4*>(smem)[place_of_copied(row_of(item)) + piece_of(item)] = loaded[i];
  }
  __syncthreads();  // the tile is there: all loads are in shared memory
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pixel = first_pixel + 8 * warp + lane / 4;
  uint16_t* const to =
      static_cast<uint16_t*>(params.to_ptr) + (static_cast<int64_t>(n) * params.pixels + pixel) * params.row_channels;
#pragma unroll
  for (int half = 0; half < kCopyTile; half += 32) {
    const int channel = first_channel + half + lane % 4 * 8;
    const int of_lane = half + lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
    uint32_t words[4];
    load_matrix_transposed(words, smem_address(smem + (place_of_copied(of_lane) + warp) * 16));
    if (pixel < params.pixels && channel < params.row_channels)
      *reinterpret_cast<uint4*>(to + channel) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Up to eight channels: a thread has all of a pixel.
__device__ __forceinline__ void copy_pixels(const PlanesCopy& params, int block) {
  const int n = quotient(block, params.by_tiles);
  const int pixel = (block - n * static_cast<int>(params.by_tiles.divisor)) * kCopyThreads + threadIdx.x;
  if (pixel >= params.pixels) return;
  const uint16_t* const from = static_cast<const uint16_t*>(params.from_ptr) + n * params.image + pixel * params.pixel;
  const auto channel = [&](int c) -> uint32_t { return c < params.channels ? from[c * params.plane] : 0; };
  const uint4 piece = {channel(0) | channel(1) << 16, channel(2) | channel(3) << 16, channel(4) | channel(5) << 16,
                       channel(6) | channel(7) << 16};
  static_cast<uint4*>(params.to_ptr)[static_cast<int64_t>(n) * params.pixels + pixel] = piece;
}

__device__ __forceinline__ void copy_planes(const PlanesCopy& params, int block, uint8_t* smem) {
  return params.row_channels == 8 ? copy_pixels(params, block) : copy_tile(params, block, smem);
}

// Makes two copies; one without blocks is none.
template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    planes_copy_kernel(const __grid_constant__ PlanesCopy a, const __grid_constant__ PlanesCopy b) {
  extern __shared__ __align__(16) uint8_t modelnew_planes_copy_smem[];
  const int block = static_cast<int>(blockIdx.x), of_a = static_cast<int>(a.blocks);
  wait_for_prerequisites();
  launch_dependents();
  copy_planes(block < of_a ? a : b, block < of_a ? block : block - of_a, modelnew_planes_copy_smem);
}

#endif  // device code

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

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)
template <typename Stream>  // a template is compiled where it is used
cudaError_t copy_both(const PlanesCopy& a, const PlanesCopy& b, Stream stream) {
  if (a.blocks + b.blocks == 0) return cudaSuccess;
  return launch_early(planes_copy_kernel<kCopyThreads>, static_cast<unsigned>(a.blocks + b.blocks), kCopyThreads,
                      kCopyBytes, stream, a, b);
}
#endif

}  // namespace hopper
}  // namespace modelnew
