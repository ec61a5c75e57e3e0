"""Many MuJoCo simulations, stepped by threads of the C core.

Each simulation has an `MjData` of its own, so it is what `mujoco.mj_step` makes of one simulation, to the last bit:
contacts, warm starts and all that MuJoCo leaves behind after a step are there, and a renderer can look at them. What
threads do is a program: copy arrays into the simulations, call functions of MuJoCo's, copy fields into arrays. Python's
lock is not held meanwhile.

The core calls MuJoCo by the addresses of its functions and knows nothing else of it (`native/simulate.h`). Without the
core, the programs run in plain Python, on one thread.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal import native
from shoal.compiled.task import Task
from shoal.native.layout import TASK_FRAME_FIELDS, TASK_LANE_FIELDS
from shoal.support.optional_dependencies import require

Array = npt.NDArray[Any]
Instruction = tuple[Any, ...]  # ("call", name of a function, how often), ("load", field) or ("store", field)

CALL, LOAD, STORE = 0, 1, 2  # as in native/simulate.h
MESSAGE_BYTES = 256
WORDS = (*TASK_LANE_FIELDS, *TASK_FRAME_FIELDS)  # arrays that a Kernel keeps; none has more than a word for each lane


class SimulationError(RuntimeError):
    """MuJoCo itself has given up on a simulation."""


class Program:
    """A list of instructions for each simulation, and its table of numbers for the core."""

    def __init__(self, instructions: Sequence[Instruction], table: Array):
        self.instructions, self.table = instructions, table


class Simulations:
    """So many simulations of one model.

    Args:
        model: a `mujoco.MjModel`, shared by all simulations until `own_models` gives each a copy.
        count: how many there are.
        threads: how many threads step them, the caller included.

    Attributes:
        models, data: those of each simulation, from `mujoco`.
        template: the model that all simulations began with.
    """

    def __init__(self, model: Any, count: int, threads: int):
        self._mujoco = require("mujoco", "MuJoCo's simulations need a package", "mujoco")
        self.count, self.models, self.template = count, [model] * count, model
        self.data = [self._mujoco.MjData(model) for _ in range(count)]
        self._fields: dict[str, Array] = {}
        self._places: dict[str, Array] = {}
        self._all = np.arange(count)
        self._own = False
        self._messages = np.zeros((count, MESSAGE_BYTES), np.uint8)
        self._failed = np.zeros(count, np.uint8)
        self._kernel = None
        if native.core is not None:
            self._addresses = np.array([[_address(one) for one in row] for row in (self.models, self.data)], np.int64)
            self._library = _library(self._mujoco)
            self._start(threads)

    def _start(self, threads: int) -> None:
        # A Kernel steps the lanes that were asked and not answered. It keeps books of episodes too, which lie here.
        lanes = {name: np.zeros(self.count, np.uint64) for name in WORDS}
        self._requested, self._task = lanes["requested"], Task(0)
        self._task.number("lanes", self.count)
        for name, array in lanes.items():
            self._task.array(name, array)
        hook = ctypes.addressof(ctypes.c_void_p.in_dll(self._library, "mju_user_error"))
        self._kernel = native.Kernel(
            native.core.simulation_kernel(hook), self._task.table, self.count, 1, threads, np.zeros(64, np.int64),
            self._failed, lambda: None, 1,
        )  # fmt: skip

    def field(self, name: str) -> Array:
        """An array with a row for each simulation, which programs load from or store to: a field of `MjData`."""
        if name not in self._fields:
            first = np.asarray(getattr(self.data[0], name))
            self._fields[name] = np.zeros((self.count, *first.shape), first.dtype)
            self._fields[name][:] = first
            found = [np.asarray(getattr(data, name)).ctypes.data for data in self.data]
            self._places[name] = np.array(found, np.int64)
        return self._fields[name]

    def program(self, *instructions: Instruction) -> Program:
        """Make a program of these instructions."""
        numbers = []
        for kind, name, *times in instructions:
            if kind == "call":
                if self._kernel is not None:
                    function = ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value
                    numbers.append((CALL, function, times[0] if times else 1, 0))
            else:
                array = self.field(name)
                row = array.nbytes // self.count
                numbers.append(({"load": LOAD, "store": STORE}[kind], self._places[name].ctypes.data,
                                array.ctypes.data, row))  # fmt: skip
        table = np.zeros(4 + 4 * len(numbers), np.int64)
        if self._kernel is not None:
            models, data = self._addresses
            table[:4] = models.ctypes.data, data.ctypes.data, self._messages.ctypes.data, len(numbers)
            table[4:] = np.array(numbers, np.int64).ravel()
        return Program(instructions, table)

    def run(self, program: Program, rows: Array | None = None) -> None:
        """Run a program on these simulations, or on all. Raises SimulationError for the first that MuJoCo gave up."""
        if self._kernel is None:
            self._run_here(program, self._all if rows is None else rows)
            return
        self._task.array("states", program.table)
        self._requested[slice(None) if rows is None else rows] += 1
        self._kernel.run()
        if self._failed.any():
            lane = int(np.flatnonzero(self._failed)[0])
            self._failed[:] = 0
            message = self._messages[lane].tobytes().partition(b"\0")[0].decode(errors="replace")
            raise SimulationError(f"MuJoCo gave up on the simulation of lane {lane}: {message}")

    def _run_here(self, program: Program, rows: Array) -> None:
        for lane in rows.tolist():
            model, data = self.models[lane], self.data[lane]
            for kind, name, *times in program.instructions:
                if kind == "call":
                    for _ in range(times[0] if times else 1):
                        getattr(self._mujoco, name)(model, data)
                elif kind == "load":
                    getattr(data, name)[...] = self._fields[name][lane]
                else:
                    self._fields[name][lane] = getattr(data, name)

    def own_models(self) -> None:
        """Give each simulation a copy of the model, so that models can differ."""
        if not self._own:
            self._own = True
            self.models[:] = [copy.copy(model) for model in self.models]
            if self._kernel is not None:
                self._addresses[0] = [_address(model) for model in self.models]

    # ---- states of single simulations ------------------------------------------------------------------------------

    def get_state(self, lane: int) -> Array:
        """All that the next steps of a simulation depend on."""
        kind = self._mujoco.mjtState.mjSTATE_INTEGRATION
        state = np.zeros(self._mujoco.mj_stateSize(self.template, kind))
        self._mujoco.mj_getState(self.models[lane], self.data[lane], state, kind)
        return state

    def set_state(self, lane: int, state: Array) -> None:
        """The counterpart of `get_state`."""
        kind, model, data = self._mujoco.mjtState.mjSTATE_INTEGRATION, self.models[lane], self.data[lane]
        self._mujoco.mj_setState(model, data, state, kind)
        self._mujoco.mj_forward(model, data)  # for those who look at the data: a renderer
        self._mujoco.mj_setState(model, data, state, kind)

    def close(self) -> None:
        """End the threads."""
        if self._kernel is not None:
            self._kernel.close()


def _address(one: Any) -> int:
    return int(one._address)


def _library(mujoco: Any) -> ctypes.CDLL:
    """MuJoCo's own library, which its package has loaded already."""
    folder = Path(mujoco.__file__).parent
    found = sorted([*folder.glob("libmujoco.so*"), *folder.glob("libmujoco*.dylib")])
    if not found:
        raise ImportError(f"there is no libmujoco in {folder}: install mujoco from its wheel, or set SHOAL_NATIVE=0")
    return ctypes.CDLL(str(found[0]))
