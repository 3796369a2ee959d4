"""How gradients and parameters get there: shared memory, two slots, compression, early parts; in storms, to the bit.

A watch compares, at every compute, what lies in the worker's slot with what each shard keeps as the snapshot of that
slot, and looks after every event whether anything moved that somebody still reads.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from zasgd.core.compression import Compression
from zasgd.core.messages import Ack, Array, Attached, Grant, Kind, Message, Params, Push
from zasgd.core.node import Compute, Computed, Effect, InvariantError, Node, PeerId, require
from zasgd.core.parameters import ShardConfig
from zasgd.core.region import SharedMemoryError
from zasgd.core.rules import GroupSpec, RuleError, RuleSpec, check
from zasgd.core.run import BrokerConfig
from zasgd.core.schedule import Schedule
from zasgd.core.shard import _SERVED, Shard
from zasgd.core.snapshot import Client, Snapshot
from zasgd.core.transfer import Gradient, Pusher, take
from zasgd.core.worker import GradientTask, Slot, Worker
from zasgd.sim.cluster import RUN, Cluster, Plan, small_layout
from zasgd.sim.faults import Faults, Kill, Link, Pause, Tamper, scattered_kills
from zasgd.sim.invariants import Observer, Tallies
from zasgd.sim.problems import Gradients, Quadratic, RecordedTimes, SimulatedWork, Tally, TaskTimes, UniformTimes
from zasgd.sim.world import Violation

EPOCHS = 3
SMALL = Plan(
    num_workers=3, num_samples=128, batch_size=8, epochs=EPOCHS, step_s=1.0, layout=small_layout(64),
    rule=RuleSpec("asgd"), groups=(GroupSpec(), GroupSpec()), lr=1.0,
)  # fmt: skip
"""Plain ASGD at lr 1 on two shards of 32 elements: with Tally each applied push adds 1 to its batch's element."""
DELAYED = {"rule": RuleSpec("dc-asgd-a"), "groups": (GroupSpec(momentum=0.9, nesterov=True), GroupSpec()), "lr": 0.02}
ALL = Tallies(once=128 * EPOCHS, torn=0, none=0)
NUM_BATCHES = 16 * EPOCHS
NONE, TOP = Compression(), Compression("topk", 0.01)
CODECS = [Compression("bf16"), Compression("fp16"), Compression("int8"), Compression("topk", 0.1)]
SPEEDS = RecordedTimes({"worker-0": [1.1], "worker-1": [1.45], "worker-2": [1.93]})
STEADY = Link(jitter_s=0.0)
"""With SPEEDS and workers that begin seconds apart, messages more or fewer change no order of pushes."""
SLOW_LINE = Link(latency_s=0.25)


# ---- who watches ---------------------------------------------------------------------------------------


