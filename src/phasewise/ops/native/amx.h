// Products on the matrix unit (AMX): tiles of 16 rows by 16 outputs, each step over 16 words of inputs.
//
// A row's sums take one order whatever the other rows, as in tile.h: the unit adds the words of a step in pairs, then
// the step to the sum.
#pragma once
#include "kernels.h"
#include "pool.h"
#include "simd.h"

constexpr long BLOCK = 128;  // rows that share one pass over a chunk of weights
constexpr long CHUNK = 512;  // words of input per pass

// ---- the unit's instructions; compilers' own macros take no template arguments
template <int T> inline void load_tile(const void* from, long line) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(line), "i"(T) : "memory");
}
template <int T> inline void store_tile(void* to, long line) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(line), "i"(T) : "memory");
}
template <int T> inline void clear_tile() { asm volatile("tilezero %%tmm%c0" : : "i"(T)); }
template <int C, int A, int B> inline void add_bfloats() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B> inline void add_bytes() {  // unsigned A, signed B
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

// Tiles 0 to 3 hold sums, 4 and 5 inputs, of `rows` rows each; the others weights.
inline void start_tiles(long rows) {
  struct {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
  } shape;
  for (int i = 0; i < 6; i++) shape.rows[i] = (uint8_t)rows;
  asm volatile("ldtilecfg %0" : : "m"(shape));
}

inline void stop_tiles() { asm volatile("tilerelease"); }

constexpr long LINE = WIDTH * 4;  // bytes from one word of a panel to the next, and from one row of sums

// Sums of tiles 0 to 3, the second pair `down` from the first.
inline void load_sums(const char* from, long down) {
  load_tile<0>(from, LINE);
  load_tile<1>(from + 64, LINE);
  load_tile<2>(from + down, LINE);
  load_tile<3>(from + down + 64, LINE);
}

inline void store_sums(char* to, long down) {
  store_tile<0>(to, LINE);
  store_tile<1>(to + 64, LINE);
  store_tile<2>(to + down, LINE);
  store_tile<3>(to + down + 64, LINE);
}

inline void clear_sums() {
  clear_tile<0>();
  clear_tile<1>();
  clear_tile<2>();
  clear_tile<3>();
}

// The lines of a tile of the next step: no hardware foresees so many that far apart.
inline void fetch_tile(const int32_t* from, long stride) {
  for (long i = 0; i < SIDE; i++) __builtin_prefetch(from + i * stride);
}

// sums[rows][64] += rows of x times a panel of weights, whose words are `width` outputs apart
template <class Op>
void one_by_four(const int32_t* weights, long width, const int32_t* x, long stride, long words, bool first,
                 void* sums) {
  if (first) clear_sums();
  else load_sums((char*)sums, 128);
  for (long k = 0; k < words; k += SIDE, weights += SIDE * width) {
    for (long i = 0; i < WIDTH; i += SIDE) fetch_tile(weights + SIDE * width + i, width);
    load_tile<4>(x + k, stride * 4);
    load_tile<6>(weights, width * 4);
    Op::template add<0, 4, 6>();
    load_tile<7>(weights + SIDE, width * 4);
    Op::template add<1, 4, 7>();
    load_tile<6>(weights + 2 * SIDE, width * 4);
    Op::template add<2, 4, 6>();
    load_tile<7>(weights + 3 * SIDE, width * 4);
    Op::template add<3, 4, 7>();
  }
  store_sums((char*)sums, 128);
}

// sums[2 tiles of rows][32] += rows of x and of y times half a panel of weights
template <class Op>
void two_by_two(const int32_t* weights, const int32_t* x, const int32_t* y, long stride, long words, bool first,
                void* sums) {
  constexpr long DOWN = SIDE * LINE;
  if (first) clear_sums();
  else load_sums((char*)sums, DOWN);
  for (long k = 0; k < words; k += SIDE, weights += SIDE * WIDTH) {
    fetch_tile(weights + SIDE * WIDTH, WIDTH);
    fetch_tile(weights + SIDE * WIDTH + SIDE, WIDTH);
    fetch_tile(x + k + SIDE, stride);
    fetch_tile(y + k + SIDE, stride);
    load_tile<6>(weights, LINE);
    load_tile<4>(x + k, stride * 4);
    Op::template add<0, 4, 6>();
    load_tile<7>(weights + SIDE, LINE);
    Op::template add<1, 4, 7>();
    load_tile<5>(y + k, stride * 4);
    Op::template add<2, 5, 6>();
    Op::template add<3, 5, 7>();
  }
  store_sums((char*)sums, DOWN);
}

// A block's rows lie in tiles; the last one starts before its first row, that it may be whole, if there are so many.
template <class Op>
void block_of(const int32_t* weights, const int32_t* x, long stride, long before, long rows, long words, bool first,
              typename Op::Sum (*sums)[WIDTH / LANES]) {
  auto at = [&](long row) {
    long start = row + SIDE > rows && before + rows >= SIDE ? rows - SIDE : row;
    return x + start * stride;
  };
  long r = 0;
  for (; rows - r > SIDE; r += 2 * SIDE) {
    const int32_t *pair = at(r), *other = at(r + SIDE);
    two_by_two<Op>(weights, pair, other, stride, words, first, sums[r]);
    two_by_two<Op>(weights + WIDTH / 2, pair, other, stride, words, first, &sums[r][2]);
  }
  if (r < rows) one_by_four<Op>(weights, WIDTH, at(r), stride, words, first, sums[r]);
}

// finish(row, column, count, sums) gets every row's sums for `count` outputs from `column` on.
template <class Op, class Finish>
void multiply(const int32_t* packed, long outputs, long words, const int32_t* x, long stride, long rows, Shares* shares,
              const Finish& finish) {
  if (!rows) return;
  alignas(64) typename Op::Sum sums[BLOCK][WIDTH / LANES];
  start_tiles(rows < SIDE ? rows : SIDE);
  for (long from, to; shares->take(from, to);)
    for (long p = from; p < to; p++)
      for (long row = 0; row < rows; row += BLOCK) {
        long some = rows - row < BLOCK ? rows - row : BLOCK;
        for (long k = 0; k < words; k += CHUNK) {
          long length = words - k < CHUNK ? words - k : CHUNK;
          block_of<Op>(packed + (p * words + k) * WIDTH, x + row * stride + k, stride, row, some, length, k == 0, sums);
        }
        long column = p * WIDTH, count = outputs - column < WIDTH ? outputs - column : WIDTH;
        long whole = rows < SIDE ? some : some / SIDE * SIDE, skipped = (SIDE - some % SIDE) % SIDE;
        for (long r = 0; r < some; r++) finish(row + r, column, count, sums[r < whole ? r : r + skipped]);
      }
  stop_tiles();
}
