// Chooses the engine of a table that runs a problem. Host only.
#pragma once

#include "device.cuh"
#include "engines.cuh"
#include "memo.cuh"

namespace modelnew {

// Null, or the reason why an engine that is not forced does not run the problem.
inline const char* reason_against(const Engine& engine, const Problem& problem, Operator op) {
  const char* const refusal = engine.refusal(problem, op);
  return refusal != nullptr || engine.yields == nullptr ? refusal : engine.yields(problem, op);
}

// Returns the first engine of a table without a reason against it, or null. `memo` remembers the answer and belongs to
// this table alone: asking every engine takes as long as a launch.
template <size_t COUNT>
const Engine* first_of(const Engine* const (&table)[COUNT], const Problem& problem, Operator op,
                       Memo<const Engine*>& memo) {
  int sms = 0;
  const int gpu = find_gpu(sms);
  return memo.get(key_of(problem, op, 0, 0, 0, gpu, sms), [&]() -> const Engine* {
    for (const Engine* engine : table) {
      if (reason_against(*engine, problem, op) == nullptr) return engine;
    }
    return nullptr;
  });
}

}  // namespace modelnew
