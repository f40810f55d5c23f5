// Work on the OpenMP threads that torch already keeps: a second set of threads would spin against the first.
// The four entry points of its runtime are handed in once, at load; without them the caller works alone.
#pragma once
#include <stdint.h>

struct Pool {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int (*thread)();
  int (*threads)();
  void (*barrier)();
};

extern Pool pool;

// Memory that the calling thread may use until it asks for the same place again.
enum Place { OF_LINEAR, OF_ATTENTION, OF_STACK, OF_HEAD, PLACES };
void* scratch(Place place, long bytes);

inline void wait_for_all(int threads) {
  if (threads > 1) pool.barrier();
}

// As many threads as a call of so many multiplications deserves.
inline int enough(int64_t threads, int64_t work) {
  int64_t most = 1 + (work >> 16);
  return (int)(threads < most ? threads : most);
}

// work(thread, threads) on up to `threads` threads
template <class Work> void together(int threads, const Work& work) {
  if (threads < 2 || !pool.parallel) {
    work(0, 1);
    return;
  }
  auto each = [](void* data) { (*(const Work*)data)(pool.thread(), pool.threads()); };
  pool.parallel(each, (void*)&work, threads, 0);
}

// Shares of a common count, taken by whoever is free: a disturbed core then delays the others little.
struct Shares {
  long next = 0, end, step;
  Shares(long end, int threads) : end(end), step(end / (threads * 8) > 1 ? end / (threads * 8) : 1) {}
  bool take(long& from, long& to) {
    from = __atomic_fetch_add(&next, step, __ATOMIC_RELAXED);
    to = from + step < end ? from + step : end;
    return from < end;
  }
};

// Numbers below the count one by one, from one share after the other.
struct Numbers {
  Shares* shares;
  long at = 0, to = 0;
  long next() {  // -1: no more
    if (at + 1 < to) return ++at;
    return shares->take(at, to) ? at : -1;
  }
};
