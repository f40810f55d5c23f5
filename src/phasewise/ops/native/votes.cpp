#include "votes.h"

#include "lines.h"
#include "pool.h"
#include "ranking.h"
#include "vectors.h"

namespace {

constexpr long VOTES = 1024;        // that are counted at a time
constexpr long MOST_VOTING = 1024;  // queries that have a say in a list
constexpr int COARSE = 13;          // bits by which candidates are sifted: of floats, all of the exponent

inline long chunks(long count, long size) { return (count + size - 1) / size; }
// Vectors of a part: one whose queries look for their largest numbers first has more.
inline long some_vectors(const Choice& choice) { return choice.largest ? 2048 : 512; }
inline long chunks(const Choice& choice) { return chunks(choice.end - choice.begin, some_vectors(choice)); }
// Candidates of a part.
inline long some_units(const Choice& choice) {
  long each = VOTES / (choice.each + choice.before);
  return each > 1 ? each : 1;
}
inline long padded(long count) { return (count + LANES - 1) / LANES * LANES; }

inline F scale_of(const Voter& own) { return splat((float)(own.layer->scale ? own.layer->scale : own.scale)); }
inline long chunk_of(const Choice& choice, long vector) { return (vector - choice.begin) / some_vectors(choice); }
// Where the vectors of a chunk begin and end.
inline long begin_of(const Choice& choice, long chunk) { return choice.begin + chunk * some_vectors(choice); }
inline long end_of(const Choice& choice, long chunk) {
  long end = begin_of(choice, chunk + 1);
  return end < choice.end ? end : choice.end;
}
inline float* tops_of(const Voter& own, long query) { return own.states + query * states_of(*own.choice); }
inline float* sums_of(const Voter& own, long query) { return tops_of(own, query) + padded(chunks(*own.choice)); }

// The largest of a chunk's products, times the scale, and the sum of the weights beside it; products become logits, or,
// by shares, the weights.
void sum_up(const Voter& own, long query, long chunk) {
  const Choice& choice = *own.choice;
  const long from = begin_of(choice, chunk), to = end_of(choice, chunk);
  float* logits = own.logits + query * logits_of(choice) - choice.begin;
  F scale = scale_of(own), tops = splat(-INFINITY), sums = {};
  I lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  auto there = [&](long j) { return lane < (int32_t)(to - j); };
  for (long j = from; j < to; j += LANES) {
    F logit = select(there(j), load<F>(logits + j) * scale, splat(-INFINITY));
    store(logits + j, logit);  // of those beyond, too: no other part begins within a register
    tops = max(logit, tops);
  }
  float top = most(tops);
  for (long j = from; j < to; j += LANES) {
    F weight = exp_negative(load<F>(logits + j) - (top == -INFINITY ? 0 : top));
    if (choice.rule == SHARE) store(logits + j, weight);
    sums += weight;
  }
  tops_of(own, query)[chunk] = top, sums_of(own, query)[chunk] = sum(sums);
}

// ---- votes
// The logarithm of the sum of the weights of a query's logits.
float total_of(const Voter& own, long query) {
  const long count = chunks(*own.choice);
  const float *tops = tops_of(own, query), *sums = sums_of(own, query);
  float top = -INFINITY, total = 0;
  for (long c = 0; c < count; c++) top = tops[c] > top ? tops[c] : top;
  for (long c = 0; c < count; c++)
    if (tops[c] > -INFINITY) total += expf(tops[c] - top) * sums[c];
  return top + logf(total);
}

// Who has a say in a head's list, or in that of all.
struct Electors {
  const Voter& own;
  const Choice& choice;
  const long first;
  long count;
  float less[MOST_VOTING];

  Electors(const Voter& own, long head)
      : own(own), choice(*own.choice), first(choice.joint ? 0 : head * own.group),
        count(choice.joint ? own.heads * own.group : own.group) {
    for (long g = 0; g < count; g++) less[g] = choice.rule == PROMISE ? 0 : total_of(own, first + g);
  }

