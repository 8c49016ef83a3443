// Dry run for bundle() in modelnew.py: finds the engine of a problem and the kernel instances that it launches, for a
// GPU that need not be present. The library contains the engines' host code and stand-ins for the CUDA runtime.
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

// Writes the engine's name and a line for each instance to `text` and returns true, or writes a refusal and returns
// false. `capability`, `sms` and `group` are those of Gpu (cuda_stand_ins.h), `sizes` those of problem_of_sizes(),
// `forced` is null or an engine's name. All tensors count as aligned to 256 bytes.
extern "C" __attribute__((visibility("default"))) bool modelnew_dry_run(int capability, int sms, int group,
                                                                        const int64_t* sizes, int op, bool bias,
                                                                        const char* forced, char* text, size_t size) {
  using namespace modelnew;
  gpu = {capability, sms, group};
  recorded.clear();
  bool done = false;
  // Plans are cached per thread, by keys without the size of a GPC. A new thread has an empty cache.
  std::thread([&] {
    done = dry_run(problem_of_sizes(sizes), static_cast<Operator>(op), bias, forced, text, size);
  }).join();
  return done;
}
