"""The update rules as formulas in plain numpy: to read, and to hold the kernels against.

Follows the one pipeline of all rules: compensate, decay, penalise, scale, momentum, apply, send. Nothing at run
time uses it; it computes in float64 unless told otherwise and checks nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zasgd.core.layout import Segment
from zasgd.core.rules import GroupSpec, RuleSpec

Array = np.ndarray[Any, Any]

MS_EPS = 1e-7
GAP_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor's elements in one push: views of the vectors, all of one length, and the push's numbers.

    run: the elements' place in the slice. w: as the shard has them, written in place. pushed: what the worker sent.
    base: what it had been sent and computed on. own: its v_i of dana, written in place. rate: the learning rate of
    the group for a push of weight 1. weight: multiplies the rate. lag: tau.
    """

    run: slice
    tensor: int
    group: GroupSpec
    w: Array
    pushed: Array
    base: Array
    own: Array | None
    rate: float
    weight: float
    lag: int
    num_workers: int

    @property
    def eta(self) -> float:
        """What the step of this push is multiplied by."""
        return self.rate * self.weight


class ReferenceOptimizer:
    """What `optimizer.ShardOptimizer` does, one formula per method; same constructor, same methods.

    `groups` are those of the shard (`rules.shard_groups`). Every array is of `dtype`.
    """

    def __init__(
        self,
        rule: RuleSpec,
        groups: Sequence[GroupSpec],
        segments: Sequence[Segment],
        size: int,
        inflight: int = 0,
        dtype: Any = np.float64,
    ) -> None:
        self.rule, self.groups, self.segments, self.size = rule, tuple(groups), tuple(segments), size
        self.inflight, self.dtype = inflight, dtype
        self.state: dict[str, Array] = {key: np.zeros(size, dtype) for key in _state_keys(rule, self.groups)}
        self.counts = {segment.tensor: 0 for segment in segments}
        self.eta_max = 0.0
        self.num_arrivals = 0
        self.summed: set[int] = set()

    def num_bytes(self) -> int:
        """Of the state."""
        return sum(vector.nbytes for vector in self.state.values())

    def new_own(self) -> Array | None:
        """A joining worker's v_i, zero; None for rules without one."""
        return np.zeros(self.size, self.dtype) if self.rule.needs_own_momentum else None

    # ---- one push ------------------------------------------------------------------------------------

    def apply(
        self,
        w: Array,
        pieces: Sequence[tuple[int, Array]],
        snapshot: Array | None,
        lr: float,
        out: Array,
        *,
        lag: int = 0,
        weight: float = 1.0,
        own: Array | None = None,
        num_workers: int = 1,
        absent: Collection[int] = frozenset(),
    ) -> None:
        """Apply one push to `w`, `own` and the state in place; what is sent back goes into `out`."""
        self.eta_max = max(self.eta_max, lr)
        self.num_arrivals += self.rule.exchange == "outer"
        parts = list(self._parts(w, pieces, snapshot, own, lr, weight, lag, num_workers, absent))
        if self.rule.exchange == "elastic":
            self.outgoing(w, lr, out)
            for part in parts:
                if part.group.lr_scale:
                    out[part.run] = self.elastic(part)
            return
        formulas = {"gradient": self.gradient, "difference": self.difference, "outer": self.delayed_nesterov}
        for part in parts:
            formulas[self.rule.exchange or ""](part)
        self._count(part.tensor for part in parts)
        if self.num_arrivals >= num_workers:
            self.num_arrivals = 0
        self.outgoing(w, lr, out)

    def gradient(self, part: Part) -> None:
        """d = (c + wd w_at) / penalty(D), times s(tau); then the optimizer's step, then R."""
        c = self.compensated(part)
        d = self.decayed(c, part) / self.penalty(part) * self.rule.scale_at(part.lag)
        v = self.step(d, part)
        if self.rule.gap_aware:
            self.remember_gap(v, part)

    def compensated(self, part: Part) -> Array:
        """c = g + lambda_t g g D, with D = w - w_i. Source: DC-ASGD, arXiv 1609.08326."""
        g = part.pushed
        if self.rule.compensate == "none":
            return g
        c: Array = g + self.strength(part) * g * g * (part.w - part.base)
        return c

    def strength(self, part: Part) -> Any:
        """lambda_t: constant, or lambda_0 / sqrt(MS + eps) with MS = m MS + (1 - m) g g. Source: the same."""
        if self.rule.compensate == "constant":
            return self.rule.strength
        m, ms, g = self.rule.ms_decay, self.state["ms"], part.pushed
        ms[part.run] = m * ms[part.run] + (1 - m) * g * g
        return self.rule.strength / np.sqrt(ms[part.run] + MS_EPS)

    def decayed(self, c: Array, part: Part) -> Array:
        """c + wd w_at: after compensation, so that weight decay is never squared; at what was sent, for dana.

        AdamW's decay is decoupled and not here.
        """
        if part.group.algorithm == "adamw":
            return c
        at = part.base if self.rule.look_ahead == "shard" else part.w
        return c + part.group.weight_decay * at

    def penalty(self, part: Part) -> Any:
        """1 + |D| / C with C = eta_max (sqrt(R) + eps), R without the bias of its start at zero.

        1 where R has no sample, and where nothing is trained. Source: Gap Aware, arXiv 1909.10802.
        """
        largest = self.eta_max * part.group.lr_scale
        count = self.counts[part.tensor]
        if not self.rule.gap_aware or count == 0 or largest == 0:
            return 1.0
        r = self.state["gap"][part.run] / (1 - self.rule.gap_decay**count)
        usual = largest * (np.sqrt(r) + GAP_EPS)
        return 1 + np.where(r > 0, np.abs(part.w - part.base) / usual, 0)

    def remember_gap(self, v: Array, part: Part) -> None:
        """R = decay R + (1 - decay) v v, v being the momentum after this push, or g without momentum."""
        decay, gap = self.rule.gap_decay, self.state["gap"]
        sample = v if part.group.momentum else part.pushed
        gap[part.run] = decay * gap[part.run] + (1 - decay) * sample * sample

    # ---- the optimizers ------------------------------------------------------------------------------

    def step(self, d: Array, part: Part) -> Array:
        """Move w along d; returns the momentum after it, d without momentum."""
        if part.group.algorithm == "adamw":
            return self.adamw(d, part)
        return self.dana(d, part) if self.rule.look_ahead == "shard" else self.sgd(d, part)

    def sgd(self, d: Array, part: Part) -> Array:
        """v = mu v + d; w -= eta v, or eta (d + mu v) with Nesterov. Source: torch.optim.SGD."""
        mu = part.group.momentum
        v = d
        if mu:
            momentum = self.state["momentum"]
            v = momentum[part.run] = mu * momentum[part.run] + d
        part.w[:] = part.w - part.eta * (d + mu * v if part.group.nesterov else v)
        return v

    def dana(self, d: Array, part: Part) -> Array:
        """old = v_i; v_i = gamma v_i + d; S += v_i - old; w -= eta v_i. Source: DANA-Zero, arXiv 1907.11612."""
        own = part.own
        if own is None:
            raise ValueError("dana takes the worker's own momentum")
        old = own.copy()
        own[:] = part.group.momentum * old + d
        self.state["total"][part.run] += own - old
        part.w[:] = part.w - part.eta * own
        return own

    def adamw(self, d: Array, part: Part) -> Array:
        """m, v of AdamW with decoupled decay; n counts the updates of this tensor. Source: torch.optim.AdamW."""
        spec, n = part.group, self.counts[part.tensor] + 1
        first, second = self.state["momentum"], self.state["second"]
        m = first[part.run] = spec.beta1 * first[part.run] + (1 - spec.beta1) * d
        v = second[part.run] = spec.beta2 * second[part.run] + (1 - spec.beta2) * d * d
        m_hat, v_hat = m / (1 - spec.beta1**n), v / (1 - spec.beta2**n)
        part.w[:] = part.w * (1 - part.eta * spec.weight_decay) - part.eta * m_hat / (np.sqrt(v_hat) + spec.eps)
        return m

    # ---- what local steps led to ---------------------------------------------------------------------

    def difference(self, part: Part) -> None:
        """w -= outer_lr / N Delta, Delta = w_pulled - w_local. Source: GPU A-SGD, arXiv 1312.6186."""
        part.w[:] = part.w - self._outer_rate(part) / self._divisor(part) * part.pushed

    def elastic(self, part: Part) -> Array:
        """e = a (x_i - x); x += e; sends x_i - e. a = elasticity / N. Source: EASGD, arXiv 1412.6651."""
        a = self.rule.elasticity / part.num_workers * part.weight
        e = a * (part.pushed - part.w)
        part.w[:] = part.w + e
        sent: Array = part.pushed - e
        return sent

    def delayed_nesterov(self, part: Part) -> None:
        """buf += d; at every N-th arrival m = b m + buf / N, w -= e ((1 - c N + c) b m + d / N), buf = 0.

        At the others w -= e (c b m + d / N). Source: arXiv 2401.09135.
        """
        b, divisor, d = self.rule.outer_momentum or 0.0, self._divisor(part), part.pushed
        c = self.rule.delay_share / part.num_workers
        m, buf = self.state["outer"], self.state["arrivals"]
        buf[part.run] += d
        share = c
        if self.num_arrivals >= part.num_workers:
            m[part.run] = b * m[part.run] + buf[part.run] / divisor
            buf[part.run] = 0
            share = 1 - c * part.num_workers + c
        part.w[:] = part.w - self._outer_rate(part) * (share * b * m[part.run] + d / divisor)

    def outer_nesterov(self, mean: Array, part: Part) -> None:
        """m = b m + d; w -= e (b m + d), d the mean of a round. Source: DiLoCo, arXiv 2311.08105."""
        b, m = self.rule.outer_momentum or 0.0, self.state["outer"]
        m[part.run] = b * m[part.run] + mean
        part.w[:] = part.w - self._outer_rate(part) * (b * m[part.run] + mean)

    def _outer_rate(self, part: Part) -> float:
        return (self.rule.outer_lr or 0.0) * part.weight * part.group.lr_scale

    def _divisor(self, part: Part) -> int:
        return part.num_workers if self.rule.outer_mean else 1

    # ---- several pushes to an update -----------------------------------------------------------------

    def accumulate(
        self,
        w: Array,
        pieces: Sequence[tuple[int, Array]],
        snapshot: Array | None,
        *,
        lag: int = 0,
        share: float = 1.0,
        absent: Collection[int] = frozenset(),
    ) -> None:
        """sum += share s(tau) c: compensated at arrival, against the parameters of that moment."""
        for part in self._parts(w, pieces, snapshot, None, 0.0, 1.0, lag, 1, absent):
            self.state["sum"][part.run] += share * self.rule.scale_at(lag) * self.compensated(part)
            self.summed.add(part.tensor)

    def apply_sum(
        self, w: Array, lr: float, out: Array, *, weight: float = 1.0, total_share: float, num_workers: int = 1
    ) -> None:
        """One update by sum / total_share; a tensor that no push had a gradient for stays. Then sum = 0."""
        total = self.state["sum"]
        absent = self.counts.keys() - self.summed
        mean = total / total_share
        for part in self._parts(w, [(0, mean)], None, None, lr, weight, 0, num_workers, absent):
            if self.rule.exchange == "outer":
                self.outer_nesterov(part.pushed, part)
            elif self.rule.exchange == "difference":
                part.w[:] = part.w - self._outer_rate(part) * part.pushed
            else:
                self.step(self.decayed(part.pushed, part), part)
        self._count(self.summed)
        self.summed.clear()
        total[:] = 0
        self.outgoing(w, lr, out)

    # ---- what is sent, who leaves --------------------------------------------------------------------

    def outgoing(self, w: Array, lr: float, out: Array) -> None:
        """w; for dana where momentum alone will take it, w - eta gamma S; one more step ahead with inflight 1."""
        out[:] = w
        if self.rule.look_ahead != "shard":
            return
        for start, stop, group, _ in self.segments:
            gamma = self.groups[group].momentum
            steps = gamma + gamma**2 if self.inflight else gamma
            eta = lr * self.groups[group].lr_scale
            out[start:stop] = w[start:stop] - eta * steps * self.state["total"][start:stop]

    def leave(self, owns: Iterable[Array]) -> None:
        """S = sum of the v_j left, so that nothing of who left or of rounding stays."""
        if "total" in self.state:
            total = self.state["total"]
            total[:] = 0
            for own in owns:
                total += own

    # ---- the tensors of a push -----------------------------------------------------------------------

    def _parts(
        self,
        w: Array,
        pieces: Sequence[tuple[int, Array]],
        snapshot: Array | None,
        own: Array | None,
        lr: float,
        weight: float,
        lag: int,
        num_workers: int,
        absent: Collection[int],
    ) -> Iterator[Part]:
        pushed = np.concatenate([np.empty(0, self.dtype), *(values for _, values in pieces)]).astype(self.dtype)
        base = w if snapshot is None else snapshot
        for start, stop, group, tensor in self.segments:
            if tensor in absent:
                continue
            run, spec = slice(start, stop), self.groups[group]
            mine = None if own is None else own[run]
            rate = lr * spec.lr_scale
            yield Part(run, tensor, spec, w[run], pushed[run], base[run], mine, rate, weight, lag, num_workers)

    def _count(self, present: Iterable[int]) -> None:
        for tensor in set(present):
            self.counts[tensor] += 1


def _state_keys(rule: RuleSpec, groups: Sequence[GroupSpec]) -> Iterator[str]:
    """The vectors that a rule needs on a shard besides w, as long as the slice."""
    adamw = any(group.algorithm == "adamw" for group in groups)
    if adamw or (any(group.momentum for group in groups) and not rule.needs_own_momentum):
        yield "momentum"
    needed = {
        "second": adamw,
        "ms": rule.needs_mean_square,
        "gap": bool(rule.gap_aware),
        "total": rule.needs_own_momentum,
        "sum": rule.needs_accumulator,
        "outer": rule.exchange == "outer",
        "arrivals": rule.exchange == "outer" and rule.mode == "async",
    }
    yield from (key for key, need in needed.items() if need)
