"""What Shoal and its peers do under each fault: the harness that runs the matrix of `fault_rows.py`, and its table.

Every cell is a fresh process in a session of its own, watched from outside under deadlines. All that the table says was
measured: what was raised, what was printed, how long it took, and what was left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import fault_rows
from fault_rows import BAD, LIBRARIES, ROWS, Row

HERE = Path(__file__).resolve().parent
TOKEN = "SHOAL_FAULT_TOKEN"
LIMITS = {"start": 60.0, "use": 5.0, "exit": 5.0}  # seconds; those of the fault and of close are an option
SIGNAL_DELAY = 0.3  # seconds of steps before a signal comes
SCRIPT = "import sys\n\nfrom fault_rows import guest\n\nguest(*sys.argv[1:])\n"  # no guard: that is its point
NAMES_ENV = re.compile(rf"\b(?:env|environment|worker)s?(?:<\w+>)?[ \-:#\[(]*(?:\d+ to )?{BAD}\b", re.IGNORECASE)
# From good to bad: of several runs the worst is shown.
KINDS = ("not available", "fine", "reported", "exits", "error", "wrong", "hangs", "broken")

Record = dict[str, Any]


class Stopped(Exception):
    """The harness itself was told to end."""


# ---- processes -----------------------------------------------------------------------------------------------


def bearers(token: str) -> dict[int, str]:
    """Return all living processes that have the token in their environment, with their command lines."""
    found = {}
    mark = f"{TOKEN}={token}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
                if not dead and mark in (entry / "environ").read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = words.strip()
    return found


def shared_names() -> set[str]:
    """Return what lies in shared memory by name."""
    with contextlib.suppress(OSError):
        return set(os.listdir("/dev/shm"))
    return set()


def held_elsewhere(name: str) -> bool:
    """Tell whether a living process has it mapped; asked when none of the cell's own is left."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if f"/dev/shm/{name}" in maps.read_text():
                return True
    return False


# ---- one guest -----------------------------------------------------------------------------------------------


