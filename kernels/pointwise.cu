// pointwise engine: 1x1 filters over few pixels, fp32 tensors, on the tensor cores of any GPU since Ampere. What counts
// there is the time from the start of the kernel to its first product: one launch, no workspace, little code, and
// operands on their way before anything else is done. Deterministic: one sum an output, in one order.
//
// y is a matrix whose rows and columns are output channels and pixels (of all images, in their order), so that columns
// are neighbours in memory; the reduction runs over input channels:
//
//   y of [channel][pixel]        rows = channels, columns = pixels        a = w, b = x
//   y of [pixel][channel]        rows = pixels, columns = channels        a = x, b = w
//
// A warp has 32 rows x 32 columns. In pointwise_kernel, of 14 to 25 KB, operands go from memory to registers without a
// stop: a warp takes 16 terms of the reduction at a time, as two steps of mma.sync. Which term is which of the
// instruction's 8 is free, as long as both operands agree, and so is which column is which. Hence the lane that holds
// terms t and t + 4 of rows n and n + 8 holds four neighbours instead, and loads them by 16 bytes:
//
//   lane = 4 n + t     a: row n, terms 4t .. 4t+3                         first step: 4t, 4t+1; second: 4t+2, 4t+3
//                      b: terms 4t .. 4t+3, columns 4n .. 4n+3            column n of the instruction's tile j: 4n+j
//                      b in channels_last: columns 4n+j, terms 4t .. 4t+3
//
// A load of b therefore takes 128 bytes of each of four planes, a load of a 64 bytes of each of eight filters; and a
// lane ends up with eight neighbours of every row of y.
//
// Warps of a block share the reduction (slices), where it is long blocks of a cluster do, too (sm_90). Their sums meet
// in shared memory and are added up in order:
//
//   memory --16 bytes a lane--> registers --> mma.sync --> sums of a slice [row][column] --> added up --> memory
//
// Full fp32 accuracy takes three products, and what is not finite is computed again by multiply-adds, as in mma.cu.
//
// In staged_kernel blocks stage what they multiply instead: 32 or 64 rows and 64 columns, of all terms, in four stages
// whose copies are ordered at once. A warp waits for nothing but the next stage, and no sums meet. More bytes are under
// way than registers could hold, and a tile reads less. It takes one product and planes of 64, 128 or (large ones) 256
// channels whose pixels are one line, by fours at multiples of 16 bytes:
//
//   memory --16 bytes--> four stages --ldmatrix, single words--> registers --> mma.sync --> registers --> memory
//
// Bound by latency: launch, first loads, and an L2 that delivers operands at a limited rate to each SM, hence what a
// tile reads counts. Measurements: docs/lab/pointwise.md.
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "device.cuh"
#include "engines.cuh"
#endif

#include "async_copy.cuh"
#include "cluster.cuh"
#include "correlation.cuh"
#include "divisor.cuh"
#include "numerics.cuh"
#include "problem.cuh"
#include "ptx.cuh"
#include "tf32.cuh"

