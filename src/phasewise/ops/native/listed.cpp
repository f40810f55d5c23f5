// Attention of rows over the slots that are listed for each of them, per head of keys, and nothing else.
//
// A job is the queries of one row that share a head, over its list. Long lists are cut at fixed places and joined by
// their log-sum-exp: a row's result depends neither on other rows nor on the number of threads.
#include "kernels.h"
#include "levels.h"
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

// Some listed rows of a head.
struct Block {
  const char *k, *v;                  // slot 0
  long k_row, v_row, bytes;           // strides and the length of a row count bytes
  const uint16_t *k_worth, *v_worth;  // of levels; else null
  int32_t slots[KEYS];                // what stands in for a row that there is not has the weight nought
  long count;
  bool gaps;

  // `size`: bytes of a number
  void find(const Listed& span, long head, const int32_t* listed, long rows, long dim, long size) {
    k_row = span.k_row * size, v_row = span.v_row * size, bytes = dim * size;
    k = (const char*)span.k + head * span.k_head * size, v = (const char*)span.v + head * span.v_head * size;
    k_worth = span.k_scale ? span.k_scale + head * span.k_scale_head : nullptr;
    v_worth = span.v_scale ? span.v_scale + head * span.v_scale_head : nullptr;
    count = rows;
    int32_t all = 0;
    for (long j = 0; j < rows; j++) all |= listed[j], slots[j] = listed[j] < 0 ? 0 : listed[j];
    for (long j = rows; j < KEYS; j++) slots[j] = rows ? slots[rows - 1] : 0;
    gaps = all < 0;
  }

  const char* key(long j) const { return k + slots[j] * k_row; }
  const char* value(long j) const { return v + slots[j] * v_row; }

  // Whether LANES rows from this one on lie one after the other.
  bool runs(long from) const {
    I lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return !any(load<I>(slots + from) - slots[from] - lane);
  }

  // Lines that are read next: no hardware foresees them. Inlined, as
  // a compiler leaves out the call of what has no effect.
  __attribute__((always_inline)) inline void fetch(long from, long to) const {
    for (long j = from; j < (to < count ? to : count); j++) {
      for (long at = 0; at < bytes; at += 64) __builtin_prefetch(key(j) + at, 0, 3);
      for (long at = 0; at < bytes; at += 64) __builtin_prefetch(value(j) + at, 0, 3);
      if (!k_worth || (j > from && slots[j] == slots[j - 1] + 1)) continue;
      __builtin_prefetch(k_worth + slots[j], 0, 3);
      __builtin_prefetch(v_worth + slots[j], 0, 3);
    }
  }
};

// The block of a part's slots from `at` on.
void find(const ListedCall& call, const Job& job, const Part& part, long at, Block& block) {
  const Listed& span = call.spans[job.span];
  const int32_t* slots = span.slots + (job.head * span.rows + job.row) * span.count;
  long count = part.to - at < KEYS ? part.to - at : KEYS, size = span.k_scale ? 1 : call.kind == FLOAT ? 4 : 2;
  block.find(span, job.head, slots + at, count > 0 ? count : 0, call.dim, size);
}

// The block after that at `at`, of this part or the next.
void find_next(const ListedCall& call, const Plan& plan, long number, long at, Block& block) {
  const Part* part = plan.parts + number;
  block.count = 0;
  if (at + KEYS < part->to) find(call, plan.jobs[part->job], *part, at + KEYS, block);
  else if (++part < plan.parts + plan.part_count) find(call, plan.jobs[part->job], *part, part->from, block);
}

// Listed gaps get no weight.
void hide(const Block& block, const int32_t* slots, float* scores) {
  keep_between(scores, 0, block.count);
  for (long j = 0; block.gaps && j < block.count; j++)
    if (slots[j] < 0) scores[j] = -INFINITY;
}

// work(block, its list, the block after it) for the blocks of a part. `blocks`: room for those two.
template <class Work>
void each_block(const ListedCall& call, const Plan& plan, long number, Block (&blocks)[2], const Work& work) {
  const Part& part = plan.parts[number];
  const Job& job = plan.jobs[part.job];
  const Listed& span = call.spans[job.span];
  const int32_t* slots = span.slots + (job.head * span.rows + job.row) * span.count;
  find(call, job, part, part.from, blocks[0]);
  for (long at = part.from, turn = 0; at < part.to; at += KEYS, turn ^= 1) {
    find_next(call, plan, number, at, blocks[!turn]);
    work(blocks[turn], slots + at, blocks[!turn]);
  }
}

template <class T> const T* query(const ListedCall& call, const Job& job, long i) {
  const Listed& span = call.spans[job.span];
  return (const T*)span.q + job.row * span.q_row + (job.head * (call.heads_q / call.heads) + job.first + i) * call.dim;
}

