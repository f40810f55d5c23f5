// A softmax of a few queries, block by block, where what weights are measured by seldom moves.
#pragma once
#include "softmax.h"

// Weights are measured by a score that was the largest once. It moves on only where one is `far` above, so that few
// blocks wait for the largest of theirs; whether it does is up to each query by itself.
class Weighing {
  State& s;
  const float scale;
  const long queries, dim;

  // A query's scores, of which some may be far above.
  __attribute__((noinline)) void measure_anew(const float* scores, long query, float far) {
    F top = splat(-INFINITY);
    for (long j = 0; j < KEYS; j += LANES) top = max(load<F>(scores + j) * scale, top);
    const float highest = most(top), before = s.top[query];
    if (!(highest > before + far)) return;
    const float shrink = exp_negative(splat(before - highest))[0];
    s.top[query] = highest, s.total[query] *= shrink;
    for (long d = 0; d < dim; d++) s.sum[query][d] *= shrink;
  }

  // -> the sum of a query's weights, lane by lane
  F take(float* scores, long query, float far) {
    constexpr int N = KEYS / LANES;
    F scaled[N], sum = {};
    I above = {};
    auto measure = [&](float by) {
      for (int i = 0; i < N; i++) scaled[i] = fused(load<F>(scores + i * LANES), splat(scale), splat(-by));
    };
    measure(s.top[query]);
    for (F& score : scaled) above |= ~(score <= far);  // NaN too, as where nothing was seen yet
    if (__builtin_expect(any(above), 0)) {
      measure_anew(scores, query, far);
      measure(s.top[query] == -INFINITY ? 0 : s.top[query]);
    }
    exp_negative(scaled);
    for (int i = 0; i < N; i++) store(scores + i * LANES, scaled[i]), sum += scaled[i];
    return sum;
  }

 public:
  Weighing(State& s, double scale, long queries, long dim)
      : s(s), scale((float)scale), queries(queries), dim(dim) {}

  // Scores become weights in place, of e^far at most. Where these are rounded to bfloat16 and their sum is not, far = 0
  // keeps the largest exact.
  void take(float (*scores)[KEYS], float far) {
    for (long q = 0; q < queries; q += 4) {
      const long some = queries - q < 4 ? queries - q : 4;
      F sums[4] = {};
      for (long i = 0; i < some; i++) sums[i] = take(scores[q + i], q + i, far);
      const Each found = totals_of(sums);
      for (long i = 0; i < some; i++) s.total[q + i] += found[i];
    }
  }
};
