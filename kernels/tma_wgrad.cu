// tma_wgrad engine: the weight gradient on Hopper's tensor cores (wgmma). The Tensor Memory Accelerator (TMA) brings
// both operands to shared memory; no thread touches x or dy there. One group; 16 bits in channels_last, to which those
// in NCHW are copied first, unless filters are 1x1; fp32 in copies in scaled fp16 (contained_copy.cuh), of one part
// under the TF32 contract, else of two. Deterministic: sums are added in a fixed order.
//
//   dw[k, r, s, c] = sum over pixels (n, p, q) of dy[n, p, q, k] * x[n, p*stride_h - pad_h + r*dilation_h, .., c]
//
//   planes_copy.cu          x or dy in NCHW -> channels_last, where needed
//   tma_wgrad_kernel        sums over a part of the pixels -> workspace, in fp32; or -> dw, where there is one part
//   weight_sums_kernel      sums of all parts -> dw (weight_sums.cuh)
//
// fp32: tma_wgrad_sample_kernel finds scales, tma_wgrad_contain_kernel makes the copies. Values that do not fit are
// zeros there; their products are added to the sums, by each part its share. With too many the kernel ends at once, and
// hopper_wgrad, whose kernels are launched in any case, computes dw, unless `done` tells it that all is.
//
// GEMM: rows = output channels, columns = (r, s, block of 64 input channels, channel), reduction = pixels. A stage
// holds 64 pixels: for dy, and for each block of columns of x, 64 rows of 128 bytes (up to 64 channels) in TMA's
// 128-byte swizzle. TMA's im2col mode finds the pixels that a tap reads. wgmma reads both operands transposed.
//
//            64 channels of dy           64 channels of one tap     64 of another one ..
//   pixel    k k k k k k k k             c c c c c c c c            c c c c c c c c
//   pixel    k k k k k k k k             c c c c c c c c            c c c c c c c c
//   ..       (64 pixels, 8 KB)           (8 KB)                     up to 4 of them
//
// In full accuracy a stage holds values as two parts, and at most two blocks of columns of either:
//
//   | dy, first parts | x, first parts | dy, rests | x, rests |
//
// NCHW planes that 1x1 filters read whole come as they are, 64 pixels of 64 channels: rows are channels then, and
// wgmma reads both operands as they lie.
//
// One persistent block per SM, 12 warps:
//
//   warps 0-7   multiply. Tiles of 128 output channels: each of two warpgroups has 64 of them. Tiles of 64: the
//               warpgroups take stages by turns, and each one leaves sums of its own
//   warp 8      one thread issues the loads
//
//   dy --TMA--> +----------------+
//               | ring of stages | --> wgmma --> registers --> sums of a part
//   x  --TMA--> +----------------+     full, empty: one mbarrier each per stage
//
// A sum is split after a number of pixels (most_chained), because the tensor core truncates when it adds. In full
// accuracy, stages hold both parts of values, and the tensor core adds products of first parts within a stage only.
//
// Bound by the largest of multiplying, loading stages from the L2 cache and reading memory, as the estimate has it; no
// profile tells them apart. Measurements: docs/lab/tma.md.
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstdio>
#include <type_traits>

#include "device.cuh"
#include "engines.cuh"
#include "memo.cuh"
#endif

#include "channels_last.cuh"
#include "columns.cuh"
#include "contained_copy.cuh"
#include "divisor.cuh"
#include "im2col_map.cuh"
#include "numerics.cuh"
#include "problem.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "tensor_map.cuh"
#include "weight_sums.cuh"
#include "wgmma.cuh"
#include "wgmma_forms.cuh"

