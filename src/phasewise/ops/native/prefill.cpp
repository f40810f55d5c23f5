// Attention of many consecutive rows, the last of their sequence: causal, or so by blocks.
//
// Keys and values are packed once per call; blocks of queries then pass over them with a running softmax. Blocks of
// slots start at fixed slots and every sum has one order, so a row's result depends neither on the other rows nor on
// the number of threads.
#include <stdlib.h>

#include "pass.h"
#if MATRIX_UNIT
#include "amx_pass.h"
#endif

namespace {

using namespace prompt;

constexpr long TILES = 8;  // that pass together over a block of slots

constexpr float LOWEST = -1e30f;  // below any score; a row may meet blocks of which it sees nothing before others

// A call as one KV head has it, laid out in `own` if the heads lie by themselves: then its slots are those there are.
const PrefillCall& of_head(const PrefillCall& call, long h, PrefillCall& own) {
  if (!call.unequal) return call;
  const Head& head = call.unequal[h];
  own = call;
  long size = head.k_scale ? 1 : call.kind == FLOAT ? 4 : 2;
  own.k = (const char*)head.k + head.begin * call.k_row * size, own.k_head = 0;
  own.v = (const char*)head.v + head.begin * call.v_row * size, own.v_head = 0;
  own.k_scale = head.k_scale ? head.k_scale + head.begin : nullptr, own.k_scale_head = 0;
  own.v_scale = head.v_scale ? head.v_scale + head.begin : nullptr, own.v_scale_head = 0;
  own.n -= head.begin;
  if (head.window) own.sight.window = head.window, own.sight.sinks = head.sinks;
  return own;
}

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

// The first slot of a row's window.
long begin_of(const PrefillCall& call, long row) {
  long end = call.n - call.rows + row + 1;
  return call.sight.window && end > call.sight.window ? end - call.sight.window : 0;
}

// Whether the blocks that are passed over together from block b on lie between the sinks and a window.
template <class T> bool unseen(long sinks, long begin, long b) {
  return b * KEYS >= sinks && (b + PASS<T>) * KEYS <= begin;
}

// The log-sum-exp of scores whose largest is 2^top; -inf of none.
float lse_of(float top, float total) { return total == 0 ? -INFINITY : (top + log2f(total)) * 0.6931471806f; }

// ---- jobs: the queries `first` .. of a KV head, numbered row * group + query head of the group
template <class T> struct Job {
  const PrefillCall& call;
  const Shape& shape;
  long head, first, count;
  Tile<T> tiles[TILES];

  Job(const PrefillCall& call, const Shape& shape, long head, long first, long count)
      : call(call), shape(shape), head(head), first(first), count(count) {}

  long group() const { return call.heads_q / call.heads; }
  long row(long query) const { return query / group(); }
  long head_q(long query) const { return head * group() + query % group(); }
  long size(long tile) const { return count - tile * TILE<T> < TILE<T> ? count - tile * TILE<T> : TILE<T>; }

  void start() {
    long used = (call.dim + PER_WORD<T> - 1) / PER_WORD<T>;
    for (long i = 0; i < count; i++) {
      Tile<T>& tile = tiles[i / TILE<T>];
      long r = i % TILE<T>, query = first + i;
      tile.top = splat(LOWEST), tile.total[r] = F{};
      tile.limit[r] = call.n - call.rows + own_seen(call.sight, call.rows, row(query));
      tile.begin[r] = begin_of(call, row(query));
      tile.sinks = call.sight.window ? call.sight.sinks : 0, tile.turns = call.sight.far && tile.sinks;
      tile.biased = call.sight.bias;
      if (tile.biased) tile.bias[r] = call.sight.bias[head_q(query)] / (float)call.scale;
      const T* q = (const T*)call.q + row(query) * call.q_row + head_q(query) * call.q_head;
      const T* far = (const T*)call.sight.far + (row(query) * call.heads_q + head_q(query)) * call.dim;
      pack_words(q, call.dim, 1, tile.q + r * shape.words);
      memset(tile.q + r * shape.words + used, 0, (shape.words - used) * 4);
      tile.sees[r] = call.sees ? call.sees + head * call.sees_head + row(query) * call.sees_row : nullptr;
      if (tile.turns) pack_words(far, call.dim, 1, tile.far + r * shape.words);
      if (tile.turns) memset(tile.far + r * shape.words + used, 0, (shape.words - used) * 4);
      memset(tile.sum + r * shape.padded, 0, shape.padded * 4);
    }
  }

  void read(const float* packed) {
    Scaling scaling = {(float)(call.scale * 1.4426950408889634), {call.softcap, call.scale}};
    for (long b = 0; b < shape.blocks; b += PASS<T>, packed += PASS<T> * shape.block) {
      bool any = false;
      for (long t = 0; t * TILE<T> < count; t++) {
        if (tiles[t].limit[size(t) - 1] <= b * KEYS) continue;
        any = true;
        if (unseen<T>(tiles[t].sinks, tiles[t].begin[0], b) || !any_seen(tiles[t], size(t), b * KEYS)) continue;
        pass_over(size(t), tiles[t], shape, packed, b * KEYS, scaling);
      }
      if (!any) return;
    }
  }

  void finish() {
    for (long i = 0; i < count; i++) {
      const Tile<T>& tile = tiles[i / TILE<T>];
      long r = i % TILE<T>, d = 0;
      T* out = (T*)call.out + (row(first + i) * call.heads_q + head_q(first + i)) * call.dim;
      const float* from = tile.sum + r * shape.padded;
      float total = sum(tile.total[r]), scale = total == 0 ? 0 : 1 / total;  // a row that sees nothing reads 0
      if (call.lse) call.lse[row(first + i) * call.heads_q + head_q(first + i)] = lse_of(tile.top[r], total);
      for (; d + LANES <= call.dim; d += LANES) store_floats(out + d, load<F>(from + d) * scale);
      for (; d < call.dim; d++) put(out + d, from[d] * scale);
    }
  }
};

// How a KV head's queries are cut into jobs: for the threads asked for, whether there are so many or not.
struct Cut {
  long queries, size, jobs;

