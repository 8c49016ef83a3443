// Copies of NCHW planes of 16 bits to channels_last. A block transposes 64 channels x 64 pixels:
//
//   x --16 bytes of a plane, wherever it begins, or single values--> [channel][pixel] in shared memory
//     --ldmatrix, transposed--> 8 channels of a pixel in a lane --> copy
#pragma once

#include "channels_last.cuh"

namespace modelnew {
namespace hopper {

// Where a channel of a block begins in shared memory, in 16 bytes: ldmatrix reads two channels of each eight at once,
// which lie in different banks.
MODELNEW_HOST_DEVICE constexpr int place_of_copied(int channel) { return 9 * channel + 2 * (channel / 8); }
constexpr int kCopyBytes = 16 * place_of_copied(kCopyTile);

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

#endif  // device code

}  // namespace hopper
}  // namespace modelnew
