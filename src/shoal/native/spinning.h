/* Decides whether waits spin: for all sides of a pool together, from how long their waits usually take.
 *
 * To wake a sleeper costs some microseconds, often more than a batch of cheap envs takes. To spin costs a core. So a
 * wait that is expected to be short is spun through, and a longer one is slept through. The expectation is the usual
 * time, of which single waits that take long change little: a core that another program takes away for some
 * milliseconds must not send all workers to sleep for good.
 *
 * Where other programs want the same cores, a thread that spins is made to wait for them, and one that sleeps is woken
 * at once: how much that costs cannot be foreseen. So now and then the pool tries how fast its batches are if all sides
 * sleep, and keeps what is faster. twin_spinning.py has the same in Python. */
#ifndef SHOAL_SPINNING_H
#define SHOAL_SPINNING_H

#include <stdint.h>

/* How long a wait usually takes, and how far single ones are from that. 0: nothing is known yet. */
typedef struct { int64_t usual_ns, spread_ns; } Estimate;

/* What a wait does first: it rests, which is to sleep until something is expected soon; then it spins. */
typedef struct { int64_t rest_ns, spin_ns; } Spin;

#define FIRST_GUESS_NS 10000   /* a wait is expected to be short until it is known to be long */
#define USUAL_WAKE_NS 15000    /* what a wake-up costs until it was measured */
#define LEAST_WAKE_NS 5000     /* what a wake-up is taken to cost at least, and at most */
#define MOST_WAKE_NS 1000000
#define FEW_WAKES 8            /* where there are far too few cores, only waits of so many wake-ups are spun through */
#define LONGEST_SPUN_NS 1000000 /* longer waits are slept through, however many cores there are */
/* How long a wait spins that was expected to be short. On a virtual machine with restless neighbours a core is taken away
 * for some milliseconds, and a core that sleeps is given back late. Spins of 2 ms, which such pauses outlast, sent one
 * waiter after the other to sleep there. */
#define HOLD_NS 10000000
#define CROWDED_HOLD_NS 300000 /* the same where there are too few cores, at least */
#define TIMER_NS 60000         /* how late the kernel ends a sleep */

static inline int64_t within(int64_t value, int64_t least, int64_t most) {
    return value < least ? least : value > most ? most : value;
}

/* Takes in one more wait. One that was far longer, or shorter, than usual counts as a moderate one. */
static inline void estimate_add(Estimate *self, int64_t ns) {
    int64_t usual = self->usual_ns ? self->usual_ns : FIRST_GUESS_NS;
    ns = within(ns, usual / 4, 2 * usual);
    int64_t off = ns > usual ? ns - usual : usual - ns;
    usual += (ns - usual) / 8;
    self->usual_ns = usual > 16 ? usual : 16;
    self->spread_ns += (off - self->spread_ns) / 8;
}

/* How a wait of this estimate shall go, where `parties` wait or work on so many cores, and a wake-up costs `wake_ns`.
 * `spins`: whether such waits spin now; to go on takes less than to begin, so that it does not change to and fro. */
static inline Spin spin_for(Estimate wait, int spins, int64_t wake_ns, int64_t parties, int64_t cores) {
    Spin sleep = {0, 0}, spin = {0, HOLD_NS};
    if (parties > 2 * cores) return sleep; /* a thread that spins would take the core of one that it waits for */
    wake_ns = within(wake_ns ? wake_ns : USUAL_WAKE_NS, LEAST_WAKE_NS, MOST_WAKE_NS);
    int64_t limit = LONGEST_SPUN_NS;
    if (parties > cores) {
        /* One too many on sixteen cores takes little from each; one too many on two cores takes a third. */
        limit = within(FEW_WAKES * wake_ns * within(cores / (2 * (parties - cores)), 1, cores), 0, LONGEST_SPUN_NS);
        spin.spin_ns = within(2 * limit, CROWDED_HOLD_NS, HOLD_NS);
    }
    if (wait.usual_ns <= (spins ? 2 * limit : limit)) return spin;
    /* A long wait that always takes the same time is slept through but for its end. */
    int64_t early = 2 * wait.spread_ns + wake_ns + TIMER_NS;
    if (parties > cores || early > wait.usual_ns / 8) return sleep;
    spin.rest_ns = wait.usual_ns - early;
    spin.spin_ns = 3 * early;
    return spin;
}

#define WINDOW_BATCHES 32     /* batches, at least, from which it is told how fast they are */
#define WINDOW_NS 30000000    /* and their time, at least: a core that is taken away for some ms must not decide it */
#define SLOW_WINDOW_NS 100000000 /* after this time a quarter of them will do */
#define FIRST_PATIENCE 4      /* windows until the other way is tried, at first, and at most */
#define MOST_PATIENCE 128
#define HOPELESS 2            /* a trial ends early if its batches take so many times as long as those before */

/* Two ways to wait: 0 as spin_for says, 1 always asleep. */
typedef struct {
    int64_t way, trying;      /* the present way, and whether it is only tried */
    int64_t cost[2];          /* ns of a batch by each way; 0: not known */
    int64_t windows, patience; /* since the last trial, and until the next */
    int64_t batches, ns;      /* of the window that is under way */
} Trials;

/* A batch has taken so long, from its request to its answers. Whether a window has ended, so that the way may be another. */
static inline int trials_add(Trials *self, int64_t ns) {
    self->batches++;
    self->ns += ns;
    int64_t before = self->cost[!self->way];
    int some = self->batches >= WINDOW_BATCHES / 4;
    int early = some && (self->ns >= SLOW_WINDOW_NS || (self->trying && self->ns / self->batches > HOPELESS * before));
    if (!early && (self->batches < WINDOW_BATCHES || self->ns < WINDOW_NS)) return 0;
    int64_t mean = self->ns / self->batches, *cost = &self->cost[self->way];
    *cost = *cost == 0 ? mean : *cost + (mean - *cost) / (self->trying ? 2 : 4);
    self->batches = self->ns = 0;
    if (self->trying) {
        int better = 10 * *cost < (self->way ? 8 : 9) * before; /* to sleep must clearly pay */
        self->trying = self->windows = 0;
        self->patience = better ? FIRST_PATIENCE : within(2 * self->patience, FIRST_PATIENCE, MOST_PATIENCE);
        if (!better) self->way = !self->way;
    } else if (before == 0 || ++self->windows > within(self->patience, FIRST_PATIENCE, MOST_PATIENCE)) {
        self->trying = 1;
        self->way = !self->way;
    }
    return 1;
}

#endif