namespace modelnew {
namespace tma_wgrad {

// ---- Geometry, host and device ----

constexpr int kStagePixels = 64, kBlockChannels = 64;
constexpr int kBlockBytes = kStagePixels * hopper::kBoxRowBytes;  // 64 channels of all pixels of a stage
constexpr int kMultiplyingThreads = 256, kThreads = 384;
static_assert(kThreads == kMultiplyingThreads + 128, "setmaxnreg applies to whole warpgroups");
constexpr int kMultiplyingRegisters = 232, kOrderingRegisters = 40;  // per thread, from 168 at launch
static_assert(2 * kMultiplyingRegisters + kOrderingRegisters <= 3 * 168, "no more registers than the block has");
constexpr int kSharedBytes = 232448;
constexpr int kMostStages = 8, kMostBlocks = 4;  // kMostBlocks: blocks of columns of a tile
constexpr int kMostSplitBlocks = 2;              // in two parts, which take three sets of sums
constexpr int kBarrierBytes = 2 * kMostStages * 8, kOrderBytes = 2 * kMostListed;
constexpr int64_t kMostSumBytes = int64_t{1} << 30;

struct Plan {
  bool copies_x, copies_dy;
  bool planes;     // NCHW, in place
  int fp16_parts;  // of scaled fp16 that hold a value of fp32, in copies; 0: 16-bit tensors
  int channels;    // of a tile: 128, or 64 of which warpgroups have sums of their own
  int blocks;      // of columns of a tile
  int blocks_c;    // of all input channels
  int x_channels, dy_channels;  // of a box: 64, or fewer where there are no more, as boxes beyond a tensor are slow
  int tiles_k, tiles_e, parts;
  int steps;  // stages of all pixels; in planes, each image begins with a stage
  int stages, stage_bytes;
  int jobs;  // tiles times parts
  int grid;
  int smem_bytes;
  double cycles;
};

// How operands lie in memory: as [pixel][channel], or as planes; kSplit: as two copies, of first parts and of rests.
enum class Form { kPixels, kPlanes, kSplit };

struct Params {
  Plan plan;
  int P, Q, S, taps;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  float* sums_ptr;  // [part][output channel][column], whole tiles
  void* dw_ptr;     // stored to without a detour where it is not null
  int K, C;
  int64_t w_stride[4];
  Divisor by_tiles, by_tiles_k, by_image, by_row, by_blocks_c, by_s;  // by_image: pixels, or stages of planes
  hopper::BoxMap x_map[2], dy_map[2];  // of each part of values
  // For fp32: the lists of what does not fit into the copies of x and dy, the copy of x, and dy itself.
  contained::Guard guard[2];
  int H, W, channels[2];  // the latter: of a pixel of a copy
  int64_t rests[2];       // as ContainBoth has it
  const Half* x_copy;
  const float* dy_ptr;
  int64_t dy_stride[4];
  int* done;  // set to 1 here, or 0: dw is still to be computed
};

struct SampleBoth {
  contained::SampleParams of[2];
};

struct ContainBoth {
  contained::CopyParams copy[2];
  contained::Guard guard[2];
  int vector[2];
  int64_t rests[2];  // from a value's first part to its rest
};

// Parts of sums that a part of the pixels has.
MODELNEW_HOST_DEVICE inline int sums_of_part(const Plan& plan) { return plan.channels == 64 ? 2 : 1; }

MODELNEW_HOST_DEVICE inline int64_t row_columns(const Plan& plan) {
  return static_cast<int64_t>(plan.tiles_e) * plan.blocks * kBlockChannels;
}

struct Job {
  int tile_k, tile_e, part, first_step, last_step;
};

// Bytes of a stage that hold one part of values: of dy, then of x.
template <int CHANNELS, int BLOCKS>
constexpr int kPartBytes = (CHANNELS / 64 + BLOCKS) * kBlockBytes;

// Neighbouring blocks have tiles of the same pixels, which the L2 cache then serves.
MODELNEW_HOST_DEVICE inline Job locate_job(const Params& params, int number) {
  const Plan& plan = params.plan;
  const int part = quotient(number, params.by_tiles), tile = number - part * plan.tiles_k * plan.tiles_e;
  const int tile_e = quotient(tile, params.by_tiles_k);
  return {tile - tile_e * plan.tiles_k, tile_e, part,
          static_cast<int>(static_cast<int64_t>(part) * plan.steps / plan.parts),
          static_cast<int>(static_cast<int64_t>(part + 1) * plan.steps / plan.parts)};
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// ---- Device code ----

// Barriers lie behind the stages, and behind these what is listed, in order.
struct Shared {
  uint32_t base, barriers;

  __device__ __forceinline__ explicit Shared(const Plan& plan, uint32_t smem)
      : base(smem), barriers(smem + plan.stages * plan.stage_bytes) {}
  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barriers + 8 * (kMostStages + stage); }
};

template <int CHANNELS, int BLOCKS, Form FORM>
__device__ __forceinline__ void order_boxes(const Params& params, const Shared& shared) {
  constexpr bool PLANES = FORM == Form::kPlanes;
  constexpr int kParts = FORM == Form::kSplit ? 2 : 1;
  const Plan& plan = params.plan;
  hopper::wait_for_prerequisites();
  RingPosition ring;
#pragma unroll 1
  for (int number = blockIdx.x; number < plan.jobs; number += gridDim.x) {
    const Job job = locate_job(params, number);
    int channel[BLOCKS], move_h[BLOCKS], move_w[BLOCKS];
    // Blocks behind the last tap are not loaded, and the sums of what lies there are not stored.
    const int blocks = min(BLOCKS, params.taps * plan.blocks_c - job.tile_e * BLOCKS);
    const int bytes = kParts * 2 * kStagePixels * (CHANNELS / 64 * plan.dy_channels + blocks * plan.x_channels);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      const int block = job.tile_e * BLOCKS + i, tap = quotient(block, params.by_blocks_c);
      const int r = quotient(tap, params.by_s), s = tap - r * params.S;
      channel[i] = (block - tap * plan.blocks_c) * kBlockChannels;
      move_h[i] = r * params.dilation_h;
      move_w[i] = s * params.dilation_w;
    }
#pragma unroll 1
    for (int step = job.first_step; step < job.last_step; ++step) {
      const int first = PLANES ? step : step * kStagePixels, n = quotient(first, params.by_image);
      const int of_image = first - n * static_cast<int>(params.by_image.divisor);
      const int p = PLANES ? 0 : quotient(of_image, params.by_row);
      const int q = PLANES ? of_image * kStagePixels : of_image - p * params.Q;
      const uint32_t full = shared.full(ring.slot), to = shared.base + ring.slot * plan.stage_bytes;
      hopper::barrier_wait(shared.empty(ring.slot), ring.parity ^ 1);
      hopper::barrier_arrive_expecting(full, bytes);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint32_t first_block = to + part * kPartBytes<CHANNELS, BLOCKS>;
        const hopper::BoxMap &x_map = params.x_map[part], &dy_map = params.dy_map[part];
#pragma unroll
        for (int i = 0; i < CHANNELS / 64; ++i) {
          const int k = job.tile_k * CHANNELS + i * 64;
          if constexpr (PLANES)
            hopper::load_box(dy_map, first_block + i * kBlockBytes, q, k, n, 0, full);
          else
            hopper::load_columns(dy_map, first_block + i * kBlockBytes, k, q, p, n, 0, 0, full);
        }
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
          const uint32_t block = first_block + (CHANNELS / 64 + i) * kBlockBytes;
          if (i >= blocks) break;
          if constexpr (PLANES)
            hopper::load_box(x_map, block, q, channel[i], n, 0, full);
          else
            hopper::load_columns(x_map, block, channel[i], q * params.stride_w - params.pad_w,
                                 p * params.stride_h - params.pad_h, n, move_w[i], move_h[i], full);
        }
      }
      ring.next(plan.stages);
    }
  }
}

// Sums of two neighbouring input channels, and of the output channel eight further on, of each eight columns -> dw.
template <typename Stored, int BLOCKS>
__device__ __forceinline__ void store_weights(const Params& params, const Job& job, int k, int lane,
                                              const float (&acc)[BLOCKS * kBlockChannels / 2]) {
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i) {
    const int block = job.tile_e * BLOCKS + i, tap = quotient(block, params.by_blocks_c);
    const int r = quotient(tap, params.by_s), s = tap - r * params.S;
    const int first_c = (block - tap * params.plan.blocks_c) * kBlockChannels + lane % 4 * 2;
    Stored* const to = static_cast<Stored*>(params.dw_ptr) + k * params.w_stride[0] + r * params.w_stride[2] +
                       s * params.w_stride[3] + first_c;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (tap >= params.taps || first_c + 8 * j >= params.C || k + 8 * e >= params.K) continue;
        const int low = 32 * i + 4 * j + 2 * e;
        *reinterpret_cast<uint32_t*>(to + 8 * e * params.w_stride[0] + 8 * j) =
            narrow_pair(acc[low], acc[low + 1], Stored{});
      }
  }
}

// Whether a kernel may have fp32 in copies.
template <typename Stored, Form FORM>
constexpr bool kMayContain = std::is_same_v<Stored, Half> && FORM != Form::kPlanes;

__device__ __forceinline__ bool is_listed(const contained::Guard& guard, int place) {
  for (uint32_t i = 0; i < guard.control->listed; ++i)
    if (guard.list[i].place == place) return true;
  return false;
}

// Numbers on the lists, of x and then of dy, in the order of places.
using Order = uint16_t[kMostListed];

__device__ __forceinline__ void order_lists(const Params& params, Order& order) {
  for (int tensor = 0, first = 0; tensor < 2; ++tensor) {
    const contained::Guard& guard = params.guard[tensor];
    const int count = static_cast<int>(guard.control->listed);
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads)
      order[first + contained::listed_before(guard, count, guard.list[i].place)] = static_cast<uint16_t>(i);
    first += count;
  }
}

// Adds the products of listed values to a warpgroup's sums, of 64 output channels from first_k on, which begin at `to`:
// of each list one of so many, as each part takes its share. First come listed values of x times dy as it is in memory,
// then listed values of dy times the copy of x, which has zeros where x is on the list: no product counts twice. The
// order of places fixes that of additions.
template <int BLOCKS, bool SPLIT>
__device__ __forceinline__ void add_misfits(const Params& params, const Order& order, const Job& job, int share,
                                            int shares, int first_k, float* to) {
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  const int64_t columns = row_columns(params.plan);
  const int of_x = static_cast<int>(params.guard[0].control->listed);
  const int of_dy = static_cast<int>(params.guard[1].control->listed);
  if (share >= max(of_x, of_dy)) return;
  int x_exponent;
  contained::find_scale(params.guard[0], x_exponent);
  const auto rounded = [](float of) { return SPLIT ? of : round_to_tf32(of); };
  // A thread has the same items of each value: a column of the tile, or a row of a block of columns.
  constexpr int kItems = (BLOCKS + 1) / 2;
  int first_c[kItems], down[kItems], right[kItems];  // of the item's block of columns: channel, move of its tap
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int number = (thread + 128 * i) / kBlockChannels, block = job.tile_e * BLOCKS + number;
    const int tap = quotient(block, params.by_blocks_c), r = quotient(tap, params.by_s), s = tap - r * params.S;
    const bool exists = number < BLOCKS && tap < params.taps;
    first_c[i] = exists ? (block - tap * params.plan.blocks_c) * kBlockChannels : params.C;  // none
    down[i] = r * params.dilation_h - params.pad_h;
    right[i] = s * params.dilation_w - params.pad_w;
  }
