"""The envs of a pool as JAX functions: `recv`, `send`, `step` and `reset`, which `jit` keeps in their order."""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

from shoal.errors import BadCall, PoolClosed
from shoal.graph import host
from shoal.graph.host import Arrays, GraphHost, Received, kept_errors
from shoal.graph.jax.random_numbers import words_of

Shapes = tuple[jax.ShapeDtypeStruct, ...]
_shape: Any = jax.ShapeDtypeStruct
_barrier: Any = jax.effects_barrier

# JAX gives a callback its arguments as arrays of its own. It copies small ones at once, and large ones in a thread of
# the pool that runs the graph: on one core, that thread is the one that waits for the copy. So large ones go in pieces.
_PIECE = 64 << 10


class _Four(NamedTuple):
    handle: jax.Array
    recv: Callable[[Any], tuple[jax.Array, Received]]
    send: Callable[..., jax.Array]
    step: Callable[[Any, Any], tuple[jax.Array, Received]]


class Binding(_Four):
    """What `bind` returns: unpacks to `handle, recv, send, step`.

    Attributes:
        handle: uint32 [], the number of calls so far. Every function takes one and returns the next.
        recv: `handle, out = recv(handle)`: wait for the next `batch_size` envs that are done.
        send: `handle = send(handle, actions, env_id=None)`: start a step of these envs, of all by default.
        step: `handle, out = step(handle, actions)`: step all envs and wait for them.
        reset: `handle, obs = reset(handle, seed=None, env_id=None)`: reset these envs and wait for them; a seed
            of one number gives env i `seed + i`, several give each of them its own.
    """

    reset: Callable[..., tuple[jax.Array, Any]]


def bind(envs: Any, *, ordered: bool | None = None) -> Binding:
    """Make the envs of a pool part of JAX functions, compiled or not: inside `jit`, `scan`, `fori_loop`, `cond`.

    Each call is carried out exactly once, whether its results are used or not. No gradient goes through envs. `vmap`
    is refused: `num_envs` is the batch.

    Args:
        envs: a Pool, or an object that has one as `pool`, such as a vector env of `shoal.make`.
        ordered: how calls are kept in their order. False: by the handle alone, which counts the calls; each call takes
            one and returns the next. A handle that was used before is refused, except by `reset`, and by the first
            call after an error. That is the default on the CPU, and works only there. True: by JAX's own ordered
            callbacks, the default elsewhere, which cost 60 microseconds more.

    Example:
        handle, recv, send, step = shoal.graph.jax.bind(pool)

        @shoal.graph.jax.jit
        def rollout(handle, obs, params):
            def one(carry, _):
                handle, obs = carry
                handle, out = step(handle, policy(params, obs))
                return (handle, out.obs), out.reward
            return jax.lax.scan(one, (handle, obs), length=128)
    """
    by_jax = jax.default_backend() != "cpu" if ordered is None else ordered
    # JAX copies what a callback returns before it goes on.
    graph = _Graph(
        GraphHost(envs, jax.dtypes.canonicalize_dtype, keeps=False), _OrderedCalls() if by_jax else _ThreadedCalls()
    )
    binding = Binding(jnp.zeros((), jnp.uint32), graph.recv, graph.send, graph.step)
    binding.reset = graph.reset
    return binding


