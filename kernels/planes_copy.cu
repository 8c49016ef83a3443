// Copies x and dy for weight gradients: planes of 16 bits to channels_last. A unit of its own, as beside other kernels
// it changes their machine code (docs/lab/wgrad.md).
#if !defined(__CUDACC_RTC__)
#include "engines.cuh"
#endif

#include "planes_copy.cuh"

namespace modelnew {
namespace hopper {

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

__global__ void __launch_bounds__(kCopyThreads)
    planes_copy_kernel(const __grid_constant__ PlanesCopy a, const __grid_constant__ PlanesCopy b) {
  extern __shared__ __align__(16) uint8_t modelnew_planes_copy_smem[];
  const int block = static_cast<int>(blockIdx.x), of_a = static_cast<int>(a.blocks);
  wait_for_prerequisites();
  launch_dependents();
  copy_planes(block < of_a ? a : b, block < of_a ? block : block - of_a, modelnew_planes_copy_smem);
}

#endif  // device code

}  // namespace hopper

#if !defined(__CUDACC_RTC__) && (defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION))

cudaError_t launch_planes_copy(const hopper::PlanesCopy& a, const hopper::PlanesCopy& b, cudaStream_t stream) {
  using namespace hopper;
  record({"planes_copy_kernel", {}});
  return launch_early(planes_copy_kernel, static_cast<unsigned>(a.blocks + b.blocks), kCopyThreads, kCopyBytes, stream,
                      a, b);
}

#endif  // launcher

}  // namespace modelnew
