// mma.sync: the lanes of a warp show one another their operands, of which it takes what TF32 has.

inline void simt_multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const uint32_t own[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const auto* const words = simt::shown_by_warp(own);
  const unsigned lane = threadIdx.x % 32;
  const auto value = [&](unsigned of_lane, int word) { return modelnew::bits_float(words[of_lane][word] & ~0x1fffu); };
  for (int i = 0; i < 4; ++i) {
    double sum = d[i];
    const unsigned row = lane / 4 * 4, column = (lane % 4 * 2 + i % 2) * 4;  // lanes that have them
    for (int k = 0; k < 8; ++k)
      sum += double{value(row + k % 4, i / 2 + k / 4 * 2)} * value(column + k % 4, 4 + k / 4);
    d[i] = static_cast<float>(sum);
  }
}

// The same for 16-bit values, two in a word.
template <typename Storage>
void simt_multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Storage) {
  const uint32_t own[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const auto* const words = simt::shown_by_warp(own);
  const unsigned lane = threadIdx.x % 32;
  const auto value = [&](unsigned of_lane, int word, int k) {
    return modelnew::widen(Storage{static_cast<uint16_t>(words[of_lane + k / 2 % 4][word] >> k % 2 * 16)});
  };
  for (int i = 0; i < 4; ++i) {
    double sum = d[i];
    const unsigned row = lane / 4 * 4, column = (lane % 4 * 2 + i % 2) * 4;  // lanes that have them
    for (int k = 0; k < 16; ++k) sum += double{value(row, i / 2 + k / 8 * 2, k)} * value(column, 4 + k / 8, k);
    d[i] = static_cast<float>(sum);
  }
}
