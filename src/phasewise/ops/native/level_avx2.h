// Products of rows with weights of few bits (level_kinds.h), with AVX2. Other instruction sets have level_product.h.
//
//   y[o] = sum over groups g of inputs, in order, of d(o, g) * (sum of levels * inputs) + m(o, g) * (sum of inputs)
//
// Levels are taken as they are stored, from 0 up: what stands for 0 among them is part of m. A panel is multiplied in
// chunks of 256 inputs. First a chunk's scales become floats, so that all kinds whose levels are read alike share their
// loops. Within a group the sum is exact for bytes, and in float32, input by input, for bfloat16. For bfloat16, few rows
// read the levels as they lie; where there are more, levels become floats once, and all rows read these. The sums are the
// same, bit for bit.
#pragma once
#include <type_traits>

#include "level_inputs.h"
#include "tile.h"

constexpr long COLUMNS = WIDTH / LANES;  // registers of a panel's outputs
constexpr long CHUNK_SECTIONS = 8, CHUNK_INPUTS = CHUNK_SECTIONS * SECTION;
constexpr long MOST_GROUPS = CHUNK_INPUTS / 16;

struct LevelChunk {                          // of a panel
  const uint8_t* sections[CHUNK_SECTIONS];  // where the levels of 32 inputs each begin
  long count;                                // of sections
  long groups, inputs;                       // of weights, and inputs of each
  const uint8_t* next;  // what is read after it, or null
  long next_bytes;
  alignas(64) float d[MOST_GROUPS][WIDTH], m[MOST_GROUPS][WIDTH];
};

// Fetches what comes after a chunk while it is multiplied, in equal shares: memory works meanwhile. The hardware alone
// foresees neither scales nor levels, whose lines are read by several loads far apart.
struct Fetched {
  const uint8_t *at, *end;
  long bytes;  // of a share: whole lines

  Fetched(const LevelChunk& chunk, long shares)
      : at(chunk.next), end(at + (at ? chunk.next_bytes : 0)), bytes((chunk.next_bytes / 64 / shares + 1) * 64) {}
  __attribute__((always_inline)) void share() {
    if (at >= end) return;
    for (const uint8_t* until = at + bytes; at < until; at += 64) __builtin_prefetch(at, 0, 3);
  }
};

// ---- kinds whose levels are read alike
template <long BITS_> struct PlainLevels {
  static constexpr long BITS = BITS_, GROUP = SECTION;
  static constexpr int OFFSET = BITS == 8 ? 128 : 0;  // bytes of 8 bits are multiplied with their signs
  static constexpr bool TABLE = false, E4M3 = false;
  static constexpr int8_t VALUES[16] = {};
};

struct E4m3Levels : PlainLevels<8> {
  static constexpr int OFFSET = 0;
  static constexpr bool E4M3 = true;
};

template <class Kind>
using Alike = std::conditional_t<Kind::E4M3, E4m3Levels,
              std::conditional_t<!Kind::TABLE, PlainLevels<Kind::BITS>,
              std::conditional_t<Kind::OFFSET == 128, IQ4_NL, MXFP4>>>;

template <class Kind> constexpr int PARTS = Kind::GROUP < SECTION ? 2 : 1;  // groups of a section

// Where a panel's sections from `first` on lie, and their scales; `ZERO` is the level that stands for 0, unless the
// kind has minima.
template <class Kind, int ZERO> void read_chunk(const uint8_t* panel, long first, long count, LevelChunk& to) {
  constexpr long GROUPS = Kind::INPUTS / Kind::GROUP;  // of a block
  for (long i = 0; i < count; i++) to.sections[i] = panel + section_at<Kind>(first + i);
  to.count = count, to.inputs = Kind::GROUP, to.groups = count * SECTION / Kind::GROUP;
  const uint8_t* head = panel + first / SECTIONS<Kind> * PANEL_BLOCK<Kind>;
  for (long from = 0; from < to.groups; from += GROUPS, head += PANEL_BLOCK<Kind>)
    for (long at = 0; at < WIDTH; at += LANES)
      for (long g = 0; g < GROUPS; g++) {
        F d, m;
        Kind::Scales::get(head, g, at, d, m);
        if (!Kind::Scales::MINIMA) m = d * (float)-ZERO;
        store(to.d[from + g] + at, d);
        store(to.m[from + g] + at, m);
      }
}

