// What the dilated engine gives its parts to: one that takes no dilation down the columns, and does the rest as direct.

#include "idle_engines.h"

extern "C" {
int parts_launched = 0;  // so far
}
namespace modelnew {
// Who takes whole problems: nobody, or m, w or g for mma, wgmma or gather, and how long that takes.
static char taker = 0;
static double whole_cycles = 0;
static const char* refuse_dilated(const Problem& problem, Operator) {
  return problem.dilation_h > 1 && problem.R > 1 && taker != 'g' ? "dilated" : nullptr;
}
bool gather_takes_taps_apart(const Problem& problem, Operator) { return taker == 'g' && problem.dilation_h > 1; }
static cudaError_t launch_part(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  ++parts_launched;
  return direct::launch(op, problem, pointers, stream);
}
static const char* refuse_by_mma(const Problem& problem, Operator) {
  return taker != 'm' || problem.dilation_h == 1 ? "it is told to" : nullptr;
}
static const char* refuse_by_wgmma(const Problem& problem, Operator) {
  return taker != 'w' || problem.dilation_h == 1 ? "it is told to" : nullptr;
}
static double cycles_of_whole(const Problem&, Operator) { return whole_cycles; }
static double cycles_by_gather(const Problem& problem, Operator) {
  return problem.dilation_h > 1 ? whole_cycles : 1000;
}
const Engine kWgmmaEngine{"wgmma", refuse_by_wgmma, nullptr, nullptr, nullptr, nullptr, cycles_of_whole};
const Engine kGatherEngine{"gather",         refuse_dilated, direct::workspace_bytes, launch_part,
                           direct::describe, nullptr,        cycles_by_gather};
const Engine kStemEngine{"stem", refuse_all, nullptr, nullptr, nullptr};
const Engine kMmaEngine{"mma", refuse_by_mma, nullptr, nullptr, nullptr, nullptr, cycles_of_whole};
}  // namespace modelnew
extern "C" {
void set_whole_cycles(double cycles, char by) {
  modelnew::whole_cycles = cycles;
  modelnew::taker = by;
}
const char* dilated_yields(int op, const int64_t* fields) {
  return modelnew::dilated::yields(make_problem(fields), as_operator(op));
}
}
