"""Mode sync: shard 0 names the members of each round, and every shard applies them in that order.

The workers and the broker between the shards are played by the test, so that it chooses what comes when.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.core.test_core_broker import CONFIG as BROKER_CONFIG
from tests.core.test_core_broker import Desk
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.messages import (
    Ack,
    Admit,
    Array,
    Done,
    Err,
    Fence,
    Fenced,
    Grant,
    GrantMsg,
    Init,
    Lease,
    Live,
    Message,
    Observe,
    Params,
    Probe,
    Pull,
    Push,
    PushId,
    Refused,
    Renew,
    Round,
    Welcome,
)  # fmt: skip
from zasgd.core.messages import Decision as Decided
from zasgd.core.node import BROKER, Effect, InvariantError, Record, Send
from zasgd.core.parameters import ShardConfig
from zasgd.core.rounds import Rounds
from zasgd.core.rules import GroupSpec, RuleSpec
from zasgd.core.run import Decisions
from zasgd.core.schedule import Schedule
from zasgd.core.shard import Shard
from zasgd.sim.invariants import table_sizes

RUN = 9
LEASE_S = 10.0


def layout_for(num_shards: int) -> Layout:
    """16 parameters and 16 float buffers for each shard."""
    return Layout((TensorSpec("w", (16 * num_shards,)), TensorSpec("mean", (16 * num_shards,), section="stats")))


class Floor:
    """Some shards, and workers that the test plays: worker `i` is incarnation 10 + i.

    answers: what each worker got, in order. rounds: what shard 0 told the broker of its decisions, for `pass_on`.
    records: of each shard.
    """

    def __init__(
        self,
        rule: RuleSpec,
        num_workers: int = 2,
        num_shards: int = 1,
        *,
        groups: Sequence[GroupSpec] = (GroupSpec(),),
        layout: Layout | None = None,
        live: int | None = None,
        lr: float = 1.0,
        epoch: int = 1_000_000,
    ) -> None:
        """live: N that the broker tells, `num_workers` unless told. epoch: samples in one."""
        self.now = 100.0
        self.layout = layout or layout_for(num_shards)
        self.slices = self.layout.slices("params", num_shards)
        self.num_samples = epoch
        config = ShardConfig(num_shards, rule, tuple(groups), Schedule(lr=lr, epochs=10))
        self.shards = [Shard(self.now, b"%d" % k, "tcp://x:1", records=True) for k in range(num_shards)]
        self.records: list[list[tuple[Any, ...]]] = [[] for _ in self.shards]
        self.answers: dict[int, list[Any]] = {}
        self.rounds: list[Round] = []
        self.to_broker: list[Message] = []
        self.versions: dict[int, list[int]] = {}
        self.seqs: dict[int, int] = {}
        self.num_lives = 0
        for k in range(num_shards):
            welcome = {"run": RUN, "shard": k, "incarnation": 1 + k, "token": b"%d" % k, "num_shards": num_shards}
            self.broker(k, Welcome(**welcome, lease_s=LEASE_S, config=config.to_json()))
        self.admit(0)
        self.seed()
        for who in range(1, num_workers):
            self.admit(who)
        for who in range(num_workers):
            self.pull(who)
        self.tell_live(num_workers if live is None else live)

    # ---- events ------------------------------------------------------------------------------------

    def take(self, k: int, effects: list[Effect]) -> None:
        shard = self.shards[k]
        shard.validate()
        shard._validate_all()
        for effect in effects:
            if isinstance(effect, Record):
                self.records[k].append(effect.row)
            elif isinstance(effect, Send) and effect.peer == BROKER:
                (self.rounds if isinstance(effect.message, Round) else self.to_broker).append(effect.message)
            elif isinstance(effect, Send):
                self._answered(effect.peer, effect.message)

    def _answered(self, who: Any, message: Any) -> None:
        self.answers.setdefault(who, []).append(message)
        if isinstance(message, Ack | Params) and message.seq == self.seqs.get(who):
            self.versions[who][message.shard] = message.version

    def broker(self, k: int, message: Message) -> None:
        self.take(k, self.shards[k].on_message(self.now, BROKER, message))

    def ask(self, who: int, kind: type[Message], k: int, seq: int, **fields: Any) -> list[Any]:
        """What `who` gets at once from shard `k`."""
        before = len(self.answers.setdefault(who, []))
        ids = {"run": RUN, "shard": k, "worker": who, "incarnation": 10 + who, "seq": seq}
        self.take(k, self.shards[k].on_message(self.now, who, kind(**{**ids, **fields})))
        return self.answers[who][before:]

    def at(self, now: float) -> None:
        """Let time pass; the broker is heard of."""
        while (due := min(s.next_deadline() for s in self.shards)) <= now:
            self.now = max(self.now, due)
            for k, shard in enumerate(self.shards):
                if shard.next_deadline() <= self.now:
                    shard._heard_at = self.now
                    self.take(k, shard.on_timer(self.now))
        self.now = max(self.now, now)

    # ---- the broker --------------------------------------------------------------------------------

    def admit(self, who: int) -> None:
        self.versions[who] = [0] * len(self.shards)
        self.seqs[who] = 1
        for k in range(len(self.shards)):
            ids = {"run": RUN, "shard": k, "worker": who, "incarnation": 10 + who}
            self.broker(k, Admit(**ids, layout=self.layout, num_samples=self.num_samples))

    def fence(self, who: int, *shards: int) -> None:
        for k in shards or range(len(self.shards)):
            self.broker(k, Fence(run=RUN, shard=k, worker=who, incarnation=10 + who))

    def settle(self, who: int) -> None:
        for k in range(len(self.shards)):
            self.broker(k, Lease(run=RUN, shard=k, settled=(10 + who,)))

    def tell_live(self, num_workers: int, *shards: int) -> None:
        self.num_lives += 1
        for k in shards or range(len(self.shards)):
            self.broker(k, Live(run=RUN, shard=k, live=self.num_lives, num_workers=num_workers))

    def pass_on(self, *shards: int) -> None:
        """Everything that shard 0 has told goes to the other shards, and shard 0 hears that it arrived."""
        told, self.rounds = self.rounds, []
        for round_ in told:
            for k in shards or range(1, len(self.shards)):
                self.broker(k, Round(run=RUN, shard=k, base=round_.base, decisions=round_.decisions))
            self.broker(0, Done(run=RUN, shard=0, seq=round_.base + len(round_.decisions) - 1))

    # ---- workers -----------------------------------------------------------------------------------

    def seed(self, value: float = 0.0) -> None:
        for k, part in enumerate(self.slices):
            buffers = np.zeros(self.shards[k].values.stats.size, np.float32)
            params = (np.full(part.size, value, np.float32),)
            self.ask(0, Init, k, 1, layout_hash=self.layout.hash, params=params, stats=buffers)

    def next_seq(self, who: int) -> int:
        self.seqs[who] += 1
        return self.seqs[who]

    def pull(self, who: int) -> Any:
        """The answer of shard 0."""
        seq = self.next_seq(who)
        answers = [self.ask(who, Pull, k, seq)[0] for k in range(len(self.shards))]
        return answers[0]

    def push(
        self,
        who: int,
        grad: float | Array = 1.0,
        *shards: int,
        seq: int | None = None,
        samples: int = 10,
        **fields: Any,
    ) -> list[Any]:
        """Worker `who` pushes to these shards (none named: all); what it gets at once. seq: of a push begun before."""
        seq = self.next_seq(who) if seq is None else seq
        whole = np.broadcast_to(np.asarray(grad, np.float32), (self.layout.sizes["params"],))
        found: list[Any] = []
        for k in shards or range(len(self.shards)):
            part = self.slices[k]
            body = {
                "layout_hash": self.layout.hash,
                "grads": (whole[part.start : part.stop].copy(),),
                "grants": (Grant(0, 1000 * who + seq, 0, samples),),
                "num_samples": samples,
                "commit": True,
                "version": self.versions[who][k],
            }
            found += self.ask(who, Push, k, seq, **{**body, **fields})
        return found

    # ---- reading -----------------------------------------------------------------------------------

    def w(self, k: int = 0) -> Array:
        return self.shards[k].values.params

    def last(self, who: int) -> Any:
        return self.answers[who][-1]

    def what(self, k: int, *kinds: str) -> list[tuple[Any, ...]]:
        """Rows of shard `k`'s record of these kinds."""
        return [row for row in self.records[k] if row[0] in kinds]

    def members(self, k: int) -> list[list[tuple[int, int]]]:
        """(incarnation, seq) of the members of each round of shard `k`, in order."""
        found: list[list[tuple[int, int]]] = [[]]
        for row in self.what(k, "member", "round"):
            if row[0] == "round":
                found.append([])
            else:
                found[-1].append((row[3], row[4]))
        return found[:-1]


