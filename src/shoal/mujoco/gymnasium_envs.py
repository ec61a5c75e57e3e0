"""Gymnasium's eleven MuJoCo envs of version 5, with a lane for each env.

An object of Gymnasium's own class is the model of each batch: it takes all constructor arguments, makes the spaces, and
draws where episodes begin, each lane by its own generator. So seeds and arguments mean the same in both. What its
methods compute for one env, the classes here compute for all lanes, in the same order of operations: results are the
same to the last bit (`tests/simulators/test_same_as_gymnasium.py` compares every class and argument).

Costs of actions are in single precision, because actions are; so are they in Gymnasium.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.mujoco.batch import BatchedMujocoEnv, Columns, States

Array = npt.NDArray[Any]
MODULE = "gymnasium.envs.mujoco"


class GymnasiumBatch(BatchedMujocoEnv):
    """Many envs of one of Gymnasium's classes.

    Args:
        num_envs: how many lanes.
        max_episode_steps: steps after which an episode is truncated; None for no limit.
        num_threads: how many threads step them; by default one for each core.
        **arguments: all of Gymnasium's class.
    """

    like_class = ""  # "module:Class" below `gymnasium.envs.mujoco`
    like_fields: Sequence[str] = ("qpos", "qvel")
    like_keep: Sequence[str] = ()

    def __init__(
        self,
        num_envs: int = 1,
        *,
        max_episode_steps: int | None = None,
        num_threads: int | None = None,
        **arguments: Any,
    ):
        module, _, name = self.like_class.partition(":")
        self.like = like = getattr(importlib.import_module(f"{MODULE}.{module}"), name)(**arguments)
        self.metadata, self.dt = dict(like.metadata), like.dt
        self.metadata["render_modes"] = [mode for mode in self.metadata["render_modes"] if mode != "human"]
        contacts = "cfrc_ext" in self.like_fields
        super().__init__(
            like.model, num_envs, fields=self.like_fields, keep=self.like_keep,
            after=("mj_rnePostConstraint",) if contacts else (), frame_skip=like.frame_skip,
            max_episode_steps=max_episode_steps, observation_space=like.observation_space,
            action_space=like.action_space, render_mode=like.render_mode, num_threads=num_threads,
        )  # fmt: skip
        self._renderer = like.mujoco_renderer
        # Only draws: the simulations are set, and observed, all at once.
        like.set_state, like._get_obs = self._take_drawn, lambda: None
        self._init_qpos = like.init_qpos.copy()

    def draw(self, qpos: Array, qvel: Array, rngs: Sequence[np.random.Generator]) -> None:
        for row, rng in enumerate(rngs):
            self.like._np_random = rng
            self.like.reset_model()
            qpos[row], qvel[row] = self._drawn

    def _take_drawn(self, qpos: Array, qvel: Array) -> None:
        self._drawn = qpos, qvel

    def lane(self, row: int) -> Any:
        """An env of Gymnasium's class that looks at this lane: all of its methods and attributes are there."""
        env = object.__new__(type(self.like))  # `copy` would construct a new one
        env.__dict__.update(self.like.__dict__)
        del env.set_state, env._get_obs  # the class has its own
        env.model, env.data = self.sims.models[row], self.sims.data[row]
        env.spec, env.render = self.spec, functools.partial(self.frame, row)
        env._np_random = self.generators([row])[0]
        return env

    def set_shared(self, name: str, value: Any) -> None:
        if name in ("model", "data"):
            super().set_shared(name, value)
        setattr(self.like, name, value)


def squares(actions: Array) -> Array:
    """The sum of squares of each row."""
    sums: Array = np.square(actions).sum(axis=1)
    return sums


def norms(rows: Array) -> Array:
    """The length of each row; as `numpy.linalg.norm`, which multiplies rows by BLAS."""
    products = np.matmul(rows[:, None, :], rows[:, :, None])
    found: Array = np.sqrt(products[:, 0, 0])
    return found


def powers(values: Array) -> Array:
    """The square of each number as `number ** 2` gives it: by C's `pow`, whose last bit is not that of arrays."""
    return np.array([value**2 for value in values])


def within(low: float, values: Array, high: float) -> Array:
    """Whether values lie between two others."""
    return (low < values) & (values < high)


def place_of(now: States) -> Columns:
    """Where bodies are in the plane, as infos have it."""
    place = now.qpos[:, :2]
    return {"x_position": place[:, 0], "y_position": place[:, 1], "distance_from_origin": norms(place)}


