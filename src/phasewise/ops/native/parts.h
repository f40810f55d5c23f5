// The kernels from inside a parallel region: what one thread of it does. Nobody waits at the end of a part.
#pragma once
#include "kernels.h"
#include "pool.h"
#include "simd.h"

// Words of packed weights for so many inputs, `each` of them in one; the last ones are filled up with zeros.
inline long words_of(long inputs, long each) {
  long words = (inputs + each - 1) / each;
  return (words + SIDE - 1) / SIDE * SIDE;
}

// Where a word of an output of a panel lies among the panel's: tiles of the matrix unit are contiguous.
inline long word_at(long word, long output) {
  return (word / SIDE * WIDTH + output / SIDE * SIDE) * SIDE + word % SIDE * SIDE + output % SIDE;
}

// A linear layer, whatever forms its weights have (forms.h). `room` is scratch of `linear_room` bytes, common to the
// threads; `shares` counts the panels of all parts. A product can be had in two steps, between which the threads have
// to meet unless the room is 0: its inputs, then the product itself.
long linear_room(const LinearCall& call);
long linear_most_room(const LinearCall& call);  // for weights of any forms with as many inputs
void linear_part(const LinearCall& call, void* room, Shares* shares, int thread, int all);
void linear_inputs(const LinearCall& call, void* room, int thread, int all);
void linear_product(const LinearCall& call, void* room, Shares* shares, int thread);

// Row `which` of the weights in bfloat16, [inputs]
void linear_row(const Weights& w, long which, bf16* out);

struct Plan;  // of jobs: which queries read which slots; it depends on the spans' sizes, the commons and the window
Plan* make_plan(const AttentionCall& call, void* room);
long plan_room(const AttentionCall& call);
long stages_of(const AttentionCall& call);
void share_out(const Plan* plan, int threads, Shares* shares);  // of every stage
void attention_part(const AttentionCall& call, const Plan* plan, Shares* shares, int all);

// A long slice of a prompt: the threads pack its keys and values into `packed` (`prefill_room` bytes), meet, and read.
long prefill_room(const PrefillCall& call);
Shares prefill_packs(const PrefillCall& call, int threads);
Shares prefill_reads(const PrefillCall& call, int threads);
void prefill_pack(const PrefillCall& call, void* packed, Shares* packs);
void prefill_read(const PrefillCall& call, const void* packed, Shares* reads);
