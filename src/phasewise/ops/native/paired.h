// The same sums by products of bfloat16, where these are as fast as products of bytes: what meets a level, x step, is
// rounded to bfloat16, levels less their mean fit one, and sums are floats.
//
// Lines meet in pairs. Of four lines a lane has bytes of the first, third, second and fourth, so that a shift brings
// levels of the first and second, or of the third and fourth, to where a table turns both into numbers.
#pragma once
#include "packed.h"

#if PAIRS
// Levels less their mean, whatever other levels stand above them in a word: what is rounded meets smaller numbers.
template <int BITS> constexpr float MEAN = BITS == 2 ? 1.5f : 7.5f;
template <int BITS> inline __m512i numbers_of() {
  alignas(64) constexpr uint16_t of_two[4] = {0xbfc0, 0xbf00, 0x3f00, 0x3fc0};
  alignas(64) constexpr uint16_t of_four[16] = {0xc0f0, 0xc0d0, 0xc0b0, 0xc090, 0xc060, 0xc020, 0xbfc0, 0xbf00,
                                                0x3f00, 0x3fc0, 0x4020, 0x4060, 0x4090, 0x40b0, 0x40d0, 0x40f0};
  return BITS == 2 ? _mm512_set1_epi64(load<int64_t>(of_two)) : _mm512_broadcast_i64x4(load<__m256i>(of_four));
}

// Levels number s of a half of the lines' bytes.
template <int BITS> inline __m512bh paired_levels(I word, __m512i numbers, int half, int s) {
  return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi32((__m512i)word, (unsigned)(half * 8 + s * BITS)), numbers);
}

// What up to four queries' numbers make of lines' steps and lowest numbers, for a register's bytes of each.
struct PairFactors {
  alignas(64) bf16 steps[4][LANES][MOST_DIM];
  Each rest[LANES];  // of a group: what lines' numbers at the mean level come to
  long groups;
  int32_t start[LANES];  // the first lane of a group

  // x: Q of [lines], `row` apart; those of lines that there are not, up to a multiple of four, become noughts.
  template <int Q> void take(const PackedLines& of, float mean, long byte, long end, const float* x, long row) {
    const long first = byte / of.group;
    groups = (end - 1) / of.group - first + 1;
    for (long g = 0; g < groups; g++) start[g] = (int32_t)((first + g) * of.group - byte);
    const long all = of.count % (2 * LANES) ? 0 : of.groups;
    if (all == 1) take_all<Q, 1>(of, mean, first, x, row);
    else if (all == 2) take_all<Q, 2>(of, mean, first, x, row);
    else if (all == 4) take_all<Q, 4>(of, mean, first, x, row);
    else take_all<Q, 0>(of, mean, first, x, row);
  }

 private:
  // ALL: the groups of a line if known beforehand and lines fill registers, else 0.
  template <int Q, int ALL> void take_all(const PackedLines& of, float mean, long first, const float* x, long row) {
    for (long g = 0; g < groups; g += 2)
      if (ALL == 1 || g + 1 == groups) take<Q, ALL, 1>(of, mean, first, g, x, row);
      else take<Q, ALL, 2>(of, mean, first, g, x, row);
  }

  // Of group g, or it and the one behind it.
  template <int Q, int ALL, int BOTH>
  void take(const PackedLines& of, float mean, long first, long g, const float* x, long row) {
    F lows[BOTH][Q];
#pragma GCC unroll 2
    for (int b = 0; b < BOTH; b++)
#pragma GCC unroll 4
      for (int q = 0; q < Q; q++) lows[b][q] = F{};
    for (long l = 0; l < of.count; l += 2 * LANES) {
      F step[2][2], low[2][2];
#pragma GCC unroll 2
      for (long h = 0; h < 2; h++) {
        const long line = l + h * LANES, left = of.count - line;
        if constexpr (ALL > 0) {
          ends_of<ALL>(of.step + line * ALL, first + g, step[h][0], step[h][1]);
          ends_of<ALL>(of.low + line * ALL, first + g, low[h][0], low[h][1]);
        } else {
          some_ends<BOTH>(of.step + line * of.groups + first + g, of.groups, left, step[h]);
          some_ends<BOTH>(of.low + line * of.groups + first + g, of.groups, left, low[h]);
        }
#pragma GCC unroll 2
        for (int b = 0; b < BOTH; b++) low[h][b] = fused(step[h][b], splat(mean), low[h][b]);
      }
#pragma GCC unroll 4
      for (int q = 0; q < Q; q++) {
        const float* own = x + q * row + l;
        F one = ALL ? load<F>(own) : some_floats(own, of.count - l);
        F other = ALL ? load<F>(own + LANES) : some_floats(own + LANES, of.count - l - LANES);
#pragma GCC unroll 2
        for (int b = 0; b < BOTH; b++) {
          store(steps[q][g + b] + l, _mm512_cvtne2ps_pbh((__m512)(other * step[1][b]), (__m512)(one * step[0][b])));
          lows[b][q] = fused(other, low[1][b], fused(one, low[0][b], lows[b][q]));
        }
      }
    }
#pragma GCC unroll 2
    for (int b = 0; b < BOTH; b++) {
      F all[4] = {lows[b][0], lows[b][Q > 1 ? 1 : 0], lows[b][Q > 2 ? 2 : 0], lows[b][Q > 3 ? 3 : 0]};
      rest[g + b] = totals_of(all);
    }
  }

