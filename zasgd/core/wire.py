"""Messages to frames and back (docs/wire.md): `[] F0 F1 B0 .. Bn-1`.

F0 is a fixed 48-byte header, all that a relay reads; F1 a msgpack map (`codec.py`); Bi raw array bytes.
Decides what a well-formed message is, never what it means. This module knows nothing of sockets: routing
frames and the empty delimiter belong to `zasgd.net`.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import numpy as np

from zasgd.core import codec
from zasgd.core.codec import ATOMS, Buffer, WireError
from zasgd.core.layout import Layout
from zasgd.core.messages import MESSAGES, Array, Grant, Kind, Message, Push

MAGIC = b"ZA"
PROTOCOL_VERSION = 1
MAX_PART_BYTES = 4 * 1024 * 1024
"""A push or reply larger than this travels in several messages under one seq: one is worked on while others travel."""
FRAME_BYTES = 1024 * 1024
"""Pieces of a part. 25 M parameters to two shards and back, direct: no size from 0.25 to 4 MiB was clearly the best."""
MAX_INLINE_PART_BYTES = 4 * 1024 * 1024
"""As MAX_PART_BYTES with flag INLINE, where statistics and counters of up to 4 MiB each share the body."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024 + 2 * codec.MAX_FRAME_BYTES
"""All buffers of one message: a part, which may be larger than those sent here, and the statistics and counters."""

COMMIT, ABORT, INLINE = 1, 2, 4
_F0 = struct.Struct("<2sBBHHIIQQIHHII")
HEADER_BYTES = _F0.size
_KNOWN_FLAGS = COMMIT | ABORT | INLINE
_SIGNED = 1 << 63
"""What msgpack writes with a sign ends here: numbers of F0 that F1 may repeat stay below."""

_LONG_BODIED = frozenset(
    (Kind.HELLO, Kind.WELCOME, Kind.ADMIT, Kind.STATUS, Kind.FENCED, Kind.RENEW, Kind.BYE, Kind.GRANT, Kind.ROUND)
)
"""Kinds that carry a layout, a report or the grants of 64 pushes: a model of 1,000 tensors does not fit into 64 KiB."""
_WITH_ARRAYS = frozenset((Kind.INIT, Kind.PARAMS, Kind.PUSH, Kind.ACK))


class Header(NamedTuple):
    """The fields of F0, in order; see docs/wire.md."""

    magic: bytes
    protocol: int
    kind: int
    flags: int
    shard: int
    worker: int
    incarnation: int
    seq: int
    version: int
    run: int
    part: int
    parts: int
    num_buffers: int
    num_bytes: int


class _Field(NamedTuple):
    """One field of F1."""

    put: Callable[[Message, Any], None]
    """Sets it in a message that is being made: the slot's own setter, since messages are frozen."""
    check: Callable[[Any], Any]
    read: Callable[[Any, Sequence[Buffer], set[int]], Any]
    """The same for a list or map, with the arrays in it."""
    default: Any
    """What stands for "absent"; MISSING for a required field."""
    factory: Callable[[], Any] | None


@dataclass(frozen=True, slots=True)
class _Schema:
    """What F1 of one kind may hold."""

    cls: type[Message]
    flags: int
    fields: dict[str, _Field]
    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    """By `names`: the object that stands for "absent"."""
    values: Callable[[Message], tuple[Any, ...]]
    """By `names`."""
    limits: tuple[int, int]
    """The largest F1, plain and inline."""


def _schema(cls: type[Message]) -> _Schema:
    fields = {f.name: _field(cls, f) for f in dataclasses.fields(cls) if "check" in f.metadata}
    names = tuple(fields)
    flags = _KNOWN_FLAGS if cls is Push else INLINE
    limits = (max_body_bytes(cls.kind, False), max_body_bytes(cls.kind, True))
    return _Schema(cls, flags, fields, names, tuple(f.default for f in fields.values()), _values(names), limits)


def _field(cls: type[Message], field: dataclasses.Field[Any]) -> _Field:
    check = field.metadata["check"]
    factory = None if field.default_factory is dataclasses.MISSING else field.default_factory
    default = factory() if factory else field.default
    return _Field(_setter(cls, field.name), check, _reader(field.type, check), default, factory)


def _setter(cls: type[Message], name: str) -> Callable[[Message, Any], None]:
    return getattr(cls, name).__set__  # type: ignore[no-any-return]


def _reader(kind: Any, check: Callable[[Any], Any]) -> Callable[[Any, Sequence[Buffer], set[int]], Any]:
    """Reads a field that is no atom: its arrays resolved, then checked; grants without a walk for arrays."""

    def read(value: Any, buffers: Sequence[Buffer], unused: set[int]) -> Any:
        return check(codec.resolve(value, buffers, unused, 2))

    def read_grants(value: Any, buffers: Sequence[Buffer], unused: set[int]) -> Any:
        return _grants(value) or read(value, buffers, unused)

    return read_grants if kind == "tuple[Grant, ...]" else read


