"""Plain values as data: a JSON document beside numpy arrays, and the one file that holds both.

Plain values can be written down in full and read again without running code of others: None, bool, int, float,
complex, str, bytes, list, tuple, dict, set, frozenset, deque, numpy's arrays and scalars without objects in them, its
dtypes, and the random generators of numpy and of Python. Only these exact types: a subclass may hold more than we see.

What was one object is one object again, cycles included. A set comes back equal, but maybe in another order: the order
depends on all that was ever in it, which cannot be read. An env that draws from a set has to sort it first.
"""

from __future__ import annotations

import base64
import json
import math
import os
import random
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import DataError
from shoal.state import generators
from shoal.state.sizes import check_content, check_key, check_zip
from shoal.support.files import replacing

Array = npt.NDArray[Any]
Node = Any  # what JSON can hold: a list is a tag and its parts, all else stands for itself
Place = Any  # where a value is, for messages: a text, or a pair of the place of its container and its key in that

WHAT, VERSION = "shoal snapshot", 1
EQUAL_BYTES = 64 << 20  # of all arrays of equal entries that are written as one: a small file must not fill the memory
INLINE_BYTES = 512  # smaller arrays are in the document: a file of thousands of arrays is slow
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_UNFINISHED = object()


class CannotSave(Exception):
    """Something cannot be saved as it is; the text is the reason."""

    def __init__(self, reason: str, final: bool = False):
        super().__init__(reason)
        self.final = final  # there is no other way either, as pickle would silently lose the same thing


@dataclass(frozen=True)
class Encoded:
    """A value as data: a document for JSON, and the arrays that it refers to by their index."""

    document: Node
    arrays: list[Array]


def encode(value: Any) -> Encoded:
    """A plain value as data, which does not change when the value does. Raises CannotSave if it is not plain."""
    encoder = Encoder()
    return encoder.finish(encoder.node(value, ""))


def decode(encoded: Encoded) -> Any:
    """The value, made anew at each call. Raises DataError, a ValueError, if the document is damaged."""
    return Decoder(encoded.arrays).decode(encoded.document)


class Encoder:
    """Turns values into nodes. The nodes of one encoder refer to each other: decode all of them, in the same order."""

    def __init__(self) -> None:
        self._arrays: list[Array] = []
        self._numbers: dict[int, int] = {}  # by identity; a value gets its number before its parts get theirs
        self._alive: list[Any] = []  # keeps the objects, as a new object may get the id of one that is gone
        self._unfinished: set[int] = set()
        self._found: list[tuple[Place, Array]] = []
        self._equal_bytes = 0

    def node(self, value: Any, place: Place) -> Node:
        """The node of one value."""
        try:
            return self._node(value, place)
        except RecursionError:
            raise CannotSave(f"{words(place)} is nested too deeply") from None

    def finish(self, document: Node) -> Encoded:
        """The document with its arrays. Call it once, after everything was encoded."""
        check_overlap(self._found)
        return Encoded(document, self._arrays)

    def other(self, value: Any, place: Place) -> Node:
        """The node of a value that is not plain. Subclasses know more types."""
        raise CannotSave(f"{words(place)}, a {type(value).__name__}, is no plain data")

    def number(self, value: Any) -> None:
        """Give the value the next number. If the value comes again, its node refers to that number."""
        self._numbers[id(value)] = len(self._alive)
        self._alive.append(value)

    def _node(self, value: Any, place: Place) -> Node:
        kind = type(value)
        if kind is bool or kind is str or value is None:
            return value
        if kind in _ATOMS:
            return _ATOMS[kind](value)
        if id(value) in self._numbers:
            if id(value) in self._unfinished:
                raise CannotSave(f"{words(place)} is a {kind.__name__} that holds itself")
            return ["again", self._numbers[id(value)]]
        if kind in _CONTAINERS:
            return self._container(value, place)
        if kind is np.ndarray:
            return self._array(value, place)
        if isinstance(value, np.generic) and (name := dtype_name(value.dtype)) and kind is value.dtype.type:
            return ["scalar", name, _text(value.tobytes())]
        if isinstance(value, np.dtype) and (name := dtype_name(value)):
            return ["dtype", name]
        return self._generator(value, place) or self.other(value, place)

    def _container(self, value: Any, place: Place) -> Node:
        self.number(value)
        kind = type(value)
        if kind is dict:
            pairs = [(self._node(key, (place, key)), self._node(item, (place, key))) for key, item in value.items()]
            return ["dict", *(node for pair in pairs for node in pair)]
        if kind in _WHOLE:
            self._unfinished.add(id(value))
        nodes = [self._node(item, (place, i)) for i, item in enumerate(value)]
        self._unfinished.discard(id(value))
        return [kind.__name__, *([value.maxlen] if kind is deque else []), *nodes]

    def _array(self, value: Array, place: Place) -> Node:
        name = dtype_name(value.dtype)
        if name is None or not value.itemsize:
            raise CannotSave(f"{words(place)}, an array of {value.dtype}, is no plain data")
        check_owner(value, place)
        self.number(value)
        self._found.append((place, value))
        # The axes keep their order in memory, as the rounding of sums depends on it.
        axes = sorted(range(value.ndim), key=lambda axis: -abs(value.strides[axis]))
        dense = np.array(value.transpose(axes), order="C", copy=True)
        return ["array", name, dense.shape, axes, value.flags.writeable, self._data(dense, name)]

    def _data(self, dense: Array, name: str) -> Node:
        if name:
            data, first = dense.tobytes(), dense.reshape(-1)[:1].tobytes()
            equal = dense.size > 1 and self._equal_bytes + len(data) <= EQUAL_BYTES
            if equal and data == first * dense.size:  # as in the bounds of most spaces
                self._equal_bytes += len(data)
                return ["all", _text(first)]
            if len(data) <= INLINE_BYTES:
                return _text(data)
        self._arrays.append(dense)
        return len(self._arrays) - 1

    def _generator(self, value: Any, place: Place) -> Node:
        """The node of a random generator; None for other values."""
        kind = type(value)
        if isinstance(value, np.random.BitGenerator) and getattr(np.random, kind.__name__, None) is kind:
            self.number(value)
            seeds = getattr(value, "seed_seq", getattr(value, "_seed_seq", None))
            # Generator.spawn asks these how many children there were.
            seeds = seeds.state if type(seeds) is np.random.SeedSequence else seeds
            return ["bits", kind.__name__, self._node(value.state, place), self._node(seeds, place)]
        if kind not in GENERATORS:
            return None
        self.number(value)
        if kind is random.Random:
            return ["random", self._node(value.getstate(), place)]
        if kind is np.random.Generator:
            return ["generator", self._node(value.bit_generator, place)]
        state = value.get_state(legacy=False)
        return ["randomstate", self._node(value._bit_generator, place), state["has_gauss"], _float(state["gauss"])]


