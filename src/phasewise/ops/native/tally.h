// What a single row attends to: its scores, kept on the way, become weights of the slots at the end of each head.
#pragma once
#include "noise.h"
#include "plan.h"

// Scores of a query over a block, without those of slots that are gone, kept for later. Blocks of rows that lie packed
// begin anywhere, and what lies behind one may be another thread's: no more is written than there is.
static void note(const Tally& tally, long head, long head_q, long slot, long to, float* scores) {
  const uint8_t* gone = tally.gone + head * tally.gone_head + slot;
  float* kept = tally.scores + head_q * tally.room + slot;
  long count = to - slot < KEYS ? to - slot : KEYS, j = 0;
  for (; j + LANES <= count; j += LANES) {
    F found = select(load_floats((const int8_t*)gone + j) != 0.0f, splat(-INFINITY), load<F>(scores + j));
    store(scores + j, found), store(kept + j, found);
  }
  for (; j < count; j++) kept[j] = scores[j] = gone[j] ? -INFINITY : scores[j];
}

constexpr long PAIR = 2 * LANES;  // slots whose noise is drawn together

// Positions of PAIR slots, as noise counts them. The last of all is the row's own.
static void keys_of(const Tempered& how, const Places& places, long head, long slot, long n, int32_t* keys) {
  const int64_t* at = places.at + head * places.head + slot;
  long before = n - 1 - slot < PAIR ? n - 1 - slot : PAIR;
  if (!places.at)
    for (long j = 0; j < PAIR; j++) keys[j] = (int32_t)(slot + j);
  else if (before == PAIR)
    for (long j = 0; j < PAIR; j++) keys[j] = (int32_t)at[j];
  else
    for (long j = 0; j < before; j++) keys[j] = (int32_t)at[j];
  if (before < PAIR) keys[before] = (int32_t)how.row;
}

// The kept scores of a KV head's queries as they are tempered. -> the largest of each
template <bool NOISY> static void temper(const Tally& tally, long head, long group, long n, float scale, float* top) {
  const Tempered& how = *tally.tempered;
  float inverse = (float)how.inverse;
  F highest[QUERIES];
  for (F& one : highest) one = splat(-INFINITY);
  I lane;
  for (int j = 0; j < LANES; j++) lane[j] = j;
  for (long slot = 0; slot < n; slot += PAIR) {
    U words[2][4], zero = {};
    int32_t keys[PAIR] = {};
    if (NOISY) keys_of(how, how.places[tally.layer], head, slot, n, keys);
    for (long g = 0; g < group; g++) {
      float* at = tally.scores + (head * group + g) * tally.room + slot;
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
static void put_weights(const AttentionCall& call, const Job& job, const Tally& tally, const State& s) {
  long n = call.spans[job.span].n, group = job.count;
  float top[QUERIES], total[QUERIES], scale = (float)call.scale;
  float *scores = tally.scores + job.head * group * tally.room, *weights = tally.weights + job.head * tally.room;
  memcpy(top, s.top, sizeof top), memcpy(total, s.total, sizeof total);
  const Tempered* how = tally.tempered;
  if (how) {
    if (how->noisy) temper<true>(tally, job.head, group, n, scale, top);
    else temper<false>(tally, job.head, group, n, scale, top);
  }
  for (long g = 0; how && g < group; g++) {
    F all = {};
    for (long slot = 0; slot < n; slot += LANES) {
      float* at = scores + g * tally.room + slot;
      F found = exp_negative(load<F>(at) - top[g]);
      store(at, found), all += found;
    }
    total[g] = sum(all);
  }
  for (long slot = 0; slot < n; slot += LANES) {
    F sum = {};
    for (long g = 0; g < group; g++) {
      F found = load<F>(scores + g * tally.room + slot);
      sum += (how ? found : exp_negative(found * scale - top[g])) / total[g];
    }
    store(weights + slot, sum);
  }
}
