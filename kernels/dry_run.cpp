// A dry run: which engine a problem takes and which kernels it launches, on a GPU that need not be here. bundle() in
// modelnew.py asks it. It is linked with the engines, compiled without their device code.
#include <cstdio>
#include <cstring>

#include "choice.cuh"
#include "cuda_stand_ins.h"
#include "sizes.cuh"

// Writes the engine's name and a line for each instance that it launches, or a refusal, and returns whether it is an
// engine. `sizes`: as problem_of_sizes() has them. All tensors are at multiples of 256 bytes. `forced`: null, or the
// engine by name.
extern "C" __attribute__((visibility("default"))) bool modelnew_dry_run(int capability, int sms, const int64_t* sizes,
                                                                        int op, bool bias, const char* forced,
                                                                        char* text, size_t size) {
  using namespace modelnew;
  gpu = {capability, sms};
  recorded.clear();
  const Problem problem = problem_of_sizes(sizes);
  const auto somewhere = [](int number) { return reinterpret_cast<void*>(int64_t{number} << 44); };
  const Operator what = static_cast<Operator>(op);
  const Pointers pointers{somewhere(1), somewhere(2), bias ? somewhere(3) : nullptr, somewhere(4), somewhere(5),
                          somewhere(6)};
  const Engine* chosen = nullptr;
  for (const Engine* engine : kEngines) {
    const bool runs = forced == nullptr ? reason_against(*engine, problem, what) == nullptr
                                        : std::strcmp(forced, engine->name) == 0;
    if (runs && chosen == nullptr) chosen = engine;
  }
  if (chosen == nullptr || chosen->refusal(problem, what) != nullptr) {
    snprintf(text, size, "%s", chosen == nullptr ? "no engine takes the problem" : chosen->refusal(problem, what));
    return false;
  }
  const cudaError_t error = chosen->launch(what, problem, pointers, nullptr);
  const bool fits = recorded.size() + 64 < size;
  snprintf(text, size, "%s\n%s", chosen->name, fits ? recorded.c_str() : "");
  return error == cudaSuccess && fits;
}
