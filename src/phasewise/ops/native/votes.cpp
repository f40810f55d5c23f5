#include "votes.h"

#include "lines.h"
#include "pool.h"
#include "ranking.h"

namespace {

constexpr long VOTES = 1024;        // that are counted at a time
constexpr long MOST_SHARED = 64;    // queries that meet a vector at a time
constexpr long MOST_VOTING = 1024;  // queries that have a say in a list
constexpr int COARSE = 13;          // bits by which candidates are sifted: of floats, all of the exponent

inline long chunks(long count, long size) { return (count + size - 1) / size; }
// Vectors of a part: one whose queries look for their largest numbers first has more.
inline long some_vectors(const Choice& choice) { return choice.largest ? 2048 : 512; }
inline long chunks(const Choice& choice) { return chunks(choice.end - choice.begin, some_vectors(choice)); }
// Candidates of a part.
inline long some_units(const Choice& choice) {
  long each = VOTES / (choice.each + choice.before);
  return each > 1 ? each : 1;
}
inline long padded(long count) { return (count + LANES - 1) / LANES * LANES; }

// ---- vectors
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

#if DOT_INSTRUCTIONS
// Some rows' words from one on, a register for each word.
template <int N> void load_words(const bf16* const* rows, long at, __m512i (&words)[N]) {
  for (int r = 0; r < N; r++) {
    if constexpr (N == 16) {
      words[r] = load<__m512i>(rows[r] + at);
    } else {
      __m256i low = load<__m256i>(rows[r] + at), high = load<__m256i>(rows[r + 8] + at);
      words[r] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
  }
  transpose_words(words);
}

// sums[i] += q[i] . rows, of 2 N numbers from one on
template <int N> void add_words(const bf16* q, long queries, long width, const bf16* const* rows, long at, F* sums) {
  __m512i words[N];
  load_words(rows, at, words);
  for (long i = 0; i < queries; i++) {
    F sum = sums[i];
    for (int w = 0; w < N; w++)
      sum = (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)words[w],
                                (__m512bh)_mm512_set1_epi32(load<int32_t>(q + i * width + at + 2 * w)));
    sums[i] = sum;
  }
}

// Rows are turned once for all queries.
void score_turned(const bf16* q, long queries, const bf16* const* rows, long width, F* sums) {
  for (long i = 0; i < queries; i++) sums[i] = F{};
  long at = 0;
  for (; at + 32 <= width; at += 32) add_words<16>(q, queries, width, rows, at, sums);
  if (at < width) add_words<8>(q, queries, width, rows, at, sums);
}
constexpr bool TURNS = true;
#else
void score_turned(const bf16*, long, const bf16* const*, long, F*) {}
constexpr bool TURNS = false;
#endif

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

// Where LANES vectors from one on lie, of those before `to`; the last one stands in for those beyond.
struct Found {
  const bf16* rows[LANES];

