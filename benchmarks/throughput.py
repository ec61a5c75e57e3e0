"""The whole matrix: every env of the benchmark, 8, 64 and 1024 of it, Shoal and its peers interleaved.

python benchmarks/throughput.py --quick --only CartPole -n 64
"""

from __future__ import annotations

import common
from runners import LoopsInStep
from shoal.cli import contenders, peers
from shoal.cli.contenders import Contender, Role


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser("Steps per second of Shoal and its peers, against the limit.", 0.2, 15)
    common.matrix_options(parser)
    parser.add_argument("--no-peers", action="store_true", help="only Gymnasium to compare with")
    parser.add_argument("--name", default="throughput", help="name of the result files (%(default)s)")
    options = parser.parse_args()
    cores = common.cores()

    def field(number: int) -> list[Contender]:
        others = [] if options.no_peers else peers.others(cores)
        shoals = contenders.shoals(contenders.BACKENDS)
        meeting = Contender(f"{cores} loops in step", LoopsInStep, {"cores": cores}, Role.LOOP)
        return [*contenders.limits(cores), *([meeting] if cores > 1 else []), *shoals, *peers.gymnasiums(), *others]

    results = common.measure(common.matrix(options, field), common.settings(options))
    common.show(results)
    common.save(options.out, options.name, results)


if __name__ == "__main__":
    main()
