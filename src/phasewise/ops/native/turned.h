// Scores of a job's queries where products of bfloat16 are slow: a block's keys are turned and widened once for all of
// them. Then a number of a query meets whole registers, and nothing is summed across lanes.
#pragma once
#include "softmax.h"

#if DOT_INSTRUCTIONS && !DOT_BFLOATS
template <class T> constexpr bool TURNED = std::is_same_v<T, bf16>;

// scores[q][j ...] = queries[q] . keys[..][j ...] for Q queries and W registers; every sum has one order
template <int Q, int W>
static void score_turned(const float (*queries)[MOST_DIM], const float (*keys)[KEYS], long dim, long j,
                         float (*scores)[KEYS]) {
  F acc[Q][W] = {};
  for (long d = 0; d < dim; d++)
    for (int i = 0; i < W; i++) {
      F key = load<F>(keys[d] + j + i * LANES);
      for (int q = 0; q < Q; q++) acc[q][i] += key * queries[q][d];
    }
  for (int q = 0; q < Q; q++)
    for (int i = 0; i < W; i++) store(scores[q] + j + i * LANES, acc[q][i]);
}

template <int Q>
static void score_turned(const float (*queries)[MOST_DIM], const float (*keys)[KEYS], long dim, long count, long size,
                         float (*scores)[KEYS]) {
  for (; size >= Q; size -= Q, queries += Q, scores += Q) {
    long j = 0;
    for (; j + KEYS <= count; j += KEYS) score_turned<Q, KEYS / LANES>(queries, keys, dim, j, scores);
    for (; j < count; j += LANES) score_turned<Q, 1>(queries, keys, dim, j, scores);
  }
  if constexpr (Q > 1) score_turned<Q - 1>(queries, keys, dim, count, size, scores);
}

template <class T> struct Turned {  // a job's queries and a block of keys
  alignas(64) float queries[QUERIES][MOST_DIM], keys[MOST_DIM][KEYS];

  void take(long i, const T* query, long dim) {
    for (long d = 0; d < dim; d++) queries[i][d] = to_float(query[d]);
  }

  // Slots j .. j + 15.
  void turn(const T* const* rows, long dim, long j) {
    long d = 0;
    for (; d + 32 <= dim; d += 32) {
      __m512i v[16];
      for (int r = 0; r < 16; r++) v[r] = load<__m512i>(rows[r] + d);
      ::turn(v);
      for (int i = 0; i < 16; i++) {  // a word holds two neighbours
        store(keys[d + 2 * i] + j, _mm512_slli_epi32(v[i], 16));
        store(keys[d + 2 * i + 1] + j, _mm512_and_si512(v[i], _mm512_set1_epi32((int)0xffff0000)));
      }
    }
    for (; d < dim; d++)
      for (int r = 0; r < 16; r++) keys[d][j + r] = to_float(rows[r][d]);
  }

  void score(long size, long dim, long count, float (*scores)[KEYS]) const {
    score_turned<6>(queries, keys, dim, count, size, scores);
  }
};
#else
template <class T> constexpr bool TURNED = false;
template <class T> struct Turned {};
#endif
