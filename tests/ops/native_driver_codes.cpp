// Weights of few bits whose values stand in a codebook of their panel, against plain loops.
#include "native_driver.h"

namespace {

// Scales are powers of two, which float16 and bfloat16 hold: all values are exact.
void codes_case(long bits, long group, long number, long outputs, long inputs) {
  std::string what = name("codes of %ld bits, groups of %ld", bits, group);
  const int64_t form = WEIGHTS_LEVELS + 2 * (FIRST_CODES + number);
  const long start = 2 << bits, block = group * bits / 8 + 2, row = start + inputs / group * block;
  require(panel_bytes(form, inputs) == 64 + 64 * (row - start), what, ": size of a panel");
  std::vector<uint8_t> raw(outputs * row);
  Doubles weight(outputs * inputs);
  std::vector<uint16_t> book(1 << bits);
  for (long o = 0; o < outputs; o++) {
    for (uint16_t& value : book)
      if (o % 64 == 0) value = narrow(uniform() * 3);
    memcpy(&raw[o * row], book.data(), start);
    for (long g = 0; g < inputs / group; g++) {
      uint8_t* at = &raw[o * row + start + g * block];
      const int power = (int)integer(-6, 2);
      const uint16_t scale = (uint16_t)(power + 15) << 10;  // float16
      memcpy(at, &scale, 2);
      for (long i = 0; i < group; i++) {
        const long level = integer(0, (1 << bits) - 1);
        for (long b = 0, bit = i * bits; b < bits; b++, bit++) at[2 + bit / 8] |= (level >> b & 1) << bit % 8;
        weight[o * inputs + g * group + i] = ldexp(widen(book[level]), power);
      }
    }
  }
  std::vector<char> packed(panels(outputs) * panel_bytes(form, inputs) + 64);
  char* lined = packed.data() + (64 - (uintptr_t)packed.data() % 64) % 64;
  WeightsPart part = {form, lined, nullptr, outputs};
  Weights words = {&part, 1, nullptr, outputs, inputs};
  Rows from = {raw.data(), row, 2};
  linear_pack(&from, &part, inputs, 2);
  std::vector<int64_t> which;
  for (long o = 0; o < outputs; o++) which.push_back(o);
  std::vector<uint16_t> found(outputs * inputs);
  require(!linear_rows(&words, which.data(), outputs, found.data(), 1), what, ": rows");
  for (long i = 0; i < outputs * inputs; i++)
    require(widen(found[i]) == weight[i], what, ": weight %ld is %.9g, not %.9g", i, widen(found[i]), weight[i]);
  Numbers first(FLOAT, 0);
  for (long rows : {1, 2, 3, 5, 9, 40}) {
    Numbers x(FLOAT, rows * inputs), y(FLOAT, rows * outputs);
    for (long i = 0; i < x.count; i++) x.set(i, i < inputs && rows > 1 ? first[i] : rounded(uniform()));
    LinearCall call = {};
    call.weights = &words, call.rows = rows, call.threads = 2;
    call.x = {x.data(), inputs, FLOAT}, call.y = {y.data(), outputs, FLOAT};
    linear(&call);
    Doubles want(rows * outputs);
    for (long r = 0; r < rows; r++)
      for (long o = 0; o < outputs; o++)
        for (long k = 0; k < inputs; k++) want[r * outputs + o] += x[r * inputs + k] * weight[o * inputs + k];
    near(y, want, 1e-5, what + name(", %ld rows", rows));
    static std::vector<float> alone;
    if (rows == 1) first = x, alone = y.wide;
    require(!memcmp(alone.data(), y.data(), outputs * 4), what, ": a row among %ld differs", rows);
  }
}

}  // namespace

void codes_cases() {
  long number = 0;
  for (long group : {128, 64})
    for (long bits : {4, 3, 2}) codes_case(bits, group, number++, 131, 256 + group);
}
