// Attention of rows over the slots that are listed for each of them, per head of keys, and nothing else.
//
// A job is the queries of one row that share a head, over its list. Long lists are cut at fixed places and joined by
// their log-sum-exp: a row's result depends neither on other rows nor on the number of threads.
#include "kernels.h"
#include "pool.h"
#include "rows.h"
#include "softmax.h"

namespace {

constexpr long PART = 256;  // listed slots of a part

struct Job {
  long span, head, row, first, count;  // queries `first` .. of the group
  long part, parts;
};

struct Part {
  long job, from, to;
};

struct Plan {  // null pointers: only counted
  Job* jobs;
  Part* parts;
  State* states;
  long job_count, part_count;
};

void make_plan(const ListedCall& call, Plan& plan) {
  long group = call.heads_q / call.heads;
  plan.job_count = plan.part_count = 0;
  for (long b = 0; b < call.count; b++)
    for (long head = 0; head < call.heads; head++)
      for (long row = 0; row < call.spans[b].rows; row++)
        for (long first = 0; first < group; first += QUERIES) {
          long some = group - first < QUERIES ? group - first : QUERIES, parts = (call.spans[b].count + PART - 1) / PART;
          parts = parts ? parts : 1;
          if (plan.jobs) plan.jobs[plan.job_count] = {b, head, row, first, some, plan.part_count, parts};
          for (long at = 0; at < parts; at++, plan.part_count++) {
            long to = (at + 1) * PART < call.spans[b].count ? (at + 1) * PART : call.spans[b].count;
            if (plan.parts) plan.parts[plan.part_count] = {plan.job_count, at * PART, to};
          }
          plan.job_count++;
        }
}

// One head's keys and values as they lie.
template <class T> struct Lines {
  const Listed& span;
  const T *k, *v;

  Lines(const Listed& span, long head)
      : span(span), k((const T*)span.k + head * span.k_head), v((const T*)span.v + head * span.v_head) {}

  void fetch(long slot, long dim) const {
    for (long at = 0; at < dim * (long)sizeof(T); at += 64) {
      __builtin_prefetch((const char*)(k + slot * span.k_row) + at, 0, 2);
      __builtin_prefetch((const char*)(v + slot * span.v_row) + at, 0, 2);
    }
  }
};

template <class T> void copy_row(const T* from, long dim, T* to) {  // memcpy would be a call for every row
  constexpr long STEP = sizeof(F) / sizeof(T);
  long d = 0;
  for (; d + STEP <= dim; d += STEP) store(to + d, load<F>(from + d));
  for (; d < dim; d++) to[d] = from[d];
}

// A block of listed rows: where their keys are, and their values side by side.
template <class T> struct Block {
  const T* keys[KEYS];
  T k[KEYS * MOST_DIM], v[KEYS * MOST_DIM];

  void take(const Listed& span, long head, const int32_t* slots, long count, long dim) {
    if (span.k_scale) take_bytes(span, head, slots, count, dim);
    else take_as_they_are(Lines<T>(span, head), slots, count, dim);
  }

  void take_as_they_are(const Lines<T>& rows, const int32_t* slots, long count, long dim) {
    for (long j = 0; j < count; j++) {
      long slot = slots[j] < 0 ? 0 : slots[j];
      keys[j] = rows.k + slot * rows.span.k_row;
      copy_row(rows.v + slot * rows.span.v_row, dim, v + j * dim);
    }
  }

  void take_bytes(const Listed& span, long head, const int32_t* slots, long count, long dim) {
    Lines<int8_t> rows(span, head);
    for (long j = 0; j < count; j++) {
      long slot = slots[j] < 0 ? 0 : slots[j];
      widen_rows(rows.k + slot * span.k_row, 0, span.k_scale + head * span.k_scale_head + slot, 1, dim, k + j * dim);
      widen_rows(rows.v + slot * span.v_row, 0, span.v_scale + head * span.v_scale_head + slot, 1, dim, v + j * dim);
      keys[j] = k + j * dim;
    }
  }
};

void fetch(const Listed& span, long head, const int32_t* slots, long count, long dim, bool floats) {
  for (long j = 0; j < count; j++) {
    long slot = slots[j] < 0 ? 0 : slots[j];
    if (span.k_scale) Lines<int8_t>(span, head).fetch(slot, dim);
    else if (floats) Lines<float>(span, head).fetch(slot, dim);
    else Lines<bf16>(span, head).fetch(slot, dim);
  }
}

template <class T> void read_part(const ListedCall& call, const Job& job, const Part& part, State& s) {
  const Listed& span = call.spans[job.span];
  const int32_t* slots = span.slots + (job.head * span.rows + job.row) * span.count;
  long dim = call.dim, group = call.heads_q / call.heads;
  const T* q = (const T*)span.q + job.row * span.q_row + (job.head * group + job.first) * dim;
  for (long i = 0; i < job.count; i++) {
    s.top[i] = -INFINITY, s.total[i] = 0;
    memset(s.sum[i], 0, dim * 4);
  }
  float scores[QUERIES][KEYS];
  Weight<T> weights[QUERIES][KEYS];
  Block<T> block;
  for (long at = part.from; at < part.to; at += KEYS) {
    long count = part.to - at < KEYS ? part.to - at : KEYS, left = span.count - at - KEYS;
    fetch(span, job.head, slots + at + KEYS, left < 0 ? 0 : left < KEYS ? left : KEYS, dim, call.kind == FLOAT);
    block.take(span, job.head, slots + at, count, dim);
    for (long j = 0; j < count; j += LANES) {
      const T* rows[LANES];  // the last one stands in for those that there are not
      for (long r = 0; r < LANES; r++) rows[r] = block.keys[j + r < count ? j + r : count - 1];
      for (long i = 0; i < job.count; i++) score(q + i * dim, rows, dim, scores[i] + j);
    }
    for (long i = 0; i < job.count; i++) {
      keep_between(scores[i], 0, count);
      for (long j = 0; j < count; j++)
        if (slots[at + j] < 0) scores[i][j] = -INFINITY;
      weigh(scores[i], (float)call.scale, weights[i], i, dim, s);
    }
    add_all_values<T, MOST_QUERIES>(weights, block.v, dim, count, dim, job.count, s.sum);
  }
}

template <class T> void finish(const ListedCall& call, const Plan& plan, const Job& job) {
  const Listed& span = call.spans[job.span];
  const State* parts = plan.states + job.part;
  float sum[MOST_DIM];
  for (long i = 0; i < job.count; i++) {
    float top = -INFINITY, total = 0;
    for (long p = 0; p < job.parts; p++) top = parts[p].top[i] > top ? parts[p].top[i] : top;
    memset(sum, 0, call.dim * 4);
    for (long p = 0; p < job.parts; p++) {
      float weight = parts[p].top[i] == -INFINITY ? 0 : expf(parts[p].top[i] - top);
      total += weight * parts[p].total[i];
      for (long d = 0; d < call.dim; d++) sum[d] += weight * parts[p].sum[i][d];
    }
    long head = job.head * (call.heads_q / call.heads) + job.first + i;
    T* out = (T*)span.out + (job.row * call.heads_q + head) * call.dim;
    put_sums(sum, total == 0 ? 0 : 1 / total, call.dim, out);  // a row that sees nothing reads 0
  }
}

template <class T> void run(const ListedCall& call, const Plan& plan, Shares* shares, int all) {
  for (long from, to; shares[0].take(from, to);)
    for (long p = from; p < to; p++) read_part<T>(call, plan.jobs[plan.parts[p].job], plan.parts[p], plan.states[p]);
  wait_for_all(all);
  for (long from, to; shares[1].take(from, to);)
    for (long j = from; j < to; j++) finish<T>(call, plan, plan.jobs[j]);
}

}  // namespace

API void attend_listed(const ListedCall* call) {
  Plan plan = {};
  make_plan(*call, plan);
  long jobs = plan.job_count * sizeof(Job), parts = plan.part_count * sizeof(Part);
  char* room = (char*)scratch(OF_ATTENTION, jobs + parts + plan.part_count * sizeof(State));
  plan.jobs = (Job*)room, plan.parts = (Part*)(room + jobs), plan.states = (State*)(room + jobs + parts);
  make_plan(*call, plan);
  int threads = enough(call->threads, plan.part_count * PART * call->dim * call->heads_q / call->heads);
  Shares shares[] = {{plan.part_count, threads}, {plan.job_count, threads}};
  together(threads, [&](int, int all) {
    if (call->kind == FLOAT) run<float>(*call, plan, shares, all);
    else run<bf16>(*call, plan, shares, all);
  });
}
