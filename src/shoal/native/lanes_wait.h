/* Lanes: the learner's side of the slab, what its methods are made of: requests, waits for answers, and counters.
 *
 *     a request: the lane's frame slot moves on, its op is written, requested[lane] += 1, its worker is rung
 *     an answer: a lane is ready when answered[lane] == requested[lane]; a wait ends when enough are
 *
 * requested is written here only, answered by the worker only: together they are the lane's sequence
 * number, and a late answer to an older request can never be taken for the newer one.
 * The pool's bell counts answers. It is a hint for when to look; the arrays are the truth. */
#ifndef SHOAL_LANES_WAIT_H
#define SHOAL_LANES_WAIT_H

#include "actions.h"
#include "compat.h"
#include "counters.h"
#include "kernel.h"

#include <stdlib.h>

/* `rank` says which come first: done_ns, or the place in the order of sends. */
typedef struct { int64_t rank, lane; } Candidate;

typedef struct {
    PyObject_HEAD
    Py_buffer slab, state, owner;
    Py_buffer leader;     /* [lanes]: the last lane of each one's group, which answers last; len 0: each is its own */
    int64_t window;       /* how many neighbours are collected together; 0 for any */
    int64_t lanes, frames, workers;
    Fields at;
    uint32_t alarm_seen;
    int64_t parties, cores; /* how many wait or work, and on how many cores; 0: waits never spin of themselves */
    Estimate wait;        /* of the caller, for answers */
    Estimate away;        /* of the caller, from one batch to its next request */
    int64_t batch_ns;     /* when the last batch was complete */
    int64_t wake_ns;      /* what it usually costs to wake up; 0: not known yet */
    Trials trials;        /* which sides spin */
    Spin spin;            /* what was decided for the caller; for the workers, see the field `waiting` */
    int slept;            /* whether the last wait has ended in a sleep */
    Candidate *candidates;
    Candidate *ranked;    /* the candidates once more, to find the first of them */
    uint8_t *marked;      /* lanes that were named in this send; all 0 elsewhere */
    uint8_t *touched;     /* workers to ring in this post */
    int64_t *last_lane;   /* of each worker; -1 for none */
    int whole;            /* whether the last request was to all lanes, and was not waited for yet */
    uint32_t whole_at;    /* the count of the pool's bell when all have answered it */
    Py_buffer sent_at;    /* [lanes + 1]: each lane's place in the order of sends, and their number; len 0: any order */
    int64_t *oldest;      /* the lanes that were sent to first, where `sent_at` is known */
    _Atomic int in_use;   /* 1 while a thread is inside: a second one is refused */
    PyObject *refusal;
    Actions actions;
    int64_t *finished;    /* of each worker: when it was done with what was taken last, 0 for none of it */
    int taken;            /* whether what was taken last is still to be handed over */
    PyObject *kernel_object; /* steps all lanes at once; NULL where nothing does */
    Kernel *kernel;
} Lanes;

static void lanes_request(Lanes *self, int64_t lane, uint8_t op) {
    uint8_t *state = self->state.buf;
    state[lane] = LANE_PENDING;
    self->whole = 0;
    self->at.slot[lane] = (uint8_t)((self->at.slot[lane] + 1) % self->frames);
    self->at.op[lane] = op;
    uint64_t sequence = atomic_load_explicit(&self->at.requested[lane], memory_order_relaxed);
    atomic_store_explicit(&self->at.requested[lane], sequence + 1, memory_order_release);
    self->touched[((const int32_t *)self->owner.buf)[lane]] = 1;
}

/* The lanes (NULL: all) are sent to, in this order. */
static void lanes_note_order(Lanes *self, const int64_t *lane, int64_t count) {
    if (self->sent_at.obj == NULL) return;
    int64_t *sent_at = self->sent_at.buf, *sends = &sent_at[self->lanes];
    for (int64_t i = 0; i < count; i++) sent_at[lane ? lane[i] : i] = (*sends)++;
}

