"""Some envs at a time, in the words of TorchRL's AsyncEnvPool: send to envs, and receive those that are done first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDictBase

from shoal.pool import Pool
from shoal.support.checks import Ids, check_ids

__all__ = ["AsyncWords"]

_STEP, _RESET, _BOTH, _SECOND = "step", "reset", "step and reset", "reset after a step"
EnvIndex = int | Sequence[int] | None


class _Flight(NamedTuple):
    """What an env was asked: `sent` is the TensorDict that was sent, and `row` the env's row in it."""

    kind: str
    sent: Any
    row: int


class _Parcel(NamedTuple):
    """Answers that were not asked for yet: the TensorDicts of a result, with a row for each of the ids."""

    ids: Ids
    results: tuple[Any, ...]

    def part(self, rows: Any) -> _Parcel:
        """Return some of the rows."""
        index = torch.from_numpy(np.arange(len(self.ids))[rows])
        return _Parcel(self.ids[rows], tuple([one[index] for one in self.results]))


def _joined(parcels: Sequence[_Parcel]) -> _Parcel:
    """Join parcels, in the order of the envs."""
    if len(parcels) == 1:
        return parcels[0]
    ids = np.concatenate([parcel.ids for parcel in parcels])
    results = [torch.cat(list(parts)) for parts in zip(*[parcel.results for parcel in parcels], strict=True)]
    return _Parcel(ids, tuple(results)).part(np.argsort(ids))