class Slots:
    """A worker computes on exactly what the shards keep of it, and nobody touches what somebody else reads."""

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        self.num_compared = 0
        self.lags: dict[int, list[int]] = defaultdict(list)
        self.order: dict[int, list[tuple[int, tuple[Grant, ...], int]]] = defaultdict(list)
        self.codecs: Counter[tuple[str, str]] = Counter()
        self.bulk: Counter[tuple[str, int, bool]] = Counter()
        self.parts: set[tuple[int, int]] = set()
        self.commits: set[tuple[int, int]] = set()
        self._still: dict[tuple[str, int, int, str], bytes] = {}

    def handled(self, at_s: float, name: str, node: Node, message: Message | None, effects: list[Effect]) -> None:
        """Look at a shard that applies, at everything that must not move, and at both ends of every snapshot."""
        self.num_compared += sum(isinstance(effect, Compute) for effect in effects)
        if isinstance(node, Shard) and isinstance(message, Push) and message.commit:
            self._count(node, message)
        self._nothing_moves()

    def sent(self, at_s: float, name: str, node: Node, message: Message) -> None:
        """Take note of how pushes and their answers travel."""
        if isinstance(message, Push):
            (self.commits if message.commit else self.parts).add((message.incarnation, message.seq))
        if isinstance(message, Push) or (isinstance(message, Ack) and message.version):
            kind, arrays = type(message).__name__, message.grads if isinstance(message, Push) else message.params
            self.bulk[kind, message.shard, message.shared] += sum(a.size for a in arrays)
            self.codecs[kind, message.codec] += 1

    def _compare(self, worker: Worker, slot: Slot) -> None:
        for k in range(worker.num_shards):
            client = self.cluster.shard(k).clients.get(worker.incarnation)  # type: ignore[union-attr]
            if client is None:
                continue  # fenced: what it computes will be refused
            kept, own = client.snapshots.get(slot.number), worker._slices(k)["params"]
            where = f"shard {k}, slot {slot.number}:"
            require(kept is not None, f"{where} it keeps nothing")
            require(kept is None or kept.version == slot.versions[k], f"{where} it keeps another version")
            there = slot.memory.params[own.start : own.stop].tobytes()
            require(kept is None or kept.params.tobytes() == there, f"{where} it keeps other parameters")

    def _count(self, shard: Shard, push: Push) -> None:
        client = shard.clients.get(push.incarnation)
        outcome = client.outcomes.get(push.seq) if client is not None else None
        unit = (push.incarnation, push.grants, outcome.version if outcome else 0)
        if client is None or outcome is None or outcome.refused or unit in self.order[shard.number][-50:]:
            return
        behind = outcome.version - 1 - push.version
        require(outcome.lag == behind, f"a push {behind} updates old is called {outcome.lag} updates old")
        self.order[shard.number].append(unit)
        self.lags[shard.number].append(outcome.lag)

    def _nothing_moves(self) -> None:
        """What is computed on, and gradients that a shard may not have yet."""
        still: dict[tuple[str, int, int, str], bytes] = {}
        processes = self.cluster.world.processes if self.cluster is not None else {}
        for name, process in processes.items():
            worker = process.node
            if not isinstance(worker, Worker) or not process.alive:
                continue
            for slot in worker.slots:
                if worker.task is not None and worker.task.memory is slot.memory:
                    still[name, worker.incarnation, slot.seq, "params"] = slot.memory.params.tobytes()
                    self._compare(worker, slot)
                if slot.exchange is not None and slot.pushing:
                    still[name, worker.incarnation, slot.exchange.seq, "gradient"] = slot.memory.grads.tobytes()
        for key, content in still.items():
            require(self._still.get(key, content) == content, f"the {key[3]} of {key[0]}, seq {key[2]}, moved")
        self._still = still


class Work:
    """Simulated work that counts the batches it was given, and may let parts of a gradient leave before the rest."""

    def __init__(self, work: SimulatedWork, early: bool) -> None:
        self.work, self.early = work, early
        self.num_batches = 0
        self.num_parts = 0
        self.cluster: Cluster | None = None

    def __call__(self, name: str, life: int, task: GradientTask) -> tuple[float, Gradient]:
        took_s, done = self.work(name, life, task)
        self.num_batches += len(task.grants)
        if self.early and self.cluster is not None:
            for i, (start, _) in enumerate(reversed(task.parts)):
                at_s = self.cluster.world.now + took_s * (i + 1) / (len(task.parts) + 1)
                self.cluster.world.at(at_s, partial(self._ready, name, life, task, start))
        return took_s, done

    def _ready(self, name: str, life: int, task: GradientTask, start: int) -> None:
        require(self.cluster is not None, "no cluster")
        world = self.cluster.world  # type: ignore[union-attr]
        if world.processes[name].life == life:
            self.num_parts += 1
            world.signal(name, lambda worker, now: worker.on_part(now, task, start))


class Spread:
    """Two elements of each shard per batch: top-k of one element must hold one of them back."""

    def of(self, params: Array, grant: Grant) -> Array:
        """-1 at two places of each shard's 32, 16 apart."""
        gradient = np.zeros_like(params)
        gradient[grant.batch :: 16] = -1.0
        return gradient


def planned(inflight: int = 0, push: Compression = NONE, pull: Compression = NONE, **more: Any) -> Plan:
    """SMALL, with everybody told of slots and compression."""
    plan = replace(SMALL, **more)
    check(plan.rule, plan.groups, inflight)
    schedule = Schedule(lr=plan.lr, epochs=plan.epochs)
    shard_config = ShardConfig(plan.num_shards, plan.rule, plan.groups, schedule, inflight=inflight, pull=pull)
    config = BrokerConfig(
        run=RUN, recipe="{}", num_shards=plan.num_shards, epochs=plan.epochs, batch_size=plan.batch_size,
        num_groups=len(plan.groups), shard_config=shard_config.to_json(), lease_s=plan.lease_s,
        push_every=plan.rule.push_every,
    )  # fmt: skip
    return replace(plan, config=config, member=replace(plan.member, inflight=inflight, push=push))


