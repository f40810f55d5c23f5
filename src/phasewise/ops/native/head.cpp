// The head of a language model in one call: the final norm and the product with the vocabulary's weights, whose float32
// sums become logits as they are; or only the largest per row is kept, and logits are never written.
#include "parts.h"
#include "rows.h"

static bool wins(const Best& a, const Best& b) {
  bool a_nan = a.value != a.value, b_nan = b.value != b.value;
  if (a_nan != b_nan) return a_nan;
  if (a_nan || a.value == b.value) return a.index < b.index;
  return a.value > b.value;
}

static long lines(long bytes) { return (bytes + 63) / 64 * 64; }

API void head(const HeadCall* call) {
  const Weights& w = *call->weights;
  long rows = call->rows, hidden = w.inputs;
  int threads = enough(call->threads, rows * w.outputs * hidden);
  LinearCall product = {&w, {nullptr, hidden, BFLOAT}, {}, {call->logits, w.outputs, FLOAT}, rows, threads, nullptr, call->cap};
  long normed = lines(rows * hidden * 2), bests = call->logits ? 0 : lines(threads * rows * sizeof(Best));
  char* room = (char*)scratch(OF_HEAD, normed + bests + linear_room(product));
  bf16* x = (bf16*)room;
  product.x.data = x;
  if (!call->logits) {
    product.best = (Best*)(room + normed);
    for (long i = 0; i < threads * rows; i++) {
      const uint32_t* mask = call->masks ? call->masks[i % rows] : nullptr;
      product.best[i] = {-INFINITY, mask ? -1 : 0, mask};  // where all outputs are -inf, the first is the largest
    }
  }
  Shares shares(panels(w), threads);
  together(threads, [&](int thread, int all) {
    for (long r = thread; r < rows; r += all)
      normalise(call->x + r * call->x_row, call->norm.weight, call->norm.eps, hidden, x + r * hidden);
    wait_for_all(all);
    linear_part(product, room + normed + bests, &shares, thread, all);
  });
  if (call->logits) return;
  for (long r = 0; r < rows; r++) {
    Best best = product.best[r];
    for (long t = 1; t < threads; t++)
      if (wins(product.best[t * rows + r], best)) best = product.best[t * rows + r];
    call->best[r] = best.index;
  }
}
