#include "choice.h"

#include "listed.h"
#include "rows.h"
#include "softmax.h"

namespace {

struct ChoosingLayer {
  PagesCall pages;
  ListedCall listed;
  const Choice* const* choices;
  ListedPlan* plan;  // layers in which the same spans choose share one
  Shares* shares;    // of the choice, and the two of listed attention
};

// Keys of one head, slot by slot, as bfloat16.
struct Keys {
  const Listed& span;
  long head, dim;
  const bf16* at(long slot, bf16* room) const {
    long place = head * span.k_head + slot * span.k_row;
    if (!span.k_scale) return (const bf16*)span.k + place;
    widen_rows((const int8_t*)span.k + place, 0, span.k_scale + head * span.k_scale_head + slot, 1, dim, room);
    return room;
  }
};

// A number that is none stays.
void seal_bounds(const Keys& keys, long slot, long size, bf16* low, bf16* high) {
  bf16 room[MOST_DIM];
  float least[MOST_DIM], most[MOST_DIM];
  const bf16* key = keys.at(slot, room);
  for (long d = 0; d < keys.dim; d++) least[d] = most[d] = widen(key[d]);
  for (long j = 1; j < size; j++) {
    key = keys.at(slot + j, room);
    for (long d = 0; d < keys.dim; d++) {
      float x = widen(key[d]);
      least[d] = (x < least[d]) | (x != x) ? x : least[d];
      most[d] = (x > most[d]) | (x != x) ? x : most[d];
    }
  }
  for (long d = 0; d < keys.dim; d++) low[d] = narrow(least[d]), high[d] = narrow(most[d]);
}

void seal_mean(const Keys& keys, long slot, long size, bf16* mean) {
  bf16 room[MOST_DIM];
  float total[MOST_DIM] = {};
  for (long j = 0; j < size; j++) {
    const bf16* key = keys.at(slot + j, room);
    for (long d = 0; d < keys.dim; d++) total[d] += widen(key[d]);
  }
  for (long d = 0; d < keys.dim; d++) mean[d] = narrow(total[d] / size);
}

// The vectors of pages that have none yet, of one head.
void seal(const ChoosingLayer& layer, long span, long head) {
  const Choice& choice = *layer.choices[span];
  const Pages& pages = layer.pages.spans[span];
  Keys keys = {layer.listed.spans[span], head, layer.pages.dim};
  for (long p = choice.sealed; p < choice.pages; p++) {
    bf16* low = (bf16*)pages.low + head * pages.low_head + p * keys.dim;
    bf16* high = (bf16*)pages.high + head * pages.high_head + p * keys.dim;
    if (pages.high) seal_bounds(keys, p * pages.size, pages.size, low, high);
    else seal_mean(keys, p * pages.size, pages.size, low);
  }
}

long slots_of(const StackSpan& span) {
  const Choice& choice = *span.choice;
  return choice.chosen * choice.size + span.n - choice.pages * choice.size;
}

}  // namespace

struct Choosing {
  ChoosingLayer* layers;
  long count;
  char* rooms;  // of the threads
  long each;
};

static bool alike(const ChoosingLayer& a, const ChoosingLayer& b) {
  if (a.pages.count != b.pages.count) return false;
  for (long i = 0; i < a.pages.count; i++)
    if (a.choices[i] != b.choices[i]) return false;
  return true;
}

namespace {

struct Layout {  // all of it lies one after the other; `at` null: only measured
  ChoosingLayer* layers;
  Pages* pages;
  Listed* listed;
  const Choice** choices;
  Shares* shares;
  int32_t* slots;
  char *rooms, *end;
  long each;

