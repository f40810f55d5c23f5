// All layers of a small decoder in one call, against the same operations one by one.
#include "native_driver.h"

static const long HIDDEN = 48, HEADS_Q = 6, HEADS = 2, DIM = 20, INNER = 70, OF_EXPERT = 37, LAYERS = 2, POSITIONS = 200;
static const long QKV = (HEADS_Q + 2 * HEADS) * DIM, TURNED = 12;  // of a head's numbers
static const double EPS = 1e-5, SCALE = 0.2;

// What layers differ in.
struct Kind {
  bool heads, whole, turns, before, after;  // norms of queries and keys, rotation, norms before and after each half
  long window;
  int64_t activation;
  double softcap;
  long experts, top;
  bool renormalise;
};

struct Block {  // one layer
  Kind kind;
  std::vector<float> norms[4], heads;
  Packed qkv, o, gate_up, down, router;
  std::vector<Packed> of_experts;  // gate and up, down, of one after the other
  std::vector<const Weights*> products;
  std::vector<uint8_t> loads, wanted;
  Experts experts;

  static Packed product(long outputs, long inputs, bool int8) {
    return {random_numbers(BFLOAT, outputs * inputs, 0.3), outputs, inputs, int8, outputs == QKV, 2};
  }
  static std::vector<float> norm(long count) {
    std::vector<float> weight;
    for (long i = 0; i < count; i++) weight.push_back((float)(1 + 0.3 * uniform()));
    return weight;
  }
  Block(bool int8, const Kind& kind)
      : kind(kind), heads(norm(kind.heads ? QKV - HEADS * DIM : 0)), qkv(product(QKV, HIDDEN, int8)),
        o(product(HIDDEN, HEADS_Q * DIM, int8)), gate_up(product(2 * INNER, HIDDEN, int8)),
        down(product(HIDDEN, INNER, int8)), router(product(kind.experts ? kind.experts : 1, HIDDEN, false)),
        loads(kind.experts), wanted(kind.experts) {
    for (long i = 0; i < 4; i++) norms[i] = norm((i % 2 ? kind.after : kind.before) ? HIDDEN : 0);
    of_experts.reserve(2 * kind.experts);
    for (long e = 0; e < kind.experts; e++) {
      of_experts.push_back(product(2 * OF_EXPERT, HIDDEN, int8));
      of_experts.push_back(product(HIDDEN, OF_EXPERT, int8));
    }
  }

