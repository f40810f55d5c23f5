// Rows as products with weights of few bits take them: bytes with a scale for each group, or numbers of bfloat16.
#pragma once
#include <math.h>

#include "forms.h"
#include "level_kinds.h"

inline long groups_of(long inputs, long group) { return inputs / group; }

// ---- bytes
// Inputs of a row that share a scale where they are rounded to bytes: those of a group of weights, but no fewer than 32.
template <class Kind> constexpr long IN_GROUP_OF = Kind::GROUP < SECTION ? SECTION : Kind::GROUP;

struct ByteGroup {  // of a row's inputs
  float worth;      // of one step; NaN if the group holds an infinity or NaN, which then spoils its own row and no other
  float sum;        // of the inputs as they were rounded
#if LANES == 8
  float parts[2];   // the same of the first 16, and of the others
#else
  int32_t whole, half;  // sums of the steps: of all, and of the first 16
#endif
};

template <class T> float largest_of(const T* x, long count) {  // NaN if there is an infinity or NaN among them
  I top = {};
  for (long k = 0; k < count; k += LANES) {
    I bits = (I)load_floats(x + k) & 0x7fffffff;  // in the order of the magnitudes; those of NaN are the largest
    top = bits > top ? bits : top;
  }
  int32_t bits = most(top);
  float found;
  memcpy(&found, &bits, 4);
  return bits >= 0x7f800000 ? NAN : found;
}

// 32 bytes in the order that words of levels have them: of eight the first, fifth, second, sixth, third and so on.
inline void reorder(const uint8_t* from, uint8_t* to) {
  alignas(16) static const uint8_t ORDER[16] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
  for (int half = 0; half < 32; half += 16) {
#if LANES == 4
    store(to + half, vqtbl1q_u8(load<uint8x16_t>(from + half), load<uint8x16_t>(ORDER)));
#else
    store(to + half, _mm_shuffle_epi8(load<__m128i>(from + half), load<__m128i>(ORDER)));
#endif
  }
}

// `count` numbers to the nearest of 255 steps. A largest one below 1e-35 is taken for nothing.
template <class T> ByteGroup round_group(const T* x, long count, uint8_t* out) {
  const int32_t zero = 0x4b400000;  // MAGIC's bits
  float top = largest_of(x, count), inverse = top >= 1e-35f ? 127 / top : 0;
  int32_t whole = 0, half = 0;
  for (long from = 0; from < count; from += SECTION) {
    alignas(64) uint8_t natural[SECTION];
    for (long k = 0; k < SECTION; k += 16) {
      I all = {};
      for (long i = k; i < k + 16; i += LANES) {
        I rounded = (I)fused(load_floats(x + from + i), splat(inverse), splat(MAGIC)) - zero;
        store_bytes(natural + i, rounded);
        all += rounded;
      }
      whole += sum(all);
      if (!from && !k) half = whole;
    }
    reorder(natural, out + from);
  }
  float worth = top / 127, sum = worth * (float)whole;
#if LANES == 8
  return {worth, sum, {worth * (float)half, worth * (float)(whole - half)}};
#else
  return {worth, sum, whole, half};
#endif
}

// Bytes [rows, inputs], then ByteGroup [rows, groups].
template <long GROUP> long bytes_room(const LinearCall& call) {
  const long inputs = call.weights->inputs;
  return call.rows * (inputs + groups_of(inputs, GROUP) * sizeof(ByteGroup));
}

template <long GROUP> void prepare_bytes(const LinearCall& call, void* room, int thread, int all) {
  const long inputs = call.weights->inputs, groups = groups_of(inputs, GROUP);
  uint8_t* bytes = (uint8_t*)room;
  ByteGroup* of = (ByteGroup*)(bytes + call.rows * inputs);
  for (long i = thread; i < call.rows * groups; i += all) {
    long from = i % groups * GROUP, at = i / groups * call.x.stride + from;
    uint8_t* out = bytes + i / groups * inputs + from;
    of[i] = call.x.kind == FLOAT ? round_group((const float*)call.x.data + at, GROUP, out)
                                 : round_group((const bf16*)call.x.data + at, GROUP, out);
  }
}

// ---- bfloat16
#if LANES == 8
// As floats. AVX2 multiplies levels where they stand in their words, which makes them larger; so much smaller are the
// inputs that they meet. A word holds nibbles, or bytes: what a level's place makes of it differs, and so do the inputs.
// The top one is brought down, else it would have a sign.
constexpr int place_of_level(bool nibbles, int nibble) {
  return nibbles ? (nibble < 7 ? nibble * 4 : 0) : nibble < 6 ? nibble / 2 * 8 : 0;
}

struct Shrunk {
  alignas(32) float by[STEP];
};

constexpr Shrunk shrunk(bool nibbles) {
  Shrunk found = {};
  for (int i = 0; i < STEP; i++) found.by[i] = 1 / (float)(1 << place_of_level(nibbles, nibble_of(i)));
  return found;
}

