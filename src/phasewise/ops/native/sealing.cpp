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

// The lines of one head's blocks that a thread takes.
static void seal_lines(const SealCall& call, const Seal& seal, long head, long from, long to) {
  const Sealed& side = seal.to;
  long dim = call.dim, along = call.by_channel ? side.rows : dim, apart = call.by_channel ? dim : 1;
  long bytes = along * side.bits / 8, groups = along / side.group;
  const bf16* rows = seal.rows + head * seal.row_head;
  for (long line = from; line < to; line++) {
    const bf16* x = call.by_channel ? rows + line / dim * along * dim + line % dim : rows + line * dim;
    uint8_t* levels = (uint8_t*)side.levels + head * side.levels_head + line * bytes;
    long ends = head * side.ends_head + line * groups;
    memset(levels, 0, bytes);
    for (long g = 0; g < groups; g++)
      seal_group(x + g * side.group * apart, apart, side.group, side.bits, (uint16_t*)side.step + ends + g,
                 (uint16_t*)side.low + ends + g, levels, g * side.group * side.bits);
  }
}

API void seal(const SealCall* call) {
  const Sealed& side = call->seals->to;
  long lines = call->by_channel ? side.slots / side.rows * call->dim : side.slots, each = call->by_channel ? 16 : 1;
  long pieces = (lines + each - 1) / each, all = call->count * call->heads * pieces;
  int threads = enough(call->threads, call->count * call->heads * side.slots * call->dim);
  Shares shares(all, threads);
  together(threads, [&](int, int) {
    for (long from, to; shares.take(from, to);)
      for (long i = from; i < to; i++) {
        long first = i % pieces * each, end = first + each < lines ? first + each : lines;
        seal_lines(*call, call->seals[i / pieces / call->heads], i / pieces % call->heads, first, end);
      }
  });
}