class Guest:
    """One process that plays one row with one library, and everything that it starts."""

    def __init__(self, library: str, row: str, deadline: float, scratch: Path, skip: list[str]) -> None:
        self.row: Row = ROWS[row]
        self.limits = {**LIMITS, "fault": max(deadline, self.row.deadline), "close": deadline}
        self.token = uuid.uuid4().hex
        self.shared_before = shared_names()
        self.events: list[Record] = []
        self.phase, self.began = "start", time.monotonic()
        self.stuck = ""  # the phase that took too long
        self.ended = 0.0
        self.said_after: float | None = None  # seconds from the fault until something was printed about it
        self._heard = 0  # how much of stderr has been seen
        self._before = 0  # how much of it was there before the fault
        self._scratch, self._out, self._err = scratch, scratch / "stdout", scratch / "stderr"
        if self.row.script:
            (scratch / "script.py").write_text(SCRIPT)
            command = [str(scratch / "script.py"), library, row, *skip]
        else:
            command = [str(HERE / "faults.py"), "--guest", library, row, *skip]
        orders = {
            TOKEN: self.token,
            fault_rows.SCRATCH: str(scratch),
            fault_rows.DEED: self.row.deed,
            fault_rows.IMPORTS: LIBRARIES[library].module,
            "TMPDIR": str(scratch),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        }
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **orders},
            )

    def watch(self, stop: threading.Event) -> None:
        """Wait until it ends or one of its phases takes too long."""
        sent = self.row.sends is None
        while self.process.poll() is None:
            self._listen()
            now = time.monotonic()
            if stop.is_set():
                raise Stopped
            if not sent and self.phase == "fault" and now > self.began + SIGNAL_DELAY:
                sent, self.began = True, now
                (os.killpg if self.row.to_group else os.kill)(self.process.pid, self.row.sends)
            if now > self._limit():
                self.stuck = self.phase
                return
            time.sleep(0.01)
        self.ended = time.monotonic()
        self._listen()

    def _limit(self) -> float:
        """Return when the present phase has taken too long."""
        if self.phase == "fault" and self.row.in_start:
            fired = self.fired()
            return self.began + LIMITS["start"] if fired is None else fired + self.limits["fault"]
        return self.began + self.limits.get(self.phase, 5.0)

    def fired(self) -> float | None:
        """Return when a worker met the fault."""
        with contextlib.suppress(OSError, ValueError):
            return float((self._scratch / "fired").read_text())
        return None

    def _listen(self) -> None:
        """Take in what it has printed since the last time."""
        lines = self._out.read_text(errors="replace").split("\n")[:-1]
        for line in lines[len(self.events) :]:
            event = self._parse(line)
            self.events.append(event)
            if "phase" in event:
                self.phase, self.began = event["phase"], event["t"]
                if self.phase == "fault":
                    self._before = self._heard
            elif "done" in event:
                self.phase, self.began = f"after {event['done']}", event["t"]
        size = self._err.stat().st_size
        if size > self._heard and self.said_after is None and self.phase in ("fault", "after fault"):
            since = self.fired() if self.row.in_start else None
            self.said_after = max(0.0, time.monotonic() - (since or self.began))
        self._heard = size

    def _parse(self, line: str) -> Record:
        """Return the event of a line; a line that is somebody else's is an empty one."""
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("pid") == self.process.pid:
                return event
        return {}

    def left_behind(self, stop: threading.Event) -> Record:
        """Wait for all that it started to leave as well, and return what did not."""
        until = self.ended + self.row.linger
        while (left := bearers(self.token)) and time.monotonic() < until and not stop.is_set():
            time.sleep(0.05)
        gone = time.monotonic() - self.ended
        names = shared_names() - self.shared_before
        if names:
            time.sleep(max(0.0, until - time.monotonic()))
            # What another process on this machine made meanwhile is its own.
            names = {name for name in names & shared_names() if not held_elsewhere(name)}
        return {
            "processes": sorted(left.values()),
            "shared_memory": sorted(names),
            "gone_after": None if left else gone,
        }

    def end(self) -> None:
        """Kill whatever is left, by id."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        until = time.monotonic() + 5.0
        while (left := bearers(self.token)) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def log(self) -> str:
        """All that was printed on stderr since the fault."""
        return self._err.read_bytes()[self._before :].decode(errors="replace")


def run_guest(library: str, row: str, deadline: float, stop: threading.Event, *skip: str) -> Record:
    """Run one guest to its end and return what was seen, not yet judged."""
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        guest = Guest(library, row, deadline, Path(folder), list(skip))
        try:
            guest.watch(stop)
            left = None if guest.stuck else guest.left_behind(stop)
        finally:
            guest.end()
        return {
            "events": guest.events,
            "stuck": guest.stuck,
            "last": guest.phase,
            "seconds": (guest.ended or time.monotonic()) - guest.began,
            "exit_code": None if guest.stuck else guest.process.returncode,
            "left": left,
            "fired": guest.fired() if guest.row.in_start else None,
            "said_after": guest.said_after,
            "log": guest.log(),
        }


# ---- what it means -------------------------------------------------------------------------------------------


def run_cell(library: str, row: str, deadline: float, stop: threading.Event) -> Record:
    """Measure one cell once."""
    seen = run_guest(library, row, deadline, stop)
    record = judge(ROWS[row], seen)
    if record["use"] not in ("", "yes"):
        # That attempt may have made things worse or better: whether it could have been closed at once is asked anew.
        again = judge(ROWS[row], run_guest(library, row, deadline, stop, "use"))
        record |= {key: again[key] for key in ("close", "close_seconds", "left", "exit_code", "leaves")}
    return {"library": library, "row": row, **record}


def judge(row: Row, seen: Record) -> Record:
    """Say in one record what the events of a guest mean."""
    done = {event["done"]: event for event in seen["events"] if "done" in event}
    unavailable = next((event["unavailable"] for event in seen["events"] if "unavailable" in event), "")
    fault = done.get("fault", {})
    if fault and seen["fired"]:
        fault["seconds"] = max(0.0, fault["t"] - seen["fired"])
    record: Record = {
        "kind": _kind(row, seen, fault, unavailable),
        "seconds": fault.get("seconds", seen["seconds"]),
        "unavailable": unavailable,
        "raised": fault.get("raised", ""),
        "message": fault.get("message", ""),
        "told": fault.get("told", []),
        "obs": fault.get("obs"),
        "shape": fault.get("shape", ""),
        "names": _names(row, fault.get("message", ""), seen["log"]),
        "said_after": seen["said_after"],
        "use": _ending(seen, done, "use"),
        "close": _ending(seen, done, "close"),
        "close_seconds": done.get("close", {}).get("seconds"),
        "leaves": "hangs" if seen["stuck"] == "exit" else "yes",
        "exit_code": seen["exit_code"],
        "tracebacks": seen["log"].count("Traceback (most recent call last)"),
        "left": seen["left"],
        "log": seen["log"][-4000:],
    }
    if record["kind"] == "reported" and not record["told"]:
        record["told"] = ["printed"]
    return record


def _kind(row: Row, seen: Record, fault: Record, unavailable: str) -> str:
    if unavailable:
        return "not available"
    if not fault:
        if seen["stuck"] == "fault":
            return "hangs"
        return "exits" if seen["last"] == "fault" else "broken"
    if "raised" in fault:
        return "error"
    if fault.get("told"):
        return "reported"
    if row.plain:
        return "fine"
    return "wrong" if seen["said_after"] is None else "reported"


def _names(row: Row, message: str, log: str) -> dict[str, str]:
    """Where env and cause are named: in the exception's own words, only in what was printed, or nowhere."""
    wanted = {"env": NAMES_ENV if row.blames else None, "cause": re.compile(row.cause)} if row.cause else {}
    found = {}
    for what, pattern in wanted.items():
        if pattern is not None:
            found[what] = "message" if pattern.search(message) else "log" if pattern.search(log) else "nowhere"
    return found