namespace modelnew {
namespace pointwise {

// ---- Geometry, host and device ----

constexpr int kSide = 32;   // rows and columns of a warp
constexpr int kTerms = 16;  // of the reduction, at a time
// Warps of a block: three products take more registers than 16 of them have.
MODELNEW_HOST_DEVICE constexpr int most_warps(bool exact) { return exact ? 8 : 16; }
constexpr int kMostRowBits = 2, kMostSplitBits = 3;
// Blocks that stage their operands: so many stages of 16, 32 or 64 terms; 64 columns, two warps wide, and one or two
// warps high.
constexpr int kStages = 4, kStagedColumns = 2 * kSide, kMostStagedRowBits = 1;
MODELNEW_HOST_DEVICE constexpr int staged_threads(int row_bits) { return 64 << row_bits; }
// Longer sums in full accuracy, in steps, are split into so many partial sums at least: a sum is rounded every 8 terms,
// and all roundings may have the same sign (docs/lab/mma.md).
constexpr int kLongSteps = 128, kLeastLongSums = 4;
constexpr int kPitch = kSide + 4;  // of sums in shared memory: stores and loads of 16 bytes meet all banks

// How operands come.
enum class Loads : int {
  kFours,         // by fours: terms of w, pixels of x
  kStrided,       // w by fours, x by single values
  kChannelsLast,  // by fours of terms
  kSingle         // by single values
};

struct Plan {
  Loads loads;
  bool pixel_rows;    // rows are pixels, columns channels
  int rows, columns;  // of y
  int row_bits;       // of a power of two, warps of a block below each other
  int slices;         // and one behind the other in the reduction
  int block_columns;  // of y
  int stage_terms;    // 0: it does not stage
  int split_bits;     // of a power of two, blocks of a cluster
  int slice_steps;    // of 16 terms
  int row_tiles, column_tiles;
  int out_vector;  // outputs that are stored at a time: 4 or 1
  double cycles;   // estimate
};

struct Params {
  const float *x_ptr, *w_ptr, *bias_ptr;
  float* out_ptr;
  Plan plan;
  int channels;  // terms of the reduction
  // Steps in elements; of pixels, between neighbouring outputs.
  int x_image, x_channel, x_row, x_column;
  int y_image, y_channel, y_row, y_column;
  int w_out, w_in;
  Divisor by_plane, by_width, by_row_tiles;
};

MODELNEW_HOST_DEVICE inline int block_rows(const Plan& plan) { return kSide << plan.row_bits; }
MODELNEW_HOST_DEVICE inline int splits_of(const Plan& plan) { return 1 << plan.split_bits; }
// Words from row to row of a stage. All banks are met by loads of eight rows of terms, 16 bytes each, and of four rows
// of columns, eight words each.
MODELNEW_HOST_DEVICE constexpr int terms_pitch(int terms) { return terms + 4; }
constexpr int kColumnsPitch = kStagedColumns + 8;
MODELNEW_HOST_DEVICE constexpr int stage_words(int rows, int terms) {
  return rows * terms_pitch(terms) + terms * kColumnsPitch;
}
MODELNEW_HOST_DEVICE inline int shared_bytes(const Plan& plan) {
  if (plan.stage_terms > 0)
    return kStages * stage_words(block_rows(plan), plan.stage_terms) * static_cast<int>(sizeof(float));
  return plan.slices * block_rows(plan) * kPitch * static_cast<int>(sizeof(float));
}

// Where a pixel, numbered through all images, lies in x and in y.
struct Place {
  int x, y;
};

MODELNEW_HOST_DEVICE inline Place place_of_pixel(const Params& params, int pixel) {
  const int image = quotient(pixel, params.by_plane),
            in_plane = pixel - image * static_cast<int>(params.by_plane.divisor);
  const int row = quotient(in_plane, params.by_width),
            column = in_plane - row * static_cast<int>(params.by_width.divisor);
  return {image * params.x_image + row * params.x_row + column * params.x_column,
          image * params.y_image + row * params.y_row + column * params.y_column};
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// ---- Device code ----

// Fragments of 16 terms: of a, four neighbouring terms of four rows, eight apart; of b, [term][column].
struct Operands {
  float a[4][4], b[4][4];
};

// Offsets of a lane's loads, in bytes from the start of a tensor to its rows and columns, at the first of its terms.
template <Loads LOADS>
struct Sources {
  uint32_t a[4], b[LOADS == Loads::kFours ? 1 : 4];

  static __device__ __forceinline__ const float* at(const float* tensor, uint32_t bytes) {
    return reinterpret_cast<const float*>(reinterpret_cast<const char*>(tensor) + bytes);
  }

  // AHEAD: of that term. `left`: terms from there on; of all but kSingle they are multiples of 16.
  template <int AHEAD>
  __device__ __forceinline__ void load(const Params& params, int left, Operands& operands) const {
    const auto four = [](const float* from, float (&values)[4]) {
      const float4 loaded = __ldg(reinterpret_cast<const float4*>(from));
      values[0] = loaded.x;
      values[1] = loaded.y;
      values[2] = loaded.z;
      values[3] = loaded.w;
    };
    constexpr bool kPixelRows = LOADS == Loads::kChannelsLast;
    const float* const a_ptr = kPixelRows ? params.x_ptr : params.w_ptr;
    const float* const b_ptr = kPixelRows ? params.w_ptr : params.x_ptr;
    const uint32_t of_x = 4u * params.x_channel, of_w = 4u * params.w_in;
    if constexpr (LOADS != Loads::kSingle) {
#pragma unroll
      for (int i = 0; i < 4; ++i) four(at(a_ptr, a[i] + 4 * AHEAD), operands.a[i]);
    }
    if constexpr (LOADS == Loads::kChannelsLast) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float terms[4];
        four(at(b_ptr, b[j] + 4 * AHEAD), terms);
#pragma unroll
        for (int i = 0; i < 4; ++i) operands.b[i][j] = terms[i];
      }
    } else if constexpr (LOADS == Loads::kFours) {
#pragma unroll
      for (int i = 0; i < 4; ++i) four(at(b_ptr, b[0] + (AHEAD + i) * of_x), operands.b[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool exists = LOADS == Loads::kStrided || AHEAD + i < left;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          operands.b[i][j] = exists ? __ldg(at(b_ptr, b[j] + (AHEAD + i) * of_x)) : 0.0f;
          if constexpr (LOADS == Loads::kSingle)
            operands.a[j][i] = exists ? __ldg(at(a_ptr, a[j] + (AHEAD + i) * of_w)) : 0.0f;
        }
      }
    }
  }

  __device__ __forceinline__ void advance(const Params& params, int terms) {
    const uint32_t along_w = 4u * terms * (LOADS == Loads::kSingle ? params.w_in : 1);
    const uint32_t along_x = 4u * terms * (LOADS == Loads::kChannelsLast ? 1 : params.x_channel);
#pragma unroll
    for (uint32_t& row : a) row += along_w;
#pragma unroll
    for (uint32_t& column : b) column += along_x;
    // The compiler would work all of them out again for each load.
#pragma unroll
    for (uint32_t& row : a) asm volatile("" : "+r"(row));
#pragma unroll
    for (uint32_t& column : b) asm volatile("" : "+r"(column));
  }
};

// Accumulators of a warp: rows 16m and 16m + 8, columns of tile j.
using Sums = float[2][4][4];

template <bool EXACT>
__device__ __forceinline__ void multiply(const Operands& operands, Sums& acc) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    uint32_t a[2][4], a_rest[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        split<EXACT>(float_bits(operands.a[2 * m + i % 2][2 * step + i / 2]), a[m][i], a_rest[m][i]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t b[2], b_rest[2];
      split<EXACT>(float_bits(operands.b[2 * step][j]), b[0], b_rest[0]);
      split<EXACT>(float_bits(operands.b[2 * step + 1][j]), b[1], b_rest[1]);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if constexpr (EXACT) {
          // The tensor core truncates: 8 terms at a time.
          float d[4] = {0, 0, 0, 0};
          multiply_add(d, a_rest[m], b);
          multiply_add(d, a[m], b_rest);
          multiply_add(d, a[m], b);
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[m][j][e] += d[e];
        } else {
          multiply_add(acc[m][j], a[m], b);
        }
      }
    }
  }
}

