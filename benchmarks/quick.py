"""The figures and plots of docs/explanation/benchmarks.md, peers included, in about ten minutes.

Runs the other scripts in their short forms, one after the other, and writes one JSON with the date and the machine,
and a plot for each part, to docs/plots. `python tools/fill_performance.py` then puts the tables into the page.

python benchmarks/quick.py --only cheetah trainers --out /tmp/plots
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import plots
from shoal import native
from shoal.cli import doctor, report

HERE = Path(__file__).parent
PLOTS = HERE.parent / "docs" / "plots"
SCHEMA = 1
PATIENCE = 600.0  # seconds for one script, however busy the machine is
PACKAGES = (
    "gymnasium", "numpy", "torch", "stable-baselines3", "pufferlib-core", "envpool", "tianshou", "mujoco",
)  # fmt: skip
Row = dict[str, Any]


class Part(NamedTuple):
    """One section of the page: a script, how it is called, and how its JSON becomes rows."""

    name: str
    title: str
    unit: str
    command: tuple[str, ...]
    rows: Callable[[dict[str, Any]], list[Row]]
    limit: float | None  # seconds for the rounds of one comparison in it; None where the script takes no limit
    writes: str = "--out"  # the option that says where its JSON goes: into a folder, or to a file by "--json"
    cores: int = 1  # on fewer there is nothing to see


def row(name: str, figures: Sequence[float], role: str, group: str = "", of_limit: float | None = None) -> Row:
    """Return one bar; `figures` are the lower quartile, the median and the upper one."""
    low, median, high = figures
    return {
        "group": group,
        "name": name,
        "role": role,
        "low": low,
        "median": median,
        "high": high,
        "of_limit": of_limit,
    }


def comparison(result: dict[str, Any], group: str = "") -> list[Row]:
    """Return the rows of one comparison, as `shoal bench` has it: the loops first, then the fastest."""
    rows = []
    for one in result["rows"]:
        rate, share = one["steps_per_s"], one["of_limit"]
        if rate:
            figures = (rate["low"], rate["median"], rate["high"])
            rows.append(row(one["name"], figures, one["role"], group, share and share["median"]))
    loops = {"limit": 0, "loop": 1}
    return sorted(rows, key=lambda one: (loops.get(one["role"], 2), -one["median"]))


def comparisons(document: dict[str, Any]) -> list[Row]:
    """Return the rows of all comparisons of a script."""
    titles = {
        "envs:bare_cheetah": "HalfCheetah-v5 without its infos",
        "HalfCheetah-v5": "HalfCheetah-v5, infos and all",
    }
    found = []
    for result in document["results"]:
        env = result["env"]
        found += comparison(result, f"{titles.get(env, env.removeprefix('envs:'))}, {result['num_envs']} envs")
    return found


def added_by_infos(document: dict[str, Any]) -> list[Row]:
    """Return what five numbers as an info add to a step."""
    return [row(name, one["added"], _role(name)) for name, one in document["added"].items()]


def trainings(document: dict[str, Any]) -> list[Row]:
    """Return the rates of whole trainings."""
    called = {"sb3": "PPO of Stable-Baselines3", "single file": "a single-file PPO"}
    return [
        row(name, figures, _role(name), f"{called[one['trainer']]}, {one['env']}, {one['num_envs']} envs")
        for one in document["trainings"]
        for name, figures in one["steps_per_s"].items()
    ]


def over_puffer(document: dict[str, Any]) -> list[Row]:
    """Return Shoal's rates as multiples of PufferLib's best."""
    return [
        row(one["shoal"], (one["low"], one["median"], one["high"]), "shoal", f"{one['part']}, against {one['peer']}")
        for one in document["ratios"]
    ]


def starts(document: dict[str, Any]) -> list[Row]:
    """Return the seconds of cold and warm starts."""
    return [
        row(name, common.quartiles([run[kind] for run in one["runs"]]), _role(name), f"{kind}: {meaning}")
        for kind, meaning in (("cold", "the first pool of a program"), ("warm", "once more in it"))
        for name, one in document["starts"].items()
        if one["runs"]
    ]


def promises(document: dict[str, Any]) -> list[Row]:
    """Return what `auto` expects over what its pool makes."""
    return [
        row(f"{one['name']}, {one['num_envs']} envs", one["expected_over_reached"], "shoal")
        for one in document["estimates"]
    ]


def turns(document: dict[str, Any]) -> list[Row]:
    """Return what a turn costs."""
    rows = []
    for one in document["cells"]:
        group, _, name = one["turn"].partition(": ")
        rows.append(row(name, one["us"], "shoal", group))
    return rows


def many_cores(document: dict[str, Any]) -> list[Row]:
    """Return the limit, the choices of auto and tune, PufferLib at its best, and the best of the pools by hand."""
    rows, cores = [], document["facts"]["cores"]
    for group, cell in document["cells"].items():
        rows.append(row(f"{cores} plain loops", common.quartiles(cell["limit"]), "limit", group, 1.0))
        usual = {name: one for name, one in cell["rows"].items() if ", spin" not in name or name.endswith("spin usual")}
        ranked = sorted(usual.items(), key=lambda pair: -common.quartiles(pair[1]["rates"])[1])
        best = {
            next((name for name, _ in ranked if name.startswith(word)), "") for word in ("auto", "tuned", "PufferLib")
        }
        for name, one in [pair for at, pair in enumerate(ranked) if at < 4 or pair[0] in best]:
            theirs = name.startswith("PufferLib")
            words = name if theirs else f"Shoal {name.removesuffix(', spin usual')}"
            share = common.quartiles(one["ratios"])[1]
            rows.append(row(words, common.quartiles(one["rates"]), "peer" if theirs else "shoal", group, share))
    return rows


def _role(name: str) -> str:
    return "shoal" if name.startswith("Shoal") else "peer"


INFOS = ("infos.py", "--quick")
PARTS = [
    Part("cartpole", "64 CartPoles", "steps/s",
         ("throughput.py", "--quick", "--only", "CartPole", "-n", "64"), comparisons, 40),
    Part("sizes", "8 and 1,024 CartPoles", "steps/s",
         ("throughput.py", "--quick", "--only", "CartPole", "-n", "8", "1024", "--no-peers"), comparisons, 20),
    Part("heavier", "Large observations, and steps that compute", "steps/s",
         ("throughput.py", "--quick", "--only", "Image84", "Busy500us", "-n", "64", "--no-peers"), comparisons, 20),
    Part("cheetah", "HalfCheetah, with infos and without", "steps/s", INFOS, comparisons, 30),
    Part("added", "What five numbers as an info add to a step of 64 envs", "us", INFOS, added_by_infos, 30),
    Part("trainers", "Whole trainings", "steps/s", ("trainers.py", "--quick", "--threads", "1"), trainings, 20),
    Part("puffer", "Against PufferLib at the best of its settings", "times as fast",
         ("puffer.py", "--only", "CartPole", "Frames84", "--seconds", "0.2", "--rounds", "5", "--try-rounds", "1"),
         over_puffer, 20),
    Part("sleep", "16 envs that wait for 1 ms on average", "steps/s",
         ("latency_sleep.py", "--seconds", "0.4", "--rounds", "5"), comparisons, 20),
    Part("startup", "Start of 16 workers", "s", ("startup.py", "--rounds", "1"), starts, 60),
    Part("turns", "What a turn costs beside the envs, serial", "us", ("turns.py", "--rounds", "20"), turns, None),
    Part("many_cores", "Many cores", "steps/s",
         ("many_cores.py", "--quick", "--only", "plans", "parts", "auto", "tuned", "puffer"),
         many_cores, None, "--json", cores=8),
    Part("auto", "What `auto` expects, over what its pool makes", "times what is reached",
         ("auto.py", "--quick", "--parts", "estimate"), promises, 30),
]  # fmt: skip


def machine() -> dict[str, Any]:
    """Return the date and what the figures were measured on: nothing that names a host or a user."""
    versions = {name: found for name in PACKAGES if (found := doctor.version(name))}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cores": common.cores(),
        "cpu": _cpu(),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
        "core": str(native.KIND),
        "versions": versions,
        "load": round(os.getloadavg()[0], 2),  # before the first run: other programs make figures worse
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def run(part: Part, folder: Path, left: float) -> dict[str, Any]:
    """Run the script of a part, unless it was run already; return its JSON. Raises RuntimeError if it fails."""
    script, *arguments = part.command
    place = folder / "_".join(part.command)
    path = place / script.replace(".py", ".json")
    if not path.exists():
        if part.cores > common.cores():
            raise RuntimeError(f"it needs {part.cores} cores")
        place.mkdir(exist_ok=True)
        arguments += [part.writes, str(place if part.writes == "--out" else path)]
        arguments += [] if part.limit is None else ["--limit", str(min(part.limit, left))]
        command = [sys.executable, str(HERE / script), *arguments]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it took more than {PATIENCE:.0f} s") from None
        if done.returncode or not path.exists():
            raise RuntimeError(done.stdout.strip().rpartition("\n")[2][:300])
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def measure(
    chosen: Sequence[Part], limit: float, told: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the parts; return what they found, and those that were left out, with the reason."""
    began, parts, missing = time.monotonic(), [], []
    with tempfile.TemporaryDirectory() as folder:
        for part in chosen:
            left = limit - (time.monotonic() - began)
            if left <= 0:
                missing.append(f"{part.name}: the time was over")
                continue
            told(f"{part.name}: python benchmarks/{' '.join(part.command)}")
            try:
                rows = part.rows(run(part, Path(folder), left))
            except (RuntimeError, KeyError, ValueError) as error:
                missing.append(f"{part.name}: {error}")
                told(f"  left out, {error}")
                continue
            parts.append({
                "name": part.name, "title": part.title, "unit": part.unit,
                "command": f"python benchmarks/{' '.join(part.command)}", "rows": rows,
            })  # fmt: skip
    return parts, missing


