"""Launches as captured CUDA graphs: a graph of one kernel costs a fraction of what Numba's own launch does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from shoal.compiled.cuda.arrays import bindings, is_capturing
from shoal.compiled.cuda.build import driver

MOST = 64  # graphs to keep: callers use the same few arrays again and again
MOST_SEEN = 1024  # keys to remember: a caller may bring new arrays all the time


class Graphs:
    """Captured launches, by a key of what they were launched with."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()  # keys that came once
        self._api, self._fine = None, None  # the driver's functions, and its result for success, once there is a graph
        self._streams: dict[int, Any] = {}
        self._known: OrderedDict[Hashable, Any] = OrderedDict()

    def launch(self, key: Hashable, handle: int) -> bool:
        """Launch what was captured under this key; return False if there is nothing, or it must not be used.

        Args:
            handle: a stream's. While a caller captures the stream into another graph, none can be launched on it.
        """
        graph = self._known.get(key)
        if graph is None or is_capturing(handle):
            return False
        api: Any = self._api
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = api.CUstream(handle)
        if api.cuGraphLaunch(graph, stream)[0] is not self._fine:
            _checked(api.cuGraphLaunch(graph, stream))
        return True

    def capture_repeated(self, key: Hashable, launch: Callable[[Any], None]) -> None:
        """Capture what `launch(stream)` launches, if its key comes for the second time."""
        if key in self._seen:
            self._seen.discard(key)
            self._capture(key, launch)
        else:
            if len(self._seen) > MOST_SEEN:
                self._seen.clear()
            self._seen.add(key)

    def _capture(self, key: Hashable, launch: Callable[[Any], None]) -> None:
        api, aside = bindings(), driver().stream()
        self._api, self._fine = api, api.CUresult.CUDA_SUCCESS
        handle = api.CUstream(int(getattr(aside.handle, "value", aside.handle)))
        _checked(api.cuStreamBeginCapture(handle, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
        try:
            launch(aside)
        finally:
            graph = _checked(api.cuStreamEndCapture(handle))
        self._known[key] = _checked(api.cuGraphInstantiate(graph, 0))
        _checked(api.cuGraphDestroy(graph))
        if len(self._known) > MOST:
            _checked(api.cuGraphExecDestroy(self._known.popitem(last=False)[1]))

    def close(self) -> None:
        """Free all graphs, and forget the keys."""
        self._seen.clear()
        while self._known:
            _checked(bindings().cuGraphExecDestroy(self._known.popitem()[1]))


def _checked(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if error != bindings().CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA: {bindings().cuGetErrorString(error)[1].decode()}")
    return values[0] if values else None
