"""`train`: the loop of a training, its checkpoints and its logs; and what comes of it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shoal.errors import DataError
from shoal.learn import checkpoint
from shoal.learn.averages import Together, join
from shoal.learn.host import HostWay
from shoal.learn.logs import Logs, RecentEpisodes
from shoal.learn.ppo import Hyperparameters, Policy
from shoal.learn.screen import Screen
from shoal.learn.ways import Built, Setup, Turn, build
from shoal.ranks import rank_path

CHECKPOINT_EVERY = 60.0  # seconds


@dataclass(frozen=True)
class Goal:
    """When a training ends, and where it leaves its files.

    Attributes:
        target_return: end when the mean return of the last 100 episodes reaches it.
        minutes: end after so long.
        updates: end after so many rollouts, for tests.
        folder: for checkpoint.pt and progress.csv; None to write nothing.
        resume: go on from the folder's checkpoint.
        trusted: whether pickles in the checkpoint may be loaded, which runs code; for envs that can only be pickled.
        tensorboard, wandb: see `logs.Logs`.
        screen: whether to show how it goes.
    """

    target_return: float | None = None
    minutes: float | None = None
    updates: int | None = None
    folder: Path | None = None
    resume: bool = False
    trusted: bool = False
    tensorboard: bool | None = False
    wandb: str | None = None
    screen: bool = False


class Trained(NamedTuple):
    """What a training has brought.

    Attributes:
        policy: the network; `policy_function` makes a function of it.
        history: a row for each update: steps, seconds, return, length, losses, ...
        solved: whether the target was reached.
        interrupted: whether Ctrl-C ended it.
        reason: the way that was taken, and why.
    """

    policy: Policy
    history: list[dict[str, float]]
    solved: bool
    interrupted: bool
    reason: str


def train(env: Any = None, num_envs: int = 64, **options: Any) -> Trained:
    """Train a policy by PPO.

    Args:
        env: see `ways.Setup`; may be left out to resume.
        num_envs: of this process.
        **options: the fields of `ways.Setup` (hyperparameters, backend, device, seed, ...) and of `Goal`
            (target_return, minutes, folder, resume, ...), and those of `ppo.Hyperparameters` by their names.
    """
    setup, goal = _sorted_options(env, num_envs, options)
    document = None
    if goal.resume:
        if goal.folder is None:
            raise ValueError("resume: from which folder? Give the one that the training wrote its checkpoint to")
        path = (
            Path(rank_path(goal.folder / checkpoint.NAME, None))
            if join().ranks.size > 1
            else goal.folder / checkpoint.NAME
        )
        document = checkpoint.read(path)
        setup = _as_before(setup, document)
    return _Training(setup, goal, document, join()).run()


def _sorted_options(env: Any, num_envs: int, options: Mapping[str, Any]) -> tuple[Setup, Goal]:
    """Say for each option which part it is for. Raises TypeError for one that there is not."""
    given: dict[Any, dict[str, Any]] = {Setup: {"env": env, "num_envs": num_envs}, Goal: {}, Hyperparameters: {}}
    known = {field.name: kind for kind in (Hyperparameters, Goal, Setup) for field in fields(kind)}
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"train: there is no option {name!r}; there are {', '.join(sorted(known))}")
        given[known[name]][name] = value
    goal, setup = Goal(**given[Goal]), Setup(**given[Setup])
    if goal.folder is not None:
        goal = replace(goal, folder=Path(goal.folder))
    if given[Hyperparameters]:
        own = setup.hyperparameters
        if isinstance(own, Hyperparameters):
            setup = replace(setup, hyperparameters=replace(own, **given[Hyperparameters]))
        else:
            setup = replace(setup, hyperparameters={**(own or {}), **given[Hyperparameters]})
    return setup, goal


def _as_before(setup: Setup, document: Mapping[str, Any]) -> Setup:
    """Return the setup of a training that is resumed: that of its checkpoint, with the env where it is no id."""
    saved = document["setup"]
    env = saved["env"] if setup.env is None else setup.env
    if env is None:
        raise ValueError("resume: the checkpoint does not hold the env, which was no id: give it once more")
    settings = {**document["settings"], "hidden": tuple(document["settings"]["hidden"])}
    if isinstance(setup.hyperparameters, Mapping):
        settings.update(setup.hyperparameters)
    return Setup(
        env, saved["num_envs"], Hyperparameters(**settings), saved["backend"], saved["device"], saved["seed"],
        document["threads"], document["overlap"], saved["groups"], setup.options,
    )  # fmt: skip


class _Training:
    """One training, from its first update to its last."""

    def __init__(self, setup: Setup, goal: Goal, document: Mapping[str, Any] | None, together: Together):
        self.setup, self.goal, self.together = setup, goal, together
        self.first = together.ranks.rank == 0
        self.built: Built = build(setup, together)
        self.recent = RecentEpisodes()
        self.history: list[dict[str, float]] = []
        self.steps, self.updates, self.seconds_before = 0, 0, 0.0
        self.stepping = self.learning = 0.0
        self.solved = self.stopping = False
        try:
            if document is not None:
                self._resume(document)
        except BaseException:
            self.built.close()
            raise
        self.began = self.saved = time.perf_counter()
        self.steps_before = self.steps

    def _resume(self, document: Mapping[str, Any]) -> None:
        checkpoint.restore(document, self.built, self.goal.trusted)
        try:
            self.steps, self.updates = int(document["steps"]), int(document["updates"])
            self.seconds_before = float(document["seconds"])
            self.recent.load(document["recent"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the checkpoint lacks {error}") from error

    @property
    def total(self) -> int:
        return self.built.policy.settings.total_steps

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    # ---- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> Trained:
        goal, threads = self.goal, torch.get_num_threads()
        name = self.setup.env if isinstance(self.setup.env, str) else getattr(self.setup.env, "__name__", "envs")
        with ExitStack() as closing:
            closing.callback(torch.set_num_threads, threads)
            closing.callback(self.built.close)
            logs = Logs(
                goal.folder if self.first else None, goal.resume, goal.tensorboard, goal.wandb if self.first else None
            )
            closing.callback(logs.close)
            screen = None
            if goal.screen and self.first:
                title = f"{name}, {self.setup.num_envs} envs, {self.built.reason}"
                screen = closing.enter_context(Screen(title, goal.target_return))
            stop = closing.enter_context(_deferred_interrupt())
            while not self._is_over():
                row = self._update()
                logs.write(row)
                self.stopping = self._agree(stop())
                if screen is not None:
                    screen.show(row, self._left(), last=self._is_over())
                if goal.folder is not None and (self._is_over() or time.perf_counter() - self.saved > CHECKPOINT_EVERY):
                    self._save(screen)
        return Trained(self.built.policy, self.history, self.solved, self.stopping, self.built.reason)

    def _update(self) -> dict[str, float]:
        """Make one rollout, learn from it, and return a row that tells of it."""
        built, ranks = self.built, self.together.ranks
        built.learner.set_progress(self.steps / self.total)
        turn = self._merged(built.turn())
        self.steps += built.way.lanes * built.policy.settings.steps * ranks.size
        self.updates += 1
        self.recent.add(turn.episodes, turn.return_sum, turn.length_sum)
        self.stepping, self.learning = self.stepping + turn.stepping, self.learning + turn.learning
        seconds = self.seconds
        both = max(self.stepping + self.learning, 1e-9)
        row = {
            "steps": float(self.steps), "seconds": seconds, "return": self.recent.mean_return,
            "length": self.recent.mean_length, "episodes": float(self.recent.total),
            "steps_per_s": (self.steps - self.steps_before) / max(seconds - self.seconds_before, 1e-9),
            "stepping": self.stepping / both, "learning": self.learning / both, **turn.losses,
        }  # fmt: skip
        self.history.append(row)
        target = self.goal.target_return
        if target is not None and self.recent.count >= self.recent.window and self.recent.mean_return >= target:
            self.solved = True
        return row

    def _merged(self, turn: Turn) -> Turn:
        """Add up the episodes of all ranks, so that all decide alike."""
        if self.together.ranks.size == 1:
            return turn
        count, returns, lengths = self.together.ranks.allgather(turn[:3]).sum(0).tolist()
        return turn._replace(episodes=int(count), return_sum=returns, length_sum=lengths)

    def _agree(self, stop: bool) -> bool:
        """Say whether to stop: Ctrl-C or the time limit, in any of the ranks."""
        minutes = self.goal.minutes
        late = minutes is not None and self.seconds >= 60 * minutes
        if self.together.ranks.size > 1:
            found = self.together.ranks.allgather([float(stop), float(late)]).max(0)
            stop, late = bool(found[0]), bool(found[1])
        self.late = late
        return stop

    late = False

    def _is_over(self) -> bool:
        enough = self.goal.updates is not None and self.updates >= self.goal.updates
        return self.solved or self.stopping or self.late or enough or self.steps >= self.total

    def _left(self) -> float | None:
        rate = self.history[-1]["steps_per_s"] if self.history else 0.0
        left = (self.total - self.steps) / rate if rate else None
        if self.goal.minutes is not None:
            until = 60 * self.goal.minutes - self.seconds
            left = until if left is None else min(left, until)
        return left

    def _save(self, screen: Screen | None) -> None:
        assert self.goal.folder is not None
        path = self.goal.folder / checkpoint.NAME
        if self.together.ranks.size > 1:
            path = Path(rank_path(path, self.together.ranks))
        setup = self.setup
        facts = {name: getattr(setup, name) for name in ("num_envs", "backend", "device", "seed", "groups")}
        facts["env"] = setup.env if isinstance(setup.env, str) else None
        trouble = checkpoint.save(path, self.built, {
            "steps": self.steps, "updates": self.updates, "seconds": self.seconds, "recent": self.recent.state(),
            "setup": facts,
        })  # fmt: skip
        if trouble and screen is not None:
            screen.say(trouble)
        self.saved = time.perf_counter()


@contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed: an update is finished first, so that a checkpoint can be
    resumed bit for bit. The second Ctrl-C interrupts at once."""
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