// A block's values under their weights: those that lie one after the other are read where they are.
template <class T>
void add_values(const Block& block, long queries, long dim, const Weight<T> (*weights)[KEYS], State& s) {
  T copied[KEYS * MOST_DIM];
  for (long j = 0, end; j < block.count; j = end) {
    bool run = !block.v_worth && block.runs(j);
    for (end = j + LANES; run && end < block.count && block.slots[end] == block.slots[end - 1] + 1; end += LANES)
      if (!block.runs(end)) break;
    end = end < block.count ? end : block.count;
    const T* values = run ? (const T*)block.value(j) : copied;
    for (long r = j; !run && r < end; r++)
      if (block.v_worth)
        widen_rows((const int8_t*)block.value(r), 0, block.v_worth + block.slots[r], 1, dim, copied + (r - j) * dim);
      else copy_row((const T*)block.value(r), dim, copied + (r - j) * dim);
    auto from = (const Weight<T>(*)[KEYS])(weights[0] + j);
    add_all_values<T, MOST_QUERIES>(from, values, run ? block.v_row / sizeof(T) : dim, end - j, dim, queries, s.sum);
  }
}

template <class T> void read_part(const ListedCall& call, const Plan& plan, long number, Block (&blocks)[2], State& s) {
  const Job& job = plan.jobs[plan.parts[number].job];
  long dim = call.dim;
  float scores[QUERIES][KEYS];
  Weight<T> weights[QUERIES][KEYS];
  T wide[LANES * MOST_DIM];
  each_block(call, plan, number, blocks, [&](const Block& here, const int32_t* slots, const Block& ahead) {
    for (long j = 0; j < here.count; j += LANES) {
      const T* rows[LANES];
      for (long r = 0; r < LANES; r++) {
        rows[r] = here.k_worth ? wide + r * dim : (const T*)here.key(j + r);
        if (here.k_worth)
          widen_rows((const int8_t*)here.key(j + r), 0, here.k_worth + here.slots[j + r], 1, dim, wide + r * dim);
      }
      for (long i = 0; i < job.count; i++) {
        ahead.fetch(j + LANES * i / job.count, j + LANES * (i + 1) / job.count);
        score(query<T>(call, job, i), rows, dim, scores[i] + j);
      }
    }
    for (long i = 0; i < job.count; i++) {
      hide(here, slots, scores[i]);
      weigh<T>(scores[i], (float)call.scale, weights[i], i, dim, s);
    }
    add_values<T>(here, job.count, dim, weights, s);
  });
}

#if DOT_INSTRUCTIONS
// The same over levels, as they are.
void read_levels(const ListedCall& call, const Plan& plan, long number, Block (&blocks)[2], State& s) {
  const Job& job = plan.jobs[plan.parts[number].job];
  long dim = call.dim;
  LevelQueries queries;
  for (long i = 0; i < job.count; i++) queries.take(i, query<bf16>(call, job, i), dim);
  alignas(64) float scores[QUERIES][KEYS];
  LevelWeights weights[QUERIES];
  each_block(call, plan, number, blocks, [&](const Block& here, const int32_t* slots, const Block& ahead) {
    auto worth = [&](const bf16* all, long j) {
      if (here.runs(j)) return load_worth(all + here.slots[j], LANES);
      F each;
      for (long r = 0; r < LANES; r++) each[r] = widen(all[here.slots[j + r]]);
      return each;
    };
    const int8_t *keys[KEYS], *values[KEYS];
    for (long j = 0; j < KEYS; j++) keys[j] = (const int8_t*)here.key(j), values[j] = (const int8_t*)here.value(j);
    for (long j = 0; j < here.count; j += LANES) {
      ahead.fetch(j, j + LANES);
      score_levels(queries, job.count, dim, keys + j, worth(here.k_worth, j), scores, j);
    }
    F of_values[KEYS / LANES];
    for (long j = 0; j < KEYS; j += LANES) of_values[j / LANES] = worth(here.v_worth, j);
    for (long i = 0; i < job.count; i++) {
      hide(here, slots, scores[i]);
      weigh<bf16>(scores[i], (float)call.scale, scores[i], i, dim, s);
      weights[i].take(scores[i], of_values);
    }
    add_levels<6>(weights, values, here.count, dim, job.count, s.sum);
  });
}
#else
void read_levels(const ListedCall&, const Plan&, long, Block (&)[2], State&) {}
#endif

template <class T> void read(const ListedCall& call, const Plan& plan, long number, Block (&blocks)[2], State& s) {
  const Job& job = plan.jobs[plan.parts[number].job];
  for (long i = 0; i < job.count; i++) {
    s.top[i] = -INFINITY, s.total[i] = 0;
    memset(s.sum[i], 0, call.dim * 4);
  }
  if (call.spans[job.span].k_scale && by_levels<T>(call.dim)) read_levels(call, plan, number, blocks, s);
  else read_part<T>(call, plan, number, blocks, s);
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
    if (!span.held) continue;
    float held = span.held[job.row * call.heads_q + head];
    const float* rest = span.rest + (job.row * call.heads + job.head) * call.dim;
    for (long d = 0; d < call.dim; d++) put(out + d, held * to_float(out[d]) + (1 - held) * rest[d]);
  }
}

template <class T> void run(const ListedCall& call, const Plan& plan, Shares* shares, int all) {
  Block blocks[2];
  for (long from, to; shares[0].take(from, to);)
    for (long p = from; p < to; p++) read<T>(call, plan, p, blocks, plan.states[p]);
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
