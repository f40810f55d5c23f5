// Gumbel noise from counters: Philox 4x32, ten rounds (Salmon et al., 2011), LANES counters at once.
#pragma once
#include "simd.h"

typedef uint32_t U __attribute__((vector_size(LANES * 4)));

// v * by, of 64 bits each: the low words, and the high ones
inline U multiply_words(U v, uint32_t by, U& high) {
#if LANES == 16
  __m512i x = (__m512i)v, m = _mm512_set1_epi32((int)by);
  __m512i even = _mm512_mul_epu32(x, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), m);
  high = (U)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
  return (U)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
#elif LANES == 8
  __m256i x = (__m256i)v, m = _mm256_set1_epi32((int)by);
  __m256i even = _mm256_mul_epu32(x, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), m);
  high = (U)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  return (U)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
#else
  uint32x4_t x = (uint32x4_t)v, m = vdupq_n_u32(by);
  uint32x4_t first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(x), vget_low_u32(m)));
  uint32x4_t second = vreinterpretq_u32_u64(vmull_high_u32(x, m));
  high = (U)vuzp2q_u32(first, second);
  return (U)vuzp1q_u32(first, second);
#endif
}

// Of N sets of counters: a round waits for the one before it, so sets go through it side by side.
template <int N> inline void philox(U (&words)[N][4], uint32_t left, uint32_t right) {
  for (int round = 0; round < 10; round++, left += 0x9e3779b9, right += 0xbb67ae85)
#pragma GCC unroll 4
    for (U(&w)[4] : words) {
      U p, q, low_p = multiply_words(w[0], 0xd2511f53, p), low_q = multiply_words(w[2], 0xcd9e8d57, q);
      w[0] = q ^ w[1] ^ left, w[1] = low_q, w[2] = p ^ w[3] ^ right, w[3] = low_p;
    }
}

// A draw of Gumbel(0, 1) from 23 bits of a word.
inline F gumbel_of(U word) {
  F uniform = (__builtin_convertvector((I)(word >> 9), F) + 0.5f) * 0x1p-23f;  // never 0 or 1
  return -log_of(-log_of(uniform));
}
