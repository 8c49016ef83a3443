// wgrad engine: the gradient to the weights on Hopper's tensor cores (wgmma, sm_90a), for fp32 tensors under the TF32
// contract or in full fp32 accuracy, and 16-bit ones. Any filter of up to 30 rows and columns together, any stride,
// padding, dilation and groups, in any memory format. Deterministic: sums are added up in one order.
//
//   dw[k, e] = sum over pixels (n, p, q) of dy[n, k, p, q] * x[n, c(e), p*stride_h - pad_h + r(e)*dilation_h, ..]
//
// GEMM: rows = weights of a filter, e = (c, r, s) or, in channels_last, (r, s, c), as they lie in memory; columns =
// output channels; reduction = pixels. A block owns a tile of dw, 128 rows, and a range of pixels, a split, which it
// reads in stages of 32 words of each row and column, a word being one pixel of fp32 or two of 16 bits:
//
//   x stage    a window of the image with all that these pixels see, as in memory: [channel][row][column]
//              or, with 1x1 filters, [channel][word], 144 bytes a row: eight rows of 16 bytes meet all banks (ldmatrix)
//              or, in channels_last, [pixel][weight]
//   dy stage   [output channel][word], rows of 128 bytes in TMA's swizzle: what wgmma reads along its reduction
//              or, where no box can be loaded, [chunk of 4 words][output channel] x 16 bytes
//
//   memory --cp.async----> x stage --words or ldmatrix, rounding to TF32--> registers --+
//                                                                                      v
//   memory --TMA box-----> dy stage --rounding, in place----------------------------> wgmma --> sums --> dw
//
// The shift of a tap is one pixel, 4 or 2 bytes, which no wgmma descriptor can express: x is therefore the operand that
// goes through registers. Each word of it is found by the place of its pixel in the window, from a table that comes
// with the stage, plus that of its weight, which is a lane's own. Padding is zeros in the window. Without a window (x
// with other strides, windows that do not fit) words are gathered from memory, and a test of two bits, of the row and
// of the column of the tap, tells padding.
//
//   warps 0-7    multiply: two warpgroups, 64 rows of the tile each
//   the others   load, in groups of warps. Each group has a stage of its own: it issues its copies, waits for those of
//                the stage before, rounds dy and hands the stage over; groups take stages by turns
//
// Sums of splits meet in memory, in fp32, and are added up in double by a second kernel, in one order.
//
// A copy comes first where boxes and 16-byte copies cannot read a tensor: images whose size is no multiple of 16 bytes
// (with 1x1 filters all of them in a row, without gaps), rows that begin anywhere, and pixels that a 1x1 filter with a
// stride leaves out.
//
// Full fp32 accuracy takes three products: v = first + rest, both TF32, and first*first + first*rest + rest*first. The
// tensor core truncates when it adds, hence the sum of each stage is added to another one by ordinary additions.
// Products of rests may make a NaN of an Inf, and are left out where they are not finite. Under the TF32 contract a
// chain of sums is as long as a split, at most kMostChained pixels.
//
// Bound by loading stages from the L2 cache with 256 output channels, by the loading warps' other work with fewer; in
// channels_last by memory latency. Measurements: docs/lab/wgrad.md.
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "device.cuh"
#include "engines.cuh"
#include "memo.cuh"
#endif

#include "divisor.cuh"
#include "numerics.cuh"
#include "problem.cuh"
#include "ptx.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

namespace modelnew {
namespace wgrad {

// ---- Geometry, host and device ----

constexpr int kWarpgroups = 2, kMultiplyingWarps = 4 * kWarpgroups;
constexpr int kTileE = 64 * kWarpgroups;
constexpr int kStageWords = 32, kSteps = 4;  // a step is two chunks: 8 pixels of fp32, 16 of 16 bits
constexpr int kChunkWords = 4, kChunks = kStageWords / kChunkWords;
constexpr int kRowBytes = 4 * kStageWords + 16;                    // of the x stage
constexpr int kPixelBytes = 4 * kTileE + 32, kPixelBytes16 = 2 * kTileE + 16;  // of the other one: lanes meet all banks
constexpr int kXBytes = kTileE * kRowBytes;
static_assert(kStageWords * kPixelBytes <= kXBytes && 2 * kStageWords * kPixelBytes16 <= kXBytes, "either fits");
constexpr int kSmemBytes = 232448;
constexpr int kMostStages = 8;
[[maybe_unused]] constexpr int kMostAhead = 3;
constexpr int kAtOnce = 4;  // loads from shared memory by a warp before it needs the first, to hide their latency
// With half as many loading warps, as ptxas needs them: without spills, and wgmma one behind another (no C7512).
[[maybe_unused]] constexpr int kMultiplyRegisters = 176, kLoadRegisters = 152;
static_assert(2 * kMultiplyRegisters + kLoadRegisters == 3 * 168, "exactly the registers that the block has");
constexpr int kTableBytes = 8 * kTileE, kBarrierBytes = 24 * kMostStages;

// Bytes of the dy stage: of a chunk; of the stage or one of its parts, also as loaded by boxes.
MODELNEW_HOST_DEVICE constexpr int chunk_bytes(int tile_k) { return (tile_k + 1) * 16; }
MODELNEW_HOST_DEVICE constexpr int part_bytes(int tile_k, bool boxes) {
  return boxes ? tile_k * hopper::kBoxRowBytes : kChunks * chunk_bytes(tile_k);
}

// PARTS: 2 for full fp32 accuracy.
template <int TILE_K_, int PARTS_>
struct Shape {
  static constexpr int TILE_K = TILE_K_, PARTS = PARTS_;
  // Sums of a thread; warps that load: half as many where those that multiply need more than 128 registers.
  static constexpr int SUMS = TILE_K / 2;
  static constexpr bool MANY_SUMS = SUMS * PARTS >= 128;
  static constexpr int LOADERS = MANY_SUMS ? 4 : 8;
  static constexpr int THREADS = 32 * (kMultiplyingWarps + LOADERS);
  static constexpr int CHUNK_BYTES = chunk_bytes(TILE_K);
};

// How x comes into a stage.
enum class XCopies : int {
  kWords,     // lanes are pixels: a row of words each time
  kRuns,      // 16 bytes of a row, whose pixels are neighbours in memory
  kChannels,  // 16 bytes of a pixel's channels
  kWindow     // a window of the image, in which rows are found when they are multiplied
};

// How dy does.
enum class DyCopies : int {
  kWords,    // lanes are pixels
  kBoxes,    // a bulk copy of a box, whose pixels are neighbours in memory
  kChannels  // lanes are channels
};

// XCopies::kWindow. Outputs of an image are cut into strips of some columns, and those of a strip, row by row, into
// stages; a window has all that those of a stage see of the channels of a tile, as in memory.
struct Window {
  int width, strips;                       // columns of outputs
  int stages_of_strip, stages_of_image;
  int channels, rows, columns;
  int pitch, plane;                        // values from row to row and from channel to channel in shared memory
  int lead;                                // values in front of a row, for alignment
  int values, copies_of_row, copies;       // of a copy; of a window
  int row_bytes;                           // of x
  int dy_row_bytes, dy_column_bytes;       // from pixel to pixel of dy
};

[[maybe_unused]] constexpr uint32_t kNowhere = 1u << 31;  // a pixel of no output
[[maybe_unused]] constexpr uint32_t kNoRow = 1u << 31;  // of a channel that there is not: outside of every image

// From the beginning of shared memory, or of a stage.
struct Layout {
  int stages, stage_bytes;
  int places, dy, part_bytes;  // in a stage: where pixels are in a window, whether some are nowhere, and dy
  int table, barriers, copies;
  int bytes;
};

struct Params {
  const void *x_ptr, *dy_ptr;
  float* sums_ptr;                // of each split, or dw itself
  int64_t sums_split, sums_row;   // values from split to split and from output channel to output channel
  int64_t x_stride[4], dy_stride[4];
  int H, W, P, Q, R, S, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int group_c, group_k, columns;  // channels of a group; weights of a filter
  int tiles_k, tiles_e, groups;
  int pixels, stages, stages_per_split;
  bool taps_first;     // e = (r, s, c)
  XCopies x_copies;
  DyCopies dy_copies;
  bool whole_words;    // two pixels of 16 bits of dy are a word of memory
  Window window;
  Layout layout;
  hopper::BoxMap dy_map;  // [image][channel][row][column], or all pixels of an image as a row
  bool image_is_row;
  bool adds;              // another kernel adds up what this one stores
  Divisor by_plane, by_row, by_taps, by_channels, by_S, by_image_stages, by_strip_stages, by_width;
};

// A copy of a tensor that cannot be read in place: x of 1x1 filters that leave pixels out or whose images do not begin
// at multiples of 16 bytes, as dense images of y's size; x of others whose rows do not begin there; and dy likewise.
struct CopyParams {
  const void* from_ptr;
  void* to_ptr;
  int64_t stride[4];
  int H, W, P, Q, stride_h, stride_w, pad_h, pad_w;
  int channels;
  int rows;          // of a channel, in the copy
  bool image_is_row;
  int images_of_row;
  int64_t vectors;   // of 16 bytes
  Divisor by_row_vectors, by_rows, by_channels, by_plane, by_Q;
};

struct AddParams {
  const float* sums_ptr;
  void* dw_ptr;
  int64_t elements, sums_split;
  int64_t dw_stride[4];
  int splits, S, inner;  // inner: taps of a channel or, of channels_last, channels of a tap
  bool taps_first;
  DType dtype;
  Divisor by_columns, by_inner, by_S;
};

constexpr int kCopyThreads = 256, kAddThreads = 256;

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// ---- Device code ----

// Where a pixel's window begins in x, which of its rows (bits from 0 on) and columns (from R on) exist, and dy.
struct Pixel {
  const uint8_t *x, *dy;
  uint32_t exist;  // 0: there is no such pixel, or it sees nothing but padding
  bool is_pixel;
};

// A weight: bytes from the beginning of the window, and the bits that have to be set.
struct Weight {
  int32_t offset;
  uint32_t needs;
};

[[maybe_unused]] constexpr uint32_t kNever = 1u << 31;

template <typename Value>
__device__ __forceinline__ Pixel locate(const Params& params, const uint8_t* x, const uint8_t* dy, int number) {
  Pixel pixel{};
  pixel.is_pixel = number < params.pixels;
  if (!pixel.is_pixel) number = 0;
  const int n = quotient(number, params.by_plane), in_image = number - n * static_cast<int>(params.by_plane.divisor);
  const int p = quotient(in_image, params.by_row), q = in_image - p * static_cast<int>(params.by_row.divisor);
  const int h = p * params.stride_h - params.pad_h, w = q * params.stride_w - params.pad_w;
  const int64_t in_x = n * params.x_stride[0] + h * params.x_stride[2] + w * params.x_stride[3];
  const int64_t in_dy = n * params.dy_stride[0] + p * params.dy_stride[2] + q * params.dy_stride[3];
  pixel.x = x + in_x * static_cast<int64_t>(sizeof(Value));
  pixel.dy = dy + in_dy * static_cast<int64_t>(sizeof(Value));
  const bool inside = h >= 0 && w >= 0 && h + (params.R - 1) * params.dilation_h < params.H &&
                      w + (params.S - 1) * params.dilation_w < params.W;
  if (inside) {
    pixel.exist = (1u << (params.R + params.S)) - 1;
  } else {
    for (int r = 0; r < params.R; ++r)
      if (static_cast<unsigned>(h + r * params.dilation_h) < static_cast<unsigned>(params.H)) pixel.exist |= 1u << r;
    for (int s = 0; s < params.S; ++s)
      if (static_cast<unsigned>(w + s * params.dilation_w) < static_cast<unsigned>(params.W))
        pixel.exist |= 1u << (params.R + s);
  }
  if (!pixel.is_pixel) pixel.exist = 0;
  return pixel;
}

template <typename Value>
__device__ __forceinline__ void load_value(const uint8_t* address, bool exist, uint32_t& bits) {
  if constexpr (sizeof(Value) == 4)
    hopper::load_4(address, exist, bits);
  else
    hopper::load_2(address, exist, bits);
}

// First and rest of an fp32 value. Where rounding would overflow it is cut off; Inf and NaN have no rest.
__device__ __forceinline__ void split(uint32_t bits, uint32_t& first, uint32_t& rest) {
  const float value = bits_float(bits);
  const bool finite = fabsf(value) < bits_float(0x7f800000u);
  first = finite ? (bits + 0x1000u) & ~0x1fffu : bits;
  if (finite && (first & 0x7f800000u) == 0x7f800000u) first = bits & ~0x1fffu;
  rest = finite ? tf32_operand(float_bits(value - bits_float(first))) : 0;
}

struct Ring {
  uint32_t smem, barriers;  // addresses
  int stages, stage_bytes;
  int slot;
  uint32_t parity;

