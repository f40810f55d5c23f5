// Numbers in their order, and which of them are the largest.
#pragma once
#include "simd.h"

// A whole number in the order of floats that are no NaN, and back.
inline int32_t number(float value) {
  value += 0.0f;  // one nought
  int32_t bits;
  memcpy(&bits, &value, 4);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}
inline float value_of(int32_t number) {
  int32_t bits = number < 0 ? number ^ 0x7fffffff : number;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline void number(const float* values, long count, int32_t* numbers) {
  for (long p = 0; p < count; p++) numbers[p] = number(values[p]);
}

inline long reach(const int32_t* numbers, long count, int32_t least) {
  int32_t found = 0;
  for (long p = 0; p < count; p++) found += numbers[p] >= least;
  return found;
}

// The largest number that `some` of all (at least one, less than all) reach; or, with fewer than 31 `bits`, one not above
// it that begins alike. They are found one by one: no branch depends on the numbers.
inline int32_t threshold(const int32_t* numbers, long count, long some, int bits = 31) {
  int32_t found = reach(numbers, count, 0) >= some ? 0 : INT32_MIN;
  for (int bit = 30; bit > 30 - bits; bit--)
    if (reach(numbers, count, found | 1 << bit) >= some) found |= 1 << bit;
  return found;
}

#if LANES == 16
// Not a register's constant: to fill one is work that is done when the library is loaded, on any processor.
alignas(64) constexpr int32_t EACH_LANE[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// The words of those that are taken, in order -> how many.
inline long put_taken(__mmask16 taken, __m512i words, int32_t* to) {
  long some = __builtin_popcount(taken);
  _mm512_mask_storeu_epi32(to, (__mmask16)((1u << some) - 1), _mm512_maskz_compress_epi32(taken, words));
  return some;
}
#endif

// Which numbers reach `least`, in order -> how many. There is room for all.
inline long which_reach(const int32_t* numbers, long count, int32_t least, int32_t* which) {
  long found = 0, p = 0;
  for (; p + LANES <= count; p += LANES) {
#if LANES == 16
    __mmask16 taken = _mm512_cmpge_epi32_mask(load<__m512i>(numbers + p), _mm512_set1_epi32(least));
    if (taken) found += put_taken(taken, _mm512_add_epi32(load<__m512i>(EACH_LANE), _mm512_set1_epi32((int32_t)p)), which + found);
#else
    if (!any(load<I>(numbers + p) >= least)) continue;
    for (long i = p; i < p + LANES; i++)
      if (numbers[i] >= least) which[found++] = (int32_t)i;
#endif
  }
  for (; p < count; p++)
    if (numbers[p] >= least) which[found++] = (int32_t)p;
  return found;
}

// The slots of the best `chosen` of `count` units of `size` slots, the first of them at `first`; of equal ones the
// earlier, in order. `which`: the units' numbers where they are not 0, 1, ... -> behind them
inline int32_t* list_best(const int32_t* numbers, const int32_t* which, long count, long chosen, long first, long size,
                          int32_t* slots) {
  int32_t least = chosen ? INT32_MIN : INT32_MAX;  // which no float has
  int32_t equal = 0;                               // how many that are no better are taken
  if (chosen && chosen < count) {
    least = threshold(numbers, count, chosen);
    equal = (int32_t)(chosen - reach(numbers, count, least + 1));
  }
  long p = 0;
#if LANES == 16
  for (; size == 1 && p + LANES <= count; p += LANES) {
    __m512i here = load<__m512i>(numbers + p), border = _mm512_set1_epi32(least);
    uint32_t taken = _mm512_cmpgt_epi32_mask(here, border), same = _mm512_cmpeq_epi32_mask(here, border);
    for (; same && equal > 0; same &= same - 1, equal--) taken |= same & (0u - same);
    if (!taken) continue;
    __m512i units = which ? load<__m512i>(which + p) : _mm512_add_epi32(load<__m512i>(EACH_LANE), _mm512_set1_epi32((int32_t)p));
    slots += put_taken((__mmask16)taken, _mm512_add_epi32(units, _mm512_set1_epi32((int32_t)first)), slots);
  }
#endif
  for (; p < count; p++) {
    if (numbers[p] < least || (numbers[p] == least && equal-- <= 0)) continue;
    long unit = which ? which[p] : p;
    for (long j = 0; j < size; j++) *slots++ = (int32_t)(first + unit * size + j);
  }
  return slots;
}
