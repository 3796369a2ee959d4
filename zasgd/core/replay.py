"""A run over again from the records of its shards, bit for bit.

Decides the order: a gradient is computed when every shard has sent what its worker computed on, an update is applied
when its gradient is there; what a shard does is `parameters.Parameters`, as in the run. Never reads a file and never
computes a gradient: rows and `compute` are handed in. docs/replay.md tells the columns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from zasgd.core.layout import Layout
from zasgd.core.messages import Array, Grant, Push, no_counters, no_floats
from zasgd.core.parameters import Committed, Parameters, ShardConfig
from zasgd.core.snapshot import Snapshot
from zasgd.core.transfer import Gradient

PUSHES = ("apply", "gather", "member")
"""Rows that count a push: applied by itself, gathered for an update (mode buffer), member of a round (mode sync)."""


class ReplayError(ValueError):
    """The records do not lead to what they say; the text is one line: shard, row, and what differs."""


class PushRow(NamedTuple):
    """A push as its shard counted it: ids, the version it was computed on, how it was applied, and what it consumed."""

    what: str
    version: int
    worker: int
    incarnation: int
    seq: int
    base: int
    lag: int
    num_workers: int
    lr: float
    weight: float
    num_samples: int
    grants: tuple[Grant, ...]
    presence: bytes
    loss: float | None
    slot: int
    grads: bytes

    @classmethod
    def of(cls, row: Sequence[Any]) -> PushRow:
        """From the plain values of a record."""
        found = cls(*row)
        return found._replace(grants=tuple(Grant(*g) for g in found.grants))


@dataclass(frozen=True, slots=True)
class Sent:
    """What a shard last sent to a slot of an incarnation, and its sample clock then."""

    seq: int
    snapshot: Snapshot
    samples: int


class ShardReplay:
    """One shard's parameters, moved by the rows of its record."""

    def __init__(self, config: ShardConfig, layout: Layout, number: int, num_samples: int, rows: Iterable[Any]) -> None:
        """rows: without the first one, which names the shard. num_samples: of an epoch."""
        self.number = number
        self.rows = [list(row) for row in rows]
        self.at = 0
        self.values = Parameters(config, layout, number, num_samples)
        self.sent: dict[tuple[int, int], Sent] = {}
        self.num_updates = 0
        self.ended = False
        self._gathered: list[tuple[PushRow, Committed]] = []
        self._filler: PushRow | None = None

    @property
    def head(self) -> list[Any] | None:
        """The row that is next."""
        return self.rows[self.at] if self.at < len(self.rows) else None

    def exchanges(self) -> Iterable[tuple[int, int, int]]:
        """(incarnation, slot, seq) of every pull and push in the record."""
        for row in self.rows:
            if row[0] in PUSHES or row[0] == "pull":
                yield _exchange(row)

    def advance(self, initial: Sequence[tuple[int, Array]], gradient: Gradient | None) -> None:
        """Carry out the row that is next.

        initial: for a `seed` that holds no parameters. gradient: this slice's, of a push that holds none.
        """
        row = self.rows[self.at]
        self.at += 1
        if row[0] in PUSHES:
            self._push(PushRow.of(row), gradient)
            return
        step = getattr(self, f"_{row[0]}", None)
        if step is None:
            raise self._differs(f"a row {str(row[0])[:20]!r} is unknown")
        if row[0] == "seed":
            self._seed(row[2], initial)
        else:
            step(*row[1:])

    # ---- rows -------------------------------------------------------------------------------------

    def _seed(self, params: bytes, initial: Sequence[tuple[int, Array]]) -> None:
        self.values.seed([(0, np.frombuffer(params, np.float32))] if params else initial)

    def _pull(self, incarnation: int, seq: int, version: int, slot: int) -> None:
        self._same("version", self.values.version, version)
        held = self.sent.get((incarnation, slot))
        into = np.empty(self.values.slice.size, np.float32) if held is None else held.snapshot.params
        self._send(incarnation, slot, seq, self.values.snapshot(into))

    def _leave(self, incarnation: int) -> None:
        for key in [key for key in self.sent if key[0] == incarnation]:
            del self.sent[key]
        self.values.leave(incarnation)

    def _end(self, version: int, found: str) -> None:
        self._same("version", self.values.version, version)
        self._same("digest of the parameters", self.values.digest(), found)
        self.ended = True

    def _update(self, version: int, lr: float, weight: float) -> None:
        self.values.update()
        self._applied(version, lr, weight)
        if self._filler is not None:  # its push was answered with the update that it completed
            self._answer(self._filler, self.values.snapshot(self._held(self._filler)))
            self._filler = None

    def _round(self, version: int, lr: float, weight: float) -> None:
        members, self._gathered = self._gathered, []
        new = self.values.apply_round([committed for _, committed in members])
        self._applied(version, lr, weight)
        for (row, _), sent in zip(members, new, strict=True):
            self._answer(row, sent)

    def _push(self, row: PushRow, gradient: Gradient | None) -> None:
        committed = self._committed(row, gradient)
        self.values.num_workers = row.num_workers
        if row.what == "member":
            self._gathered.append((row, committed))
            return
        if row.what == "gather":
            self.values.gather(committed)
            if self.values.is_full:
                self._filler = row
            else:
                self._answer(row, self.values.snapshot(self._held(row)))
            return
        new = self.values.apply(committed)
        self._applied(row.version, row.lr, row.weight)
        self._same("lag", self.values.last.lag, row.lag)
        self._answer(row, new)

    def _committed(self, row: PushRow, gradient: Gradient | None) -> Committed:
        sent = self.sent.get((row.incarnation, row.slot))
        if sent is None:
            raise self._differs(f"incarnation {row.incarnation} pushes and has pulled nothing")
        self._same(f"version that push {row.seq} was computed on", sent.snapshot.version, row.base)
        if row.grads:
            grads: Array = np.frombuffer(row.grads, np.float32)
            push = self._message(row, row.loss)
        elif gradient is not None:
            grads = gradient.grads
            push = self._message(row, gradient.loss, gradient)
            self._same("loss", gradient.loss, row.loss)
            self._same("presence", gradient.presence, row.presence)
        else:
            raise self._differs("the record holds no gradients: replay computes them from the recipe")
        return Committed(row.incarnation, push, [(0, grads)], sent.snapshot)

    def _message(self, row: PushRow, loss: float | None, gradient: Gradient | None = None) -> Push:
        return Push(
            seq=row.seq, version=row.base, layout_hash="", commit=True, num_samples=row.num_samples,
            presence=row.presence, loss=loss, stats=no_floats() if gradient is None else gradient.stats,
            counters=no_counters() if gradient is None else gradient.counters,
        )  # fmt: skip

    def _applied(self, version: int, lr: float, weight: float) -> None:
        self.num_updates += 1
        self._same("version", self.values.version, version)
        self._same("learning rate", self.values.last.lr, lr)
        self._same("weight", self.values.last.weight, weight)

    def _held(self, row: PushRow) -> Array:
        return self.sent[row.incarnation, row.slot].snapshot.params

    def _answer(self, row: PushRow, snapshot: Snapshot) -> None:
        self._send(row.incarnation, row.slot, row.seq, snapshot)

    def _send(self, incarnation: int, slot: int, seq: int, snapshot: Snapshot) -> None:
        self.sent[incarnation, slot] = Sent(seq, snapshot, self.values.samples)

    def _same(self, what: str, found: Any, recorded: Any) -> None:
        if found != recorded:
            raise self._differs(f"{what} is {found} where the run had {recorded}")

    def _differs(self, what: str) -> ReplayError:
        return ReplayError(f"shard {self.number}, row {self.at}: {what}")


