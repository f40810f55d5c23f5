// Attention of many consecutive rows, the last of their sequence: causal, or so by blocks.
//
// Keys and values are packed once per call; blocks of queries then pass over them with a running softmax. A row reads
// what the kernel for few rows (attention.cpp) would have it read, to the bit: see softmax.h for the order of its sums.
// The matrix unit has an order of its own: there a row's result depends on whether it is one of few or of many.
#include <stdlib.h>

#include "pass.h"
#include "plan.h"
#include "tile.h"
#if MATRIX_UNIT
#include "amx_pass.h"
#endif

namespace {

using namespace prompt;

constexpr long TILES = 8;  // that pass together over a block of slots

static_assert(SHARED_BLOCK == KEYS);

// A call as its block of slots from `slot` on has it, laid out in `own` if the block is shared.
const PrefillCall& of_block(const PrefillCall& call, long slot, PrefillCall& own) {
  if (slot >= call.shared_slots) return call;
  const Planes& block = call.shared[slot / SHARED_BLOCK];
  own = call;
  long size = block.k_scale ? 1 : call.kind == FLOAT ? 4 : 2;
  own.k = (const char*)block.k - slot * call.k_row * size, own.k_head = block.head;
  own.v = (const char*)block.v - slot * call.v_row * size, own.v_head = block.head;
  if (!block.k_scale) return own;
  own.k_scale = block.k_scale - slot, own.v_scale = block.v_scale - slot;
  own.k_scale_head = own.v_scale_head = block.scale_head;
  return own;
}

// A call as one KV head has it. Slots are counted from the first that it has, `begin`; blocks and parts of them are not.
struct OfHead {
  PrefillCall call;
  long begin, before, blocks;  // `before`: how many slots there would be in the first block before that one

  OfHead(const PrefillCall& all, long h) : call(all), begin(0) {
    if (all.unequal) take(all.unequal[h]);
    before = MATRIX_UNIT ? 0 : begin % KEYS;
    blocks = (call.n + before + KEYS - 1) / KEYS;
  }

  // The slots of block b are those from here to where the next one begins, or the last.
  long slot(long b) const { return b ? b * KEYS - before : 0; }
  long end(long b) const { return slot(b + 1) < call.n ? slot(b + 1) : call.n; }
  long last(long b, long some) const { return end(b + some - 1 < blocks ? b + some - 1 : blocks - 1); }
  bool begins_part(long b) const { return b && (begin + slot(b)) % PART == 0; }

  // The first slot of a row's window.
  long window_at(long row) const {
    long end = call.n - call.rows + row + 1;
    return call.sight.window && end > call.sight.window ? end - call.sight.window : 0;
  }

  // Whether `some` blocks from b on lie between the sinks and a window that begins at `window`.
  bool unseen(long window, long b, long some) const { return slot(b) >= call.sight.sinks && slot(b + some) <= window; }

