#include "read_packed.h"

#include "classed.h"
#include "mended.h"
#include "sealed.h"
#include "weighing.h"

// The block that starts at `slot`, of slots whose keys lie alike: it depends on that slot alone.
static long sealed_end(const Sealed& keys, long slot, long to) {
  long end = slot / KEYS * KEYS + KEYS, sealed = end;
  if (slot < keys.slots) sealed = keys.upper ? keys.slots : slot / keys.rows * keys.rows + keys.rows;
  end = sealed < end ? sealed : end;
  return to < end ? to : end;
}

// out[i][j] = query i . key j of `count` rows as they were made
static void score_rows(const Call& call, const Job& job, const bf16* k, long row, long count, float (*out)[KEYS]) {
  for (long j = 0; j < count; j += LANES)
    for (long i = 0; i < job.count; i++)
      score(query<bf16>(call, job, i), Some<bf16>(k, row, j, count).rows, call.dim, out[i] + j);
}

// s += the values of `count` rows as they were made, under the weights from `from` on
static void add_rows(const Call& call, const Job& job, const bf16* v, long row, long from, long count,
                     const float (*all)[KEYS], State& s) {
  Weight<bf16> weights[QUERIES][KEYS];
  for (long i = 0; i < job.count; i++) {
    float own[2 * KEYS] = {};
    memcpy(own, all[i], KEYS * 4);
    F values[KEYS / LANES];
    for (long j = 0; j < KEYS / LANES; j++) values[j] = load<F>(own + from + j * LANES);
    store_weights(weights[i], values);
  }
  add_all_values<bf16, MOST_QUERIES>(weights, v, row, count, call.dim, job.count, s.sum);
}

// Keys or values that lie packed, as a job reads them: in lines of its head.
struct InLines {
  const Call& call;
  const Job& job;
  const Sealed& side;
  const PackedLines lines;
  float peaks[QUERIES + 4];  // of queries
  F quarters[BY_FOURS ? QUERIES * MOST_DIM / LANES : 1];  // of queries, for what is added to blocks
  const bool fours;

  InLines(const Call& call, const Job& job, const Sealed& side, long numbers)
      : call(call), job(job), side(side), lines(side, job.head, numbers),
        fours(by_fours(side)) {}

  void take(const float (*queries)[MOST_DIM]) {
    for (long i = 0; fours && i < job.count; i += 4)
      to_quarters(queries[i], MOST_DIM, job.count - i, call.dim, quarters + i * call.dim / LANES);
    for (long i = 0; i < job.count; i++) peaks[i] = largest_of(queries[i], call.dim);
  }

  void score(long slot, long count, const float (*queries)[MOST_DIM], float (*scores)[KEYS]) {
    score_sealed(side, lines, slot, count, call.dim, job.count, {queries[0], MOST_DIM, peaks}, scores);
    if (!side.rank && !side.aparts) return;
    if (fours && slot % KEYS == 0) score_quarters(side, job.head, slot, call.dim, job.count, quarters, scores);
    else score_mended(side, job.head, slot, count, call.dim, job.count, queries, scores);
  }

  void add(long slot, long count, const float (*weights)[KEYS], State& s) {
    float largest[QUERIES + 4];
    for (long i = 0; !PAIRS && i < job.count; i++) largest[i] = largest_of(weights[i], KEYS);
    add_sealed(side, lines, slot, count, call.dim, job.count, {weights[0], KEYS, largest}, s.sum);
    if (!side.rank && !side.aparts) return;
    if (fours && slot % KEYS == 0) add_quarters(side, job.head, slot, count, call.dim, job.count, weights, s.sum);
    else add_mended(side, job.head, slot, count, call.dim, job.count, weights, s.sum);
  }
};

// In lines of all heads, in two classes.
struct InClasses {
  const Call& call;
  const Job& job;
  const Sealed& side;
  Classed classed;
  const float (*own)[MOST_DIM];
  mutable LineQueries whole;

  InClasses(const Call& call, const Job& job, const Sealed& side, long)
      : call(call), job(job), side(side), classed(side, call.heads * call.dim) {}

  Asked asked() const { return {own, whole, job.count}; }

  void take(const float (*queries)[MOST_DIM]) {
    own = queries;
    if (classed.by_channel) return;
    const uint16_t* scale = side.scale + job.head * call.dim;
    for (long i = 0; i < job.count; i++) whole.take(i, queries[i], scale, classed.bits, call.dim);
  }

  void score(long slot, long count, const float (*)[MOST_DIM], float (*scores)[KEYS]) {
    score_classed(classed, classed.take(slot, count), job.head, call.heads * call.dim, call.dim, asked(), scores);
  }

  void add(long slot, long count, const float (*weights)[KEYS], State& s) {
    add_classed(classed, classed.take(slot, count), job.head, call.dim, job.count, weights, s.sum);
  }
};

constexpr float FAR = 8;  // above what weights are measured by, see Weighing

// Whether all rows of a job see all slots from .. to-1, and nobody asks what becomes of which.
static bool all_alike(const Call& call, const Job& job, long from, long to) {
  const Span& span = call.spans[job.span];
  if (span.tally || span.sight.bias || to > span.n - span.rows - span.first) return false;
  for (long i = 0; i < job.count; i++)
    if (long row = (job.first + i) / group(call); limit(span, row) < to || start(span, job.window, row) > from) return false;
  return true;
}

// What is read at a time of what lies packed: some slots, or some lines of a class.
struct Piece {
  long from, to;
  int which;
  bool there() const { return from < to; }
};