class Decoder:
    """Turns nodes into values again."""

    def __init__(self, arrays: Sequence[Array]):
        self._arrays: list[Array | None] = list(arrays)  # None for one that was used: each is one value's
        self._values: list[Any] = []  # by their numbers
        self._equal_bytes = 0

    def decode(self, node: Node) -> Any:
        """The value of a node. Raises DataError if it is damaged."""
        try:
            return self.value(node)
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"the data are damaged ({type(error).__name__}: {error})") from error

    def other(self, tag: str, parts: list[Node]) -> Any:
        """The value of a node that is not plain. Subclasses know more tags."""
        raise DataError(f"the data are damaged: they hold {tag!r}, which is unknown")

    def number(self, value: Any = _UNFINISHED) -> int:
        """Take the next number for the value, as the encoder did; returns the number."""
        self._values.append(value)
        return len(self._values) - 1

    def replace(self, old: Any, new: Any) -> None:
        """Let all later references to the old value get the new one."""
        self._values = [new if value is old else value for value in self._values]

    def value(self, node: Node) -> Any:
        """As `decode`, but errors in a damaged node are raised as they are."""
        if not isinstance(node, list | dict):
            return node
        tag, *parts = node
        if tag == "again":
            found = self._values[parts[0]]
            return found if found is not _UNFINISHED else self.other(tag, parts)
        if tag in _MAKE_ATOM:
            return _MAKE_ATOM[tag](*map(self.value, parts))
        if tag in _GROWING:
            return self._growing(tag, parts)
        if tag == "array":
            return self._values[self.number(self._array(*parts))]
        if tag in _MAKE_WHOLE:
            number = self.number()
            self._values[number] = _MAKE_WHOLE[tag]([self.value(part) for part in parts])
            return self._values[number]
        return self.other(tag, parts)

    def _growing(self, tag: str, parts: list[Node]) -> Any:
        """A container that is made before its parts, so that they may refer to it."""
        made: Any = deque(maxlen=parts[0]) if tag == "deque" else _GROWING[tag]()
        self.number(made)
        if tag == "dict":
            for key, item in zip(parts[::2], parts[1::2], strict=True):
                name = check_key(self.value(key))  # before the item, as numbers were given in this order
                made[name] = self.value(item)
        elif tag == "set":
            made.update([check_key(self.value(part)) for part in parts])
        else:
            made.extend([self.value(part) for part in (parts[1:] if tag == "deque" else parts)])
        return made

    def _array(self, name: str, shape: list[int], axes: list[int], writeable: bool, data: Node) -> Array:
        if not all(type(size) is int and size >= 0 for size in shape):
            raise DataError(f"the data are damaged: no array has the shape {shape!r:.40}")
        dense: Array | None
        if isinstance(data, int):
            dense, self._arrays[data] = self._arrays[data], None
            if dense is None or not dense.itemsize:
                raise DataError("the data are damaged: an array is used twice, or has nothing in it")
            dense = dense.view(_dtype(name)) if name else dense
        else:
            raw = self._equal(_bytes(data[1]), math.prod(shape)) if isinstance(data, list) else _bytes(data)
            dense = np.frombuffer(raw, _dtype(name))
        array: Array = check_content(dense.reshape(shape).copy())
        if axes != list(range(len(shape))):
            array = array.transpose([axes.index(i) for i in range(len(axes))])
        array.flags.writeable = writeable
        return array

    def _equal(self, entry: bytes, count: int) -> bytes:
        self._equal_bytes += len(entry) * count
        if self._equal_bytes > EQUAL_BYTES:
            raise DataError(f"the data are damaged: arrays of equal entries take more than {EQUAL_BYTES >> 20} MiB")
        return entry * count


