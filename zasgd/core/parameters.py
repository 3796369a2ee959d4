"""The values of one slice, and what each push does to them.

Decides lag, learning rate and weight of an update, its sample clock, and what is sent back; the arithmetic is
`optimizer.ShardOptimizer`. Knows workers only by their incarnation, and neither messages' order nor who is a member:
`shard.Shard` drives it in a live run and in a simulated one, `replay` from the record of a run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from zasgd.core.compress import MAX_ELEMENTS, encode_difference, warm
from zasgd.core.compression import UNCOMPRESSED, Compression
from zasgd.core.guard import Gap, Guard
from zasgd.core.kernels import Vector
from zasgd.core.layout import Layout, Slice
from zasgd.core.messages import Array, Push
from zasgd.core.node import require
from zasgd.core.optimizer import Piece, ShardOptimizer
from zasgd.core.rules import GroupSpec, RuleSpec, shard_groups
from zasgd.core.schedule import Schedule
from zasgd.core.snapshot import Difference, Snapshot, frozen_copy

MAX_LAG_BUCKET = 4095


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """What a shard must know to apply pushes; the broker sends it as JSON in WELCOME.

    groups: as the recipe has them. window_bytes: unacknowledged push bytes it stages per worker. inflight: pushes a
    worker may have out beyond one. push, pull: how gradients, and answers to them, are compressed where they travel.
    """

    num_shards: int
    rule: RuleSpec
    groups: tuple[GroupSpec, ...]
    schedule: Schedule
    window_bytes: int = 1 << 30
    inflight: int = 0
    push: Compression = UNCOMPRESSED
    pull: Compression = UNCOMPRESSED

    def to_json(self) -> str:
        """JSON text, the inverse of from_json."""
        plain = {**{name: getattr(self, name) for name in ("num_shards", "window_bytes", "inflight")}}
        plain["rule"] = self.rule.to_plain()
        plain["groups"] = [g.to_plain() for g in self.groups]
        plain["schedule"] = asdict(self.schedule)
        plain["push"], plain["pull"] = self.push.to_plain(), self.pull.to_plain()
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str) -> ShardConfig:
        """Read what to_json wrote; raises ValueError for anything else."""
        plain = json.loads(text)
        schedule = plain["schedule"]
        schedule["milestones"] = tuple(schedule["milestones"])
        return cls(
            num_shards=plain["num_shards"],
            rule=RuleSpec.from_plain(plain["rule"]),
            groups=tuple(GroupSpec.from_plain(g) for g in plain["groups"]),
            schedule=Schedule(**schedule),
            window_bytes=plain["window_bytes"],
            inflight=plain["inflight"],
            push=Compression.from_plain(plain["push"]),
            pull=Compression.from_plain(plain["pull"]),
        )

    def optimizer(self, layout: Layout | None = None, part: Slice | None = None) -> ShardOptimizer:
        """A fresh optimizer for a slice; without one, an empty one that can be warmed."""
        segments = layout.segments(part) if layout is not None and part is not None else ()
        groups = shard_groups(self.rule, self.groups)
        return ShardOptimizer(self.rule, groups, segments, part.size if part else 0, self.inflight)

    def warm(self) -> None:
        """Compile what pushes will run, so that none waits for a compiler."""
        self.optimizer().warm()
        if self.pull.codec != "none":
            self.optimizer().warm(in_place=False)
        for compression in (self.push, self.pull):
            if compression.codec != "none":
                warm(compression)


@dataclass(frozen=True, slots=True)
class Committed:
    """A whole push of one incarnation: the message that committed it, its gradient, and what it was computed on.

    What is sent back takes the snapshot's place in its own array. compressible: it may travel as a difference.
    """

    incarnation: int
    push: Push
    pieces: Sequence[Piece]
    snapshot: Snapshot
    compressible: bool = True


@dataclass(frozen=True, slots=True)
class Update:
    """How a push was counted: its lag, and the rate and weight of the update it went into (0: only gathered)."""

    lag: int
    lr: float
    weight: float


class Parameters:
    """One slice of a run's parameters and buffers, with the state of its update rule.

    version: updates applied. samples: the sample clock. num_pushes, lags: of every push. num_workers: N as the broker
    last told.
    """

    def __init__(self, config: ShardConfig, layout: Layout, number: int, samples_per_epoch: int) -> None:
        """Zeros until `seed`. Raises MemoryError."""
        self.config = config
        self.samples_per_epoch = samples_per_epoch
        self.slice, stats, counters = (
            layout.slices(section, config.num_shards)[number] for section in ("params", "stats", "counters")
        )
        self.num_tensors = len(layout.of_section("params"))
        self.params = np.zeros(self.slice.size, np.float32)
        self.stats = np.zeros(stats.size, np.float32)
        self.counters = np.zeros(counters.size, np.int64)
        self.optimizer = config.optimizer(layout, self.slice)
        self.version = 0
        self.samples = 0
        self.num_workers = 1
        self.lags: Counter[int] = Counter()
        self.gap = Gap(self.slice.size)
        self.guard = Guard(config.rule.guard)
        self.last = Update(0, 0.0, 1.0)
        self._layout = layout
        self.num_pushes = 0
        self._own: dict[int, Vector] = {}
        self._gathered: list[int] = []
        self._scratch: Vector | None = None

    # ---- values -----------------------------------------------------------------------------------

    def seed(self, pieces: Sequence[Piece]) -> None:
        """Take the initial parameters."""
        for offset, piece in pieces:
            self.params[offset : offset + piece.size] = piece

    def forget(self) -> None:
        """Back to where nothing had been applied: a seeding is discarded."""
        require(self.version == 0 and not self._gathered, "a shard that has applied pushes was told to forget them")
        self.optimizer = self.config.optimizer(self._layout, self.slice)

    def snapshot(self, into: Vector) -> Snapshot:
        """What a pull sends now, written into `into`: the parameters, or where the rule looks ahead of them."""
        self.optimizer.outgoing(self.params, self._lr(), into)
        return self._sent(into)

    def observed(self) -> Snapshot:
        """The parameters themselves, for evaluations and for the model on disk."""
        return Snapshot(self.version, frozen_copy(self.params), *self._buffers(), self.samples, self.num_pushes)

    def digest(self) -> str:
        """A short name of the parameters' bits."""
        return hashlib.blake2b(self.params.tobytes(), digest_size=16).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Memory of parameters, buffers and rule, what is kept per worker included."""
        own = sum(v.nbytes for v in self._own.values())
        scratch = 0 if self._scratch is None else self._scratch.nbytes
        held = self.params.nbytes + self.stats.nbytes + self.counters.nbytes
        return held + self.optimizer.num_bytes() + own + scratch

    # ---- updates ----------------------------------------------------------------------------------

    def lag_of(self, snapshot: Snapshot) -> int:
        """Updates applied since `snapshot` was sent."""
        return self.version - snapshot.version

    def apply(self, push: Committed) -> Snapshot:
        """One push is one update; what is returned is sent to its worker, which computes on it next."""
        lag, lr, weight = self.lag_of(push.snapshot), self._lr(), self._weight(push)
        compresses = push.compressible and self.config.pull.codec != "none"
        sent = self._spare() if compresses else push.snapshot.params
        self.optimizer.apply(
            self.params, push.pieces, push.snapshot.params, lr, sent, lag=lag, weight=weight,
            own=self._own_of(push.incarnation), num_workers=self.num_workers, absent=self._absent(push),
        )  # fmt: skip
        self._count(push, lag, 1.0 / (1 + lag))
        self.version += 1
        self.last = Update(lag, lr, weight)
        return self._differing(push.snapshot.params, sent) if compresses else self._sent(sent)

    def gather(self, push: Committed) -> None:
        """Mode buffer: the push is compensated now and part of the next update."""
        lag = self.lag_of(push.snapshot)
        self._gathered.append(push.push.num_samples)
        self._accumulate(push, self._share(push.push.num_samples))
        self._count(push, lag, 1.0 / (1 + self.num_pushes - push.snapshot.pushes))
        self.last = Update(lag, 0.0, self._weight(push))

    @property
    def num_gathered(self) -> int:
        """Pushes that wait for the next update."""
        return len(self._gathered)

    @property
    def is_full(self) -> bool:
        """Whether the next update is due: `quorum` pushes are there, or the last ones of an epoch."""
        before = self.samples - sum(self._gathered)
        ended = self.samples // self.samples_per_epoch > before // self.samples_per_epoch
        return len(self._gathered) >= self.config.rule.quorum or ended

    def update(self) -> None:
        """Mode buffer: apply the mean of what was gathered, weighted by samples; nothing when there is none."""
        if not self._gathered:
            return
        lr = self._lr(self.samples - sum(self._gathered))
        total = sum(self._share(n) for n in self._gathered)
        self._apply_sum(lr, self.guard.damping, total)
        self._gathered.clear()

    def apply_round(self, pushes: Sequence[Committed]) -> list[Snapshot]:
        """Mode sync: the mean of these, in this order, is one update; what is sent to each."""
        lr, weight = self._lr(), 1.0
        for push in pushes:
            weight = self._weight(push)
            self._accumulate(push, 1.0)
            self._count(push, 0, 1.0 / len(pushes))
        sent = self._apply_sum(lr, weight, float(len(pushes)))
        for push in pushes:
            np.copyto(push.snapshot.params, sent)
        return [self._sent(push.snapshot.params) for push in pushes]

    def leave(self, incarnation: int) -> bool:
        """A worker's life is over: nothing of its momentum stays. Whether there was any."""
        if self._own.pop(incarnation, None) is None:
            return False
        self.optimizer.leave(self._own.values())
        return True

    def _accumulate(self, push: Committed, share: float) -> None:
        self.optimizer.accumulate(
            self.params, push.pieces, push.snapshot.params, lag=self.lag_of(push.snapshot), share=share,
            absent=self._absent(push),
        )  # fmt: skip

    def _apply_sum(self, lr: float, weight: float, total: float) -> Vector:
        sent = self._spare()
        self.optimizer.apply_sum(self.params, lr, sent, weight=weight, total_share=total, num_workers=1)
        self.version += 1
        self.last = Update(0, lr, weight)
        return sent

    def _share(self, num_samples: int) -> float:
        """Of the mean, in units of the first push: a single one has share 1 exactly."""
        return max(1, num_samples) / max(1, self._gathered[0])

    def _own_of(self, incarnation: int) -> Vector | None:
        if not self.config.rule.needs_own_momentum:
            return None
        if incarnation not in self._own:
            own = self.optimizer.new_own()
            require(own is not None, "the rule keeps no momentum per worker")
            self._own[incarnation] = own  # type: ignore[assignment]
        return self._own[incarnation]

    def _weight(self, push: Committed) -> float:
        """What multiplies eta: 1 unless the guard damps."""
        gap = self.gap.observe(self.params, push.snapshot.params)
        return self.guard.observe(push.push.loss, gap)

    def _lr(self, samples: int | None = None) -> float:
        return self.config.schedule.lr_at(self.samples if samples is None else samples, self.samples_per_epoch)

    def _absent(self, push: Committed) -> frozenset[int]:
        bits = push.push.presence
        if not bits:
            return frozenset()
        return frozenset(i for i in range(self.num_tensors) if not bits[i >> 3] >> (i & 7) & 1)

    def _count(self, committed: Committed, lag: int, buffer_weight: float) -> None:
        """The buffers that ride on a push, its samples, its lag.

        A buffer that each batch moves by the fraction h towards its own value is stable under a lag of tau while
        weight * h < 2 sin(pi / (2 (2 tau + 1))); 1 / (1 + tau) is for every h up to 1, tau in pushes.
        """
        push, snapshot = committed.push, committed.snapshot
        if push.stats.size:
            # What this batch changed, as with a gradient: BatchNorm's own momentum then counts once, not twice.
            self.stats += np.float32(buffer_weight) * (push.stats - snapshot.stats)
        if push.counters.size:
            np.maximum(self.counters, push.counters, out=self.counters)
        self.lags[min(lag, MAX_LAG_BUCKET)] += 1
        self.num_pushes += 1
        self.samples += push.num_samples

    def _sent(self, sent: Vector, differences: tuple[Difference, ...] = ()) -> Snapshot:
        return Snapshot(self.version, sent, *self._buffers(), self.samples, self.num_pushes, differences)

    def _differing(self, before: Vector, sent: Vector) -> Snapshot:
        """What the worker makes of the compressed difference between `before`, which it has, and `sent`."""
        found = []
        for start in range(0, sent.size, MAX_ELEMENTS):
            at = slice(start, min(start + MAX_ELEMENTS, sent.size))
            packed = encode_difference(self.config.pull, sent[at], before[at])
            found.append(Difference(start, at.stop - start, packed))
        return self._sent(before, tuple(found))

    def _spare(self) -> Vector:
        """A vector for what is not written where it will stay."""
        if self._scratch is None:
            self._scratch = np.empty_like(self.params)
        return self._scratch

    def _buffers(self) -> tuple[Array, Array]:
        """Copies of the buffers; an empty one is its own copy."""
        stats, counters = self.stats, self.counters
        return (frozen_copy(stats) if stats.size else stats), (frozen_copy(counters) if counters.size else counters)

    def validate(self, incarnations: Sequence[int]) -> None:
        """Raise InvariantError unless counts agree and momentum is kept of the living only."""
        require(math.isfinite(self.guard.weight) and 0 < self.guard.weight <= 1, "the guard's weight is not in (0, 1]")
        require(self._own.keys() <= set(incarnations), "momentum of a worker that is gone")
        if self.config.rule.mode == "async":
            require(self.version == sum(self.lags.values()), "version is not the number of applied pushes")
