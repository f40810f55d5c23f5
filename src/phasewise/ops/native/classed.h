// Rows that lie packed in two classes of so many bits a number, all heads' numbers of a row in a line: scores of their
// keys, and sums of their values under weights.
//
// A bit of each slot says which class has it; where it lies there is the count of such bits before it. Number d of a row
// is (level step + low) scale[d]. Queries times scales are whole numbers of two bytes, 1 / 32512 of the largest apart,
// and meet the levels of a register's worth of lines at a time; values are summed as in sealed.h, and scaled then.
#pragma once
#include "sealed.h"

constexpr long ROOM = KEYS + LANES;  // for numbers of some slots of a class, up to a whole register

struct Classes {  // of `count` slots
  uint64_t upper;  // bit j: slot j is of the upper class
  long size[2], first[2];
  long count;
#if LANES != 16
  uint8_t at[KEYS];  // of each slot, its number among those of the upper class, or ROOM more than among the others

  void place() {
    for (long j = 0, above = 0, below = ROOM; j < count; j++) at[j] = (uint8_t)(upper >> j & 1 ? above++ : below++);
  }
#else
  void place() {}
  __mmask16 mask(long j, int which) const {
    uint64_t there = count < KEYS ? (1ull << count) - 1 : ~0ull;
    return (__mmask16)((which ? ~upper & there : upper) >> j);
  }
#endif

  // scores of slots, from those of either class
  void in_order(const float (*found)[ROOM], float* scores) const {
#if LANES == 16
    const float *above = found[0], *below = found[1];
    for (long j = 0; j < count; j += LANES) {
      __mmask16 one = mask(j, 0), other = mask(j, 1);
      __m512 x = _mm512_maskz_expand_ps(one, _mm512_loadu_ps(above));
      store(scores + j, _mm512_mask_expand_ps(x, other, _mm512_loadu_ps(below)));
      above += __builtin_popcount(one), below += __builtin_popcount(other);
    }
#else
    for (long j = 0; j < count; j++) scores[j] = found[0][at[j]];
#endif
  }

  // The inverse: up to a whole register noughts.
  void apart(const float* weights, float (*to)[ROOM]) const {
#if LANES == 16
    float* next[2] = {to[0], to[1]};
    for (long j = 0; j < count; j += LANES)
      for (int which = 0; which < 2; which++) {
        __mmask16 those = mask(j, which);
        store(next[which], _mm512_maskz_compress_ps(those, _mm512_loadu_ps(weights + j)));
        next[which] += __builtin_popcount(those);
      }
#else
    for (long j = 0; j < count; j++) to[0][at[j]] = weights[j];
#endif
    for (int which = 0; which < 2; which++) store(to[which] + size[which], F{});
  }
};

struct Classed {  // a side that lies like that
  const Sealed& side;
  const long bits[2], bytes;  // of a block's row of class bits
  const PackedLines lines[2];
  long slot = -1, before = 0;  // how many slots before this one are of the upper class

  Classed(const Sealed& side, long numbers)
      : side(side), bits{side.bits, side.rest_bits}, bytes((side.rows + 7) / 8),
        lines{{side.levels, side.step, side.low, numbers * side.bits / 8},
              {side.rest, side.rest_step, side.rest_low, numbers * side.rest_bits / 8}} {}

  // `count` slots from `slot` on, which all are packed
  Classes take(long from, long count) {
    if (from != slot) before = above(from);
    Classes found;
    found.upper = 0, found.count = count;
    for (long j = 0, some; j < count; j += some) {
      long first = (from + j) % side.rows;
      some = side.rows - first < count - j ? side.rows - first : count - j;
      found.upper |= piece((from + j) / side.rows, first, some) << j;
    }
    found.size[0] = __builtin_popcountll(found.upper), found.size[1] = count - found.size[0];
    found.first[0] = before, found.first[1] = from - before;
    slot = from + count, before += found.size[0];
    found.place();
    return found;
  }

  PackedLines lines_of(const Classes& slots, int which) const {
    return lines[which].from(slots.first[which], slots.size[which]);
  }

