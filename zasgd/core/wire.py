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
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from zasgd.core import codec
from zasgd.core.codec import Buffer, WireError
from zasgd.core.layout import Layout
from zasgd.core.messages import MESSAGES, Array, Kind, Message, Push

MAGIC = b"ZA"
PROTOCOL_VERSION = 1
MAX_PART_BYTES = 16 * 1024 * 1024
"""A push or reply larger than this travels in several messages under one seq."""
MAX_INLINE_PART_BYTES = 4 * 1024 * 1024
"""The same with flag INLINE, where statistics and counters of up to 4 MiB each share the body."""
MAX_MESSAGE_BYTES = MAX_PART_BYTES + 2 * codec.MAX_FRAME_BYTES
"""All buffers of one message: a part and the shard's statistics and counters."""

COMMIT, ABORT, INLINE = 1, 2, 4
_F0 = struct.Struct("<2sBBHHIIQQIHHII")
HEADER_BYTES = _F0.size
_KNOWN_FLAGS = COMMIT | ABORT | INLINE

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


@dataclass(frozen=True, slots=True)
class _Schema:
    """What F1 of one kind may hold."""

    cls: type[Message]
    checks: dict[str, Callable[[Any], Any]]
    required: frozenset[str]
    defaults: dict[str, Any]
    """Field name -> the object that stands for "absent"; MISSING for a required field."""
    read: Callable[[Message], tuple[Any, ...]]
    """The values of these fields, in the same order."""


def _schema(cls: type[Message]) -> _Schema:
    fields = [f for f in dataclasses.fields(cls) if "check" in f.metadata]
    defaults = {f.name: _default(f) for f in fields}
    return _Schema(
        cls,
        {f.name: f.metadata["check"] for f in fields},
        frozenset(name for name, default in defaults.items() if default is dataclasses.MISSING),
        defaults,
        _reader(list(defaults)),
    )


def _reader(names: list[str]) -> Callable[[Message], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)  # one call for all: every message that leaves passes here
    return lambda msg: tuple([getattr(msg, name) for name in names])


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


_SCHEMAS: dict[int, _Schema] = {int(kind): _schema(cls) for kind, cls in MESSAGES.items()}


def max_body_bytes(kind: int, inline: bool) -> int:
    """The largest F1 that a message of this kind may have."""
    if inline and kind in _WITH_ARRAYS:
        return codec.MAX_INLINE_BODY_BYTES
    return codec.MAX_LONG_BODY_BYTES if kind in _LONG_BODIED else codec.MAX_BODY_BYTES


def encode(msg: Message) -> list[Buffer]:
    """The frames of `msg` after the delimiter: F0, F1 and its buffers, views of the message's own arrays.

    Raises WireError for a message that `decode` would refuse for its size or for a value's type.
    """
    body, buffers = codec.pack(_content(msg), inline=msg.inline)
    if len(body) > max_body_bytes(msg.kind, msg.inline):
        raise WireError(f"{type(msg).__name__} makes a body of {len(body)} bytes", "TOO_LARGE")
    num_bytes = sum([len(b) for b in buffers])
    if num_bytes > MAX_MESSAGE_BYTES:
        raise WireError(f"{type(msg).__name__} makes {num_bytes} bytes of buffers; send parts", "TOO_LARGE")
    header = _F0.pack(
        MAGIC, PROTOCOL_VERSION, msg.kind, _flags(msg), msg.shard, msg.worker, msg.incarnation, msg.seq,
        msg.version, msg.run, msg.part, msg.parts, len(buffers), num_bytes,
    )  # fmt: skip
    return [header, body, *buffers]


def _content(msg: Message) -> dict[str, Any]:
    """The map of F1; a field that is left at its default is left out."""
    content: dict[str, Any] = {}
    schema = _SCHEMAS[msg.kind]
    for (name, default), value in zip(schema.defaults.items(), schema.read(msg), strict=True):
        if value is not default and not (type(value) is np.ndarray and not value.size):
            content[name] = value.to_plain() if type(value) is Layout else value
    return content


