// tma engine: implicit GEMM on Hopper's tensor cores for 16-bit tensors, whose operands tensor copies (TMA) bring from
// memory to where they are multiplied: no thread touches them. fprop, and dgrad without a stride. Deterministic: one
// sum an output, in one order. And, for gather, products of fp32 tensors that it has copied as scaled fp16 (contained
// operands, below).
//
//   prepare   w -> [output channel][r][s][input channel], where it does not lie like this (planes; dgrad, but small
//             tiles multiply filters in channels_last the other way round; small groups, with zeros in between); and a
//             copy of x with channels as neighbours, where x is planes and not multiplied as it is
//   tma       y from x, and dx from dy
//
// GEMM view: rows = output channels, columns = output pixels, reduction = (block of 64 input channels, r, s, channel).
// Both operands are rows of 128 bytes, 64 channels of a weight's tap or of a pixel, in the order of boxes
// (hopper.cuh); a pixel is a slot of shared memory. Three ways to bring x:
//
//   columns   a stage of x is what one tap reads for all pixels of a tile, numbered through all images (im2col): any
//             stride and image, 1x1 as well, and no pixel too many; each tap has the L2 cache give x anew
//   windows   a stage is what all taps of a tile read, with its halo, as one box. A tap is a shift of all slots, by
//             whole slots: wgmma's second operand starts that many rows further. Of a stride of 2 a stage is one phase
//             of x, of which its taps read neighbouring slots
//   direct    1x1 of planes: rows of 64 pixels of a channel, which wgmma reads the other way round; images are filled
//             up to multiples of 64 pixels
//
//        pitch                    slots are multiplied in their order, also those between the lines of a tile, whose
//      +--------+                 sums nobody stores
//      | x x x x|. .
//      | x x x x|. .   tap (0, 2)
//      +--------+. .
//       . . . . . .
//
// One block an SM, for the life of the launch, 12 warps in three roles:
//
//   8 warps   two warpgroups take tiles by turns, so that one of them multiplies while the other one stores; or they
//             multiply and store half of a tile's channels each, which brings and reads less for each product
//   1 thread  orders boxes of x
//   1 thread  orders boxes of w
//
//   x --box--> ring of x --+                                          +--box--> y, 64 channels of a tile
//                          +--> wgmma --> registers --stmatrix--> staging
//   w --box--> ring of w --+                                          +-------> y in planes, or of a number of channels
//                                                                               that is no multiple of 8, by each warp
//
// Where there are fewer tiles than SMs, clusters of 2, 4 or 8 blocks share the reduction of each: they leave their sums
// in shared memory and add up those of all, in their order, for a share of the tile (store_share).
//
// Tile 0 is that of the last pixels (see gather.cu), and blocks next to one another have tiles of the same pixels, so
// that x comes from memory once.
//
// fp16, us, H100, 2026-11-26: what took it before (gather; wgmma, of planes of 56x56) / this engine / cuDNN, by
// bench.py; that of planes in a driver.
//
//                                        channels_last, 256 images   32                  planes, 256 images
//   1x1 64 to 256, 56x56                   311 / 205 / 187       50 / 28 / 31        208 / 196 / 196
//   256 to 64                              220 / 178 / 182       43 / 31 / 31        253 / 186 / 181
//   3x3 64 to 64                           286 /  93 / 150       49 / 19 / 29        166 / 165 / 351
//   128 to 128, stride 2                   329 / 129 / 111       64 / 26 / 26        704 / 258 / 343
//   128 to 128, 28x28                      118 /  93 /  98       29 / 19 / 22        218 / 129 / 202
//   1x1 512 to 256                         141 / 113 / 115       32 / 22 / 22        203 / 132 / 120
//   3x3 256 to 256, stride 2               181 /  96 /  89       39 / 20 / 22        343 / 169 / 217
//   256 to 256, 14x14                       98 /  82 /  83       38 / 19 / 22        130 / 113 / 152
//   1x1 512 to 2048, 7x7                    68 /  49 /  46       20 / 14 / 12        223 /  87 / 138
//   3x3 512 to 512                         115 /  79 /  82       63 / 20 / 21        165 / 126 / 129
//
// What bounds it: with many images, 1x1 to and from 56x56 pixels run at 2.7 TB/s (a copy: 3.0), and 3x3 of 256 channels
// at 700 TFLOP/s (cuBLAS, 8192^3: 763). Columns of 128 slots take 56 to 59 bytes a cycle of an SM from the L2 cache,
// which holds them up; hence tiles of 192 and 256. With one image a call takes 6.5 to 7.5 us at least, presumably for
// code and maps that come from memory; barriers initialised by one thread each instead of by one for all took 0.8 us
// more, and code for 16 and 32 channels beside that for 64, or for parts of a reduction beside that for all of it, 0.7
// (THRASH: caches of instructions are filled with other code before each call).
//
// Boxes fill up with zeros what is no channel, which takes long: 8 to 64 channels, 3x3, 64x64, 16 images, 42 us
// (cuDNN 13), 24 to 144, 1x1, 56x56, 18 (14). Rows of 32 or 64 bytes for few channels instead: 16 to 32, 3x3, 112x112,
// 32 images 72 / 54, 8 to 8, 256x256, 678 / 423 (cuDNN 42 and 99), but see above.
//
// Outputs in channels_last of other than multiples of 8 channels, fp16, us, this engine / what took them before / cuDNN
// (H100, 2026-11-26): 64 to 2, 1x1, 512x512, 16 images, 242 / 1622 (direct) / 206; 256 to 255, 3x3, 40x40, 8 images,
// 40 / 46 (gather) / 49; 512 to 255, 1x1, 34 / 28 / 42.
//
// Groups of multiples of 64 channels are multiplied by themselves, smaller ones as one of 64 input channels, with zeros
// for the weights in between (drawn in gather.cu). An Inf or NaN of another group would make NaN of these: what is NaN
// is added up anew, from its own group alone, where it is staged (mend). us, 3x3, 32 groups, 16 images, channels_last
// and planes, before (gather; wgmma, of 256 channels) / this engine / cuDNN (H100, 2026-11-26, bench.py):
//
//   256 channels of 56x56                344 /  35 /  60        191 /  51 / 119
//   512, stride 2                        420 /  36 /  35        513 /  71 / 100
//   512 of 28x28                         152 /  25 /  33        173 /  32 /  63
//   1024, stride 2                        93 /  26 /  28        147 /  41 /  62
//   1024 of 14x14                         59 /  20 /  22         66 /  25 /  45
//   2048, stride 2                        38 /  16 /  19         70 /  33 /  51
//   2048 of 7x7                           27 /  13 /  17         37 /  28 /  40
//
// With one image in channels_last merged groups take 13 to 15 us (cuDNN 9 to 11), presumably 3 of them to pack weights.
//
// Contained operands (contained.cuh): x is gather's copy, weights are what it has packed, and y is fp32. So each thread
// undoes the scales of its sums, each warp stages those of 16 channels in runs of 64 slots and stores these by threads,
// in planes or channels_last (store_floats). Groups are as gather has them, of its own or merged. Plans differ from
// those of 16 bits, as their stores take longer (kContainedCosts). Numbers: gather.cu. Tried for planes, in a driver
// (H100, 2026-11-27): boxes of 32 pixels of 16 channels by each warp, as fast; whole images by bulk copies without a
// map, 249 us instead of 145 (1x1 256 to 1024, 14x14, 256 images).
//
// Tried: tiles of 128 x 256 by both warpgroups alone: 3x3 64 to 64, 56x56, 256 images, 116 us in tiles of 64 x 256, by
// turns 98; but by turns alone 1x1 256 to 1024, 14x14, takes 62.5 instead of 56.4. 1x1 by boxes of a row of pixels
// instead of columns, or y stored to leave the L2 cache first: no difference.
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstdio>

#include "device.cuh"
#include "engines.cuh"
#include "memo.cuh"
#endif

#include "channels_last.cuh"
#include "contained.cuh"
#include "correlation.cuh"
#include "divisor.cuh"
#include "hopper.cuh"
#include "numerics.cuh"
#include "problem.cuh"

namespace modelnew {
namespace tma {

// ---- Geometry, host and device ----

constexpr int kBlockChannels = 64;                        // of a stage
constexpr int kRowChannels = 64;                          // output channels in a row of transposed weights
constexpr int kSlotBytes = hopper::kBoxRowBytes;          // 64 channels of 16 bits
constexpr int kRowsAligned = 1024;                        // where the order of boxes starts anew
constexpr int kStagedChannels = 64;                       // of a box of y
constexpr int kMultiplyingThreads = 256, kThreads = 384;  // the last four warps order boxes
static_assert(kThreads == kMultiplyingThreads + 128, "setmaxnreg is for whole warpgroups");
constexpr int kMultiplyingRegisters = 232, kOrderingRegisters = 40;  // out of 168 that each thread has at first
static_assert(2 * kMultiplyingRegisters + kOrderingRegisters <= 3 * 168, "given back before they are taken");
constexpr int kMostTaps = 49;
constexpr int kBlockPixels = 64;  // of planes as they are: of a box
constexpr int kMostStages = 8;
constexpr int kSharedBytes = 232448;
constexpr int kMostBoxSide = 256;
constexpr int kMostSplits = 8;
constexpr int64_t kMostSlots = 1 << 30;  // and tiles
constexpr int kPackThreads = hopper::kCopyThreads, kPackTile = 32;

// A tile that there is a kernel for. Together: both warpgroups multiply it, of 128 channels 64 each; else they take
// tiles by turns.
struct TileShape {
  int channels, slots;
  bool together;

  MODELNEW_HOST_DEVICE constexpr int own_channels() const { return together ? channels / 2 : channels; }
};

constexpr TileShape kTileShapes[] = {{128, 256, true}, {128, 192, true}, {128, 128, true}, {128, 64, false},
                                     {64, 256, false}, {64, 232, false}, {64, 224, false}, {64, 208, false},
                                     {64, 192, false}, {64, 128, false}, {64, 64, false}};
constexpr int kTileShapeCount = sizeof kTileShapes / sizeof kTileShapes[0];

// Whether there is a kernel for planes of x as they are.
MODELNEW_HOST_DEVICE constexpr bool may_be_direct(const TileShape& shape) {
  return shape.slots == 256 || shape.slots == 128;
}

// Whether blocks may share a tile's reduction: for few tiles, which are small.
MODELNEW_HOST_DEVICE constexpr bool may_split(const TileShape& shape) { return shape.slots <= 128; }

// Whether there is a kernel for filters whose output channels are neighbours. To pack them costs small problems most.
MODELNEW_HOST_DEVICE constexpr bool may_transpose(const TileShape& shape) { return shape.slots <= 128; }

// Whether there is a kernel for several groups of the filter as one: of all tiles of 64 channels not each.
MODELNEW_HOST_DEVICE constexpr bool may_merge(const TileShape& shape) {
  return shape.channels == 64 && (shape.slots == 256 || shape.slots == 224 || shape.slots == 128 || shape.slots == 64);
}

// A problem as it is multiplied: its output channels are those of all groups, its input channels those that one of
// these reads. Groups of few channels are multiplied several at a time, merged, with zeros for the weights between
// them; then these are the channels of all that are merged.
struct Grouped : Correlation {
  int all_in;           // channels of x
  int own_in, own_out;  // of a group
  int block_out;        // output channels that read the same channels of x

