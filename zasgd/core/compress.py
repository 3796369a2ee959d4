"""Codecs of gradients and parameter differences that travel over a network: float32 vectors to smaller arrays and back.

Decides the arithmetic of each codec, what a well-formed packed array is, and what a receiver has afterwards, to the
bit: sender and receiver of a difference run the same addition. Never decides what is compressed, when, or how a vector
is cut into parts.

bf16, fp16: each element rounded to nearest, ties to even. int8: blocks of 256 elements with a scale each. topk: the
elements of largest magnitude. The last two lose so much that a sender keeps what it did not send (error feedback,
arXiv 1901.09847, algorithm 2); for a difference to what the receiver has, that happens by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

from zasgd.core.compression import CODECS, FEEDBACK, Compression
from zasgd.core.kernels import INFINITY_BITS, MAGNITUDE_BITS, Maybe, Vector, read_only
from zasgd.core.node import require

Array = np.ndarray[Any, Any]
Packed = tuple[Array, ...]
Loop = TypeVar("Loop", bound=Callable[..., Any])

MAX_ELEMENTS = 1 << 20
"""Elements of one part: as float32, or as indices of topk, they fill one frame."""

BLOCK = 256
"""Elements of int8 that share a scale: its 4 bytes are then 1.6 % of what is sent."""

ZERO, ONE = np.float32(0), np.float32(1)
LARGEST = np.finfo(np.float32).max
SMALLEST = np.finfo(np.float32).smallest_normal
CODE_MAX = np.float32(127)
SCALE_MAX = np.nextafter(LARGEST / CODE_MAX, ZERO)
"""The largest scale of finite values: 127 times one more would be infinite."""

SIGN_BIT = np.uint32(0x80000000)
UNSIGNED = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)

DIGIT_BITS = 11
"""Magnitudes as 31 bits are sorted by three digits."""
STRIDE = 61
"""topk guesses its threshold from every 61st element: a prime, to be out of step with the rows of matrices."""
MARGIN = 16
"""Elements of the sample beyond twice the share that is looked for, for what chance leaves out of it."""


class CodecError(ValueError):
    """What is wrong with packed arrays, in one line."""


def _compiled(function: Loop) -> Loop:
    """The loop as machine code that other threads can run beside."""
    return cast(Loop, njit(nogil=True, error_model="numpy", fastmath=False)(function))


# ---- two bytes an element --------------------------------------------------------------------------


@_compiled
def to_bf16(u: Any) -> Any:
    """The upper half of float32 bits, rounded to nearest even; a NaN stays one whichever half its payload was in."""
    odd = np.uint32(np.uint32(u >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(np.uint32(u + np.uint32(0x7FFF)) + odd) >> np.uint32(16))
    quiet = np.uint32(np.uint32(u >> np.uint32(16)) | np.uint32(0x40))
    return quiet if np.uint32(u & UNSIGNED) > INFINITY else rounded


@_compiled
def from_bf16(bits: Any) -> Any:
    """Exact."""
    return np.float32(np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32))


@_compiled
def to_fp16(u: Any) -> Any:
    """IEEE half of float32 bits, rounded to nearest even; what is too large becomes the largest finite half.

    An infinite one would make a shard refuse the whole push; of infinity and NaN themselves it is to learn.
    Below the normal halves, adding 0.5 leaves the half's bits at the end of the sum's, rounded.
    """
    m = np.uint32(u & UNSIGNED)
    odd = np.uint32(np.uint32(m >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(np.uint32(np.uint32(m - np.uint32(0x37FFF001)) + odd) >> np.uint32(13))
    shifted = np.float32(np.float32(m.view(np.float32)) + np.float32(0.5))
    small = np.uint32(shifted.view(np.uint32) - np.uint32(0x3F000000))
    half = small if m < np.uint32(0x38800000) else normal
    half = half if half < np.uint32(0x7BFF) else np.uint32(0x7BFF)
    special = np.uint32(0x7E00) if m > INFINITY else np.uint32(0x7C00)
    half = half if m < INFINITY else special
    return np.uint32(half | np.uint32(np.uint32(u & SIGN_BIT) >> np.uint32(16)))


@_compiled
def from_fp16(bits: Any) -> Any:
    """Exact. A product with 2^112 would do, but for halves below the normal ones it takes the slow path of the CPU."""
    half = np.uint32(bits)
    m = np.uint32(np.uint32(half & np.uint32(0x7FFF)) << np.uint32(13))
    normal = np.uint32(m + np.uint32(0x38000000))
    special = np.uint32(m + np.uint32(0x70000000))
    offset = np.float32(np.uint32(m + np.uint32(0x38800000)).view(np.float32))
    small = np.float32(offset - np.float32(np.uint32(0x38800000).view(np.float32))).view(np.uint32)
    found = small if m < np.uint32(0x00800000) else normal
    found = special if m >= np.uint32(0x0F800000) else found
    sign = np.uint32(np.uint32(half & np.uint32(0x8000)) << np.uint32(16))
    return np.float32(np.uint32(found | sign).view(np.float32))


def _loops(to_half: Any, from_half: Any) -> tuple[Any, Any]:
    """Two passes: values, or what they differ by from `base`, which follows them, to bits; bits to or onto `out`."""

    @_compiled
    def pack(values: Vector, base: Maybe, bits: Array) -> None:
        for i in range(values.size):
            x = values[i] if base is None else values[i] - base[i]
            half = to_half(np.float32(x).view(np.uint32))
            bits[i] = half
            if base is not None:
                base[i] = base[i] + from_half(half)

    @_compiled
    def unpack(bits: Array, out: Vector, onto: bool | None) -> None:
        for i in range(out.size):
            x = from_half(bits[i])
            out[i] = x if onto is None else out[i] + x

    return pack, unpack


pack_bf16, unpack_bf16 = _loops(to_bf16, from_bf16)
pack_fp16, unpack_fp16 = _loops(to_fp16, from_fp16)


# ---- int8 ------------------------------------------------------------------------------------------


@_compiled
def block_scale(top: Any) -> Any:
    """The scale of a block from the bits of its largest magnitude.

    Not finite: a scale whose product with 127 is not finite either, so that the receiver sees it. Tiny: the smallest
    normal number, since rounding would move a smaller scale by more than half.
    """
    if top == 0:
        return ZERO
    if top >= INFINITY_BITS:
        return LARGEST
    return min(max(np.float32(np.int32(top).view(np.float32)) / CODE_MAX, SMALLEST), SCALE_MAX)


@_compiled
def owed(values: Vector, base: Maybe, residual: Maybe, i: Any) -> Any:
    """Element i of what is to be sent: of values, of their difference to `base`, or of values plus `residual`."""
    x = values[i]
    if base is not None:
        x = x - base[i]
    if residual is not None:
        x = x + residual[i]
    return x


@_compiled
def magnitude(values: Vector, base: Maybe, residual: Maybe, i: Any) -> Any:
    """Its bits without the sign, which are ordered as magnitudes are; NaN is the largest."""
    return np.int32(np.float32(owed(values, base, residual, i)).view(np.int32) & MAGNITUDE_BITS)


@_compiled
def piece(vector: Maybe, at: slice) -> Maybe:
    """A slice, or None of None. To return None itself would make it an array that might be None to the compiler."""
    return vector if vector is None else vector[at]


@_compiled
def pack_block(values: Vector, base: Maybe, residual: Maybe, codes: Array) -> Any:
    """Quantise one block and return its scale. What is owed is computed twice rather than kept: a block is in cache."""
    top = np.int32(0)
    for i in range(values.size):
        top = max(top, magnitude(values, base, residual, i))
    scale = block_scale(top)
    inverse = ONE / scale if scale > ZERO else ZERO
    for i in range(values.size):
        x = owed(values, base, residual, i)
        r = np.rint(x * inverse)
        r = r if r < CODE_MAX else CODE_MAX  # NaN too: converting it would be undefined
        r = r if r > -CODE_MAX else -CODE_MAX
        code = np.int8(r)
        codes[i] = code
        sent = np.float32(code) * scale  # of the code: r may be -0.0, which the receiver cannot see
        if base is not None:
            base[i] = base[i] + sent
        if residual is not None:
            left = x - sent
            residual[i] = left if abs(left) <= LARGEST else ZERO
    return scale


@_compiled
def pack_int8(values: Vector, base: Maybe, residual: Maybe, codes: Array, scales: Vector) -> None:
    """Quantise what is owed by blocks.

    base: follows what is sent. residual: takes what is not sent; nothing where that is not finite, or it would spoil
    every later push. Blocks are slices because an index that is computed might be negative to the compiler: decoding
    then takes 15 times as long.
    """
    for block in range(scales.size):
        at = slice(BLOCK * block, min(BLOCK * (block + 1), values.size))
        scales[block] = pack_block(values[at], piece(base, at), piece(residual, at), codes[at])


@_compiled
def unpack_int8(codes: Array, scales: Vector, out: Vector, onto: bool | None) -> None:
    """Codes times their block's scale, to or onto `out`."""
    for block in range(scales.size):
        at = slice(BLOCK * block, min(BLOCK * (block + 1), out.size))
        scale, block_codes, block_out = scales[block], codes[at], out[at]
        for i in range(block_out.size):
            x = np.float32(block_codes[i]) * scale
            block_out[i] = x if onto is None else block_out[i] + x


