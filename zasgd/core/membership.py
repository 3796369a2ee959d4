"""Who belongs to the run: ids, incarnations, leases, and the legal course of one life.

Decides who is alive and who must be fenced; never sends a message and never touches the ledger: the broker does
both when a transition tells it to. The course of a member's life is the table TRANSITIONS; an event without an
entry is our bug and raises InvariantError.
"""

from __future__ import annotations

import enum
import statistics
from dataclasses import dataclass, field
from typing import Any

from zasgd.core.messages import Applied, Grant
from zasgd.core.node import PeerId, require


class State(enum.Enum):
    """Where in its life a member is."""

    ADMITTING = "admitting"
    """The shards are being told to serve it; it has no answer to its HELLO yet."""
    LIVE = "live"
    """Holds a lease and, as a worker, may hold grants."""
    FENCING = "fencing"
    """Its life is over; the shards are being asked what they applied of it."""
    GONE = "gone"
    """Every shard has answered; nothing of it is left in any table."""


class Event(enum.Enum):
    """What can happen to a member."""

    ADMITTED = "admitted by every shard"
    LEFT = "left"
    LEASE_RAN_OUT = "lease ran out"
    HUNG = "made no progress"
    EXPELLED = "process ended"
    SUPERSEDED = "superseded"
    FENCED = "fenced by every shard"


_ENDS = (Event.LEFT, Event.LEASE_RAN_OUT, Event.HUNG, Event.EXPELLED, Event.SUPERSEDED)
TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.ADMITTING, Event.ADMITTED): State.LIVE,
    **{(State.ADMITTING, end): State.FENCING for end in _ENDS},
    **{(State.LIVE, end): State.FENCING for end in _ENDS},
    (State.FENCING, Event.FENCED): State.GONE,
}


@dataclass(slots=True)
class Member:
    """One incarnation.

    number: worker ordinal, shard number, or 0 for the evaluator. lease_until, progress_at, joined_at: seconds of
    the broker's monotonic clock. waiting_for: shards whose ADMITTED or FENCED has not come. issued: grants issued to
    it that it has not shown to have received, of which the first has number `issued_base`. num_refused: refusals
    that it reported and that are settled.
    """

    role: str
    number: int
    incarnation: int
    token: bytes
    peer: PeerId
    name: str
    host: str
    pid: int
    joined_at: float
    lease_until: float
    state: State = State.ADMITTING
    end: Event | None = None
    renewals: int = 0
    steps: int = 0
    progress_at: float = 0.0
    phase: str = ""
    drain: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    waiting_for: set[int] = field(default_factory=set)
    applied: dict[int, tuple[Applied, ...]] = field(default_factory=dict)
    issued: list[Grant] = field(default_factory=list)
    issued_base: int = 0
    num_refused: int = 0

    @property
    def num_issued(self) -> int:
        """Grants ever issued to this incarnation."""
        return self.issued_base + len(self.issued)


