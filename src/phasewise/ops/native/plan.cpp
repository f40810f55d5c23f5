// The plan of a call of attention. It depends on the sizes of spans and commons, so layers may share it.
#include "plan.h"

#include "parts.h"

static void add_job(Plan& plan, const Job& job) {
  if (plan.jobs) plan.jobs[plan.job_count] = job;
  plan.job_count++;
}

static void add_part(Plan& plan, const Part& part) {
  if (plan.parts) plan.parts[plan.part_count] = part;
  plan.part_count++;
}

static void add_kept(const AttentionCall& call, Plan& plan) {
  for (long b = 0; b < call.count; b++) {
    if (plan.kept_at) plan.kept_at[b] = plan.kept_count;
    plan.kept_count += call.spans[b].rows * call.heads_q * parts_in_common(call.spans[b]) * (call.dim + 2);
  }
}

// One common's rows and jobs, of less than QUERIES queries where threads would have nothing to do.
static void add_common(const AttentionCall& call, Plan& plan, const Common& common) {
  const Row* rows = plan.rows + plan.row_count;
  long first_row = plan.row_count;
  for (long m = 0; m < common.count; m++)
    for (long r = 0; r < call.spans[common.spans[m]].rows; r++, plan.row_count++)
      if (plan.rows) plan.rows[plan.row_count] = {common.spans[m], r};
  long queries = (plan.row_count - first_row) * group(call), size = queries * call.heads / (call.threads * 2);
  size = size < 4 ? 4 : size < QUERIES ? size : QUERIES;
  for (long head = 0; head < call.heads; head++)
    for (long at = common.from / PART * PART; at < common.to; at += PART)
      for (long first = 0; first < queries; first += size) {
        long from = at > common.from ? at : common.from, to = at + PART < common.to ? at + PART : common.to;
        add_part(plan, {plan.job_count, from, to, at / PART, from > at});
        add_job(plan, {common.spans[0], head, first, queries - first < size ? queries - first : size, 0, 1, rows, 0, 0, 0});
      }
}

// The first block that a window of some rows reaches into.
static long first_block(const Span& span, long window, long row, long last) {
  long first = start(span, window, row);
  for (; span.sight.seats && row <= last; row++)  // of a tree: later rows may sit before earlier ones
    if (start(span, window, row) < first) first = start(span, window, row);
  return first / KEYS * KEYS;
}

// A job whose queries see slots from `begin` to `sinks` and then those from `from` on: of a part that holds both, what
// lies between is left out when it is read.
static void add_apart(Plan& plan, Job job, long begin, long sinks, long from, long to) {
  auto all = [&](auto work) {
    for (long at = begin / PART * PART; at < to; at += PART)
      if (at < sinks || at + PART > from) work(at);
  };
  all([&](long) { job.parts++; });
  add_job(plan, job);
  all([&](long at) {
    long end = at + PART < to ? at + PART : to, first = at < sinks ? begin : from;
    add_part(plan, {plan.job_count - 1, first > at ? first : at, end, at / PART, false});
  });
}

// What a span reads for itself. Parts that were read in common are only taken over.
static void add_own(const AttentionCall& call, Plan& plan, long b, long first_part) {
  const Span& span = call.spans[b];
  for (long head = 0; head < call.heads; head++)
    for (long first = 0; first < span.rows * group(call); first += QUERIES) {
      long left = span.rows * group(call) - first, some = left < QUERIES ? left : QUERIES;
      long window = window_of(call, span, head), sinks = sinks_of(span, head), there = begin_of(span, head);
      long last = (first + some - 1) / group(call), from = first_block(span, window, first / group(call), last);
      if (there > from) from = there;
      long to = limit(span, last), begin = from / PART * PART;
      Job job = {b, head, first, some, plan.part_count - first_part, 0, nullptr, from, window, sinks};
      if (sinks > there && from > there) {
        add_apart(plan, job, there, sinks, from, to);
        continue;
      }
      if (span.common > from) from = span.common;
      job.parts = (to - begin + PART - 1) / PART;
      add_job(plan, job);
      for (long at = begin; at < to; at += PART) {
        long end = at + PART < to ? at + PART : to, next = at > from ? at : from < end ? from : end;
        add_part(plan, {plan.job_count - 1, next, end, at / PART, at < span.common});
      }
    }
}

static void count_all(const AttentionCall& call, Plan& plan) {
  plan.job_count = plan.part_count = plan.row_count = plan.kept_count = plan.levels = 0;
  add_kept(call, plan);
  for (long c = 0; c < call.common_count; c++)
    plan.levels = call.commons[c].level < plan.levels ? plan.levels : call.commons[c].level + 1;
  for (long level = 0; level < plan.levels; level++) {
    for (long c = 0; c < call.common_count; c++)
      if (call.commons[c].level == level) add_common(call, plan, call.commons[c]);
    if (plan.ends) plan.ends[level] = plan.part_count;
  }
  long jobs = plan.job_count, parts = plan.part_count;
  for (long b = 0; b < call.count; b++) add_own(call, plan, b, parts);
  if (plan.ends) plan.ends[plan.levels] = plan.part_count;
  plan.cut = plan.part_count - parts > plan.job_count - jobs;
}

// The memory laid out from `at` on (null: only measured); returns its end.
static char* lay_out(const AttentionCall& call, Plan& plan, char* at) {
  Plan counted = {};
  count_all(call, counted);
  auto take = [&](long bytes) {
    char* here = at;
    at += bytes;
    return here;
  };
  plan.jobs = (Job*)take(counted.job_count * sizeof(Job));
  plan.parts = (Part*)take(counted.part_count * sizeof(Part));
  plan.rows = (Row*)take(counted.row_count * sizeof(Row));
  plan.ends = (long*)take((counted.levels + 1) * sizeof(long));
  plan.kept_at = (long*)take(call.count * sizeof(long));
  plan.kept = (float*)take((counted.kept_count + 1) / 2 * 8);
  plan.states = (State*)take(counted.cut ? counted.part_count * sizeof(State) : 0);
  return at;
}

long plan_room(const AttentionCall& call) {
  Plan plan;
  return (long)lay_out(call, plan, (char*)sizeof(Plan));
}

Plan* make_plan(const AttentionCall& call, void* room) {
  Plan* plan = (Plan*)room;
  lay_out(call, *plan, (char*)(plan + 1));
  count_all(call, *plan);
  return plan;
}

long stages_of(const AttentionCall& call) {
  long levels = 0;
  for (long c = 0; c < call.common_count; c++)
    levels = call.commons[c].level < levels ? levels : call.commons[c].level + 1;
  return levels + 2;
}

void share_out(const Plan* plan, int threads, Shares* shares) {
  for (long stage = 0; stage <= plan->levels; stage++)
    shares[stage] = Shares(plan->ends[stage] - (stage ? plan->ends[stage - 1] : 0), threads);
  shares[plan->levels + 1] = Shares(plan->job_count, threads);
}
