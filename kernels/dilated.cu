// dilated engine: filters whose taps lie so far apart that a tile with its halo fills shared memory with what few taps
// read, or does not fit there at all, as where networks that segment images look around (3x3 filters with a dilation
// of 4 to 36). It has no kernel of its own: other engines compute parts of the problem, whose filters are dilated along
// rows only (fprop, dgrad), or have one tap (wgrad).
//
// In fprop and dgrad, taps that meet nothing but padding are first left out along an axis that is dilated: of a 3x3
// filter with a dilation of 36 on 28x28 pixels one is left. (So a weight of Inf or NaN that meets nothing but padding
// makes no NaN.)
//
// Then, row p of y reads rows p + r*d of x, d being the dilation down the columns. Rows that are d apart, a phase, are
// an image of their own, whose rows follow one another, and need no others of x than those of one phase as well:
//
//   row of x          0  1  2  3  4  5  6  7         d = 3, two taps:
//   phase             A  B  C  A  B  C  A  B         row p of y reads p and p + 3, one after another in its phase
//
// A part is one phase of all images; or, if these are fewer launches, neighbouring phases of one image, which are the
// images of a batch: from one to the next it is one row of x.
//
// In wgrad a part is one tap (r, s), whose gradient is that of a 1x1 filter. The outputs whose tap meets a pixel are a
// rectangle of dy, and the pixels that they meet are one of x. No part reads padding, or what lies between the taps:
//
//   row of x           0  1  2  3  4  5         d = 2, padding 2, three taps: row p of y meets row p - 2 + 2*r of x
//   row of dy, r = 0   2  3  4  5
//              r = 1   0  1  2  3  4  5
//              r = 2         0  1  2  3
//
// A part writes its tap of dw alone. (So dy of Inf or NaN makes no NaN in taps by which it meets padding.)
//
// Bound by the engine that computes the parts; each part is a launch of its own. Measurements: docs/lab/lowering.md.
#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstdio>

#include "choice.cuh"
#include "engines.cuh"
#include "problem.cuh"

