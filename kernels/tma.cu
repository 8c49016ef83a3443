// tma engine: implicit GEMM on Hopper's tensor cores (wgmma) for 16-bit tensors. The Tensor Memory Accelerator (TMA)
// brings both operands to shared memory; no thread touches them. It computes fprop and dgrad, at a stride too. For the
// gather engine it also multiplies fp32 tensors that gather has copied as scaled fp16 (`contained`, contained.cuh).
// Deterministic: each output is one sum, added in a fixed order.
//
//   tma_prepare_kernel   packs w as [k][r][s][c] where it does not lie so (NCHW weights, dgrad, merged groups), and
//                        copies x to channels_last where no tile can multiply it in place
//   tma_kernel           y from x (fprop), dx from dy (dgrad)
//
// GEMM: rows = output channels, columns = output pixels, reduction = (block of input channels, r, s, channel). A stage
// of shared memory has rows of 128 bytes in TMA's 128-byte swizzle: up to 64 channels of one filter tap (w), or of one
// pixel (x). The row of a pixel is called its slot. Boxes have as many channels as there are, as TMA takes its time to
// write zeros, and leave the rest of a row alone. There are three ways to load x:
//
//   columns   im2col: a stage holds the pixels that one tap reads for the tile. Output pixels are numbered through all
//             images, hence any stride and no wasted slot; but each tap loads x from the L2 cache again. Rows of taps
//             that meet nothing but padding in a tile are left out, as with large dilations; so an Inf or NaN among
//             their weights makes no NaN there
//   windows   a stage holds the receptive field of the tile as one TMA box; a tap reads it from a start address that is
//             shifted by whole slots. With stride 2 a stage holds one phase of x: every other row and column
//   direct    1x1 filters on NCHW: a stage holds rows of 64 pixels of one channel, which wgmma reads transposed. Images
//             are padded to multiples of 64 pixels. Boxes of such rows store y as well
//
//       pitch = columns + halo
//     +-------------+
//     | o  o  o  o  | .  .     o slots of outputs, . halo. wgmma multiplies consecutive slots, hence also the halo
//     | o  o  o  o  | .  .     between two lines; the sums there are not stored.
//     +-------------+ .  .     Tap (r, s) starts r * dilation_h * pitch + s * dilation_w slots further on.
//       .  .  .  .    .  .
//
// One persistent block per SM, 12 warps in three roles:
//
//   warps 0-7   multiply. Two warpgroups take tiles by turns, one stores while the other multiplies; or both multiply
//               half of the channels of one tile (TileShape::together), which loads fewer bytes per product
//   warp 8      one thread issues the loads of x; with direct half of them, and one of warp 11 the others
//   warp 9      one thread issues the loads of w; of 128 transposed channels half, and one of warp 10 the others
//
//   x --TMA--> ring of x stages --+                            +--TMA------> y in channels_last, or direct
//                                 +--> wgmma --> registers --> staging
//   w --TMA--> ring of w stages --+                            +--threads--> other NCHW, or K not a multiple of 8
//
//   per stage: full  (TMA has written it)  --> multiplying warps;   empty (all of them have read it) --> loading thread
//
// dgrad at a stride: rows and columns of dx that are a stride apart, a phase, are met by the same taps. Each phase has
// tiles of its own in the same launch, by windows, and multiplies its own taps alone (out_phases.cuh). The filter is
// not cut up: a tap says where its weights are.
//
// Where there are fewer tiles than SMs, clusters of 2, 4 or 8 blocks split the reduction of each tile. Every block
// leaves its sums in shared memory, then adds those of all blocks, in a fixed order, for a share of the tile.
//
// Tile 0 holds the last pixels, because the preceding kernel wrote them last and the L2 cache still has them.
// Neighbouring blocks have tiles of the same pixels, hence x comes from memory once.
//
// Groups of a multiple of 64 channels are multiplied one by one. Smaller groups are merged, as many as 64 input
// channels hold, with zero weights between them and behind them. An Inf or NaN of another group times zero is NaN,
// hence each NaN that results is computed again from its own group while it is staged (mend). Merged groups with fewer
// than 64 output channels have a tile of their own, of which threads store the first channels.
//
// Bound by memory for 1x1 filters with many images, by the tensor cores for 3x3 filters with many channels, by the
// bandwidth of the L2 cache for columns in small tiles, by what a tap takes beside products where channels are few, and
// by the launch for one image. Measurements: docs/lab/tma.md.
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstdio>

#include "device.cuh"
#include "engines.cuh"
#include "memo.cuh"
#endif

#include "channels_last.cuh"
#include "cluster.cuh"
#include "columns.cuh"
#include "contained.cuh"
#include "correlation.cuh"
#include "divisor.cuh"
#include "im2col_map.cuh"
#include "numerics.cuh"
#include "out_phases.cuh"
#include "planes_copy.cuh"
#include "problem.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"
#include "wgmma_forms.cuh"

namespace modelnew {
namespace tma {

// ---- Geometry, host and device ----

constexpr int kBlockChannels = 64;                        // input channels of a stage, at most
constexpr int kRowChannels = 64;                          // output channels in a row of transposed weights
constexpr int kSlotBytes = hopper::kBoxRowBytes;          // 64 channels of 16 bits
constexpr int kRowsAligned = 1024;                        // period of the swizzle, in bytes
constexpr int kStagedChannels = 64;                       // output channels of a TMA box of y
constexpr int kMultiplyingThreads = 256, kThreads = 384;  // the last four warps issue loads
static_assert(kThreads == kMultiplyingThreads + 128, "setmaxnreg applies to whole warpgroups");
constexpr int kMultiplyingRegisters = 232, kOrderingRegisters = 40;  // per thread, from 168 at launch
static_assert(2 * kMultiplyingRegisters + kOrderingRegisters <= 3 * 168, "no more registers than the block has");
constexpr int kMostTaps = 49;            // filter taps in the kernel's parameters
constexpr int kBlockPixels = 64;         // pixels of a TMA box of NCHW (direct)
constexpr int kMostStages = 8;           // of each ring
constexpr int kSharedBytes = 232448;     // shared memory that a block may have on sm_90
constexpr int kMostBoxSide = 256;        // rows or columns of a TMA box
constexpr int kMostSplits = 8;           // blocks of a portable cluster
constexpr int64_t kMostSlots = 1 << 30;  // slots, and tiles, of a launch
constexpr int kPackThreads = hopper::kCopyThreads, kPackTile = 32;

// A tile shape that a kernel is compiled for. `together`: both warpgroups multiply one tile, half of its channels
// each; otherwise they take tiles by turns.
struct TileShape {
  int channels, slots;
  bool together;

  MODELNEW_HOST_DEVICE constexpr int own_channels() const { return together ? channels / 2 : channels; }
};

constexpr TileShape kTileShapes[] = {{128, 256, true}, {128, 192, true}, {128, 128, true}, {128, 64, false},
                                     {64, 256, false}, {64, 232, false}, {64, 224, false}, {64, 208, false},
                                     {64, 192, false}, {64, 128, false}, {64, 64, false}};
constexpr int kTileShapeCount = sizeof kTileShapes / sizeof kTileShapes[0];

// Whether a kernel multiplies NCHW in place with this shape.
MODELNEW_HOST_DEVICE constexpr bool may_be_direct(const TileShape& shape) {
  return shape.slots == 256 || shape.slots == 128;
}

// Whether a cluster may split the reduction of a tile. Only problems with few tiles need that, and theirs are small.
MODELNEW_HOST_DEVICE constexpr bool may_split(const TileShape& shape) { return shape.slots <= 128; }

// Whether a kernel reads filters with contiguous output channels in place, besides direct ones, which all do. Packing
// costs most, relatively, where the problem is small and so are its tiles.
MODELNEW_HOST_DEVICE constexpr bool may_transpose(const TileShape& shape) { return shape.slots <= 128; }

// Whether a kernel leaves out taps that meet nothing but padding. That costs a little, so it is one of its own, and
// problems with such taps are large.
MODELNEW_HOST_DEVICE constexpr bool may_leave_out(const TileShape& shape) {
  return shape.channels == 128 && shape.slots == 256;
}

// Whether a kernel multiplies merged groups with this shape. Only some shapes of 64 channels have one.
MODELNEW_HOST_DEVICE constexpr bool may_merge(const TileShape& shape) {
  return shape.channels == 64 && (shape.slots == 256 || shape.slots == 224 || shape.slots == 128 || shape.slots == 64);
}

// The problem as the kernel multiplies it: out_channels counts all groups; in_channels counts the channels that one
// output channel reads, which for merged groups are those of all groups that are merged.
struct Grouped : Correlation {
  int all_in;           // channels of x
  int own_in, own_out;  // channels of one group
  int block_out;        // output channels that read the same channels of x

