// The small operations on rows, in float32 between bfloat16.
#pragma once
#include <math.h>

#include "simd.h"

// 1 / root mean square
inline float root_mean_inverse(const bf16* x, float eps, long n) {
  F squares = {};
  long i = 0;
  for (; i + LANES <= n; i += LANES) {
    F v = load_floats(x + i);
    squares += v * v;
  }
  float total = sum(squares);
  for (; i < n; i++) total += widen(x[i]) * widen(x[i]);
  return 1 / sqrtf(total / n + eps);
}

// x / root mean square * weight
inline void normalise(const bf16* x, const float* weight, float eps, long n, bf16* y) {
  float scale = root_mean_inverse(x, eps, n);
  long i = 0;
  for (; i + LANES <= n; i += LANES) store_floats(y + i, load_floats(x + i) * scale * load<F>(weight + i));
  for (; i < n; i++) y[i] = narrow(widen(x[i]) * scale * weight[i]);
}

// x += y / root mean square of y * weight, rounded once
inline void add_normalised(const bf16* y, const float* weight, float eps, long n, bf16* x) {
  float scale = root_mean_inverse(y, eps, n);
  long i = 0;
  for (; i + LANES <= n; i += LANES)
    store_floats(x + i, load_floats(x + i) + load_floats(y + i) * scale * load<F>(weight + i));
  for (; i < n; i++) x[i] = narrow(widen(x[i]) + widen(y[i]) * scale * weight[i]);
}

// The first `size` numbers of a head turned by its row's position, in place: x cos + (x, halves swapped) sin.
inline void turn(bf16* x, const bf16* cos, const bf16* sin, long size) {
  long half = size / 2, i = 0;
  for (; i + LANES <= half; i += LANES) {
    F a = load_floats(x + i), b = load_floats(x + half + i);
    store_floats(x + i, a * load_floats(cos + i) + b * load_floats(sin + i));
    store_floats(x + half + i, b * load_floats(cos + half + i) + a * load_floats(sin + half + i));
  }
  for (; i < half; i++) {
    float a = widen(x[i]), b = widen(x[half + i]);
    x[i] = narrow(a * widen(cos[i]) + b * widen(sin[i]));
    x[half + i] = narrow(b * widen(cos[half + i]) + a * widen(sin[half + i]));
  }
}

// A row as levels of its largest magnitude / 127, which is returned, rounded before it is used.
inline bf16 round_to_bytes(const bf16* x, long n, int8_t* levels) {
  float top = 0;  // NaN if one is
  for (long i = 0; i < n; i++) {
    float size = fabsf(widen(x[i]));
    top = size > top || size != size ? size : top;
  }
  bf16 scale = narrow(top / 127 < 1e-30f ? 1e-30f : top / 127);
  for (long i = 0; i < n; i++) levels[i] = (int8_t)fminf(fmaxf(rintf(widen(x[i]) / widen(scale)), -127), 127);
  return scale;
}

// A row of such levels as the numbers they stand for; `whole` registers' worth of it, if known beforehand, else 0.
template <int WHOLE> inline void widen_row(const int8_t* levels, float scale, long dim, float* to) {
  long d = 0, registers = WHOLE ? WHOLE * LANES : dim / LANES * LANES;
  for (; d < registers; d += LANES) store(to + d, load_floats(levels + d) * scale);
  for (; d < dim; d++) to[d] = levels[d] * scale;
}
template <int WHOLE> inline void widen_row(const int8_t* levels, float scale, long dim, bf16* to) {
  long d = 0, registers = WHOLE ? WHOLE * LANES : dim / LANES * LANES;
#if DOT_INSTRUCTIONS
  for (; d + 2 * LANES <= registers; d += 2 * LANES) {
    F low = load_floats(levels + d) * scale, high = load_floats(levels + d + LANES) * scale;
    store(to + d, _mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
  }
#endif
  for (; d < registers; d += LANES) store_floats(to + d, load_floats(levels + d) * scale);
  for (; d < dim; d++) put(to + d, levels[d] * scale);
}

template <int WHOLE, class T>
inline void widen_each(const int8_t* levels, long row, const bf16* scales, long count, long dim, T* to) {
  for (long j = 0; j < count; j++) widen_row<WHOLE>(levels + j * row, widen(scales[j]), dim, to + j * dim);
}

// Rows of such levels as the numbers they stand for -> to [count, dim].
template <class T>
inline const T* widen_rows(const int8_t* levels, long row, const bf16* scales, long count, long dim, T* to) {
  if (dim == 64) widen_each<64 / LANES>(levels, row, scales, count, dim, to);
  else if (dim == 128) widen_each<128 / LANES>(levels, row, scales, count, dim, to);
  else widen_each<0>(levels, row, scales, count, dim, to);
  return to;
}