def joined(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the earlier document with the parts that were measured now, each with its own machine."""
    parts = {part["name"]: part for part in (*before["parts"], *now["parts"])}
    order = [part.name for part in PARTS]
    missing = [text for text in before["missing"] if text.partition(":")[0] not in parts]
    return {**before, "parts": sorted(parts.values(), key=lambda part: order.index(part["name"])), "missing": missing}


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART")
    parser.add_argument("--add", action="store_true", help="keep the other parts of the JSON that is there")
    parser.add_argument("--limit", type=float, default=600.0, help="begin no part after so many seconds (%(default)s)")
    parser.add_argument("--out", type=Path, default=PLOTS, help="folder for JSON and plots (%(default)s)")
    options = parser.parse_args()
    about = machine()
    chosen = [part for part in PARTS if not options.only or part.name in options.only]
    parts, missing = measure(chosen, options.limit, lambda text: print(text, flush=True))
    parts = [{**part, "machine": about} for part in parts]
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "bench.json"
    document = {"schema": SCHEMA, "machine": about, "parts": parts, "missing": missing}
    path.write_text(report.as_json(joined(json.loads(path.read_text()), document) if options.add else document))
    for part in parts:
        plots.draw(part, options.out / f"{part['name']}.png")
    print(f"{len(parts)} parts in {options.out}" + (f"; left out: {'; '.join(missing)}" if missing else ""))


if __name__ == "__main__":
    main()
