// mma engine: implicit GEMM in TF32 on the tensor cores of any GPU since Ampere, for fp32 tensors. It computes y, and
// dx with stride 1. It runs small problems and problems with few channels (on Hopper, stem.cu runs most of the latter).
// One launch, no workspace, weights are read as they are. Deterministic: every sum has a fixed order.
//
// GEMM view: rows = output channels, columns = output pixels of one image, reduction = (channel block, channel, r, s),
// or (channel block, r, s, channel) if w has that order in memory. A stage of shared memory holds one channel block,
// a chunk:
//
//   w stage:  [TILE_M output channels][terms of the chunk], as in memory
//   x stage:  [channel][row][column] or [row][column][channel]: the tile's input window, halo included
//
//   +--- columns ---+
//   | . . . . . . . |      word of x = pixel offset(output) + term offset(channel, r, s)
//   | . . . . . . . |
//   +---------------+      A lane keeps the pixel offsets of its columns in registers; term offsets come from a table.
//
// Therefore strides, dilation, filters of any size and few channels need no code of their own, and a value of x is
// loaded into shared memory once for all filter taps. Operands are read as single words, because ldmatrix needs rows
// that start at multiples of 16 bytes.
//
//   global memory --bulk copies (TMA boxes or runs) or cp.async--> ring of stages --words, split--> registers
//                 --mma.sync--> registers --> staging --> global memory
//
// All warps multiply and take turns in issuing bulk copies. An image whose rows are no multiples of 16 bytes (7x7,
// 14x14) arrives as whole NCHW planes, one run of memory; threads scatter them into the window through a table.
//
// Full fp32 accuracy takes three products: v = first + rest, both TF32, and first*first + first*rest + rest*first. The
// tensor core truncates its sums; therefore it adds up 8 terms only, and ordinary additions accumulate the results. A
// product is within 2^-21 of the exact one. Under the TF32 contract there is one product, and the tensor core
// accumulates.
//
// Inf and NaN: the rest of an Inf is NaN, and a value near the largest rounds to Inf. An output that is not finite is
// recomputed by multiply-adds in exact_output.
//
// Where tiles are few, a cluster of blocks shares one (sm_90; other GPUs do without). Each block reduces some of the
// chunks; then each block adds some rows over the staging of all blocks, in a fixed order, and stores them. In the
// smallest tile four groups of warps share the reduction of a block in the same way.
//
//   block 0:  chunks 0 .. 3 --> staging 0 --+--> block 0 stores rows  0 .. 15 of the sum of both
//   block 1:  chunks 4 .. 7 --> staging 1 --+--> block 1 stores rows 16 .. 31
//
// In channels_last with 2 or 3 channels, as in the first layer of a network, a row of the window is one run:
//
//   x stage:  [row][column and channel]
//
// Bound by instruction issue: rounding and shared-memory loads around each mma.sync take longer than mma.sync itself.
// Small problems are bound by latency, from the launch to the first copies and from the last product to the stores.
// Measurements: docs/lab/mma.md.
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "device.cuh"
#include "engines.cuh"
#include "memo.cuh"
#endif

#include "async_copy.cuh"
#include "cluster.cuh"
#include "correlation.cuh"
#include "divisor.cuh"
#include "numerics.cuh"
#include "problem.cuh"
#include "ptx.cuh"
#include "tensor_map.cuh"
#include "tf32.cuh"

namespace modelnew {
namespace mma {

// Geometry, for host and device.

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBlocks = 2;  // blocks per SM that the registers must allow
constexpr int kMaxStages = 8;
constexpr int kMaxSplits = 8;

// WARPS_K groups of WARPS_M x WARPS_N warps. A warp has M16 x N8 tiles of 16 channels x 8 pixels and multiplies every
// WARPS_K-th step of 8 terms; it interleaves STEPS steps, as registers allow.
template <int WARPS_K_, int WARPS_M_, int WARPS_N_, int M16_, int N8_>
struct Shape {
  static constexpr int WARPS_K = WARPS_K_, WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, M16 = M16_, N8 = N8_;
  static constexpr int STEPS = M16 * N8 <= 8 ? 2 : 1;
  static constexpr int TILE_M = WARPS_M * M16 * 16, TILE_N = WARPS_N * N8 * 8;
  static_assert(WARPS_K * WARPS_M * WARPS_N == kWarps, "all warps multiply");
};

// How a chunk arrives in shared memory.
enum class Copies : int {
  kWords,  // cp.async of 4 bytes by all threads
  kFours,  // cp.async of 16 bytes by all threads
  kRun,    // one run of memory: a bulk copy, or cp.async of 16 bytes
  kBox,    // a TMA box
  kPlanes  // whole NCHW planes as one run, from which threads fill the window
};

struct Plan {
  int shape;                                  // index into kShapes
  int tile_m, tile_n, warps_k;                // channels and pixels of a tile; groups of warps that share the reduction
  int tile_p, tile_q;                         // rows and columns of a tile
  int tiles_p, tiles_q, tiles_m;              // tiles of an image and of a group's channels
  int64_t tiles;                              // over all images and groups
  int row_step, column_step;                  // steps in the window between neighbouring outputs
  int in_row_step, in_column_step;            // steps in the image between neighbours in the window
  int rows, columns, lead;                    // size of the window; words in front of a row, for alignment
  int pixel_words, channel_words, row_words;  // steps in a stage between neighbours
  int channels, chunks;                       // channels of a chunk, chunks of the reduction
  int taps, depth;                            // R * S; terms of a chunk, padded to a multiple of 8
  bool taps_first;                            // the reduction is (r, s, channel)
  bool natural;                               // the reduction has the order of w in memory, without gaps
  Copies x_copies, w_copies;
  bool x_bulk, w_bulk;                     // arrives by bulk copies
  int arrivals;                            // arrivals that complete a stage: one for bulk copies, kThreads for others
  int plane;                               // words of an NCHW plane of x
  bool lines;                              // a row holds all channels of its pixels: 2 or 3, channels_last
  int x_bulk_words;                        // words that a bulk copy of x brings
  int box_row_step, box_column_step;       // a box of x starts at the tile's first output times this step,
  int first_row, first_column;             // plus this
  int zeros;                               // first of the words that are zero for every pixel offset
  int entries, row_entries;                // copies of a channel, or pixels; copies of a row
  int x_pieces;                            // copies of a pixel
  int w_pieces, w_row_step, w_piece_step;  // copies of a row of w; steps from one copy of a thread to its next
  int splits, split_bits;                  // blocks that share a tile, and the logarithm of it
  int split_chunks, split_rows;            // chunks that a block reduces, rows that it stores
  int w_pitch, x_words, w_words, stages;   // words of a stage and of its rows of w; number of stages
  int window_words;                        // words of the window behind the ring, for planes
  bool out_channels_last;                  // channels of y are neighbours, in memory and in staging
  int out_vector;                          // neighbouring outputs of one store: 4 or 1
  int piece_bits;                          // a tile has 2^piece_bits stores along its contiguous dimension
  bool lines_are_run;                      // rows of y follow one another in memory, and a tile has whole rows
  int smem_bytes;
  double cycles;  // estimated, of one SM
};

struct Params {
  const float *in_ptr, *w_ptr, *bias_ptr;
  float* out_ptr;
  Correlation of;
  Plan plan;
  Divisor by_taps, by_channels, by_s, by_tile_q, by_row_entries, by_w_pieces, by_x_pieces, by_width;
  Divisor by_tiles_m, by_tiles_q, by_tiles_p, by_images;
  bool tf32;
  hopper::BoxMap x_map, w_map;
};

// Shared memory of a block, in words:
//
//   0           kTable                                    ring_start
//   | mbarriers | term offsets [depth] | scatter [plane]  | ring of stages | window |      scatter, window: for planes
//                                                         | staging, over the ring  |
constexpr int kTable = 32;      // start of the term offsets
constexpr int kStagingPad = 8;  // against bank conflicts; half of it if channels are neighbours

MODELNEW_HOST_DEVICE inline int ring_start(const Plan& plan) {
  return (kTable + plan.depth + (plan.x_copies == Copies::kPlanes ? plan.plane : 0) + 31) / 32 * 32;
}

// Row pitch of staging: [channel][pixel], or [pixel][channel] for channels_last.
MODELNEW_HOST_DEVICE constexpr int pixels_pitch(int tile_n) { return tile_n + kStagingPad; }
MODELNEW_HOST_DEVICE constexpr int channels_pitch(int tile_m) { return tile_m + kStagingPad / 2; }
MODELNEW_HOST_DEVICE constexpr int staging_words(bool channels_last, int tile_m, int tile_n) {
  return channels_last ? tile_n * channels_pitch(tile_m) : tile_m * pixels_pitch(tile_n);
}

MODELNEW_HOST_DEVICE inline int shared_words(const Plan& plan) {
  const int ring = plan.stages * (plan.x_words + plan.w_words) + plan.window_words;
  const int staging = plan.warps_k * staging_words(plan.out_channels_last, plan.tile_m, plan.tile_n);
  return ring_start(plan) + (ring > staging ? ring : staging);
}

struct Tile {
  int group, n, m, p, q;
};

// Tiles over the same pixels are neighbours in launch order: they find x in L2.
MODELNEW_HOST_DEVICE inline Tile locate_tile(const Params& params, int number) {
  const Plan& plan = params.plan;
  const int row = quotient(number, params.by_tiles_m), image = quotient(row, params.by_tiles_q);
  const int all = quotient(image, params.by_tiles_p), group = quotient(all, params.by_images);
  return {group, all - group * static_cast<int>(params.of.N), (number - row * plan.tiles_m) * plan.tile_m,
          (image - all * plan.tiles_p) * plan.tile_p, (row - image * plan.tiles_q) * plan.tile_q};
}

// Term i of a chunk.
struct Term {
  int channel, r, s;
};

MODELNEW_HOST_DEVICE inline Term locate_term(const Params& params, int i) {
  const Plan& plan = params.plan;
  const int slow = quotient(i, plan.taps_first ? params.by_channels : params.by_taps);
  const int fast = i - slow * (plan.taps_first ? plan.channels : plan.taps);
  const int tap = plan.taps_first ? slow : fast;
  const int r = quotient(tap, params.by_s);
  return {plan.taps_first ? fast : slow, r, tap - r * params.of.S};
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// Device code.

// Loads.

// Writes the offset of each term, the scatter table of planes, and the zeros that pad the reduction: in x behind the
// channels of the chunk or of each pixel, and in w as well, because Inf or NaN left there would make NaN of zero.
__device__ __forceinline__ void make_table(const Params& params, const Tile& tile, float* smem) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int terms = plan.channels * plan.taps;
#pragma unroll 1
  for (int i = threadIdx.x; i < plan.depth; i += kThreads) {
    const Term term = locate_term(params, i);
    const int row = of.R == 1 ? 0 : term.r * of.dilation_h, column = of.S == 1 ? 0 : term.s * of.dilation_w;
    reinterpret_cast<int*>(smem)[kTable + i] =
        4 * (i < terms
                 ? term.channel * plan.channel_words + row * plan.row_words + column * plan.pixel_words + plan.lead
                 : plan.zeros);
  }
  if (plan.x_copies == Copies::kPlanes) {
    const int window = ring_start(plan) + plan.stages * (plan.x_words + plan.w_words);
    const int h = of.pad_h - tile.p * of.stride_h, w = of.pad_w - tile.q * of.stride_w;
#pragma unroll 1
    for (int i = threadIdx.x; i < plan.plane; i += kThreads) {
      const int in_h = quotient(i, params.by_width), row = in_h + h, column = i - in_h * of.W + w;
      const bool exists = row >= 0 && row < plan.rows && column >= 0 && column < plan.columns;
      reinterpret_cast<int*>(smem)[kTable + plan.depth + i] = exists ? row * plan.row_words + column : -1;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < plan.window_words; i += kThreads) smem[window + i] = 0;
  }
  if (terms == plan.depth) return;
  const int padding = plan.depth - terms;
#pragma unroll 1
  for (int stage = 0; stage < plan.stages; ++stage) {
    float* const x_smem = smem + ring_start(plan) + stage * (plan.x_words + plan.w_words);
    float* const w_smem = x_smem + plan.x_words;
    const int step = plan.pixel_words == 1 || plan.lines ? 1 : plan.pixel_words;
#pragma unroll 1
    for (int i = plan.x_copies == Copies::kPlanes ? plan.x_words : plan.zeros + step * threadIdx.x; i < plan.x_words;
         i += step * kThreads)
      x_smem[i] = 0;
    const bool run = plan.w_copies == Copies::kRun;
    const int rows = run ? 1 : plan.w_copies == Copies::kBox ? 0 : plan.tile_m;  // a box fills them
    const int run_words = min(plan.tile_m, of.out_channels - tile.m) * terms;    // end of the last row
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * padding; i += kThreads)
      w_smem[run ? run_words + i : i / padding * plan.w_pitch + terms + i % padding] = 0;
  }
}

// Loads the window of a chunk, zeros outside the image. A warp takes a channel, or lanes run along channels.
template <int WORDS>
__device__ __forceinline__ void load_window(const Params& params, const Tile& tile, int first_channel, uint32_t to) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int h = tile.p * of.stride_h - of.pad_h, w = tile.q * of.stride_w - of.pad_w - plan.lead;
  const float* const image = params.in_ptr + tile.n * of.in_stride[0] +
                             (static_cast<int64_t>(tile.group) * of.in_channels + first_channel) * of.in_stride[1];
  const int channels = min(plan.channels, of.in_channels - first_channel);
  const int channel_step = static_cast<int>(of.in_stride[1]), row_step = static_cast<int>(of.in_stride[2]),
            column_step = static_cast<int>(of.in_stride[3]);
  const bool planes = plan.pixel_words == 1;
  const int count = planes ? plan.entries : plan.entries * plan.x_pieces;
  const int first = planes ? threadIdx.x % 32 : threadIdx.x, step = planes ? 32 : kThreads;
#pragma unroll 1
  for (int plane = planes ? threadIdx.x / 32 : 0; plane < (planes ? plan.channels : 1); plane += kWarps) {
#pragma unroll 1
    for (int i = first; i < count; i += step) {
      const int e = planes ? i : quotient(i, params.by_x_pieces);
      const int c = planes ? plane : (i - e * plan.x_pieces) * WORDS;
      const int row = quotient(e, params.by_row_entries);
      const int column = (e - row * plan.row_entries) * (planes ? WORDS : 1);
      const int in_h = h + row * plan.in_row_step, in_w = w + column * plan.in_column_step;
      const bool exists = c < channels && in_h >= 0 && in_h < of.H && in_w >= 0 && in_w < of.W;
      const float* from = exists ? image + c * channel_step + in_h * row_step + in_w * column_step : params.in_ptr;
      hopper::copy_async<4 * WORDS>(
          to + 4 * (c * plan.channel_words + row * plan.row_words + column * plan.pixel_words), from,
          exists ? 4 * WORDS : 0);
    }
  }
}

