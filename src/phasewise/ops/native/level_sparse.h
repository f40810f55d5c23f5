// Kinds of N:M sparse weights: of every M consecutive inputs of an output N are kept, in bfloat16, and the others are 0.
// They are multiplied with rows in bfloat16, as if the matrix were dense: what is saved is memory.
//
// A file's block is of 64 inputs: a code for each group of M, the first in the lowest bits, then the kept values in the
// order of inputs. The code of 2:4 is a mask of four bits, bit i of which says that input i is kept. The code of 1:M is
// the place of the one that is kept, in 2 bits (1:4) or 4 (1:8).
//
// A panel holds section after section of 32 inputs: codes [WIDTH], in 32 bits (2:4) or 16, then words of two kept values
// [word][WIDTH], the earlier in the lower half. A section takes as many bytes as its part of the file's block.
#pragma once
#include "level_inputs.h"

struct NoScales {  // d = 1
  static constexpr long BYTES = 0;
  static constexpr bool MINIMA = false;
  static void put(const uint8_t*, uint8_t*, long) {}
  static void get(const uint8_t*, long, long, F& d, F&) { d = splat(1.0f); }
};

template <long N_, long M_> struct Sparse {
  typedef NoScales Scales;
  static constexpr long N = N_, M = M_, GROUP = 64, INPUTS = 64;
  static constexpr long CODE = N == 1 && M == 4 ? 2 : 4;            // bits
  static constexpr long GROUPS = SECTION / M;                        // of a section
  static constexpr long WORDS = GROUPS * N / 2;                      // of values, in a section
  static constexpr long CODE_BYTES = GROUPS * CODE > 16 ? 4 : 2;     // of an output's codes in a section
  static constexpr long BYTES = INPUTS / SECTION * (GROUPS * CODE / 8 + WORDS * 4);
  static constexpr long BITS = 16;  // of a value
  static constexpr int OFFSET = 0;
  static constexpr bool TABLE = false, E4M3 = false, FLOATS = true, CODES = false, SPARSE = true;
  static_assert((N == 2 && M == 4) || (N == 1 && (M == 4 || M == 8)), "these have codes");

  // Whether an input of a group is kept, and as which of its values, given the group's code.
  static constexpr bool keeps(int code, int input) { return N == 2 ? code >> input & 1 : (code & (M - 1)) == input; }
  static constexpr int rank(int code, int input) { return N == 2 && (code & ((1 << input) - 1)) ? 1 : 0; }
};

template <long N, long M>
constexpr long SECTION_BYTES<Sparse<N, M>> = (Sparse<N, M>::CODE_BYTES + Sparse<N, M>::WORDS * 4) * WIDTH;

// A block of the file moves into a panel's block, for one output.
template <class Kind> inline void put_sparse(const uint8_t* block, uint8_t* to, long output) {
  constexpr long PARTS = Kind::INPUTS / SECTION, CODES = Kind::GROUPS * Kind::CODE / 8;
  for (long part = 0; part < PARTS; part++, to += SECTION_BYTES<Kind>) {
    memcpy(to + output * Kind::CODE_BYTES, block + part * CODES, Kind::CODE_BYTES);
    const uint8_t* values = block + PARTS * CODES + part * Kind::WORDS * 4;
    for (long i = 0; i < Kind::WORDS; i++)
      memcpy(to + WIDTH * Kind::CODE_BYTES + (i * WIDTH + output) * 4, values + i * 4, 4);
  }
}

// The weight of an input of a section.
template <class Kind> inline float sparse_at(const uint8_t* section, long output, long input) {
  uint32_t codes = 0;
  memcpy(&codes, section + output * Kind::CODE_BYTES, Kind::CODE_BYTES);
  const long group = input / Kind::M, place = input % Kind::M;
  const int code = (int)(codes >> group * Kind::CODE & ((1 << Kind::CODE) - 1));
  if (!Kind::keeps(code, (int)place)) return 0;
  const long value = group * Kind::N + Kind::rank(code, (int)place);
  return widen(load<bf16>(section + WIDTH * Kind::CODE_BYTES + (value / 2 * WIDTH + output) * 4 + value % 2 * 2));
}

// For each code, which bytes of a word of values are the pair of inputs that begins at `first` of a group; 128: none.
struct PairsOfCodes {
  alignas(64) uint32_t of[16];
};