  float factor(long g, long chunk) const { return expf(tops_of(own, first + g)[chunk] - less[g]); }

  // What weights of a chunk are multiplied with, to become shares of all.
  void factors_of(long chunk, float* to) const {
    for (long g = 0; g < count; g += LANES) {
      F share;
      for (long i = 0; i < LANES; i++) share[i] = g + i < count ? tops_of(own, first + g + i)[chunk] - less[g + i] : 0;
      store(to + g, exp_negative(share));
    }
  }

  // Votes for the vectors from .. to-1 of a chunk; some more are written. What is no number is read.
  void vote(long chunk, long from, long to, float* into) const {
    const long wide = logits_of(choice);
    const float* logits = own.logits + first * wide - choice.begin;
    if (choice.rule == SHARE) {
      alignas(64) float factors[MOST_VOTING + LANES];
      factors_of(chunk, factors);
      for (long j = from; j < to; j += LANES) {
        F sums = {};
        for (long g = 0; g < count; g++) sums += load<F>(logits + g * wide + j) * factors[g];
        store(into + j - from, select(sums == sums, sums, splat(INFINITY)));
      }
      return;
    }
    for (long j = from; j < to; j += LANES) {
      F best = splat(-INFINITY);
      I odd = {};
      for (long g = 0; g < count; g++) {
        F value = load<F>(logits + g * wide + j) - less[g];
        odd |= value != value, best = max(value, best);
      }
      store(into + j - from, select(odd, splat(INFINITY), best));
    }
  }

  // The same by logarithms, where logits are as they were multiplied.
  void vote_exactly(long from, long to, float* into) const {
    const long wide = logits_of(choice);
    const float* logits = own.logits + first * wide - choice.begin;
    const F scale = scale_of(own);
    for (long j = from; j < to; j += LANES) {
      F best = splat(-INFINITY), sums = {};
      for (long g = 0; g < count; g++) best = max(load<F>(logits + g * wide + j) * scale - less[g], best);
      F top = select(best > -INFINITY, best, F{});
      for (long g = 0; g < count; g++) sums += exp_negative(load<F>(logits + g * wide + j) * scale - less[g] - top);
      best += log_of(max(splat(1.0f), sums));
      store(into + j - from, select(sums == sums, best, splat(INFINITY)));
    }
  }
};

// Whether every candidate has one vector, its own.
inline bool one_each(const Choice& choice) {
  bool all = choice.at >= choice.begin && choice.at + choice.units <= choice.end;
  return choice.each == 1 && !choice.before && all;
}

// The numbers of the candidates from .. to-1, at most `VOTES` vectors; `put(from, to, into)` gives the votes of vectors.
template <class Put> void rank(const Choice& choice, long from, long to, int32_t* numbers, const Put& put) {
  long first = choice.at + from * choice.each - choice.before, last = choice.at + to * choice.each;
  first = first > choice.begin ? first : choice.begin, last = last < choice.end ? last : choice.end;
  float votes[VOTES + LANES], best[VOTES];
  put(first, last, votes);
  if (one_each(choice)) return number(votes, to - from, numbers);
  for (long u = from; u < to; u++) {
    long begin = choice.at + u * choice.each - choice.before, end = choice.at + (u + 1) * choice.each;
    float most = -INFINITY;
    for (long j = begin > first ? begin : first; j < end && j < last; j++)
      most = votes[j - first] > most ? votes[j - first] : most;
    best[u - from] = most;
  }
  number(best, to - from, numbers);
}

constexpr float TINY = 1e-30f;  // shares below are told apart by their logarithms

// The same of all candidates by logarithms: everything is multiplied once more, and left as it was.
void rank_exactly(const Voter& own, long head, int32_t* numbers) {
  const Choice& choice = *own.choice;
  const long heads = choice.joint ? own.heads : 1, some = some_units(choice);
  const Electors electors(own, head);
  for (long h = head; h < head + heads; h++)
    (choice.largest ? multiply_lines : multiply)(own, h, choice.begin, choice.end);
  for (long from = 0; from < choice.units; from += some) {
    long to = from + some < choice.units ? from + some : choice.units;
    rank(choice, from, to, numbers + from,
         [&](long first, long last, float* into) { electors.vote_exactly(first, last, into); });
  }
  for (long g = 0; g < electors.count; g++)
    for (long c = 0; c < chunks(choice); c++) sum_up(own, electors.first + g, c);
}

// The best of a head's candidates, or of all heads'.
int32_t* list_units(const Voter& own, long head, int32_t* slots) {
  const Choice& choice = *own.choice;
  int32_t* numbers = own.numbers + head * numbers_of(choice);
  if (!choice.chosen || choice.chosen >= choice.units)
    return list_best(numbers, nullptr, choice.units, choice.chosen, choice.first, choice.size, slots);
  int32_t least = threshold(numbers, choice.units, choice.chosen, COARSE);
  if (choice.rule == SHARE && least < number(TINY)) {
    rank_exactly(own, head, numbers);
    least = threshold(numbers, choice.units, choice.chosen, COARSE);
  }
  int32_t *which = numbers + padded(choice.units), *values = which + padded(choice.units);
  long some = which_reach(numbers, choice.units, least, which);
  for (long p = 0; p < some; p++) values[p] = numbers[which[p]];
  return list_best(values, which, some, choice.chosen, choice.first, choice.size, slots);
}

}  // namespace

