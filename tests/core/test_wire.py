"""Messages over frames: every kind round-trips, a stock client is understood, and nonsense is WireError."""

from __future__ import annotations

import dataclasses
import random
import re
import struct
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zasgd.core import codec, wire
from zasgd.core.codec import WireError
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.messages import (
    MESSAGES,
    Ack,
    Applied,
    Array,
    Decision,
    Done,
    Err,
    Evaluate,
    Fenced,
    Grant,
    GrantMsg,
    Hello,
    Kind,
    Message,
    Observe,
    Params,
    Probe,
    Pull,
    Push,
    PushId,
    Refused,
    Renew,
    Result,
    Status,
    Welcome,
)

F0 = struct.Struct("<2sBBHHIIQQIHHII")
"""Packed here by hand, so that a change of the code's own struct is noticed."""
COMMIT, ABORT, INLINE = 1, 2, 4
HASH = "0123456789abcdef"
SEED = 20240917
KINDS = sorted(MESSAGES)


def received(frames: Sequence[Any]) -> list[bytes]:
    """The frames as another process gets them: copies, shared with nobody."""
    return [bytes(frame) for frame in frames]


def round_trip(msg: Message) -> Message:
    return wire.decode(received(wire.encode(msg)))


def comparable(value: Any) -> Any:
    """Arrays by dtype, shape and bits; everything else by itself."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(comparable(v) for v in value)
    return value


def content(msg: Message) -> dict[str, Any]:
    return {f.name: comparable(getattr(msg, f.name)) for f in dataclasses.fields(msg)}


def assert_same(a: Message, b: Message) -> None:
    assert type(a) is type(b)
    assert content(a) == content(b)


def with_f0(frames: Sequence[Any], **changed: int | bytes) -> list[bytes]:
    """The same frames with fields of F0 replaced."""
    header = wire.Header._make(F0.unpack(frames[0]))._replace(**changed)
    return [F0.pack(*header), *received(frames[1:])]


def push(num_elements: int = 2000, **fields: Any) -> Push:
    """A small committed gradient, of one frame beside the map unless told otherwise."""
    gradient = np.arange(num_elements, dtype=np.float32)
    base: dict[str, Any] = {"layout_hash": HASH, "grads": (gradient,), "commit": True, "num_samples": 32}
    return Push(**(base | {"run": 7, "shard": 0, "seq": 1, "grants": (Grant(0, 1, 32, 64),)} | fields))


def code_of(frames: Sequence[Any]) -> str:
    with pytest.raises(WireError) as refusal:
        wire.decode(frames)
    return refusal.value.code


# ---- every kind ---------------------------------------------------------------------------------------

f0_field = {
    "run": st.integers(0, 2**32 - 1),
    "shard": st.integers(0, 2**16 - 1),
    "worker": st.integers(0, 2**32 - 1),
    "incarnation": st.integers(0, 2**32 - 1),
    "seq": st.integers(0, 2**63 - 1),
    "version": st.integers(0, 2**63 - 1),
    "inline": st.booleans(),
}
counting = st.integers(0, 2**63 - 1)
grants = st.builds(
    lambda epoch, batch, start, size: Grant(epoch, batch, start, start + size),
    counting, counting, st.integers(0, 2**62), st.integers(1, 2**61),
)  # fmt: skip
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def bits(dtype: str) -> st.SearchStrategy[Array]:
    """Arrays of any bit pattern, on both sides of the size from which they travel as frames."""
    itemsize = np.dtype(dtype).itemsize
    sizes = st.sampled_from([0, 1, 3, 4096 // itemsize - 1, 4096 // itemsize, 3000])
    return st.builds(
        lambda size, seed: np.frombuffer(random.Random(seed).randbytes(size * itemsize), dtype),
        sizes, st.integers(0, 1000),
    )  # fmt: skip


layouts = st.builds(
    lambda tensors: Layout(tuple(tensors)),
    st.lists(
        st.builds(
            TensorSpec,
            st.text(min_size=1, max_size=30),
            st.lists(st.integers(0, 300), max_size=4).map(tuple),
            st.sampled_from(["float32", "bfloat16", "float16"]),
            st.sampled_from(["params", "stats"]),
            st.integers(0, 65535),
        ),
        max_size=6,
        unique_by=lambda t: t.name,
    ),
)
push_ids = st.lists(st.builds(PushId, counting, counting), max_size=4).map(tuple)
by_type: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=100),
    int: counting,
    bool: st.booleans(),
    bytes: st.binary(max_size=100),
    float: st.floats(allow_nan=False, allow_infinity=False),
    tuple[str, ...]: st.lists(st.text(max_size=30), max_size=4).map(tuple),
    tuple[int, ...]: st.lists(counting, max_size=4).map(tuple),
    tuple[Grant, ...]: st.lists(grants, max_size=4).map(tuple),
    tuple[Applied, ...]: st.lists(st.builds(Applied, counting, st.lists(grants, max_size=3).map(tuple))).map(tuple),
    tuple[Refused, ...]: st.lists(st.builds(Refused, grants, st.text(max_size=20), counting), max_size=4).map(tuple),
    tuple[Decision, ...]: st.lists(st.builds(Decision, push_ids, push_ids), max_size=4).map(tuple),
    tuple[Array, ...]: st.lists(bits("<f4"), max_size=4).map(tuple),
    dict[str, Any]: st.dictionaries(st.text(max_size=20), plain, max_size=5),
    Layout: layouts,
}


def values_of(name: str, hint: Any) -> st.SearchStrategy[Any]:
    """Values for one field, by its declared type."""
    if hint == Array:
        return bits("<i8" if name == "counters" else "<f4")
    if type(None) in typing.get_args(hint):
        (inner,) = set(typing.get_args(hint)) - {type(None)}
        return st.none() | values_of(name, inner)
    return by_type[hint]


def messages_of(kind: int) -> st.SearchStrategy[Message]:
    cls = MESSAGES[Kind(kind)]
    hints = {name: hint for name, hint in typing.get_type_hints(cls).items() if name != "kind"}
    own = {f.name: values_of(f.name, hints[f.name]) for f in dataclasses.fields(cls) if "check" in f.metadata}
    flags = {"commit": st.booleans(), "abort": st.booleans()} if cls is Push else {}
    part = st.tuples(st.integers(0, 2**16 - 2), st.integers(1, 2**15)).map(
        lambda p: {"part": min(p[0], p[1] - 1), "parts": p[1]}
    )
    return st.builds(lambda fields, p: cls(**fields, **p), st.fixed_dictionaries(f0_field | own | flags), part)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: Kind(k).name)
def test_every_kind_round_trips(kind: int) -> None:
    @settings(max_examples=25)
    @given(messages_of(kind))
    def round_trips(msg: Message) -> None:
        assert_same(round_trip(msg), msg)

    round_trips()


@settings(max_examples=40)
@given(st.sampled_from(KINDS).flatmap(messages_of))
def test_a_message_with_inline_has_no_buffers_and_says_the_same(msg: Message) -> None:
    msg = dataclasses.replace(msg, inline=True)
    frames = wire.encode(msg)
    assert len(frames) == 2
    assert_same(wire.decode(received(frames)), msg)


def example(kind: int) -> Message:
    """One message of a kind with every field set to something other than its default."""
    cls = MESSAGES[Kind(kind)]
    hints = typing.get_type_hints(cls)
    values: dict[Any, Any] = {
        str: "text", int: 300, bool: True, bytes: b"\x00\xff", float: 2.5,
        tuple[str, ...]: ("tcp://127.0.0.1:7472",), tuple[int, ...]: (1, 300),
        tuple[Grant, ...]: (Grant(0, 1, 32, 64), Grant(1, 0, 0, 32)),
        tuple[Applied, ...]: (Applied(9, (Grant(0, 1, 32, 64),)),),
        tuple[Refused, ...]: (Refused(Grant(0, 2, 64, 96), "nonfinite", 7),),
        tuple[Array, ...]: (np.array([0.5, -1], np.float32), np.arange(1024, dtype=np.float32)),
        float | None: 0.25, tuple[Decision, ...]: (Decision((PushId(1, 9), PushId(2, 4)), (PushId(3, 1),)),),
        dict[str, Any]: {"a": 1, "b": [2.5, None, "c"]}, dict[str, Any] | None: {"lr": 0.1},
        Layout | None: Layout((TensorSpec("w", (2, 3)), TensorSpec("n", (), "int64", "counters"))),
    }  # fmt: skip
    own = {f.name for f in dataclasses.fields(cls) if "check" in f.metadata}
    fields: dict[str, Any] = {}
    for name in own:
        if hints[name] == Array:
            fields[name] = np.array([3, 4], np.int64 if name == "counters" else np.float32)
        else:
            fields[name] = values[hints[name]]
    if cls is Push:
        fields["commit"] = True
    return cls(
        run=0xA1B2C3D4, shard=1, worker=2, incarnation=3, seq=4, version=5, part=6, parts=7, **fields
    )  # fmt: skip


def test_golden_bytes_of_every_kind(golden: Any) -> None:
    lines = {}
    for kind in KINDS:
        f0, f1, *buffers = received(wire.encode(example(kind)))
        lines[Kind(kind).name] = f"{f0.hex()} {f1.hex()} {sum(map(len, buffers))}"
        assert_same(wire.decode([f0, f1, *buffers]), example(kind))
    golden("wire/messages.txt", lines)


def test_the_page_about_the_wire_names_every_kind_field_and_offset() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
    for kind, cls in MESSAGES.items():
        (row,) = re.findall(rf"^\| {int(kind)} \| {kind.name} \|.*$", page, re.MULTILINE)
        for field in dataclasses.fields(cls):
            assert "check" not in field.metadata or re.search(rf"\b{field.name}\b", row), (kind.name, field.name)
    at = 0
    for name, size in zip(wire.Header._fields, (2, 1, 1, 2, 2, 4, 4, 8, 8, 4, 2, 2, 4, 4), strict=True):
        assert f"| {at} | {size} | {name} |" in page
        at += size
    assert at == wire.HEADER_BYTES == 48


def test_a_field_at_its_default_takes_no_bytes() -> None:
    assert wire.encode(Pull(run=1, seq=2))[1] == b"\x80"
    assert set(msgpack.unpackb(wire.encode(Err(code="X"))[1])) == {"code"}


def test_defaults_are_shared_by_nobody_who_can_change_them() -> None:
    first, second = Renew(), Renew()
    first.facts["step_s"] = 1.0
    assert second.facts == {}


def test_arrays_travel_as_views_of_the_messages_own_memory() -> None:
    msg = push(5000)
    frame = wire.encode(msg)[2]
    assert np.shares_memory(np.frombuffer(frame, np.float32), msg.grads[0])


# ---- a client of the stock package ---------------------------------------------------------------------


def test_a_push_written_by_hand_with_the_stock_package_is_the_same_push() -> None:
    gradient = np.linspace(-1, 1, 5000, dtype=np.float32)
    f0 = F0.pack(b"ZA", 1, 10, COMMIT | INLINE, 0, 4, 9, 17, 3, 0xFEEDBEEF, 0, 1, 0, 0)
    f1 = msgpack.packb(
        {
            "layout_hash": HASH,
            "offset": 16,
            "grads": [gradient],
            "grants": [[0, 5, 160, 192]],
            "num_samples": 32,
        },
        default=msgpack_numpy.encode,
    )
    by_hand = wire.decode([f0, f1])
    ours = Push(
        run=0xFEEDBEEF, shard=0, worker=4, incarnation=9, seq=17, version=3, inline=True, commit=True,
        layout_hash=HASH, offset=16, grads=(gradient,), grants=(Grant(0, 5, 160, 192),), num_samples=32,
    )  # fmt: skip
    assert_same(by_hand, ours)
    assert received(wire.encode(ours)) == [f0, f1]


@pytest.mark.parametrize("cls", [Ack, Params])
def test_an_inline_reply_is_read_by_the_stock_package(cls: type[Ack] | type[Params]) -> None:
    params, stats, counters = np.linspace(0, 1, 5000, dtype=np.float32), np.ones(3, np.float32), np.arange(2)
    reply = cls(inline=True, offset=0, params=(params[:2000], params[2000:]), stats=stats, counters=counters)
    f0, f1 = wire.encode(reply)
    assert F0.unpack(f0)[3] == INLINE
    read = msgpack.unpackb(f1, object_hook=msgpack_numpy.decode)
    assert np.array_equal(np.concatenate(read["params"]), params)
    assert np.array_equal(read["stats"], stats)
    assert np.array_equal(read["counters"], counters)


def test_a_stock_client_may_send_numpy_numbers_where_numbers_belong() -> None:
    f0 = F0.pack(b"ZA", 1, 10, COMMIT | INLINE, 0, 4, 9, 17, 3, 0xFEEDBEEF, 0, 1, 0, 0)
    grant = [np.int64(0), np.int64(5), np.int64(160), np.int64(192)]
    content = {"layout_hash": HASH, "grants": [grant], "num_samples": np.int64(32), "loss": np.float32(0.5)}
    arrived = wire.decode([f0, msgpack.packb(content, default=msgpack_numpy.encode)])
    assert isinstance(arrived, Push)
    assert (arrived.grants, arrived.num_samples, arrived.loss) == ((Grant(0, 5, 160, 192),), 32, 0.5)


@pytest.mark.parametrize("count", [1, 64, 65, 1024])
def test_grants_are_read_the_same_way_however_many_there_are(count: int) -> None:
    sent = tuple(Grant(i, 2 * i, 3 * i, 3 * i + 1 + i % 7) for i in range(count))
    arrived = round_trip(push(grants=sent))
    assert isinstance(arrived, Push)
    assert arrived.grants == sent
    assert all(type(g) is Grant for g in arrived.grants)


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8"])
def test_gradients_of_other_widths_become_float32(dtype: str) -> None:
    gradient = np.array([0.5, -2, 1024], dtype)
    arrived = round_trip(push(grads=(gradient,)))
    assert isinstance(arrived, Push)
    assert arrived.grads[0].dtype == np.float32
    assert np.array_equal(arrived.grads[0], gradient)


@pytest.mark.filterwarnings("error")
def test_a_double_beyond_float32_becomes_inf_for_the_shard_to_refuse() -> None:
    arrived = round_trip(push(grads=(np.array([1e300, -1e300]),)))
    assert isinstance(arrived, Push)
    assert np.isinf(arrived.grads[0]).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("grads", (np.zeros((2, 2), np.float32),)),
        ("grads", (np.zeros(2, np.int32),)),
        ("grads", (np.float32(1),)),
        ("grads", np.zeros(2, np.float32)),
        ("grads", (1.0,)),
        ("stats", np.array(1.0, np.float32)),
        ("stats", [1.0]),
        ("counters", np.zeros(2, np.int32)),
        ("counters", np.zeros(2, np.float32)),
        ("hyper", {"lr": np.zeros(2, np.float32)}),
    ],
)
def test_arrays_are_one_dimensional_and_of_the_declared_type(field: str, value: Any) -> None:
    assert code_of(received(wire.encode(push(**{field: value})))) in ("BAD_SHAPE", "BAD_FIELD")


# ---- what is refused -----------------------------------------------------------------------------------


def test_another_protocol_version_is_named_whatever_its_header_looks_like() -> None:
    frames = received(wire.encode(Pull()))
    for f0 in (frames[0][:2] + b"\x02" + frames[0][3:], b"ZA\x02", b"ZA\x02" + b"\0" * 100):
        with pytest.raises(WireError, match="speaks protocol 2, not 1") as refusal:
            wire.decode([f0, frames[1]])
        assert refusal.value.code == "WRONG_PROTOCOL"


@pytest.mark.parametrize("f0", [b"", b"Z", b"ZA", b"XX\x01" + b"\0" * 45, b"ZA\x01", b"ZA\x01" + b"\0" * 46])
def test_a_first_frame_that_is_no_header_is_refused(f0: bytes) -> None:
    assert code_of([f0, b"\x80"]) == "BAD_FRAME"
    assert code_of([memoryview(f0), b"\x80"]) == "BAD_FRAME"


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"kind": 0}, "UNKNOWN_KIND"),
        ({"kind": 255}, "UNKNOWN_KIND"),
        ({"flags": 8}, "BAD_FRAME"),
        ({"flags": 0x8000 | COMMIT}, "BAD_FRAME"),
        ({"part": 1}, "BAD_FRAME"),
        ({"parts": 0}, "BAD_FRAME"),
        ({"num_buffers": 0}, "BAD_FRAME"),
        ({"num_buffers": 2}, "BAD_FRAME"),
        ({"num_bytes": 7999}, "BAD_FRAME"),
        ({"num_bytes": 2**32 - 1}, "BAD_FRAME"),
        ({"kind": int(Kind.PULL), "flags": 0}, "BAD_FIELD"),
    ],
)
def test_a_header_must_agree_with_itself_and_its_frames(changed: dict[str, int], code: str) -> None:
    frames = wire.encode(push())
    wire.decode(with_f0(frames))
    assert code_of(with_f0(frames, **changed)) == code


@pytest.mark.parametrize("flag", [COMMIT, ABORT])
def test_only_a_push_commits_or_aborts(flag: int) -> None:
    frames = wire.encode(Pull())
    wire.decode(with_f0(frames, flags=INLINE))
    assert code_of(with_f0(frames, flags=flag)) == "BAD_FRAME"


def test_a_message_has_2_to_66_frames() -> None:
    f0, f1, buffer = received(wire.encode(push()))
    for frames in ([], [f0], [f0, f1, *[buffer] * 65]):
        assert code_of(frames) == "BAD_FRAME"


def test_a_message_of_64_pieces_is_the_largest() -> None:
    piece = np.zeros(1024, np.float32)
    assert len(wire.encode(push(grads=(piece,) * 64))) == 66
    with pytest.raises(WireError):
        wire.encode(push(grads=(piece,) * 65))
    assert code_of(received(wire.encode(push(grads=(piece[:10],) * 65)))) == "BAD_FIELD"


def test_buffers_are_bounded_each_and_together() -> None:
    f0, f1, _ = received(wire.encode(push()))
    long = b"\0" * (codec.MAX_FRAME_BYTES + 1)
    assert code_of(with_f0([f0, f1, long], num_bytes=len(long))) == "TOO_LARGE"
    pieces = (np.zeros(codec.MAX_FRAME_BYTES // 4, np.float32),) * 6
    frames = wire.encode(push(grads=pieces))
    wire.decode(frames)
    seventh = [*frames, b"\0"]
    assert code_of(with_f0(seventh, num_buffers=7, num_bytes=24 * 2**20 + 1)) == "TOO_LARGE"
    with pytest.raises(WireError, match="send parts"):
        wire.encode(push(grads=(*pieces, pieces[0])))


@pytest.mark.parametrize(
    ("msg", "limit"),
    [
        (Done(text="x"), 64 * 1024),
        (push(), 64 * 1024),
        (Hello(role="worker", token=b"t"), 4 * 1024 * 1024),
        (Status(report={}), 4 * 1024 * 1024),
        (push(inline=True), 16 * 1024 * 1024),
        (Done(text="x", inline=True), 64 * 1024),
    ],
    ids=["done", "push", "hello", "status", "inline push", "inline done"],
)
def test_a_body_is_as_long_as_its_kind_allows_and_no_longer(msg: Message, limit: int) -> None:
    frames = received(wire.encode(msg))
    assert code_of([frames[0], b"\0" * limit, *frames[2:]]) == "BAD_FRAME"  # read, and found to be no map
    assert code_of([frames[0], b"\0" * (limit + 1), *frames[2:]]) == "TOO_LARGE"


def test_a_message_that_could_not_be_read_is_not_sent() -> None:
    with pytest.raises(WireError) as refusal:
        wire.encode(Done(text="x" * 70_000))
    assert refusal.value.code == "TOO_LARGE"
    big = Hello(
        role="worker",
        token=b"t",
        layout=Layout(tuple(TensorSpec(f"layer.{i}.weight", (3, 3)) for i in range(5000))),
    )
    assert_same(round_trip(big), big)


@pytest.mark.parametrize("body", [b"\x90", b"\xc0", b"\x01", b"\xa1x", b"\xc4\x01x"])
def test_f1_is_a_map(body: bytes) -> None:
    assert code_of([wire.encode(Pull())[0], body]) == "BAD_FRAME"


EMPTY = {b"nd": True, b"type": "|b1", b"kind": b"", b"shape": [0], b"data": b""}
"""A valid array, where none belongs."""


def bad_field(cls: type[Message], **fields: Any) -> str:
    """The code with which a hand-packed F1 of these fields is refused."""
    f0 = F0.pack(b"ZA", 1, cls.kind, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0)
    return code_of([f0, msgpack.packb(fields)])


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (Pull, {"x": 1}),
        (Pull, {"seq": 1}),
        (Pull, {"run": 1}),
        (Push, {"layout_hash": HASH, "commit": True}),
        (Push, {}),
        (Err, {"text": "no code"}),
        (Done, {"text": None}),
        (Done, {"text": b"bytes"}),
        (Done, {"text": 1}),
        (Hello, {"role": "worker", "token": "text"}),
        (Hello, {"role": "worker", "token": b"t", "pid": -1}),
        (Hello, {"role": "worker", "token": b"t", "pid": 1 << 63}),
        (Hello, {"role": "worker", "token": b"t", "pid": True}),
        (Hello, {"role": "worker", "token": b"t", "pid": 1.0}),
        (Hello, {"role": "worker", "token": b"t", "pid": None}),
        (Welcome, {"token": b"t", "seed": 1}),
        (Welcome, {"token": b"t", "lease_s": float("nan")}),
        (Welcome, {"token": b"t", "lease_s": float("inf")}),
        (Welcome, {"token": b"t", "lease_s": "10"}),
        (Welcome, {"token": b"t", "endpoints": "tcp://x"}),
        (Welcome, {"token": b"t", "endpoints": [1]}),
        (GrantMsg, {"grants": [[0, 1, 32]]}),
        (GrantMsg, {"grants": [[0, 1, 32, 64, 5]]}),
        (GrantMsg, {"grants": [[0, 1, 64, 64]]}),
        (GrantMsg, {"grants": [[0, 1, 64, 32]]}),
        (GrantMsg, {"grants": [[0, 1, -1, 32]]}),
        (GrantMsg, {"grants": [[0, 1, 32, 1 << 63]]}),
        (GrantMsg, {"grants": [[0, True, 32, 64]]}),
        (GrantMsg, {"grants": [[0, 1, 32.0, 64]]}),
        (GrantMsg, {"grants": [[0, 1, 32, "64"]]}),
        (GrantMsg, {"grants": {"a": 1}}),
        (GrantMsg, {"grants": [{}]}),
        (GrantMsg, {"grants": [[0, 1, 32, 64]] * 1537}),
        (Renew, {"final": [[1]]}),
        (Renew, {"final": [[1, [[0, 1, 32]]]]}),
        (Renew, {"final": [[1, []]] * 65}),
        (Renew, {"refused": [[[0, 1, 32, 64], 5]]}),
        (Renew, {"facts": [1]}),
        (Renew, {"facts": {"a": b"bytes"}}),
        (Renew, {"facts": {"a": [{"b": b"bytes"}]}}),
        (Result, {"epoch": 1, "scores": {"a": {b"nd": False, b"type": "|b1", b"data": b"\x02"}}}),
        (Result, {"epoch": 1, "scores": {"a": EMPTY}}),
        (Evaluate, {"epoch": None}),
        (Fenced, {"bitmap": -1}),
        (Status, {"report": []}),
        (Probe, {"text": ""}),
        (Observe, {"params": []}),
    ],
)  # fmt: skip
def test_unknown_missing_and_mistyped_fields_are_refused(cls: type[Message], fields: dict[str, Any]) -> None:
    assert bad_field(cls, **fields) in ("BAD_FIELD", "BAD_DTYPE")


@pytest.mark.parametrize(
    "layout",
    [
        1,
        "x",
        {},
        [1],
        [["w", [1], "float32", "params"]],
        [["w", [-1], "float32", "params", 0]],
        [["w", [1], "f4", "params", 0]],
        [["w", [1], "float32", "x", 0]],
        [["w", [1], "float32", "params", 0]] * 2,
        [["", [1], "float32", "params", 0]],
    ],
)
def test_a_layout_that_cannot_be_is_refused(layout: Any) -> None:
    assert bad_field(Hello, role="worker", token=b"t", layout=layout) == "BAD_LAYOUT"


# ---- random damage -------------------------------------------------------------------------------------


def damaged(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """The frames with one thing wrong: a bit, a byte, a length, an order, a number of frames."""
    frames = list(frames)
    at = rng.randrange(len(frames))
    frame = bytearray(frames[at])
    match rng.randrange(7):
        case 0 if frame:
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        case 1 if frame:
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        case 2:
            del frame[rng.randrange(len(frame) + 1) :]
        case 3:
            frame[rng.randrange(len(frame) + 1) : 0] = rng.randbytes(rng.randint(1, 9))
        case 4:
            frames.insert(at, rng.choice(frames))
            return frames
        case 5:
            del frames[at]
            return frames
        case _:
            rng.shuffle(frames)
            return frames
    frames[at] = bytes(frame)
    return frames


def test_20000_damaged_messages_are_refused_or_still_messages() -> None:
    rng = random.Random(SEED)
    good = [received(wire.encode(example(kind))) for kind in KINDS]
    good += [received(wire.encode(dataclasses.replace(example(kind), inline=True))) for kind in KINDS]
    outcomes = {"refused": 0, "message": 0}
    for _ in range(20_000):
        frames = rng.choice(good)
        for _ in range(rng.randint(1, 4)):
            frames = damaged(frames, rng) if frames else frames
        try:
            outcomes["message"] += isinstance(wire.decode(frames), Message)
        except WireError as e:
            outcomes["refused"] += 1
            assert len(str(e)) <= 512
    assert outcomes["refused"] > 10_000
    assert outcomes["message"] > 1_000


@settings(max_examples=200)
@given(st.sampled_from(KINDS).flatmap(messages_of), st.integers(0, 2**32))
def test_damage_to_any_message_is_refused_or_still_a_message(msg: Message, seed: int) -> None:
    try:
        assert isinstance(wire.decode(damaged(received(wire.encode(msg)), random.Random(seed))), Message)
    except WireError as e:
        assert e.code


# ---- parts ---------------------------------------------------------------------------------------------

MIB = 1024 * 1024


@settings(max_examples=200)
@given(st.integers(0, 500), st.integers(1, 200), st.sampled_from([np.float32, np.int64]))
def test_parts_are_consecutive_bounded_and_complete(num_elements: int, max_part_bytes: int, dtype: Any) -> None:
    flat = np.arange(num_elements, dtype=dtype)
    parts = list(wire.split(flat, max_part_bytes))
    expected_offset = 0
    for offset, pieces in parts:
        assert offset == expected_offset
        expected_offset += sum(len(p) for p in pieces)
        assert sum(p.nbytes for p in pieces) <= max(max_part_bytes, flat.itemsize)
    assert np.array_equal(np.concatenate([p for _, pieces in parts for p in pieces]), flat)
    assert all(len(p) for _, pieces in parts for p in pieces) or num_elements == 0


@pytest.mark.parametrize(
    ("num_bytes", "pieces_per_part"),
    [
        (0, [1]),
        (4, [1]),
        (MIB, [1]),
        (MIB + 4, [2]),
        (4 * MIB - 4, [4]),
        (4 * MIB, [4]),
        (4 * MIB + 4, [4, 1]),
        (10 * MIB, [4, 4, 2]),
    ],
)
def test_parts_of_4_mib_in_pieces_of_1_mib(num_bytes: int, pieces_per_part: list[int]) -> None:
    flat = np.zeros(num_bytes // 4, np.float32)
    parts = list(wire.split(flat))
    assert [len(pieces) for _, pieces in parts] == pieces_per_part
    for _, pieces in parts:
        assert all(p.nbytes <= MIB and (not p.size or np.shares_memory(p, flat)) for p in pieces)
        wire.encode(push(grads=pieces))


def test_an_inline_part_with_full_statistics_and_counters_still_fits() -> None:
    flat = np.zeros(3 * MIB, np.float32)
    stats, counters = np.zeros(MIB, np.float32), np.zeros(MIB // 2, np.int64)
    parts = list(wire.split(flat, wire.MAX_INLINE_PART_BYTES))
    assert len(parts) == 3
    for offset, pieces in parts:
        reply = Params(inline=True, offset=offset, params=pieces, stats=stats, counters=counters)
        assert_same(round_trip(reply), reply)
