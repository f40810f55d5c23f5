// Embeddings and all layers of a decoder in one call: norms, queries, keys and values, rotation, KV, attention, MLP or
// experts, residuals. A call may also stop in a layer between its queries and its attention, and another one go on there.
//
// The threads stay in one parallel region and meet at the end of every stage. What a layer computes is what the open
// path in Python computes, operator by operator; only the number of roundings to bfloat16 differs. Spans of many rows,
// slices of a prompt, have their attention to themselves (prefill.cpp).
#include "choice.h"
#include "curves.h"
#include "experts.h"
#include "parts.h"
#include "rows.h"
#include "stage.h"

constexpr long LONG = 64;  // rows from which on a span is a slice

static bool is_slice(const StackSpan& span) { return span.rows > LONG && !span.sees; }

// The layers that a call runs some of.
static long first_layer(const StackCall& call) { return call.from / 2; }
static long layer_count(const StackCall& call) { return (call.to + 1) / 2 - first_layer(call); }

static void turn_at(const StackCall& call, const Layer& layer, long place, bf16* head) {
  const Turn& t = call.turns[layer.turn];
  turn(head, t.cos + place * t.size, t.sin + place * t.size, t.size);
}

// Some normed queries as they read sinks.
static void place_far(const StackCall& call, const Layer& layer, const StackSpan& own, const bf16* q, long local,
                      long row, bf16* far) {
  long seat = own.seats ? own.seats[local] : own.n - own.rows + local;
  memcpy(far, q, call.heads_q * call.dim * 2);
  for (long h = 0; h < call.heads_q && layer.turn >= 0; h++)
    turn_at(call, layer, seat >= own.beyond ? own.near : call.positions[row], far + h * call.dim);
}

// Where a KV head of a span lies.
static Head head_of(const Span& span, long h) {
  if (span.heads) return span.heads[h];
  if (span.k_scale)
    return {(int8_t*)span.k + h * span.k_head, (int8_t*)span.v + h * span.v_head, span.k_scale + h * span.k_scale_head,
            span.v_scale + h * span.v_scale_head, 0};
  return {(bf16*)span.k + h * span.k_head, (bf16*)span.v + h * span.v_head, nullptr, nullptr, 0};
}

// One row's queries and keys normed and turned, its keys and values put into their slots.
static void place(const StackCall& call, const Layer& layer, const Room& room, const Span* spans, long row) {
  long b = 0, local = row;
  for (; local >= call.spans[b].rows; b++) local -= call.spans[b].rows;
  const Span& span = spans[b];
  long dim = call.dim, turned = call.heads_q + call.heads, slot = span.n - call.spans[b].rows + local;
  bf16* qkv = room.qkv + row * (turned + call.heads) * dim;
  if (layer.whole) {
    long of_queries = call.heads_q * dim;
    normalise(qkv, layer.heads.weight, layer.heads.eps, of_queries, qkv);
    normalise(qkv + of_queries, layer.heads.weight + of_queries, layer.heads.eps, call.heads * dim, qkv + of_queries);
  }
  for (long h = 0; h < turned && layer.heads.weight && !layer.whole; h++)
    normalise(qkv + h * dim, layer.heads.weight + h * dim, layer.heads.eps, dim, qkv + h * dim);
  if (call.spans[b].near >= 0)
    place_far(call, layer, call.spans[b], qkv, local, row, room.far + row * call.heads_q * dim);
  for (long h = 0; h < turned && layer.turn >= 0; h++) turn_at(call, layer, call.positions[row], qkv + h * dim);
  for (long h = 0; h < call.heads; h++) {
    Head head = head_of(span, h);
    const bf16 *key = qkv + (call.heads_q + h) * dim, *value = qkv + (turned + h) * dim;
    if (head.k_scale) {
      ((bf16*)head.k_scale)[slot] = round_to_bytes(key, dim, (int8_t*)head.k + slot * span.k_row);
      ((bf16*)head.v_scale)[slot] = round_to_bytes(value, dim, (int8_t*)head.v + slot * span.v_row);
    } else {
      memcpy((bf16*)head.k + slot * span.k_row, key, dim * 2);
      memcpy((bf16*)head.v + slot * span.v_row, value, dim * 2);
    }
  }
}