// One output by multiply-adds, in chunks of 64: for Inf and NaN.
__device__ __noinline__ float exact_output(const Params& params, int channel, int pixel) {
  const float* x = params.x_ptr + place_of_pixel(params, pixel).x;
  const float* w = params.w_ptr + channel * params.w_out;
  float sum = 0, chunk = 0;
#pragma unroll 1
  for (int c = 0; c < params.channels; ++c) {
    chunk = fmaf(*x, *w, chunk);
    x += params.x_channel;
    w += params.w_in;
    if (c % 64 == 63) {
      sum += chunk;
      chunk = 0;
    }
  }
  return sum + chunk;
}

// Sums of a channel and a pixel, and of three neighbours to the right, that are not finite.
template <bool PIXEL_ROWS>
__device__ __forceinline__ void repair(const Params& params, int row, int column, float (&sums)[4]) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) finite = finite && has_finite_bits(sums[i]);
  if (finite) return;
#pragma unroll 1
  for (int i = 0; i < 4 && column + i < params.plan.columns; ++i) {
    float sum = sums[0];
#pragma unroll
    for (int j = 1; j < 4; ++j) sum = i == j ? sums[j] : sum;
    if (!has_finite_bits(sum))
      sum = PIXEL_ROWS ? exact_output(params, column + i, row) : exact_output(params, row, column + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[j] = i == j ? sum : sums[j];
  }
}

template <Loads LOADS, bool EXACT>
__global__ void __launch_bounds__(32 * most_warps(EXACT), 1) pointwise_kernel(const __grid_constant__ Params params) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) unsigned char modelnew_pointwise_smem[];
  float* const smem = reinterpret_cast<float*>(modelnew_pointwise_smem);
  const Plan& plan = params.plan;
  const int warp_id = hopper::uniform(threadIdx.x / 32), lane_id = threadIdx.x % 32;
  const int n = lane_id / 4, t = lane_id % 4;
  const int slice = warp_id >> plan.row_bits, row_warp = warp_id - (slice << plan.row_bits);

  // Tiles of the same columns are neighbours, and the blocks that share one are a cluster.
  const int splits = splits_of(plan), number = blockIdx.x >> plan.split_bits, rank = blockIdx.x - number * splits;
  const int column_tile = quotient(number, params.by_row_tiles), row_tile = number - column_tile * plan.row_tiles;
  const int first_row = row_tile * block_rows(plan), first_column = column_tile * kSide;

  constexpr bool kPixelRows = LOADS == Loads::kChannelsLast;
  constexpr bool kNeighbours = LOADS == Loads::kFours || LOADS == Loads::kChannelsLast;  // columns of a lane
  const int steps = (params.channels + kTerms - 1) / kTerms;
  const int begin = min((rank * plan.slices + slice) * plan.slice_steps, steps);
  const int end = min(begin + plan.slice_steps, steps), first_term = begin * kTerms + 4 * t;
  Sources<LOADS> sources;
  // Rows and columns beyond the last read those of the last one; they are not stored.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = min(first_row + row_warp * kSide + 8 * i + n, plan.rows - 1);
    sources.a[i] = 4u * (kPixelRows ? place_of_pixel(params, row).x : row * params.w_out);
  }
#pragma unroll
  for (int j = 0; j < (LOADS == Loads::kFours ? 1 : 4); ++j) {
    const int column = first_column + (kNeighbours ? 4 * n + j : 8 * j + n);
    // All four pixels of a lane exist, or none.
    const int last = plan.columns - (LOADS == Loads::kFours ? 4 : 1), existing = min(column, last);
    sources.b[j] = 4u * (kPixelRows ? existing * params.w_out : place_of_pixel(params, existing).x);
  }
  sources.advance(params, first_term);

  // This thread stores four neighbours in every rows_apart-th row from this one on.
  const int own_row = threadIdx.x / (kSide / 4), rows_apart = blockDim.x / (kSide / 4);
  const int column = first_column + threadIdx.x % (kSide / 4) * 4;
  int column_offset = 0;

  Sums acc = {};
  // Operands are multiplied one step after their load; the loop is unrolled twice, so that no registers are moved.
  Operands first, second;
  int left = params.channels - first_term;  // terms, from this lane's first one on