  MODELNEW_HOST_DEVICE bool merged() const { return own_in < in_channels; }
};

struct Plan {
  TileShape shape;
  bool windows;
  bool packed;                // weights; else as they are,
  bool transposed;            // with output channels as neighbours
  bool planes;                // x and y are
  bool direct;                // x is planes and multiplied as it is,
  bool copied;                // or first copied to where its channels are neighbours
  bool by_threads;            // y is stored by threads, wherever it lies; else by boxes
  bool contained;             // operands of fp32 tensors are: y is fp32
  int out_vector;             // by threads: so many outputs at once
  int splits;                 // blocks of a tile, a cluster, each with a part of the reduction
  int tile_lines, tile_columns, pitch;  // columns: one line of as many columns as there are slots
  int loads;                  // of x for a block of channels: stages, of the same size
  int box_rows, box_columns;  // of a stage, as they lie in shared memory
  int x_bytes, x_stage_bytes, x_stages, w_stage_bytes, w_stages;
  int x_steps, w_steps;  // stages of a tile
  int tiles_k, tiles_p, tiles_q, tiles;
  int blocks;  // of the launch
  int smem_bytes;
  double cycles;  // estimate
};

// A stage of x: the first row and column that it holds, from those of the tile's first output on, and its taps.
struct Load {
  int16_t row, column, first_tap, taps;
};

// By how many slots it is shifted, and which weights it has.
struct Tap {
  int16_t shift;
  uint8_t r, s;
};

struct Params {
  const void *in_ptr, *bias_ptr;
  const void* w_ptr;  // packed, or null
  void* out_ptr;
  Grouped of;
  Plan plan;
  int64_t out_step;  // from pixel to pixel of y, of columns
  Divisor by_tiles_k, by_tiles_q, by_tiles_p, by_pitch, by_plane, by_row, by_runs, by_blocks, by_block_out;
  Load load[kMostTaps];
  Tap tap[kMostTaps];
  hopper::BoxMap in_map, w_map, out_map;
  // Of contained operands.
  const ContainedControl* control;
  const float* w_factors;
};

struct PackParams {
  const void* w_ptr;
  void* packed_ptr;
  int64_t stride_group, stride_out, stride_in, stride_r, stride_s;
  int R, S, out_channels, in_channels, row_channels;  // of a row of what is packed: a multiple of 8
  Divisor by_own_out, by_own_in, by_merged;
  bool flipped;
  int blocks;  // of the launch; those behind them copy x
};

// A block's shared memory: where its parts start.
struct SharedLayout {
  int barriers, staging, x, w, end;
};

// By threads: of a warp's channels, one after another; 16 bytes more of each, so that stmatrix meets all banks.
MODELNEW_HOST_DEVICE constexpr int staged_pitch(int slots) { return 2 * slots + 16; }

// Floats of a slot, where parts of a reduction lie: 4 more than channels, so that a warp meets all banks.
MODELNEW_HOST_DEVICE constexpr int part_pitch(const TileShape& shape) { return shape.channels + 4; }

// Of y in fp32: a warp stages runs of slots of its 16 channels, [slot][channel], with 4 floats more of each slot, so
// that its threads meet all banks by single values of eight channels and by fours of eight slots.
constexpr int kRunSlots = 64, kRunPitch = 20;

// Of a warpgroup.
MODELNEW_HOST_DEVICE inline int staged_bytes(const Plan& plan) {
  if (plan.contained) return 4 * kRunSlots * kRunPitch * static_cast<int>(sizeof(float));
  if (plan.by_threads) return kStagedChannels * staged_pitch(plan.shape.slots);
  return plan.shape.own_channels() / kStagedChannels * plan.shape.slots * kSlotBytes;
}

// Slots behind a window are read as well, for outputs that nobody stores: w follows x.
MODELNEW_HOST_DEVICE inline SharedLayout shared_layout(const Plan& plan) {
  SharedLayout layout{};
  layout.staging = 0;
  layout.x = layout.staging + 2 * staged_bytes(plan);
  layout.w = layout.x + plan.x_stages * plan.x_stage_bytes;
  layout.barriers = layout.w + plan.w_stages * plan.w_stage_bytes;
  layout.end = layout.barriers + (4 * kMostStages + 2) * 8;
  return layout;
}

// Stages of x that a block multiplies of a tile.
struct Share {
  int first, last;
};

MODELNEW_HOST_DEVICE inline Share share_of(const Plan& plan, int part) {
  return {part * plan.x_steps / plan.splits, (part + 1) * plan.x_steps / plan.splits};
}

// The first output of a tile and its first channel. Of columns: a single line, of all pixels.
struct Tile {
  int n, p, q, k;
};

MODELNEW_HOST_DEVICE inline Tile locate_tile(const Params& params, int number) {
  const Plan& plan = params.plan;
  const int pixels = quotient(number, params.by_tiles_k);
  const int from_start = plan.tiles / plan.tiles_k - 1 - pixels;
  const int k = (number - pixels * plan.tiles_k) * plan.shape.channels;
  const int row = quotient(from_start, params.by_tiles_q), image = quotient(row, params.by_tiles_p);
  return {image, (row - image * plan.tiles_p) * plan.tile_lines,
          (from_start - row * plan.tiles_q) * plan.tile_columns, k};
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// ---- Device code ----

using hopper::Ring;

struct Shared {
  uint32_t base;
  SharedLayout layout;

  __device__ __forceinline__ uint32_t barrier(int kind, int stage) const {
    return base + layout.barriers + (kind * kMostStages + stage) * 8;
  }
  __device__ __forceinline__ uint32_t x_full(int stage) const { return barrier(0, stage); }
  __device__ __forceinline__ uint32_t x_empty(int stage) const { return barrier(1, stage); }
  __device__ __forceinline__ uint32_t w_full(int stage) const { return barrier(2, stage); }
  __device__ __forceinline__ uint32_t w_empty(int stage) const { return barrier(3, stage); }
  // Until it is a warpgroup's turn to multiply.
  __device__ __forceinline__ uint32_t turn(int warpgroup) const { return barrier(4, warpgroup); }
};

__device__ __forceinline__ void warpgroup_sync(int warpgroup) { hopper::named_barrier(1 + warpgroup, 128); }

// Of a tile's stages of x: which channels and which load. One by one.
struct Step {
  int block = 0, load = 0;

  __device__ __forceinline__ void next(const Plan& plan) {
    if (++load == plan.loads) {
      load = 0;
      ++block;
    }
  }
};

// A block's own tiles: of a cluster's blocks all have the same one.
template <bool SPLIT>
struct Tiles {
  int first, step, part;

  __device__ __forceinline__ explicit Tiles(const Plan& plan)
      : first(SPLIT ? blockIdx.x / plan.splits : blockIdx.x),
        step(gridDim.x),
        part(SPLIT ? blockIdx.x - first * plan.splits : 0) {}
  __device__ __forceinline__ Share share(const Plan& plan) const {
    return SPLIT ? share_of(plan, part) : Share{0, plan.x_steps};
  }
  __device__ __forceinline__ Step first_step(const Plan& plan, const Share& share) const {
    Step step;
    if (SPLIT) {
      step.block = share.first / plan.loads;
      step.load = share.first - step.block * plan.loads;
    }
    return step;
  }
};

// -- Order boxes, by a thread each --

// Who needs what the kernels before write waits here. False: operands are not contained, but should be, and another
// kernel does all of the call.
template <bool CONTAINED>
__device__ __forceinline__ bool wait_for_operands(const Params& params, float* x_factor = nullptr) {
  hopper::wait_for_prerequisites();
  if constexpr (CONTAINED) {
    const ContainedControl control = *params.control;
    if (x_factor != nullptr) *x_factor = power_of_two(-control.x_exponent);
    return are_contained(control);
  }
  return true;
}

template <bool SPLIT, bool DIRECT, bool CONTAINED>
__device__ __forceinline__ void order_x(const Params& params, const Shared& shared) {
  const Plan& plan = params.plan;
  const Grouped& of = params.of;
  const Tiles<SPLIT> tiles(plan);
  const Share share = tiles.share(plan);
  if (!wait_for_operands<CONTAINED>(params)) return;
  Ring ring;
#pragma unroll 1
  for (int number = tiles.first; number < plan.tiles; number += tiles.step) {
    const Tile tile = locate_tile(params, number);
    const int first_c = quotient(tile.k, params.by_block_out) * of.in_channels;
    int n = tile.n, p = tile.p, q = tile.q;
    if (!DIRECT && !plan.windows) {
      n = quotient(tile.q, params.by_plane);
      q = tile.q - n * of.P * of.Q;
      p = quotient(q, params.by_row);
      q -= p * of.Q;
    }
    const int h = p * of.stride_h - of.pad_h, w = q * of.stride_w - of.pad_w;
    Step step = tiles.first_step(plan, share);
#pragma unroll 1
    for (int i = share.first; i < share.last; ++i, step.next(plan)) {
      const Load load = params.load[step.load];
      const uint32_t full = shared.x_full(ring.stage);
      const uint32_t to = shared.base + shared.layout.x + ring.stage * plan.x_stage_bytes;
      const int c = first_c + step.block * kBlockChannels;
      hopper::barrier_wait(shared.x_empty(ring.stage), ring.parity ^ 1);
      hopper::barrier_arrive_expecting(full, plan.x_bytes);
      if (DIRECT) {
        // Blocks of 64 pixels, numbered through all images.
#pragma unroll 1
        for (int first = 0; first < plan.shape.slots; first += kBlockPixels) {
          const int block = (tile.q + first) / kBlockPixels, image = quotient(block, params.by_blocks);
          const int pixel = (block - image * static_cast<int>(params.by_blocks.divisor)) * kBlockPixels;
          hopper::load_box(params.in_map, to + first * kSlotBytes, pixel, c, image, 0, full);
        }
      } else if (plan.windows)
        hopper::load_box(params.in_map, to, c, w + load.column, h + load.row, n, full);
      else
        hopper::load_columns(params.in_map, to, c, w, h, n, load.column, load.row, full);
      ring.next(plan.x_stages);
    }
  }
}

template <bool SPLIT, bool TRANSPOSED, bool CONTAINED>
__device__ __forceinline__ void order_w(const Params& params, const Shared& shared) {
  const Plan& plan = params.plan;
  const Tiles<SPLIT> tiles(plan);
  const Share share = tiles.share(plan);
  if (!wait_for_operands<CONTAINED>(params)) return;
  Ring ring;
#pragma unroll 1
  for (int number = tiles.first; number < plan.tiles; number += tiles.step) {
    const Tile tile = locate_tile(params, number);
    Step step = tiles.first_step(plan, share);
#pragma unroll 1
    for (int i = share.first; i < share.last; ++i, step.next(plan)) {
      const Load load = params.load[step.load];
#pragma unroll 1
      for (int t = 0; t < load.taps; ++t) {
        const Tap tap = params.tap[load.first_tap + t];
        const uint32_t full = shared.w_full(ring.stage);
        hopper::barrier_wait(shared.w_empty(ring.stage), ring.parity ^ 1);
        hopper::barrier_arrive_expecting(full, plan.w_stage_bytes);
        const uint32_t to = shared.base + shared.layout.w + ring.stage * plan.w_stage_bytes;
        const int c = step.block * kBlockChannels;
        if (TRANSPOSED) {
#pragma unroll 1
          for (int i = 0; i < plan.shape.channels; i += kRowChannels)
            hopper::load_box(params.w_map, to + i * kSlotBytes, tile.k + i, c, tap.s, tap.r, full);
        } else {
          hopper::load_box(params.w_map, to, c, tile.k, tap.s, tap.r, full);
        }
        ring.next(plan.w_stages);
      }
    }
  }
}

// -- Multiply, and store --

// All warps that multiply.
__device__ __forceinline__ void multiplying_sync() { hopper::named_barrier(3, kMultiplyingThreads); }

// Stages that have been multiplied, once the wgmmas behind theirs have been ordered. -1: none.
struct Given {
  int x = -1, w = -1;

  __device__ __forceinline__ void give_back(const Shared& shared) const {
    if (threadIdx.x % 32 != 0) return;
    if (w >= 0) hopper::barrier_arrive(shared.w_empty(w));
    if (x >= 0) hopper::barrier_arrive(shared.x_empty(x));
  }
};

template <typename Stored, int CHANNELS, int SLOTS, bool DIRECT, bool TRANSPOSED, typename AllOrdered>
__device__ __forceinline__ void multiply_tile(const Params& params, const Shared& shared, const Share& share,
                                              Step of_tile, int first_channel, Ring& x, Ring& w,
                                              float (&acc)[CHANNELS / 64][SLOTS / 2],
                                              const AllOrdered& all_ordered) {
  const Plan& plan = params.plan;
  const uint32_t base = hopper::of_own_block(shared.base);  // for descriptors
  Given before;
  bool keep = false;
  hopper::wgmma_start(acc);
#pragma unroll 1
  for (int number = share.first; number < share.last; ++number, of_tile.next(plan)) {
    const Load load = params.load[of_tile.load];
    hopper::barrier_wait(shared.x_full(x.stage), x.parity);
    const uint32_t slots = hopper::descriptor(base + shared.layout.x + x.stage * plan.x_stage_bytes,
                                              DIRECT ? kBlockPixels * kSlotBytes : 16);
#pragma unroll 1
    for (int t = 0; t < load.taps; ++t) {
      const uint32_t b = slots + params.tap[load.first_tap + t].shift * (kSlotBytes / 16);
      hopper::barrier_wait(shared.w_full(w.stage), w.parity);
      // 64 channels and a row of 64 of each, or (transposed) 64 rows of as many channels: both are 8 KB.
      const uint32_t a = hopper::descriptor(base + shared.layout.w + w.stage * plan.w_stage_bytes, 16) +
                         first_channel * (kSlotBytes / 16);
      hopper::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kBlockChannels / 16; ++step) {
#pragma unroll
        for (int i = 0; i < CHANNELS / 64; ++i) {
          const uint32_t own = a + 64 * i * (kSlotBytes / 16) + (TRANSPOSED ? 16 * step * (kSlotBytes / 16) : 2 * step);
          if constexpr (DIRECT)  // rows are channels: 16 of them further
            hopper::WgmmaTransposed<Stored, SLOTS>::multiply(acc[i], own, b + 16 * step * (kSlotBytes / 16),
                                                             keep || step > 0, hopper::kRowsDescriptorHigh);
          else if constexpr (TRANSPOSED)
            hopper::WgmmaFirstTransposed<Stored, SLOTS>::multiply(acc[i], own, b + 2 * step, keep || step > 0,
                                                                  hopper::kRowsDescriptorHigh);
          else
            hopper::Wgmma<Stored, SLOTS>::multiply(acc[i], own, b + 2 * step, keep || step > 0,
                                                   hopper::kRowsDescriptorHigh);
        }
      }
      hopper::wgmma_commit();
      keep = true;
      hopper::wgmma_wait<1>();
      before.give_back(shared);
      before.w = w.stage;
      before.x = t + 1 == load.taps ? x.stage : -1;
      w.next(plan.w_stages);
    }
    x.next(plan.x_stages);
  }
  all_ordered();
  hopper::wgmma_wait<0>();
#pragma unroll
  for (auto& sums : acc) hopper::wgmma_settle(sums);
  before.give_back(shared);
}

// Where an eight of a staged output's channels is, in the order of boxes.
__device__ __forceinline__ int offset_of_piece(int row, int piece) { return row * kSlotBytes + (piece ^ row % 8) * 16; }

// Sums -> [output][channel], 128 bytes an output, in the order of boxes. Slots between the lines of a window, and
// behind the last one, go to where no output is: there are more slots than outputs then.
template <typename Stored, int SLOTS, bool WINDOWS>
__device__ __forceinline__ void stage_tile(const Params& params, const float (&bias)[2], uint32_t staging,
                                           const float (&acc)[SLOTS / 2]) {
  const Plan& plan = params.plan;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int piece = 2 * warp + lane / 8 % 2;
#pragma unroll
  for (int j = 0; j < SLOTS / 8; j += 2) {
    const bool pair = j + 1 < SLOTS / 8;  // else an eight that is the last one
    const int slot = 8 * j + (pair ? lane / 16 * 8 : 0) + lane % 8;
    int row = slot;
    if constexpr (WINDOWS) {
      const int line = quotient(slot, params.by_pitch), column = slot - line * plan.pitch;
      const bool exists = column < plan.tile_columns && line < plan.tile_lines;
      row = exists ? line * plan.tile_columns + column : SLOTS - 1;
    }
    uint32_t words[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int first = 4 * (pair ? j + e / 2 : j) + 2 * (e % 2);
      words[e] = narrow_pair(acc[first] + bias[e % 2], acc[first + 1] + bias[e % 2], Stored{});
    }
    hopper::store_matrix_transposed(staging + offset_of_piece(row, piece), words);
  }
}

template <typename Stored>
__device__ __forceinline__ float load_bias(const Params& params, int channel) {
  if (params.bias_ptr == nullptr || channel >= params.of.out_channels) return 0;
  return widen(static_cast<const Stored*>(params.bias_ptr)[channel]);
}

struct Output {
  int n, p, q;
  bool exists;
};

// The output in a slot of a tile, by windows or columns, if there is one.
__device__ __forceinline__ Output output_of_slot(const Params& params, const Tile& tile, int slot) {
  const Plan& plan = params.plan;
  const Correlation& of = params.of;
  if (plan.windows) {
    const int line = quotient(slot, params.by_pitch), column = slot - line * plan.pitch;
    const int p = tile.p + line, q = tile.q + column;
    return {tile.n, p, q, line < plan.tile_lines && column < plan.tile_columns && p < of.P && q < of.Q};
  }
  const int pixel = tile.q + slot, n = quotient(pixel, params.by_plane), in_image = pixel - n * of.P * of.Q;
  const int p = quotient(in_image, params.by_row);
  return {n, p, in_image - p * of.Q, n < of.N};
}

// Where outputs of a tile are in y, of its channel 0: the one in a slot, if it exists, or -1.
__device__ __forceinline__ int64_t place_of_slot(const Params& params, const Tile& tile, int slot) {
  const Plan& plan = params.plan;
  const Correlation& of = params.of;
  if (plan.windows) {
    const Output at = output_of_slot(params, tile, slot);
    return at.exists ? at.n * of.out_stride[0] + at.p * of.out_stride[2] + at.q * of.out_stride[3] : -1;
  }
  if (plan.direct) {
    const int block = (tile.q + slot) / kBlockPixels, n = quotient(block, params.by_blocks);
    const int pixel = (block - n * static_cast<int>(params.by_blocks.divisor)) * kBlockPixels + slot % kBlockPixels;
    return n < of.N && pixel < of.P * of.Q ? n * of.out_stride[0] + pixel : -1;
  }
  const int pixel = tile.q + slot;
  if (pixel >= of.N * of.P * of.Q) return -1;
  if (!plan.planes) return pixel * params.out_step;
  const int n = quotient(pixel, params.by_plane);
  return n * of.out_stride[0] + pixel - n * of.P * of.Q;
}

// Sums of a warp's 16 channels -> [channel][slot], by itself, and from there to y.
template <typename Stored, int SLOTS>
__device__ __forceinline__ void stage_channels(const float (&bias)[2], uint32_t staging,
                                               const float (&acc)[SLOTS / 2]) {
  const int lane = threadIdx.x % 32;
  const uint32_t to = staging + lane % 16 * staged_pitch(SLOTS) + lane / 16 * 16;
#pragma unroll
  for (int j = 0; j < SLOTS / 8; j += 2) {
    const bool pair = j + 1 < SLOTS / 8;  // else an eight that is the last one
    uint32_t words[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int first = 4 * (pair ? j + e / 2 : j) + 2 * (e % 2);
      words[e] = narrow_pair(acc[first] + bias[e % 2], acc[first + 1] + bias[e % 2], Stored{});
    }
    hopper::store_matrix(to + 16 * j - (pair ? 0 : lane / 16 * 16), words);
  }
}

// The sum of an output's own group.
template <typename Stored>
__device__ __forceinline__ float sum_of_group(const Params& params, const Output& output, int channel) {
  const Grouped& of = params.of;
  const int group = channel / of.own_out, first_of_row = group % (of.in_channels / of.own_in) * of.own_in;
  const Stored* const in = static_cast<const Stored*>(params.in_ptr) + output.n * of.in_stride[0] + group * of.own_in;
  const Stored* w = static_cast<const Stored*>(params.w_ptr) + first_of_row +
                    static_cast<int64_t>(channel) * of.R * of.S * of.in_channels;
  float sum = 0;
#pragma unroll 1
  for (int r = 0; r < of.R; ++r) {
#pragma unroll 1
    for (int s = 0; s < of.S; ++s, w += of.in_channels) {
      const int row = output.p * of.stride_h - of.pad_h + r * of.dilation_h;
      const int column = output.q * of.stride_w - of.pad_w + s * of.dilation_w;
      const bool exists = row >= 0 && row < of.H && column >= 0 && column < of.W;
      const Stored* const pixel = in + row * of.in_stride[2] + column * of.in_stride[3];
#pragma unroll 1
      for (int c = 0; c < of.own_in; ++c) sum += (exists ? widen(pixel[c]) : 0.f) * widen(w[c]);
    }
  }
  return sum + load_bias<Stored>(params, channel);
}

// Of merged groups: an Inf or NaN of another group times zero is NaN. What is NaN in a warp's staged 16 channels is
// added up anew, from its own group alone. place(slot, channel): where it is staged.
template <typename Stored, int SLOTS, typename Place>
__device__ __forceinline__ void mend(const Params& params, const Tile& tile, int first_channel,
                                     const float (&acc)[SLOTS / 2], const Place& place) {
  bool is_nan = false;
#pragma unroll
  for (int i = 0; i < SLOTS / 2; ++i) is_nan |= acc[i] != acc[i];
  if (!__any_sync(~0u, is_nan)) return;
  __syncwarp();  // all of it is staged
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < SLOTS * 16; i += 32) {
    const int slot = i / 16, channel = i % 16;
    const Output output = output_of_slot(params, tile, slot);
    if (!output.exists || first_channel + channel >= params.of.out_channels) continue;
    Stored* const staged = place(slot, channel);
    const float value = widen(*staged);
    if (value != value) narrow(sum_of_group<Stored>(params, output, first_channel + channel), *staged);
  }
}

// Neighbouring threads have neighbours in a plane.
template <int VECTOR>
__device__ __forceinline__ void store_channels(const Params& params, const Tile& tile, int first_channel,
                                               const uint8_t* staging) {
  struct alignas(2 * VECTOR) Values {
    uint16_t value[VECTOR];
  };
  const Plan& plan = params.plan;
  const int channels = min(16, params.of.out_channels - first_channel);
  const int slots = plan.shape.slots, runs = plan.windows ? plan.tile_columns / VECTOR : 1;
  const int items = plan.windows ? plan.tile_lines * runs : slots / VECTOR;
  const int64_t step = params.of.out_stride[1];
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < items; i += 32) {
    int slot = i * VECTOR;
    if (plan.windows) {
      const int line = quotient(i, params.by_runs);
      slot = line * plan.pitch + (i - line * runs) * VECTOR;
    }
    const int64_t place = place_of_slot(params, tile, slot);
    if (place < 0) continue;
    uint16_t* to = static_cast<uint16_t*>(params.out_ptr) + place + first_channel * step;
    const uint8_t* from = staging + 2 * slot;
#pragma unroll 4
    for (int channel = 0; channel < channels; ++channel, to += step, from += staged_pitch(slots)) {
      Values values;
      if (VECTOR > 1 && plan.windows) {  // whose lines start at pairs
#pragma unroll
        for (int v = 0; v < VECTOR; v += 2)
          *reinterpret_cast<uint32_t*>(values.value + v) = *reinterpret_cast<const uint32_t*>(from + 2 * v);
      } else {
        values = *reinterpret_cast<const Values*>(from);
      }
      *reinterpret_cast<Values*>(to) = values;
    }
  }
}

