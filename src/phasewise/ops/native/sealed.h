// Sums over lines of numbers that lie packed: x . (level step + low) = (x step) . level + x . low, line by line.
//
// Levels meet the products of x and steps as they lie: here those of a group are whole numbers of two bytes, 1 / 32512
// of the largest x times the largest step apart, and their products with levels exact, so that sums do not depend on
// their order and become floats once. Another way is that of paired.h.
#pragma once
#include "packed.h"
#include "paired.h"

// The largest magnitude of some numbers, up to a whole register; NaN is larger than all.
inline float largest_of(const float* x, long count) {
  I top = {};
  for (long i = 0; i < count; i += LANES) {
    I size = load<I>(x + i) & 0x7fffffff;
    top = size > top ? size : top;
  }
  const int32_t bits = most(top);
  float largest;
  memcpy(&largest, &bits, 4);
  return largest;
}

// Whole numbers of two bytes, in the lower halves of words, as upper and lower bytes: x = 256 upper + lower, both
// signed.
constexpr int AT_ONCE = LANES == 4 ? 1 : 4;

inline void split(const I (&x)[AT_ONCE], int8_t* upper, int8_t* lower) {
#if LANES == 16
  alignas(64) constexpr uint16_t halves[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                               32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
  const __m512i lower_halves = load<__m512i>(halves), order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  const __m512i half = _mm512_set1_epi16(128), byte = _mm512_set1_epi16(255);
  __m512i a = _mm512_permutex2var_epi16((__m512i)x[0], lower_halves, (__m512i)x[1]);
  __m512i b = _mm512_permutex2var_epi16((__m512i)x[2], lower_halves, (__m512i)x[3]);
  auto above = [&](__m512i v) { return _mm512_srai_epi16(_mm512_add_epi16(v, half), 8); };
  __m512i high = _mm512_packs_epi16(above(a), above(b));
  __m512i low = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
  store(upper, _mm512_permutexvar_epi64(order, high)), store(lower, _mm512_permutexvar_epi64(order, low));
#elif LANES == 8
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), half = _mm256_set1_epi16(128);
  const __m256i byte = _mm256_set1_epi16(255);
  auto both = [&](I a, I b) { return _mm256_packs_epi32((__m256i)(a << 16 >> 16), (__m256i)(b << 16 >> 16)); };
  __m256i a = both(x[0], x[1]), b = both(x[2], x[3]);
  auto above = [&](__m256i v) { return _mm256_srai_epi16(_mm256_add_epi16(v, half), 8); };
  __m256i high = _mm256_packs_epi16(above(a), above(b));
  __m256i low = _mm256_packus_epi16(_mm256_and_si256(a, byte), _mm256_and_si256(b, byte));
  store(upper, _mm256_permutevar8x32_epi32(high, order)), store(lower, _mm256_permutevar8x32_epi32(low, order));
#else
  store_bytes((uint8_t*)upper, ((x[0] << 16 >> 16) + 128) >> 8), store_bytes((uint8_t*)lower, x[0]);
#endif
}

// Levels number s of every byte.
template <int BITS> inline I levels_in(I bytes, int s) {
  return BITS == 8 ? bytes : bytes >> s * BITS & splat(BITS == 2 ? 0x03030303 : 0x0f0f0f0f);
}

// acc[lane] += sum over i < 4 of w[4 lane + i] (signed bytes) x[4 lane + i] (levels of so many bits)
template <int BITS> inline I dot_levels(I acc, I w, I x) {
#if LANES == 8
  if constexpr (BITS == 8) return dot(acc, w, x);
  __m256i pairs = _mm256_maddubs_epi16((__m256i)x, (__m256i)w);
  return acc + (I)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif LANES == 4  // whose bytes are signed
  if constexpr (BITS == 8) return dot(acc, w, levels_in<4>(x, 0)) + (dot(I{}, w, levels_in<4>(x, 1)) << 4);
  return dot(acc, w, x);
#else
  return dot(acc, w, x);
#endif
}

#if !PAIRS
// A register's worth of bytes of every line, four lines together, and the ends of the groups these belong to.
struct Stripe {
  alignas(64) I words[MOST_DIM / 4];
  alignas(64) float step[LANES][MOST_DIM], low[LANES][MOST_DIM];  // of lines that there are not: 0
  float largest[LANES];  // step of a group
  long lines, groups;
  int32_t start[LANES];  // the first lane of a group

  void take(const PackedLines& of, long byte, long end) {
    long count = end - byte < LANES ? end - byte : LANES, first = byte / of.group;
    lines = of.count, groups = (byte + count - 1) / of.group - first + 1;
    for (long x = 0; x < groups; x++) start[x] = (int32_t)((first + x) * of.group - byte);
    take_words<false>(of, byte, end, words);
    spread_halves(of.step, of.groups, first, groups, lines, step);
    spread_halves(of.low, of.groups, first, groups, lines, low);
    for (long x = 0; x < groups; x++) largest[x] = largest_of(step[x], lines);
  }
};