  Layout(const StackCall& call, long count, int threads, char* at) {
    auto take = [&](long bytes) {
      char* here = at;
      at += (bytes + 63) / 64 * 64;
      return here;
    };
    long all = count * call.span_count, listed_slots = 0, most = 0;
    for (long b = 0; b < call.span_count; b++) {
      if (!call.spans[b].choice) continue;
      listed_slots += slots_of(call.spans[b]) * call.heads;
      most = call.spans[b].choice->pages > most ? call.spans[b].choice->pages : most;
    }
    layers = (ChoosingLayer*)take(count * sizeof(ChoosingLayer));
    pages = (Pages*)take(all * sizeof(Pages)), listed = (Listed*)take(all * sizeof(Listed));
    choices = (const Choice**)take(all * sizeof(Choice*)), shares = (Shares*)take(3 * count * sizeof(Shares));
    slots = (int32_t*)take(listed_slots * 4);
    PagesCall shape = {nullptr, 0, call.heads_q, call.heads, call.dim, BFLOAT, threads};
    each = pages_room(shape, most);
    rooms = take(threads * each);
    end = at;
  }
};

// One span in one layer; its lists are the same memory in all layers.
void fill(const StackCall& call, const StackSpan& own, const Span& span, long layer, int32_t* slots, Pages& pages,
          Listed& listed) {
  const Choice& choice = *own.choice;
  const int64_t* vectors = choice.vectors + 3 * layer;
  pages = {span.q,      (void*)vectors[0], (void*)vectors[1], vectors[2], vectors[2],
           choice.pages, choice.size,       choice.chosen,     choice.pages * choice.size, own.n, slots};
  listed = {span.q, span.k, span.v, span.out, span.q_row, span.k_head, span.k_row, span.v_head, span.v_row, 1,
            slots_of(own), slots, span.k_scale, span.v_scale, span.k_scale_head, span.v_scale_head};
}

}  // namespace

long choosing_room(const StackCall& call, long first, long count, int threads) {
  bool any = false;
  for (long b = 0; b < call.span_count; b++)
    for (long i = first; i < first + count; i++) any = any || chooses(call.spans[b], i);
  return any ? (long)(sizeof(Choosing) + 64 + (long)Layout(call, count, threads, nullptr).end) : 0;
}

Choosing* make_choosing(const StackCall& call, long first, long count, int threads, const Span* spans, void* room) {
  Choosing* choosing = (Choosing*)room;
  Layout at(call, count, threads, (char*)room + (sizeof(Choosing) + 63) / 64 * 64);
  *choosing = {at.layers, count, at.rooms, at.each};
  for (long i = 0; i < count; i++) {
    ChoosingLayer& layer = at.layers[i];
    long some = 0;
    int32_t* slots = at.slots;
    for (long b = 0; b < call.span_count; b++) {
      const StackSpan& own = call.spans[b];
      if (!own.choice) continue;
      if (chooses(own, first + i)) {
        fill(call, own, spans[i * call.span_count + b], first + i, slots, at.pages[some], at.listed[some]);
        at.choices[some++] = own.choice;
      }
      slots += slots_of(own) * call.heads;
    }
    layer.pages = {at.pages, some, call.heads_q, call.heads, call.dim, BFLOAT, threads};
    layer.listed = {at.listed, some, call.heads_q, call.heads, call.dim, BFLOAT, threads,
                    call.layers[first + i].scale};
    layer.choices = at.choices, layer.shares = at.shares + 3 * i;
    at.pages += some, at.listed += some, at.choices += some;
  }
  return choosing;
}

// work(layer, the plan's number, whether it is the first with it)
template <class Work> static void each_plan(const Choosing& choosing, const Work& work) {
  for (long i = 0; i < choosing.count; i++) {
    long j = 0;
    while (!alike(choosing.layers[j], choosing.layers[i])) j++;
    work(choosing.layers[i], choosing.layers[j]);
  }
}

long choosing_plans(const Choosing& choosing) {
  long bytes = 0;
  each_plan(choosing, [&](const ChoosingLayer& layer, const ChoosingLayer& same) {
    if (&layer == &same) bytes += (listed_room(layer.listed) + 63) / 64 * 64;
  });
  return bytes;
}

void plan_choosing(Choosing& choosing, int threads, char* at) {
  each_plan(choosing, [&](ChoosingLayer& layer, const ChoosingLayer& same) {
    if (&layer == &same) {
      layer.plan = plan_listed(layer.listed, at);
      at += (listed_room(layer.listed) + 63) / 64 * 64;
    } else {
      layer.plan = same.plan;
    }
    layer.shares[0] = Shares(layer.pages.count * layer.pages.heads, threads);
    share_listed(layer.plan, threads, layer.shares + 1);
  });
}

void read_chosen(const Choosing& choosing, long index, int thread, int all) {
  const ChoosingLayer& layer = choosing.layers[index];
  if (!layer.pages.count) return;
  long heads = layer.pages.heads;
  for (long from, to; layer.shares[0].take(from, to);)
    for (long i = from; i < to; i++) {
      seal(layer, i / heads, i % heads);
      choose_of_head(layer.pages, layer.pages.spans[i / heads], i % heads, choosing.rooms + thread * choosing.each);
    }
  wait_for_all(all);
  listed_part(layer.listed, layer.plan, layer.shares + 1, all);
}
