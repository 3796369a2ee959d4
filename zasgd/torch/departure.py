"""Which parts of a flat gradient may leave before the rest of it is there.

Decides when a part is complete; never whether it leaves, nor whether what is in it is finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zasgd.torch.placed import Placed

Parts = Sequence[tuple[int, int]]
"""Ranges (start, stop) of the flat gradient, in order, none overlapping another."""

Ready = Callable[[int, int], None]


@dataclass(frozen=True)
class Plan:
    """parts: as asked for. touched: tensor's index -> the parts that it lies in. waiting: part -> tensors in it."""

    parts: tuple[tuple[int, int], ...]
    touched: dict[int, tuple[int, ...]]
    waiting: tuple[int, ...]


def plan_of(parts: Parts, trained: Sequence[Placed]) -> Plan:
    """Padding and tensors that are not trained never change: no part waits for them."""
    touched = {
        t.index: tuple(i for i, (start, stop) in enumerate(parts) if t.start < stop and start < t.stop)
        for t in trained
        if t.spec.num_elements
    }
    counts = [0] * len(parts)
    for touching in touched.values():
        for i in touching:
            counts[i] += 1
    return Plan(tuple(parts), touched, tuple(counts))


class Departure:
    """The parts of one gradient: calls ready(start, stop) once for each whose tensors are all final."""

    def __init__(self, plan: Plan, ready: Ready) -> None:
        self._plan = plan
        self._ready = ready
        self._waiting = list(plan.waiting)
        for part, count in zip(plan.parts, self._waiting, strict=True):
            if not count:
                ready(*part)

    def final(self, index: int) -> None:
        """A tensor has its final gradient; told once for each."""
        for i in self._plan.touched.get(index, ()):
            self._waiting[i] -= 1
            if not self._waiting[i]:
                self._ready(*self._plan.parts[i])

    def has_left(self, index: int) -> bool:
        """Whether a part with this tensor was ready."""
        return any(not self._waiting[i] for i in self._plan.touched.get(index, ()))