// Neighbouring threads have channels of a pixel.
__device__ __forceinline__ void store_pixels(const Params& params, const Tile& tile, int first_channel,
                                             const uint8_t* staging) {
  const int slots = params.plan.shape.slots, lane = threadIdx.x % 32, channel = first_channel + lane % 16;
  uint16_t* const to = static_cast<uint16_t*>(params.out_ptr) + channel * params.of.out_stride[1];
  const uint8_t* const from = staging + lane % 16 * staged_pitch(slots);
#pragma unroll 1
  for (int first = 0; first < slots; first += 32) {
    const int64_t places = first + lane < slots ? place_of_slot(params, tile, first + lane) : -1;
#pragma unroll 8
    for (int i = 0; i < 16; ++i) {
      const int slot = 2 * i + lane / 16;
      const int64_t place = __shfl_sync(~0u, places, slot);
      if (place >= 0 && channel < params.of.out_channels)
        to[place] = *reinterpret_cast<const uint16_t*>(from + 2 * (first + slot));
    }
  }
}

// With fewer channels left lanes would idle.
constexpr int kLeastOfPixels = 8;

__device__ __forceinline__ void store_channels(const Params& params, const Tile& tile, int first_channel,
                                               const uint8_t* staging) {
  if (params.of.out_stride[1] == 1 && params.of.out_channels - first_channel >= kLeastOfPixels)
    return store_pixels(params, tile, first_channel, staging);
  switch (params.plan.out_vector) {
    case 8:
      return store_channels<8>(params, tile, first_channel, staging);
    case 4:
      return store_channels<4>(params, tile, first_channel, staging);
    case 2:
      return store_channels<2>(params, tile, first_channel, staging);
    default:
      return store_channels<1>(params, tile, first_channel, staging);
  }
}

// What makes an output of a channel's sum of contained operands.
struct Finish {
  float factor, bias;