 private:
  // The bits of `count` (at most 64) slots of a block from its slot `first` on.
  uint64_t piece(long block, long first, long count) const {
    const uint8_t* p = side.upper + block * bytes + first / 8;
    long shift = first % 8, all = (shift + count + 7) / 8;
    uint64_t found = 0;
    for (long i = 0; i < all && i < 8; i++) found |= (uint64_t)p[i] << 8 * i;
    found >>= shift;
    if (all > 8) found |= (uint64_t)p[8] << (64 - shift);
    return count < 64 ? found & ((1ull << count) - 1) : found;
  }

  long above(long slot) const {
    long whole = slot / side.rows * bytes, at = 0, found = 0, rest = slot % side.rows;
    for (; at + 8 <= whole; at += 8) found += __builtin_popcountll(load<uint64_t>(side.upper + at));
    for (; at < whole; at++) found += __builtin_popcount(side.upper[at]);
    for (long some; rest; rest -= some) {
      some = rest < 64 ? rest : 64;
      found += __builtin_popcountll(piece(slot / side.rows, rest - some, some));
    }
    return found;
  }
};

// ---- scores
// words[m]: lane r has bytes 4 m .. 4 m + 3 of line r, of `count` that are `row` bytes apart; lines beyond are the last.
// `bytes`, of a line, are a multiple of 8.
inline void turn_lines(const uint8_t* p, long row, long count, long bytes, I* words) {
  const uint8_t* lines[LANES];
  for (long r = 0; r < LANES; r++) lines[r] = p + (r < count ? r : count - 1) * row;
  typedef int32_t Word4 __attribute__((vector_size(16)));
  for (long at = 0; at < bytes; at += 16) {
    auto some = [&](long r) {
      if (at + 16 <= bytes) return load<Word4>(lines[r] + at);
      int64_t half[2] = {load<int64_t>(lines[r] + at), 0};
      return load<Word4>(half);
    };
    I* to = words + at / 4;
#if LANES == 4
    auto low = [](I a, I b) { return (int64x2_t)vzip1q_s32((int32x4_t)a, (int32x4_t)b); };
    auto high = [](I a, I b) { return (int64x2_t)vzip2q_s32((int32x4_t)a, (int32x4_t)b); };
    I v[4] = {some(0), some(1), some(2), some(3)};
    int64x2_t a = low(v[0], v[1]), b = low(v[2], v[3]), c = high(v[0], v[1]), d = high(v[2], v[3]);
    to[0] = (I)vzip1q_s64(a, b), to[1] = (I)vzip2q_s64(a, b), to[2] = (I)vzip1q_s64(c, d), to[3] = (I)vzip2q_s64(c, d);
#elif LANES == 8
    __m256i v[4];
    for (long i = 0; i < 4; i++)
      v[i] = _mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)some(i)), (__m128i)some(4 + i), 1);
    __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpacklo_epi32(v[2], v[3]);
    __m256i c = _mm256_unpackhi_epi32(v[0], v[1]), d = _mm256_unpackhi_epi32(v[2], v[3]);
    to[0] = (I)_mm256_unpacklo_epi64(a, b), to[1] = (I)_mm256_unpackhi_epi64(a, b);
    to[2] = (I)_mm256_unpacklo_epi64(c, d), to[3] = (I)_mm256_unpackhi_epi64(c, d);
#else
    __m512i v[4];
    for (long i = 0; i < 4; i++) {
      v[i] = _mm512_castsi128_si512((__m128i)some(i));
      v[i] = _mm512_inserti32x4(v[i], (__m128i)some(4 + i), 1);
      v[i] = _mm512_inserti32x4(v[i], (__m128i)some(8 + i), 2);
      v[i] = _mm512_inserti32x4(v[i], (__m128i)some(12 + i), 3);
    }
    __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpacklo_epi32(v[2], v[3]);
    __m512i c = _mm512_unpackhi_epi32(v[0], v[1]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    to[0] = (I)_mm512_unpacklo_epi64(a, b), to[1] = (I)_mm512_unpackhi_epi64(a, b);
    to[2] = (I)_mm512_unpacklo_epi64(c, d), to[3] = (I)_mm512_unpackhi_epi64(c, d);
#endif
  }
}

