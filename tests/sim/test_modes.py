"""Every mode and kind of rule through storms and deaths, with books of its own, and bugs planted in the modes.

The books are kept from messages alone: which push of whom came to which shard, and what was answered. They know
nothing of the tables by which a shard or the broker decides.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pytest

from zasgd.core import shard as shard_module
from zasgd.core.broker import Broker
from zasgd.core.membership import Member
from zasgd.core.messages import Ack, Bye, Err, Fence, Grant, GrantMsg, Message, Probe, Push, Renew
from zasgd.core.node import Effect, InvariantError, Node, PeerId, Send, require
from zasgd.core.region import Memory
from zasgd.core.rounds import Rounds, Waiting
from zasgd.core.rules import GroupSpec, RuleSpec, check
from zasgd.core.shard import Shard
from zasgd.core.snapshot import Client
from zasgd.core.transfer import Gradient
from zasgd.core.worker import GradientTask
from zasgd.sim.cluster import Cluster, Plan
from zasgd.sim.faults import Faults, Pause, scattered_kills
from zasgd.sim.invariants import Observer, TableSizes
from zasgd.sim.problems import Quadratic

PLAIN = (GroupSpec(), GroupSpec(weight_decay=1e-4))
MOMENTUM = (GroupSpec(momentum=0.9), GroupSpec(momentum=0.9, weight_decay=1e-4))
ADAM = (GroupSpec(algorithm="adamw"), GroupSpec(algorithm="adamw", weight_decay=1e-4))

MODES: dict[str, tuple[RuleSpec, tuple[GroupSpec, ...]]] = {
    "sync": (RuleSpec("asgd", mode="sync"), MOMENTUM),
    "sync with backups": (RuleSpec("asgd", mode="sync", quorum=3), MOMENTUM),
    "buffer": (RuleSpec("dc-asgd-a", mode="buffer", quorum=3), MOMENTUM),
    "buffer of adam": (RuleSpec("staleness-aware", mode="buffer", quorum=4), ADAM),
    "block": (RuleSpec("asgd", max_lag=4, lag_policy="block"), PLAIN),
    "push_every": (RuleSpec("dc-asgd-a", push_every=5), PLAIN),
    "sync push_every": (RuleSpec("asgd", mode="sync", quorum=2, push_every=3), PLAIN),
    "dana+ga": (RuleSpec("dana+ga", guard=True), MOMENTUM),
    "easgd": (RuleSpec("easgd", push_every=4), PLAIN),
    "delta": (RuleSpec("delta", push_every=4), PLAIN),
    "diloco": (RuleSpec("diloco", push_every=5), PLAIN),
    "sync diloco": (RuleSpec("diloco", mode="sync", push_every=3), PLAIN),
}
PLAN = Plan(num_workers=4, num_shards=2, num_samples=320, batch_size=8, epochs=2, step_s=1.0)


# ---- what workers compute ------------------------------------------------------------------------------


class LocalWork:
    """What a worker pushes for one or more batches, by whatever rule: a mean gradient, or what local steps led to."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self._plan = plan
        self._draw = random.Random(seed)
        self._problem = Quadratic(plan.layout.sizes["params"], seed=seed)

    def __call__(self, name: str, life: int, task: GradientTask) -> tuple[float, Gradient]:
        took_s = len(task.grants) * self._plan.step_s * self._draw.uniform(0.5, 1.5)
        return took_s, self._gradient(task.memory, task.grants)

    def _gradient(self, memory: Memory, grants: tuple[Grant, ...]) -> Gradient:
        local = memory.params.copy()
        gradients = []
        for grant in grants:
            gradients.append(self._problem.of(local, grant))
            if self._plan.rule.is_local:
                local -= np.float32(0.01) * gradients[-1]
        pushed = {"gradient": np.mean(gradients, axis=0, dtype=np.float32), "elastic": local}
        return Gradient(
            grads=pushed.get(self._plan.rule.exchange or "", memory.params - local),
            stats=memory.stats + np.float32(0.1) * (1 - memory.stats),
            counters=np.full_like(memory.counters, grants[-1].epoch),
            num_samples=sum(g.num_samples for g in grants),
            loss=self._problem.loss(local),
            finite=True,
            presence=b"" if self._draw.random() < 0.8 else b"\x01",
        )