#pragma unroll 1
  for (int step = begin - 1; step < end; step += 2) {
    if (step + 1 < end) sources.template load<0>(params, left, second);
    if (step >= begin)
      multiply<EXACT>(first, acc);
    else  // while the first operands come
      column_offset = kPixelRows ? column : place_of_pixel(params, column).y;
    if (step + 1 >= end) break;
    if (step + 2 < end) sources.template load<kTerms>(params, left, first);
    multiply<EXACT>(second, acc);
    sources.advance(params, 2 * kTerms);
    left -= 2 * kTerms;
  }

  float* const staged = smem + (slice * block_rows(plan) + row_warp * kSide + n) * kPitch;
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // rows, 8 apart
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const sums = &acc[i / 2][0][i % 2 * 2 + half];
      float* const to = staged + 8 * i * kPitch;
      if constexpr (kNeighbours) {
        *reinterpret_cast<float4*>(to + 8 * t + 4 * half) = make_float4(sums[0], sums[4], sums[8], sums[12]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) to[8 * j + 2 * t + half] = sums[4 * j];
      }
    }
  }
  __syncthreads();  // sums of all slices

  const int slice_words = block_rows(plan) * kPitch;
  float* const own = smem + threadIdx.x % (kSide / 4) * 4;
  const auto add_slices = [&](const float* from) {
    float4 sum = *reinterpret_cast<const float4*>(from);
    const auto add = [&](const float4& part) {
      sum.x += part.x;
      sum.y += part.y;
      sum.z += part.z;
      sum.w += part.w;
    };
    if (plan.slices == 2) add(*reinterpret_cast<const float4*>(from + slice_words));
#pragma unroll 1
    for (int i = 4; i <= plan.slices; i += 4, from += 4 * slice_words) {
      float4 parts[4];
#pragma unroll
      for (int j = 1; j < 4; ++j) parts[j] = *reinterpret_cast<const float4*>(from + j * slice_words);
      if (i < plan.slices) parts[0] = *reinterpret_cast<const float4*>(from + 4 * slice_words);
#pragma unroll
      for (int j = 1; j < 4; ++j) add(parts[j]);
      if (i < plan.slices) add(parts[0]);
    }
    return sum;
  };
  int row = own_row, end_row = min(block_rows(plan), plan.rows - first_row);
  if (splits > 1) {
#pragma unroll 1
    for (; row < end_row; row += rows_apart)
      *reinterpret_cast<float4*>(own + row * kPitch) = add_slices(own + row * kPitch);
    hopper::cluster_sync();  // all blocks have added up
    const int share = block_rows(plan) >> plan.split_bits;
    row = own_row + rank * share;
    end_row = min(end_row, (rank + 1) * share);
  }
  const bool stores = column < plan.columns;
#pragma unroll 1
  for (; row < end_row && stores; row += rows_apart) {
    const float* const from = own + row * kPitch;
    const float4 sum = splits > 1 ? hopper::add_cluster_4(hopper::smem_address(from), splits) : add_slices(from);
    float values[4] = {sum.x, sum.y, sum.z, sum.w};
    if constexpr (EXACT) repair<kPixelRows>(params, first_row + row, column, values);
    if (params.bias_ptr != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        values[i] += __ldg(params.bias_ptr + (kPixelRows ? min(column + i, plan.columns - 1) : first_row + row));
    }
    float* const to = params.out_ptr +
                      (kPixelRows ? place_of_pixel(params, first_row + row).y : (first_row + row) * params.y_channel) +
                      column_offset;
    if (plan.out_vector == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column + i >= plan.columns) break;
        to[kPixelRows || i == 0 ? i : place_of_pixel(params, column + i).y - column_offset] = values[i];
      }
    }
  }
  if (splits > 1) hopper::cluster_leave();  // nobody reads this block's sums any more
#endif
}

// ---- Device code of blocks that stage ----

struct StagedParams {
  const float *x_ptr, *w_ptr, *bias_ptr;
  float* out_ptr;
  int rows, columns;  // of y
  // Steps in elements; pixels of a plane are neighbours.
  int x_image, x_channel, y_image, y_channel, w_out;
  Divisor by_plane;
};

// A stage of shared memory: a[row][term], b[term][column].
template <int ROW_BITS, int TERMS_>
struct Stage {
  static constexpr int ROW_WARPS = 1 << ROW_BITS, ROWS = kSide << ROW_BITS, TERMS = TERMS_;
  static constexpr int THREADS = staged_threads(ROW_BITS), PITCH = terms_pitch(TERMS);
  static constexpr uint32_t B_BYTES = 4 * ROWS * PITCH, BYTES = 4 * stage_words(ROWS, TERMS);
};

// Multiplies a stage. `a_from` is where the lane's rows begin, `b_from` its columns.
template <typename Stage>
__device__ __forceinline__ void multiply_stage(uint32_t a_from, uint32_t b_from, Sums& acc) {
#pragma unroll
  for (int step = 0; step < Stage::TERMS / 8; ++step) {
    uint32_t a[2][4], b[4][2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      hopper::load_matrix(a[m], a_from + 4 * (16 * m * Stage::PITCH + 8 * step));
#pragma unroll
      for (uint32_t& value : a[m]) value = tf32_operand(value);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        hopper::load_shared(b[j][i], b_from + 4 * ((8 * step + 4 * i) * kColumnsPitch + 8 * j));
        b[j][i] = tf32_operand(b[j][i]);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int m = 0; m < 2; ++m) multiply_add(acc[m][j], a[m], b[j]);
    }
  }
}

template <int ROW_BITS, int TERMS>
__global__ void __launch_bounds__(staged_threads(ROW_BITS))
    staged_kernel(const __grid_constant__ StagedParams params) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  using Shape = Stage<ROW_BITS, TERMS>;
  extern __shared__ __align__(16) unsigned char modelnew_pointwise_smem[];
  const uint32_t smem = hopper::smem_address(modelnew_pointwise_smem);
  const int warp_id = hopper::uniform(threadIdx.x / 32), lane_id = threadIdx.x % 32;
  const int n = lane_id / 4, t = lane_id % 4;
  const int row_warp = warp_id % Shape::ROW_WARPS, column_warp = warp_id / Shape::ROW_WARPS;
  const int first_row = blockIdx.x * Shape::ROWS, first_column = blockIdx.y * kStagedColumns;
  const auto pixel_offset = [&](int pixel, int of_image) {
    const int image = quotient(pixel, params.by_plane);
    return image * of_image + pixel - image * static_cast<int>(params.by_plane.divisor);
  };

  // This thread copies 16 bytes of every A_APART-th row of a and of every B_APART-th term of b. Rows and columns beyond
  // the last read those of the last one and are not stored. Four pixels all exist, or none.
  constexpr int A_PIECES = TERMS / 4, A_APART = Shape::THREADS / A_PIECES, A_COPIES = Shape::ROWS / A_APART;
  constexpr int B_PIECES = kStagedColumns / 4, B_APART = Shape::THREADS / B_PIECES, B_COPIES = TERMS / B_APART;
  static_assert(A_COPIES * A_APART == Shape::ROWS && B_COPIES * B_APART == TERMS, "all copy as much");
  const int a_row = threadIdx.x / A_PIECES, a_term = threadIdx.x % A_PIECES * 4;
  const int b_term = threadIdx.x / B_PIECES, b_column = threadIdx.x % B_PIECES * 4;
  const uint32_t a_to = smem + 4 * (a_row * Shape::PITCH + a_term);
  const uint32_t b_to = smem + Shape::B_BYTES + 4 * (b_term * kColumnsPitch + b_column);
  const int pixel = min(first_column + b_column, params.columns - 4);
  const float* const b = params.x_ptr + (pixel_offset(pixel, params.x_image) + b_term * params.x_channel);
  const float* a[A_COPIES];