// Queries times scales, as whole numbers of two bytes. For number s of byte i of a line of either class: [s * bytes + i].
struct LineQueries {
  alignas(64) int8_t high[2][QUERIES][MOST_DIM], low[2][QUERIES][MOST_DIM];
  float step[QUERIES], all[QUERIES];  // what one is worth (NaN where one is not finite), and what they sum up to

  // Query i, times `scale`. A largest number below 1e-30 is taken for nothing.
  void take(long i, const float* q, const uint16_t* scale, const long* bits, long dim) {
    alignas(64) float x[MOST_DIM];
    alignas(64) int8_t upper[MOST_DIM], lower[MOST_DIM];
    constexpr long EACH = AT_ONCE * LANES;
    I top = {};
    F sum = {};
    for (long d = 0; d < dim; d += LANES) {
      F own = load<F>(q + d) * from_halves(load_halves(scale + d));
      I size = (I)own & 0x7fffffff;
      top = size > top ? size : top;  // NaN is larger than all
      sum += own;
      store(x + d, own);
    }
    for (long d = dim; d % EACH; d += LANES) store(x + d, F{});
    int32_t word = most(top);
    float largest;
    memcpy(&largest, &word, 4);
    bool finite = largest <= 3.4e38f;
    float inverse = finite && largest >= 1e-30f ? 32512 / largest : 0;
    step[i] = finite ? largest / 32512 : NAN, all[i] = total(sum);
    for (long d = 0; d < dim; d += EACH) {
      I whole[AT_ONCE];
      for (int r = 0; r < AT_ONCE; r++) whole[r] = (I)(load<F>(x + d + r * LANES) * inverse + MAGIC) - (I)splat(MAGIC);
      split(whole, upper + d, lower + d);
    }
    for (int which = 0; which < 2; which++) {
      deal(upper, dim, 8 / bits[which], high[which][i]), deal(lower, dim, 8 / bits[which], low[which][i]);
    }
  }

 private:
  template <int S> static void deal(const int8_t* from, long dim, int8_t* to) {
    for (long s = 0, bytes = dim / S; s < S; s++)
      for (long b = 0; b < bytes; b++) to[s * bytes + b] = from[b * S + s];
  }
  static void deal(const int8_t* from, long dim, long each, int8_t* to) {
    if (each == 4) deal<4>(from, dim, to);
    else if (each == 2) deal<2>(from, dim, to);
    else memcpy(to, from, dim);
  }
};

// found[q] = the products of Q queries with the levels of a register's worth of lines. They stay below 2^31.
template <int BITS, int Q>
inline void meet_lines(const I* words, long bytes, const int8_t* high, const int8_t* low, I* found) {
  constexpr int S = 8 / BITS, SPLIT = Q <= 2 && S > 1 ? 2 : 1;  // sums at once, so that none waits for its last product
  I upper[Q][SPLIT] = {}, lower[Q][SPLIT] = {};
  for (long m = 0; m < bytes / 4; m++) {
    I levels[S];
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) levels[s] = levels_in<BITS>(words[m], s);
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++) {
      const int8_t *above = high + q * MOST_DIM + 4 * m, *below = low + q * MOST_DIM + 4 * m;
#pragma GCC unroll 4
      for (int s = 0; s < S; s++) {
        I &to = upper[q][s % SPLIT], &rest = lower[q][s % SPLIT];
        to = dot_levels<BITS>(to, splat(load<int32_t>(above + s * bytes)), levels[s]);
        rest = dot_levels<BITS>(rest, splat(load<int32_t>(below + s * bytes)), levels[s]);
      }
    }
  }
  for (int q = 0; q < Q; q++) {
    for (int i = 1; i < SPLIT; i++) upper[q][0] += upper[q][i], lower[q][0] += lower[q][i];
    found[q] = (upper[q][0] << 8) + lower[q][0];
  }
}

template <int BITS>
inline void meet_lines(const I* words, long bytes, const int8_t* high, const int8_t* low, long queries, I* found) {
  constexpr int MOST = REGISTERS == 32 ? 4 : 2;
  for (; queries >= MOST; queries -= MOST, found += MOST, high += MOST * MOST_DIM, low += MOST * MOST_DIM)
    meet_lines<BITS, MOST>(words, bytes, high, low, found);
  if (queries == 1) meet_lines<BITS, 1>(words, bytes, high, low, found);
  if (MOST > 2 && queries == 2) meet_lines<BITS, 2>(words, bytes, high, low, found);
  if (MOST > 3 && queries == 3) meet_lines<BITS, 3>(words, bytes, high, low, found);
}

