// What one row of a span makes of the slots that it may read in one layer: the vectors that stand for them, their votes,
// and lists.
#pragma once
#include "kernels.h"
#include "rows.h"
#include "softmax.h"

struct Voter {
  const Choice* choice;
  const LayerChoice* layer;
  Listed rows;          // where queries, keys and lists are
  long heads, group, dim, n;
  double scale;         // of the layer's scores
  float* logits;        // [heads * group, logits_of]; by shares, weights beside the largest of their chunk
  float* states;        // [heads * group, 2, chunks]: the largest logit of a chunk, the sum of the weights beside it
  int32_t* numbers;     // [heads, numbers_of]
};

// Keys of one head, slot by slot, as bfloat16.
struct Keys {
  const Listed& rows;
  long head, dim;
  const bf16* at(long slot, bf16* room) const {
    long place = head * rows.k_head + slot * rows.k_row;
    if (!rows.k_scale) return (const bf16*)rows.k + place;
    widen_rows((const int8_t*)rows.k + place, 0, rows.k_scale + head * rows.k_scale_head + slot, 1, dim, room);
    return room;
  }
};

// Parts of the work, of which each may be anyone's: vectors are made and multiplied, then votes are counted, then a head's
// list is written. All of one come before any of the next.
long scoring_parts(const Choice& choice, long heads);
long voting_parts(const Choice& choice, long heads);
void score_part(const Voter& voter, long part);
void vote_part(const Voter& voter, long part);
void list_part(const Voter& voter, long head);

// Numbers of a voter's memory.
long logits_of(const Choice& choice);
long states_of(const Choice& choice);
long numbers_of(const Choice& choice);
long listed_of(const Choice& choice, long n);  // slots of a list
