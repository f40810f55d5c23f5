// One register of LANES floats, mostly in the compiler's vector extensions: one source for AVX-512, AVX2 and NEON.
// Each target is a shared library of its own with hidden symbols, so code for different targets never meets.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__aarch64__)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define DOT_INSTRUCTIONS 1  // products of bfloat16 and of bytes are single instructions
#define LANES 16
#elif defined(__aarch64__)
#define DOT_INSTRUCTIONS 0
#define LANES 4
#else
#define DOT_INSTRUCTIONS 0
#define LANES 8
#endif

// Intel's AVX-512 multiplies bfloat16 at half the pace of float32 (163 to 313 GFLOPS of two cores): kernels for it widen
// weights once for all rows of a tile instead. Others keep these instructions.
#if DOT_INSTRUCTIONS && !defined(WIDENED)
#define DOT_BFLOATS 1
#else
#define DOT_BFLOATS 0
#endif

constexpr int REGISTERS = LANES == 8 ? 16 : 32;  // that a loop may fill

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define MATRIX_UNIT 1
constexpr long SIDE = 16;  // rows, outputs and words of its tiles
#else
#define MATRIX_UNIT 0
constexpr long SIDE = 1;
#endif

typedef uint16_t bf16;  // the upper half of a float
typedef float F __attribute__((vector_size(LANES * 4)));
typedef int32_t I __attribute__((vector_size(LANES * 4)));
typedef uint16_t Half __attribute__((vector_size(LANES * 2)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

template <class V> inline V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class V> inline void store(void* p, V v) { memcpy(p, &v, sizeof v); }

inline F splat(float x) { return x - F{}; }
inline I splat(int32_t x) { return x - I{}; }

// What is computed stands in a register here: else GCC moves sums past each other until registers are short.
inline void pin(F& x) {
#if LANES == 4
  asm volatile("" : "+w"(x));
#else
  asm volatile("" : "+v"(x));
#endif
}

inline F select(I where, F yes, F no) { return where ? yes : no; }

// a b + c, rounded once whatever stands around it: the compiler may or may not do so by itself.
inline F fused(F a, F b, F c) {
#if LANES == 16
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}

// max(a, b): b if one is NaN
#if LANES == 16
inline F max(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
inline bool any(I v) { return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0; }
inline int32_t sum(I v) { return _mm512_reduce_add_epi32((__m512i)v); }
inline int32_t most(I v) { return _mm512_reduce_max_epi32((__m512i)v); }
inline float sum(F v) { return _mm512_reduce_add_ps((__m512)v); }
inline float most(F v) { return _mm512_reduce_max_ps((__m512)v); }
#elif LANES == 4
inline F max(F a, F b) { return select(a > b, a, b); }
inline bool any(I v) { return vmaxvq_u32((uint32x4_t)v) != 0; }
inline int32_t sum(I v) { return vaddvq_s32((int32x4_t)v); }
inline int32_t most(I v) { return vmaxvq_s32((int32x4_t)v); }
inline float sum(F v) { return vaddvq_f32((float32x4_t)v); }
inline float most(F v) { return vmaxnmvq_f32((float32x4_t)v); }
#else
inline F max(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }
inline bool any(I v) { return !_mm256_testz_si256((__m256i)v, (__m256i)v); }
template <class Fold> inline int32_t fold(I v, const Fold& two) {  // of all lanes, by twos
  __m128i m = two(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  m = two(m, _mm_shuffle_epi32(m, 0x4e));
  return _mm_cvtsi128_si32(two(m, _mm_shuffle_epi32(m, 0xb1)));
}
inline int32_t sum(I v) {
  return fold(v, [](__m128i a, __m128i b) { return _mm_add_epi32(a, b); });
}
inline int32_t most(I v) {
  return fold(v, [](__m128i a, __m128i b) { return _mm_max_epi32(a, b); });
}
inline float sum(F v) {
  float s = 0;
  for (int i = 0; i < LANES; i++) s += v[i];
  return s;
}
inline float most(F v) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
#endif

// ---- bfloat16
inline float widen(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline bf16 narrow(float f) {  // to nearest even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &f, 4);
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (bf16)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

#if LANES == 4  // GCC converts half a register's numbers one by one
inline I widen(int8x8_t v) { return (I)vmovl_s16(vget_low_s16(vmovl_s8(v))); }
inline I widen(uint16x4_t v) { return (I)vmovl_u16(v); }
inline F load_floats(const int8_t* p) { return __builtin_convertvector(widen(vcreate_s8(load<uint32_t>(p))), F); }
inline F load_floats(const bf16* p) { return (F)(widen(load<uint16x4_t>(p)) << 16); }
inline void store_bytes(uint8_t* p, I v) {
  uint16x4_t half = vmovn_u32((uint32x4_t)v);
  store(p, vget_lane_u32((uint32x2_t)vmovn_u16(vcombine_u16(half, half)), 0));
}
#else
// What GCC 12 makes of `__builtin_convertvector` here widens bytes one by one, and registers half by half.
#if LANES == 16
inline I load_wide(const int8_t* p) { return (I)_mm512_cvtepi8_epi32(load<__m128i>(p)); }
inline I load_wide(const bf16* p) { return (I)_mm512_cvtepu16_epi32(load<__m256i>(p)); }
#else
inline I load_wide(const int8_t* p) { return (I)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load<int64_t>(p))); }
inline I load_wide(const bf16* p) { return (I)_mm256_cvtepu16_epi32(load<__m128i>(p)); }
#endif
inline F load_floats(const int8_t* p) { return __builtin_convertvector(load_wide(p), F); }
inline F load_floats(const bf16* p) { return (F)(load_wide(p) << 16); }
inline void store_bytes(uint8_t* p, I v) { store(p, __builtin_convertvector(v, Bytes)); }
#endif
inline F load_floats(const float* p) { return load<F>(p); }

// ---- float16
inline I load_halves(const uint16_t* p) {
#if LANES == 4
  return widen(load<uint16x4_t>(p));
#else
  return load_wide((const bf16*)p);
#endif
}

// The float16 in the lower half of every lane; the upper half is nought.
inline F from_halves(I halves) {
#if LANES == 16
  return (F)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)halves));
#else
  I size = (halves & 0x7fff) << 13;
  F finite = (F)size * 5.192296858534828e33f;  // 2^112, the difference of the exponents' zeros
  I bits = size >= 0x0f800000 ? size | 0x7f800000 : (I)finite;
  return (F)(bits | (halves & 0x8000) << 16);
#endif
}

#if DOT_INSTRUCTIONS
// v[i][j] becomes v[j][i], word by word, in steps that swap what two registers hold `step` lanes apart. Of 8 registers
// either half is turned by itself.
template <int N> inline void transpose_words(__m512i (&v)[N]) {
  __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
  for (int step = 1; step < N; step *= 2) {
    __m512i other = _mm512_set1_epi32(step), second = _mm512_set1_epi32(16);
    __mmask16 upper = _mm512_test_epi32_mask(lane, other);
    __m512i low = _mm512_mask_add_epi32(lane, upper, _mm512_sub_epi32(lane, other), second);
    __m512i high = _mm512_mask_add_epi32(_mm512_add_epi32(lane, other), upper, lane, second);
#pragma GCC unroll 16
    for (int i = 0; i < N; i++)
      if (!(i & step)) {
        __m512i a = v[i], b = v[i + step];
        v[i] = _mm512_permutex2var_epi32(a, low, b);
        v[i + step] = _mm512_permutex2var_epi32(a, high, b);
      }
  }
}
#endif

inline void store_floats(float* p, F v) { store(p, v); }
inline void store_floats(bf16* p, F v) {
#if DOT_INSTRUCTIONS
  store(p, _mm512_cvtneps_pbh((__m512)v));  // what is below the smallest normal number becomes 0
#else
  I bits = (I)v;
  I rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  I nan = v != v;
  store(p, __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), Half));
