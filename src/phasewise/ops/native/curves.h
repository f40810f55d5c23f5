// What layers bend their numbers with: activations of gated MLPs, and the cap of scores and logits.
#pragma once
#include <type_traits>

#include "kernels.h"
#include "simd.h"

inline F magnitude(F x) { return (F)((I)x & 0x7fffffff); }

// tanh x; relative error below 1e-6
inline F tanh_of(F x) {
  F e = exp_negative(magnitude(x) * -2.0f), far = (1.0f - e) / (1.0f + e), square = x * x;
  F p = splat(62 / 2835.0f);  // its series, where far would lose digits
  p = p * square - 17 / 315.0f;
  p = p * square + 2 / 15.0f;
  p = p * square - 1 / 3.0f;
  F signed_far = (F)((I)far | ((I)x & INT32_MIN));
  return select(magnitude(x) < 0.3f, x + x * square * p, signed_far);
}

// Scores are multiplied by `scale` after this: what then comes out is cap tanh(score scale / cap).
struct Softcap {
  float in = 0, out = 0;
  Softcap(double cap, double scale) : in(cap ? (float)(scale / cap) : 0), out(cap ? (float)(cap / scale) : 0) {}
  explicit operator bool() const { return in != 0; }
  F operator()(F score) const { return tanh_of(score * in) * out; }
};

// 1 / (1 + e^-x)
inline F sigmoid(F x) {
  F e = exp_negative(-magnitude(x));  // which cannot overflow
  return select(x < 0.0f, e, splat(1.0f)) / (e + 1.0f);
}

// The complement of the error function for x >= 0; relative error below 2e-5 where it is a normal number
inline F erfc_of(F x) {
  F t = 1.0f / (x * 0.5f + 1.0f), p = splat(-1.872055629e-1f);  // log(erfc(x) / t) + x^2 is smooth in t
  p = p * t + 7.487631007e-1f;
  p = p * t - 9.954087183e-1f;
  p = p * t + 3.438050832e-1f;
  p = p * t - 3.592534121e-2f;
  p = p * t + 3.926379773e-1f;
  p = p * t + 9.988271062e-1f;
  p = p * t - 1.265494360f;
  return t * exp_negative(p - x * x);
}

inline F silu(F x) { return x * sigmoid(x); }
inline F relu(F x) { return max(F{}, x); }  // NaN stays NaN
inline F gelu(F x) {
  F tail = erfc_of(magnitude(x) * 0.70710678f) * 0.5f;
  return x * select(x < 0.0f, tail, 1.0f - tail);
}
inline F gelu_tanh(F x) {  // (1 + tanh y) / 2 is the sigmoid of 2 y
  return x * sigmoid((x * x * x * 0.044715f + x) * 1.595769122f);
}

template <class Activation> struct Times {  // activation(gate) * up
  const Activation& activation;
  F operator()(F gate, F up) const { return activation(gate) * up; }
};

struct Clamped {  // as CLAMPED says; NaN stays NaN
  float alpha, limit;
  F operator()(F gate, F up) const {
    gate = select(gate > limit, splat(limit), gate);
    up = select(up > limit, splat(limit), select(up < -limit, splat(-limit), up));
    return (up + 1.0f) * (gate * sigmoid(gate * alpha));
  }
};

// y = how(gate, up); a number does not depend on where it stands
template <class How> inline void gate(const bf16* gate, const bf16* up, long n, bf16* y, const How& how) {
  long i = 0;
  for (; i + LANES <= n; i += LANES) store_floats(y + i, how(load_floats(gate + i), load_floats(up + i)));
  if (i == n) return;
  bf16 rest[3][LANES] = {};
  memcpy(rest[0], gate + i, (n - i) * 2);
  memcpy(rest[1], up + i, (n - i) * 2);
  store_floats(rest[2], how(load_floats(rest[0]), load_floats(rest[1])));
  memcpy(y + i, rest[2], (n - i) * 2);
}

// The same for rows of `both`, gates and then ups, [rows, 2 inner]: every thread takes some columns of all.
template <class How>
inline void gate_rows(const bf16* both, long rows, long inner, bf16* y, int thread, int all, const How& how) {
  long slice = (inner / all + LANES) / LANES * LANES, from = thread * slice;
  long count = inner - from < slice ? inner - from : slice;
  for (long r = 0; r < rows && count > 0; r++)
    gate(both + r * 2 * inner + from, both + r * 2 * inner + inner + from, count, y + r * inner + from, how);
}

inline void gate_rows(const Gate& how, const bf16* both, long rows, long inner, bf16* y, int thread, int all) {
  auto by = [&](const auto& activation) {
    gate_rows(both, rows, inner, y, thread, all, Times<std::decay_t<decltype(activation)>>{activation});
  };
  if (how.activation == SILU) by([](F x) { return silu(x); });
  else if (how.activation == GELU_TANH) by([](F x) { return gelu_tanh(x); });
  else if (how.activation == GELU) by([](F x) { return gelu(x); });
  else if (how.activation == RELU) by([](F x) { return relu(x); });
  else gate_rows(both, rows, inner, y, thread, all, Clamped{(float)how.alpha, (float)how.limit});
}
