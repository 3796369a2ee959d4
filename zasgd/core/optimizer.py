"""One slice's optimizer state, and what one push does to the slice.

Decides which elements are updated, by which kernel and constants, how often a tensor was updated before, and what of
an update is state. Never decides whether a push is applied, and keeps no snapshots: the shard hands them in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from zasgd.core import kernels
from zasgd.core.kernels import NOTHING, AdamScalars, GapScalars, Vector, all_finite, read_only
from zasgd.core.layout import Segment
from zasgd.core.node import require
from zasgd.core.rules import GroupSpec, RuleSpec

Piece = tuple[int, Vector]
"""A run of gradient: its first element's place in the slice, and the values."""

ALL_PRESENT: frozenset[int] = frozenset()


class Run(NamedTuple):
    """Elements `start` to `stop` of the slice that one kernel call takes.

    group: of all their tensors. updates: how many there were before, if that matters. present: whether this one has.
    """

    start: int
    stop: int
    group: int
    updates: int
    present: bool


class Presence:
    """How often each tensor of a slice was updated, and the slice cut into as few runs as that allows."""

    def __init__(self, segments: Sequence[Segment], counts: bool) -> None:
        """counts: whether it matters how often; else every count stays 0."""
        self._segments = segments
        self._matters = counts
        self._absent = ALL_PRESENT
        self._runs = self._cut([0] * len(segments), ALL_PRESENT)

    def runs(self, absent: frozenset[int]) -> list[Run]:
        """The runs of a push that has no gradient for the tensors `absent`, sorted, covering the slice."""
        if absent != self._absent:
            self._runs = self._cut(self._counts(), absent)
            self._absent = absent
        return self._runs

    def count(self, absent: frozenset[int]) -> None:
        """A push without gradient for `absent` was applied."""
        if self._matters:
            # Counts that were equal within a run stay equal, so the runs are good for the next such push.
            self._runs = [run._replace(updates=run.updates + run.present) for run in self.runs(absent)]

    def _counts(self) -> list[int]:
        runs = iter(self._runs)
        run = next(runs, None)
        counts = []
        for segment in self._segments:
            while run is not None and run.stop <= segment.start:
                run = next(runs, None)
            counts.append(run.updates if run is not None else 0)
        return counts

    def _cut(self, counts: Sequence[int], absent: frozenset[int]) -> list[Run]:
        runs: list[Run] = []
        for segment, count in zip(self._segments, counts, strict=True):
            run = Run(segment.start, segment.stop, segment.group, count, segment.tensor not in absent)
            if runs and runs[-1][2:] == run[2:]:
                runs[-1] = runs[-1]._replace(stop=run.stop)
            else:
                runs.append(run)
        return runs


class _Constants(NamedTuple):
    """One group's scalars as `sweep` takes them."""

    minus_lam: np.float32 | None
    means: tuple[np.float32, np.float32]
    decay: np.float32 | None
    mu: np.float32
    nesterov: bool | None


@dataclass(frozen=True, slots=True)
class _Update:
    """The numbers of one update. lr: for what looks ahead. eta: for the step. share: what a sum is divided by."""

    lr: float
    eta: float
    scale: float = 1.0
    num_workers: int = 1
    share: np.float32 | None = None


class _Vectors(NamedTuple):
    """What a caller hands in, whole or cut to a run.

    known: what was computed on; writable if `sent` is the same memory. own: dana's of the worker.
    """

    w: Vector
    known: Vector | None
    sent: Vector
    own: Vector | None


