"""One pass over memory that compensates a gradient, applies it and writes what is sent back.

Decides the rounding of every update: float32 throughout, in the order of torch.optim.SGD with its fused
multiply-adds, so that a push without lag gives the bits that torch gives. Never decides whether a push is
applied, and keeps no snapshots: the shard hands them in. `reference` holds the same formulas to read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from zasgd.core.layout import Segment
from zasgd.core.node import require
from zasgd.core.rules import GroupSpec, RuleSpec

Vector = np.ndarray[Any, np.dtype[np.float32]]
"""A contiguous float32 array of one dimension."""

Piece = tuple[int, Vector]
"""A run of gradient: its first element's place in the slice, and the values."""

MS_EPS = np.float32(1e-7)
"""Added to the mean square under the root of dc-asgd-a."""

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
    snapshot: Vector | None,
    sent: Vector,
    ms: Vector | None,
    momentum: Vector | None,
    start: int,
    stop: int,
    grad_start: int,
    minus_lr: np.float32,
    minus_lam: np.float32,
    ms_decay: np.float32,
    ms_gain: np.float32,
    decay: np.float32 | None,
    mu: np.float32,
    nesterov: bool | None,
) -> None:
    """Update elements `start` to `stop` of a slice from `grad[grad_start:]`.

    An argument that is None leaves its branch out at compile time: each combination is one straight loop.
    lambda and the difference to the snapshot enter with their signs turned: without lag the correction is
    then -0.0, and -0.0 + g keeps the sign of a g that is itself -0.0.
    """
    w_run, sent_run = w[start:stop], sent[start:stop]
    grad_run = grad[grad_start : grad_start + stop - start]
    if snapshot is not None:
        snapshot_run = snapshot[start:stop]
    if ms is not None:
        ms_run = ms[start:stop]
    if momentum is not None:
        momentum_run = momentum[start:stop]
    for i in range(w_run.size):
        at = w_run[i]
        d = grad_run[i]
        if snapshot is not None:
            square = d * d
            strength = minus_lam * square
            if ms is not None:
                mean = fma(ms_decay, ms_run[i], ms_gain * square)
                ms_run[i] = mean
                strength = strength / math.sqrt(mean + MS_EPS)
            d = fma(strength, snapshot_run[i] - at, d)
        if decay is not None:
            d = fma(decay, at, d)
        if momentum is not None:
            buffer = mu * momentum_run[i] + d
            momentum_run[i] = buffer
            d = fma(mu, buffer, d) if nesterov is not None else buffer
        new = fma(minus_lr, d, at)
        w_run[i] = new
        sent_run[i] = new


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
    return bool(largest_magnitude(_read_only(array.reshape(-1).view(np.int32))) < INFINITY_BITS)


class _Constants(NamedTuple):
    """One group's scalars as `sweep` takes them."""

    lr_scale: float
    minus_lam: np.float32
    ms_decay: np.float32
    ms_gain: np.float32
    decay: np.float32 | None
    mu: np.float32
    nesterov: bool | None


