// Products of rows with weights of few bits (level_kinds.h), for bytes and for bfloat16 inputs; of AVX2: level_avx2.h.
//
//   y[o] = sum over groups g of inputs, in order, of d(o, g) * (sum of values * inputs) + m(o, g) * (sum of inputs)
//
// Within a group the sum is exact for bytes, and in float32, pair by pair, for bfloat16. Up to 6 rows at a time read the
// levels as they lie. Where operands do not come easily of these, a chunk of a panel is unpacked once for more rows, and
// read by all of them. The sums are the same, bit for bit.
#pragma once
#include "level_inputs.h"
#include "tile.h"

// A panel as it lies.
template <class Kind> struct Packed {
  const uint8_t* panel;

  Section<Kind> section(long index) const { return section_of<Kind>(panel, index); }

  void scales(long group, long at, F& d, F& m) const {
    panel_scales<Kind>(panel, group, at, d, m);
  }

  // Lines of a group some way ahead. In long blocks scales lie apart from the levels that they are read with, which no
  // hardware foresees. Where the panel ends, the next one mostly follows.
  __attribute__((always_inline)) void fetch(long group) const {
    constexpr long EACH = PANEL_BLOCK<Kind> / Kind::INPUTS * IN_GROUP_OF<Kind>, AHEAD = 1536;
    if (Kind::INPUTS < 256) return;
    const uint8_t* next = panel + group * EACH + AHEAD;
    for (long i = 0; i < EACH; i += 64) __builtin_prefetch(next + i);
  }
};

// A chunk of a panel whose levels are operands: [words of a section][WIDTH] for each section.
template <long WORDS, bool MINIMA> struct Unpacked {
  const int32_t* words;
  const float* d;  // [groups][WIDTH]
  const float* m;

  struct OfSection {
    const int32_t* words;
    I bytes(long step, int word, long at) const { return load<I>(words + (step * 2 + word) * WIDTH + at); }
    I pair(long step, int pair, long at) const { return load<I>(words + (step * 4 + pair) * WIDTH + at); }
  };

  OfSection section(long index) const { return {words + index * WORDS * WIDTH}; }

  void scales(long group, long at, F& to_d, F& to_m) const {
    to_d = load<F>(d + group * WIDTH + at);
    if (MINIMA) to_m = load<F>(m + group * WIDTH + at);
  }

  void fetch(long) const {}
};

// What is left of a kind where its levels are unpacked: kinds that are alike in this share their tiles.
template <long GROUP_, int OFFSET_, bool MINIMA_> struct Operands {
  static constexpr long GROUP = GROUP_, BITS = 8;
  static constexpr int OFFSET = OFFSET_;
  static constexpr bool CODES = false;
  struct Scales {
    static constexpr bool MINIMA = MINIMA_;
  };
};

// ---- bytes
struct ByteRows {
  const int32_t* x;
  long stride;  // words of a row
  const ByteGroup* groups;
  long of_row;  // groups of a row

  ByteRows from(long row) const { return {x + row * stride, stride, groups + row * of_row, of_row}; }
};

template <class Kind_> struct ByBytes {
  typedef Kind_ Kind;
  typedef ByteRows Inputs;
  static constexpr bool BYTES = true;
  template <class Other> using Of = ByBytes<Other>;
  typedef I Acc;
  static constexpr long WORDS = SECTION / 4;           // of a section
  static constexpr int MOST_ROWS_AT_ONCE = LANES == 16 ? 6 : 4;
  // Whether operands come with so few instructions that rows need not share them.
  static constexpr bool EASY = LANES == 16 && (Kind::BITS == 4 || Kind::BITS == 8);
  static constexpr long CHUNK_SECTIONS = 8;            // that are unpacked at a time, of 2 KB each

  // What the sums of a row over a group of weights, the `part`th of a group of inputs, begin with.
  static I begin(const Inputs& in, long row, long group, int part) {
    if constexpr (SHIFT<Kind> == 0) return I{};
    const ByteGroup& of = in.groups[row * in.of_row + group];
    int32_t sum = Kind::GROUP >= SECTION ? of.whole : part ? of.whole - of.half : of.half;
    return splat(-SHIFT<Kind> * sum);
  }

  template <int R, int W, class S>
  __attribute__((always_inline)) static void step(I (&acc)[R][W], const S& section, long step, long at,
                                                  const int32_t* x, long stride) {
#if DOT_INSTRUCTIONS
#pragma GCC unroll 2
    for (int word = 0; word < 2; word++) {
      I w[W];
      for (int j = 0; j < W; j++) w[j] = section.bytes(step, word, at + j * LANES);
      for (int r = 0; r < R; r++) {
        I in = splat(x[r * stride + step * 2 + word]);
        for (int j = 0; j < W; j++) acc[r][j] = dot(acc[r][j], in, w[j]);
      }
    }
#else
    for (int j = 0; j < W; j++) {
      I w = section.bytes(step, 0, at + j * LANES), v = section.bytes(step, 1, at + j * LANES);
      for (int r = 0; r < R; r++) {
        const int32_t* in = x + r * stride + step * 2;
        acc[r][j] = dot(dot(acc[r][j], splat(in[0]), w), splat(in[1]), v);
      }
    }
#endif
  }

  static F end(const Inputs& in, long row, long group, I acc, F d, F m, F sum) {
    const ByteGroup& of = in.groups[row * in.of_row + group];
    sum = fused(__builtin_convertvector(acc, F), d * of.worth, sum);
    return Kind::Scales::MINIMA ? fused(m, splat(of.sum), sum) : sum;
  }

  static I operand(const Section<Kind>& section, long word, long at) {
    return section.bytes(word / 2, (int)(word % 2), at);
  }
};

