"""Start of 16 workers with a Gymnasium env: cold, in a fresh interpreter, and warm, once more in it.

Cold counts the constructor and the first reset of a process that has imported the library and done
nothing else; `script` adds the start of the interpreter and all imports, as a user waits for it.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from rich.console import Console
from rich.table import Table

import common
from shoal.cli import peers
from shoal.cli.contender_process import ContenderLost, ContenderProcess
from shoal.cli.contenders import Contender, Role, ShoalVector
from shoal.cli.work import Work, probe
from shoal.observe.progress import progress

PATIENCE = 180.0


def field(workers: int) -> list[Contender]:
    """Return those who start processes."""
    options = {"backend": "processes", "num_workers": workers}
    return [
        Contender("Shoal processes", ShoalVector, options, Role.SHOAL),
        Contender("Gymnasium Async", peers.GymnasiumAsync),
        Contender("SB3 SubprocVecEnv", peers.SB3Subproc),
        Contender("tianshou Subproc", peers.TianshouSubproc),
    ]


def start_once(contender: Contender, work: Work) -> dict[str, Any]:
    """Start in a fresh interpreter, close, start again in the same one."""
    begin = time.perf_counter()
    host = ContenderProcess()
    try:
        cold = host.open(contender, work, PATIENCE)
        script = time.perf_counter() - begin
        host.close_runner()
        warm = host.open(contender, work, PATIENCE)
    except BaseException:
        host.end(gently=False)
        raise
    host.end()
    return {
        "script": script,
        "cold": cold.seconds,
        "warm": warm.seconds,
        "workers": cold.workers,
        "worker_pss": cold.worker_pss,
    }


def measure(work: Work, players: list[Contender], rounds: int) -> dict[str, Any]:
    """Start everybody in turn, `rounds` times."""
    found: dict[str, Any] = {player.name: {"runs": [], "note": player.unfit(work)} for player in players}
    with progress(rounds * len(players)) as notify:
        for number in range(rounds):
            for player in players:
                notify(f"round {number + 1}: {player.name}")
                if not found[player.name]["note"]:
                    try:
                        found[player.name]["runs"].append(start_once(player, work))
                    except ContenderLost as lost:
                        found[player.name]["note"] = str(lost)
    return found


def table(found: dict[str, Any], heading: str) -> Table:
    """Lay the medians out."""
    grid = Table(title=heading, title_justify="left")
    for head in ("", "cold", "warm", "script", "workers", "memory/worker"):
        grid.add_column(head, justify="right" if head else "left")
    for name, one in found.items():
        if not one["runs"]:
            continue
        cold, warm, script = (
            f"{statistics.median(run[part] for run in one['runs']):.2f} s" for part in ("cold", "warm", "script")
        )
        last = one["runs"][-1]
        memory = f"{last['worker_pss'] / 2**20:.0f} MiB" if last["worker_pss"] else ""
        grid.add_row(name, cold, warm, script, str(last["workers"]), memory)
    return grid


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser("Start-up time and memory of worker processes.", 0.0, 3)
    parser.add_argument("-n", "--num-envs", type=int, default=16, metavar="N", help="envs and workers")
    parser.add_argument("--env", default="CartPole-v1", help="a Gymnasium id or module:callable")
    options = parser.parse_args()
    work = probe(options.env, options.num_envs)
    found = measure(work, field(options.num_envs), options.rounds)
    Console().print(table(found, f"start of {options.num_envs} workers, {options.env}"))
    for name, one in found.items():
        if one["note"]:
            Console().print(f"  {name}: {one['note']}", style="dim")
    common.write(options, "startup", {"env": options.env, "workers": options.num_envs, "starts": found})


if __name__ == "__main__":
    main()
