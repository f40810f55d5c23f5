// Kinds of weights of few bits: what a file's block holds, and how blocks lie in panels that kernels read.
//
// A weight is `d * (value of its level) + m`. A level is a whole number of `Kind::BITS` bits; its value is the level less
// `Kind::OFFSET`, or stands in a table. `Kind::GROUP` consecutive inputs of an output share `d` and `m`. A file keeps
// `Kind::INPUTS` of them in a block of `Kind::BYTES` bytes. The blocks of Q4_0 to Q6_K, IQ4_NL, MXFP4 and NVFP4 are those
// that the ggml project publishes; `gguf/blocks.py` says the same in Python.
//
// A panel has WIDTH outputs, and is as large as their blocks in the file. It holds one block of every output after the
// other: first the outputs' scales, then the levels of 32 inputs after those of another 32. Of such 32 inputs the high
// bits come first, where levels have 5 or 6. Then follow words of 32 bits [step][WIDTH], a step being 8 inputs: nibble
// j of a word is that of input 2 j, and nibble j + 4 that of input 2 j + 1. Every half of the word thus has its bits of
// pair j at the same place, and the bytes of a register's low nibbles are those of inputs 0, 4, 1, 5, of
// its high nibbles 2, 6, 3, 7. Levels of 8 bits are two such words of bytes.
#pragma once
#include <type_traits>

#include "kernels.h"
#include "simd.h"

constexpr long SECTION = 32;  // inputs whose levels lie together
constexpr long STEP = 8;      // inputs of a word of nibbles

inline uint16_t half_at(const uint8_t* p) { return load<uint16_t>(p); }

// ---- scales: `put` moves those of a block of the file to `head`, the panel's, for one output; `get` gives d and m of a
// group for LANES outputs.

inline F get_halves(const uint8_t* p, long at) {
#if LANES == 8
  return (F)_mm256_cvtph_ps(load<__m128i>((const uint16_t*)p + at));
#else
  return from_halves(load_halves((const uint16_t*)p + at));
#endif
}
inline I get_bytes(const uint8_t* p) {
#if LANES == 4
  return widen(vcreate_s8(load<uint32_t>(p))) & 255;
#else
  return load_wide((const int8_t*)p) & 255;
#endif
}

struct Halves {  // d in float16
  static constexpr long BYTES = 2;
  static constexpr bool MINIMA = false;
  static void put(const uint8_t* block, uint8_t* head, long output) { store((uint16_t*)head + output, half_at(block)); }
  static void get(const uint8_t* head, long, long at, F& d, F&) { d = get_halves(head, at); }
};

struct HalvesAndMinima {  // d and m in float16
  static constexpr long BYTES = 4;
  static constexpr bool MINIMA = true;
  static void put(const uint8_t* block, uint8_t* head, long output) {
    store((uint16_t*)head + output, half_at(block));
    store((uint16_t*)head + WIDTH + output, half_at(block + 2));
  }
  static void get(const uint8_t* head, long, long at, F& d, F& m) {
    d = get_halves(head, at);
    m = get_halves(head + 2 * WIDTH, at);
  }
};

// Two float16, and for each of eight groups a scale and a minimum of six bits that they are multiplied with; m is taken
// off. In a panel: float16 d [WIDTH], of minima [WIDTH]; bytes [8][WIDTH], the four low bits of a scale, then those of
// its minimum; bytes [4][WIDTH] with the two high bits of both, of one group in the low nibble, of the next in the other.
struct SixBits {
  static constexpr long BYTES = 16, LOW = 4 * WIDTH, HIGH = LOW + 8 * WIDTH;
  static constexpr bool MINIMA = true;
  static void put(const uint8_t* block, uint8_t* head, long output) {
    HalvesAndMinima::put(block, head, output);
    const uint8_t* six = block + 4;
    for (int g = 0; g < 8; g++) {
      int scale = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | six[g - 4] >> 6 << 4;
      int minimum = g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | six[g] >> 6 << 4;
      head[LOW + g * WIDTH + output] = (uint8_t)((scale & 15) | minimum << 4);
      uint8_t& high = head[HIGH + g / 2 * WIDTH + output];
      uint8_t both = (uint8_t)(scale >> 4 | minimum >> 4 << 2);
      high = g % 2 ? (uint8_t)(high | both << 4) : both;
    }
  }
  static void get(const uint8_t* head, long group, long at, F& d, F& m) {
    I low = get_bytes(head + LOW + group * WIDTH + at);
    I high = get_bytes(head + HIGH + group / 2 * WIDTH + at) >> (int)(group % 2 * 4);
    I scale = (low & 15) | (high & 3) << 4, minimum = low >> 4 | (high & 12) << 2;
    d = get_halves(head, at) * __builtin_convertvector(scale, F);
    m = get_halves(head + 2 * WIDTH, at) * __builtin_convertvector(-minimum, F);
  }
};

