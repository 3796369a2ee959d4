"""The real broker, shards and workers in virtual time: storms, deaths, pauses, joins, leaves, and the end.

Every message goes through the real wire. An independent observer checks every event; `settle` checks the books.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.sim.test_world import Toy, digest_in_a_new_process
from zasgd.core import wire
from zasgd.core.messages import Drain, Expel, Kind, Message, StopMsg
from zasgd.core.node import BROKER, Effect, PeerId, Send, Stop
from zasgd.core.rules import GroupSpec, RuleSpec
from zasgd.core.run import RunPhase
from zasgd.core.wire import split
from zasgd.sim.cluster import Cluster, Plan, small_layout
from zasgd.sim.faults import Faults, Kill, Pause, Tamper, scattered_kills
from zasgd.sim.invariants import Tallies
from zasgd.sim.problems import Tally
from zasgd.sim.world import State

STORM = Faults(drop=0.02, duplicate=0.02, stall=0.01)
SMALL = Plan(num_workers=3, num_samples=128, batch_size=8, epochs=6, step_s=1.0)
"""About 32 virtual seconds."""
ALL = Tallies(once=768, torn=0, none=0)


def workers(count: int) -> list[str]:
    return [f"worker-{i}" for i in range(count)]


def finished(cluster: Cluster, until_s: float = 1000.0) -> Tallies:
    """Run to the end; everybody who lives has ended by itself, and the books are right."""
    cluster.run(until_s)
    states = {name: p.state.value for name, p in cluster.world.processes.items()}
    assert cluster.over, f"{states} at {cluster.world.now:.0f} s, {cluster.broker.run.phase}"
    assert cluster.broker.run.outcome == "completed", cluster.world.noted("run_failed")
    return cluster.settle()


def events(cluster: Cluster, event: str) -> list[Any]:
    return [note.fields for note in cluster.world.noted(event)]


def visit(cluster: Cluster, at_s: float, *messages: Message) -> str:
    """Somebody sends the broker these messages at `at_s`; returns the visitor's process name."""
    name = f"visitor at {at_s:g}"
    requests: list[Effect] = [Send(BROKER, message) for message in messages]
    cluster.world.add(name, lambda now, life: Visitor(now, life, starts_with=requests), at_s=at_s)
    return name


