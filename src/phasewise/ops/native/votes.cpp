#include "votes.h"

#include "pool.h"
#include "ranking.h"
#include "rows.h"
#include "softmax.h"

namespace {

constexpr long VECTORS = 512;         // vectors of a part
constexpr long VOTES = 1024;        // that are counted at a time
constexpr long MOST_SHARED = 64;    // queries that meet a vector at a time
constexpr long MOST_VOTING = 1024;  // queries that have a say in a list

inline long chunks(long count, long size) { return (count + size - 1) / size; }
inline long chunks(const Choice& choice) { return chunks(choice.end - choice.begin, VECTORS); }
// Candidates of a part.
inline long some_units(const Choice& choice) {
  long each = VOTES / (choice.each + choice.before);
  return each > 1 ? each : 1;
}
inline long padded(long count) { return (count + LANES - 1) / LANES * LANES; }

// ---- vectors
// Keys of one head, slot by slot, as bfloat16.
struct Keys {
  const Listed& rows;
  long head, dim;
  const bf16* at(long slot, bf16* room) const {
    long place = head * rows.k_head + slot * rows.k_row;
    if (!rows.k_scale) return (const bf16*)rows.k + place;
    widen_rows((const int8_t*)rows.k + place, 0, rows.k_scale + head * rows.k_scale_head + slot, 1, dim, room);
    return room;
  }
};

// A number that is none stays.
void make_bounds(const Keys& keys, long slot, long size, bf16* low, bf16* high) {
  bf16 room[MOST_DIM];
  float least[MOST_DIM], most[MOST_DIM];
  const bf16* key = keys.at(slot, room);
  for (long d = 0; d < keys.dim; d++) least[d] = most[d] = widen(key[d]);
  for (long j = 1; j < size; j++) {
    key = keys.at(slot + j, room);
    for (long d = 0; d < keys.dim; d++) {
      float x = widen(key[d]);
      least[d] = (x < least[d]) | (x != x) ? x : least[d];
      most[d] = (x > most[d]) | (x != x) ? x : most[d];
    }
  }
  for (long d = 0; d < keys.dim; d++) low[d] = narrow(least[d]), high[d] = narrow(most[d]);
}

void make_mean(const Keys& keys, long slot, long step, long parts, bf16* mean) {
  bf16 room[MOST_DIM];
  float total[MOST_DIM] = {}, some[MOST_DIM];
  for (long p = 0; p < parts; p++) {
    memset(some, 0, sizeof some);
    for (long j = 0; j < step; j++) {
      const bf16* key = keys.at(slot + p * step + j, room);
      for (long d = 0; d < keys.dim; d++) some[d] += widen(key[d]);
    }
    for (long d = 0; d < keys.dim; d++) total[d] += some[d];
  }
  for (long d = 0; d < keys.dim; d++) mean[d] = narrow(total[d] / (step * parts));
}

const int32_t* channels_of(const Voter& own, long head) {
  return own.layer->channels ? own.layer->channels + head * own.choice->width : nullptr;
}

// The vectors from .. to-1 of a head.
void make(const Voter& own, long head, long from, long to) {
  const Choice& choice = *own.choice;
  Keys keys = {own.rows, head, own.dim};
  const int32_t* channels = channels_of(own, head);
  bf16 room[MOST_DIM];
  for (long i = from; i < to; i++) {
    bf16* low = (bf16*)own.layer->low + head * own.layer->head + i * choice.width;
    bf16* high = (bf16*)own.layer->high + head * own.layer->head + i * choice.width;
    if (channels) {
      const bf16* key = keys.at(i, room);
      for (long c = 0; c < choice.width; c++) low[c] = key[channels[c]];
    } else if (own.layer->high) {
      make_bounds(keys, i * choice.step, choice.step * choice.parts, low, high);
    } else {
      make_mean(keys, i * choice.step, choice.step, choice.parts, low);
    }
  }
}

// ---- products
// out[lane] = q . rows[lane]. What is narrower than a register is read under a mask.
void score_rows(const bf16* q, const bf16* const* rows, long width, float* out) {
#if DOT_INSTRUCTIONS
  if (width < 32) {
    __mmask32 some = (__mmask32)((1u << width) - 1);
    __m512bh query = (__m512bh)_mm512_maskz_loadu_epi16(some, q);
    F parts[LANES];
    for (long j = 0; j < LANES; j++)
      parts[j] = (F)_mm512_dpbf16_ps(_mm512_setzero_ps(), query, (__m512bh)_mm512_maskz_loadu_epi16(some, rows[j]));
    store(out, sums_of(parts));
    return;
  }
#endif
  score(q, rows, width, out);
}

// A head's query as its vectors meet it: turned, then its channels; in place of `q` [dim].
void prepare(const Voter& own, long head, const bf16* q, bf16* to) {
  bf16 turned[MOST_DIM];
  long size = own.layer->turn ? own.layer->turned : 0, half = size / 2;
  const float *cos = own.layer->turn, *sin = cos + size;
  for (long i = 0; i < half; i++) {
    float a = widen(q[i]), b = widen(q[half + i]);
    turned[i] = narrow(a * cos[i] + b * sin[i]);
    turned[half + i] = narrow(b * cos[half + i] + a * sin[half + i]);
  }
  memcpy(turned + size, q + size, (own.dim - size) * 2);
  const int32_t* channels = channels_of(own, head);
  for (long c = 0; c < own.choice->width; c++) to[c] = turned[channels ? channels[c] : c];
}

// Queries of a group as vectors meet them; where these are bounds, the positive parts, and the negative ones apart.
struct Queries {
  bf16 all[MOST_SHARED * MOST_DIM], below[MOST_SHARED * MOST_DIM];

