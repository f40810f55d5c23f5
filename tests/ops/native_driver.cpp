// The native kernels against plain loops through their C interface, without Python or torch: for emulated processors.
// To be linked with their sources, or with a library of them. Exits with 1 after the first case that fails, and with
// 77 where the kernels are not for this processor.
#include "native_driver.h"

static const int64_t KINDS[] = {FLOAT, BFLOAT};
static const char* NAMES[] = {"float32", "bfloat16"};

// ---- linear layers
static Numbers run_linear(const Packed& layer, Numbers& x, Numbers* add, long from, long rows, int64_t threads) {
  long outputs = layer.words.outputs, inputs = layer.words.inputs;
  Numbers y(x.kind, rows * outputs);
  Rows of_x = {x.data(from * inputs), inputs, x.kind}, of_y = {y.data(), outputs, y.kind}, of_add = {};
  if (add) of_add = {add->data(from * outputs), outputs, add->kind};
  LinearCall call = {&layer.words, of_x, of_add, of_y, rows, threads, nullptr};
  linear(&call);
  return y;
}

static void linear_case(long outputs, long inputs, long rows, int64_t kind, bool int8) {
  std::string what = name("linear%s %s %ld x %ld, %ld rows", int8 ? "8" : "", NAMES[kind], outputs, inputs, rows);
  Packed layer(random_numbers(BFLOAT, outputs * inputs), outputs, inputs, int8, rows % 2, 2);
  Numbers x = random_numbers(kind, rows * inputs), add = random_numbers(kind, rows * outputs);
  Doubles want = plain_linear(layer, x.plain(), rows);
  double tolerance = kind == BFLOAT ? 1e-2 : 1e-5;
  Numbers y = run_linear(layer, x, nullptr, 0, rows, 1);
  near(y, want, tolerance, what);
  for (long i = 0; i < y.count; i++) want[i] += add[i];
  y = run_linear(layer, x, &add, 0, rows, 1);
  near(y, want, tolerance, what + " + add");
  require(y == run_linear(layer, x, &add, 0, rows, 3), what, ": threads change bits");
  Numbers alone(kind, 0);
  for (long r = 0; r < rows; r++) {
    alone = run_linear(layer, x, &add, r, 1, 1);
    require(!memcmp(alone.data(), y.data(r * outputs), outputs * y.size()), what, ": row %ld alone differs", r);
  }
  x.set((rows - 1) * inputs + inputs / 2, NAN);
  Numbers spoiled = run_linear(layer, x, &add, 0, rows, 1);
  require(!memcmp(spoiled.data(), y.data(), (rows - 1) * outputs * y.size()), what, ": NaN spoils other rows");
  for (long o = 0; o < outputs; o++) require(isnan(spoiled[(rows - 1) * outputs + o]), what, ": NaN is lost");
}

// Whole numbers up to 127 are their own steps: nothing may be rounded.
static void exact_case(long outputs, long inputs, long rows, bool extreme) {
  std::string what = name("linear8 exact %ld x %ld%s", outputs, inputs, extreme ? " extreme" : "");
  auto whole = [&](long count) {
    Numbers x(FLOAT, count * inputs);
    for (long i = 0; i < x.count; i++) {
      long sign = integer(0, 1) ? 1 : -1;
      x.set(i, i % inputs % GROUP == 0 ? 127 : extreme ? 127 * (i < inputs ? 1 : sign) : integer(-127, 127));
    }
    return x;
  };
  Packed layer(whole(outputs), outputs, inputs, true, false, 1);
  Numbers x = whole(rows), y = run_linear(layer, x, nullptr, 0, rows, 1);
  for (long r = 0; r < rows; r++)
    for (long o = 0; o < outputs; o++) {
      double sum = 0;
      for (long k = 0; k < inputs; k++) sum += x[r * inputs + k] * layer.weight[o * inputs + k];
      require(y[r * outputs + o] == sum, what, ": %.9g, not %.9g", y[r * outputs + o], sum);
    }
}

