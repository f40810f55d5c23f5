// What every slot gets of the weights of a span's rows: their attention once more, without its values.
//
// Keys are turned once per call. Queries then pass over them for the log-sum-exp of their scores; after that every block
// of slots has all queries pass over it and sums up their weights, in order: the result does not depend on the threads.
#include <math.h>

#include "curves.h"
#include "parts.h"
#include "turned.h"

namespace {

constexpr long TOGETHER = 4 * FIT;  // queries that pass over keys together

long queries_of(const ReceivedCall& call) { return call.rows * (call.heads_q / call.heads); }
long blocks_of(const ReceivedCall& call) { return (call.n + KEYS - 1) / KEYS; }
long tiles_of(const ReceivedCall& call) { return (queries_of(call) + TOGETHER - 1) / TOGETHER; }

// Some queries of a KV head, numbered row * group + query head of the group, and their scores over a block of slots.
struct Tile {
  const ReceivedCall& call;
  Softcap cap;
  long first = 0, count = 0;
  alignas(64) float queries[TOGETHER][MOST_DIM], scores[TOGETHER][KEYS];

  explicit Tile(const ReceivedCall& call) : call(call), cap(call.softcap, call.scale) {}

  long group() const { return call.heads_q / call.heads; }
  long end(long i) const { return call.ends[(first + i) / group()]; }
  long begin(long i) const { return call.window && end(i) > call.window ? end(i) - call.window : 0; }

  template <class T> void take(long head, long tile) {
    first = tile * TOGETHER;
    count = queries_of(call) - first < TOGETHER ? queries_of(call) - first : TOGETHER;
    for (long i = 0; i < count; i++) {
      long row = (first + i) / group(), own = head * group() + (first + i) % group();
      widen_query((const T*)call.q + row * call.q_row + own * call.q_head, call.dim, queries[i]);
    }
  }

  // Whether any of them sees something of the block at `slot`: their scores, times scale, -inf where one sees nothing.
  bool score(const float (*keys)[KEYS], long slot) {
    if (end(count - 1) <= slot || begin(0) >= slot + KEYS) return false;
    score_turned(queries, keys, call.dim, KEYS, count, scores);
    for (long i = 0; i < count; i++) {
      for (long j = 0; j < KEYS; j += LANES) {
        F score = load<F>(scores[i] + j);
        store(scores[i] + j, (cap ? cap(score) : score) * (float)call.scale);
      }
      if (begin(i) > slot || end(i) < slot + KEYS) keep_between(scores[i], begin(i) - slot, end(i) - slot);
    }
    return true;
  }
};

template <class T> void turn_block(const ReceivedCall& call, long head, long slot, float (*to)[KEYS]) {
  const T* k = (const T*)call.k + head * call.k_head;
  for (long j = 0; j < KEYS; j += LANES)
    turn_rows(Some<T>(k, call.k_row, slot + j, call.n).rows, call.dim, (float(*)[KEYS])(to[0] + j));
}

// lse[i] = the log of the sum of the exponentials of what a query's scores are; infinite if it sees nothing
void sum_up(Tile& tile, const float (*keys)[KEYS], float* lse) {
  float top[TOGETHER], total[TOGETHER] = {};
  for (long i = 0; i < tile.count; i++) top[i] = -INFINITY;
  for (long b = 0; b < blocks_of(tile.call); b++, keys += tile.call.dim) {
    if (!tile.score(keys, b * KEYS)) continue;
    for (long i = 0; i < tile.count; i++) {
      F highest = splat(top[i]), sums = {};
      for (long j = 0; j < KEYS; j += LANES) highest = max(load<F>(tile.scores[i] + j), highest);
      float now = most(highest);
      if (now == -INFINITY) continue;
      for (long j = 0; j < KEYS; j += LANES) sums += exp_negative(load<F>(tile.scores[i] + j) - now);
      total[i] = total[i] * expf(top[i] - now) + sum(sums);
      top[i] = now;
    }
  }
  for (long i = 0; i < tile.count; i++) lse[i] = top[i] == -INFINITY ? INFINITY : top[i] + logf(total[i]);
}

// What the slots of a block get of all queries of their head.
template <class T>
void share_out(Tile& tile, const float (*keys)[KEYS], long head, long slot, const float* lse, float* out) {
  F got[KEYS / LANES] = {};
  for (long t = 0; t < tiles_of(tile.call); t++) {
    long last = (t + 1) * TOGETHER < queries_of(tile.call) ? (t + 1) * TOGETHER : queries_of(tile.call);
    if (tile.call.ends[(last - 1) / tile.group()] <= slot) continue;
    tile.take<T>(head, t);
    if (!tile.score(keys, slot)) continue;
    for (long i = 0; i < tile.count; i++)
      for (long j = 0; j < KEYS / LANES; j++)
        got[j] += exp_negative(load<F>(tile.scores[i] + j * LANES) - lse[tile.first + i]);
  }
  float found[KEYS];
  for (long j = 0; j < KEYS / LANES; j++) store(found + j * LANES, got[j]);
  memcpy(out + slot, found, (tile.call.n - slot < KEYS ? tile.call.n - slot : KEYS) * 4);
}

template <class T> void run(const ReceivedCall& call, int threads) {
  long blocks = blocks_of(call), tiles = tiles_of(call), words = call.heads * blocks * call.dim;
  auto keys = (float(*)[KEYS])scratch(OF_ATTENTION, (words * KEYS + call.heads * tiles * TOGETHER) * 4);
  float* lse = keys[words];
  Shares turns(call.heads * blocks, threads), sums(call.heads * tiles, threads), shares(call.heads * blocks, threads);
  together(threads, [&](int, int all) {
    for (long from, to; turns.take(from, to);)
      for (long i = from; i < to; i++) turn_block<T>(call, i / blocks, i % blocks * KEYS, keys + i * call.dim);
    wait_for_all(all);
    Tile tile(call);
    for (long from, to; sums.take(from, to);)
      for (long i = from; i < to; i++) {
        long head = i % call.heads, own = tiles - 1 - i / call.heads;  // the longest first
        tile.take<T>(head, own);
        sum_up(tile, keys + head * blocks * call.dim, lse + (head * tiles + own) * TOGETHER);
      }
    wait_for_all(all);
    for (long from, to; shares.take(from, to);)
      for (long i = from; i < to; i++) {
        long head = i % call.heads, b = i / call.heads;
        const float* mine = lse + head * tiles * TOGETHER;
        share_out<T>(tile, keys + (head * blocks + b) * call.dim, head, b * KEYS, mine, call.out + head * call.n);
      }
  });
}

}  // namespace

API void received(const ReceivedCall* call) {
  int threads = enough(call->threads, 2 * call->n * call->rows * call->heads_q * call->dim);
  if (call->kind == FLOAT) run<float>(*call, threads);
  else run<bf16>(*call, threads);
}
