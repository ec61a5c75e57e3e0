"""A thread that starts one worker in the place of another one, while the rest of the pool goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shoal.backends.base import Worker
from shoal.errors import ShoalError, StartError
from shoal.support.deadline import Deadline


class Replacement:
    """The start of one new worker.

    Attributes:
        old: the worker that is gone.
        worker: the new one, as soon as there is one.
        error: why there will be none.
        over: whether the thread is done.

    Args:
        delay: seconds to wait before.
        start: starts the worker, and puts it into `worker`.
        wake_pool: called when it is over.
    """

    def __init__(self, old: Worker, delay: float, start: Callable[[Replacement], None], wake_pool: Callable[[], None]):
        self.old = old
        self.worker: Worker | None = None
        self.error: ShoalError | None = None
        self.over = False
        self._delay, self._start, self._wake_pool = delay, start, wake_pool
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shoal-replacement-{old.index}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if not self._cancelled.wait(self._delay):
                self._start(self)
        except ShoalError as error:
            self._undo(error)
        except Exception as error:
            self._undo(StartError(f"worker {self.old.index} could not be started again: {error}"))
        self.over = True
        self._wake_pool()

    def _undo(self, error: ShoalError) -> None:
        self.error = error
        if self.worker is not None:
            self.worker.close(Deadline.after(0))

    def wait(self, seconds: float | None) -> bool:
        """Whether it is over by then."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Stop it, whatever it has come to, and leave nothing behind."""
        self._cancelled.set()
        while self._thread.is_alive():
            if self.worker is not None:
                self.worker.condemn("was ended because the pool is being closed")
            self._thread.join(0.05)
        if self.worker is not None:
            self.worker.close(Deadline.after(1.0))
