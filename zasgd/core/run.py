"""What the broker knows of its run: the state that admission, ledger-keeping and ending share. Decides nothing."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zasgd.core.layout import Layout
from zasgd.core.ledger import Ledger
from zasgd.core.membership import Member, Membership, State
from zasgd.core.messages import Decision, Message
from zasgd.core.node import Deadlines, Refusal, require
from zasgd.core.tally import LossMeter, RateMeter


class RunPhase(enum.Enum):
    """Where a run is."""

    WAITING = "waiting for servers"
    SEEDING = "waiting for parameters"
    TRAINING = "training"
    FINISHING = "finishing"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """What the broker must know of a run.

    run: random 32-bit id. recipe: JSON text that workers get. shard_config: JSON text that shards get. num_groups:
    parameter groups for which it holds hyper-parameters. data_port: where the relay listens. evaluate_every: epochs
    between evaluations. wants_evaluator: wait for one at the end. push_every: batches per push.
    """

    run: int
    recipe: str
    num_shards: int
    epochs: int
    batch_size: int
    shard_config: str
    num_groups: int = 1
    data_port: int = 0
    lease_s: float = 10.0
    window_bytes: int = 1 << 30
    evaluate_every: int = 1
    wants_evaluator: bool = False
    push_every: int = 1


class Decisions:
    """A list of shard 0's decisions, numbered from 1, of which the beginning may be forgotten."""

    def __init__(self) -> None:
        self._kept: list[Decision] = []
        self._forgotten = 0

    @property
    def count(self) -> int:
        """How many were ever taken."""
        return self._forgotten + len(self._kept)

    def take(self, base: int, decisions: Sequence[Decision]) -> tuple[Decision, ...]:
        """Append those that follow without a gap; returns them."""
        fresh = tuple(decisions[max(0, self.count + 1 - base) :]) if base <= self.count + 1 else ()
        self._kept.extend(fresh)
        return fresh

    def after(self, number: int, at_most: int) -> tuple[Decision, ...]:
        """Those behind `number`."""
        begin = max(0, number - self._forgotten)
        return tuple(self._kept[begin : begin + at_most])

    def forget(self, number: int) -> None:
        """Nobody will ask for those up to `number` any more."""
        gone = max(0, min(number, self.count) - self._forgotten)
        del self._kept[:gone]
        self._forgotten += gone


class Run:
    """One training job as its broker sees it.

    open: every shard holds what the seeder sent. seeder: the incarnation that seeds or seeded, 0 for none. outcome:
    `completed`, `stopped`, `interrupted` or `failed`, empty before. ends: how many lives ended in which way. scores:
    of the last evaluation that succeeded; of the final parameters only if scores_are_final. evaluation_error: of the
    last evaluation, if it failed. num_busy: workers that hold grants, as message number `live` told the shards.
    decisions: of shard 0 about rounds.
    """

    def __init__(self, now: float, config: BrokerConfig) -> None:
        self.config = config
        self.id = config.run
        self.began_at = now
        self.phase = RunPhase.WAITING
        self.timers = Deadlines()
        self.members = Membership(config.lease_s)
        self.layout: Layout | None = None
        self.num_samples = 0
        self.books: Ledger | None = None
        self.open = False
        self.seeder = 0
        self.live = 0
        self.num_busy = 0
        self.decisions = Decisions()
        self.outcome = ""
        self.exit_code = 0
        self.scores: dict[str, Any] = {}
        self.scores_are_final = False
        self.evaluation_error = ""
        self.ends: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.loss = LossMeter(1.0)
        self.rate = RateMeter()
        self.rates: dict[int, RateMeter] = {}
        self.shard_facts: dict[int, dict[str, Any]] = {}

    def begin(self, layout: Layout, num_samples: int) -> None:
        """The first worker has shown what is trained on how many samples."""
        self.layout, self.num_samples = layout, num_samples
        self.books = Ledger(num_samples, self.config.batch_size, self.config.epochs)
        self.loss = LossMeter(num_samples / 2)

    @property
    def ledger(self) -> Ledger:
        """The ledger, which exists once the run has begun."""
        require(self.books is not None, "no ledger yet")
        return self.books  # type: ignore[return-value]

    @property
    def over(self) -> bool:
        """Nobody is expected to do anything but leave."""
        return self.phase in (RunPhase.STOPPING, RunPhase.STOPPED)

    @property
    def settled(self) -> int:
        """Samples in a final state."""
        return self.books.settled if self.books else 0

    @property
    def lags(self) -> Counter[int]:
        """Lag -> pushes, over all shards."""
        total: Counter[int] = Counter()
        for facts in self.shard_facts.values():
            total.update(facts.get("lags", Counter()))
        return total

    def servers(self) -> list[Member]:
        """Members that hold a shard, ready or not."""
        return self.members.of("server", State.ADMITTING, State.LIVE)

    def speaker(self, msg: Message) -> Member:
        """The server whose shard number `msg` bears; raises Refusal when there is none."""
        for member in self.servers():
            if member.number == msg.shard:
                return member
        raise Refusal("FENCED", f"no shard {msg.shard} belongs to this run")


def who(member: Member) -> dict[str, Any]:
    """How a worker is named in events and reports."""
    return {
        "worker": member.number,
        "name": member.name,
        "incarnation": member.incarnation,
        "host": member.host,
        "pid": member.pid,
    }
