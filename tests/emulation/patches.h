// What the patches engine gives the rest to, and who takes nothing else; one that may take whole problems.

#include "idle_engines.h"

namespace modelnew {
static bool gather_takes = true, stem_takes = false;
static const char* refuse_others(const Problem& problem, Operator) {
  return problem.R * problem.S == 1 && gather_takes ? nullptr : "it is told to";
}
static const char* refuse_unless_told(const Problem&, Operator) { return stem_takes ? nullptr : "it is told to"; }
const Engine kGatherEngine{"gather",         refuse_others, direct::workspace_bytes, direct::launch,
                           direct::describe, nullptr,       nullptr};
const Engine kStemEngine{"stem", refuse_unless_told, nullptr, nullptr, nullptr};
const Engine kWgmmaEngine{"wgmma", refuse_all, nullptr, nullptr, nullptr};
const Engine kMmaEngine{"mma", refuse_all, nullptr, nullptr, nullptr};
}  // namespace modelnew
extern "C" {
void let_take(bool gather, bool stem) {
  modelnew::gather_takes = gather;
  modelnew::stem_takes = stem;
}
const char* patches_yields(int op, const int64_t* fields) {
  return modelnew::patches::yields(make_problem(fields), as_operator(op));
}
}