struct BytesOfSixteen {  // sixteen int8 and a float16 that they are multiplied with; in the file they come last
  static constexpr long BYTES = 18, IN_FILE = 192;
  static constexpr bool MINIMA = false;
  static void put(const uint8_t* block, uint8_t* head, long output) {
    store((uint16_t*)head + output, half_at(block + IN_FILE + 16));
    for (int g = 0; g < 16; g++) head[(2 + g) * WIDTH + output] = block[IN_FILE + g];
  }
  static void get(const uint8_t* head, long group, long at, F& d, F&) {
    d = get_halves(head, at) * load_floats((const int8_t*)head + (2 + group) * WIDTH + at);
  }
};

struct Powers {  // d = 2^(byte - 128)
  static constexpr long BYTES = 1;
  static constexpr bool MINIMA = false;
  static void put(const uint8_t* block, uint8_t* head, long output) { head[output] = block[0]; }
  static void get(const uint8_t* head, long, long at, F& d, F&) {
    I power = get_bytes(head + at);
    I tiny = power == 0 ? splat(0x00200000) : splat(0x00400000);  // below the smallest normal number
    d = (F)(power < 2 ? tiny : (power - 1) << 23);
  }
};

struct EighthBytes {  // a float of 8 bits for each of four groups, without a sign: e4m3, halved
  static constexpr long BYTES = 4;
  static constexpr bool MINIMA = false;
  static void put(const uint8_t* block, uint8_t* head, long output) {
    for (int g = 0; g < 4; g++) head[g * WIDTH + output] = block[g] == 127 ? 0 : block[g] & 127;  // NaN: 0
  }
  static void get(const uint8_t* head, long group, long at, F& d, F&) {
    // As bits of a float they are 2^120 times too small; below the smallest normal number too.
    d = (F)(get_bytes(head + group * WIDTH + at) << 20) * 6.64613997892457936e35f;  // 2^119
  }
};

// d in float32. Levels of e4m3 follow; if one of them is no number, neither is d, nor what the group is multiplied to.
template <long INPUTS> struct Float32 {
  static constexpr long BYTES = 4;
  static constexpr bool MINIMA = false;
  static void put(const uint8_t* block, uint8_t* head, long output) {
    float d = load<float>(block);
    for (long i = 0; i < INPUTS; i++)
      if ((block[BYTES + i] & 127) == 127) d = __builtin_nanf("");
    store((float*)head + output, d);
  }
  static void get(const uint8_t* head, long, long at, F& d, F&) { d = load<F>((const float*)head + at); }
};

struct HalvesAndZeros {  // d in float16, and the level that stands for 0, a byte: m = -d * zero
  static constexpr long BYTES = 3;
  static constexpr bool MINIMA = true;
  static void put(const uint8_t* block, uint8_t* head, long output) {
    Halves::put(block, head, output);
    head[2 * WIDTH + output] = block[2];
  }
  static void get(const uint8_t* head, long, long at, F& d, F& m) {
    d = get_halves(head, at);
    m = d * __builtin_convertvector(-get_bytes(head + 2 * WIDTH + at), F);
  }
};

// ---- levels of a block of the file, one byte each, in the order of inputs