// What the lines of a stripe are multiplied with for up to four queries, by group.
struct Factors {
  alignas(64) int8_t high[4][LANES][MOST_DIM], low[4][LANES][MOST_DIM];
  Each step[LANES], rest[LANES];  // what one is worth (NaN where one is not finite), what lowest numbers come to

  // x: Q of [lines], `row` apart, and numbers up to a whole register, of which `peaks` are the largest; memory goes on
  // for some. All below 1e-30 are taken for nothing.
  template <int Q> void take(const float* x, long row, const float* peaks, const Stripe& stripe) {
    for (long g = 0; g < stripe.groups; g++) {
      if (stripe.lines == AT_ONCE * LANES) take<Q, true>(x, row, peaks, stripe, g);
      else take<Q, false>(x, row, peaks, stripe, g);
    }
  }

 private:
  // ONCE: all lines fit the registers.
  template <int Q, bool ONCE> void take(const float* x, long row, const float* peaks, const Stripe& stripe, long g) {
    const float *steps = stripe.step[g], *least = stripe.low[g];
    const Each largest = load<Each>(peaks) * stripe.largest[g];
    const auto finite = largest <= 3.4e38f;
    const Each inverse = (largest >= 1e-30f) & finite ? 32512 / largest : Each{};
    F lows[4] = {};
    for (long l = 0; l < (ONCE ? AT_ONCE * LANES : stripe.lines); l += AT_ONCE * LANES) {
      I whole[Q][AT_ONCE];
#pragma GCC unroll 4
      for (int i = 0; i < AT_ONCE; i++) {  // of lines that there are not, whatever comes out meets nothing
        const long at = l + i * LANES;
        const bool there = ONCE || at < stripe.lines;
        F step = load<F>(steps + at), low = there ? load<F>(least + at) : F{};
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++) {
          F own = there ? load<F>(x + q * row + at) : F{};
          whole[q][i] = (I)fused(own * step, splat(inverse[q]), splat(MAGIC));
          lows[q] = fused(own, low, lows[q]);
        }
      }
#pragma GCC unroll 4
      for (int q = 0; q < Q; q++) split(whole[q], high[q][g] + l, this->low[q][g] + l);
    }
    step[g] = finite ? largest / 32512 : Each{} + NAN, rest[g] = totals_of(lows);
  }
};

// Of four lines, the factors that every lane's bytes meet. G groups if known beforehand, else 0.
template <int G> inline I factors_of(const int8_t (*bytes)[MOST_DIM], const Stripe& stripe, I lane, long line) {
  I found = splat(load<int32_t>(bytes[0] + line));
  for (long g = 1; g < (G ? G : stripe.groups); g++)
    found = lane >= stripe.start[g] ? splat(load<int32_t>(bytes[g] + line)) : found;
  return found;
}

// found[q][s] = the sums of Q queries over the lines of a stripe: lane i, number s of byte i. They stay below 2^31:
// 256 x 255 x 32512.
template <int Q, int BITS, int G>
inline void sum_lines(const Factors& factors, const Stripe& stripe, Ahead ahead, I (*found)[8 / BITS]) {
  constexpr int S = 8 / BITS;
  I high[Q][S], low[Q][S], lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) high[q][s] = low[q][s] = I{};
  for (long l = 0; l < stripe.lines; l += 4) {
    ahead.fetch();
    I word = stripe.words[l / 4], levels[S];
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) levels[s] = levels_in<BITS>(word, s);
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++) {
      I upper = factors_of<G>(factors.high[q], stripe, lane, l), lower = factors_of<G>(factors.low[q], stripe, lane, l);
#pragma GCC unroll 4
      for (int s = 0; s < S; s++) high[q][s] = dot_levels<BITS>(high[q][s], upper, levels[s]);
#pragma GCC unroll 4
      for (int s = 0; s < S; s++) low[q][s] = dot_levels<BITS>(low[q][s], lower, levels[s]);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) found[q][s] = (high[q][s] << 8) + low[q][s];
}

template <int Q, int BITS>
inline void sum_lines(const Factors& factors, const Stripe& stripe, const Ahead& ahead, I (*found)[8 / BITS]) {
  if (stripe.groups == 1) sum_lines<Q, BITS, 1>(factors, stripe, ahead, found);
  else if (stripe.groups == 2) sum_lines<Q, BITS, 2>(factors, stripe, ahead, found);
  else sum_lines<Q, BITS, 0>(factors, stripe, ahead, found);
}