  // Of lines that there are not: 0.
  static F some_floats(const float* p, long count) {
    return (F)_mm512_maskz_loadu_ps(count >= LANES ? 0xffff : count > 0 ? (__mmask16)((1 << count) - 1) : 0, p);
  }

  template <int BOTH>
  __attribute__((noinline)) static void some_ends(const uint16_t* p, long all, long count, F (&to)[2]) {
    for (int b = 0; b < BOTH; b++) {
      I found = {};
      for (long i = 0; i < LANES && i < count; i++) found[i] = p[i * all + b];
      to[b] = from_halves(found);
    }
  }
};

// found[q][s] = the sums of Q queries over the lines: lane i, number s of byte i. G groups if known beforehand, else 0.
template <int Q, int BITS, int G>
inline void sum_pairs(const PairFactors& factors, const I* words, long lines, Ahead ahead, F (*found)[8 / BITS]) {
  constexpr int S = 8 / BITS;
  const __m512i numbers = numbers_of<BITS>();
  F sums[2][Q][S];  // of either half's lines, so that none waits for its last product
  __mmask16 from[G ? G : LANES];
  I lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  for (long g = 1; g < (G ? G : factors.groups); g++)
    from[g] = _mm512_cmpge_epi32_mask((__m512i)lane, _mm512_set1_epi32(factors.start[g]));
#pragma GCC unroll 4
  for (int i = 0; i < 2; i++)
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
      for (int s = 0; s < S; s++) sums[i][q][s] = F{};
  for (long l = 0; l < lines; l += 4) {
    ahead.fetch();
    const I word = words[l / 4];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      __m512i pair[Q];
#pragma GCC unroll 4
      for (int q = 0; q < Q; q++) {
        pair[q] = _mm512_set1_epi32(load<int32_t>(factors.steps[q][0] + l + 2 * half));
        for (long g = 1; g < (G ? G : factors.groups); g++)
          pair[q] = _mm512_mask_set1_epi32(pair[q], from[g], load<int32_t>(factors.steps[q][g] + l + 2 * half));
      }
#pragma GCC unroll 4
      for (int s = 0; s < S; s++) {
        const __m512bh levels = paired_levels<BITS>(word, numbers, half, s);
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++) {
          F& sum = sums[half][q][s];
          sum = (F)_mm512_dpbf16_ps((__m512)sum, levels, (__m512bh)pair[q]);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) found[q][s] = sums[0][q][s] + sums[1][q][s];
}

template <int Q, int BITS>
inline void sum_pairs(const PairFactors& factors, const I* words, long lines, const Ahead& ahead,
                      F (*found)[8 / BITS]) {
  if (factors.groups == 1) sum_pairs<Q, BITS, 1>(factors, words, lines, ahead, found);
  else if (factors.groups == 2) sum_pairs<Q, BITS, 2>(factors, words, lines, ahead, found);
  else sum_pairs<Q, BITS, 0>(factors, words, lines, ahead, found);
}

// put(query, number, register): what the queries x make of the numbers from byte `byte` to `end` of all lines
template <int Q, int BITS, class Put>
inline void contract_pairs(const PackedLines& lines, const I* words, const Ahead& ahead, const OfQueries& x, long first,
                           long queries, long byte, long end, long at, const Put& put) {
  constexpr int S = 8 / BITS;
  for (; queries - first >= Q; first += Q) {
    PairFactors factors;
    F found[Q][S];
    factors.take<Q>(lines, MEAN<BITS>, byte, end, x.first + first * x.row, x.row);
    sum_pairs<Q, BITS>(factors, words, lines.count, ahead, found);
    for (int q = 0; q < Q; q++) {
      F rest = splat(factors.rest[0][q]);
      for (long g = 1; g < factors.groups; g++) {
        I lane;
        for (int i = 0; i < LANES; i++) lane[i] = i;
        rest = select(lane >= factors.start[g], splat(factors.rest[g][q]), rest);
      }
      for (F& some : found[q]) some += rest;
      in_line(found[q]);
      put(first + q, at, found[q]);
    }
  }
  if constexpr (Q > 1) contract_pairs<Q - 1, BITS>(lines, words, ahead, x, first, queries, byte, end, at, put);
}

template <int BITS, class Put>
inline void contract(const PackedLines& lines, const Next& next, const OfQueries& x, long queries, long from, long to,
                     const Put& put) {
  constexpr int Q = BITS == 2 ? 3 : 4;  // whose sums fit the registers
  I words[MOST_DIM / 4];
  const long passes = (to - from + LANES - 1) / LANES;
  for (long pass = 0, byte = from; pass < passes; pass++, byte += LANES) {
    const long end = to - byte < LANES ? to : byte + LANES, at = pass * LANES * (8 / BITS);
    take_words<true>(lines, byte, end, words);
    contract_pairs<Q, BITS>(lines, words, Ahead(next, pass, passes), x, 0, queries, byte, end, at, put);
  }
}
#endif
