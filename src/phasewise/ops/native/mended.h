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

// What is added to the block behind that of `slot`, which is read next. Inlined: see Ahead.
__attribute__((always_inline)) inline void fetch_mended(const Sealed& side, long head, long slot, long lines,
                                                        long dim) {
  const long block = slot / side.rows + 1, line = block * lines;
  auto fetch = [](const void* p, long bytes) __attribute__((always_inline)) {
    for (long at = 0; at < bytes; at += 64) __builtin_prefetch((const char*)p + at, 0, 3);
  };
  if (side.rank) {
    fetch(side.left + head * side.left_head + block * side.rows * side.rank, side.rows * side.rank * 2);
    fetch(side.right + head * side.right_head + block * dim * side.rank, dim * side.rank * 2);
  }
  fetch(side.apart + head * side.apart_head + line * side.aparts, lines * side.aparts * 2);
  fetch(side.places + head * side.apart_head + line * side.aparts, lines * side.aparts * 2);
}

#if LANES == 16
// ---- blocks of as many slots as a softmax takes at a time: four queries side by side, from first to last
//
// A quarter of a register is a number of four queries: quarter l of register 4 g + r is number 16 g + 4 l + r.
constexpr bool BY_FOURS = true;

inline bool by_fours(const Sealed& side) {
  return side.rows == KEYS && (side.rank == 4 || !side.rank) && (side.aparts == 2 || !side.aparts);
}

// x[i]'s quarters are rows of matrices, which become columns: a number of four queries each, or back.
inline void turn_quarters(F (&x)[4]) {
  __m512 a = (__m512)x[0], b = (__m512)x[1], c = (__m512)x[2], d = (__m512)x[3];
  __m512d ab = (__m512d)_mm512_unpacklo_ps(a, b), cd = (__m512d)_mm512_unpacklo_ps(c, d);
  __m512d ba = (__m512d)_mm512_unpackhi_ps(a, b), dc = (__m512d)_mm512_unpackhi_ps(c, d);
  x[0] = (F)_mm512_unpacklo_pd(ab, cd), x[1] = (F)_mm512_unpackhi_pd(ab, cd);
  x[2] = (F)_mm512_unpacklo_pd(ba, dc), x[3] = (F)_mm512_unpackhi_pd(ba, dc);
}

// to = the numbers of up to four queries, `row` apart; those that there are not have 0. n is a multiple of 16.
inline void to_quarters(const float* x, long row, long queries, long n, F* to) {
  for (long at = 0; at < n; at += 16, to += 4) {
    F some[4] = {};
    for (long i = 0; i < 4 && i < queries; i++) some[i] = load<F>(x + i * row + at);
    turn_quarters(some);
    for (int i = 0; i < 4; i++) to[i] = some[i];
  }
}

// Four numbers each of sixteen lines from p on, in the same order: a line's in a quarter.
inline void load_thin(const uint16_t* p, F (&to)[4]) {
  const __m512i first = _mm512_set_epi64(13, 9, 5, 1, 12, 8, 4, 0);
  const __m512i second = _mm512_set_epi64(15, 11, 7, 3, 14, 10, 6, 2);
  __m512i a = load<__m512i>(p), b = load<__m512i>(p + 32);
  __m512i one = _mm512_permutex2var_epi64(a, first, b), other = _mm512_permutex2var_epi64(a, second, b);
  to[0] = (F)_mm512_cvtph_ps(_mm512_castsi512_si256(one));
  to[1] = (F)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(one, 1));
  to[2] = (F)_mm512_cvtph_ps(_mm512_castsi512_si256(other));
  to[3] = (F)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(other, 1));
}

template <int R> inline F each_of(F x) { return (F)_mm512_permute_ps((__m512)x, R * 0x55); }  // number R of quarters

// to += (the sum over `lines` lines of their numbers times those of `in`'s rows) . `out`'s rows
inline void multiply_thin(const F* numbers, long lines, const uint16_t* in, const uint16_t* out, long outs, F* to) {
  F sums[4] = {}, m[4];
  for (long at = 0; at < lines; at += 16, in += 64, numbers += 4) {
    load_thin(in, m);
    for (int r = 0; r < 4; r++) {
      sums[0] += numbers[r] * each_of<0>(m[r]), sums[1] += numbers[r] * each_of<1>(m[r]);
      sums[2] += numbers[r] * each_of<2>(m[r]), sums[3] += numbers[r] * each_of<3>(m[r]);
    }
  }
  for (F& sum : sums) {
    __m512 half = _mm512_add_ps((__m512)sum, _mm512_shuffle_f32x4((__m512)sum, (__m512)sum, 0x4e));
    sum = (F)_mm512_add_ps(half, _mm512_shuffle_f32x4(half, half, 0xb1));
  }
  for (long at = 0; at < outs; at += 16, out += 64, to += 4) {
    load_thin(out, m);
    for (int r = 0; r < 4; r++) {
      F found = to[r] + sums[0] * each_of<0>(m[r]);
      found += sums[1] * each_of<1>(m[r]), found += sums[2] * each_of<2>(m[r]);
      to[r] = found + sums[3] * each_of<3>(m[r]);
    }
  }
}

