// Products of rows with weights of few bits (level_kinds.h), with AVX2. Other instruction sets have level_product.h.
//
//   y[o] = sum over groups g of inputs, in order, of d(o, g) * (sum of levels * inputs) + m(o, g) * (sum of inputs)
//
// Levels are taken as they are stored, from 0 up: what stands for 0 among them is part of m. A panel is multiplied in
// chunks of 256 inputs. First a chunk's scales become floats, so that all kinds whose levels are read alike share their
// loops. Within a group the sum is exact for bytes, and in float32, input by input, for bfloat16.
//
// Rows are multiplied in tiles of up to six, whose sums stay in registers. The first tile reads the levels as they lie.
// If there are more, it also stores them, as bytes or floats, and the others read these from the L1 cache. The sums are
// the same, bit for bit.
#pragma once
#include <type_traits>

#include "level_inputs.h"
#include "tile.h"

constexpr long COLUMNS = WIDTH / LANES;  // registers of a panel's outputs
constexpr int PAIR = 2;                  // of these, that meet an input together in most tiles
constexpr int MOST_TILE = 6;             // rows of a tile
constexpr long CHUNK_SECTIONS = 8, CHUNK_INPUTS = CHUNK_SECTIONS * SECTION;
constexpr long MOST_GROUPS = CHUNK_INPUTS / 16;

