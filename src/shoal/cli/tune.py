"""`shoal tune`: searches for the best plan and shows what was found."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from shoal.cli import doctor, report, work
from shoal.errors import ShoalError
from shoal.observe.progress import progress
from shoal.planning.plan import Plan
from shoal.support.usage import UsageError
from shoal.tuning.result import TuneResult
from shoal.tuning.search import Search

SHOWN = 5  # failures; the JSON has them all


def run(options: argparse.Namespace) -> int:
    """Run `shoal tune`. After Ctrl-C, the result is that of the trials so far."""
    output = report.Output(options)
    if options.save:
        report.check_file(options.save)
    work.look_here(options.env)
    interrupted = False
    try:
        search = Search(
            work.env_fn(options.env), options.num_envs, batch_size=options.batch_size, backends=options.backends,
            policy_latency=options.policy_ms / 1000, max_memory=options.max_memory, isolate=options.isolate,
            seconds=options.seconds, learner_threads=options.learner_threads,
        )  # fmt: skip
        with progress(options.seconds, timed=True) as notify:
            try:
                search.run(notify)
            except KeyboardInterrupt:
                interrupted = True
                if not search.tried:
                    raise
        result = search.result()
    except (ShoalError, ValueError) as error:
        raise UsageError(work.first_line(str(error))) from error
    if options.save:
        result.plan.save(options.save)
    output.write(
        lambda: {"env": options.env, "machine": doctor.facts(), **result.as_dict()},
        lambda console: show(result, options.env, options.save, console),
        result.plot,
    )
    if interrupted:
        raise KeyboardInterrupt
    return 0


def show(result: TuneResult, env: str, saved: Path | None, console: Console) -> None:
    """Print what the env costs, the map, what failed, the plan, and the Python code that applies it."""
    console.print(Text(f"{env}: {result.cost}"))
    console.print()
    console.print(result.map())
    failed = [trial for trial in result.table if trial.state == "failed"]
    for trial in failed[:SHOWN]:
        console.print(Text(f"failed: {trial.candidate}: {work.first_line(trial.note)}", style="dim"))
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
    fields = {"num_envs": plan.num_envs, "batch_size": plan.batch_size, "spin": plan.spin}
    given = "".join(f", {name}={value!r}" for name, value in fields.items() if value is not None)
    made = repr(str(saved)) if saved else f"shoal.Plan({plan.backend!r}, {plan.num_workers}{given})"
    return "\n".join([*imports, f"envs = {call}({name}, plan={made})"])
