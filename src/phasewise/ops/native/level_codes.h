// Levels of 4, 3 or 2 bits whose values stand in a codebook: 2^BITS numbers in bfloat16 that the 64 outputs of a panel
// share. Learned codebooks are such weights (arXiv 2309.17361). Part of level_kinds.h, which includes this file.
//
// A row that is packed begins with the codebook of its panel, 2^BITS values in bfloat16; all rows of a panel have the
// same. Blocks follow: d in float16, and GROUP levels as a stream of bits, the first in the lowest ones.
//
// A panel begins with its codebook, repeated until there are 32 values: whatever lies in an index above a level's bits
// then does not count. Levels of 4 bits lie as those of other kinds do. Those of 3 and 2 bits have two words of 32 bits
// for the two low bits of a section: input 8 s + 2 j + e is at bit `16 e + 8 (s % 2) + 2 j` of word s / 2. Where there
// is a high bit, a third word has it at bit `16 e + 4 s + j`. So every half of a word has its bits of a pair of inputs
// at the same place.
#pragma once

template <long BITS_, long GROUP_> struct Codes : KindOf<Halves, BITS_, GROUP_, GROUP_> {
  static constexpr bool CODES = true, FLOATS = true;
  static constexpr int OFFSET = 0;
  static void levels(const uint8_t* block, uint8_t* to) {
    const uint8_t* bytes = block + Halves::BYTES;
    for (long i = 0; i < GROUP_; i++) {
      const long bit = i * BITS_ % 8, at = i * BITS_ / 8;
      const int beyond = bit + BITS_ > 8 ? bytes[at + 1] << 8 : 0;
      to[i] = (uint8_t)((bytes[at] | beyond) >> bit & ((1 << BITS_) - 1));
    }
  }
};

// The codebook of a row becomes that of a panel.
template <class Kind> inline void put_codebook(const uint8_t* row, uint8_t* panel) {
  for (long i = 0; i < CODEBOOK; i++)
    store((uint16_t*)panel + i, load<uint16_t>((const uint16_t*)row + i % (1 << Kind::BITS)));
}

inline float codebook_value(const uint8_t* panel, int level) { return widen(load<bf16>((const bf16*)panel + level)); }

// The place of a level's low bits: a word of the section, and the bit of that word.
template <class Kind> constexpr long code_word(long step) { return Kind::BITS == 4 ? step : step / 2; }
template <class Kind> constexpr int code_bit(int step, int pair) {
  return Kind::BITS == 4 ? pair * 4 : (step % 2 * 4 + pair) * 2;
}
constexpr long HIGH_WORD = 2;  // of levels of 3 bits
constexpr int high_code_bit(int step, int pair) { return step * 4 + pair; }

// The levels of a section of one output move into a panel's section; `code_at` reads one of them.
template <class Kind> inline void put_codes(const uint8_t* levels, uint8_t* section, long output) {
  constexpr int LOW = Kind::BITS == 4 ? 15 : 3;
  uint32_t words[Kind::BITS] = {};
  for (int i = 0; i < SECTION; i++) {
    const int step = i / STEP, pair = i % STEP / 2, half = i % 2 * 16;
    words[code_word<Kind>(step)] |= (uint32_t)(levels[i] & LOW) << (half + code_bit<Kind>(step, pair));
    if (Kind::BITS == 3) words[HIGH_WORD] |= (uint32_t)(levels[i] >> 2) << (half + high_code_bit(step, pair));
  }
  for (long i = 0; i < Kind::BITS; i++) store((uint32_t*)section + i * WIDTH + output, words[i]);
}

template <class Kind> inline int code_at(const uint8_t* section, long output, long input) {
  constexpr int LOW = Kind::BITS == 4 ? 15 : 3;
  const uint32_t* words = (const uint32_t*)section + output;
  const int step = (int)(input / STEP), pair = (int)(input % STEP / 2), half = (int)(input % 2 * 16);
  int level = words[code_word<Kind>(step) * WIDTH] >> (half + code_bit<Kind>(step, pair)) & LOW;
  if (Kind::BITS == 3) level |= (words[HIGH_WORD * WIDTH] >> (half + high_code_bit(step, pair)) & 1) << 2;
  return level;
}

// What a section of a panel holds for the LANES outputs from `at` on. `book` are the panel's 32 values in bfloat16, or
// with AVX2 the first 16 of them as floats, then these times 2^8, and times 2^16.
template <class Kind> struct Section<Kind, true> {
  typedef std::conditional_t<LANES == 8, float, uint16_t> Value;
  const uint8_t* data;
  const Value* book;

  I words(long index, long at) const { return load<I>(data + (index * WIDTH + at) * 4); }

  // Levels of both inputs of a pair, each at the lowest bits of its half of a word; above them lies what is beside them.
  // With `half` 16 that of the odd input is brought to the lowest bits of the whole word.
  __attribute__((always_inline)) I codes(long step, int pair, int half, long at) const {
    I low = shift_right(words(code_word<Kind>(step), at), half + code_bit<Kind>((int)step, pair));
    if constexpr (Kind::BITS != 3) return low;
    const int by = half + high_code_bit((int)step, pair) - 2;
    I high = words(HIGH_WORD, at);
    high = by < 0 ? high << -by : shift_right(high, by);
    return (low & 0x00030003) | (high & ~0x00030003);
  }

#if LANES == 8
  // The value of an input of a step, from one of the three tables.
  __attribute__((always_inline)) F value(long step, int input, int table, long at) const {
    const float* values = book + table * 16;
    const __m256i level = (__m256i)codes(step, input / 2, input % 2 * 16, at);
    const __m256 low = _mm256_permutevar8x32_ps(load<__m256>(values), level);  // by the three lowest bits
    if constexpr (Kind::BITS < 4) return (F)low;
    const __m256 high = _mm256_permutevar8x32_ps(load<__m256>(values + 8), level);
    return (F)_mm256_blendv_ps(low, high, (__m256)((I)level << 28));
  }
#else
  // Values of inputs 2 pair and 2 pair + 1 of a step, in bfloat16.
  __attribute__((always_inline)) I pair(long step, int pair, long at) const {
    const I found = codes(step, pair, 0, at);
#if LANES == 16
    return (I)_mm512_permutexvar_epi16((__m512i)found, load<__m512i>(book));
#else
    const uint8x16x2_t tables = vld2q_u8((const uint8_t*)book);  // the lower and the upper bytes of 16 values
    const uint8x16_t index = (uint8x16_t)(found & 0x000f000f);
    const I low = (I)vqtbl1q_u8(tables.val[0], index), high = (I)vqtbl1q_u8(tables.val[1], index);
    return (low & 0x00ff00ff) | (high & 0x00ff00ff) << 8;
#endif
  }
#endif
};
