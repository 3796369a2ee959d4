"""Mistakes that public implementations of delay compensation made, planted: each is caught here.

A server of four lines holds one snapshot per worker. Two witnesses judge it: a replay of its event log by
the paper's formulas, and how well it trains a small network on real digits with many workers.

Two known mistakes are not planted here. Applying without holding a version lock (trap 8, ElasticDL) cannot be
written: the optimizer is a plain call in the one thread of a shard, which applies a push, counts the version and
notes the snapshot before it reads the next message. That averaging over k batches weakens the correction (trap 9)
is no mistake of a server but a fact to tune by: `test_rule_properties` measures it.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from zasgd.core.layout import Segment
from zasgd.core.node import InvariantError
from zasgd.core.optimizer import ShardOptimizer
from zasgd.core.reference import Part, ReferenceOptimizer
from zasgd.core.rules import GroupSpec, RuleSpec
from zasgd.core.schedule import Schedule

Array = np.ndarray[Any, Any]
Optimizer = ShardOptimizer | ReferenceOptimizer


class Server:
    """Our bookkeeping: what was sent to a worker is what its next push is compensated against."""

    def __init__(self, optimizer: Optimizer, w: Array, num_workers: int) -> None:
        self.optimizer, self.w = optimizer, w.copy()
        self.sent = {worker: w.copy() for worker in range(num_workers)}

    def push(self, worker: int, grad: Array, lr: float) -> Array:
        """Apply one gradient; returns what the worker computes on next."""
        out = np.empty_like(self.w)
        self.optimizer.apply(self.w, [(0, grad)], self.sent[worker], lr, out)
        self.sent[worker] = out
        return out.copy()


# The planted servers and formulas


class OnePreviousWeight(Server):
    """Trap 1: one previous value per parameter instead of a snapshot per worker, as MXNet's DCASGD."""

    def push(self, worker: int, grad: Array, lr: float) -> Array:
        previous = self.w.copy()
        out = super().push(worker, grad, lr)
        self.sent = dict.fromkeys(self.sent, previous)
        return out


class SnapshotIsTheModel(Server):
    """Trap 2: the snapshot is another name of the live parameters, so that the difference is zero."""

    def __init__(self, optimizer: Optimizer, w: Array, num_workers: int) -> None:
        super().__init__(optimizer, w, num_workers)
        self.sent = dict.fromkeys(self.sent, self.w)

    def push(self, worker: int, grad: Array, lr: float) -> Array:
        out = np.empty_like(self.w)
        self.optimizer.apply(self.w, [(0, grad)], self.sent[worker], lr, out)
        return out


class SnapshotStartsAtZero(Server):
    """Trap 3: before a worker's first push its snapshot is zero, as in TensorFlow's removed optimizer."""

    def __init__(self, optimizer: Optimizer, w: Array, num_workers: int) -> None:
        super().__init__(optimizer, w, num_workers)
        self.sent = {worker: np.zeros_like(w) for worker in self.sent}


class SnapshotTakenAtEveryPush(Server):
    """Trap 3: any worker's push renews the snapshots of all."""

    def push(self, worker: int, grad: Array, lr: float) -> Array:
        out = super().push(worker, grad, lr)
        self.sent = dict.fromkeys(self.sent, self.sent[worker])
        return out


class NoSquareRoot(ReferenceOptimizer):
    """Trap 4: lambda_0 / (MS + eps)."""

    def strength(self, part: Part) -> Any:
        super().strength(part)
        return self.rule.strength / (self.state["ms"][part.run] + 1e-7)


class MagnitudeForSquare(ReferenceOptimizer):
    """Trap 5: lambda * |g| * D, as Multiverso's first updater."""

    def compensated(self, part: Part) -> Array:
        return part.pushed + self.strength(part) * np.abs(part.pushed) * (part.w - part.base)


class DecayBeforeSquare(ReferenceOptimizer):
    """Trap 6: weight decay is part of the g that is squared, as MXNet."""

    def compensated(self, part: Part) -> Array:
        return super().compensated(replace(part, pushed=part.pushed + part.group.weight_decay * part.w))

    def decayed(self, c: Array, part: Part) -> Array:
        return c


