#include <cuda_runtime_api.h>
namespace modelnew {
struct Params { const float* in; float* out; int n; };

// out[i] = sum over the rounds of the element opposite to i in its block.
template <int ROUNDS>
__global__ void __launch_bounds__(64) reverse_kernel(const Params params) {
  extern __shared__ __align__(16) unsigned char modelnew_smem[];
  float* tile = reinterpret_cast<float*>(modelnew_smem);
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = 0;
  for (int round = 0; round < ROUNDS; ++round) {
    tile[threadIdx.x] = i < params.n ? params.in[round * params.n + i] : 0.f;
    __syncthreads();  // first
    sum += tile[blockDim.x - 1 - threadIdx.x];
    __syncthreads();  // second
  }
  if (i < params.n) params.out[i] = sum;
}
}  // namespace modelnew

extern "C" int toy(const float* in, float* out, int n) {
  const modelnew::Params params = {in, out, n};
  modelnew::reverse_kernel<5><<<(n + 63) / 64, 64, 64 * sizeof(float), nullptr>>>(params);
  return cudaGetLastError();
}
