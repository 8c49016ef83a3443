// Calls a bundle's kernels as its binding does, over stand-ins for the CUDA runtime.
#include <cstdint>
#include <cstdio>

#include "cuda_stand_ins.h"

extern "C" {

const char* CUDARTAPI cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidConfiguration ? "invalid configuration" : "another error";
}

int64_t modelnew_workspace_bytes(int op, int row, const int64_t* sizes, const void* const* pointers);
const char* modelnew_launch(int op, int row, const int64_t* sizes, const void* const* pointers, void* stream);

// Writes the recorded instances, or why it failed, and returns whether it did not.
__attribute__((visibility("default"))) bool run_bundle(int capability, int sms, const int64_t* sizes, int op, int row,
                                                       char* text, size_t size) {
  gpu = {capability, sms};
  modelnew::recorded.clear();
  const void* pointers[6];
  for (int64_t i = 0; i < 6; ++i) pointers[i] = reinterpret_cast<void*>((i + 1) << 44);
  modelnew_workspace_bytes(op, row, sizes, pointers);
  const char* const error = modelnew_launch(op, row, sizes, pointers, nullptr);
  snprintf(text, size, "%s", error == nullptr ? modelnew::recorded.c_str() : error);
  return error == nullptr;
}

}  // extern "C"
