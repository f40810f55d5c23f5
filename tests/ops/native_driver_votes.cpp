// Rows that choose by votes, against plain loops.
#include <algorithm>

#include "native_driver.h"

namespace {

struct Voting {
  long heads, group, dim, n, chosen;
  int64_t rule, joint, first, own, channels;  // slots before `first` and from `own` on are read in any case
};

// votes[slot] of a head's queries, or of all
Doubles plain_votes(const Voting& v, const Doubles& q, const Doubles& keys, const std::vector<int32_t>& channels,
                    double scale, long head) {
  long from = v.joint ? 0 : head * v.group, to = v.joint ? v.heads * v.group : from + v.group;
  long units = v.own - v.first, width = v.channels ? v.channels : v.dim;
  Doubles votes(units, v.rule == SHARE ? 0 : -INFINITY);
  for (long g = from; g < to; g++) {
    Doubles logits(units);
    double top = -INFINITY, total = 0;
    for (long u = 0; u < units; u++) {
      for (long c = 0; c < width; c++) {
        long d = v.channels ? channels[g / v.group * width + c] : c;
        logits[u] += q[g * v.dim + d] * keys[(g / v.group * v.n + v.first + u) * v.dim + d] * scale;
      }
      top = std::max(top, logits[u]);
    }
    for (double logit : logits) total += exp(logit - top);
    for (long u = 0; u < units; u++) {
      double share = v.rule == PROMISE ? logits[u] : exp(logits[u] - top) / total;
      votes[u] = v.rule == SHARE ? votes[u] + share : std::max(votes[u], share);
    }
  }
  return votes;
}

void votes_case(const Voting& v) {
  std::string what = name("votes %ld x %ld x %ld, %ld of %ld by rule %d%s, %ld channels", v.heads, v.group, v.dim,
                          v.chosen, v.n, (int)v.rule, v.joint ? " together" : "", (long)v.channels);
  Numbers q = random_numbers(BFLOAT, v.heads * v.group * v.dim), keys = random_numbers(BFLOAT, v.heads * v.n * v.dim);
  std::vector<int32_t> channels;
  for (long i = 0; i < v.heads * v.channels; i++) channels.push_back((int32_t)(i % v.channels * (v.dim / v.channels)));
  Numbers vectors(BFLOAT, v.heads * v.n * (v.channels ? v.channels : 1));
  double scale = v.rule == PROMISE ? 1 : 0.7;
  LayerChoice layer = {CHOSEN, v.channels ? vectors.data() : nullptr, nullptr, v.n * v.channels,
                       v.channels ? channels.data() : nullptr, nullptr, 0, 1, nullptr, scale};
  long units = v.own - v.first, known = v.channels ? v.n / 3 : v.own, width = v.channels ? v.channels : v.dim;
  for (long h = 0; v.channels && h < v.heads; h++)
    for (long i = 0; i < known * width; i++)
      vectors.half[(h * v.n) * width + i] = keys.half[(h * v.n + i / width) * v.dim + channels[h * width + i % width]];
  Choice choice = {v.first, units, 1,     v.chosen, v.rule, v.joint, v.first, v.own, v.first,
                   1,       0,     known, 1,        1,      width,   &layer,  nullptr, nullptr};
  long count = v.n - units + v.chosen;
  std::vector<int32_t> slots(v.heads * count), again(v.heads * count);
  for (auto [list, threads] : {std::pair(&slots, 1), std::pair(&again, 3)}) {
    VotesSpan span = {&choice, q.half.data(), keys.half.data(), v.n * v.dim, v.dim, nullptr, 0, v.n, list->data()};
    VotesCall call = {&span, 1, v.heads * v.group, v.heads, v.dim, threads};
    choose_slots(&call);
  }
  require(slots == again, what, ": threads change lists");
  for (long h = 0; h < v.heads; h++) {
    Doubles votes = plain_votes(v, q.plain(), keys.plain(), channels, scale, h);
    std::vector<bool> read(v.n);
    const int32_t* list = &slots[h * count];
    for (long i = 0; i < count; i++) {
      require(list[i] >= 0 && list[i] < v.n && (!i || list[i] > list[i - 1]), what, ": no list of slots in order");
      read[list[i]] = true;
    }
    double least = INFINITY, most = -INFINITY;
    for (long slot = 0; slot < v.n; slot++) {
      bool rival = slot >= v.first && slot < v.own;
      require(rival || read[slot], what, ": slot %ld is missing", slot);
      if (rival && read[slot]) least = std::min(least, votes[slot - v.first]);
      if (rival && !read[slot]) most = std::max(most, votes[slot - v.first]);
    }
    double slack = 1e-3 * fabs(most) + (v.rule == PROMISE ? 1e-4 : 0);
    require(least >= most - slack, what, ": %g is left out for %g", most, least);
  }
}

// Keys in lines, of which a group looks at `largest`; two thirds of the keys lie there.
void lines_case(long heads, long group, long dim, long n, long largest, long chosen) {
  std::string what = name("lines %ld x %ld x %ld, %ld of %ld by %ld numbers", heads, group, dim, chosen, n, largest);
  Numbers q = random_numbers(BFLOAT, heads * group * dim), keys = random_numbers(BFLOAT, heads * n * dim);
  Numbers values = random_numbers(BFLOAT, heads * n * dim);
  long known = (n - 1) * 2 / 3, room = n + 5;
  double scale = 0.7;
  std::vector<float> held(heads * group), rest(heads * dim), first_held;
  std::vector<int32_t> slots(heads * (chosen + 1)), first;
  for (int64_t threads : {1, 3}) {
    Numbers lines(BFLOAT, heads * dim * room);
    std::vector<float> sums(heads * dim);
    for (long i = 0; i < heads * dim; i++)
      for (long j = 0; j < known; j++) {
        lines.half[i * room + j] = keys.half[(i / dim * n + j) * dim + i % dim];
        sums[i] += (float)values[(i / dim * n + j) * dim + i % dim];
      }
    LayerChoice layer = {CHOSEN, lines.data(), nullptr, dim * room, nullptr, nullptr, 0, room, sums.data(), scale};
    Choice choice = {0, n - 1, 1, chosen, SHARE, 0,      0,       n,       0,       1, 0,
                     known, 1, 1, dim,    &layer, nullptr, nullptr, largest, 1, nullptr};
    VotesSpan span = {&choice, q.half.data(), keys.half.data(), n * dim, dim, nullptr, 0, n, slots.data(),
                      values.half.data(), n * dim, dim, nullptr, 0, held.data(), rest.data()};
    VotesCall call = {&span, 1, heads * group, heads, dim, threads};
    choose_slots(&call);
    for (long i = 0; i < heads * dim; i++)
      for (long j = 0; j < n; j++)
        require(lines.half[i * room + j] == keys.half[(i / dim * n + j) * dim + i % dim], what, ": a line is wrong");
    require(first.empty() || (first == slots && first_held == held), what, ": threads change lists");
    first = slots, first_held = held;
  }
  for (long h = 0; h < heads; h++) {
    std::vector<long> channels(dim);
    Doubles sizes(dim), votes(n), mean(dim);
    for (long d = 0; d < dim; d++) channels[d] = d;
    for (long g = 0; g < group; g++)
      for (long d = 0; d < dim; d++) sizes[d] += fabs(q[(h * group + g) * dim + d]);
    std::stable_sort(channels.begin(), channels.end(), [&](long a, long b) { return sizes[a] > sizes[b]; });
    const int32_t* list = &slots[h * (chosen + 1)];
    for (long g = 0; g < group; g++) {
      long own = (h * group + g) * dim;
      double all = 0, looked = 0, top = -INFINITY, total = 0, share = 0;
      for (long d = 0; d < dim; d++) all += fabs(q[own + d]);
      for (long c = 0; c < largest; c++) looked += fabs(q[own + channels[c]]);
      Doubles logits(n);
      for (long j = 0; j < n; j++) {
        for (long c = 0; c < largest; c++) logits[j] += q[own + channels[c]] * keys[(h * n + j) * dim + channels[c]];
        logits[j] *= scale / sqrt(looked / all), top = std::max(top, logits[j]);
      }
      for (double logit : logits) total += exp(logit - top);
      for (long j = 0; j < n; j++) votes[j] += exp(logits[j] - top) / total;
      for (long i = 0; i <= chosen; i++) share += exp(logits[list[i]] - top) / total;
      require(fabs(share - held[h * group + g]) < 1e-4, what, ": %g held, not %g", (double)held[h * group + g], share);
    }
    std::vector<bool> read(n);
    for (long i = 0; i <= chosen; i++) read[list[i]] = true;
    double least = INFINITY, most = -INFINITY;
    for (long j = 0; j < n - 1; j++) read[j] ? least = std::min(least, votes[j]) : most = std::max(most, votes[j]);
    require(read[n - 1] && least >= most * (1 - 1e-3), what, ": %g is left out for %g", most, least);
    for (long j = 0; j < n; j++)
      for (long d = 0; d < dim; d++) mean[d] += values[(h * n + j) * dim + d] / n;
    for (long d = 0; d < dim; d++)
      require(fabs(mean[d] - rest[h * dim + d]) < 1e-4, what, ": the mean of number %ld is wrong", d);
  }
}

}  // namespace

void votes_cases() {
  lines_case(2, 1, 64, 2500, 8, 300);
  lines_case(1, 3, 20, 70, 5, 9);
  lines_case(2, 6, 128, 600, 128, 599);
  for (int64_t rule : {PROMISE, SHARE, PEAK})
    for (int64_t joint : {0, 1})
      for (long channels : {0, 4, 16}) {
        votes_case({2, 3, 64, 900, 70, rule, joint, 0, 899, channels});
        votes_case({1, 5, 20, 70, 9, rule, joint, 3, 60, channels > 4 ? 0 : channels});
      }
}