/* The same for all lanes, none of which is busy. */
static void lanes_request_all(Lanes *self, uint8_t op) {
    uint8_t *slot = self->at.slot;
    memset(self->state.buf, LANE_PENDING, (size_t)self->lanes);
    memset(self->at.op, op, (size_t)self->lanes);
    for (int64_t lane = 0; lane < self->lanes; lane++) slot[lane] = slot[lane] + 1 < self->frames ? slot[lane] + 1 : 0;
    self->whole = 1;
    self->whole_at = atomic_load(&self->at.pool_bell->count) + (uint32_t)self->lanes;
    for (int64_t lane = 0; lane < self->lanes; lane++) {
        uint64_t sequence = atomic_load_explicit(&self->at.requested[lane], memory_order_relaxed);
        atomic_store_explicit(&self->at.requested[lane], sequence + 1, memory_order_release);
    }
    for (int64_t worker = 0; worker < self->workers; worker++) self->touched[worker] = self->last_lane[worker] >= 0;
}

/* ---- whether to spin ------------------------------------------------------------------------------------------ */

#define DECIDE_EACH 16 /* batches from one decision to the next: it reads what all workers have written */

static inline void lanes_tell_workers(Lanes *self, Spin spin) {
    Waiting *waiting = self->at.waiting;
    if (atomic_load_explicit(&waiting->rest_ns, memory_order_relaxed) != spin.rest_ns)
        atomic_store_explicit(&waiting->rest_ns, spin.rest_ns, memory_order_relaxed);
    if (atomic_load_explicit(&waiting->spin_ns, memory_order_relaxed) != spin.spin_ns)
        atomic_store_explicit(&waiting->spin_ns, spin.spin_ns, memory_order_relaxed);
}

/* How long workers usually are idle between two passes, over all that wait at all. */
static Estimate lanes_idle(Lanes *self) {
    Estimate idle = {0, 0};
    int64_t known = 0;
    for (int64_t worker = 0; worker < self->workers; worker++) {
        const int64_t *stats = self->at.stats + worker * STAT_WIDTH;
        int64_t usual = __atomic_load_n(&stats[STAT_IDLE_NS], __ATOMIC_RELAXED);
        if (usual == 0) continue; /* it has never waited, as the caller's own block never does */
        idle.usual_ns += usual;
        idle.spread_ns += __atomic_load_n(&stats[STAT_IDLE_SPREAD_NS], __ATOMIC_RELAXED);
        known++;
    }
    if (known > 1) {
        idle.usual_ns /= known;
        idle.spread_ns /= known;
    }
    return idle;
}

/* Decides how the next waits of all sides go, from how long the last ones took. */
static void lanes_decide(Lanes *self) {
    Estimate idle = lanes_idle(self);
    Trials *trials = &self->trials;
    int64_t way = first_way(self->parties, self->cores);
    int64_t possible = (is_short(self->wait, trials->possible & CALLER_SPINS) ? CALLER_SPINS : 0) |
                       (is_short(idle, trials->possible & WORKERS_SPIN) ? WORKERS_SPIN : 0);
    if (way == 0) possible = 0;
    if (possible != trials->possible) trials_begin(trials, possible, way);
    Spin none = {0, 0}, hold = {0, HOLD_NS};
    int spare = self->parties <= self->cores;
    self->spin = trials->way & CALLER_SPINS ? hold
               : spare && !(possible & CALLER_SPINS) ? rest_for(self->wait, self->wake_ns) : none;
    lanes_tell_workers(self, trials->way & WORKERS_SPIN ? hold
                           : spare && !(possible & WORKERS_SPIN) ? rest_for(idle, self->wake_ns) : none);
}

/* A wait that began then was answered at `last`, and ended `now`. */
static inline void lanes_learn(Lanes *self, int64_t began, int64_t last, int64_t now) {
    estimate_add(&self->wait, last - began);
    if (self->slept) {
        Estimate wake = {self->wake_ns, 0};
        estimate_add(&wake, now - last);
        self->wake_ns = wake.usual_ns;
        self->at.pool_stats[POOL_SLEEPS]++;
        self->slept = 0;
    }
    /* What the caller does between two batches counts, because workers that spin may slow it down. What it does only now
     * and then, as learning, does not. */
    int64_t away = self->batch_ns ? began - self->batch_ns : 0, most = 2 * self->away.usual_ns;
    self->batch_ns = now;
    estimate_add(&self->away, away);
    if (self->cores <= 0) return;
    int over = self->trials.possible && trials_add(&self->trials, now - began + (away < most ? away : most));
    if (over || self->at.pool_stats[POOL_BATCHES] % DECIDE_EACH == 0) lanes_decide(self);
}