  explicit Cut(const PrefillCall& call) : queries(call.rows * (call.heads_q / call.heads)) {
    long tile = call.kind == FLOAT ? TILE<float> : TILE<bf16>;
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
      const PrefillCall& own = of_head(call, head, room);
      if (b * KEYS >= own.n || unseen<T>(own.sight.sinks, begin_of(own, 0), b / PASS<T> * PASS<T>)) continue;
      pack<T>(of_block(own, b * KEYS, room), shape, head, b * KEYS, packed + i * shape.block);
    }
}

template <class T> void read_all(const PrefillCall& call, const float* packed, Shares& reads) {
  Shape shape = shape_of<T>(call.dim, call.n);
  Cut cut(call);
  PrefillCall room;
  if (ON_TILES<T>) start_tiles(SIDE);
  for (long from, to; reads.take(from, to);)
    for (long i = from; i < to; i++) {
      long head = i % call.heads, first = (cut.jobs - 1 - i / call.heads) * cut.size;  // the longest first
      long left = cut.queries - first;
      const PrefillCall& own = of_head(call, head, room);
      Job<T> job(own, shape, head, first, left < cut.size ? left : cut.size);
      job.start();
      job.read(packed + head * shape.blocks * shape.block);
      job.finish();
    }
  if (ON_TILES<T>) stop_tiles();
}

Shape shape_for(const PrefillCall& call) {
  return call.kind == FLOAT ? shape_of<float>(call.dim, call.n) : shape_of<bf16>(call.dim, call.n);
}

}  // namespace

long prefill_room(const PrefillCall& call) {
  Shape shape = shape_for(call);
  return call.heads * shape.blocks * shape.block * 4;
}

Shares prefill_packs(const PrefillCall& call, int threads) { return {call.heads * shape_for(call).blocks, threads}; }

Shares prefill_reads(const PrefillCall& call, int threads) { return {Cut(call).jobs * call.heads, threads}; }

void prefill_pack(const PrefillCall& call, void* packed, Shares* packs) {
  if (call.kind == FLOAT) pack_all<float>(call, (float*)packed, *packs);
  else pack_all<bf16>(call, (float*)packed, *packs);
}

void prefill_read(const PrefillCall& call, const void* packed, Shares* reads) {
  if (call.kind == FLOAT) read_all<float>(call, (const float*)packed, *reads);
  else read_all<bf16>(call, (const float*)packed, *reads);
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
