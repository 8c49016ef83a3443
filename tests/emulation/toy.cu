#include <cuda_runtime_api.h>
namespace modelnew {
struct Params { const float* in; float* out; int n; };

// out[i] = sum over the rounds of the element opposite to i in its block. The mutations are those of test_emulation.py.
template <int ROUNDS>
__global__ void __launch_bounds__(64) reverse_kernel(const Params params) {
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  float* tile = reinterpret_cast<float*>(modelnew_smem);
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = 0;
  if (simt_mutation == 4 && i >= params.n) return;
  for (int round = 0; round < ROUNDS; ++round) {
    tile[threadIdx.x + (simt_mutation == 6)] = i < params.n ? params.in[round * params.n + i] : 0.f;
    if (simt_mutation != 1 && (simt_mutation != 3 || threadIdx.x < 32)) __syncthreads();
    sum += tile[blockDim.x - (simt_mutation != 5) - threadIdx.x];
    if (simt_mutation != 2) __syncthreads();
  }
  if (i < params.n) params.out[i] = sum;
}
}  // namespace modelnew

extern "C" int toy(const float* in, float* out, int n) {
  const modelnew::Params params = {in, out, n};
  const size_t smem_bytes = simt_mutation == 7 ? 50000 : 64 * sizeof(float);
  modelnew::reverse_kernel<5><<<(n + 63) / 64, 64, smem_bytes, nullptr>>>(params);
  return cudaGetLastError();
}
