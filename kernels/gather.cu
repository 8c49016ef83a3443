// gather engine: implicit-GEMM convolution on Hopper's tensor cores (wgmma, sm_90a) for problems without long rows:
// strides, 1x1 filters, small images, channels_last. It computes the forward, and the gradient to the input, in fp16,
// bf16, and fp32 under the TF32 contract. fp32 is multiplied as TF32 or as scaled fp16 (`contained`: docs/glossary.md,
// numerics.cuh), whichever is faster by the estimate; the gradient at a stride as scaled fp16 alone, by tma.
// Deterministic: an output is one sum in one order.
//
// GEMM view: rows = output pixels, columns = output channels, reduction = (block of channels, r, s, channel).
//
//                     TILE_N output channels
//                   +------------------------+    x stage: [piece][slot] x 16 bytes: the pixels that a tile reads, with
//   64 x BLOCKS_M   | multiplying warpgroup  |             the halo, in a block of channels
//                   +------------------------+    w stage: [piece][TILE_N channels] x 16 bytes, of one tap
//   output pixels   | multiplying warpgroup  |    piece = 8 channels of 16 bits or 4 of fp32, slot = a pixel
//                   +------------------------+    tap   = the same shift of all slots, so that x is loaded once for all
//
// wgmma reads w from shared memory and x from registers. ldmatrix takes 16 bytes from any address per lane, so that any
// pixel may lie in any slot: strides, rows of any length and several images in a tile cost the main loop nothing. Tiles
// are `points` (1x1: outputs numbered through all images) or windows (filters larger than 1x1, and 1x1 at a stride by
// boxes: lines of outputs, or packed: so many outputs from anywhere in a line on). A warpgroup multiplies 64 * BLOCKS_M
// pixels by TILE_N channels. One block per SM strides over tiles by gridDim.x, with 12 warps in three roles:
//
//   w --pack--> packed --bulk copies, 1 warp---------------> w ring ------------------------------+
//                                                                                                 +--> wgmma, 8 warps
//   x --cp.async by 3 warps, or TMA boxes, bulk copies-----> x ring --ldmatrix, rounding to TF32--+        |
//                                                                                                       staging --> y
//   A stage's mbarriers: full (by the copies), empty (by the warps that multiply it).
//
// Variants of the roles: two blocks an SM, each with one multiplying warpgroup (1x1, fp32); or one block with three.
// Tiles of the last turn may be cut into parts of the reduction for the blocks of a cluster (meet).
//
// Source says how x comes. Each way has a kernel, since code is cold where other kernels have run before:
//
//   kSingle, kPixels, kChannels   gathered: cp.async of a value, of four pixels, of 16 bytes of channels (see Loads)
//   kBoxes                        TMA boxes where channels are neighbours; contained operands always come so
//   kImages                       1x1, planes of no multiple of 4 pixels: bulk copies of whole images
//   kPhases                       boxes of every second row and column (stride 2, channels_last, TF32: see Phases)
//   kTaps                         an im2col box for each tap, where taps lie far apart (dilation)
//   kLanding                      boxes of fp32 that warps contain on their way to wgmma, without a copy (see Landing);
//                                 up to 16 output channels share 64 rows of the GEMM with their rows of taps
//   kAny                          gathered or boxes, as the plan says: 16 bits, and `again`
//
// Kernels of a call. Each starts early (PDL) and waits for the preceding one where it needs what that writes:
//
//   TF32, 16 bits   pack: w unless boxes bring it, and a copy of x where it pays ---> gather
//   contained       sample: scale of x ---> contain: w, copy of x, list ---> gather, or tma.cu (by_tma) ---> again
//   landing         sample ---> contain_rows: w ---> landing: list ---> again
//
// A value of x that does not fit into scaled fp16 is zeroed, in the copy or where it is contained by landing_kernel,
// and recorded on the list; `again` adds its products in fp32. If the list overflows, or w or x has no scale, `again`
// computes the whole call with TF32 operands. The host launches it in any case and never waits. Small groups are
// contained as one, with zeros between them (merged).
//
// Bound by memory where there are few channels; otherwise by shared memory, whose full rate multiplying nearly takes,
// and by storing, during which the warpgroups of a block do not multiply; with few images by launches, by code that
// comes from memory, and by containing x.
//
// Measurements: docs/lab/gather.md
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstdio>
#include <type_traits>
#include <utility>

#include "device.cuh"
#include "engines.cuh"
#include "memo.cuh"
#endif

#include "async_copy.cuh"
#include "channels_last.cuh"
#include "cluster.cuh"
#include "columns.cuh"
#include "contained.cuh"
#include "contained_copy.cuh"
#include "divisor.cuh"
#include "im2col_map.cuh"
#include "numerics.cuh"
#include "out_phases.cuh"
#include "problem.cuh"
#include "ptx.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"
#include "wgmma_forms.cuh"

namespace modelnew {
namespace gather {

using namespace contained;

// ---- Geometry, host and device ----
//
// Other architectures than sm_90a have an empty kernel: what only its roles use is then unused.

constexpr int kGatherWarps = 3;
[[maybe_unused]] constexpr int kGatherThreads = 32 * kGatherWarps;
// Threads of a block with one to three multiplying warpgroups; one more orders copies. An SM has one block, or two if
// one warpgroup multiplies.
MODELNEW_HOST_DEVICE constexpr int threads_of(int warpgroups) { return 128 * warpgroups + kGatherThreads + 32; }
MODELNEW_HOST_DEVICE constexpr int blocks_per_sm(int warpgroups) { return warpgroups == 1 ? 2 : 1; }
// Registers per thread at launch, rounded down to 8.
MODELNEW_HOST_DEVICE constexpr int start_registers(int warpgroups) {
  return (64 << 10) / (threads_of(warpgroups) * blocks_per_sm(warpgroups)) / 8 * 8;
}

// Types: Tensor, of y and the bias; Stored, of stages, as the tensor cores multiply it. AGAIN: in the kernel that
// redoes calls whose operands cannot be contained.
template <typename Tensor_, typename Stored_ = Tensor_, bool AGAIN_ = false>
struct Format {
  using Tensor = Tensor_;
  using Stored = Stored_;
  static constexpr bool CONTAINED = sizeof(Stored) < sizeof(Tensor);
  static constexpr bool AGAIN = AGAIN_;
  static constexpr int CHANNELS = 16 / sizeof(Stored);  // of a piece
  // Registers per thread by multiplying warpgroups of a block: all warps start with start_registers, and those that
  // multiply need more. With three, neither side spills (docs/lab/gather.md).
  MODELNEW_HOST_DEVICE static constexpr int multiply_registers(int warpgroups) {
    return warpgroups == 3 ? 152 : warpgroups == 1 || sizeof(Tensor) == 2 ? 208 : AGAIN ? 216 : 224;
  }
  MODELNEW_HOST_DEVICE static constexpr int gather_registers(int warpgroups) {
    return (warpgroups + 1) * start_registers(warpgroups) - warpgroups * multiply_registers(warpgroups);
  }
};
using Tf32 = Format<float>;
using Contained = Format<float, Half>;
using Again = Format<float, float, true>;

constexpr int kThreads = threads_of(2);  // of what does all contained operands again
// Shared memory of a block on sm_90, and of each of two blocks of an SM: that has 228 KB, of which the system takes 1
// KB for each block.
constexpr int kSharedBytes = 232448, kHalfSharedBytes = (228 * 1024) / 2 - 1024;
constexpr int kMaxStages = 8;
constexpr int kLeastPointPieces = 8;             // of a stage of 1x1 (docs/lab/gather.md)
[[maybe_unused]] constexpr int kStepPieces = 2;  // in one wgmma
constexpr int kContainedBlock = 64;              // channels of a stage of contained operands
constexpr int kPhasesBlock = 32;                 // of one of phases of x itself
// Landing (x contained on its way): taps of a row of the filter; channels that a warp stages; bytes of a landed pixel
// in channels_last, 16 channels.
constexpr int kLandingTaps = 3, kLandingStagedChannels = 16, kLandedPixelBytes = 64;
// Stages of landed boxes and of windows; most stages of weights, and of rows of these (docs/lab/gather.md).
constexpr int kLandedBoxes = 3, kLandingWindows = 3, kMostLandingWeights = 4, kMostLandingRows = 6;
constexpr int kWholeRowsPadding = 1;  // columns of a window in front of whole rows of x, which nobody writes
constexpr int kSharedRows = 3;  // of the filter, where warpgroups share the pixels, or where they stack
constexpr int kContainWarps = 6, kLandingThreads = 32 * (8 + kContainWarps + 2);  // two warps order copies

// A tile of what is contained on its way, as the compiler knows it, so that channels, slots and places are found
// without an instruction each (see Landing).
struct LandingShape {
  int tile_n;         // output channels
  int columns, rows;  // of y; rows of a warpgroup, at most
  int stride;         // of both axes: 1, or 2, where a window holds four phases of x
  bool channels_last;
  int pairs;  // 2: of rows of x only every second one begins at a multiple of 16 bytes; otherwise 1