#pragma unroll
  for (int i = 0; i < A_COPIES; ++i)
    a[i] = params.w_ptr + (min(first_row + a_row + i * A_APART, params.rows - 1) * params.w_out + a_term);
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
#pragma unroll
    for (int i = 0; i < B_COPIES; ++i)
      hopper::copy_async<16>(b_to + stage * Shape::BYTES + 4 * i * B_APART * kColumnsPitch,
                             b + (stage * TERMS + i * B_APART) * params.x_channel, 16);
#pragma unroll
    for (int i = 0; i < A_COPIES; ++i)
      hopper::copy_async<16>(a_to + stage * Shape::BYTES + 4 * i * A_APART * Shape::PITCH, a[i] + stage * TERMS, 16);
    hopper::copies_commit();
  }

  // While they come: what this lane stores, pairs of columns in rows 8 apart.
  const int row = first_row + row_warp * kSide + n, column = first_column + column_warp * kSide + 2 * t;
  float* to[4];
  float bias[4] = {0, 0, 0, 0};
#pragma unroll
  for (int j = 0; j < 4; ++j)
    to[j] = params.out_ptr + (pixel_offset(min(column + 8 * j, params.columns - 2), params.y_image) +
                              min(row, params.rows - 1) * params.y_channel);
  if (params.bias_ptr != nullptr) {
#pragma unroll
    for (int i = 0; i < 4; ++i) bias[i] = __ldg(params.bias_ptr + min(row + 8 * i, params.rows - 1));
  }

  const uint32_t a_from = smem + 4 * ((row_warp * kSide + lane_id % 16) * Shape::PITCH + lane_id / 16 * 4);
  const uint32_t b_from = smem + Shape::B_BYTES + 4 * (t * kColumnsPitch + column_warp * kSide + n);
  Sums acc = {};
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    hopper::copies_wait<kStages - 1>();
    __syncthreads();          // what all threads have copied
    hopper::copies_commit();  // nothing, so that as many are pending each time
    multiply_stage<Shape>(a_from + stage * Shape::BYTES, b_from + stage * Shape::BYTES, acc);
  }

#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + 8 * i >= params.rows || column + 8 * j >= params.columns) continue;  // both of a pair exist, or none
      const float* const sums = &acc[i / 2][j][i % 2 * 2];
      *reinterpret_cast<float2*>(to[j] + 8 * i * params.y_channel) = make_float2(sums[0] + bias[i], sums[1] + bias[i]);
    }
  }
#endif
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// ---- Host: what to compute, and how to cut it up ----

struct Device {
  int sms;
  bool has_clusters;  // sm_90
  int shared_bytes;  // of a block
};

// Addresses of the tensors; zeros, before they are known, stand for aligned ones.
struct Alignment {
  uint64_t x, w, y;
};

// Tiles of y, for blocks of these rows and columns.
inline void cut(Plan& plan) {
  plan.row_tiles = static_cast<int>(ceil_div(plan.rows, block_rows(plan)));
  plan.column_tiles = static_cast<int>(ceil_div(plan.columns, plan.block_columns));
}

// Constants of the estimate, in cycles of an SM at 1.75 GHz, fitted for the kernel that does not stage
// (docs/lab/pointwise.md).
constexpr double kCallCycles = 9400, kWaveCycles = 5000;  // of a first and of every other wave of blocks
constexpr double kStepCycles = 500, kWarpCycles = 62;     // 16 terms of a warp, and for each of the SM's warps
constexpr double kExactCycles = 50, kStridedCycles = 45;  // more for each of these
constexpr double kClusterCycles = 1500, kClusterBlockCycles = 315;
// The share of SMs that clusters get: some SMs have too few neighbours in their GPC (docs/lab/pointwise.md).
constexpr double kClusterShare = 0.88;

// Constants for blocks that stage (docs/lab/pointwise.md).
constexpr double kStagedCallCycles = 6800, kStagedWaveCycles = 1200, kStagedTermCycles = 6.3;
constexpr double kStagedByteCycles = 0.019;  // of all stages of an SM; less than they take to come, as other terms grow
constexpr double kReadCycles = 0.0017, kWrittenCycles = 0.0027;  // for each value of x that is read, of y written
// Pixels of a plane from which blocks stage: below 256 channels, and with 256 (docs/lab/pointwise.md).
constexpr int kLeastStagedPixels = 784, kLeastPixelsOfLongStages = 2048;
constexpr int kMostColumnTiles = 65535;  // blocks are a grid of two dimensions

