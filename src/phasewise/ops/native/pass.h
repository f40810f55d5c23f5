// A tile of queries passes over a block of keys and values, with a running softmax.
#pragma once
#include <math.h>

#include "blocks.h"
#include "curves.h"

namespace prompt {

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

// sums[r] += a[r][k] b[k] over all words k, number by number: the numbers of dim beyond the last whole registers.
template <class T, int R>
inline void multiply_singly(const float* a, long a_row, const float* b, long b_row, long words, F (&sums)[R]) {
  for (long k = 0; k < words; k++) {
    F column = load<F>(b + k * b_row);
    for (int r = 0; r < R; r++) {
      if constexpr (PER_WORD<T> == 1) {
        sums[r] = fused(column, splat(a[r * a_row + k]), sums[r]);
      } else {
        uint32_t word = load<uint32_t>(a + r * a_row + k);
        sums[r] = fused((F)((I)column << 16), splat(widen((bf16)word)), sums[r]);
        sums[r] = fused((F)((I)column & (int32_t)0xffff0000), splat(widen((bf16)(word >> 16))), sums[r]);
      }
    }
  }
}

// ---- a tile of queries of one KV head
// How many of them: what fits the registers, with WIDE for the sums of each; or a tile of the matrix unit.
template <class T> constexpr int TILE = ON_TILES<T> ? SIDE : LANES == 4 ? 4 : REGISTERS == 32 ? 6 : 5;
constexpr int WIDE = REGISTERS == 32 ? 4 : 2;

template <class T> struct Queries {
  alignas(64) float words[TILE<T> * MOST_DIM];  // [TILE, words]

  void take(long r, const T* q, const Shape& shape) {
    memset(words + r * shape.words, 0, shape.words * 4);
    pack_words(q, shape.dim, 1, words + r * shape.words);
  }
};

#if DOT_INSTRUCTIONS
template <> struct Queries<int8_t> {
  alignas(64) int8_t upper[TILE<int8_t>][MOST_DIM], lower[TILE<int8_t>][MOST_DIM];
  int32_t zero[TILE<int8_t>];  // as in LevelQueries
  float step[TILE<int8_t>];

  void take(long r, const bf16* q, const Shape& shape) {
    take_query(q, shape.dim, upper[r], lower[r], zero[r], step[r]);
  }
};
#endif

template <class T> struct Tile {
  static_assert(TILE<T> <= LANES);
  float top[TILE<T>], total[TILE<T>];  // of the part of the slots that is read: see `weigh`
  long limit[TILE<T>];  // how many slots each sees, in rising order, but for those from `sinks` to `begin`
  long begin[TILE<T>];  // in rising order
  long sinks;
  bool turns;                                 // whether `far` are the queries of the sinks
  bool biased;                                // whether
  float bias[TILE<T>];                        // is added to the scores of slot 0, before they are scaled
  const uint8_t* sees[TILE<T>];               // what of its slots each sees, from the first on; null: all of them
  Queries<T> q, far;
  alignas(64) float sum[TILE<T> * MOST_DIM];  // [TILE, padded], values under weights
  float top_before[TILE<T>], total_before[TILE<T>];  // of the parts before
  alignas(64) float sum_before[TILE<T> * MOST_DIM];

  void start(long queries, const Shape& shape) {
    for (long r = 0; r < queries; r++) {
      top[r] = -INFINITY, total[r] = 0;
      memset(sum + r * shape.padded, 0, shape.padded * 4);
    }
  }

  // The end of a part.
  void keep(long queries, const Shape& shape) {
    for (long r = 0; r < queries; r++)
      merge(top_before[r], total_before[r], sum_before + r * shape.padded, top[r], total[r], sum + r * shape.padded,
            shape.padded);
  }
};

// Weights of a tile's queries for a block as the products with values take them: a register's worth of slots after the
// other.
template <class T> struct BlockWeights {
  alignas(64) float words[TILE<T> * KEYS];

  void take(long r, const F* weights, const float*) {
    ::store_weights((Weight<T>*)(words + r * (KEYS / PER_WORD<T>)), weights);
  }
};

#if DOT_INSTRUCTIONS
template <> struct BlockWeights<int8_t> {
  LevelWeights of[TILE<int8_t>];

  void take(long r, const F* weights, const float* worth) {
    F each[KEYS / LANES];
    memcpy(each, worth, sizeof each);
    of[r].take((const float*)weights, each);
  }
};
#endif

// ---- scores
// sum + words * one word, for all lanes. GCC does not take the word from memory by itself, and short of registers it
// moves such sums past each other: one of them is as fast as two then.
template <class T> __attribute__((always_inline)) inline F add_in_place(F sum, F words, const float* word) {
#if DOT_BFLOATS
  if constexpr (PER_WORD<T> == 2) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(words), "m"(*(const int32_t*)word));
    return sum;
  }