/* ---- where the caller's time goes -------------------------------------------------------------------------- */

/* The caller has come back: it was elsewhere since its last call ended. */
static inline void lanes_arrived(Lanes *self, int64_t now) {
    self->at.pool_stats[POOL_CALLER_NS] += now - self->at.pool_stats[POOL_SINCE_NS];
    self->at.pool_stats[POOL_SINCE_NS] = now;
    self->taken = 0;
}

/* A wait is over, whatever it has brought. */
static inline void lanes_waited(Lanes *self, int64_t began, int64_t now) {
    if (!COUNTING) return;
    self->at.pool_stats[POOL_WAIT_NS] += now - began;
    self->at.pool_stats[POOL_SINCE_NS] = now;
}

/* What a wait has brought was taken; `finished` says when each worker was done with its part. Stragglers: how much
 * sooner the answers would have been there if all workers had finished together. Not counted where something is still
 * pending: then a worker that is done early has other requests to work on. */
static void lanes_count_batch(Lanes *self, int64_t began, int64_t now) {
    if (!COUNTING) return;
    int64_t last = began, workers = 0, early = 0;
    for (int64_t worker = 0; worker < self->workers; worker++)
        if (self->finished[worker] > last) last = self->finished[worker];
    for (int64_t worker = 0; worker < self->workers; worker++) {
        int64_t finished = self->finished[worker];
        if (finished == 0) continue;
        self->finished[worker] = 0;
        early += last - (finished > began ? finished : began);
        workers++;
    }
    if (workers > 1 && memchr(self->state.buf, LANE_PENDING, (size_t)self->lanes) == NULL)
        self->at.pool_stats[POOL_STRAGGLER_NS] += early / workers;
    self->at.pool_stats[POOL_WAKE_NS] += now > last ? now - last : 0;
    self->at.pool_stats[POOL_BATCHES]++;
    self->taken = 1;
    lanes_learn(self, began, last, now);
}

static inline int lanes_has_answered(Lanes *self, int64_t lane) {
    return atomic_load_explicit(&self->at.answered[lane], memory_order_acquire) ==
           atomic_load_explicit(&self->at.requested[lane], memory_order_relaxed);
}

/* Its own answer counts as well as its leader's: a lane that was reset alone has a leader that was asked nothing. */
static inline int lanes_is_ready(Lanes *self, int64_t lane) {
    return ((const uint8_t *)self->state.buf)[lane] == LANE_PENDING && lanes_has_answered(self, lane) &&
           (!self->leader.obj || lanes_has_answered(self, ((const int64_t *)self->leader.buf)[lane]));
}

/* Fills candidates with the ready lanes: of `wanted` if given, of all otherwise. */
static int64_t lanes_scan(Lanes *self, const int64_t *wanted, int64_t wanted_count) {
    int64_t ready = 0, count = wanted ? wanted_count : self->lanes;
    for (int64_t i = 0; i < count; i++) {
        int64_t lane = wanted ? wanted[i] : i;
        if (lanes_is_ready(self, lane)) {
            self->candidates[ready].lane = lane;
            self->candidates[ready++].rank = self->at.done_ns[lane];
        }
    }
    return ready;
}

static inline int comes_before(const Candidate *a, const Candidate *b) {
    return a->rank != b->rank ? a->rank < b->rank : a->lane < b->lane;
}

/* Keeps of the candidates, which are ascending by lane, the first `need` by rank; they stay ascending. Finds the last of
 * these by quickselect, with pivots at random, for which no order of lanes is a slow one. */