#endif
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return widen(x); }
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) { *p = narrow(x); }

// ---- acc[lane] += sum over i < 4 of w[4 lane + i] (signed bytes) x[4 lane + i] (bytes, signed with NEON)
inline I dot(I acc, I w, I x) {
#if DOT_INSTRUCTIONS
  return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)x, (__m512i)w);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (I)vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)x);
#elif LANES == 4
  int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)w), vget_low_s8((int8x16_t)x));
  int16x8_t high = vmull_high_s8((int8x16_t)w, (int8x16_t)x);  // bytes are within 127: two products fit 16 bits
  return (I)vpadalq_s16((int32x4_t)acc, vpaddq_s16(low, high));
#else
  __m256i even = _mm256_madd_epi16(_mm256_srai_epi16(_mm256_slli_epi16((__m256i)w, 8), 8),
                                   _mm256_and_si256((__m256i)x, _mm256_set1_epi16(255)));
  __m256i odd = _mm256_madd_epi16(_mm256_srai_epi16((__m256i)w, 8), _mm256_srli_epi16((__m256i)x, 8));
  return acc + (I)even + (I)odd;
#endif
}

constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, left in the low bits

template <long N, class Step> inline void each(const Step& step) {
#pragma GCC unroll 16
  for (long i = 0; i < N; i++) step(i);
}

// ---- e^x for x <= 0, and a little above (also -inf, and NaN to NaN); relative error below 3e-7
// Of N registers, step by step for all of them, so that none waits for another.
template <long N> __attribute__((always_inline)) inline void exp_negative(F (&x)[N]) {
  F shifted[N], r[N], p[N];
  each<N>([&](long i) { shifted[i] = x[i] * 1.44269504f + MAGIC; });
  each<N>([&](long i) { p[i] = shifted[i] - MAGIC; });
  each<N>([&](long i) { r[i] = x[i] - p[i] * 0.693359375f; });
  each<N>([&](long i) { r[i] += p[i] * 2.12194440e-4f; });
  each<N>([&](long i) { p[i] = r[i] * 8.3124740049e-3f + 4.1890583932e-2f; });  // off by 1.1e-7 at most
  each<N>([&](long i) { p[i] = p[i] * r[i] + 1.6667117178e-1f; });
  each<N>([&](long i) { p[i] = p[i] * r[i] + 4.9999228120e-1f; });
  each<N>([&](long i) { p[i] = p[i] * r[i] * r[i] + r[i]; });
  each<N>([&](long i) {
    F power = (F)(((I)shifted[i] << 23) + (I)splat(1.0f));
    x[i] = select(x[i] < -87.0f, F{}, (p[i] + 1.0f) * power);
  });
}

inline F exp_negative(F x) {
  F one[1] = {x};
  exp_negative(one);
  return one[0];
}

// log x of normal numbers above 0; relative error below 3e-7
inline F log_of(F x) {
  I bits = (I)x, power = (bits - 0x3f3504f3) >> 23;  // x = 2^power m, m from the root of 1/2 to that of 2
  F e = __builtin_convertvector(power, F), f = (F)(bits - (power << 23)) - 1.0f, square = f * f;
  F p = splat(7.0376836292e-2f);
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  F small = p * f * square + e * -2.12194440e-4f - square * 0.5f;
  return f + small + e * 0.693359375f;
}
