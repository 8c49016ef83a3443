// wgmma engine: implicit GEMM on Hopper's tensor cores (wgmma) with stride 1: y from x (fprop), dx from dy (dgrad). It
// takes fp16, bf16, and fp32 under the TF32 contract or in full accuracy; it is meant for NCHW with long rows.
// Deterministic: each output is one sum in a fixed order.
//
//   pack_operands_kernel   w -> the layout of shared memory, in the order in which wgmma_kernel reads it
//   prepare_kernel         the same for contained and split operands (below), and the scale of x
//   wgmma_kernel           y from x, dx from dy
//
// GEMM: rows = output channels, columns = output pixels, reduction = (channel block, r, s, channel). There is no
// im2col: the pixels of a tile with its halo lie in shared memory in pieces of 16 bytes (8 channels of 16 bits or 4 of
// fp32),
//
//   row of x:  [piece][pixel] x 16 bytes            w:   [step][2 pieces][64 channels] x 16 bytes
//
// and wgmma takes rows of an operand that are 16 bytes apart. A tap (r, s) is therefore a shift of the start address,
// by rows and by s*dilation_w pixels; no swizzle is needed and no bank conflict occurs.
//
// One persistent block per SM, 12 warps in three roles:
//
//   8 warps   multiply, then store: two warpgroups by turns, each 64 channels x 256 pixels (TF32 downwards, and split
//             operands: 128). While one stores, the other one has the tensor cores alone
//   3 warps   convert: load x in pairs of pixels and store it rounded (TF32) or scaled, transposed into pieces, with
//             zeros for padding and for channels that are not there; and work out the place of each tile. TMA may load
//             x for them (ChunkConverter)
//   1 warp    one thread loads packed weights; converts as well where weights stay in shared memory for good
//
//   memory --(TMA--> chunks)--> convert --> x ring --+
//                                                    +--> wgmma --> registers --> staging --> memory
//   packed weights -----------bulk copy--> w ring ---+
//
// mbarriers hand over the rows of the x ring and the stages of the w ring. A block that walks down a column of tiles
// (`down`) converts every row of x once, for which the ring must hold all channels. Otherwise it walks along rows of y.
//
// Stores want whole lines of memory, or at least whole 32-byte sectors, but rows of y start anywhere. A block therefore
// walks through a run of tiles that are contiguous in memory (a unit), stores whole sectors and carries the unfinished
// one of every channel over to the next tile. There are three ways, all through staging in shared memory:
//
//   store_boxes   a run of full-width tiles with resident weights: TMA boxes of channels that are aligned alike
//   store_runs    any other row of y: contiguous bytes of a channel by a warp, shifted while they are staged
//   store_rows    tiles of several rows, and y of any strides
//
// Contained operands: fp32 under the TF32 contract is multiplied as scaled fp16, at twice the rate. A value rounded to
// TF32, times a power of two, is the same number in fp16 as long as it stays normal (numerics.cuh). Each output channel
// has a scale of its own, from its largest weight; that of x is from a sample. Out-of-range values are found while x is
// converted; their tiles come on a list, and a second launch of wgmma_kernel computes these again with TF32 operands,
// or all of the call where too much is out of range. It is always launched and ends at once if there is nothing to do:
// the host waits for nothing, and a captured graph is right for any data.
//
// Split operands: fp32 in full accuracy. A scaled value is the sum of two parts in fp16, and three of the four products
// of parts are summed. The tensor cores truncate when they add; hence only short groups of steps are summed by them,
// and groups are added with rounding to nearest. Tiles with out-of-range values are computed again by direct.
//
//   x = x1 + x2 / 2^11      w1 x1, of a group       --wgmma--> GROUP_SUM --added, a group at a time--> SUM
//   w = w1 + w2 / 2^11      w1 x2 + w2 x1, of all   --wgmma--> RESTS     --times 2^-11, at the end---> SUM --> memory
//
// Stacked rows of taps: 16 bits and split operands, three rows of taps, 16 output channels. A product has 64 rows, of
// which each warp has 16: here the channels at one row of taps, the fourth warp none. A block walks down, the
// warpgroups take rows of x by turns, and a row is converted once and meets a third of the products. The sums of warp r
// are for outputs r rows above those of warp 0, so each is handed on to the next warp for the next row of x:
//
//   row p of x:   warp 0: y[p]   --.    warp 1: y[p-1] --.    warp 2: y[p-2] --> memory
//   row p+1:      warp 0: y[p+1]   '--> warp 1: y[p]     '--> warp 2: y[p-1] --> memory
//
// Bound by memory with few channels, by converting and storing in fp32, by power with many channels of 16 bits.
// Measurements: docs/lab/wgmma.md.
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstdio>

#include "device.cuh"
#include "engines.cuh"
#include "memo.cuh"
#endif

#include "correlation.cuh"
#include "divisor.cuh"
#include "numerics.cuh"
#include "problem.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

namespace modelnew {
namespace wgmma {

constexpr int kMultiplyWarps = 8;
constexpr int kServiceWarps = 4;  // convert x; the last one may copy weights instead
constexpr int kThreads = 32 * (kMultiplyWarps + kServiceWarps);

// The types that tensors hold in memory and that the tensor cores multiply.
template <typename Stored_, typename Multiplied_, int CONTAINED_ = 0, bool STACKED_ = false>
struct Format {
  using Stored = Stored_;
  using Multiplied = Multiplied_;
  static constexpr bool STACKED = STACKED_;             // rows of taps share a product
  static constexpr int CONTAINED = CONTAINED_;          // parts of scaled fp16 that contain an fp32 value, or 0
  static constexpr int PARTS = CONTAINED == 2 ? 2 : 1;  // of an operand
  // Sets of accumulators: that of all products; of split operands, that of the first parts of a group of steps, of all
  // groups before, and of first parts and rests.
  static constexpr int SUMS = CONTAINED == 2 ? 3 : 1;
  static constexpr int GROUP_SUM = 0, SUM = SUMS == 1 ? 0 : 1, RESTS = SUMS - 1;
  static constexpr int PIXELS = CONTAINED == 2 ? 128 : 256;  // rows x columns of a warpgroup; TF32 also has 128
  // Registers of a thread: all start with 168, and the multiplying ones need more.
  static constexpr int MULTIPLY_REGISTERS = CONTAINED == 2 ? 208 : 192;
  static constexpr int CONVERT_REGISTERS = CONTAINED == 2 ? 88 : 120;
  static_assert(2 * MULTIPLY_REGISTERS + CONVERT_REGISTERS <= 3 * 168, "no more registers than the block has");
};
using Fp16 = Format<Half, Half>;
using Bf16 = Format<BFloat16, BFloat16>;
using Tf32 = Format<float, float>;
using Contained = Format<float, Half, 1>;
using Split = Format<float, Half, 2>;
using StackedFp16 = Format<Half, Half, 0, true>;
using StackedBf16 = Format<BFloat16, BFloat16, 0, true>;
using StackedSplit = Format<float, Half, 2, true>;

// The same for the host.
struct Operands {
  int element_bytes;  // as stored
  int contained;

  constexpr int multiplied_bytes() const { return contained != 0 ? 2 : element_bytes; }
};

constexpr int kStepBytes = 32;  // of the reduction, for one wgmma: 16 channels of 16 bits or 8 of fp32
constexpr int kPlanes = 8;      // output channels that a warp stages at a time, at least

// Steps of one bulk copy and of one commit, at most: enough cycles to issue the next ones. With narrow tiles there are
// more instructions to a step.
constexpr int kGroupSteps = 6;
constexpr int kNarrowGroupSteps = 3;
constexpr int kSplitGroupSteps = 4;  // of 16 channels: what tensor cores may sum up by themselves
MODELNEW_HOST_DEVICE constexpr int most_group_steps(int tile_q, int contained) {
  return contained == 2 ? kSplitGroupSteps : tile_q >= 128 ? kGroupSteps : kNarrowGroupSteps;
}

constexpr int kMaxRows = 32;    // of the x ring
constexpr int kMaxStages = 16;  // of the w ring
constexpr int kBarrierBytes = 1024;
constexpr int kRecordBytes = 512;
constexpr int kSharedBytes = 232448;  // what a block may have on sm_90
constexpr int kGroupChannels = 64;    // output channels of a warpgroup
constexpr int kStackedRows = 3;       // rows of taps that share a product,
constexpr int kStackedChannels = 16;  // each with the output channels of a warp

constexpr int kSector = 32;  // bytes of memory: what a store should fill

// Boxes: a warp stages its 16 channels x 256 pixels, or in fp32 8 channels at a time unless operands are contained and
// leave room, in blocks of 128 bytes of each channel, as bulk stores of boxes want them.
MODELNEW_HOST_DEVICE constexpr int box_bytes(int contained) { return contained == 1 ? 16384 : 8192; }

// Else it stages 512 bytes of each plane at a time, 1 KB of contained operands. In front of them a plane has room for
// half a sector, behind them for the shift of its start; planes are 12 or 8 words apart modulo the 32 banks, so that
// stores of accumulators, 8 planes x 16 bytes or 4 planes x 32 bytes at a time, meet little conflict.
MODELNEW_HOST_DEVICE constexpr int part_bytes(int contained) { return contained == 1 ? 1024 : 512; }
MODELNEW_HOST_DEVICE constexpr int staged_plane_bytes(int element_bytes, int contained) {
  return part_bytes(contained) + (element_bytes == 2 ? 48 : 32);
}
MODELNEW_HOST_DEVICE constexpr int staging_part_bytes(int planes, int element_bytes, int contained) {
  return planes * staged_plane_bytes(element_bytes, contained) + 16;  // a carried sector is read as a whole
}

// Contained and split operands: parts of x on their way to a converting warp, 32 pairs of pixels of 8 channels of fp32
// each.
MODELNEW_HOST_DEVICE constexpr int raw_parts(int contained) { return contained == 2 ? 2 : 4; }
constexpr int kRawPartBytes = 8 * 32 * 8;
constexpr int k16BitParts = 7;  // of 16 bits, in registers

// Contained operands where boxes load x: chunks of 64 pixels of 16 channels, two to a warp.
constexpr int kChunks = 6;
constexpr int kChunkColumns = 64;
constexpr int kChunkPieces = 2;
constexpr int kChunkBytes = kChunkPieces * 8 * kChunkColumns * 4;
constexpr int kNoteBytes = 16;  // beside each chunk

constexpr int kFinishBytes = 16 * 8;         // of a warp: what to multiply by and to add, of each channel
constexpr int kCarriedBytes = 16 * kSector;  // of a warp: an unfinished sector of each channel

// A Correlation without strides. The kernel is compiled for this layout of its parameters.
struct UnitCorrelation {
  int64_t N;
  int groups, in_channels, out_channels;  // channels of one group
  int H, W, P, Q, R, S;                   // in, out, taps
  int pad_h, pad_w, dilation_h, dilation_w;
  int64_t in_stride[4], out_stride[4];
  int64_t w_stride_group, w_stride_out, w_stride_in, w_stride_r, w_stride_s;
  bool flipped;
};

// How it is cut up. All roles of the kernel derive their loops from this, so they agree.
struct Plan {
  int contained;       // parts of scaled fp16 that contain an fp32 value, or 0: multiplied as stored
  int tile_k;          // output channels of a block: 128, or where the warpgroups share them, not the rows, 64, or 16
  int tile_p, tile_q;  // rows of a block, columns
  int tiles_p, tiles_q, tiles_k;
  int tiles;                         // of all images and groups, for one tile of output channels
  bool down;                         // a unit runs down the image and keeps the rows of x that it needs again
  int unit_tiles, units;             // a unit is a run of tiles: down a column or row by row, and image by image
  int x_rows, x_pitch;               // the window of a tile: rows, and pixels of one piece of a row
  int lead;                          // unused pixels at the left of a row, so that pairs of pixels start even
  int x_slots;                       // rows of the x ring
  int blocks_c, block_steps;         // blocks of input channels, their steps at a tap: what a row of the ring has
  int convert_warps;                 // 3, or 4 where weights stay the same for a block's life
  int boxes, log_boxes;              // if not 0, y is stored by boxes, and every `boxes`-th channel is aligned alike
  int staged_planes, staging_parts;  // else: of a warp, 8 or all 16; one for each warp, or for two that take turns
  int w_stages;                      // of the w ring; none: weights are resident
  int groups, group_steps;           // a block's steps are committed, and their weights copied, in groups; how many of
  int large_groups;                  // them have group_steps, the others have one less
  bool x_boxes;                      // boxes can load x,
  bool chunks;                       // and do: chunks of 64 pixels,
  int whole_chunks;                  // so many to a step of a row,
  int rest_pixels, rest_columns;     // and for so many that are left over, in boxes of so many
  int rest_rows, rest_pieces;        // columns, rows and pieces
  bool x_pairs;                      // pairs of pixels are aligned in x
  bool x_simple;                     // and the last block of channels is as full as the others
  bool y_pairs;                      // pairs of pixels are aligned in y
  bool y_runs;                       // columns of y are neighbours
  bool y_flat;                       // and so are the end of a row and the start of the next
  bool y_vectors;                    // 16-byte pieces of a row are aligned in y
  bool y_sectors;                    // y starts with a sector
  int blocks, smem_bytes;
  double cycles;  // estimate
};

// State that the kernels of one call with contained or split operands share. All zeros at first.
struct Control {
  uint32_t samples[256];  // of x, by their exponent field; but no zeros
  uint32_t arrived;       // blocks of the preparation that are done
  uint32_t bad_tiles_k;   // tiles of output channels with weights that do not fit
  int32_t most, least;    // of the exponents of the weights' scales: the largest, and minus the smallest
  uint32_t listed;        // tiles to do again
  int32_t x_exponent;     // x is multiplied times 2^x_exponent
  uint32_t all_again;     // 1: nothing is contained, the whole call is done otherwise
};

// Where that lies in the workspace.
struct Guard {
  Control* control;      // null where operands are what is stored
  uint32_t* bad_tile_k;  // of each tile of output channels: 1 if its weights do not fit
  uint32_t* marked;      // a bit for each tile: it is on the list
  uint32_t* list;        // of tiles to do again, by number: that of a unit of one tile rightwards
  int32_t* w_exponents;  // of each row of the packed weights
};

struct Params {
  const void *in_ptr, *packed_ptr, *bias_ptr;
  void* out_ptr;
  UnitCorrelation of;
  Plan plan;
  Guard guard;
  hopper::BoxMap four_blocks, one_block;     // boxes of y
  hopper::BoxMap whole_chunks, rest_chunks;  // of x
};

// The output channel that a row of the matrix of weights is for. Boxes store every `boxes`-th channel, those of a warp:
// they are aligned alike. With 4 bytes an element the rows are in an order in which half a warp, 4 rows x 32 bytes,
// meets all banks.
template <int ELEMENT_BYTES>
MODELNEW_HOST_DEVICE constexpr int channel_of_row(int row, int boxes) {
  if (boxes == 0) return row;
  const int warp_id = row / 16 % 8, in_half = row % 8;
  const int place = ELEMENT_BYTES == 2 ? in_half : in_half % 4 * 2 + in_half / 4;
  return row / 128 * 128 + warp_id % boxes + boxes * (16 * (warp_id / boxes) + row % 16 / 8 * 8 + place);
}

// Where the parts of a block's shared memory start.
struct SharedLayout {
  int staging, records, finish, carried, handed, raw, notes, x_ring, w_ring, end;
};

MODELNEW_HOST_DEVICE inline bool stacked(const Plan& plan) { return plan.tile_k == kStackedChannels; }

// Taps whose products follow one another, and tiles of 64 rows of the matrix of weights.
MODELNEW_HOST_DEVICE inline int taps_in_turn(const UnitCorrelation& of, const Plan& plan) {
  return stacked(plan) ? of.S : of.R * of.S;
}
MODELNEW_HOST_DEVICE inline int weight_tiles(const Plan& plan) { return plan.tile_k > kGroupChannels ? 2 : 1; }
MODELNEW_HOST_DEVICE inline int weight_rows(const Plan& plan) { return weight_tiles(plan) * kGroupChannels; }

// Rows of x that a warpgroup multiplies in a tile: every other one of its window, or of those by which this lies lower.
MODELNEW_HOST_DEVICE inline int stacked_rows(const Plan& plan, bool continues) {
  return (continues ? plan.tile_p : plan.x_rows) / 2;
}

MODELNEW_HOST_DEVICE inline int total_steps(const UnitCorrelation& of, const Plan& plan) {
  return taps_in_turn(of, plan) * plan.blocks_c * plan.block_steps;
}

MODELNEW_HOST_DEVICE constexpr int operand_parts(int contained) { return contained == 2 ? 2 : 1; }

// Bytes of one part of the operands. Second parts of x are a ring behind that of the first ones.
MODELNEW_HOST_DEVICE inline int x_row_bytes(const Plan& plan) { return plan.block_steps * 2 * plan.x_pitch * 16; }
MODELNEW_HOST_DEVICE inline int x_ring_bytes(const Plan& plan) { return plan.x_slots * x_row_bytes(plan); }

// Bytes of a step of weights for one warpgroup: of one part of the operands, and of all parts.
constexpr int kWeightPartBytes = kGroupChannels * kStepBytes;
MODELNEW_HOST_DEVICE constexpr int weight_step_bytes(const Plan& plan) {
  return operand_parts(plan.contained) * kWeightPartBytes;
}

MODELNEW_HOST_DEVICE inline SharedLayout shared_layout(const UnitCorrelation& of, const Plan& plan, int element_bytes) {
  SharedLayout layout{};
  layout.staging = kBarrierBytes;  // aligned as boxes have to be
  layout.records =
      layout.staging +
      (plan.boxes != 0 ? kMultiplyWarps * box_bytes(plan.contained)
                       : plan.staging_parts * staging_part_bytes(plan.staged_planes, element_bytes, plan.contained));
  layout.finish = layout.records + kRecordBytes;
  layout.carried = layout.finish + (plan.contained == 2 ? kMultiplyWarps * kFinishBytes : 0);
  // Downwards sectors are carried from part to part, and split and stacked operands have one part.
  const bool carries = !plan.down || (plan.contained != 2 && !stacked(plan));
  layout.handed = layout.carried + (carries ? kMultiplyWarps * kCarriedBytes : 0);
  layout.raw = layout.handed + (stacked(plan) ? (kStackedRows - 1) * kStackedChannels * plan.tile_q * 4 : 0);
  if (plan.chunks) {
    layout.raw = (layout.raw + 127) / 128 * 128;
    layout.notes = layout.raw + kChunks * kChunkBytes;
    layout.x_ring = layout.notes + kChunks * kNoteBytes;
  } else {
    const int warps = plan.w_stages > 0 ? 3 : 4;
    layout.x_ring = layout.raw + (plan.contained != 0 ? warps * raw_parts(plan.contained) * kRawPartBytes : 0);
  }
  layout.w_ring = layout.x_ring + operand_parts(plan.contained) * x_ring_bytes(plan);
  const int steps =
      plan.w_stages > 0 ? plan.w_stages * plan.group_steps : total_steps(of, plan) * weight_tiles(plan);
  // A tile wider than y reads on behind its rows of x, and stores nothing of what comes of that.
  const int weight_bytes = steps * weight_step_bytes(plan);
  layout.end = layout.w_ring + (weight_bytes > plan.tile_q * 16 ? weight_bytes : plan.tile_q * 16);
  return layout;
}

// ---- The walk: which tiles a block computes, in which order. Every role takes the same one. ----

struct Tile {
  int group, tile_k, n;
  int p, q;                   // its upper left output
  bool run_starts, run_ends;  // nothing carried over from the tile before, to the tile behind
  bool continues, goes_on;    // its window lies tile_p rows below that of the tile before; the next one's below its own
  bool last;                  // of the block
  int behind;                 // outputs of a row that precede it in its run, or kFarBehind
};
constexpr int kFarBehind = 64;  // more than a sector

// Units: all of the plan's, or of one tile each those on the list.
struct Agenda {
  const Guard& guard;
  bool listed;

  MODELNEW_HOST_DEVICE int units(const Plan& plan) const {
    return listed ? static_cast<int>(guard.control->listed) : plan.units;
  }
  MODELNEW_HOST_DEVICE int unit_tiles(const Plan& plan) const { return listed ? 1 : plan.unit_tiles; }
  MODELNEW_HOST_DEVICE int number(int unit) const { return listed ? static_cast<int>(guard.list[unit]) : unit; }
};

struct Walk {
  const UnitCorrelation& of;
  const Plan& plan;
  const Agenda agenda;
  Tile tile;
  int unit, left, row, column;

