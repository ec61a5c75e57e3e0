"""Changes files: their bytes, or what is in them, with checksums that are right again."""

from __future__ import annotations

import copy
import io
import json
import random
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np

# Values are shared by reference: forty pairs of one pair are 2**40 parts for those that go through them all.
_PAIRS = ["list", ["tuple", 1], *[["tuple", ["again", -2], ["again", -2]]] * 40]
_DEEP = ["list", ["tuple", 1], *[["tuple", ["again", -2]]] * 3000]
NODES: list[Any] = [
    None, True, False, 0, 1, -1, 5, 255, 625, -900000000, 2**31, 2**32 - 1, 2**53, 2**60, 2**63 - 1, -(2**63), 2**64,
    10**30, 0.5, -0.0, 1e300, float("nan"), float("inf"), "", "O", "<f8", "|b1", "<U2000000", "PCG64", "MT19937", "a",
    "pickle", "own", "fields", "serial", "threads", "compiled", "x" * 5000, [], {}, [[]], [0], {"array": 0}, ["list"],
    ["tuple"], ["dict"], ["again", 0], ["again", -1], ["int", "0x" + "f" * 20000], ["float", "7ff8000000000000"],
    ["bytes", "AAAA"], ["dtype", "O"], ["dtype", "<f8"], ["scalar", "|b1", "/w=="], ["str_", _PAIRS], ["deque", 3, 1],
    ["array", "|b1", [3], [0], True, "/wAB"], ["array", "<U1", [1], [0], True, "////fw=="], ["set", 1, 2],
    ["array", "<f8", [2**60], [0], True, ["all", "AAAAAAAAAAA="]], ["array", "<f8", [-1], [0], True, 0],
    ["array", "<f8", [2**31], [0], True, ["all", "AAAAAAAAAAA="]], ["array", "<f8", [1], [0], True, 0],
    _PAIRS, _DEEP, [*_PAIRS, ["set", ["again", -1]]], ["dict", [*_PAIRS, ["set", ["again", -2]]], 1], ["random", 1],
    [*_DEEP, ["set", ["again", -2]]], ["generator", ["again", 0]], ["constant", "function", "os", "system", ""],
    ["bits", "Philox", ["dict", "buffer_pos", -900000000], None], ["record", "gymnasium.spaces.box", "Box", "a", 1],
]  # fmt: skip
SHAPES = [f"({2**60},)", f"({2**31},)", "(0,)", "()", "(-1,)", "(1, 2, 3)", "(1" + ", 1" * 70 + ")"]
TYPES = ["|O", "<f8", "|b1", "|V0", "<U1", "<i4", "|S7", "<f2"]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """The file with one to four changes."""
    change_bytes = rng.random() < 0.2
    for _ in range(rng.choice((1, 1, 1, 1, 2, 4))):
        try:
            changed = _bytes(data, rng) if change_bytes else _structure(data, rng)
        except Exception:
            changed = _bytes(data, rng)  # an earlier change has left nothing to find one's way in
        data = changed
    return data


def _bytes(data: bytes, rng: random.Random) -> bytes:
    start, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 4, 8, 64, 1000))
    head, part, tail = data[:start], data[start : start + length], data[start + length :]
    kind = rng.choice(("flip", "flip", "cut", "end", "double", "random", "big"))
    if kind == "flip" and part:
        return head + bytes([part[0] ^ (1 << rng.randrange(8))]) + part[1:] + tail
    if kind == "cut":
        return head + tail
    if kind == "end":
        return head
    if kind == "double":
        return head + part * rng.choice((2, 3, 50)) + tail
    if kind == "big":  # what may be a length says that it is one
        return head + rng.choice((2**60, 2**32 - 1, 2**31, 0)).to_bytes(8, "little")[:length] + tail
    return head + rng.randbytes(length) + tail


def _structure(data: bytes, rng: random.Random) -> bytes:
    if data[:2] == b"PK":
        return _zip(data, rng)
    if data[:1] == b"{":
        return _json(data.decode(), rng).encode()
    return _bytes(data, rng)