inline bool complete(const Device& device, bool exact, int channels, int row_bits, int split_bits, int slices,
                     Plan& plan) {
  const int steps = static_cast<int>(ceil_div(channels, kTerms));
  plan.row_bits = row_bits;
  plan.block_columns = kSide;
  plan.split_bits = split_bits;
  plan.stage_terms = 0;
  const int splits = splits_of(plan);
  plan.slices = slices;
  if (slices << row_bits > most_warps(exact) || (slices > 1 && slices * splits >= 2 * steps)) return false;
  plan.slice_steps = static_cast<int>(ceil_div(steps, plan.slices * splits));
  if (exact && plan.slice_steps > kLongSteps && slices * splits < kLeastLongSums) return false;
  cut(plan);
  const int64_t blocks = static_cast<int64_t>(plan.row_tiles) * plan.column_tiles * splits;
  const int warps = slices << row_bits;
  const int at_once = static_cast<int>(device.sms * (most_warps(exact) / warps) * (splits > 1 ? kClusterShare : 1));
  const double of_sm = static_cast<double>(ceil_div(blocks, device.sms));
  const bool strided = plan.loads == Loads::kStrided || plan.loads == Loads::kSingle;
  plan.cycles =
      kCallCycles + (ceil_div(blocks, at_once) - 1) * kWaveCycles + plan.slice_steps * kStepCycles +
      of_sm * warps * plan.slice_steps * (kWarpCycles + (exact ? kExactCycles : 0) + (strided ? kStridedCycles : 0)) +
      (splits > 1 ? kClusterCycles + of_sm * kClusterBlockCycles : 0);
  return true;
}

// The same for blocks that stage, of so many rows.
inline bool complete_staged(const Device& device, bool exact, const Correlation& of, int row_bits, Plan& plan) {
  const bool fours = plan.loads == Loads::kFours && plan.out_vector == 4;
  if (exact || !fours) return false;
  if (of.P != 1) return false;  // planes, of y as well, are one line each
  const int terms = of.in_channels / kStages;
  if (of.in_channels % kStages != 0 || (terms != 16 && terms != 32 && terms != 64)) return false;
  plan.row_bits = row_bits;
  plan.split_bits = 0;
  plan.slices = 1;
  plan.slice_steps = of.in_channels / kTerms;
  plan.block_columns = kStagedColumns;
  plan.stage_terms = terms;
  cut(plan);
  const int smem_bytes = shared_bytes(plan);
  if (smem_bytes > device.shared_bytes || plan.column_tiles > kMostColumnTiles) return false;
  const int64_t blocks = static_cast<int64_t>(plan.row_tiles) * plan.column_tiles;
  const int64_t at_once = int64_t{device.sms} * ((device.shared_bytes + 1024) / (smem_bytes + 1024));  // 1 KB is CUDA's
  plan.cycles = kStagedCallCycles + (ceil_div(blocks, at_once) - 1) * kStagedWaveCycles +
                of.in_channels * kStagedTermCycles +
                static_cast<double>(ceil_div(blocks, device.sms)) * smem_bytes * kStagedByteCycles +
                static_cast<double>(plan.columns) * (of.in_channels * kReadCycles + plan.rows * kWrittenCycles);
  return true;
}

// Null, or why not. Without a GPU: the sizes alone decide.
inline const char* refusal_of_problem(const Problem& problem, Operator op) {
  if (op != Operator::kFprop) return "it computes outputs only";
  if (problem.dtype != DType::kFloat32) return "it has float32 only";
  if (problem.R != 1 || problem.S != 1) return "it takes 1x1 filters only";
  if (problem.groups != 1) return "it takes one group only";
  if (problem.pad_h != 0 || problem.pad_w != 0) return "it takes no padding";
  const auto reach = [](const int64_t (&stride)[4], int64_t n, int64_t c, int64_t h, int64_t w) {
    return (n - 1) * std::abs(stride[0]) + (c - 1) * std::abs(stride[1]) + (h - 1) * std::abs(stride[2]) +
           (w - 1) * std::abs(stride[3]);
  };
  const int64_t most = int64_t{1} << 30;  // offsets in bytes are 32-bit numbers
  if (reach(problem.x_stride, problem.N, problem.C, problem.H, problem.W) >= most ||
      reach(problem.y_stride, problem.N, problem.K, problem.P, problem.Q) >= most ||
      reach(problem.w_stride, problem.K, problem.C, 1, 1) >= most || problem.N * problem.P * problem.Q >= most ||
      problem.K >= most)
    return "it takes tensors of fewer than 2^30 elements";
  return nullptr;
}

