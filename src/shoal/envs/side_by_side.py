"""Steps envs of one process so that those that wait do so at the same time, and cheap ones cost no more than in a loop.

The calls of a batch lie open. The caller carries them out one after another, and each env has a thread that takes its
call if the caller has not come to it yet. To wake all threads costs more than the step of a cheap env, so they are
woken at once only where batches were faster that way; this is measured, again and again, on the batches that the user
makes. Where they are left asleep, one more thread watches, and wakes them when a batch takes long. So envs that wait
overlap, also those that wait for each other, in whichever batch they begin to.
"""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from shoal.support.limits import start_thread

PATIENCE = 0.002  # seconds after which the threads help with a batch that the caller has begun alone
TRIAL, LONGEST = 5, 4096  # batches in a trial, and at most between two trials
_TAKEN = object()


class Batch:
    """The calls of one batch, `act(env, argument)` of each env."""

    __slots__ = ("act", "arguments", "expected", "given")

    def __init__(self, act: Callable[[Any, Any], Any], arguments: Sequence[Any]):
        self.act, self.given = act, arguments
        self.arguments = dict(enumerate(arguments))  # by env; each is popped once, by the caller or by a thread
        self.expected = set(self.arguments)  # the envs whose results the caller has not asked for


class Place:
    """The place of one env in a `SideBySide`. A copy of it in a snapshot of the env stands for the same place."""

    def __init__(self, of: SideBySide, index: int):
        self._of, self._index = of, index

    def expects(self, act: Callable[[Any, Any], Any]) -> bool:
        """Whether the batch has such a call for this env, and its result was not asked for yet."""
        batch = self._of.batch
        return batch is not None and batch.act is act and self._index in batch.expected

    def result(self, env: Any) -> Any:
        """The result of the call, which is one of this env."""
        return self._of.result(self._index, env)

    def __reduce__(self) -> Any:
        return _place, (id(self),)


_places: weakref.WeakValueDictionary[int, Place] = weakref.WeakValueDictionary()


def _place(number: int) -> Place | None:
    return _places.get(number)


class SideBySide:
    """Carries out the calls of batches.

    Args:
        envs: what the calls are given; each may be replaced between batches.
        threaded: False leaves everything to the caller's thread.
    """

    def __init__(self, envs: Sequence[Any], threaded: bool):
        self.envs = list(envs)
        self.places = [Place(self, index) for index in range(len(envs))]
        _places.update((id(place), place) for place in self.places)
        self.batch: Batch | None = None
        # An env is never in two calls at once, not even after an interrupt, when a thread may still be in the last one.
        self._locks = [threading.Lock() for _ in envs]
        self._helpers = Helpers(self._work, len(envs)) if threaded and len(envs) > 1 else None
        self._answers: list[SimpleQueue[tuple[Batch, bool, Any]]] = [SimpleQueue() for _ in envs]

    def begin(self, act: Callable[[Any, Any], Any], arguments: Sequence[Any]) -> None:
        """Lay open a batch of calls. `result` then has the result of each, and `end` closes the batch."""
        if self.batch is not None:
            self.batch.arguments.clear()
        self.batch = Batch(act, arguments)
        if self._helpers is not None:
            self._helpers.begin()

    def result(self, index: int, env: Any) -> Any:
        """The result of an env's call, or its exception: carried out here, unless a thread has begun it."""
        batch = self.batch
        assert batch is not None
        batch.expected.discard(index)
        argument = batch.arguments.pop(index, _TAKEN)
        if env is not self.envs[index]:  # it has been put into the place of another one, which counts no more
            self.envs[index], argument = env, batch.given[index]
        if argument is not _TAKEN:
            with self._locks[index]:
                return batch.act(env, argument)
        while True:
            of, succeeded, result = self._answers[index].get()
            if of is batch:  # and not of one that was interrupted
                break
        if not succeeded:
            raise result
        return result

    def end(self) -> set[int]:
        """Close the batch; the envs whose results were not asked for."""
        batch, self.batch = self.batch, None
        if self._helpers is not None:
            self._helpers.end()
        if batch is None or not batch.expected:
            return set()
        batch.arguments.clear()
        return batch.expected

    def all(self, act: Callable[[Any], Any]) -> list[Any]:
        """Carry out `act(env)` for all envs; the results, or the first exception, once all are done."""
        self.begin(lambda env, _: act(env), [None] * len(self.envs))
        results, errors = [], []
        try:
            for index in range(len(self.envs)):
                try:
                    results.append(self.result(index, self.envs[index]))
                except Exception as error:
                    errors.append(error)
        finally:
            self.end()
        if errors:
            raise errors[0]
        return results

    def close(self) -> None:
        """End the threads."""
        if self._helpers is not None:
            self._helpers.close()

    def _work(self, index: int) -> None:
        """In the thread of an env: carry out its call, if it is still there."""
        batch = self.batch
        argument = _TAKEN if batch is None else batch.arguments.pop(index, _TAKEN)
        if batch is None or argument is _TAKEN:
            return
        with self._locks[index]:
            try:
                answer = batch, True, batch.act(self.envs[index], argument)
            except BaseException as error:
                answer = batch, False, error
        self._answers[index].put(answer)