  MODELNEW_HOST_DEVICE Walk(const UnitCorrelation& of, const Plan& plan, const Agenda& agenda, int block)
      : of(of), plan(plan), agenda(agenda), unit(block) {
    start_unit();
  }

  MODELNEW_HOST_DEVICE bool done() const { return unit >= agenda.units(plan); }

  // The tile's number among all: that of its unit if units were single tiles, rightwards.
  MODELNEW_HOST_DEVICE uint32_t number() const {
    const int row_of_all = static_cast<int>(tile.group * of.N + tile.n) * plan.tiles_p + row;
    return (row_of_all * plan.tiles_q + column) * plan.tiles_k + tile.tile_k;
  }

  MODELNEW_HOST_DEVICE void next() {
    if (--left == 0) {
      unit += plan.blocks;
      start_unit();
      return;
    }
    bool run_starts = plan.down, continues = plan.down;
    bool next_row = plan.down;
    if (!plan.down && ++column == plan.tiles_q) {
      column = 0;
      run_starts = !plan.y_flat;
      next_row = true;
    }
    if (next_row && ++row == plan.tiles_p) {
      row = 0;
      run_starts = true;
      continues = false;
      if (++tile.n == of.N) {
        tile.n = 0;
        ++tile.group;
      }
    }
    const int behind = tile.behind + (plan.tile_q < of.Q - tile.q ? plan.tile_q : of.Q - tile.q);
    tile.behind = behind < kFarBehind ? behind : kFarBehind;
    place(run_starts, continues);
  }

 private:
  MODELNEW_HOST_DEVICE void start_unit() {
    if (done()) return;
    const int number = agenda.number(unit);
    const int unit_tiles = agenda.unit_tiles(plan), part = number / plan.tiles_k;
    tile.tile_k = number - part * plan.tiles_k;
    int row_of_all;
    if (plan.down) {
      // Neighbouring blocks take neighbouring columns: their lines of y meet.
      const int band = part / plan.tiles_q, rows = plan.tiles / plan.tiles_q;
      column = part - band * plan.tiles_q;
      row_of_all = band * unit_tiles;
      left = unit_tiles < rows - row_of_all ? unit_tiles : rows - row_of_all;
    } else {
      const int first = part * unit_tiles;
      left = unit_tiles < plan.tiles - first ? unit_tiles : plan.tiles - first;
      row_of_all = first / plan.tiles_q;
      column = first - row_of_all * plan.tiles_q;
    }
    const int image = row_of_all / plan.tiles_p;
    row = row_of_all - image * plan.tiles_p;
    tile.group = image / static_cast<int>(of.N);
    tile.n = image - tile.group * static_cast<int>(of.N);
    place(true, false);
  }

  MODELNEW_HOST_DEVICE void place(bool run_starts, bool continues) {
    tile.p = row * plan.tile_p;
    tile.q = column * plan.tile_q;
    tile.continues = continues;
    tile.goes_on = plan.down && left > 1 && row < plan.tiles_p - 1;
    tile.last = left == 1 && unit + plan.blocks >= agenda.units(plan);
    tile.run_starts = run_starts;
    if (run_starts) tile.behind = 0;
    tile.run_ends = plan.down || left == 1 || (column == plan.tiles_q - 1 && (!plan.y_flat || row == plan.tiles_p - 1));
  }
};

template <typename Visit>
MODELNEW_HOST_DEVICE inline void for_each_tile(const UnitCorrelation& of, const Plan& plan, const Agenda& agenda,
                                               int block, Visit&& visit) {
  for (Walk walk(of, plan, agenda, block); !walk.done(); walk.next()) visit(walk.tile);
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// ---- Device code ----

// A tile's place, for the multiplying warps. A converting warp works it out before the first row of the tile is there,
// because it takes long and the multiplying warps have no time for it.
struct alignas(16) TileRecord {
  int64_t out;        // offset of its first output in the first of its channels; with boxes image << 32 | in the plane
  int rows, columns;  // of outputs from there on: to the end of the image, to the end of the tile
  int channel;        // first of all groups
  int channels;       // of its group from there on
  int weights;        // which: group and tile of channels
  int flags;          // and what is behind

  static constexpr int kRunEnds = 1, kGoesOn = 2, kLast = 4, kBehindShift = 3;
};
static_assert(sizeof(TileRecord) == 32, "two loads");

// Records in use: of the tile that is being stored, of those that have rows in the ring, four at most (see the end of
// `complete`), and of those that are being loaded: two, or four where they have no more than a chunk for each warp.
constexpr int kRecords = kRecordBytes / sizeof(TileRecord);
static_assert(kRecords >= 9, "room for all records in use");

// Addresses in shared memory. Barriers of 8 bytes: x_full and x_empty, kMaxRows of each, w_full and w_empty, kMaxStages
// of each, the turns of the warpgroups, those of two warps that share a part of staging, and one for each chunk, or
// where no boxes load x one for each warpgroup that has handed on its sums.
struct Shared {
  static constexpr int kTurns = 8 * (2 * kMaxRows + 2 * kMaxStages);

  uint32_t base;
  SharedLayout layout;

  __device__ __forceinline__ uint32_t x_full(int slot) const { return base + 8 * slot; }
  __device__ __forceinline__ uint32_t x_empty(int slot) const { return base + 8 * (kMaxRows + slot); }
  __device__ __forceinline__ uint32_t w_full(int slot) const { return base + 8 * (2 * kMaxRows + slot); }
  __device__ __forceinline__ uint32_t w_empty(int slot) const { return base + 8 * (2 * kMaxRows + kMaxStages + slot); }
  __device__ __forceinline__ uint32_t turn(int warpgroup_id) const { return base + kTurns + 8 * warpgroup_id; }
  __device__ __forceinline__ uint32_t staging_turn(int warp_id) const { return base + kTurns + 8 * (2 + warp_id); }
  __device__ __forceinline__ uint32_t raw_full(int chunk) const {
    return base + kTurns + 8 * (2 + kMultiplyWarps + chunk);
  }
  __device__ __forceinline__ uint32_t handed(int warpgroup_id) const { return raw_full(warpgroup_id); }
  __device__ __forceinline__ uint32_t x_ring() const { return base + layout.x_ring; }
  __device__ __forceinline__ uint32_t w_ring() const { return base + layout.w_ring; }
};
static_assert(Shared::kTurns + 8 * (2 + kMultiplyWarps + kChunks) <= kBarrierBytes, "room for all barriers");

// -- Copy weights: packed -> w ring, by one thread --

// All weights of a tile.
__device__ __forceinline__ void copy_resident_weights(const Params& params, const Shared& shared, int wanted) {
  constexpr int kPiece = 16384;
  const int groups = weight_tiles(params.plan);
  const int bytes = total_steps(params.of, params.plan) * groups * weight_step_bytes(params.plan);
  const uint8_t* from = static_cast<const uint8_t*>(params.packed_ptr) + static_cast<int64_t>(wanted) * bytes;
  hopper::barrier_arrive_expecting(shared.w_full(0), bytes);
  for (int offset = 0; offset < bytes; offset += kPiece)
    hopper::bulk_load(shared.w_ring() + offset, from + offset, min(kPiece, bytes - offset), shared.w_full(0));
}

__device__ __forceinline__ void copy_weights(const Params& params, const Shared& shared, const Agenda& agenda) {
  const UnitCorrelation& of = params.of;
  const Plan& plan = params.plan;
  const int64_t group_bytes = static_cast<int64_t>(total_steps(of, plan)) * weight_step_bytes(plan);
  const int groups = weight_tiles(plan);
  RingPosition at;
  int resident = -1;
  for_each_tile(of, plan, agenda, blockIdx.x, [&](const Tile& tile) {
    const int wanted = tile.group * plan.tiles_k + tile.tile_k;
    if (plan.w_stages == 0) {
      if (wanted == resident) return;
      resident = wanted;
      hopper::barrier_wait_idly(shared.w_empty(0), at.parity ^ 1);
      copy_resident_weights(params, shared, wanted);
      at.next(1);
      return;
    }
    const uint8_t* from = static_cast<const uint8_t*>(params.packed_ptr) + wanted * groups * group_bytes;
    const int blocks = stacked(plan) ? stacked_rows(plan, tile.continues) : plan.blocks_c;
    for (int block = 0; block < blocks; ++block) {
      for (int warpgroup_id = 0; warpgroup_id < 2; ++warpgroup_id) {
        const uint8_t* piece = from + (groups == 2 ? warpgroup_id * group_bytes : 0);
        for (int i = 0; i < plan.groups; ++i) {
          const int bytes = (plan.group_steps - (i >= plan.large_groups)) * weight_step_bytes(plan);
          hopper::barrier_wait_idly(shared.w_empty(at.slot), at.parity ^ 1);
          hopper::barrier_arrive_expecting(shared.w_full(at.slot), bytes);
          hopper::bulk_load(shared.w_ring() + at.slot * plan.group_steps * weight_step_bytes(plan), piece, bytes,
                            shared.w_full(at.slot));
          piece += bytes;
          at.next(plan.w_stages);
        }
      }
      if (!stacked(plan)) from += of.R * of.S * plan.block_steps * weight_step_bytes(plan);
    }
  });
}

// -- Convert: memory -> x ring --
//
// A fill is the rows that a tile adds to the ring, all of its window or those by which it lies lower. Its items, in the
// order of their places in the ring, are pieces of two neighbouring pixels (where pairs are aligned in x) or of one; 32
// of them, a part, are the work of a warp at a time, and the warps take turns. A warp loads a batch of parts into
// registers while it stores the batch before to shared memory, across fills and tiles: what limits it then is the
// number of its instructions, not the latency of memory.

// One channel of PIXELS neighbouring pixels; 0 where there are none.
template <typename Stored, int PIXELS>
__device__ __forceinline__ void load_pixels(const uint8_t* address, bool exist, uint32_t* words) {
  if constexpr (sizeof(Stored) * PIXELS == 8)
    hopper::load_8(address, exist, words[0], words[1]);
  else if constexpr (sizeof(Stored) * PIXELS == 4)
    hopper::load_4(address, exist, words[0]);
  else
    hopper::load_2(address, exist, words[0]);
}

// The piece of pixel `which`: all its channels, rounded (TF32) and, if contained, times `scale`. `words` has those of
// each channel one after another.
template <typename Format, int PIXELS, int WORDS>
__device__ __forceinline__ uint4 piece_of(const uint32_t (&words)[WORDS], int which, float scale) {
  if constexpr (Format::CONTAINED != 0) {
    const auto pair = [&](int c) {
      const uint32_t first = words[PIXELS * c + which], second = words[PIXELS * (c + 1) + which];
      return Format::CONTAINED == 1 ? contain_pair(first, second, scale) : split_pair(first, second, scale);
    };
    return make_uint4(pair(0), pair(2), pair(4), pair(6));
  } else if constexpr (sizeof(typename Format::Stored) == 2) {
    const uint32_t select = which == 0 ? 0x5410 : 0x7632;
    return make_uint4(__byte_perm(words[0], words[1], select), __byte_perm(words[2], words[3], select),
                      __byte_perm(words[4], words[5], select), __byte_perm(words[6], words[7], select));
  } else {
    const auto rounded = [&](int c) {
      const uint32_t word = PIXELS == 2 && which != 0 ? words[2 * c + 1] : words[PIXELS * c];
      return float_bits(round_to_tf32(bits_float(word)));
    };
    return make_uint4(rounded(0), rounded(1), rounded(2), rounded(3));
  }
}

// The second parts of such a piece, whose first parts are `piece`.
template <int PIXELS, int WORDS>
__device__ __forceinline__ uint4 rest_of(const uint32_t (&words)[WORDS], int which, float scale, const uint4& piece) {
  const auto pair = [&](int c, uint32_t first_parts) {
    return split_rest(words[PIXELS * c + which], words[PIXELS * (c + 1) + which], scale, first_parts);
  };
  return make_uint4(pair(0, piece.x), pair(2, piece.y), pair(4, piece.z), pair(6, piece.w));
}

// Puts a tile on the list, once.
__device__ __forceinline__ void mark(const Guard& guard, uint32_t tile) {
  const uint32_t bit = 1u << tile % 32;
  if ((atomicOr(guard.marked + tile / 32, bit) & bit) == 0) guard.list[atomicAdd(&guard.control->listed, 1)] = tile;
}

// At the start of the tile with this number among the block's: its record; and whether its weights do not fit.
template <typename Format>
__device__ __forceinline__ void announce_tile(const Params& params, const Shared& shared, uint8_t* smem,
                                              const Walk& walk, int number) {
  const UnitCorrelation& of = params.of;
  const Plan& plan = params.plan;
  const Tile& tile = walk.tile;
  TileRecord record;
  const int k = tile.tile_k * plan.tile_k;
  record.channel = tile.group * of.out_channels + k;
  record.out = plan.boxes != 0 ? static_cast<int64_t>(tile.n) << 32 | (tile.p * of.Q + tile.q)
                               : tile.n * of.out_stride[0] + record.channel * of.out_stride[1] +
                                     tile.p * of.out_stride[2] + tile.q * of.out_stride[3];
  record.rows = of.P - tile.p;
  record.columns = min(plan.tile_q, of.Q - tile.q);
  record.channels = of.out_channels - k;
  record.weights = tile.group * plan.tiles_k + tile.tile_k;
  record.flags = (tile.run_ends ? TileRecord::kRunEnds : 0) | (tile.goes_on ? TileRecord::kGoesOn : 0) |
                 (tile.last ? TileRecord::kLast : 0) | tile.behind << TileRecord::kBehindShift;
  reinterpret_cast<TileRecord*>(smem + shared.layout.records)[number % kRecords] = record;
  if constexpr (Format::CONTAINED != 0) {
    const Guard& guard = params.guard;
    if (guard.control->bad_tiles_k != 0 && guard.bad_tile_k[record.weights] != 0) mark(guard, walk.number());
  }
}

// Contained and split operands are watched: values that do not fit into fp16 without a loss mark the tiles whose
// windows they lie in, to be done again.
template <typename Format>
struct Watcher {
  float scale;  // what x is multiplied by
  Watch watch;  // what this lane has seen of the fill

  __device__ __forceinline__ explicit Watcher(const Params& params) {
    if constexpr (Format::CONTAINED != 0) scale = power_of_two(params.guard.control->x_exponent);
  }

  // At the end of a fill: marks its tile and those below, whose windows reach up into that of its tile.
  __device__ __forceinline__ void judge(const Params& params, uint32_t tile) {
    const Plan& plan = params.plan;
    const int exponent = static_cast<int>(float_bits(scale) >> 23) - 127;  // not kept: no register is left
    const bool fits = watch.fits(least_contained(exponent, Format::CONTAINED));
    watch = Watch{};
    if (!__any_sync(~0u, !fits) || threadIdx.x % 32 != 0) return;
    const int below = plan.tiles_q * plan.tiles_k, row = static_cast<int>(tile) / below % plan.tiles_p;
    for (int i = 0; i * plan.tile_p < plan.x_rows && row + i < plan.tiles_p; ++i) mark(params.guard, tile + i * below);
  }
};

// BATCH parts of up to 8 words of registers are on their way to a warp at a time, as many as registers allow. Those of
// contained and split operands are of twice the size and come to shared memory, where every lane reads its own words
// only: no other lane has to wait for them.
template <typename Format, int PIXELS, bool ALL_CHANNELS, int WARPS>
struct Converter {
  using Stored = typename Format::Stored;
  static constexpr int CHANNELS = 16 / sizeof(typename Format::Multiplied);  // of a piece
  static constexpr int WORDS = sizeof(Stored) == 2 ? 1 : PIXELS;             // of one channel of an item
  static constexpr int ITEM_WORDS = CHANNELS * WORDS;
  static constexpr int BATCH =
      Format::CONTAINED != 0 ? raw_parts(Format::CONTAINED) : sizeof(Stored) == 4 ? 6 : k16BitParts;
  static constexpr int FIRST_HALF = (BATCH + 1) / 2;
  static constexpr int HELD = Format::CONTAINED != 0 ? 1 : BATCH;  // parts in registers
  static constexpr int STEP_CHANNELS = kStepBytes / sizeof(typename Format::Multiplied);

  const Params& params;
  const Shared& shared;
  uint8_t* smem;
  int warp_id, lane_id;
  int row_pieces, row_items;  // items of a piece of a row, of a row
  uint32_t by_row, by_piece;  // reciprocals of these

  // The batch to load next: parts first, first + WARPS, ... of the fill of `block`.
  Walk walk;
  int block, first;
  int rows, h0, w0;         // of the fill
  const uint8_t* fill_ptr;  // its first pixel, inside the image or not, in its first channel
  // Where each of its items lies in x from there on, and a bit that says whether that is inside the image. Where all
  // fills are of one batch, the offsets are worked out once, the bits once a tile, and few instructions remain.
  uint32_t offset[BATCH];
  uint32_t inside;
  int number;  // of the tile

  Watcher<Format> watcher;
  uint32_t raw;  // the lane's words of a part: a channel every 256 bytes

  __device__ __forceinline__ Converter(const Params& params, const Shared& shared, uint8_t* smem, const Agenda& agenda,
                                       int warp_id)
      : params(params),
        shared(shared),
        smem(smem),
        warp_id(warp_id),
        walk(params.of, params.plan, agenda, static_cast<int>(blockIdx.x)),
        watcher(params) {
    const Plan& plan = params.plan;
    lane_id = threadIdx.x % 32;
    row_pieces = plan.x_pitch / PIXELS;
    row_items = 2 * plan.block_steps * row_pieces;
    by_row = reciprocal(row_items);
    by_piece = reciprocal(row_pieces);
    block = 0;
    first = warp_id;
    number = 0;
    raw = shared.layout.raw + warp_id * BATCH * kRawPartBytes + lane_id * 8;
    enter_tile();
    look<true>();
  }

  __device__ __forceinline__ int parts() const { return (rows * row_items + 31) / 32; }

  __device__ __forceinline__ void enter_tile() {
    const UnitCorrelation& of = params.of;
    const Plan& plan = params.plan;
    rows = walk.tile.continues ? plan.tile_p : plan.x_rows;
    h0 = walk.tile.p - of.pad_h + plan.x_rows - rows;
    w0 = walk.tile.q - of.pad_w - plan.lead;
    fill_ptr =
        static_cast<const uint8_t*>(params.in_ptr) +
        (walk.tile.n * of.in_stride[0] + static_cast<int64_t>(walk.tile.group) * of.in_channels * of.in_stride[1] +
         h0 * of.in_stride[2] + w0 * of.in_stride[3]) *
            static_cast<int64_t>(sizeof(Stored));
    if (warp_id == WARPS - 1 && lane_id == 0) announce_tile<Format>(params, shared, smem, walk, number);
    ++number;
  }

  // The first item of the fill that is watched. A row is watched once, in the first window that it is in: there
  // it is one of the last rows, but in the uppermost window. (A part that the first one is in is watched as a whole.)
  __device__ __forceinline__ int first_watched() const {
    return walk.tile.p == 0 ? 0 : (rows - params.plan.tile_p) * row_items;
  }

  // Part i of the batch.
  struct Item {
    int row, piece, column;
    bool exists;
  };
  __device__ __forceinline__ Item item_of(int i) const {
    const int item = (first + i * WARPS) * 32 + lane_id;
    const int row = quotient(item, by_row);
    const int in_row = item - row * row_items;
    const int piece = quotient(in_row, by_piece);
    return {row, piece, PIXELS * (in_row - piece * row_pieces), row < rows};
  }

  // The last batch of a fill may well be less than half a batch.
  __device__ __forceinline__ bool has_second_half() const { return first + FIRST_HALF * WARPS < parts(); }

  // Where the items of the batch lie, where that is not known already, and which are inside the image.
  template <bool ALL>
  __device__ __forceinline__ void look() {
    inside = 0;
    look_at_parts<ALL, 0, FIRST_HALF>();
    if (has_second_half()) look_at_parts<ALL, FIRST_HALF, BATCH>();
  }

  template <bool ALL, int BEGIN, int END>
  __device__ __forceinline__ void look_at_parts() {
    const UnitCorrelation& of = params.of;
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
      const Item at = item_of(i);
      if constexpr (ALL)
        offset[i] =
            (at.piece * CHANNELS * static_cast<uint32_t>(of.in_stride[1]) +
             at.row * static_cast<uint32_t>(of.in_stride[2]) + at.column * static_cast<uint32_t>(of.in_stride[3])) *
            static_cast<uint32_t>(sizeof(Stored));
      const bool is_inside = at.exists && static_cast<unsigned>(h0 + at.row) < static_cast<unsigned>(of.H) &&
                             static_cast<unsigned>(w0 + at.column) < static_cast<unsigned>(of.W);
      inside |= static_cast<uint32_t>(is_inside) << i;
    }
  }

  // Goes on to the next batch; false when there is none.
  __device__ __forceinline__ bool next() {
    const Plan& plan = params.plan;
    const int before = parts();
    first += BATCH * WARPS;
    if (first < before) {
      look<true>();
      return true;
    }
    first = warp_id;
    const bool new_tile = ++block == plan.blocks_c;
    if (new_tile) {
      block = 0;
      walk.next();
      if (walk.done()) return false;
      enter_tile();
    } else {
      fill_ptr += plan.block_steps * STEP_CHANNELS * params.of.in_stride[1] * static_cast<int64_t>(sizeof(Stored));
    }
    if (before > BATCH * WARPS || before != parts())
      look<true>();
    else if (new_tile)
      look<false>();
    return true;
  }

  template <int BEGIN, int END>
  __device__ __forceinline__ void load(uint32_t (&words)[HELD][ITEM_WORDS]) const {
    const int64_t channel_bytes = params.of.in_stride[1] * sizeof(Stored);
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
      const int piece = ALL_CHANNELS ? 0 : item_of(i).piece;
      const int channels = params.of.in_channels - block * params.plan.block_steps * STEP_CHANNELS - piece * CHANNELS;
      const uint8_t* address = fill_ptr + offset[i];
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) {
        const bool exists = (inside >> i & 1) && (ALL_CHANNELS || c < channels);
        if constexpr (Format::CONTAINED != 0)
          hopper::copy_later<sizeof(Stored) * PIXELS>(shared.base + raw + i * kRawPartBytes + c * 256, address, exists);
        else
          load_pixels<Stored, PIXELS>(address, exists, words[i] + c * WORDS);
        address += channel_bytes;
        asm("" : "+l"(address));  // one addition a channel; the compiler would rather multiply for each
      }
    }
    if constexpr (Format::CONTAINED != 0) hopper::copies_commit();
  }

