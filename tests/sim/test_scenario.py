"""What `zasgd simulate` is told: texts that mean something, texts that are refused with one line, and their effect."""

import math
from dataclasses import replace

import numpy as np
import pytest

from zasgd.sim.cluster import Cluster, Plan, small_layout
from zasgd.sim.faults import Link
from zasgd.sim.invariants import Tallies
from zasgd.sim.problems import GammaTimes
from zasgd.sim.scenario import (
    Arrival,
    ScenarioError,
    apply_churn,
    churn_csv,
    parse_churn,
    parse_network,
    parse_speeds,
    spot_trace,
)

# ---- speeds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["homogeneous", " heterogeneous\n"])
def test_a_named_speed_is_the_generator_of_the_papers(name: str) -> None:
    times, same = parse_speeds(name, 0.5, 3), GammaTimes(0.5, heterogeneous="hetero" in name, seed=3)
    machines = ["worker-0", "worker-1", "worker-0"]
    assert [times.next(m) for m in machines] == [same.next(m) for m in machines]
    assert times.mean_s == 0.5


def test_a_table_of_task_times_is_replayed() -> None:
    times = parse_speeds("# measured on Monday\nworker,seconds\n0,1.5\n1,4\n\n0, 2.5\n", 9.0, 0)
    assert [times.next("worker-0") for _ in range(3)] == [1.5, 2.5, 1.5]
    assert [times.next("worker-1") for _ in range(2)] == [4.0, 4.0]
    assert times.mean_s == 3.0


def test_a_table_of_means_gives_tasks_around_them() -> None:
    times = parse_speeds("worker,mean_s\n0,1\nfast-one,0.1\n", 9.0, 4)
    assert np.mean([times.next("fast-one") for _ in range(300)]) == pytest.approx(0.1, rel=0.05)
    assert np.mean([times.next("worker-0") for _ in range(300)]) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("homogenous", "speeds line 1: 'homogenous' is neither homogeneous nor heterogeneous nor the header"),
        ("", "speeds: '' is neither"),
        ("0,1.5\n1,2\n", "speeds line 1: '0,1.5' is neither"),
        ("worker,seconds\n", "speeds line 1: no worker follows"),
        ("worker,seconds\n0,1\n\n0,fast\n", "speeds line 4: 'fast' is not a number of seconds over 0"),
        ("worker,seconds\n0,0\n", "speeds line 2: '0' is not a number of seconds over 0"),
        ("worker,seconds\n0,nan\n", "speeds line 2: 'nan'"),
        ("worker,seconds\n0,inf\n", "speeds line 2: 'inf'"),
        ("worker,seconds\n0\n", "speeds line 2: 1 columns, not 2"),
        ("worker,seconds\nshard-1,2\n", "speeds line 2: 'shard-1' is no worker"),
        ("worker,mean_s\n3,1\nworker-3,2\n", "speeds line 3: worker-3 has a mean already"),
    ],
)
def test_speeds_that_mean_nothing_are_refused_with_the_line(text: str, said: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        parse_speeds(text, 1.0, 0)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


# ---- network -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("0.2,10", Link(0.0002, 0.0, 1.25e9)),
        (" 5 , 1 ", Link(0.005, 0.0, 1.25e8)),
        ("0,0", Link(0.0, 0.0, math.inf)),
        ("1,inf", Link(0.001, 0.0, math.inf)),
    ],
)
def test_a_network_is_a_latency_and_a_rate(text: str, link: Link) -> None:
    assert parse_network(text) == link


@pytest.mark.parametrize("text", ["", "5", "1,2,3", "a,1", "-1,1", "1,-1", "inf,1", "nan,1", "1,nan"])
def test_a_network_that_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ScenarioError, match=r"is not LATENCY_MS,GBIT, such as 0\.2,10"):
        parse_network(text)


# ---- churn -------------------------------------------------------------------------------------------