class ShardOptimizer:
    """The optimizer state of one slice, and the pass that applies one push to it."""

    def __init__(self, rule: RuleSpec, groups: Sequence[GroupSpec], segments: Sequence[Segment], size: int) -> None:
        """Allocate the state that `rule` and `groups` need, float32, `size` elements each.

        groups: indexed by Segment.group. segments: sorted, covering the slice without gaps. Raises
        InvariantError.
        """
        ends = [0, *(s.stop for s in segments)]
        covers = [s.start for s in segments] == ends[:-1] and ends[-1] == size
        require(covers, "the segments do not cover the slice")
        require(all(0 <= s.group < len(groups) for s in segments), "a segment's group is not given")
        self.rule = rule
        self.groups = tuple(groups)
        self.segments = tuple(segments)
        self.size = size
        self.state = _fresh_state(rule, [self.groups[s.group] for s in self.segments], size)
        self._constants = [_constants(rule, group) for group in self.groups]

    def num_bytes(self) -> int:
        """Memory that the state takes, in bytes."""
        return sum(array.nbytes for array in self.state.values())

    def warm(self) -> None:
        """Compile what `apply` and `all_finite` run for any of the groups, so that no push waits for it.

        Needs no segments: a shard can warm before it knows its slice.
        """
        count = len(self.groups)
        tiny = ShardOptimizer(self.rule, self.groups, [Segment(i, i + 1, i) for i in range(count)], count)
        w, grad, snapshot, out = np.zeros((4, count), np.float32)
        tiny.apply(w, [(0, grad)], snapshot, 0.0, out)
        all_finite(grad)

    def apply(self, w: Vector, pieces: Sequence[Piece], snapshot: Vector | None, lr: float, out: Vector) -> None:
        """Apply one push: `w` and the state in place, the new values also into `out`.

        All arrays are contiguous float32; `w`, `snapshot` and `out` have `size` elements. pieces: the
        gradient, sorted by offset, covering the slice exactly; they may be read-only. snapshot: what this
        worker computed on; None only for asgd, which does not read it. lr: of this push, before each
        group's lr_scale. `w` shares memory with neither `snapshot` (the compensation would vanish) nor
        `out`; `out` may be `snapshot`, at less speed. Raises InvariantError before anything is written. A
        gradient beyond 1.8e19 has no square in float32: the compensated rules turn it into NaN.
        """
        require(math.isfinite(lr), "the learning rate is not finite")
        self._check_gradient(pieces)
        self._check_vectors(w, snapshot, out)
        known = _read_only(snapshot) if snapshot is not None and self.rule.needs_snapshot else None
        ms, momentum = self.state.get("ms"), self.state.get("momentum")
        for start, stop, group, grad, grad_start in _runs(pieces, self.segments):
            arrays = (w, grad, known, out, ms, momentum if self.groups[group].momentum else None)
            lr_scale, *constants = self._constants[group]
            scalars: list[Any] = [np.float32(-lr * lr_scale), *constants]
            sweep(*arrays, start, stop, grad_start, *scalars)

    def _check_gradient(self, pieces: Sequence[Piece]) -> None:
        covered = 0
        for offset, grad in pieces:
            require(offset == covered and _is_vector(grad), "the gradient's pieces do not cover the slice")
            covered += grad.size
        require(covered == self.size, "the gradient's pieces do not cover the slice")

    def _check_vectors(self, w: Vector, snapshot: Vector | None, out: Vector) -> None:
        require(snapshot is not None or not self.rule.needs_snapshot, "the rule needs the worker's snapshot")
        require(w.flags.writeable and out.flags.writeable, "the parameters or what is sent are read-only")
        for array in (w, out) if snapshot is None else (w, out, snapshot):
            fits = _is_vector(array) and array.size == self.size
            require(fits, "not a contiguous float32 vector of the slice's size")
        apart = snapshot is None or not np.may_share_memory(w, snapshot)
        require(apart, "the snapshot is the live parameters")
        require(not np.may_share_memory(w, out), "what is sent would be the live parameters")


def _fresh_state(rule: RuleSpec, groups: Sequence[GroupSpec], size: int) -> dict[str, Vector]:
    state: dict[str, Vector] = {}
    if any(group.momentum for group in groups):
        # torch's first step sets the buffer to d itself; mu * -0.0 + d is d in every bit, mu * 0.0 + d is not
        state["momentum"] = np.full(size, -0.0, np.float32)
    if rule.needs_mean_square:
        state["ms"] = np.zeros(size, np.float32)
    return state


def _constants(rule: RuleSpec, group: GroupSpec) -> _Constants:
    return _Constants(
        lr_scale=group.lr_scale,
        minus_lam=np.float32(-rule.strength),
        ms_decay=np.float32(rule.ms_decay),
        ms_gain=np.float32(1.0 - rule.ms_decay),
        decay=np.float32(group.weight_decay) if group.weight_decay else None,
        mu=np.float32(group.momentum),
        nesterov=True if group.nesterov else None,
    )


Run = tuple[int, int, int, Vector, int]
"""Elements from start to stop that share a group and a piece; the group, the piece, the place in it."""


def _runs(pieces: Sequence[Piece], segments: Sequence[Segment]) -> Iterator[Run]:
    remaining = iter(segments)
    segment = next(remaining, None)
    for offset, values in pieces:
        start, end = offset, offset + values.size
        grad = _read_only(values)
        while start < end and segment is not None:
            stop = min(end, segment.stop)
            yield start, stop, segment.group, grad, start - offset
            start = stop
            if stop == segment.stop:
                segment = next(remaining, None)


def _is_vector(array: Vector) -> bool:
    flags = array.flags
    return array.dtype == np.float32 and array.ndim == 1 and flags.c_contiguous and flags.aligned


def _read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A view that cannot be written: network frames and own arrays then share one compiled variant."""
    view = array.view()
    view.setflags(write=False)
    return view