  // Planes of 14 columns without a stride have none, nor has a stride in channels_last.
  MODELNEW_HOST_DEVICE constexpr bool has_kernel() const {
    if (pairs == 2 || stacks()) return !channels_last && stride == 1 && columns == 32 && rows != 7;
    return channels_last ? stride == 1 : stride == 2 || columns > 14;
  }
  // Each row of taps has 16 of the 64 rows of the GEMM: warp r sums the products of taps (r, s) for all rows of the
  // window. y is the sum of three warps' results, each taken one row further on.
  MODELNEW_HOST_DEVICE constexpr bool stacks() const { return tile_n == 16; }
  MODELNEW_HOST_DEVICE constexpr int gemm_rows() const { return stacks() ? 64 : tile_n; }
  MODELNEW_HOST_DEVICE constexpr int multiplied_rows() const { return rows + (stacks() ? kLandingTaps - 1 : 0); }
  // Both warpgroups multiply the same pixels, by other channels.
  MODELNEW_HOST_DEVICE constexpr bool shares() const { return tile_n == 128; }
  MODELNEW_HOST_DEVICE constexpr int tile_rows() const { return (shares() ? 1 : 2) * rows; }
  // Slots of a row, of a phase; even: pairs of slots are of one row.
  MODELNEW_HOST_DEVICE constexpr int pitch() const { return (columns + (stride == 1 ? 2 : 1) + 1) / 2 * 2; }
  // Slots of each of two wgmmas.
  MODELNEW_HOST_DEVICE constexpr int product_slots() const {
    return ((multiplied_rows() - 1) * pitch() + columns + 15) / 16 * 8;
  }
  // Slots of a phase; neighbouring columns, which are of two phases, meet other banks.
  MODELNEW_HOST_DEVICE constexpr int phase_slots() const {
    return stride == 1 ? 0 : ((tile_rows() + 1) * pitch() + 3) / 8 * 8 + 4;
  }
  MODELNEW_HOST_DEVICE constexpr int slot_of(int row, int column) const {
    return stride == 1 ? row * pitch() + column
                       : (row % 2 * 2 + column % 2) * phase_slots() + row / 2 * pitch() + column / 2;
  }
  // Columns and rows of a window.
  MODELNEW_HOST_DEVICE constexpr int window_columns() const { return stride * (columns - 1) + kLandingTaps; }
  MODELNEW_HOST_DEVICE constexpr int window_rows() const { return stride * (tile_rows() - 1) + kLandingTaps; }
  // Boxes land so many rows of 8 planes at a time, twice a step, or of 16 channels in channels_last. At a stride of 2
  // rows of x are whole and follow one another, and a box is of four of them as if they were one. Of pairs of rows, as
  // if they were one, a box has the even or the odd ones; and what it has beside a row is of the other ones.
  MODELNEW_HOST_DEVICE constexpr bool whole_rows() const { return stride == 2; }
  MODELNEW_HOST_DEVICE constexpr int landed_rows() const {
    return whole_rows() ? (window_rows() + 3) / 4 * 4 : window_rows();
  }
  MODELNEW_HOST_DEVICE constexpr int box_rows() const { return whole_rows() ? 4 : window_rows() / pairs; }
  // Planes: fours of columns, from up to three columns before the window on, unless a box has whole rows.
  MODELNEW_HOST_DEVICE constexpr int box_columns() const {
    return whole_rows() ? 2 * columns : channels_last ? window_columns() : (window_columns() + 6) / 4 * 4;
  }
  MODELNEW_HOST_DEVICE constexpr int box_plane() const { return box_rows() * box_columns(); }
  MODELNEW_HOST_DEVICE constexpr int box_bytes() const {
    return box_plane() * (channels_last ? kLandedPixelBytes : 8 * 4);
  }
  MODELNEW_HOST_DEVICE constexpr int boxes() const { return landed_rows() / box_rows(); }
  // Lanes take 8 channels of a pixel, which are a piece; or two pieces: of two columns side by side, one of each phase,
  // where rows are whole, and of all 16 channels in channels_last. In the order of pixels, row by row; those of 34
  // columns first 32 of each row, so that no two meet in a bank, then the rest of all rows.
  MODELNEW_HOST_DEVICE constexpr int lane_pieces() const { return whole_rows() || channels_last ? 2 : 1; }
  MODELNEW_HOST_DEVICE constexpr int row_lanes() const { return whole_rows() ? columns : window_columns(); }
  MODELNEW_HOST_DEVICE constexpr bool by_rows() const { return stride == 1 && columns == 32; }
  // Items that warps contain at a time, of so many rows.
  MODELNEW_HOST_DEVICE constexpr int warp_items(int of_rows) const {
    return by_rows() ? of_rows + (of_rows * (row_lanes() - 32) + 31) / 32 : (of_rows * row_lanes() + 31) / 32;
  }
  MODELNEW_HOST_DEVICE constexpr int items_of_warp() const {
    return (warp_items(landed_rows()) + kContainWarps - 1) / kContainWarps;
  }
  // Registers of warps that contain, which for two columns a lane hold 16 words instead of 8, and of those that
  // multiply, which may hold weights (shares): all start with 128, which is too few for a wgmma of 240 slots, but not
  // for two of 120.
  MODELNEW_HOST_DEVICE constexpr int contain_registers() const {
    return stride == 2 ? 64 : shares() ? 56 : stacks() ? 72 : 88;
  }
  MODELNEW_HOST_DEVICE constexpr int multiply_registers() const { return 256 - contain_registers(); }
  // Rows of y that are staged at a time, for a box; or, of planes of few columns, for stores of a warp.
  MODELNEW_HOST_DEVICE constexpr int staged_rows() const { return stride == 1 ? multiplied_rows() : 4; }
  MODELNEW_HOST_DEVICE constexpr bool stores_boxes() const { return channels_last || columns > 14; }
  MODELNEW_HOST_DEVICE constexpr int staged_row_bytes() const {
    return channels_last ? columns * kLandedPixelBytes : kLandingStagedChannels * 128;
  }
  // Staging of a warp; in channels_last the order of pieces starts anew there.
  MODELNEW_HOST_DEVICE constexpr int staged_bytes() const {
    return (staged_rows() * staged_row_bytes() + 511) / 512 * 512;
  }
};

constexpr int kBarrierBytes = 1024;

// Staging of the results of 64 pixels x 32 channels, by a warpgroup: [channel][pixel], or [pixel][channel]
// where channels are neighbours in memory; the pitches, in words, keep stores of accumulators and loads of 16 bytes
// free of bank conflicts.
constexpr int kStagedChannels = 32;
constexpr int kPixelsPitch = 68, kChannelsPitch = 40;
constexpr int kStagingBytes = 64 * kChannelsPitch * 4;
static_assert(kStagedChannels * kPixelsPitch * 4 <= kStagingBytes, "either fits");

// The same for boxes of 16 pixels: each warp has two buffers of its own, one of them being stored; where x comes in
// phases one, which leaves room for another stage of x (docs/lab/gather.md).
constexpr int kBoxStagingBytes = 16 * kStagedChannels * 4;
MODELNEW_HOST_DEVICE constexpr int box_buffers(bool in_phases) { return in_phases ? 1 : 2; }

// How slots are filled, and with it the layout of a stage: copies write 128 bytes of shared memory at once only if
// these lie side by side. Boxes write the layout of kChannels; 16-bit kPixels and kSingle store [piece][slot].
//
//   kPixels     [channel][slot]   of fp32, points only; operands are single words then
//   kChannels   [slot][piece]     piece i lies at place i ^ slot % 8, against bank conflicts
//   kSingle     [piece][slot]     of points in fp32 [channel][slot]
enum class Loads : int {
  kSingle,    // a lane loads a channel of a pixel
  kPixels,    // four neighbouring pixels of a channel (points only)
  kChannels,  // the channels of a piece
};

// How x comes, with a kernel for each: a kernel with twice the code starts later where others have run in between
// (docs/lab/gather.md).
//
//   kImages    all pixels of an image and of the channels of a stage by a bulk copy, points only
//   kPhases    by boxes as well, of the phases of x itself
//   kTaps      by boxes of what a tap reads for all outputs of a tile (see Plan::apart)
//   kLanding   by boxes as it is, contained on its way (see Landing)
enum class Source : int { kSingle, kPixels, kImages, kChannels, kBoxes, kPhases, kTaps, kAny, kLanding };

// Whether tiles may be cut up into parts of their reduction. Kernels with many sums a thread are slower for having the
// code (docs/lab/gather.md), but may where boxes bring fp32. One kernel of single words and those of 16 bits lack the
// registers.
template <typename Format>
MODELNEW_HOST_DEVICE constexpr bool may_cut_up(int tile_n, int blocks_m, Source source) {
  if (sizeof(typename Format::Tensor) == 2 || Format::AGAIN || (tile_n == 64 && source == Source::kSingle))
    return false;
  const bool boxes = source == Source::kBoxes || source == Source::kTaps || source == Source::kImages;
  return tile_n * blocks_m <= 128 || (tile_n == 256 && boxes && !Format::CONTAINED);
}

// Divisors by which tiles, outputs and slots are found.
struct Divisors {
  Divisor tiles_n, tiles_m, tiles_q, tile_q, splits;  // of the plan
  Divisor rows, columns, plane;                       // of an image of outputs
  Divisor pitch, image_rows;                          // of slots: of a row, and rows of an image
};

// x contained on its way instead of in a copy: boxes of 8 planes, or in channels_last of 16 channels, land in shared
// memory as they are, and gathering warps contain what has landed, a window of 16 channels at a time, a step of the
// reduction. Here rows of the GEMM are output channels, so that a wgmma reads 64 rows of weights and 56 to 136 slots:
//
//   landed:  [plane][row][column] x 4 bytes      window:  [2 pieces][slot] x 16 bytes      weights: as packed
//
//   memory --boxes--> landed --6 warps contain--> windows --+
//                                                           +--> wgmma, 2 warpgroups --> staging --boxes--> memory
//   packed --bulk copies--> w ring -------------------------+   (by registers, where warpgroups share the pixels)
//
// A bulk copy has the weights of a step, or, where they go through registers, of one of its rows of taps.
//
//   rows of y, here 32 columns each, with 2 slots between them where those of a 3x3 filter overlap:
//
//     0 1 ... 31 | 32 33    0 1 ... 31 | 32 33  ...       8 rows are 270 slots, 256 of them outputs
//
// A tap is a shift of all slots, as in wgmma.cu, and a warpgroup has so many rows of its own, of the same 64 channels,
// or the other 64 channels of the same rows (shares). Both stage through the same shared memory, in turns.
//
// At a stride of 2 a window holds its even and odd rows and columns apart, one phase behind the other, counted from its
// own first one, so that the padding does not matter:
//
//   window       slots                        taps of a 3x3 filter
//   a b a b a    a a a   b b                  a: the corners             b: above, below
//   c d c d c    c c c   d d                  c: left, right             d: the middle one
//   a b a b a    a a a   b b
//
// Two neighbouring columns of x are a slot of each of two phases: one lane loads both.
struct Landing {
  LandingShape shape;
  int rows;                       // of y, of a warpgroup
  int tiles_p, span;              // tiles of a column of an image, and rows of y of each
  int window_rows, slots;         // rows; slots of a piece
  int lead[2];                    // columns of a box in front of the window; of every second row with pairs of rows
  int steps;                      // of 16 channels
  int w_stages_of_step;           // each row of taps by itself, where registers hold it, or all of them
  int stages, stage_bytes;        // of landed boxes
  Divisor by_tiles_p;
};

struct Plan {
  int tile_n, blocks_m;  // channels; 64 pixels of a warpgroup, so many times, or, of what lands, rows at most
  int warpgroups;        // that multiply, of a block: 2 or 3, or 1 where an SM has two blocks
  bool points;
  bool apart;                        // points of a filter whose taps lie far apart: a stage of x is of one tap
  bool packed;                       // windows: outputs of a tile follow one another, from anywhere in a line
  int tile_p, tile_q;                // windows: lines, columns
  int tiles_q, tiles_m, tiles_n;     // tiles_m: of pixels, in all
  int64_t tiles;                     // of all groups
  int whole_tiles, units;            // those that are not cut up; these and the parts of the others
  int row_step, column_step;         // slots between neighbouring outputs
  int in_row_step, in_column_step;   // input positions between neighbouring slots
  int gap;                           // rows of slots, at the seam of two images, more than row_step
  int pitch, slots;                  // of a row, in all
  int piece_slots, plane_slots;      // from piece to piece, from channel to channel: against bank conflicts
  int image_words;                   // of an image in a stage, where x comes by images
  int pieces, blocks_c, iterations;  // pieces a stage, blocks of channels, w stages of all of them
  int splits, split_blocks;          // parts of the reduction, blocks of channels of each but perhaps the last one
  Loads loads;
  bool quarters;           // slots of points are in the order of slot_of_point
  bool planes;             // a stage is [channel][slot], or of images [image][channel][slot], of single words
  bool copied;             // x is copied before, and the rest of the plan is of the copy
  bool rows;               // a stage is [slot][piece] instead of [piece][slot]
  bool dense_slots;        // boxes of x are of slots that follow one another in memory, else each is a row
  int x_boxes, box_slots;  // so many, of so many slots
  int box_step;            // columns of x between neighbouring slots of a box
  bool in_boxes;           // x comes by boxes
  bool in_images;          // it comes image by image, all pixels of the channels of a stage
  bool in_phases;          // these are of its phases, without a copy
  bool out_channels_last;  // channels of y are neighbours
  int vector;              // outputs that are stored at a time: 4 or 1
  bool boxes;              // y is stored by boxes, each of 16 pixels x 32 channels unless x lands
  bool contained;          // fp32 values are multiplied as scaled fp16; the copy holds these, unless x lands
  bool w_in_boxes;         // weights come from w itself, which nobody packs; a stage of them is [channel][piece]
  bool resident;           // all weights that a block ever needs stay in shared memory
  bool by_tma;             // contained, copied, and multiplied by tma; tile_n is of all channels of a group then
  bool lands;              // x is contained on its way, not copied; only what is said there counts then
  Landing landing;
  int x_stages, w_stages;
  int x_stage_bytes, w_stage_bytes, smem_bytes;
  int blocks;
  Divisors by;
  double cycles;  // estimate
};

MODELNEW_HOST_DEVICE inline int tile_pixels(const Plan& plan) { return 64 * plan.warpgroups * plan.blocks_m; }

// Staging of one warpgroup.
MODELNEW_HOST_DEVICE inline int staging_bytes(const Plan& plan) {
  return plan.boxes ? 4 * box_buffers(plan.in_phases) * kBoxStagingBytes : kStagingBytes;
}

MODELNEW_HOST_DEVICE inline Source source_of_plan(const Plan& plan) {
  return plan.lands                     ? Source::kLanding
         : plan.in_phases               ? Source::kPhases
         : plan.apart                   ? Source::kTaps
         : plan.in_boxes                ? Source::kBoxes
         : plan.in_images               ? Source::kImages
         : plan.loads == Loads::kSingle ? Source::kSingle
         : plan.loads == Loads::kPixels ? Source::kPixels
                                        : Source::kChannels;
}

struct PackParams {
  const void* w_ptr;
  void* packed_ptr;
  Phased of;
  Phases phases;                                        // of x as it is multiplied
  int tile_n, tiles_n, iterations, row_pieces, pieces;  // stages of a tile, pieces of a row of it, of a stage
  int group_in, group_out;                              // channels of one group of the filter, in the tile's rows
  int group_step, group_rows;  // from a group's first input channel to the next one's; output channels that it has
  int64_t first;               // weight, in elements
  bool whole_rows;                                      // for tma: a row is [tap][piece], one behind the other
  bool by_images;                                       // piece i of a stage: channels i, i + pieces, i + 2 * pieces...
  int count;                                            // of pieces
  Divisor by_tile_n, by_tiles_n, by_row_pieces, by_taps, by_s, by_pieces, by_group_out;
};

// Where weights are contained: rows of a block and its threads at most; its shared memory with these rows, of three
// blocks an SM and of more; and, where x lands, rows so long that two of a block, whose pieces are sectors, are faster.
constexpr int kMostRowsOfBlock = 8, kMostRowThreads = 512;
constexpr int64_t kMostStagedBytes = 75 * 1024, kFewStagedBytes = 20 * 1024, kLongRowBytes = 16 * 1024;
constexpr int64_t kMagnitudeBytes = kMostRowsOfBlock * sizeof(uint32_t);

struct Params {
  const void *in_ptr, *packed_ptr, *bias_ptr;
  void* out_ptr;
  Phased of;
  Plan plan;
  hopper::BoxMap in_map, w_map, out_map;
  hopper::BoxMap rest_map;  // of what lands: of rows of y that are staged behind others
  Guard guard;
  // Contained: how weights are packed for the kernel that does all again, or a phase of y, and the number of phases and
  // of this one; and how x was copied, or would have been.
  PackParams other_pack;
  int phases, phase;
  CopyParams copy;
};

// How a row of weights comes to shared memory: by fours or single values as they lie in w, side by side; or in the
// order in which they are packed, from anywhere; or not at all, if it is too long. kTogether: four rows at once, which
// lie side by side in w: those of a tap, or of all taps of an input channel.
enum class RowLoads : int { kFours, kSingle, kPieces, kNone, kTogether };
constexpr int kRowsTogether = 4, kTogetherGap = 8;  // words behind those of eight channels, against bank conflicts

struct ContainParams {
  PackParams pack;
  int rows_of_block, row_blocks;  // of packed weights
  RowLoads row_loads;
  int row_words, row_pitch;  // in shared memory
  int row_step, tap_step;    // of four rows together, in there; between input channels lie those of four rows
  CopyParams copy;
  Guard guard;
};

// Where a weight of the first of four rows lies in shared memory.
MODELNEW_HOST_DEVICE inline int place_together(const ContainParams& contain, int channel, int tap) {
  const int taps = contain.pack.of.R * contain.pack.of.S;
  return channel * kRowsTogether * taps + channel / 8 * kTogetherGap + tap * contain.tap_step;
}

// Whether bulk copies bring x, which one warp orders: then there is no table of slots, and one arrival a stage.
MODELNEW_HOST_DEVICE inline bool comes_in_bulk(const Plan& plan) { return plan.in_boxes || plan.in_images; }

// Where the parts of a block's shared memory start.
struct SharedLayout {
  int staging, table, x_ring, w_ring, end;
};

MODELNEW_HOST_DEVICE inline SharedLayout shared_layout(const Plan& plan) {
  SharedLayout layout{};
  layout.staging = kBarrierBytes;  // aligned as boxes have to be
  layout.table = layout.staging + plan.warpgroups * staging_bytes(plan);
  layout.x_ring = layout.table + (comes_in_bulk(plan) ? 0 : 2 * (plan.slots + 31) / 32 * 32 * 4);
  const int alignment = plan.in_boxes || plan.w_in_boxes ? 1024 : 128;  // where the order of pieces starts anew
  layout.x_ring = (layout.x_ring + alignment - 1) / alignment * alignment;
  layout.w_ring = layout.x_ring + plan.x_stages * plan.x_stage_bytes;
  layout.end = layout.w_ring + plan.w_stages * plan.w_stage_bytes;
  return layout;
}

// The same for what is contained on its way: staging of 16 channels of each warp of a warpgroup first, aligned
// as boxes have to be.
struct LandingLayout {
  int staging, landed, x_ring, w_ring, end;
};

MODELNEW_HOST_DEVICE inline LandingLayout landing_layout(const Plan& plan) {
  const Landing& landing = plan.landing;
  LandingLayout layout{};
  layout.staging = kBarrierBytes;
  layout.landed = layout.staging + 4 * landing.shape.staged_bytes();
  layout.x_ring = layout.landed + landing.stages * landing.stage_bytes;
  layout.w_ring = layout.x_ring + plan.x_stages * plan.x_stage_bytes;
  layout.end = layout.w_ring + plan.w_stages * plan.w_stage_bytes;
  return layout;
}

// Where a tile starts, by outputs. `n_block`: of channels; those of the same pixels follow one another.
struct LandingTile {
  int n, p, q, n_block;
};

MODELNEW_HOST_DEVICE inline LandingTile locate_landing(const Plan& plan, int unit) {
  const int of_all = quotient(unit, plan.by.tiles_n), from_start = plan.tiles_m - 1 - of_all;
  const int row = quotient(from_start, plan.by.tiles_q), n = quotient(row, plan.landing.by_tiles_p);
  return {n, (row - n * plan.landing.tiles_p) * plan.landing.span, (from_start - row * plan.tiles_q) * plan.tile_q,
          unit - of_all * plan.tiles_n};
}

// Whether a tile lists what does not fit in this place of its window, so that one does: of rows and columns that two
// windows have, the one that begins with them, or the last tile of a column or row.
MODELNEW_HOST_DEVICE inline bool lists(const Phased& of, const Plan& plan, const LandingTile& tile, int row,
                                       int column) {
  const Landing& landing = plan.landing;
  return tile.n_block == 0 && (row < landing.shape.stride * landing.span || tile.p + landing.span >= of.P) &&
         (column < landing.shape.stride * plan.tile_q || tile.q + plan.tile_q >= of.Q);
}

// Blocks of channels take turns by phase. The stages of weights of all before one.
MODELNEW_HOST_DEVICE inline int stages_before(const Phases& phases, int block) {
  if (phases.rows == 1) return block * phases.taps;
  return block / 4 * phases.taps + phases.before[block % 4];
}

// A tile: its first pixel's number (points) or line and column, and its channels.
struct Tile {
  int group, n_block;
  int part;                 // its number among all parts of tiles, or -1: it is whole
  int first_block, blocks;  // of channels
  int64_t first;            // points: output number; windows: line
  int q, skip;              // windows: first column; outputs of the first line that are another tile's
};

// The tile that a unit of work is, or is a part of.
MODELNEW_HOST_DEVICE inline int tile_number(const Plan& plan, int unit) {
  const int whole_tiles = static_cast<int>(plan.whole_tiles);
  if (unit < whole_tiles) return unit;
  return whole_tiles + quotient(unit - whole_tiles, plan.by.splits);
}

// The number of part `part` among those of its tile.
MODELNEW_HOST_DEVICE inline int part_of_tile(const Plan& plan, int part) {
  return part - quotient(part, plan.by.splits) * plan.splits;
}

// Numbers below 2^31 have a faster division by a divisor known before.
MODELNEW_HOST_DEVICE inline int64_t divide(int64_t number, const Divisor& by) {
  return number >> 31 == 0 ? quotient(static_cast<int>(number), by) : number / by.divisor;
}

// Unit of work number so many: a tile, or a part of its reduction. Tiles of the same pixels are neighbours, so that x
// comes from memory once.
MODELNEW_HOST_DEVICE inline Tile locate_tile(const Plan& plan, int unit) {
  Tile tile;
  tile.part = -1;
  tile.first_block = 0;
  tile.blocks = plan.blocks_c;
  if (unit >= plan.whole_tiles) {
    tile.part = unit - static_cast<int>(plan.whole_tiles);
    tile.first_block = part_of_tile(plan, tile.part) * plan.split_blocks;
    const int left = plan.blocks_c - tile.first_block;
    tile.blocks = left < plan.split_blocks ? left : plan.split_blocks;
  }
  const int number = tile_number(plan, unit);
  int m = quotient(number, plan.by.tiles_n);
  tile.n_block = number - m * plan.tiles_n;
  tile.group = quotient(m, plan.by.tiles_m);
  m = plan.tiles_m - 1 - (m - tile.group * plan.tiles_m);
  tile.q = tile.skip = 0;
  const int64_t first = static_cast<int64_t>(m) * tile_pixels(plan);
  if (plan.points) {
    tile.first = first;
  } else if (plan.packed) {
    tile.first = divide(first, plan.by.tile_q);
    tile.skip = static_cast<int>(first - tile.first * plan.tile_q);
  } else {
    const int line = quotient(m, plan.by.tiles_q);
    tile.first = static_cast<int64_t>(line) * plan.tile_p;
    tile.q = (m - line * plan.tiles_q) * plan.tile_q;
  }
  return tile;
}

// The number of its first output among those of all images: points and packed windows.
MODELNEW_HOST_DEVICE inline int64_t first_output(const Plan& plan, const Tile& tile) {
  return plan.points ? tile.first : tile.first * plan.tile_q + tile.skip;
}

// The first image that the tile reads and writes.
MODELNEW_HOST_DEVICE inline int64_t first_image(const Plan& plan, const Tile& tile) {
  return divide(tile.first, plan.points ? plan.by.plane : plan.by.rows);
}

// Where output m of a tile is: image, counted from the tile's first one, row and column; false if it does not exist.
MODELNEW_HOST_DEVICE inline bool locate_output(const Phased& of, const Plan& plan, const Tile& tile, int64_t image,
                                               int m, int& n, int& p, int& q) {
  if (plan.points) {
    const int plane = of.P * of.Q;
    const int in_image = static_cast<int>(tile.first - image * plane) + m;
    n = quotient(in_image, plan.by.plane);
    const int rest = in_image - n * plane;
    p = quotient(rest, plan.by.columns);
    q = rest - p * of.Q;
    return image + n < of.N;
  }
  m += tile.skip;
  const int line = quotient(m, plan.by.tile_q);
  const int in_image = static_cast<int>(tile.first - image * of.P) + line;
  n = quotient(in_image, plan.by.rows);
  p = in_image - n * of.P;
  q = tile.q + m - line * plan.tile_q;
  return line < plan.tile_p && image + n < of.N && q < of.Q;
}

// The slot that output m reads at its first tap. Where a lane writes pieces of four pixels, neighbouring ones lie a
// quarter apart, and two slots more: then neither writing nor reading them meets a bank conflict.
MODELNEW_HOST_DEVICE inline int slot_of_point(const Plan& plan, int m) {
  return plan.quarters ? m % 4 * (tile_pixels(plan) / 4 + 2) + m / 4 : m;
}

// Images: where point m lies in a stage, in words, in the stage's first channel.
MODELNEW_HOST_DEVICE inline int word_of_point(const Plan& plan, const Tile& tile, int64_t image, int m) {
  const int in_images = static_cast<int>(tile.first - image * plan.plane_slots) + m;
  const int n = quotient(in_images, plan.by.plane);
  return n * plan.image_words + in_images - n * plan.plane_slots;
}

MODELNEW_HOST_DEVICE inline int slot_of_output(const Phased& of, const Plan& plan, const Tile& tile, int64_t image,
                                               int m) {
  if (plan.points) return slot_of_point(plan, m);
  m += tile.skip;
  const int line = quotient(m, plan.by.tile_q);
  const int seams = quotient(static_cast<int>(tile.first - image * of.P) + line, plan.by.rows);
  if (line >= plan.tile_p || image + seams >= of.N) return 0;  // it does not exist; any value that does
  return (line * plan.row_step + seams * plan.gap) * plan.pitch + (m - line * plan.tile_q) * plan.column_step;
}

// Finds the pixel in a slot of a window: image, counted from the tile's first one, row and column; false if outside.
//
//         +--pitch---+
//         | . . . . .|   rows of image n that the first lines need
//         | . . . . .|
//         +----------+
//         | . . . . .|   rows of image n + 1, with a halo of their own
//         +----------+
MODELNEW_HOST_DEVICE inline bool locate_slot(const Phased& of, const Plan& plan, const Tile& tile, int64_t image,
                                             int slot, int& n, int& h, int& w) {
  const int row = quotient(slot, plan.by.pitch), column = slot - row * plan.pitch;
  const int first_p = static_cast<int>(tile.first - image * of.P);
  const int per_image = of.P * plan.row_step + plan.gap, behind_seam = row - (per_image - first_p * plan.row_step);
  n = behind_seam < 0 ? 0 : 1 + quotient(behind_seam, plan.by.image_rows);
  const int in_image = n == 0 ? row + first_p * plan.row_step : behind_seam - (n - 1) * per_image;
  // Rows of slots count from the first one that the image's first line reads.
  h = (plan.in_row_step == 1 ? in_image : in_image * plan.in_row_step) - of.pad_h;
  w = (tile.q * of.stride_w - of.pad_w) + column * plan.in_column_step;
  return image + n < of.N && h >= 0 && h < of.H && w >= 0 && w < of.W;
}

// Rows or columns at a stride of 2: the filter when both phases of x are apart.
MODELNEW_HOST_DEVICE inline void separate_phases(int& phases, int (&first)[2], int (&taps)[2], int& R, int& stride,
                                                 int pad) {
  // Row p * 2 - pad + r of x is row p + (r - pad) / 2, rounded down, of its phase; the window starts pad / 2 before p.
  const int start = (pad + 1) / 2, end = (R - 1 - pad) >> 1;
  phases = 2;
  taps[0] = taps[1] = 0;
  for (int r = R - 1; r >= 0; --r) {
    const int phase = (r + pad) & 1;
    first[phase] = (r - pad - phase) / 2 + start;
    ++taps[phase];
  }
  R = start + end + 1;
  stride = 1;
}

// Whether the filter moves over phases of x without a stride.
MODELNEW_HOST_DEVICE inline bool has_phases(const Phased& of) {
  return of.stride_h == 2 && of.stride_w == 2 && of.R > 1 && of.S > 1 && of.dilation_h == 1 && of.dilation_w == 1;
}

// The filter and the channels then; those of a phase are filled up to blocks of so many.
MODELNEW_HOST_DEVICE inline void separate(const Phased& of, int block_channels, Phased& result) {
  Phases& phases = result.phases;
  separate_phases(phases.rows, phases.first_r, phases.r, result.R, result.stride_h, of.pad_h);
  separate_phases(phases.columns, phases.first_s, phases.s, result.S, result.stride_w, of.pad_w);
  for (int phase = 1; phase < 4; ++phase)
    phases.before[phase] = phases.before[phase - 1] + phases.r[(phase - 1) / 2] * phases.s[(phase - 1) % 2];
  const int blocks = (of.in_channels + block_channels - 1) / block_channels;
  result.in_channels = phases_of(phases) * blocks * block_channels;
}

// Several groups of few channels as one with those of a stage, where its weights are zeros between channels of
// different groups. Contained operands only: Inf or NaN, which would make NaN of these zeros, are never among them.
// Each output has its own group's products added of what is on the list.
//
//                                        64 input channels
//   weights of a tile, groups A to D       A  0  0  0
//   of 16 input channels:                  0  B  0  0       output channels
//                                          0  0  C  0
//                                          0  0  0  D
MODELNEW_HOST_DEVICE inline Phased merged(const Phased& of) {
  Phased result = of;
  if (of.groups == 1 || kContainedBlock % of.in_channels != 0) return result;
  const int groups = kContainedBlock / of.in_channels;
  if (of.groups % groups != 0) return result;
  result.merged = groups;
  result.groups = of.groups / groups;
  result.in_channels = of.in_channels * groups;
  result.out_channels = of.out_channels * groups;
  return result;
}

// A copy of x, [pixel][channel]. Of 1x1 filters only what they read is copied. Copies of fp32 in fp16 have their
// channels filled up to eights; those in phases, which tma has no use for, to whole blocks, and have the padding around
// images, so that few boxes bring the slots of a tile. Other copies are faster without padding (docs/lab/gather.md).
MODELNEW_HOST_DEVICE inline Phased copied(const Phased& of, bool contained = true, bool by_tma = false) {
  const Phased source = contained ? merged(of) : of;
  Phased result = source;
  if (contained) result.in_channels = (source.in_channels + 7) / 8 * 8;
  if (of.R == 1 && of.S == 1) {
    result.stride_h = result.stride_w = 1;
    result.pad_h = result.pad_w = 0;
    result.H = of.P;
    result.W = of.Q;
  } else if (contained && !by_tma && has_phases(of)) {
    separate(source, kContainedBlock, result);
    result.pad_h = result.pad_w = 0;
    result.H = of.P + result.R - 1;
    result.W = of.Q + result.S - 1;
  }
  const int64_t channels = static_cast<int64_t>(result.groups) * result.in_channels;
  result.in_stride[3] = channels;
  result.in_stride[2] = result.W * channels;
  result.in_stride[1] = 1;
  result.in_stride[0] = result.H * result.in_stride[2];
  return result;
}

// Landing: the copy by which values on the list are numbered, of all of x.
MODELNEW_HOST_DEVICE inline Phased numbered(const Phased& of) {
  Phased result = of;
  result.in_channels = (of.in_channels + 7) / 8 * 8;
  return result;
}

// The phases of x itself. A block of channels, those of a stage, is of one phase; H and W count pairs of rows and of
// columns, and strides are those of x: phases are nowhere side by side.
MODELNEW_HOST_DEVICE inline Phased in_phases(const Phased& of) {
  Phased result = of;
  separate(of, kPhasesBlock, result);
  result.pad_h = (of.pad_h + 1) / 2;
  result.pad_w = (of.pad_w + 1) / 2;
  result.H = (of.H + 1) / 2;
  result.W = (of.W + 1) / 2;
  return result;
}

// x as the plan has it: as it is, copied or in phases.
MODELNEW_HOST_DEVICE inline Phased as_planned(const Phased& of, const Plan& plan) {
  return plan.copied ? copied(of, plan.contained, plan.by_tma) : plan.in_phases ? in_phases(of) : of;
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// ---- Device code ----

// -- Pack: [group][tile of channels][block of channels][tap][piece][TILE_N] x 16 bytes --

// One row of packed weights, of all tiles: its tile, its number in there, and its channels, from the first one that has
// weights to the one behind the last; these start at `from` in w, in elements.
struct PackedRow {
  int tile, number, first, end;
  int64_t from;
};

MODELNEW_HOST_DEVICE inline PackedRow locate_row(const PackParams& params, int row_of_all) {
  const Phased& of = params.of;
  PackedRow row;
  row.tile = quotient(row_of_all, params.by_tile_n);
  row.number = row_of_all - row.tile * params.tile_n;
  const int group = quotient(row.tile, params.by_tiles_n);
  const int k = (row.tile - group * params.tiles_n) * params.tile_n + row.number;
  // Several groups of the filter may be one here; where rows of taps stack, each of these counts as a group.
  const int in_group = quotient(k, params.by_group_out), own_k = k - in_group * params.group_out;
  row.first = in_group * params.group_step;
  row.end = k < of.out_channels && own_k < params.group_rows ? row.first + params.group_in : 0;
  row.from =
      params.first + (int64_t{group} * of.merged + in_group) * of.w_stride_group + own_k * of.w_stride_out;
  return row;
}

// Piece `number` of a row: its tap, where it goes, and its channels that have weights. Neighbouring numbers have
// neighbouring taps and channels, or (whole rows) neighbouring pieces.
struct PackedPiece {
  int r, s;        // of w
  int first, end;  // of these channels and behind the last one, counted from the piece's own first: also outside of it
  int to;          // in the packed weights, in pieces
};

// The phase that reads tap r, of those of rows or of columns, and the tap's number in there.
struct PhasedTap {
  int phase, tap;
};

MODELNEW_HOST_DEVICE inline PhasedTap phased_tap(const int (&first)[2], int r, int pad) {
  const int phase = (r + pad) & 1;
  return {phase, (r - pad - phase) / 2 + (pad + 1) / 2 - first[phase]};  // as separate_phases counts them
}

MODELNEW_HOST_DEVICE inline PackedPiece locate_piece(const PackParams& params, int channels, const PackedRow& row,
                                                     int number) {
  const Phased& of = params.of;
  const Phases& phases = params.phases;
  int piece_of_all, tap;
  if (params.whole_rows) {  // in their order
    tap = quotient(number, params.by_pieces);
    piece_of_all = number - tap * params.pieces;
  } else {
    piece_of_all = quotient(number, params.by_taps);
    tap = number - piece_of_all * of.R * of.S;
  }
  const int seen_r = quotient(tap, params.by_s), seen_s = tap - seen_r * of.S;
  PackedPiece piece;
  piece.r = of.flipped ? of.R - 1 - seen_r : seen_r;
  piece.s = of.flipped ? of.S - 1 - seen_s : seen_s;
  const int first_channel = piece_of_all * channels;
  piece.first = row.first - first_channel;
  piece.end = row.end - first_channel;
  if (params.whole_rows) {
    piece.to = (row.tile * params.tile_n + row.number) * params.row_pieces + number;
    return piece;
  }
  const int block = quotient(piece_of_all, params.by_pieces), in_stage = piece_of_all - block * params.pieces;
  int stage = block * of.R * of.S + tap;
  if (phases.rows > 1) {
    const PhasedTap down = phased_tap(phases.first_r, piece.r, of.pad_h);
    const PhasedTap right = phased_tap(phases.first_s, piece.s, of.pad_w);
    stage += phases.before[2 * down.phase + right.phase] + down.tap * phases.s[right.phase] + right.tap - tap;
  }
  piece.to = ((row.tile * params.iterations + stage) * params.pieces + in_stage) * params.tile_n + row.number;
  return piece;
}

// Where its first channel lies in w, counted from the row's first weight, in elements.
template <typename Offset>
MODELNEW_HOST_DEVICE inline Offset offset_in_row(const Phased& of, const PackedPiece& piece) {
  return -piece.first * static_cast<Offset>(of.w_stride_in) + piece.r * static_cast<Offset>(of.w_stride_r) +
         piece.s * static_cast<Offset>(of.w_stride_s);
}

// Its channels; those that do not exist are zeros.
template <typename Stored, int COUNT>
__device__ __forceinline__ void load_weights(const PackParams& params, const PackedRow& row, const PackedPiece& piece,
                                             Stored (&values)[COUNT]) {
  const Stored* const from =
      static_cast<const Stored*>(params.w_ptr) + row.from + offset_in_row<int64_t>(params.of, piece);
  static_assert(sizeof values % 16 == 0, "whole pieces");
  if (params.of.w_stride_in == 1 && piece.first <= 0 && COUNT <= piece.end &&
      reinterpret_cast<uint64_t>(from) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof values) / 16; ++i) {
      const uint4 words = reinterpret_cast<const uint4*>(from)[i];
      memcpy(values + i * (16 / sizeof(Stored)), &words, sizeof words);
    }
    return;
  }
#pragma unroll
  for (int c = 0; c < COUNT; ++c)
    values[c] = piece.first <= c && c < piece.end ? from[c * params.of.w_stride_in] : Stored{};
}

// Neighbouring threads pack so many neighbouring rows, and then neighbouring pieces, so that they write 64 bytes side
// by side (docs/lab/gather.md).
constexpr int kPackRows = 4;

template <typename Format>
__device__ __forceinline__ void pack_piece(const PackParams& params, int number) {
  using Stored = typename Format::Stored;
  static_assert(!Format::CONTAINED, "those are scaled by rows");
  const int of_rows = number / kPackRows, rows = quotient(of_rows, params.by_row_pieces);
  const int in_row = of_rows - rows * params.row_pieces;
  const PackedRow row = locate_row(params, rows * kPackRows + number % kPackRows);
  const PackedPiece piece = locate_piece(params, Format::CHANNELS, row, in_row);
  Stored values[Format::CHANNELS];
  if (sizeof(Stored) == 4 && params.by_images) {
    const int before = quotient(in_row, params.by_pieces) * params.pieces;  // pieces of the stages before
    const int64_t first = in_row + before * (Format::CHANNELS - 1);
    const Stored* const from = static_cast<const Stored*>(params.w_ptr) + row.from + first * params.of.w_stride_in;
#pragma unroll
    for (int c = 0; c < Format::CHANNELS; ++c)
      values[c] = row.end > 0 ? from[c * params.pieces * params.of.w_stride_in] : Stored{};
  } else {
    load_weights(params, row, piece, values);
  }
  static_cast<uint4*>(params.packed_ptr)[piece.to] = operand_piece(values);
}

// -- Copy x: what 1x1 filters read, to [output pixel][channel of all groups] --

// Warps read neighbouring pixels and write neighbouring channels.
template <typename Stored>
__device__ __forceinline__ void copy_points(const CopyParams& params, int block, CopyShared<Stored>& shared) {
  const Phased& of = params.of;
  constexpr int kChannelsAtOnce = kPackThreads / kCopySide, kPixelsAtOnce = kPackThreads / 32;
  const int channels = of.groups * of.in_channels;
  const int pixels = static_cast<int>(of.N) * of.P * of.Q, pixel_block = quotient(block, params.by_channel_blocks);
  const int first_channel = (block - pixel_block * params.channel_blocks) * kCopySide;
  {
    const int pixel = threadIdx.x % kCopySide, first = threadIdx.x / kCopySide;
    const Stored* const from = source_of<Stored>(params, pixel_block * kCopySide + pixel);
    Stored values[kCopySide / kChannelsAtOnce];
#pragma unroll
    for (int i = 0; i < kCopySide / kChannelsAtOnce; ++i) {
      const int channel = first_channel + first + i * kChannelsAtOnce;
      values[i] = from != nullptr && channel < channels ? from[channel * of.in_stride[1]] : Stored{};
    }
#pragma unroll
    for (int i = 0; i < kCopySide / kChannelsAtOnce; ++i) shared[pixel][first + i * kChannelsAtOnce] = values[i];
  }
  __syncthreads();  // all of it is there
#pragma unroll
  for (int i = 0; i < kCopySide; i += kPixelsAtOnce) {
    const int pixel = i + threadIdx.x / 32;
    const int of_all = pixel_block * kCopySide + pixel;
#pragma unroll
    for (int c = threadIdx.x % 32; c < kCopySide; c += 32) {
      if (of_all < pixels && first_channel + c < channels)
        static_cast<Stored*>(params.out_ptr)[int64_t{of_all} * channels + first_channel + c] = shared[pixel][c];
    }
  }
}

template <typename Format>
__global__ void __launch_bounds__(kPackThreads) pack_kernel(const PackParams params, const CopyParams copy) {
  using Stored = typename Format::Stored;
  extern __shared__ __align__(16) uint8_t modelnew_gather_pack_smem[];
  hopper::wait_for_prerequisites();  // whoever wrote w and x
  hopper::launch_dependents();
  if (static_cast<int>(blockIdx.x) < copy.blocks) {
    copy_points<Stored>(copy, blockIdx.x, *reinterpret_cast<CopyShared<Stored>*>(modelnew_gather_pack_smem));
    return;
  }
  const int number = static_cast<int>((blockIdx.x - copy.blocks) * kPackThreads + threadIdx.x);
  if (number < params.count) pack_piece<Format>(params, number);
}

// -- Sample x: what its scale is to be --

__global__ void __launch_bounds__(kPackThreads) sample_kernel(const __grid_constant__ SampleParams params) {
  extern __shared__ __align__(16) uint8_t modelnew_gather_sample_smem[];
  sample(params, static_cast<int>(blockIdx.x), *reinterpret_cast<uint32_t*>(modelnew_gather_sample_smem));
}

// -- Contain: weights as above, and x to [pixel][channel], scaled and rounded to what fits into fp16 --

// A block packs some rows of the weights, each scaled by the power of two that takes its largest one to 2^14..2^15.
// First all of them come to shared memory, a row after the other; then neighbouring threads pack what lies side by
// side: the same piece of neighbouring rows, or (whole rows) neighbouring pieces.
__device__ __forceinline__ void contain_rows(const ContainParams& contain, int threads, uint8_t* smem) {
  const PackParams& params = contain.pack;
  const Phased& of = params.of;
  uint32_t* const magnitudes = reinterpret_cast<uint32_t*>(smem);
  float* const staged = reinterpret_cast<float*>(smem + kMagnitudeBytes);
  const int rows = contain.rows_of_block, row_threads = threads / rows;
  const int first_row = static_cast<int>(blockIdx.x) * rows;
  const float* const w = static_cast<const float*>(params.w_ptr);
  const bool together = contain.row_loads == RowLoads::kTogether;
  float values[8];
  if (threadIdx.x < kMostRowsOfBlock) magnitudes[threadIdx.x] = 0;
  if (together) {
    const PackedRow row = locate_row(params, first_row);
    const int taps = of.R * of.S, all = of.in_channels * taps;
    for (int i = threadIdx.x; i < all; i += threads) {
      const int channel = quotient(i, params.by_taps), in_channel = i - channel * taps;
      const int r = quotient(in_channel, params.by_s), s = in_channel - r * of.S;
      const int64_t in_order = contain.tap_step == 1 ? 4 * in_channel : r * of.w_stride_r + s * of.w_stride_s;
      hopper::copy_async<16>(hopper::smem_address(staged + channel / 8 * kTogetherGap + 4 * i),
                             w + row.from + channel * of.w_stride_in + in_order, row.end != 0 ? 16 : 0);
    }
    hopper::copies_commit();
    hopper::copies_wait<0>();
    __syncthreads();  // all of it is there, and so are first values of magnitudes
    uint32_t largest[kRowsTogether] = {};
    for (int i = threadIdx.x; i < all; i += threads) {
      const int channel = quotient(i, params.by_taps);
      const float* const from = staged + place_together(contain, channel, i - channel * taps);
#pragma unroll
      for (int k = 0; k < kRowsTogether; ++k)
        largest[k] = max(largest[k], float_bits(from[k * contain.row_step]) & 0x7fffffff);
    }
#pragma unroll
    for (int k = 0; k < kRowsTogether; ++k) {
      const uint32_t magnitude = hopper::warp_max(largest[k]);
      if (threadIdx.x % 32 == 0) atomicMax(&magnitudes[k], magnitude);
    }
  } else {
    const int in_block = static_cast<int>(threadIdx.x) / row_threads;
    const int first = static_cast<int>(threadIdx.x) % row_threads;
    const PackedRow row = locate_row(params, first_row + in_block);
    const int row_words = contain.row_words;
    const float* const from = w + row.from;
    const bool exists = row.end != 0;
    float* const to = staged + in_block * contain.row_pitch;
    const uint32_t to_smem = hopper::smem_address(to);
    if (contain.row_loads == RowLoads::kFours) {
      for (int i = 4 * first; i < row_words; i += 4 * row_threads)
        hopper::copy_async<16>(to_smem + 4 * i, from + i, exists ? 16 : 0);
    } else if (contain.row_loads == RowLoads::kSingle) {
      for (int i = first; i < (row_words + 3) / 4 * 4; i += row_threads)
        hopper::copy_async<4>(to_smem + 4 * i, from + i, exists && i < row_words ? 4 : 0);
    } else if (contain.row_loads == RowLoads::kPieces) {
      for (int number = first; number < params.row_pieces; number += row_threads) {
        const PackedPiece piece = locate_piece(params, 8, row, number);
        const float* const of_piece = from + offset_in_row<int64_t>(of, piece);
#pragma unroll
        for (int c = 0; c < 8; ++c)
          hopper::copy_async<4>(to_smem + 32 * number + 4 * c, of_piece + c * of.w_stride_in,
                                piece.first <= c && c < piece.end ? 4 : 0);
      }
    }
    hopper::copies_commit();
    hopper::copies_wait<0>();
    __syncthreads();  // all of it is there, and so are first values of magnitudes
    uint32_t magnitude = 0;
    const auto see = [&](float value) { magnitude = max(magnitude, float_bits(value) & 0x7fffffff); };
    if (contain.row_loads == RowLoads::kNone) {
#pragma unroll 2
      for (int number = first; number < params.row_pieces; number += row_threads) {
        load_weights(params, row, locate_piece(params, 8, row, number), values);
        for (float value : values) see(value);
      }
    } else {
#pragma unroll 1
      for (int i = 4 * first; i < row_words; i += 4 * row_threads) {  // behind the last ones lie zeros
        const float4 four = *reinterpret_cast<const float4*>(to + i);
        see(four.x);
        see(four.y);
        see(four.z);
        see(four.w);
      }
    }
    magnitude = hopper::warp_max(magnitude);  // a warp has one row
    if (threadIdx.x % 32 == 0) atomicMax(&magnitudes[in_block], magnitude);
  }
  __syncthreads();  // all have seen their weights

  // Inf and NaN have no scale either.
  const int thread = static_cast<int>(threadIdx.x);
  const bool by_rows = params.whole_rows && !together;
  const int in_block = by_rows ? thread / row_threads : thread % rows;
  const int first = by_rows ? thread % row_threads : thread / rows;
  const PackedRow row = locate_row(params, first_row + in_block);
  const uint32_t magnitude = magnitudes[in_block];
  int exponent = 0;
  const bool scaled = scale_exponent(magnitude >> 23, 14, exponent) || magnitude == 0;
  const float scale = power_of_two(exponent);
  const bool in_order = contain.row_loads == RowLoads::kPieces;
  const int step = in_order ? 1 : together ? kRowsTogether * of.R * of.S : static_cast<int>(of.w_stride_in);
  Watch watch;
#pragma unroll 1
  for (int number = first; number < params.row_pieces; number += row_threads) {
    const PackedPiece piece = locate_piece(params, 8, row, number);
    if (contain.row_loads == RowLoads::kNone) {
      load_weights(params, row, piece, values);
    } else {
      const int in_row = in_order   ? 8 * number
                         : together ? place_together(contain, -piece.first, piece.r * of.S + piece.s)
                                    : offset_in_row<int>(of, piece);
      const float* const of_piece = staged + in_block * (together ? contain.row_step : contain.row_pitch) + in_row;
      if (piece.first <= 0 && piece.end >= 8) {
        // By fours, if they are aligned: by single values threads of neighbouring pieces meet in few banks.
        if (params.whole_rows && step == 1 && in_row % 4 == 0) {
          const float4 low = *reinterpret_cast<const float4*>(of_piece);
          const float4 high = *reinterpret_cast<const float4*>(of_piece + 4);
          values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
          values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
        } else {
#pragma unroll
          for (int c = 0; c < 8; ++c) values[c] = of_piece[c * step];
        }
      } else {
#pragma unroll
        for (int c = 0; c < 8; ++c) values[c] = piece.first <= c && c < piece.end ? of_piece[c * step] : 0.0f;
      }
    }
#pragma unroll
    for (float value : values) watch.see(float_bits(value));
    const auto pair = [&](int c) { return contain_pair(float_bits(values[c]), float_bits(values[c + 1]), scale); };
    const uint4 packed = make_uint4(pair(0), pair(2), pair(4), pair(6));
    watch.see_contained(packed);
    static_cast<uint4*>(params.packed_ptr)[piece.to] = packed;
  }
  // One factor, a normal number, undoes both scales.
  int x_exponent;
  const bool fits = find_scale(contain.guard, x_exponent) && scaled && watch.fits(least_contained(exponent, 1)) &&
                    x_exponent + exponent <= 126 && x_exponent + exponent >= -126;
  if (!fits) contain.guard.control->all_again = 1;
  if (blockIdx.x == 0 && threadIdx.x == 0) contain.guard.control->x_exponent = x_exponent;
  if (first == 0) contain.guard.w_factors[first_row + in_block] = power_of_two(-exponent);
}

// Five blocks an SM: 48 registers (docs/lab/gather.md).
template <int VECTOR>
__global__ void __launch_bounds__(kPackThreads, 5) contain_kernel(const __grid_constant__ ContainParams params) {
#if defined(MODELNEW_SM90A)
  extern __shared__ __align__(16) uint8_t modelnew_gather_contain_smem[];
  hopper::launch_dependents();
  const int block = static_cast<int>(blockIdx.x) - params.row_blocks;
  if (block < 0)
    contain_rows(params, kPackThreads, modelnew_gather_contain_smem);
  else
    contain_points<VECTOR>(params.copy, params.guard, block,
                           *reinterpret_cast<ContainShared*>(modelnew_gather_contain_smem));
#endif
}

// The same for weights alone, where x is contained on its way: less code, which comes from memory, and 512 threads for
// long rows: shared memory has room for three blocks an SM, with as few warps otherwise (docs/lab/gather.md).
__global__ void __launch_bounds__(kMostRowThreads, 3)
    contain_rows_kernel(const __grid_constant__ ContainParams params) {
#if defined(MODELNEW_SM90A)
  extern __shared__ __align__(16) uint8_t modelnew_gather_rows_smem[];
  hopper::launch_dependents();
  contain_rows(params, static_cast<int>(blockDim.x), modelnew_gather_rows_smem);
#endif
}

using hopper::named_barrier;
// Barriers of the gathering warps; of a multiplying warpgroup, this one and the next two; of all that multiply.
[[maybe_unused]] constexpr int kGatherBarrier = 1, kWarpgroupBarrier = 2, kMultiplyBarrier = 5;

// A position in a ring of stages and the parity of its current round, in one register.
struct PackedRingPosition {
  uint32_t state = 0;

  __device__ __forceinline__ int slot() const { return state >> 1; }
  __device__ __forceinline__ uint32_t parity() const { return state & 1; }
  __device__ __forceinline__ void next(int slots) {
    state += 2;
    if (slot() == slots) state = (state & 1) ^ 1;
  }
};

struct Shared {
  uint32_t base;
  SharedLayout layout;

