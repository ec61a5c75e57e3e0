"""`shoal estimate`: says how fast an env will run on many machines, and how to run it, by `shoal.scaling`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from shoal.cli import report, work
from shoal.observe.words import plural
from shoal.scaling import Advice, Cluster, StepTime, advise
from shoal.scaling.advice import figure
from shoal.scaling.measured import MEASURED_ON
from shoal.spaces.leaves import Kind, flatten
from shoal.support.usage import UsageError
from shoal.worker.measurement import time_steps

SCHEMA = 1
BITS = 8
ACTION_BYTES = 8.0  # of a Discrete action


@dataclass(frozen=True)
class EnvFacts:
    """What a step of an env takes, in time and in bytes, and where these numbers come from."""

    step: StepTime
    obs_bytes: float
    action_bytes: float
    source: str
    name: str | None = None


def facts(
    env: str | None, env_ms: float | None, spread: float | None, obs_bytes: float | None, action_bytes: float | None
) -> EnvFacts:
    """Return the numbers that the user gave; the rest is measured with the env, if there is one."""
    if env is None:
        found = EnvFacts(StepTime((env_ms or 0.0) / 1e3, spread or 0.0), obs_bytes or 0.0, ACTION_BYTES, "as given")
    else:
        found = measure(env)
        step = found.step if spread is None else StepTime(found.step.mean, spread)
        found = replace(found, step=step, obs_bytes=found.obs_bytes if obs_bytes is None else obs_bytes)
    return found if action_bytes is None else replace(found, action_bytes=action_bytes)


def measure(name: str) -> EnvFacts:
    """Build the env here, step it for a moment, and read the sizes of its spaces."""
    make = work.env_fn(name)
    work.probe(name)  # raises UsageError if the env cannot be built and reset
    env = make()
    try:
        measured = time_steps(env)
        obs, action = _bytes(env.observation_space, name), _bytes(env.action_space, name)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{name!r} could not be stepped: {type(error).__name__}: {error}") from error
    finally:
        env.close()
    step = StepTime.measured(measured.wall)
    return EnvFacts(step, obs, action, f"{name}, {len(measured.wall)} steps measured here", name)


def _bytes(space: Any, name: str) -> float:
    leaves = flatten(space)
    objects = [leaf for leaf in leaves if leaf.kind is Kind.OBJECT]
    if objects:
        raise UsageError(
            f"{name!r} has observations or actions of no fixed size ({objects[0].path or 'the whole'}): give --env-ms, "
            "--obs-bytes and --action-bytes instead of --env"
        )
    return float(sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves))


def estimate(facts: EnvFacts, **cluster: Any) -> Advice:
    """Find the best way to run such an env on a cluster. Raises UsageError for numbers that make no sense."""
    try:
        return advise(Cluster(facts.step, obs_bytes=facts.obs_bytes, action_bytes=facts.action_bytes, **cluster))
    except ValueError as error:
        raise UsageError(str(error)) from error


def show(advice: Advice, facts: EnvFacts, console: Console) -> None:
    """Print what was assumed, what is predicted, what to use, and what to change first."""
    setup, now = advice.setup, advice.prediction
    grid = report.table(("part", "busy", "allows at most", "gain, if twice as good"))
    for part, most in advice.most.items():
        gain = advice.gains[part]
        grid.add_row(
            part, f"{now.busy[part]:.0%}" if part in now.busy else "",
            "" if math.isinf(most) else f"{figure(most)} steps/s", f"{gain - 1:.0%}" if gain > 1.01 else "",
            style="cyan" if part == advice.limit else "",
        )  # fmt: skip
    lines: list[RenderableType] = [
        Text(_assumed(advice, facts), style="dim"), "",
        Text(f"{figure(now.rate)} steps/s, limited by the {advice.limit}", style="bold"), "", grid,
        Text(how(advice)), Text(call(advice, facts), style="cyan"), "",
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


def call(advice: Advice, facts: EnvFacts) -> str:
    """Return the Python code that makes such a pool."""
    setup = advice.setup
    imports, env = work.as_python(facts.name or "")
    given = []
    if facts.name is None:
        given, env = ['env = "CartPole-v1"  # yours: a Gymnasium id, or a function that makes an env'], "env"
    size = "" if setup.full else f", batch_size={setup.batch_size}"
    local = '"serial"' if setup.workers_per_actor == 1 else '"processes"'
    options = f'{{"num_cpus": {setup.workers_per_actor}, "local_backend": {local}, "placement": "SPREAD"}}'
    made = f'{setup.envs}{size}, backend="ray", num_workers={setup.actors}, backend_options={options}'
    return "\n".join([*imports, "import shoal", "", *given, f"pool = shoal.Pool({env}, {made})"])


def _assumed(advice: Advice, facts: EnvFacts) -> str:
    cluster, step = advice.cluster, facts.step
    link = "" if math.isinf(cluster.bandwidth) else f", links of {cluster.bandwidth * BITS / 1e9:g} Gbit/s"
    return (
        f"{facts.source}: {figure(1e3 * step.mean)} ms a step with a spread of {step.spread:.0%}, "
        f"{facts.obs_bytes:,.0f} bytes of observation and {facts.action_bytes:,.0f} of action; "
        f"{plural(cluster.envs, 'env')} on {plural(cluster.nodes, 'node')} of {plural(cluster.cores, 'core')}, "
        f"round trips of {figure(1e3 * cluster.latency)} ms{link}; "
        f"{figure(1e3 * cluster.policy)} ms of policy a batch" + (
            f" and {1e6 * cluster.policy_lane:g} us an env" if cluster.policy_lane else ""
        )
    )  # fmt: skip


def as_dict(advice: Advice, facts: EnvFacts) -> dict[str, Any]:
    """Return everything as plain values."""
    setup, now = advice.setup, advice.prediction
    step = {"mean_s": facts.step.mean, "spread": facts.step.spread}
    cluster = {name: value for name, value in asdict(advice.cluster).items() if name not in ("step", "costs")}
    return {
        "schema": SCHEMA,
        "env": {"source": facts.source, **step, "obs_bytes": facts.obs_bytes, "action_bytes": facts.action_bytes},
        "cluster": cluster,
        "costs": {"measured_on": MEASURED_ON, **asdict(advice.cluster.costs)},
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
        "call": call(advice, facts),
    }  # fmt: skip