@_compiled
def largest_bits(bits: Array) -> Any:
    """The largest of uint32; of float32 bits it is beyond infinity's where one is negative or no number."""
    largest = np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i])
    return largest


# ---- topk ------------------------------------------------------------------------------------------


@_compiled
def from_the_top(counts: Array, k: Any) -> Any:
    """The bin in which the k-th element from the highest bin down is, and the how manieth it is there."""
    b = counts.size - 1
    while b > 0 and counts[b] < k:
        k -= counts[b]
        b -= 1
    return b, k


@_compiled
def kth_largest(magnitudes: Array, k: Any) -> Any:
    """The k-th largest magnitude, found eleven bits at a time, and how many of that magnitude belong to the k."""
    prefix = 0
    for shift in (2 * DIGIT_BITS, DIGIT_BITS, 0):
        counts = np.zeros(1 << DIGIT_BITS, np.int64)
        for j in range(magnitudes.size):
            m = magnitudes[j] >> shift
            if m >> DIGIT_BITS == prefix:
                counts[m & (counts.size - 1)] += 1
        digit, k = from_the_top(counts, k)
        prefix = (prefix << DIGIT_BITS) | digit
    return prefix, k


@_compiled
def lower_bound(values: Vector, k: Any) -> Any:
    """A magnitude that k elements reach, probably few more than twice as many: of a sample, or 0 if that misleads."""
    sample = np.empty(-(-values.size // STRIDE), np.int32)
    for j in range(sample.size):
        sample[j] = magnitude(values, None, None, STRIDE * j)
    rank = 2 * k // STRIDE + MARGIN
    if rank > sample.size:
        return np.int32(0), values.size
    least = np.int32(kth_largest(sample, rank)[0])
    reached = np.int32(0)
    for i in range(values.size):
        reached += np.int32(magnitude(values, None, None, i) >= least)
    return (least, np.int64(reached)) if reached >= k else (np.int32(0), values.size)


@_compiled
def pack_topk(values: Vector, indices: Array, kept: Vector) -> None:
    """The elements of largest magnitude, the first of equal ones; as many as `indices` has room for."""
    bound, num_found = lower_bound(values, indices.size)
    found = np.empty(num_found + 1, np.uint32)  # one more, to write what is not kept
    n = 0
    for i in range(values.size):
        found[n] = i
        n += magnitude(values, None, None, i) >= bound
    magnitudes = np.empty(num_found, np.int32)
    for j in range(num_found):
        magnitudes[j] = magnitude(values, None, None, found[j])
    least, ties = kth_largest(magnitudes, indices.size)
    n = 0
    for j in range(num_found):
        m = magnitudes[j]
        if m > least or (m == least and ties > 0):
            ties -= m == least
            indices[n] = found[j]
            kept[n] = values[found[j]]
            n += 1


@_compiled
def are_ascending(indices: Array) -> Any:
    """Each is larger than the one before."""
    wrong = np.uint32(0)
    for j in range(1, indices.size):
        wrong = np.uint32(wrong | np.uint32(indices[j] <= indices[j - 1]))
    return wrong == 0


@_compiled
def unpack_topk(indices: Array, kept: Vector, out: Vector, onto: bool | None) -> None:
    """Kept elements to or onto their places; the others are left alone."""
    for j in range(indices.size):
        i = indices[j]
        out[i] = kept[j] if onto is None else out[i] + kept[j]


# ---- codecs ----------------------------------------------------------------------------------------


def _num_blocks(n: int) -> int:
    return -(-n // BLOCK)


def _num_kept(n: int, share: float) -> int:
    return max(1, math.ceil(share * n)) if n else 0


def _arrays(codec: str, n: int, num_kept: int) -> tuple[tuple[str, int], ...]:
    """dtype and size of each packed array of n elements; num_kept: of topk."""
    return {
        "none": (("<f4", n),),
        "bf16": (("<u2", n),),
        "fp16": (("<f2", n),),
        "int8": (("|i1", n), ("<f4", _num_blocks(n))),
        "topk": (("<u4", num_kept), ("<f4", num_kept)),
    }[codec]


silently = np.errstate(over="ignore", invalid="ignore")
"""What is not finite is for the receiver to see, as it is in the compiled loops."""


@silently
def _pack(
    compression: Compression, values: Vector, base: Vector | None = None, residual: Vector | None = None
) -> Packed:
    """New arrays of `values`. base: of their differences to it, and it follows. residual: takes what is left."""
    codec, n = compression.codec, values.size
    _check_vector(values)
    require(n <= MAX_ELEMENTS, f"a part has at most {MAX_ELEMENTS} elements, not {n}")
    packed = tuple(np.empty(size, dtype) for dtype, size in _arrays(codec, n, _num_kept(n, compression.share)))
    values = read_only(values)
    if codec == "none":
        np.copyto(packed[0], values) if base is None else np.subtract(values, base, out=packed[0])
        if base is not None:
            np.add(base, packed[0], out=base)
    elif codec == "bf16":
        pack_bf16(values, base, packed[0])
    elif codec == "fp16":
        pack_fp16(values, base, packed[0].view(np.uint16))
    elif codec == "int8":
        pack_int8(values, base, residual, *packed)
    elif n:  # the values are read four times: their differences are better kept
        pack_topk(values if base is None else read_only(values - base), *packed)
        if base is not None:
            unpack_topk(read_only(packed[0]), read_only(packed[1]), base, True)
    return packed


@silently
def _unpack(codec: str, packed: Packed, out: Vector, onto: bool | None) -> None:
    _check_vector(out, written=True)
    _check_packed(codec, packed, out.size)
    first, second = read_only(packed[0]), read_only(packed[-1])
    if codec == "none":
        np.copyto(out, first) if onto is None else np.add(out, first, out=out)
    elif codec == "bf16":
        unpack_bf16(first, out, onto)
    elif codec == "fp16":
        unpack_fp16(first.view(np.uint16), out, onto)
    elif codec == "int8":
        unpack_int8(first, second, out, onto)
    else:
        if onto is None:
            out.fill(0)
        unpack_topk(first, second, out, onto)


def _check_vector(vector: Vector, *, written: bool = False) -> None:
    require(
        vector.dtype == np.float32 and vector.ndim == 1 and vector.flags.c_contiguous,
        "codecs take contiguous float32 vectors",
    )
    require(vector.flags.writeable or not written, "the vector cannot be written")


def _check_packed(codec: str, packed: Packed, n: int) -> None:
    """Raise CodecError unless the arrays are what a peer's encoder could have made of n elements."""
    if codec not in CODECS:
        raise CodecError(f"codec {codec!r:.40} is none of {', '.join(CODECS)}")
    if n > MAX_ELEMENTS:
        raise CodecError(f"a part has at most {MAX_ELEMENTS} elements, not {n}")
    expected = _arrays(codec, n, packed[0].size if packed else 0)
    if len(packed) != len(expected):
        raise CodecError(f"{codec} has {len(expected)} packed arrays, not {len(packed)}")
    for array, (dtype, size) in zip(packed, expected, strict=True):
        if array.dtype != np.dtype(dtype) or array.shape != (size,) or not array.flags.c_contiguous:
            raise CodecError(f"{codec}: {array.dtype.str} of shape {array.shape}, not {dtype} of shape ({size},)")
    if codec == "int8" and largest_bits(read_only(packed[1].view(np.uint32))) >= INFINITY:
        raise CodecError("int8: a scale is negative or not finite")
    if codec == "topk":
        _check_indices(packed[0], n)


def _check_indices(indices: Array, n: int) -> None:
    if not are_ascending(read_only(indices)):
        raise CodecError("topk: the indices do not ascend")
    if indices.size and indices[-1] >= n:
        raise CodecError(f"topk: index {indices[-1]} of {n} elements")


def encode(compression: Compression, values: Vector) -> Packed:
    """Compress one part, at most MAX_ELEMENTS of contiguous float32, into new arrays, each at most 4 MiB.

    none: float32. bf16: its bits as uint16. fp16: float16. int8: codes, then a float32 scale for each 256 of them.
    topk: ascending uint32 indices and their float32 values, max(1, ceil(share * n)) of each. What is not finite is
    not finite after decoding either, as far as it is sent.
    """
    return _pack(compression, values)


def decode(codec: str, packed: Packed, out: Vector) -> None:
    """Write the vector that `packed` stands for into `out`, float32, whose size says how many elements it has.

    topk: the others become zero. Raises CodecError for anything but what `encode` makes of such a vector (for topk with
    any share); nothing is written then. int8 takes all 256 codes.
    """
    _unpack(codec, packed, out, None)


def decode_onto(codec: str, packed: Packed, out: Vector) -> None:
    """Add the vector that `packed` stands for to `out`, one float32 addition an element; otherwise as `decode`.

    topk leaves the other elements alone.
    """
    _unpack(codec, packed, out, True)


def encode_difference(compression: Compression, new: Vector, base: Vector) -> Packed:
    """Compress what leads from `base`, which the receiver has, towards `new`, as long.

    `base` becomes what `decode_onto` makes of the receiver's, bit for bit; what is still missing from `new` is part of
    the next difference.
    """
    _check_vector(base, written=True)
    require(new.size == base.size and not np.may_share_memory(new, base), "a base of the same size, apart from the new")
    return _pack(compression, new, base)


class Feedback:
    """Error feedback of one worker's pushes: what a push lacks is added to the next of the same elements.

    Of bf16, fp16 and none nothing is kept. A push that was encoded counts as sent: a retry sends the same arrays again.
    """

    def __init__(self, compression: Compression, size: int) -> None:
        self._compression = compression
        self._residual = np.zeros(size if compression.codec in FEEDBACK else 0, np.float32)
        self._size = size

    @property
    def is_empty(self) -> bool:
        """Nothing is left to be sent."""
        return not self._residual.any()

    @property
    def norm(self) -> float:
        """The Euclidean norm of what is left to be sent."""
        starts = range(0, self._residual.size, MAX_ELEMENTS)
        squares = (np.square(self._residual[i : i + MAX_ELEMENTS], dtype=np.float64).sum() for i in starts)
        return math.sqrt(sum(squares))

    @silently
    def encode(self, start: int, values: Vector) -> Packed:
        """Compress finite `values`, one part that begins at element `start`, and what earlier pushes lack there."""
        residual = self._kept(start, values)
        if self._compression.codec == "topk":
            np.add(residual, values, out=residual)
            packed = _pack(self._compression, residual)
            residual[packed[0]] = 0
            return packed
        return _pack(self._compression, values, residual=residual)

    @silently
    def flush(self, start: int, values: Vector) -> Vector:
        """A new vector, uncompressed and of any size: `values` and all that earlier pushes lack there."""
        residual = self._kept(start, values)
        if residual is None:
            return values.copy()
        dense: Vector = values + residual
        residual.fill(0)
        return dense

    def _kept(self, start: int, values: Vector) -> Maybe:
        """The residual of these elements, None where none is kept."""
        _check_vector(values)
        require(0 <= start <= self._size - values.size, f"elements from {start} on are not of {self._size}")
        return self._residual[start : start + values.size] if self._compression.codec in FEEDBACK else None


def warm(compression: Compression) -> None:
    """Compile all that this compression calls, so that no message waits for a compiler."""
    values, base = np.ones(1, np.float32), np.zeros(1, np.float32)
    packed = encode(compression, values)
    decode(compression.codec, packed, base)
    decode_onto(compression.codec, packed, base)
    encode_difference(compression, values, base)
    Feedback(compression, 1).encode(0, values)


def packed_bytes(codec: str, n: int, share: float = 0.01) -> int:
    """Bytes of the packed arrays of n elements."""
    return sum(np.dtype(dtype).itemsize * size for dtype, size in _arrays(codec, n, _num_kept(n, share)))
