"""Steps that wait: 16 envs of log-normal sleep, batches of the first few that are ready.

The limit is all envs asleep all the time: as many plain loops as envs, each in its own process,
which together make envs / mean sleep steps a second, the clock's real sleeps included.

No scheduler reaches that limit with a batch above one: an env that is ready waits for the rest of
its batch. The ceiling is what a scheduler that takes no time at all would reach, by simulation.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
from rich.console import Console

import common
import envs
from shoal.cli import peers
from shoal.cli.contenders import Contender, PlainLoop, Role, ShoalAsync

BACKENDS = ("threads", "processes")


def field(number: int, batches: list[int], workers: int) -> list[Contender]:
    """Return the limit, Shoal on two backends, and Gymnasium, which waits for the slowest."""
    found = [Contender(f"{number} plain loops", PlainLoop, role=Role.LIMIT, copies=number)]
    for batch in batches:
        for backend in BACKENDS:
            options = {"backend": backend, "batch_size": batch, "num_workers": workers}
            found.append(Contender(f"Shoal {backend}, batch {batch}", ShoalAsync, options, Role.SHOAL))
    return [*found, *peers.gymnasiums()]


def ceiling(number: int, batch: int, batches: int = 20_000) -> float:
    """Return the fraction of the limit that batches of the first `batch` ready leave possible."""
    sigma = envs.LogNormalSleep.sigma
    draws = np.random.default_rng(0).lognormal(-(sigma**2) / 2, sigma, number + batch * batches)
    pauses = iter(draws.tolist())
    awake_at = [next(pauses) for _ in range(number)]
    heapq.heapify(awake_at)
    now = 0.0
    for _ in range(batches):
        now = max(now, *(heapq.heappop(awake_at) for _ in range(batch)))
        for _ in range(batch):
            heapq.heappush(awake_at, now + next(pauses))
    # The mean pause is 1, so `number` envs make `number` steps in one unit of time at most.
    return math.ceil(1000 * batch * batches / now / number) / 1000


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser("Envs that sleep: Shoal's async mode against envs / mean sleep.", 1.0, 9)
    parser.add_argument("-n", "--num-envs", type=int, default=16, metavar="N")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[8, 4], metavar="N")
    parser.add_argument("--workers", type=int, metavar="N", help="default: one for each env")
    options = parser.parse_args()
    number = options.num_envs
    players = field(number, options.batch_size, options.workers or number)
    cells = [(envs.ALL["LogNormalSleep"], number, players)]
    results = common.measure(cells, common.settings(options))
    common.show(results)
    ceilings = {batch: ceiling(number, batch) for batch in options.batch_size}
    for batch, part in ceilings.items():
        Console().print(f"  ceiling of batches of {batch} out of {number}: {part:.2f} of the limit")
    common.save(options.out, "latency_sleep", results, json=options.json, ceilings=ceilings)


if __name__ == "__main__":
    main()
