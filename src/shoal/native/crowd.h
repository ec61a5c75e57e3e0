/* The workers' bell: all workers of a pool watch one counter, and sleep on it.
 *
 * A request to all of them is one atomic add, however many they are, and one system call if some sleep. A request to some
 * of them, or a message to one, rings these workers' own bells as well, so that the others go back to sleep.
 *
 * The ringer adds to a bell or to `all`, then to `count`, then looks at `waiting` of the workers concerned. A worker
 * stores `waiting`, then reads `count`, then looks at its bell and at `all`. All in sequential consistency, so at least one
 * of them sees the other. */
#ifndef SHOAL_CROWD_H
#define SHOAL_CROWD_H

#include "doorbell.h"

typedef struct {
    _Atomic uint32_t count;    /* how often any of them was rung, modulo 2^32 */
    _Atomic uint32_t all;      /* how often all of them were */
    _Atomic int64_t posted_ns; /* when all were last asked for something */
    uint32_t pad[12];          /* a cache line of its own */
} Crowd;
_Static_assert(sizeof(Crowd) == 64, "the workers' bell has a cache line of its own");

/* What the caller has decided for all workers. */
typedef struct {
    _Atomic int64_t rest_ns, spin_ns; /* how a wait begins: see Spin */
    _Atomic int64_t awake_ns;         /* until when workers shall be awake, since the caller will need them */
    int64_t pad[5];
} Waiting;
_Static_assert(sizeof(Waiting) == 64, "the decision has a cache line of its own");

/* One worker, and what it has heard so far. */
typedef struct {
    Bell *bell;
    Crowd *crowd;
    Waiting *waiting;
    uint32_t seen, seen_all;
    uint32_t bit; /* what it is called by: its index modulo 32 */
    int64_t posted_ns; /* when the last request was posted that it knows of */
} Member;

static inline uint32_t member_bit(int64_t worker) { return (uint32_t)1 << (worker % 32); }

/* Wakes the workers of these bits that sleep. More than are meant may share a bit: they go back to sleep. */
static inline void crowd_wake(Crowd *crowd, uint32_t bits) {
    if (bits) word_wake(&crowd->count, bits);
}

/* A request that was posted at `now_ns` to the workers that are marked in `touched`, which is cleared. */
static inline void crowd_ring(Crowd *crowd, Bell *bells, uint8_t *touched, int64_t workers, int64_t now_ns) {
    int64_t few = 0;
    for (int64_t i = 0; i < workers; i++) few |= !touched[i];
    if (few) {
        for (int64_t i = 0; i < workers; i++)
            if (touched[i]) {
                if (atomic_load_explicit(&bells[i].posted_ns, memory_order_relaxed) == 0)
                    atomic_store_explicit(&bells[i].posted_ns, now_ns, memory_order_relaxed);
                atomic_fetch_add(&bells[i].count, 1);
            }
    } else {
        atomic_store_explicit(&crowd->posted_ns, now_ns, memory_order_relaxed);
        atomic_fetch_add(&crowd->all, 1);
    }
    atomic_fetch_add(&crowd->count, 1);
    uint32_t bits = 0;
    for (int64_t i = 0; i < workers; i++) {
        if (touched[i] && atomic_load(&bells[i].waiting)) bits |= member_bit(i);
        touched[i] = 0;
    }
    crowd_wake(crowd, bits);
}

/* Wakes the workers that sleep, without a request: they look for one until `awake_ns`. */
static inline void crowd_prepare(Crowd *crowd, Waiting *waiting, Bell *bells, int64_t workers, int64_t awake_ns) {
    uint32_t bits = 0;
    atomic_store(&waiting->awake_ns, awake_ns);
    atomic_fetch_add(&crowd->count, 1);
    for (int64_t i = 0; i < workers; i++)
        if (atomic_load(&bells[i].waiting)) bits |= member_bit(i);
    crowd_wake(crowd, bits);
}