__device__ __forceinline__ void load_run(const float* from, int words, int room, uint32_t to) {
#pragma unroll 1
  for (int i = 4 * threadIdx.x; i < room; i += 4 * kThreads)
    hopper::copy_async<16>(to + 4 * i, i < words ? from + i : from, 4 * max(0, min(4, words - i)));
}

template <int WORDS>
__device__ __forceinline__ void load_rows(const Params& params, const float* rows_ptr, int rows, int channels,
                                          uint32_t to) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  int row = quotient(threadIdx.x, params.by_w_pieces), piece = threadIdx.x - row * plan.w_pieces;
#pragma unroll 1
  while (row < plan.tile_m) {
    const int i = piece * WORDS;
    // In the order of w in memory the remaining channels are one run as well.
    int left = channels * plan.taps - i, offset = i;
    if (!plan.natural) {
      const Term term = locate_term(params, i);
      const int r = of.flipped ? of.R - 1 - term.r : term.r, s = of.flipped ? of.S - 1 - term.s : term.s;
      left = channels - term.channel;
      offset = static_cast<int>(term.channel * of.w_stride_in + r * of.w_stride_r + s * of.w_stride_s);
    }
    const int words = row < rows ? max(0, min(WORDS, left)) : 0;
    const float* from = words > 0 ? rows_ptr + row * of.w_stride_out + offset : params.w_ptr;
    hopper::copy_async<4 * WORDS>(to + 4 * (row * plan.w_pitch + i), from, 4 * words);
    row += plan.w_row_step;
    piece += plan.w_piece_step;
    if (piece >= plan.w_pieces) {
      piece -= plan.w_pieces;
      ++row;
    }
  }
}

// Scatters the planes of a chunk into the window, whose border stays zero. A warp takes a plane.
__device__ __forceinline__ void place_planes(const Plan& plan, const int* places, const float* planes, float* window) {
#pragma unroll 1
  for (int c = threadIdx.x / 32; c < plan.channels; c += kWarps) {
    const float* const from = planes + c * plan.plane;
    float* const to = window + c * plan.channel_words;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < plan.plane; i += 32) {
      const int place = places[i];
      if (place >= 0) to[place] = from[i];
    }
  }
}

// The tile's first weights of this input channel.
__device__ __forceinline__ const float* weights_of(const Params& params, const Tile& tile, int first_channel) {
  const Correlation& of = params.of;
  return params.w_ptr + tile.group * of.w_stride_group + tile.m * of.w_stride_out + first_channel * of.w_stride_in;
}

// Bulk copies of a chunk, by one thread, which also announces their bytes to the mbarrier.
__device__ __forceinline__ void load_bulk(const Params& params, const Tile& tile, int first_channel, uint32_t x_smem,
                                          uint32_t barrier) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const int rows = plan.w_copies == Copies::kBox ? plan.tile_m : min(plan.tile_m, of.out_channels - tile.m);
  const int x_bytes = 4 * plan.x_bulk_words, w_bytes = 4 * plan.w_pitch * rows;
  hopper::barrier_arrive_expecting(barrier, (plan.x_bulk ? x_bytes : 0) + (plan.w_bulk ? w_bytes : 0));
  const int channel = tile.group * of.in_channels + first_channel;
  if (plan.w_bulk) {
    const uint32_t w_smem = x_smem + 4 * plan.x_words;
    const int row = tile.group * of.out_channels + tile.m;
    if (plan.w_copies == Copies::kRun)
      hopper::bulk_load(w_smem, weights_of(params, tile, first_channel), w_bytes, barrier);
    else if (plan.taps_first)
      hopper::load_box(params.w_map, w_smem, first_channel, 0, row, 0, barrier);
    else
      hopper::load_box(params.w_map, w_smem, first_channel * plan.taps, row, 0, 0, barrier);
  }
  if (!plan.x_bulk) return;
  if (plan.x_copies != Copies::kBox) {
    hopper::bulk_load(x_smem, params.in_ptr + tile.n * of.in_stride[0] + channel * of.in_stride[1], x_bytes, barrier);
    return;
  }
  const int h = tile.p * plan.box_row_step + plan.first_row, w = tile.q * plan.box_column_step + plan.first_column;
  if (plan.lines)
    hopper::load_box(params.x_map, x_smem, w, h, tile.n, 0, barrier);
  else if (plan.pixel_words == 1)
    hopper::load_box(params.x_map, x_smem, w, h, channel, tile.n, barrier);
  else
    hopper::load_box(params.x_map, x_smem, channel, w, h, tile.n, barrier);
