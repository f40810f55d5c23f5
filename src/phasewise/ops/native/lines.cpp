#include "lines.h"

#include "ranking.h"

namespace {

constexpr long TILE = 32;    // keys that are put into lines at a time: of each a cache line
constexpr long SHARING = 4;  // queries that meet a line at a time

inline bf16* lines_of(const Voter& own, long head) { return (bf16*)own.layer->low + head * own.layer->head; }
inline const bf16* query(const Voter& own, long head, long g) {
  return (const bf16*)own.rows.q + (head * own.group + g) * own.dim;
}

// Where the queries of a group are largest, in order; of equal ones the earlier.
void find_largest(const Voter& own, long head, int32_t* channels) {
  float sizes[MOST_DIM] = {};
  int32_t numbers[MOST_DIM];
  for (long g = 0; g < own.group; g++) {
    const bf16* q = query(own, head, g);
    for (long d = 0; d < own.dim; d++) sizes[d] += fabsf(widen(q[d]));
  }
  number(sizes, own.dim, numbers);
  list_best(numbers, nullptr, own.dim, own.choice->largest, 0, 1, channels);
}

// A query's numbers at these channels, as lines meet them.
void take_numbers(const bf16* q, long dim, const int32_t* channels, long count, float* to) {
  float all = 0, looked = 0;
  for (long d = 0; d < dim; d++) all += fabsf(widen(q[d]));
  for (long c = 0; c < count; c++) looked += fabsf(widen(q[channels[c]]));
  float heat = fmaxf(sqrtf(looked / fmaxf(all, 1e-30f)), 1e-15f);
  for (long c = 0; c < count; c++) to[c] = widen(q[channels[c]]) / heat;
}

struct Looked {  // some of a head's lines, from a slot on
  const bf16* first;
  long line;
  const int32_t* channels;  // which they are
  long count;
};

// What Q queries [Q, count] get of some lines, N registers of slots at a time -> out [Q, wide]; slots that are done
template <int Q, int N> long add_lines(const Looked& some, const float* q, long slots, float* out, long wide) {
  long j = 0;
  for (; j + N * LANES <= slots; j += N * LANES) {
    F sums[Q][N] = {};
    for (long c = 0; c < some.count; c++) {
      const bf16* line = some.first + some.channels[c] * some.line + j;
      for (int i = 0; i < N; i += 2) __builtin_prefetch(line + (2 * N + i) * LANES, 0, 3);
      for (int i = 0; i < N; i++) {
        F numbers = load_floats(line + i * LANES);
        for (int g = 0; g < Q; g++) sums[g][i] += numbers * q[g * some.count + c];
      }
    }
    for (int g = 0; g < Q; g++)
      for (int i = 0; i < N; i++) store(out + g * wide + j + i * LANES, sums[g][i]);
  }
  return j;
}

// The same for all slots; lines may end behind them.
template <int Q> void add_lines(const Looked& some, const float* q, long slots, float* out, long wide) {
  constexpr int N = REGISTERS == 32 ? (Q > 2 ? 4 : 8) : (Q > 2 ? 2 : 4);
  long done = add_lines<Q, N>(some, q, slots, out, wide);
  Looked rest = {some.first + done, some.line, some.channels, some.count};
  done += add_lines<Q, 1>(rest, q, slots - done, out + done, wide);
  if (done == slots) return;
  bf16 last[MOST_DIM * LANES] = {};
  int32_t each[MOST_DIM];
  for (long c = 0; c < some.count; c++) {
    const bf16* line = some.first + some.channels[c] * some.line + done;
    memcpy(last + c * LANES, line, (slots - done) * 2);
    each[c] = (int32_t)c;
  }
  add_lines<Q, 1>({last, LANES, each, some.count}, q, LANES, out + done, wide);
}

}  // namespace

void make_lines(const Voter& own, long head, long from, long to) {
  Keys keys = {own.rows, head, own.dim};
  bf16* lines = lines_of(own, head);
  bf16 room[TILE * MOST_DIM];
  const bf16* rows[TILE];
  for (long at = from; at < to; at += TILE) {
    long count = to - at < TILE ? to - at : TILE;
    for (long j = 0; j < count; j++) rows[j] = keys.at(at + j, room + j * own.dim);
    for (long d = 0; d < own.dim; d++)
      for (long j = 0; j < count; j++) lines[d * own.layer->line + at + j] = rows[j][d];
  }
}

void multiply_lines(const Voter& own, long head, long from, long to) {
  const Choice& choice = *own.choice;
  long wide = logits_of(choice), count = choice.largest < own.dim ? choice.largest : own.dim;
  int32_t channels[MOST_DIM];
  float q[SHARING * MOST_DIM];
  find_largest(own, head, channels);
  Looked some = {lines_of(own, head) + from, own.layer->line, channels, count};
  for (long first = 0; first < own.group; first += SHARING) {
    long queries = own.group - first < SHARING ? own.group - first : SHARING;
    for (long g = 0; g < queries; g++)
      take_numbers(query(own, head, first + g), own.dim, channels, count, q + g * count);
    float* out = own.logits + (head * own.group + first) * wide + from - choice.begin;
    if (queries == 4) add_lines<4>(some, q, to - from, out, wide);
    else if (queries == 3) add_lines<3>(some, q, to - from, out, wide);
    else if (queries == 2) add_lines<2>(some, q, to - from, out, wide);
    else add_lines<1>(some, q, to - from, out, wide);
  }
}

int64_t fetched_beside(const Voter& own, long head) {
  const int32_t* slots = own.rows.slots + head * own.rows.count;
  long group = own.choice->group, found = 0, end = 0;  // of the last group that was counted
  for (long i = 0; i < own.rows.count; i++) {
    if (slots[i] < end) continue;
    long begin = slots[i] / group * group;
    end = begin + group < own.n ? begin + group : own.n;
    found += end - begin;
  }
  return found - own.rows.count;
}

void take_rest(const Voter& own, long head) {
  const Choice& choice = *own.choice;
  const long dim = own.dim;
  Listed values = own.rows;  // to be read as keys are
  values.k = values.v, values.k_head = values.v_head, values.k_row = values.v_row;
  values.k_scale = values.v_scale, values.k_scale_head = values.v_scale_head;
  Keys rows = {values, head, dim};
  bf16 room[MOST_DIM];
  float added[MOST_DIM] = {}, *sums = own.layer->sums + head * dim, *rest = (float*)own.rows.rest + head * dim;
  for (long slot = choice.known; slot < own.n - 1; slot++) {
    const bf16* value = rows.at(slot, room);
    for (long d = 0; d < dim; d++) added[d] += widen(value[d]);
  }
  const bf16* value = rows.at(own.n - 1, room);
  for (long d = 0; d < dim; d++) {
    sums[d] += added[d];
    rest[d] = (sums[d] + widen(value[d])) / own.n;
  }
}
