// Attention of a list of spans in one call, each span's rows over its own keys and values where they lie.
//
// A job is a few (row, query head) pairs that share one KV head. Long jobs are cut into parts at fixed slots and joined
// by their log-sum-exp, so a row's result depends neither on the other spans nor on the number of threads. Slots that
// spans have in common are read first, level by level, for the queries of all of them; what a query has summed by then
// is kept, and its own span's job goes on from there. Where commons end at multiples of KEYS, no bit changes by that.
#include "job.h"
#include "levels.h"
#include "parts.h"
#include "plan.h"
#include "read_packed.h"
#include "softmax.h"
#include "turned.h"

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
static void score_sinks(const Call& call, const Job& job, const T* k, long row, long count, TurnedJob<TURNED<T>>& turned,
                        float (*scores)[KEYS]) {
  if constexpr (TURNED<T>) {
    float found[QUERIES][KEYS];
    for (long i = 0; i < job.count; i++) widen_query(far_query<T>(call, job, i), call.dim, turned.far[i]);
    score_turned(turned.far, turned.keys, call.dim, count, job.count, found);
    for (long i = 0; i < job.count; i++) memcpy(scores[i], found[i], count * 4);
    return;
  }
  for (long j = 0; j < count; j += LANES)
    for (long i = 0; i < job.count; i++) {
      float found[LANES];
      score(far_query<T>(call, job, i), Some<T>(k, row, j, count).rows, call.dim, found);
      for (long r = 0; r < LANES && j + r < count; r++) scores[i][j + r] = found[r];
    }
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
    if (span.sight.far && first > 0) score_sinks(call, job, k, k_row, first < count ? first : count, turned, scores);
    bend(call, job, cap, slot, scores);
    for (long i = 0; i < job.count; i++) {
      see(call, job, i, slot, end, scores[i]);
      weigh<T>(scores[i], (float)call.scale, weights[i], i, dim, s);
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
      weigh<bf16>(scores[i], (float)call.scale, scores[i], i, dim, s);
      weights[i].take(scores[i], worth);
    }
    add_levels<6>(weights, values, count, dim, job.count, s.sum);
  }
}
#else
static void read_levels(const Call&, const Job&, long, long, const Lines&, State&) {}
#endif

template <class T> static void finish(const Call& call, const Job& job, const State& s) {
  const Span& span = call.spans[job.span];
  for (long i = 0; i < job.count; i++) {
    long row = (job.first + i) / group(call), head = head_of(call, job, i);
    T* out = (T*)span.out + (row * call.heads_q + head) * call.dim;
    float scale = share_of(s.total[i], s.top[i], call.sink_scores, head);
    put_sums(s.sum[i], scale, call.dim, out);
    if (span.lse) span.lse[row * call.heads_q + head] = s.top[i] + logf(s.total[i]);
  }
  if (span.tally) put_weights(call, job, s);
}

static void join(const Job& job, const State* parts, long dim, State& s) {
  for (long i = 0; i < job.count; i++) {
    s.top[i] = -INFINITY, s.total[i] = 0;
    memset(s.sum[i], 0, sizeof s.sum[i]);
    for (long p = 0; p < job.parts; p++)
      merge(s.top[i], s.total[i], s.sum[i], parts[p].top[i], parts[p].total[i], parts[p].sum[i], dim);
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
      if (span.sealed) read_packed(call, job, part.from, part.to, s);
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
