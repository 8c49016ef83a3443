// strided engine: the gradient to the input where the filter leaves out positions. Other engines compute parts of the
// problem, which have a stride of 1.
//
// Rows of dx that are a stride apart, a phase, are met by the same taps (out_phases.cuh):
//
//   dx[a + stride*i] = sum over j of dy[i + pad' - j*dilation'] w[first + step*j]
//
// and that is the gradient of a convolution without a stride, with every step-th tap of the filter. The same goes for
// columns; a phase of both is a part. Phases that no tap meets, as with 1x1 filters, are idle: zeros. If there are any,
// a kernel writes them once the parts are there (stride 2, 1x1; A is the only part):
//
//   dx in channels_last: A lies in place         dx in dense NCHW: A is a dense image in the workspace
//
//   A 0 A 0    the kernel writes the pixels      A A  ->  A 0 A 0    the kernel writes all of dx, since every other
//   0 0 0 0    of idle phases alone              A A      0 0 0 0    column would cost as much
//
// Images come in slices, should dx exceed 1 GB where it is written from dense parts.
//
// tma and gather have phases in one launch (up to four, each met by some tap); these are the other problems.
//
// Bound by memory: parts that are several read dy anew, each, and store every stride-th column of dx alone.
// Measurements: docs/lab/lowering.md.
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstdio>

#include "choice.cuh"
#include "engines.cuh"
#include "out_phases.cuh"
#endif

#include "divisor.cuh"
#include "problem.cuh"
#include "ptx.cuh"

