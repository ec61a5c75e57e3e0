"""`shoal estimate`: says how fast an env will run on many machines, and how to run it, by `shoal.scaling`."""

from __future__ import annotations

import argparse
import contextlib
import math
from dataclasses import asdict
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from shoal.cli import report, work
from shoal.observe.words import figure, plural
from shoal.scaling import Advice, Cluster, StepTime, advise
from shoal.scaling.model import MEASURED_ON
from shoal.spaces.leaves import Kind, flatten
from shoal.support.usage import UsageError
from shoal.tuning.result import table
from shoal.worker.measurement import time_steps

SCHEMA = 1
BITS = 8
ACTION_BYTES = 8.0  # of a Discrete action


def run(options: argparse.Namespace) -> int:
    output = report.Output(options)
    if options.env is None and options.obs_bytes is None:
        raise UsageError("--env-ms says nothing about bytes: give --obs-bytes too, or --env to have both measured")
    work.look_here(options.env or "")
    source, step = facts(options)
    try:
        cluster = Cluster(
            envs=options.envs, nodes=options.nodes, cores=options.cores, **step,
            latency=options.latency_ms / 1e3,
            bandwidth=options.gbit * 1e9 / BITS,
            policy=options.policy_ms / 1e3,
            policy_lane=options.policy_us / 1e6,
            batch_size=options.envs if options.batch_size == "all" else options.batch_size,
        )  # fmt: skip
        advice = advise(cluster)
    except ValueError as error:
        raise UsageError(str(error)) from error
    output.write(
        lambda: as_dict(advice, source, options.env), lambda console: show(advice, source, options.env, console)
    )
    return 0