def _ending(seen: Record, done: Record, phase: str) -> str:
    """Return "yes", "hangs", the type of what was raised, or "" where it was not tried."""
    if seen["stuck"] == phase:
        return "hangs"
    return done[phase].get("raised", "yes") if phase in done else ""


def worst(records: list[Record]) -> Record:
    """Return the record that is shown."""
    return max(records, key=lambda one: (KINDS.index(one["kind"]), _hangs(one), _left_count(one), one["seconds"]))


def _hangs(record: Record) -> int:
    return [record[part] for part in ("use", "close", "leaves")].count("hangs")


def _left_count(record: Record) -> int:
    left = record["left"] or {}
    return len(left.get("processes", ())) + len(left.get("shared_memory", ()))


# ---- how it is said ------------------------------------------------------------------------------------------


def cell_text(record: Record) -> str:
    """Return a cell of the table."""
    row = ROWS[record["row"]]
    if record["kind"] == "not available":
        return record["unavailable"]
    if record["kind"] == "broken":
        return "(the harness could not start it)"
    parts = [_head(row, record), *_tail(row, record)]
    return "; ".join(part for part in parts if part)


def _head(row: Row, record: Record) -> str:
    seconds = f"{record['seconds']:.1f} s"
    if record["kind"] == "error":
        return f"`{record['raised']}`{_naming(record)}, {seconds}"
    if record["kind"] == "hangs":
        return f"**hangs**{_last_words(record)}"
    if record["kind"] == "reported":
        return f"goes on, reported ({', '.join(record['told'])}), {seconds}"
    if record["kind"] == "wrong":
        return "**goes on, silently wrong**" + ("" if record["obs"] else f" ({record['shape']})")
    if record["kind"] == "fine":
        return row.plain.format(**record)
    tracebacks = f", {_count(record['tracebacks'], 'traceback')}" if row.to_group else ""
    return f"exits in {seconds}{tracebacks}"


