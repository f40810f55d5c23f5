// Linear layers of int8 weights (one scale per output), packed so that one register holds four inputs of LANES outputs.
//
// Inputs are quantised row by row to 255 levels and stored as bytes, ZERO standing for zero: 128 where the instructions
// take unsigned ones. What the offset adds to a sum, ZERO times the sum of the weights, is taken off at the end.
// Products are exact.
#include <math.h>

#include "parts.h"
#include "tile.h"

struct Int8 {
  typedef I Sum;
  typedef int32_t Word;

#if MATRIX_UNIT
  template <int C, int A, int B> static void add() { add_bytes<C, A, B>(); }
#else

  template <int R, int W> static void step(I (&acc)[R][W], const int32_t* weights, const Word* x, long stride) {
    I w[W];
    for (int j = 0; j < W; j++) w[j] = load<I>(weights + j * LANES);
    for (int r = 0; r < R; r++) {
      I in = splat(x[r * stride]);
      for (int j = 0; j < W; j++) acc[r][j] = dot(acc[r][j], w[j], in);
    }
  }
#endif
};

// The largest magnitude of a row, NaN if it holds an infinity or NaN.
template <class T> static float largest(const T* x, long count) {
  F top = {}, spoiled = {};
  long k = 0;
  for (; k + LANES <= count; k += LANES) {
    F v = load_floats(x + k);
    top = max(max(v, -v), top);
    spoiled += v * 0.0f;
  }
  float m = most(top), bad = sum(spoiled);
  for (; k < count; k++) {
    float v = to_float(x[k]);
    m = fabsf(v) > m ? fabsf(v) : m;
    bad += v * 0.0f;
  }
  return m + bad;
}

// x * inverse to the nearest integers; they fit a byte.
template <class T> static void round_row(const T* x, long count, float inverse, int offset, uint8_t* out) {
  long k = 0;
  for (; k + LANES <= count; k += LANES) {
    I rounded = (I)(load_floats(x + k) * inverse + MAGIC) + offset;
    store_bytes(out + k, rounded);
  }
  for (; k < count; k++) {
    float shifted = to_float(x[k]) * inverse + MAGIC;
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    out[k] = (uint8_t)(bits + offset);
  }
}

// One row to bytes; returns what one step is worth: NaN for a row with an infinity or NaN, which then spoils its own
// outputs and no others.
template <class T> static float quantise(const T* x, long inputs, long words, int offset, uint8_t* out) {
  float top = largest(x, inputs);
  round_row(x, inputs, top > 0 ? 127 / top : 0, offset, out);
  memset(out + inputs, offset, words * 4 - inputs);
  return top / 127;
}

// weight [outputs, inputs] -> packed, scale and sums of `w`
API void linear8_pack(const Rows* weight, const Weights* w, int64_t threads) {
  long words = words_of(w->inputs, 4);
  uint8_t* rounded = (uint8_t*)scratch(OF_LINEAR, threads * words * 4);
  together(threads, [&](int thread, int all) {
    uint8_t* row = rounded + thread * words * 4;
    for (long o = thread; o < w->outputs; o += all) {
      float* scale = (float*)w->scale + o;
      long at = o * weight->stride;
      *scale = weight->kind == FLOAT ? quantise((const float*)weight->data + at, w->inputs, words, 0, row)
                                     : quantise((const bf16*)weight->data + at, w->inputs, words, 0, row);
      int32_t* panel = (int32_t*)w->packed + o / WIDTH * words * WIDTH;
      for (long k = 0; k < words; k++) panel[word_at(k, o % WIDTH)] = load<int32_t>(row + k * 4);
      int32_t sum = 0;
      for (long k = 0; k < w->inputs; k++) sum += (int8_t)row[k];
      ((int32_t*)w->sums)[o] = sum;
    }
  });
}

template <class T> static void widen_column(const Weights& w, long which, T* out) {
  const int8_t* panel = (const int8_t*)w.packed + which / WIDTH * words_of(w.inputs, 4) * WIDTH * 4;
  for (long k = 0; k < w.inputs; k++) put(out + k, panel[word_at(k / 4, which % WIDTH) * 4 + k % 4] * w.scale[which]);
}

void linear8_row(const Weights& w, long which, bf16* out) { widen_column(w, which, out); }

// Rows `which` of the weight as it was rounded, [count, inputs]. Returns 1, and nothing else is done, if one of them is
// not there.
API int64_t linear8_rows(const Weights* w, const int64_t* which, int64_t count, const Rows* out, int64_t threads) {
  for (long i = 0; i < count; i++)
    if (which[i] < 0 || which[i] >= w->outputs) return 1;
  together(enough(threads, count * w->inputs), [&](int thread, int all) {
    for (long i = thread; i < count; i += all) {
      if (out->kind == FLOAT) widen_column(*w, which[i], (float*)out->data + i * out->stride);
      else widen_column(*w, which[i], (bf16*)out->data + i * out->stride);
    }
  });
  return 0;
}

long linear8_room(const LinearCall& call) { return call.rows * (words_of(call.weights->inputs, 4) + 1) * 4; }

void linear8_inputs(const LinearCall& call, void* room, int thread, int all) {
  const Weights& w = *call.weights;
  const Rows& x = call.x;
  long words = words_of(w.inputs, 4);
  int32_t* in = (int32_t*)room;
  float* worth = (float*)(in + call.rows * words);
  for (long r = thread; r < call.rows; r += all) {
    uint8_t* out = (uint8_t*)(in + r * words);
    worth[r] = x.kind == FLOAT ? quantise((const float*)x.data + r * x.stride, w.inputs, words, ZERO, out)
                               : quantise((const bf16*)x.data + r * x.stride, w.inputs, words, ZERO, out);
  }
}

void linear8_product(const LinearCall& call, const void* room, Shares* shares, int thread) {
  const Weights& w = *call.weights;
  long words = words_of(w.inputs, 4);
  const int32_t* in = (const int32_t*)room;
  const float* worth = (const float*)(in + call.rows * words);
  Best* best = call.best ? call.best + thread * call.rows : nullptr;
  auto finish = [&](long row, long column, long count, const I* sums) {
    F values[WIDTH / LANES] = {};
    float* v = (float*)values;
    const int32_t* s = (const int32_t*)sums;
    for (long i = 0; i < count; i++)
      v[i] = (float)(s[i] - ZERO * w.sums[column + i]) * (worth[row] * w.scale[column + i]);
    write(call, best, row, column, count, values);
  };
  multiply<Int8>((const int32_t*)w.packed, w.outputs, words, in, words, call.rows, shares, finish);
}

void linear8_part(const LinearCall& call, void* room, Shares* shares, int thread, int all) {
  linear8_inputs(call, room, thread, all);
  wait_for_all(all);
  linear8_product(call, room, shares, thread);
}

API void linear8(const LinearCall* call) {
  int threads = enough(call->threads, call->rows * call->weights->outputs * call->weights->inputs);
  void* room = scratch(OF_LINEAR, linear8_room(*call));
  Shares shares(panels(call->weights->outputs), threads);
  together(threads, [&](int thread, int all) { linear8_part(*call, room, &shares, thread, all); });
}
