// A mixture of experts from inside a parallel region: all of its threads call `mix` together.
#pragma once
#include "parts.h"

struct Mixed {  // rows x [rows, hidden] and what they become
  const Experts& experts;
  const bf16* x;
  long rows, hidden;
  const Gate& gate;
  const bf16* add;  // [rows, hidden] or null
  bf16* y;          // [rows, hidden], the mixture and `add`, rounded once; it may be `add`
};

long mix_room(const Mixed& call);  // bytes of memory that the threads have in common
// `shares` counts the panels of the router.
void mix(const Mixed& call, void* room, Shares* shares, int thread, int all);
