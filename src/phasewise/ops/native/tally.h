// What a single row attends to: its scores, kept on the way, become weights of the slots at the end of each head.
#pragma once
#include "noise.h"
#include "plan.h"

// Scores of a query over a block, without those of slots that are gone, kept for later.
static void note(const Tally& tally, long head, long head_q, long slot, long to, float* scores) {
  const uint8_t* gone = tally.gone + head * tally.gone_head + slot;
  float* kept = tally.scores + head_q * tally.room + slot;
  for (long j = 0; j < KEYS && slot + j < to; j += LANES) {
    F found = select(load_floats((const int8_t*)gone + j) != 0.0f, splat(-INFINITY), load<F>(scores + j));
    store(scores + j, found), store(kept + j, found);
  }
}

// Positions of the slots from `slot` on, as noise counts them. The last of all is the row's own.
static U keys_of(const Tempered& how, const Places& places, long head, long slot, long n) {
  int32_t found[LANES];
  for (long j = 0; j < LANES; j++) {
    long at = slot + j;
    found[j] = (int32_t)(at >= n - 1 ? how.row : places.at ? places.at[head * places.head + at] : at);
  }
  return load<U>(found);
}

// The kept scores of a KV head's queries as they are tempered. -> the largest of each
static void temper(const Tally& tally, long head, long group, long n, float scale, float* top) {
  const Tempered& how = *tally.tempered;
  float inverse = (float)how.inverse;
  F highest[QUERIES];
  for (F& one : highest) one = splat(-INFINITY);
  I lane;
  for (int j = 0; j < LANES; j++) lane[j] = j;
  for (long slot = 0; slot < n; slot += LANES) {
    U words[4], zero = {}, keys = how.noisy ? keys_of(how, how.places[tally.layer], head, slot, n) : zero;
    for (long g = 0; g < group; g++) {
      float* at = tally.scores + (head * group + g) * tally.room + slot;
      F found = load<F>(at) * scale;
      if (how.noisy && g % 4 == 0) {  // draws of four queries come together
        words[0] = keys, words[1] = zero + (uint32_t)how.row;
        words[2] = zero + (uint32_t)(head * ((group + 3) / 4) + g / 4), words[3] = zero + (uint32_t)tally.layer;
        philox(words, (uint32_t)how.seed, (uint32_t)((uint64_t)how.seed >> 32));
      }
      if (how.noisy) found += gumbel_of(words[g % 4]);
      found = select(lane < (int32_t)(n - slot), found * inverse, splat(-INFINITY));
      store(at, found), highest[g] = max(found, highest[g]);
    }
  }
  for (long g = 0; g < group; g++) top[g] = most(highest[g]);
}

// What a KV head's slots get of the row, from the kept scores of all its query heads; `s` is their softmax.
static void put_weights(const AttentionCall& call, const Job& job, const Tally& tally, const State& s) {
  long n = call.spans[job.span].n;
  float top[QUERIES], total[QUERIES], scale = (float)call.scale;
  const float* scores = tally.scores + job.head * job.count * tally.room;
  memcpy(top, s.top, sizeof top), memcpy(total, s.total, sizeof total);
  if (tally.tempered) {
    temper(tally, job.head, job.count, n, scale, top);
    scale = 1;
    for (long g = 0; g < job.count; g++) {
      F all = {};
      for (long slot = 0; slot < n; slot += LANES) all += exp_negative(load<F>(scores + g * tally.room + slot) - top[g]);
      total[g] = sum(all);
    }
  }
  for (long slot = 0; slot < n; slot += LANES) {
    F sum = {};
    for (long g = 0; g < job.count; g++)
      sum += exp_negative(load<F>(scores + g * tally.room + slot) * scale - top[g]) / total[g];
    store(tally.weights + job.head * tally.room + slot, sum);
  }
}