  // In place of half a batch, so that there are always as many to wait for.
  __device__ __forceinline__ void load_nothing() const {
    if constexpr (Format::CONTAINED != 0) hopper::copies_commit();
  }

  // `place`: of the fill, in bytes from the start of the ring.
  template <int BEGIN, int END>
  __device__ __forceinline__ void store(int place, int first_part, int items, int first_watched,
                                        uint32_t (&held)[HELD][ITEM_WORDS]) {
    const int ring_bytes = x_ring_bytes(params.plan);
    uint8_t* ring = smem + shared.layout.x_ring;
    if constexpr (Format::CONTAINED != 0) hopper::copies_wait<1>();  // but for the other half of a batch
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
      const int item = (first_part + i * WARPS) * 32 + lane_id;
      int at = place + item * PIXELS * 16;
      if (at >= ring_bytes) at -= ring_bytes;
      uint4* to = reinterpret_cast<uint4*>(ring + at);
      uint32_t (&words)[ITEM_WORDS] = held[Format::CONTAINED != 0 ? 0 : i];
      if constexpr (Format::CONTAINED != 0) {
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
          const uint8_t* const from = smem + raw + i * kRawPartBytes + c * 256;
          if constexpr (PIXELS == 2) {
            const uint2 pair = *reinterpret_cast<const uint2*>(from);
            words[2 * c] = pair.x, words[2 * c + 1] = pair.y;
          } else {
            words[c] = *reinterpret_cast<const uint32_t*>(from);
          }
        }
      }
      // Lanes that write 32 bytes apart: every other four of them start with the second pixel, so that eight lanes meet
      // all banks.
      const int swap = PIXELS == 2 ? lane_id / 4 % 2 : 0;
      if constexpr (Format::CONTAINED == 0) {
        const uint4 one = piece_of<Format, PIXELS>(words, swap, watcher.scale);
        if (item < items) to[swap] = one;
        if constexpr (PIXELS == 2) {
          const uint4 other = piece_of<Format, PIXELS>(words, 1 - swap, watcher.scale);
          if (item < items) to[1 - swap] = other;
        }
      } else {
        // One after the other, though lanes meet: to pick words or to exchange pieces takes longer.
        uint4 pieces[PIXELS];
#pragma unroll
        for (int which = 0; which < PIXELS; ++which) {
          pieces[which] = piece_of<Format, PIXELS>(words, which, watcher.scale);
          if (item < items) to[which] = pieces[which];
          if constexpr (Format::CONTAINED == 2) {
            uint4* const to_rest = reinterpret_cast<uint4*>(reinterpret_cast<uint8_t*>(to) + ring_bytes);
            if (item < items) to_rest[which] = rest_of<PIXELS>(words, which, watcher.scale, pieces[which]);
          }
        }
        if ((first_part + i * WARPS) * 32 + 31 >= first_watched) {  // the whole part, or nothing of it
#pragma unroll
          for (int which = 0; which < PIXELS; ++which) watcher.watch.see_contained(pieces[which]);
#pragma unroll
          for (int j = 0; j < ITEM_WORDS; ++j) watcher.watch.see(words[j]);
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    const Plan& plan = params.plan;
    RingPosition fill;         // its first row
    RingPosition empty, full;  // the next row to wait for, to tell of
    uint32_t words[HELD][ITEM_WORDS];
    load<0, FIRST_HALF>(words);
    if (has_second_half())
      load<FIRST_HALF, BATCH>(words);
    else
      load_nothing();
    int waited = 0, told = 0;  // rows of the fill
    for (bool more = true; more;) {
      // The fill whose values are in the registers, or in this warp's parts of shared memory, now.
      const int loaded_first = first, loaded_rows = rows, loaded_parts = parts();
      const int items = loaded_rows * row_items;
      const int place = fill.slot * x_row_bytes(plan);
      const uint32_t loaded_tile = Format::CONTAINED != 0 ? walk.number() : 0;
      const int watched = Format::CONTAINED != 0 ? first_watched() : 0;
      more = next();
      const int behind = loaded_first + BATCH * WARPS;
      const bool fill_ends = behind >= loaded_parts;
      // All rows of the fill in the end, also those in which this warp has no part: nobody gets a round ahead.
      const int touched = fill_ends ? loaded_rows : quotient((behind - WARPS) * 32 + 31, by_row) + 1;
      for (; waited < touched; ++waited) {
        hopper::barrier_wait(shared.x_empty(empty.slot), empty.parity ^ 1);
        empty.advance(plan.x_slots);
      }
      // By halves, so that one is on its way while the other is stored.
      store<0, FIRST_HALF>(place, loaded_first, items, watched, words);
      if (more)
        load<0, FIRST_HALF>(words);
      else
        load_nothing();
      if (loaded_first + FIRST_HALF * WARPS < loaded_parts)
        store<FIRST_HALF, BATCH>(place, loaded_first, items, watched, words);
      if (more && has_second_half())
        load<FIRST_HALF, BATCH>(words);
      else
        load_nothing();
      const int done = fill_ends ? loaded_rows : quotient(behind * 32, by_row);
      if (told < done) {
        hopper::fence_async();
        __syncwarp();  // all lanes have stored and fenced before one of them tells
        for (; told < done; ++told) {
          if (lane_id == 0) hopper::barrier_arrive(shared.x_full(full.slot));
          full.advance(plan.x_slots);
        }
      }
      if (fill_ends) {
        fill.advance(plan.x_slots, loaded_rows);
        waited = told = 0;
        if constexpr (Format::CONTAINED != 0) watcher.judge(params, loaded_tile);
      }
    }
  }
};

// Contained operands whose x boxes load: a fill is chunks, of 64 pixels of a step of a row, and of what is left over of
// several steps, and perhaps rows. The converting warps take turns with them; CHUNKS are on their way to each, across
// fills and tiles, with a note of what is to be done with them. What lies where in a fill is worked out once, by all
// lanes, and what lies outside the image comes as zeros.
//
//   a row of a step:   [ 64 pixels ][ 64 pixels ] ... [rest]      the rests of several steps, perhaps rows, are a chunk
//   a chunk:           [16 channels][64 pixels] x 4 bytes         a rest: [channels of all its steps][rows][columns]
//
// A chunk needs one barrier, raw_full: the copy engine arrives when it is there, and so does the thread that ordered
// it, after its note. None says that it is free: the warp that orders the next one into it has read it itself.
struct alignas(16) Note {
  uint32_t place;  // of the first pixel in its fill in the x ring, in bytes
  uint32_t how;
  uint32_t tile;  // its number
  uint32_t unused;

  // Lanes that have a pair of pixels; flags: the last chunk of its fill, of all, for this warp; rows of the fill up to
  // the last one that it has a part in, and all rows.
  static constexpr uint32_t kLanes = 63, kRest = 1 << 6, kWatched = 1 << 7, kFillEnds = 1 << 8, kLast = 1 << 9;
  static constexpr int kTouchedShift = 10, kRowsShift = 16;
};
static_assert(sizeof(Note) == kNoteBytes, "its room");

struct ChunkConverter {
  static constexpr int WARPS = 3;
  static constexpr int CHUNKS = kChunks / WARPS;  // of a warp

  const Params& params;
  const Shared& shared;
  uint8_t* smem;
  int warp_id, lane_id;
  Watcher<Contained> watcher;

  // The chunk to load next, of those that this warp has of the fill.
  Walk walk;
  int number = 0;       // of the tile
  int block;            // of input channels
  int rows;             // of the fill
  int chunks, chunk;    // of the warp in the fill: all, the next one
  int w0, h0, channel;  // its first pixel and channel
  uint32_t how, tile;   // what all its notes have

  // Lane i's copy of the geometry of the warp's chunk first + i, the same in every fill of as many rows.
  int first = -1, looked_at_rows = 0;
  int column, row, in_channel;
  uint32_t place, own_how;
  int bytes;

  uint32_t rest_place, rest_raw;  // of the lane's pair of pixels in a chunk of rests: in the x ring, in the chunk

  __device__ __forceinline__ ChunkConverter(const Params& params, const Shared& shared, uint8_t* smem,
                                            const Agenda& agenda, int warp_id)
      : params(params),
        shared(shared),
        smem(smem),
        warp_id(warp_id),
        lane_id(threadIdx.x % 32),
        watcher(params),
        walk(params.of, params.plan, agenda, static_cast<int>(blockIdx.x)) {
    const Plan& plan = params.plan;
    rest_place = rest_raw = 0;
    if (plan.rest_pixels > 0) {
      const int pairs = plan.rest_pixels / 2, in_piece = lane_id / pairs, pair = lane_id - in_piece * pairs;
      const int piece = in_piece / plan.rest_rows * kChunkPieces, in_rows = in_piece % plan.rest_rows;
      rest_place = in_rows * x_row_bytes(plan) + piece * plan.x_pitch * 16 + pair * 32;
      rest_raw = (piece * 8 * plan.rest_rows + in_rows) * plan.rest_columns * 4 + pair * 8;
      const int channel_bytes = plan.rest_rows * plan.rest_columns * 4;
      const int least = (8 * kChunkPieces - 1) * channel_bytes + 8;
      if (static_cast<int>(rest_raw) + least > kChunkBytes) rest_raw = 0;  // none there
    }
    enter_tile();
  }

  __device__ __forceinline__ void enter_tile() {
    const Plan& plan = params.plan;
    if (warp_id == WARPS - 1 && lane_id == 0) announce_tile<Contained>(params, shared, smem, walk, number);
    ++number;
    block = 0;
    rows = walk.tile.continues ? plan.tile_p : plan.x_rows;
    h0 = walk.tile.p - params.of.pad_h + plan.x_rows - rows;
    w0 = walk.tile.q - params.of.pad_w - plan.lead;
    tile = walk.number();
    enter_fill();
  }

  __device__ __forceinline__ void enter_fill() {
    const Plan& plan = params.plan;
    channel = walk.tile.group * params.of.in_channels + block * plan.block_steps * 16;
    // A row is watched once, in the first window that it is in: in the uppermost one all are, else see `look`.
    how = (walk.tile.p == 0 ? Note::kWatched : 0) | (walk.tile.last && block == plan.blocks_c - 1 ? Note::kLast : 0);
    chunk = 0;
    if (first != 0 || looked_at_rows != rows) look(0);
  }

  __device__ __forceinline__ void look(int from) {
    const Plan& plan = params.plan;
    const int pieces = 2 * plan.block_steps, row_chunks = pieces / kChunkPieces * plan.whole_chunks,
              whole = rows * row_chunks;
    const int rest_groups = plan.rest_pixels > 0 ? (pieces + plan.rest_pieces - 1) / plan.rest_pieces : 0;
    const int all = whole + rows / plan.rest_rows * rest_groups;
    chunks = max((all - warp_id + WARPS - 1) / WARPS, 1);  // perhaps an empty one, to hand the fill on
    first = from;
    looked_at_rows = rows;
    const int own = (from + lane_id) * WARPS + warp_id;
    int lanes, touched, piece;
    if (own < whole) {
      row = own / row_chunks;
      const int in_row = own - row * row_chunks, step = in_row / plan.whole_chunks;
      piece = step * kChunkPieces;
      column = (in_row - step * plan.whole_chunks) * kChunkColumns;
      lanes = 32;
      bytes = kChunkBytes;
      touched = row + 1;
      own_how = 0;
    } else {
      const int of_rows = rest_groups > 0 ? (own - whole) / rest_groups : 0;
      row = of_rows * plan.rest_rows;
      piece = (own - whole - of_rows * rest_groups) * plan.rest_pieces;
      column = plan.whole_chunks * kChunkColumns;
      const bool exists = rest_groups > 0 && row < rows;
      lanes =
          exists ? min(plan.rest_pieces, pieces - piece) / kChunkPieces * plan.rest_rows * (plan.rest_pixels / 2) : 0;
      bytes = exists ? plan.rest_columns * plan.rest_rows * plan.rest_pieces * 32 : 0;
      touched = min(row + plan.rest_rows, rows);
      own_how = Note::kRest;
    }
    in_channel = piece * 8;
    place = row * x_row_bytes(plan) + (piece * plan.x_pitch + column) * 16;
    own_how |= lanes | touched << Note::kTouchedShift | rows << Note::kRowsShift;
    if (touched > rows - plan.tile_p) own_how |= Note::kWatched;
    if (from + lane_id == chunks - 1) own_how |= Note::kFillEnds;
  }

  // Loads the next one, if there is any left.
  __device__ __forceinline__ void load(int slot) {
    if (walk.done()) return;
    if (lane_id == chunk - first) {
      Note note;
      note.place = place;
      note.how = own_how | how;
      if ((own_how & Note::kFillEnds) == 0) note.how &= ~Note::kLast;
      note.tile = tile;
      reinterpret_cast<Note*>(smem + shared.layout.notes)[slot] = note;
      const uint32_t barrier = shared.raw_full(slot);
      hopper::barrier_arrive_expecting(barrier, bytes);
      if (bytes > 0)
        hopper::load_box(own_how & Note::kRest ? params.rest_chunks : params.whole_chunks,
                         shared.base + shared.layout.raw + slot * kChunkBytes, w0 + column, h0 + row,
                         channel + in_channel, walk.tile.n, barrier);
    }
    if (++chunk < chunks) {
      if (chunk - first == 32) look(chunk);
    } else if (++block < params.plan.blocks_c) {
      enter_fill();
    } else {
      walk.next();
      if (!walk.done()) enter_tile();
    }
  }

  __device__ __forceinline__ void run() {
    const Plan& plan = params.plan;
    const int ring_bytes = x_ring_bytes(plan), row_bytes = x_row_bytes(plan), piece_bytes = plan.x_pitch * 16;
    const int rest_channel = plan.rest_columns * plan.rest_rows * 4;
    uint8_t* const ring = smem + shared.layout.x_ring;
    RingPosition fill;         // its first row
    RingPosition empty, full;  // the next row to wait for, to tell of
    RingPosition at;
    for (int i = 0; i < CHUNKS; ++i) load(warp_id * CHUNKS + i);
    int waited = 0;  // rows of the fill
    for (bool last = false; !last; at.next(CHUNKS)) {
      const int slot = warp_id * CHUNKS + at.slot;
      hopper::barrier_wait(shared.raw_full(slot), at.parity);
      const Note note = reinterpret_cast<const Note*>(smem + shared.layout.notes)[slot];
      const bool rest = (note.how & Note::kRest) != 0, exists = lane_id < static_cast<int>(note.how & Note::kLanes);
      const uint8_t* const raw = smem + shared.layout.raw + slot * kChunkBytes + (rest ? rest_raw : lane_id * 8);
      const int touched = note.how >> Note::kTouchedShift & 63;
      int place = fill.slot * row_bytes + note.place + (rest ? rest_place : lane_id * 32);
      uint32_t words[kChunkPieces][16];
      const auto read = [&](int channel_bytes) {
#pragma unroll
        for (int i = 0; i < 8 * kChunkPieces; ++i) {
          const uint2 pair = *reinterpret_cast<const uint2*>(raw + i * channel_bytes);
          words[i / 8][i % 8 * 2] = pair.x, words[i / 8][i % 8 * 2 + 1] = pair.y;
        }
      };
      if (rest)
        read(rest_channel);
      else
        read(kChunkColumns * 4);
      __syncwarp();  // all lanes have read their words and the note
      load(slot);
      for (; waited < touched; ++waited) {
        hopper::barrier_wait(shared.x_empty(empty.slot), empty.parity ^ 1);
        empty.next(plan.x_slots);
      }
#pragma unroll
      for (int piece = 0; piece < kChunkPieces; ++piece, place += piece_bytes) {
        uint4* const to = reinterpret_cast<uint4*>(ring + (place >= ring_bytes ? place - ring_bytes : place));
        // One after the other, though lanes meet: to pick words or to exchange pieces takes longer.
        uint4 packed[2];
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          packed[which] = piece_of<Contained, 2>(words[piece], which, watcher.scale);
          if (exists) to[which] = packed[which];
        }
        if ((note.how & Note::kWatched) != 0 && exists) {
#pragma unroll
          for (int which = 0; which < 2; ++which) watcher.watch.see_contained(packed[which]);
#pragma unroll
          for (uint32_t word : words[piece]) watcher.watch.see(word);
        }
      }
      if ((note.how & Note::kFillEnds) != 0) {
        const int note_rows = note.how >> Note::kRowsShift;
        for (; waited < note_rows; ++waited) {  // also for those that it has no part in: nobody gets a round ahead
          hopper::barrier_wait(shared.x_empty(empty.slot), empty.parity ^ 1);
          empty.next(plan.x_slots);
        }
        hopper::fence_async();
        __syncwarp();  // all lanes have stored and fenced before one of them tells
        for (int i = 0; i < note_rows; ++i) {
          if (lane_id == 0) hopper::barrier_arrive(shared.x_full(full.slot));
          full.next(plan.x_slots);
        }
        fill.skip(plan.x_slots, note_rows);
        waited = 0;
        watcher.judge(params, note.tile);
      }
      last = (note.how & Note::kLast) != 0;
    }
  }
};

// -- Store: accumulators -> staging -> memory --

// One warp's view of its share of a tile.
struct Store {
  uint8_t* smem;
  uint32_t staging, carried;  // of this warp: where in shared memory
  int warp_id, lane_id;
  int first_k, first_p;  // in the tile
};

// Turns the sums of a thread's two rows into outputs.
template <bool CONTAINED>
struct Finish {
  float bias[2] = {-0.0f, -0.0f};  // which changes nothing
  float factor[2] = {1, 1};        // contained and split operands: undoes their scales

  __device__ __forceinline__ float value(float sum, int row, float added) const {
    if constexpr (CONTAINED)
      return fmaf(sum, factor[row], added);
    else
      return sum + added;
  }
};

// Two neighbouring pixels as memory has them.
template <typename Element>
struct Packed;
template <>
struct Packed<float> {
  using Pair = float2;
};
template <>
struct Packed<Half> {
  using Pair = uint32_t;
};
template <>
struct Packed<BFloat16> {
  using Pair = uint32_t;
};
template <typename Element>
using PackedPair = typename Packed<Element>::Pair;

