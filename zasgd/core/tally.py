"""Figures of a run, from what workers and shards report: loss, throughput, lag. Decides nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

MAX_FACTS = 8192


def numbers(facts: Mapping[str, Any] | None, names: Iterable[str]) -> dict[str, float]:
    """The finite numbers among a peer's facts; whatever else it sent is left out."""
    found: dict[str, float] = {}
    for name in names:
        value = (facts or {}).get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            found[name] = value
    return found


def counts(facts: Mapping[str, Any] | None, name: str) -> Counter[int]:
    """A map of small integers, as text keys, to counts, from a peer's facts."""
    table = (facts or {}).get(name)
    found: Counter[int] = Counter()
    if type(table) is dict and len(table) <= MAX_FACTS:
        for key, n in table.items():
            if type(n) is int and key.isdecimal() and len(key) < 10:
                found[int(key)] = n
    return found


def lag_summary(lags: Counter[int]) -> dict[str, float]:
    """mean, p50, p99 and max of a histogram lag -> pushes; zeros when it is empty."""
    total = sum(lags.values())
    if not total:
        return {"mean": 0.0, "p50": 0, "p99": 0, "max": 0}
    ordered = sorted(lags)
    mean = sum(lag * lags[lag] for lag in ordered) / total

    def quantile(q: float) -> int:
        seen = 0
        for lag in ordered:
            seen += lags[lag]
            if seen >= q * total:
                return lag
        return ordered[-1]

    return {"mean": round(mean, 4), "p50": quantile(0.5), "p99": quantile(0.99), "max": ordered[-1]}


class LossMeter:
    """Training loss, weighted by samples, forgetting over about half an epoch."""

    def __init__(self, horizon_samples: float) -> None:
        self.horizon_samples = max(1.0, horizon_samples)
        self.value = math.nan
        self._seen: dict[int, tuple[float, float]] = {}

    def report(self, incarnation: int, loss_sum: float, samples: float) -> None:
        """Take the running totals of one worker's life."""
        before_sum, before_samples = self._seen.get(incarnation, (0.0, 0.0))
        new = samples - before_samples
        if new <= 0:
            return
        mean = (loss_sum - before_sum) / new
        self._seen[incarnation] = (loss_sum, samples)
        weight = 1.0 if math.isnan(self.value) else min(1.0, new / self.horizon_samples)
        self.value = mean if weight == 1.0 else self.value + weight * (mean - self.value)

    def forget(self, incarnation: int) -> None:
        """A life is over."""
        self._seen.pop(incarnation, None)


class RateMeter:
    """Samples per second between two looks, smoothed over about three."""

    def __init__(self) -> None:
        self.value = 0.0
        self._at = -math.inf
        self._total = 0.0

    def look(self, now: float, total: float) -> float:
        """Take the total so far, return the smoothed rate."""
        elapsed_s = now - self._at
        if 0 < elapsed_s < math.inf:
            rate = max(0.0, total - self._total) / elapsed_s
            self.value = rate if not self.value else self.value + 0.33 * (rate - self.value)
        self._at, self._total = now, total
        return self.value
