// Adds what the threads of a block have, in a fixed order.
#pragma once

namespace modelnew {

#if defined(__CUDACC__) || defined(MODELNEW_HOST_EMULATION)

// Adds the rows of smem [i][row][column], THREADS places each; each thread brings the values of one place, or of none
// if that lies outside. The sums replace the first row.
template <int THREADS, int COUNT>
__device__ inline void add_rows(const double (&values)[COUNT], int row, int column, int rows, int columns,
                                double* smem) {
  __syncthreads();  // the sums before have been read
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    if (row < rows && column < columns) smem[i * THREADS + row * columns + column] = values[i];
  const int thread = threadIdx.x;
  while (rows > 1) {
    const int half = (rows + 1) / 2;
    __syncthreads();  // the level above is complete
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (thread < (rows - half) * columns) smem[i * THREADS + thread] += smem[i * THREADS + half * columns + thread];
    rows = half;
  }
  __syncthreads();
}

#endif

// Rows of threads, a power of 2, that add so many partial sums: about eight for each thread.
MODELNEW_HOST_DEVICE inline int rows_of_splits(int splits) {
  int rows = 1;
  while (rows < 32 && 8 * rows < splits) rows *= 2;
  return rows;
}

}  // namespace modelnew
