// All layers of a small decoder in one call, against the same operations one by one.
#include "native_driver.h"

static const long HIDDEN = 48, HEADS_Q = 6, HEADS = 2, DIM = 20, INNER = 70, LAYERS = 2, POSITIONS = 200;
static const long QKV = (HEADS_Q + 2 * HEADS) * DIM, TURNED = 12;  // of a head's numbers
static const double EPS = 1e-5, SCALE = 0.2;

struct Block {  // one layer
  std::vector<float> before_attention, before_mlp, heads;
  Packed qkv, o, gate_up, down;
  bool turns;
  long window;

  static Packed product(long outputs, long inputs, bool int8) {
    return {random_numbers(BFLOAT, outputs * inputs, 0.3), outputs, inputs, int8, outputs == QKV, 2};
  }
  static std::vector<float> norm(long count) {
    std::vector<float> weight;
    for (long i = 0; i < count; i++) weight.push_back((float)(1 + 0.3 * uniform()));
    return weight;
  }
  Block(bool int8, bool normed_heads, bool turns, long window)
      : before_attention(norm(HIDDEN)), before_mlp(norm(HIDDEN)), heads(norm(normed_heads ? QKV - HEADS * DIM : 0)),
        qkv(product(QKV, HIDDEN, int8)), o(product(HIDDEN, HEADS_Q * DIM, int8)),
        gate_up(product(2 * INNER, HIDDEN, int8)), down(product(HIDDEN, INNER, int8)), turns(turns), window(window) {}

  Layer words() {
    return {{before_attention.data(), EPS}, {before_mlp.data(), EPS}, {heads.empty() ? nullptr : heads.data(), EPS},
            &qkv.words, &o.words, &gate_up.words, &down.words, qkv.int8, turns ? 0 : -1, window, SCALE};
  }
};

struct Slots {  // keys or values of one span in one layer: [HEADS, n, DIM]
  long n;
  Numbers half;
  std::vector<int8_t> levels;
  std::vector<uint16_t> scales;

  Slots(long n, bool int8) : n(n), half(random_numbers(BFLOAT, int8 ? 0 : HEADS * n * DIM)) {
    for (long i = 0; int8 && i < HEADS * n * DIM; i++) levels.push_back((int8_t)integer(-127, 127));
    for (long i = 0; int8 && i < HEADS * n; i++) scales.push_back(narrow(0.01 + 0.005 * uniform()));
  }
  double operator[](long i) const { return levels.empty() ? half[i] : levels[i] * (double)widen(scales[i / DIM]); }
  int64_t data() { return levels.empty() ? (int64_t)half.data() : (int64_t)levels.data(); }
  int64_t of_scales() { return levels.empty() ? 0 : (int64_t)scales.data(); }
  Doubles plain() const {
    Doubles all;
    for (long i = 0; i < HEADS * n * DIM; i++) all.push_back((*this)[i]);
    return all;
  }
};

struct Turning {
  Numbers cos, sin;
  Turning() : cos(BFLOAT, POSITIONS * TURNED), sin(BFLOAT, POSITIONS * TURNED) {
    for (long i = 0; i < cos.count; i++) {
      double angle = i / TURNED * pow(100.0, -2.0 * (i % (TURNED / 2)) / TURNED);
      cos.set(i, ::cos(angle)), sin.set(i, i % TURNED < TURNED / 2 ? -::sin(angle) : ::sin(angle));
    }
  }
};

// Queries or keys [heads, DIM] of one row, normed and turned.
static void plain_turn(const Block& block, const Turning& turn, long position, double* row) {
  for (long h = 0; h < HEADS_Q + HEADS; h++) {
    double* head = row + h * DIM;
    if (!block.heads.empty()) {
      std::vector<float> weight(block.heads.begin() + h * DIM, block.heads.begin() + (h + 1) * DIM);
      Doubles normed = plain_norm(Doubles(head, head + DIM), weight, EPS);
      memcpy(head, normed.data(), DIM * sizeof(double));
    }
    if (!block.turns) continue;
    Doubles before(head, head + DIM);
    for (long i = 0; i < TURNED; i++) {
      long at = position * TURNED + i;
      head[i] = rounded(before[i] * turn.cos[at] + before[(i + TURNED / 2) % TURNED] * turn.sin[at]);
    }
  }
}

static void plain_place(const double* from, bool int8, double* to) {
  Doubles row(from, from + DIM);
  double worth = 1;
  if (int8) {
    double top = 0;
    for (double x : row) top = fabs(x) > top ? fabs(x) : top;
    worth = rounded(top / 127);
    for (double& x : row) x = fmin(fmax(rint(x / worth), -127), 127);
  }
  for (long d = 0; d < DIM; d++) to[d] = row[d] * worth;
}

static Doubles plain_product(const Packed& layer, const Doubles& x, long rows, const Doubles* add) {
  Doubles y = plain_linear(layer, x, rows);
  for (size_t i = 0; i < y.size(); i++) y[i] = rounded(y[i] + (add ? (*add)[i] : 0));
  return y;
}

struct Reader {  // one span
  long n, rows;
};