  __device__ __forceinline__ Finish(const Params& params, int channel, float x_factor)
      : factor(channel < params.of.out_channels ? params.w_factors[channel] * x_factor : 0),
        bias(load_bias<float>(params, channel)) {}
  __device__ __forceinline__ float operator()(float sum) const { return sum * factor + bias; }
};

// A run of a warp's slots, as it is staged, to y. Four threads have the channels of a pixel, or neighbouring threads
// have neighbours in a plane.
__device__ __forceinline__ void store_run(const Params& params, const Tile& tile, int first_channel, int first_slot,
                                          int slots, const float* staging) {
  const int lane = threadIdx.x % 32, channels = params.of.out_channels - first_channel;
  const int64_t step = params.of.out_stride[1];
  float* const out = static_cast<float*>(params.out_ptr) + first_channel * step;
  if (step == 1 && params.plan.out_vector == 4) {
    const int channel = lane % 4 * 4;
#pragma unroll 2
    for (int i = lane / 4; i < slots; i += 8) {
      const int64_t place = place_of_slot(params, tile, first_slot + i);
      if (place >= 0 && channel < channels)
        *reinterpret_cast<float4*>(out + place + channel) =
            *reinterpret_cast<const float4*>(staging + i * kRunPitch + channel);
    }
    return;
  }
#pragma unroll 1
  for (int i = lane; i < slots; i += 32) {
    const int64_t place = place_of_slot(params, tile, first_slot + i);
    if (place < 0) continue;
    float* to = out + place;
#pragma unroll
    for (int channel = 0; channel < 16; channel += 4) {
      const float4 four = *reinterpret_cast<const float4*>(staging + i * kRunPitch + channel);
      const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j, to += step) {
        if (channel + j < channels) *to = values[j];
      }
    }
  }
}

template <int SLOTS>
__device__ __forceinline__ void store_floats(const Params& params, const Tile& tile, int first_channel, float x_factor,
                                             float* staging, const float (&acc)[SLOTS / 2]) {
  const int lane = threadIdx.x % 32;
  const Finish finish[2] = {{params, first_channel + lane / 4, x_factor},
                            {params, first_channel + lane / 4 + 8, x_factor}};
  float* const to = staging + lane % 4 * 2 * kRunPitch + lane / 4;
#pragma unroll
  for (int first = 0; first < SLOTS; first += kRunSlots) {
    __syncwarp();  // floats of the run before have been read
#pragma unroll
    for (int j = 0; j < kRunSlots / 8 && first + 8 * j < SLOTS; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        to[(8 * j + e % 2) * kRunPitch + e / 2 * 8] = finish[e / 2](acc[first / 2 + 4 * j + e]);
    }
    __syncwarp();  // all floats of the run are staged
    store_run(params, tile, first_channel, first, min(kRunSlots, SLOTS - first), staging);
  }
}

// Sums of a part of the reduction -> [slot][channel] in shared memory, where the rings were.
template <int CHANNELS, int SLOTS>
__device__ __forceinline__ void leave_part(const Plan& plan, int first_channel, float* parts,
                                           const float (&acc)[CHANNELS / 64][SLOTS / 2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
  for (int block = 0; block < CHANNELS / 64; ++block) {
    float* const to = parts + first_channel + 64 * block + 16 * warp + lane / 4 +
                      lane % 4 * 2 * part_pitch(plan.shape);
#pragma unroll
    for (int j = 0; j < SLOTS / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) to[(8 * j + e % 2) * part_pitch(plan.shape) + e / 2 * 8] = acc[block][4 * j + e];
    }
  }
}

// Adds up the parts of all blocks of the cluster, in their order, for its share of a tile's slots, and stores these.
// Neighbouring threads have neighbours in y.
template <typename Stored, bool CONTAINED>
__device__ __forceinline__ void store_share(const Params& params, const Tile& tile, int part, const float* parts,
                                            [[maybe_unused]] float x_factor) {
  const Plan& plan = params.plan;
  const int pieces = plan.shape.channels / 8;
  const int first = part * plan.shape.slots / plan.splits, slots = (part + 1) * plan.shape.slots / plan.splits - first;
  const uint32_t from = hopper::smem_address(parts);
  const bool along_pixels = CONTAINED ? params.of.out_stride[1] != 1 : plan.by_threads;
#pragma unroll 1
  for (int i = threadIdx.x; i < slots * pieces; i += kMultiplyingThreads) {
    const int slot = first + (along_pixels ? i % slots : i / pieces);
    const int channel = (along_pixels ? i / slots : i % pieces) * 8, k = tile.k + channel;
    const int64_t place = place_of_slot(params, tile, slot);
    if (place < 0 || k >= params.of.out_channels) continue;
    const uint32_t address = from + 4 * (slot * part_pitch(plan.shape) + channel);
    const float4 low = hopper::add_cluster_4(address, plan.splits);
    const float4 high = hopper::add_cluster_4(address + 16, plan.splits);
    const float sums[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if constexpr (CONTAINED) {
      float* const to = static_cast<float*>(params.out_ptr) + place + k * params.of.out_stride[1];
      float values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = Finish(params, k + j, x_factor)(sums[j]);
      if (params.of.out_stride[1] == 1 && plan.out_vector == 4) {
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          if (k + j < params.of.out_channels)
            *reinterpret_cast<float4*>(to + j) = make_float4(values[j], values[j + 1], values[j + 2], values[j + 3]);
        }
        continue;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (k + j < params.of.out_channels) to[j * params.of.out_stride[1]] = values[j];
      }
      continue;
    }
    Stored* const to = static_cast<Stored*>(params.out_ptr) + place + k * params.of.out_stride[1];
    if (plan.by_threads) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (k + j < params.of.out_channels)
          narrow(sums[j] + load_bias<Stored>(params, k + j), to[j * params.of.out_stride[1]]);
      }
      continue;
    }
    uint4 words;
    uint32_t* const word = &words.x;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      word[j] = narrow_pair(sums[2 * j] + load_bias<Stored>(params, k + 2 * j),
                            sums[2 * j + 1] + load_bias<Stored>(params, k + 2 * j + 1), Stored{});
    *reinterpret_cast<uint4*>(to) = words;
  }
}

// A tile of which each block of a cluster has a part of the reduction.
template <typename Stored, int CHANNELS, int SLOTS, bool TOGETHER, bool DIRECT, bool TRANSPOSED, bool CONTAINED>
__device__ __forceinline__ void multiply_part(const Params& params, const Shared& shared, uint8_t* smem) {
  constexpr int kOwn = TileShape{CHANNELS, SLOTS, TOGETHER}.own_channels();
  const int warpgroup = hopper::uniform(threadIdx.x / 128);
  const Tiles<true> tiles(params.plan);
  const Tile tile = locate_tile(params, tiles.first);
  float* const parts = reinterpret_cast<float*>(smem + shared.layout.x);
  float x_factor = 1;
  if constexpr (CONTAINED) {
    if (!wait_for_operands<true>(params, &x_factor)) return hopper::cluster_sync();
  }
  if (TOGETHER || warpgroup == 0) {
    Ring x, w;
    float acc[kOwn / 64][SLOTS / 2];
    const Share share = tiles.share(params.plan);
    const Step step = tiles.first_step(params.plan, share);
    multiply_tile<Stored, kOwn, SLOTS, DIRECT, TRANSPOSED>(params, shared, share, step, warpgroup * kOwn, x, w, acc,
                                                           [] {});
    // Nobody reads the rings any more.
    if (TOGETHER)
      multiplying_sync();
    else
      warpgroup_sync(0);
    leave_part<kOwn, SLOTS>(params.plan, warpgroup * kOwn, parts, acc);
  }
  hopper::cluster_sync();  // the parts of all blocks are there
  store_share<Stored, CONTAINED>(params, tile, tiles.part, parts, x_factor);
}

template <typename Stored, int CHANNELS, int SLOTS, bool TOGETHER, bool DIRECT, bool TRANSPOSED, bool MERGED,
          bool CONTAINED>
__device__ __forceinline__ void multiply(const Params& params, const Shared& shared, uint8_t* smem) {
  constexpr int kOwn = TileShape{CHANNELS, SLOTS, TOGETHER}.own_channels();
  const Plan& plan = params.plan;
  const int warpgroup = hopper::uniform(threadIdx.x / 128);
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const Share whole{0, plan.x_steps};
  uint8_t* const staging = smem + shared.layout.staging + warpgroup * staged_bytes(plan);
  const bool stores = threadIdx.x % 128 == 0;
  Ring x, w;
  const auto skip_tile = [&] {
    x.skip(plan.x_steps, plan.x_stages);
    w.skip(plan.w_steps, plan.w_stages);
  };
  const int first_tile = TOGETHER ? blockIdx.x : blockIdx.x + warpgroup * gridDim.x;
  const int tile_step = TOGETHER ? gridDim.x : 2 * gridDim.x;
  [[maybe_unused]] float x_factor = 1;
  if constexpr (CONTAINED) {
    if (!wait_for_operands<true>(params, &x_factor)) return;
  }
  if (!TOGETHER && warpgroup == 1) skip_tile();
  uint32_t turn = warpgroup ^ 1;  // the first warpgroup begins
#pragma unroll 1
  for (int number = first_tile; number < plan.tiles; number += tile_step) {
    Tile tile = locate_tile(params, number);
    float acc[kOwn / 64][SLOTS / 2];
    if constexpr (TOGETHER) {
      tile.k += warpgroup * kOwn;
      multiply_tile<Stored, kOwn, SLOTS, DIRECT, TRANSPOSED>(params, shared, whole, Step{}, warpgroup * kOwn, x, w, acc,
                                                             [] {});
    } else {
      // A warpgroup's stages come behind the other one's. Had it not waited for its turn, it would take a stage for
      // full because it had been full two turns of the ring before.
      hopper::barrier_wait(shared.turn(warpgroup), turn);
      turn ^= 1;
      multiply_tile<Stored, kOwn, SLOTS, DIRECT, TRANSPOSED>(params, shared, whole, Step{}, 0, x, w, acc, [&] {
        if (lane == 0) hopper::barrier_arrive(shared.turn(warpgroup ^ 1));
      });
      skip_tile();
    }
    if constexpr (CONTAINED) {
      float* const own = reinterpret_cast<float*>(staging) + warp * kRunSlots * kRunPitch;
#pragma unroll
      for (int block = 0; block < kOwn / 64; ++block)
        store_floats<SLOTS>(params, tile, tile.k + 64 * block + 16 * warp, x_factor, own, acc[block]);
      continue;
    }
    if (plan.by_threads) {
      uint8_t* const own = staging + 16 * warp * staged_pitch(SLOTS);
#pragma unroll
      for (int block = 0; block < kOwn / 64; ++block) {
        const int channel = tile.k + 64 * block + 16 * warp;
        const float bias[2] = {load_bias<Stored>(params, channel + lane / 4),
                               load_bias<Stored>(params, channel + lane / 4 + 8)};
        __syncwarp();  // what was staged before has been read
        stage_channels<Stored, SLOTS>(bias, hopper::smem_address(own), acc[block]);
        if constexpr (MERGED) {
          mend<Stored, SLOTS>(params, tile, channel, acc[block], [&](int slot, int in_warp) {
            return reinterpret_cast<Stored*>(own + in_warp * staged_pitch(SLOTS) + 2 * slot);
          });
        }
        __syncwarp();  // all of it is staged
        store_channels(params, tile, channel, own);
      }
      continue;
    }
    if (stores) hopper::bulk_stores_wait_read<0>();
    warpgroup_sync(warpgroup);  // what was staged before has been read
#pragma unroll
    for (int block = 0; block < kOwn / 64; ++block) {
      const int channel = tile.k + 64 * block + 16 * warp + lane / 4;
      const float bias[2] = {load_bias<Stored>(params, channel), load_bias<Stored>(params, channel + 8)};
      const uint32_t to = hopper::smem_address(staging) + block * SLOTS * kSlotBytes;
      if (plan.windows)
        stage_tile<Stored, SLOTS, true>(params, bias, to, acc[block]);
      else
        stage_tile<Stored, SLOTS, false>(params, bias, to, acc[block]);
      if constexpr (MERGED) {
        uint8_t* const own = staging + block * SLOTS * kSlotBytes;
        mend<Stored, SLOTS>(params, tile, tile.k + 64 * block + 16 * warp, acc[block], [&](int slot, int in_warp) {
          int row = slot;
          if (plan.windows) {
            const int line = quotient(slot, params.by_pitch);
            row = line * plan.tile_columns + slot - line * plan.pitch;
          }
          return reinterpret_cast<Stored*>(own + offset_of_piece(row, 2 * warp + in_warp / 8)) + in_warp % 8;
        });
      }
    }
    hopper::fence_async();
    warpgroup_sync(warpgroup);  // all of it is staged
    if (stores) {
#pragma unroll
      for (int block = 0; block < kOwn / 64; ++block) {
        const int k = tile.k + 64 * block;
        if (k < params.of.out_channels)
          hopper::store_box<false>(params.out_map, staging + block * SLOTS * kSlotBytes, k, tile.q, tile.p, tile.n);
      }
      hopper::bulk_stores_commit();
    }
  }
  if (stores) hopper::bulk_stores_wait_read<0>();  // shared memory stays until then
}

