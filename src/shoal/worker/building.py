"""Builds the envs of a worker, describes them to the pool, and closes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gymnasium import Space

from shoal.envs.adapt import adapt
from shoal.envs.group import MODES, is_group
from shoal.errors import BadEnv
from shoal.memory.messages import BlockSummary, LaneGroup
from shoal.memory.packed_errors import PackedError, pack_error
from shoal.spaces.leaves import array_leaves
from shoal.support.copies_of_process import Home


class BuildError(Exception):
    """The constructor of an env raised."""

    def __init__(self, env_id: int, error: PackedError):
        super().__init__(env_id, error)
        self.env_id = env_id
        self.error = error


def build_envs(
    env_fns: Sequence[Callable[[], Any]],
    start: int,
    interrupts: bool = False,
    announce: Callable[[int], Any] = lambda env_id: None,
) -> tuple[list[Any], BlockSummary]:
    """Call the env functions; `start` is the id of the first env, and `announce` is told of each before it is built. If
    one raises, or returns no env of its own, close those that were built, and raise BuildError.

    `interrupts`: whether a KeyboardInterrupt is Ctrl-C of the caller, and not an error of an env.
    """
    envs: list[Any] = []
    pairs = []
    home = Home()
    try:
        seen: dict[int, int] = {}
        for env_id, env_fn in enumerate(env_fns, start):
            announce(env_id)
            made = env_fn()
            home.check(f"the constructor of env {env_id}")
            envs.append(adapt(made))
            refuse_shared(seen, identity_of(envs[-1]), env_id)
            if is_group(envs[-1]) != is_group(envs[0]):
                one, other = ("several lanes", "just one")[:: 1 if is_group(envs[-1]) else -1]
                raise BadEnv(f"env {env_id} has {one}, and env {start} {other}: give each kind a pool of its own")
            pairs.append(spaces_of(envs[-1]))
        return envs, _summarize(envs, pairs)
    except BaseException as error:
        home.check(f"the constructor of env {start + len(envs)}")
        close_envs(envs, start)
        if interrupts and isinstance(error, KeyboardInterrupt):
            raise
        raise BuildError(start + min(len(pairs), len(env_fns) - 1), pack_error(error, "its constructor")) from error


def close_envs(envs: list[Any], start: int) -> list[tuple[int, PackedError]]:
    """Close all envs, even if some of them raise, and empty the list; return the errors by env id."""
    errors = []
    home = Home()
    for env_id, env in enumerate(envs, start):
        try:
            if hasattr(env, "close"):
                env.close()
            home.check(f"the close of env {env_id}")
        except BaseException as error:
            home.check(f"the close of env {env_id}")
            errors.append((env_id, pack_error(error, "close")))
    envs.clear()
    return errors


def spaces_of(env: Any) -> tuple[Space[Any], Space[Any]]:
    """Return the (observation, action) spaces of an env, or of one of its lanes. Raises BadEnv if it is no env."""
    if is_group(env):
        pair = (env.single_observation_space, env.single_action_space)
        for what, space in zip(("observation", "action"), pair, strict=True):
            array_leaves(what, space, "a batch")
        return pair
    missing = [name for name in ("step", "reset", "observation_space", "action_space") if not hasattr(env, name)]
    if missing:
        raise BadEnv(f"the env function returned {env!r}, which is no Gymnasium env: it has no {', '.join(missing)}")
    return env.observation_space, env.action_space


def lanes_and_spaces(env: Any) -> tuple[Any, ...]:
    """Return what must not change when an env is built again; the number of lanes is None if it is no group."""
    return (env.num_lanes if is_group(env) else None, *spaces_of(env))


def target_of(env: Any) -> Any:
    """Return the object that the caller's calls and attributes are meant for: not the adapter around a group."""
    return env.env if is_group(env) else env


def identity_of(env: Any) -> int:
    """Return the id of the innermost object, whatever is wrapped around it."""
    return id(env.env if is_group(env) else getattr(env, "unwrapped", env))


def refuse_shared(seen: dict[int, int], identity: int, env_id: int) -> None:
    """Raise BadEnv if this env has been seen in another place; `seen` has the ids of those before it."""
    first = seen.setdefault(identity, env_id)
    if first != env_id:
        raise BadEnv(
            f"env {env_id} is the same object as env {first}: each env function must make an env of its own, so make "
            "it inside the function instead of returning one that was made before"
        )


def name_of(env: Any) -> str:
    """Return the name that people know: the env's id, or its class below all wrappers."""
    spec_id = getattr(getattr(env, "spec", None), "id", None)
    own = [name for name in (spec_id, getattr(env, "name", None)) if isinstance(name, str)]
    return own[0] if own else type(getattr(env, "unwrapped", env)).__name__


def _summarize(envs: Sequence[Any], pairs: list[tuple[Space[Any], Space[Any]]]) -> BlockSummary:
    found: list[tuple[Space[Any], Space[Any]]] = []
    which = []
    for pair in pairs:
        if pair not in found:
            found.append(pair)
        which.append(found.index(pair))
    lanes = [one for env in envs if is_group(env) for one in _lanes_of(env)]
    if len(lanes) > len(which):  # one object that holds many envs
        which = [which[0]] * len(lanes)
    first = target_of(envs[0])
    return BlockSummary(
        found, which, dict(getattr(first, "metadata", None) or {}), getattr(first, "render_mode", None),
        getattr(first, "spec", None), [identity_of(env) for env in envs], lanes,
        name_of(first),
    )  # fmt: skip


def _lanes_of(env: Any) -> list[LaneGroup]:
    """Describe the group of an env's lanes; each of its groups, if one object has several."""
    names = None if env.lane_names is None else list(env.lane_names)
    size = env.group_size if env.together and hasattr(env, "group_size") else env.num_lanes
    modes = tuple(getattr(env, "modes", MODES))
    told = LaneGroup(size, env.together, bool(getattr(env, "resets_alone", False)), env.can_be_absent, modes, names)
    return [told] * (env.num_lanes // size)
