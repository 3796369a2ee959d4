"""Work for simulated workers: how long a task takes, and gradients that cost nothing to compute.

Decides durations and gradient values, never who works on what. Times and noise have seeds of their own,
apart from the world's.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import cycle
from statistics import fmean
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from zasgd.core.evaluator import ScoreTask
from zasgd.core.layout import Layout
from zasgd.core.messages import Array, Grant
from zasgd.core.transfer import Gradient
from zasgd.core.worker import GradientTask

Vector = np.ndarray[Any, np.dtype[np.float32]]
Row = TypeVar("Row")


class TaskTimes(Protocol):
    """Virtual seconds of the next task of a named machine."""

    @property
    def mean_s(self) -> float:
        """Seconds of a task, on average over tasks and machines."""
        ...

    def next(self, machine: str) -> float:
        """Seconds of one task, over 0."""
        ...


class UniformTimes:
    """Every task takes `mean_s` give or take the fraction `spread`, whatever the machine."""

    def __init__(self, mean_s: float, spread: float, seed: int) -> None:
        self.mean_s = mean_s
        self._low_s, self._high_s = mean_s * (1.0 - spread), mean_s * (1.0 + spread)
        self._draw = random.Random(seed)

    def next(self, machine: str) -> float:
        """Seconds of one task."""
        return self._draw.uniform(self._low_s, self._high_s)


class GammaTimes:
    """Gamma-distributed task times with mean `mean_s`, as in the DANA paper (arXiv 1907.11612).

    Homogeneous: every task is Gamma(shape 100, scale mean_s/100). Heterogeneous: a machine first draws its
    own mean from Gamma(1/0.6^2, mean_s * 0.6^2), then each task from Gamma(100, machine mean/100).
    """

    def __init__(self, mean_s: float, *, heterogeneous: bool, seed: int) -> None:
        self.mean_s = mean_s
        self._heterogeneous = heterogeneous
        self._draw = random.Random(seed)
        self._machine_means_s: dict[str, float] = {}

    def next(self, machine: str) -> float:
        """Seconds of one task on `machine`."""
        return _gamma_task_s(self._draw, self._machine_mean_s(machine))

    def _machine_mean_s(self, machine: str) -> float:
        if not self._heterogeneous:
            return self.mean_s
        if machine not in self._machine_means_s:
            spread = 0.6**2
            self._machine_means_s[machine] = self._draw.gammavariate(1.0 / spread, self.mean_s * spread)
        return self._machine_means_s[machine]


def _gamma_task_s(draw: random.Random, mean_s: float) -> float:
    return draw.gammavariate(100.0, mean_s / 100.0)


class _Rows(Generic[Row]):
    """Which row of a table a machine has."""

    def __init__(self, rows: Mapping[str, Row]) -> None:
        self._rows = dict(rows)
        self._in_turn = cycle(list(rows.values()))

    def of(self, machine: str) -> Row:
        if machine not in self._rows:
            self._rows[machine] = next(self._in_turn)
        return self._rows[machine]


class MachineTimes:
    """Machines with known means: each task is Gamma(shape 100, scale machine mean/100).

    means_s: by machine; any other machine takes the rows in turn, in the order in which such machines first ask.
    """

    def __init__(self, means_s: Mapping[str, float], seed: int) -> None:
        self.mean_s = fmean(means_s.values())
        self._rows = _Rows(means_s)
        self._draw = random.Random(seed)

    def next(self, machine: str) -> float:
        """Seconds of one task on `machine`."""
        return _gamma_task_s(self._draw, self._rows.of(machine))


class RecordedTimes:
    """Task times as they were measured, in order and then from the beginning again.

    seconds: by machine, none empty; any other machine takes the rows in turn, in the order in which such machines
    first ask, and begins at the row's beginning.
    """

    def __init__(self, seconds: Mapping[str, Sequence[float]]) -> None:
        self.mean_s = fmean(fmean(row) for row in seconds.values())
        self._rows = _Rows(seconds)
        self._taken: Counter[str] = Counter()

    def next(self, machine: str) -> float:
        """Seconds of the machine's next task."""
        row = self._rows.of(machine)
        self._taken[machine] += 1
        return row[(self._taken[machine] - 1) % len(row)]


