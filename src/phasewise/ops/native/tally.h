// What a single row attends to: its scores, kept on the way, become weights of the slots at the end of each head.
#pragma once
#include "noise.h"
#include "plan.h"

typedef AttentionCall Call;

// What a KV head's slots get of a row, each plane where slot 0 would be; scores are those of its first query head.
struct Weighed {
  const uint8_t* gone;
  float *weights, *scores;
  long room;  // numbers between the scores of two query heads

  Weighed(const Call& call, const Job& job) {
    const Tally& tally = *call.spans[job.span].tally;
    const Line& line = tally.lines[tally.heads > 1 ? 0 : job.head];
    long at = line.from * tally.heads + (tally.heads > 1 ? job.head * line.length : 0);
    gone = tally.gone + line.from - line.begin, weights = tally.weights + at - line.begin;
    scores = tally.scores + (at - tally.lines->from * tally.heads) * group(call) - line.begin;
    room = line.length;
  }
};

// Scores of a query over a block, without those of slots that are gone, kept for later. Blocks of rows that lie packed
// begin anywhere, and what lies behind one may be another thread's: no more is written than there is.
static void note(const Weighed& own, long query, long slot, long to, float* scores) {
  const uint8_t* gone = own.gone + slot;
  float* kept = own.scores + query * own.room + slot;
  long count = to - slot < KEYS ? to - slot : KEYS, j = 0;
  for (; j + LANES <= count; j += LANES) {
    F found = select(load_floats((const int8_t*)gone + j) != 0.0f, splat(-INFINITY), load<F>(scores + j));
    store(scores + j, found), store(kept + j, found);
  }
  for (; j < count; j++) kept[j] = scores[j] = gone[j] ? -INFINITY : scores[j];
}

constexpr long PAIR = 2 * LANES;  // slots whose noise is drawn together

// Positions of PAIR slots, as noise counts them. The last of all is the row's own.
static void keys_of(const Tempered& how, const Places& places, long slot, long n, int32_t* keys) {
  const int64_t* at = places.at + slot;
  long before = n - 1 - slot < PAIR ? n - 1 - slot : PAIR;
  if (!places.at)
    for (long j = 0; j < PAIR; j++) keys[j] = (int32_t)(slot - places.first + j);
  else if (before == PAIR)
    for (long j = 0; j < PAIR; j++) keys[j] = (int32_t)at[j];
  else
    for (long j = 0; j < before; j++) keys[j] = (int32_t)at[j];
  if (before < PAIR) keys[before] = (int32_t)how.row;
}

// The kept scores of a KV head's queries, from slot `from` on, as they are tempered. -> the largest of each
template <bool NOISY> static void temper(const Call& call, const Job& job, long from, float* top) {
  const Tally& tally = *call.spans[job.span].tally;
  const Tempered& how = *tally.tempered;
  const Weighed own(call, job);
  const long head = job.head, group = job.count, n = call.spans[job.span].n;
  const float scale = (float)call.scale, inverse = (float)how.inverse;
  F highest[QUERIES];
  for (F& one : highest) one = splat(-INFINITY);
  I lane;
  for (int j = 0; j < LANES; j++) lane[j] = j;
  for (long slot = from; slot < n; slot += PAIR) {
    U words[2][4], zero = {};
    int32_t keys[PAIR] = {};
    if (NOISY) keys_of(how, how.places[tally.layer * call.heads + head], slot, n, keys);
    for (long g = 0; g < group; g++) {
      float* at = own.scores + g * own.room + slot;
      if (NOISY && g % 4 == 0) {  // draws of four queries come together
        for (int i = 0; i < 2; i++) {
          words[i][0] = load<U>(keys + i * LANES), words[i][1] = zero + (uint32_t)how.row;
          words[i][2] = zero + (uint32_t)(head * ((group + 3) / 4) + g / 4), words[i][3] = zero + (uint32_t)tally.layer;
        }
        philox(words, (uint32_t)how.seed, (uint32_t)((uint64_t)how.seed >> 32));
      }
      for (int i = 0; i < 2; i++) {
        F found = load<F>(at + i * LANES) * scale;
        if (NOISY) found += gumbel_of(words[i][g % 4]);
        found = select(lane < (int32_t)(n - slot - i * LANES), found * inverse, splat(-INFINITY));
        store(at + i * LANES, found), highest[g] = max(found, highest[g]);
      }
    }
  }
  for (long g = 0; g < group; g++) top[g] = most(highest[g]);
}

// What a KV head's slots get of the row, from the kept scores of all its query heads; `s` is their softmax.
static void put_weights(const Call& call, const Job& job, const State& s) {
  const Weighed own(call, job);
  const long from = begin_of(call.spans[job.span], job.head), n = call.spans[job.span].n, group = job.count;
  float top[QUERIES], total[QUERIES], scale = (float)call.scale;
  memcpy(top, s.top, sizeof top), memcpy(total, s.total, sizeof total);
  const Tempered* how = call.spans[job.span].tally->tempered;
  if (how) (how->noisy ? temper<true> : temper<false>)(call, job, from, top);
  for (long g = 0; how && g < group; g++) {
    F all = {};
    for (long slot = from; slot < n; slot += LANES) {
      float* at = own.scores + g * own.room + slot;
      F found = exp_negative(load<F>(at) - top[g]);
      store(at, found), all += found;
    }
    total[g] = sum(all);
  }
  for (long slot = from; slot < n; slot += LANES) {
    F sum = {};
    for (long g = 0; g < group; g++) {
      F found = load<F>(own.scores + g * own.room + slot);
      sum += (how ? found : exp_negative(found * scale - top[g])) / total[g];
    }
    store(own.weights + slot, sum);
  }
}
