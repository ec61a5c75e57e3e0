"""What the twin does on its own: all lanes in one pass where the caller steps them; a warning where C is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from native.rig import Rig
from shoal.backends.inline import SilentBell
from shoal.native import MIXED_SLOTS, layout
from shoal.native.counters import QUICK_STEP_NS

pytestmark = pytest.mark.timeout(60)
FIELDS = [row.name for row in layout.FIELDS if row.shape in (("lanes",), ("frames", "lanes")) and row.name != "present"]


class InlineRig(Rig):
    """A rig of the twin whose one block is the caller's own."""

    def __init__(self, **options: Any):
        super().__init__("twin", **options)
        bell = SilentBell()
        self.lanes = self._make("lanes", self.slab, self.state, self.owner, [bell], bell, None, 0)
        block = self.blocks[0]
        self.block = self._make(
            "block", self.slab, 0, 0, self.lane_count, block._autoreset, False, block._action_kind,
            self.slab.describe("obs", self.obs_leaves), block._steps, self.array("action.0"), self.callbacks(),
            bell, bell,
        )  # fmt: skip
        self.use_action()

    def _callback(self, name: str) -> Any:
        callback = super()._callback(name)

        def begins(lane: int, slot: int, *rest: Any) -> None:
            callback(lane, slot, *rest)
            self.block.begin(lane, slot, np.full(3, 7, np.float32), {}, name == "special")

        return begins if name in ("special", "finish") else callback


def played(rig: Rig, at_once: bool, script: list[dict[int, Any]]) -> list[Any]:
    """What is in the slab, and what was called, after each step of a script of results by lane."""
    seen = []
    for turn, results in enumerate(script):
        rig.results = results
        actions = np.arange(rig.lane_count) + turn
        if at_once:
            assert rig.lanes.step(actions, rig.block.run, 0, -1) >= 0
        else:
            rig.array("action.0")[:] = actions
            rig.lanes.post(None, layout.OP_STEP)
            rig.block.run()
            rig.collect(rig.lane_count)
        fields = {name: rig.array(name).tolist() for name in FIELDS if name != "done_ns"}
        seen.append((fields, rig.array("obs.0").tolist(), [entry[:3] for entry in rig.log]))
    return seen


