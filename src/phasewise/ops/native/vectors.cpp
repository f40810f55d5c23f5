#include "vectors.h"

namespace {

constexpr long MOST_SHARED = 64;  // queries that meet a vector at a time

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
// LANES rows of W (8 or 16) numbers, one after the other: a register has several.
template <int W> struct Dense {
  static constexpr int N = W / 2;  // registers

  // A query, once for each row of a register.
  static __m512i take(const bf16* q) {
    if constexpr (W == 16) return _mm512_broadcast_i64x4(load<__m256i>(q));
    else return _mm512_broadcast_i32x4(load<__m128i>(q));
  }

  // q . rows[lane]
  static F meet(__m512i q, const __m512i (&rows)[N]) {
    F v[N];
    for (int i = 0; i < N; i++) v[i] = (F)_mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)q, (__m512bh)rows[i]);
    auto low = [](F a, F b) {
      __m512 x = (__m512)a, y = (__m512)b;
      return (__m512d)(_mm512_unpacklo_ps(x, y) + _mm512_unpackhi_ps(x, y));
    };
    auto four = [&](const F* v) {  // the sums of every quarter, register by register
      __m512d x = low(v[0], v[1]), y = low(v[2], v[3]);
      return (__m512)_mm512_unpacklo_pd(x, y) + (__m512)_mm512_unpackhi_pd(x, y);
    };
    const __m512i sixteen = _mm512_set_epi32(15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0);
    const __m512i eight = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    if constexpr (W == 8) return (F)_mm512_permutexvar_ps(eight, four(v));
    __m512 a = four(v), b = four(v + N / 2);
    a = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);  // even rows, odd ones, and again
    return (F)_mm512_permutexvar_ps(sixteen, a);
  }
};

// out[query][lane] = q . rows[lane]; whole registers of lanes, of those that come first -> rows
template <int W> long score_dense(const bf16* q, long queries, const bf16* rows, long count, float* out, long wide) {
  constexpr int N = Dense<W>::N;
  long done = 0;
  for (; done + LANES <= count; done += LANES, rows += LANES * W) {
    __m512i lying[N];
    for (int i = 0; i < N; i++) {
      __builtin_prefetch(rows + 4 * LANES * W + i * 32, 0, 3);
      lying[i] = load<__m512i>(rows + i * 32);
    }
    for (long g = 0; g < queries; g++)
      store(out + g * wide + done, Dense<W>::meet(Dense<W>::take(q + g * W), lying));
  }
  return done;
}

