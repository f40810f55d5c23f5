// Attention of a list of spans in one call, each span's rows over its own keys and values where they lie.
//
// A job is a few (row, query head) pairs that share one KV head. Long jobs are cut into parts at fixed slots and joined
// by their log-sum-exp, so a row's result depends neither on the other spans nor on the number of threads. Slots that
// spans have in common are read first, level by level, for the queries of all of them; what a query has summed by then
// is kept, and its own span's job goes on from there. Where commons end at multiples of KEYS, no bit changes by that.
#include "classed.h"
#include "curves.h"
#include "levels.h"
#include "mended.h"
#include "parts.h"
#include "plan.h"
#include "rows.h"
#include "sealed.h"
#include "softmax.h"
#include "tally.h"
#include "turned.h"
#include "weighing.h"

typedef AttentionCall Call;

// ---- a job's queries
static Row row_of(const Call& call, const Job& job, long i) {
  long row = (job.first + i) / group(call);
  return job.rows ? job.rows[row] : Row{job.span, row};
}

static long head_of(const Call& call, const Job& job, long i) {
  return job.head * group(call) + (job.first + i) % group(call);
}

// Where a query's state is kept: the largest score, the sum of weights, the weighted sum of values.
static float* kept(const Call& call, const Plan& plan, const Job& job, long i, long place) {
  Row at = row_of(call, job, i);
  long state = (at.row * call.heads_q + head_of(call, job, i)) * parts_in_common(call.spans[at.span]) + place;
  return plan.kept + plan.kept_at[at.span] + state * (call.dim + 2);
}

static void begin(const Call& call, const Plan& plan, const Job& job, const Part& part, State& s) {
  for (long i = 0; i < job.count; i++) {
    const float* from = part.goes_on ? kept(call, plan, job, i, part.place) : nullptr;
    s.top[i] = from ? from[0] : -INFINITY, s.total[i] = from ? from[1] : 0;
    if (from) memcpy(s.sum[i], from + 2, call.dim * 4);
    else memset(s.sum[i], 0, call.dim * 4);
  }
}

static void keep(const Call& call, const Plan& plan, const Job& job, const Part& part, const State& s) {
  for (long i = 0; i < job.count; i++) {
    float* to = kept(call, plan, job, i, part.place);
    to[0] = s.top[i], to[1] = s.total[i];
    memcpy(to + 2, s.sum[i], call.dim * 4);
  }
}

// ---- reading
// Scores of slots that a query may not see become -inf.
static void hide(const Span& span, const Job& job, long row, long slot, long to, float* scores) {
  long end = limit(span, row), begin = start(span, job.window, row), own = span.n - span.rows - span.first;
  keep_between(scores, job.sinks > slot ? 0 : begin - slot, (end < to ? end : to) - slot);
  for (long at = job.sinks; at > slot && at < begin && at < slot + KEYS; at++) scores[at - slot] = -INFINITY;
  if (!span.sees || slot + KEYS <= own) return;
  for (long j = 0; j < KEYS; j++) {
    long at = slot + j;
    if (at >= own && at < end && !span.sees[row * (span.first + span.rows) + at - own]) scores[j] = -INFINITY;
  }
}

// Keys and values of one head as they lie, from some slot on; strides and the length of a row count bytes.
struct Lines {
  const char *k, *v;
  long k_row, v_row, bytes;
  const bf16 *k_worth, *v_worth;  // of levels

  Lines(const Call& call, const Job& job, long slot) {
    const Span& span = call.spans[job.span];
    long size = span.k_scale ? 1 : call.kind == FLOAT ? 4 : 2;
    k_row = span.k_row * size, v_row = span.v_row * size, bytes = call.dim * size;
    k = (const char*)span.k + job.head * span.k_head * size + slot * k_row;
    v = (const char*)span.v + job.head * span.v_head * size + slot * v_row;
    k_worth = span.k_scale ? span.k_scale + job.head * span.k_scale_head + slot : nullptr;
    v_worth = span.v_scale ? span.v_scale + job.head * span.v_scale_head + slot : nullptr;
    if (!span.heads) return;
    const Head& head = span.heads[job.head];
    k = (const char*)head.k + slot * k_row, v = (const char*)head.v + slot * v_row;
    k_worth = head.k_scale ? head.k_scale + slot : nullptr, v_worth = head.v_scale ? head.v_scale + slot : nullptr;
  }
};