#pragma unroll 1
  for (int tensor = 0; tensor < 2; ++tensor) {
    const int listed = tensor == 0 ? of_x : of_dy, channels = params.channels[tensor];
    const int width = tensor == 0 ? params.W : params.Q, height = tensor == 0 ? params.H : params.P;
    hopper::named_barrier(1 + static_cast<int>(threadIdx.x) / 128, 128);  // what others added to these sums is there
#pragma unroll 1
    for (int first = share; first < listed; first += 32 * shares) {
      // Each lane finds out about one value.
      const int number = min(first + lane * shares, listed - 1);
      const contained::Listed misfit = params.guard[tensor].list[order[tensor * of_x + number]];
      const int pixel = misfit.place / channels, channel = misfit.place - pixel * channels, line = pixel / width;
      const int image = line / height, at_row = line - image * height, at_column = pixel - line * width;
      const bool matters = tensor == 0 || is_within(channel - first_k, 64);
      uint32_t left = __ballot_sync(~0u, first + lane * shares < listed && matters);
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int of = __ffs(left) - 1;
        const float value = rounded(__shfl_sync(~0u, misfit.value, of));
        const int own = __shfl_sync(~0u, channel, of), n = __shfl_sync(~0u, image, of);
        const int row = __shfl_sync(~0u, at_row, of), column = __shfl_sync(~0u, at_column, of);
        float* at[kItems];
        float before[kItems] = {}, dy[kItems] = {};
        Half x[kItems][2] = {};
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const int item = thread + 128 * i, in_block = item % kBlockChannels, c = first_c[i] + in_block;
          at[i] = nullptr;
          if (tensor == 0) {  // a channel's column in this block, of each output channel
            const int from_h = row - down[i], from_w = column - right[i];
            const int p = from_h / params.stride_h, q = from_w / params.stride_w;
            if (own / kBlockChannels * kBlockChannels != first_c[i] || first_k + in_block >= params.K || from_h < 0 ||
                from_w < 0 || p * params.stride_h != from_h || q * params.stride_w != from_w || p >= params.P ||
                q >= params.Q)
              continue;
            at[i] = to + in_block * columns + item - in_block + own % kBlockChannels;
            dy[i] = params.dy_ptr[n * params.dy_stride[0] + (first_k + in_block) * params.dy_stride[1] +
                                  p * params.dy_stride[2] + q * params.dy_stride[3]];
          } else {  // all columns of an output channel; padding counts, as Inf times 0 is NaN
            const int h = row * params.stride_h + down[i], w = column * params.stride_w + right[i];
            if (c >= params.C) continue;
            const bool exists = is_within(h, params.H) && is_within(w, params.W);
            const int place = ((n * params.H + h) * params.W + w) * params.channels[0] + c;
            // Inf times the zero that stands for a listed value would be NaN.
            if (exists && !is_finite(value) && is_listed(params.guard[0], place)) continue;
            if (exists) x[i][0] = params.x_copy[place];
            if (exists && SPLIT) x[i][1] = params.x_copy[place + params.rests[0]];
            at[i] = to + (own - first_k) * columns + item;
          }
          before[i] = *at[i];
        }
#pragma unroll
        for (int i = 0; i < kItems; ++i) {  // all are loaded before one is stored
          if (at[i] == nullptr) continue;
          const float both = widen(x[i][0]) + widen(x[i][1]) * (1 / kRestScale);
          *at[i] = before[i] + value * (tensor == 0 ? rounded(dy[i]) : both * power_of_two(-x_exponent));
        }
      }
    }
  }
}

template <typename Stored, int CHANNELS, int BLOCKS, Form FORM>
__device__ __forceinline__ void multiply(const Params& params, const Shared& shared, const Order& order, float factor) {
  constexpr bool kByTurns = CHANNELS == 64, kPlanes = FORM == Form::kPlanes, kSplit = FORM == Form::kSplit;
  constexpr int kColumns = BLOCKS * kBlockChannels, kSums = kColumns / 2;
  using Wgmma = std::conditional_t<kPlanes, hopper::Wgmma<Stored, kColumns>,
                                   hopper::WgmmaBothTransposed<Stored, kColumns>>;
  // 16 pixels of a stage, in descriptors: a part of each row, or as many rows. And from first parts to rests.
  constexpr uint32_t kPixels = (kPlanes ? 16 * sizeof(Stored) : 16 * hopper::kBoxRowBytes) / 16;
  constexpr uint32_t kRests = kPartBytes<CHANNELS, BLOCKS> / 16;
  const Plan& plan = params.plan;
  const int warpgroup = hopper::uniform(threadIdx.x / 128);
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  hopper::wait_for_prerequisites();  // a preceding kernel may still read the workspace
  RingPosition ring;
  int turn = 0;  // of stages
#pragma unroll 1
  for (int number = blockIdx.x; number < plan.jobs; number += gridDim.x) {
    const Job job = locate_job(params, number);
    float acc[kSums];
    float of_stages[kSplit ? kSums : 1], of_rests[kSplit ? kSums : 1];  // first parts of stages before; with rests
    int before = -1;  // the stage that the preceding wgmma group reads; released once only the next one is pending
    const auto give_back = [&] {
      if (before >= 0 && lane == 0) hopper::barrier_arrive(shared.empty(before));
    };
    bool keep = false;
    hopper::wgmma_start(acc);
    if constexpr (kSplit) {
      hopper::wgmma_start(of_rests);
#pragma unroll
      for (float& sum : of_stages) sum = 0;
    }
#pragma unroll 1
    for (int step = job.first_step; step < job.last_step; ++step, turn ^= 1, ring.next(plan.stages)) {
      if (kByTurns && turn != warpgroup) continue;
      hopper::barrier_wait(shared.full(ring.slot), ring.parity);
      const uint32_t stage = shared.base + ring.slot * plan.stage_bytes;
      const uint32_t a = hopper::descriptor(stage + (kByTurns ? 0 : warpgroup * kBlockBytes), kBlockBytes);
      const uint32_t b = hopper::descriptor(stage + CHANNELS / 64 * kBlockBytes, kBlockBytes);
      const auto add = [&](auto& sums, uint32_t of_a, uint32_t of_b, int i, bool to_sums) {
        Wgmma::multiply(sums, of_a + i * kPixels, of_b + i * kPixels, to_sums, hopper::kRowsDescriptorHigh);
      };
      hopper::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kStagePixels / 16; ++i) add(acc, a, b, i, (!kSplit && keep) || i > 0);
      hopper::wgmma_commit();
      if constexpr (kSplit) {
#pragma unroll
        for (int i = 0; i < kStagePixels / 16; ++i) {
          add(of_rests, a, b + kRests, i, keep || i > 0);
          add(of_rests, a + kRests, b, i, true);
        }
        hopper::wgmma_commit();
      }
      keep = true;
      hopper::wgmma_wait<1>();
      give_back();
      before = ring.slot;
      if constexpr (kSplit) {
        hopper::wgmma_settle(acc);
#pragma unroll
        for (int i = 0; i < kSums; ++i) of_stages[i] += acc[i];
      }
    }
    hopper::wgmma_wait<0>();
    hopper::wgmma_settle(acc);
    give_back();
    if constexpr (kSplit) {
      hopper::wgmma_settle(of_rests);
#pragma unroll
      for (int i = 0; i < kSums; ++i) acc[i] = of_stages[i] + of_rests[i] * (1 / kRestScale);
    }
    // A warpgroup that had no stage still stores its sums: zeros.
    if (!keep) {
#pragma unroll
      for (float& sum : acc) sum = 0;
    }
    const int part = kByTurns ? 2 * job.part + warpgroup : job.part;
    const int k = job.tile_k * CHANNELS + (kByTurns ? 0 : 64 * warpgroup) + 16 * warp + lane / 4;
    if (!kByTurns && params.dw_ptr != nullptr) {
      store_weights<Stored, BLOCKS>(params, job, k, lane, acc);
      continue;
    }
    if (kMayContain<Stored, FORM> && plan.fp16_parts != 0) {
#pragma unroll
      for (float& sum : acc) sum *= factor;
    }
    const int64_t columns = row_columns(plan), rows = static_cast<int64_t>(plan.tiles_k) * CHANNELS;
    float* const to = params.sums_ptr + (part * rows + k) * columns + job.tile_e * kColumns + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<float2*>(to + 8 * i * columns + 8 * j) =
            make_float2(acc[4 * j + 2 * i], acc[4 * j + 2 * i + 1]);
    }
    if (kMayContain<Stored, FORM> && plan.fp16_parts != 0) {
      const int first_k = job.tile_k * CHANNELS + (kByTurns ? 0 : 64 * warpgroup);
      add_misfits<BLOCKS, kSplit>(params, order, job, part, plan.parts * sums_of_part(plan), first_k,
                          params.sums_ptr + (part * rows + first_k) * columns + job.tile_e * kColumns);
    }
  }
}