template <class Kind> constexpr PairsOfCodes pairs_of_codes(int first) {
  PairsOfCodes found = {};
  for (int code = 0; code < 16; code++)
    for (int i = 0; i < 2; i++) {
      const uint32_t low = (uint32_t)Kind::rank(code, first + i) * 2;
      const uint32_t both = Kind::keeps(code, first + i) ? low | (low + 1) << 8 : 0x8080u;
      found.of[code] |= both << i * 16;
    }
  return found;
}

template <long N, long M> struct Section<Sparse<N, M>, false> {
  typedef Sparse<N, M> Kind;
  const uint8_t* data;

  __attribute__((always_inline)) I codes(long at) const {
    if constexpr (Kind::CODE_BYTES == 4) return load<I>(data + at * 4);
    return load_halves((const uint16_t*)data + at);
  }

  __attribute__((always_inline)) I values(long word, long at) const {
    return load<I>(data + WIDTH * Kind::CODE_BYTES + (word * WIDTH + at) * 4);
  }

  // Values of inputs 2 pair and 2 pair + 1 of a step, in bfloat16.
  __attribute__((always_inline)) I pair(long step, int pair, long at) const {
    constexpr int EACH = M / 2;  // pairs of a group
    const int group = (int)step * (4 / EACH) + pair / EACH, place = pair % EACH, value = group * (int)N;
    const I code = shift_right(codes(at), group * (int)Kind::CODE), word = values(value / 2, at);
#if LANES == 4
    return (kept(word, code, place * 2, value % 2) & 0xffff) | kept(word, code, place * 2 + 1, value % 2) << 16;
#else
    const I bytes = chosen(code, place) | (load<I>(PLACES.of) + value % 2 * 0x02020202);
#if LANES == 16
    return (I)_mm512_shuffle_epi8((__m512i)word, (__m512i)bytes);
#else
    return (I)_mm256_shuffle_epi8((__m256i)word, (__m256i)bytes);
#endif
#endif
  }

 private:
#if LANES == 4
  // The value of an input of a group in the lower half; what is above it does not count. `second`: the group's value is
  // the second of the word.
  static I kept(I word, I code, int input, int second) {
    if constexpr (N == 1) return shift_right(word, second * 16) & ((code & (int)(M - 1)) == input);
    const I first = (code & ((1 << input) - 1)) == 0;
    return ((word & first) | (shift_right(word, 16) & ~first)) & ((code & (1 << input)) != 0);
  }
#else
  // What pairs_of_codes has for the lowest bits of each code: those above them do not count.
  static I chosen(I code, int place) {
    static constexpr PairsOfCodes PAIRS[4] = {pairs_of_codes<Kind>(0), pairs_of_codes<Kind>(2),
                                              pairs_of_codes<Kind>(4), pairs_of_codes<Kind>(6)};
#if LANES == 16
    return (I)_mm512_permutexvar_epi32((__m512i)code, load<__m512i>(PAIRS[place].of));
#else
    const __m256i low = _mm256_permutevar8x32_epi32(load<__m256i>(PAIRS[place].of), (__m256i)code);
    if constexpr (N == 1) return (I)low;  // of eight codes
    const __m256i high = _mm256_permutevar8x32_epi32(load<__m256i>(PAIRS[place].of + 8), (__m256i)code);
    return (I)_mm256_blendv_ps((__m256)low, (__m256)high, (__m256)(code << 28));
#endif
  }

  // The first byte of each word among the sixteen that it is shuffled with, four times.
  struct FirstBytes {
    alignas(64) int32_t of[LANES];
  };
  static constexpr FirstBytes PLACES = [] {
    FirstBytes found = {};
    for (int i = 0; i < LANES; i++) found.of[i] = i % 4 * 0x04040404;
    return found;
  }();
#endif
};

#if LANES == 8
// AVX2 multiplies floats, level by level, with rows that have been made smaller by place_of_level: weights become larger
// by as much, so those of 2^111 and above do not fit.
template <class Levels> struct FloatLevels;

template <long N, long M> struct FloatLevels<Sparse<N, M>> {
  static constexpr bool NIBBLES = false;
  static constexpr int MASKS = 0;

  static I mask(const int*, int) { return I{}; }
  __attribute__((always_inline)) static F of(I pair, int nibble, I) {
    return (F)(nibble < 4 ? pair << 16 : pair & (int32_t)0xffff0000) * (float)(1 << place_of_level(false, nibble));
  }
  __attribute__((always_inline)) static I word(const Section<Sparse<N, M>>& section, long step, int nibble, long at) {
    return section.pair(step, nibble % 4, at);
  }
};
#endif