// Lines of `count` rows of keys and of values that are read next: short rows here and there are not foreseen. Inlined,
// as a compiler leaves out the call of what has no effect.
__attribute__((always_inline)) inline void fetch(const Lines& keys, long key, const Lines& values, long value,
                                                 long count) {
  const char *k = keys.k + key * keys.k_row, *v = values.v + value * values.v_row;
  const long k_row = keys.k_row, v_row = values.v_row, bytes = keys.bytes;
  if (k_row == bytes && v_row == bytes) {  // as caches lie: one after the other
    for (const char* end = k + count * bytes; k < end; k += 64, v += 64)
      __builtin_prefetch(k, 0, 2), __builtin_prefetch(v, 0, 2);
    return;
  }
  for (long i = 0; i < count; i++, k += k_row, v += v_row)
    for (long at = 0; at < bytes; at += 64) __builtin_prefetch(k + at, 0, 2), __builtin_prefetch(v + at, 0, 2);
}

// How many slots the first block of a part may have: blocks end at fixed slots, so that which slots share one depends
// neither on the row nor on where its job begins.
static long first_size(long from) { return KEYS - from % KEYS; }

// The block that a job reads after that which ends at `end`.
static long after(const Job& job, long end) {
  return end >= job.sinks && end < job.start ? job.start : end;
}

template <class T> static const T* far_query(const Call& call, const Job& job, long i) {
  const T* far = (const T*)call.spans[job.span].sight.far;
  return far + (row_of(call, job, i).row * call.heads_q + head_of(call, job, i)) * call.dim;
}

// Scores of slots that are sinks, by the queries which read them.
template <class T>
static void score_sinks(const Call& call, const Job& job, const T* k, long row, long count, float (*scores)[KEYS]) {
  for (long j = 0; j < count; j += LANES)
    for (long i = 0; i < job.count; i++) {
      float found[LANES];
      score(far_query<T>(call, job, i), Some<T>(k, row, j, count).rows, call.dim, found);
      for (long r = 0; r < LANES && j + r < count; r++) scores[i][j + r] = found[r];
    }
}

// What is added to the scores of slot 0, before they are scaled.
__attribute__((noinline)) static void add_bias(const Call& call, const Job& job, float (*scores)[KEYS]) {
  const float* bias = call.spans[job.span].sight.bias;
  for (long i = 0; i < job.count; i++) scores[i][0] += bias[head_of(call, job, i)] / (float)call.scale;
}

// What becomes of the scores of a block's queries, whatever they see of it.
static void bend(const Call& call, const Job& job, const Softcap& cap, long slot, float (*scores)[KEYS]) {
  for (long i = 0; cap && i < job.count; i++)
    for (long j = 0; j < KEYS; j += LANES) store(scores[i] + j, cap(load<F>(scores[i] + j)));
  if (slot == 0 && call.spans[job.span].sight.bias) add_bias(call, job, scores);
}

// What a query sees of a block, before its softmax.
static void see(const Call& call, const Job& job, long i, long slot, long to, float* scores) {
  const Span& span = call.spans[job.span];
  long row = (job.first + i) / group(call), end = limit(span, row);
  if (job.rows) keep_between(scores, 0, to - slot);
  else if (slot + KEYS > end || slot + KEYS > to || span.sees || start(span, job.window, row) > slot)
    hide(span, job, row, slot, to, scores);
  if (span.tally) note(*span.tally, job.head, head_of(call, job, i), slot, to, scores);
}

template <class T> static const T* query(const Call& call, const Job& job, long i) {
  Row at = row_of(call, job, i);
  return (const T*)call.spans[at.span].q + at.row * call.spans[at.span].q_row + head_of(call, job, i) * call.dim;
}