  void find(const Voter& own, const Keys& keys, const void* vectors, long j, long to, bf16* room) {
    const bf16* first = (const bf16*)vectors + keys.head * own.layer->head;
    long width = own.choice->width;
    for (long r = 0; r < LANES; r++) {
      long i = j + r < to ? j + r : to - 1;
      rows[r] = vectors ? first + i * width : keys.at(i, room + r * own.dim);
    }
  }
};

// What the vectors from .. to-1 of a head give the queries of its group.
void multiply(const Voter& own, long head, long from, long to) {
  const LayerChoice& layer = *own.layer;
  Keys keys = {own.rows, head, own.dim};
  long width = own.choice->width, wide = logits_of(*own.choice);
  bf16 room[LANES * MOST_DIM];
  Queries queries;
  for (long first = 0; first < own.group; first += MOST_SHARED) {
    long some = own.group - first < MOST_SHARED ? own.group - first : MOST_SHARED;
    queries.take(own, head, first, some);
    bool turned = TURNS && !layer.high && width % 16 == 0 && (some > 3 || width % 32);  // else it does not pay
    for (long j = from; j < to; j += LANES) {
      Found lows, highs;
      lows.find(own, keys, layer.low, j, to, room);
      if (layer.high) highs.find(own, keys, layer.high, j, to, room);
      float* out = own.logits + (head * own.group + first) * wide + j - own.choice->begin;
      F sums[MOST_SHARED];
      if (turned) score_turned(queries.all, some, lows.rows, width, sums);
      for (long g = 0; g < some; g++) {
        if (layer.high) {
          F more;
          score(queries.all + g * width, highs.rows, width, (float*)&more);
          score(queries.below + g * width, lows.rows, width, (float*)(sums + g));
          sums[g] += more;
        } else if (!turned) {
          score_rows(queries.all + g * width, lows.rows, width, (float*)(sums + g));
        }
        store(out + g * wide, sums[g]);
      }
    }
  }
}

// The largest of a chunk's logits, times the scale, and the sum of the weights beside it.
void sum_up(const Voter& own, long query, long chunk, long from, long to) {
  const Choice& choice = *own.choice;
  float* logits = own.logits + query * logits_of(choice) - choice.begin;
  F scale = splat((float)(own.layer->scale ? own.layer->scale : own.scale)), tops = splat(-INFINITY), sums = {};
  I lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  for (long j = from; j < to; j += LANES) {
    F logit = load<F>(logits + j) * scale;  // of those beyond, too: no other part begins within a register
    store(logits + j, logit);
    tops = max(select(lane < (int32_t)(to - j), logit, splat(-INFINITY)), tops);
  }
  float top = most(tops);
  for (long j = from; j < to; j += LANES)
    sums += select(lane < (int32_t)(to - j), exp_negative(load<F>(logits + j) - top), F{});
  float* state = own.states + (query * chunks(choice) + chunk) * 2;
  state[0] = top, state[1] = top == -INFINITY ? 0 : sum(sums);
}

// ---- votes
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

  // Of some vectors, whose logits `at(query)` gives; `peaks`: the largest shares alone.
  template <class Logits> F votes(bool peaks, const Logits& at) const {
    F best = at(0) - less[0], sums = {};
    I odd = best != best;
    for (long g = 1; g < count; g++) {
      F value = at(g) - less[g];
      odd |= value != value, best = max(value, best);
    }
    for (long g = 0; !peaks && g < count; g++) sums += exp_negative(at(g) - less[g] - best);
    if (!peaks) best = select(best > -INFINITY, best + log_of(max(sums, splat(1.0f))), best);
    return select(odd, splat(INFINITY), best);  // what cannot be compared is read
  }

  // votes[j] for the vectors from .. to-1; some more are written
  void vote(bool peaks, long from, long to, float* into) const {
    long wide = logits_of(choice);
    for (long j = from; j < to; j += LANES)
      store(into + j - from, votes(peaks, [&](long g) { return load<F>(logits + g * wide + j - choice.begin); }));
  }

  // The votes for some vectors, counted from the first, as numbers.
  void vote(const int32_t* which, long some, int32_t* into) const {
    long wide = logits_of(choice);
    float values[LANES];
    for (long p = 0; p < some; p += LANES) {
      store(values, votes(false, [&](long g) {
        F found;
        for (long i = 0; i < LANES; i++) found[i] = logits[g * wide + which[p + i < some ? p + i : p]];
        return found;
      }));
      number(values, some - p < LANES ? some - p : LANES, into + p);
    }
  }
};

// Whether every candidate has one vector, its own.
inline bool one_each(const Choice& choice) {
  bool all = choice.at >= choice.begin && choice.at + choice.units <= choice.end;
  return choice.each == 1 && !choice.before && all;
}

// Whether what is counted at first are the largest shares: no sum of shares is more than the number of queries times as
// large, so few can be among the best.
inline bool by_peaks(const Choice& choice) { return choice.rule == SHARE && one_each(choice); }