static void rows_case(long outputs, long inputs) {
  std::string what = name("rows of %ld x %ld", outputs, inputs);
  std::vector<int64_t> all(outputs), absent = {0, outputs};
  for (long o = 0; o < outputs; o++) all[o] = o;
  Packed layer(random_numbers(BFLOAT, outputs * inputs), outputs, inputs, false, false, 2);
  Numbers back(BFLOAT, outputs * inputs), want(BFLOAT, outputs * inputs);
  require(linear_rows(&layer.words, all.data(), outputs, back.half.data(), 2) == 0, what, " are not found");
  require(back == layer.weight, what, " do not come back");
  require(linear_rows(&layer.words, absent.data(), 2, back.half.data(), 1) == 1, what, ": an absent one is found");
  Packed layer8(layer.weight, outputs, inputs, true, false, 2);
  require(linear_rows(&layer8.words, all.data(), outputs, back.half.data(), 2) == 0, what, " are not found (int8)");
  for (long o = 0; o < outputs; o++) {
    Doubles row;
    for (long k = 0; k < inputs; k++) row.push_back(layer.weight[o * inputs + k]);
    for (long k = 0; k < inputs; k += GROUP) {
      long count = inputs - k < GROUP ? inputs - k : GROUP;
      float worth = (float)to_steps(&row[k], count);
      for (long i = k; i < k + count; i++) want.set(o * inputs + i, (int)row[i] * worth);
    }
  }
  require(back == want, what, " do not come back as they were rounded (int8)");
  require(linear_rows(&layer8.words, absent.data(), 2, back.half.data(), 1) == 1, what, ": an absent one is found (int8)");
}

// ---- attention of spans
struct Shape {
  long heads_q, heads, dim;
};

struct Sequence {
  Shape shape;
  long n, rows;
  Numbers q, k, v, out;  // [rows, heads_q, dim], [heads, n, dim]; keys and values here as the numbers they stand for
  std::vector<float> lse, bias;
  std::vector<uint8_t> sees;
  std::vector<int8_t> levels[2];
  std::vector<uint16_t> scales[2];

  Sequence(Shape shape, long n, long rows, int64_t kind, bool int8, bool tree)
      : shape(shape), n(n), rows(rows), q(random_numbers(kind, rows * shape.heads_q * shape.dim)),
        k(random_numbers(kind, shape.heads * n * shape.dim)), v(random_numbers(kind, shape.heads * n * shape.dim)),
        out(kind, q.count), lse(rows * shape.heads_q) {
    for (long i = 0; tree && i < rows * rows; i++) sees.push_back(i % (rows + 1) == 0 || integer(0, 1));
    if (int8) round_to_levels(k, 0), round_to_levels(v, 1);
  }

  void round_to_levels(Numbers& x, int which) {
    for (long i = 0; i < x.count; i++) {
      if (i % shape.dim == 0) scales[which].push_back(narrow(0.01 + 0.005 * uniform()));
      levels[which].push_back((int8_t)integer(-127, 127));
      x.set(i, levels[which].back() * widen(scales[which].back()));
    }
  }

  void lift() {  // of the first slot's scores, by head
    for (long h = 0; h < shape.heads_q; h++) bias.push_back(4 * uniform());
  }

  Span span(long common = 0) {
    bool int8 = !scales[0].empty();
    void *keys = int8 ? (void*)levels[0].data() : k.data(), *values = int8 ? (void*)levels[1].data() : v.data();
    int64_t row = shape.dim, head = n * shape.dim;
    const uint8_t* mask = sees.empty() ? nullptr : sees.data();
    Span span = {q.data(), keys, values, out.data(), lse.data(), shape.heads_q * shape.dim, head, row, head, row, n,
                 rows, mask, common, int8 ? scales[0].data() : nullptr, int8 ? scales[1].data() : nullptr, n, n};
    span.sight.bias = bias.empty() ? nullptr : bias.data();
    return span;
  }

  void check(double scale, long window, const std::string& what) {
    check(scale, window, what, q.kind == FLOAT ? 1e-5 : 2e-2);
  }

