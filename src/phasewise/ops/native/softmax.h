// Attention of a few queries over a block of slots: scores, the softmax under way, weighted sums of values.
//
// What a query reads is the same to the bit whether few rows are computed (attention.cpp) or many (prefill.cpp). Both
// have the one order that is told here. Register by register, lane i of a score sums the products of words i, i + LANES
// and so on; `sums_of` adds the lanes, and numbers beyond the last whole register follow one by one. Weights come from
// `weigh`, block by block; values are added to the sums slot by slot. Parts of PART slots are summed by themselves and
// joined by `merge`, in order.
#pragma once
#include <math.h>

#include <type_traits>

#include "simd.h"

constexpr long KEYS = 64;       // slots whose scores are held at a time
constexpr long QUERIES = 16;    // queries per job
constexpr long MOST_DIM = 256;  // of a head

struct State {  // softmax under way: largest score, sum of weights, weighted sum of values
  float top[QUERIES], total[QUERIES];
  float sum[QUERIES][MOST_DIM];
};

// ---- scores
// LANES rows from number j on; the last one stands in for those that there are not.
template <class T> struct Some {
  const T* rows[LANES];

  Some(const T* all, long row, long j, long count) {
    for (long r = 0; r < LANES; r++) rows[r] = all + (j + r < count ? j + r : count - 1) * row;
  }
};

// 16 (8, 4) registers -> their sums, lane by lane. Out of line: inlined, scores come faster from a cache, but blocks
// that are fetched meanwhile do not, and plain decoding of long texts slows down (scripts/checkout_pairs.py; Zen 5).
__attribute__((noinline)) static F sums_of(F* v) {
#if LANES == 4
  auto pairs = [](F a, F b) { return vpaddq_f32((float32x4_t)a, (float32x4_t)b); };
  return (F)vpaddq_f32(pairs(v[0], v[1]), pairs(v[2], v[3]));
#else
#if LANES == 16
  typedef __m512 R;
  auto low = [](R a, R b) { return _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b); };
  auto pairs = [](R a, R b) {
    return (R)_mm512_unpacklo_pd((__m512d)a, (__m512d)b) + (R)_mm512_unpackhi_pd((__m512d)a, (__m512d)b);
  };
  auto fold = [](R a, R b) { return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd); };
#else
  typedef __m256 R;
  auto low = [](R a, R b) { return _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b); };
  auto pairs = [](R a, R b) {
    return (R)_mm256_unpacklo_pd((__m256d)a, (__m256d)b) + (R)_mm256_unpackhi_pd((__m256d)a, (__m256d)b);
  };
  auto fold = [](R a, R b) { return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31); };
#endif
  R four[LANES / 4];  // of four registers each, one per quarter
  for (int i = 0; i < LANES; i += 4)
    four[i / 4] = pairs(low((R)v[i], (R)v[i + 1]), low((R)v[i + 2], (R)v[i + 3]));
#if LANES == 16
  return (F)fold(fold(four[0], four[1]), fold(four[2], four[3]));
#else
  return (F)fold(four[0], four[1]);
#endif
#endif
}

// Registers of keys meet registers of queries: `PER_STEP<T>` numbers at a time.
template <class T> constexpr long PER_STEP = DOT_INSTRUCTIONS && std::is_same_v<T, bf16> ? 2 * LANES : LANES;
static inline F add_products(F acc, const float* q, const float* k) { return acc + load<F>(q) * load<F>(k); }
static inline F add_products(F acc, const bf16* q, const bf16* k) {
#if DOT_INSTRUCTIONS
  return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)load<__m512i>(q), (__m512bh)load<__m512i>(k));
#else
  return acc + load_floats(q) * load_floats(k);
#endif
}

// out[lane] = q . rows[lane]; C chunks if known beforehand, else 0
template <class T, int C> static void score(const T* q, const T* const* rows, long dim, float* out) {
  long whole = C ? C * PER_STEP<T> : dim / PER_STEP<T> * PER_STEP<T>;
  F parts[LANES];
  for (long j = 0; j < LANES; j++) {
    parts[j] = F{};
    for (long d = 0; d < whole; d += PER_STEP<T>) parts[j] = add_products(parts[j], q + d, rows[j] + d);
  }
  store(out, sums_of(parts));
  for (long j = 0; whole < dim && j < LANES; j++)
    for (long d = whole; d < dim; d++) out[j] = fmaf(to_float(q[d]), to_float(rows[j][d]), out[j]);
}