static AttentionCall attention_of(const StackCall& call, const Layer& layer, const Span* spans) {
  return {spans,        call.span_count, call.heads_q, call.heads,   call.dim,          BFLOAT,
          layer.window, call.threads,    layer.scale,  call.commons, call.common_count, layer.softcap,
          layer.sink_scores};
}

// A span that is a slice; `span` is the layer's, or null where only sizes matter.
static PrefillCall slice_of(const StackCall& call, const Layer& layer, const Span* span, const StackSpan& own) {
  PrefillCall slice = {};
  slice.n = own.n, slice.rows = own.rows, slice.heads_q = call.heads_q, slice.heads = call.heads, slice.dim = call.dim;
  slice.kind = BFLOAT, slice.threads = call.threads;
  slice.scale = layer.scale, slice.softcap = layer.softcap, slice.sink_scores = layer.sink_scores;
  if (!span) return slice;
  slice.sight = span->sight;
  if (!slice.sight.window) slice.sight.window = layer.window;
  slice.q = span->q, slice.q_row = span->q_row, slice.q_head = call.dim, slice.out = span->out;
  slice.k = span->k, slice.k_head = span->k_head, slice.k_row = span->k_row;
  slice.v = span->v, slice.v_head = span->v_head, slice.v_row = span->v_row;
  slice.k_scale = span->k_scale, slice.k_scale_head = span->k_scale_head;
  slice.v_scale = span->v_scale, slice.v_scale_head = span->v_scale_head;
  slice.unequal = span->heads;
  slice.shared = span->shared, slice.shared_slots = span->shared_slots;
  return slice;
}

// work(slice, its number, its part of the packed keys and values) for all slices
template <class Work>
static void slices(const StackCall& call, const Layer& layer, const Span* spans, char* packed, const Work& work) {
  long number = 0;
  for (long b = 0; b < call.span_count; b++) {
    if (!is_slice(call.spans[b]) || call.spans[b].done) continue;
    PrefillCall slice = slice_of(call, layer, spans ? spans + b : nullptr, call.spans[b]);
    work(slice, number++, packed);
    packed += (prefill_room(slice) + 63) / 64 * 64;
  }
}

static void attend(const Stage& stage, long index, const Span* spans, Shares* shares) {
  const StackCall& call = stage.call;
  const Layer& layer = call.layers[first_layer(call) + index];
  const Room& room = stage.room;
  Shares* own = shares + room.stages;
  slices(call, layer, spans, room.packed,
         [&](const PrefillCall& slice, long i, char* packed) { prefill_pack(slice, packed, own + 2 * i); });
  if (room.choosing) read_chosen(*room.choosing, index, stage.all);
  attention_part(attention_of(call, layer, spans), stage.plans[index], shares, stage.all);
  wait_for_all(stage.all);
  if (!room.slices) return;
  slices(call, layer, spans, room.packed, [&](const PrefillCall& slice, long i, char* packed) {
    prefill_read(slice, packed, own + 2 * i + 1);
  });
  wait_for_all(stage.all);
}

static void embed(const StackCall& call, long row) {
  const Embeddings& table = *call.embeddings;
  long token = call.tokens[row], hidden = call.hidden;
  bf16* x = call.x + row * hidden;
  if (table.plain) memcpy(x, table.plain + token * hidden, hidden * 2);
  else linear_row(*table.packed, token, x);
  if (table.scale == 1) return;
  for (long i = 0; i < hidden; i++) x[i] = narrow(widen(x[i]) * (float)table.scale);
}

// -> the rows normed, or as they are
static bf16* norm(const Stage& stage, const Norm& n) {
  long hidden = stage.call.hidden;
  bf16 *x = stage.call.x, *normed = stage.room.normed;
  if (!n.weight) return x;
  stage.rows([&](long r) { normalise(x + r * hidden, n.weight, n.eps, hidden, normed + r * hidden); });
  return normed;
}