  void check(double scale, long window, const std::string& what, double tolerance) {
    Doubles want, want_lse;
    Doubles queries = q.plain(), keys = k.plain(), values = v.plain();
    long dim = shape.dim, own = n - rows;
    for (long i = 0; i < rows * shape.heads_q; i++) {
      long row = i / shape.heads_q, head = i % shape.heads_q / (shape.heads_q / shape.heads) * n * dim;
      auto seen = [&](long slot) {
        if (!sees.empty()) return slot < own || sees[row * rows + slot - own];
        return slot <= own + row && (!window || slot > own + row - window);
      };
      double more = bias.empty() ? 0 : bias[i % shape.heads_q];
      want_lse.push_back(
          plain_attention(&queries[i * dim], &keys[head], &values[head], n, dim, scale, seen, want, 0, more));
    }
    near(out, want, tolerance, what);
    if (!lse.empty()) near(lse, want_lse, tolerance, what + ", lse");
  }
};

static void run_attend(Shape shape, int64_t kind, std::vector<Span> spans, double scale, long window, int64_t threads,
                       std::vector<Common> commons = {}) {
  AttentionCall call = {spans.data(), (int64_t)spans.size(), shape.heads_q, shape.heads, shape.dim, kind,
                        window, threads, scale, commons.data(), (int64_t)commons.size()};
  attend(&call);
}

static void attend_case(Shape shape, int64_t kind, bool int8, long window) {
  std::string what = name("attention %s%s %ld/%ld x %ld, window %ld", NAMES[kind], int8 ? " over int8" : "",
                          shape.heads_q, shape.heads, shape.dim, window);
  const long sizes[][2] = {{1, 1}, {5, 2}, {64, 1}, {70, 7}, {1060, 1}, {75, 14}};
  std::vector<Sequence> all;
  for (auto [n, rows] : sizes) all.emplace_back(shape, n, rows, kind, int8, !window && rows == 7);
  std::vector<Span> spans;
  for (size_t i = 0; i < all.size(); i += 2) all[i + 1].lift();
  for (Sequence& one : all) spans.push_back(one.span());
  double scale = 1 / sqrt(shape.dim);
  run_attend(shape, kind, spans, scale, window, 1);
  std::vector<Numbers> together;
  for (Sequence& one : all) {
    one.check(scale, window, what + name(", %ld slots", one.n));
    together.push_back(one.out);
  }
  run_attend(shape, kind, spans, scale, window, 3);
  for (size_t i = 0; i < all.size(); i++) require(all[i].out == together[i], what, ": threads change bits");
  for (size_t i = 0; i < all.size(); i++) {
    run_attend(shape, kind, {all[i].span()}, scale, window, 1);
    require(all[i].out == together[i], what, ": %ld slots alone differ", all[i].n);
  }
}

// Two spans over the same keys and values, whose first 128 slots are read for both at once.
static void common_case(Shape shape, int64_t kind) {
  std::string what = name("attention in common %s x %ld", NAMES[kind], shape.dim);
  Sequence a(shape, 200, 2, kind, false, false), b(shape, 200, 1, kind, false, false);
  b.k = a.k, b.v = a.v;
  run_attend(shape, kind, {a.span(), b.span()}, 0.2, 0, 1);
  a.check(0.2, 0, what), b.check(0.2, 0, what);
  Numbers before[] = {a.out, b.out};
  const int64_t members[] = {0, 1};
  run_attend(shape, kind, {a.span(128), b.span(128)}, 0.2, 0, 2, {{members, 2, 0, 128, 0}});
  require(a.out == before[0] && b.out == before[1], what, ": bits differ from those read apart");
}

// ---- attention over packed blocks
// A multiple m / 16 as float16, |m| below 2048.
static uint16_t sixteenths(int m) {
  int power = 0;
  while (m && abs(m) >> (power + 1)) power++;
  return m ? (uint16_t)((m < 0) << 15 | (power - 4 + 15) << 10 | ((abs(m) << 10 >> power) & 1023)) : 0;
}

// One side's first slots, packed: whole sixteenths, so that bfloat16 holds what they stand for.
struct PackedSide {
  std::vector<uint8_t> levels;
  std::vector<uint16_t> step, low;
  Sealed words;

