"""Learning rate as a function of the sample clock, so that the number of workers never changes the schedule.

Decides the rate at a number of samples; never counts them, and knows no steps, workers or seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_KINDS = ("constant", "step", "cosine")


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the learning rate moves with the samples consumed by applied pushes.

    lr: the peak rate, per push. epochs: length of the run. kind: `constant`; `step`: times `gamma` at each of
    `milestones` (fractions of the run in (0, 1)); `cosine`: half a cosine from lr to 0 after the warm-up.
    warmup_epochs: linear from `warmup_from` * lr to lr. Raises ValueError for a value out of range.
    """

    lr: float
    epochs: int
    kind: str = "constant"
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    warmup_epochs: float = 0.0
    warmup_from: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"schedule kind {self.kind!r} is none of {', '.join(_KINDS)}")
        if not (math.isfinite(self.lr) and self.lr >= 0 and self.epochs >= 0 and self.warmup_epochs >= 0):
            raise ValueError("a schedule's lr, epochs and warmup_epochs are finite and at least 0")
        if not all(0 < m < 1 for m in self.milestones):
            raise ValueError("a schedule's milestones are fractions of the run, between 0 and 1")

    def lr_at(self, samples: int, samples_per_epoch: int) -> float:
        """The rate for the push that is applied when the shard's sample clock shows `samples`.

        After the last epoch the rate stays where it ended.
        """
        epoch = samples / max(1, samples_per_epoch)
        if epoch < self.warmup_epochs:
            return self.lr * (self.warmup_from + (1.0 - self.warmup_from) * epoch / self.warmup_epochs)
        progress = min(1.0, epoch / max(1, self.epochs))
        if self.kind == "step":
            return self.lr * math.prod(self.gamma for m in self.milestones if progress >= m)
        if self.kind == "cosine":
            warm = min(1.0, self.warmup_epochs / max(1, self.epochs))
            done = (progress - warm) / max(1e-12, 1.0 - warm)
            return self.lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return self.lr
