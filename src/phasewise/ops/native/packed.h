// Lines of numbers that lie packed: levels of so many bits, and what one is worth and where they begin, group by group.
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

struct OfQueries {  // numbers of queries, `row` apart, and the largest magnitude of each; behind these lie three more
  const float* first;
  long row;
  const float* peaks;
};

// Lines that are read next, of which every piece of these that is read fetches its share.
struct Next {
  PackedLines lines;
  long piece, pieces;
};

// What is fetched while four lines are summed.
struct Ahead {
  const char *levels, *step, *low;
  long bytes, ends;  // of four lines

  // In pass `pass` of `passes` over a piece.
  Ahead(const Next& next, long pass, long passes) {
    const PackedLines& of = next.lines;
    const long all = next.pieces * passes, own = next.piece * passes + pass, each = (of.count + 3) / 4;
    bytes = (of.bytes * 4 + all - 1) / all, ends = (of.groups * 8 + all - 1) / all;
    levels = (const char*)of.levels + own * each * bytes;
    step = (const char*)of.step + own * each * ends, low = (const char*)of.low + own * each * ends;
  }

  // Inlined, as a compiler leaves out the call of what has no effect.
  __attribute__((always_inline)) void fetch() {
    __builtin_prefetch(levels, 0, 3), __builtin_prefetch(step, 0, 3), __builtin_prefetch(low, 0, 3);
    for (long at = 64; at < bytes; at += 64) __builtin_prefetch(levels + at, 0, 3);
    levels += bytes, step += ends, low += ends;
  }
};

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

// ---- levels
// Whether lines are summed in pairs, see paired.h. The processors that have a matrix unit multiply bfloat16 at half the
// pace of bytes.
#define PAIRS (DOT_BFLOATS && !MATRIX_UNIT)

#if LANES == 16
// Of four bytes each of four lines, in a quarter of a register: the lines' bytes 0, then their bytes 1 ...; the second
// line's behind the third's where they meet in pairs.
template <bool PAIRED> inline __m512i by_fours() {
  return _mm512_broadcast_i32x4(PAIRED ? _mm_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15)
                                       : _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
}
#endif

// Lane i: byte i of four lines, `row` bytes apart. Of each, `count` bytes are there, and those beyond are nought; lines
// beyond the last of `some` are the last. `DENSE`: lines may follow each other without a gap.
template <bool DENSE = true, bool PAIRED = false>
inline I four_lines(const uint8_t* p, long row, long count, long some) {
  const uint8_t* lines[4] = {p, p + row, p + 2 * row, p + 3 * row};
  if (some < 4)
    for (long i = some; i < 4; i++) lines[i] = p + (some - 1) * row;
#if LANES == 16
  const __m512i words = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
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
  return (I)_mm512_shuffle_epi8(_mm512_permutexvar_epi32(words, all), by_fours<PAIRED>());
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
template <bool PAIRED> inline I four_halves(const uint8_t* p, long at) {
  const __m512i words = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
  __m512i from = _mm512_add_epi32(words, _mm512_set1_epi32((int)(at / 4)));
  __m512i all = _mm512_permutex2var_epi32(load<__m512i>(p), from, load<__m512i>(p + 64));
  return (I)_mm512_shuffle_epi8(all, by_fours<PAIRED>());
}
#endif

// words[l / 4]: lane i has byte `byte` + i, before `end`, of four lines.
template <bool PAIRED> inline void take_words(const PackedLines& of, long byte, long end, I* words) {
  const uint8_t* p = of.levels + byte;
  const long row = of.bytes, all = of.count, count = end - byte < LANES ? end - byte : LANES;
  if (count < LANES || all % 4)
    for (long l = 0; l < all; l += 4) words[l / 4] = four_lines<true, PAIRED>(p + l * row, row, count, all - l);
  else if (row == LANES)
    for (long l = 0; l < all; l += 4) words[l / 4] = four_lines<true, PAIRED>(p + l * LANES, LANES, LANES, 4);
#if LANES == 16
  else if (row == 2 * LANES && byte % LANES == 0)
    for (long l = 0; l < all; l += 4) words[l / 4] = four_halves<PAIRED>(p - byte + l * row, byte);
#endif
  else
    for (long l = 0; l < all; l += 4, p += 4 * row) words[l / 4] = four_lines<false, PAIRED>(p, row, LANES, 4);
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