  __device__ __forceinline__ uint32_t x_full(int stage) const { return base + 8 * stage; }
  __device__ __forceinline__ uint32_t x_empty(int stage) const { return base + 8 * (kMaxStages + stage); }
  __device__ __forceinline__ uint32_t w_full(int stage) const { return base + 8 * (2 * kMaxStages + stage); }
  __device__ __forceinline__ uint32_t w_empty(int stage) const { return base + 8 * (3 * kMaxStages + stage); }
};
static_assert(4 * kMaxStages * 8 <= kBarrierBytes, "room for all");

// -- Copy weights: packed -> w ring, by one thread --

// Wait for the preceding kernels after all local set-up: code and parameters come from memory for the first time, which
// takes a while. False: operands should be contained but are not, and `again` computes the call.
template <typename Format>
__device__ __forceinline__ bool wait_for_operands(const Params& params, int* x_exponent = nullptr) {
  hopper::wait_for_prerequisites();
  if constexpr (Format::CONTAINED) {
    const ContainedControl control = *params.guard.control;
    if (x_exponent != nullptr) *x_exponent = control.x_exponent;
    return are_contained(control);
  }
  return true;
}

template <typename Format>
__device__ __forceinline__ void copy_weights(const Params& params, const Shared& shared) {
  const Plan& plan = params.plan;
  PackedRingPosition at;
  bool waits = true;
  for (int unit = blockIdx.x; unit < plan.units; unit += gridDim.x) {
    const Tile tile = locate_tile(plan, unit);
    const Phases& phases = params.of.phases;
    const int before = stages_before(phases, tile.first_block);
    const int stages = stages_before(phases, tile.first_block + tile.blocks) - before;
    const int64_t first = (static_cast<int64_t>(tile.group) * plan.tiles_n + tile.n_block) * plan.iterations + before;
    const uint8_t* from = static_cast<const uint8_t*>(params.packed_ptr) + first * plan.w_stage_bytes;
    if (waits && !wait_for_operands<Format>(params)) return;
    waits = false;
    for (int i = 0; i < stages; ++i) {
      const uint32_t to = shared.base + shared.layout.w_ring + at.slot() * plan.w_stage_bytes;
      hopper::barrier_wait_idly(shared.w_empty(at.slot()), at.parity() ^ 1);
      hopper::barrier_arrive_expecting(shared.w_full(at.slot()), plan.w_stage_bytes);
      if (sizeof(typename Format::Tensor) == 2 && plan.w_in_boxes)
        hopper::load_box(params.w_map, to, (tile.first_block + i) * plan.pieces * Format::CHANNELS,
                         tile.n_block * plan.tile_n, 0, 0, shared.w_full(at.slot()));
      else
        hopper::bulk_load(to, from, plan.w_stage_bytes, shared.w_full(at.slot()));
      from += plan.w_stage_bytes;
      at.next(plan.w_stages);
    }
    if (plan.resident) return;
  }
}

__device__ __forceinline__ void store_words(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// -- Gather x: memory -> x ring --

[[maybe_unused]] constexpr int kNothing = -1;  // in the table: the slot is outside of the image

// The stages of x that a gathering warp fills, one after another, and the table of the tile that a stage belongs to.
template <typename Format, Loads LOADS>
struct Stages {
  using Stored = typename Format::Stored;
  static constexpr int CHANNELS = Format::CHANNELS;

  const Params& params;
  const int warp, lane;
  int32_t* const tables;  // offsets of the pixels of slots, of this tile and the next one

  int unit;
  const Stored* base;  // the group's first channel in the tile's first image
  int32_t* offsets;    // this tile's
  int block, end;      // of channels
  bool entered;        // the stage is the first one of its tile

  // Before the first one.
  __device__ __forceinline__ Stages(const Params& params, int32_t* tables)
      : params(params), warp(hopper::uniform(threadIdx.x / 32 % 4)), lane(threadIdx.x % 32), tables(tables) {
    unit = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);
    block = 0;
    end = 1;
    offsets = tables + table_slots();
  }

  __device__ __forceinline__ int table_slots() const { return (params.plan.slots + 31) / 32 * 32; }
  __device__ __forceinline__ int first_channel() const { return block * params.plan.pieces * CHANNELS; }

  // False after the last one.
  __device__ __forceinline__ bool next() {
    entered = false;
    if (++block < end) return true;
    entered = true;
    unit += static_cast<int>(gridDim.x);
    if (unit >= params.plan.units) return false;
    enter_tile();
    return true;
  }

  // All gathering warps come here once a tile: they fill the table together.
  __device__ __forceinline__ void enter_tile() {
    const Phased& of = params.of;
    const Plan& plan = params.plan;
    const Tile tile = locate_tile(plan, unit);
    block = tile.first_block;
    end = block + tile.blocks;
    const int64_t image = first_image(plan, tile);
    base = static_cast<const Stored*>(params.in_ptr) + image * of.in_stride[0] +
           static_cast<int64_t>(tile.group) * of.in_channels * of.in_stride[1];
    offsets = offsets == tables ? tables + table_slots() : tables;
    constexpr int kStep = LOADS == Loads::kPixels ? 4 : 1;
    for (int slot = threadIdx.x % 128 * kStep; slot < table_slots(); slot += kGatherThreads * kStep) {
      int n, h, w;
      bool inside;
      if (plan.points) {
        inside = locate_output(of, plan, tile, image, slot, n, h, w);
        h = h * of.stride_h - of.pad_h;
        w = w * of.stride_w - of.pad_w;
        inside = inside && h >= 0 && h < of.H && w >= 0 && w < of.W;
      } else {
        inside = slot < plan.slots && locate_slot(of, plan, tile, image, slot, n, h, w);
      }
      offsets[slot / kStep] =
          inside ? static_cast<int32_t>(n * of.in_stride[0] + h * of.in_stride[2] + w * of.in_stride[3]) : kNothing;
    }
    named_barrier(kGatherBarrier, kGatherThreads);
  }
};

// Neighbouring channels of one place: COUNT copies of BYTES each, `left` channels and for the rest zeros. `size` is
// BYTES, or 0 where zeros are to be written.
template <int BYTES, int COUNT, typename Stored, typename To>
__device__ __forceinline__ void copy_channels(const To& to, const Stored* from, int64_t step, int left, int size) {
  if (left >= COUNT) {
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
      hopper::copy_async<BYTES>(to(c), from, size);
      from += step;
    }
  } else {
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
      hopper::copy_async<BYTES>(to(c), from, c < left ? size : 0);
      from += step;
    }
  }
}

// As x lies in memory, by copies that nobody waits for but who reads the stage: it is rounded when it is multiplied.
// The warps take items in turns:
//
//   kSingle     32 slots of 16 channels
//   kPixels     32 times 4 slots of 4 channels; of tiles of 64 and 192 pixels 16 times 4 slots of 8 channels
//   kChannels   32 / pieces slots of all pieces; where the first of them lie, a lane remembers for the whole tile
template <typename Format, Loads LOADS, int PIXELS>
__device__ __forceinline__ void copy_stages(const Params& params, const Shared& shared, int32_t* tables) {
  using Stored = typename Format::Stored;
  const Phased& of = params.of;
  const Plan& plan = params.plan;
  Stages<Format, LOADS> stages(params, tables);
  const int lane = stages.lane;
  constexpr int kOwn = 12;
  [[maybe_unused]] int own[kOwn];
  PackedRingPosition at;
  while (stages.next()) {
    const uint32_t stage = shared.base + shared.layout.x_ring + at.slot() * plan.x_stage_bytes;
    const int first_channel = stages.first_channel();
    hopper::barrier_wait(shared.x_empty(at.slot()), at.parity() ^ 1);
    if constexpr (LOADS == Loads::kChannels) {
      const int log_lanes = plan.pieces == 8 ? 3 : 2, piece = lane & (plan.pieces - 1);
      const int channel = first_channel + piece * stages.CHANNELS;
      const int whole = channel < of.in_channels ? 16 : 0, slots_a_copy = 32 >> log_lanes;
      const Stored* const base = stages.base + channel;
      const int first = stages.warp * slots_a_copy + (lane >> log_lanes), distance = kGatherWarps * slots_a_copy;
      // Copies write neighbouring pieces of 128 bytes at once, others one by one.
      uint32_t to = stage;
      int next = distance * 16;
      uint32_t flip = 0;
      if (plan.rows) {
        to += first * 128 + (piece ^ first % 8) * 16;
        next = distance * 128;
        flip = distance % 8 * 16;  // 4 pieces
      } else {
        to += (piece * plan.piece_slots + first) * 16;
      }
      if (stages.entered) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) own[i] = stages.offsets[min(first + i * distance, plan.slots - 1)];
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (first + i * distance < plan.slots)
          hopper::copy_async<16>(to, base + max(own[i], 0), own[i] == kNothing ? 0 : whole);
        to = (to + next) ^ flip;
      }
      for (int slot = first + kOwn * distance; slot < plan.slots; slot += distance) {
        const int offset = stages.offsets[slot];
        hopper::copy_async<16>(to, base + max(offset, 0), offset == kNothing ? 0 : whole);
        to = (to + next) ^ flip;
      }
    } else if constexpr (LOADS == Loads::kPixels) {
      constexpr int kCopies = 4;
      // Lanes of neighbouring pixels, rows of these in a warp, and groups of lanes in a row.
      constexpr int kFours = PIXELS / 4, kLanes = kFours % 32 == 0 ? 32 : 16, kRows = 32 / kLanes,
                    kGroups = kFours / kLanes;
      const int items = plan.pieces * stages.CHANNELS / kCopies * kGroups / kRows;
      for (int item = stages.warp; item < items; item += kGatherWarps) {
        const int four = item % kGroups * kLanes + lane % kLanes;
        const int channel = (item / kGroups * kRows + lane / kLanes) * kCopies;
        const int offset = stages.offsets[four];
        const uint32_t to = stage + (channel * plan.plane_slots + four * 4) * sizeof(Stored);
        copy_channels<4 * sizeof(Stored), kCopies>(
            [&](int c) { return to + static_cast<uint32_t>(c * plan.plane_slots * sizeof(Stored)); },
            stages.base + max(offset, 0) + (first_channel + channel) * of.in_stride[1], of.in_stride[1],
            of.in_channels - first_channel - channel, offset == kNothing ? 0 : 4 * static_cast<int>(sizeof(Stored)));
      }
    } else {
      constexpr int kCopies = 16;
      const int groups = (plan.slots + 31) / 32, halves = plan.pieces * stages.CHANNELS / kCopies;
      for (int group = stages.warp, part = 0;; group += kGatherWarps) {
        while (group >= groups) {
          group -= groups;
          ++part;
        }
        if (part >= halves) break;
        const int slot = group * 32 + lane, offset = stages.offsets[slot], channel = part * kCopies;
        if (slot >= plan.slots) continue;
        const Stored* const from = stages.base + max(offset, 0) + (first_channel + channel) * of.in_stride[1];
        const int left = of.in_channels - first_channel - channel;
        const int size = offset == kNothing ? 0 : static_cast<int>(sizeof(Stored));
        if (plan.planes) {
          const uint32_t to = stage + (channel * plan.plane_slots + slot) * sizeof(Stored);
          copy_channels<sizeof(Stored), kCopies>(
              [&](int c) { return to + static_cast<uint32_t>(c * plan.plane_slots * sizeof(Stored)); }, from,
              of.in_stride[1], left, size);
        } else {
          const uint32_t to = stage + (channel / stages.CHANNELS * plan.piece_slots + slot) * 16;
          copy_channels<sizeof(Stored), kCopies>(
              [&](int c) {
                return to + static_cast<uint32_t>(c / stages.CHANNELS * plan.piece_slots * 16 +
                                                  c % stages.CHANNELS * sizeof(Stored));
              },
              from, of.in_stride[1], left, size);
        }
      }
    }
    hopper::copies_arrive(shared.x_full(at.slot()));
    at.next(plan.x_stages);
  }
}

// 16-bit values that are not neighbours by fours of bytes go through registers, in blocks with two multiplying
// warpgroups. Units of items of 16 words of a lane:
//
//   kSingle     2 times 32 slots x the channels of a piece
//   kPixels     32 times 4 slots x the channels of a piece
template <typename Format, Loads LOADS>
struct Registers {
  using Stored = typename Format::Stored;
  static constexpr int CHANNELS = Format::CHANNELS;
  static constexpr int ITEM = 16, ITEMS = 1;
  static constexpr int SLOTS = LOADS == Loads::kPixels ? 128 : 64;  // of an item

  const Params& params;
  Stages<Format, LOADS> stages;
  int unit, units;  // of a stage, for each warp
  uint32_t by_groups;

  __device__ __forceinline__ Registers(const Params& params, int32_t* tables) : params(params), stages(params, tables) {
    groups = stages.table_slots() / 32;
    by_groups = reciprocal(groups);
    const int items =
        LOADS == Loads::kPixels ? params.plan.blocks_m * params.plan.pieces : (groups * params.plan.pieces + 1) / 2;
    units = (items + kGatherWarps * ITEMS - 1) / (kGatherWarps * ITEMS);
    unit = units - 1;
  }
  int groups;

  __device__ __forceinline__ bool next() {
    if (++unit < units) return true;
    unit = 0;
    return stages.next();
  }

  __device__ __forceinline__ int first_item(int of_unit) const {
    return (of_unit * kGatherWarps + stages.warp) * ITEMS;
  }

  __device__ __forceinline__ void load(uint32_t (&word)[ITEMS][ITEM]) const {
    const Phased& of = params.of;
    const Plan& plan = params.plan;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item = first_item(unit) + i;
      constexpr int TIMES = LOADS == Loads::kPixels ? 1 : 2;
#pragma unroll
      for (int j = 0; j < TIMES; ++j) {
        int piece, group;
        locate(item, j, piece, group);
        const int offset = piece < plan.pieces ? stages.offsets[group * 32 + stages.lane] : kNothing;
        const int channel = stages.first_channel() + piece * CHANNELS;
        const Stored* from = stages.base + offset + channel * of.in_stride[1];
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
          const bool exists = offset != kNothing && channel + c < of.in_channels;
          if constexpr (LOADS == Loads::kPixels)
            hopper::load_8(from + c * of.in_stride[1], exists, word[i][2 * c], word[i][2 * c + 1]);
          else
            hopper::load_2(from + c * of.in_stride[1], exists, word[i][j * CHANNELS + c]);
        }
      }
    }
  }

  __device__ __forceinline__ void store(const uint32_t (&word)[ITEMS][ITEM], int of_unit, uint32_t stage) const {
    const Plan& plan = params.plan;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item = first_item(of_unit) + i;
      if constexpr (LOADS == Loads::kPixels) {
        int piece, group;
        locate(item, 0, piece, group);
        if (piece >= plan.pieces) continue;
        const uint32_t address = stage + (piece * plan.piece_slots + group * 32 + stages.lane) * 16;
        const int quarter = (tile_pixels(plan) / 4 + 2) * 16;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          // Pixel j of eight channels: half j % 2 of word j / 2 of each.
          const uint32_t which = j % 2 == 0 ? 0x5410 : 0x7632;
          const auto pair = [&](int c) {
            return __byte_perm(word[i][2 * c + j / 2], word[i][2 * c + 2 + j / 2], which);
          };
          store_words(address + j * quarter, pair(0), pair(2), pair(4), pair(6));
        }
      } else {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          int piece, group;
          locate(item, j, piece, group);
          const int slot = group * 32 + stages.lane;
          if (piece >= plan.pieces || slot >= plan.slots) continue;
          const auto pair = [&](int c) { return word[i][j * CHANNELS + c] | word[i][j * CHANNELS + c + 1] << 16; };
          store_words(stage + (piece * plan.piece_slots + slot) * 16, pair(0), pair(2), pair(4), pair(6));
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void locate(int item, int j, int& piece, int& group) const {
    if constexpr (LOADS == Loads::kPixels) {
      piece = item >> (params.plan.blocks_m - 1);
      group = item & (params.plan.blocks_m - 1);
    } else {
      piece = quotient(2 * item + j, by_groups);
      group = 2 * item + j - piece * groups;
    }
  }
};

// Stores unit after unit while the next one is being loaded.
template <typename Format, Loads LOADS>
__device__ __forceinline__ void convert_stages(const Params& params, const Shared& shared, int32_t* tables) {
  using Units = Registers<Format, LOADS>;
  const Plan& plan = params.plan;
  Units units(params, tables);
  PackedRingPosition at;
  uint32_t first[Units::ITEMS][Units::ITEM], second[Units::ITEMS][Units::ITEM];
  bool loaded = false, more = true;
  const auto step = [&](const uint32_t (&before)[Units::ITEMS][Units::ITEM],
                        uint32_t (&next)[Units::ITEMS][Units::ITEM]) {
    const int unit = units.unit;
    more = units.next();
    if (more) units.load(next);
    if (loaded) {
      if (unit == 0) hopper::barrier_wait(shared.x_empty(at.slot()), at.parity() ^ 1);
      units.store(before, unit, shared.base + shared.layout.x_ring + at.slot() * plan.x_stage_bytes);
      if (unit == units.units - 1) {
        hopper::barrier_arrive(shared.x_full(at.slot()));
        at.next(plan.x_stages);
      }
    }
    loaded = true;
  };
  while (true) {
    step(first, second);
    if (!more) break;
    step(second, first);
    if (!more) break;
  }
}

// A box of kTaps: what a tap reads for all outputs of a tile, from number so many on, in the channels of a stage. The
// copy engine finds the pixels, row by row and image by image, and zeros for the padding. By one thread.
template <typename Format>
__device__ __forceinline__ void load_taps(const Params& params, const Shared& shared, int channels_a_stage) {
  const Phased& of = params.of;
  const Plan& plan = params.plan;
  bool waits = plan.copied;
  hopper::prefetch_map(params.in_map);
  PackedRingPosition at;
  for (int unit = blockIdx.x; unit < plan.units; unit += gridDim.x) {
    const Tile tile = locate_tile(plan, unit);
    const int n = static_cast<int>(first_image(plan, tile));
    const int in_image = static_cast<int>(tile.first) - n * of.P * of.Q, p = quotient(in_image, plan.by.columns);
    const int h = p - of.pad_h, w = in_image - p * of.Q - of.pad_w;
    if (waits && !wait_for_operands<Format>(params)) return;
    waits = false;
    for (int block = tile.first_block; block < tile.first_block + tile.blocks; ++block) {
      const int channel = tile.group * of.in_channels + block * channels_a_stage;
      for (int r = 0; r < of.R; ++r) {
        for (int s = 0; s < of.S; ++s) {
          const uint32_t stage = shared.base + shared.layout.x_ring + at.slot() * plan.x_stage_bytes;
          const uint32_t full = shared.x_full(at.slot());
          hopper::barrier_wait_idly(shared.x_empty(at.slot()), at.parity() ^ 1);
          hopper::barrier_arrive_expecting(full, plan.x_stage_bytes);
          hopper::load_columns(params.in_map, stage, channel, w, h, n, s * of.dilation_w, r * of.dilation_h, full);
          at.next(plan.x_stages);
        }
      }
    }
  }
}

// Boxes of the channels of a stage, by one warp: each lane orders some. They are of slots that follow one another in
// memory, or rows of slots. PHASES: of a stage's phase of x itself, whose channels are the same in all phases.
template <typename Format, bool PHASES>
__device__ __forceinline__ void load_boxes(const Params& params, const Shared& shared, int channels_a_stage) {
  const Phased& of = params.of;
  const Plan& plan = params.plan;
  const int lane = threadIdx.x % 32, phases = phases_of(of.phases), log_phases = phases == 1 ? 0 : 2;
  const int boxes = plan.x_boxes, box_bytes = plan.box_slots * 128;
  bool waits = plan.copied;
  if (lane == 0) hopper::prefetch_map(params.in_map);
  PackedRingPosition at;
  for (int unit = blockIdx.x; unit < plan.units; unit += gridDim.x) {
    const Tile tile = locate_tile(plan, unit);
    const int64_t image = first_image(plan, tile);
    const int first_slot = static_cast<int>(
        plan.points ? tile.first : (image * of.H + (tile.first - image * of.P) * plan.row_step) * of.W);
    int phase = tile.first_block & (phases - 1);
    if (waits && !wait_for_operands<Format>(params)) return;
    waits = false;
    for (int block = tile.first_block; block < tile.first_block + tile.blocks; ++block) {
      const uint32_t stage = shared.base + shared.layout.x_ring + at.slot() * plan.x_stage_bytes;
      // A copy has all groups of a phase, then those of the next.
      const int group_of_all = tile.group + (PHASES ? 0 : phase * of.groups);
      const int channel = group_of_all * (of.in_channels >> log_phases) + (block >> log_phases) * channels_a_stage;
      const int row_phase = phase >> (of.phases.columns - 1), column_phase = phase & (of.phases.columns - 1);
      if (++phase == phases) phase = 0;
      hopper::barrier_wait(shared.x_empty(at.slot()), at.parity() ^ 1);
      if (lane == 0) hopper::barrier_arrive_expecting(shared.x_full(at.slot()), boxes * box_bytes);
      __syncwarp();  // bytes are expected before they come
      for (int box = lane; box < boxes; box += 32) {
        int n = 0, h = 0, w = first_slot + box * plan.box_slots;
        if (!plan.dense_slots) {
          locate_slot(of, plan, tile, image, box * plan.pitch, n, h, w);
          n += static_cast<int>(image);
        }
        if (PHASES) {
          h = 2 * h + row_phase;
          w = 2 * w + column_phase;
        }
        hopper::load_box(params.in_map, stage + box * box_bytes, channel, w, h, n, shared.x_full(at.slot()));
      }
      at.next(plan.x_stages);
    }
  }
}

// All pixels of the channels of a stage, of each image that a tile has pixels of, as they lie in memory. By one warp:
// each lane orders copies of some images. The four channels of a piece are eight apart, and weights are packed
// likewise: 8 planes of an odd number of pixels lie 8 or 24 banks apart, so that lanes meet in a bank at the seams of
// images only.
//
//   memory, of an image:   | channel 0: 49 words | channel 1 | ... | channel 31 | channel 32 | ...
//                          +------------- a stage: one bulk copy --------------+
//   a stage of 128 pixels: | image n, the last 20 of use | image n + 1 | image n + 2 | image n + 3, the first 10 |
//   piece i of it:         channels i, i + 8, i + 16, i + 24
template <typename Format>
__device__ __forceinline__ void load_images(const Params& params, const Shared& shared) {
  using Stored = typename Format::Stored;
  const Phased& of = params.of;
  const Plan& plan = params.plan;
  const int lane = threadIdx.x % 32, image_bytes = plan.image_words * static_cast<int>(sizeof(float));
  PackedRingPosition at;
  for (int unit = blockIdx.x; unit < plan.units; unit += gridDim.x) {
    const Tile tile = locate_tile(plan, unit);
    const int64_t image = first_image(plan, tile), last = divide(tile.first + tile_pixels(plan) - 1, plan.by.plane);
    const int images = static_cast<int>((last < of.N ? last + 1 : of.N) - image);
    const Stored* from = static_cast<const Stored*>(params.in_ptr) + (image + lane) * of.in_stride[0] +
                         (static_cast<int64_t>(tile.group) * plan.blocks_c + tile.first_block) * plan.image_words;
    for (int block = 0; block < tile.blocks; ++block) {
      const uint32_t stage = shared.base + shared.layout.x_ring + at.slot() * plan.x_stage_bytes;
      const uint32_t full = shared.x_full(at.slot());
      hopper::barrier_wait(shared.x_empty(at.slot()), at.parity() ^ 1);
      if (lane == 0) hopper::barrier_arrive_expecting(full, images * image_bytes);
      __syncwarp();  // bytes are expected before they come
      if (lane < images) hopper::bulk_load(stage + lane * image_bytes, from, image_bytes, full);
      from += plan.image_words;
      at.next(plan.x_stages);
    }
  }
}

// PIXELS: of a tile.
template <typename Format, Loads LOADS, int PIXELS>
__device__ __forceinline__ void gather_stages(const Params& params, const Shared& shared, int32_t* tables) {
  if constexpr (sizeof(typename Format::Stored) == 4 || LOADS == Loads::kChannels)
    copy_stages<Format, LOADS, PIXELS>(params, shared, tables);
  else
    convert_stages<Format, LOADS>(params, shared, tables);
}

// -- Multiply, and store --

template <int TILE_N, int BLOCKS_M>
using Sums = float[BLOCKS_M][TILE_N / 2];

// Four neighbours in memory, aligned as a whole.
template <typename Stored>
__device__ __forceinline__ void store_four(Stored* to, const Stored (&values)[4]) {
  if constexpr (sizeof(Stored) == 4) {
    *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(values[0].bits | static_cast<uint32_t>(values[1].bits) << 16,
                                               values[2].bits | static_cast<uint32_t>(values[3].bits) << 16);
  }
}

template <int NUMBER>
struct Number {
  static constexpr int value = NUMBER;
};

// Does something with the sums that a thread has of a chunk, 64 pixels x 32 channels: number so many of its
// warpgroup's. One jump selects the chunk, so that the code that stores it exists once: a kernel that starts reads its
// code from memory, after others have run (docs/lab/gather.md).
template <int TILE_N, int BLOCKS_M, typename Use>
__device__ __forceinline__ void with_chunk(const Sums<TILE_N, BLOCKS_M>& acc, int number, const Use& use) {
  constexpr int kChunks = TILE_N / kStagedChannels;
  const auto chunk = [&](auto i) {
    constexpr int kNumber = decltype(i)::value;
    if constexpr (kNumber < BLOCKS_M * kChunks) use(&acc[kNumber / kChunks][kNumber % kChunks * (kStagedChannels / 2)]);
  };
  switch (number) {
    case 0:
      return chunk(Number<0>{});
    case 1:
      return chunk(Number<1>{});
    case 2:
      return chunk(Number<2>{});
    case 3:
      return chunk(Number<3>{});
    case 4:
      return chunk(Number<4>{});
    case 5:
      return chunk(Number<5>{});
    case 6:
      return chunk(Number<6>{});
    case 7:
      return chunk(Number<7>{});
  }
}

// Stores COUNT staged channels, every DISTANCE-th from channel k on and `step` apart in memory, VECTOR pixels of each.
// All of it is loaded before any is stored: the compiler cannot know that a store changes neither the rest nor the
// bias, and had every load wait for the store before it (docs/lab/gather.md).
template <int COUNT, int DISTANCE, int VECTOR, typename Bias, typename Tensor>
__device__ __forceinline__ void store_staged(const float* staged, const Bias* bias, int k, int channels, bool exists,
                                             Tensor*& to, int64_t step) {
  float sums[COUNT][VECTOR];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const float* const from = staged + i * DISTANCE * kPixelsPitch;
    if constexpr (VECTOR == 4)
      *reinterpret_cast<float4*>(sums[i]) = *reinterpret_cast<const float4*>(from);
    else
      sums[i][0] = *from;
  }
  if (bias != nullptr) {
    float added[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) added[i] = k + i * DISTANCE < channels ? widen(bias[k + i * DISTANCE]) : 0.0f;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
      for (float& sum : sums[i]) sum += added[i];
    }
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    Tensor narrowed[VECTOR];
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) narrow(sums[i][e], narrowed[e]);
    if (exists && k + i * DISTANCE < channels) {
      if constexpr (VECTOR == 4)
        store_four(to, narrowed);
      else
        *to = narrowed[0];
    }
    to += step;
  }
}

// The chunks of 32 channels of a tile that a block stores: all, or its share where the others of a cluster have the
// rest.
struct Share {
  int first, end;

  __device__ __forceinline__ bool has(int chunk) const { return first <= chunk && chunk < end; }
};

// 64 pixels x 32 channels at a time through staging. Of planes the bias is staged as well, of all channels before any
// is stored, as memory is busy with stores later: not with one warpgroup, nor by boxes, which are slower for it
// (docs/lab/gather.md).
template <typename Format, int TILE_N, int BLOCKS_M, int WARPGROUPS>
__device__ __forceinline__ void store_tile(const Params& params, const Tile& tile, int64_t image, float* staging,
                                           int warpgroup, const Share& share, const Sums<TILE_N, BLOCKS_M>& acc) {
  using Tensor = typename Format::Tensor;
  const Phased& of = params.of;
  const Plan& plan = params.plan;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int first_k = tile.n_block * TILE_N;
  const int channels = min(TILE_N, of.out_channels - first_k);
  const int64_t channel_of_all = static_cast<int64_t>(tile.group) * of.out_channels + first_k;
  Tensor* const out =
      static_cast<Tensor*>(params.out_ptr) + image * of.out_stride[0] + channel_of_all * of.out_stride[1];
  const Tensor* const bias =
      params.bias_ptr == nullptr ? nullptr : static_cast<const Tensor*>(params.bias_ptr) + channel_of_all;
  const bool channels_last = plan.out_channels_last, fours = plan.vector == 4;
  const auto added = [&](int channel) { return bias == nullptr || channel >= channels ? 0.0f : widen(bias[channel]); };
  static_assert(kStagedChannels * kPixelsPitch + TILE_N <= kStagingBytes / 4, "room for the bias");
  const auto bias_of_planes = [&] {
    if constexpr (WARPGROUPS == 1) {
      return bias;
    } else {
      float* const staged_bias = bias == nullptr ? nullptr : staging + kStagedChannels * kPixelsPitch;
      if (staged_bias != nullptr && !channels_last) {
        // All of it is there behind the barrier of the first chunk. Behind the tile before it all have read theirs.
#pragma unroll
        for (int k = thread; k < TILE_N; k += 128) staged_bias[k] = added(k);
      }
      return static_cast<const float*>(staged_bias);
    }
  }();

#pragma unroll 1
  for (int mb = 0; mb < BLOCKS_M; ++mb) {
    const int first_m = (warpgroup * BLOCKS_M + mb) * 64;
    // The pixels that this thread stores: one (or four neighbours), or with channels as neighbours four 16 apart.
    int32_t offset[4];
    int first_channel;
    if (channels_last)
      first_channel = thread % 8 * 4;
    else
      first_channel = fours ? thread / 16 : thread / 64;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = channels_last ? thread / 8 + 16 * i : fours ? thread % 16 * 4 : thread % 64;
      offset[i] = -1;
      if (i > 0 && !channels_last) continue;
      int n, p, q;
      if (locate_output(of, plan, tile, image, first_m + m, n, p, q))
        offset[i] = static_cast<int32_t>(n * of.out_stride[0] + p * of.out_stride[2] + q * of.out_stride[3]);
    }
    // Unless channels are neighbours.
    Tensor* to = out + offset[0] + (share.first * kStagedChannels + first_channel) * of.out_stride[1];
    const int64_t step = (fours ? 8 : 2) * of.out_stride[1];
#pragma unroll 1
    for (int chunk = share.first; chunk < share.end; ++chunk) {
      if (mb + chunk > 0) named_barrier(kWarpgroupBarrier + warpgroup, 128);  // what was staged before has been read
      const int pixel = warp * 16 + lane / 4, channel = lane % 4 * 2;
      with_chunk<TILE_N, BLOCKS_M>(acc, mb * (TILE_N / kStagedChannels) + chunk, [&](const float* values) {
        if (channels_last) {
          float* staged = staging + pixel * kChannelsPitch + channel;
#pragma unroll
          for (int j = 0; j < kStagedChannels / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
              *reinterpret_cast<float2*>(staged + 8 * i * kChannelsPitch + 8 * j) =
                  make_float2(values[4 * j + 2 * i], values[4 * j + 2 * i + 1]);
          }
        } else {
          float* staged = staging + channel * kPixelsPitch + pixel;
#pragma unroll
          for (int j = 0; j < kStagedChannels / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) staged[(8 * j + e % 2) * kPixelsPitch + e / 2 * 8] = values[4 * j + e];
          }
        }
      });
      named_barrier(kWarpgroupBarrier + warpgroup, 128);  // all of it is staged
      const int chunk_k = chunk * kStagedChannels;
      if (channels_last) {
        const float* staged = staging + thread / 8 * kChannelsPitch + first_channel;
        const int k = chunk_k + first_channel;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 four = *reinterpret_cast<const float4*>(staged + 16 * i * kChannelsPitch);
          const float sums[4] = {four.x, four.y, four.z, four.w};
          Tensor narrowed[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) narrow(sums[e] + added(k + e), narrowed[e]);
          if (offset[i] < 0) continue;
          if (fours) {
            if (k < channels) store_four(out + offset[i] + k, narrowed);
          } else {
#pragma unroll
            for (int e = 0; e < 4; ++e)
              if (k + e < channels) out[offset[i] + k + e] = narrowed[e];
          }
        }
      } else if (fours) {
        store_staged<4, 8, 4>(staging + first_channel * kPixelsPitch + thread % 16 * 4, bias_of_planes,
                              chunk_k + first_channel, channels, offset[0] >= 0, to, step);
      } else {
#pragma unroll 1
        for (int first = first_channel; first < kStagedChannels; first += 16)
          store_staged<8, 2, 1>(staging + first * kPixelsPitch + thread % 64, bias_of_planes, chunk_k + first, channels,
                                offset[0] >= 0, to, step);
      }
    }
  }
}

