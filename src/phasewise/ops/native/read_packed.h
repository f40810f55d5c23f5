// How a job reads keys and values that lie packed, and the rows behind them.
#pragma once
#include "job.h"

// Slots from .. to-1 of a span that has some `sealed`: what its queries have summed by then is in `s`, before and after.
void read_packed(const Call& call, const Job& job, long from, long to, State& s);
