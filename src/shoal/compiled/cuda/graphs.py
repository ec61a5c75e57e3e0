"""Launches that were captured: a graph of one kernel costs a fraction of what Numba's own launch does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from shoal.compiled.cuda.arrays import is_capturing
from shoal.compiled.cuda.build import driver

__all__ = ["Graphs"]

MOST = 64  # callers use the same few arrays again and again


class Graphs:
    """Captured launches, by what they were launched with."""

    def __init__(self) -> None:
        from cuda.bindings import driver as api

        self._api = api
        self._seen: OrderedDict[Hashable, Any] = OrderedDict()  # None where it was launched once, and not captured yet

    def launch(self, key: Hashable, launch: Callable[[Any], None], stream: Any) -> None:
        """Launch what `launch(stream)` launches; the third time and later, without asking it.

        Args:
            key: the same only for launches with the same arguments.
            stream: Numba's. Where somebody captures it into a graph of his own, this becomes a part of that.
        """
        handle = self._handle(stream)
        if key not in self._seen:
            launch(stream)  # compiles, if need be
            self._seen[key] = None
        elif is_capturing(int(handle)):
            launch(stream)
        else:
            graph = self._seen[key]
            if graph is None:
                graph = self._seen[key] = self._capture(launch)
            self._check(self._api.cuGraphLaunch(graph, handle))
        self._seen.move_to_end(key)
        if len(self._seen) > MOST:
            self._forget(self._seen.popitem(last=False)[1])

    def _handle(self, stream: Any) -> Any:
        value = stream.handle
        return self._api.CUstream(int(getattr(value, "value", value) or 0))

    def _capture(self, launch: Callable[[Any], None]) -> Any:
        api, aside = self._api, driver().stream()
        handle = self._handle(aside)
        self._check(api.cuStreamBeginCapture(handle, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
        try:
            launch(aside)
        finally:
            graph = self._check(api.cuStreamEndCapture(handle))
        found = self._check(api.cuGraphInstantiate(graph, 0))
        self._check(api.cuGraphDestroy(graph))
        return found

    def _check(self, result: tuple[Any, ...]) -> Any:
        error, *values = result
        if int(error) != 0:
            raise RuntimeError(f"CUDA: {self._api.cuGetErrorString(error)[1].decode()}")
        return values[0] if values else None

    def _forget(self, graph: Any) -> None:
        if graph is not None:
            self._check(self._api.cuGraphExecDestroy(graph))

    def close(self) -> None:
        """Give all of them back."""
        while self._seen:
            self._forget(self._seen.popitem()[1])