// The channels of a tile of y, for a warp that stores them by boxes.
template <int TILE_N>
struct BoxChannels {
  int count, first;   // of all groups
  const float* bias;  // of the first one, or null

  __device__ __forceinline__ BoxChannels(const Params& params, const Tile& tile) {
    const int first_k = tile.n_block * TILE_N;
    count = min(TILE_N, params.of.out_channels - first_k);
    first = tile.group * params.of.out_channels + first_k;
    bias = params.bias_ptr == nullptr ? nullptr : static_cast<const float*>(params.bias_ptr) + first;
  }
};

// The 16 outputs of a tile, from number m on, that a warp stores by a box: neighbours in memory.
struct BoxPixels {
  bool exist;
  int image, first;  // image, counted from the tile's first one, and pixel in there

  __device__ __forceinline__ BoxPixels(const Params& params, const Tile& tile, int64_t of_image, int m) {
    const Phased& of = params.of;
    const Plan& plan = params.plan;
    if (plan.points || plan.packed) {
      const int plane = of.P * of.Q, in_images = static_cast<int>(first_output(plan, tile) - of_image * plane) + m;
      image = quotient(in_images, plan.by.plane);
      first = in_images - image * plane;
      exist = true;  // boxes end where y does
    } else {
      int p, q;
      exist = locate_output(of, plan, tile, of_image, m, image, p, q);
      first = p * of.Q + q;
    }
  }
};

// The same by boxes: fp32, channels are neighbours, and so are the pixels of a tile. Each warp stages and stores its
// own 16 of 64 pixels, and waits for no other one.
template <int TILE_N, int BLOCKS_M, int BUFFERS>
__device__ __forceinline__ void store_boxes(const Params& params, const Tile& tile, int64_t image, uint8_t* staging,
                                            int warpgroup, const Share& share, const Sums<TILE_N, BLOCKS_M>& acc) {
  const Phased& of = params.of;
  const int warp = hopper::uniform(threadIdx.x % 128 / 32), lane = threadIdx.x % 32;
  const BoxChannels<TILE_N> of_tile(params, tile);
  const int channels = of_tile.count, channel_of_all = of_tile.first;
  const float* const bias = of_tile.bias;
  constexpr int kChunks = TILE_N / kStagedChannels;
  static_assert(BLOCKS_M * kChunks % BUFFERS == 0, "the first chunk goes to the first buffer");
  staging += warp * BUFFERS * kBoxStagingBytes;
  // Piece number i of 16 bytes of a pixel lies at place i ^ pixel % 8.
  const int pixel = lane / 4, channel = lane % 4 * 2;
#pragma unroll
  for (int mb = 0; mb < BLOCKS_M; ++mb) {
    const BoxPixels pixels(params, tile, image, (warpgroup * BLOCKS_M + mb) * 64 + warp * 16);
    const int first = (static_cast<int>(image) + pixels.image) * of.P * of.Q + pixels.first;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int number = mb * kChunks + chunk, chunk_k = chunk * kStagedChannels;
      if (!share.has(chunk)) {
        if (lane == 0) hopper::bulk_stores_commit();  // buffers take turns
        continue;
      }
      uint8_t* const staged = staging + number % BUFFERS * kBoxStagingBytes;
      float added[kStagedChannels / 8][2] = {};
      if (bias != nullptr) {
#pragma unroll
        for (int j = 0; j < kStagedChannels / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int k = chunk_k + 8 * j + channel + e;
            if (k < channels) added[j][e] = bias[k];
          }
        }
      }
      if (lane == 0) hopper::bulk_stores_wait_read<BUFFERS - 1>();
      __syncwarp();  // the buffer has been read
      with_chunk<TILE_N, BLOCKS_M>(acc, number, [&](const float* values) {
#pragma unroll
        for (int j = 0; j < kStagedChannels / 8; ++j) {
          uint8_t* const to = staged + pixel * 128 + ((2 * j + channel / 4) ^ pixel) * 16 + channel % 4 * 4;
#pragma unroll
          for (int i = 0; i < 2; ++i)
            *reinterpret_cast<float2*>(to + 8 * i * 128) =
                make_float2(values[4 * j + 2 * i] + added[j][0], values[4 * j + 2 * i + 1] + added[j][1]);
        }
      });
      hopper::fence_async();
      __syncwarp();  // all of it is staged
      if (lane == 0) {
        if (pixels.exist && chunk_k < channels)
          hopper::store_box(params.out_map, staged, channel_of_all + chunk_k, first, 0, 0);
        hopper::bulk_stores_commit();
      }
    }
  }
}

// The same of [channel][pixel]. What lies behind the end of an image is the next one's, and stored without a box: boxes
// that started before the image's first pixel were illegal instructions.
template <int TILE_N, int BLOCKS_M, int BUFFERS>
__device__ __forceinline__ void store_plane_boxes(const Params& params, const Tile& tile, int64_t image,
                                                  uint8_t* staging, int warpgroup, const Share& share,
                                                  const Sums<TILE_N, BLOCKS_M>& acc) {
  const Phased& of = params.of;
  const int warp = hopper::uniform(threadIdx.x % 128 / 32), lane = threadIdx.x % 32, plane = of.P * of.Q;
  const BoxChannels<TILE_N> of_tile(params, tile);
  const int channels = of_tile.count, channel_of_all = of_tile.first;
  const float* const bias = of_tile.bias;
  constexpr int kChunks = TILE_N / kStagedChannels;
  static_assert(BLOCKS_M * kChunks % BUFFERS == 0, "the first chunk goes to the first buffer");
  staging += warp * BUFFERS * kBoxStagingBytes;
  // Piece number i, four pixels, of a channel lies at place i ^ channel / 2 % 4:
  //
  //   channels 0, 1   pixels  0.. 3   4.. 7   8..11  12..15
  //            2, 3           4.. 7   0.. 3  12..15   8..11
  //            4, 5           8..11  12..15   0.. 3   4.. 7
  //            6, 7          12..15   8..11   4.. 7   0.. 3   and so on
  //
  // A lane has pixel lane / 4 and the one 8 behind it, of two channels of each of four such groups of eight. Of these
  // two each half of the lanes stages another one first, against bank conflicts.
  const int channel = lane % 4 * 2, half = lane / 16;
  const int place = (channel + half) * 16 + lane / 4 % 4, to_other = half == 0 ? 16 : -16;
#pragma unroll 1
  for (int mb = 0; mb < BLOCKS_M; ++mb) {
    const BoxPixels pixels(params, tile, image, (warpgroup * BLOCKS_M + mb) * 64 + warp * 16);
    const int first = pixels.first, image_of_all = static_cast<int>(image) + pixels.image;
    // The next image's first pixel, if the warp has some of these, in the lane's channel.
    float* next_image = nullptr;
    if (pixels.exist && first + 16 > plane && image_of_all + 1 < of.N)
      next_image = static_cast<float*>(params.out_ptr) + (image_of_all + int64_t{1}) * of.out_stride[0] +
                   (channel_of_all + lane) * of.out_stride[1];
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int number = mb * kChunks + chunk, chunk_k = chunk * kStagedChannels;
      if (!share.has(chunk)) {
        if (lane == 0) hopper::bulk_stores_commit();  // buffers take turns
        continue;
      }
      uint8_t* const box = staging + number % BUFFERS * kBoxStagingBytes;
      float* const staged = reinterpret_cast<float*>(box) + place;
      if (lane == 0) hopper::bulk_stores_wait_read<BUFFERS - 1>();
      __syncwarp();  // the planes that were in the buffer have been read
      with_chunk<TILE_N, BLOCKS_M>(acc, number, [&](const float* values) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float* const to = staged + ((half + 2 * i) ^ lane % 4) * 4;
#pragma unroll
          for (int j = 0; j < kStagedChannels / 8; ++j) {
            const float even = values[4 * j + 2 * i], odd = values[4 * j + 2 * i + 1];
            to[8 * j * 16] = half == 0 ? even : odd;
            to[8 * j * 16 + to_other] = half == 0 ? odd : even;
          }
        }
      });
      if (bias != nullptr) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float* const to = staged + ((half + 2 * i) ^ lane % 4) * 4;
#pragma unroll
          for (int j = 0; j < kStagedChannels / 8; ++j) {
            const int k = chunk_k + 8 * j + channel;
            if (k + half < channels) to[8 * j * 16] += bias[k + half];
            if (k + 1 - half < channels) to[8 * j * 16 + to_other] += bias[k + 1 - half];
          }
        }
      }
      hopper::fence_async();
      __syncwarp();  // all planes are staged
      if (lane == 0) {
        if (pixels.exist && chunk_k < channels)
          hopper::store_box<false>(params.out_map, box, first, channel_of_all + chunk_k, image_of_all, 0);
        hopper::bulk_stores_commit();
      }
      if (next_image != nullptr && chunk_k + lane < channels) {
        const float4* const pieces = reinterpret_cast<const float4*>(box) + lane * 4;
        float4* to = reinterpret_cast<float4*>(next_image + chunk_k * of.out_stride[1]);
        for (int piece = (plane - first) / 4; piece < 4; ++piece) *to++ = pieces[piece ^ lane / 2 % 4];
      }
    }
  }
}

// The places of a warpgroup in the rings.
struct Rings {
  PackedRingPosition x, w;
};

// Where the operands of a thread start in a stage of x, of each 64 pixels. Of images, at whose seams the next pixel
// lies further away, of the first 8 of a warp's 16 pixels and of the others.
template <int BLOCKS_M, Source SOURCE>
using XOffsets = uint32_t[BLOCKS_M][SOURCE == Source::kImages ? 2 : 1];

// All of a tile. PLANES: a stage of x is [channel][slot], as in memory; a plane takes the slots of the tile and 8 more,
// or, of images, its pixels.
//
// A stage of weights is a batch of wgmmas, or two: while the tensor cores work on one, the operands of the next one are
// loaded, into the other set of registers.
template <typename Format, int TILE_N, int BLOCKS_M, int PIECES, int WARPGROUPS, Source SOURCE, bool PLANES>
__device__ __forceinline__ void multiply_tile(const Params& params, const Shared& shared, const Tile& tile,
                                              Rings& rings, const XOffsets<BLOCKS_M, SOURCE>& x_offset,
                                              Sums<TILE_N, BLOCKS_M>& acc) {
  using Operand = typename Format::Stored;
  const Phased& of = params.of;
  const Plan& plan = params.plan;
  const int lane = threadIdx.x % 32;
  constexpr int ALL_STEPS = PIECES / kStepPieces;
  constexpr int BATCHES = ALL_STEPS * BLOCKS_M > 4 ? 2 : 1, STEPS = ALL_STEPS / BATCHES;
  constexpr uint32_t kPlaneBytes = (64 * WARPGROUPS * BLOCKS_M + 8) * 4;
  [[maybe_unused]] const uint32_t plane_bytes = plan.plane_slots * 4;  // of images
  constexpr uint32_t kStepWeights = 2 * TILE_N * 16, kStageWeights = ALL_STEPS * kStepWeights;
  // Else pieces are found by x_offset, a slot: [slot][piece], number i at place i ^ slot % 8, or [piece][slot].
  constexpr bool kTaps = SOURCE == Source::kTaps;
  constexpr bool kRows = SOURCE == Source::kBoxes || SOURCE == Source::kPhases || kTaps || SOURCE == Source::kChannels;
  const bool rows = PIECES == 8 && (kRows || (SOURCE == Source::kAny && plan.rows));
  const uint32_t piece_bytes = plan.piece_slots * 16;
  // From tap to tap of a row, and from the last one of a row to the first one of the next.
  const int next_tap = of.dilation_w;
  int row_taps = of.S, next_row = of.dilation_h * plan.pitch - (of.S - 1) * of.dilation_w;
  const Phases& phases = of.phases;
  const bool phased = SOURCE == Source::kPhases || (Format::CONTAINED && phases_of(phases) > 1);
  int taps = PLANES || kTaps ? 1 : of.R * of.S, phase = phased ? tile.first_block & (phases_of(phases) - 1) : 0;
  constexpr bool kMayBox = sizeof(typename Format::Tensor) == 2 && PIECES == 8;
  const bool w_in_boxes = kMayBox && plan.w_in_boxes;
  const uint32_t w_ring = hopper::descriptor(hopper::of_own_block(shared.base) + shared.layout.w_ring, TILE_N * 16);
  const uint32_t w_high = w_in_boxes ? hopper::kRowsDescriptorHigh : hopper::kDescriptorHigh;
  const uint32_t w_step = w_in_boxes ? 2 : kStepWeights / 16;
  uint32_t a[2][STEPS][BLOCKS_M][4];  // operands
  hopper::wgmma_start(acc);
  int keep = 0, taps_left = 0, s_left = of.S, left = tile.blocks * taps, before = -1;
  if (phased || kTaps)
    left = stages_before(phases, tile.first_block + tile.blocks) - stages_before(phases, tile.first_block);
  uint32_t x_stage = 0, shift = 0;  // of the tap, in slots

  // One stage; `set` is known to the compiler.
  const auto stage = [&](int set) {
    if (taps_left == 0) {
      shift = 0;
      if (phased) {
        const int row_phase = phase >> (phases.columns - 1), column_phase = phase & (phases.columns - 1);
        shift = phases.first_r[row_phase] * plan.pitch + phases.first_s[column_phase];
        row_taps = phases.s[column_phase];
        taps = phases.r[row_phase] * row_taps;
        next_row = of.dilation_h * plan.pitch - (row_taps - 1) * of.dilation_w;
        if (++phase == phases_of(phases)) phase = 0;
      }
      taps_left = taps;
      s_left = row_taps;
      x_stage = shared.base + shared.layout.x_ring + rings.x.slot() * plan.x_stage_bytes;
      hopper::barrier_wait(shared.x_full(rings.x.slot()), rings.x.parity());
    }
    const uint32_t w_from = w_ring + rings.w.slot() * (kStageWeights / 16);
#pragma unroll
    for (int batch = 0; batch < BATCHES; ++batch) {
      uint32_t (&operands)[STEPS][BLOCKS_M][4] = a[BATCHES == 1 ? set : batch];
#pragma unroll
      for (int j = 0; j < STEPS; ++j) {
#pragma unroll
        for (int mb = 0; mb < BLOCKS_M; ++mb) {
          const int pair = batch * STEPS + j;  // of pieces
          if constexpr (PLANES) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              uint32_t from;
              if constexpr (SOURCE == Source::kImages)
                from = x_offset[mb][e % 2] + (2 * pair + e / 2) * plane_bytes;
              else
                from = x_offset[mb][0] + e % 2 * 8 * 4 + (8 * pair + e / 2 * 4) * kPlaneBytes;
              hopper::load_shared(operands[j][mb][e], x_stage + from);
            }
          } else {
            const uint32_t slot = x_offset[mb][0] + shift;
            const uint32_t of_rows = (x_stage + slot * 128 + (slot % 8 ^ lane / 16) * 16) ^ 2 * pair * 16;
            hopper::load_matrix(operands[j][mb],
                                rows ? of_rows : x_stage + slot * 16 + (lane / 16 + 2 * pair) * piece_bytes);
          }
        }
      }
      if constexpr (sizeof(Operand) == 4) {
        // Each instruction for an operand counts; planes lack the registers to have one less (docs/lab/gather.md).
#pragma unroll
        for (int j = 0; j < STEPS; ++j) {
#pragma unroll
          for (int mb = 0; mb < BLOCKS_M; ++mb) {
#pragma unroll
            for (uint32_t& operand : operands[j][mb])
              operand = PLANES ? float_bits(round_to_tf32(bits_float(operand))) : tf32_operand(operand);
          }
        }
      }
      if (batch == 0) hopper::barrier_wait(shared.w_full(rings.w.slot()), rings.w.parity());
      hopper::wgmma_fence();
#pragma unroll
      for (int j = 0; j < STEPS; ++j) {
#pragma unroll
        for (int mb = 0; mb < BLOCKS_M; ++mb)
          hopper::WgmmaRegisters<Operand, TILE_N>::multiply(acc[mb], operands[j][mb],
                                                            w_from + (batch * STEPS + j) * w_step, keep, w_high);
        keep = 1;
      }
      hopper::wgmma_commit();
      hopper::wgmma_wait<1>();
      // The batch before this one has been multiplied.
      if (batch == 0 && before >= 0 && lane == 0) hopper::barrier_arrive(shared.w_empty(before));
    }
    before = rings.w.slot();
    rings.w.next(plan.w_stages);
    --left;
    if (--taps_left == 0) {
      // The stage of x is in registers, says each lane for itself. Behind a wgmma one could speak for its warp: the
      // compiler knows, and drops a __syncwarp; but racecheck sees races then.
      hopper::barrier_arrive(shared.x_empty(rings.x.slot()));
      rings.x.next(plan.x_stages);
      return;
    }
    const bool row_ends = --s_left == 0;
    shift += row_ends ? next_row : next_tap;
    s_left = row_ends ? row_taps : s_left;
  };
  while (true) {
    stage(0);
    if (left == 0) break;
    stage(1);
    if (left == 0) break;
  }
  hopper::wgmma_wait<0>();
  if (lane == 0) hopper::barrier_arrive(shared.w_empty(before));
#pragma unroll
  for (int mb = 0; mb < BLOCKS_M; ++mb) hopper::wgmma_settle(acc[mb]);
}

// Sums of contained operands, times what undoes the scales.
template <int TILE_N, int BLOCKS_M>
__device__ __forceinline__ void undo_scales(const Params& params, const Tile& tile, int x_exponent,
                                            Sums<TILE_N, BLOCKS_M>& acc) {
  const int64_t row = (static_cast<int64_t>(tile.group) * params.plan.tiles_n + tile.n_block) * TILE_N;
  const float2* const w_factors = reinterpret_cast<const float2*>(params.guard.w_factors + row) + threadIdx.x % 4;
  const float x_factor = power_of_two(-x_exponent);
#pragma unroll
  for (int j = 0; j < TILE_N / 8; ++j) {
    const float2 factors = w_factors[4 * j];
#pragma unroll
    for (int mb = 0; mb < BLOCKS_M; ++mb) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        acc[mb][4 * j + 2 * i] *= factors.x * x_factor;
        acc[mb][4 * j + 2 * i + 1] *= factors.y * x_factor;
      }
    }
  }
}

// Leaves the sums of a block, those of a part of the reduction, in shared memory, where its rings were, and adds up
// those of all blocks of the cluster, in their order, for its share of the channels of the tile.
//
//   block          0           1           2           3      ...  131
//   first turn     tile 0      tile 1      tile 2      tile 3      tile 131
//   last turn      tile 132    tile 132    tile 133    tile 133
//                  part 0      part 1      part 0      part 1
template <int TILE_N, int BLOCKS_M, int WARPGROUPS, bool CONTAINED>
__device__ __forceinline__ Share meet(const Params& params, const Shared& shared, uint8_t* smem, const Tile& tile,
                                      int warpgroup, Sums<TILE_N, BLOCKS_M>& acc) {
  const Plan& plan = params.plan;
  constexpr int kFours = TILE_N / 8, kChunks = TILE_N / kStagedChannels, kDistance = WARPGROUPS * 128;
  const int splits = plan.splits, rank = part_of_tile(plan, tile.part);
  const Share own{rank * kChunks / splits, (rank + 1) * kChunks / splits};
  float4* const left = reinterpret_cast<float4*>(smem + shared.layout.x_ring) + warpgroup * 128 + threadIdx.x % 128;
  named_barrier(kMultiplyBarrier, 128 * WARPGROUPS);  // nobody reads the rings any more
#pragma unroll
  for (int mb = 0; mb < BLOCKS_M; ++mb) {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      float* const sums = &acc[mb][4 * i];
      left[(mb * kFours + i) * kDistance] = make_float4(sums[0], sums[1], sums[2], sums[3]);
      sums[0] = sums[1] = sums[2] = sums[3] = 0;
    }
  }
  hopper::cluster_sync();  // the sums of all blocks are there
  const uint32_t from = hopper::smem_address(left);
  // Sums of several parts are loaded before any of them is added up, in their order: each load takes a while. Kernels
  // of contained operands are slower for the code, and where one or three warpgroups multiply registers are fewer.
  constexpr int kFew = TILE_N == 256 || BLOCKS_M > 1 ? 1 : 2;
  constexpr int kAtOnce = CONTAINED ? 1 : WARPGROUPS == 2 ? 2 * kFew : kFew;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (!own.has(chunk)) continue;
#pragma unroll 1
    for (int first = 0; first < splits; first += kAtOnce) {
      float4 fours[kAtOnce][BLOCKS_M][4];
#pragma unroll
      for (int part = 0; part < kAtOnce; ++part) {
        if (first + part >= splits) continue;
#pragma unroll
        for (int mb = 0; mb < BLOCKS_M; ++mb) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            fours[part][mb][i] =
                hopper::load_cluster_4(from + (mb * kFours + 4 * chunk + i) * kDistance * 16, first + part);
        }
      }
#pragma unroll
      for (int part = 0; part < kAtOnce; ++part) {
        if (first + part >= splits) continue;
#pragma unroll
        for (int mb = 0; mb < BLOCKS_M; ++mb) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float* const sums = &acc[mb][4 * (4 * chunk + i)];
            sums[0] += fours[part][mb][i].x;
            sums[1] += fours[part][mb][i].y;
            sums[2] += fours[part][mb][i].z;
            sums[3] += fours[part][mb][i].w;
          }
        }
      }
    }
  }
  return own;
}

template <typename Format, int TILE_N, int BLOCKS_M, int PIECES, int WARPGROUPS, Source SOURCE>
__device__ __forceinline__ void multiply(const Params& params, const Shared& shared, uint8_t* smem) {
  constexpr bool kPlanes = sizeof(typename Format::Stored) == 4 && PIECES >= kLeastPointPieces &&
                           SOURCE != Source::kBoxes && SOURCE != Source::kPhases && SOURCE != Source::kTaps &&
                           SOURCE != Source::kChannels;
  constexpr bool kImages = SOURCE == Source::kImages, kNothingElse = kPlanes && (SOURCE == Source::kPixels || kImages);
  const Phased& of = params.of;
  const Plan& plan = params.plan;
  const int warpgroup = WARPGROUPS == 1 ? 0 : hopper::uniform(threadIdx.x / 128);
  const int warp = hopper::uniform(threadIdx.x % 128 / 32), lane = threadIdx.x % 32;
  const bool planes = kNothingElse || (kPlanes && plan.planes);
  [[maybe_unused]] int x_exponent = 0;
  [[maybe_unused]] bool waits = true;
  if (plan.boxes && threadIdx.x == 0) hopper::prefetch_map(params.out_map);
  Rings rings;
  for (int unit = blockIdx.x; unit < plan.units; unit += gridDim.x) {
    const Tile tile = locate_tile(plan, unit);
    const int64_t image = first_image(plan, tile);
    XOffsets<BLOCKS_M, SOURCE> x_offset;
#pragma unroll
    for (int mb = 0; mb < BLOCKS_M; ++mb) {
      const int m = (warpgroup * BLOCKS_M + mb) * 64 + warp * 16;
      if constexpr (kImages) {
        // A lane multiplies one channel of each piece: number lane % 4, the next one PIECES further (PackParams).
#pragma unroll
        for (int half = 0; half < 2; ++half)
          x_offset[mb][half] =
              (word_of_point(plan, tile, image, m + lane / 4 + 8 * half) + lane % 4 * PIECES * plan.plane_slots) * 4;
      } else if (planes) {
        x_offset[mb][0] = (m + lane / 4 + lane % 4 * plan.plane_slots) * 4;
      } else {
        x_offset[mb][0] = slot_of_output(of, plan, tile, image, m + lane % 16);
      }
    }
    if constexpr (Format::CONTAINED) {
      if (waits && !wait_for_operands<Format>(params, &x_exponent)) return;
      waits = false;
    }
    Sums<TILE_N, BLOCKS_M> acc;
    if (plan.resident) rings.w = {};  // the first stages have come, for good
    if (planes) {
      if constexpr (kPlanes)
        multiply_tile<Format, TILE_N, BLOCKS_M, PIECES, WARPGROUPS, SOURCE, true>(params, shared, tile, rings, x_offset,
                                                                                  acc);
    } else {
      if constexpr (!kNothingElse)
        multiply_tile<Format, TILE_N, BLOCKS_M, PIECES, WARPGROUPS, SOURCE, false>(params, shared, tile, rings,
                                                                                   x_offset, acc);
    }
    if constexpr (Format::CONTAINED) undo_scales<TILE_N, BLOCKS_M>(params, tile, x_exponent, acc);
    uint8_t* const staging = smem + shared.layout.staging + warpgroup * staging_bytes(plan);
    Share share{0, TILE_N / kStagedChannels};
    if constexpr (may_cut_up<Format>(TILE_N, BLOCKS_M, SOURCE)) {
      if (tile.part >= 0)
        share = meet<TILE_N, BLOCKS_M, WARPGROUPS, Format::CONTAINED>(params, shared, smem, tile, warpgroup, acc);
    }
    if (plan.boxes) {
      if constexpr (sizeof(typename Format::Tensor) == 4) {
        constexpr int kBuffers = box_buffers(SOURCE == Source::kPhases);
        if (plan.out_channels_last)
          store_boxes<TILE_N, BLOCKS_M, kBuffers>(params, tile, image, staging, warpgroup, share, acc);
        else
          store_plane_boxes<TILE_N, BLOCKS_M, kBuffers>(params, tile, image, staging, warpgroup, share, acc);
      }
    } else {
      float* const staged = reinterpret_cast<float*>(staging);
      store_tile<Format, TILE_N, BLOCKS_M, WARPGROUPS>(params, tile, image, staged, warpgroup, share, acc);
      named_barrier(kWarpgroupBarrier + warpgroup, 128);  // the next tile's staging does not overtake this one's
    }
  }
  if (plan.boxes && threadIdx.x % 32 == 0) hopper::bulk_stores_wait_read<0>();  // before the shared memory goes
  if constexpr (may_cut_up<Format>(TILE_N, BLOCKS_M, SOURCE)) {
    if (plan.splits > 1) hopper::cluster_leave();  // nobody reads this block's sums any more
  }
}

// -- Landing: x contained on its way --

struct LandingShared {
  uint32_t base;
  LandingLayout layout;

  // `full`: of boxes and of weights the copy engine says so, of windows the warps that contain them. `empty`: those who
  // have read it, the warps that contain, or each warp that multiplies, once its wgmmas are done; of weights that went
  // through registers once they have been issued.
  __device__ __forceinline__ uint32_t landed_full(int i) const { return base + 8 * i; }
  __device__ __forceinline__ uint32_t landed_empty(int i) const { return base + 8 * (4 + i); }
  __device__ __forceinline__ uint32_t x_full(int i) const { return base + 8 * (8 + i); }
  __device__ __forceinline__ uint32_t x_empty(int i) const { return base + 8 * (12 + i); }
  __device__ __forceinline__ uint32_t w_full(int i) const { return base + 8 * (16 + i); }
  __device__ __forceinline__ uint32_t w_empty(int i) const { return base + 8 * (32 + i); }
  // A warp of the other warpgroup has had its staged sums read there.
  __device__ __forceinline__ uint32_t staged_empty(int warpgroup, int warp) const {
    return base + 8 * (48 + 4 * warpgroup + warp);
  }
};
static_assert(56 * 8 <= kBarrierBytes && kLandedBoxes <= 4 && kLandingWindows <= 4 && kMostLandingRows <= 16,
              "room for all barriers");

// False: some weight does not fit, or x has no scale, and all is done again. What does not fit of x is found here.
__device__ __forceinline__ bool wait_for_scales(const Params& params, int* x_exponent = nullptr) {
  hopper::wait_for_prerequisites();
  const volatile ContainedControl* const control = params.guard.control;
  if (x_exponent != nullptr) *x_exponent = control->x_exponent;
  return control->all_again == 0;
}

// One thread orders boxes of x, another one weights. Boxes of planes are of half of a step.
template <typename Shape>
__device__ __forceinline__ void order_landing(const Params& params, const LandingShared& shared) {
  const Plan& plan = params.plan;
  const Landing& landing = plan.landing;
  const Phased& of = params.of;
  constexpr LandingShape kShape = Shape::kShape;
  constexpr int kParts = kShape.channels_last ? 1 : 2;
  PackedRingPosition landed;
  bool waits = true;
  hopper::prefetch_map(params.in_map);
  for (int unit = blockIdx.x; unit < plan.units; unit += gridDim.x) {
    const LandingTile tile = locate_landing(plan, unit);
    const int column = tile.q * kShape.stride - of.pad_w, row = tile.p * kShape.stride - of.pad_h;
    for (int step = 0; step < landing.steps; ++step) {
      for (int part = 0; part < kParts; ++part) {
        const uint32_t full = shared.landed_full(landed.slot());
        const uint32_t to = shared.base + shared.layout.landed + landed.slot() * landing.stage_bytes;
        hopper::barrier_wait_idly(shared.landed_empty(landed.slot()), landed.parity() ^ 1);
        hopper::barrier_arrive_expecting(full, kShape.boxes() * kShape.box_bytes());
        if constexpr (kShape.channels_last) {
          hopper::load_box(params.in_map, to, 16 * step, column, row, tile.n, full);
        } else {
#pragma unroll
          for (int box = 0; box < kShape.boxes(); ++box) {
            int from_column = column - landing.lead[box % 2], from_row = row;
            if (kShape.whole_rows()) from_column = row * of.W + box * kShape.box_plane(), from_row = 0;
            if (kShape.pairs == 2) from_column += ((row + box) & 1) * of.W, from_row = (row + box) >> 1;
            hopper::load_box(params.in_map, to + box * kShape.box_bytes(), from_column, from_row, 16 * step + 8 * part,
                             tile.n, full);
          }
        }
        landed.next(landing.stages);
      }
      // The first boxes are on their way already: no kernel of this call writes x, and sample_kernel, the first one,
      // started when all before the call had ended. Nobody leaves before they are there: they come to shared memory.
      if (waits && !wait_for_scales(params)) {
        for (int i = 0; i < kParts; ++i) hopper::barrier_wait(shared.landed_full(i), 0);
        return;
      }
      waits = false;
    }
  }
}