  __device__ __forceinline__ void advance(int count) {
    slot += count;
    if (slot >= stages) {
      slot -= stages;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ uint32_t stage() const { return smem + slot * stage_bytes; }
  __device__ __forceinline__ uint32_t full() const { return barriers + 24 * slot; }
  __device__ __forceinline__ uint32_t empty() const { return barriers + 24 * slot + 8; }
  __device__ __forceinline__ uint32_t landed() const { return barriers + 24 * slot + 16; }  // a box of dy
};

// ---- Loading ----

// GROUPS of warps load a stage each, in turn: what a stage takes beside its bytes, most of it waiting, they do side by
// side.
template <typename Value, typename Shape, int GROUPS, bool BOXES>
struct Loader {
  static constexpr bool FP32 = sizeof(Value) == 4;
  static constexpr int PIXELS = FP32 ? 1 : 2;  // of a word
  static constexpr int LOADERS = Shape::LOADERS / GROUPS;  // of a stage
  // Words that a thread holds for the next stage: of dy if they are to be rounded, of x where pixels of 16 bits
  // may lie across words.
  static constexpr int HELD = BOXES ? 4 : Shape::TILE_K / LOADERS, HELD_X = FP32 || BOXES ? kAtOnce : kTileE / LOADERS;

  static constexpr int BYTES = static_cast<int>(sizeof(Value));

  const Params& params;
  uint32_t table, copies;
  int lane, first_k, first_e, first_k_of_all;  // of its group, and of all
  const uint8_t *x, *dy;    // of the group, of the tile's first channel
  int64_t k_bytes;          // of dy, from channel to channel
  int warp;                 // of those that load a stage
  Weight own;               // of channels_last: that of the lane
  Pixel pixels[PIXELS];     // of the lane's word
  // The current strip: its number of the stage, its first column, and where it begins in x (row -pad_h) and dy.
  int expected_stage, of_strip, strip_q;
  const uint8_t *strip_x, *strip_dy;
  // The current window: where it begins in x, in the image, and where the lane's pixels are in it.
  const uint8_t* window_ptr;
  int first_row, first_column;
  uint32_t places[PIXELS];
  const uint8_t* x_run;  // of pieces of 16 bytes of channels of x: the lane's first, and how many of them there are
  int x_pieces;
  int box[4];            // where the box of dy begins: column, row, channel, image
  uint32_t held[FP32 ? HELD / 4 : 1][4], held_x[HELD_X * PIXELS];

  __device__ __forceinline__ Weight weight(int number) const {
    uint32_t words[2];
    hopper::load_shared_2(words, table + 8 * number);
    return {static_cast<int32_t>(words[0]), words[1]};
  }

  __device__ __forceinline__ static bool exists(uint32_t exist, const Weight& of) {
    return (exist & of.needs) == of.needs;
  }

  __device__ __forceinline__ bool has_k(int k) const { return first_k + k < params.group_k; }

  // Another lane's pointer.
  __device__ __forceinline__ static const uint8_t* of_lane(const uint8_t* pointer, int lane) {
    return reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(pointer), lane));
  }

  __device__ __forceinline__ static uint32_t word_of(const uint32_t* values) {
    return FP32 ? values[0] : values[0] | values[PIXELS - 1] << 16;
  }

  // ---- x ----

  __device__ __forceinline__ void copy_x(uint32_t stage) {
    if (params.x_copies == XCopies::kWindow) {
      copy_window(stage);
    } else if (params.x_copies == XCopies::kChannels) {
      copy_x_channels(stage);
    } else if (params.x_copies == XCopies::kRuns) {
      const uint32_t first = stage + own_row() * kRowBytes + lane % 8 * 16;
      const int64_t step = params.x_stride[1] * (4 * LOADERS * BYTES);
#pragma unroll
      for (int j = 0; j < kTileE / 4 / LOADERS; ++j)
        hopper::copy_async<16>(first + j * (4 * LOADERS * kRowBytes), x_run + j * step, j < x_pieces ? 16 : 0);
    } else if constexpr (FP32) {
#pragma unroll
      for (int first = 0; first < kTileE / LOADERS; first += kAtOnce) {
        Weight of[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) of[i] = weight((first + i) * LOADERS + warp);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          hopper::copy_async<4>(stage + ((first + i) * LOADERS + warp) * kRowBytes + lane * 4,
                                pixels[0].x + of[i].offset, exists(pixels[0].exist, of[i]) ? 4 : 0);
      }
    } else {
#pragma unroll
      for (int j = 0; j < HELD_X; ++j)
        hopper::store_shared(stage + (j * LOADERS + warp) * kRowBytes + lane * 4, word_of(held_x + j * PIXELS));
    }
  }

  __device__ __forceinline__ void copy_window(uint32_t stage) {
    if (warp == 0) {
#pragma unroll
      for (int i = 0; i < PIXELS; ++i)
        hopper::store_shared(stage + params.layout.places + (lane * PIXELS + i) * 4, places[i]);
      const bool nowhere = ((places[0] | places[PIXELS - 1]) & kNowhere) != 0;
      const bool some_nowhere = __any_sync(~0u, nowhere);
      if (lane == 0)
        hopper::store_shared(stage + params.layout.places + kStageWords * PIXELS * 4, some_nowhere ? 1 : 0);
    }
    if (params.window.values * BYTES == 16)
      copy_pieces<16>(stage);
    else
      copy_pieces<4>(stage);
  }

  template <int SIZE>
  __device__ __forceinline__ void copy_pieces(uint32_t stage) {
    constexpr int STEP = LOADERS * 32;
    const int last = params.window.copies - 1;
    for (int first = warp * 32 + lane; first <= last; first += kAtOnce * STEP) {
      uint32_t copy[kAtOnce][4];  // bytes from the window's beginning, row and column in it, bytes in the stage
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int number = first + i * STEP;
        hopper::load_shared_4(copy[i], copies + 16 * (number < last ? number : last));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const bool exist = first_row + copy[i][1] < static_cast<unsigned>(params.H) &&
                           first_column + copy[i][2] < static_cast<unsigned>(params.W);
        const uint8_t* const from = window_ptr + static_cast<int32_t>(copy[i][0]);
        if (first + i * STEP <= last) hopper::copy_async<SIZE>(stage + copy[i][3], from, exist ? SIZE : 0);
      }
    }
  }

  // Stages of a strip follow one another: little is left to find for most of them.
  __device__ __forceinline__ void find_window(int stage) {
    const Window& window = params.window;
    if (stage == expected_stage && of_strip + GROUPS < window.stages_of_strip) {
      of_strip += GROUPS;
    } else {
      const int n = quotient(stage, params.by_image_stages), of_image = stage - n * window.stages_of_image;
      const int strip = quotient(of_image, params.by_strip_stages);
      of_strip = of_image - strip * window.stages_of_strip;
      strip_q = strip * window.width;
      first_column = strip_q * params.stride_w - params.pad_w - window.lead;
      strip_x = x + (n * params.x_stride[0] + first_column) * BYTES;
      strip_dy = dy + (n * params.dy_stride[0] + strip_q * params.dy_stride[3]) * BYTES;
      box[3] = n;
    }
    expected_stage = stage + GROUPS;
    const int first = of_strip * (kStageWords * PIXELS), first_p = quotient(first, params.by_width);
    first_row = first_p * params.stride_h - params.pad_h;
    window_ptr = strip_x + static_cast<int64_t>(first_row) * window.row_bytes;
    if constexpr (BOXES) {
      box[0] = params.image_is_row ? first : strip_q;
      box[1] = params.image_is_row ? 0 : first_p;
      if (warp != 0) return;
    }
#pragma unroll
    for (int i = 0; i < PIXELS; ++i) {
      const int number = first + lane * PIXELS + i, p = quotient(number, params.by_width);
      const int column = number - p * window.width;
      pixels[i].is_pixel = p < params.P && strip_q + column < params.Q;
      pixels[i].dy = strip_dy + (p * window.dy_row_bytes + column * window.dy_column_bytes);
      const int place = (p - first_p) * params.stride_h * window.pitch + window.lead + column * params.stride_w;
      places[i] = pixels[i].is_pixel ? static_cast<uint32_t>(place * BYTES) : kNowhere;
    }
  }