template <typename Stored, int CHANNELS, int SLOTS, bool TOGETHER, bool SPLIT, bool DIRECT, bool TRANSPOSED,
          bool MERGED, bool CONTAINED>
__global__ void __launch_bounds__(kThreads, 1) tma_kernel(const __grid_constant__ Params params) {
#if defined(MODELNEW_SM90A)
  // Who mends what did not fit may be made ready; it waits for the end of this kernel.
  if (CONTAINED) hopper::launch_dependents();
  extern __shared__ __align__(1024) uint8_t modelnew_tma_smem[];
  const Plan& plan = params.plan;
  const Shared shared{hopper::smem_address(modelnew_tma_smem), shared_layout(plan)};
  const int warp = hopper::uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  constexpr int kOrdersX = kMultiplyingThreads / 32, kOrdersW = kOrdersX + 1;
  if (lane == 0) {
    if (warp == 0 && !plan.by_threads) hopper::prefetch_map(params.out_map);
    if (warp == kOrdersX) hopper::prefetch_map(params.in_map);
    if (warp == kOrdersW) hopper::prefetch_map(params.w_map);
  }
  if (threadIdx.x == 0) {
    const int givers = TOGETHER ? 8 : 4;  // warps
#pragma unroll 1
    for (int stage = 0; stage < kMostStages; ++stage) {
      hopper::barrier_init(shared.x_full(stage), 1);
      hopper::barrier_init(shared.x_empty(stage), givers);
      hopper::barrier_init(shared.w_full(stage), 1);
      hopper::barrier_init(shared.w_empty(stage), givers);
    }
    for (int i = 0; i < 2; ++i) hopper::barrier_init(shared.turn(i), 4);
    hopper::fence_async();  // boxes arrive at them
  }
  __syncthreads();  // barriers are there
  if (warp >= kOrdersX) {
    hopper::registers_give_back<kOrderingRegisters>();
    if (lane == 0) {
      if (warp == kOrdersX) order_x<SPLIT, DIRECT, CONTAINED>(params, shared);
      if (warp == kOrdersW) order_w<SPLIT, TRANSPOSED, CONTAINED>(params, shared);
    }
    __syncwarp();
    if (SPLIT) hopper::cluster_sync();
  } else {
    hopper::registers_take<kMultiplyingRegisters>();
    if constexpr (SPLIT)
      multiply_part<Stored, CHANNELS, SLOTS, TOGETHER, DIRECT, TRANSPOSED, CONTAINED>(params, shared,
                                                                                    modelnew_tma_smem);
    else
      multiply<Stored, CHANNELS, SLOTS, TOGETHER, DIRECT, TRANSPOSED, MERGED, CONTAINED>(params, shared,
                                                                                       modelnew_tma_smem);
  }
  if (SPLIT) hopper::cluster_leave();  // nobody reads this block's parts any more
#endif
}

// -- Pack: 32 x 32 output and input channels of a tap, read along the ones and written along the others --

__device__ __forceinline__ void pack_weights(const PackParams& params, uint16_t* smem) {
  constexpr int kPitch = kPackTile + 2;
  const int in_tiles = (params.row_channels + kPackTile - 1) / kPackTile;
  const int tap = blockIdx.x / in_tiles % (params.R * params.S), first_in = blockIdx.x % in_tiles * kPackTile;
  const int first_out = blockIdx.x / in_tiles / (params.R * params.S) * kPackTile;
  const int r = tap / params.S, s = tap % params.S;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool along_in = params.stride_in <= params.stride_out;
  const int merged = static_cast<int>(params.by_merged.divisor);
  const int own_out = static_cast<int>(params.by_own_out.divisor), own_in = static_cast<int>(params.by_own_in.divisor);
  // Without groups nothing is divided: 1x1, 512 to 2048, 7x7, planes, one image, took 17.0 instead of 16.5 us (H100).
  const bool groups = own_out < params.out_channels;
  const uint16_t* const from = static_cast<const uint16_t*>(params.w_ptr) +
                               (params.flipped ? params.R - 1 - r : r) * params.stride_r +
                               (params.flipped ? params.S - 1 - s : s) * params.stride_s;
#pragma unroll
  for (int i = warp; i < kPackTile; i += kPackThreads / 32) {
    const int out = along_in ? i : lane, in = along_in ? lane : i;
    const int k = first_out + out, c = first_in + in;
    bool exists = k < params.out_channels && c < params.in_channels;
    int64_t place = k * params.stride_out + c * params.stride_in;
    if (groups) {
      const int group = quotient(k, params.by_own_out), of_c = quotient(c, params.by_own_in);
      exists = exists && of_c == group - quotient(group, params.by_merged) * merged;
      place = group * params.stride_group + (k - group * own_out) * params.stride_out +
              (c - of_c * own_in) * params.stride_in;
    }
    smem[out * kPitch + in] = exists ? from[place] : uint16_t{0};
  }
  __syncthreads();  // the tile is there
  uint16_t* const to = static_cast<uint16_t*>(params.packed_ptr);
#pragma unroll
  for (int i = warp; i < kPackTile; i += kPackThreads / 32) {
    if (first_out + i >= params.out_channels || first_in + lane >= params.row_channels) continue;
    const int64_t row = static_cast<int64_t>(first_out + i) * params.R * params.S + tap;
    to[row * params.row_channels + first_in + lane] = smem[i * kPitch + lane];
  }
}