  Norm words(long i) { return {norms[i].empty() ? nullptr : norms[i].data(), EPS}; }
  Layer words() {
    products.clear();
    for (Packed& each : of_experts) products.push_back(&each.words);
    experts = {&router.words, products.data(), kind.experts, kind.top, kind.renormalise, loads.data()};
    bool mixed = kind.experts;
    return {words(0), words(1), words(2), words(3), {heads.empty() ? nullptr : heads.data(), EPS}, kind.whole,
            &qkv.words, &o.words, mixed ? nullptr : &gate_up.words, mixed ? nullptr : &down.words,
            mixed ? &experts : nullptr, {kind.activation, 0, 0}, kind.turns ? 0 : -1, kind.window, SCALE,
            kind.softcap};
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
  for (long of_keys = 0; block.kind.whole && of_keys < 2; of_keys++) {
    long from = of_keys ? HEADS_Q * DIM : 0, to = of_keys ? (HEADS_Q + HEADS) * DIM : HEADS_Q * DIM;
    std::vector<float> weight(block.heads.begin() + from, block.heads.begin() + to);
    Doubles normed = plain_norm(Doubles(row + from, row + to), weight, EPS);
    memcpy(row + from, normed.data(), normed.size() * sizeof(double));
  }
  for (long h = 0; h < HEADS_Q + HEADS; h++) {
    double* head = row + h * DIM;
    if (!block.heads.empty() && !block.kind.whole) {
      std::vector<float> weight(block.heads.begin() + h * DIM, block.heads.begin() + (h + 1) * DIM);
      Doubles normed = plain_norm(Doubles(head, head + DIM), weight, EPS);
      memcpy(head, normed.data(), DIM * sizeof(double));
    }
    if (!block.kind.turns) continue;
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

static Doubles plain_gated(const Kind& kind, const Doubles& both, long inner) {
  Doubles gated;
  for (size_t i = 0; i < both.size() / 2; i++) {
    const double* gate = &both[i / inner * 2 * inner + i % inner];
    double x = *gate, y = x * erfc(-x / sqrt(2.0)) / 2;
    if (kind.activation == SILU) y = x / (1 + exp(-x));
    if (kind.activation == GELU_TANH) y = x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    if (kind.activation > GELU) y = x > 0 ? x : 0;
    gated.push_back(rounded(y * gate[inner]));
  }
  return gated;
}

// One row's sum over its experts.
static Doubles plain_mixture(Block& block, const Doubles& row) {
  const Kind& kind = block.kind;
  Doubles chances = plain_product(block.router, row, 1, nullptr), weights, y(HIDDEN);
  double total = 0, sum = 0;
  for (double& chance : chances) total += chance = exp(chance);
  std::vector<long> chosen;
  for (long i = 0; i < kind.top; i++) {
    long best = 0;
    for (long e = 0; e < kind.experts; e++) best = chances[e] > chances[best] ? e : best;
    chosen.push_back(best), weights.push_back(chances[best] / total);
    sum += weights[i], chances[best] = -1;
  }
  for (long i = 0; i < kind.top; i++) {
    Packed* expert = &block.of_experts[2 * chosen[i]];
    Doubles gated = plain_gated(kind, plain_product(expert[0], row, 1, nullptr), OF_EXPERT);
    Doubles own = plain_product(expert[1], gated, 1, nullptr);
    for (long k = 0; k < HIDDEN; k++) y[k] += own[k] * weights[i] / (kind.renormalise ? sum : 1);
    block.wanted[chosen[i]] = 1;
  }
  return y;
}

static Doubles plain_before(const std::vector<float>& norm, const Doubles& x) {
  return norm.empty() ? x : plain_norm(x, norm, EPS);
}

static void plain_after(const std::vector<float>& norm, Doubles y, Doubles& x) {
  for (double& value : y) value = norm.empty() ? value : rounded(value);
  if (!norm.empty()) y = plain_norm(y, norm, EPS);
  for (size_t i = 0; i < x.size(); i++) x[i] = rounded(x[i] + y[i]);
}

struct Reader {  // one span
  long n, rows;
};

// One layer on x [rows, HIDDEN]; `kept` are keys and values, span by span.
static void plain_layer(Block& block, const Turning& turn, const std::vector<Reader>& readers,
                        const std::vector<int64_t>& positions, bool int8, std::vector<Doubles>& kept, Doubles& x) {
  long rows = positions.size(), row = 0, window = block.kind.window;
  Doubles qkv = plain_product(block.qkv, plain_before(block.norms[0], x), rows, nullptr), read;
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
        auto sees = [&](long j) { return j <= own + r && (!window || j > own + r - window); };
        const double *q = &qkv[(first + r) * QKV + h * DIM], *k = &kept[2 * b][h / (HEADS_Q / HEADS) * n * DIM];
        const double* v = &kept[2 * b + 1][h / (HEADS_Q / HEADS) * n * DIM];
        plain_attention(q, k, v, n, DIM, SCALE, sees, read, block.kind.softcap);
      }
  }
  for (double& value : read) value = rounded(value);
  plain_after(block.norms[1], plain_linear(block.o, read, rows), x);
  Doubles normed = plain_before(block.norms[2], x), y;
  if (!block.kind.experts) {
    Doubles gated = plain_gated(block.kind, plain_product(block.gate_up, normed, rows, nullptr), INNER);
    y = plain_linear(block.down, gated, rows);
  }
  for (long r = 0; block.kind.experts && r < rows; r++) {
    Doubles own = plain_mixture(block, Doubles(normed.begin() + r * HIDDEN, normed.begin() + (r + 1) * HIDDEN));
    y.insert(y.end(), own.begin(), own.end());
  }
  plain_after(block.norms[3], y, x);
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
  std::vector<std::vector<Planes>> planes(readers.size());
  for (Block& block : blocks) {
    layers.push_back(block.words());
    for (Reader r : readers) slots.emplace_back(r.n, int8), slots.emplace_back(r.n, int8);
  }
  std::vector<Doubles> kept;
  for (size_t i = 0; i < slots.size(); i += 2) {
    Slots &k = slots[i], &v = slots[i + 1];
    planes[i / 2 % readers.size()].push_back({(void*)k.data(), (void*)v.data(), k.n * DIM, (uint16_t*)k.of_scales(),
                                              (uint16_t*)v.of_scales(), k.n});
    kept.push_back(k.plain()), kept.push_back(v.plain());
  }
  std::vector<StackSpan> spans;
  for (size_t b = 0; b < readers.size(); b++)
    spans.push_back({readers[b].n, readers[b].rows, nullptr, 0, planes[b].data()});
  ::Turn turns = {turn.cos.half.data(), turn.sin.half.data(), TURNED};
  Embeddings looked_up = {nullptr, table.half.data(), vocab, 0.5};
  StackCall call = {layers.data(), &looked_up, LAYERS, HIDDEN, HEADS_Q, HEADS, DIM, x.half.data(), rows, 2,
                    &turns, tokens.data(), positions.data(), spans.data(), (int64_t)spans.size(), nullptr, 0, 0,
                    2 * LAYERS};
  std::swap(tokens[0], vocab);
  require(stack(&call) == 1, what, ": an absent token has an embedding");
  std::swap(tokens[0], vocab);
  require(stack(&call) == 0, what, ": a token has no embedding");
  // Where a sum rounds otherwise, whole steps differ from there on: of thousands of numbers some by far, on average few.
  auto alike = [&](const auto& got, const Doubles& want, const std::string& what) {
    near(got, want, int8 ? 0.45 : 0.15, what);
    double off = 0, size = 0;
    for (size_t i = 0; i < want.size(); i++) off += fabs(got[i] - want[i]), size += fabs(want[i]);
    require(off <= 0.07 * size, what, ": numbers are off by %.3g of their size", off / size);
  };
  for (long i = 0; i < LAYERS; i++) {
    std::vector<Doubles> own(kept.begin() + i * 2 * spans.size(), kept.begin() + (i + 1) * 2 * spans.size());
    plain_layer(blocks[i], turn, readers, positions, int8, own, want);
    for (size_t p = 0; p < own.size(); p++)
      alike(slots[i * 2 * spans.size() + p], own[p], name("%s, layer %ld, slots %ld", what, i, (long)p));
  }
  alike(x, want, what);
}

void stack_cases() {
  Kind llama = {false, false, true, true, false, 0, SILU, 0, 0, 0, false}, qwen = llama, gemma = llama, olmo = llama;
  qwen.heads = true;
  gemma.after = gemma.heads = true, gemma.activation = GELU_TANH, gemma.softcap = 1.5;
  olmo.after = olmo.heads = olmo.whole = true, olmo.before = false, olmo.activation = GELU;
  Kind windowed = qwen, still = qwen, capped = gemma, experts = llama, others = qwen;
  windowed.window = 40, still.turns = false, capped.window = 40, capped.activation = GELU + 1;
  experts.experts = 5, experts.top = 2, experts.renormalise = true;
  others.experts = 9, others.top = 3, others.after = true, others.activation = GELU_TANH;
  Kind all = others;  // many rows: in some, what rounds otherwise would choose others
  all.experts = all.top = 3;
  struct {
    Kind first, second;
    bool int8;
    std::vector<Reader> readers;
    const char* what;
  } cases[] = {
      {llama, qwen, false, {{1, 1}, {90, 3}, {130, 70}}, "stack"},
      {qwen, windowed, true, {{1, 1}, {150, 9}, {65, 1}}, "stack of int8 with a window"},
      {qwen, still, true, {{5, 2}, {100, 70}}, "stack of int8 with a slice"},
      {gemma, olmo, false, {{1, 1}, {90, 3}, {130, 70}}, "stack of other norms and activations"},
      {olmo, gemma, true, {{7, 1}, {80, 67}}, "stack of other norms and activations in int8"},
      {capped, gemma, false, {{70, 1}, {150, 9}}, "stack with a cap and a window"},
      {experts, llama, false, {{1, 1}, {90, 3}}, "stack with experts"},
      {llama, all, true, {{30, 2}, {100, 67}}, "stack with experts in int8"},
      {others, llama, true, {{3, 1}}, "stack with experts alone"},
  };
  for (auto& each : cases) {
    std::vector<Block> blocks;
    blocks.emplace_back(each.int8, each.first);
    blocks.emplace_back(each.int8, each.second);
    stack_case(blocks, each.readers, each.int8, each.what);
    for (Block& block : blocks) require(block.loads == block.wanted, each.what, ": other experts were loaded");
  }
}