// one, other += of every line its number times its first, its second number apart, at their places
inline void add_pairs(const Four* of, long lines, const uint16_t* apart, const int16_t* places, Four* one,
                      Four* other) {
  alignas(64) float wide[32];
  alignas(64) uint16_t at[32];  // in bytes
  for (long line = 0; line < lines; line += 16, of += 16, apart += 32, places += 32) {
    for (int j = 0; j < 32; j += 16) {
      store(wide + j, (F)_mm512_cvtph_ps(load<__m256i>(apart + j)));
      __m256i p = load<__m256i>(places + j), three = _mm256_set1_epi16(3);
      __m256i up = _mm256_slli_epi16(_mm256_and_si256(p, three), 2);
      __m256i down = _mm256_and_si256(_mm256_srli_epi16(p, 2), three);
      __m256i kept = _mm256_andnot_si256(_mm256_set1_epi16(15), p);
      store(at + j, _mm256_slli_epi16(_mm256_or_si256(kept, _mm256_or_si256(up, down)), 4));
    }
    asm("" : "+m"(wide), "+m"(at));  // else the compiler takes numbers out of registers one by one
    for (int i = 0; i < 16; i++) {
      const Four own = of[(i & 3) * 4 + (i >> 2)];
      Four *a = (Four*)((char*)one + at[2 * i]), *b = (Four*)((char*)other + at[2 * i + 1]);
      *a += own * wide[2 * i], *b += own * wide[2 * i + 1];
    }
  }
}

inline void clear(F* quarters, long n) {
  for (long i = 0; i < n; i += 4) quarters[i / 4] = F{};
}

// to = what is added to a block, under the numbers of four queries for its `lines` channels or slots. Numbers apart
// come first: sums that are stored in quarters cannot be loaded whole before they have left for memory.
inline void mend(const Sealed& side, const F* numbers, long lines, const uint16_t* in, const uint16_t* out, long outs,
                 long apart, F* to) {
  F other[MOST_DIM / 4];
  clear(to, outs), clear(other, outs);
  if (side.aparts)
    add_pairs((const Four*)numbers, lines, side.apart + apart, side.places + apart, (Four*)to, (Four*)other);
  if (side.rank) multiply_thin(numbers, lines, in, out, outs, to);
  for (long i = 0; i < outs / 4; i++) to[i] += other[i];
}

// scores[i][..] += query i . what is added to the keys of the block at `slot`; quarters are those of the queries
inline void score_quarters(const Sealed& side, long head, long slot, long dim, long queries, const F* quarters,
                        float (*scores)[KEYS]) {
  const long block = slot / KEYS;
  fetch_mended(side, head, slot, dim, dim);
  F to[KEYS / 4];
  for (long i = 0; i < queries; i += 4, quarters += dim / 4) {
    mend(side, quarters, dim, side.right + head * side.right_head + block * dim * side.rank,
         side.left + head * side.left_head + slot * side.rank, KEYS,
         head * side.apart_head + block * dim * side.aparts, to);
    for (long j = 0; j < KEYS; j += 16) {
      F some[4] = {to[j / 4], to[j / 4 + 1], to[j / 4 + 2], to[j / 4 + 3]};
      turn_quarters(some);
      for (long x = 0; x < 4 && i + x < queries; x++) store(scores[i + x] + j, load<F>(scores[i + x] + j) + some[x]);
    }
  }
}

// sum[i] += what is added to the values of the block at `slot` under the weights of query i
inline void add_quarters(const Sealed& side, long head, long slot, long count, long dim, long queries,
                      const float (*weights)[KEYS], float (*sum)[MOST_DIM]) {
  const long block = slot / KEYS;
  fetch_mended(side, head, slot, KEYS, dim);
  F numbers[KEYS / 4], to[MOST_DIM / 4];
  alignas(64) float own[4][KEYS];
  for (long i = 0; i < queries; i += 4) {
    const float* from = weights[i];
    if (count < KEYS) {
      memset(own, 0, sizeof own);
      for (long x = 0; x < 4 && i + x < queries; x++) memcpy(own[x], weights[i + x], count * 4);
      from = own[0];
    }
    to_quarters(from, KEYS, queries - i, KEYS, numbers);
    mend(side, numbers, KEYS, side.left + head * side.left_head + slot * side.rank,
         side.right + head * side.right_head + block * dim * side.rank, dim,
         head * side.apart_head + slot * side.aparts, to);
    for (long d = 0; d < dim; d += 32) {
      F some[2][4];
      for (int half = 0; half < 2; half++) {
        for (int r = 0; r < 4; r++) some[half][r] = to[d / 4 + 4 * half + r];
        turn_quarters(some[half]);
      }
      for (long x = 0; x < 4 && i + x < queries; x++) {
        F both[2] = {some[0][x], some[1][x]};
        add_in_place(both, d, dim, sum[i + x]);
      }
    }
  }
}
#else
constexpr bool BY_FOURS = false;
inline bool by_fours(const Sealed&) { return false; }
inline void to_quarters(const float*, long, long, long, F*) {}
inline void score_quarters(const Sealed&, long, long, long, long, const F*, float (*)[KEYS]) {}
inline void add_quarters(const Sealed&, long, long, long, long, long, const float (*)[KEYS], float (*)[MOST_DIM]) {}
#endif

// scores[i][..] += query i . what is added to the keys of `count` slots from `slot` on, which lie in one block
inline void score_mended(const Sealed& side, long head, long slot, long count, long dim, long queries,
                         const float (*x)[MOST_DIM], float (*scores)[KEYS]) {
  const long block = slot / side.rows, from = slot % side.rows, rank = side.rank;
  fetch_mended(side, head, slot, dim, dim);
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
  fetch_mended(side, head, slot, side.rows, dim);
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