inline void low_then_high(const uint8_t* bytes, long count, uint8_t* to) {  // all low nibbles, then all high ones
  for (long i = 0; i < count; i++) to[i] = bytes[i] & 15, to[count + i] = bytes[i] >> 4;
}

inline void add_fifth(const uint8_t* bits, uint8_t* to) {  // of 32 levels
  uint32_t all = load<uint32_t>(bits);
  for (int i = 0; i < 32; i++) to[i] |= (all >> i & 1) << 4;
}

template <class S, long BITS_, long GROUP_, long INPUTS_> struct KindOf {
  typedef S Scales;
  static constexpr long BITS = BITS_, GROUP = GROUP_, INPUTS = INPUTS_;
  static constexpr long BYTES = INPUTS * BITS / 8 + S::BYTES;
  static constexpr bool TABLE = false;  // whether values stand in one
  static constexpr bool E4M3 = false;   // whether levels are floats of 8 bits
  static constexpr bool FLOATS = false;  // whether values are numbers in bfloat16
  static constexpr bool CODES = false;   // whether these stand in a codebook, which belongs to a panel: level_codes.h
  static constexpr bool SPARSE = false;  // whether most of these are 0: level_sparse.h
  static constexpr int8_t VALUES[16] = {};
};

struct Q4_0 : KindOf<Halves, 4, 32, 32> {
  static constexpr int OFFSET = 8;
  static void levels(const uint8_t* block, uint8_t* to) { low_then_high(block + 2, 16, to); }
};

struct Q4_1 : KindOf<HalvesAndMinima, 4, 32, 32> {
  static constexpr int OFFSET = 0;
  static void levels(const uint8_t* block, uint8_t* to) { low_then_high(block + 4, 16, to); }
};

struct Q5_0 : KindOf<Halves, 5, 32, 32> {
  static constexpr int OFFSET = 16;
  static void levels(const uint8_t* block, uint8_t* to) {
    low_then_high(block + 6, 16, to);
    add_fifth(block + 2, to);
  }
};

struct Q5_1 : KindOf<HalvesAndMinima, 5, 32, 32> {
  static constexpr int OFFSET = 0;
  static void levels(const uint8_t* block, uint8_t* to) {
    low_then_high(block + 8, 16, to);
    add_fifth(block + 4, to);
  }
};

struct Q8_0 : KindOf<Halves, 8, 32, 32> {
  static constexpr int OFFSET = 128;
  static void levels(const uint8_t* block, uint8_t* to) {
    for (int i = 0; i < 32; i++) to[i] = block[2 + i] ^ 128;
  }
};

struct Q4_K : KindOf<SixBits, 4, 32, 256> {
  static constexpr int OFFSET = 0;
  static void levels(const uint8_t* block, uint8_t* to) {
    for (int part = 0; part < 4; part++) low_then_high(block + 16 + part * 32, 32, to + part * 64);
  }
};

struct Q5_K : KindOf<SixBits, 5, 32, 256> {
  static constexpr int OFFSET = 0;
  static void levels(const uint8_t* block, uint8_t* to) {
    for (int part = 0; part < 4; part++) low_then_high(block + 48 + part * 32, 32, to + part * 64);
    for (int i = 0; i < 256; i++) to[i] |= (block[16 + i % 32] >> i / 32 & 1) << 4;
  }
};

struct Q6_K : KindOf<BytesOfSixteen, 6, 16, 256> {
  static constexpr int OFFSET = 32;
  static void levels(const uint8_t* block, uint8_t* to) {
    for (int half = 0; half < 2; half++) {
      low_then_high(block + half * 64, 64, to + half * 128);
      for (int i = 0; i < 128; i++) to[half * 128 + i] |= (block[128 + half * 32 + i % 32] >> i / 32 * 2 & 3) << 4;
    }
  }
};

struct IQ4_NL : KindOf<Halves, 4, 32, 32> {
  static constexpr bool TABLE = true;
  static constexpr int8_t VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  static constexpr int OFFSET = 128;
  static void levels(const uint8_t* block, uint8_t* to) { low_then_high(block + 2, 16, to); }
};