class Run:
    """A cluster with these data paths, in turn, and those who watch it."""

    def __init__(
        self, plan: Plan, seed: int = 1, paths: Sequence[str] = ("relay",), *, faults: Faults | None = None,
        gradients: Gradients | None = None, times: TaskTimes | None = None, link: Link | None = None,
        early: bool = False, bad: frozenset[tuple[int, int]] = frozenset(), apart_s: float = 0.0,
    ) -> None:  # fmt: skip
        """apart_s: between the beginnings of two workers."""
        self.slots, observer = Slots(), Observer(plan.num_shards)
        times = times or UniformTimes(plan.step_s, 0.5, seed + 1)
        self.work = Work(SimulatedWork(plan.layout, gradients or Tally(stride=32), times, bad=bad), early)
        alone = replace(plan, num_workers=0)
        watches = (observer, self.slots)
        self.cluster = Cluster(alone, seed, faults=faults, link=link, problem=self.work, watches=watches)
        self.cluster.observer = observer
        self.slots.cluster = self.work.cluster = self.cluster
        for i, path in zip(range(plan.num_workers), cycle(paths), strict=False):
            self.cluster.add_worker(f"worker-{i}", data_path=path, at_s=i * apart_s)

    def finish(self, until_s: float = 1000.0) -> Tallies:
        """To the end; everybody who lives has ended by itself, and the books are right."""
        self.cluster.run(until_s)
        states = {name: p.state.value for name, p in self.cluster.world.processes.items()}
        require(self.cluster.over, f"no end: {states}, {self.cluster.broker.run.phase}")
        require(self.cluster.broker.run.outcome == "completed", f"the run {self.cluster.broker.run.outcome}")
        return self.cluster.settle()

    def shards(self) -> list[Shard]:
        return [self.cluster.shard(k) for k in range(self.cluster.plan.num_shards)]

    def params(self) -> Array:
        """The parameters in the end, both shards."""
        return np.concatenate([shard.values.params for shard in self.shards() if shard.values])

    def counts(self) -> Array:
        """How often each of 16 batches was applied, by shard, as the parameters themselves say."""
        return self.params().reshape(2, 32)[:, :16]

    def noted(self, event: str) -> list[Any]:
        return [note.fields for note in self.cluster.world.noted(event)]


def told(plan: Plan, seed: int = 1, paths: Sequence[str] = ("relay",), **more: Any) -> Run:
    """A run that has come to its end."""
    run = Run(plan, seed, paths, **more)
    run.finish()
    return run


def storm(seed: int, num_workers: int = 3, until_s: float = 40.0) -> Faults:
    """Losses, repetitions, delays, long stalls, deaths and frozen workers."""
    names = [f"worker-{i}" for i in range(num_workers)]
    kills = scattered_kills(names, 4, start_s=1, stop_s=25, restart_s=(0.5, 5), seed=seed)
    pauses = (Pause("worker-1", 6.0, 12.0), Pause("worker-2", 15.0, 3.0), Pause("shard-1", 9.0, 2.0))
    return Faults(
        drop=0.05, duplicate=0.08, delay=0.1, delay_s=0.5, stall=0.01, until_s=until_s, kills=kills, pauses=pauses
    )  # fmt: skip


def counted_once(run: Run) -> None:
    """The parameters say what the books say: nothing twice, nothing lost but what is torn."""
    tallies = run.cluster.settle()
    assert tallies.once + tallies.torn == ALL.once
    counts = run.counts()
    assert np.array_equal(counts, counts.round()) and counts.max() <= EPOCHS
    assert [int(n) for n in counts.sum(axis=1)] == [s.version for s in run.shards()]
    assert counts.min(axis=0).sum() * 8 == pytest.approx(tallies.once, abs=tallies.torn)
    assert run.slots.num_compared >= NUM_BATCHES


# ---- shared memory -------------------------------------------------------------------------------------


def test_over_shared_memory_no_element_travels_and_every_batch_counts_once() -> None:
    run = told(planned(), paths=("arena",))
    assert np.array_equal(run.counts(), np.full((2, 16), float(EPOCHS)))
    assert [fields["path"] for fields in run.noted("data_path")] == ["arena"] * 3
    assert sum(run.slots.bulk.values()) == 0 and {shared for _, _, shared in run.slots.bulk} == {True}
    assert run.slots.num_compared == NUM_BATCHES


@pytest.mark.parametrize("inflight", [0, 1])
def test_the_same_schedule_makes_the_same_bits_whichever_way_data_goes(inflight: int) -> None:
    found = []
    for paths in (["arena"], ["relay"], ["direct"], ["arena", "relay", "direct"]):
        run = told(
            planned(inflight, **DELAYED), 1, paths, times=SPEEDS, gradients=Quadratic(64), link=STEADY, apart_s=2.2
        )
        found.append((run.slots.order, run.params().tobytes()))
    orders, params = zip(*found, strict=True)
    assert all(order == orders[0] for order in orders), "not the same schedule, so this test says nothing"
    assert len(set(params)) == 1


