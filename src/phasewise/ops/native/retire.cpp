// What becomes of the scores of a request's slots, in all layers, once a row is there that has looked at them.
#include <math.h>

#include "kernels.h"
#include "pool.h"
#include "simd.h"

namespace {

struct Scored {
  float* scores;
  uint8_t* gone;
  const float* weights;  // [shared, room]
  long shared;           // heads whose weights are summed

  // The new scores. -> how many slots are left
  long take(const RetireCall& call) const {
    I lost = {};
    scores[call.n - 1] = 0;
    for (long slot = 0; slot < call.n; slot += LANES) {
      F got = load<F>(weights + slot);
      for (long h = 1; h < shared; h++) got += load<F>(weights + h * call.room + slot);
      if (call.together) got /= (float)call.together;
      if (call.sums) got += load<F>(scores + slot);
      I dead = load_floats((const int8_t*)gone + slot) != 0.0f;
      store(scores + slot, select(dead, splat(-INFINITY), got));
      lost += dead;
    }
    long left = call.n;
    for (int j = 0; j < LANES; j++) left += lost[j];
    return left;
  }

  float rank(long slot) const { return gone[slot] ? INFINITY : scores[slot]; }

  // The lowest score of the first `end` slots that are not gone; infinite where none is left.
  float least(long end) const {
    F low = splat(INFINITY);
    long slot = 0;
    for (; slot + LANES <= end; slot += LANES) {
      F found = load<F>(scores + slot);
      found = select(load_floats((const int8_t*)gone + slot) != 0.0f, splat(INFINITY), found);
      low = select(found < low, found, low);
    }
    float all = -most(-low);
    for (; slot < end; slot++) all = rank(slot) < all ? rank(slot) : all;
    return all;
  }

  void retire(const RetireCall& call) const {
    for (long surplus = take(call) - call.most; surplus > 0; surplus--) {
      float low = least(call.older);
      if (!(low < INFINITY)) return;
      long last = call.older - 1;
      while (rank(last) != low) last--;
      scores[last] = -INFINITY, gone[last] = 1;
    }
  }
};

}  // namespace

API void retire(const RetireCall* call) {
  long kept = call->together ? 1 : call->heads;
  int threads = enough(call->threads, call->layers * call->heads * call->n);
  Shares shares(call->layers * kept, threads);
  together(threads, [&](int, int) {
    for (long from, to; shares.take(from, to);)
      for (long i = from; i < to; i++) {
        const float* weights = call->weights + i * (call->heads / kept) * call->room;
        Scored{call->scores + i * call->room, call->gone + i * call->room, weights, call->heads / kept}.retire(*call);
      }
  });
}
