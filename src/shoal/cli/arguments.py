"""The options of each command as tables, and the types that read their values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from shoal.cli.contenders import BACKENDS


def whole_number(text: str, low: int, high: float, allowed: str) -> int:
    """Read a whole number from `low` to `high`; `allowed` says that in words."""
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"must be a whole number {allowed}, not {text!r}")
    return int(text)


count = partial(whole_number, low=1, high=math.inf, allowed="of at least 1")
seed = partial(whole_number, low=0, high=2**31 - 1, allowed="from 0 to 2**31 - 1")


def batch_size(text: str) -> int | str:
    """Read a number of envs, or "all"."""
    return text if text == "all" else count(text)


def number(unit: str, low: float, high: float, zero: bool = True) -> Callable[[str], float]:
    """Return a type that reads a number of this unit from `low` to `high`; `zero` says whether 0 is allowed."""

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = float("nan")
        if not low <= found <= high or (found == 0 and not zero):
            raise argparse.ArgumentTypeError(f"must be {unit} between {low:g} and {high:g}, not {text!r}")
        return found

    return read


seconds = number("seconds", 0, 3600, zero=False)
frames_per_second = number("frames per second", 0, 1000, zero=False)
milliseconds = number("milliseconds", 0, 60_000)


def memory(text: str) -> int:
    """Read a number of bytes, such as 500M or 4G."""
    unit = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}.get(text[-1:].upper())
    try:
        found = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        found = -1.0
    if not 1 <= found < 2**60:
        raise argparse.ArgumentTypeError(f"must be a size such as 500M or 4G, not {text!r}")
    return int(found)


Option = tuple[tuple[str, ...], str, dict[str, Any]]


def option(*names: str, group: str = "", **settings: Any) -> Option:
    """Return one row of a table: what argparse's `add_argument` takes. Options of one `group` exclude each other."""
    return names, group, settings


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add the options of a table. Of a group named "one of", the user must give one."""
    groups: dict[str, Any] = {"": parser}
    for names, group, settings in options:
        if group not in groups:
            groups[group] = parser.add_mutually_exclusive_group(required=group == "one of")
        groups[group].add_argument(*names, **settings)


def _backends(name: str, choices: tuple[str, ...], text: str, **settings: Any) -> Option:
    return option(name, choices=choices, metavar="NAME", help=f"{text}: {', '.join(choices)}", **settings)


ENV = option("env", metavar="ENV", help="a Gymnasium id, or module:callable that returns an env")
WORKERS = option("--workers", type=count, metavar="N", help="number of Shoal's workers (default: Shoal chooses)")
BACKEND = _backends("--backend", BACKENDS, "Shoal's backend (default: auto)", default="auto")
READY = option("--batch-size", type=count, metavar="N", help="step in batches of the first N envs that are ready")
JSON = option("--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or to stdout without FILE")
PLOT = option("--plot", type=Path, metavar="FILE.png", help="save a plot")

BENCH = (
    ENV,
    option("-n", "--num-envs", type=count, nargs="+", default=[8, 64], metavar="N",
           help="numbers of envs, one table for each (default: 8 64)"),
    _backends("--backends", BACKENDS, "Shoal's backends (default: all)", nargs="+", default=list(BACKENDS)),
    WORKERS,
    READY,
    option("--lend", action="store_true", help="measure shoal.Pool, which lends its arrays, instead of shoal.make, "
           "which copies them"),
    option("--peers", action="store_true", help="measure the other libraries that are installed, too"),
    option("--seconds", type=seconds, default=1.0, metavar="S", help="length of each run (default: 1)"),
    option("--rounds", type=count, default=5, metavar="N", help="runs of each contender (default: 5)"),
    JSON,
    PLOT,
)  # fmt: skip

PROFILE = (
    ENV,
    option("-n", "--num-envs", type=count, default=64, metavar="N", help="number of envs (default: 64)"),
    BACKEND,
    WORKERS,
    READY,
    option("--policy-ms", type=milliseconds, default=0.0, metavar="MS",
           help="time that the caller waits after each batch, as for a policy on a GPU (default: 0)"),
    option("--seconds", type=seconds, default=5.0, metavar="S", help="length of the run (default: 5)"),
    JSON,
    PLOT,
    option("--html", type=Path, metavar="REPORT.html", help="save a page that needs no network: the verdict, the "
           "shares, what each worker did in a hundred batches, and the slowest envs"),
    option("--flame", type=Path, metavar="FILE.svg", help="save a flame graph of the first worker process, or of the "
           "caller if there is none; this takes as long again, and needs py-spy"),
)  # fmt: skip

TUNE = (
    ENV,
    option("-n", "--num-envs", type=count, metavar="N", help="number of envs (default: the best is found)"),
    option("--batch-size", type=batch_size, metavar="N", help="batches of the first N envs that are ready; \"all\" for "
           "full batches, which shoal.make needs (default: the best is found)"),
    _backends("--backends", BACKENDS[:-1], "backends to choose from (default: all)", nargs="+",
              default=list(BACKENDS[:-1])),
    option("--policy-ms", type=milliseconds, default=0.0, metavar="MS", help="time that your policy takes for a batch"),
    option("--learner-threads", type=int, metavar="K", help="cores that are left to your learner"),
    option("--max-memory", type=memory, metavar="SIZE", help="memory for envs and processes together: 500M, 4G"),
    option("--isolate", action="store_true", help="envs must not run in the caller's process"),
    option("--seconds", type=seconds, default=20.0, metavar="S", help="length of the search (default: 20)"),
    option("--save", type=Path, metavar="PLAN.json", help="save the plan"),
    JSON,
    PLOT,
)  # fmt: skip

ESTIMATE = (
    option("--env", metavar="ENV", group="one of", help="an env to measure: a Gymnasium id, or module:callable that "
           "returns an env"),
    option("--env-ms", type=milliseconds, metavar="MS", group="one of", help="mean time of a step"),
    option("--spread", type=number("parts of the mean", 0, 100), metavar="X",
           help="standard deviation of a step's time, divided by its mean (default: 0, or as measured)"),
    option("--obs-bytes", type=number("bytes", 0, 2**40), metavar="N",
           help="size of one env's observation (default: as measured)"),
    option("--action-bytes", type=number("bytes", 0, 2**40), metavar="N",
           help="size of one env's action (default: 8, or as measured)"),
    option("--envs", type=count, required=True, metavar="N", help="number of envs on all nodes together"),
    option("--nodes", type=count, required=True, metavar="N", help="number of machines with envs, beside the driver"),
    option("--cores", type=count, required=True, metavar="N", help="cores of each node"),
    option("--latency-ms", type=milliseconds, default=0.5, metavar="MS",
           help="round trip time of the network (default: 0.5)"),
    option("--gbit", type=number("Gbit/s", 1e-6, 1e6), default=10.0, metavar="X",
           help="speed of every machine's link, in Gbit/s (default: 10)"),
    option("--policy-ms", type=milliseconds, default=0.0, metavar="MS",
           help="time that your policy takes for a batch of any size (default: 0)"),
    option("--policy-us", type=number("microseconds", 0, 1e6), default=0.0, metavar="US",
           help="time that it takes in addition for each env of the batch, in microseconds (default: 0)"),
    option("--batch-size", type=batch_size, metavar="N", help="batch size that your learner needs; \"all\" for full "
           "batches (default: the best is found)"),
    JSON,
)  # fmt: skip

RECORD = (
    ENV,
    option("out", type=Path, metavar="OUT.mp4", help="the video"),
    option("-n", "--num-envs", type=count, default=16, metavar="N", help="number of envs (default: 16)"),
    option("--steps", type=count, default=500, metavar="N", group="length", help="steps of each env (default: 500)"),
    option("--episodes", type=count, metavar="N", group="length",
           help="record until so many episodes of all envs together have ended"),
    option("--seed", type=seed, default=0, metavar="N", help="seed of the envs and of random actions (default: 0)"),
    option("--fps", type=frames_per_second, metavar="N",
           help="frames per second (default: as the envs say, or 30)"),
    option("--width", type=count, metavar="PIXELS", help="shrink the pictures until the video is no wider"),
    option("--policy", metavar="MODULE:FUNCTION", help="function from a batch of observations to a batch of actions "
           "(default: random actions)"),
    BACKEND,
)  # fmt: skip

TOP = (
    option("pid", type=count, nargs="?", metavar="PID", help="show one process (default: all pools of this user)"),
    option("--interval", type=seconds, default=1.0, metavar="S", help="seconds between two looks (default: 1)"),
    option("--once", action="store_true", help="show one interval and leave"),
    option("--json", action="store_true", help="write a line of JSON for each pool and interval"),
    option("--html", type=Path, metavar="TOP.html", help="save one interval as a page, and leave"),
)

DOCTOR = (
    option("env", nargs="?", metavar="ENV", help="a compiled class, as module:Class or by its id: how it runs here"),
    option("--text", action="store_true", help="write plain text, to be pasted into a bug report"),
    option("--no-test", action="store_true", help="do not try the backends, which takes some seconds"),
    JSON,
)

TRAIN = (
    option("env", nargs="?", metavar="ENV", help="a Gymnasium id, one of Shoal's library, or module:callable; may be "
           "left out with --resume"),
    option("-n", "--envs", type=count, default=64, metavar="N", help="number of envs (default: 64)"),
    option("--backend", default="auto", metavar="NAME", help="Shoal's backend (default: auto); compiled and cuda run "
           "compiled envs, those of Shoal's library included"),
    option("--device", default="auto", metavar="NAME", help="of the policy: cpu, cuda (default: auto)"),
    option("--seed", type=seed, default=0, metavar="N", help="of everything (default: 0)"),
    option("--steps", type=count, metavar="N", help="of all envs together (default: 500000; 1000000 for continuous "
           "actions)"),
    option("--target-return", type=float, metavar="X", help="end when the mean return of 100 episodes reaches X"),
    option("--minutes", type=number("minutes", 0, 1e6, zero=False), metavar="M", help="end after M minutes"),
    WORKERS,
    option("--plan", type=Path, metavar="PLAN.json", help="run the envs by a plan of shoal tune"),
    option("--learner-threads", type=count, metavar="K", help="threads of torch (default: measured)"),
    option("--overlap", action=argparse.BooleanOptionalAction, default=None, help="step while the learner learns, "
           "by the policy of before (default: for slow envs)"),
    option("--set", nargs="+", default=[], metavar="NAME=VALUE", help="hyperparameters, such as learning_rate=1e-3 "
           "epochs=4 memory=lstm"),
    option("--out", type=Path, metavar="FOLDER", help="for checkpoint.pt and progress.csv"),
    option("--resume", action="store_true", help="go on from the checkpoint in the folder of --out"),
    option("--trust", action="store_true", help="load pickled envs of the checkpoint, which runs code in it"),
    option("--tensorboard", action="store_true", help="write files for TensorBoard to the folder, too"),
    option("--wandb", metavar="PROJECT", help="log to Weights & Biases, too"),
    PLOT,
    option("--video", type=Path, metavar="OUT.mp4", help="save a video of one episode at the end"),
)  # fmt: skip

PLAY = (
    option("checkpoint", type=Path, metavar="CHECKPOINT", help="of shoal train: the file or its folder"),
    option("--env", metavar="ENV", help="the env, if the checkpoint does not name it"),
    option("--episodes", type=count, default=3, metavar="N", help="how many (default: 3)"),
    option("--seed", type=seed, default=0, metavar="N", help="of the first episode (default: 0)"),
    option("--video", type=Path, metavar="OUT.mp4", help="save a video instead of opening a window"),
    option("--no-render", action="store_true", help="show nothing but the returns"),
)  # fmt: skip

# The commands: what the help says of each, and its options.
COMMANDS: dict[str, tuple[str, tuple[Option, ...]]] = {
    "bench": ("measure Shoal against plain loops and other libraries", BENCH),
    "profile": ("say where the time of a pool goes, and what would help", PROFILE),
    "tune": ("find the plan by which an env runs fastest here", TUNE),
    "estimate": ("estimate how fast envs on many machines will be, and say how to run them", ESTIMATE),
    "record": ("make a video of a batch of envs, side by side", RECORD),
    "top": ("show what the running pools are doing", TOP),
    "serve": (
        "under mpiexec, step envs for a script that is rank 0: mpiexec -n 1 python train.py : -n 2 shoal serve", (),
    ),
    "train": ("train a policy by PPO, as fast as the envs step", TRAIN),
    "play": ("show what shoal train has learned", PLAY),
    "doctor": ("say what this machine and installation offer, try each backend; or how a compiled class runs", DOCTOR),
}  # fmt: skip
