// dilated engine: filters whose taps lie so far apart that a tile with its halo fills shared memory with what few taps
// read, or does not fit there at all, as where networks that segment images look around (3x3 filters with a dilation
// of 4 to 36). It has no kernel of its own: other engines compute parts of the problem, whose filters are dilated along
// rows only.
//
// First, taps that meet nothing but padding are left out along an axis that is dilated: of a 3x3 filter with a dilation
// of 36 on 28x28 pixels one is left. (So a weight of Inf or NaN that meets nothing but padding makes no NaN.)
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
// 3x3, TF32, us, cuDNN / in parts (bench.py, H200, 95833a7, 2026-11-23, NCHW and channels_last):
//
//   2048 channels to 256, 65x65, 8 images, dilation 12    1707 / 1111    1732 / 1167
//   24                                                    1692 / 1384    1724 / 1449
//   36                                                    1692 / 1527    1724 / 1598
//   the same, one image, 12                                388 /  152     389 /  150
//   24                                                     388 /  178     384 /  186
//   36                                                     388 /  198     382 /  206
//   512 to 512, 65x65, 8 images, 4                         503 /  372     396 /  338
//
// What the other engines would take was not measured. By their estimates (gather's erred by 15%, see there; of parts
// they are up to 20% less than the above), whole by the engine that would take it / in parts by gather, when contained
// operands were thought to take longer; direct has no estimate, but 237 GFLOP take it some 8 ms:
//
//   2048 channels to 256, 28x28, 32 images, dilation 6, 12, 18, 24   gather 894, gather 4400, mma 988, direct
//                                                                    / 629, 712, 1203, 1345
//   the same, 65x65, 8 images, dilation 6, 12, 18, 36                gather 2865, wgmma 10765, mma 4212, direct
//                                                                    / 789, 893, 1117, 1434
//   512 to 512, 65x65, 8 images, dilation 2 and 4                    gather 391 and 965 / 312 and 337
//   512 to 512, 28x28, 32 images, dilation 2 and 4                   gather 204 and 241 / 228 and 278
//   64 to 64, 256x256, 4 images, dilation 8 and 16                   gather 196, mma 90 / 129, 129
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

constexpr int kMostDilation = 256;  // so many launches at most

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
  // What is left has no negative padding.
  const int kept = static_cast<int>(std::min<int64_t>(first, pad / dilation));
  return {kept, static_cast<int>(last) - kept + 1};
}