class StrengthIsOne(ReferenceOptimizer):
    """Trap 7: lambda is 1, whatever was asked for, as Paddle."""

    def strength(self, part: Part) -> Any:
        return 1.0


TRAPS: dict[str, tuple[type[Server], type[Optimizer]]] = {
    "1 one previous weight": (OnePreviousWeight, ReferenceOptimizer),
    "2 snapshot aliased": (SnapshotIsTheModel, ReferenceOptimizer),
    "3 snapshot zero at start": (SnapshotStartsAtZero, ReferenceOptimizer),
    "3 snapshot at every push": (SnapshotTakenAtEveryPush, ReferenceOptimizer),
    "4 no square root": (Server, NoSquareRoot),
    "5 magnitude for square": (Server, MagnitudeForSquare),
    "6 decay before square": (Server, DecayBeforeSquare),
    "7 lambda is one": (Server, StrengthIsOne),
}


# First witness: the event log, replayed


@dataclass
class Log:
    """What happened: who pushed which gradient, computed on which version."""

    start: Array
    events: list[tuple[int, int, Array]] = field(default_factory=list)
    end: Array = field(default_factory=lambda: np.empty(0))


GROUP = GroupSpec(momentum=0.9, weight_decay=0.05)


def record(server: type[Server], optimizer: type[Optimizer], rule: RuleSpec) -> Log:
    """Four workers, of which one is slow, pushing 60 noisy gradients of a bowl in a seeded order."""
    size, rng = 50, np.random.default_rng(11)
    dtype = np.float32 if issubclass(optimizer, ShardOptimizer) else np.float64
    log = Log(rng.standard_normal(size).astype(np.float32).astype(dtype))
    service = server(optimizer(rule, [GROUP], [Segment(0, size, 0, 0)], size), log.start, num_workers=4)
    holds = {worker: (0, log.start.copy()) for worker in range(4)}
    for version in range(1, 61):
        worker = int(rng.choice(4, p=[0.4, 0.25, 0.25, 0.1]))
        base, w = holds[worker]
        grad = (w + 0.5 * rng.standard_normal(size)).astype(dtype)
        log.events.append((worker, base, grad))
        holds[worker] = version, service.push(worker, grad, lr=0.03)
    log.end = service.w
    return log


def replay(log: Log, rule: RuleSpec) -> Array:
    """Every version from the log alone, by the paper's formulas, from the history of all versions."""
    history = [log.start.astype(np.float64)]
    v = np.zeros_like(history[0])
    ms = np.zeros_like(v)
    for _, base, grad in log.events:
        w, g = history[-1], grad.astype(np.float64)
        ms = 0.95 * ms + 0.05 * g**2
        lam = {"dc-asgd-c": rule.lam, "dc-asgd-a": rule.lam / np.sqrt(ms + 1e-7)}[rule.name]
        v = 0.9 * v + (g + lam * g**2 * (w - history[base]) + 0.05 * w)
        history.append(w - 0.03 * v)
    return history[-1]


def replays(log: Log, rule: RuleSpec) -> bool:
    """Whether the log's end is what the formulas give, to 1e-5."""
    return np.allclose(log.end, replay(log, rule), rtol=1e-5, atol=1e-5)


EXAMPLES = [RuleSpec("dc-asgd-c", lam=0.5), RuleSpec("dc-asgd-a", lam=0.8)]


