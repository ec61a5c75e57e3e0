"""Checks the types of the examples in README and docs, as mypy and pyright see them in a user's script, under strict.

    python tools/check_examples.py [FOLDER]

The scripts are written into FOLDER (build/examples by default), one for each block, under the name of its page and
line. Migrations are left out: they are scripts of other libraries, and theirs to annotate.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from site_blocks import BLOCKS  # noqa: E402

# Rules of pyright that speak of libraries without annotations, not of what is written in the example.
OF_OTHERS = (
    "reportMissingTypeStubs", "reportUnknownMemberType", "reportUnknownVariableType", "reportUnknownArgumentType",
    "reportUnknownParameterType", "reportUnknownLambdaType", "reportMissingModuleSource", "reportMissingImports",
)  # fmt: skip
CASES = "types_of_make.py"  # what else must hold of the types that users see
UNTYPED = ("tensorflow", "tf_agents", "cupy")


def write(folder: Path) -> list[Path]:
    """Write the examples that are Python of ours, and return the files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files = []
    for block in BLOCKS:
        if not block.side and block.module not in UNTYPED:
            files.append(folder / f"{re.sub(r'[^a-z0-9]+', '_', block.name.lower())}.py")
            files[-1].write_text(block.text)
    files.append(Path(shutil.copy(ROOT / "tests" / "pages" / CASES, folder)))
    return files


def mypy(files: list[Path]) -> int:
    """Check each file by itself, as two may define the same names."""
    config = ["--strict", "--ignore-missing-imports", "--no-error-summary", "--scripts-are-modules"]
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *config, *map(str, files)]
    return subprocess.run(command, cwd=ROOT).returncode


def pyright(files: list[Path], folder: Path) -> int:
    """Run pyright (as basedpyright packs it) in its strict mode, and print what it finds in the examples."""
    settings = {"typeCheckingMode": "strict", "pythonPlatform": "Linux", "include": ["."]}
    settings |= dict.fromkeys(OF_OTHERS, False)
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    program = str(Path(sys.executable).with_name("basedpyright"))
    command = [program, "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    found = [one for one in json.loads(done.stdout)["generalDiagnostics"] if one["severity"] == "error"]
    for one in found:
        line = one["range"]["start"]["line"] + 1
        print(f"{Path(one['file']).name}:{line}: {one['message']} [{one.get('rule', '')}]")
    print(f"pyright: {len(found)} errors in {len(files)} examples")
    return 1 if found else 0


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else ROOT / "build" / "examples"
    files = write(folder)
    return mypy(files) | pyright(files, folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