def _grants(value: Any) -> tuple[Grant, ...] | None:
    """A few well-formed grants; None for anything that needs a closer look."""
    if type(value) is not list or len(value) > 64:
        return None
    for item in value:
        if type(item) is not list or len(item) != 4:
            return None
        for number in item:
            if type(number) is not int or not 0 <= number < _SIGNED:
                return None
        if item[3] <= item[2]:
            return None
    return tuple([Grant._make(item) for item in value])


def _values(names: Sequence[str]) -> Callable[[Message], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)  # one call for all: every message that leaves passes here
    return lambda msg: tuple([getattr(msg, name) for name in names])


def max_body_bytes(kind: int, inline: bool) -> int:
    """The largest F1 that a message of this kind may have."""
    if inline and kind in _WITH_ARRAYS:
        return codec.MAX_INLINE_BODY_BYTES
    return codec.MAX_LONG_BODY_BYTES if kind in _LONG_BODIED else codec.MAX_BODY_BYTES


_SCHEMAS: dict[int, _Schema] = {int(kind): _schema(cls) for kind, cls in MESSAGES.items()}
_HEADER_SLOTS = tuple(_setter(Message, f.name) for f in dataclasses.fields(Message))
_PUT_COMMIT, _PUT_ABORT = _setter(Push, "commit"), _setter(Push, "abort")


def encode(msg: Message) -> list[Buffer]:
    """The frames of `msg` after the delimiter: F0, F1 and its buffers, views of the message's own arrays.

    Raises WireError for a message that `decode` would refuse for its size or for a value's type.
    """
    kind, inline = msg.kind, msg.inline
    schema = _SCHEMAS[kind]
    limit = schema.limits[inline]
    buffers: list[memoryview] = []
    content = _content(schema, msg, buffers)
    short = limit == codec.MAX_BODY_BYTES
    body = codec.pack_short(content, buffers) if short else codec.pack_with(content, buffers, inline)
    if len(body) > limit:
        raise WireError(f"{type(msg).__name__} makes a body of {len(body)} bytes", "TOO_LARGE")
    num_bytes = sum(map(len, buffers))
    if num_bytes > MAX_MESSAGE_BYTES:
        raise WireError(f"{type(msg).__name__} makes {num_bytes} bytes of buffers; send parts", "TOO_LARGE")
    flags = INLINE if inline else 0
    if kind is Kind.PUSH:
        flags |= (COMMIT if msg.commit else 0) | (ABORT if msg.abort else 0)  # type: ignore[attr-defined]
    header = _F0.pack(
        MAGIC, PROTOCOL_VERSION, kind, flags, msg.shard, msg.worker, msg.incarnation, msg.seq,
        msg.version, msg.run, msg.part, msg.parts, len(buffers), num_bytes,
    )  # fmt: skip
    return [header, body, *buffers]


def _content(schema: _Schema, msg: Message, buffers: list[memoryview]) -> dict[str, Any]:
    """The map of F1; a field that is left at its default is left out."""
    content: dict[str, Any] = {}
    values = schema.values(msg)
    for name, value in compress(zip(schema.names, values, strict=True), map(is_not, values, schema.defaults)):
        kind = type(value)
        if kind is tuple and value and type(value[0]) is np.ndarray:
            value = [codec.describe(v, buffers, msg.inline) if type(v) is np.ndarray else v for v in value]
        elif kind is np.ndarray:
            if not value.size:
                continue
            value = codec.describe(value, buffers, msg.inline)
        elif kind is Layout:
            value = value.to_plain()
        content[name] = value
    return content


def read_header(frame: Buffer) -> Header:
    """Decode F0, or raise WireError naming what is wrong with it."""
    if len(frame) != HEADER_BYTES:
        raise _not_ours(frame)
    header = Header._make(_F0.unpack(frame))
    if header.magic != MAGIC or header.protocol != PROTOCOL_VERSION:
        raise _not_ours(frame)
    if header.seq >= _SIGNED or header.version >= _SIGNED:
        raise WireError("seq and version must be below 2^63", "BAD_FIELD")
    return header


def _not_ours(frame: Buffer) -> WireError:
    """What is wrong with the beginning or the length of an F0."""
    if len(frame) < 3 or bytes(frame[:2]) != MAGIC:
        return WireError("F0 does not begin with ZA: not a zasgd peer")
    if frame[2] != PROTOCOL_VERSION:  # before the length, which another version may change
        return WireError(f"the peer speaks protocol {frame[2]}, not {PROTOCOL_VERSION}", "WRONG_PROTOCOL")
    return WireError(f"F0 has {len(frame)} bytes, not {HEADER_BYTES}")