// `next` are the lines of the part after this one.
template <class T>
static void read_part(const Call& call, const Job& job, long from, long to, const Lines& next, State& s) {
  const Span& span = call.spans[job.span];
  long dim = call.dim;
  const T* queries[QUERIES];
  TurnedJob<TURNED<T>> turned;
  for (long i = 0; i < job.count; i++) {
    queries[i] = query<T>(call, job, i);
    if constexpr (TURNED<T>) widen_query(queries[i], dim, turned.queries[i]);
  }
  float scores[QUERIES][KEYS];
  Weight<T> weights[QUERIES][KEYS];
  T wide[2][KEYS * MOST_DIM];  // a block of int8
  Softcap cap(call.softcap, call.scale);
#if DOT_BFLOATS
  alignas(64) int32_t words[MOST_DIM / 2][KEYS];
  const bool many = std::is_same_v<T, bf16> && job.count >= ENOUGH && dim % (2 * LANES) == 0;
#endif
  for (long slot = from, size = first_size(from), then; slot < to; slot = then, size = KEYS) {
    long count = to - slot < size ? to - slot : size, end = slot + count;
    then = after(job, slot + size);
    Lines here(call, job, slot), ahead = then < to ? Lines(call, job, then) : next;
    const T *k = (const T*)here.k, *v = (const T*)here.v;
    long k_row = span.k_row, v_row = span.v_row;
    if (span.k_scale) {
      k = widen_rows((const int8_t*)here.k, here.k_row, here.k_worth, count, dim, wide[0]);
      v = widen_rows((const int8_t*)here.v, here.v_row, here.v_worth, count, dim, wide[1]);
      k_row = v_row = dim;
    }
    for (long j = 0; j < count; j += LANES) {
      Some<T> some(k, k_row, j, count);
      if constexpr (TURNED<T>) {
        fetch(ahead, j, here, j, LANES);
        turn_rows(some.rows, dim, (float(*)[KEYS])(turned.keys[0] + j));
        continue;
      }
#if DOT_BFLOATS
      if constexpr (std::is_same_v<T, bf16>)
        if (many) {
          fetch(ahead, j, here, j, LANES);
          turn_words(some.rows, dim, (int32_t(*)[KEYS])(words[0] + j));
          continue;
        }
#endif
      for (long i = 0, r = 0; i < job.count; i++) {
        long next = LANES * (i + 1) / job.count;  // spread, or they would wait for one another
        fetch(ahead, j + r, here, j + r, next - r);
        r = next;
        score(queries[i], some.rows, dim, scores[i] + j);
      }
    }
    if constexpr (TURNED<T>) score_turned(turned.queries, turned.keys, dim, count, job.count, scores);
#if DOT_BFLOATS
    if constexpr (std::is_same_v<T, bf16>)
      if (many) score_all_words(queries, words, dim, count, job.count, scores);
#endif
    long first = job.sinks - slot;
    if (span.sight.far && first > 0) score_sinks(call, job, k, k_row, first < count ? first : count, scores);
    bend(call, job, cap, slot, scores);
    for (long i = 0; i < job.count; i++) {
      see(call, job, i, slot, end, scores[i]);
      weigh(scores[i], (float)call.scale, weights[i], i, dim, s);
    }
    add_all_values<T, MOST_QUERIES>(weights, v, v_row, count, dim, job.count, s.sum);
  }
}