class _Graph:
    """The functions of a binding."""

    def __init__(self, one: GraphHost, calls: _OrderedCalls | _ThreadedCalls):
        self._host, self._calls = one, calls
        self._id_type = jax.dtypes.canonicalize_dtype(np.int64)
        self._step = one.step

    def step(self, handle: Any, actions: Any) -> tuple[jax.Array, Received]:
        """Step all envs and wait for them."""
        count = self._host.num_envs
        handle, values = _alone(handle, self._flat(actions))
        handle, answer = self._calls.call(self._callback("_step"), self._answers(count), handle, values)
        return handle, self._told(answer, jnp.arange(count, dtype=self._id_type))

    def send(self, handle: Any, actions: Any, env_id: Any = None) -> jax.Array:
        """Start a step of these envs, of all by default."""
        ids = [] if env_id is None else [jnp.asarray(env_id)]
        handle, values = _alone(handle, [*ids, *self._flat(actions)])
        sent, _ = self._calls.call(self._callback("_send", bool(ids)), (), handle, values)
        return sent

    def recv(self, handle: Any) -> tuple[jax.Array, Received]:
        """Wait for the next `batch_size` envs that are done."""
        count = self._host.pool.batch_size
        handle, _ = _alone(handle, [])
        shapes = (_shape((count,), self._id_type), *self._answers(count))
        handle, (ids, *answer) = self._calls.call(self._callback("_recv"), shapes, handle, [])
        return handle, self._told(answer, ids)

    def reset(self, handle: Any, seed: Any = None, env_id: Any = None) -> tuple[jax.Array, Any]:
        """Reset these envs, all by default, and wait for them; steps of theirs under way are dropped."""
        traced = isinstance(seed, jax.core.Tracer)
        given = {
            "seed": jnp.asarray(seed) if traced else None,
            "words": None if seed is None or traced else jnp.asarray(_seed_words(seed)),
            "ids": None if env_id is None else jnp.atleast_1d(jnp.asarray(env_id)),
        }
        names = tuple(name for name, value in given.items() if value is not None)
        handle, values = _alone(handle, [given[name] for name in names])
        count = self._host.num_envs if env_id is None else len(values[-1])
        shapes = self._answers(count)[: len(self._host.obs_leaves)]
        handle, obs = self._calls.call(self._callback("_reset", names), shapes, handle, values, begins=True)
        return handle, self._host.nest(obs)

    # ---- callbacks ---------------------------------------------------------------------------------------------

    def _callback(self, name: str, *given: Any) -> _Callback:
        return _Callback(weakref.ref(self), name, given)

    def _reset(self, names: tuple[str, ...], *values: Any) -> Arrays:
        given = {name: np.asarray(value).tolist() for name, value in zip(names, values, strict=True)}
        seed = _seed_of(given["words"]) if "words" in given else given.get("seed")
        return self._host.reset(given.get("ids"), seed)

    def _send(self, some: bool, *values: Any) -> tuple[()]:
        self._host.send(*([] if some else [None]), *values)
        return ()

    def _recv(self) -> tuple[Any, ...]:
        ids, answer = self._host.recv()
        return (ids.astype(self._id_type), *answer)

    # ---- shapes ------------------------------------------------------------------------------------------------

    def _flat(self, actions: Any) -> list[Any]:
        return [jax.lax.stop_gradient(jnp.asarray(value)) for value in self._host.flat_actions(actions)]

    def _answers(self, count: int) -> Shapes:
        kinds = zip(self._host.obs_leaves, self._host.obs_types, strict=True)
        return (
            *(_shape((count, *leaf.shape), kind) for leaf, kind in kinds),
            _shape((count,), np.float32),
            *[_shape((count,), np.bool_)] * 2,
        )

    def _told(self, answer: Sequence[jax.Array], ids: jax.Array) -> Received:
        *obs, reward, terminated, truncated = answer
        return Received(self._host.nest(obs), reward, terminated, truncated, ids)


@dataclass(frozen=True)
class _Callback:
    """A callback that calls a method of a graph. JAX keeps callbacks for ever, so this one does not keep the envs.

    Two callbacks of the same method are equal, so that JAX compiles them once.
    """

    graph: weakref.ref[_Graph]
    name: str
    given: tuple[Any, ...]  # arguments that are known when the graph is made: they say what the values are

    def __call__(self, *values: Any) -> Any:
        graph = self.graph()
        if graph is None:
            with kept_errors():
                raise PoolClosed("the functions that `bind` has returned are gone: keep them, or bind again")
        return getattr(graph, self.name)(*self.given, *values)


def _seed_words(seed: Any) -> Any:
    """Write a seed, or a list of seeds and None, as uint32 [..., 3]: whether there is one, its low and high word."""
    one = np.ndim(seed) == 0
    seeds = [seed] if one else list(seed)
    given = np.array([[value is not None] for value in seeds], np.uint32)
    rows = np.concatenate([given, words_of([0 if value is None else operator.index(value) for value in seeds])], -1)
    return rows[0] if one else rows


def _seed_of(words: list[Any]) -> Any:
    """Read what `_seed_words` has written."""
    if words and isinstance(words[0], list):
        return [_seed_of(row) for row in words]
    given, low, high = words
    return low | high << 32 if given else None


@custom_vmap
def _alone(handle: Any, values: list[Any]) -> tuple[Any, list[Any]]:
    """Return the arguments, unless this is inside a `vmap`, which is refused."""
    return handle, values


@_alone.def_vmap
def _refuse(axis_size: int, in_batched: Any, handle: Any, values: Any) -> Any:
    raise BadCall(
        f"vmap over the envs of a pool would step them {axis_size} times, one after the other: make the pool larger "
        "instead: its num_envs is the batch"
    )


