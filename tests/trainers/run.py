"""Climb the trainers' ladder: make an environment for each library, run its script, and write its page.

The page is `docs/explanation/trainers.md`.

`python tests/trainers/run.py [sb3 tianshou ...]` runs the named libraries, or all of them. Each has its script
`with_NAME.py` and its pins `requirements/NAME.txt`; environments are kept in `.venv-trainers/NAME`. What a list of pins
cannot say, `requirements/NAME_install.py` does. Some tests of this project need one of these libraries: they are run
first, in the same environment, and `--tests` trains nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENVIRONMENTS = ROOT / ".venv-trainers"
RECORD, PAGE = ROOT / "docs/explanation/trainers.json", ROOT / "docs/explanation/trainers.md"

# The tests that need a library which only its trainer's environment has.
TESTS = {
    "pufferlib": [
        "tests/dialects/test_puffer.py",
        "tests/dialects/test_puffer_theirs.py",
        "tests/dialects/test_puffer_trains.py",
        "tests/cli/test_contenders.py",
    ],
    "sample_factory": ["tests/dialects/test_sample_factory.py", "tests/examples/test_sample_factory.py"],
    "skrl": ["tests/dialects/test_skrl.py"],
}

INTRODUCTION = """# Trainers over Shoal

Each library's own trainer, over the vector env that is fastest for it and over Shoal's in its place, with the same
seeds, in turns. "Same returns" means that every episode of every round had the same return, to the last bit; where a
library is not deterministic, the mean returns stand there. Speed is that of the whole training, policy and updates
included: median of the rounds, ours over theirs.

`make test-trainers` made this table.

| library | trainer | env | over theirs | over ours | episodes | returns | speed |
|---|---|---|---|---|---|---|---|
"""


def python_of(name: str) -> Path:
    """Return the Python of a library's environment; makes the environment where it is missing or its pins changed."""
    folder = ENVIRONMENTS / name
    python, ready = folder / "bin" / "python", folder / ".ready"
    pins, more = HERE / "requirements" / f"{name}.txt", HERE / "requirements" / f"{name}_install.py"
    sources = [
        pins,
        *([more] if more.exists() else []),
        ROOT / "pyproject.toml",
        ROOT / "setup.py",
        *(ROOT / "src" / "shoal" / "native").glob("*.[ch]"),
    ]
    if ready.exists() and all(source.stat().st_mtime <= ready.stat().st_mtime for source in sources):
        return python
    print(f"{name}: installing", flush=True)
    if not python.exists():
        venv.create(folder, with_pip=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # The trainer's pins come first: they decide which Gymnasium and torch there is. Shoal takes what it finds.
    subprocess.run([*install, "-r", pins], check=True)
    if more.exists():
        subprocess.run([python, more], check=True)
    subprocess.run([*install, "--editable", f"{ROOT}[test]" if name in TESTS else str(ROOT)], check=True)
    ready.touch()
    return python


def test(name: str) -> bool:
    """Run the tests that need a library; return whether they have passed. Those that were skipped are shown."""
    try:
        python = python_of(name)
    except subprocess.CalledProcessError as error:
        print(f"{name}: FAILED to install: {error}", flush=True)
        return False
    command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-rs", *TESTS[name]]
    passed = subprocess.run(command, cwd=ROOT).returncode == 0
    print(f"{name}: {'tests passed' if passed else 'FAILED its tests'}", flush=True)
    return passed


def run(name: str, rounds: int) -> dict[str, Any] | None:
    """Run a library's script; return what it found, or None where it found nothing."""
    try:
        python = python_of(name)
    except subprocess.CalledProcessError as error:
        print(f"{name}: FAILED to install: {error}", flush=True)
        return None
    found = ENVIRONMENTS / f"{name}.json"
    found.unlink(missing_ok=True)
    script = [python, HERE / f"with_{name}.py", "--rounds", str(rounds), "--json", found]
    began = time.monotonic()
    code = subprocess.run(script, env=os.environ | {"PYTHONUNBUFFERED": "1"}).returncode
    print(f"{name}: {'ok' if code == 0 else 'FAILED'}, {time.monotonic() - began:.0f} s", flush=True)
    return json.loads(found.read_text()) | {"failed": code != 0} if found.exists() else None


def page(record: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    rows, notes = [], []
    for _, entry in sorted(record.items()):
        for cell in entry["cells"]:
            means = [sum(found) / max(1, len(found)) for found in cell["returns"].values()]
            returns = "same" if cell["same"] else "**differ**"
            if not cell["exact"]:
                returns = f"means {means[0]:.1f}, {means[1]:.1f}"
            row = [entry["library"], cell["trainer"], cell["env"], cell["theirs"], f"`{cell['ours']}`"]
            rows.append(f"| {' | '.join(row)} | {cell['episodes']} | {returns} | {cell['ratio']:.2f} |")
        versions = ", ".join(f"{package} {version}" for package, version in entry["versions"].items())
        notes.append(f"- {entry['library']}: {versions}; {entry['date']}, {entry['machine']}")
    return INTRODUCTION + "\n".join(rows) + "\n\nVersions, days and machines:\n\n" + "\n".join(notes) + "\n"


def main() -> int:
    """Run the named libraries, or all; return how many failed."""
    everyone = sorted(script.stem.removeprefix("with_") for script in HERE.glob("with_*.py"))
    parser = argparse.ArgumentParser(description="Train the trainers of other libraries over Shoal.")
    parser.add_argument("names", nargs="*", default=everyone, metavar="NAME", help=f"some of {', '.join(everyone)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tests", action="store_true", help="run the tests that need a library, and train nothing")
    parser.add_argument("--install", action="store_true", help="make the environments, and train nothing")
    options = parser.parse_args()
    unknown = set(options.names) - set(everyone)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(everyone)}")
    if options.tests and not set(options.names) & set(TESTS):
        parser.error(f"there are tests for {', '.join(TESTS)} only")
    if options.install:
        for name in options.names:
            python_of(name)
        return 0
    failed = [f"the tests of {name}" for name in options.names if name in TESTS and not test(name)]
    failed += [] if options.tests else train(options.names, options.rounds)
    print("failed: " + ", ".join(failed) if failed else "all passed" if options.tests else "all trained")
    return len(failed)


def train(names: list[str], rounds: int) -> list[str]:
    """Train with each library, and write down what was found; return those that failed."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    failed = []
    for name in names:
        found = run(name, rounds)
        if found is None or found.pop("failed"):
            failed.append(name)
        if found is None:
            continue
        for cell in found["cells"]:
            # The record keeps what the table shows; returns of all episodes would fill megabytes.
            cell["returns"] = {who: [sum(each) / max(1, len(each))] for who, each in cell["returns"].items()}
        today = datetime.date.today().isoformat()
        machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
        record[name] = found | {"date": today, "machine": machine}
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        PAGE.write_text(page(record))
    return failed


if __name__ == "__main__":
    sys.exit(main())
