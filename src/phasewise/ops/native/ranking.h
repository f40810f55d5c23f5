// Numbers in their order, and which of them are the largest.
#pragma once
#include "simd.h"

// Whole numbers in the order of floats that are no NaN.
inline void number(const float* values, long count, int32_t* numbers) {
  for (long p = 0; p < count; p++) {
    float value = values[p] + 0.0f;  // one nought
    int32_t bits;
    memcpy(&bits, &value, 4);
    numbers[p] = bits < 0 ? bits ^ 0x7fffffff : bits;
  }
}

inline long reach(const int32_t* numbers, long count, int32_t least) {
  int32_t found = 0;
  for (long p = 0; p < count; p++) found += numbers[p] >= least;
  return found;
}

// The largest number that `some` of all (at least one, less than all) reach. Its bits are found one by one: no branch
// depends on the numbers.
inline int32_t threshold(const int32_t* numbers, long count, long some) {
  int32_t found = reach(numbers, count, 0) >= some ? 0 : INT32_MIN;
  for (int32_t bit = 1 << 30; bit; bit >>= 1)
    if (reach(numbers, count, found | bit) >= some) found |= bit;
  return found;
}

// The slots of the best `chosen` of `count` units of `size` slots, the first of them at `first`: in order, of equal ones
// the earlier. -> behind them
inline int32_t* list_best(const int32_t* numbers, long count, long chosen, long first, long size, int32_t* slots) {
  int32_t least = chosen ? INT32_MIN : INT32_MAX;  // which no float has
  int32_t equal = 0;                               // how many that are no better are taken
  if (chosen && chosen < count) {
    least = threshold(numbers, count, chosen);
    equal = (int32_t)(chosen - reach(numbers, count, least + 1));
  }
  const int32_t* end = slots + (chosen < count ? chosen : count) * size;
  for (long p = 0; slots < end; p++) {
    int32_t same = (numbers[p] == least) & (equal > 0), taken = (numbers[p] > least) | same;
    equal -= same;
    if (size == 1) {  // no branch depends on the numbers
      *slots = (int32_t)(first + p);
      slots += taken;
    } else if (taken) {
      for (long j = 0; j < size; j++) *slots++ = (int32_t)(first + p * size + j);
    }
  }
  return slots;
}
