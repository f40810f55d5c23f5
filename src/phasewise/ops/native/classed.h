// Rows that lie packed in two classes of so many bits a number, all heads' numbers of a row in a line: scores of their
// keys, and sums of their values under weights.
//
// A bit of each slot says which class has it; where it lies there is the count of such bits before it. Number d of a row
// is (level step + low) scale[d]; or, of keys alone, level step[d] + low[d] with the steps of a block's rows of that
// class. Queries times scales (or steps) are whole numbers of two bytes, 1 / 32512 of the largest apart, and meet the
// levels of a register's worth of lines at a time; values are summed as in sealed.h, and scaled then.
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
  const bool by_channel;      // each channel of a block's rows of a class has a step and a lowest number of its own
  const long each[2];         // rows of a block in either class
  long slot = -1, before = 0;  // how many slots before this one are of the upper class

  Classed(const Sealed& side, long numbers)
      : side(side), bits{side.bits, side.rest_bits}, bytes((side.rows + 7) / 8),
        lines{{side.levels, side.step, side.low, numbers * side.bits / 8},
              {side.rest, side.rest_step, side.rest_low, numbers * side.rest_bits / 8}},
        by_channel(!side.scale), each{side.rows - side.rest_rows, side.rest_rows} {}

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

  // Whether another side has the packed slots from .. to-1 in the same classes.
  bool same(const Classed& other, long from, long to) const {
    const long first = from / side.rows * bytes, end = ((to - 1) / side.rows + 1) * bytes;
    return side.rows == other.side.rows && !memcmp(side.upper + first, other.side.upper + first, end - first);
  }

  // How many slots before one are of a class.
  long before_in(long slot, int which) const { return which ? slot - above(slot) : above(slot); }

  PackedLines lines_of(const Classes& slots, int which) const {
    return lines[which].from(slots.first[which], slots.size[which]);
  }

  // `by_channel`: behind which line of a class the one at `line` has no more mates in its block.
  long mates(long line, int which) const { return line - line % each[which] + each[which]; }

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
template <bool ALL> inline void turn_lines(const uint8_t* p, long row, long count, long bytes, I* words) {
  typedef int32_t Word4 __attribute__((vector_size(16)));
  for (long at = 0; at < bytes; at += 16) {
    auto some = [&](long r) __attribute__((always_inline)) {
      const uint8_t* line = p + (ALL || r < count ? r : count - 1) * row + at;
      if (at + 16 <= bytes) return load<Word4>(line);
      int64_t half[2] = {load<int64_t>(line), 0};
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

// How numbers become whole ones of two bytes, from the bits of the largest magnitude; below 1e-30 it is taken for nothing.
struct Factor {
  float step, inverse;  // what one is worth (NaN where one is not finite)

  explicit Factor(int32_t bits) {
    float largest;
    memcpy(&largest, &bits, 4);
    const bool finite = largest <= 3.4e38f;
    step = finite ? largest / 32512 : NAN, inverse = finite && largest >= 1e-30f ? 32512 / largest : 0;
  }
  I whole(F x) const { return (I)(x * inverse + MAGIC) - (I)splat(MAGIC); }
};

// Queries times scales, as whole numbers of two bytes. For number s of byte i of a line of either class: [s * bytes + i].
struct LineQueries {
  alignas(64) int8_t high[2][QUERIES][MOST_DIM], low[2][QUERIES][MOST_DIM];
  float step[QUERIES], all[QUERIES];  // what one is worth (NaN where one is not finite), and what they sum up to

  // Query i, times `scale`, for both classes.
  void take(long i, const float* q, const uint16_t* scale, const long* bits, long dim) {
    take(i, q, scale, nullptr, bits, 0, 2, dim);
  }

  // Query i, times `scale`, for the classes first .. end-1; with the lowest numbers of channels, `all` is what the query
  // makes of these.
  void take(long i, const float* q, const uint16_t* scale, const uint16_t* least, const long* bits, int first, int end,
            long dim) {
    alignas(64) float x[MOST_DIM];
    alignas(64) int8_t upper[MOST_DIM], lower[MOST_DIM];
    constexpr long EACH = AT_ONCE * LANES;
    I top = {};
    F sum = {};
    for (long d = 0; d < dim; d += LANES) {
      F own = load<F>(q + d) * from_halves(load_halves(scale + d));
      I size = (I)own & 0x7fffffff;
      top = size > top ? size : top;  // NaN is larger than all
      sum += least ? load<F>(q + d) * from_halves(load_halves(least + d)) : own;
      store(x + d, own);
    }
    for (long d = dim; d % EACH; d += LANES) store(x + d, F{});
    const Factor factor(most(top));
    step[i] = factor.step, all[i] = total(sum);
    for (long d = 0; d < dim; d += EACH) {
      I whole[AT_ONCE];
      for (int r = 0; r < AT_ONCE; r++) whole[r] = factor.whole(load<F>(x + d + r * LANES));
      split(whole, upper + d, lower + d);
    }
    for (int which = first; which < end; which++) {
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
  constexpr int S = 8 / BITS, SPLIT = Q <= 3 && S > 1 ? 2 : 1;  // sums at once, so that none waits for its last product
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
#if LANES == 16
  __mmask16 there = count < LANES ? (__mmask16)((1 << count) - 1) : 0xffff;
  return (F)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, p));
#else
  if (count >= LANES) return from_halves(load_halves(p));
  uint16_t some[LANES] = {};
  for (long i = 0; i < count; i++) some[i] = p[i];
  return from_halves(load_halves(some));
#endif
}

// out[query * row + line] = query . the numbers of a line between bytes `from` and `to`; a whole register at a time. Lines
// have ends of their own unless queries have been taken with those of channels.
template <int BITS, bool ENDS>
inline void score_class(const PackedLines& lines, long from, long to, const LineQueries& queries, int which, long count,
                        float* out, long row) {
  I words[MOST_DIM / 4 + 2], sums[QUERIES];
  for (long l = 0; l < lines.count; l += LANES) {
    long some = lines.count - l < LANES ? lines.count - l : LANES;
    const uint8_t* p = lines.levels + l * lines.bytes + from;
    for (long r = 0; r < LANES; r++) __builtin_prefetch(p + (KEYS + r) * lines.bytes, 0, 3);
    if (ENDS) lines.fetch_ends(l + KEYS);
    if (some == LANES) turn_lines<true>(p, lines.bytes, some, to - from, words);
    else turn_lines<false>(p, lines.bytes, some, to - from, words);
    meet_lines<BITS>(words, to - from, queries.high[which][0], queries.low[which][0], count, sums);
    if constexpr (!ENDS) {
      for (long i = 0; i < count; i++)
        store(out + i * row + l, __builtin_convertvector(sums[i], F) * queries.step[i] + queries.all[i]);
    } else {
      F step = some_halves(lines.step + l, some), low = some_halves(lines.low + l, some);
      for (long i = 0; i < count; i++)
        store(out + i * row + l,
              __builtin_convertvector(sums[i], F) * (step * queries.step[i]) + low * queries.all[i]);
    }
  }
}

// Queries as they are, and as they meet levels.
struct Asked {
  const float (*own)[MOST_DIM];
  LineQueries& whole;
  long count;
};

// The same for `size` lines of a class from `first` on, of a head, whatever the class. Where channels have ends of their
// own, queries are taken anew for every block, and what lies behind the last line, up to a whole register, is written.
template <bool ENDS>
inline void score_lines(const Classed& side, long first, long size, int which, long head, const LineQueries& queries,
                        long dim, long count, float* out, long row) {
  const PackedLines lines = side.lines[which].from(first, size);
  const long bits = side.bits[which], each = dim * bits / 8, from = head * each, to = from + each;
  if (bits == 2) score_class<2, ENDS>(lines, from, to, queries, which, count, out, row);
  else if (bits == 4) score_class<4, ENDS>(lines, from, to, queries, which, count, out, row);
  else score_class<8, ENDS>(lines, from, to, queries, which, count, out, row);
}

inline void score_lines(const Classed& side, long first, long size, int which, long head, long numbers, long dim,
                        const Asked& asked, float* out, long row) {
  if (!side.by_channel) {
    score_lines<true>(side, first, size, which, head, asked.whole, dim, asked.count, out, row);
    return;
  }
  const PackedLines& all = side.lines[which];
  for (const long end = first + size; first < end;) {
    const long mates = side.mates(first, which), some = (mates < end ? mates : end) - first;
    const long at = first / side.each[which] * numbers + head * dim;
    for (long i = 0; i < asked.count; i++)
      asked.whole.take(i, asked.own[i], all.step + at, all.low + at, side.bits, which, which + 1, dim);
    score_lines<false>(side, first, some, which, head, asked.whole, dim, asked.count, out, row);
    first += some, out += some;
  }
}

// scores[i][..] = query i . the keys of `slots` of a head, of whose lines all have so many `numbers`
inline void score_classed(const Classed& side, const Classes& slots, long head, long numbers, long dim,
                          const Asked& asked, float (*scores)[KEYS]) {
  alignas(64) float found[QUERIES][2][ROOM];
  const long count = asked.count;
  for (int which = 0; which < 2; which++)
    score_lines(side, slots.first[which], slots.size[which], which, head, numbers, dim, asked, found[0][which], 2 * ROOM);
  for (long i = 0; i < count; i++) slots.in_order(found[i], scores[i]);
}

// ---- values
// Weights of a class's slots times what levels are worth there, as whole numbers of two bytes.
struct LineWeights {
  alignas(64) int8_t high[QUERIES][KEYS], low[QUERIES][KEYS];
  float step[QUERIES], rest[QUERIES];  // what one is worth (NaN where one is not finite), what lowest numbers come to

  // Of query i; `count` of each, and up to a whole register noughts.
  void take(long i, const float* weights, const float* steps, const float* least, long count) {
    F share[KEYS / LANES], lows = {};
    I top = {};
    for (long l = 0; l < count; l += LANES) {
      F own = load<F>(weights + l), product = own * load<F>(steps + l);
      I size = (I)product & 0x7fffffff;
      top = size > top ? size : top;  // NaN is larger than all
      lows += own * load<F>(least + l);
      share[l / LANES] = product;
    }
    const Factor factor(most(top));
    step[i] = factor.step, rest[i] = total(lows);
    constexpr long EACH = AT_ONCE * LANES;
    for (long l = 0; l < count; l += EACH) {
      I whole[AT_ONCE];
      for (long r = 0, at = l; r < AT_ONCE; r++, at += LANES)
        whole[r] = at < count ? factor.whole(share[at / LANES]) : I{};
      split(whole, high[i] + l, low[i] + l);
    }
  }
};

// sums[q][s] = the sums over `count` lines, of whose bytes words[l] has LANES of four lines, for Q queries from `first` on
template <int BITS, int Q>
inline void sum_class(const I* words, long count, const LineWeights& weights, long first, I (*sums)[8 / BITS]) {
  constexpr int S = 8 / BITS;
  I upper[Q][S] = {}, lower[Q][S] = {};
  for (long l = 0; l < count; l += 4) {
    I levels[S];
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) levels[s] = levels_in<BITS>(words[l / 4], s);
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++) {
      I above = splat(load<int32_t>(weights.high[first + q] + l)), below = splat(load<int32_t>(weights.low[first + q] + l));
#pragma GCC unroll 4
      for (int s = 0; s < S; s++) upper[q][s] = dot_levels<BITS>(upper[q][s], above, levels[s]);
#pragma GCC unroll 4
      for (int s = 0; s < S; s++) lower[q][s] = dot_levels<BITS>(lower[q][s], below, levels[s]);
    }
  }
  for (int q = 0; q < Q; q++)
    for (int s = 0; s < S; s++) sums[q][s] = (upper[q][s] << 8) + lower[q][s];
}

// put(query, numbers) of all queries from `first` on, Q or fewer at a time
template <int BITS, int Q, class Put>
inline void sum_class(const I* words, long count, const LineWeights& weights, long first, long queries, const Put& put) {
  for (; queries - first >= Q; first += Q) {
    I sums[Q][8 / BITS];
    sum_class<BITS, Q>(words, count, weights, first, sums);
    for (int q = 0; q < Q; q++) {
      F numbers[8 / BITS];
      for (int s = 0; s < 8 / BITS; s++)
        numbers[s] = __builtin_convertvector(sums[q][s], F) * weights.step[first + q] + weights.rest[first + q];
      in_line(numbers);
      put(first + q, numbers);
    }
  }
  if constexpr (Q > 1) sum_class<BITS, Q - 1>(words, count, weights, first, queries, put);
}

// found[i][..] += the numbers between bytes `from` and `to` of all lines under the weights of query i, `row` apart; up to
// a whole register noughts
template <int BITS>
inline void add_class(const PackedLines& lines, long from, long to, const float* weights, long row, long queries,
                      float (*found)[MOST_DIM]) {
  constexpr int Q = REGISTERS == 32 ? (BITS == 2 ? 3 : 4) : (BITS == 2 ? 1 : 2);  // whose sums fit the registers
  alignas(64) float steps[KEYS], least[KEYS];
  for (long l = 0; l < lines.count; l += LANES) {
    lines.fetch_ends(l + KEYS);
    store(steps + l, some_halves(lines.step + l, lines.count - l));
    store(least + l, some_halves(lines.low + l, lines.count - l));
  }
  LineWeights whole;
  for (long i = 0; i < queries; i++) whole.take(i, weights + i * row, steps, least, lines.count);
  for (long byte = from; byte < to; byte += LANES) {
    const uint8_t* p = lines.levels + byte;
    I words[KEYS / 4];
    for (long l = 0; l < lines.count; l += 4) {
      for (long r = 0; byte == from && r < 4; r++) __builtin_prefetch(p + (lines.count + l + r) * lines.bytes, 0, 3);
      words[l / 4] = four_lines<false>(p + l * lines.bytes, lines.bytes, to - byte, lines.count - l);
    }
    const long at = (byte - from) * (8 / BITS), end = (to - from) * (8 / BITS);
    sum_class<BITS, Q>(words, lines.count, whole, 0, queries, [&](long i, const auto& numbers) {
      long d = at;
      for (const F& some : numbers) {
        if (d < end) store(found[i] + d, load<F>(found[i] + d) + some);
        d += LANES;
      }
    });
  }
}

// The same for a head, whatever the class.
inline void add_lines(const Classed& side, const PackedLines& lines, int which, long head, long dim, const float* weights,
                      long row, long queries, float (*found)[MOST_DIM]) {
  const long bits = side.bits[which], each = dim * bits / 8, from = head * each, to = from + each;
  if (bits == 2) add_class<2>(lines, from, to, weights, row, queries, found);
  else if (bits == 4) add_class<4>(lines, from, to, weights, row, queries, found);
  else add_class<8>(lines, from, to, weights, row, queries, found);
}

// sum[i] += what was found, times the scales of the channels
inline void add_scaled(const Classed& side, long head, long dim, long queries, const float (*found)[MOST_DIM],
                       float (*sum)[MOST_DIM]) {
  const uint16_t* scale = side.side.scale + head * dim;
  for (long d = 0; d < dim; d += 2 * LANES) {
    F scales[2] = {from_halves(load_halves(scale + d)), from_halves(load_halves(scale + d + LANES))};
    for (long i = 0; i < queries; i++) {
      F numbers[2] = {load<F>(found[i] + d) * scales[0], load<F>(found[i] + d + LANES) * scales[1]};
      add_in_place(numbers, d, dim, sum[i]);
    }
  }
}

// sum[i] += the values of `slots` of a head under the weights of query i
inline void add_classed(const Classed& side, const Classes& slots, long head, long dim, long queries,
                        const float (*weights)[KEYS], float (*sum)[MOST_DIM]) {
  alignas(64) float own[QUERIES][2][ROOM], found[QUERIES][MOST_DIM];
  for (long i = 0; i < queries; i++) {
    slots.apart(weights[i], own[i]);
    memset(found[i], 0, dim * 4);
  }
  for (int which = 0; which < 2; which++)
    add_lines(side, side.lines_of(slots, which), which, head, dim, own[0][which], 2 * ROOM, queries, found);
  add_scaled(side, head, dim, queries, found, sum);
}