long logits_of(const Choice& choice) { return padded(choice.end - choice.begin) + LANES; }
long states_of(const Choice& choice) { return 2 * padded(chunks(choice)); }
long numbers_of(const Choice& choice) { return 3 * padded(choice.units) + LANES; }
long listed_of(const Choice& choice, long n) {
  return choice.first + choice.chosen * choice.size + n - choice.first - choice.units * choice.size;
}

long scoring_parts(const Choice& choice, long heads) { return heads * chunks(choice); }

void score_part(const Voter& own, long part) {
  const Choice& choice = *own.choice;
  long head = part / chunks(choice), chunk = part % chunks(choice);
  long from = begin_of(choice, chunk), to = end_of(choice, chunk);
  (choice.largest ? make_lines : make)(own, head, from > choice.known ? from : choice.known, to);
  (choice.largest ? multiply_lines : multiply)(own, head, from, to);
  for (long g = 0; choice.rule != PROMISE && g < own.group; g++) sum_up(own, head * own.group + g, chunk);
}

long voting_parts(const Choice& choice, long heads) {
  return (choice.joint ? 1 : heads) * chunks(choice.units, some_units(choice));
}

void vote_part(const Voter& own, long part) {
  const Choice& choice = *own.choice;
  long some = some_units(choice), count = chunks(choice.units, some), head = part / count, from = part % count * some;
  long to = from + some < choice.units ? from + some : choice.units;
  const Electors electors(own, head);
  rank(choice, from, to, own.numbers + head * numbers_of(choice) + from, [&](long first, long last, float* into) {
    for (long chunk = chunk_of(choice, first), end; first < last; chunk++, into += end - first, first = end) {
      end = end_of(choice, chunk) < last ? end_of(choice, chunk) : last;
      electors.vote(chunk, first, end, into);
    }
  });
}

// The share of the weight that a head's list holds, by query.
static void hold(const Voter& own, long head) {
  const Choice& choice = *own.choice;
  const Electors electors(own, head);
  const int32_t* slots = own.rows.slots + head * own.rows.count;
  for (long g = 0; g < own.group; g++) {
    const float* weights = own.logits + (head * own.group + g) * logits_of(choice) - choice.begin;
    float held = 0, factor = 0;
    for (long i = 0, chunk = -1; i < own.rows.count; i++) {
      if (long here = chunk_of(choice, slots[i]); here != chunk) chunk = here, factor = electors.factor(g, here);
      held += weights[slots[i]] * factor;
    }
    ((float*)own.rows.held)[head * own.group + g] = held;
  }
}