static void lanes_keep_first(Lanes *self, int64_t count, int64_t need) {
    Candidate *ranked = self->ranked;
    int64_t low = 0, high = count - 1;
    uint64_t random = 1;
    memcpy(ranked, self->candidates, sizeof(Candidate) * (size_t)count);
    while (low < high) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        Candidate pivot = ranked[low + (int64_t)((random >> 33) % (uint64_t)(high - low + 1))];
        int64_t i = low, j = high;
        while (i <= j) {
            while (comes_before(&ranked[i], &pivot)) i++;
            while (comes_before(&pivot, &ranked[j])) j--;
            if (i > j) break;
            Candidate other = ranked[i];
            ranked[i++] = ranked[j];
            ranked[j--] = other;
        }
        if (need - 1 <= j) high = j;
        else if (need - 1 >= i) low = i;
        else break;
    }
    Candidate last = ranked[need - 1];
    for (int64_t from = 0, to = 0; from < count; from++)
        if (!comes_before(&last, &self->candidates[from])) self->candidates[to++] = self->candidates[from];
}

static int by_lane(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    return x->lane < y->lane ? -1 : x->lane > y->lane;
}

/* Keeps of the candidates, which are ascending, those of the window that was complete first; none where there is no
 * such window: then `missing` is how many answers the fullest one lacks. */
static int64_t lanes_first_window(Lanes *self, int64_t ready, int64_t *missing) {
    int64_t best = -1, best_ns = 0, fullest = 0;
    for (int64_t i = 0, end; i < ready; i = end) {
        int64_t window = self->candidates[i].lane / self->window, done_ns = 0;
        for (end = i; end < ready && self->candidates[end].lane / self->window == window; end++)
            if (self->candidates[end].rank > done_ns) done_ns = self->candidates[end].rank;
        if (end - i > fullest) fullest = end - i;
        if (end - i == self->window && (best < 0 || done_ns < best_ns)) { best = i; best_ns = done_ns; }
    }
    *missing = self->window - fullest;
    if (best < 0) return 0;
    memmove(self->candidates, self->candidates + best, sizeof(Candidate) * (size_t)self->window);
    return self->window;
}

/* Whether all lanes were asked and have answered. The last ones first, as these answer last. */
static int lanes_all_ready(Lanes *self) {
    if (memchr(self->state.buf, LANE_IDLE, (size_t)self->lanes) != NULL) return 0;
    for (int64_t lane = self->lanes - 1; lane >= 0; lane--)
        if (!lanes_has_answered(self, lane)) return 0;
    self->candidates[0].lane = 0;
    return 1;
}

/* Whether so many can be waited for: they are pending, and a whole window of them is where windows are collected. */
static int lanes_enough_pending(Lanes *self, int64_t need) {
    const uint8_t *state = self->state.buf;
    if (need == self->lanes) return memchr(state, LANE_IDLE, (size_t)self->lanes) == NULL;
    if (self->window > 0 && need == self->window) {
        for (int64_t lane = 0; lane + need <= self->lanes; lane += need)
            if (memchr(state + lane, LANE_IDLE, (size_t)need) == NULL) return 1;
        return 0;
    }
    int64_t pending = 0;
    for (int64_t lane = 0; lane < self->lanes; lane++) pending += state[lane] == LANE_PENDING;
    return pending >= need;
}

/* The `need` pending lanes that were sent to first, ascending. */
static const int64_t *lanes_oldest(Lanes *self, int64_t need) {
    const uint8_t *state = self->state.buf;
    const int64_t *sent_at = self->sent_at.buf;
    int64_t count = 0;
    for (int64_t lane = 0; lane < self->lanes; lane++)
        if (state[lane] == LANE_PENDING) self->candidates[count++] = (Candidate){sent_at[lane], lane};
    if (count > need) lanes_keep_first(self, count, need);
    for (int64_t i = 0; i < need; i++) self->oldest[i] = self->candidates[i].lane;
    return self->oldest;
}

/* Waits until `need` lanes are ready; spins as was decided for all if `spin_ns` is negative. The count of ready lanes
 * (>= need), or a CollectResult. */