// ---- bfloat16
struct PairRows {
  const PairOfInputs* x;
  long stride;        // pairs of a row
  const float* sums;  // of 32 inputs each
  long of_row;        // sums of a row

  PairRows from(long row) const { return {x + row * stride, stride, sums + row * of_row, of_row}; }
};

template <class Kind_> struct ByBfloats {
  typedef Kind_ Kind;
  typedef PairRows Inputs;
  static constexpr bool BYTES = false;
  template <class Other> using Of = ByBfloats<Other>;
  typedef F Acc;
  static constexpr long WORDS = SECTION / 2;
  static constexpr int MOST_ROWS_AT_ONCE = LANES == 16 ? 6 : 4;
  static constexpr bool EASY = LANES == 16 && Kind::BITS <= 4;
  static constexpr long CHUNK_SECTIONS = 4;  // of 4 KB each

  static F begin(const Inputs&, long, long, int) { return F{}; }

  template <int R, int W, class S>
  __attribute__((always_inline)) static void step(F (&acc)[R][W], const S& section, long step, long at,
                                                  const PairOfInputs* x, long stride) {
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; pair++) {
      const PairOfInputs* in = x + step * 4 + pair;
#if DOT_BFLOATS
      __m512bh w[W];
      for (int j = 0; j < W; j++) w[j] = (__m512bh)section.pair(step, pair, at + j * LANES);
      for (int r = 0; r < R; r++) {
        __m512bh both = (__m512bh)_mm512_set1_epi32(in[r * stride]);
        for (int j = 0; j < W; j++) acc[r][j] = (F)_mm512_dpbf16_ps((__m512)acc[r][j], both, w[j]);
      }
#else
      I w[W];
      for (int j = 0; j < W; j++) w[j] = section.pair(step, pair, at + j * LANES);
      for (int r = 0; r < R; r++)
        for (int j = 0; j < W; j++) acc[r][j] = fused((F)(w[j] << 16), splat(in[r * stride].even), acc[r][j]);
      for (int r = 0; r < R; r++)
        for (int j = 0; j < W; j++)
          acc[r][j] = fused((F)(w[j] & (int32_t)0xffff0000), splat(in[r * stride].odd), acc[r][j]);
#endif
    }
  }

  static F end(const Inputs& in, long row, long group, F acc, F d, F m, F sum) {
    sum = fused(acc, d, sum);
    if (!Kind::Scales::MINIMA) return sum;
    constexpr long EACH = IN_GROUP_OF<Kind> / SECTION;
    const float* sums = in.sums + row * in.of_row + group * EACH;
    float all = sums[0];
    for (long i = 1; i < EACH; i++) all += sums[i];
    return fused(m, splat(all), sum);
  }

  static I operand(const Section<Kind>& section, long word, long at) {
    return section.pair(word / 4, (int)(word % 4), at);
  }
};

// ---- tiles
// Registers of outputs beside each of so many rows.
constexpr int level_registers(int rows) {
  return LANES == 4 || rows == 1 || (LANES == 16 && rows <= 3) ? 4 : 2;
}

// What is read after a panel: every group that a tile multiplies fetches some lines of it. Else memory would be idle
// while all but the first pass over a panel multiply what already lies in the cache.
struct Ahead {
  const char* next;  // or null
  long lines;        // that are fetched at a time

