/* Decides whether waits spin: for all sides of a pool together, by what makes its batches fast.
 *
 * To wake a sleeper costs some microseconds, often more than a batch of cheap envs takes. To spin costs a core. So waits
 * that usually take long are slept through. Of short ones it cannot be foreseen: a caller that spins may take the core of
 * a worker that it waits for, workers that spin take the cores of the caller's policy, and where other programs want the
 * same cores, a thread that spins is made to wait for them while one that sleeps is woken at once. So there are up to four
 * ways: the caller spins or sleeps, and the workers spin or sleep. The pool goes one of them, tries the others now and
 * then, and keeps the one by which its batches follow each other fastest.
 *
 * What is usual changes little by single waits that take long: a core that another program takes away for some
 * milliseconds must not send all workers to sleep for good. twin_spinning.py has the same in Python. */
#ifndef SHOAL_SPINNING_H
#define SHOAL_SPINNING_H

#include <stdint.h>

/* How long something usually takes, and how far single times are from that. 0: nothing is known yet. */
typedef struct { int64_t usual_ns, spread_ns; } Estimate;

/* What a wait does first: it rests, which is to sleep until something is expected soon; then it spins. */
typedef struct { int64_t rest_ns, spin_ns; } Spin;

#define FIRST_GUESS_NS 10000   /* a wait is expected to be short until it is known to be long */
#define USUAL_WAKE_NS 15000    /* what a wake-up costs until it was measured */
#define LEAST_WAKE_NS 5000     /* what a wake-up is taken to cost at least, and at most */
#define MOST_WAKE_NS 1000000
#define LONGEST_SPUN_NS 1000000 /* longer waits are slept through, however many cores there are */
/* How long a wait spins that was expected to be short. On a virtual machine with restless neighbours a core is taken away
 * for some milliseconds, and a core that sleeps is given back late. Spins of 2 ms, which such pauses outlast, sent one
 * waiter after the other to sleep there. */
#define HOLD_NS 10000000
#define TIMER_NS 60000         /* how late the kernel ends a sleep */

static inline int64_t within(int64_t value, int64_t least, int64_t most) {
    return value < least ? least : value > most ? most : value;
}

/* Takes in one more time. One that was far longer, or shorter, than usual counts as a moderate one. */
static inline void estimate_add(Estimate *self, int64_t ns) {
    int64_t usual = self->usual_ns ? self->usual_ns : FIRST_GUESS_NS;
    ns = within(ns, usual / 4, 2 * usual);
    int64_t off = ns > usual ? ns - usual : usual - ns;
    usual += (ns - usual) / 8;
    self->usual_ns = usual > 16 ? usual : 16;
    self->spread_ns += (off - self->spread_ns) / 8;
}

/* Whether waits of this estimate are short enough to spin. `spins`: whether they do now; to go on takes less than to
 * begin, so that it does not change to and fro. */
static inline int is_short(Estimate wait, int spins) {
    return wait.usual_ns <= (spins ? 2 : 1) * LONGEST_SPUN_NS;
}

/* How a long wait goes where there are cores to spare: one that always takes the same time is slept through but for its
 * end. */
static inline Spin rest_for(Estimate wait, int64_t wake_ns) {
    int64_t early = 2 * wait.spread_ns + within(wake_ns ? wake_ns : USUAL_WAKE_NS, LEAST_WAKE_NS, MOST_WAKE_NS) + TIMER_NS;
    if (early > wait.usual_ns / 8) return (Spin){0, 0};
    return (Spin){wait.usual_ns - early, 3 * early};
}

/* A way to wait is a set of these; 0: all sleep. */
enum { CALLER_SPINS = 1, WORKERS_SPIN = 2, WAYS = 4 };

/* The way to begin with, where so many wait or work on so many cores. A caller that sleeps leaves its core to a worker. */
static inline int64_t first_way(int64_t parties, int64_t cores) {
    if (parties > 2 * cores) return 0; /* a thread that spins would take the core of one that it waits for */
    return parties > cores ? WORKERS_SPIN : CALLER_SPINS | WORKERS_SPIN;
}