// Forced: whether blocks stage, even small planes, bits of rows, and of blocks that do not bits of splits and slices.
inline bool make_plan(const Correlation& of, bool exact, const Device& device, const Alignment& address, Plan& best,
                      int forced_staged = -1, int forced_row_bits = -1, int forced_split_bits = -1,
                      int forced_slices = 0) {
  const int pixels = static_cast<int>(of.N * of.P * of.Q);
  const auto fours = [](int64_t stride, int64_t size) { return stride % 4 == 0 || size == 1; };
  const bool dense = of.in_stride[3] == 1 && of.stride_w == 1;
  const bool w_fours = of.w_stride_in == 1 && of.in_channels % kTerms == 0 && fours(of.w_stride_out, of.out_channels) &&
                       address.w % 16 == 0;
  const bool x_channels = of.in_stride[1] == 1 && of.in_channels % kTerms == 0 && fours(of.in_stride[0], of.N) &&
                          fours(of.in_stride[2], of.H) && fours(of.in_stride[3], of.W) && address.x % 16 == 0;
  const bool x_fours = dense && of.Q % 4 == 0 && fours(of.in_stride[0], of.N) &&
                       fours(of.in_stride[1], of.in_channels) && fours(int64_t{of.stride_h} * of.in_stride[2], of.P) &&
                       address.x % 16 == 0;
  Plan plan{};
  plan.pixel_rows = w_fours && x_channels && of.out_stride[1] == 1 && of.in_channels > 1 && of.out_channels > 1;
  plan.loads = plan.pixel_rows      ? Loads::kChannelsLast
               : w_fours && x_fours ? Loads::kFours
               : w_fours            ? Loads::kStrided
                                    : Loads::kSingle;
  plan.rows = plan.pixel_rows ? pixels : of.out_channels;
  plan.columns = plan.pixel_rows ? of.out_channels : pixels;
  const bool aligned_out = address.y % 16 == 0 && fours(of.out_stride[0], of.N) && fours(of.out_stride[2], of.P);
  const bool out_fours = plan.pixel_rows
                             ? of.out_channels % 4 == 0 && fours(of.out_stride[3], of.Q)
                             : of.out_stride[3] == 1 && of.Q % 4 == 0 && fours(of.out_stride[1], of.out_channels);
  plan.out_vector = aligned_out && out_fours ? 4 : 1;
  bool found = false;
  const auto take_if_better = [&] {
    if (found && plan.cycles >= best.cycles) return;
    best = plan;
    found = true;
  };
  const int least_pixels = of.in_channels < kStages * 64 ? kLeastStagedPixels : kLeastPixelsOfLongStages;
  const bool stages = forced_staged < 0 ? of.Q >= least_pixels : forced_staged > 0;
  for (int row_bits = 0; row_bits <= kMostStagedRowBits && stages; ++row_bits) {
    if (forced_row_bits >= 0 && row_bits != forced_row_bits) continue;
    if (complete_staged(device, exact, of, row_bits, plan)) take_if_better();
  }
  if (forced_staged > 0) return found;
  for (int row_bits = 0; row_bits <= kMostRowBits; ++row_bits) {
    if (forced_row_bits >= 0 && row_bits != forced_row_bits) continue;
    for (int split_bits = 0; split_bits <= kMostSplitBits; ++split_bits) {
      if (forced_split_bits >= 0 ? split_bits != forced_split_bits : split_bits > 0 && !device.has_clusters) continue;
      for (int slices = 1; slices <= most_warps(exact); slices *= 2) {
        if (forced_slices > 0 && slices != forced_slices) continue;
        if (complete(device, exact, of.in_channels, row_bits, split_bits, slices, plan)) take_if_better();
      }
    }
  }
  return found;
}

// Compute capability, times 10.
inline int current_device(Device& device) {
  const int capability = find_gpu(device.sms);
  device.has_clusters = capability / 10 == 9;
  device.shared_bytes = current_gpu().smem_bytes;
  return capability;
}

inline Correlation flattened(const Problem& problem) {
  Correlation of = correlation_of_problem(problem, Operator::kFprop);
  flatten_points(of);
  return of;
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (const char* reason = refusal_of_problem(problem, op)) return reason;
  Device device{};
  if (current_device(device) < 80) return "it needs an Ampere GPU or a later one (compute capability 8.0)";
  return nullptr;
}

inline double cycles(const Problem& problem, Operator op) {
  Device device{};
  current_device(device);
  Plan plan{};
  make_plan(flattened(problem), !uses_tf32(problem, op), device, Alignment{}, plan);
  return plan.cycles;
}

// Multiply-adds from which mma may be faster (docs/lab/pointwise.md).
constexpr double kLeastForMma = int64_t{1} << 31;
// The same in full accuracy and channels_last, with kManyTerms channels or more.
constexpr double kLeastOfManyForMma = int64_t{1} << 34;
constexpr int kManyTerms = 512;
// In full accuracy and channels_last with at most kFewTerms channels, mma is faster from here on.
constexpr double kLeastOfFewTerms = 1 << 26;
constexpr int kFewTerms = 2 * kTerms;

inline const char* yields(const Problem& problem, Operator op) {
  if (direct_has_points(problem, op)) return "direct is faster with 1x1 filters to few channels, as it reads x once";
  const bool exact_pixels = problem.x_stride[1] == 1 && problem.x_stride[3] > 1 && !uses_tf32(problem, op);
  const bool many = exact_pixels && problem.C >= kManyTerms && problem.C % kTerms == 0;
  if (multiply_adds(problem) >= (many ? kLeastOfManyForMma : kLeastForMma))
    return "mma may be faster with many multiply-adds";
  if (exact_pixels && problem.C <= kFewTerms && multiply_adds(problem) >= kLeastOfFewTerms)
    return "mma is faster with few channels of many pixels";
  return nullptr;
}

inline int64_t workspace_bytes(const Problem&, Operator, const Pointers&) { return 0; }

