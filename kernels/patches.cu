// patches engine: filters that read every pixel once, side by side (a stride as large as the filter, no padding), over
// few channels, as a Vision Transformer begins: 16x16 of 3 channels to 768, stride 16. Other engines would hold all
// weights of a filter in shared memory, or a tile's x, which is 768 values for each output here.
//
// A copy makes one row of the pixels that an output reads, in the order of the weights in memory. The rest is a 1x1
// convolution in channels_last, of as many channels as the filter has weights, by another engine:
//
//   x, R = S = 2                 copy: [pixel of y][weight]          w: [output channel][weight]
//
//   a b | e f                    a b c d (channel 0) a b c d (1) ..
//   c d | g h                    e f g h (channel 0) e f g h (1) ..
//   ----+----
//
// A copy is as large as x. Where a filter is no multiple of 16 weights both are filled up with zeros, and weights are
// copied as well, as they are where they do not lie side by side: other engines then load 16 bytes at a time, and take
// 16 values a step. Accuracy is the problem's own: fp32 where it has few channels, although the 1x1 convolution has
// many.
//
// Bound by memory: the copy, and the 1x1 convolution that reads it. Measurements: docs/lab/lowering.md.
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstdio>

#include "choice.cuh"
#include "engines.cuh"
#endif

#include "divisor.cuh"
#include "problem.cuh"