template <typename Stored, int CHANNELS, int BLOCKS, Form FORM>
__global__ void __launch_bounds__(kThreads, 1) tma_wgrad_kernel(const __grid_constant__ Params params) {
#if defined(MODELNEW_SM90A)
  extern __shared__ __align__(1024) uint8_t modelnew_tma_wgrad_smem[];
  const Plan& plan = params.plan;
  const Shared shared(plan, hopper::smem_address(modelnew_tma_wgrad_smem));
  const int warp = hopper::uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int stage = 0; stage < plan.stages; ++stage) {
      hopper::barrier_init(shared.full(stage), 1);
      hopper::barrier_init(shared.empty(stage), CHANNELS == 64 ? 4 : 8);  // warps that give it back
    }
    hopper::fence_async();  // makes the barriers visible to TMA, which arrives at them
  }
  if (threadIdx.x == kMultiplyingThreads) {
    for (int part = 0; part < (FORM == Form::kSplit ? 2 : 1); ++part) {
      hopper::prefetch_map(params.x_map[part]);
      hopper::prefetch_map(params.dy_map[part]);
    }
  }
  Order& order = *reinterpret_cast<Order*>(modelnew_tma_wgrad_smem + plan.stages * plan.stage_bytes + kBarrierBytes);
  float factor = 1;  // undoes both scales
  if (kMayContain<Stored, FORM> && plan.fp16_parts != 0) {
    int exponent[2];
    bool fit = true;
    for (int i = 0; i < 2; ++i)
      fit = contained::find_scale(params.guard[i], exponent[i]) && are_contained(*params.guard[i].control) && fit;
    fit = fit && is_within(exponent[0] + exponent[1] + 126, 253) &&
          params.guard[0].control->listed + params.guard[1].control->listed <= kMostListed;
    if (blockIdx.x == 0 && threadIdx.x == 0) *params.done = fit ? 1 : 0;
    if (!fit) return;
    factor = power_of_two(-exponent[0] - exponent[1]);
    order_lists(params, order);
  }
  __syncthreads();  // barriers are there, and the order
  if (warp >= kMultiplyingThreads / 32) {
    hopper::registers_give_back<kOrderingRegisters>();
    if (warp == kMultiplyingThreads / 32 && lane == 0) order_boxes<CHANNELS, BLOCKS, FORM>(params, shared);
  } else {
    hopper::registers_take<kMultiplyingRegisters>();
    multiply<Stored, CHANNELS, BLOCKS, FORM>(params, shared, order, factor);
    if (params.dw_ptr == nullptr) hopper::launch_dependents();  // else the call ends here
  }
#endif
}

__global__ void __launch_bounds__(contained::kPackThreads)
    tma_wgrad_sample_kernel(const __grid_constant__ SampleBoth params) {
  extern __shared__ __align__(16) uint8_t modelnew_tma_wgrad_sample_smem[];
  const int tensor = static_cast<int>(blockIdx.x) / contained::kSampleBlocks;
  contained::sample(params.of[tensor], static_cast<int>(blockIdx.x) % contained::kSampleBlocks,
                    *reinterpret_cast<uint32_t*>(modelnew_tma_wgrad_sample_smem));
}