class Membership:
    """Every member that is not gone, and the ids given so far."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.members: dict[int, Member] = {}
        self.num_incarnations = 0
        self.num_worker_ids = 0
        self._by_token: dict[bytes, int] = {}
        self._ids_by_name: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.members)

    # ---- reading ----------------------------------------------------------------------------------

    def get(self, incarnation: int) -> Member | None:
        """The member of this incarnation unless it is gone."""
        return self.members.get(incarnation)

    def by_token(self, token: bytes) -> Member | None:
        """The member whose HELLO carried `token`."""
        return self.members.get(self._by_token.get(token, 0))

    def of(self, role: str, *states: State) -> list[Member]:
        """Members of a role, oldest first, in any of `states` (default LIVE)."""
        wanted = states or (State.LIVE,)
        return [m for m in self.members.values() if m.role == role and m.state in wanted]

    def find(self, target: str) -> Member | None:
        """The live worker with this name or id."""
        live = self.of("worker")
        return next((m for m in live if m.name == target), None) or next(
            (m for m in live if str(m.number) == target), None
        )

    def by_process(self, host: str, pid: int) -> list[Member]:
        """Members that run in this process and have not ended."""
        return [m for m in self.members.values() if (m.host, m.pid) == (host, pid) and m.state is not State.FENCING]

    # ---- life -------------------------------------------------------------------------------------

    def join(
        self, now: float, role: str, number: int, token: bytes, peer: PeerId, name: str, host: str, pid: int
    ) -> Member:
        """A new incarnation in state ADMITTING, with a full lease from `now`."""
        self.num_incarnations += 1
        member = Member(
            role,
            number,
            self.num_incarnations,
            token,
            peer,
            name,
            host,
            pid,
            now,
            now + self.lease_s,
            progress_at=now,
        )
        self.members[member.incarnation] = member
        self._by_token[token] = member.incarnation
        return member

    def worker_id(self, name: str) -> int:
        """The stable ordinal for `name`; a fresh one for an unnamed or unknown worker."""
        if name and name in self._ids_by_name:
            return self._ids_by_name[name]
        self.num_worker_ids += 1
        if name:
            self._ids_by_name[name] = self.num_worker_ids - 1
        return self.num_worker_ids - 1

    def step(self, member: Member, event: Event) -> State:
        """Move a member along the table; a member that is gone is forgotten."""
        state = TRANSITIONS.get((member.state, event))
        require(state is not None, f"no transition from {member.state} on {event}")
        member.state = state  # type: ignore[assignment]
        if event in _ENDS:
            member.end = event
        if member.state is State.GONE:
            del self.members[member.incarnation]
            if self._by_token.get(member.token) == member.incarnation:
                del self._by_token[member.token]
        return member.state

    def renew(self, now: float, member: Member, steps: int, phase: str) -> None:
        """Extend the lease and take note of progress."""
        member.lease_until = now + self.lease_s
        if steps != member.steps or phase != member.phase or phase == "idle":
            member.progress_at = now
        member.steps, member.phase = steps, phase

    def extend_all(self, now: float, by_s: float) -> None:
        """The broker itself stood still for `by_s` seconds or more: nobody could renew meanwhile."""
        for member in self.members.values():
            # by_s counts from a deadline, which may be the very end of this lease: so a whole one from now.
            member.lease_until = max(member.lease_until + by_s, now + self.lease_s)
            member.progress_at = min(member.progress_at + by_s, now)

    def due(self, now: float) -> list[tuple[Member, Event]]:
        """Members whose lease has run out or that renew without making progress."""
        hung_after_s = self._hung_after_s()
        found = []
        for member in self.members.values():
            if member.state is State.FENCING:
                continue
            if member.lease_until <= now:
                found.append((member, Event.LEASE_RAN_OUT))
            elif member.role == "worker" and member.state is State.LIVE and now - member.progress_at > hung_after_s:
                found.append((member, Event.HUNG))
        return found

    def next_due(self) -> float:
        """A local time before which `due` finds nothing."""
        hung_after_s = self._hung_after_s()
        times = [
            min(m.lease_until, m.progress_at + hung_after_s + 1e-6 if m.role == "worker" else m.lease_until)
            for m in self.members.values()
            if m.state is not State.FENCING
        ]
        return min(times, default=float("inf"))

    def _hung_after_s(self) -> float:
        steps = [m.facts["step_s"] for m in self.members.values() if m.facts.get("step_s")]
        median = statistics.median(steps) if steps else 0.0
        return max(6 * self.lease_s, 10 * median)

    def validate(self) -> None:
        """Ids are unique, the token table points at members, the fenced wait for somebody. Raises InvariantError."""
        live = [(m.role, m.number) for m in self.members.values() if m.state is State.LIVE]
        require(len(live) == len(set(live)), "two live incarnations share an id")
        for token, incarnation in self._by_token.items():
            member = self.members.get(incarnation)
            require(member is not None and member.token == token, "the token table points at nobody")
        for member in self.members.values():
            waits = member.state in (State.ADMITTING, State.FENCING) and member.role == "worker"
            require(bool(member.waiting_for) <= waits, f"incarnation {member.incarnation} waits in {member.state}")
            require(member.incarnation <= self.num_incarnations, "an incarnation was never given")
