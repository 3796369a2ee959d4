"""The decoder: what it takes, and that whatever else arrives is refused with WireError and nothing more."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zasgd.core import codec
from zasgd.core.codec import WireError, pack, unpack

SEED = 20240917


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    """The twelve arrays of the golden file: every dtype, and the shapes that go wrong elsewhere."""
    ramp = np.arange(24)
    return {
        "f2_vector": ramp[:7].astype("<f2") / 8,
        "f4_matrix": (ramp.astype("<f4") / 3).reshape(4, 6),
        "f8_specials": np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324], "<f8"),
        "i1_negative": -ramp[:5].astype("|i1"),
        "i2_transposed": ramp.astype("<i2").reshape(2, 12).T,
        "i4_every_second": ramp.astype("<i4")[::2],
        "i8_scalar": np.array(-(1 << 62), "<i8"),
        "u1_fortran": np.asfortranarray(ramp.astype("|u1").reshape(4, 6)),
        "u2_empty": np.empty((0, 3), "<u2"),
        "u4_reversed": ramp.astype("<u4")[::-1],
        "u8_top": np.array([0, 2**64 - 1], "<u8"),
        "b1_cube": (ramp % 3 == 0).reshape(2, 3, 4),
    }


def same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Bit for bit, so NaN equals itself and -0.0 does not equal 0.0."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def stock(value: Any) -> bytes:
    """What the stock package writes."""
    return msgpack.packb(value, default=msgpack_numpy.encode)


def array_map(data: Any = b"\0" * 4, **fields: Any) -> dict[bytes, Any]:
    """A valid map of one float32, with some fields changed."""
    node = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [1], b"data": data}
    return node | {key.encode(): value for key, value in fields.items()}


# ---- arrays that must arrive ------------------------------------------------------------------------


@pytest.mark.parametrize("name", arrays())
def test_the_stock_package_writes_the_same_bytes_and_reads_ours(name: str) -> None:
    array = arrays()[name]
    ours, buffers = pack({"x": array}, inline=True)
    assert buffers == []
    assert ours == stock({"x": array})
    assert same(
        msgpack.unpackb(ours, object_hook=msgpack_numpy.decode)["x"],
        np.ascontiguousarray(array).reshape(array.shape),
    )
    assert same(unpack(stock({"x": array}))["x"], array)


def test_golden_bytes_of_twelve_arrays(golden: Any) -> None:
    found = {name: pack(array, inline=True)[0] for name, array in arrays().items()}
    assert len(found) == 12
    golden("wire/arrays.txt", {name: body.hex() for name, body in found.items()})


def big(name: str) -> np.ndarray[Any, Any]:
    w = np.random.default_rng(SEED).standard_normal((60, 80)).astype(np.float32)
    return {
        "w.T": w.T,
        "a[::2]": w.reshape(-1)[::2],
        "fortran": np.asfortranarray(w),
        "negative": w[::-1, ::-1],
        "broadcast": np.broadcast_to(w[0], (50, 80)),
        "3-d": w.reshape(4, 15, 80),
        "plain": w,
    }[name]


@pytest.mark.parametrize("name", ["w.T", "a[::2]", "fortran", "negative", "broadcast", "3-d", "plain"])
def test_views_of_any_order_travel_bit_exact_as_frames(name: str) -> None:
    array = big(name)
    body, buffers = pack([array])
    assert len(buffers) == 1
    assert buffers[0].nbytes == array.nbytes
    assert same(unpack(body, [bytes(b) for b in buffers])[0], array)


@pytest.mark.parametrize("dtype", codec.DTYPES)
@pytest.mark.parametrize("size", [0, 1, 5000])
def test_every_dtype_inside_the_map_and_as_a_frame(dtype: str, size: int) -> None:
    array = np.random.default_rng(SEED).integers(0, 2, size).astype(dtype)
    body, buffers = pack(array)
    assert bool(buffers) == (array.nbytes >= codec.INLINE_BELOW_BYTES)
    assert same(unpack(body, buffers), array)


def test_a_contiguous_array_is_not_copied_and_arrives_read_only() -> None:
    array = np.arange(5000, dtype=np.float32)
    body, buffers = pack(array)
    assert np.shares_memory(np.frombuffer(buffers[0], np.uint8), array)
    received = unpack(body, [memoryview(bytearray(buffers[0]))])
    assert received.flags.aligned
    with pytest.raises(ValueError, match="read-only"):
        received[0] = 1


def test_a_frame_at_an_odd_address_is_copied_to_an_aligned_one() -> None:
    array = np.arange(2000, dtype=np.float64)
    body, buffers = pack(array)
    shifted = memoryview(b"?" + bytes(buffers[0]))[1:]
    received = unpack(body, [shifted])
    assert received.flags.aligned
    assert not received.flags.writeable
    assert same(received, array)


def test_numpy_scalars_come_as_numbers() -> None:
    body = stock({"a": np.float32(1.5), "b": np.int64(-3), "c": np.bool_(True)})
    assert unpack(body) == {"a": 1.5, "b": -3, "c": True}
    assert unpack(pack({"a": np.float32(1.5)})[0]) == {"a": 1.5}


# ---- arrays that must not arrive --------------------------------------------------------------------


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}",))


def hostile(canary: str) -> dict[str, Any]:
    """Payloads that crash, unpickle or lie in the stock decoder."""
    poison = pickle.dumps(Canary(canary))
    return {
        "pickled object": array_map(poison, kind=b"O"),
        "pickled object, typed": array_map(poison, kind=b"O", type=[["", "|O"]]),
        "pointers": array_map(b"\x01" * 16, type="|O", shape=[2]),
        "pointers, short name": array_map(b"\x01" * 16, type="O", shape=[2]),
        "pointers in a struct": array_map(b"\x01" * 8, type=[["a", "|O"]], kind=b"V"),
        "struct": array_map(b"\x01" * 8, type=[["a", "<f4"], ["b", "<f4"]], kind=b"V"),
        "zero-width void": array_map(b"", type="|V0", shape=[1 << 60]),
        "zero-width bytes": array_map(b"", type="|S0", shape=[1 << 60]),
        "text": array_map(b"\0" * 16, type="<U4"),
        "dates": array_map(b"\0" * 8, type="M8[s]"),
        "big-endian": array_map(type=">f4"),
        "native alias": array_map(type="f4"),
        "complex": array_map(b"\0" * 8, type="<c8"),
        "long double": array_map(b"\0" * 16, type="<f16"),
        "type as bytes": array_map(type=b"<f4"),
        "type as a list": array_map(type=["<f4"]),
        "type as a map": array_map(type={"a": 1}),
        "type missing": {k: v for k, v in array_map().items() if k != b"type"},
        "kind missing": {k: v for k, v in array_map().items() if k != b"kind"},
        "kind V": array_map(kind=b"V"),
        "kind as text": array_map(kind=""),
        "kind as a list": array_map(kind=[]),
        "nd as a number": array_map(nd=1),
        "nd as text": array_map(nd="true"),
        "nd nil": array_map(nd=None),
        "nd false with a shape": array_map(nd=False),
        "one key too many": array_map(extra=1),
        "a text key among them": array_map() | {"x": 1},
        "shape -1": array_map(shape=[-1]),
        "shape -1 twice": array_map(shape=[-1, -1]),
        "shape too large": array_map(shape=[2]),
        "shape too small": array_map(b"\0" * 8),
        "shape beyond 64 bits": array_map(shape=[(1 << 64) - 1]),
        "shape that wraps round": array_map(b"", shape=[1 << 32, 1 << 32]),
        "empty, but huge": array_map(b"", shape=[0, (1 << 32) - 1, (1 << 32) - 1, (1 << 32) - 1]),
        "empty, size beyond 64 bits": array_map(b"", shape=[0, 1 << 63]),
        "shape of booleans": array_map(shape=[True]),
        "shape of floats": array_map(shape=[1.0]),
        "shape a number": array_map(shape=1),
        "shape nested": array_map(shape=[[1]]),
        "nine axes": array_map(shape=[1] * 9),
        "data as text": array_map("\0\0\0\0"),
        "data a number": array_map(4),
        "data nil": array_map(None),
        "data an array": array_map(array_map()),
        "not a whole number of elements": array_map(b"\0" * 5),
        "boolean two": array_map(b"\x02", type="|b1"),
        "scalar too long": {b"nd": False, b"type": "<f4", b"data": b"\0" * 8},
        "scalar pointer": {b"nd": False, b"type": "|O", b"data": b"\1" * 8},
        "scalar of text": {b"nd": False, b"type": "<f4", b"data": "0000"},
        "complex number": {b"complex": True, b"data": "1+1j"},
        "bytes as a key": {b"a": 1},
        "only nd": {b"nd": True},
    }


@pytest.mark.parametrize("name", hostile(""))
def test_hostile_arrays_are_refused_and_nothing_is_unpickled(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    body = msgpack.packb({"x": hostile(str(canary))[name]})
    with pytest.raises(WireError):
        unpack(body)
    assert not canary.exists()


def test_the_canary_does_sing_in_the_stock_decoder(tmp_path: Path) -> None:
    """Otherwise the tests beside this one would prove nothing."""
    canary = tmp_path / "canary"
    body = msgpack.packb(hostile(str(canary))["pickled object"])
    msgpack.unpackb(body, object_hook=msgpack_numpy.decode)
    assert canary.exists()


def test_hostile_arrays_are_refused_under_python_O_too(tmp_path: Path) -> None:
    """No check is an `assert`: the same payloads in an interpreter that drops asserts."""
    canary = tmp_path / "canary"
    bodies = [msgpack.packb({"x": node}) for node in hostile(str(canary)).values()]
    (tmp_path / "bodies").write_bytes(msgpack.packb(bodies))
    program = textwrap.dedent("""
        import sys, msgpack
        from zasgd.core.codec import WireError, unpack
        assert False, "asserts are still on"
        refused = 0
        for body in msgpack.unpackb(open(sys.argv[1], "rb").read()):
            try:
                unpack(body)
            except WireError:
                refused += 1
        print(refused)
    """)
    run = subprocess.run(
        [sys.executable, "-O", "-c", program, str(tmp_path / "bodies")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stdout.strip()) == (0, str(len(bodies))), run.stderr
    assert not canary.exists()


@pytest.mark.parametrize("dtype", ["O", "V8", "S4", "U4", "M8[s]", ">f4", "c8", [("a", "f4")]])
def test_what_could_not_be_read_cannot_be_sent(dtype: Any) -> None:
    with pytest.raises(WireError) as refusal:
        pack(np.zeros(2, dtype))
    assert refusal.value.code == "BAD_DTYPE"


@pytest.mark.parametrize("value", [object(), {1, 2}, 1j, 1 << 64, np.complex64(1j)])
def test_values_without_a_msgpack_type_cannot_be_sent(value: Any) -> None:
    with pytest.raises(WireError) as refusal:
        pack([value])
    assert refusal.value.code == "BAD_TYPE"


# ---- buffers ----------------------------------------------------------------------------------------


def ref(index: int) -> msgpack.ExtType:
    return msgpack.ExtType(1, index.to_bytes(2, "little"))


def test_each_buffer_is_used_exactly_once() -> None:
    four = [b"\0" * 4, b"\0" * 4]
    assert len(unpack(msgpack.packb([array_map(ref(1)), array_map(ref(0))]), four)) == 2
    for nodes, complaint in (
        ([array_map(ref(0)), array_map(ref(0))], "used twice"),
        ([array_map(ref(0))], "not referred to"),
        ([array_map(ref(0)), array_map(ref(2))], "absent"),
        ([array_map(ref(0)), array_map(ref(65535))], "absent"),
        ([], "not referred to"),
    ):
        with pytest.raises(WireError, match=complaint):
            unpack(msgpack.packb(nodes), four)


@pytest.mark.parametrize(
    "stray",
    [
        ref(0),
        [ref(0)],
        {"x": ref(0)},
        array_map(shape=ref(0)),
        array_map(kind=ref(0)),
        array_map(type=ref(0)),
        array_map(nd=ref(0)),
    ],
)
def test_a_buffer_stands_for_array_data_and_nothing_else(stray: Any) -> None:
    with pytest.raises(WireError):
        unpack(msgpack.packb(stray), [b"\0" * 4])


@pytest.mark.parametrize(
    "ext",
    [
        msgpack.ExtType(2, b"\0\0"),
        msgpack.ExtType(1, b"\0"),
        msgpack.ExtType(127, b"\0\0"),
        msgpack.Timestamp(1, 0),
    ],
)
def test_other_extension_types_are_refused(ext: Any) -> None:
    with pytest.raises(WireError):
        unpack(msgpack.packb(array_map(ext)), [b"\0" * 4])


def test_a_message_has_at_most_64_buffers_of_at_most_4_mib() -> None:
    piece = np.zeros(2000, np.float32)
    assert len(pack([piece] * codec.MAX_BUFFERS)[1]) == codec.MAX_BUFFERS
    for value in ([piece] * (codec.MAX_BUFFERS + 1), np.zeros(codec.MAX_FRAME_BYTES + 1, np.uint8)):
        with pytest.raises(WireError) as refusal:
            pack(value)
        assert refusal.value.code == "TOO_LARGE"


# ---- bodies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb({"a": 1}) + b"\0",
        msgpack.packb({"a": 1}) * 2,
        msgpack.packb({"a": [1, 2, 3]})[:-1],
        msgpack.packb({1: 1}),
        b"\x81\x90\x01",
        b"\x81\xc0\x01",
        b"\xa2\xff\xfe",
        b"\xa3\xed\xa0\x80",
    ],
    ids=[
        "empty",
        "unused-byte",
        "trailing",
        "two",
        "cut",
        "int-key",
        "list-key",
        "nil-key",
        "not-utf8",
        "surrogate",
    ],
)
def test_what_is_not_one_msgpack_value_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        unpack(body)


def test_lists_and_maps_nest_eight_deep_and_no_deeper() -> None:
    def nested(depth: int) -> Any:
        return 1 if depth == 0 else ([nested(depth - 1)] if depth % 2 else {"a": nested(depth - 1)})

    assert unpack(pack(nested(8))[0]) == nested(8)
    for depth in (9, 100, 500):
        with pytest.raises(WireError):
            unpack(pack(nested(depth))[0])


def test_a_body_is_as_long_as_its_kind_allows() -> None:
    body = pack("x" * (codec.MAX_BODY_BYTES - 3))[0]
    assert len(body) == codec.MAX_BODY_BYTES
    assert len(unpack(body)) == codec.MAX_BODY_BYTES - 3
    longer = pack("x" * codec.MAX_BODY_BYTES)[0]
    with pytest.raises(WireError) as refusal:
        unpack(longer)
    assert refusal.value.code == "TOO_LARGE"
    assert len(unpack(longer, max_body_bytes=1 << 20)) == codec.MAX_BODY_BYTES


@pytest.mark.parametrize("empty", [b"\x80", b"\x90", b"\xa0", b"\xc0"])
def test_a_long_body_cannot_become_gigabytes_of_objects(empty: bytes) -> None:
    row = b"\xdc\xff\xff" + empty * 65535
    body = b"\xdc\x00\x40" + row * 64
    with pytest.raises(WireError, match="more than 1048576 values") as refusal:
        unpack(body, max_body_bytes=1 << 24)
    assert refusal.value.code == "TOO_LARGE"


def refused_within(body: bytes, seconds: float) -> bool:
    """Decode, expecting a value or WireError; the fastest of three tries counts, the machine being shared."""
    took = []
    for _ in range(3):
        start = time.perf_counter()
        with contextlib.suppress(WireError):
            unpack(body)
        took.append(time.perf_counter() - start)
        if took[-1] < seconds:
            return True
    return min(took) < seconds


HEADERS = [
    b"\x9f",
    b"\x8f",
    b"\xdc\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdd\x00\x00\xff\xff",
    b"\xde\xff\xff",
    b"\xdf\xff\xff\xff\xff",
]


@pytest.mark.parametrize("header", HEADERS, ids=bytes.hex)
def test_300_nested_headers_are_refused_in_5_ms(header: bytes) -> None:
    assert refused_within(header * 300, 0.005)
    with pytest.raises(WireError):
        unpack(header * 300)


def test_10000_mutated_headers_raise_only_wire_errors_in_5_ms_each() -> None:
    rng = random.Random(SEED)
    good = [pack({"x": array, "n": [1, 2.5, "t", None, {"k": b"v"}]})[0] for array in arrays().values()]
    bombs = [b"".join(rng.choices(HEADERS, k=300)) for _ in range(12)]
    for number in range(10_000):
        body = bytearray(rng.choice(good if number % 2 else bombs))
        for _ in range(rng.randint(1, 8)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        assert refused_within(bytes(body), 0.005), body.hex()


@given(st.binary(max_size=200))
def test_any_bytes_raise_only_wire_errors(body: bytes) -> None:
    try:
        unpack(body)
    except WireError as e:
        assert len(str(e)) < 512
        assert e.code.isupper()
