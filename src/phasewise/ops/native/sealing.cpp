// Rows become packed blocks: each group's step and lowest number, and the levels nearest to what it has.
//
// Number for number what `quantise` and `pack` of ops/packing.py make of them.
#include <math.h>

#include "kernels.h"
#include "pool.h"
#include "simd.h"

constexpr float LARGEST = 65504;  // of float16

// To nearest even; |x| is at most LARGEST, and NaN stays NaN.
static uint16_t to_half(float x) {
  uint32_t bits, sign, size;
  memcpy(&bits, &x, 4);
  sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (size < 0x38800000) {  // below the smallest normal number: a multiple of 2^-24, as those of 0.5 and more are
    float whole;
    memcpy(&whole, &size, 4);
    whole += 0.5f;
    memcpy(&size, &whole, 4);
    return (uint16_t)(sign | (size - 0x3f000000));
  }
  return (uint16_t)(sign | ((size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13));
}

static float from_half(uint16_t half) {  // of a finite number, or NaN
  uint32_t size = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
  float x;
  memcpy(&x, &size, 4);
  x *= 5.192296858534828e33f;
  memcpy(&size, &x, 4);
  size = (half & 0x7fff) > 0x7c00 ? 0x7fc00000 : size;
  size |= sign;
  memcpy(&x, &size, 4);
  return x;
}

static float within(float x, float from, float to) { return x < from ? from : x > to ? to : x; }

// `group` numbers `apart` -> their ends, and their levels from bit `at` on of bytes that are nought
static void seal_group(const bf16* x, long apart, long group, long bits, uint16_t* step, uint16_t* low, uint8_t* levels,
                       long at) {
  float least = widen(x[0]), most = least;
  for (long i = 1; i < group; i++) {
    float own = widen(x[i * apart]);
    least = own < least || own != own ? own : least, most = own > most || own != own ? own : most;
    if (own != own) break;
  }
  long top = (1 << bits) - 1;
  *low = to_half(within(least, -LARGEST, LARGEST));
  float lowest = from_half(*low);
  *step = to_half(within((most - lowest) / top, 0, LARGEST));
  float wide = from_half(*step);
  wide = wide > 0 ? wide : 1;
  for (long i = 0; i < group; i++, at += bits) {
    float level = within(rintf((widen(x[i * apart]) - lowest) / wide), 0, (float)top);
    levels[at / 8] |= (uint8_t)((level == level ? (int)level : 0) << at % 8);
  }
}

// ---- the same, many numbers at a time
static F within(F x, float to) { return max(splat(0.0f), x > to ? splat(to) : x); }

// Levels of a register of numbers that are no NaN.
static I levels_of(F x, F lowest, F wide, long top) {
  return (I)(within((x - lowest) / wide, (float)top) + MAGIC) - (I)splat(MAGIC);
}

// Eight levels, a byte each, in as few bytes as they take.
static void put_levels(uint64_t x, long bits, uint8_t* to) {
  if (bits == 2) {
    x = (x | x >> 6) & 0x000f000f000f000f, x = (x | x >> 12) & 0x000000ff000000ff, x |= x >> 24;
    memcpy(to, &x, 2);
  } else {
    x = (x | x >> 4) & 0x00ff00ff00ff00ff, x = (x | x >> 8) & 0x0000ffff0000ffff, x |= x >> 16;
    memcpy(to, &x, 4);
  }
}

// A group of numbers that follow each other, whole registers and eights of them; false: one is NaN, nothing is done.
static bool seal_row(const bf16* x, long group, long bits, uint16_t* step, uint16_t* low, uint8_t* levels) {
  F least = load_floats(x), largest = least;
  I nan = least != least;
  for (long i = LANES; i < group; i += LANES) {
    F own = load_floats(x + i);
    least = own < least ? own : least, largest = own > largest ? own : largest, nan |= own != own;
  }
  if (any(nan)) return false;
  long top = (1 << bits) - 1;
  *low = to_half(within(-most(-least), -LARGEST, LARGEST));
  float lowest = from_half(*low);
  *step = to_half(within((most(largest) - lowest) / top, 0, LARGEST));
  float wide = from_half(*step);
  uint8_t some[LANES < 8 ? 8 : LANES];
  for (long i = 0; i < group; i += sizeof some) {
    for (long j = 0; j < (long)sizeof some; j += LANES)
      store_bytes(some + j, levels_of(load_floats(x + i + j), splat(lowest), splat(wide > 0 ? wide : 1), top));
    for (long j = 0; j < (long)sizeof some; j += 8)
      put_levels(load<uint64_t>(some + j), bits, levels + (i + j) * bits / 8);
  }
  return true;
}

// A group of each of LANES lines next to one another: their numbers lie `apart`; lines of `bytes`, which are nought,
// and `groups`. A level that is none is 0.
static void seal_across(const bf16* x, long apart, long group, long bits, uint16_t* step, uint16_t* low, long groups,
                        uint8_t* levels, long bytes) {
  F least = load_floats(x), largest = least, lowest, wide;
  for (long i = 1; i < group; i++) {
    F own = load_floats(x + i * apart);
    I nan = own != own;
    least = (own < least) | nan ? own : least, largest = (own > largest) | nan ? own : largest;
  }
  long top = (1 << bits) - 1;
  for (long l = 0; l < LANES; l++) {
    low[l * groups] = to_half(within(least[l], -LARGEST, LARGEST));
    lowest[l] = from_half(low[l * groups]);
    step[l * groups] = to_half(within((largest[l] - lowest[l]) / top, 0, LARGEST));
    wide[l] = from_half(step[l * groups]);
    wide[l] = wide[l] > 0 ? wide[l] : 1;
  }
  for (long i = 0, each = 8 / bits; i < group; i += each) {
    I found = {};
    for (long j = 0; j < each; j++) {
      F x_own = load_floats(x + (i + j) * apart), level = (x_own - lowest) / wide;
      found |= (level == level ? levels_of(x_own, lowest, wide, top) : I{}) << (int32_t)(j * bits);
    }
    for (long l = 0; l < LANES; l++) levels[l * bytes + i * bits / 8] = (uint8_t)found[l];
  }
}

// The lines of one head's blocks that a thread takes.
static void seal_lines(const SealCall& call, const Seal& seal, long head, long from, long to) {
  const Sealed& side = seal.to;
  long dim = call.dim, along = call.by_channel ? side.rows : dim, apart = call.by_channel ? dim : 1;
  long bytes = along * side.bits / 8, groups = along / side.group;
  const bf16* rows = seal.rows + head * seal.row_head + call.rows * dim;
  long before = call.blocks * (call.by_channel ? dim : side.rows);
  bool by_rows = !call.by_channel && side.group % LANES == 0 && side.group % 8 == 0;
  for (long line = from, many; line < to; line += many) {
    many = call.by_channel && line + LANES <= to && line % dim + LANES <= dim ? LANES : 1;
    const bf16* x = call.by_channel ? rows + line / dim * along * dim + line % dim : rows + line * dim;
    uint8_t* levels = (uint8_t*)side.levels + head * side.levels_head + (before + line) * bytes;
    long ends = head * side.ends_head + (before + line) * groups;
    uint16_t *step = (uint16_t*)side.step + ends, *low = (uint16_t*)side.low + ends;
    memset(levels, 0, many * bytes);
    for (long g = 0; g < groups; g++) {
      const bf16* own = x + g * side.group * apart;
      long at = g * side.group * side.bits;
      if (many > 1) seal_across(own, apart, side.group, side.bits, step + g, low + g, groups, levels + at / 8, bytes);
      else if (!by_rows || !seal_row(own, side.group, side.bits, step + g, low + g, levels + at / 8))
        seal_group(own, apart, side.group, side.bits, step + g, low + g, levels, at);
    }
  }
}

// Where a head's first line is and goes, of which most are met for the first time in a while.
__attribute__((always_inline)) static inline void fetch(const SealCall& call, const Seal& seal, long head) {
  const Sealed& side = seal.to;
  long along = call.by_channel ? side.rows : call.dim, before = call.blocks * (call.by_channel ? call.dim : side.rows);
  long ends = head * side.ends_head + before * (along / side.group);
  const bf16* rows = seal.rows + head * seal.row_head + call.rows * call.dim;
  for (long d = 0; d < call.dim; d += 32) __builtin_prefetch(rows + d);
  __builtin_prefetch(side.levels + head * side.levels_head + before * along * side.bits / 8, 1);
  __builtin_prefetch(side.step + ends, 1), __builtin_prefetch(side.low + ends, 1);
}

API void seal(const SealCall* call) {
  const Sealed& side = call->seals->to;
  long lines = call->by_channel ? call->slots / side.rows * call->dim : call->slots, each = call->by_channel ? 16 : 1;
  long pieces = (lines + each - 1) / each, all = call->count * call->heads * pieces;
  int threads = enough(call->threads, call->count * call->heads * call->slots * call->dim);
  Shares shares(all, threads);
  together(threads, [&](int, int) {
    for (long from, to; shares.take(from, to);)
      for (long i = from; i < to; i++) {
        long next = i / pieces + 8;
        if (i % pieces == 0 && next < call->count * call->heads)
          fetch(*call, call->seals[next / call->heads], next % call->heads);
        long first = i % pieces * each, end = first + each < lines ? first + each : lines;
        seal_lines(*call, call->seals[i / pieces / call->heads], i / pieces % call->heads, first, end);
      }
  });
}
