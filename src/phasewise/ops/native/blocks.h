// Keys and values of a prompt's slice, packed by blocks of slots: then scores and weighted sums are both products of a
// few queries with whole registers or tiles.
#pragma once
#include <type_traits>

#include "parts.h"
#include "rows.h"
#include "simd.h"

namespace prompt {

constexpr long KEYS = 64;       // slots per block
constexpr long MOST_DIM = 256;  // of a head

// ---- words of 32 bits: two bfloat16 that are neighbours in the sum, or one float
template <class T> constexpr long PER_WORD = DOT_BFLOATS && std::is_same_v<T, bf16> ? 2 : 1;

template <class T> constexpr bool ON_TILES = MATRIX_UNIT && std::is_same_v<T, bf16>;
template <class T> constexpr long PASS = ON_TILES<T> ? 4 : 1;  // blocks that queries pass over at once

template <class T> inline float word_of(const T* p, long step, long count) {
  if constexpr (PER_WORD<T> == 1) return to_float(*p);
  uint32_t pair = (uint32_t)p[0] | (count > 1 ? (uint32_t)p[step] << 16 : 0);
  float word;
  memcpy(&word, &pair, 4);
  return word;
}

// ---- keys and values of one block of slots, packed: keys [words][KEYS], values [KEYS / PER_WORD][padded]
struct Shape {
  long words, padded;             // words per query or key; dim: both filled up to whole registers or tiles
  long key_block, block, blocks;  // words per block of keys, and of keys and values; blocks per head
};

template <class T> Shape shape_of(long dim, long n) {
  long words = (dim + PER_WORD<T> - 1) / PER_WORD<T>, whole = ON_TILES<T> ? WIDTH : LANES;
  if (ON_TILES<T>) words = words_of(dim, PER_WORD<T>);
  long padded = (dim + whole - 1) / whole * whole, keys = words * KEYS;
  return {words, padded, keys, keys + KEYS / PER_WORD<T> * padded, (n + KEYS - 1) / KEYS};
}

template <class T> void pack_words(const T* row, long dim, long step, float* to) {
  for (long d = 0; d < dim; d += PER_WORD<T>) to[d / PER_WORD<T> * step] = word_of(row + d, 1, dim - d);
}

#if DOT_INSTRUCTIONS
// to[i][j] = from[j][i] of 16 x 16 words, made of the numbers where these are shorter
template <class T> void transpose(const T* from, long row, float* to) {
  __m512i v[16];
  for (int i = 0; i < 16; i++) {
    if constexpr (sizeof(T) * PER_WORD<T> == 4) v[i] = load<__m512i>(from + i * row);
    else v[i] = (__m512i)load_floats(from + i * row);
  }
  transpose_words(v);
  for (int i = 0; i < 16; i++) store(to + i * KEYS, v[i]);
}
#endif

template <class T> void pack_keys(const T* k, long row, long count, long dim, float* to) {
  long j = 0;
#if DOT_INSTRUCTIONS
  constexpr long STEP = 16 * PER_WORD<T>;
  long whole = dim / STEP * STEP;
  for (; j + 16 <= count; j += 16, k += 16 * row) {
    for (long d = 0; d < whole; d += STEP)
      transpose(k + d, row, to + d / PER_WORD<T> * KEYS + j);
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
  long used = (call.dim + PER_WORD<T> - 1) / PER_WORD<T> * KEYS;
  if (count < KEYS) memset(to, 0, shape.block * 4);
  else memset(to + used, 0, (shape.key_block - used) * 4);
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

}  // namespace prompt
