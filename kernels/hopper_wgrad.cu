// hopper_wgrad engine: the weight gradient on Hopper's tensor cores (wgmma), of 16-bit tensors, and of fp32 under the
// TF32 contract or in full accuracy. Deterministic: sums are added in a fixed order.
//
//   dw[k, r, s, c] = sum over pixels (n, p, q) of dy[n, p, q, k] * x[n, p*stride_h - pad_h + r*dilation_h, .., c]
//
//   planes_copy.cu             x or dy in another memory format -> one that TMA boxes can read, where needed
//   hopper_wgrad_kernel        sums over a part of the pixels -> workspace, in fp32
//   weight_sums_kernel         sums of all parts -> dw (weight_sums.cuh)
//
// GEMM: rows = output channels, columns = input channels, for each tap of its own; reduction = pixels. The sums of all
// taps of a tile stay in registers, so that each pixel of dy, and of x, comes from memory once for them.
//
// The Tensor Memory Accelerator (TMA) loads boxes of channels_last tensors, [pixel][channel] in its swizzle, and of
// NCHW planes, [channel][pixel]. From there:
//
//   x    wgmma reads pixels of 16 bits as they are. Planes are transposed, and fp32 is split into parts of 16 bits:
//        [chunk of 8 channels][pixel] x 16 bytes.
//        A tap is a shift of the start address, by whole pixels. At a stride, phases of x lie one behind another.
//        Tiles of one tap need no shift: under the TF32 contract x is rounded, [channel][32 pixels] in a swizzle
//   dy   warps bring it to registers, and split or round it there
//
//        columns + halo = pitch
//      +-------------+           Rows of outputs lie at the pitch of x. Where dy has no pixel there are zeros, and each
//      | o  o  o  o  | .  .      tap of all pixels of a stage is at one distance. Inf or NaN in the halo makes NaN of
//      | o  o  o  o  | .  .      such a zero: a thread that finds one among its sums takes its products anew.
//      +-------------+ .  .      Steps of wgmma are 16 slots each, through the ends of rows.
//        .  .  .  .    .  .
//
// Planes may begin between multiples of 16 bytes. Those of 65 x 65 begin a pixel further behind one each, up to every
// fourth one of fp32 and every eighth one of 16 bits, and so do pixels in the rows of a box. Who reads a row knows its
// shift. Lines that are rounded are shifted back in place, and have 28 pixels then, in 32 slots.
//
// Blocks of 12 warps, or of 16 where x is split:
//
//   warps 0-7   multiply. Tiles of 128 output channels: each of two warpgroups has 64 of them. Tiles of 64: the
//               warpgroups take steps by turns, and each one leaves sums of its own
//   warp 8      one thread issues the boxes
//   warps 9-    split x of fp32, round it, or transpose planes
//
// A sum is split after a number of pixels (most_chained), because the tensor core truncates when it adds.
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstdio>

#include "device.cuh"
#include "engines.cuh"
#include "memo.cuh"
#endif

#include "channels_last.cuh"
#include "divisor.cuh"
#include "numerics.cuh"
#include "problem.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "tensor_map.cuh"
#include "weight_sums.cuh"
#include "wgmma.cuh"