template <typename Element>
__device__ __forceinline__ PackedPair<Element> pack_pair(float first, float second) {
  if constexpr (sizeof(Element) == 4)
    return make_float2(first, second);
  else
    return narrow_pair(first, second, Element{});
}

// Tiles of one row. All 16 channels (planes) of a warp at a time with 16 bits, 8 with fp32, by parts of part_bytes().
// Offsets count bytes from the boundary at or before which a part begins in its plane: a sector of 32 bytes, or one of
// 16 bytes where a run starts.
//
//              <- sector ->                <- sector ->
//   staged:   [carried|new        ...               |new ]
//   stored:   [-----------------  ...  -------------]           the rest is carried over
//
// In staging the new pixels of all planes begin at offset % 16 behind half a sector, so that lanes meet few conflicts.
template <typename Format, int TILE_Q>
__device__ __forceinline__ void store_runs(const Params& params, const Store& store, const TileRecord& tile,
                                           const Finish<Format::CONTAINED != 0>& finish,
                                           const float (&acc)[TILE_Q / 2]) {
  using Element = typename Format::Stored;
  constexpr int kSize = sizeof(Element);
  constexpr int kPartBytes = part_bytes(Format::CONTAINED);
  constexpr int kColumns = kPartBytes / kSize;
  constexpr int kPlaneBytes = staged_plane_bytes(kSize, Format::CONTAINED);
  constexpr int kPieces = kPartBytes / 512;  // of 16 bytes a lane
  constexpr int kAtOnce = kSize == 2 ? 2 * kPlanes : kPlanes;
  constexpr int kTogether = 2;  // planes whose loads from shared memory are on their way together
  const int lane_id = store.lane_id;
  if (store.first_p >= tile.rows) return;
  const UnitCorrelation& of = params.of;
  const int64_t plane_stride = of.out_stride[1] * kSize;
  const uint64_t tile_address =
      reinterpret_cast<uint64_t>(params.out_ptr) +
      (tile.out + store.first_k * of.out_stride[1] + store.first_p * of.out_stride[2]) * kSize;
  uint8_t* const staged = store.smem + store.staging + kSector / 2;
  uint4* const own_carried = reinterpret_cast<uint4*>(store.smem + store.carried) + lane_id;

#pragma unroll
  for (int first_half = 0; first_half < 2; first_half += kAtOnce / kPlanes) {
    const int planes = min(tile.channels - store.first_k - 8 * first_half, kAtOnce);
    if (planes <= 0) break;
    int columns = tile.columns;
    asm volatile("" : "+r"(columns));  // or comparisons with it would take registers in both halves
#pragma unroll
    for (int part = 0; part < TILE_Q / kColumns; ++part) {
      const int bytes = min(columns - part * kColumns, kColumns) * kSize;
      if (part > 0 && bytes <= 0) break;
      const uint64_t address = tile_address + 8 * first_half * plane_stride + part * kPartBytes;
      const int behind = min(((tile.flags >> TileRecord::kBehindShift) + part * kColumns) * kSize, kSector);
      const bool run_ends = (tile.flags & TileRecord::kRunEnds) != 0 && columns <= (part + 1) * kColumns;
      uint32_t begin = static_cast<uint32_t>(address), stride = static_cast<uint32_t>(plane_stride);
      asm volatile("" : "+r"(begin), "+r"(stride));

      // Two lanes have the carried sector of a plane, 16 bytes each.
      const bool carries = kAtOnce == 16 || lane_id / 16 == first_half;
      const int carried_plane = lane_id / 2 % kAtOnce;
      const auto sector_of = [&](int byte) {  // of the part: where it lies in staging
        const uint32_t carried_begin = begin + carried_plane * stride;
        const uint32_t sectors = ((carried_begin & (kSector - 1)) + byte) & ~(kSector - 1u);
        return reinterpret_cast<uint4*>(staged + carried_plane * kPlaneBytes + lane_id % 2 * 16 - (carried_begin & 16) +
                                        sectors);
      };
      __syncwarp();  // the part before has been read
      if (behind > 0) {
        if (carries) *sector_of(0) = *own_carried;
        __syncwarp();  // its last bytes are overwritten by new pixels
      }

      // Four lanes stage 8 pixels of a plane at a time.
#pragma unroll
      for (int half = first_half; half < first_half + kAtOnce / kPlanes; ++half) {
        const int plane = 8 * (half - first_half) + lane_id / 4;
        const int shift = static_cast<int>((begin + plane * stride) & 15);
        uint8_t* const to_plane = staged + plane * kPlaneBytes;
        const auto value_of = [&](int i, int which, float added) {
          return finish.value(acc[4 * (part * (kColumns / 8) + i) + 2 * half + which], half, added);
        };
        const auto stage = [&](float added) {
          if constexpr (kSize == 2) {
            // Shifted pairs of pixels reach into the next 16 bytes: those lanes stage the pair of the 8 pixels before
            // instead, so that no bank is met twice.
            const int in_group = shift + lane_id % 4 * 4;
            const bool later = in_group >= 16;
            uint8_t* const to = to_plane + (in_group & 15);
            uint32_t before = 0;
#pragma unroll
            for (int i = 0; i < kColumns / 8; ++i) {
              const uint32_t pair = narrow_pair(value_of(i, 0, added), value_of(i, 1, added), Element{});
              if (i > 0 || !later) *reinterpret_cast<uint32_t*>(to + 16 * i) = later ? before : pair;
              before = pair;
            }
            if (later) *reinterpret_cast<uint32_t*>(to + kPartBytes) = before;
          } else {
            uint8_t* const to = to_plane + shift + lane_id % 4 * 8;
#pragma unroll
            for (int i = 0; i < kColumns / 8; ++i)
              *reinterpret_cast<float2*>(to + 32 * i) = make_float2(value_of(i, 0, added), value_of(i, 1, added));
          }
        };
        if (!params.plan.y_pairs) {
          Element* const pixels = reinterpret_cast<Element*>(to_plane + shift) + 2 * (lane_id % 4);
#pragma unroll
          for (int i = 0; i < kColumns / 8; ++i) {
            narrow(value_of(i, 0, finish.bias[half]), pixels[8 * i]);
            narrow(value_of(i, 1, finish.bias[half]), pixels[8 * i + 1]);
          }
        } else if (Format::CONTAINED != 0 || params.bias_ptr != nullptr) {  // one instruction multiplies and adds
          stage(finish.bias[half]);
        } else {
          stage(-0.0f);  // which the compiler leaves out
        }
      }
      __syncwarp();  // all pixels are staged

      // 16 bytes a lane of every plane, from its boundary on. `to` is opaque, or the compiler would split it into a
      // part of the warp and one of the lane, for more and slower instructions.
      const int mask = behind == 0 ? 15 : kSector - 1;
      const bool head = behind < kSector;  // the first piece or sector is not all ours
      const int place = lane_id * 16;
      uint64_t to = address + (place & ~mask);
      asm volatile("" : "+l"(to));
      const int in_boundary = place & mask;
      // A lane stores its piece if the shift of the plane is more than this: if the piece and the sector it lies in are
      // all there, and all of this run.
      int end[kPieces];
#pragma unroll
      for (int j = 0; j < kPieces; ++j)
        end[j] = head && place + 512 * j <= mask ? kSector : ((place + 512 * j) | mask) - bytes;
      const uint8_t* const own_piece = staged + place;
      const auto piece_at = [&](int plane, int j, uint64_t to_plane) {
        return *reinterpret_cast<const uint4*>(own_piece + plane * kPlaneBytes + 512 * j -
                                               (static_cast<uint32_t>(to_plane) & mask & ~15));
      };
      const auto store_piece = [&](int j, uint64_t to_plane, const uint4& piece) {
        if (end[j] < (static_cast<int>(to_plane) & mask))
          __stcs(reinterpret_cast<uint4*>(
                     ((to_plane >> 32 << 32) | (static_cast<uint32_t>(to_plane) & ~mask) | in_boundary) + 512 * j),
                 piece);
      };
      if (planes == kAtOnce) {
#pragma unroll
        for (int first = 0; first < kAtOnce; first += kTogether) {
          uint4 pieces[kTogether][kPieces];
          uint64_t places[kTogether];
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            places[i] = to;
#pragma unroll
            for (int j = 0; j < kPieces; ++j) pieces[i][j] = piece_at(first + i, j, to);
            to += plane_stride;
            asm volatile("" : "+l"(to));
          }
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
#pragma unroll
            for (int j = 0; j < kPieces; ++j) store_piece(j, places[i], pieces[i][j]);
          }
        }
      } else {
#pragma unroll 1
        for (int plane = 0; plane < planes; ++plane, to += plane_stride) {
#pragma unroll
          for (int j = 0; j < kPieces; ++j) store_piece(j, to, piece_at(plane, j, to));
        }
      }

      // Ends of the run inside a sector: four lanes a plane, by words where these are aligned.
      int quad = lane_id / 4;
      asm volatile("" : "+r"(quad));  // or products with it would take registers from the start
      const auto store_ends = [&](auto word) {
        constexpr int kWord = sizeof(word);
#pragma unroll 1
        for (int plane = quad; plane < planes; plane += 8) {
          const uint64_t plane_address = address + plane * plane_stride;
          const int offset = static_cast<int>(plane_address) & mask;
          const uint8_t* const from = staged + plane * kPlaneBytes - (offset & ~15);
          uint8_t* const boundary = reinterpret_cast<uint8_t*>(plane_address - offset);
          const int last = offset + bytes, whole = last & ~mask;
          const int head_end = head ? min(mask + 1, run_ends ? last : whole) : 0;
          const int tail = max(whole, head_end);
          for (int at = lane_id % 4 * kWord; at <= mask; at += 4 * kWord) {
            if (at >= offset - behind && at < head_end)
              *reinterpret_cast<decltype(word)*>(boundary + at) = *reinterpret_cast<const decltype(word)*>(from + at);
            if (run_ends && tail + at < last)
              *reinterpret_cast<decltype(word)*>(boundary + tail + at) =
                  *reinterpret_cast<const decltype(word)*>(from + tail + at);
          }
        }
      };
      if (mask == 15 && run_ends && params.plan.y_pairs && bytes % 16 == 0) {
        // One piece of 16 bytes in all, head and tail: a word a lane.
#pragma unroll
        for (int first = 0; first < kAtOnce; first += 8) {
          const int plane = first + quad;
          const uint64_t plane_address = address + plane * plane_stride;
          const int offset = static_cast<int>(plane_address) & 15, word = lane_id % 4 * 4;
          const int at = word < offset ? word + bytes : word;
          if (plane < planes)
            *reinterpret_cast<uint32_t*>(plane_address - offset + at) =
                *reinterpret_cast<const uint32_t*>(staged + plane * kPlaneBytes + at);
        }
      } else if (head || run_ends) {
        if (kSize == 4 || (params.plan.y_pairs && columns % 2 == 0))
          store_ends(uint32_t{});
        else
          store_ends(uint16_t{});
      }
      asm volatile("" : "+r"(begin));  // or what sector_of has worked out above would take registers
      if (!run_ends && carries) *own_carried = *sector_of(bytes);
    }
  }
}

// By boxes: tiles of a run of flat rows, all 16 channels of a warp at a time with 16 bits or contained operands, 8 with
// fp32 else. They are aligned alike, and so are staged at the same shift from a boundary of a sector, in blocks of 128
// bytes:
//
//               <---- block ---->                              <---- block ---->
//   staged:    [shift|new                   ...                                 |new ]   the last ones with the carried
//   stored:    [-----------------           ...                 ----------------]        sectors: the next tile's first
//
// Four blocks are a box. Whole sectors in front of the first whole block and behind the last one are stored by pieces
// of 16 bytes, and what begins or ends a run pixel by pixel.
template <typename Format, int TILE_Q>
__device__ __forceinline__ void store_boxes(const Params& params, const Store& store, const TileRecord& tile,
                                            const Finish<Format::CONTAINED != 0>& finish,
                                            const float (&acc)[TILE_Q / 2]) {
  using Element = typename Format::Stored;
  constexpr int kSize = sizeof(Element);
  constexpr int kSectorPixels = kSector / kSize;
  constexpr int kBlockPixels = hopper::kBoxRowBytes / kSize;
  constexpr int kTileBytes = TILE_Q * kSize;  // of a channel
  constexpr int kBlocks = TILE_Q / kBlockPixels;
  constexpr int kRounds = Format::CONTAINED != 0 ? 1 : kSize / 2;
  constexpr int kChannels = 16 / kRounds;  // at a time
  constexpr int kBlockBytes = kChannels * hopper::kBoxRowBytes;
  constexpr int kParts = kBlocks / 4;  // boxes of so many channels
  static_assert(kBlocks * kBlockBytes == box_bytes(Format::CONTAINED), "all of staging");
  const UnitCorrelation& of = params.of;
  const int lane_id = store.lane_id;

  // Pixels count from the start of the image in the warp's first channel, positions from the boundary before the tile.
  const int log_boxes = params.plan.log_boxes;
  const int kind = store.warp_id & ((1 << log_boxes) - 1), first_channel = store.warp_id >> log_boxes << 4;
  const int n = static_cast<int>(tile.out >> 32);
  const int pixel = static_cast<int>(tile.out) + kind * static_cast<int>(of.out_stride[1]);
  const int shift = pixel & (kSectorPixels - 1);
  const int behind = tile.flags >> TileRecord::kBehindShift;
  const bool run_ends = (tile.flags & TileRecord::kRunEnds) != 0;
  const int end = shift + tile.columns;
  // The extent of the staged pixels without a sector that is carried over, and its whole blocks.
  const int begin = max(shift - behind, 0), until = run_ends ? end : end & ~(kSectorPixels - 1);
  const int first_block = begin > 0 ? 1 : 0, last_block = min(until / kBlockPixels, kBlocks);
  // All is blocks, and what is left over lies where it is carried from.
  const bool whole = begin == 0 && last_block == kBlocks && !run_ends;

  // Two neighbouring pixels of lane_id / 4, 8 pixels further with every i: blocks repeat.
  constexpr int kPeriod = kBlockPixels / 8;
  const int row = kSize == 2 ? lane_id / 4 : lane_id / 4 % 4 * 2 + lane_id / 16;
  const uint32_t row_place = store.staging + row * hopper::kBoxRowBytes + row * 16;
  const uint32_t own = (shift + 2 * (lane_id % 4)) * kSize;
  uint32_t to[kPeriod];
#pragma unroll
  for (int i = 0; i < kPeriod; ++i) {
    constexpr int kMost = (kSectorPixels + 4) * kSize;  // of `own`
    const uint32_t at = own + 8 * kSize * i;
    to[i] = kMost + 8 * kSize * i < hopper::kBoxRowBytes
                ? at ^ row_place
                : (at % hopper::kBoxRowBytes ^ row_place) + at / hopper::kBoxRowBytes * kBlockBytes;
  }

#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const uint32_t carried = store.carried + round * kChannels * kSector;
    // Two lanes have the sector of a channel, 16 bytes each.
    uint4* const own_carried = reinterpret_cast<uint4*>(store.smem + carried) + lane_id;
    const bool carries = lane_id < 2 * kChannels;
    uint4 before;
    if (carries) before = *own_carried;
    if (lane_id == 0) {
      if (round == 0)
        hopper::bulk_stores_wait_read<0>();
      else
        hopper::bulk_stores_wait_read<kParts - 1>();
    }
    __syncwarp();  // staging is free, at least for the first part
    if (behind > 0 && carries)
      *reinterpret_cast<uint4*>(store.smem + store.staging + lane_id / 2 * hopper::kBoxRowBytes +
                                ((lane_id % 2 ^ lane_id / 2) & 7) * 16) = before;
    __syncwarp();  // its last bytes are overwritten by new pixels

    const auto stage = [&](int first, int last, const float (&added)[2]) {
#pragma unroll
      for (int i = first; i < last; ++i) {
#pragma unroll
        for (int half = 0; half < kChannels / 8; ++half) {
          const int plane = round * kChannels / 8 + half;
          uint32_t place = to[i % kPeriod] + i / kPeriod * kBlockBytes + half * 8 * hopper::kBoxRowBytes;
          if ((8 * i + kSectorPixels + 6) * kSize > kTileBytes && own + 8 * kSize * i >= kTileBytes)
            place = carried + (row + 8 * half) * kSector + own + 8 * kSize * i - kTileBytes;
          *reinterpret_cast<PackedPair<Element>*>(store.smem + place) =
              pack_pair<Element>(finish.value(acc[4 * i + 2 * plane], plane, added[plane]),
                                 finish.value(acc[4 * i + 2 * plane + 1], plane, added[plane]));
        }
      }
    };
    const auto stage_some = [&](int first, int last) {
      const float none[2] = {-0.0f, -0.0f};                      // which the compiler leaves out
      if (Format::CONTAINED != 0 || params.bias_ptr != nullptr)  // one instruction multiplies and adds
        stage(first, last, finish.bias);
      else
        stage(first, last, none);
    };
    const int box_channel = (tile.channel >> log_boxes) + first_channel + round * kChannels;
    constexpr int kGroups = TILE_Q / 8 / kParts;  // of 8 pixels, in a part
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (round > 0 && part + 1 < kParts) {
        stage_some(part * kGroups, (part + 1) * kGroups - 1);
        if (lane_id == 0) hopper::bulk_stores_wait_read<0>();
        __syncwarp();  // the next part of staging is free, in which this one ends
        stage_some((part + 1) * kGroups - 1, (part + 1) * kGroups);
      } else {
        stage_some(part * kGroups, (part + 1) * kGroups);
      }
      hopper::fence_async();
      __syncwarp();  // all pixels are staged
      if (lane_id == 0) {
        const auto store_blocks = [&](const hopper::BoxMap& boxes, int block) {
          hopper::store_box(boxes, store.smem + store.staging + block * kBlockBytes,
                            pixel - shift + block * kBlockPixels, box_channel, 0, n);
        };
        const int first = max(4 * part, first_block), last = min(4 * part + 4, last_block);
        if (last - first == 4) {
          store_blocks(params.four_blocks, first);
        } else {
#pragma unroll 1
          for (int block = first; block < last; ++block) store_blocks(params.one_block, block);
        }
        hopper::bulk_stores_commit();
      }
    }
    if (whole) continue;

    const auto place_of = [&](int row, int position) {
      const uint32_t at = position * kSize;
      return store.smem + (at < kTileBytes
                               ? store.staging + at / hopper::kBoxRowBytes * kBlockBytes + row * hopper::kBoxRowBytes +
                                     (at % hopper::kBoxRowBytes ^ (row & 7) * 16)
                               : carried + row * kSector + at - kTileBytes);
    };
    const int boxes = 1 << log_boxes, channel = kind + boxes * (first_channel + round * kChannels);
    const int channels = min(kChannels, (tile.channels - channel + boxes - 1) >> log_boxes);
    Element* const out = static_cast<Element*>(params.out_ptr) + n * of.out_stride[0] +
                         (tile.channel + channel) * of.out_stride[1] + static_cast<int>(tile.out) - shift;
    constexpr int kPiece = 16 / kSize;
    // Less than a block: eight lanes a channel, 16 bytes each.
    const auto store_pieces = [&](int boundary, int from, int to) {
      const int at = boundary + lane_id % 8 * kPiece;
      const bool exists = at >= from && at + kPiece <= to;
#pragma unroll
      for (int i = lane_id / 8; i < kChannels; i += 4)
        if (exists && i < channels)
          __stcs(reinterpret_cast<uint4*>(out + i * boxes * of.out_stride[1] + at),
                 *reinterpret_cast<const uint4*>(place_of(i, at)));
    };
    // Less than a piece: a pixel a lane.
    const auto store_pixels = [&](int from, int to) {
      const int at = from + lane_id % kPiece;
#pragma unroll
      for (int i = lane_id / kPiece; i < kChannels; i += 32 / kPiece)
        if (at < to && i < channels)
          out[i * boxes * of.out_stride[1] + at] = *reinterpret_cast<const Element*>(place_of(i, at));
    };
    const int head = min((begin + kPiece - 1) & ~(kPiece - 1), until), tail = max(until & ~(kPiece - 1), head);
    const int rest = max(last_block, first_block) * kBlockPixels;
    if (begin < head) store_pixels(begin, head);
    if (first_block > 0) store_pieces(0, head, min(kBlockPixels, until));
    store_pieces(rest, rest, until);
    if (tail < until) store_pixels(tail, until);
    if (!run_ends && until < TILE_Q && carries)
      *own_carried = *reinterpret_cast<const uint4*>(place_of(lane_id / 2, until + lane_id % 2 * kPiece));
  }
}

