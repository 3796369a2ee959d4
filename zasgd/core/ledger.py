"""Which sample is where: the permutation of each epoch, its fixed grid of batches, and what became of each batch.

Decides who computes which batch and in which state a batch ends: `once` (its gradient was applied by every
shard), `torn` (by some, its worker died or was refused by the others) or `skipped` (refused on two attempts).
Never knows how a batch is computed, nor a worker but by its incarnation. The permutation depends on (seed, epoch)
alone, so the number of workers never changes which samples form a batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zasgd.core.messages import Grant
from zasgd.core.node import require

MAX_OPEN_EPOCHS = 2
MAX_ATTEMPTS = 2
"""A batch whose gradient was refused this many times is skipped."""


def permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The order of the samples in `epoch`: int64, shape (num_samples,).

    Sorting by a hash of (seed, epoch, sample) is the same on every host and under every numpy version, which the
    streams of numpy's generators are not. The hash is splitmix64's finaliser (Steele et al., OOPSLA 2014).
    """
    keys = np.arange(num_samples, dtype=np.uint64)
    for word in (seed, epoch):
        keys = _mix(keys ^ _mix(np.full(1, word % (1 << 64), np.uint64)))
    return np.argsort(keys, kind="stable").astype(np.int64)


def _mix(z: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def num_batches(num_samples: int, batch_size: int) -> int:
    """Cells of the grid; a remainder under a quarter of a batch joins its predecessor (BatchNorm refuses one)."""
    full, rest = divmod(num_samples, batch_size)
    if not rest or (full and rest * 4 < batch_size):
        return full
    return full + 1


@dataclass(slots=True)
class _Epoch:
    """One open epoch: batches from `next_batch` on were never granted, `returned` were given back."""

    next_batch: int = 0
    finished: int = 0
    returned: list[int] = field(default_factory=list)
    refusals: dict[int, str] = field(default_factory=dict)
    once: int = 0
    torn: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class EpochTally:
    """Samples of a completed epoch by the state in which they ended."""

    epoch: int
    once: int
    torn: int
    skipped: int


class Ledger:
    """All samples of a run. Owners are incarnations; every method that settles a grant ignores one not held."""

    def __init__(self, num_samples: int, batch_size: int, epochs: int) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.epochs = epochs
        self.num_batches = num_batches(num_samples, batch_size)
        self.once = self.torn = self.skipped = 0
        self.refusals = 0
        self.reissued = 0
        self._open: dict[int, _Epoch] = {0: _Epoch()}
        self._num_opened = 1  # counted, since the newest open epoch may be complete before the oldest
        self._held: dict[int, dict[tuple[int, int], Grant]] = {}
        self._completed: list[EpochTally] = []

    # ---- reading ----------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Every sample of every epoch is in its final state."""
        return not self._open

    @property
    def settled(self) -> int:
        """Samples in a final state."""
        return self.once + self.torn + self.skipped

    @property
    def epoch(self) -> int:
        """The oldest epoch that is not complete; `epochs` at the end."""
        return min(self._open, default=self.epochs)

    def held_by(self, owner: int) -> list[Grant]:
        """The grants that `owner` has not settled, in the order in which it got them."""
        return list(self._held.get(owner, {}).values())

    def owners(self) -> list[int]:
        """Incarnations that hold grants."""
        return list(self._held)

    @property
    def num_owners(self) -> int:
        """How many incarnations hold grants."""
        return len(self._held)

    def progress(self) -> dict[str, Any]:
        """Plain facts for `zasgd status`."""
        return {
            "epoch": self.epoch,
            "epochs": self.epochs,
            "samples": self.settled,
            "samples_total": self.epochs * self.num_samples,
            "once": self.once,
            "torn": self.torn,
            "skipped": self.skipped,
            "refusals": self.refusals,
            "reissued": self.reissued,
            "outstanding": sum(len(held) for held in self._held.values()),
        }

    def pop_completed(self) -> list[EpochTally]:
        """Epochs completed since the last call."""
        done, self._completed = self._completed, []
        return done

    # ---- granting ---------------------------------------------------------------------------------

    def take(self, owner: int, at_most: int) -> list[Grant]:
        """Grant up to `at_most` batches to `owner`: returned ones first, then fresh ones, oldest epoch first."""
        granted = []
        for _ in range(at_most):
            grant = next(self._available(), None)
            if grant is None:
                break
            self._held.setdefault(owner, {})[grant.epoch, grant.batch] = grant
            granted.append(grant)
        return granted

    def _available(self) -> Iterator[Grant]:
        for epoch in sorted(self._open):
            state = self._open[epoch]
            if state.returned:
                yield self._grant(epoch, heapq.heappop(state.returned))
            elif state.next_batch < self.num_batches:
                state.next_batch += 1
                yield self._grant(epoch, state.next_batch - 1)
        if self._num_opened < self.epochs and len(self._open) < MAX_OPEN_EPOCHS:
            self._open[self._num_opened] = _Epoch(next_batch=1)
            self._num_opened += 1
            yield self._grant(self._num_opened - 1, 0)

    def _grant(self, epoch: int, batch: int) -> Grant:
        last = batch == self.num_batches - 1
        stop = self.num_samples if last else (batch + 1) * self.batch_size
        return Grant(epoch, batch, batch * self.batch_size, stop)

    # ---- settling ---------------------------------------------------------------------------------

    def confirm(self, owner: int, grant: Grant) -> bool:
        """Every shard applied this gradient: its samples are `once`. False when `owner` does not hold it."""
        return self._finish(owner, grant, "once")

    def tear(self, owner: int, grant: Grant) -> bool:
        """Some shards applied this gradient and others never will: its samples are `torn`."""
        return self._finish(owner, grant, "torn")

    def give_back(self, owner: int, grant: Grant) -> bool:
        """No shard applied this gradient: somebody else computes the batch."""
        if not self._release(owner, grant):
            return False
        self.reissued += 1
        heapq.heappush(self._open[grant.epoch].returned, grant.batch)
        return True

    def refuse(self, owner: int, grant: Grant, reason: str) -> bool:
        """The gradient was bad and no shard applied it: tried again once, then its samples are `skipped`."""
        if grant not in self._held.get(owner, {}).values():
            return False
        self.refusals += 1
        state = self._open[grant.epoch]
        if grant.batch in state.refusals:
            return self._finish(owner, grant, "skipped")
        state.refusals[grant.batch] = reason
        return self.give_back(owner, grant)

    def _release(self, owner: int, grant: Grant) -> bool:
        held = self._held.get(owner, {})
        if held.get((grant.epoch, grant.batch)) != grant:
            return False
        del held[grant.epoch, grant.batch]
        if not held:
            del self._held[owner]
        return True

    def _finish(self, owner: int, grant: Grant, how: str) -> bool:
        if not self._release(owner, grant):
            return False
        state = self._open[grant.epoch]
        for tally in (self, state):
            setattr(tally, how, getattr(tally, how) + grant.num_samples)
        state.finished += 1
        if state.finished == self.num_batches:
            del self._open[grant.epoch]
            self._completed.append(EpochTally(grant.epoch, state.once, state.torn, state.skipped))
            self._open_next()
        return True

    def _open_next(self) -> None:
        """Keep the run from looking complete between two epochs."""
        if not self._open and self._num_opened < self.epochs:
            self._open[self._num_opened] = _Epoch()
            self._num_opened += 1

    # ---- invariants -------------------------------------------------------------------------------

    def validate(self) -> None:
        """Every batch of an open epoch is in exactly one place; tallies add up. Raises InvariantError."""
        held = [key for grants in self._held.values() for key in grants]
        require(len(held) == len(set(held)), "a batch is held by two owners")
        require(len(self._open) <= MAX_OPEN_EPOCHS, "more than two epochs are open")
        for epoch, state in self._open.items():
            out = sum(1 for key in held if key[0] == epoch)
            places = state.finished + out + len(state.returned)
            require(places == state.next_batch, f"epoch {epoch}: a batch is missing or in two places")
            require(len(set(state.returned)) == len(state.returned), f"epoch {epoch}: a batch was returned twice")
        require(all(key[0] in self._open for key in held), "a batch of a completed epoch is held")
        if self.complete:
            require(
                self.settled == self.epochs * self.num_samples,
                "the ledger is complete but samples are missing",
            )
