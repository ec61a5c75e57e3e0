"""The core of every suite: what `pytest --core`, and so `make check`, runs of the tests. It must stay under a minute.

Each row names a file or a folder, and a pattern that the test's name must have somewhere; "" takes them all. A new
package gets a row here.
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ON_TWO_BACKENDS = r"^[^\[]*$|serial|processes"  # tests of no backend, and of the two that matter most

CORE = {
    # The contract, in this process and in others.
    "contract/test_pool.py": ON_TWO_BACKENDS,
    "contract/test_ids_and_seeds.py": r"serial",
    "contract/test_reach.py": ON_TWO_BACKENDS,
    "contract/test_same_as_gymnasium.py": r"processes",
    "contract/test_snapshot.py": ON_TWO_BACKENDS,
    "contract/test_stats.py": ON_TWO_BACKENDS,
    "contract/test_agents_in_pools.py": r"serial|processes",
    # Every fault once, at every moment once.
    "faults/test_matrix.py": r"processes-forkserver-(.*-step-restart|(kill|hang|raise)-.*-raise\])",
    "faults/test_side_channel.py": "",
    "faults/test_traces.py": "",
    # One or more files for each package.
    "support": "",
    "native": "",
    "spaces": r"^(?!.*(torch|compiled))",  # which take seconds to import
    "memory/test_header.py": "",
    "memory/test_packed_errors.py": "",
    "envs": "",
    "state": "",
    "compiled/test_rebuild.py": "",
    "compiled/test_same_as_plain.py": r"CartPole",
    "compiled/library/test_ids.py": "",
    "backends": "",
    "engine": "",
    "planning": "",
    "remote/test_bell.py": "",
    "remote/test_dispatcher.py": "",
    "remote/ray/test_host.py": "",
    "observe/test_diagnosis.py": "",
    "wrappers/test_hosts.py": r"serial|gymnasium",
    "wrappers/test_nan.py": "",
    "wrappers/test_normalize.py": "",
    "wrappers/test_normalize_files.py": "",
    "graph/test_host.py": "",
    "dialects/test_face_contract.py": r"serial|^[^\[]*\[[a-z_0-9]*\]$",
    "tuning/test_search.py": "",
    "scaling": r"bind|nonsense",
    "cli/test_main.py": r"^(?!test_bench_(prints|measures))",
    "cli/test_report.py": "",
    "test_errors.py": "",
    "test_extras.py": "",
    "test_house.py": "",
    "test_layers.py": "",
    "test_ranks_merge.py": "",
    "test_words.py": "",
}


def row_of(path: Path) -> str | None:
    """The row that a test file belongs to, if there is one."""
    name = path.relative_to(HERE).as_posix()
    return next((row for row in CORE if name == row or name.startswith(f"{row}/")), None)


def is_core(path: Path, test: str) -> bool:
    row = row_of(path)
    return row is not None and re.search(CORE[row], test) is not None