__global__ void __launch_bounds__(kPackThreads)
    tma_prepare_kernel(const __grid_constant__ PackParams pack, const __grid_constant__ hopper::PlanesCopy copy) {
  extern __shared__ __align__(16) uint8_t modelnew_tma_prepare_smem[];
  uint16_t* const smem = reinterpret_cast<uint16_t*>(modelnew_tma_prepare_smem);
  hopper::wait_for_prerequisites();
  hopper::launch_dependents();
  const int block = static_cast<int>(blockIdx.x) - pack.blocks;
  if (block < 0)
    pack_weights(pack, smem);
  else
    hopper::copy_planes(copy, block, smem);
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// ---- Host: how to cut it up ----

// Addresses of the tensors; zeros, before they are known, stand for aligned ones.
struct Alignment {
  uint64_t in, w, out;
};

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

inline bool can_load_weights(const Grouped& of, const Alignment& address) {
  using hopper::in_eights;
  return !of.flipped && !of.merged() && of.in_channels % 8 == 0 && of.w_stride_in == 1 &&
         in_eights(of.w_stride_out, of.out_channels > 1) && in_eights(of.w_stride_r, of.R > 1) &&
         in_eights(of.w_stride_s, of.S > 1) && address.w % 16 == 0;
}

inline bool can_load_transposed(const Grouped& of, const Alignment& address) {
  using hopper::in_eights;
  return of.groups == 1 && of.out_channels % 8 == 0 && of.w_stride_out == 1 &&
         in_eights(of.w_stride_in, of.in_channels > 1) && in_eights(of.w_stride_r, of.R > 1) &&
         in_eights(of.w_stride_s, of.S > 1) && address.w % 16 == 0;
}

inline int64_t step_of_outputs(const Correlation& of) {
  return of.Q > 1 ? of.out_stride[3] : of.P > 1 ? of.out_stride[2] : of.out_stride[0];
}

// Outputs of all images follow one another at one step.
inline bool has_dense_outputs(const Correlation& of) {
  const int64_t step = step_of_outputs(of);
  return (of.P == 1 || of.out_stride[2] == of.Q * step) &&
         (of.N == 1 || of.out_stride[0] == int64_t{of.P} * of.Q * step);
}

// Estimate, in cycles of an SM at 1.65 GHz. Constants are a fit to the times of all tiles, ways and numbers of blocks a
// tile, of 40 layers of a ResNet-50, a U-Net and others, of 1 to 256 images (H100, 2026-11-26, in a driver, caches
// cold). Of 130 such problems the plan that it chose was 1% slower than the fastest one in the mean, 9% at most.
constexpr double kCallCycles = 10500;
constexpr double kStepCycles = 17, kStepTogetherCycles = 25, kStepOfLargestCycles = 58;
constexpr double kColumnsBytes = 58.6;  // a cycle of an SM
constexpr double kTileCycles = 305;
constexpr double kPrepareCycles = 3000;

// What differs with y in fp32.
struct Costs {
  double call, call_of_pixels;  // of pixels: where channels of y are neighbours
  double product_factor, least_step;
  double windows_bytes;          // a cycle of an SM
  double store, store_together;  // of an output
  double of_pixels;              // factor of these
  double memory_bytes;           // a cycle of an SM
  double shorter_share;          // of memory or multiplication, whichever is the shorter one
};
constexpr Costs kCosts{kCallCycles, kCallCycles, 0.91, 283, 71, 0.057, 0.084, 1, 15.1, 0.44};

// Of contained operands: besides what gather takes to contain them, and in its cycles, so that plans of both can be
// compared. A fit to 94 problems, of ResNet-50, ResNeXt, U-Net and others, of 1 to 256 images, in all tiles, ways and
// parts (H100, 2026-11-27, in a driver), but for two numbers: with 150 and 71 as its least step and bytes of windows,
// tiles of 64 slots, which load most for what they multiply, were taken for larger images, too (H200, same day: 512 to
// 1024 channels, 3x3, 64x64, 16 images 1152 us, gather's own 874). As it is, what is chosen of gather's plans and these
// takes, of 46 other problems (H200, same day), 3.3% less than gather's own in the mean, 21% less at best (32 groups of
// 32 channels, 3x3, 14x14, 32 images, planes) and 4.7% more at worst (1024 to 1024, 3x3, 64x64, 16 images, planes).
constexpr Costs kContainedCosts{4257, 3698, 1.009, 200, 62, 0.305, 0.191, 0.003, 15.06, 1.031};
constexpr double kMeetCycles = 725, kMeetSumCycles = 0.29, kMeetPartCycles = 359;  // and of a sum, and of a block

inline void estimate(const Grouped& of, int sms, Plan& plan) {
  const TileShape& shape = plan.shape;
  const Costs& costs = plan.contained ? kContainedCosts : kCosts;
  const double outputs = shape.channels * shape.slots;
  const double taps = static_cast<double>(of.R) * of.S, turns = static_cast<double>(ceil_div(plan.tiles, sms));
  const double products = outputs * kBlockChannels / 2048.0;
  const double loaded = static_cast<double>(plan.x_steps) / plan.w_steps * plan.x_bytes + plan.w_stage_bytes;
  const double step = std::max({costs.product_factor * products + (shape.together ? kStepTogetherCycles : kStepCycles),
                                loaded / (plan.windows ? costs.windows_bytes : kColumnsBytes), costs.least_step}) +
                      (outputs > 192 * 128 ? kStepOfLargestCycles : 0);
  const double share = static_cast<double>(ceil_div(plan.x_steps, plan.splits)) / plan.x_steps;
  const double multiplied = share * plan.w_steps * step;
  const bool in_pixels = of.out_stride[1] == 1;
  const double of_pixels = in_pixels ? costs.of_pixels : 1;
  const double stored = kTileCycles + of_pixels * (shape.together ? costs.store_together / 2 : costs.store) * outputs;
  // By turns a tile is stored while the next one is multiplied.
  const double tiles = shape.together ? turns * (multiplied + stored)
                                      : std::max(turns * multiplied + stored,
                                                 std::max(turns, 2.0) * (multiplied + stored) / 2);
  const double pixels = static_cast<double>(of.N) * std::min(double(of.H) * of.W, double(of.P) * of.Q * taps);
  const double bytes = 2 * pixels * of.all_in +
                       (plan.contained ? 4.0 : 2.0) * static_cast<double>(of.N) * of.P * of.Q * of.out_channels;
  const double memory = bytes / sms / costs.memory_bytes;
  plan.cycles = plan.packed && !plan.contained ? kPrepareCycles : 0;
  if (plan.copied) plan.cycles += 2 * pixels * of.all_in * 2 / sms / costs.memory_bytes;
  plan.cycles += in_pixels ? costs.call_of_pixels : costs.call;
  plan.cycles += std::max(tiles, memory) + costs.shorter_share * std::min(tiles, memory);
  if (plan.splits > 1) plan.cycles += kMeetCycles + kMeetSumCycles * outputs + kMeetPartCycles * plan.splits;
}

// How many tiles there are, of which shape and lines are known. False: too many.
inline bool count_tiles(const Grouped& of, Plan& plan) {
  plan.tiles_k = static_cast<int>(ceil_div(of.out_channels, plan.shape.channels));
  int64_t tiles;
  if (plan.windows) {
    plan.tiles_p = static_cast<int>(ceil_div(of.P, plan.tile_lines));
    plan.tiles_q = static_cast<int>(ceil_div(of.Q, plan.tile_columns));
    tiles = of.N * plan.tiles_p * plan.tiles_q * plan.tiles_k;
  } else {
    const int64_t pixels = int64_t{of.P} * of.Q;
    const int64_t slots = of.N * (plan.direct ? ceil_div(pixels, kBlockPixels) * kBlockPixels : pixels);
    if (slots >= kMostSlots) return false;
    plan.tiles_p = 1;
    plan.tiles_q = static_cast<int>(ceil_div(slots, plan.shape.slots));
    tiles = int64_t{plan.tiles_q} * plan.tiles_k;
  }
  plan.tiles = static_cast<int>(tiles);
  return tiles < kMostSlots;
}

// Shared memory. Of columns there are as many stages of x as of w; of windows 2 of x and, if 6 of w find room besides,
// as many more as there is room for.
inline bool count_stages(Plan& plan) {
  plan.x_bytes = plan.box_rows * plan.box_columns * kSlotBytes;
  plan.x_stage_bytes = round_up(plan.x_bytes, kRowsAligned);
  plan.w_stage_bytes = plan.shape.channels * kSlotBytes;
  const auto fits = [&] { return shared_layout(plan).end <= kSharedBytes; };
  if (plan.windows) {
    plan.x_stages = 2;
    for (plan.w_stages = kMostStages; plan.w_stages > 2 && !fits(); --plan.w_stages) {
    }
    while (plan.x_stages < kMostStages && plan.w_stages >= 6 && fits()) ++plan.x_stages;
    while (plan.x_stages > 2 && !fits()) --plan.x_stages;
  } else {
    for (plan.x_stages = plan.w_stages = kMostStages; plan.w_stages > 2 && !fits(); --plan.x_stages) --plan.w_stages;
  }
  const SharedLayout layout = shared_layout(plan);
  plan.smem_bytes = layout.end;
  // What the last tap reads beyond a window has to be shared memory, too.
  if (plan.windows) {
    const int farthest_tap = (plan.box_rows - plan.tile_lines) * plan.pitch + plan.box_columns - plan.tile_columns;
    const int read = (farthest_tap + plan.shape.slots) * kSlotBytes;
    plan.smem_bytes = std::max(plan.smem_bytes, layout.x + (plan.x_stages - 1) * plan.x_stage_bytes + read);
  }
  if (plan.splits > 1)
    plan.smem_bytes = std::max(plan.smem_bytes, layout.x + 4 * plan.shape.slots * part_pitch(plan.shape));
  return plan.smem_bytes <= kSharedBytes;
}

// The rest of a plan of which shape, way and parts are known. False: there is no such plan.
inline bool finish(const Grouped& of, int sms, Plan& plan) {
  const int64_t blocks_c = ceil_div(of.in_channels, kBlockChannels), taps = int64_t{of.R} * of.S;
  if (blocks_c * taps >= 1 << 24 || !count_tiles(of, plan)) return false;
  plan.x_steps = static_cast<int>(blocks_c * plan.loads);
  plan.w_steps = static_cast<int>(blocks_c * taps);
  plan.blocks = std::min(plan.tiles, sms);
  if (plan.splits > 1) {
    // All clusters at once: of 132 SMs there is room for 66, 30 and 15 of 2, 4 and 8 blocks (H100).
    const int room = plan.splits > 2 ? sms * 10 / 11 : sms;
    if (plan.tiles > room / plan.splits || plan.splits > plan.x_steps || !may_split(plan.shape) || of.merged())
      return false;
    plan.blocks = plan.tiles * plan.splits;
  }
  if (!count_stages(plan)) return false;
  estimate(of, sms, plan);
  return true;
}

inline hopper::Columns columns_of(const Correlation& of) {
  return hopper::columns_of({of.W, of.Q, of.S, of.stride_w, of.pad_w, of.dilation_w},
                            {of.H, of.P, of.R, of.stride_h, of.pad_h, of.dilation_h});
}

// 1x1 filters of every pixel, of planes that boxes can take.
inline bool may_be_direct(const Grouped& of, const Alignment& address) {
  const bool points = of.R == 1 && of.S == 1 && of.stride_h == 1 && of.stride_w == 1 && of.pad_h == 0 && of.pad_w == 0;
  return points && of.H == of.P && of.W == of.Q &&
         hopper::vector_of(of.in_stride, of.N, of.all_in, of.H * of.W, address.in) == 8 &&
         hopper::in_eights(of.in_stride[0], of.N > 1) && hopper::in_eights(of.in_stride[1], of.all_in > 1);
}

// x as its copy is.
inline Grouped of_copy(const Grouped& of) {
  Grouped copy = of;
  copy.all_in = hopper::copied_channels(of.all_in);
  if (of.groups == 1) copy.in_channels = copy.own_in = copy.all_in;
  hopper::set_copied_strides(of.all_in, of.H, of.W, copy.in_stride);
  return copy;
}

inline Grouped grouped(const Correlation& of) {
  Grouped result{of, of.groups * of.in_channels, of.in_channels, of.out_channels, of.out_channels};
  const int merged = of.groups > 1 && of.in_channels < kBlockChannels ? kBlockChannels / of.in_channels : 1;
  result.in_channels *= merged;
  result.block_out = static_cast<int>(std::min(int64_t{of.out_channels} * merged, kMostSlots));
  result.out_channels *= of.groups;
  return result;
}

// Of contained operands: groups as gather has them, of whole blocks of input channels and whole tiles of output ones.
inline Grouped grouped_products(const Correlation& of) {
  Grouped result{of, of.groups * of.in_channels, of.in_channels, of.out_channels, of.out_channels};
  result.out_channels *= of.groups;
  return result;
}

inline bool takes_groups(const Grouped& of) {
  return of.groups == 1 || (of.in_channels % kBlockChannels == 0 && of.block_out % 64 == 0);
}

// What tests ask a plan to be; without, the fastest one.
struct Wishes {
  int shape = -1, windows = -1, splits = 0, direct = -1;
};

// The fastest plan so far.
struct Search {
  int sms;
  const Alignment& address;
  const Wishes& wishes;
  Plan& best;
  bool found = false;

  // `plan` with each number of blocks that may share a tile. `of`: with x as it is multiplied.
  void consider(const Grouped& of, Plan& plan) {
    if (plan.contained) return consider_parts(of, plan);
    plan.packed = plan.copied || !can_load_weights(of, address);
    plan.transposed = plan.packed && !plan.copied && !plan.direct && may_transpose(plan.shape) &&
                      can_load_transposed(of, address);
    plan.packed &= !plan.transposed;
    plan.out_vector = 1;
    if (plan.planes) {
      const bool in_pairs = plan.pitch % 2 == 0 && of.Q % plan.tile_columns == 0;
      const int run = !plan.windows ? of.P * of.Q : in_pairs ? plan.tile_columns : 1;
      plan.out_vector = hopper::vector_of(of.out_stride, of.N, of.out_channels, run, address.out);
    }
    consider_parts(of, plan);
  }

  void consider_parts(const Grouped& of, Plan& plan) {
    for (plan.splits = 1; plan.splits <= kMostSplits; plan.splits *= 2) {
      if (wishes.splits > 0 && plan.splits != wishes.splits) continue;
      if (!finish(of, sms, plan)) break;
      if (found && plan.cycles >= best.cycles) continue;
      best = plan;
      found = true;
    }
  }

  // `plan` by columns, or of planes as they are: a line of slots.
  void consider_line(const Grouped& of, Plan plan) {
    plan.loads = plan.direct ? 1 : of.R * of.S;
    plan.tile_lines = plan.box_rows = 1;
    plan.tile_columns = plan.pitch = plan.box_columns = plan.shape.slots;
    consider(of, plan);
  }

  // `plan` by windows: of each number of tiles side by side, the fewest columns.
  void consider_windows(const Grouped& of, Plan plan) {
    const bool strided = of.stride_h == 2 && of.stride_w == 2 && of.dilation_h == 1 && of.dilation_w == 1;
    if (!strided && (of.stride_h != 1 || of.stride_w != 1)) return;
    // Where a line of slots is as good.
    const bool in_lines = has_dense_outputs(of) || (plan.contained && plan.planes);
    if (of.R * of.S == 1 && in_lines && hopper::can_map(columns_of(of))) return;
    const int64_t halo_h = strided ? (of.R - 1) / 2 : int64_t{of.R - 1} * of.dilation_h;
    const int64_t halo_w = strided ? (of.S - 1) / 2 : int64_t{of.S - 1} * of.dilation_w;
    const int most_side = kMostBoxSide / (strided ? 2 : 1);
    if (halo_h >= most_side || halo_w >= most_side) return;
    plan.windows = true;
    plan.loads = strided ? std::min(of.R, 2) * std::min(of.S, 2) : 1;
    const int most_columns = std::min({of.Q, plan.shape.slots, most_side - static_cast<int>(halo_w)});
    for (int columns = most_columns, last = 0; columns > 0 && last <= 16; --columns) {
      const int tiles_q = static_cast<int>(ceil_div(of.Q, columns));
      if (tiles_q == last) continue;
      last = tiles_q;
      plan.tile_columns = static_cast<int>(ceil_div(of.Q, tiles_q));
      plan.pitch = plan.box_columns = plan.tile_columns + static_cast<int>(halo_w);
      const int lines = std::min({(plan.shape.slots - plan.tile_columns) / plan.pitch + 1, of.P,
                                  most_side - static_cast<int>(halo_h)});
      // As many lines as share the image evenly.
      plan.tile_lines = static_cast<int>(ceil_div(of.P, ceil_div(of.P, lines)));
      plan.box_rows = plan.tile_lines + static_cast<int>(halo_h);
      consider(of, plan);
    }
  }

  // Calls consider(plan) with `plan` in each shape of a tile; no tile is of two groups.
  template <typename Consider>
  void with_each_shape(const Grouped& of, Plan plan, const Consider& consider) const {
    for (int i = 0; i < kTileShapeCount; ++i) {
      if (wishes.shape >= 0 && wishes.shape != i) continue;
      plan.shape = kTileShapes[i];
      if (of.groups > 1 && of.block_out % plan.shape.channels != 0) continue;
      consider(plan);
    }
  }

  // `plan` by columns and by windows, of x with channels as neighbours.
  void consider_pixels(const Grouped& of, const Plan& plan) {
    if (hopper::can_map(columns_of(of)) && (plan.planes || has_dense_outputs(of)) && wishes.windows != 1)
      consider_line(of, plan);
    if (wishes.windows != 0) consider_windows(of, plan);
  }
};

inline bool make_plan(const Grouped& of, int sms, const Alignment& address, Plan& best,
                      const Wishes& wishes = Wishes{}) {
  if (int64_t{of.H} * of.W >= kMostSlots || int64_t{of.P} * of.Q >= kMostSlots) return false;
  Plan plan{};
  // Tensors of a single pixel are both planes and pixels; threads store the latter as well.
  const bool in_pixels = hopper::is_in_place(of.in_stride, of.N, of.all_in, of.H, of.W, address.in);
  const bool by_boxes = hopper::is_in_place(of.out_stride, of.N, of.out_channels, of.P, of.Q, address.out);
  const bool single = int64_t{of.P} * of.Q == 1;
  plan.planes = !(in_pixels && (by_boxes || single)) && hopper::are_planes(of.in_stride, of.H, of.W) &&
                hopper::are_planes(of.out_stride, of.P, of.Q);
  plan.by_threads = plan.planes || !by_boxes;
  // Outputs may lie anywhere, as those of a part of a strided dgrad do.
  const bool must_copy = plan.planes || (!in_pixels && hopper::are_planes(of.in_stride, of.H, of.W));
  const bool may_be_copied = must_copy && hopper::can_copy(of.in_stride, of.N, of.all_in, of.H, of.W);
  const bool by_pixels = (must_copy ? may_be_copied : in_pixels) && wishes.direct != 1 && of.R * of.S <= kMostTaps &&
                         of.pad_h >= 0 && of.pad_w >= 0;
  const bool may_multiply_planes = plan.planes && wishes.direct != 0 && wishes.windows != 1 && !of.merged() &&
                                    may_be_direct(of, address);
  Search search{sms, address, wishes, best};
  search.with_each_shape(of, plan, [&](Plan shaped) {
    if (of.merged() && !may_merge(shaped.shape)) return;
    if (may_multiply_planes && may_be_direct(shaped.shape)) {
      Plan direct = shaped;
      direct.direct = true;
      search.consider_line(of, direct);
    }
    shaped.copied = must_copy;
    if (by_pixels) search.consider_pixels(must_copy ? of_copy(of) : of, shaped);
  });
  return search.found;
}

// Contained operands: x is a copy whose channels are neighbours, weights are packed and y lies anywhere. None of them
// is Inf or NaN, so that channels of x may have no weights. False: there is no plan.
inline bool make_contained_plan(const Grouped& of, int sms, uint64_t out, Plan& best, const Wishes& wishes = Wishes{}) {
  if (int64_t{of.H} * of.W >= kMostSlots || int64_t{of.P} * of.Q >= kMostSlots) return false;
  if (of.R * of.S > kMostTaps || of.pad_h < 0 || of.pad_w < 0) return false;
  Plan plan{};
  plan.contained = plan.by_threads = plan.packed = true;
  plan.planes = hopper::are_planes(of.out_stride, of.P, of.Q) && of.out_stride[1] != 1;
  const auto in_fours = [](int64_t step, bool matters) { return !matters || step % 4 == 0; };
  const bool fours = of.out_stride[1] == 1 && of.out_channels % 4 == 0 && out % 16 == 0 &&
                     in_fours(of.out_stride[0], of.N > 1) && in_fours(of.out_stride[2], of.P > 1) &&
                     in_fours(of.out_stride[3], of.Q > 1);
  plan.out_vector = fours ? 4 : 1;
  const Alignment address{0, 0, out};
  Search search{sms, address, wishes, best};
  search.with_each_shape(of, plan, [&](const Plan& shaped) { search.consider_pixels(of, shaped); });
  return search.found;
}

// Null, or why not. Without a GPU: the sizes alone decide.
inline const char* refusal_of_problem(const Problem& problem, Operator op) {
  if (op != Operator::kFprop && op != Operator::kDgrad) return "it computes outputs and input gradients only";
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16) return "it has float16 and bfloat16 only";
  if (op == Operator::kDgrad && ((problem.stride_h != 1 && problem.P > 1) || (problem.stride_w != 1 && problem.Q > 1)))
    return "it takes input gradients with stride 1 only";
  if (problem.groups > 1 && !takes_groups(grouped(correlation_of_problem(problem, op))))
    return "it takes groups of multiples of 64 channels, or of 64 divided by a whole number of them";
  return nullptr;
}