static int64_t lanes_wait(Lanes *self, int64_t need, const int64_t *wanted, int64_t deadline, int64_t spin_ns) {
    Spin spin = spin_ns < 0 ? self->spin : (Spin){0, spin_ns};
    self->slept = 0;
    for (;;) {
        uint32_t count = atomic_load(&self->at.pool_bell->count);
        uint32_t alarm = atomic_load(&self->at.pool_bell->alarm);
        /* The alarm first: while other lanes are ready again and again, the loss of a worker must still be reported. */
        if (alarm != self->alarm_seen) {
            self->whole = 0; /* the bell of a worker that is gone will not ring */
            return COLLECT_ALARM;
        }
        if (need == self->lanes && lanes_all_ready(self)) return need;
        int windowed = wanted == NULL && self->window > 0 && need == self->window;
        uint32_t target = self->whole_at;
        if (!self->whole || need < self->lanes) {
            int64_t ready = lanes_scan(self, wanted, need), missing = need - ready;
            if (windowed) ready = lanes_first_window(self, ready, &missing);
            if (ready >= need) return ready;
            target = count + (uint32_t)missing;
        }
        self->whole = 0; /* the bell is a hint: if that was too early, the lanes that are missing are counted */
        if (PyErr_CheckSignals() < 0) return COLLECT_RAISED;
        int result;
        Py_BEGIN_ALLOW_THREADS
        result = bell_wait(self->at.pool_bell, target, alarm, deadline, spin, &self->slept);
        Py_END_ALLOW_THREADS
        if (result == BELL_TIMEOUT) {
            int64_t ready = lanes_scan(self, wanted, need), missing;
            if (windowed) ready = lanes_first_window(self, ready, &missing);
            return ready >= need ? ready : COLLECT_TIMEOUT;
        }
    }
}

/* Runs the caller's own block, if it has one, and waits; no other thread may be inside meanwhile. */
static int64_t lanes_run_and_wait(Lanes *self, PyObject *run, int64_t need, const int64_t *wanted,
                                  int64_t deadline, int64_t spin_ns) {
    if (atomic_exchange(&self->in_use, 1)) return IN_USE;
    int64_t ready = 0;
    if (run != Py_None) {
        PyObject *stepped = shoal_call(run, NULL, 0);
        if (stepped == NULL) ready = COLLECT_RAISED;
        else Py_DECREF(stepped);
    }
    if (ready == 0) ready = lanes_wait(self, need, wanted, deadline, spin_ns);
    atomic_store(&self->in_use, 0);
    return ready;
}

static inline void lanes_note_finish(Lanes *self, int64_t lane) {
    int64_t *finished = &self->finished[((const int32_t *)self->owner.buf)[lane]], done = self->at.done_ns[lane];
    if (done > *finished) *finished = done;
}

/* Marks all lanes, which are ready, as taken; as lanes_take. */
static int lanes_take_all(Lanes *self, int64_t *ids, int *status) {
    memset(self->state.buf, LANE_IDLE, (size_t)self->lanes);
    for (int64_t lane = 0; ids != NULL && lane < self->lanes; lane++) ids[lane] = lane;
    /* A worker answers its lanes one after the other. */
    for (int64_t worker = 0; COUNTING && worker < self->workers; worker++)
        if (self->last_lane[worker] >= 0) lanes_note_finish(self, self->last_lane[worker]);
    uint8_t slot = self->at.slot[0], bits = 0;
    int mixed = memcmp(self->at.slot, self->at.slot + 1, (size_t)self->lanes - 1) != 0;
    const uint8_t *row = self->at.status + slot * self->lanes;
    for (int64_t lane = 0; lane < self->lanes; lane++)
        bits |= mixed ? self->at.status[self->at.slot[lane] * self->lanes + lane] : row[lane];
    *status |= bits;
    return mixed ? -1 : slot;
}

/* Marks the first `need` candidates as taken. Their common slot, or -1 if they are not one run in one frame. */
static int lanes_take(Lanes *self, int64_t need, int64_t *ids, int *status) {
    if (need == self->lanes) return lanes_take_all(self, ids, status);
    uint8_t *state = self->state.buf;
    int64_t first = self->candidates[0].lane;
    int slot = self->at.slot[first];
    for (int64_t i = 0; i < need; i++) {
        int64_t lane = self->candidates[i].lane;
        if (ids != NULL) ids[i] = lane;
        state[lane] = LANE_IDLE;
        if (COUNTING) lanes_note_finish(self, lane);
        *status |= self->at.status[self->at.slot[lane] * self->lanes + lane];
        if (lane != first + i || self->at.slot[lane] != self->at.slot[first]) slot = -1;
    }
    return slot;
}

#endif
