// Copies of fp32 tensors in scaled fp16 (contained operands: docs/glossary.md, numerics.cuh), [part][pixel][channel].
//
//   sample            some values of a tensor -> its scale, a power of two
//   contain_points    the tensor -> the copy, and a list of the values that do not fit, which are zeros there
//
// With too many values on the list (kMostListed), or without a scale, a call does without the copy: other kernels,
// which the host launches in any case, compute it then.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <algorithm>
#endif

#include "contained.cuh"
#include "correlation.cuh"
#include "divisor.cuh"
#include "numerics.cuh"
#include "problem.cuh"
#include "ptx.cuh"

namespace modelnew {
namespace contained {

// At a stride of 2 a copy of x may hold its even and odd rows and columns apart, as channels: then the filter moves
// over them without a stride, as a smaller one of R x S, and of each phase only some taps are not zero. Where channels
// of x itself are neighbours, boxes at a stride take its phases apart without a copy: number i of the rows or columns
// of a phase is number 2 * i + phase of x.
//
//   x            phases          taps of a 3x3 filter, padding 1
//   a b a b      a a   b b       a: the middle one     b: left, right
//   c d c d      a a   b b       c: above, below       d: the corners
//   a b a b
//   c d c d      c c   d d
//                c c   d d
struct Phases {
  int rows, columns;     // 1 and 1, or 2 and 2
  int first_r[2], r[2];  // of the phase of rows: its first tap among the R, and how many there are
  int first_s[2], s[2];  // of columns
  int taps, before[4];   // of all phases, of those before each
};

// A problem as it is multiplied.
struct Phased : Correlation {
  int merged;  // groups of the filter in one of these, whose channels follow one another; otherwise 1
  Phases phases;
};

// Numbers below 2^32 have a division that is several times faster.
MODELNEW_HOST_DEVICE inline int64_t divide(int64_t number, int64_t by) {
  if ((number | by) >> 32 == 0) return static_cast<uint32_t>(number) / static_cast<uint32_t>(by);
  return number / by;
}

MODELNEW_HOST_DEVICE inline int phases_of(const Phases& phases) { return phases.rows * phases.columns; }

// Copies x before it is read. A copy is so small that numbers of its values are ints.
struct CopyParams {
  const void* in_ptr;
  void* out_ptr;
  Phased of;                   // of what is copied: 1x1, and its outputs are the pixels of the copy
  Phases phases;               // of which the copy holds one beside the other, as channels
  int channels;                // of a pixel of the copy
  int channel_blocks, blocks;  // none: x is read as it is
  Divisor by_rows, by_columns, by_channel_blocks;
};

// A value of x that does not fit: (number of a pixel of the copy) * channels + channel, also where there is none, and
// what it is.
struct Listed {
  int place;
  float value;
};

constexpr int kPackThreads = 256, kSampleBlocks = 32, kSamples = 1 << 16;
constexpr int kCopySide = 64;  // pixels and channels of a block

// Where that lies in the workspace.
struct Guard {
  ContainedControl* control;  // null where nothing is contained
  uint32_t* samples;          // of each sampling block, the largest finite magnitude of x that it saw, as bits
  Listed* list;
  float* w_factors;  // of each row of packed weights: what undoes its scale
};

struct SampleParams {
  const void* in_ptr;
  const void* fours_ptr;  // of values of x, if it has no gaps: so many
  int64_t fours;          // or 0
  Phased of;
  Guard guard;
};

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

template <typename Stored>
using CopyShared = Stored[kCopySide][kCopySide + 1];

// Where a pixel of the copy, in one of its phases, lies in x.
struct SourcePixel {
  int n, h, w;
};

__device__ __forceinline__ SourcePixel source_pixel(const CopyParams& params, int pixel, int phase) {
  const Phased& of = params.of;
  const int line = quotient(pixel, params.by_columns), image = quotient(line, params.by_rows);
  const int log_columns = params.phases.columns - 1;
  return {image, (line - image * of.P) * of.stride_h - of.pad_h + (phase >> log_columns),
          (pixel - line * of.Q) * of.stride_w - of.pad_w + (phase & log_columns)};
}

// Its first channel; null if it is padding, or none.
template <typename Stored>
__device__ __forceinline__ const Stored* source_of(const CopyParams& params, int pixel, int phase = 0) {
  const Phased& of = params.of;
  const SourcePixel at = source_pixel(params, pixel, phase);
  if (at.n >= of.N || at.h < 0 || at.h >= of.H || at.w < 0 || at.w >= of.W) return nullptr;
  return static_cast<const Stored*>(params.in_ptr) + at.n * of.in_stride[0] + at.h * of.in_stride[2] +
         at.w * of.in_stride[3];
}

// Places all over a tensor, the same in every call: of values without gaps by fours, each drawn from its part of all of
// them; else rows at even distances, a column drawn for each. A kernel of its own is faster than the first blocks of
// one that contains (docs/lab/gather.md).
__device__ __forceinline__ void sample(const SampleParams& params, int block, uint32_t& largest) {
  hopper::wait_for_prerequisites();  // whoever wrote the tensor
  hopper::launch_dependents();
  const Phased& of = params.of;
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kEach = kSamples / kSampleBlocks / kPackThreads;
  uint32_t words[kEach];
  if (params.fours > 0) {
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      const uint32_t number = (i / 4 * kSampleBlocks + block) * kPackThreads + thread, drawn = number * 0x9e3779b9u;
      const uint64_t fours = params.fours, part = fours / (kSamples / 4);
      const uint64_t place = number * fours / (kSamples / 4) + (drawn * part >> 32);
      const uint4 four = static_cast<const uint4*>(params.fours_ptr)[place];
      words[i] = four.x;
      words[i + 1] = four.y;
      words[i + 2] = four.z;
      words[i + 3] = four.w;
    }
  } else {
    const int64_t channels = static_cast<int64_t>(of.groups) * of.in_channels;
    const uint64_t rows = of.N * channels * of.H;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t number = (i * kSampleBlocks + block) * kPackThreads + thread;
      const uint32_t drawn = number * 0x9e3779b9u ^ number >> 7;
      const uint64_t row = (number * rows + drawn % kSamples * rows / kSamples) / kSamples;
      const int64_t line = divide(static_cast<int64_t>(row), of.H), image = divide(line, channels);
      const int64_t column = static_cast<uint64_t>(drawn * 0x85ebca6bu) * of.W >> 32;
      words[i] = static_cast<const uint32_t*>(
          params.in_ptr)[image * of.in_stride[0] + (line - image * channels) * of.in_stride[1] +
                         (static_cast<int64_t>(row) - line * of.H) * of.in_stride[2] + column * of.in_stride[3]];
    }
  }
  if (block == 0 && thread == 0) *params.guard.control = ContainedControl{};
  if (thread == 0) largest = 0;
  __syncthreads();  // it is zero
  uint32_t magnitude = 0;
#pragma unroll
  for (uint32_t word : words) {
    const uint32_t of_word = word & 0x7fffffff;
    if (of_word < 0x7f800000) magnitude = max(magnitude, of_word);
  }
  magnitude = hopper::warp_max(magnitude);
  if (thread % 32 == 0) atomicMax(&largest, magnitude);
  __syncthreads();  // all have been seen
  if (thread == 0) params.guard.samples[block] = largest;
}