namespace modelnew {
namespace dilated {

// Tried in this order, that of all engines.
const Engine* const kTakers[] = {&kTmaEngine,       &kWgmmaEngine,     &kGatherEngine, &kStemEngine,
                                 &kDepthwiseEngine, &kPointwiseEngine, &kMmaEngine};

// The same for wgrad. depthwise is among them to compute its problems as a whole.
const Engine* const kWgradTakers[] = {&kDepthwiseEngine, &kMmaWgradEngine, &kTmaWgradEngine, &kHopperWgradEngine};

constexpr int kMostDilation = 256, kMostTaps = 64;  // so many launches at most

// A part of a problem, and from where on in x, w and y, in elements.
struct Part {
  Problem problem;
  int64_t x, w, y;
};

// Taps of one axis that meet pixels for some output, and some between them: the first one, and how many; 0: none do.
struct Taps {
  int first, count;
};

inline Taps busy_taps(int size, int outputs, int taps, int stride, int pad, int dilation) {
  if (dilation == 1) return {0, taps};
  const int64_t last_output = int64_t{outputs - 1} * stride;
  const int64_t first = std::max<int64_t>(0, ceil_div(pad - last_output, dilation));
  const int64_t last = std::min<int64_t>(taps - 1, (int64_t{size} - 1 + pad) / dilation);
  if (first > last) return {0, 0};
  // The remaining taps have no negative padding.
  const int kept = static_cast<int>(std::min<int64_t>(first, pad / dilation));
  return {kept, static_cast<int>(last) - kept + 1};
}

// The whole problem without idle taps; of no taps at all if none meets a pixel.
inline Part without_idle_taps(const Problem& problem) {
  Part part{problem, 0, 0, 0};
  Problem& p = part.problem;
  const Taps rows = busy_taps(p.H, p.P, p.R, taken_stride(p.stride_h, p.P), p.pad_h, p.dilation_h);
  const Taps columns = busy_taps(p.W, p.Q, p.S, taken_stride(p.stride_w, p.Q), p.pad_w, p.dilation_w);
  part.w = rows.first * p.w_stride[2] + columns.first * p.w_stride[3];
  p.pad_h -= rows.first * p.dilation_h;
  p.pad_w -= columns.first * p.dilation_w;
  p.R = rows.count;
  p.S = columns.count;
  if (p.R == 1) p.dilation_h = 1;
  if (p.S == 1) p.dilation_w = 1;
  return part;
}

// Neighbouring phases whose images have as many rows.
struct Run {
  int first_y, first_x, count, rows_y, rows_x, pad;
};

struct Runs {
  Run runs[8];
  int count = 0;
};

// Phases of a dilation up to as many rows as x and y have: none is empty.
inline Runs runs_of(const Problem& p) {
  Runs all;
  const int d = p.dilation_h;
  for (int phase = 0; phase < d; ++phase) {
    // Row phase + d*i of y reads row phase - pad + d*(i + r) of x: row i + r - pad of phase number `other`.
    const int shifted = phase - p.pad_h, other = (shifted % d + d) % d;
    const Run run{phase,
                  other,
                  1,
                  static_cast<int>(ceil_div(p.P - phase, d)),
                  static_cast<int>(ceil_div(p.H - other, d)),
                  (other - shifted) / d};
    if (all.count > 0) {
      Run& last = all.runs[all.count - 1];
      if (run.rows_y == last.rows_y && run.rows_x == last.rows_x && run.pad == last.pad) {
        ++last.count;
        continue;
      }
    }
    all.runs[all.count++] = run;
  }
  return all;
}

// The outputs of an axis whose tap meets a pixel, and the pixels from the first that they meet to the last one. The
// number of outputs is not positive if there are none.
struct Crop {
  int first_output, outputs;
  int64_t first_pixel;
  int size;
};

// `offset` is the distance from the first tap to this one. Output i meets a pixel if i * stride is in least .. most.
inline Crop crop_of(int size, int outputs, int stride, int pad, int64_t offset) {
  const int64_t least = pad - offset, most = least + size - 1;
  const int64_t first = std::max<int64_t>(0, ceil_div(least, stride));
  const int64_t last = most < 0 ? -1 : std::min<int64_t>(outputs - 1, most / stride);
  const int count = static_cast<int>(last - first + 1);
  return {static_cast<int>(first), count, first * stride - least, (count - 1) * stride + 1};
}

// The same as for_each_part, for wgrad: a part for each tap.
template <typename Use>
bool for_each_tap(const Problem& p, const Use& use) {
  const bool tf32 = uses_tf32(p, Operator::kWgrad);
  const int stride_h = taken_stride(p.stride_h, p.P), stride_w = taken_stride(p.stride_w, p.Q);
  for (int r = 0; r < p.R; ++r) {
    const Crop rows = crop_of(p.H, p.P, stride_h, p.pad_h, int64_t{r} * p.dilation_h);
    for (int s = 0; s < p.S; ++s) {
      const Crop columns = crop_of(p.W, p.Q, stride_w, p.pad_w, int64_t{s} * p.dilation_w);
      Part part{p, 0, 0, 0};
      Problem& of = part.problem;
      of.tf32_allowed = tf32;
      of.R = of.S = of.dilation_h = of.dilation_w = 1;
      of.pad_h = of.pad_w = 0;
      of.P = rows.outputs, of.H = rows.size;
      of.Q = columns.outputs, of.W = columns.size;
      part.x = rows.first_pixel * p.x_stride[2] + columns.first_pixel * p.x_stride[3];
      part.w = r * p.w_stride[2] + s * p.w_stride[3];
      part.y = rows.first_output * p.y_stride[2] + columns.first_output * p.y_stride[3];
      if (!use(part)) return false;
    }
  }
  return true;
}

// Calls use(part) for each of them, which return whether to go on; and returns whether all did.
template <typename Use>
bool for_each_part(const Problem& problem, Operator op, const Use& use) {
  if (op == Operator::kWgrad) return for_each_tap(problem, use);
  Part whole = without_idle_taps(problem);
  whole.problem.tf32_allowed = uses_tf32(problem, op);  // of parts, if they are not too small for it
  const Problem& p = whole.problem;
  if (p.dilation_h == 1) return use(whole);
  const Runs all = runs_of(p);
  const bool by_images = p.N * all.count < p.dilation_h;
  for (int number = 0; number < all.count; ++number) {
    const Run& run = all.runs[number];
    const int64_t parts = by_images ? p.N : run.count;
    for (int64_t i = 0; i < parts; ++i) {
      Part part = whole;
      Problem& of = part.problem;
      of.H = run.rows_x;
      of.P = run.rows_y;
      of.pad_h = run.pad;
      of.dilation_h = 1;
      of.x_stride[2] *= p.dilation_h;
      of.y_stride[2] *= p.dilation_h;
      part.x = run.first_x * p.x_stride[2];
      part.y = run.first_y * p.y_stride[2];
      if (by_images) {
        of.N = run.count;
        of.x_stride[0] = p.x_stride[2];
        of.y_stride[0] = p.y_stride[2];
      }
      part.x += i * (by_images ? p.x_stride[0] : p.x_stride[2]);
      part.y += i * (by_images ? p.y_stride[0] : p.y_stride[2]);
      if (!use(part)) return false;
    }
  }
  return true;
}

// The engine that computes a part, or null.
inline const Engine* taker_of(const Problem& problem, Operator op) {
  thread_local Memo<const Engine*> memo, wgrad_memo;
  return op == Operator::kWgrad ? first_of(kWgradTakers, problem, op, wgrad_memo)
                                : first_of(kTakers, problem, op, memo);
}

inline int count_parts(const Problem& problem, Operator op) {
  int count = 0;
  for_each_part(problem, op, [&](const Part&) { return ++count > 0; });
  return count;
}

inline const char* refusal_of_taps(const Problem& p) {
  if ((p.R == 1 || p.dilation_h == 1) && (p.S == 1 || p.dilation_w == 1))
    return "it requires a dilation greater than 1 along an axis of several filter taps";
  if (int64_t{p.R} * p.S > kMostTaps) return "it requires a filter of at most 64 taps";
  const bool meet = for_each_tap(p, [](const Part& part) { return part.problem.P > 0 && part.problem.Q > 0; });
  return meet ? nullptr : "a filter tap always falls into the padding";
}

inline const char* refusal_of_phases(const Problem& problem) {
  const Part whole = without_idle_taps(problem);
  const Problem& p = whole.problem;
  if (p.R == 0 || p.S == 0) return "every filter tap falls into the padding";
  if (p.dilation_h == 1 && p.R == problem.R && p.S == problem.S)
    return "it requires a dilation_h greater than 1, or filter taps that always fall into the padding";
  if (p.dilation_h > 1) {
    if (p.stride_h != 1 && p.P > 1) return "it requires a stride_h of 1 if dilation_h is greater than 1";
    if (p.dilation_h > std::min(p.H, p.P))
      return "it requires a dilation_h of at most the number of rows of x and of y";
    if (p.dilation_h > kMostDilation) return "it requires a dilation_h of at most 256";
  }
  return nullptr;
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (op == Operator::kBgrad) return "it computes no gradient to the bias";
  const char* const reason = op == Operator::kWgrad ? refusal_of_taps(problem) : refusal_of_phases(problem);
  if (reason != nullptr) return reason;
  const bool taken =
      for_each_part(problem, op, [&](const Part& part) { return taker_of(part.problem, op) != nullptr; });
  return taken ? nullptr : "it splits the problem into parts, and no other engine computes one of them";
}

// Estimated speed-up from which parts are preferred to the whole problem; a lower one applies against mma where gather
// does not compute it, because mma's estimate is too low there (docs/lab/lowering.md).
constexpr double kWorthwhile = 1.5, kWorthwhileAgainstMma = 0.9;
// The same against gather with a box for each tap, and the overhead of a part (docs/lab/lowering.md).
constexpr double kWorthwhileAgainstTaps = 1.08, kPartCycles = 8250;
// The same for wgrad, whose estimates include the call; 16 bits, against tma_wgrad in channels_last, and as planes, of
// which parts take longer to copy than their estimates say (docs/lab/lowering.md).
constexpr double kWorthwhileTaps = 1.05, kWorthwhileTapsOfPixels = 0.9, kWorthwhileTapsOfPlanes = 1.5;
// Multiply-adds of a part below which direct is faster, by arithmetic (docs/lab/lowering.md).
constexpr double kLeastOfPart = 1 << 28;  // multiply-adds, before idle taps are left out

// tma's estimates include the call, those of other engines do not: the difference (tma.cu, wgmma_is_faster).
constexpr double kCallCycles = 12 * 1650;

inline const char* yields(const Problem& problem, Operator op) {
  const bool wgrad = op == Operator::kWgrad;
  const Engine* const whole = taker_of(problem, op);
  if (whole == nullptr && !wgrad)
    return multiply_adds(problem) < kLeastOfPart * count_parts(problem, op)
               ? "direct is faster if the parts have few multiply-adds"
               : nullptr;
  const bool by_taps = whole == &kGatherEngine && gather_takes_taps_apart(problem, op);
  double cycles = 0;
  const bool known =
      whole != nullptr && whole->cycles != nullptr && for_each_part(problem, op, [&](const Part& part) {
        const Engine* const taker = taker_of(part.problem, op);
        if (taker == nullptr || taker->cycles == nullptr) return false;
        const bool call = whole == &kTmaEngine && taker != &kTmaEngine;
        cycles += taker->cycles(part.problem, op) + (by_taps ? kPartCycles : call ? kCallCycles : 0);
        return true;
      });
  const bool pixels = whole == &kTmaWgradEngine && problem.x_stride[1] == 1 && problem.y_stride[1] == 1;
  const double of_taps = element_bytes(problem.dtype) != 2 ? kWorthwhileTaps
                         : pixels                           ? kWorthwhileTapsOfPixels
                         : problem.x_stride[1] != 1         ? kWorthwhileTapsOfPlanes
                                                            : kWorthwhileTaps;
  const bool far_apart = whole == &kMmaEngine && kGatherEngine.refusal(problem, op) != nullptr;
  const double worthwhile = wgrad       ? of_taps
                            : far_apart ? kWorthwhileAgainstMma
                            : by_taps   ? kWorthwhileAgainstTaps
                                        : kWorthwhile;
  if (known && whole->cycles(problem, op) > worthwhile * cycles) return nullptr;
  return "an engine that computes the problem as a whole is as fast";
}

inline Pointers pointers_of(const Part& part, Operator op, const Pointers& pointers) {
  const int bytes = element_bytes(part.problem.dtype);
  const auto from = [&](const void* pointer, int64_t elements) -> const void* {
    return pointer == nullptr ? nullptr : static_cast<const uint8_t*>(pointer) + elements * bytes;
  };
  Pointers result = pointers;
  result.x = from(pointers.x, part.x);
  result.w = from(pointers.w, part.w);
  result.dy = from(pointers.dy, part.y);
  const int64_t written = op == Operator::kDgrad ? part.x : op == Operator::kWgrad ? part.w : part.y;
  result.out = const_cast<void*>(from(pointers.out, written));
  return result;
}

inline int64_t workspace_bytes(const Problem& problem, Operator op, const Pointers& pointers) {
  int64_t most = 0;
  for_each_part(problem, op, [&](const Part& part) {
    const Engine* const taker = taker_of(part.problem, op);
    if (taker != nullptr)
      most = std::max(most, taker->workspace_bytes(part.problem, op, pointers_of(part, op, pointers)));
    return taker != nullptr;
  });
  return most;
}

// One part behind another, in the same workspace.
inline cudaError_t launch(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  const bool all = for_each_part(problem, op, [&](const Part& part) {
    const Engine* const taker = taker_of(part.problem, op);
    if (taker == nullptr) return false;
    error = taker->launch(op, part.problem, pointers_of(part, op, pointers), stream);
    return error == cudaSuccess;
  });
  return all || error != cudaSuccess ? error : cudaErrorInvalidConfiguration;
}

inline void describe(const Problem& problem, Operator op, char* text, size_t text_size) {
  for_each_part(problem, op, [&](const Part& part) {
    const Problem& p = part.problem;
    const Engine* const taker = taker_of(p, op);
    const int parts = count_parts(problem, op);
    const int written =
        snprintf(text, text_size, "%d of %dx%d taps in %d parts, the first of %lld x %d rows by %s: ",
                 op == Operator::kWgrad ? parts : p.R * p.S, problem.R, problem.S, parts, static_cast<long long>(p.N),
                 p.P, taker == nullptr ? "nobody" : taker->name);
    if (taker != nullptr && written > 0 && static_cast<size_t>(written) < text_size)
      taker->describe(p, op, text + written, text_size - written);
    return false;
  });
}

}  // namespace dilated

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)
extern const Engine kDilatedEngine{"dilated",       dilated::refusal,  dilated::workspace_bytes,
                                   dilated::launch, dilated::describe, dilated::yields};
#endif

}  // namespace modelnew
#endif
