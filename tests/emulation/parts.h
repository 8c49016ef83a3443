// The engine that dilated, patches and strided give their parts to here: it takes no dilation down the columns, no
// strides or 1x1 filters only, and does the rest as direct. Another one takes weight gradients of 1x1 filters without
// padding, whose outputs meet the first and the last pixel.

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
static const char* refuse_all_but_crops(const Problem& p, Operator op) {
  const auto meets = [](int size, int outputs, int stride) {
    return outputs > 0 && size == (outputs - 1) * taken_stride(stride, outputs) + 1;
  };
  const bool points = p.R * p.S == 1 && p.pad_h == 0 && p.pad_w == 0 && p.dilation_h == 1 && p.dilation_w == 1;
  const bool crop = points && meets(p.H, p.P, p.stride_h) && meets(p.W, p.Q, p.stride_w);
  const bool takes = op == Operator::kWgrad && crop && p.dtype != DType::kFloat64 && takes_the_rest;
  return takes ? nullptr : "what it is not for";
}
namespace modelnew {
const Engine kHopperWgradEngine{"hopper_wgrad", refuse_all_but_crops, direct::workspace_bytes, direct::launch,
                                direct::describe, nullptr,            cycles};
}  // namespace modelnew
IDLE(kMmaWgradEngine) IDLE(kTmaWgradEngine)
IDLE(kWgmmaEngine) IDLE(kStemEngine) IDLE(kMmaEngine) IDLE(kTmaEngine) IDLE(kDepthwiseEngine) IDLE(kPointwiseEngine)