// The scale of x, two to the power of `exponent`: room for four times as much as the sample has. Of nothing but zeros
// there any scale will do. False: there is none. Before they wait for it, blocks load what they contain, and pack
// weights: sample_kernel lets them start when all that was launched before this call has ended.
__device__ __forceinline__ bool find_scale(const Guard& guard, int& exponent) {
  static_assert(kSampleBlocks == 32, "one of each lane");
  hopper::wait_for_prerequisites();
  const uint32_t magnitude = hopper::warp_max(guard.samples[threadIdx.x % 32]);
  return scale_exponent(magnitude >> 23, 13, exponent) || magnitude == 0;
}

using ContainShared = uint32_t[kCopySide][kCopySide / 2 + 1];  // pairs of channels

// Whether a value fits into so many parts of scaled fp16.
__device__ __forceinline__ bool does_fit(float value, int x_exponent, int parts) {
  const uint32_t bits = float_bits(value);
  const float scale = power_of_two(x_exponent);
  Watch watch;
  watch.see(bits);
  watch.see_contained(parts == 1 ? contain_pair(bits, 0, scale) : split_pair(bits, 0, scale));
  return watch.fits(least_contained(x_exponent, parts));
}

// Puts a value on the list. `place` is that in the copy, or in the one that would be made.
__device__ __forceinline__ void list_misfit(const Guard& guard, float value, int place) {
  // Once there are too many, all waits for a place on the list would be for nothing.
  if (*static_cast<volatile uint32_t*>(&guard.control->listed) > kMostListed) return;
  const uint32_t number = atomicAdd(&guard.control->listed, 1u);
  if (number < kMostListed) guard.list[number] = {place, value};
}