def words(place: Place) -> str:
    """A place in words: "its attribute 'fish'['a'][3]"."""
    keys: list[str] = []
    while isinstance(place, tuple):
        place, key = place
        keys.insert(0, f"[{key!r}]")
    return f"{place}{''.join(keys)}" or "the value"


def check_owner(array: Array, place: Place) -> None:
    """Refuse an array in the memory of another object, which may change it without the env."""
    owner = memory_owner(array)
    if not isinstance(owner, np.ndarray | bytes | bytearray):
        text = f"{words(place)} is an array in the memory of a {type(owner).__name__}: let the env keep a copy instead"
        raise CannotSave(text, final=True)


def memory_owner(array: Array) -> Any:
    """The innermost object that an array's memory belongs to."""
    inner: Any = array
    while inner is not None:
        owner = inner
        of_numpy = isinstance(owner, np.ndarray) or type(owner).__module__.startswith("numpy")
        inner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None) if of_numpy else None
    return owner


def check_overlap(found: Iterable[tuple[Place, Array]]) -> None:
    """Refuse arrays that share memory: they would come back as separate ones."""
    spans = sorted(((*_span(array), place, array) for place, array in found if array.size), key=lambda span: span[:2])
    reaching: list[tuple[int, int, Place, Array]] = []  # begin before the next span, and end after its start
    for span in spans:
        reaching = [other for other in reaching if other[1] > span[0]]
        for _, _, place, array in reaching:
            writeable = array.flags.writeable or span[3].flags.writeable
            if array is not span[3] and writeable and _share_memory(array, span[3]):
                text = f"{words(place)} and {words(span[2])} are views of the same memory, and would be so no more"
                raise CannotSave(f"{text}: let the env keep one of them", final=True)
        reaching.append(span)


def _span(array: Array) -> tuple[int, int]:
    start = array.__array_interface__["data"][0]
    reach = [stride * (count - 1) for stride, count in zip(array.strides, array.shape, strict=True)]
    return start + sum(min(r, 0) for r in reach), start + sum(max(r, 0) for r in reach) + array.itemsize


def _share_memory(one: Array, other: Array) -> bool:
    shares_memory: Callable[..., bool] = np.shares_memory
    try:
        return shares_memory(one, other, max_work=10_000)
    except RuntimeError:  # too hard to tell
        return True


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """The name that numpy turns into this very type; "" if only its file format can; None if it is not plain."""
    # The cache needs the letter: C types of one size are equal, but have scalars of different types.
    return _dtype_name(dtype, dtype.char)


@lru_cache(maxsize=256)
def _dtype_name(dtype: np.dtype[Any], char: str) -> str | None:
    if dtype.hasobject or dtype.kind not in "biufcmMSUV":
        return None
    if dtype.kind != "V":
        names = [name for name in (dtype.str, char) if np.dtype(name) == dtype and np.dtype(name).char == char]
        return names[0] if names else ""
    try:
        return "" if np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype)) == dtype else None
    except (TypeError, ValueError):
        return None


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(_checked(str, text), validate=True)


