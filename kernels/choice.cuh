// Which engine of a table runs a problem. Host only.
#pragma once

#include "device.cuh"
#include "engines.cuh"
#include "memo.cuh"

namespace modelnew {

// Null, or why an engine that is not forced does not run the problem.
inline const char* reason_against(const Engine& engine, const Problem& problem, Operator op) {
  const char* const refusal = engine.refusal(problem, op);
  return refusal != nullptr || engine.yields == nullptr ? refusal : engine.yields(problem, op);
}

// The first engine of a table that nothing speaks against, or null. Remembered in `memo`, which is the table's alone:
// to ask every engine takes as long as to launch one.
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