struct MXFP4 : KindOf<Powers, 4, 32, 32> {  // d is half of what the format says, and values are twice as large
  static constexpr bool TABLE = true;
  static constexpr int8_t VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  static constexpr int OFFSET = 12;
  static void levels(const uint8_t* block, uint8_t* to) { low_then_high(block + 1, 16, to); }
};

struct NVFP4 : KindOf<EighthBytes, 4, 16, 64> {  // values as MXFP4's; a tensor's own scale is not in its blocks
  static constexpr bool TABLE = true;
  static constexpr int8_t VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  static constexpr int OFFSET = 12;
  static void levels(const uint8_t* block, uint8_t* to) {
    for (int part = 0; part < 4; part++) low_then_high(block + 4 + part * 8, 8, to + part * 16);
  }
};

// Not a file's own: what AWQ, GPTQ and compressed-tensors are brought into. A block is d, the zero if there is one (else
// it is 8), and bytes of two inputs each, the earlier in the low nibble.
template <long GROUP_, bool ZEROS>
struct Int4 : KindOf<std::conditional_t<ZEROS, HalvesAndZeros, Halves>, 4, GROUP_, GROUP_> {
  static constexpr int OFFSET = ZEROS ? 0 : 8;
  static void levels(const uint8_t* block, uint8_t* to) {
    const uint8_t* bytes = block + (ZEROS ? HalvesAndZeros::BYTES : Halves::BYTES);
    for (long i = 0; i < GROUP_; i++) to[i] = bytes[i / 2] >> i % 2 * 4 & 15;
  }
};

// Not a file's own: floats of 8 bits (a sign, four bits of exponent, three of fraction), as checkpoints in FP8 have them,
// with a scale in float32. They are no whole numbers: rows that meet them are in bfloat16 in either form.
template <long GROUP_> struct Fp8 : KindOf<Float32<GROUP_>, 8, GROUP_, GROUP_> {
  static constexpr bool E4M3 = true;
  static constexpr int OFFSET = 0;
  static void levels(const uint8_t* block, uint8_t* to) { memcpy(to, block + 4, GROUP_); }
};

constexpr float E4M3_UNIT = 1.329227995784916e36f;  // 2^120, the difference of both exponents' zeros

inline float from_e4m3(int level) {
  const uint32_t bits = (level & 127u) << 20 | (level & 128u) << 24;
  return load<float>(&bits) * E4M3_UNIT;
}
inline F from_e4m3(I level) { return (F)((level & 127) << 20 | (level & 128) << 24) * E4M3_UNIT; }

template <class Kind> constexpr int value_of(int level) {
  return Kind::TABLE ? Kind::VALUES[level & 15] : level - Kind::OFFSET;
}

// ---- panels
constexpr long HIGH_BYTES(long bits) { return bits == 8 ? 0 : (bits - 4) * WIDTH * 4; }  // of a section

template <class Kind> constexpr long HEAD = Kind::Scales::BYTES * WIDTH;
template <class Kind> constexpr long SECTION_BYTES = SECTION * Kind::BITS / 8 * WIDTH;
template <class Kind> constexpr long SECTIONS = Kind::INPUTS / SECTION;  // of a block
template <class Kind> constexpr long PANEL_BLOCK = Kind::BYTES * WIDTH;  // bytes of a block of all outputs of a panel

// A panel of codes begins with its codebook, and so does each of the rows that are packed.
constexpr long CODEBOOK = 32;  // values of a panel's, in bfloat16
template <class Kind> constexpr long PANEL_START = Kind::CODES ? CODEBOOK * 2 : 0;
template <class Kind> constexpr long ROW_START = Kind::CODES ? 2 << Kind::BITS : 0;

template <class Kind> inline long level_panel_bytes(long inputs) {
  return PANEL_START<Kind> + inputs / Kind::INPUTS * PANEL_BLOCK<Kind>;
}

