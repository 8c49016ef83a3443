// mma.sync: the lanes of a warp show one another their operands, of which it takes what TF32 has.

inline unsigned turns[1024];
inline void simt_multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static uint32_t shown[32][2][32][6];  // of each warp, in turns: nobody writes where another lane may still read
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t(&words)[32][6] = shown[warp][turns[threadIdx.x]++ % 2];
  std::copy(a, a + 4, words[lane]);
  std::copy(b, b + 2, words[lane] + 4);
  __syncwarp();
  const auto value = [&](unsigned of_lane, int word) { return modelnew::bits_float(words[of_lane][word] & ~0x1fffu); };
  for (int i = 0; i < 4; ++i) {
    double sum = d[i];
    const unsigned row = lane / 4 * 4, column = (lane % 4 * 2 + i % 2) * 4;  // lanes that have them
    for (int k = 0; k < 8; ++k)
      sum += double{value(row + k % 4, i / 2 + k / 4 * 2)} * value(column + k % 4, 4 + k / 4);
    d[i] = static_cast<float>(sum);
  }
}
// A launch, or what stands for one of clusters; copies of odd seeds come late.
template <typename Launch>
int simt_run(int seed, bool clusters, Launch launch) {
  simt::independent = true;
  simt::before_block = simt::begin_block;
  simt::between_rounds = simt::do_some;
  simt::late = seed % 2;
  simt::shuffler.seed(seed);
  simt::again = clusters;
  simt::shown.clear();
  int code = 0;
  for (int i = 0; i <= clusters && code == 0; ++i) {
    recomputed = 0;
    std::fill(std::begin(turns), std::end(turns), 0u);
    code = launch();
  }
  return code;
}
