// Products on the matrix unit (AMX): tiles of 16 rows by 16 outputs, each step over 16 words of inputs.
//
// A row's sums take one order whatever the other rows, as in tile.h: the unit adds the words of a step in pairs, then
// the step to the sum.
#pragma once
#include "kernels.h"
#include "simd.h"

constexpr long BLOCK = 2 * SIDE;  // rows that share one pass over a chunk of weights
constexpr long CHUNK = 4096;      // words of input per pass: a chunk stays in the L2 cache for the next rows

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

constexpr long LINE = WIDTH * 4;  // bytes from one row of sums to the next

// Where the second pair of sums' tiles lies: beside the first, or below it.
constexpr long ACROSS = 2 * SIDE * 4, BELOW = SIDE * LINE;

inline void start_sums(bool first, const char* from, long second) {
  if (first) {
    clear_tile<0>();
    clear_tile<1>();
    clear_tile<2>();
    clear_tile<3>();
  } else {
    load_tile<0>(from, LINE);
    load_tile<1>(from + SIDE * 4, LINE);
    load_tile<2>(from + second, LINE);
    load_tile<3>(from + second + SIDE * 4, LINE);
  }
}

inline void store_sums(char* to, long second) {
  store_tile<0>(to, LINE);
  store_tile<1>(to + SIDE * 4, LINE);
  store_tile<2>(to + second, LINE);
  store_tile<3>(to + second + SIDE * 4, LINE);
}

// Half of the lines of a tile of the next step: no hardware foresees so many that far apart. They go between the unit's
// instructions, which would wait for them all if they came at once.
inline void fetch_half(const int32_t* from, long stride, long half) {
  for (long i = 0; i < SIDE / 2; i++) __builtin_prefetch(from + (half * SIDE / 2 + i) * stride);
}

// Tiles 0 to 3 += rows of x times a panel, `width` outputs wide, of weights whose tiles' rows are `line` words apart.
// After the panel comes what is `ahead`.
template <class Op>
void add_panel(const int32_t* weights, long width, long line, const int32_t* x, long stride, long words,
               const int32_t* ahead) {
  long tile = line == SIDE ? SIDE * SIDE : SIDE;  // from one to the next
  for (long k = 0; k < words; k += SIDE, weights += SIDE * width) {
    const int32_t* next = k + SIDE < words ? weights + SIDE * width : ahead;
    load_tile<4>(x + k, stride * 4);
    fetch_half(next, line, 0);
    load_tile<6>(weights, line * 4);
    fetch_half(next, line, 1);
    Op::template add<0, 4, 6>();
    fetch_half(next + tile, line, 0);
    load_tile<7>(weights + tile, line * 4);
    fetch_half(next + tile, line, 1);
    Op::template add<1, 4, 7>();
    fetch_half(next + 2 * tile, line, 0);
    load_tile<6>(weights + 2 * tile, line * 4);
    fetch_half(next + 2 * tile, line, 1);
    Op::template add<2, 4, 6>();
    fetch_half(next + 3 * tile, line, 0);
    load_tile<7>(weights + 3 * tile, line * 4);
    fetch_half(next + 3 * tile, line, 1);
    Op::template add<3, 4, 7>();
  }
}

constexpr long WHOLE = SIDE * SIDE;  // words of a tile of packed weights

// sums[2 tiles of rows][32] += rows of x and of y times half a panel of weights
template <class Op>
void two_by_two(const int32_t* weights, const int32_t* x, const int32_t* y, long stride, long words, bool first,
                void* sums) {
  start_sums(first, (char*)sums, BELOW);
  for (long k = 0; k < words; k += SIDE, weights += SIDE * WIDTH) {
    const int32_t* next = weights + SIDE * WIDTH;
    fetch_half(next, SIDE, 0);
    load_tile<6>(weights, SIDE * 4);
    fetch_half(x + k + SIDE, stride, 0);
    load_tile<4>(x + k, stride * 4);
    fetch_half(next, SIDE, 1);
    Op::template add<0, 4, 6>();
    fetch_half(x + k + SIDE, stride, 1);
    load_tile<7>(weights + WHOLE, SIDE * 4);
    fetch_half(next + WHOLE, SIDE, 0);
    Op::template add<1, 4, 7>();
    fetch_half(y + k + SIDE, stride, 0);
    load_tile<5>(y + k, stride * 4);
    fetch_half(next + WHOLE, SIDE, 1);
    Op::template add<2, 5, 6>();
    fetch_half(y + k + SIDE, stride, 1);
    Op::template add<3, 5, 7>();
  }
  store_sums((char*)sums, BELOW);
}

// sums[rows of a block] += rows of x times a panel of weights; `before`: how many rows are in front of the block. Rows
// go in tiles; the last one starts before its first row, that it may be whole, if there are so many.
template <class Op>
void multiply_block(const int32_t* weights, const int32_t* ahead, const int32_t* x, long stride, long before,
                    long rows, long words, bool first, typename Op::Sum (*sums)[WIDTH / LANES]) {
  auto at = [&](long row) {
    long start = row + SIDE > rows && before + rows >= SIDE ? rows - SIDE : row;
    return x + start * stride;
  };
  long r = 0;
  for (; rows - r > SIDE; r += 2 * SIDE) {
    const int32_t *pair = at(r), *other = at(r + SIDE);
    two_by_two<Op>(weights, pair, other, stride, words, first, sums[r]);
    two_by_two<Op>(weights + 2 * WHOLE, pair, other, stride, words, first, &sums[r][2]);
  }
  if (r >= rows) return;
  start_sums(first, (char*)sums[r], ACROSS);
  add_panel<Op>(weights, WIDTH, SIDE, at(r), stride, words, ahead ? ahead : weights);
  store_sums((char*)sums[r], ACROSS);
}

// Where the sums of a block's row are.
inline long place_of(long row, long before, long rows) {
  if (before + rows < SIDE || row < rows / SIDE * SIDE) return row;
  return row + (SIDE - rows % SIDE) % SIDE;
}