  // Whether a stage holds channels that an output does not read.
  MODELNEW_HOST_DEVICE bool merged() const { return own_in < all_in && own_in % kBlockChannels != 0; }
};

struct Plan {
  TileShape shape;
  bool windows;
  bool packed;                          // weights are packed first; otherwise TMA reads them in place
  bool transposed;                      // in place, with contiguous output channels
  bool planes;                          // x and y are NCHW
  bool direct;                          // x is NCHW and is multiplied in place
  bool copied;                          // x is copied to channels_last first
  bool by_threads;                      // threads store y, with any strides; otherwise TMA does
  bool contained;                       // operands are scaled fp16 copies of fp32 tensors, y is fp32
  int out_vector;                       // by_threads: outputs per store
  int splits;                           // blocks of a cluster, each with a part of the reduction of one tile
  int tile_lines, tile_columns, pitch;  // columns, direct: one line of shape.slots columns
  int loads;                            // stages of x per block of input channels
  int box_rows, box_columns;            // of a stage in shared memory
  int block_channels;                   // input channels of a stage
  int whole_blocks, short_steps;        // blocks of four steps of 16 channels, and the steps of the others
  int x_bytes, x_stage_bytes, x_stages, w_bytes, w_stage_bytes, w_stages;
  int x_steps, w_steps;           // stages of one tile; w_steps: of one of each phase
  int step_k;                     // channels from tile to tile, of which the tile may have more
  double met;                     // the part of x_steps that tiles take on average
  bool leaves_out;                // columns: rows of taps that meet nothing in a tile; met is less than 1
  int phases;                     // of y; 1 but for dgrad at a stride
  int tiles_k, tiles_p, tiles_q;  // of a phase
  int tiles, phase_tiles;         // of all phases, and of each
  int pixel_tiles;                // of a phase, of the same channels
  int blocks;                     // of the launch
  int smem_bytes;
  double cycles;  // estimate
};

// A stage of x: its first row and column, relative to the receptive field of the tile's first output, and its taps. If
// phases of y are several, each has one.
struct Load {
  int16_t row, column, first_tap, taps;
};

// A filter tap: by how many slots it is shifted in its stage, and where its weights are.
struct Tap {
  int16_t shift;
  uint8_t r, s;
};

// The first row and column of a phase of y.
struct Phase {
  int row, column;
};

struct Params {
  const void *in_ptr, *bias_ptr;
  const void* w_ptr;  // packed weights, which mend() reads; or null
  void* out_ptr;
  Grouped of;
  Plan plan;
  int64_t out_step;  // columns: from pixel to pixel of y
  Divisor by_tiles_k, by_tiles_q, by_tiles_p, by_pitch, by_plane, by_row, by_runs, by_blocks, by_block_out, by_dilation,
      by_phases;  // in NCHW by their number, elsewhere by their tiles
  Load load[kMostTaps];
  Tap tap[kMostTaps];
  Phase phase[kMostOutPhases];
  hopper::BoxMap in_map, w_map, out_map[kMostOutPhases];
  // Contained operands only.
  const ContainedControl* control;
  const float* w_factors;
};

struct PackParams {
  const void* w_ptr;
  void* packed_ptr;
  int64_t stride_group, stride_out, stride_in, stride_r, stride_s;
  int R, S, out_channels, in_channels, row_channels;  // row_channels: of a packed row, a multiple of 8 (TMA strides)
  Divisor by_own_out, by_own_in, by_merged;
  bool flipped;
  int blocks;  // that pack; later blocks of the launch copy x
};

// Offsets of the parts of a block's shared memory:
//
//   | staging of warpgroup 0 | of 1 | x stages ... | w stages ... | barriers |
struct SharedLayout {
  int barriers, staging, x, w, end;
};

// by_threads: bytes from channel to channel of a warp's staging. The extra 16 bytes spread stmatrix over all banks.
MODELNEW_HOST_DEVICE constexpr int staged_pitch(int slots) { return 2 * slots + 16; }

// Floats from slot to slot of a block's partial sums. The extra 4 spread a warp's stores over all banks.
MODELNEW_HOST_DEVICE constexpr int part_pitch(const TileShape& shape) { return shape.channels + 4; }

// y in fp32: a warp stages runs of 64 slots of its 16 channels, [slot][channel]. With the 4 extra floats per slot both
// single values of eight channels and 4-element vectors of eight slots meet all banks.
constexpr int kRunSlots = 64, kRunPitch = 20;

// Staging of one warpgroup.
MODELNEW_HOST_DEVICE inline int staged_bytes(const Plan& plan) {
  if (plan.contained) return 4 * kRunSlots * kRunPitch * static_cast<int>(sizeof(float));
  if (plan.by_threads) return kStagedChannels * staged_pitch(plan.shape.slots);
  return plan.shape.own_channels() / kStagedChannels * plan.shape.slots * kSlotBytes;
}

// wgmma also reads slots behind the last window, for sums that are not stored. The w stages follow x, hence these reads
// stay within shared memory.
MODELNEW_HOST_DEVICE inline SharedLayout shared_layout(const Plan& plan) {
  SharedLayout layout{};
  layout.staging = 0;
  layout.x = layout.staging + 2 * staged_bytes(plan);
  layout.w = layout.x + plan.x_stages * plan.x_stage_bytes;
  layout.barriers = layout.w + plan.w_stages * plan.w_stage_bytes;
  layout.end = layout.barriers + (4 * kMostStages + 2) * 8;
  return layout;
}

// The stages of x of one tile that a block of a cluster multiplies.
struct Share {
  int first, last;
};

MODELNEW_HOST_DEVICE inline Share share_of(const Plan& plan, int part) {
  return {part * plan.x_steps / plan.splits, (part + 1) * plan.x_steps / plan.splits};
}

// First output and first channel of a tile, and the channel behind its last one. With columns, q counts the pixels of
// all images. p and q count the rows and columns of the phase.
struct Tile {
  int phase, n, p, q, k, end_k;
};

// The phase of a tile, and its number there. In NCHW tiles of all phases take turns, as these share sectors of memory,
// and so do phases within a block, since they take different times. Elsewhere those that take longest come first.
struct PlaceOfTile {
  int phase, number;
};

MODELNEW_HOST_DEVICE inline PlaceOfTile place_of_tile(const Params& params, int number) {
  const int of_which = static_cast<int>(params.by_phases.divisor);
  const int first = quotient(number, params.by_phases), second = number - first * of_which;
  if (params.plan.planes) return {(second + first) % of_which, first};
  return {first, second};
}

MODELNEW_HOST_DEVICE inline Tile locate_tile(const Params& params, int number) {
  const Plan& plan = params.plan;
  const auto [phase, of_phase] = place_of_tile(params, number);
  const int pixels = quotient(of_phase, params.by_tiles_k);
  const int from_start = plan.pixel_tiles - 1 - pixels;
  const int k = (of_phase - pixels * plan.tiles_k) * plan.step_k;
  const int end_k = k + plan.step_k < params.of.out_channels ? k + plan.step_k : params.of.out_channels;
  const int row = quotient(from_start, params.by_tiles_q), image = quotient(row, params.by_tiles_p);
  return {phase,
          image,
          (row - image * plan.tiles_p) * plan.tile_lines,
          (from_start - row * plan.tiles_q) * plan.tile_columns,
          k,
          end_k};
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// ---- Device code ----

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
  // Completes when it is the warpgroup's turn to multiply.
  __device__ __forceinline__ uint32_t turn(int warpgroup) const { return barrier(4, warpgroup); }
};

__device__ __forceinline__ void warpgroup_sync(int warpgroup) { hopper::named_barrier(1 + warpgroup, 128); }

// Iterates over the x stages of a tile: `load`, from the first one to the end, within `block` of input channels.
struct Step {
  int block, load, first, end;

  __device__ __forceinline__ void next() {
    if (++load == end) {
      load = first;
      ++block;
    }
  }
};

// The x stages that a block multiplies of a tile.
struct Steps {
  int count;
  Step first;
};

// Columns: without rows of taps that meet nothing but padding; one at least is left.
__device__ __forceinline__ Steps met_steps(const Params& params, int first_pixel) {
  const Plan& plan = params.plan;
  const Grouped& of = params.of;
  const int plane = of.P * of.Q, end = min(first_pixel + plan.shape.slots, static_cast<int>(of.N) * plane) - 1;
  const int n = quotient(first_pixel, params.by_plane), end_n = quotient(end, params.by_plane);
  // A tile of several images may have all of their rows.
  const int p = n < end_n ? 0 : quotient(first_pixel - n * plane, params.by_row);
  const int end_p = n < end_n ? of.P - 1 : quotient(end - end_n * plane, params.by_row);
  const int before = max(of.pad_h - end_p * of.stride_h, 0), behind = max(of.pad_h + of.H - 1 - p * of.stride_h, 0);
  const int first = min(quotient(before + of.dilation_h - 1, params.by_dilation), of.R - 1);
  const int last = max(min(quotient(behind, params.by_dilation), of.R - 1), first);
  return {plan.x_steps / of.R * (last - first + 1), {0, first * of.S, first * of.S, (last + 1) * of.S}};
}

// The tiles of a block: every gridDim.x-th one; or, where a cluster splits the reduction, a part of one tile.
template <bool SPLIT, bool LEAVES_OUT>
struct Tiles {
  int first, step, part;

  __device__ __forceinline__ explicit Tiles(const Plan& plan)
      : first(SPLIT ? blockIdx.x / plan.splits : blockIdx.x),
        step(gridDim.x),
        part(SPLIT ? blockIdx.x - first * plan.splits : 0) {}
  __device__ __forceinline__ Steps steps(const Params& params, const Tile& tile) const {
    const Plan& plan = params.plan;
    Steps steps{plan.x_steps, {0, 0, 0, plan.loads}};
    if (SPLIT) {
      const Share share = share_of(plan, part);
      steps.count = share.last - share.first;
      steps.first.block = share.first / plan.loads;
      steps.first.load = share.first - steps.first.block * plan.loads;
    } else if (LEAVES_OUT) {
      steps = met_steps(params, tile.q);
    }
    return steps;
  }
};

// -- Load x and w: one thread each --

// Waits for the preceding kernels. Returns false where an operand did not fit into scaled fp16: then another kernel
// computes all of the call.
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

// Direct tiles take a box for each 64 pixels: FIRST orders the first half of them, another thread the others.
template <bool SPLIT, bool DIRECT, bool CONTAINED, bool LEAVES_OUT, bool FIRST>
__device__ __forceinline__ void order_x(const Params& params, const Shared& shared) {
  const Plan& plan = params.plan;
  const Grouped& of = params.of;
  const Tiles<SPLIT, LEAVES_OUT> tiles(plan);
  // An x that was there before the call does not wait for weights to be packed.
  const bool is_ready = !CONTAINED && plan.packed && !plan.copied;
  if (!is_ready && !wait_for_operands<CONTAINED>(params)) return;
  RingPosition ring;
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
    // Blocks of 64 pixels are numbered through all images; no block spans two images.
    constexpr int kMostOwnBlocks = 2;
    const int own_blocks = plan.shape.slots / kBlockPixels / 2, first_block = FIRST ? 0 : own_blocks;
    int image[kMostOwnBlocks], pixel[kMostOwnBlocks];
    if (DIRECT) {
#pragma unroll
      for (int j = 0; j < kMostOwnBlocks; ++j) {
        const int block = tile.q / kBlockPixels + first_block + j;
        image[j] = quotient(block, params.by_blocks);
        pixel[j] = (block - image[j] * static_cast<int>(params.by_blocks.divisor)) * kBlockPixels;
      }
    }
    const Steps steps = tiles.steps(params, tile);
    Step step = steps.first;
#pragma unroll 1
    for (int i = 0; i < steps.count; ++i, step.next()) {
      const Load load = params.load[tile.phase + step.load];
      const uint32_t full = shared.x_full(ring.slot);
      const uint32_t to = shared.base + shared.layout.x + ring.slot * plan.x_stage_bytes;
      const int c = first_c + step.block * plan.block_channels;
      hopper::barrier_wait(shared.x_empty(ring.slot), ring.parity ^ 1);
      if (FIRST) hopper::barrier_arrive_expecting(full, plan.x_bytes);
      if (DIRECT) {
#pragma unroll
        for (int j = 0; j < kMostOwnBlocks; ++j) {
          const uint32_t block = to + (first_block + j) * kBlockPixels * kSlotBytes;
          if (j < own_blocks) hopper::load_box(params.in_map, block, pixel[j], c, image[j], 0, full);
        }
      } else if (plan.windows) {
        hopper::load_box(params.in_map, to, c, w + load.column, h + load.row, n, full);
      } else {
        hopper::load_columns(params.in_map, to, c, w, h, n, load.column, load.row, full);
      }
      ring.next(plan.x_stages);
    }
  }
}

// Transposed weights take a box for each 64 output channels: FIRST orders the first of them, another thread the others.
template <bool SPLIT, bool TRANSPOSED, bool CONTAINED, bool LEAVES_OUT, bool FIRST>
__device__ __forceinline__ void order_w(const Params& params, const Shared& shared) {
  const Plan& plan = params.plan;
  const Tiles<SPLIT, LEAVES_OUT> tiles(plan);
  if (!wait_for_operands<CONTAINED>(params)) return;
  RingPosition ring;
#pragma unroll 1
  for (int number = tiles.first; number < plan.tiles; number += tiles.step) {
    const Tile tile = locate_tile(params, number);
    const Steps steps = tiles.steps(params, tile);
    Step step = steps.first;
    Load load = params.load[tile.phase + step.load];
    int of_stage = 0;  // number of the tap among those of its stage of x
#pragma unroll 1
    for (int i = 0; i < steps.count;) {
      const Tap tap = params.tap[load.first_tap + of_stage];
      const int c = step.block * plan.block_channels;
      const uint32_t full = shared.w_full(ring.slot);
      const uint32_t to = shared.base + shared.layout.w + ring.slot * plan.w_stage_bytes;
      hopper::barrier_wait(shared.w_empty(ring.slot), ring.parity ^ 1);
      if (FIRST) hopper::barrier_arrive_expecting(full, plan.w_bytes);
      if (FIRST && !TRANSPOSED) hopper::load_box(params.w_map, to, c, tile.k, tap.s, tap.r, full);
      if (FIRST && TRANSPOSED) hopper::load_box(params.w_map, to, tile.k, c, tap.s, tap.r, full);
      if (!FIRST)
        hopper::load_box(params.w_map, to + kRowChannels * kSlotBytes, tile.k + kRowChannels, c, tap.s, tap.r, full);
      ring.next(plan.w_stages);
      if (++of_stage == load.taps) {
        of_stage = 0;
        ++i;
        step.next();
        load = params.load[tile.phase + step.load];
      }
    }
  }
}

// -- Multiply, and store --

// Barrier of both multiplying warpgroups.
__device__ __forceinline__ void multiplying_sync() { hopper::named_barrier(3, kMultiplyingThreads); }

// Stages that the preceding wgmma group reads; they are released once only the next group is pending. -1: none.
struct Given {
  int x = -1, w = -1;

