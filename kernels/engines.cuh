// The interface between an engine and the binding. Each engine fills in one struct at the end of its .cu file.
#pragma once
#include <cuda_runtime_api.h>

#include "instances.cuh"
#include "problem.cuh"

namespace modelnew {

namespace hopper {
struct PlanesCopy;
}

struct Engine {
  const char* name;
  // Null if the engine can compute the problem, else the reason why not.
  const char* (*refusal)(const Problem&, Operator);
  // Bytes of workspace that launch needs for these tensors; pointers.workspace is not set yet.
  int64_t (*workspace_bytes)(const Problem&, Operator, const Pointers&);
  cudaError_t (*launch)(Operator, const Problem&, const Pointers&, cudaStream_t);
  // One line for explain(): the configuration that launch would use. Always null-terminated.
  void (*describe)(const Problem&, Operator, char* text, size_t text_size);
  // Null, or the reason why a later engine of the table is faster for a problem that this one can compute. It is not
  // asked of a forced engine. May be null itself.
  const char* (*yields)(const Problem&, Operator) = nullptr;
  // Estimated time of a problem that this engine can compute, in cycles of an SM. May be null.
  double (*cycles)(const Problem&, Operator) = nullptr;
};

// Computes tiles of fprop or dgrad (stride 1) of fp32 tensors by multiply-adds in full accuracy, for another engine
// (listed.cu). It needs listed_workspace_bytes of workspace.
cudaError_t launch_listed(Operator, const Problem&, const Pointers&, const TileList&, int sms, cudaStream_t);
int64_t listed_workspace_bytes(const Problem&, Operator);

// Copies x and dy to channels_last (planes_copy.cu). One of them may have no blocks: it is not copied.
cudaError_t launch_planes_copy(const hopper::PlanesCopy&, const hopper::PlanesCopy&, cudaStream_t);

// Whether direct computes the problem in its points kernel: 1x1 filters to few channels, each pixel read once.
bool direct_has_points(const Problem&, Operator);

// Whether it has it in stem_dgrad: the gradient to an input of few channels.
bool direct_has_stem_dgrad(const Problem&, Operator);

// Whether gather, if it can compute the problem, converts x to scaled fp16 while it loads tiles. That needs no copy,
// and tiles suit large images as well as small ones.
bool gather_lands(const Problem&, Operator);

// Whether gather, if it can compute the problem, loads a TMA box per filter tap: the distance of taps has no cost then.
bool gather_takes_taps_apart(const Problem&, Operator);

extern const Engine kTmaEngine;
extern const Engine kGatherEngine;
extern const Engine kWgmmaEngine;
extern const Engine kStemEngine;
extern const Engine kDepthwiseEngine;
extern const Engine kPointwiseEngine;
extern const Engine kMmaEngine;
extern const Engine kDilatedEngine;
extern const Engine kPatchesEngine;
extern const Engine kStridedEngine;
extern const Engine kMmaWgradEngine;
extern const Engine kTmaWgradEngine;
extern const Engine kHopperWgradEngine;
extern const Engine kDirectEngine;

// The first engine that neither refuses a problem nor yields it to a later one runs it. The last one computes every
// problem.
inline const Engine* const kEngines[] = {&kPatchesEngine,     &kDilatedEngine, &kTmaEngine,       &kWgmmaEngine,
                                         &kGatherEngine,      &kStemEngine,    &kDepthwiseEngine, &kPointwiseEngine,
                                         &kMmaEngine,         &kStridedEngine, &kMmaWgradEngine,  &kTmaWgradEngine,
                                         &kHopperWgradEngine, &kDirectEngine};

}  // namespace modelnew
