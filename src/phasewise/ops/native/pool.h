// Work on the OpenMP threads that torch already keeps: a second set of threads would spin against the first.
// The three entry points of its runtime are handed in once, at load; without them the caller works alone.
#pragma once
#include <stdint.h>

struct Pool {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int (*thread)();
  int (*threads)();
};

extern Pool pool;

// Memory that the calling thread may use until it asks for the same place again.
enum Place { OF_LINEAR, OF_ATTENTION, OF_STACK, OF_HEAD, PLACES };
void* scratch(Place place, long bytes);

// Where the threads of one `together` wait for each other: awake for as long as a share may take, then asleep. OpenMP's
// own barriers wait awake for milliseconds, and while another process has a core, that is the core which the thread
// they all wait for could have; or, where a process keeps more threads than cores, they fall asleep every time.
struct Meeting {
  int come = 0;       // threads that wait
  unsigned turn = 0;  // how often all have met
  int asleep = 0;     // or about to be
  void wait(int threads);
};

extern thread_local Meeting* meeting;  // the calling thread's

inline void wait_for_all(int threads) {
  if (threads > 1) meeting->wait(threads);
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
  struct Call {
    const Work& work;
    Meeting place;
  } call{work, {}};
  auto each = [](void* data) {
    Call& call = *(Call*)data;
    meeting = &call.place;
    int all = pool.threads();
    call.work(pool.thread(), all);
    wait_for_all(all);  // not in OpenMP's way
  };
  pool.parallel(each, &call, threads, 0);
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

// Numbers below the count one by one, from one share after the other; those of a thread are increasing.
struct Numbers {
  Shares* shares;
  long at = 0, to = 0;
  long next(long end) {  // -1: none is left below `end`, but there may be above it
    if (at >= to && !shares->take(at, to)) return -1;
    return at < end ? at++ : -1;
  }
};
