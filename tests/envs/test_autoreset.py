"""All forms of autoreset answer as one table says: see `shoal.envs.autoreset`, their model.

The form on GPUs is compared in `tests/gpu/test_autoreset.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from autoreset_cells import (
    ACTIONS,
    CELLS,
    END,
    LIMIT,
    OBSERVATIONS,
    Cell,
    Counter,
    Kernel,
    KernelTeam,
    Rows,
    Team,
    check,
)
from shoal import Pool
from shoal.envs.autoreset import MODES, RULES
from shoal.envs.batched import RowsEnv
from shoal.native import AUTORESET

cells = pytest.mark.parametrize(("mode", "script"), CELLS)


def vector(mode: str) -> Any:
    return SyncVectorEnv([Counter, Counter], autoreset_mode=next(m for m in AutoresetMode if m.name.lower() == mode))


def resettable(mode: str) -> Any:
    """A vector env that leaves resets to its caller."""
    return SyncVectorEnv([Counter, Counter], autoreset_mode=AutoresetMode.DISABLED)


KINDS: dict[str, Any] = {
    "single envs": lambda mode: (Counter, 2, "serial"),
    "vector env": lambda mode: ([partial(vector, mode)], None, "serial"),
    "rows": lambda mode: ([lambda: RowsEnv(Rows())], None, "serial"),
    "team": lambda mode: (Team, 1, "serial"),
    "kernel": lambda mode: (Kernel, 2, "compiled"),
    "kernel of a team": lambda mode: (KernelTeam, 1, "compiled"),
    "plain class": lambda mode: (Kernel, 2, "serial"),
    "plain class of a team": lambda mode: (KernelTeam, 1, "serial"),
}


def rows_of(batch: Any) -> list[Cell]:
    finals = batch.final_obs
    return [
        Cell(
            float(batch.obs[i][0]), float(batch.reward[i]), bool(batch.terminated[i]), bool(batch.truncated[i]),
            bool(batch.began[i]), float(finals[i][0]) if i in finals else None, float(batch.episode_return[i]),
            int(batch.episode_length[i]),
        )
        for i in range(len(batch.reward))
    ]  # fmt: skip


def play_in_pool(what: tuple[Any, Any, str], mode: Any, script: str) -> None:
    env, count, backend = what
    if backend == "compiled":
        pytest.importorskip("numba")
    with Pool(env, count, backend=backend, autoreset=mode) as pool:  # type: ignore[arg-type]
        check(
            mode, script, lambda: rows_of(pool.reset()),
            lambda action: rows_of(pool.step(np.full(pool.num_envs, action))),
        )  # fmt: skip


@cells
@pytest.mark.parametrize("kind", KINDS)
def test_pools_answer_as_the_table_says(kind: str, mode: str, script: str) -> None:
    play_in_pool(KINDS[kind](mode), mode, script)


@pytest.mark.parametrize(("mode", "script"), [cell for cell in CELLS if cell[0] != "next_step"])
def test_a_vector_env_without_resets_answers_as_the_table_says(mode: str, script: str) -> None:
    play_in_pool(([partial(resettable, mode)], None, "serial"), mode, script)


class Functional:
    """The env of the table as functions."""

    observation_space, action_space = OBSERVATIONS, ACTIONS

    def _obs(self, time: Any) -> Any:
        import jax.numpy as jnp

        return jnp.asarray([10.0]) + time

    def reset(self, key: Any) -> Any:
        return self._obs(0), 0

    def step(self, key: Any, state: Any, action: Any) -> Any:
        time = state + 1
        return self._obs(time), time, time, action == END, time >= LIMIT, {}


@cells
def test_functional_envs_answer_as_the_table_says(mode: Any, script: str) -> None:
    pytest.importorskip("jax")
    from shoal.graph.jax.functional import BatchedFunctionalEnv

    envs = BatchedFunctionalEnv(Functional(), 2, autoreset=mode)
    state, _ = envs.init(0)

    def reset() -> list[Cell]:
        nonlocal state
        state, obs = envs.reset_rows(state, np.ones(2, np.bool_))
        return [Cell(float(obs[i][0]), *[None] * 7) for i in range(2)]

    def step(action: int) -> list[Cell]:
        nonlocal state
        state, answer = envs.step(state, np.full(2, action))
        over = np.asarray(answer.terminated | answer.truncated)
        finals = answer.final_obs if mode == "same_step" else [None] * 2
        return [
            Cell(
                float(answer.obs[i][0]), float(answer.reward[i]), bool(answer.terminated[i]), bool(answer.truncated[i]),
                bool(answer.began[i]), float(finals[i][0]) if mode == "same_step" and over[i] else None, None, None,
            )
            for i in range(2)
        ]  # fmt: skip

    check(mode, script, reset, step)


def test_each_mode_has_one_rule_and_a_number() -> None:
    assert tuple(AUTORESET) == MODES
    for rule in RULES.values():
        assert AUTORESET[rule.name] == rule.number
        assert [rule.begins_next, rule.resets_at_once, rule.user_resets].count(True) == 1


def test_infos_of_both_episodes_are_kept() -> None:
    """Under same_step the last info of an episode travels with the first one of the next."""

    class Telling(Counter):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return super().reset()[0], {"first": True}

        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"time": self.time}

    def make() -> Any:
        return SyncVectorEnv([Telling, Telling], autoreset_mode=AutoresetMode.DISABLED)

    with Pool([make], backend="serial", autoreset="same_step") as pool:
        pool.reset()
        infos = pool.step(np.array([END, 0])).info
        assert infos[0]["final_info"] == {"time": 1}
        assert infos[0]["first"]
        assert "final_info" not in infos[1]
        assert infos[1]["time"] == 1
