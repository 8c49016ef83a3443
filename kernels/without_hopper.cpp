// Stand-ins for the engines that need Hopper's instructions. Builds for other GPUs compile this file instead of these
// engines, so that the engine table is the same in all builds. The stand-ins refuse every problem.
#include "engines.cuh"

namespace modelnew {
namespace {

const char* refusal(const Problem&, Operator) { return "it needs a Hopper GPU (compute capability 9.0)"; }

// These functions are never called, since callers ask for the refusal first.
int64_t workspace_bytes(const Problem&, Operator, const Pointers&) { return 0; }
cudaError_t launch(Operator, const Problem&, const Pointers&, cudaStream_t) { return cudaErrorNotSupported; }
void describe(const Problem&, Operator, char* text, size_t text_size) {
  if (text_size > 0) *text = 0;
}

constexpr Engine stand_in(const char* name) { return {name, refusal, workspace_bytes, launch, describe}; }

}  // namespace

extern const Engine kGatherEngine = stand_in("gather");
extern const Engine kHopperWgradEngine = stand_in("hopper_wgrad");
extern const Engine kStemEngine = stand_in("stem");
extern const Engine kTmaEngine = stand_in("tma");
extern const Engine kTmaWgradEngine = stand_in("tma_wgrad");
extern const Engine kWgmmaEngine = stand_in("wgmma");

bool gather_lands(const Problem&, Operator) { return false; }
bool gather_takes_taps_apart(const Problem&, Operator) { return false; }

}  // namespace modelnew