@pytest.mark.parametrize(("seed", "inflight"), [(0, 0), (1, 1), (2, 1)])
def test_a_storm_over_shared_memory_applies_everything_once(seed: int, inflight: int) -> None:
    paths = (["arena"], ["arena", "relay", "direct"])[seed % 2]
    run = told(planned(inflight), seed, paths, faults=storm(seed))
    counted_once(run)


@pytest.mark.parametrize("sends", [5, 8, 11])
def test_a_worker_with_shared_memory_may_die_after_any_message(sends: int) -> None:
    kills = (Kill("worker-0", after_sends=sends, restart_after_s=1.0, cuts_line=bool(sends % 2)),)
    run = told(planned(), 3, ["arena"], faults=Faults(kills=kills))
    counted_once(run)


class Apart(Shard):
    """Shard 1 is on another host: it finds no region."""

    def on_done(self, now: float, done: Computed) -> list[Effect]:
        if self.number == 1:
            done = Computed(done.task, SharedMemoryError("no such region"))
        return super().on_done(now, done)


@pytest.mark.parametrize("faults", [None, storm(5)], ids=["quiet", "storm"])
def test_a_shard_without_the_memory_is_reached_over_the_network(faults: Faults | None) -> None:
    run = told(planned(1, shard=Apart), 5, ["arena"], faults=faults)
    counted_once(run)
    assert {fields["path"] for fields in run.noted("data_path")} == {"arena+relay"}
    assert run.slots.bulk["Ack", 1, True] == 0 < run.slots.bulk["Ack", 1, False]
    assert ("Ack", 0, False) not in run.slots.bulk


def test_a_shard_that_never_hears_the_offer_is_reached_over_the_network() -> None:
    deaf = Tamper(Kind.ATTACH, times=99, receiver="shard-1", lose=True)
    run = told(planned(), 6, ["arena"], faults=Faults(tampers=(deaf,)))
    assert run.cluster.settle() == ALL
    assert {fields["path"] for fields in run.noted("data_path")} == {"arena+relay"}


def test_shards_that_never_hear_the_offer_cost_two_seconds() -> None:
    run = told(planned(), 6, ["arena"], faults=Faults(tampers=(Tamper(Kind.ATTACH, times=999, lose=True),)))
    assert run.cluster.settle() == ALL
    assert {fields["path"] for fields in run.noted("data_path")} == {"relay"}
    assert not run.cluster.world._regions, "a region that nobody uses was left behind"


@pytest.mark.parametrize("shards", [("shard-0", "shard-1"), ("shard-1",)], ids=["both", "one"])
def test_a_shard_whose_yes_is_lost_does_not_write_where_nobody_reads(shards: tuple[str, ...]) -> None:
    """It has the region, the worker thinks that it has not."""
    unheard = tuple(Tamper(Kind.ATTACHED, times=99, sender=name, lose=True) for name in shards)
    run = told(planned(), 7, ["arena"], faults=Faults(tampers=unheard))
    assert run.cluster.settle() == ALL
    assert np.array_equal(run.counts(), np.full((2, 16), float(EPOCHS)))


@pytest.mark.parametrize(("receiver", "late_s"), [("", 2.5), ("shard-1", 2.5), ("shard-1", 10.0)])
def test_an_offer_that_comes_late_changes_nothing(receiver: str, late_s: float) -> None:
    """By then the worker has gone on over the network."""
    late = Tamper(Kind.ATTACH, times=99, receiver=receiver, late_s=late_s)
    run = told(planned(), 8, ["arena"], faults=Faults(tampers=(late,)))
    assert run.cluster.settle() == ALL
    assert np.array_equal(run.counts(), np.full((2, 16), float(EPOCHS)))


def test_a_fenced_worker_begins_its_new_life_with_a_new_region() -> None:
    run = told(planned(epochs=8), 9, ["arena"], faults=Faults(pauses=(Pause("worker-0", 5.3, 20.0),)))
    assert run.cluster.settle() == Tallies(1024, 0, 0)
    worker = run.cluster.world.node("worker-0")
    assert worker.num_lives == 2 and np.array_equal(run.counts(), np.full((2, 16), 8.0))
    [fenced] = run.noted("fenced")
    assert all(fenced["incarnation"] not in shard.clients for shard in run.shards())


def test_a_late_push_of_a_former_life_finds_the_fence() -> None:
    late = Tamper(Kind.PUSH, nth=7, times=2, sender="worker-0", late_s=25.0)
    faults = Faults(tampers=(late,), pauses=(Pause("worker-0", 5.0, 15.0),))
    run = told(planned(epochs=8), 10, ["arena"], faults=faults)
    assert np.array_equal(run.counts(), np.full((2, 16), 8.0))
    assert all(shard.refusals["FENCED"] for shard in run.shards())