namespace modelnew {
namespace hopper_wgrad {

// ---- Geometry, host and device ----

constexpr int kStepPixels = 16, kLine = 32;  // of a step; where x is rounded, which lies in rows of so many slots
constexpr int kShiftedLine = 28;             // pixels of a line whose rows may begin with three others
[[maybe_unused]] constexpr int kMultiplyingThreads = 256;
constexpr int kSharedBytes = 232448;
constexpr int kMostStages = 6, kMostPartStages = 3;  // the latter: of x in parts
constexpr int kRegionBytes = 1024;                   // of a stage, at least: from there on the swizzle repeats itself
constexpr int kMostBox = 256;                        // elements of a box along a dimension
constexpr int kMostStep = 8;                         // of a box
[[maybe_unused]] constexpr float kScale = 0x1p24f;   // of either operand in fp32
constexpr int kMostTaps = 256;
constexpr int kLeastRounded = 64;                // channels of pixels that are rounded: fewer leave lanes idle
constexpr int kMostFoldedFrom = 7;               // channels of x of which several taps become channels
constexpr int64_t kMostSumBytes = int64_t{1} << 30;
constexpr int kMostSide = 1 << 10;  // of a window and images of a stage: pack_pixel

// Chunks of eight input channels and taps of a tile, which a kernel is compiled for: as many as have room for sums, in
// full fp32 accuracy for two of each.
struct TileShape {
  int chunks, taps;
};
constexpr TileShape kTileShapes[] = {{4, 9}, {12, 3}, {32, 1}, {1, 25}, {16, 1}, {8, 1}, {2, 9}, {6, 3}, {1, 9}};
constexpr int kMostTapsOfTile = 25;
constexpr int kTileShapeCount = sizeof kTileShapes / sizeof kTileShapes[0];
constexpr int kMostExact = 18;                       // chunks times taps that have room for two sums
[[maybe_unused]] constexpr int kMostExactSteps = 6;  // of wgmma, whose sums are added to others by ordinary additions

MODELNEW_HOST_DEVICE constexpr bool is_compiled(const TileShape& shape, int parts, bool splits, bool contains,
                                                bool rounds) {
  if (rounds) return !contains && shape.taps == 1;
  if (contains && (parts != 2 || shape.taps == 1)) return false;
  if (parts == 3) return shape.chunks * shape.taps <= kMostExact;
  const bool exact_only = shape.chunks == 6 || (shape.chunks == 1 && shape.taps == 9);
  return !exact_only && (!splits || shape.chunks < 32);  // which is too wide for blocks of 16 warps
}

// How tensors are multiplied: 16 bits as they are; fp32 as the sum of bf16 values, the first and rests: two, with 16
// bits together, for TF32's contract, three for full accuracy. Products of rests that are too small are left out. Where
// taps are several, stages whose values fit into scaled fp16 (numerics.cuh) may be multiplied once instead. Tiles of
// one tap may be multiplied in TF32.
template <typename Stored_, typename Operand_, int PARTS_, bool SPLITS_, bool CONTAINS_ = false>
struct Format {
  using Stored = Stored_;    // in memory
  using Operand = Operand_;  // of wgmma
  static constexpr int BYTES = sizeof(Stored), PARTS = PARTS_;
  static constexpr bool SPLITS = SPLITS_;               // x, into parts: fp32, and planes of 16 bits
  static constexpr bool CONTAINS = CONTAINS_;           // stages that fit into scaled fp16
  static constexpr bool ROUNDS = sizeof(Operand) == 4;  // x, to TF32, in place
  static constexpr int OPERANDS = ROUNDS ? 4 : PARTS;   // of dy in a step
  static constexpr int STEP = ROUNDS ? kLine : kStepPixels;
  // Registers of a thread that multiplies and of any other.
  static constexpr int THREADS = SPLITS ? 512 : 384, SPLITTING = THREADS - kMultiplyingThreads - 32;
  static constexpr int MULTIPLYING_REGISTERS = SPLITS ? 200 : ROUNDS ? 208 : 224, OTHER_REGISTERS = ROUNDS ? 88 : 56;
  static_assert(256 * MULTIPLYING_REGISTERS + (THREADS - 256) * OTHER_REGISTERS <= 65536 / THREADS / 8 * 8 * THREADS,
                "those that a block is launched with: more would be waited for without end");
};

struct Plan {
  bool copies_x, copies_dy;
  int64_t slice_images;  // copied and multiplied at a time, for a part of all sums each
  int slices;
  int fold_h, fold_w;                     // taps of a column and of a row that become channels; 0: the axis is as it is
  int bytes, parts_of_x;                  // of a value in memory; how many values of 16 bits it is multiplied as
  bool has_gaps;                          // slots behind boxes
  bool splits;                            // as Format has it
  bool x_planes, dy_planes, dy_straight;  // NCHW, of 16 bits both; dy in the order of slots
  bool shifted;                           // planes may be: their rows in boxes begin with up to three other pixels
  int channels;                           // of y, of a tile: 128, or 64 of which warpgroups take steps by turns
  TileShape shape;
  int blocks_c, blocks_t, tiles_k;  // tiles along input channels, taps, output channels
  int span_r, span_s;               // rows and columns of taps in a window
  int images, rows, columns;        // outputs of a stage
  int pitch, steps;                 // slots of a row; steps of an image
  int window_h, window_w;           // pixels of x
  int phases_h, phases_w, slots;    // of x; slots of a phase of an image
  int dy_slots;                     // of an image
  int tiles_p, tiles_q, tiles;      // stages of an image, and of all
  int parts, jobs, grid;
  int row_bytes, block_bytes;  // channels_last x: of a pixel, in a block of channels; of all its pixels
  int dy_block_bytes;          // likewise, where a pixel has 128 bytes
  int x_boxes, box_rows;       // planes: of an image's window; rows of the window in each
  int run, dy_run;             // planes: elements of a channel in a box of x, of dy
  // Bytes of a stage: dy, with x as pixels of 16 bits; x that is split, a chunk of its parts and all of them. Both have
  // rings of their own. The last two are what boxes bring.
  int dy_bytes, stage_bytes, raw_bytes, chunk_bytes, part_bytes, dy_loaded, x_loaded;
  int stages, raw_stages, part_stages, smem_bytes;
  double cycles;
  bool contains, rounds;  // see Format
  int dy_seen;            // bytes that boxes bring, and zeros between them
};

struct Params {
  hopper::BoxMap x_map, dy_map;
  Plan plan;
  const void *x_ptr, *dy_ptr;
  int64_t x_stride[4], dy_stride[4];
  int64_t N;
  int C, group_c, H, W, K, group_k, P, Q, R, S;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  float* sums_ptr;                             // [part][output channel][tap][input channel], whole tiles
  int64_t rows;                                // output channels of those, of all groups
  int tap_units[kMostTaps + kMostTapsOfTile];  // from the first output's slot to the tap's, in 16 bytes
  Divisor by_tiles, by_group_tiles, by_tiles_k, by_blocks_t, by_tiles_p, by_tiles_q, by_pitch, by_slots, by_image_slots,
      by_steps, by_all_slots;
  const int* done;
};

// Any memory format -> channels_last with `inner` channels a pixel, or planes of `inner` pixels; zeros fill the rest.
// With a fold, channels become as many times more, each of them a tap: see as_planned.
struct OrderParams {
  const void* from_ptr;
  void* to_ptr;
  const int* done;
  int64_t stride[4];  // of what is read
  int64_t elements;
  int C, H, W, inner, from_h, from_w;           // sizes of the copy, but for the last two
  int step_h, pad_h, dilation_h, step_w, pad_w, dilation_w;  // rows and columns of what is read; between taps of a fold
  bool planes;
  Divisor by_inner, by_c, by_h, by_w, by_fold_h, by_fold_w;
};

// Parts of sums that a part of the pixels has.
MODELNEW_HOST_DEVICE inline int sums_of_part(const Plan& plan) { return plan.channels == 64 ? 2 : 1; }

MODELNEW_HOST_DEVICE inline int row_channels(const Plan& plan) { return plan.blocks_c * plan.shape.chunks * 8; }

MODELNEW_HOST_DEVICE inline int phases_of(const Plan& plan) { return plan.phases_h * plan.phases_w; }

// Slots of a step, and those of them that have pixels.
MODELNEW_HOST_DEVICE inline int step_slots(const Plan& plan) { return plan.rounds ? kLine : kStepPixels; }
MODELNEW_HOST_DEVICE inline int step_pixels(const Plan& plan) {
  return plan.rounds && plan.shifted ? kShiftedLine : step_slots(plan);
}

// Values in 16 bytes, of `bytes` each.
MODELNEW_HOST_DEVICE constexpr int piece_of(int bytes) { return 16 / bytes; }

// How many planes are shifted by one step more each, until the next one begins at a multiple of 16 bytes again; by how
// many pixels one of them is, and all of them at most.
MODELNEW_HOST_DEVICE inline int planes_together(const Plan& plan, int channels, int64_t stride, int bytes) {
  const int piece = piece_of(bytes), rest = static_cast<int>(stride % piece);
  return plan.shifted && channels % piece == 0 && rest != 0 ? piece / rest : 1;
}
MODELNEW_HOST_DEVICE inline int shift_of(const Plan& plan, int channel, int64_t stride, int bytes) {
  return plan.shifted ? channel * static_cast<int>(stride) & (piece_of(bytes) - 1) : 0;
}
MODELNEW_HOST_DEVICE inline int most_shift(const Plan& plan, int64_t stride, int bytes) {
  const int piece = piece_of(bytes), rest = static_cast<int>(stride % piece);
  return plan.shifted && rest != 0 ? piece - rest : 0;
}

MODELNEW_HOST_DEVICE inline int all_slots(const Plan& plan) { return plan.images * phases_of(plan) * plan.slots; }

// The first tap whose pixels the window of a block of taps has.
struct Tap {
  int r, s;
};

MODELNEW_HOST_DEVICE inline Tap first_tap(const Params& params, int block_t) {
  const int tap = block_t * params.plan.shape.taps, r = tap / params.S;
  return {r, params.plan.span_s == params.S ? 0 : tap - r * params.S};
}

struct Job {
  int group, tile_k, block_c, block_t, part, first_tile, last_tile;
  Tap tap;
};

// Neighbouring blocks have tiles of the same pixels, which the L2 cache then serves.
MODELNEW_HOST_DEVICE inline Job locate_job(const Params& params, int number) {
  const Plan& plan = params.plan;
  const int part = quotient(number, params.by_tiles);
  const int of_all = number - part * static_cast<int>(params.by_tiles.divisor);
  const int group = quotient(of_all, params.by_group_tiles);
  const int tile = of_all - group * static_cast<int>(params.by_group_tiles.divisor);
  const int column = quotient(tile, params.by_tiles_k), block_c = quotient(column, params.by_blocks_t);
  const int block_t = column - block_c * plan.blocks_t;
  return {group,
          tile - column * plan.tiles_k,
          block_c,
          block_t,
          part,
          static_cast<int>(static_cast<int64_t>(part) * plan.tiles / plan.parts),
          static_cast<int>(static_cast<int64_t>(part + 1) * plan.tiles / plan.parts),
          first_tap(params, block_t)};
}

// The first output of a stage.
struct Place {
  int64_t n;
  int p, q;
};

MODELNEW_HOST_DEVICE inline Place locate_tile(const Params& params, int tile) {
  const Plan& plan = params.plan;
  const int row = quotient(tile, params.by_tiles_q), image = quotient(row, params.by_tiles_p);
  return {int64_t{image} * plan.images, (row - image * plan.tiles_p) * plan.rows,
          (tile - row * plan.tiles_q) * plan.columns};
}

// The slot of x, in a stage, of the first output's tap: in which phase, and how far.
MODELNEW_HOST_DEVICE inline int slot_of_tap(const Params& params, const Tap& first, int tap) {
  const Plan& plan = params.plan;
  const int r = tap / params.S, s = tap - r * params.S;
  const int h = (r - first.r) * params.dilation_h, w = (s - first.s) * params.dilation_w;
  const int phase = h % params.stride_h * plan.phases_w + w % params.stride_w;
  return phase * plan.slots + h / params.stride_h * plan.pitch + w / params.stride_w;
}

// A pixel of a stage: image, row and column, from the first output's on. Negative if there is none.
MODELNEW_HOST_DEVICE inline int pack_pixel(int image, int row, int column) {
  return (image << 20) + (row << 10) + column;
}

MODELNEW_HOST_DEVICE inline int dy_pixel(const Params& params, int number, int step_slots, int step_pixels) {
  const Plan& plan = params.plan;
  const int step = number / step_slots, image = quotient(step, params.by_steps), in_step = number - step * step_slots;
  const int pixel = (step - image * plan.steps) * step_pixels + in_step, row = quotient(pixel, params.by_pitch);
  const int column = pixel - row * plan.pitch;
  return in_step < step_pixels && row < plan.rows && column < plan.columns ? pack_pixel(image, row, column) : -1;
}

MODELNEW_HOST_DEVICE inline int x_pixel(const Params& params, int number) {
  const Plan& plan = params.plan;
  const int image = quotient(number, params.by_image_slots);
  number -= image * static_cast<int>(params.by_image_slots.divisor);
  const int phase = quotient(number, params.by_slots), slot = number - phase * plan.slots;
  const int row = quotient(slot, params.by_pitch), column = slot - row * plan.pitch;
  const int phase_h = phase / plan.phases_w;
  if (row * params.stride_h >= plan.window_h) return -1;  // behind the window
  return pack_pixel(image, row * params.stride_h + phase_h, column * params.stride_w + phase - phase_h * plan.phases_w);
}

// Planes: the first row of a window that its `number`-th box has. Rows that no tap reads are left out.
MODELNEW_HOST_DEVICE inline int first_row(const Params& params, int number) {
  const Plan& plan = params.plan;
  if (plan.phases_h == params.stride_h) return number * plan.box_rows;
  const int row = number / plan.phases_h;
  return row * params.stride_h + number - row * plan.phases_h;
}

// Where a pixel of a window begins, in elements: the box, and how far from its first row.
struct InBox {
  int number, offset;
};

MODELNEW_HOST_DEVICE inline InBox place_in_box(const Params& params, int row, int column) {
  const Plan& plan = params.plan;
  if (plan.phases_h < params.stride_h)
    return {row / params.stride_h * plan.phases_h + row % params.stride_h, column};
  const int number = row / plan.box_rows;
  return {number, (row - number * plan.box_rows) * params.W + column};
}

// A block's shared memory: stages, then tables of pixels, then barriers.
struct SharedLayout {
  int raw, parts, dy_table, x_table, nothing, magnitudes, scales, barriers, end;
};

MODELNEW_HOST_DEVICE inline SharedLayout shared_layout(const Plan& plan) {
  SharedLayout layout{};
  layout.raw = plan.stages * plan.stage_bytes;
  layout.parts = layout.raw + plan.raw_stages * plan.raw_bytes;
  layout.dy_table = layout.parts + plan.part_stages * plan.part_bytes;
  layout.x_table = layout.dy_table + (plan.dy_planes && !plan.rounds ? plan.images * plan.dy_slots * 4 : 0);
  layout.nothing = layout.x_table + (plan.x_planes && !plan.rounds ? all_slots(plan) * 8 : 0);
  layout.magnitudes = layout.nothing + 16;
  layout.scales = layout.magnitudes + 8;
  layout.barriers = layout.scales + 8 * kMostPartStages;
  layout.end = layout.barriers + 16 * (2 * kMostStages + kMostPartStages);
  return layout;
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// ---- Device code ----

struct Shared {
  uint32_t base;
  SharedLayout layout;

  // "Full" barriers of rings; "empty" ones are 8 bytes further on.
  __device__ __forceinline__ uint32_t stage(int number) const { return base + layout.barriers + 16 * number; }
  __device__ __forceinline__ uint32_t raw(int number) const { return stage(kMostStages + number); }
  __device__ __forceinline__ uint32_t part(int number) const { return stage(2 * kMostStages + number); }

  // "Full" for those who multiply, where x is rounded in between.
  __device__ __forceinline__ uint32_t rounded(int number) const { return raw(number) + 8; }

  // The scales of a stage of parts, packed.
  __device__ __forceinline__ uint32_t scales(int number) const { return base + layout.scales + 4 * number; }
};

// Where the window of a stage begins.
struct Window {
  Place at;
  int first_h, first_w;
};

__device__ __forceinline__ Window locate_window(const Params& params, const Job& job, int tile) {
  const Place at = locate_tile(params, tile);
  return {at, at.p * params.stride_h - params.pad_h + job.tap.r * params.dilation_h,
          at.q * params.stride_w - params.pad_w + job.tap.s * params.dilation_w};
}

// Issues the boxes of a stage, of dy and of x, which come to their own barriers.
template <typename Format, int CHUNKS>
__device__ __forceinline__ void load_stage(const Params& params, const Job& job, int tile, uint32_t stage,
                                           uint32_t barrier, uint32_t x_stage, uint32_t x_barrier) {
  constexpr int BYTES = Format::BYTES;
  constexpr int kMisplaced = piece_of(BYTES) - 1;  // elements behind a multiple of 16 bytes, at most
  const Plan& plan = params.plan;
  const Window window = locate_window(params, job, tile);
  const int n = static_cast<int>(window.at.n);
  const int first_k = job.group * params.group_k + job.tile_k * plan.channels;
  const int first_c = job.group * params.group_c + job.block_c * CHUNKS * 8;
  const int place_k = first_k / planes_together(plan, params.group_k, params.dy_stride[1], BYTES);
  const int place_c = first_c / planes_together(plan, params.group_c, params.x_stride[1], BYTES);
  hopper::barrier_arrive_expecting(barrier, plan.dy_loaded + (Format::SPLITS ? 0 : plan.x_loaded));
  if (Format::SPLITS) hopper::barrier_arrive_expecting(x_barrier, plan.x_loaded);
#pragma unroll 1
  for (int image = 0; image < plan.images; ++image) {
    if (Format::ROUNDS && plan.x_planes) {  // lines of both: [32 pixels of all channels] by a box
#pragma unroll 1
      for (int line = 0; line < plan.steps; ++line) {
        const int place = (image * plan.slots + line * kLine) * Format::BYTES;
        const int first = window.at.q + line * step_pixels(plan);
        hopper::load_box(params.dy_map, stage + place * plan.channels, first, 0, place_k, n + image, barrier);
        hopper::load_box(params.x_map, x_stage + place * CHUNKS * 8, first, 0, place_c, n + image, x_barrier);
      }
      continue;
    }
    if (Format::SPLITS && plan.dy_planes) {
      hopper::load_box(params.dy_map, stage + image * plan.channels * plan.dy_run * Format::BYTES,
                       (window.at.p * params.Q + window.at.q) & ~kMisplaced, 0, place_k, n + image, barrier);
    } else {
      constexpr int CHANNELS = hopper::kBoxRowBytes / Format::BYTES;
      const int box_rows = plan.tiles_q == 1 ? plan.rows : 1;
#pragma unroll 1
      for (int row = 0; row < plan.rows; row += box_rows)
#pragma unroll 1
        for (int k = 0; k < plan.channels; k += CHANNELS)
          hopper::load_box(params.dy_map,
                           stage + k / CHANNELS * plan.dy_block_bytes +
                               (image * plan.dy_slots + row * plan.pitch) * hopper::kBoxRowBytes,
                           first_k + k, window.at.q, window.at.p + row, n + image, barrier);
    }
    if (Format::SPLITS && plan.x_planes) {
#pragma unroll 1
      for (int number = 0; number < plan.x_boxes; ++number)
        hopper::load_box(params.x_map,
                         x_stage + (image * plan.x_boxes + number) * CHUNKS * 8 * plan.run * Format::BYTES,
                         ((window.first_h + first_row(params, number)) * params.W + window.first_w) & ~kMisplaced, 0,
                         place_c, n + image, x_barrier);
    } else {
      // Phases, or lines, which go on where the one before ends.
      const int channels = plan.row_bytes / Format::BYTES;
      const int count = Format::ROUNDS ? plan.slots / kLine : phases_of(plan);
#pragma unroll 1
      for (int phase = 0; phase < count; ++phase) {
        const int phase_h = Format::ROUNDS ? 0 : phase / plan.phases_w;
        const int phase_w = Format::ROUNDS ? phase * kLine * params.stride_w : phase - phase_h * plan.phases_w;
        uint32_t to = x_stage + plan.row_bytes * (Format::ROUNDS ? phase * CHUNKS / 4 * kLine
                                                                 : (image * phases_of(plan) + phase) * plan.slots);
#pragma unroll 1
        for (int c = 0; c < CHUNKS * 8; c += channels, to += plan.block_bytes)
          hopper::load_box(params.x_map, to, first_c + c, window.first_w + phase_w, window.first_h + phase_h, n + image,
                           x_barrier);
      }
    }
  }
}

// Two neighbours as pairs of fp16, or of bf16, of which parts[i][at] are the i-th. They are scaled, as otherwise bf16
// would lack the smallest numbers; what then becomes too large is found among the sums.
template <int PARTS>
__device__ __forceinline__ void split(float low, float high, float scale, bool contained, uint32_t (&parts)[PARTS][4],
                                      int at) {
  low *= scale;
  high *= scale;
  if (contained) parts[0][at] = narrow_pair(low, high, Half{});
#pragma unroll
  for (int i = 0; i < PARTS && !contained; ++i) {
    parts[i][at] = narrow_pair(low, high, BFloat16{});
    low -= bits_float(parts[i][at] << 16);
    high -= bits_float(parts[i][at] & 0xffff0000u);
  }
}

// Exponents of the powers of two that x and dy are multiplied by. Each job finds its own in the first stages that are
// not all zeros. If values are too small even for bf16, the rest of the job has kScale, which is 2^24 (`wide`).
struct Scales {
  static constexpr int kUnknown = 1000;
  int x = kUnknown, dy = kUnknown;
  bool wide = false;
  __device__ __forceinline__ int of_x() const { return wide ? 24 : x == kUnknown ? 0 : x; }
  __device__ __forceinline__ int of_dy() const { return wide ? 24 : dy == kUnknown ? 0 : dy; }
};

// A word for those who multiply: the scale of dy as a float, the sum of exponents, whether the stage is contained.
__device__ __forceinline__ uint32_t pack(const Scales& scales, bool contained) {
  return float_bits(power_of_two(scales.of_dy())) |
         static_cast<uint32_t>(scales.of_x() + scales.of_dy() + 2 * kMostExponent) << 1 | (contained ? 1 : 0);
}
__device__ __forceinline__ int exponent_of_sums(uint32_t packed) {
  return static_cast<int>(packed >> 1 & 1023) - 2 * kMostExponent;
}

// The range of the fp32 values that a thread has seen.
struct Seen {
  uint32_t least = 0;  // as in Watch
  float most = 0;      // largest magnitude, but for NaN

  __device__ __forceinline__ void see(const uint32_t (&words)[4]) {
#pragma unroll
    for (uint32_t word : words) {
      least = max(least, 0u - 2 * word);
      most = fmaxf(most, fabsf(bits_float(word)));
    }
  }
  // Whether none but zero is less than 2^exponent.
  __device__ __forceinline__ bool is_from(int exponent) const {
    return least <= 0u - 2 * float_bits(power_of_two(max(exponent, -126)));
  }
  __device__ __forceinline__ bool fits(int scale) const {
    return is_from(-14 - scale) && most * power_of_two(scale) <= 65504.f;
  }
};

// A slot of x in planes: its pixel, the first row of its box, and where it lies in the stage.
struct alignas(8) Slot {
  int packed;
  uint32_t row : 10, offset : 22;
};

// Under TF32's contract x is seen, or contained and seen; stages that do not fit are split.
enum class Visit { kSee, kContain, kSplit };

// Splits x of a stage into parts, [part][chunk][slot] x 16 bytes. A thread takes a slot of a few chunks, which lie in a
// row of a box in channels_last. `nothing`: the address of 16 bytes of zeros.
template <typename Format, int CHUNKS, bool PLANES>
__device__ __forceinline__ void split_stage(const Params& params, const Job& job, int tile, const Slot* table,
                                            uint32_t from, uint32_t to, uint32_t nothing, Visit visit, float scale,
                                            Seen& seen) {
  constexpr int PARTS = Format::PARTS, BYTES = Format::BYTES;
  constexpr int ROW = CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1;  // chunks of a row of a box
  constexpr int ITEM = ROW < 2 ? ROW : 2;                             // chunks of a thread at a time
  const Plan& plan = params.plan;
  const int slots = all_slots(plan);
  const Window window = locate_window(params, job, tile);
  constexpr int PIECE = piece_of(BYTES), kMisplaced = PIECE - 1;  // elements of a box before its first row
  uint32_t shifts[PIECE];
#pragma unroll
  for (int i = 0; i < PIECE; ++i) shifts[i] = BYTES * shift_of(plan, i, params.x_stride[1], BYTES);
#pragma unroll 1
  for (int item = threadIdx.x - (kMultiplyingThreads + 32); item < CHUNKS / ITEM * slots; item += Format::SPLITTING) {
    const int chunk = quotient(item, params.by_all_slots) * ITEM, slot = item - chunk / ITEM * slots;
    uint32_t own, step = BYTES * plan.run;  // planes: from channel to channel
    if constexpr (PLANES) {
      const Slot entry = table[slot];
      const int h = window.first_h + (entry.packed >> 10 & 1023), w = window.first_w + (entry.packed & 1023);
      const int begin = (window.first_h + entry.row) * params.W + window.first_w;  // of its box
      own = from + chunk * 8 * step + entry.offset + BYTES * (begin & kMisplaced);
      if (!(entry.packed >= 0 && is_within(h, params.H) && is_within(w, params.W))) own = nothing, step = 0;
    } else {
      own = from + chunk / ROW * plan.block_bytes + slot * ROW * 32;
    }
    uint32_t place = to + chunk * plan.chunk_bytes + slot * 16;
    if constexpr (BYTES == 2) {
      uint32_t values[ITEM][8];
#pragma unroll
      for (int j = 0; j < ITEM; ++j)
#pragma unroll
        for (int c = 0; c < 8; ++c, own += step) hopper::load_shared_half(values[j][c], own + shifts[c]);
#pragma unroll
      for (int j = 0; j < ITEM; ++j, place += plan.chunk_bytes) {
        uint32_t pairs[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) pairs[c] = values[j][2 * c] | values[j][2 * c + 1] << 16;
        hopper::store_shared_4(place, pairs);
      }
    } else {
      uint32_t words[ITEM][2][4];
#pragma unroll
      for (int j = 0; j < ITEM; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if constexpr (PLANES) {
#pragma unroll
            for (int c = 0; c < 4; ++c, own += step) hopper::load_shared(words[j][i][c], own + shifts[c]);
          } else {
            const uint32_t piece = 2 * (chunk % ROW + j) + i, order = own / hopper::kBoxRowBytes & (2 * ROW - 1);
            hopper::load_shared_4(words[j][i], own + (piece ^ order) * 16);
          }
      if (Format::CONTAINS && visit != Visit::kSplit)
#pragma unroll
        for (int i = 0; i < 2 * ITEM; ++i) seen.see(words[i / 2][i % 2]);
      if (Format::CONTAINS && visit == Visit::kSee) continue;
      const bool contained = Format::CONTAINS && visit == Visit::kContain;
#pragma unroll
      for (int j = 0; j < ITEM; ++j, place += plan.chunk_bytes) {
        uint32_t parts[PARTS][4];
#pragma unroll
        for (int c = 0; c < 4; ++c)
          split(bits_float(words[j][c / 2][c % 2 * 2]), bits_float(words[j][c / 2][c % 2 * 2 + 1]), scale, contained,
                parts, c);
#pragma unroll
        for (int i = 0; i < PARTS; ++i)
          if (i == 0 || !contained) hopper::store_shared_4(place + i * CHUNKS * plan.chunk_bytes, parts[i]);
      }
    }
  }
}

// tf32_operand() without a predicate, so that the result may go to another register. NaN becomes Inf: sums that are
// not finite are computed anew.
__device__ __forceinline__ uint32_t as_tf32(uint32_t word) {
  return float_bits(fminf(bits_float(word), bits_float(0x7f800000u))) + 0x1000u;
}

// Rounds x of a stage in place: channels as rows of 32 slots in the swizzle. Lines have that order already, and rows of
// shifted ones go back to where their pixels belong. A thread has rows of one shift and one order of pieces; `left`
// pixels of an image remain.
template <typename Format, int CHUNKS>
__device__ __forceinline__ void round_lines(const Params& params, uint32_t x, int left) {
  constexpr int kRows = 8 * CHUNKS;
  const Plan& plan = params.plan;
  const int first = static_cast<int>(threadIdx.x) - (kMultiplyingThreads + 32), order = first % 8;
  const int shift = shift_of(plan, first, params.x_stride[1], Format::BYTES);
#pragma unroll 1
  for (int row = first; row < plan.images * plan.steps * kRows; row += Format::SPLITTING) {
    const uint32_t begin = x + row * hopper::kBoxRowBytes;
    uint32_t words[kLine / 4][4];
    const auto word = [&](int i) -> uint32_t& { return words[i / 4][i % 4]; };
#pragma unroll
    for (int i = 0; i < kLine / 4; ++i) hopper::load_shared_4(words[i], begin + (i ^ order) * 16);
    if (plan.shifted) {
      const int line = row / kRows, of_image = line - quotient(line, params.by_steps) * plan.steps;
      const int pixels = left - of_image * kShiftedLine;
#pragma unroll
      for (int i = 0; i < kLine - 1; ++i) word(i) = (shift & 1) != 0 ? word(i + 1) : word(i);
#pragma unroll
      for (int i = 0; i < kLine; ++i) word(i) = i >= kShiftedLine ? 0 : (shift & 2) != 0 ? word(i + 2) : word(i);
      if (pixels < kShiftedLine)
#pragma unroll
        for (int i = 0; i < kShiftedLine; ++i) word(i) = i < pixels ? word(i) : 0;
    }
#pragma unroll
    for (int i = 0; i < kLine / 4; ++i) {
#pragma unroll
      for (uint32_t& one : words[i]) one = as_tf32(one);
      hopper::store_shared_4(begin + (i ^ order) * 16, words[i]);
    }
  }
}

// Pixels are transposed, 32 of 32 channels by a warp: a lane has four pixels, two apart, of four channels, twice. Lanes
// that load or store at once meet all banks.
template <typename Format, int CHUNKS>
__device__ __forceinline__ void round_pixels(const Plan& plan, uint32_t x) {
  constexpr int kRow = hopper::kBoxRowBytes;
  const int thread = static_cast<int>(threadIdx.x) - (kMultiplyingThreads + 32), lane = thread % 32;
  const int piece = lane % 8, quad = ((lane & 1) << 2 | (lane >> 1 & 3)) ^ lane / 8;
  const uint32_t from = (piece / 2 * 8 + piece % 2) * kRow + (quad ^ piece % 2) * 16;
  const uint32_t to = quad * 4 * kRow + (piece ^ quad % 2 * 4) * 16;
#pragma unroll 1
  for (int block = thread / 32; block < plan.slots / kLine * (CHUNKS / 4); block += Format::SPLITTING / 32) {
    const uint32_t begin = x + block * kLine * kRow;
    uint32_t words[2][4][4];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      hopper::load_shared_4(words[i / 4][i % 4], begin + (from ^ i / 4 * 64 ^ i % 4 * 32) + i % 4 * 2 * kRow);
    __syncwarp();  // all have loaded
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t values[4];
#pragma unroll
      for (int pixel = 0; pixel < 4; ++pixel) values[pixel] = as_tf32(words[i / 4][pixel][i % 4]);
      hopper::store_shared_4(begin + (to ^ (i / 4 * 16 * kRow + i % 4 * 16)) + i % 4 * kRow, values);
    }
  }
}

// Boxes have brought a stage; when all three warps have rounded their part of x, it is free to be multiplied.
template <typename Format, int CHUNKS>
__device__ __forceinline__ void round_all(const Params& params, const Shared& shared) {
  const Plan& plan = params.plan;
  RingPosition ring;
#pragma unroll 1
  for (int number = blockIdx.x; number < plan.jobs; number += gridDim.x) {
    const Job job = locate_job(params, number);
#pragma unroll 1
    for (int tile = job.first_tile; tile < job.last_tile; ++tile) {
      hopper::barrier_wait(shared.stage(ring.slot), ring.parity);
      const uint32_t x = shared.base + ring.slot * plan.stage_bytes + plan.dy_bytes;
      if (plan.x_planes)
        round_lines<Format, CHUNKS>(params, x, params.Q - locate_tile(params, tile).q);
      else
        round_pixels<Format, CHUNKS>(plan, x);
      hopper::fence_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) hopper::barrier_arrive(shared.rounded(ring.slot));
      ring.next(plan.stages);
    }
  }
}

template <typename Format, int CHUNKS>
__device__ __forceinline__ void load(const Params& params, const Shared& shared) {
  const Plan& plan = params.plan;
  RingPosition ring, raw;
#pragma unroll 1
  for (int number = blockIdx.x; number < plan.jobs; number += gridDim.x) {
    const Job job = locate_job(params, number);
#pragma unroll 1
    for (int tile = job.first_tile; tile < job.last_tile; ++tile) {
      const uint32_t stage = shared.base + ring.slot * plan.stage_bytes, barrier = shared.stage(ring.slot);
      hopper::barrier_wait(barrier + 8, ring.parity ^ 1);
      if constexpr (!Format::SPLITS) {
        load_stage<Format, CHUNKS>(params, job, tile, stage, barrier, stage + plan.dy_bytes, barrier);
      } else {
        const uint32_t raw_barrier = shared.raw(raw.slot);
        hopper::barrier_wait(raw_barrier + 8, raw.parity ^ 1);
        load_stage<Format, CHUNKS>(params, job, tile, stage, barrier,
                                   shared.base + shared.layout.raw + raw.slot * plan.raw_bytes, raw_barrier);
        raw.next(plan.raw_stages);
      }
      ring.next(plan.stages);
    }
  }
}

// Sees dy of a stage. Places behind the end are the first one again.
template <typename Format>
__device__ __forceinline__ void see_dy(const Plan& plan, uint32_t stage, Seen& seen) {
  constexpr int kStep = 16 * Format::SPLITTING, kAtOnce = 4;
  const int first = 16 * (static_cast<int>(threadIdx.x) - (kMultiplyingThreads + 32));
#pragma unroll 1
  for (int i = first; i < plan.dy_seen; i += kAtOnce * kStep) {
    uint32_t words[kAtOnce][4];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      hopper::load_shared_4(words[j], stage + (i + j * kStep < plan.dy_seen ? i + j * kStep : first));
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) seen.see(words[j]);
  }
}

// The scales that are not known yet, with room for eight times as much, if threads have seen others than zeros.
template <typename Format>
__device__ __forceinline__ void find_scales(const Seen& of_x, const Seen& of_dy, uint32_t* magnitudes, Scales& scales) {
  const uint32_t most_x = hopper::warp_max(float_bits(of_x.most)), most_dy = hopper::warp_max(float_bits(of_dy.most));
  hopper::named_barrier(1, Format::SPLITTING);  // all have read the magnitudes before
  if (threadIdx.x == kMultiplyingThreads + 32) magnitudes[0] = magnitudes[1] = 0;
  hopper::named_barrier(1, Format::SPLITTING);
  if (threadIdx.x % 32 == 0) atomicMax(magnitudes, most_x), atomicMax(magnitudes + 1, most_dy);
  hopper::named_barrier(1, Format::SPLITTING);
  if (scales.x == Scales::kUnknown && magnitudes[0] != 0) scale_exponent(magnitudes[0] >> 23, 13, scales.x);
  if (scales.dy == Scales::kUnknown && magnitudes[1] != 0) scale_exponent(magnitudes[1] >> 23, 13, scales.dy);
}

// The splitting warps see both operands of a stage, where that may be contained, vote how it is multiplied, split x.
template <typename Format, int CHUNKS>
__device__ __forceinline__ void split_all(const Params& params, const Shared& shared, uint8_t* smem) {
  const Plan& plan = params.plan;
  const Slot* const table = reinterpret_cast<const Slot*>(smem + shared.layout.x_table);
  uint32_t* const magnitudes = reinterpret_cast<uint32_t*>(smem + shared.layout.magnitudes);  // of x, of dy
  const uint32_t nothing = shared.base + shared.layout.nothing;
  const bool planes = plan.x_planes;
  RingPosition ring, raw, part;
#pragma unroll 1
  for (int number = blockIdx.x; number < plan.jobs; number += gridDim.x) {
    const Job job = locate_job(params, number);
    Scales scales;
#pragma unroll 1
    for (int tile = job.first_tile; tile < job.last_tile; ++tile) {
      const uint32_t part_barrier = shared.part(part.slot), raw_barrier = shared.raw(raw.slot);
      hopper::barrier_wait(part_barrier + 8, part.parity ^ 1);
      hopper::barrier_wait(raw_barrier, raw.parity);
      const uint32_t from = shared.base + shared.layout.raw + raw.slot * plan.raw_bytes;
      const uint32_t to = shared.base + shared.layout.parts + part.slot * plan.part_bytes;
      const auto visit_x = [&](Visit visit, float scale, Seen& seen) {
        if (Format::BYTES == 2 || planes)
          split_stage<Format, CHUNKS, true>(params, job, tile, table, from, to, nothing, visit, scale, seen);
        else
          split_stage<Format, CHUNKS, false>(params, job, tile, table, from, to, nothing, visit, scale, seen);
      };
      Seen of_x, of_dy;
      if constexpr (!Format::CONTAINS) {
        visit_x(Visit::kSplit, kScale, of_x);
      } else {
        bool contained = false;
        if (!scales.wide) {
          hopper::barrier_wait(shared.stage(ring.slot), ring.parity);
          see_dy<Format>(plan, shared.base + ring.slot * plan.stage_bytes, of_dy);
          if (scales.x == Scales::kUnknown || scales.dy == Scales::kUnknown) {
            visit_x(Visit::kSee, 0, of_x);
            find_scales<Format>(of_x, of_dy, magnitudes, scales);
            of_x = {};
          }
          visit_x(Visit::kContain, power_of_two(scales.of_x()), of_x);
          const bool fits = of_x.fits(scales.of_x()) && of_dy.fits(scales.of_dy());
          contained = !hopper::named_barrier_any(2, Format::SPLITTING, !fits);
          if (!contained) {
            // bf16 has two parts of what is 2^-100 and more. Sums that are scaled so neither vanish nor overflow.
            const bool lacks = !of_x.is_from(-100 - scales.of_x()) || !of_dy.is_from(-100 - scales.of_dy()) ||
                               !is_within(scales.of_x() + scales.of_dy() - 24, 40);
            scales.wide = hopper::named_barrier_any(2, Format::SPLITTING, lacks);
          }
        }
        if (!contained) visit_x(Visit::kSplit, power_of_two(scales.of_x()), of_x);
        if (threadIdx.x == Format::THREADS - 1) hopper::store_shared(shared.scales(part.slot), pack(scales, contained));
        ring.next(plan.stages);
      }
      hopper::fence_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        hopper::barrier_arrive(part_barrier);
        hopper::barrier_arrive(raw_barrier + 8);
      }
      raw.next(plan.raw_stages);
      part.next(plan.part_stages);
    }
  }
}