// ---- bytes
// How many products of two bytes each sixteen bits hold the sum of, at most; 0: none, if a level has a sign.
template <class Levels> constexpr int PRODUCTS = SHIFT<Levels> != Levels::OFFSET ? 1
                                                 : Levels::TABLE                 ? 4
                                                                                 : 1 << (7 - Levels::BITS);

// Of COUNT words of levels with as many of a row.
inline __m256i all_of(int32_t x) { return (__m256i)splat(x); }
inline __m256i all_of(I x) { return (__m256i)x; }

template <class Levels, int COUNT, class X>
__attribute__((always_inline)) inline I byte_sums(const I* levels, const X* x) {
  constexpr bool SIGNS = SHIFT<Levels> != Levels::OFFSET;
  constexpr int EACH = PRODUCTS<Levels> < COUNT ? PRODUCTS<Levels> : COUNT;
  I all = {};
#pragma GCC unroll 8
  for (int from = 0; from < COUNT; from += EACH) {
    __m256i some = {};
#pragma GCC unroll 8
    for (int i = from; i < from + EACH; i++) {
      __m256i in = all_of(x[i]), w = (__m256i)levels[i];
      __m256i products = SIGNS ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(in, w))
                               : _mm256_maddubs_epi16(w, in);
      some = i > from ? _mm256_add_epi16(some, products) : products;
    }
    I sums = (I)_mm256_madd_epi16(some, _mm256_set1_epi16(1));
    all = from ? all + sums : sums;
  }
  return all;
}

struct ByteRows {
  const int32_t* x;
  long stride;  // words of a row
  const ByteGroup* groups;
  long of_row;  // groups of a row
};

// sum += what bytes of a row gave with a group of weights
template <int PARTS>
__attribute__((always_inline)) inline void finish_bytes(F& sum, I all, F d, F m, const ByteGroup& of, int part) {
  const F inputs = splat(PARTS > 1 ? of.parts[part] : of.sum);
  sum = fused(m, inputs, fused(__builtin_convertvector(all, F), d * of.worth, sum));
}

template <class Levels>
__attribute__((always_inline)) inline void read_bytes(const uint8_t* at, long output, I (&to)[8]) {
  const Section<Levels> section = {at};
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) to[i] = section.bytes(i / 2, i % 2, output);
}

typedef void BytesTile(const LevelChunk& chunk, ByteRows in, long rows, F (*sums)[COLUMNS]);
constexpr long BYTES_BLOCK = 32;  // rows that share levels once they are bytes

// sums += rows times a chunk. Of 8 outputs the levels of a section fill half of the registers; rows come one after the
// other, or where there is one, outputs. `WIDE`: groups have several sections, one byte group for all.
template <class Levels, int PARTS, bool WIDE>
void bytes_tile(const LevelChunk& chunk, ByteRows in, long rows, F (*sums)[COLUMNS]) {
  constexpr int WORDS = SECTION / 4, COUNT = WORDS / PARTS;
  I levels[WORDS], held[WIDE ? BYTES_BLOCK : 1];  // sums of a group so far
  const long sections = WIDE ? chunk.inputs / SECTION : 1;
  Fetched next(chunk, COLUMNS * chunk.count);
  for (long at = 0; at < COLUMNS; at++)
    for (long s = 0; s < chunk.count; s++) {
      next.share();
      read_bytes<Levels>(chunk.sections[s], at * LANES, levels);
      const long group = s / sections;
      const bool begins = !WIDE || s % sections == 0, ends = !WIDE || (s + 1) % sections == 0;
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; part++) {
        const F d = load<F>(chunk.d[group * PARTS + part] + at * LANES);
        const F m = load<F>(chunk.m[group * PARTS + part] + at * LANES);
        const int32_t* x = in.x + s * WORDS + part * COUNT;
        const ByteGroup* of = in.groups + group;
        for (long r = 0; r < rows; r++, x += in.stride, of += in.of_row) {
          I all = byte_sums<Levels, COUNT>(levels + part * COUNT, x);
          if (!begins) all += held[r];
          if (!ends) held[r] = all;
          else finish_bytes<PARTS>(sums[r][at], all, d, m, *of, part);
        }
      }
    }
}

