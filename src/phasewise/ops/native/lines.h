// Keys that lie in lines, one for each of their numbers, so that only the lines which matter to a query are read; and
// what stands for all that a list leaves out.
#pragma once
#include "votes.h"

// Of a head's keys from .. to-1: they are put into lines, and what they give the queries of their group.
void make_lines(const Voter& own, long head, long from, long to);
void multiply_lines(const Voter& own, long head, long from, long to);

// Of a head's list: how many slots that are not on it lie in groups of those that are.
int64_t fetched_beside(const Voter& own, long head);

// Of a head's list: the share of the weight that it holds, and the mean of all values. `less`: the logarithms of the sums
// of the weights, by query of the group.
void weigh_rest(const Voter& own, long head, const float* less);
