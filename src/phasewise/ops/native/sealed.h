// Sums over lines of numbers that lie packed: x . (level step + low) = (x step) . level + x . low, line by line.
//
// Levels meet the products of x and steps as they lie. Of a group these are whole numbers of two bytes, 1 / 32512 of the
// largest x times the largest step apart, and their products with levels exact: sums do not depend on their order and
// become floats once.
#pragma once
#include "kernels.h"
#include "softmax.h"

// ---- what is packed
struct PackedLines {  // of a head, from the first that is read on
  const uint8_t* levels;
  const uint16_t *step, *low;  // float16 [lines, groups]
  long bytes, groups;          // of a line
  long group;                  // bytes of a group
  long count;

  // All lines of a head, of `numbers` numbers.
  PackedLines(const Sealed& side, long head, long numbers)
      : bytes(numbers * side.bits / 8), groups(numbers / side.group), group(side.group * side.bits / 8), count(0) {
    levels = side.levels + head * side.levels_head;
    step = side.step + head * side.ends_head, low = side.low + head * side.ends_head;
  }

  // Lines of one group each.
  PackedLines(const uint8_t* levels, const uint16_t* step, const uint16_t* low, long bytes)
      : levels(levels), step(step), low(low), bytes(bytes), groups(1), group(bytes), count(0) {}

  // The ends of a register's worth of lines, which are read after others.
  __attribute__((always_inline)) void fetch_ends(long line) const {
    __builtin_prefetch(step + line * groups, 0, 3), __builtin_prefetch(low + line * groups, 0, 3);
  }

  // `some` of them, from line `first` on.
  PackedLines from(long first, long some) const {
    PackedLines lines = *this;
    lines.levels += first * bytes, lines.step += first * groups, lines.low += first * groups, lines.count = some;
    return lines;
  }
};

// Lines that are read next, from some byte on: four are fetched at a time, while others are summed.
struct Ahead {
  const char *levels, *step, *low;
  long bytes, ends;  // of a line

  Ahead(const PackedLines& of, long byte)
      : levels((const char*)of.levels + byte), step((const char*)(of.step + byte / of.group)),
        low((const char*)(of.low + byte / of.group)), bytes(of.bytes), ends(of.groups * 2) {}

  // Inlined, as a compiler leaves out the call of what has no effect.
  __attribute__((always_inline)) void fetch(long line) const {
    __builtin_prefetch(levels + line * bytes, 0, 3);
    if (bytes >= 32) __builtin_prefetch(levels + (line + 2) * bytes, 0, 3);
    if (bytes >= 64) {
      __builtin_prefetch(levels + (line + 1) * bytes, 0, 3);
      __builtin_prefetch(levels + (line + 3) * bytes, 0, 3);
    }
    __builtin_prefetch(step + line * ends, 0, 3), __builtin_prefetch(low + line * ends, 0, 3);
  }
};

// ---- float16
inline I load_halves(const uint16_t* p) {
#if LANES == 4
  return widen(load<uint16x4_t>(p));
#else
  return load_wide((const bf16*)p);
#endif
}

// The float16 in the lower half of every lane; the upper half is nought.
inline F from_halves(I halves) {
#if LANES == 16
  return (F)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)halves));
#else
  I size = (halves & 0x7fff) << 13;
  F finite = (F)size * 5.192296858534828e33f;  // 2^112, the difference of the exponents' zeros
  I bits = size >= 0x0f800000 ? size | 0x7f800000 : (I)finite;
  return (F)(bits | (halves & 0x8000) << 16);
#endif
}

