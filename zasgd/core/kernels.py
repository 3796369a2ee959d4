"""The loops over memory: each takes a run of elements once and writes what changes of them.

Decides the rounding of every update: float32 throughout, in the order of torch.optim with its fused multiply-adds,
so that a push without lag gives the bits that torch.optim.SGD gives. Never decides which elements are updated, nor by
which constants: that is `optimizer`. `reference` holds the same formulas to read.

An argument that is None leaves its branch out at compile time, so each combination of arguments is one straight loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from zasgd.core.node import require

Vector = np.ndarray[Any, np.dtype[np.float32]]
"""A contiguous float32 array of one dimension."""

Maybe = Any
"""A Vector or None; that one argument is given only with another is more than a type checker sees."""

GapScalars = tuple[np.float32, np.float32, np.float32, np.float32]
AdamScalars = tuple[np.float32, np.float32, np.float32, np.float32, np.float32, np.float32]

MS_EPS = np.float32(1e-7)
"""Added to the mean square under the root of dc-asgd-a."""

GAP_EPS = np.float32(1e-8)
"""Added to the root of gap-aware's mean square."""

ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)

NOTHING = np.float32(-0.0)
"""What sums start from: -0.0 + x is x in every bit, 0.0 + x is not."""

INFINITY_BITS = np.int32(0x7F800000)
MAGNITUDE_BITS = np.int32(0x7FFFFFFF)


