// What the driver's cases share: numbers of either kind, comparisons, a pool of threads, plain attention.
#pragma once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"

typedef std::vector<double> Doubles;

extern "C" {
const char* layout();
int supported();
void use_pool(void* parallel, void* thread, void* threads, void* barrier);
int64_t panel_bytes(int64_t form, int64_t inputs);
void linear_pack(const Rows* weight, const WeightsPart* to, int64_t inputs, int64_t threads);
int64_t linear_rows(const Weights* w, const int64_t* which, int64_t count, uint16_t* out, int64_t threads);
void linear(const LinearCall* call);
void attend(const AttentionCall* call);
void prefill(const PrefillCall* call);
void head(const HeadCall* call);
int64_t stack(const StackCall* call);
void choose_slots(const VotesCall* call);
}

void stack_cases();  // native_driver_stack.cpp
void votes_cases();  // native_driver_votes.cpp
void codes_cases();  // native_driver_codes.cpp

// ---- numbers
inline std::mt19937& generator() {
  static std::mt19937 g(0);
  return g;
}

inline double uniform() { return (generator()() >> 8) / 8388608.0 - 1; }  // -1 .. 1
inline int64_t integer(int64_t from, int64_t to) { return from + generator()() % (to - from + 1); }

inline float widen(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline uint16_t narrow(double value) {  // to nearest even, as float32 first
  float f = (float)value;
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return isnan(f) ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline double rounded(double value) { return widen(narrow(value)); }

struct Numbers {  // float32 or bfloat16
  int64_t kind;
  long count;
  std::vector<float> wide;
  std::vector<uint16_t> half;

  Numbers(int64_t kind, long count) : kind(kind), count(count) {
    kind == FLOAT ? wide.resize(count) : half.resize(count);
  }
  char* data(long i = 0) { return kind == FLOAT ? (char*)(wide.data() + i) : (char*)(half.data() + i); }
  double operator[](long i) const { return kind == FLOAT ? wide[i] : widen(half[i]); }
  void set(long i, double x) { kind == FLOAT ? (void)(wide[i] = (float)x) : (void)(half[i] = narrow(x)); }
  Doubles plain() const {
    Doubles all(count);
    for (long i = 0; i < count; i++) all[i] = (*this)[i];
    return all;
  }
  long size() const { return kind == FLOAT ? 4 : 2; }
  bool operator==(const Numbers& other) const {
    const void *a = ((Numbers*)this)->data(), *b = ((Numbers&)other).data();
    return count == other.count && (count == 0 || !memcmp(a, b, count * size()));
  }
};

inline Numbers random_numbers(int64_t kind, long count, double most = 1.7) {
  Numbers x(kind, count);
  for (long i = 0; i < count; i++) x.set(i, uniform() * most);
  return x;
}

// ---- comparisons
template <class... Parts> std::string name(const char* format, Parts... parts) {
  char text[200];
  snprintf(text, sizeof text, format, parts...);
  return text;
}

template <class... Parts> void require(bool holds, const std::string& what, const char* why = "", Parts... parts) {
  if (holds) return;
  printf("failed: %s%s\n", what.c_str(), name(why, parts...).c_str());
  exit(1);
}

// Within `tolerance` of the size of what is wanted, on average and of each.
template <class Got> void near(const Got& got, const Doubles& want, double tolerance, const std::string& what) {
  double mean = 0;
  for (double x : want) mean += fabs(x) / want.size();
  for (size_t i = 0; i < want.size(); i++) {
    if (fabs(got[i] - want[i]) <= tolerance * (mean + fabs(want[i]))) continue;
    require(false, what, ": number %ld is %.9g, not %.9g", (long)i, (double)got[i], want[i]);
  }
}

// ---- threads as the kernels take them
namespace threads {
inline thread_local int self = 0;
inline int all = 1;
inline std::mutex lock;
inline std::condition_variable changed;
inline int waiting = 0, meetings = 0;

inline void barrier() {
  std::unique_lock<std::mutex> held(lock);
  int meeting = meetings;
  if (++waiting == all) {
    waiting = 0, meetings++;
    changed.notify_all();
  } else {
    changed.wait(held, [&] { return meetings != meeting; });
  }
}

inline void parallel(void (*work)(void*), void* data, unsigned count, unsigned) {
  all = (int)count;
  std::vector<std::thread> others;
  for (int i = 1; i < all; i++)
    others.emplace_back([=] {
      self = i;
      work(data);
    });
  work(data);
  for (std::thread& other : others) other.join();
}

inline int index() { return self; }
inline int count() { return all; }
}  // namespace threads

// ---- attention of one query over k, v [n, dim]: what it reads, then the log of the sum of weights
inline double plain_attention(const double* q, const double* k, const double* v, long n, long dim, double scale,
                              const std::function<bool(long)>& sees, Doubles& out, double softcap = 0, double bias = 0) {
  Doubles scores(n, -INFINITY), sums(dim);
  double top = -INFINITY, total = 0;
  for (long j = 0; j < n; j++) {
    if (!sees(j)) continue;
    scores[j] = 0;
    for (long d = 0; d < dim; d++) scores[j] += q[d] * k[j * dim + d] * scale;
    if (softcap) scores[j] = softcap * tanh(scores[j] / softcap);
    if (!j) scores[j] += bias;
    top = scores[j] > top ? scores[j] : top;
  }
  for (long j = 0; j < n; j++) {
    double weight = exp(scores[j] - top);
    total += weight;
    for (long d = 0; d < dim; d++) sums[d] += weight * v[j * dim + d];
  }
  for (double sum : sums) out.push_back(sum / total);
  return top + log(total);
}

// ---- weights, packed
constexpr long GROUP = 128;  // inputs of int8 layers that share a scale

inline long groups(long inputs) { return (inputs + GROUP - 1) / GROUP; }

struct Packed {
  bool int8;
  Numbers weight;  // [outputs, inputs]
  std::vector<char> packed;
  std::vector<float> bias, scales;
  std::unique_ptr<WeightsPart> part;  // stays where it is when this is moved
  Weights words;

  Packed(Numbers from, long outputs, long inputs, bool int8, bool biased, int64_t threads)
      : int8(int8), weight(std::move(from)), part(new WeightsPart) {
    int64_t form = int8 ? WEIGHTS_INT8 : WEIGHTS_BFLOAT16;
    packed.resize(panels(outputs) * panel_bytes(form, inputs));
    for (long o = 0; biased && o < outputs; o++) bias.push_back((float)uniform());
    scales.resize(int8 ? panels(outputs) * groups(inputs) * WIDTH : 0);
    *part = {form, packed.data(), scales.data(), outputs};
    words = {part.get(), 1, biased ? bias.data() : nullptr, outputs, inputs};
    Rows rows = {weight.data(), inputs, weight.kind};
    linear_pack(&rows, part.get(), inputs, threads);
  }
};

// Numbers of one scale as int8 layers take them: whole steps, and what one is worth.
inline double to_steps(double* row, long count) {
  float top = 0;
  for (long i = 0; i < count; i++) top = fabs(row[i]) > top ? (float)fabs(row[i]) : top;
  float inverse = top > 0 ? 127 / top : 0;
  for (long i = 0; i < count; i++) row[i] = rint(row[i] * inverse);
  return top / 127;
}

// Rows as int8 layers round them, group by group.
inline void round_groups(Doubles& x, long inputs) {
  for (size_t row = 0; row < x.size(); row += inputs)
    for (long k = 0; k < inputs; k += GROUP) {
      double* group = &x[row + k];
      long count = inputs - k < GROUP ? inputs - k : GROUP;
      double worth = to_steps(group, count);
      for (long i = 0; i < count; i++) group[i] *= worth;
    }
}

// x [rows, inputs] W^T + bias
inline Doubles plain_linear(const Packed& layer, Doubles x, long rows) {
  long outputs = layer.words.outputs, inputs = layer.words.inputs;
  Doubles w = layer.weight.plain(), y;
  for (double& value : x) value = layer.int8 ? value : rounded(value);
  if (layer.int8) round_groups(x, inputs), round_groups(w, inputs);
  for (long r = 0; r < rows; r++)
    for (long o = 0; o < outputs; o++) {
      double sum = 0;
      for (long k = 0; k < inputs; k++) sum += x[r * inputs + k] * w[o * inputs + k];
      y.push_back(sum + (layer.bias.empty() ? 0 : layer.bias[o]));
    }
  return y;
}

inline Doubles plain_norm(const Doubles& x, const std::vector<float>& weight, double eps) {  // rows of its size
  long n = weight.size();
  Doubles y(x.size());
  for (size_t r = 0; r < x.size(); r += n) {
    double squares = 0;
    for (long i = 0; i < n; i++) squares += x[r + i] * x[r + i];
    for (long i = 0; i < n; i++) y[r + i] = rounded(x[r + i] / sqrt(squares / n + eps) * weight[i]);
  }
  return y;
}
