// Attention of a few queries over rows of int8 levels by products of integers: no row is widened.
//
// A query becomes whole numbers of two bytes, 1 / 32512 of its largest apart; its products with levels are then exact.
// So do the weights of a block's rows, each times what a level of its row is worth (which is never negative), 1 / 65535
// of the largest apart. Sums of whole numbers do not depend on their order; they become floats once per block.
#pragma once
#include "softmax.h"

// Whether queries of T read rows of so many levels like this; for others these are widened first.
template <class T> inline bool by_levels(long dim) {
  return DOT_INSTRUCTIONS && std::is_same_v<T, bf16> && dim % 32 == 0;
}

#if DOT_INSTRUCTIONS
constexpr long LEVELS = 64;  // of a row, in a register: a chunk

// What multiplies four levels of four rows in every quarter of a register: `m` counts the fours of a quarter's levels.
typedef int8_t OfChunk[4][LEVELS];

// A query's numbers, filled up to whole chunks, as bytes; a largest number below 1e-30 is taken for nothing.
inline void take_query(const bf16* q, long dim, int8_t* upper, int8_t* lower, int32_t& zero, float& step) {
  __m512i top = {};
  for (long d = 0; d < dim; d += LANES) top = _mm512_max_epu32(top, (__m512i)((I)load_floats(q + d) & 0x7fffffff));
  uint32_t bits = _mm512_reduce_max_epu32(top);  // NaN is larger than all
  float largest, inverse;
  memcpy(&largest, &bits, 4);
  inverse = largest >= 1e-30f && largest <= 3.4e38f ? 32512 / largest : 0;
  step = largest <= 3.4e38f ? largest / 32512 : NAN;
  __m512i all = {};
  for (long d = 0; d < (dim + LEVELS - 1) / LEVELS * LEVELS; d += LANES) {
    F x = inverse && d < dim ? load_floats(q + d) * inverse : F{};
    __m512i whole = _mm512_cvtps_epi32((__m512)x);
    __m512i by = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    store(upper + d, _mm512_cvtepi32_epi8(by));
    store(lower + d, _mm512_cvtepi32_epi8(_mm512_sub_epi32(whole, _mm512_slli_epi32(by, 8))));
    all = _mm512_add_epi32(all, whole);
  }
  zero = 128 * _mm512_reduce_add_epi32(all);
}

struct LevelQueries {
  alignas(64) OfChunk high[QUERIES][MOST_DIM / LEVELS], low[QUERIES][MOST_DIM / LEVELS];
  int32_t zero[QUERIES];  // what levels of zero, which stand for 128, sum up to
  float step[QUERIES];    // NaN where a number of the query is not finite

  void take(long i, const bf16* q, long dim) {
    alignas(64) int8_t upper[MOST_DIM], lower[MOST_DIM];
    take_query(q, dim, upper, lower, zero[i], step[i]);
    for (long c = 0; c * LEVELS < dim; c++) {
      spread(load<__m512i>(upper + c * LEVELS), high[i][c]);
      spread(load<__m512i>(lower + c * LEVELS), low[i][c]);
    }
  }

 private:
  static void spread(__m512i chunk, OfChunk& to) {
    store(to[0], _mm512_shuffle_epi32(chunk, _MM_PERM_AAAA));
    store(to[1], _mm512_shuffle_epi32(chunk, _MM_PERM_BBBB));
    store(to[2], _mm512_shuffle_epi32(chunk, _MM_PERM_CCCC));
    store(to[3], _mm512_shuffle_epi32(chunk, _MM_PERM_DDDD));
  }
};

inline __m512i load_levels(const int8_t* p, bool whole) {
  return whole ? load<__m512i>(p) : _mm512_zextsi256_si512(load<__m256i>(p));
}

// What a level of rows from p on is worth; 0 beyond `count`.
inline F load_worth(const bf16* p, long count) {
  __mmask16 some = count < 0 ? 0 : count < LANES ? (__mmask16)((1 << count) - 1) : 0xffff;
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, p)), 16);
}