__device__ __forceinline__ void copy_landing_weights(const Params& params, const LandingShared& shared) {
  const Plan& plan = params.plan;
  const int stages = plan.landing.steps * plan.landing.w_stages_of_step;
  const int64_t tile_bytes = int64_t{stages} * plan.w_stage_bytes;
  hopper::wait_for_prerequisites();
  PackedRingPosition w;
  bool waits = true;
  for (int unit = blockIdx.x; unit < plan.units; unit += gridDim.x) {
    const uint8_t* from =
        static_cast<const uint8_t*>(params.packed_ptr) + locate_landing(plan, unit).n_block * tile_bytes;
    for (int i = 0; i < stages; ++i, from += plan.w_stage_bytes) {
      const uint32_t full = shared.w_full(w.slot());
      hopper::barrier_wait_idly(shared.w_empty(w.slot()), w.parity() ^ 1);
      hopper::barrier_arrive_expecting(full, plan.w_stage_bytes);
      hopper::bulk_load(shared.base + shared.layout.w_ring + w.slot() * plan.w_stage_bytes, from, plan.w_stage_bytes,
                        full);
      w.next(plan.w_stages);
      // The first stage is on its way before that is known. Nobody leaves before it is there.
      if (waits && !wait_for_scales(params)) {
        hopper::barrier_wait(full, 0);
        return;
      }
      waits = false;
    }
  }
}

// The share of a lane in what lands at a time: in words of a landed plane, and in bytes of a window: -1 if there is
// none, and the lane looks at a value that is another one's. In channels_last `from` is where the first four of the
// channels are, in bytes; piece number i of 16 bytes of a pixel lies at place i ^ pixel / 2 % 4. With two pieces `from`
// is the first one's and `to` the second one's. `row` and `column`: of the window, of the first piece.
struct LandedPixel {
  int from, to, row, column;
};

// From where the second of two pieces goes to where the first one does, in bytes: of halves of the channels, or of two
// columns, an odd one of the window and the even one behind it.
template <typename Shape>
__device__ __forceinline__ int to_first_piece(const Landing& landing) {
  return 16 * (Shape::kShape.channels_last ? -landing.slots : Shape::kShape.phase_slots() - 1);
}

// Where four channels have landed, from those of the lane's `from` on: those of its second piece, or the second four.
template <typename Shape>
__device__ __forceinline__ const uint32_t* landed_four(const uint8_t* landed, int from, int piece, int four) {
  return reinterpret_cast<const uint32_t*>(landed + (from ^ (2 * piece + four) * 16));
}

template <typename Shape>
__device__ __forceinline__ LandedPixel landed_pixel(const Landing& landing, int item) {
  constexpr LandingShape kShape = Shape::kShape;
  constexpr int kLanes = kShape.row_lanes(), kRest = kLanes - 32;
  const int lane = threadIdx.x % 32, rows = landing.window_rows;
  int row = item, of_row = lane;
  if (!kShape.by_rows() || item >= rows) {
    const int number = (kShape.by_rows() ? item - rows : item) * 32 + lane;
    row = number / (kShape.by_rows() ? kRest : kLanes);
    of_row = kShape.by_rows() ? 32 + number % kRest : number % kLanes;
  }
  if (row >= rows) return {0, -1, 0, 0};
  constexpr int kBoxRows = kShape.box_rows(), kBoxWords = kShape.box_bytes() / 4;
  if constexpr (kShape.whole_rows()) {
    const int column = 2 * of_row + kWholeRowsPadding;
    return {row / kBoxRows * kBoxWords + row % kBoxRows * kShape.box_columns() + 2 * of_row,
            kShape.slot_of(row, column + 1) * 16, row, column};
  } else if constexpr (kShape.channels_last) {
    const int number = row * kShape.box_columns() + of_row;
    return {number * kLandedPixelBytes + number / 2 % 4 * 16, (landing.slots + kShape.slot_of(row, of_row)) * 16, row,
            of_row};
  }
  const int box = row % kShape.pairs;
  return {box * kBoxWords + row / kShape.pairs * kShape.box_columns() + of_row + landing.lead[box],
          kShape.slot_of(row, of_row) * 16, row, of_row};
}

// Landed values of which something did not fit: that becomes zero, and goes on the list, once. Channels from `channel`
// on.
template <typename Shape>
__device__ __forceinline__ void list_landed(const Params& params, const LandingTile& tile, int warp, int channel,
                                            int x_exponent, const uint8_t* landed, uint8_t* window) {
  const Plan& plan = params.plan;
  const Landing& landing = plan.landing;
  const Phased& of = params.of;
  constexpr LandingShape kShape = Shape::kShape;
  constexpr int kPieces = kShape.lane_pieces();
#pragma unroll
  for (int i = 0; i < kShape.items_of_warp(); ++i) {
    const LandedPixel own_pixel = landed_pixel<Shape>(landing, warp + i * kContainWarps);
    if (own_pixel.to < 0) continue;
#pragma unroll 1
    for (int j = 0; j < kPieces; ++j) {
      const int from = own_pixel.from + (kShape.channels_last ? 0 : j);
      const int to = own_pixel.to + (j < kPieces - 1 ? to_first_piece<Shape>(landing) : 0);
      const int first_channel = channel + (kShape.channels_last ? 8 * j : 0);
      const int row = own_pixel.row, column = own_pixel.column + (kShape.channels_last ? 0 : j);
      const int h = tile.p * kShape.stride - of.pad_h + row, w = tile.q * kShape.stride - of.pad_w + column;
      const bool own = lists(of, plan, tile, row, column);
      if (kShape.pairs == 2 && !is_within(w, of.W)) continue;  // of another row
#pragma unroll 1
      for (int c = 0; c < 8; ++c) {
        const uint32_t* const word =
            kShape.channels_last ? landed_four<Shape>(landed, from, j, c / 4) + c % 4
                                 : reinterpret_cast<const uint32_t*>(landed) + from + c * kShape.box_plane();
        const float value = bits_float(*word);
        if (does_fit(value, x_exponent, 1)) continue;
        reinterpret_cast<Half*>(window + to)[c] = Half{};
        const int place = ((tile.n * of.H + h) * of.W + w) * params.copy.channels + first_channel + c;
        if (own) list_misfit(params.guard, value, place);
      }
    }
  }
}

template <typename Shape>
__device__ __forceinline__ void contain_landed(const Params& params, const LandingShared& shared, uint8_t* smem,
                                               int warp) {
  const Plan& plan = params.plan;
  const Landing& landing = plan.landing;
  const int lane = threadIdx.x % 32;
  constexpr LandingShape kShape = Shape::kShape;
  constexpr bool kChannelsLast = kShape.channels_last;
  constexpr int kItems = kShape.items_of_warp(), kPieces = kShape.lane_pieces(), kParts = kChannelsLast ? 1 : 2;
  LandedPixel pixels[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) pixels[i] = landed_pixel<Shape>(landing, warp + i * kContainWarps);
  [[maybe_unused]] const int to_first = to_first_piece<Shape>(landing);
  // Warps that have less leave the tensor cores alone meanwhile.
  const int items = kShape.warp_items(landing.window_rows);
  int x_exponent;
  if (!wait_for_scales(params, &x_exponent)) return;
  const float scale = power_of_two(x_exponent);
  const uint32_t least = least_contained(x_exponent, 1);
  PackedRingPosition landed, x;
  for (int unit = blockIdx.x; unit < plan.units; unit += gridDim.x) {
    [[maybe_unused]] bool exists = true, rest_exists = true;  // pixels of the first 32 columns, and behind
    if constexpr (kShape.pairs == 2) {
      static_assert(kShape.by_rows() && kShape.row_lanes() == 34, "which columns these are");
      const int column = locate_landing(plan, unit).q - params.of.pad_w;
      exists = is_within(column + lane, params.of.W), rest_exists = is_within(column + 32 + lane % 2, params.of.W);
    }
    for (int step = 0; step < landing.steps; ++step) {
      hopper::barrier_wait_idly(shared.x_empty(x.slot()), x.parity() ^ 1);
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        hopper::barrier_wait_idly(shared.landed_full(landed.slot()), landed.parity());
        const uint8_t* const from = smem + shared.layout.landed + landed.slot() * landing.stage_bytes;
        uint8_t* const to =
            smem + shared.layout.x_ring + x.slot() * plan.x_stage_bytes + part * landing.slots * 16;
        Watch watch;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (i == kItems - 1 && warp + i * kContainWarps >= items) break;
          uint32_t words[kPieces][8];
          if constexpr (kChannelsLast) {
#pragma unroll
            for (int j = 0; j < kPieces; ++j)
#pragma unroll
              for (int c = 0; c < 8; c += 4)
                reinterpret_cast<uint4&>(words[j][c]) =
                    *reinterpret_cast<const uint4*>(landed_four<Shape>(from, pixels[i].from, j, c / 4));
          } else {
#pragma unroll
            for (int c = 0; c < 8; ++c) {
              const uint32_t* const plane =
                  reinterpret_cast<const uint32_t*>(from) + pixels[i].from + c * kShape.box_plane();
              if constexpr (kPieces == 1) {
                words[0][c] = *plane;
              } else {
                const uint2 two = *reinterpret_cast<const uint2*>(plane);
                words[0][c] = two.x;
                words[1][c] = two.y;
              }
            }
          }
#pragma unroll
          for (int j = 0; j < kPieces; ++j) {
            const auto pair = [&](int c) {
              watch.see(words[j][c]);
              watch.see(words[j][c + 1]);
              return contain_pair(words[j][c], words[j][c + 1], scale);
            };
            uint4 piece = make_uint4(pair(0), pair(2), pair(4), pair(6));
            watch.see_contained(piece);
            if (kShape.pairs == 2 && !(warp + i * kContainWarps < landing.window_rows ? exists : rest_exists))
              piece = uint4{};
            if (pixels[i].to >= 0)
              *reinterpret_cast<uint4*>(to + pixels[i].to + (j < kPieces - 1 ? to_first : 0)) = piece;
          }
        }
        if (!watch.fits(least))
          list_landed<Shape>(params, locate_landing(plan, unit), warp, 16 * step + 8 * part, x_exponent, from, to);
        __syncwarp();  // what has landed has been read
        if (lane == 0) hopper::barrier_arrive(shared.landed_empty(landed.slot()));
        landed.next(landing.stages);
      }
      hopper::fence_async();
      __syncwarp();  // the window is there
      if (lane == 0) hopper::barrier_arrive(shared.x_full(x.slot()));
      x.next(plan.x_stages);
    }
  }
}

template <typename Shape>
using LandedSums = float[2][Shape::kShape.product_slots() / 2];

// A number that the compiler knows, as an argument.
template <int VALUE>
struct Constant {
  static constexpr int value = VALUE;
};

// Stages 16 channels of as many rows of the warpgroup as are staged at a time, as a box of [row][channel][column] wants
// them: piece number i of 16 bytes of a channel's row lies at place i ^ channel % 8. A warp writes 8 channels at a
// time, each of which starts at another place. Where a pair of slots lies the compiler knows but for the lane's part of
// it: a warp stages while nothing else hides its instructions, and the next one waits for it (docs/lab/gather.md).
template <typename Shape, int FIRST_ROW>
__device__ __forceinline__ void stage_landed(const Params& params, const LandedSums<Shape>& acc,
                                             const float (&factor)[2], const float (&bias)[2], uint8_t* staging) {
  constexpr LandingShape kShape = Shape::kShape;
  constexpr int kRowBytes = kLandingStagedChannels * hopper::kBoxRowBytes, kEight = 8 * hopper::kBoxRowBytes;
  constexpr int kPitch = kShape.pitch(), kFours = kShape.product_slots() / 8;  // of pairs, of a product
  const int lane = threadIdx.x % 32, pair = lane % 4, channel = lane / 4;
  constexpr int kEndRow = FIRST_ROW + kShape.staged_rows();
  const int end_row = kShape.stacks() ? kEndRow : min(params.plan.landing.rows, kEndRow);
  staging += channel * hopper::kBoxRowBytes;
#pragma unroll
  for (int j = 0; j < 2 * kFours; ++j) {
    if (8 * j / kPitch + 1 < FIRST_ROW || 8 * j / kPitch >= kEndRow) continue;
    // Four pairs, a lane each, the first of them in this row and column, all of which the compiler knows.
    const int first_of_row = 8 * j / kPitch, first = 8 * j % kPitch, odd = first % 4 / 2;
    int row = first_of_row, piece = first / 4 + (pair + odd) / 2, in_piece = (pair + odd) % 2 * 8;
    bool exists = true;
    if (first + 6 >= kShape.columns) {  // or in the next one
      const int column = first + 2 * pair, in_next = column - kPitch;
      exists = column < kShape.columns || in_next >= 0;
      if (in_next >= 0) {
        row = first_of_row + 1;
        piece = in_next / 4;
        in_piece = in_next % 4 * 4;
      }
    }
    if (exists && row >= FIRST_ROW && row < end_row) {
      uint8_t* const to = staging + (row - FIRST_ROW) * kRowBytes + ((piece ^ channel) * 16 + in_piece);
      const float* const sums = acc[j / kFours] + j % kFours * 4;
      *reinterpret_cast<float2*>(to) = make_float2(sums[0] * factor[0] + bias[0], sums[1] * factor[0] + bias[0]);
      *reinterpret_cast<float2*>(to + kEight) =
          make_float2(sums[2] * factor[1] + bias[1], sums[3] * factor[1] + bias[1]);
    }
  }
}

// Adds up what three warps have staged, into the first one's share, for which the warpgroup has come together.
template <typename Shape>
__device__ __forceinline__ void add_stacked(int rows, uint8_t* staging) {
  constexpr int kRowBytes = kLandingStagedChannels * hopper::kBoxRowBytes;
  constexpr int kNext = Shape::kShape.staged_bytes() + kRowBytes;
  for (int i = threadIdx.x % 128 * 16; i < rows * kRowBytes; i += 128 * 16) {
    float4& sum = *reinterpret_cast<float4*>(staging + i);
#pragma unroll
    for (int r = 1; r < kLandingTaps; ++r) {
      const float4 four = *reinterpret_cast<const float4*>(staging + i + r * kNext);
      sum.x += four.x, sum.y += four.y, sum.z += four.z, sum.w += four.w;
    }
  }
}

// The same in channels_last: piece number i of 16 bytes, four channels, of a pixel lies at place i ^ pixel / 2 % 4.
// Lanes of the second four of eight channels stage the odd pixel first, so that they meet the other half of the banks.
template <typename Shape, int FIRST_ROW>
__device__ __forceinline__ void stage_landed_channels(const Params& params, const LandedSums<Shape>& acc,
                                                      const float (&factor)[2], const float (&bias)[2],
                                                      uint8_t* staging) {
  constexpr LandingShape kShape = Shape::kShape;
  constexpr int kPitch = kShape.pitch(), kFours = kShape.product_slots() / 8;
  const int lane = threadIdx.x % 32, pair = lane % 4, channel = lane / 4;
  constexpr int kEndRow = FIRST_ROW + kShape.staged_rows();
  const int end_row = min(params.plan.landing.rows, kEndRow);
  const bool odd_first = channel >= 4;
  const int to_other = odd_first ? -kLandedPixelBytes : kLandedPixelBytes;
  staging += channel % 4 * 4 + (odd_first ? kLandedPixelBytes : 0);
  // From the first of four pairs, by its number; the second eight channels are where those of two pairs on are.
  int place[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) place[i] = 2 * pair * kLandedPixelBytes + (channel / 4 ^ (i + pair) % 4) * 16;
#pragma unroll
  for (int j = 0; j < 2 * kFours; ++j) {
    if (8 * j / kPitch + 1 < FIRST_ROW || 8 * j / kPitch >= kEndRow) continue;
    const int first_of_row = 8 * j / kPitch, first = 8 * j % kPitch;
    const int column = first + 2 * pair;
    const bool is_next = column >= kPitch, exists = column < kShape.columns || is_next;  // in the next row
    const int row = first_of_row + is_next;
    if (exists && row >= FIRST_ROW && row < end_row) {
      const float* const sums = acc[j / kFours] + j % kFours * 4;
      // The first pair's pixels; or, if that is in the row before, how many before this row it would be.
      const int own = (first_of_row - FIRST_ROW) * kShape.columns + first, next = own + kShape.columns - kPitch;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int to = own * kLandedPixelBytes + place[(own / 2 + 64 + 2 * i) % 4];
        if (is_next) to = next * kLandedPixelBytes + place[(next / 2 + 64 + 2 * i) % 4];
        const float even = sums[2 * i] * factor[i] + bias[i], odd = sums[2 * i + 1] * factor[i] + bias[i];
        *reinterpret_cast<float*>(staging + to) = odd_first ? odd : even;
        *reinterpret_cast<float*>(staging + to + to_other) = odd_first ? even : odd;
      }
    }
  }
}

// Stores staged planes, so many rows of y from `first_row` on, in memory's order: no boxes, as rows are no 16 bytes.
template <typename Shape>
__device__ __forceinline__ void store_staged_rows(const Params& params, const LandingTile& tile, int first_channel,
                                                  int first_row, int rows, const uint8_t* staging) {
  const Phased& of = params.of;
  constexpr int kColumns = Shape::kShape.columns, kValues = Shape::kShape.staged_rows() * kColumns;
  const int channels = min(kLandingStagedChannels, of.out_channels - first_channel);
  float* const out = static_cast<float*>(params.out_ptr) + tile.n * of.out_stride[0] +
                     first_channel * of.out_stride[1] + first_row * of.out_stride[2];
#pragma unroll
  for (int first = 0; first < kValues; first += 32) {
    const int number = first + threadIdx.x % 32, row = number / kColumns, column = number % kColumns;
    if (number >= kValues || row >= rows || first_row + row >= of.P || column >= of.Q) continue;
    const uint8_t* const from = staging + row * kLandingStagedChannels * hopper::kBoxRowBytes + column % 4 * 4;
    float* to = out + row * of.out_stride[2] + column;
#pragma unroll
    for (int channel = 0; channel < kLandingStagedChannels; ++channel, to += of.out_stride[1]) {
      const int place = channel * hopper::kBoxRowBytes + (column / 4 ^ channel % 8) * 16;
      if (channel < channels) *to = *reinterpret_cast<const float*>(from + place);
    }
  }
}

template <typename Shape>
__device__ __forceinline__ void multiply_landed(const Params& params, const LandingShared& shared, uint8_t* smem) {
  const Plan& plan = params.plan;
  const Landing& landing = plan.landing;
  const Phased& of = params.of;
  const int lane = threadIdx.x % 32;
  const int warpgroup = hopper::uniform(threadIdx.x / 128), warp = hopper::uniform(threadIdx.x % 128 / 32);
  constexpr LandingShape kShape = Shape::kShape;
  constexpr bool kShares = kShape.shares();
  constexpr int kTileN = kShape.gemm_rows(), kSlots = kShape.product_slots();
  const int own_slot = kShares ? 0 : warpgroup * landing.rows * kShape.pitch();
  const int own_row = kShares ? 0 : warpgroup * landing.rows, own_channel = (kShares ? warpgroup * 64 : 0) + 16 * warp;
  uint8_t* const staging = smem + shared.layout.staging + warp * kShape.staged_bytes();
  const int rows_of_taps = kShape.stacks() ? 1 : of.R;
  if (kShape.stores_boxes() && threadIdx.x == 0) hopper::prefetch_map(params.out_map);
  int x_exponent;
  if (!wait_for_scales(params, &x_exponent)) return;
  const float x_factor = power_of_two(-x_exponent);
  PackedRingPosition x, w;
  uint32_t turn = warpgroup ^ 1;  // the first warpgroup stages first
  bool stores = false;            // a box that still has to be read
  // To the other warpgroup. Each lane speaks for itself, as racecheck wants it.
  const auto give_staging = [&] {
    if (lane == 0) hopper::bulk_stores_wait_read<0>();
    hopper::barrier_arrive(shared.staged_empty(warpgroup ^ 1, warp));
  };
  LandedSums<Shape> acc;
  for (int unit = blockIdx.x; unit < plan.units; unit += gridDim.x) {
    const LandingTile tile = locate_landing(plan, unit);
    const int channel = tile.n_block * kTileN + own_channel;
    hopper::wgmma_start(acc);
    int x_before = -1, w_before = -1;
    const auto give_back = [&] {
      if (lane != 0) return;
      if constexpr (!kShares) hopper::barrier_arrive(shared.w_empty(w_before));
      hopper::barrier_arrive(shared.x_empty(x_before));
    };
    for (int step = 0; step < landing.steps; ++step) {
      hopper::barrier_wait(shared.x_full(x.slot()), x.parity());
      const uint32_t from =
          hopper::descriptor(shared.base + shared.layout.x_ring + x.slot() * plan.x_stage_bytes, landing.slots * 16) +
          own_slot;
      // Where warpgroups share the pixels, weights come from registers, loaded while the row of taps before is
      // multiplied: two wgmmas read them. Else, with more to contain beside them, it is no faster (docs/lab/gather.md).
      [[maybe_unused]] uint32_t rows[kSharedRows][kLandingTaps][4];
      const auto multiply_row = [&](uint32_t (&row)[kLandingTaps][4], int r, bool keep) {
        constexpr int kTap = kStepPieces * kTileN;
        const uint32_t w_stage = shared.base + shared.layout.w_ring + w.slot() * plan.w_stage_bytes;
        if (kShares || r == 0) hopper::barrier_wait(shared.w_full(w.slot()), w.parity());
        [[maybe_unused]] const uint32_t weights = hopper::descriptor(w_stage, kTileN * 16) + r * kLandingTaps * kTap;
        if constexpr (kShares) {
#pragma unroll
          for (int s = 0; s < kLandingTaps; ++s)
            hopper::load_matrix(row[s], w_stage + (own_channel + lane % 16 + lane / 16 * kTileN + s * kTap) * 16);
          hopper::wgmma_wait<0>();
        }
        hopper::wgmma_fence();
#pragma unroll
        for (int s = 0; s < kLandingTaps; ++s)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t slots = from + kShape.slot_of(r, s) + i * kSlots;
            if constexpr (kShares)
              hopper::WgmmaRegisters<Half, kSlots>::multiply(acc[i], row[s], slots, keep || s != 0);
            else
              hopper::Wgmma<Half, kSlots>::multiply(acc[i], weights + s * kTap, slots, keep || s != 0);
          }
        hopper::wgmma_commit();
        if constexpr (kShares) {
          // The wgmmas have their operands, so that these have been loaded. (Given back right behind the loads, some
          // came too late.)
          if (lane == 0) hopper::barrier_arrive(shared.w_empty(w.slot()));
          w.next(plan.w_stages);
        }
      };
      multiply_row(rows[0], 0, step != 0);
      if constexpr (!kShares) hopper::wgmma_wait<1>();
      // The step before this one has been multiplied; by now what was stored may have been read as well.
      if (step != 0) give_back();
      if (stores) give_staging();
      stores = false;
      if constexpr (kShares) {
#pragma unroll
        for (int r = 1; r < kSharedRows; ++r) multiply_row(rows[r], r, true);
      } else {
#pragma unroll 1
        for (int r = 1; r < rows_of_taps; ++r) multiply_row(rows[0], r, true);
        w_before = w.slot();
        w.next(plan.w_stages);
      }
      x_before = x.slot();
      x.next(plan.x_stages);
    }
    // Loaded while the last products are under way.
    float factor[2], bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = channel + lane / 4 + 8 * i;
      factor[i] = params.guard.w_factors[k] * x_factor;
      bias[i] = params.bias_ptr != nullptr && k < of.out_channels ? static_cast<const float*>(params.bias_ptr)[k] : 0;
    }
    hopper::wgmma_wait<0>();
#pragma unroll
    for (auto& of_product : acc) hopper::wgmma_settle(of_product);
    give_back();
    hopper::barrier_wait(shared.staged_empty(warpgroup, kShape.stacks() ? 0 : warp), turn);
    turn ^= 1;
    const auto store = [&](auto first_row, const hopper::BoxMap& map) {
      constexpr LandingShape kOwn = Shape::kShape;
      constexpr int kFirstRow = decltype(first_row)::value;
      if constexpr (kOwn.channels_last)
        stage_landed_channels<Shape, kFirstRow>(params, acc, factor, bias, staging);
      else
        stage_landed<Shape, kFirstRow>(params, acc, factor, bias, staging);
      if constexpr (kOwn.stacks()) {
        hopper::named_barrier(1 + warpgroup, 128);
        add_stacked<Shape>(landing.rows, smem + shared.layout.staging);
      }
      const int row = tile.p + own_row + kFirstRow;
      if constexpr (!kOwn.stores_boxes()) {
        __syncwarp();  // all channels are staged
        store_staged_rows<Shape>(params, tile, channel, row, landing.rows - kFirstRow, staging);
        return;
      }
      hopper::fence_async();
      if constexpr (kOwn.stacks()) hopper::named_barrier(1 + warpgroup, 128);
      __syncwarp();  // all channels are staged
      if (lane != 0 || (kOwn.stacks() && warp != 0)) return;
      if (row < of.P && channel < of.out_channels) {
        if constexpr (kOwn.channels_last)
          hopper::store_box(map, staging, channel, tile.q, row, tile.n);
        else
          hopper::store_box(map, staging, tile.q, channel, row, tile.n);
      }
      hopper::bulk_stores_commit();
    };
    constexpr int kStagedRows = kShape.staged_rows();
    static_assert(!kShape.stores_boxes() || kShape.rows <= 2 * kStagedRows, "there is one map of the rest");
    store(Constant<0>{}, params.out_map);
    const auto store_rest = [&](auto first_row) {
      if (landing.rows <= decltype(first_row)::value) return;
      if (lane == 0) hopper::bulk_stores_wait_read<0>();
      __syncwarp();  // the rows before have been read
      store(first_row, params.rest_map);
    };
    if constexpr (kStagedRows < kShape.rows) store_rest(Constant<kStagedRows>{});
    if constexpr (2 * kStagedRows < kShape.rows) store_rest(Constant<2 * kStagedRows>{});
    if constexpr (3 * kStagedRows < kShape.rows) store_rest(Constant<3 * kStagedRows>{});
    stores = !kShape.stacks() || warp == 0;
  }
  if (stores) give_staging();  // also before the shared memory goes
}

template <int TILE_N, int COLUMNS, int ROWS, int STRIDE, bool CHANNELS_LAST, int PAIRS>
struct ConstantShape {
  static constexpr LandingShape kShape{TILE_N, COLUMNS, ROWS, STRIDE, CHANNELS_LAST, PAIRS};
};

template <int TILE_N, int COLUMNS, int ROWS, int STRIDE, bool CHANNELS_LAST, int PAIRS>
__global__ void __launch_bounds__(kLandingThreads, 1) landing_kernel(const __grid_constant__ Params params) {
#if defined(MODELNEW_SM90A)
  using Shape = ConstantShape<TILE_N, COLUMNS, ROWS, STRIDE, CHANNELS_LAST, PAIRS>;
  constexpr LandingShape kShape = Shape::kShape;
  extern __shared__ __align__(1024) uint8_t modelnew_gather_landing_smem[];
  hopper::launch_dependents();
  const LandingShared shared{hopper::smem_address(modelnew_gather_landing_smem), landing_layout(params.plan)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < params.plan.landing.stages; ++i) {
      hopper::barrier_init(shared.landed_full(i), 1);
      hopper::barrier_init(shared.landed_empty(i), kContainWarps);
    }
    for (int i = 0; i < params.plan.x_stages; ++i) {
      hopper::barrier_init(shared.x_full(i), kContainWarps);
      hopper::barrier_init(shared.x_empty(i), 8);
    }
    for (int i = 0; i < params.plan.w_stages; ++i) {
      hopper::barrier_init(shared.w_full(i), 1);
      hopper::barrier_init(shared.w_empty(i), 8);
    }
    for (int i = 0; i < 8; ++i) hopper::barrier_init(shared.staged_empty(i / 4, i % 4), 32);
    hopper::fence_async();
  }
  // Where rows are whole nobody writes what windows have of the padding beside them.
  if constexpr (kShape.whole_rows()) {
    for (int i = shared.layout.x_ring + 16 * static_cast<int>(threadIdx.x); i < shared.layout.w_ring;
         i += 16 * kLandingThreads)
      *reinterpret_cast<uint4*>(modelnew_gather_landing_smem + i) = make_uint4(0, 0, 0, 0);
    hopper::fence_async();
  }
  __syncthreads();  // barriers are ready
  if (threadIdx.x < 256) {
    hopper::registers_take<kShape.multiply_registers()>();
    multiply_landed<Shape>(params, shared, modelnew_gather_landing_smem);
  } else {
    hopper::registers_give_back<kShape.contain_registers()>();
    const int warp = hopper::uniform(threadIdx.x / 32) - 8;
    if (warp < kContainWarps)
      contain_landed<Shape>(params, shared, modelnew_gather_landing_smem, warp);
    else if (threadIdx.x % 32 == 0)
      warp % 2 == 0 ? order_landing<Shape>(params, shared) : copy_landing_weights(params, shared);
  }
#endif
}

// Corrects y for values of x that did not fit, which were multiplied as zeros: their products are added, in fp32. The
// warp of the first value on the list that an output reads adds those of all that it reads, in their order. Where warps
// are left over, several share a pixel's channels: 32 of them wait for memory twice (docs/lab/gather.md).
struct Misfit {
  int n, h, w, c;
  float value;
};

using MendShared = Misfit[kMostListed];  // in the order of their places

// The number of the tap by which an output reads a value, or -1.
__device__ __forceinline__ int tap_of(const Phased& of, const Misfit& misfit, int n, int p, int q) {
  const int down = misfit.h + of.pad_h - p * of.stride_h, right = misfit.w + of.pad_w - q * of.stride_w;
  const int r = down / of.dilation_h, s = right / of.dilation_w;
  const bool reads = misfit.n == n && down >= 0 && right >= 0 && r * of.dilation_h == down &&
                     s * of.dilation_w == right && r < of.R && s < of.S;
  return reads ? r * of.S + s : -1;
}