inline Params make_params(const Correlation& of, const Plan& plan) {
  Params params{};
  params.plan = plan;
  params.channels = of.in_channels;
  params.x_image = static_cast<int>(of.in_stride[0]);
  params.x_channel = static_cast<int>(of.in_stride[1]);
  params.x_row = static_cast<int>(of.in_stride[2]) * of.stride_h;
  params.x_column = static_cast<int>(of.in_stride[3]) * of.stride_w;
  params.y_image = static_cast<int>(of.out_stride[0]);
  params.y_channel = static_cast<int>(of.out_stride[1]);
  params.y_row = static_cast<int>(of.out_stride[2]);
  params.y_column = static_cast<int>(of.out_stride[3]);
  params.w_out = static_cast<int>(of.w_stride_out);
  params.w_in = static_cast<int>(of.w_stride_in);
  params.by_plane = make_divisor(static_cast<int64_t>(of.P) * of.Q);
  params.by_width = make_divisor(of.Q);
  params.by_row_tiles = make_divisor(plan.row_tiles);
  return params;
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

template <Loads LOADS, bool EXACT>
cudaError_t run_kernel(const Params& params, cudaStream_t stream) {
  constexpr Instance kInstance{"pointwise_kernel", {static_cast<int>(LOADS), EXACT}};
  record(kInstance);
  if constexpr (!is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    const auto kernel = pointwise_kernel<LOADS, EXACT>;
    const Plan& plan = params.plan;
    const int smem_bytes = shared_bytes(plan), threads = 32 * plan.slices << plan.row_bits;
    if (smem_bytes > 48 << 10) {
      const cudaError_t error = allow_all_shared_memory(kernel);
      if (error != cudaSuccess) return error;
    }
    const unsigned blocks = static_cast<unsigned>(plan.row_tiles) * plan.column_tiles * splits_of(plan);
#if defined(__CUDACC__)
    if (plan.split_bits > 0) {
      const hopper::ClusterLaunch launch(blocks, splits_of(plan), threads, smem_bytes, stream);
      return cudaLaunchKernelEx(&launch.config, kernel, params);
    }
#endif
    kernel<<<blocks, threads, smem_bytes, stream>>>(params);
    return cudaGetLastError();
  }
}

template <int ROW_BITS, int TERMS>
cudaError_t run_staged_kernel(const Params& all, cudaStream_t stream) {
  constexpr Instance kInstance{"staged_kernel", {ROW_BITS, TERMS}};
  record(kInstance);
  if constexpr (!is_built(kInstance)) {
    return cudaErrorInvalidConfiguration;
  } else {
    const auto kernel = staged_kernel<ROW_BITS, TERMS>;
    const Plan& plan = all.plan;
    const int smem_bytes = shared_bytes(plan);
    const cudaError_t error = allow_all_shared_memory(kernel);
    if (error != cudaSuccess) return error;
    const StagedParams params{all.x_ptr,   all.w_ptr,     all.bias_ptr, all.out_ptr,   plan.rows, plan.columns,
                              all.x_image, all.x_channel, all.y_image,  all.y_channel, all.w_out, all.by_plane};
    const dim3 blocks(plan.row_tiles, plan.column_tiles);
    kernel<<<blocks, staged_threads(ROW_BITS), smem_bytes, stream>>>(params);
    return cudaGetLastError();
  }
}

template <int ROW_BITS>
cudaError_t run_staged(const Params& params, cudaStream_t stream) {
  switch (params.plan.stage_terms) {
    case 16:
      return run_staged_kernel<ROW_BITS, 16>(params, stream);
    case 32:
      return run_staged_kernel<ROW_BITS, 32>(params, stream);
    default:
      return run_staged_kernel<ROW_BITS, 64>(params, stream);
  }
}

template <bool EXACT>
cudaError_t run(const Params& params, cudaStream_t stream) {
  if (params.plan.stage_terms > 0)
    return params.plan.row_bits == 0 ? run_staged<0>(params, stream) : run_staged<1>(params, stream);
  switch (params.plan.loads) {
    case Loads::kFours:
      return run_kernel<Loads::kFours, EXACT>(params, stream);
    case Loads::kStrided:
      return run_kernel<Loads::kStrided, EXACT>(params, stream);
    case Loads::kChannelsLast:
      return run_kernel<Loads::kChannelsLast, EXACT>(params, stream);
    default:
      return run_kernel<Loads::kSingle, EXACT>(params, stream);
  }
}

inline cudaError_t launch(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  Device device{};
  current_device(device);
  const Correlation of = flattened(problem);
  const Alignment address{reinterpret_cast<uint64_t>(pointers.x), reinterpret_cast<uint64_t>(pointers.w),
                          reinterpret_cast<uint64_t>(pointers.out)};
  Plan plan;
  make_plan(of, !uses_tf32(problem, op), device, address, plan);
  Params params = make_params(of, plan);
  params.x_ptr = static_cast<const float*>(pointers.x);
  params.w_ptr = static_cast<const float*>(pointers.w);
  params.bias_ptr = static_cast<const float*>(pointers.bias);
  params.out_ptr = static_cast<float*>(pointers.out);
  return uses_tf32(problem, op) ? run<false>(params, stream) : run<true>(params, stream);
}

#endif  // launchers

inline void describe(const Problem& problem, Operator op, char* text, size_t text_size) {
  Device device{};
  current_device(device);
  Plan plan;
  make_plan(flattened(problem), !uses_tf32(problem, op), device, Alignment{}, plan);
  const char* const loads[] = {"fours", "fours of weights", "fours of channels", "single values"};
  snprintf(text, text_size,
           "%s, tile of %d %s x %d %s, by %s%s, y by %s, %d tiles for %d blocks of %d slices each, about %.3g Mcycles",
           uses_tf32(problem, op) ? "one product" : "three products of parts", block_rows(plan),
           plan.pixel_rows ? "pixels" : "channels", plan.block_columns, plan.pixel_rows ? "channels" : "pixels",
           loads[static_cast<int>(plan.loads)], plan.stage_terms > 0 ? " in stages" : "",
           plan.out_vector == 4 ? "fours" : "single values",
           plan.row_tiles * plan.column_tiles, splits_of(plan), plan.slices, plan.cycles * 1e-6);
}

#endif  // host

}  // namespace pointwise

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
extern const Engine kPointwiseEngine{"pointwise",       pointwise::refusal,  pointwise::workspace_bytes,
                                     pointwise::launch, pointwise::describe, pointwise::yields, pointwise::cycles};
#endif

}  // namespace modelnew