def _naming(record: Record) -> str:
    by_place: dict[str, list[str]] = {"message": [], "log": [], "nowhere": []}
    for what, place in record["names"].items():
        by_place[place].append(what)
    said = f" naming {' and '.join(by_place['message'])}" if by_place["message"] else ""
    said += f", {' and '.join(by_place['log'])} in the log" if by_place["log"] else ""
    return said + "".join(f", no {what}" for what in by_place["nowhere"])


def _last_words(record: Record) -> str:
    """What can be read while it hangs."""
    named = [what for what, place in record["names"].items() if place == "log"]
    if not named:
        return ""
    late = f" after {record['said_after']:.0f} s" if (record["said_after"] or 0.0) > 1 else ""
    return f", log names {' and '.join(named)}{late}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's' if not what.endswith('s') else 'es'}"


def _tail(row: Row, record: Record) -> Iterator[str]:
    """What came after."""
    yield _afterwards(record)
    if record["leaves"] == "hangs":
        yield "**script does not end**"
    left = record["left"] or {"processes": [], "shared_memory": [], "gone_after": None}
    children = sum(command.startswith("sleep ") for command in left["processes"])
    if children:
        yield "**child left**"
    if others := len(left["processes"]) - children:
        yield f"**{_count(others, 'process')} left**"
    if left["shared_memory"]:
        yield f"**{_count(len(left['shared_memory']), 'name')} left in /dev/shm**"
    if row.sends in (signal.SIGTERM, signal.SIGKILL) and left["gone_after"] is not None:
        yield f"workers gone {left['gone_after']:.1f} s later"


def _afterwards(record: Record) -> str:
    """Whether it could be used and closed."""
    use, close = record["use"], record["close"]
    known = {"": "", "yes": "goes on", "hangs": "then **hangs**", "WrongData": "then **wrong data**"}
    words = [known[use]] if known.get(use) else []
    if close == "hangs":
        words.append("close **hangs**")
    elif close not in ("", "yes"):
        words.append(f"close raises `{close}`")
    elif close:
        late = f" in {record['close_seconds']:.1f} s" if record["close_seconds"] > 1 else ""
        if use not in known:
            return f"can only be closed{late}"
        if late or (not use and record["kind"] == "error"):
            words.append(f"closes{late}")
    return "; ".join(["not usable", *words] if use not in known else words)


LEGEND = f"""\
Each cell was measured in a process of its own: {fault_rows.NUM_ENVS} envs, env {BAD} misbehaves. "naming env and
cause": the exception's text says which env it was and what happened; "in the log": only something printed says so.
"goes on": afterwards a reset and two steps gave the right data; "can only be closed": they raised, and `close` worked.
"left": still there 3 s (after a signal to the parent: 5 s) after the script had ended.
"""


def markdown(shown: dict[tuple[str, str], Record], rows: list[str], libraries: list[str], about: str) -> str:
    """Return the table as a document."""
    heads = [LIBRARIES[library].name for library in libraries]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for row in rows:
        cells = [cell_text(shown[row, library]).replace("|", "\\|") for library in libraries]
        lines.append(f"| {ROWS[row].title} | {' | '.join(cells)} |")
    return f"# faults\n\n{LEGEND}\n{about}\n\n" + "\n".join(lines) + "\n"


