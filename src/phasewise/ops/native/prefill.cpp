// Causal attention of many consecutive rows, the last of their sequence.
//
// Keys and values are packed once per call, so that scores and weighted sums are both products of a few queries with
// whole registers; blocks of queries then pass over them with a running softmax. Blocks of slots start at fixed slots
// and every sum has one order, so a row's result depends neither on the other rows nor on the number of threads.
#include <math.h>
#include <stdlib.h>

#include <type_traits>

#include "parts.h"
#include "rows.h"
#include "simd.h"

namespace {

constexpr int TILE = LANES == 4 ? 4 : REGISTERS == 32 ? 6 : 5;  // queries whose sums fit the registers,
constexpr int WIDE = REGISTERS == 32 ? 4 : 2;                   // with so many registers for each
constexpr long TILES = 8;                       // that pass together over a block of slots
constexpr long KEYS = 64;                       // slots per block
constexpr long MOST_DIM = 256;                  // of a head

// ---- words of 32 bits: two bfloat16 that are neighbours in the sum, or one float
template <class T> constexpr long PER_WORD = DOT_INSTRUCTIONS && std::is_same_v<T, bf16> ? 2 : 1;

template <class T> inline float word_of(const T* p, long step, long count) {
  if constexpr (PER_WORD<T> == 1) return to_float(*p);
  uint32_t pair = (uint32_t)p[0] | (count > 1 ? (uint32_t)p[step] << 16 : 0);
  float word;
  memcpy(&word, &pair, 4);
  return word;
}

template <class T> inline F add_product(F sum, F words, const float* word) {
#if DOT_INSTRUCTIONS
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

// ---- keys and values of one block of slots, packed: keys [words][KEYS], values [KEYS / PER_WORD][padded]
struct Shape {
  long words, padded;             // words per query or key; dim filled up to whole registers
  long key_block, block, blocks;  // words per block of keys, and of keys and values; blocks per head
};

template <class T> Shape shape_of(const PrefillCall& call) {
  long words = (call.dim + PER_WORD<T> - 1) / PER_WORD<T>, padded = (call.dim + LANES - 1) / LANES * LANES;
  long keys = words * KEYS;
  return {words, padded, keys, keys + KEYS / PER_WORD<T> * padded, (call.n + KEYS - 1) / KEYS};
}

template <class T> void pack_words(const T* row, long dim, long step, float* to) {
  for (long d = 0; d < dim; d += PER_WORD<T>) to[d / PER_WORD<T> * step] = word_of(row + d, 1, dim - d);
}

#if DOT_INSTRUCTIONS
// to[i][j] = from[j][i] of 16 x 16 words, in steps that swap what two registers hold `step` lanes apart
inline void transpose(const char* from, long row, float* to) {
  __m512i v[16], lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int i = 0; i < 16; i++) v[i] = load<__m512i>(from + i * row);
#pragma GCC unroll 4
  for (int step = 1; step < 16; step *= 2) {
    __m512i other = _mm512_set1_epi32(step), second = _mm512_set1_epi32(16);
    __mmask16 upper = _mm512_test_epi32_mask(lane, other);
    __m512i low = _mm512_mask_add_epi32(lane, upper, _mm512_sub_epi32(lane, other), second);
    __m512i high = _mm512_mask_add_epi32(_mm512_add_epi32(lane, other), upper, lane, second);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      if (!(i & step)) {
        __m512i a = v[i], b = v[i + step];
        v[i] = _mm512_permutex2var_epi32(a, low, b);
        v[i + step] = _mm512_permutex2var_epi32(a, high, b);
      }
  }
  for (int i = 0; i < 16; i++) store(to + i * KEYS, v[i]);
}
#endif

template <class T> void pack_keys(const T* k, long row, long count, long dim, float* to) {
  long j = 0;
#if DOT_INSTRUCTIONS
  constexpr long SIDE = 16 * PER_WORD<T>;
  long whole = dim / SIDE * SIDE;
  for (; j + 16 <= count; j += 16, k += 16 * row) {
    for (long d = 0; d < whole; d += SIDE)
      transpose((const char*)(k + d), row * sizeof(T), to + d / PER_WORD<T> * KEYS + j);
    for (long i = 0; i < 16; i++)
      pack_words(k + i * row + whole, dim - whole, KEYS, to + whole / PER_WORD<T> * KEYS + j + i);
  }
#endif
  for (; j < count; j++, k += row) pack_words(k, dim, KEYS, to + j);
}

template <class T> struct Lines {  // rows of one head, `row` numbers apart
  const T* at;
  long row;
};

// Rows as they lie from number `first` on; int8 with `scales` (else null) is widened into `wide`.
template <class T>
Lines<T> lines(const void* from, long first, long row, const bf16* scales, long count, long dim, T* wide) {
  if (!scales) return {(const T*)from + first, row};
  return {widen_rows((const int8_t*)from + first, row, scales, count, dim, wide), dim};
}

template <class T> void pack(const PrefillCall& call, const Shape& shape, long head, long slot, float* to) {
  T wide[KEYS * MOST_DIM];
  const bf16* k_scale = call.k_scale ? call.k_scale + head * call.k_scale_head + slot : nullptr;
  const bf16* v_scale = call.v_scale ? call.v_scale + head * call.v_scale_head + slot : nullptr;
  long count = call.n - slot < KEYS ? call.n - slot : KEYS;
  if (count < KEYS) memset(to, 0, shape.block * 4);
  long first = head * call.k_head + slot * call.k_row;
  Lines<T> k = lines(call.k, first, call.k_row, k_scale, count, call.dim, wide);
  pack_keys(k.at, k.row, count, call.dim, to);
  first = head * call.v_head + slot * call.v_row;
  Lines<T> v = lines(call.v, first, call.v_row, v_scale, count, call.dim, wide);
  to += shape.key_block;
  for (long j = 0; j < count; j += PER_WORD<T>, to += shape.padded) {
    const T* row = v.at + j * v.row;
    if (count - j > 1)
      for (long d = 0; d < call.dim; d++) to[d] = word_of(row + d, v.row, 2);
    else
      for (long d = 0; d < call.dim; d++) to[d] = word_of(row + d, 0, 1);
    for (long d = call.dim; d < shape.padded; d++) to[d] = 0;
  }
}

// ---- a tile of queries of one KV head
struct Tile {
  static_assert(TILE <= LANES);
  F top;             // largest score of each query, in powers of two
  F total[TILE];     // sums of weights, lane by lane
  long limit[TILE];  // how many slots each sees, in rising order
  alignas(64) float q[TILE * MOST_DIM];    // [TILE, words]
  alignas(64) float sum[TILE * MOST_DIM];  // [TILE, padded], values under weights
};

inline void store_weights(float* words, const F* weights, const bf16*) {  // KEYS of them
#if DOT_INSTRUCTIONS
  for (long i = 0; i < KEYS / LANES; i += 2)
    store(words + i / 2 * LANES, _mm512_cvtne2ps_pbh((__m512)weights[i + 1], (__m512)weights[i]));
#else
  memcpy(words, weights, KEYS * 4);
#endif
}

inline void store_weights(float* words, const F* weights, const float*) { memcpy(words, weights, KEYS * 4); }

template <class T, int R>
void score(const Tile& tile, const Shape& shape, const float* keys, float scale, F (*scores)[KEYS / LANES]) {
  for (int at = 0; at < KEYS / LANES; at += WIDE) {
    F sums[R][WIDE] = {};
    multiply<T>(tile.q, shape.words, keys + at * LANES, KEYS, shape.words, sums);
    for (int r = 0; r < R; r++)
      for (int i = 0; i < WIDE; i++) scores[r][at + i] = sums[r][i] * scale;
  }
}

inline void hide(F* scores, long visible) {
  I lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  int32_t seen = visible > 0 ? (int32_t)visible : 0;
  for (int i = 0; i < KEYS / LANES; i++, lane += LANES) scores[i] = select(lane < seen, scores[i], splat(-INFINITY));
}

// The scores become weights; -> by what to scale the sums so far.
template <class T, int R> F weigh(Tile& tile, F (*scores)[KEYS / LANES], float* words) {
  float tops[LANES];
  store(tops, tile.top);
  for (int r = 0; r < R; r++) {
    F top = scores[r][0];
    for (int i = 1; i < KEYS / LANES; i++) top = larger(top, scores[r][i]);
    float highest = largest(top);
    tops[r] = highest > tops[r] ? highest : tops[r];
  }
  F shrink = power_of_two(tile.top - load<F>(tops));
  tile.top = load<F>(tops);
  for (int r = 0; r < R; r++) {
    F weights[KEYS / LANES], total = tile.total[r] * shrink[r];
    for (int i = 0; i < KEYS / LANES; i++) total += weights[i] = power_of_two(scores[r][i] - tops[r]);
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

template <class T, int R> void pass(Tile& tile, const Shape& shape, const float* block, long slot, float scale) {
  F scores[R][KEYS / LANES];
  alignas(64) float weights[R * KEYS / PER_WORD<T>];
  score<T, R>(tile, shape, block, scale, scores);
  if (slot + KEYS > tile.limit[0])
    for (int r = 0; r < R; r++) hide(scores[r], tile.limit[r] - slot);
  F shrink = weigh<T, R>(tile, scores, weights);
  long count = tile.limit[R - 1] - slot < KEYS ? tile.limit[R - 1] - slot : KEYS;
  long words = (count + PER_WORD<T> - 1) / PER_WORD<T>, d = 0;
  const float* values = block + shape.key_block;
  for (; d + WIDE * LANES <= shape.padded; d += WIDE * LANES)
    add_values<T, R, WIDE>(tile.sum + d, shape.padded, shrink, weights, values + d, words);
  for (; d < shape.padded; d += LANES)
    add_values<T, R, 1>(tile.sum + d, shape.padded, shrink, weights, values + d, words);
}

template <class T, int R = TILE>
void pass_some(long queries, Tile& tile, const Shape& shape, const float* block, long slot, float scale) {
  if (queries == R) pass<T, R>(tile, shape, block, slot, scale);
  else if constexpr (R > 1) pass_some<T, R - 1>(queries, tile, shape, block, slot, scale);
}

// ---- jobs: the queries `first` .. of a KV head, numbered row * group + query head of the group
template <class T> struct Job {
  const PrefillCall& call;
  const Shape& shape;
  long head, first, count;
  Tile tiles[TILES];

  long group() const { return call.heads_q / call.heads; }
  long row(long query) const { return query / group(); }
  long head_q(long query) const { return head * group() + query % group(); }
  long size(long tile) const { return count - tile * TILE < TILE ? count - tile * TILE : TILE; }

  void start() {
    for (long i = 0; i < count; i++) {
      Tile& tile = tiles[i / TILE];
      long r = i % TILE, query = first + i;
      tile.top = splat(-INFINITY), tile.total[r] = F{};
      tile.limit[r] = call.n - call.rows + row(query) + 1;
      const T* q = (const T*)call.q + row(query) * call.q_row + head_q(query) * call.q_head;
      pack_words(q, call.dim, 1, tile.q + r * shape.words);
      memset(tile.sum + r * shape.padded, 0, shape.padded * 4);
    }
  }

  void read(const float* packed) {
    for (long b = 0; b < shape.blocks; b++, packed += shape.block) {
      bool any = false;
      for (long t = 0; t * TILE < count; t++) {
        if (tiles[t].limit[size(t) - 1] <= b * KEYS) continue;
        pass_some<T>(size(t), tiles[t], shape, packed, b * KEYS, (float)(call.scale * 1.4426950408889634));
        any = true;
      }
      if (!any) return;
    }
  }

  void finish() {
    for (long i = 0; i < count; i++) {
      const Tile& tile = tiles[i / TILE];
      long r = i % TILE, d = 0;
      T* out = (T*)call.out + (row(first + i) * call.heads_q + head_q(first + i)) * call.dim;
      const float* from = tile.sum + r * shape.padded;
      float scale = 1 / sum(tile.total[r]);
      for (; d + LANES <= call.dim; d += LANES) store_floats(out + d, load<F>(from + d) * scale);
      for (; d < call.dim; d++) put(out + d, from[d] * scale);
    }
  }
};

// How a KV head's queries are cut into jobs.
struct Cut {
  long queries, size, jobs;

  Cut(const PrefillCall& call, int threads) : queries(call.rows * (call.heads_q / call.heads)) {
    long tiles = queries * call.heads / (TILE * threads * 4) + 1;  // of a job: enough jobs for all
    size = (tiles < TILES ? tiles : TILES) * TILE;
    jobs = (queries + size - 1) / size;
  }
};

template <class T> void pack_all(const PrefillCall& call, float* packed, Shares& packs) {
  Shape shape = shape_of<T>(call);
  for (long from, to; packs.take(from, to);)
    for (long i = from; i < to; i++)
      pack<T>(call, shape, i / shape.blocks, i % shape.blocks * KEYS, packed + i * shape.block);
}

template <class T> void read_all(const PrefillCall& call, const float* packed, Shares& reads, int all) {
  Shape shape = shape_of<T>(call);
  Cut cut(call, all);
  for (long from, to; reads.take(from, to);)
    for (long i = from; i < to; i++) {
      long head = i % call.heads, first = (cut.jobs - 1 - i / call.heads) * cut.size;  // the longest first
      long left = cut.queries - first;
      Job<T> job{call, shape, head, first, left < cut.size ? left : cut.size, {}};
      job.start();
      job.read(packed + head * shape.blocks * shape.block);
      job.finish();
    }
}

Shape shape_for(const PrefillCall& call) { return call.kind == FLOAT ? shape_of<float>(call) : shape_of<bf16>(call); }

}  // namespace

long prefill_room(const PrefillCall& call) {
  Shape shape = shape_for(call);
  return call.heads * shape.blocks * shape.block * 4;
}

Shares prefill_packs(const PrefillCall& call, int threads) { return {call.heads * shape_for(call).blocks, threads}; }

Shares prefill_reads(const PrefillCall& call, int threads) { return {Cut(call, threads).jobs * call.heads, threads}; }

void prefill_pack(const PrefillCall& call, void* packed, Shares* packs) {
  if (call.kind == FLOAT) pack_all<float>(call, (float*)packed, *packs);
  else pack_all<bf16>(call, (float*)packed, *packs);
}

void prefill_read(const PrefillCall& call, const void* packed, Shares* reads, int all) {
  if (call.kind == FLOAT) read_all<float>(call, (const float*)packed, *reads, all);
  else read_all<bf16>(call, (const float*)packed, *reads, all);
}

API void prefill(const PrefillCall* call) {
  int threads = enough(call->threads, call->n * call->rows * call->heads_q * call->dim);
  void* packed = scratch(OF_ATTENTION, prefill_room(*call));
  Shares packs = prefill_packs(*call, threads), reads = prefill_reads(*call, threads);
  together(threads, [&](int, int all) {
    prefill_pack(*call, packed, &packs);
    wait_for_all(all);
    prefill_read(*call, packed, &reads, all);
  });
}