class EachRig(InlineRig):
    """The same, lane by lane, as other workers do it."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.block.at_once = False


ROW = np.ones(3, np.float32)
SCRIPT: list[dict[int, Any]] = [
    {},
    {1: (ROW, 2.0, True, False, {})},
    {0: (ROW, np.float32(0.5), np.False_, False, {"a": 1}), 3: (ROW, 1, False, True, {})},
    {2: (np.ones(3), 1.0, False, False, {}), 4: ([1, 2, 3], 1.0, False, False, {})},
    {0: (ROW, -1.0, True, False, {"b": 2}), 1: (ROW, -1.0, False, True, {})},
    {},
]


@pytest.mark.parametrize("autoreset", list(layout.AUTORESET))
@pytest.mark.parametrize("lanes", [1, 2, 5, 9])
def test_all_lanes_at_once_are_as_one_by_one(autoreset: str, lanes: int) -> None:
    options: dict[str, Any] = {"lanes": lanes, "autoreset": autoreset}
    at_once, each = InlineRig(**options), EachRig(**options)
    assert played(at_once, True, SCRIPT) == played(each, False, SCRIPT)
    for rig in (at_once, each):
        rig.slab.settle()
    for name in ("steps", "passes", "episodes"):
        place = layout.CONSTANTS[f"STAT_{name.upper()}"]
        assert at_once.array("stats")[0, place] == each.array("stats")[0, place] > 0 or name == "episodes"
    assert at_once.array("episode_sums").tolist() == each.array("episode_sums").tolist()
    assert at_once.array("lane_stats")[:, layout.LANE_STEPS].tolist() == [len(SCRIPT)] * lanes
    assert at_once.array("step_times").sum() == lanes * len(SCRIPT)


@pytest.mark.parametrize("wrong", [(ROW, "1.0", False, False, {}), (ROW, 1.0, False), [ROW, 1.0, False, False, {}],
                                   (ROW, None, False, False, {}), ValueError("no"),
                                   (ROW, 1.0, np.zeros(2), False, {})], ids=repr)  # fmt: skip
def test_what_an_env_does_wrong_is_its_own_fault(wrong: Any) -> None:
    rig = InlineRig(lanes=5)
    rig.results = {2: wrong}
    assert rig.lanes.step(np.arange(5), rig.block.run, 0, -1) >= 0
    [(_, lane, _, error)] = rig.events("failed")
    assert lane == 2
    assert isinstance(error, TypeError | ValueError)
    assert rig.array("run_length").tolist() == [1, 1, 0, 1, 1]
    assert not rig.state.any()


def test_an_interrupt_leaves_the_rest_to_be_asked_again() -> None:
    rig = InlineRig(lanes=5)
    rig.results, rig.raising = {3: KeyboardInterrupt()}, {"failed": KeyboardInterrupt()}  # type: ignore[dict-item]
    with pytest.raises(KeyboardInterrupt):
        rig.lanes.step(np.arange(5), rig.block.run, 0, -1)
    assert (rig.array("answered") == rig.array("requested")).tolist() == [True] * 3 + [False] * 2
    assert rig.array("run_length").tolist() == [1, 1, 1, 0, 0]
    assert rig.state.all()
    rig.results, rig.raising = {}, {}
    assert rig.collect(5, run=rig.block.run)[1] == [0, 1, 2, 3, 4]
    assert rig.array("run_length").tolist() == [1] * 5


ODD_ACTIONS = [
    np.array([1, 2, 3]), np.array([1]), np.array([1, 100], np.int32), [1, 100], None, np.array([1, 100]),
    np.array([-1, 1]), np.array([1.0, 2.0]),
]  # fmt: skip


@pytest.mark.parametrize("actions", ODD_ACTIONS, ids=repr)
def test_what_needs_a_second_look_is_not_taken(actions: Any) -> None:
    rig = InlineRig(lanes=2)
    before = rig.snapshot(), rig.array("action.0").tolist()
    assert rig.lanes.step(actions, rig.block.run, 0, -1) == layout.NOT_TAKEN
    assert (rig.snapshot(), rig.array("action.0").tolist()) == before


def test_lanes_that_are_busy_or_in_other_frames_are_not_stepped_at_once() -> None:
    rig, actions = InlineRig(lanes=2), np.array([1, 2])
    rig.lanes.alarm()
    assert rig.lanes.step(actions, rig.block.run, 0, -1) == layout.NOT_TAKEN
    rig.lanes.heard()
    rig.lanes.post(np.array([1]), layout.OP_STEP)
    assert rig.lanes.step(actions, rig.block.run, 0, -1) == layout.NOT_TAKEN
    rig.block.run()
    rig.collect(1)
    assert rig.lanes.step(actions, rig.block.run, 0, -1) == layout.NOT_TAKEN != MIXED_SLOTS
    with rig.lanes:
        assert rig.lanes.step(actions, rig.block.run, 0, -1) == layout.IN_USE


def test_slow_envs_are_timed_one_by_one() -> None:
    rig = InlineRig(lanes=5)

    def slow(action: Any) -> Any:
        end = time.monotonic_ns() + 40 * QUICK_STEP_NS
        while time.monotonic_ns() < end:
            pass
        return ROW, 1.0, False, False, {}

    for _ in range(3):
        rig.results = {4: slow}
        rig.lanes.step(np.arange(5), rig.block.run, 0, -1)
    rig.slab.settle()
    took = rig.array("lane_stats")[:, layout.LANE_LONGEST_NS]
    assert took[4] >= 40 * QUICK_STEP_NS > 2 * took[:4].min()


def test_actions_keep_the_type_of_the_space() -> None:
    rig = InlineRig(lanes=5)
    rig.lanes.step(np.arange(5), rig.block.run, 0, -1)
    assert [type(action) for action in rig.seen_actions] == [np.int64] * 5


# ---- the warning -------------------------------------------------------------------------------------------------

WARNED = """
import sys, warnings
{before}
import shoal
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        with shoal.Pool("CartPole-v1", 2, backend="serial") as pool:
            pool.reset(seed=0)
found = [w for w in caught if issubclass(w.category, shoal.errors.SlowCoreWarning)]
print(shoal.native.KIND, len(found), *(f"{{w.filename}} {{w.message}}" for w in found))
from shoal.cli import doctor
print(doctor.facts()["native_missing"])
print(doctor._core_line(doctor.facts()))
"""
HIDDEN = 'sys.modules["shoal.native._core"] = None'
STALE = 'import types; sys.modules["shoal.native._core"] = types.ModuleType("shoal.native._core")'


def told(before: str, **environ: str) -> str:
    env = {**os.environ, **environ}
    done = subprocess.run(
        [sys.executable, "-c", WARNED.format(before=before)], capture_output=True, text=True, timeout=60, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("before", "reason"), [(HIDDEN, "was not built"), (STALE, "built from other sources")])
def test_a_missing_core_is_told_of_once(before: str, reason: str) -> None:
    first, missing, doctor = told(before, SHOAL_NATIVE="1").strip().split("\n")
    assert first.startswith("twin 1 <string> Shoal runs without its C core")
    assert reason in first
    assert "C compiler" in first
    assert "times as long" in first
    assert reason in missing
    assert "the C core is missing" in doctor
    assert "C compiler" in doctor


def test_a_twin_that_is_asked_for_is_not() -> None:
    first, missing, doctor = told(HIDDEN, SHOAL_NATIVE="0").strip().split("\n")
    assert first == "twin 0"
    assert missing == "None"
    assert "SHOAL_NATIVE=0 asks for it" in doctor