class Gradients(Protocol):
    """The gradient of a batch at given parameters."""

    def of(self, params: Vector, grant: Grant) -> Vector:
        """float32, the shape of `params`."""
        ...


class Quadratic:
    """f(w) = sum h (w - target)^2 / 2, curvatures h from 0.1 to 1, plus noise that belongs to the batch."""

    def __init__(self, size: int, *, noise: float = 0.1, seed: int = 0) -> None:
        draw = np.random.Generator(np.random.Philox(seed))
        self.target: Vector = draw.standard_normal(size, dtype=np.float32)
        self.curvature: Vector = np.linspace(0.1, 1.0, size, dtype=np.float32)
        self._noise: Vector = (noise * draw.standard_normal((64, size))).astype(np.float32)

    def of(self, params: Vector, grant: Grant) -> Vector:
        """The gradient at `params`; the same batch has the same noise on every worker."""
        noise = self._noise[(grant.epoch * 31 + grant.batch) % len(self._noise)]
        gradient: Vector = self.curvature * (params - self.target) + noise
        return gradient

    def loss(self, params: Vector) -> float:
        """f without noise."""
        return float(0.5 * np.sum(self.curvature * (params - self.target) ** 2))


class Tally:
    """Parameters that count: applying the gradient of batch b at lr 1 adds 1 to element b of every shard.

    With plain ASGD the final parameters are then a record of what was applied how often, kept by the update
    arithmetic itself and by no table of ours. `stride`: elements per shard, at least the number of batches.
    """

    def __init__(self, stride: int) -> None:
        self._stride = stride

    def of(self, params: Vector, grant: Grant) -> Vector:
        """-1 at the batch's element in each shard's slice, 0 elsewhere."""
        gradient = np.zeros_like(params)
        gradient[grant.batch :: self._stride] = -1.0
        return gradient


class SimulatedWork:
    """Carries out the tasks of workers and evaluators: computes, and says how long it took.

    bad: cells (epoch, batch) whose gradient is never finite. score_s: virtual seconds of an evaluation.
    """

    def __init__(
        self,
        layout: Layout,
        gradients: Gradients,
        times: TaskTimes,
        *,
        bad: Collection[tuple[int, int]] = (),
        score_s: float = 1.0,
    ) -> None:
        self._layout = layout
        self._gradients = gradients
        self._times = times
        self._bad = frozenset(bad)
        self._score_s = score_s
        self._params: dict[str, Vector] = {}

    def __call__(self, name: str, life: int, task: Any) -> tuple[float, Any]:
        """Virtual seconds of `task`, a task time per batch, and a Gradient or, for a ScoreTask, scores."""
        if isinstance(task, ScoreTask):
            vectors = zero_vectors(self._layout)
            for section, start, values in task.pieces:
                vectors[section][start : start + values.size] = values
            return self._score_s, {"norm": float(np.linalg.norm(vectors["params"]))}
        self._params[name] = task.memory.params.copy()
        return sum(self._times.next(name) for _ in task.grants), self._gradient(task)

    def params(self, name: str) -> Vector:
        """The parameters that the named process has computed on last."""
        return self._params[name]

    def _gradient(self, task: GradientTask) -> Gradient:
        """The mean over the batches, each with the weight of its samples; one batch's gradient as it is."""
        grants, memory, last = task.grants, task.memory, task.grants[-1]
        found = [self._gradients.of(memory.params, grant) for grant in grants]
        memory.grads[:] = found[0] if len(found) == 1 else np.average(found, 0, [g.num_samples for g in grants])
        return Gradient(
            grads=memory.grads,
            stats=np.full_like(memory.stats, last.batch),
            counters=np.full_like(memory.counters, last.epoch),
            num_samples=sum(g.num_samples for g in grants),
            loss=1.0,
            finite=not any((g.epoch, g.batch) in self._bad for g in grants),
        )


def zero_vectors(layout: Layout) -> dict[str, Array]:
    """The flat vectors of `layout` by section, all zeros."""
    return {
        section: np.zeros(size, np.int64 if section == "counters" else np.float32)
        for section, size in layout.sizes.items()
    }
