"""The loops that move a gradient: one pass that copies and looks for what is not finite, or only looks.

Decides nothing. Memory is named by address, since a step calls these once per tensor and to wrap a small one as an
array takes longer than to copy it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from zasgd.core.kernels import INFINITY_BITS, MAGNITUDE_BITS

_pointer_to: Any = types.CPointer


def _int32_at(_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    """An address, as an integer, as a pointer to 32-bit integers."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return _pointer_to(types.int32)(address), emit


_pointer: Any = intrinsic(_int32_at)


def _copy_checked(into: Any, source: Any, count: Any) -> Any:
    ours, theirs = carray(_pointer(into), count), carray(_pointer(source), count)
    largest = np.int32(0)
    for i in range(count):
        bits = theirs[i]
        ours[i] = bits
        largest = max(largest, bits & MAGNITUDE_BITS)
    return largest < INFINITY_BITS


def _finite_at(address: Any, count: Any) -> Any:
    memory = carray(_pointer(address), count)
    largest = np.int32(0)
    for i in range(count):
        largest = max(largest, memory[i] & MAGNITUDE_BITS)
    return largest < INFINITY_BITS


copy_checked: Callable[[int, int, int], bool] = njit(nogil=True)(_copy_checked)
"""copy_checked(into, source, count): copy `count` float32 elements, all of them whatever they are, from one address to
another; whether all are finite. Both are aligned to 4 bytes, do not overlap, and are kept alive by the caller. Runs
without the interpreter's lock. Compared as integers, as `kernels.largest_magnitude` does."""

finite_at: Callable[[int, int], bool] = njit(nogil=True)(_finite_at)
"""finite_at(address, count): whether `count` float32 elements from an address on, aligned to 4 bytes, are finite."""


def warm_up() -> None:
    """Compile both, which takes about half a second: before a fork, so that the children need not."""
    memory = np.zeros(2, np.float32)
    address = memory.ctypes.data
    copy_checked(address, address + 4, 1)
    finite_at(address, 1)