#endif
}

// The other copies of a chunk, by all threads.
__device__ __forceinline__ void load_words(const Params& params, const Tile& tile, int first_channel, uint32_t x_smem,
                                           uint32_t barrier) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  if (!plan.w_bulk) {
    const uint32_t w_smem = x_smem + 4 * plan.x_words;
    const int channels = min(plan.channels, of.in_channels - first_channel);
    const int rows = min(plan.tile_m, of.out_channels - tile.m);
    const float* const rows_ptr = weights_of(params, tile, first_channel);
    if (plan.w_copies == Copies::kRun)
      load_run(rows_ptr, rows * plan.w_pitch, plan.tile_m * plan.w_pitch, w_smem);
    else if (plan.w_copies == Copies::kFours)
      load_rows<4>(params, rows_ptr, rows, channels, w_smem);
    else
      load_rows<1>(params, rows_ptr, rows, channels, w_smem);
  }
  if (plan.x_bulk) {
  } else if (plan.x_copies == Copies::kRun || plan.x_copies == Copies::kPlanes) {
    const int channels = min(plan.channels, of.in_channels - first_channel);
    const float* const from = params.in_ptr + tile.n * of.in_stride[0] +
                              (static_cast<int64_t>(tile.group) * of.in_channels + first_channel) * of.in_stride[1];
    const int plane = plan.x_copies == Copies::kRun ? plan.channel_words : plan.plane;
    load_run(from, channels * plane, plan.channels * plane, x_smem);
  } else if (plan.x_copies == Copies::kFours) {
    load_window<4>(params, tile, first_channel, x_smem);
  } else {
    load_window<1>(params, tile, first_channel, x_smem);
  }
  hopper::copies_arrive(barrier);
}

// Products.

// STEPS steps of 8 terms, WARPS_K steps apart.
template <typename Shape, bool EXACT, int STEPS>
__device__ __forceinline__ void multiply_steps(uint32_t x_smem, uint32_t a_smem, int pitch_8, uint32_t table,
                                               const int (&pixels)[Shape::N8], float (&acc)[Shape::M16][Shape::N8][4]) {
  constexpr int M16 = Shape::M16, APART = 32 * Shape::WARPS_K;
  uint32_t x_low[STEPS], x_high[STEPS], a[STEPS][M16][4], a_rest[STEPS][M16][4];
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    hopper::load_shared(x_low[i], table + i * APART);
    hopper::load_shared(x_high[i], table + i * APART + 16);
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        hopper::load_shared(a[i][m][j], a_smem + (2 * m + j % 2) * pitch_8 + i * APART + j / 2 * 16);
    }
  }
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    x_low[i] += x_smem;
    x_high[i] += x_smem;
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int j = 0; j < 4; ++j) split<EXACT>(a[i][m][j], a[i][m][j], a_rest[i][m][j]);
    }
  }
#pragma unroll
  for (int n = 0; n < Shape::N8; ++n) {
    uint32_t b[STEPS][2], b_rest[STEPS][2];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      hopper::load_shared(b[i][0], x_low[i] + pixels[n]);
      hopper::load_shared(b[i][1], x_high[i] + pixels[n]);
      split<EXACT>(b[i][0], b[i][0], b_rest[i][0]);
      split<EXACT>(b[i][1], b[i][1], b_rest[i][1]);
    }
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        if constexpr (EXACT) {
          float d[4] = {0, 0, 0, 0};
          multiply_add(d, a_rest[i][m], b[i]);
          multiply_add(d, a[i][m], b_rest[i]);
          multiply_add(d, a[i][m], b[i]);
#pragma unroll
          for (int j = 0; j < 4; ++j) acc[m][n][j] += d[j];
        } else {
          multiply_add(acc[m][n], a[i][m], b[i]);
        }
      }
    }
  }
}

// The steps of a chunk that belong to one warp: every WARPS_K-th one from `first` on.
template <typename Shape, bool EXACT>
__device__ __forceinline__ void multiply_chunk(const Plan& plan, int first, uint32_t x_smem, uint32_t a_smem,
                                               uint32_t table, const int (&pixels)[Shape::N8],
                                               float (&acc)[Shape::M16][Shape::N8][4]) {
  constexpr int STEPS = Shape::STEPS, APART = 32 * Shape::WARPS_K;
  const int pitch_8 = 8 * 4 * plan.w_pitch;
  a_smem += 32 * first;
  table += 32 * first;
  int steps = (plan.depth / 8 - first + Shape::WARPS_K - 1) / Shape::WARPS_K;
#pragma unroll 1
  for (; steps >= STEPS; steps -= STEPS, a_smem += APART * STEPS, table += APART * STEPS)
    multiply_steps<Shape, EXACT, STEPS>(x_smem, a_smem, pitch_8, table, pixels, acc);
  if constexpr (STEPS > 1) {
#pragma unroll 1
    for (; steps > 0; --steps, a_smem += APART, table += APART)
      multiply_steps<Shape, EXACT, 1>(x_smem, a_smem, pitch_8, table, pixels, acc);
  }
}

// Stores.

// Recomputes one output by multiply-adds, in chunks of 64 terms, where Inf or NaN occurred.
__device__ __noinline__ float exact_output(const Params& params, int64_t n, int group, int k, int p, int q) {
  const Correlation& of = params.of;
  const float* const image =
      params.in_ptr + n * of.in_stride[0] + static_cast<int64_t>(group) * of.in_channels * of.in_stride[1];
  const float* const filter = params.w_ptr + group * of.w_stride_group + k * of.w_stride_out;
  float sum = 0, chunk = 0;
  int terms = 0;
#pragma unroll 1
  for (int c = 0; c < of.in_channels; ++c) {
#pragma unroll 1
    for (int r = 0; r < of.R; ++r) {
#pragma unroll 1
      for (int s = 0; s < of.S; ++s) {
        const int h = p * of.stride_h - of.pad_h + r * of.dilation_h,
                  w = q * of.stride_w - of.pad_w + s * of.dilation_w;
        const bool exists = h >= 0 && h < of.H && w >= 0 && w < of.W;
        const int w_r = of.flipped ? of.R - 1 - r : r, w_s = of.flipped ? of.S - 1 - s : s;
        float x = exists ? image[c * of.in_stride[1] + h * of.in_stride[2] + w * of.in_stride[3]] : 0.0f;
        float weight = filter[c * of.w_stride_in + w_r * of.w_stride_r + w_s * of.w_stride_s];
        if (params.tf32) {
          x = round_to_tf32(x);
          weight = round_to_tf32(weight);
        }
        chunk = fmaf(x, weight, chunk);
        if (++terms % 64 == 0) {
          sum += chunk;
          chunk = 0;
        }
      }
    }
  }
  return sum + chunk;
}

// Stores the block's rows of a tile: sums over the staging of all blocks of the cluster, plus bias.
struct Store {
  const Params& params;
  const Tile& tile;
  const float* staging;
  float* out;
  int64_t first_channel;
  int first_row, rows, lines, columns;

  __device__ __forceinline__ Store(const Params& params, const Tile& tile, const float* all_staging, int first_row)
      : params(params), tile(tile), first_row(first_row) {
    const Correlation& of = params.of;
    const Plan& plan = params.plan;
    staging = all_staging + first_row * (plan.out_channels_last ? 1 : pixels_pitch(plan.tile_n));
    first_channel = static_cast<int64_t>(tile.group) * of.out_channels + tile.m + first_row;
    out = params.out_ptr + tile.n * of.out_stride[0] + first_channel * of.out_stride[1] + tile.p * of.out_stride[2] +
          tile.q * of.out_stride[3];
    rows = min(plan.split_rows, of.out_channels - tile.m - first_row);
    lines = min(plan.tile_p, of.P - tile.p);
    columns = min(plan.tile_q, of.Q - tile.q);
  }

  __device__ __forceinline__ float bias_of(int row) const {
    return params.bias_ptr != nullptr ? __ldg(params.bias_ptr + first_channel + row) : 0.0f;
  }
  __device__ __forceinline__ float4 sums_at(const float* at) const {
    if (params.plan.splits > 1) return hopper::add_cluster_4(hopper::smem_address(at), params.plan.splits);
    return *reinterpret_cast<const float4*>(at);
  }
  static __device__ __forceinline__ bool all_finite(const float4& sums) {
    return has_finite_bits(sums.x) && has_finite_bits(sums.y) && has_finite_bits(sums.z) && has_finite_bits(sums.w);
  }

  // Lanes run along the contiguous dimension. Recomputes outputs that are not finite.
  __device__ __forceinline__ void by_one() const {
    const Plan& plan = params.plan;
    const int bits = plan.piece_bits + (plan.out_vector == 4 ? 2 : 0);
#pragma unroll 1
    for (int i = threadIdx.x; i < plan.tile_n * plan.split_rows; i += kThreads) {
      const int slow = i >> bits, fast = i - (slow << bits);
      one(plan.out_channels_last ? fast : slow, plan.out_channels_last ? slow : fast);
    }
  }
  __device__ __forceinline__ void one(int row, int pixel) const {
    const Correlation& of = params.of;
    const Plan& plan = params.plan;
    const int line = quotient(pixel, params.by_tile_q), column = pixel - line * plan.tile_q;
    if (row >= rows || line >= lines || column >= columns) return;
    const float* const at = staging + (plan.out_channels_last ? pixel * channels_pitch(plan.tile_m) + row
                                                              : row * pixels_pitch(plan.tile_n) + pixel);
    float sum = plan.splits > 1 ? hopper::add_cluster(hopper::smem_address(at), plan.splits) : *at;
    if (!has_finite_bits(sum))
      sum = exact_output(params, tile.n, tile.group, tile.m + first_row + row, tile.p + line, tile.q + column);
    out[row * of.out_stride[1] + line * of.out_stride[2] + column * of.out_stride[3]] = sum + bias_of(row);
  }

