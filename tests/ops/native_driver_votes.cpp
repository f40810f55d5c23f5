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

}  // namespace

void votes_cases() {
  for (int64_t rule : {PROMISE, SHARE, PEAK})
    for (int64_t joint : {0, 1})
      for (long channels : {0, 4, 16}) {
        votes_case({2, 3, 64, 900, 70, rule, joint, 0, 899, channels});
        votes_case({1, 5, 20, 70, 9, rule, joint, 3, 60, channels > 4 ? 0 : channels});
      }
}