struct LevelChunk {                          // of a panel
  const uint8_t* sections[CHUNK_SECTIONS];  // where the levels of 32 inputs each begin
  long count;                                // of sections
  long groups, inputs;                       // of weights, and inputs of each
  const uint8_t* next;  // what is read after it, or null
  long next_bytes;
  alignas(64) float d[MOST_GROUPS][WIDTH], m[MOST_GROUPS][WIDTH];
  alignas(32) float codebook[3][16];  // of kinds that have one; times 1, 2^8 and 2^16, see place_of_level
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

// Registers are for sums: what is read anew every time is pointed to by what the compiler knows nothing of.
template <class T> __attribute__((always_inline)) inline T* hidden(T* p) {
  asm volatile("" : "+r"(p));
  return p;
}

// What is computed stands in a register here: else GCC adds products as a tree, whose leaves do not fit the registers.
__attribute__((always_inline)) inline void pin(__m256i& x) { asm volatile("" : "+x"(x)); }

// ---- kinds whose levels are read alike
template <long BITS_> struct PlainLevels {
  static constexpr long BITS = BITS_, GROUP = SECTION;
  static constexpr int OFFSET = BITS == 8 ? 128 : 0;  // bytes of 8 bits are multiplied with their signs
  static constexpr bool TABLE = false, E4M3 = false, FLOATS = false, CODES = false;
  static constexpr int8_t VALUES[16] = {};
};

struct E4m3Levels : PlainLevels<8> {
  static constexpr int OFFSET = 0;
  static constexpr bool E4M3 = true;
};

template <long BITS_> struct CodeLevels : PlainLevels<BITS_> {
  static constexpr bool FLOATS = true, CODES = true;
};

template <class Kind>
using Alike = std::conditional_t<Kind::SPARSE, Kind,
              std::conditional_t<Kind::CODES, CodeLevels<Kind::BITS>,
              std::conditional_t<Kind::E4M3, E4m3Levels,
              std::conditional_t<!Kind::TABLE, PlainLevels<Kind::BITS>,
              std::conditional_t<Kind::OFFSET == 128, IQ4_NL, MXFP4>>>>>;

template <class Kind> constexpr int PARTS = Kind::GROUP < SECTION ? 2 : 1;  // groups of a section

template <class Levels> inline Section<Levels> chunk_section(const LevelChunk& chunk, long index) {
  if constexpr (Levels::CODES) return {chunk.sections[index], chunk.codebook[0]};
  else return {chunk.sections[index]};
}

// Where a panel's sections from `first` on lie, and their scales; `ZERO` is the level that stands for 0, unless the
// kind has minima.
template <class Kind, int ZERO> void read_chunk(const uint8_t* panel, long first, long count, LevelChunk& to) {
  constexpr long GROUPS = Kind::INPUTS / Kind::GROUP;  // of a block
  for (long i = 0; i < count; i++) to.sections[i] = panel + section_at<Kind>(first + i);
  to.count = count, to.inputs = Kind::GROUP, to.groups = count * SECTION / Kind::GROUP;
  const uint8_t* head = panel + PANEL_START<Kind> + first / SECTIONS<Kind> * PANEL_BLOCK<Kind>;
  for (int i = 0; Kind::CODES && i < 48; i++)
    to.codebook[i / 16][i % 16] = codebook_value(panel, i % 16) * (float)(1 << i / 16 * 8);
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

// The products of COUNT words of levels with as many of a row.
template <class Levels, int COUNT>
__attribute__((always_inline)) inline I byte_sums(const I* levels, const I* x) {
  constexpr bool SIGNS = SHIFT<Levels> != Levels::OFFSET;
  constexpr int EACH = PRODUCTS<Levels> < COUNT ? PRODUCTS<Levels> : COUNT;
  I all = {};
#pragma GCC unroll 8
  for (int from = 0; from < COUNT; from += EACH) {
    __m256i some = {};
#pragma GCC unroll 8
    for (int i = from; i < from + EACH; i++) {
      __m256i in = (__m256i)x[i], w = (__m256i)levels[i];
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

  ByteRows from(long row) const { return {x + row * stride, stride, groups + row * of_row, of_row}; }
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
constexpr long BYTES_BLOCK = 64;  // rows that share levels once they are bytes

struct UnpackedBytes {  // of a chunk, for 16 outputs; a word is four inputs of each
  alignas(64) I words[CHUNK_SECTIONS][SECTION / 4][PAIR];
};

// all = (`ADDS`: all +) R rows times COUNT words of 16 outputs, from word FROM of a section on. `FIRST`: they are read
// where they lie, and stored to `words` for other tiles.
template <class Levels, bool FIRST, int FROM, int COUNT, bool ADDS, int R>
__attribute__((always_inline)) inline void add_words(const Section<Levels>& section, long output, I (*words)[PAIR],
                                                     const int32_t* (&x)[R], I (&all)[R][PAIR]) {
  constexpr bool SIGNS = SHIFT<Levels> != Levels::OFFSET;
  constexpr int EACH = PRODUCTS<Levels> < COUNT ? PRODUCTS<Levels> : COUNT;
  words = hidden(words);
  for (int r = 0; r < R; r++) x[r] = hidden(x[r]);
#pragma GCC unroll 8
  for (int from = 0; from < COUNT; from += EACH) {
    __m256i some[R][PAIR];
#pragma GCC unroll 8
    for (int i = from; i < from + EACH; i++) {
      __m256i w[PAIR], sizes[PAIR];
      for (int j = 0; j < PAIR; j++) {
        if (FIRST) words[FROM + i][j] = section.bytes((FROM + i) / 2, (FROM + i) % 2, output + j * LANES);
        w[j] = (__m256i)words[FROM + i][j];
        sizes[j] = SIGNS ? _mm256_abs_epi8(w[j]) : w[j];
      }
      for (int r = 0; r < R; r++) {
        const __m256i in = (__m256i)splat(x[r][i]);
        for (int j = 0; j < PAIR; j++) {
          __m256i products = _mm256_maddubs_epi16(sizes[j], SIGNS ? _mm256_sign_epi8(in, w[j]) : in);
          some[r][j] = i > from ? _mm256_add_epi16(some[r][j], products) : products;
          pin(some[r][j]);
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int j = 0; j < PAIR; j++) {
        I sums = (I)_mm256_madd_epi16(some[r][j], _mm256_set1_epi16(1));
        all[r][j] = ADDS || from ? all[r][j] + sums : sums;
      }
  }
  for (int r = 0; r < R; r++) x[r] += COUNT;
}

// sums += R rows times a chunk, for 16 outputs from register `at` on. `WIDE`: groups have several sections. Not
// inlined: GCC then keeps the sums of sixteen bits in registers.
template <class Levels, int PARTS, bool WIDE, bool FIRST, int R>
__attribute__((noinline)) void bytes_tile(const LevelChunk& chunk, UnpackedBytes& levels, long at, ByteRows in,
                                          Fetched& fetched, F (*sums)[COLUMNS]) {
  constexpr int COUNT = SECTION / 4 / PARTS;
  const long sections = WIDE ? chunk.inputs / SECTION : 1, output = at * LANES;
  const ByteGroup* of = in.groups;
  Fetched next = fetched;
  const int32_t* x[R];
  for (int r = 0; r < R; r++) x[r] = in.x + r * in.stride;
  for (long first = 0, group = 0; first < chunk.count; first += sections, of++) {
    auto finish = [&](I (&all)[R][PAIR], int part) {
      F (*to)[COLUMNS] = hidden(sums);
      for (int j = 0; j < PAIR; j++) {
        const F d = load<F>(chunk.d[group] + output + j * LANES), m = load<F>(chunk.m[group] + output + j * LANES);
        for (int r = 0; r < R; r++) finish_bytes<PARTS>(to[r][at + j], all[r][j], d, m, of[r * in.of_row], part);
      }
      group++;
    };
    I all[R][PAIR];
    next.share();
    add_words<Levels, FIRST, 0, COUNT, false>({chunk.sections[first]}, output, levels.words[first], x, all);
    for (long s = first + 1; WIDE && s < first + sections; s++) {
      next.share();
      add_words<Levels, FIRST, 0, COUNT, true>({chunk.sections[s]}, output, levels.words[s], x, all);
    }
    finish(all, 0);
    if constexpr (PARTS > 1) {
      add_words<Levels, FIRST, COUNT, COUNT, false>({chunk.sections[first]}, output, levels.words[first], x, all);
      finish(all, 1);
    }
  }
  fetched = next;
}

template <class Levels, int PARTS, bool WIDE, bool FIRST, int R = MOST_TILE>
void bytes_tile_of(long rows, const LevelChunk& chunk, UnpackedBytes& levels, long at, const ByteRows& in,
                   Fetched& next, F (*sums)[COLUMNS]) {
  if (rows == R) bytes_tile<Levels, PARTS, WIDE, FIRST, R>(chunk, levels, at, in, next, sums);
  else if constexpr (R > 1 + FIRST)
    bytes_tile_of<Levels, PARTS, WIDE, FIRST, R - 1>(rows, chunk, levels, at, in, next, sums);
}

// sums += rows, at least two, times a chunk.
template <class Levels, int PARTS, bool WIDE>
void bytes_of_rows(const LevelChunk& chunk, ByteRows in, long rows, F (*sums)[COLUMNS]) {
  UnpackedBytes levels;
  const long tiles = (rows + MOST_TILE - 1) / MOST_TILE, first = (rows + tiles - 1) / tiles;
  Fetched next(chunk, COLUMNS / PAIR * chunk.count * tiles);
  for (long at = 0; at < COLUMNS; at += PAIR) {
    bytes_tile_of<Levels, PARTS, WIDE, true>(first, chunk, levels, at, in, next, sums);
    for (long from = first, left = tiles - 1, some; left; left--, from += some) {
      some = (rows - from + left - 1) / left;
      bytes_tile_of<Levels, PARTS, WIDE, false>(some, chunk, levels, at, in.from(from), next, sums + from);
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

template <class Levels> struct FloatLevels {
  static constexpr bool NIBBLES = Levels::BITS == 4 && !Levels::TABLE && !Levels::FLOATS;
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

struct UnpackedLevels;
typedef void FloatsTile(const LevelChunk& chunk, UnpackedLevels& some, FloatRows in, Fetched& fetched,
                        F (*sums)[COLUMNS]);

// acc += R rows times the levels of a step; `KEEPS`: these are also stored to `kept`.
template <class Levels, bool KEEPS, int R, int W>
__attribute__((always_inline)) inline void floats_step(F (&acc)[R][W], Section<Levels>& section, long step, long at,
                                                       const float* const (&x)[R], F (*kept)[PAIR]) {
  typedef FloatLevels<Levels> Floats;
#pragma GCC unroll 8
  for (int i = 0; i < STEP; i++) {
    const int nibble = nibble_of(i);
    if (Floats::NIBBLES || !i) section.data = hidden(section.data);
    const auto* masks = hidden(&Floats::MASKS);
    auto weights = [&](int j) {
      if constexpr (Levels::CODES)
        return section.value(step, i, place_of_level(false, nibble) / 8, at + j * LANES);
      else
        return Floats::of(Floats::word(section, step, nibble, at + j * LANES), nibble, Floats::mask(masks, nibble));
    };
    if constexpr (R == 1) {
      const F in = splat(x[0][i]);
      for (int j = 0; j < W; j++) acc[0][j] = fused(weights(j), in, acc[0][j]);
    } else {
      F w[W];
      for (int j = 0; j < W; j++) w[j] = weights(j);
      for (int j = 0; KEEPS && j < W; j++) kept[i][j] = w[j];
      for (int r = 0; r < R; r++) {
        const F in = splat(x[r][i]);
        for (int j = 0; j < W; j++) acc[r][j] = fused(w[j], in, acc[r][j]);
      }
    }
  }
}

constexpr long UNPACKED = 512;  // registers of floats, half of the L1 cache

struct UnpackedLevels {  // of some inputs of a chunk, for some of its outputs
  alignas(64) F values[UNPACKED / PAIR][PAIR];  // [pairs][inputs][PAIR]
  long inputs, columns;                         // of all, and registers of outputs
  long from, at;                                // the first of both
  bool many;                                    // rows: more than the L2 cache holds of their inputs
};

// sums += R rows times levels as they lie, for W registers of outputs from `at` on: of the whole chunk. `KEEPS`: of the
// inputs that `some` tells of; as floats they are stored to `kept` for other tiles.
template <class Levels, int PARTS, bool KEEPS, int R, int W>
__attribute__((always_inline)) inline void floats_columns(const LevelChunk& chunk, const UnpackedLevels& some, long at,
                                                          const FloatRows& in, Fetched& next, F (*&kept)[PAIR],
                                                          F (*sums)[COLUMNS]) {
  const long sections = PARTS > 1 ? 1 : chunk.inputs / SECTION;  // of a group, or one of several groups
  const long from = KEEPS ? some.from / SECTION : 0, end = KEEPS ? from + some.inputs / SECTION : chunk.count;
  long whole = KEEPS ? some.from / chunk.inputs : 0;  // groups before `first`, where they are not parts of sections
  for (long first = from; first < end; first += sections, whole++) {
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) {
      const long group = PARTS > 1 ? first * PARTS + part : whole;
      F acc[R][W] = {};
      for (long s = first; s < first + sections; s++) {
        Section<Levels> section = chunk_section<Levels>(chunk, s);
        const float* x[R];
        for (int r = 0; r < R; r++) x[r] = in.x + r * in.stride + s * SECTION + part * SECTION / PARTS;
#pragma GCC unroll 1
        for (int step = part * 4 / PARTS; step < (part + 1) * 4 / PARTS; step++) {
          next.share();
          for (int r = 0; r < R; r++) x[r] = hidden(x[r]);
          floats_step<Levels, KEEPS>(acc, section, step, at * LANES, x, kept);
          for (int r = 0; r < R; r++) x[r] += STEP;
          kept += KEEPS ? STEP : 0;
        }
      }
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

// Not inlined: GCC then keeps all sums of a group in registers.
template <class Levels, int PARTS, bool KEEPS, int R>
__attribute__((noinline)) void floats_tile(const LevelChunk& chunk, UnpackedLevels& some, FloatRows in,
                                           Fetched& fetched, F (*sums)[COLUMNS]) {
  // Registers of outputs beside each of the rows: fewer than 8 sums would wait for one another, more than 12 spill.
  constexpr bool NIBBLES = FloatLevels<Levels>::NIBBLES;
  constexpr int W = KEEPS ? PAIR : NIBBLES ? (R == 1 ? 8 : R == 2 ? 4 : R < 5 ? 3 : 2) : R == 1 ? 4 : 2;
  F (*kept)[PAIR] = some.values;
  Fetched next = fetched;
  long at = KEEPS ? some.at : 0;
  for (const long all = KEEPS ? at + some.columns : COLUMNS; at + W <= all; at += W)
    floats_columns<Levels, PARTS, KEEPS, R, W>(chunk, some, at, in, next, kept, sums);
  if constexpr (COLUMNS % W)
    floats_columns<Levels, PARTS, KEEPS, R, COLUMNS % W>(chunk, some, at, in, next, kept, sums);
  fetched = next;
}

// sums += R rows times what is unpacked. Of many rows, those after them are fetched, whose inputs lie too far apart for
// the hardware to foresee: every pass over outputs takes its share of their lines.
template <int R>
__attribute__((noinline)) void unpacked_tile(const LevelChunk& chunk, const UnpackedLevels& levels, FloatRows in,
                                             F (*sums)[COLUMNS]) {
  const F (*weights)[PAIR] = levels.values;
  const long share = levels.inputs * PAIR / levels.columns;
  const float* ahead = in.x + R * in.stride + levels.from;
  const long first = levels.from / chunk.inputs, end = (levels.from + levels.inputs) / chunk.inputs;
  for (long at = levels.at; at < levels.at + levels.columns; at += PAIR) {
    const float* x = in.x + levels.from;
    for (int r = 0; levels.many && r < R; r++)
      for (long i = 0; i < share; i += 16) __builtin_prefetch(ahead + r * in.stride + i);
    ahead += share;
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
  // For rows of bfloat16: tiles that read levels as they lie, by their number of rows less 1; those that also store
  // them; how many rows these have at most; up to how many rows no tile stores levels.
  FloatsTile *floats[MOST_TILE], *keeping[MOST_TILE];
  int most, direct;
};

template <class Kind> constexpr LevelReading bytes_reading() {
  typedef Alike<Kind> Levels;
  constexpr bool WIDE = Kind::GROUP > SECTION;
  return {read_chunk<Kind, SHIFT<Kind>>, level_panel_bytes<Kind>, Kind::GROUP,
          bytes_of_rows<Levels, PARTS<Kind>, WIDE>, bytes_of_row<Levels, PARTS<Kind>, WIDE>, {}, {}, 0, 0};
}

// Nibbles are read with hardly any registers; other levels leave room for the sums of four rows.
template <class Kind> constexpr LevelReading floats_reading() {
  typedef Alike<Kind> L;
  constexpr int P = PARTS<Kind>;
  LevelReading found = {};
  found.read = read_chunk<Kind, Kind::OFFSET>, found.panel_bytes = level_panel_bytes<Kind>, found.group = Kind::GROUP;
  found.floats[0] = floats_tile<L, P, false, 1>, found.floats[1] = floats_tile<L, P, false, 2>;
  found.floats[2] = floats_tile<L, P, false, 3>, found.floats[3] = floats_tile<L, P, false, 4>;
  found.keeping[3] = floats_tile<L, P, true, 4>;
  found.most = 4, found.direct = 8;
  if constexpr (FloatLevels<L>::NIBBLES) {
    found.floats[4] = floats_tile<L, P, false, 5>, found.floats[5] = floats_tile<L, P, false, 6>;
    found.keeping[4] = floats_tile<L, P, true, 5>, found.keeping[5] = floats_tile<L, P, true, 6>;
    found.most = found.direct = 6;
  }
  return found;
}

// Rows of bytes that are multiplied with chunks.
struct BytesOfRows {
  static constexpr long BLOCK = BYTES_BLOCK;
  const ByteRows all;
  long group;  // inputs of a group of bytes

  void multiply(const LevelReading& kind, const LevelChunk& chunk, long row, long rows, long first,
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

  void multiply(const LevelReading& kind, const LevelChunk& chunk, long row, long rows, long first,
                F (*sums)[COLUMNS]) const {
    FloatRows in = all.from(row);
    in.x += first * SECTION, in.sums += first * SECTION / kind.group;
    UnpackedLevels levels;
    Fetched next(chunk, (rows < 3 ? rows : 3) * chunk.count * 4);  // at least so many steps are taken
    if (rows <= kind.direct) {
      for (long tiles = (rows + kind.most - 1) / kind.most, some; tiles; tiles--) {
        some = (rows + tiles - 1) / tiles;
        kind.floats[some - 1](chunk, levels, in, next, sums);
        rows -= some, in = in.from(some), sums += some;
      }
    } else {
      read_once(kind, chunk, rows, in, next, levels, sums);
    }
  }

 private:
  // The first tile has four rows at least: there are more than `direct`.
  static void read_once(const LevelReading& kind, const LevelChunk& chunk, long rows, const FloatRows& in,
                        Fetched& next, UnpackedLevels& levels, F (*sums)[COLUMNS]) {
    const long whole = chunk.inputs < 64 ? 64 : chunk.inputs, all = chunk.count * SECTION;  // groups are whole
    const long tiles = (rows + MOST_TILE - 1) / MOST_TILE, even = (rows + tiles - 1) / tiles;
    const long first = even < kind.most ? even : kind.most;
    levels.columns = UNPACKED / whole, levels.many = rows == BLOCK;
    for (levels.from = 0; levels.from < all; levels.from += whole) {
      levels.inputs = all - levels.from < whole ? all - levels.from : whole;
      for (levels.at = 0; levels.at < COLUMNS; levels.at += levels.columns) {
        kind.keeping[first - 1](chunk, levels, in, next, sums);
        long left = rows - first, from = first;
        for (long more = (left + MOST_TILE - 1) / MOST_TILE, some; more; more--, left -= some, from += some) {
          some = (left + more - 1) / more;
          unpacked_tile_of(some, chunk, levels, in.from(from), sums + from);
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
