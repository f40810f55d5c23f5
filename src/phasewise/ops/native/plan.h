// Who reads what in a call of attention: jobs, the parts they are cut into, and the stages these are read in.
#pragma once
#include "kernels.h"
#include "softmax.h"

constexpr long PART = 1024;  // slots per part

struct Row {
  long span, row;
};

struct Job {
  long span, head, first, count;  // queries, numbered row * group + query head of the group
  long part, parts;
  const Row* rows;  // of all spans of a common; null: the span reads for itself
  long start;       // none of its queries sees a slot between the sinks and this one
  long window;      // each sees so many slots up to its own; 0: all
  long sinks;       // and those before this one, from the first there is
};

struct Part {
  long job, from, to;
  long place;    // it lies in slots `place` * PART and after
  bool goes_on;  // from what was kept
};

struct Plan {  // null pointers: only counted
  Job* jobs;
  Part* parts;    // stage by stage: the levels of commons, then what is read by single spans
  State* states;  // of the last stage's parts, if some are joined later
  Row* rows;      // of the commons
  long* ends;     // of the stages among the parts
  long* kept_at;  // of the spans among what is kept
  float* kept;    // what queries have summed in earlier stages, for every `place`
  long job_count, part_count, row_count, kept_count, levels;
  bool cut;
};

inline long group(const AttentionCall& call) { return call.heads_q / call.heads; }
inline long limit(const Span& span, long row) {
  return span.sees ? span.n : span.n - span.rows + own_seen(span.sight, span.rows, row);
}
// The first slot of a row's window.
inline long start(const Span& span, long window, long row) {
  long end = (span.sight.seats ? span.sight.seats[row] : span.n - span.rows + row) + 1;
  return window && end > window ? end - window : 0;
}
inline long window_of(const AttentionCall& call, const Span& span, long head) {
  long window = span.heads ? span.heads[head].window : span.sight.window;
  return window ? window : call.window;
}
// The first slot of a KV head, and the end of those that are seen from beyond their window; 0: of none.
inline long begin_of(const Span& span, long head) { return span.heads ? span.heads[head].begin : 0; }
inline long sinks_of(const Span& span, long head) {
  if (span.heads) return span.heads[head].window ? span.heads[head].begin + span.heads[head].sinks : 0;
  return span.sight.window ? span.sight.sinks : 0;
}
inline long parts_in_common(const Span& span) { return (span.common + PART - 1) / PART; }