/* A message for one worker. */
static inline void crowd_ring_one(Crowd *crowd, Bell *bell, int64_t worker) {
    atomic_fetch_add(&bell->count, 1);
    atomic_fetch_add(&crowd->count, 1);
    if (atomic_load(&bell->waiting)) crowd_wake(crowd, member_bit(worker));
}

static inline int member_rung(const Member *me) {
    return atomic_load(&me->bell->count) != me->seen || atomic_load(&me->crowd->all) != me->seen_all;
}

/* It has heard the rings up to now; those that come later are new. */
static inline void member_heard(Member *me) {
    me->seen = atomic_load(&me->bell->count);
    me->seen_all = atomic_load(&me->crowd->all);
}

/* When the request was posted that has ended a wait; 0 if it was a message. */
static inline int64_t member_posted(Member *me) {
    int64_t posted = atomic_load_explicit(&me->crowd->posted_ns, memory_order_relaxed);
    int64_t own = atomic_load_explicit(&me->bell->posted_ns, memory_order_relaxed);
    if (own > posted) posted = own;
    if (posted == me->posted_ns) return 0;
    return me->posted_ns = posted;
}

static inline int member_spin(Member *me, int64_t until) {
    uint32_t count = atomic_load(&me->crowd->count);
    for (;;) {
        if (member_rung(me)) return BELL_REACHED;
        for (int i = 0; i < SPIN_LOOKS && atomic_load(&me->crowd->count) == count; i++) spin_pause();
        uint32_t found = atomic_load(&me->crowd->count);
        if (found != count) {
            count = found;
            continue;
        }
        if (now_ns() >= until) return BELL_TIMEOUT;
        sched_yield(); /* see bell_spin */
    }
}

/* As bell_sleep; BELL_AWAKE when the caller has said that it will soon ring. */
static inline int member_sleep(Member *me, int64_t deadline) {
    int result = BELL_REACHED;
    int64_t since = now_ns(), now = since;
    atomic_store(&me->bell->waiting, 1);
    for (;; now = now_ns()) {
        uint32_t count = atomic_load(&me->crowd->count);
        if (member_rung(me)) break;
        if (deadline >= 0 && now >= deadline) { result = BELL_TIMEOUT; break; }
        if (atomic_load(&me->waiting->awake_ns) > now) { result = BELL_AWAKE; break; }
        int slept = word_sleep(&me->crowd->count, count, since, nap_end(now, deadline), me->bit);
        if (slept == SLEEP_OVER || (slept == SLEEP_TIMEOUT && deadline >= 0 && now_ns() >= deadline)) continue;
        result = BELL_SIGNAL;
        break;
    }
    atomic_store(&me->bell->waiting, 0);
    return result;
}

/* Waits until rung: as decided for all if `spin_ns` is negative. `slept` is set if it was asleep at the end. */
static inline int member_wait(Member *me, int64_t deadline, int64_t spin_ns, int64_t since, int *slept) {
    if (member_rung(me)) return BELL_REACHED;
    Spin spin = {0, spin_ns};
    if (spin_ns < 0) {
        spin.rest_ns = atomic_load_explicit(&me->waiting->rest_ns, memory_order_relaxed);
        spin.spin_ns = atomic_load_explicit(&me->waiting->spin_ns, memory_order_relaxed);
    }
    int result = BELL_TIMEOUT;
    int64_t start = since + spin.rest_ns;
    if (spin.rest_ns > 0 && (deadline < 0 || start < deadline)) {
        result = member_sleep(me, start);
        *slept = result == BELL_REACHED;
    }
    while (result == BELL_TIMEOUT || result == BELL_AWAKE) {
        int64_t now = now_ns(), awake = atomic_load(&me->waiting->awake_ns);
        int64_t until = (spin.rest_ns > 0 ? start : now) + spin.spin_ns;
        if (result == BELL_AWAKE || until < awake) until = awake;
        if (deadline >= 0 && until > deadline) until = deadline;
        *slept = 0;
        if (until > now && (result = member_spin(me, until)) != BELL_TIMEOUT) break;
        *slept = 1;
        result = member_sleep(me, deadline);
        if (result != BELL_AWAKE) break;
    }
    return result;
}

#endif