__device__ __forceinline__ void mend(const Params& params, int count, MendShared& list) {
  const Phased& of = params.of;
  const CopyParams& copy = params.copy;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, taps = of.R * of.S;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const Listed own = params.guard.list[i];
    const int pixel = own.place / copy.channels, channel = own.place - pixel * copy.channels;
    const int phase_channels = copy.channels / phases_of(copy.phases);
    const SourcePixel at = source_pixel(copy, pixel, channel / phase_channels);
    list[listed_before(params.guard, count, own.place)] = {at.n, at.h, at.w, channel % phase_channels, own.value};
  }
  __syncthreads();  // the list is in order
  const int warps = static_cast<int>(gridDim.x) * (kThreads / 32), out_channels = of.groups * of.out_channels;
  const int shares = max(1, min(warps / (count * taps), (out_channels + 31) / 32));
  for (int unit = static_cast<int>(blockIdx.x) * (kThreads / 32) + warp; unit < count * taps * shares; unit += warps) {
    const int share = unit % shares, first = unit / shares / taps, tap = unit / shares % taps;
    const Misfit& own = list[first];
    const int down = own.h + of.pad_h - tap / of.S * of.dilation_h;
    const int right = own.w + of.pad_w - tap % of.S * of.dilation_w;
    const int p = down / of.stride_h, q = right / of.stride_w;
    if (down < 0 || right < 0 || p * of.stride_h != down || q * of.stride_w != right || p >= of.P || q >= of.Q)
      continue;
    // An output reads neighbours on the list, of which two phases of rows follow one another.
    const auto is_near = [&](int i) {
      return i >= 0 && i < count && list[i].n == own.n && abs(list[i].h - own.h) <= of.R * of.dilation_h;
    };
    bool is_first = true;
    for (int i = first - 1; is_first && is_near(i); --i) is_first = tap_of(of, list[i], own.n, p, q) < 0;
    float* const out =
        static_cast<float*>(params.out_ptr) + own.n * of.out_stride[0] + p * of.out_stride[2] + q * of.out_stride[3];
    const float* const w = static_cast<const float*>(params.other_pack.w_ptr);
    constexpr int kAtOnce = 8;  // channels, whose loads a warp does not wait for one by one
    const int step = 32 * shares;
    for (int first_k = is_first ? 32 * share + lane : out_channels; first_k < out_channels; first_k += kAtOnce * step) {
      float sums[kAtOnce] = {}, before[kAtOnce];  // added to y at once: a bias may be far larger
      for (int i = first; is_near(i); ++i) {
        const Misfit& misfit = list[i];
        const int by = tap_of(of, misfit, own.n, p, q), r = by / of.S, s = by % of.S;
        if (by < 0) continue;
        const float* const of_tap = w + (of.flipped ? of.R - 1 - r : r) * of.w_stride_r +
                                    (of.flipped ? of.S - 1 - s : s) * of.w_stride_s;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int k = first_k + j * step, group = k / of.out_channels, c = misfit.c - group * of.in_channels;
          if (k >= out_channels || !is_within(c, of.in_channels)) continue;
          const float weight = of_tap[group * of.w_stride_group + (k - group * of.out_channels) * of.w_stride_out +
                                      c * of.w_stride_in];
          sums[j] = fmaf(round_to_tf32(misfit.value), round_to_tf32(weight), sums[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) before[j] = sums[j] == 0 ? 0 : out[(first_k + j * step) * of.out_stride[1]];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (sums[j] != 0) out[(first_k + j * step) * of.out_stride[1]] = before[j] + sums[j];
    }
  }
}

// Packs weights, where all is done again, in parts that blocks claim, and waits until all are there. A block that has
// claimed a part runs, and waits for no other block before the part is packed, so that none waits for one that has no
// room to start. The preceding kernel would do it in every call where x lands, as it cannot know yet
// (docs/lab/gather.md).
constexpr int kPiecesOfPart = 4 * kThreads;

__device__ __forceinline__ void pack_for_again(const Params& params, uint32_t& claimed) {
  const PackParams& pack = params.other_pack;
  ContainedControl& control = *params.guard.control;
  const int parts = (pack.count + kPiecesOfPart - 1) / kPiecesOfPart;
  for (;;) {
    if (threadIdx.x == 0) claimed = atomicAdd(&control.claimed[params.phase], 1u);
    __syncthreads();  // a part is claimed
    const int first = static_cast<int>(claimed) * kPiecesOfPart;
    if (first >= pack.count) break;
    const int end = min(first + kPiecesOfPart, pack.count);
    for (int number = first + static_cast<int>(threadIdx.x); number < end; number += kThreads)
      pack_piece<Tf32>(pack, number);
    __threadfence();
    __syncthreads();  // the part is packed
    if (threadIdx.x == 0) atomicAdd(&control.packed[params.phase], 1u);
  }
  if (threadIdx.x == 0) hopper::wait_for_count(&control.packed[params.phase], static_cast<uint32_t>(parts));
  __syncthreads();  // all parts are packed
  hopper::fence_async_memory();
}

template <typename Format, int TILE_N, int BLOCKS_M, int PIECES, int WARPGROUPS, Source SOURCE>
__global__ void __launch_bounds__(threads_of(WARPGROUPS), blocks_per_sm(WARPGROUPS))
    gather_kernel(const __grid_constant__ Params params) {
#if defined(MODELNEW_SM90A)
  static_assert(SOURCE != Source::kPhases || PIECES * Format::CHANNELS == kPhasesBlock, "a block is a stage");
  extern __shared__ __align__(1024) uint8_t modelnew_gather_smem[];
  // `again` may be made ready; it waits for the end of this kernel before it reads or writes memory. What is the last
  // kernel of its call allows nothing: see ptx.cuh.
  if (Format::CONTAINED || params.phase + 1 < params.phases) hopper::launch_dependents();
  Shared shared{hopper::smem_address(modelnew_gather_smem), shared_layout(params.plan)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kMaxStages; ++stage) {
      hopper::barrier_init(shared.x_full(stage), comes_in_bulk(params.plan) ? 1 : kGatherThreads);
      hopper::barrier_init(shared.x_empty(stage), 128 * WARPGROUPS);
      hopper::barrier_init(shared.w_full(stage), 1);
      hopper::barrier_init(shared.w_empty(stage), 4 * WARPGROUPS);
    }
    hopper::fence_async();
  }
  if constexpr (Format::AGAIN) {
    hopper::wait_for_prerequisites();
    const ContainedControl control = *params.guard.control;
    if (are_contained(control)) {
      const int count = static_cast<int>(control.listed);
      if (count != 0) mend(params, count, *reinterpret_cast<MendShared*>(modelnew_gather_smem + kBarrierBytes));
      return;
    }
    pack_for_again(params, *reinterpret_cast<uint32_t*>(modelnew_gather_smem + kBarrierBytes));
  }
  // The only kernel of its call waits for whoever wrote x and w.
  if (sizeof(typename Format::Tensor) == 2 && params.plan.w_in_boxes) hopper::wait_for_prerequisites();
  __syncthreads();  // barriers are ready
  if (threadIdx.x < 128 * WARPGROUPS) {
    hopper::registers_take<Format::multiply_registers(WARPGROUPS)>();
    multiply<Format, TILE_N, BLOCKS_M, PIECES, WARPGROUPS, SOURCE>(params, shared, modelnew_gather_smem);
  } else {
    // All of this warpgroup, before some of them wait or leave.
    hopper::registers_give_back<Format::gather_registers(WARPGROUPS)>();
    const int warp = hopper::uniform(threadIdx.x / 32 % 4);
    // x, y and the bias are nothing that packing writes: only who needs packed weights and what comes with them waits.
    if (warp == kGatherWarps) {
      if (threadIdx.x % 32 == 0) copy_weights<Format>(params, shared);
      return;
    }
    constexpr bool kAny = SOURCE == Source::kAny;
    [[maybe_unused]] constexpr int kPixels = 64 * WARPGROUPS * BLOCKS_M;
    const Plan& plan = params.plan;
    [[maybe_unused]] int32_t* const table = reinterpret_cast<int32_t*>(modelnew_gather_smem + shared.layout.table);
    if constexpr (SOURCE == Source::kTaps) {
      if (warp == 0 && threadIdx.x % 32 == 0) load_taps<Format>(params, shared, PIECES * Format::CHANNELS);
      return;
    }
    if constexpr (SOURCE == Source::kImages) {
      if (warp == 0) load_images<Format>(params, shared);
      return;
    }
    if constexpr (SOURCE == Source::kBoxes || SOURCE == Source::kPhases || kAny) {
      if (!kAny || plan.in_boxes) {
        if (warp == 0) load_boxes<Format, SOURCE == Source::kPhases>(params, shared, PIECES * Format::CHANNELS);
        return;
      }
    }
    if (plan.copied) hopper::wait_for_prerequisites();
    if constexpr (SOURCE == Source::kSingle || kAny) {
      if (!kAny || plan.loads == Loads::kSingle)
        return gather_stages<Format, Loads::kSingle, kPixels>(params, shared, table);
    }
    if constexpr (SOURCE == Source::kChannels || kAny) {
      if (!kAny || plan.loads == Loads::kChannels)
        return gather_stages<Format, Loads::kChannels, kPixels>(params, shared, table);
    }
    if constexpr (SOURCE == Source::kPixels || kAny)
      gather_stages<Format, Loads::kPixels, kPixels>(params, shared, table);
  }
#endif
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// ---- Host: what to compute ----

inline Phased phased_of(const Problem& problem, Operator op) {
  const Correlation of = correlation_of_problem(problem, op);
  return {of, 1, unphased(of)};
}

// ---- Host: how to cut it up ----

struct Device {
  int sms;
};

// Addresses of the tensors; zeros, before they are known, stand for aligned ones.
struct Alignment {
  uint64_t in, out;
};

// Pixels of all images follow one another at one step.
inline bool dense_pixels(const int64_t (&stride)[4], int64_t images, int rows, int columns) {
  return (rows == 1 || stride[2] == columns * stride[3]) &&
         (images == 1 || stride[0] == static_cast<int64_t>(rows) * columns * stride[3]);
}

// All pixels of an image follow one another, channel by channel. Of fewer pixels there would be many copies, one of
// each lane at most; of more a tile, which has pixels of two images, reads twice what it needs.
constexpr int kLeastImagePixels = 16, kMostImagePixels = 200;
inline bool may_come_in_images(const Phased& of) {
  const int64_t plane = static_cast<int64_t>(of.H) * of.W;
  return dense_points_of(of) && plane >= kLeastImagePixels && plane <= kMostImagePixels && of.in_stride[3] == 1 &&
         (of.H == 1 || of.in_stride[2] == of.W) && of.in_stride[1] == plane && (of.N == 1 || of.in_stride[0] % 4 == 0);
}

constexpr int kSplits[] = {1, 2, 3, 4, 8};

struct TileShape {
  int tile_n, blocks_m, pieces;
  double stage_cycles;  // to multiply
  // How x may come, as bits by the number of a Source: what is not among them is never fast enough in this shape to be
  // worth the time to compile it. kAny: as well in 16 bits.
  unsigned sources;
  bool contained = false;
  int warpgroups = 2;  // that multiply, of a block; 1: of points only; 3: of points, or contained
  bool lands = false;      // then blocks_m is rows of y, of a warpgroup, and stage_cycles are those of a step
  double tile_cycles = 0;  // and those but for the steps
  int columns = 0, stride = 0;  // of what lands
};
constexpr unsigned bit(Source source) { return 1u << static_cast<int>(source); }
constexpr unsigned kBySingle = bit(Source::kSingle), kByPixels = bit(Source::kPixels),
                   kByImages = bit(Source::kImages), kByChannels = bit(Source::kChannels),
                   kByBoxes = bit(Source::kBoxes), kByPhases = bit(Source::kPhases), kByTaps = bit(Source::kTaps),
                   k16Bits = bit(Source::kAny), kByLanding = bit(Source::kLanding);
constexpr unsigned kByMost = kByPixels | kByChannels | kByBoxes | kByPhases | kByTaps;
constexpr TileShape kTileShapes[] = {{256, 1, 8, 1210, kByMost | kByImages | k16Bits},
                                     {128, 2, 8, 1600, kByPixels | kByBoxes | kByPhases | k16Bits},
                                     {64, 2, 8, 1150, kBySingle | kByPixels | kByBoxes | kByTaps},
                                     {128, 2, 4, 895, kBySingle | kByChannels},
                                     {128, 1, 8, 854, kBySingle | kByImages | kByMost},
                                     {256, 1, 8, 1210, kByBoxes, true},
                                     {128, 2, 8, 1240, kByBoxes, true},
                                     {128, 1, 8, 640, kByBoxes, true},
                                     {64, 2, 8, 700, kByBoxes, true},
                                     {64, 2, 8, 1150, kByPixels | kByBoxes, false, 1},
                                     {128, 2, 8, 1632, kByPixels, false, 1},
                                     {128, 1, 8, 854, kByPixels | kByBoxes, false, 1},
                                     {64, 7, 2, 2760, kByLanding, true, 2, true, 5600, 32, 1},
                                     {64, 8, 2, 3010, kByLanding, true, 2, true, 8300, 32, 1},
                                     {128, 7, 2, 2300, kByLanding, true, 2, true, 5300, 32, 1},
                                     {128, 8, 2, 2590, kByLanding, true, 2, true, 5300, 32, 1},
                                     {128, 7, 2, 2050, kByLanding, true, 2, true, 5000, 28, 1},
                                     {128, 14, 2, 2200, kByLanding, true, 2, true, 6000, 14, 1},
                                     {128, 7, 2, 3900, kByLanding, true, 2, true, 6000, 28, 2},
                                     {128, 14, 2, 3500, kByLanding, true, 2, true, 8000, 14, 2},
                                     {128, 7, 2, 1800, kByLanding, true, 2, true, 5000, 14, 2},
                                     {128, 1, 8, 1050, kByBoxes, false, 3},
                                     {128, 1, 8, 900, kByBoxes, true, 3},
                                     {64, 1, 8, 1000, kByPixels | kByBoxes, false, 3},
                                     {16, 6, 2, 1500, kByLanding, true, 2, true, 7500, 32, 1}};
// The tile of calls that are done again.
constexpr TileShape kAgainShape{64, 2, 8, 1150, ~(kByTaps | kByImages)};

// Constants of the estimate, in cycles of an SM at 1.65 GHz. Fitted to times of all tiles: docs/lab/gather.md.
//
// Bytes a cycle of one SM, all SMs at once: of memory; of x into slots, by how they are filled (single words of windows
// are never what a tile waits for); of y.
constexpr double kMemoryRate = 21.8, kSingleRate = 100, kWordsRate = 5.8, kPixelsRate = 22, kChannelsRate = 10.7;
constexpr double kBoxRate = 200, kStoreRate = 20, kStoreOneRate = 13, kStoreChannelsRate = 23.5, kStoreBoxRate = 400;
// Images: bytes a cycle of x and weights; cycles of a stage's products, by those of fours; cycles of a call.
constexpr double kImagesRate = 70, kImagesFactor = 0.8, kImagesCycles = 2500;
constexpr double kTapsRate = 60;          // of x and weights where taps lie apart: it rarely counts
constexpr double kStorePlanesRate = 21;  // of planes by boxes
constexpr int kMostResidentTiles = 8;    // of channels: 132 SMs are 4 more than a multiple of it
constexpr double kLost = 0.08;           // of what takes less time than what a tile waits for
constexpr double kTileCycles = 1500;     // to fill and to drain
constexpr double kSmallTilesHide = 4;    // divides that in tiles of three warpgroups with 64 channels
constexpr double kCopyCycles = 3000;     // of copying x, but for its bytes
// Parts of a tile: cycles but for their sums, cycles of each, and bytes a cycle of the sums.
constexpr double kMeetCycles = 1500, kMeetPartCycles = 1600, kMeetRate = 100;
// The share of the blocks of all SMs that clusters get (docs/lab/gather.md).
constexpr double kClusterShare = 0.88;
constexpr double kGroupsFactor = 1.4;  // of windows of groups, not contained
// Windows of planes at a stride, not contained, whose values come one by one.
constexpr double kStepsFactor = 1.2;
// Two blocks an SM that store planes without boxes, while their code comes from memory, as other kernels have run
// before. It counts less the longer a call takes, as what estimates are off counts more then (docs/lab/gather.md).
constexpr double kColdCycles = 3300, kColdTurns = 45;
// The same of points of TF32 operands in channels_last: of tiles of 256 channels, of 64 with two blocks an SM
// (docs/lab/gather.md).
constexpr double kColdChannelsCycles = 3300;
// Points with more than so many stages of TF32 operands (docs/lab/gather.md).
constexpr int kFewStages = 4;
constexpr double kStagesFactor = 0.92;
// Taps apart (docs/lab/gather.md).
constexpr double kTapsFactor = 0.87;
constexpr double kPackCycles = 3300;  // of a launch less, where nothing is packed
// Three more launches, where gather multiplies and where tma does: planes, and others, which are channels_last and 1x1
// at a stride; bytes a cycle of the copy.
constexpr double kContainCycles = 13000, kContainForTmaCycles = 7700, kContainForTmaOthersCycles = 10000;
constexpr double kContainRate = 17;
// Long tiles, of so many stages at least, in so many turns and tiles of channels; not of three warpgroups
// (docs/lab/gather.md).
constexpr int kLongTileStages = 64, kManyTurns = 4, kManyTiles = 4;
constexpr double kLongTileFactor = 0.9;

// Landing: cycles beside those of tiles (see kTileShapes), and of each weight; with many turns tiles are taken times
// this, as the estimate of copies is too long there (docs/lab/gather.md).
constexpr double kLandingCycles = 19500, kLandingWeightCycles = 3.5e-3, kLandingTurnsFactor = 1.08;
constexpr int kFewLandingTurns = 4;
constexpr double kLandingChannelsFactor = 0.93;  // the same in channels_last, of any turns

inline int64_t copied_bytes(const Phased& of, int element_bytes) {
  const Phased copy = copied(of, false);
  return of.N * copy.H * copy.W * of.groups * of.in_channels * element_bytes;
}

inline int64_t contained_bytes(const Phased& of, bool by_tma = false) {
  const Phased copy = copied(of, true, by_tma);
  return of.N * copy.in_stride[0] * static_cast<int64_t>(sizeof(Half));
}

// Whether fp32 under the TF32 contract may be contained.
inline bool may_contain(const Phased& of, int element_bytes) {
  const bool whole_stages = of.groups == 1 || merged(of).in_channels % kContainedBlock == 0;
  return element_bytes == 4 && whole_stages && contained_bytes(of) <= kMostCopiedBytes;
}

// The same without a copy: list places are ints.
inline bool may_land(const Phased& of, int element_bytes) {
  return element_bytes == 4 && of.groups == 1 && of.S == kLandingTaps && of.stride_h == of.stride_w &&
         of.stride_h <= 2 && of.dilation_h == 1 && of.dilation_w == 1 &&
         ((of.in_stride[3] == 1 && of.out_stride[3] == 1) || (of.in_stride[1] == 1 && of.out_stride[1] == 1)) &&
         of.N * of.H * of.W * ((of.in_channels + 7) / 8 * 8) < (int64_t{1} << 31);
}

// Fewer channels have not been tried, those of y but where x lands. Channels_last needs more of them for a copy, as x
// comes by boxes as it is, unless it has many outputs (docs/lab/gather.md).
constexpr int kLeastContained = 64, kLeastContainedChannels = 128;
constexpr int64_t kManyOutputs = 1 << 19;

// Rows of packed weights: whole tiles of all groups.
inline int64_t packed_rows(const Phased& of, int tile_n) {
  return of.groups * ceil_div(of.out_channels, tile_n) * tile_n;
}

// Boxes at a stride: the longest one of a map of boxes, and slots of a row, fewer of which have not been tried.
constexpr int kMostBoxStep = 8, kLeastSteppingPitch = 8;

// Which outputs make a tile.
struct Cut {
  enum { kPoints, kImages, kPacked, kLines } kind;  // kImages: points, whose x comes image by image
  int tile_p, tile_q;  // of kLines: lines, columns
};

// Least pixels of a plane of y, [channel][pixel], that is stored by boxes of 16 pixels: these are of two images at
// most. Planes of no whole sectors, of 32 bytes, are stored more slowly like that, and so is what two blocks an SM
// store. Boxes of tiles of lines are parts of a row (docs/lab/gather.md).
constexpr int kLeastBoxedPlane = 16;

// Whether the taps lie so far apart that stages may hold what one of them reads, instead of a window for all of them:
// rows of taps, or a single row's. Rows next to one another, as parts have that the engine dilated makes, are faster in
// contained windows (docs/lab/gather.md).
inline bool lie_apart(const Phased& of) {
  return of.R > 1 ? of.dilation_h > 1 : of.S > 1 && of.dilation_w > 1;
}

// Whether an im2col map holds the offsets of the first pixel, of the last one, and of taps.
inline bool boxes_reach(const Phased& of) {
  return of.stride_h == 1 && of.stride_w == 1 && hopper::can_map(hopper::columns_of(of));
}

// Completes a plan; false when it does not fit.
inline bool complete(const Phased& of, int out_bytes, const Device& device, const Alignment& address,
                     const TileShape& shape, int splits, const Cut& cut, bool is_copied, Plan& plan) {
  plan = Plan{};
  plan.contained = shape.contained;
  plan.copied = is_copied;
  const int in_bytes = plan.contained ? 2 : out_bytes, channels = 16 / in_bytes;
  plan.tile_n = shape.tile_n;
  plan.blocks_m = shape.blocks_m;
  plan.warpgroups = shape.warpgroups;
  plan.points = cut.kind == Cut::kPoints || cut.kind == Cut::kImages;
  plan.packed = cut.kind == Cut::kPacked;
  plan.apart = plan.points && of.R * of.S > 1;
  if (plan.points ? shape.pieces < kLeastPointPieces : plan.warpgroups != 2 && !plan.contained) return false;
  const int pixels = tile_pixels(plan);
  // Packed tiles start at multiples of what divides both.
  const int most_skipped = plan.packed ? of.Q - greatest_common_divisor(pixels, of.Q) : 0;
  const int tile_p = plan.tile_p = plan.packed ? (most_skipped + pixels - 1) / of.Q + 1 : cut.tile_p;
  const int tile_q = plan.tile_q = plan.packed ? of.Q : cut.tile_q;
  plan.tiles_n = static_cast<int>(ceil_div(of.out_channels, plan.tile_n));
  const int64_t lines = of.N * of.P;
  plan.tiles_q = plan.points ? 1 : static_cast<int>(ceil_div(of.Q, tile_q));
  if (static_cast<int64_t>(of.P) * of.Q > (1 << 30)) return false;

  const bool aligned_in = address.in % 16 == 0;
  const bool channels_last = of.in_stride[1] == 1 && of.in_channels % channels == 0 &&
                             of.in_stride[3] % channels == 0 && of.in_stride[2] % channels == 0 &&
                             of.in_stride[0] % channels == 0;
  const bool dense_points = dense_points_of(of) && dense_fours(of.in_stride, of.H, of.W, of.N, of.in_channels);
  plan.loads = channels_last && aligned_in                        ? Loads::kChannels
               : dense_points && address.in % (4 * in_bytes) == 0 ? Loads::kPixels
                                                                  : Loads::kSingle;
  int64_t images = 1 + (plan.points ? (pixels - 1) / (static_cast<int64_t>(of.P) * of.Q) + 1 : (tile_p - 1) / of.P + 1);
  images = std::min(images, of.N);
  if (plan.points) {
    plan.slots = pixels;
    plan.quarters = plan.loads == Loads::kPixels && in_bytes == 2;
    plan.piece_slots = (plan.quarters ? pixels + 8 : pixels) | 1;
  } else {
    plan.row_step = of.R == 1 ? 1 : of.stride_h;
    plan.column_step = of.S == 1 ? 1 : of.stride_w;
    plan.in_row_step = of.R == 1 ? of.stride_h : 1;
    plan.in_column_step = of.S == 1 ? of.stride_w : 1;
    const int64_t span = static_cast<int64_t>(of.R - 1) * of.dilation_h + 1;
    const int64_t gap = span - plan.row_step;
    const int64_t pitch =
        static_cast<int64_t>(tile_q - 1) * plan.column_step + static_cast<int64_t>(of.S - 1) * of.dilation_w + 1;
    // Where an image's lines are so many tiles, no tile has those of two.
    const bool of_one = !plan.packed && of.P % tile_p == 0;
    const int64_t seams = of_one ? 0 : std::min<int64_t>(images - 1, (of.P - 1 + tile_p - 1) / of.P);
    const int64_t rows = (tile_p - 1) * static_cast<int64_t>(plan.row_step) + std::max<int64_t>(gap, 0) * seams + span;
    if (gap < 0 && of.P > 1 && images > 1 && of.P * static_cast<int64_t>(plan.row_step) + gap <= 0) return false;
    if (rows * pitch > 4096) return false;
    plan.gap = static_cast<int>(gap);
    plan.pitch = static_cast<int>(pitch);
    plan.slots = static_cast<int>(rows * pitch);
    plan.piece_slots = plan.slots | 1;
  }
  const int64_t tiles_m =
      plan.points || plan.packed ? ceil_div(lines * of.Q, pixels) : ceil_div(lines, tile_p) * plan.tiles_q;
  if (tiles_m > (1 << 30)) return false;
  plan.tiles_m = static_cast<int>(tiles_m);

  // Offsets of pixels from the tile's first image on are ints.
  const auto reach = [&](const int64_t (&stride)[4], int rows, int columns) {
    return images * std::abs(stride[0]) + rows * std::abs(stride[2]) + columns * std::abs(stride[3]);
  };
  if (reach(of.in_stride, of.H, of.W) >= int64_t{1} << 31 || reach(of.out_stride, of.P, of.Q) >= int64_t{1} << 31)
    return false;

  plan.pieces = shape.pieces;
  plan.blocks_c = static_cast<int>(ceil_div(of.in_channels, plan.pieces * channels));
  if (static_cast<int64_t>(plan.blocks_c) * of.R * of.S > (1 << 20)) return false;
  plan.iterations = stages_before(of.phases, plan.blocks_c);
  plan.split_blocks = static_cast<int>(ceil_div(plan.blocks_c, splits));
  plan.splits = static_cast<int>(ceil_div(plan.blocks_c, plan.split_blocks));
  if (plan.splits != splits) return false;
  plan.tiles = static_cast<int64_t>(plan.tiles_m) * plan.tiles_n * of.groups;
  if (plan.tiles > (1 << 30) - 64 * device.sms) return false;  // units are ints
  // As many as all SMs take, again and again; the last ones are cut up.
  if (splits > 1 && out_bytes != 4) return false;
  const int at_once = blocks_per_sm(plan.warpgroups) * device.sms;
  plan.whole_tiles = static_cast<int>(splits > 1 ? plan.tiles / at_once * at_once : plan.tiles);
  const int64_t parts = (plan.tiles - plan.whole_tiles) * splits;
  plan.units = static_cast<int>(plan.whole_tiles + parts);
  if (splits > 1 && parts == 0) return false;
  plan.rows = plan.loads == Loads::kChannels && plan.pieces == 8;
  // Boxes take neighbouring columns or those at a step, and the last one of a group has no channels of the next group.
  const bool from_phases = phases_of(of.phases) > 1 && !plan.contained;
  const bool dense_in =
      !plan.points || plan.apart || (dense_points_of(of) && dense_pixels(of.in_stride, of.N, of.P, of.Q));
  plan.box_step = plan.points ? 1 : from_phases ? 2 : plan.in_column_step;
  const bool steps = plan.box_step > 1 || plan.in_row_step > 1;
  const bool whole_rows = plan.box_step <= kMostBoxStep && plan.pitch * plan.box_step <= 256 &&
                          (!steps || plan.pitch >= kLeastSteppingPitch);
  plan.in_boxes = plan.rows && dense_in && (plan.points || whole_rows) &&
                  (of.groups == 1 || of.in_channels % (plan.pieces * channels) == 0) &&
                  of.N * static_cast<int64_t>(of.H) * of.W < (int64_t{1} << 30) && of.in_stride[2] > 0 &&
                  of.in_stride[3] > 0 && (of.N == 1 || of.in_stride[0] > 0);
  plan.in_images = cut.kind == Cut::kImages;
  if (plan.in_images && !(may_come_in_images(of) && plan.loads == Loads::kSingle && out_bytes == 4 && aligned_in &&
                          of.in_channels % (plan.pieces * channels) == 0))
    return false;
  static_assert((256 - 2) / kLeastImagePixels + 2 <= 32, "a lane orders copies of one image");
  const int most_images = plan.in_images ? (pixels - 2) / (of.P * of.Q) + 2 : 0;  // of a tile
  plan.in_phases = plan.in_boxes && from_phases;
  if (plan.apart && !(plan.in_boxes && out_bytes == 4 && !plan.contained && boxes_reach(of))) return false;
  // Phases come by boxes of rows; and windows of 1x1 are for what does.
  if (from_phases && (plan.points || !plan.in_boxes)) return false;
  if (!plan.points && of.R == 1 && of.S == 1 && !plan.in_boxes) return false;
  const bool sixteen_bits = out_bytes == 2;
  const Source source = source_of_plan(plan);
  if ((shape.sources & (sixteen_bits ? k16Bits : bit(source))) == 0) return false;
  const bool may_be_parts = plan.contained ? may_cut_up<Contained>(plan.tile_n, plan.blocks_m, source)
                                           : may_cut_up<Tf32>(plan.tile_n, plan.blocks_m, source);
  if (splits > 1 && !may_be_parts) return false;
  // Larger tiles are cut up in the last turn only: if all are parts, smaller ones are faster (docs/lab/gather.md).
  if (splits > 1 && plan.tile_n == 256 && plan.whole_tiles == 0) return false;
  plan.dense_slots = plan.in_boxes && !plan.in_phases && !plan.apart &&
                     (plan.points || (phases_of(of.phases) > 1 && plan.packed));
  // Many small boxes take longer than the one or four taps for which they are read (docs/lab/gather.md).
  if (phases_of(of.phases) > 1 && !plan.in_phases && !plan.dense_slots && plan.pitch < 64) return false;
  plan.x_boxes = static_cast<int>(plan.dense_slots ? ceil_div(plan.slots, 256) : plan.slots / std::max(plan.pitch, 1));
  plan.box_slots =
      plan.dense_slots ? static_cast<int>(ceil_div(ceil_div(plan.slots, plan.x_boxes), 8)) * 8 : plan.pitch;
  if (plan.apart) {
    plan.x_boxes = 1;
    plan.box_slots = pixels;
  }
  plan.planes = in_bytes == 4 && plan.points && plan.loads != Loads::kChannels;
  plan.plane_slots = plan.in_images ? of.P * of.Q : pixels + 8;
  plan.image_words = plan.in_images ? plan.pieces * channels * plan.plane_slots : 0;
  plan.x_stage_bytes = plan.in_images  ? most_images * plan.image_words * 4
                       : plan.planes   ? plan.pieces * channels * plan.plane_slots * 4
                       : plan.in_boxes ? (plan.x_boxes * plan.box_slots * 128 + 1023) / 1024 * 1024
                                       : (plan.pieces * plan.piece_slots * 16 + 127) / 128 * 128;
  plan.w_stage_bytes = plan.pieces * plan.tile_n * 16;
  // 16 bits only, as fp32 is to be rounded, and a filter of one tap, whose input channels are neighbours.
  plan.w_in_boxes = of.R * of.S == 1 && of.groups == 1 && of.w_stride_in == 1 && of.w_stride_out > 0 &&
                    of.w_stride_out % channels == 0 && out_bytes == 2 && !is_copied && plan.pieces == 8 &&
                    plan.x_stage_bytes % 1024 == 0;
  if (packed_rows(of, plan.tile_n) * plan.iterations * plan.pieces >= (1 << 30)) return false;

  plan.out_channels_last = of.out_stride[1] == 1 && of.out_channels > 1;
  // In channels_last these are slower where there are several tiles of channels (docs/lab/gather.md).
  const bool small = plan.warpgroups == 3 && plan.tile_n == 64;
  if (small && plan.out_channels_last && plan.tiles_n > 1) return false;
  const bool aligned_out = address.out % (4 * out_bytes) == 0;
  if (plan.out_channels_last) {
    plan.vector = aligned_out && of.out_channels % 4 == 0 && of.out_stride[0] % 4 == 0 && of.out_stride[2] % 4 == 0 &&
                          of.out_stride[3] % 4 == 0
                      ? 4
                      : 1;
  } else {
    const bool fours = dense_fours(of.out_stride, of.P, of.Q, of.N, of.out_channels);
    const bool whole =
        plan.points || plan.packed || (tile_q == of.Q ? tile_p * of.Q % 4 == 0 : tile_q % 4 == 0 && of.Q % 4 == 0);
    plan.vector = aligned_out && fours && whole ? 4 : 1;
  }

  // By boxes outputs are stored that follow one another in memory. The last one of a group has no channels of the next.
  const bool dense_out =
      plan.out_channels_last
          ? dense_pixels(of.out_stride, of.N, of.P, of.Q) && of.N * of.P * of.Q < (int64_t{1} << 30)
          : plan.warpgroups > 1 && of.P * of.Q >= kLeastBoxedPlane && of.P * of.Q % 8 == 0 && of.N < (1 << 30);
  const bool in_sixteens = plan.points || plan.packed || (tile_q % 16 == 0 && of.Q % 16 == 0);
  plan.boxes = in_sixteens && dense_out && out_bytes == 4 && plan.vector == 4 &&
               (of.groups == 1 || of.out_channels % kStagedChannels == 0);

  // Points take as many stages of x as of w, windows one of x for all taps. Of fp32 points, contained or not, in tiles
  // of 128 channels there is room for more than four of each, which hide more of the memory's latency: not by pieces
  // (docs/lab/gather.md).
  const int taps = of.R * of.S;
  const auto fits_with = [&](int x_stages, int w_stages) {
    plan.x_stages = x_stages;
    plan.w_stages = w_stages;
    plan.smem_bytes = shared_layout(plan).end;
    return plan.smem_bytes <= (plan.warpgroups == 1 ? kHalfSharedBytes : kSharedBytes);
  };
  plan.blocks = std::min(plan.units, at_once);
  bool fits = false;
  // Blocks stride over tiles by gridDim.x: a multiple of tiles_n, so that a block has the same channels of y each time,
  // if that takes no more turns (docs/lab/gather.md).
  if (plan.points && splits == 1 && of.groups == 1 && plan.iterations <= kMaxStages &&
      plan.tiles_n <= kMostResidentTiles) {
    const int blocks = plan.units > at_once ? at_once / plan.tiles_n * plan.tiles_n : plan.units;
    fits = plan.resident = blocks > 0 && ceil_div(plan.units, blocks) == ceil_div(plan.units, at_once) &&
                           fits_with(kFewStages, plan.iterations);
    if (fits) plan.blocks = blocks;
  }
  const bool in_bulk = comes_in_bulk(plan);
  if (plan.points && out_bytes == 4 && plan.tile_n >= 128 && (in_bulk || plan.loads == Loads::kPixels)) {
    for (int stages = kMaxStages; stages > kFewStages && !fits; --stages) fits = fits_with(stages, stages);
  }
  for (int x_stages = plan.points || taps < 4 ? kFewStages : 3; x_stages >= 2 && !fits; --x_stages) {
    // A phase of x is read by few taps: weights are soon used up (docs/lab/gather.md).
    const int least = plan.in_phases && x_stages > 2 ? 4 : 3;
    for (int w_stages = kMaxStages; w_stages >= least && !fits; --w_stages) fits = fits_with(x_stages, w_stages);
  }
  if (!fits) return false;

  const double tile_bytes = static_cast<double>(pixels) * plan.tile_n * out_bytes;
  // Clusters have a tile each, all at once, and room for its sums where rings were.
  if (splits > 1) {
    const bool all_at_once = parts <= plan.blocks && (splits == 2 || plan.blocks <= kClusterShare * at_once);
    const SharedLayout layout = shared_layout(plan);
    if (!all_at_once || plan.blocks % splits != 0 || tile_bytes > layout.end - layout.x_ring) return false;
  }

  const double rate = in_bulk                        ? kBoxRate
                      : plan.loads == Loads::kSingle ? plan.planes ? kWordsRate : kSingleRate
                      : plan.loads == Loads::kPixels ? kPixelsRate
                                                     : kChannelsRate;
  const double store_rate = plan.boxes               ? plan.out_channels_last ? kStoreBoxRate : kStorePlanesRate
                            : plan.out_channels_last ? kStoreChannelsRate
                            : plan.vector == 4       ? kStoreRate
                                                     : kStoreOneRate;
  // All rates are those of an SM, however many tiles it has at once, but a warpgroup multiplies no faster for being
  // alone. Two blocks hide half of each other's filling and draining. In channels_last two blocks an SM are faster than
  // that, unless weights are resident.
  const double hidden = plan.warpgroups == 1 && plan.in_boxes && !plan.resident && splits == 1 ? 0.97 : 1;
  // All that the next tile reads is under way while this one is stored, which hides as much as a second block does. Not
  // in tiles of 128 channels (docs/lab/gather.md).
  const bool ahead = plan.resident && !plan.contained && !plan.out_channels_last && plan.tile_n == 64 &&
                     plan.iterations < plan.x_stages;
  const double hides = small ? kSmallTilesHide : ahead ? 2 : 1;
  // A stage of images takes as long as its products, or as the L2 cache takes to give all of it.
  const double stage_cycles =
      plan.in_images
          ? std::max(kImagesFactor * shape.stage_cycles, (plan.x_stage_bytes + plan.w_stage_bytes) / kImagesRate)
          : shape.stage_cycles;
  const auto turn_cycles = [&](int blocks_c, int64_t tiles) {
    const double in_bytes = 16.0 * tiles * plan.slots * plan.pieces * blocks_c, out_bytes = tiles * tile_bytes;
    // Where taps lie apart the L2 cache has to give x to each, and weights as quickly.
    const double of_taps = in_bytes * taps + static_cast<double>(tiles) * blocks_c * taps * plan.w_stage_bytes;
    const double multiply = static_cast<double>(stages_before(of.phases, blocks_c)) * stage_cycles;
    const double load = plan.apart ? of_taps / kTapsRate : in_bytes / rate;
    const double work = multiply + out_bytes / store_rate;
    const double memory = (in_bytes / plan.tiles_n + out_bytes) / kMemoryRate;
    return hidden * ((1 - kLost) * std::max({work, load, memory}) + kLost * (work + load + memory) +
                     kTileCycles / std::max<double>(hides, static_cast<double>(tiles)));
  };
  // Cycles of so many tiles. In the last turn SMs may have one each, where there are two blocks.
  const auto cycles_of = [&](int64_t tiles, int blocks_c) {
    const int64_t rest = ceil_div(tiles % at_once, device.sms);
    return tiles / at_once * turn_cycles(blocks_c, blocks_per_sm(plan.warpgroups)) +
           (rest > 0 ? turn_cycles(blocks_c, rest) : 0);
  };
  plan.cycles = cycles_of(plan.whole_tiles, plan.blocks_c);
  if (plan.w_in_boxes) plan.cycles -= std::min(kPackCycles, plan.cycles / 2);
  if (plan.in_images) plan.cycles += kImagesCycles;
  if (plan.warpgroups == 1 && !plan.boxes) plan.cycles += std::max(0.0, kColdCycles - plan.cycles / kColdTurns);
  const double meet_cycles = kMeetCycles + kMeetPartCycles * splits + tile_bytes / kMeetRate;
  if (splits > 1) plan.cycles += cycles_of(parts, plan.split_blocks) + meet_cycles;
  return true;
}

// The same for what is contained on its way.
inline bool complete_landing(const Phased& of, const Device& device, const Alignment& address,
                             const TileShape& tile_shape, Plan& plan) {
  plan = Plan{};
  plan.contained = plan.lands = true;
  plan.warpgroups = 2;
  plan.splits = 1;
  plan.pieces = tile_shape.pieces;
  plan.blocks_m = tile_shape.blocks_m;
  Landing& landing = plan.landing;
  const bool is_channels_last = of.in_stride[3] != 1 || of.out_stride[3] != 1;
  const bool in_pairs = !is_channels_last && of.W % 4 == 2 && of.H % 2 == 0 && of.in_stride[2] == of.W;
  const LandingShape shape{tile_shape.tile_n, tile_shape.columns, tile_shape.blocks_m, tile_shape.stride,
                           is_channels_last, in_pairs ? 2 : 1};
  if (!shape.has_kernel()) return false;
  landing.shape = shape;
  plan.tile_n = shape.gemm_rows();
  if (of.stride_h != shape.stride || ((shape.shares() || shape.stacks()) && of.R != kSharedRows)) return false;
  if (shape.stacks() && of.out_channels > shape.tile_n) return false;
  // Fewer columns have not been tried. Rows that are staged for a box of planes, of 128 bytes, would end in another
  // tile.
  if (of.Q < shape.columns - shape.columns / 8) return false;
  if (shape.columns < 32 && !landing.shape.channels_last && of.Q > shape.columns) return false;
  // Boxes: strides in sixteens of bytes, and what is side by side, whose ends they cross.
  const auto in_fours = [&](const int64_t (&stride)[4], int channels, int rows, int columns) {
    const auto is = [](int64_t step, bool matters) { return !matters || (step > 0 && step % 4 == 0); };
    return is(stride[0], of.N > 1) && is(stride[2], rows > 1) &&
           (landing.shape.channels_last ? is(stride[3], columns > 1) && channels % 4 == 0
                                        : is(stride[1], channels > 1) && columns % 4 == 0);
  };
  const int64_t in_stride[4] = {of.in_stride[0], of.in_stride[1], of.in_stride[2] * shape.pairs, of.in_stride[3]};
  if (!in_fours(in_stride, of.in_channels, of.H / shape.pairs, of.W * shape.pairs) || address.in % 16 != 0)
    return false;
  plan.boxes = shape.stores_boxes();
  if (plan.boxes && (!in_fours(of.out_stride, of.out_channels, of.P, of.Q) || address.out % 16 != 0)) return false;
  const bool has_whole_rows = !shape.channels_last && of.W == shape.box_columns() && of.pad_w == kWholeRowsPadding &&
                              (of.in_stride[2] == of.W || of.H == 1);
  if (shape.whole_rows() && !has_whole_rows) return false;
  const int warpgroup_tiles = shape.shares() ? 1 : 2;
  const int window_rows = (shape.window_rows() - of.R) / shape.stride + 1;
  const int most_rows = std::min(std::min(shape.rows, window_rows / warpgroup_tiles) / shape.pairs * shape.pairs, of.P);
  if (most_rows < 1) return false;
  landing.tiles_p = static_cast<int>(ceil_div(of.P, most_rows * warpgroup_tiles));
  landing.rows = static_cast<int>(ceil_div(of.P, int64_t{landing.tiles_p} * warpgroup_tiles));
  if (shape.pairs == 2) landing.rows = round_up(landing.rows, 2);  // all tiles begin with the same one of a pair
  landing.span = landing.rows * warpgroup_tiles;
  landing.tiles_p = static_cast<int>(ceil_div(of.P, landing.span));
  landing.window_rows = shape.stride * (landing.span - 1) + of.R;
  const int rows_of_taps = shape.stacks() ? 1 : of.R;
  if (shape.stride == 1) {
    const int last = (landing.span - landing.rows + rows_of_taps - 1) * shape.pitch() + kLandingTaps - 1 +
                     2 * shape.product_slots();
    landing.slots = (std::max(landing.window_rows * shape.pitch(), last) + 7) / 8 * 8;
  } else {
    landing.slots = 4 * shape.phase_slots();
  }
  for (int i = 0; i < 2; ++i)
    landing.lead[i] = shape.channels_last || shape.whole_rows() ? 0
                      : shape.pairs == 1                        ? -of.pad_w & 3
                                                                : (((i - of.pad_h) & 1) * of.W - of.pad_w) & 3;
  landing.stage_bytes = shape.boxes() * shape.box_bytes();
  if (landing.shape.channels_last) landing.stage_bytes = (landing.stage_bytes + 511) / 512 * 512;  // order starts anew
  landing.steps = static_cast<int>(ceil_div(of.in_channels, 16));
  plan.tile_p = landing.span;
  plan.tile_q = shape.columns;
  plan.tiles_q = static_cast<int>(ceil_div(of.Q, shape.columns));
  plan.tiles_n = static_cast<int>(ceil_div(of.out_channels, plan.tile_n));
  const int64_t tiles = of.N * landing.tiles_p * plan.tiles_q * plan.tiles_n;
  if (tiles > (1 << 30) - 64 * device.sms) return false;  // units are ints
  plan.tiles_m = static_cast<int>(tiles / plan.tiles_n);
  plan.tiles = plan.whole_tiles = plan.units = static_cast<int>(tiles);
  plan.blocks_c = landing.steps;
  plan.iterations = plan.blocks_c * rows_of_taps * of.S;
  if (packed_rows(of, plan.tile_n) * plan.iterations * plan.pieces >= (1 << 30)) return false;
  plan.blocks = std::min(plan.units, device.sms);
  plan.x_stage_bytes = landing.slots * kStepPieces * 16;
  landing.w_stages_of_step = shape.shares() ? of.R : 1;
  plan.w_stage_bytes = rows_of_taps / landing.w_stages_of_step * kLandingTaps * kStepPieces * plan.tile_n * 16;
  plan.x_stages = shape.whole_rows() ? kLandingWindows - 1 : kLandingWindows;
  landing.stages = shape.channels_last ? kLandedBoxes - 1 : kLandedBoxes;  // of twice as many channels
  for (plan.w_stages = shape.shares() ? kMostLandingRows : kMostLandingWeights;; --plan.w_stages) {
    if (plan.w_stages < 2) return false;
    plan.smem_bytes = landing_layout(plan).end;
    if (plan.smem_bytes <= kSharedBytes) break;
  }
  landing.by_tiles_p = make_divisor(landing.tiles_p);
  const double turns = static_cast<double>(ceil_div(tiles, device.sms));
  const double tile_cycles = tile_shape.tile_cycles + tile_shape.stage_cycles * landing.steps * of.R / 3.0;
  const double weights = static_cast<double>(of.in_channels) * of.out_channels * of.R * of.S;
  plan.cycles = kLandingCycles + kLandingWeightCycles * weights +
                turns * tile_cycles *
                    (landing.shape.channels_last ? kLandingChannelsFactor
                     : turns > kFewLandingTurns  ? kLandingTurnsFactor
                                                 : 1);
  return true;
}

// 1x1 whose x comes by single words or images, that is: at a stride, or planes of no multiple of 4 pixels. What is read
// is first copied to where channels are neighbours, unless that is a lot. From sizes and strides alone.
inline bool may_copy(const Phased& of, int element_bytes) {
  if (of.R * of.S > 1)  // all of x, for boxes of a tap
    return element_bytes == 4 && lie_apart(of) && boxes_reach(of) && of.in_stride[1] != 1 && of.in_channels % 4 == 0 &&
           copied_bytes(of, element_bytes) <= kMostCopiedBytes;
  const bool dense = dense_points_of(of) && dense_fours(of.in_stride, of.H, of.W, of.N, of.in_channels);
  return of.R == 1 && of.S == 1 && !dense && of.in_stride[1] != 1 && of.in_channels % (16 / element_bytes) == 0 &&
         copied_bytes(of, element_bytes) <= kMostCopiedBytes;
}

// Whether fp32 under the TF32 contract, whose channels are neighbours, may come by boxes of fours of them.
inline bool may_take_phases(const Phased& of, int element_bytes) {
  return element_bytes == 4 && of.groups == 1 && has_phases(of) && of.in_stride[1] == 1 && of.in_channels % 4 == 0;
}

// Read in sectors, and written.
inline double copy_cycles(const Phased& of, int element_bytes, const Device& device) {
  return copied_bytes(of, element_bytes) * (1.0 + std::min(of.stride_w, 8)) / device.sms / kMemoryRate + kCopyCycles;
}

inline double contain_cycles(const Phased& of, const Device& device, bool by_tma = false) {
  const bool is_usual = of.in_stride[1] != 1 && (of.R * of.S > 1 || of.stride_w == 1);
  const int sectors = of.R == 1 && of.S == 1 && of.in_stride[1] != 1 ? std::min(of.stride_w, 8) : 1;
  return contained_bytes(of, by_tma) * (1.0 + 2 * sectors) / device.sms / kContainRate +
         (!by_tma ? kContainCycles : is_usual ? kContainForTmaCycles : kContainForTmaOthersCycles);
}

// `of`: as planned.
inline Divisors divisors(const Phased& of, const Plan& plan) {
  // Whole tiles only, or points, or one line only: nobody asks.
  const auto of_any = [](int64_t number) { return make_divisor(std::max<int64_t>(1, number)); };
  return {of_any(plan.tiles_n), of_any(plan.tiles_m),
          of_any(plan.tiles_q), of_any(plan.tile_q),
          of_any(plan.splits),  of_any(of.P),
          of_any(of.Q),         of_any(static_cast<int64_t>(of.P) * of.Q),
          of_any(plan.pitch),   of_any(of.P * static_cast<int64_t>(plan.row_step) + plan.gap)};
}

// Puts the best plan in a shape of a tile in the place of `best`, if that is none (`found`) or a slower one.
// `more_cycles`: of what happens before, where `of` is that of a copy.
inline void improve(const Phased& of, int out_bytes, const Device& device, const Alignment& address,
                    const TileShape& shape, int forced_splits, double more_cycles, bool is_copied, bool& found,
                    Plan& best) {
  const int pixels = 64 * shape.warpgroups * shape.blocks_m;
  const auto consider = [&](const Cut& cut) {
    if (cut.tile_p < 1 || cut.tile_p * cut.tile_q > pixels) return;
    for (int splits : kSplits) {
      Plan plan;
      if (forced_splits > 0 && splits != forced_splits) continue;
      if (!complete(of, out_bytes, device, address, shape, splits, cut, is_copied, plan)) continue;
      if (of.groups > 1 && of.R * of.S > 1 && !plan.contained) plan.cycles *= kGroupsFactor;
      const bool steps = !plan.points && !plan.contained && plan.loads == Loads::kSingle && of.stride_w > 1;
      if (steps) plan.cycles *= kStepsFactor;
      if (plan.points && !plan.contained && !plan.in_images && plan.x_stages > kFewStages) plan.cycles *= kStagesFactor;
      if (plan.apart) plan.cycles *= kTapsFactor;
      const bool of_boxes = plan.points && !plan.apart && plan.in_boxes && plan.out_channels_last;
      if (of_boxes && out_bytes == 4 && !plan.contained &&
          (plan.tile_n == 256 || (plan.tile_n == 128 && plan.warpgroups == 3) ||
           (plan.tile_n == 64 && plan.warpgroups == 1)))
        plan.cycles += kColdChannelsCycles;
      const bool many = plan.tiles > int64_t{kManyTurns} * device.sms && plan.tiles_n >= kManyTiles;
      if (plan.contained && plan.warpgroups == 2 && many && plan.iterations >= kLongTileStages)
        plan.cycles *= kLongTileFactor;
      plan.cycles += more_cycles;
      if (found && plan.cycles >= best.cycles) continue;
      best = plan;
      best.by = divisors(of, plan);
      found = true;
    }
  };
  if (of.R == 1 && of.S == 1) {
    const bool from_phases = phases_of(of.phases) > 1 && !shape.contained;
    if (!from_phases) consider({Cut::kPoints, 1, 1});
    if (may_come_in_images(of)) consider({Cut::kImages, 1, 1});
    // At a stride boxes bring rows of what is read.
    const bool in_rows = from_phases || ((of.stride_h > 1 || of.stride_w > 1) && of.in_stride[1] == 1);
    if (in_rows && of.Q <= pixels) consider({Cut::kPacked, 1, 1});
    return;
  }
  if (lie_apart(of)) consider({Cut::kPoints, 1, 1});
  if (is_copied && !shape.contained) return;  // for the sake of taps apart
  if (of.Q <= pixels) consider({Cut::kPacked, 1, 1});
  // Whole rows, or a part of them.
  for (int tile_q : {of.Q, 32, 64, 128, 256}) {
    if (tile_q > pixels || tile_q > of.Q) continue;
    const int most = static_cast<int>(std::min<int64_t>(pixels / tile_q, of.N * of.P));
    for (int tile_p : {most, most & ~1, most & ~3, (most + 1) / 2, (most + 3) / 4, 2, 1})
      consider({Cut::kLines, tile_p, tile_q});
  }
}

// Done again with TF32 operands where contained ones are not fit for it: all, or a phase of y, which begins at these
// elements of w and y.
struct PhaseAgain {
  Phased of;
  Plan plan;
  int64_t w, out;
};
struct Agains {
  PhaseAgain each[kMostOutPhases];
  int count;
};

// False where there is no plan for a phase, or no tap meets it: then nobody would store zeros.
inline bool plan_again(const Phased& of, const Device& device, const Alignment& address, Agains& agains) {
  agains.count = out_phases(of);
  if (agains.count > kMostOutPhases) return false;
  for (int i = 0; i < agains.count; ++i) {
    PhaseAgain& again = agains.each[i];
    again = {of, {}, 0, 0};
    if (has_out_phases(of)) {
      const OutPhase phase = out_phase(of, i);
      if (phase.taps() == 0) return false;
      again.of = correlation_of_phase(of, phase, again.w, again.out);
      again.of.phases = unphased(again.of);
    }
    bool found = false;
    const Alignment first{address.in, address.out + 4 * again.out};
    improve(again.of, 4, device, first, kAgainShape, 1, 0, false, found, again.plan);
    if (!found) return false;
  }
  return true;
}

// The same for contained operands that tma multiplies. Weights are packed as whole rows.
inline bool plan_by_tma(const Phased& of, const Device& device, const Alignment& address, Plan& plan) {
  const Phased copy = copied(of, true, true);
  plan = Plan{};
  plan.contained = plan.copied = plan.by_tma = true;
  plan.splits = 1;
  plan.tile_n = (copy.out_channels + kMostRowsOfBlock - 1) / kMostRowsOfBlock * kMostRowsOfBlock;
  plan.tiles_n = 1;
  plan.pieces = copy.in_channels / 8;
  plan.iterations = copy.R * copy.S;
  if (packed_rows(copy, plan.tile_n) * plan.iterations * plan.pieces >= (1 << 30)) return false;
  if (!can_multiply_contained(copy, device.sms, address.out, plan.cycles)) return false;
  plan.cycles += contain_cycles(of, device, true);
  return true;
}

inline bool make_plan(const Phased& of, int element_bytes, const Device& device, const Alignment& address,
                      int forced, Plan& best, int forced_splits = 0) {
  bool found = false;
  int number = 0;
  const Alignment of_copy{0, address.out};
  Agains again;
  const bool few_in_boxes = of.in_stride[1] == 1 && of.groups == 1 && of.N * of.P * of.Q < kManyOutputs;
  const Phased as_contained = merged(of);
  const int channels = std::min(as_contained.in_channels, as_contained.out_channels);
  const bool is_large = forced >= 0 || channels >= kLeastContained;
  const bool may_do_again = element_bytes == 4 && (forced >= 0 || as_contained.in_channels >= kLeastContained) &&
                            plan_again(of, device, address, again);
  // dgrad at a stride: tma alone has phases of y.
  const bool by_tma_alone = has_out_phases(of);
  const bool contains = may_do_again && is_large && may_contain(of, element_bytes) &&
                        !(by_tma_alone && of.R * of.S == 1) &&
                        (forced >= 0 || by_tma_alone || !few_in_boxes || channels >= kLeastContainedChannels);
  const bool lands = may_do_again && may_land(of, element_bytes);
  for (const TileShape& shape : kTileShapes) {
    if ((forced >= 0 && number++ != forced) || by_tma_alone) continue;
    if (shape.lands) {
      Plan plan;
      if (lands && forced_splits <= 1 && complete_landing(of, device, address, shape, plan) &&
          !(found && plan.cycles >= best.cycles)) {
        best = plan;
        best.by = divisors(of, plan);
        found = true;
      }
      continue;
    }
    if (shape.contained) {
      if (contains)
        improve(copied(of), element_bytes, device, of_copy, shape, forced_splits, contain_cycles(of, device), true,
                found, best);
      continue;
    }
    improve(of, element_bytes, device, address, shape, forced_splits, 0, false, found, best);
    if (may_take_phases(of, element_bytes) && (shape.sources & kByPhases) != 0)
      improve(in_phases(of), element_bytes, device, address, shape, forced_splits, 0, false, found, best);
    if (may_copy(of, element_bytes))
      improve(copied(of, false), element_bytes, device, of_copy, shape, forced_splits,
              copy_cycles(of, element_bytes, device), true, found, best);
  }
  Plan by_tma;
  if (contains && (forced < 0 || forced == number) && plan_by_tma(of, device, address, by_tma) &&
      !(found && by_tma.cycles >= best.cycles)) {
    best = by_tma;
    found = true;
  }
  return found;
}

// Null, or why not. Without a GPU: the sizes alone decide.
inline const char* refusal_of_problem(const Problem& problem, Operator op) {
  if (op != Operator::kFprop && op != Operator::kDgrad) return "it computes outputs and input gradients only";
  if (problem.dtype == DType::kFloat64) return "it has no float64";
  if (problem.dtype == DType::kFloat32 && !uses_tf32(problem, op))
    return "it has TF32 accuracy only, but this problem needs full float32 accuracy";
  if (op == Operator::kDgrad && has_stride(problem) && problem.dtype != DType::kFloat32)
    return "it takes input gradients of 16 bits with stride 1 only";
  const bool fours = problem.dtype == DType::kFloat32 && problem.groups > 1;
  if (problem.C / problem.groups < (fours ? 4 : 8)) return "it takes at least 8 input channels a group, 4 of fp32";
  if (problem.K / problem.groups < (fours ? 4 : 8)) return "it takes at least 8 output channels a group, 4 of fp32";
  return nullptr;
}

struct Planned {
  Phased of;
  Plan plan;
  Agains again;  // where the plan is contained
  bool found;
};

// Planning windows takes the host about as long as they take the GPU.
inline const Planned& plan_of(const Problem& problem, Operator op, const Alignment& address) {
  thread_local Memo<Planned> memo;
  Device device{};
  const int gpu = find_gpu(device.sms);
  return memo.get(key_of(problem, op, address.in, 0, address.out, gpu, device.sms), [&] {
    Planned planned{};
    planned.of = phased_of(problem, op);
    planned.found = make_plan(planned.of, element_bytes(problem.dtype), device, address, -1, planned.plan);
    if (planned.found && planned.plan.contained) planned.found = plan_again(planned.of, device, address, planned.again);
    return planned;
  });
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (const char* reason = refusal_of_problem(problem, op)) return reason;
  Device device{};
  if (find_gpu(device.sms) != 90) return "it needs a Hopper GPU (compute capability 9.0)";
  if (!plan_of(problem, op, Alignment{}).found)
    return op == Operator::kDgrad && has_stride(problem)
               ? "it takes input gradients with up to 4 phases, stride_h times stride_w, each of which some tap meets, "
                 "and at a stride from 64 channels on"
               : "a tile with its halo does not fit into shared memory";
  return nullptr;
}

inline double cycles(const Problem& problem, Operator op) { return plan_of(problem, op, Alignment{}).plan.cycles; }

// Multiply-adds from which on this engine is faster than mma (docs/lab/gather.md).
constexpr double kLeastAgainstMma = 1 << 28;

// 1x1 in channels_last, where neither engine copies x. Both estimates are of kernels alone, at clocks of their own; a
// call takes some microseconds more here, and more for every input channel, and one more by pointwise. Of many pixels
// pointwise's estimate is too short: from kLeastAgainstMma on it is not asked there (docs/lab/gather.md).
constexpr double kCycleOfEstimate = 1.65e3, kCycleOfPointwise = 1.75e3;  // of a microsecond
constexpr double kPackMicroseconds = 6.5, kPackOfChannel = 3.5e-3;
constexpr double kLeastOfPixels = 1 << 26;
constexpr int kFewPixels = 1024;

inline bool pointwise_is_faster(const Problem& problem, Operator op) {
  const double here = cycles(problem, op) / kCycleOfEstimate + kPackMicroseconds + kPackOfChannel * problem.C;
  return kPointwiseEngine.cycles(problem, op) / kCycleOfPointwise + 1 < here;
}

// Taps by a box each: multiply-adds from which on this engine is faster than mma (docs/lab/gather.md).
constexpr double kLeastOfTaps = 1 << 27;

// 1x1 of planes, from few channels to many, where this engine is faster than pointwise (docs/lab/gather.md).
constexpr double kLeastOfWide = 1 << 27;
constexpr int kFewToWiden = 160;

// Groups: mma's tiles have 16 output channels and its chunks 8 input channels, this engine's 64 of either, with zeros
// between groups. mma's estimate counts up to so many channels a group; in channels_last only without a stride
// (docs/lab/gather.md).
constexpr int kFewOfGroup = 16;

// 1x1 of planes with at most so many output channels is faster by pointwise, whose tiles have 32 of them where these
// have 64 (docs/lab/gather.md; before there were tiles of three warpgroups with 64 channels).
constexpr int kFewOfPointwise = 24;

inline const char* yields(const Problem& problem, Operator op) {
  const bool may_be_pointwise = op == Operator::kFprop && problem.groups == 1 && uses_tf32(problem, op) &&
                                kPointwiseEngine.refusal(problem, op) == nullptr &&
                                kPointwiseEngine.yields(problem, op) == nullptr;
  const bool without_stride = problem.stride_h * problem.stride_w == 1;
  if (may_be_pointwise && without_stride && problem.x_stride[1] == 1 && problem.x_stride[3] > 1) {
    const bool many = multiply_adds(problem) >= kLeastAgainstMma, few = multiply_adds(problem) < kLeastOfPixels;
    const bool asked = many ? problem.N * problem.P * problem.Q <= kFewPixels : !few;
    return few || (asked && pointwise_is_faster(problem, op)) ? "pointwise is faster by the estimates" : nullptr;
  }
  const bool pointwise_takes = may_be_pointwise && problem.x_stride[3] == 1;
  if (pointwise_takes && problem.K <= kFewOfPointwise) return "pointwise is faster with few output channels";
  if (problem.dtype != DType::kFloat32 || kMmaEngine.refusal(problem, op) != nullptr) return nullptr;
  const bool widens = pointwise_takes && without_stride && problem.C <= kFewToWiden &&
                      problem.K >= 4 * problem.C;
  const bool by_taps = plan_of(problem, op, Alignment{}).plan.apart;
  if (multiply_adds(problem) < (widens ? kLeastOfWide : by_taps ? kLeastOfTaps : kLeastAgainstMma))
    return "mma is faster with few multiply-adds";
  const int64_t (&in_stride)[4] = op == Operator::kDgrad ? problem.y_stride : problem.x_stride;
  const bool is_known = in_stride[1] != 1 || problem.stride_h * problem.stride_w == 1;
  if (problem.groups > 1 && std::max(problem.C, problem.K) / problem.groups <= kFewOfGroup && is_known &&
      kMmaEngine.cycles(problem, op) < cycles(problem, op))
    return "mma is faster with few channels a group";
  return nullptr;
}

// Where the parts of the workspace start.
struct WorkspaceLayout {
  int64_t samples, list, w_factors, packed, packed_again, copied, end;
};

inline int64_t packed_bytes(const Phased& of, const Plan& plan) {
  return packed_rows(of, plan.tile_n) * plan.iterations * plan.pieces * 16;
}

// For tensors of so many bytes an element; `again`: where the plan is contained.
inline WorkspaceLayout workspace_layout(const Phased& of, const Plan& plan, const Agains& agains, int element_bytes) {
  const auto aligned = [](int64_t bytes) { return ceil_div(bytes, 128) * 128; };
  const int64_t bytes_of_copy = plan.lands       ? 0
                                : plan.contained ? contained_bytes(of, plan.by_tma)
                                : plan.copied    ? copied_bytes(of, element_bytes)
                                                 : 0;
  WorkspaceLayout layout{};
  if (plan.contained) {
    layout.samples = aligned(sizeof(ContainedControl));
    layout.list = layout.samples + aligned(kSampleBlocks * static_cast<int64_t>(sizeof(uint32_t)));
    layout.w_factors = layout.list + aligned(kMostListed * static_cast<int64_t>(sizeof(Listed)));
    layout.packed = layout.w_factors + aligned(4 * packed_rows(merged(of), plan.tile_n));
  }
  layout.packed_again = layout.packed + aligned(packed_bytes(plan.contained ? merged(of) : of, plan));
  int64_t again_bytes = 0;
  for (int i = 0; plan.contained && i < agains.count; ++i)
    again_bytes = std::max(again_bytes, packed_bytes(agains.each[i].of, agains.each[i].plan));
  layout.copied = layout.packed_again + aligned(again_bytes);
  layout.end = layout.copied + aligned(bytes_of_copy);
  return layout;
}

inline Alignment alignment_of(Operator op, const Pointers& pointers) {
  const void* const in_ptr = op == Operator::kDgrad ? pointers.dy : pointers.x;
  return {reinterpret_cast<uint64_t>(in_ptr), reinterpret_cast<uint64_t>(pointers.out)};
}

// Taps far apart come by boxes only, which start at multiples of 16 bytes, and where tensors are only a call tells.
inline const Engine& engine_of_others(const Problem& problem, Operator op) {
  return kMmaEngine.refusal(problem, op) == nullptr ? kMmaEngine : kDirectEngine;
}

inline int64_t workspace_bytes(const Problem& problem, Operator op, const Pointers& pointers) {
  const Planned& planned = plan_of(problem, op, alignment_of(op, pointers));
  if (!planned.found) return engine_of_others(problem, op).workspace_bytes(problem, op, pointers);
  return workspace_layout(planned.of, planned.plan, planned.again, element_bytes(problem.dtype)).end;
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// y as boxes want it: [1][1][pixel of all images][channel], or [1][image][channel][pixel].
inline cudaError_t make_out_map(Params& params) {
  const Phased& of = params.of;
  const uint64_t channels = static_cast<uint64_t>(of.groups) * of.out_channels, N = of.N;
  const uint64_t plane = static_cast<uint64_t>(of.P) * of.Q;
  const auto bytes = [&](int axis, uint64_t size) -> uint64_t {
    return size > 1 ? of.out_stride[axis] * sizeof(float) : 16;  // of one there is no next
  };
  if (params.plan.out_channels_last) {
    const uint64_t sizes[4] = {channels, N * plane, 1, 1}, strides[3] = {bytes(3, N * plane), 16, 16};
    const uint32_t box[4] = {kStagedChannels, 16, 1, 1};
    return hopper::make_box_map(hopper::BoxUse::kStore, params.out_ptr, sizeof(float), sizes, strides, box,
                                params.out_map);
  }
  const uint64_t sizes[4] = {plane, channels, N, 1}, strides[3] = {bytes(1, channels), bytes(0, N), 16};
  const uint32_t box[4] = {16, kStagedChannels, 1, 1};
  return hopper::make_box_map(hopper::BoxUse::kStoreHalves, params.out_ptr, sizeof(float), sizes, strides, box,
                              params.out_map);
}

// x as boxes want it, of bytes of 128: [1][1][pixel of all images][channel], or [image][row][column][channel]. `of`: of
// x as it lies in memory, all phases of it.
inline cudaError_t make_in_map(const Phased& of, int element_bytes, Params& params) {
  const Plan& plan = params.plan;
  const uint64_t channels = static_cast<uint64_t>(of.groups) * of.in_channels;
  const uint64_t W = of.W, H = of.H, N = of.N;
  const auto bytes = [&](int axis, uint64_t size) -> uint64_t {
    return size > 1 ? of.in_stride[axis] * element_bytes : 16;  // of one there is no next
  };
  const uint32_t box_channels = 128 / element_bytes;
  void* const in_ptr = const_cast<void*>(params.in_ptr);
  if (plan.apart) {
    const uint64_t sizes[4] = {channels, W, H, N}, strides[3] = {bytes(3, W), bytes(2, H), bytes(0, N)};
    const hopper::Columns columns = hopper::columns_of(of);
    return hopper::make_columns_map(in_ptr, element_bytes, sizes, strides, columns.first, columns.last, columns.steps,
                                    box_channels, tile_pixels(plan), params.in_map);
  }
  if (plan.dense_slots) {
    const uint64_t sizes[4] = {channels, N * H * W, 1, 1}, strides[3] = {bytes(3, N * H * W), 16, 16};
    const uint32_t box[4] = {box_channels, static_cast<uint32_t>(plan.box_slots), 1, 1};
    return hopper::make_box_map(hopper::BoxUse::kLoadRows, in_ptr, element_bytes, sizes, strides, box, params.in_map);
  }
  const uint64_t sizes[4] = {channels, W, H, N}, strides[3] = {bytes(3, W), bytes(2, H), bytes(0, N)};
  const uint32_t step = plan.box_step, box[4] = {box_channels, plan.box_slots * step, 1, 1};
  return hopper::make_box_map(hopper::BoxUse::kLoadRows, in_ptr, element_bytes, sizes, strides, box, params.in_map,
                              step);
}

// The map of w, [output channel][input channel]: the latter of a stage, of so many of the former.
inline cudaError_t make_w_map(const Phased& of, int element_bytes, Params& params) {
  const uint64_t in_channels = of.in_channels, out_channels = of.out_channels;
  const uint64_t row_bytes = of.w_stride_out * element_bytes;
  const uint32_t box_channels = hopper::kBoxRowBytes / element_bytes, box_rows = params.plan.tile_n;
  const uint64_t sizes[4] = {in_channels, out_channels, 1, 1}, strides[3] = {row_bytes, row_bytes, row_bytes};
  const uint32_t box[4] = {box_channels, box_rows, 1, 1};
  return hopper::make_box_map(hopper::BoxUse::kLoadRows, params.packed_ptr, element_bytes, sizes, strides, box,
                              params.w_map);
}

// Maps of all that the plan in `params` loads and stores by boxes; `of` and `element_bytes`: of x as it lies in memory.
inline cudaError_t make_maps(const Phased& of, int element_bytes, Params& params) {
  if (params.plan.w_in_boxes) {
    const cudaError_t error = make_w_map(of, element_bytes, params);
    if (error != cudaSuccess) return error;
  }
  if (params.plan.in_boxes) {
    const cudaError_t error = make_in_map(of, element_bytes, params);
    if (error != cudaSuccess) return error;
  }
  return params.plan.boxes ? make_out_map(params) : cudaSuccess;
}

// Boxes of x, [image][channel][row][column], and of y, [image][row][channel][column], if they are planes, and otherwise
// of both [image][row][column][channel].
inline cudaError_t make_landing_maps(Params& params) {
  const Phased& of = params.of;
  const Landing& landing = params.plan.landing;
  const auto make = [&](hopper::BoxUse use, const void* tensor, const int64_t (&stride)[4], int channels, int rows,
                        int columns, uint32_t box_channels, uint32_t box_rows, uint32_t box_columns,
                        hopper::BoxMap& map) {
    const auto bytes = [&](int axis, int64_t size) -> uint64_t {
      return size > 1 ? stride[axis] * sizeof(float) : 16;  // of one there is no next
    };
    const uint64_t C = channels, H = rows, W = columns, N = of.N;
    const auto encode = [&](const uint64_t (&sizes)[4], const uint64_t (&strides)[3], const uint32_t (&box)[4]) {
      return hopper::make_box_map(use, tensor, sizeof(float), sizes, strides, box, map);
    };
    const uint64_t to_column = bytes(3, columns), to_row = bytes(2, rows), to_channel = bytes(1, channels),
                   to_image = bytes(0, of.N);
    if (landing.shape.channels_last)
      return encode({C, W, H, N}, {to_column, to_row, to_image}, {box_channels, box_columns, box_rows, 1});
    if (use == hopper::BoxUse::kStore)
      return encode({W, C, H, N}, {to_channel, to_row, to_image}, {box_columns, box_channels, box_rows, 1});
    return encode({W, H, C, N}, {to_row, to_channel, to_image}, {box_columns, box_rows, box_channels, 1});
  };
  using hopper::BoxUse;
  const LandingShape& shape = landing.shape;
  // Rows that are whole are one.
  const bool channels_last = shape.channels_last, whole = shape.whole_rows();
  const int64_t in_stride[4] = {of.in_stride[0], of.in_stride[1], of.in_stride[2] * shape.pairs, of.in_stride[3]};
  cudaError_t error =
      make(channels_last ? BoxUse::kLoadHalves : BoxUse::kLoad, params.in_ptr, in_stride, of.in_channels,
           whole ? 1 : of.H / shape.pairs, whole ? of.H * of.W : of.W * shape.pairs, channels_last ? 16 : 8,
           whole ? 1 : shape.box_rows(), whole ? shape.box_plane() : shape.box_columns(), params.in_map);
  if (error != cudaSuccess) return error;
  // Rows of planes are of 128 bytes in shared memory.
  const auto make_out = [&](int rows, hopper::BoxMap& map) {
    return make(channels_last ? BoxUse::kStoreHalves : BoxUse::kStore, params.out_ptr, of.out_stride, of.out_channels,
                of.P, of.Q, kLandingStagedChannels, rows, channels_last ? shape.columns : 32, map);
  };
  if (!shape.stores_boxes()) return cudaSuccess;
  const int first_rows = std::min(landing.rows, shape.staged_rows()), rest = landing.rows - first_rows;
  error = make_out(first_rows, params.out_map);
  return error == cudaSuccess && rest > 0 ? make_out(rest, params.rest_map) : error;
}

template <int TILE_N, int COLUMNS, int ROWS, int STRIDE, bool CHANNELS_LAST, int PAIRS>
cudaError_t run_landing_kernel(Params& params, cudaStream_t stream) {
  constexpr Instance kInstance{"landing_kernel", {TILE_N, COLUMNS, ROWS, STRIDE, CHANNELS_LAST, PAIRS}};
  record(kInstance);
  if constexpr (!is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    const auto kernel = landing_kernel<TILE_N, COLUMNS, ROWS, STRIDE, CHANNELS_LAST, PAIRS>;
    const cudaError_t error = allow_all_shared_memory(kernel);
    if (error != cudaSuccess) return error;
    return hopper::launch_early(kernel, static_cast<unsigned>(params.plan.blocks), kLandingThreads,
                                params.plan.smem_bytes, stream, params);
  }
}

// Runs the plan by the kernel of this shape of a tile, if it has it: true, and what became of it.
template <int SHAPE, bool CHANNELS_LAST, int PAIRS>
bool run_landing_shape(Params& params, cudaStream_t stream, cudaError_t& error) {
  constexpr TileShape kTile = kTileShapes[SHAPE];
  constexpr LandingShape kShape{kTile.tile_n, kTile.columns, kTile.blocks_m, kTile.stride, CHANNELS_LAST, PAIRS};
  const LandingShape& shape = params.plan.landing.shape;
  if (!kTile.lands || shape.tile_n != kShape.tile_n || shape.columns != kShape.columns || shape.rows != kShape.rows ||
      shape.stride != kShape.stride)
    return false;
  if constexpr (kTile.lands && kShape.has_kernel())
    error = run_landing_kernel<kTile.tile_n, kTile.columns, kTile.blocks_m, kTile.stride, CHANNELS_LAST, PAIRS>(
        params, stream);
  return true;
}

using AllShapes = std::make_index_sequence<sizeof(kTileShapes) / sizeof(TileShape)>;

template <bool CHANNELS_LAST, int PAIRS, size_t... SHAPES>
cudaError_t run_landing_tile(Params& params, cudaStream_t stream, std::index_sequence<SHAPES...>) {
  cudaError_t error = cudaErrorInvalidConfiguration;
  static_cast<void>((run_landing_shape<SHAPES, CHANNELS_LAST, PAIRS>(params, stream, error) || ...));
  return error;
}

inline cudaError_t run_landing(Params& params, cudaStream_t stream) {
  const cudaError_t error = make_landing_maps(params);
  if (error != cudaSuccess) return error;
  const LandingShape& shape = params.plan.landing.shape;
  return shape.channels_last ? run_landing_tile<true, 1>(params, stream, AllShapes{})
         : shape.pairs == 2  ? run_landing_tile<false, 2>(params, stream, AllShapes{})
                             : run_landing_tile<false, 1>(params, stream, AllShapes{});
}

template <typename Format, int TILE_N, int BLOCKS_M, int PIECES, int WARPGROUPS, Source SOURCE>
cudaError_t run_kernel(Params& params, cudaStream_t stream) {
  constexpr int kFormat =
      8 * kTypeId<typename Format::Tensor> + 2 * kTypeId<typename Format::Stored> + Format::AGAIN;
  constexpr Instance kInstance{"gather_kernel",
                               {kFormat, TILE_N, BLOCKS_M, PIECES, WARPGROUPS, static_cast<int>(SOURCE)}};
  record(kInstance);
  if constexpr (!is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    const auto kernel = gather_kernel<Format, TILE_N, BLOCKS_M, PIECES, WARPGROUPS, SOURCE>;
    const cudaError_t error = allow_all_shared_memory(kernel);
    if (error != cudaSuccess) return error;
    const unsigned blocks = static_cast<unsigned>(params.plan.blocks);
    return hopper::launch_early_in_clusters(kernel, blocks, params.plan.splits, threads_of(WARPGROUPS),
                                            params.plan.smem_bytes, stream, params);
  }
}

// Runs the plan by the kernel of this shape of a tile for what x comes by, if there is one.
template <typename Format, int SHAPE, Source SOURCE>
cudaError_t run_source(Params& params, cudaStream_t stream) {
  constexpr TileShape kShape = kTileShapes[SHAPE];
  if constexpr ((kShape.sources & bit(SOURCE)) != 0)
    return run_kernel<Format, kShape.tile_n, kShape.blocks_m, kShape.pieces, kShape.warpgroups, SOURCE>(params, stream);
  else
    return cudaErrorInvalidConfiguration;
}

// Runs the plan if it has this shape: true, and what became of it.
template <typename Format, int SHAPE>
bool run_shape(Params& params, cudaStream_t stream, cudaError_t& error) {
  constexpr TileShape kShape = kTileShapes[SHAPE];
  const Plan& plan = params.plan;
  if (plan.tile_n != kShape.tile_n || plan.blocks_m != kShape.blocks_m || plan.pieces != kShape.pieces ||
      plan.warpgroups != kShape.warpgroups)
    return false;
  if constexpr (kShape.contained != Format::CONTAINED || kShape.lands) {
    return false;
  } else if constexpr (sizeof(typename Format::Tensor) == 2) {
    error = run_source<Format, SHAPE, Source::kAny>(params, stream);
  } else if constexpr (Format::CONTAINED) {
    error = run_source<Format, SHAPE, Source::kBoxes>(params, stream);
  } else {
    const Source source = source_of_plan(plan);
    error = source == Source::kSingle     ? run_source<Format, SHAPE, Source::kSingle>(params, stream)
            : source == Source::kPixels   ? run_source<Format, SHAPE, Source::kPixels>(params, stream)
            : source == Source::kImages   ? run_source<Format, SHAPE, Source::kImages>(params, stream)
            : source == Source::kChannels ? run_source<Format, SHAPE, Source::kChannels>(params, stream)
            : source == Source::kPhases   ? run_source<Format, SHAPE, Source::kPhases>(params, stream)
            : source == Source::kTaps     ? run_source<Format, SHAPE, Source::kTaps>(params, stream)
                                          : run_source<Format, SHAPE, Source::kBoxes>(params, stream);
  }
  return true;
}

template <typename Format, size_t... SHAPES>
cudaError_t run_tiles(Params& params, cudaStream_t stream, std::index_sequence<SHAPES...>) {
  cudaError_t error = cudaErrorInvalidConfiguration;
  static_cast<void>((run_shape<Format, SHAPES>(params, stream, error) || ...));
  return error;
}

inline PackParams pack_params(const Phased& of, const Phases& phases, const Plan& plan, const void* w_ptr,
                              void* packed_ptr) {
  PackParams pack{};
  pack.w_ptr = w_ptr;
  pack.packed_ptr = packed_ptr;
  pack.of = of;
  pack.phases = phases;
  pack.tile_n = plan.tile_n;
  pack.tiles_n = plan.tiles_n;
  pack.iterations = plan.iterations;
  pack.row_pieces = plan.iterations * plan.pieces;
  pack.pieces = plan.pieces;
  pack.group_in = pack.group_step = of.in_channels / of.merged;
  pack.group_out = pack.group_rows = of.out_channels / of.merged;
  if (plan.lands && plan.landing.shape.stacks()) {
    pack.group_step = 0;
    pack.group_out = plan.landing.shape.tile_n;
    pack.of.out_channels = of.R * pack.group_out;
    pack.of.w_stride_group = of.flipped ? -of.w_stride_r : of.w_stride_r;
    pack.first = of.flipped ? (of.R - 1) * of.w_stride_r : 0;
    pack.of.R = 1;
  }
  pack.whole_rows = plan.by_tma;
  pack.by_images = plan.in_images;
  pack.count = static_cast<int>(packed_rows(of, plan.tile_n) * pack.row_pieces);
  pack.by_tile_n = make_divisor(plan.tile_n);
  pack.by_tiles_n = make_divisor(plan.tiles_n);
  pack.by_pieces = make_divisor(plan.pieces);
  pack.by_row_pieces = make_divisor(pack.row_pieces);
  pack.by_taps = make_divisor(pack.of.R * of.S);
  pack.by_s = make_divisor(of.S);
  pack.by_group_out = make_divisor(pack.group_out);
  return pack;
}

// `planned`: x as the plan has it.
template <typename Format>
cudaError_t run_packed(const PackParams& pack, const Phased& planned, void* copy_ptr, Params& params,
                       cudaStream_t stream) {
  const Phased of = params.of;
  // Weights that are not aligned have no boxes.
  params.plan.w_in_boxes = params.plan.w_in_boxes && reinterpret_cast<uint64_t>(pack.w_ptr) % 16 == 0;
  params.packed_ptr = params.plan.w_in_boxes ? pack.w_ptr : pack.packed_ptr;
  CopyParams copy{};
  const size_t smem_bytes = params.plan.copied ? sizeof(CopyShared<typename Format::Stored>) : 0;
  if (params.plan.copied) {
    copy = copy_params(of, planned, params.in_ptr, copy_ptr);
    params.in_ptr = copy_ptr;
  }
  const unsigned blocks = static_cast<unsigned>(copy.blocks + ceil_div(pack.count, kPackThreads));
  cudaError_t error = cudaSuccess;
  if (!params.plan.w_in_boxes)
    error = hopper::launch_early(pack_kernel<Format>, blocks, kPackThreads, smem_bytes, stream, pack, copy);
  if (error != cudaSuccess) return error;
  params.of = planned;
  error = make_maps(params.plan.in_phases ? of : planned, sizeof(typename Format::Stored), params);
  if (error != cudaSuccess) return error;
  return run_tiles<Format>(params, stream, AllShapes{});
}

// multiply_by_tma(products): see run.
template <typename MultiplyByTma>
cudaError_t run_contained(const PackParams& pack, const Phased& copy, const Agains& agains,
                          const WorkspaceLayout& layout, uint8_t* workspace, Params& params,
                          const MultiplyByTma& multiply_by_tma, cudaStream_t stream) {
  const Plan& plan = params.plan;
  const Phased of = params.of;
  const void* const in_ptr = params.in_ptr;
  Guard& guard = params.guard;
  guard.control = reinterpret_cast<ContainedControl*>(workspace);
  guard.samples = reinterpret_cast<uint32_t*>(workspace + layout.samples);
  guard.list = reinterpret_cast<Listed*>(workspace + layout.list);
  guard.w_factors = reinterpret_cast<float*>(workspace + layout.w_factors);
  params.copy = copy_params(of, plan.lands ? numbered(of) : copy, in_ptr, workspace + layout.copied);
  if (plan.lands) params.copy.blocks = 0;  // it says only how values on the list are numbered
  cudaError_t error = hopper::launch_early(sample_kernel, kSampleBlocks, kPackThreads, sizeof(uint32_t), stream,
                                           sample_params(of, in_ptr, guard));
  if (error != cudaSuccess) return error;

  ContainParams contain{};
  contain.pack = pack;
  const int64_t row_sizes[] = {of.in_channels, pack.of.R, of.S};
  const int64_t row_strides[] = {of.w_stride_in, of.w_stride_r, of.w_stride_s};
  const int64_t side_by_side = values_side_by_side(row_sizes, row_strides);
  const int64_t row_words = side_by_side > 0 ? side_by_side : 8 * int64_t{pack.row_pieces};
  const int64_t row_pitch = ceil_div(row_words, 4) * 4 + 4;  // another bank for each row
  const auto staged_bytes = [&](int count) { return kMagnitudeBytes + 4 * count * row_pitch; };
  // A block stages little where x is most of what is read: all blocks have so much less of the L1 cache.
  const bool few_values = of.N * of.H * of.W < int64_t{of.out_channels} * of.R * of.S;
  const int64_t most_staged_bytes = few_values ? kMostStagedBytes : kFewStagedBytes;
  int& rows = contain.rows_of_block = kMostRowsOfBlock;
  while (rows > 1 && rows * pack.row_pieces > 2 * kPackThreads) rows /= 2;
  if (rows == 1 && staged_bytes(1) > (plan.lands ? kLongRowBytes : kFewStagedBytes) &&
      staged_bytes(2) <= most_staged_bytes)
    rows = 2;
  contain.row_blocks = static_cast<int>(packed_rows(pack.of, plan.tile_n)) / rows;
  const bool staged = staged_bytes(rows) <= most_staged_bytes;
  // Four rows together: of weights in channels_last, or of planes.
  const Phased& packed = pack.of;
  const int taps = packed.R * packed.S;
  const bool in_planes = packed.w_stride_s == 1 && packed.w_stride_r == packed.S && packed.w_stride_out == taps;
  const int64_t together_words =
      int64_t{packed.in_channels} * kRowsTogether * taps + packed.in_channels / 8 * kTogetherGap;
  const bool together = side_by_side == 0 && packed.merged == 1 && pack.group_step == pack.group_in &&
                        packed.in_channels % 8 == 0 && packed.out_channels % kRowsTogether == 0 &&
                        (in_planes || packed.w_stride_out == 1) && packed.w_stride_in % 4 == 0 &&
                        packed.w_stride_group % 4 == 0 &&
                        (in_planes || (packed.w_stride_r % 4 == 0 && packed.w_stride_s % 4 == 0)) &&
                        reinterpret_cast<uint64_t>(pack.w_ptr) % 16 == 0 &&
                        kMagnitudeBytes + 4 * together_words <= (plan.lands ? kMostStagedBytes : most_staged_bytes);
  if (together) {
    rows = kRowsTogether;
    contain.row_blocks = static_cast<int>(packed_rows(pack.of, plan.tile_n)) / rows;
    contain.row_step = in_planes ? taps : 1;
    contain.tap_step = in_planes ? 1 : kRowsTogether;
  }
  const bool fours = side_by_side % 4 == 0 && packed.w_stride_out % 4 == 0 && packed.w_stride_group % 4 == 0 &&
                     pack.first % 4 == 0 &&
                     reinterpret_cast<uint64_t>(pack.w_ptr) % 16 == 0;
  contain.row_loads = together            ? RowLoads::kTogether
                      : !staged           ? RowLoads::kNone
                      : side_by_side == 0 ? RowLoads::kPieces
                      : fours             ? RowLoads::kFours
                                          : RowLoads::kSingle;
  contain.row_words = static_cast<int>(row_words);
  contain.row_pitch = static_cast<int>(row_pitch);
  const int64_t contained_bytes = together ? kMagnitudeBytes + 4 * together_words
                                  : staged ? staged_bytes(rows)
                                           : kMagnitudeBytes;
  const int smem_bytes = static_cast<int>(std::max<int64_t>(sizeof(ContainShared), contained_bytes));
  contain.copy = params.copy;
  contain.guard = guard;
  const int vector = vector_of(contain.copy);
  const auto contain_x = vector == 8   ? contain_kernel<8>
                         : vector == 4 ? contain_kernel<4>
                         : vector == 2 ? contain_kernel<2>
                                       : contain_kernel<1>;
  const auto kernel = plan.lands ? contain_rows_kernel : contain_x;
  error = allow_all_shared_memory(kernel);
  if (error != cudaSuccess) return error;
  const int threads = plan.lands && rows * pack.row_pieces > 2 * kPackThreads ? kMostRowThreads : kPackThreads;
  error = hopper::launch_early(kernel, static_cast<unsigned>(contain.row_blocks + contain.copy.blocks), threads,
                               smem_bytes, stream, contain);
  if (error != cudaSuccess) return error;

  params.packed_ptr = pack.packed_ptr;
  if (plan.lands) {
    error = run_landing(params, stream);
  } else if (plan.by_tma) {
    error = multiply_by_tma({copy, workspace + layout.copied, params.packed_ptr, guard.w_factors,
                             guard.control, params.bias_ptr, params.out_ptr});
  } else {
    params.in_ptr = workspace + layout.copied;
    params.of = copy;
    error = make_maps(copy, sizeof(Half), params);
    if (error == cudaSuccess) error = run_tiles<Contained>(params, stream, AllShapes{});
  }
  if (error != cudaSuccess) return error;
  params.in_ptr = in_ptr;
  float* const out = static_cast<float*>(params.out_ptr);
  params.phases = agains.count;
  for (params.phase = 0; error == cudaSuccess && params.phase < agains.count; ++params.phase) {
    const PhaseAgain& again = agains.each[params.phase];
    params.other_pack = pack_params(again.of, again.of.phases, again.plan,
                                    static_cast<const float*>(pack.w_ptr) + again.w, workspace + layout.packed_again);
    params.of = again.of;
    params.plan = again.plan;
    params.packed_ptr = params.other_pack.packed_ptr;
    params.out_ptr = out + again.out;
    error = make_maps(again.of, sizeof(float), params);
    if (error != cudaSuccess) break;
    error = run_kernel<Again, kAgainShape.tile_n, kAgainShape.blocks_m, kAgainShape.pieces,
                       kAgainShape.warpgroups, Source::kAny>(params, stream);
  }
  return error;
}

// Runs the plan in `params`; `again`: with contained operands. multiply_by_tma(products): has tma multiply these.
template <typename Stored, typename MultiplyByTma>
cudaError_t run(const void* w_ptr, void* workspace, const Agains& again, Params& params,
                const MultiplyByTma& multiply_by_tma, cudaStream_t stream) {
  const Phased& of = params.of;
  const Plan plan = params.plan;
  uint8_t* const start = static_cast<uint8_t*>(workspace);
  const Phased planned = as_planned(of, plan);
  const WorkspaceLayout layout = workspace_layout(of, plan, again, sizeof(Stored));
  const Phased packed = plan.contained ? merged(of) : of;
  PackParams pack = pack_params(packed, planned.phases, plan, w_ptr, start + layout.packed);
  if constexpr (sizeof(Stored) == 4) {
    if (plan.contained)
      return run_contained(pack, planned, again, layout, start, params, multiply_by_tma, stream);
  }
  return run_packed<Format<Stored>>(pack, planned, start + layout.copied, params, stream);
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
  const Agains& again = planned.again;
  const auto by_tma = [&](const ContainedProducts& products) {
    return multiply_contained(problem, op, products, stream);
  };
  if (problem.dtype == DType::kFloat16)
    return run<Half>(pointers.w, pointers.workspace, again, params, by_tma, stream);
  if (problem.dtype == DType::kBFloat16)
    return run<BFloat16>(pointers.w, pointers.workspace, again, params, by_tma, stream);
  return run<float>(pointers.w, pointers.workspace, again, params, by_tma, stream);
}

#endif  // launchers

inline void describe(const Problem& problem, Operator op, char* text, size_t text_size) {
  const Planned& planned = plan_of(problem, op, Alignment{});
  const Plan& plan = planned.plan;
  const int as_one = plan.contained ? merged(planned.of).merged : 1;
  char groups[32] = "";
  if (as_one > 1) snprintf(groups, sizeof groups, "%d groups as one, ", as_one);
  const char* const loads[] = {"single values", "fours of pixels", "16 bytes of channels"};
  if (plan.lands) {
    const Landing& landing = plan.landing;
    snprintf(
        text, text_size,
        "in scaled fp16, x contained on its way, tile of %d channels x %d rows x %d columns, x by boxes of %s in "
        "%d stages of %d bytes and %d of %d, weights in %d of %d, y by %s, %d blocks for %lld tiles, about %.3g "
        "Mcycles",
        plan.tile_n, plan.tile_p, plan.tile_q, landing.shape.channels_last ? "pixels" : "planes", landing.stages,
        landing.stage_bytes, plan.x_stages, plan.x_stage_bytes, plan.w_stages, plan.w_stage_bytes,
        plan.boxes ? "boxes" : "single values", plan.blocks, static_cast<long long>(plan.tiles), plan.cycles * 1e-6);
    return;
  }
  if (plan.by_tma) {
    const int written = snprintf(text, text_size, "in scaled fp16, %sx copied, multiplied by tma: ", groups);
    if (written > 0 && static_cast<size_t>(written) < text_size)
      describe_contained(problem, op, copied(planned.of, true, true), text + written, text_size - written);
    return;
  }
  char tile[80];
  if (plan.points || plan.packed)
    snprintf(tile, sizeof tile, "%d pixels", tile_pixels(plan));
  else
    snprintf(tile, sizeof tile, "%d lines x %d columns", plan.tile_p, plan.tile_q);
  snprintf(text, text_size,
           "%s%s%s%stile of %d channels x %s, x by %s in %d stages of %d bytes, weights %sin %d of %d, y by %s, "
           "%d blocks for %lld tiles, %lld of them in %d parts, about %.3g Mcycles",
           plan.contained ? "in scaled fp16, " : "", groups, plan.copied ? "x copied, " : "",
           plan.in_phases ? "x in phases, " : "", plan.tile_n, tile,
           plan.apart       ? "boxes of a tap"
           : plan.in_boxes  ? "boxes"
           : plan.in_images ? "images"
                            : loads[static_cast<int>(plan.loads)],
           plan.x_stages, plan.x_stage_bytes, plan.w_in_boxes ? "by boxes " : "", plan.w_stages, plan.w_stage_bytes,
           plan.boxes         ? "boxes"
           : plan.vector == 4 ? "fours"
                              : "single values",
           plan.blocks, static_cast<long long>(plan.tiles), static_cast<long long>(plan.tiles - plan.whole_tiles),
           plan.splits, plan.cycles * 1e-6);
}

#endif  // host

}  // namespace gather

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
bool gather_takes_taps_apart(const Problem& problem, Operator op) {
  return gather::plan_of(problem, op, gather::Alignment{}).plan.apart;
}

bool gather_lands(const Problem& problem, Operator op) {
  return gather::plan_of(problem, op, gather::Alignment{}).plan.lands;
}

extern const Engine kGatherEngine{"gather",         gather::refusal, gather::workspace_bytes, gather::launch,
                                  gather::describe, gather::yields,  gather::cycles};
#endif

}  // namespace modelnew