def facts(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return what a step takes in time and bytes, and in words where these numbers come from.

    What the user did not give is measured with the env, if there is one.
    """
    found: dict[str, Any]
    if options.env is None:
        source, found = "as given", {"step": StepTime(options.env_ms / 1e3), "action_bytes": ACTION_BYTES}
    else:
        source, found = measure(options.env)
    if options.spread is not None:
        found["step"] = StepTime(found["step"].mean, options.spread)
    given = {name: getattr(options, name) for name in ("obs_bytes", "action_bytes")}
    return source, found | {name: value for name, value in given.items() if value is not None}


def measure(name: str) -> tuple[str, dict[str, Any]]:
    """Build the env here, step it for a moment, and read the sizes of its spaces."""
    make = work.env_fn(name)
    work.probe(name)  # raises UsageError if the env cannot be built and reset
    with contextlib.closing(make()) as env, work.refusing(f"{name!r} could not be stepped"):
        measured = time_steps(env)
        obs, action = _bytes(env.observation_space, name), _bytes(env.action_space, name)
    found = {"step": StepTime.measured(measured.wall), "obs_bytes": obs, "action_bytes": action}
    return f"{name}, {len(measured.wall)} steps measured here", found


def _bytes(space: Any, name: str) -> float:
    leaves = flatten(space)
    objects = [leaf for leaf in leaves if leaf.kind is Kind.OBJECT]
    if objects:
        raise UsageError(
            f"{name!r} has observations or actions of no fixed size ({objects[0].path or 'the whole'}): give --env-ms, "
            "--obs-bytes and --action-bytes instead of --env"
        )
    return float(sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves))


def show(advice: Advice, source: str, env: str | None, console: Console) -> None:
    """Print what was assumed, what is predicted, what to use, and what to change first."""
    setup, now = advice.setup, advice.prediction
    grid = table(("part", "busy", "allows at most", "gain, if twice as good"))
    for part, most in advice.most.items():
        gain = advice.gains[part]
        grid.add_row(
            part, f"{now.busy[part]:.0%}" if part in now.busy else "",
            "" if math.isinf(most) else f"{figure(most)} steps/s", f"{gain - 1:.0%}" if gain > 1.01 else "",
            style="cyan" if part == advice.limit else "",
        )  # fmt: skip
    lines: list[RenderableType] = [
        Text(_assumed(advice, source), style="dim"), "",
        Text(f"{figure(now.rate)} steps/s, limited by the {advice.limit}", style="bold"), "", grid,
        Text(how(advice)), Text(call(advice, env), style="cyan"), "",
        Text(about_nodes(advice)), Text(f"First: {advice.first}", style="bold"),
    ]  # fmt: skip
    if setup.envs != advice.cluster.envs:
        lines.append(Text(f"({setup.envs:,} envs, so that all actors have equally many.)", style="dim"))
    for line in lines:
        console.print(line, soft_wrap=True)


def how(advice: Advice) -> str:
    """Say in a sentence what to use."""
    setup = advice.setup
    each = f"{plural(setup.envs_per_actor, 'env')} and {plural(setup.workers_per_actor, 'worker')}"
    where = f"{setup.actors_per_node} on each of {advice.nodes:,} nodes" if advice.nodes > 1 else "on one node"
    flight = math.ceil(setup.in_flight)
    return (
        f"Use {plural(setup.actors, 'actor')} ({where}) with {each}{' each' * (setup.actors > 1)}, batch_size "
        f"{setup.batch_size:,}: {flight:,} batch" + "es" * (flight > 1) + " in flight."
    )


def about_nodes(advice: Advice) -> str:
    """Say in a sentence what more nodes would bring."""
    used, given = advice.nodes, advice.cluster.nodes
    if used == given:
        most = advice.most_nodes
        if most == used:
            return f"One driver keeps no more than {'this node' if most == 1 else f'these {most:,} nodes'} busy."
        return f"One driver would keep about {most:,} such nodes busy: there is room for more."
    rate, others = advice.prediction.rate, advice.all_nodes
    bring = f"{figure(others)} steps/s, {others / rate - 1:+.0%}" if others > rate else f"no more than {figure(others)}"
    return f"{used:,} of the {given:,} nodes {'is' if used == 1 else 'are'} enough: all of them would make {bring}."


def call(advice: Advice, name: str | None) -> str:
    """Return the Python code that makes such a pool."""
    setup = advice.setup
    imports, env = work.as_python(name or "")
    given = []
    if name is None:
        given, env = ['env = "CartPole-v1"  # yours: a Gymnasium id, or a function that makes an env'], "env"
    size = "" if setup.full else f", batch_size={setup.batch_size}"
    local = '"serial"' if setup.workers_per_actor == 1 else '"processes"'
    options = f'{{"num_cpus": {setup.workers_per_actor}, "local_backend": {local}, "placement": "SPREAD"}}'
    made = f'{setup.envs}{size}, backend="ray", num_workers={setup.actors}, backend_options={options}'
    return "\n".join([*imports, "import shoal", "", *given, f"pool = shoal.Pool({env}, {made})"])


def _assumed(advice: Advice, source: str) -> str:
    cluster, step = advice.cluster, advice.cluster.step
    link = "" if math.isinf(cluster.bandwidth) else f", links of {cluster.bandwidth * BITS / 1e9:g} Gbit/s"
    return (
        f"{source}: {figure(1e3 * step.mean)} ms a step with a spread of {step.spread:.0%}, "
        f"{cluster.obs_bytes:,.0f} bytes of observation and {cluster.action_bytes:,.0f} of action; "
        f"{plural(cluster.envs, 'env')} on {plural(cluster.nodes, 'node')} of {plural(cluster.cores, 'core')}, "
        f"round trips of {figure(1e3 * cluster.latency)} ms{link}; "
        f"{figure(1e3 * cluster.policy)} ms of policy a batch" + (
            f" and {1e6 * cluster.policy_lane:g} us an env" if cluster.policy_lane else ""
        )
    )  # fmt: skip


def as_dict(advice: Advice, source: str, env: str | None) -> dict[str, Any]:
    setup, now, cluster = advice.setup, advice.prediction, asdict(advice.cluster)
    step, costs = cluster.pop("step"), cluster.pop("costs")
    return {
        "schema": SCHEMA,
        "env": {
            "source": source, "mean_s": step["mean"], "spread": step["spread"],
            "obs_bytes": cluster["obs_bytes"], "action_bytes": cluster["action_bytes"],
        },
        "cluster": cluster,
        "costs": {"measured_on": MEASURED_ON, **costs},
        "steps_per_second": now.rate,
        "limit": advice.limit,
        "busy": now.busy,
        "bounds": advice.most,
        "gains": advice.gains,
        "use": {
            "nodes": advice.nodes, "actors": setup.actors, "actors_per_node": setup.actors_per_node,
            "envs_per_actor": setup.envs_per_actor,
            "workers_per_actor": setup.workers_per_actor, "batch_size": setup.batch_size, "in_flight": setup.in_flight,
            "messages_per_batch": now.messages, "seconds_between_steps": now.circle,
        },
        "steps_per_second_with_all_nodes": advice.all_nodes,
        "most_nodes": advice.most_nodes,
        "data_parallel_steps_per_second": advice.apart,
        "one_node_alone_steps_per_second": advice.alone,
        "first": advice.first,
        "call": call(advice, env),
    }  # fmt: skip
