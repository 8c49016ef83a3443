// What the dilated, patches and strided engines give their parts to: one that takes no dilation down the columns, no
// strides or 1x1 filters only, and does the rest as direct.

extern "C" {
int parts_launched = 0;        // so far
int nobody_takes_the_rest = 0;
}
namespace modelnew {
static const char* refuse_others(const Problem& problem, Operator) {
  const bool asks[] = {false, problem.dilation_h > 1 && problem.R > 1, problem.R * problem.S > 1,
                       problem.stride_h > 1 || problem.stride_w > 1 || problem.pad_h < 0 || problem.pad_w < 0};
  return asks[engine_number] || nobody_takes_the_rest ? "what it is not for" : nullptr;
}
bool gather_takes_taps_apart(const Problem&, Operator) { return false; }
static cudaError_t launch_part(Operator op, const Problem& problem, const Pointers& pointers, cudaStream_t stream) {
  ++parts_launched;
  return direct::launch(op, problem, pointers, stream);
}
static double cycles(const Problem&, Operator) { return 1000; }
const Engine kGatherEngine{"gather",         refuse_others, direct::workspace_bytes, launch_part,
                           direct::describe, nullptr,       cycles};
}  // namespace modelnew
IDLE(kWgmmaEngine) IDLE(kStemEngine) IDLE(kMmaEngine) IDLE(kTmaEngine) IDLE(kDepthwiseEngine) IDLE(kPointwiseEngine)