// Where in a panel a section begins, counted from its first.
template <class Kind> inline long section_at(long section) {
  const long block = PANEL_START<Kind> + section / SECTIONS<Kind> * PANEL_BLOCK<Kind>;
  return block + HEAD<Kind> + section % SECTIONS<Kind> * SECTION_BYTES<Kind>;
}

// d and m of a group of inputs, for the LANES outputs from `at` on.
template <class Kind> inline void panel_scales(const uint8_t* panel, long group, long at, F& d, F& m) {
  constexpr long GROUPS = Kind::INPUTS / Kind::GROUP;  // of a block
  Kind::Scales::get(panel + PANEL_START<Kind> + group / GROUPS * PANEL_BLOCK<Kind>, group % GROUPS, at, d, m);
}

// The bit of a word of high bits where those of a level begin. Levels have one of them, or two; a word of 5-bit levels
// is of a section, a word of 6-bit ones of two steps. Every byte has those of its own byte, by step and nibble.
template <class Kind> constexpr int high_bit(int step, int nibble) {
  return Kind::BITS == 5 ? nibble / 2 * 8 + step * 2 + nibble % 2 : nibble / 2 * 8 + step % 2 * 4 + nibble % 2 * 2;
}

constexpr int nibble_of(long input) { return (int)(input % 2 * 4 + input / 2); }  // of a step's word

// The levels of a section of one output move into a panel's section.
template <class Kind> inline void put_section(const uint8_t* levels, uint8_t* section, long output) {
  uint32_t words[8] = {}, high[2] = {};
  for (int step = 0; step < 4; step++, levels += STEP)
    for (int i = 0; i < STEP; i++) {
      uint32_t level = levels[i];
      int nibble = nibble_of(i);
      if constexpr (Kind::BITS == 8) {
        words[step * 2 + nibble % 2] |= level << nibble / 2 * 8;
      } else {
        words[step] |= (level & 15) << nibble * 4;
        high[Kind::BITS == 6 ? step / 2 : 0] |= level >> 4 << high_bit<Kind>(step, nibble);
      }
    }
  constexpr int HIGH = Kind::BITS == 8 ? 0 : Kind::BITS - 4, WORDS = Kind::BITS == 8 ? 8 : 4;
  for (int i = 0; i < HIGH; i++) store((uint32_t*)section + i * WIDTH + output, high[i]);
  for (int i = 0; i < WORDS; i++) store((uint32_t*)section + (HIGH + i) * WIDTH + output, words[i]);
}

template <class Kind> inline int level_at(const uint8_t* section, long output, long input) {
  const uint32_t* words = (const uint32_t*)(section + HIGH_BYTES(Kind::BITS)) + output;
  const uint32_t* high = (const uint32_t*)section + output;
  const int step = (int)(input / STEP), nibble = nibble_of(input % STEP);
  if (Kind::BITS == 8) return words[(step * 2 + nibble % 2) * WIDTH] >> nibble / 2 * 8 & 255;
  int level = words[step * WIDTH] >> nibble * 4 & 15;
  if (Kind::BITS == 5) level |= (high[0] >> high_bit<Kind>(step, nibble) & 1) << 4;
  if (Kind::BITS == 6) level |= (high[step / 2 * WIDTH] >> high_bit<Kind>(step, nibble) & 3) << 4;
  return level;
}

// ---- registers of levels
// The operand of products of bytes is what a level's value is, plus so much: nothing is below 0 then, where the
// instructions want that of one side. NEON's want both signed; with AVX2 a large one's sign goes to the other side.
template <class Kind> constexpr int SHIFT = LANES != 16 && Kind::OFFSET == 128 ? 0 : Kind::OFFSET;

// Bytes of a register, each between 0 and 15, looked up in a table of 16.
inline I look_up(const uint8_t (&table)[16], I bytes) {
#if LANES == 16
  return (I)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(table)), (__m512i)bytes);
#elif LANES == 8
  return (I)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), (__m256i)bytes);
#else
  return (I)vqtbl1q_u8(load<uint8x16_t>(table), (uint8x16_t)bytes);
#endif
}

// The table's numbers that are looked up.
struct Table16 {
  alignas(16) uint8_t bytes[16];
};

