// Attention of a list of spans in one call, each span's rows over its own keys and values where they lie.
//
// A job is a few (row, query head) pairs that share one KV head. Long jobs are cut into parts at fixed slots and joined
// by their log-sum-exp, so a row's result depends neither on the other spans nor on the number of threads. Slots that
// spans have in common are read first, level by level, for the queries of all of them; what a query has summed by then is
// kept, and its own span's job goes on from there. Where commons end at multiples of KEYS, no bit changes by that.
#include "parts.h"
#include "plan.h"
#include "softmax.h"

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
static void hide(const Call& call, const Span& span, long row, long slot, long to, float* scores) {
  long end = limit(span, row), begin = start(call, end), own = span.n - span.rows;
  end = end < to ? end : to;
  for (long j = 0; j < KEYS; j++) {
    long at = slot + j;
    bool seen = at >= begin && at < end && (!span.sees || at < own || span.sees[row * span.rows + at - own]);
    if (!seen) scores[j] = -INFINITY;
  }
}

// Keys of LANES slots from `slot` on, the last one standing in for those that there are not. Meanwhile their values and
// later keys are fetched, as short rows here and there are not foreseen.
template <class T>
static void point_at(const Span& span, const T* k, const T* v, long slot, long to, long dim, const T** rows) {
  for (long i = 0; i < LANES; i++) {
    long at = slot + i < to ? slot + i : to - 1;
    rows[i] = k + at * span.k_row;
    for (long d = 0; d < dim; d += 64 / (long)sizeof(T)) {
      __builtin_prefetch(rows[i] + KEYS * span.k_row + d);
      __builtin_prefetch(v + at * span.v_row + d);
    }
  }
}

template <class T> static void read_part(const Call& call, const Job& job, long from, long to, State& s) {
  const Span& span = call.spans[job.span];
  long dim = call.dim;
  const T *k = (const T*)span.k + job.head * span.k_head, *v = (const T*)span.v + job.head * span.v_head;
  const T* queries[QUERIES];
  for (long i = 0; i < job.count; i++) {
    Row at = row_of(call, job, i);
    queries[i] = (const T*)call.spans[at.span].q + at.row * call.spans[at.span].q_row + head_of(call, job, i) * dim;
  }
  float scores[QUERIES][KEYS];
  Weight<T> weights[QUERIES][KEYS];
  for (long slot = from; slot < to; slot += KEYS) {
    long count = to - slot < KEYS ? to - slot : KEYS;
    for (long j = 0; j < count; j += LANES) {
      const T* rows[LANES];
      point_at(span, k, v, slot + j, to, dim, rows);
      for (long i = 0; i < job.count; i++) score(queries[i], rows, dim, scores[i] + j);
    }
    for (long i = 0; i < job.count; i++) {
      for (long j = 0; j < KEYS; j++) scores[i][j] *= (float)call.scale;
      long row = (job.first + i) / group(call), end = limit(span, row);
      if (job.rows)
        for (long j = to - slot; j < KEYS; j++) scores[i][j] = -INFINITY;
      else if (slot + KEYS > end || slot + KEYS > to || span.sees || start(call, end) > slot)
        hide(call, span, row, slot, to, scores[i]);
      weigh(scores[i], weights[i], i, dim, s);
    }
    add_all_values<T, MOST_QUERIES>(weights, v + slot * span.v_row, span.v_row, count, dim, job.count, s.sum);
  }
}

template <class T> static void finish(const Call& call, const Job& job, const State& s) {
  const Span& span = call.spans[job.span];
  for (long i = 0; i < job.count; i++) {
    long row = (job.first + i) / group(call), head = head_of(call, job, i);
    T* out = (T*)span.out + (row * call.heads_q + head) * call.dim;
    float scale = s.total[i] == 0 ? 0 : 1 / s.total[i];  // a row that sees nothing reads 0
    for (long d = 0; d < call.dim; d++) put(out + d, s.sum[i][place<T>(d, call.dim)] * scale);
    if (span.lse) span.lse[row * call.heads_q + head] = s.top[i] + logf(s.total[i]);
  }
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
      read_part<T>(call, job, part.from, part.to, s);
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
