// A dry run: which engine a problem takes and which kernels it launches, on a GPU that need not be here. bundle() in
// modelnew.py asks it. It is linked with the engines, compiled without their device code.
#include <cstdio>
#include <cstring>
#include <thread>

#include "choice.cuh"
#include "cuda_stand_ins.h"
#include "sizes.cuh"

namespace modelnew {
namespace {

bool dry_run(const Problem& problem, Operator op, bool bias, const char* forced, char* text, size_t size) {
  const auto somewhere = [](int number) { return reinterpret_cast<void*>(int64_t{number} << 44); };
  const Pointers pointers{somewhere(1), somewhere(2), bias ? somewhere(3) : nullptr, somewhere(4), somewhere(5),
                          somewhere(6)};
  const Engine* chosen = nullptr;
  for (const Engine* engine : kEngines) {
    const bool runs = forced == nullptr ? reason_against(*engine, problem, op) == nullptr
                                        : std::strcmp(forced, engine->name) == 0;
    if (runs && chosen == nullptr) chosen = engine;
  }
  if (chosen == nullptr || chosen->refusal(problem, op) != nullptr) {
    snprintf(text, size, "%s", chosen == nullptr ? "no engine takes the problem" : chosen->refusal(problem, op));
    return false;
  }
  const bool launches = chosen->launch(op, problem, pointers, nullptr) == cudaSuccess;
  const bool fits = recorded.size() + 64 < size;
  if (launches && fits)
    snprintf(text, size, "%s\n%s", chosen->name, recorded.c_str());
  else
    snprintf(text, size, "engine %s %s", chosen->name, launches ? "launches too many kernels" : "does not launch");
  return launches && fits;
}

}  // namespace
}  // namespace modelnew

// Writes the engine's name and a line for each instance that it launches, or a refusal, and returns whether it is an
// engine. The GPU: as cuda_stand_ins.h has it. `sizes`: as problem_of_sizes() has them. All tensors are at multiples of
// 256 bytes. `forced`: null, or the engine by name.
extern "C" __attribute__((visibility("default"))) bool modelnew_dry_run(int capability, int sms, int group,
                                                                        const int64_t* sizes, int op, bool bias,
                                                                        const char* forced, char* text, size_t size) {
  using namespace modelnew;
  gpu = {capability, sms, group};
  recorded.clear();
  bool done = false;
  // A thread of its own: each remembers its plans, and does not know all about a GPU that is no real one.
  std::thread([&] {
    done = dry_run(problem_of_sizes(sizes), static_cast<Operator>(op), bias, forced, text, size);
  }).join();
  return done;
}