Compute = Callable[[int, tuple[Grant, ...], dict[str, Array], int], Gradient]
"""The gradient of an incarnation's batches at flat vectors by section, and the sample clock."""


class Replay:
    """All shards of a run, in an order in which every gradient could be computed."""

    def __init__(
        self, layout: Layout, shards: Sequence[ShardReplay], initial: dict[str, Array], compute: Compute
    ) -> None:
        """initial: flat vectors by section, as the seeder had them. compute: called once per push."""
        self.layout = layout
        self.shards = shards
        self._initial = initial
        self._compute = compute
        self._seqs: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._unanswered_by: dict[tuple[int, int, int], set[int]] = defaultdict(set)
        for shard in shards:
            for exchange in shard.exchanges():
                self._unanswered_by[exchange].add(shard.number)
        for incarnation, slot, seq in sorted(self._unanswered_by):
            self._seqs[incarnation, slot].append(seq)
        self._gradients: dict[tuple[int, int, int], Gradient] = {}

    def run(self, progress: Callable[[int], object] = lambda done: None) -> None:
        """To the end of every record. progress: told the rows carried out so far. Raises ReplayError."""
        while any(shard.head for shard in self.shards):
            before = sum(shard.at for shard in self.shards)
            for shard in self.shards:
                self._advance(shard)
            done = sum(shard.at for shard in self.shards)
            progress(done)
            if done == before:
                stuck = ", ".join(f"shard {s.number} at row {s.at + 1}" for s in self.shards if s.head)
                raise ReplayError(f"the records of the shards do not belong together: nothing can follow ({stuck})")

    def _advance(self, shard: ShardReplay) -> None:
        """As far as this shard can go without the others."""
        while (row := shard.head) is not None:
            gradient = None
            if row[0] in PUSHES and not row[-1]:
                found = self._gradient(PushRow.of(row))
                if found is None:
                    return
                gradient = self._part(shard, found)
            shard.advance([(0, self._initial["params"][shard.values.slice.start : shard.values.slice.stop])], gradient)
            if row[0] == "seed":
                self._seed_buffers(shard)
            self._done(shard, row)

    def _gradient(self, row: PushRow) -> Gradient | None:
        key = (row.incarnation, row.slot, row.seq)
        if key not in self._gradients:
            if not self._has_all(row):
                return None
            vectors, samples = self._view(row)
            self._gradients[key] = self._compute(row.incarnation, row.grants, vectors, samples)
        return self._gradients[key]

    def _has_all(self, row: PushRow) -> bool:
        """Every shard that the worker asked for this slot before this push has answered."""
        seqs = self._seqs[row.incarnation, row.slot]
        at = bisect_left(seqs, row.seq)
        if at == 0:
            raise ReplayError(f"incarnation {row.incarnation} pushes and has pulled nothing")
        return not self._unanswered_by[row.incarnation, row.slot, seqs[at - 1]]

    def _view(self, row: PushRow) -> tuple[dict[str, Array], int]:
        """The flat vectors that a worker held, put together from what each shard sent it, and the sample clock."""
        sent = [shard.sent[row.incarnation, row.slot] for shard in self.shards]
        parts = {
            "params": [s.snapshot.params for s in sent],
            "stats": [s.snapshot.stats for s in sent],
            "counters": [s.snapshot.counters for s in sent],
        }
        return {section: np.concatenate(arrays) for section, arrays in parts.items()}, max(s.samples for s in sent)

    def _part(self, shard: ShardReplay, whole: Gradient) -> Gradient:
        cuts = {s: self.layout.slices(s, len(self.shards))[shard.number] for s in ("params", "stats", "counters")}
        grads, stats, counters = (
            values[cuts[s].start : cuts[s].stop]
            for s, values in (("params", whole.grads), ("stats", whole.stats), ("counters", whole.counters))
        )
        return Gradient(grads, stats, counters, whole.num_samples, whole.loss, whole.finite, whole.presence)

    def _seed_buffers(self, shard: ShardReplay) -> None:
        for section, own in (("stats", shard.values.stats), ("counters", shard.values.counters)):
            cut = self.layout.slices(section, len(self.shards))[shard.number]
            own[:] = self._initial[section][cut.start : cut.stop]

    def _done(self, shard: ShardReplay, row: Sequence[Any]) -> None:
        """This shard has answered an exchange; a gradient that every shard has taken is not kept."""
        if row[0] != "pull" and row[0] not in PUSHES:
            return
        key = _exchange(row)
        self._unanswered_by[key].discard(shard.number)
        if not self._unanswered_by[key]:
            self._gradients.pop(key, None)


def _exchange(row: Sequence[Any]) -> tuple[int, int, int]:
    """(incarnation, slot, seq) of a pull's or push's row."""
    return (row[1], row[4], row[2]) if row[0] == "pull" else (row[3], row[-2], row[4])
