"""The command `shoal`: reads the command line, shows progress, and calls the module of the command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from rich.console import Console

from shoal.cli import arguments
from shoal.cli.arguments import Option
from shoal.observe.progress import progress
from shoal.support.usage import UsageError

if TYPE_CHECKING:
    from shoal.tuning.search import Search

BAD_USAGE = 2
INTERRUPTED = 130
RENAMED = {"plan": "estimate"}  # old names, which work for one more release


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say one sentence, and leave the whole usage to --help."""
        self.exit(BAD_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


class Command(NamedTuple):
    """One subcommand: its line in the help, its options, and the function that runs it."""

    help: str
    options: Sequence[Option]
    run: Callable[[argparse.Namespace], int]


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = _parser().parse_args(words)
    name = RENAMED.get(options.command, options.command)
    if name != options.command:
        print(f"shoal {options.command} is called shoal {name} now: use that name", file=sys.stderr)
    try:
        return COMMANDS[name].run(options)
    except UsageError as error:
        print(f"shoal {name}: {error}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        print(f"shoal {name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="shoal", description="Run many environments as one.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        arguments.add_options(commands.add_parser(name, help=command.help, description=command.help), command.options)
    for old, new in RENAMED.items():
        arguments.add_options(
            commands.add_parser(old, description=f"The old name of shoal {new}."), COMMANDS[new].options
        )
    return parser


# Each function below imports its modules itself, so that `shoal --help` and other commands stay quick.


def _bench(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from shoal.cli import bench, contenders, doctor, peers, report, work
    from shoal.support.cores import usable_cores

    output = report.Output(options)
    numbers = list(dict.fromkeys(options.num_envs))
    _check_batch_size(options.batch_size, min(numbers))
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
    output.write(
        lambda: report.as_dict(results, doctor.facts()),
        lambda console: report.show(results, console),
        lambda path: report.plot(results, path),
    )
    return 0


def _profile(options: argparse.Namespace) -> int:
    from shoal.cli import doctor, profile, report

    output = report.Output(options)
    _check_batch_size(options.batch_size, options.num_envs)
    _look_here(options.env)
    run = profile.Run(
        options.env, options.num_envs, options.backend, options.workers, options.batch_size, options.policy_ms,
        options.seconds, options.flame,
    )  # fmt: skip
    probed = profile.check(run)
    with progress(run.ticks) as notify:
        found = profile.profile(run, probed, notify)
    output.write(
        lambda: found.as_dict(doctor.facts()),
        lambda console: print(found),
        lambda path: profile.plot(found, path),
    )
    if options.flame:
        print(f"flame graph saved to {options.flame}", file=sys.stderr)
    return 0


def _tune(options: argparse.Namespace) -> int:
    from shoal.cli import report, tune, work
    from shoal.errors import ShoalError
    from shoal.tuning.search import Search

    output = report.Output(options)
    if options.save:
        report.check_file(options.save)
    _look_here(options.env)
    try:
        search = Search(
            work.env_fn(options.env), options.num_envs, batch_size=options.batch_size, backends=options.backends,
            policy_latency=options.policy_ms / 1000, max_memory=options.max_memory, isolate=options.isolate,
            seconds=options.seconds,
        )  # fmt: skip
        with progress(options.seconds, timed=True) as notify:
            interrupted = _ran_until_interrupted(search, notify)
        result = search.result()
    except (ShoalError, ValueError) as error:
        raise UsageError(report.first_line(str(error))) from error
    if options.save:
        result.plan.save(options.save)
    output.write(
        lambda: tune.as_dict(result, options.env),
        lambda console: tune.show(result, options.env, options.save, console),
        result.plot,
    )
    if interrupted:
        raise KeyboardInterrupt
    return 0


def _ran_until_interrupted(search: Search, notify: Callable[[str], None]) -> bool:
    """Search, and return whether Ctrl-C ended it; then the trials so far are the result."""
    try:
        search.run(notify)
    except KeyboardInterrupt:
        if not search.tried:
            raise
        return True
    return False


def _estimate(options: argparse.Namespace) -> int:
    from shoal.cli import estimate, report

    output = report.Output(options)
    if options.env is None and options.obs_bytes is None:
        raise UsageError("--env-ms says nothing about bytes: give --obs-bytes too, or --env to have both measured")
    _look_here(options.env or "")
    facts = estimate.facts(options.env, options.env_ms, options.spread, options.obs_bytes, options.action_bytes)
    advice = estimate.estimate(
        facts, envs=options.envs, nodes=options.nodes, cores=options.cores, latency=options.latency_ms / 1e3,
        bandwidth=options.gbit * 1e9 / estimate.BITS, policy=options.policy_ms / 1e3,
        policy_lane=options.policy_us / 1e6,
        batch_size=options.envs if options.batch_size == "all" else options.batch_size,
    )  # fmt: skip
    output.write(
        lambda: estimate.as_dict(advice, facts),
        lambda console: estimate.show(advice, facts, console),
    )
    return 0


def _record(options: argparse.Namespace) -> int:
    from shoal.cli import record

    _look_here(options.env, options.policy or "")
    take = record.Take(
        options.env, options.out, options.num_envs, options.steps, options.episodes, options.seed, options.fps,
        options.width, options.policy, options.backend,
    )  # fmt: skip
    with progress(take.goal) as notify:
        recorded = record.record(take, notify)
    print(recorded)
    if recorded.interrupted:
        raise KeyboardInterrupt
    return 0


def _top(options: argparse.Namespace) -> int:
    from shoal.observe import top

    return top.top(options.pid, options.interval, options.once, options.json, Console())


def _serve(options: argparse.Namespace) -> int:
    from shoal.errors import StartError
    from shoal.remote.mpi.serve import check_serving, serve

    try:
        check_serving()
    except StartError as error:
        raise UsageError(str(error)) from error
    serve(leave=False)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from shoal.cli import doctor, report

    output = report.Output(options)
    known = doctor.facts()
    output.write(lambda: known, lambda console: doctor.show(known, console))
    return 0


def _look_here(*names: str) -> None:
    """Let Python find modules in the current folder, as the user expects; an installed command does not do so."""
    if any(":" in name for name in names) and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _check_batch_size(batch_size: int | None, num_envs: int) -> None:
    if batch_size and batch_size > num_envs:
        raise UsageError(f"a batch of {batch_size} is more than {num_envs} envs")


COMMANDS = {
    "bench": Command("measure Shoal against plain loops and other libraries", arguments.BENCH, _bench),
    "profile": Command("say where the time of a pool goes, and what would help", arguments.PROFILE, _profile),
    "tune": Command("find the plan by which an env runs fastest here", arguments.TUNE, _tune),
    "estimate": Command(
        "estimate how fast envs on many machines will be, and say how to run them", arguments.ESTIMATE, _estimate
    ),
    "record": Command("make a video of a batch of envs, side by side", arguments.RECORD, _record),
    "top": Command("show what the running pools are doing", arguments.TOP, _top),
    "serve": Command(
        "under mpiexec, step envs for a script that is rank 0: mpiexec -n 1 python train.py : -n 2 shoal serve",
        arguments.SERVE,
        _serve,
    ),
    "doctor": Command("say what this machine and this installation offer", arguments.DOCTOR, _doctor),
}

if __name__ == "__main__":
    sys.exit(main())
