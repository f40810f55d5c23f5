// Products of rows with weights of few bits on the matrix unit (AMX). A chunk of a panel is unpacked to whole numbers,
// in bytes or bfloat16; the unit multiplies up to 16 rows with it, group by group, and the groups' sums become floats.
//
// Bytes: the sums within a group are exact, and those over groups take the order of level_product.h, so the bits are
// the same with and without the unit. Few rows go without.
// bfloat16: the unit adds up the even and the odd inputs of a step (32, or a group of 16) in float32, then both. All
// rows take this order, however many there are.
#pragma once
#include "level_product.h"

constexpr long FEWEST_ON_UNIT = 8;  // rows of bytes that are worth the unpacking
constexpr long UNIT_BLOCK = 256;    // rows that share what is unpacked

// Sections that are unpacked at a time: what the unit then reads, and the sums that it leaves, fit the L1 cache.
template <class Kind> constexpr long UNIT_SECTIONS = Kind::GROUP < SECTION ? 2 : 4;

template <class Kind_> struct UnitBytes : ByBytes<Kind_> {
  typedef Kind_ Kind;
  template <class Other> using Of = UnitBytes<Other>;
  static constexpr long CHUNK_SECTIONS = UNIT_SECTIONS<Kind>;

  template <int C, int A, int B> static void add() { add_bytes<C, A, B>(); }
  static I operand(const Section<Kind>& section, long word, long at) {
    return section.values(word / 2, (int)(word % 2), at);
  }
};

template <class Kind_> struct UnitBfloats : ByBfloats<Kind_> {
  typedef Kind_ Kind;
  template <class Other> using Of = UnitBfloats<Other>;
  static constexpr long CHUNK_SECTIONS = UNIT_SECTIONS<Kind>;

  template <int C, int A, int B> static void add() { add_bfloats<C, A, B>(); }
};

// Words of inputs in a group of weights, and in a step of the unit.
template <class Op> constexpr long GROUP_WORDS = Op::WORDS * Op::Kind::GROUP / SECTION;
template <class Op> constexpr long STEP_WORDS = GROUP_WORDS<Op> < SIDE ? GROUP_WORDS<Op> : SIDE;

// The sums of a group of weights over a tile's rows.
template <class Op> using UnitSums = typename Op::Acc[SIDE][WIDTH / LANES];

// Of 16 outputs, step k of a group; what the group before it has summed up is stored first, or null.
template <class Op, int C> inline void add_step(const int32_t* weights, bool first, char* before) {
  if (first && before) store_tile<C>(before + C * SIDE * 4, LINE);
  if (first) clear_tile<C>();
  load_tile<6 + C % 2>(weights + C * SIDE, LINE);
  Op::template add<C, 4, 6 + C % 2>();
}

// to[i] = the products of rows x with group i of the weights' `count` groups. A tile is stored when the unit is at the
// next ones, else it would wait for each of them. What is `ahead` is fetched meanwhile.
template <class Op>
inline void sum_groups(const int32_t* weights, const int32_t* x, long stride, long count, Ahead& ahead,
                       UnitSums<Op>* to) {
  constexpr long WORDS = STEP_WORDS<Op>;
  for (long g = 0; g < count; g++)
    for (long k = 0; k < GROUP_WORDS<Op>; k += WORDS, weights += WORDS * WIDTH, x += WORDS) {
      char* before = g ? (char*)to[g - 1] : nullptr;
      load_tile<4>(x, stride * 4);
      add_step<Op, 0>(weights, !k, before);
      add_step<Op, 1>(weights, !k, before);
      add_step<Op, 2>(weights, !k, before);
      add_step<Op, 3>(weights, !k, before);
      ahead.fetch();
    }
  store_sums((char*)to[count - 1], ACROSS);
}

// sums[R] += R rows' sums of `count` groups of weights, of which the first lies in group `from` of the inputs.
template <class Op, int R, class Weights>
inline void keep_groups(const Weights& weights, const typename Op::Inputs& in, long from, long count, long row,
                        const UnitSums<Op>* of_group, F (*sums)[WIDTH / LANES]) {
  constexpr int W = WIDTH / LANES;
  constexpr long PARTS = IN_GROUP_OF<typename Op::Kind> / Op::Kind::GROUP;
  F total[R][W];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < W; j++) total[r][j] = sums[row + r][j];
  for (long g = 0; g < count; g++)
