"""What goes wrong and what the network costs, as frozen data on logical time.

Decides the fate of each message and when processes die, freeze and come back. All chance comes from the one
generator handed in by the world, is seeded once and never again for a message.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from zasgd.core.messages import Kind

DUPLICATE_AFTER_S = 2.0
"""A random duplicate comes up to this much after the first copy: in the midst of the next exchange."""

BULK = frozenset((Kind.INIT, Kind.PARAMS, Kind.PUSH, Kind.ACK))
"""What carries gradients or parameters; everything else is a few hundred bytes."""

_NO_FAULT: tuple[bool, float, tuple[float, ...]] = (False, 0.0, ())


@dataclass(frozen=True, slots=True)
class Link:
    """A connection without faults: first in, first out, each message `latency_s` plus up to `jitter_s`.

    bytes_per_s: of a server's line in each direction, which all that talk to it share.
    """

    latency_s: float = 0.002
    jitter_s: float = 0.003
    bytes_per_s: float = math.inf

    def round_trip_s(self, num_bytes: float) -> float:
        """Expected seconds of a message of `num_bytes` and an answer of the same size over an idle line."""
        return 2.0 * (self.latency_s + 0.5 * self.jitter_s + num_bytes / self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Kill:
    """`kill -9` of `name`: at `at_s`, after it handled `after_events`, or after it sent `after_sends`.

    Counts run over all lives of the name. After `after_events` none of the last event's effects are carried
    out; after `after_sends` the rest of what it was about to send is lost: so a worker dies between its pushes
    to two shards. What it already sent still arrives, unless `cuts_line`.
    It comes back as a new process after `restart_after_s`, or never.
    """

    name: str
    at_s: float | None = None
    after_events: int | None = None
    after_sends: int | None = None
    restart_after_s: float | None = None
    cuts_line: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """SIGSTOP of process `name` at `at_s`, SIGCONT `for_s` later; what arrives meanwhile waits in order."""

    name: str
    at_s: float
    for_s: float


@dataclass(frozen=True, slots=True)
class Tamper:
    """One chosen fault: the `nth` to `nth + times - 1` message of `kind` (from `sender`, "" for anyone).

    It is lost, or arrives `late_s` later; with `copies` it arrives so many times more, each `copy_after_s` later.
    """

    kind: Kind
    nth: int = 1
    times: int = 1
    sender: str = ""
    receiver: str = ""
    lose: bool = False
    late_s: float = 0.0
    copies: int = 0
    copy_after_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities per message, and the planned faults.

    drop: it is lost. duplicate: it arrives twice, each copy with its own delay. delay: it is late by up to
    `delay_s` seconds. stall: it is late by `stall_s` (long enough to outlive a lease, or a missing fence goes
    unnoticed). The probabilities hold from `from_s` until `until_s` of virtual time.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    delay_s: float = 1.0
    stall: float = 0.0
    stall_s: float = 30.0
    from_s: float = 0.0
    until_s: float = float("inf")
    kills: tuple[Kill, ...] = ()
    pauses: tuple[Pause, ...] = ()
    tampers: tuple[Tamper, ...] = ()


def scattered_kills(
    names: Sequence[str],
    count: int,
    *,
    start_s: float,
    stop_s: float,
    restart_s: tuple[float, float],
    seed: int,
) -> tuple[Kill, ...]:
    """`count` kills among `names` at uniform times, each restarted after a uniform delay; none hits the dead."""
    draw = random.Random(seed)
    back_at = dict.fromkeys(names, 0.0)
    kills = []
    for at in sorted(draw.uniform(start_s, stop_s) for _ in range(count)):
        name = draw.choice([n for n in names if back_at[n] < at] or list(names))
        after_s = draw.uniform(*restart_s)
        back_at[name] = at + after_s
        kills.append(Kill(name, at_s=at, restart_after_s=after_s, cuts_line=draw.random() < 0.5))
    return tuple(kills)


class Network:
    """When each message arrives, how often, or that it never does.

    Messages of one connection keep their order (TCP) unless a fault delays one: a delayed one is overtaken.

    A server's line carries its BULK messages one after another, in the order in which they are sent, those that come
    to it apart from those that leave it (full duplex): each holds the line for its bytes / `bytes_per_s` and then
    takes the latency. Any other message pays the latency alone: between connections TCP shares a line, so a renewal
    does not wait for the gradients of thirty workers. Whatever is lost, late or repeated by a fault has held the line
    once. Nobody but a server has a line that could be full.
    """

    def __init__(self, draw: random.Random, link: Link, faults: Faults) -> None:
        self._draw = draw
        self._link = link
        self._faults = faults
        self._quiet = not (faults.drop or faults.duplicate or faults.delay or faults.stall)
        self._limited = link.bytes_per_s < math.inf
        self._seen: Counter[int] = Counter()
        self._latest: dict[tuple[str, str], float] = {}
        self._downlinks: dict[str, float] = {}
        self._uplinks: dict[str, float] = {}

    def serve(self, name: str) -> None:
        """`name` is a server: all its peers share its line."""
        self._downlinks[name] = self._uplinks[name] = 0.0

    def arrivals(self, now: float, sender: str, receiver: str, kind: Kind, num_bytes: int = 0) -> list[float]:
        """Virtual times at which a message of `num_bytes` sent `now` is delivered; empty when it is lost."""
        lose, late_s, again_s = self._chance(now)
        for i, tamper in enumerate(self._faults.tampers):
            if self._hits(i, tamper, sender, receiver, kind):
                lose, late_s = lose or tamper.lose, late_s + tamper.late_s
                again_s = (*again_s, *(tamper.copy_after_s * (n + 1) for n in range(tamper.copies)))
        left_at = self._carried_at(now, sender, receiver, num_bytes) if self._limited and kind in BULK else now
        first = self._in_order(left_at, sender, receiver, late_s)
        if not again_s:
            return [] if lose else [first]
        again = [first + after_s for after_s in again_s]
        return again if lose else [first, *again]

    def _carried_at(self, now: float, sender: str, receiver: str, num_bytes: int) -> float:
        """When the last byte has passed the line of the server that sends or receives it."""
        took_s = num_bytes / self._link.bytes_per_s
        for line, name in ((self._uplinks, sender), (self._downlinks, receiver)):
            if name in line:
                now = line[name] = max(now, line[name]) + took_s
        return now

    def _chance(self, now: float) -> tuple[bool, float, tuple[float, ...]]:
        """Whether it is lost, how late it is, and how much later each copy comes."""
        draw, f = self._draw.random, self._faults
        # Drawn even where nothing can go wrong, so that the jitter of a run is the same with a fault and without.
        lost, twice, stalled, delayed, by, after = draw(), draw(), draw(), draw(), draw(), draw()
        if self._quiet or not f.from_s <= now < f.until_s:
            return _NO_FAULT
        late_s = f.stall_s if stalled < f.stall else 0.0
        if delayed < f.delay:
            late_s += by * f.delay_s
        return lost < f.drop, late_s, (DUPLICATE_AFTER_S * after,) if twice < f.duplicate else ()

    def _hits(self, index: int, tamper: Tamper, sender: str, receiver: str, kind: Kind) -> bool:
        if kind != tamper.kind or tamper.sender not in ("", sender) or tamper.receiver not in ("", receiver):
            return False
        self._seen[index] += 1
        return tamper.nth <= self._seen[index] < tamper.nth + tamper.times

    def _in_order(self, left_at: float, sender: str, receiver: str, late_s: float) -> float:
        at = left_at + self._link.latency_s + self._draw.random() * self._link.jitter_s
        if late_s:
            return at + late_s
        line = sender, receiver
        at = self._latest[line] = max(at, self._latest.get(line, 0.0))
        return at
