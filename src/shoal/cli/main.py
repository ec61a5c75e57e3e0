"""The command `shoal`: reads the command line and runs the command that it names."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from rich.console import Console

import shoal
from shoal.cli import arguments
from shoal.cli.arguments import Option
from shoal.observe.progress import progress
from shoal.support.usage import UsageError

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
    parser.add_argument("--version", action="version", version=f"shoal {shoal.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        arguments.add_options(commands.add_parser(name, help=command.help, description=command.help), command.options)
    for old, new in RENAMED.items():
        arguments.add_options(
            commands.add_parser(old, description=f"The old name of shoal {new}."), COMMANDS[new].options
        )
    return parser


def _module(name: str) -> Callable[[argparse.Namespace], int]:
    """Return a function that runs the command of a module. It imports the module late, so that --help stays quick."""

    def run(options: argparse.Namespace) -> int:
        return int(importlib.import_module(f"shoal.cli.{name}").run(options))

    return run


def _record(options: argparse.Namespace) -> int:
    from shoal.cli import record
    from shoal.cli.work import look_here

    look_here(options.env, options.policy or "")
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


COMMANDS = {
    "bench": Command("measure Shoal against plain loops and other libraries", arguments.BENCH, _module("bench")),
    "profile": Command("say where the time of a pool goes, and what would help", arguments.PROFILE, _module("profile")),
    "tune": Command("find the plan by which an env runs fastest here", arguments.TUNE, _module("tune")),
    "estimate": Command(
        "estimate how fast envs on many machines will be, and say how to run them",
        arguments.ESTIMATE,
        _module("estimate"),
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
