// Linear layers of weights of few bits: rows that are prepared for them, panels made of a file's blocks, and their forms.
#include <math.h>

#include "level_product.h"

namespace {

// ---- inputs
long groups_of(long inputs, long group) { return inputs / group; }

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
void reorder(const uint8_t* from, uint8_t* to) {
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
  float worth = top / 127;
  return {worth, worth * (float)whole, whole, half};
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

inline void put_pair(int32_t* to, bf16 even, bf16 odd) { *to = even | odd << 16; }
template <class Pair> void put_pair(Pair* to, bf16 even, bf16 odd) { *to = {widen(even), widen(odd)}; }

// 32 numbers rounded to bfloat16, and their sum.
template <class T> float copy_section(const T* x, PairOfInputs* out) {
  F all = {};
  for (long k = 0; k < SECTION; k += LANES) {
    alignas(64) bf16 some[LANES];
    store_floats(some, load_floats(x + k));
    all += load_floats(some);
    for (long i = 0; i < LANES; i += 2) put_pair(out + (k + i) / 2, some[i], some[i + 1]);
  }
  return sum(all);
}

// Pairs [rows, inputs / 2], then the sums of sections [rows, sections].
long pairs_room(const LinearCall& call) {
  const long inputs = call.weights->inputs;
  return call.rows * (inputs / 2 * sizeof(PairOfInputs) + groups_of(inputs, SECTION) * sizeof(float));
}

void prepare_pairs(const LinearCall& call, void* room, int thread, int all) {
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

// ---- kinds
template <class Kind> void multiply_bytes(const PartProduct& product) {
  const long inputs = product.call.weights->inputs, groups = groups_of(inputs, IN_GROUP_OF<Kind>);
  const uint8_t* bytes = (const uint8_t*)product.inputs;
  const ByteGroup* of = (const ByteGroup*)(bytes + product.call.rows * inputs);
  multiply_levels<ByBytes<Kind>>(product, {(const int32_t*)bytes, inputs / 4, of, groups});
}

template <class Kind> void multiply_pairs(const PartProduct& product) {
  const long inputs = product.call.weights->inputs, sections = groups_of(inputs, SECTION);
  const PairOfInputs* pairs = (const PairOfInputs*)product.inputs;
  const float* sums = (const float*)(pairs + product.call.rows * inputs / 2);
  multiply_levels<ByBfloats<Kind>>(product, {pairs, inputs / 2, sums, sections});
}

// A block of an output of the weight, as it lies in the file, into its panel.
template <class Kind> void pack_block(const uint8_t* block, uint8_t* to, long output) {
  uint8_t levels[Kind::INPUTS];
  Kind::levels(block, levels);
  Kind::Scales::put(block, to, output);
  for (long i = 0; i < SECTIONS<Kind>; i++)
    put_section<Kind>(levels + i * SECTION, to + HEAD<Kind> + i * SECTION_BYTES<Kind>, output);
}

// Rows of blocks, so many bytes apart; the outputs that fill up the last panel are nought.
template <class Kind> void pack_blocks(const Rows& blocks, const WeightsPart& to, long inputs, int threads) {
  const long panel_size = level_panel_bytes<Kind>(inputs), count = inputs / Kind::INPUTS;
  together(threads, [&](int thread, int all) {
    for (long p = thread; p < panels(to.outputs); p += all) {
      uint8_t* panel = (uint8_t*)to.packed + p * panel_size;
      const long left = to.outputs - p * WIDTH, some = left < WIDTH ? left : WIDTH;
      if (some < WIDTH) memset(panel, 0, panel_size);
      const uint8_t* raw = (const uint8_t*)blocks.data + p * WIDTH * blocks.stride;
      for (long b = 0; b < count; b++)
        for (long o = 0; o < some; o++)
          pack_block<Kind>(raw + o * blocks.stride + b * Kind::BYTES, panel + b * PANEL_BLOCK<Kind>, o);
    }
  });
}

template <class Kind> void unpack_row(const WeightsPart& part, long inputs, long which, bf16* out) {
  const uint8_t* panel = (const uint8_t*)part.packed + which / WIDTH * level_panel_bytes<Kind>(inputs);
  const long output = which % WIDTH, at = output / LANES * LANES;
  for (long from = 0; from < inputs; from += Kind::GROUP, out += Kind::GROUP) {
    F d, m = {};
    Packed<Kind>{panel}.scales(from / Kind::GROUP, at, d, m);
    for (long i = 0; i < Kind::GROUP; i++) {
      const uint8_t* section = panel + section_at<Kind>((from + i) / SECTION);
      float value = (float)value_of<Kind>(level_at<Kind>(section, output, (from + i) % SECTION));
      out[i] = narrow(value * d[output - at] + m[output - at]);  // the product is exact
    }
  }
}

template <class Kind> constexpr Form pairs_form() {
  return {INPUTS_PAIRS, level_panel_bytes<Kind>, pack_blocks<Kind>, multiply_pairs<Kind>, unpack_row<Kind>};
}

template <class Kind> constexpr Form bytes_form() {
  constexpr long GROUP = IN_GROUP_OF<Kind>;
  constexpr int INPUTS = GROUP == 32 ? INPUTS_BYTES_32 : GROUP == 64 ? INPUTS_BYTES_64 : INPUTS_BYTES_128;
  return {INPUTS, level_panel_bytes<Kind>, pack_blocks<Kind>, multiply_bytes<Kind>, unpack_row<Kind>};
}

}  // namespace

const Inputs PAIRS_INPUTS = {pairs_room, prepare_pairs};
const Inputs BYTES_32_INPUTS = {bytes_room<32>, prepare_bytes<32>};
const Inputs BYTES_64_INPUTS = {bytes_room<64>, prepare_bytes<64>};
const Inputs BYTES_128_INPUTS = {bytes_room<128>, prepare_bytes<128>};

#define BOTH(...) pairs_form<__VA_ARGS__>(), bytes_form<__VA_ARGS__>()
const Form LEVEL_FORMS[] = {  // in the order of KINDS in ops/native/levels.py
    BOTH(Q4_0),           BOTH(Q4_1),           BOTH(Q5_0),            BOTH(Q5_1),
    BOTH(Q8_0),           BOTH(Q4_K),           BOTH(Q5_K),            BOTH(Q6_K),
    BOTH(IQ4_NL),         BOTH(MXFP4),          BOTH(NVFP4),
    BOTH(Int4<32, false>), BOTH(Int4<64, false>), BOTH(Int4<128, false>),
    BOTH(Int4<32, true>),  BOTH(Int4<64, true>),  BOTH(Int4<128, true>),
};
