// A job's queries, the lines they read, and what becomes of their scores.
#pragma once
#include "curves.h"
#include "plan.h"
#include "rows.h"
#include "tally.h"

// ---- a job's queries
static Row row_of(const Call& call, const Job& job, long i) {
  long row = (job.first + i) / group(call);
  return job.rows ? job.rows[row] : Row{job.span, row};
}

static long head_of(const Call& call, const Job& job, long i) {
  return job.head * group(call) + (job.first + i) % group(call);
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

static_assert(SHARED_BLOCK == KEYS);

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
    if (slot < span.shared_slots) take(span.shared[slot / SHARED_BLOCK], job.head, slot % SHARED_BLOCK, size);
    if (!span.heads) return;
    const Head& head = span.heads[job.head];
    k = (const char*)head.k + slot * k_row, v = (const char*)head.v + slot * v_row;
    k_worth = head.k_scale ? head.k_scale + slot : nullptr, v_worth = head.v_scale ? head.v_scale + slot : nullptr;
  }

 private:
  void take(const Planes& block, long head, long slot, long size) {
    k = (const char*)block.k + head * block.head * size + slot * k_row;
    v = (const char*)block.v + head * block.head * size + slot * v_row;
    if (!block.k_scale) return;
    k_worth = block.k_scale + head * block.scale_head + slot, v_worth = block.v_scale + head * block.scale_head + slot;
  }
};

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
  if (span.tally) note(Weighed(call, job), i, slot, to, scores);
}

template <class T> static const T* query(const Call& call, const Job& job, long i) {
  Row at = row_of(call, job, i);
  return (const T*)call.spans[at.span].q + at.row * call.spans[at.span].q_row + head_of(call, job, i) * call.dim;
}