  // The lane's first row of a stage that comes in pieces, and how many of its rows, 4 * LOADERS apart, there are.
  __device__ __forceinline__ int own_row() const { return warp * 4 + lane / 8; }
  __device__ __forceinline__ int rows_below(int end) const {
    return end <= own_row() ? 0 : (end - own_row() + 4 * LOADERS - 1) / (4 * LOADERS);
  }

  // XCopies::kRuns. Stages are those of images with boxes of dy, else those of all pixels in one row.
  __device__ __forceinline__ void find_runs(int stage) {
    const int of_stage = kStageWords * PIXELS, own = lane % 8 * (kChunkWords * PIXELS);
    const int plane = static_cast<int>(params.by_plane.divisor);
    int n, in_image;
    bool exist;
    if constexpr (BOXES) {
      n = quotient(stage, params.by_image_stages);
      const int first = (stage - n * params.window.stages_of_image) * of_stage;
      in_image = first + own;
      exist = in_image < plane;
      box[0] = first;
      box[1] = 0;
      box[3] = n;
    } else {
      const int number = stage * of_stage + own;
      exist = number < params.pixels;
      n = quotient(exist ? number : 0, params.by_plane);
      in_image = number - n * plane;
    }
    x_run = x + (n * params.x_stride[0] + (first_e + own_row()) * params.x_stride[1] + in_image) * BYTES;
    x_pieces = exist ? rows_below(params.columns - first_e) : 0;
  }

  __device__ __forceinline__ void copy_x_channels(uint32_t stage) {
    constexpr int PIXEL_BYTES = FP32 ? kPixelBytes : kPixelBytes16, LANES = 32 / PIXELS;
#pragma unroll
    for (int j = 0; j < kStageWords / LOADERS; ++j) {
      const int word = j * LOADERS + warp;
      const uint8_t* x = of_lane(pixels[0].x, word);
      uint32_t exist = __shfl_sync(~0u, pixels[0].exist, word);
      int pixel = word;
      if constexpr (!FP32) {  // the other half of the lanes has the other pixel
        const uint8_t* const second = of_lane(pixels[PIXELS - 1].x, word);
        const uint32_t second_exist = __shfl_sync(~0u, pixels[PIXELS - 1].exist, word);
        pixel = 2 * word + lane / LANES;
        if (lane >= LANES) {
          x = second;
          exist = second_exist;
        }
      }
      hopper::copy_async<16>(stage + pixel * PIXEL_BYTES + lane % LANES * 16, x + own.offset,
                             exists(exist, own) ? 16 : 0);
    }
  }

  __device__ __forceinline__ void hold_x() {
    if (params.x_copies != XCopies::kWords) return;
#pragma unroll
    for (int first = 0; first < HELD_X; first += kAtOnce) {
      Weight of[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) of[j] = weight((first + j) * LOADERS + warp);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
        for (int i = 0; i < PIXELS; ++i)
          hopper::load_2(pixels[i].x + of[j].offset, exists(pixels[i].exist, of[j]), held_x[(first + j) * PIXELS + i]);
    }
  }

  // ---- dy ----

  __device__ __forceinline__ void store_dy(uint32_t address, uint32_t word) {
    if constexpr (Shape::PARTS == 1) {
      hopper::store_shared(address, tf32_operand(word));
    } else {
      uint32_t first, rest;
      split(word, first, rest);
      hopper::store_shared(address, first);
      hopper::store_shared(address + params.layout.part_bytes, rest);
    }
  }

  __device__ __forceinline__ void store_dy(uint32_t address, const uint32_t (&words)[4]) {
    uint32_t first[4], rest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Shape::PARTS == 1)
        first[i] = tf32_operand(words[i]);
      else
        split(words[i], first[i], rest[i]);
    }
    hopper::store_shared_4(address, first);
    if constexpr (Shape::PARTS == 2) hopper::store_shared_4(address + params.layout.part_bytes, rest);
  }

  // The chunk and the channels of the lane, of a warp's item.
  __device__ __forceinline__ int chunk_of(int item) const { return item % (kChunks / LOADERS) * LOADERS + warp; }
  __device__ __forceinline__ int channel_of(int item) const { return item / (kChunks / LOADERS) * 32 + lane; }

  __device__ __forceinline__ void hold_dy() {
    if (params.dy_copies == DyCopies::kChannels) {
#pragma unroll
      for (int j = 0; j < HELD / 4; ++j) {
        const int k = channel_of(j), first = chunk_of(j) * kChunkWords;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool exist = __shfl_sync(~0u, static_cast<int>(pixels[0].is_pixel), first + i) != 0;
          hopper::load_4(of_lane(pixels[0].dy, first + i) + k * k_bytes, exist && has_k(k), held[j][i]);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < HELD; ++j) {
        const int k = j * LOADERS + warp;
        hopper::load_4(pixels[0].dy + k * k_bytes, pixels[0].is_pixel && has_k(k), held[j / 4][j % 4]);
      }
    }
  }

  __device__ __forceinline__ void copy_dy_box(const Ring& ring) {
    if (warp != 0 || lane != 0) return;
    hopper::barrier_arrive_expecting(ring.landed(), part_bytes(Shape::TILE_K, true));
    hopper::load_box(params.dy_map, ring.stage() + params.layout.dy, box[0], box[1], box[2], box[3], ring.landed());
  }

  // In place: a thread has every so manieth 16 bytes.
  __device__ __forceinline__ void round_dy_box(uint32_t stage) {
    if constexpr (FP32) {
      constexpr int STEP = LOADERS * 32 * 16, PIECES = part_bytes(Shape::TILE_K, true) / STEP;
      constexpr int AT_ONCE = PIECES < kAtOnce ? PIECES : kAtOnce;
      const uint32_t own = stage + (warp * 32 + lane) * 16;
#pragma unroll
      for (int first = 0; first < PIECES; first += AT_ONCE) {
        uint32_t words[AT_ONCE][4];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) hopper::load_shared_4(words[i], own + (first + i) * STEP);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) store_dy(own + (first + i) * STEP, words[i]);
      }
    }
  }

  __device__ __forceinline__ void copy_dy(uint32_t stage) {
    const uint32_t words = stage + lane / kChunkWords * Shape::CHUNK_BYTES + lane % kChunkWords * 4;
    if constexpr (FP32) {
      if (params.dy_copies == DyCopies::kChannels) {
#pragma unroll
        for (int j = 0; j < HELD / 4; ++j)
          store_dy(stage + chunk_of(j) * Shape::CHUNK_BYTES + channel_of(j) * 16, held[j]);
      } else {
#pragma unroll
        for (int j = 0; j < HELD; ++j) store_dy(words + (j * LOADERS + warp) * 16, held[j / 4][j % 4]);
      }
    } else if (params.dy_copies == DyCopies::kChannels) {
#pragma unroll 2  // fewer addresses at a time
      for (int j = 0; j < Shape::TILE_K / 4 / LOADERS; ++j) {
        const int k = channel_of(j), first = chunk_of(j) * kChunkWords;
        uint32_t values[8], four[4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const Pixel& of = pixels[i % PIXELS];
          const bool exist = __shfl_sync(~0u, static_cast<int>(of.is_pixel), first + i / PIXELS) != 0;
          hopper::load_2(of_lane(of.dy, first + i / PIXELS) + k * k_bytes, exist && has_k(k), values[i]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = word_of(values + i * PIXELS);
        hopper::store_shared_4(stage + chunk_of(j) * Shape::CHUNK_BYTES + channel_of(j) * 16, four);
      }
    } else if (params.whole_words) {
#pragma unroll 4
      for (int j = 0; j < Shape::TILE_K / LOADERS; ++j) {
        const int k = j * LOADERS + warp;
        hopper::copy_later<4>(words + k * 16, pixels[0].dy + k * k_bytes, pixels[0].is_pixel && has_k(k));
      }
    } else {
#pragma unroll 8
      for (int j = 0; j < Shape::TILE_K / LOADERS; ++j) {
        const int k = j * LOADERS + warp;
        uint32_t values[PIXELS];
#pragma unroll
        for (int i = 0; i < PIXELS; ++i)
          hopper::load_2(pixels[i].dy + k * k_bytes, pixels[i].is_pixel && has_k(k), values[i]);
        hopper::store_shared(words + k * 16, word_of(values));
      }
    }
  }

  __device__ __forceinline__ void find(int stage) {
    if (params.x_copies == XCopies::kWindow) return find_window(stage);
    if (params.x_copies == XCopies::kRuns) find_runs(stage);
    if constexpr (!BOXES) {
#pragma unroll
      for (int i = 0; i < PIXELS; ++i)
        pixels[i] = locate<Value>(params, x, dy, (stage * kStageWords + lane) * PIXELS + i);
    }
  }

  __device__ __forceinline__ void hold() {
    if constexpr (FP32)
      hold_dy();
    else
      hold_x();
  }

  __device__ __forceinline__ void give(const Ring& ring) const {
    hopper::fence_async();
    __syncwarp();
    if (lane == 0) hopper::barrier_arrive(ring.full());
  }

  // DyCopies::kBoxes: all by copies, of which each group has some stages under way.
  __device__ __forceinline__ void load_ahead(Ring ring, int group, int stage, int end) {
    box[2] = first_k_of_all;
    // A group orders another stage when it has given one; until then what multiplies has other groups' stages.
    const int ahead = max(1, min((GROUPS > 1 ? ring.stages : ring.stages - 1) / GROUPS, kMostAhead));
    stage += group;
    ring.advance(group);
    Ring ordered = ring;
    int next = stage;
    const auto order = [&] {
      if (next < end) {
        find(next);
        hopper::barrier_wait(ordered.empty(), ordered.parity ^ 1);
        copy_x(ordered.stage());
        copy_dy_box(ordered);
        ordered.advance(GROUPS);
      }
      next += GROUPS;
      hopper::copies_commit();
    };
    for (int i = 0; i < ahead; ++i) order();
    for (; stage < end; stage += GROUPS, ring.advance(GROUPS)) {
      if (ahead == 1)
        hopper::copies_wait<0>();
      else if (ahead == 2)
        hopper::copies_wait<1>();
      else
        hopper::copies_wait<kMostAhead - 1>();
      hopper::barrier_wait(ring.landed(), ring.parity);
      round_dy_box(ring.stage() + params.layout.dy);
      give(ring);
      order();
    }
  }

  __device__ __forceinline__ void load(Ring ring, int loader, int stage, int end) {
    expected_stage = -1;
    warp = loader % LOADERS;
    if (params.x_copies == XCopies::kChannels) own = weight(lane * (16 / BYTES) % kTileE);
    if constexpr (BOXES)
      load_ahead(ring, loader / LOADERS, stage, end);
    else
      load_next(ring, stage, end);
  }

  __device__ __forceinline__ void load_next(Ring ring, int stage, int end) {
    find(stage);
    hold();
    for (; stage < end; ++stage, ring.advance(1)) {
      hopper::barrier_wait(ring.empty(), ring.parity ^ 1);
      copy_x(ring.stage());
      copy_dy(ring.stage() + params.layout.dy);
      hopper::copies_arrive(ring.full());
      give(ring);
      if (stage + 1 < end) {
        find(stage + 1);
        hold();
      }
    }
  }
};

// ---- Multiplying ----

// The operand of a stage of x, of 16 weights of the warp.
template <typename Value>
__device__ __forceinline__ void load_operand(uint32_t (&a)[kSteps][4], uint32_t stage, bool by_pixels, int first_e,
                                             int lane) {
  if (!by_pixels) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      hopper::load_matrix(a[step], stage + (first_e + lane % 16) * kRowBytes + lane / 16 * 16 + 32 * step);
  } else if constexpr (sizeof(Value) == 4) {
    const uint32_t own = stage + lane % 4 * kPixelBytes + (first_e + lane / 4) * 4;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        hopper::load_shared(a[step][i], own + (8 * step + i / 2 * 4) * kPixelBytes + i % 2 * 32);
  } else {
    const uint32_t own = stage + (lane / 16 * 8 + lane % 8) * kPixelBytes16 + (first_e + lane / 8 % 2 * 8) * 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) hopper::load_matrix_transposed(a[step], own + 16 * step * kPixelBytes16);
  }
}