  // Of lines [heads, lines, along]; `number(head, line, place)` is where a number stands in `x`.
  template <class Where>
  PackedSide(Numbers& x, long heads, long lines, long along, long bits, long group, const Where& number) {
    levels.resize(heads * lines * along * bits / 8), step.resize(heads * lines * along / group), low = step;
    for (long i = 0; i < heads * lines * along; i++) {
      long place = i % along, byte = i * bits / 8;  // a line is of whole bytes
      if (place % group == 0) {
        each = (int)integer(0, 3), lowest = (int)integer(-20, 20);
        step[i / group] = sixteenths(each), low[i / group] = sixteenths(lowest);
      }
      int level = (int)integer(0, (1 << bits) - 1);
      levels[byte] |= level << i * bits % 8;
      x.set(number(i / along / lines, i / along % lines, place), (level * each + lowest) / 16.0);
    }
    words = {levels.data(), step.data(), low.data(), lines * along * bits / 8, lines * along / group, 0, 8, bits, group};
  }

 private:
  int lowest = 0, each = 0;
};

static void sealed_case(Shape shape, long bits, long group, long block, long n, long rows) {
  std::string what = name("attention over %ld bits %ld/%ld x %ld, groups of %ld in %ld, %ld of %ld", bits, shape.heads_q,
                          shape.heads, shape.dim, group, block, rows, n);
  Sequence one(shape, n, rows, BFLOAT, false, false), other(shape, n + 70, 2, BFLOAT, false, false);
  long dim = shape.dim, blocks = (n - rows) / block, slots = n - rows > block ? n - rows - block : 0;
  PackedSide keys(one.k, shape.heads, blocks * dim, block, bits, group, [&](long head, long line, long place) {
    return (head * n + line / dim * block + place) * dim + line % dim;
  });
  PackedSide values(one.v, shape.heads, slots, dim, bits, group < dim ? group : dim,
                    [&](long head, long line, long place) { return (head * n + line) * dim + place; });
  Sides sides = {keys.words, values.words};
  sides.keys.slots = blocks * block, sides.keys.rows = block, sides.values.slots = slots;
  Span span = one.span();
  span.sealed = &sides;
  run_attend(shape, BFLOAT, {span}, 0.2, 0, 1);
  one.check(0.2, 0, what);
  Numbers alone = one.out;
  run_attend(shape, BFLOAT, {other.span(), span}, 0.2, 0, 3);
  require(one.out == alone, what, ": mates and threads change bits");
}

// The same of rows in two classes, all heads' numbers in a line; scales are powers of two.
struct ClassedSide {
  std::vector<uint8_t> upper, levels[2];
  std::vector<uint16_t> step[2], low[2], scale;
  Sealed words;

  ClassedSide(Numbers& x, Shape shape, long n, long slots, long block, const long (&bits)[2]) {
    long numbers = shape.heads * shape.dim, each_block = (block + 7) / 8;
    upper.resize((slots / block + 1) * each_block);
    for (long i = 0; i < numbers; i++) scale.push_back(sixteenths(16 >> integer(0, 2)));
    for (long slot = 0; slot < slots; slot++) {
      int which = (int)integer(0, 1), each = (int)integer(0, bits[which] == 8 ? 1 : 3), lowest = (int)integer(-20, 20);
      if (!which) upper[slot / block * each_block + slot % block / 8] |= 1 << slot % block % 8;
      step[which].push_back(sixteenths(each)), low[which].push_back(sixteenths(lowest));
      long from = (long)levels[which].size() * 8 / bits[which];
      levels[which].resize(levels[which].size() + numbers * bits[which] / 8);
      for (long i = 0; i < numbers; i++) {
        int level = (int)integer(0, bits[which] == 8 ? 230 : (1 << bits[which]) - 1), power = scale[i] >> 10;
        levels[which][(from + i) * bits[which] / 8] |= level << (from + i) * bits[which] % 8;
        x.set((i / shape.dim * n + slot) * shape.dim + i % shape.dim, ldexp((level * each + lowest) / 16.0, power - 15));
      }
    }
    words = {};
    words.levels = levels[0].data(), words.step = step[0].data(), words.low = low[0].data(), words.bits = bits[0];
    words.rest = levels[1].data(), words.rest_step = step[1].data(), words.rest_low = low[1].data();
    words.rest_bits = bits[1], words.upper = upper.data(), words.scale = scale.data();
    words.slots = slots, words.rows = block, words.group = numbers;
  }
};