namespace modelnew {
namespace strided {

constexpr int kMostParts = 16, kThreads = 256, kVectorBytes = 16, kPixels = 8;  // of a thread
constexpr int kSpreadBytes = 16384, kBatch = 4;  // of a block, and values that a thread loads at once

// dx as lines, [image][row][pixel][value], of which a thread has the same few values of some pixels.
struct Fill {
  void* dx_ptr;
  bool met[kMostParts];              // phases that are there
  int64_t image, row, pixel, value;  // steps in dx
  int lines, pixels, values;         // lines of all images, pixels of a line, values of a pixel
  Divisor by_vectors, by_chunks, by_rows, by_stride_h, by_stride_w;
};

// dx as values one behind another: planes without gaps. A block writes kSpreadBytes of them.
struct Spread {
  void* dx_ptr;
  const void* part_ptr[kMostParts];  // of a phase: dense [image][channel][row][column]; null if it is idle
  Divisor by_row[kMostParts], by_plane[kMostParts];  // columns and rows of a part
  int values;
  bool aligned;  // the address of dx is a multiple of 16
  Divisor by_dx_row, by_dx_plane, by_stride_h, by_stride_w;
};

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// Writes zeros to the pixels of idle phases. WHOLE: pixels are whole vectors.
template <typename Value, int VECTOR, bool WHOLE>
__global__ void __launch_bounds__(kThreads) strided_fill_kernel(const __grid_constant__ Fill params) {
  struct alignas(WHOLE ? VECTOR * sizeof(Value) : sizeof(Value)) Vector {
    Value values[VECTOR];
  };
  const int stride_h = static_cast<int>(params.by_stride_h.divisor);
  const int stride_w = static_cast<int>(params.by_stride_w.divisor);
  const int chunks = static_cast<int>(params.by_chunks.divisor);
  const int number = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const int of_lines = quotient(number, params.by_vectors), line = quotient(of_lines, params.by_chunks);
  const int first = (number - of_lines * static_cast<int>(params.by_vectors.divisor)) * VECTOR;
  if (line >= params.lines) return;
  const int n = quotient(line, params.by_rows), h = line - n * static_cast<int>(params.by_rows.divisor);
  const int phase_h = h - quotient(h, params.by_stride_h) * stride_h;
  Value* const to = static_cast<Value*>(params.dx_ptr) + n * params.image + h * params.row + first * params.value;
  hopper::wait_for_prerequisites();
#pragma unroll 1
  for (int w = of_lines - line * chunks; w < params.pixels; w += chunks) {
    if (params.met[phase_h * stride_w + w - quotient(w, params.by_stride_w) * stride_w]) continue;
    if constexpr (WHOLE) {
      *reinterpret_cast<Vector*>(to + w * params.pixel) = Vector{};
    } else {
#pragma unroll
      for (int j = 0; j < VECTOR; ++j)
        if (first + j < params.values) to[w * params.pixel + j * params.value] = 0;
    }
  }
}

// Writes all of dx: zeros in shared memory, the values of met phases between them, then all of it by vectors.
template <typename Value>
__global__ void __launch_bounds__(kThreads) strided_spread_kernel(const __grid_constant__ Spread params) {
  constexpr int kValues = kSpreadBytes / sizeof(Value);
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  Value* const staged = reinterpret_cast<Value*>(modelnew_smem);
  const auto size_of = [](const Divisor& by) { return static_cast<int>(by.divisor); };
  const int stride_h = size_of(params.by_stride_h), stride_w = size_of(params.by_stride_w);
  const int width = size_of(params.by_dx_row), height = size_of(params.by_dx_plane);
  const int first = static_cast<int>(blockIdx.x) * kValues, count = min(params.values - first, kValues);
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < kSpreadBytes / 16; i += kThreads) reinterpret_cast<uint4*>(staged)[i] = uint4{};
  hopper::wait_for_prerequisites();
  __syncthreads();
#pragma unroll 1
  for (int phase = 0; phase < stride_h * stride_w; ++phase) {
    const Value* const part = static_cast<const Value*>(params.part_ptr[phase]);
    if (part == nullptr) continue;
    const int phase_h = quotient(phase, params.by_stride_w), phase_w = phase - phase_h * stride_w;
    const int columns = size_of(params.by_row[phase]), rows = size_of(params.by_plane[phase]);
    // Values of the part in front of a value of dx.
    const auto values_before = [&](int number) {
      const int line = quotient(number, params.by_dx_row), plane = quotient(line, params.by_dx_plane);
      const int h = line - plane * height, row = quotient(h + stride_h - 1 - phase_h, params.by_stride_h);
      const int column = quotient(number - line * width + stride_w - 1 - phase_w, params.by_stride_w);
      return (plane * rows + row) * columns + (row * stride_h + phase_h == h ? column : 0);
    };
    const int end = values_before(first + count);
#pragma unroll 1
    for (int next = values_before(first) + thread; next < end; next += kBatch * kThreads) {
      Value values[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) values[j] = part[min(next + j * kThreads, end - 1)];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int number = min(next + j * kThreads, end - 1);  // the last one may come twice
        const int row = quotient(number, params.by_row[phase]), plane = quotient(row, params.by_plane[phase]);
        const int line = plane * height + (row - plane * rows) * stride_h + phase_h;
        staged[line * width + (number - row * columns) * stride_w + phase_w - first] = values[j];
      }
    }
  }
  __syncthreads();
  Value* const to = static_cast<Value*>(params.dx_ptr) + first;
  if (params.aligned && count == kValues) {
#pragma unroll
    for (int i = thread; i < kSpreadBytes / 16; i += kThreads)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(staged)[i];
    return;
  }
  for (int i = thread; i < count; i += kThreads) to[i] = staged[i];
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// Tried in this order, that of all engines.
const Engine* const kTakers[] = {&kDilatedEngine, &kTmaEngine,       &kWgmmaEngine,     &kGatherEngine,
                                 &kStemEngine,    &kDepthwiseEngine, &kPointwiseEngine, &kMmaEngine};

// A part of a problem, and from where on in dx (or the workspace, if it is dense) and w, in elements.
struct Part {
  Problem problem;
  int64_t x, w;
  int phase;
};

// A phase of one axis: its rows of dx, and the taps that meet them.
struct Phase {
  int rows, taps, first, step, pad, dilation;
};

inline Phase phase_of(int number, int size, int taps, int stride, int pad, int dilation) {
  const AxisPhase of = axis_phase(number, size, taps, int64_t{dilation} * (taps - 1) - pad, dilation, stride);
  const int others = std::max(of.taps - 1, 0);
  const int first = taps - 1 - of.first - others * of.step;
  const int64_t taken_pad = int64_t{others} * of.dilation + of.row;
  return {of.outputs, of.taps, first, of.step, static_cast<int>(taken_pad), of.dilation};
}

// The phases of dx: no more than rows and columns.
struct Phases {
  int rows, columns;
  Phase row[kMostParts], column[kMostParts];

