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
//   dx in channels_last: A lies in place         dx in NCHW: A is a dense image in the workspace
//
//   A 0 A 0    the kernel writes the pixels      A A  ->  A 0 A 0    the kernel writes dx row by row, since every
//   0 0 0 0    of idle phases alone              A A      0 0 0 0    other column would cost as much as all
//
// Images come in slices, should their dense parts exceed 1 GB.
//
// tma and gather have phases in one launch (up to four, each met by some tap); these are the other problems.
//
// Bound by memory where parts are several: each reads dy anew and stores every stride-th column of dx alone.
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

constexpr int kMostParts = 16, kThreads = 256, kItems = 8;  // items of a thread

// dx as lines, [outer][line][item][value]: in NCHW image, channel, row and column; in channels_last image, row, column
// and channel. A thread has the same few values of some items of a line.
struct Fill {
  void* dx_ptr;
  const void* part_ptr[kMostParts];  // of a phase: dense [image][channel][row][column]; null if it is idle
  int rows[kMostParts], columns[kMostParts];
  int64_t outer, line, item, value;  // steps in dx
  int lines, items, values;          // lines of all images, items of a line, values of an item
  Divisor by_vectors, by_chunks, by_lines_of_image, by_stride_h, by_stride_w;
};

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// Writes zeros to idle phases (channels_last), or all of dx (PLANES). WHOLE: items are whole vectors.
template <typename Value, int VECTOR, bool WHOLE, bool PLANES>
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
  const int n = quotient(line, params.by_lines_of_image);
  const int of_image = line - n * static_cast<int>(params.by_lines_of_image.divisor);
  Value* const to = static_cast<Value*>(params.dx_ptr) + n * params.outer + of_image * params.line +
                    first * params.value;
  int column[VECTOR], phase_w[VECTOR];
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    column[j] = quotient(first + j, params.by_stride_w);
    phase_w[j] = first + j - column[j] * stride_w;
  }
  hopper::wait_for_prerequisites();
#pragma unroll 1
  for (int item = of_lines - line * chunks; item < params.items; item += chunks) {
    const int h = PLANES ? item : of_image, row = quotient(h, params.by_stride_h), phase_h = h - row * stride_h;
    Vector vector{};
    if constexpr (PLANES) {
#pragma unroll 1
      for (int b = 0; b < stride_w; ++b) {
        const int phase = phase_h * stride_w + b;
        const Value* part = static_cast<const Value*>(params.part_ptr[phase]);
        if (part == nullptr) continue;
        part += (static_cast<int64_t>(line) * params.rows[phase] + row) * params.columns[phase];
#pragma unroll
        for (int j = 0; j < VECTOR; ++j)
          if (phase_w[j] == b && (WHOLE || first + j < params.values)) vector.values[j] = part[column[j]];
      }
    } else {
      const int phase = phase_h * stride_w + item - quotient(item, params.by_stride_w) * stride_w;
      if (params.part_ptr[phase] != nullptr) continue;
    }
    if constexpr (WHOLE) {
      *reinterpret_cast<Vector*>(to + item * params.item) = vector;
    } else {
#pragma unroll
      for (int j = 0; j < VECTOR; ++j)
        if (first + j < params.values) to[item * params.item + j * params.value] = vector.values[j];
    }
  }
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

constexpr int kVectorBytes = 16;

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

// Whether dx is written row by row from dense parts.
inline bool has_dense_parts(const Problem& problem, const Phases& phases) {
  return problem.x_stride[1] != 1 && phases.idle() > 0;
}

// Elements of a dense part, such that the next one begins at a multiple of 256 bytes.
inline int64_t dense_values(const Problem& part) { return ceil_div(part.N * part.C * part.H * part.W, 128) * 128; }

constexpr int64_t kMostDenseBytes = kMostCopiedBytes;  // of all dense parts together
constexpr int64_t kMostThreads = (int64_t{1} << 31) - kThreads;

