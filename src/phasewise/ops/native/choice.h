// Spans of a stack that choose what their row reads (Choice), layer by layer: vectors that stand for keys are made, they
// are voted for, slots are listed, and what is listed is read.
#pragma once
#include "kernels.h"
#include "pool.h"

struct Choosing;

// Whether a span's row reads a list in a layer, and whether it makes one.
inline bool lists(const StackSpan& span, long layer) {
  if (!span.choice) return false;
  int64_t way = span.choice->layers[layer].way;
  return way == CHOSEN || way == AGAIN || way == GIVEN;
}
inline bool chooses(const StackSpan& span, long layer) {
  if (!span.choice) return false;
  int64_t way = span.choice->layers[layer].way;
  return way == CHOSEN || way == PICKS || way == GIVEN;
}

// 0 bytes where no span chooses. `first`, `count`: the layers of the call.
long choosing_room(const StackCall& call, long first, long count);
// `spans` [count, spans] as filled for the call.
Choosing* make_choosing(const StackCall& call, long first, long count, int threads, const Span* spans, void* room);
// Bytes of the plans of listed attention, and the plans themselves.
long choosing_plans(const Choosing& choosing);
void plan_choosing(Choosing& choosing, int threads, char* at);
// What one thread does in a layer, counted from the first. Nobody waits at the end.
void read_chosen(const Choosing& choosing, long layer, int all);