template <class Kind, int BY> constexpr Table16 shifted_values() {
  Table16 table = {};
  for (int i = 0; i < 16; i++) table.bytes[i] = (uint8_t)(value_of<Kind>(i) + BY);
  return table;
}

constexpr uint16_t whole_bfloat(int value) {  // a whole number of at most 8 bits, in bfloat16
  int size = value < 0 ? -value : value, power = 0;
  if (!size) return 0;
  while (size >> (power + 1)) power++;
  return (uint16_t)((value < 0 ? 0x8000 : 0) | (power + 127) << 7 | ((size << 7 >> power) & 127));
}

// What levels are worth in bfloat16, by level, repeated.
struct BfloatTable {
  alignas(64) uint16_t at[64];
};

template <class Kind> constexpr BfloatTable bfloat_values() {
  BfloatTable table = {};
  for (int i = 0; i < 64; i++) {
    const int level = i % (1 << (Kind::BITS < 6 ? Kind::BITS : 6));
    table.at[i] = whole_bfloat(value_of<Kind>(level));
  }
  return table;
}

inline I shift_right(I v, int by) { return (I)((__attribute__((vector_size(LANES * 4))) uint32_t)v >> by); }

#if LANES == 16
// The upper bytes of all halves, e4m3, in bfloat16. Below the smallest normal number there are eight, in a table.
inline I pairs_of_e4m3(I halves) {
  alignas(64) static constexpr uint16_t SMALL[32] = {0,      0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const __m512i all = (__m512i)halves, exponents = _mm512_set1_epi16(0x7800);
  __m512i normal = _mm512_and_si512(_mm512_srli_epi16(all, 4), _mm512_set1_epi16(0x07f0));
  normal = _mm512_add_epi16(normal, _mm512_set1_epi16(120 << 7));
  const __mmask32 small = _mm512_testn_epi16_mask(all, exponents);
  normal = _mm512_mask_permutexvar_epi16(normal, small, _mm512_srli_epi16(all, 8), load<__m512i>(SMALL));
  return (I)_mm512_ternarylogic_epi32(_mm512_set1_epi16((short)0x8000), all, normal, 0xca);  // a ? b : c, bit by bit
}
#endif

// What a section of a panel holds for the LANES outputs from `at` on. Steps, words and pairs count within it.
template <class Kind, bool CODES = Kind::CODES> struct Section {
  const uint8_t* data;

  I words(long index, long at) const {
    return load<I>(data + HIGH_BYTES(Kind::BITS) + (index * WIDTH + at) * 4);
  }

  // The high bits of `nibble`'s place of each byte (or half) are brought to bit `to` of it; others are beside them.
  I high(long step, int nibble, int to, long at) const {
    I all = load<I>(data + ((Kind::BITS == 5 ? 0 : step / 2 * WIDTH) + at) * 4);
    int by = high_bit<Kind>((int)step, nibble) - to;
    return by < 0 ? all << -by : shift_right(all, by);
  }

  // Levels as they are, one byte each: word 0 or 1 of a step.
  __attribute__((always_inline)) I levels(long step, int word, long at) const {
    if constexpr (Kind::BITS == 8) return words(step * 2 + word, at);
    I low = words(step, at);
    low = (word ? shift_right(low, 4) : low) & 0x0f0f0f0f;
    if constexpr (Kind::BITS == 5) low |= high(step, word, 4, at) & 0x10101010;
    if constexpr (Kind::BITS == 6) low |= high(step, word, 4, at) & 0x30303030;
    return low;
  }

  // The operand of products of bytes.
  __attribute__((always_inline)) I bytes(long step, int word, long at) const {
    I found = levels(step, word, at);
    if constexpr (Kind::TABLE) {
      static constexpr Table16 VALUES = shifted_values<Kind, SHIFT<Kind>>();
      return look_up(VALUES.bytes, found);
    }
    if constexpr (Kind::OFFSET != SHIFT<Kind>) return found ^ (int32_t)0x80808080;
    return found;
  }

#if MATRIX_UNIT
  // What levels are worth, as signed bytes.
  __attribute__((always_inline)) I values(long step, int word, long at) const {
    I found = levels(step, word, at);
    if constexpr (Kind::TABLE) {
      static constexpr Table16 VALUES = shifted_values<Kind, 0>();
      return look_up(VALUES.bytes, found);
    }
    return (I)_mm512_sub_epi8((__m512i)found, _mm512_set1_epi8((char)Kind::OFFSET));
  }
#endif

  // What levels are worth, and OFFSET more: none is below 0.
  __attribute__((always_inline)) I above(long step, int word, long at) const {
    I found = levels(step, word, at);
    if constexpr (Kind::TABLE) {
      static constexpr Table16 VALUES = shifted_values<Kind, Kind::OFFSET>();
      return look_up(VALUES.bytes, found);
    }
    return found;
  }

  // Values of inputs 2 pair and 2 pair + 1 of a step, in bfloat16.
  __attribute__((always_inline)) I pair(long step, int pair, long at) const {
    static constexpr BfloatTable TABLE = bfloat_values<Kind>();
#if LANES == 16
    if constexpr (Kind::E4M3) {
      const I word = words(step * 2 + pair % 2, at);
      return pairs_of_e4m3(pair < 2 ? (I)_mm512_slli_epi16((__m512i)word, 8) : word);
    } else if constexpr (Kind::BITS == 4) {  // the table comes twice: what is beside the nibble does not count
      __m512i index = _mm512_srli_epi16((__m512i)words(step, at), pair * 4);
      return (I)_mm512_permutexvar_epi16(index, load<__m512i>(TABLE.at));
    } else if constexpr (Kind::BITS == 5) {
      __m512i low = _mm512_srli_epi16((__m512i)words(step, at), pair * 4);
      __m512i high = (__m512i)this->high(step, pair, 4, at);
      __m512i index = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), low, high, 0xca);  // a ? b : c, bit by bit
      return (I)_mm512_permutexvar_epi16(index, load<__m512i>(TABLE.at));
    } else if constexpr (Kind::BITS == 6) {
      __m512i low = _mm512_srli_epi16((__m512i)words(step, at), pair * 4);
      __m512i high = (__m512i)this->high(step, pair, 4, at);
      __m512i index = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), low, high, 0xca);
      return (I)_mm512_permutex2var_epi16(load<__m512i>(TABLE.at), index, load<__m512i>(TABLE.at + 32));
    }
