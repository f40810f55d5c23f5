// A suffix automaton that grows with its text, and what has followed the text's end before.
//
// Edges of all states lie in one table, found by state and token; those of a state are linked, the first one last made.
#include "kernels.h"

// As MARKED of the plain twin: matches of one text's end whose position is brought up to date with each token.
static const int NESTED = 32;

static uint64_t place_of(const Suffixes& s, int64_t state, int64_t token) {
  uint64_t x = (uint64_t)state * 0x9e3779b97f4a7c15 ^ (uint64_t)token * 0xc2b2ae3d27d4eb4f;
  return (x ^ x >> 29) & (uint64_t)s.mask;
}

static int32_t edge_of(const Suffixes& s, int32_t state, int32_t token) {
  for (uint64_t at = place_of(s, state, token); s.table[at]; at = (at + 1) & (uint64_t)s.mask) {
    int32_t edge = s.table[at] - 1;
    if (s.from[edge] == state && s.token[edge] == token) return edge;
  }
  return -1;
}

static void place(Suffixes& s, int32_t edge) {
  uint64_t at = place_of(s, s.from[edge], s.token[edge]);
  while (s.table[at]) at = (at + 1) & (uint64_t)s.mask;
  s.table[at] = edge + 1;
}

static void lead(Suffixes& s, int32_t state, int32_t token, int32_t target) {
  int32_t edge = (int32_t)s.edges++;
  s.from[edge] = state, s.token[edge] = token, s.target[edge] = target, s.next[edge] = s.first[state];
  s.first[state] = edge, s.followers[state]++;
  place(s, edge);
}

static int32_t make_state(Suffixes& s, int32_t link, int32_t length, int32_t end) {
  int32_t state = (int32_t)s.states++;
  s.link[state] = link, s.length[state] = length, s.end[state] = end, s.first[state] = -1, s.followers[state] = 0;
  return state;
}

// The state of `state`'s longest substring followed by `token`, split off where it has more to it.
static int32_t split(Suffixes& s, int32_t state, int32_t token) {
  int32_t found = s.target[edge_of(s, state, token)], length = s.length[state] + 1;
  if (s.length[found] == length) return found;
  int32_t own = make_state(s, s.link[found], length, s.end[found]);
  for (int32_t edge = s.first[found]; edge >= 0; edge = s.next[edge]) lead(s, own, s.token[edge], s.target[edge]);
  s.link[found] = own;
  for (; state >= 0; state = s.link[state]) {
    int32_t edge = edge_of(s, state, token);
    if (edge < 0 || s.target[edge] != found) break;
    s.target[edge] = own;
  }
  return own;
}

static void extend(Suffixes& s, int32_t token) {
  int32_t state = (int32_t)s.last, now = make_state(s, 0, s.length[state] + 1, (int32_t)s.n);
  for (; state >= 0 && edge_of(s, state, token) < 0; state = s.link[state]) lead(s, state, token, now);
  if (state >= 0) {
    int32_t link = split(s, state, token);
    s.link[now] = link;
  }
  s.last = now;
  for (int32_t link = s.link[now], i = 0; link > 0 && i < NESTED; link = s.link[link], i++) s.end[link] = (int32_t)s.n;
  s.n++;
}

// The text grows by `count` tokens; there is room for what they add.
API void suffixes_read(Suffixes* s, const int64_t* tokens, int64_t count) {
  for (int64_t i = 0; i < count; i++) extend(*s, (int32_t)tokens[i]);
}

// All edges into a table that is empty.
API void suffixes_place(Suffixes* s) {
  for (int64_t edge = 0; edge < s->edges; edge++) place(*s, (int32_t)edge);
}

// -> how many tokens go on, each the latest of those that followed the longest match.
API int64_t suffixes_chain(const Suffixes* given, Chain* chain) {
  const Suffixes& s = *given;
  int32_t state = s.n ? s.link[s.last] : 0, match = s.length[state];
  double reached = 1;
  int64_t count = 0;
  while (count < chain->most) {
    for (; state > 0 && match >= chain->shortest && s.first[state] < 0; match = s.length[state]) state = s.link[state];
    if (state <= 0 || match < chain->shortest) break;
    int32_t best = s.first[state];
    for (int32_t edge = s.next[best]; edge >= 0; edge = s.next[edge])
      if (s.end[s.target[edge]] > s.end[s.target[best]]) best = edge;
    bool alone = s.followers[state] == 1;
    int64_t rows = alone ? chain->onlys : chain->latests;
    double likely = (alone ? chain->only : chain->latest)[match < rows ? match : rows - 1];
    reached *= likely;
    if (reached < chain->least) break;
    chain->tokens[count] = s.token[best], chain->likely[count++] = likely;
    state = s.target[best], match++;
  }
  return count;
}

// How many tokens the longest match of the text's end has.
API int64_t suffixes_match(const Suffixes* s) { return s->n ? s->length[s->link[s->last]] : 0; }

// -> how many of `most` positions there are right after earlier places where an end of at least `shortest` tokens was:
// longest end first, then latest; of each end one for every token that has followed it.
API int64_t suffixes_places(const Suffixes* given, int64_t shortest, int64_t most, int64_t* places) {
  const Suffixes& s = *given;
  int64_t count = 0;
  for (int32_t state = s.link[s.last]; state > 0 && s.length[state] >= shortest && count < most; state = s.link[state])
    for (int32_t before = INT32_MAX, best = 0; best >= 0 && count < most;) {
      best = -1;
      for (int32_t edge = s.first[state]; edge >= 0; edge = s.next[edge]) {
        int32_t end = s.end[s.target[edge]];
        if (end < before && end > best) best = end;
      }
      if (best >= 0) places[count++] = before = best;
    }
  return count;
}
