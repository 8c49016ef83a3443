// patches engine: filters that read every pixel once, side by side (a stride as large as the filter, no padding), over
// few channels, as a Vision Transformer begins: 16x16 of 3 channels to 768, stride 16. Other engines would hold all
// weights of a filter in shared memory, or a tile's x, which is 768 values for each output here.
//
// What an output reads is copied to where it is one row, in the order of the weights in memory, and the rest is a 1x1
// convolution in channels_last, of as many channels as the filter has weights, by another engine:
//
//   x, R = S = 2                 copy: [pixel of y][weight]          w: [output channel][weight]
//
//   a b | e f                    a b c d (channel 0) a b c d (1) ..
//   c d | g h                    e f g h (channel 0) e f g h (1) ..
//   ----+----
//
// A copy is as large as x; it is read in runs of a row of a patch and written as a whole. Accuracy is the problem's own:
// fp32 where it has few channels, although the 1x1 convolution has many.
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

constexpr int kThreads = 256, kVectorBytes = 16;

// The weights of a filter, and what they meet in x, are runs of neighbours, `outer` of them, numbered by two digits.
struct Order {
  int inner, digit;          // values of a run; as many of the second digit
  int64_t step, first, second;  // in x: from value to value of a run, and from digit to digit
};

struct Params {
  const void* x_ptr;
  void* copy_ptr;
  Order order;
  int64_t image, row, column;  // steps in x from patch to patch
  int values;                  // of a patch
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
    for (int i = 0; i < kValues; ++i) vector.values[i] = patch[place_of(first + i)];
  }
  static_cast<Vector*>(params.copy_ptr)[number] = vector;
}

#endif  // device code

#if !defined(__CUDACC_RTC__)

// ---- Host ----

// Who may compute what is left, in the order of all engines, and who is asked for the whole problem before.
const Engine* const kTakers[] = {&kWgmmaEngine, &kGatherEngine, &kPointwiseEngine, &kMmaEngine};
const Engine* const kRivals[] = {&kWgmmaEngine, &kGatherEngine, &kStemEngine, &kDepthwiseEngine};

constexpr int64_t kMostCopiedBytes = 512 << 20;

inline int64_t values_of(const Problem& problem) { return int64_t{problem.C} * problem.R * problem.S; }

inline int64_t copied_bytes(const Problem& problem) {
  return problem.N * problem.P * problem.Q * values_of(problem) * element_bytes(problem.dtype);
}

// In which order a filter's weights lie in memory, side by side: [channel][row][column] or [row][column][channel].
// False: neither.
inline bool order_of(const Problem& problem, Order& order) {
  const int64_t C = problem.C, R = problem.R, S = problem.S;
  const auto lies = [](int64_t stride, int64_t size, int64_t wanted) { return size == 1 || stride == wanted; };
  const int64_t (&w)[4] = problem.w_stride, (&x)[4] = problem.x_stride;
  if (lies(w[1], C, R * S) && lies(w[2], R, S) && lies(w[3], S, 1)) {
    order = {problem.S, problem.R, x[3], x[1], x[2]};
    return true;
  }
  if (!lies(w[1], C, 1) || !lies(w[2], R, S * C) || !lies(w[3], S, C)) return false;
  if (x[3] == C * x[1])
    order = {problem.S * problem.C, 1, x[1], x[2], 0};  // pixels of a row side by side
  else
    order = {problem.C, problem.S, x[1], x[2], x[3]};
  return true;
}

// A 1x1 convolution of the copy.
inline Problem rest_of(const Problem& problem, Operator op) {
  Problem rest = problem;
  const int values = static_cast<int>(values_of(problem));
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
    return "it takes filters without padding whose stride is their size only";
  if (values_of(problem) * element_bytes(problem.dtype) % kVectorBytes != 0)
    return "it takes filters of multiples of 16 bytes only";
  if (copied_bytes(problem) > kMostCopiedBytes || values_of(problem) >= 1 << 24)
    return "it takes images of up to 512 MB only";
  Order order;
  return order_of(problem, order) ? nullptr : "it takes filters that are contiguous, or channels_last, only";
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (const char* const reason = refusal_of_problem(problem, op)) return reason;
  return taker_of(rest_of(problem, op), op) != nullptr ? nullptr : "no other engine takes what is left";
}

