// A tile of queries passes over a block of keys and values, with a running softmax.
#pragma once
#include <math.h>

#include "blocks.h"
#include "curves.h"
#include "tile.h"

namespace prompt {

// ---- softmax
#if LANES == 16
inline F larger(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }  // b if one is NaN
inline float largest(F v) { return _mm512_reduce_max_ps((__m512)v); }
#elif LANES == 4
inline F larger(F a, F b) { return max(a, b); }  // b if one is NaN
inline float largest(F v) { return most(v); }
#else
inline F larger(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }  // b if one is NaN
inline float largest(F v) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
#endif

// 2^x for x <= 0, 0 below -127; relative error below 2e-7, NaN to NaN
inline F power_of_two(F x) {
  x = larger(splat(-127.0f), x);
  F shifted = x + MAGIC;
  F r = x - (shifted - MAGIC);
  F p = splat(1.325346313e-3f);
  p = p * r + 9.672367489e-3f;
  p = p * r + 5.550799800e-2f;
  p = p * r + 2.402222360e-1f;
  p = p * r + 6.931468877e-1f;
  p = p * r + 1.0f;
  return (F)((I)p + ((I)shifted << 23));
}

template <class T> inline F add_product(F sum, F words, const float* word) {
#if DOT_BFLOATS
  if constexpr (PER_WORD<T> == 2)
    return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)words, (__m512bh)_mm512_set1_epi32(load<int32_t>(word)));
#endif
  return sum + words * *word;
}

// sums[r][i] += a[r][k] b[k][i] over all words k
template <class T, int R, int W>
__attribute__((always_inline)) inline void multiply(const float* a, long a_row, const float* b, long b_row, long words,
                                                    F (&sums)[R][W]) {
  for (long k = 0; k < words; k++)
    for (int i = 0; i < W; i++) {
      F column = load<F>(b + k * b_row + i * LANES);
      for (int r = 0; r < R; r++) sums[r][i] = add_product<T>(sums[r][i], column, a + r * a_row + k);
    }
}

// ---- a tile of queries of one KV head
// How many of them: what fits the registers, with WIDE for the sums of each; or a tile of the matrix unit.
template <class T> constexpr int TILE = ON_TILES<T> ? SIDE : LANES == 4 ? 4 : REGISTERS == 32 ? 6 : 5;
constexpr int WIDE = REGISTERS == 32 ? 4 : 2;

template <class T> struct Tile {
  static_assert(TILE<T> <= LANES);
  F top;                // largest score of each query, in powers of two
  F total[TILE<T>];     // sums of weights, lane by lane
  long limit[TILE<T>];  // how many slots each sees, in rising order, but for those from `sinks` to `begin`
  long begin[TILE<T>];  // in rising order
  long sinks;
  bool turns;                                 // whether `far` are the queries of the sinks
  bool biased;                                // whether
  float bias[TILE<T>];                        // is added to the scores of slot 0, before they are scaled
  const uint8_t* sees[TILE<T>];               // what of its slots each sees, from the first on; null: all of them
  alignas(64) float q[TILE<T> * MOST_DIM];    // [TILE, words]
  alignas(64) float far[TILE<T> * MOST_DIM];
  alignas(64) float sum[TILE<T> * MOST_DIM];  // [TILE, padded], values under weights
};

inline void store_weights(float* words, const F* weights, const bf16*) {  // KEYS of them
#if DOT_BFLOATS
  for (long i = 0; i < KEYS / LANES; i += 2)
    store(words + i / 2 * LANES, _mm512_cvtne2ps_pbh((__m512)weights[i + 1], (__m512)weights[i]));
#else
  memcpy(words, weights, KEYS * 4);
#endif
}

inline void store_weights(float* words, const F* weights, const float*) { memcpy(words, weights, KEYS * 4); }

template <class T, int R>
void score(const float* q, const Shape& shape, const float* keys, F (*scores)[KEYS / LANES]) {
  for (int at = 0; at < KEYS / LANES; at += WIDE) {
    F sums[R][WIDE] = {};
    multiply<T>(q, shape.words, keys + at * LANES, KEYS, shape.words, sums);
    for (int r = 0; r < R; r++)
      for (int i = 0; i < WIDE; i++) scores[r][at + i] = sums[r][i];
  }
}

struct Scaling {
  float scale;  // of scores, which are powers of two then
  Softcap cap;  // before
};

inline void cap_all(const Softcap& cap, long queries, F (*scores)[KEYS / LANES]) {
  for (long r = 0; cap && r < queries; r++)
    for (int i = 0; i < KEYS / LANES; i++) scores[r][i] = cap(scores[r][i]);
}

inline I first_lanes() {
  I lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  return lane;
}

inline int32_t within(long slots) { return (int32_t)(slots < 0 ? 0 : slots < KEYS ? slots : KEYS); }

inline void hide(F* scores, long visible) {
  I lane = first_lanes();
  int32_t seen = within(visible);
  for (int i = 0; i < KEYS / LANES; i++, lane += LANES) scores[i] = select(lane < seen, scores[i], splat(-INFINITY));
}

// Those of slots from `sinks` to `begin`.
inline void hide_between(F* scores, long sinks, long begin) {
  I lane = first_lanes();
  int32_t from = within(sinks), to = within(begin);
  for (int i = 0; i < KEYS / LANES; i++, lane += LANES)
    scores[i] = select((lane < from) | (lane >= to), scores[i], splat(-INFINITY));
}

// Of the sinks, the scores of the queries that read them.
inline void take_sinks(F* scores, const F* far, long sinks) {
  I lane = first_lanes();
  int32_t count = within(sinks);
  for (int i = 0; i < KEYS / LANES; i++, lane += LANES) scores[i] = select(lane < count, far[i], scores[i]);
}