// The same of a window: `rows` are where the weights' first values are, `places` where pixels are from there on.
template <typename Value, bool WHOLE>
__device__ __forceinline__ void find_operand(uint32_t (&a)[kSteps][4], uint32_t stage, uint32_t places,
                                             const int (&rows)[2], int lane) {
  constexpr int PIXELS = 4 / static_cast<int>(sizeof(Value));
  const auto value_at = [&](uint32_t& value, uint32_t place, int row) {
    const uint32_t address = stage + row + (WHOLE ? place : place & ~kNowhere);
    if constexpr (PIXELS == 1)
      hopper::load_shared(value, address);
    else
      hopper::load_shared_half(value, address);
  };
  // All of what is independent first.
  uint32_t place[kSteps][2][PIXELS], values[2][2][2][PIXELS];
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = places + (8 * step + 4 * i + lane % 4) * 4 * PIXELS;
      if constexpr (PIXELS == 1)
        hopper::load_shared(place[step][i][0], word);
      else
        hopper::load_shared_2(place[step][i], word);
    }
  const auto load = [&](int step) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int l = 0; l < PIXELS; ++l) value_at(values[step % 2][i][j][l], place[step][i][l], rows[j]);
  };
  load(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) load(step + 1);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        a[step][2 * i + j] = 0;
#pragma unroll
        for (int l = 0; l < PIXELS; ++l)
          if (WHOLE || (place[step][i][l] & kNowhere) == 0) a[step][2 * i + j] |= values[step % 2][i][j][l] << 16 * l;
      }
  }
}

template <typename Value, typename Shape>
struct Multiplier {
  using Multiply = hopper::WgmmaRegisters<Value, Shape::TILE_K>;
  using Operand = uint32_t[kSteps][4];

  const Params& params;
  Ring ring;
  int rows[2];
  int stage, end, warp, lane;

  __device__ __forceinline__ void load(Operand& a) const {
    hopper::barrier_wait(ring.full(), ring.parity);
    if (params.x_copies == XCopies::kWindow)
      find(a, ring.stage(), ring.stage() + params.layout.places);
    else
      load_operand<Value>(a, ring.stage(), params.x_copies == XCopies::kChannels, 16 * warp, lane);
  }

  __device__ __forceinline__ void find(Operand& a, uint32_t in_stage, uint32_t places) const {
    uint32_t some_nowhere;
    hopper::load_shared(some_nowhere, places + 4 * kStageWords * 4 / static_cast<int>(sizeof(Value)));
    if (some_nowhere == 0)
      find_operand<Value, true>(a, in_stage, places, rows, lane);
    else
      find_operand<Value, false>(a, in_stage, places, rows, lane);
  }

  __device__ __forceinline__ static void round(Operand& a) {
    if constexpr (sizeof(Value) == 4) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[step][i] = tf32_operand(a[step][i]);
    }
  }

  __device__ __forceinline__ uint32_t operand_high() const {
    return params.dy_copies == DyCopies::kBoxes ? hopper::kRowsDescriptorHigh : hopper::kDescriptorHigh;
  }
  __device__ __forceinline__ uint32_t dy_operand(uint32_t dy_stage, int step) const {
    const uint32_t bytes = params.dy_copies == DyCopies::kBoxes ? 32 : 2 * Shape::CHUNK_BYTES;
    return hopper::descriptor(dy_stage + step * bytes, Shape::CHUNK_BYTES);
  }

  __device__ __forceinline__ void multiply(const Operand& a, float (&sums)[Shape::SUMS], int keep) const {
    const uint32_t dy_stage = ring.stage() + params.layout.dy;
    hopper::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      Multiply::multiply(sums, a[step], dy_operand(dy_stage, step), step > 0 ? 1 : keep, operand_high());
    hopper::wgmma_commit();
  }

  // __syncwarp orders these reads before the arrival of one lane, and hence before the next copies to the stage;
  // racecheck does not see that and names a hazard (docs/lab/wgrad.md).
  __device__ __forceinline__ void give() {
    __syncwarp();  // all lanes have read their part of x
    if (lane == 0) hopper::barrier_arrive(ring.empty());
    ring.advance(1);
  }

  __device__ __forceinline__ void run(float (&sums)[Shape::SUMS]) {
    hopper::wgmma_start(sums);
    for (int keep = 0; stage < end; ++stage, keep = 1) {
      Operand a;
      load(a);
      round(a);
      multiply(a, sums, keep);
      hopper::wgmma_wait<0>();
      hopper::wgmma_settle(sums);
      give();
    }
  }

  // Full fp32 accuracy.
  __device__ __forceinline__ void run_exactly(float (&sums)[Shape::SUMS]) {
    float acc[Shape::SUMS];
    hopper::wgmma_start(acc);
    int keep = 0;
    for (; stage < end; ++stage) {
      Operand a, rest;
      load(a);
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) split(a[step][i], a[step][i], rest[step][i]);
      const uint32_t dy_stage = ring.stage() + params.layout.dy;
      // The large products, and then, smaller by 2^10, those with a rest.
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        hopper::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if (turn == 0) {
            Multiply::multiply(acc, a[step], dy_operand(dy_stage, step), step > 0, operand_high());
          } else {
            Multiply::multiply(acc, rest[step], dy_operand(dy_stage, step), step > 0, operand_high());
            Multiply::multiply(acc, a[step], dy_operand(dy_stage + params.layout.part_bytes, step), 1,
                               operand_high());
          }
        }
        hopper::wgmma_commit();
        hopper::wgmma_wait<0>();
        hopper::wgmma_settle(acc);
#pragma unroll
        for (int i = 0; i < Shape::SUMS; ++i) {
          const bool counts = turn == 0 || fabsf(acc[i]) < bits_float(0x7f800000u);
          const float before = keep != 0 ? sums[i] : 0.0f;
          sums[i] = counts ? before + acc[i] : before;
        }
        keep = 1;
      }
      give();
    }
  }
};

// Eight lanes store 32 bytes of a filter.
template <typename Shape>
__device__ __forceinline__ void store_sums(const Params& params, float* to, int first_k, int first_e, int warp,
                                           int lane, const float (&sums)[Shape::SUMS]) {
  const int e = first_e + 16 * warp + lane / 4, k = first_k + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < Shape::TILE_K / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int own_k = k + 8 * j + i % 2, own_e = e + i / 2 * 8;
      if (own_k < params.group_k && own_e < params.columns) to[own_k * params.sums_row + own_e] = sums[4 * j + i];
    }
  }
}

