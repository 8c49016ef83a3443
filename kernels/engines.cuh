// What an engine offers to the binding. One struct per engine, filled in at the end of its .cu file.
#pragma once
#include <cuda_runtime_api.h>

#include "instances.cuh"
#include "problem.cuh"

namespace modelnew {

struct Engine {
  const char* name;
  // Null when the engine takes the problem, else a sentence that says why not.
  const char* (*refusal)(const Problem&, Operator);
  // What launch needs for these tensors; workspace is not set yet.
  int64_t (*workspace_bytes)(const Problem&, Operator, const Pointers&);
  cudaError_t (*launch)(Operator, const Problem&, const Pointers&, cudaStream_t);
  // One line for explain(): the configuration that launch would use. Always terminated.
  void (*describe)(const Problem&, Operator, char* text, size_t text_size);
  // Null, or why an engine further down the table is the faster one, for a problem that this one takes. Not asked where
  // the engine is forced. May be null itself.
  const char* (*yields)(const Problem&, Operator) = nullptr;
  // How long a problem takes that this one takes, estimated, in cycles of an SM. May be null.
  double (*cycles)(const Problem&, Operator) = nullptr;
};

// Tiles of fprop or dgrad of fp32 tensors by ordinary multiply-adds, for another engine: in full accuracy and without a
// stride (listed.cu). Bytes of its workspace.
cudaError_t launch_listed(Operator, const Problem&, const Pointers&, const TileList&, int sms, cudaStream_t);
int64_t listed_workspace_bytes(const Problem&, Operator);

// Whether the direct engine reads every pixel just once and nothing else: 1x1 filters to few channels.
bool direct_has_points(const Problem&, Operator);

// Whether gather, which takes the problem, contains x on its way: without a copy, in tiles as good for large images as
// for small ones.
bool gather_lands(const Problem&, Operator);

// Whether gather, which takes the problem, has a box for each tap: how far apart taps lie counts for nothing then.
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
extern const Engine kTmaWgradEngine;
extern const Engine kWgradEngine;
extern const Engine kDirectEngine;

// Tried in this order: the first engine that neither refuses a problem nor yields it to a later one runs it; the last
// one takes everything.
inline const Engine* const kEngines[] = {&kPatchesEngine, &kDilatedEngine,   &kTmaEngine,       &kWgmmaEngine,
                                         &kGatherEngine,  &kStemEngine,      &kDepthwiseEngine, &kPointwiseEngine,
                                         &kMmaEngine,     &kStridedEngine,   &kTmaWgradEngine,  &kWgradEngine,
                                         &kDirectEngine};

}  // namespace modelnew
