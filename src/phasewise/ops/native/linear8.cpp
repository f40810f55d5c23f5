// Linear layers of int8 weights, packed so that one register holds four inputs of LANES outputs.
//
// Rows of inputs and of weights are quantised to 255 levels, each group of 128 consecutive numbers by a scale of its
// own: one that is far larger than the others, as models have them, costs only its group precision. Products are summed
// exactly within a group, and the groups' sums as floats, in their order:
//
//   y[o] = sum over groups g of (sum of weights * inputs, both whole) * (scale of o and g * scale of the inputs in g)
//
// Inputs are signed bytes. So are weights, but where the instructions take one side unsigned: there OFFSET is added to
// them, and what this adds to a group's sum, OFFSET times the sum of its inputs, is taken off before.
#include <math.h>

#include "parts.h"
#include "tile.h"

namespace {

constexpr int OFFSET = LANES == 4 || MATRIX_UNIT ? 0 : 128;
constexpr long IN_GROUP = 128;  // numbers of a group; the last one of a row may have fewer

struct Group {
  float worth;    // of one step; NaN if it holds an infinity or NaN, which then spoils its own row and no other
  int32_t begin;  // what its sums begin with
};

long groups_of(long inputs) { return (inputs + IN_GROUP - 1) / IN_GROUP; }

struct Int8 {
  typedef I Acc;
  typedef int32_t Word;
  static constexpr long GROUP = IN_GROUP / 4;  // in words

  struct Inputs {
    const Word* x;
    long stride;
    const Group* group;
    long groups;         // of a row
    const float* scale;  // of the weights, [panels, groups, WIDTH]

    Inputs from(long row, long word) const {
      long later = word / GROUP;
      return {x + row * stride + word, stride, group + row * groups + later, groups, scale + later * WIDTH};
    }
    Inputs of_panel(long panel) const { return {x, stride, group, groups, scale + panel * groups * WIDTH}; }
  };

  static I begin(const Inputs& in, bool, const F&) { return OFFSET ? splat(in.group->begin) : I{}; }
  static F scale(const Inputs& in, long j) { return load<F>(in.scale + j * LANES); }
  static F end(const Inputs& in, I acc, F scale, F sum) {
    return fused(__builtin_convertvector(acc, F), scale * splat(in.group->worth), sum);
  }

#if MATRIX_UNIT
  template <int C, int A, int B> static void add() { add_bytes<C, A, B>(); }
#else

