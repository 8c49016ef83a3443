// The conversions of numerics.cuh and the rules of problem.cuh, as plain C++.
#include <initializer_list>

#include "numerics.cuh"
#include "problem_fields.h"

using namespace modelnew;

// Converts one value of an array after another.
#define CONVERSION(name, In, Out, convert)                        \
  void name(const In* in, Out* out, int64_t count) {              \
    for (int64_t i = 0; i < count; ++i) { convert; }              \
  }

extern "C" {
bool rule_uses_tf32(int op, const int64_t* fields) {
  return uses_tf32(make_problem(fields), static_cast<Operator>(op));
}
CONVERSION(round_all, float, float, out[i] = round_to_tf32(in[i]))
CONVERSION(widen_half, Half, float, out[i] = widen(in[i]))
CONVERSION(widen_bfloat16, BFloat16, float, out[i] = widen(in[i]))
CONVERSION(narrow_half, float, Half, narrow(in[i], out[i]))
CONVERSION(narrow_bfloat16, float, BFloat16, narrow(in[i], out[i]))
// Values times 2^exponent in one part or two, in either half of a pair, and whether they are seen to fit.
void contain_all(const float* in, float* first, float* rest, bool* fits, int64_t count, int exponent, int parts) {
  const float scale = power_of_two(exponent);
  for (int64_t i = 0; i < count; ++i) {
    const bool is_low = i % 2 == 0;
    const uint32_t bits = float_bits(in[i]), one = float_bits(1.0f / scale);
    const uint32_t low = is_low ? bits : one, high = is_low ? one : bits;
    const uint32_t firsts = parts == 1 ? contain_pair(low, high, scale) : split_pair(low, high, scale);
    const uint32_t rests = parts == 1 ? 0 : split_rest(low, high, scale, firsts);
    first[i] = widen(Half{static_cast<uint16_t>(is_low ? firsts : firsts >> 16)});
    rest[i] = widen(Half{static_cast<uint16_t>(is_low ? rests : rests >> 16)});
    Watch watch;
    for (uint32_t seen : {one, bits, one}) watch.see(seen);
    for (uint32_t seen : {0u, firsts, 0x3c003c00u}) watch.see_contained(seen);
    fits[i] = watch.fits(least_contained(exponent, parts));
  }
}
bool scale(uint32_t field, int to, int* exponent) { return scale_exponent(field, to, *exponent); }
}
