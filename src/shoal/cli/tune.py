"""`shoal tune`: what a search has found, for the terminal and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from shoal.cli import doctor
from shoal.planning.plan import Plan
from shoal.tuning.result import Trial, TuneResult

TOLD = 5  # failures that are shown; the JSON has them all


def show(result: TuneResult, env: str, saved: Path | None, console: Console) -> None:
    """Print what the env costs, the map, what failed, the plan and the Python that applies it."""
    console.print(Text(f"{env}: {result.cost}"))
    console.print()
    console.print(result.map())
    failed = [trial for trial in result.table if trial.state == "failed"]
    for trial in failed[:TOLD]:
        console.print(Text(f"failed: {trial.candidate}: {_first_line(trial)}", style="dim"))
    if len(failed) > TOLD:
        console.print(Text(f"and {len(failed) - TOLD} more failed", style="dim"))
    console.print(Text(f"{result.plan}", style="bold"))
    console.print()
    console.print(Text(apply_line(result.plan, env, saved), style="cyan"), soft_wrap=True)


def apply_line(plan: Plan, env: str, saved: Path | None = None) -> str:
    """The Python that makes envs by this plan."""
    module, colon, attribute = env.partition(":")
    by_name = not colon or not attribute.isidentifier()  # "module:Name-v0" is an id as well
    lines = [] if by_name else [f"from {module} import {attribute}"]
    # A vector env returns all envs at each step; batches of the first that are ready are for pools.
    call = "shoal.make" if plan.batch_size is None else "shoal.Pool"
    lines.append(f"envs = {call}({env!r}" if by_name else f"envs = {call}({attribute}")
    lines[-1] += f", plan={str(saved)!r})" if saved else f", plan={_constructor(plan)})"
    return "\n".join(lines)


def _constructor(plan: Plan) -> str:
    fields = {"num_envs": plan.num_envs, "batch_size": plan.batch_size, "spin": plan.spin}
    given = "".join(f", {name}={value!r}" for name, value in fields.items() if value is not None)
    return f"shoal.Plan({plan.backend!r}, {plan.num_workers}{given})"


def as_json(result: TuneResult, env: str) -> str:
    """Everything that was found, and the machine that it holds for."""
    document: dict[str, Any] = {"env": env, "machine": doctor.facts(), **result.as_dict()}
    return json.dumps(document, indent=2) + "\n"


def _first_line(trial: Trial) -> str:
    return trial.note.strip().partition("\n")[0]
