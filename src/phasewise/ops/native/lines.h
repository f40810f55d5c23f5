// Keys that lie in lines, one for each of their numbers, so that only the lines which matter to a query are read;
// and what stands for all that a list leaves out.
#pragma once
#include "votes.h"

// Of a head's keys from .. to-1: they are put into lines, and what they give the queries of their group.
void make_lines(const Voter& own, long head, long from, long to);
void multiply_lines(const Voter& own, long head, long from, long to);

// Of a head's list: how many slots that are not on it lie in groups of those that are.
int64_t fetched_beside(const Voter& own, long head);

// The mean of a head's values, which stands for all that a list leaves out.
void take_rest(const Voter& own, long head);