// x += a norm of what stands in `normed`
static void add_norm(const Stage& stage, const Norm& n) {
  long hidden = stage.call.hidden;
  bf16 *x = stage.call.x, *y = stage.room.normed;
  stage.rows([&](long r) { add_normalised(y + r * hidden, n.weight, n.eps, hidden, x + r * hidden); });
}

// x += a product, or what a norm makes of it
static void add_product(const Stage& stage, long index, int which, const Weights* w, bf16* in, const Norm& after) {
  bf16* x = stage.call.x;
  if (!after.weight) return stage.product(index, which, w, in, x, x);
  stage.product(index, which, w, in, nullptr, stage.room.normed);
  add_norm(stage, after);
}

static Mixed mixed(const StackCall& call, const Layer& layer, bf16* in, bf16* out, long rows) {
  bf16* add = layer.after_mlp.weight ? nullptr : call.x;
  return {*layer.experts, in, rows, call.hidden, layer.gate, add, add ? add : out};
}

// A layer up to its attention, if it has one; `index` counts the call's layers.
static void run_first_half(const Stage& stage, long index) {
  const StackCall& call = stage.call;
  const Layer& layer = call.layers[first_layer(call) + index];
  if (!layer.qkv) return;
  const Room& room = stage.room;
  const Span* spans = room.spans + index * call.span_count;
  bf16* in = norm(stage, layer.before_attention);
  stage.product(index, 0, layer.qkv, in, nullptr, room.qkv);
  stage.rows([&](long r) { place(call, layer, room, spans, r); });
}

static void run_second_half(const Stage& stage, long index) {
  const StackCall& call = stage.call;
  const Layer& layer = call.layers[first_layer(call) + index];
  const Room& room = stage.room;
  Shares* shares = shares_of(room, index);
  if (layer.qkv) {
    attend(stage, index, room.spans + index * call.span_count, shares + 4);
    add_product(stage, index, 1, layer.o, room.read, layer.after_attention);
  }
  if (!layer.down && !layer.experts) return;
  bf16* in = norm(stage, layer.before_mlp);
  if (layer.experts) {
    Mixed rows = mixed(call, layer, in, room.normed, call.rows);
    mix(rows, room.mixing, shares + 2, stage.thread, stage.all);
    if (layer.after_mlp.weight) add_norm(stage, layer.after_mlp);
    return;
  }
  stage.product(index, 2, layer.gate_up, in, nullptr, room.gate_up);
  gate_rows(layer.gate, room.gate_up, call.rows, layer.down->inputs, room.gated, stage.thread, stage.all);
  wait_for_all(stage.all);
  add_product(stage, index, 3, layer.down, room.gated, layer.after_mlp);
}

// Spans of the call's layers: where the queries lie, and the planes of that layer.
static void fill_spans(const StackCall& call, const Room& room) {
  static const Planes nowhere = {};
  long wide = (call.heads_q + 2 * call.heads) * call.dim;
  for (long i = 0; i < layer_count(call); i++) {
    long row = 0;
    for (long b = 0; b < call.span_count; b++) {
      Span& span = room.spans[i * call.span_count + b];
      const StackSpan& own = call.spans[b];
      const Planes& planes = own.unequal ? nowhere : own.planes[first_layer(call) + i];
      span = {};
      span.n = own.n;
      bool elsewhere = is_slice(own) || own.done || lists(own, first_layer(call) + i);  // its rows are read
      span.rows = elsewhere ? 0 : own.rows;
      span.sees = own.sees, span.common = own.common;
      span.k = planes.k, span.v = planes.v;
      span.k_head = span.v_head = planes.head, span.k_row = span.v_row = call.dim;
      span.k_scale = planes.k_scale, span.v_scale = planes.v_scale;
      span.k_scale_head = span.v_scale_head = planes.scale_head;
      span.q = room.qkv + row * wide, span.q_row = wide;
      span.out = room.read + row * call.heads_q * call.dim;
      void* far = own.near < 0 ? nullptr : room.far + row * call.heads_q * call.dim;
      const float* bias = own.bias ? own.bias + (first_layer(call) + i) * call.heads_q : nullptr;
      span.sight = {own.window, own.sinks, far, own.seats, own.block, bias};
      span.first = own.first;
      span.sealed = own.sealed ? own.sealed + first_layer(call) + i : nullptr;
      span.tally = own.tally ? own.tally + first_layer(call) + i : nullptr;
      if (own.unequal) {
        span.heads = own.unequal + (first_layer(call) + i) * call.heads;
        span.k_scale = span.heads->k_scale, span.v_scale = span.heads->v_scale;  // whether there are any
      }
      span.shared_slots = own.shared_slots;
      if (own.shared_slots) span.shared = own.shared + (first_layer(call) + i) * (own.shared_slots / SHARED_BLOCK);
      row += own.rows;
    }
  }
}