// ---- two registers and one another's numbers
#if LANES == 16
inline void zip(F& a, F& b) {  // a0 b0 a1 b1 ...
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  __m512 first = _mm512_permutex2var_ps((__m512)a, low, (__m512)b);
  b = (F)_mm512_permutex2var_ps((__m512)a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), (__m512)b), a = (F)first;
}
#elif LANES == 8
inline void zip(F& a, F& b) {
  __m256 low = _mm256_unpacklo_ps((__m256)a, (__m256)b), high = _mm256_unpackhi_ps((__m256)a, (__m256)b);
  a = (F)_mm256_permute2f128_ps(low, high, 0x20), b = (F)_mm256_permute2f128_ps(low, high, 0x31);
}
inline void unzip(I& a, I& b) {
  auto halves = [](I x) { return _mm256_permutevar8x32_epi32((__m256i)x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7)); };
  __m256i x = halves(a), y = halves(b);
  a = (I)_mm256_permute2x128_si256(x, y, 0x20), b = (I)_mm256_permute2x128_si256(x, y, 0x31);
}
#else
inline void zip(F& a, F& b) {
  float32x4_t x = (float32x4_t)a, y = (float32x4_t)b;
  a = (F)vzip1q_f32(x, y), b = (F)vzip2q_f32(x, y);
}
inline void unzip(I& a, I& b) {
  int32x4_t x = (int32x4_t)a, y = (int32x4_t)b;
  a = (I)vuzp1q_s32(x, y), b = (I)vuzp2q_s32(x, y);
}
#endif

// Those of groups x and x + 1, if there is one, of a register's worth of lines, which have ALL (1, 2 or 4) float16
// each.
template <int ALL> inline void ends_of(const uint16_t* p, long x, F& one, F& other) {
#if LANES == 16
  if constexpr (ALL == 1) {
    one = (F)_mm512_cvtph_ps(load<__m256i>(p));
  } else {
    alignas(64) constexpr uint16_t each[32] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                                               0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(1), 1);
    __m512i order = _mm512_slli_epi16(load<__m512i>(each), ALL / 2), both;
    order = _mm512_add_epi16(order, _mm512_add_epi16(second, _mm512_set1_epi16((short)x)));
    if constexpr (ALL == 2) both = _mm512_permutexvar_epi16(order, load<__m512i>(p));
    else both = _mm512_permutex2var_epi16(load<__m512i>(p), order, load<__m512i>(p + 2 * LANES));
    one = (F)_mm512_cvtph_ps(_mm512_castsi512_si256(both));
    other = (F)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1));
  }
#else
  I pairs[2] = {};
  if constexpr (ALL == 1) pairs[0] = load_halves(p);
  else pairs[0] = load<I>(p);
  if constexpr (ALL == 4) {
    pairs[1] = load<I>(p + 2 * LANES);
    unzip(pairs[0], pairs[1]);
  }
  auto number = [&](long x) { return from_halves((x % 2 ? pairs[x / 2] >> 16 : pairs[x / 2]) & 0xffff); };
  one = number(x);
  if (x + 1 < ALL) other = number(x + 1);
#endif
}

// to[x][line] = number first + x, x < some, of the `all` float16 of each line; up to a whole register 0 where there are
// no lines.
template <long WIDTH>
inline void spread_singly(const uint16_t* p, long all, long first, long some, long from, long lines,
                          float (*to)[WIDTH]) {
  for (long x = 0; x < some; x++)
    for (long l = from; l < lines; l += LANES) {
      I found = {};
      for (long i = 0; i < LANES && l + i < lines; i++) found[i] = p[(l + i) * all + first + x];
      store(to[x] + l, from_halves(found));
    }
}

template <int ALL, long WIDTH>
inline void spread_halves(const uint16_t* p, long first, long some, long lines, float (*to)[WIDTH]) {
  const long whole = lines / LANES * LANES;
  for (long x = 0; x < some; x += 2)
    for (long l = 0; l < whole; l += LANES) {
      F one, other;
      ends_of<ALL>(p + l * ALL, first + x, one, other);
      store(to[x] + l, one);
      if (x + 1 < some) store(to[x + 1] + l, other);
    }
  spread_singly(p, ALL, first, some, whole, lines, to);
}