// The same of one row.
template <class Levels, int PARTS, bool WIDE>
void bytes_of_row(const LevelChunk& chunk, ByteRows in, long, F (*sums)[COLUMNS]) {
  constexpr int WORDS = SECTION / 4, COUNT = WORDS / PARTS;
  I x[WORDS], held[WIDE ? COLUMNS : 1];
  const long sections = WIDE ? chunk.inputs / SECTION : 1;
  Fetched next(chunk, COLUMNS * chunk.count);
  for (long s = 0; s < chunk.count; s++) {
    for (int i = 0; i < WORDS; i++) x[i] = splat(in.x[s * WORDS + i]);
    const long group = s / sections;
    const bool begins = !WIDE || s % sections == 0, ends = !WIDE || (s + 1) % sections == 0;
    const ByteGroup of = in.groups[group];
    for (long at = 0; at < COLUMNS; at++) {
      next.share();
      I levels[WORDS];
      read_bytes<Levels>(chunk.sections[s], at * LANES, levels);
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; part++) {
        I all = byte_sums<Levels, COUNT>(levels + part * COUNT, x + part * COUNT);
        if (!begins) all += held[at];
        if (!ends) {
          held[at] = all;
          continue;
        }
        const F d = load<F>(chunk.d[group * PARTS + part] + at * LANES);
        const F m = load<F>(chunk.m[group * PARTS + part] + at * LANES);
        finish_bytes<PARTS>(sums[0][at], all, d, m, of, part);
      }
    }
  }
}

// ---- bfloat16
// What each nibble's place in a word is masked with.
struct PlaceMasks {
  alignas(32) uint32_t of[8][LANES];
};

constexpr PlaceMasks place_masks(bool nibbles) {
  PlaceMasks found = {};
  for (int nibble = 0; nibble < 8; nibble++)
    for (int i = 0; i < LANES; i++)
      found.of[nibble][i] = nibbles ? 15u << nibble * 4 : 255u << nibble / 2 * 8;
  return found;
}

// Registers are for sums: what is read anew every time is pointed to by what the compiler knows nothing of.
template <class T> __attribute__((always_inline)) inline T* hidden(T* p) {
  asm volatile("" : "+r"(p));
  return p;
}

template <class Levels> struct FloatLevels {
  static constexpr bool NIBBLES = Levels::BITS == 4 && !Levels::TABLE;
  static constexpr PlaceMasks MASKS = place_masks(NIBBLES);

  static constexpr bool masked(int nibble) { return place_of_level(NIBBLES, nibble) || nibble / 2 == 0; }
  static I mask(const PlaceMasks* masks, int nibble) { return load<I>(masks->of[nibble]); }

  // What a word holds for `nibble` of its place, as large as place_of_level makes it.
  __attribute__((always_inline)) static F of(I word, int nibble, I mask) {
    if constexpr (Levels::E4M3)
      return from_e4m3(shift_right(word, nibble / 2 * 8) & 255) * (float)(1 << place_of_level(false, nibble));
    return __builtin_convertvector(masked(nibble) ? word & mask : shift_right(word, NIBBLES ? 28 : 24), F);
  }

  __attribute__((always_inline)) static I word(const Section<Levels>& section, long step, int nibble, long at) {
    return NIBBLES ? section.words(step, at) : section.above(step, nibble % 2, at);
  }
};

struct FloatRows {
  const float* x;
  long stride;        // inputs of a row
  const float* sums;  // of each group
  long of_row;        // groups of a row

  FloatRows from(long row) const { return {x + row * stride, stride, sums + row * of_row, of_row}; }
};

constexpr int DIRECT_ROWS = 4;  // of a tile that reads levels as they lie
typedef void FloatsTile(const LevelChunk& chunk, FloatRows in, F (*sums)[COLUMNS]);