// Blocks of x, then those of dy.
template <int PARTS>
__global__ void __launch_bounds__(contained::kPackThreads, PARTS == 1 ? 5 : 4)
    tma_wgrad_contain_kernel(const __grid_constant__ ContainBoth params) {
#if defined(MODELNEW_SM90A)
  extern __shared__ __align__(16) uint8_t modelnew_tma_wgrad_contain_smem[];
  auto& shared = *reinterpret_cast<contained::ContainShared*>(modelnew_tma_wgrad_contain_smem);
  hopper::launch_dependents();
  const int x_blocks = params.copy[0].blocks, tensor = static_cast<int>(blockIdx.x) < x_blocks ? 0 : 1;
  const int block = static_cast<int>(blockIdx.x) - tensor * x_blocks;
  const contained::CopyParams& copy = params.copy[tensor];
  const contained::Guard& guard = params.guard[tensor];
  if (params.vector[tensor] == 8)
    contained::contain_points<8, PARTS>(copy, guard, block, shared, params.rests[tensor]);
  else if (params.vector[tensor] == 4)
    contained::contain_points<4, PARTS>(copy, guard, block, shared, params.rests[tensor]);
  else
    contained::contain_points<1, PARTS>(copy, guard, block, shared, params.rests[tensor]);
#endif
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// ---- Host: plans ----

struct Alignment {
  uint64_t x, dy;
};

// The im2col windows of x, as the taps read it, and of dy.
inline hopper::Columns columns_of_x(const Problem& p) {
  return hopper::columns_of({p.W, p.Q, p.S, taken_stride(p.stride_w, p.Q), p.pad_w, p.dilation_w},
                            {p.H, p.P, p.R, taken_stride(p.stride_h, p.P), p.pad_h, p.dilation_h});
}

inline hopper::Columns columns_of_dy(const Problem& p) {
  return hopper::columns_of({p.Q, p.Q, 1, 1, 0, 1}, {p.P, p.P, 1, 1, 0, 1});
}

// Whether boxes take 64 pixels of a channel: 1x1 filters read each pixel of NCHW planes once.
inline bool are_whole_planes(const Problem& p, const Alignment& address) {
  const auto in_boxes = [&](const int64_t (&stride)[4], int channels, uint64_t at) {
    return hopper::are_planes(stride, p.P, p.Q) && hopper::in_eights(stride[1], channels > 1) &&
           hopper::in_eights(stride[0], p.N > 1) && at % 16 == 0;
  };
  const bool each_once = p.R == 1 && p.S == 1 && p.P == p.H && p.Q == p.W && p.pad_h == 0 && p.pad_w == 0;
  return each_once && int64_t{p.P} * p.Q % 8 == 0 && in_boxes(p.x_stride, p.C, address.x) &&
         in_boxes(p.y_stride, p.K, address.dy);
}

// Whether blocks may store sums as weights, in pairs of input channels: of one part, to dw in channels_last.
inline bool stores_weights(const Problem& p, const Plan& plan) {
  const auto even = [](int64_t step, int size) { return size == 1 || step % 2 == 0; };
  return plan.parts == 1 && plan.channels == 128 && p.C % 2 == 0 && p.w_stride[1] == 1 && even(p.w_stride[0], p.K) &&
         even(p.w_stride[2], p.R) && even(p.w_stride[3], p.S);
}

// The estimate, in cycles of an SM. All constants are fitted to measured times (docs/lab/tma.md): those of copies
// together with kCyclesOfWgrad. How fast TMA loads depends on how many boxes a stage has.
constexpr double kCallCycles = 12150, kJobCycles = 2424, kJobColumnCycles = 2.85, kStepCycles = 59, kSumCycles = 0.3;
constexpr double kProductFactor = 1.05, kMemoryBytes = 12, kShorterShare = 0.29;
constexpr double kCopyCycles = 6500, kCopiedBytes = 21, kAddCycles = 4500;
constexpr double kContainCycles = 17000, kContainedBytes = 17;
constexpr double kUnevenFactor = 1.8, kRestFactor = 1.4;
constexpr double kBoxBytes[2][kMostBlocks] = {{75, 54, 49, 41}, {64, 50, 40, 41}};  // a cycle; [channels == 128]

inline int64_t padded_bytes(int64_t bytes) { return ceil_div(bytes, 128) * 128; }

inline int64_t copied_bytes(const Problem& problem, const Plan& plan) {
  return (plan.copies_x ? hopper::copied_bytes(problem.N, problem.C, problem.H, problem.W) : 0) +
         (plan.copies_dy ? hopper::copied_bytes(problem.N, problem.K, problem.P, problem.Q) : 0);
}

// fp32 as the kernels multiply it: as copies, of 1x1 filters of what they read.
inline Problem problem_of_copies(Problem problem) {
  problem.dtype = DType::kFloat16;
  if (problem.R * problem.S == 1) {
    problem.H = problem.P, problem.W = problem.Q;
    problem.stride_h = problem.stride_w = 1, problem.pad_h = problem.pad_w = 0;
  }
  hopper::set_copied_strides(problem.C, problem.H, problem.W, problem.x_stride);
  hopper::set_copied_strides(problem.K, problem.P, problem.Q, problem.y_stride);
  return problem;
}

// Bytes of a copy, in one part.
inline int64_t copy_bytes_of_x(const Problem& copies) {
  return hopper::copied_bytes(copies.N, copies.C, copies.H, copies.W);
}
inline int64_t copy_bytes_of_dy(const Problem& copies) {
  return hopper::copied_bytes(copies.N, copies.K, copies.P, copies.Q);
}

// State of a call in fp32, for x and dy. The workspace begins with it: hopper_wgrad may write over all else.
struct GuardLayout {
  ContainedControl control[2];
  contained::Listed list[2][kMostListed];
  uint32_t samples[2][contained::kSampleBlocks];
  int done;
};
constexpr int64_t kGuardBytes = (sizeof(GuardLayout) + 127) / 128 * 128;

inline double estimate(const Problem& problem, int sms, const Plan& plan) {
  const int times = plan.fp16_parts == 2 ? 3 : 1;  // products of parts
  const double products = times * plan.channels * plan.blocks * 64.0 * kStagePixels / 2048;
  // Pixels that begin between 64 bytes are loaded slowly, and so are zeros, behind the last channels.
  const bool single = problem.R * problem.S == 1, rest = problem.C > kBlockChannels && problem.C % kBlockChannels != 0;
  const bool uneven = problem.C > 16 && problem.C < kBlockChannels && problem.C % 32 != 0;
  const double longer = single ? 1 : rest ? kRestFactor : uneven ? kUnevenFactor : 1;
  const double loading = longer * plan.stage_bytes / kBoxBytes[plan.channels == 128][plan.blocks - 1];
  const double step = std::max(kProductFactor * products + kStepCycles, loading);
  const double turns = static_cast<double>(ceil_div(plan.jobs, sms));
  const double multiplied =
      turns * (ceil_div(plan.steps, plan.parts) * step + kJobCycles + kJobColumnCycles * plan.blocks * kBlockChannels);
  // A stride may leave pixels out.
  const double pixels =
      problem.N * std::min(1.0 * problem.H * problem.W, 1.0 * problem.P * problem.Q * problem.R * problem.S);
  const double values = pixels * problem.C + static_cast<double>(problem.N) * problem.P * problem.Q * problem.K;
  const double bytes = 2 * std::max(plan.fp16_parts, 1) * values;
  const double memory = bytes / sms / kMemoryBytes;
  const double sums = 1.0 * plan.jobs * plan.channels * plan.blocks * kBlockChannels * sums_of_part(plan);
  const double adding = stores_weights(problem, plan) ? -kAddCycles : kSumCycles * sums / sms;
  const int64_t copied = copied_bytes(problem, plan);
  const double copying = copied == 0 ? 0 : kCopyCycles + 2.0 * copied / sms / kCopiedBytes;
  return kCallCycles + copying + std::max(multiplied, memory) + kShorterShare * std::min(multiplied, memory) + adding;
}

inline int64_t sums_of(const Plan& plan) {
  return static_cast<int64_t>(plan.parts) * sums_of_part(plan) * plan.tiles_k * plan.channels * row_columns(plan);
}

// The sums in the workspace; copies come behind them.
inline int64_t sum_bytes(const Plan& plan) { return static_cast<int64_t>(sizeof(float)) * sums_of(plan); }

inline bool make_plan(const Problem& problem, int sms, const Alignment& address, Plan& best, int forced_channels = 0,
                      int forced_blocks = 0, int forced_parts = 0, int fp16_parts = 0) {
  const int64_t pixels = problem.N * problem.P * problem.Q, taps = int64_t{problem.R} * problem.S;
  using hopper::is_in_place, hopper::can_copy;
  const bool copied = fp16_parts != 0;
  bool in_place_x = copied || is_in_place(problem.x_stride, problem.N, problem.C, problem.H, problem.W, address.x);
  bool in_place_dy = copied || is_in_place(problem.y_stride, problem.N, problem.K, problem.P, problem.Q, address.dy);
  const bool planes = !(in_place_x && in_place_dy) && are_whole_planes(problem, address);
  if (planes) in_place_x = in_place_dy = true;
  if (!in_place_x && !can_copy(problem.x_stride, problem.N, problem.C, problem.H, problem.W)) return false;
  if (!in_place_dy && !can_copy(problem.y_stride, problem.N, problem.K, problem.P, problem.Q)) return false;
  if (!hopper::can_map(columns_of_x(problem))) return false;
  if (pixels >= int64_t{1} << 30 || taps * problem.C * problem.K >= int64_t{1} << 30) return false;
  if (taps > hopper::kMostAddTaps) return false;
  bool found = false;
  for (int channels : {128, 64}) {
    for (int blocks = 1; blocks <= (fp16_parts == 2 ? kMostSplitBlocks : kMostBlocks); ++blocks) {
      if (forced_channels > 0 && channels != forced_channels) continue;
      if (forced_blocks > 0 && blocks != forced_blocks) continue;
      Plan plan{};
      plan.copies_x = !in_place_x;
      plan.copies_dy = !in_place_dy;
      plan.planes = planes;
      plan.fp16_parts = fp16_parts;
      plan.channels = channels;
      plan.blocks = blocks;
      plan.blocks_c = static_cast<int>(ceil_div(problem.C, kBlockChannels));
      plan.x_channels = std::min(hopper::copied_channels(problem.C), kBlockChannels);
      plan.dy_channels = std::min(hopper::copied_channels(problem.K), kBlockChannels);
      plan.tiles_k = static_cast<int>(ceil_div(problem.K, channels));
      plan.tiles_e = static_cast<int>(ceil_div(taps * plan.blocks_c, blocks));
      plan.steps = static_cast<int>(planes ? problem.N * ceil_div(pixels / problem.N, kStagePixels)
                                           : ceil_div(pixels, kStagePixels));
      plan.stage_bytes = std::max(fp16_parts, 1) * (channels / 64 + blocks) * kBlockBytes;
      const int beside = kBarrierBytes + (fp16_parts != 0 ? kOrderBytes : 0);
      plan.stages = std::min(kMostStages, (kSharedBytes - beside) / plan.stage_bytes);
      // By turns, a warpgroup always has the same stages of an even number. Of an odd number it would see each one only
      // every other round, when the parity of its barrier is the same again.
      if (channels == 64) plan.stages -= plan.stages % 2;
      plan.smem_bytes = plan.stages * plan.stage_bytes + beside;
      const int64_t tiles = int64_t{plan.tiles_k} * plan.tiles_e;
      const int64_t chained = hopper::most_chained(fp16_parts == 0) * sums_of_part(plan);
      const int64_t least = ceil_div(int64_t{plan.steps} * kStagePixels, chained);
      const int64_t most = std::max(least, ceil_div(4 * sms, tiles));
      const int64_t last = std::min<int64_t>(most, plan.steps);
      for (int64_t parts = std::min<int64_t>(least, plan.steps); parts <= last; ++parts) {
        if (forced_parts > 0 && parts != forced_parts) continue;
        if (tiles * parts >= 1 << 30) break;
        plan.parts = static_cast<int>(parts);
        if (sum_bytes(plan) > kMostSumBytes) break;
        plan.jobs = static_cast<int>(tiles * parts);
        plan.grid = std::min(plan.jobs, sms);
        plan.cycles = estimate(problem, sms, plan);
        if (found && plan.cycles >= best.cycles) continue;
        best = plan;
        found = true;
      }
    }
  }
  return found;
}

// The same for fp32, and what it takes to contain it.
inline bool make_contained_plan(const Problem& problem, int sms, Plan& best, int forced_channels = 0,
                                int forced_blocks = 0, int forced_parts = 0) {
  const Problem of_copies = problem_of_copies(problem);
  const int parts = uses_tf32(problem, Operator::kWgrad) ? 1 : 2;
  const int64_t bytes_of_x = copy_bytes_of_x(of_copies), bytes_of_dy = copy_bytes_of_dy(of_copies);
  if (std::max(bytes_of_x, bytes_of_dy) > kMostCopiedBytes ||
      !make_plan(of_copies, sms, Alignment{}, best, forced_channels, forced_blocks, forced_parts, parts))
    return false;
  best.cycles += kContainCycles + (2.0 + parts) * (bytes_of_x + bytes_of_dy) / sms / kContainedBytes;
  return true;
}

struct Planned {
  Plan plan;
  bool found;
};

inline const Planned& plan_of(const Problem& problem, const Alignment& address) {
  thread_local Memo<Planned> memo;
  int sms = 0;
  const int gpu = find_gpu(sms);
  return memo.get(key_of(problem, Operator::kWgrad, address.x, address.dy, 0, gpu, sms), [&] {
    Planned planned{};
    planned.found = problem.dtype == DType::kFloat32 ? make_contained_plan(problem, sms, planned.plan)
                                                     : make_plan(problem, sms, address, planned.plan);
    return planned;
  });
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (op != Operator::kWgrad) return "it computes gradients to weights only";
  if (problem.dtype == DType::kFloat64) return "it has no float64";
  if (problem.dtype == DType::kFloat32 && kHopperWgradEngine.refusal(problem, op) != nullptr)
    return "hopper_wgrad must be able to compute what does not fit into scaled fp16";
  if (problem.groups != 1) return "it takes one group only";
  int sms = 0;
  if (find_gpu(sms) != 90) return "it needs a Hopper GPU (compute capability 9.0)";
  if (!plan_of(problem, Alignment{}).found)
    return "the pixels of an image of x and dy must be a step apart, TMA must be able to address "
           "the filter's taps, up to 7168, and the partial sums must fit into 1 GB";
  return nullptr;
}

inline Alignment alignment_of(const Pointers& pointers) {
  return {reinterpret_cast<uint64_t>(pointers.x), reinterpret_cast<uint64_t>(pointers.dy)};
}

inline double cycles(const Problem& problem, Operator) { return plan_of(problem, Alignment{}).plan.cycles; }

// hopper_wgrad is taken to be faster below this multiple of this engine's estimate: docs/lab/tma.md.
// In channels_last this engine's estimate is too long in 16 bits, and hopper_wgrad's is in fp32 with several taps.
constexpr double kCyclesIn16Bits = 0.95, kCyclesOfPixelsIn16Bits = 0.75;
constexpr double kCyclesInFp32 = 1.09, kCyclesOfPixelsInFp32 = 1.16;

inline const char* yields(const Problem& problem, Operator op) {
  const Plan& plan = plan_of(problem, Alignment{}).plan;
  if (kHopperWgradEngine.refusal(problem, op) != nullptr) return nullptr;
  if ((plan.copies_x || plan.copies_dy) && kHopperWgradEngine.yields(problem, op) != nullptr)
    return "another engine may be faster with few output channels of a group, as it copies nothing";
  const bool pixels = problem.x_stride[1] == 1, shifts = problem.R * problem.S > 1 && !has_stride(problem);
  const double factor = problem.dtype != DType::kFloat32 ? (pixels ? kCyclesOfPixelsIn16Bits : kCyclesIn16Bits)
                        : pixels && shifts               ? kCyclesOfPixelsInFp32
                                                         : kCyclesInFp32;
  if (kHopperWgradEngine.cycles(problem, op) < factor * plan.cycles)
    return "hopper_wgrad is faster by the estimates";
  return nullptr;
}

// TMA needs addresses that are multiples of 16 bytes, and only the call knows them. A call whose channels_last tensors
// are not aligned is handed on to this engine.
inline const Engine& engine_of_others(const Problem& problem, Operator op) {
  return kHopperWgradEngine.refusal(problem, op) == nullptr ? kHopperWgradEngine : kDirectEngine;
}

// Sums and copies; of fp32 also what comes before them, and what hopper_wgrad may put in their place.
inline int64_t bytes_of(const Problem& problem, Operator op, const Plan& plan, const Pointers& pointers) {
  if (plan.fp16_parts == 0) return sum_bytes(plan) + copied_bytes(problem, plan);
  const Problem of_copies = problem_of_copies(problem);
  const int64_t copies_of_x = padded_bytes(plan.fp16_parts * copy_bytes_of_x(of_copies));
  const int64_t copies = copies_of_x + plan.fp16_parts * copy_bytes_of_dy(of_copies);
  return kGuardBytes + std::max(padded_bytes(sum_bytes(plan)) + copies,
                                kHopperWgradEngine.workspace_bytes(problem, op, pointers));
}

inline int64_t workspace_bytes(const Problem& problem, Operator op, const Pointers& pointers) {
  const Planned& planned = plan_of(problem, alignment_of(pointers));
  if (!planned.found) return engine_of_others(problem, op).workspace_bytes(problem, op, pointers);
  return bytes_of(problem, op, planned.plan, pointers);
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

inline cudaError_t make_maps(const Problem& problem, const void* x_ptr, const void* dy_ptr, Params& params) {
  if (params.plan.planes) {
    const auto of_planes = [&](const void* tensor, const int64_t (&stride)[4], int channels, int box_channels,
                               hopper::BoxMap& map) {
      const uint64_t sizes[4] = {uint64_t{1} * problem.P * problem.Q, static_cast<uint64_t>(channels),
                                 static_cast<uint64_t>(problem.N), 1};
      const uint64_t strides[3] = {hopper::step_bytes(stride[1], channels), hopper::step_bytes(stride[0], problem.N),
                                   16};
      const uint32_t box[4] = {kStagePixels, static_cast<uint32_t>(box_channels), 1, 1};
      return hopper::make_box_map(hopper::BoxUse::kLoadRows, tensor, 2, sizes, strides, box, map);
    };
    const Plan& plan = params.plan;
    const cudaError_t error = of_planes(x_ptr, problem.x_stride, problem.C, plan.x_channels, params.x_map[0]);
    if (error != cudaSuccess) return error;
    return of_planes(dy_ptr, problem.y_stride, problem.K, plan.dy_channels, params.dy_map[0]);
  }
  const auto make = [&](const void* tensor, const int64_t (&stride)[4], int channels, int rows, int columns,
                        const hopper::Columns& map_columns, int box_channels, hopper::BoxMap& map) {
    const uint64_t sizes[4] = {static_cast<uint64_t>(hopper::copied_channels(channels)), static_cast<uint64_t>(columns),
                               static_cast<uint64_t>(rows), static_cast<uint64_t>(problem.N)};
    const uint64_t strides[3] = {hopper::step_bytes(stride[3], columns), hopper::step_bytes(stride[2], rows),
                                 hopper::step_bytes(stride[0], problem.N)};
    return hopper::make_columns_map(tensor, 2, sizes, strides, map_columns.first, map_columns.last, map_columns.steps,
                                    box_channels, kStagePixels, map);
  };
  cudaError_t error = cudaSuccess;
  for (int part = 0; error == cudaSuccess && part < std::max(params.plan.fp16_parts, 1); ++part) {
    const Half *const x = static_cast<const Half*>(x_ptr) + part * params.rests[0],
                *const dy = static_cast<const Half*>(dy_ptr) + part * params.rests[1];
    error = make(x, problem.x_stride, problem.C, problem.H, problem.W, columns_of_x(problem), params.plan.x_channels,
                 params.x_map[part]);
    if (error != cudaSuccess) break;
    error = make(dy, problem.y_stride, problem.K, problem.P, problem.Q, columns_of_dy(problem), params.plan.dy_channels,
                 params.dy_map[part]);
  }
  return error;
}

template <typename Stored, int CHANNELS, int BLOCKS, Form FORM>
cudaError_t run_kernel(const Params& params, cudaStream_t stream) {
  constexpr Instance kInstance{"tma_wgrad_kernel", {kTypeId<Stored>, CHANNELS, BLOCKS, static_cast<int>(FORM)}};
  record(kInstance);
  if constexpr (!is_built(kInstance) || (FORM == Form::kSplit && BLOCKS > kMostSplitBlocks)) {
    return cudaErrorInvalidConfiguration;
  } else {
    const auto kernel = tma_wgrad_kernel<Stored, CHANNELS, BLOCKS, FORM>;
    const Plan& plan = params.plan;
    cudaError_t error = allow_all_shared_memory(kernel);
    if (error != cudaSuccess) return error;
    return hopper::launch_early(kernel, static_cast<unsigned>(plan.grid), kThreads, plan.smem_bytes, stream, params);
  }
}

template <typename Stored, int CHANNELS, Form FORM>
cudaError_t run_blocks(const Params& params, cudaStream_t stream) {
  switch (params.plan.blocks) {
    case 1:
      return run_kernel<Stored, CHANNELS, 1, FORM>(params, stream);
    case 2:
      return run_kernel<Stored, CHANNELS, 2, FORM>(params, stream);
    case 3:
      return run_kernel<Stored, CHANNELS, 3, FORM>(params, stream);
    default:
      return run_kernel<Stored, CHANNELS, 4, FORM>(params, stream);
  }
}

template <typename Stored, int CHANNELS>
cudaError_t run_channels(const Params& params, cudaStream_t stream) {
  if constexpr (std::is_same_v<Stored, Half>) {
    if (params.plan.fp16_parts == 2) return run_blocks<Stored, CHANNELS, Form::kSplit>(params, stream);
  }
  return params.plan.planes ? run_blocks<Stored, CHANNELS, Form::kPlanes>(params, stream)
                            : run_blocks<Stored, CHANNELS, Form::kPixels>(params, stream);
}

// Copies what TMA cannot read in place, and lets `problem` and `pointers` describe the copies.
inline cudaError_t copy(const Plan& plan, Problem& problem, Pointers& pointers, cudaStream_t stream) {
  uint8_t* to = static_cast<uint8_t*>(pointers.workspace) + sum_bytes(plan);
  const auto make = [&](const void*& from, int64_t (&stride)[4], int channels, int rows, int columns) {
    const hopper::PlanesCopy made = hopper::make_planes_copy(from, stride, problem.N, channels, rows, columns, to);
    hopper::set_copied_strides(channels, rows, columns, stride);
    from = to;
    to += hopper::copied_bytes(problem.N, channels, rows, columns);
    return made;
  };
  hopper::PlanesCopy x{}, dy{};
  if (plan.copies_x) x = make(pointers.x, problem.x_stride, problem.C, problem.H, problem.W);
  if (plan.copies_dy) dy = make(pointers.dy, problem.y_stride, problem.K, problem.P, problem.Q);
  return x.blocks + dy.blocks == 0 ? cudaSuccess : launch_planes_copy(x, dy, stream);
}

// Contains x and dy, and lets `problem` and `pointers` describe the copies.
inline cudaError_t contain(const Plan& plan, Problem& problem, Pointers& pointers, Params& params,
                           cudaStream_t stream) {
  GuardLayout& layout = *static_cast<GuardLayout*>(pointers.workspace);
  uint8_t* const workspace = static_cast<uint8_t*>(pointers.workspace) + kGuardBytes;
  const Problem of_copies = problem_of_copies(problem);
  uint8_t* const copies = workspace + padded_bytes(sum_bytes(plan));
  const int parts = plan.fp16_parts;
  void* const copied[2] = {copies, copies + padded_bytes(parts * copy_bytes_of_x(of_copies))};
  const void* const from[2] = {pointers.x, pointers.dy};
  contained::Phased of[2] = {};
  static_cast<Correlation&>(of[0]) = correlation_of_problem(problem, Operator::kFprop);
  Correlation& of_dy = of[1];
  of_dy.N = problem.N, of_dy.groups = 1, of_dy.in_channels = problem.K;
  of_dy.H = of_dy.P = problem.P, of_dy.W = of_dy.Q = problem.Q;
  of_dy.R = of_dy.S = of_dy.stride_h = of_dy.stride_w = 1;
  std::copy_n(problem.y_stride, 4, of_dy.in_stride);
  SampleBoth sampled{};
  ContainBoth both{};
  for (int i = 0; i < 2; ++i) {
    params.guard[i] = both.guard[i] = {&layout.control[i], layout.samples[i], layout.list[i], nullptr};
    of[i].phases = contained::unphased(of[i]);
    contained::Phased copy = of[i];
    copy.in_channels = params.channels[i] = hopper::copied_channels(of[i].in_channels);
    both.copy[i] = contained::copy_params(of[i], copy, from[i], copied[i]);
    both.vector[i] = contained::vector_of(both.copy[i]);
    params.rests[i] = both.rests[i] = (i == 0 ? copy_bytes_of_x(of_copies) : copy_bytes_of_dy(of_copies)) / 2;
    sampled.of[i] = contained::sample_params(of[i], from[i], both.guard[i]);
  }
  params.H = of_copies.H, params.W = of_copies.W;
  params.x_copy = static_cast<const Half*>(copied[0]);
  params.dy_ptr = static_cast<const float*>(pointers.dy);
  std::copy_n(problem.y_stride, 4, params.dy_stride);
  params.done = &layout.done;
  problem = of_copies;
  pointers.x = copied[0], pointers.dy = copied[1], pointers.workspace = workspace;
  const cudaError_t error =
      hopper::launch_early(tma_wgrad_sample_kernel, 2 * contained::kSampleBlocks, contained::kPackThreads,
                           sizeof(uint32_t), stream, sampled);
  if (error != cudaSuccess) return error;
  const unsigned blocks = static_cast<unsigned>(both.copy[0].blocks + both.copy[1].blocks);
  return hopper::launch_early(parts == 1 ? tma_wgrad_contain_kernel<1> : tma_wgrad_contain_kernel<2>, blocks,
                              contained::kPackThreads, sizeof(contained::ContainShared), stream, both);
}

// `Stored` of the kernel; `Out` of dw.
template <typename Stored, typename Out = Stored>
cudaError_t run(Problem problem, const Plan& plan, Pointers pointers, cudaStream_t stream) {
  Params params{};
  params.plan = plan;
  cudaError_t error = plan.fp16_parts != 0 ? contain(plan, problem, pointers, params, stream)
                                          : copy(plan, problem, pointers, stream);
  if (error != cudaSuccess) return error;
  params.P = problem.P;
  params.Q = problem.Q;
  params.S = problem.S;
  params.taps = problem.R * problem.S;
  params.stride_h = taken_stride(problem.stride_h, problem.P);
  params.stride_w = taken_stride(problem.stride_w, problem.Q);
  params.pad_h = problem.pad_h;
  params.pad_w = problem.pad_w;
  params.dilation_h = problem.dilation_h;
  params.dilation_w = problem.dilation_w;
  params.sums_ptr = static_cast<float*>(pointers.workspace);
  if (plan.fp16_parts == 0 && stores_weights(problem, plan) && reinterpret_cast<uint64_t>(pointers.out) % 4 == 0)
    params.dw_ptr = pointers.out;
  params.K = problem.K;
  params.C = problem.C;
  std::copy_n(problem.w_stride, 4, params.w_stride);
  params.by_tiles = make_divisor(int64_t{plan.tiles_k} * plan.tiles_e);
  params.by_tiles_k = make_divisor(plan.tiles_k);
  const int64_t plane = int64_t{problem.P} * problem.Q;
  params.by_image = make_divisor(plan.planes ? ceil_div(plane, kStagePixels) : plane);
  params.by_row = make_divisor(problem.Q);
  params.by_blocks_c = make_divisor(plan.blocks_c);
  params.by_s = make_divisor(problem.S);
  error = make_maps(problem, pointers.x, pointers.dy, params);
  if (error != cudaSuccess) return error;
  error = plan.channels == 128 ? run_channels<Stored, 128>(params, stream) : run_channels<Stored, 64>(params, stream);
  if (error != cudaSuccess || params.dw_ptr != nullptr) return error;
  hopper::WeightSums add{params.sums_ptr, pointers.out};
  add.row_channels = plan.blocks_c * kBlockChannels;
  add.row = row_columns(plan);
  add.parts = plan.parts * sums_of_part(plan);
  return hopper::add_weights<Out>(problem, problem, 0, 0, add, plan.tiles_k * plan.channels, stream);
}

// fp32: as copies, and by hopper_wgrad if operands do not fit into these.
inline cudaError_t run_contained(Operator op, const Problem& problem, const Plan& plan, const Pointers& pointers,
                                 cudaStream_t stream) {
  const cudaError_t error = run<Half, float>(problem, plan, pointers, stream);
  if (error != cudaSuccess) return error;
  Pointers again = pointers;
  again.done = &static_cast<GuardLayout*>(pointers.workspace)->done;
  again.workspace = static_cast<uint8_t*>(pointers.workspace) + kGuardBytes;
  return kHopperWgradEngine.launch(op, problem, again, stream);
}

inline cudaError_t launch(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  const Planned& planned = plan_of(problem, alignment_of(pointers));
  if (!planned.found) return engine_of_others(problem, op).launch(op, problem, pointers, stream);
  if (problem.dtype == DType::kFloat32) return run_contained(op, problem, planned.plan, pointers, stream);
  if (problem.dtype == DType::kFloat16) return run<Half>(problem, planned.plan, pointers, stream);
  return run<BFloat16>(problem, planned.plan, pointers, stream);
}

#endif  // launchers

inline void describe(const Problem& problem, Operator, char* text, size_t text_size) {
  const Plan& plan = plan_of(problem, Alignment{}).plan;
  snprintf(text, text_size,
           "%s%s%stile of %d output channels x %d blocks of 64 weights, %d stages of 64 pixels and %d bytes, %d blocks "
           "for %d tiles in %d parts, about %.3g Mcycles",
           plan.fp16_parts == 2 ? "two parts of scaled fp16, " : plan.fp16_parts == 1 ? "scaled fp16, " : "",
           plan.copies_x && plan.copies_dy ? "x and dy copied, "
           : plan.copies_x                 ? "x copied, "
           : plan.copies_dy                ? "dy copied, "
                                           : "",
           plan.planes ? "planes, " : "", plan.channels, plan.blocks, plan.stages, plan.stage_bytes, plan.grid,
           plan.tiles_k * plan.tiles_e, plan.parts, plan.cycles * 1e-6);
}

#endif  // host

}  // namespace tma_wgrad

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
extern const Engine kTmaWgradEngine{"tma_wgrad",         tma_wgrad::refusal, tma_wgrad::workspace_bytes,
                                    tma_wgrad::launch,   tma_wgrad::describe, tma_wgrad::yields,
                                    tma_wgrad::cycles};
#endif

}  // namespace modelnew
