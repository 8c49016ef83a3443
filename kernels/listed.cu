// Recomputes tiles of fprop or dgrad of fp32 tensors in full accuracy, where operands of another engine were out of
// range of scaled fp16 (engines.cuh: launch_listed). The kernel is correlate's; correlate.cuh draws its tiles.
#if !defined(__CUDACC_RTC__)
#include "engines.cuh"
#endif

#include "correlate.cuh"

#if !defined(__CUDACC_RTC__)

namespace modelnew {

int64_t listed_workspace_bytes(const Problem& problem, Operator op) {
  const direct::CorrelatePlan plan{direct::CorrelateKernel::kWideK, direct::WideK::TILE_K, {}};
  return direct::packed_elements(problem, op, plan) * static_cast<int64_t>(sizeof(float));
}

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// Tiles of 128 pixels, with the list's number of columns.
cudaError_t launch_listed(Operator op, const Problem& problem, const Pointers& pointers, const TileList& list, int sms,
                          cudaStream_t stream) {
  using namespace direct;
  CorrelatePlan plan{CorrelateKernel::kWideK, WideK::TILE_K, {}};
  plan.tiling.cost = -1;
  try_tiling<WideK>(widest_window(op, row_axis(problem)), widest_window(op, column_axis(problem)),
                    correlate_channels(problem, op).in, WideK::TILE_PIXELS / list.tile_q, list.tile_q, 1, true,
                    plan.tiling);
  if (plan.tiling.cost < 0) return cudaErrorInvalidConfiguration;
  CorrelateParams params = correlate_params(op, problem, pointers, plan);
  const cudaError_t error =
      pack_weights(params, pointers.workspace, plan.tile_k, packed_elements(problem, op, plan), list, stream);
  if (error != cudaSuccess) return error;
  params.w_ptr = pointers.workspace;
  record({"correlate_listed_kernel", {}});
  correlate_listed_kernel<WideK><<<WideK::BLOCKS_PER_SM * sms, WideK::THREADS, plan.tiling.smem_bytes, stream>>>(
      params, list, static_cast<int>(problem.N));
  return cudaGetLastError();
}

#endif  // launcher

}  // namespace modelnew

#endif  // host