class AsyncWords:
    """The methods of AsyncEnvPool that send and receive, for an env of TorchRL over a pool."""

    pool: Pool
    num_envs: int
    min_get = 1  # how many results a recv waits for, if it is not told

    _answer: Any
    _first_answer: Any
    _actions: Any
    step_mdp: Any

    def _start_async(self) -> None:
        self._flying: dict[int, _Flight] = {}  # by env; until its answer is taken from the pool
        self._parcels: dict[str, list[_Parcel]] = {_STEP: [], _RESET: [], _BOTH: []}  # until they are received
        self._ended: dict[int, Any] = {}  # by env: its last step, while it is being reset

    def _check_none_flies(self) -> None:
        if self._flying or any(self._parcels.values()):
            raise RuntimeError(
                f"envs {self._busy()} were sent to, and their results not received: receive them before all are "
                "stepped or reset"
            )

    def _busy(self) -> list[int]:
        waiting = [int(i) for parcels in self._parcels.values() for parcel in parcels for i in parcel.ids]
        return sorted({*self._flying, *waiting})

    # ---- the words of AsyncEnvPool -----------------------------------------------------------------------------

    def async_step_send(self, tensordict: TensorDictBase, env_index: EnvIndex = None) -> None:
        """Start a step of the envs of `env_index`, or of the entry "env_index", or of all."""
        self._launch(_STEP, tensordict, env_index)

    def async_step_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return the results of steps, with the entry "env_index", once `min_get` are there.

        Args:
            env_index: wait for this env alone, whose result has no batch size.
            max_get: how many results there may be; by default all that are there.
            timeout: seconds. With it, `max_get` results are waited for, and at the end `min_get` will do.

        Raises:
            TimeoutError: fewer than `min_get` were there in time. They stay for the next call.
        """
        return self._receive(_STEP, min_get, env_index, max_get, timeout)[0]

    def async_step_and_maybe_reset_send(self, tensordict: TensorDictBase, env_index: EnvIndex = None) -> None:
        """Start a step of envs, which are reset after it if their episodes are over."""
        self._launch(_BOTH, tensordict, env_index)

    def async_step_and_maybe_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> tuple[Any, Any]:
        """Return the results of steps, and what the next steps begin with. Arguments as for `async_step_recv`."""
        result, following = self._receive(_BOTH, min_get, env_index, max_get, timeout)
        return result, following

    def async_reset_send(self, tensordict: TensorDictBase | None = None, env_index: EnvIndex = None) -> None:
        """Start a reset of the envs of `env_index`, or of the entry "env_index", or of all."""
        self._launch(_RESET, tensordict, env_index)

    def async_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return the first observations of envs that were reset. Arguments as for `async_step_recv`."""
        return self._receive(_RESET, min_get, env_index, max_get, timeout)[0]

    # ---- sending -----------------------------------------------------------------------------------------------

    def _launch(self, kind: str, tensordict: Any, env_index: EnvIndex) -> None:
        with self.pool.turn:
            ids, sent = self._addressed(tensordict, env_index)
            busy = sorted({*ids.tolist()} & {*self._busy()})
            if busy:
                raise RuntimeError(f"envs {busy} are busy: receive their results before you send to them again")
            if kind == _RESET:
                self.pool.async_reset(ids)
            else:
                self.pool.send(self._actions.decode(sent), ids)
            for row, env in enumerate(ids.tolist()):
                self._flying[env] = _Flight(kind, sent, row)

    def _addressed(self, tensordict: Any, env_index: EnvIndex) -> tuple[Ids, Any]:
        """Return the envs that are meant, and the TensorDict with a row for each of them."""
        if env_index is None and tensordict is not None and "env_index" in tensordict:
            env_index = tensordict["env_index"]
            env_index = env_index.tolist() if isinstance(env_index, torch.Tensor) else env_index
        if env_index is None:
            return np.arange(self.num_envs), tensordict
        ids = check_ids([env_index] if isinstance(env_index, int) else list(env_index), self.num_envs)
        if tensordict is not None and not tensordict.batch_dims:
            tensordict = tensordict.unsqueeze(0)
        return ids, tensordict

    # ---- receiving ---------------------------------------------------------------------------------------------

    def _receive(
        self, kind: str, min_get: int | None, env_index: int | None, max_get: int | None, timeout: float | None
    ) -> tuple[Any, ...]:
        with self.pool.turn:
            if env_index is not None:
                return self._receive_one(kind, env_index)
            least = self.min_get if min_get is None else min_get
            asked = sum(flight.kind in _KINDS[kind] for flight in self._flying.values()) + self._arrived(kind)
            _check_numbers(least, max_get, timeout, asked, kind)
            most = asked if max_get is None else min(max_get, asked)
            until = None if timeout is None else time.monotonic() + timeout
            while self._arrived(kind) < least:
                self._take_in(1, until)
            if until is None:
                self._take_in(0, None)
            while until is not None and self._arrived(kind) < most:
                try:
                    self._take_in(1, until)
                except TimeoutError:
                    break
            found = _joined(self._parcels[kind])
            self._parcels[kind] = [found.part(slice(most, None))] if len(found.ids) > most else []
            found = found.part(slice(most)) if len(found.ids) > most else found
            for one in found.results:
                one.set("env_index", NonTensorStack(*found.ids.tolist()))
            return found.results

    def _receive_one(self, kind: str, env: int) -> tuple[Any, ...]:
        """Wait for the result of one env, and return it without a batch size."""
        while env in self._flying:
            self._take_in(1, None)
        for place, parcel in enumerate(self._parcels[kind]):
            at = parcel.ids == env
            if at.any():
                rest = [parcel.part(~at)] if len(parcel.ids) > 1 else []
                self._parcels[kind][place : place + 1] = rest
                results = tuple([one[0] for one in parcel.part(at).results])
                for one in results:
                    one.set("env_index", env)
                return results
        raise RuntimeError(f"env {env} was not sent to: there is no {kind} to wait for")

    def _arrived(self, kind: str) -> int:
        return sum(len(parcel.ids) for parcel in self._parcels[kind])

    def _take_in(self, least: int, until: float | None) -> None:
        """Take what the pool has, once `least` envs are done, and sort it by what was asked."""
        ready = self.pool.wait_any(least, None if until is None else max(0.0, until - time.monotonic()))
        if not len(ready.ids):
            return
        flights = [self._flying.pop(env) for env in ready.ids.tolist()]
        kinds = {flight.kind for flight in flights}
        step = self._answer(ready) if kinds & {_STEP, _BOTH} else None
        first = self._first_answer(ready) if kinds & {_RESET, _SECOND} else None
        for kind in kinds:
            rows = np.array([i for i, flight in enumerate(flights) if flight.kind == kind])
            whole = len(rows) == len(flights)
            ids = ready.ids[rows]
            answer: Any = first if kind in (_RESET, _SECOND) else step
            answer = answer if whole else answer[torch.from_numpy(rows)]
            self._sort_in(kind, ids, answer, [flights[i] for i in rows.tolist()])

    def _sort_in(self, kind: str, ids: Ids, answer: Any, flights: Sequence[_Flight]) -> None:
        if kind == _RESET:
            self._parcels[_RESET].append(_Parcel(ids, (answer,)))
        elif kind == _STEP:
            self._parcels[_STEP].append(_Parcel(ids, (_with_next(flights, answer),)))
        elif kind == _BOTH:
            self._sort_in_both(ids, _with_next(flights, answer))
        else:
            result = torch.cat([self._ended.pop(env) for env in ids.tolist()])
            following = self.step_mdp(result)
            self._parcels[_BOTH].append(_Parcel(ids, (result, following.update(answer))))

    def _sort_in_both(self, ids: Ids, result: Any) -> None:
        """Reset the envs whose episodes are over; their results wait for that."""
        over = result["next", "done"].reshape(len(ids), -1).any(-1).cpu().numpy()
        if over.any():
            self.pool.async_reset(ids[over])
            for row in np.flatnonzero(over).tolist():
                self._ended[int(ids[row])] = result[row : row + 1]
                self._flying[int(ids[row])] = _Flight(_SECOND, None, 0)
        if not over.all():
            going = _Parcel(ids, (result,)) if not over.any() else _Parcel(ids, (result,)).part(~over)
            self._parcels[_BOTH].append(_Parcel(going.ids, (*going.results, self.step_mdp(*going.results))))


_KINDS = {_STEP: {_STEP}, _RESET: {_RESET}, _BOTH: {_BOTH, _SECOND}}  # what a recv of each kind waits for


def _with_next(flights: Sequence[_Flight], answer: Any) -> Any:
    """Return what was sent, with the answer as its "next"."""
    if all(flight.sent is flights[0].sent for flight in flights):
        rows = [flight.row for flight in flights]
        sent = flights[0].sent
        root = sent.copy() if rows == list(range(len(sent))) else sent[torch.tensor(rows)]
    else:
        root = torch.cat([flight.sent[flight.row : flight.row + 1] for flight in flights])
    root.pop("env_index", None)
    return root.set("next", answer)


def _check_numbers(least: int, most: int | None, timeout: float | None, asked: int, kind: str) -> None:
    if least < 1:
        raise ValueError(f"min_get: expected a positive number, found {least}")
    if most is not None and most < least:
        raise ValueError(f"max_get: expected at least min_get={least}, found {most}")
    if timeout is not None and timeout < 0:
        raise ValueError(f"timeout: expected a number of seconds, found {timeout}")
    if least > asked:
        raise RuntimeError(f"min_get={least}, and only {asked} envs were sent to for a {kind}: send to more first")