def _flags(msg: Message) -> int:
    flags = INLINE if msg.inline else 0
    if isinstance(msg, Push):
        flags |= (COMMIT if msg.commit else 0) | (ABORT if msg.abort else 0)
    return flags


def read_header(frame: Buffer) -> Header:
    """Decode F0, or raise WireError naming what is wrong with it."""
    if len(frame) != HEADER_BYTES:
        raise _not_ours(frame)
    header = Header._make(_F0.unpack(frame))
    if header.magic != MAGIC or header.protocol != PROTOCOL_VERSION:
        raise _not_ours(frame)
    if header.seq >= 1 << 63 or header.version >= 1 << 63:  # F1 could not repeat them
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
    header = read_header(frames[0])
    schema = _SCHEMAS.get(header.kind)
    if schema is None:
        raise WireError(f"unknown kind {header.kind}", "UNKNOWN_KIND")
    _check_header(header)
    buffers = frames[2:]
    _check_buffers(header, buffers)
    limit = max_body_bytes(header.kind, bool(header.flags & INLINE))
    return _build(schema, header, codec.unpack(frames[1], buffers, max_body_bytes=limit))


def _check_header(header: Header) -> None:
    allowed = _KNOWN_FLAGS if header.kind == Kind.PUSH else INLINE
    if header.flags & ~allowed:
        raise WireError(f"unknown flags {header.flags & ~allowed:#x}")
    if not 0 <= header.part < header.parts:
        raise WireError(f"part {header.part} of {header.parts}")


def _check_buffers(header: Header, buffers: Sequence[Buffer]) -> None:
    if not buffers and not header.num_buffers and not header.num_bytes:
        return
    sizes = [len(b) for b in buffers]
    if header.num_buffers != len(sizes) or header.num_bytes != sum(sizes):
        raise WireError("F0 does not count the buffers that follow")
    if sizes and max(sizes) > codec.MAX_FRAME_BYTES:
        raise WireError(f"a buffer is over {codec.MAX_FRAME_BYTES} bytes", "TOO_LARGE")
    if header.num_bytes > MAX_MESSAGE_BYTES:
        raise WireError(f"the buffers are over {MAX_MESSAGE_BYTES} bytes together", "TOO_LARGE")


def _build(schema: _Schema, header: Header, content: Any) -> Message:
    if type(content) is not dict:
        raise WireError("F1 is not a map")
    values: dict[str, Any] = {}
    for name, value in content.items():
        check = schema.checks.get(name)
        if check is None:
            raise WireError(f"{schema.cls.__name__} has no field {name[:40]!r}", "BAD_FIELD")
        values[name] = check(value)
    if not schema.required <= values.keys():
        missing = ", ".join(sorted(schema.required - values.keys()))
        raise WireError(f"{schema.cls.__name__} lacks {missing}", "BAD_FIELD")
    if header.kind == Kind.PUSH:
        values["commit"] = bool(header.flags & COMMIT)
        values["abort"] = bool(header.flags & ABORT)
    return schema.cls(
        run=header.run, shard=header.shard, worker=header.worker, incarnation=header.incarnation,
        seq=header.seq, version=header.version, part=header.part, parts=header.parts,
        inline=bool(header.flags & INLINE), **values,
    )  # fmt: skip


def split(flat: Array, max_part_bytes: int = MAX_PART_BYTES) -> Iterator[tuple[int, tuple[Array, ...]]]:
    """Cut a one-dimensional array into parts of frames: yields (offset in elements, consecutive views).

    An empty array still makes one part with one empty piece, since a message is sent for it.
    """
    part_len = max(1, max_part_bytes // flat.itemsize)
    frame_len = min(part_len, codec.MAX_FRAME_BYTES // flat.itemsize)
    if len(flat) <= frame_len:
        yield 0, (flat,)
        return
    for start in range(0, max(1, len(flat)), part_len):
        part = flat[start : start + part_len]
        yield start, tuple(part[i : i + frame_len] for i in range(0, max(1, len(part)), frame_len))