template <long WIDTH>
inline void spread_halves(const uint16_t* p, long all, long first, long some, long lines, float (*to)[WIDTH]) {
  if (all == 1) spread_halves<1>(p, first, some, lines, to);
  else if (all == 2) spread_halves<2>(p, first, some, lines, to);
  else if (all == 4) spread_halves<4>(p, first, some, lines, to);
  else spread_singly(p, all, first, some, 0, lines, to);
}

inline int32_t most(I v) {
#if LANES == 16
  return _mm512_reduce_max_epi32((__m512i)v);
#elif LANES == 4
  return vmaxvq_s32((int32x4_t)v);
#else
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
#endif
}

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

// Whole numbers of two bytes, in the lower halves of words, as upper and lower bytes: x = 256 upper + lower, both signed.
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

// ---- levels
// Lane i: byte i of four lines, `row` bytes apart. Of each, `count` bytes are there, and those beyond are nought; lines
// beyond the last of `some` are the last. `DENSE`: lines may follow each other without a gap.
template <bool DENSE = true> inline I four_lines(const uint8_t* p, long row, long count, long some) {
  const uint8_t* lines[4] = {p, p + row, p + 2 * row, p + 3 * row};
  if (some < 4)
    for (long i = some; i < 4; i++) lines[i] = p + (some - 1) * row;
#if LANES == 16
  const __m512i words = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i all;
  if (DENSE && count >= LANES && row == LANES && some >= 4) {
    all = load<__m512i>(p);
  } else if (count >= LANES) {
    all = _mm512_castsi128_si512(load<__m128i>(lines[0]));
    all = _mm512_inserti32x4(all, load<__m128i>(lines[1]), 1);
    all = _mm512_inserti32x4(all, load<__m128i>(lines[2]), 2);
    all = _mm512_inserti32x4(all, load<__m128i>(lines[3]), 3);
  } else {
    __mmask16 there = (__mmask16)((1 << count) - 1);
    all = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(there, lines[0]));
    all = _mm512_inserti32x4(all, _mm_maskz_loadu_epi8(there, lines[1]), 1);
    all = _mm512_inserti32x4(all, _mm_maskz_loadu_epi8(there, lines[2]), 2);
    all = _mm512_inserti32x4(all, _mm_maskz_loadu_epi8(there, lines[3]), 3);
  }
  return (I)_mm512_shuffle_epi8(_mm512_permutexvar_epi32(words, all), _mm512_broadcast_i32x4(order));
#elif LANES == 8
  uint64_t each[4] = {};
  for (int l = 0; l < 4; l++)
    if (count >= LANES) memcpy(each + l, lines[l], LANES);
    else memcpy(each + l, lines[l], count);
  const __m256i words = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m256i all = _mm256_set_epi64x((long long)each[3], (long long)each[2], (long long)each[1], (long long)each[0]);
  return (I)_mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(all, words), _mm256_broadcastsi128_si256(order));
#else
  uint32_t each[4] = {};
  for (int l = 0; l < 4; l++)
    if (count >= LANES) memcpy(each + l, lines[l], LANES);
    else memcpy(each + l, lines[l], count);
  const uint8x16_t order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  return (I)vqtbl1q_u8(load<uint8x16_t>(each), order);
#endif
}

#if LANES == 16
// The same of two registers of lines that follow each other, from byte `at` (0 or 16) of each on.
inline I four_halves(const uint8_t* p, long at) {
  const __m512i words = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i from = _mm512_add_epi32(words, _mm512_set1_epi32((int)(at / 4)));
  __m512i all = _mm512_permutex2var_epi32(load<__m512i>(p), from, load<__m512i>(p + 64));
  return (I)_mm512_shuffle_epi8(all, _mm512_broadcast_i32x4(order));
}
#endif

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
    const uint8_t* p = of.levels + byte;
    const long row = of.bytes, all = lines;
    if (count < LANES || all % 4)
      for (long l = 0; l < all; l += 4) words[l / 4] = four_lines(p + l * row, row, count, all - l);
    else if (row == LANES)
      for (long l = 0; l < all; l += 4) words[l / 4] = four_lines(p + l * LANES, LANES, LANES, 4);