#endif
  sum = fused(words, splat(*word), sum);
  pin(sum);
  return sum;
}

constexpr int COLUMNS = LANES == 16 ? 1 : 2;  // registers of keys whose sums are under way at once: enough to be busy

// The scores of R queries for COLUMNS registers of keys, summed in the order of `score` (softmax.h): what is a lane there
// is a register here.
template <class T, int R>
__attribute__((noinline)) void score_by_lanes(const float* q, const Shape& shape, const float* keys,
                                              F (*scores)[KEYS / LANES]) {
  constexpr int W = COLUMNS;
  const long rounds = shape.dim / PER_STEP<T>, whole = rounds * LANES, row = shape.words;
  typedef F Sums[R * W];
  auto add = [](Sums& to, const Sums& more) __attribute__((always_inline)) {
#pragma GCC unroll 10
    for (int i = 0; i < R * W; i++) pin(to[i] += more[i]);
  };
  auto lane = [&](long i, Sums& acc) __attribute__((always_inline)) {
#pragma GCC unroll 10
    for (int i = 0; i < R * W; i++) acc[i] = F{};
    for (long w = i * rounds; w < (i + 1) * rounds; w++) {
      F column[W];
#pragma GCC unroll 2
      for (int j = 0; j < W; j++) column[j] = load<F>(keys + w * KEYS + j * LANES);
#pragma GCC unroll 10
      for (int i = 0; i < R * W; i++) acc[i] = add_in_place<T>(acc[i], column[i % W], q + i / W * row + w);
    }
  };
  constexpr int NEXT = LANES == 4 ? 1 : 2;  // of four lanes, i and i + NEXT are added first
  auto four = [&](long i, Sums& acc) __attribute__((always_inline)) {
    Sums more, last;
    lane(i, acc), lane(i + NEXT, more), add(acc, more);
    lane(i + 3 - NEXT, more), lane(i + 3, last), add(more, last);
    add(acc, more);
  };
  Sums sums, more, last;
  four(0, sums);
  if constexpr (LANES >= 8) four(4, more), add(sums, more);
  if constexpr (LANES == 16) four(8, more), four(12, last), add(more, last), add(sums, more);
  for (int j = 0; j < W; j++) {
    F found[R];
    for (int r = 0; r < R; r++) found[r] = sums[r * W + j];
    if (whole < row) multiply_singly<T, R>(q + whole, row, keys + whole * KEYS + j * LANES, KEYS, row - whole, found);
    for (int r = 0; r < R; r++) scores[r][j] = found[r];
  }
}

// Of R queries over a block of keys.
template <class T, int R>
void score(const float* q, const Shape& shape, const float* keys, F (*scores)[KEYS / LANES]) {
  constexpr int W = BY_LANES<T> ? COLUMNS : WIDE;
  for (int at = 0; at < KEYS / LANES; at += W) {
    if constexpr (BY_LANES<T>) {
      score_by_lanes<T, R>(q, shape, keys + at * LANES, (F(*)[KEYS / LANES])(scores[0] + at));
    } else {
      F sums[R][W] = {};
      multiply<T>(q, shape.words, keys + at * LANES, KEYS, shape.words, sums);
      for (int r = 0; r < R; r++)
        for (int i = 0; i < W; i++) scores[r][at + i] = sums[r][i];
    }
  }
}