// The best of a head's candidates, or of all heads'.
int32_t* list_units(const Voter& own, long head, int32_t* slots) {
  const Choice& choice = *own.choice;
  int32_t* numbers = own.numbers + head * numbers_of(choice);
  if (!choice.chosen || choice.chosen >= choice.units)
    return list_best(numbers, nullptr, choice.units, choice.chosen, choice.first, choice.size, slots);
  int32_t least = threshold(numbers, choice.units, choice.chosen, COARSE);
  int32_t *which = numbers + padded(choice.units), *values = which + padded(choice.units);
  Electors electors(own, by_peaks(choice) ? head : 0);
  bool peaks = by_peaks(choice) && electors.count > 1;  // of one query they are the sums
  if (peaks) {
    float peak = value_of(least);
    least = number(peak - logf((float)electors.count) - 1e-4f * (1 + fabsf(peak)));
  }
  long some = which_reach(numbers, choice.units, least, which);
  if (peaks && some > choice.units / 4) {  // too many to be looked at one by one
    electors.vote(false, choice.at, choice.at + choice.units, (float*)values);
    number((float*)values, choice.units, values);
    some = which_reach(values, choice.units, threshold(values, choice.units, choice.chosen, COARSE), which);
    for (long p = 0; p < some; p++) numbers[p] = values[which[p]];
    return list_best(numbers, which, some, choice.chosen, choice.first, choice.size, slots);
  }
  if (peaks) {
    for (long p = 0; p < some; p++) values[p] = which[p] + (int32_t)(choice.at - choice.begin);
    electors.vote(values, some, values);
  } else {
    for (long p = 0; p < some; p++) values[p] = numbers[which[p]];
  }
  return list_best(values, which, some, choice.chosen, choice.first, choice.size, slots);
}

}  // namespace

long logits_of(const Choice& choice) { return padded(choice.end - choice.begin) + LANES; }
long states_of(const Choice& choice) { return 2 * chunks(choice); }
long numbers_of(const Choice& choice) { return 3 * padded(choice.units) + LANES; }
long listed_of(const Choice& choice, long n) {
  return choice.first + choice.chosen * choice.size + n - choice.first - choice.units * choice.size;
}

long scoring_parts(const Choice& choice, long heads) { return heads * chunks(choice); }

void score_part(const Voter& own, long part) {
  const Choice& choice = *own.choice;
  long head = part / chunks(choice), chunk = part % chunks(choice), some = some_vectors(choice);
  long from = choice.begin + chunk * some, to = from + some < choice.end ? from + some : choice.end;
  (choice.largest ? make_lines : make)(own, head, from > choice.known ? from : choice.known, to);
  (choice.largest ? multiply_lines : multiply)(own, head, from, to);
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
  int32_t* numbers = own.numbers + head * numbers_of(choice) + from;
  Electors(own, head).vote(choice.rule != SHARE || by_peaks(choice), first, last, votes);
  if (one_each(choice)) return number(votes, to - from, numbers);
  for (long u = from; u < to; u++) {
    long begin = choice.at + u * choice.each - choice.before, end = choice.at + (u + 1) * choice.each;
    float most = -INFINITY;
    for (long j = begin > first ? begin : first; j < end && j < last; j++)
      most = votes[j - first] > most ? votes[j - first] : most;
    best[u - from] = most;
  }
  number(best, to - from, numbers);
}

void list_part(const Voter& own, long head) {
  const Choice& choice = *own.choice;
  if (choice.queries) {
    long wide = own.group * own.dim, layer = own.layer - choice.layers;
    memcpy(choice.queries + (layer * own.heads + head) * wide, (const bf16*)own.rows.q + head * wide, wide * 2);
  }
  if (choice.joint && head) return;
  int32_t* slots = (int32_t*)own.rows.slots + head * own.rows.count;
  for (long slot = 0; slot < choice.first; slot++) *slots++ = (int32_t)slot;
  if (own.layer->way == GIVEN) {
    memcpy(slots, (const int32_t*)own.layer->low + head * choice.chosen, choice.chosen * 4);
    slots += choice.chosen;
  } else {
    slots = list_units(own, head, slots);
  }
  for (long slot = choice.first + choice.units * choice.size; slot < own.n; slot++) *slots++ = (int32_t)slot;
  if (choice.beside) choice.beside[(own.layer - choice.layers) * own.heads + head] = fetched_beside(own, head);
  if (own.layer->sums) weigh_rest(own, head, Electors(own, head).less);
  for (long h = 1; choice.joint && h < own.heads; h++)
    memcpy((int32_t*)own.rows.slots + h * own.rows.count, own.rows.slots, own.rows.count * 4);
}

// ---- single rows of one layer
namespace {

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
    rows.v = own.v, rows.v_head = own.v_head, rows.v_row = own.v_row;
    rows.v_scale = own.v_scale, rows.v_scale_head = own.v_scale_head;
    rows.count = listed_of(choice, own.n), rows.slots = own.slots, rows.held = own.held, rows.rest = own.rest;
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
