// All layers of a plain decoder in one call: norm, queries, keys and values, rotation, KV, attention, MLP, residuals.
//
// The threads stay in one parallel region and meet at the end of every stage. What a layer computes is what the open
// path in Python computes, operator by operator; only the number of roundings to bfloat16 differs.
#include "parts.h"
#include "rows.h"

// The threads' common memory for one call.
struct Room {
  bf16 *normed, *qkv, *read, *gate_up, *gated;
  Span* spans;     // [layers, spans]
  Shares* shares;  // [layers, 4 + stages]: four products, then the stages of attention
  long stages;
  void* inputs;    // of a product, rounded
};

struct Stage {
  const StackCall& call;
  const Room& room;
  Plan* const* plans;  // [layers]
  int thread, all;

  template <class Work> void rows(const Work& work) const {
    for (long r = thread; r < call.rows; r += all) work(r);
    wait_for_all(all);
  }

  void product(const Layer& layer, const Weights* w, bf16* x, long width, bf16* add, bf16* y, Shares* shares) const {
    LinearCall linear = {w, {x, width, BFLOAT}, {add, w->outputs, BFLOAT}, {y, w->outputs, BFLOAT}, call.rows, 0};
    (layer.int8 ? linear8_part : linear_part)(linear, room.inputs, shares, thread, all);
    wait_for_all(all);
  }
};

// One row's queries and keys normed and turned, its keys and values put into their slots.
static void place(const StackCall& call, const Layer& layer, const Span* spans, bf16* qkv, long row) {
  const Span* span = spans;
  long local = row;
  for (; local >= span->rows; span++) local -= span->rows;
  long dim = call.dim, turned = call.heads_q + call.heads, slot = span->n - span->rows + local;
  for (long h = 0; h < turned; h++) {
    bf16* head = qkv + h * dim;
    if (layer.heads.weight) normalise(head, layer.heads.weight + h * dim, layer.heads.eps, dim, head);
    if (layer.turn >= 0) {
      const Turn& t = call.turns[layer.turn];
      turn(head, t.cos + row * t.size, t.sin + row * t.size, t.size);
    }
  }
  for (long h = 0; h < call.heads; h++) {
    memcpy((bf16*)span->k + h * span->k_head + slot * span->k_row, qkv + (call.heads_q + h) * dim, dim * 2);
    memcpy((bf16*)span->v + h * span->v_head + slot * span->v_row, qkv + (turned + h) * dim, dim * 2);
  }
}

static AttentionCall attention_of(const StackCall& call, const Layer& layer, const Span* spans) {
  return {spans,        call.span_count, call.heads_q, call.heads,   call.dim,         BFLOAT,
          layer.window, call.threads,    layer.scale,  call.commons, call.common_count};
}

static void run_layer(const Stage& stage, long index) {
  const StackCall& call = stage.call;
  const Layer& layer = call.layers[index];
  const Room& room = stage.room;
  const Span* spans = room.spans + index * call.span_count;
  Shares* shares = room.shares + index * (4 + room.stages);
  long hidden = call.hidden, inner = call.inner, wide = (call.heads_q + 2 * call.heads) * call.dim;
  auto norm = [&](const Norm& n) {
    stage.rows([&](long r) { normalise(call.x + r * hidden, n.weight, n.eps, hidden, room.normed + r * hidden); });
  };
  norm(layer.before_attention);
  stage.product(layer, layer.qkv, room.normed, hidden, nullptr, room.qkv, shares);
  stage.rows([&](long r) { place(call, layer, spans, room.qkv + r * wide, r); });
  attention_part(attention_of(call, layer, spans), stage.plans[index], shares + 4, stage.all);
  wait_for_all(stage.all);
  stage.product(layer, layer.o, room.read, call.heads_q * call.dim, call.x, call.x, shares + 1);
  norm(layer.before_mlp);
  stage.product(layer, layer.gate_up, room.normed, hidden, nullptr, room.gate_up, shares + 2);
  long slice = (inner / stage.all + LANES) / LANES * LANES;  // every thread takes some columns of every row
  long from = stage.thread * slice, to = from + slice < inner ? from + slice : inner;
  for (long r = 0; r < call.rows && from < to; r++) {
    const bf16* gate = room.gate_up + r * 2 * inner;
    swish(gate + from, gate + inner + from, to - from, room.gated + r * inner + from);
  }
  wait_for_all(stage.all);
  stage.product(layer, layer.down, room.gated, inner, call.x, call.x, shares + 3);
}