// How many places on the list come before this one. The list is in no order; that of places fixes the order of sums.
__device__ __forceinline__ int listed_before(const Guard& guard, int count, int place) {
  int before = 0;
#pragma unroll 8
  for (int i = 0; i < count; ++i) before += guard.list[i].place < place;
  return before;
}

// A block takes 64 rows of 64 channels of the copy, a thread eight pairs of channels. VECTOR, of values that lie side
// by side in x and are loaded at once: 8 channels, as in the copy; or 4, 2 or 1 columns, of which a warp has
// neighbours, and which change threads. A row is a pixel; of two columns one of the phase of odd ones follows each. Of
// two PARTS of a value, the second one lies so many values (`rests`) behind the first.
template <int VECTOR, int PARTS = 1>
__device__ __forceinline__ void contain_points(const CopyParams& copy, const Guard& guard, int block,
                                               ContainShared& shared, int64_t rests = 0) {
  const Phased& of = copy.of;
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kRowsOfPixel = VECTOR == 2 ? 2 : 1;
  const int pixel_block = quotient(block, copy.by_channel_blocks);
  const int first_pixel = pixel_block * (kCopySide / kRowsOfPixel);
  const int channel_block = block - pixel_block * copy.channel_blocks;
  int first_channel = channel_block * kCopySide, phase = 0, phase_channels = 0;  // of x, of one phase
  if (phases_of(copy.phases) > 1) {
    phase_channels = copy.channels / phases_of(copy.phases);
    phase = first_channel / phase_channels;
    first_channel -= phase * phase_channels;
    phase *= kRowsOfPixel;
  }
  constexpr int kPairs = kCopySide * kCopySide / kPackThreads / 2;
  // The row of pair i, and its first channel in there.
  const auto row_of = [&](int i) {
    return VECTOR == 8   ? thread / 8 + i / 4 * 32
           : VECTOR == 4 ? thread % 16 * 4 + i % 4
           : VECTOR == 2 ? thread % 32 * 2 + i % 2
                         : thread % kCopySide;
  };
  const auto channel_of = [&](int i) {
    return VECTOR == 8   ? thread % 8 * 8 + i % 4 * 2
           : VECTOR == 4 ? thread / 16 * 4 + i / 4 * 2
           : VECTOR == 2 ? thread / 32 * 8 + i / 2 * 2
                         : 2 * (thread / kCopySide + 4 * i);
  };
  const auto source_of_row = [&](int row) {
    return source_of<float>(copy, first_pixel + row / kRowsOfPixel, phase + row % kRowsOfPixel);
  };
  const auto place_of = [&](int row, int channel) {
    const int place = (first_pixel + row / kRowsOfPixel) * copy.channels + first_channel + channel;
    return place + (phase + row % kRowsOfPixel) * phase_channels;
  };
  uint32_t words[2 * kPairs];
  const auto load_four = [](const float* from, bool exists) {
    return exists ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  };
  if constexpr (VECTOR == 8) {
#pragma unroll
    for (int i = 0; i < kPairs; i += 4) {
      const int channel = first_channel + channel_of(i);
      const float* const from = source_of_row(row_of(i));
      const bool exists = from != nullptr && channel < of.in_channels;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint4 four = load_four(from + channel + 4 * j, exists);
        words[2 * i + 4 * j] = four.x;
        words[2 * i + 4 * j + 1] = four.y;
        words[2 * i + 4 * j + 2] = four.z;
        words[2 * i + 4 * j + 3] = four.w;
      }
    }
  } else {
    const float* const row = source_of_row(row_of(0));
    const int channel = first_channel + channel_of(0);
    const float* from = row + channel * of.in_stride[1];
    const int left = row == nullptr ? 0 : of.in_channels - channel;
    if constexpr (VECTOR == 4) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const uint4 four = load_four(from, c < left);
        uint32_t* const first = words + c / 2 * 8 + c % 2;
        first[0] = four.x;
        first[2] = four.y;
        first[4] = four.z;
        first[6] = four.w;
        from += of.in_stride[1];
      }
    } else if constexpr (VECTOR == 2) {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        uint2 two = make_uint2(0, 0);
        if (c < left) two = *reinterpret_cast<const uint2*>(from);
        words[c / 2 * 4 + c % 2] = two.x;
        words[c / 2 * 4 + c % 2 + 2] = two.y;
        from += of.in_stride[1];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        words[2 * i] = 8 * i < left ? float_bits(from[0]) : 0;
        words[2 * i + 1] = 8 * i + 1 < left ? float_bits(from[of.in_stride[1]]) : 0;
        from += 8 * of.in_stride[1];
      }
    }
  }
  int x_exponent;
  if (!find_scale(guard, x_exponent) && thread == 0) guard.control->all_again = 1;
  const float scale = power_of_two(x_exponent);
  uint32_t pairs[kPairs];
  Watch watch;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    watch.see(words[2 * i]);
    watch.see(words[2 * i + 1]);
    pairs[i] = PARTS == 1 ? contain_pair(words[2 * i], words[2 * i + 1], scale)
                          : split_pair(words[2 * i], words[2 * i + 1], scale);
    watch.see_contained(pairs[i]);
  }
  const bool fits = watch.fits(least_contained(x_exponent, PARTS));
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    Half* const out = static_cast<Half*>(copy.out_ptr) + part * rests;
    const auto store_eights = [&](const uint32_t (&stored)[kPairs]) {
      const int pixels = static_cast<int>(of.N) * of.P * of.Q, channel = thread % 8 * 8;
      const bool exists = phase_channels > 0 || first_channel + channel < copy.channels;  // phases are whole blocks
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = thread / 8 + 32 * i;
        if (exists && first_pixel + row / kRowsOfPixel < pixels)
          reinterpret_cast<uint4*>(out)[place_of(row, channel) / 8] =
              make_uint4(stored[4 * i], stored[4 * i + 1], stored[4 * i + 2], stored[4 * i + 3]);
      }
    };
    if (part == 1) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) pairs[i] = split_rest(words[2 * i], words[2 * i + 1], scale, pairs[i]);
    }
    if constexpr (VECTOR == 8) {
      store_eights(pairs);
    } else {
      if (part == 1) __syncthreads();  // all have read the first parts
#pragma unroll
      for (int i = 0; i < kPairs; ++i) shared[row_of(i)][channel_of(i) / 2] = pairs[i];
    }
    if (!fits) {
      // Values that do not fit become zero. They are loaded once more, four at a time, as to keep them costs registers.
#pragma unroll 1
      for (int first = 0; first < 2 * kPairs; first += 4) {
        float values[4];
        const auto visit = [&](const auto& use) {
#pragma unroll
          for (int j = 0; j < 4; ++j) use(j, row_of((first + j) / 2), channel_of((first + j) / 2) + j % 2);
        };
        visit([&](int j, int row, int channel) {
          const float* const from = source_of_row(row);
          const bool exists = from != nullptr && first_channel + channel < of.in_channels;
          values[j] = exists ? from[(first_channel + channel) * of.in_stride[1]] : 0;
        });
        visit([&](int j, int row, int channel) {
          if (does_fit(values[j], x_exponent, PARTS)) return;
          if (part == 0) list_misfit(guard, values[j], place_of(row, channel));
          if constexpr (VECTOR == 8)
            out[place_of(row, channel)] = Half{};
          else
            reinterpret_cast<Half*>(shared[row])[channel] = Half{};
        });
      }
    }
    if constexpr (VECTOR != 8) {
      __syncthreads();  // all of it is there
      uint32_t stored[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) stored[i] = shared[thread / 8 + i / 4 * 32][thread % 8 * 4 + i % 4];
      store_eights(stored);
    }
  }
}