@pytest.mark.parametrize("rule", EXAMPLES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("optimizer", [ShardOptimizer, ReferenceOptimizer])
def test_the_event_log_of_four_workers_with_momentum_replays(rule: RuleSpec, optimizer: type[Optimizer]) -> None:
    log = record(Server, optimizer, rule)
    lags = [version - base for version, (_, base, _) in enumerate(log.events)]
    assert {worker for worker, _, _ in log.events} == {0, 1, 2, 3} and max(lags) > 6 and min(lags) == 0
    assert replays(log, rule)


@pytest.mark.parametrize(
    ("trap", "rule"),
    [(trap, rule) for trap in TRAPS for rule in EXAMPLES if (trap, rule.name) != ("4 no square root", "dc-asgd-c")],
    ids=lambda value: getattr(value, "name", value),
)
def test_no_trap_survives_the_replay(trap: str, rule: RuleSpec) -> None:
    log = record(*TRAPS[trap], rule)
    assert np.isfinite(log.end).all()
    assert not replays(log, rule)


def test_the_kernel_refuses_the_live_parameters_as_snapshot() -> None:
    with pytest.raises(InvariantError, match="the snapshot is the live parameters"):
        record(SnapshotIsTheModel, ShardOptimizer, EXAMPLES[0])


# Second witness: a network on real digits


@functools.cache
def digits() -> tuple[Array, Array, Array, Array]:
    """Standardised scikit-learn digits, 1297 to train, 500 to test: x, labels, x, labels."""
    from sklearn.datasets import load_digits

    x, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, labels = x[order], labels[order]
    x = ((x - x[:1297].mean(0)) / (x[:1297].std(0) + 1e-6)).astype(np.float32)
    return x[:1297], labels[:1297], x[1297:], labels[1297:]


SHAPES = ((64, 64), (64,), (64, 64), (64,), (64, 10), (10,))
EDGES = np.cumsum([0, *(int(np.prod(shape)) for shape in SHAPES)])
SIZE = int(EDGES[-1])


def tensors(flat: Array) -> list[Array]:
    return [flat[a:b].reshape(s) for a, b, s in zip(EDGES, EDGES[1:], SHAPES, strict=False)]


def initial(seed: int) -> Array:
    """Uniform within 1 / sqrt(inputs), as torch's Linear."""
    rng, flat = np.random.default_rng(seed), np.empty(SIZE, np.float32)
    for weight, bias in zip(tensors(flat)[::2], tensors(flat)[1::2], strict=True):
        limit = 1 / np.sqrt(weight.shape[0])
        weight[:], bias[:] = rng.uniform(-limit, limit, weight.shape), rng.uniform(-limit, limit, bias.shape)
    return flat


def forward(flat: Array, x: Array) -> list[Array]:
    """Inputs of each layer and, last, the class scores."""
    w1, b1, w2, b2, w3, b3 = tensors(flat)
    h1 = np.maximum(x @ w1 + b1, 0)
    h2 = np.maximum(h1 @ w2 + b2, 0)
    return [x, h1, h2, h2 @ w3 + b3]


def gradient(flat: Array, x: Array, labels: Array) -> Array:
    """Of the mean cross-entropy, backpropagated by hand."""
    *inputs, scores = forward(flat, x)
    grad, weights = np.empty_like(flat), tensors(flat)[::2]
    back = np.exp(scores - scores.max(1, keepdims=True))
    back /= back.sum(1, keepdims=True)
    back[np.arange(len(x)), labels] -= 1
    back /= len(x)
    for layer in (2, 1, 0):
        tensors(grad)[2 * layer][:] = inputs[layer].T @ back
        tensors(grad)[2 * layer + 1][:] = back.sum(0)
        back = (back @ weights[layer].T) * (inputs[layer] > 0)
    return grad


NAG = GroupSpec(momentum=0.9, nesterov=True, weight_decay=1e-4)
SGD = GroupSpec(weight_decay=1e-4)
BATCHES = [slice(16 * b, 16 * (b + 1) + (b == 80)) for b in range(81)]  # the last takes the odd sample


def batches(epochs: int, seed: int) -> list[Array]:
    """The sample numbers of every batch of the run, in order."""
    rng = np.random.default_rng(seed)
    return [order[cut] for order in (rng.permutation(1297) for _ in range(epochs)) for cut in BATCHES]


def train(
    server: type[Server],
    optimizer: Callable[..., Optimizer],
    rule: RuleSpec,
    group: GroupSpec,
    next_worker: Callable[[int], int],
    num_workers: int,
    epochs: int = 30,
) -> tuple[float, bool]:
    """Test error in percent, and whether every parameter stayed finite; `next_worker(push)` pushes next."""
    x, labels, *_ = digits()
    lr = 0.02 if group.momentum else 0.2
    schedule = Schedule(lr, epochs, "step", (0.5, 0.75), warmup_epochs=min(3.0, epochs / 10))
    service = server(optimizer(rule, [group], [Segment(0, SIZE, 0, 0)], SIZE), initial(1), num_workers)
    holds = {worker: initial(1) for worker in range(num_workers)}
    takes: dict[int, Array] = {}
    stream, samples = iter(batches(epochs, seed=2)), 0
    for worker in range(num_workers):
        takes[worker] = next(stream)
    with np.errstate(all="ignore"):
        for push in range(81 * epochs):
            worker = next_worker(push)
            taken = takes[worker]
            grad = gradient(holds[worker], x[taken], labels[taken])
            holds[worker] = service.push(worker, grad, schedule.lr_at(samples, 1297))
            samples += len(taken)
            takes[worker] = next(stream, taken)
    return percent_wrong(service.w), bool(np.isfinite(service.w).all())


def percent_wrong(flat: Array) -> float:
    """Percent of the 500 that are read wrongly."""
    _, _, x, labels = digits()
    return float(100 * np.mean(forward(flat, x)[-1].argmax(1) != labels))


def in_virtual_time(num_workers: int, seed: int = 3) -> Callable[[int], int]:
    """Workers finish tasks whose times are drawn from Gamma(100): alike machines that drift apart."""
    rng = np.random.default_rng(seed)
    finish = [(rng.gamma(100), worker) for worker in range(num_workers)]
    heapq.heapify(finish)

    def next_worker(_push: int) -> int:
        at, worker = finish[0]
        heapq.heapreplace(finish, (at + rng.gamma(100), worker))
        return worker

    return next_worker


def in_turn(num_workers: int) -> Callable[[int], int]:
    """Every push after the first round has lag `num_workers` - 1."""
    return lambda push: push % num_workers


SIXTEEN = 16
ADAPTIVE = RuleSpec("dc-asgd-a")


@pytest.mark.parametrize("group", [SGD, NAG], ids=["sgd", "nag"])
def test_alone_every_rule_learns_and_with_sixteen_workers_only_compensation_does(group: GroupSpec) -> None:
    alone, _ = train(Server, ShardOptimizer, ADAPTIVE, group, in_turn(1), 1)
    plain, _ = train(Server, ShardOptimizer, RuleSpec("asgd"), group, in_virtual_time(SIXTEEN), SIXTEEN)
    compensated, _ = train(Server, ShardOptimizer, ADAPTIVE, group, in_virtual_time(SIXTEEN), SIXTEEN)
    assert alone < 5 and compensated < 5 and plain > 20


@pytest.mark.parametrize(
    ("trap", "group"),
    [
        ("1 one previous weight", SGD),
        ("2 snapshot aliased", SGD),
        ("3 snapshot at every push", SGD),
        ("4 no square root", SGD),
        ("7 lambda is one", NAG),
    ],
    ids=lambda value: value if isinstance(value, str) else "nag" if value.momentum else "sgd",
)
def test_sixteen_workers_do_not_learn_in_these_traps(trap: str, group: GroupSpec) -> None:
    """In the other three they do learn, so only the replay catches those."""
    error, _ = train(*TRAPS[trap], ADAPTIVE, group, in_virtual_time(SIXTEEN), SIXTEEN)
    assert error > 15


def test_momentum_stays_finite_at_every_lag_up_to_32() -> None:
    ends = [train(Server, ShardOptimizer, ADAPTIVE, NAG, in_turn(lag + 1), lag + 1, epochs=3) for lag in range(33)]
    assert all(finite for _, finite in ends)
    assert max(error for error, _ in ends[:5]) < 10 and max(error for error, _ in ends) < 60


def test_without_the_root_it_does_not_stay_finite() -> None:
    _, finite = train(Server, NoSquareRoot, ADAPTIVE, SGD, in_turn(SIXTEEN), SIXTEEN)
    assert not finite
