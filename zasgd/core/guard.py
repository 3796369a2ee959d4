"""How far a run has gone astray: the gap between parameters and snapshots, and the alarm that damps the rate.

Decides a weight in (0, 1] for the learning rate. Never refuses a push and never touches a parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Vector = np.ndarray[Any, np.dtype[np.float32]]

GAP_ELEMENTS = 1024
"""The gap is measured on about so many elements, evenly spaced: a whole pass would cost as much as the update."""

FAST, SLOW = 1 / 32, 1 / 256
"""Gains of the running means, per push."""
WARM_UP_PUSHES = 32
"""The first losses, whose mean is where the run began."""
LOST_PROGRESS = 0.5
"""Alarm when the running loss has lost this part of what the run had gained."""
WORSE_THAN_START = 0.5
"""Alarm when the running loss is above that of the beginning by this part of it."""
GAP_JUMP = 8.0
"""Alarm when the gap is this many times its slow running mean, after SLOW has settled."""
CALM_PUSHES = 64
"""After an alarm the weight stands for so many pushes, before it is halved again or doubled."""
MIN_WEIGHT = 1 / 64


class Gap:
    """Root mean square of `w - snapshot` over elements, at each push and over all pushes."""

    def __init__(self, size: int) -> None:
        """size: elements of the slice."""
        self._every = slice(None, None, max(1, size // GAP_ELEMENTS))
        self._sum = 0.0
        self._count = 0

    def observe(self, w: Vector, snapshot: Vector) -> float:
        """The gap of one push."""
        self._count += 1
        if not w.size:
            return 0.0
        with np.errstate(over="ignore", invalid="ignore"):  # a run that diverges: the guard is told inf
            difference = w[self._every] - snapshot[self._every]
            mean_square = float(difference @ difference) / difference.size
        self._sum += mean_square
        return math.sqrt(mean_square)

    @property
    def rmse(self) -> float:
        """Over all pushes so far."""
        return math.sqrt(self._sum / self._count) if self._count else 0.0


@dataclass(frozen=True, slots=True)
class Alarm:
    """Why the run looks as if it diverged, in words, and at which push."""

    reason: str
    at_push: int


class Guard:
    """Watches loss and gap; when `acts`, damps the learning rate while they say that the run diverges."""

    def __init__(self, acts: bool) -> None:
        self.acts = acts
        self.weight = 1.0
        self.alarm: Alarm | None = None
        self.num_alarms = 0
        self._pushes = 0
        self._first = 0.0
        self._loss = 0.0
        self._best = math.inf
        self._gap = 0.0
        self._stands_until = 0

    def observe(self, loss: float | None, gap: float) -> float:
        """Take a push's mean loss (None: not told) and gap; the weight for its learning rate."""
        self._pushes += 1
        of_gap = self._judged_gap(gap)
        reason = (self._judged_loss(loss) if loss is not None else "") or of_gap
        if self._pushes >= self._stands_until:
            self._decide(reason)
        return self.damping

    @property
    def damping(self) -> float:
        """What multiplies the learning rate."""
        return self.weight if self.acts else 1.0

    def _judged_loss(self, loss: float) -> str:
        if self._pushes <= WARM_UP_PUSHES:
            self._first += (loss - self._first) / self._pushes
            self._loss = self._best = self._first
            return ""
        self._loss += FAST * (loss - self._loss)
        self._best = min(self._best, self._loss)
        if self._loss - self._first > WORSE_THAN_START * abs(self._first):
            return f"the loss is {self._loss:.3g}, it began at {self._first:.3g}"
        gained = self._first - self._best
        if gained > 0.2 * abs(self._first) and self._loss - self._best > LOST_PROGRESS * gained:
            return f"the loss is {self._loss:.3g}, it had been {self._best:.3g}"
        return ""

    def _judged_gap(self, gap: float) -> str:
        jumped = self._pushes > 1 / SLOW and gap > GAP_JUMP * self._gap > 0
        before = self._gap
        if math.isfinite(gap):
            self._gap += (gap - self._gap) * max(SLOW, 1 / self._pushes)
        return f"the gap is {gap:.3g}, it had been {before:.3g}" if jumped else ""

    def _decide(self, reason: str) -> None:
        if reason:
            self.alarm = Alarm(reason, self._pushes)
            self.num_alarms += 1
            self.weight = max(MIN_WEIGHT, self.weight / 2)
        elif self.alarm is not None:
            self.weight = min(1.0, self.weight * 2)
            self.alarm = None if self.weight == 1.0 else self.alarm
        else:
            return
        self._stands_until = self._pushes + CALM_PUSHES