// Tiles of several rows, and y of any strides: 16 bytes a lane where rows are aligned, else element by element.
template <typename Format, int TILE_P, int TILE_Q>
__device__ __forceinline__ void store_rows(const Params& params, const Store& store, const TileRecord& tile,
                                           const Finish<Format::CONTAINED != 0>& finish,
                                           const float (&acc)[TILE_P][TILE_Q / 2]) {
  using Element = typename Format::Stored;
  constexpr int kSize = sizeof(Element);
  constexpr int kVector = 16 / kSize;
  constexpr int kPixels = 512 / kSize;
  constexpr int kPlaneBytes = staged_plane_bytes(kSize, Format::CONTAINED);
  const UnitCorrelation& of = params.of;
  const int lane_id = store.lane_id;

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first_k = store.first_k + 8 * half;
#pragma unroll
    for (int part = 0; part < TILE_P * TILE_Q / kPixels; ++part) {
      Element* pixels =
          reinterpret_cast<Element*>(store.smem + store.staging + lane_id / 4 * kPlaneBytes) + 2 * (lane_id % 4);
      __syncwarp();  // the part before has been read
#pragma unroll
      for (int i = 0; i < kPixels / 8; ++i) {
        const int row = (part * kPixels + 8 * i) / TILE_Q, j = (part * kPixels + 8 * i) % TILE_Q / 8;
        *reinterpret_cast<PackedPair<Element>*>(pixels + 8 * i) =
            pack_pair<Element>(finish.value(acc[row][4 * j + 2 * half], half, finish.bias[half]),
                               finish.value(acc[row][4 * j + 2 * half + 1], half, finish.bias[half]));
      }
      __syncwarp();  // all pixels are staged
      Element* const out = static_cast<Element*>(params.out_ptr) + tile.out + first_k * of.out_stride[1];
      const auto row_of = [&](int pixel) { return store.first_p + (part * kPixels + pixel) / TILE_Q; };
      const auto column_of = [&](int pixel) { return (part * kPixels + pixel) % TILE_Q; };
      if (params.plan.y_vectors) {
        const int pixel = lane_id * kVector, p = row_of(pixel), q = column_of(pixel);
        const bool exist = p < tile.rows && q < tile.columns;
        Element* to = out + p * of.out_stride[2] + q;
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane, to += of.out_stride[1]) {
          if (exist && first_k + plane < tile.channels)
            *reinterpret_cast<uint4*>(to) =
                *reinterpret_cast<const uint4*>(store.smem + store.staging + plane * kPlaneBytes + lane_id * 16);
        }
      } else {
#pragma unroll 1
        for (int plane = 0; plane < kPlanes && first_k + plane < tile.channels; ++plane) {
          const Element* const staged =
              reinterpret_cast<const Element*>(store.smem + store.staging + plane * kPlaneBytes);
#pragma unroll 1
          for (int pixel = lane_id; pixel < kPixels; pixel += 32) {
            const int p = row_of(pixel), q = column_of(pixel);
            if (p < tile.rows && q < tile.columns)
              out[plane * of.out_stride[1] + p * of.out_stride[2] + q * of.out_stride[3]] = staged[pixel];
          }
        }
      }
    }
  }
}

// Stacked: warp r has summed up the products of row r of taps with a row of x, which are for r rows of outputs above
// that of warp 0. It adds what warp r-1 has summed up for the same outputs, in the other warpgroup, with the row of x
// above, and hands it all on to warp r+1, for the row below.
template <int COUNT>
__device__ __forceinline__ void hand_on_sums(const Shared& shared, uint8_t* smem, int warpgroup_id, uint32_t parity,
                                             float (&sums)[COUNT]) {
  const int lane_id = threadIdx.x % 32, tap_row = hopper::uniform(threadIdx.x / 32 % 4);
  float4* const next = reinterpret_cast<float4*>(smem + shared.layout.handed) + tap_row * COUNT * 8 + lane_id;
  const float4* const before = next - COUNT * 8;
  hopper::barrier_wait(shared.handed(1 - warpgroup_id), parity);
  if (tap_row > 0 && tap_row < kStackedRows) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      const float4 four = before[8 * i];
      sums[i] += four.x, sums[i + 1] += four.y, sums[i + 2] += four.z, sums[i + 3] += four.w;
    }
  }
  hopper::named_barrier(1 + warpgroup_id, 128);  // all have been read
  if (tap_row < kStackedRows - 1) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) next[8 * i] = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
  }
  __syncwarp();  // all lanes have written before one of them tells
  if (lane_id == 0) hopper::barrier_arrive(shared.handed(warpgroup_id));
}

// -- Multiply: x ring, w ring -> accumulators --
//
// The warpgroups take turns: one multiplies a block of channels for its half of a tile, alone, at the full rate of the
// tensor cores, while the other one finishes its steps and stores.
template <typename Format, int TILE_P, int TILE_Q>
__device__ __forceinline__ void multiply(const Params& params, const Shared& shared, uint8_t* smem, int warpgroup_id) {
#if defined(MODELNEW_SM90A)
  using Element = typename Format::Stored;
  const UnitCorrelation& of = params.of;
  const Plan& plan = params.plan;
  const int lane_id = threadIdx.x % 32;
  const int warp_id = hopper::uniform(threadIdx.x / 32);
  const bool split_k = plan.tile_k == 128;  // the warpgroups take different channels of the same pixels

  Store store;
  store.smem = smem;
  store.staging = shared.layout.staging +
                  (plan.boxes != 0 ? warp_id * box_bytes(Format::CONTAINED)
                                   : warp_id % plan.staging_parts *
                                         staging_part_bytes(plan.staged_planes, sizeof(Element), Format::CONTAINED));
  store.carried = shared.layout.carried + warp_id * kCarriedBytes;
  store.warp_id = warp_id;
  store.lane_id = lane_id;
  store.first_k = Format::STACKED ? 0 : (split_k ? warpgroup_id * kGroupChannels : 0) + 16 * (warp_id % 4);
  store.first_p = split_k ? 0 : warpgroup_id * TILE_P;

  // In units of 16 bytes, as descriptors count.
  constexpr uint32_t kWeightPart = kWeightPartBytes / 16, kStep = Format::PARTS * kWeightPart;
  const uint32_t a_base = hopper::descriptor(shared.w_ring(), kGroupChannels * 16);
  const uint32_t b_base = hopper::descriptor(shared.x_ring(), plan.x_pitch * 16) + plan.lead;
  const uint32_t x_row = x_row_bytes(plan) / 16, x_rest = x_ring_bytes(plan) / 16;
  const int row_steps = of.S * plan.block_steps;
  const uint32_t by_row = reciprocal(row_steps), by_tap = reciprocal(plan.block_steps);
  const uint32_t w_stage = plan.group_steps * kStep;
  int w_stages = plan.w_stages;
  asm volatile("" : "+r"(w_stages));  // in a register: to load a parameter takes time
  const bool streamed = w_stages > 0;
  uint32_t a_resident = a_base + (split_k && warpgroup_id != 0 ? total_steps(of, plan) * kStep : 0);
  asm volatile("" : "+r"(a_resident));  // worked out here, once

  const auto release = [&](uint32_t barrier) {
    if (lane_id == 0) hopper::barrier_arrive(barrier);
  };

  struct StepPlace {
    int row;  // of the window
    uint32_t in_row;
  };
  const auto place_of_step = [&](int step) -> StepPlace {
    const int r = quotient(step, by_row);
    const int in_row = step - r * row_steps;
    const int s = quotient(in_row, by_tap);
    return {Format::STACKED ? 0 : store.first_p + r * of.dilation_h,
            b_base + s * of.dilation_w + (in_row - s * plan.block_steps) * 2 * plan.x_pitch};
  };
  StepPlace first_steps = place_of_step(lane_id);
  int x_slots = plan.x_slots;
  asm volatile("" : "+r"(first_steps.row), "+r"(first_steps.in_row), "+r"(x_slots));  // kept, not worked out again

  float acc[Format::SUMS][TILE_P][TILE_Q / 2];
  RingPosition x_at;  // the first row of the window
  RingPosition w_at;
  uint32_t turn = warpgroup_id == 0 ? 1 : 0;
  int large_groups = plan.large_groups, small_groups = plan.groups - plan.large_groups;
  if constexpr (sizeof(Element) == 2) asm volatile("" : "+r"(large_groups), "+r"(small_groups));  // fp32 has none left
  const auto groups_of = [&](int steps) {
    return plan.group_steps == steps ? large_groups : plan.group_steps == steps + 1 ? small_groups : 0;
  };
  const auto for_each_sum = [&](const auto& visit) {
#pragma unroll
    for (int row = 0; row < TILE_P; ++row) {
#pragma unroll
      for (int i = 0; i < TILE_Q / 2; ++i) visit(row, i);
    }
  };
  if (warpgroup_id == 1 && streamed) w_at.advance(plan.w_stages, plan.groups);
  if (Format::STACKED && warpgroup_id == 1) x_at.advance(x_slots);  // every other row
  bool continues = false;
  int resident = -1;
  Finish<Format::CONTAINED != 0> finish;
  // The record of the tile, in shared memory: read again where it is needed, which is cheaper than to keep it.
  const TileRecord* const records = reinterpret_cast<const TileRecord*>(smem + shared.layout.records);
  const TileRecord* record = records;
  const auto factor_of = [&](int weights, int row) {
    const int32_t* const w_exponents = params.guard.w_exponents + weights * weight_rows(plan) + store.first_k;
    return power_of_two(-params.guard.control->x_exponent - w_exponents[row]);
  };
  const auto bias_of = [&](int row) {
    const int k = channel_of_row<sizeof(Element)>(store.first_k + row, plan.boxes);
    const bool exists = params.bias_ptr != nullptr && k < record->channels;
    return exists ? widen(static_cast<const Element*>(params.bias_ptr)[record->channel + k]) : -0.0f;
  };
  // Split operands leave no registers for that while they are multiplied.
  float2* const finish_of_row = reinterpret_cast<float2*>(smem + shared.layout.finish + warp_id * kFinishBytes);
  int number = 0;  // of the next tile
  do {
    uint32_t a = a_resident;
    int keep = 0;  // the first step overwrites the accumulators
    hopper::wgmma_start(acc);
    const auto clear_sum = [&] {
      if constexpr (Format::SUMS > 1) for_each_sum([&](int row, int i) { acc[Format::SUM][row][i] = 0; });
    };
    const auto settle_sum = [&] {
#pragma unroll
      for (int row = 0; row < TILE_P; ++row) hopper::wgmma_settle(acc[Format::RESTS][row]);
      if constexpr (Format::SUMS > 1)
        for_each_sum(
            [&](int row, int i) { acc[Format::SUM][row][i] += acc[Format::RESTS][row][i] * (1 / kRestScale); });
    };
    if constexpr (!Format::STACKED) clear_sum();
    // Stacked rows of taps: rows of x one by one, all of the first window, then those by which the next ones lie lower.
    const int blocks = Format::STACKED ? stacked_rows(plan, continues) : plan.blocks_c;
    for (int block = 0; block < blocks; ++block) {
      if constexpr (Format::STACKED) {
        hopper::barrier_wait(shared.x_full(x_at.slot), x_at.parity);
        a = a_resident, keep = 0;
        clear_sum();
      } else if (lane_id < plan.x_rows) {
        const bool round = x_at.slot + lane_id >= plan.x_slots;
        hopper::barrier_wait(shared.x_full(x_at.slot + lane_id - (round ? plan.x_slots : 0)), x_at.parity ^ round);
      }
      __syncwarp();
      if (block == 0) {
        record = records + number % kRecords;
        ++number;
        const int weights = record->weights;
        if ((!streamed || Format::CONTAINED != 0) && weights != resident) {
          if (!streamed && resident >= 0) release(shared.w_empty(0));
          resident = weights;
          if constexpr (Format::CONTAINED == 1) {
            for (int i = 0; i < 2; ++i) finish.factor[i] = factor_of(weights, lane_id / 4 + 8 * i);
          } else if constexpr (Format::CONTAINED == 2) {
            if (lane_id < 16) finish_of_row[lane_id] = make_float2(factor_of(weights, lane_id), bias_of(lane_id));
            __syncwarp();
          }
          if (!streamed) {
            hopper::barrier_wait(shared.w_full(0), w_at.parity);
            w_at.next(1);
          }
        }
      }
      if (Format::CONTAINED != 2 && block == 0) {
        for (int i = 0; i < 2; ++i) finish.bias[i] = bias_of(lane_id / 4 + 8 * i);
      }
      // Lane j works out where step first + j of the block reads. The first 32 are the same in every tile.
      int first = 0, in_place = 0;  // steps: of the next group; of those, in `place`
      uint32_t place;
      const auto find_places = [&](const StepPlace& step) {
        int slot = x_at.slot + step.row;
        if (slot >= x_slots) slot -= x_slots;
        place = step.in_row + slot * x_row;
        in_place = 0;
      };
      find_places(first_steps);

      // Groups of COUNT steps and their commit, in straight-line code: in a loop that it does not unroll ptxas commits
      // every wgmma by itself, and to wait for all but the latest group would be to wait for everything. While one
      // group is multiplied the next one has to be issued: what a group costs in instructions decides.
      uint32_t w_done = 0, w_latest = 0;  // barriers to arrive on when the group before the latest, the latest is done
      // Split operands take more descriptors: most are worked out in uniform registers, if the compiler knows that they
      // are the same in all lanes, as what comes from a lane of a constant number is.
      constexpr bool kUniform = Format::SUMS > 1;
      const auto multiply_groups = [&](auto count, int groups) {
        constexpr int COUNT = decltype(count)::kValue;
        for (int i = 0; i < groups; ++i) {
          if (in_place + COUNT > 32) find_places(place_of_step(first + lane_id));
          uint32_t b[COUNT];
#pragma unroll
          for (int j = 0; j < COUNT; ++j) b[j] = __shfl_sync(~0u, place, kUniform ? j : in_place + j);
          if constexpr (kUniform) place = __shfl_down_sync(~0u, place, COUNT);
          if (streamed) {
            hopper::barrier_wait(shared.w_full(w_at.slot), w_at.parity);
            a = a_base + w_at.slot * w_stage;
          }
          using Wgmma = hopper::Wgmma<typename Format::Multiplied, TILE_Q>;
          if constexpr (kUniform) a = __shfl_sync(~0u, a, 0);
          if constexpr (Format::SUMS == 1) {
            hopper::wgmma_wait<1>();
            if (w_done != 0) release(w_done);
            hopper::wgmma_fence();
#pragma unroll
            for (int j = 0; j < COUNT; ++j) {
#pragma unroll
              for (int row = 0; row < TILE_P; ++row)
                Wgmma::multiply(acc[Format::SUM][row], a + j * kStep, b[j] + row * x_row, j == 0 ? keep : 1);
            }
            hopper::wgmma_commit();
          } else {
            hopper::wgmma_fence();
#pragma unroll
            for (int j = 0; j < COUNT; ++j) {
#pragma unroll
              for (int row = 0; row < TILE_P; ++row)
                Wgmma::multiply(acc[Format::GROUP_SUM][row], a + j * kStep, b[j] + row * x_row, j == 0 ? 0 : 1);
            }
            hopper::wgmma_commit();
#pragma unroll
            for (int j = 0; j < COUNT; ++j) {
#pragma unroll
              for (int row = 0; row < TILE_P; ++row) {
                Wgmma::multiply(acc[Format::RESTS][row], a + j * kStep, b[j] + x_rest + row * x_row, j == 0 ? keep : 1);
                Wgmma::multiply(acc[Format::RESTS][row], a + j * kStep + kWeightPart, b[j] + row * x_row, 1);
              }
            }
            hopper::wgmma_commit();
            // While the rests are multiplied, what the group has summed up is added, with rounding to nearest: the
            // tensor cores cut off what they add.
            hopper::wgmma_wait<1>();
            if (w_latest != 0) release(w_latest);
            w_latest = 0;
#pragma unroll
            for (int row = 0; row < TILE_P; ++row) hopper::wgmma_settle(acc[Format::GROUP_SUM][row]);
            for_each_sum([&](int row, int i) { acc[Format::SUM][row][i] += acc[Format::GROUP_SUM][row][i]; });
          }
          keep = 1;
          a += COUNT * kStep;
          first += COUNT;
          in_place += COUNT;
          if (streamed) {
            if constexpr (Format::SUMS == 1) w_done = w_latest;
            w_latest = shared.w_empty(w_at.slot);
            w_at.next(plan.w_stages);
          }
        }
      };
      hopper::barrier_wait(shared.turn(warpgroup_id), turn);
      turn ^= 1;
      constexpr int kMostGroupSteps = most_group_steps(TILE_Q, Format::CONTAINED);
      if constexpr (kMostGroupSteps >= 6) {
        multiply_groups(hopper::Count<6>{}, groups_of(6));
        multiply_groups(hopper::Count<5>{}, groups_of(5));
      }
      if constexpr (kMostGroupSteps >= 4) multiply_groups(hopper::Count<4>{}, groups_of(4));
      multiply_groups(hopper::Count<3>{}, groups_of(3));
      multiply_groups(hopper::Count<2>{}, groups_of(2));
      multiply_groups(hopper::Count<1>{}, groups_of(1));
      release(shared.turn(1 - warpgroup_id));

      // Rows of the window that the next tile does not need.
      const int drop = Format::STACKED ? 1 : record->flags & TileRecord::kGoesOn ? plan.tile_p : plan.x_rows;
      hopper::wgmma_wait<0>();
      if (w_done != 0) release(w_done);
      if (w_latest != 0) release(w_latest);
      if (lane_id < drop) {
        const int slot = x_at.slot + lane_id;
        hopper::barrier_arrive(shared.x_empty(slot >= plan.x_slots ? slot - plan.x_slots : slot));
      }
      x_at.skip(plan.x_slots, Format::STACKED ? 2 : drop);
      if (streamed) w_at.advance(plan.w_stages, plan.groups);  // those of the other warpgroup
      if constexpr (Format::STACKED) {
        settle_sum();
        hand_on_sums(shared, smem, warpgroup_id, turn ^ 1, acc[Format::SUM][0]);
      }
    }
    if constexpr (!Format::STACKED) settle_sum();
    if constexpr (Format::SUMS > 1) {
      for (int i = 0; i < 2; ++i) {
        const float2 of_row = finish_of_row[lane_id / 4 + 8 * i];
        finish.factor[i] = of_row.x, finish.bias[i] = of_row.y;
      }
    }

    if constexpr (Format::STACKED) {
      continues = (record->flags & TileRecord::kGoesOn) != 0;
      if (warp_id % 4 != kStackedRows - 1) continue;  // sums of some rows of taps only
    } else if constexpr (TILE_P == 1 && TILE_Q == Format::PIXELS) {
      if (plan.boxes != 0) {
        store_boxes<Format, TILE_Q>(params, store, *record, finish, acc[Format::SUM][0]);
        continue;
      }
    }
    if constexpr (TILE_P == 1) {
      if (plan.y_runs) {
        const bool shared_staging = plan.staging_parts < kMultiplyWarps;
        if (shared_staging) hopper::barrier_wait(shared.staging_turn(warp_id), (number ^ warpgroup_id) & 1);
        store_runs<Format, TILE_Q>(params, store, *record, finish, acc[Format::SUM][0]);
        if (shared_staging) hopper::barrier_arrive(shared.staging_turn(warp_id ^ 4));
        continue;
      }
    }
    if constexpr (TILE_P * TILE_Q == Format::PIXELS && !Format::STACKED)
      store_rows<Format, TILE_P, TILE_Q>(params, store, *record, finish, acc[Format::SUM]);
  } while ((record->flags & TileRecord::kLast) == 0);
  if (plan.boxes != 0) hopper::bulk_stores_wait_read<0>();  // shared memory lives no longer than the block
#endif
}

