"""`shoal tune`: shows what a search has found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from shoal.cli import doctor, report, work
from shoal.planning.plan import Plan
from shoal.tuning.result import TuneResult

SHOWN = 5  # failures; the JSON has them all


def show(result: TuneResult, env: str, saved: Path | None, console: Console) -> None:
    """Print what the env costs, the map, what failed, the plan, and the Python code that applies it."""
    console.print(Text(f"{env}: {result.cost}"))
    console.print()
    console.print(result.map())
    failed = [trial for trial in result.table if trial.state == "failed"]
    for trial in failed[:SHOWN]:
        console.print(Text(f"failed: {trial.candidate}: {report.first_line(trial.note)}", style="dim"))
    if len(failed) > SHOWN:
        console.print(Text(f"and {len(failed) - SHOWN} more failed", style="dim"))
    console.print(Text(f"{result.plan}", style="bold"))
    console.print()
    console.print(Text(apply_line(result.plan, env, saved), style="cyan"), soft_wrap=True)


def apply_line(plan: Plan, env: str, saved: Path | None = None) -> str:
    """Return the Python code that makes envs by this plan."""
    imports, name = work.as_python(env)
    # A vector env steps all envs at once; only pools have partial batches.
    call = "shoal.make" if plan.batch_size is None else "shoal.Pool"
    made = repr(str(saved)) if saved else _constructor(plan)
    return "\n".join([*imports, f"envs = {call}({name}, plan={made})"])


def _constructor(plan: Plan) -> str:
    fields = {"num_envs": plan.num_envs, "batch_size": plan.batch_size, "spin": plan.spin}
    given = "".join(f", {name}={value!r}" for name, value in fields.items() if value is not None)
    return f"shoal.Plan({plan.backend!r}, {plan.num_workers}{given})"


def as_dict(result: TuneResult, env: str) -> dict[str, Any]:
    """Return what was found, and the machine on which it was found, as plain values."""
    return {"env": env, "machine": doctor.facts(), **result.as_dict()}
