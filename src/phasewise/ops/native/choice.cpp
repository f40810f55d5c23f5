#include "choice.h"

#include "listed.h"
#include "votes.h"

namespace {

struct ChoosingLayer {
  Voter* voters;
  long voting;
  ListedCall listed;
  ListedPlan* plan;  // layers in which the same spans read lists share one
  Shares* shares;    // scores, votes, lists, and the two of listed attention
};

constexpr long SHARES = 5;

long scores(const Voter& own) { return own.layer->way == GIVEN ? 0 : scoring_parts(*own.choice, own.heads); }
long votes(const Voter& own) { return own.layer->way == GIVEN ? 0 : voting_parts(*own.choice, own.heads); }
long heads(const Voter& own) { return own.heads; }

template <class Count> Shares share(const ChoosingLayer& layer, int threads, const Count& parts) {
  long all = 0;
  for (long v = 0; v < layer.voting; v++) all += parts(layer.voters[v]);
  return Shares(all, threads);
}

// work(voter, part of it) for some parts
template <class Count, class Work>
void each_part(const ChoosingLayer& layer, Shares& shares, const Count& parts, const Work& work) {
  for (long from, to; shares.take(from, to);) {
    const Voter* voter = layer.voters;
    long before = 0;
    for (long i = from; i < to; i++) {
      while (i - before >= parts(*voter)) before += parts(*voter++);
      work(*voter, i - before);
    }
  }
}

}  // namespace

struct Choosing {
  ChoosingLayer* layers;
  long count;
};

static bool alike(const ListedCall& a, const ListedCall& b) {
  if (a.count != b.count) return false;
  for (long i = 0; i < a.count; i++)
    if (a.spans[i].slots != b.spans[i].slots) return false;
  return true;
}

namespace {

struct Memory {  // of a span's choice, the same in all layers
  float *logits, *states;
  int32_t *numbers, *slots;
  float *held, *rest;
};

struct Layout {  // all of it lies one after the other; `at` null: only measured
  ChoosingLayer* layers;
  Voter* voters;
  Listed* listed;
  Shares* shares;
  Memory* spans;
  char* end;

  Layout(const StackCall& call, long count, char* at) {
    bool kept = at;
    auto take = [&](long bytes) {
      char* here = at;
      at += (bytes + 63) / 64 * 64;
      return here;
    };
    long all = count * call.span_count;
    layers = (ChoosingLayer*)take(count * sizeof(ChoosingLayer));
    voters = (Voter*)take(all * sizeof(Voter)), listed = (Listed*)take(all * sizeof(Listed));
    shares = (Shares*)take(SHARES * count * sizeof(Shares));
    spans = (Memory*)take(call.span_count * sizeof(Memory));
    for (long b = 0; b < call.span_count; b++) {
      if (!call.spans[b].choice) continue;
      const Choice& choice = *call.spans[b].choice;
      Memory own;
      own.logits = (float*)take(call.heads_q * logits_of(choice) * 4);
      own.states = (float*)take(call.heads_q * states_of(choice) * 4);
      own.numbers = (int32_t*)take(call.heads * numbers_of(choice) * 4);
      own.slots = choice.lists;
      if (!own.slots) own.slots = (int32_t*)take(call.heads * listed_of(choice, call.spans[b].n) * 4);
      own.held = (float*)take(call.heads_q * 4), own.rest = (float*)take(call.heads * call.dim * 4);
      if (kept) spans[b] = own;
    }
    end = at;
  }
};

}  // namespace

long choosing_room(const StackCall& call, long first, long count) {
  bool any = false;
  for (long b = 0; b < call.span_count; b++)
    for (long i = first; i < first + count; i++)
      any = any || chooses(call.spans[b], i) || lists(call.spans[b], i);
  return any ? (long)(sizeof(Choosing) + 64 + (long)Layout(call, count, nullptr).end) : 0;
}

Choosing* make_choosing(const StackCall& call, long first, long count, int threads, const Span* spans, void* room) {
  Choosing* choosing = (Choosing*)room;
  Layout at(call, count, (char*)room + (sizeof(Choosing) + 63) / 64 * 64);
  *choosing = {at.layers, count};
  for (long i = 0; i < count; i++) {
    ChoosingLayer& layer = at.layers[i];
    long voting = 0, listing = 0;
    for (long b = 0; b < call.span_count; b++) {
      const StackSpan& own = call.spans[b];
      if (!own.choice) continue;
      const Span& span = spans[i * call.span_count + b];
      const Memory& memory = at.spans[b];
      Listed rows = {span.q, span.k, span.v, span.out, span.q_row, span.k_head, span.k_row, span.v_head, span.v_row, 1,
                     listed_of(*own.choice, own.n), memory.slots, span.k_scale, span.v_scale, span.k_scale_head,
                     span.v_scale_head};
      if (own.choice->layers[first + i].sums) rows.held = memory.held, rows.rest = memory.rest;
      if (chooses(own, first + i))
        at.voters[voting++] = {own.choice, own.choice->layers + first + i, rows, call.heads,
                               call.heads_q / call.heads, call.dim, own.n, call.layers[first + i].scale,
                               memory.logits, memory.states, memory.numbers};
      if (lists(own, first + i)) at.listed[listing++] = rows;
    }
    layer.voters = at.voters, layer.voting = voting;
    layer.listed = {at.listed, listing, call.heads_q, call.heads, call.dim, BFLOAT, threads,
                    call.layers[first + i].scale};
    layer.shares = at.shares + SHARES * i;
    layer.shares[0] = share(layer, threads, scores), layer.shares[1] = share(layer, threads, votes);
    layer.shares[2] = share(layer, threads, heads);
    at.voters += voting, at.listed += listing;
  }
  return choosing;
}

// work(layer, the first with the same plan)
template <class Work> static void each_plan(const Choosing& choosing, const Work& work) {
  for (long i = 0; i < choosing.count; i++) {
    long j = 0;
    while (!alike(choosing.layers[j].listed, choosing.layers[i].listed)) j++;
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
    share_listed(layer.plan, threads, layer.shares + 3);
  });
}

void read_chosen(const Choosing& choosing, long index, int all) {
  const ChoosingLayer& layer = choosing.layers[index];
  if (layer.voting) {
    each_part(layer, layer.shares[0], scores, score_part);
    wait_for_all(all);
    each_part(layer, layer.shares[1], votes, vote_part);
    wait_for_all(all);
    each_part(layer, layer.shares[2], heads, list_part);
    wait_for_all(all);
  }
  if (layer.listed.count) listed_part(layer.listed, layer.plan, layer.shares + 3, all);
}