// One layer on x [rows, HIDDEN]; `kept` are keys and values, span by span.
static void plain_layer(const Block& block, const Turning& turn, const std::vector<Reader>& readers,
                        const std::vector<int64_t>& positions, bool int8, std::vector<Doubles>& kept, Doubles& x) {
  long rows = positions.size(), row = 0;
  Doubles qkv = plain_product(block.qkv, plain_norm(x, block.before_attention, EPS), rows, nullptr), read;
  for (size_t b = 0; b < readers.size(); b++) {
    long n = readers[b].n, own = n - readers[b].rows, first = row;
    for (; row < first + readers[b].rows; row++) {
      plain_turn(block, turn, positions[row], &qkv[row * QKV]);
      for (long i = 0; i < 2 * HEADS; i++) {
        double* to = &kept[2 * b + i / HEADS][(i % HEADS * n + own + row - first) * DIM];
        plain_place(&qkv[row * QKV + (HEADS_Q + i) * DIM], int8, to);
      }
    }
    for (long r = 0; r < readers[b].rows; r++)
      for (long h = 0; h < HEADS_Q; h++) {
        auto sees = [&](long j) { return j <= own + r && (!block.window || j > own + r - block.window); };
        const double *q = &qkv[(first + r) * QKV + h * DIM], *k = &kept[2 * b][h / (HEADS_Q / HEADS) * n * DIM];
        const double* v = &kept[2 * b + 1][h / (HEADS_Q / HEADS) * n * DIM];
        plain_attention(q, k, v, n, DIM, SCALE, sees, read);
      }
  }
  for (double& value : read) value = rounded(value);
  x = plain_product(block.o, read, rows, &x);
  Doubles both = plain_product(block.gate_up, plain_norm(x, block.before_mlp, EPS), rows, nullptr), gated;
  for (long i = 0; i < rows * INNER; i++) {
    const double* gate = &both[i / INNER * 2 * INNER + i % INNER];
    gated.push_back(rounded(*gate / (1 + exp(-*gate)) * gate[INNER]));
  }
  x = plain_product(block.down, gated, rows, &x);
}

static void stack_case(std::vector<Block>& blocks, const std::vector<Reader>& readers, bool int8, const char* what) {
  Turning turn;
  std::vector<int64_t> positions;
  std::vector<Slots> slots;  // [layers, spans, 2]
  std::vector<Layer> layers;
  for (Reader r : readers)
    for (long i = 0; i < r.rows; i++) positions.push_back(r.n - r.rows + i);
  long rows = positions.size();
  int64_t vocab = rows + 3;
  Numbers x = random_numbers(BFLOAT, rows * HIDDEN), table = random_numbers(BFLOAT, vocab * HIDDEN);
  std::vector<int64_t> tokens;
  Doubles want, embeddings = table.plain();
  for (long i = 0; i < rows; i++) {
    tokens.push_back(i * 5 % vocab);
    for (long k = 0; k < HIDDEN; k++) want.push_back(0.5 * embeddings[tokens[i] * HIDDEN + k]);
  }
  std::vector<std::vector<int64_t>> planes(readers.size());
  for (Block& block : blocks) {
    layers.push_back(block.words());
    for (Reader r : readers) slots.emplace_back(r.n, int8), slots.emplace_back(r.n, int8);
  }
  std::vector<Doubles> kept;
  for (size_t i = 0; i < slots.size(); i += 2) {
    Slots &k = slots[i], &v = slots[i + 1];
    std::vector<int64_t>& plane = planes[i / 2 % readers.size()];
    plane.insert(plane.end(), {k.data(), v.data(), k.n * DIM, k.of_scales(), v.of_scales(), k.n});
    kept.push_back(k.plain()), kept.push_back(v.plain());
  }
  std::vector<StackSpan> spans;
  for (size_t b = 0; b < readers.size(); b++)
    spans.push_back({readers[b].n, readers[b].rows, nullptr, 0, planes[b].data()});
  ::Turn turns = {turn.cos.half.data(), turn.sin.half.data(), TURNED};
  Embeddings looked_up = {nullptr, table.half.data(), 0, vocab, 0.5};
  StackCall call = {layers.data(), &looked_up, LAYERS, HIDDEN, HEADS_Q, HEADS, DIM, INNER, x.half.data(), rows, 2,
                    &turns, tokens.data(), positions.data(), spans.data(), (int64_t)spans.size(), nullptr, 0};
  std::swap(tokens[0], vocab);
  require(stack(&call) == 1, what, ": an absent token has an embedding");
  std::swap(tokens[0], vocab);
  require(stack(&call) == 0, what, ": a token has no embedding");
  double tolerance = int8 ? 0.15 : 5e-2;  // where sums round otherwise, whole steps differ from there on
  for (long i = 0; i < LAYERS; i++) {
    std::vector<Doubles> own(kept.begin() + i * 2 * spans.size(), kept.begin() + (i + 1) * 2 * spans.size());
    plain_layer(blocks[i], turn, readers, positions, int8, own, want);
    for (size_t p = 0; p < own.size(); p++)
      near(slots[i * 2 * spans.size() + p], own[p], tolerance, name("%s, layer %ld, slots %ld", what, i, (long)p));
  }
  near(x, want, tolerance, what);
}

void stack_cases() {
  std::vector<Block> plain, windowed, rounded;
  for (long i = 0; i < LAYERS; i++) {
    plain.emplace_back(false, i == 1, true, 0);
    windowed.emplace_back(true, false, i == 0, i * 40);
    rounded.emplace_back(true, false, true, 0);
  }
  stack_case(plain, {{1, 1}, {90, 3}, {130, 70}}, false, "stack");
  stack_case(windowed, {{1, 1}, {150, 9}, {65, 1}}, true, "stack of int8 with a window");
  stack_case(rounded, {{5, 2}, {100, 70}}, true, "stack of int8 with a slice");
}
