// Which pages of cached rows a query should read: those whose bounds let a key promise the largest score.
#include <math.h>

#include <algorithm>

#include "kernels.h"
#include "pool.h"
#include "simd.h"

namespace {

// The most that a key within the bounds can give q: sum over d of max(q low, q high).
template <class T> float promise(const float* up, const float* down, const T* low, const T* high, long dim) {
  F total = {};
  long d = 0;
  for (; d + LANES <= dim; d += LANES)
    total += load<F>(up + d) * load_floats(high + d) + load<F>(down + d) * load_floats(low + d);
  float value = sum(total);
  for (; d < dim; d++) value += up[d] * to_float(high[d]) + down[d] * to_float(low[d]);
  return value;
}

template <class T> void score_all(const PagesCall& call, const Pages& own, long head, float* values, float* parts) {
  long group = call.heads_q / call.heads, dim = call.dim;
  const T* q = (const T*)own.q + head * group * dim;
  float *up = parts, *down = parts + group * dim;
  for (long i = 0; i < group * dim; i++) {
    float x = to_float(q[i]);
    up[i] = x > 0 ? x : 0, down[i] = x < 0 ? x : 0;
  }
  for (long p = 0; p < own.pages; p++) {
    const T* low = (const T*)own.low + head * own.low_head + p * dim;
    const T* high = (const T*)own.high + head * own.high_head + p * dim;
    float best = -INFINITY;
    for (long g = 0; g < group; g++) {
      float value = promise(up + g * dim, down + g * dim, low, high, dim);
      best = value > best || value != value ? value : best;
    }
    values[p] = best == best ? best : INFINITY;  // what cannot be compared is read
  }
}

// The best `chosen` pages, of equal ones the earlier; then their slots in order, and those read in any case.
void list(const Pages& own, const float* values, int32_t* order, int32_t* slots) {
  for (long p = 0; p < own.pages; p++) order[p] = (int32_t)p;
  auto better = [&](int32_t a, int32_t b) { return values[a] > values[b] || (values[a] == values[b] && a < b); };
  if (own.chosen < own.pages) std::nth_element(order, order + own.chosen, order + own.pages, better);
  std::sort(order, order + own.chosen);
  for (long i = 0; i < own.chosen; i++)
    for (long j = 0; j < own.size; j++) *slots++ = (int32_t)(order[i] * own.size + j);
  for (long slot = own.own; slot < own.n; slot++) *slots++ = (int32_t)slot;
}

}  // namespace

API void choose_pages(const PagesCall* call) {
  long most = 0, work = 0;
  for (long b = 0; b < call->count; b++) {
    most = call->spans[b].pages > most ? call->spans[b].pages : most;
    work += call->spans[b].pages * call->heads_q * call->dim;
  }
  int threads = enough(call->threads, 2 * work);
  long each = (most * 8 + 2 * call->heads_q / call->heads * call->dim * 4 + 63) / 64 * 64;
  char* room = (char*)scratch(OF_ATTENTION, threads * each);
  Shares shares(call->count * call->heads, threads);
  together(threads, [&](int thread, int) {
    float* values = (float*)(room + thread * each);
    int32_t* order = (int32_t*)(values + most);
    for (long from, to; shares.take(from, to);)
      for (long i = from; i < to; i++) {
        const Pages& own = call->spans[i / call->heads];
        long head = i % call->heads;
        if (call->kind == FLOAT) score_all<float>(*call, own, head, values, (float*)(order + most));
        else score_all<bf16>(*call, own, head, values, (float*)(order + most));
        list(own, values, order, own.slots + head * (own.chosen * own.size + own.n - own.own));
      }
  });
}
