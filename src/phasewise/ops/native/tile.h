// The one loop nest all linear kernels share: rows x panels of packed weights, partial sums kept in registers.
//
// Every output is summed over its inputs in one fixed order, whatever the number of rows, threads or columns at a time:
// a row's result does not depend on the rows beside it.
#pragma once
#include "kernels.h"
#include "curves.h"
#include "forms.h"
#include "pool.h"
#include "simd.h"

#if MATRIX_UNIT
#include "amx.h"
#else
inline void start_tiles(long) {}
inline void stop_tiles() {}

// How many rows one tile holds, and how many registers of outputs beside each of them.
constexpr int MOST_ROWS = 6;
constexpr int registers(int rows) {
  if (LANES == 4) return rows <= 2 ? 8 : 4;
  return DOT_INSTRUCTIONS ? 4 : rows == 1 ? 8 : rows == 2 ? 4 : 2;
}

constexpr long BLOCK = 8 * MOST_ROWS;  // rows that share one pass over a chunk of weights
// Words of input per pass: a chunk stays in the L2 cache or, with the one after it, in half the L1 cache.
constexpr long CHUNK = DOT_INSTRUCTIONS ? 512 : LANES == 8 ? 32 : 64;
constexpr long LINE = 16;                     // words of a cache line
constexpr long LINES_OF_STEP = WIDTH / LINE;  // of a step's weights

// Op: Word, what the inputs come in, meeting one word of 32 bits of every output's weights; Acc, a register of sums over
// a group of GROUP words, from begin() to end(), which brings them into floats by the scale(j) of the weights in the
// panel's register j; step<R, W>(acc, weights, x, stride): the products of one word of R rows with W registers of
// weights. GROUP 0: a chunk is one group. At every step LINES cache lines of weights `ahead` are fetched; where a chunk
// is short, what follows it is, evenly over the passes: memory works while they multiply. A single pass reads on and on,
// which the hardware foresees. Not inlined: GCC then keeps all sums in registers.
template <class Op, int R, int LINES>
__attribute__((noinline)) void tile(const int32_t* weights, const int32_t* ahead, const typename Op::Inputs in,
                                    long words, bool first, F (*sums)[WIDTH / LANES]) {
  constexpr int W = registers(R), PASSES = WIDTH / LANES / W;
  constexpr int EACH = DOT_INSTRUCTIONS || PASSES == 1 ? 0 : LINES_OF_STEP / PASSES;
  for (int at = 0; at < WIDTH / LANES; at += W) {
    for (long from = 0, to; from < words; from = to) {
      to = Op::GROUP && words - from > Op::GROUP ? from + Op::GROUP : words;
      typename Op::Acc acc[R][W];
      for (int r = 0; r < R; r++)
        for (int j = 0; j < W; j++) acc[r][j] = Op::begin(in.from(r, from), first, sums[r][at + j]);
      for (long k = from; k < to; k++) {
        const int32_t* next = weights + words * WIDTH + (at / W * words + k) * EACH * LINE;
        for (int i = 0; i < EACH; i++) __builtin_prefetch(next + i * LINE);
        for (int i = 0; i < LINES; i++) __builtin_prefetch(ahead + (k * LINES + i) * LINE, 0, 2);
        Op::template step<R, W>(acc, weights + k * WIDTH + at * LANES, in.x + k, in.stride);
      }
      for (int j = 0; j < W; j++) {
        const F scale = Op::scale(in.from(0, from), at + j);
        for (int r = 0; r < R; r++) {
          F& sum = sums[r][at + j];
          sum = Op::end(in.from(r, from), acc[r][j], scale, first && !from ? F{} : sum);
        }
      }
    }
  }
}

template <class Op, int LINES, int R = MOST_ROWS>
void tile_of_lines(long rows, const int32_t* weights, const int32_t* ahead, const typename Op::Inputs& in, long words,
                   bool first, F (*sums)[WIDTH / LANES]) {
  if (rows == R) tile<Op, R, LINES>(weights, ahead, in, words, first, sums);
  else if constexpr (R > 1) tile_of_lines<Op, LINES, R - 1>(rows, weights, ahead, in, words, first, sums);
}

// `rows` and `lines` known to the compiler: 4, 2, 1 or 0 lines; none where a chunk is as short as the L1 cache.
template <class Op, int LINES = DOT_INSTRUCTIONS ? 4 : 0>
void tile_of(long rows, long lines, const int32_t* weights, const int32_t* ahead, const typename Op::Inputs& in,
             long words, bool first, F (*sums)[WIDTH / LANES]) {
  if (lines >= LINES) tile_of_lines<Op, LINES>(rows, weights, ahead, in, words, first, sums);
  else if constexpr (LINES > 0) tile_of<Op, LINES / 2>(rows, lines, weights, ahead, in, words, first, sums);
}