#if DOT_INSTRUCTIONS
// The same over levels, as they are.
static void read_levels(const Call& call, const Job& job, long from, long to, const Lines& next, State& s) {
  const Span& span = call.spans[job.span];
  long dim = call.dim;
  bool turns = span.sight.far && from < job.sinks;
  LevelQueries queries, far;
  for (long i = 0; i < job.count; i++) {
    queries.take(i, query<bf16>(call, job, i), dim);
    if (turns) far.take(i, far_query<bf16>(call, job, i), dim);
  }
  alignas(64) float scores[QUERIES][KEYS];
  LevelWeights weights[QUERIES];
  Softcap cap(call.softcap, call.scale);
  for (long slot = from, size = first_size(from), then; slot < to; slot = then, size = KEYS) {
    long count = to - slot < size ? to - slot : size, end = slot + count;
    then = after(job, slot + size);
    Lines here(call, job, slot), ahead = then < to ? Lines(call, job, then) : next;
    const int8_t *keys[KEYS], *values[KEYS];  // the last one stands in for those that there are not
    for (long j = 0; j < KEYS; j++) {
      long at = j < count ? j : count - 1;
      keys[j] = (const int8_t*)here.k + at * here.k_row, values[j] = (const int8_t*)here.v + at * here.v_row;
    }
    for (long j = 0; j < count; j += LANES) {
      F worth = load_worth(here.k_worth + j, count - j);
      fetch(ahead, j, here, j, LANES);
      score_levels(queries, job.count, dim, keys + j, worth, scores, j);
      if (!turns || slot + j >= job.sinks) continue;
      float found[QUERIES][KEYS];
      score_levels(far, job.count, dim, keys + j, worth, found, 0);
      for (long i = 0; i < job.count; i++)
        for (long r = 0; r < LANES && slot + j + r < job.sinks; r++) scores[i][j + r] = found[i][r];
    }
    F worth[KEYS / LANES];
    for (long j = 0; j < KEYS; j += LANES) worth[j / LANES] = load_worth(here.v_worth + j, count - j);
    bend(call, job, cap, slot, scores);
    for (long i = 0; i < job.count; i++) {
      see(call, job, i, slot, end, scores[i]);
      weigh(scores[i], (float)call.scale, scores[i], i, dim, s);
      weights[i].take(scores[i], worth);
    }
    add_levels<6>(weights, values, count, dim, job.count, s.sum);
  }
}
#else
static void read_levels(const Call&, const Job&, long, long, const Lines&, State&) {}
#endif

// The block that starts at `slot`, of slots whose keys lie alike: it depends on that slot alone.
static long sealed_end(const Sealed& keys, long slot, long to) {
  long end = slot / KEYS * KEYS + KEYS, sealed = end;
  if (slot < keys.slots) sealed = keys.upper ? keys.slots : slot / keys.rows * keys.rows + keys.rows;
  end = sealed < end ? sealed : end;
  return to < end ? to : end;
}

// out[i][j] = query i . key j of `count` rows as they were made
static void score_rows(const Call& call, const Job& job, const bf16* k, long row, long count, float (*out)[KEYS]) {
  for (long j = 0; j < count; j += LANES)
    for (long i = 0; i < job.count; i++)
      score(query<bf16>(call, job, i), Some<bf16>(k, row, j, count).rows, call.dim, out[i] + j);
}

// s += the values of `count` rows as they were made, under the weights from `from` on
static void add_rows(const Call& call, const Job& job, const bf16* v, long row, long from, long count,
                     const float (*all)[KEYS], State& s) {
  Weight<bf16> weights[QUERIES][KEYS];
  for (long i = 0; i < job.count; i++) {
    float own[2 * KEYS] = {};
    memcpy(own, all[i], KEYS * 4);
    F values[KEYS / LANES];
    for (long j = 0; j < KEYS / LANES; j++) values[j] = load<F>(own + from + j * LANES);
    store_weights(weights[i], values);
  }
  add_all_values<bf16, MOST_QUERIES>(weights, v, row, count, call.dim, job.count, s.sum);
}

// Keys or values that lie packed, as a job reads them: in lines of its head.
struct InLines {
  const Call& call;
  const Job& job;
  const Sealed& side;
  const PackedLines lines;
  float peaks[QUERIES + 4];  // of queries
  F quarters[BY_FOURS ? QUERIES * MOST_DIM / LANES : 1];  // of queries, for what is added to blocks
  const bool fours;

  InLines(const Call& call, const Job& job, const Sealed& side, long numbers)
      : call(call), job(job), side(side), lines(side, job.head, numbers),
        fours(by_fours(side)) {}

  void take(const float (*queries)[MOST_DIM]) {
    for (long i = 0; fours && i < job.count; i += 4)
      to_quarters(queries[i], MOST_DIM, job.count - i, call.dim, quarters + i * call.dim / LANES);
    for (long i = 0; i < job.count; i++) peaks[i] = largest_of(queries[i], call.dim);
  }