static char* take(char*& at, long bytes) {
  char* here = at;
  at += (bytes + 63) / 64 * 64;
  return here;
}

// The memory laid out from `at` on (null: only measured); returns its end.
static char* lay_out(const StackCall& call, Room& room, int threads, char* at) {
  long rows = call.rows, inner = 0, mixing = 0, prepared = 0;
  for (long i = 0; i < layer_count(call); i++) {
    const Layer& layer = call.layers[first_layer(call) + i];
    long own = layer.down ? layer.down->inputs : 0;
    inner = own > inner ? own : inner;
    own = layer.experts ? mix_room(mixed(call, layer, nullptr, nullptr, rows)) : 0;
    mixing = own > mixing ? own : mixing;
    const Weights* products[] = {layer.qkv, layer.o, layer.gate_up, layer.down};
    for (const Weights* w : products) {
      own = w ? linear_room({w, {nullptr, w->inputs, BFLOAT}, {}, {}, rows, 0}) : 0;
      prepared = own > prepared ? own : prepared;
    }
  }
  long inputs = inner, widths[] = {call.hidden, call.heads_q * call.dim};
  for (long width : widths) inputs = width > inputs ? width : inputs;
  room.low_width = 0;
  for (long t = 0; t < call.tuned_count; t++)
    for (long i = first_layer(call) * 4; i < (first_layer(call) + layer_count(call)) * 4; i++) {
      const Weights* down = call.tuned[t].layers[i].down;
      if (down && down->outputs > room.low_width) room.low_width = down->outputs;
    }
  inputs = room.low_width > inputs ? room.low_width : inputs;
  room.normed = (bf16*)take(at, rows * call.hidden * 2);
  room.qkv = call.qkv ? call.qkv : (bf16*)take(at, rows * (call.heads_q + 2 * call.heads) * call.dim * 2);
  room.read = call.read ? call.read : (bf16*)take(at, rows * call.heads_q * call.dim * 2);
  bool far = false;
  for (long b = 0; b < call.span_count; b++) far = far || call.spans[b].near >= 0;
  room.far = call.far ? call.far : far ? (bf16*)take(at, rows * call.heads_q * call.dim * 2) : nullptr;
  room.gate_up = (bf16*)take(at, rows * 2 * inner * 2);
  room.gated = (bf16*)take(at, rows * inner * 2);
  room.spans = (Span*)take(at, layer_count(call) * call.span_count * sizeof(Span));
  room.shares = (Shares*)take(at, layer_count(call) * (4 + room.stages + 2 * room.slices) * sizeof(Shares));
  room.input = call.tuned_count ? (inputs + 47) / 16 * 64 : 0;  // 32 inputs more: words of the matrix unit's tiles
  room.inputs = take(at, rows * room.input > prepared ? rows * room.input : prepared);
  room.low = (bf16*)take(at, rows * room.low_width * 2);
  room.tuned = (Shares*)take(at, layer_count(call) * call.tuned_count * 8 * sizeof(Shares));
  room.mixing = take(at, mixing);
  long choosing = choosing_room(call, first_layer(call), layer_count(call));
  room.choosing = choosing ? (Choosing*)take(at, choosing) : nullptr;
  room.packed = at;
  slices(call, call.layers[0], nullptr, nullptr,
         [&](const PrefillCall& slice, long, char*) { take(at, prefill_room(slice)); });
  return at;
}

