// Vectors that stand for keys: labels, bounds, means, or the keys themselves.
#pragma once
#include "votes.h"

// Those from .. to-1 of a head are made; and what they give the queries of its group.
void make(const Voter& own, long head, long from, long to);
void multiply(const Voter& own, long head, long from, long to);
