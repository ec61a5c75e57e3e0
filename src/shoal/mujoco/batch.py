"""`BatchedMujocoEnv`: many MuJoCo simulations as one env with a lane for each.

MuJoCo steps all lanes on threads (`mujoco.simulations`), and observations, rewards, ends of episodes and infos are
computed by NumPy over all lanes at once. Everything is a method or a function over arrays with a row for each lane, so
a new env is a model and three functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.spaces import Box
from gymnasium.utils.seeding import np_random

from shoal.envs.group import Answers, GroupAdapter, Infos
from shoal.errors import BadEnv, DataError
from shoal.memory.info_columns import InfoColumns, Part
from shoal.mujoco.models import PREFIX, RECOMPUTED, LaneModels, ModelChanges
from shoal.mujoco.simulations import Simulations
from shoal.support.cores import usable_cores
from shoal.support.optional_dependencies import require

Array = npt.NDArray[Any]
Columns = Mapping[str, Array]
ENDED = "shoal_ended"  # among the saved arrays
_WORD = 2**64


class States:
    """Fields of `MjData` of some lanes, each an array with a row for each lane: `states.qpos`, `states.qvel`, ..."""

    def __init__(self, fields: Mapping[str, Array]):
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Array:
        raise AttributeError(
            f"{name!r} is not among the fields of this env ({', '.join(self.__dict__)}): name it in `fields`"
        )


class Lane:
    """One lane of a batch, as calls of the caller see it."""

    def __init__(self, batch: BatchedMujocoEnv, row: int):
        self._batch, self._row = batch, row
        self.model, self.data = batch.sims.models[row], batch.sims.data[row]
        self.observation_space, self.action_space = batch.single_observation_space, batch.single_action_space

    @property
    def np_random(self) -> np.random.Generator:
        """The generator that this lane draws from."""
        return self._batch.generators([self._row])[0]

    @property
    def unwrapped(self) -> Lane:
        """The lane itself."""
        return self

    def render(self) -> Any:
        """A picture."""
        return self._batch.frame(self._row)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._batch, name)


class BatchedMujocoEnv(GroupAdapter):
    """Many simulations of one model, with a lane for each; a pool steps them by `backend="batched"`.

    Give the three functions, or derive a class that has methods of these names. All of them work on arrays with a row
    for each lane that is concerned, in this order:

        observe(now) -> observations, [lanes, ...]
        reward(now, before, actions) -> rewards, [lanes]; or (rewards, infos), where infos has an array for each key
        done(now) -> whether the episodes are over, [lanes]; left out, they never are

    `now` and `before` have the fields of `MjData` that `fields` and `keep` name, as `now.qpos` and so on. Do not write
    to them. As in MuJoCo itself, fields that are computed from positions are one substep behind `qpos` after a step.

    Args:
        model: a `mujoco.MjModel`, the path of an XML file, or XML as a text.
        num_envs: how many lanes.
        reset: reset(qpos, qvel, rngs) changes the first positions and velocities of episodes in place; `rngs` is a
            `numpy.random.Generator` for each lane. Without it, lanes begin as the model says.
        randomize: randomize(models, rngs) is called before each episode and changes the models of the lanes it begins
            in; see `LaneModels`. With it, each lane has a model of its own.
        fields: the fields of `MjData` that the functions look at, `keep` those that are wanted from before the step.
        after: names of functions of MuJoCo's that are called after each step, such as "mj_rnePostConstraint".
        frame_skip: substeps of each step.
        max_episode_steps: steps after which an episode is truncated; None for no limit.
        observation_space, action_space: by default made from the first observation, and from the range of controls.
        render_mode: None, "rgb_array" or "depth_array"; `render_options` are arguments of Gymnasium's MujocoRenderer.
        num_threads: how many threads step the lanes; by default one for each core.
    """

    together, resets_alone = False, True
    __shoal_batched__ = True  # the class makes many envs as one: "auto" steps it by backend="batched"
    metadata: dict[str, Any] = {"render_modes": ["rgb_array", "depth_array"]}
    spec: Any = None

    def __init__(
        self,
        model: Any,
        num_envs: int = 1,
        observe: Callable[..., Any] | None = None,
        reward: Callable[..., Any] | None = None,
        done: Callable[..., Any] | None = None,
        *,
        reset: Callable[..., Any] | None = None,
        randomize: Callable[..., Any] | None = None,
        fields: Sequence[str] = ("qpos", "qvel"),
        keep: Sequence[str] = ("qpos", "qvel"),
        after: Sequence[str] = (),
        frame_skip: int = 1,
        max_episode_steps: int | None = None,
        observation_space: Space[Any] | None = None,
        action_space: Space[Any] | None = None,
        render_mode: str | None = None,
        render_options: Mapping[str, Any] | None = None,
        num_threads: int | None = None,
    ):
        given = {"observe": observe, "reward": reward, "done": done, "draw": reset, "randomize": randomize}
        for name, function in given.items():
            if function is not None:
                setattr(self, name, function)
        self.model = _as_model(model)
        self.frame_skip, self.max_episode_steps = int(frame_skip), max_episode_steps
        self.render_mode, self._render_options = render_mode, dict(render_options or {})
        self._renderer: Any = None
        self._check()
        self.sims = Simulations(self.model, num_envs, min(num_threads or usable_cores(), num_envs))
        if self.randomize is not None:
            self.sims.own_models()
        names = dict.fromkeys(("qpos", "qvel", *fields, *keep))
        self._now, self._keep = {name: self.sims.field(name) for name in names}, tuple(keep)
        self._ctrl = self.sims.field("ctrl")
        stores = [("store", name) for name in names]
        calls = [("call", "mj_step", self.frame_skip), *(("call", name, 1) for name in after)]
        self._stepping = self.sims.program(("load", "ctrl"), *calls, *stores)
        self._beginning = self.sims.program(
            ("call", "mj_resetData", 1), ("load", "qpos"), ("load", "qvel"), ("call", "mj_forward", 1), *stores
        )
        self._reading = self.sims.program(*stores)
        self._first = {name: np.array(getattr(self.sims.data[0], name)) for name in ("qpos", "qvel")}
        self._rngs: list[np.random.Generator | None] = [None] * num_envs
        self._steps = np.zeros(num_envs, np.int64)
        self._states, self._changes = States(self._now), ModelChanges()
        super().__init__(
            self, num_envs, observation_space or self._observation_space(), action_space or _controls(self.model)
        )

    def _check(self) -> None:
        missing = [name for name in ("observe", "reward") if not callable(getattr(self, name, None))]
        if missing and type(self).evaluate is BatchedMujocoEnv.evaluate:
            raise BadEnv(f"{type(self).__name__} needs a function {missing[0]!r} over arrays with a row for each lane")
        if self.frame_skip < 1:
            raise BadEnv(f"frame_skip: expected a whole number of at least 1, found {self.frame_skip!r}")
        modes = self.metadata["render_modes"]
        if self.render_mode is not None and self.render_mode not in modes:
            raise BadEnv(
                f"render_mode: lanes of a batch are drawn one by one, when `render` is called: expected None or one of "
                f"{', '.join(map(repr, modes))}, found {self.render_mode!r}; other backends open windows"
            )

    def _observation_space(self) -> Space[Any]:
        self.sims.run(self.sims.program(("call", "mj_forward", 1), *(("store", name) for name in self._now)))
        first = np.asarray(self.observe(self._states))
        if first.ndim < 2 or len(first) != self.sims.count:
            raise BadEnv(
                f"observe: expected a row for each of {self.sims.count} lanes, found an array of shape {first.shape}"
            )
        return Box(-np.inf, np.inf, first.shape[1:], first.dtype)

    # ---- what a class may bring in place of functions ----------------------------------------------------------

    observe: Any
    reward: Any
    randomize: Any = None

    def done(self, now: States) -> Any:
        """Episodes never end by themselves."""
        return False

    def draw(self, qpos: Array, qvel: Array, rngs: Sequence[np.random.Generator]) -> None:
        """Episodes begin as the model says."""

    def evaluate(self, now: States, before: States, actions: Array) -> tuple[Any, Any, Columns]:
        """Rewards, ends of episodes and infos after a step."""
        reward = self.reward(now, before, actions)
        reward, infos = reward if isinstance(reward, tuple) else (reward, {})
        return reward, self.done(now), infos

    def begin_infos(self, now: States) -> Columns:
        """The infos of a reset."""
        return {}

    # ---- GroupEnv ----------------------------------------------------------------------------------------------

    def reset(self, rows: Array, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        for row, seed in zip(rows.tolist(), seeds, strict=True):
            if seed is not None or self._rngs[row] is None:
                self._rngs[row], _ = np_random(seed)
        return self._begin(rows, out, slice(None))

    def _begin(self, rows: Array, out: Answers, at: Any) -> Infos:
        self._begin_simulations(rows)
        now = self._of(rows)
        out.obs[0][at] = self.observe(now)
        self._episodes.begun(rows, out, at)
        return InfoColumns.of(self.begin_infos(now), len(rows))

    def _begin_simulations(self, rows: Array) -> None:
        rngs = self.generators(rows.tolist())
        qpos, qvel = (np.repeat(self._first[name][None], len(rows), 0) for name in ("qpos", "qvel"))
        if self.randomize is not None:
            self.randomize(LaneModels(self.sims, rows, self._changes), rngs)
        self.draw(qpos, qvel, rngs)
        self._now["qpos"][rows], self._now["qvel"][rows] = qpos, qvel
        self.sims.run(self._beginning, rows)
        self._steps[rows] = 0

    def generators(self, rows: Sequence[int]) -> list[np.random.Generator]:
        """The generators that these lanes draw from; one that was never seeded is now, by chance."""
        for row in rows:
            if self._rngs[row] is None:
                self._rngs[row], _ = np_random(None)
        return [rng for row in rows if (rng := self._rngs[row]) is not None]

    def step(self, rows: Array, actions: Any, out: Answers) -> Infos:
        def step(some: Array, at: Any) -> Infos:
            return self._step(some, actions[at], out, at)

        if len(rows) == self.num_lanes and self._episodes.rule.begins_next and self._episodes.ended.any():
            return self._step_and_begin(actions, out)
        return self._episodes.step(rows, out, step, lambda some, at: self._begin(some, out, at))

    def _step(self, rows: Array, actions: Array, out: Answers, at: Any) -> Infos:
        every = len(rows) == self.num_lanes
        before = States({name: self._now[name].copy() if every else self._now[name][rows] for name in self._keep})
        at_lanes: Any = slice(None) if every else rows
        self._ctrl[at_lanes] = actions
        self.sims.run(self._stepping, None if every else rows)
        now = self._states if every else self._of(rows)
        out.reward[at], out.terminated[at], infos = self.evaluate(now, before, actions)
        self._steps[at_lanes] += 1
        if self.max_episode_steps is not None:
            out.truncated[at] = self._steps[at_lanes] >= self.max_episode_steps
        out.obs[0][at] = self.observe(now)
        return InfoColumns.of(infos, len(rows))

    def _step_and_begin(self, actions: Array, out: Answers) -> Infos:
        """Step all lanes, of which some begin an episode instead.

        Everything is computed for all lanes, and then replaced where an episode has begun: that takes less time than
        to pick out the other lanes, of which there are more.
        """
        ended = self._episodes.ended
        begins, others = np.flatnonzero(ended), np.flatnonzero(~ended)
        before = States({name: self._now[name].copy() for name in self._keep})
        self._begin_simulations(begins)
        self._ctrl[others] = actions[others]
        if len(others):
            self.sims.run(self._stepping, others)
        out.reward[:], out.terminated[:], infos = self.evaluate(self._states, before, actions)
        out.reward[begins], out.terminated[begins] = 0.0, False
        self._steps[others] += 1
        if self.max_episode_steps is not None:
            out.truncated[:] = self._steps >= self.max_episode_steps
            out.truncated[begins] = False
        out.obs[0][:] = self.observe(self._states)
        np.logical_or(out.terminated, out.truncated, out=ended)
        self._episodes.begun(begins, out, begins)
        first = {name: column[begins] for name, column in self.begin_infos(self._states).items()}
        return InfoColumns(self.num_lanes, [Part(None, infos), Part(begins, first)])

    def _of(self, rows: Array) -> States:
        return States({name: array[rows] for name, array in self._now.items()})

    def close(self) -> None:
        self.sims.close()
        if self._renderer is not None:
            self._renderer.close()

    # ---- calls of the caller -----------------------------------------------------------------------------------

    def lane(self, row: int) -> Any:
        """What stands for one lane in calls of the caller, with its `model`, `data`, `np_random` and `render`."""
        return Lane(self, row)

    def lanes_changed(self, rows: Sequence[int]) -> None:
        """Take in what the caller may have changed in the data of lanes."""
        self.sims.run(self._reading, np.array(rows))

    def set_rows(self, name: str, rows: Sequence[int], values: Sequence[Any]) -> None:
        """Set an attribute of all lanes, which share it."""
        if len(rows) != self.num_lanes or any(value is not values[0] and value != values[0] for value in values):
            raise AttributeError(
                f"{name!r} is shared by all lanes of a batch: set it for all of them, to one value; models of lanes "
                "differ by `randomize`, and envs of other backends can differ in everything"
            )
        self.set_shared(name, values[0])

    def set_shared(self, name: str, value: Any) -> None:
        """Set an attribute that all lanes share."""
        if name in ("model", "data"):
            raise AttributeError(f"{name!r} of a lane cannot be replaced: change its fields instead, by pool.apply")
        setattr(self, name, value)

    def frame(self, row: int) -> Any:
        """A picture of one lane."""
        if self.render_mode is None:
            raise BadEnv('the envs were made without a render_mode: pass env_kwargs={"render_mode": "rgb_array"}')
        if self._renderer is None:
            rendering = require("gymnasium.envs.mujoco.mujoco_rendering", "frames need packages", "mujoco")
            options = {"width": 480, "height": 480, **self._render_options}
            self._renderer = rendering.MujocoRenderer(self.model, self.sims.data[row], **options)
        # One renderer serves all lanes: each would need a context of OpenGL's otherwise.
        viewer = self._renderer._get_viewer(self.render_mode)
        viewer.model, viewer.data = self.sims.models[row], self.sims.data[row]
        frame = self._renderer.render(self.render_mode)
        return tuple(map(np.array, frame)) if isinstance(frame, tuple) else np.array(frame)

    # ---- snapshots ---------------------------------------------------------------------------------------------

    def save_rows(self, rows: Sequence[int]) -> list[dict[str, Array]]:
        """The states of these lanes, with the fields of models that `randomize` has set."""
        return [self._save(row) for row in rows]

    def _save(self, row: int) -> dict[str, Array]:
        # Fields that lag behind the state are saved too: the next step compares with them.
        found = {f"field_{name}": np.array(array[row]) for name, array in self._now.items()}
        found |= {"state": self.sims.get_state(row), "rng": _rng_words(self.generators([row])[0])}
        found |= {"steps": np.array(self._steps[row]), ENDED: np.array(self._episodes.ended[row])}
        return {**found, **self._changes.save(self.sims, row)}

    def load_rows(self, rows: Sequence[int], states: Sequence[dict[str, Array]]) -> None:
        """The counterpart of `save_rows`. Raises DataError if these are not its states."""
        try:
            for row, state in zip(rows, states, strict=True):
                if _kinds(self._save(row)) != _kinds(state):
                    raise ValueError("it has other fields, or fields of other sizes")
                self._load(row, state)
        except Exception as error:  # a file may say anything
            raise DataError(f"the state does not fit ({type(error).__name__}: {error!s:.200})") from error

    def _load(self, row: int, state: dict[str, Array]) -> None:
        if self.randomize is not None:
            self._changes.load(self.sims, row, state)
        self.sims.set_state(row, state["state"])
        for name, array in self._now.items():
            array[row] = state[f"field_{name}"]
        self._rngs[row] = _rng_from(state["rng"])
        self._steps[row], self._episodes.ended[row] = state["steps"], state[ENDED]


def _kinds(saved: Mapping[str, Array]) -> dict[str, Any]:
    """Types and shapes of saved arrays; those of models are compared when they are set."""
    return {name: (a.dtype, a.shape) for name, a in saved.items() if not name.startswith((PREFIX, RECOMPUTED))}


def _as_model(model: Any) -> Any:
    mujoco = require("mujoco", "MuJoCo's simulations need a package", "mujoco")
    if isinstance(model, mujoco.MjModel):
        return model
    if isinstance(model, str) and model.lstrip().startswith("<"):
        return mujoco.MjModel.from_xml_string(model)
    if not os.path.exists(model):
        raise BadEnv(f"model: expected a MjModel, the path of an XML file or XML as a text, found {model!r:.200}")
    return mujoco.MjModel.from_xml_path(str(model))


def _controls(model: Any) -> Space[Any]:
    low, high = model.actuator_ctrlrange.T.astype(np.float32)
    free = ~model.actuator_ctrllimited.astype(bool)
    low, high = np.where(free, -np.inf, low), np.where(free, np.inf, high)
    return Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)


def _rng_words(rng: np.random.Generator) -> Array:
    """The state of a PCG64, which is what Gymnasium makes of a seed, in words of 64 bits."""
    found: Any = rng.bit_generator.state
    state, inc = found["state"]["state"], found["state"]["inc"]
    numbers = (state % _WORD, state // _WORD, inc % _WORD, inc // _WORD, found["has_uint32"], found["uinteger"])
    return np.array(numbers, np.uint64)


def _rng_from(words: Array) -> np.random.Generator:
    low, high, inc_low, inc_high, has, kept = (int(word) for word in words)
    rng, _ = np_random(0)
    rng.bit_generator.state = {
        "bit_generator": "PCG64", "state": {"state": high * _WORD + low, "inc": inc_high * _WORD + inc_low},
        "has_uint32": has, "uinteger": kept,
    }  # fmt: skip
    return rng
