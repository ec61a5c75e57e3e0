/* Counts in the slab what one worker does. layout.py says what each counter means; counters.py counts alike.
 *
 * Each counter has one writer, which adds without a lock. Readers may be in another process, and may see figures that
 * are a moment old. Nothing here reads a clock: the times are those that the core takes anyway. */
#ifndef SHOAL_COUNTERS_H
#define SHOAL_COUNTERS_H

#include "layout.h"

/* For benchmarks/counters.py, which compares: nothing but what was there before the counters. */
#ifdef SHOAL_NO_COUNTERS
#define COUNTING 0
#else
#define COUNTING 1
#endif

static inline int time_bucket(int64_t ns) {
    if (ns < 4) return 0;
    int power = 61 - __builtin_clzll((unsigned long long)ns); /* of two, less the two bits that are kept */
    int bucket = 4 * power + (int)((ns >> power) & 3);
    return bucket < TIME_BUCKETS ? bucket : TIME_BUCKETS - 1;
}

/* One env has stepped, an autoreset included; `lane` is its first. */
static inline void count_step(Fields *at, int64_t lane, int64_t ns) {
    if (!COUNTING) return;
    int64_t *row = at->lane_stats + lane * LANE_WIDTH;
    row[LANE_STEPS]++;
    row[LANE_NS] += ns;
    if (ns > row[LANE_LONGEST_NS]) row[LANE_LONGEST_NS] = ns;
    at->step_times[time_bucket(ns)]++;
}

static inline void count_episode(Fields *at, double episode_return, int64_t length) {
    if (!COUNTING) return;
    at->episode_sums[SUM_ENDED] += 1.0;
    at->episode_sums[SUM_RETURN] += episode_return;
    at->episode_sums[SUM_LENGTH] += (double)length;
}

#endif