// Returns 1, and nothing else is done, if a token has no embedding.
API int64_t stack(const StackCall* call) {
  for (long r = 0; call->tokens && r < call->rows; r++)
    if (call->tokens[r] < 0 || call->tokens[r] >= call->embeddings->vocab) return 1;
  const Layer* layers = call->layers + first_layer(*call);
  long count = layer_count(*call);
  int64_t weights = 0;
  for (long i = 0; i < count; i++) {
    const Experts* experts = layers[i].experts;
    const Weights* down = experts ? experts->products[1] : layers[i].down;
    if (down) weights += down->outputs * down->inputs * (experts ? experts->top : 1);
  }
  int threads = enough(call->threads, call->rows * weights);
  Room room;
  room.stages = stages_of(attention_of(*call, layers[0], nullptr));
  room.slices = 0;
  for (long b = 0; b < call->span_count; b++) room.slices += is_slice(call->spans[b]) && !call->spans[b].done;
  char* start = (char*)scratch(OF_STACK, (long)lay_out(*call, room, threads, nullptr) + count * sizeof(Plan*));
  Plan** plans = (Plan**)lay_out(*call, room, threads, start);
  fill_spans(*call, room);
  if (room.choosing) make_choosing(*call, first_layer(*call), count, threads, room.spans, room.choosing);

  long sizes = room.choosing ? choosing_plans(*room.choosing) : 0;
  auto spans = [&](long i) { return room.spans + i * call->span_count; };
  auto begin_alike = [&](const Head* one, const Head* other) {
    for (long h = 0; one && h < call->heads; h++)
      if (memcmp(&one[h].begin, &other[h].begin, 3 * sizeof(int64_t))) return false;  // and window, and sinks
    return true;
  };
  auto same_as = [&](long i) {  // layers of one window, in which the same spans read the same slots, share one plan
    for (long j = 0; j < i; j++) {
      bool same = layers[j].window == layers[i].window;
      for (long b = 0; same && b < call->span_count; b++) same = begin_alike(spans(j)[b].heads, spans(i)[b].heads);
      for (long b = 0; room.choosing && b < call->span_count; b++) same = same && spans(j)[b].rows == spans(i)[b].rows;
      if (same) return j;
    }
    return i;
  };
  for (long i = 0; i < count; i++)
    if (same_as(i) == i) sizes += plan_room(attention_of(*call, layers[i], spans(i)));
  char* at = (char*)scratch(OF_ATTENTION, sizes);
  for (long i = 0; i < count; i++) {
    AttentionCall attention = attention_of(*call, layers[i], spans(i));
    plans[i] = same_as(i) < i ? plans[same_as(i)] : make_plan(attention, at);
    if (same_as(i) == i) at += plan_room(attention);
    const Experts* experts = layers[i].experts;
    const Weights* products[] = {layers[i].qkv, layers[i].o, experts ? experts->router : layers[i].gate_up,
                                 layers[i].down};
    Shares* shares = shares_of(room, i);
    for (int p = 0; p < 4; p++)
      if (products[p]) shares[p] = Shares(panels(*products[p]), threads);
    for (long t = 0; t < call->tuned_count; t++)
      for (long which = 0; which < 4; which++) {
        const LowRank& pair = call->tuned[t].layers[(first_layer(*call) + i) * 4 + which];
        Shares* own = room.tuned + ((i * call->tuned_count + t) * 4 + which) * 2;
        if (pair.down) own[0] = Shares(panels(*pair.down), threads), own[1] = Shares(panels(*pair.up), threads);
      }
    share_out(plans[i], threads, shares + 4);
    slices(*call, layers[i], spans(i), nullptr, [&](const PrefillCall& slice, long s, char*) {
      shares[4 + room.stages + 2 * s] = prefill_packs(slice, threads);
      shares[4 + room.stages + 2 * s + 1] = prefill_reads(slice, threads);
    });
  }
  if (room.choosing) plan_choosing(*room.choosing, threads, at);
  together(threads, [&](int thread, int all) {
    Stage stage = {*call, room, plans, thread, all};
    if (call->tokens) stage.rows([&](long r) { embed(*call, r); });
    for (long half = call->from; half < call->to; half++)
      (half % 2 ? run_second_half : run_first_half)(stage, half / 2 - first_layer(*call));
  });
  return 0;
}