// ---- scores
// Chunks of 16 rows: four rows by four levels of every quarter, see OfChunk. A level of zero is the byte 128.
template <bool WHOLE> inline void gather(const int8_t* const* rows, long d, I (&k)[4][4]) {
  const __m512i zero = _mm512_set1_epi8((char)128);
  for (int x = 0; x < 4; x++) {
    __m512i v[4];
    for (int r = 0; r < 4; r++) v[r] = _mm512_xor_si512(load_levels(rows[4 * x + r] + d, WHOLE), zero);
    __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpacklo_epi32(v[2], v[3]);
    __m512i c = _mm512_unpackhi_epi32(v[0], v[1]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    k[x][0] = (I)_mm512_unpacklo_epi64(a, b), k[x][1] = (I)_mm512_unpackhi_epi64(a, b);
    k[x][2] = (I)_mm512_unpacklo_epi64(c, d), k[x][3] = (I)_mm512_unpackhi_epi64(c, d);
  }
}

// The products of 16 rows' chunks with a query's. Sums stay below 2^31: 256 x 255 x 32512.
inline I score_chunk(const I (&k)[4][4], const OfChunk& high, const OfChunk& low) {
  I sums[4];  // of four rows, quarter by quarter
  for (int x = 0; x < 4; x++) sums[x] = I{};
  for (int m = 0; m < 4; m++)
    for (int x = 0; x < 4; x++) sums[x] = dot(sums[x], load<I>(high[m]), k[x][m]);
  for (int x = 0; x < 4; x++) sums[x] <<= 8;
  for (int m = 0; m < 4; m++)
    for (int x = 0; x < 4; x++) sums[x] = dot(sums[x], load<I>(low[m]), k[x][m]);
  auto fold = [](I x, I y) {
    __m512i a = (__m512i)x, b = (__m512i)y;
    return (I)_mm512_shuffle_i32x4(a, b, 0x88) + (I)_mm512_shuffle_i32x4(a, b, 0xdd);
  };
  return fold(fold(sums[0], sums[1]), fold(sums[2], sums[3]));
}

// sums[i] += query i . rows[r], of their chunks at d, for 16 rows
template <bool WHOLE>
inline void score_chunks(const LevelQueries& q, long queries, const int8_t* const* rows, long d, I* sums) {
  I k[4][4];
  gather<WHOLE>(rows, d, k);
  for (long i = 0; i < queries; i++) sums[i] += score_chunk(k, q.high[i][d / LEVELS], q.low[i][d / LEVELS]);
}

// out[i][at + r] = query i . rows[r] for 16 rows, whose levels are worth `worth`
inline void score_levels(const LevelQueries& q, long queries, long dim, const int8_t* const* rows, F worth,
                         float (*out)[KEYS], long at) {
  I sums[QUERIES];
  for (long i = 0; i < queries; i++) sums[i] = splat(-q.zero[i]);
  for (long d = 0; d < dim; d += LEVELS) {
    if (d + LEVELS <= dim) score_chunks<true>(q, queries, rows, d, sums);
    else score_chunks<false>(q, queries, rows, d, sums);
  }
  for (long i = 0; i < queries; i++) store(out[i] + at, __builtin_convertvector(sums[i], F) * (worth * q.step[i]));
}

// ---- values
struct LevelWeights {  // of one query, over a block
  alignas(64) uint8_t high[KEYS], low[KEYS];
  float step;

  // NaN, of a weight or of what a level is worth, goes into `step`. Below 1e-33 all are taken for nothing.
  void take(const float* weights, const F* worth) {
    F share[KEYS / LANES];
    __m512i top = {};
    for (long i = 0; i < KEYS / LANES; i++) {
      share[i] = load<F>(weights + i * LANES) * worth[i];
      top = _mm512_max_epu32(top, (__m512i)share[i]);  // NaN is larger than all
    }
    uint32_t bits = _mm512_reduce_max_epu32(top);
    float largest;
    memcpy(&largest, &bits, 4);
    float inverse = largest >= 1e-33f ? 65535 / largest : 0;
    step = largest / 65535;
    for (long i = 0; i < KEYS / LANES; i++) {
      __m512i whole = _mm512_cvtps_epi32((__m512)(share[i] * inverse));
      store(high + i * LANES, _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
      store(low + i * LANES, _mm512_cvtepi32_epi8(whole));
    }
  }
};

// Four rows' chunks -> in register m, four rows by four levels of every quarter of a row: N of them, from FROM on.
template <int N, int FROM> inline void interleave(const __m512i (&v)[4], I (&to)[N]) {
  for (int half = 0; half < N / 2; half++) {
    auto bytes = [&](__m512i a, __m512i b) {
      return half + FROM / 2 ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b);
    };
    __m512i a = bytes(v[0], v[1]), b = bytes(v[2], v[3]);
    to[2 * half] = (I)_mm512_unpacklo_epi16(a, b), to[2 * half + 1] = (I)_mm512_unpackhi_epi16(a, b);
  }
}

// found[q][m] = the weighted sums of Q queries over the chunks at d of `count` rows, for N registers m from FROM on. A
// block has 64 rows, so that sums stay below 2^31: 64 x 65535 x 128.
template <int Q, int N, int FROM, bool WHOLE>
inline void sum_levels(const LevelWeights* weights, const int8_t* const* rows, long d, long count, I (*found)[4]) {
  I high[Q][N], low[Q][N];
  for (int q = 0; q < Q; q++)
    for (int i = 0; i < N; i++) high[q][i] = low[q][i] = I{};
  for (long j = 0; j < count; j += 4) {
    __m512i v[4];
    I m[N];
    for (int r = 0; r < 4; r++) v[r] = load_levels(rows[j + r] + d, WHOLE);
    interleave<N, FROM>(v, m);
    for (int q = 0; q < Q; q++) {
      I upper = splat(load<int32_t>(weights[q].high + j)), lower = splat(load<int32_t>(weights[q].low + j));
      for (int i = 0; i < N; i++) high[q][i] = dot(high[q][i], m[i], upper);
      for (int i = 0; i < N; i++) low[q][i] = dot(low[q][i], m[i], lower);
    }
  }
  for (int q = 0; q < Q; q++)
    for (int i = 0; i < N; i++) found[q][FROM + i] = (high[q][i] << 8) + low[q][i];
}

// The sums of a chunk in the order that `place` tells.
template <bool WHOLE> inline void add_found(const I (&found)[4], float step, float* sum) {
  const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
  const __m512i second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  for (int half = 0; half < 1 + WHOLE; half++)
    for (int p = 0; p < 2; p++) {
      I sums = (I)_mm512_permutex2var_epi64((__m512i)found[p], half ? second : first, (__m512i)found[p + 2]);
      float* at = sum + (half * 2 + p) * LANES;
      store(at, fused(__builtin_convertvector(sums, F), splat(step), load<F>(at)));
    }
}

template <int Q, bool WHOLE>
inline void add_chunk(const LevelWeights* weights, const int8_t* const* rows, long d, long count,
                      float (*sum)[MOST_DIM]) {
  I found[Q][4];
  if constexpr (Q <= 3) sum_levels<Q, 4, 0, WHOLE>(weights, rows, d, count, found);
  else {
    sum_levels<Q, 2, 0, WHOLE>(weights, rows, d, count, found);
    sum_levels<Q, 2, 2, WHOLE>(weights, rows, d, count, found);
  }
  for (int q = 0; q < Q; q++) add_found<WHOLE>(found[q], weights[q].step, sum[q] + d);
}

// sum[q] += the rows' numbers under their weights, four at a time: what stands in for rows that there are not has the
// weight nought.
template <int Q>
inline void add_levels(const LevelWeights* weights, const int8_t* const* rows, long count, long dim, long queries,
                       float (*sum)[MOST_DIM]) {
  for (; queries >= Q; queries -= Q, weights += Q, sum += Q)
    for (long d = 0; d < dim; d += LEVELS)
      if (d + LEVELS <= dim) add_chunk<Q, true>(weights, rows, d, count, sum);
      else add_chunk<Q, false>(weights, rows, d, count, sum);
  if constexpr (Q > 1) add_levels<Q - 1>(weights, rows, count, dim, queries, sum);
}
#endif