// 16 numbers rounded to bfloat16, and their sum.
template <bool NIBBLES, class T> float copy_floats(const T* x, float* out) {
  static constexpr Shrunk SHRUNK = shrunk(NIBBLES);
  F all = {};
  for (long k = 0; k < 16; k += LANES) {
    alignas(32) bf16 some[LANES];
    store_floats(some, load_floats(x + k));
    F rounded = load_floats(some);
    all += rounded;
    store(out + k, rounded * load<F>(SHRUNK.by));
  }
  return sum(all);
}

// Floats [rows, inputs], then the sums of each 16 of a row, of each 32, 64 and 128: [rows, inputs / 16] and so on.
struct PreparedFloats {
  float* x;
  float* sums[4];
  long inputs;

  PreparedFloats(const LinearCall& call, const void* room) : x((float*)room), inputs(call.weights->inputs) {
    float* at = x + call.rows * inputs;
    for (int i = 0; i < 4; at += call.rows * groups_of(inputs, 16 << i), i++) sums[i] = at;
  }
  const float* sums_of(long group) const { return sums[group == 16 ? 0 : group == 32 ? 1 : group == 64 ? 2 : 3]; }
};

constexpr long SUMMED = 128;  // inputs that are prepared at a time

inline long floats_room(const LinearCall& call) {
  const long inputs = call.weights->inputs;
  return call.rows * (inputs + inputs / 16 + inputs / 32 + inputs / 64 + inputs / 128) * (long)sizeof(float);
}

template <bool NIBBLES, class T> void prepare_some(const T* x, long count, float* out, float* const (&sums)[4]) {
  for (long k = 0; k < count; k += 16) sums[0][k / 16] = copy_floats<NIBBLES>(x + k, out + k);
  for (int i = 1; i < 4; i++)
    for (long g = 0; g < count >> (i + 4); g++) sums[i][g] = sums[i - 1][2 * g] + sums[i - 1][2 * g + 1];
}

template <bool NIBBLES> void prepare_floats(const LinearCall& call, void* room, int thread, int all) {
  const PreparedFloats to(call, room);
  const long some = (to.inputs + SUMMED - 1) / SUMMED;
  for (long i = thread; i < call.rows * some; i += all) {
    const long row = i / some, from = i % some * SUMMED, left = to.inputs - from, at = row * call.x.stride + from;
    const long count = left < SUMMED ? left : SUMMED;
    float* sums[4];
    for (int s = 0; s < 4; s++) sums[s] = to.sums[s] + row * groups_of(to.inputs, 16 << s) + (from >> (s + 4));
    float* out = to.x + row * to.inputs + from;
    if (call.x.kind == FLOAT) prepare_some<NIBBLES>((const float*)call.x.data + at, count, out, sums);
    else prepare_some<NIBBLES>((const bf16*)call.x.data + at, count, out, sums);
  }
}
#else
#if DOT_BFLOATS
typedef int32_t PairOfInputs;
#else
struct PairOfInputs {
  float even, odd;
};
#endif

// LANES numbers of bfloat16 as pairs.
inline void put_pairs(const bf16* some, int32_t* to) { memcpy(to, some, LANES * sizeof(bf16)); }
template <class Pair> void put_pairs(const bf16* some, Pair* to) {
  for (long i = 0; i < LANES; i += 2) to[i / 2] = {widen(some[i]), widen(some[i + 1])};
}

// 32 numbers rounded to bfloat16, and their sum.
template <class T> float copy_section(const T* x, PairOfInputs* out) {
  F all = {};
  for (long k = 0; k < SECTION; k += LANES) {
    alignas(64) bf16 some[LANES];
    store_floats(some, load_floats(x + k));
    all += load_floats(some);
    put_pairs(some, out + k / 2);
  }
  return sum(all);
}

// Pairs [rows, inputs / 2], then the sums of sections [rows, sections].
inline long pairs_room(const LinearCall& call) {
  const long inputs = call.weights->inputs;
  return call.rows * (inputs / 2 * sizeof(PairOfInputs) + groups_of(inputs, SECTION) * sizeof(float));
}

inline void prepare_pairs(const LinearCall& call, void* room, int thread, int all) {
  const long inputs = call.weights->inputs, sections = groups_of(inputs, SECTION);
  PairOfInputs* pairs = (PairOfInputs*)room;
  float* sums = (float*)(pairs + call.rows * inputs / 2);
  for (long i = thread; i < call.rows * sections; i += all) {
    long from = i % sections * SECTION, at = i / sections * call.x.stride + from;
    PairOfInputs* out = pairs + (i / sections * inputs + from) / 2;
    sums[i] = call.x.kind == FLOAT ? copy_section((const float*)call.x.data + at, out)
                                   : copy_section((const bf16*)call.x.data + at, out);
  }
}
#endif
