// Attention of rows over the slots that are listed for each of them, per head of keys, and nothing else.
//
// A job is the queries of one row that share a head, over its list. Long lists are cut at fixed places and joined by
// their log-sum-exp: a row's result depends neither on other rows nor on the number of threads.
#include "kernels.h"
#include "listed.h"
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

template <class T> void copy_row(const T* from, long dim, T* to) {  // memcpy would be a call for every row
  constexpr long STEP = sizeof(F) / sizeof(T);
  long d = 0;
  for (; d + STEP <= dim; d += STEP) store(to + d, load<F>(from + d));
  for (; d < dim; d++) to[d] = from[d];
}

// Some listed rows of a head, where they lie.
struct Block {
  const char *keys[KEYS], *values[KEYS];
  const uint16_t *k_scales[KEYS], *v_scales[KEYS];
  long count, bytes;  // of a row
  bool gaps;

  // `size`: bytes of a number. What stands in for a row that there is not has the weight nought.
  void find(const Listed& span, long head, const int32_t* slots, long rows, long dim, long size) {
    count = rows, bytes = dim * size, gaps = false;
    const char *k = (const char*)span.k + head * span.k_head * size, *v = (const char*)span.v + head * span.v_head * size;
    for (long j = 0; j < rows; j++) {
      long slot = slots[j] < 0 ? 0 : slots[j];
      gaps |= slots[j] < 0;
      keys[j] = k + slot * span.k_row * size, values[j] = v + slot * span.v_row * size;
      if (!span.k_scale) continue;
      k_scales[j] = span.k_scale + head * span.k_scale_head + slot;
      v_scales[j] = span.v_scale + head * span.v_scale_head + slot;
    }
  }

  // Lines that are read next: no hardware foresees them, and too many at once are dropped.
  void fetch(const char* const* rows, long from, long to) const {
    for (long j = from; j < (to < count ? to : count); j++)
      for (long at = 0; at < bytes; at += 64) __builtin_prefetch(rows[j] + at, 0, 2);
  }
};

// The block of a part's slots from `at` on.
void find(const ListedCall& call, const Job& job, const Part& part, long at, Block& block) {
  const Listed& span = call.spans[job.span];
  const int32_t* slots = span.slots + (job.head * span.rows + job.row) * span.count;
  long count = part.to - at < KEYS ? part.to - at : KEYS, size = span.k_scale ? 1 : call.kind == FLOAT ? 4 : 2;
  block.find(span, job.head, slots + at, count > 0 ? count : 0, call.dim, size);
}

// `blocks`: room for the one that is read, and the one after it.
template <class T> void read_part(const ListedCall& call, const Plan& plan, long number, Block (&blocks)[2], State& s) {
  const Part& part = plan.parts[number];
  const Job& job = plan.jobs[part.job];
  const Listed& span = call.spans[job.span];
  long dim = call.dim, group = call.heads_q / call.heads;
  const T* q = (const T*)span.q + job.row * span.q_row + (job.head * group + job.first) * dim;
  const int32_t* slots = span.slots + (job.head * span.rows + job.row) * span.count;
  for (long i = 0; i < job.count; i++) {
    s.top[i] = -INFINITY, s.total[i] = 0;
    memset(s.sum[i], 0, dim * 4);
  }
  float scores[QUERIES][KEYS];
  Weight<T> weights[QUERIES][KEYS];
  T wide[KEYS * MOST_DIM], values[KEYS * MOST_DIM];
  Block *here = &blocks[0], *ahead = &blocks[1];
  find(call, job, part, part.from, *here);
  for (long at = part.from; at < part.to; at += KEYS) {
    ahead->count = 0;
    if (at + KEYS < part.to) find(call, job, part, at + KEYS, *ahead);
    else if (number + 1 < plan.part_count)
      find(call, plan.jobs[plan.parts[number + 1].job], plan.parts[number + 1], plan.parts[number + 1].from, *ahead);
    if (span.k_scale)
      for (long j = 0; j < here->count; j++)
        widen_rows((const int8_t*)here->keys[j], 0, here->k_scales[j], 1, dim, wide + j * dim);
    for (long j = 0; j < here->count; j += LANES) {
      const T* rows[LANES];  // the last one stands in for those that there are not
      for (long r = 0; r < LANES; r++) {
        long row = j + r < here->count ? j + r : here->count - 1;
        rows[r] = span.k_scale ? wide + row * dim : (const T*)here->keys[row];
      }
      for (long i = 0; i < job.count; i++) {
        long from = j + LANES * i / job.count, to = j + LANES * (i + 1) / job.count;
        here->fetch(here->values, from, to);
        ahead->fetch(ahead->keys, from, to);
        score(q + i * dim, rows, dim, scores[i] + j);
      }
    }
    for (long i = 0; i < job.count; i++) {
      keep_between(scores[i], 0, here->count);
      for (long j = 0; here->gaps && j < here->count; j++)
        if (slots[at + j] < 0) scores[i][j] = -INFINITY;
      weigh(scores[i], (float)call.scale, weights[i], i, dim, s);
    }
    for (long j = 0; j < here->count; j++)
      if (span.k_scale) widen_rows((const int8_t*)here->values[j], 0, here->v_scales[j], 1, dim, values + j * dim);
      else copy_row((const T*)here->values[j], dim, values + j * dim);
    add_all_values<T, MOST_QUERIES>(weights, values, dim, here->count, dim, job.count, s.sum);
    Block* done = here;
    here = ahead, ahead = done;
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
  Block blocks[2];
  for (long from, to; shares[0].take(from, to);)
    for (long p = from; p < to; p++) read_part<T>(call, plan, p, blocks, plan.states[p]);
  wait_for_all(all);
  for (long from, to; shares[1].take(from, to);)
    for (long j = from; j < to; j++) finish<T>(call, plan, plan.jobs[j]);
}

}  // namespace

struct ListedPlan {
  Plan plan;
};

// The memory laid out from `at` on (null: only measured); returns its end.
static char* lay_out(const ListedCall& call, Plan& plan, char* at) {
  Plan counted = {};
  make_plan(call, counted);
  plan.jobs = (Job*)at, at += counted.job_count * sizeof(Job);
  plan.parts = (Part*)at, at += counted.part_count * sizeof(Part);
  plan.states = (State*)at;
  return at + counted.part_count * sizeof(State);
}

long listed_room(const ListedCall& call) {
  Plan plan;
  return (long)lay_out(call, plan, (char*)sizeof(ListedPlan));
}

ListedPlan* plan_listed(const ListedCall& call, void* room) {
  ListedPlan* plan = (ListedPlan*)room;
  lay_out(call, plan->plan, (char*)(plan + 1));
  make_plan(call, plan->plan);
  return plan;
}

void share_listed(const ListedPlan* plan, int threads, Shares* shares) {
  shares[0] = Shares(plan->plan.part_count, threads), shares[1] = Shares(plan->plan.job_count, threads);
}

void listed_part(const ListedCall& call, const ListedPlan* plan, Shares* shares, int all) {
  if (call.kind == FLOAT) run<float>(call, plan->plan, shares, all);
  else run<bf16>(call, plan->plan, shares, all);
}

API void attend_listed(const ListedCall* call) {
  ListedPlan* plan = plan_listed(*call, scratch(OF_ATTENTION, listed_room(*call)));
  int threads = enough(call->threads, plan->plan.part_count * PART * call->dim * call->heads_q / call->heads);
  Shares shares[] = {{0, 1}, {0, 1}};
  share_listed(plan, threads, shares);
  together(threads, [&](int, int all) { listed_part(*call, plan, shares, all); });
}
