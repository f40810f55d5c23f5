// Attention over listed slots from inside a parallel region: what one thread of it does.
#pragma once
#include "kernels.h"
#include "pool.h"

// Attention over listed slots. A plan depends on the spans' numbers of rows and slots; it has two shares. The threads
// meet once; nobody waits at the end.
struct ListedPlan;
long listed_room(const ListedCall& call);
ListedPlan* plan_listed(const ListedCall& call, void* room);
void share_listed(const ListedPlan* plan, int threads, Shares* shares);
void listed_part(const ListedCall& call, const ListedPlan* plan, Shares* shares, int all);
