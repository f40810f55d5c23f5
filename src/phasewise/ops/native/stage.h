// What the threads of a call of a stack share, and the products of its layers, low-rank weights of some rows among them.
#pragma once
#include "choice.h"
#include "kernels.h"
#include "parts.h"
#include "simd.h"

// The threads' common memory for one call.
struct Room {
  bf16 *normed, *qkv, *read, *gate_up, *gated;
  bf16* far;       // queries of sinks; null: none of the spans has any
  Span* spans;     // [layers of the call, spans]
  Shares* shares;  // [layers of the call, 4 + stages + 2 slices]: products, the stages of attention, the slices' two
  long stages, slices;
  char* packed;    // keys and values of all slices
  void* inputs;    // of a product, as its weights' forms take them
  long input;      // bytes of a row of them, of low-rank weights
  bf16* low;       // [rows, low_width], what low-rank weights make of inputs
  long low_width;
  Shares* tuned;   // [layers of the call, tuned, 4, 2]
  void* mixing;    // what experts need
  Choosing* choosing;  // or null
};

inline Shares* shares_of(const Room& room, long index) {
  return room.shares + index * (4 + room.stages + 2 * room.slices);
}

struct Stage {
  const StackCall& call;
  const Room& room;
  Plan* const* plans;  // [layers]
  int thread, all;

  template <class Work> void rows(const Work& work) const {
    for (long r = thread; r < call.rows; r += all) work(r);
    wait_for_all(all);
  }

  // One of the four products of layer `index` of the call.
  void product(long index, int which, const Weights* w, bf16* x, bf16* add, bf16* y) const {
    LinearCall linear = {w, {x, w->inputs, BFLOAT}, {add, w->outputs, BFLOAT}, {y, w->outputs, BFLOAT}, call.rows, 0};
    linear_part(linear, room.inputs, shares_of(room, index) + which, thread, all);
    wait_for_all(all);
    if (call.tuned_count) tune(index, which, x, w->inputs, y, w->outputs);
  }

  // What low-rank weights add to a product.
  void tune(long index, int which, bf16* x, long inputs, bf16* y, long outputs) const {
    for (int half = 0; half < 2; half++) {
      for (long t = 0; t < call.tuned_count; t++) {
        const Tuned& own = call.tuned[t];
        const LowRank& pair = own.layers[(call.from / 2 + index) * 4 + which];
        if (!pair.down) continue;
        long rows = own.to - own.from;
        Rows in = {x + own.from * inputs, inputs, BFLOAT}, out = {y + own.from * outputs, outputs, BFLOAT};
        Rows low = {room.low + own.from * room.low_width, pair.down->outputs, BFLOAT};
        LinearCall down = {pair.down, in, {}, low, rows, 0}, up = {pair.up, low, out, out, rows, 0};
        Shares* shares = room.tuned + ((index * call.tuned_count + t) * 4 + which) * 2 + half;
        linear_part(half ? up : down, (char*)room.inputs + own.from * room.input, shares, thread, all);
      }
      wait_for_all(all);
    }
  }
};