  void score(long slot, long count, const float (*queries)[MOST_DIM], float (*scores)[KEYS]) {
    score_sealed(side, lines, slot, count, call.dim, job.count, {queries[0], MOST_DIM, peaks}, scores);
    if (!side.rank && !side.aparts) return;
    if (fours && slot % KEYS == 0) score_quarters(side, job.head, slot, call.dim, job.count, quarters, scores);
    else score_mended(side, job.head, slot, count, call.dim, job.count, queries, scores);
  }

  void add(long slot, long count, const float (*weights)[KEYS], State& s) {
    float largest[QUERIES + 4];
    for (long i = 0; !PAIRS && i < job.count; i++) largest[i] = largest_of(weights[i], KEYS);
    add_sealed(side, lines, slot, count, call.dim, job.count, {weights[0], KEYS, largest}, s.sum);
    if (!side.rank && !side.aparts) return;
    if (fours && slot % KEYS == 0) add_quarters(side, job.head, slot, count, call.dim, job.count, weights, s.sum);
    else add_mended(side, job.head, slot, count, call.dim, job.count, weights, s.sum);
  }
};

// In lines of all heads, in two classes.
struct InClasses {
  const Call& call;
  const Job& job;
  const Sealed& side;
  Classed classed;
  LineQueries whole;

  InClasses(const Call& call, const Job& job, const Sealed& side, long)
      : call(call), job(job), side(side), classed(side, call.heads * call.dim) {}

  void take(const float (*queries)[MOST_DIM]) {
    const uint16_t* scale = side.scale + job.head * call.dim;
    for (long i = 0; i < job.count; i++) whole.take(i, queries[i], scale, classed.bits, call.dim);
  }

  void score(long slot, long count, const float (*)[MOST_DIM], float (*scores)[KEYS]) {
    score_classed(classed, classed.take(slot, count), job.head, call.dim, whole, job.count, scores);
  }

  void add(long slot, long count, const float (*weights)[KEYS], State& s) {
    add_classed(classed, classed.take(slot, count), job.head, call.dim, job.count, weights, s.sum);
  }
};

constexpr float FAR = 8;  // above what weights are measured by, see Weighing

// Whether all rows of a job see all slots from .. to-1, and nobody asks what becomes of which.
static bool all_alike(const Call& call, const Job& job, long from, long to) {
  const Span& span = call.spans[job.span];
  if (span.tally || span.sight.bias || to > span.n - span.rows - span.first) return false;
  for (long i = 0; i < job.count; i++)
    if (long row = (job.first + i) / group(call); limit(span, row) < to || start(span, job.window, row) > from) return false;
  return true;
}

// What is read at a time of what lies packed: some slots, or some lines of a class.
struct Piece {
  long from, to;
  int which;
  bool there() const { return from < to; }
};

// Piece by piece: a piece's keys are scored while the softmax of the one before is under way.
template <class Then, class Score, class Weigh, class Add>
static void read_pieces(Piece own, const Then& then, const Score& score, const Weigh& weigh, const Add& add) {
  alignas(64) float scores[2][QUERIES][KEYS];
  if (own.there()) score(own, scores[0]);
  for (int turn = 0; own.there(); turn = !turn) {
    const Piece next = then(own);
    weigh(own, scores[turn]);
    if (next.there()) score(next, scores[!turn]);
    add(own, scores[turn]);
    own = next;
  }
}

