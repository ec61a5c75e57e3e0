/* Counters in the slab: where the time goes. counters.py says what each of them means, and counts alike.
 *
 * Each has one writer, which adds without a lock; whoever reads may be in another process, and sees figures that are a
 * moment old. Nothing here reads a clock: the times are those that the core takes anyway. */
#ifndef SHOAL_COUNTERS_H
#define SHOAL_COUNTERS_H

#include <stdint.h>

enum Stat {
    STAT_STEPS = 0, STAT_BUSY_NS = 1, STAT_EPISODES = 2, STAT_AT = 3, STAT_SINCE_NS = 4,
    STAT_PASSES = 5, STAT_WAKE_NS = 6, STAT_RESET_NS = 7
};
enum EpisodeSum { SUM_ENDED = 0, SUM_RETURN = 1, SUM_LENGTH = 2 };
enum LaneStat { LANE_STEPS = 0, LANE_NS = 1, LANE_LONGEST_NS = 2, LANE_STATS = 3 };
enum PoolStat {
    POOL_BEGAN_NS = 0, POOL_SINCE_NS = 1, POOL_BATCHES = 2, POOL_CALLER_NS = 3, POOL_WAIT_NS = 4,
    POOL_STRAGGLER_NS = 5, POOL_WAKE_NS = 6, POOL_COPY_NS = 7, POOL_RESTARTS = 8
};
#define TIME_BUCKETS 136 /* four for each power of two, up to 2^36 ns */

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

typedef struct {
    int64_t *stats, *step_times, *lane_stats; /* the worker's rows, and all lanes' */
    double *episode_sums;
} WorkerCounters;

/* One env has stepped, an autoreset included; `lane` is its first. */
static inline void count_step(WorkerCounters *self, int64_t lane, int64_t ns) {
    if (!COUNTING) return;
    int64_t *row = self->lane_stats + lane * LANE_STATS;
    row[LANE_STEPS]++;
    row[LANE_NS] += ns;
    if (ns > row[LANE_LONGEST_NS]) row[LANE_LONGEST_NS] = ns;
    self->step_times[time_bucket(ns)]++;
}

static inline void count_episode(WorkerCounters *self, double episode_return, int64_t length) {
    if (!COUNTING) return;
    self->episode_sums[SUM_ENDED] += 1.0;
    self->episode_sums[SUM_RETURN] += episode_return;
    self->episode_sums[SUM_LENGTH] += (double)length;
}

#endif