// acc += R rows times the levels of a step.
template <class Levels, int R, int W>
__attribute__((always_inline)) inline void floats_step(F (&acc)[R][W], Section<Levels>& section, long step, long at,
                                                       const float* const (&x)[R]) {
  typedef FloatLevels<Levels> Floats;
#pragma GCC unroll 8
  for (int i = 0; i < STEP; i++) {
    const int nibble = nibble_of(i);
    if (Floats::NIBBLES || !i) section.data = hidden(section.data);
    const PlaceMasks* masks = hidden(&Floats::MASKS);
    auto weights = [&](int j) {
      return Floats::of(Floats::word(section, step, nibble, at + j * LANES), nibble, Floats::mask(masks, nibble));
    };
    if constexpr (R == 1) {
      const F in = splat(x[0][i]);
      for (int j = 0; j < W; j++) acc[0][j] = fused(weights(j), in, acc[0][j]);
    } else {
      F w[W];
      for (int j = 0; j < W; j++) w[j] = weights(j);
      for (int r = 0; r < R; r++) {
        const F in = splat(x[r][i]);
        for (int j = 0; j < W; j++) acc[r][j] = fused(w[j], in, acc[r][j]);
      }
    }
  }
}

// sums += R rows times a chunk. Not inlined: GCC then keeps all sums of a group in registers.
template <class Levels, int PARTS, int R>
__attribute__((noinline)) void floats_tile(const LevelChunk& chunk, FloatRows in, F (*sums)[COLUMNS]) {
  // Registers of outputs beside each of the rows.
  constexpr int W = FloatLevels<Levels>::NIBBLES ? (R == 1 ? 8 : R == 2 ? 4 : 2) : R == 1 ? 4 : 2;
  const long sections = PARTS > 1 ? 1 : chunk.inputs / SECTION;  // of a group, or one of several groups
  Fetched next(chunk, COLUMNS / W * chunk.count * 4);
  for (long at = 0; at < COLUMNS; at += W)
    for (long first = 0; first < chunk.count; first += sections) {
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; part++) {
        F acc[R][W] = {};
        for (long s = first; s < first + sections; s++) {
          Section<Levels> section = {chunk.sections[s]};
          const float* x[R];
          for (int r = 0; r < R; r++) x[r] = in.x + r * in.stride + s * SECTION + part * SECTION / PARTS;
#pragma GCC unroll 1
          for (int step = part * 4 / PARTS; step < (part + 1) * 4 / PARTS; step++) {
            next.share();
            for (int r = 0; r < R; r++) x[r] = hidden(x[r]);
            floats_step(acc, section, step, at * LANES, x);
            for (int r = 0; r < R; r++) x[r] += STEP;
          }
        }
        const long group = first / sections * PARTS + part;
        F (*to)[COLUMNS] = hidden(sums);
        for (int j = 0; j < W; j++) {
          F d = load<F>(chunk.d[group] + (at + j) * LANES), m = load<F>(chunk.m[group] + (at + j) * LANES);
          for (int r = 0; r < R; r++) {
            F& sum = to[r][at + j];
            sum = fused(m, splat(in.sums[r * in.of_row + group]), fused(acc[r][j], d, sum));
          }
        }
      }
    }
}

constexpr int PAIR = 2;       // registers of outputs whose levels become floats together
constexpr int MOST_TILE = 6;  // rows beside them
constexpr long UNPACKED = 512;  // registers of floats, half of the L1 cache

struct UnpackedLevels {  // of some inputs of a chunk, for some of its outputs
  alignas(64) F values[UNPACKED / PAIR][PAIR];  // [pairs][inputs][PAIR]
  long inputs, columns;                         // of all, and registers of outputs
  long from, at;                                // the first of both
};

// `to` has said which.
template <class Levels> void unpack(const LevelChunk& chunk, UnpackedLevels& to) {
  typedef FloatLevels<Levels> Floats;
  F (*out)[PAIR] = to.values;
  for (long at = to.at; at < to.at + to.columns; at += PAIR)
    for (long s = to.from / SECTION; s < (to.from + to.inputs) / SECTION; s++, out += SECTION) {
      const Section<Levels> section = {chunk.sections[s]};
#pragma GCC unroll 4
      for (int step = 0; step < 4; step++)
#pragma GCC unroll 8
        for (int i = 0; i < STEP; i++)
          for (int j = 0; j < PAIR; j++)
            out[step * STEP + i][j] = Floats::of(Floats::word(section, step, nibble_of(i), (at + j) * LANES),
                                                 nibble_of(i), Floats::mask(&Floats::MASKS, nibble_of(i)));
    }
}

