/* An env for Shoal as a shared library. Include this, fill in a shoal_env, and export
 *
 *     const shoal_env *shoal_env_v1(void);
 *
 * Compile with `cc -O2 -shared -fPIC -I$(python -c "import shoal.compiled as c; print(c.include_folder())") env.c -o env.so`
 * and run it with `shoal.make(shoal.compiled.from_library("env.so"), num_envs=4096)`. examples/c_env/ is a whole one.
 *
 * The functions get one env's state at a time and may be called by several threads at once for different states: what
 * they write must be in the state, and no variable of the library. */
#ifndef SHOAL_ENV_H
#define SHOAL_ENV_H

#include <math.h>
#include <stdint.h>

#define SHOAL_ENV_VERSION 1

/* One array. type: 'f' float, 'd' double, 'B' uint8_t, 'i' int32_t, 'q' int64_t. All its numbers have the same bounds.
 * discrete: 0, or how many values there are: one int64_t then, from 0 up to that; the rest is not looked at. */
typedef struct {
    char type;
    int32_t dimensions;
    int64_t shape[8];
    double low, high;
    int64_t discrete;
} shoal_space;

typedef struct {
    int32_t version;           /* SHOAL_ENV_VERSION */
    int32_t num_agents;        /* 1, or how many rows actions, rewards and observations have */
    const char *name;
    int64_t state_size;        /* bytes of one env's state */
    int64_t max_episode_steps; /* then an episode is truncated; 0 for no limit */
    shoal_space observation, action; /* of one agent */

    /* Begin an episode. The state is all zeros. */
    void (*reset)(void *state, uint64_t *rng);
    /* One step: writes the reward of each agent, zeros so far, and returns whether the episode is over. */
    int (*step)(void *state, const void *action, double *reward, uint64_t *rng);
    /* Write what is seen into `obs`, which is all zeros. */
    void (*observe)(const void *state, void *obs);
} shoal_env;

/* Random numbers: the same bits as shoal.compiled.uniform and the others draw from the same seed and episode. */
static inline uint64_t shoal_bits(uint64_t *rng) {
    uint64_t z = (rng[0] += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* From low up to high, which is excluded. */
static inline double shoal_uniform(uint64_t *rng, double low, double high) {
    return low + (high - low) * ((double)(shoal_bits(rng) >> 11) * 0x1p-53);
}

/* A whole number from low up to high, which is excluded. */
static inline int64_t shoal_integer(uint64_t *rng, int64_t low, int64_t high) {
    return low + (int64_t)(shoal_bits(rng) % (uint64_t)(high - low));
}

static inline double shoal_normal(uint64_t *rng, double mean, double std) {
    double radius = sqrt(-2.0 * log(1.0 - shoal_uniform(rng, 0.0, 1.0)));
    return mean + std * (radius * cos(6.283185307179586 * shoal_uniform(rng, 0.0, 1.0)));
}

#endif