// The float16 of `count` lines.
inline F some_halves(const uint16_t* p, long count) {
  if (count >= LANES) return from_halves(load_halves(p));
  uint16_t some[LANES] = {};
  memcpy(some, p, count * 2);
  return from_halves(load_halves(some));
}

// found[query][which][line] = query . the numbers of a line between bytes `from` and `to`
template <int BITS>
inline void score_class(const PackedLines& lines, long from, long to, const LineQueries& queries, int which, long count,
                        float (*found)[2][ROOM]) {
  I words[MOST_DIM / 4 + 2], sums[QUERIES];
  for (long l = 0; l < lines.count; l += LANES) {
    long some = lines.count - l < LANES ? lines.count - l : LANES;
    const uint8_t* p = lines.levels + l * lines.bytes + from;
    for (long r = 0; r < LANES; r++) __builtin_prefetch(p + (LANES + r) * lines.bytes, 0, 3);
    turn_lines(p, lines.bytes, some, to - from, words);
    meet_lines<BITS>(words, to - from, queries.high[which][0], queries.low[which][0], count, sums);
    F step = some_halves(lines.step + l, some), low = some_halves(lines.low + l, some);
    for (long i = 0; i < count; i++)
      store(found[i][which] + l,
            __builtin_convertvector(sums[i], F) * (step * queries.step[i]) + low * queries.all[i]);
  }
}

// scores[i][..] = query i . the keys of `slots` of a head
inline void score_classed(const Classed& side, const Classes& slots, long head, long dim, const LineQueries& queries,
                          long count, float (*scores)[KEYS]) {
  alignas(64) float found[QUERIES][2][ROOM];
  for (int which = 0; which < 2; which++) {
    const PackedLines lines = side.lines_of(slots, which);
    const long bits = side.bits[which], each = dim * bits / 8, from = head * each, to = from + each;
    if (bits == 2) score_class<2>(lines, from, to, queries, which, count, found);
    else if (bits == 4) score_class<4>(lines, from, to, queries, which, count, found);
    else score_class<8>(lines, from, to, queries, which, count, found);
  }
  for (long i = 0; i < count; i++) slots.in_order(found[i], scores[i]);
}

// ---- values
// sum[i] += the values of `slots` of a head under the weights of query i
inline void add_classed(const Classed& side, const Classes& slots, long head, long dim, long queries,
                        const float (*weights)[KEYS], float (*sum)[MOST_DIM]) {
  alignas(64) float own[QUERIES][2][ROOM], found[QUERIES][MOST_DIM];
  for (long i = 0; i < queries; i++) {
    slots.apart(weights[i], own[i]);
    memset(found[i], 0, dim * 4);
  }
  for (int which = 0; which < 2; which++) {
    const PackedLines lines = side.lines_of(slots, which);
    const long bits = side.bits[which], each = dim * bits / 8, from = head * each, to = from + each;
    if (!lines.count) continue;
    Ahead ahead(lines.from(lines.count, lines.count), from);
    auto put = [&](long i, long at, const auto& numbers) {
      for (const F& some : numbers) {
        if (at < dim) store(found[i] + at, load<F>(found[i] + at) + some);
        at += LANES;
      }
    };
    const float* x = own[0][which];
    if (bits == 2) contract<2>(lines, ahead, x, 2 * ROOM, queries, from, to, put);
    else if (bits == 4) contract<4>(lines, ahead, x, 2 * ROOM, queries, from, to, put);
    else contract<8>(lines, ahead, x, 2 * ROOM, queries, from, to, put);
  }
  const uint16_t* scale = side.side.scale + head * dim;
  for (long i = 0; i < queries; i++)
    for (long d = 0; d < dim; d += 2 * LANES) {
      F numbers[2];
      for (int r = 0; r < 2; r++)
        numbers[r] = load<F>(found[i] + d + r * LANES) * from_halves(load_halves(scale + d + r * LANES));
      add_in_place(numbers, d, dim, sum[i]);
    }
}
