"""What a shard remembers of one incarnation: which seqs it answered, how, and the parameters it sent.

Decides whether a seq is new, known or too old, and keeps every table bounded: 64 seqs, 64 pushes, `inflight + 1`
snapshots, one staged push. Never applies anything.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from zasgd.core.messages import Applied, Array
from zasgd.core.node import require

if TYPE_CHECKING:
    from zasgd.core.rounds import Waiting

WINDOW = 64
_MASK = (1 << WINDOW) - 1


class SeqWindow:
    """A 64-bit replay bitmap: bit i says that seq `high - i` was answered."""

    def __init__(self) -> None:
        self.high = 0
        self.bitmap = 0

    def state(self, seq: int) -> str:
        """`new`, `known`, or `old` (below the window: nobody can tell)."""
        behind = self.high - seq
        if behind < 0:
            return "new"
        if behind >= WINDOW:
            return "old"
        return "known" if self.bitmap >> behind & 1 else "new"

    def mark(self, seq: int) -> None:
        """Note that `seq` was answered."""
        if seq > self.high:
            self.bitmap = (self.bitmap << min(seq - self.high, WINDOW)) & _MASK
            self.high = seq
        self.bitmap |= 1 << (self.high - seq)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The values sent to a worker at `version`: exactly what it computes on. Never written after it is made.

    samples: the sample clock, pushes: how many had been counted, when it was made.
    """

    version: int
    params: Array
    stats: Array
    counters: Array
    samples: int = 0
    pushes: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return self.params.nbytes + self.stats.nbytes + self.counters.nbytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a seq was answered: `push` tells an ACK from a PARAMS; version after it; lag of the push.

    refused: the code of a final refusal, empty otherwise.
    """

    push: bool
    version: int
    lag: int = 0
    refused: str = ""


@dataclass(slots=True)
class Staged:
    """Parts of one push or seeding that have come in, by offset; applied when they cover the slice."""

    seq: int
    pieces: dict[int, Array] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, offset: int, pieces: Sequence[Array]) -> None:
        """Take consecutive pieces from element `offset` on; a repeated part replaces itself."""
        for piece in pieces:
            before = self.pieces.get(offset)
            self.num_bytes += piece.nbytes - (0 if before is None else before.nbytes)
            self.pieces[offset] = piece
            offset += piece.size

    def covering(self, size: int) -> list[tuple[int, Array]] | None:
        """(offset, piece) in order if together they are exactly elements 0 to `size`; None otherwise."""
        ordered = sorted((o, p) for o, p in self.pieces.items() if p.size) if size else []
        at = 0
        for offset, piece in ordered:
            if offset != at:
                return None
            at += piece.size
        return ordered if at == size else None


class Client:
    """One admitted incarnation, as one shard sees it.

    waiting: its push that is not applied yet. newest: version of the latest snapshot, sent at `sent_at`; -1 before.
    step_s: running mean of the time from what was sent to the push computed on it, 0 before the first.
    """

    def __init__(self, worker: int, incarnation: int, num_snapshots: int) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.num_snapshots = num_snapshots
        self.window = SeqWindow()
        self.snapshots: OrderedDict[int, Snapshot] = OrderedDict()
        self.outcomes: OrderedDict[int, Outcome] = OrderedDict()
        self.pushes: deque[Applied] = deque(maxlen=WINDOW)
        self.staged: Staged | None = None
        self.waiting: Waiting | None = None
        self.lag = 0
        self.newest = -1
        self.sent_at = -math.inf
        self.step_s = 0.0

    def pushed(self, now: float) -> None:
        """A push has come: how long since its parameters were sent is the pace of this worker."""
        took_s = max(0.0, now - self.sent_at)
        if math.isfinite(took_s):
            self.step_s = took_s if not self.step_s else self.step_s + 0.2 * (took_s - self.step_s)

    def record(self, seq: int, outcome: Outcome, applied: Applied | None = None) -> None:
        """Remember that `seq` was answered, and the push unit that it was."""
        self.window.mark(seq)
        self.outcomes[seq] = outcome
        while len(self.outcomes) > WINDOW:
            self.outcomes.popitem(last=False)
        if applied is not None:
            self.pushes.append(applied)

    def keep(self, snapshot: Snapshot, now: float) -> None:
        """Keep a snapshot that is being sent; the oldest gives way."""
        self.newest, self.sent_at = snapshot.version, now
        self.snapshots[snapshot.version] = snapshot
        self.snapshots.move_to_end(snapshot.version)
        while len(self.snapshots) > self.num_snapshots:
            self.snapshots.popitem(last=False)

    def stage(self, seq: int) -> Staged:
        """The staging place of `seq`; a new seq discards what another one left."""
        if self.staged is None or self.staged.seq != seq:
            self.staged = Staged(seq)
        return self.staged

    @property
    def num_bytes(self) -> int:
        """Bytes of its snapshots and of what is staged."""
        return sum(s.num_bytes for s in self.snapshots.values()) + (self.staged.num_bytes if self.staged else 0)

    def validate(self) -> None:
        """Raise InvariantError unless every table is within its bound."""
        require(len(self.snapshots) <= self.num_snapshots, "more snapshots than in-flight pushes need")
        require(len(self.outcomes) <= WINDOW, "more outcomes than the window holds")
        require(all(seq <= self.window.high for seq in self.outcomes), "an outcome is above the window")
        for seq in self.outcomes:
            require(self.window.state(seq) != "new", f"seq {seq} has an outcome but is not marked")


def frozen_copy(array: Array) -> Array:
    """A copy that nobody can write."""
    copy = np.array(array, copy=True)
    copy.flags.writeable = False
    return copy