class ShardOptimizer:
    """The optimizer state of one slice, and the pass that applies one push to it.

    Vectors are contiguous float32 of one dimension and `size` elements, unless told otherwise. `state` maps names to
    vectors: `momentum` (of AdamW: its first moment), `second`, `ms`, `gap` (R of gap-aware), `total` (S of dana),
    `sum` (of the pushes of an update), `outer` and `arrivals` (of diloco).
    """

    def __init__(
        self, rule: RuleSpec, groups: Sequence[GroupSpec], segments: Sequence[Segment], size: int, inflight: int = 0
    ) -> None:
        """Allocate the state that `rule` and `groups` need.

        groups: as they apply on the shard (see `rules.shard_groups`), indexed by Segment.group. segments: sorted,
        covering the slice without gaps. inflight: pushes that a worker has on the way when it computes: dana looks
        as many steps further ahead. Raises InvariantError.
        """
        ends = [0, *(s.stop for s in segments)]
        covers = [s.start for s in segments] == ends[:-1] and ends[-1] == size
        require(covers, "the segments do not cover the slice")
        require(all(0 <= s.group < len(groups) for s in segments), "a segment's group is not given")
        self.rule = rule
        self.groups = tuple(groups)
        self.segments = tuple(segments)
        self.size = size
        self.inflight = inflight
        self.state = _fresh_state(rule, [self.groups[group] for group in {s.group for s in self.segments}], size)
        self.eta_max = 0.0
        self.num_arrivals = 0
        counts = bool(rule.gap_aware) or any(group.algorithm == "adamw" for group in self.groups)
        self._presence = Presence(self.segments, counts)
        self._whole = self._presence.runs(ALL_PRESENT)
        self._constants = [_constants(rule, group) for group in self.groups]
        self._absent_from_sum: frozenset[int] | None = None

    def num_bytes(self) -> int:
        """Memory that the state takes, in bytes."""
        return sum(array.nbytes for array in self.state.values())

    def new_own(self) -> Vector | None:
        """A joining worker's momentum of dana, v_i; None for the other rules, which keep none per worker."""
        return np.full(self.size, NOTHING) if self.rule.needs_own_momentum else None

    def warm(self, in_place: bool = True) -> None:
        """Compile what these methods and `all_finite` run for any of the groups, so that no push waits for it.

        Needs no segments: a shard can warm before it knows its slice. in_place: `apply` will be called with the
        snapshot as `out`.
        """
        count = len(self.groups)
        segments = [Segment(i, i + 1, i, i) for i in range(count)]
        tiny = ShardOptimizer(self.rule, self.groups, segments, count, self.inflight)
        w, grad, snapshot, out = np.zeros((4, count), np.float32)
        all_finite(grad)
        tiny.outgoing(w, 0.0, out)
        if self.rule.needs_accumulator:
            tiny.accumulate(w, [(0, grad)], snapshot)
            tiny.apply_sum(w, 0.0, out, total_share=1.0)
        else:
            for _ in range(2):  # of two workers, so that diloco's second push is one that flushes
                known = out if in_place else snapshot
                tiny.apply(w, [(0, grad)], known, 0.0, out, own=tiny.new_own(), num_workers=2)

    # ---- updates -------------------------------------------------------------------------------------

    def apply(
        self,
        w: Vector,
        pieces: Sequence[Piece],
        snapshot: Vector | None,
        lr: float,
        out: Vector,
        *,
        lag: int = 0,
        weight: float = 1.0,
        own: Vector | None = None,
        num_workers: int = 1,
        absent: frozenset[int] = ALL_PRESENT,
    ) -> None:
        """Apply one push: `w`, `own` and the state in place; what is sent back goes into `out`.

        pieces: what was pushed (a gradient, a difference or, for easgd, the local parameters), sorted by offset,
        covering the slice exactly; they may be read-only. snapshot: what this worker computed on; None only for
        rules that do not read it. lr: before each group's lr_scale; rules of local steps do not read it. lag: of this
        push, for rules that scale by it. weight: multiplies the rate, not the gradient. own: the worker's momentum
        from `new_own`, for dana. num_workers: N, for rules that divide by it. absent: the tensors without gradient
        (Segment.tensor): they and their state stay as they are.

        `w` shares memory with neither `snapshot` (the compensation would vanish) nor `out`; `out` may be `snapshot`:
        what is sent then takes its place. Raises InvariantError before anything is written. A gradient beyond 1.8e19
        has no square in float32: the compensated rules turn it into NaN.
        """
        self._check_numbers(lr, weight, num_workers)
        self._check_pushed(pieces)
        self._check_vectors(w, snapshot, out)
        self._check_own(own, w, out)
        self.eta_max = max(self.eta_max, lr)
        self.num_arrivals += self.rule.exchange == "outer"
        update = _Update(lr, self._eta(lr, weight, num_workers), self.rule.scale_at(lag), num_workers)
        known = None
        if snapshot is not None and self.rule.needs_snapshot:
            known = out if np.may_share_memory(snapshot, out) else read_only(snapshot)
        self._update(_Vectors(w, known, out, own), pieces, update, absent)

    def accumulate(
        self,
        w: Vector,
        pieces: Sequence[Piece],
        snapshot: Vector | None,
        *,
        lag: int = 0,
        share: float = 1.0,
        absent: frozenset[int] = ALL_PRESENT,
    ) -> None:
        """Compensate one push against `w` as it is now and add it to the sum; `w` stays.

        share: how much it counts in the mean. The other arguments, and what is raised, as with `apply`.
        """
        require("sum" in self.state, "the rule makes an update of every push")
        require(math.isfinite(share) and share > 0, "the share of a push is not above 0")
        self._check_pushed(pieces)
        self._check_vectors(w, snapshot)
        known = read_only(snapshot) if snapshot is not None and self.rule.strength else None
        weight = np.float32(share * self.rule.scale_at(lag))
        for run, at, pushed in _pushed_to(pieces, self._presence.runs(absent)):
            if self._moves(run):
                minus_lam, means, *_ = self._constants[run.group]
                state = (_cut(self.state.get("ms"), at), self.state["sum"][at])
                kernels.gather(w[at], pushed, _cut(known, at), *state, weight, minus_lam, means)
        self._absent_from_sum = absent if self._absent_from_sum is None else self._absent_from_sum & absent

    def apply_sum(
        self, w: Vector, lr: float, out: Vector, *, weight: float = 1.0, total_share: float, num_workers: int = 1
    ) -> None:
        """Make one update of the sum over `total_share`, and empty it; what is sent goes into `out`.

        One push of share 1, with `total_share` 1, leaves the bits that `apply` leaves. A tensor that none of the
        pushes had a gradient for stays as it is. num_workers: changes nothing, since a mean stands for one push of
        one worker. The other arguments, and what is raised, as with `apply`.
        """
        require(self._absent_from_sum is not None, "no push was accumulated")
        require(math.isfinite(total_share) and total_share > 0, "the total share is not above 0")
        self._check_numbers(lr, weight, num_workers)
        self._check_vectors(w, None, out, reads_snapshot=False)
        absent, self._absent_from_sum = self._absent_from_sum or ALL_PRESENT, None
        self.num_arrivals += self.rule.exchange == "outer"
        update = _Update(lr, self._eta(lr, weight, 1), share=np.float32(total_share))
        self._update(_Vectors(w, None, out, None), [(0, self.state["sum"])], update, absent)

    def outgoing(self, w: Vector, lr: float, out: Vector) -> None:
        """What a pull is answered with, into `out`: `w`, or where dana's momentum will take it at the rate `lr`.

        Raises InvariantError as `apply` does.
        """
        self._check_numbers(lr, 1.0, 1)
        self._check_vectors(w, None, out, reads_snapshot=False)
        for run in self._whole:
            self._send(slice(run.start, run.stop), run.group, w, lr, out)

    def leave(self, owns: Iterable[Vector]) -> None:
        """Dana: momentum in sum is from now on that of the workers left, given in a fixed order.

        Their sum is made anew, so that nothing stays of who left or of rounding.
        """
        total = self.state.get("total")
        if total is None:
            return
        total.fill(0)
        for own in owns:
            require(_is_vector(own) and own.size == self.size, "not a momentum of this slice")
            total += own

    # ---- runs ----------------------------------------------------------------------------------------

    def _update(self, whole: _Vectors, pieces: Sequence[Piece], update: _Update, absent: frozenset[int]) -> None:
        for run, at, pushed in _pushed_to(pieces, self._presence.runs(absent), writable=update.share is not None):
            here = _Vectors(*(_cut(vector, at) for vector in whole))
            if not self._moves(run):
                self._send(at, run.group, whole.w, update.lr, whole.sent)
            elif self.rule.exchange == "elastic":
                kernels.elastic(here.w, pushed, here.sent, np.float32(update.eta))
            elif self.rule.exchange == "outer":
                self._step_outer(here, pushed, at, update)
            else:
                self._sweep(here, pushed, run, at, update)
        self._presence.count(absent)
        if self.num_arrivals >= update.num_workers:
            self.num_arrivals = 0

    def _moves(self, run: Run) -> bool:
        """Gradients at a rate of 0 still feed the momentum, as in torch; differences at 0 feed nothing."""
        return run.present and (self.groups[run.group].lr_scale > 0 or not self.rule.is_local)

    def _sweep(self, here: _Vectors, pushed: Vector, run: Run, at: slice, update: _Update) -> None:
        rule, state, group = self.rule, self.state, self.groups[run.group]
        minus_lam, means, decay, mu, nesterov = self._constants[run.group]
        ms, gap = state.get("ms"), state.get("gap") if group.lr_scale else None
        if update.share is not None:
            minus_lam = ms = None  # what is in a sum was compensated when it arrived
        adamw, minus_eta, adam_by = group.algorithm == "adamw", -update.eta * group.lr_scale, None
        if adamw:
            minus_eta, adam_by = _adam_constants(group, -minus_eta, run.updates + 1)
        reads_known = minus_lam is not None or gap is not None or (decay is not None and rule.needs_own_momentum)
        shared = _cut(state.get("momentum") if group.momentum or adamw else None, at)
        known = here.known if reads_known else None
        in_place = True if known is not None and known.flags.writeable else None
        kernels.sweep(
            here.w,
            pushed,
            known,
            None if in_place else here.sent,
            in_place,
            _cut(ms, at),
            here.own if rule.needs_own_momentum else shared,
            _cut(state.get("total"), at),
            _cut(state.get("second") if adamw else None, at),
            _cut(gap, at),
            np.float32(minus_eta),
            np.float32(update.scale),
            update.share,
            minus_lam,
            means,
            decay,
            mu,
            nesterov,
            self._minus_ahead(run.group, update.lr),
            None if gap is None else self._gap_constants(group, run.updates),
            adam_by,
        )

    def _step_outer(self, here: _Vectors, pushed: Vector, at: slice, update: _Update) -> None:
        """`sweep` for differences: at every N-th push delayed Nesterov takes the sum of N into its momentum."""
        count, beta = update.num_workers, self.rule.outer_momentum or 0.0
        flushes = self.num_arrivals >= count
        share = min(1.0, self.rule.delay_share) / count
        kernels.delayed(
            here.w,
            pushed,
            here.sent,
            self.state["outer"][at],
            _cut(self.state.get("arrivals"), at),
            update.share,
            True if flushes else None,
            np.float32(-update.eta),
            np.float32(beta),
            np.float32((1 - share * count + share if flushes else share) * beta),
            np.float32(1 / count if self.rule.outer_mean else 1.0),
        )

    def _send(self, at: slice, group: int, w: Vector, lr: float, out: Vector) -> None:
        """What is sent of elements that are not updated."""
        total = self.state.get("total")
        if total is None:
            out[at] = w[at]
        else:
            kernels.look_ahead(w[at], total[at], out[at], self._minus_ahead(group, lr))

    # ---- scalars -------------------------------------------------------------------------------------

    def _eta(self, lr: float, weight: float, num_workers: int) -> float:
        """The rate of this update, before lr_scale: of gradients, differences, or the pull of easgd."""
        rule = self.rule
        if rule.exchange == "gradient":
            return lr * weight
        if rule.exchange == "elastic":
            return rule.elasticity / num_workers * weight
        outer = (rule.outer_lr or 0.0) * weight
        return outer / num_workers if rule.exchange == "difference" and rule.outer_mean else outer

    def _minus_ahead(self, group: int, lr: float) -> np.float32:
        gamma = self.groups[group].momentum
        steps = gamma + gamma * gamma if self.inflight else gamma
        return np.float32(-lr * self.groups[group].lr_scale * steps)

    def _gap_constants(self, group: GroupSpec, updates: int) -> GapScalars:
        decay = self.rule.gap_decay
        rate = np.float32(self.eta_max * group.lr_scale)
        # At a rate of 0 no gap is measurable: an infinite one makes every penalty 1.
        rate = rate if rate > 0 else np.float32(math.inf)
        unbias = 1 / (1 - decay**updates) if updates else 1.0
        return np.float32(decay), np.float32(1 - decay), rate, np.float32(unbias)

    # ---- checks --------------------------------------------------------------------------------------

    def _check_numbers(self, lr: float, weight: float, num_workers: int) -> None:
        require(math.isfinite(lr) and math.isfinite(weight), "the learning rate is not finite")
        require(num_workers >= 1, "an update needs at least one worker")

    def _check_pushed(self, pieces: Sequence[Piece]) -> None:
        covered = 0
        for offset, values in pieces:
            require(offset == covered and _is_vector(values), "the gradient's pieces do not cover the slice")
            covered += values.size
        require(covered == self.size, "the gradient's pieces do not cover the slice")

    def _check_vectors(
        self, w: Vector, snapshot: Vector | None, out: Vector | None = None, *, reads_snapshot: bool = True
    ) -> None:
        missing = snapshot is None and reads_snapshot and self.rule.needs_snapshot
        require(not missing, "the rule needs the worker's snapshot")
        for array in (w, out, snapshot):
            fits = array is None or (_is_vector(array) and array.size == self.size)
            require(fits, "not a contiguous float32 vector of the slice's size")
        apart = snapshot is None or not np.may_share_memory(w, snapshot)
        require(apart, "the snapshot is the live parameters")
        if out is not None:
            require(w.flags.writeable and out.flags.writeable, "the parameters or what is sent are read-only")
            require(not np.may_share_memory(w, out), "what is sent would be the live parameters")

    def _check_own(self, own: Vector | None, w: Vector, out: Vector) -> None:
        if not self.rule.needs_own_momentum:
            return
        fits = own is not None and _is_vector(own) and own.size == self.size and own.flags.writeable
        require(fits, "the rule needs the worker's own momentum")
        apart = own is not None and not np.may_share_memory(own, w) and not np.may_share_memory(own, out)
        require(apart, "a worker's momentum is the parameters or what is sent")