// The packed slots from .. to-1, which are all alike, class by class: a softmax does not mind the order. Their sums are
// the first of the job's.
static bool read_classes(const Call& call, const Job& job, const InClasses& keys, const InClasses& values, long from,
                         long to, State& s) {
  const Classed &k = keys.classed, &v = values.classed;
  if (!all_alike(call, job, from, to) || !k.same(v, 0, to)) return false;
  alignas(64) float found[QUERIES][MOST_DIM];
  const Softcap cap(call.softcap, call.scale);
  const long first[2] = {k.before_in(from, 0), k.before_in(from, 1)}, end[2] = {k.before_in(to, 0), k.before_in(to, 1)};
  auto piece = [&](int which, long at) {
    if (which == 0 && at == end[0]) which = 1, at = first[1];
    return Piece{at, at + KEYS < end[which] ? at + KEYS : end[which], which};
  };
  auto lines = [](const Classed& side, const Piece& own) {
    return side.lines[own.which].from(own.from, own.to - own.from);
  };
  auto score = [&](const Piece& own, float (*to)[KEYS]) {
    score_lines(k, lines(k, own), own.which, job.head, call.dim, keys.whole, job.count, to[0], KEYS);
    for (long i = 0; i < job.count; i++) {
      if (own.to - own.from < KEYS) keep_between(to[i], 0, own.to - own.from);
      for (long j = 0; cap && j < KEYS; j += LANES) store(to[i] + j, cap(load<F>(to[i] + j)));
    }
  };
  auto add = [&](const Piece& own, const float (*weights)[KEYS]) {
    add_lines(v, lines(v, own), own.which, job.head, call.dim, weights[0], KEYS, job.count, s.sum);
  };
  Weighing weighing(s, call.scale, job.count, call.dim);
  read_pieces(
      piece(0, first[0]), [&](const Piece& own) { return piece(own.which, own.to); }, score,
      [&](const Piece&, float (*scores)[KEYS]) { weighing.take(scores, FAR); }, add);
  for (long i = 0; i < job.count; i++) {
    memcpy(found[i], s.sum[i], call.dim * 4);
    memset(s.sum[i], 0, call.dim * 4);
  }
  add_scaled(v, job.head, call.dim, job.count, found, s.sum);
  return true;
}
static bool read_classes(const Call&, const Job&, const InLines&, const InLines&, long, long, State&) { return false; }

// Blocks that lie packed, as they are, and the rows behind them.
template <class Side> static void read_sealed(const Call& call, const Job& job, long from, long to, State& s) {
  const Span& span = call.spans[job.span];
  Side keys(call, job, span.sealed->keys, span.sealed->keys.rows), values(call, job, span.sealed->values, call.dim);
  alignas(64) float queries[QUERIES][MOST_DIM];
  for (long i = 0; i < job.count; i++)
    for (long d = 0; d < call.dim; d += LANES) store(queries[i] + d, load_floats(query<bf16>(call, job, i) + d));
  keys.take(queries);
  const long both = keys.side.slots < values.side.slots ? keys.side.slots : values.side.slots, end = both < to ? both : to;
  if (from < end && read_classes(call, job, keys, values, from, end, s)) from = end;
  const Softcap cap(call.softcap, call.scale);
  const bool plain = !cap && !job.rows && all_alike(call, job, from, to);
  auto score = [&](const Piece& own, float (*to)[KEYS]) {
    const long slot = own.from, count = own.to - slot;
    if (slot < keys.side.slots) keys.score(slot, count, queries, to);
    else score_rows(call, job, (const bf16*)Lines(call, job, slot).k, span.k_row, count, to);
    if (!plain) bend(call, job, cap, slot, to);
    for (long i = 0; i < job.count; i++)
      if (!plain) see(call, job, i, slot, own.to, to[i]);
      else if (count < KEYS) keep_between(to[i], 0, count);
  };
  Weighing weighing(s, call.scale, job.count, call.dim);
  auto weigh = [&](const Piece& own, float (*scores)[KEYS]) {
    weighing.take(scores, own.from < values.side.slots ? FAR : 0);
  };
  auto add = [&](const Piece& own, const float (*weights)[KEYS]) {
    const long slot = own.from, count = own.to - slot, rest = values.side.slots - slot;
    const long some = rest < 0 ? 0 : rest < count ? rest : count;
    if (some) values.add(slot, some, weights, s);
    if (some == count) return;
    const bf16* v = (const bf16*)Lines(call, job, slot).v + some * span.v_row;
    add_rows(call, job, v, span.v_row, some, count - some, weights, s);
  };
  auto piece = [&](long slot) { return Piece{slot, slot < to ? sealed_end(keys.side, slot, to) : to, 0}; };
  read_pieces(piece(from), [&](const Piece& own) { return piece(own.to); }, score, weigh, add);
}

