"""The simulator itself on trial: bugs planted in the real cores, each of which must be found.

Every story is first told with the healthy cores, which must come through it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zasgd.core import broker
from zasgd.core.broker import Broker
from zasgd.core.messages import Ack, Admit, Fence, Fenced, Kind, Message, Push
from zasgd.core.node import BROKER, Effect, InvariantError, PeerId, Send
from zasgd.core.parameters import Committed
from zasgd.core.rounds import Waiting
from zasgd.core.shard import Shard
from zasgd.core.snapshot import Client, SeqWindow, Snapshot
from zasgd.core.worker import Worker
from zasgd.sim.cluster import Cluster, Plan
from zasgd.sim.faults import Faults, Kill, Pause, Tamper
from zasgd.sim.world import Violation

PLAN = Plan(num_workers=3, num_samples=128, batch_size=8, epochs=4, step_s=1.0)
REPEATS = Faults(drop=0.05, duplicate=0.2, until_s=60.0)


def tell(plan: Plan, faults: Faults, seed: int = 1) -> Cluster:
    """A whole run and its books; raises InvariantError when something is wrong with either."""
    cluster = Cluster(plan, seed, faults=faults)
    cluster.run(1000.0)
    cluster.settle()
    return cluster


# ---- no dedupe ---------------------------------------------------------------------------------------


class ForgetfulWindow(SeqWindow):
    """Takes every seq for a new one."""

    def state(self, seq: int) -> str:
        return "new"


class NoDedupe(Shard):
    """Keeps no record of what it applied, and takes a push for one on whatever its slot holds by now."""

    def _admit(self, now: float, msg: Admit) -> list[Effect]:
        effects = super()._admit(now, msg)
        client = self.clients.get(msg.incarnation)
        if client is not None and type(client.window) is SeqWindow:
            client.window = ForgetfulWindow()
        return effects

    def _checked(self, client: Client, push: Push) -> Snapshot:
        held = client.snapshots.get(push.slot)
        return super()._checked(client, push if held is None else replace(push, version=held.version))

    def validate(self) -> None:
        """Says nothing: the observer must find it alone."""


def test_a_shard_without_dedupe_is_found() -> None:
    tell(PLAN, REPEATS)
    with pytest.raises(Violation, match=r"applied Unit\(.*\) twice"):
        tell(replace(PLAN, shard=NoDedupe), REPEATS)


# ---- no fencing --------------------------------------------------------------------------------------

ZOMBIE = Faults(
    tampers=(Tamper(Kind.PUSH, nth=7, times=99, sender="worker-0", late_s=20.0),),
    kills=(Kill("worker-0", at_s=9.0),),
)
"""A worker dies with pushes on the wire; they arrive when its batches have long gone to others."""


class NoFencing(Shard):
    """Answers a FENCE and goes on serving."""

    def _fence(self, now: float, msg: Fence) -> list[Effect]:
        client = self.clients.get(msg.incarnation) or Client(msg.worker, msg.incarnation, 1)
        told = Fenced(
            **self._ids(msg), high=client.window.high, bitmap=client.window.bitmap, pushes=tuple(client.pushes)
        )
        return [Send(BROKER, told)]


def test_a_shard_without_fencing_is_found() -> None:
    tell(PLAN, ZOMBIE)
    with pytest.raises(Violation, match="after it was fenced"):
        tell(replace(PLAN, shard=NoFencing), ZOMBIE)


# ---- acknowledge before apply ------------------------------------------------------------------------


class HastyShard(Shard):
    """Acknowledges a push when it arrives and applies it when its timer next fires."""

    put_off: Committed | None = None

    def _apply(self, now: float, client: Client, waiting: Waiting) -> list[Effect]:
        self.put_off = waiting.committed
        sent = replace(self._values.snapshot(self._values.params.copy()), version=self.version + 1)
        return self._acknowledge(now, client, waiting, sent, 0)

    def on_timer(self, now: float) -> list[Effect]:
        if self.put_off is not None:
            self._values.apply(self.put_off)
            self.put_off = None
        return super().on_timer(now)


def test_a_shard_that_acknowledges_before_it_applies_is_found() -> None:
    tell(PLAN, Faults())
    with pytest.raises(Violation, match="before it applied it"):
        tell(replace(PLAN, shard=HastyShard), Faults())


# ---- grants ------------------------------------------------------------------------------------------

DEATH = Faults(kills=(Kill("worker-0", at_s=9.3),))


class NeverReissues(Broker):
    """Takes the answers to its FENCE and leaves the dead worker's batches where they are."""

    def _fenced(self, now: float, peer: PeerId, msg: Fenced) -> list[Effect]:
        return []