// All products of one sum of a job, one by one, padding and all.
template <typename Format>
__device__ inline float exact_sum(const Params& params, const Job& job, int turns, int own_turn, int k, int c,
                                  int tap) {
  using Stored = typename Format::Stored;
  const Plan& plan = params.plan;
  const int r = tap / params.S, s = tap - r * params.S;
  const Stored* const x =
      static_cast<const Stored*>(params.x_ptr) + (job.group * params.group_c + c) * params.x_stride[1];
  const Stored* const dy =
      static_cast<const Stored*>(params.dy_ptr) + (job.group * params.group_k + k) * params.dy_stride[1];
  double sum = 0;
  int step = -1;
#pragma unroll 1
  for (int tile = job.first_tile; tile < job.last_tile; ++tile) {
    const Place at = locate_tile(params, tile);
#pragma unroll 1
    for (int i = 0; i < plan.images * plan.steps * Format::STEP; ++i) {
      if (i % Format::STEP == 0) ++step;
      const int packed = dy_pixel(params, i, Format::STEP, Format::ROUNDS ? step_pixels(plan) : Format::STEP);
      const int p = at.p + (packed >> 10 & 1023), q = at.q + (packed & 1023);
      const int64_t n = at.n + (packed >> 20);
      if (step % turns != own_turn || packed < 0 || n >= params.N || p >= params.P || q >= params.Q) continue;
      const int h = p * params.stride_h - params.pad_h + r * params.dilation_h;
      const int w = q * params.stride_w - params.pad_w + s * params.dilation_w;
      const Stored value = load_if(is_within(h, params.H) && is_within(w, params.W),
                                   x + (n * params.x_stride[0] + h * params.x_stride[2] + w * params.x_stride[3]));
      sum +=
          static_cast<double>(widen(dy[n * params.dy_stride[0] + p * params.dy_stride[2] + q * params.dy_stride[3]])) *
          widen(value);
    }
  }
  return static_cast<float>(sum);
}