# ---- one push on its way -------------------------------------------------------------------------------


def test_a_lone_worker_with_a_push_on_its_way_is_one_update_behind() -> None:
    """The pull behind its first push meets it applied; from then on each gradient misses the one before it."""
    run = told(planned(1, num_workers=1), times=UniformTimes(1.0, 0.0, 1), gradients=Quadratic(64))
    for lags in run.slots.lags.values():
        assert lags == [0, 0] + [1] * (NUM_BATCHES - 2)
    assert run.slots.num_compared == NUM_BATCHES


def test_a_push_on_its_way_hides_the_line() -> None:
    """Steps of one second, answers half a second late."""
    late, ends = Tamper(Kind.ACK, times=999, late_s=0.5), []
    for inflight in (0, 1):
        run = told(planned(inflight, num_workers=1), times=UniformTimes(1.0, 0.0, 1), faults=Faults(tampers=(late,)))
        ends.append(run.cluster.world.now)
    assert ends[1] < ends[0] - 20.0


@pytest.mark.parametrize(("seed", "push_every"), [(0, 1), (1, 1), (2, 3), (3, 3)])
def test_two_slots_in_a_storm_apply_everything_once(seed: int, push_every: int) -> None:
    run = told(planned(1, rule=RuleSpec("asgd", push_every=push_every)), seed, faults=storm(seed + 20))
    tallies = run.cluster.settle()
    assert tallies.once + tallies.torn == ALL.once and run.slots.num_compared >= 16
    if push_every == 1:
        counted_once(run)


@pytest.mark.parametrize("at_s", [3.05, 3.6])
@pytest.mark.parametrize("path", ["arena", "relay"])
def test_a_worker_that_leaves_finishes_the_push_on_its_way_and_the_batch_in_hand(at_s: float, path: str) -> None:
    run = Run(planned(1), 4, [path], link=SLOW_LINE)
    leave = lambda worker, now: worker.leave(now, "SIGTERM")  # noqa: E731
    run.cluster.world.at(at_s, lambda: run.cluster.world.signal("worker-0", leave))
    assert run.finish() == ALL
    assert run.work.num_batches == NUM_BATCHES, "something that was computed was thrown away"
    stop = run.cluster.world.processes["worker-0"].stop
    assert stop is not None and stop.code == 0


@pytest.mark.parametrize(
    ("rule", "groups", "reason"),
    [
        (RuleSpec("asgd", max_lag=4, lag_policy="block"), PLAIN := (GroupSpec(), GroupSpec()), "block"),
        (RuleSpec("asgd", mode="sync"), PLAIN, "sync"),
        (RuleSpec("dana"), (GroupSpec(momentum=0.9),) * 2, "dana"),
        (RuleSpec("dana-slim"), (GroupSpec(momentum=0.9),) * 2, "dana-slim"),
        (RuleSpec("easgd", push_every=4), PLAIN, "easgd"),
    ],
)
def test_what_does_not_go_with_a_push_on_its_way_is_refused(
    rule: RuleSpec, groups: tuple[GroupSpec, ...], reason: str
) -> None:
    check(rule, groups, 0)
    with pytest.raises(RuleError, match=f"inflight.*{reason}"):
        check(rule, groups, 1)


@pytest.mark.parametrize("rule", ["dc-asgd-a", "dana+ga"])
def test_training_with_a_push_on_its_way_converges(rule: str) -> None:
    groups = (GroupSpec(momentum=0.9), GroupSpec(momentum=0.9)) if rule == "dana+ga" else SMALL.groups
    plan = planned(1, rule=RuleSpec(rule), groups=groups, lr=0.02 if rule == "dana+ga" else 0.2, epochs=8)
    quadratic = Quadratic(64)
    run = told(plan, gradients=quadratic, link=Link(latency_s=0.1))
    assert quadratic.loss(run.params()) < 0.05 * quadratic.loss(np.zeros(64, np.float32))


# ---- compression ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "inflight"), list(zip(CODECS, [1, 0, 1, 0], strict=True)), ids=lambda c: getattr(c, "codec", c)
)
def test_through_losses_a_worker_computes_on_what_the_shard_keeps(
    codec: Compression, inflight: int, small_parts: None
) -> None:
    """Lost and repeated parts of compressed answers, which a repeated answer fills up uncompressed."""
    lossy = Faults(drop=0.08, duplicate=0.2, delay=0.2, delay_s=0.5, until_s=60.0)
    run = told(planned(inflight, codec, codec, **DELAYED), 11, faults=lossy, gradients=Quadratic(64))
    assert run.slots.codecs["Ack", codec.codec] > 150 < run.slots.codecs["Push", codec.codec]
    assert run.slots.codecs["Ack", ""] > 10, "no answer was repeated, so this test says nothing"
    assert run.slots.num_compared >= NUM_BATCHES


