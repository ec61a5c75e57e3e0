"""Arrays on a GPU, given to other libraries and taken from them without a copy; streams, and launches as graphs."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.compiled.cuda.build import driver, simulated

CUDA_DEVICE = 2  # as DLPack numbers kinds of devices
LEGACY_STREAM = 1
MOST_GRAPHS = 64  # to keep: callers use the same few arrays again and again
MOST_SEEN = 1024  # keys to remember: a caller may bring new arrays all the time


class Streams:
    """The streams that work goes on, and the waits between them."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}
        self.current = 0  # the last one that was used, as a number

    def use(self, handle: int) -> Any:
        """Return Numba's stream for this number. Work on it waits for what was launched on another one before."""
        if simulated():
            return 0
        if handle not in self._known:
            self._known[handle] = _stream(handle)
        if handle != self.current and not is_capturing(handle):  # a caller that captures orders its streams itself
            self.let_wait(handle)
            self.current = handle
        return self._known[handle]

    def number(self, handle: int) -> int:
        """Use this stream, and return its number."""
        if handle != self.current:
            self.use(handle)
        return handle

    # Copies go on the stream that was used last: PyTorch's streams and the default one do not wait for each other.

    @property
    def last(self) -> Any:
        """Return Numba's stream that was used last."""
        return self.use(self.current)

    def fetch(self, array: Any) -> npt.NDArray[Any]:
        """Return a copy of an array in the host's memory."""
        found: npt.NDArray[Any] = np.asarray(array.copy_to_host(stream=self.last))
        if not simulated():
            self.last.synchronize()
        return found

    def put(self, array: Any, values: npt.NDArray[Any]) -> None:
        """Overwrite an array by one in the host's memory."""
        array.copy_to_device(values, stream=self.last)
        if not simulated():
            self.last.synchronize()  # the caller may free the host's memory after this

    def zeros(self, shape: Any, dtype: Any) -> Any:
        """Make a new array on the GPU."""
        if simulated():
            return driver().to_device(np.zeros(shape, dtype))
        array = driver().device_array(shape, dtype)
        self.clear(array)
        return array

    def clear(self, array: Any) -> None:
        """Overwrite an array by zeros."""
        if simulated():
            array.copy_to_device(np.zeros(array.shape, array.dtype))
        elif array.size:
            driver().cudadrv.driver.device_memset(array, 0, array.nbytes, stream=self.last)

    def let_wait(self, other: int) -> None:
        """Make another stream wait for what was launched on the current one."""
        if simulated() or other == self.current or {other, self.current} <= {0, LEGACY_STREAM}:
            return
        event = driver().event(timing=False)
        event.record(_stream(self.current))
        event.wait(_stream(other))


def _stream(handle: int) -> Any:
    return driver().external_stream(handle) if handle else driver().default_stream()


@functools.cache
def bindings() -> Any:
    """Return the driver's functions."""
    from cuda.bindings import driver as api

    return api


def is_capturing(handle: int) -> bool:
    """Say whether a caller is capturing this stream: what is launched on it becomes part of the caller's graph."""
    if handle in (0, LEGACY_STREAM):
        return False
    api = bindings()
    error, status = api.cuStreamIsCapturing(api.CUstream(handle))
    return int(error) == 0 and bool(status != api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


class Graphs:
    """Captured launches, by a key of what they were launched with.

    A graph of one kernel costs a fraction of what Numba's own launch does.
    """

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
        if len(self._known) > MOST_GRAPHS:
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


class DeviceArray:
    """An array on the GPU that PyTorch, JAX and CuPy take without a copy, by DLPack or __cuda_array_interface__.

    `torch.from_dlpack(array)`, `jax.dlpack.from_dlpack(array)`, `cupy.asarray(array)`; `np.asarray(array)` copies it.
    `CudaEnvs` makes them, of Numba's `array` and the `streams` on which its kernels run.
    """

    def __init__(self, array: Any, streams: Streams):
        self.array, self.streams = array, streams
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype: np.dtype[Any] = np.dtype(array.dtype)
        self._view: Any = None

    @property
    def pointer(self) -> int:
        """Return its address on the GPU."""
        return int(self.array.__cuda_array_interface__["data"][0])

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        described = dict(self.array.__cuda_array_interface__)
        described["stream"] = self.streams.current or LEGACY_STREAM
        return described

    def __dlpack_device__(self) -> tuple[int, int]:
        if simulated():
            raise BufferError("a simulated GPU has no memory that other libraries could read: use np.asarray(array)")
        return CUDA_DEVICE, driver().current_context().device.id

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        if stream is not None and stream != -1:
            self.streams.let_wait(stream)
        if self._view is None:
            try:
                from cuda.core.utils import StridedMemoryView
            except ImportError:
                from cuda.core.experimental.utils import StridedMemoryView
            self._view = StridedMemoryView.from_cuda_array_interface(self.array, stream_ptr=-1)
        return self._view.__dlpack__(stream=-1, **options)

    def numpy(self) -> npt.NDArray[Any]:
        """Return a copy in the host's memory."""
        return self.streams.fetch(self.array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("the array lies on a GPU: it cannot be had without a copy")
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype})"


def pointer_of(array: Any) -> tuple[Any, int]:
    """Return a key of an array's memory on the GPU, and the stream that it is ready on; (None, 0) if it is not there.

    Arrays that a kernel would treat differently have different keys. Every step calls this, so it must be fast.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        if not array.is_cuda:
            return None, 0
        # The same as torch.cuda.current_stream(device).cuda_stream, in a tenth of the time.
        stream = torch._C._cuda_getCurrentRawStream(array.get_device())
        return (array.data_ptr(), array.dtype, array.shape, array.stride()), stream
    if isinstance(array, DeviceArray):
        return (array.pointer, array.dtype, array.shape, None), array.streams.current
    if hasattr(array, "block_until_ready"):
        array.block_until_ready()  # JAX has streams of its own
    described = getattr(array, "__cuda_array_interface__", None)
    if described is None:
        return None, 0
    stream = described.get("stream") or 0
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        stream = int(cupy.cuda.get_current_stream().ptr)
    return (*described["data"], described["typestr"], described["shape"], described.get("strides")), stream