// Where a lane finds dy of a step: its channel and the one eight further on, two neighbouring pixels and those eight
// further on.
template <typename Format>
struct LaneOfDy {
  uint32_t place[Format::BYTES == 4 ? 4 : Format::SPLITS ? 2 : 1];  // pixels of 16 bits: a row of ldmatrix
  uint32_t step_bytes, image_bytes, carry;
  uint32_t odd;  // 16 bits: 2 where rows may begin between words
  bool planes, straight;

  __device__ __forceinline__ LaneOfDy(const Params& params, int own_channel, int lane) {
    const Plan& plan = params.plan;
    const int shift = shift_of(plan, lane / 4, params.dy_stride[1], Format::BYTES);
    constexpr int CHANNELS = hopper::kBoxRowBytes / Format::BYTES;
    const uint32_t block = own_channel / CHANNELS * plan.dy_block_bytes;
    const int in_block = own_channel % CHANNELS;
    step_bytes = Format::STEP * hopper::kBoxRowBytes;
    image_bytes = plan.dy_slots * hopper::kBoxRowBytes;
    planes = hopper::in_register(int{plan.dy_planes}), straight = hopper::in_register(int{plan.dy_straight});
    odd = 2 * (shift_of(plan, 1, params.dy_stride[1], Format::BYTES) & 1);
    if constexpr (Format::BYTES == 2 && !Format::SPLITS) {
      const int pixel = lane / 16 * 8 + lane % 8, piece = in_block / 8 + lane / 8 % 2;
      place[0] = block + pixel * hopper::kBoxRowBytes + (piece ^ lane % 8) * 16;
    } else if (Format::ROUNDS && plan.dy_planes) {
      step_bytes = plan.channels * hopper::kBoxRowBytes;
      image_bytes = plan.slots * plan.channels * Format::BYTES;
      place[0] = (own_channel + lane / 4) * hopper::kBoxRowBytes + lane / 4 * 16 + (lane % 4 + shift) % 4 * 4;
    } else if (Format::BYTES == 2 || plan.dy_planes) {
      step_bytes = image_bytes = 0;  // in the table
      place[0] = ((own_channel + lane / 4) * plan.dy_run + shift) * Format::BYTES;
      if (plan.dy_straight) {
        step_bytes = kStepPixels * Format::BYTES;
        image_bytes = plan.channels * plan.dy_run * Format::BYTES;
        place[0] += lane % 4 * 2 * Format::BYTES;
      }
      place[1] = place[0] + 8 * plan.dy_run * Format::BYTES;
    } else if constexpr (Format::BYTES == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int pixel = lane % 4 * 2 + i / 2, channel = in_block + lane / 4 + i % 2 * 8;
        place[i] = block + pixel * hopper::kBoxRowBytes + (channel / 4 ^ pixel) * 16 + channel % 4 * 4;
      }
    }
    for (uint32_t& one : place) one = hopper::in_register(one);
    if (Format::ROUNDS) carry = hopper::in_register((lane % 4 + shift) / 4 * 16);
    step_bytes = hopper::in_register(step_bytes), image_bytes = hopper::in_register(image_bytes);
  }
};

// Loads from planes: `table` has the places from the lane's first pixel on, and `left` pixels remain.
template <typename Format>
__device__ __forceinline__ void load_by_table(const LaneOfDy<Format>& own, uint32_t from, const int* table, int left,
                                              uint32_t (&words)[4][2]) {
  const uint2 near = *reinterpret_cast<const uint2*>(table), far = *reinterpret_cast<const uint2*>(table + 8);
  const int at[4] = {static_cast<int>(near.x), static_cast<int>(near.y), static_cast<int>(far.x),
                     static_cast<int>(far.y)};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t place = from + own.place[i / 2 % 2] + max(at[i / 4 * 2 + i % 2], 0);
    if constexpr (Format::BYTES == 2)
      hopper::load_shared_half(words[i / 2][i % 2], place);
    else
      hopper::load_shared(words[i / 2][i % 2], place);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if ((at[i / 4 * 2 + i % 2] < 0) | (i % 2 + i / 4 * 8 >= left)) words[i / 2][i % 2] = 0;
}

// A step's 16 channels of a warp and 16 pixels of dy, as wgmma takes them, in parts.
template <typename Format>
__device__ __forceinline__ void load_dy(const LaneOfDy<Format>& own, uint32_t from, const int* table, int left,
                                        float scale, bool contained, uint32_t (&a)[Format::PARTS][4]) {
  if constexpr (!Format::SPLITS) {
    hopper::load_matrix_transposed(a[0], from + own.place[0]);
  } else if constexpr (Format::BYTES == 2) {
    if (own.straight) {
      const uint32_t at = from + own.place[0], between = at & 2, next = own.place[1] - own.place[0];
#pragma unroll
      for (int i = 0; i < 4; ++i) hopper::load_shared(a[0][i], at - between + i % 2 * next + i / 2 * 16);
      if (((from | own.odd) & 2) != 0) {  // pairs of some lane lie in two words
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t behind;
          hopper::load_shared(behind, at - between + i % 2 * next + i / 2 * 16 + 4);
          a[0][i] = static_cast<uint32_t>((uint64_t{behind} << 32 | a[0][i]) >> between * 8);
        }
      }
      if (left < kStepPixels)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[0][i] &= i / 2 * 8 + 1 < left ? ~0u : i / 2 * 8 < left ? 0xffffu : 0;
    } else {
      uint32_t values[4][2];
      load_by_table(own, from, table, left, values);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[0][i] = values[i][0] | values[i][1] << 16;
    }
  } else {
    uint32_t words[4][2];
    if (own.straight) {
#pragma unroll
      for (int i = 0; i < 4; ++i) hopper::load_shared_2(words[i], from + own.place[i % 2] + i / 2 * 32);
      if (left < kStepPixels)
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (i % 2 + i / 4 * 8 >= left) words[i / 2][i % 2] = 0;
    } else if (own.planes) {
      load_by_table(own, from, table, left, words);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        hopper::load_shared(words[i / 2][i % 2],
                            from + own.place[i % 2 * 2 + i / 2 % 2] + i / 4 * 8 * hopper::kBoxRowBytes);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) split(bits_float(words[i][0]), bits_float(words[i][1]), scale, contained, a, i);
  }
}

// The same of a line, rounded to TF32, as operands of eight pixels each. Of shifted ones the last four slots have any
// pixels of the row, which meet zeros of x.
template <typename Format>
__device__ __forceinline__ void load_rounded_dy(const LaneOfDy<Format>& own, uint32_t from, uint32_t (&a)[4][4]) {
  constexpr uint32_t kEight = 8 * hopper::kBoxRowBytes;  // channels, or pixels
#pragma unroll
  for (int i = 0; i < 16; ++i)
    hopper::load_shared(a[i / 4][i % 4],
                        from + (own.planes ? (own.place[0] ^ ((i / 2 * 16 + own.carry) & 112)) + i % 2 * kEight
                                           : own.place[i % 4] + i / 4 * kEight));
#pragma unroll
  for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = as_tf32(a[i / 4][i % 4]);
}

template <typename Format, int CHUNKS, int TAPS>
__device__ __forceinline__ void multiply(const Params& params, const Shared& shared, const uint8_t* smem) {
  constexpr int COLUMNS = 8 * CHUNKS, PARTS = Format::PARTS;
  // Sets of operands of dy. Where sums leave few registers there is one: the other warpgroup multiplies meanwhile.
  constexpr int SETS = PARTS == 1 || (PARTS == 2 && CHUNKS * TAPS < 32) ? 2 : 1;
  const Plan& plan = params.plan;
  const int warpgroup = hopper::uniform(threadIdx.x / 128);
  const int lane = hopper::in_register(static_cast<int>(threadIdx.x % 32)), warp = threadIdx.x % 128 / 32;
  const int steps = hopper::in_register(plan.steps), images = hopper::in_register(plan.images);
  const bool by_turns = plan.channels == 64;
  const int turns = by_turns ? 2 : 1;
  const int own_channel = (by_turns ? 0 : 64 * warpgroup) + 16 * warp;
  const LaneOfDy<Format> own_dy(params, own_channel, lane);
  const int* const dy_table = reinterpret_cast<const int*>(smem + shared.layout.dy_table);
  // Slots are 16 bytes of a chunk of fp32's parts, or rows in the swizzle of a box.
  const int slot_units = Format::SPLITS ? 1 : plan.row_bytes / 16;
  const uint32_t high = Format::ROUNDS    ? hopper::kRowsDescriptorHigh
                        : Format::SPLITS  ? plan.chunk_bytes / 16
                        : slot_units == 1 ? plan.block_bytes / 16
                                          : 8 * slot_units | (slot_units == 8   ? 1u
                                                              : slot_units == 4 ? 2u
                                                                                : 3u)
                                                                 << 30;
  const uint32_t leading = Format::SPLITS || slot_units == 1 ? 128 : plan.block_bytes;
  const uint32_t of_part = CHUNKS * (plan.chunk_bytes / 16);  // from part to part of x
  const uint32_t image_units = Format::ROUNDS ? COLUMNS / 4 * plan.slots : slot_units * phases_of(plan) * plan.slots;
  hopper::wait_for_prerequisites();  // a preceding kernel may still read the workspace
  RingPosition ring, part;
#pragma unroll 1
  for (int number = blockIdx.x; number < plan.jobs; number += gridDim.x) {
    const Job job = locate_job(params, number);
    uint32_t tap_slots[TAPS];
#pragma unroll
    for (int t = 0; t < TAPS; ++t) tap_slots[t] = params.tap_units[job.block_t * TAPS + t];
    float acc[TAPS][COLUMNS / 2];
    uint32_t a[SETS][Format::OPERANDS][4];
    int keep = 0;
    // In 16 bits every product adds, the first one to zeros: to choose would take an instruction more for each.
    hopper::wgmma_start<Format::BYTES == 2>(acc);
    const auto finish = [&] {
      hopper::wgmma_wait<0>();
#pragma unroll
      for (int t = 0; t < TAPS; ++t) hopper::wgmma_settle(acc[t]);
    };
    // Full accuracy: sums of chains of few steps, which ordinary additions add.
    [[maybe_unused]] float sums[PARTS == 3 ? TAPS : 1][PARTS == 3 ? COLUMNS / 2 : 1] = {};
    int chained = 0;
    const auto end_chain = [&] {
      finish();
      if constexpr (PARTS == 3) {
#pragma unroll
        for (int t = 0; t < TAPS; ++t)
#pragma unroll
          for (int i = 0; i < COLUMNS / 2; ++i) sums[t][i] += keep != 0 ? acc[t][i] : 0;
        keep = chained = 0;
      }
    };
    // By halves, so that nothing is too large or too small on the way.
    const auto scale_sums = [&](int exponent) {
      const float first = power_of_two(exponent / 2), second = power_of_two(exponent - exponent / 2);
#pragma unroll
      for (int t = 0; t < TAPS; ++t)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) acc[t][i] = acc[t][i] * first * second;
    };
    // The stage that pending products may read is given back when the next ones are under way.
    int before = -1, part_before = 0;
    const auto give_back = [&] {
      __syncwarp();
      if (before >= 0 && lane == 0) {
        hopper::barrier_arrive(shared.stage(before) + 8);
        if (Format::SPLITS) hopper::barrier_arrive(shared.part(part_before) + 8);
      }
      before = -1;
    };
    int tile = job.first_tile - 1, image = images - 1, step = steps - turns + (by_turns ? warpgroup : 0);
    uint32_t dy_image = 0, x_image = 0;  // where these begin; x in a descriptor
    const int* table = nullptr;
    int left = 0;
    uint32_t scales = 0;  // of the stage
    // Goes on to the warpgroup's next step. Returns false if there is none.
    const auto advance = [&] {
      for (step += turns; step >= steps;) {
        step -= steps;
        if (++image < images) {
          dy_image += own_dy.image_bytes;
          x_image += image_units;
          table += plan.dy_slots;
          continue;
        }
        image = 0;
        if (tile >= job.first_tile) {
          if (before >= 0) {  // this stage had no step of the warpgroup
            hopper::wgmma_wait<0>();
            give_back();
          }
          before = ring.slot;
          part_before = part.slot;
          if (SETS == 1) give_back();
          ring.next(plan.stages);
          part.next(plan.part_stages);
        }
        if (++tile == job.last_tile) return false;
        const uint32_t barrier = Format::SPLITS   ? shared.part(part.slot)
                                 : Format::ROUNDS ? shared.rounded(ring.slot)
                                                  : shared.stage(ring.slot);
        const uint32_t parity = Format::SPLITS ? part.parity : ring.parity;
        // Those who load or split may wait for the stage before.
        if (before >= 0 && __any_sync(~0u, !hopper::barrier_ended(barrier, parity))) {
          hopper::wgmma_wait<0>();
          give_back();
        }
        hopper::barrier_wait(barrier, parity);
        if (Format::SPLITS || Format::ROUNDS) hopper::barrier_wait(shared.stage(ring.slot), ring.parity);
        const uint32_t stage = shared.base + ring.slot * plan.stage_bytes;
        const Place at = locate_tile(params, tile);
        dy_image = stage + (plan.dy_planes ? (at.p * params.Q + at.q) % (16 / Format::BYTES) * Format::BYTES : 0);
        const uint32_t x_stage =
            Format::SPLITS ? shared.base + shared.layout.parts + part.slot * plan.part_bytes : stage + plan.dy_bytes;
        x_image = hopper::descriptor(hopper::of_own_block(x_stage), leading);
        if constexpr (Format::CONTAINS) {
          const int before_scales = exponent_of_sums(scales);
          hopper::load_shared(scales, shared.scales(part.slot));
          if (const int more = exponent_of_sums(scales) - before_scales; more != 0 && keep != 0) {
            finish();
            scale_sums(more);
          }
        }
        table = dy_table;
        left = plan.rows == 1 ? min(plan.columns, params.Q - at.q) : plan.pitch * min(plan.rows, params.P - at.p);
      }
      return true;
    };
    // One step. With two sets, its operands come while the products of the step before are under way. The compiler
    // knows `set`.
    const auto multiply_step = [&](int set) {
      if (!advance()) return false;
      if (PARTS == 3 && chained++ == kMostExactSteps) end_chain();
      const bool contained = Format::CONTAINS && (scales & 1) != 0;
      if constexpr (Format::ROUNDS)
        load_rounded_dy<Format>(own_dy, dy_image + step * own_dy.step_bytes, a[set]);
      else
        load_dy<Format>(own_dy, dy_image + step * own_dy.step_bytes, table + step * kStepPixels + lane % 4 * 2,
                        left - step * kStepPixels - lane % 4 * 2,
                        Format::CONTAINS ? bits_float(scales & 0xff800000u) : kScale, contained, a[set]);
      const uint32_t b = hopper::uniform(x_image + step * (Format::ROUNDS ? COLUMNS * 8 : kStepPixels * slot_units));
      if constexpr (Format::ROUNDS) {
        hopper::wgmma_fence();
#pragma unroll
        for (int i = 0; i < Format::OPERANDS; ++i)
          hopper::WgmmaRegisters<float, COLUMNS>::multiply(acc[0], a[set][i], b + 2 * i, i == 0 ? keep : 1, high);
        hopper::wgmma_commit();
      } else if (contained) {
        hopper::wgmma_fence();
#pragma unroll
        for (int t = 0; t < TAPS; ++t)
          hopper::WgmmaRegistersTransposed<Half, COLUMNS>::multiply(acc[t], a[set][0], b + tap_slots[t], keep, high);
        hopper::wgmma_commit();
      } else {
        hopper::wgmma_fence();
        // The smallest products first; the taps in turn, as an instruction waits for the one before on the same sums.
#pragma unroll
        for (int order = PARTS - 1; order >= 0; --order)
#pragma unroll
          for (int i = order; i >= 0; --i)
#pragma unroll
            for (int t = 0; t < TAPS; ++t)
              hopper::WgmmaRegistersTransposed<typename Format::Operand, COLUMNS>::multiply(
                  acc[t], a[set][i], b + tap_slots[t] + (order - i) * of_part,
                  Format::BYTES == 4 && order == PARTS - 1 && i == order ? keep : 1, high);
        hopper::wgmma_commit();
      }
      keep = 1;
      hopper::wgmma_wait<SETS - 1>();
      if (before >= 0) give_back();
      return true;
    };
    while (multiply_step(0) && multiply_step(SETS - 1)) {
    }
    const bool has_sums = keep != 0;
    end_chain();
    give_back();
    if constexpr (Format::CONTAINS) scale_sums(-exponent_of_sums(scales));
    const auto sum_of = [&](int t, int i) {
      constexpr float kBack = PARTS == 1 || Format::CONTAINS ? 1 : 1 / (kScale * kScale);
      if constexpr (PARTS == 3) return sums[t][i] * kBack;
      return has_sums ? acc[t][i] * kBack : 0;  // a warpgroup that had no step still stores its sums
    };
    const int of_part = by_turns ? 2 * job.part + warpgroup : job.part;
    const int first_c = job.block_c * COLUMNS + lane % 4 * 2, channels = row_channels(plan);
    const int k = job.tile_k * plan.channels + own_channel + lane / 4;  // in the group
    const int64_t row_k = static_cast<int64_t>(job.group) * plan.tiles_k * plan.channels + k;
    const int64_t row = static_cast<int64_t>(params.R) * params.S * channels;
    float* const to = params.sums_ptr + (of_part * params.rows + row_k) * row + first_c;
    const auto place = [&](int t, int j, int i) {
      return to + 8 * i * row + (job.block_t * TAPS + t) * channels + 8 * j;
    };
    float finite = 0;  // or NaN, if a sum is not
    const int taps = params.R * params.S - job.block_t * TAPS;
#pragma unroll
    for (int t = 0; t < TAPS; ++t)
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float low = sum_of(t, 4 * j + 2 * i), high = sum_of(t, 4 * j + 2 * i + 1);
          finite += low * 0.f + high * 0.f;
          if (t < taps) *reinterpret_cast<float2*>(place(t, j, i)) = make_float2(low, high);
        }
    if (finite == 0) continue;
