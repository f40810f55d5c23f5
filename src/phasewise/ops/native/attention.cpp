// Attention of a list of spans in one call, each span's rows over its own keys and values where they lie.
//
// A job is a few (row, query head) pairs that share one KV head. Long jobs are cut into parts at fixed slots and joined
// by their log-sum-exp, so a row's result depends neither on the other spans nor on the number of threads.
#include <math.h>

#include <type_traits>

#include "parts.h"
#include "simd.h"

constexpr long KEYS = 64;       // slots whose scores are held at a time
constexpr long QUERIES = 16;    // queries per job
constexpr long MOST_DIM = 256;  // of a head
constexpr long PART = 1024;     // slots per part

struct Job {
  long span, head, first, count;  // queries, numbered row * group + query head of the group
  long part, parts;
};

struct Part {
  long job, from, to;
};

struct State {  // softmax under way: largest score, sum of weights, weighted sum of values
  float top[QUERIES], total[QUERIES];
  float sum[QUERIES][MOST_DIM];
};

// ---- scores
// 16 (8) registers -> their sums, lane by lane
static inline F sums_of(F* v) {
#if LANES == 16
  __m512 half[16];
  for (int i = 0; i < 16; i += 2)
    half[i / 2] = _mm512_unpacklo_ps((__m512)v[i], (__m512)v[i + 1]) + _mm512_unpackhi_ps((__m512)v[i], (__m512)v[i + 1]);
  __m512 quarter[4];
  for (int i = 0; i < 4; i++) {
    __m512d a = (__m512d)half[2 * i], b = (__m512d)half[2 * i + 1];
    quarter[i] = (__m512)_mm512_unpacklo_pd(a, b) + (__m512)_mm512_unpackhi_pd(a, b);
  }
  auto fold = [](__m512 a, __m512 b) { return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd); };
  return (F)fold(fold(quarter[0], quarter[1]), fold(quarter[2], quarter[3]));
#else
  __m256 half[4];
  for (int i = 0; i < 8; i += 2)
    half[i / 2] = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]) + _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
  __m256 quarter[2];
  for (int i = 0; i < 2; i++) {
    __m256d a = (__m256d)half[2 * i], b = (__m256d)half[2 * i + 1];
    quarter[i] = (__m256)_mm256_unpacklo_pd(a, b) + (__m256)_mm256_unpackhi_pd(a, b);
  }
  return (F)(_mm256_permute2f128_ps(quarter[0], quarter[1], 0x20) + _mm256_permute2f128_ps(quarter[0], quarter[1], 0x31));
#endif
}

static inline long whole(long dim, const float*) { return dim / LANES * LANES; }
static inline F product(const float* q, const float* k, long length) {
  F acc = {};
  for (long d = 0; d < length; d += LANES) acc += load<F>(q + d) * load<F>(k + d);
  return acc;
}
#if DOT_INSTRUCTIONS
static inline long whole(long dim, const bf16*) { return dim / (2 * LANES) * (2 * LANES); }
static inline F product(const bf16* q, const bf16* k, long length) {
  __m512 acc = _mm512_setzero_ps();
  for (long d = 0; d < length; d += 2 * LANES)
    acc = _mm512_dpbf16_ps(acc, (__m512bh)load<__m512i>(q + d), (__m512bh)load<__m512i>(k + d));
  return (F)acc;
}
#else
static inline long whole(long dim, const bf16*) { return dim / LANES * LANES; }
static inline F product(const bf16* q, const bf16* k, long length) {
  F acc = {};
  for (long d = 0; d < length; d += LANES) acc += load_floats(q + d) * load_floats(k + d);
  return acc;
}
#endif

// out[0 .. LANES) = scale * q . k of the slots from `k` on, of which `count` exist
template <class T> static void score(const T* q, const T* k, long row, long count, long dim, float scale, float* out) {
  long length = whole(dim, q), last = (count < LANES ? count : LANES) - 1;
  F parts[LANES];
  for (long j = 0; j < LANES; j++) parts[j] = product(q, k + (j < last ? j : last) * row, length);
  store(out, sums_of(parts));
  for (long j = 0; j <= last; j++)
    for (long d = length; d < dim; d++) out[j] += to_float(q[d]) * to_float(k[j * row + d]);
  for (long j = 0; j < LANES; j++) out[j] *= scale;
}

// ---- weights
// Weights are kept as the products with values take them.
template <class T> using Weight = std::conditional_t<DOT_INSTRUCTIONS && std::is_same_v<T, bf16>, bf16, float>;

// The scores of one query become weights; what was summed before is scaled to the new largest score.
template <class W> static void weigh(const float* scores, W* weights, long query, long dim, State& s) {
  F top = splat(s.top[query]);
  for (long j = 0; j < KEYS; j += LANES) top = max(load<F>(scores + j), top);
  float highest = most(top);
  float from = highest == -INFINITY ? 0 : highest;  // nothing seen yet
  F total = {};
  for (long j = 0; j < KEYS; j += LANES) {
    F weight = exp_negative(load<F>(scores + j) - from);
    store_floats(weights + j, weight);
    total += weight;
  }
  float shrink = expf(s.top[query] - from);
  s.top[query] = highest;
  s.total[query] = s.total[query] * shrink + sum(total);
  if (shrink != 1)
    for (long d = 0; d < dim; d++) s.sum[query][d] *= shrink;
}

