// Scores of queries over a block of keys that is turned and widened once for all of them: then a number of a query meets
// whole registers, and nothing is summed across lanes.
#pragma once
#include "softmax.h"

// Whether few rows' attention is faster so: where products of bfloat16 are slow.
template <class T> constexpr bool TURNED = DOT_INSTRUCTIONS && !DOT_BFLOATS && std::is_same_v<T, bf16>;

template <class T> inline void widen_query(const T* query, long dim, float* to) {
  for (long d = 0; d < dim; d++) to[d] = to_float(query[d]);
}

// to[d][j] = rows[j][d] of LANES rows
template <class T> inline void turn_rows(const T* const* rows, long dim, float (*to)[KEYS]) {
  long d = 0;
#if DOT_INSTRUCTIONS
  for (; std::is_same_v<T, bf16> && d + 32 <= dim; d += 32) {
    __m512i v[16];
    for (int j = 0; j < 16; j++) v[j] = load<__m512i>(rows[j] + d);
    transpose_words(v);
    for (int i = 0; i < 16; i++) {  // a word holds two neighbours
      store(to[d + 2 * i], _mm512_slli_epi32(v[i], 16));
      store(to[d + 2 * i + 1], _mm512_and_si512(v[i], _mm512_set1_epi32((int)0xffff0000)));
    }
  }
#endif
  for (; d < dim; d++)
    for (int j = 0; j < LANES; j++) to[d][j] = to_float(rows[j][d]);
}

// scores[q][0 ..] = queries[q] . keys[..][0 ..] for Q queries and W registers; every sum has one order
template <int Q, int W>
inline void score_some(const float (*queries)[MOST_DIM], const float (*keys)[KEYS], long dim, float (*scores)[KEYS]) {
  F acc[Q][W] = {};
  for (long d = 0; d < dim; d++)
    for (int i = 0; i < W; i++) {
      F key = load<F>(keys[d] + i * LANES);
      for (int q = 0; q < Q; q++) acc[q][i] += key * queries[q][d];
    }
  for (int q = 0; q < Q; q++)
    for (int i = 0; i < W; i++) store(scores[q] + i * LANES, acc[q][i]);
}

constexpr int FIT = REGISTERS == 32 ? 6 : 5, BESIDE = REGISTERS == 32 ? 4 : 2;  // whose sums fit the registers

// The same for `size` queries and at least the first `count` keys.
template <int Q = FIT>
inline void score_turned(const float (*queries)[MOST_DIM], const float (*keys)[KEYS], long dim, long count, long size,
                         float (*scores)[KEYS]) {
  auto from = [](auto* rows, long j) { return (decltype(rows))(rows[0] + j); };
  for (; size >= Q; size -= Q, queries += Q, scores += Q) {
    long j = 0;
    for (; j + BESIDE * LANES <= count; j += BESIDE * LANES)
      score_some<Q, BESIDE>(queries, from(keys, j), dim, from(scores, j));
    for (; j < count; j += LANES) score_some<Q, 1>(queries, from(keys, j), dim, from(scores, j));
  }
  if constexpr (Q > 1) score_turned<Q - 1>(queries, keys, dim, count, size, scores);
}

template <bool> struct TurnedJob {  // a job's queries and a block of keys
  alignas(64) float queries[QUERIES][MOST_DIM], far[QUERIES][MOST_DIM], keys[MOST_DIM][KEYS];
};
template <> struct TurnedJob<false> {};

#if DOT_BFLOATS
constexpr long ENOUGH = 8;  // queries that turning a block of keys pays for

// to[w][j] = word w, of two numbers, of rows[j], for LANES rows of a multiple of 32 numbers
inline void turn_words(const bf16* const* rows, long dim, int32_t (*to)[KEYS]) {
  for (long d = 0; d < dim; d += 2 * LANES) {
    __m512i v[LANES];
    for (int j = 0; j < LANES; j++) v[j] = load<__m512i>(rows[j] + d);
    transpose_words(v);
    for (int i = 0; i < LANES; i++) store(to[d / 2 + i], v[i]);
  }
}

// scores[q][0 ..] = queries[q] . LANES keys. Sums have the order of `score` (softmax.h), in which a lane there is a
// register here: so rows come out the same, however many are read together.
template <int Q>
inline void score_words(const bf16* const* queries, const int32_t (*keys)[KEYS], long dim, float (*scores)[KEYS]) {
  F sums[2][Q];  // of two quarters of the lanes each
#pragma GCC unroll 4
  for (int quarter = 0; quarter < 4; quarter++) {
    auto lane = [&](int i, F (&acc)[Q]) {
#pragma GCC unroll 8
      for (int q = 0; q < Q; q++) acc[q] = F{};
      for (long w = quarter * 4 + i; w < dim / 2; w += LANES) {
        __m512bh key = (__m512bh)load<__m512i>(keys[w]);
#pragma GCC unroll 8
        for (int q = 0; q < Q; q++)
          acc[q] = (F)_mm512_dpbf16_ps((__m512)acc[q], key, (__m512bh)_mm512_set1_epi32(load<int32_t>(queries[q] + 2 * w)));
      }
    };
    F even[Q], odd[Q], more[Q];
    lane(0, even), lane(2, more);
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++) even[q] += more[q];
    lane(1, odd), lane(3, more);
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++) odd[q] += more[q], odd[q] += even[q];
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++) {
      if (quarter % 2) sums[quarter / 2][q] += odd[q];
      else sums[quarter / 2][q] = odd[q];
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++) store(scores[q], sums[0][q] + sums[1][q]);
}

// The same for `size` queries and at least the first `count` keys.
template <int Q = 4>
inline void score_all_words(const bf16* const* queries, const int32_t (*keys)[KEYS], long dim, long count, long size,
                            float (*scores)[KEYS]) {
  auto from = [](auto* rows, long j) { return (decltype(rows))(rows[0] + j); };
  for (; size >= Q; size -= Q, queries += Q, scores += Q)
    for (long j = 0; j < count; j += LANES) score_words<Q>(queries, from(keys, j), dim, from(scores, j));
  if constexpr (Q > 1) score_all_words<Q - 1>(queries, keys, dim, count, size, scores);
}
#endif