#pragma unroll 1
    for (int number = 0; number < TAPS * COLUMNS / 2; ++number) {
      const int t = number / (COLUMNS / 2), j = number / 4 % CHUNKS, i = number / 2 % 2, e = number % 2;
      const int own_k = k + 8 * i, c = first_c + 8 * j + e;
      if (t >= taps || own_k >= params.group_k || c >= params.group_c) continue;
      float& sum = place(t, j, i)[e];
      if (sum * 0.f != 0)
        sum = exact_sum<Format>(params, job, turns, by_turns ? warpgroup : 0, own_k, c, job.block_t * TAPS + t);
    }
  }
}

template <typename Format, int CHUNKS, int TAPS>
__global__ void __launch_bounds__(Format::THREADS, 1) hopper_wgrad_kernel(const __grid_constant__ Params params) {
#if defined(MODELNEW_SM90A)
  extern __shared__ __align__(1024) uint8_t modelnew_hopper_wgrad_smem[];
  uint8_t* const smem = modelnew_hopper_wgrad_smem;
  const Plan& plan = params.plan;
  if (Format::BYTES == 4 && params.done != nullptr) {
    hopper::wait_for_prerequisites();
    if (*params.done != 0) return;
  }
  const Shared shared{hopper::smem_address(smem), shared_layout(plan)};
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int stage = 0; stage < kMostStages; ++stage) {
      hopper::barrier_init(shared.stage(stage), 1);
      hopper::barrier_init(shared.stage(stage) + 8, kMultiplyingThreads / 32);
      hopper::barrier_init(shared.raw(stage), 1);
      hopper::barrier_init(shared.raw(stage) + 8, Format::SPLITTING / 32);
      if (stage >= kMostPartStages) continue;
      hopper::barrier_init(shared.part(stage), Format::SPLITTING / 32);
      hopper::barrier_init(shared.part(stage) + 8, kMultiplyingThreads / 32);
    }
    *reinterpret_cast<uint4*>(smem + shared.layout.nothing) = uint4{};
  }
  // Slots behind boxes stay zeros, but for x that is transposed in place: dy has zeros there, too.
  for (int i = threadIdx.x * 16; plan.has_gaps && i < shared.layout.dy_table; i += Format::THREADS * 16)
    *reinterpret_cast<uint4*>(smem + i) = uint4{};
  if (plan.dy_planes && !Format::ROUNDS) {
    int* const table = reinterpret_cast<int*>(smem + shared.layout.dy_table);
    for (int i = threadIdx.x; i < plan.images * plan.dy_slots; i += Format::THREADS) {
      const int packed = dy_pixel(params, i, kStepPixels, kStepPixels), image = packed >> 20, row = packed >> 10 & 1023;
      const int column = packed & 1023;
      table[i] = packed < 0 ? -1 : Format::BYTES * (image * plan.channels * plan.dy_run + row * params.Q + column);
    }
  }
  if (plan.x_planes && !Format::ROUNDS) {
    Slot* const table = reinterpret_cast<Slot*>(smem + shared.layout.x_table);
    const int box_size = plan.shape.chunks * 8 * plan.run;
    for (int i = threadIdx.x; i < all_slots(plan); i += Format::THREADS) {
      const int packed = x_pixel(params, i), image = packed >> 20, row = packed >> 10 & 1023, column = packed & 1023;
      const InBox at = place_in_box(params, row, column);
      table[i] = {-1, 0, 0};
      if (packed >= 0)
        table[i] = {packed, static_cast<uint32_t>(first_row(params, at.number)),
                    static_cast<uint32_t>(Format::BYTES * ((image * plan.x_boxes + at.number) * box_size + at.offset))};
    }
  }
  hopper::fence_async();
  __syncthreads();  // barriers, zeros and tables are there
  if (threadIdx.x >= kMultiplyingThreads) {
    hopper::registers_give_back<Format::OTHER_REGISTERS>();
    hopper::wait_for_prerequisites();
    if (threadIdx.x == kMultiplyingThreads)
      load<Format, CHUNKS>(params, shared);
    else if (Format::ROUNDS && threadIdx.x >= kMultiplyingThreads + 32)
      round_all<Format, CHUNKS>(params, shared);
    else if (Format::SPLITS && threadIdx.x >= kMultiplyingThreads + 32)
      split_all<Format, CHUNKS>(params, shared, smem);
  } else {
    hopper::registers_take<Format::MULTIPLYING_REGISTERS>();
    multiply<Format, CHUNKS, TAPS>(params, shared, smem);
    hopper::launch_dependents();
  }
#endif
}

