// Linear layers of bfloat16 weights, packed so that one register holds two inputs of LANES outputs.
#include "parts.h"
#include "tile.h"

API int64_t words(int64_t inputs, int64_t each) { return words_of(inputs, each); }

API void linear_pack(const bf16* weight, const Weights* w, int64_t threads) {
  long outputs = w->outputs, inputs = w->inputs;
  bf16* packed = (bf16*)w->packed;
  long words = words_of(inputs, 2);
  Shares shares(panels(outputs), threads);
  together(threads, [&](int, int) {
    for (long from, to; shares.take(from, to);)
      for (long p = from; p < to; p++) {
        bf16* panel = packed + p * words * WIDTH * 2;
        for (long k = 0; k < words * 2; k++)
          for (long i = 0; i < WIDTH; i++) {
            long o = p * WIDTH + i;
            panel[word_at(k / 2, i) * 2 + k % 2] = o < outputs && k < inputs ? weight[o * inputs + k] : 0;
          }
      }
  });
}

void linear_row(const Weights& w, long which, bf16* out) {
  const int32_t* panel = (const int32_t*)w.packed + which / WIDTH * words_of(w.inputs, 2) * WIDTH;
  for (long k = 0; k < w.inputs / 2; k++) store(out + 2 * k, panel[word_at(k, which % WIDTH)]);
  if (w.inputs % 2) out[w.inputs - 1] = (bf16)panel[word_at(w.inputs / 2, which % WIDTH)];
}

// Rows `which` of the weight, [count, inputs]: the way back, and the embedding table of a model that ties it.
// Returns 1, and nothing else is done, if one of them is not there.
API int64_t linear_rows(const Weights* w, const int64_t* which, int64_t count, bf16* out, int64_t threads) {
  for (long i = 0; i < count; i++)
    if (which[i] < 0 || which[i] >= w->outputs) return 1;
  together(enough(threads, count * w->inputs), [&](int thread, int all) {
    for (long i = thread; i < count; i += all) linear_row(*w, which[i], out + i * w->inputs);
  });
  return 0;
}

// One row as the numbers that words hold (rounded to bfloat16 in any case), filled up with zeros.
template <class T, class N> static void copy_row(const T* x, long inputs, long filled, N* out) {
  for (long k = 0; k < inputs; k++) put(out + k, widen(narrow(to_float(x[k]))));
  for (long k = inputs; k < filled; k++) put(out + k, 0);
}

static bool as_it_lies(const LinearCall& call) {
  return DOT_BFLOATS && call.x.kind == BFLOAT && call.weights->inputs % (2 * SIDE) == 0 && call.x.stride % 2 == 0;
}

long linear_room(const LinearCall& call) {
  return as_it_lies(call) ? 0 : call.rows * words_of(call.weights->inputs, 2) * sizeof(Bf16::Word);
}

void linear_inputs(const LinearCall& call, void* room, int thread, int all) {
  if (as_it_lies(call)) return;
  const Rows& x = call.x;
  long inputs = call.weights->inputs, words = words_of(inputs, 2);
  for (long r = thread; r < call.rows; r += all) {
    Bf16::Number* out = (Bf16::Number*)((Bf16::Word*)room + r * words);
    if (x.kind == FLOAT) copy_row((const float*)x.data + r * x.stride, inputs, words * 2, out);
    else copy_row((const bf16*)x.data + r * x.stride, inputs, words * 2, out);
  }
}

void linear_product(const LinearCall& call, const void* room, Shares* shares, int thread) {
  const Weights& w = *call.weights;
  bool lies = as_it_lies(call);
  long words = words_of(w.inputs, 2), stride = lies ? call.x.stride / 2 : words;
  const Bf16::Word* in = (const Bf16::Word*)(lies ? call.x.data : room);
  Best* best = call.best ? call.best + thread * call.rows : nullptr;
  auto finish = [&](long row, long column, long count, F* sums) { write(call, best, row, column, count, sums); };
  multiply<Bf16>((const int32_t*)w.packed, w.outputs, words, {in, stride}, call.rows, shares, finish);
}

void linear_part(const LinearCall& call, void* room, Shares* shares, int thread, int all) {
  linear_inputs(call, room, thread, all);
  if (!as_it_lies(call)) wait_for_all(all);
  linear_product(call, room, shares, thread);
}

API void linear(const LinearCall* call) {
  int threads = enough(call->threads, call->rows * call->weights->outputs * call->weights->inputs);
  void* room = scratch(OF_LINEAR, linear_room(*call));
  Shares shares(panels(call->weights->outputs), threads);
  together(threads, [&](int thread, int all) { linear_part(*call, room, &shares, thread, all); });
}
