"""The command `shoal`: reads the command line, shows progress, and hands over to the tools."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shoal.cli.contenders import BACKENDS
from shoal.support.usage import UsageError

if TYPE_CHECKING:
    from shoal.tuning.search import Search

BAD_USAGE = 2
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say one sentence; the whole usage is what --help is for."""
        self.exit(BAD_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


class Command(NamedTuple):
    """One subcommand: how it reads its options and what it does with them."""

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return COMMANDS[options.command].run(options)
    except UsageError as error:
        print(f"shoal {options.command}: {error}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        print(f"shoal {options.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="shoal", description="Runs many environments as one.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.arguments(commands.add_parser(name, help=command.help, description=command.help))
    return parser


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on stderr and yield a function that takes one line for each move."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("starting", total=total)
        moved = False

        def notify(text: str) -> None:
            nonlocal moved
            bar.update(task, description=text, advance=int(moved))
            moved = True

        yield notify


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("env", metavar="ENV", help="a Gymnasium id, or module:callable that returns an env")
    add("-n", "--num-envs", type=_count, nargs="+", default=[8, 64], metavar="N", help="how many")
    add("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS), metavar="NAME",
        help=f"which of Shoal's backends: {', '.join(BACKENDS)} (default: all)")  # fmt: skip
    add("--workers", type=_count, metavar="N", help="workers for Shoal (default: its own choice)")
    add("--batch-size", type=_count, metavar="N", help="async: batches of the first N ready")
    add("--lend", action="store_true", help="measure shoal.Pool, which lends its arrays, instead "
        "of shoal.make, which copies them")  # fmt: skip
    add("--peers", action="store_true", help="add the other libraries that are installed")
    add("--seconds", type=_seconds, default=1.0, metavar="S", help="length of each run")
    add("--rounds", type=_count, default=5, metavar="N", help="runs of each contender")
    add("--json", nargs="?", const="-", metavar="FILE", help="write JSON, to stdout without FILE")
    add("--plot", type=Path, metavar="FILE.png", help="save a plot")


def _bench(options: argparse.Namespace) -> int:
    # Imported here so that `shoal --help` and other commands stay quick.
    from dataclasses import replace

    from shoal.cli import bench, contenders, doctor, peers, report, work
    from shoal.support.cores import usable_cores

    json_file = Path(options.json) if options.json and options.json != "-" else None
    if options.plot:
        report.check_plot(options.plot)
    if json_file:
        report.check_file(json_file)
    numbers = list(dict.fromkeys(options.num_envs))
    if options.batch_size and options.batch_size > min(numbers):
        raise UsageError(f"a batch of {options.batch_size} is more than {min(numbers)} envs")
    _look_here(options.env)
    probed = work.probe(options.env)
    cores = usable_cores()
    field = [
        *contenders.limits(cores),
        *contenders.shoals(list(dict.fromkeys(options.backends)), options.workers, options.batch_size, options.lend),
        *peers.gymnasiums(),
        *(peers.others(cores) if options.peers else []),
    ]
    settings = bench.Settings(seconds=options.seconds, rounds=options.rounds)
    with progress(len(numbers) * bench.ticks(field, settings)) as notify:
        works = [replace(probed, num_envs=number) for number in numbers]
        results = [bench.measure(one, field, settings, notify) for one in works]
    console = Console()
    if options.json == "-":
        print(report.as_json(results, doctor.facts()), end="")
    else:
        for result in results:
            console.print(report.terminal(result))
    if json_file:
        json_file.write_text(report.as_json(results, doctor.facts()))
    if options.plot:
        report.plot(results, options.plot)
        print(f"plot saved to {options.plot}", file=sys.stderr)
    return 0


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")


def _doctor(options: argparse.Namespace) -> int:
    from shoal.cli import doctor

    known = doctor.facts()
    if options.json:
        print(json.dumps(known, indent=2))
    else:
        doctor.show(known, Console())
    return 0


def _record_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("env", metavar="ENV", help="a Gymnasium id, or module:callable that returns an env")
    add("out", type=Path, metavar="OUT.mp4", help="the video")
    add("-n", "--num-envs", type=_count, default=16, metavar="N", help="how many (default: 16)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=_count, default=500, metavar="N", help="of each env (default: 500)")
    length.add_argument("--episodes", type=_count, metavar="N", help="until so many have ended, of all envs together")
    add("--seed", type=_seed, default=0, metavar="N", help="of the envs and of random actions (default: 0)")
    add("--fps", type=_rate, metavar="N", help="frames per second (default: as the envs say, or 30)")
    add("--width", type=_count, metavar="PIXELS", help="shrink the pictures until the video is no wider")
    add("--policy", metavar="MODULE:FUNCTION", help="from a batch of observations to a batch of actions "
        "(default: random actions)")  # fmt: skip
    add("--backend", choices=BACKENDS, default="auto", metavar="NAME", help=f"one of {', '.join(BACKENDS)}")


def _record(options: argparse.Namespace) -> int:
    from shoal.cli import record

    _look_here(options.env, options.policy or "")
    wanted = record.VideoOptions(
        options.env, options.out, options.num_envs, options.steps, options.episodes, options.seed, options.fps,
        options.width, options.policy, options.backend,
    )  # fmt: skip
    with progress(wanted.goal) as notify:
        recorded = record.record(wanted, notify)
    print(recorded)
    if recorded.interrupted:
        raise KeyboardInterrupt
    return 0


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("env", metavar="ENV", help="a Gymnasium id, or module:callable that returns an env")
    add("-n", "--num-envs", type=_count, default=64, metavar="N", help="how many (default: 64)")
    add("--backend", choices=BACKENDS, default="auto", metavar="NAME", help=f"one of {', '.join(BACKENDS)}")
    add("--workers", type=_count, metavar="N", help="how many (default: Shoal's own choice)")
    add("--batch-size", type=_count, metavar="N", help="async: batches of the first N ready")
    add("--policy-ms", type=_milliseconds, default=0.0, metavar="MS", help="how long the caller waits after each "
        "batch, as for a policy on a device (default: 0)")  # fmt: skip
    add("--seconds", type=_seconds, default=5.0, metavar="S", help="length of the run (default: 5)")
    add("--json", nargs="?", const="-", metavar="FILE", help="write JSON, to stdout without FILE")
    add("--plot", type=Path, metavar="FILE.png", help="save a plot")
    add("--flame", type=Path, metavar="FILE.svg", help="save a flame graph of the first worker process, or of the "
        "caller where there is none; takes as long again, and needs py-spy")  # fmt: skip


def _profile(options: argparse.Namespace) -> int:
    from shoal.cli import doctor, profile, report

    json_file = Path(options.json) if options.json and options.json != "-" else None
    if options.plot:
        report.check_plot(options.plot)
    if json_file:
        report.check_file(json_file)
    _look_here(options.env)
    run = profile.Run(
        options.env, options.num_envs, options.backend, options.workers, options.batch_size, options.policy_ms,
        options.seconds, options.flame,
    )  # fmt: skip
    probed = profile.check(run)
    with progress(run.ticks) as notify:
        found = profile.profile(run, probed, notify)
    print(found.as_json(doctor.facts()) if options.json == "-" else f"{found}\n", end="")
    if json_file:
        json_file.write_text(found.as_json(doctor.facts()))
    if options.plot:
        profile.plot(found, options.plot)
    for what, path in (("plot", options.plot), ("flame graph", options.flame)):
        if path:
            print(f"{what} saved to {path}", file=sys.stderr)
    return 0


def _top_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("pid", type=_count, nargs="?", metavar="PID", help="of one process (default: all pools of this user)")
    add("--interval", type=_seconds, default=1.0, metavar="S", help="seconds between two looks (default: 1)")
    add("--once", action="store_true", help="show what happens in one interval, and leave")
    add("--json", action="store_true", help="write a line of JSON for each pool and interval")


def _top(options: argparse.Namespace) -> int:
    from shoal.observe import top

    return top.top(options.pid, options.interval, options.once, options.json, Console())


def _tune_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("env", metavar="ENV", help="a Gymnasium id, or module:callable that returns an env")
    add("-n", "--num-envs", type=_count, metavar="N", help="how many (default: found out)")
    add("--batch-size", type=_batch_size, metavar="N", help="batches of the first N ready; all for full batches, "
        "which shoal.make needs (default: found out)")  # fmt: skip
    add("--backends", nargs="+", choices=BACKENDS[:-1], default=list(BACKENDS[:-1]), metavar="NAME",
        help=f"those to choose from: {', '.join(BACKENDS[:-1])} (default: all)")  # fmt: skip
    add("--policy-ms", type=_milliseconds, default=0.0, metavar="X", help="what your policy takes for a batch")
    add("--max-memory", type=_bytes, metavar="SIZE", help="for envs and processes together: 500M, 4G")
    add("--isolate", action="store_true", help="envs must not run in the caller's process")
    add("--seconds", type=_seconds, default=20.0, metavar="S", help="how long it may take (default: 20)")
    add("--save", type=Path, metavar="PLAN.json", help="save the plan")
    add("--json", nargs="?", const="-", metavar="FILE", help="write JSON, to stdout without FILE")
    add("--plot", type=Path, metavar="FILE.png", help="save the map as a picture")


def _tune(options: argparse.Namespace) -> int:
    from shoal.cli import report, tune, work
    from shoal.errors import ShoalError
    from shoal.tuning.progress import bar
    from shoal.tuning.search import Search

    json_file = Path(options.json) if options.json and options.json != "-" else None
    if options.plot:
        report.check_plot(options.plot)
    for path in (json_file, options.save):
        if path:
            report.check_file(path)
    _look_here(options.env)
    try:
        search = Search(
            work.env_fn(options.env), options.num_envs, batch_size=options.batch_size, backends=options.backends,
            policy_latency=options.policy_ms / 1000, max_memory=options.max_memory, isolate=options.isolate,
            seconds=options.seconds,
        )  # fmt: skip
        with bar(options.seconds) as notify:
            interrupted = _ran_until_interrupted(search, notify)
        result = search.result()
    except (ShoalError, ValueError) as error:
        raise UsageError(str(error).strip().partition("\n")[0]) from error
    if options.save:
        result.plan.save(options.save)
    if options.json == "-":
        print(tune.as_json(result, options.env), end="")
    else:
        tune.show(result, options.env, options.save, Console())
    if json_file:
        json_file.write_text(tune.as_json(result, options.env))
    if options.plot:
        result.plot(options.plot)
        print(f"map saved to {options.plot}", file=sys.stderr)
    if interrupted:
        raise KeyboardInterrupt
    return 0


def _ran_until_interrupted(search: Search, notify: Callable[[str], None]) -> bool:
    """Search; after Ctrl-C, what was tried so far is the result."""
    try:
        search.run(notify)
    except KeyboardInterrupt:
        if not search.tried:
            raise
        return True
    return False


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    env = parser.add_mutually_exclusive_group(required=True)
    env.add_argument("--env", metavar="ENV", help="to measure: a Gymnasium id, or module:callable that returns an env")
    env.add_argument("--env-ms", type=_milliseconds, metavar="MS", help="what a step takes on average")
    add("--spread", type=_parts, metavar="X", help="standard deviation of a step's time, in parts of its mean "
        "(default: 0, or as measured)")  # fmt: skip
    add("--obs-bytes", type=_amount, metavar="N", help="of one env's observation (default: as measured)")
    add("--action-bytes", type=_amount, metavar="N", help="of one env's action (default: 8, or as measured)")
    add("--envs", type=_count, required=True, metavar="N", help="of all nodes together")
    add("--nodes", type=_count, required=True, metavar="N", help="machines with envs, beside the driver")
    add("--cores", type=_count, required=True, metavar="N", help="of each node")
    add("--latency-ms", type=_milliseconds, default=0.5, metavar="MS", help="round trip of the network (default: 0.5)")
    add("--gbit", type=_gbit, default=10.0, metavar="X", help="of every machine's link, in Gbit/s (default: 10)")
    add("--policy-ms", type=_milliseconds, default=0.0, metavar="MS", help="what your policy takes for a batch, "
        "whatever its size (default: 0)")  # fmt: skip
    add("--policy-us", type=_microseconds, default=0.0, metavar="US", help="what it takes beside that for each env of "
        "the batch, in microseconds (default: 0)")  # fmt: skip
    add("--batch-size", type=_batch_size, metavar="N", help="as your learner needs it; all for full batches "
        "(default: what is best)")  # fmt: skip
    add("--json", action="store_true", help="write JSON instead of a table")


def _plan(options: argparse.Namespace) -> int:
    from shoal.cli import estimate

    if options.env is None and options.obs_bytes is None:
        raise UsageError("--env-ms says nothing about bytes: give --obs-bytes too, or --env to have both measured")
    _look_here(options.env or "")
    facts = estimate.facts(options.env, options.env_ms, options.spread, options.obs_bytes, options.action_bytes)
    advice = estimate.plan(
        facts, envs=options.envs, nodes=options.nodes, cores=options.cores, latency=options.latency_ms / 1e3,
        bandwidth=options.gbit * 1e9 / estimate.BITS, policy=options.policy_ms / 1e3,
        policy_lane=options.policy_us / 1e6,
        batch_size=options.envs if options.batch_size == "all" else options.batch_size,
    )  # fmt: skip
    if options.json:
        print(estimate.as_json(advice, facts), end="")
    else:
        estimate.show(advice, facts, Console())
    return 0


def _look_here(*names: str) -> None:
    """An installed command does not look for modules where it is called; its user expects it."""
    if any(":" in name for name in names) and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2**31 - 1, not {text!r}")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 < rate <= 1000:
        raise argparse.ArgumentTypeError(f"must be frames per second between 0 and 1000, not {text!r}")
    return rate


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"must be seconds between 0 and 3600, not {text!r}")
    return seconds


def _milliseconds(text: str) -> float:
    return _number(text, 0, 60_000, "milliseconds")


def _microseconds(text: str) -> float:
    return _number(text, 0, 1e6, "microseconds")


def _parts(text: str) -> float:
    return _number(text, 0, 100, "parts of the mean")


def _amount(text: str) -> float:
    return _number(text, 0, 2**40, "bytes")


def _gbit(text: str) -> float:
    return _number(text, 1e-6, 1e6, "Gbit/s")


def _number(text: str, low: float, high: float, unit: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if not low <= found <= high:
        raise argparse.ArgumentTypeError(f"must be {unit} between {low:g} and {high:g}, not {text!r}")
    return found


def _batch_size(text: str) -> int | str:
    return text if text == "all" else _count(text)


def _bytes(text: str) -> int:
    unit = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}.get(text[-1:].upper())
    try:
        found = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        found = -1.0
    if not 1 <= found < 2**60:
        raise argparse.ArgumentTypeError(f"must be a size such as 500M or 4G, not {text!r}")
    return int(found)


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def _serve(options: argparse.Namespace) -> int:
    from shoal.errors import StartError
    from shoal.remote.mpi.serve import check_serving, serve

    try:
        check_serving()
    except StartError as error:
        raise UsageError(str(error)) from error
    serve(leave=False)
    return 0


COMMANDS = {
    "bench": Command("measure Shoal against the plain loop and others", _bench_arguments, _bench),
    "profile": Command("say where the time of a pool goes, and what would help", _profile_arguments, _profile),
    "tune": Command("find the plan by which an env runs fastest here", _tune_arguments, _tune),
    "plan": Command("predict how fast envs on many machines will be, and how to run them", _plan_arguments, _plan),
    "record": Command("make a video of a batch of envs, side by side", _record_arguments, _record),
    "top": Command("show what the pools that are running now are doing", _top_arguments, _top),
    "serve": Command(
        "under mpiexec, step envs for a script that is rank 0: mpiexec -n 1 python train.py : -n 2 shoal serve",
        _serve_arguments,
        _serve,
    ),
    "doctor": Command("say what this machine and installation offer", _doctor_arguments, _doctor),
}

if __name__ == "__main__":
    sys.exit(main())