// Threads that fill an image, at most.
inline int64_t threads_of_image(const Problem& p) {
  return std::max(p.C * ceil_div(p.H, kItems) * ceil_div(p.W, 2), p.H * ceil_div(p.W, kItems) * ceil_div(p.C, 2));
}

// Calls use(slice, its first image) for images that have as many dense parts as the workspace may hold, and as many
// threads as a launch may have; use returns whether to go on. Returns whether all did.
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
template <typename Value, bool PLANES, int VECTOR = kVectorBytes / sizeof(Value)>
cudaError_t run_fill(Fill& params, cudaStream_t stream) {
  constexpr int kApart = 4;
  const auto run = [&](auto kernel, int vector) {
    const int64_t vectors = ceil_div(params.values, vector), chunks = ceil_div(params.items, kItems);
    params.by_vectors = make_divisor(vectors);
    params.by_chunks = make_divisor(chunks);
    const int64_t blocks = ceil_div(params.lines * chunks * vectors, kThreads);
    return hopper::launch_early(kernel, static_cast<unsigned>(blocks), kThreads, 0, stream, params);
  };
  const auto fits = [](int64_t step) { return step % VECTOR == 0; };
  if (params.value == 1 && fits(params.values) && fits(params.outer) && fits(params.line) && fits(params.item) &&
      reinterpret_cast<uint64_t>(params.dx_ptr) % (VECTOR * sizeof(Value)) == 0)
    return run(strided_fill_kernel<Value, VECTOR, true, PLANES>, VECTOR);
  if constexpr (VECTOR > 2) return run_fill<Value, PLANES, VECTOR / 2>(params, stream);
  return run(strided_fill_kernel<Value, kApart, false, PLANES>, kApart);
}

inline cudaError_t fill(const Problem& p, const Phases& phases, Fill params, cudaStream_t stream) {
  const bool planes = has_dense_parts(p, phases);
  const int64_t (&step)[4] = p.x_stride;
  params.outer = step[0];
  params.line = planes ? step[1] : step[2];
  params.item = planes ? step[2] : step[3];
  params.value = planes ? step[3] : step[1];
  params.lines = static_cast<int>(p.N * (planes ? p.C : p.H));
  params.items = planes ? p.H : p.W;
  params.values = planes ? p.W : p.C;
  params.by_lines_of_image = make_divisor(planes ? p.C : p.H);
  params.by_stride_h = make_divisor(phases.rows), params.by_stride_w = make_divisor(phases.columns);
  if (p.dtype == DType::kFloat32)
    return planes ? run_fill<uint32_t, true>(params, stream) : run_fill<uint32_t, false>(params, stream);
  return planes ? run_fill<uint16_t, true>(params, stream) : run_fill<uint16_t, false>(params, stream);
}

// One part behind another, in the same workspace.
inline cudaError_t launch_slice(Operator op, const Problem& problem, const Phases& phases, const Pointers& pointers,
                                cudaStream_t stream) {
  const int64_t dense_bytes = bytes_of_dense_parts(problem, phases);
  Fill params{};
  params.dx_ptr = pointers.out;
  cudaError_t error = cudaSuccess;
  const bool all = for_each_part(problem, phases, [&](const Part& part) {
    const Engine* const taker = taker_of(part.problem);
    if (taker == nullptr) return false;
    const Pointers own = pointers_of(part, dense_bytes > 0, dense_bytes, pointers);
    params.part_ptr[part.phase] = own.out;
    params.rows[part.phase] = part.problem.H, params.columns[part.phase] = part.problem.W;
    error = taker->launch(op, part.problem, own, stream);
    return error == cudaSuccess;
  });
  if (!all) return error != cudaSuccess ? error : cudaErrorInvalidConfiguration;
  return phases.idle() > 0 ? fill(problem, phases, params, stream) : cudaSuccess;
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