static void classed_case(Shape shape, long high, long low, long block, long n, long rows) {
  std::string what = name("attention over %ld and %ld bits %ld/%ld x %ld in blocks of %ld, %ld of %ld", high, low,
                          shape.heads_q, shape.heads, shape.dim, block, rows, n);
  Sequence one(shape, n, rows, BFLOAT, false, false), other(shape, n + 70, 2, BFLOAT, false, false);
  long slots = (n - rows) / block * block;
  ClassedSide keys(one.k, shape, n, slots, block, {high, low}), values(one.v, shape, n, slots, block, {high, low});
  Sides sides = {keys.words, values.words};
  Span span = one.span();
  span.sealed = &sides;
  run_attend(shape, BFLOAT, {span}, 0.2, 0, 1);
  one.check(0.2, 0, what);
  Numbers alone = one.out;
  run_attend(shape, BFLOAT, {other.span(), span}, 0.2, 0, 3);
  require(one.out == alone, what, ": mates and threads change bits");
}

// ---- attention of many rows
static void run_prefill(Sequence& all, long from, long rows, int64_t threads) {
  long row = all.shape.heads_q * all.shape.dim, head = all.n * all.shape.dim;
  Span span = all.span();
  PrefillCall call = {all.q.data(from * row), span.k, span.v, all.out.data(from * row), row, all.shape.dim,
                      head, all.shape.dim, head, all.shape.dim, all.n - all.rows + from + rows, rows,
                      all.shape.heads_q, all.shape.heads, all.shape.dim, all.q.kind, threads, 0.2,
                      span.k_scale, span.v_scale, all.n, all.n};
  call.sight.bias = span.sight.bias;
  prefill(&call);
}

static bool alike = true;  // whether few rows and many are summed alike in bfloat16

static void prefill_case(Shape shape, int64_t kind, bool int8, long n, long rows) {
  std::string what = name("prefill %s%s %ld/%ld x %ld, %ld rows of %ld", NAMES[kind], int8 ? " over int8" : "",
                          shape.heads_q, shape.heads, shape.dim, rows, n);
  Sequence all(shape, n, rows, kind, int8, false);
  if (rows > 2) all.lift();
  run_prefill(all, 0, rows, 1);
  Numbers whole = all.out;
  all.lse.clear();  // it tells none
  all.check(0.2, 0, what);
  run_prefill(all, 0, rows, 3);
  require(all.out == whole, what, ": threads change bits");
  for (long from = 0, some = 1; from < rows; from += some, some = some * 3 + 1)
    run_prefill(all, from, from + some < rows ? some : rows - from, 1);
  require(all.out == whole, what, ": slices differ from the whole");
  run_attend(shape, kind, {all.span()}, 0.2, 0, 1);
  require(kind == FLOAT || !alike || all.out == whole, what, ": the kernel for few rows reads otherwise");
}

// Scores whose powers no float holds, before the largest is taken off.
static void sharp_case(int64_t kind) {
  Sequence all({4, 2, 64}, 90, 9, kind, false, false);
  for (long i = 0; i < all.q.count; i++) all.q.set(i, all.q[i] * 100);
  run_attend(all.shape, kind, {all.span()}, 0.2, 0, 1);
  all.check(0.2, 0, name("attention %s, sharp", NAMES[kind]), 2e-2);
  run_prefill(all, 0, all.rows, 1);
  all.check(0.2, 0, name("prefill %s, sharp", NAMES[kind]), 2e-2);
}