 private:
  void take(const Head& head) {
    begin = head.begin;
    long size = head.k_scale ? 1 : call.kind == FLOAT ? 4 : 2;
    call.k = (const char*)head.k + begin * call.k_row * size, call.k_head = 0;
    call.v = (const char*)head.v + begin * call.v_row * size, call.v_head = 0;
    call.k_scale = head.k_scale ? head.k_scale + begin : nullptr, call.k_scale_head = 0;
    call.v_scale = head.v_scale ? head.v_scale + begin : nullptr, call.v_scale_head = 0;
    call.n -= begin;
    if (head.window) call.sight.window = head.window, call.sight.sinks = head.sinks;
  }
};

// ---- jobs: the queries `first` .. of a KV head, numbered row * group + query head of the group
template <class T> struct Work {
  const OfHead& own;
  const PrefillCall& call;
  const Shape& shape;
  long head, first, count;
  Tile<T> tiles[TILES];

  Work(const OfHead& own, const Shape& shape, long head, long first, long count)
      : own(own), call(own.call), shape(shape), head(head), first(first), count(count) {}

  long group() const { return call.heads_q / call.heads; }
  long row(long query) const { return query / group(); }
  long head_q(long query) const { return head * group() + query % group(); }
  long size(long tile) const { return count - tile * TILE<T> < TILE<T> ? count - tile * TILE<T> : TILE<T>; }

  void start() {
    for (long i = 0; i < count; i++) {
      Tile<T>& tile = tiles[i / TILE<T>];
      long r = i % TILE<T>, query = first + i;
      tile.limit[r] = call.n - call.rows + own_seen(call.sight, call.rows, row(query));
      tile.begin[r] = own.window_at(row(query));
      tile.sinks = call.sight.window ? call.sight.sinks : 0, tile.turns = call.sight.far && tile.sinks;
      tile.biased = call.sight.bias;
      if (tile.biased) tile.bias[r] = call.sight.bias[head_q(query)] / (float)call.scale;
      typedef Number<T> N;
      tile.q.take(r, (const N*)call.q + row(query) * call.q_row + head_q(query) * call.q_head, shape);
      const N* far = (const N*)call.sight.far + (row(query) * call.heads_q + head_q(query)) * call.dim;
      if (tile.turns) tile.far.take(r, far, shape);
      tile.sees[r] = call.sees ? call.sees + head * call.sees_head + row(query) * call.sees_row : nullptr;
      tile.top_before[r] = -INFINITY, tile.total_before[r] = 0;
      memset(tile.sum_before + r * shape.padded, 0, shape.padded * 4);
    }
    for (long t = 0; t * TILE<T> < count; t++) tiles[t].start(size(t), shape);
  }

  void read(const float* packed) {
    Scaling scaling = {(float)call.scale, {call.softcap, call.scale}};
    for (long b = 0; b < own.blocks; b += PASS<T>, packed += PASS<T> * shape.block) {
      const long slot = own.slot(b), end = own.last(b, PASS<T>);
      bool any = false;
      for (long t = 0; t * TILE<T> < count; t++) {
        Tile<T>& tile = tiles[t];
        if (tile.limit[size(t) - 1] <= slot) continue;
        any = true;
        if (own.begins_part(b)) tile.keep(size(t), shape), tile.start(size(t), shape);
        if (own.unseen(tile.begin[0], b, PASS<T>) || !any_seen(tile, size(t), slot, end)) continue;
        pass_over(size(t), tile, shape, packed, slot, end, scaling);
      }
      if (!any) return;
    }
  }

  void finish() {
    typedef Number<T> N;
    for (long t = 0; t * TILE<T> < count; t++) tiles[t].keep(size(t), shape);
    for (long i = 0; i < count; i++) {
      const Tile<T>& tile = tiles[i / TILE<T>];
      long r = i % TILE<T>, d = 0, whole = call.dim / PER_STEP<N> * PER_STEP<N>;
      N* out = (N*)call.out + (row(first + i) * call.heads_q + head_q(first + i)) * call.dim;
      const float* from = tile.sum_before + r * shape.padded;
      float total = tile.total_before[r];
      float scale = share_of(total, tile.top_before[r], call.sink_scores, head_q(first + i));
      if (call.lse) call.lse[row(first + i) * call.heads_q + head_q(first + i)] = tile.top_before[r] + logf(total);
      for (; d < whole; d += LANES) store_floats(out + d, load<F>(from + d) * scale);
      for (; d < call.dim; d++) put(out + d, from[d] * scale);
    }
  }
};

// How a KV head's queries are cut into jobs: for the threads asked for, whether there are so many or not.
struct Cut {
  long queries, size, jobs;

