"""Loads thousands of damaged files: each gives a DataError or something sound, and never takes the process with it.

    .venv/bin/python tests/fuzz/fuzz.py --count 10000 --seed 0 restore normalize plan

Files are loaded in a child process, so that a crash is seen. A file is made anew from its number and the seed alone:
`--only 1234` loads one of them in this very process. Files that did harm are kept in the folder `fuzz-failures`. Exit
status: 0, or 1 if any did.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

SECONDS = 120  # for one file, which takes some milliseconds, on a machine that may be busy
MEMORY, ADDRESSES = 512 << 20, 16 << 30  # how much more memory one file may take, and how many addresses in all
KEPT = Path("fuzz-failures")


def make_file(target: str, seed: int, index: int, good: list[Path], path: Path) -> str:
    """Write the file with this number, and return the name of the one that it was made from."""
    from fuzz.mutations import mutate

    rng = random.Random(f"{target} {seed} {index}")
    source = rng.choice(good)
    path.write_bytes(mutate(source.read_bytes(), rng))
    return source.name


def load_files(target: str, seed: int, start: int, stop: int, folder: Path) -> None:
    """The child: load files one by one, and say before each of them which it is, and after it what became of it."""
    from fuzz.targets import TARGETS
    from shoal.errors import DataError

    warnings.simplefilter("ignore")
    make, use = TARGETS[target]
    good = make(folder)
    for path in good:
        use(path, path.name)  # which must not raise
    (folder / "names").write_text(" ".join(path.name for path in good))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    current = folder / "current"
    for index in range(start, stop):
        kind = make_file(target, seed, index, good, current)
        print(f"at {index} {kind}", flush=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            outcome = use(current, kind)
        except DataError:
            outcome = "refused"
        except BaseException as error:
            traceback.print_exc()
            outcome = f"HARM {type(error).__name__}: {str(error)[:200]!r}"
        faulthandler.cancel_dump_traceback_later()
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        if more > MEMORY:
            outcome = f"HARM it took {more >> 20} MiB"
        print(f"so {outcome}", flush=True)


def fuzz(
    target: str, seed: int, count: int, kept: Path, notify: Callable[[str], object] = str
) -> tuple[Counter[str], list[str]]:
    """Load `count` files. Returns how often each thing happened, and a line for each file that did harm."""
    outcomes: Counter[str] = Counter()
    harm: list[str] = []
    start = 0
    while start < count:
        with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "stderr", "w+b") as errors:
            command = [sys.executable, str(HERE / "fuzz.py"), target, "--child", folder]
            command += ["--seed", str(seed), "--start", str(start), "--count", str(count)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child:
                assert child.stdout is not None
                done = True
                for line in child.stdout:
                    word, _, rest = line.strip().partition(" ")
                    if word == "at":
                        number, kind = rest.split()
                        start, done = int(number) + 1, False
                        notify(target)
                    elif word == "so":
                        done = True
                        outcomes[rest.partition(":")[0]] += 1
                        if rest.startswith("HARM"):
                            harm.append(_keep(kept, folder, target, seed, start - 1, kind, rest))
            if not done:
                harm.append(
                    _keep(kept, folder, target, seed, start - 1, kind, f"HARM the process ended: {child.returncode}")
                )
                outcomes["HARM the process ended"] += 1
            elif child.returncode:
                errors.seek(0)
                raise RuntimeError(f"the good files of {target} are not loaded:\n{errors.read().decode()[-4000:]}")
    return outcomes, harm


def _keep(kept: Path, folder: str, target: str, seed: int, index: int, kind: str, what: str) -> str:
    kept.mkdir(exist_ok=True)
    path = kept / f"{target}-{seed}-{index}.{kind}"
    # The child goes on meanwhile, so the file is made anew; all good files are still there.
    good = [Path(folder) / name for name in (Path(folder) / "names").read_text().split()]
    make_file(target, seed, index, good, path)
    with open(Path(folder) / "stderr", "rb") as errors:
        path.with_suffix(".txt").write_bytes(f"{what}\n\n".encode() + errors.read()[-8000:])
    return f"{path}: {what.removeprefix('HARM ')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=["restore", "normalize", "plan"])
    parser.add_argument("--count", type=int, default=int(os.environ.get("SHOAL_FUZZ_COUNT", "10000")))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SHOAL_FUZZ_SEED", "0")))
    parser.add_argument("--only", type=int, help="load the file with this number, in this process")
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child or options.only is not None:
        only = options.only is not None
        start, stop = (options.only, options.only + 1) if only else (options.start, options.count)
        with contextlib.ExitStack() as stack:
            folder = options.child or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            load_files(options.targets[0], options.seed, start, stop, folder)
        return 0
    from shoal.observe.progress import progress

    all_harm = []
    shutil.rmtree(KEPT, ignore_errors=True)
    with progress(options.count * len(options.targets)) as notify:
        for target in options.targets:
            outcomes, harm = fuzz(target, options.seed, options.count, KEPT, notify)
            all_harm += harm
            print(f"{target}, seed {options.seed}: " + ", ".join(f"{n} {what}" for what, n in outcomes.most_common()))
    print("\n".join(all_harm) or "no file did harm")
    return 1 if all_harm else 0


if __name__ == "__main__":
    sys.exit(main())