// Whole sums as the numbers they stand for, in the order in which they lie.
template <int BITS>
inline void worth_of(const I (&found)[8 / BITS], const Factors& own, int q, const Stripe& stripe,
                                        F (&numbers)[8 / BITS]) {
  constexpr int S = 8 / BITS;
  F step = splat(own.step[0][q]), rest = splat(own.rest[0][q]);
  I lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  for (long g = 1; g < stripe.groups; g++) {
    I from = lane >= stripe.start[g];
    step = select(from, splat(own.step[g][q]), step), rest = select(from, splat(own.rest[g][q]), rest);
  }
  for (int s = 0; s < S; s++) numbers[s] = __builtin_convertvector(found[s], F) * step + rest;
  in_line(numbers);
}

// put(query, number, register): what the queries x [queries, row] make of the numbers between two bytes of all lines
template <int Q, int BITS, class Put>
inline void contract(const Stripe& stripe, const Ahead& ahead, const OfQueries& x, long first, long queries, long at,
                     const Put& put) {
  for (; queries - first >= Q; first += Q) {
    Factors factors;
    I found[Q][8 / BITS];
    factors.take<Q>(x.first + first * x.row, x.row, x.peaks + first, stripe);
    sum_lines<Q, BITS>(factors, stripe, ahead, found);
    for (int q = 0; q < Q; q++) {
      F numbers[8 / BITS];
      worth_of<BITS>(found[q], factors, q, stripe, numbers);
      put(first + q, at, numbers);
    }
  }
  if constexpr (Q > 1) contract<Q - 1, BITS>(stripe, ahead, x, first, queries, at, put);
}

template <int BITS, class Put>
inline void contract(const PackedLines& lines, const Next& next, const OfQueries& x, long queries, long from, long to,
                     const Put& put) {
  constexpr int Q = REGISTERS == 32 ? (BITS == 2 ? 3 : 4) : (BITS == 2 ? 1 : 2);  // whose sums fit the registers
  long rounds = (queries + Q - 1) / Q, each = (queries + rounds - 1) / rounds, passes = (to - from + LANES - 1) / LANES;
  Stripe stripe;
  for (long pass = 0; pass < passes; pass++) {
    long byte = from + pass * LANES, at = pass * LANES * (8 / BITS);
    stripe.take(lines, byte, to);
    Ahead ahead(next, pass, passes);
    if (Q > 3 && each > 3) contract<Q, BITS>(stripe, ahead, x, 0, queries, at, put);
    else if (Q > 2 && each > 2) contract<(Q < 3 ? Q : 3), BITS>(stripe, ahead, x, 0, queries, at, put);
    else if (Q > 1 && each > 1) contract<(Q < 2 ? Q : 2), BITS>(stripe, ahead, x, 0, queries, at, put);
    else contract<1, BITS>(stripe, ahead, x, 0, queries, at, put);
  }
}

#endif

// scores[i][..] = query i . the keys of `count` slots from `slot` on, which lie in one block; those behind are next
inline void score_sealed(const Sealed& side, const PackedLines& all, long slot, long count, long dim, long queries,
                         const OfQueries& x, float (*scores)[KEYS]) {
  const long block = slot / side.rows, first = slot - block * side.rows, from = first * side.bits / 8;
  const long to = from + (count * side.bits + 7) / 8;
  const PackedLines lines = all.from(block * dim, dim);
  const Next next = {all.from((block + 1) * dim, dim), first / KEYS, (side.rows + KEYS - 1) / KEYS};
  auto put = [&](long i, long at, const auto& numbers) {
    for (const F& some : numbers) store(scores[i] + at, some), at += LANES;
  };
  if (side.bits == 2) contract<2>(lines, next, x, queries, from, to, put);
  else contract<4>(lines, next, x, queries, from, to, put);
}

// sum[d], in the order that `place` tells, += a register's numbers from d on
template <int N> inline void add_in_place(const F (&numbers)[N], long d, long dim, float* sum) {
#if DOT_INSTRUCTIONS
  for (int i = 0; i < N && d < dim; i += 2, d += 2 * LANES) {
    __m512 a = (__m512)numbers[i], b = (__m512)numbers[i + 1];
    store(sum + d, load<F>(sum + d) + (F)_mm512_shuffle_f32x4(a, b, 0x88));
    store(sum + d + LANES, load<F>(sum + d + LANES) + (F)_mm512_shuffle_f32x4(a, b, 0xdd));
  }
#else
  for (int i = 0; i < N && d < dim; i++, d += LANES) store(sum + d, load<F>(sum + d) + numbers[i]);
#endif
}

// sum[i] += the values of `count` slots from `slot` on under the weights of query i
inline void add_sealed(const Sealed& side, const PackedLines& all, long slot, long count, long dim, long queries,
                       const OfQueries& weights, float (*sum)[MOST_DIM]) {
  PackedLines lines = all.from(slot, count);
  const Next next = {all.from(slot + count, count), 0, 1};
  auto put = [&](long i, long at, const auto& numbers) { add_in_place(numbers, at, dim, sum[i]); };
  if (side.bits == 2) contract<2>(lines, next, weights, queries, 0, lines.bytes, put);
  else contract<4>(lines, next, weights, queries, 0, lines.bytes, put);
}
