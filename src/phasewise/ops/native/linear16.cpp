// Linear layers of bfloat16 weights, packed so that one register holds two inputs of LANES outputs.
#include "parts.h"
#include "tile.h"

namespace {

long panel_bytes(long inputs) { return words_of(inputs, 2) * WIDTH * 4; }

void pack(const Rows& weight, const WeightsPart& to, long inputs, int threads) {
  long outputs = to.outputs, words = words_of(inputs, 2);
  Shares shares(panels(outputs), threads);
  together(threads, [&](int, int) {
    for (long from, until; shares.take(from, until);)
      for (long p = from; p < until; p++) {
        bf16* panel = (bf16*)to.packed + p * words * WIDTH * 2;
        for (long k = 0; k < words * 2; k++)
          for (long i = 0; i < WIDTH; i++) {
            long o = p * WIDTH + i;
            bool there = o < outputs && k < inputs;
            panel[word_at(k / 2, i) * 2 + k % 2] = there ? ((const bf16*)weight.data)[o * weight.stride + k] : 0;
          }
      }
  });
}

void row_of(const WeightsPart& part, long inputs, long which, bf16* out) {
  const int32_t* panel = (const int32_t*)part.packed + which / WIDTH * words_of(inputs, 2) * WIDTH;
  for (long k = 0; k < inputs / 2; k++) store(out + 2 * k, panel[word_at(k, which % WIDTH)]);
  if (inputs % 2) out[inputs - 1] = (bf16)panel[word_at(inputs / 2, which % WIDTH)];
}

// One row as the numbers that words hold (rounded to bfloat16 in any case), filled up with zeros.
template <class T, class N> void copy_row(const T* x, long inputs, long filled, N* out) {
  for (long k = 0; k < inputs; k++) put(out + k, widen(narrow(to_float(x[k]))));
  for (long k = inputs; k < filled; k++) put(out + k, 0);
}

bool as_it_lies(const LinearCall& call) {
  return DOT_BFLOATS && call.x.kind == BFLOAT && call.weights->inputs % (2 * SIDE) == 0 && call.x.stride % 2 == 0;
}

long room_of(const LinearCall& call) {
  return as_it_lies(call) ? 0 : call.rows * words_of(call.weights->inputs, 2) * sizeof(Bf16::Word);
}

void prepare(const LinearCall& call, void* room, int thread, int all) {
  if (as_it_lies(call)) return;
  const Rows& x = call.x;
  long inputs = call.weights->inputs, words = words_of(inputs, 2);
  for (long r = thread; r < call.rows; r += all) {
    Bf16::Number* out = (Bf16::Number*)((Bf16::Word*)room + r * words);
    if (x.kind == FLOAT) copy_row((const float*)x.data + r * x.stride, inputs, words * 2, out);
    else copy_row((const bf16*)x.data + r * x.stride, inputs, words * 2, out);
  }
}

void multiply_part(const PartProduct& product) {
  const LinearCall& call = product.call;
  bool lies = as_it_lies(call);
  long words = words_of(call.weights->inputs, 2), stride = lies ? call.x.stride / 2 : words;
  const Bf16::Word* in = (const Bf16::Word*)(lies ? call.x.data : product.inputs);
  multiply<Bf16>(product, words, {in, stride});
}

}  // namespace

const Inputs BFLOAT16_INPUTS = {room_of, prepare};
const Form BFLOAT16_FORM = {INPUTS_BFLOAT16, panel_bytes, pack, multiply_part, row_of};
