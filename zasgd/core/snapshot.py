"""What a shard remembers of one incarnation: which seqs it answered, how, and the parameters it sent.

Decides whether a seq is new, known or too old, and keeps every table bounded: 64 seqs, 64 pushes, and for each of its
`inflight + 1` slots one snapshot and one staged push. Never applies anything.

A push proves that its worker has all of the snapshot that it is based on, and no use for it any more. So what is sent
back takes that snapshot's place: in the array of its slot, which is the worker's own memory where both share it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zasgd.core.layout import Slice
from zasgd.core.messages import Applied, Array
from zasgd.core.node import require
from zasgd.core.region import Region

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


class Difference(NamedTuple):
    """`size` elements from `start` on of what is sent, as compressed difference to what was sent before."""

    start: int
    size: int
    packed: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The values sent to a worker at `version`: exactly what it computes on, until the next takes its place.

    samples: the sample clock, pushes: how many had been counted, when it was made. differences: how it travels the
    first time, empty if as it is.
    """

    version: int
    params: Array
    stats: Array
    counters: Array
    samples: int = 0
    pushes: int = 0
    differences: tuple[Difference, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return self.params.nbytes + self.stats.nbytes + self.counters.nbytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a seq was answered: `push` tells an ACK from a PARAMS; version after it; lag of the push; its slot.

    shared: the answer lies in the worker's region. refused: the code of a final refusal, empty otherwise.
    """

    push: bool
    version: int
    lag: int = 0
    refused: str = ""
    slot: int = 0
    shared: bool = False


@dataclass(slots=True)
class Staged:
    """Parts of one push or seeding that have come in, by offset; applied when they cover the slice.

    finite: no part so far holds inf or NaN.
    """

    seq: int
    pieces: dict[int, Array] = field(default_factory=dict)
    num_bytes: int = 0
    finite: bool = True

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

    snapshots: by slot. sent: the seq that each of them answered. staged: by slot. region: memory shared with the
    worker, under the name `region_name`; None if it has none. waiting: its push that is not applied yet. newest:
    version of the latest snapshot, sent at `sent_at`; -1 before. step_s: running mean of the time from what was sent
    to the push computed on it, 0 before the first.
    """

    def __init__(self, worker: int, incarnation: int, num_slots: int) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.num_slots = num_slots
        self.window = SeqWindow()
        self.snapshots: dict[int, Snapshot] = {}
        self.sent: dict[int, int] = {}
        self.outcomes: OrderedDict[int, Outcome] = OrderedDict()
        self.pushes: deque[Applied] = deque(maxlen=WINDOW)
        self.staged: dict[int, Staged] = {}
        self.region: Region | None = None
        self.region_name = ""
        self.waiting: Waiting | None = None
        self.lag = 0
        self.newest = -1
        self.sent_at = -math.inf
        self.step_s = 0.0
        self._decoded: dict[int, Array] = {}

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

    def keep(self, slot: int, seq: int, snapshot: Snapshot, now: float) -> None:
        """Keep a snapshot that is being sent in answer to `seq`, in place of what the slot held."""
        self.sent[slot] = seq
        self.newest, self.sent_at = max(self.newest, snapshot.version), now
        self.snapshots[slot] = snapshot

    def array(self, slot: int, part: Slice, *, shared: bool) -> Array:
        """Where the snapshot of a slot lies, elements `part` of the whole: here, or in shared memory."""
        if shared and self.region is not None:
            return self.region.params[slot][part.start : part.stop]
        held = self.snapshots.get(slot)
        return np.empty(part.size, np.float32) if held is None else held.params

    def decoded(self, slot: int, size: int) -> Array:
        """Where a compressed push from `slot` is unpacked, `size` float32."""
        if slot not in self._decoded:
            self._decoded[slot] = np.empty(size, np.float32)
        return self._decoded[slot]

    def stage(self, slot: int, seq: int) -> Staged | None:
        """The staging place of `seq`; what an older push left in the slot is discarded. None for one that was."""
        staged = self.staged.get(slot)
        if staged is None or staged.seq < seq:
            staged = self.staged[slot] = Staged(seq)
        return staged if staged.seq == seq else None

    def unstage(self, slot: int, seq: int) -> None:
        """Forget what is staged of `seq`."""
        staged = self.staged.get(slot)
        if staged is not None and staged.seq == seq:
            del self.staged[slot]

    @property
    def num_bytes(self) -> int:
        """Bytes of its snapshots and of what is staged, as far as they are not in shared memory."""
        staged = sum(s.num_bytes for s in self.staged.values())
        ours = self.region is None
        snapshots = sum(s.num_bytes - (0 if ours else s.params.nbytes) for s in self.snapshots.values())
        return staged + snapshots + sum(array.nbytes for array in self._decoded.values())

    def validate(self) -> None:
        """Raise InvariantError unless every table is within its bound."""
        require(all(0 <= slot < self.num_slots for slot in self.snapshots), "a snapshot in a slot that is none")
        require(all(0 <= slot < self.num_slots for slot in self.staged), "a push is staged in a slot that is none")
        require(len(self.outcomes) <= WINDOW, "more outcomes than the window holds")
        require(all(seq <= self.window.high for seq in self.outcomes), "an outcome is above the window")
        for seq in self.outcomes:
            require(self.window.state(seq) != "new", f"seq {seq} has an outcome but is not marked")


def frozen_copy(array: Array) -> Array:
    """A copy that nobody can write."""
    copy = np.array(array, copy=True)
    copy.flags.writeable = False
    return copy