void list_part(const Voter& own, long head) {
  const Choice& choice = *own.choice;
  if (choice.queries) {
    long wide = own.group * own.dim, layer = own.layer - choice.layers;
    memcpy(choice.queries + (layer * own.heads + head) * wide, (const bf16*)own.rows.q + head * wide, wide * 2);
  }
  if (choice.joint && head) return;
  int32_t* slots = (int32_t*)own.rows.slots + head * own.rows.count;
  for (long slot = 0; slot < choice.first; slot++) *slots++ = (int32_t)slot;
  if (own.layer->way == GIVEN) {
    memcpy(slots, (const int32_t*)own.layer->low + head * choice.chosen, choice.chosen * 4);
    slots += choice.chosen;
  } else {
    slots = list_units(own, head, slots);
  }
  for (long slot = choice.first + choice.units * choice.size; slot < own.n; slot++) *slots++ = (int32_t)slot;
  if (choice.beside) choice.beside[(own.layer - choice.layers) * own.heads + head] = fetched_beside(own, head);
  if (own.layer->sums) hold(own, head), take_rest(own, head);
  for (long h = 1; choice.joint && h < own.heads; h++)
    memcpy((int32_t*)own.rows.slots + h * own.rows.count, own.rows.slots, own.rows.count * 4);
}

// ---- single rows of one layer
// work(part) for all parts
template <class Work> static void share_out(long parts, int threads, const Work& work) {
  Shares shares(parts, threads);
  together(threads, [&](int, int) {
    for (long from, to; shares.take(from, to);)
      for (long i = from; i < to; i++) work(i);
  });
}

API void choose_slots(const VotesCall* call) {
  long vectors = 0, most[3] = {};  // one span's memory is the next one's: it stays near
  for (long b = 0; b < call->count; b++) {
    const Choice& choice = *call->spans[b].choice;
    const long own[3] = {logits_of(choice), states_of(choice), numbers_of(choice)};
    for (int i = 0; i < 3; i++) most[i] = own[i] > most[i] ? own[i] : most[i];
    vectors += (choice.end - choice.begin) * call->heads_q * choice.width;
  }
  float* logits = (float*)scratch(OF_ATTENTION, 4 * (call->heads_q * (most[0] + most[1]) + call->heads * most[2]));
  float* states = logits + call->heads_q * most[0];
  int32_t* numbers = (int32_t*)(states + call->heads_q * most[1]);
  int threads = enough(call->threads, vectors);
  for (long b = 0; b < call->count; b++) {
    const VotesSpan& own = call->spans[b];
    const Choice& choice = *own.choice;
    Listed rows = {};
    rows.q = own.q, rows.k = own.k, rows.k_head = own.k_head, rows.k_row = own.k_row;
    rows.k_scale = own.k_scale, rows.k_scale_head = own.k_scale_head;
    rows.v = own.v, rows.v_head = own.v_head, rows.v_row = own.v_row;
    rows.v_scale = own.v_scale, rows.v_scale_head = own.v_scale_head;
    rows.count = listed_of(choice, own.n), rows.slots = own.slots, rows.held = own.held, rows.rest = own.rest;
    const Voter voter = {&choice,   choice.layers, rows,   call->heads, call->heads_q / call->heads,
                         call->dim, own.n,         0,      logits,      states,
                         numbers};
    share_out(scoring_parts(choice, call->heads), threads, [&](long part) { score_part(voter, part); });
    share_out(voting_parts(choice, call->heads), threads, [&](long part) { vote_part(voter, part); });
    share_out(call->heads, threads, [&](long head) { list_part(voter, head); });
  }
}
