// Linear layers of bfloat16 weights, packed so that one register holds two inputs of LANES outputs.
#include <type_traits>

#include "tile.h"

struct Bf16 {
  typedef F Sum;
#if DOT_INSTRUCTIONS
  typedef int32_t Word;

  template <int R, int W> static void step(F (&acc)[R][W], const int32_t* weights, const Word* x, long stride) {
    __m512bh w[W];
    for (int j = 0; j < W; j++) w[j] = (__m512bh)load<__m512i>(weights + j * LANES);
    for (int r = 0; r < R; r++) {
      __m512bh in = (__m512bh)_mm512_set1_epi32(load<int32_t>(x + r * stride));
      for (int j = 0; j < W; j++) acc[r][j] = (F)_mm512_dpbf16_ps((__m512)acc[r][j], in, w[j]);
    }
  }
#else
  struct Word {
    float even, odd;
  };

  template <int R, int W> static void step(F (&acc)[R][W], const int32_t* weights, const Word* x, long stride) {
    F w[W];
    for (int j = 0; j < W; j++) w[j] = (F)(load<I>(weights + j * LANES) << 16);
    for (int r = 0; r < R; r++)
      for (int j = 0; j < W; j++) acc[r][j] += w[j] * x[r * stride].even;
    for (int j = 0; j < W; j++) w[j] = (F)(load<I>(weights + j * LANES) & (int32_t)0xffff0000);
    for (int r = 0; r < R; r++)
      for (int j = 0; j < W; j++) acc[r][j] += w[j] * x[r * stride].odd;
  }
#endif
};

API void linear_pack(const bf16* weight, const Weights* w, int64_t threads) {
  long outputs = w->outputs, inputs = w->inputs;
  bf16* packed = (bf16*)w->packed;
  long words = (inputs + 1) / 2;
  Shares shares(panels(outputs), threads);
  together(threads, [&](int, int) {
    for (long from, to; shares.take(from, to);)
      for (long p = from; p < to; p++)
        for (long k = 0; k < inputs; k++)
          for (long i = 0; i < WIDTH; i++) {
            long o = p * WIDTH + i;
            bf16* word = packed + ((p * words + k / 2) * WIDTH + i) * 2;
            word[k % 2] = o < outputs ? weight[o * inputs + k] : 0;
            if (k % 2 == 0) word[1] = 0;
          }
  });
}

// Rows `which` of the weight, [count, inputs]: the way back, and the embedding table of a model that ties it.
API void linear_rows(const Weights* w, const int64_t* which, int64_t count, bf16* out) {
  long words = (w->inputs + 1) / 2;
  for (long i = 0; i < count; i++) {
    const bf16* column = (const bf16*)w->packed + which[i] / WIDTH * words * WIDTH * 2 + which[i] % WIDTH * 2;
    for (long k = 0; k < w->inputs; k++) out[i * w->inputs + k] = column[k / 2 * WIDTH * 2 + k % 2];
  }
}

// One row as the numbers that words hold (rounded to bfloat16 in any case), an odd one out filled up with a zero.
template <class T, class N> static void copy_row(const T* x, long inputs, N* out) {
  for (long k = 0; k < inputs; k++) put(out + k, widen(narrow(to_float(x[k]))));
  if (inputs % 2) put(out + inputs, 0);
}

API void linear(const LinearCall* call) {
  typedef std::conditional_t<DOT_INSTRUCTIONS, bf16, float> Number;
  const Weights& w = *call->weights;
  const Rows& x = call->x;
  long words = (w.inputs + 1) / 2;
  bool as_it_lies = DOT_INSTRUCTIONS && x.kind == BFLOAT && w.inputs % 2 == 0 && x.stride % 2 == 0;
  Bf16::Word* copy = as_it_lies ? nullptr : (Bf16::Word*)scratch(call->rows * words * sizeof(Bf16::Word));
  const Bf16::Word* in = as_it_lies ? (const Bf16::Word*)x.data : copy;
  long stride = as_it_lies ? x.stride / 2 : words;
  int threads = enough(call->threads, call->rows * w.outputs * w.inputs);
  Shares shares(panels(w.outputs), threads);
  auto finish = [&](long row, long column, long count, F* sums) {
    write(call->y, call->add, w.bias, row, column, count, sums);
  };
  together(threads, [&](int thread, int all) {
    if (copy) {
      for (long r = thread; r < call->rows; r += all) {
        Number* out = (Number*)(copy + r * words);
        if (x.kind == FLOAT) copy_row((const float*)x.data + r * x.stride, w.inputs, out);
        else copy_row((const bf16*)x.data + r * x.stride, w.inputs, out);
      }
      wait_for_all(all);
    }
    multiply<Bf16>((const int32_t*)w.packed, w.outputs, words, in, stride, call->rows, &shares, finish);
  });
}