def _dtype(name: Any) -> np.dtype[Any]:
    """The type with this name, if `dtype_name` could have given it: numpy makes types of many other things."""
    made: np.dtype[Any] = np.dtype(_checked(str, name))
    if dtype_name(made) != name:
        raise DataError(f"the data are damaged: {name!r:.40} is no plain type")
    return made


def _checked(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise DataError(f"the data are damaged: expected a {kind.__name__}, found a {type(value).__name__}")
    return value


def _float(value: float) -> Node:
    # JSON has no word for nan, which has a payload, nor for infinity.
    return float(value) if math.isfinite(value) else ["float", struct.pack(">d", value).hex()]


_GROWING: dict[str, type] = {"list": list, "dict": dict, "set": set, "deque": deque}
_WHOLE: set[type] = {tuple, frozenset}  # made after their parts, so these cannot refer to them
_CONTAINERS = {*_GROWING.values(), *_WHOLE}
_ATOMS: dict[type, Callable[[Any], Node]] = {
    # Python limits the length of decimal numbers that it reads.
    int: lambda value: value if -(2**63) <= value < 2**63 else ["int", hex(value)],
    float: _float,
    complex: lambda value: ["complex", _float(value.real), _float(value.imag)],
    bytes: lambda value: ["bytes", _text(value)],
    np.str_: lambda value: ["str_", str(value)],
    np.bytes_: lambda value: ["bytes_", _text(bytes(value))],
}
_MAKE_ATOM: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "complex": lambda real, imag: complex(float(real), float(imag)),
    "bytes": _bytes,
    "str_": lambda text: np.str_(_checked(str, text)),
    "bytes_": lambda text: np.bytes_(_bytes(text)),
    "scalar": lambda name, text: check_content(np.frombuffer(_bytes(text), _dtype(name), 1))[0],
    "dtype": lambda name: _dtype(name),
}
_MAKE_WHOLE: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "frozenset": lambda parts: frozenset(map(check_key, parts)),
    "bits": generators.make_bits,
    "generator": generators.make_generator,
    "randomstate": generators.make_random_state,
    "random": generators.make_random,
}


def write_file(path: str | os.PathLike[str], value: Any, what: str = WHAT) -> None:
    """Write a plain value to one file of this kind. Raises CannotSave if something in it is not plain."""
    encoded = encode(value)
    write_document(path, {"what": what, "version": VERSION, "value": encoded.document}, encoded.arrays)


def read_file(path: str | os.PathLike[str], kind: str = WHAT) -> Any:
    """What write_file wrote as this kind of file. Nothing in it is executed or unpickled. Raises as read_document."""
    header, arrays = read_document(path, kind, VERSION)
    try:
        return decode(Encoded(header.get("value"), arrays))
    except DataError as error:
        raise DataError(f"{os.fspath(path)}: {error}") from error


def write_document(path: str | os.PathLike[str], header: dict[str, Any], arrays: Sequence[Array]) -> None:
    """Write a JSON document and arrays to one file, a zip as numpy.savez makes it. It replaces an old file at once.

    The header has "what", the kind of file, so that it is not taken for another, and the "version" of its format.
    """
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        raise FileNotFoundError(
            f"{os.fspath(path)} cannot be written: expected the name of a file in an existing folder"
        )
    members: dict[str, Any] = {f"array_{i}": array for i, array in enumerate(arrays)}
    members["document"] = np.frombuffer(json.dumps(header).encode("ascii"), np.uint8)
    with replacing(target, durable=True) as file:
        np.savez(file, **members)


def read_document(path: str | os.PathLike[str], kind: str, newest: int) -> tuple[dict[str, Any], list[Array]]:
    """The header and the arrays of a file of this kind, up to this version of its format. Nothing is unpickled.

    Raises DataError, a ValueError, if it is damaged, some other file, or from a newer version.
    """
    name = os.fspath(path)  # which refuses the number of a descriptor: open would take it, and close it
    with open(name, "rb") as file:
        try:
            check_zip(file)
            with np.load(file, allow_pickle=False) as members:
                header = json.loads(bytes(members["document"]))
                arrays = [check_content(members[f"array_{i}"]) for i in range(len(members.files) - 1)]
            what, version = header["what"], header["version"]
        except Exception as error:
            raise DataError(f"{name} is damaged or no {kind}") from error
    if what != kind or not isinstance(version, int):
        raise DataError(f"{name} is no {kind}")
    if version > newest:
        raise DataError(f"{name} has format {version} of a newer Shoal, and this one reads up to format {newest}")
    return header, arrays
