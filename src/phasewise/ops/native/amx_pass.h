// The same pass on the matrix unit: all of a tile's queries, whether there are so many or not, several blocks at once.
#pragma once
#include "pass.h"

namespace prompt {

constexpr long WORDS = KEYS / 2;      // of a query's weights for a block
constexpr long PARTS = KEYS / LANES;  // registers of a query's scores of a block

constexpr float LOWEST = -1e30f;  // below any score; a query may meet blocks of which it sees nothing before others

// 16 registers -> the largest number of each, lane by lane
inline F most_of(F* v) {
  typedef __m512 R;
  auto low = [](F a, F b) { return max((F)_mm512_unpacklo_ps((R)a, (R)b), (F)_mm512_unpackhi_ps((R)a, (R)b)); };
  auto pairs = [](F a, F b) {
    __m512d c = (__m512d)a, d = (__m512d)b;
    return max((F)_mm512_unpacklo_pd(c, d), (F)_mm512_unpackhi_pd(c, d));
  };
  auto fold = [](F a, F b) {
    return max((F)_mm512_shuffle_f32x4((R)a, (R)b, 0x88), (F)_mm512_shuffle_f32x4((R)a, (R)b, 0xdd));
  };
  F four[4];
  for (int i = 0; i < 4; i++) four[i] = pairs(low(v[4 * i], v[4 * i + 1]), low(v[4 * i + 2], v[4 * i + 3]));
  return fold(fold(four[0], four[1]), fold(four[2], four[3]));
}

// The scores [blocks][SIDE] of a tile, times scale, become weights [SIDE][PASS<bf16> * WORDS]; -> by what to scale the
// sums so far.
inline F weigh_all(Tile<bf16>& tile, long blocks, const F (*scores)[SIDE][PARTS], float scale, float* words) {
  F tops[SIDE];
  for (long r = 0; r < SIDE; r++) {
    tops[r] = max(max(scores[0][r][0], scores[0][r][1]), max(scores[0][r][2], scores[0][r][3]));
    for (long b = 1; b < blocks; b++)
      for (long i = 0; i < PARTS; i++) tops[r] = max(tops[r], scores[b][r][i]);
  }
  constexpr float LOG2_E = 1.44269504f;
  F before = load<F>(tile.top), top = max(max(most_of(tops) * scale, splat(LOWEST)), before);
  F shrink = exp_negative(before - top);
  store(tile.top, top);
  for (long r = 0; r < SIDE; r++) {
    F total = {}, less = splat(-top[r] * LOG2_E);
    for (long b = 0; b < blocks; b++) {
      F weights[PARTS];
      for (long i = 0; i < PARTS; i++)
        total += weights[i] = rough_power_of_two(fused(scores[b][r][i], splat(scale * LOG2_E), less));
      ::store_weights((bf16*)(words + (r * PASS<bf16> + b) * WORDS), weights);
    }
    tile.total[r] = tile.total[r] * shrink[r] + sum(total);
  }
  return shrink;
}

inline void pass_over(long queries, Tile<bf16>& tile, const Shape& shape, const float* packed, long slot, long end,
                      const Scaling& scaling) {
  F scores[PASS<bf16>][SIDE][PARTS], sums[SIDE][PARTS];
  alignas(64) float weights[SIDE * PASS<bf16> * WORDS];
  long last = tile.limit[queries - 1] < end ? tile.limit[queries - 1] : end, blocks = (last - slot + KEYS - 1) / KEYS;
  const int32_t* block = (const int32_t*)packed;
  for (long b = 0; b < blocks; b++) {
    start_sums(true, nullptr, ACROSS);
    const int32_t *keys = block + b * shape.block, *ahead = b + 1 < blocks ? keys + shape.block : block + shape.key_block;
    add_panel<Bf16>(keys, KEYS, KEYS, (const int32_t*)tile.q.words, shape.words, shape.words, ahead);
    store_sums((char*)scores[b], ACROSS);
    if (tile.turns && slot + b * KEYS < tile.sinks) {
      start_sums(true, nullptr, ACROSS);
      add_panel<Bf16>(keys, KEYS, KEYS, (const int32_t*)tile.far.words, shape.words, shape.words, ahead);
      store_sums((char*)sums, ACROSS);
      for (long r = 0; r < queries; r++) take_sinks(scores[b][r], sums[r], tile.sinks - slot - b * KEYS);
    }
    cap_all(scaling.cap, queries, scores[b]);
    if (slot + b == 0 && tile.biased) add_bias(tile, queries, scores[b]);
    hide_all(tile, queries, slot + b * KEYS, end, scores[b]);
  }
  F shrink = weigh_all(tile, blocks, scores, scaling.scale, weights);
  for (long d = 0; d < shape.padded; d += WIDTH) {
    start_sums(true, nullptr, ACROSS);
    const int32_t* first = block + shape.key_block + d;
    for (long b = 0; b < blocks; b++) {
      const int32_t *values = first + b * shape.block, *ahead = b + 1 < blocks ? values + shape.block : first + WIDTH;
      add_panel<Bf16>(values, shape.padded, shape.padded, (const int32_t*)weights + b * WORDS, PASS<bf16> * WORDS,
                      WORDS, ahead);
    }
    store_sums((char*)sums, ACROSS);
    for (long r = 0; r < queries; r++)
      for (long i = 0; i < PARTS; i++) {
        float* at = tile.sum + r * shape.padded + d + i * LANES;
        store(at, load<F>(at) * shrink[r] + sums[r][i]);
      }
  }
}

}  // namespace prompt
