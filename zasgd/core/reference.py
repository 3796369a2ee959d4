"""The update rules as formulas in plain numpy: to read, and to hold the kernels against.

Follows the pipeline compensate, decay, momentum, apply. Nothing at run time uses it; it computes in float64
unless told otherwise and checks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zasgd.core.layout import Segment
from zasgd.core.rules import GroupSpec, RuleSpec

Array = np.ndarray[Any, Any]

MS_EPS = 1e-7


class ReferenceOptimizer:
    """What `kernels.ShardOptimizer` does, one formula per method; same constructor, same `apply`.

    Source: Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, arXiv 1609.08326.
    """

    def __init__(
        self,
        rule: RuleSpec,
        groups: Sequence[GroupSpec],
        segments: Sequence[Segment],
        size: int,
        dtype: Any = np.float64,
    ) -> None:
        self.rule, self.groups, self.segments, self.dtype = rule, groups, segments, dtype
        self.state: dict[str, Array] = {"ms": np.zeros(size, dtype), "momentum": np.zeros(size, dtype)}

    def apply(self, w: Array, pieces: Sequence[tuple[int, Array]], snapshot: Array, lr: float, out: Array) -> None:
        """Apply one push to `w` and the state in place, the new values also into `out`."""
        g = np.concatenate([np.empty(0), *(values for _, values in pieces)]).astype(self.dtype)
        at, known = w.astype(self.dtype), snapshot.astype(self.dtype)
        for start, stop, group in self.segments:
            run = slice(start, stop)
            w[run] = self.updated(at[run], g[run], known[run], lr, self.groups[group], run)
        out[:] = w

    def updated(self, w: Array, g: Array, snapshot: Array, lr: float, group: GroupSpec, run: slice) -> Array:
        """The new parameters of one run of elements that share a group."""
        c = self.compensated(g, w - snapshot, run)
        d = c + group.weight_decay * w
        return w - lr * group.lr_scale * self.step(d, group, run)

    def compensated(self, g: Array, difference: Array, run: slice) -> Array:
        """c = g + lambda_t * g * g * (w - w_bak)."""
        if self.rule.name == "asgd":
            return g
        c: Array = g + self.strength(g, run) * g * g * difference
        return c

    def strength(self, g: Array, run: slice) -> Any:
        """lambda_t: constant, or lambda_0 / sqrt(MS + eps) with MS = m * MS + (1 - m) * g * g."""
        if self.rule.name == "dc-asgd-c":
            return self.rule.strength
        m, ms = self.rule.ms_decay, self.state["ms"]
        ms[run] = m * ms[run] + (1 - m) * g * g
        return self.rule.strength / np.sqrt(ms[run] + MS_EPS)

    def step(self, d: Array, group: GroupSpec, run: slice) -> Array:
        """v = mu * v + d; the step is v, or d + mu * v with Nesterov."""
        if group.momentum == 0:
            return d
        v = self.state["momentum"]
        v[run] = group.momentum * v[run] + d
        step: Array = d + group.momentum * v[run] if group.nesterov else v[run]
        return step
