// The conversions of numerics.cuh and the rules of problem.cuh, as plain C++.
#include <initializer_list>

#include "numerics.cuh"
#include "problem_fields.h"

using namespace modelnew;

template <class In, class Out, class Convert>
static void each(const In* in, Out* out, int64_t count, const Convert& convert) {
  for (int64_t i = 0; i < count; ++i) convert(in[i], out[i]);
}

extern "C" {
bool rule_uses_tf32(int op, const int64_t* fields) {
  return uses_tf32(make_problem(fields), static_cast<Operator>(op));
}
void round_all(const float* in, float* out, int64_t count) {
  each(in, out, count, [](float value, float& to) { to = round_to_tf32(value); });
}
void widen_half(const Half* in, float* out, int64_t count) {
  each(in, out, count, [](Half value, float& to) { to = widen(value); });
}
void widen_bfloat16(const BFloat16* in, float* out, int64_t count) {
  each(in, out, count, [](BFloat16 value, float& to) { to = widen(value); });
}
void narrow_half(const float* in, Half* out, int64_t count) {
  each(in, out, count, [](float value, Half& to) { narrow(value, to); });
}
void narrow_bfloat16(const float* in, BFloat16* out, int64_t count) {
  each(in, out, count, [](float value, BFloat16& to) { narrow(value, to); });
}
// Contained times 2^exponent, and whether that is watched to fit, in either half of a pair.
void contain_all(const float* in, float* out, bool* fits, int64_t count, int exponent) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = float_bits(in[i]), one = float_bits(1.0f / power_of_two(exponent));
    const uint32_t pair = i % 2 == 0 ? contain_pair(bits, one, power_of_two(exponent))
                                     : contain_pair(one, bits, power_of_two(exponent));
    out[i] = widen(Half{static_cast<uint16_t>(i % 2 == 0 ? pair : pair >> 16)});
    Watch watch;
    for (uint32_t seen : {one, bits, one}) watch.see(seen);
    for (uint32_t seen : {0u, pair, 0x3c003c00u}) watch.see_contained(seen);
    fits[i] = watch.fits(least_contained(exponent, 1));
  }
}
// The same in two parts.
void split_all(const float* in, float* first, float* rest, bool* fits, int64_t count, int exponent) {
  const float scale = power_of_two(exponent);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = float_bits(in[i]), one = float_bits(1.0f / scale);
    const uint32_t low = i % 2 == 0 ? bits : one, high = i % 2 == 0 ? one : bits;
    const uint32_t firsts = split_pair(low, high, scale), rests = split_rest(low, high, scale, firsts);
    first[i] = widen(Half{static_cast<uint16_t>(i % 2 == 0 ? firsts : firsts >> 16)});
    rest[i] = widen(Half{static_cast<uint16_t>(i % 2 == 0 ? rests : rests >> 16)});
    Watch watch;
    for (uint32_t seen : {one, bits, one}) watch.see(seen);
    for (uint32_t seen : {0u, firsts, 0x3c003c00u}) watch.see_contained(seen);
    fits[i] = watch.fits(least_contained(exponent, 2));
  }
}
bool scale(uint32_t field, int to, int* exponent) { return scale_exponent(field, to, *exponent); }
}