def _zip(data: bytes, rng: random.Random) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as members:
        parts = {name: members.read(name) for name in members.namelist()}
    name = "document.npy" if rng.random() < 0.75 else rng.choice(sorted(parts))
    if name == "document.npy":
        document = bytes(np.load(io.BytesIO(parts[name]))).decode()
        parts[name] = _npy(np.frombuffer(_json(document, rng).encode(), np.uint8))
    else:
        parts[name] = _array(parts[name], rng)
    if rng.random() < 0.02:
        parts.pop(rng.choice(sorted(parts)))
    made = io.BytesIO()
    packed = zipfile.ZIP_DEFLATED if rng.random() < 0.02 else zipfile.ZIP_STORED
    with zipfile.ZipFile(made, "w", packed) as members:
        for name, part in parts.items():
            members.writestr(zipfile.ZipInfo(name), part, packed)
    return made.getvalue()


def _npy(array: Any) -> bytes:
    made = io.BytesIO()
    np.save(made, array)
    return made.getvalue()


def _array(data: bytes, rng: random.Random) -> bytes:
    """An array with another value, type or shape, or a header that says so."""
    kind = rng.choice(("value", "type", "shape", "says shape", "says type"))
    array = np.load(io.BytesIO(data))
    if kind == "value" and array.nbytes:
        raw = bytearray(array.tobytes())
        for _ in range(rng.choice((1, 8))):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return _npy(np.frombuffer(bytes(raw), array.dtype).reshape(array.shape))
    if kind == "type":
        return _npy(np.zeros(array.shape, rng.choice([one for one in TYPES if one != "|O"])))
    if kind == "shape":
        return _npy(np.zeros(rng.choice([(0,), (), (1, 1), (7,), (3, 0)]), array.dtype))
    header = np.lib.format.header_data_from_array_1_0(array)
    shape = rng.choice(SHAPES) if kind == "says shape" else repr(header["shape"])
    descr = rng.choice(TYPES) if kind == "says type" else header["descr"]
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (64 - (len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + array.tobytes()


def _json(text: str, rng: random.Random) -> str:
    """A document with a part changed. A part that is a document itself, as the state of an env is, may be entered."""
    holder = [json.loads(text)]
    places = list(_places(holder))
    container, key = rng.choice(places)
    inner = [place for place in places if _is_document(place[0][place[1]])]
    if inner and rng.random() < 0.7:
        container, key = rng.choice(inner)
    value = container[key]
    if _is_document(value):
        container[key] = _json(value, rng)
    else:
        _change(container, key, places, rng)
    return json.dumps(holder[0])


def _is_document(value: Any) -> bool:
    return isinstance(value, str) and value[:1] == "{" and len(value) > 2


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a document, with each key in it."""
    rest = [value]
    while rest:
        container = rest.pop()
        for key in list(container) if isinstance(container, dict) else range(len(container)):
            yield container, key
            if isinstance(container[key], dict | list):
                rest.append(container[key])


def _change(container: Any, key: Any, places: list[tuple[Any, Any]], rng: random.Random) -> None:
    kind = rng.choice(("node",) * 3 + ("near",) * 4 + ("other", "remove", "double", "rename", "deep"))
    value = container[key]
    if kind == "near" and type(value) in (int, float):
        container[key] = rng.choice((value + 1, value - 1, -value, value * 2**32, value // 2, float(value)))
    elif kind == "near" and isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        container[key] = value[:at] + rng.choice("09AZaz/+|<>. \u0000\ud800") * rng.randrange(3) + value[at + 1 :]
    elif kind == "other":
        other, there = rng.choice(places)
        container[key] = copy.deepcopy(other[there])
    elif kind == "remove":
        del container[key]
    elif kind == "double" and isinstance(container, list):
        container.insert(key, copy.deepcopy(value))
    elif kind == "rename" and isinstance(container, dict):
        container[rng.choice(("", "what", "env", "count", "backend", "x"))] = container.pop(key)
    elif kind == "deep":
        for _ in range(rng.choice((1, 50, 3000))):
            value = ["list", value]
        container[key] = value if json_can(value) else None
    else:
        container[key] = copy.deepcopy(rng.choice(NODES))


def json_can(value: Any) -> bool:
    """Whether Python's own writer gets to the end of it."""
    try:
        json.dumps(value)
    except RecursionError:
        return False
    return True