  explicit Phases(const Problem& p)
      : rows(p.P == 1 ? 1 : std::min(p.stride_h, p.H)), columns(p.Q == 1 ? 1 : std::min(p.stride_w, p.W)) {
    if (!fit()) return;
    for (int a = 0; a < rows; ++a)
      row[a] = phase_of(a, p.H, p.R, taken_stride(p.stride_h, p.P), p.pad_h, p.dilation_h);
    for (int b = 0; b < columns; ++b)
      column[b] = phase_of(b, p.W, p.S, taken_stride(p.stride_w, p.Q), p.pad_w, p.dilation_w);
  }
  bool fit() const { return int64_t{rows} * columns <= kMostParts; }
  bool is_idle(int a, int b) const { return row[a].taps == 0 || column[b].taps == 0; }
  int idle() const {
    int count = 0;
    for (int i = 0; i < rows * columns; ++i) count += is_idle(i / columns, i % columns);
    return count;
  }
};

// Elements of a dense part, such that the next one begins at a multiple of 256 bytes.
inline int64_t dense_values(const Problem& part) { return ceil_div(part.N * part.C * part.H * part.W, 128) * 128; }

constexpr int64_t kMostDenseBytes = kMostCopiedBytes;  // of dx that is written from dense parts, but for one image
constexpr int64_t kMostSpreadValues = 0x40000000;      // of such an image

// Whether all of dx is written, from dense parts: planes without gaps that have idle phases.
inline bool has_dense_parts(const Problem& p, const Phases& phases) {
  const auto is = [](int64_t size, int64_t stride, int64_t dense) { return size == 1 || stride == dense; };
  const int64_t row = p.W, plane = p.H * row, (&step)[4] = p.x_stride;
  const bool planes =
      is(p.N, step[0], p.C * plane) && is(p.C, step[1], plane) && is(p.H, step[2], row) && is(p.W, step[3], 1);
  return planes && phases.idle() > 0 && p.C * plane <= kMostSpreadValues;
}

constexpr int64_t kMostThreads = (int64_t{1} << 31) - kThreads;

// Threads that fill an image, at most.
inline int64_t threads_of_image(const Problem& p) { return p.H * ceil_div(p.W, kPixels) * ceil_div(p.C, 2); }

// Calls use(slice, its first image) for as many images as may have dense parts, and as many threads as a launch may
// have; use returns whether to go on. Returns whether all did.
template <typename Use>
bool for_each_slice(const Problem& problem, const Phases& phases, const Use& use) {
  int64_t most = problem.N;
  if (phases.idle() > 0) most = std::clamp<int64_t>(kMostThreads / threads_of_image(problem), 1, most);
  if (has_dense_parts(problem, phases)) {
    const int64_t bytes = int64_t{problem.C} * problem.H * problem.W * element_bytes(problem.dtype);
    most = std::clamp<int64_t>(kMostDenseBytes / bytes, 1, most);
  }
  most = ceil_div(problem.N, ceil_div(problem.N, most));  // all of about the same size
  for (int64_t first = 0; first < problem.N; first += most) {
    Problem slice = problem;
    slice.N = std::min(most, problem.N - first);
    if (!use(slice, first)) return false;
  }
  return true;
}

// Calls use(part) for each of them, which return whether to go on; and returns whether all did.
template <typename Use>
bool for_each_part(const Problem& p, const Phases& phases, const Use& use) {
  const bool tf32 = uses_tf32(p, Operator::kDgrad), dense = has_dense_parts(p, phases);
  int64_t workspace = 0;
  for (int i = 0; i < phases.rows * phases.columns; ++i) {
    const int a = i / phases.columns, b = i % phases.columns;
    const Phase &row = phases.row[a], &column = phases.column[b];
    if (phases.is_idle(a, b)) continue;
    Part part{p, a * p.x_stride[2] + b * p.x_stride[3], row.first * p.w_stride[2] + column.first * p.w_stride[3], i};
    Problem& of = part.problem;
    of.H = row.rows;
    of.W = column.rows;
    of.R = row.taps;
    of.S = column.taps;
    of.stride_h = of.stride_w = 1;
    of.pad_h = row.pad;
    of.pad_w = column.pad;
    of.dilation_h = row.dilation;
    of.dilation_w = column.dilation;
    of.x_stride[2] *= taken_stride(p.stride_h, p.P);
    of.x_stride[3] *= taken_stride(p.stride_w, p.Q);
    of.w_stride[2] *= row.step;
    of.w_stride[3] *= column.step;
    of.tf32_allowed = tf32;  // of parts, if they are not too small for it
    if (dense) {
      part.x = workspace;
      workspace += dense_values(of);
      of.x_stride[3] = 1;
      of.x_stride[2] = of.W;
      of.x_stride[1] = int64_t{of.H} * of.W;
      of.x_stride[0] = of.C * of.x_stride[1];
    }
    if (!use(part)) return false;
  }
  return true;
}

inline const Engine* taker_of(const Problem& problem) {
  thread_local Memo<const Engine*> memo;
  return first_of(kTakers, problem, Operator::kDgrad, memo);
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (op != Operator::kDgrad) return "it computes input gradients only";
  if (problem.dtype == DType::kFloat64) return "it has no float64";
  if (!has_stride(problem)) return "it requires a stride greater than 1 along an axis with more than one output";
  const Phases phases(problem);
  if (!phases.fit()) return "it splits the input into at most 16 phases, stride_h times stride_w";
  if (phases.idle() > 0 && threads_of_image(problem) > kMostThreads) return "it fills images of up to 2^31 vectors";
  const bool taken = for_each_slice(problem, phases, [&](const Problem& slice, int64_t) {
    return for_each_part(slice, phases, [](const Part& part) {
      return part.problem.pad_h >= 0 && part.problem.pad_w >= 0 && taker_of(part.problem) != nullptr;
    });
  });
  return taken ? nullptr : "it splits the problem into parts, and no other engine computes one of them";
}

// Multiply-adds from which parts are preferred to direct; fewer are untested with fp32 (docs/lab/lowering.md).
constexpr double kLeastWork = 1 << 28, kLeastWorkOf16Bits = 1 << 26, kLeastWorkByTma = 1 << 20;

// Factor of the least work with more than four parts: the cube of their number over four (docs/lab/lowering.md).
inline double factor_of_parts(int parts) {
  const double ratio = parts > 4 ? parts / 4.0 : 1;
  return ratio * ratio * ratio;
}

inline double least_work(const Problem& problem) {
  if (problem.dtype == DType::kFloat32) return kLeastWork;
  int parts = 0;
  bool by_tma = true;
  for_each_part(problem, Phases(problem), [&](const Part& part) {
    by_tma &= taker_of(part.problem) == &kTmaEngine;
    return ++parts > 0;
  });
  return (by_tma ? kLeastWorkByTma : kLeastWorkOf16Bits) * factor_of_parts(parts);
}

inline const char* yields(const Problem& problem, Operator) {
  if (problem.C / problem.groups < 8 || problem.K / problem.groups < 8) return "direct may be faster with few channels";
  return multiply_adds(problem) < least_work(problem) ? "direct may be faster with few multiply-adds" : nullptr;
}

// Null, as long as the workspace is not known, stands for an aligned address.
inline void* moved(const void* pointer, int64_t bytes) {
  return pointer == nullptr ? nullptr : static_cast<uint8_t*>(const_cast<void*>(pointer)) + bytes;
}

inline Pointers pointers_from(const Problem& p, int64_t image, const Pointers& pointers) {
  Pointers result = pointers;
  result.dy = moved(pointers.dy, image * p.y_stride[0] * element_bytes(p.dtype));
  result.out = moved(pointers.out, image * p.x_stride[0] * element_bytes(p.dtype));
  return result;
}

inline Pointers pointers_of(const Part& part, bool dense, int64_t dense_bytes, const Pointers& pointers) {
  const int bytes = element_bytes(part.problem.dtype);
  Pointers result = pointers;
  result.w = moved(pointers.w, part.w * bytes);
  result.out = moved(dense ? pointers.workspace : pointers.out, part.x * bytes);
  result.workspace = moved(pointers.workspace, dense_bytes);
  return result;
}

// Bytes of all dense parts, which come first in the workspace.
inline int64_t bytes_of_dense_parts(const Problem& problem, const Phases& phases) {
  int64_t values = 0;
  if (has_dense_parts(problem, phases))
    for_each_part(problem, phases, [&](const Part& part) { return (values += dense_values(part.problem)) > 0; });
  return values * element_bytes(problem.dtype);
}

inline int64_t workspace_bytes(const Problem& problem, Operator op, const Pointers& pointers) {
  const Phases phases(problem);
  int64_t most = 0;
  for_each_slice(problem, phases, [&](const Problem& slice, int64_t first) {
    const Pointers of_slice = pointers_from(problem, first, pointers);
    const int64_t dense_bytes = bytes_of_dense_parts(slice, phases);
    return for_each_part(slice, phases, [&](const Part& part) {
      const Engine* const taker = taker_of(part.problem);
      if (taker == nullptr) return false;
      const Pointers own = pointers_of(part, dense_bytes > 0, dense_bytes, of_slice);
      most = std::max(most, dense_bytes + taker->workspace_bytes(part.problem, op, own));
      return true;
    });
  });
  return most;
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// Values that a thread writes at once, as one vector if there is one that fits, else one by one.
template <typename Value, int VECTOR = kVectorBytes / sizeof(Value)>
cudaError_t run_fill(Fill& params, cudaStream_t stream) {
  constexpr int kApart = 4;
  const auto run = [&](auto kernel, int vector) {
    const int64_t vectors = ceil_div(params.values, vector), chunks = ceil_div(params.pixels, kPixels);
    params.by_vectors = make_divisor(vectors);
    params.by_chunks = make_divisor(chunks);
    const int64_t blocks = ceil_div(params.lines * chunks * vectors, kThreads);
    return hopper::launch_early(kernel, static_cast<unsigned>(blocks), kThreads, 0, stream, params);
  };
  const auto fits = [](int64_t step) { return step % VECTOR == 0; };
  if (params.value == 1 && fits(params.values) && fits(params.image) && fits(params.row) && fits(params.pixel) &&
      reinterpret_cast<uint64_t>(params.dx_ptr) % (VECTOR * sizeof(Value)) == 0)
    return run(strided_fill_kernel<Value, VECTOR, true>, VECTOR);
  if constexpr (VECTOR > 2) return run_fill<Value, VECTOR / 2>(params, stream);
  return run(strided_fill_kernel<Value, kApart, false>, kApart);
}

inline cudaError_t fill(const Problem& p, const Phases& phases, void* dx_ptr, cudaStream_t stream) {
  const int64_t (&step)[4] = p.x_stride;
  Fill params{dx_ptr, {}, step[0], step[2], step[3], step[1], static_cast<int>(p.N * p.H), p.W, p.C};
  for (int i = 0; i < phases.rows * phases.columns; ++i)
    params.met[i] = !phases.is_idle(i / phases.columns, i % phases.columns);
  params.by_rows = make_divisor(p.H);
  params.by_stride_h = make_divisor(phases.rows), params.by_stride_w = make_divisor(phases.columns);
  return p.dtype == DType::kFloat32 ? run_fill<uint32_t>(params, stream) : run_fill<uint16_t>(params, stream);
}

template <typename Value>
cudaError_t run_spread(const Spread& params, cudaStream_t stream) {
  const int64_t blocks = ceil_div(params.values, kSpreadBytes / static_cast<int>(sizeof(Value)));
  return hopper::launch_early(strided_spread_kernel<Value>, static_cast<unsigned>(blocks), kThreads, kSpreadBytes,
                              stream, params);
}

// One part behind another, in the same workspace.
inline cudaError_t launch_slice(Operator op, const Problem& problem, const Phases& phases, const Pointers& pointers,
                                cudaStream_t stream) {
  const int64_t dense_bytes = bytes_of_dense_parts(problem, phases);
  Spread params{};
  cudaError_t error = cudaSuccess;
  const bool all = for_each_part(problem, phases, [&](const Part& part) {
    const Engine* const taker = taker_of(part.problem);
    if (taker == nullptr) return false;
    const Pointers own = pointers_of(part, dense_bytes > 0, dense_bytes, pointers);
    params.part_ptr[part.phase] = own.out;
    params.by_row[part.phase] = make_divisor(part.problem.W);
    params.by_plane[part.phase] = make_divisor(part.problem.H);
    error = taker->launch(op, part.problem, own, stream);
    return error == cudaSuccess;
  });
  if (!all) return error != cudaSuccess ? error : cudaErrorInvalidConfiguration;
  if (phases.idle() == 0) return cudaSuccess;
  if (dense_bytes == 0) return fill(problem, phases, pointers.out, stream);
  params.dx_ptr = pointers.out;
  params.aligned = reinterpret_cast<uint64_t>(pointers.out) % kVectorBytes == 0;
  params.values = static_cast<int>(problem.N * problem.C * int64_t{problem.H} * problem.W);
  params.by_dx_row = make_divisor(problem.W), params.by_dx_plane = make_divisor(problem.H);
  params.by_stride_h = make_divisor(phases.rows), params.by_stride_w = make_divisor(phases.columns);
  return problem.dtype == DType::kFloat32 ? run_spread<uint32_t>(params, stream) : run_spread<uint16_t>(params, stream);
}

inline cudaError_t launch(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  const Phases phases(problem);
  cudaError_t error = cudaSuccess;
  for_each_slice(problem, phases, [&](const Problem& slice, int64_t first) {
    error = launch_slice(op, slice, phases, pointers_from(problem, first, pointers), stream);
    return error == cudaSuccess;
  });
  return error;
}

#endif  // launchers

inline void describe(const Problem& problem, Operator op, char* text, size_t text_size) {
  if (text_size > 0) *text = '\0';
  const Phases phases(problem);
  const int idle = phases.idle(), parts = phases.rows * phases.columns - idle;
  for_each_part(problem, phases, [&](const Part& part) {
    const Engine* const taker = taker_of(part.problem);
    const int written = snprintf(text, text_size, "%d parts%s, the first of %dx%d taps by %s: ", parts,
                                 idle > 0 ? " and zeros" : "", part.problem.R, part.problem.S,
                                 taker == nullptr ? "nobody" : taker->name);
    if (taker != nullptr && written > 0 && static_cast<size_t>(written) < text_size)
      taker->describe(part.problem, op, text + written, text_size - written);
    return false;
  });
}

#endif  // host

}  // namespace strided

#if (defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)) && !defined(__CUDACC_RTC__)
extern const Engine kStridedEngine{"strided",       strided::refusal,  strided::workspace_bytes,
                                   strided::launch, strided::describe, strided::yields};
#endif

}  // namespace modelnew