#define WINDOW_BATCHES 32     /* batches, at least, from which it is told how fast they are */
#define WINDOW_NS 20000000    /* and their time, at least: a core that is taken away for some ms must not decide it */
#define SLOW_WINDOW_NS 100000000 /* after this time a quarter of them will do */
#define FIRST_PATIENCE 8      /* windows until another way is tried, at first, and at most */
#define MOST_PATIENCE 128
#define ENOUGH_WINS 4         /* windows in which a way on trial must be better, each time than the best one just before */
#define HOPELESS 2            /* a trial ends early if its batches take so many times as long as those of the best way */
#define MOST 4                /* a batch counts as so many usual ones at most: a core that was taken away says little */

typedef struct {
    int64_t possible;         /* who may spin at all: ways are subsets of that */
    int64_t way, best;        /* of the window that is under way, and of all windows that are no trial */
    int64_t tried, wins;      /* the way that is, or was last, on trial; in how many windows it was better */
    int64_t cost[WAYS];       /* ns from batch to batch by each way; 0: not known */
    int64_t windows, patience; /* since the last trial, and until the next */
    int64_t batches, ns;      /* of the window that is under way */
} Trials;

/* Begins with this way, with nothing known of any. */
static inline void trials_begin(Trials *self, int64_t possible, int64_t way) {
    *self = (Trials){possible, way & possible, way & possible, 0, 0, {0}, 0, FIRST_PATIENCE, 0, 0};
}

static inline int is_better(int64_t cost, int64_t than) { return 10 * cost < 9 * than; }

/* The way of the next window: the best one, or another one that is due for a trial. That is one of which nothing is known;
 * after a while, one that was better than the best one is now; after a longer while, the next in turn. */
static inline int64_t trials_next(const Trials *self) {
    if (self->wins > 0) return self->tried;
    int64_t turn = self->best, promising = self->best;
    for (int64_t i = 1; i <= WAYS; i++) {
        int64_t way = (self->tried + i) % WAYS;
        if (way == self->best || (way & ~self->possible)) continue;
        if (self->cost[way] == 0) return way;
        if (is_better(self->cost[way], self->cost[self->best])) promising = way;
        if (turn == self->best) turn = way;
    }
    if (self->windows > self->patience) return turn;
    return self->windows > FIRST_PATIENCE ? promising : self->best;
}

/* A window has ended, in which batches took so long by the present way. */
static inline void trials_judge(Trials *self, int64_t mean) {
    int64_t *cost = &self->cost[self->way], best = self->cost[self->best];
    if (self->way == self->best) {
        *cost = *cost == 0 ? mean : *cost + (mean - *cost) / 2;
        self->windows++;
        self->way = trials_next(self);
        return;
    }
    *cost = mean;
    self->tried = self->way;
    self->windows = 0;
    if (!is_better(mean, best)) {
        self->wins = 0;
        self->patience = within(2 * self->patience, FIRST_PATIENCE, MOST_PATIENCE);
    } else if (++self->wins == ENOUGH_WINS) {
        self->best = self->way;
        self->wins = 0;
        self->patience = FIRST_PATIENCE;
    }
    self->way = self->best;
}

/* A batch has taken so long, since the one before it. Whether a window has ended, so that the way may be another. */
static inline int trials_add(Trials *self, int64_t ns) {
    int64_t best = self->cost[self->best];
    self->batches++;
    self->ns += best && ns > MOST * best ? MOST * best : ns;
    int hopeless = self->way != self->best && self->ns / self->batches > HOPELESS * best;
    int early = self->batches >= WINDOW_BATCHES / 4 && (self->ns >= SLOW_WINDOW_NS || hopeless);
    if (!early && (self->batches < WINDOW_BATCHES || self->ns < WINDOW_NS)) return 0;
    trials_judge(self, self->ns / self->batches);
    self->batches = self->ns = 0;
    return 1;
}

#endif
