"""Launches that were captured: a graph of one kernel costs a fraction of what Numba's own launch does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from shoal.compiled.cuda.arrays import bindings, is_capturing
from shoal.compiled.cuda.build import driver

__all__ = ["Graphs"]

MOST = 64  # callers use the same few arrays again and again


class Graphs:
    """Captured launches, by what they were launched with."""

    def __init__(self) -> None:
        self._api = bindings()
        self._fine = self._api.CUresult.CUDA_SUCCESS
        self._streams: dict[int, Any] = {}
        self._known: OrderedDict[Hashable, Any] = OrderedDict()

    def launch(self, key: Hashable, handle: int) -> bool:
        """Launch what was captured under this key; False where nothing was, or must not be used.

        Args:
            handle: a stream's. Where somebody captures it into a graph of his own, graphs cannot be launched on it.
        """
        graph = self._known.get(key)
        if graph is None or is_capturing(handle):
            return False
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = self._api.CUstream(handle)
        if self._api.cuGraphLaunch(graph, stream)[0] is not self._fine:
            self._check(self._api.cuGraphLaunch(graph, stream))
        return True

    def capture(self, key: Hashable, launch: Callable[[Any], None]) -> None:
        """Keep what `launch(stream)` launches; it must have been launched before, so that it is compiled."""
        api, aside = self._api, driver().stream()
        handle = api.CUstream(int(getattr(aside.handle, "value", aside.handle)))
        self._check(api.cuStreamBeginCapture(handle, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
        try:
            launch(aside)
        finally:
            graph = self._check(api.cuStreamEndCapture(handle))
        self._known[key] = self._check(api.cuGraphInstantiate(graph, 0))
        self._check(api.cuGraphDestroy(graph))
        if len(self._known) > MOST:
            self._check(api.cuGraphExecDestroy(self._known.popitem(last=False)[1]))

    def _check(self, result: tuple[Any, ...]) -> Any:
        error, *values = result
        if error != self._fine:
            raise RuntimeError(f"CUDA: {self._api.cuGetErrorString(error)[1].decode()}")
        return values[0] if values else None

    def close(self) -> None:
        """Give all of them back."""
        while self._known:
            self._check(self._api.cuGraphExecDestroy(self._known.popitem()[1]))
