// What becomes of the scores of a request's slots, in all layers, once a row is there that has looked at them.
#include <math.h>

#include "kernels.h"
#include "pool.h"
#include "simd.h"

namespace {

struct Scored {
  const RetireCall& call;
  const Line& line;
  const Places* places;
  float* scores;  // each plane where slot 0 would be
  uint8_t* gone;
  const float* weights;

  Scored(const RetireCall& call, long i)
      : call(call), line(call.lines[i]), places(call.places ? call.places + i * call.heads : nullptr) {
    scores = call.scores + line.from - line.begin, gone = call.gone + line.from - line.begin;
    weights = call.weights + line.from * call.heads - line.begin;
  }

  // The new scores. -> how many slots are left
  long take() const {
    I lost = {};
    scores[call.n - 1] = 0;
    for (long slot = line.begin; slot < call.n; slot += LANES) {
      F got = load<F>(weights + slot);
      for (long h = 1; h < call.heads; h++) got += load<F>(weights + h * line.length + slot);
      if (call.together) got /= (float)call.together;
      if (call.sums) got += load<F>(scores + slot);
      I dead = load_floats((const int8_t*)gone + slot) != 0.0f;
      store(scores + slot, select(dead, splat(-INFINITY), got));
      lost += dead;
    }
    long left = call.n - line.begin;
    for (int j = 0; j < LANES; j++) left += lost[j];
    return left;
  }

  // How many queries could have seen a slot.
  float seen(long slot) const {
    return (float)(call.row + 1 - (places->at ? places->at[slot] : slot - places->first));
  }

  float rank(long slot) const {
    return gone[slot] ? INFINITY : places ? scores[slot] / seen(slot) : scores[slot];
  }

  // The lowest rank of the first `end` slots that are not gone; infinite where none is left.
  float least(long end) const {
    F low = splat(INFINITY);
    long slot = line.begin;
    for (; slot + LANES <= end; slot += LANES) {
      F found = load<F>(scores + slot);
      if (places) {
        float by[LANES];
        for (int j = 0; j < LANES; j++) by[j] = seen(slot + j);
        found /= load<F>(by);
      }
      found = select(load_floats((const int8_t*)gone + slot) != 0.0f, splat(INFINITY), found);
      low = select(found < low, found, low);
    }
    float all = -most(-low);
    for (; slot < end; slot++) all = rank(slot) < all ? rank(slot) : all;
    return all;
  }

  void retire(long keep) const {
    for (long surplus = take() - keep; surplus > 0; surplus--) {
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
  int threads = enough(call->threads, call->count * call->heads * call->n);
  Shares shares(call->count, threads);
  together(threads, [&](int, int) {
    for (long from, to; shares.take(from, to);)
      for (long i = from; i < to; i++) Scored(*call, i).retire(call->most[i]);
  });
}