// A thread for 16 bytes of the copy: neighbouring channels of a pixel, or pixels of a plane.
template <typename Stored>
__global__ void __launch_bounds__(hopper::kCopyThreads)
    hopper_wgrad_order_kernel(const __grid_constant__ OrderParams params) {
  constexpr int VALUES = 16 / static_cast<int>(sizeof(Stored));
  struct alignas(16) Piece {
    Stored values[VALUES];
  };
  hopper::wait_for_prerequisites();
  hopper::launch_dependents();
  const int64_t number = static_cast<int64_t>(blockIdx.x) * hopper::kCopyThreads + threadIdx.x;
  if (number * VALUES >= params.elements || (params.done != nullptr && *params.done != 0)) return;
  const int i = static_cast<int>(number * VALUES), outer = quotient(i, params.by_inner);
  const int inner = i - outer * params.inner;
  const int row = params.planes ? quotient(inner, params.by_w) : quotient(outer, params.by_w);
  int w = (params.planes ? inner : outer) - row * params.W;
  const int image = quotient(params.planes ? outer : row, params.planes ? params.by_c : params.by_h);
  int c = params.planes ? outer - image * params.C : inner, h = params.planes ? row : row - image * params.H;
  const int fold_h = static_cast<int>(params.by_fold_h.divisor), fold_w = static_cast<int>(params.by_fold_w.divisor);
  const int row_c = quotient(c, params.by_fold_w);
  int own_c = quotient(row_c, params.by_fold_h), r = row_c - own_c * fold_h, s = c - row_c * fold_w;
  const Stored* const from = static_cast<const Stored*>(params.from_ptr) + image * params.stride[0];
  Piece piece;
#pragma unroll
  for (int j = 0; j < VALUES; ++j) {
    const int own_h = h * params.step_h - params.pad_h + r * params.dilation_h;
    const int own_w = w * params.step_w - params.pad_w + s * params.dilation_w;
    const bool exists = c < params.C && h < params.H && is_within(own_h, params.from_h);
    piece.values[j] = load_if(exists && is_within(own_w, params.from_w),
                              from + (own_c * params.stride[1] + own_h * params.stride[2] + own_w * params.stride[3]));
    if (params.planes && ++w == params.W) w = 0, ++h;
    if (!params.planes) ++c;
    if (!params.planes && ++s == fold_w) s = 0, ++r;
    if (r == fold_h) r = 0, ++own_c;
  }
  reinterpret_cast<Piece*>(params.to_ptr)[number] = piece;
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// ---- Host: plans ----

struct Alignment {
  uint64_t x, dy;
};

// The estimate, in cycles of an SM, fitted to the times of many plans (docs/lab/wgrad.md).
struct Costs {
  double stage_bytes, memory_bytes;  // per cycle
  double sum, step;
  double split, split_stage;  // a slot of a chunk; what a stage takes besides
};
constexpr Costs kPixels16{46, 16.8, 0.68, 3, 0, 0};
constexpr Costs kPlanes16{24, 16.8, 0.68, 280, 0.86, 390}, kWords16{24, 16.8, 0.68, 200, 0.86, 390};
constexpr Costs kOfFloat32{25, 22.6, 1.08, 93, 1.5, 430}, kContained{19, 22.6, 1.08, 38, 1.06, 490};
constexpr Costs kRounded{34.6, 14.1, 0.59, 47, 0.49, 331}, kShifted{31, 14.1, 0.59, 47, 0.49, 331};
constexpr double kCallCycles = 13400, kStageCycles = 600, kCopyCycles = 6500, kCopiedBytes = 21;
constexpr double kLeastColumns = 30, kSeen = 30;  // of wgmma; for 128 values of dy

// Sizes and strides of x or dy, for a copy or a map.
struct Tensor {
  int64_t stride[4];
  int64_t N;
  int C, H, W;
};

inline Tensor x_of(const Problem& p) {
  return {{p.x_stride[0], p.x_stride[1], p.x_stride[2], p.x_stride[3]}, p.N, p.C, p.H, p.W};
}
inline Tensor dy_of(const Problem& p) {
  return {{p.y_stride[0], p.y_stride[1], p.y_stride[2], p.y_stride[3]}, p.N, p.K, p.P, p.Q};
}

inline int64_t padded(int64_t size, int64_t multiple) { return ceil_div(size, multiple) * multiple; }

// Whether boxes can read the channels of pixels, or planes, in place.
inline bool is_step(int64_t bytes, int64_t size) { return size == 1 || (bytes > 0 && bytes % 16 == 0); }
inline bool has_pixels(const Tensor& of, int bytes, uint64_t address) {
  return of.C * bytes % 16 == 0 && (of.stride[1] == 1 || of.C == 1) && is_step(of.stride[0] * bytes, of.N) &&
         is_step(of.stride[2] * bytes, of.H) && is_step(of.stride[3] * bytes, of.W) && address % 16 == 0;
}
inline bool has_planes(const Tensor& of, int bytes, uint64_t address) {
  return hopper::are_planes(of.stride, of.H, of.W) && int64_t{of.H} * of.W * bytes % 16 == 0 &&
         is_step(of.stride[0] * bytes, of.N) && is_step(of.stride[1] * bytes, of.C) && address % 16 == 0;
}

// Whether boxes can read planes in place that do not all begin at a multiple of 16 bytes. From row to row they go on by
// `rest` pixels less than a plane, which must not be nothing.
inline bool has_shifted_planes(const Tensor& of, int bytes, uint64_t address) {
  const int64_t rest = of.stride[1] % piece_of(bytes);
  return hopper::are_planes(of.stride, of.H, of.W) && of.stride[1] >= std::max(int64_t{of.H} * of.W, rest + 1) &&
         (rest & (rest - 1)) == 0 && is_step(of.stride[0] * bytes, of.N) && address % 16 == 0;
}

// A copy: of planes, whole 16 bytes each, or of 16 bits in channels_last.
inline int64_t copied_bytes(const Tensor& of, int bytes, bool planes) {
  return planes ? padded(bytes * of.N * of.C * padded(int64_t{of.H} * of.W, 16 / bytes), 16)
                : hopper::copied_bytes(of.N, of.C, of.H, of.W);
}
inline void set_copied_strides(const Tensor& of, int bytes, bool planes, int64_t (&stride)[4]) {
  if (!planes) {
    hopper::set_copied_strides(of.C, of.H, of.W, stride);
  } else {
    stride[3] = 1, stride[2] = of.W;
    stride[1] = padded(int64_t{of.H} * of.W, 16 / bytes);
    stride[0] = stride[1] * of.C;
  }
}

inline int64_t copied_bytes(const Problem& problem, const Plan& plan) {
  return (plan.copies_x ? copied_bytes(x_of(problem), plan.bytes, plan.x_planes) : 0) +
         (plan.copies_dy ? copied_bytes(dy_of(problem), plan.bytes, plan.dy_planes) : 0);
}

inline int64_t sums_of(const Problem& problem, const Plan& plan) {
  return static_cast<int64_t>(plan.slices) * plan.parts * sums_of_part(plan) * problem.groups * plan.tiles_k *
         plan.channels * problem.R * problem.S * row_channels(plan);
}

// The sums in the workspace; copies come behind them.
inline int64_t sum_bytes(const Problem& problem, const Plan& plan) {
  return static_cast<int64_t>(sizeof(float)) * sums_of(problem, plan);
}

// With a fold an axis has no stride: pixel i of a copy of x has as channels what the first `fold` taps read for output
// i. Tap t of dw is channel t % fold of tap t / fold. With 7 taps, a stride of 2 and a fold of 4:
//
//   tap of dw    0 1 2 3   4 5 6
//   channel      0 1 2 3   0 1 2
//   tap          0         1: two pixels on
inline Problem folded(Problem problem, const Plan& plan) {
  const auto fold_axis = [&](int fold, int outputs, int& taps, int& size, int& stride, int& pad, int& dilation) {
    if (fold == 0) return;
    problem.C *= fold;
    taps = static_cast<int>(ceil_div(taps, fold));
    dilation = taps > 1 ? fold / taken_stride(stride, outputs) : 1;
    size = outputs + (taps - 1) * dilation;
    stride = 1, pad = 0;
  };
  fold_axis(plan.fold_h, problem.P, problem.R, problem.H, problem.stride_h, problem.pad_h, problem.dilation_h);
  fold_axis(plan.fold_w, problem.Q, problem.S, problem.W, problem.stride_w, problem.pad_w, problem.dilation_w);
  return problem;
}

// The problem that kernels solve: of copies, folded, with pixels in fewer rows.
inline Problem as_planned(Problem problem, const Plan& plan) {
  problem = folded(problem, plan);
  if (plan.copies_x) set_copied_strides(x_of(problem), plan.bytes, plan.x_planes, problem.x_stride);
  if (plan.copies_dy) set_copied_strides(dy_of(problem), plan.bytes, plan.dy_planes, problem.y_stride);
  if (problem.R * problem.S != 1 || has_stride(problem) || problem.pad_h != 0 || problem.pad_w != 0 ||
      problem.H != problem.P || problem.W != problem.Q)
    return problem;
  problem.stride_h = problem.stride_w = 1;  // a stride over a single output would be one over several
  const auto joins = [&](const int64_t (&stride)[4], int outer, int inner, int64_t size) {
    return stride[outer] == stride[inner] * size;
  };
  const int64_t plane = int64_t{problem.H} * problem.W;
  if (problem.H > 1 && (!joins(problem.x_stride, 2, 3, problem.W) || !joins(problem.y_stride, 2, 3, problem.Q)))
    return problem;
  problem.H = problem.P = 1;
  problem.W = problem.Q = static_cast<int>(plane);
  if (plan.x_planes || plan.dy_planes || problem.N * plane >= int64_t{1} << 30) return problem;
  if (problem.N > 1 && (!joins(problem.x_stride, 0, 3, plane) || !joins(problem.y_stride, 0, 3, plane))) return problem;
  problem.W = problem.Q = static_cast<int>(problem.N * plane);
  problem.N = 1;
  return problem;
}

// `stages` of a block.
inline double estimate(const Problem& problem, int sms, const Plan& plan, double stages) {
  // Whether each pair of pixels of dy that a thread loads is a word.
  const bool words = plan.dy_straight && plan.shape.taps > 1 && problem.y_stride[1] % 2 == 0 &&
                     (problem.P == 1 || problem.Q % 2 == 0) && (plan.tiles_q == 1 || plan.columns % 2 == 0);
  const Costs& costs = plan.rounds       ? plan.shifted ? kShifted : kRounded
                       : plan.contains   ? kContained
                       : plan.bytes == 4 ? kOfFloat32
                       : plan.splits     ? words ? kWords16 : kPlanes16
                                         : kPixels16;
  const int times = plan.contains ? 1 : plan.rounds ? 4 : plan.parts_of_x * (plan.parts_of_x + 1) / 2;
  const double products = plan.shape.taps * times *
                          std::max<double>(kLeastColumns, 8 * plan.shape.chunks);  // of two warpgroups in a step
  const double steps = plan.images * plan.steps / (plan.channels == 64 ? 2.0 : 1.0);
  const double multiplied = steps * (products + costs.step);
  const double loaded = (plan.dy_loaded + plan.x_loaded) / costs.stage_bytes;
  const double split = costs.split_stage + costs.split * all_slots(plan) * plan.shape.chunks +
                       (plan.contains ? kSeen * plan.images * plan.steps * kStepPixels * plan.channels / 128 : 0);
  // A stride may leave pixels out.
  const double pixels =
      problem.N * std::min(1.0 * problem.H * problem.W, 1.0 * problem.P * problem.Q * problem.R * problem.S);
  const double bytes =
      plan.bytes * (pixels * problem.C + static_cast<double>(problem.N) * problem.P * problem.Q * problem.K);
  const int64_t copied = copied_bytes(problem, plan);
  const double accesses = plan.fold_h + plan.fold_w > 0 ? 3 : 2;  // of what is copied; a fold reads in no order
  const double copying = copied == 0 ? 0 : kCopyCycles + accesses * copied / sms / kCopiedBytes;
  const double reading = bytes / (plan.grid > 0 ? plan.grid : sms) / costs.memory_bytes;
  return kCallCycles +
         plan.slices * (copying + std::max(stages * (std::max({multiplied, split, loaded}) + kStageCycles), reading)) +
         costs.sum * sums_of(problem, plan) / sms;
}

// Demands on a plan beyond being the cheapest one; the values here demand nothing.
struct Wish {
  int shape = -1, channels = 0, parts = 0, images = 0, rows = 0, columns = 0, contains = -1, rounds = -1, fold = -1;
};

// Columns of a window of pixels that a box spans.
inline int box_width(const Plan& plan, int stride_w) {
  return plan.rounds ? std::min(plan.window_w, kLine * stride_w) : plan.window_w;
}

// The numbers that follow from the outputs of a stage. Returns false where a stage does not fit.
inline bool complete(const Problem& problem, Plan& plan) {
  const int stride_h = taken_stride(problem.stride_h, problem.P), stride_w = taken_stride(problem.stride_w, problem.Q);
  const int taps = plan.shape.taps, R = problem.R, S = problem.S, columns = 8 * plan.shape.chunks;
  const bool in_row = S % taps == 0, in_rows = taps % S == 0;  // a block's taps
  plan.span_r = in_row ? 1 : std::min(R, in_rows ? taps / S : (taps + S - 2) / S + 1);
  plan.span_s = in_row ? taps : S;
  plan.tiles_p = static_cast<int>(ceil_div(problem.P, plan.rows));
  plan.tiles_q = static_cast<int>(ceil_div(problem.Q, plan.columns));
  const int64_t reach_h = int64_t{plan.span_r - 1} * problem.dilation_h;
  const int64_t reach_w = int64_t{plan.span_s - 1} * problem.dilation_w;
  int64_t pitch = plan.columns + reach_w / stride_w;
  const bool dy_by_rows = plan.tiles_q > 1 && plan.rows > 1;
  if (dy_by_rows && plan.dy_planes) return false;
  const bool lines = plan.rounds && plan.x_planes;
  if (lines && plan.tiles_q > 1 && plan.columns % step_pixels(plan) != 0) return false;
  if (plan.rounds && !lines && (plan.images > 1 || (plan.rows > 1 && plan.rows * pitch > kLine))) return false;
  if (dy_by_rows) pitch = padded(pitch, 8);  // each row's box begins with a turn of the swizzle
  const int64_t window_h = (plan.rows + reach_h / stride_h) * stride_h, window_w = pitch * stride_w;
  if (window_h >= kMostSide || window_w >= kMostSide || plan.images >= kMostSide) return false;
  plan.pitch = static_cast<int>(pitch);
  plan.window_h = static_cast<int>(window_h), plan.window_w = static_cast<int>(window_w);
  plan.phases_h = static_cast<int>(std::min<int64_t>(stride_h, reach_h + 1));
  plan.phases_w = static_cast<int>(std::min<int64_t>(stride_w, reach_w + 1));
  plan.steps = static_cast<int>(ceil_div((plan.rows - 1) * plan.pitch + plan.columns, step_pixels(plan)));
  const int64_t farthest = reach_h / stride_h * pitch + reach_w / stride_w;
  plan.slots = static_cast<int>(
      padded(std::max<int64_t>(window_h / stride_h * pitch, plan.steps * step_slots(plan) + farthest), 8));
  int64_t dy_loaded = 0, x_loaded = 0, dy_bytes = 0, raw_bytes = 0, x_bytes = 0;
  if (lines) {
    plan.dy_slots = plan.slots;
    dy_bytes = dy_loaded = int64_t{plan.images} * plan.channels * plan.slots * plan.bytes;
    x_bytes = x_loaded = int64_t{plan.images} * columns * plan.slots * plan.bytes;
  } else if (plan.dy_planes) {
    // Lanes of a warp read eight channels, whose rows are 8 or 24 words apart in the banks.
    const int64_t run = plan.tiles_q == 1 ? (plan.rows - 1) * problem.Q + plan.columns : plan.columns;
    const int64_t piece = piece_of(plan.bytes);
    const bool in_pieces = (plan.tiles_p == 1 || int64_t{plan.rows} * problem.Q % piece == 0) &&
                           (plan.tiles_q == 1 || plan.columns % piece == 0);
    const int shift = most_shift(plan, problem.y_stride[1], plan.bytes);
    plan.dy_run = static_cast<int>(padded(run + (in_pieces ? 0 : piece - 1) + shift - 8, 16) + 8);
    plan.dy_slots = plan.steps * kStepPixels;
    plan.dy_straight = plan.bytes == 2 ? pitch == plan.columns || plan.rows == 1
                                       : in_pieces && pitch == plan.columns && shift == 0;
    dy_bytes = dy_loaded = int64_t{plan.images} * plan.channels * plan.dy_run * plan.bytes;
    if (plan.dy_run > kMostBox) return false;
  } else {
    const int64_t boxes = plan.tiles_q == 1 ? plan.rows * pitch : int64_t{plan.rows} * plan.columns;
    plan.dy_slots = static_cast<int>(padded(std::max<int64_t>(plan.steps * step_slots(plan), plan.rows * pitch), 8));
    plan.dy_block_bytes = plan.images * plan.dy_slots * hopper::kBoxRowBytes;
    dy_bytes = int64_t{plan.channels} * plan.bytes / hopper::kBoxRowBytes * plan.dy_block_bytes;
    dy_loaded = plan.images * boxes * plan.channels * plan.bytes;
    if (pitch > kMostBox || plan.rows > kMostBox) return false;
  }
  const int64_t slots = all_slots(plan);
  plan.has_gaps = !plan.dy_planes &&
                  (plan.dy_slots > plan.rows * pitch || dy_by_rows || (plan.tiles_q > 1 && pitch > plan.columns));
  if (plan.x_planes && !lines) {
    // As many rows in a box as there are room for, where the window has whole ones.
    const int64_t piece = piece_of(plan.bytes), more = piece - 1 + most_shift(plan, problem.x_stride[1], plan.bytes);
    const int64_t fit = (kMostBox - more - window_w) / problem.W + 1;
    const bool whole_rows = plan.tiles_q == 1 && plan.phases_h == stride_h;
    plan.box_rows = whole_rows ? static_cast<int>(std::min(std::max(fit, int64_t{1}), window_h)) : 1;
    plan.x_boxes = static_cast<int>(ceil_div(window_h / stride_h * plan.phases_h, plan.box_rows));
    plan.run = static_cast<int>(padded((plan.box_rows - 1) * problem.W + window_w + more, piece));
    raw_bytes = x_loaded = int64_t{plan.images} * plan.x_boxes * columns * plan.run * plan.bytes;
    if (plan.run > kMostBox) return false;
  } else if (!lines) {
    const int all_bytes = columns * plan.bytes;
    plan.row_bytes = std::min(hopper::kBoxRowBytes, all_bytes & -all_bytes);
    plan.block_bytes = static_cast<int>((plan.rounds ? kLine : slots) * plan.row_bytes);
    (plan.splits ? raw_bytes : x_bytes) = slots * all_bytes;
    x_loaded = int64_t{plan.images} * phases_of(plan) * (window_h / stride_h) * pitch * all_bytes;
    if (plan.rounds && pitch > kLine) x_loaded = slots * all_bytes;
    plan.has_gaps |= plan.slots > window_h / stride_h * pitch;
    if (window_h > kMostBox || box_width(plan, stride_w) > kMostBox || stride_h > kMostStep || stride_w > kMostStep)
      return false;
  }
  if (plan.splits) x_bytes = int64_t{plan.parts_of_x} * plan.shape.chunks * slots * 16;
  plan.part_bytes = static_cast<int>(padded(x_bytes, kRegionBytes));
  const int64_t stage = padded(dy_bytes, kRegionBytes) + (plan.splits ? 0 : plan.part_bytes);
  if (stage + raw_bytes > kSharedBytes) return false;
  plan.dy_bytes = static_cast<int>(padded(dy_bytes, kRegionBytes));
  plan.dy_seen = static_cast<int>(dy_bytes);
  plan.raw_bytes = static_cast<int>(padded(raw_bytes, kRegionBytes));
  plan.chunk_bytes = static_cast<int>(slots * 16);
  plan.stage_bytes = static_cast<int>(stage);
  plan.dy_loaded = static_cast<int>(dy_loaded), plan.x_loaded = static_cast<int>(x_loaded);
  // Two stages of 16 bits are under way while one is multiplied. Of fp32, x is, and dy of the stage in parts as well.
  const auto fits = [&](int part_stages) {
    for (plan.stages = kMostStages; plan.stages >= 3; --plan.stages) {
      plan.raw_stages = plan.splits ? plan.stages - 1 : 0;
      plan.part_stages = plan.splits ? part_stages : 0;
      plan.smem_bytes = shared_layout(plan).end;
      if (plan.smem_bytes <= kSharedBytes) return true;
    }
    return false;
  };
  const int64_t tiles = ceil_div(problem.N, plan.images) * plan.tiles_p * plan.tiles_q;
  plan.tiles = static_cast<int>(tiles);
  return (fits(kMostPartStages) || fits(kMostPartStages - 1)) && tiles < 1 << 30;
}

// Tries all numbers of parts.
inline void divide(const Problem& problem, int sms, const Wish& wish, Plan plan, Plan& best, bool& found) {
  const int64_t tiles = int64_t{problem.groups} * plan.tiles_k * plan.blocks_c * plan.blocks_t;
  const int64_t pixels = int64_t{plan.tiles} * plan.images * plan.steps * step_pixels(plan);
  const int64_t least = ceil_div(pixels, hopper::most_chained(plan.bytes == 2) * sums_of_part(plan));
  const int64_t most = std::max(least, ceil_div(4 * sms, tiles)), last = std::min<int64_t>(most, plan.tiles);
  plan.parts = static_cast<int>(std::min<int64_t>(least, plan.tiles));
  if (found && estimate(problem, sms, plan, static_cast<double>(tiles) * plan.tiles / sms) >= best.cycles) return;
  for (int64_t parts = plan.parts; parts <= last; ++parts) {
    if (wish.parts > 0 && parts != wish.parts) continue;
    if (tiles * parts >= 1 << 30) break;
    plan.parts = static_cast<int>(parts);
    plan.jobs = static_cast<int>(tiles * parts);
    if (sum_bytes(problem, plan) > kMostSumBytes) break;
    plan.grid = std::min(plan.jobs, sms);
    const int64_t stages = ceil_div(plan.jobs, sms) * ceil_div(plan.tiles, parts);
    plan.cycles = estimate(problem, sms, plan, static_cast<double>(stages));
    if (found && plan.cycles >= best.cycles) continue;
    best = plan;
    found = true;
  }
}

// How planes are read: by boxes, also of shifted ones, or, of 16 bits, copied to channels_last.
enum class Way { kPlanes, kShifted, kPixels };

// Adds the plans of a way and a fold to the search.
inline void search(const Problem& original, int sms, const Alignment& address, Way way, int fold_h, int fold_w,
                   const Wish& wish, Plan& best, bool& found) {
  Plan plan{};
  plan.fold_h = fold_h, plan.fold_w = fold_w;
  plan.bytes = element_bytes(original.dtype);
  const bool tf32 = plan.bytes == 4 && uses_tf32(original, Operator::kWgrad);
  const int parts = plan.bytes == 2 ? 1 : tf32 ? 2 : 3;
  int group_c = original.C / original.groups;
  const int group_k = original.K / original.groups;
  const bool folds = fold_h + fold_w > 0;
  const bool splits = plan.bytes == 4 || way != Way::kPixels;
  plan.shifted = way == Way::kShifted;
  bool shifts = false;  // some planes
  const auto prepare = [&](const Tensor& of, int of_group, uint64_t begin, bool folds, bool& planes, bool& copies) {
    const bool in_pieces = original.groups == 1 || of_group * plan.bytes % 16 == 0;
    const bool pixels = !folds && in_pieces && has_pixels(of, plan.bytes, begin);
    planes = splits && !(pixels && plan.bytes == 4);
    copies = planes ? folds || !has_planes(of, plan.bytes, begin) : !pixels;
    if (plan.shifted && planes && !folds && copies && of_group % piece_of(plan.bytes) == 0 &&
        has_shifted_planes(of, plan.bytes, begin))
      shifts = true, copies = false;
    const bool allowed = planes ? plan.bytes == 4 || folds || !copies : in_pieces;
    return allowed && int64_t{of.H} * of.W < 1 << 29;
  };
  if (!prepare(x_of(original), group_c, address.x, folds, plan.x_planes, plan.copies_x) ||
      !prepare(dy_of(original), group_k, address.dy, false, plan.dy_planes, plan.copies_dy) ||
      shifts != plan.shifted)
    return;
  // As many images at a time as find room in the copies, and whose pixels 32 bits count.
  Problem slice = original;
  slice.N = 1;
  const int64_t copied = copied_bytes(as_planned(slice, plan), plan);
  const int64_t most = std::min(((int64_t{1} << 30) - 1) / (int64_t{slice.P} * slice.Q),
                                copied == 0 ? original.N : kMostCopiedBytes / copied);
  if (most < 1) return;
  plan.slices = static_cast<int>(std::min(ceil_div(original.N, most), int64_t{1} << 20));
  slice.N = plan.slice_images = ceil_div(original.N, plan.slices);
  if (slice.N > most) return;
  const Problem problem = as_planned(slice, plan);
  group_c = problem.C / problem.groups;
  const int64_t taps = int64_t{problem.R} * problem.S;
  if (taps * group_c * problem.K >= int64_t{1} << 30 || taps > kMostTaps) return;
  // Planes whose pixels are one line, which no tap shifts.
  const bool lines = taps == 1 && problem.H == 1 && problem.P == 1 && problem.W == problem.Q && !has_stride(problem) &&
                     plan.x_planes && plan.dy_planes;
  const bool pixels = !plan.x_planes && !plan.dy_planes && std::min(group_c, group_k) >= kLeastRounded;
  const bool may_round = tf32 && (lines || (pixels && (taps == 1 || has_stride(problem))));
  constexpr int kMostPixels = 256;  // of a stage
  for (int kind = 0; kind < (may_round ? 4 : 2); ++kind)  // tiles of 128 and 64 output channels; the same, rounded
    for (int i = 0; i < kTileShapeCount; ++i) {
      const int channels = kind % 2 == 0 ? 128 : 64;
      const bool rounds = kind > 1;
      if (wish.rounds >= 0 ? wish.rounds != (rounds ? 1 : 0) : may_round && taps == 1 && !rounds) continue;
      plan.channels = channels, plan.shape = kTileShapes[i];
      plan.rounds = rounds, plan.splits = splits && !rounds;
      plan.parts_of_x = rounds ? 1 : parts;
      if (!is_compiled(plan.shape, plan.parts_of_x, plan.splits, false, rounds)) continue;
      if (wish.shape >= 0 ? wish.shape != i : plan.shape.taps > 1 && taps == 1) continue;
      if (wish.channels > 0 && wish.channels != channels) continue;
      plan.tiles_k = static_cast<int>(ceil_div(group_k, channels));
      plan.blocks_c = static_cast<int>(ceil_div(group_c, 8 * plan.shape.chunks));
      plan.blocks_t = static_cast<int>(ceil_div(taps, plan.shape.taps));
      const auto consider = [&](int images, int rows, int columns) {
        if (images <= 0 || rows <= 0 || columns <= 0) return;
        plan.images = images;
        plan.rows = std::min(rows, problem.P), plan.columns = std::min(columns, problem.Q);
        if (!complete(problem, plan)) return;
        const bool may_contain = is_compiled(plan.shape, plan.parts_of_x, plan.splits, true, plan.rounds);
        for (const bool contains : {false, true}) {
          if (contains ? !may_contain || wish.contains == 0 : may_contain && wish.contains == 1) continue;
          plan.contains = contains;
          divide(problem, sms, wish, plan, best, found);
        }
      };
      if (wish.rows > 0) {
        consider(wish.images, wish.rows, wish.columns);
        continue;
      }
      const auto consider_rows = [&](int columns) {
        if (columns > kMostPixels) return;
        if (rounds) consider(1, kLine / columns, columns);
        const int most = std::min(problem.P, kMostPixels / columns);
        for (int rows = most; rows > 0; rows = rows > 4 ? rows * 3 / 4 : rows - 1) consider(1, rows, columns);
        if (columns == problem.Q && most == problem.P)
          for (int images = 16; images > 1; images /= 2)
            if (images * columns * problem.P <= kMostPixels && images <= problem.N)
              consider(images, problem.P, columns);
      };
      if (plan.shifted && rounds) {
        for (int i = 1; i <= kMostPixels / kShiftedLine; ++i) consider(1, 1, i * kShiftedLine);
        for (int images = 2; images <= problem.N && images * problem.Q <= kMostPixels; images *= 2)
          consider(images, 1, problem.Q);
        continue;
      }
      consider_rows(problem.Q);
      // Strips, of equal or convenient columns.
      for (int most : {240, 224, 192, 160, 136, 112, 96, 72, 64, 56, 48, 40, 32}) {
        if (most >= problem.Q) continue;
        consider_rows(most);
        const int equal = static_cast<int>(ceil_div(problem.Q, ceil_div(problem.Q, most)));
        consider_rows(equal);
        consider_rows(static_cast<int>(padded(equal, piece_of(plan.bytes))));
      }
    }
}

// Calls use(fold_h, fold_w) for folds that may be worth a copy of x: of few channels, which leave most of a chunk idle,
// and for 1x1 filters at a stride, of planes in TF32, where boxes would bring pixels that nobody reads.
template <typename Use>
void for_each_fold(const Problem& p, const Use& use) {
  use(0, 0);
  if (p.groups > 1) return;
  if (p.R == 1 && p.S == 1) {
    const bool pixels = has_pixels(x_of(p), 4, 0) || has_pixels(dy_of(p), 4, 0);
    if (has_stride(p) && !pixels && uses_tf32(p, Operator::kWgrad)) use(1, 1);
    return;
  }
  if (p.C > kMostFoldedFrom) return;
  // All taps of an axis, or blocks of them.
  const auto blocks = [](int fold, int taps, int stride, int dilation) {
    return stride > 1 && fold < taps && dilation == 1 ? fold : -1;
  };
  const int down = taken_stride(p.stride_h, p.P), right = taken_stride(p.stride_w, p.Q);
  for (int fold_h : {0, p.R, blocks(down, p.R, down, p.dilation_h)})
    for (int fold_w : {0, p.S, blocks(right, p.S, right, p.dilation_w), blocks(2 * right, p.S, right, p.dilation_w)})
      if (fold_h >= 0 && fold_w >= 0 && fold_h + fold_w > 0 && fold_h <= kMostSide && fold_w <= kMostSide)
        use(fold_h, fold_w);
}

inline bool make_plan(const Problem& problem, int sms, const Alignment& address, Plan& best, const Wish& wish = {}) {
  bool found = false;
  int number = 0;
  const bool halves = element_bytes(problem.dtype) == 2;
  for_each_fold(problem, [&](int fold_h, int fold_w) {
    if (wish.fold >= 0 && wish.fold != number++) return;
    for (Way way : {Way::kPixels, Way::kShifted, Way::kPlanes})
      if (halves || way != Way::kPixels) search(problem, sms, address, way, fold_h, fold_w, wish, best, found);
  });
  return found;
}

inline Params make_params(const Problem& problem, const Plan& plan) {
  Params params{};
  params.plan = plan;
  std::copy_n(problem.x_stride, 4, params.x_stride);
  std::copy_n(problem.y_stride, 4, params.dy_stride);
  params.N = problem.N;
  params.C = problem.C, params.group_c = problem.C / problem.groups, params.H = problem.H, params.W = problem.W;
  params.K = problem.K, params.group_k = problem.K / problem.groups, params.P = problem.P, params.Q = problem.Q;
  params.R = problem.R, params.S = problem.S;
  params.stride_h = taken_stride(problem.stride_h, problem.P);
  params.stride_w = taken_stride(problem.stride_w, problem.Q);
  params.pad_h = problem.pad_h, params.pad_w = problem.pad_w;
  params.dilation_h = problem.dilation_h, params.dilation_w = problem.dilation_w;
  params.rows = int64_t{problem.groups} * plan.tiles_k * plan.channels;
  const int taps = params.R * params.S, units = plan.splits ? 1 : plan.row_bytes / 16;
  for (int i = 0; i < plan.blocks_t * plan.shape.taps; ++i)
    params.tap_units[i] = units * slot_of_tap(params, first_tap(params, i / plan.shape.taps), std::min(i, taps - 1));
  params.by_tiles = make_divisor(int64_t{problem.groups} * plan.tiles_k * plan.blocks_c * plan.blocks_t);
  params.by_group_tiles = make_divisor(int64_t{plan.tiles_k} * plan.blocks_c * plan.blocks_t);
  params.by_tiles_k = make_divisor(plan.tiles_k), params.by_blocks_t = make_divisor(plan.blocks_t);
  params.by_tiles_p = make_divisor(plan.tiles_p), params.by_tiles_q = make_divisor(plan.tiles_q);
  params.by_pitch = make_divisor(plan.pitch), params.by_slots = make_divisor(plan.slots);
  params.by_image_slots = make_divisor(int64_t{phases_of(plan)} * plan.slots);
  params.by_steps = make_divisor(plan.steps), params.by_all_slots = make_divisor(all_slots(plan));
  return params;
}

// A plan of no cycles: there is none.
inline const Plan& plan_of(const Problem& problem, const Alignment& address) {
  thread_local Memo<Plan> memo;
  int sms = 0;
  const int gpu = find_gpu(sms);
  return memo.get(key_of(problem, Operator::kWgrad, address.x, address.dy, 0, gpu, sms), [&] {
    Plan plan{};
    make_plan(problem, sms, address, plan);
    return plan;
  });
}

// Clock cycles of a call, as far as the estimate goes. tma_wgrad compares them with its own.
inline double cycles(const Problem& problem, Operator) { return plan_of(problem, Alignment{}).cycles; }

inline const char* refusal(const Problem& problem, Operator op) {
  if (op != Operator::kWgrad) return "it computes gradients to weights only";
  if (problem.dtype == DType::kFloat64) return "it has no float64";
  int sms = 0;
  if (find_gpu(sms) != 90) return "it needs a Hopper GPU (compute capability 9.0)";
  return plan_of(problem, Alignment{}).cycles > 0
             ? nullptr
             : "no stage of it fits into shared memory, or it has too many pixels or weights";
}

inline Alignment alignment_of(const Pointers& pointers) {
  return {reinterpret_cast<uint64_t>(pointers.x), reinterpret_cast<uint64_t>(pointers.dy)};
}

inline const char* yields(const Problem& problem, Operator) {
  const bool few = problem.groups > 1 && problem.K / problem.groups < 4;
  return few ? "another engine may be faster with few output channels of a group" : nullptr;
}

// The workspace has the sums and the copies of one slice.
inline int64_t bytes_of(Problem problem, const Plan& plan) {
  problem.N = plan.slice_images;
  const Problem planned = as_planned(problem, plan);
  return sum_bytes(planned, plan) + copied_bytes(planned, plan);
}

// Planes of 16 bits in groups whose channels are no multiple of 8 are read in place only, and where they begin only a
// call knows. One whose tensors are not aligned is handed on to this engine.
inline const Engine& engine_of_others(const Problem& problem, Operator op) {
  return kMmaWgradEngine.refusal(problem, op) == nullptr ? kMmaWgradEngine : kDirectEngine;
}

inline int64_t workspace_bytes(const Problem& problem, Operator op, const Pointers& pointers) {
  const Plan& plan = plan_of(problem, alignment_of(pointers));
  return plan.cycles > 0 ? bytes_of(problem, plan)
                         : engine_of_others(problem, op).workspace_bytes(problem, op, pointers);
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

inline cudaError_t make_maps(const Problem& problem, Params& params) {
  const Plan& plan = params.plan;
  const auto step = [&](int64_t stride, int64_t size) {
    return static_cast<uint64_t>(size > 1 ? stride * plan.bytes : 16);
  };
  const auto make = [&](const void* from, const Tensor& of, int group, bool planes, const uint32_t (&box)[4],
                        int step_w, int step_h, int row_bytes, hopper::BoxMap& map) {
    const uint64_t images = static_cast<uint64_t>(of.N), height = static_cast<uint64_t>(of.H);
    const uint64_t channels = static_cast<uint64_t>(planes ? of.C : padded(of.C, 16 / plan.bytes));  // a copy has more
    if (planes) {
      const uint32_t together = static_cast<uint32_t>(planes_together(plan, group, of.stride[1], plan.bytes));
      const int64_t shift = together > 1 ? of.stride[1] % piece_of(plan.bytes) : 0;
      const uint64_t plane = padded(int64_t{of.H} * of.W + (together - 1) * shift, piece_of(plan.bytes));
      const uint64_t sizes[4] = {plane, together, channels / together, images};
      const uint64_t strides[3] = {step(of.stride[1] - shift, together),
                                   step(of.stride[1] * together, of.C / together), step(of.stride[0], of.N)};
      const uint32_t boxes[4] = {box[0], together, box[1] / together, 1};
      return hopper::make_box_map(plan.rounds ? hopper::BoxUse::kLoadRows : hopper::BoxUse::kLoad, from, plan.bytes,
                                  sizes, strides, boxes, map);
    }
    return hopper::make_box_map(row_bytes == 128  ? hopper::BoxUse::kLoadRows
                                : row_bytes == 64 ? hopper::BoxUse::kLoadHalves
                                : row_bytes == 32 ? hopper::BoxUse::kLoadQuarters
                                                  : hopper::BoxUse::kLoad,
                                from, plan.bytes, {channels, static_cast<uint64_t>(of.W), height, images},
                                {step(of.stride[3], of.W), step(of.stride[2], of.H), step(of.stride[0], of.N)}, box,
                                map, step_w, step_h);
  };
  const auto u = [](int value) { return static_cast<uint32_t>(value); };
  const uint32_t x_planes[4] = {u(plan.rounds ? kLine : plan.run), u(8 * plan.shape.chunks), 1, 1};
  const uint32_t x_pixels[4] = {u(plan.row_bytes / plan.bytes), u(box_width(plan, params.stride_w)),
                                u(plan.window_h), 1};
  const uint32_t dy_planes[4] = {u(plan.rounds ? kLine : plan.dy_run), u(plan.channels), 1, 1};
  const bool whole = plan.tiles_q == 1;
  const uint32_t dy_pixels[4] = {u(hopper::kBoxRowBytes / plan.bytes), u(whole ? plan.pitch : plan.columns),
                                 u(whole ? plan.rows : 1), 1};
  const cudaError_t error =
      make(params.x_ptr, x_of(problem), params.group_c, plan.x_planes, plan.x_planes ? x_planes : x_pixels,
           params.stride_w, params.stride_h, plan.row_bytes, params.x_map);
  if (error != cudaSuccess) return error;
  return make(params.dy_ptr, dy_of(problem), params.group_k, plan.dy_planes, plan.dy_planes ? dy_planes : dy_pixels, 1,
              1, hopper::kBoxRowBytes, params.dy_map);
}

template <typename Format, int SHAPE>
cudaError_t run_kernel(const Params& params, cudaStream_t stream) {
  constexpr TileShape kShape = kTileShapes[SHAPE];
  constexpr Instance kInstance{"hopper_wgrad_kernel", {kTypeId<typename Format::Stored>, Format::PARTS, Format::SPLITS,
                                                       Format::CONTAINS, SHAPE}};
  record(kInstance);
  if constexpr (!is_compiled(kShape, Format::PARTS, Format::SPLITS, Format::CONTAINS, Format::ROUNDS) ||
                !is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    const auto kernel = hopper_wgrad_kernel<Format, kShape.chunks, kShape.taps>;
    const cudaError_t error = allow_all_shared_memory(kernel);
    if (error != cudaSuccess) return error;
    return hopper::launch_early(kernel, static_cast<unsigned>(params.plan.grid), Format::THREADS,
                                params.plan.smem_bytes, stream, params);
  }
}

template <typename Format, int SHAPE = 0>
cudaError_t run_shape(const Params& params, cudaStream_t stream) {
  if constexpr (SHAPE < kTileShapeCount) {
    const TileShape &shape = params.plan.shape, &own = kTileShapes[SHAPE];
    if (shape.chunks == own.chunks && shape.taps == own.taps) return run_kernel<Format, SHAPE>(params, stream);
    return run_shape<Format, SHAPE + 1>(params, stream);
  }
  return cudaErrorInvalidConfiguration;
}

// Copies what boxes cannot read in place; `planned` is of the copies.
inline cudaError_t copy(const Problem& problem, const Problem& planned, const Plan& plan, Pointers& pointers,
                        cudaStream_t stream) {
  uint8_t* to = static_cast<uint8_t*>(pointers.workspace) + sum_bytes(planned, plan);
  hopper::PlanesCopy of_planes[2] = {};
  const auto make = [&](const Tensor& of, bool to_planes, bool is_x, const void*& from) {
    const int fold_h = is_x ? plan.fold_h : 0, fold_w = is_x ? plan.fold_w : 0;  // 0: no fold
    const Tensor copied = is_x ? x_of(folded(problem, plan)) : of;
    const int64_t bytes = copied_bytes(copied, plan.bytes, to_planes);
    cudaError_t error = cudaSuccess;
    if (!to_planes && fold_h == 0 && fold_w == 0 && hopper::are_lines(of.stride, of.H, of.W)) {
      of_planes[is_x] = hopper::make_planes_copy(from, of.stride, of.N, of.C, of.H, of.W, to);
    } else {
      OrderParams params{from, to, pointers.done};
      std::copy_n(of.stride, 4, params.stride);
      params.elements = bytes / plan.bytes;
      params.C = copied.C, params.H = copied.H, params.W = copied.W, params.from_h = of.H, params.from_w = of.W;
      params.step_h = fold_h > 0 ? taken_stride(problem.stride_h, problem.P) : 1;
      params.step_w = fold_w > 0 ? taken_stride(problem.stride_w, problem.Q) : 1;
      params.pad_h = fold_h > 0 ? problem.pad_h : 0, params.pad_w = fold_w > 0 ? problem.pad_w : 0;
      params.dilation_h = problem.dilation_h, params.dilation_w = problem.dilation_w, params.planes = to_planes;
      const int64_t inner = to_planes ? int64_t{copied.H} * copied.W : copied.C;
      params.inner = static_cast<int>(padded(inner, to_planes ? 16 / plan.bytes : 8));
      params.by_inner = make_divisor(params.inner), params.by_w = make_divisor(copied.W);
      params.by_c = make_divisor(copied.C), params.by_h = make_divisor(copied.H);
      params.by_fold_h = make_divisor(std::max(fold_h, 1)), params.by_fold_w = make_divisor(std::max(fold_w, 1));
      const unsigned blocks = static_cast<unsigned>(ceil_div(bytes, 16 * hopper::kCopyThreads));
      const auto kernel = plan.bytes == 2 ? hopper_wgrad_order_kernel<Half> : hopper_wgrad_order_kernel<float>;
      error = hopper::launch_early(kernel, blocks, hopper::kCopyThreads, 0, stream, params);
    }
    from = to;
    to += bytes;
    return error;
  };
  cudaError_t error = plan.copies_x ? make(x_of(problem), plan.x_planes, true, pointers.x) : cudaSuccess;
  if (plan.copies_dy && error == cudaSuccess) error = make(dy_of(problem), plan.dy_planes, false, pointers.dy);
  if (error != cudaSuccess || of_planes[0].blocks + of_planes[1].blocks == 0) return error;
  return launch_planes_copy(of_planes[0], of_planes[1], stream);
}

// The images of a slice: copies, and sums of its parts.
template <typename Format>
cudaError_t run_slice(Problem problem, const Plan& plan, Pointers pointers, int slice, cudaStream_t stream) {
  const int64_t first = slice * plan.slice_images;
  problem.N = std::min(plan.slice_images, problem.N - first);
  pointers.x = static_cast<const typename Format::Stored*>(pointers.x) + first * problem.x_stride[0];
  pointers.dy = static_cast<const typename Format::Stored*>(pointers.dy) + first * problem.y_stride[0];
  const Problem planned = as_planned(problem, plan);
  cudaError_t error = copy(problem, planned, plan, pointers, stream);
  if (error != cudaSuccess) return error;
  Params params = make_params(planned, plan);
  params.x_ptr = pointers.x, params.dy_ptr = pointers.dy, params.done = pointers.done;
  error = make_maps(planned, params);
  if (error != cudaSuccess) return error;
  params.sums_ptr = static_cast<float*>(pointers.workspace) + slice * (sums_of(planned, plan) / plan.slices);
  return run_shape<Format>(params, stream);
}

template <typename Format>
cudaError_t run(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  for (int slice = 0; slice < plan.slices; ++slice) {
    const cudaError_t error = run_slice<Format>(problem, plan, pointers, slice, stream);
    if (error != cudaSuccess) return error;
  }
  const Problem planned = as_planned(problem, plan);
  hopper::WeightSums add{static_cast<const float*>(pointers.workspace), pointers.out, pointers.done};
  add.row_channels = row_channels(plan);
  add.row = int64_t{planned.R} * planned.S * add.row_channels;
  add.parts = plan.slices * plan.parts * sums_of_part(plan);
  return hopper::add_weights<typename Format::Stored>(problem, planned, plan.fold_h, plan.fold_w, add,
                                                      plan.tiles_k * plan.channels, stream);
}

inline cudaError_t run(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  switch (problem.dtype) {
    case DType::kFloat16:
      return plan.splits ? run<Format<Half, Half, 1, true>>(problem, plan, pointers, stream)
                         : run<Format<Half, Half, 1, false>>(problem, plan, pointers, stream);
    case DType::kBFloat16:
      return plan.splits ? run<Format<BFloat16, BFloat16, 1, true>>(problem, plan, pointers, stream)
                         : run<Format<BFloat16, BFloat16, 1, false>>(problem, plan, pointers, stream);
    case DType::kFloat32:
      return plan.rounds            ? run<Format<float, float, 1, false>>(problem, plan, pointers, stream)
             : plan.contains        ? run<Format<float, BFloat16, 2, true, true>>(problem, plan, pointers, stream)
             : plan.parts_of_x == 2 ? run<Format<float, BFloat16, 2, true>>(problem, plan, pointers, stream)
                                    : run<Format<float, BFloat16, 3, true>>(problem, plan, pointers, stream);
    case DType::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

inline cudaError_t launch(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  const Plan& plan = plan_of(problem, alignment_of(pointers));
  return plan.cycles > 0 ? run(problem, plan, pointers, stream)
                         : engine_of_others(problem, op).launch(op, problem, pointers, stream);
}

#endif  // launchers

inline void describe(const Problem& problem, Operator, char* text, size_t text_size) {
  const Plan& plan = plan_of(problem, Alignment{});
  const char* const operands = plan.rounds ? "TF32, " : plan.contains ? "scaled fp16, " : "";
  snprintf(text, text_size,
           "%s%s%s%s%stile of %d output channels x %d input channels x %d taps, stages of %d x %d x %d pixels and "
           "%d bytes, %d of them, %d blocks for %d tiles in %d parts, about %.3g Mcycles",
           plan.shifted ? "planes shifted, " : "", plan.copies_x ? "x copied, " : "",
           plan.copies_dy ? "dy copied, " : "", plan.fold_h + plan.fold_w > 2 ? "taps as channels, " : "", operands,
           plan.channels, 8 * plan.shape.chunks, plan.shape.taps, plan.images, plan.rows, plan.columns,
           plan.stage_bytes + plan.raw_bytes, plan.stages, plan.grid, plan.tiles_k * plan.blocks_c * plan.blocks_t,
           plan.parts, plan.cycles * 1e-6);
}

#endif  // host

}  // namespace hopper_wgrad

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
extern const Engine kHopperWgradEngine{"hopper_wgrad",       hopper_wgrad::refusal,  hopper_wgrad::workspace_bytes,
                                       hopper_wgrad::launch, hopper_wgrad::describe, hopper_wgrad::yields,
                                       hopper_wgrad::cycles};
#endif

}  // namespace modelnew