@pytest.mark.parametrize("seed", range(3))
def test_compressed_and_two_slots_in_a_storm_with_deaths(seed: int, small_parts: None) -> None:
    plan = planned(seed % 2, CODECS[3 - seed], CODECS[3 - seed], **DELAYED)
    run = told(plan, seed, ["relay", "arena"], faults=storm(seed + 40), gradients=Quadratic(64))
    tallies = run.cluster.settle()
    assert tallies.once + tallies.torn == ALL.once and run.slots.num_compared >= NUM_BATCHES


def test_what_sixteen_bits_hold_counts_once(small_parts: None) -> None:
    run = told(planned(1, CODECS[1], CODECS[1]), 12, faults=storm(12))
    counted_once(run)


def test_training_with_compressed_pushes_and_answers_converges() -> None:
    quadratic = Quadratic(64)
    start = quadratic.loss(np.zeros(64, np.float32))
    exact = quadratic.loss(told(planned(lr=0.2, epochs=8), gradients=quadratic).params())
    for codec in CODECS[2:]:
        run = told(planned(0, codec, codec, lr=0.2, epochs=8), gradients=quadratic)
        assert quadratic.loss(run.params()) < 2 * exact + 0.01 * start, codec


def test_without_what_was_held_back_top_k_gets_nowhere_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """What error feedback is for: of 32 elements four travel."""
    quadratic = Quadratic(64, noise=0.0)
    plan = planned(0, CODECS[3], lr=0.1, epochs=8)
    start = quadratic.loss(np.zeros(64, np.float32))
    assert quadratic.loss(told(plan, gradients=quadratic).params()) < 0.002 * start
    monkeypatch.setattr("zasgd.core.transfer.FEEDBACK", frozenset())
    assert quadratic.loss(told(plan, gradients=quadratic).params()) > 0.02 * start


def test_who_shares_memory_is_never_compressed() -> None:
    run = told(planned(0, TOP, TOP, shard=Apart), 13, ["arena"])
    assert run.slots.codecs["Push", "topk"] > 0 < run.slots.codecs["Ack", "topk"]
    everywhere = told(planned(0, TOP, TOP), 13, ["arena"])
    assert {codec for _, codec in everywhere.slots.codecs} == {""}
    assert np.array_equal(everywhere.counts(), np.full((2, 16), float(EPOCHS)))


# ---- what was held back --------------------------------------------------------------------------------


def one_leaves(plan: Plan, at_s: float, faults: Faults | None = None, **member: Any) -> Run:
    """worker-0 holds one of two elements back and leaves at `at_s`; worker-1, uncompressed, finishes the run."""
    run = Run(replace(plan, num_workers=0), 14, gradients=Spread(), link=SLOW_LINE, faults=faults,
              times=UniformTimes(1.0, 0.0, 1))  # fmt: skip
    joining = (("worker-0", TOP, 0.0), ("worker-1", NONE, 1.0))
    for name, push, at in joining:
        config = replace(plan.member, data_path="relay", host=name, push=push, **(member if push is TOP else {}))
        args = (config, plan.layout, plan.num_samples, run.cluster._seed_values)
        new = lambda now, life, name=name, args=args: Worker(now, f"{name}/{life}".encode(), *args)  # noqa: E731
        run.cluster.world.add(name, new, at_s=at)
    leave = lambda worker, now: worker.leave(now, "SIGTERM")  # noqa: E731
    run.cluster.world.at(at_s, lambda: run.cluster.world.signal("worker-0", leave))
    run.finish()
    assert run.cluster.settle() == ALL
    return run


def nothing_missing(run: Run) -> bool:
    return np.array_equal(run.params(), np.full(64, float(EPOCHS)))


@pytest.mark.parametrize("inflight", [0, 1])
@pytest.mark.parametrize("at_s", [3.0, 7.25, 7.75])
def test_who_leaves_sends_what_was_held_back(at_s: float, inflight: int) -> None:
    """At any moment of a step: with a batch in hand, with a push or a pull on its way."""
    assert nothing_missing(one_leaves(planned(inflight), at_s))


