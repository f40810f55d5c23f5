// Keys and values of a prompt's slice, packed by blocks of slots: then scores and weighted sums are both products of a
// few queries with whole registers or tiles.
#pragma once
#include <type_traits>

#include "levels.h"
#include "parts.h"
#include "rows.h"
#include "softmax.h"
#include "turned.h"

namespace prompt {

template <class T> constexpr bool ON_TILES = MATRIX_UNIT && std::is_same_v<T, bf16>;
template <class T> constexpr long PASS = ON_TILES<T> ? 4 : 1;  // blocks that queries pass over at once

// ---- words of 32 bits: four levels or two bfloat16 that are neighbours in the sum, or one float
// T is what keys and values are packed as: float, bf16, or int8_t where levels are read as they are. Queries of these are
// bfloat16.
template <class T> constexpr bool OF_LEVELS = std::is_same_v<T, int8_t>;
template <class T> using Number = std::conditional_t<OF_LEVELS<T>, bf16, T>;
template <class T> constexpr long PER_WORD = OF_LEVELS<T> ? 4 : DOT_BFLOATS && std::is_same_v<T, bf16> ? 2 : 1;

template <class T> inline float word_of(const T* p, long step, long count) {
  if constexpr (PER_WORD<T> == 1) return to_float(*p);
  uint32_t pair = (uint32_t)p[0] | (count > 1 ? (uint32_t)p[step] << 16 : 0);
  float word;
  memcpy(&word, &pair, 4);
  return word;
}

// ---- keys and values of one block of slots, packed: keys [words][KEYS], values [KEYS / PER_WORD][padded]; behind each
// of the two, [KEYS], what a level of a slot is worth, if they are levels
struct Shape {
  long dim, words, padded;        // words per query or key; dim: both filled up to whole registers or tiles
  long key_block, block, blocks;  // words per block of keys, and of keys and values; blocks per head
};

template <class T> Shape shape_of(long dim, long n) {
  long words = (dim + PER_WORD<T> - 1) / PER_WORD<T>, whole = ON_TILES<T> ? WIDTH : LANES;
  if (ON_TILES<T>) words = words_of(dim, PER_WORD<T>);
  long padded = (dim + whole - 1) / whole * whole;
  long worth = OF_LEVELS<T> ? KEYS : 0, keys = words * KEYS + worth;
  return {dim, words, padded, keys, keys + KEYS / PER_WORD<T> * padded + worth, (n + KEYS - 1) / KEYS};
}

// Whether a score is summed lane by lane, as softmax.h has it. Float32 is summed word by word, which is faster.
template <class T> constexpr bool BY_LANES = std::is_same_v<T, bf16> && !TURNED<T> && !ON_TILES<T>;

// Where word w of a key or query lies: those of a lane follow one another.
template <class T> inline long place_of(long w, long dim) {
  long rounds = dim / PER_STEP<T>;
  return BY_LANES<T> && w < rounds * LANES ? w % LANES * rounds + w / LANES : w;
}

template <class T> void pack_words(const T* row, long dim, long step, float* to) {
  for (long d = 0; d < dim; d += PER_WORD<T>)
    to[place_of<T>(d / PER_WORD<T>, dim) * step] = word_of(row + d, 1, dim - d);
}

#if DOT_INSTRUCTIONS
// to[i][j] = from[j][i] of 16 x 16 words, made of the numbers where these are shorter; rows of `to` are `step` apart
template <class T> void transpose(const T* from, long row, float* to, long step) {
  __m512i v[16];
  for (int i = 0; i < 16; i++) {
    if constexpr (sizeof(T) * PER_WORD<T> == 4) v[i] = load<__m512i>(from + i * row);
    else v[i] = (__m512i)load_floats(from + i * row);
  }
  transpose_words(v);
  for (int i = 0; i < 16; i++) store(to + i * step, v[i]);
}
#endif

template <class T> void pack_keys(const T* k, long row, long count, long dim, float* to) {
  long j = 0;
#if DOT_INSTRUCTIONS
  constexpr long STEP = 16 * PER_WORD<T>;
  long whole = dim / STEP * STEP;
  for (; j + 16 <= count; j += 16, k += 16 * row) {
    for (long d = 0; d < whole; d += STEP)
      transpose(k + d, row, to + place_of<T>(d / PER_WORD<T>, dim) * KEYS + j, BY_LANES<T> ? dim / STEP * KEYS : KEYS);
    for (long i = 0; i < 16; i++)
      for (long d = whole; d < dim; d += PER_WORD<T>)
        to[d / PER_WORD<T> * KEYS + j + i] = word_of(k + i * row + d, 1, dim - d);
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

// A head's rows of keys and of values, each from the same slot on, and what a level of theirs is worth, or null.
struct Side {
  const void* rows;
  long row;  // elements from one to the next
  const bf16* worth;
};

// The values of `count` slots, [KEYS / PER_WORD][padded].
template <class T> void pack_values(const T* v, long row, long count, const Shape& shape, float* to) {
  for (long j = 0; j < count; j += PER_WORD<T>, to += shape.padded) {
    const T* first = v + j * row;
    if (count - j > 1)
      for (long d = 0; d < shape.dim; d++) to[d] = word_of(first + d, row, 2);
    else
      for (long d = 0; d < shape.dim; d++) to[d] = word_of(first + d, 0, 1);
    for (long d = shape.dim; d < shape.padded; d++) to[d] = 0;
  }
}

// A block of `count` slots.
template <class T> void pack(const Side& keys, const Side& values, long count, const Shape& shape, float* to) {
  T wide[KEYS * MOST_DIM];
  long used = (shape.dim + PER_WORD<T> - 1) / PER_WORD<T> * KEYS;
  if (count < KEYS) memset(to, 0, shape.block * 4);
  else memset(to + used, 0, (shape.key_block - used) * 4);
  Lines<T> k = lines(keys.rows, 0, keys.row, keys.worth, count, shape.dim, wide);
  pack_keys(k.at, k.row, count, shape.dim, to);
  Lines<T> v = lines(values.rows, 0, values.row, values.worth, count, shape.dim, wide);
  pack_values(v.at, v.row, count, shape, to + shape.key_block);
}

#if DOT_INSTRUCTIONS
// A block of levels. Those of keys lie 128 above what they are: products of bytes need one side without a sign.
template <>
inline void pack<int8_t>(const Side& keys, const Side& values, long count, const Shape& shape, float* to) {
  if (count < KEYS) memset(to, 0, shape.block * 4);
  auto row = [&](const Side& side, long j) { return (const int8_t*)side.rows + (j < count ? j : count - 1) * side.row; };
  for (long j = 0; j < count; j += LANES)  // the last one stands in for those that there are not, which nobody sees
    for (long d = 0; d < shape.dim; d += LEVELS) {
      bool whole = d + LEVELS <= shape.dim;
      __m512i v[LANES];
      for (long i = 0; i < LANES; i++) v[i] = load_levels(row(keys, j + i) + d, whole);
      transpose_words(v);
      for (long i = 0; i < (whole ? LANES : LANES / 2); i++)
        store(to + (d / 4 + i) * KEYS + j, _mm512_xor_si512(v[i], _mm512_set1_epi8((char)128)));
    }
  float* values_to = to + shape.key_block;
  for (long j = 0; j < count; j += 4, values_to += shape.padded)
    for (long d = 0; d < shape.dim; d += 16) {
      __m128i v[4];
      for (long i = 0; i < 4; i++) v[i] = load<__m128i>(row(values, j + i) + d);
      __m128i a = _mm_unpacklo_epi8(v[0], v[1]), b = _mm_unpacklo_epi8(v[2], v[3]);
      __m128i c = _mm_unpackhi_epi8(v[0], v[1]), e = _mm_unpackhi_epi8(v[2], v[3]);
      store(values_to + d, _mm_unpacklo_epi16(a, b)), store(values_to + d + 4, _mm_unpackhi_epi16(a, b));
      store(values_to + d + 8, _mm_unpacklo_epi16(c, e)), store(values_to + d + 12, _mm_unpackhi_epi16(c, e));
    }
  for (long j = 0; j < KEYS; j += LANES) {
    store(to + shape.key_block - KEYS + j, load_worth(keys.worth + j, count - j));
    store(to + shape.block - KEYS + j, load_worth(values.worth + j, count - j));
  }
}
#endif

}  // namespace prompt