// A block: a tile of dw and a split; neighbours read the same pixels.
template <typename Value, typename Shape>
__global__ void __launch_bounds__(Shape::THREADS, 1) wgrad_kernel(const __grid_constant__ Params params) {
#if defined(MODELNEW_SM90A) || !defined(__CUDA_ARCH__)
  extern __shared__ __align__(1024) uint8_t modelnew_wgrad_smem[];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = hopper::uniform(thread / 32);
  int block = static_cast<int>(blockIdx.x);
  const int tile_k = block % params.tiles_k;
  block /= params.tiles_k;
  const int tile_e = block % params.tiles_e;
  block /= params.tiles_e;
  const int group = block % params.groups, split = block / params.groups;
  const int first_k = tile_k * Shape::TILE_K, first_e = tile_e * kTileE;
  const int first_stage = split * params.stages_per_split;
  const int end_stage = min(first_stage + params.stages_per_split, params.stages);

  Ring ring{};
  ring.smem = hopper::smem_address(modelnew_wgrad_smem);
  ring.stages = params.layout.stages;
  ring.stage_bytes = params.layout.stage_bytes;
  ring.barriers = ring.smem + params.layout.barriers;
  const uint32_t table = ring.smem + params.layout.table;
  const bool has_window = params.x_copies == XCopies::kWindow;
  const Window& window = params.window;
  const int first_c = has_window ? quotient(first_e, params.by_taps) : 0;
  // Pairs of warps, or twice as many where there is room for few stages.
  const int groups = Shape::LOADERS / (ring.stages < Shape::LOADERS / 2 + 2 ? 4 : 2);
  if (thread == 0) {
    for (int i = 0; i < ring.stages; ++i) {
      // Stores of a warp and, where its threads do not wait for them, copies of each.
      const bool boxes = params.dy_copies == DyCopies::kBoxes;
      hopper::barrier_init(ring.barriers + 24 * i, boxes ? Shape::LOADERS / groups : 33 * Shape::LOADERS);
      hopper::barrier_init(ring.barriers + 24 * i + 8, kMultiplyingWarps);
      hopper::barrier_init(ring.barriers + 24 * i + 16, 1);
    }
    hopper::fence_async();
  }
  for (int i = thread; i < kTileE; i += Shape::THREADS) {
    const int e = first_e + i;
    Weight weight{0, kNever};
    if (e < params.columns) {
      int c, tap;
      if (params.taps_first) {
        tap = quotient(e, params.by_channels);
        c = e - tap * params.group_c;
      } else {
        c = quotient(e, params.by_taps);
        tap = e - c * static_cast<int>(params.by_taps.divisor);
      }
      const int r = quotient(tap, params.by_S), s = tap - r * params.S;
      int64_t offset = c * params.x_stride[1] + static_cast<int64_t>(r) * params.dilation_h * params.x_stride[2] +
                       static_cast<int64_t>(s) * params.dilation_w * params.x_stride[3];
      if (has_window)
        offset = (c - first_c) * window.plane + r * params.dilation_h * window.pitch + s * params.dilation_w;
      weight.offset = static_cast<int32_t>(offset * static_cast<int64_t>(sizeof(Value)));
      weight.needs = 1u << r | 1u << (params.R + s);
    }
    hopper::store_shared(table + 8 * i, static_cast<uint32_t>(weight.offset));
    hopper::store_shared(table + 8 * i + 4, weight.needs);
  }
  if (has_window) {
    for (int i = thread; i < window.copies; i += Shape::THREADS) {
      const int row_of_all = i / window.copies_of_row, column = (i - row_of_all * window.copies_of_row) * window.values;
      const int c = row_of_all / window.rows, row = row_of_all - c * window.rows;
      const bool exist = first_c + c < params.group_c;
      const int64_t from = (first_c + c) * params.x_stride[1] + row * params.x_stride[2] + column;
      const uint32_t copy[4] = {static_cast<uint32_t>(from * static_cast<int64_t>(sizeof(Value))),
                                exist ? static_cast<uint32_t>(row) : kNoRow, static_cast<uint32_t>(column),
                                static_cast<uint32_t>((c * window.plane + row * window.pitch + column) *
                                                      static_cast<int>(sizeof(Value)))};
      hopper::store_shared_4(ring.smem + params.layout.copies + 16 * i, copy);
    }
  }
  __syncthreads();

  if (warp < kMultiplyingWarps) {
    if constexpr (Shape::MANY_SUMS) hopper::registers_take<kMultiplyRegisters>();
    float sums[Shape::SUMS];
    Multiplier<Value, Shape> multiplier{params, ring, {}, first_stage, end_stage, warp, lane};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t offset;
      hopper::load_shared(offset, table + 8 * (16 * warp + lane / 4 + 8 * i));
      multiplier.rows[i] = static_cast<int>(offset);
    }
    if constexpr (Shape::PARTS == 2)
      multiplier.run_exactly(sums);
    else
      multiplier.run(sums);
    if (params.adds) hopper::launch_dependents();  // what adds up splits; the last kernel of a call allows nothing
    float* const to = params.sums_ptr + split * params.sums_split + int64_t{group} * params.group_k * params.sums_row;
    store_sums<Shape>(params, to, first_k, first_e, warp, lane, sums);
  } else {
    if constexpr (Shape::MANY_SUMS) hopper::registers_give_back<kLoadRegisters>();
    const int64_t k_bytes = params.dy_stride[1] * static_cast<int64_t>(sizeof(Value));
    const uint8_t* const x = static_cast<const uint8_t*>(params.x_ptr) +
                             group * params.group_c * params.x_stride[1] * static_cast<int64_t>(sizeof(Value));
    const uint8_t* const dy =
        static_cast<const uint8_t*>(params.dy_ptr) + (int64_t{group} * params.group_k + first_k) * k_bytes;
    const uint32_t copies = ring.smem + params.layout.copies;
    const int loader_id = warp - kMultiplyingWarps, k_of_all = group * params.group_k + first_k;
    const auto load = [&](auto loader) { loader.load(ring, loader_id, first_stage, end_stage); };
    if (params.dy_copies != DyCopies::kBoxes)
      load(Loader<Value, Shape, 1, false>{params, table, copies, lane, first_k, first_e, k_of_all, x, dy, k_bytes});
    else if (groups == Shape::LOADERS / 2)
      load(Loader<Value, Shape, Shape::LOADERS / 2, true>{params, table, copies, lane, first_k, first_e, k_of_all, x,
                                                          dy, k_bytes});
    else
      load(Loader<Value, Shape, Shape::LOADERS / 4, true>{params, table, copies, lane, first_k, first_e, k_of_all, x,
                                                          dy, k_bytes});
  }
#endif
}

template <typename Word>
__global__ void __launch_bounds__(kCopyThreads) copy_kernel(const __grid_constant__ CopyParams params) {
  constexpr int VALUES = 16 / static_cast<int>(sizeof(Word));
  struct alignas(16) Vector {
    Word values[VALUES];
  };
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kCopyThreads + threadIdx.x;
  if (number >= params.vectors) return;
  const int of_all = quotient(static_cast<int>(number), params.by_row_vectors);
  const int first =
      (static_cast<int>(number) - of_all * static_cast<int>(params.by_row_vectors.divisor)) * VALUES;
  const int channel = quotient(of_all, params.by_rows), row = of_all - channel * params.rows;
  const int n = quotient(channel, params.by_channels), c = channel - n * params.channels;
  const Word* const from = static_cast<const Word*>(params.from_ptr) + n * params.stride[0] + c * params.stride[1];
  Vector vector{};
#pragma unroll
  for (int i = 0; i < VALUES; ++i) {
    int pixel = params.image_is_row ? first + i : row * params.Q + first + i, image = 0;
    if (params.images_of_row > 1) {
      image = quotient(pixel, params.by_plane);
      pixel -= image * static_cast<int>(params.by_plane.divisor);
    }
    const bool exists = params.image_is_row ? image < params.images_of_row && pixel < params.P * params.Q
                                            : first + i < params.Q;
    const int p = quotient(pixel, params.by_Q), q = pixel - p * params.Q;
    const int h = p * params.stride_h - params.pad_h, w = q * params.stride_w - params.pad_w;
    if (exists && h >= 0 && h < params.H && w >= 0 && w < params.W)
      vector.values[i] = from[image * params.stride[0] + h * params.stride[2] + w * params.stride[3]];
  }
  static_cast<Vector*>(params.to_ptr)[number] = vector;
}

