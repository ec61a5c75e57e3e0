"""The whole matrix: every env of the benchmark, 8, 64 and 1024 of it, Shoal and its peers interleaved.

python benchmarks/throughput.py --quick --only CartPole -n 64
"""

from __future__ import annotations

from dataclasses import replace

import common
from runners import LoopsInStep
from shoal.cli import contenders, peers
from shoal.cli.contenders import Contender, Role


def quickly(peer: Contender) -> Contender:
    """Return a peer that starts in no time: workers that are forked run the same."""
    return replace(peer, options={"start_method": "fork"}) if peer.runner is peers.SB3Subproc else peer


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser("Steps per second of Shoal and its peers, against the limit.", 0.2, 15)
    common.matrix_options(parser)
    parser.add_argument("--no-peers", action="store_true", help="only Gymnasium to compare with")
    parser.add_argument("--name", default="throughput", help="name of the result files (%(default)s)")
    options = parser.parse_args()
    cores = common.cores()

    def field(number: int) -> list[Contender]:
        others = [] if options.no_peers else [quickly(one) if options.quick else one for one in peers.others(cores)]
        shoals = contenders.shoals(contenders.BACKENDS)
        meeting = Contender(f"{cores} loops in step", LoopsInStep, {"cores": cores}, Role.LOOP)
        return [*contenders.limits(cores), *([meeting] if cores > 1 else []), *shoals, *peers.gymnasiums(), *others]

    results = common.measure(common.matrix(options, field), common.settings(options))
    common.show(results)
    common.save(options.out, options.name, results, json=options.json)


if __name__ == "__main__":
    main()
