"""Values and arrays to bytes and back: msgpack maps in the msgpack-numpy convention, strictly decoded.

The FORMAT is msgpack-numpy's; its decoder is not used, since it unpickles kind `O` and trusts dtype, shape
and length from the network. Here every dtype is on an allow-list, every size is exact, nesting is bounded,
and any deviation is a WireError. Arrays of 4 KiB and more travel as raw frames beside the map and are viewed
in place. Which fields a message has is decided in `messages.py`, never here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack  # type: ignore[import-untyped,unused-ignore]
import numpy as np

Buffer = bytes | memoryview
"""One frame as received or as handed to a socket; a memoryview is of bytes (format B)."""

MAX_DEPTH = 8
MAX_NDIM = 8
MAX_BODY_BYTES = 64 * 1024
MAX_LONG_BODY_BYTES = 4 * 1024 * 1024
MAX_INLINE_BODY_BYTES = 16 * 1024 * 1024
MAX_FRAME_BYTES = 4 * 1024 * 1024
MAX_BUFFERS = 64
MAX_VALUES = 1 << 20
"""Values in one body: a body of 16 MiB of empty maps would otherwise become 1.2 GB of objects."""
INLINE_BELOW_BYTES = 4096
"""Arrays smaller than this are written inside the map, as stock msgpack-numpy writes every array."""

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in ("<f2", "<f4", "<f8", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "|b1")
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_EXT_BUFFER = 1
_REFS = tuple(msgpack.ExtType(_EXT_BUFFER, struct.pack("<H", i)) for i in range(MAX_BUFFERS))
_ARRAY_KEYS = {b"nd", b"type", b"kind", b"shape", b"data"}
_SCALAR_KEYS = {b"nd", b"type", b"data"}
ATOMS = frozenset((str, bytes, bool, int, float, type(None)))
"""The types of decoded values that hold no others."""


class WireError(Exception):
    """Bytes that do not follow docs/wire.md; `code` is the word an ERR message carries."""

    def __init__(self, text: str, code: str = "BAD_FRAME") -> None:
        super().__init__(text)
        self.code = code


class _BufferRef(int):
    """The index of a raw frame, as found inside a map."""


# It calls no Python code while it packs, so no other thread can come in between.
_pack_short = msgpack.Packer(buf_size=MAX_BODY_BYTES).pack


def pack(value: Any, *, inline: bool = False) -> tuple[bytes, list[memoryview]]:
    """Encode plain values and numpy arrays.

    Returns the msgpack body and the raw buffers it refers to, each a C-order byte view of its array (no copy
    where the array is contiguous). With `inline` every array is inside the body, byte for byte as stock
    msgpack-numpy writes it. Raises WireError for a dtype outside the allow-list, an array over 4 MiB that is
    not inline, more than 64 buffers, or a value that msgpack has no type for.
    """
    buffers: list[memoryview] = []
    return pack_with(value, buffers, inline), buffers


def pack_short(value: Any, buffers: list[memoryview]) -> bytes:
    """As `pack_with`, not inline, at half its cost: for what is short and has its arrays described already."""
    try:
        return _pack_short(value)  # type: ignore[no-any-return]
    except (TypeError, ValueError, OverflowError):
        return pack_with(value, buffers, inline=False)  # which takes more types, and says what is wrong


def pack_with(value: Any, buffers: list[memoryview], inline: bool) -> bytes:
    """The msgpack body of `value`; what it refers to is appended to `buffers`. Raises as `pack` does."""

    def default(obj: Any) -> Any:
        if isinstance(obj, np.ndarray):
            return describe(obj, buffers, inline)
        if isinstance(obj, np.generic):
            return obj.item()
        raise WireError(f"a {type(obj).__name__} cannot travel", "BAD_TYPE")

    try:
        return msgpack.Packer(default=default, use_bin_type=True).pack(value)  # type: ignore[no-any-return]
    except (
        TypeError,
        ValueError,
        OverflowError,
    ) as e:  # complex, over 64 bits, nested beyond msgpack's limit
        raise WireError(f"a value cannot travel: {e}", "BAD_TYPE") from None


def describe(array: np.ndarray[Any, Any], buffers: list[memoryview], inline: bool) -> dict[bytes, Any]:
    """The map that stands for an array; the bytes of a large one are appended to `buffers`. Raises as `pack` does."""
    name = _NAMES.get(array.dtype)
    if name is None:
        raise WireError(f"dtype {array.dtype.str} cannot travel", "BAD_DTYPE")
    data: bytes | msgpack.ExtType
    if inline or array.nbytes < INLINE_BELOW_BYTES:
        data = array.tobytes()  # in C order, whatever the array's own
    else:
        if array.nbytes > MAX_FRAME_BYTES:
            raise WireError(f"an array of {array.nbytes} bytes is over one frame; send pieces", "TOO_LARGE")
        if len(buffers) == MAX_BUFFERS:
            raise WireError(f"a message has at most {MAX_BUFFERS} buffers", "TOO_LARGE")
        data = _REFS[len(buffers)]
        buffers.append(np.ascontiguousarray(array).data.cast("B"))
    return {b"nd": True, b"type": name, b"kind": b"", b"shape": array.shape, b"data": data}


def unpack(body: Buffer, buffers: Sequence[Buffer] = (), *, max_body_bytes: int = MAX_BODY_BYTES) -> Any:
    """Decode what `pack` wrote, or raise WireError; never any other exception, whatever the bytes.

    Arrays are read-only: views of `buffers` or, where a frame starts at an unaligned address, copies. Each
    buffer must be used exactly once.
    """
    tree = read(body, max_body_bytes)
    unused = set(range(len(buffers)))
    value = tree if type(tree) in ATOMS else resolve(tree, buffers, unused)
    if unused:
        raise left_over(unused, buffers)
    return value


def left_over(unused: set[int], buffers: Sequence[Buffer]) -> WireError:
    """The refusal of buffers that no array refers to."""
    return WireError(f"{len(unused)} of {len(buffers)} buffers are not referred to")


def read(body: Buffer, max_body_bytes: int) -> Any:
    """What msgpack makes of the body, arrays still as the maps that describe them: for `resolve`. Raises WireError."""
    if len(body) > max_body_bytes:
        raise WireError(f"the body has {len(body)} bytes, at most {max_body_bytes} are allowed", "TOO_LARGE")
    size = len(body)
    long = size > MAX_BODY_BYTES
    hook = _counter() if long else None  # a short body cannot hold MAX_VALUES
    try:
        return msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            ext_hook=_buffer_ref,
            list_hook=hook,
            object_hook=hook,
            max_str_len=size,
            max_bin_len=size,
            max_array_len=min(size, 65536 if long else 4096),  # msgpack reserves what a header claims
            max_map_len=min(size, 4096),
            max_ext_len=2,
        )
    except (ValueError, TypeError, MemoryError, OverflowError, msgpack.UnpackException) as e:
        raise WireError(f"the body is not msgpack: {type(e).__name__} {str(e)[:80]}") from None


def _counter() -> Callable[[Any], Any]:
    left = MAX_VALUES

    def count(node: Any) -> Any:
        nonlocal left
        left -= 1 + len(node)
        if left < 0:
            raise WireError(f"the body holds more than {MAX_VALUES} values", "TOO_LARGE")
        return node

    return count


def _buffer_ref(code: int, data: bytes) -> _BufferRef:
    if code != _EXT_BUFFER or len(data) != 2:
        raise WireError(f"unknown extension type {code}")
    return _BufferRef(int.from_bytes(data, "little"))


def resolve(node: Any, buffers: Sequence[Buffer], unused: set[int], depth: int = 1) -> Any:
    """A list or map at `depth`, now with its arrays in place of the maps that describe them.

    unused: indices of `buffers` that no array has referred to yet. Raises WireError.
    """
    if depth > MAX_DEPTH:
        raise WireError(f"the body is nested deeper than {MAX_DEPTH}")
    kind = type(node)
    if kind is dict:
        if b"nd" in node:
            return _array(node, buffers, unused)
        for key, value in node.items():
            if type(key) is not str:
                raise WireError("a map key is not a string")
            if type(value) not in ATOMS:
                node[key] = resolve(value, buffers, unused, depth + 1)
    elif kind is list:
        for i, value in enumerate(node):
            if type(value) not in ATOMS:
                node[i] = resolve(value, buffers, unused, depth + 1)
    else:
        raise WireError(f"a {kind.__name__} has no place here")
    return node


def _array(node: dict[Any, Any], buffers: Sequence[Buffer], unused: set[int]) -> Any:
    name, data = node.get(b"type"), node.get(b"data")
    dtype = DTYPES.get(name) if type(name) is str else None
    if dtype is None:
        raise WireError(f"dtype {str(name)[:40]!r} is not allowed", "BAD_DTYPE")
    if node[b"nd"] is False and node.keys() == _SCALAR_KEYS:
        if type(data) is not bytes:
            raise WireError("a scalar's data is not bytes", "BAD_DTYPE")
        return _shaped(data, dtype, []).item()
    if node[b"nd"] is not True or node.keys() != _ARRAY_KEYS or node[b"kind"] != b"":
        raise WireError("an array map must have exactly nd, type, kind '', shape and data", "BAD_DTYPE")
    return _shaped(_array_bytes(data, buffers, unused), dtype, node[b"shape"])


def _array_bytes(data: Any, buffers: Sequence[Buffer], unused: set[int]) -> Buffer:
    if type(data) is bytes:
        return data
    if type(data) is not _BufferRef:
        raise WireError("array data is neither bytes nor a buffer")
    if data not in unused:
        raise WireError(f"buffer {int(data)} is absent or used twice")
    unused.discard(data)
    return buffers[data]


def _shaped(data: Buffer, dtype: np.dtype[Any], shape: Any) -> np.ndarray[Any, Any]:
    if type(shape) is not list or len(shape) > MAX_NDIM:
        raise WireError(f"a shape must be a list of at most {MAX_NDIM} sizes", "BAD_SHAPE")
    num_bytes = dtype.itemsize
    for size in shape:
        if type(size) is not int or not 0 <= size < 1 << 32:
            raise WireError("a shape must hold sizes from 0 to 2^32 - 1", "BAD_SHAPE")
        num_bytes *= size
    if num_bytes != len(data):
        raise WireError(f"shape {shape} of {dtype.str} does not make {len(data)} bytes", "BAD_SHAPE")
    flat: np.ndarray[Any, Any] = np.ndarray((num_bytes // dtype.itemsize,), dtype, data if num_bytes else None)
    if not flat.flags.aligned:
        flat = flat.copy()  # frames of 33 B to 8 KiB start anywhere
    if dtype.kind == "b" and num_bytes and flat.view(np.uint8).max() > 1:
        raise WireError("a boolean is neither 0 nor 1", "BAD_DTYPE")
    flat.setflags(write=False)  # a message never changes, also where its frame could
    try:
        return flat if len(shape) == 1 else flat.reshape(shape)
    except ValueError:  # an empty array whose other sizes multiply beyond 2^63
        raise WireError(f"shape {shape} is out of range", "BAD_SHAPE") from None
