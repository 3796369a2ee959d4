"""Codecs: what is lost is bounded, what both sides have is the same, what a peer made wrongly is refused."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from zasgd.core import codec as wire_codec
from zasgd.core import compress
from zasgd.core.compress import (
    BLOCK,
    MAX_ELEMENTS,
    CodecError,
    Feedback,
    decode,
    decode_onto,
    encode,
    encode_difference,
    packed_bytes,
    warm,
)
from zasgd.core.compression import CODECS, FEEDBACK, Compression
from zasgd.core.kernels import Vector
from zasgd.core.node import InvariantError

LARGEST = np.finfo(np.float32).max
HALF_MAX = np.float32(65504)
EDGES = (
    0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, -1.17549435e-38, 5.96e-8, -2.98e-8, 6.1e-5, 6.097e-5, 65504.0, 65519.996,
    -65520.0, 65536.0, 1e30, 3.3895314e38, 3.4028235e38, -3.4028235e38, 1.0, -1.0009766,
)  # fmt: skip
SHARES = (0.01, 0.1, 0.5, 1.0)
COMPRESSIONS = [*(Compression(name) for name in CODECS[:-1]), *(Compression("topk", share) for share in SHARES)]

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = st.integers(0, 700).flatmap(lambda n: arrays(np.float32, n, elements=finite | st.sampled_from(EDGES)))
ordinary = st.integers(0, 700).flatmap(
    lambda n: arrays(np.float32, n, elements=st.floats(-1e4, 1e4, width=32) | st.sampled_from(EDGES[:10]))
)


def normal(n: int, seed: int = 0, scale: float = 1.0) -> Vector:
    return (scale * np.random.default_rng(seed).standard_normal(n)).astype(np.float32)


def bits(*patterns: int) -> Vector:
    return np.array(patterns, np.uint32).view(np.float32)


def decoded(name: str, packed: tuple[Any, ...], size: int) -> Vector:
    out = np.full(size, 7, np.float32)
    decode(name, packed, out)
    return out


def round_trip(compression: Compression, values: Vector) -> Vector:
    return decoded(compression.codec, encode(compression, values), values.size)


def assert_same_bits(a: Vector, b: Vector) -> None:
    """Equal to the last bit, signed zeros included."""
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def every_float32_near(upper: int, shift: int) -> Vector:
    """Around each pattern of the `upper` highest bits: itself, half way to the next, and what is next to that."""
    top = np.arange(1 << upper, dtype=np.uint64) << shift
    half = 1 << (shift - 1)
    offsets = np.array([0, 1, half - 1, half, half + 1, 2 * half - 1], np.uint64)
    return (top[:, None] + offsets).astype(np.uint32).reshape(-1).view(np.float32)


# ---- what a compression is ---------------------------------------------------------------------------


def test_a_compression_survives_the_trip_through_plain_values() -> None:
    for compression in COMPRESSIONS:
        assert Compression.from_plain(compression.to_plain()) == compression
    assert Compression.from_plain({}) == Compression() == Compression("none", 0.01)
    assert set(CODECS) > FEEDBACK


@pytest.mark.parametrize(
    ("plain", "text"),
    [
        ({"codec": "zip"}, "none, bf16, fp16, int8, topk"),
        ({"codec": None}, "not None"),
        ({"share": 0.0}, "in (0, 1], not 0.0"),
        ({"share": 1.5}, "not 1.5"),
        ({"share": math.nan}, "not nan"),
        ({"share": "0.1"}, "not '0.1'"),
        ({"share": True}, "not True"),
        ({"level": 3}, "has the keys codec, share"),
        ("bf16", "has the keys codec, share"),
        (None, "has the keys codec, share"),
    ],
)
def test_what_is_no_compression_is_told_in_one_line(plain: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)) as told:
        Compression.from_plain(plain)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
@pytest.mark.parametrize("size", [0, 1, 2, 255, 256, 257, 1000, MAX_ELEMENTS])
def test_packed_arrays_are_as_large_as_they_are_said_to_be(compression: Compression, size: int) -> None:
    packed = encode(compression, normal(size))
    assert sum(a.nbytes for a in packed) == packed_bytes(compression.codec, size, compression.share)
    assert all(a.nbytes <= wire_codec.MAX_FRAME_BYTES for a in packed)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
def test_encoding_makes_new_arrays_and_leaves_the_values_alone(compression: Compression) -> None:
    values = normal(1000)
    before = values.copy()
    frozen = values.view()
    frozen.setflags(write=False)
    packed, again = encode(compression, values), encode(compression, frozen)
    assert not any(np.shares_memory(a, values) for a in packed)
    assert_same_bits(values, before)
    for a, b in zip(packed, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
def test_an_empty_part_travels(compression: Compression) -> None:
    empty = np.empty(0, np.float32)
    assert round_trip(compression, empty).size == 0
    packed = encode_difference(compression, empty, empty.copy())
    decode_onto(compression.codec, packed, empty)
    feedback = Feedback(compression, 0)
    assert decoded(compression.codec, feedback.encode(0, empty), 0).size == 0
    assert feedback.is_empty and feedback.norm == 0 and feedback.flush(0, empty).size == 0


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
@pytest.mark.parametrize("size", [3, 5000])
def test_packed_arrays_come_over_the_wire_as_they_are(compression: Compression, size: int) -> None:
    values = normal(size)
    packed = encode(compression, values)
    body, frames = wire_codec.pack(list(packed))
    received = tuple(wire_codec.unpack(body, frames))
    assert_same_bits(decoded(compression.codec, received, size), decoded(compression.codec, packed, size))


# ---- bf16 and fp16 -----------------------------------------------------------------------------------


def test_bf16_rounds_as_torch_does_around_every_bf16_there_is() -> None:
    torch = pytest.importorskip("torch")
    values = every_float32_near(16, 16)
    for part in np.array_split(values, -(-values.size // MAX_ELEMENTS)):
        (got,) = encode(Compression("bf16"), part)
        expected = torch.from_numpy(part).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        number = ~np.isnan(part)
        np.testing.assert_array_equal(got[number], expected[number])
        assert np.isnan(decoded("bf16", (got,), part.size)[~number]).all()


def test_every_bf16_comes_back_as_the_float32_it_is() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    values = decoded("bf16", (every,), every.size)
    assert_same_bits(values, (every.astype(np.uint32) << 16).view(np.float32))
    number = ~np.isnan(values)
    np.testing.assert_array_equal(encode(Compression("bf16"), values)[0][number], every[number])


def test_fp16_rounds_as_numpy_does_around_every_half_there_is() -> None:
    values = every_float32_near(19, 13)  # sign, exponent and ten bits of the mantissa
    for part in np.array_split(values, -(-values.size // MAX_ELEMENTS)):
        (got,) = encode(Compression("fp16"), part)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = part.astype(np.float16)
        number = ~np.isnan(part)
        saturated = np.isfinite(part) & np.isinf(expected)
        expected[saturated] = np.copysign(np.float16(HALF_MAX), part[saturated])
        np.testing.assert_array_equal(got.view(np.uint16)[number], expected.view(np.uint16)[number])
        assert np.isnan(got[~number]).all()


def test_every_half_comes_back_as_the_float32_it_is() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    number = ~np.isnan(every)
    values = decoded("fp16", (every,), every.size)
    assert_same_bits(values[number], every.astype(np.float32)[number])
    assert np.isnan(values[~number]).all()


@given(vectors)
@settings(deadline=None, max_examples=60)
def test_bf16_is_off_by_half_a_bit_of_eight(values: Vector) -> None:
    got = round_trip(Compression("bf16"), values).astype(np.float64)
    bounded = np.abs(values) <= 3.3895e38  # beyond, the nearest bf16 is infinity
    error = np.abs(got - values)[bounded]
    assert (error <= 2.0**-8 * np.abs(values[bounded].astype(np.float64)) + 2.0**-134).all()
    np.testing.assert_array_equal(np.signbit(got), np.signbit(values))


@given(vectors)
@settings(deadline=None, max_examples=60)
def test_fp16_is_off_by_half_a_bit_of_eleven_and_keeps_large_values_finite(values: Vector) -> None:
    got = round_trip(Compression("fp16"), values)
    assert np.isfinite(got).all()
    clipped = np.clip(values, -HALF_MAX, HALF_MAX).astype(np.float64)
    assert (np.abs(got - clipped) <= 2.0**-11 * np.abs(clipped) + 2.0**-25).all()
    np.testing.assert_array_equal(np.signbit(got), np.signbit(values))


@pytest.mark.parametrize("name", ["none", "bf16", "fp16"])
def test_infinity_and_nan_stay_what_they_are(name: str) -> None:
    values = bits(0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x3F800000)
    got = round_trip(Compression(name), values)
    np.testing.assert_array_equal(got, values)


# ---- int8 --------------------------------------------------------------------------------------------


def quantised(values: Vector) -> tuple[Any, Vector]:
    """Codes and scales of an ordinary vector, in plain numpy."""
    starts = range(0, values.size, BLOCK)
    scales = np.array([np.abs(values[i : i + BLOCK]).max() / np.float32(127) for i in starts], np.float32)
    spread = np.repeat(scales, BLOCK)[: values.size]
    inverse = np.divide(np.float32(1), spread, out=np.zeros_like(spread), where=spread > 0)
    return np.rint(values * inverse).astype(np.int8), scales


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1024, 10_000])
def test_int8_is_the_formula(size: int) -> None:
    values = normal(size, scale=1e-3)
    values[: size // 3] = 0
    codes, scales = encode(Compression("int8"), values)
    expected, expected_scales = quantised(values)
    np.testing.assert_array_equal(codes, expected)
    assert_same_bits(scales, expected_scales)
    spread = np.repeat(scales, BLOCK)[:size]
    assert_same_bits(decoded("int8", (codes, scales), size), codes.astype(np.float32) * spread)


def test_int8_rounds_ties_to_even() -> None:
    values = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], np.float32)
    codes, scales = encode(Compression("int8"), values)
    assert scales.tolist() == [1.0] and codes.tolist() == [127, 0, 2, 2, 0, -2, -2]


@given(vectors)
@settings(deadline=None, max_examples=100)
def test_int8_is_off_by_half_a_scale(values: Vector) -> None:
    codes, scales = encode(Compression("int8"), values)
    got = decoded("int8", (codes, scales), values.size)
    assert np.isfinite(got).all()
    spread = np.repeat(scales, BLOCK)[: values.size].astype(np.float64)
    # the scale, its inverse and two products are rounded: 127 scales are off by a few 2^-24 of themselves
    assert (np.abs(got.astype(np.float64) - values) <= spread * (0.5 + 127 * 2.0**-22)).all()
    assert codes.size == 0 or codes.min() >= -127


def test_a_block_of_zeros_has_no_scale_and_a_loud_one_does_not_drown_its_neighbour() -> None:
    values = np.concatenate([np.zeros(BLOCK), np.full(BLOCK, 1e30), np.full(3, 1e-30)]).astype(np.float32)
    values[:5] = -0.0
    codes, scales = encode(Compression("int8"), values)
    assert scales[0] == 0 and not codes[:BLOCK].any()
    got = decoded("int8", (codes, scales), values.size)
    assert not got[:BLOCK].any()
    np.testing.assert_allclose(got[BLOCK:], values[BLOCK:], rtol=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_int8_cannot_hide_what_is_not_finite(bad: float) -> None:
    values = normal(600)
    values[300] = bad
    got = round_trip(Compression("int8"), values)
    assert not np.isfinite(got[300])
    assert np.isfinite(np.delete(got, 300)).all()


# ---- topk --------------------------------------------------------------------------------------------


def largest(values: Vector, share: float) -> Any:
    """Positions of the largest magnitudes, the first of equal ones, ascending."""
    k = max(1, math.ceil(share * values.size)) if values.size else 0
    order = np.lexsort((np.arange(values.size), -np.abs(values).astype(np.float64)))
    return np.sort(order[:k])


def assert_largest(values: Vector, share: float) -> None:
    indices, kept = encode(Compression("topk", share), values)
    expected = largest(values, share)
    np.testing.assert_array_equal(indices, expected)
    assert_same_bits(kept, values[expected])
    dense = np.zeros_like(values)
    dense[expected] = values[expected]
    assert_same_bits(decoded("topk", (indices, kept), values.size), dense)


@given(vectors | st.integers(0, 700).flatmap(lambda n: arrays(np.float32, n, elements=st.sampled_from((0, 1, -1, 2)))))
@settings(deadline=None, max_examples=150)
def test_topk_keeps_the_largest_and_of_equal_ones_the_first(values: Vector) -> None:
    for share in SHARES:
        assert_largest(values, share)


MISLEADING: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda i: 0.0 * i,
    "all equal": lambda i: 0.0 * i - 3,
    "falling": lambda i: -i,
    "rising": lambda i: i,
    "large only in the sample": lambda i: (i % compress.STRIDE == 0) * (i + 1.0),
    "small in the sample": lambda i: (i % compress.STRIDE != 0) * (i % 1000.0),
    "a few": lambda i: (i % 9973 == 5) * 1.0,
    "next to each other": lambda i: (1000 + i % 3).astype(np.uint32).view(np.float32),
    "of every size": lambda i: 2.0 ** (i % 250 - 125) * (1 - 2 * (i % 2)),
}


@pytest.mark.parametrize("shape", MISLEADING)
@pytest.mark.parametrize("share", [1e-5, *SHARES])
def test_topk_finds_them_whatever_its_sample_says(shape: str, share: float) -> None:
    assert_largest(MISLEADING[shape](np.arange(40_000)).astype(np.float32), share)


def test_topk_sends_what_is_not_finite_first() -> None:
    values = normal(500)
    values[[3, 77, 400]] = math.inf, math.nan, -math.inf
    indices, kept = encode(Compression("topk", 3 / 500), values)
    assert indices.tolist() == [3, 77, 400] and not np.isfinite(kept).any()


# ---- differences: both sides have the same ------------------------------------------------------------


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
def test_two_hundred_differences_leave_both_sides_with_the_same_bits(compression: Compression) -> None:
    rng = np.random.default_rng(1)
    size = 1237
    base = normal(size)
    base[::7] = -0.0
    worker = base.copy()
    new = base.copy()
    for step in range(200):
        moved = rng.random(size) < 0.7
        new += (rng.standard_normal(size) * 10.0 ** rng.integers(-42, 2) * moved).astype(np.float32)
        packed = encode_difference(compression, new, base)
        body, frames = wire_codec.pack(list(packed))
        decode_onto(compression.codec, tuple(wire_codec.unpack(body, frames)), worker)
        assert_same_bits(base, worker), step
    for _ in range(300):  # what is missing is part of the next difference
        decode_onto(compression.codec, encode_difference(compression, new, base), worker)
    assert_same_bits(base, worker)
    np.testing.assert_allclose(worker, new, rtol=1e-6, atol=1e-6 * np.abs(new).max())


@given(st.data(), st.sampled_from(COMPRESSIONS))
@settings(deadline=None, max_examples=150)
def test_a_difference_is_that_of_the_two_and_base_follows_by_one_addition(
    data: st.DataObject, compression: Compression
) -> None:
    new = data.draw(vectors)
    base = data.draw(arrays(np.float32, new.size, elements=finite | st.sampled_from(EDGES)))
    before, kept = base.copy(), new.copy()
    packed = encode_difference(compression, new, base)
    with np.errstate(over="ignore"):
        expected = encode(compression, new - before)
    for a, b in zip(packed, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    decode_onto(compression.codec, packed, before)
    np.testing.assert_array_equal(before, base)
    number = ~np.isnan(base)
    assert_same_bits(before[number], base[number])
    assert_same_bits(new, kept)


def test_decoding_onto_is_one_float32_addition_and_leaves_what_topk_does_not_send() -> None:
    values, base = normal(1000), normal(1000, seed=1)
    base[::3] = -0.0
    for compression in COMPRESSIONS:
        packed = encode(compression, values)
        out = base.copy()
        decode_onto(compression.codec, packed, out)
        added = base + decoded(compression.codec, packed, 1000)
        if compression.codec == "topk":
            unsent = np.setdiff1d(np.arange(1000), packed[0])
            added[unsent] = base[unsent]
        assert_same_bits(out, added)


# ---- error feedback ----------------------------------------------------------------------------------


@given(ordinary, st.sampled_from([c for c in COMPRESSIONS if c.codec in FEEDBACK]), st.integers(1, 12))
@settings(deadline=None, max_examples=80)
def test_what_was_sent_and_what_is_left_make_up_what_came(values: Vector, compression: Compression, steps: int) -> None:
    rng = np.random.default_rng(steps)
    feedback = Feedback(compression, values.size)
    came, sent = np.zeros((2, values.size))
    for _ in range(steps):
        gradient = (values * rng.random(values.size)).astype(np.float32)
        came += gradient
        sent += decoded(compression.codec, feedback.encode(0, gradient), values.size)
    zeros = np.zeros_like(values)
    sent += feedback.flush(0, zeros)
    largest_sum = steps * (np.abs(values).max(initial=0) + 1e-30)
    assert (np.abs(sent - came) <= 2.0**-21 * steps * largest_sum).all()
    assert feedback.is_empty and feedback.norm == 0


@pytest.mark.parametrize("name", sorted(FEEDBACK))
def test_over_many_steps_nothing_of_a_small_constant_gradient_is_lost(name: str) -> None:
    size, steps = 1000, 2000
    gradient = np.full(size, 1e-3, np.float32)
    gradient[0] = 1.0  # alone it would set the scale, and topk would send nothing else
    gradient[1:50] = np.geomspace(1e-4, 0.9, 49)
    compression = Compression(name, share=0.02)
    lost = steps * round_trip(compression, gradient).astype(np.float64)
    feedback, sent = Feedback(compression, size), np.zeros(size)
    for _ in range(steps):
        sent += decoded(name, feedback.encode(0, gradient), size)
    assert np.abs(lost / (steps * gradient) - 1).max() > 0.9
    # what waits is at most a scale, or what topk saves up before an element's turn comes
    waiting = 1 / 127 if name == "int8" else float(gradient.sum()) / 20 * 2
    assert np.abs(sent - steps * gradient.astype(np.float64)).max() < waiting + 1e-3
    assert not feedback.is_empty and 0 < feedback.norm < waiting * math.sqrt(size)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
def test_parts_of_a_gradient_keep_to_their_own_elements(compression: Compression) -> None:
    values = normal(3000)
    whole, alone = Feedback(compression, 3000), Feedback(compression, 1000)
    for _ in range(3):
        first = [whole.encode(at, values[at : at + 1000]) for at in (0, 2000)]
        expected = alone.encode(0, values[2000:])
        for a, b in zip(first[1], expected, strict=True):
            np.testing.assert_array_equal(a, b)
    zeros = np.zeros(3000, np.float32)
    dense = whole.flush(0, zeros)
    assert not dense[1000:2000].any()
    assert_same_bits(dense[2000:], alone.flush(0, zeros[:1000]))


def test_a_flush_is_dense_and_once_and_only_there() -> None:
    feedback = Feedback(Compression("topk", 0.1), 100)
    values = np.arange(1, 101, dtype=np.float32)
    feedback.encode(0, values)  # sends 91 to 100
    assert feedback.norm == pytest.approx(math.sqrt(sum(i * i for i in range(1, 91))))
    ones = np.ones(50, np.float32)
    np.testing.assert_array_equal(feedback.flush(0, ones), 1 + np.arange(1, 51))
    np.testing.assert_array_equal(feedback.flush(0, ones), 1)
    assert not feedback.is_empty
    np.testing.assert_array_equal(feedback.flush(50, ones), 1 + np.where(np.arange(50) < 40, np.arange(51, 101), 0))
    assert feedback.is_empty


@pytest.mark.parametrize("name", sorted(set(CODECS) - FEEDBACK))
def test_codecs_without_feedback_keep_nothing(name: str) -> None:
    feedback, values = Feedback(Compression(name), 100), normal(100)
    for _ in range(3):
        np.testing.assert_array_equal(feedback.encode(0, values)[0], encode(Compression(name), values)[0])
    assert feedback.is_empty and feedback.norm == 0
    dense = feedback.flush(0, values)
    assert_same_bits(dense, values)
    assert not np.shares_memory(dense, values)


@pytest.mark.parametrize("name", sorted(FEEDBACK))
@pytest.mark.filterwarnings("error")
def test_a_sum_that_overflows_is_seen_once_and_then_forgotten(name: str) -> None:
    feedback, zeros = Feedback(Compression(name, 0.1), 10), np.zeros(10, np.float32)
    huge = zeros.copy()
    huge[3] = LARGEST
    feedback._residual[3] = LARGEST
    assert not np.isfinite(decoded(name, feedback.encode(0, huge), 10)).all()
    assert np.isfinite(decoded(name, feedback.encode(0, zeros), 10)).all()


# ---- what a peer made wrongly -------------------------------------------------------------------------

f4, u4, i1 = np.float32, np.uint32, np.int8
MALFORMED: list[tuple[str, tuple[Any, ...], int, str]] = [
    ("zip", (np.ones(4, f4),), 4, "none of none, bf16"),
    ("", (np.ones(4, f4),), 4, "none of none, bf16"),
    *((name, (), 4, "packed arrays, not 0") for name in CODECS),
    *((name, (np.zeros(4, f4),) * 3, 4, "packed arrays, not 3") for name in CODECS),
    ("none", (np.ones(5, f4),), 4, "shape (5,), not <f4 of shape (4,)"),
    ("none", (np.ones(4),), 4, "<f8"),
    ("none", (np.ones((2, 2), f4),), 4, "shape (2, 2)"),
    ("none", (np.ones(4, ">f4"),), 4, ">f4"),
    ("none", (np.ones(8, f4)[::2],), 4, "not <f4"),
    ("bf16", (np.ones(4, np.float16),), 4, "<f2"),
    ("bf16", (np.ones(3, np.uint16),), 4, "shape (3,)"),
    ("fp16", (np.ones(4, np.uint16),), 4, "<u2"),
    ("fp16", (np.ones(5, np.float16),), 4, "shape (5,)"),
    ("int8", (np.ones(300, i1), np.ones(1, f4)), 300, "shape (1,)"),
    ("int8", (np.ones(300, i1), np.ones(3, f4)), 300, "shape (3,)"),
    ("int8", (np.ones(299, i1), np.ones(2, f4)), 300, "shape (299,)"),
    ("int8", (np.ones(300, np.uint8), np.ones(2, f4)), 300, "|u1"),
    ("int8", (np.ones(300, i1), np.ones(2)), 300, "<f8"),
    *(
        ("int8", (np.ones(300, i1), np.array([1, scale], f4)), 300, "negative or not finite")
        for scale in (math.inf, math.nan, -1e-45, -0.0, -math.inf)
    ),
    ("topk", (np.array([1, 4], u4), np.ones(2, f4)), 4, "index 4 of 4"),
    ("topk", (np.array([1, 2**32 - 1], u4), np.ones(2, f4)), 4, "index 4294967295"),
    ("topk", (np.array([2, 1], u4), np.ones(2, f4)), 4, "do not ascend"),
    ("topk", (np.array([1, 1], u4), np.ones(2, f4)), 4, "do not ascend"),
    ("topk", (np.array([2**32 - 1, 1], u4), np.ones(2, f4)), 4, "do not ascend"),
    ("topk", (np.arange(5, dtype=u4), np.ones(5, f4)), 4, "index 4 of 4"),
    ("topk", (np.array([0], u4), np.ones(1, f4)), 0, "index 0 of 0"),
    ("topk", (np.array([1, 2], u4), np.ones(1, f4)), 4, "shape (1,)"),
    ("topk", (np.array([1, 2], np.int32), np.ones(2, f4)), 4, "<i4"),
    ("topk", (np.array([[1, 2]], u4), np.ones(2, f4)), 4, "shape (1, 2)"),
    ("topk", (np.array(1, u4), np.ones(1, f4)), 4, "shape ()"),
    ("topk", (np.array([1], u4), np.ones(1, f4)), MAX_ELEMENTS + 1, "at most 1048576 elements"),
]


@pytest.mark.parametrize("read", [decode, decode_onto], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("name", "packed", "size", "text"), MALFORMED)
def test_malformed_arrays_are_refused_in_one_line_and_write_nothing(
    read: Any, name: str, packed: tuple[Any, ...], size: int, text: str
) -> None:
    memory = np.full(size + 200, 5, np.float32)
    with pytest.raises(CodecError, match=re.escape(text)) as told:
        read(name, packed, memory[100 : 100 + size])
    assert "\n" not in str(told.value)
    np.testing.assert_array_equal(memory, 5)


def mutated(data: st.DataObject, packed: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """The arrays after one change that no encoder makes."""
    arrays_ = [a.copy() for a in packed]
    which = data.draw(st.integers(0, len(arrays_) - 1))
    a = arrays_[which]
    kinds = ["longer", "missing", "another", "wider", "square"] + (["shorter"] if a.size > (a.dtype == u4) else [])
    kinds += ["out of range", "descending"] if a.dtype == u4 else []
    kinds += ["bad scale"] if packed[0].dtype == i1 else []
    match data.draw(st.sampled_from(kinds)):
        case "longer":
            arrays_[which] = np.append(a, a[-1:] if a.dtype != u4 else u4(size)).astype(a.dtype)
        case "shorter":
            arrays_[which] = a[:-1]
        case "missing":
            del arrays_[which]
        case "another":
            arrays_.insert(which, a)
        case "wider":
            arrays_[which] = a.astype(np.float64)
        case "square":
            arrays_[which] = a.reshape(1, -1)
        case "out of range":
            a[-1] = data.draw(st.integers(size, 2**32 - 1))
        case "descending":
            arrays_ = [np.concatenate([x[-1:], x]) for x in arrays_]
        case "bad scale":
            scale = data.draw(st.sampled_from((math.inf, math.nan, -1.0)))
            arrays_[1][data.draw(st.integers(0, arrays_[1].size - 1))] = scale
    return tuple(arrays_)


@given(st.data(), st.sampled_from(COMPRESSIONS), st.integers(1, 600), st.sampled_from((decode, decode_onto)))
@settings(deadline=None, max_examples=300)
def test_no_mutation_is_taken_or_written_beyond_the_vector(
    data: st.DataObject, compression: Compression, size: int, read: Any
) -> None:
    memory = np.full(size + 2000, 5, np.float32)
    packed = mutated(data, encode(compression, normal(size)), size)
    with pytest.raises(CodecError):
        read(compression.codec, packed, memory[1000 : 1000 + size])
    np.testing.assert_array_equal(memory, 5)


@given(st.data(), st.sampled_from(COMPRESSIONS), st.integers(0, 600))
@settings(deadline=None, max_examples=100)
def test_any_bytes_of_the_right_sizes_are_taken_or_refused_but_stay_within(
    data: st.DataObject, compression: Compression, size: int
) -> None:
    packed = tuple(
        np.frombuffer(data.draw(st.binary(min_size=a.nbytes, max_size=a.nbytes)), a.dtype)
        for a in encode(compression, normal(size))
    )
    memory = np.full(size + 2000, 5, np.float32)
    try:
        decode(compression.codec, packed, memory[1000 : 1000 + size])
    except CodecError:
        np.testing.assert_array_equal(memory, 5)
    np.testing.assert_array_equal(memory[:1000], 5)
    np.testing.assert_array_equal(memory[1000 + size :], 5)


def test_vectors_of_our_own_that_do_not_fit_are_a_bug() -> None:
    bf16, ones = Compression("bf16"), np.ones(8, np.float32)
    frozen = ones.copy()
    frozen.setflags(write=False)
    packed = encode(bf16, ones)
    feedback = Feedback(Compression("int8"), 8)
    calls: list[Callable[[], Any]] = [
        lambda: encode(bf16, np.ones(8)),  # type: ignore[arg-type]
        lambda: encode(bf16, np.ones((2, 4), np.float32)),
        lambda: encode(bf16, ones[::2]),
        lambda: encode(bf16, np.ones(MAX_ELEMENTS + 1, np.float32)),
        lambda: decode("bf16", packed, np.ones(16, np.float32)[::2]),
        lambda: decode("bf16", packed, frozen),
        lambda: decode_onto("bf16", packed, np.ones(8)),  # type: ignore[arg-type]
        lambda: encode_difference(bf16, ones, ones),
        lambda: encode_difference(bf16, ones, frozen),
        lambda: encode_difference(bf16, ones, ones[:7].copy()),
        lambda: feedback.encode(1, ones),
        lambda: feedback.encode(-1, ones[:4]),
        lambda: feedback.flush(1, ones),
    ]
    for call in calls:
        with pytest.raises(InvariantError):
            call()


# ---- the machine code ---------------------------------------------------------------------------------

# what the loop does, packed; conversions to or from float64
INSTRUCTIONS = {
    "x86_64": (
        {"bits": r"\bvp(srl|sll)d\b.*[yz]mm", "floats": r"\bvmulps\b.*[yz]mm", "largest": r"\bvpmaxud\b.*[yz]mm"},
        r"\bv?cvt(ss2sd|sd2ss|ps2pd|pd2ps)\b",
    ),
    "aarch64": (
        {"bits": r"\b[us]?(shll?2?|shrn?2?|addhn|xtn2?)\b.*\.[48][hs]", "floats": r"\bfmul\b.*\.4s",
         "largest": r"\bumax\b.*\.4s"},
        r"\bfcvt[nl]?2?\s+[dv]\d+(\.2d)?, [sv]\d+(\.2s)?\b",
    ),
}  # fmt: skip
LOOPS = [
    (compress.pack_bf16, "bits"), (compress.unpack_bf16, "bits"), (compress.pack_fp16, "bits"),
    (compress.unpack_fp16, "bits"), (compress.pack_block, "floats"), (compress.unpack_int8, "floats"),
    (compress.largest_bits, "largest"),
]  # fmt: skip
known_processor = pytest.mark.skipif(
    platform.machine() not in INSTRUCTIONS, reason="the instructions of this processor are not listed here"
)


def assembly(dispatcher: Any, signature: Any) -> str:
    """The compiled loop without its wrapper."""
    return str(re.split(r"\.globl\s+_ZN7cpython", dispatcher.inspect_asm(signature))[0])


@known_processor
@pytest.mark.parametrize("which", range(len(LOOPS)))
def test_the_loops_are_packed_and_stay_float32(which: int) -> None:
    loop, does = LOOPS[which]
    packed, float64 = INSTRUCTIONS[platform.machine()]
    for name in CODECS:
        warm(Compression(name))
    assert loop.signatures  # type: ignore[attr-defined]
    for signature in loop.signatures:  # type: ignore[attr-defined]
        found = assembly(loop, signature)
        assert re.search(packed[does], found), ("not packed", signature)
        assert not re.search(float64, found), ("float64", signature)


@known_processor
def test_a_literal_of_python_and_a_loop_that_waits_for_itself_would_be_seen_in_the_assembly() -> None:
    packed, float64 = INSTRUCTIONS[platform.machine()]
    planted: Any = compress._compiled(promoted_and_waiting)
    planted(np.ones(300, np.int8), np.float32(2), np.ones(300, np.float32))
    found = assembly(planted, planted.signatures[0])
    assert re.search(float64, found) and not re.search(packed["floats"], found)


def promoted_and_waiting(codes: Any, scale: Any, out: Any) -> None:
    """Each element takes from the one before, and 0.5 is a float64."""
    for i in range(1, out.size):
        out[i] = out[i - 1] * scale + np.float32(codes[i]) * 0.5


@pytest.mark.parametrize("compression", COMPRESSIONS[:5], ids=str)
def test_warm_compiles_all_that_a_process_calls(compression: Compression) -> None:
    loops = [found for found in vars(compress).values() if hasattr(found, "signatures")]
    warm(compression)
    compiled = [len(loop.signatures) for loop in loops]
    name, values = compression.codec, normal(3000)
    frozen = values.view()
    frozen.setflags(write=False)
    feedback = Feedback(compression, 6000)
    for source in (values, frozen, values[1:], np.frombuffer(values.tobytes(), np.float32)):
        base = np.zeros_like(source)
        for packed in (
            encode(compression, source), encode_difference(compression, source, base), feedback.encode(7, source),
        ):  # fmt: skip
            body, frames = wire_codec.pack(list(packed))
            for arrays_ in (packed, tuple(wire_codec.unpack(body, frames))):
                decode(name, arrays_, base)
                decode_onto(name, arrays_, base)
        feedback.flush(0, source)
    assert [len(loop.signatures) for loop in loops] == compiled