# ---- ways to call the host -------------------------------------------------------------------------------------


class _OrderedCalls:
    """Makes callbacks in the order of the program, by JAX's own tokens."""

    def call(
        self, function: Any, shapes: Shapes, handle: Any, values: list[Any], begins: bool = False
    ) -> tuple[jax.Array, Any]:
        """Return the next handle, and what the function returns. `begins`: any handle will do."""
        pieces = [_cut(value) for value in values]
        parts = tuple((len(cut), value.shape) for cut, value in zip(pieces, values, strict=True))
        joined: Any = _Joined(function, parts)
        flat = [piece for cut in pieces for piece in cut]
        return handle + jnp.uint32(1), io_callback(joined, shapes, *flat, ordered=True)


class _ThreadedCalls:
    """Makes callbacks in the order of their handles, without tokens, that write into the graph's own memory."""

    def __init__(self) -> None:
        if jax.default_backend() != "cpu":
            raise BadCall(f"ordered=False is for JAX on the CPU, and this is {jax.default_backend()}: leave it out")
        self.count: int | None = 0  # calls so far; None after an error, when the next handle is not known

    def call(
        self, function: Any, shapes: Shapes, handle: Any, values: list[Any], begins: bool = False
    ) -> tuple[jax.Array, Any]:
        in_place: Any = _InPlace(function, self, begins)
        kinds = (_shape((), np.uint32), *shapes)
        handle, *answer = buffer_callback(in_place, kinds, has_side_effect=True)(handle, *values)
        return handle, answer


class _InPlace(NamedTuple):
    """A callback that writes into what the graph has allocated."""

    function: Callable[..., Sequence[Any]]
    calls: _ThreadedCalls
    begins: bool

    def __call__(self, _: Any, out: Sequence[Any], handle: Any, *values: Any) -> None:
        given = int(np.asarray(handle))
        expected = self.calls.count
        if expected not in (None, given) and not self.begins:
            with kept_errors():
                raise BadCall(
                    f"this handle is that of call {given}, and {expected} were made since: give each call the handle "
                    "that the one before it returned"
                )
        self.calls.count = None
        answer = self.function(*map(np.asarray, values))
        for there, here in zip(out[1:], answer, strict=True):
            np.asarray(there)[...] = here
        np.asarray(out[0])[...] = self.calls.count = (given + 1) & 0xFFFFFFFF


class _Joined(NamedTuple):
    """A callback that puts arguments together which arrive in pieces."""

    function: Callable[..., Any]
    parts: tuple[tuple[int, tuple[int, ...]], ...]

    def __call__(self, *pieces: Any) -> Any:
        left = iter(pieces)
        whole = [([np.asarray(next(left)) for _ in range(count)], shape) for count, shape in self.parts]
        return self.function(*[cut[0] if len(cut) == 1 else np.concatenate(cut).reshape(shape) for cut, shape in whole])


def _cut(value: jax.Array) -> list[jax.Array]:
    """Cut an array into pieces that are small enough; they are flat if there are several."""
    count = -(-value.size * value.dtype.itemsize // _PIECE)
    return [value] if count <= 1 else jnp.array_split(value.reshape(-1), count)


# ---- errors ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Wait for the envs in the compiled functions that are called inside, and raise the envs' own errors.

    Example:
        with shoal.graph.jax.own_errors():
            state = train(state)
    """
    with host.own_errors():
        try:
            yield
            _barrier()  # a graph may still run when its call has returned
        except Exception:
            _forget_failed_effects()
            raise


def _forget_failed_effects() -> None:
    """Let later calls go on.

    JAX gives the token of the last call with an ordered effect to the next one. The token of a failed call makes all
    later ones fail with the same error. The barrier does not drop it, and no public function of JAX does.
    """
    try:
        _barrier()
    except Exception:
        from jax._src import dispatch

        tokens: Any = dispatch.runtime_tokens
        tokens.clear()


def jit(function: Any = None, **options: Any) -> Any:
    """Compile a function with envs in it by `jax.jit`: a call waits for the envs, and raises their own errors.

    Args:
        function: without it, `jit(**options)` is a decorator.
        options: those of `jax.jit`.
    """
    if function is None:
        return functools.partial(jit, **options)
    compiled = jax.jit(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with own_errors():
            return compiled(*args, **kwargs)

    for name in ("lower", "trace", "eval_shape", "clear_cache"):
        setattr(call, name, getattr(compiled, name))
    return call
