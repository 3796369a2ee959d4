"""The contract between a core and whatever drives it.

A core is a synchronous object: an event goes in together with the local time, effects come out. It decides
everything and does nothing; the loop over ZeroMQ (`zasgd.net.loop`) and the simulator (`zasgd.sim.world`)
drive the same classes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from zasgd.core.messages import Err, Message
from zasgd.core.region import RegionPlan

PeerId = Hashable
"""Where a message came from and how to answer it: opaque to every core."""

BROKER: PeerId = "broker"
"""The peer name by which workers, shards and the evaluator address their broker."""


OWN_STALL_S = 1.0
"""A timer this late means that the process itself was stopped or starved: its peers were not silent."""


def shard_peer(shard: int) -> PeerId:
    """The peer name by which a worker or evaluator addresses shard number `shard`."""
    return ("shard", shard)


class InvariantError(Exception):
    """A core's state contradicts itself: our bug, never a peer's."""


def require(condition: object, what: str) -> None:
    """Raise InvariantError(what) unless condition holds; unlike `assert` it survives `python -O`."""
    if not condition:
        raise InvariantError(what)


class Refusal(Exception):
    """A request that a core answers with ERR; raised and caught inside that core only.

    code: one of the words in docs/wire.md. retry_after_ms: when trying again can help, None when it cannot.
    """

    def __init__(self, code: str, text: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.retry_after_ms = retry_after_ms

    def answer(self, msg: Message, **ids: int) -> Err:
        """The ERR that answers `msg`; ids: further F0 fields."""
        return Err(
            worker=msg.worker, incarnation=msg.incarnation, seq=msg.seq, inline=msg.inline, code=self.code,
            text=str(self)[:512], retryable=self.retry_after_ms is not None,
            retry_after_ms=self.retry_after_ms or 0, **ids,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to `peer`; it may be lost, the core retries what matters."""

    peer: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Dial:
    """Open the link to `peer` at `endpoint`; the host `*` in it stands for the broker's own host."""

    peer: PeerId
    endpoint: str


@dataclass(frozen=True, slots=True)
class Compute:
    """Run `task` off the loop; Computed(task, result) comes back through `on_done`. Workers and evaluators only."""

    task: Any


@dataclass(frozen=True, slots=True)
class Computed:
    """What became of a Compute effect, whose `task` this is, or of a Share effect, which is itself the task."""

    task: Any
    result: Any


@dataclass(frozen=True, slots=True)
class Save:
    """Write `content` under the name `what` in the run folder, atomically."""

    what: str
    content: Any


@dataclass(frozen=True, slots=True)
class Record:
    """Append `row`, of plain values, to this process's record of the run."""

    row: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """Make (`create`) or open the region of shared memory `name`.

    Computed(this effect, Region or SharedMemoryError) comes back through `on_done`, at once.
    """

    name: str
    plan: RegionPlan
    create: bool


@dataclass(frozen=True, slots=True)
class Unshare:
    """This node will not use the region `name` again."""

    name: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something a person or the event log wants to know: past tense, with its facts."""

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stop:
    """This node is finished: close sockets after flushing, exit with `code`."""

    reason: str
    code: int = 0


Effect = Send | Dial | Compute | Share | Unshare | Save | Record | Note | Stop


class Node(Protocol):
    """What the loop and the simulator drive."""

    def on_message(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        """Take one decoded message."""
        ...

    def on_done(self, now: float, done: Computed) -> list[Effect]:
        """Take the result of slow work that a Compute effect asked for."""
        ...

    def on_timer(self, now: float) -> list[Effect]:
        """Called at or after `next_deadline()`."""
        ...

    def next_deadline(self) -> float:
        """The local time at which `on_timer` wants to run; math.inf when nothing is pending."""
        ...

    def validate(self) -> None:
        """Raise InvariantError unless every invariant holds."""
        ...


class Deadlines:
    """Named points of local time; a core's timers. Setting a name again moves it."""

    def __init__(self) -> None:
        self._at: dict[Hashable, float] = {}

    def set(self, name: Hashable, at: float) -> None:
        """Arm or move the timer `name`."""
        self._at[name] = at

    def clear(self, name: Hashable) -> None:
        """Disarm the timer `name`; not an error when it is not armed."""
        self._at.pop(name, None)

    def clear_all(self) -> None:
        """Disarm every timer."""
        self._at.clear()

    def __contains__(self, name: Hashable) -> bool:
        return name in self._at

    def __len__(self) -> int:
        return len(self._at)

    def next(self) -> float:
        """The earliest deadline, math.inf when none is armed."""
        return min(self._at.values(), default=math.inf)

    def pop_due(self, now: float) -> list[Hashable]:
        """Disarm and return the names due at `now`, earliest first."""
        due = sorted((at, i, name) for i, (name, at) in enumerate(self._at.items()) if at <= now)
        for _, _, name in due:
            del self._at[name]
        return [name for _, _, name in due]