  explicit Cut(const PrefillCall& call) : queries(call.rows * (call.heads_q / call.heads)) {
    long tile = call.kind == FLOAT ? TILE<float> : TILE<bf16>;  // which levels have, too
    long tiles = queries * call.heads / (tile * call.threads * 4) + 1;  // of a job: enough jobs for all
    size = (tiles < TILES ? tiles : TILES) * tile;
    jobs = (queries + size - 1) / size;
  }
};

template <class T> void pack_all(const PrefillCall& call, float* packed, Shares& packs) {
  Shape shape = shape_of<T>(call.dim, call.n);
  PrefillCall room;
  for (long from, to; packs.take(from, to);)
    for (long i = from; i < to; i++) {
      long b = i % shape.blocks, head = i / shape.blocks;
      const OfHead own(call, head);
      if (b >= own.blocks || own.unseen(own.window_at(0), b / PASS<T> * PASS<T>, PASS<T>)) continue;
      const PrefillCall& its = of_block(own.call, own.slot(b), room);
      long slot = own.slot(b), size = its.k_scale ? 1 : sizeof(Number<T>);
      Side keys = {(const char*)its.k + (head * its.k_head + slot * its.k_row) * size, its.k_row,
                   its.k_scale ? its.k_scale + head * its.k_scale_head + slot : nullptr};
      Side values = {(const char*)its.v + (head * its.v_head + slot * its.v_row) * size, its.v_row,
                     its.v_scale ? its.v_scale + head * its.v_scale_head + slot : nullptr};
      pack<T>(keys, values, own.end(b) - slot, shape, packed + i * shape.block);
    }
}

template <class T> void read_all(const PrefillCall& call, const float* packed, Shares& reads) {
  Shape shape = shape_of<T>(call.dim, call.n);
  Cut cut(call);
  if (ON_TILES<T>) start_tiles(SIDE);
  for (long from, to; reads.take(from, to);)
    for (long i = from; i < to; i++) {
      long head = i % call.heads, first = (cut.jobs - 1 - i / call.heads) * cut.size;  // the longest first
      long left = cut.queries - first;
      const OfHead own(call, head);
      Work<T> work(own, shape, head, first, left < cut.size ? left : cut.size);
      work.start();
      work.read(packed + head * shape.blocks * shape.block);
      work.finish();
    }
  if (ON_TILES<T>) stop_tiles();
}

// What keys and values are packed as decides what runs: work(a pointer to such a number).
template <class Run> auto by_kind(const PrefillCall& call, const Run& run) {
  if (call.kind == FLOAT) return run((float*)nullptr);
#if DOT_INSTRUCTIONS && !MATRIX_UNIT
  bool scaled = call.unequal ? call.unequal->k_scale : call.k_scale;
  if (scaled && by_levels<bf16>(call.dim)) return run((int8_t*)nullptr);
#endif
  return run((bf16*)nullptr);
}

}  // namespace

long prefill_room(const PrefillCall& call) {
  Shape shape = call.kind == FLOAT ? shape_of<float>(call.dim, call.n) : shape_of<bf16>(call.dim, call.n);
  return call.heads * shape.blocks * shape.block * 4;  // levels take less
}

Shares prefill_packs(const PrefillCall& call, int threads) {
  return {call.heads * ((call.n + KEYS - 1) / KEYS), threads};
}

Shares prefill_reads(const PrefillCall& call, int threads) { return {Cut(call).jobs * call.heads, threads}; }

void prefill_pack(const PrefillCall& call, void* packed, Shares* packs) {
  by_kind(call, [&](auto* as) { pack_all<std::remove_pointer_t<decltype(as)>>(call, (float*)packed, *packs); });
}

void prefill_read(const PrefillCall& call, const void* packed, Shares* reads) {
  by_kind(call, [&](auto* as) { read_all<std::remove_pointer_t<decltype(as)>>(call, (const float*)packed, *reads); });
}

API void prefill(const PrefillCall* call) {
  int threads = enough(call->threads, call->n * call->rows * call->heads_q * call->dim);
  void* packed = scratch(OF_ATTENTION, prefill_room(*call));
  Shares packs = prefill_packs(*call, threads), reads = prefill_reads(*call, threads);
  together(threads, [&](int, int all) {
    prefill_pack(*call, packed, &packs);
    wait_for_all(all);
    prefill_read(*call, packed, &reads);
  });
}