class Visitor(Toy):
    """Asks once and goes away with the answer."""

    def on_message(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        return [*super().on_message(now, peer, msg), Stop("answered")]


# ---- without faults ----------------------------------------------------------------------------------


def test_a_quiet_run_computes_every_batch_once_and_everybody_goes_home() -> None:
    cluster = Cluster(replace(SMALL, evaluator=True), seed=1)
    assert finished(cluster) == ALL
    codes = [p.stop.code for p in cluster.world.processes.values() if p.stop is not None]
    assert codes == [0] * 7
    assert cluster.world.trace.counts["lost"] == 0
    assert sorted(tally["epoch"] for tally in events(cluster, "epoch_completed")) == [0, 1, 2, 3, 4, 5]
    assert events(cluster, "evaluated")[-1]["final"] is True


def counting_plan(**more: Any) -> Plan:
    """Plain ASGD at lr 1 on two shards of 32 elements: each applied push adds 1 to its batch's element."""
    plain = {"rule": RuleSpec("asgd"), "groups": (GroupSpec(), GroupSpec()), "lr": 1.0}
    return replace(SMALL, layout=small_layout(64), **plain, **more)


def final_counts(cluster: Cluster) -> np.ndarray[Any, Any]:
    """How often each batch was applied, by shard: what the parameters that the broker saved say."""
    flat = np.zeros(64, np.float32)
    for section, start, values in cluster.world.saved["broker", "params"]["pieces"]:
        if section == "params":
            flat[start : start + values.size] = values
    return flat.reshape(2, 32)[:, :16]


def test_the_parameters_themselves_say_that_each_batch_was_applied_once_per_epoch() -> None:
    cluster = Cluster(counting_plan(), seed=2, gradients=Tally(stride=32))
    assert finished(cluster) == ALL
    assert np.array_equal(final_counts(cluster), np.full((2, 16), 6.0))


def test_the_parameters_agree_after_a_storm_with_deaths() -> None:
    kills = scattered_kills(workers(3), 6, start_s=2, stop_s=40, restart_s=(0.5, 5), seed=5)
    storm = Faults(drop=0.05, duplicate=0.05, stall=0.02, until_s=60, kills=kills)
    cluster = Cluster(counting_plan(), seed=6, gradients=Tally(stride=32), faults=storm)
    tallies = finished(cluster)
    counts = final_counts(cluster)
    assert counts.max() <= 6
    assert list(counts.sum(axis=1)) == [cluster.shard(k).version for k in range(2)]
    assert counts.min(axis=0).sum() * 8 == pytest.approx(tallies.once, abs=tallies.torn)
    assert tallies.once + tallies.torn == 768


# ---- storms ------------------------------------------------------------------------------------------


def hour(seed: int, until_s: float = 3600.0, deaths: int = 60) -> Cluster:
    """8 workers, 2 shards, steps of 2 s +-50 %, 2 % loss and duplicates, 1 % stalls of 30 s, `deaths` kills."""
    kills = scattered_kills(workers(8), deaths, start_s=20, stop_s=until_s - 30, restart_s=(1, 20), seed=seed)
    plan = Plan(num_workers=8, num_samples=4096, epochs=100)
    cluster = Cluster(plan, seed, faults=replace(STORM, kills=kills))
    cluster.run(until_s)
    return cluster


def short_digest(seed: int) -> str:
    return hour(seed, 120.0, deaths=15).world.trace.digest()


@pytest.mark.parametrize("quarters", [1, pytest.param(4, marks=pytest.mark.slow)], ids=["a quarter", "the hour"])
def test_an_hour_of_storm_with_sixty_deaths_keeps_every_invariant_in_under_a_minute(quarters: int) -> None:
    """An ordinary run takes a quarter of it: of the time, the deaths and the minute."""
    began = time.process_time()
    cluster = hour(seed=1, until_s=900.0 * quarters, deaths=15 * quarters)
    assert time.process_time() - began < 15 * quarters
    assert cluster.broker.run.phase is RunPhase.TRAINING
    assert cluster.world.trace.counts["killed"] == 15 * quarters
    assert min(record.version for record in cluster.observer.shards.values()) > 2_500 * quarters
    seen = cluster.observer.tallies(cluster.plan.grid)
    ledger = cluster.broker.run.books
    assert ledger is not None
    assert ledger.skipped == 0
    assert 0 <= seen.once - ledger.once <= 8 * 8 * 64, "the ledger lags by what is not yet reported"
    cluster.tables.check(450.0 * quarters, at_most=2000, slack=16)


def test_the_trace_is_the_same_in_two_processes_with_other_string_hashes() -> None:
    found = {digest_in_a_new_process("test_protocol", "short_digest(9)", hash_seed) for hash_seed in (1, 5)}
    assert found == {short_digest(9)}


@pytest.mark.parametrize("seed", range(6))
def test_a_run_through_a_storm_completes(seed: int) -> None:
    kills = scattered_kills(workers(4), 5, start_s=0.5, stop_s=60, restart_s=(0.1, 15), seed=seed)
    pauses = (Pause("worker-2", 9.0, 12.0), Pause("worker-3", 20.0, 3.0))
    storm = Faults(drop=0.06, duplicate=0.06, stall=0.03, until_s=120, kills=kills, pauses=pauses)
    plan = replace(SMALL, num_workers=4, num_shards=1 + seed % 3, evaluator=bool(seed % 2))
    tallies = finished(Cluster(plan, seed, faults=storm))
    assert tallies.once + tallies.torn == 768


def test_a_storm_over_messages_of_many_parts_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 64 bytes: gradients, seeds and parameters each travel in many messages, lost one by one."""
    monkeypatch.setattr(wire, "split", lambda flat, *limit: split(flat, 64))
    kills = scattered_kills(workers(3), 3, start_s=0.5, stop_s=60, restart_s=(0.1, 15), seed=21)
    cluster = Cluster(SMALL, seed=21, faults=replace(STORM, drop=0.04, until_s=120.0, kills=kills))
    tallies = finished(cluster)
    assert tallies.once + tallies.torn == 768
    assert sum(cluster.shard(k).refusals["INCOMPLETE"] for k in range(2)) > 0


# ---- coming and going --------------------------------------------------------------------------------


def test_a_newcomer_works_within_seconds_and_the_others_do_not_notice() -> None:
    cluster = Cluster(SMALL, seed=3)
    cluster.add_worker("newcomer", name="late", at_s=10.0, data_path="direct")
    assert finished(cluster) == ALL
    joined = [at for at, who, note in cluster.world.notes if note.event == "joined" and who == "newcomer"]
    assert 10.0 <= joined[0] < 11.0
    assert cluster.world.node("newcomer").steps > 5
    assert not events(cluster, "fenced")


def test_a_drained_worker_finishes_its_batch_gives_the_rest_back_and_leaves() -> None:
    cluster = Cluster(SMALL, seed=4)
    visitor = visit(cluster, 10.2, Drain(target="1"))
    assert finished(cluster) == ALL
    assert "finishes its batch" in cluster.world.node(visitor).texts[0]
    [left] = [f for f in events(cluster, "worker_left") if f["reason"] == "drained"]
    assert left["worker"] == 1
    assert not events(cluster, "worker_lost")


@pytest.mark.parametrize("at_s", [0.3, 0.501, 0.6, 5.0, 5.5, 6.0])
def test_a_worker_told_to_terminate_leaves_nothing_behind_at_any_moment(at_s: float) -> None:
    cluster = Cluster(SMALL, seed=5)
    terminate = lambda worker, now: worker.leave(now, "SIGTERM")  # noqa: E731
    cluster.world.at(at_s, lambda: cluster.world.signal("worker-0", terminate))
    assert finished(cluster) == ALL
    process = cluster.world.processes["worker-0"]
    assert process.stop is not None and process.stop.code == 0


def test_a_worker_stopped_beyond_its_lease_loses_its_batches_and_joins_anew() -> None:
    """Its late push finds the fence; what it held was computed by others meanwhile."""
    cluster = Cluster(SMALL, seed=6, faults=Faults(pauses=(Pause("worker-0", 5.3, 20.0),)))
    assert finished(cluster) == ALL
    [lost] = events(cluster, "worker_lost")
    assert lost["reason"] == "lease ran out"
    [fenced] = events(cluster, "fenced")
    assert fenced["incarnation"] == lost["incarnation"]
    assert cluster.world.node("worker-0").num_lives == 2
    assert cluster.broker.run.books is not None and cluster.broker.run.books.reissued > 0


def test_a_pause_shorter_than_the_lease_costs_nothing() -> None:
    cluster = Cluster(SMALL, seed=6, faults=Faults(pauses=(Pause("worker-0", 5.3, 5.0),)))
    assert finished(cluster) == ALL
    assert not events(cluster, "worker_lost")


@pytest.mark.parametrize("for_s", [3.0, 45.0, 3600.0])
def test_everything_stopped_at_once_goes_on_where_it_was(for_s: float) -> None:
    """Ctrl-Z on the whole run: nobody is dead, nobody was silent."""
    everybody = ["broker", "shard-0", "shard-1", *workers(3)]
    pauses = tuple(Pause(name, 6.0, for_s) for name in everybody)
    cluster = Cluster(SMALL, seed=7, faults=Faults(pauses=pauses))
    assert finished(cluster, 5000.0) == ALL


def test_a_push_on_the_wire_when_its_worker_dies_is_refused_after_the_fence() -> None:
    late = Tamper(Kind.PUSH, nth=7, times=99, sender="worker-0", late_s=20.0)
    kill = Kill("worker-0", at_s=9.0)
    cluster = Cluster(SMALL, seed=8, faults=Faults(tampers=(late,), kills=(kill,)))
    assert finished(cluster) == ALL
    assert all(cluster.shard(k).refusals["FENCED"] >= 1 for k in range(2))


def test_a_worker_that_dies_between_its_pushes_tears_one_batch() -> None:
    """Shard 1 never sees the push that shard 0 applied, nor any probe for it."""
    lost = [Tamper(kind, nth=nth, times=999, sender="worker-0", receiver="shard-1", lose=True)
            for kind, nth in ((Kind.PUSH, 4), (Kind.PROBE, 1))]  # fmt: skip
    cluster = Cluster(SMALL, seed=9, faults=Faults(tampers=tuple(lost), kills=(Kill("worker-0", at_s=12.0),)))
    tallies = finished(cluster)
    assert tallies == Tallies(once=760, torn=8, none=0)
    assert abs(cluster.shard(0).version - cluster.shard(1).version) == 1


def test_a_batch_without_a_finite_gradient_is_tried_twice_and_skipped() -> None:
    cluster = Cluster(SMALL, seed=10, bad=frozenset({(0, 3), (1, 5)}))
    assert finished(cluster) == Tallies(once=752, torn=0, none=16)
    assert [f["reason"] for f in events(cluster, "batch_refused")] == ["nonfinite"] * 4


def test_workers_without_a_batch_ask_a_few_times_a_second_and_no_more() -> None:
    """Six workers, one batch left for each of three: the idle ones must not spin on the broker."""
    cluster = Cluster(replace(SMALL, num_workers=6, num_samples=24, epochs=1, step_s=20.0), seed=22)
    assert finished(cluster) == Tallies(24, 0, 0)
    assert cluster.world.now > 15.0
    assert cluster.world.trace.counts["sent RENEW"] < 6 * 5 * cluster.world.now


def test_a_second_process_with_the_same_name_takes_the_first_ones_place() -> None:
    cluster = Cluster(replace(SMALL, num_workers=1), seed=11)
    cluster.add_worker("first", name="twin")
    cluster.add_worker("second", name="twin", at_s=8.0)
    assert finished(cluster) == ALL
    stopped = cluster.world.processes["first"].stop
    assert stopped is not None and "took this one's place" in stopped.reason
    [rejoined] = [f for f in events(cluster, "worker_joined") if f["rejoined"]]
    assert rejoined["name"] == "twin"


def test_nobody_left_for_hours_and_then_one_comes() -> None:
    cluster = Cluster(SMALL, seed=12, faults=Faults(kills=tuple(Kill(w, at_s=10.0) for w in workers(3))))
    cluster.add_worker("rescuer", at_s=3 * 3600.0)
    assert finished(cluster, 4 * 3600.0) == ALL
    idle = [at for at, _, note in cluster.world.notes if 60 < at < 3 * 3600 and note.event != "progress"]
    assert idle == []


@pytest.mark.parametrize("reported", [True, False])
@pytest.mark.parametrize("sends", [2, 3, 4, 5, 6, 7])
def test_a_seeder_that_dies_at_any_moment_is_replaced(sends: int, reported: bool) -> None:
    """Whether the supervisor reports its exit at once or its lease must run out."""
    cluster = Cluster(SMALL, seed=13, faults=Faults(kills=(Kill("worker-0", after_sends=sends),)))
    if reported:
        for at_s in (0.51, 0.515, 0.52, 0.53, 0.6):
            visit(cluster, at_s, Expel(host="worker-0", pid=1))
    assert finished(cluster) == ALL


def test_a_run_does_not_open_on_what_a_dead_seeder_left() -> None:
    """Both shards report that they are seeded when they have been told to forget it already."""
    tampers = (
        Tamper(Kind.RENEW, nth=2, sender="shard-0", late_s=0.5),
        Tamper(Kind.RENEW, nth=2, sender="shard-1", late_s=0.5),
        Tamper(Kind.FENCED, times=2, lose=True),
    )
    kill = Kill("worker-0", at_s=0.6)
    cluster = Cluster(replace(SMALL, num_workers=1), seed=13, faults=Faults(tampers=tampers, kills=(kill,)))
    cluster.add_worker("second", at_s=0.55)
    visit(cluster, 0.7, Expel(host="worker-0", pid=1))
    assert finished(cluster) == ALL


def test_a_lost_evaluator_stops_nobody() -> None:
    for restart_after_s in (None, 5.0):
        kill = Kill("evaluator", at_s=10.0, restart_after_s=restart_after_s)
        cluster = Cluster(replace(SMALL, evaluator=True), seed=14, faults=Faults(kills=(kill,)))
        assert finished(cluster) == ALL
        assert any(e["final"] for e in events(cluster, "evaluated")) == (restart_after_s is not None)
        assert (("broker", "params") in cluster.world.saved) == (restart_after_s is None)


def test_a_lost_shard_ends_the_run_with_code_3_everywhere() -> None:
    cluster = Cluster(SMALL, seed=15, faults=Faults(kills=(Kill("shard-1", at_s=10.0),)))
    cluster.run(200.0)
    assert cluster.over and cluster.broker.run.outcome == "failed"
    codes = {n: p.stop.code for n, p in cluster.world.processes.items() if p.stop is not None}
    assert codes == dict.fromkeys(["broker", "shard-0", *workers(3)], 3)
    assert "shard" in events(cluster, "run_failed")[0]["reason"]


@pytest.mark.parametrize(("interrupted", "outcome"), [(True, "interrupted"), (False, "stopped")])
def test_a_run_that_is_stopped_ends_everybody_within_seconds(interrupted: bool, outcome: str) -> None:
    cluster = Cluster(replace(SMALL, evaluator=True), seed=16)
    visit(cluster, 10.0, StopMsg(interrupted=interrupted, reason="asked"))
    cluster.run(200.0)
    assert cluster.over and cluster.broker.run.outcome == outcome
    assert cluster.world.now < 15.0
    seen = cluster.observer.tallies(cluster.plan.grid)
    assert 0 < seen.once < 768


def test_a_lost_broker_ends_everybody_with_code_3() -> None:
    cluster = Cluster(SMALL, seed=17, faults=Faults(kills=(Kill("broker", at_s=10.0),)))
    cluster.world.run(200.0)
    stops = {n: p.stop for n, p in cluster.world.processes.items() if n != "broker"}
    assert {n: stop.code for n, stop in stops.items() if stop} == dict.fromkeys(stops, 3)


def test_an_order_to_admit_that_comes_long_after_the_end_of_a_life_admits_nobody() -> None:
    """The worker sleeps past its lease; a copy of its ADMIT reaches a shard when its fence is forgotten."""
    late = Tamper(Kind.ADMIT, nth=1, times=6, copies=1, copy_after_s=24.0)
    pause = Pause("worker-0", 5.3, 20.0)
    cluster = Cluster(SMALL, seed=18, faults=Faults(tampers=(late,), pauses=(pause,)))
    cluster.run(30.0)
    living = {m.incarnation for m in cluster.broker.run.members.of("worker")}
    for k in range(2):
        assert set(cluster.shard(k).clients) <= living
    assert finished(cluster) == ALL


def test_nothing_is_lost_or_kept_when_a_hundred_short_lives_come_and_go() -> None:
    kills = scattered_kills(workers(4), 100, start_s=2, stop_s=250, restart_s=(0.5, 3), seed=19)
    cluster = Cluster(replace(SMALL, num_workers=4, epochs=60), seed=19, faults=Faults(kills=kills))
    tallies = finished(cluster, 3000.0)
    assert tallies.once + tallies.torn == 60 * 128
    assert cluster.world.trace.counts["killed"] > 90
    assert len(cluster.broker.run.members.members) <= 1
    assert all(len(cluster.shard(k).fenced) <= 8 for k in range(2))


def test_a_storm_stalls_nobody_for_ever() -> None:
    """After the last fault every process is either working or has ended: no state is a dead end."""
    cluster = Cluster(SMALL, seed=20, faults=replace(STORM, drop=0.15, until_s=40.0))
    finished(cluster)
    assert all(p.state is State.STOPPED for p in cluster.world.processes.values())
