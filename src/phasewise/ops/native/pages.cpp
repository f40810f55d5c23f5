// Which pages of cached rows a query should read: those whose bounds let a key promise the largest score, or whose vector
// gives the largest one.
#include "kernels.h"
#include "pool.h"
#include "ranking.h"
#include "softmax.h"

namespace {

// values[page] = the largest over the group of the most that a key within the bounds can give q, the sum over d of
// max(q low, q high); or of q times the vector. `parts`: room for the positive and the negative part of q.
template <class T> void score_all(const PagesCall& call, const Pages& own, long head, float* values, T* parts) {
  long group = call.heads_q / call.heads, dim = call.dim;
  const T* q = (const T*)own.q + head * group * dim;
  const T *low = (const T*)own.low + head * own.low_head, *high = (const T*)own.high + head * own.high_head;
  T *up = parts, *down = parts + group * dim;
  for (long i = 0; i < group * dim; i++) {
    float x = to_float(q[i]);
    put(up + i, x < 0 ? 0 : x), put(down + i, x < 0 ? x : 0);
  }
  for (long p = 0; p < own.pages; p += LANES) {
    const T *lows[LANES], *highs[LANES];  // the last one stands in for those that there are not
    for (long j = 0; j < LANES; j++) {
      long page = p + j < own.pages ? p + j : own.pages - 1;
      lows[j] = low + page * dim, highs[j] = own.high ? high + page * dim : nullptr;
    }
    float best[LANES], some[LANES], more[LANES] = {};
    for (long g = 0; g < group; g++) {
      if (own.high) score(up + g * dim, highs, dim, more), score(down + g * dim, lows, dim, some);
      else score(q + g * dim, lows, dim, some);
      for (long j = 0; j < LANES; j++) {
        float value = some[j] + more[j];
        best[j] = g == 0 || value > best[j] || value != value ? value : best[j];
      }
    }
    for (long j = 0; j < LANES && p + j < own.pages; j++)
      values[p + j] = best[j] == best[j] ? best[j] : INFINITY;  // what cannot be compared is read
  }
}

// Bytes that a thread works with.
long pages_room(const PagesCall& call, long most) {
  return (most * 8 + 2 * call.heads_q / call.heads * call.dim * 4 + 63) / 64 * 64;
}

// Which slots one head of a row is to read.
void choose_of_head(const PagesCall& call, const Pages& own, long head, void* room) {
  float* values = (float*)room;
  int32_t* numbers = (int32_t*)(values + own.pages);
  void* parts = numbers + own.pages;
  if (call.kind == FLOAT) score_all(call, own, head, values, (float*)parts);
  else score_all(call, own, head, values, (bf16*)parts);
  number(values, own.pages, numbers);
  int32_t* slots = own.slots + head * (own.chosen * own.size + own.n - own.own);
  slots = list_best(numbers, nullptr, own.pages, own.chosen, 0, own.size, slots);
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
  long each = pages_room(*call, most);
  char* room = (char*)scratch(OF_ATTENTION, threads * each);
  Shares shares(call->count * call->heads, threads);
  together(threads, [&](int thread, int) {
    for (long from, to; shares.take(from, to);)
      for (long i = from; i < to; i++)
        choose_of_head(*call, call->spans[i / call->heads], i % call->heads, room + thread * each);
  });
}
