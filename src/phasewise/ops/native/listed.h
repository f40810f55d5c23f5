// The choice of pages and attention over listed slots from inside a parallel region: what one thread of it does.
#pragma once
#include "kernels.h"
#include "pool.h"

// Which slots one head of a row is to read; `room` is a thread's own, of `pages_room` bytes for spans of `most` pages.
long pages_room(const PagesCall& call, long most);
void choose_of_head(const PagesCall& call, const Pages& own, long head, void* room);

// Attention over listed slots. A plan depends on the spans' numbers of rows and slots; it has two shares. The threads
// meet once; nobody waits at the end.
struct ListedPlan;
long listed_room(const ListedCall& call);
ListedPlan* plan_listed(const ListedCall& call, void* room);
void share_listed(const ListedPlan* plan, int threads, Shares* shares);
void listed_part(const ListedCall& call, const ListedPlan* plan, Shares* shares, int all);
