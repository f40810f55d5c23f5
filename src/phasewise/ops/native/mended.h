// What is added to packed levels: of every block a product of thin matrices, and of every line a few numbers apart.
//
// Queries and weights meet the thin matrices one after the other, so that a row costs `rank` products more; numbers
// apart meet four queries at once.
#pragma once
#include "sealed.h"

constexpr long MOST_RANK = 16, MOST_APART = 64;

typedef Each Four;

inline void turn_fours(Four (&x)[4]) {  // x[i][j] becomes x[j][i]
#if LANES == 4
  float32x4x2_t a = vtrnq_f32((float32x4_t)x[0], (float32x4_t)x[1]);
  float32x4x2_t b = vtrnq_f32((float32x4_t)x[2], (float32x4_t)x[3]);
  for (int i = 0; i < 2; i++) {
    x[i] = (Four)vcombine_f32(vget_low_f32(a.val[i]), vget_low_f32(b.val[i]));
    x[i + 2] = (Four)vcombine_f32(vget_high_f32(a.val[i]), vget_high_f32(b.val[i]));
  }
#else
  __m128 a = (__m128)x[0], b = (__m128)x[1], c = (__m128)x[2], d = (__m128)x[3];
  _MM_TRANSPOSE4_PS(a, b, c, d);
  x[0] = (Four)a, x[1] = (Four)b, x[2] = (Four)c, x[3] = (Four)d;
#endif
}

// to[j] = number j of up to four queries, `row` numbers apart; those that there are not have 0. n is a multiple of 4.
inline void gather_fours(const float* x, long row, long queries, long n, Four* to) {
  for (long j = 0; j < n; j += 4) {
    Four some[4] = {};
    for (long i = 0; i < 4 && i < queries; i++) some[i] = load<Four>(x + i * row + j);
    turn_fours(some);
    for (long i = 0; i < 4; i++) to[j + i] = some[i];
  }
}

// The inverse, added.
inline void add_fours(const Four* from, long row, long queries, long n, float* x) {
  for (long j = 0; j < n; j += 4) {
    Four some[4] = {from[j], from[j + 1], from[j + 2], from[j + 3]};
    turn_fours(some);
    for (long i = 0; i < 4 && i < queries; i++) store(x + i * row + j, load<Four>(x + i * row + j) + some[i]);
  }
}

// sum[place] += of[line] * number, for all numbers apart of `lines` lines; places outside `from` .. `from + count` go
// to one behind them.
inline void add_apart(const Sealed& side, long head, long first, long lines, const Four* of, long from, long count,
                      Four* sum) {
  const long each = side.aparts, at_once = MOST_APART / each;
  const uint16_t* numbers = side.apart + head * side.apart_head + first * each;
  const int16_t* places = side.places + head * side.apart_head + first * each;
  alignas(64) float wide[1][MOST_APART];
  for (long line = 0; line < lines; line += at_once) {
    long some = lines - line < at_once ? lines - line : at_once;
    spread_halves<1>(numbers + line * each, 0, 1, some * each, wide);
    for (long i = 0; i < some; i++) {
      Four own = of[line + i];
      for (long j = i * each; j < (i + 1) * each; j++) {
        uint64_t at = (uint64_t)(places[line * each + j] - from);
        at = at < (uint64_t)count ? at : (uint64_t)count;
        sum[at] += own * wide[0][j];
      }
    }
  }
}

// scores[i][..] += query i . what is added to the keys of `count` slots from `slot` on, which lie in one block
inline void score_mended(const Sealed& side, long head, long slot, long count, long dim, long queries,
                         const float (*x)[MOST_DIM], float (*scores)[KEYS]) {
  const long block = slot / side.rows, from = slot % side.rows, rank = side.rank;
  alignas(64) float right[MOST_RANK][MOST_DIM], left[MOST_RANK][KEYS];
  if (rank) {
    spread_halves(side.right + head * side.right_head + block * dim * rank, rank, 0, rank, dim, right);
    spread_halves(side.left + head * side.left_head + slot * rank, rank, 0, rank, count, left);
  }
  for (long r = 0; r < rank; r++)
    for (long i = 0; i < queries; i++) {
      F found = {};
      for (long d = 0; d < dim; d += LANES) found += load<F>(x[i] + d) * load<F>(right[r] + d);
      float share = total(found);
      for (long j = 0; j < count; j += LANES)
        store(scores[i] + j, load<F>(scores[i] + j) + load<F>(left[r] + j) * share);
    }
  for (long i = 0; side.aparts && i < queries; i += 4) {
    Four numbers[MOST_DIM], found[KEYS + 1] = {};
    gather_fours(x[i], MOST_DIM, queries - i, dim, numbers);
    add_apart(side, head, block * dim, dim, numbers, from, count, found);
    add_fours(found, KEYS, queries - i, count, scores[i]);
  }
}

// found[i][d] += what is added to the values of `count` slots from `slot` on, which lie in one block, under weights
inline void add_block_mended(const Sealed& side, long head, long slot, long count, long dim, long queries,
                             const float (*weights)[KEYS], float (*found)[MOST_DIM]) {
  const long block = slot / side.rows, rank = side.rank;
  alignas(64) float right[MOST_RANK][MOST_DIM], left[MOST_RANK][KEYS];
  if (rank) {
    spread_halves(side.right + head * side.right_head + block * dim * rank, rank, 0, rank, dim, right);
    spread_halves(side.left + head * side.left_head + slot * rank, rank, 0, rank, count, left);
  }
  for (long r = 0; r < rank; r++)
    for (long i = 0; i < queries; i++) {
      F own = {};
      for (long j = 0; j < count; j += LANES) own += load<F>(weights[i] + j) * load<F>(left[r] + j);
      float share = total(own);
      for (long d = 0; d < dim; d += LANES) store(found[i] + d, load<F>(found[i] + d) + load<F>(right[r] + d) * share);
    }
  for (long i = 0; side.aparts && i < queries; i += 4) {
    Four numbers[KEYS], sums[MOST_DIM + 1];
    for (long d = 0; d <= dim; d++) sums[d] = Four{};
    gather_fours(weights[i], KEYS, queries - i, (count + 3) / 4 * 4, numbers);
    add_apart(side, head, slot, count, numbers, 0, dim, sums);
    add_fours(sums, MOST_DIM, queries - i, dim, found[i]);
  }
}

// sum[i] += what is added to the values of `count` slots from `slot` on under the weights of query i
inline void add_mended(const Sealed& side, long head, long slot, long count, long dim, long queries,
                       const float (*weights)[KEYS], float (*sum)[MOST_DIM]) {
  alignas(64) float found[QUERIES][MOST_DIM], own[QUERIES][KEYS];
  for (long i = 0; i < queries; i++) memset(found[i], 0, dim * 4);
  for (long at = 0, some; at < count; at += some) {
    some = side.rows - (slot + at) % side.rows;
    some = some < count - at ? some : count - at;
    for (long i = 0; i < queries; i++) {
      memset(own[i], 0, sizeof own[i]);
      memcpy(own[i], weights[i] + at, some * 4);
    }
    add_block_mended(side, head, slot + at, some, dim, queries, own, found);
  }
  for (long i = 0; i < queries; i++)
    for (long d = 0; d < dim; d += 2 * LANES) {
      F numbers[2] = {load<F>(found[i] + d), load<F>(found[i] + d + LANES)};
      add_in_place(numbers, d, dim, sum[i]);
    }
}