// Piece by piece: a piece's keys are scored while the softmax of the one before is under way.
template <class Then, class Score, class Weigh, class Add>
static void read_pieces(Piece own, const Then& then, const Score& score, const Weigh& weigh, const Add& add) {
  alignas(64) float scores[2][QUERIES][KEYS];
  if (own.there()) score(own, scores[0]);
  for (int turn = 0; own.there(); turn = !turn) {
    const Piece next = then(own);
    weigh(own, scores[turn]);
    if (next.there()) score(next, scores[!turn]);
    add(own, scores[turn]);
    own = next;
  }
}

// The packed slots from .. to-1, which are all alike, class by class: a softmax does not mind the order. Their sums are
// the first of the job's.
static bool read_classes(const Call& call, const Job& job, const InClasses& keys, const InClasses& values, long from,
                         long to, State& s) {
  const Classed &k = keys.classed, &v = values.classed;
  if (!all_alike(call, job, from, to) || !k.same(v, 0, to)) return false;
  alignas(64) float found[QUERIES][MOST_DIM];
  const Softcap cap(call.softcap, call.scale);
  const long first[2] = {k.before_in(from, 0), k.before_in(from, 1)}, end[2] = {k.before_in(to, 0), k.before_in(to, 1)};
  auto piece = [&](int which, long at) {
    if (which == 0 && at == end[0]) which = 1, at = first[1];
    long to = at + KEYS < end[which] ? at + KEYS : end[which];
    if (k.by_channel && at < to && k.mates(at, which) < to) to = k.mates(at, which);  // a register goes beyond the last
    return Piece{at, to, which};
  };
  auto lines = [](const Classed& side, const Piece& own) {
    return side.lines[own.which].from(own.from, own.to - own.from);
  };
  auto score = [&](const Piece& own, float (*to)[KEYS]) {
    score_lines(k, own.from, own.to - own.from, own.which, job.head, call.heads * call.dim, call.dim, keys.asked(), to[0],
                KEYS);
    for (long i = 0; i < job.count; i++) {
      for (long j = 0; cap && j < KEYS; j += LANES) store(to[i] + j, cap(load<F>(to[i] + j)));
      if (own.to - own.from < KEYS) keep_between(to[i], 0, own.to - own.from);  // last: a cap lifts what is hidden
    }
  };
  auto add = [&](const Piece& own, const float (*weights)[KEYS]) {
    add_lines(v, lines(v, own), own.which, job.head, call.dim, weights[0], KEYS, job.count, s.sum);
  };
  Weighing weighing(s, call.scale, job.count, call.dim);
  read_pieces(
      piece(0, first[0]), [&](const Piece& own) { return piece(own.which, own.to); }, score,
      [&](const Piece&, float (*scores)[KEYS]) { weighing.take(scores, FAR); }, add);
  for (long i = 0; i < job.count; i++) {
    memcpy(found[i], s.sum[i], call.dim * 4);
    memset(s.sum[i], 0, call.dim * 4);
  }
  add_scaled(v, job.head, call.dim, job.count, found, s.sum);
  return true;
}
static bool read_classes(const Call&, const Job&, const InLines&, const InLines&, long, long, State&) { return false; }

// Blocks that lie packed, as they are, and the rows behind them.
template <class Side> static void read_sealed(const Call& call, const Job& job, long from, long to, State& s) {
  const Span& span = call.spans[job.span];
  Side keys(call, job, span.sealed->keys, span.sealed->keys.rows), values(call, job, span.sealed->values, call.dim);
  alignas(64) float queries[QUERIES][MOST_DIM];
  for (long i = 0; i < job.count; i++)
    for (long d = 0; d < call.dim; d += LANES) store(queries[i] + d, load_floats(query<bf16>(call, job, i) + d));
  keys.take(queries);
  const long both = keys.side.slots < values.side.slots ? keys.side.slots : values.side.slots, end = both < to ? both : to;
  if (from < end && read_classes(call, job, keys, values, from, end, s)) from = end;
  const Softcap cap(call.softcap, call.scale);
  const bool plain = !cap && !job.rows && all_alike(call, job, from, to);
  auto score = [&](const Piece& own, float (*to)[KEYS]) {
    const long slot = own.from, count = own.to - slot;
    if (slot < keys.side.slots) keys.score(slot, count, queries, to);
    else score_rows(call, job, (const bf16*)Lines(call, job, slot).k, span.k_row, count, to);
    if (!plain) bend(call, job, cap, slot, to);
    for (long i = 0; i < job.count; i++)
      if (!plain) see(call, job, i, slot, own.to, to[i]);
      else if (count < KEYS) keep_between(to[i], 0, count);
  };
  Weighing weighing(s, call.scale, job.count, call.dim);
  auto weigh = [&](const Piece& own, float (*scores)[KEYS]) {
    weighing.take(scores, own.from < values.side.slots ? FAR : 0);
  };
  auto add = [&](const Piece& own, const float (*weights)[KEYS]) {
    const long slot = own.from, count = own.to - slot, rest = values.side.slots - slot;
    const long some = rest < 0 ? 0 : rest < count ? rest : count;
    if (some) values.add(slot, some, weights, s);
    if (some == count) return;
    const bf16* v = (const bf16*)Lines(call, job, slot).v + some * span.v_row;
    add_rows(call, job, v, span.v_row, some, count - some, weights, s);
  };
  auto piece = [&](long slot) { return Piece{slot, slot < to ? sealed_end(keys.side, slot, to) : to, 0}; };
  read_pieces(piece(from), [&](const Piece& own) { return piece(own.to); }, score, weigh, add);
}

void read_packed(const Call& call, const Job& job, long from, long to, State& s) {
  if (call.spans[job.span].sealed->keys.upper) read_sealed<InClasses>(call, job, from, to, s);
  else read_sealed<InLines>(call, job, from, to, s);
}
