"""A program whose envs fork and forget to end the child; `test_forks` runs it, because a child that is not ended would
go on as a second test run. Arguments: the backend, the start method,
and how many of the three parts to run. Says as JSON what has come out."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv

import shoal
from envs import CountEnv

LOG = os.environ["FORK_LOG"]  # a file: a word for each step and close, by whatever process


class ForkEnv(CountEnv):
    """Forks where it is told to; the child comes back, with an answer that is none, or raises `raises`."""

    def __init__(self, where: str = "", raises: type[BaseException] | None = None):
        super().__init__(length=100)
        self.where, self.raises, self.codes = where, raises, list[int]()
        self.fork("constructor")

    def fork(self, where: str) -> None:
        if where != self.where:
            return
        pid = os.fork()
        if pid:
            self.codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            return
        self.steps += 1000
        if self.raises is not None:
            raise self.raises("in the child")

    def step(self, action: Any) -> Any:
        with open(LOG, "a") as file:
            file.write("step ")
        self.fork("step")
        return super().step(action)

    def reset(self, **kwargs: Any) -> Any:
        found = super().reset(**kwargs)
        self.fork("reset")
        return found[0], {"an": "info"}

    def answer(self) -> int:
        self.fork("call")
        return self.steps

    def close(self) -> None:
        with open(LOG, "a") as file:
            file.write("close ")
        self.fork("close")


def logged() -> list[str]:
    with open(LOG, "r+") as file:
        found = file.read().split()
        file.truncate(0)
    return found


def tell(pool: shoal.Pool, where: str, env_id: int, raises: Any = None) -> None:
    for name, value in (("where", where), ("raises", raises)):
        pool.set_attr(name, [value], [env_id])


def single(**options: Any) -> dict[str, Any]:
    """Envs with one lane each. The last one of all, and the first, in turn."""
    found: dict[str, Any] = {}
    pool = shoal.Pool(ForkEnv, 4, **options)
    pool.reset(seed=0)
    logged()
    for env_id in (0, 3):
        for raises in (None, SystemExit, KeyboardInterrupt):
            tell(pool, "step", env_id, raises)
            name = f"step {env_id} {raises.__name__ if raises else 'returns'}"
            found[name] = pool.step(np.zeros(4, np.int64)).obs[:, 2].tolist()
            tell(pool, "", env_id)
    found["steps"] = len(logged())
    for where, act in (("reset", lambda: pool.reset(seed=0).obs[:, 2].tolist()), ("call", lambda: pool.call("answer"))):
        tell(pool, where, 1)
        found[where] = act()
        tell(pool, "", 1)
    found["codes"] = [list(codes) for codes in pool.get_attr("codes")]
    tell(pool, "close", 2)
    pool.close()
    found["closes"] = len(logged())
    return found


def constructed(**options: Any) -> Any:
    fns = [ForkEnv, lambda: ForkEnv("constructor"), ForkEnv, ForkEnv]
    with shoal.Pool(fns, **options) as pool:
        pool.reset(seed=0)
        return pool.get_attr("codes"), pool.step(np.zeros(4, np.int64)).obs[:, 2].tolist()


def grouped(**options: Any) -> Any:
    """A vector env has several lanes, and writes their rows itself."""
    fns = [lambda: SyncVectorEnv([ForkEnv, ForkEnv])] * 2
    with shoal.Pool(fns, **options) as pool:
        pool.reset(seed=0)
        pool.apply(lambda envs: setattr(envs.envs[1], "where", "step"))
        return pool.step(np.zeros(4, np.int64)).obs[:, 2].tolist()


if __name__ == "__main__":
    options: dict[str, Any] = {"backend": sys.argv[1], "num_workers": 1 if sys.argv[1] == "serial" else 2}
    options["start_method"] = sys.argv[2]
    print(json.dumps([part(**options) for part in (single, constructed, grouped)[: int(sys.argv[3])]]))