def _fresh_state(rule: RuleSpec, groups: Sequence[GroupSpec], size: int) -> dict[str, Vector]:
    """Sums start at -0.0: torch's first step of SGD sets the buffer to d, and mu * -0.0 + d is d in every bit.

    torch's AdamW does start at 0.0.
    """
    adamw = any(group.algorithm == "adamw" for group in groups)
    shared = any(group.momentum for group in groups) and not rule.needs_own_momentum
    outer = rule.exchange == "outer"
    starts = {
        "momentum": (adamw or shared, 0 if adamw else NOTHING),
        "second": (adamw, 0),
        "ms": (rule.needs_mean_square, 0),
        "gap": (rule.gap_aware, 0),
        "total": (rule.needs_own_momentum, 0),
        "sum": (rule.needs_accumulator, NOTHING),
        "outer": (outer, NOTHING),
        "arrivals": (outer and rule.mode == "async", NOTHING),
    }
    return {name: np.full(size, start, np.float32) for name, (needed, start) in starts.items() if needed}


def _constants(rule: RuleSpec, group: GroupSpec) -> _Constants:
    decays = group.weight_decay and group.algorithm == "sgd"
    return _Constants(
        minus_lam=np.float32(-rule.strength) if rule.strength else None,
        means=(np.float32(rule.ms_decay), np.float32(1.0 - rule.ms_decay)),
        decay=np.float32(group.weight_decay) if decays else None,
        mu=np.float32(group.momentum),
        nesterov=True if group.nesterov and not rule.needs_own_momentum else None,
    )