def sync(quorum: int = 0, **stages: Any) -> RuleSpec:
    return RuleSpec(stages.pop("name", "asgd"), mode="sync", quorum=quorum, **stages)


def codes(messages: Iterable[Any]) -> list[str]:
    return [m.code if isinstance(m, Err) else type(m).__name__ for m in messages]


# ---- when a round is made ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quorum", "num_workers", "needed"), [(0, 3, 3), (2, 3, 2), (3, 3, 3), (8, 3, 3), (1, 3, 1), (0, 1, 1)]
)
def test_a_round_takes_quorum_pushes_but_never_more_than_there_are_workers_with_work(
    quorum: int, num_workers: int, needed: int
) -> None:
    floor = Floor(sync(quorum), num_workers)
    for who in range(needed - 1):
        assert floor.push(who) == [] and floor.shards[0].version == 0
    (ack,) = floor.push(needed - 1)
    assert (ack.version, ack.lag, floor.shards[0].version) == (1, 0, 1)
    assert all(type(floor.last(who)) is Ack and floor.last(who).version == 1 for who in range(needed))
    assert floor.shards[0].samples == 10 * needed
    assert (floor.w() == -1.0).all(), "the mean of equal gradients, whatever their number"


def test_workers_without_work_are_not_waited_for() -> None:
    floor = Floor(sync(), num_workers=4, live=2)
    floor.push(2)
    assert codes(floor.push(0)) == ["Ack"] and floor.shards[0].version == 1


