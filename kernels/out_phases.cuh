// dgrad at a stride, a correlation over rows and columns that are `up` apart (correlation.cuh). Outputs that are `up`
// apart, a phase, read the input without the zeros, by the same taps, which are a step apart:
//
//   row of dx         0  1  2  3  4  5         stride 2, 3 taps, pad 1:
//   phase             A  B  A  B  A  B         A is met by tap 1; B by taps 0 and 2
//
// A phase of rows and one of columns make a phase of outputs.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <algorithm>
#endif

#include "correlation.cuh"
#include "problem.cuh"

namespace modelnew {

constexpr int kMostOutPhases = 4;  // where they are computed together

// A phase of one axis. Tap first + step * i reads row + dilation * i for the phase's first output, one more for each
// further output.
struct AxisPhase {
  int outputs, taps, first, step, dilation;
  int64_t row;
};

inline AxisPhase axis_phase(int number, int outputs, int taps, int64_t pad, int dilation, int up) {
  const int common = greatest_common_divisor(up, dilation);
  AxisPhase phase{static_cast<int>(ceil_div(outputs - number, up)), 0, 0, up / common, dilation / common, 0};
  while (phase.first < phase.step && (number - pad + int64_t{phase.first} * dilation) % up != 0) ++phase.first;
  if (phase.first >= std::min(phase.step, taps)) return phase;  // no tap
  phase.taps = (taps - 1 - phase.first) / phase.step + 1;
  phase.row = (number - pad + int64_t{phase.first} * dilation) / up;
  if (phase.taps == 1) phase.dilation = 1;
  return phase;
}

// Phases of an axis, no more than outputs, and the input rows that they read for the output 0: the first one, and how
// many follow; -1 if no tap meets any output.
struct Reach {
  int phases;
  int64_t first, halo;
};

inline Reach reach_of(int outputs, int taps, int pad, int dilation, int up) {
  Reach reach{std::min(up, outputs), 0, -1};
  for (int number = 0; number < reach.phases; ++number) {
    const AxisPhase phase = axis_phase(number, outputs, taps, pad, dilation, up);
    if (phase.taps == 0) continue;
    const int64_t last = phase.row + int64_t{phase.taps - 1} * phase.dilation;
    const int64_t end = reach.halo < 0 ? last : std::max(last, reach.first + reach.halo);
    reach.first = reach.halo < 0 ? phase.row : std::min(phase.row, reach.first);
    reach.halo = end - reach.first;
  }
  return reach;
}

inline Reach reach_of_rows(const Correlation& of) { return reach_of(of.P, of.R, of.pad_h, of.dilation_h, of.up_h); }
inline Reach reach_of_columns(const Correlation& of) { return reach_of(of.Q, of.S, of.pad_w, of.dilation_w, of.up_w); }

inline bool has_out_phases(const Correlation& of) { return of.up_h > 1 || of.up_w > 1; }
inline int out_phases(const Correlation& of) { return std::min(of.up_h, of.P) * std::min(of.up_w, of.Q); }

// A phase of outputs: its first row and column, and the phases that it is made of.
struct OutPhase {
  int row, column;
  AxisPhase rows, columns;

  int taps() const { return rows.taps * columns.taps; }
};

inline OutPhase out_phase(const Correlation& of, int number) {
  const int columns = std::min(of.up_w, of.Q), row = number / columns, column = number % columns;
  return {row, column, axis_phase(row, of.P, of.R, of.pad_h, of.dilation_h, of.up_h),
          axis_phase(column, of.Q, of.S, of.pad_w, of.dilation_w, of.up_w)};
}

// A phase with taps as a correlation of its own; `w` and `out`: where its filter and its outputs begin, in elements.
template <typename AnyCorrelation>
AnyCorrelation correlation_of_phase(const AnyCorrelation& of, const OutPhase& phase, int64_t& w, int64_t& out) {
  const auto first = [&](const AxisPhase& axis, int taps) {
    return of.flipped ? taps - 1 - axis.first - (axis.taps - 1) * axis.step : axis.first;
  };
  w = first(phase.rows, of.R) * of.w_stride_r + first(phase.columns, of.S) * of.w_stride_s;
  out = phase.row * of.out_stride[2] + phase.column * of.out_stride[3];
  AnyCorrelation result = of;
  result.P = phase.rows.outputs;
  result.Q = phase.columns.outputs;
  result.R = phase.rows.taps;
  result.S = phase.columns.taps;
  result.pad_h = static_cast<int>(-phase.rows.row);
  result.pad_w = static_cast<int>(-phase.columns.row);
  result.dilation_h = phase.rows.dilation;
  result.dilation_w = phase.columns.dilation;
  result.out_stride[2] *= of.up_h;
  result.out_stride[3] *= of.up_w;
  result.w_stride_r *= phase.rows.step;
  result.w_stride_s *= phase.columns.step;
  result.up_h = result.up_w = 1;
  return result;
}

}  // namespace modelnew