def _adam_constants(group: GroupSpec, eta: float, count: int) -> tuple[float, AdamScalars]:
    """Minus the step size, and the other scalars of `sweep`, at the `count`-th update, as torch computes them."""
    step_size = eta / (1 - group.beta1**count)
    root = math.sqrt(1 - group.beta2**count)
    kept, gain, second_gain = 1 - eta * group.weight_decay, 1 - group.beta1, 1 - group.beta2
    single = np.float32
    scalars = single(kept), single(gain), single(group.beta2), single(second_gain), single(root), single(group.eps)
    return -step_size, scalars


def _pushed_to(
    pieces: Sequence[Piece], runs: Sequence[Run], writable: bool = False
) -> Iterator[tuple[Run, slice, Vector]]:
    """Each run, cut where a new piece begins: the run, the place in the slice, what was pushed there."""
    remaining = iter(runs)
    run = next(remaining, None)
    for offset, values in pieces:
        start, end = offset, offset + values.size
        pushed = values if writable else read_only(values)
        while start < end and run is not None:
            stop = min(end, run.stop)
            yield run, slice(start, stop), pushed[start - offset : stop - offset]
            start = stop
            if stop == run.stop:
                run = next(remaining, None)


def _cut(array: Vector | None, at: slice) -> Any:
    return None if array is None else array[at]


def _is_vector(array: Vector) -> bool:
    flags = array.flags
    return array.dtype == np.float32 and array.ndim == 1 and flags.c_contiguous and flags.aligned