template <class T> static void score(const T* q, const T* const* rows, long dim, float* out) {
  if (dim == PER_STEP<T>) score<T, 1>(q, rows, dim, out);
  else if (dim == 2 * PER_STEP<T>) score<T, 2>(q, rows, dim, out);
  else if (dim == 4 * PER_STEP<T>) score<T, 4>(q, rows, dim, out);
  else if (dim == 8 * PER_STEP<T>) score<T, 8>(q, rows, dim, out);
  else score<T, 0>(q, rows, dim, out);
}

// ---- weights
// Weights are kept as the products with values take them.
template <class T> using Weight = std::conditional_t<DOT_BFLOATS && std::is_same_v<T, bf16>, bf16, float>;
// Whether sums of values lie in the order that `place` tells.
template <class T> constexpr bool CROSSED = DOT_INSTRUCTIONS && std::is_same_v<T, bf16>;

static inline void store_weights(float* weights, const F* values) {  // KEYS of them
  memcpy(weights, values, KEYS * 4);
}
#if DOT_BFLOATS
static inline void store_weights(bf16* weights, const F* values) {
  for (long i = 0; i < KEYS / LANES; i += 2)
    store(weights + i * LANES, _mm512_cvtne2ps_pbh((__m512)values[i + 1], (__m512)values[i]));
}
#endif

// Scores outside from .. to-1 become -inf.
inline void keep_between(float* scores, long from, long to) {
  I lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  int32_t first = (int32_t)(from > 0 ? from : 0), end = (int32_t)(to > 0 ? to < KEYS ? to : KEYS : 0);
  for (long j = 0; j < KEYS; j += LANES, lane += LANES)
    store(scores + j, select((lane >= first) & (lane < end), load<F>(scores + j), splat(-INFINITY)));
}

// 2^x for x <= 0 (also -inf, and NaN to NaN); relative error below 3e-6, far below what weights of bfloat16 lose
inline F rough_power_of_two(F x) {
#if LANES == 16
  F rest = (F)_mm512_reduce_ps((__m512)x, 0);  // from the nearest integer; 0 for an infinity
#else
  F shifted = x + MAGIC, rest = x - (shifted - MAGIC);
#endif
  F p = splat(9.570101974e-3f);
  p = fused(p, rest, splat(5.591786145e-2f));
  p = fused(p, rest, splat(2.402474484e-1f));
  p = fused(p, rest, splat(6.931218146e-1f));
  p = fused(p, rest, splat(9.999992614e-1f));
#if LANES == 16
  return (F)_mm512_scalef_ps((__m512)p, (__m512)(x - rest));
#else
  return select(x < -126.0f, F{}, (F)((I)p + ((I)shifted << 23)));
#endif
}

// The scores of R queries over a block, times scale, become weights; -inf is what one does not see. `top`, the largest
// score of each so far, and `total`, its sum of weights, go on; its sums of values are to be multiplied with `shrink`. Step
// by step for all queries, so that none waits for another.
template <class T, int R>
inline void weigh(F (*scores)[KEYS / LANES], float scale, float* top, float* total, float* shrink) {
  constexpr float LOG2_E = 1.44269504f;
  constexpr bool EXACT = std::is_same_v<T, float>;
  float before[R], from[R];
  for (int r = 0; r < R; r++) {
    F highest = splat(-INFINITY);
    for (long i = 0; i < KEYS / LANES; i++) {
      if (EXACT) scores[r][i] *= scale;
      highest = max(scores[r][i], highest);
    }
    float own = EXACT ? most(highest) : most(highest) * scale;
    before[r] = top[r], top[r] = own > top[r] ? own : top[r];
    from[r] = top[r] == -INFINITY ? 0 : top[r];  // nothing seen yet
  }
  for (int r = 0; r < R; r++) {
    if constexpr (EXACT) {
      for (long i = 0; i < KEYS / LANES; i++) scores[r][i] -= from[r];
      exp_negative(*(F(*)[KEYS / LANES])scores[r]);
    } else {
      const F by = splat(scale * LOG2_E), less = splat(-from[r] * LOG2_E);
      for (long i = 0; i < KEYS / LANES; i++) {
        F power = fused(scores[r][i], by, less);  // above 0 only by rounding, which may be much of a huge score
        scores[r][i] = rough_power_of_two(select(power > 0.0f, F{}, power));
      }
    }
    F all = {};
    for (long i = 0; i < KEYS / LANES; i++) all += scores[r][i];
    shrink[r] = before[r] == top[r] ? 1 : exp_negative(splat(before[r] - from[r]))[0];
    total[r] = total[r] * shrink[r] + sum(all);
  }
}

