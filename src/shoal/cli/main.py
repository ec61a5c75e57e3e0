"""The command `shoal`: reads the command line and runs the command that it names."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from rich.console import Console

import shoal
from shoal.cli.arguments import COMMANDS, add_options
from shoal.support.usage import UsageError

BAD_USAGE = 2
INTERRUPTED = 130
RENAMED = {"plan": "estimate"}  # old names, which work for one more release


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say one sentence, and leave the whole usage to --help."""
        self.exit(BAD_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = _parser().parse_args(words)
    name = RENAMED.get(options.command, options.command)
    if name != options.command:
        print(f"shoal {options.command} is called shoal {name} now: use that name", file=sys.stderr)
    try:
        # Imported late, so that --help stays quick.
        run = HERE.get(name) or importlib.import_module(f"shoal.cli.{name}").run
        return int(run(options))
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
    for name, (text, options) in COMMANDS.items():
        add_options(commands.add_parser(name, help=text, description=text), options)
    for old, new in RENAMED.items():
        add_options(commands.add_parser(old, description=f"The old name of shoal {new}."), COMMANDS[new][1])
    return parser


def _top(options: argparse.Namespace) -> int:
    if sys.platform == "win32":
        raise UsageError("pools of other processes are found by /proc, which Windows does not have")
    from shoal.observe import top

    if options.html:
        from shoal.cli.report import check_file

        check_file(options.html, "the picture is HTML")
        return top.save(options.pid, options.interval, options.html)
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


HERE = {"top": _top, "serve": _serve}

if __name__ == "__main__":
    sys.exit(main())