@pytest.mark.parametrize("at_s", [4.0, 6.5])
def test_who_leaves_while_it_has_nothing_in_hand_sends_what_was_held_back(at_s: float) -> None:
    """A paced worker, idle most of the time."""
    run = one_leaves(planned(), at_s, min_step_s=4.0)
    assert nothing_missing(run)
    assert run.work.num_batches == NUM_BATCHES


@pytest.mark.parametrize("inflight", [0, 1])
def test_what_was_held_back_arrives_once_through_losses(inflight: int) -> None:
    lossy = Faults(drop=0.1, duplicate=0.2, delay=0.2, delay_s=0.5, until_s=40.0)
    for at_s in (6.0, 8.3):
        assert nothing_missing(one_leaves(planned(inflight), at_s, lossy))


# ---- early parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inflight", "push"), [(0, NONE), (1, CODECS[1])], ids=["none", "fp16"])
def test_parts_that_leave_early_make_the_same_bits(inflight: int, push: Compression, small_parts: None) -> None:
    found = []
    for early in (False, True):
        plan = planned(inflight, push, **DELAYED)
        run = told(plan, times=SPEEDS, gradients=Quadratic(64), early=early, link=STEADY, apart_s=2.2)
        found.append((run.slots.order, run.params().tobytes()))
        assert run.work.num_parts == early * NUM_BATCHES * 4
    assert found[0] == found[1]


@pytest.mark.parametrize(("seed", "inflight"), [(0, 0), (1, 1), (2, 1)])
def test_early_parts_in_a_storm_apply_everything_once(seed: int, inflight: int, small_parts: None) -> None:
    push = (NONE, Compression("bf16"))[seed % 2]
    run = told(planned(inflight, push), seed, ["relay", "direct"], faults=storm(seed + 60), early=True)
    counted_once(run)
    assert sum(shard.refusals["INCOMPLETE"] + shard.refusals["UNKNOWN_SEQ"] for shard in run.shards()) > 0


@pytest.mark.parametrize("inflight", [0, 1])
def test_a_gradient_that_turns_out_not_finite_leaves_nothing_of_its_early_parts(
    inflight: int, small_parts: None
) -> None:
    bad = frozenset({(0, 13), (1, 15)})
    run = told(planned(inflight), early=True, bad=bad)
    assert run.cluster.settle() == Tallies(ALL.once - 16, torn=0, none=16)
    counts = run.counts()
    assert counts[:, 13].tolist() == counts[:, 15].tolist() == [EPOCHS - 1.0] * 2 and counts.sum() == 2 * (
        NUM_BATCHES - 2
    )


@pytest.mark.parametrize("at_s", [5.5, 5.8])
def test_a_worker_that_dies_with_early_parts_out_leaves_nothing_of_them(at_s: float, small_parts: None) -> None:
    run = told(planned(), 5, faults=Faults(kills=(Kill("worker-0", at_s=at_s),)), early=True)
    assert run.slots.parts - run.slots.commits, "it had no part out, so this test says nothing"
    counted_once(run)


def test_more_shards_than_cache_lines_leave_some_with_nothing(small_parts: None) -> None:
    for paths in (["arena"], ["relay"]):
        plan = planned(1, NONE, Compression("int8"), num_shards=6, **DELAYED)
        run = told(plan, 1, paths, gradients=Quadratic(64), early=True)
        sizes = [shard.values.slice.size for shard in run.shards() if shard.values]
        assert 0 in sizes and sum(sizes) == 64
        assert [shard.version for shard in run.shards()] == [NUM_BATCHES] * 6


# ---- planted bugs --------------------------------------------------------------------------------------

TWICE = Faults(
    tampers=(
        Tamper(Kind.ACK, times=999, sender="shard-0", copies=1, copy_after_s=0.01),
        Tamper(Kind.ACK, times=999, sender="shard-1", late_s=0.1),
    )
)
"""Shard 0 says everything twice while shard 1 has not answered yet."""


class Mute(Worker):
    """Says nothing about itself: the watch must find it alone."""

    def validate(self) -> None:
        """Nothing."""


class ByVersion(Shard):
    """Looks for a snapshot of the push's version in whichever slot it is."""

    def _checked(self, client: Client, push: Push) -> Snapshot:
        own = super()._checked(client, push)
        return next(s for s in client.snapshots.values() if s.version == own.version)


@pytest.mark.parametrize("path", ["arena", "relay"])
def test_a_shard_that_looks_for_snapshots_by_version_is_found(path: str) -> None:
    told(planned(1, num_workers=1), paths=[path])
    with pytest.raises(Violation, match=r"it keeps other parameters|moved"):
        told(planned(1, num_workers=1, shard=ByVersion), paths=[path])


