// Attention of a list of spans in one call, each span's rows over its own keys and values where they lie.
//
// A job is a few (row, query head) pairs that share one KV head. Long jobs are cut into parts at fixed slots and joined
// by their log-sum-exp, so a row's result depends neither on the other spans nor on the number of threads.
#include "parts.h"
#include "softmax.h"

constexpr long PART = 1024;     // slots per part

struct Job {
  long span, head, first, count;  // queries, numbered row * group + query head of the group
  long part, parts;
};

struct Part {
  long job, from, to;
};

// ---- jobs
typedef AttentionCall Call;

static long group(const Call& call) { return call.heads_q / call.heads; }
static long limit(const Span& span, long row) { return span.sees ? span.n : span.n - span.rows + row + 1; }
static long start(const Call& call, long limit) { return call.window && limit > call.window ? limit - call.window : 0; }

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
  for (long i = 0; i < job.count; i++) {
    s.top[i] = -INFINITY, s.total[i] = 0;
    memset(s.sum[i], 0, dim * 4);
  }
  const T* queries[QUERIES];
  for (long i = 0; i < job.count; i++) {
    long row = (job.first + i) / group(call), head = job.head * group(call) + (job.first + i) % group(call);
    queries[i] = (const T*)span.q + row * span.q_row + head * dim;
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
      if (slot + KEYS > end || slot + KEYS > to || span.sees || start(call, end) > slot)
        hide(call, span, row, slot, to, scores[i]);
      weigh(scores[i], weights[i], i, dim, s);
    }
    add_all_values<T, MOST_QUERIES>(weights, v + slot * span.v_row, span.v_row, count, dim, job.count, s.sum);
  }
}

template <class T> static void finish(const Call& call, const Job& job, const State& s) {
  const Span& span = call.spans[job.span];
  for (long i = 0; i < job.count; i++) {
    long row = (job.first + i) / group(call), head = job.head * group(call) + (job.first + i) % group(call);
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

struct Plan {
  Job* jobs;
  Part* parts;
  State* states;  // of parts that are joined later
  long job_count, part_count;
  bool cut;
};

// Jobs and parts of all spans; with null pointers only counted.
static void count_jobs(const Call& call, Plan& plan) {
  plan.job_count = plan.part_count = 0;
  for (long b = 0; b < call.count; b++)
    for (long head = 0; head < call.heads; head++)
      for (long first = 0; first < call.spans[b].rows * group(call); first += QUERIES) {
        const Span& span = call.spans[b];
        long left = span.rows * group(call) - first, some = left < QUERIES ? left : QUERIES;
        long from = start(call, limit(span, first / group(call))) / KEYS * KEYS;
        long to = limit(span, (first + some - 1) / group(call)), begin = from / PART * PART;
        long pieces = (to - begin + PART - 1) / PART;
        if (plan.jobs) plan.jobs[plan.job_count] = {b, head, first, some, plan.part_count, pieces};
        for (long at = begin; plan.parts && at < to; at += PART)
          plan.parts[plan.part_count + (at - begin) / PART] = {plan.job_count, at > from ? at : from,
                                                               at + PART < to ? at + PART : to};
        plan.part_count += pieces;
        plan.job_count++;
      }
  plan.cut = plan.part_count > plan.job_count;
}

long plan_room(const Call& call) {
  Plan plan = {};
  count_jobs(call, plan);
  long of_part = sizeof(Part) + (plan.cut ? sizeof(State) : 0);
  return sizeof(Plan) + plan.job_count * sizeof(Job) + plan.part_count * of_part;
}

Plan* make_plan(const Call& call, void* room) {
  Plan* plan = (Plan*)room;
  *plan = {};
  count_jobs(call, *plan);
  plan->jobs = (Job*)(plan + 1);
  plan->parts = (Part*)(plan->jobs + plan->job_count);
  plan->states = (State*)(plan->parts + plan->part_count);
  count_jobs(call, *plan);
  return plan;
}

Shares reads_of(const Plan* plan, int threads) { return Shares(plan->part_count, threads); }
Shares joins_of(const Plan* plan, int threads) { return Shares(plan->job_count, threads); }

template <class T> static void run(const Call& call, const Plan& plan, Shares* reads, Shares* joins, int all) {
  State own;
  for (long from, to; reads->take(from, to);)
    for (long p = from; p < to; p++) {
      const Job& job = plan.jobs[plan.parts[p].job];
      read_part<T>(call, job, plan.parts[p].from, plan.parts[p].to, job.parts > 1 ? plan.states[p] : own);
      if (job.parts == 1) finish<T>(call, job, own);
    }
  if (!plan.cut) return;
  wait_for_all(all);
  for (long from, to; joins->take(from, to);)
    for (long j = from; j < to; j++)
      if (plan.jobs[j].parts > 1) {
        join(plan.jobs[j], plan.states + plan.jobs[j].part, call.dim, own);
        finish<T>(call, plan.jobs[j], own);
      }
}

void attention_part(const Call& call, const Plan* plan, Shares* reads, Shares* joins, int all) {
  if (call.kind == FLOAT) run<float>(call, *plan, reads, joins, all);
  else run<bf16>(call, *plan, reads, joins, all);
}

API void attend(const AttentionCall* call) {
  int64_t work = 0;
  for (long b = 0; b < call->count; b++) work += call->spans[b].n * call->spans[b].rows;
  int threads = enough(call->threads, work * call->heads_q * call->dim);
  Plan* plan = make_plan(*call, scratch(OF_ATTENTION, plan_room(*call)));
  Shares reads = reads_of(plan, threads), joins = joins_of(plan, threads);
  together(threads, [&](int, int all) { attention_part(*call, plan, &reads, &joins, all); });
}