#pragma GCC unroll 4
    for (int j = 0; j < W; j++) {
      F d, m = {};
      weights.scales(g, j * LANES, d, m);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
        total[r][j] = Op::end(in, row + r, from + g / PARTS, of_group[g][row + r][j], d, m, total[r][j]);
    }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < W; j++) sums[row + r][j] = total[r][j];
}

// sums[rows] += at most 16 rows of inputs times the groups of inputs from `from` to `to` of a panel.
template <class Op, class Weights>
__attribute__((noinline)) void unit_tile(long rows, const Weights weights, const typename Op::Inputs in, long from,
                                         long to, Ahead& ahead, F (*sums)[WIDTH / LANES]) {
  typedef typename Op::Kind Kind;
  constexpr long IN_GROUP = IN_GROUP_OF<Kind>;
  alignas(64) UnitSums<Op> of_group[Op::CHUNK_SECTIONS * SECTION / Kind::GROUP];
  const long count = (to - from) * IN_GROUP / Kind::GROUP;
  const int32_t* x = (const int32_t*)in.x + from * IN_GROUP / SECTION * Op::WORDS;
  sum_groups<Op>(weights.words, x, in.stride, count, ahead, of_group);
  long row = 0;
  for (; row + 4 <= rows; row += 4) keep_groups<Op, 4>(weights, in, from, count, row, of_group, sums);
  for (; row < rows; row++) keep_groups<Op, 1>(weights, in, from, count, row, of_group, sums);
}

template <class Op> void multiply_on_unit(const PartProduct& product, const typename Op::Inputs& in) {
  typedef typename Op::Kind Kind;
  typedef typename Op::template Of<Operands<Kind::GROUP, 0, Kind::Scales::MINIMA>> Alike;
  const long inputs = product.call.weights->inputs, groups = inputs / IN_GROUP_OF<Kind>;
  const long rows = product.call.rows, outputs = product.part.outputs;
  if (!rows) return;
  alignas(64) F sums[UNIT_BLOCK][WIDTH / LANES];
  Chunk<Op> chunk;
  start_tiles(rows < SIDE ? rows : SIDE, STEP_WORDS<Op>);
  const long bytes = level_panel_bytes<Kind>(inputs);
  const char* packed = (const char*)product.part.packed;
  for (long p = product.next_panel(), then; p >= 0; p = then) {
    then = product.next_panel();
    const Packed<Kind> panel = {(const uint8_t*)packed + p * bytes};
    for (long row = 0; row < rows; row += UNIT_BLOCK) {
      const long some = rows - row < UNIT_BLOCK ? rows - row : UNIT_BLOCK;
      const long steps = (some + SIDE - 1) / SIDE * (inputs / SECTION * Op::WORDS / STEP_WORDS<Op>);
      // Fewer rows read as fast as the hardware foresees anyway.
      const bool fetches = rows >= FEWEST_ON_UNIT && then >= 0 && !row;
      Ahead ahead = {fetches ? packed + then * bytes : nullptr, (bytes / 64 + steps - 1) / steps};
      memset(sums, 0, (some + SIDE - 1) / SIDE * SIDE * sizeof sums[0]);
      for (long from = 0; from < groups; from += chunk.IN_GROUPS) {
        const long to = from + chunk.IN_GROUPS < groups ? from + chunk.IN_GROUPS : groups;
        chunk.unpack(panel, from, to);
        // The last tile starts before its first row, that it may be whole, if there are so many rows.
        for (long r = 0; r < some; r += SIDE) {
          const long first = r + SIDE > some && rows >= SIDE ? some - SIDE : r;
          const long together = rows < SIDE ? rows : SIDE;
          unit_tile<Alike>(together, chunk.weights(), in.from(row + first), from, to, ahead, sums + r);
        }
      }
      const long column = p * WIDTH, count = outputs - column < WIDTH ? outputs - column : WIDTH;
      for (long r = 0; r < some; r++) write(product, row + r, column, count, sums[place_of(r, row, some)]);
    }
  }
  stop_tiles();
}

template <class Kind> void unit_bytes(const PartProduct& product) {
  if (product.call.rows < FEWEST_ON_UNIT) multiply_bytes<Kind>(product);
  else multiply_on_unit<UnitBytes<Kind>>(product, byte_rows<Kind>(product));
}

template <class Kind> void unit_pairs(const PartProduct& product) {
  multiply_on_unit<UnitBfloats<Kind>>(product, pair_rows(product));
}
