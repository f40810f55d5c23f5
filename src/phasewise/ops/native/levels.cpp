// Linear layers of weights of few bits: panels made of a file's blocks, and their forms.
#include "level_inputs.h"
#include "level_sparse.h"
#if LANES == 8
#include "level_avx2.h"
#elif MATRIX_UNIT
#include "level_unit.h"
#else
#include "level_product.h"
#endif

namespace {

// A block of an output of the weight, as it lies in the file, into its panel.
template <class Kind> void pack_block(const uint8_t* block, uint8_t* to, long output) {
  if constexpr (Kind::SPARSE) {
    put_sparse<Kind>(block, to, output);
  } else {
    uint8_t levels[Kind::INPUTS];
    Kind::levels(block, levels);
    Kind::Scales::put(block, to, output);
    for (long i = 0; i < SECTIONS<Kind>; i++)
      if constexpr (Kind::CODES)
        put_codes<Kind>(levels + i * SECTION, to + HEAD<Kind> + i * SECTION_BYTES<Kind>, output);
      else
        put_section<Kind>(levels + i * SECTION, to + HEAD<Kind> + i * SECTION_BYTES<Kind>, output);
  }
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
      if constexpr (Kind::CODES) put_codebook<Kind>(raw, panel);
      uint8_t* first = panel + PANEL_START<Kind>;
      raw += ROW_START<Kind>;
      for (long b = 0; b < count; b++)
        for (long o = 0; o < some; o++)
          pack_block<Kind>(raw + o * blocks.stride + b * Kind::BYTES, first + b * PANEL_BLOCK<Kind>, o);
    }
  });
}

// What the level of an input of a section is worth.
template <class Kind> float value_at(const uint8_t* panel, const uint8_t* section, long output, long input) {
  if constexpr (Kind::SPARSE) {
    return sparse_at<Kind>(section, output, input);
  } else if constexpr (Kind::CODES) {
    return codebook_value(panel, code_at<Kind>(section, output, input));
  } else {
    const int level = level_at<Kind>(section, output, input);
    if constexpr (Kind::E4M3) return from_e4m3(level);
    return (float)value_of<Kind>(level);
  }
}

template <class Kind> void unpack_row(const WeightsPart& part, long inputs, long which, bf16* out) {
  const uint8_t* panel = (const uint8_t*)part.packed + which / WIDTH * level_panel_bytes<Kind>(inputs);
  const long output = which % WIDTH, at = output / LANES * LANES;
  for (long from = 0; from < inputs; from += Kind::GROUP, out += Kind::GROUP) {
    F d, m = {};
    panel_scales<Kind>(panel, from / Kind::GROUP, at, d, m);
    for (long i = 0; i < Kind::GROUP; i++) {
      const uint8_t* section = panel + section_at<Kind>((from + i) / SECTION);
      const float value = value_at<Kind>(panel, section, output, (from + i) % SECTION);
      const float found = value * d[output - at] + m[output - at];  // the product is exact, or m nought
      out[i] = narrow(part.whole ? found * (float)part.whole : found);
    }
  }
}

template <class Kind> constexpr Form pairs_form() {
#if LANES == 8
  constexpr int INPUTS = FloatLevels<Alike<Kind>>::NIBBLES ? INPUTS_NIBBLES : INPUTS_PAIRS;
  return {INPUTS, level_panel_bytes<Kind>, pack_blocks<Kind>, multiply_floats<Kind>, unpack_row<Kind>};
#elif MATRIX_UNIT
  return {INPUTS_PAIRS, level_panel_bytes<Kind>, pack_blocks<Kind>, unit_pairs<Kind>, unpack_row<Kind>};
#else
  return {INPUTS_PAIRS, level_panel_bytes<Kind>, pack_blocks<Kind>, multiply_pairs<Kind>, unpack_row<Kind>};
#endif
}

template <class Kind> constexpr Form bytes_form() {
  if constexpr (Kind::E4M3 || Kind::FLOATS) {
    return pairs_form<Kind>();
  } else {
    constexpr long GROUP = IN_GROUP_OF<Kind>;
    constexpr int INPUTS = GROUP == 32 ? INPUTS_BYTES_32 : GROUP == 64 ? INPUTS_BYTES_64 : INPUTS_BYTES_128;
#if MATRIX_UNIT
    return {INPUTS, level_panel_bytes<Kind>, pack_blocks<Kind>, unit_bytes<Kind>, unpack_row<Kind>};
#else
    return {INPUTS, level_panel_bytes<Kind>, pack_blocks<Kind>, multiply_bytes<Kind>, unpack_row<Kind>};
#endif
  }
}

#if LANES != 8
long no_room(const LinearCall&) { return 0; }
void no_inputs(const LinearCall&, void*, int, int) {}
#endif

}  // namespace

#if LANES == 8
const Inputs PAIRS_INPUTS = {floats_room, prepare_floats<false>};
const Inputs NIBBLES_INPUTS = {floats_room, prepare_floats<true>};
#else
const Inputs PAIRS_INPUTS = {pairs_room, prepare_pairs};
const Inputs NIBBLES_INPUTS = {no_room, no_inputs};
#endif
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
    BOTH(Fp8<32>),         BOTH(Fp8<128>),
    BOTH(Codes<4, 128>),   BOTH(Codes<3, 128>),   BOTH(Codes<2, 128>),
    BOTH(Codes<4, 64>),    BOTH(Codes<3, 64>),    BOTH(Codes<2, 64>),
    BOTH(Sparse<2, 4>),    BOTH(Sparse<1, 4>),    BOTH(Sparse<1, 8>),
};