template <class T, class W> void weigh(const float* scores, float scale, W* weights, long query, long dim, State& s) {
  F own[1][KEYS / LANES];
  float shrink;
  memcpy(own, scores, sizeof own);
  weigh<T, 1>(own, scale, s.top + query, s.total + query, &shrink);
  store_weights(weights, own[0]);
  for (long d = 0; shrink != 1 && d < dim; d++) s.sum[query][d] *= shrink;
}

// The softmax of a part's slots joins that of those before: `sum` and `of_part` have `dim` numbers and room for whole
// registers.
__attribute__((noinline)) static void merge(float& top, float& total, float* sum, float part_top, float part_total,
                                            const float* of_part, long dim) {
  if (part_total == 0) return;  // none of them was seen
  if (total == 0) {
    top = part_top, total = part_total;
    memcpy(sum, of_part, dim * 4);
    return;
  }
  float highest = part_top > top ? part_top : top;
  F before = splat(expf(top - highest)), part = splat(expf(part_top - highest));
  total = fused(splat(part_total), part, splat(total) * before)[0], top = highest;
  for (long d = 0; d < dim; d += LANES)
    store(sum + d, fused(load<F>(of_part + d), part, load<F>(sum + d) * before));
}

// What sums of values are multiplied with in the end. A row that sees nothing reads 0. `sink_scores`: of all heads, or null.
inline float share_of(float total, float top, const float* sink_scores, long head) {
  if (total == 0) return 0;
  return 1 / (sink_scores ? total + expf(sink_scores[head] - top) : total);
}

typedef float Each __attribute__((vector_size(16)));  // of up to four queries

inline float total(F v) {
#if LANES == 8
  __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
  return sum(v);
#endif
}

// The sum of each of four registers.
inline Each totals_of(const F (&v)[4]) {
#if LANES == 16
  auto pair = [](F a, F b) {
    return _mm512_unpacklo_ps((__m512)a, (__m512)b) + _mm512_unpackhi_ps((__m512)a, (__m512)b);
  };
  __m512d a = (__m512d)pair(v[0], v[1]), b = (__m512d)pair(v[2], v[3]);
  __m512 all = (__m512)_mm512_unpacklo_pd(a, b) + (__m512)_mm512_unpackhi_pd(a, b);
  all += _mm512_shuffle_f32x4(all, all, 0x4e);
  all += _mm512_shuffle_f32x4(all, all, 0xb1);
  return (Each)_mm512_castps512_ps128(all);
#else
  return Each{total(v[0]), total(v[1]), total(v[2]), total(v[3])};
#endif
}

// ---- values
// Registers of sums, in order, from where they lie and back.
template <class T, int N> static void load_sums(const float* from, F (&sums)[N]) {
  for (int i = 0; i < N; i++) sums[i] = load<F>(from + i * LANES);
#if DOT_INSTRUCTIONS
  const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
  const __m512i second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  for (int i = 0; CROSSED<T> && i + 1 < N; i += 2) {
    __m512i even = (__m512i)sums[i], odd = (__m512i)sums[i + 1];
    sums[i] = (F)_mm512_permutex2var_epi64(even, first, odd);
    sums[i + 1] = (F)_mm512_permutex2var_epi64(even, second, odd);
  }
#endif
}

template <class T, int N> static void store_sums(float* to, F (&sums)[N]) {
#if DOT_INSTRUCTIONS
  for (int i = 0; CROSSED<T> && i + 1 < N; i += 2) {
    __m512 a = (__m512)sums[i], b = (__m512)sums[i + 1];
    sums[i] = (F)_mm512_shuffle_f32x4(a, b, 0x88), sums[i + 1] = (F)_mm512_shuffle_f32x4(a, b, 0xdd);
  }
#endif
  for (int i = 0; i < N; i++) store(to + i * LANES, sums[i]);
}