# ---- books ---------------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """One push."""

    incarnation: int
    seq: int


@dataclass
class Page:
    """What was seen of one shard: pushes that came in whole, those it took, in order, and those that ended a life."""

    came: dict[Unit, Push] = field(default_factory=dict)
    taken: dict[Unit, int] = field(default_factory=dict)
    refused: dict[Unit, str] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)
    samples: int = 0


class Books:
    """Nothing is taken twice, ungranted, fenced, too old or out of order; every batch ends in one state.

    bounded: no worker is given up in this run, so lag_policy block keeps every lag below max_lag.
    """

    bounded = False

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pages = [Page() for _ in range(plan.num_shards)]
        self.granted: dict[int, set[Grant]] = defaultdict(set)

    def handled(self, at_s: float, name: str, node: Node, message: Message | None, effects: list[Effect]) -> None:
        """An event of a shard and what it answered."""
        if not isinstance(node, Shard) or node.number < 0:
            return
        page = self.pages[node.number]
        if isinstance(message, Push) and message.commit:
            page.came.setdefault(Unit(message.incarnation, message.seq), message)
        if isinstance(message, Fence):
            page.fenced.add(message.incarnation)
        answers = [e.message for e in effects if isinstance(e, Send)]
        for answer in answers:
            self._answered(page, answer)
        require(node.samples == page.samples, f"the sample clock is {node.samples}, what was taken {page.samples}")

    def _answered(self, page: Page, answer: Message) -> None:
        unit = Unit(answer.incarnation, answer.seq)
        if isinstance(answer, Err) and unit in page.came and not answer.retryable and answer.code != "FENCED":
            require(unit not in page.taken, f"{unit} was taken and then refused")
            page.refused.setdefault(unit, answer.code)
        if not isinstance(answer, Ack) or unit not in page.came or answer.part:
            return
        if unit in page.taken:
            require(page.taken[unit] == answer.version, f"{unit} was taken twice")
            return
        self._judge(page, unit, answer)
        page.taken[unit] = answer.version
        page.samples += page.came[unit].num_samples

    def _judge(self, page: Page, unit: Unit, ack: Ack) -> None:
        push, rule = page.came[unit], self.plan.rule
        require(unit not in page.refused, f"{unit} was refused and then taken")
        require(unit.incarnation not in page.fenced, f"{unit} was taken after its life had ended")
        require(set(push.grants) <= self.granted[unit.incarnation], f"{unit} was not granted all of {push.grants}")
        if rule.max_lag and (rule.lag_policy == "drop" or self.bounded):
            require(ack.lag < rule.max_lag, f"{unit} was taken {ack.lag} updates old")

    def sent(self, at_s: float, name: str, node: Node, message: Message) -> None:
        """What the broker grants and what workers report."""
        if isinstance(message, GrantMsg):
            self.granted[message.incarnation].update(message.grants)
        if isinstance(message, Renew | Bye):
            for push in message.final:
                missing = [k for k, p in enumerate(self.pages) if Unit(message.incarnation, push.seq) not in p.taken]
                require(not missing, f"push {push.seq} is called final without shards {missing}")

    def settle(self, cluster: Cluster) -> dict[str, int]:
        """Compare with the ledger; raises InvariantError."""
        ledger = cluster.broker.run.ledger
        require(ledger.complete, "the run ended with an incomplete ledger")
        takers: dict[Grant, set[Unit]] = defaultdict(set)
        for page in self.pages:
            for unit in page.taken:
                for grant in page.came[unit].grants:
                    takers[grant].add(unit)
        twice = {g: units for g, units in takers.items() if len(units) > 1}
        require(not twice, f"two pushes of one batch were taken: {twice}")
        seen = {"once": 0, "torn": 0, "skipped": 0}
        for grant in self.plan.grid:
            count = sum(u in page.taken for page in self.pages for u in takers[grant])
            how = "once" if count == len(self.pages) else "torn" if count else "skipped"
            seen[how] += grant.num_samples
        told = {"once": ledger.once, "torn": ledger.torn, "skipped": ledger.skipped}
        require(seen == told, f"the ledger says {told}, the shards did {seen}")
        if self.plan.rule.mode == "sync":
            self._same_rounds()
        return seen

    def _same_rounds(self) -> None:
        """Of what all shards took, every shard made the same rounds in the same order."""
        everywhere = set.intersection(*(set(p.taken) for p in self.pages))
        first, *others = [_rounds(page, everywhere) for page in self.pages]
        for other in others:
            require(other == first, "two shards made other rounds, or in another order")