// Less has not been tried.
constexpr double kLeastWork = 1 << 26;  // multiply-adds

inline const char* yields(const Problem& problem, Operator op) {
  if (multiply_adds(problem) < kLeastWork) return "another engine may be faster with few multiply-adds";
  thread_local Memo<const Engine*> memo;
  return first_of(kRivals, problem, op, memo) != nullptr ? "an engine takes it whole" : nullptr;
}

inline int64_t aligned_bytes(int64_t bytes) { return ceil_div(bytes, 256) * 256; }

inline Pointers pointers_of_rest(const Pointers& pointers, int64_t copied) {
  Pointers rest = pointers;
  rest.x = pointers.workspace;  // null, as long as it is not known, stands for an aligned address
  if (pointers.workspace != nullptr) rest.workspace = static_cast<uint8_t*>(pointers.workspace) + aligned_bytes(copied);
  return rest;
}

inline int64_t workspace_bytes(const Problem& problem, Operator op, const Pointers& pointers) {
  const Problem rest = rest_of(problem, op);
  const Engine* const taker = taker_of(rest, op);
  Pointers unknown = pointers;
  unknown.workspace = nullptr;
  const int64_t copied = copied_bytes(problem);
  return aligned_bytes(copied) +
         (taker == nullptr ? 0 : taker->workspace_bytes(rest, op, pointers_of_rest(unknown, copied)));
}

inline Params make_params(const Problem& problem, const Pointers& pointers) {
  Params params{};
  order_of(problem, params.order);
  params.x_ptr = pointers.x;
  params.copy_ptr = pointers.workspace;
  params.image = problem.x_stride[0];
  params.row = problem.x_stride[2] * problem.R;
  params.column = problem.x_stride[3] * problem.S;
  params.values = static_cast<int>(values_of(problem));
  const int of_patch = params.values * element_bytes(problem.dtype) / kVectorBytes;
  params.vectors = static_cast<int>(problem.N * problem.P * problem.Q * of_patch);
  params.by_vectors_of_patch = make_divisor(of_patch);
  params.by_plane = make_divisor(int64_t{problem.P} * problem.Q);
  params.by_columns = make_divisor(problem.Q);
  params.by_inner = make_divisor(params.order.inner);
  params.by_digit = make_divisor(params.order.digit);
  return params;
}

// Whether 16 bytes of the copy are 16 aligned bytes of x.
inline bool has_runs(const Problem& problem, const Params& params) {
  const int values = kVectorBytes / element_bytes(problem.dtype);
  const auto in_vectors = [&](int64_t step) { return step % values == 0; };
  const Order& order = params.order;
  return order.step == 1 && order.inner % values == 0 && in_vectors(order.first) && in_vectors(order.second) &&
         in_vectors(params.image) && in_vectors(params.row) && in_vectors(params.column) &&
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

inline cudaError_t launch(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  const Problem rest = rest_of(problem, op);
  const Engine* const taker = taker_of(rest, op);
  if (taker == nullptr) return cudaErrorInvalidConfiguration;
  const Params params = make_params(problem, pointers);
  const bool runs = has_runs(problem, params);
  if (problem.dtype == DType::kFloat32)
    run_copy<uint32_t>(params, runs, stream);
  else
    run_copy<uint16_t>(params, runs, stream);
  const cudaError_t error = cudaGetLastError();
  return error != cudaSuccess ? error
                              : taker->launch(op, rest, pointers_of_rest(pointers, copied_bytes(problem)), stream);
}

#endif  // launchers

inline void describe(const Problem& problem, Operator op, char* text, size_t text_size) {
  const Problem rest = rest_of(problem, op);
  const Engine* const taker = taker_of(rest, op);
  const int written = snprintf(text, text_size, "copied, as 1x1 of %d channels by %s: ", rest.C,
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
