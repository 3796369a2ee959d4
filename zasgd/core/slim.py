"""The worker's half of dana-slim: its momentum vector, and what it pushes in place of a gradient.

Decides u of every push; never moves parameters. A shard subtracts eta u and sends its parameters as they are: they
already are the look-ahead that dana computes before it sends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from zasgd.core.layout import Segment
from zasgd.core.rules import GroupSpec

Array = np.ndarray[Any, Any]

BLOCK = 16384
"""Elements at a time, so that the passes over them stay in cache and need no second vector."""


class SlimMomentum:
    """v of one worker: v = gamma v + d, then u = gamma v + d. Source: DANA-Slim, arXiv 1907.11612.

    d = g + wd w, w being the parameters that g was computed on.
    """

    def __init__(
        self, groups: Sequence[GroupSpec], segments: Sequence[Segment], size: int, dtype: Any = np.float32
    ) -> None:
        """Momentum of zeros, the only vector kept, `size` elements of `dtype`, any float.

        groups: as the recipe has them, indexed by Segment.group. segments: of the whole flat vector.
        """
        self.groups, self.segments = tuple(groups), tuple(segments)
        self.v: Array = np.zeros(size, dtype)
        self._scratch: Array = np.empty(min(size, BLOCK), dtype)
        self._lr = 0.0

    def push(self, grads: Array, params: Array, lr: float, absent: Collection[int] = frozenset()) -> Array:
        """Turn `grads` into u, in place, and return it.

        grads, params: of the size and dtype given at first; params is what the gradient was computed on and is only
        read. lr: the rate that the shards will apply u with, before each group's lr_scale. absent: tensors
        (Segment.tensor) without gradient; they and groups with lr_scale 0 stay as they are, momentum too.

        When the rate changes v is rescaled so that rate times v stays, which is what the other workers were told to
        expect. A push at rate 0 moves nothing and leaves v as it is.
        """
        if lr == 0:
            return grads
        if self._lr not in (0.0, lr):
            self.v *= self._lr / lr
        self._lr = lr
        for segment in self.segments:
            spec = self.groups[segment.group]
            if spec.lr_scale and segment.tensor not in absent:
                for run in _blocks(segment):
                    self._turn(grads[run], params[run], self.v[run], spec)
        return grads

    def _turn(self, d: Array, params: Array, v: Array, spec: GroupSpec) -> None:
        scratch = self._scratch[: d.size]
        if spec.weight_decay:
            d += np.multiply(params, spec.weight_decay, out=scratch)
        v *= spec.momentum
        v += d
        d += np.multiply(v, spec.momentum, out=scratch)


def _blocks(segment: Segment) -> Iterator[slice]:
    for start in range(segment.start, segment.stop, BLOCK):
        yield slice(start, min(start + BLOCK, segment.stop))