# ---- afterwards ----------------------------------------------------------------------------------------------------


def policy_function(policy: Policy, best: bool = True) -> Callable[[Any], Any]:
    """Return a function from a batch of observations to a batch of actions, the most probable ones or drawn ones.

    A policy with memory remembers between calls; it forgets all when the size of the batch changes.
    """
    memory: list[torch.Tensor] = []

    @torch.no_grad()
    def choose(obs: Any) -> Any:
        device = next(policy.parameters()).device
        rows = torch.as_tensor(np.asarray(policy.encoder.emulation.flatten(obs))).to(device)
        if not memory or memory[0].shape[1] != len(rows):
            memory[:] = [policy.first_memory(len(rows), device)]
        began = torch.zeros(len(rows), dtype=torch.bool, device=device)
        outputs, _, memory[0] = policy.look(rows, memory[0], began)
        noise = torch.zeros_like(outputs) if best else policy.draw((len(rows),), device=device)
        chosen: Any = policy.choose(outputs, noise).cpu().numpy()
        bounds = HostWay.bounds_of(policy)
        return policy.actions.unflatten(chosen if bounds is None else np.clip(chosen, *bounds), check=False)

    return choose


def load_policy(path: Any, observation_space: Any, action_space: Any) -> Policy:
    """Read the policy of a checkpoint, for envs of these spaces."""
    document = checkpoint.read(Path(path))
    settings = Hyperparameters(**{**document["settings"], "hidden": tuple(document["settings"]["hidden"])})
    policy = Policy(observation_space, action_space, settings)
    try:
        policy.load_state_dict(document["policy"])
    except RuntimeError as error:
        raise DataError(f"{path} holds a policy for other spaces than these: {error!s:.300}") from error
    return policy