def _rounds(page: Page, those: set[Unit]) -> list[list[Unit]]:
    """What one shard took of `those`, in its order, by the version that it made."""
    taken = [(version, unit) for unit, version in page.taken.items() if unit in those]
    return [[unit for _, unit in members] for _, members in groupby(taken, key=lambda pair: pair[0])]


# ---- runs ----------------------------------------------------------------------------------------------


def storm(plan: Plan, seed: int) -> Faults:
    """Losses, repetitions, delays, long stalls, deaths and frozen processes."""
    draw = random.Random(seed)
    names = [f"worker-{i}" for i in range(plan.num_workers)]
    kills = scattered_kills(names, 3, start_s=3.0, stop_s=20.0, restart_s=(0.5, 6.0), seed=seed)
    pauses = tuple(Pause(draw.choice([*names, "shard-0", "shard-1"]), draw.uniform(2, 20), 4.0) for _ in range(2))
    return Faults(
        drop=0.03, duplicate=0.05, delay=0.1, delay_s=0.5, stall=0.005, until_s=60.0, kills=kills, pauses=pauses
    )  # fmt: skip


def a_run(
    plan: Plan, seed: int, faults: Faults | None = None, until_s: float = 2000.0
) -> tuple[Cluster, dict[str, int]]:
    """A run to its end and what became of its samples; raises InvariantError."""
    check(plan.rule, plan.groups)
    books, observer = Books(plan), Observer(plan.num_shards)
    plan = replace(plan, member=replace(plan.member, push_every=plan.rule.push_every))
    cluster = Cluster(plan, seed, faults=faults, problem=LocalWork(plan, seed), watches=(books, observer))
    cluster.run(until_s)
    states = {name: p.state.value for name, p in cluster.world.processes.items()}
    require(cluster.over, f"no end after {cluster.world.now:.0f} s: {states}, {cluster.broker.run.phase}")
    require(cluster.broker.run.outcome == "completed", f"the run {cluster.broker.run.outcome}")
    seen = books.settle(cluster)
    require(tuple(observer.settle(cluster.broker.run.ledger, plan.grid)) == tuple(seen.values()), "two books differ")
    return cluster, seen


def plan_of(mode: str, **more: Any) -> Plan:
    rule, groups = MODES[mode]
    return replace(PLAN, rule=rule, groups=groups, **more)


ALL = {"once": 640, "torn": 0, "skipped": 0}


@pytest.mark.parametrize("mode", MODES)
def test_a_quiet_run_takes_every_batch_once(mode: str) -> None:
    cluster, seen = a_run(plan_of(mode), seed=1)
    assert seen == ALL
    assert all(np.isfinite(cluster.shard(k).values.params).all() for k in range(2))
    assert [cluster.shard(k).samples for k in range(2)] == [640, 640]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_storm_loses_nothing_and_takes_nothing_twice(mode: str, seed: int) -> None:
    plan = plan_of(mode)
    cluster, seen = a_run(plan, seed, storm(plan, seed))
    assert sum(seen.values()) == 640 and seen["torn"] <= 640 // 4
    assert cluster.world.trace.counts["killed"] >= 2