class Runner(GymnasiumBatch):
    """What moves along the x axis: HalfCheetah, Hopper, Swimmer and Walker2d."""

    like_keep: Sequence[str] = ("qpos",)

    def moved(self, now: States, before: States) -> Array:
        """Velocities along the x axis."""
        velocity: Array = (now.qpos[:, 0] - before.qpos[:, 0]) / self.dt
        return velocity

    def cost(self, actions: Array) -> Array:
        """What the actions cost."""
        cost: Array = self.like._ctrl_cost_weight * squares(actions)
        return cost

    def positions(self, now: States, skipped: int) -> Array:
        """Positions, less the first ones if the observations leave out where the body is."""
        return now.qpos[:, skipped if self.like._exclude_current_positions_from_observation else 0 :]


class HalfCheetah(Runner):
    like_class = "half_cheetah_v5:HalfCheetahEnv"

    def observe(self, now: States) -> Array:
        return np.concatenate((self.positions(now, 1), now.qvel), axis=1)

    def evaluate(self, now: States, before: States, actions: Array) -> tuple[Any, Any, Columns]:
        velocity, cost = self.moved(now, before), self.cost(actions)
        forward = self.like._forward_reward_weight * velocity
        infos = {"x_position": now.qpos[:, 0], "x_velocity": velocity, "reward_forward": forward, "reward_ctrl": -cost}
        return forward - cost, False, infos

    def begin_infos(self, now: States) -> Columns:
        return {"x_position": now.qpos[:, 0]}


class Swimmer(Runner):
    like_class = "swimmer_v5:SwimmerEnv"

    def observe(self, now: States) -> Array:
        return np.concatenate((self.positions(now, 2), now.qvel), axis=1)

    def evaluate(self, now: States, before: States, actions: Array) -> tuple[Any, Any, Columns]:
        velocity, cost = (now.qpos[:, :2] - before.qpos[:, :2]) / self.dt, self.cost(actions)
        forward = self.like._forward_reward_weight * velocity[:, 0]
        infos = {
            **self.begin_infos(now), "x_velocity": velocity[:, 0], "y_velocity": velocity[:, 1],
            "reward_forward": forward, "reward_ctrl": -cost,
        }  # fmt: skip
        return forward - cost, False, infos

    def begin_infos(self, now: States) -> Columns:
        return place_of(now)


class Upright(Runner):
    """What must not fall, in a plane: Hopper and Walker2d."""

    def healthy(self, now: States) -> Array:
        """Whether the body stands."""
        upright = within(*_around(self.like._healthy_z_range, now.qpos[:, 1]))
        return upright & within(*_around(self.like._healthy_angle_range, now.qpos[:, 2]))

    def observe(self, now: States) -> Array:
        return np.concatenate((self.positions(now, 1), np.clip(now.qvel, -10, 10)), axis=1)

    def evaluate(self, now: States, before: States, actions: Array) -> tuple[Any, Any, Columns]:
        velocity, cost, healthy = self.moved(now, before), self.cost(actions), self.healthy(now)
        forward = self.like._forward_reward_weight * velocity
        survive = healthy * self.like._healthy_reward
        infos = {
            **self.begin_infos(now), "x_velocity": velocity, "reward_forward": forward, "reward_ctrl": -cost,
            "reward_survive": survive,
        }  # fmt: skip
        return forward + survive - cost, ~healthy & self.like._terminate_when_unhealthy, infos

    def begin_infos(self, now: States) -> Columns:
        return {"x_position": now.qpos[:, 0], "z_distance_from_origin": now.qpos[:, 1] - self._init_qpos[1]}


class Hopper(Upright):
    like_class = "hopper_v5:HopperEnv"

    def healthy(self, now: States) -> Array:
        range_ = self.like._healthy_state_range
        others = np.concatenate((now.qpos, now.qvel), axis=1)[:, 2:]
        return super().healthy(now) & within(*_around(range_, others)).all(axis=1)


class Walker2d(Upright):
    like_class = "walker2d_v5:Walker2dEnv"


