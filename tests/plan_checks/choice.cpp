// All engines that are asked before direct, but for depthwise, which takes other problems than these.

#include "gather.cu"
#include "wgmma.cu"
#include "stem.cu"
#include "pointwise.cu"
#include "mma.cu"
#include "dilated.cu"
#include "patches.cu"
#include "strided.cu"
#include "tma.cu"
#include "tma_wgrad.cu"
#include "wgrad.cu"

namespace modelnew {
bool direct_has_points(const Problem&, Operator) { return false; }
bool gather_lands(const Problem& problem, Operator op) {
  return gather::plan_of(problem, op, gather::Alignment{}).plan.lands;
}
bool gather_takes_taps_apart(const Problem& problem, Operator op) {
  return gather::plan_of(problem, op, gather::Alignment{}).plan.apart;
}
int64_t listed_workspace_bytes(const Problem&, Operator) { return 0; }
static const char* refuse(const Problem&, Operator) { return "it takes other problems"; }
const Engine kGatherEngine{"gather", gather::refusal, nullptr, nullptr, nullptr, gather::yields, gather::cycles};
const Engine kWgmmaEngine{"wgmma", wgmma::refusal, nullptr, nullptr, nullptr, wgmma::yields, wgmma::cycles};
const Engine kStemEngine{"stem", stem::refusal, nullptr, nullptr, nullptr, stem::yields, stem::cycles};
const Engine kDepthwiseEngine{"depthwise", refuse, nullptr, nullptr, nullptr};
const Engine kPointwiseEngine{"pointwise", pointwise::refusal, nullptr,          nullptr,
                              nullptr,     pointwise::yields,  pointwise::cycles};
const Engine kMmaEngine{"mma", mma::refusal, nullptr, nullptr, nullptr, mma::yields, mma::cycles};
const Engine kDilatedEngine{"dilated", dilated::refusal, nullptr, nullptr, nullptr, dilated::yields};
const Engine kPatchesEngine{"patches", patches::refusal, nullptr, nullptr, nullptr, patches::yields};
const Engine kStridedEngine{"strided", strided::refusal, nullptr, nullptr, nullptr, strided::yields};
const Engine kTmaEngine{"tma", tma::refusal, nullptr, nullptr, nullptr, tma::yields, tma::cycles};
const Engine kTmaWgradEngine{"tma_wgrad", tma_wgrad::refusal, nullptr, nullptr, nullptr, tma_wgrad::yields};
const Engine kWgradEngine{"wgrad", wgrad::refusal, nullptr, nullptr, nullptr, wgrad::yields, wgrad::cycles};
const Engine kDirectEngine{"direct", [](const Problem&, Operator) -> const char* { return nullptr; }, nullptr, nullptr,
                           nullptr};
}  // namespace modelnew

#include "problem_fields.h"

using namespace modelnew;
extern "C" const char* choose(int op, const int64_t* fields) {
  Memo<const Engine*> memo;  // nothing is remembered from mutation to mutation
  return first_of({ENGINES}, make_problem(fields), static_cast<Operator>(op), memo)->name;
}
