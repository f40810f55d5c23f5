// What every slot gets of the weights of a span's rows: their attention once more, without its values.
//
// Keys and queries are packed once per call. Where the log-sum-exp of the scores is not known, queries pass over the keys
// for it; then every block of slots has all queries pass over it and sums up their weights, in order: the result does not
// depend on the threads.
#include <math.h>

#include "noise.h"
#include "parts.h"
#include "pass.h"

namespace {

using namespace prompt;

constexpr int EACH = LANES == 4 ? 4 : REGISTERS == 32 ? 6 : 5;  // queries whose scores over a block fit the registers
constexpr long TILES = 4;                                       // of so many, that pass over keys together
constexpr float LOG2_E = 1.4426950408889634f;

typedef F Scores[EACH][KEYS / LANES];

// 2^x for x <= 0, 0 below -127; relative error below 2e-7, NaN to NaN
inline F power_of_two(F x) {
  x = max(splat(-127.0f), x);
  F shifted = x + MAGIC;
  F r = x - (shifted - MAGIC);
  F p = splat(1.325346313e-3f);
  p = p * r + 9.672367489e-3f;
  p = p * r + 5.550799800e-2f;
  p = p * r + 2.402222360e-1f;
  p = p * r + 6.931468877e-1f;
  p = p * r + 1.0f;
  return (F)((I)p + ((I)shifted << 23));
}

template <class T> struct Work {
  const ReceivedCall& call;
  const Shape shape;
  const Scaling scaling;
  const long group, queries, tiles;  // of a KV head; queries are numbered row * group + query head of the group
  float *keys, *packed, *sums;       // by head: blocks of keys, tiles of queries, their log-sum-exp in powers of two

  explicit Work(const ReceivedCall& call)
      : call(call), shape(shape_of<T>(call.dim, call.n)), scaling{(float)call.scale * LOG2_E, {call.softcap, call.scale}},
        group(call.heads_q / call.heads), queries(call.rows * group), tiles((queries + EACH - 1) / EACH) {
    long of_keys = shape.blocks * shape.key_block, of_queries = tiles * EACH * shape.words;
    keys = (float*)scratch(OF_ATTENTION, call.heads * (of_keys + of_queries + tiles * EACH) * 4);
    packed = keys + call.heads * of_keys, sums = packed + call.heads * of_queries;
  }

  long head_q(long head, long query) const { return head * group + query % group; }
  long last(long tile) const { return (tile + 1) * EACH < queries ? (tile + 1) * EACH - 1 : queries - 1; }
  long end(long query) const { return call.ends[query / group]; }
  long begin(long query) const { return call.window && end(query) > call.window ? end(query) - call.window : 0; }
  float* sum_of(long head, long query) const { return sums + head * tiles * EACH + query; }

  void pack_block(long head, long b) const {
    long count = call.n - b * KEYS < KEYS ? call.n - b * KEYS : KEYS;
    float* to = keys + (head * shape.blocks + b) * shape.key_block;
    memset(to, 0, shape.key_block * 4);
    pack_keys((const T*)call.k + head * call.k_head + b * KEYS * call.k_row, call.k_row, count, call.dim, to);
  }

  void pack_queries(long head, long tile) const {
    float* to = packed + (head * tiles + tile) * EACH * shape.words;
    memset(to, 0, EACH * shape.words * 4);
    for (long query = tile * EACH; query <= last(tile); query++, to += shape.words) {
      pack_words((const T*)call.q + query / group * call.q_row + head_q(head, query) * call.q_head, call.dim, 1, to);
      if (!call.lse) continue;
      float lse = call.lse[query / group * call.heads_q + head_q(head, query)];
      *sum_of(head, query) = lse == -INFINITY ? INFINITY : lse * LOG2_E;  // of one that sees nothing, who gives nothing
    }
  }

  // Scores that are still to be multiplied with the call's scale get noise. Draws of four query heads come together:
  // `words` are those of the query before, if there is one.
  void add_noise(long head, long query, bool first, long slot, U (&words)[KEYS / LANES][4], F* scores) const {
    const Noise& noise = *call.noise;
    long row = query / group, g = query % group, own = noise.heads[head] * ((group + 3) / 4) + g / 4;
    const int32_t* keys = noise.keys + head * noise.keys_head + slot;
    for (long i = 0; (first || g % 4 == 0) && i < KEYS / LANES; i++) {
      int32_t last[LANES] = {};
      long left = call.n - slot - i * LANES;
      memcpy(last, keys + i * LANES, (left < 0 ? 0 : left < LANES ? left : LANES) * 4);
      U zero = {};
      words[i][0] = load<U>(last), words[i][1] = zero + (uint32_t)noise.rows[row];
      words[i][2] = zero + (uint32_t)own, words[i][3] = zero + (uint32_t)noise.layer;
    }
    if (first || g % 4 == 0) philox(words, (uint32_t)noise.seeds[row], (uint32_t)((uint64_t)noise.seeds[row] >> 32));
    for (long i = 0; i < KEYS / LANES; i++) scores[i] += gumbel_of(words[i][g % 4]) * (float)(1 / call.scale);
  }

  // The scores of a tile over a block, as powers of two, -inf where one sees nothing; false: none of them sees anything.
  bool score_block(long head, long tile, long b, Scores& scores) const {
    long first = tile * EACH, slot = b * KEYS;
    if (end(last(tile)) <= slot || begin(first) >= slot + KEYS) return false;
    score<T, EACH>(packed + (head * tiles + tile) * EACH * shape.words, shape,
                   keys + (head * shape.blocks + b) * shape.key_block, scores);
    cap_all(scaling.cap, EACH, scores);
    U words[KEYS / LANES][4];
    for (long query = first; query <= last(tile); query++) {
      F* own = scores[query - first];
      float scale = call.inverse ? scaling.scale * call.inverse[query / group] : scaling.scale;
      if (call.noise) add_noise(head, query, query == first, slot, words, own);
      for (long i = 0; i < KEYS / LANES; i++) own[i] *= scale;
      if (end(query) < slot + KEYS) hide(own, end(query) - slot);
      if (begin(query) > slot) hide_between(own, 0, begin(query) - slot);
    }
    return true;
  }

  // The log-sum-exp of tiles from `tile` on; infinite for a query that sees nothing.
  void sum_up(long head, long tile) const {
    long some = tiles - tile < TILES ? tiles - tile : TILES;
    float top[TILES * EACH], total[TILES * EACH] = {};
    for (float& one : top) one = -INFINITY;
    Scores scores;
    for (long b = begin(tile * EACH) / KEYS; b < shape.blocks && end(last(tile + some - 1)) > b * KEYS; b++)
      for (long t = 0; t < some; t++) {
        if (!score_block(head, tile + t, b, scores)) continue;
        for (long i = 0; i <= last(tile + t) - (tile + t) * EACH; i++) {
          float &highest = top[t * EACH + i], &all = total[t * EACH + i];
          F highest_of = scores[i][0], found = {};
          for (long j = 1; j < KEYS / LANES; j++) highest_of = max(highest_of, scores[i][j]);
          float now = most(highest_of) > highest ? most(highest_of) : highest;
          if (now == -INFINITY) continue;
          for (long j = 0; j < KEYS / LANES; j++) found += power_of_two(scores[i][j] - now);
          all = all * exp2f(highest - now) + sum(found), highest = now;
        }
      }
    for (long i = 0; i < some * EACH && tile * EACH + i < queries; i++)
      *sum_of(head, tile * EACH + i) = top[i] == -INFINITY ? INFINITY : top[i] + log2f(total[i]);
  }

  // What the slots of a block get of all queries of their head.
  void share_out(long head, long b) const {
    F got[KEYS / LANES] = {};
    Scores scores;
    for (long tile = 0; tile < tiles; tile++) {
      if (!score_block(head, tile, b, scores)) continue;
      for (long query = tile * EACH; query <= last(tile); query++) {
        float from = *sum_of(head, query);
        for (long j = 0; j < KEYS / LANES; j++) got[j] += power_of_two(scores[query - tile * EACH][j] - from);
      }
    }
    float found[KEYS];
    memcpy(found, got, sizeof found);
    long count = call.n - b * KEYS < KEYS ? call.n - b * KEYS : KEYS;
    memcpy(call.out + head * call.n + b * KEYS, found, count * 4);
  }
};

template <class T> void run(const ReceivedCall& call, int threads) {
  Work<T> work(call);
  long heads = call.heads, jobs = (work.tiles + TILES - 1) / TILES;
  Shares blocks(heads * work.shape.blocks, threads), queries(heads * work.tiles, threads);
  Shares sums(call.lse ? 0 : heads * jobs, threads), shares(heads * work.shape.blocks, threads);
  auto each = [](Shares& taken, auto one) {
    for (long from, to; taken.take(from, to);)
      for (long i = from; i < to; i++) one(i);
  };
  together(threads, [&](int, int all) {
    each(blocks, [&](long i) { work.pack_block(i % heads, i / heads); });
    each(queries, [&](long i) { work.pack_queries(i % heads, i / heads); });
    wait_for_all(all);
    if (!call.lse) {
      each(sums, [&](long i) { work.sum_up(i % heads, (jobs - 1 - i / heads) * TILES); });  // the longest first
      wait_for_all(all);
    }
    each(shares, [&](long i) { work.share_out(i % heads, i / heads); });
  });
}

}  // namespace

API void received(const ReceivedCall* call) {
  int threads = enough(call->threads, 2 * call->n * call->rows * call->heads_q * call->dim);
  if (call->kind == FLOAT) run<float>(*call, threads);
  else run<bf16>(*call, threads);
}
