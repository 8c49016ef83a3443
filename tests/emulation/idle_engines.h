// Engines that two others ask and that never take anything.
namespace modelnew {
static const char* refuse_all(const Problem&, Operator) { return "everything"; }
const Engine kTmaEngine{"tma", refuse_all, nullptr, nullptr, nullptr};
const Engine kDepthwiseEngine{"depthwise", refuse_all, nullptr, nullptr, nullptr};
const Engine kPointwiseEngine{"pointwise", refuse_all, nullptr, nullptr, nullptr};
}  // namespace modelnew
