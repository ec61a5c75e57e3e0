"""The bells in every way that a system lets them sleep: futexes, addresses as on macOS, and naps."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import shoal.native

HERE, HEADERS = Path(__file__).parent, Path(shoal.native.__file__).parent
COMPILER = shutil.which(os.environ.get("CC", "gcc"))
WORKS = COMPILER is not None and subprocess.run([COMPILER, "--version"], capture_output=True).returncode == 0
pytestmark = pytest.mark.skipif(not WORKS, reason="there is no C compiler here")
ROUNDS = "300"


def build(folder: Path, *more: str) -> str:
    program = str(folder / "stress")
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{HEADERS}"]
    command = [str(COMPILER), *flags, str(HERE / "stress.c"), *more, "-o", program, "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("way", ["futexes", "addresses", "naps"])
def test_no_ring_is_lost(way: str, tmp_path: Path) -> None:
    portable = [] if way == "futexes" else ["-DSHOAL_PORTABLE"]
    # The program itself brings the functions, where dlsym finds them.
    addresses = ["-rdynamic", str(HERE / "addresses.c")] if way == "addresses" else []
    program = build(tmp_path, *portable, *addresses)
    done = subprocess.run([program, ROUNDS], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "signals" in done.stdout
    used = [int(count) for count in re.findall(r"(\d+) waits, (\d+) wakes", done.stderr)[-1]] if addresses else []
    assert all(count > 0 for count in used)
    imported = subprocess.run(["nm", "-D", program], capture_output=True, text=True, timeout=20).stdout
    if shutil.which("nm") is not None and way == "naps":
        assert " syscall" not in imported, "the portable build makes system calls of Linux"