  void take(const Voter& own, long head, long first, long count) {
    long width = own.choice->width;
    for (long g = 0; g < count; g++) {
      bf16 *q = all + g * width, *down = below + g * width;
      prepare(own, head, (const bf16*)own.rows.q + (head * own.group + first + g) * own.dim, q);
      for (long d = 0; own.layer->high && d < width; d++) {
        float x = widen(q[d]);
        q[d] = narrow(x < 0 ? 0 : x), down[d] = narrow(x < 0 ? x : 0);
      }
    }
  }
};

// What the vectors from .. to-1 of a head give the queries of its group.
void multiply(const Voter& own, long head, long from, long to) {
  const LayerChoice& layer = *own.layer;
  Keys keys = {own.rows, head, own.dim};
  long width = own.choice->width, wide = logits_of(*own.choice);
  bf16 room[LANES * MOST_DIM];
  auto find = [&](const void* vectors, long j, const bf16** rows) {  // the last one stands in for those beyond
    for (long r = 0; r < LANES; r++) {
      long i = j + r < to ? j + r : to - 1;
      rows[r] = vectors ? (const bf16*)vectors + head * layer.head + i * width : keys.at(i, room + r * own.dim);
    }
  };
  Queries queries;
  for (long first = 0; first < own.group; first += MOST_SHARED) {
    long some = own.group - first < MOST_SHARED ? own.group - first : MOST_SHARED;
    queries.take(own, head, first, some);
    for (long j = from; j < to; j += LANES) {
      const bf16 *lows[LANES], *highs[LANES];
      find(layer.low, j, lows);
      if (layer.high) find(layer.high, j, highs);
      for (long g = 0; g < some; g++) {
        float products[LANES], more[LANES];
        float* out = own.logits + (head * own.group + first + g) * wide + j - own.choice->begin;
        if (layer.high) {
          score(queries.all + g * width, highs, width, more), score(queries.below + g * width, lows, width, products);
          for (long r = 0; r < LANES; r++) products[r] += more[r];
        } else {
          score_rows(queries.all + g * width, lows, width, products);
        }
        memcpy(out, products, sizeof products);
      }
    }
  }
}

// The largest of a chunk's logits, times the scale, and the sum of the weights beside it.
void sum_up(const Voter& own, long query, long chunk, long from, long to) {
  const Choice& choice = *own.choice;
  float* logits = own.logits + query * logits_of(choice) - choice.begin;
  float scale = (float)(own.layer->scale ? own.layer->scale : own.scale), top = -INFINITY, total = 0;
  for (long j = from; j < to; j++) top = (logits[j] *= scale) > top ? logits[j] : top;
  F sums = {};
  long j = from;
  for (; j + LANES <= to; j += LANES) sums += exp_negative(load<F>(logits + j) - top);
  for (; j < to; j++) total += exp_negative(splat(logits[j] - top))[0];
  float* state = own.states + (query * chunks(choice) + chunk) * 2;
  state[0] = top, state[1] = top == -INFINITY ? 0 : total + sum(sums);
}

// ---- votes
// ln x for x >= 1; error below 1e-7 where it is small, else relative
F ln(F x) {
  I bits = (I)x, power = (bits >> 23) - 127;
  F part = (F)((bits & 0x7fffff) | 0x3f800000);  // 1 .. 2
  I large = part > 1.41421356f;
  part = select(large, part * 0.5f, part) - 1.0f;
  F n = __builtin_convertvector(power - large, F), square = part * part;  // `large` is -1 where it is true
  F p = splat(7.0376836292e-2f);
  p = p * part - 1.1514610310e-1f;
  p = p * part + 1.1676998740e-1f;
  p = p * part - 1.2420140846e-1f;
  p = p * part + 1.4249322787e-1f;
  p = p * part - 1.6668057665e-1f;
  p = p * part + 2.0000714765e-1f;
  p = p * part - 2.4999993993e-1f;
  p = p * part + 3.3333331174e-1f;
  p = p * part * square + n * -2.12194440e-4f - 0.5f * square;
  return part + p + n * 0.693359375f;
}

// The logarithm of the sum of the weights of a query's logits.
float total_of(const Voter& own, long query) {
  long count = chunks(*own.choice);
  const float* state = own.states + query * count * 2;
  float top = -INFINITY, total = 0;
  for (long c = 0; c < count; c++) top = state[2 * c] > top ? state[2 * c] : top;
  for (long c = 0; c < count; c++)
    if (state[2 * c] > -INFINITY) total += expf(state[2 * c] - top) * state[2 * c + 1];
  return top + logf(total);
}

// Who has a say in a head's list, or in that of all.
struct Electors {
  const Choice& choice;
  long count;
  const float* logits;  // of the first one
  float less[MOST_VOTING];