def test_a_churn_table_is_read_in_order_of_time_with_or_without_a_header() -> None:
    body = "20,0,leave\n5.5,spot-a,join\n# lunch\n20.5,1,kill\n30,worker-0,join\n"
    wanted = (
        Arrival(5.5, "spot-a", "join"),
        Arrival(20.0, "worker-0", "leave"),
        Arrival(20.5, "worker-1", "kill"),
        Arrival(30.0, "worker-0", "join"),
    )
    assert parse_churn(body, 2) == wanted
    assert parse_churn("time,worker,action\n" + body, 2) == wanted
    assert parse_churn(churn_csv(wanted), 2) == wanted
    assert parse_churn("", 2) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5,0,halt", "churn line 1: action 'halt' is none of join, leave, kill"),
        ("time,worker,action\nsoon,0,kill", "churn line 2: time 'soon' is not a number of seconds"),
        ("-1,0,kill", "churn line 1: time '-1'"),
        ("nan,0,kill", "churn line 1: time 'nan'"),
        ("1,0", "churn line 1: 2 columns, not 3 (time,worker,action)"),
        ("1,broker,kill", "churn line 1: 'broker' is no worker"),
        ("1,,kill", "churn line 1: '' is no worker"),
        ("1,9,leave", "churn line 1: worker-9 cannot leave, it has not joined"),
        ("1,9,join\n2,9,kill\n3,9,leave", "churn line 3: worker-9 cannot leave"),
        ("9,9,join\n2,9,kill", "churn line 2: worker-9 cannot kill"),
        ("1,1,join", "churn line 1: worker-1 joins, but it is there already"),
        ("1,9,join\n1,9,join", "churn line 2: worker-9 has another action at that time, see churn line 1"),
        ("1,0,leave\n1,0,join", "churn line 2: worker-0 has another action at that time"),
    ],
)
def test_churn_that_cannot_be_is_refused_with_the_line(text: str, said: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        parse_churn(text, 2)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_a_spot_trace_is_legal_repeats_itself_and_has_the_rate_asked_for() -> None:
    trace = spot_trace(16, 8 * 3600.0, mean_life_s=3600.0, mean_gap_s=120.0, warned=0.25, seed=6)
    assert trace == spot_trace(16, 8 * 3600.0, mean_life_s=3600.0, mean_gap_s=120.0, warned=0.25, seed=6)
    assert trace != spot_trace(16, 8 * 3600.0, mean_life_s=3600.0, mean_gap_s=120.0, warned=0.25, seed=7)
    assert parse_churn(churn_csv(trace), 16) == trace
    ends = [a for a in trace if a.what != "join"]
    assert len(ends) == pytest.approx(16 * 8 * 3600 / 3720, rel=0.2)
    assert sum(a.what == "leave" for a in ends) / len(ends) == pytest.approx(0.25, abs=0.1)
    assert {a.worker for a in trace if a.what == "join"} == {f"worker-{n}" for n in range(16, 16 + len(ends))} & {
        a.worker for a in trace
    }


def test_a_spot_trace_never_takes_the_last_machine() -> None:
    assert spot_trace(1, 1e5, mean_life_s=100.0, mean_gap_s=100.0) == ()
    present = least = 2
    for arrival in spot_trace(2, 1e5, mean_life_s=100.0, mean_gap_s=1000.0, seed=1):
        present += 1 if arrival.what == "join" else -1
        least = min(least, present)
    assert least == 1


# ---- in a run ----------------------------------------------------------------------------------------

PLAN = Plan(num_workers=3, num_samples=128, batch_size=8, epochs=6, step_s=1.0)
"""About 32 virtual seconds with three workers."""


def told(plan: Plan, text: str) -> Cluster:
    """A whole run with this churn; its books are right."""
    cluster = Cluster(plan, seed=1)
    apply_churn(parse_churn(text, plan.num_workers), cluster)
    cluster.run(1000.0)
    assert cluster.broker.run.outcome == "completed"
    assert cluster.settle() == Tallies(once=768, torn=0, none=0)
    return cluster


def times_of(cluster: Cluster, event: str, who: str) -> list[float]:
    return [at for at, name, note in cluster.world.notes if note.event == event and name == who]


def test_workers_come_go_and_come_back_as_told_and_no_sample_is_lost() -> None:
    cluster = told(PLAN, "5,7,join\n8,0,leave\n10,1,kill\n8.2,0,join\n15,1,join\n")
    [came_at] = times_of(cluster, "joined", "worker-7")
    assert 5.0 <= came_at < 6.0
    for name, back_at in (("worker-0", 8.2), ("worker-1", 15.0)):
        first, again = times_of(cluster, "joined", name)
        assert first < 1.0
        assert back_at <= again < back_at + 3.0
    assert [n.fields["reason"] for n in cluster.world.noted("worker_left")].count("told to leave") == 1
    assert cluster.world.trace.counts["killed"] == 1


def test_what_is_planned_for_after_the_end_keeps_nobody_waiting() -> None:
    cluster = told(PLAN, "5000,7,join\n4000,0,kill")
    assert cluster.world.now < 100.0
    assert "worker-7" not in cluster.world.processes


def test_a_run_over_a_narrow_line_takes_the_time_that_its_bytes_need() -> None:
    """384 pushes of 40 kB over 1 MB/s to one server, and the answer of one while the next comes in: 15.4 s."""
    ended = {}
    for rate in (math.inf, 1e6):
        layout = small_layout(10_000)
        plan = replace(PLAN, num_workers=8, num_shards=1, num_samples=512, layout=layout, step_s=0.1)
        cluster = Cluster(plan, seed=1, link=Link(0.001, 0.0, rate))
        cluster.run(1000.0)
        cluster.settle()
        ended[rate] = cluster.world.now
    assert ended[math.inf] < 10.0
    assert 384 * 40_000 / 1e6 < ended[1e6] < 1.25 * 384 * 40_000 / 1e6