namespace modelnew {
namespace patches {

constexpr int kThreads = 256, kVectorBytes = 16, kRowValues = 16;

// The weights of a filter, and what they meet in x, come in runs, which two digits number: of channel and row, say.
struct Order {
  int inner, digit;             // values of a run; so many of the second digit
  int64_t step, first, second;  // in x: from value to value of a run, and from digit to digit
};

struct Params {
  const void* x_ptr;  // or w, whose filters are patches of as many images
  void* copy_ptr;
  Order order;
  int64_t image, row, column;  // steps in x from patch to patch
  int values;                  // of a patch; behind them zeros
  int vectors;                 // of the copy, of 16 bytes
  Divisor by_vectors_of_patch, by_plane, by_columns, by_inner, by_digit;
};

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// ---- Device code ----

// A thread copies 16 bytes. RUNS: they are neighbours in x as well, and aligned.
template <typename Value, bool RUNS>
__global__ void __launch_bounds__(kThreads) patches_kernel(const Params params) {
  constexpr int kValues = kVectorBytes / static_cast<int>(sizeof(Value));
  struct alignas(kVectorBytes) Vector {
    Value values[kValues];
  };
  const int number = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (number >= params.vectors) return;
  const int pixel = quotient(number, params.by_vectors_of_patch);
  const int n = quotient(pixel, params.by_plane), in_image = pixel - n * static_cast<int>(params.by_plane.divisor);
  const int p = quotient(in_image, params.by_columns), q = in_image - p * static_cast<int>(params.by_columns.divisor);
  const Value* const patch =
      static_cast<const Value*>(params.x_ptr) + n * params.image + p * params.row + q * params.column;
  const int first = (number - pixel * static_cast<int>(params.by_vectors_of_patch.divisor)) * kValues;
  const Order& order = params.order;
  const auto place_of = [&](int value) {
    const int run = quotient(value, params.by_inner), major = quotient(run, params.by_digit);
    return major * order.first + (run - major * order.digit) * order.second + (value - run * order.inner) * order.step;
  };
  Vector vector;
  if constexpr (RUNS) {
    vector = *reinterpret_cast<const Vector*>(patch + place_of(first));
  } else {
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      vector.values[i] = first + i < params.values ? patch[place_of(first + i)] : Value{0};
  }
  static_cast<Vector*>(params.copy_ptr)[number] = vector;
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// ---- Host ----

// Engines that may compute the 1x1 convolution, in the order of all engines, and engines that are asked for the whole
// first.
const Engine* const kTakers[] = {&kTmaEngine, &kWgmmaEngine, &kGatherEngine, &kPointwiseEngine, &kMmaEngine};
const Engine* const kRivals[] = {&kTmaEngine, &kWgmmaEngine, &kGatherEngine, &kDepthwiseEngine};

// Values of a patch, and of its row of the copy.
inline int64_t values_of(const Problem& problem) { return int64_t{problem.C} * problem.R * problem.S; }

inline int64_t row_of(const Problem& problem) { return ceil_div(values_of(problem), kRowValues) * kRowValues; }

inline int64_t bytes_of_rows(const Problem& problem, int64_t rows) {
  return ceil_div(rows * row_of(problem) * element_bytes(problem.dtype), 256) * 256;
}
inline int64_t bytes_of_x(const Problem& problem) { return bytes_of_rows(problem, problem.N * problem.P * problem.Q); }

// How a filter's weights lie in memory: side by side as [channel][row][column] or [row][column][channel], or not.
enum class Lie { kPlanes, kPixels, kApart };

inline Lie lie_of(const Problem& problem) {
  const int64_t C = problem.C, R = problem.R, S = problem.S;
  const auto lies = [](int64_t stride, int64_t size, int64_t wanted) { return size == 1 || stride == wanted; };
  const int64_t (&w)[4] = problem.w_stride;
  if (lies(w[1], C, R * S) && lies(w[2], R, S) && lies(w[3], S, 1)) return Lie::kPlanes;
  return lies(w[1], C, 1) && lies(w[2], R, S * C) && lies(w[3], S, C) ? Lie::kPixels : Lie::kApart;
}

inline bool copies_weights(const Problem& problem) {
  return lie_of(problem) == Lie::kApart || row_of(problem) != values_of(problem);
}

// That of the weights, of a tensor with these strides: of x or w.
inline Order order_of(const Problem& problem, const int64_t (&stride)[4]) {
  const int C = problem.C, R = problem.R, S = problem.S;
  if (lie_of(problem) != Lie::kPixels) return {S, R, stride[3], stride[1], stride[2]};
  if (stride[3] == C * stride[1]) return {S * C, 1, stride[1], stride[2], 0};  // pixels of a row side by side
  return {C, S, stride[1], stride[2], stride[3]};
}

// A 1x1 convolution of the copy.
inline Problem rest_of(const Problem& problem, Operator op) {
  Problem rest = problem;
  const int values = static_cast<int>(row_of(problem));
  if (copies_weights(problem)) rest.w_stride[0] = values;
  rest.C = values;
  rest.H = problem.P;
  rest.W = problem.Q;
  rest.R = rest.S = rest.stride_h = rest.stride_w = 1;
  rest.x_stride[1] = 1;
  rest.x_stride[3] = values;
  rest.x_stride[2] = rest.x_stride[3] * problem.Q;
  rest.x_stride[0] = rest.x_stride[2] * problem.P;
  rest.w_stride[1] = rest.w_stride[2] = rest.w_stride[3] = 1;
  rest.tf32_allowed = uses_tf32(problem, op);
  return rest;
}

inline const Engine* taker_of(const Problem& rest, Operator op) {
  thread_local Memo<const Engine*> memo;
  return first_of(kTakers, rest, op, memo);
}

// Without a GPU: sizes and strides alone.
inline const char* refusal_of_problem(const Problem& problem, Operator op) {
  if (op != Operator::kFprop) return "it computes outputs only";
  if (problem.dtype == DType::kFloat64) return "it has no float64";
  if (problem.R * problem.S == 1) return "it takes filters larger than 1x1 only";
  if (problem.groups != 1) return "it takes one group only";
  const auto is_side_by_side = [](int taps, int outputs, int stride, int pad, int dilation) {
    return (stride == taps || outputs == 1) && pad == 0 && (dilation == 1 || taps == 1);
  };
  if (!is_side_by_side(problem.R, problem.P, problem.stride_h, problem.pad_h, problem.dilation_h) ||
      !is_side_by_side(problem.S, problem.Q, problem.stride_w, problem.pad_w, problem.dilation_w))
    return "it requires a stride equal to the filter size, no padding and no dilation";
  if (values_of(problem) >= 1 << 24 || bytes_of_x(problem) > kMostCopiedBytes ||
      bytes_of_rows(problem, problem.K) > kMostCopiedBytes)
    return "the copy of x or of the weights exceeds 1 GB, or a filter has 2^24 weights or more";
  return nullptr;
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (const char* const reason = refusal_of_problem(problem, op)) return reason;
  return taker_of(rest_of(problem, op), op) != nullptr
             ? nullptr
             : "no other engine computes the 1x1 convolution of the copy";
}

// Fewer are untested (docs/lab/lowering.md).
constexpr double kLeastWork = 1 << 26;  // multiply-adds

// Weights of a filter from which stem is slower with 16-bit tensors (docs/lab/lowering.md).
constexpr int64_t kManyValues = 512;

inline const char* yields(const Problem& problem, Operator op) {
  if (multiply_adds(problem) < kLeastWork) return "another engine may be faster with few multiply-adds";
  thread_local Memo<const Engine*> memo;
  const bool is_slow_in_stem = problem.dtype != DType::kFloat32 && values_of(problem) >= kManyValues;
  const bool is_taken = first_of(kRivals, problem, op, memo) != nullptr ||
                        (!is_slow_in_stem && reason_against(kStemEngine, problem, op) == nullptr);
  return is_taken ? "another engine computes the problem without a copy of x" : nullptr;
}

// The workspace: a copy of x, one of the weights, if there is any, and what the other engine wants.
inline int64_t copied_bytes(const Problem& problem) {
  return bytes_of_x(problem) + (copies_weights(problem) ? bytes_of_rows(problem, problem.K) : 0);
}

// Null, as long as the workspace is not known, stands for an aligned address.
inline Pointers pointers_of_rest(const Problem& problem, const Pointers& pointers, void* workspace) {
  const auto behind = [&](int64_t bytes) -> void* {
    return workspace == nullptr ? nullptr : static_cast<uint8_t*>(workspace) + bytes;
  };
  Pointers rest = pointers;
  rest.x = workspace;
  if (copies_weights(problem)) rest.w = behind(bytes_of_x(problem));
  rest.workspace = behind(copied_bytes(problem));
  return rest;
}

inline int64_t workspace_bytes(const Problem& problem, Operator op, const Pointers& pointers) {
  const Problem rest = rest_of(problem, op);
  const Engine* const taker = taker_of(rest, op);
  return copied_bytes(problem) +
         (taker == nullptr ? 0 : taker->workspace_bytes(rest, op, pointers_of_rest(problem, pointers, nullptr)));
}

// Parameters of the copy of x or, with K filters of one patch each, of w.
inline Params make_params(const Problem& problem, bool of_weights, const void* from, const void* to) {
  Params params{};
  const int64_t (&stride)[4] = of_weights ? problem.w_stride : problem.x_stride;
  const int64_t images = of_weights ? problem.K : problem.N;
  const int rows = of_weights ? 1 : problem.P, columns = of_weights ? 1 : problem.Q;
  params.order = order_of(problem, stride);
  params.x_ptr = from;
  params.copy_ptr = const_cast<void*>(to);
  params.image = stride[0];
  params.row = stride[2] * problem.R;
  params.column = stride[3] * problem.S;
  params.values = static_cast<int>(values_of(problem));
  const int of_patch = static_cast<int>(row_of(problem)) * element_bytes(problem.dtype) / kVectorBytes;
  params.vectors = static_cast<int>(images * rows * columns * of_patch);
  params.by_vectors_of_patch = make_divisor(of_patch);
  params.by_plane = make_divisor(int64_t{rows} * columns);
  params.by_columns = make_divisor(columns);
  params.by_inner = make_divisor(params.order.inner);
  params.by_digit = make_divisor(params.order.digit);
  return params;
}

// Whether 16 bytes of the copy are 16 aligned bytes of x.
inline bool has_runs(const Problem& problem, const Params& params) {
  const int values = kVectorBytes / element_bytes(problem.dtype);
  const auto in_vectors = [&](int64_t step) { return step % values == 0; };
  const Order& order = params.order;
  return order.step == 1 && params.values % kRowValues == 0 && order.inner % values == 0 && in_vectors(order.first) &&
         in_vectors(order.second) && in_vectors(params.image) && in_vectors(params.row) && in_vectors(params.column) &&
         reinterpret_cast<uint64_t>(params.x_ptr) % kVectorBytes == 0;
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

template <typename Value>
void run_copy(const Params& params, bool runs, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(ceil_div(params.vectors, kThreads));
  if (runs)
    patches_kernel<Value, true><<<blocks, kThreads, 0, stream>>>(params);
  else
    patches_kernel<Value, false><<<blocks, kThreads, 0, stream>>>(params);
}

inline cudaError_t copy(const Problem& problem, bool of_weights, const void* from, const void* to,
                        cudaStream_t stream) {
  const Params params = make_params(problem, of_weights, from, to);
  const bool runs = has_runs(problem, params);
  if (problem.dtype == DType::kFloat32)
    run_copy<uint32_t>(params, runs, stream);
  else
    run_copy<uint16_t>(params, runs, stream);
  return cudaGetLastError();
}

inline cudaError_t launch(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  const Problem rest = rest_of(problem, op);
  const Engine* const taker = taker_of(rest, op);
  if (taker == nullptr) return cudaErrorInvalidConfiguration;
  const Pointers of_rest = pointers_of_rest(problem, pointers, pointers.workspace);
  cudaError_t error = copy(problem, false, pointers.x, of_rest.x, stream);
  if (error == cudaSuccess && copies_weights(problem)) error = copy(problem, true, pointers.w, of_rest.w, stream);
  return error == cudaSuccess ? taker->launch(op, rest, of_rest, stream) : error;
}

#endif  // launchers

inline void describe(const Problem& problem, Operator op, char* text, size_t text_size) {
  const Problem rest = rest_of(problem, op);
  const Engine* const taker = taker_of(rest, op);
  const int written = snprintf(text, text_size, "x%s copied, as 1x1 of %d channels by %s: ",
                               copies_weights(problem) ? " and weights" : "", rest.C,
                               taker == nullptr ? "nobody" : taker->name);
  if (taker != nullptr && written > 0 && static_cast<size_t>(written) < text_size)
    taker->describe(rest, op, text + written, text_size - written);
}

#endif  // host

}  // namespace patches

#if (defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)) && !defined(__CUDACC_RTC__)
extern const Engine kPatchesEngine{"patches",       patches::refusal,  patches::workspace_bytes,
                                   patches::launch, patches::describe, patches::yields};
#endif

}  // namespace modelnew