class Ant(Runner):
    like_class = "ant_v5:AntEnv"
    like_fields = ("qpos", "qvel", "xpos", "cfrc_ext")
    like_keep = ("xpos",)

    def forces(self, now: States) -> Array:
        """Contact forces, clipped."""
        clipped: Array = np.clip(now.cfrc_ext, *self.like._contact_force_range)
        return clipped

    def observe(self, now: States) -> Array:
        parts = [self.positions(now, 2), now.qvel]
        if self.like._include_cfrc_ext_in_observation:
            parts.append(self.forces(now)[:, 1:].reshape(len(now.qpos), -1))
        return np.concatenate(parts, axis=1)

    def evaluate(self, now: States, before: States, actions: Array) -> tuple[Any, Any, Columns]:
        like, body = self.like, self._main_body
        velocity = (now.xpos[:, body, :2] - before.xpos[:, body, :2]) / self.dt
        low, high = like._healthy_z_range
        height, finite = now.qpos[:, 2], np.isfinite(now.qpos).all(axis=1) & np.isfinite(now.qvel).all(axis=1)
        healthy = finite & (low <= height) & (height <= high)
        forward, survive = velocity[:, 0] * like._forward_reward_weight, healthy * like._healthy_reward
        contact = like._contact_cost_weight * squares(self.forces(now).reshape(len(height), -1))
        cost = self.cost(actions)
        infos = {
            **self.begin_infos(now), "x_velocity": velocity[:, 0], "y_velocity": velocity[:, 1],
            "reward_forward": forward, "reward_ctrl": -cost, "reward_contact": -contact, "reward_survive": survive,
        }  # fmt: skip
        return forward + survive - (cost + contact), ~healthy & like._terminate_when_unhealthy, infos

    def begin_infos(self, now: States) -> Columns:
        return place_of(now)

    @property
    def _main_body(self) -> int:
        return int(self.like.data.body(self.like._main_body).id)


class Humanoid(Runner):
    like_class = "humanoid_v5:HumanoidEnv"
    like_fields: Sequence[str] = (
        "qpos", "qvel", "xipos", "cinert", "cvel", "qfrc_actuator", "cfrc_ext", "ten_length", "ten_velocity",
    )  # fmt: skip
    like_keep: Sequence[str] = ("xipos",)

    def observe(self, now: States) -> Array:
        like, count = self.like, len(now.qpos)
        parts = [self.positions(now, 2), now.qvel]
        for name, begin in (("cinert", 1), ("cvel", 1), ("qfrc_actuator", 6), ("cfrc_ext", 1)):
            if getattr(like, f"_include_{name}_in_observation") is True:
                parts.append(getattr(now, name)[:, begin:].reshape(count, -1))
        return np.concatenate(parts, axis=1)

    def center(self, states: States) -> Array:
        """Centers of mass, x and y."""
        masses = self.model.body_mass
        found: Array = (np.einsum("b,nbj->nj", masses, states.xipos) / masses.sum())[:, :2]
        return found

    def evaluate(self, now: States, before: States, actions: Array) -> tuple[Any, Any, Columns]:
        like = self.like
        velocity = (self.center(now) - self.center(before)) / self.dt
        healthy = within(*_around(like._healthy_z_range, now.qpos[:, 2]))
        forward, survive = like._forward_reward_weight * velocity[:, 0], healthy * like._healthy_reward
        cost = like._ctrl_cost_weight * squares(actions.astype(np.float64))
        contact = np.clip(
            like._contact_cost_weight * squares(now.cfrc_ext.reshape(len(cost), -1)), *like._contact_cost_range
        )
        infos = {
            **self.begin_infos(now), "x_velocity": velocity[:, 0], "y_velocity": velocity[:, 1],
            "reward_survive": survive, "reward_forward": forward, "reward_ctrl": -cost, "reward_contact": -contact,
        }  # fmt: skip
        return forward + survive - (cost + contact), ~healthy & like._terminate_when_unhealthy, infos

    def begin_infos(self, now: States) -> Columns:
        place = dict(place_of(now))
        distance = place.pop("distance_from_origin")
        tendons = {"tendon_length": now.ten_length, "tendon_velocity": now.ten_velocity}
        return {**place, **tendons, "distance_from_origin": distance}


class HumanoidStandup(Humanoid):
    like_class = "humanoidstandup_v5:HumanoidStandupEnv"
    like_fields = tuple(name for name in Humanoid.like_fields if name != "xipos")
    like_keep = ()

    def evaluate(self, now: States, before: States, actions: Array) -> tuple[Any, Any, Columns]:
        like = self.like
        height = now.qpos[:, 2] / self.model.opt.timestep
        cost = like._ctrl_cost_weight * squares(actions.astype(np.float64))
        impact = np.clip(
            like._impact_cost_weight * squares(now.cfrc_ext.reshape(len(cost), -1)), *like._impact_cost_range
        )
        costs = {"reward_linup": height, "reward_quadctrl": -cost, "reward_impact": -impact}
        return height - cost - impact + 1, False, {**self.begin_infos(now), **costs}

    def begin_infos(self, now: States) -> Columns:
        return {
            "x_position": now.qpos[:, 0], "y_position": now.qpos[:, 1],
            "z_distance_from_origin": now.qpos[:, 2] - self._init_qpos[2], "tendon_length": now.ten_length,
            "tendon_velocity": now.ten_velocity,
        }  # fmt: skip