  // A thread stores the same four pixels of several channels; their loads are independent. Returns whether all outputs
  // are finite.
  __device__ __forceinline__ bool by_four_pixels() const {
    const Correlation& of = params.of;
    const Plan& plan = params.plan;
    const int pixel = (threadIdx.x & ((1 << plan.piece_bits) - 1)) * 4;
    const int line = quotient(pixel, params.by_tile_q), column = pixel - line * plan.tile_q;
    if (line >= lines || column >= columns) return true;
    constexpr int kTogether = 4;
    const int apart = kThreads >> plan.piece_bits, together = plan.splits > 1 ? 1 : kTogether;
    const int pitch = pixels_pitch(plan.tile_n);
    bool finite = true;
    int row = threadIdx.x >> plan.piece_bits;
    const int64_t step = apart * of.out_stride[1];
    float* to = out + row * of.out_stride[1] + line * of.out_stride[2] + column * of.out_stride[3];
#pragma unroll 1
    for (; row < rows; row += together * apart, to += together * step) {
      const float* const from = staging + row * pitch + pixel;
      float4 sums[kTogether] = {sums_at(from)};
      float biases[kTogether] = {bias_of(row)};
      finite &= all_finite(sums[0]);
      if (together > 1) {
#pragma unroll
        for (int j = 1; j < kTogether; ++j) {
          const int existing = row + j * apart < rows ? j * apart : 0;
          sums[j] = *reinterpret_cast<const float4*>(from + existing * pitch);
          biases[j] = bias_of(row + existing);
          finite &= all_finite(sums[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (j >= together || row + j * apart >= rows) continue;
        const float4& sum = sums[j];
        *reinterpret_cast<float4*>(to + j * step) =
            make_float4(sum.x + biases[j], sum.y + biases[j], sum.z + biases[j], sum.w + biases[j]);
      }
    }
    return finite;
  }

  // A thread stores the same four channels of several pixels.
  __device__ __forceinline__ bool by_four_channels() const {
    const Correlation& of = params.of;
    const Plan& plan = params.plan;
    const int row = (threadIdx.x & ((1 << plan.piece_bits) - 1)) * 4;
    if (row >= rows) return true;
    const int apart = kThreads >> plan.piece_bits, end = lines * plan.tile_q;
    bool finite = true;
    const float biases[4] = {bias_of(row), bias_of(row + 1), bias_of(row + 2), bias_of(row + 3)};
#pragma unroll 2
    for (int pixel = threadIdx.x >> plan.piece_bits; pixel < end; pixel += apart) {
      const int line = quotient(pixel, params.by_tile_q), column = pixel - line * plan.tile_q;
      const float4 sums = sums_at(staging + pixel * channels_pitch(plan.tile_m) + row);
      if (column >= columns) continue;
      finite &= all_finite(sums);
      *reinterpret_cast<float4*>(out + row + line * of.out_stride[2] + column * of.out_stride[3]) =
          make_float4(sums.x + biases[0], sums.y + biases[1], sums.z + biases[2], sums.w + biases[3]);
    }
    return finite;
  }
};

// Kernel.

template <typename Shape, bool EXACT>
__global__ void __launch_bounds__(kThreads, kBlocks) mma_kernel(const __grid_constant__ Params params) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  float* const smem = reinterpret_cast<float*>(smem_bytes);
  const Plan& plan = params.plan;
  const int warp_id = hopper::uniform(threadIdx.x / 32), lane_id = threadIdx.x % 32;
  const int warp_k = warp_id / (Shape::WARPS_M * Shape::WARPS_N);
  const int warp_m = warp_id / Shape::WARPS_N % Shape::WARPS_M, warp_n = warp_id % Shape::WARPS_N;

  // Descriptors and mbarriers of the first copies come first: fetching them takes longest.
  static_assert(kMaxStages <= kWarps, "a warp for each");
  const uint32_t barriers = hopper::smem_address(smem);
  if (lane_id == 0) {
    if (plan.x_copies == Copies::kBox && warp_id == kWarps - 1) hopper::prefetch_map(params.x_map);
    if (plan.w_copies == Copies::kBox && warp_id == kWarps - 2) hopper::prefetch_map(params.w_map);
    if (warp_id < plan.stages) {
      hopper::barrier_init(barriers + 8 * warp_id, plan.arrivals);
      hopper::fence_async();
    }
  }
  const bool bulk = plan.arrivals % kThreads != 0, words = plan.arrivals >= kThreads;
  if (words) __syncthreads();  // mbarriers are initialised before threads arrive

  const int number = blockIdx.x >> plan.split_bits, rank = blockIdx.x - (number << plan.split_bits);
  const Tile tile = locate_tile(params, number);
  const int first_chunk = rank * plan.split_chunks;
  const int chunks = min(plan.split_chunks, plan.chunks - first_chunk);
  const uint32_t ring = barriers + 4 * ring_start(plan);
  const int stage_bytes = 4 * (plan.x_words + plan.w_words);
  const uint32_t window = ring + plan.stages * stage_bytes;  // for planes
  // All chunks are in flight at once if the ring has room, else all slots but the one that is read.
  const bool all_at_once = chunks <= plan.stages;
  const int ahead = all_at_once ? chunks : plan.stages - 1;

  uint32_t turn = 0;           // 2 * slot + parity
  int pixels[Shape::N8] = {};  // byte of the window at which each of this lane's outputs starts
  float acc[Shape::M16][Shape::N8][4] = {};
#pragma unroll 1
  for (int i = -1; i < chunks; ++i) {
    const int slot = static_cast<int>(turn >> 1);
    if (i >= 0) {
      hopper::barrier_wait(barriers + 8 * slot, turn & 1);
      if (!all_at_once) __syncthreads();  // nobody reads chunk i - 1 any more: its slot is refilled
    }
    // Issues the first chunks, then one for each free slot. Warps take turns in issuing bulk copies; each of the first
    // copies is issued by the warp that initialised its mbarrier.
    const int end = i < 0 ? ahead : min(i + ahead + 1, chunks);
    int load_slot = i < 0 ? 0 : (slot == 0 ? plan.stages : slot) - 1;
#pragma unroll 1
    for (int chunk = i < 0 ? 0 : i + ahead; chunk < end; ++chunk, ++load_slot) {
      const int channel = (first_chunk + chunk) * plan.channels;
      const uint32_t to = ring + load_slot * stage_bytes, barrier = barriers + 8 * load_slot;
      if (bulk && static_cast<int>(threadIdx.x) == chunk % kWarps * 32) load_bulk(params, tile, channel, to, barrier);
      if (words) load_words(params, tile, channel, to, barrier);
    }
    if (i == -1) {  // while the first chunks are in flight
#pragma unroll
      for (int n = 0; n < Shape::N8; ++n) {
        const int pixel = (warp_n * Shape::N8 + n) * 8 + lane_id / 4;
        const int line = quotient(pixel, params.by_tile_q), column = pixel - line * plan.tile_q;
        const int word = line * plan.row_step * plan.row_words + column * plan.column_step * plan.pixel_words;
        pixels[n] = line < plan.tile_p ? 4 * word : 0;
      }
      make_table(params, tile, smem);
      __syncthreads();  // mbarriers and table are complete
    }
    if (i < 0) continue;
    const uint32_t stage = ring + slot * stage_bytes;
    if (plan.x_copies == Copies::kPlanes) {
      float* const stages = smem + ring_start(plan);
      __syncthreads();  // the window has been read
      place_planes(plan, reinterpret_cast<const int*>(smem) + kTable + plan.depth,
                   stages + slot * (plan.x_words + plan.w_words), stages + plan.stages * (plan.x_words + plan.w_words));
      __syncthreads();  // the window is complete
    }
    const uint32_t a_smem =
        stage + 4 * (plan.x_words + (warp_m * Shape::M16 * 16 + lane_id / 4) * plan.w_pitch + lane_id % 4);
    // Groups of warps deal out the steps of all chunks as one sequence.
    const int first_step = (warp_k + i * (Shape::WARPS_K - plan.depth / 8 % Shape::WARPS_K)) % Shape::WARPS_K;
    multiply_chunk<Shape, EXACT>(plan, first_step, plan.x_copies == Copies::kPlanes ? window : stage, a_smem,
                                 barriers + 4 * (kTable + lane_id % 4), pixels, acc);
    turn = slot + 1 == plan.stages ? ~turn & 1 : turn + 2;
  }

  __syncthreads();  // the ring has been read: staging overlays it
  float* const staging = smem + ring_start(plan);
  const int slice_words = staging_words(plan.out_channels_last, Shape::TILE_M, Shape::TILE_N);
  float* const slice = staging + warp_k * slice_words;
  const int first_m = warp_m * Shape::M16 * 16 + lane_id / 4, first_n = warp_n * Shape::N8 * 8 + lane_id % 4 * 2;
  if (plan.out_channels_last) {
    constexpr int PITCH = channels_pitch(Shape::TILE_M);
#pragma unroll
    for (int m = 0; m < Shape::M16; ++m) {
#pragma unroll
      for (int n = 0; n < Shape::N8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          slice[(first_n + 8 * n + j % 2) * PITCH + first_m + 16 * m + j / 2 * 8] = acc[m][n][j];
      }
    }
  } else {
    constexpr int PITCH = pixels_pitch(Shape::TILE_N);
#pragma unroll
    for (int m = 0; m < Shape::M16; ++m) {
#pragma unroll
      for (int n = 0; n < Shape::N8; ++n) {
        float* const to = slice + (first_m + 16 * m) * PITCH + first_n + 8 * n;
        *reinterpret_cast<float2*>(to) = make_float2(acc[m][n][0], acc[m][n][1]);
        *reinterpret_cast<float2*>(to + 8 * PITCH) = make_float2(acc[m][n][2], acc[m][n][3]);
      }
    }
  }
  if constexpr (Shape::WARPS_K > 1) {
    __syncthreads();  // the slices of all groups of warps are complete
#pragma unroll 1
    for (int i = 4 * threadIdx.x; i < slice_words; i += 4 * kThreads) {
      float4 sum = *reinterpret_cast<const float4*>(staging + i);
#pragma unroll
      for (int k = 1; k < Shape::WARPS_K; ++k) {
        const float4 part = *reinterpret_cast<const float4*>(staging + k * slice_words + i);
        sum.x += part.x;
        sum.y += part.y;
        sum.z += part.z;
        sum.w += part.w;
      }
      *reinterpret_cast<float4*>(staging + i) = sum;
    }
  }
  if (plan.splits == 1)
    __syncthreads();  // staging is complete
  else
    hopper::cluster_sync();  // staging of all blocks is complete
  const Store store(params, tile, staging, rank * plan.split_rows);
  bool finite = plan.out_vector == 4;
  if (finite) finite = plan.out_channels_last ? store.by_four_channels() : store.by_four_pixels();
  if (__syncthreads_or(!finite)) store.by_one();
  if (plan.splits > 1) hopper::cluster_leave();  // other blocks may still read this block's staging
#endif
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// Host: plans.

struct Device {
  int sms, smem_bytes;
  bool has_clusters_and_tma;  // sm_90
  // Clusters of 1, 2, 4 and 8 blocks, one block per SM, that fit at once. 0: as many as SMs allow; -1: none fits.
  int clusters[4];
};

// Addresses of the tensors. Zero, an aligned address, stands for one that is not known yet.
struct Alignment {
  uint64_t in, w, out;
};

using Shape0 = Shape<4, 1, 2, 2, 4>;
using Shape1 = Shape<1, 2, 4, 2, 4>;
using Shape2 = Shape<1, 2, 4, 1, 8>;
using Shape3 = Shape<1, 2, 4, 2, 8>;
using Shape4 = Shape<1, 1, 8, 1, 4>;

struct ShapeSizes {
  int tile_m, tile_n, warps_k, m16, n8;
};

template <typename Shape>
constexpr ShapeSizes sizes_of() {
  return {Shape::TILE_M, Shape::TILE_N, Shape::WARPS_K, Shape::M16, Shape::N8};
}
constexpr ShapeSizes kShapes[] = {sizes_of<Shape0>(), sizes_of<Shape1>(), sizes_of<Shape2>(), sizes_of<Shape3>(),
                                  sizes_of<Shape4>()};
constexpr int kShapeCount = sizeof kShapes / sizeof kShapes[0];

// Channels of a chunk: some 40 to 128 terms for each group of warps, or all channels where they are few.
inline int chunk_channels(const Correlation& of, int warps_k) {
  const int64_t taps = static_cast<int64_t>(of.R) * of.S;
  if (of.in_channels < 8 && of.in_channels * taps <= 384) return of.in_channels;
  int channels = warps_k > 1 ? 64 : 32;
  while (channels > 1 && channels * taps > (warps_k > 1 ? 160 : 128)) channels /= 2;
  while (channels > 8 && channels >= 2 * of.in_channels) channels /= 2;
  return channels;
}

constexpr double kMmaCycles = 1.55;  // SM cycles of one 16 x 8 x 8 product (docs/lab/mma.md)
constexpr double kLoadRate = 200, kWeightsRate = 85, kWordRate = 8;  // bytes a cycle of an SM
constexpr double kConflictCycles = 0.15;  // cycles of a bank conflict; most of them are hidden
struct ShapeCycles {
  double product;  // cycles of a 16 x 8 x 8 product, relative to kMmaCycles
  double step;     // latency of a step, if a warp runs alone
};

// Constants of the estimate, in cycles of an SM at 1.75 GHz. store_rate is in bytes a cycle; placed_term is the
// cost of a term of a chunk that threads scatter from planes.
struct Constants {
  double call, block, chunk, cluster, cluster_block, large_cluster_block, store_rate, placed_term;
  ShapeCycles shapes[5];
};
// Fit for three products (docs/lab/mma.md).
constexpr Constants kThreeProducts{
    7470, 2120, 1540, 2110, 690, 960, 69, 15, {{1.07, 1}, {1.38, 32}, {1.55, 1}, {1.81, 128}, {1.32, 1}}};
// Fit for one product (docs/lab/mma.md).
constexpr Constants kOneProduct{
    11050, 970, 546, 827, 1100, 1880, 22, 12, {{1.3, 88}, {1.55, 68}, {1.83, 120}, {1.78, 114}, {2.32, 41}}};

// Ways of the bank conflict in a warp's first load of x, which reads four terms of eight pixels.
inline int bank_conflicts(const Correlation& of, const Plan& plan) {
  int words[32][32], counts[32] = {}, most = 1;  // words that lanes read from each bank
  for (int lane = 0; lane < 32; ++lane) {
    const int term = lane % 4, pixel = lane / 4, tap = plan.taps_first ? 0 : term % plan.taps;
    const int line = pixel / plan.tile_q, column = pixel % plan.tile_q;
    const int word = (plan.taps_first ? term : term / plan.taps) * plan.channel_words +
                     tap / of.S * of.dilation_h * plan.row_words + tap % of.S * of.dilation_w * plan.pixel_words +
                     line * plan.row_step * plan.row_words + column * plan.column_step * plan.pixel_words;
    int* const bank = words[word % 32];
    int& count = counts[word % 32];
    if (std::find(bank, bank + count, word) == bank + count) bank[count++] = word;
    most = std::max(most, count);
  }
  return most;
}

// With more terms full accuracy takes at least two partial sums: a sum is rounded every 8 terms, and all roundings may
// have the same sign (docs/lab/mma.md).
constexpr int kLongSum = 4608;

// Completes a plan. Returns false when it does not fit.
inline bool complete(const Correlation& of, bool tf32, const Device& device, const Alignment& address, int shape,
                     int splits, int tile_p, int tile_q, Plan& plan) {
  const ShapeSizes& sizes = kShapes[shape];
  plan = Plan{};
  plan.shape = shape;
  plan.tile_m = sizes.tile_m;
  plan.tile_n = sizes.tile_n;
  plan.warps_k = sizes.warps_k;
  const int64_t all_terms = static_cast<int64_t>(of.in_channels) * of.R * of.S;
  if (!tf32 && all_terms > kLongSum && splits * plan.warps_k == 1) return false;
  plan.tile_p = tile_p;
  plan.tile_q = tile_q;
  plan.tiles_p = static_cast<int>(ceil_div(of.P, tile_p));
  plan.tiles_q = static_cast<int>(ceil_div(of.Q, tile_q));
  plan.tiles_m = static_cast<int>(ceil_div(of.out_channels, plan.tile_m));
  const double tiles = static_cast<double>(plan.tiles_p) * plan.tiles_q * plan.tiles_m * of.groups * of.N;
  if (tiles * splits > 2147483647.0 || of.N > 2147483647) return false;
  plan.tiles = static_cast<int64_t>(tiles);

  plan.taps = of.R * of.S;
  plan.channels = chunk_channels(of, sizes.warps_k);
  plan.chunks = static_cast<int>(ceil_div(of.in_channels, plan.channels));
  plan.split_chunks = static_cast<int>(ceil_div(plan.chunks, splits));
  plan.splits = splits;
  while (1 << plan.split_bits < splits) ++plan.split_bits;
  plan.split_rows = plan.tile_m / splits;
  if (splits > 1 && (!device.has_clusters_and_tma || ceil_div(plan.chunks, plan.split_chunks) != splits)) return false;
  const int terms = plan.channels * plan.taps;
  plan.depth = round_up(terms, 8);

  // The window of x.
  const bool channels_last = of.in_stride[1] == 1 && of.in_stride[3] != 1 && plan.channels >= 4;
  const auto fours = [](int64_t stride, int64_t size) { return size == 1 || stride % 4 == 0; };
  const bool aligned_in = address.in % 16 == 0 && fours(of.in_stride[0], of.N);
  // TMA boxes over expanded tensors are untested.
  const auto moves = [](int64_t stride, int64_t size) { return size == 1 || stride > 0; };
  const bool x_boxes = device.has_clusters_and_tma && moves(of.in_stride[0], of.N) && moves(of.in_stride[2], of.H) &&
                       moves(of.in_stride[1], static_cast<int64_t>(of.in_channels) * of.groups) &&
                       moves(of.in_stride[3], of.W);
  const bool w_boxes = device.has_clusters_and_tma && of.w_stride_out > 0 && (of.S == 1 || of.w_stride_s > 0);
  const int64_t plane = static_cast<int64_t>(of.H) * of.W;
  plan.plane = static_cast<int>(std::min<int64_t>(plane, 1 << 30));
  plan.row_step = of.R == 1 ? 1 : of.stride_h;
  plan.column_step = of.S == 1 ? 1 : of.stride_w;
  plan.in_row_step = of.R == 1 ? of.stride_h : 1;
  plan.in_column_step = of.S == 1 ? of.stride_w : 1;
  const bool rows_of_fours = aligned_in && of.in_stride[3] == 1 && of.W % 4 == 0 && fours(of.in_stride[2], of.H) &&
                             fours(of.in_stride[1], static_cast<int64_t>(of.in_channels) * of.groups) &&
                             (plan.tiles_q == 1 || tile_q * of.stride_w % 4 == 0);
  if (rows_of_fours && !channels_last && device.has_clusters_and_tma) {
    plan.column_step = of.stride_w;  // a box holds all columns
    plan.in_column_step = 1;
  }
  // A chunk of small images is one run of memory; without padding the run is the window.
  const bool planes = !channels_last && of.in_stride[3] == 1 && (of.H == 1 || of.in_stride[2] == of.W) &&
                      of.in_stride[1] == plane && aligned_in && plane <= 1024 && plan.channels * plane % 4 == 0 &&
                      of.in_channels * plane % 4 == 0;
  // A part of a larger problem (dilated.cu, strided.cu) may have padding on one side alone.
  const auto inside = [](int outputs, int size, int taps, int stride, int pad, int dilation) {
    return pad == 0 && int64_t{outputs - 1} * stride + int64_t{taps - 1} * dilation < size;
  };
  const bool run = planes && plan.tiles_p == 1 && plan.tiles_q == 1 &&
                   inside(of.P, of.H, of.R, of.stride_h, of.pad_h, of.dilation_h) &&
                   inside(of.Q, of.W, of.S, of.stride_w, of.pad_w, of.dilation_w);
  if (run) {
    plan.row_step = of.stride_h;
    plan.column_step = of.stride_w;
    plan.in_row_step = plan.in_column_step = 1;
  }
  const int64_t rows =
      run ? of.H
          : static_cast<int64_t>(tile_p - 1) * plan.row_step + static_cast<int64_t>(of.R - 1) * of.dilation_h + 1;
  const int64_t columns =
      run ? of.W
          : static_cast<int64_t>(tile_q - 1) * plan.column_step + static_cast<int64_t>(of.S - 1) * of.dilation_w + 1;
  if (rows * columns > 30000) return false;
  plan.rows = static_cast<int>(rows);
  plan.columns = static_cast<int>(columns);
  const bool padded = terms != plan.depth;
  // 2 or 3 channels, channels_last: a row of the window holds all of them, padded to 16 bytes.
  const auto lead_of = [&](int words) { return static_cast<int>((-int64_t{of.pad_w} * words % 4 + 4) % 4); };
  const int64_t line_words = (columns * of.in_channels + lead_of(of.in_channels) + 3) / 4 * 4;
  const bool lines = device.has_clusters_and_tma && !run && aligned_in && of.in_channels > 1 && of.in_channels < 4 &&
                     of.groups == 1 && plan.channels == of.in_channels && of.in_stride[1] == 1 &&
                     of.in_stride[3] == of.in_channels && of.W > 1 &&
                     (plan.tiles_q == 1 || tile_q * of.stride_w * of.in_channels % 4 == 0) &&
                     moves(of.in_stride[0], of.N) && moves(of.in_stride[2], of.H) && fours(of.in_stride[2], of.H) &&
                     rows <= 256 && line_words <= 256 && plan.in_row_step == 1 && plan.in_column_step == 1;
  if (run) {
    plan.x_copies = Copies::kRun;
    plan.x_bulk = device.has_clusters_and_tma && of.in_channels % plan.channels == 0;
    plan.pixel_words = 1;
    plan.row_words = of.W;
    plan.channel_words = static_cast<int>(plane);
    plan.x_words = (plan.channels + padded) * plan.channel_words;
    plan.x_bulk_words = plan.channels * plan.channel_words;
    plan.zeros = plan.x_bulk_words;
  } else if (lines) {
    // Each row of pixels with their channels is one run of memory.
    plan.x_copies = Copies::kBox;
    plan.x_bulk = plan.lines = true;
    plan.pixel_words = of.in_channels;
    plan.channel_words = 1;
    plan.lead = lead_of(of.in_channels);
    plan.row_words = static_cast<int>(line_words);
    plan.x_bulk_words = plan.zeros = plan.rows * plan.row_words;
    plan.x_words = (1 + padded) * plan.x_bulk_words;
  } else if (channels_last) {
    const bool pieces_of_fours =
        aligned_in && of.in_channels % 4 == 0 && fours(of.in_stride[2], of.H) && fours(of.in_stride[3], of.W);
    plan.x_copies = pieces_of_fours ? Copies::kFours : Copies::kWords;
    const bool whole_steps = (plan.in_row_step == 1 || of.pad_h == 0) && (plan.in_column_step == 1 || of.pad_w == 0);
    if (pieces_of_fours && x_boxes && !padded && rows <= 256 && columns <= 256 && whole_steps) {
      plan.x_copies = Copies::kBox;
      plan.x_bulk = true;
    }
    plan.pixel_words = plan.channels + 4;  // no bank conflicts between pixels
    plan.channel_words = 1;
    plan.row_words = plan.columns * plan.pixel_words;
    plan.row_entries = plan.columns;
    plan.entries = plan.rows * plan.row_entries;
    plan.x_pieces = plan.channels / (pieces_of_fours ? 4 : 1);
    plan.x_words = plan.entries * plan.pixel_words;
    plan.x_bulk_words = plan.x_words;
    plan.zeros = plan.channels;
  } else {
    plan.pixel_words = 1;
    int width = 1;
    if (rows_of_fours && plan.in_column_step == 1) {
      // A vector of four columns is entirely inside the image or entirely outside.
      plan.x_copies = Copies::kFours;
      width = 4;
      plan.lead = lead_of(1);
      plan.columns = round_up(plan.columns + plan.lead, 4);
      if (x_boxes && rows <= 256 && plan.columns <= 256 && (plan.in_row_step == 1 || of.pad_h == 0)) {
        plan.x_copies = Copies::kBox;
        plan.x_bulk = true;
      }
    }
    // 1x1 filters: neighbouring channels lie 8 or 24 banks apart.
    if (plan.x_copies == Copies::kBox) {
      for (int more = 0; plan.taps == 1 && more <= 12 && plan.columns + more <= 256; more += 4) {
        if (plan.rows * (plan.columns + more) % 16 != 8) continue;
        plan.columns += more;
        break;
      }
    }
    plan.row_words = plan.columns;
    plan.row_entries = plan.columns / width;
    plan.entries = plan.rows * plan.row_entries;
    plan.channel_words = plan.rows * plan.columns;
    if (plan.x_copies != Copies::kBox) {
      if (plan.taps == 1) plan.channel_words = (plan.channel_words + 23) / 32 * 32 + 8;
      plan.channel_words = round_up(plan.channel_words, 4);
    }
    plan.x_words = (plan.channels + padded) * plan.channel_words;
    plan.x_bulk_words = plan.zeros = plan.channels * plan.channel_words;
    if (plan.x_copies == Copies::kWords && planes && plan.in_row_step == 1 && plan.in_column_step == 1) {
      plan.x_copies = Copies::kPlanes;
      plan.x_bulk = device.has_clusters_and_tma && of.in_channels % plan.channels == 0;
      plan.window_words = round_up(plan.x_words, 32);
      plan.x_words = plan.x_bulk_words = plan.channels * static_cast<int>(plane);
    }
  }
  plan.x_words = round_up(plan.x_words, 32);
  plan.box_row_step = plan.in_row_step == 1 ? of.stride_h : 1;
  plan.box_column_step = (plan.in_column_step == 1 ? of.stride_w : 1) * (plan.lines ? of.in_channels : 1);
  plan.first_row = plan.in_row_step == 1 ? -of.pad_h : 0;
  plan.first_column = (plan.in_column_step == 1 ? -of.pad_w : 0) * (plan.lines ? of.in_channels : 1) - plan.lead;

  // Rows of w, as in memory.
  plan.taps_first = of.w_stride_in == 1 && plan.taps > 1 && of.in_channels > 1;
  plan.natural = !plan.taps_first && !of.flipped && (of.S == 1 || of.w_stride_s == 1) &&
                 (of.R == 1 || of.w_stride_r == of.S) && (of.in_channels == 1 || of.w_stride_in == plan.taps);
  const bool aligned_w =
      address.w % 16 == 0 && fours(of.w_stride_out, of.out_channels) && fours(of.w_stride_group, of.groups);
  const bool natural_fours = plan.natural && plan.channels * plan.taps % 4 == 0;
  const bool taps_fours = plan.taps_first && plan.channels % 4 == 0 && of.in_channels % 4 == 0 &&
                          fours(of.w_stride_r, of.R) && fours(of.w_stride_s, of.S);
  const bool taps_in_order = plan.taps_first && !of.flipped && (of.S == 1 || of.w_stride_s == of.in_channels) &&
                             (of.R == 1 || of.w_stride_r == static_cast<int64_t>(of.S) * of.in_channels);
  plan.w_pitch = plan.depth + 4;  // an odd multiple of 16 bytes: no bank conflicts between rows
  if (aligned_w && (natural_fours || taps_fours)) {
    plan.w_copies = Copies::kFours;
    if (w_boxes && natural_fours && plan.w_pitch <= 256) {
      plan.w_copies = Copies::kBox;
      plan.w_bulk = true;
    }
    if (w_boxes && taps_fours && !of.flipped && (of.R == 1 || of.w_stride_r == of.S * of.w_stride_s) && !padded) {
      plan.w_copies = Copies::kBox;
      plan.w_bulk = true;
      plan.w_pitch = terms;
    }
  } else if ((plan.natural || taps_in_order) && plan.chunks == 1 && plan.channels == of.in_channels &&
             of.w_stride_out == terms && address.w % 16 == 0 && fours(of.w_stride_group, of.groups)) {
    plan.w_copies = Copies::kRun;
    plan.w_bulk = device.has_clusters_and_tma && static_cast<int64_t>(of.out_channels) * terms % 4 == 0;
    plan.w_pitch = terms;
  }
  plan.w_words = round_up(plan.tile_m * plan.w_pitch + 8, 32);
  plan.w_pieces = plan.w_copies == Copies::kFours ? terms / 4 : terms;
  plan.w_row_step = kThreads / plan.w_pieces;
  plan.w_piece_step = kThreads % plan.w_pieces;

  plan.arrivals = (plan.x_bulk || plan.w_bulk ? 1 : 0) + (plan.x_bulk && plan.w_bulk ? 0 : kThreads);

  const auto reach = [&](const int64_t (&stride)[4], int channels, int height, int width) {
    return channels * std::abs(stride[1]) + height * std::abs(stride[2]) + width * std::abs(stride[3]);
  };
  if (reach(of.in_stride, plan.channels, of.H, of.W) >= int64_t{1} << 31) return false;
  if (plan.channels * std::abs(of.w_stride_in) + of.R * std::abs(of.w_stride_r) + of.S * std::abs(of.w_stride_s) >=
      int64_t{1} << 31)
    return false;

  // Stores of y.
  plan.lines_are_run = tile_q == of.Q && (of.P == 1 || of.out_stride[2] == of.Q) && of.out_stride[3] == 1;
  const auto four_of = [&](int axis, int64_t size) { return fours(of.out_stride[axis], size); };
  const bool aligned_out = address.out % 16 == 0 && four_of(0, of.N);
  const int64_t all_channels = static_cast<int64_t>(of.out_channels) * of.groups;
  const bool by_lines = tile_q % 4 == 0 && of.Q % 4 == 0 && four_of(2, of.P);
  const bool by_runs = plan.lines_are_run && tile_p * of.Q % 4 == 0 &&
                       (plan.tiles_p == 1 ? of.P * of.Q % 4 == 0 : of.P % tile_p * of.Q % 4 == 0);
  plan.out_channels_last = of.out_stride[1] == 1 && of.out_stride[3] != 1;
  const bool out_fours =
      plan.out_channels_last
          ? of.out_channels % 4 == 0 && plan.split_rows % 4 == 0 && four_of(2, of.P) && four_of(3, of.Q)
          : of.out_stride[3] == 1 && four_of(1, all_channels) && (by_lines || by_runs);
  plan.out_vector = aligned_out && out_fours ? 4 : 1;
  const int fast = plan.out_channels_last ? plan.split_rows : plan.tile_n;
  while (plan.out_vector << plan.piece_bits < fast) ++plan.piece_bits;

  const int known = device.clusters[splits < 2 ? 0 : splits < 4 ? 1 : splits < 8 ? 2 : 3];
  if (known < 0) return false;
  const int at_once = known > 0 ? known : std::max(1, device.sms / splits);
  bool fits = false;
  for (int stages = std::min(kMaxStages, plan.split_chunks); stages >= 1 && !fits; --stages) {
    if (stages == 1 && plan.split_chunks > 1) break;
    plan.stages = stages;
    plan.smem_bytes = 4 * shared_words(plan);
    // Deep rings are used only if few blocks share an SM and all blocks run at once.
    const bool crowded = stages > 3 && (plan.tiles * splits > 2 * device.sms || (splits > 1 && plan.tiles > at_once));
    fits = plan.smem_bytes <= (crowded ? device.smem_bytes / kBlocks - 1024 : device.smem_bytes);
  }
  if (!fits) return false;

  const Constants& constants = tf32 ? kOneProduct : kThreeProducts;
  const ShapeCycles& cycles = constants.shapes[shape];
  const double chunks = plan.split_chunks;
  const double products = chunks * (plan.depth / 8) * (plan.tile_m / 16) * (plan.tile_n / 8) * (tf32 ? 1 : 3);
  const double multiply = products * kMmaCycles * cycles.product;
  const double steps = chunks * ceil_div(plan.depth / 8, plan.warps_k) * cycles.step;
  // Conflicts of all loads of x; loads without conflicts are part of a step's cycles.
  const double conflicts = kWarps * chunks * ceil_div(plan.depth / 8, plan.warps_k) * 2.0 * kShapes[shape].n8 *
                           (bank_conflicts(of, plan) - 1);
  const double words = plan.x_words + plan.w_words;
  const double load = chunks * (4 * words / kLoadRate + 4.0 * plan.tile_m * plan.depth / kWeightsRate +
                                (plan.x_copies == Copies::kPlanes ? constants.placed_term * plan.depth : 0) +
                                (plan.x_copies == Copies::kWords ? 4 * plan.x_words / kWordRate : 0) +
                                (plan.w_copies == Copies::kWords ? 4 * plan.w_words / kWordRate : 0));
  const double store =
      4.0 * plan.tile_m * plan.tile_n / splits / constants.store_rate * (plan.out_vector == 4 ? 1 : 2.5);
  const double cluster = splits == 1 ? 0 : splits < 8 ? constants.cluster_block : constants.large_cluster_block;
  const int resident = std::max(1, std::min(kBlocks, device.smem_bytes / (plan.smem_bytes + 1024)));
  // Tiles of one SM. If clusters do not all find SMs of their own, some SMs have two blocks at once.
  const double share = static_cast<double>(plan.tiles) / at_once;
  const double blocks = splits > 1 && resident > 1 ? std::max(1.0, share) : std::ceil(share);
  plan.cycles = constants.call + (splits > 1 ? constants.cluster : 0) +
                blocks * (constants.block + multiply + kConflictCycles * conflicts + load + store + cluster) +
                std::ceil(blocks / resident) * (steps + chunks * constants.chunk);
  return true;
}

inline bool make_plan(const Correlation& of, bool tf32, const Device& device, const Alignment& address, Plan& best,
                      int forced_shape = -1, int forced_splits = 0) {
  bool found = false;
  for (int shape = 0; shape < kShapeCount; ++shape) {
    if (forced_shape >= 0 && shape != forced_shape) continue;
    const int pixels = kShapes[shape].tile_n;
    // Tiles are whole rows of outputs, or equal parts of a row.
    const int parts = static_cast<int>(ceil_div(of.Q, pixels));
    const int part = std::min(pixels, round_up(static_cast<int>(ceil_div(of.Q, parts)), 4));
    for (int tile_q : {of.Q, part, pixels - 8, 128, 64, 32, 16}) {
      if (tile_q > pixels || (tile_q > of.Q && tile_q != part)) continue;
      const int most = std::min(of.P, pixels / tile_q);
      const int even = static_cast<int>(ceil_div(of.P, ceil_div(of.P, most)));
      for (int tile_p : {even, most}) {
        for (int splits = 1; splits <= kMaxSplits; splits *= 2) {
          if (forced_splits > 0 && splits != forced_splits) continue;
          Plan plan;
          if (!complete(of, tf32, device, address, shape, splits, tile_p, tile_q, plan)) continue;
          if (found && plan.cycles >= best.cycles) continue;
          best = plan;
          found = true;
        }
        if (most == even) break;
      }
    }
  }
  return found;
}

// Null, or the reason why this engine cannot compute the problem, by its sizes alone.
inline const char* refusal_of_problem(const Problem& problem, Operator op) {
  if (op != Operator::kFprop && op != Operator::kDgrad) return "it computes outputs and input gradients only";
  if (problem.dtype != DType::kFloat32) return "it has float32 only";
  if (op == Operator::kDgrad && has_stride(problem)) return "it takes input gradients with stride 1 only";
  if (problem.groups > 1 && (problem.C / problem.groups < 8 || problem.K / problem.groups < 8))
    return "it takes groups of at least 8 channels only";
  return nullptr;
}

// Fills in the device; returns its compute capability, times 10, or 0 without a GPU.
inline int current_device(Device& device) {
  const int capability = find_gpu(device.sms);
  device.smem_bytes = current_gpu().smem_bytes;
  device.has_clusters_and_tma = capability / 10 == 9;
  return capability;
}

// Asks how many clusters fit at once, each block on its own SM: GPCs differ in their number of SMs, and a cluster stays
// within one GPC.
inline void find_clusters(Device& device) {
#if defined(__CUDACC__)
  if (!device.has_clusters_and_tma) return;
  const auto kernel = mma_kernel<Shape0, false>;
  cudaError_t error = allow_all_shared_memory(kernel);
  for (int bits = 1; bits < 4 && error == cudaSuccess; ++bits) {
    const hopper::ClusterLaunch launch(device.sms << bits, 1 << bits, kThreads, device.smem_bytes, nullptr);
    int found = 0;
    error = cudaOccupancyMaxActiveClusters(&found, kernel, &launch.config);
    if (error == cudaSuccess) device.clusters[bits] = found > 0 ? found : -1;
  }
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());  // the next launch must not report it
#else
  static_cast<void>(device);
#endif
}

struct Planned {
  Correlation of;
  Plan plan;
  bool found;
};

inline const Planned& plan_of(const Problem& problem, Operator op, const Alignment& address) {
  thread_local Memo<Planned> memo;
  Device device{};
  const int gpu = current_device(device);
  return memo.get(key_of(problem, op, address.in, address.w, address.out, gpu, device.sms), [&] {
    Planned planned{};
    find_clusters(device);
    planned.of = correlation_of_problem(problem, op);
    flatten_points(planned.of);
    planned.found = make_plan(planned.of, uses_tf32(problem, op), device, address, planned.plan);
    return planned;
  });
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (const char* reason = refusal_of_problem(problem, op)) return reason;
  Device device{};
  if (current_device(device) < 80) return "it needs an Ampere GPU or a later one (compute capability 8.0)";
  // Addresses are not known yet: only that of x decides how x arrives, and aligned rows of w take no more room.
  if (!plan_of(problem, op, Alignment{0, 4, 4}).found || !plan_of(problem, op, Alignment{4, 4, 4}).found)
    return "a tile with its halo does not fit into shared memory";
  return nullptr;
}

inline double cycles(const Problem& problem, Operator op) { return plan_of(problem, op, Alignment{}).plan.cycles; }

// direct is faster from this many multiply-adds on, and from this many tap applications over all outputs, with up to
// four output channels: a tile here has at least 16. In channels_last this engine keeps filters of up to
// kFewTapsOfPixels taps over at least kSomeChannelsOfPixels channels (docs/lab/mma.md).
constexpr double kLeastOfFewChannels = 1 << 26, kLeastTapsOfFewChannels = 1 << 21;
constexpr int kFewTapsOfPixels = 9, kSomeChannelsOfPixels = 32;

inline const char* yields(const Problem& problem, Operator op) {
  if (direct_has_points(problem, op)) return "direct is faster with 1x1 filters to few channels, as it reads x once";
  const int channels = problem.C / problem.groups, filters = problem.K / problem.groups;
  const int out_channels = op == Operator::kDgrad ? channels : filters;
  const double taps = multiply_adds(problem) / channels / filters;  // tap applications over all outputs
  if (direct_has_stem_dgrad(problem, op) && multiply_adds(problem) >= kLeastOfFewChannels)
    return "direct is faster with gradients to few channels";
  const int64_t (&in_stride)[4] = op == Operator::kDgrad ? problem.y_stride : problem.x_stride;
  const bool pixels = in_stride[1] == 1 && in_stride[3] > 1;  // channels are neighbours in memory
  const int in_channels = op == Operator::kDgrad ? filters : channels;
  if (pixels && problem.R * problem.S <= kFewTapsOfPixels && in_channels >= kSomeChannelsOfPixels) return nullptr;
  if (out_channels <= 4 && multiply_adds(problem) >= kLeastOfFewChannels && taps >= kLeastTapsOfFewChannels)
    return "direct is faster with few output channels";
  return nullptr;
}

inline int64_t workspace_bytes(const Problem&, Operator, const Pointers&) { return 0; }

inline void set_divisors(Params& params) {
  const Plan& plan = params.plan;
  params.by_tiles_m = make_divisor(plan.tiles_m);
  params.by_tiles_q = make_divisor(plan.tiles_q);
  params.by_tiles_p = make_divisor(plan.tiles_p);
  params.by_images = make_divisor(params.of.N);
  params.by_taps = make_divisor(plan.taps);
  params.by_channels = make_divisor(plan.channels);
  params.by_s = make_divisor(params.of.S);
  params.by_tile_q = make_divisor(plan.tile_q);
  params.by_row_entries = make_divisor(std::max(1, plan.row_entries));
  params.by_x_pieces = make_divisor(std::max(1, plan.x_pieces));
  params.by_w_pieces = make_divisor(plan.w_pieces);
  params.by_width = make_divisor(params.of.W);
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

template <typename Shape, bool EXACT>
cudaError_t run_kernel(const Params& params, cudaStream_t stream) {
  constexpr Instance kInstance{"mma_kernel",
                               {Shape::WARPS_K, Shape::WARPS_M, Shape::WARPS_N, Shape::M16, Shape::N8, EXACT}};
  record(kInstance);
  if constexpr (!is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    const auto kernel = mma_kernel<Shape, EXACT>;
    const Plan& plan = params.plan;
    const cudaError_t error = allow_all_shared_memory(kernel);
    if (error != cudaSuccess) return error;
    const unsigned blocks = static_cast<unsigned>(plan.tiles * plan.splits);
#if defined(__CUDACC__)
    if (plan.splits > 1) {
      const hopper::ClusterLaunch launch(blocks, plan.splits, kThreads, plan.smem_bytes, stream);
      return cudaLaunchKernelEx(&launch.config, kernel, params);
    }
#endif
    kernel<<<blocks, kThreads, plan.smem_bytes, stream>>>(params);
    return cudaGetLastError();
  }
}

// TMA descriptors: x as [n][channel][row][column] or [n][row][column][channel], every in_row_step-th row of it; w as
// rows of terms or as [output channel][tap][channel].
inline cudaError_t make_maps(Params& params) {
  const Correlation& of = params.of;
  const Plan& plan = params.plan;
  const auto bytes = [](int64_t stride, int64_t size) { return static_cast<uint64_t>(size > 1 ? 4 * stride : 16); };
  const auto make = [](const float* tensor, const uint64_t (&sizes)[4], const uint64_t (&strides)[3],
                       const uint32_t (&box)[4], hopper::BoxMap& map) {
    return hopper::make_box_map(hopper::BoxUse::kLoad, const_cast<float*>(tensor), 4, sizes, strides, box, map);
  };
  if (plan.x_copies == Copies::kBox) {
    const uint64_t height = ceil_div(of.H, plan.in_row_step), width = ceil_div(of.W, plan.in_column_step);
    const uint64_t channels = static_cast<uint64_t>(of.groups) * of.in_channels, images = of.N;
    const uint64_t row = bytes(of.in_stride[2] * plan.in_row_step, height), image = bytes(of.in_stride[0], of.N);
    const uint32_t columns = plan.columns, rows = plan.rows;
    cudaError_t error;
    if (plan.lines)
      error = make(params.in_ptr, {width * channels, height, images, 1}, {row, image, 16},
                   {static_cast<uint32_t>(plan.row_words), rows, 1, 1}, params.x_map);
    else if (plan.pixel_words == 1)
      error = make(params.in_ptr, {width, height, channels, images}, {row, bytes(of.in_stride[1], channels), image},
                   {columns, rows, static_cast<uint32_t>(plan.channels), 1}, params.x_map);
    else
      error = make(params.in_ptr, {channels, width, height, images},
                   {bytes(of.in_stride[3] * plan.in_column_step, width), row, image},
                   {static_cast<uint32_t>(plan.pixel_words), columns, rows, 1}, params.x_map);
    if (error != cudaSuccess) return error;
  }
  if (plan.w_copies != Copies::kBox) return cudaSuccess;
  const uint64_t rows = static_cast<uint64_t>(of.groups) * of.out_channels, out = bytes(of.w_stride_out, rows);
  const uint64_t taps = plan.taps, in_channels = of.in_channels;
  const uint32_t tile_m = plan.tile_m;
  if (plan.taps_first)
    return make(params.w_ptr, {in_channels, taps, rows, 1}, {bytes(of.w_stride_s, taps), out, 16},
                {static_cast<uint32_t>(plan.channels), static_cast<uint32_t>(plan.taps), tile_m, 1}, params.w_map);
  return make(params.w_ptr, {taps * in_channels, rows, 1, 1}, {out, 16, 16},
              {static_cast<uint32_t>(plan.w_pitch), tile_m, 1, 1}, params.w_map);
}

template <bool EXACT>
cudaError_t run(Params& params, cudaStream_t stream) {
  const Plan& plan = params.plan;
  const cudaError_t error = make_maps(params);
  if (error != cudaSuccess) return error;
  set_divisors(params);
  switch (plan.shape) {
    case 0:
      return run_kernel<Shape0, EXACT>(params, stream);
    case 1:
      return run_kernel<Shape1, EXACT>(params, stream);
    case 2:
      return run_kernel<Shape2, EXACT>(params, stream);
    case 3:
      return run_kernel<Shape3, EXACT>(params, stream);
    default:
      return run_kernel<Shape4, EXACT>(params, stream);
  }
}

inline cudaError_t launch(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  Params params{};
  params.in_ptr = static_cast<const float*>(op == Operator::kDgrad ? pointers.dy : pointers.x);
  params.w_ptr = static_cast<const float*>(pointers.w);
  params.bias_ptr = static_cast<const float*>(op == Operator::kDgrad ? nullptr : pointers.bias);
  params.out_ptr = static_cast<float*>(pointers.out);
  params.tf32 = uses_tf32(problem, op);
  const Alignment address{reinterpret_cast<uint64_t>(params.in_ptr), reinterpret_cast<uint64_t>(params.w_ptr),
                          reinterpret_cast<uint64_t>(params.out_ptr)};
  const Planned& planned = plan_of(problem, op, address);
  if (!planned.found) return cudaErrorInvalidConfiguration;
  params.of = planned.of;
  params.plan = planned.plan;
  return params.tf32 ? run<false>(params, stream) : run<true>(params, stream);
}

#endif  // launchers

inline const char* name_of(Copies copies) {
  const char* const names[] = {"single values", "fours", "runs", "boxes", "planes"};
  return names[static_cast<int>(copies)];
}

inline void describe(const Problem& problem, Operator op, char* text, size_t text_size) {
  const Plan& plan = plan_of(problem, op, Alignment{}).plan;
  snprintf(text, text_size,
           "%s, tile of %d channels x %d x %d pixels, %d stages of %d channels, %d bytes of shared memory, x by %s, "
           "weights by %s, y by %s, %lld tiles for %d blocks each, about %.3g Mcycles",
           uses_tf32(problem, op) ? "one product" : "three products of parts", plan.tile_m, plan.tile_p, plan.tile_q,
           plan.stages, plan.channels, plan.smem_bytes, plan.lines ? "lines" : name_of(plan.x_copies),
           name_of(plan.w_copies), plan.out_vector == 4 ? "fours" : "single values", static_cast<long long>(plan.tiles),
           plan.splits, plan.cycles * 1e-6);
}

#endif  // host

}  // namespace mma

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
extern const Engine kMmaEngine{"mma",         mma::refusal, mma::workspace_bytes, mma::launch,
                               mma::describe, mma::yields,  mma::cycles};
#endif

}  // namespace modelnew
