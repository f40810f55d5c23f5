// The experts of a layer: a router chooses some for every row, and its result is their weighted sum.
//
// Rows are grouped by expert, and an expert's products are of its rows alone: what nobody has chosen is not read. A row's
// products and the order of its sum, largest weight first, do not depend on the rows beside it.
#include "experts.h"

#include <math.h>

#include "curves.h"

namespace {

struct Group {  // consecutive rows for one expert
  long expert, start, count;
};

struct Room {
  float *chances, *weights;  // [rows, experts], [rows, top]
  int32_t *chosen, *place;   // [rows, top]: experts, and where they find the row among those grouped
  bf16 *grouped, *both, *gated;
  Group* groups;
  long *group_count, *ends;  // [1]; [experts], of each among the pairs
  Shares* shares;  // [2, groups]
  char* inputs;    // of products, as these take them
};

typedef const Mixed& Call;

long pairs(Call call) { return call.rows * call.experts.top; }
const Weights& weights_of(Call call, long expert, long which) { return *call.experts.products[2 * expert + which]; }

LinearCall router(Call call, float* chances) {
  const Experts& e = call.experts;
  return {e.router, {(void*)call.x, call.hidden, BFLOAT}, {}, {chances, e.count, FLOAT}, call.rows, 0};
}

LinearCall product(Call call, const Group& group, long which, bf16* x, bf16* y) {
  const Weights& w = weights_of(call, group.expert, which);
  x += group.start * w.inputs, y += group.start * w.outputs;
  return {&w, {x, w.inputs, BFLOAT}, {}, {y, w.outputs, BFLOAT}, group.count, 0};
}

long padded(long bytes) { return (bytes + 63) / 64 * 64; }

// Of one row for an expert; those of a group lie together, and less than this for each of its rows. Experts may have
// weights of unlike forms.
long inputs_row(Call call, long which) {
  return linear_most_room(product(call, {0, 0, 1}, which, nullptr, nullptr));
}

// The memory laid out from `at` on (null: only measured); returns its end.
char* lay_out(Call call, Room& room, char* at) {
  auto take = [&](long bytes) {
    char* here = at;
    at += padded(bytes);
    return here;
  };
  long inner = weights_of(call, 0, 1).inputs, most = linear_room(router(call, nullptr));
  for (long which = 0; which < 2; which++) {
    long bytes = pairs(call) * inputs_row(call, which);
    most = bytes > most ? bytes : most;
  }
  room.chances = (float*)take(call.rows * call.experts.count * 4);
  room.weights = (float*)take(pairs(call) * 4);
  room.chosen = (int32_t*)take(pairs(call) * 4);
  room.place = (int32_t*)take(pairs(call) * 4);
  room.grouped = (bf16*)take(pairs(call) * call.hidden * 2);
  room.both = (bf16*)take(pairs(call) * inner * 4);
  room.gated = (bf16*)take(pairs(call) * inner * 2);
  room.groups = (Group*)take(call.experts.count * sizeof(Group));
  room.group_count = (long*)take(sizeof(long));
  room.ends = (long*)take(call.experts.count * sizeof(long));
  room.shares = (Shares*)take(2 * call.experts.count * sizeof(Shares));
  room.inputs = take(most);
  return at;
}

// One row's logits become chances; the `top` largest are chosen, of equal ones the first.
void choose(const Experts& e, float* chances, int32_t* chosen, float* weights) {
  float most = -INFINITY, total = 0, sum = 0;
  for (long j = 0; j < e.count; j++) {
    chances[j] = widen(narrow(chances[j]));  // as a layer in bfloat16 gives them
    most = chances[j] > most ? chances[j] : most;
  }
  for (long j = 0; j < e.count; j++) total += chances[j] = expf(chances[j] - most);
  for (long i = 0; i < e.top; i++) {
    long best = total == total ? 0 : i;  // NaN, as some logit is: whatever is chosen becomes NaN
    for (long j = 0; total == total && j < e.count; j++)
      if (chances[j] > chances[best]) best = j;
    chosen[i] = (int32_t)best;
    sum += weights[i] = chances[best] / total;
    chances[best] = -1;
  }
  for (long i = 0; e.renormalise && i < e.top; i++) weights[i] /= sum;
}

// All (row, choice) pairs sorted by expert.
void group_all(Call call, const Room& room, int all) {
  long count = call.experts.count, groups = 0, start = 0;
  for (long e = 0; e < count; e++) room.ends[e] = 0;
  for (long p = 0; p < pairs(call); p++) room.ends[room.chosen[p]]++;
  for (long e = 0; e < count; e++) {
    long rows = room.ends[e];
    room.ends[e] = start;
    if (!rows) continue;
    call.experts.loads[e] = 1;
    for (long which = 0; which < 2; which++)
      room.shares[which * count + groups] = Shares(panels(weights_of(call, e, which)), all);
    room.groups[groups++] = {e, start, rows};
    start += rows;
  }
  for (long p = 0; p < pairs(call); p++) room.place[p] = (int32_t)room.ends[room.chosen[p]]++;
  *room.group_count = groups;
}

// y = x W^T of every group, x and y being rows in groups.
void multiply_all(Call call, const Room& room, long which, bf16* x, bf16* y, int thread, int all) {
  long row = inputs_row(call, which), groups = *room.group_count;
  for (long g = 0; g < groups; g++) {
    LinearCall linear = product(call, room.groups[g], which, x, y);
    char* inputs = room.inputs + room.groups[g].start * row;
    linear_inputs(linear, inputs, (int)((thread + g) % all), all);
  }
  wait_for_all(all);
  for (long g = 0; g < groups; g++) {
    LinearCall linear = product(call, room.groups[g], which, x, y);
    char* inputs = room.inputs + room.groups[g].start * row;
    Shares* shares = room.shares + which * call.experts.count + g;
    linear_product(linear, inputs, shares, thread);
  }
  wait_for_all(all);
}

void add_up(Call call, const Room& room, long row) {
  long top = call.experts.top, hidden = call.hidden;
  const float* weights = room.weights + row * top;
  const int32_t* place = room.place + row * top;
  const bf16* add = call.add ? call.add + row * hidden : nullptr;
  bf16* y = call.y + row * hidden;
  long d = 0;
  for (; d + LANES <= hidden; d += LANES) {
    F sum = {};
    for (long i = 0; i < top; i++) sum += load_floats(room.grouped + place[i] * hidden + d) * weights[i];
    store_floats(y + d, add ? sum + load_floats(add + d) : sum);
  }
  for (; d < hidden; d++) {
    float sum = 0;
    for (long i = 0; i < top; i++) sum += widen(room.grouped[place[i] * hidden + d]) * weights[i];
    y[d] = narrow(add ? sum + widen(add[d]) : sum);
  }
}

}  // namespace

long mix_room(const Mixed& call) {
  Room room;
  return (long)lay_out(call, room, nullptr);
}

void mix(const Mixed& call, void* memory, Shares* shares, int thread, int all) {
  Room room;
  lay_out(call, room, (char*)memory);
  const Experts& e = call.experts;
  linear_part(router(call, room.chances), room.inputs, shares, thread, all);
  wait_for_all(all);
  for (long r = thread; r < call.rows; r += all)
    choose(e, room.chances + r * e.count, room.chosen + r * e.top, room.weights + r * e.top);
  wait_for_all(all);
  if (!thread) group_all(call, room, all);
  wait_for_all(all);
  for (long p = thread; p < pairs(call); p += all)
    memcpy(room.grouped + room.place[p] * call.hidden, call.x + p / e.top * call.hidden, call.hidden * 2);
  wait_for_all(all);
  multiply_all(call, room, 0, room.grouped, room.both, thread, all);
  gate_rows(call.gate, room.both, pairs(call), weights_of(call, 0, 1).inputs, room.gated, thread, all);
  wait_for_all(all);
  multiply_all(call, room, 1, room.gated, room.grouped, thread, all);
  for (long r = thread; r < call.rows; r += all) add_up(call, room, r);
  wait_for_all(all);
}