template <typename Format, int TILE_P, int TILE_Q>
__global__ void __launch_bounds__(kThreads, 1) wgmma_kernel(const __grid_constant__ Params params) {
#if defined(MODELNEW_SM90A)
  // With contained operands this kernel runs twice: with these, and with TF32 operands for what they are not fit. For
  // what split ones are not, there is another engine.
  bool listed = false;
  if constexpr (Format::CONTAINED != 0) {
    if (params.guard.control->all_again != 0) return;
  } else if constexpr (sizeof(typename Format::Multiplied) == 4) {
    listed = params.guard.control != nullptr && params.guard.control->all_again == 0;
    if (listed && blockIdx.x >= params.guard.control->listed) return;
  }
  const Agenda agenda{params.guard, listed};

  extern __shared__ __align__(1024) unsigned char modelnew_wgmma_smem[];
  const Shared shared{hopper::smem_address(modelnew_wgmma_smem),
                      shared_layout(params.of, params.plan, sizeof(typename Format::Stored))};
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kMaxRows; ++slot) {
      hopper::barrier_init(shared.x_full(slot), params.plan.convert_warps);
      hopper::barrier_init(shared.x_empty(slot), Format::STACKED ? kMultiplyWarps / 2 : kMultiplyWarps);
    }
    for (int slot = 0; slot < kMaxStages; ++slot) {
      hopper::barrier_init(shared.w_full(slot), 1);
      hopper::barrier_init(shared.w_empty(slot), params.plan.w_stages > 0 ? 4 : kMultiplyWarps);
    }
    for (int warpgroup_id = 0; warpgroup_id < 2; ++warpgroup_id) hopper::barrier_init(shared.turn(warpgroup_id), 4);
    for (int warp_id = 0; warp_id < kMultiplyWarps; ++warp_id) hopper::barrier_init(shared.staging_turn(warp_id), 32);
    for (int chunk = 0; chunk < kChunks; ++chunk) hopper::barrier_init(shared.raw_full(chunk), Format::STACKED ? 4 : 1);
    hopper::fence_async();  // bulk copies complete on these barriers
    if (params.plan.convert_warps == kServiceWarps)
      copy_resident_weights(params, shared, static_cast<int>(blockIdx.x) % params.plan.tiles_k);
  }
  __syncthreads();  // barriers exist before anybody waits on one

  const int warp_id = hopper::uniform(threadIdx.x / 32);
  if (warp_id < kMultiplyWarps) {
    hopper::registers_take<Format::MULTIPLY_REGISTERS>();
    multiply<Format, TILE_P, TILE_Q>(params, shared, modelnew_wgmma_smem, warp_id / 4);
  } else {
    hopper::registers_give_back<Format::CONVERT_REGISTERS>();
    const int service_warp = warp_id - kMultiplyWarps;
    if (service_warp >= params.plan.convert_warps) {
      if (threadIdx.x % 32 == 0) copy_weights(params, shared, agenda);
      return;
    }
    if constexpr (Format::CONTAINED == 1) {
      if (params.plan.chunks) {
        ChunkConverter(params, shared, modelnew_wgmma_smem, agenda, service_warp).run();
        return;
      }
    }
    if (!params.plan.x_simple) {
      Converter<Format, 1, false, 3>(params, shared, modelnew_wgmma_smem, agenda, service_warp).run();
    } else if (params.plan.convert_warps == 3) {
      Converter<Format, 2, true, 3>(params, shared, modelnew_wgmma_smem, agenda, service_warp).run();
    } else {
      Converter<Format, 2, true, 4>(params, shared, modelnew_wgmma_smem, agenda, service_warp).run();
    }
  }
#endif
}

// ---- Packing, and what contained operands need beside it ----

constexpr int kPackThreads = 256;

struct PackOperandsParams {
  const void* w_ptr;
  void* packed_ptr;
  UnitCorrelation of;
  int tiles_k, blocks_c, block_steps;  // tiles of 64 output channels
  int boxes, taps;  // of a row
  bool stacks;
  int64_t pieces;
};

// A piece of 16 bytes: the channels of one output channel at one tap. Packed: [group][64 channels] and, of each of
// these rows, [block][tap][step of the block][2], the channels innermost.
struct PackedPiece {
  int group, k, channel, r, s;
  bool exists;  // its output channel
};

template <typename Format>
__device__ __forceinline__ PackedPiece packed_piece(const PackOperandsParams& params, int group, int row,
                                                    int64_t piece) {
  constexpr int kChunk = 16 / sizeof(typename Format::Multiplied);
  const UnitCorrelation& of = params.of;
  const int half = static_cast<int>(piece % 2);
  piece /= 2;
  const int step = static_cast<int>(piece % params.block_steps);
  piece /= params.block_steps;
  const int tap = static_cast<int>(piece % params.taps), block = static_cast<int>(piece / params.taps);
  PackedPiece at;
  at.group = group;
  at.k = channel_of_row<sizeof(typename Format::Stored)>(row, params.boxes);
  int r = tap / of.S;
  if (params.stacks) {
    at.k = row / kGroupChannels * kStackedChannels + row % kStackedChannels;
    r = row % kGroupChannels / kStackedChannels;
  }
  at.channel = (2 * (block * params.block_steps + step) + half) * kChunk;
  at.r = of.flipped ? of.R - 1 - r : r;
  at.s = of.flipped ? of.S - 1 - tap % of.S : tap % of.S;
  at.exists = at.k < of.out_channels && r < of.R;
  return at;
}

// Its channels, 0 where there are none.
template <typename Stored, int COUNT>
__device__ __forceinline__ void load_weights(const PackOperandsParams& params, const PackedPiece& at,
                                             Stored (&values)[COUNT]) {
  const UnitCorrelation& of = params.of;
  const Stored* from = static_cast<const Stored*>(params.w_ptr) + at.group * of.w_stride_group +
                       at.k * of.w_stride_out + at.channel * of.w_stride_in + at.r * of.w_stride_r +
                       at.s * of.w_stride_s;
#pragma unroll
  for (int c = 0; c < COUNT; ++c)
    values[c] = at.exists && at.channel + c < of.in_channels ? from[c * of.w_stride_in] : Stored{};
}

// One thread writes one piece.
template <typename Format>
__device__ __forceinline__ void pack_piece(const PackOperandsParams& params, int64_t piece) {
  using Stored = typename Format::Stored;
  if (piece >= params.pieces) return;
  const int64_t row_pieces = static_cast<int64_t>(params.blocks_c) * params.taps * params.block_steps * 2;
  const int64_t tile = piece / kGroupChannels / row_pieces;  // of 64 output channels, in all groups
  const int group = static_cast<int>(tile / params.tiles_k);
  const int row = static_cast<int>(tile % params.tiles_k * kGroupChannels + piece % kGroupChannels);
  Stored values[16 / sizeof(Stored)];
  load_weights(params, packed_piece<Format>(params, group, row, piece / kGroupChannels % row_pieces), values);
  static_cast<uint4*>(params.packed_ptr)[piece] = operand_piece(values);
}

template <typename Format>
__global__ void __launch_bounds__(kPackThreads) pack_operands_kernel(const PackOperandsParams params) {
  pack_piece<Format>(params, blockIdx.x * static_cast<int64_t>(kPackThreads) + threadIdx.x);
}

// Before a call with contained or split operands: the blocks of one launch pack a row of the weights each; look at a
// sample of x; pack all weights in TF32, for contained operands. The last one of the first two sorts decides what x is
// scaled by.
constexpr int kSampleBlocks = 64;
constexpr int kSamples = 1 << 16;
static_assert(kPackThreads == 256, "a thread for each exponent");

struct PrepareParams {
  const void* in_ptr;
  PackOperandsParams contained, tf32;
  Guard guard;
  int parts;       // of contained operands
  int row_blocks;  // rows of packed weights, of all groups
  int tile_rows;   // of a tile of output channels
  float window;            // values of x in the window of a tile
  float again_from;        // such a share of all tiles all of them are done otherwise
  float most_in_a_window;  // values that do not fit: more on average, and that share of tiles has one
};

struct PrepareShared {
  uint32_t magnitude;  // the largest one of the block's, as bits
  uint32_t bad;        // some of its weights do not fit
  uint32_t last;       // the block is the last one to be done
  uint32_t outside;    // samples of x that do not fit
  uint32_t samples[256];
};

// The weights of one output channel, times the power of two that takes the largest to 2^14..2^15. Where rows of taps
// share a product these are weights of one row of taps, and the largest is that of all: their sums are added.
__device__ __forceinline__ void pack_contained_row(const PrepareParams& prepare, PrepareShared& shared,
                                                   int row_of_all) {
  const PackOperandsParams& params = prepare.contained;
  const int rows = params.tiles_k * kGroupChannels, group = row_of_all / rows, row = row_of_all - group * rows;
  const int row_pieces = params.blocks_c * params.taps * params.block_steps * 2, parts = prepare.parts;
  const auto weights_of = [&](int row, int piece, uint32_t (&words)[8]) {
    float values[8];
    load_weights(params, packed_piece<Contained>(params, group, row, piece), values);
#pragma unroll
    for (int c = 0; c < 8; ++c) words[c] = float_bits(values[c]);
  };
  uint32_t words[8], magnitude = 0;
  for (int piece = threadIdx.x; piece < row_pieces; piece += kPackThreads) {
    for (int r = 0; r < (params.stacks ? kStackedRows : 1); ++r) {
      const int in_tile = row % kStackedChannels + r * kStackedChannels;
      weights_of(params.stacks ? row - row % kGroupChannels + in_tile : row, piece, words);
      for (uint32_t word : words) magnitude = max(magnitude, word & 0x7fffffff);
    }
  }
  atomicMax(&shared.magnitude, magnitude);
  __syncthreads();  // all have seen their weights

  // Inf and NaN have no scale either.
  int exponent = 0;
  const bool scaled = scale_exponent(shared.magnitude >> 23, 14, exponent) || shared.magnitude == 0;
  const float scale = power_of_two(exponent);
  Watch watch;
  uint4* const packed = static_cast<uint4*>(params.packed_ptr) +
                        static_cast<int64_t>(row_of_all / kGroupChannels) * parts * row_pieces * kGroupChannels +
                        row_of_all % kGroupChannels;
  for (int piece = threadIdx.x; piece < row_pieces; piece += kPackThreads) {
    weights_of(row, piece, words);
    const uint4 contained = parts == 2 ? piece_of<Split, 1>(words, 0, scale) : piece_of<Contained, 1>(words, 0, scale);
    for (uint32_t word : words) watch.see(word);
    watch.see_contained(contained);
    uint4* const to = packed + (static_cast<int64_t>(piece / 2) * parts * 2 + piece % 2) * kGroupChannels;
    to[0] = contained;
    if (parts == 2) to[2 * kGroupChannels] = rest_of<1>(words, 0, scale, contained);
  }
  if (!scaled || !watch.fits(least_contained(exponent, parts))) shared.bad = 1;
  __syncthreads();  // all have judged
  if (threadIdx.x != 0) return;
  prepare.guard.w_exponents[row_of_all] = exponent;
  atomicMax(&prepare.guard.control->most, exponent);
  atomicMax(&prepare.guard.control->least, -exponent);
  if (shared.bad != 0 && atomicExch(prepare.guard.bad_tile_k + row_of_all / prepare.tile_rows, 1) == 0)
    atomicAdd(&prepare.guard.control->bad_tiles_k, 1);
}

// Places all over x, the same in every call: rows at even distances, a column drawn for each.
__device__ __forceinline__ void sample(const PrepareParams& prepare, PrepareShared& shared, int block) {
  const UnitCorrelation& of = prepare.contained.of;
  const uint64_t channels = static_cast<uint64_t>(of.groups) * of.in_channels, rows = of.N * channels * of.H;
  constexpr int kEach = kSamples / kSampleBlocks / kPackThreads;
  uint32_t words[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const uint32_t number = (i * kSampleBlocks + block) * kPackThreads + threadIdx.x;
    const uint32_t drawn = number * 0x9e3779b9u ^ number >> 7;
    const uint64_t row = (number * rows + drawn % kSamples * rows / kSamples) / kSamples;
    const uint64_t image = row / (channels * of.H), in_image = row % (channels * of.H);
    const uint64_t column = static_cast<uint64_t>(drawn * 0x85ebca6bu) * of.W >> 32;
    words[i] =
        static_cast<const uint32_t*>(prepare.in_ptr)[image * of.in_stride[0] + in_image / of.H * of.in_stride[1] +
                                                     in_image % of.H * of.in_stride[2] + column * of.in_stride[3]];
  }
#pragma unroll
  for (uint32_t word : words) {
    if ((word & 0x7fffffff) != 0) atomicAdd(shared.samples + (word >> 23 & 255), 1);
  }
  __syncthreads();  // all are counted
  if (const uint32_t count = shared.samples[threadIdx.x]; count != 0)
    atomicAdd(prepare.guard.control->samples + threadIdx.x, count);
}

// Thread i has the samples of exponent i. The whole call is computed otherwise where too many tiles would be computed
// twice (`again_from`, by samples of x or by weights). A single sample that is too small decides nothing, but one that
// is far larger than all others makes these too small.
__device__ __forceinline__ void decide(const PrepareParams& prepare, PrepareShared& shared) {
  Control& control = *prepare.guard.control;
  const int exponent = threadIdx.x;
  const uint32_t count = atomicAdd(control.samples + exponent, 0);  // as memory has it
  const bool finite = exponent < 255;
  if (exponent == 0) shared.magnitude = shared.outside = 0;
  __syncthreads();  // they are zeros
  if (count != 0 && finite) atomicMax(&shared.magnitude, exponent + 1);
  __syncthreads();  // the largest exponent is known, or that there is none
  int x_exponent = 0;
  const int to = prepare.parts == 2 ? 14 : 13;
  bool scaled = shared.magnitude == 0 || scale_exponent(shared.magnitude - 1, to, x_exponent);
  if (!finite || exponent < least_contained_exponent(prepare.parts) - x_exponent) atomicAdd(&shared.outside, count);
  __syncthreads();  // what does not fit is counted
  if (exponent != 0) return;
  const uint32_t bad_tiles_k = atomicAdd(&control.bad_tiles_k, 0), tiles_k = prepare.row_blocks / prepare.tile_rows;
  const float in_a_window = shared.outside * prepare.window / kSamples;
  // One factor, a normal number, undoes both scales.
  const int most = atomicMax(&control.most, 0), least = atomicMax(&control.least, 0);
  scaled = scaled && x_exponent + most <= 126 && x_exponent - least >= -126;
  control.x_exponent = x_exponent;
  control.all_again = !scaled || bad_tiles_k >= prepare.again_from * tiles_k ||
                      (shared.outside > 1 && in_a_window > prepare.most_in_a_window);
}

