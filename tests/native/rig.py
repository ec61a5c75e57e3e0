"""A slab, the two sides of it and callbacks that keep a log: what the tests of the core stand on."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from shoal.backends.threads import EventBell
from shoal.memory.slab import Layout, Slab
from shoal.native import twin
from shoal.spaces.leaves import flatten, write_observation

KINDS = ("native", "twin")
OBS = spaces.Box(-9, 9, (3,), np.float32)
ACTION = spaces.Discrete(100)


def load(kind: str) -> Any:
    """The C module, or None for the twin. Raises ImportError where the extension was not built."""
    return None if kind == "twin" else importlib.import_module("shoal.native._core")


class Rig:
    """Lanes and one Block for each worker over one slab, in this process.

    `log` has one entry for each callback: (name, lane, slot, *rest). `steps[lane]` may be replaced; by default it
    counts and echoes the action: obs (action, 0, 0), reward 1.5.
    """

    def __init__(
        self,
        kind: str,
        lanes: int = 4,
        workers: int = 1,
        frames: int = 2,
        autoreset: str = "next_step",
        publish_each: bool = False,
        obs: spaces.Space[Any] = OBS,
        action: spaces.Space[Any] = ACTION,
        leader: Any = None,
        window: int = 0,
    ):
        self.core = load(kind)
        self.kind, self.lane_count = kind, lanes
        self.obs_leaves, self.action_leaves = flatten(obs), flatten(action)
        layout = Layout.plan(self.obs_leaves, self.action_leaves, lanes, frames, workers)
        self.slab = Slab.create(layout, shared=False)
        self.array = self.slab.array
        self.state = np.zeros(lanes, np.uint8)
        self.owner = (np.arange(lanes) * workers // lanes).astype(np.int32)
        self.bells, self.bell = [EventBell() for _ in range(workers)], EventBell()
        self.lanes = self._make("lanes", self.slab, self.state, self.owner, self.bells, self.bell, leader, window)
        self.log: list[tuple[Any, ...]] = []
        self.raising: dict[str, Exception] = {}  # callbacks that shall raise
        self.results: dict[int, Any] = {}  # what a lane's step returns instead of its default
        self.seen_actions: list[Any] = []
        self.targets = self.slab.leaf_arrays("obs", self.obs_leaves)
        kind_of_action = twin.ACTION_ROW if action.shape else twin.ACTION_SCALAR
        self.blocks = []
        for worker in range(workers):
            mine = np.flatnonzero(self.owner == worker)
            start, stop = int(mine[0]), int(mine[-1]) + 1
            block = self._make(
                "block", self.slab, worker, start, stop, twin.AUTORESET[autoreset], publish_each, kind_of_action,
                self.slab.describe("obs", self.obs_leaves), [self._step(lane) for lane in range(start, stop)],
                self.array("action.0"), self.callbacks(), self.bell, self.bells[worker],
            )  # fmt: skip
            self.blocks.append(block)
        self.block = self.blocks[0]
        self.out = np.full(lanes, -1, np.int64)

    def _make(self, what: str, *args: Any) -> Any:
        if self.core is None:
            return {"lanes": twin.Lanes, "block": twin.Block}[what](*args)
        return {"lanes": twin.native_lanes, "block": twin.native_block}[what](self.core, *args)

    def _step(self, lane: int) -> Callable[[Any], Any]:
        def step(action: Any) -> Any:
            self.seen_actions.append(action)
            result = self.results.get(lane)
            if isinstance(result, BaseException):
                raise result
            if callable(result):
                return result(action)
            default = np.array([np.ravel(action)[0], 0, 0], np.float32), 1.5, False, False, {}
            return default if result is None else result

        return step

    def callbacks(self) -> tuple[Callable[..., None], ...]:
        """In the core's order: special, finish, note, store, failed, flush."""
        return tuple(self._callback(n) for n in ("special", "finish", "note", "store", "failed", "flush"))

    def _callback(self, name: str) -> Callable[..., None]:
        def callback(*args: Any) -> None:
            self.log.append((name, *args))
            if name in self.raising:
                raise self.raising[name]
            if name == "store":
                write_observation(self.obs_leaves, self.targets, (args[1], args[0]), args[2])

        return callback

    def events(self, *names: str) -> list[tuple[Any, ...]]:
        """The log, of these callbacks only."""
        return [entry for entry in self.log if entry[0] in names]

    def collect(
        self, need: int, wanted: Any = None, deadline_ns: int = 0, run: Callable[[], int] | None = None
    ) -> tuple[tuple[int, ...], list[int]]:
        """What collect says, and the ids that it wrote. By default it does not wait."""
        self.out[:] = -1
        result = self.lanes.collect(need, wanted, deadline_ns, 0, self.out, run)
        return result, self.out[self.out >= 0].tolist()

    def answer(self, *lanes: int, at_ns: int = 0, status: int = 0) -> None:
        """Play the worker: answer these lanes, and ring as it would."""
        for lane in lanes:
            self.array("done_ns")[lane] = at_ns
            self.array("status")[self.array("slot")[lane], lane] = status
            self.array("answered")[lane] = self.array("requested")[lane]

    def use_action(self, checked: bool = True) -> None:
        """Allow the short cut `step` for the rig's action space."""
        [leaf], none = self.action_leaves, np.zeros(0)
        bounds = (leaf.low, leaf.high) if checked else (none, none)
        self.lanes.use_action(self.slab.describe("action", self.action_leaves)[0], *bounds)

    def snapshot(self) -> list[Any]:
        """Everything that a post could touch."""
        names = ("requested", "answered", "op", "slot")
        rung = [self.array("pool_bell")[0], *self.array("worker_bells")[:, 0]]
        return [self.state.tolist(), rung, *(self.array(name).tolist() for name in names)]


def ids(*lanes: int) -> Any:
    """Lane ids as the pool hands them over."""
    return np.array(lanes, np.int64)