class Helpers:
    """A thread for each env, and how it is decided whether they help with a batch from its beginning."""

    def __init__(self, work: Callable[[int], None], count: int):
        self._work, self._count = work, count
        self._calls: list[SimpleQueue[bool]] = []  # one for each thread: True to look for work, False to leave
        self._under_way = self._closed = False
        self._number = 0  # of the batch
        self._late = False  # whether the watch has woken the threads
        self._watch, self._guard = threading.Event(), threading.Thread(target=self._look, daemon=True)
        self._choice = Choice()
        self._began = 0.0

    def begin(self) -> None:
        """A batch begins: wake the threads, or have it watched."""
        self._number += 1
        self._under_way, self._late = True, False
        if self._choice.wakes:
            self._wake()
        elif not self._watch.is_set():
            self._watch.set()
            if not self._guard.is_alive():
                start_thread(self._guard)
        self._began = time.perf_counter()

    def end(self) -> None:
        """The batch is over."""
        self._under_way = False
        self._choice.learn(time.perf_counter() - self._began)

    def close(self) -> None:
        """Tell all threads to leave."""
        self._closed = True
        self._watch.set()
        for calls in self._calls:
            calls.put(False)

    def _wake(self) -> None:
        while len(self._calls) < self._count:
            index, calls = len(self._calls), SimpleQueue[bool]()
            # Daemon: an env that never returns must not keep the interpreter from leaving.
            start_thread(threading.Thread(target=self._serve, args=(index, calls), daemon=True))
            self._calls.append(calls)
        for calls in self._calls:
            calls.put(True)

    def _serve(self, index: int, calls: SimpleQueue[bool]) -> None:
        while calls.get():
            self._work(index)

    def _look(self) -> None:
        """In the thread that watches: wake the others for a batch that is still the same after a while."""
        while not self._closed:
            seen = self._number
            time.sleep(PATIENCE)
            if self._number != seen:
                continue
            if self._under_way and not self._late:
                self._late = True
                self._wake()
            self._watch.clear()
            if self._number == seen and not self._closed:  # no other batch has begun in between
                self._watch.wait()


class Choice:
    """Whether to wake the threads for the next batch: what took less time in the last trials of both ways.

    The other way is tried again after twice as many batches each time, and both are when batches take much longer.
    """

    def __init__(self) -> None:
        self.wakes = True  # first, as an env may wait from its first step on
        self._typical: dict[bool, float] = {}  # seconds of a batch; the way that is not in use is there in trials only
        self._last: deque[float] = deque(maxlen=TRIAL)
        self._left, self._span, self._slow = TRIAL, TRIAL, 0

    def learn(self, seconds: float) -> None:
        """Take note of how long a batch took."""
        self._last.append(seconds)
        self._left -= 1
        known = self._typical.get(self.wakes)
        self._slow = self._slow + 1 if known is not None and seconds > 3 * known else 0
        if self._slow == TRIAL:  # it is not what it was
            self._typical.clear()
            self._span = TRIAL
        if self._left == 0 or self._slow == TRIAL:
            self._typical[self.wakes] = statistics.median(self._last)
            self._next()

    def _next(self) -> None:
        """Try the other way for some batches, or go on with the better one for many."""
        if (not self.wakes) not in self._typical:
            self.wakes, self._left = not self.wakes, TRIAL
        else:
            self.wakes = self._typical[True] < self._typical[False]
            self._span = self._left = min(2 * self._span, LONGEST)
            del self._typical[not self.wakes]
        self._last.clear()
        self._slow = 0