// Whether a query sees any of `count` slots, from `seen` on.
inline bool any_of(const uint8_t* seen, long count) {
  uint64_t found = 0;
  for (; count >= 8; count -= 8, seen += 8) found |= load<uint64_t>(seen);
  for (; count > 0; count--, seen++) found |= *seen;
  return found != 0;
}

template <class T> bool any_seen(const Tile<T>& tile, long queries, long slot) {
  if (!tile.sees[0]) return true;
  for (long r = 0; r < queries; r++) {
    bool alike = r && tile.sees[r] == tile.sees[r - 1];  // query heads of one row
    long left = tile.limit[r] - slot;
    if (!alike && any_of(tile.sees[r] + slot, left < PASS<T> * KEYS ? left : PASS<T> * KEYS)) return true;
  }
  return false;
}

// Those of slots that `seen` says no to.
inline void hide_unseen(F* scores, const uint8_t* seen, long count) {
  uint8_t last[KEYS] = {};
  if (count < KEYS) seen = (const uint8_t*)memcpy(last, seen, count);
  for (long i = 0; i < KEYS / LANES; i++)
    scores[i] = select(load_floats((const int8_t*)seen + i * LANES) != 0.0f, scores[i], splat(-INFINITY));
}

// The scores, times scale, become weights; -> by what to scale the sums so far.
template <class T, int R> F weigh(Tile<T>& tile, const F (*scores)[KEYS / LANES], float scale, float* words) {
  float tops[LANES];
  store(tops, tile.top);
  for (int r = 0; r < R; r++) {
    F top = scores[r][0];
    for (int i = 1; i < KEYS / LANES; i++) top = larger(top, scores[r][i]);
    float highest = largest(top) * scale;
    tops[r] = highest > tops[r] ? highest : tops[r];
  }
  F shrink = power_of_two(tile.top - load<F>(tops));
  tile.top = load<F>(tops);
  for (int r = 0; r < R; r++) {
    F weights[KEYS / LANES], total = tile.total[r] * shrink[r];
    for (int i = 0; i < KEYS / LANES; i++) total += weights[i] = power_of_two(scores[r][i] * scale - tops[r]);
    tile.total[r] = total;
    store_weights(words + r * (KEYS / PER_WORD<T>), weights, (const T*)nullptr);
  }
  return shrink;
}

// sum = sum * shrink + weights * values, for W registers of it from `sum` on. Not inlined: what would then be kept in
// registers around it leaves too few for the sums.
template <class T, int R, int W>
__attribute__((noinline)) void add_values(float* sum, long row, const F& shrink, const float* weights,
                                          const float* values, long words) {
  F sums[R][W] = {};
  multiply<T>(weights, KEYS / PER_WORD<T>, values, row, words, sums);
  for (int r = 0; r < R; r++)
    for (int i = 0; i < W; i++) {
      float* at = sum + r * row + i * LANES;
      store(at, load<F>(at) * shrink[r] + sums[r][i]);
    }
}

// Scores of the first block.
template <class T> void add_bias(const Tile<T>& tile, long queries, F (*scores)[KEYS / LANES]) {
  for (long r = 0; r < queries; r++) scores[r][0][0] += tile.bias[r];
}

// The scores of queries that see no more than some of the block, from slot on.
template <class T> void hide_all(const Tile<T>& tile, long queries, long slot, F (*scores)[KEYS / LANES]) {
  if (slot + KEYS > tile.limit[0])
    for (long r = 0; r < queries; r++) hide(scores[r], tile.limit[r] - slot);
  if (tile.begin[queries - 1] > slot && tile.sinks < slot + KEYS)
    for (long r = 0; r < queries; r++) hide_between(scores[r], tile.sinks - slot, tile.begin[r] - slot);
  for (long r = 0; tile.sees[0] && r < queries; r++)
    hide_unseen(scores[r], tile.sees[r] + slot, within(tile.limit[r] - slot));
}

template <class T, int R>
void pass(Tile<T>& tile, const Shape& shape, const float* block, long slot, const Scaling& scaling) {
  F scores[R][KEYS / LANES];
  alignas(64) float weights[R * KEYS / PER_WORD<T>];
  score<T, R>(tile.q, shape, block, scores);
  if (tile.turns && slot < tile.sinks) {
    F far[R][KEYS / LANES];
    score<T, R>(tile.far, shape, block, far);
    for (int r = 0; r < R; r++) take_sinks(scores[r], far[r], tile.sinks - slot);
  }
  cap_all(scaling.cap, R, scores);
  if (slot == 0 && tile.biased) add_bias(tile, R, scores);
  hide_all(tile, R, slot, scores);
  F shrink = weigh<T, R>(tile, scores, scaling.scale, weights);
  long count = tile.limit[R - 1] - slot < KEYS ? tile.limit[R - 1] - slot : KEYS;
  long words = (count + PER_WORD<T> - 1) / PER_WORD<T>, d = 0;
  const float* values = block + shape.key_block;
  for (; d + WIDE * LANES <= shape.padded; d += WIDE * LANES)
    add_values<T, R, WIDE>(tile.sum + d, shape.padded, shrink, weights, values + d, words);
  for (; d < shape.padded; d += LANES)
    add_values<T, R, 1>(tile.sum + d, shape.padded, shrink, weights, values + d, words);
}

// A tile of so many queries passes over a block, from slot on.
template <class T, int R = TILE<T>>
void pass_over(long queries, Tile<T>& tile, const Shape& shape, const float* block, long slot, const Scaling& scaling) {
  if (queries == R) pass<T, R>(tile, shape, block, slot, scaling);
  else if constexpr (R > 1) pass_over<T, R - 1>(queries, tile, shape, block, slot, scaling);
}

}  // namespace prompt