def test_members_are_summed_in_their_order_of_arrival() -> None:
    """1e8 + 1 - 1e8 is 0 in float32, 1e8 - 1e8 + 1 is 1: the order is in the bits."""
    gradients = {0: 1e8, 1: 1.0, 2: -1e8}
    outcomes = []
    for order in ((0, 1, 2), (0, 2, 1)):
        floor = Floor(sync(), 3)
        for who in order:
            floor.push(who, gradients[who])
        assert [m[0] for m in floor.members(0)[0]] == [10 + who for who in order]
        outcomes.append(float(floor.w()[0]))
    assert outcomes == [0.0, pytest.approx(-1 / 3)]


def test_a_mean_in_a_round_gives_every_member_the_same_share_whatever_its_samples() -> None:
    floor = Floor(sync(), 2)
    floor.push(0, 1.0, samples=10), floor.push(1, 3.0, samples=30)
    assert (floor.w() == -2.0).all() and floor.shards[0].samples == 40


BASES = {
    "plain": GroupSpec(),
    "nesterov": GroupSpec(momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adamw": GroupSpec(algorithm="adamw", weight_decay=1e-2),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("mode", ["sync", "buffer"])
def test_rounds_of_one_and_buffers_of_one_are_bit_equal_to_async(mode: str, base: str) -> None:
    draw = np.random.default_rng(3)
    plain = Floor(RuleSpec("asgd"), 1, groups=(BASES[base],), lr=0.1)
    other = Floor(RuleSpec("asgd", mode=mode, quorum=1), 1, groups=(BASES[base],), lr=0.1)
    for _ in range(20):
        grad = draw.standard_normal(16).astype(np.float32)
        (a,), (b,) = plain.push(0, grad), other.push(0, grad)
        assert (a.version, a.lag, a.samples) == (b.version, b.lag, b.samples)
        assert plain.w().tobytes() == other.w().tobytes()
        assert a.params[0].tobytes() == b.params[0].tobytes()
    assert other.shards[0].version == 20 and np.abs(other.w()).max() > 0


# ---- several shards ------------------------------------------------------------------------------------


def test_every_shard_applies_what_shard_0_named_in_its_order() -> None:
    floor = Floor(sync(2), num_workers=3, num_shards=3)
    seqs = [floor.next_seq(who) for who in range(3)]
    for k, order in enumerate([(2, 0, 1), (0, 1, 2), (1, 2, 0)]):
        for who in order:
            floor.push(who, float(1 + who), k, seq=seqs[who])
    assert [s.version for s in floor.shards] == [1, 0, 0], "nobody but shard 0 decides"
    floor.pass_on()
    assert [s.version for s in floor.shards] == [1, 1, 1]
    assert [floor.members(k) for k in range(3)] == [[[(12, seqs[2]), (10, seqs[0])]]] * 3
    assert {float(floor.w(k)[0]) for k in range(3)} == {-2.0}
    assert codes(floor.answers[1])[-3:] == ["LATE"] * 3, "refused on all shards"


def test_a_decision_that_came_before_the_pushes_is_carried_out_when_the_last_is_there() -> None:
    floor = Floor(sync(2), num_workers=2, num_shards=2)
    seqs = [floor.next_seq(who) for who in range(2)]
    floor.push(0, 1.0, 0, seq=seqs[0]), floor.push(1, 3.0, 0, seq=seqs[1])
    floor.pass_on()
    assert floor.push(1, 3.0, 1, seq=seqs[1]) == []
    assert codes(floor.push(0, 1.0, 1, seq=seqs[0])) == ["Ack"]
    assert floor.members(1) == floor.members(0) and (floor.w(1) == -2.0).all()


@pytest.mark.parametrize("first", ["the push", "the decision"])
def test_who_came_too_late_is_refused_on_every_shard_whichever_comes_first(first: str) -> None:
    floor = Floor(sync(1), num_workers=2, num_shards=2)
    floor.push(0)
    floor.pass_on()
    seq = floor.next_seq(1)
    if first == "the push":
        assert floor.push(1, 1.0, 1, seq=seq) == []
    (refused,) = floor.push(1, 1.0, 0, seq=seq)
    assert (refused.code, refused.retryable) == ("LATE", False)
    floor.pass_on()
    if first == "the decision":
        floor.push(1, 1.0, 1, seq=seq)
    assert codes(floor.answers[1])[-1] == "LATE" and floor.last(1).shard == 1
    assert [s.version for s in floor.shards] == [1, 1]
    assert [s.refusals["LATE"] for s in floor.shards] == [1, 1]
    floor.pull(1)
    floor.push(1)
    floor.pass_on()
    assert [s.version for s in floor.shards] == [2, 2], "on new parameters it is in time"


class Story:
    """Workers that push again and again over a network that reorders, loses and repeats; decided by `draw`."""

    def __init__(self, seed: int, quorum: int, num_workers: int, num_shards: int) -> None:
        self.draw = random.Random(seed)
        self.floor = Floor(sync(quorum), num_workers, num_shards)
        self.decisions = Decisions()
        self.wire: list[tuple[str, int, Any]] = []
        self.pushing: dict[int, tuple[int, float, set[int]]] = {}
        self.num_steps = dict.fromkeys(range(num_workers), 0)
        self.steps = 0
        self.late: list[set[tuple[int, int]]] = [set() for _ in range(num_shards)]

    def run(self, steps: int) -> None:
        """Until every worker has made `steps` pushes that were applied or refused, and everything has come to rest."""
        self.steps = steps
        for _ in range(100 * steps * len(self.num_steps)):
            for who, done in self.num_steps.items():
                if who not in self.pushing and done < steps:
                    self.begin(who)
            if not self.wire and not self.pushing:
                return
            self.one_event()
        raise AssertionError(f"no rest: {self.pushing}, {[s.rounds.num_known for s in self.floor.shards]}")

    def begin(self, who: int) -> None:
        floor = self.floor
        if floor.answers[who] and any(isinstance(m, Err) and m.code == "LATE" for m in floor.answers[who]):
            floor.pull(who)
        floor.answers[who].clear()
        seq = floor.next_seq(who)
        shards = set(range(len(floor.shards)))
        self.pushing[who] = (seq, self.draw.uniform(-1, 1), shards)
        self.wire += [("push", k, (who, seq)) for k in shards]

    def one_event(self) -> None:
        chance = self.draw.random()
        if self.wire and chance < 0.8:
            kind, k, what = self.wire.pop(self.draw.randrange(len(self.wire)))
            if self.draw.random() < 0.2:
                self.wire.append((kind, k, what))  # repeated, or late
            if kind != "live" and self.draw.random() < 0.1:
                return  # lost
            getattr(self, f"on_{kind}")(k, what)
        elif chance < 0.9:
            self.resend()
        else:
            self.renew(self.draw.randrange(len(self.floor.shards)))
        self.look()

    def on_push(self, k: int, what: tuple[int, int]) -> None:
        who, seq = what
        if who in self.pushing and self.pushing[who][0] == seq:
            self.floor.push(who, self.pushing[who][1], k, seq=seq)
        else:
            self.floor.ask(who, Probe, k, seq)

    def on_round(self, k: int, round_: Round) -> None:
        self.floor.broker(k, Round(run=RUN, shard=k, base=round_.base, decisions=round_.decisions))

    def on_live(self, k: int, num_workers: int) -> None:
        """Who has nothing left to do is not waited for; numbers that overtake each other are void."""
        num_lives = 100 - num_workers
        self.floor.broker(0, Live(run=RUN, shard=0, live=num_lives, num_workers=num_workers))

    def on_done(self, k: int, number: int) -> None:
        self.floor.broker(0, Done(run=RUN, shard=0, seq=number))

    def on_told(self, k: int, round_: Round) -> None:
        """The broker hears of a decision."""
        base = self.decisions.count + 1
        fresh = self.decisions.take(round_.base, round_.decisions)
        self.wire.append(("done", 0, self.decisions.count))
        others = range(1, len(self.floor.shards)) if fresh else ()
        self.wire += [("round", i, Round(run=RUN, shard=i, base=base, decisions=fresh)) for i in others]

    def renew(self, k: int) -> None:
        """Shard `k` renews; the broker repeats what it lacks."""
        shard = self.floor.shards[k]
        self.floor.take(k, shard._renew(self.floor.now))
        known = shard.rounds.num_known
        missing = self.decisions.after(known, 3)
        if k and missing:
            self.wire.append(("round", k, Round(run=RUN, shard=k, base=known + 1, decisions=missing)))

    def resend(self) -> None:
        if self.pushing:
            who = self.draw.choice(sorted(self.pushing))
            seq, _, left = self.pushing[who]
            self.wire += [("push", k, (who, seq)) for k in sorted(left)]

    def look(self) -> None:
        self.wire += [("told", 0, round_) for round_ in self.floor.rounds]
        self.floor.rounds.clear()
        for who, (seq, _, left) in list(self.pushing.items()):
            for answer in self.floor.answers[who]:
                if answer.seq == seq and (isinstance(answer, Ack) or not answer.retryable):
                    left.discard(answer.shard)
                    if isinstance(answer, Err):
                        self.late[answer.shard].add((who, seq))
            if not left:
                del self.pushing[who]
                self.num_steps[who] += 1
                if self.num_steps[who] == self.steps:
                    self.wire.append(("live", 0, sum(n < self.steps for n in self.num_steps.values())))


@pytest.mark.parametrize(("quorum", "num_workers", "num_shards"), [(2, 4, 3), (1, 3, 2), (3, 5, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_shards_agree_bit_for_bit_whatever_the_network_does(
    seed: int, quorum: int, num_workers: int, num_shards: int
) -> None:
    story = Story(seed, quorum, num_workers, num_shards)
    floor = story.floor
    story.run(6)
    first, *others = range(num_shards)
    assert len(floor.members(first)) >= 3
    for k in others:
        assert floor.members(k) == floor.members(first)
        assert floor.w(k).tobytes() == floor.w(first).tobytes()
        assert story.late[k] == story.late[first]
        assert floor.shards[k].version == floor.shards[first].version
    named = [member for members in floor.members(first) for member in members]
    assert len(named) == len(set(named)), "a push was applied twice"


# ---- while a push waits --------------------------------------------------------------------------------


def test_a_waiting_push_is_neither_lost_nor_taken_twice_when_it_is_asked_for_again() -> None:
    floor = Floor(sync(), 2)
    floor.push(0, 4.0)
    seq = floor.seqs[0]
    for kind in (Probe, None, Probe, None):
        (answer,) = floor.ask(0, Probe, 0, seq) if kind else floor.push(0, 4.0, seq=seq)
        assert (answer.code, answer.retryable) == ("WAITING", True) and answer.retry_after_ms > 0
    floor.push(1, 2.0)
    assert (floor.w() == -3.0).all() and floor.shards[0].version == 1
    first = floor.last(0)
    for again in (*floor.push(0, 4.0, seq=seq), *floor.ask(0, Probe, 0, seq)):
        assert (type(again), again.version) == (Ack, 1)
        assert again.params[0].tobytes() == first.params[0].tobytes()
    assert floor.shards[0].version == 1


def test_a_pull_while_a_push_waits_does_not_change_what_the_push_was_computed_on() -> None:
    floor = Floor(sync(), 2)
    floor.push(0, 1.0)
    waiting = floor.shards[0].clients[10].waiting
    assert waiting is not None
    before = waiting.committed.snapshot
    floor.pull(0)
    floor.push(1, 1.0)
    assert floor.members(0) == [[(10, 3), (11, 3)]] and before.version == 0


def test_a_push_in_parts_waits_once_it_is_whole() -> None:
    floor = Floor(sync(), 2)
    half = np.ones(8, np.float32)
    seq = floor.next_seq(0)
    body = {"layout_hash": floor.layout.hash, "version": 0, "parts": 2}
    floor.ask(0, Push, 0, seq, **body, grads=(half,))
    floor.push(1)
    assert floor.shards[0].version == 0
    commit = {"part": 1, "offset": 8, "commit": True, "num_samples": 5, "grads": (half,)}
    floor.ask(0, Push, 0, seq, **body, **commit)
    assert floor.shards[0].version == 1


def test_a_worker_cannot_wait_with_two_pushes() -> None:
    """Of two pushes that wait one would be forgotten, or one worker would count twice."""
    floor = Floor(sync(3), 3)
    floor.push(0)
    try:
        (answer,) = floor.push(0)
    except InvariantError as e:
        pytest.fail(f"the shard is in disorder: {e}")
    assert type(answer) is Err
    floor.push(1), floor.push(2)
    assert [m[0] for m in floor.members(0)[0]] == [10, 11, 12]


# ---- lost answers --------------------------------------------------------------------------------------


def test_who_missed_that_it_was_late_hears_so_again() -> None:
    """Any other code is an attempt in the ledger: after two the batch would be skipped though its gradient is good."""
    floor = Floor(sync(1), 2)
    floor.push(0)
    floor.push(1)
    assert floor.last(1).code == "LATE"
    again = [*floor.ask(1, Probe, 0, floor.seqs[1]), *floor.push(1, seq=floor.seqs[1])]
    assert codes(again) == ["LATE", "LATE"]
    assert floor.shards[0].version == 1


# ---- deaths --------------------------------------------------------------------------------------------


def test_a_member_that_died_before_its_push_came_is_not_waited_for() -> None:
    floor = Floor(sync(2), num_workers=3, num_shards=2)
    seqs = [floor.next_seq(who) for who in range(3)]
    floor.push(0, 1.0, 0, seq=seqs[0]), floor.push(1, 3.0, 0, seq=seqs[1])  # shard 0: both, 2 late
    floor.push(2, 9.0, seq=seqs[2])
    floor.push(1, 3.0, 1, seq=seqs[1])
    floor.pass_on()
    assert floor.shards[1].version == 0, "worker 0 is alive and will come"
    floor.fence(0)
    assert floor.shards[1].version == 1 and floor.members(1) == [[(11, seqs[1])]]
    assert (floor.w(0) == -2.0).all() and (floor.w(1) == -3.0).all()
    told = [m for m in floor.to_broker if isinstance(m, Fenced)]
    assert [[p.seq for p in m.pushes] for m in told] == [[seqs[0]], []], "torn: by one shard and not by the other"


def test_a_round_whose_members_all_died_before_their_pushes_came_is_passed_over() -> None:
    floor = Floor(sync(1), num_workers=2, num_shards=2)
    floor.push(0, 1.0, 0)
    floor.pass_on()
    floor.fence(0)
    assert [s.version for s in floor.shards] == [1, 0]
    floor.pull(1)
    floor.push(1, 2.0)
    floor.pass_on()
    assert [s.version for s in floor.shards] == [2, 1]
    assert codes(floor.answers[1])[-2:] == ["Ack", "Ack"]


def test_a_dead_workers_push_that_waits_is_forgotten_and_the_others_go_on() -> None:
    floor = Floor(sync(), num_workers=3, num_shards=2)
    floor.push(0, 100.0), floor.push(1, 1.0)
    floor.fence(0)
    floor.tell_live(2)
    floor.push(2, 3.0)
    floor.pass_on()
    assert [m[0] for m in floor.members(1)[0]] == [11, 12] and (floor.w(1) == -2.0).all()
    assert all(not s.rounds.arrived for s in floor.shards)


def test_a_fence_on_the_other_shard_that_comes_before_the_decision_tears_only_the_dead_workers_push() -> None:
    floor = Floor(sync(), num_workers=2, num_shards=2)
    floor.push(0, 1.0), floor.push(1, 3.0)
    floor.fence(0, 1)
    floor.pass_on()
    assert (floor.w(0) == -2.0).all() and (floor.w(1) == -3.0).all()


@pytest.mark.parametrize("way", ["Live", "Lease"])
def test_fewer_workers_with_work_close_a_round(way: str) -> None:
    floor = Floor(sync(), num_workers=3)
    floor.push(0), floor.push(1)
    assert floor.shards[0].version == 0
    if way == "Live":
        floor.tell_live(2)
    else:
        floor.broker(0, Lease(run=RUN, shard=0, live=7, num_workers=2))
    assert floor.shards[0].version == 1 and len(floor.members(0)[0]) == 2


def test_an_older_number_of_workers_is_void() -> None:
    floor = Floor(sync(), num_workers=3)
    floor.broker(0, Live(run=RUN, shard=0, live=9, num_workers=3))
    floor.push(0)
    for stale in (Live(run=RUN, shard=0, live=8, num_workers=1), Lease(run=RUN, shard=0, live=9, num_workers=1)):
        floor.broker(0, stale)
        assert floor.shards[0].version == 0 and floor.shards[0].values.num_workers == 3
    floor.broker(0, Live(run=RUN, shard=0, live=10, num_workers=0))
    assert floor.shards[0].version == 1, "nobody else has work"


# ---- a push that another shard cannot take -------------------------------------------------------------


def test_a_member_that_one_shard_refused_does_not_hold_up_that_shard_for_ever() -> None:
    floor = Floor(sync(), num_workers=2, num_shards=2)
    bad = np.ones(32, np.float32)
    bad[20] = np.inf  # in the slice of shard 1
    assert codes(floor.push(0, bad)) == ["NONFINITE"]
    floor.push(1, 3.0)
    floor.pass_on()
    assert [s.version for s in floor.shards] == [1, 1], "worker 1 waits for a push that will never come"


def test_a_push_that_shard_0_refused_does_not_wait_at_the_others_for_ever() -> None:
    floor = Floor(sync(), num_workers=2, num_shards=2)
    bad = np.ones(32, np.float32)
    bad[3] = np.inf  # in the slice of shard 0
    assert codes(floor.push(0, bad)) == ["NONFINITE"]
    floor.push(1, 3.0)
    floor.pull(0)
    floor.push(0, 1.0)
    floor.pass_on()
    for _ in range(10):
        floor.at(floor.now + 1.0)
        floor.pass_on()
    assert codes(floor.ask(0, Probe, 1, 3)) != ["WAITING"], "it asks for a push that no decision will ever name"


# ---- buffers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [2, 8, 32])
def test_batchnorms_averages_settle_in_rounds_of_any_size(num_workers: int) -> None:
    """Each batch moves the average by a tenth towards 1; the members of a round have all seen the same one."""
    floor = Floor(sync(), num_workers)
    seen = []
    for _ in range(20):
        before = floor.shards[0].values.stats.copy()
        for who in range(num_workers):
            floor.push(who, 0.0, stats=np.float32(0.9) * before + np.float32(0.1))
        seen.append(float(floor.shards[0].values.stats[0]))
    assert max(seen) < 1.0 + 1e-3 and seen[-1] > 0.8, seen


# ---- what is kept --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_long_run_of_rounds_leaves_no_table_longer(num_shards: int) -> None:
    floor = Floor(sync(2), num_workers=3, num_shards=num_shards)
    early: dict[str, int] = {}
    for step in range(300):
        for who in (0, 1, 2) if step % 3 else (1, 2, 0):
            floor.push(who, 1e-3)
        floor.pass_on()
        floor.pull((2, 0)[step % 3 == 0])
        if step == 100:
            early = table_sizes(floor.shards[0])
    assert floor.shards[0].version >= 300
    grown = {p: (early.get(p, 0), n) for p, n in table_sizes(floor.shards[0]).items() if n > early.get(p, 0) + 8}
    assert not grown


def test_a_decision_about_somebody_who_is_gone_leaves_nothing() -> None:
    floor = Floor(sync(1), num_workers=1, num_shards=2)
    for who in range(1, 60):
        floor.admit(who)
        floor.pull(who)
        floor.push(0)
        floor.push(who, 1.0, 0)  # late at shard 0; it dies before it has pushed to shard 1
        floor.fence(who)
        floor.settle(who)
        floor.pass_on()
    assert floor.shards[1].version == 59
    sizes = table_sizes(floor.shards[1].rounds)
    assert sum(sizes.values()) < 10, sizes


# ---- the decisions by themselves -----------------------------------------------------------------------


def a_round(number: int) -> Decided:
    return Decided((PushId(1, number),), ())


def test_decisions_are_taken_once_and_in_order_whatever_is_repeated_or_missing() -> None:
    rounds = Rounds()
    all_of_them = tuple(a_round(n) for n in range(1, 7))
    rounds.told(1, all_of_them[:2])
    rounds.told(1, all_of_them[:2])
    rounds.told(4, all_of_them[3:])
    assert rounds.num_known == 2, "the third is missing"
    rounds.told(2, all_of_them[1:5])
    rounds.told(1, all_of_them)
    assert rounds.num_known == 6
    taken = []
    while rounds.pop_round(lambda push: True) is not None:
        taken.append(1)
    assert len(taken) == 6


def test_what_the_broker_has_not_confirmed_is_told_again_until_it_has() -> None:
    rounds = Rounds()
    for n in range(1, 5):
        assert rounds.decide(a_round(n)) == n
    assert rounds.unconfirmed() == (1, tuple(a_round(n) for n in range(1, 5)))
    rounds.confirmed(3)
    rounds.confirmed(2)
    assert rounds.unconfirmed() == (4, (a_round(4),))
    rounds.confirmed(9)
    assert rounds.unconfirmed() == (5, ())


# ---- the broker's part ---------------------------------------------------------------------------------


def desk_with_workers(num_workers: int, **config: Any) -> tuple[Desk, list[Any]]:
    """A run that is open, and its workers."""
    desk = Desk(replace(BROKER_CONFIG, **config))
    found = [desk.joins(b"w%d" % i, num_samples=1000) for i in range(num_workers)]
    desk.opens(found[0])
    return desk, found


def of(kind: type[Message], sent: list[tuple[Any, Message]]) -> list[tuple[Any, Any]]:
    return [(to, m) for to, m in sent if isinstance(m, kind)]


def told_round(desk: Desk, base: int, *decisions: Decided, shard: int = 0) -> list[tuple[Any, Message]]:
    ids = {"run": 5, "shard": shard, "incarnation": desk.server_ids[shard]}
    return desk.put(f"s{shard}", Round(**ids, base=base, decisions=decisions))


def test_the_broker_passes_on_what_is_new_and_says_up_to_where_it_has_them() -> None:
    desk, _ = desk_with_workers(1)
    sent = told_round(desk, 1, a_round(1), a_round(2))
    assert [(to, m.base, len(m.decisions)) for to, m in of(Round, sent)] == [("s1", 1, 2)]
    assert [m.seq for _, m in of(Done, sent)] == [2]
    sent = told_round(desk, 2, a_round(2), a_round(3))
    assert [(m.base, m.decisions) for _, m in of(Round, sent)] == [(3, (a_round(3),))]
    sent = told_round(desk, 7, a_round(7))
    assert not of(Round, sent) and [m.seq for _, m in of(Done, sent)] == [3], "4 to 6 are missing"
    assert of(Err, told_round(desk, 4, a_round(4), shard=1)), "only shard 0 decides"


def test_a_shard_that_missed_decisions_gets_them_with_its_renewal_and_known_ones_are_forgotten() -> None:
    desk, _ = desk_with_workers(1)
    told_round(desk, 1, *[a_round(n) for n in range(1, 6)])
    repeated = of(Round, desk.server_renews(1, 10, decisions=2))
    assert [(to, m.base, len(m.decisions)) for to, m in repeated] == [("s1", 3, 3)]
    assert not of(Round, desk.server_renews(0, 10, decisions=5)), "shard 0 made them"
    assert not of(Round, desk.server_renews(1, 11, decisions=5))
    assert sum(table_sizes(desk.broker.run.decisions).values()) == 0
    assert desk.broker.run.decisions.count == 5
    sent = told_round(desk, 6, a_round(6))
    assert [m.base for _, m in of(Round, sent)] == [6]


def test_a_batch_that_came_too_late_goes_out_again_however_often() -> None:
    desk, (ann,) = desk_with_workers(1)
    seq, got = 1, 0
    answer = desk.renews(ann, "w0", seq, upto=1)
    (grant,) = answer.grants
    for _ in range(6):
        seq, got = seq + 1, got + 1
        answer = desk.renews(ann, "w0", seq, got=got, upto=got + 1, refused=(Refused(grant, "LATE", got),))
        assert answer.grants == (grant,)
    ledger = desk.broker.run.ledger
    assert (ledger.skipped, ledger.refusals, ledger.reissued) == (0, 0, 6)


@pytest.mark.parametrize("reason", ["LATE", "LAG", "nonfinite"])
def test_a_refusal_that_is_told_again_since_its_answer_was_lost_counts_once(reason: str) -> None:
    """Told again it is about a batch that the same worker was granted anew: that one is not refused."""
    desk, (ann,) = desk_with_workers(1)
    (grant,) = desk.renews(ann, "w0", 1, upto=1).grants
    desk.renews(ann, "w0", 2, got=1, upto=2, refused=(Refused(grant, reason, 1),))  # the answer is lost
    again = desk.renews(ann, "w0", 3, got=1, upto=2, refused=(Refused(grant, reason, 1),))
    assert again.grants == (grant,), "once, or it would be computed and applied twice"
    ledger = desk.broker.run.ledger
    assert (ledger.skipped, ledger.reissued) == (0, 1)


def test_a_batch_that_was_too_old_twice_goes_out_a_third_time() -> None:
    desk, (ann,) = desk_with_workers(1)
    answer = desk.renews(ann, "w0", 1, upto=1)
    (grant,) = answer.grants
    answer = desk.renews(ann, "w0", 2, got=1, upto=2, refused=(Refused(grant, "LAG", 1),))
    assert answer.grants == (grant,) and desk.broker.run.ledger.skipped == 0
    answer = desk.renews(ann, "w0", 3, got=2, upto=3, refused=(Refused(grant, "LAG", 2),))
    assert answer.grants == (grant,) and desk.broker.run.ledger.skipped == 0


def test_every_shard_is_told_when_the_number_of_workers_with_work_changes() -> None:
    desk, workers = desk_with_workers(3)
    seen = []
    for i, who in enumerate(workers):
        sent = desk.put(f"w{i}", Renew(run=5, worker=who.worker, incarnation=who.incarnation, seq=1, upto=1))
        seen.append([(to, m.live, m.num_workers) for to, m in of(Live, sent)])
    assert seen == [[(f"s{k}", n, n) for k in range(2)] for n in (1, 2, 3)]
    lease = of(Lease, desk.server_renews(0, 20))[0][1]
    assert (lease.live, lease.num_workers) == (3, 3)
    (grant,) = desk.broker.run.ledger.held_by(workers[0].incarnation)
    refused = Renew(
        run=5, worker=workers[0].worker, incarnation=workers[0].incarnation, seq=2, got=1, upto=1,
        refused=(Refused(grant, "LATE", 1),),
    )  # fmt: skip
    assert [m.num_workers for _, m in of(Live, desk.put("w0", refused))] == [2, 2]


def test_a_worker_whose_life_ended_is_no_longer_counted_though_its_batches_are_not_settled() -> None:
    desk, workers = desk_with_workers(2)
    for i, who in enumerate(workers):
        desk.renews(who, f"w{i}", 1, upto=1)
    desk.at(9.0)
    who = workers[1]
    desk.renews(who, "w1", 2, got=1, upto=1)
    for k in range(2):
        desk.server_renews(k, 10)
    sent = desk.at(12.0)
    assert [m.num_workers for _, m in of(Live, sent)] == [1, 1]
    assert {m.shard for _, m in of(Fence, sent)} == {0, 1}


def test_two_shards_two_workers_and_the_last_batch_of_a_run() -> None:
    """One worker has the last batch and the other has none: the round does not wait for the other."""
    desk, workers = desk_with_workers(2, batch_size=500)
    grants = []
    for i, who in enumerate(workers):
        answer: GrantMsg = desk.renews(who, f"w{i}", 1, upto=5)
        grants.append(answer.grants)
    assert [len(g) for g in grants] == [2, 0]
    assert desk.broker.run.num_busy == 1


def test_observing_leaves_the_waiting_ones_alone() -> None:
    floor = Floor(sync(), 2)
    floor.push(0)
    (answer,) = floor.ask(9, Observe, 0, 1, whole=True)
    assert type(answer) is Params and answer.version == 0
    floor.push(1)
    assert floor.shards[0].version == 1