  __device__ __forceinline__ void give_back(const Shared& shared) const {
    const bool gives = threadIdx.x % 32 == 0;
    if (gives && w >= 0) hopper::barrier_arrive(shared.w_empty(w));
    if (gives && x >= 0) hopper::barrier_arrive(shared.x_empty(x));
  }
};

// The form of wgmma, by whether rows of its operands are channels.
template <typename Stored, int SLOTS, bool FIRST, bool SECOND>
struct Form : hopper::Wgmma<Stored, SLOTS> {};
template <typename Stored, int SLOTS>
struct Form<Stored, SLOTS, true, false> : hopper::WgmmaFirstTransposed<Stored, SLOTS> {};
template <typename Stored, int SLOTS>
struct Form<Stored, SLOTS, false, true> : hopper::WgmmaTransposed<Stored, SLOTS> {};
template <typename Stored, int SLOTS>
struct Form<Stored, SLOTS, true, true> : hopper::WgmmaBothTransposed<Stored, SLOTS> {};

template <typename Stored, int CHANNELS, int SLOTS, bool DIRECT, bool TRANSPOSED, typename AllOrdered>
__device__ __forceinline__ void multiply_tile(const Params& params, const Shared& shared, int phase, const Steps& steps,
                                              int first_channel, RingPosition& x, RingPosition& w,
                                              float (&acc)[CHANNELS / 64][SLOTS / 2], const AllOrdered& all_ordered) {
  const Plan& plan = params.plan;
  const uint32_t base = hopper::of_own_block(shared.base);  // wgmma descriptors want an address within the block
  Given before;
  bool keep = false;
  hopper::wgmma_start(acc);
  Step of_tile = steps.first;
#pragma unroll 1
  for (int number = 0; number < steps.count; ++number, of_tile.next()) {
    const Load load = params.load[phase + of_tile.load];
    hopper::barrier_wait(shared.x_full(x.slot), x.parity);
    const uint32_t slots = hopper::descriptor(base + shared.layout.x + x.slot * plan.x_stage_bytes,
                                              DIRECT ? kBlockPixels * kSlotBytes : 16);
    // COUNT steps of 16 channels, in straight-line code, or ptxas serialises wgmma.
    const auto multiply_taps = [&](auto count) {
#pragma unroll 1
      for (int t = 0; t < load.taps; ++t) {
        const uint32_t b = slots + params.tap[load.first_tap + t].shift * (kSlotBytes / 16);
        hopper::barrier_wait(shared.w_full(w.slot), w.parity);
        // 64 output channels take 8 KB, as 64 rows of input channels or (transposed) of output channels.
        const uint32_t a = hopper::descriptor(base + shared.layout.w + w.slot * plan.w_stage_bytes, 16) +
                           first_channel * (kSlotBytes / 16);
        hopper::wgmma_fence();
#pragma unroll
        for (int step = 0; step < decltype(count)::kValue; ++step) {
          // Along channels, or across them: rows are channels then.
          constexpr uint32_t kAlong = 2, kAcross = 16 * (kSlotBytes / 16);
#pragma unroll
          for (int i = 0; i < CHANNELS / 64; ++i)
            Form<Stored, SLOTS, TRANSPOSED, DIRECT>::multiply(
                acc[i], a + 64 * i * (kSlotBytes / 16) + step * (TRANSPOSED ? kAcross : kAlong),
                b + step * (DIRECT ? kAcross : kAlong), keep || step > 0, hopper::kRowsDescriptorHigh);
        }
        hopper::wgmma_commit();
        keep = true;
        hopper::wgmma_wait<1>();
        before.give_back(shared);
        before.w = w.slot;
        before.x = t + 1 == load.taps ? x.slot : -1;
        w.next(plan.w_stages);
      }
    };
    if (of_tile.block < plan.whole_blocks)
      multiply_taps(hopper::Count<4>{});
    else if (plan.short_steps == 1)
      multiply_taps(hopper::Count<1>{});
    else if (plan.short_steps == 2)
      multiply_taps(hopper::Count<2>{});
    else
      multiply_taps(hopper::Count<3>{});
    x.next(plan.x_stages);
  }
  all_ordered();
  hopper::wgmma_wait<0>();
#pragma unroll
  for (auto& sums : acc) hopper::wgmma_settle(sums);
  before.give_back(shared);
}

// Offset of 8 channels (a piece) of a staged output, in the 128-byte swizzle that the TMA store expects.
__device__ __forceinline__ int offset_of_piece(int row, int piece) { return row * kSlotBytes + (piece ^ row % 8) * 16; }

// Stages sums as [output][channel], 128 swizzled bytes per output. Halo slots of a window go to the last row: where
// there are any, outputs do not fill all rows, and that row is not part of the box that is stored.
template <typename Stored, int SLOTS, bool WINDOWS>
__device__ __forceinline__ void stage_tile(const Params& params, const float (&bias)[2], uint32_t staging,
                                           const float (&acc)[SLOTS / 2]) {
  const Plan& plan = params.plan;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int piece = 2 * warp + lane / 8 % 2;
#pragma unroll
  for (int j = 0; j < SLOTS / 8; j += 2) {
    const bool pair = j + 1 < SLOTS / 8;  // stmatrix stores 16 slots; an odd last 8 are written twice
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

// The output of a slot (windows or columns). exists: false in the halo and behind the end of y.
__device__ __forceinline__ Output output_of_slot(const Params& params, const Tile& tile, int slot) {
  const Plan& plan = params.plan;
  const Correlation& of = params.of;
  if (plan.windows) {
    const int line = quotient(slot, params.by_pitch), column = slot - line * plan.pitch;
    const int p = (tile.p + line) * of.up_h + params.phase[tile.phase].row;
    const int q = (tile.q + column) * of.up_w + params.phase[tile.phase].column;
    return {tile.n, p, q, line < plan.tile_lines && column < plan.tile_columns && p < of.P && q < of.Q};
  }
  const int pixel = tile.q + slot, n = quotient(pixel, params.by_plane), in_image = pixel - n * of.P * of.Q;
  const int p = quotient(in_image, params.by_row);
  return {n, p, in_image - p * of.Q, n < of.N};
}

// Offset in y of channel 0 of the output of a slot, or -1 where there is no output.
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

// Stages sums of a warp's 16 channels as [channel][slot]. place(slot) is the address of that slot of channel lane % 16.
template <typename Stored, int SLOTS, typename Place>
__device__ __forceinline__ void stage_channels(const float (&bias)[2], const Place& place,
                                               const float (&acc)[SLOTS / 2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < SLOTS / 8; j += 2) {
    const bool pair = j + 1 < SLOTS / 8;  // stmatrix stores 16 slots; an odd last 8 are written twice
    uint32_t words[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int first = 4 * (pair ? j + e / 2 : j) + 2 * (e % 2);
      words[e] = narrow_pair(acc[first] + bias[e % 2], acc[first + 1] + bias[e % 2], Stored{});
    }
    hopper::store_matrix(place(8 * j + (pair ? lane / 16 * 8 : 0)), words);
  }
}

// One output, from the input channels of its own group alone.
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

// Merged groups: an Inf or NaN of another group times a zero weight is NaN. Corrects each NaN among a warp's staged 16
// channels from its own group alone. place(slot, channel) is its staged address.
template <typename Stored, int SLOTS, typename Place>
__device__ __forceinline__ void mend(const Params& params, const Tile& tile, int first_channel,
                                     const float (&acc)[SLOTS / 2], const Place& place) {
  const int own_channel = first_channel + threadIdx.x % 32 / 4;
  const bool exists[2] = {own_channel < tile.end_k, own_channel + 8 < tile.end_k};
  bool is_nan = false;
#pragma unroll
  for (int i = 0; i < SLOTS / 2; ++i) is_nan |= exists[i / 2 % 2] && acc[i] != acc[i];
  if (!__any_sync(~0u, is_nan)) return;
  __syncwarp();  // all of it is staged: lanes read what others have staged
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < SLOTS * 16; i += 32) {
    const int slot = i / 16, channel = i % 16;
    const Output output = output_of_slot(params, tile, slot);
    if (!output.exists || first_channel + channel >= tile.end_k) continue;
    Stored* const staged = place(slot, channel);
    const float value = widen(*staged);
    if (value != value) narrow(sum_of_group<Stored>(params, output, first_channel + channel), *staged);
  }
}

// The warps that store 16 staged channels: one, or all of a warpgroup, which take pixels by turns.
struct Storing {
  int warp, warps;
};

// Stores staged channels to NCHW, or few to channels_last: neighbouring lanes have neighbouring pixels, hence coalesced
// stores.
template <int VECTOR>
__device__ __forceinline__ void store_channels(const Params& params, const Tile& tile, int first_channel,
                                               const Storing& by, const uint8_t* staging) {
  struct alignas(2 * VECTOR) Values {
    uint16_t value[VECTOR];
  };
  const Plan& plan = params.plan;
  const int channels = min(16, tile.end_k - first_channel);
  const int slots = plan.shape.slots, runs = plan.windows ? plan.tile_columns / VECTOR : 1;
  const int items = plan.windows ? plan.tile_lines * runs : slots / VECTOR;
  const int64_t step = params.of.out_stride[1];
#pragma unroll 1
  for (int i = 32 * by.warp + threadIdx.x % 32; i < items; i += 32 * by.warps) {
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
      if (VECTOR > 1 && plan.windows) {  // lines start at even slots only, hence 4-byte reads
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

// Stores 16 staged channels to channels_last: 16 neighbouring lanes have the channels of one pixel.
__device__ __forceinline__ void store_pixels(const Params& params, const Tile& tile, int first_channel,
                                             const Storing& by, const uint8_t* staging) {
  const int slots = params.plan.shape.slots, lane = threadIdx.x % 32, channel = first_channel + lane % 16;
  uint16_t* const to = static_cast<uint16_t*>(params.out_ptr) + channel * params.of.out_stride[1];
  const uint8_t* const from = staging + lane % 16 * staged_pitch(slots);
#pragma unroll 1
  for (int first = 32 * by.warp; first < slots; first += 32 * by.warps) {
    const int64_t places = first + lane < slots ? place_of_slot(params, tile, first + lane) : -1;
#pragma unroll 8
    for (int i = 0; i < 16; ++i) {
      const int slot = 2 * i + lane / 16;
      const int64_t place = __shfl_sync(~0u, places, slot);
      if (place >= 0 && channel < tile.end_k) to[place] = *reinterpret_cast<const uint16_t*>(from + 2 * (first + slot));
    }
  }
}

// Fewest channels for which store_pixels() is used; with fewer most of its lanes would idle.
constexpr int kLeastOfPixels = 8;

__device__ __forceinline__ void store_channels(const Params& params, const Tile& tile, int first_channel,
                                               const Storing& by, const uint8_t* staging) {
  if (params.of.out_stride[1] == 1 && tile.end_k - first_channel >= kLeastOfPixels)
    return store_pixels(params, tile, first_channel, by, staging);
  switch (params.plan.out_vector) {
    case 8:
      return store_channels<8>(params, tile, first_channel, by, staging);
    case 4:
      return store_channels<4>(params, tile, first_channel, by, staging);
    case 2:
      return store_channels<2>(params, tile, first_channel, by, staging);
    default:
      return store_channels<1>(params, tile, first_channel, by, staging);
  }
}

// Turns a channel's sum of contained operands into an output: undoes both scales and adds the bias.
struct Finish {
  float factor, bias;

  __device__ __forceinline__ Finish(const Params& params, int channel, float x_factor)
      : factor(channel < params.of.out_channels ? params.w_factors[channel] * x_factor : 0),
        bias(load_bias<float>(params, channel)) {}
  __device__ __forceinline__ float operator()(float sum) const { return sum * factor + bias; }
};

// Stores a staged run of slots to y. Four lanes have the 16 channels of a pixel (aligned channels_last); otherwise
// neighbouring lanes have neighbouring pixels.
__device__ __forceinline__ void store_run(const Params& params, const Tile& tile, int first_channel, int first_slot,
                                          int slots, const float* staging) {
  const int lane = threadIdx.x % 32, channels = tile.end_k - first_channel;
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
    __syncwarp();  // floats of the run before have been read: they are overwritten next
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

// Leaves the sums of a part of the reduction as [slot][channel] in shared memory, over the rings.
template <int CHANNELS, int SLOTS>
__device__ __forceinline__ void leave_part(const Plan& plan, int first_channel, float* parts,
                                           const float (&acc)[CHANNELS / 64][SLOTS / 2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
  for (int block = 0; block < CHANNELS / 64; ++block) {
    float* const to = parts + first_channel + 64 * block + 16 * warp + lane / 4 + lane % 4 * 2 * part_pitch(plan.shape);
#pragma unroll
    for (int j = 0; j < SLOTS / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) to[(8 * j + e % 2) * part_pitch(plan.shape) + e / 2 * 8] = acc[block][4 * j + e];
    }
  }
}

// Adds the parts of all blocks of the cluster, in block order, for this block's share of the tile's slots, and stores
// the outputs. Neighbouring threads have neighbours in y.
template <typename Stored, bool CONTAINED>
__device__ __forceinline__ void store_share(const Params& params, const Tile& tile, int part, const float* parts,
                                            [[maybe_unused]] float x_factor) {
  const Plan& plan = params.plan;
  const int pieces = plan.shape.channels / 8;
  const int first = part * plan.shape.slots / plan.splits, slots = (part + 1) * plan.shape.slots / plan.splits - first;
  const uint32_t from = hopper::smem_address(parts);
  const bool by_values = plan.by_threads || plan.direct;
  const bool along_pixels = CONTAINED ? params.of.out_stride[1] != 1 : by_values;
#pragma unroll 1
  for (int i = threadIdx.x; i < slots * pieces; i += kMultiplyingThreads) {
    const int slot = first + (along_pixels ? i % slots : i / pieces);
    const int channel = (along_pixels ? i / slots : i % pieces) * 8, k = tile.k + channel;
    const int64_t place = place_of_slot(params, tile, slot);
    if (place < 0 || k >= tile.end_k) continue;
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
          if (k + j < tile.end_k)
            *reinterpret_cast<float4*>(to + j) = make_float4(values[j], values[j + 1], values[j + 2], values[j + 3]);
        }
        continue;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (k + j < tile.end_k) to[j * params.of.out_stride[1]] = values[j];
      }
      continue;
    }
    Stored* const to = static_cast<Stored*>(params.out_ptr) + place + k * params.of.out_stride[1];
    if (by_values) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (k + j < tile.end_k) narrow(sums[j] + load_bias<Stored>(params, k + j), to[j * params.of.out_stride[1]]);
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

// Role of the multiplying warps where a cluster splits the reduction of one tile.
template <typename Stored, int CHANNELS, int SLOTS, bool TOGETHER, bool DIRECT, bool TRANSPOSED, bool CONTAINED>
__device__ __forceinline__ void multiply_part(const Params& params, const Shared& shared, uint8_t* smem) {
  constexpr int kOwn = TileShape{CHANNELS, SLOTS, TOGETHER}.own_channels();
  const int warpgroup = hopper::uniform(threadIdx.x / 128);
  const Tiles<true, false> tiles(params.plan);
  const Tile tile = locate_tile(params, tiles.first);
  float* const parts = reinterpret_cast<float*>(smem + shared.layout.x);
  float x_factor = 1;
  if constexpr (CONTAINED) {
    if (!wait_for_operands<true>(params, &x_factor)) return hopper::cluster_sync();
  }
  if (TOGETHER || warpgroup == 0) {
    RingPosition x, w;
    float acc[kOwn / 64][SLOTS / 2];
    multiply_tile<Stored, kOwn, SLOTS, DIRECT, TRANSPOSED>(params, shared, tile.phase, tiles.steps(params, tile),
                                                           warpgroup * kOwn, x, w, acc, [] {});
    // Both warpgroups, or the only one, have read the rings; leave_part() overwrites them.
    if (TOGETHER)
      multiplying_sync();
    else
      warpgroup_sync(0);
    leave_part<kOwn, SLOTS>(params.plan, warpgroup * kOwn, parts, acc);
  }
  hopper::cluster_sync();  // the parts of all blocks are written
  store_share<Stored, CONTAINED>(params, tile, tiles.part, parts, x_factor);
}

// Role of the multiplying warps otherwise: whole tiles, multiplied and stored one after another.
template <typename Stored, int CHANNELS, int SLOTS, bool TOGETHER, bool DIRECT, bool TRANSPOSED, bool MERGED,
          bool CONTAINED, bool LEAVES_OUT>
__device__ __forceinline__ void multiply(const Params& params, const Shared& shared, uint8_t* smem) {
  constexpr int kOwn = TileShape{CHANNELS, SLOTS, TOGETHER}.own_channels();
  const Plan& plan = params.plan;
  const int warpgroup = hopper::uniform(threadIdx.x / 128);
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const Tiles<false, LEAVES_OUT> tiles(plan);
  uint8_t* const staging = smem + shared.layout.staging + warpgroup * staged_bytes(plan);
  const bool stores = DIRECT ? lane == 0 && warp < SLOTS / kBlockPixels : threadIdx.x % 128 == 0;
  RingPosition x, w;
  const auto skip_tile = [&](int number) {
    if (number >= plan.tiles) return;
    x.advance_far(plan.x_stages, plan.x_steps);
    const int taps = params.load[place_of_tile(params, number).phase].taps;
    w.advance_far(plan.w_stages, plan.phases > 1 ? plan.x_steps * taps : plan.w_steps);
  };
  const int first_tile = TOGETHER ? blockIdx.x : blockIdx.x + warpgroup * gridDim.x;
  const int tile_step = TOGETHER ? gridDim.x : 2 * gridDim.x;
  [[maybe_unused]] float x_factor = 1;
  if constexpr (CONTAINED) {
    if (!wait_for_operands<true>(params, &x_factor)) return;
  }
  if (!TOGETHER && warpgroup == 1) skip_tile(blockIdx.x);
  uint32_t turn = warpgroup ^ 1;  // the first warpgroup begins
#pragma unroll 1
  for (int number = first_tile; number < plan.tiles; number += tile_step) {
    Tile tile = locate_tile(params, number);
    float acc[kOwn / 64][SLOTS / 2];
    if constexpr (TOGETHER) {
      tile.k += warpgroup * kOwn;
      multiply_tile<Stored, kOwn, SLOTS, DIRECT, TRANSPOSED>(params, shared, tile.phase, tiles.steps(params, tile),
                                                             warpgroup * kOwn, x, w, acc, [] {});
    } else {
      // This warpgroup's stages follow the other one's. Without the turn it could be two rounds of the ring ahead
      // of a full barrier, whose parity is the same then, and would read the stage too early.
      hopper::barrier_wait(shared.turn(warpgroup), turn);
      turn ^= 1;
      const auto all_ordered = [&] {
        if (lane == 0) hopper::barrier_arrive(shared.turn(warpgroup ^ 1));
      };
      const Steps steps = tiles.steps(params, tile);
      multiply_tile<Stored, kOwn, SLOTS, DIRECT, TRANSPOSED>(params, shared, tile.phase, steps, 0, x, w, acc,
                                                             all_ordered);
      skip_tile(number + gridDim.x);
    }
    if constexpr (CONTAINED) {
      float* const own = reinterpret_cast<float*>(staging) + warp * kRunSlots * kRunPitch;
#pragma unroll
      for (int block = 0; block < kOwn / 64; ++block)
        store_floats<SLOTS>(params, tile, tile.k + 64 * block + 16 * warp, x_factor, own, acc[block]);
      continue;
    }
    if (!DIRECT && plan.by_threads) {
      uint8_t* const own = staging + 16 * warp * staged_pitch(SLOTS);
      const uint32_t to = hopper::smem_address(own) + lane % 16 * staged_pitch(SLOTS);
      // The first warp has all channels of a tile, and every warp stores some pixels.
      const bool few = min(plan.step_k, params.of.out_channels) <= 16;
      const auto sync = [&] {
        if (few)
          warpgroup_sync(warpgroup);
        else
          __syncwarp();
      };
#pragma unroll
      for (int block = 0; block < kOwn / 64; ++block) {
        const int channel = tile.k + 64 * block + 16 * warp;
        const float bias[2] = {load_bias<Stored>(params, channel + lane / 4),
                               load_bias<Stored>(params, channel + lane / 4 + 8)};
        sync();  // the channels staged before have been read
        stage_channels<Stored, SLOTS>(bias, [to](int slot) { return to + 2 * slot; }, acc[block]);
        if constexpr (MERGED) {
          mend<Stored, SLOTS>(params, tile, channel, acc[block], [&](int slot, int in_warp) {
            return reinterpret_cast<Stored*>(own + in_warp * staged_pitch(SLOTS) + 2 * slot);
          });
        }
        sync();  // all of it is staged
        store_channels(params, tile, few ? tile.k + 64 * block : channel, few ? Storing{warp, 4} : Storing{0, 1},
                       few ? staging : own);
      }
      continue;
    }
    if (stores) hopper::bulk_stores_wait_read<0>();
    warpgroup_sync(warpgroup);  // TMA has read the tile staged before
#pragma unroll
    for (int block = 0; block < kOwn / 64; ++block) {
      const int channel = tile.k + 64 * block + 16 * warp + lane / 4;
      const float bias[2] = {load_bias<Stored>(params, channel), load_bias<Stored>(params, channel + 8)};
      const uint32_t to = hopper::smem_address(staging) + block * SLOTS * kSlotBytes;
      if constexpr (DIRECT)
        stage_channels<Stored, SLOTS>(bias, [&](int slot) {
          return to + slot / kBlockPixels * kStagedChannels * kSlotBytes +
                 offset_of_piece(16 * warp + lane % 16, slot % kBlockPixels / 8);
        }, acc[block]);
      else if (plan.windows)
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
        uint8_t* const from = staging + block * SLOTS * kSlotBytes;
        if (k >= params.of.out_channels) continue;
        if (DIRECT) {
          const int number = tile.q / kBlockPixels + warp, n = quotient(number, params.by_blocks);
          const int pixel = (number - n * static_cast<int>(params.by_blocks.divisor)) * kBlockPixels;
          hopper::store_box<false>(params.out_map[0], from + warp * kStagedChannels * kSlotBytes, pixel, k, n, 0);
        } else {
          hopper::store_box<false>(params.out_map[tile.phase], from, k, tile.q, tile.p, tile.n);
        }
      }
      hopper::bulk_stores_commit();
    }
  }
  if (stores) hopper::bulk_stores_wait_read<0>();  // shared memory must outlive TMA's reads
}

template <typename Stored, int CHANNELS, int SLOTS, bool TOGETHER, bool SPLIT, bool DIRECT, bool TRANSPOSED,
          bool MERGED, bool CONTAINED, bool LEAVES_OUT>
__global__ void __launch_bounds__(kThreads, 1) tma_kernel(const __grid_constant__ Params params) {
#if defined(MODELNEW_SM90A)
  // The kernel that corrects out-of-range values may start early; it waits for the end of this one.
  if (CONTAINED) hopper::launch_dependents();
  extern __shared__ __align__(1024) uint8_t modelnew_tma_smem[];
  const Plan& plan = params.plan;
  const Shared shared{hopper::smem_address(modelnew_tma_smem), shared_layout(plan)};
  const int warp = hopper::uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  constexpr int kOrdersX = kMultiplyingThreads / 32, kOrdersW = kOrdersX + 1;
  constexpr int kOrdersMoreOfW = kOrdersW + 1, kOrdersMoreOfX = kOrdersW + 2;
  if (lane == 0) {
    if (warp == 0 && !plan.by_threads) hopper::prefetch_map(params.out_map[0]);
    if (warp == kOrdersX) hopper::prefetch_map(params.in_map);
    if (warp == kOrdersW) hopper::prefetch_map(params.w_map);
  }
  if (plan.block_channels % 16 != 0) {  // no box writes the second half of the last step
    uint4* const stages = reinterpret_cast<uint4*>(modelnew_tma_smem + shared.layout.x);
    const int pieces = (shared.layout.barriers - shared.layout.x) / 16;
    for (int i = threadIdx.x; i < pieces; i += kThreads) stages[i] = make_uint4(0, 0, 0, 0);
    hopper::fence_async();
  }
  if (threadIdx.x == 0) {
    const int givers = TOGETHER ? 8 : 4;  // warps that release a stage
#pragma unroll
    for (int stage = 0; stage < kMostStages; ++stage) {
      hopper::barrier_init(shared.x_full(stage), 1);
      hopper::barrier_init(shared.x_empty(stage), givers);
      hopper::barrier_init(shared.w_full(stage), 1);
      hopper::barrier_init(shared.w_empty(stage), givers);
    }
    for (int i = 0; i < 2; ++i) hopper::barrier_init(shared.turn(i), 4);
    hopper::fence_async();  // makes the barriers visible to TMA, which arrives at them
  }
  __syncthreads();  // barriers are initialised
  if (warp >= kOrdersX) {
    hopper::registers_give_back<kOrderingRegisters>();
    if (lane == 0) {
      if (warp == kOrdersX) order_x<SPLIT, DIRECT, CONTAINED, LEAVES_OUT, true>(params, shared);
      if (DIRECT && warp == kOrdersMoreOfX) order_x<SPLIT, DIRECT, CONTAINED, false, false>(params, shared);
      if (warp == kOrdersW) order_w<SPLIT, TRANSPOSED, CONTAINED, LEAVES_OUT, true>(params, shared);
      if (TRANSPOSED && CHANNELS > kRowChannels && warp == kOrdersMoreOfW)
        order_w<SPLIT, TRANSPOSED, CONTAINED, false, false>(params, shared);
    }
    __syncwarp();
    if (SPLIT) hopper::cluster_sync();
  } else {
    hopper::registers_take<kMultiplyingRegisters>();
    if constexpr (SPLIT)
      multiply_part<Stored, CHANNELS, SLOTS, TOGETHER, DIRECT, TRANSPOSED, CONTAINED>(params, shared,
                                                                                      modelnew_tma_smem);
    else
      multiply<Stored, CHANNELS, SLOTS, TOGETHER, DIRECT, TRANSPOSED, MERGED, CONTAINED, LEAVES_OUT>(
          params, shared, modelnew_tma_smem);
  }
  if (SPLIT) hopper::cluster_leave();  // no other block reads this block's sums after this
#endif
}

// -- Pack w: a block transposes 32 output x 32 input channels of one tap through shared memory, reading along whichever
// of the two has the smaller stride and writing along input channels --

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
  // Without groups the divisions are skipped: they cost a measurable part of a small call.
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
  __syncthreads();  // the tile is there: rows become columns
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
  hopper::wait_for_prerequisites();
  hopper::launch_dependents();
  const int block = static_cast<int>(blockIdx.x) - pack.blocks;
  if (block < 0)
    pack_weights(pack, reinterpret_cast<uint16_t*>(modelnew_tma_prepare_smem));
  else
    hopper::copy_planes(copy, block, modelnew_tma_prepare_smem);
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// ---- Host: plans ----

// Addresses of the tensors. Planning without addresses uses zeros, that is, assumes alignment.
struct Alignment {
  uint64_t in, w, out;
};

// Number of neighbouring values of a plane that one vector load may take.
inline int vector_of(const int64_t (&stride)[4], int64_t images, int channels, int run, uint64_t address) {
  const auto is = [&](int vector) {
    return run % vector == 0 && address % (2 * vector) == 0 && (images == 1 || stride[0] % vector == 0) &&
           (channels == 1 || stride[1] % vector == 0);
  };
  return is(8) ? 8 : is(4) ? 4 : is(2) ? 2 : 1;
}

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

// Rows and columns of the largest phase.
inline int phase_rows(const Correlation& of) { return static_cast<int>(ceil_div(of.P, of.up_h)); }
inline int phase_columns(const Correlation& of) { return static_cast<int>(ceil_div(of.Q, of.up_w)); }

inline int64_t step_of_outputs(const Correlation& of) {
  return of.Q > 1 ? of.out_stride[3] : of.P > 1 ? of.out_stride[2] : of.out_stride[0];
}

// Whether the outputs of all images lie at one constant step.
inline bool has_dense_outputs(const Correlation& of) {
  const int64_t step = step_of_outputs(of);
  return (of.P == 1 || of.out_stride[2] == of.Q * step) &&
         (of.N == 1 || of.out_stride[0] == int64_t{of.P} * of.Q * step);
}

// The estimate of a call, in cycles of an SM. All constants are fitted to measured times: docs/lab/tma.md.
constexpr double kCallCycles = 10500;
constexpr double kStepCycles = 17, kStepTogetherCycles = 25, kStepOfLargestCycles = 58;  // overhead per w stage
constexpr double kColumnsBytes = 58.6;   // loaded per cycle of an SM, columns
constexpr double kShortColumn = 2.7;     // cycles of a column of fewer than 64 channels, at least
constexpr double kTileCycles = 305;      // overhead per tile
constexpr double kPrepareCycles = 3000;  // tma_prepare_kernel
constexpr double kDirectStore = 0.5;     // factor of store_together where TMA stores NCHW

// The constants that differ where y is fp32.
struct Costs {
  double call, call_of_pixels;  // overhead of a call; for channels_last y
  double product_factor, least_step;
  double windows_bytes;          // loaded per cycle of an SM, windows
  double store, store_together;  // cycles per output
  double of_pixels;              // factor of these for channels_last y
  double memory_bytes;           // per cycle of an SM
  double shorter_share;          // memory and multiplication overlap; this share of the shorter one adds to the longer
};
constexpr Costs kCosts{kCallCycles, kCallCycles, 0.91, 283, 71, 0.057, 0.084, 1, 15.1, 0.44};

// Contained operands: in gather's cycles and without gather's own share of the call, so that plans of both engines can
// be compared. least_step and windows_bytes are set by hand, against small tiles for large images: docs/lab/tma.md.
constexpr Costs kContainedCosts{4257, 3698, 1.009, 200, 62, 0.305, 0.191, 0.003, 15.06, 1.031};
constexpr double kMeetCycles = 725, kMeetSumCycles = 0.29, kMeetPartCycles = 359;  // of a cluster: per tile, sum, block

inline void estimate(const Grouped& of, int sms, Plan& plan) {
  const TileShape& shape = plan.shape;
  const Costs& costs = plan.contained ? kContainedCosts : kCosts;
  const double outputs = shape.channels * shape.slots;
  const double taps = static_cast<double>(of.R) * of.S, turns = static_cast<double>(ceil_div(plan.tiles, sms));
  const double products =
      outputs * 16 * ceil_div(of.in_channels, 16) / ceil_div(of.in_channels, plan.block_channels) / 2048.0;
  const double loaded =
      static_cast<double>(plan.x_steps) * plan.phases / plan.w_steps * plan.x_bytes + plan.w_bytes;
  const bool short_columns = !plan.windows && !plan.direct && plan.block_channels < kBlockChannels;
  const double loading = std::max(loaded / (plan.windows ? costs.windows_bytes : kColumnsBytes),
                                  short_columns ? kShortColumn * shape.slots : 0.0);
  const double step = std::max({costs.product_factor * products + (shape.together ? kStepTogetherCycles : kStepCycles),
                                loading, costs.least_step}) +
                      (outputs > 192 * 128 ? kStepOfLargestCycles : 0);
  const double share = static_cast<double>(ceil_div(plan.x_steps, plan.splits)) / plan.x_steps;
  const double multiplied = share * plan.met * plan.w_steps / plan.phases * step;
  const bool in_pixels = of.out_stride[1] == 1;
  const bool by_direct_boxes = plan.direct && plan.splits == 1;
  const double factor = in_pixels ? costs.of_pixels : by_direct_boxes && shape.together ? kDirectStore : 1;
  const double stored = kTileCycles + factor * (shape.together ? costs.store_together / 2 : costs.store) * outputs;
  // By turns, one tile is stored while the next one is multiplied; hence the larger of the two bounds.
  const double tiles = shape.together
                           ? turns * (multiplied + stored)
                           : std::max(turns * multiplied + stored, std::max(turns, 2.0) * (multiplied + stored) / 2);
  const double pixels = static_cast<double>(of.N) * std::min(double(of.H) * of.W, double(of.P) * of.Q * taps);
  const double bytes =
      2 * pixels * of.all_in + (plan.contained ? 4.0 : 2.0) * static_cast<double>(of.N) * of.P * of.Q * of.out_channels;
  const double memory = bytes / sms / costs.memory_bytes;
  plan.cycles = (plan.packed || plan.copied) && !plan.contained ? kPrepareCycles : 0;
  if (plan.copied) plan.cycles += 2 * pixels * of.all_in * 2 / sms / costs.memory_bytes;
  plan.cycles += in_pixels ? costs.call_of_pixels : costs.call;
  plan.cycles += std::max(tiles, memory) + costs.shorter_share * std::min(tiles, memory);
  if (plan.splits > 1) plan.cycles += kMeetCycles + kMeetSumCycles * outputs + kMeetPartCycles * plan.splits;
}

// Sets the numbers of tiles from the tile's shape and lines. Returns false where they would overflow.
inline bool count_tiles(const Grouped& of, Plan& plan) {
  plan.tiles_k = static_cast<int>(ceil_div(of.out_channels, plan.step_k));
  int64_t tiles;
  if (plan.windows) {
    plan.tiles_p = static_cast<int>(ceil_div(phase_rows(of), plan.tile_lines));
    plan.tiles_q = static_cast<int>(ceil_div(phase_columns(of), plan.tile_columns));
    tiles = of.N * plan.tiles_p * plan.tiles_q * plan.tiles_k * plan.phases;
  } else {
    const int64_t pixels = int64_t{of.P} * of.Q;
    const int64_t slots = of.N * (plan.direct ? ceil_div(pixels, kBlockPixels) * kBlockPixels : pixels);
    if (slots >= kMostSlots) return false;
    plan.tiles_p = 1;
    plan.tiles_q = static_cast<int>(ceil_div(slots, plan.shape.slots));
    tiles = int64_t{plan.tiles_q} * plan.tiles_k;
  }
  plan.tiles = static_cast<int>(tiles);
  plan.phase_tiles = plan.tiles / plan.phases;
  plan.pixel_tiles = plan.phase_tiles / plan.tiles_k;
  return tiles < kMostSlots;
}

// Rows of a box of w that is not transposed: output channels of a tile. TMA takes its time to write zeros for others,
// and the sums of what shared memory holds instead are not stored.
inline int w_rows(const Grouped& of, const Plan& plan) {
  return static_cast<int>(std::min<int64_t>(plan.step_k, of.out_channels));
}

// Output channels of a box of w that is transposed.
inline int row_channels(const Grouped& of) { return std::min(round_up(of.out_channels, 8), kRowChannels); }

// Divides shared memory among the rings; returns false where two stages of each do not fit. Columns: as many stages of
// x as of w. Windows: 2 of x, and more only where at least 6 of w fit, since w takes one stage per tap.
inline bool count_stages(const Grouped& of, Plan& plan) {
  plan.x_bytes = plan.box_rows * plan.box_columns * 2 * plan.block_channels;
  plan.x_stage_bytes = round_up(plan.box_rows * plan.box_columns * kSlotBytes, kRowsAligned);
  plan.w_stage_bytes = plan.shape.channels * kSlotBytes;
  const int w_channels = plan.transposed ? plan.shape.channels / kRowChannels * row_channels(of) : w_rows(of, plan);
  plan.w_bytes = w_channels * 2 * plan.block_channels;
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
  // The last tap reads beyond the last window; that must be shared memory of the block, too.
  if (plan.windows) {
    const int farthest_tap = (plan.box_rows - plan.tile_lines) * plan.pitch + plan.box_columns - plan.tile_columns;
    const int read = (farthest_tap + plan.shape.slots) * kSlotBytes;
    plan.smem_bytes = std::max(plan.smem_bytes, layout.x + (plan.x_stages - 1) * plan.x_stage_bytes + read);
  }
  if (plan.splits > 1)
    plan.smem_bytes = std::max(plan.smem_bytes, layout.x + 4 * plan.shape.slots * part_pitch(plan.shape));
  return plan.smem_bytes <= kSharedBytes;
}

// Completes a plan whose shape, way of loading and splits are set. Returns false where it does not fit.
inline bool finish(const Grouped& of, int sms, Plan& plan) {
  const int64_t blocks_c = ceil_div(of.in_channels, plan.block_channels);
  int64_t taps = 0;
  for (int i = 0; i < plan.phases; ++i) taps += out_phase(of, i).taps();
  if (blocks_c * taps >= 1 << 24 || !count_tiles(of, plan)) return false;
  plan.x_steps = static_cast<int>(blocks_c * plan.loads);
  plan.w_steps = static_cast<int>(blocks_c * taps);
  plan.blocks = std::min(plan.tiles, sms);
  if (plan.splits > 1) {
    // One wave of clusters only. Those of 4 and 8 blocks do not reach every SM (docs/lab/tma.md).
    const int room = plan.splits > 2 ? sms * 10 / 11 : sms;
    if (plan.tiles > room / plan.splits || plan.splits > plan.x_steps || !may_split(plan.shape) || of.merged())
      return false;
    plan.blocks = plan.tiles * plan.splits;
  }
  if (!count_stages(of, plan)) return false;
  estimate(of, sms, plan);
  return true;
}

// Whether NCHW can be multiplied in place: 1x1 filters that read every pixel, and strides that TMA takes.
inline bool may_be_direct(const Grouped& of, const Alignment& address) {
  const bool points = of.R == 1 && of.S == 1 && of.stride_h == 1 && of.stride_w == 1 && of.pad_h == 0 && of.pad_w == 0;
  const auto maps = [&](const int64_t (&stride)[4], int channels, uint64_t at) {
    return vector_of(stride, of.N, channels, of.H * of.W, at) == 8 && hopper::in_eights(stride[0], of.N > 1) &&
           hopper::in_eights(stride[1], channels > 1);
  };
  return points && of.H == of.P && of.W == of.Q && maps(of.in_stride, of.all_in, address.in) &&
         maps(of.out_stride, of.out_channels, address.out);
}

// The problem with x replaced by its channels_last copy.
inline Grouped of_copy(const Grouped& of) {
  Grouped copy = of;
  copy.all_in = hopper::copied_channels(of.all_in);
  if (of.groups == 1) copy.in_channels = copy.own_in = copy.all_in;
  hopper::set_copied_strides(of.all_in, of.H, of.W, copy.in_stride);
  return copy;
}

// Whether input channels of merged groups begin where boxes can, at multiples of 8, or are all there are.
inline bool begin_in_boxes(int64_t in_channels, int groups, int of_group) {
  return in_channels % 8 == 0 || in_channels >= int64_t{groups} * of_group;
}

inline Grouped grouped(const Correlation& of) {
  Grouped result{of, of.groups * of.in_channels, of.in_channels, of.out_channels, of.out_channels};
  // The most groups whose output channels are whole tiles, or one tile of fewer.
  int merged = of.groups > 1 && of.in_channels < kBlockChannels ? kBlockChannels / of.in_channels : 1;
  const auto fits = [&] {
    const int64_t out = int64_t{of.out_channels} * merged;
    return begin_in_boxes(int64_t{of.in_channels} * merged, of.groups, of.in_channels) &&
           (out % 64 == 0 || out < 64 || of.out_channels >= 64);
  };
  while (merged > 1 && !fits()) --merged;
  result.in_channels *= merged;
  result.block_out = static_cast<int>(std::min(int64_t{of.out_channels} * merged, kMostSlots));
  result.out_channels *= of.groups;
  return result;
}

// Contained operands: gather has merged groups already, such that they are whole blocks of input channels and whole
// tiles of output channels.
inline Grouped grouped_products(const Correlation& of) {
  Grouped result{of, of.groups * of.in_channels, of.in_channels, of.out_channels, of.out_channels};
  result.out_channels *= of.groups;
  return result;
}

inline bool takes_groups(const Grouped& of) {
  const bool whole_in = of.in_channels <= kBlockChannels || of.in_channels % kBlockChannels == 0;
  const bool in_boxes = begin_in_boxes(of.in_channels, of.groups, of.own_in);
  return of.groups == 1 || (whole_in && in_boxes && (of.block_out < 64 || of.block_out % 64 == 0));
}

// Phases of y: not of merged groups, and each met by some tap.
inline bool takes_phases(const Grouped& of) {
  const int phases = out_phases(of);
  if (phases > kMostOutPhases || (has_out_phases(of) && of.merged())) return false;
  for (int i = 0; i < phases; ++i) {
    if (out_phase(of, i).taps() == 0) return false;
  }
  return true;
}

// Input channels of a stage: equal blocks, as boxes that reach beyond a tensor are slow, where these begin at multiples
// of 32 bytes.
inline int block_channels_of(const Grouped& of) {
  const int blocks = static_cast<int>(ceil_div(of.in_channels, kBlockChannels));
  if (of.groups > 1) return kBlockChannels;
  return blocks == 1                           ? round_up(of.in_channels, 8)
         : of.in_channels % (16 * blocks) == 0 ? of.in_channels / blocks
                                               : kBlockChannels;
}

// Forces properties of a plan, for tests; by default the plan with the lowest estimate is taken.
struct Wishes {
  int shape = -1, windows = -1, splits = 0, direct = -1;
};

// The search for the plan with the lowest estimate.
struct Search {
  int sms;
  const Alignment& address;
  const Wishes& wishes;
  Plan& best;
  bool pads_channels = false;  // a copy of x has channels of zeros, which weights must have, too
  bool found = false;

  // Tries `plan` with each number of splits. `of` describes x as the kernel reads it.
  void consider(const Grouped& of, Plan& plan) {
    if (plan.contained) return consider_parts(of, plan);
    const bool pads = plan.copied && pads_channels;
    plan.packed = pads || !can_load_weights(of, address);
    plan.transposed = plan.packed && !pads && (plan.direct || may_transpose(plan.shape)) &&
                      can_load_transposed(of, address);
    plan.packed &= !plan.transposed;
    plan.out_vector = 1;
    if (plan.planes) {
      const bool in_pairs = plan.pitch % 2 == 0 && of.Q % plan.tile_columns == 0 && !has_out_phases(of);
      const int run = !plan.windows ? of.P * of.Q : in_pairs ? plan.tile_columns : 1;
      plan.out_vector = vector_of(of.out_stride, of.N, of.out_channels, run, address.out);
    }
    consider_parts(of, plan);
  }

  void consider_parts(const Grouped& of, Plan& plan) {
    plan.block_channels = block_channels_of(of);
    const int short_channels = of.in_channels % plan.block_channels;  // of the last block, or of all
    plan.short_steps = static_cast<int>(ceil_div(short_channels > 0 ? short_channels : plan.block_channels, 16));
    plan.whole_blocks = plan.short_steps == 4      ? of.in_channels  // as many as there are, at least
                        : plan.block_channels > 48 ? of.in_channels / plan.block_channels
                                                   : 0;
    for (plan.splits = 1; plan.splits <= kMostSplits; plan.splits *= 2) {
      if (wishes.splits > 0 && plan.splits != wishes.splits) continue;
      if (!finish(of, sms, plan)) break;
      if (found && plan.cycles >= best.cycles) continue;
      best = plan;
      found = true;
    }
  }

  // The part of the steps of columns that tiles take on average. A row of taps meets pixels for outputs from row
  // `first` to `last`; tiles that reach over these ends take it as well.
  static double met_of(const Grouped& of, int slots) {
    const int64_t stride = of.stride_h, of_tile = ceil_div(slots, of.Q);
    double met = 0;
    for (int r = 0; r < of.R; ++r) {
      const int64_t move = of.pad_h - int64_t{r} * of.dilation_h, end = of.H + move;
      const int64_t first = move > 0 ? ceil_div(move, stride) : 0;
      const int64_t last = std::min<int64_t>(end > 0 ? ceil_div(end, stride) : 0, of.P);
      const int64_t rows = std::max<int64_t>(last - first, 0) + (first > 0) * of_tile + (last < of.P) * of_tile;
      met += static_cast<double>(std::min<int64_t>(rows, of.P)) / of.P;
    }
    return met / of.R;
  }

  // Tries `plan` with columns or direct: a tile is one line of slots.
  void consider_line(const Grouped& of, Plan plan) {
    plan.loads = plan.direct ? 1 : of.R * of.S;
    plan.tile_lines = plan.box_rows = 1;
    plan.tile_columns = plan.pitch = plan.box_columns = plan.shape.slots;
    plan.met = may_leave_out(plan.shape) ? met_of(of, plan.shape.slots) : 1;
    plan.leaves_out = plan.met < 1;
    consider(of, plan);
  }

  // Tries `plan` with windows. For each number of tiles side by side, the narrowest tile wastes the fewest columns.
  void consider_windows(const Grouped& of, Plan plan) {
    const bool strided = of.stride_h == 2 && of.stride_w == 2 && of.dilation_h == 1 && of.dilation_w == 1;
    if (!strided && (of.stride_h != 1 || of.stride_w != 1)) return;
    // Columns do the same for 1x1 filters.
    const bool in_lines = has_dense_outputs(of) || plan.planes;
    if (of.R * of.S == 1 && in_lines && !has_out_phases(of) && hopper::can_map(hopper::columns_of(of))) return;
    const int64_t halo_h = strided ? (of.R - 1) / 2 : reach_of_rows(of).halo;
    const int64_t halo_w = strided ? (of.S - 1) / 2 : reach_of_columns(of).halo;
    const int most_side = kMostBoxSide / (strided ? 2 : 1);
    if (halo_h >= most_side || halo_w >= most_side) return;
    plan.windows = true;
    plan.met = 1;
    plan.loads = strided ? std::min(of.R, 2) * std::min(of.S, 2) : 1;
    const int Q = phase_columns(of), P = phase_rows(of);
    const int most_columns = std::min({Q, plan.shape.slots, most_side - static_cast<int>(halo_w)});
    for (int columns = most_columns, last = 0; columns > 0 && last <= 16; --columns) {
      const int tiles_q = static_cast<int>(ceil_div(Q, columns));
      if (tiles_q == last) continue;
      last = tiles_q;
      plan.tile_columns = static_cast<int>(ceil_div(Q, tiles_q));
      plan.pitch = plan.box_columns = plan.tile_columns + static_cast<int>(halo_w);
      const int lines =
          std::min({(plan.shape.slots - plan.tile_columns) / plan.pitch + 1, P, most_side - static_cast<int>(halo_h)});
      // As few lines as cover the image with the same number of tiles.
      plan.tile_lines = static_cast<int>(ceil_div(P, ceil_div(P, lines)));
      plan.box_rows = plan.tile_lines + static_cast<int>(halo_h);
      consider(of, plan);
    }
  }

  // Calls consider(plan) with each tile shape. No tile spans two groups, which read different channels.
  template <typename Consider>
  void with_each_shape(const Grouped& of, Plan plan, const Consider& consider) const {
    for (int i = 0; i < kTileShapeCount; ++i) {
      if (wishes.shape >= 0 && wishes.shape != i) continue;
      plan.shape = kTileShapes[i];
      plan.step_k = plan.shape.channels;
      if (of.groups > 1 && of.block_out < 64) {
        if (plan.shape.channels > 64) continue;
        plan.step_k = of.block_out;
      } else if (of.groups > 1 && of.block_out % plan.step_k != 0) {
        continue;
      }
      plan.phases = out_phases(of);
      consider(plan);
    }
  }

  // Tries `plan` with columns and with windows. x is, in place or copied, channels_last.
  void consider_pixels(const Grouped& of, const Plan& plan) {
    const bool in_lines = plan.planes || has_dense_outputs(of);
    if (in_lines && !has_out_phases(of) && hopper::can_map(hopper::columns_of(of)) && wishes.windows != 1)
      consider_line(of, plan);
    if (wishes.windows != 0) consider_windows(of, plan);
  }
};

inline bool make_plan(const Grouped& of, int sms, const Alignment& address, Plan& best,
                      const Wishes& wishes = Wishes{}) {
  if (int64_t{of.H} * of.W >= kMostSlots || int64_t{of.P} * of.Q >= kMostSlots || !takes_phases(of)) return false;
  Plan plan{};
  // Tensors of a single pixel are both NCHW and channels_last. They count as channels_last even where TMA cannot store
  // y, since threads can.
  const bool in_pixels = hopper::is_in_place(of.in_stride, of.N, of.all_in, of.H, of.W, address.in);
  const bool by_boxes = hopper::is_in_place(of.out_stride, of.N, of.out_channels, of.P, of.Q, address.out);
  const bool single = int64_t{of.P} * of.Q == 1;
  plan.planes = !(in_pixels && (by_boxes || single)) && hopper::are_planes(of.in_stride, of.H, of.W) &&
                hopper::are_planes(of.out_stride, of.P, of.Q);
  const bool own_tiles = of.groups > 1 && of.block_out < std::min(64, of.out_channels);
  plan.by_threads = plan.planes || !by_boxes || own_tiles;
  // x may need a copy although y is not NCHW: the outputs of a part of a strided dgrad have any strides, and pixels of
  // x may have no multiple of 8 channels.
  const bool must_copy = plan.planes || !in_pixels;
  const bool may_be_copied = must_copy && hopper::can_copy(of.in_stride, of.N, of.all_in, of.H, of.W);
  const bool by_pixels = (must_copy ? may_be_copied : in_pixels) && wishes.direct != 1 && of.R * of.S <= kMostTaps &&
                         of.pad_h >= 0 && of.pad_w >= 0;
  const bool may_multiply_planes =
      plan.planes && wishes.direct != 0 && wishes.windows != 1 && !of.merged() && may_be_direct(of, address);
  Search search{sms, address, wishes, best, hopper::copied_channels(of.all_in) != of.all_in};
  search.with_each_shape(of, plan, [&](Plan shaped) {
    if (of.merged() && !may_merge(shaped.shape)) return;
    if (may_multiply_planes && may_be_direct(shaped.shape)) {
      Plan direct = shaped;
      direct.direct = true;
      direct.by_threads = false;
      search.consider_line(of, direct);
    }
    shaped.copied = must_copy;
    if (by_pixels) search.consider_pixels(must_copy ? of_copy(of) : of, shaped);
  });
  return search.found;
}

// Contained operands: x is a channels_last copy, weights are packed, y has any strides. The operands are finite, hence
// the copy's channels of padding need no weights. Returns false where there is no plan.
inline bool make_contained_plan(const Grouped& of, int sms, uint64_t out, Plan& best, const Wishes& wishes = Wishes{}) {
  if (int64_t{of.H} * of.W >= kMostSlots || int64_t{of.P} * of.Q >= kMostSlots || !takes_phases(of)) return false;
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

// Returns why the engine cannot compute a problem, judged by sizes alone (no GPU needed), or null.
inline const char* refusal_of_problem(const Problem& problem, Operator op) {
  if (op != Operator::kFprop && op != Operator::kDgrad) return "it computes outputs and input gradients only";
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16)
    return "it computes float16 and bfloat16 only";
  const Grouped of = grouped(correlation_of_problem(problem, op));
  if (!takes_phases(of))
    return "it takes input gradients with up to 4 phases, stride_h times stride_w, each of which some tap meets, and "
           "without a stride where it multiplies several groups as one";
  if (problem.groups > 1 && !takes_groups(of))
    return "groups that share 64 input channels must have a multiple of 8 together, larger ones a multiple of 64, and "
           "the output channels that read the same 64 must be fewer than 64 or a multiple of 64";
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

// `of` is a function of problem and op, hence not part of the key.
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
    return "the pixels of an image must be a step apart, and its filter must have at most 49 taps that TMA can address";
  return nullptr;
}

inline double cycles(const Problem& problem, Operator op) { return plan_of(problem, op, Alignment{}).plan.cycles; }

// Overhead of a call of wgmma, which its own estimate lacks: docs/lab/tma.md.
constexpr double kWgmmaCallCycles = 12 * 1650;

// Whether wgmma, which reads NCHW without a copy, is estimated to be faster. The factors correct both estimates by
// measured times: this engine's more with fewer than 64 input channels, wgmma's for rows that begin between 16 bytes,
// which it loads by two values or one (docs/lab/tma.md).
inline bool wgmma_is_faster(const Problem& problem, Operator op) {
  const Planned& planned = plan_of(problem, op, Alignment{});
  if (!planned.plan.copied || kWgmmaEngine.refusal(problem, op) != nullptr) return false;
  const int channels = planned.of.in_channels;
  const double factor = channels < 64 ? 1.3 : 1.15;
  const double own = kCallCycles + (planned.plan.cycles - kCallCycles) * factor;
  const int64_t row = planned.of.H > 1 ? planned.of.in_stride[2] : 0;
  const double longer = row % 8 == 0 ? 1.15 : row % 2 == 0 ? 1.4 : 2;
  return kWgmmaCallCycles + longer * kWgmmaEngine.cycles(problem, op) < own;
}

constexpr double kLeastWorkOfFew = 1 << 26;  // multiply-adds of dgrad from fewer than 8 channels
constexpr int64_t kLeastOfStemDgrad = 1 << 18;  // pixels of dx at a stride: with more, zeros cost more than FFMA

// Why the engine defers to another one although it could compute the problem, or null. Measured in docs/lab/tma.md.
inline const char* yields(const Problem& problem, Operator op) {
  // Copies of pixels with fewer than 8 channels are several times as large.
  const bool is_dgrad = op == Operator::kDgrad, few = is_dgrad && problem.K < 8;
  if ((!is_dgrad && problem.C < 8) || (few && multiply_adds(problem) < kLeastWorkOfFew) ||
      (few && kStemEngine.refusal(problem, op) == nullptr))
    return "other engines are faster with fewer than 8 channels";
  const bool strided = problem.stride_h > 1 && int64_t{problem.N} * problem.H * problem.W >= kLeastOfStemDgrad;
  if (strided && direct_has_stem_dgrad(problem, op)) return "direct multiplies no zeros for the channels that it lacks";
  if (problem.groups > 1 && (problem.C == problem.groups || problem.K == problem.groups))
    return "other engines are faster with one input or output channel per group";
  if (wgmma_is_faster(problem, op)) return "wgmma is faster by the estimates, as it does not copy x";
  return nullptr;
}

inline Alignment alignment_of(Operator op, const Pointers& pointers) {
  const void* const in_ptr = op == Operator::kDgrad ? pointers.dy : pointers.x;
  return {reinterpret_cast<uint64_t>(in_ptr), reinterpret_cast<uint64_t>(pointers.w),
          reinterpret_cast<uint64_t>(pointers.out)};
}

inline int packed_row_channels(const Grouped& of) { return round_up(of.in_channels, 8); }

// The workspace holds the packed weights, then the copy of x.
inline int64_t packed_bytes(const Grouped& of, const Plan& plan) {
  if (!plan.packed) return 0;
  const int64_t bytes = int64_t{2} * of.out_channels * of.R * of.S * packed_row_channels(of);
  return plan.copied ? (bytes + 255) / 256 * 256 : bytes;
}

inline int64_t copied_bytes(const Grouped& of, const Plan& plan) {
  return plan.copied ? hopper::copied_bytes(of.N, of.all_in, of.H, of.W) : 0;
}

// TMA needs addresses that are multiples of 16 bytes, and only the call knows the address. A call whose tensors are
// not aligned is handed on to this engine.
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
  params.by_phases = make_divisor(plan.planes ? plan.phases : plan.phase_tiles);
  params.by_pitch = make_divisor(plan.pitch);
  params.by_plane = make_divisor(int64_t{of.P} * of.Q);
  params.by_row = make_divisor(of.Q);
  params.by_blocks = make_divisor(ceil_div(int64_t{of.P} * of.Q, kBlockPixels));
  params.by_block_out = make_divisor(of.block_out);
  params.by_dilation = make_divisor(of.dilation_h);
  params.by_runs = make_divisor(std::max(plan.tile_columns / plan.out_vector, 1));
  params.out_step = step_of_outputs(of);
  // Taps are ordered by the stages that they read. Windows have one stage per phase of x (one phase with stride 1), or
  // per phase of y.
  const int x_phases = plan.windows && of.stride_h == 2 ? 2 : 1;
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
  if (has_out_phases(of)) {
    const int first_row = static_cast<int>(reach_of_rows(of).first);
    const int first_column = static_cast<int>(reach_of_columns(of).first);
    OutPhase of_out[kMostOutPhases];
    for (int i = 0; i < plan.phases; ++i) of_out[i] = out_phase(of, i);
    std::stable_sort(of_out, of_out + plan.phases,
                     [](const OutPhase& a, const OutPhase& b) { return a.taps() > b.taps(); });
    for (; loads < plan.phases; ++loads) {
      const auto& [row, column, rows, columns] = of_out[loads];
      params.phase[loads] = {row, column};
      for (int i = 0; i < rows.taps; ++i) {
        for (int j = 0; j < columns.taps; ++j) {
          const int down = static_cast<int>(rows.row) + i * rows.dilation - first_row;
          const int right = static_cast<int>(columns.row) + j * columns.dilation - first_column;
          add(first_row + of.pad_h, first_column + of.pad_w, down * plan.pitch + right, rows.first + i * rows.step,
              columns.first + j * columns.step);
        }
      }
    }
    return;
  }
  for (int phase_h = 0; phase_h < std::min(x_phases, of.R); ++phase_h) {
    for (int phase_w = 0; phase_w < std::min(x_phases, of.S); ++phase_w, ++loads) {
      for (int r = phase_h; r < of.R; r += x_phases) {
        for (int s = phase_w; s < of.S; s += x_phases)
          add(phase_h, phase_w, r / x_phases * of.dilation_h * plan.pitch + s / x_phases * of.dilation_w, r, s);
      }
    }
  }
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// The tensor maps of the phases of y.
inline cudaError_t make_out_maps(Params& params) {
  const Grouped& of = params.of;
  const Plan& plan = params.plan;
  if (plan.by_threads) return cudaSuccess;
  using hopper::step_bytes;
  const uint64_t K = of.out_channels, N = of.N;
  const uint32_t columns = plan.tile_columns, lines = plan.tile_lines;
  if (plan.direct) {
    const uint64_t sizes[4] = {static_cast<uint64_t>(of.P) * of.Q, K, N, 1};
    const uint64_t strides[3] = {step_bytes(of.out_stride[1], of.out_channels), step_bytes(of.out_stride[0], of.N), 16};
    const uint32_t channels = std::min(plan.step_k, kStagedChannels), box[4] = {kBlockPixels, channels, 1, 1};
    return hopper::make_box_map(hopper::BoxUse::kStore, params.out_ptr, 2, sizes, strides, box, params.out_map[0]);
  }
  const uint32_t box[4] = {kStagedChannels, columns, lines, 1};
  if (!plan.windows) {
    const int64_t step = step_of_outputs(of), pixels = of.N * of.P * of.Q;
    const uint64_t sizes[4] = {K, static_cast<uint64_t>(pixels), 1, 1}, strides[3] = {step_bytes(step, pixels), 16, 16};
    return hopper::make_box_map(hopper::BoxUse::kStore, params.out_ptr, 2, sizes, strides, box, params.out_map[0]);
  }
  for (int i = 0; i < plan.phases; ++i) {
    const Phase& phase = params.phase[i];
    const int64_t rows = ceil_div(of.P - phase.row, of.up_h), row_columns = ceil_div(of.Q - phase.column, of.up_w);
    const uint64_t sizes[4] = {K, static_cast<uint64_t>(row_columns), static_cast<uint64_t>(rows), N};
    const uint64_t strides[3] = {step_bytes(of.out_stride[3] * of.up_w, row_columns),
                                 step_bytes(of.out_stride[2] * of.up_h, rows), step_bytes(of.out_stride[0], of.N)};
    uint8_t* const first =
        static_cast<uint8_t*>(params.out_ptr) + 2 * (phase.row * of.out_stride[2] + phase.column * of.out_stride[3]);
    const cudaError_t error =
        hopper::make_box_map(hopper::BoxUse::kStore, first, 2, sizes, strides, box, params.out_map[i]);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// The tensor map of x: boxes (windows, direct) or im2col (columns).
inline cudaError_t make_in_map(Params& params) {
  const Grouped& of = params.of;
  const Plan& plan = params.plan;
  using hopper::step_bytes;
  const uint64_t C = of.all_in, H = of.H, W = of.W, N = of.N;
  const uint32_t channels = plan.block_channels;
  if (plan.direct) {
    const uint64_t sizes[4] = {H * W, C, N, 1};
    const uint64_t strides[3] = {step_bytes(of.in_stride[1], of.all_in), step_bytes(of.in_stride[0], of.N), 16};
    const uint32_t box[4] = {kBlockPixels, channels, 1, 1};
    return hopper::make_box_map(hopper::BoxUse::kLoadRows, params.in_ptr, 2, sizes, strides, box, params.in_map);
  }
  const uint64_t sizes[4] = {C, W, H, N};
  const uint64_t strides[3] = {step_bytes(of.in_stride[3], of.W), step_bytes(of.in_stride[2], of.H),
                               step_bytes(of.in_stride[0], of.N)};
  if (plan.windows) {
    const uint32_t step_h = of.stride_h, step_w = of.stride_w;
    const uint32_t box[4] = {channels, plan.box_columns * step_w, plan.box_rows * step_h, 1};
    return hopper::make_box_map(hopper::BoxUse::kLoadRows, params.in_ptr, 2, sizes, strides, box, params.in_map, step_w,
                                step_h);
  }
  const hopper::Columns columns = hopper::columns_of(of);
  return hopper::make_columns_map(params.in_ptr, 2, sizes, strides, columns.first, columns.last, columns.steps,
                                  channels, plan.box_columns, params.in_map);
}

// The tensor map of w: [r][s][output channel][input channel], or [r][s][input channel][output channel] (transposed).
inline cudaError_t make_w_map(const void* w_ptr, Params& params) {
  const Grouped& of = params.of;
  const Plan& plan = params.plan;
  using hopper::step_bytes;
  const uint64_t C = packed_row_channels(of), K = of.out_channels, R = of.R, S = of.S;
  const uint32_t channels = plan.block_channels;
  const int64_t row = packed_row_channels(of), taps = int64_t{of.R} * of.S;
  const uint64_t tap_strides[2] = {step_bytes(plan.packed ? row : of.w_stride_s, of.S),
                                   step_bytes(plan.packed ? row * of.S : of.w_stride_r, of.R)};
  if (plan.transposed) {
    const uint64_t sizes[4] = {K, static_cast<uint64_t>(of.in_channels), S, R};  // rows beyond them may hold anything
    const uint64_t strides[3] = {step_bytes(of.w_stride_in, of.in_channels), tap_strides[0], tap_strides[1]};
    const uint32_t box[4] = {static_cast<uint32_t>(row_channels(of)), channels, 1, 1};
    return hopper::make_box_map(hopper::BoxUse::kLoadRows, w_ptr, 2, sizes, strides, box, params.w_map);
  }
  const uint64_t sizes[4] = {C, K, S, R};
  const uint64_t strides[3] = {step_bytes(plan.packed ? row * taps : of.w_stride_out, of.out_channels), tap_strides[0],
                               tap_strides[1]};
  const uint32_t box[4] = {channels, static_cast<uint32_t>(w_rows(of, plan)), 1, 1};
  return hopper::make_box_map(hopper::BoxUse::kLoadRows, w_ptr, 2, sizes, strides, box, params.w_map);
}

inline cudaError_t make_maps(const void* w_ptr, Params& params) {
  cudaError_t error = make_in_map(params);
  if (error == cudaSuccess) error = make_w_map(w_ptr, params);
  return error == cudaSuccess ? make_out_maps(params) : error;
}

template <typename Stored, int SHAPE, bool SPLIT, bool DIRECT, bool TRANSPOSED, bool MERGED = false,
          bool CONTAINED = false, bool LEAVES_OUT = false>
cudaError_t run_kernel(const Params& params, cudaStream_t stream) {
  constexpr int kVariant = SPLIT + 2 * CONTAINED + 4 * LEAVES_OUT;
  constexpr Instance kInstance{"tma_kernel", {kTypeId<Stored>, SHAPE, kVariant, DIRECT, TRANSPOSED, MERGED}};
  record(kInstance);
  if constexpr (!is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    constexpr TileShape kShape = kTileShapes[SHAPE];
    const auto kernel = tma_kernel<Stored, kShape.channels, kShape.slots, kShape.together, SPLIT, DIRECT, TRANSPOSED,
                                   MERGED, CONTAINED, LEAVES_OUT>;
    const Plan& plan = params.plan;
    const cudaError_t error = allow_all_shared_memory(kernel);
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
    if (params.plan.direct)
      return params.plan.transposed ? run_split<Stored, SHAPE, true, true>(params, stream)
                                    : run_split<Stored, SHAPE, true, false>(params, stream);
  }
  if constexpr (may_transpose(kTileShapes[SHAPE])) {
    if (params.plan.transposed) return run_split<Stored, SHAPE, false, true>(params, stream);
  }
  if constexpr (may_leave_out(kTileShapes[SHAPE])) {
    if (params.plan.leaves_out)
      return run_kernel<Stored, SHAPE, false, false, false, false, false, true>(params, stream);
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
      if (params.plan.splits > 1) return run_kernel<Half, SHAPE, true, false, false, false, true>(params, stream);
    }
    if constexpr (may_leave_out(kShape)) {
      if (params.plan.leaves_out)
        return run_kernel<Half, SHAPE, false, false, false, false, true, true>(params, stream);
    }
    return run_kernel<Half, SHAPE, false, false, false, false, true>(params, stream);
  }
  return cudaErrorInvalidConfiguration;
}

// Launches the kernel that packs w, copies x, or both.
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
  int64_t blocks = plan.packed ? pack_tiles * of.R * of.S : 0;
  if (blocks >= int64_t{1} << 30) return cudaErrorInvalidConfiguration;
  pack.blocks = static_cast<int>(blocks);
  hopper::PlanesCopy copy{};
  if (plan.copied) {
    copy = hopper::make_planes_copy(in_ptr, of.in_stride, of.N, of.all_in, of.H, of.W,
                                    workspace + packed_bytes(of, plan));
    blocks += copy.blocks;
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
  if (plan.packed || plan.copied) {
    uint8_t* const start = static_cast<uint8_t*>(workspace);
    const cudaError_t error = prepare(params.of, plan, params.in_ptr, w_ptr, start, stream);
    if (error != cudaSuccess) return error;
    if (plan.packed) params.w_ptr = start;
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