// Rows that need more than one tile are spread over them evenly, and each tile fetches its share of what comes `ahead`
// (or null): else memory would be idle while all but the first multiply what already lies in the cache.
template <class Op>
void multiply_block(const int32_t* weights, const int32_t* ahead, typename Op::Inputs in, long, long rows, long words,
                    bool first, F (*sums)[WIDTH / LANES]) {
  long tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
  for (long i = 0, from = 0, to; i < tiles; i++, from = to) {
    long some = (rows + tiles - i - 1) / (tiles - i);
    to = ((i + 1) * LINES_OF_STEP + tiles - 1) / tiles;
    tile_of<Op>(some, ahead ? to - from : 0, weights, ahead + from * words * LINE, in, words, first, sums);
    rows -= some, in = in.from(some, 0), sums += some;
  }
}

inline long place_of(long row, long, long) { return row; }
#endif

// Words of two bfloat16; sums in float32.
struct Bf16 {
  typedef F Acc;
  static constexpr long GROUP = 0;
#if MATRIX_UNIT
  typedef bf16 Number;
  typedef int32_t Word;

  template <int C, int A, int B> static void add() { add_bfloats<C, A, B>(); }
#elif DOT_BFLOATS
  typedef bf16 Number;  // what an input comes as
  typedef int32_t Word;

  template <int R, int W> static void step(F (&acc)[R][W], const int32_t* weights, const Word* x, long stride) {
    __m512bh w[W];
    for (int j = 0; j < W; j++) w[j] = (__m512bh)load<__m512i>(weights + j * LANES);
    for (int r = 0; r < R; r++) {
      __m512bh in = (__m512bh)_mm512_set1_epi32(load<int32_t>(x + r * stride));
      for (int j = 0; j < W; j++) acc[r][j] = (F)_mm512_dpbf16_ps((__m512)acc[r][j], in, w[j]);
    }
  }
#else
  typedef float Number;
  struct Word {
    float even, odd;
  };

  template <int R, int W> static void step(F (&acc)[R][W], const int32_t* weights, const Word* x, long stride) {
    F w[W];
    for (int j = 0; j < W; j++) w[j] = (F)(load<I>(weights + j * LANES) << 16);
    for (int r = 0; r < R; r++)
      for (int j = 0; j < W; j++) acc[r][j] += w[j] * x[r * stride].even;
    for (int j = 0; j < W; j++) w[j] = (F)(load<I>(weights + j * LANES) & (int32_t)0xffff0000);
    for (int r = 0; r < R; r++)
      for (int j = 0; j < W; j++) acc[r][j] += w[j] * x[r * stride].odd;
  }
#endif

  struct Inputs {
    const Word* x;
    long stride;

    Inputs from(long row, long word) const { return {x + row * stride + word, stride}; }
    Inputs of_panel(long) const { return *this; }
  };

  static F begin(const Inputs&, bool first, const F& sum) { return first ? F{} : sum; }
  static F scale(const Inputs&, long) { return F{}; }
  static F end(const Inputs&, F acc, F, F) { return acc; }
};

// `count` bits of a mask, at most 64, from bit `column` on.
inline uint64_t bits_from(const uint32_t* mask, long column, long count) {
  const uint32_t* words = mask + column / 32;
  long skip = column % 32;
  uint64_t bits = words[0] >> skip;
  if (count > 32 - skip) bits |= (uint64_t)words[1] << (32 - skip);
  if (count > 64 - skip) bits |= (uint64_t)words[2] << (64 - skip);
  return bits;
}

// The largest of `count` outputs from `column` on, if none before it was as large.
inline void keep(Best& best, long column, long count, const F* values) {
  if (best.value != best.value) return;
  uint64_t counts = ~0ull;
  if (best.mask) {
    counts = bits_from(best.mask, column, count);
    if (!counts) return;
  }
  if (count == WIDTH) {  // mostly there is none
    I larger = {};
    for (int j = 0; j < WIDTH / LANES; j++) larger |= ~(values[j] <= best.value);
    if (!any(larger)) return;
  }
  const float* v = (const float*)values;
  for (long i = 0; i < count; i++) {
    if (v[i] <= best.value || !(counts >> i & 1)) continue;
    best.value = v[i];
    best.index = column + i;
    if (v[i] != v[i]) return;
  }
}