// WAYS threads share the splits of an element, and meet in shared memory.
template <int WAYS>
__global__ void __launch_bounds__(kAddThreads) add_kernel(const __grid_constant__ AddParams params) {
  constexpr int ELEMENTS = kAddThreads / WAYS;
  __shared__ double meet[WAYS][ELEMENTS];
  hopper::wait_for_prerequisites();
  const int own = static_cast<int>(threadIdx.x) % ELEMENTS, way = static_cast<int>(threadIdx.x) / ELEMENTS;
  const int64_t element = static_cast<int64_t>(blockIdx.x) * ELEMENTS + own;
  double sum = 0;
  if (element < params.elements) {
#pragma unroll 4
    for (int i = way; i < params.splits; i += WAYS) sum += params.sums_ptr[i * params.sums_split + element];
  }
  if constexpr (WAYS > 1) {
    meet[way][own] = sum;
    __syncthreads();
    if (way > 0) return;
    for (int i = 1; i < WAYS; ++i) sum += meet[i][own];
  }
  if (element >= params.elements) return;
  const int number = static_cast<int>(element);
  const int k = quotient(number, params.by_columns), e = number - k * static_cast<int>(params.by_columns.divisor);
  const int outer = quotient(e, params.by_inner), inner = e - outer * params.inner;
  const int c = params.taps_first ? inner : outer, tap = params.taps_first ? outer : inner;
  const int r = quotient(tap, params.by_S), s = tap - r * params.S;
  const int64_t at =
      k * params.dw_stride[0] + c * params.dw_stride[1] + r * params.dw_stride[2] + s * params.dw_stride[3];
  const float value = static_cast<float>(sum);
  if (params.dtype == DType::kFloat32)
    narrow(value, static_cast<float*>(params.dw_ptr)[at]);
  else if (params.dtype == DType::kFloat16)
    narrow(value, static_cast<Half*>(params.dw_ptr)[at]);
  else
    narrow(value, static_cast<BFloat16*>(params.dw_ptr)[at]);
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// ---- Host ----

// The problem as the kernel sees it, behind copies.
struct Prepared {
  Problem problem;
  bool copies_x, copies_dy;
  bool merges;                // all images are a row of one
  int64_t x_bytes, dy_bytes;  // of the copies
};

struct Plan {
  Prepared prepared;
  int tile_k, parts;
  bool has_window, has_boxes, image_is_row;
  Window window;
  Layout layout;
  int tiles_k, tiles_e;
  int64_t stages, stages_per_split, splits;
  double cycles;
};

constexpr int kTilesK[] = {64, 128, 256};

constexpr int kLeastStages = 3;  // in shared memory: loads are under way while one is multiplied
constexpr int kMostChained = 8192;               // pixels
constexpr int64_t kMostSumsBytes = 256 << 20;    // unless a split has fewer stages than that

inline int group_c_of(const Problem& problem) { return problem.C / problem.groups; }
inline int group_k_of(const Problem& problem) { return problem.K / problem.groups; }
inline int64_t columns_of(const Problem& problem) { return int64_t{group_c_of(problem)} * problem.R * problem.S; }
inline int64_t pixels_of(const Problem& problem) { return problem.N * problem.P * problem.Q; }
inline bool is_exact(const Problem& problem) {
  return problem.dtype == DType::kFloat32 && !uses_tf32(problem, Operator::kWgrad);
}
inline bool is_channels_last(const Problem& problem) {
  return problem.x_stride[1] == 1 && problem.x_stride[3] != 1 && group_c_of(problem) > 1;
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (op != Operator::kWgrad) return "it computes gradients to weights only";
  if (problem.dtype == DType::kFloat64) return "it has no float64";
  int sms = 0;
  if (find_gpu(sms) != 90) return "it needs a Hopper GPU (compute capability 9.0)";
  if (problem.R + problem.S > 30) return "the rows and columns of the filter together must be at most 30";
  constexpr int64_t kMost = int64_t{1} << 30;
  if (pixels_of(problem) > kMost) return "y must have at most 2^30 pixels in all images";
  if (problem.K * columns_of(problem) > kMost) return "w must have at most 2^30 elements";
  const int64_t reach = group_c_of(problem) * problem.x_stride[1] +
                        int64_t{problem.R} * problem.dilation_h * problem.x_stride[2] +
                        int64_t{problem.S} * problem.dilation_w * problem.x_stride[3];
  if (reach * element_bytes(problem.dtype) > kMost) return "the receptive field of an output must span at most 1 GB";
  return nullptr;
}

// Cycles of a stage, by what is multiplied and by what is loaded. Good enough to choose among tiles; real times are
// longer (docs/lab/wgrad.md).
inline double stage_cycles(int tile_k, int parts, bool sixteen_bits) {
  const double multiplied = 4.0 * tile_k * (parts == 2 ? 3 : 1);
  const double loaded = (sixteen_bits ? 6.0 : 4.0) * kTileE + 2.0 * tile_k;
  return std::max(multiplied, loaded) + 100;
}

// Whether all pixels of an image of y's size follow one another, and `bytes` of them from any multiple on are aligned
// and of one image.
inline bool is_row_of_pixels(const int64_t (&stride)[4], const Problem& problem, int bytes, const void* pointer) {
  const int values = bytes / element_bytes(problem.dtype);
  const auto in_steps = [&](int64_t number) { return number % values == 0; };
  return (stride[3] == 1 || problem.Q == 1) && (problem.P == 1 || stride[2] == problem.Q) &&
         in_steps(int64_t{problem.P} * problem.Q) && in_steps(stride[0]) && in_steps(stride[1]) &&
         reinterpret_cast<uint64_t>(pointer) % bytes == 0;
}

inline bool make_layout(const Plan& plan, int x_bytes, int places_bytes, int copies, Layout& layout) {
  const int unit = plan.has_boxes ? 1024 : 16;
  const auto whole = [&](int bytes) { return static_cast<int>(ceil_div(bytes, unit) * unit); };
  layout.places = x_bytes;
  layout.dy = whole(x_bytes + places_bytes);
  layout.part_bytes = part_bytes(plan.tile_k, plan.has_boxes);
  layout.stage_bytes = whole(layout.dy + plan.parts * layout.part_bytes);
  const int tables = kTableBytes + kBarrierBytes + 16 * copies;
  layout.stages = std::min((kSmemBytes - tables) / layout.stage_bytes, kMostStages);
  layout.table = layout.stages * layout.stage_bytes;
  layout.barriers = layout.table + kTableBytes;
  layout.copies = layout.barriers + kBarrierBytes;
  layout.bytes = layout.table + tables;
  return layout.stages >= kLeastStages;
}

// Whether values that are `values` apart, from the first on, are so many bytes apart that copies of `values` can be.
inline bool copies_align(const Problem& problem, int values, bool filled_up = false) {
  const int64_t (&stride)[4] = problem.x_stride;
  return (filled_up || problem.W % values == 0) && stride[0] % values == 0 && stride[1] % values == 0 &&
         stride[2] % values == 0;
}

// False where a stage of it would not fit, or lies in memory otherwise.
inline bool make_window(const Problem& problem, const Plan& plan, bool aligned, Window& window, Layout& layout) {
  const int bytes = element_bytes(problem.dtype), stage_pixels = kStageWords * 4 / bytes, wide = 16 / bytes;
  if (is_channels_last(problem) || (problem.x_stride[3] != 1 && problem.W > 1)) return false;
  const int S_reach = (problem.S - 1) * problem.dilation_w, R_reach = (problem.R - 1) * problem.dilation_h;
  const int taps = problem.R * problem.S, P = problem.P, Q = problem.Q;
  window = Window{};
  window.strips = static_cast<int>(ceil_div(Q, stage_pixels));
  // A box of dy is a piece of a row of y, which has to begin at a multiple of 16 bytes, or of an image as a row.
  window.width = window.strips == 1 ? Q
                 : plan.has_boxes   ? stage_pixels
                                    : static_cast<int>(ceil_div(ceil_div(Q, window.strips), wide) * wide);
  window.strips = static_cast<int>(ceil_div(Q, window.width));
  window.stages_of_strip = static_cast<int>(ceil_div(int64_t{P} * window.width, stage_pixels));
  window.stages_of_image = window.stages_of_strip * window.strips;
  window.values = aligned && copies_align(problem, wide, plan.prepared.copies_x) ? wide : 4 / bytes;
  if (!copies_align(problem, window.values, plan.prepared.copies_x)) return false;
  window.lead = static_cast<int>((window.values - problem.pad_w % window.values) % window.values);
  window.channels = std::min(group_c_of(problem), (kTileE + taps - 2) / taps + 1);
  int p_rows = 1;
  if (stage_pixels % window.width == 0)
    p_rows = stage_pixels / window.width;
  else if (window.width % stage_pixels != 0)
    p_rows = (stage_pixels + window.width - 2) / window.width + 1;
  const int64_t rows = int64_t{std::min(P, p_rows) - 1} * problem.stride_h + R_reach + 1;
  const int64_t columns = window.lead + int64_t{std::min(Q, window.width) - 1} * problem.stride_w + S_reach + 1;
  window.copies_of_row = static_cast<int>(ceil_div(columns, window.values));
  const int64_t copies = window.copies_of_row * rows * window.channels;
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t (&y)[4] = problem.y_stride;
  if (problem.x_stride[2] * bytes > kMost || ((P + stage_pixels) * y[2] + (Q + stage_pixels) * y[3]) * bytes > kMost)
    return false;
  window.row_bytes = static_cast<int>(problem.x_stride[2]) * bytes;
  window.dy_row_bytes = static_cast<int>(y[2]) * bytes;
  window.dy_column_bytes = static_cast<int>(y[3]) * bytes;
  if (rows > 1024 || columns > 4096 || copies > 8192) return false;
  window.rows = static_cast<int>(rows);
  window.columns = window.copies_of_row * window.values;
  window.copies = static_cast<int>(copies);
  // Rows 8 and 24 banks apart, and channels 24: what neighbouring weights see lies in other banks.
  const int of_word = 4 / bytes;
  window.pitch = static_cast<int>(ceil_div(window.columns - 8 * of_word, 16 * of_word)) * 16 * of_word + 8 * of_word;
  window.plane = window.rows * window.pitch;
  while (window.plane / of_word % 32 != 24) window.plane += 8 * of_word;
  const int x_bytes = window.channels * window.plane * bytes;
  return make_layout(plan, x_bytes, 4 * stage_pixels + 16, window.copies, layout);
}

inline bool sees_runs(const Problem& problem, const void* x) {
  return problem.R == 1 && problem.S == 1 && problem.stride_h == 1 && problem.stride_w == 1 && problem.pad_h == 0 &&
         problem.pad_w == 0 && is_row_of_pixels(problem.x_stride, problem, 16, x);
}

// Whether boxes of dy may be pieces of its rows, or of whole images. These end at multiples of 16 bytes, so that behind
// them a box has zeros, unless zeros fill them up in memory.
inline bool has_boxes_of_dy(const Problem& problem, bool of_images, bool filled_up, const void* dy) {
  const int values = 16 / element_bytes(problem.dtype);
  const int64_t (&stride)[4] = problem.y_stride;
  const auto in_steps = [&](int64_t number, int64_t size) { return size == 1 || (number > 0 && number % values == 0); };
  const bool rows = of_images ? problem.P == 1 || stride[2] == problem.Q : in_steps(stride[2], problem.P);
  const int64_t row = of_images ? int64_t{problem.P} * problem.Q : problem.Q;
  return (filled_up || row % values == 0) && (stride[3] == 1 || problem.Q == 1) && rows &&
         in_steps(stride[0], problem.N) && in_steps(stride[1], problem.K) &&
         reinterpret_cast<uint64_t>(dy) % 16 == 0;
}

inline Prepared prepare(const Problem& problem, const void* x, const void* dy) {
  Prepared prepared{problem, false, false, false, 0, 0};
  Problem& of = prepared.problem;
  const int bytes = element_bytes(problem.dtype), values = 16 / bytes;
  const bool points = problem.R == 1 && problem.S == 1;
  const bool image_is_row = points || problem.Q <= kStageWords * 4 / bytes;
  const bool channels_last = is_channels_last(problem) || (problem.y_stride[1] == 1 && problem.y_stride[3] != 1);
  const auto aligns = [&](int size) {
    return (problem.x_stride[3] == 1 || problem.W == 1) && copies_align(problem, size / bytes) &&
           reinterpret_cast<uint64_t>(x) % size == 0;
  };
  if (channels_last) return prepared;
  const auto whole = [&](int64_t number) { return ceil_div(number, values) * values; };
  const int64_t pixels = int64_t{problem.P} * problem.Q;
  const int64_t row = image_is_row ? whole(pixels) : whole(problem.Q), plane = image_is_row ? row : row * problem.P;
  // Images that do not begin there follow one another without gaps, channel by channel.
  const bool merges = points && !has_boxes_of_dy(problem, true, false, dy) && problem.N * pixels < (int64_t{1} << 30);
  const int64_t x_row = whole(problem.W), x_plane = points ? row : x_row * problem.H;
  const int64_t x_bytes = problem.N * problem.C * x_plane * bytes, dy_bytes = problem.N * problem.K * plane * bytes;
  const bool copies_x = (points ? !sees_runs(problem, x) : !aligns(16)) && x_bytes <= kMostCopiedBytes;
  if (!points && !copies_x && !aligns(4)) return prepared;  // there is no window
  if (!has_boxes_of_dy(problem, image_is_row, false, dy)) {
    if (dy_bytes > kMostCopiedBytes) return prepared;
    prepared.copies_dy = true;
    prepared.dy_bytes = ceil_div(dy_bytes, 256) * 256;
    of.y_stride[3] = 1;
    of.y_stride[2] = image_is_row ? problem.Q : row;
    of.y_stride[1] = plane;
    of.y_stride[0] = plane * problem.K;
  }
  prepared.merges = merges && copies_x && prepared.copies_dy;
  if (prepared.merges) {
    const int64_t all = whole(problem.N * pixels);
    prepared.copies_x = true;
    prepared.x_bytes = ceil_div(problem.C * all * bytes, 256) * 256;
    prepared.dy_bytes = ceil_div(problem.K * all * bytes, 256) * 256;
    of.N = of.P = of.H = 1;
    of.Q = of.W = static_cast<int>(problem.N * pixels);
    of.stride_h = of.stride_w = 1;
    of.pad_h = of.pad_w = 0;
    of.x_stride[3] = of.y_stride[3] = 1;
    of.x_stride[0] = of.x_stride[1] = of.x_stride[2] = all;
    of.y_stride[0] = of.y_stride[1] = of.y_stride[2] = all;
  } else if (copies_x) {
    prepared.copies_x = true;
    prepared.x_bytes = ceil_div(x_bytes, 256) * 256;
    if (points) {
      of.H = problem.P;
      of.W = problem.Q;
      of.stride_h = of.stride_w = 1;
      of.pad_h = of.pad_w = 0;
    }
    of.x_stride[3] = 1;
    of.x_stride[2] = points ? problem.Q : x_row;
    of.x_stride[1] = x_plane;
    of.x_stride[0] = x_plane * problem.C;
  }
  return prepared;
}

// x, dy: their addresses, or null for aligned ones.
inline Plan make_plan(const Problem& original, const void* x, const void* dy, int sms, int only_tile_k = 0,
                      int64_t only_splits = 0) {
  const Prepared prepared = prepare(original, x, dy);
  const Problem& problem = prepared.problem;
  if (prepared.copies_x) x = nullptr;
  if (prepared.copies_dy) dy = nullptr;
  constexpr double kOfBlock = 6000, kBytesPerCycle = 2000;
  const bool sixteen_bits = problem.dtype != DType::kFloat32;
  const int parts = is_exact(problem) ? 2 : 1;
  const int pixels_of_stage = kStageWords * (sixteen_bits ? 2 : 1);
  const double sums_bytes = 4.0 * problem.K * columns_of(problem);
  const bool aligned = reinterpret_cast<uint64_t>(x) % 16 == 0;
  Plan best{};
  best.cycles = -1;
  for (int tile_k : kTilesK) {
    if ((parts == 2 && tile_k > 128) || (only_tile_k > 0 && tile_k != only_tile_k)) continue;
    Plan plan{};
    plan.tile_k = tile_k;
    plan.parts = parts;
    plan.tiles_k = static_cast<int>(ceil_div(group_k_of(problem), tile_k));
    plan.tiles_e = static_cast<int>(ceil_div(columns_of(problem), kTileE));
    // Behind a row of a copy there is what fills it up.
    const bool points = problem.R == 1 && problem.S == 1, runs = points && (prepared.copies_x || sees_runs(problem, x));
    plan.prepared = prepared;
    plan.image_is_row = runs || problem.Q <= pixels_of_stage;
    plan.has_window = plan.has_boxes = false;
    if (runs) {
      plan.has_boxes = has_boxes_of_dy(problem, true, prepared.copies_dy, dy);
    } else if (reinterpret_cast<uint64_t>(x) % 4 == 0) {
      plan.has_boxes = has_boxes_of_dy(problem, plan.image_is_row, prepared.copies_dy, dy);
      plan.has_window = make_window(problem, plan, aligned, plan.window, plan.layout);
      plan.has_boxes = plan.has_boxes && plan.has_window;
    }
    if (!plan.has_window) {
      make_layout(plan, kXBytes, 0, 0, plan.layout);
      plan.window = Window{};
      plan.window.stages_of_image = static_cast<int>(ceil_div(int64_t{problem.P} * problem.Q, pixels_of_stage));
    }
    const int64_t stages = plan.stages = plan.has_window || plan.has_boxes
                                             ? problem.N * plan.window.stages_of_image
                                             : ceil_div(pixels_of(problem), pixels_of_stage);
    const int64_t tiles = int64_t{plan.tiles_k} * plan.tiles_e * problem.groups;
    const int64_t most = std::max<int64_t>(1, static_cast<int64_t>(kMostSumsBytes / sums_bytes));
    const int64_t least = std::min(most, std::max<int64_t>(1, ceil_div(stages * pixels_of_stage, kMostChained)));
    const auto consider = [&](int64_t splits) {
      splits = std::min(std::max(splits, least), std::min(stages, most));
      if (only_splits > 0) splits = std::min(only_splits, stages);
      plan.stages_per_split = ceil_div(stages, splits);
      plan.splits = ceil_div(stages, plan.stages_per_split);
      const double turns = static_cast<double>(ceil_div(tiles * plan.splits, sms));
      const double adding = plan.splits > 1 ? 3000 + 2 * plan.splits * sums_bytes / kBytesPerCycle : 0;
      plan.cycles =
          turns * (plan.stages_per_split * stage_cycles(tile_k, parts, sixteen_bits) + kOfBlock) + adding;
      if (best.cycles < 0 || plan.cycles < best.cycles) best = plan;
    };
    // As many splits as fill the GPU once, twice, ..
    for (int64_t turns = ceil_div(tiles * least, sms), last = turns + 8; turns <= last; ++turns)
      consider(turns * sms / tiles);
    consider(1);
  }
  return best;
}

inline const Plan& plan_of(const Problem& problem, const void* x, const void* dy) {
  thread_local Memo<Plan> memo;
  int sms = 0;
  const int gpu = find_gpu(sms);
  const uint64_t of_x = reinterpret_cast<uint64_t>(x), of_dy = reinterpret_cast<uint64_t>(dy);
  return memo.get(key_of(problem, Operator::kWgrad, of_x, 0, of_dy, gpu, sms),
                  [&] { return make_plan(problem, x, dy, sms); });
}

// The estimate that tma_wgrad compares with its own (16 bits in NCHW), in cycles of an SM. Fitted to measured times
// (docs/lab/wgrad.md): memory, stages, which take longer in tiles of 256 channels, and copies.
inline double cycles(const Problem& problem, Operator) {
  constexpr double kCall = 18540, kCopyCall = 21700, kBytes = 12, kCopiedBytes = 14, kTile = 1.04, kLargestTile = 1.58;
  const Plan& plan = plan_of(problem, nullptr, nullptr);
  int sms = 0;
  find_gpu(sms);
  const double x_bytes = 2.0 * static_cast<double>(problem.N) * problem.C * problem.H * problem.W;
  const double dy_bytes = 2.0 * static_cast<double>(problem.N) * problem.K * problem.P * problem.Q;
  const double copied = (plan.prepared.copies_x ? x_bytes : 0) + (plan.prepared.copies_dy ? dy_bytes : 0);
  const double multiplied = plan.cycles * (plan.tile_k == 256 ? kLargestTile : kTile);
  const double memory = (x_bytes + dy_bytes) / sms / kBytes;
  return kCall + std::cbrt(multiplied * multiplied * multiplied + memory * memory * memory) +
         (copied > 0 ? kCopyCall + 2 * copied / sms / kCopiedBytes : 0);
}

// Whether what a block stores can be dw itself: one split, and weights of a filter side by side in the order of rows.
inline bool stores_dw(const Problem& problem, const Plan& plan) {
  const int64_t C = group_c_of(problem), R = problem.R, S = problem.S;
  const auto lies = [](int64_t stride, int64_t size, int64_t wanted) { return size == 1 || stride == wanted; };
  const int64_t (&w)[4] = problem.w_stride;
  if (plan.splits > 1 || problem.dtype != DType::kFloat32) return false;
  if (is_channels_last(problem)) return lies(w[1], C, 1) && lies(w[3], S, C) && lies(w[2], R, S * C);
  return lies(w[1], C, R * S) && lies(w[3], S, 1) && lies(w[2], R, S);
}

// Fewest multiply-adds: below, launches take most of the time, and direct has fewer (docs/lab/wgrad.md).
constexpr double kLeastWork = 1 << 23;

inline const char* yields(const Problem& problem, Operator) {
  if (multiply_adds(problem) < kLeastWork) return "another engine may be faster with few multiply-adds";
  return group_k_of(problem) < 4 ? "another engine may be faster with few output channels in a group" : nullptr;
}

inline int64_t sums_of_split(const Problem& problem) { return problem.K * columns_of(problem); }

inline int64_t copied_bytes(const Plan& plan) { return plan.prepared.x_bytes + plan.prepared.dy_bytes; }

inline int64_t workspace_bytes_of(const Problem& problem, const Plan& plan) {
  return copied_bytes(plan) +
         (stores_dw(problem, plan) ? 0 : plan.splits * sums_of_split(problem) * static_cast<int64_t>(sizeof(float)));
}

inline int64_t workspace_bytes(const Problem& problem, Operator, const Pointers& pointers) {
  return workspace_bytes_of(problem, plan_of(problem, pointers.x, pointers.dy));
}

inline XCopies x_copies_of(const Problem& problem, const Plan& plan, const void* x) {
  if (plan.has_window) return XCopies::kWindow;
  if (sees_runs(problem, x) || (plan.prepared.copies_x && problem.R == 1 && problem.S == 1)) return XCopies::kRuns;
  const int values = 16 / element_bytes(problem.dtype);
  const int64_t (&stride)[4] = problem.x_stride;
  const auto in_steps = [&](int64_t number) { return number % values == 0; };
  const bool channels = is_channels_last(problem) && in_steps(group_c_of(problem)) && in_steps(stride[0]) &&
                        in_steps(stride[2]) && in_steps(stride[3]) && reinterpret_cast<uint64_t>(x) % 16 == 0;
  return channels ? XCopies::kChannels : XCopies::kWords;
}

inline DyCopies dy_copies_of(const Problem& problem, const Plan& plan) {
  if (plan.has_boxes) return DyCopies::kBoxes;
  const bool channels = problem.y_stride[1] == 1 && problem.y_stride[3] != 1 && group_k_of(problem) > 1;
  return channels ? DyCopies::kChannels : DyCopies::kWords;
}

// Whether the two pixels of a word of 16 bits are a word of memory.
inline bool has_words_of_dy(const Problem& problem, const Plan& plan, const void* dy) {
  const int values = 4 / element_bytes(problem.dtype);
  const int64_t (&stride)[4] = problem.y_stride;
  const auto in_steps = [&](int64_t number) { return number % values == 0; };
  if (plan.has_window && plan.window.strips > 1)
    return stride[3] == 1 && in_steps(plan.window.width) && in_steps(problem.Q) && in_steps(stride[0]) &&
           in_steps(stride[1]) && in_steps(stride[2]) && reinterpret_cast<uint64_t>(dy) % 4 == 0;
  return is_row_of_pixels(stride, problem, 4, dy);
}

inline Params make_params(const Problem& problem, const Pointers& pointers, const Plan& plan) {
  Params params{};
  const bool direct = stores_dw(problem, plan);
  params.x_ptr = pointers.x;
  params.dy_ptr = pointers.dy;
  params.sums_ptr = static_cast<float*>(direct ? pointers.out : pointers.workspace);
  params.adds = !direct;
  params.sums_row = direct ? problem.w_stride[0] : columns_of(problem);
  params.sums_split = sums_of_split(problem);
  std::copy_n(problem.x_stride, 4, params.x_stride);
  std::copy_n(problem.y_stride, 4, params.dy_stride);
  params.H = problem.H;
  params.W = problem.W;
  params.P = problem.P;
  params.Q = problem.Q;
  params.R = problem.R;
  params.S = problem.S;
  params.stride_h = problem.stride_h;
  params.stride_w = problem.stride_w;
  params.pad_h = problem.pad_h;
  params.pad_w = problem.pad_w;
  params.dilation_h = problem.dilation_h;
  params.dilation_w = problem.dilation_w;
  params.group_c = group_c_of(problem);
  params.group_k = group_k_of(problem);
  params.columns = static_cast<int>(columns_of(problem));
  params.tiles_k = plan.tiles_k;
  params.tiles_e = plan.tiles_e;
  params.groups = problem.groups;
  params.pixels = static_cast<int>(pixels_of(problem));
  params.stages = static_cast<int>(plan.stages);
  params.stages_per_split = static_cast<int>(plan.stages_per_split);
  params.taps_first = is_channels_last(problem);
  params.x_copies = x_copies_of(problem, plan, pointers.x);
  params.dy_copies = dy_copies_of(problem, plan);
  params.whole_words = has_words_of_dy(problem, plan, pointers.dy);
  params.window = plan.window;
  params.layout = plan.layout;
  params.image_is_row = plan.image_is_row;
  params.by_image_stages = make_divisor(plan.window.stages_of_image);
  if (plan.has_window) {
    params.by_strip_stages = make_divisor(plan.window.stages_of_strip);
    params.by_width = make_divisor(plan.window.width);
  }
  params.by_plane = make_divisor(int64_t{problem.P} * problem.Q);
  params.by_row = make_divisor(problem.Q);
  params.by_taps = make_divisor(int64_t{problem.R} * problem.S);
  params.by_channels = make_divisor(params.group_c);
  params.by_S = make_divisor(problem.S);
  return params;
}

inline AddParams make_add_params(const Problem& problem, const Pointers& pointers, const Plan& plan) {
  AddParams params{};
  params.sums_ptr = static_cast<const float*>(pointers.workspace);
  params.dw_ptr = pointers.out;
  params.elements = params.sums_split = sums_of_split(problem);
  std::copy_n(problem.w_stride, 4, params.dw_stride);
  params.splits = static_cast<int>(plan.splits);
  params.S = problem.S;
  params.taps_first = is_channels_last(problem);
  params.inner = params.taps_first ? group_c_of(problem) : problem.R * problem.S;
  params.dtype = problem.dtype;
  params.by_columns = make_divisor(columns_of(problem));
  params.by_inner = make_divisor(params.inner);
  params.by_S = make_divisor(problem.S);
  return params;
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

template <typename Value, typename Shape>
cudaError_t run(const Params& params, int64_t blocks, cudaStream_t stream) {
  constexpr Instance kInstance{"wgrad_kernel", {kTypeId<Value>, Shape::TILE_K, Shape::PARTS}};
  record(kInstance);
  if constexpr (!is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    const int smem_bytes = params.layout.bytes;
    const auto kernel = wgrad_kernel<Value, Shape>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
    if (error != cudaSuccess) return error;
    wgrad_kernel<Value, Shape><<<static_cast<unsigned>(blocks), Shape::THREADS, smem_bytes, stream>>>(params);
    return cudaGetLastError();
  }
}

template <typename Value>
cudaError_t run_tile(const Plan& plan, const Params& params, int64_t blocks, cudaStream_t stream) {
  if constexpr (sizeof(Value) == 4) {
    if (plan.parts == 2)
      return plan.tile_k == 64 ? run<Value, Shape<64, 2>>(params, blocks, stream)
                               : run<Value, Shape<128, 2>>(params, blocks, stream);
  }
  return plan.tile_k == 64    ? run<Value, Shape<64, 1>>(params, blocks, stream)
         : plan.tile_k == 128 ? run<Value, Shape<128, 1>>(params, blocks, stream)
                              : run<Value, Shape<256, 1>>(params, blocks, stream);
}

inline cudaError_t make_dy_map(const Problem& problem, const Plan& plan, const void* dy, hopper::BoxMap& map) {
  const int bytes = element_bytes(problem.dtype);
  const uint64_t P = problem.P, Q = problem.Q;
  const uint64_t sizes[4] = {plan.image_is_row ? P * Q : Q, plan.image_is_row ? 1 : P,
                             static_cast<uint64_t>(problem.K), static_cast<uint64_t>(problem.N)};
  // The step of a dimension of one element is never taken, but a map needs a valid one.
  const auto step = [&](int dimension, int64_t stride, uint64_t natural) {
    return sizes[dimension] == 1 ? natural : static_cast<uint64_t>(stride) * bytes;
  };
  uint64_t strides[3];
  strides[0] = step(1, problem.y_stride[2], ceil_div(sizes[0] * bytes, 16) * 16);
  strides[1] = step(2, problem.y_stride[1], strides[0] * sizes[1]);
  strides[2] = step(3, problem.y_stride[0], strides[1] * sizes[2]);
  const uint32_t box[4] = {static_cast<uint32_t>(hopper::kBoxRowBytes / bytes), 1, static_cast<uint32_t>(plan.tile_k),
                           1};
  return hopper::make_box_map(hopper::BoxUse::kLoadRows, dy, bytes, sizes, strides, box, map);
}

// Copies x or dy. dy is copied as x of a 1x1 filter is.
inline cudaError_t copy(const Problem& problem, const Plan& plan, bool of_x, const void* from, void* to,
                        cudaStream_t stream) {
  const bool merges = plan.prepared.merges;
  CopyParams params{};
  const int values = 16 / element_bytes(problem.dtype);
  params.from_ptr = from;
  params.to_ptr = to;
  std::copy_n(of_x ? problem.x_stride : problem.y_stride, 4, params.stride);
  const bool points = of_x && problem.R == 1 && problem.S == 1, rows_of_x = of_x && !points;
  params.H = of_x ? problem.H : problem.P;
  params.W = of_x ? problem.W : problem.Q;
  params.P = rows_of_x ? problem.H : problem.P;
  params.Q = rows_of_x ? problem.W : problem.Q;
  params.stride_h = points ? problem.stride_h : 1;
  params.stride_w = points ? problem.stride_w : 1;
  params.pad_h = points ? problem.pad_h : 0;
  params.pad_w = points ? problem.pad_w : 0;
  params.channels = of_x ? problem.C : problem.K;
  // As prepare() laid it out, whether or not x is a row as well.
  params.image_is_row = points || (!of_x && (plan.image_is_row || (problem.R == 1 && problem.S == 1)));
  const int64_t pixels = int64_t{params.P} * params.Q;
  params.images_of_row = merges ? static_cast<int>(problem.N) : 1;
  const int64_t row_vectors =
      ceil_div(params.image_is_row ? params.images_of_row * pixels : params.Q, values);
  params.rows = params.image_is_row ? 1 : params.P;
  params.vectors = (merges ? 1 : problem.N) * params.channels * params.rows * row_vectors;
  params.by_row_vectors = make_divisor(row_vectors);
  params.by_rows = make_divisor(params.rows);
  params.by_channels = make_divisor(params.channels);
  params.by_Q = make_divisor(params.Q);
  params.by_plane = make_divisor(pixels);
  const unsigned blocks = static_cast<unsigned>(ceil_div(params.vectors, kCopyThreads));
  if (values == 4)
    copy_kernel<uint32_t><<<blocks, kCopyThreads, 0, stream>>>(params);
  else
    copy_kernel<uint16_t><<<blocks, kCopyThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

inline cudaError_t launch_plan(const Problem& original, const Pointers& original_pointers, const Plan& plan,
                               cudaStream_t stream) {
  const Prepared& prepared = plan.prepared;
  const Problem& problem = prepared.problem;
  Pointers pointers = original_pointers;
  const auto behind = [&](int64_t bytes) { return static_cast<uint8_t*>(original_pointers.workspace) + bytes; };
  if (prepared.copies_x) {
    pointers.x = behind(0);
    const cudaError_t error = copy(original, plan, true, original_pointers.x, behind(0), stream);
    if (error != cudaSuccess) return error;
  }
  if (prepared.copies_dy) {
    pointers.dy = behind(prepared.x_bytes);
    const cudaError_t error = copy(original, plan, false, original_pointers.dy, behind(prepared.x_bytes), stream);
    if (error != cudaSuccess) return error;
  }
  pointers.workspace = behind(copied_bytes(plan));
  Params params = make_params(problem, pointers, plan);
  if (plan.has_boxes) {
    const cudaError_t error = make_dy_map(problem, plan, pointers.dy, params.dy_map);
    if (error != cudaSuccess) return error;
  }
  const int64_t blocks = int64_t{plan.tiles_k} * plan.tiles_e * problem.groups * plan.splits;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  cudaError_t error;
  if (problem.dtype == DType::kFloat32)
    error = run_tile<float>(plan, params, blocks, stream);
  else if (problem.dtype == DType::kFloat16)
    error = run_tile<Half>(plan, params, blocks, stream);
  else
    error = run_tile<BFloat16>(plan, params, blocks, stream);
  if (error != cudaSuccess || stores_dw(problem, plan)) return error;
  const AddParams add = make_add_params(problem, pointers, plan);
  if (plan.splits > 4)
    return hopper::launch_early(add_kernel<8>, static_cast<unsigned>(ceil_div(add.elements, kAddThreads / 8)),
                                kAddThreads, 0, stream, add);
  return hopper::launch_early(add_kernel<1>, static_cast<unsigned>(ceil_div(add.elements, kAddThreads)), kAddThreads,
                              0, stream, add);
}

inline cudaError_t launch(Operator, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  return launch_plan(problem, pointers, plan_of(problem, pointers.x, pointers.dy), stream);
}

#endif  // launchers

inline void describe(const Problem& problem, Operator, char* text, size_t text_size) {
  const Plan& plan = plan_of(problem, nullptr, nullptr);
  snprintf(text, text_size, "%d x %d tiles of %d output channels x %d weights, %d splits of the pixels%s%s",
           plan.tiles_k, plan.tiles_e, plan.tile_k, kTileE, static_cast<int>(plan.splits),
           plan.parts == 2 ? ", in two parts" : "",
           plan.prepared.copies_x && plan.prepared.copies_dy ? ", x and dy copied"
           : plan.prepared.copies_x                 ? ", x copied"
           : plan.prepared.copies_dy                ? ", dy copied"
                                           : "");
}

#endif  // host

}  // namespace wgrad

#if (defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)) && !defined(__CUDACC_RTC__)
extern const Engine kWgradEngine{"wgrad",       wgrad::refusal,  wgrad::workspace_bytes,
                                 wgrad::launch, wgrad::describe, wgrad::yields, wgrad::cycles};
#endif

}  // namespace modelnew