def _fma(_context: Any, a: Any, b: Any, c: Any) -> tuple[Any, Callable[..., Any]]:
    """a * b + c with one rounding, as torch's vectorised SGD computes it."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, values: Sequence[ir.Value]) -> ir.Value:
        return builder.fma(*values)

    return types.float32(types.float32, types.float32, types.float32), emit


fma: Any = intrinsic(_fma)


@njit(error_model="numpy", fastmath=False)
def sweep(
    w: Vector,
    grad: Vector,
    known: Maybe,
    sent: Maybe,
    in_place: bool | None,
    ms: Maybe,
    momentum: Maybe,
    total: Maybe,
    second: Maybe,
    gap: Maybe,
    minus_eta: np.float32,
    scale: np.float32,
    share: np.float32 | None,
    minus_lam: np.float32 | None,
    means: tuple[np.float32, np.float32],
    decay: np.float32 | None,
    mu: np.float32,
    nesterov: bool | None,
    minus_ahead: np.float32,
    gap_by: GapScalars | None,
    adam_by: AdamScalars | None,
) -> None:
    """Apply one gradient by SGD or AdamW; the new values, or the look-ahead of dana, also go to `sent`.

    All vectors are as long as `w`. known: what the gradient was computed on. in_place: `known` takes
    what is sent and `sent` is None, since one vector given as both would lose the vectorised loop. momentum: dana's is
    one worker's, with `total` the sum over the workers. second: of AdamW, whose first moment is `momentum`. share:
    `grad` is a sum, to be divided by it and emptied. means: m and 1 - m of the mean square. gap_by: decay and 1 - decay
    of R, the rate that a gap is measured in, the correction of R's bias. adam_by: what decay leaves of w, 1 - beta1,
    beta2, 1 - beta2, the root of the second bias correction, eps; the first bias correction is in `minus_eta`.

    lambda and the difference to `known` enter with their signs turned: without lag the correction is then -0.0, and
    -0.0 + g keeps the sign of a g that is itself -0.0.
    """
    ms_decay, ms_gain = means
    if gap_by is not None:
        gap_decay, gap_gain, gap_rate, unbias = gap_by
    if adam_by is not None:
        kept, gain, second_decay, second_gain, root, eps = adam_by
    for i in range(w.size):
        at = w[i]
        g = grad[i]
        if share is not None:
            g = g / share
            grad[i] = NOTHING
        if known is not None:
            moved = known[i] - at
        d = g
        if ms is not None:
            mean = fma(ms_decay, ms[i], ms_gain * (g * g))
            ms[i] = mean
        if minus_lam is not None:
            strength = minus_lam * (g * g)
            if ms is not None:
                strength = strength / math.sqrt(mean + MS_EPS)
            d = fma(strength, moved, d)
        if decay is not None:
            d = fma(decay, at if total is None else known[i], d)
        if gap is not None:
            square = gap[i]
            steps = abs(moved) / (gap_rate * (math.sqrt(square * unbias) + GAP_EPS))
            d = d / (ONE + (steps if square > ZERO else ZERO))
        d = scale * d
        if second is not None:
            step = d - momentum[i]
            first = fma(gain, step, momentum[i]) if gain < HALF else fma(gain - ONE, step, d)
            mean_square = fma(second_gain * d, d, second_decay * second[i])
            momentum[i] = first
            second[i] = mean_square
            new = kept * at + (minus_eta * first) / (math.sqrt(mean_square) / root + eps)
        else:
            if momentum is not None:
                old = momentum[i]
                v = mu * old + d
                momentum[i] = v
                d = fma(mu, v, d) if nesterov is not None else v
                g = v
            new = fma(minus_eta, d, at)
        if gap is not None:
            gap[i] = fma(gap_decay, square, gap_gain * (g * g))
        w[i] = new
        if total is not None:
            together = total[i] + (v - old)
            total[i] = together
            new = fma(minus_ahead, together, new)
        if in_place is not None:
            known[i] = new
        if sent is not None:
            sent[i] = new


@njit(error_model="numpy", fastmath=False)
def gather(
    w: Vector,
    grad: Vector,
    known: Maybe,
    ms: Maybe,
    total: Vector,
    weight: np.float32,
    minus_lam: np.float32 | None,
    means: tuple[np.float32, np.float32],
) -> None:
    """Add `weight` times the compensated gradient to `total`; the arithmetic of `sweep` up to there."""
    ms_decay, ms_gain = means
    for i in range(w.size):
        g = grad[i]
        d = g
        if ms is not None:
            mean = fma(ms_decay, ms[i], ms_gain * (g * g))
            ms[i] = mean
        if minus_lam is not None:
            strength = minus_lam * (g * g)
            if ms is not None:
                strength = strength / math.sqrt(mean + MS_EPS)
            d = fma(strength, known[i] - w[i], d)
        total[i] = fma(weight, d, total[i])


@njit(error_model="numpy", fastmath=False)
def look_ahead(w: Vector, total: Vector, sent: Vector, minus_ahead: np.float32) -> None:
    """What dana sends, w - eta gamma S, without an update."""
    for i in range(w.size):
        sent[i] = fma(minus_ahead, total[i], w[i])


@njit(error_model="numpy", fastmath=False)
def elastic(w: Vector, local: Vector, sent: Vector, pull: np.float32) -> None:
    """Draw `w` and a worker's `local` parameters towards each other; the worker's new ones go to `sent`."""
    for i in range(w.size):
        x = local[i]
        e = pull * (x - w[i])
        w[i] = w[i] + e
        sent[i] = x - e


@njit(error_model="numpy", fastmath=False)
def delayed(
    w: Vector,
    difference: Vector,
    sent: Vector,
    outer: Vector,
    arrivals: Maybe,
    share: np.float32 | None,
    flush: bool | None,
    minus_eta: np.float32,
    beta: np.float32,
    ahead: np.float32,
    part: np.float32,
) -> None:
    """Apply one difference by delayed Nesterov; `flush`: it completes the arrivals that move the momentum.

    arrivals: their sum so far, None when each completes. beta: of the momentum `outer`. ahead: how much of it a step
    takes. part: 1 / N of a difference.
    """
    for i in range(w.size):
        d = difference[i]
        if share is not None:
            d = d / share
            difference[i] = NOTHING
        arrived = d
        if arrivals is not None:
            arrived = arrivals[i] + d
            arrivals[i] = NOTHING if flush is not None else arrived
        m = outer[i]
        if flush is not None:
            m = beta * m + part * arrived
            outer[i] = m
        new = fma(minus_eta, fma(ahead, m, part * d), w[i])
        w[i] = new
        sent[i] = new


@njit(error_model="numpy", fastmath=False)
def largest_magnitude(bits: Any) -> Any:
    """The largest of float32 bit patterns without their signs; from infinity's on, something is not finite.

    Integers, because a float maximum that must respect NaN does not vectorise.
    """
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & MAGNITUDE_BITS)
    return largest


def all_finite(array: np.ndarray[Any, Any]) -> bool:
    """Whether no element of a C-contiguous float32 array of any shape is inf or NaN; True when it is empty.

    Raises InvariantError for another dtype or layout.
    """
    require(array.dtype == np.float32 and array.flags.c_contiguous, "all_finite takes contiguous float32")
    return bool(largest_magnitude(read_only(array.reshape(-1).view(np.int32))) < INFINITY_BITS)


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A view that cannot be written: network frames and own arrays then share one compiled variant."""
    view = array.view()
    view.setflags(write=False)
    return view