// sum[q][d ...] += weights[q][j] * v[j][d ...] for Q queries and N registers of sums
template <int Q, int N, class T>
static void add_values(const float (*weights)[KEYS], const T* v, long row, long count, float (*sum)[MOST_DIM]) {
  F acc[Q][N];
  for (int q = 0; q < Q; q++) load_sums<T>(sum[q], acc[q]);
  for (long j = 0; j < count; j++)
    for (int i = 0; i < N; i++) {
      F value = load_floats(v + j * row + i * LANES);
      for (int q = 0; q < Q; q++) acc[q][i] += value * weights[q][j];
    }
  for (int q = 0; q < Q; q++) store_sums<T>(sum[q], acc[q]);
}

#if DOT_BFLOATS
// The same for bfloat16, two slots at a time. Interleaving their rows leaves the sums of 32 numbers in the order that
// `place` tells.
template <int Q, int N>
static void add_values(const bf16 (*weights)[KEYS], const bf16* v, long row, long count, float (*sum)[MOST_DIM]) {
  F acc[Q][N];
  for (int q = 0; q < Q; q++)
    for (int i = 0; i < N; i++) acc[q][i] = load<F>(sum[q] + i * LANES);
  for (long j = 0; j < count; j += 2) {
    const bf16 *first = v + j * row, *second = j + 1 < count ? first + row : first;  // an odd one out weighs 0
    __m512bh pairs[N];
    for (int i = 0; i < N; i += 2) {
      __m512i a = load<__m512i>(first + i * LANES), b = load<__m512i>(second + i * LANES);
      pairs[i] = (__m512bh)_mm512_unpacklo_epi16(a, b);
      pairs[i + 1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
    }
    for (int q = 0; q < Q; q++) {
      __m512bh weight = (__m512bh)_mm512_set1_epi32(load<int32_t>(weights[q] + j));
      for (int i = 0; i < N; i++) acc[q][i] = (F)_mm512_dpbf16_ps((__m512)acc[q][i], pairs[i], weight);
    }
  }
  for (int q = 0; q < Q; q++)
    for (int i = 0; i < N; i++) store(sum[q] + i * LANES, acc[q][i]);
}
#endif

template <class T> static long place(long d, long dim) {
  bool in_order = !CROSSED<T> || d >= dim / 32 * 32;
  return in_order ? d : d / 32 * 32 + d % 8 / 4 * 16 + d % 32 / 8 * 4 + d % 4;
}

// out = sums * scale, in order
template <class T> static void put_sums(const float* sums, float scale, long dim, T* out) {
  long d = 0;
#if DOT_INSTRUCTIONS
  if constexpr (CROSSED<T>) {
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);  // of four numbers each
    for (; d + 32 <= dim; d += 32) {
      F low = load<F>(sums + d) * scale, high = load<F>(sums + d + 16) * scale;
      store(out + d, _mm512_permutexvar_epi64(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low)));
    }
  }
#endif
  for (; d < dim; d++) put(out + d, sums[place<T>(d, dim)] * scale);
}

constexpr int MOST_QUERIES = REGISTERS == 32 ? 8 : 4;  // whose sums fit the registers

template <class T, int Q>
static void add_all_values(const Weight<T> (*weights)[KEYS], const T* v, long row, long count, long dim, long queries,
                           float (*sum)[MOST_DIM]) {
  constexpr int N = Q > 4 || (REGISTERS == 16 && Q > 1) ? 2 : 4, LEAST = CROSSED<T> ? 2 : 1;
  for (; queries >= Q; queries -= Q, weights += Q, sum += Q) {
    auto from = [&](long d) { return (float(*)[MOST_DIM])(sum[0] + d); };
    long d = 0;
    for (; d + N * LANES <= dim; d += N * LANES) add_values<Q, N>(weights, v + d, row, count, from(d));
    for (; d + LEAST * LANES <= dim; d += LEAST * LANES) add_values<Q, LEAST>(weights, v + d, row, count, from(d));
    for (; d < dim; d++)
      for (int q = 0; q < Q; q++)
        for (long j = 0; j < count; j++) sum[q][d] = fmaf(to_float(weights[q][j]), to_float(v[j * row + d]), sum[q][d]);
  }
  if constexpr (Q > 1) add_all_values<T, Q - 1>(weights, v, row, count, dim, queries, sum);
}