struct Planned {
  Grouped of;
  Plan plan;
  bool found;
};

inline Planned plan_contained(const Correlation& of, int sms, uint64_t out) {
  Planned planned{};
  planned.of = grouped_products(of);
  planned.found = make_contained_plan(planned.of, sms, out, planned.plan);
  return planned;
}

// `of` is one for each problem.
inline const Planned& contained_plan_of(const Problem& problem, Operator op, const Correlation& of, uint64_t out) {
  thread_local Memo<Planned> memo;
  int sms = 0;
  const int gpu = find_gpu(sms);
  return memo.get(key_of(problem, op, 0, 0, out, gpu, sms), [&] { return plan_contained(of, sms, out); });
}

inline const Planned& plan_of(const Problem& problem, Operator op, const Alignment& address) {
  thread_local Memo<Planned> memo;
  int sms = 0;
  const int gpu = find_gpu(sms);
  return memo.get(key_of(problem, op, address.in, address.w, address.out, gpu, sms), [&] {
    Planned planned{};
    planned.of = grouped(correlation_of_problem(problem, op));
    planned.found = make_plan(planned.of, sms, address, planned.plan);
    return planned;
  });
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (const char* reason = refusal_of_problem(problem, op)) return reason;
  int sms = 0;
  if (find_gpu(sms) != 90) return "it needs a Hopper GPU (compute capability 9.0)";
  if (!plan_of(problem, op, Alignment{}).found)
    return "it reads planes without gaps, or channels_last of multiples of 8 channels, with filters boxes reach";
  return nullptr;
}

inline double cycles(const Problem& problem, Operator op) { return plan_of(problem, op, Alignment{}).plan.cycles; }

// Of planes wgmma reads x itself. us, fp16, this engine / wgmma, behind their estimates (H100, 2026-11-26, by turns in
// one process), 16 images, 3x3: 64 to 64, 56x56, 19 / 25, 19 / 9; 128x128 74 / 52, 61 / 31; 128 to 128, 256x256, 683 /
// 543, 594 / 459; 320 to 320, 64x64, 221 / 269, 195 / 212; 16 to 32, 112x112, 47 / 26, 32 / 15, one image 12 / 13, 11 /
// 3; 8 to 64, 64x64, 48 / 22, 17 / 4; 5x5, 32 to 32, 64x64, 39 / 26, 31 / 15. Hence: wgmma's call takes 12 us besides,
// and what the estimates lack are 15% of both and, here, what boxes of less than 64 channels take.
constexpr double kWgmmaCallCycles = 12 * 1650;

inline bool wgmma_is_faster(const Problem& problem, Operator op) {
  const Planned& planned = plan_of(problem, op, Alignment{});
  if (!planned.plan.copied || kWgmmaEngine.refusal(problem, op) != nullptr) return false;
  const int channels = planned.of.in_channels;
  const double factor = channels < 16 ? 3 : channels < 32 ? 1.5 : channels < 64 ? 1.35 : 1.15;
  const double own = kCallCycles + (planned.plan.cycles - kCallCycles) * factor;
  return kWgmmaCallCycles + 1.15 * kWgmmaEngine.cycles(problem, op) < own;
}

// Few channels, 3x3, us, fp16, this engine / stem / direct: 4 to 64, 128x128, one image and 16, 21 / 10 / 13 and 144 /
// 25 / 79 (H100, 2026-11-26). Gradients with few channels on one side were not measured.
inline const char* yields(const Problem& problem, Operator op) {
  if (problem.C < 8 || (op == Operator::kDgrad && problem.K < 8)) return "others are faster with few channels";
  if (problem.groups > 1 && (problem.C == problem.groups || problem.K == problem.groups))
    return "others are faster with groups of a channel";
  if (wgmma_is_faster(problem, op)) return "wgmma is faster by the estimates, as it does not copy x";
  return nullptr;
}

inline Alignment alignment_of(Operator op, const Pointers& pointers) {
  const void* const in_ptr = op == Operator::kDgrad ? pointers.dy : pointers.x;
  return {reinterpret_cast<uint64_t>(in_ptr), reinterpret_cast<uint64_t>(pointers.w),
          reinterpret_cast<uint64_t>(pointers.out)};
}

inline int packed_row_channels(const Grouped& of) { return round_up(of.in_channels, 8); }

// Of the workspace: packed weights first.
inline int64_t packed_bytes(const Grouped& of, const Plan& plan) {
  if (!plan.packed) return 0;
  const int64_t bytes = int64_t{2} * of.out_channels * of.R * of.S * packed_row_channels(of);
  return plan.copied ? (bytes + 255) / 256 * 256 : bytes;
}

inline int64_t copied_bytes(const Grouped& of, const Plan& plan) {
  return plan.copied ? hopper::copied_bytes(of.N, of.all_in, of.H, of.W) : 0;
}

// Boxes start at multiples of 16 bytes, and where x is only a call tells. In channels_last one that lies elsewhere is
// this engine's.
inline const Engine& engine_of_others(const Problem& problem, Operator op) {
  return kGatherEngine.refusal(problem, op) == nullptr ? kGatherEngine : kDirectEngine;
}

inline int64_t workspace_bytes(const Problem& problem, Operator op, const Pointers& pointers) {
  const Planned& planned = plan_of(problem, op, alignment_of(op, pointers));
  if (!planned.found) return engine_of_others(problem, op).workspace_bytes(problem, op, pointers);
  return packed_bytes(planned.of, planned.plan) + copied_bytes(planned.of, planned.plan);
}