def decode(frames: Sequence[Buffer]) -> Message:
    """The message in these frames (after the delimiter), or WireError; never any other exception.

    Order of checks: number of frames, F0, buffer counts and sizes, msgpack, the kind's fields.
    """
    if not 2 <= len(frames) <= 2 + codec.MAX_BUFFERS:
        raise WireError(f"a message has {len(frames)} frames; 2 to {2 + codec.MAX_BUFFERS} are allowed")
    f0 = frames[0]
    if len(f0) != HEADER_BYTES:
        raise _not_ours(f0)
    fields = _F0.unpack(f0)
    magic, protocol, kind, flags, shard, worker, incarnation, seq, version, run, part, parts, *counts = fields
    if magic != MAGIC or protocol != PROTOCOL_VERSION or seq >= _SIGNED or version >= _SIGNED:
        read_header(f0)  # which says what is wrong
    schema = _SCHEMAS.get(kind)
    if schema is None:
        raise WireError(f"unknown kind {kind}", "UNKNOWN_KIND")
    if flags & ~schema.flags:
        raise WireError(f"unknown flags {flags & ~schema.flags:#x}")
    if part >= parts:
        raise WireError(f"part {part} of {parts}")
    buffers = frames[2:]
    if buffers or any(counts):
        _check_buffers(counts[0], counts[1], buffers)
    inline = bool(flags & INLINE)
    msg = schema.cls.__new__(schema.cls)  # past __init__, which costs three times as much for a frozen type
    _fill(msg, schema, codec.read(frames[1], schema.limits[inline]), buffers)
    header = (run, shard, worker, incarnation, seq, version, part, parts, inline)
    for put, value in zip(_HEADER_SLOTS, header, strict=True):
        put(msg, value)
    if kind == Kind.PUSH:
        _PUT_COMMIT(msg, flags & COMMIT != 0)
        _PUT_ABORT(msg, flags & ABORT != 0)
    return msg


def _check_buffers(num_buffers: int, num_bytes: int, buffers: Sequence[Buffer]) -> None:
    sizes = [len(b) for b in buffers]
    if num_buffers != len(sizes) or num_bytes != sum(sizes):
        raise WireError("F0 does not count the buffers that follow")
    if sizes and max(sizes) > codec.MAX_FRAME_BYTES:
        raise WireError(f"a buffer is over {codec.MAX_FRAME_BYTES} bytes", "TOO_LARGE")
    if num_bytes > MAX_MESSAGE_BYTES:
        raise WireError(f"the buffers are over {MAX_MESSAGE_BYTES} bytes together", "TOO_LARGE")


def _fill(msg: Message, schema: _Schema, content: Any, buffers: Sequence[Buffer]) -> None:
    """Set the fields of F1, each checked; those that are absent to their defaults."""
    if type(content) is not dict:
        raise WireError("F1 is not a map")
    unused = set(range(len(buffers)))
    fields = schema.fields
    for name, value in content.items():
        field = fields.get(name)
        if field is None:
            raise _unknown(schema, name, value, buffers)
        if type(value) in ATOMS:
            field.put(msg, field.check(value))
        else:
            field.put(msg, field.read(value, buffers, unused))
    if unused:
        raise codec.left_over(unused, buffers)
    if len(content) < len(fields):
        _fill_absent(msg, schema, content)


def _unknown(schema: _Schema, name: Any, value: Any, buffers: Sequence[Buffer]) -> WireError:
    """The refusal of a field; what is wrong with its value itself goes before."""
    if type(value) not in ATOMS:
        codec.resolve(value, buffers, set(range(len(buffers))), 2)
    return WireError(f"{schema.cls.__name__} has no field {name[:40]!r}", "BAD_FIELD")


def _fill_absent(msg: Message, schema: _Schema, content: dict[str, Any]) -> None:
    missing = []
    for name, (put, _, _, default, factory) in schema.fields.items():
        if name not in content:
            if default is dataclasses.MISSING:
                missing.append(name)
            put(msg, factory() if factory else default)
    if missing:
        raise WireError(f"{schema.cls.__name__} lacks {', '.join(sorted(missing))}", "BAD_FIELD")


def split(flat: Array, max_part_bytes: int = MAX_PART_BYTES) -> Iterator[tuple[int, tuple[Array, ...]]]:
    """Cut a one-dimensional array into parts of frames: yields (offset in elements, consecutive views).

    An empty array still makes one part with one empty piece, since a message is sent for it.
    """
    part_len = max(1, max_part_bytes // flat.itemsize)
    frame_len = min(part_len, FRAME_BYTES // flat.itemsize)
    if len(flat) <= frame_len:
        yield 0, (flat,)
        return
    for start in range(0, max(1, len(flat)), part_len):
        part = flat[start : start + part_len]
        yield start, tuple(part[i : i + frame_len] for i in range(0, max(1, len(part)), frame_len))
