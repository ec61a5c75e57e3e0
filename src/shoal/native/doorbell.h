/* Doorbells: a counter in shared memory that one side rings and the other waits for.
 *
 * Ringing is an atomic add; it makes a system call only if the waiter sleeps and the count it wants is reached.
 * Waiting spins for a moment, then sleeps in the kernel (sleeping.h), with a deadline, and returns on a signal. How
 * long it spins is decided elsewhere (spinning.h).
 *
 * The ringers write `count`, the one waiter `wake_at` and `waiting`, the supervisor `alarm`. The learner writes
 * `posted_ns` if it is 0, and the worker takes it: it tells how long waking takes.
 * The waiter stores `waiting` and then looks at `count`; a ringer adds to `count` and then looks at
 * `waiting`. Both in sequential consistency, so at least one of them sees the other. */
#ifndef SHOAL_DOORBELL_H
#define SHOAL_DOORBELL_H

#include "sleeping.h"
#include "spinning.h"

typedef struct {
    _Atomic uint32_t count;   /* how often it was rung, modulo 2^32 */
    _Atomic uint32_t wake_at; /* the count that the sleeper wants */
    _Atomic uint32_t waiting; /* 1 while the waiter sleeps */
    _Atomic uint32_t alarm;   /* how often the supervisor cried out */
    _Atomic int64_t posted_ns; /* since when a request waits */
    uint32_t pad[10];         /* a cache line of its own */
} Bell;
_Static_assert(sizeof(Bell) == 64, "a bell has a cache line of its own");

#define SPIN_LOOKS 32

enum BellResult { BELL_REACHED = 0, BELL_TIMEOUT = 1, BELL_ALARM = 2, BELL_SIGNAL = 3, BELL_AWAKE = 4 };

static inline void spin_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static inline int bell_reached(Bell *bell, uint32_t target) {
    return (int32_t)(atomic_load(&bell->count) - target) >= 0;
}

/* Returns whether it had to wake the waiter. */
static inline int bell_ring(Bell *bell, uint32_t times) {
    uint32_t count = atomic_fetch_add(&bell->count, times) + times;
    if (!atomic_load(&bell->waiting) || (int32_t)(count - atomic_load(&bell->wake_at)) < 0) return 0;
    word_wake(&bell->count, ALL_BITS);
    return 1;
}

/* Adds to `count` as well, so that a waiter on its way to sleep does not miss it. */
static inline void bell_cry(Bell *bell) {
    atomic_fetch_add(&bell->alarm, 1);
    atomic_fetch_add(&bell->count, 1);
    word_wake(&bell->count, ALL_BITS);
}

/* Looks for a moment, then looks between yields: where threads outnumber cores, the one that we wait for, or
 * the one that we have just woken, may need this very core. */
static inline int bell_spin(Bell *bell, uint32_t target, uint32_t alarm, int64_t until) {
    for (;;) {
        for (int i = 0; i < SPIN_LOOKS; i++) {
            if (bell_reached(bell, target)) return BELL_REACHED;
            spin_pause();
        }
        if (atomic_load(&bell->alarm) != alarm) return BELL_ALARM;
        if (now_ns() >= until) return BELL_TIMEOUT;
        sched_yield();
    }
}

/* A signal that came just before the sleep interrupts nothing: the waiter gets up this often to look. */
#define NAP_NS 500000000

/* When a sleep ends at the latest; `deadline` is negative for none. */
static inline int64_t nap_end(int64_t now, int64_t deadline) {
    return deadline >= 0 && deadline - now < NAP_NS ? deadline : now + NAP_NS;
}

/* Sleeps until the count reaches `target`; `deadline` in monotonic ns, negative for none. BELL_SIGNAL: look whether
 * a signal came, and come back. */
static inline int bell_sleep(Bell *bell, uint32_t target, uint32_t alarm, int64_t deadline) {
    int result = BELL_REACHED;
    int64_t since = now_ns(), now = since;
    atomic_store(&bell->wake_at, target);
    atomic_store(&bell->waiting, 1);
    for (;; now = now_ns()) {
        uint32_t count = atomic_load(&bell->count);
        if ((int32_t)(count - target) >= 0) break;
        if (atomic_load(&bell->alarm) != alarm) { result = BELL_ALARM; break; }
        if (deadline >= 0 && now >= deadline) { result = BELL_TIMEOUT; break; }
        int slept = word_sleep(&bell->count, count, since, nap_end(now, deadline), ALL_BITS);
        if (slept == SLEEP_OVER || (slept == SLEEP_TIMEOUT && deadline >= 0 && now_ns() >= deadline)) continue;
        result = BELL_SIGNAL;
        break;
    }
    atomic_store(&bell->waiting, 0);
    return result;
}

/* Rests for `spin.rest_ns`, spins for `spin.spin_ns`, then sleeps. `slept` is set if it was asleep at the end. */
static inline int bell_wait(Bell *bell, uint32_t target, uint32_t alarm, int64_t deadline, Spin spin, int *slept) {
    if (bell_reached(bell, target)) return BELL_REACHED;
    int64_t now = spin.rest_ns > 0 || spin.spin_ns > 0 ? now_ns() : 0;
    if (spin.rest_ns > 0 && (deadline < 0 || now + spin.rest_ns < deadline)) {
        int result = bell_sleep(bell, target, alarm, now + spin.rest_ns);
        if (result != BELL_TIMEOUT) {
            *slept = 1;
            return result;
        }
        now += spin.rest_ns;
    }
    if (spin.spin_ns > 0) {
        int64_t until = now + spin.spin_ns;
        int result = bell_spin(bell, target, alarm, deadline < 0 || until < deadline ? until : deadline);
        if (result != BELL_TIMEOUT) return result;
    }
    *slept = 1;
    return bell_sleep(bell, target, alarm, deadline);
}

#endif
