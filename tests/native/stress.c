/* Hammers the bells of doorbell.h and crowd.h from threads and from processes, to be run under TSan, ASan and UBSan.
 *
 *     gcc -std=c11 -O1 -g -Wall -Wextra -pthread -fsanitize=thread -Isrc/shoal/native tests/native/stress.c -o stress
 *     ./stress [rounds]
 *
 * A lost wake-up leaves somebody asleep for ever: alarm() then ends the program, and that is the failure.
 * Prints one line for each scenario; the exit status is 0 if all of them held. */
#define _GNU_SOURCE
#include "crowd.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { WORKERS = 4, BELLS = WORKERS + 1, LIMIT_S = 120, MAX_ROUNDS = 1 << 20 };

#define CHECK(condition)                                                                        \
    do {                                                                                        \
        if (!(condition)) {                                                                     \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);             \
            _exit(1);                                                                           \
        }                                                                                       \
    } while (0)

typedef struct {
    Bell pool, worker[WORKERS];
    Crowd crowd;
    Waiting waiting;
    struct { int64_t request, answer; char pad[48]; } mail[WORKERS]; /* plain memory: TSan sees whether bells order it */
    _Atomic int heard, stop;
} Shared;

static Shared *shared;
static int rounds = 5000;

/* A cheap generator for spin times and pauses: every round meets another interleaving. */
static uint32_t chance(uint32_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

static int64_t some_spin(uint32_t *state) {
    static const int64_t choices[] = {0, 0, 500, 5000, 30000};
    return choices[chance(state) % 5];
}

static void some_pause(uint32_t *state) {
    uint32_t what = chance(state) % 16;
    if (what == 0) usleep(chance(state) % 50);
    else if (what < 4) sched_yield();
}

/* The caller's wait: it goes back to sleep after a nap, and sometimes rests before it spins. */
static int wait_on(Bell *bell, uint32_t target, uint32_t alarm, int64_t deadline, int64_t spin_ns) {
    int result, slept;
    Spin spin = {spin_ns == 5000 ? 3000 : 0, spin_ns};
    do result = bell_wait(bell, target, alarm, deadline, spin, &slept);
    while (result == BELL_SIGNAL);
    return result;
}

/* A worker's wait: by itself, or as the pool has decided for all, which changes all the time. */
static void wait_as(Member *me, uint32_t *state) {
    int result, slept;
    int64_t spin_ns = chance(state) % 2 ? -1 : some_spin(state);
    do result = member_wait(me, -1, spin_ns, now_ns(), &slept);
    while (result == BELL_SIGNAL);
    CHECK(result == BELL_REACHED);
    member_heard(me);
}

static void start_over(uint32_t count) {
    memset((void *)shared, 0, sizeof *shared);
    atomic_store(&shared->pool.count, count);
    for (int i = 0; i < WORKERS; i++) atomic_store(&shared->worker[i].count, count);
    atomic_store(&shared->crowd.count, count);
    atomic_store(&shared->crowd.all, count);
}

/* ---- scenario 1: the pool asks all workers, each answers, the pool waits for all or for some --------------- */

static void worker_life(int index) {
    Member me = {&shared->worker[index], &shared->crowd, &shared->waiting, 0, 0, member_bit(index), 0};
    uint32_t state = 2463534242u + (uint32_t)index;
    member_heard(&me);
    atomic_fetch_add(&shared->heard, 1); /* the pool starts when all have looked at their bells */
    for (int64_t turn = 1; turn <= rounds; turn++) {
        wait_as(&me, &state);
        CHECK(shared->mail[index].request == turn);
        shared->mail[index].answer = -turn;
        some_pause(&state);
        bell_ring(&shared->pool, 1);
    }
}

/* Asks all workers: at once, in two parts, or one by one. */
static void ask_all(uint32_t *state) {
    uint8_t some[WORKERS] = {0}, others[WORKERS];
    uint32_t how = chance(state) % 4;
    for (int i = 0; i < WORKERS; i++) some[i] = how == 0 ? chance(state) % 2 : 1;
    for (int i = 0; i < WORKERS; i++) others[i] = !some[i];
    if (how == 1) {
        for (int i = 0; i < WORKERS; i++) crowd_ring_one(&shared->crowd, &shared->worker[i], i);
        return;
    }
    crowd_ring(&shared->crowd, shared->worker, some, WORKERS, now_ns());
    if (how == 0) some_pause(state);
    if (memchr(others, 1, sizeof others)) crowd_ring(&shared->crowd, shared->worker, others, WORKERS, now_ns());
}

static void pool_life(void) {
    uint32_t state = 88172645u;
    while (atomic_load(&shared->heard) < WORKERS) sched_yield();
    for (int64_t turn = 1; turn <= rounds; turn++) {
        uint32_t before = atomic_load(&shared->pool.count);
        if (chance(&state) % 16 == 0) {
            int64_t awake_ns = now_ns() + chance(&state) % 100000;
            crowd_prepare(&shared->crowd, &shared->waiting, shared->worker, WORKERS, awake_ns);
        }
        atomic_store(&shared->waiting.rest_ns, chance(&state) % 4 ? 0 : chance(&state) % 50000);
        atomic_store(&shared->waiting.spin_ns, some_spin(&state));
        for (int i = 0; i < WORKERS; i++) shared->mail[i].request = turn;
        ask_all(&state);
        uint32_t need = 1 + chance(&state) % WORKERS; /* first a part of them, then the rest */
        CHECK(wait_on(&shared->pool, before + need, 0, -1, some_spin(&state)) == BELL_REACHED);
        CHECK(wait_on(&shared->pool, before + WORKERS, 0, -1, some_spin(&state)) == BELL_REACHED);
        CHECK(atomic_load(&shared->pool.count) == before + WORKERS);
        for (int i = 0; i < WORKERS; i++) CHECK(shared->mail[i].answer == -turn);
        some_pause(&state);
    }
}

/* ---- scenario 2: nobody answers, and the supervisor cries out ---------------------------------------------- */

static void crier_life(void) {
    uint32_t state = 1u;
    for (int turn = 1; turn <= rounds; turn++) {
        some_pause(&state);
        bell_cry(&shared->pool);
        while (atomic_load(&shared->heard) < turn) sched_yield();
    }
}

static void listener_life(void) {
    uint32_t state = 7u, alarm = 0;
    for (int turn = 1; turn <= rounds; turn++) {
        uint32_t target = atomic_load(&shared->pool.count) + 1000000;
        CHECK(wait_on(&shared->pool, target, alarm, -1, some_spin(&state)) == BELL_ALARM);
        CHECK(atomic_load(&shared->pool.alarm) == ++alarm);
        atomic_store(&shared->heard, turn);
    }
}

/* ---- scenario 3: deadlines, with rings that are too few ----------------------------------------------------- */

static void fidget_life(void) {
    uint32_t state = 3u;
    while (!atomic_load(&shared->stop)) {
        bell_ring(&shared->pool, 1);
        some_pause(&state);
        usleep(20);
    }
}

static void impatient_life(void) {
    uint32_t state = 9u;
    for (int turn = 0; turn < rounds / 20 + 1; turn++) {
        int64_t deadline = now_ns() + 100000 + chance(&state) % 200000;
        uint32_t target = atomic_load(&shared->pool.count) + 1000000;
        CHECK(wait_on(&shared->pool, target, 0, deadline, some_spin(&state)) == BELL_TIMEOUT);
        CHECK(now_ns() >= deadline);
        CHECK(atomic_load(&shared->pool.waiting) == 0);
    }
    CHECK(wait_on(&shared->pool, atomic_load(&shared->pool.count) + 3, 0, -1, 0) == BELL_REACHED);
    atomic_store(&shared->stop, 1);
}

/* ---- scenario 4: a signal ends the sleep -------------------------------------------------------------------- */

static pthread_t sleeper;

static void on_signal(int number) { (void)number; }

static void poker_life(void) {
    for (int turn = 1; turn <= rounds / 20 + 1; turn++)
        while (atomic_load(&shared->heard) < turn) {
            /* One that comes just before the sleep is lost, as everywhere: so again and again. */
            pthread_kill(sleeper, SIGUSR1);
            usleep(30);
        }
}

static void poked_life(void) {
    for (int turn = 1; turn <= rounds / 20 + 1; turn++) {
        int slept;
        CHECK(bell_wait(&shared->pool, atomic_load(&shared->pool.count) + 1, 0, -1, (Spin){0, 0}, &slept) == BELL_SIGNAL);
        atomic_store(&shared->heard, turn);
    }
}

/* ---- running them -------------------------------------------------------------------------------------------- */

typedef struct { void (*life)(void); int index; } Job;

static void *thread_main(void *argument) {
    Job *job = argument;
    if (job->life) job->life();
    else worker_life(job->index);
    return NULL;
}

static void in_threads(void (*first)(void), void (*other)(void), int others) {
    pthread_t threads[WORKERS];
    Job jobs[WORKERS];
    sleeper = pthread_self();
    for (int i = 0; i < others; i++) {
        jobs[i] = (Job){other, i};
        CHECK(pthread_create(&threads[i], NULL, thread_main, &jobs[i]) == 0);
    }
    first();
    for (int i = 0; i < others; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

static void in_processes(void (*first)(void), void (*other)(void), int others) {
    for (int i = 0; i < others; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(LIMIT_S);
            thread_main(&(Job){other, i});
            _exit(0);
        }
    }
    first();
    for (int i = 0; i < others; i++) {
        int status = 0;
        CHECK(wait(&status) > 0);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

int main(int count, char **words) {
    static const uint32_t starts[] = {0, UINT32_MAX - 1000, INT32_MAX - 1000}; /* both turns of the counter */
    if (count > 1) rounds = atoi(words[1]);
    CHECK(rounds > 0 && rounds < MAX_ROUNDS);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    CHECK(sizeof(Bell) == 64 && (uintptr_t)shared % 64 == 0);
    struct sigaction action = {.sa_handler = on_signal};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    alarm(LIMIT_S);
    setvbuf(stdout, NULL, _IONBF, 0);
    for (int i = 0; i < 3; i++) { /* processes first: a sanitizer dislikes a fork of threads */
        start_over(starts[i]);
        in_processes(pool_life, NULL, WORKERS);
        printf("rings between processes, from %u: %d rounds\n", starts[i], rounds);
    }
    start_over(0);
    in_processes(listener_life, crier_life, 1);
    printf("cries between processes: %d\n", rounds);
    for (int i = 0; i < 3; i++) {
        start_over(starts[i]);
        in_threads(pool_life, NULL, WORKERS);
        printf("rings between threads, from %u: %d rounds\n", starts[i], rounds);
    }
    start_over(UINT32_MAX - 100);
    in_threads(listener_life, crier_life, 1);
    printf("cries between threads: %d\n", rounds);
    start_over(0);
    in_threads(impatient_life, fidget_life, 1);
    printf("deadlines: %d\n", rounds / 20 + 1);
    start_over(0);
    in_threads(poked_life, poker_life, 1);
    printf("signals: %d\n", rounds / 20 + 1);
    return 0;
}
