// The engine that dilated, patches and strided give their parts to here: it takes no dilation down the columns, no
// strides or 1x1 filters only, and does the rest as direct.

extern "C" {
int takes_the_rest = 1;
}
namespace modelnew {
static const char* refuse_others(const Problem& problem, Operator) {
  const bool asks[] = {false, problem.dilation_h > 1 && problem.R > 1, problem.R * problem.S > 1,
                       problem.stride_h > 1 || problem.stride_w > 1 || problem.pad_h < 0 || problem.pad_w < 0};
  return asks[engine_number] || !takes_the_rest ? "what it is not for" : nullptr;
}
bool gather_takes_taps_apart(const Problem&, Operator) { return false; }
static double cycles(const Problem&, Operator) { return 1000; }
const Engine kGatherEngine{"gather",         refuse_others, direct::workspace_bytes, direct::launch,
                           direct::describe, nullptr,       cycles};
}  // namespace modelnew
IDLE(kWgmmaEngine) IDLE(kStemEngine) IDLE(kMmaEngine) IDLE(kTmaEngine) IDLE(kDepthwiseEngine) IDLE(kPointwiseEngine)