class LosesReturns(Broker):
    """Settles a dead worker's grants but forgets to put the unapplied ones back."""

    def _settle_fenced(self, member: Any) -> None:
        ledger = self.run.books
        if ledger is not None:
            for grant in ledger.held_by(member.incarnation):
                ledger._release(member.incarnation, grant)


def test_a_broker_that_never_issues_a_grant_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tell(PLAN, DEATH)
    with pytest.raises(InvariantError, match=r"a batch is missing|incomplete ledger"):
        tell(replace(PLAN, broker=LosesReturns), DEATH)
    monkeypatch.setitem(broker._SERVED, Fenced, NeverReissues._fenced)
    with pytest.raises(InvariantError, match="incomplete ledger"):
        tell(replace(PLAN, broker=NeverReissues), DEATH)


class Impatient(Broker):
    """Takes the first answer to a FENCE for all of them."""

    def _fenced(self, now: float, peer: PeerId, msg: Fenced) -> list[Effect]:
        member = self.run.members.get(msg.incarnation)
        if member is not None and msg.shard in member.waiting_for:
            member.waiting_for = {msg.shard}
        return super()._fenced(now, peer, msg)


def test_a_broker_that_issues_grants_again_before_every_shard_has_answered_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow_fence = replace(DEATH, tampers=(Tamper(Kind.FENCE, receiver="shard-1", times=5, lose=True),))
    tell(PLAN, slow_fence)
    monkeypatch.setitem(broker._SERVED, Fenced, Impatient._fenced)
    with pytest.raises(Violation, match=r"not fenced at shards|applied by"):
        tell(replace(PLAN, broker=Impatient), slow_fence)


# ---- stale acknowledgements --------------------------------------------------------------------------


ECHOES = Faults(
    tampers=(
        Tamper(Kind.ACK, nth=4, times=2, receiver="worker-0", copies=60, copy_after_s=0.2),
        Tamper(Kind.PUSH, nth=9, times=2, sender="worker-0", lose=True),
    )
)
"""An acknowledgement keeps coming while a later push of the same worker is lost on its way."""


class Gullible(Worker):
    """Takes any acknowledgement for the one it waits for."""

    def on_message(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        if isinstance(msg, Ack):
            msg = next((replace(msg, seq=exchange.seq) for exchange in self._exchanges()), msg)
        return super().on_message(now, peer, msg)


def test_a_worker_that_accepts_stale_acknowledgements_is_found() -> None:
    tell(PLAN, ECHOES)
    with pytest.raises(Violation, match="final without"):
        tell(replace(PLAN, worker=Gullible), ECHOES)


# ---- more that went wrong elsewhere ------------------------------------------------------------------


class TodaysWeights(Shard):
    """Answers a repeated push with today's parameters instead of those it sent then."""

    def _repeat(self, peer: PeerId, client: Client, msg: Message) -> list[Effect]:
        outcome = client.outcomes.get(msg.seq)
        if isinstance(msg, Push) and outcome is not None:
            today = self._values.snapshot(self._values.params.copy())
            return self._reply(Ack, peer, msg, replace(today, version=outcome.version), outcome.lag)
        return super()._repeat(peer, client, msg)


def test_a_shard_that_answers_a_repeated_push_with_todays_weights_is_found() -> None:
    with pytest.raises(Violation, match="other parameters"):
        tell(replace(PLAN, shard=TodaysWeights), REPEATS)


class Hoarder(Shard):
    """Never forgets the lives it fenced."""

    def _fence(self, now: float, msg: Fence) -> list[Effect]:
        effects = super()._fence(now, msg)
        self.kept = [*getattr(self, "kept", []), msg.incarnation]
        return effects


def test_a_table_that_only_grows_is_found() -> None:
    kills = tuple(Kill("worker-0", at_s=5.0 + 3.0 * i, restart_after_s=1.0) for i in range(60))
    plan = replace(PLAN, epochs=40)
    tell(plan, Faults(kills=kills)).tables.check(90.0, at_most=1000, slack=8)
    cluster = tell(replace(plan, shard=Hoarder), Faults(kills=kills))
    with pytest.raises(InvariantError, match=r"\.kept.* keeps growing"):
        cluster.tables.check(90.0, at_most=1000, slack=8)


class Sleepwalker(Broker):
    """Holds its own pause against its members: their leases ran out while it could not listen."""

    def _forgive_own_stall(self, now: float) -> list[Effect]:
        return []


def test_a_broker_that_does_not_forgive_its_own_stall_is_found() -> None:
    everybody = ("broker", "shard-0", "shard-1", "worker-0", "worker-1", "worker-2")
    asleep = Faults(pauses=tuple(Pause(name, 6.0, 45.0) for name in everybody))
    tell(PLAN, asleep)
    cluster = Cluster(replace(PLAN, broker=Sleepwalker), 1, faults=asleep)
    cluster.run(300.0)
    assert cluster.world.noted("run_failed")