// sums += R rows times what is unpacked
template <int R>
__attribute__((noinline)) void unpacked_tile(const LevelChunk& chunk, const UnpackedLevels& levels, FloatRows in,
                                             F (*sums)[COLUMNS]) {
  const F (*weights)[PAIR] = levels.values;
  const long first = levels.from / chunk.inputs, end = (levels.from + levels.inputs) / chunk.inputs;
  for (long at = levels.at; at < levels.at + levels.columns; at += PAIR) {
    const float* x = in.x + levels.from;
    for (long group = first; group < end; group++, x += chunk.inputs) {
      F acc[R][PAIR] = {};
      for (long k = 0; k < chunk.inputs; k += 2, weights += 2)
#pragma GCC unroll 4
        for (int i = 0; i < 2; i++)
          for (int r = 0; r < R; r++)
            for (int j = 0; j < PAIR; j++)
              acc[r][j] = fused(weights[i][j], splat(x[r * in.stride + k + i]), acc[r][j]);
      F (*to)[COLUMNS] = hidden(sums);
      for (int j = 0; j < PAIR; j++) {
        F d = load<F>(chunk.d[group] + (at + j) * LANES), m = load<F>(chunk.m[group] + (at + j) * LANES);
        for (int r = 0; r < R; r++) {
          F& sum = to[r][at + j];
          sum = fused(m, splat(in.sums[r * in.of_row + group]), fused(acc[r][j], d, sum));
        }
      }
    }
  }
}

template <int R = MOST_TILE>
void unpacked_tile_of(long rows, const LevelChunk& chunk, const UnpackedLevels& levels, const FloatRows& in,
                      F (*sums)[COLUMNS]) {
  if (rows == R) unpacked_tile<R>(chunk, levels, in, sums);
  else if constexpr (R > 1) unpacked_tile_of<R - 1>(rows, chunk, levels, in, sums);
}

// ---- panels
// What products have to know of a kind.
struct LevelReading {
  void (*read)(const uint8_t* panel, long first, long count, LevelChunk& to);
  long (*panel_bytes)(long inputs);
  long group;
  BytesTile *bytes, *bytes_of_row;  // for rows of bytes
  FloatsTile* floats[DIRECT_ROWS];  // for rows of bfloat16, by their number less 1
  void (*unpack)(const LevelChunk& chunk, UnpackedLevels& to);
};

template <class Kind> constexpr LevelReading bytes_reading() {
  typedef Alike<Kind> Levels;
  constexpr bool WIDE = Kind::GROUP > SECTION;
  return {read_chunk<Kind, SHIFT<Kind>>, level_panel_bytes<Kind>, Kind::GROUP,
          bytes_tile<Levels, PARTS<Kind>, WIDE>, bytes_of_row<Levels, PARTS<Kind>, WIDE>, {}, nullptr};
}

template <class Kind> constexpr LevelReading floats_reading() {
  typedef Alike<Kind> Levels;
  constexpr int P = PARTS<Kind>;
  return {read_chunk<Kind, Kind::OFFSET>, level_panel_bytes<Kind>, Kind::GROUP, nullptr, nullptr,
          {floats_tile<Levels, P, 1>, floats_tile<Levels, P, 2>, floats_tile<Levels, P, 3>, floats_tile<Levels, P, 4>},
          unpack<Levels>};
}

// Rows of bytes that are multiplied with chunks.
struct BytesOfRows {
  static constexpr long BLOCK = BYTES_BLOCK;
  const ByteRows all;
  long group;  // inputs of a group of bytes

  void multiply(const LevelReading& kind, LevelChunk& chunk, long row, long rows, long first,
                F (*sums)[COLUMNS]) const {
    const int32_t* x = all.x + row * all.stride + first * SECTION / 4;
    const ByteGroup* groups = all.groups + row * all.of_row + first * SECTION / group;
    (rows > 1 ? kind.bytes : kind.bytes_of_row)(chunk, {x, all.stride, groups, all.of_row}, rows, sums);
  }
};

// Rows of bfloat16, as floats.
struct FloatsOfRows {
  static constexpr long BLOCK = 128;
  const FloatRows all;