  template <int R, int W> static void step(I (&acc)[R][W], const int32_t* weights, const Word* x, long stride) {
    I w[W];
    for (int j = 0; j < W; j++) w[j] = load<I>(weights + j * LANES);
    for (int r = 0; r < R; r++) {
      I in = splat(x[r * stride]);
      for (int j = 0; j < W; j++) acc[r][j] = dot(acc[r][j], in, w[j]);
    }
  }
#endif
};

// The largest magnitude, NaN if there is an infinity or NaN among them.
template <class T> float largest(const T* x, long count) {
  I top = {};
  long k = 0;
  for (; k + LANES <= count; k += LANES) {
    I bits = (I)load_floats(x + k) & 0x7fffffff;  // in the order of the magnitudes; those of NaN are the largest
    top = bits > top ? bits : top;
  }
  int32_t most_bits = most(top);
  for (; k < count; k++) {
    float v = fabsf(to_float(x[k]));
    int32_t bits;
    memcpy(&bits, &v, 4);
    most_bits = bits > most_bits ? bits : most_bits;
  }
  float found;
  memcpy(&found, &most_bits, 4);
  return most_bits >= 0x7f800000 ? NAN : found;
}

// x * inverse to the nearest integers, which fit a byte, plus `offset`; returns the integers' sum.
template <class T> int32_t round_all(const T* x, long count, float inverse, int offset, uint8_t* out) {
  const int32_t zero = 0x4b400000;  // MAGIC's bits
  I all = {};
  long k = 0;
  for (; k + LANES <= count; k += LANES) {
    I rounded = (I)fused(load_floats(x + k), splat(inverse), splat(MAGIC)) - zero;
    store_bytes(out + k, rounded + offset);
    all += rounded;
  }
  int32_t total = OFFSET ? sum(all) : 0;
  for (; k < count; k++) {
    float shifted = fmaf(to_float(x[k]), inverse, MAGIC);
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    out[k] = (uint8_t)(bits - zero + offset);
    total += bits - zero;
  }
  return total;
}

// Numbers to bytes, and `room` bytes filled up with zeros. A largest one below 1e-35 is taken for nothing.
template <class T> Group quantise(const T* x, long count, long room, int offset, uint8_t* out) {
  float top = largest(x, count);
  int32_t total = round_all(x, count, top >= 1e-35f ? 127 / top : 0, offset, out);
  memset(out + count, offset, room - count);
  return {top / 127, -OFFSET * total};
}

// A group of a row of `inputs` numbers to its place in the bytes of the row, which the last group fills up.
Group quantise(const Rows& rows, long row, long inputs, long group, int offset, uint8_t* bytes) {
  long from = group * IN_GROUP, at = row * rows.stride + from, left = inputs - from;
  bool last = left <= IN_GROUP;
  long count = last ? left : IN_GROUP, room = last ? words_of(inputs, 4) * 4 - from : IN_GROUP;
  return rows.kind == FLOAT ? quantise((const float*)rows.data + at, count, room, offset, bytes + from)
                            : quantise((const bf16*)rows.data + at, count, room, offset, bytes + from);
}

long panel_bytes(long inputs) { return words_of(inputs, 4) * WIDTH * 4; }

// Where the scale of an output and a group lies.
long scale_at(long output, long group, long groups) {
  return (output / WIDTH * groups + group) * WIDTH + output % WIDTH;
}

// weight [outputs, inputs] -> packed and scales of the part
void pack(const Rows& weight, const WeightsPart& to, long inputs, int threads) {
  long words = words_of(inputs, 4), groups = groups_of(inputs);
  uint8_t* rounded = (uint8_t*)scratch(OF_LINEAR, threads * words * 4);
  together(threads, [&](int thread, int all) {
    uint8_t* row = rounded + thread * words * 4;
    for (long o = thread; o < to.outputs; o += all) {
      for (long g = 0; g < groups; g++)
        ((float*)to.scales)[scale_at(o, g, groups)] = quantise(weight, o, inputs, g, OFFSET, row).worth;
      int32_t* panel = (int32_t*)to.packed + o / WIDTH * words * WIDTH;
      for (long k = 0; k < words; k++) panel[word_at(k, o % WIDTH)] = load<int32_t>(row + k * 4);
    }
  });
}

void row_of(const WeightsPart& part, long inputs, long which, bf16* out) {
  const uint8_t* panel = (const uint8_t*)part.packed + which / WIDTH * words_of(inputs, 4) * WIDTH * 4;
  for (long k = 0; k < inputs; k++) {
    float scale = part.scales[scale_at(which, k / IN_GROUP, groups_of(inputs))];
    put(out + k, (int8_t)(panel[word_at(k / 4, which % WIDTH) * 4 + k % 4] - OFFSET) * scale);
  }
}

long room_of(const LinearCall& call) {
  long inputs = call.weights->inputs;
  return call.rows * (words_of(inputs, 4) * 4 + groups_of(inputs) * sizeof(Group));
}

void prepare(const LinearCall& call, void* room, int thread, int all) {
  const long inputs = call.weights->inputs, words = words_of(inputs, 4), groups = groups_of(inputs);
  int32_t* in = (int32_t*)room;
  Group* group = (Group*)(in + call.rows * words);
  for (long i = thread; i < call.rows * groups; i += all) {
    long row = i / groups;
    group[i] = quantise(call.x, row, inputs, i % groups, 0, (uint8_t*)(in + row * words));
  }
}

void multiply_part(const PartProduct& product) {
  const long width = product.call.weights->inputs, words = words_of(width, 4);
  const int32_t* in = (const int32_t*)product.inputs;
  const Group* group = (const Group*)(in + product.call.rows * words);
  multiply<Int8>(product, words, {in, words, group, groups_of(width), product.part.scales});
}

}  // namespace

const Inputs INT8_INPUTS = {room_of, prepare};
const Form INT8_FORM = {INPUTS_INT8, panel_bytes, pack, multiply_part, row_of};