class OtherSlot(Mute):
    """Writes answers to pushes where the next gradient is computed."""

    def _take(self, msg: Ack | Params | Attached) -> None:
        slot = next((s for s in self.slots if s.exchange is not None and s.exchange.seq == msg.seq), None)
        if slot is not None and isinstance(msg, Ack):
            slot.taken += take(msg, self.slots[1 - slot.number].memory, self._slices(msg.shard))
        else:
            super()._take(msg)


def test_a_worker_that_writes_an_answer_into_its_other_slot_is_found() -> None:
    told(planned(1))
    with pytest.raises(Violation, match=r"it keeps other parameters|moved"):
        told(planned(1, worker=OtherSlot))


class AddsAgain(Mute):
    """Adds a difference that comes a second time a second time."""

    def on_message(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        exchange = self._asked(msg.seq)
        if isinstance(msg, Ack) and msg.codec and exchange is not None and msg.part in exchange.legs[msg.shard].parts:
            slot = next(s for s in self.slots if s.exchange is exchange)
            take(msg, slot.memory, self._slices(msg.shard))
        return super().on_message(now, peer, msg)


def test_a_difference_that_is_added_twice_is_found(small_parts: None) -> None:
    plan = planned(0, NONE, Compression("bf16"), **DELAYED)
    told(plan, faults=TWICE, gradients=Quadratic(64))
    with pytest.raises(Violation, match="it keeps other parameters"):
        told(replace(plan, worker=AddsAgain), faults=TWICE, gradients=Quadratic(64))


class TodaysDifference(Shard):
    """Answers again with the difference that it sent the first time, although parts of it may be there."""

    def _acknowledge(self, *args: Any) -> list[Effect]:
        effects = super()._acknowledge(*args)
        for client in self.clients.values():
            for slot, kept in client.snapshots.items():
                client.snapshots[slot] = replace(kept, params=self._values.params.copy())
        return effects


def test_a_snapshot_that_is_what_was_meant_instead_of_what_arrived_is_found(small_parts: None) -> None:
    plan = planned(0, NONE, Compression("int8"), **DELAYED)
    with pytest.raises(Violation, match="it keeps other parameters"):
        told(replace(plan, shard=TodaysDifference), gradients=Quadratic(64))


def test_a_worker_that_keeps_what_it_held_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nothing_missing(one_leaves(planned(), 7.5))
    monkeypatch.setattr(Pusher, "_flushed", lambda self, k, grads: grads)
    assert not nothing_missing(one_leaves(planned(), 7.5))


class AppliesParts(Shard):
    """Applies a part that left early when it comes, and nothing of it at the commit."""

    def _push(self, now: float, peer: PeerId, client: Client, push: Push) -> list[Effect]:
        effects = super()._push(now, peer, client, push)
        staged = client.staged.get(push.slot)
        if staged is not None and not push.commit:
            for piece in push.grads:
                self._values.params[push.offset : push.offset + piece.size] -= piece
                staged.pieces[push.offset] = np.zeros_like(piece)
        return effects


def test_a_part_that_is_applied_before_the_commit_is_found(monkeypatch: pytest.MonkeyPatch, small_parts: None) -> None:
    bad = frozenset({(0, 13)})
    whole = told(planned(), early=True, bad=bad).counts()
    monkeypatch.setitem(_SERVED, Push, AppliesParts._push)
    found = told(planned(shard=AppliesParts), early=True, bad=bad).counts()
    assert np.array_equal(np.minimum(whole, found), whole) and found.sum() > whole.sum() == 2 * (NUM_BATCHES - 1)


class Hasty(Mute):
    """Computes in a slot whose gradient is on its way."""

    def _next_step(self, now: float) -> list[Effect]:
        slot = self.slots[self.front]
        if slot.exchange is not None and self.grants and self.open:
            return self._compute(now, slot)
        return super()._next_step(now)

    def _push(self, now: float, slot: Slot, done: Gradient) -> list[Effect]:
        pushed = super()._push(now, slot, done)
        return [*pushed, *self._idle(now)] if self.slots[self.front].exchange else pushed


@pytest.mark.parametrize("path", ["arena", "relay"])
def test_a_worker_that_computes_on_what_is_being_sent_is_found(path: str) -> None:
    plan = planned(1, num_workers=1)
    run: dict[str, Any] = {"faults": Faults(tampers=(Tamper(Kind.ACK, times=999, late_s=1.7),))}
    run["gradients"] = Quadratic(64)
    told(plan, 1, [path], **run)
    with pytest.raises(InvariantError, match=r"moved|it keeps"):
        told(replace(plan, worker=Hasty), 1, [path], **run)