template <class T> static void finish(const Call& call, const Job& job, const State& s) {
  const Span& span = call.spans[job.span];
  for (long i = 0; i < job.count; i++) {
    long row = (job.first + i) / group(call), head = head_of(call, job, i);
    T* out = (T*)span.out + (row * call.heads_q + head) * call.dim;
    float scale = s.total[i] == 0 ? 0 : 1 / s.total[i];  // a row that sees nothing reads 0
    put_sums(s.sum[i], scale, call.dim, out);
    if (span.lse) span.lse[row * call.heads_q + head] = s.top[i] + logf(s.total[i]);
  }
  if (span.tally) put_weights(call, job, *span.tally, s);
}

static void join(const Job& job, const State* parts, long dim, State& s) {
  for (long i = 0; i < job.count; i++) {
    s.top[i] = -INFINITY, s.total[i] = 0;
    memset(s.sum[i], 0, dim * 4);
    for (long p = 0; p < job.parts; p++) s.top[i] = parts[p].top[i] > s.top[i] ? parts[p].top[i] : s.top[i];
    for (long p = 0; p < job.parts; p++) {
      float weight = parts[p].top[i] == -INFINITY ? 0 : expf(parts[p].top[i] - s.top[i]);
      s.total[i] += weight * parts[p].total[i];
      for (long d = 0; d < dim; d++) s.sum[i][d] += weight * parts[p].sum[i][d];
    }
  }
}

// ---- what a thread does
template <class T> static void run_parts(const Call& call, const Plan& plan, long stage, Shares& shares) {
  State own;
  long first = stage ? plan.ends[stage - 1] : 0;
  for (long from, to; shares.take(from, to);)
    for (long p = from; p < to; p++) {
      const Part& part = plan.parts[first + p];
      const Job& job = plan.jobs[part.job];
      State& s = job.parts > 1 ? plan.states[p] : own;
      begin(call, plan, job, part, s);
      const Part& next = plan.parts[first + p + 1 < plan.ends[stage] ? first + p + 1 : first + p];
      Lines then(call, plan.jobs[next.job], next.from);
      const Span& span = call.spans[job.span];
      if (span.sealed && span.sealed->keys.upper) read_sealed<InClasses>(call, job, part.from, part.to, s);
      else if (span.sealed) read_sealed<InLines>(call, job, part.from, part.to, s);
      else if (span.k_scale && by_levels<T>(call.dim)) read_levels(call, job, part.from, part.to, then, s);
      else read_part<T>(call, job, part.from, part.to, then, s);
      if (job.rows) keep(call, plan, job, part, s);
      else if (job.parts == 1) finish<T>(call, job, s);
    }
}

template <class T> static void run(const Call& call, const Plan& plan, Shares* shares, int all) {
  for (long stage = 0; stage <= plan.levels; stage++) {
    if (stage) wait_for_all(all);
    run_parts<T>(call, plan, stage, shares[stage]);
  }
  if (!plan.cut) return;
  wait_for_all(all);
  State own;
  for (long from, to; shares[plan.levels + 1].take(from, to);)
    for (long j = from; j < to; j++)
      if (plan.jobs[j].parts > 1) {
        join(plan.jobs[j], plan.states + plan.jobs[j].part, call.dim, own);
        finish<T>(call, plan.jobs[j], own);
      }
}

void attention_part(const AttentionCall& call, const Plan* plan, Shares* shares, int all) {
  if (call.kind == FLOAT) run<float>(call, *plan, shares, all);
  else run<bf16>(call, *plan, shares, all);
}

API void attend(const AttentionCall* call) {
  int64_t work = 0;
  for (long b = 0; b < call->count; b++) work += call->spans[b].n * call->spans[b].rows;
  int threads = enough(call->threads, work * call->heads_q * call->dim);
  long room = plan_room(*call);
  Plan* plan = make_plan(*call, scratch(OF_ATTENTION, room + stages_of(*call) * sizeof(Shares)));
  Shares* shares = (Shares*)((char*)plan + room);
  share_out(plan, threads, shares);
  together(threads, [&](int, int all) { attention_part(*call, plan, shares, all); });
}