  Electors(const Voter& own, long head) : choice(*own.choice) {
    long first = choice.joint ? 0 : head * own.group;
    count = choice.joint ? own.heads * own.group : own.group;
    logits = own.logits + first * logits_of(choice);
    for (long g = 0; g < count; g++) less[g] = choice.rule == PROMISE ? 0 : total_of(own, first + g);
  }

  // votes[j] for the vectors from .. to-1; some more are written
  void vote(long from, long to, float* votes) const {
    long wide = logits_of(choice);
    for (long j = from; j < to; j += LANES) {
      auto share = [&](long g) { return load<F>(logits + g * wide + j - choice.begin) - less[g]; };
      F best = share(0), sums = {};
      I odd = best != best;
      for (long g = 1; g < count; g++) {
        F value = share(g);
        odd |= value != value, best = max(value, best);
      }
      if (choice.rule == SHARE) {
        for (long g = 0; g < count; g++) sums += exp_negative(share(g) - best);
        best = select(best > -INFINITY, best + ln(max(sums, splat(1.0f))), best);
      }
      store(votes + j - from, select(odd, splat(INFINITY), best));  // what cannot be compared is read
    }
  }
};

}  // namespace

long logits_of(const Choice& choice) { return padded(choice.end - choice.begin) + LANES; }
long states_of(const Choice& choice) { return 2 * chunks(choice); }
long numbers_of(const Choice& choice) { return padded(choice.units); }
long listed_of(const Choice& choice, long n) {
  return choice.first + choice.chosen * choice.size + n - choice.first - choice.units * choice.size;
}

long scoring_parts(const Choice& choice, long heads) { return heads * chunks(choice); }

void score_part(const Voter& own, long part) {
  const Choice& choice = *own.choice;
  long head = part / chunks(choice), chunk = part % chunks(choice), from = choice.begin + chunk * VECTORS;
  long to = from + VECTORS < choice.end ? from + VECTORS : choice.end;
  make(own, head, from > choice.known ? from : choice.known, to);
  multiply(own, head, from, to);
  for (long g = 0; choice.rule != PROMISE && g < own.group; g++) sum_up(own, head * own.group + g, chunk, from, to);
}

long voting_parts(const Choice& choice, long heads) {
  return (choice.joint ? 1 : heads) * chunks(choice.units, some_units(choice));
}