def terminal(shown: dict[tuple[str, str], Record], rows: list[str], libraries: list[str]) -> Table:
    """Return the table for the terminal."""
    grid = Table(show_lines=True)
    for head in ("", *(LIBRARIES[library].name for library in libraries)):
        grid.add_column(head, overflow="fold")
    for row in rows:
        texts = [ROWS[row].title, *(cell_text(shown[row, library]) for library in libraries)]
        grid.add_row(*(text.replace("`", "").replace("**", "").replace("[", "\\[") for text in texts))
    return grid


# ---- all of it -----------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> list[Record]:
    """Run all cells, `--jobs` at a time, under a progress bar."""
    cells = [(library, row) for row in options.rows for library in options.libraries] * options.repeats
    stop = threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("starting", total=len(cells))

        def run(library: str, row: str) -> Record:
            if stop.is_set():
                raise Stopped
            bar.update(task, description=f"{LIBRARIES[library].name}: {row}")
            began = time.monotonic()
            record = run_cell(library, row, options.deadline, stop)
            bar.advance(task)
            return {**record, "took": time.monotonic() - began}

        with ThreadPoolExecutor(options.jobs) as pool:
            futures: list[Future[Record]] = [pool.submit(run, *cell) for cell in cells]
            try:
                wait(futures, return_when="FIRST_EXCEPTION")
            finally:
                # Whatever ended the wait, an interrupt too: the guests under way are ended before we go.
                stop.set()
    errors = [error for future in futures if (error := future.exception()) and not isinstance(error, Stopped)]
    if errors:
        raise errors[0]
    records = [future.result() for future in futures]
    for record in records:
        if record["left"]:
            # What is gone by now was of somebody who still lived then: of the next cell, or of no cell at all.
            record["left"]["shared_memory"] = sorted(shared_names() & set(record["left"]["shared_memory"]))
    return records


def versions(libraries: list[str]) -> dict[str, str]:
    """Return what is installed."""
    found = {}
    for package in dict.fromkeys(LIBRARIES[library].package for library in libraries):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="What Shoal and its peers do under each fault.")
    parser.add_argument(
        "--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help=", ".join(ROWS)
    )
    parser.add_argument(
        "--libraries", nargs="+", choices=list(LIBRARIES), default=list(LIBRARIES), metavar="NAME",
        help=", ".join(LIBRARIES),
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=1, help="runs of each cell, of which the worst is shown")
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds until it hangs (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time (%(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results (%(default)s)")
    parser.add_argument("--guest", nargs="+", metavar="WORD", help=argparse.SUPPRESS)  # what a cell's process is told
    return parser.parse_args()


def main() -> int:
    """Run what the command line asks for."""
    options = parse()
    if options.guest:
        fault_rows.guest(*options.guest)
        return 0
    # Ended politely, we tidy up as for Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        records = measure(options)
    except KeyboardInterrupt:
        print("faults: interrupted, nothing saved", file=sys.stderr)
        return 130
    by_cell: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        by_cell.setdefault((record["row"], record["library"]), []).append(record)
    shown = {cell: worst(runs) for cell, runs in by_cell.items()}
    save(options, shown, records)
    Console().print(terminal(shown, options.rows, options.libraries))
    return 0


def save(options: argparse.Namespace, shown: dict[tuple[str, str], Record], records: list[Record]) -> None:
    """Write faults.json and faults.md."""
    # Only now: a guest imports this module too, and a peer's process shall not have Shoal in it.
    from shoal.cli import doctor

    found = versions(options.libraries)
    about = f"Versions: {', '.join(f'{name} {version}' for name, version in found.items())}."
    cells = [{**record, "text": cell_text(record)} for record in shown.values()]
    document = {"machine": doctor.facts(), "versions": found, "deadline": options.deadline, "cells": cells,
                "runs": records}  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "faults.json").write_text(json.dumps(document, indent=2) + "\n")
    (options.out / "faults.md").write_text(markdown(shown, options.rows, options.libraries, about))
    Console(stderr=True).print(f"saved {options.out / 'faults'}.json, .md")


if __name__ == "__main__":
    sys.exit(main())
