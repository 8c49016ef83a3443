// The choice among all engines. Depthwise, whose problems are others, has no plans here.
#include "gather.cu"
#include "wgmma.cu"
#include "stem.cu"
#include "pointwise.cu"
#include "mma.cu"
#include "mma_wgrad.cu"
#include "dilated.cu"
#include "patches.cu"
#include "strided.cu"
#include "tma.cu"
#include "hopper_wgrad.cu"
#include "tma_wgrad.cu"

#include "problem_fields.h"

namespace modelnew {
bool direct_has_points(const Problem&, Operator) { return false; }
// Some of those that it has.
bool direct_has_stem_dgrad(const Problem& problem, Operator op) {
  return op == Operator::kDgrad && problem.C == 3 && problem.K == 64 && problem.R == problem.S;
}
bool gather_lands(const Problem& problem, Operator op) {
  return gather::plan_of(problem, op, gather::Alignment{}).plan.lands;
}
bool gather_takes_taps_apart(const Problem& problem, Operator op) {
  return gather::plan_of(problem, op, gather::Alignment{}).plan.apart;
}
int64_t listed_workspace_bytes(const Problem&, Operator) { return 0; }

#define ENGINE(Name, name, cycles) \
  const Engine k##Name##Engine{#name, name::refusal, nullptr, nullptr, nullptr, name::yields, cycles};
ENGINE(Gather, gather, gather::cycles)
ENGINE(Wgmma, wgmma, wgmma::cycles)
ENGINE(Stem, stem, stem::cycles)
ENGINE(Pointwise, pointwise, pointwise::cycles)
ENGINE(Mma, mma, mma::cycles)
ENGINE(Tma, tma, tma::cycles)
ENGINE(MmaWgrad, mma_wgrad, nullptr)
ENGINE(TmaWgrad, tma_wgrad, tma_wgrad::cycles)
ENGINE(HopperWgrad, hopper_wgrad, hopper_wgrad::cycles)
ENGINE(Dilated, dilated, nullptr)
ENGINE(Patches, patches, nullptr)
ENGINE(Strided, strided, nullptr)
static const char* refuse(const Problem&, Operator) { return "it takes other problems"; }
static const char* take(const Problem&, Operator) { return nullptr; }
const Engine kDepthwiseEngine{"depthwise", refuse, nullptr, nullptr, nullptr};
const Engine kDirectEngine{"direct", take, nullptr, nullptr, nullptr};
}  // namespace modelnew

using namespace modelnew;
extern "C" const char* choose(int op, const int64_t* fields) {
  static Memo<const Engine*> memo;
  return first_of(kEngines, make_problem(fields), static_cast<Operator>(op), memo)->name;
}