#endif  // device code

inline Phases unphased(const Correlation& of) {
  return {1, 1, {0, 0}, {of.R, 0}, {0, 0}, {of.S, 0}, of.R * of.S, {}};
}

// Steps to neighbours along rows and columns that make the image a row of pixels, and fours of them aligned.
inline bool dense_fours(const int64_t (&stride)[4], int rows, int columns, int64_t images, int channels) {
  return stride[3] == 1 && (stride[2] == columns || rows == 1) && static_cast<int64_t>(rows) * columns % 4 == 0 &&
         (stride[1] % 4 == 0 || channels == 1) && (stride[0] % 4 == 0 || images == 1);
}

// 1x1, and output number i reads pixel number i.
inline bool dense_points_of(const Phased& of) {
  return of.R == 1 && of.S == 1 && of.stride_h == 1 && of.stride_w == 1 && of.pad_h == 0 && of.pad_w == 0 &&
         of.H == of.P && of.W == of.Q;
}

// `copy`: what is copied of `of`, its sizes and channels.
inline CopyParams copy_params(const Phased& of, const Phased& copy, const void* in_ptr, void* copy_ptr) {
  const int channels = copy.groups * copy.in_channels;
  CopyParams params{in_ptr, copy_ptr, of, copy.phases, channels, static_cast<int>(ceil_div(channels, kCopySide)),
                    0,      {},       {}, {}};
  params.of.in_channels = of.groups * of.in_channels;
  params.of.groups = 1;
  if (of.R * of.S > 1) {
    const bool phased = phases_of(copy.phases) > 1;
    params.of.R = params.of.S = 1;
    params.of.stride_h = params.of.stride_w = phased ? 2 : 1;
    params.of.pad_h = phased ? (of.pad_h + 1) / 2 * 2 : 0;
    params.of.pad_w = phased ? (of.pad_w + 1) / 2 * 2 : 0;
    params.of.P = copy.H;
    params.of.Q = copy.W;
  }
  params.blocks = static_cast<int>(ceil_div(of.N * params.of.P * params.of.Q, kCopySide)) * params.channel_blocks;
  params.by_rows = make_divisor(params.of.P);
  params.by_columns = make_divisor(params.of.Q);
  params.by_channel_blocks = make_divisor(params.channel_blocks);
  return params;
}