template <class T, int R>
void score(const Queries<T>& q, const Shape& shape, const float* keys, F (*scores)[KEYS / LANES]) {
  score<T, R>(q.words, shape, keys, scores);
}

struct Scaling {
  float scale;  // of scores
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

template <class T> bool any_seen(const Tile<T>& tile, long queries, long slot, long end) {
  if (!tile.sees[0]) return true;
  for (long r = 0; r < queries; r++) {
    bool alike = r && tile.sees[r] == tile.sees[r - 1];  // query heads of one row
    long last = tile.limit[r] < end ? tile.limit[r] : end;
    if (!alike && any_of(tile.sees[r] + slot, last - slot)) return true;
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

// sum += weights * values, for W registers of it from `sum` on. Not inlined: what would then be kept in registers around
// it leaves too few for the sums.
template <class T, int R, int W>
__attribute__((noinline)) void add_values(float* sum, long row, const float* weights, const float* values, long words) {
  F sums[R][W];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < W; i++) sums[r][i] = load<F>(sum + r * row + i * LANES);
  multiply<T>(weights, KEYS / PER_WORD<T>, values, row, words, sums);
  for (int r = 0; r < R; r++)
    for (int i = 0; i < W; i++) store(sum + r * row + i * LANES, sums[r][i]);
}

template <class T, int R>
void add_all_values(Tile<T>& tile, const Shape& shape, const BlockWeights<T>& weights, const float* values, long count) {
  long words = (count + PER_WORD<T> - 1) / PER_WORD<T>, d = 0, padded = shape.padded;
  const long whole = PER_WORD<T> == 1 ? padded : shape.dim / PER_STEP<T> * PER_STEP<T>;
  for (; d + WIDE * LANES <= whole; d += WIDE * LANES)
    add_values<T, R, WIDE>(tile.sum + d, padded, weights.words, values + d, words);
  for (; d < whole; d += LANES) add_values<T, R, 1>(tile.sum + d, padded, weights.words, values + d, words);
  for (; d < padded; d += LANES) {
    F sums[R];
    for (int r = 0; r < R; r++) sums[r] = load<F>(tile.sum + r * padded + d);
    multiply_singly<T, R>(weights.words, KEYS / PER_WORD<T>, values + d, padded, words, sums);
    for (int r = 0; r < R; r++) store(tile.sum + r * padded + d, sums[r]);
  }
}

#if DOT_INSTRUCTIONS
// ---- the same of levels; whole numbers have one sum in any order (levels.h)
template <int R, int W>
inline void dot_words(const int8_t* a, long a_row, const float* b, long b_row, long words, I (&sums)[R][W]) {
  for (long k = 0; k < words; k++)
    for (int i = 0; i < W; i++) {
      I column = load<I>(b + k * b_row + i * LANES);
      for (int r = 0; r < R; r++) sums[r][i] = dot(sums[r][i], splat(load<int32_t>(a + r * a_row + 4 * k)), column);
    }
}

template <class T, int R>
void score(const Queries<int8_t>& q, const Shape& shape, const float* keys, F (*scores)[KEYS / LANES]) {
  const float* worth = keys + shape.key_block - KEYS;
  I sums[R][WIDE] = {};
  dot_words(q.upper[0], MOST_DIM, keys, KEYS, shape.words, sums);
  for (int r = 0; r < R; r++)
    for (int i = 0; i < WIDE; i++) sums[r][i] <<= 8;
  dot_words(q.lower[0], MOST_DIM, keys, KEYS, shape.words, sums);
  for (int r = 0; r < R; r++)
    for (int i = 0; i < WIDE; i++)
      scores[r][i] = __builtin_convertvector(sums[r][i] - q.zero[r], F) * (load<F>(worth + i * LANES) * q.step[r]);
}

// sum += weights * levels, for two registers of it.
template <int R>
__attribute__((noinline)) void add_levels(float* sum, long row, const LevelWeights* weights, const float* values,
                                          long words) {
  I upper[R][2] = {}, lower[R][2] = {};
  for (long k = 0; k < words; k++) {
    I columns[2] = {load<I>(values + k * row), load<I>(values + k * row + LANES)};
    for (int r = 0; r < R; r++) {
      I high = splat(load<int32_t>(weights[r].high + 4 * k)), low = splat(load<int32_t>(weights[r].low + 4 * k));
      for (int i = 0; i < 2; i++) upper[r][i] = dot(upper[r][i], columns[i], high);
      for (int i = 0; i < 2; i++) lower[r][i] = dot(lower[r][i], columns[i], low);
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 2; i++) {
      F found = __builtin_convertvector((upper[r][i] << 8) + lower[r][i], F);
      float* at = sum + r * row + i * LANES;
      store(at, fused(found, splat(weights[r].step), load<F>(at)));
    }
}

template <class T, int R>
void add_all_values(Tile<int8_t>& tile, const Shape& shape, const BlockWeights<int8_t>& weights, const float* values,
                    long count) {
  for (long d = 0; d < shape.padded; d += 2 * LANES)
    add_levels<R>(tile.sum + d, shape.padded, weights.of, values + d, (count + 3) / 4);
}
#endif

// Scores of the first block.
template <class T> void add_bias(const Tile<T>& tile, long queries, F (*scores)[KEYS / LANES]) {
  for (long r = 0; r < queries; r++) scores[r][0][0] += tile.bias[r];
}

// The scores of queries that see no more than some of the block, from slot on.
template <class T>
void hide_all(const Tile<T>& tile, long queries, long slot, long end, F (*scores)[KEYS / LANES]) {
  if (slot + KEYS > end || slot + KEYS > tile.limit[0])
    for (long r = 0; r < queries; r++) hide(scores[r], (tile.limit[r] < end ? tile.limit[r] : end) - slot);
  if (tile.begin[queries - 1] > slot && tile.sinks < end)
    for (long r = 0; r < queries; r++) hide_between(scores[r], tile.sinks - slot, tile.begin[r] - slot);
  for (long r = 0; tile.sees[0] && r < queries; r++)
    hide_unseen(scores[r], tile.sees[r] + slot, within(tile.limit[r] - slot));
}

template <class T, int R>
void pass(Tile<T>& tile, const Shape& shape, const float* block, long slot, long end, const Scaling& scaling) {
  F scores[R][KEYS / LANES];
  BlockWeights<T> weights;
  score<T, R>(tile.q, shape, block, scores);
  if (tile.turns && slot < tile.sinks) {
    F far[R][KEYS / LANES];
    score<T, R>(tile.far, shape, block, far);
    for (int r = 0; r < R; r++) take_sinks(scores[r], far[r], tile.sinks - slot);
  }
  cap_all(scaling.cap, R, scores);
  if (slot == 0 && tile.biased) add_bias(tile, R, scores);
  hide_all(tile, R, slot, end, scores);
  float shrink[R];
  weigh<Number<T>, R>(scores, scaling.scale, tile.top, tile.total, shrink);
  for (int r = 0; r < R; r++) {
    float* sum = tile.sum + r * shape.padded;
    for (long d = 0; shrink[r] != 1 && d < shape.padded; d += LANES) store(sum + d, load<F>(sum + d) * shrink[r]);
    weights.take(r, scores[r], block + shape.block - KEYS);
  }
  long last = tile.limit[R - 1] < end ? tile.limit[R - 1] : end;
  add_all_values<T, R>(tile, shape, weights, block + shape.key_block, last - slot);
}

// A tile of so many queries passes over a block, from slot on to `end`; or over PASS<T> of them.
template <class T, int R = TILE<T>>
void pass_over(long queries, Tile<T>& tile, const Shape& shape, const float* block, long slot, long end,
               const Scaling& scaling) {
  if (queries == R) pass<T, R>(tile, shape, block, slot, end, scaling);
  else if constexpr (R > 1) pass_over<T, R - 1>(queries, tile, shape, block, slot, end, scaling);
}

}  // namespace prompt