// to[w][lane] = word w, of two numbers, of LANES rows of 2 N numbers, `row` apart
template <int N> void turn(const bf16* rows, long row, int32_t (*to)[KEYS]) {
  __m512i words[N];
  for (int r = 0; r < N; r++) {
    if constexpr (N == LANES) {
      words[r] = load<__m512i>(rows + r * row);
    } else {
      __m256i low = load<__m256i>(rows + r * row), high = load<__m256i>(rows + (r + N) * row);
      words[r] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
  }
  transpose_words(words);
  for (int w = 0; w < N; w++) store(to[w], words[w]);
}

void turn(const bf16* rows, long row, long width, int32_t (*to)[KEYS]) {
  long at = 0;
  for (; at + 32 <= width; at += 32) turn<16>(rows + at, row, to + at / 2);
  if (at < width) turn<8>(rows + at, row, to + at / 2);
}

// out[query][lane] = query . rows, of Q queries and W registers of turned rows
template <int Q, int W>
void meet_turned(const bf16* q, long width, const int32_t (*rows)[KEYS], float* out, long wide) {
  F sums[Q][W] = {};
  for (long w = 0; w < width / 2; w++) {
    __m512bh words[W];
#pragma GCC unroll 4
    for (int i = 0; i < W; i++) words[i] = (__m512bh)load<__m512i>(rows[w] + i * LANES);
#pragma GCC unroll 4
    for (int g = 0; g < Q; g++) {
      __m512bh own = (__m512bh)_mm512_set1_epi32(load<int32_t>(q + g * width + 2 * w));
#pragma GCC unroll 4
      for (int i = 0; i < W; i++) sums[g][i] = (F)_mm512_dpbf16_ps((__m512)sums[g][i], words[i], own);
    }
  }
  for (int g = 0; g < Q; g++)
    for (int i = 0; i < W; i++) store(out + g * wide + i * LANES, sums[g][i]);
}

// The same of all queries and at least `count` rows.
template <int Q = 4>
void score_turned(const bf16* q, long queries, long width, const int32_t (*rows)[KEYS], long count, float* out,
                  long wide) {
  constexpr int W = KEYS / LANES;
  for (; queries >= Q; queries -= Q, q += Q * width, out += Q * wide) {
    if (count == KEYS) meet_turned<Q, W>(q, width, rows, out, wide);
    else
      for (long j = 0; j < count; j += LANES)
        meet_turned<Q, 1>(q, width, (const int32_t(*)[KEYS])(rows[0] + j), out + j, wide);
  }
  if constexpr (Q > 1) score_turned<Q - 1>(q, queries, width, rows, count, out, wide);
}
constexpr bool TURNS = true;

long score_dense(const bf16* q, long queries, const bf16* rows, long width, long count, float* out, long wide) {
  if (width == 8) return score_dense<8>(q, queries, rows, count, out, wide);
  if (width == 16) return score_dense<16>(q, queries, rows, count, out, wide);
  return 0;
}
#else
long score_dense(const bf16*, long, const bf16*, long, long, float*, long) { return 0; }
void turn(const bf16*, long, long, int32_t (*)[KEYS]) {}
void score_turned(const bf16*, long, long, const int32_t (*)[KEYS], long, float*, long) {}
constexpr bool TURNS = false;
#endif

// A head's query as its vectors meet it: turned, then its channels; in place of `q` [dim].
void prepare(const Voter& own, long head, const bf16* q, bf16* to) {
  const int32_t* channels = channels_of(own, head);
  long size = own.layer->turn ? own.layer->turned : 0, half = size / 2;
  if (!size && !channels) return (void)memcpy(to, q, own.choice->width * 2);
  bf16 turned[MOST_DIM];
  const float *cos = own.layer->turn, *sin = cos + size;
  for (long i = 0; i < half; i++) {
    float a = widen(q[i]), b = widen(q[half + i]);
    turned[i] = narrow(a * cos[i] + b * sin[i]);
    turned[half + i] = narrow(b * cos[half + i] + a * sin[half + i]);
  }
  memcpy(turned + size, q + size, (own.dim - size) * 2);
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

// LANES vectors from one on, of those before `to`; the last one stands in for those beyond.
struct Found {
  const bf16 *first, *rows[LANES];
  long row;

  void find(const Voter& own, const Keys& keys, const void* vectors, long j, long to, bf16* room) {
    const Listed& all = own.rows;
    const bool widened = !vectors && all.k_scale;
    const long size = vectors ? own.choice->width : own.dim, count = to - j;
    row = vectors ? size : all.k_row;
    first = vectors ? (const bf16*)vectors + keys.head * own.layer->head : (const bf16*)all.k + keys.head * all.k_head;
    first = widened ? nullptr : first + j * row;
    if (!widened && count >= LANES) {
      for (long at = 0; at < LANES * row; at += 32) __builtin_prefetch(first + 2 * LANES * row + at, 0, 3);
    } else {
      for (long r = 0; r < LANES; r++) {
        const long i = r < count ? r : count - 1;
        if (widened) keys.at(j + i, room + r * size);
        else memcpy(room + r * size, first + i * row, size * 2);
      }
      first = room, row = size;
    }
    for (long r = 0; r < LANES; r++) rows[r] = first + r * row;
  }
};

}  // namespace

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

void multiply(const Voter& own, long head, long from, long to) {
  const LayerChoice& layer = *own.layer;
  Keys keys = {own.rows, head, own.dim};
  long width = own.choice->width, wide = logits_of(*own.choice);
  bf16 room[2][LANES * MOST_DIM];
  Queries queries;
  for (long first = 0; first < own.group; first += MOST_SHARED) {
    long some = own.group - first < MOST_SHARED ? own.group - first : MOST_SHARED;
    queries.take(own, head, first, some);
    float* all = own.logits + (head * own.group + first) * wide - own.choice->begin;
    long j = from;
    if (layer.low && !layer.high)
      j += score_dense(queries.all, some, (const bf16*)layer.low + head * layer.head + from * width, width, to - from,
                       all + from, wide);
    if (TURNS && !layer.high && width % 16 == 0 && (some > 3 || width % 32)) {  // else it does not pay
      alignas(64) int32_t turned[MOST_DIM / 2][KEYS];
      for (long size; j < to; j += size) {
        size = to - j < KEYS ? to - j : KEYS;
        for (long i = 0; i < size; i += LANES) {
          Found rows;
          rows.find(own, keys, layer.low, j + i, to, room[0]);
          turn(rows.first, rows.row, width, (int32_t(*)[KEYS])(turned[0] + i));
        }
        score_turned(queries.all, some, width, turned, size, all + j, wide);
      }
    }
    for (; j < to; j += LANES) {
      Found lows, highs;
      lows.find(own, keys, layer.low, j, to, room[0]);
      if (layer.high) highs.find(own, keys, layer.high, j, to, room[1]);
      for (long g = 0; g < some; g++) {
        float* out = all + g * wide + j;
        if (layer.high) {
          F more, sum;
          score(queries.all + g * width, highs.rows, width, (float*)&more);
          score(queries.below + g * width, lows.rows, width, (float*)&sum);
          store(out, sum + more);
        } else {
          score_rows(queries.all + g * width, lows.rows, width, out);
        }
      }
    }
  }
}