// values[0 .. count) += more.
template <class T> inline void add_to(F* values, const T* more, long count) {
  if (count == WIDTH) {
    for (int j = 0; j < WIDTH / LANES; j++) values[j] += load_floats(more + j * LANES);
    return;
  }
  float* v = (float*)values;
  for (long i = 0; i < count; i++) v[i] += to_float(more[i]);
}

// to[0 .. count) = values.
template <class T> inline void store_to(T* to, const F* values, long count) {
  if (count == WIDTH) {
    for (int j = 0; j < WIDTH / LANES; j++) store_floats(to + j * LANES, values[j]);
    return;
  }
  long i = 0;
  for (; i + LANES <= count; i += LANES) store_floats(to + i, values[i / LANES]);
  for (; i < count; i++) put(to + i, ((const float*)values)[i]);
}

// values += bias + add, of a row's outputs from `column` on.
inline void add_rest(const LinearCall& call, long row, long column, long count, F* values) {
  const Rows& add = call.add;
  if (call.weights->bias) add_to(values, call.weights->bias + column, count);
  if (add.data && add.kind == FLOAT)
    add_to(values, (const float*)add.data + row * add.stride + column, count);
  else if (add.data)
    add_to(values, (const bf16*)add.data + row * add.stride + column, count);
}

// y[row, column ...] = values.
inline void store_row(const Rows& y, long row, long column, long count, const F* values) {
  if (y.kind == FLOAT)
    store_to((float*)y.data + row * y.stride + column, values, count);
  else
    store_to((bf16*)y.data + row * y.stride + column, values, count);
}

// What the head asks for, and panels that are not whole: out of line, so that loops over other panels stay short.
__attribute__((noinline)) inline void write_rarely(const LinearCall& call, long row, long column, long count,
                                                   int thread, F* values) {
  add_rest(call, row, column, count, values);
  if (call.cap)
    for (int j = 0; j < WIDTH / LANES; j++) values[j] = tanh_of(values[j] * (float)(1 / call.cap)) * (float)call.cap;
  if (call.best)
    keep(call.best[thread * call.rows + row], column, count, values);
  else
    store_row(call.y, row, column, count, values);
}

// Out of line, as few weights have a number that all are multiplied with.
__attribute__((noinline)) inline void times_whole(float whole, F* values) {
  for (int j = 0; j < WIDTH / LANES; j++) values[j] *= whole;
}

// y[row, of_part ...] = values + bias + add, for outputs of a part; or, given `best`, only the largest of them is kept.
inline void write(const PartProduct& product, long row, long of_part, long count, F* values) {
  const LinearCall& call = product.call;
  const long column = product.first + of_part;
  if (product.part.whole) times_whole((float)product.part.whole, values);
  if (count < WIDTH || call.cap || call.best) return write_rarely(call, row, column, count, product.thread, values);
  add_rest(call, row, column, WIDTH, values);
  store_row(call.y, row, column, WIDTH, values);
}

// Every row times every panel of the part that this thread gets.
template <class Op> void multiply(const PartProduct& product, long words, const typename Op::Inputs& in) {
  static_assert(!Op::GROUP || CHUNK % Op::GROUP == 0, "chunks end where groups do");
  const int32_t* packed = (const int32_t*)product.part.packed;
  long outputs = product.part.outputs, rows = product.call.rows;
  if (!rows) return;
  alignas(64) F sums[BLOCK][WIDTH / LANES];
  start_tiles(rows < SIDE ? rows : SIDE);
  long most = LANES != 8 || rows > 1 ? CHUNK : words;  // with AVX2 one row reads nothing twice
  for (long p = product.next_panel(), then; p >= 0; p = then) {
    then = product.next_panel();
    const typename Op::Inputs own = in.of_panel(p);
    const int32_t *panel = packed + p * words * WIDTH, *other = then < 0 ? nullptr : packed + then * words * WIDTH;
    for (long row = 0; row < rows; row += BLOCK) {
      long some = rows - row < BLOCK ? rows - row : BLOCK;
      for (long k = 0; k < words; k += most) {
        long length = words - k < most ? words - k : most;
        const int32_t *chunk = panel + k * WIDTH, *ahead = chunk + length * WIDTH;
        if (k + length == words) ahead = row + BLOCK < rows ? panel : other;
        multiply_block<Op>(chunk, ahead, own.from(row, k), row, some, length, k == 0, sums);
      }
      long column = p * WIDTH, count = outputs - column < WIDTH ? outputs - column : WIDTH;
      for (long r = 0; r < some; r++) write(product, row + r, column, count, sums[place_of(r, row, some)]);
    }
  }
  stop_tiles();
}
