"""The life of a worker beside the caller, in a thread or a process: builds its envs, gets the slab, steps, leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from shoal.envs.group import is_group
from shoal.memory.messages import StepperConfig
from shoal.memory.packed_errors import pack_error
from shoal.memory.slab import Slab
from shoal.worker.base import EnvBlock, Stepper, WorkerChannel
from shoal.worker.building import BuildError, build_envs, close_envs
from shoal.worker.grouped import GroupStepper
from shoal.worker.single import SingleStepper


def make_stepper(block: EnvBlock, channel: WorkerChannel) -> Stepper:
    """Make the stepper of these envs. A group may bring its own: a method `make_stepper` with the same arguments."""
    first: Any = block.envs[0]
    if not is_group(first):
        return SingleStepper(block, channel)
    made: Stepper = getattr(first, "make_stepper", GroupStepper)(block, channel)
    return made


class Life(ABC):
    """What a worker beside the caller does. A subclass says how it talks to the caller."""

    _leaving = False
    _stepper: Any

    @abstractmethod
    def announce(self, env_id: int) -> None:
        """Let the caller know that this env is being built."""

    @abstractmethod
    def say(self, message: Any) -> None:
        """Tell the caller of the start: a BlockSummary, then "attached"; or a BuildError."""

    @abstractmethod
    def wait_for_slab(self, envs: list[Any]) -> tuple[Slab, int, StepperConfig, WorkerChannel] | None:
        """The slab, which lane of it is the first of ours, and how to step it; None when the worker shall leave."""

    @abstractmethod
    def next_command(self) -> tuple[Any, ...] | None:
        """The next command that lies in the side channel; None for none."""

    def live(self, index: int, start: int, env_fns: Sequence[Callable[[], Any]]) -> None:
        """Build the envs, of which `start` is the first one's id, and step until the command to close."""
        try:
            envs, summary = build_envs(env_fns, start, announce=self.announce)
        except BuildError as error:
            self.say(error)
            return
        self.say(summary)
        attachment = self.wait_for_slab(envs)
        if attachment is None:
            close_envs(envs, start)
            return
        slab, first_lane, config, channel = attachment
        try:
            self._stepper = make_stepper(EnvBlock(slab, index, first_lane, envs, env_fns, config), channel)
        except BaseException as error:
            close_envs(envs, first_lane)
            failure = BuildError(first_lane, pack_error(error, "its start"))
            failure.__cause__ = error
            self.say(failure)
            return
        self.say("attached")
        while not self._leaving:
            self._stepper.wait(-1, config.spin_ns)
            self.read_mail()
            self._stepper.run()
        channel.post(("closed", self._stepper.close()))

    def read_mail(self) -> None:
        """Carry out the commands that lie in the side channel."""
        while (message := self.next_command()) is not None:
            if message[0] == "close":
                self._leaving = True
            else:
                self._stepper.handle(message)
