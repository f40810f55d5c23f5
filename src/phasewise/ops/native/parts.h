// The kernels from inside a parallel region: what one thread of it does. Nobody waits at the end of a part.
#pragma once
#include "kernels.h"
#include "pool.h"

// `room` is scratch of `linear_room` bytes, common to the threads; `shares` counts the panels of the outputs.
long linear_room(const LinearCall& call);
void linear_part(const LinearCall& call, void* room, Shares* shares, int thread, int all);
long linear8_room(const LinearCall& call);
void linear8_part(const LinearCall& call, void* room, Shares* shares, int thread, int all);

struct Plan;  // of jobs: which queries read which slots; it depends on the spans' sizes, the commons and the window
Plan* make_plan(const AttentionCall& call, void* room);
long plan_room(const AttentionCall& call);
long stages_of(const AttentionCall& call);
void share_out(const Plan* plan, int threads, Shares* shares);  // of every stage
void attention_part(const AttentionCall& call, const Plan* plan, Shares* shares, int all);