#elif LANES == 4
    if constexpr (Kind::BITS == 4) {  // the upper and the lower bytes of the numbers, each from a table
      static constexpr Table16 LOW = bytes_of(TABLE, 0), HIGH = bytes_of(TABLE, 8);
      I found = levels(step, pair % 2, at), low = look_up(LOW.bytes, found), high = look_up(HIGH.bytes, found);
      return pair < 2 ? (low & 0x00ff00ff) | (high & 0x00ff00ff) << 8
                      : (shift_right(low, 8) & 0x00ff00ff) | (high & (int32_t)0xff00ff00);
    }
#endif
    I found = levels(step, pair % 2, at);
    F even = value(shift_right(found, pair / 2 * 8) & 255), odd = value(shift_right(found, pair / 2 * 8 + 16) & 255);
    return shift_right((I)even, 16) | (I)odd;
  }

 private:
  static F value(I level) {
    if constexpr (Kind::E4M3) return from_e4m3(level);
    else return __builtin_convertvector(level - Kind::OFFSET, F);
  }

  static constexpr Table16 bytes_of(const BfloatTable& table, int from) {
    Table16 bytes = {};
    for (int i = 0; i < 16; i++) bytes.bytes[i] = (uint8_t)(table.at[i] >> from);
    return bytes;
  }
};

#include "level_codes.h"

// Section `index` of a panel.
template <class Kind> inline Section<Kind> section_of(const uint8_t* panel, long index) {
  if constexpr (Kind::CODES) return {panel + section_at<Kind>(index), (const typename Section<Kind>::Value*)panel};
  else return {panel + section_at<Kind>(index)};
}
