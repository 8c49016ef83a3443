// strided engine: the gradient to the input where the filter leaves out positions. It has no kernel of its own: other
// engines compute parts of the problem, which have a stride of 1.
//
// Rows of dx that are a stride apart, a phase, are met by the same taps (out_phases.cuh):
//
//   dx[a + stride*i] = sum over j of dy[i + pad' - j*dilation'] w[first + step*j]
//
// and that is the gradient of a convolution without a stride, with every step-th tap of the filter. The same goes for
// columns; a phase of both is a part. Phases that no tap meets are zeros, and so all of dx is before, if there are any.
//
// tma and gather have phases in one launch (up to four, each met by some tap); these are the other problems.
//
// Bound by memory where parts are several: each reads dy anew and stores every stride-th column of dx alone.
// Measurements: docs/lab/lowering.md.
#if !defined(__CUDACC_RTC__)
#include <cstdio>

#include "choice.cuh"
#include "engines.cuh"
#include "out_phases.cuh"
#include "problem.cuh"

namespace modelnew {
namespace strided {

// Tried in this order, that of all engines.
const Engine* const kTakers[] = {&kDilatedEngine, &kTmaEngine,       &kWgmmaEngine,     &kGatherEngine,
                                 &kStemEngine,    &kDepthwiseEngine, &kPointwiseEngine, &kMmaEngine};

constexpr int kMostParts = 16;

// A part of a problem, and from where on in x and w, in elements.
struct Part {
  Problem problem;
  int64_t x, w;
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

// Phases of dx: no more than rows.
inline int phases(int size, int outputs, int stride) {
  if (outputs == 1) return 1;
  return stride < size ? stride : size;
}

// Calls use(part) for each of them, which return whether to go on; and returns whether all did. `idle` counts phases of
// zeros.
template <typename Use>
bool for_each_part(const Problem& problem, const Use& use, int* idle = nullptr) {
  const Problem& p = problem;
  const int stride_h = taken_stride(p.stride_h, p.P), stride_w = taken_stride(p.stride_w, p.Q);
  const int rows = phases(p.H, p.P, p.stride_h), columns = phases(p.W, p.Q, p.stride_w);
  const bool tf32 = uses_tf32(problem, Operator::kDgrad);
  for (int a = 0; a < rows; ++a) {
    for (int b = 0; b < columns; ++b) {
      const Phase row = phase_of(a, p.H, p.R, stride_h, p.pad_h, p.dilation_h);
      const Phase column = phase_of(b, p.W, p.S, stride_w, p.pad_w, p.dilation_w);
      if (row.taps == 0 || column.taps == 0) {
        if (idle != nullptr) ++*idle;
        continue;
      }
      Part part{problem, a * p.x_stride[2] + b * p.x_stride[3],
                row.first * p.w_stride[2] + column.first * p.w_stride[3]};
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
      of.x_stride[2] *= stride_h;
      of.x_stride[3] *= stride_w;
      of.w_stride[2] *= row.step;
      of.w_stride[3] *= column.step;
      of.tf32_allowed = tf32;  // of parts, if they are not too small for it
      if (!use(part)) return false;
    }
  }
  return true;
}

inline int idle_phases(const Problem& problem) {
  int idle = 0;
  for_each_part(problem, [](const Part&) { return true; }, &idle);
  return idle;
}

inline const Engine* taker_of(const Problem& problem) {
  thread_local Memo<const Engine*> memo;
  return first_of(kTakers, problem, Operator::kDgrad, memo);
}

// Whether dx has no gaps.
inline bool is_dense(const Problem& p) {
  const int64_t sizes[4] = {p.N, p.C, p.H, p.W};
  int64_t last = 0;
  for (int i = 0; i < 4; ++i) last += (sizes[i] - 1) * p.x_stride[i];
  return last + 1 == p.N * p.C * p.H * p.W;
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (op != Operator::kDgrad) return "it computes input gradients only";
  if (problem.dtype == DType::kFloat64) return "it has no float64";
  if (!has_stride(problem)) return "it requires a stride greater than 1 along an axis with more than one output";
  const int64_t parts = int64_t{phases(problem.H, problem.P, problem.stride_h)} *
                        phases(problem.W, problem.Q, problem.stride_w);
  if (parts > kMostParts) return "it splits the input into at most 16 phases, stride_h times stride_w";
  const bool taken = for_each_part(problem, [](const Part& part) {
    return part.problem.pad_h >= 0 && part.problem.pad_w >= 0 && taker_of(part.problem) != nullptr;
  });
  if (!taken) return "it splits the problem into parts, and no other engine computes one of them";
  if (idle_phases(problem) > 0 && !is_dense(problem))
    return "it requires a dense input gradient, as no filter tap meets some of its pixels";
  return nullptr;
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
  for_each_part(problem, [&](const Part& part) {
    by_tma &= taker_of(part.problem) == &kTmaEngine;
    return ++parts > 0;
  });
  return (by_tma ? kLeastWorkByTma : kLeastWorkOf16Bits) * factor_of_parts(parts);
}

inline const char* yields(const Problem& problem, Operator) {
  if (problem.C / problem.groups < 8 || problem.K / problem.groups < 8) return "direct may be faster with few channels";
  return multiply_adds(problem) < least_work(problem) ? "direct may be faster with few multiply-adds" : nullptr;
}

inline Pointers pointers_of(const Part& part, const Pointers& pointers) {
  const int bytes = element_bytes(part.problem.dtype);
  const auto from = [&](const void* pointer, int64_t elements) -> const void* {
    return pointer == nullptr ? nullptr : static_cast<const uint8_t*>(pointer) + elements * bytes;
  };
  Pointers result = pointers;
  result.w = from(pointers.w, part.w);
  result.out = const_cast<void*>(from(pointers.out, part.x));
  return result;
}

inline int64_t workspace_bytes(const Problem& problem, Operator op, const Pointers& pointers) {
  int64_t most = 0;
  for_each_part(problem, [&](const Part& part) {
    const Engine* const taker = taker_of(part.problem);
    if (taker == nullptr) return false;
    const int64_t bytes = taker->workspace_bytes(part.problem, op, pointers_of(part, pointers));
    if (bytes > most) most = bytes;
    return true;
  });
  return most;
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// One part behind another, in the same workspace.
inline cudaError_t launch(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (idle_phases(problem) > 0) {
    const int64_t bytes = problem.N * problem.C * problem.H * problem.W * element_bytes(problem.dtype);
    error = cudaMemsetAsync(pointers.out, 0, bytes, stream);
    if (error != cudaSuccess) return error;
  }
  const bool all = for_each_part(problem, [&](const Part& part) {
    const Engine* const taker = taker_of(part.problem);
    if (taker == nullptr) return false;
    error = taker->launch(op, part.problem, pointers_of(part, pointers), stream);
    return error == cudaSuccess;
  });
  return all || error != cudaSuccess ? error : cudaErrorInvalidConfiguration;
}

#endif  // launchers

inline void describe(const Problem& problem, Operator op, char* text, size_t text_size) {
  int parts = 0, idle = 0;
  for_each_part(problem, [&](const Part&) { return ++parts > 0; }, &idle);
  for_each_part(problem, [&](const Part& part) {
    const Engine* const taker = taker_of(part.problem);
    const int written = snprintf(text, text_size, "%d parts%s, the first of %dx%d taps by %s: ", parts,
                                 idle > 0 ? " and zeros" : "", part.problem.R, part.problem.S,
                                 taker == nullptr ? "nobody" : taker->name);
    if (taker != nullptr && written > 0 && static_cast<size_t>(written) < text_size)
      taker->describe(part.problem, op, text + written, text_size - written);
    return false;
  });
}

}  // namespace strided

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)
extern const Engine kStridedEngine{"strided",       strided::refusal,  strided::workspace_bytes,
                                   strided::launch, strided::describe, strided::yields};
#endif

}  // namespace modelnew
#endif