void vote_part(const Voter& own, long part) {
  const Choice& choice = *own.choice;
  long some = some_units(choice), count = chunks(choice.units, some), head = part / count, from = part % count * some;
  long to = from + some < choice.units ? from + some : choice.units;
  long first = choice.at + from * choice.each - choice.before, last = choice.at + to * choice.each;
  first = first > choice.begin ? first : choice.begin, last = last < choice.end ? last : choice.end;
  float votes[VOTES + LANES], best[VOTES];
  Electors(own, head).vote(first, last, votes);
  for (long u = from; u < to; u++) {
    long begin = choice.at + u * choice.each - choice.before, end = choice.at + (u + 1) * choice.each;
    float most = -INFINITY;
    for (long j = begin > first ? begin : first; j < end && j < last; j++)
      most = votes[j - first] > most ? votes[j - first] : most;
    best[u - from] = most;
  }
  number(best, to - from, own.numbers + head * numbers_of(choice) + from);
}

void list_part(const Voter& own, long head) {
  const Choice& choice = *own.choice;
  if (choice.queries) {
    long wide = own.group * own.dim, layer = own.layer - choice.layers;
    memcpy(choice.queries + (layer * own.heads + head) * wide, (const bf16*)own.rows.q + head * wide, wide * 2);
  }
  int32_t* slots = (int32_t*)own.rows.slots + head * own.rows.count;
  for (long slot = 0; slot < choice.first; slot++) *slots++ = (int32_t)slot;
  if (own.layer->way == GIVEN) {
    memcpy(slots, (const int32_t*)own.layer->low + head * choice.chosen, choice.chosen * 4);
    slots += choice.chosen;
  } else {
    const int32_t* numbers = own.numbers + (choice.joint ? 0 : head) * numbers_of(choice);
    slots = list_best(numbers, choice.units, choice.chosen, choice.first, choice.size, slots);
  }
  for (long slot = choice.first + choice.units * choice.size; slot < own.n; slot++) *slots++ = (int32_t)slot;
}

// ---- single rows of one layer
namespace {

struct VotesSpan {  // a row at the last of n slots of keys [heads, n, dim]
  const Choice* choice;  // of one layer
  const bf16* q;         // [heads_q, dim]
  const void* k;
  int64_t k_head, k_row;
  const uint16_t* k_scale;
  int64_t k_scale_head, n;
  int32_t* slots;
};

struct VotesCall {
  const VotesSpan* spans;
  int64_t count, heads_q, heads, dim, threads;
};

// work(part) for all parts of all voters
template <class Count, class Work>
void share_out(const Voter* voters, long count, int threads, const Count& parts, const Work& work) {
  for (long v = 0; v < count; v++) {
    Shares shares(parts(voters[v]), threads);
    together(threads, [&](int, int) {
      for (long from, to; shares.take(from, to);)
        for (long i = from; i < to; i++) work(voters[v], i);
    });
  }
}

}  // namespace

API void choose_slots(const VotesCall* call) {
  long room = call->count * sizeof(Voter), vectors = 0;
  for (long b = 0; b < call->count; b++) {
    const Choice& choice = *call->spans[b].choice;
    room += 4 * (call->heads_q * (logits_of(choice) + states_of(choice)) + call->heads * numbers_of(choice));
    vectors += (choice.end - choice.begin) * call->heads_q * choice.width;
  }
  Voter* voters = (Voter*)scratch(OF_ATTENTION, room);
  float* at = (float*)(voters + call->count);
  for (long b = 0; b < call->count; b++) {
    const VotesSpan& own = call->spans[b];
    const Choice& choice = *own.choice;
    Listed rows = {};
    rows.q = own.q, rows.k = own.k, rows.k_head = own.k_head, rows.k_row = own.k_row;
    rows.k_scale = own.k_scale, rows.k_scale_head = own.k_scale_head;
    rows.count = listed_of(choice, own.n), rows.slots = own.slots;
    float* states = at + call->heads_q * logits_of(choice);
    int32_t* numbers = (int32_t*)(states + call->heads_q * states_of(choice));
    voters[b] = {&choice,    choice.layers, rows, call->heads, call->heads_q / call->heads, call->dim, own.n, 0, at, states,
                 numbers};
    at = (float*)(numbers + call->heads * numbers_of(choice));
  }
  int threads = enough(call->threads, vectors);
  auto scores = [&](const Voter& own) { return scoring_parts(*own.choice, own.heads); };
  auto votes = [&](const Voter& own) { return voting_parts(*own.choice, own.heads); };
  share_out(voters, call->count, threads, scores, score_part);
  share_out(voters, call->count, threads, votes, vote_part);
  share_out(voters, call->count, threads, [](const Voter& own) { return own.heads; }, list_part);
}