// How many values these are if they lie side by side in memory, in any order; or 0.
template <int COUNT>
int64_t values_side_by_side(const int64_t (&sizes)[COUNT], const int64_t (&strides)[COUNT]) {
  int64_t values = 1;
  for (int i = 0; i < COUNT; ++i) {
    for (int j = 0; j < COUNT; ++j) {
      if (sizes[j] > 1 && strides[j] == values) {
        values *= sizes[j];
        break;
      }
    }
  }
  int64_t all = 1;
  for (int64_t size : sizes) all *= size;
  return values == all ? values : 0;
}

inline SampleParams sample_params(const Phased& of, const void* in_ptr, const Guard& guard) {
  SampleParams params{in_ptr, nullptr, 0, of, guard};
  const int64_t sizes[] = {of.N, int64_t{of.groups} * of.in_channels, of.H, of.W};
  const int64_t before_fours = (16 - reinterpret_cast<uint64_t>(in_ptr) % 16) % 16 / 4;
  if (const int64_t values = values_side_by_side(sizes, of.in_stride)) {
    params.fours_ptr = static_cast<const float*>(in_ptr) + before_fours;
    params.fours = std::max<int64_t>(values - before_fours, 0) / 4;
  }
  return params;
}

// Values that lie side by side in the tensor and are loaded at once: see contain_points. Two columns are of two phases,
// which a block then has both of.
inline int vector_of(CopyParams& copy) {
  const Phased& of = copy.of;
  const uint64_t address = reinterpret_cast<uint64_t>(copy.in_ptr);
  const auto multiples = [&](int of_what) {
    return of.in_stride[0] % of_what == 0 && of.in_stride[2] % of_what == 0 && address % (4 * of_what) == 0;
  };
  if (of.in_stride[1] == 1 && of.in_channels % 8 == 0 && multiples(4) && of.in_stride[3] % 4 == 0) return 8;
  if (address % 16 == 0 && dense_points_of(of) && dense_fours(of.in_stride, of.H, of.W, of.N, of.in_channels)) return 4;
  if (phases_of(copy.phases) == 1 || of.in_stride[3] != 1 || of.W % 2 != 0 || !multiples(2) || of.in_stride[1] % 2 != 0)
    return 1;
  copy.channel_blocks /= 2;  // of a phase of rows
  copy.by_channel_blocks = make_divisor(copy.channel_blocks);
  copy.blocks = static_cast<int>(ceil_div(of.N * of.P * of.Q, kCopySide / 2)) * copy.channel_blocks;
  return 2;
}

}  // namespace contained
}  // namespace modelnew