// Spans of every layer, whole: where the queries lie, and the planes of that layer.
static void fill_spans(const StackCall& call, const Room& room) {
  long wide = (call.heads_q + 2 * call.heads) * call.dim;
  for (long i = 0; i < call.count; i++) {
    long row = 0;
    for (long b = 0; b < call.span_count; b++) {
      Span& span = room.spans[i * call.span_count + b];
      const int64_t* planes = call.planes + (i * call.span_count + b) * 3;
      span = call.spans[b];
      span.k = (void*)planes[0], span.v = (void*)planes[1], span.lse = nullptr;
      span.k_head = span.v_head = planes[2], span.k_row = span.v_row = call.dim;
      span.q = room.qkv + row * wide, span.q_row = wide;
      span.out = room.read + row * call.heads_q * call.dim;
      row += span.rows;
    }
  }
}

static char* take(char*& at, long bytes) {
  char* here = at;
  at += (bytes + 63) / 64 * 64;
  return here;
}

// The memory laid out from `at` on (null: only measured); returns its end.
static char* lay_out(const StackCall& call, Room& room, char* at) {
  long rows = call.rows, inputs = 0;
  long widths[] = {call.hidden, call.heads_q * call.dim, call.inner};
  for (long width : widths) inputs = width > inputs ? width : inputs;
  room.normed = (bf16*)take(at, rows * call.hidden * 2);
  room.qkv = (bf16*)take(at, rows * (call.heads_q + 2 * call.heads) * call.dim * 2);
  room.read = (bf16*)take(at, rows * call.heads_q * call.dim * 2);
  room.gate_up = (bf16*)take(at, rows * 2 * call.inner * 2);
  room.gated = (bf16*)take(at, rows * call.inner * 2);
  room.spans = (Span*)take(at, call.count * call.span_count * sizeof(Span));
  room.shares = (Shares*)take(at, call.count * (4 + room.stages) * sizeof(Shares));
  room.inputs = take(at, rows * (inputs + 4) * 4);
  return at;
}

API void stack(const StackCall* call) {
  const Layer* layers = call->layers;
  int64_t weights = 0;
  for (long i = 0; i < call->count; i++) weights += layers[i].down->outputs * layers[i].down->inputs;
  int threads = enough(call->threads, call->rows * weights);
  Room room;
  room.stages = stages_of(attention_of(*call, layers[0], nullptr));
  char* start = (char*)scratch(OF_STACK, (long)lay_out(*call, room, nullptr) + call->count * sizeof(Plan*));
  Plan** plans = (Plan**)lay_out(*call, room, start);
  fill_spans(*call, room);

  long sizes = 0;  // layers of one window share one plan
  auto same_as = [&](long i) {
    for (long j = 0; j < i; j++)
      if (layers[j].window == layers[i].window) return j;
    return i;
  };
  for (long i = 0; i < call->count; i++)
    if (same_as(i) == i) sizes += plan_room(attention_of(*call, layers[i], room.spans));
  char* at = (char*)scratch(OF_ATTENTION, sizes);
  for (long i = 0; i < call->count; i++) {
    AttentionCall attention = attention_of(*call, layers[i], room.spans);
    plans[i] = same_as(i) < i ? plans[same_as(i)] : make_plan(attention, at);
    if (same_as(i) == i) at += plan_room(attention);
    const Weights* products[] = {layers[i].qkv, layers[i].o, layers[i].gate_up, layers[i].down};
    Shares* shares = room.shares + i * (4 + room.stages);
    for (int p = 0; p < 4; p++) shares[p] = Shares(panels(products[p]->outputs), threads);
    share_out(plans[i], threads, shares + 4);
  }
  together(threads, [&](int thread, int all) {
    Stage stage = {*call, room, plans, thread, all};
    for (long i = 0; i < call->count; i++) run_layer(stage, i);
  });
}
