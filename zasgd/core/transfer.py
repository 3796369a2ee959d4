"""Between a worker's memory and the shards: a gradient as the messages of its push, their answers put in place.

Decides what travels and how: cut over the shards, compressed, the part that commits last. Never when, and never whether
it was applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from zasgd.core import wire
from zasgd.core.compress import MAX_ELEMENTS, CodecError, Feedback, decode_onto, encode
from zasgd.core.compression import FEEDBACK, Compression
from zasgd.core.layout import Layout, Slice
from zasgd.core.messages import Ack, Array, Grant, Params, Push
from zasgd.core.region import Memory


@dataclass(frozen=True, slots=True)
class Gradient:
    """What a worker pushes: the mean gradient of its batches, or what local steps over them led to.

    grads: float32, the flat params vector's size: that of the task's memory, or another that is copied there. stats:
    float32 and counters: int64, the buffers after the last batch. num_samples: of all batches; loss: mean over them.
    finite: no inf or NaN in grads. presence: bit i, lowest first, says that tensor i of the layout's parameters got a
    gradient; empty: all did.
    """

    grads: Array
    stats: Array
    counters: Array
    num_samples: int
    loss: float
    finite: bool
    presence: bytes = b""


Ids = Callable[[int], dict[str, Any]]
"""F0 fields of a message to a shard."""


class Pusher:
    """Makes the pushes of one life of a worker.

    Some parts may leave before the whole gradient is there; `parts` tells their places. shared: shards that read the
    gradient where it lies.
    """

    def __init__(self, layout: Layout, num_shards: int, compression: Compression, shared: frozenset[int]) -> None:
        self._layout = layout
        self._slices = {s: layout.slices(s, num_shards) for s in ("params", "stats", "counters")}
        self._compression = compression
        self._shared = shared
        travels = len(shared) < num_shards
        keeps = travels and compression.codec in FEEDBACK
        self._feedback = Feedback(compression, layout.sizes["params"]) if keeps else None
        self._places = [] if keeps else [place for k in range(num_shards) for place in self._early(k)]
        self._shard_at = {start: (k, i) for k, i, start, _ in self._places}

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Ranges (start, stop) of the flat gradient that may leave early, in order."""
        return tuple((start, stop) for _, _, start, stop in self._places)

    @property
    def owes(self) -> bool:
        """Something was held back by the compression of earlier pushes."""
        return self._feedback is not None and not self._feedback.is_empty

    def part(self, ids: Ids, slot: int, version: Callable[[int], int], grads: Array, start: int) -> Push:
        """The early part that begins at `start` of the flat gradient."""
        k, i = self._shard_at[start]
        cuts = self._cuts(self._own(k, grads))
        return self._message(ids(k), slot, version(k), (i, len(cuts)), k, cuts[i])

    def push(
        self,
        ids: Ids,
        slot: int,
        version: Callable[[int], int],
        done: Gradient,
        grants: Sequence[Grant],
        early: Sequence[Push] = (),
        *,
        dense: bool = False,
    ) -> Callable[[int], list[Push]]:
        """A function that makes the messages to a shard. early: those that were sent already, which are among them.

        dense: uncompressed, with all that was held back before.
        """
        sent = {(m.shard, m.part): m for m in early}

        def messages(k: int) -> list[Push]:
            committing = {**self._told(k, done), "grants": tuple(grants), "commit": True}
            head = {**ids(k), "layout_hash": self._layout.hash, "slot": slot, "version": version(k)}
            if k in self._shared:
                return [Push(**head, shared=True, **committing)]
            grads = self._own(k, done.grads)
            cuts = self._cuts(self._flushed(k, grads) if dense else grads)
            found = [
                sent.get((k, i)) or self._message(ids(k), slot, version(k), (i, len(cuts)), k, cut, dense=dense)
                for i, cut in enumerate(cuts)
                if i
            ]
            last = self._message(ids(k), slot, version(k), (0, len(cuts)), k, cuts[0], committing, dense=dense)
            return [*found, last]  # backward begins at the end of a model, so its beginning comes last

        return messages

    def _told(self, k: int, done: Gradient) -> dict[str, Any]:
        stats, counters = self._slices["stats"][k], self._slices["counters"][k]
        return {
            "num_samples": done.num_samples,
            "presence": done.presence,
            "loss": done.loss if math.isfinite(done.loss) else None,
            "stats": done.stats[stats.start : stats.stop],
            "counters": done.counters[counters.start : counters.stop],
        }

    def _message(
        self,
        ids: dict[str, Any],
        slot: int,
        version: int,
        part: tuple[int, int],
        k: int,
        cut: tuple[int, tuple[Array, ...]],
        more: dict[str, Any] | None = None,
        *,
        dense: bool = False,
    ) -> Push:
        offset, pieces = cut
        content: dict[str, Any] = {"grads": pieces}
        if self._compression.codec != "none" and not dense:
            content = self._packed(self._slices["params"][k].start + offset, pieces)
        return Push(
            **ids, layout_hash=self._layout.hash, slot=slot, version=version, part=part[0], parts=part[1],
            offset=offset, **content, **(more or {}),
        )  # fmt: skip

    def _packed(self, start: int, pieces: tuple[Array, ...]) -> dict[str, Any]:
        (values,) = pieces
        compression = self._compression
        packed = encode(compression, values) if self._feedback is None else self._feedback.encode(start, values)
        return {"codec": compression.codec, "packed": packed, "count": values.size}

    def _flushed(self, k: int, grads: Array) -> Array:
        """Shard k's slice of a gradient, with what was held back of it."""
        return grads if self._feedback is None else self._feedback.flush(self._slices["params"][k].start, grads)

    def _own(self, k: int, grads: Array) -> Array:
        own = self._slices["params"][k]
        return grads[own.start : own.stop]

    def _cuts(self, grads: Array) -> list[tuple[int, tuple[Array, ...]]]:
        """A shard's slice in parts."""
        if self._compression.codec == "none":
            return list(wire.split(grads))
        return [(at, (grads[at : at + MAX_ELEMENTS],)) for at in range(0, max(1, grads.size), MAX_ELEMENTS)]

    def _early(self, k: int) -> list[tuple[int, int, int, int]]:
        """(shard, part, start, stop) of the parts that may leave early: all but the one that commits."""
        if k in self._shared:
            return []
        own = self._slices["params"][k]
        untouched = np.empty(own.size, np.float32)  # its places are wanted, not its values
        starts = [own.start + offset for offset, _ in self._cuts(untouched)]
        return [(k, i, start, stop) for i, (start, stop) in enumerate(pairwise([*starts, own.stop])) if i]


def take(msg: Ack | Params, memory: Memory, slices: Mapping[str, Slice], *, shared: bool = False) -> int:
    """Put one part of a shard's answer in its place in `memory`; how many parameters it brought.

    slices: the shard's, by section. shared: `memory` is shared with it. What does not fit brings nothing, and the
    parameters are then not complete.
    """
    own = slices["params"]
    for values, flat, part in ((msg.stats, memory.stats, "stats"), (msg.counters, memory.counters, "counters")):
        if values.size and values.size == slices[part].size:
            flat[slices[part].start : slices[part].stop] = values
    if msg.shared:
        return own.size if shared else 0  # the shard has put them there
    place = memory.params[own.start : own.stop][msg.offset :]
    if isinstance(msg, Ack) and msg.codec:
        return _take_difference(msg, place)
    if sum(values.size for values in msg.params) > place.size:
        return 0
    at = 0
    for values in msg.params:
        place[at : at + values.size] = values
        at += values.size
    return at


def _take_difference(msg: Ack, place: Array) -> int:
    if msg.count > place.size:
        return 0
    try:
        decode_onto(msg.codec, msg.packed, place[: msg.count])
    except CodecError:
        return 0
    return msg.count
