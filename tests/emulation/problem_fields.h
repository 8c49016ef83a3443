// A Problem from one array of int64, whose fields are in the order of PROBLEM_FIELDS in emulation.py. Included behind
// problem.cuh, which a file that is one with the kernels has already.
#pragma once
#include <cstdint>
#include <type_traits>

static modelnew::Problem make_problem(const int64_t* fields) {
  modelnew::Problem problem{};
  const auto take = [&](auto& field) { field = static_cast<std::remove_reference_t<decltype(field)>>(*fields++); };
  take(problem.N); take(problem.C); take(problem.H); take(problem.W); take(problem.K); take(problem.R);
  take(problem.S); take(problem.P); take(problem.Q); take(problem.groups); take(problem.stride_h);
  take(problem.stride_w); take(problem.pad_h); take(problem.pad_w); take(problem.dilation_h);
  take(problem.dilation_w); take(problem.dtype); take(problem.tf32_allowed);
  for (auto* strides : {&problem.x_stride, &problem.w_stride, &problem.y_stride})
    for (auto& stride : *strides) take(stride);
  return problem;
}