  void multiply(const LevelReading& kind, LevelChunk& chunk, long row, long rows, long first,
                F (*sums)[COLUMNS]) const {
    FloatRows in = all.from(row);
    in.x += first * SECTION, in.sums += first * SECTION / kind.group;
    if (rows <= 2 * DIRECT_ROWS) read_as_they_lie(kind, chunk, rows, in, sums);
    else read_unpacked(kind, chunk, rows, in, sums);
  }

 private:
  static void read_as_they_lie(const LevelReading& kind, LevelChunk& chunk, long rows, FloatRows in,
                               F (*sums)[COLUMNS]) {
    for (long tiles = (rows + DIRECT_ROWS - 1) / DIRECT_ROWS, some; tiles; tiles--) {
      some = (rows + tiles - 1) / tiles;
      kind.floats[some - 1](chunk, in, sums);
      rows -= some, in = in.from(some), sums += some, chunk.next = nullptr;
    }
  }

  static void read_unpacked(const LevelReading& kind, const LevelChunk& chunk, long rows, const FloatRows& in,
                            F (*sums)[COLUMNS]) {
    UnpackedLevels levels;
    const long whole = chunk.inputs < 64 ? 64 : chunk.inputs, all = chunk.count * SECTION;  // groups are whole
    for (levels.from = 0; levels.from < all; levels.from += whole) {
      levels.inputs = all - levels.from < whole ? all - levels.from : whole;
      levels.columns = UNPACKED / whole;
      for (levels.at = 0; levels.at < COLUMNS; levels.at += levels.columns) {
        kind.unpack(chunk, levels);
        long left = rows, from = 0;
        for (long tiles = (rows + MOST_TILE - 1) / MOST_TILE, some; tiles; tiles--) {
          some = (left + tiles - 1) / tiles;
          unpacked_tile_of(some, chunk, levels, in.from(from), sums + from);
          left -= some, from += some;
        }
      }
    }
  }
};

template <class Rows> void multiply_panels(const PartProduct& product, const LevelReading& kind, const Rows& x) {
  const long all = product.call.rows, sections = product.call.weights->inputs / SECTION;
  const long outputs = product.part.outputs, bytes = kind.panel_bytes(product.call.weights->inputs);
  const uint8_t* packed = (const uint8_t*)product.part.packed;
  alignas(64) F sums[Rows::BLOCK][COLUMNS];
  LevelChunk chunk;
  for (long p = product.next_panel(), then; p >= 0; p = then) {
    then = product.next_panel();
    const uint8_t* panel = packed + p * bytes;
    for (long row = 0; row < all; row += Rows::BLOCK) {
      long rows = all - row < Rows::BLOCK ? all - row : Rows::BLOCK;
      memset(sums, 0, rows * sizeof sums[0]);
      for (long first = 0; first < sections; first += CHUNK_SECTIONS) {
        long count = sections - first < CHUNK_SECTIONS ? sections - first : CHUNK_SECTIONS;
        kind.read(panel, first, count, chunk);
        const long read = bytes / sections * (first + count);  // about: of whole blocks
        const bool ends = first + count == sections;
        chunk.next = row ? nullptr : !ends ? panel + read : then < 0 ? nullptr : packed + then * bytes;
        chunk.next_bytes = bytes / sections * CHUNK_SECTIONS;
        x.multiply(kind, chunk, row, rows, first, sums);
      }
      long column = p * WIDTH, some = outputs - column < WIDTH ? outputs - column : WIDTH;
      for (long r = 0; r < rows; r++) write(product, row + r, column, some, sums[r]);
    }
  }
}

template <class Kind> void multiply_bytes(const PartProduct& product) {
  static constexpr LevelReading KIND = bytes_reading<Kind>();
  const long inputs = product.call.weights->inputs, group = IN_GROUP_OF<Kind>;
  const uint8_t* bytes = (const uint8_t*)product.inputs;
  const ByteGroup* groups = (const ByteGroup*)(bytes + product.call.rows * inputs);
  multiply_panels<BytesOfRows>(product, KIND, {{(const int32_t*)bytes, inputs / 4, groups, inputs / group}, group});
}

template <class Kind> void multiply_floats(const PartProduct& product) {
  static constexpr LevelReading KIND = floats_reading<Kind>();
  const PreparedFloats in(product.call, product.inputs);
  multiply_panels<FloatsOfRows>(product, KIND, {{in.x, in.inputs, in.sums_of(KIND.group), in.inputs / KIND.group}});
}
