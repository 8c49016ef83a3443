__global__ void __launch_bounds__(1024, 2) spill(float* p) {
  float v[64];
  #pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 64; ++i) p[i * 1024 + threadIdx.x] = v[i] * v[63 - i];
}