  void fetch() {
    if (!next) return;
    for (long i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// sums[R] += R rows of inputs times the groups of inputs from `from` to `to` of a panel; the weights' first is `from`.
// Not inlined: GCC then keeps all sums of a group in registers.
template <class Op, int R, class Source>
__attribute__((noinline)) void level_tile(const Source weights, Ahead ahead, const typename Op::Inputs in, long from,
                                          long to, F (*sums)[WIDTH / LANES]) {
  typedef typename Op::Kind Kind;
  constexpr int W = level_registers(R), PARTS = Kind::GROUP < SECTION ? 2 : 1;
  constexpr long EACH = IN_GROUP_OF<Kind> / SECTION;  // sections of a group of inputs
  for (int at = 0; at < WIDTH / LANES; at += W) {
    F total[R][W];
    for (int r = 0; r < R; r++)
      for (int j = 0; j < W; j++) total[r][j] = sums[r][at + j];
    for (long group = from; group < to; group++) {
      if (!at) weights.fetch(group);
      if (R > 3) ahead.fetch();
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; part++) {
        typename Op::Acc acc[R][W];
        for (int r = 0; r < R; r++)
          for (int j = 0; j < W; j++) acc[r][j] = Op::begin(in, r, group, part);
        for (long i = 0; i < EACH; i++) {
          auto section = weights.section((group - from) * EACH + i);
          const auto* x = in.x + (group * EACH + i) * Op::WORDS;
#pragma GCC unroll 4
          for (int step = 0; step < 4 / PARTS; step++)
            Op::template step<R, W>(acc, section, part * 2 + step, at * LANES, x, in.stride);
        }
        for (int j = 0; j < W; j++) {
          F d, m = {};
          weights.scales((group - from) * PARTS + part, (at + j) * LANES, d, m);
          for (int r = 0; r < R; r++) total[r][j] = Op::end(in, r, group, acc[r][j], d, m, total[r][j]);
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int j = 0; j < W; j++) sums[r][at + j] = total[r][j];
  }
}

template <class Op, class Source, int R = Op::MOST_ROWS_AT_ONCE>
void level_tile_of(long rows, const Source& weights, const Ahead& ahead, const typename Op::Inputs& in, long from,
                   long to, F (*sums)[WIDTH / LANES]) {
  if (rows == R) level_tile<Op, R>(weights, ahead, in, from, to, sums);
  else if constexpr (R > 1) level_tile_of<Op, Source, R == 6 ? 4 : R - 1>(rows, weights, ahead, in, from, to, sums);
}

// Rows of the next tile: few of them are left for the last one, and none is of 5, which spares compilers a sixth.
template <class Op> inline long rows_of_tile(long left) {
  if (left == 7 || left == 8) return 4 < Op::MOST_ROWS_AT_ONCE ? 4 : Op::MOST_ROWS_AT_ONCE;
  if (left == 5) return 3;
  return left < Op::MOST_ROWS_AT_ONCE ? left : Op::MOST_ROWS_AT_ONCE;
}

// The same of any number of rows; their tiles fetch `bytes` of what is `ahead`, or null.
template <class Op, class Source>
void level_tiles(long rows, const Source& weights, const uint8_t* ahead, long bytes, const typename Op::Inputs& in,
                 long from, long to, F (*sums)[WIDTH / LANES]) {
  for (long r = 0, some; r < rows; r += some) {
    some = rows_of_tile<Op>(rows - r);
    const long own = bytes * r / rows / 64 * 64, end = bytes * (r + some) / rows;
    const long times = (to - from) * (WIDTH / LANES / level_registers((int)some));
    const Ahead share = {ahead ? (const char*)ahead + own : nullptr, (end - own + times * 64 - 1) / (times * 64)};
    level_tile_of<Op>(some, weights, share, in.from(r), from, to, sums + r);
  }
}

constexpr long LEVEL_BLOCK = 128;  // rows that share what is unpacked

// A panel's groups of inputs `from` .. `to`, unpacked.
template <class Op> struct Chunk {
  typedef typename Op::Kind Kind;
  static constexpr bool MINIMA = Kind::Scales::MINIMA;
  static constexpr long GROUPS = Op::CHUNK_SECTIONS * SECTION / Kind::GROUP;  // of weights
  static constexpr long IN_GROUPS = Op::CHUNK_SECTIONS * SECTION / IN_GROUP_OF<Kind>;
  alignas(64) int32_t words[Op::CHUNK_SECTIONS * Op::WORDS * WIDTH];
  alignas(64) float d[GROUPS * WIDTH], m[MINIMA ? GROUPS * WIDTH : 1];

  void unpack(const Packed<Kind>& panel, long from, long to) {
    constexpr long EACH = IN_GROUP_OF<Kind> / SECTION, SHARE = IN_GROUP_OF<Kind> / Kind::GROUP;
    int32_t* out = words;
    for (long group = from; group < to; group++) panel.fetch(group);
    for (long i = from * EACH; i < to * EACH; i++) {
      Section<Kind> section = panel.section(i);
#pragma GCC unroll 16
      for (long word = 0; word < Op::WORDS; word++, out += WIDTH)
        for (long at = 0; at < WIDTH; at += LANES) store(out + at, Op::operand(section, word, at));
    }
    for (long group = from * SHARE; group < to * SHARE; group++)
      for (long at = 0; at < WIDTH; at += LANES) {
        F first, second = {};
        panel.scales(group, at, first, second);
        store(d + (group - from * SHARE) * WIDTH + at, first);
        if (MINIMA) store(m + (group - from * SHARE) * WIDTH + at, second);
      }
  }

  Unpacked<Op::WORDS, MINIMA> weights() const { return {words, d, m}; }
};

template <class Op>
void multiply_unpacked(long rows, const Packed<typename Op::Kind>& panel, const typename Op::Inputs& in, long groups,
                       F (*sums)[WIDTH / LANES]) {
  typedef typename Op::Kind Kind;
  typedef typename Op::template Of<Operands<Kind::GROUP, Op::BYTES ? Kind::OFFSET : 0, Kind::Scales::MINIMA>> Alike;
  Chunk<Op> chunk;
  for (long from = 0; from < groups; from += chunk.IN_GROUPS) {
    long to = from + chunk.IN_GROUPS < groups ? from + chunk.IN_GROUPS : groups;
    chunk.unpack(panel, from, to);
    level_tiles<Alike>(rows, chunk.weights(), nullptr, 0, in, from, to, sums);
  }
}

template <class Op> void multiply_levels(const PartProduct& product, const typename Op::Inputs& in) {
  typedef typename Op::Kind Kind;
  const long inputs = product.call.weights->inputs, groups = inputs / IN_GROUP_OF<Kind>;
  const long rows = product.call.rows, outputs = product.part.outputs;
  alignas(64) F sums[LEVEL_BLOCK][WIDTH / LANES];
  const long bytes = level_panel_bytes<Kind>(inputs);
  const uint8_t* packed = (const uint8_t*)product.part.packed;
  for (long p = product.next_panel(), then; p >= 0; p = then) {
    then = product.next_panel();
    const Packed<Kind> panel = {packed + p * bytes};
    for (long row = 0; row < rows; row += LEVEL_BLOCK) {
      long some = rows - row < LEVEL_BLOCK ? rows - row : LEVEL_BLOCK;
      memset(sums, 0, some * sizeof sums[0]);
      const uint8_t* ahead = then < 0 || row ? nullptr : packed + then * bytes;
      if (Op::EASY || rows <= Op::MOST_ROWS_AT_ONCE)
        level_tiles<Op>(some, panel, ahead, bytes, in.from(row), 0, groups, sums);
      else if constexpr (!Op::EASY) multiply_unpacked<Op>(some, panel, in.from(row), groups, sums);
      long column = p * WIDTH, count = outputs - column < WIDTH ? outputs - column : WIDTH;
      for (long r = 0; r < some; r++) write(product, row + r, column, count, sums[r]);
    }
  }
}

template <class Kind> inline ByteRows byte_rows(const PartProduct& product) {
  const long inputs = product.call.weights->inputs, groups = groups_of(inputs, IN_GROUP_OF<Kind>);
  const uint8_t* bytes = (const uint8_t*)product.inputs;
  const ByteGroup* of = (const ByteGroup*)(bytes + product.call.rows * inputs);
  return {(const int32_t*)bytes, inputs / 4, of, groups};
}

inline PairRows pair_rows(const PartProduct& product) {
  const long inputs = product.call.weights->inputs, sections = groups_of(inputs, SECTION);
  const PairOfInputs* pairs = (const PairOfInputs*)product.inputs;
  const float* sums = (const float*)(pairs + product.call.rows * inputs / 2);
  return {pairs, inputs / 2, sums, sections};
}

template <class Kind> void multiply_bytes(const PartProduct& product) {
  multiply_levels<ByBytes<Kind>>(product, byte_rows<Kind>(product));
}

template <class Kind> void multiply_pairs(const PartProduct& product) {
  multiply_levels<ByBfloats<Kind>>(product, pair_rows(product));
}