@pytest.mark.parametrize("mode", ["sync with backups", "buffer", "block", "diloco", "dana+ga"])
def test_equal_seeds_make_equal_runs(mode: str) -> None:
    plan = plan_of(mode, epochs=1)
    digests = [a_run(plan, seed, storm(plan, seed))[0].world.trace.digest() for seed in (4, 4, 5)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("num_workers", [1, 3, 9])
@pytest.mark.parametrize("quorum", [0, 2, 8])
def test_a_synchronous_run_ends_with_fewer_batches_than_workers(num_workers: int, quorum: int) -> None:
    plan = replace(PLAN, rule=RuleSpec("asgd", mode="sync", quorum=quorum), groups=PLAIN, num_workers=num_workers)
    cluster, seen = a_run(replace(plan, num_samples=8 * 5, epochs=1), seed=2)
    assert seen == {"once": 40, "torn": 0, "skipped": 0}
    assert cluster.world.now < 60.0


def test_three_shards_and_a_busy_network_make_the_same_rounds() -> None:
    plan = plan_of("sync with backups", num_shards=3, num_workers=6)
    for seed in (7, 8):
        a_run(plan, seed, storm(plan, seed))


def test_no_batch_of_a_synchronous_run_is_skipped_however_many_answers_are_lost() -> None:
    plan = plan_of("sync with backups", epochs=4, lease_s=40.0)
    lossy = Faults(drop=0.1, until_s=200.0)
    assert [a_run(plan, seed, lossy)[1]["skipped"] for seed in (1, 2, 3, 4)] == [0] * 4


@pytest.mark.parametrize("mode", ["sync", "sync with backups", "block"])
def test_tables_stay_as_long_as_they_are(mode: str) -> None:
    plan = plan_of(mode, epochs=20, step_s=0.5)
    books, tables = Books(plan), TableSizes(every_s=5.0)
    cluster = Cluster(plan, 1, problem=LocalWork(plan, 1), watches=(books, tables))
    cluster.run(1000.0)
    books.settle(cluster)
    tables.check(cluster.world.now / 2, at_most=1000, slack=16)


@pytest.mark.parametrize("push_every", [1, 7, 200])
def test_a_push_takes_as_many_batches_as_it_is_told_and_fewer_at_the_end(push_every: int) -> None:
    plan = replace(PLAN, rule=RuleSpec("delta", push_every=push_every), groups=PLAIN, batch_size=1, step_s=0.02)
    plan = replace(plan, num_workers=2, num_samples=500, epochs=3)
    cluster, seen = a_run(plan, seed=3)
    assert seen == {"once": 1500, "torn": 0, "skipped": 0}
    assert cluster.shard(0).version <= 1500 // push_every + 2 * 3 + 2


def test_two_speeds_and_a_block_leave_nobody_behind() -> None:
    """Pauses longer than anybody's patience, and a worker that is away for good."""
    plan = plan_of("block", epochs=3)
    pauses = tuple(Pause("worker-0", 5.0 + 15.0 * i, 8.0) for i in range(3))
    _, seen = a_run(plan, 5, Faults(pauses=pauses))
    assert seen["once"] + seen["torn"] + seen["skipped"] == 960


# ---- planted bugs --------------------------------------------------------------------------------------

ROUNDS = plan_of("sync with backups")
JITTER = Faults(delay=0.3, delay_s=1.0, until_s=200.0)


def found(plan: Plan, match: str, faults: Faults = JITTER, seed: int = 1) -> None:
    """The healthy run comes through it, the planted bug does not."""
    healthy = replace(plan, shard=Shard, broker=Broker)
    _, seen = a_run(healthy, seed, faults)
    require(seen["skipped"] == 0, f"the healthy run skipped: {seen}")
    with pytest.raises(InvariantError, match=match):
        _, seen = a_run(plan, seed, faults, until_s=400.0)
        require(seen["skipped"] == 0, f"skipped: {seen}")


class DecidesAlone(Shard):
    """Every shard makes its rounds of what it has."""

    def _move_on(self, now: float) -> list[Effect]:
        return [*self._carry_out(now), *self._close_and_carry_out(now)]


def test_a_shard_that_decides_by_itself_is_found() -> None:
    found(replace(ROUNDS, shard=DecidesAlone), "other rounds|no end|the ledger says")


class OtherWayRound(Shard):
    """Applies the members of a round in its own order."""

    def _apply_round(self, now: float, members: list[Waiting]) -> list[Effect]:
        return super()._apply_round(now, members[::-1] if self.number else members)


def test_a_shard_that_applies_a_round_in_another_order_is_found() -> None:
    found(replace(ROUNDS, shard=OtherWayRound), "other rounds, or in another order")


class KeepsMembers(Rounds):
    """Leaves the members of a round where they wait."""

    def pop_round(self, never_comes: Any) -> list[Waiting] | None:
        arrived = dict(self.arrived)
        members = super().pop_round(never_comes)
        for waiting in members or ():
            self.arrived[waiting.id] = arrived[waiting.id]
        return members


class AppliesAgain(Shard):
    """Takes a push into every later round too."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.rounds = KeepsMembers()

    def validate(self) -> None:
        """Says nothing: the books must find it alone."""


def test_a_waiting_push_that_is_applied_twice_is_found() -> None:
    found(replace(ROUNDS, shard=AppliesAgain), "taken twice|the sample clock")


class CountsLate(Broker):
    """Takes a push that came too late for an attempt."""

    def _settle_reports(self, member: Member, msg: Renew | Bye) -> list[Effect]:
        refused = tuple(r._replace(reason="nonfinite") if r.reason == "LATE" else r for r in msg.refused)
        return super()._settle_reports(member, replace(msg, refused=refused))


def test_a_broker_that_counts_late_pushes_as_attempts_is_found() -> None:
    plan = replace(ROUNDS, rule=replace(ROUNDS.rule, quorum=1), broker=CountsLate)
    found(plan, "skipped", Faults())


class ForgetsDecisions(Broker):
    """Passes on decisions once and never again."""

    def _repeat_decisions(self, member: Member, known: int) -> list[Effect]:
        return []


def test_a_broker_that_does_not_repeat_decisions_is_found() -> None:
    """Not every loss is one of a decision: one of four runs at least must show it."""
    lossy = Faults(drop=0.05, until_s=30.0)
    for seed in (1, 2, 3, 4):
        assert a_run(ROUNDS, seed, lossy)[1]["skipped"] == 0
    with pytest.raises(InvariantError, match="no end"):
        for seed in (1, 2, 3, 4):
            a_run(replace(ROUNDS, broker=ForgetsDecisions), seed, lossy, until_s=400.0)


class Overlooks(Shard):
    """Acknowledges what it never gathered, once in a while."""

    def _gather(self, now: float, client: Client, waiting: Waiting) -> list[Effect]:
        if waiting.committed.push.seq % 5:
            return super()._gather(now, client, waiting)
        return self._acknowledge(now, client, waiting, self._values.snapshot(waiting.committed.snapshot.params), 0)


def test_a_buffer_that_overlooks_a_push_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("buffer")
    a_run(plan, 1, JITTER)
    monkeypatch.setitem(shard_module._DISCIPLINES, "buffer", Overlooks._gather)
    with pytest.raises(InvariantError, match="the sample clock"):
        a_run(replace(plan, shard=Overlooks), 1, JITTER)


class LetsThrough(Shard):
    """Holds nobody up."""

    def _outruns_somebody(self, now: float, client: Client) -> bool:
        return False


def test_a_block_that_lets_old_pushes_through_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without faults nobody is given up, so with max_lag at the number of workers no push may be that old."""
    monkeypatch.setattr(Books, "bounded", True)
    found(replace(plan_of("block"), shard=LetsThrough), "updates old", Faults())


class GivesUpTheWaiting(Shard):
    """Takes a push that waits and is asked for again for one that came too late, without a word to shard 0."""

    def _probe(self, now: float, peer: PeerId, client: Client, msg: Message) -> list[Effect]:
        if client.waiting is not None and client.waiting.committed.push.seq == msg.seq and self.number:
            return self._refuse_waiting(self.rounds.arrived.pop(client.waiting.id), "it waited too long")
        return super()._probe(now, peer, client, msg)


def test_a_shard_that_gives_up_what_waits_when_it_is_asked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(ROUNDS, rule=RuleSpec("asgd", mode="sync"))
    slow = Faults(pauses=(Pause("worker-1", 4.0, 6.0), Pause("worker-2", 12.0, 6.0)))
    assert a_run(plan, 2, slow)[1] == ALL
    monkeypatch.setitem(shard_module._SERVED, Probe, GivesUpTheWaiting._probe)
    _, seen = a_run(replace(plan, shard=GivesUpTheWaiting), 2, slow)
    assert seen["torn"] > 0, "what one shard refused the other took, and the books say so"