__global__ void __launch_bounds__(kPackThreads) prepare_kernel(const __grid_constant__ PrepareParams params) {
  extern __shared__ __align__(16) unsigned char modelnew_prepare_smem[];
  PrepareShared& shared = *reinterpret_cast<PrepareShared*>(modelnew_prepare_smem);
  const int block = static_cast<int>(blockIdx.x), deciding_blocks = params.row_blocks + kSampleBlocks;
  if (block >= deciding_blocks) {
    pack_piece<Tf32>(params.tf32, (block - deciding_blocks) * static_cast<int64_t>(kPackThreads) + threadIdx.x);
    return;
  }
  shared.samples[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.magnitude = shared.bad = 0;
  __syncthreads();  // they are zeros
  if (block < params.row_blocks)
    pack_contained_row(params, shared, block);
  else
    sample(params, shared, block - params.row_blocks);
  __threadfence();
  __syncthreads();  // what the block has counted is in memory before it says so
  if (threadIdx.x == 0) {
    const uint32_t before = atomicAdd(&params.guard.control->arrived, 1);
    shared.last = static_cast<int>(before) == deciding_blocks - 1;
  }
  __syncthreads();  // all know whether the block is the last one
  if (shared.last != 0) decide(params, shared);
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// ---- Host: what to compute ----

inline UnitCorrelation correlation_of(const Problem& problem, Operator op) {
  const Correlation any = correlation_of_problem(problem, op);
  UnitCorrelation of{any.N, any.groups, any.in_channels, any.out_channels, any.H, any.W, any.P, any.Q, any.R, any.S,
                     any.pad_h, any.pad_w, any.dilation_h, any.dilation_w, {}, {}, any.w_stride_group,
                     any.w_stride_out, any.w_stride_in, any.w_stride_r, any.w_stride_s, any.flipped};
  std::copy_n(any.in_stride, 4, of.in_stride);
  std::copy_n(any.out_stride, 4, of.out_stride);
  if (of.H == 1) of.in_stride[2] = 0;  // whatever it is; so that rows of the padding are aligned as the image is
  return of;
}

// ---- Host: how to cut it up ----
//
// Few configurations: four shapes of a tile, two ways to share it, two directions; and tiles of half the size, one of
// them for TF32 operands downwards, three for split ones. Each is completed, rejected if it does not fit, and scored in
// cycles of an SM; the smallest estimate wins.

struct Shape {
  int rows, columns;
  double narrow_cost;  // cycles of a wgmma over those of n = 256, for as many pixels
};
// wgmma reads both operands from shared memory, and narrow ones are bound by that. narrow_cost is an estimate.
constexpr Shape kShapes[] = {{1, 256, 1.0}, {2, 128, 1.2}, {4, 64, 1.5}, {8, 32, 2.2},
                             {1, 128, 1.2}, {2, 64, 1.5},  {4, 32, 2.2}};
constexpr int kSmallShapes = 4;  // from here on half the size

// Constants of the estimate, all fitted to measured times: docs/lab/wgmma.md.
//
// Bytes a cycle of one SM when all SMs write: in boxes, in other pieces of 16 bytes or more, pixel by pixel.
constexpr double kBoxRate = 16;
constexpr double kPieceRate = 11;
constexpr double kPixelRate = 2.5;

// Cycles of a warpgroup that stores, a byte of a channel, and of a converting warp, a byte of the ring.
constexpr double kStoreCyclesPerByte = 8;
constexpr double kConvertCyclesPerByte = 0.4;
constexpr double kPiecewiseConvertFactor = 2;  // x by single pixels, or with a last block that is not full

// Contained operands: factor of the cost of converting, and cycles of the launches beside the main one.
constexpr double kContainFactor = 2;
constexpr double kContainCycles = 15e3;

// Split operands: products to one of others, factor of the cost of converting, and how much of converting is added to
// multiplying, which wants the same shared memory; bytes a cycle of runs that lie downwards.
constexpr double kSplitSteps = 3;
constexpr double kSplitFactor = 2;
constexpr double kSplitShare = 0.5;
constexpr double kLoneRunRate = 7;

// Cost of an image beside its tiles in a unit that runs down, in tiles: the first window has to be filled.
constexpr double kRestartTiles = 0.4;

// Chunks of x: of their lanes at least so many convert.
constexpr double kLeastLanes = 0.75;

// Most bytes of x in the window of one tile.
constexpr int kWindowBytes = 52 * 1024;

struct Device {
  int sms;
};

// How many channels of y there are to one that is aligned alike, if boxes can store it, or 0.
inline int boxes_of(const UnitCorrelation& of, int element_size, const Plan& plan) {
  const int64_t channel_bytes = of.out_stride[1] * element_size, image_bytes = of.out_stride[0] * element_size;
  const int64_t most_bytes = int64_t{1} << 40;
  int boxes = 1;
  while (boxes * channel_bytes % kSector != 0) boxes *= 2;
  if (boxes > 8 || of.out_channels % boxes != 0) return 0;
  if (of.groups > 1 && of.out_channels % plan.tile_k != 0) return 0;  // a box would reach into the next group
  if (!plan.y_pairs || !plan.y_sectors || (of.N > 1 && image_bytes % kSector != 0)) return 0;
  if (boxes * channel_bytes <= 0 || boxes * channel_bytes >= most_bytes || image_bytes >= most_bytes) return 0;
  if ((boxes - 1) * of.out_stride[1] + static_cast<int64_t>(of.P) * of.Q >= int64_t{1} << 31) return 0;
  return boxes;
}

inline int64_t even(int64_t value) { return value + (value & 1); }

// All blocks of input channels have the same number of steps. Some of the last one's may multiply zeros, if few: so
// many steps there are at most.
constexpr int64_t most_steps_with_zeros(int64_t channel_steps) { return channel_steps * 17 / 16; }

// Completes a plan whose tile is chosen; false when it does not fit.
inline bool complete(const UnitCorrelation& of, const Operands& operands, const Device& device, int shape, int tile_k,
                     Plan& plan) {
  const int element_size = operands.element_bytes;
  const int step_channels = kStepBytes / operands.multiplied_bytes(), parts = operand_parts(operands.contained);
  plan.contained = operands.contained;
  plan.tile_k = tile_k;
  plan.tile_q = kShapes[shape].columns;
  const int group_rows = kShapes[shape].rows;
  const int tile_pixels = group_rows * plan.tile_q;
  const bool small = shape >= kSmallShapes, split = operands.contained == 2;
  if (small != split && !(small && operands.multiplied_bytes() == 4 && plan.down && plan.y_runs)) return false;
  plan.tile_p = tile_k < 128 ? 2 * group_rows : group_rows;
  plan.tiles_p = static_cast<int>(ceil_div(of.P, plan.tile_p));
  plan.tiles_q = static_cast<int>(ceil_div(of.Q, plan.tile_q));
  plan.tiles_k = static_cast<int>(ceil_div(of.out_channels, tile_k));
  if (static_cast<int64_t>(plan.tiles_p) * plan.tiles_q > 1 << 30) return false;
  const bool stacks = stacked(plan);
  if (stacks && (of.R != kStackedRows || of.dilation_h != 1 || !plan.y_runs)) return false;
  if (stacks && split && plan.tiles_k > 1) return false;  // the list's tiles have more channels

  plan.lead = plan.chunks ? -of.pad_w & 3 : of.pad_w & 1;  // boxes start at multiples of 16 bytes
  const int64_t rows = plan.tile_p + (of.R - 1) * static_cast<int64_t>(of.dilation_h);
  // Pixels behind the last column of y may be missing: what is read in their place is not stored.
  const int64_t columns = std::min(plan.tile_q, of.Q);
  const int64_t pitch = even(columns + (of.S - 1) * static_cast<int64_t>(of.dilation_w) + plan.lead);
  if (rows > kMaxRows || pitch > kSharedBytes || (stacks ? 2 : rows) * pitch * 32 * parts > kSharedBytes) return false;
  plan.x_rows = static_cast<int>(rows);
  plan.x_pitch = static_cast<int>(pitch);

  // A row of the ring has all channels or, where that does not fit twice, equal blocks of them.
  const int channel_steps = static_cast<int>(ceil_div(of.in_channels, step_channels));
  const int64_t taps = (stacks ? 1 : static_cast<int64_t>(of.R)) * of.S;
  plan.block_steps = channel_steps;
  if (!plan.down) {
    const int64_t most_steps = kWindowBytes / (rows * pitch * 32 * parts);
    plan.block_steps = static_cast<int>(std::max<int64_t>(std::min<int64_t>(most_steps, channel_steps), 1));
    while (ceil_div(channel_steps, plan.block_steps) * plan.block_steps > most_steps_with_zeros(channel_steps))
      --plan.block_steps;
  }
  plan.blocks_c = static_cast<int>(ceil_div(channel_steps, plan.block_steps));
  const int64_t pass_steps = taps * plan.block_steps;
  if (pass_steps >= 1 << 16 || pass_steps * plan.blocks_c * 128 * kStepBytes * parts > int64_t{1} << 30)
    return false;
  if ((stacks ? 2 : rows) * pitch * 32 * parts * plan.block_steps > kSharedBytes) return false;
  const bool same_blocks = of.in_channels % (plan.block_steps * step_channels) == 0;
  plan.x_simple = plan.chunks || (plan.x_pairs && same_blocks);
  if (plan.chunks) {
    // With several groups, channels behind the last ones would be the next group's.
    if (!same_blocks && of.groups > 1) return false;
    const int pieces = 2 * plan.block_steps;
    plan.whole_chunks = plan.x_pitch / kChunkColumns;
    plan.rest_pixels = plan.x_pitch % kChunkColumns;
    plan.rest_columns = (plan.rest_pixels + 3) / 4 * 4;
    const int pairs = plan.rest_pixels / 2;
    plan.rest_rows =
        !plan.down && plan.x_rows * pairs <= 32 && plan.x_rows * plan.rest_columns <= kChunkColumns ? plan.x_rows : 1;
    int chunks = plan.x_rows * plan.block_steps * plan.whole_chunks;  // of a window
    if (pairs > 0) {
      const int most = std::min(32 / (pairs * plan.rest_rows), kChunkColumns / (plan.rest_columns * plan.rest_rows));
      plan.rest_pieces = std::min(most * kChunkPieces, pieces);
      chunks += static_cast<int>(plan.x_rows / plan.rest_rows * ceil_div(pieces, plan.rest_pieces));
    }
    const double lanes = plan.x_rows * plan.block_steps * (plan.x_pitch / 2.0);
    if (lanes < kLeastLanes * 32 * chunks) return false;
  }
  // Offsets within a fill are 32 bits wide.
  if ((plan.block_steps * step_channels * of.in_stride[1] + rows * of.in_stride[2] + pitch * of.in_stride[3]) *
          element_size >=
      int64_t{1} << 32)
    return false;
  const auto set_groups = [&](int most_steps) {
    plan.groups = static_cast<int>(ceil_div(pass_steps, most_steps));
    plan.group_steps = static_cast<int>(ceil_div(pass_steps, plan.groups));
    plan.large_groups = static_cast<int>(pass_steps - static_cast<int64_t>(plan.groups) * (plan.group_steps - 1));
  };
  set_groups(most_group_steps(plan.tile_q, plan.contained));

  // Shared memory: the least of everything, then more in the order of its use.
  const auto fits = [&] { return shared_layout(of, plan, element_size).end <= kSharedBytes; };
  // Where a tile has several rows, its window has to lie in one piece.
  if (plan.down && group_rows > 1) return false;
  // Stacked rows are multiplied and given back one by one; but no batch of items may reach into more than two. Fills
  // are of 4 or 2 rows, and so wrap round a ring of 2 rows only once.
  const int batch = (plan.contained != 0 ? raw_parts(plan.contained) : k16BitParts) * kServiceWarps * 32;
  const bool long_rows = plan.block_steps * plan.x_pitch >= batch;
  const int least_slots = stacks ? (long_rows ? 2 : plan.x_rows) : plan.down ? plan.x_rows + plan.tile_p : plan.x_rows;
  if (least_slots > kMaxRows) return false;
  plan.x_slots = least_slots;
  plan.y_flat = !plan.down && plan.y_runs && group_rows == 1 && tile_k == 128 && of.out_stride[2] == of.Q;
  plan.boxes = plan.y_flat && small == split ? boxes_of(of, element_size, plan) : 0;
  // Without boxes all planes of 16 bits have room. Runs that lie downwards, where nothing is carried over, two warps
  // stage in one part, by turns (store_rows takes none), but not for long.
  plan.staged_planes = element_size == 2 && group_rows == 1 && plan.y_runs ? 2 * kPlanes : kPlanes;
  const bool sharing = plan.down && plan.y_runs && (plan.staged_planes == 2 * kPlanes || small || plan.contained != 0);
  plan.staging_parts = stacks ? 1 : sharing ? kMultiplyWarps / 2 : kMultiplyWarps;
  plan.w_stages = 0;
  if (!fits()) plan.boxes = 0;  // larger rings matter more
  while (2 << plan.log_boxes <= plan.boxes) ++plan.log_boxes;
  if (!fits()) plan.w_stages = 4;
  if (plan.contained != 0 && plan.down) {  // where few bytes are missing
    for (int most_steps = plan.group_steps - 1; !fits() && most_steps >= 3; --most_steps) set_groups(most_steps);
  }
  if (!fits()) return false;
  // With boxes a window may begin at any row of the ring, and a ring of two windows leaves more to the L1 cache. There,
  // and downwards, another warp may convert a place in the next round: x_full, the multiplying warps and x_empty order
  // the two, though racecheck reports a hazard (docs/lab/wgmma.md).
  const int unit_slots = stacks ? 1 : plan.down ? plan.tile_p : plan.boxes != 0 ? 1 : plan.x_rows;
  const auto grow = [&](int& count, int by, int most) {
    while (count + by <= most) {
      count += by;
      if (!fits()) {
        count -= by;
        return;
      }
    }
  };
  if (!plan.down) grow(plan.x_slots, unit_slots, std::min(2 * plan.x_rows, kMaxRows));
  if (plan.w_stages > 0) grow(plan.w_stages, 1, 6);
  grow(plan.x_slots, unit_slots, std::min(plan.boxes != 0 ? 2 * plan.x_rows : least_slots + 2 * unit_slots, kMaxRows));
  if (plan.w_stages > 0) grow(plan.w_stages, 1, kMaxStages);
  plan.smem_bytes = shared_layout(of, plan, element_size).end;
  // Units: long runs to store, but all SMs busy to the end. Rows share their input with neighbouring rows: where the
  // rows that all blocks work on do not fit into half of the L2 cache, neighbouring blocks take neighbouring rows.
  const int64_t images = of.N * of.groups;
  const int64_t tiles = images * plan.tiles_p * plan.tiles_q;
  if (tiles * plan.tiles_k > int64_t{1} << 30) return false;
  plan.tiles = static_cast<int>(tiles);
  const auto parts_of = [&](int64_t unit_tiles) {
    return plan.down ? ceil_div(images * plan.tiles_p, unit_tiles) * plan.tiles_q : ceil_div(tiles, unit_tiles);
  };
  const double row_window = static_cast<double>(plan.x_rows) * of.W * of.in_channels * element_size * device.sms;
  // With what it costs to fill the first window of a unit and of each image in it.
  const auto tiles_with_restarts = [&](int64_t unit_tiles) {
    return unit_tiles + (plan.down ? kRestartTiles * ceil_div(unit_tiles, plan.tiles_p) : 0.0);
  };
  double least_tiles = 1e30;
  const auto consider = [&](int64_t unit_tiles) {
    const int64_t rounds = ceil_div(plan.tiles_k * parts_of(unit_tiles), device.sms);
    const double tiles = rounds * tiles_with_restarts(unit_tiles);
    if (tiles < least_tiles * 0.98) {
      least_tiles = tiles;
      plan.unit_tiles = static_cast<int>(unit_tiles);
    }
  };
  if (plan.down) {
    // All lengths that differ, in rows of all images, but not so long that blocks are left without a unit.
    const int64_t rows = images * plan.tiles_p, columns = plan.tiles_k * plan.tiles_q;
    const int64_t least_units = std::min<int64_t>(ceil_div(device.sms, columns), rows);
    for (int64_t tiles = ceil_div(rows, least_units);; tiles = ceil_div(rows, ceil_div(rows, tiles - 1))) {
      consider(tiles);
      if (tiles <= 1) break;
    }
  } else {
    if (plan.y_flat && row_window < 25e6) {
      for (int rounds = 1; rounds <= 4; ++rounds)
        consider(ceil_div(tiles, std::max<int64_t>(rounds * device.sms / plan.tiles_k, 1)));
    }
    consider(plan.tiles_q);
    for (int parts = 2; parts <= plan.tiles_q; parts *= 2) consider(ceil_div(plan.tiles_q, parts));
    consider(1);
  }
  plan.units = static_cast<int>(plan.tiles_k * parts_of(plan.unit_tiles));
  plan.blocks = static_cast<int>(std::min(plan.units, device.sms));
  // Resident weights stay the same where all units of a block have the same output channels.
  if (plan.w_stages == 0 && plan.blocks > plan.tiles_k) plan.blocks -= plan.blocks % plan.tiles_k;
  const bool same_weights = plan.w_stages == 0 && of.groups == 1 && plan.blocks % plan.tiles_k == 0;
  plan.convert_warps = plan.x_simple && !plan.chunks && same_weights ? 4 : 3;

  // A cycle a pixel and step. While one warpgroup stores, the other one multiplies its last block.
  const double step = tile_pixels * kShapes[shape].narrow_cost * (split ? kSplitSteps : 1);
  const double products = step * taps * plan.blocks_c * plan.block_steps;
  const double store = tile_pixels * element_size * kStoreCyclesPerByte;
  const double turn = step / 2 * taps * plan.block_steps;
  const double bubble = std::max(store - turn, 0.0);
  const double convert_row = kConvertCyclesPerByte / plan.convert_warps *
                             (plan.x_simple ? 1 : kPiecewiseConvertFactor) *
                             (split                 ? kSplitFactor
                              : plan.contained != 0 ? kContainFactor
                                                    : 1) *
                             plan.blocks_c * plan.block_steps * 2 * pitch * 16;
  const double convert = convert_row * (plan.down ? plan.tile_p : rows);
  const double multiply = products + (split ? kSplitShare * convert : 0);
  // A ring of less than two windows lets the one wait for the other.
  const double ahead = plan.down ? 1 : std::min((plan.x_slots - rows) / static_cast<double>(rows), 1.0);
  const double apart = (1 - ahead) * std::min(multiply, convert);
  const bool whole_pieces = (plan.y_runs && group_rows == 1) || plan.y_vectors;
  const double run_rate = split && plan.down ? kLoneRunRate : kPieceRate;
  const double write_rate = plan.boxes != 0 ? kBoxRate : whole_pieces ? run_rate : kPixelRate;
  const double write = 128.0 * tile_pixels * element_size / write_rate;
  const double tile = std::max({multiply + std::max(bubble, apart), convert + apart, write}) + 200;
  const double first_rows = plan.down ? convert_row * (rows - plan.tile_p) : 0;  // of every image in a unit
  plan.cycles = static_cast<double>(ceil_div(plan.units, plan.blocks)) *
                (plan.unit_tiles * tile + ceil_div(plan.unit_tiles, plan.tiles_p) * first_rows);
  if (plan.contained != 0) plan.cycles += kContainCycles;
  return true;
}

// The address of a tensor matters by its alignment only; planning without one assumes that of an allocation.
struct Alignment {
  uint64_t in, out;
};

// Sets what the kernel may assume about addresses: true only where it holds for every element it concerns.
inline void set_alignments(const UnitCorrelation& of, int element_size, const Alignment& address, Plan& plan) {
  const auto multiples = [&](const int64_t (&stride)[4], int64_t images, int64_t channels, int64_t rows,
                             int64_t of_what) {
    return (images == 1 || stride[0] % of_what == 0) && (channels == 1 || stride[1] % of_what == 0) &&
           (rows == 1 || stride[2] % of_what == 0);
  };
  const int64_t in_channels = static_cast<int64_t>(of.groups) * of.in_channels;
  const int64_t out_channels = static_cast<int64_t>(of.groups) * of.out_channels;
  const bool out_dense = of.out_stride[3] == 1;
  plan.x_pairs = of.in_stride[3] == 1 && of.W % 2 == 0 && address.in % (2 * element_size) == 0 &&
                 multiples(of.in_stride, of.N, in_channels, of.H, 2);
  const auto loads = [&](int dimension, int64_t size) {
    const int64_t bytes = of.in_stride[dimension] * element_size;
    return size == 1 || (bytes > 0 && bytes % 16 == 0 && bytes < int64_t{1} << 40);
  };
  plan.x_boxes =
      of.in_stride[3] == 1 && address.in % 16 == 0 && loads(0, of.N) && loads(1, in_channels) && loads(2, of.H);
  plan.y_runs = out_dense;
  plan.y_pairs =
      out_dense && address.out % (2 * element_size) == 0 && multiples(of.out_stride, of.N, out_channels, of.P, 2);
  plan.y_sectors = address.out % kSector == 0;
  const int vector = 16 / element_size;
  plan.y_vectors = out_dense && of.Q % vector == 0 && address.out % 16 == 0 &&
                   multiples(of.out_stride, of.N, out_channels, of.P, vector);
}

// The best plan, or one of the configurations that tests force by number: shape + 4 * (64 channels a tile) + 8 * down,
// with operands as they are stored, 16 with the first of the small shapes, or 17 with stacked rows of taps. With values
// contained in one part those below 16, from kContainedConfigurations on; in two parts those of the small shapes, and
// stacked rows of taps, from twice that on.
constexpr int kConfigurations = 18, kSmall = 16, kStacked = 17;
constexpr int kContainedConfigurations = 32;
constexpr int kSplitConfigurations = 2 * kContainedConfigurations;
constexpr int kAllConfigurations = 3 * kContainedConfigurations;

inline bool plan_configuration(const UnitCorrelation& of, int element_size, const Device& device,
                               const Alignment& address, int configuration, bool chunks, Plan& plan) {
  const int contained = configuration / kContainedConfigurations;
  configuration %= kContainedConfigurations;
  const bool small = configuration == kSmall, stacks = configuration == kStacked;
  if (configuration >= kConfigurations || (contained != 0 && (element_size != 4 || small))) return false;
  if (stacks && element_size == 4 && contained != 2) return false;
  plan = Plan{};
  set_alignments(of, element_size, address, plan);
  plan.chunks = chunks;
  plan.down = configuration >= 8;
  const int shape = (small || contained == 2 ? kSmallShapes : 0) + (small || stacks ? 0 : configuration % 4);
  if (shape >= static_cast<int>(sizeof kShapes / sizeof kShapes[0])) return false;
  const int tile_k = stacks ? kStackedChannels : !small && configuration / 4 % 2 != 0 ? kGroupChannels : 128;
  return complete(of, {element_size, contained}, device, shape, tile_k, plan);
}

// With TF32 operands, for the tiles of a plan with contained ones: the same tiles, rightwards.
inline bool plan_again(const UnitCorrelation& of, const Device& device, const Alignment& address, const Plan& contained,
                       Plan& plan) {
  int configuration = contained.tile_k == 64 ? 4 : 0;
  while (kShapes[configuration % 4].columns != contained.tile_q) ++configuration;
  if (!plan_configuration(of, 4, device, address, configuration, false, plan)) return false;
  // A list has tiles of all output channels.
  if (plan.tiles_k > 1) plan.convert_warps = 3;
  return true;
}

// The precision of a call: fp32 tensors are multiplied as TF32, which may be contained, or split.
struct Precision {
  int element_bytes;
  bool exact;  // fp32 tensors: in full
};

inline Precision precision_of(const Problem& problem, Operator op) {
  return {element_bytes(problem.dtype), problem.dtype == DType::kFloat32 && !uses_tf32(problem, op)};
}

// Contained operands: the same with x loaded by boxes, where that is worth while. It is not where weights are resident,
// which leaves a fourth warp to convert and, mostly, few channels, whose rows are found in the L1 cache when they are
// loaded again; nor where rings get shorter or blocks of channels smaller. Not for split operands, whose kernels lack
// the registers for one more way to convert. Measured in docs/lab/wgmma.md.
inline void try_chunks(const UnitCorrelation& of, const Device& device, const Alignment& address, int configuration,
                       Plan& plan) {
  if (plan.contained != 1 || !plan.x_boxes || plan.w_stages == 0) return;
  Plan chunked;
  if (!plan_configuration(of, 4, device, address, configuration, true, chunked) || chunked.w_stages == 0) return;
  const bool tight =
      chunked.group_steps < plan.group_steps || chunked.x_slots < plan.x_slots || chunked.blocks_c > plan.blocks_c;
  if (!tight || !plan.x_simple) plan = chunked;  // single pixels are the slowest way
}

inline bool make_plan(const UnitCorrelation& of, const Precision& precision, const Device& device,
                      const Alignment& address, int forced, Plan& best) {
  int found = -1;
  for (int configuration = 0; configuration < kAllConfigurations; ++configuration) {
    if (precision.exact != (configuration >= kSplitConfigurations)) continue;
    if (forced >= 0 && forced != configuration) continue;
    Plan plan, again;
    if (!plan_configuration(of, precision.element_bytes, device, address, configuration, false, plan)) continue;
    if (plan.contained == 1 && !plan_again(of, device, address, plan, again)) continue;
    if (found >= 0 && plan.cycles >= best.cycles) continue;
    best = plan;
    found = configuration;
  }
  if (found < 0) return false;
  try_chunks(of, device, address, found, best);
  return true;
}

// Full fp32 accuracy from this size on: the direct engine is more exact for short sums and as fast for small problems.
constexpr int kLeastSplitTerms = 64;
constexpr double kLeastSplitMultiplyAdds = 1 << 25;

// Why the engine cannot compute a problem, judged by sizes alone (no GPU needed), or null.
inline const char* refusal_of_problem(const Problem& problem, Operator op) {
  if (op != Operator::kFprop && op != Operator::kDgrad) return "it computes outputs and input gradients only";
  if (problem.dtype == DType::kFloat64) return "it has no float64";
  if (has_stride(problem)) return "it takes stride 1 only";
  const UnitCorrelation of = correlation_of(problem, op);
  if (of.Q < 32) return "it takes outputs of at least 32 columns";
  if (of.in_channels < 8) return "it takes at least 8 input channels a group";
  if (of.out_channels < 8) return "it takes at least 8 output channels a group";
  if (precision_of(problem, op).exact) {
    if (static_cast<int64_t>(of.in_channels) * of.R * of.S < kLeastSplitTerms)
      return "it takes sums of at least 64 terms where full float32 accuracy is asked for";
    if (multiply_adds(problem) < kLeastSplitMultiplyAdds)
      return "it takes at least 2^25 multiply-adds where full float32 accuracy is asked for";
  }
  return nullptr;
}

struct Planned {
  UnitCorrelation of;
  Plan plan, again;  // again: where the plan is contained in one part
  bool found;
  int sms;
};

// Plans are remembered: a call asks twice, and planning takes host time.
inline const Planned& plan_of(const Problem& problem, Operator op, const Alignment& address) {
  thread_local Memo<Planned> memo;
  Device device{};
  const int gpu = find_gpu(device.sms);
  return memo.get(key_of(problem, op, address.in, 0, address.out, gpu, device.sms), [&] {
    Planned planned{};
    planned.of = correlation_of(problem, op);
    planned.found = make_plan(planned.of, precision_of(problem, op), device, address, -1, planned.plan);
    if (planned.found && planned.plan.contained == 1)
      planned.found = plan_again(planned.of, device, address, planned.plan, planned.again);
    planned.sms = device.sms;
    return planned;
  });
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (const char* reason = refusal_of_problem(problem, op)) return reason;
  Device device{};
  if (find_gpu(device.sms) != 90) return "it needs a Hopper GPU (compute capability 9.0)";
  if (!plan_of(problem, op, Alignment{}).found) return "a tile with its halo does not fit into shared memory";
  return nullptr;
}

inline double cycles(const Problem& problem, Operator op) { return plan_of(problem, op, Alignment{}).plan.cycles; }

// The thresholds of yields() are measured, see "The choice of an engine" in docs/lab/wgmma.md.
//
// fp32 in full accuracy: mma is faster below so many multiply-adds.
constexpr double kLeastAgainstMma = 1.4142 * (1 << 29);

// Up to so many outputs there are hardly two tiles for each SM, which gather cuts up.
constexpr double kFewOutputs = 1 << 23;

// From so many channels on gather is faster: it copies x once into the operands that this engine makes anew for each
// tile of output channels. The more taps a filter has, the less its operands cost here. gather makes no larger copies.
constexpr int kManyChannels = 128, kFewTaps = 9;
constexpr int64_t kMostCopied = 1 << 28;  // values

// With fewer input channels that pays while x and y together have no more values than this.
constexpr int kSomeChannels = 64;
constexpr double kSomeValues = 1.6 * (1 << 26);

// Where taps lie so far apart that gather's windows do not fit, tiles here are mostly halo, and this engine's estimate
// is too short by at least this factor.
constexpr double kTooShort = 1.3;

// gather's estimate is longer than this one's by this factor where both take as long.
constexpr double kLongerByGather = 1.3;

// 16 bits in channels_last: gather loads eight values at a time where this engine loads one, but fills channels up with
// zeros, which costs more with fewer channels than this.
constexpr int kLeastOfEights = 24;

// Why the engine defers to another one although it could compute the problem, or null.
inline const char* yields(const Problem& problem, Operator op) {
  const int64_t (&in_stride)[4] = op == Operator::kDgrad ? problem.y_stride : problem.x_stride;
  const bool channels_last = in_stride[1] == 1 && in_stride[3] > 1;
  if (!uses_tf32(problem, op) && problem.dtype == DType::kFloat32 && multiply_adds(problem) < kLeastAgainstMma &&
      kMmaEngine.refusal(problem, op) == nullptr)
    return "mma is faster with few multiply-adds";
  const int of_group = (op == Operator::kDgrad ? problem.K : problem.C) / problem.groups;
  const bool in_eights = problem.groups == 1 && of_group % 8 == 0 && of_group >= kLeastOfEights &&
                         (in_stride[0] | in_stride[2] | in_stride[3]) % 8 == 0;
  if (element_bytes(problem.dtype) == 2 && channels_last && in_eights && kGatherEngine.refusal(problem, op) == nullptr)
    return "gather is faster in channels_last";
  if (!uses_tf32(problem, op)) return nullptr;
  if (kGatherEngine.refusal(problem, op) != nullptr) {
    const bool far_apart = problem.dilation_h > 1 || problem.dilation_w > 1;
    return far_apart && kMmaEngine.refusal(problem, op) == nullptr &&
                   kMmaEngine.cycles(problem, op) < kTooShort * cycles(problem, op)
               ? "mma is faster where taps lie far apart"
               : nullptr;
  }
  // gather multiplies several such groups as one.
  const bool few_of_group = problem.groups > 1 && std::max(problem.C, problem.K) / problem.groups < kGroupChannels;
  if (few_of_group && kGatherEngine.cycles(problem, op) < cycles(problem, op))
    return "gather is faster with few channels a group";
  // gather may scale x to fp16 while it loads it (at aligned addresses, which are assumed here). 3x3 filters are taken
  // from measurements, as this engine's estimate is too short there.
  const bool measured = problem.R == 3;
  if (gather_lands(problem, op) && (measured || kGatherEngine.cycles(problem, op) < cycles(problem, op)))
    return "gather is faster where it scales x to fp16 while loading it";
  const bool points = problem.R == 1 && problem.S == 1;
  const double of_x = static_cast<double>(problem.N) * problem.C * problem.H * problem.W;
  const double of_y = static_cast<double>(problem.N) * problem.K * problem.P * problem.Q;
  const double inputs = op == Operator::kDgrad ? of_y : of_x, outputs = op == Operator::kDgrad ? of_x : of_y;
  const int in_channels = op == Operator::kDgrad ? problem.K : problem.C;
  const bool copies =
      problem.groups == 1 && problem.R * problem.S <= kFewTaps && std::min(problem.C, problem.K) >= kSomeChannels;
  const bool many_channels = copies && in_channels >= kManyChannels && inputs <= kMostCopied;
  const bool few_values = outputs <= kFewOutputs || (copies && inputs + outputs <= kSomeValues);
  return channels_last   ? "gather is faster in channels_last"
         : points        ? "gather is faster with 1x1 filters"
         : many_channels ? "gather is faster with many input channels"
         : few_values    ? "gather is faster with few values"
         : copies && kGatherEngine.cycles(problem, op) < kLongerByGather * cycles(problem, op)
             ? "gather is faster by the estimates"
             : nullptr;
}

inline int64_t packed_bytes(const UnitCorrelation& of, const Plan& plan) {
  return static_cast<int64_t>(of.groups) * plan.tiles_k * total_steps(of, plan) * weight_tiles(plan) *
         weight_step_bytes(plan);
}

// Where the parts of the workspace start.
struct WorkspaceLayout {
  int64_t bad_tile_k, marked, zeros_end;  // all zeros at first, from the start on
  int64_t list, w_exponents, packed, packed_again, end;
};

inline WorkspaceLayout workspace_layout(const Problem& problem, Operator op, const Planned& planned) {
  const UnitCorrelation& of = planned.of;
  const Plan& plan = planned.plan;
  const auto aligned = [](int64_t bytes) { return ceil_div(bytes, 128) * 128; };
  WorkspaceLayout layout{};
  if (plan.contained == 0) {
    layout.end = packed_bytes(of, plan);
    return layout;
  }
  const int64_t tiles = static_cast<int64_t>(plan.tiles) * plan.tiles_k, tiles_k = int64_t{of.groups} * plan.tiles_k;
  layout.bad_tile_k = aligned(sizeof(Control));
  layout.marked = layout.bad_tile_k + aligned(4 * tiles_k);
  layout.zeros_end = layout.marked + aligned(ceil_div(tiles, 8));
  layout.list = layout.zeros_end;
  layout.w_exponents = layout.list + aligned(4 * tiles);
  layout.packed = layout.w_exponents + aligned(4 * tiles_k * weight_rows(plan));
  layout.packed_again = layout.packed + aligned(packed_bytes(of, plan));
  layout.end = layout.packed_again +
               (plan.contained == 2 ? listed_workspace_bytes(problem, op) : packed_bytes(of, planned.again));
  return layout;
}

inline Alignment alignment_of(Operator op, const Pointers& pointers) {
  const void* const in_ptr = op == Operator::kDgrad ? pointers.dy : pointers.x;
  return {reinterpret_cast<uint64_t>(in_ptr), reinterpret_cast<uint64_t>(pointers.out)};
}

inline int64_t workspace_bytes(const Problem& problem, Operator op, const Pointers& pointers) {
  const Planned& planned = plan_of(problem, op, alignment_of(op, pointers));
  return planned.found ? workspace_layout(problem, op, planned).end : 0;
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

inline PackOperandsParams pack_params(const void* w_ptr, void* packed_ptr, const UnitCorrelation& of,
                                      const Plan& plan) {
  PackOperandsParams params{};
  params.w_ptr = w_ptr;
  params.packed_ptr = packed_ptr;
  params.of = of;
  params.tiles_k = plan.tiles_k * weight_tiles(plan);
  params.blocks_c = plan.blocks_c;
  params.block_steps = plan.block_steps;
  params.boxes = plan.boxes;
  params.taps = taps_in_turn(of, plan);
  params.stacks = stacked(plan);
  params.pieces = packed_bytes(of, plan) / 16;
  return params;
}

// y as boxes want it: [image][channel / boxes][pixel of `boxes` channels], and blocks of 128 bytes to go on with.
template <typename Element>
cudaError_t make_box_maps(Params& params) {
  const UnitCorrelation& of = params.of;
  constexpr uint64_t kSize = sizeof(Element);
  const uint64_t boxes = params.plan.boxes, channel = of.out_stride[1], images = of.N;
  const uint64_t channels = static_cast<uint64_t>(of.groups) * of.out_channels / boxes;
  const uint64_t sizes[4] = {(boxes - 1) * channel + static_cast<uint64_t>(of.P) * of.Q, channels, 4, images};
  const uint64_t strides[3] = {boxes * channel * kSize, hopper::kBoxRowBytes,
                               images > 1 ? of.out_stride[0] * kSize : boxes * channel * kSize};
  const uint32_t rows = kSize == 2 || params.plan.contained != 0 ? 16 : 8;
  const uint32_t four[4] = {hopper::kBoxRowBytes / kSize, rows, 4, 1}, one[4] = {four[0], rows, 1, 1};
  constexpr hopper::BoxUse kStore = hopper::BoxUse::kStore;
  const cudaError_t error =
      hopper::make_box_map(kStore, params.out_ptr, kSize, sizes, strides, four, params.four_blocks);
  if (error != cudaSuccess) return error;
  return hopper::make_box_map(kStore, params.out_ptr, kSize, sizes, strides, one, params.one_block);
}

// x as boxes load it: [image][channel][row][column].
inline cudaError_t make_chunk_maps(Params& params) {
  const UnitCorrelation& of = params.of;
  const Plan& plan = params.plan;
  constexpr uint64_t kSize = sizeof(float);
  constexpr hopper::BoxUse kLoad = hopper::BoxUse::kLoad;
  const uint64_t sizes[4] = {static_cast<uint64_t>(of.W), static_cast<uint64_t>(of.H),
                             static_cast<uint64_t>(of.groups) * of.in_channels, static_cast<uint64_t>(of.N)};
  uint64_t strides[3];
  for (int i = 0; i < 3; ++i) strides[i] = sizes[i + 1] > 1 ? of.in_stride[2 - i] * kSize : 16;
  const uint32_t whole[4] = {kChunkColumns, 1, 8 * kChunkPieces, 1};
  const uint32_t rest[4] = {static_cast<uint32_t>(plan.rest_columns), static_cast<uint32_t>(plan.rest_rows),
                            static_cast<uint32_t>(8 * plan.rest_pieces), 1};
  cudaError_t error = cudaSuccess;
  if (plan.whole_chunks > 0)
    error = hopper::make_box_map(kLoad, params.in_ptr, kSize, sizes, strides, whole, params.whole_chunks);
  if (error == cudaSuccess && plan.rest_pixels > 0)
    error = hopper::make_box_map(kLoad, params.in_ptr, kSize, sizes, strides, rest, params.rest_chunks);
  return error;
}

template <typename Format, int TILE_P, int TILE_Q>
cudaError_t run_kernel(const Params& params, cudaStream_t stream) {
  constexpr Instance kInstance{
      "wgmma_kernel", {kTypeId<typename Format::Stored>, Format::CONTAINED, TILE_P, TILE_Q, Format::STACKED}};
  record(kInstance);
  if constexpr (!is_built(kInstance) || (Format::STACKED && TILE_P > 1)) {
    return cudaErrorInvalidConfiguration;
  } else {
    const auto kernel = wgmma_kernel<Format, TILE_P, TILE_Q>;
    const cudaError_t error = allow_all_shared_memory(kernel);
    if (error != cudaSuccess) return error;
    kernel<<<params.plan.blocks, kThreads, params.plan.smem_bytes, stream>>>(params);
    return cudaGetLastError();
  }
}

// The kernel of a plan, its weights packed.
template <typename Format>
cudaError_t run_packed(Params& params, cudaStream_t stream) {
  if (params.plan.boxes != 0) {
    const cudaError_t error = make_box_maps<typename Format::Stored>(params);
    if (error != cudaSuccess) return error;
  }
  if (params.plan.chunks) {
    const cudaError_t error = make_chunk_maps(params);
    if (error != cudaSuccess) return error;
  }
  constexpr int kPixels = Format::PIXELS;
  switch (params.plan.tile_q) {
    case 256:
      if constexpr (kPixels == 256) return run_kernel<Format, 1, 256>(params, stream);
      return cudaErrorInvalidConfiguration;
    case 128:
      if constexpr (sizeof(typename Format::Multiplied) == 4) {
        if (params.plan.tile_p == 1) return run_kernel<Format, 1, 128>(params, stream);
      }
      return run_kernel<Format, kPixels / 128, 128>(params, stream);
    case 64:
      return run_kernel<Format, kPixels / 64, 64>(params, stream);
    default:
      return run_kernel<Format, kPixels / 32, 32>(params, stream);
  }
}

template <typename Format>
cudaError_t run(const void* w_ptr, void* workspace, Params& params, cudaStream_t stream) {
  const PackOperandsParams pack = pack_params(w_ptr, workspace, params.of, params.plan);
  pack_operands_kernel<Format>
      <<<static_cast<unsigned>(ceil_div(pack.pieces, kPackThreads)), kPackThreads, 0, stream>>>(pack);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  params.packed_ptr = workspace;
  return run_packed<Format>(params, stream);
}

// A call: the problem, its tensors and its plan.
struct Call {
  Operator op;
  const Problem& problem;
  const Pointers& pointers;
  const Planned& planned;
};

// Contained operands in one part or two, and what does not fit into them again: with TF32 operands, or by FFMA.
inline cudaError_t run_contained(const Call& call, Params& params, cudaStream_t stream) {
  const UnitCorrelation& of = params.of;
  const Plan& plan = params.plan;
  const Plan& again = call.planned.again;
  const bool split = plan.contained == 2;
  const WorkspaceLayout layout = workspace_layout(call.problem, call.op, call.planned);
  uint8_t* const start = static_cast<uint8_t*>(call.pointers.workspace);
  const auto part = [&](int64_t offset) { return reinterpret_cast<uint32_t*>(start + offset); };
  params.guard = {reinterpret_cast<Control*>(start), part(layout.bad_tile_k), part(layout.marked), part(layout.list),
                  reinterpret_cast<int32_t*>(part(layout.w_exponents))};
  PrepareParams prepare{};
  prepare.in_ptr = params.in_ptr;
  prepare.contained = pack_params(call.pointers.w, part(layout.packed), of, plan);
  if (!split) prepare.tf32 = pack_params(call.pointers.w, part(layout.packed_again), of, again);
  prepare.guard = params.guard;
  prepare.parts = plan.contained;
  prepare.tile_rows = weight_rows(plan);
  prepare.row_blocks = of.groups * plan.tiles_k * prepare.tile_rows;
  prepare.window = static_cast<float>(plan.x_rows) * plan.x_pitch * of.in_channels;
  prepare.again_from = split ? 0.9f : 0.5f;
  prepare.most_in_a_window = split ? 2.3f : 0.7f;  // -log(1 - again_from)
  cudaError_t error = cudaMemsetAsync(start, 0, layout.zeros_end, stream);
  if (error != cudaSuccess) return error;
  const int64_t blocks = prepare.row_blocks + kSampleBlocks + ceil_div(prepare.tf32.pieces, kPackThreads);
  prepare_kernel<<<static_cast<unsigned>(blocks), kPackThreads, sizeof(PrepareShared), stream>>>(prepare);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  params.packed_ptr = part(layout.packed);
  if (split) {
    error = stacked(plan) ? run_packed<StackedSplit>(params, stream) : run_packed<Split>(params, stream);
    if (error != cudaSuccess) return error;
    const TileList list{&params.guard.control->all_again,
                        &params.guard.control->listed,
                        params.guard.list,
                        weight_rows(plan),
                        plan.tile_p,
                        plan.tile_q};
    Pointers pointers = call.pointers;
    pointers.workspace = part(layout.packed_again);
    return launch_listed(call.op, call.problem, pointers, list, call.planned.sms, stream);
  }
  error = run_packed<Contained>(params, stream);
  if (error != cudaSuccess) return error;
  params.plan = again;
  params.packed_ptr = part(layout.packed_again);
  return run_packed<Tf32>(params, stream);
}

// Runs what is planned; `params`: without plan and weights.
inline cudaError_t run_plan(const Call& call, Params& params, cudaStream_t stream) {
  const DType dtype = call.problem.dtype;
  params.of = call.planned.of;
  params.plan = call.planned.plan;
  if (params.plan.contained != 0) return run_contained(call, params, stream);
  const void* const w_ptr = call.pointers.w;
  void* const workspace = call.pointers.workspace;
  const bool stacks = stacked(params.plan), fp16 = dtype == DType::kFloat16;
  if (dtype == DType::kFloat32) return run<Tf32>(w_ptr, workspace, params, stream);
  if (stacks && fp16) return run<StackedFp16>(w_ptr, workspace, params, stream);
  if (stacks) return run<StackedBf16>(w_ptr, workspace, params, stream);
  if (fp16) return run<Fp16>(w_ptr, workspace, params, stream);
  return run<Bf16>(w_ptr, workspace, params, stream);
}

inline cudaError_t launch(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  Params params{};
  params.in_ptr = op == Operator::kDgrad ? pointers.dy : pointers.x;
  params.bias_ptr = op == Operator::kDgrad ? nullptr : pointers.bias;
  params.out_ptr = pointers.out;
  const Planned& planned = plan_of(problem, op, alignment_of(op, pointers));
  if (!planned.found) return cudaErrorInvalidConfiguration;
  return run_plan({op, problem, pointers, planned}, params, stream);
}

#endif  // launchers

inline void describe(const Problem& problem, Operator op, char* text, size_t text_size) {
  const Plan& plan = plan_of(problem, op, Alignment{}).plan;
  const Operands operands{element_bytes(problem.dtype), plan.contained};
  const int channels = kStepBytes / operands.multiplied_bytes() * plan.block_steps;
  snprintf(text, text_size,
           "%s%s%stile of %d channels x %d x %d pixels, %s, %d input channels a row of %d%s, %d stages of weights of "
           "%d bytes%s, %d bytes of shared memory, %d blocks, units of %d tiles, about %.3g Mcycles",
           plan.contained == 2   ? "two parts of scaled fp16, "
           : plan.contained == 1 ? "scaled fp16, "
                                 : "",
           stacked(plan) ? "rows of taps in one product, " : "", plan.boxes != 0 ? "stored by boxes, " : "",
           plan.tile_k, plan.tile_p, plan.tile_q, plan.down ? "downwards" : "rightwards", channels, plan.x_slots,
           plan.chunks ? " loaded by boxes" : "", plan.w_stages, plan.group_steps * weight_step_bytes(plan),
           plan.w_stages == 0 ? " (resident)" : "", plan.smem_bytes, plan.blocks, plan.unit_tiles, plan.cycles * 1e-6);
}

#endif  // host

}  // namespace wgmma

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
extern const Engine kWgmmaEngine{"wgmma",         wgmma::refusal, wgmma::workspace_bytes, wgmma::launch,
                                 wgmma::describe, wgmma::yields,  wgmma::cycles};
#endif

}  // namespace modelnew
