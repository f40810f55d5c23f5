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
template <int C, int A, int B> inline void add_bytes() {  // all of them signed
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

// Tiles 0 to 3 hold sums, 4 and 5 inputs, of `rows` rows each; the others weights. A step is over `words` of inputs.
inline void start_tiles(long rows, long words = SIDE) {
  struct {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
  } shape;
  for (int i = 0; i < 6; i++) shape.rows[i] = (uint8_t)rows;
  for (int i = 4; i < 6; i++) shape.bytes[i] = (uint16_t)(words * 4);
  for (int i = 6; i < 8; i++) shape.rows[i] = (uint8_t)words;
  asm volatile("ldtilecfg %0" : : "m"(shape));
}

inline void stop_tiles() { asm volatile("tilerelease"); }

constexpr long LINE = WIDTH * 4;  // bytes from one row of sums to the next

// Where the second pair of sums' tiles lies: beside the first, or below it.
constexpr long ACROSS = 2 * SIDE * 4, BELOW = SIDE * LINE;

inline void clear_sums() {
  clear_tile<0>();
  clear_tile<1>();
  clear_tile<2>();
  clear_tile<3>();
}

inline void start_sums(bool first, const char* from, long second) {
  if (first) {
    clear_sums();
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

// Tiles 0 to 3, the second pair below the first, += rows of x and of y times half a panel of weights
template <class Op>
void two_by_two(const int32_t* weights, const int32_t* x, const int32_t* y, long stride, long words) {
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
}

// The sums of tiles 0 to 3 over `words`, which add(from, words) multiplies. Where Op has groups, a group's sums wait as
// they are, and keep(from, sums) makes floats of them while the unit is at the next group.
template <class Op, class Add, class Keep>
inline void sum_up(long words, bool first, F* sums, long second, const Add& add, const Keep& keep) {
  if constexpr (!Op::GROUP) {
    start_sums(first, (char*)sums, second);
    add(0, words);
    store_sums((char*)sums, second);
  } else {
    alignas(64) typename Op::Acc of_group[BLOCK][WIDTH / LANES];
    for (long from = 0; from < words; from += Op::GROUP) {
      clear_sums();
      add(from, words - from < Op::GROUP ? words - from : Op::GROUP);
      if (from) keep(from - Op::GROUP, of_group);
      store_sums((char*)of_group, second);
    }
    keep((words - 1) / Op::GROUP * Op::GROUP, of_group);
  }
}

// W registers of sums of `rows` rows over the group from word `from` on become floats; `at` is the first of a panel's.
template <class Op, int W>
inline void keep_group(const typename Op::Inputs& in, long from, bool first, long rows, long at,
                       const typename Op::Acc (*of_group)[WIDTH / LANES], F* sums) {
  F scale[W];
  for (int j = 0; j < W; j++) scale[j] = Op::scale(in.from(0, from), at + j);
  for (long r = 0; r < rows; r++, sums += WIDTH / LANES)
    for (int j = 0; j < W; j++)
      sums[j] = Op::end(in.from(r, from), of_group[r][j], scale[j], first && !from ? F{} : sums[j]);
}

// sums[rows of a block] += rows of inputs times a panel of weights; `before`: how many rows are in front of the block.
// Rows go in tiles; the last one starts before its first row, that it may be whole, if there are so many.
template <class Op>
void multiply_block(const int32_t* weights, const int32_t* ahead, const typename Op::Inputs& in, long before, long rows,
                    long words, bool first, F (*sums)[WIDTH / LANES]) {
  auto at = [&](long row) { return in.from(row + SIDE > rows && before + rows >= SIDE ? rows - SIDE : row, 0); };
  long r = 0;
  for (; rows - r > SIDE; r += 2 * SIDE) {
    const typename Op::Inputs pair = at(r), other = at(r + SIDE);
    for (long half = 0; half < 2; half++) {
      const int32_t* part = weights + half * 2 * WHOLE;
      F* to = &sums[r][half * 2];
      auto add = [&](long from, long some) {
        two_by_two<Op>(part + from * WIDTH, pair.x + from, other.x + from, in.stride, some);
      };
      auto keep = [&](long from, const auto& of_group) {
        keep_group<Op, 2>(pair, from, first, SIDE, half * 2, of_group, to);
        keep_group<Op, 2>(other, from, first, SIDE, half * 2, of_group + SIDE, to + SIDE * WIDTH / LANES);
      };
      sum_up<Op>(words, first, to, BELOW, add, keep);
    }
  }
  if (r >= rows) return;
  const typename Op::Inputs last = at(r);
  auto add = [&](long from, long some) {
    const int32_t* then = from + some < words ? weights + (from + some) * WIDTH : ahead ? ahead : weights;
    add_panel<Op>(weights + from * WIDTH, WIDTH, SIDE, last.x + from, in.stride, some, then);
  };
  auto keep = [&](long from, const auto& of_group) {
    keep_group<Op, WIDTH / LANES>(last, from, first, before + rows < SIDE ? rows : SIDE, 0, of_group, sums[r]);
  };
  sum_up<Op>(words, first, sums[r], ACROSS, add, keep);
}

// Where the sums of a block's row are.
inline long place_of(long row, long before, long rows) {
  if (before + rows < SIDE || row < rows / SIDE * SIDE) return row;
  return row + (SIDE - rows % SIDE) % SIDE;
}