inline void set_numbers(Params& params) {
  const Grouped& of = params.of;
  const Plan& plan = params.plan;
  params.by_tiles_k = make_divisor(plan.tiles_k);
  params.by_tiles_p = make_divisor(plan.tiles_p);
  params.by_tiles_q = make_divisor(plan.tiles_q);
  params.by_pitch = make_divisor(plan.pitch);
  params.by_plane = make_divisor(int64_t{of.P} * of.Q);
  params.by_row = make_divisor(of.Q);
  params.by_blocks = make_divisor(ceil_div(int64_t{of.P} * of.Q, kBlockPixels));
  params.by_block_out = make_divisor(of.block_out);
  params.by_runs = make_divisor(std::max(plan.tile_columns / plan.out_vector, 1));
  params.out_step = step_of_outputs(of);
  // Taps in the order of the stages that they read: by phase, of which there is one without a stride.
  const int phases = plan.windows && of.stride_h == 2 ? 2 : 1;
  int taps = 0, loads = 0;
  const bool flipped = plan.transposed && of.flipped;
  const auto add = [&](int row, int column, int shift, int r, int s) {
    if (flipped) r = of.R - 1 - r, s = of.S - 1 - s;
    params.tap[taps++] = {static_cast<int16_t>(shift), static_cast<uint8_t>(r), static_cast<uint8_t>(s)};
    Load& load = params.load[loads];
    if (load.taps++ == 0) load = {static_cast<int16_t>(row), static_cast<int16_t>(column), int16_t(taps - 1), 1};
  };
  if (!plan.windows) {
    for (int r = 0; r < of.R; ++r) {
      for (int s = 0; s < of.S; ++s, ++loads) add(r * of.dilation_h, s * of.dilation_w, 0, r, s);
    }
    return;
  }
  for (int phase_h = 0; phase_h < std::min(phases, of.R); ++phase_h) {
    for (int phase_w = 0; phase_w < std::min(phases, of.S); ++phase_w, ++loads) {
      for (int r = phase_h; r < of.R; r += phases) {
        for (int s = phase_w; s < of.S; s += phases)
          add(phase_h, phase_w, r / phases * of.dilation_h * plan.pitch + s / phases * of.dilation_w, r, s);
      }
    }
  }
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

inline cudaError_t make_out_map(Params& params) {
  const Grouped& of = params.of;
  const Plan& plan = params.plan;
  if (plan.by_threads) return cudaSuccess;
  using hopper::step_bytes;
  const uint64_t K = of.out_channels, P = of.P, Q = of.Q, N = of.N;
  const uint32_t columns = plan.tile_columns, lines = plan.tile_lines;
  const uint32_t box[4] = {kStagedChannels, columns, lines, 1};
  if (!plan.windows) {
    const int64_t step = step_of_outputs(of);
    const uint64_t sizes[4] = {K, N * P * Q, 1, 1}, strides[3] = {step_bytes(step, of.N * of.P * of.Q), 16, 16};
    return hopper::make_box_map(hopper::BoxUse::kStore, params.out_ptr, 2, sizes, strides, box, params.out_map);
  }
  const uint64_t sizes[4] = {K, Q, P, N};
  const uint64_t strides[3] = {step_bytes(of.out_stride[3], of.Q), step_bytes(of.out_stride[2], of.P),
                               step_bytes(of.out_stride[0], of.N)};
  return hopper::make_box_map(hopper::BoxUse::kStore, params.out_ptr, 2, sizes, strides, box, params.out_map);
}

// x as boxes or columns, as it is multiplied.
inline cudaError_t make_in_map(Params& params) {
  const Grouped& of = params.of;
  const Plan& plan = params.plan;
  using hopper::step_bytes;
  const uint64_t C = of.all_in, H = of.H, W = of.W, N = of.N;
  if (plan.direct) {
    const uint64_t sizes[4] = {H * W, C, N, 1};
    const uint64_t strides[3] = {step_bytes(of.in_stride[1], of.all_in), step_bytes(of.in_stride[0], of.N), 16};
    const uint32_t box[4] = {kBlockPixels, kBlockChannels, 1, 1};
    return hopper::make_box_map(hopper::BoxUse::kLoadRows, params.in_ptr, 2, sizes, strides, box, params.in_map);
  }
  const uint64_t sizes[4] = {C, W, H, N};
  const uint64_t strides[3] = {step_bytes(of.in_stride[3], of.W), step_bytes(of.in_stride[2], of.H),
                               step_bytes(of.in_stride[0], of.N)};
  if (plan.windows) {
    const uint32_t step_h = of.stride_h, step_w = of.stride_w;
    const uint32_t box[4] = {kBlockChannels, plan.box_columns * step_w, plan.box_rows * step_h, 1};
    return hopper::make_box_map(hopper::BoxUse::kLoadRows, params.in_ptr, 2, sizes, strides, box, params.in_map, step_w,
                                step_h);
  }
  const hopper::Columns columns = columns_of(of);
  return hopper::make_columns_map(params.in_ptr, 2, sizes, strides, columns.first, columns.last, columns.steps,
                                  plan.box_columns, params.in_map);
}

// [r][s][output channel][input channel], or (transposed) [r][s][input channel][output channel].
inline cudaError_t make_w_map(const void* w_ptr, Params& params) {
  const Grouped& of = params.of;
  const Plan& plan = params.plan;
  using hopper::step_bytes;
  const uint64_t C = packed_row_channels(of), K = of.out_channels, R = of.R, S = of.S;
  const int64_t row = packed_row_channels(of), taps = int64_t{of.R} * of.S;
  const uint64_t tap_strides[2] = {step_bytes(plan.packed ? row : of.w_stride_s, of.S),
                                   step_bytes(plan.packed ? row * of.S : of.w_stride_r, of.R)};
  if (plan.transposed) {
    const uint64_t sizes[4] = {K, C, S, R};
    const uint64_t strides[3] = {step_bytes(of.w_stride_in, of.in_channels), tap_strides[0], tap_strides[1]};
    const uint32_t box[4] = {kRowChannels, kBlockChannels, 1, 1};
    return hopper::make_box_map(hopper::BoxUse::kLoadRows, w_ptr, 2, sizes, strides, box, params.w_map);
  }
  const uint64_t sizes[4] = {C, K, S, R};
  const uint64_t strides[3] = {step_bytes(plan.packed ? row * taps : of.w_stride_out, of.out_channels), tap_strides[0],
                               tap_strides[1]};
  const uint32_t box[4] = {kBlockChannels, static_cast<uint32_t>(plan.shape.channels), 1, 1};
  return hopper::make_box_map(hopper::BoxUse::kLoadRows, w_ptr, 2, sizes, strides, box, params.w_map);
}

inline cudaError_t make_maps(const void* w_ptr, Params& params) {
  cudaError_t error = make_in_map(params);
  if (error == cudaSuccess) error = make_w_map(w_ptr, params);
  return error == cudaSuccess ? make_out_map(params) : error;
}

template <typename Stored, int SHAPE, bool SPLIT, bool DIRECT, bool TRANSPOSED, bool MERGED = false,
          bool CONTAINED = false>
cudaError_t run_kernel(const Params& params, cudaStream_t stream) {
  constexpr Instance kInstance{"tma_kernel",
                               {kTypeId<Stored>, SHAPE, SPLIT + 2 * CONTAINED, DIRECT, TRANSPOSED, MERGED}};
  record(kInstance);
  if constexpr (!is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    constexpr TileShape kShape = kTileShapes[SHAPE];
    const auto kernel = tma_kernel<Stored, kShape.channels, kShape.slots, kShape.together, SPLIT, DIRECT, TRANSPOSED,
                                   MERGED, CONTAINED>;
    const Plan& plan = params.plan;
    // Always as much: threads of the host launch a kernel with different plans.
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    return hopper::launch_early_in_clusters(kernel, static_cast<unsigned>(plan.blocks), plan.splits, kThreads,
                                            plan.smem_bytes, stream, params);
  }
}

template <typename Stored, int SHAPE, bool DIRECT, bool TRANSPOSED>
cudaError_t run_split(const Params& params, cudaStream_t stream) {
  if constexpr (may_split(kTileShapes[SHAPE])) {
    if (params.plan.splits > 1) return run_kernel<Stored, SHAPE, true, DIRECT, TRANSPOSED>(params, stream);
  }
  return run_kernel<Stored, SHAPE, false, DIRECT, TRANSPOSED>(params, stream);
}

template <typename Stored, int SHAPE>
cudaError_t run_source(const Params& params, cudaStream_t stream) {
  if constexpr (may_merge(kTileShapes[SHAPE])) {
    if (params.of.merged()) return run_kernel<Stored, SHAPE, false, false, false, true>(params, stream);
  }
  if constexpr (may_be_direct(kTileShapes[SHAPE])) {
    if (params.plan.direct) return run_split<Stored, SHAPE, true, false>(params, stream);
  }
  if constexpr (may_transpose(kTileShapes[SHAPE])) {
    if (params.plan.transposed) return run_split<Stored, SHAPE, false, true>(params, stream);
  }
  return run_split<Stored, SHAPE, false, false>(params, stream);
}

template <typename Stored, int SHAPE = 0>
cudaError_t run_shape(const Params& params, cudaStream_t stream) {
  if constexpr (SHAPE < kTileShapeCount) {
    constexpr TileShape kShape = kTileShapes[SHAPE];
    const TileShape& shape = params.plan.shape;
    if (shape.channels == kShape.channels && shape.slots == kShape.slots && shape.together == kShape.together)
      return run_source<Stored, SHAPE>(params, stream);
    return run_shape<Stored, SHAPE + 1>(params, stream);
  }
  return cudaErrorInvalidConfiguration;
}

template <int SHAPE = 0>
cudaError_t run_contained_shape(const Params& params, cudaStream_t stream) {
  if constexpr (SHAPE < kTileShapeCount) {
    constexpr TileShape kShape = kTileShapes[SHAPE];
    const TileShape& shape = params.plan.shape;
    if (shape.channels != kShape.channels || shape.slots != kShape.slots || shape.together != kShape.together)
      return run_contained_shape<SHAPE + 1>(params, stream);
    if constexpr (may_split(kShape)) {
      if (params.plan.splits > 1)
        return run_kernel<Half, SHAPE, true, false, false, false, true>(params, stream);
    }
    return run_kernel<Half, SHAPE, false, false, false, false, true>(params, stream);
  }
  return cudaErrorInvalidConfiguration;
}

// What is packed and copied before the main kernel, by one launch.
inline cudaError_t prepare(const Grouped& of, const Plan& plan, const void* in_ptr, const void* w_ptr,
                           uint8_t* workspace, cudaStream_t stream) {
  PackParams pack{w_ptr,
                  workspace,
                  of.w_stride_group,
                  of.w_stride_out,
                  of.w_stride_in,
                  of.w_stride_r,
                  of.w_stride_s,
                  of.R,
                  of.S,
                  of.out_channels,
                  of.in_channels,
                  packed_row_channels(of),
                  make_divisor(of.own_out),
                  make_divisor(of.own_in),
                  make_divisor(of.in_channels / of.own_in),
                  of.flipped,
                  0};
  const int64_t pack_tiles = ceil_div(pack.row_channels, kPackTile) * ceil_div(pack.out_channels, kPackTile);
  int64_t blocks = pack_tiles * of.R * of.S;
  if (blocks >= int64_t{1} << 30) return cudaErrorInvalidConfiguration;
  pack.blocks = static_cast<int>(blocks);
  hopper::PlanesCopy copy{};
  if (plan.copied) {
    int64_t more = 0;
    copy = hopper::make_planes_copy(in_ptr, of.in_stride, of.N, of.all_in, int64_t{of.H} * of.W,
                                    workspace + packed_bytes(of, plan), more);
    blocks += more;
  }
  return hopper::launch_early(tma_prepare_kernel, static_cast<unsigned>(blocks), kPackThreads, hopper::kCopyBytes,
                              stream, pack, copy);
}

inline cudaError_t run_contained(const Planned& planned, const ContainedProducts& products, cudaStream_t stream) {
  if (!planned.found) return cudaErrorInvalidConfiguration;
  Params params{};
  params.in_ptr = products.in_ptr;
  params.w_ptr = products.w_ptr;
  params.bias_ptr = products.bias_ptr;
  params.out_ptr = products.out_ptr;
  params.control = products.control;
  params.w_factors = products.w_factors;
  params.of = planned.of;
  params.plan = planned.plan;
  set_numbers(params);
  const cudaError_t error = make_maps(products.w_ptr, params);
  return error == cudaSuccess ? run_contained_shape(params, stream) : error;
}

template <typename Stored>
cudaError_t run(const void* w_ptr, void* workspace, Params& params, cudaStream_t stream) {
  const Plan& plan = params.plan;
  if (plan.packed) {
    uint8_t* const start = static_cast<uint8_t*>(workspace);
    const cudaError_t error = prepare(params.of, plan, params.in_ptr, w_ptr, start, stream);
    if (error != cudaSuccess) return error;
    params.w_ptr = start;
    if (plan.copied) {
      params.in_ptr = start + packed_bytes(params.of, plan);
      params.of = of_copy(params.of);
    }
  }
  set_numbers(params);
  const cudaError_t error = make_maps(plan.packed ? workspace : w_ptr, params);
  if (error != cudaSuccess) return error;
  return run_shape<Stored>(params, stream);
}

inline cudaError_t launch(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  Params params{};
  params.in_ptr = op == Operator::kDgrad ? pointers.dy : pointers.x;
  params.bias_ptr = op == Operator::kDgrad ? nullptr : pointers.bias;
  params.out_ptr = pointers.out;
  const Planned& planned = plan_of(problem, op, alignment_of(op, pointers));
  if (!planned.found) return engine_of_others(problem, op).launch(op, problem, pointers, stream);
  params.of = planned.of;
  params.plan = planned.plan;
  if (problem.dtype == DType::kFloat16) return run<Half>(pointers.w, pointers.workspace, params, stream);
  return run<BFloat16>(pointers.w, pointers.workspace, params, stream);
}

#endif  // launchers

inline void describe(const Plan& plan, char* text, size_t text_size) {
  char pixels[64];
  if (plan.windows)
    snprintf(pixels, sizeof pixels, "%d lines x %d columns, by windows", plan.tile_lines, plan.tile_columns);
  else
    snprintf(pixels, sizeof pixels, "%d pixels, by taps", plan.shape.slots);
  snprintf(text, text_size,
           "%stile of %d channels x %s, x in %d stages of %d bytes, weights %sin %d of %d, %d blocks for %d tiles, %d "
           "of which share one, about %.3g Mcycles",
           plan.copied   ? "x copied, "
           : plan.direct ? "x in planes, "
                         : "",
           plan.shape.channels, pixels, plan.x_stages, plan.x_stage_bytes, plan.packed ? "packed, " : "", plan.w_stages,
           plan.w_stage_bytes, plan.blocks, plan.tiles, plan.splits, plan.cycles * 1e-6);
}

inline void describe(const Problem& problem, Operator op, char* text, size_t text_size) {
  describe(plan_of(problem, op, Alignment{}).plan, text, text_size);
}

#endif  // host

}  // namespace tma

#if !defined(__CUDACC_RTC__)

bool can_multiply_contained(const Correlation& of, int sms, uint64_t out, double& cycles) {
  const tma::Planned planned = tma::plan_contained(of, sms, out);
  cycles = planned.plan.cycles;
  return planned.found;
}

void describe_contained(const Problem& problem, Operator op, const Correlation& of, char* text, size_t text_size) {
  tma::describe(tma::contained_plan_of(problem, op, of, 0).plan, text, text_size);
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)
cudaError_t multiply_contained(const Problem& problem, Operator op, const ContainedProducts& products,
                               cudaStream_t stream) {
  const uint64_t out = reinterpret_cast<uint64_t>(products.out_ptr);
  return tma::run_contained(tma::contained_plan_of(problem, op, products.of, out), products, stream);
}
#endif

#endif  // host

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
extern const Engine kTmaEngine{"tma",         tma::refusal, tma::workspace_bytes, tma::launch,
                               tma::describe, tma::yields,  tma::cycles};
#endif

}  // namespace modelnew
