/* An env in C for Shoal: a hunter on a plane chases a hare that runs in a circle.
 *
 *     cc -O2 -shared -fPIC -I$(python -c "import shoal.compiled as c; print(c.include_folder())") pursuit.c -o pursuit.so -lm
 *     python run.py pursuit.so
 */
#include "shoal_env.h"

typedef struct {
    double x, y, vx, vy; /* the hunter */
    double angle, turn;  /* the hare, on a circle around the middle */
} State;

static void reset(void *memory, uint64_t *rng) {
    State *state = memory;
    state->x = shoal_uniform(rng, -2.0, 2.0);
    state->y = shoal_uniform(rng, -2.0, 2.0);
    state->angle = shoal_uniform(rng, 0.0, 6.28);
    state->turn = shoal_integer(rng, 0, 2) ? 0.1 : -0.1;
}

static int step(void *memory, const void *action, double *reward, uint64_t *rng) {
    State *state = memory;
    const float *push = action;
    state->vx = 0.9 * state->vx + 0.1 * push[0];
    state->vy = 0.9 * state->vy + 0.1 * push[1];
    state->x += state->vx;
    state->y += state->vy;
    state->angle += state->turn + shoal_normal(rng, 0.0, 0.02);
    double dx = cos(state->angle) - state->x, dy = sin(state->angle) - state->y;
    double distance = sqrt(dx * dx + dy * dy);
    reward[0] = distance < 0.1 ? 10.0 : -distance;
    return distance < 0.1;
}

static void observe(const void *memory, void *obs) {
    const State *state = memory;
    float *seen = obs;
    seen[0] = (float)(cos(state->angle) - state->x);
    seen[1] = (float)(sin(state->angle) - state->y);
    seen[2] = (float)state->vx;
    seen[3] = (float)state->vy;
}

static const shoal_env pursuit = {
    .version = SHOAL_ENV_VERSION,
    .num_agents = 1,
    .name = "Pursuit",
    .state_size = sizeof(State),
    .max_episode_steps = 200,
    .observation = {.type = 'f', .dimensions = 1, .shape = {4}, .low = -INFINITY, .high = INFINITY},
    .action = {.type = 'f', .dimensions = 1, .shape = {2}, .low = -1.0, .high = 1.0},
    .reset = reset,
    .step = step,
    .observe = observe,
};

const shoal_env *shoal_env_v1(void) { return &pursuit; }