// The whole problem without idle taps; of no taps at all if none meets a pixel.
inline Part without_idle_taps(const Problem& problem) {
  Part part{problem, 0, 0, 0};
  Problem& p = part.problem;
  const Taps rows = busy_taps(p.H, p.P, p.R, p.P == 1 ? 1 : p.stride_h, p.pad_h, p.dilation_h);
  const Taps columns = busy_taps(p.W, p.Q, p.S, p.Q == 1 ? 1 : p.stride_w, p.pad_w, p.dilation_w);
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

// Of a dilation up to as many rows as x and y have: no phase is empty.
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

// Calls use(part) for each of them, which return whether to go on; and returns whether all did.
template <typename Use>
bool for_each_part(const Problem& problem, Operator op, const Use& use) {
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

// Who computes a part, or null.
inline const Engine* taker_of(const Problem& problem, Operator op) {
  thread_local Memo<const Engine*> memo;
  return first_of(kTakers, problem, op, memo);
}

inline int count_parts(const Problem& problem, Operator op) {
  int count = 0;
  for_each_part(problem, op, [&](const Part&) { return ++count > 0; });
  return count;
}

inline const char* refusal(const Problem& problem, Operator op) {
  if (op != Operator::kFprop && op != Operator::kDgrad) return "it computes outputs and input gradients only";
  const Part whole = without_idle_taps(problem);
  const Problem& p = whole.problem;
  if (p.R == 0 || p.S == 0) return "it takes filters that meet the image";
  if (p.dilation_h == 1 && p.R == problem.R && p.S == problem.S)
    return "it takes filters whose taps lie far apart only";
  if (p.dilation_h > 1) {
    if (p.stride_h != 1 && p.P > 1) return "it takes a stride of 1 down the columns only";
    if (p.dilation_h > std::min(p.H, p.P)) return "it takes dilations up to as many rows as there are";
    if (p.dilation_h > kMostDilation) return "it takes dilations up to 256 down the columns";
  }
  const bool taken =
      for_each_part(problem, op, [&](const Part& part) { return taker_of(part.problem, op) != nullptr; });
  return taken ? nullptr : "it has parts that no other engine takes";
}

// What parts have to gain by the estimates; and against mma where taps lie so far apart that gather does not take them.
// Its estimate is short there where an image fills few SMs: 256 to 64, 64x64, one image, dilation 12, 60 us by mma and
// 35 in parts, estimates 30 and 32 (3x3, H200, 2026-11-25).
constexpr double kWorthwhile = 1.5, kWorthwhileAgainstMma = 0.9;
// And against gather where it has a box for each tap. Beside what their estimates say parts take some 5 us each. 3x3,
// NCHW, us, in parts / by taps, what estimates and these 5 us said of their ratio (H200, 2026-11-25):
//
//   2048 channels to 256, 65x65, 8 images, dilation 12 and 24    1120 / 1061  1.09    1473 / 1049  0.73
//   33x33, 8 images, dilation 6 and 12                            354 /  391  1.36     542 /  438  1.00
//   65x65, one image, dilation 12 and 24                          151 /  270  2.11     191 /  316  1.44
//   256 to 256 and to 64, 64x64, 32 images, dilation 6            390 /  451  1.09     220 /  250  1.04
//   512 to 512, 65x65, 8 images, dilation 4                       361 /  470  1.42
constexpr double kWorthwhileAgainstTaps = 1.08, kPartCycles = 8250;
// An estimate: direct multiplies and adds some 14 x 10^12 values a second, and a launch of gather takes 12 us and more.
constexpr double kLeastOfPart = 1 << 28;  // multiply-adds, before idle taps are left out

// tma's estimates are of whole calls, the others' of kernels: so much less (tma.cu, wgmma_is_faster).
constexpr double kCallCycles = 12 * 1650;

inline const char* yields(const Problem& problem, Operator op) {
  const Engine* const whole = taker_of(problem, op);
  if (whole == nullptr)
    return multiply_adds(problem) < kLeastOfPart * count_parts(problem, op)
               ? "direct is faster with little work in a part"
               : nullptr;
  const bool by_taps = whole == &kGatherEngine && gather_takes_taps_apart(problem, op);
  double cycles = 0;
  const bool known = whole->cycles != nullptr && for_each_part(problem, op, [&](const Part& part) {
                       const Engine* const taker = taker_of(part.problem, op);
                       if (taker == nullptr || taker->cycles == nullptr) return false;
                       const bool call = whole == &kTmaEngine && taker != &kTmaEngine;
                       cycles += taker->cycles(part.problem, op) + (by_taps ? kPartCycles : call ? kCallCycles : 0);
                       return true;
                     });
  const bool far_apart = whole == &kMmaEngine && kGatherEngine.refusal(problem, op) != nullptr;
  const double worthwhile = far_apart ? kWorthwhileAgainstMma : by_taps ? kWorthwhileAgainstTaps : kWorthwhile;
  if (known && whole->cycles(problem, op) > worthwhile * cycles) return nullptr;
  return "an engine that takes it whole is as fast";
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
  result.out = const_cast<void*>(from(pointers.out, op == Operator::kDgrad ? part.x : part.y));
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
    const int written =
        snprintf(text, text_size, "%d of %dx%d taps in %d parts, the first of %lld x %d rows by %s: ", p.R * p.S,
                 problem.R, problem.S, count_parts(problem, op), static_cast<long long>(p.N), p.P,
                 taker == nullptr ? "nobody" : taker->name);
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
