/* Sleeping on a word of shared memory, and waking those that sleep on it: all that the core asks of the system.
 *
 *     word_sleep(word, seen, since, until, bits): sleeps while *word == seen, until this time at most; the whole wait,
 *         of which this is one sleep, has begun at `since`; times are those of now_ns
 *     word_wake(word, bits): wakes all that sleep on this word with one of these bits
 *
 * Both are hints. A sleep may end early, and its caller looks again; a wake may reach more sleepers than are meant.
 *
 * Linux has futexes. macOS 14.4 and later have the same under other names (os_sync_wait_on_address), and these are
 * looked up when they are first needed, so that one build serves older systems too. Elsewhere, and with
 * SHOAL_PORTABLE unless the process brings these functions, a sleeper takes naps and looks in between. A nap is short
 * against the wait so far, so an answer is seen late by an eighth of its own time at most.
 *
 * Condition variables and semaphores, which POSIX has for this, will not do. A worker that is killed while it holds the
 * mutex of a condition variable, or sleeps on one of glibc's, blocks all others for good; macOS has no robust mutexes, no
 * semaphores in shared memory, and no sem_timedwait. A nap keeps nothing that could be left behind. */
#ifndef SHOAL_SLEEPING_H
#define SHOAL_SLEEPING_H

#if defined(__linux__) && !defined(SHOAL_PORTABLE)
#define SHOAL_FUTEX 1
#else
#define SHOAL_FUTEX 0
#endif

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>
#if SHOAL_FUTEX
#include <linux/futex.h>
#include <sys/syscall.h>
#else
#include <dlfcn.h>
#endif

enum SleepResult { SLEEP_OVER = 0, SLEEP_TIMEOUT = 1, SLEEP_SIGNAL = 2 };

#define ALL_BITS 0xffffffffu

/* The clock of Python's time.monotonic_ns, which deadlines come from. */
#ifdef __APPLE__
#define SHOAL_CLOCK CLOCK_UPTIME_RAW
#else
#define SHOAL_CLOCK CLOCK_MONOTONIC
#endif

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(SHOAL_CLOCK, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#if SHOAL_FUTEX

static inline int word_sleep(_Atomic uint32_t *word, uint32_t seen, int64_t since, int64_t until, uint32_t bits) {
    (void)since;
    struct timespec at = {until / 1000000000, until % 1000000000};
    if (syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT_BITSET, seen, &at, NULL, bits) == 0 || errno == EAGAIN)
        return SLEEP_OVER;
    return errno == ETIMEDOUT ? SLEEP_TIMEOUT : SLEEP_SIGNAL;
}

static inline const char *sleeps_by(void) { return "futex"; }

static inline void word_wake(_Atomic uint32_t *word, uint32_t bits) {
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, bits);
}

#else

/* As macOS declares them in os/os_sync_wait_on_address.h and os/clock.h. */
enum { ADDRESS_SHARED = 1, ADDRESS_CLOCK = 32 };
typedef int (*AddressWait)(void *address, uint64_t value, size_t size, uint32_t flags, uint32_t clock, uint64_t ns);
typedef int (*AddressWake)(void *address, size_t size, uint32_t flags);

#define LEAST_NAP_NS 20000
#define MOST_NAP_NS 5000000

/* A function of the system by its name; NULL where it has none. Looked up once: 1 stands for "not looked up". */
static inline void *system_function(_Atomic uintptr_t *known, const char *name) {
    uintptr_t found = atomic_load_explicit(known, memory_order_relaxed);
    if (found == 1) {
        found = (uintptr_t)dlsym(RTLD_DEFAULT, name);
        atomic_store_explicit(known, found, memory_order_relaxed);
    }
    return (void *)found;
}

static inline AddressWait address_wait(void) {
    static _Atomic uintptr_t known = 1;
    return (AddressWait)system_function(&known, "os_sync_wait_on_address_with_timeout");
}

static inline AddressWake address_wake(void) {
    static _Atomic uintptr_t known = 1;
    return (AddressWake)system_function(&known, "os_sync_wake_by_address_all");
}

/* Naps that grow with the wait, until the word has changed. */
static inline int word_nap(_Atomic uint32_t *word, uint32_t seen, int64_t since, int64_t until) {
    while (atomic_load(word) == seen) {
        int64_t now = now_ns(), nap = (now - since) / 8;
        if (now >= until) return SLEEP_TIMEOUT;
        nap = nap < LEAST_NAP_NS ? LEAST_NAP_NS : nap > MOST_NAP_NS ? MOST_NAP_NS : nap;
        struct timespec rest = {0, (long)(nap < until - now ? nap : until - now)};
        if (nanosleep(&rest, NULL) != 0) return SLEEP_SIGNAL;
    }
    return SLEEP_OVER;
}

static inline const char *sleeps_by(void) { return address_wait() && address_wake() ? "address" : "naps"; }

/* There are no bits: all wake up, and those that were not meant go back to sleep. */
static inline int word_sleep(_Atomic uint32_t *word, uint32_t seen, int64_t since, int64_t until, uint32_t bits) {
    (void)bits;
    AddressWait wait = address_wait();
    if (wait == NULL) return word_nap(word, seen, since, until);
    int64_t ns = until - now_ns();
    if (ns <= 0) return SLEEP_TIMEOUT;
    if (wait((void *)word, seen, sizeof *word, ADDRESS_SHARED, ADDRESS_CLOCK, (uint64_t)ns) >= 0) return SLEEP_OVER;
    return errno == ETIMEDOUT ? SLEEP_TIMEOUT : SLEEP_SIGNAL;
}

static inline void word_wake(_Atomic uint32_t *word, uint32_t bits) {
    (void)bits;
    AddressWake wake = address_wake();
    if (wake != NULL) wake((void *)word, sizeof *word, ADDRESS_SHARED);
}

#endif

#endif