#if LANES == 16
    else if (row == 2 * LANES && byte % LANES == 0)
      for (long l = 0; l < all; l += 4) words[l / 4] = four_halves(p - byte + l * row, byte);
#endif
    else
      for (long l = 0; l < all; l += 4, p += 4 * row) words[l / 4] = four_lines<false>(p, row, LANES, 4);
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
inline void sum_lines(const Factors& factors, const Stripe& stripe, const Ahead& ahead, I (*found)[8 / BITS]) {
  constexpr int S = 8 / BITS;
  I high[Q][S], low[Q][S], lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) high[q][s] = low[q][s] = I{};
  for (long l = 0; l < stripe.lines; l += 4) {
    ahead.fetch(l);
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

// Numbers s of LANES bytes, register by register, become the numbers in the order in which they lie.
template <int S> inline void in_line(F (&numbers)[S]) {
  if constexpr (S == 4) {
    zip(numbers[0], numbers[2]), zip(numbers[1], numbers[3]);  // 0 2 0 2 .., 1 3 1 3 ..: first and second halves
    zip(numbers[0], numbers[1]), zip(numbers[2], numbers[3]);
  } else if constexpr (S == 2) {
    zip(numbers[0], numbers[1]);
  }
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

struct OfQueries {  // numbers of queries, `row` apart, and the largest magnitude of each; behind these lie three more
  const float* first;
  long row;
  const float* peaks;
};

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
inline void contract(const PackedLines& lines, const Ahead& next, const OfQueries& x, long queries, long from, long to,
                     const Put& put) {
  constexpr int Q = REGISTERS == 32 ? (BITS == 2 ? 3 : 4) : (BITS == 2 ? 1 : 2);  // whose sums fit the registers
  long passes = (queries + Q - 1) / Q, each = (queries + passes - 1) / passes;
  Stripe stripe;
  for (long byte = from; byte < to; byte += LANES) {
    long at = (byte - from) * (8 / BITS);
    stripe.take(lines, byte, to);
    Ahead ahead = next;
    ahead.levels += byte - from;
    if (Q > 3 && each > 3) contract<Q, BITS>(stripe, ahead, x, 0, queries, at, put);
    else if (Q > 2 && each > 2) contract<(Q < 3 ? Q : 3), BITS>(stripe, ahead, x, 0, queries, at, put);
    else if (Q > 1 && each > 1) contract<(Q < 2 ? Q : 2), BITS>(stripe, ahead, x, 0, queries, at, put);
    else contract<1, BITS>(stripe, ahead, x, 0, queries, at, put);
  }
}

// scores[i][..] = query i . the keys of `count` slots from `slot` on, which lie in one block; those behind are next
inline void score_sealed(const Sealed& side, const PackedLines& all, long slot, long count, long dim, long queries,
                         const OfQueries& x, float (*scores)[KEYS]) {
  const long block = slot / side.rows, first = slot - block * side.rows, from = first * side.bits / 8;
  const bool within = first + count < side.rows;
  const long to = from + (count * side.bits + 7) / 8;
  PackedLines lines = all.from(block * dim, dim);
  Ahead ahead(within ? lines : all.from((block + 1) * dim, dim), within ? to : 0);
  auto put = [&](long i, long at, const auto& numbers) {
    for (const F& some : numbers) store(scores[i] + at, some), at += LANES;
  };
  if (side.bits == 2) contract<2>(lines, ahead, x, queries, from, to, put);
  else contract<4>(lines, ahead, x, queries, from, to, put);
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
  Ahead ahead(all.from(slot + count, count), 0);
  auto put = [&](long i, long at, const auto& numbers) { add_in_place(numbers, at, dim, sum[i]); };
  if (side.bits == 2) contract<2>(lines, ahead, weights, queries, 0, lines.bytes, put);
  else contract<4>(lines, ahead, weights, queries, 0, lines.bytes, put);
}
