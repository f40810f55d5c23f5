// Which pages of cached rows a query should read: those whose bounds let a key promise the largest score, or whose vector
// gives the largest one.
#include "kernels.h"
#include "listed.h"
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

// Whole numbers in the order of floats that are no NaN.
void number(const float* values, long count, int32_t* numbers) {
  for (long p = 0; p < count; p++) {
    float value = values[p] + 0.0f;  // one nought
    int32_t bits;
    memcpy(&bits, &value, 4);
    numbers[p] = bits < 0 ? bits ^ 0x7fffffff : bits;
  }
}

long reach(const int32_t* numbers, long count, int32_t least) {
  int32_t found = 0;
  for (long p = 0; p < count; p++) found += numbers[p] >= least;
  return found;
}

// The largest number that `some` of all (at least one, less than all) reach. Its bits are found one by one: no branch
// depends on the numbers.
int32_t threshold(const int32_t* numbers, long count, long some) {
  int32_t found = reach(numbers, count, 0) >= some ? 0 : INT32_MIN;
  for (int32_t bit = 1 << 30; bit; bit >>= 1)
    if (reach(numbers, count, found | bit) >= some) found |= bit;
  return found;
}

// The slots of the best `chosen` pages in order, of equal ones the earlier; then those read in any case.
void list(const Pages& own, const int32_t* numbers, int32_t* slots) {
  int32_t least = own.chosen ? INT32_MIN : INT32_MAX;  // which no float has
  long equal = 0;                                      // how many pages that are no better are taken
  if (own.chosen && own.chosen < own.pages) {
    least = threshold(numbers, own.pages, own.chosen);
    equal = own.chosen - reach(numbers, own.pages, least + 1);
  }
  for (long p = 0; p < own.pages; p++) {
    if (numbers[p] < least || (numbers[p] == least && equal-- <= 0)) continue;
    for (long j = 0; j < own.size; j++) *slots++ = (int32_t)(p * own.size + j);
  }
  for (long slot = own.own; slot < own.n; slot++) *slots++ = (int32_t)slot;
}

}  // namespace

long pages_room(const PagesCall& call, long most) {
  return (most * 8 + 2 * call.heads_q / call.heads * call.dim * 4 + 63) / 64 * 64;
}

void choose_of_head(const PagesCall& call, const Pages& own, long head, void* room) {
  float* values = (float*)room;
  int32_t* numbers = (int32_t*)(values + own.pages);
  void* parts = numbers + own.pages;
  if (call.kind == FLOAT) score_all(call, own, head, values, (float*)parts);
  else score_all(call, own, head, values, (bf16*)parts);
  number(values, own.pages, numbers);
  list(own, numbers, own.slots + head * (own.chosen * own.size + own.n - own.own));
}

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
