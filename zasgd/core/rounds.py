"""Which synchronous pushes make a round, in the order in which shard 0 decided.

Shard 0 names the members of each round, and who came too late; the broker passes that on, and every other shard
carries out the same decisions in the same order when it has the pushes. Never applies anything and never refuses:
`shard.Shard` does both.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Container
from dataclasses import dataclass

from zasgd.core.messages import Decision, PushId
from zasgd.core.node import PeerId, require
from zasgd.core.parameters import Committed

MAX_SENT_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Waiting:
    """A whole push that has come in and is not decided yet, and where its answer goes."""

    peer: PeerId
    committed: Committed

    @property
    def id(self) -> PushId:
        """Its name in a decision."""
        return PushId(self.committed.incarnation, self.committed.push.seq)


class Rounds:
    """The pushes that wait at one shard, and the decisions that it made or was told.

    arrived: in order of arrival. num_known: decisions that this shard has, without a gap.
    """

    def __init__(self) -> None:
        self.arrived: OrderedDict[PushId, Waiting] = OrderedDict()
        self.num_known = 0
        self._open: deque[Decision] = deque()
        self._late: set[PushId] = set()
        self._unconfirmed: OrderedDict[int, Decision] = OrderedDict()

    # ---- shard 0 ----------------------------------------------------------------------------------

    def decide(self, decision: Decision) -> int:
        """Take a decision of this shard; its number. Kept until the broker confirms it."""
        self.num_known += 1
        self._open.append(decision)
        self._unconfirmed[self.num_known] = decision
        return self.num_known

    def confirmed(self, number: int) -> None:
        """The broker has all decisions up to `number`."""
        while self._unconfirmed and next(iter(self._unconfirmed)) <= number:
            self._unconfirmed.popitem(last=False)

    def unconfirmed(self) -> tuple[int, tuple[Decision, ...]]:
        """Number of the first decision that the broker has not confirmed, and those from there on."""
        first = next(iter(self._unconfirmed), self.num_known + 1)
        return first, tuple(self._unconfirmed.values())[:MAX_SENT_AT_ONCE]

    # ---- the other shards -------------------------------------------------------------------------

    def told(self, base: int, decisions: tuple[Decision, ...]) -> None:
        """Decisions `base`, `base + 1`, ... of shard 0; what is known or leaves a gap changes nothing."""
        fresh = decisions[max(0, self.num_known + 1 - base) :]
        if base <= self.num_known + 1:
            self._open.extend(fresh)
            self.num_known += len(fresh)

    # ---- carrying out -----------------------------------------------------------------------------

    def pop_late(self, alive: Container[int]) -> list[Waiting]:
        """Pushes here that were decided to be late, in the decisions that are next. alive: incarnations."""
        while self._open and not self._open[0].members:
            self._late.update(late for late in self._open.popleft().late if late.incarnation in alive)
        return [self.arrived.pop(late) for late in self._pop_here()]

    def _pop_here(self) -> list[PushId]:
        here = [late for late in self._late if late in self.arrived]
        self._late.difference_update(here)
        return sorted(here)

    def pop_round(self, never_comes: Callable[[PushId], bool]) -> list[Waiting] | None:
        """The members of the next round once all that can come are here; None while there is no such round."""
        if not self._open or not self._open[0].members:
            return None
        members = self._open[0].members
        if any(m not in self.arrived and not never_comes(m) for m in members):
            return None
        self._open.popleft()
        return [self.arrived.pop(m) for m in members if m in self.arrived]

    def forget(self, incarnation: int) -> None:
        """That life is over: nothing of it waits any more."""
        for push in [p for p in self.arrived if p.incarnation == incarnation]:
            del self.arrived[push]
        self._late = {late for late in self._late if late.incarnation != incarnation}

    def validate(self) -> None:
        """Raise InvariantError unless at most one push of each incarnation waits."""
        lives = [p.incarnation for p in self.arrived]
        require(len(lives) == len(set(lives)), "two pushes of one worker wait for a round")
