#include "numerics.cuh"
#include "wgmma.cuh"
using namespace modelnew;
__global__ void multiply(float* p, int steps) {
#if defined(MODELNEW_SM90A)
  float acc[32];
  for (int i = 0; i < 32; ++i) acc[i] = p[i * 128 + threadIdx.x];
  for (int i = 0; i < steps; ++i) {
    hopper::wgmma_fence();
    hopper::Wgmma<Half, 64>::multiply(acc, i, i, 1);
    hopper::wgmma_commit();
    BEHIND_A_COMMIT
  }
  hopper::wgmma_wait<0>();
  for (int i = 0; i < 32; ++i) p[i * 128 + threadIdx.x] = acc[i];
#endif
}