// ---- the head of a model
static void head_case(long outputs, long inputs, long rows, bool int8, double cap) {
  std::string what = name("head%s %ld x %ld, %ld rows", int8 ? " int8" : "", outputs, inputs, rows);
  Packed layer(random_numbers(BFLOAT, outputs * inputs), outputs, inputs, int8, rows % 2, 1);
  Numbers x = random_numbers(BFLOAT, rows * inputs), logits(FLOAT, rows * outputs);
  std::vector<float> norm;
  for (long i = 0; i < inputs; i++) norm.push_back((float)(1 + 0.3 * uniform()));
  std::vector<int64_t> best(rows, -1);
  float* to = logits.wide.data();
  HeadCall call = {&layer.words, {norm.data(), 1e-5}, cap, x.half.data(), inputs, rows, 2, to, nullptr, nullptr};
  head(&call);
  Doubles want = plain_linear(layer, plain_norm(x.plain(), norm, 1e-5), rows);
  for (double& logit : want) logit = cap ? cap * tanh(logit / cap) : logit;
  near(logits, want, 1e-2, what);
  call.logits = nullptr, call.best = best.data();
  head(&call);
  for (long r = 0; r < rows; r++) {
    long largest = 0;
    for (long o = 1; o < outputs; o++) largest = logits[r * outputs + o] > logits[r * outputs + largest] ? o : largest;
    require(best[r] == largest, what, ": the largest is %ld, not %ld", largest, (long)best[r]);
  }
}

// The argument says whose kernels these are.
int main(int count, char** words) {
  if (!supported()) return 77;
  alike = count < 2 || strcmp(words[1], "amx");
  require(layout() && *layout(), "layout");
  use_pool((void*)threads::parallel, (void*)threads::index, (void*)threads::count, (void*)threads::barrier);
  const long sizes[][2] = {{64, 32}, {1, 1}, {7, 5}, {65, 33}, {130, 257}, {20, 1031}};
  for (auto [outputs, inputs] : sizes) {
    for (long rows : {1, 2, 3, 4, 5, 6, 13})
      for (int64_t kind : KINDS)
        for (bool int8 : {false, true}) linear_case(outputs, inputs, rows, kind, int8);
    rows_case(outputs, inputs);
  }
  for (int64_t kind : KINDS)
    for (bool int8 : {false, true}) linear_case(70, 40, 103, kind, int8);
  for (bool extreme : {false, true}) exact_case(67, 1031, 9, extreme), exact_case(130, 64, 1, extreme);
  for (Shape shape : {Shape{4, 2, 64}, Shape{3, 1, 20}, Shape{2, 2, 7}, Shape{18, 1, 33}, Shape{1, 1, 128}})
    for (int64_t kind : KINDS) {
      attend_case(shape, kind, false, 0), attend_case(shape, kind, true, 50);
      common_case(shape, kind);
      const long rows[][2] = {{1, 1}, {2, 2}, {70, 5}, {64, 33}, {150, 76}};
      for (auto [n, some] : rows) prefill_case(shape, kind, some % 2 == 0, n, some);
    }
  for (Shape shape : {Shape{4, 2, 64}, Shape{9, 3, 32}, Shape{5, 1, 128}, Shape{20, 1, 96}})
    for (long bits : {2, 4}) {
      sealed_case(shape, bits, 32, 128, 1300, 1), sealed_case(shape, bits, 32, 64, 300, 3);
      sealed_case(shape, bits, 4, 8, 90, 2), sealed_case(shape, bits, 16, 48, 40, 1), sealed_case(shape, bits, 8, 40, 1, 1);
    }
  for (int64_t kind : KINDS) sharp_case(kind);
  for (bool int8 : {false, true}) {
    head_case(130, 64, 1, int8, 0), head_case(1000, 96, 7, int8, 20), head_case(65, 33, 2, int8, 5);
  }
  stack_cases();
  votes_cases();
  codes_cases();
  for (Shape shape : {Shape{4, 2, 64}, Shape{9, 3, 32}, Shape{5, 1, 128}, Shape{20, 1, 96}})
    for (long low : {2, 4, 8}) {
      classed_case(shape, 8, low, 100, 1300, 1), classed_case(shape, 4, low < 8 ? low : 4, 7, 300, 3);
      classed_case(shape, 2, 2, 200, 150, 2), classed_case(shape, low, 2, 65, 140, 1);
    }
  printf("all is well\n");
}