// ---- values
// sum[q][d ...] += weights[q][j] * v[j][d ...] for Q queries and N registers of sums
template <int Q, int N, class T>
static void add_values(const float (*weights)[KEYS], const T* v, long row, long count, float (*sum)[MOST_DIM]) {
  F acc[Q][N];
  for (int q = 0; q < Q; q++)
    for (int i = 0; i < N; i++) acc[q][i] = load<F>(sum[q] + i * LANES);
  for (long j = 0; j < count; j++)
    for (int i = 0; i < N; i++) {
      F value = load_floats(v + j * row + i * LANES);
      for (int q = 0; q < Q; q++) acc[q][i] += value * weights[q][j];
    }
  for (int q = 0; q < Q; q++)
    for (int i = 0; i < N; i++) store(sum[q] + i * LANES, acc[q][i]);
}

#if DOT_INSTRUCTIONS
// The same for bfloat16, two slots at a time. Interleaving their rows leaves the sums of 32 numbers in the order that
// `place` tells.
template <int Q, int N>
static void add_values(const bf16 (*weights)[KEYS], const bf16* v, long row, long count, float (*sum)[MOST_DIM]) {
  F acc[Q][N];
  for (int q = 0; q < Q; q++)
    for (int i = 0; i < N; i++) acc[q][i] = load<F>(sum[q] + i * LANES);
  for (long j = 0; j < count; j += 2) {
    const bf16 *first = v + j * row, *second = j + 1 < count ? first + row : first;  // an odd one out weighs 0
    __m512bh pairs[N];
    for (int i = 0; i < N; i += 2) {
      __m512i a = load<__m512i>(first + i * LANES), b = load<__m512i>(second + i * LANES);
      pairs[i] = (__m512bh)_mm512_unpacklo_epi16(a, b);
      pairs[i + 1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
    }
    for (int q = 0; q < Q; q++) {
      __m512bh weight = (__m512bh)_mm512_set1_epi32(load<int32_t>(weights[q] + j));
      for (int i = 0; i < N; i++) acc[q][i] = (F)_mm512_dpbf16_ps((__m512)acc[q][i], pairs[i], weight);
    }
  }
  for (int q = 0; q < Q; q++)
    for (int i = 0; i < N; i++) store(sum[q] + i * LANES, acc[q][i]);
}
#endif

template <class T> static long place(long d, long dim) {
  bool in_order = sizeof(Weight<T>) == 4 || d >= dim / 32 * 32;
  return in_order ? d : d / 32 * 32 + d % 8 / 4 * 16 + d % 32 / 8 * 4 + d % 4;
}

constexpr int MOST_QUERIES = DOT_INSTRUCTIONS ? 8 : 4;  // whose sums fit the registers

template <class T, int Q>
static void add_all_values(const Weight<T> (*weights)[KEYS], const T* v, long row, long count, long dim, long queries,
                           float (*sum)[MOST_DIM]) {
  constexpr int N = Q > 4 || (!DOT_INSTRUCTIONS && Q > 1) ? 2 : 4, LEAST = sizeof(Weight<T>) == 4 ? 1 : 2;
  for (; queries >= Q; queries -= Q, weights += Q, sum += Q) {
    auto from = [&](long d) { return (float(*)[MOST_DIM])(sum[0] + d); };
    long d = 0;
    for (; d + N * LANES <= dim; d += N * LANES) add_values<Q, N>(weights, v + d, row, count, from(d));
    for (; d + LEAST * LANES <= dim; d += LEAST * LANES) add_values<Q, LEAST>(weights, v + d, row, count, from(d));
    for (; d < dim; d++)
      for (int q = 0; q < Q; q++)
        for (long j = 0; j < count; j++) sum[q][d] += to_float(weights[q][j]) * to_float(v[j * row + d]);
  }
  if constexpr (Q > 1) add_all_values<T, Q - 1>(weights, v, row, count, dim, queries, sum);
}

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

template <class T> static void read_part(const Call& call, const Job& job, long from, long to, State& s) {
  const Span& span = call.spans[job.span];
  long dim = call.dim;
  const T *k = (const T*)span.k + job.head * span.k_head, *v = (const T*)span.v + job.head * span.v_head;
  for (long i = 0; i < job.count; i++) {
    s.top[i] = -INFINITY, s.total[i] = 0;
    memset(s.sum[i], 0, dim * 4);
  }
  float scores[KEYS];
  Weight<T> weights[QUERIES][KEYS];
  for (long slot = from; slot < to; slot += KEYS) {
    long count = to - slot < KEYS ? to - slot : KEYS;
    for (long i = 0; i < job.count; i++) {
      long row = (job.first + i) / group(call), head = job.head * group(call) + (job.first + i) % group(call);
      const T* q = (const T*)span.q + row * span.q_row + head * dim;
      for (long j = 0; j < count; j += LANES)
        score(q, k + (slot + j) * span.k_row, span.k_row, count - j, dim, call.scale, scores + j);
      long end = limit(span, row);
      if (slot + KEYS > end || slot + KEYS > to || span.sees || start(call, end) > slot)
        hide(call, span, row, slot, to, scores);
      weigh(scores, weights[i], i, dim, s);
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
  return sizeof(Plan) + plan.job_count * sizeof(Job) + plan.part_count * (sizeof(Part) + (plan.cut ? sizeof(State) : 0));
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