class InvertedPendulum(GymnasiumBatch):
    like_class = "inverted_pendulum_v5:InvertedPendulumEnv"

    def observe(self, now: States) -> Array:
        return np.concatenate((now.qpos, now.qvel), axis=1)

    def evaluate(self, now: States, before: States, actions: Array) -> tuple[Any, Any, Columns]:
        over = ~np.isfinite(self.observe(now)).all(axis=1) | (np.abs(now.qpos[:, 1]) > 0.2)
        reward = (~over).astype(np.int64)
        return reward, over, {"reward_survive": reward}


class InvertedDoublePendulum(GymnasiumBatch):
    like_class = "inverted_double_pendulum_v5:InvertedDoublePendulumEnv"
    like_fields = ("qpos", "qvel", "site_xpos", "qfrc_constraint")

    def observe(self, now: States) -> Array:
        angles = np.ascontiguousarray(now.qpos[:, 1:])
        speeds, forces = np.clip(now.qvel, -10, 10), np.clip(now.qfrc_constraint[:, :1], -10, 10)
        return np.concatenate((now.qpos[:, :1], np.sin(angles), np.cos(angles), speeds, forces), axis=1)

    def evaluate(self, now: States, before: States, actions: Array) -> tuple[Any, Any, Columns]:
        x, y = now.site_xpos[:, 0, 0], now.site_xpos[:, 0, 2]
        over = y <= 1
        distance = 0.01 * powers(x) + powers(y - 2)
        speed = 1e-3 * powers(now.qvel[:, 1]) + 5e-3 * powers(now.qvel[:, 2])
        bonus = self.like._healthy_reward * (~over).astype(np.int64)
        infos = {"reward_survive": bonus, "distance_penalty": -distance, "velocity_penalty": -speed}
        return bonus - distance - speed, over, infos


class Reacher(GymnasiumBatch):
    like_class = "reacher_v5:ReacherEnv"
    like_fields = ("qpos", "qvel", "xpos")

    def between(self, now: States, one: str, other: str) -> Array:
        """The vectors from one body to another."""
        number = {name: self.model.body(name).id for name in (one, other)}
        return now.xpos[:, number[one]] - now.xpos[:, number[other]]

    def observe(self, now: States) -> Array:
        angles = np.ascontiguousarray(now.qpos[:, :2])
        gap = self.between(now, "fingertip", "target")[:, :2]
        return np.concatenate((np.cos(angles), np.sin(angles), now.qpos[:, 2:], now.qvel[:, :2], gap), axis=1)

    def evaluate(self, now: States, before: States, actions: Array) -> tuple[Any, Any, Columns]:
        distance = -norms(self.between(now, "fingertip", "target")) * self.like._reward_dist_weight
        cost = -squares(actions) * self.like._reward_control_weight
        return distance + cost, False, {"reward_dist": distance, "reward_ctrl": cost}


class Pusher(Reacher):
    like_class = "pusher_v5:PusherEnv"

    def observe(self, now: States) -> Array:
        bodies = [now.xpos[:, self.model.body(name).id] for name in ("tips_arm", "object", "goal")]
        return np.concatenate((now.qpos[:, :7], now.qvel[:, :7], *bodies), axis=1)

    def evaluate(self, now: States, before: States, actions: Array) -> tuple[Any, Any, Columns]:
        like = self.like
        near = -norms(self.between(now, "object", "tips_arm")) * like._reward_near_weight
        distance = -norms(self.between(now, "object", "goal")) * like._reward_dist_weight
        cost = -squares(actions) * like._reward_control_weight
        return distance + cost + near, False, {"reward_dist": distance, "reward_ctrl": cost, "reward_near": near}


def _around(range_: Any, values: Array) -> tuple[float, Array, float]:
    low, high = range_
    return low, values, high


CLASSES = {
    f"{MODULE}.{found.like_class}": found
    for found in (
        Ant, HalfCheetah, Hopper, Humanoid, HumanoidStandup, InvertedDoublePendulum, InvertedPendulum, Pusher, Reacher,
        Swimmer, Walker2d,
    )
}  # fmt: skip
