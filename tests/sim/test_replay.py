"""Simulated runs with faults, computed again from what their shards recorded: the same bits, whatever the rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from zasgd.core.messages import Array, Grant
from zasgd.core.parameters import ShardConfig
from zasgd.core.region import Memory
from zasgd.core.replay import PUSHES, Replay, ReplayError, ShardReplay
from zasgd.core.rules import GroupSpec, RuleSpec
from zasgd.core.run import BrokerConfig
from zasgd.core.schedule import Schedule
from zasgd.core.shard import Shard
from zasgd.core.transfer import Gradient
from zasgd.core.worker import GradientTask, WorkerConfig
from zasgd.sim.cluster import RUN, Cluster, Plan
from zasgd.sim.faults import Faults, scattered_kills


class Recording(Shard):
    """Records what moves its parameters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, records=True, **kwargs)


class RecordingPushes(Shard):
    """Records the gradients too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, records=True, records_pushes=True, **kwargs)


PLAIN = (GroupSpec(), GroupSpec(weight_decay=1e-4))
MOMENTUM = (GroupSpec(momentum=0.9), GroupSpec(momentum=0.9, weight_decay=1e-4))
ADAMW = (GroupSpec(algorithm="adamw"), GroupSpec(algorithm="adamw", weight_decay=1e-2))
RULES: dict[str, tuple[RuleSpec, tuple[GroupSpec, ...]]] = {
    "dc-asgd-a": (RuleSpec("dc-asgd-a"), MOMENTUM),
    "dana+ga": (RuleSpec("dana+ga"), MOMENTUM),
    "sync with backups": (RuleSpec("asgd", mode="sync", quorum=2), PLAIN),
    "buffer": (RuleSpec("dc-asgd-c", mode="buffer", quorum=3), ADAMW),
    "block": (RuleSpec("asgd", max_lag=4, lag_policy="block"), PLAIN),
    "drop": (RuleSpec("asgd", max_lag=2, lag_policy="drop"), PLAIN),
    "several batches": (RuleSpec("asgd", push_every=3), PLAIN),
    "delta": (RuleSpec("delta", push_every=2), PLAIN),
    "guard": (RuleSpec("gap-aware", guard=True), MOMENTUM),
}
STORM = Faults(
    drop=0.02,
    duplicate=0.05,
    delay=0.1,
    kills=scattered_kills([f"worker-{i}" for i in range(4)], 4, start_s=5.0, stop_s=60.0, restart_s=(1.0, 5.0), seed=3),
)


def run(rule: str, shard: type[Shard], faults: Faults | None = None, inflight: int = 0) -> Cluster:
    spec, groups = RULES[rule]
    plan = Plan(num_samples=160, rule=spec, groups=groups, shard=shard, member=WorkerConfig(inflight=inflight))
    config = BrokerConfig(
        RUN, "{}", plan.num_shards, plan.epochs, plan.batch_size, shard_config(plan).to_json(), len(groups),
        lease_s=plan.lease_s, push_every=spec.push_every,
    )  # fmt: skip
    cluster = Cluster(replace(plan, config=config), 7, faults=faults)
    cluster.run(3000.0)
    assert cluster.broker.run.outcome == "completed"
    return cluster


def shard_config(plan: Plan) -> ShardConfig:
    schedule = Schedule(lr=plan.lr, epochs=plan.epochs)
    return ShardConfig(plan.num_shards, plan.rule, plan.groups, schedule, inflight=plan.member.inflight)


def replays(cluster: Cluster) -> list[ShardReplay]:
    """From rows that went to disk and came back."""
    plan, config = cluster.plan, shard_config(cluster.plan)
    found = []
    for number in range(plan.num_shards):
        name = next(n for n, p in cluster.world.processes.items() if getattr(p.node, "number", None) == number)
        head, *rows = (msgpack.unpackb(msgpack.packb(row)) for row in cluster.world.records[name])
        assert head[:2] == ["shard", number]
        found.append(ShardReplay(config, plan.layout, number, plan.num_samples, rows))
    return found


def again(cluster: Cluster, shards: list[ShardReplay]) -> int:
    """Run the replay; how many gradients it computed."""
    count = 0

    def compute(_incarnation: int, grants: tuple[Grant, ...], vectors: dict[str, Array], _samples: int) -> Gradient:
        nonlocal count
        count += 1
        memory = Memory(**vectors, grads=np.empty_like(vectors["params"]))
        return cluster.work._gradient(GradientTask(grants, memory))

    Replay(cluster.plan.layout, shards, dict(cluster.initial), compute).run()
    return count


@pytest.mark.parametrize("faults", [None, STORM], ids=["quiet", "storm"])
@pytest.mark.parametrize("rule", RULES)
def test_a_run_computed_again_has_the_same_bits(rule: str, faults: Faults | None) -> None:
    replays_alike(run(rule, Recording, faults))


@pytest.mark.parametrize("rule", ["dc-asgd-a", "buffer", "several batches", "drop"])
def test_a_run_with_a_push_on_its_way_computed_again_has_the_same_bits(rule: str) -> None:
    """A worker's two slots are told apart: it computes on one while the other's push is under way."""
    cluster = run(rule, Recording, STORM, inflight=1)
    slots = {row[-2] for rows in cluster.world.records.values() for row in rows if row[0] in PUSHES}
    assert slots == {0, 1}
    replays_alike(cluster)


def replays_alike(cluster: Cluster) -> None:
    shards = replays(cluster)
    assert again(cluster, shards) > 0
    for shard in shards:
        values = cluster.shard(shard.number).values
        assert values is not None and shard.ended
        assert np.array_equal(shard.values.params, values.params) and shard.values.version == values.version
        assert np.array_equal(shard.values.stats, values.stats) and shard.values.lags == values.lags


@pytest.mark.parametrize("rule", ["dana+ga", "sync with backups", "buffer"])
def test_recorded_pushes_need_no_gradient(rule: str) -> None:
    cluster = run(rule, RecordingPushes, STORM)
    shards = replays(cluster)
    assert again(cluster, shards) == 0
    for shard in shards:
        values = cluster.shard(shard.number).values
        assert values is not None and np.array_equal(shard.values.params, values.params)


def a_record_of(cluster: Cluster, shard: int, what: str) -> tuple[list[ShardReplay], int]:
    shards = replays(cluster)
    return shards, [i for i, row in enumerate(shards[shard].rows) if row[0] == what][20]


def test_what_was_recorded_otherwise_is_found() -> None:
    cluster = run("dc-asgd-a", Recording)
    for column, value, says in (
        (1, 3, "version"), (5, 0, "computed on"), (6, 9, "lag"), (8, 0.5, "learning rate"), (14, 1, "pulled nothing")
    ):  # fmt: skip
        shards, at = a_record_of(cluster, 1, "apply")
        shards[1].rows[at][column] = value
        with pytest.raises(ReplayError, match=f"shard 1, row {at + 1}: {says}|{says}"):
            again(cluster, shards)


def test_a_batch_that_was_another_leads_to_other_parameters() -> None:
    cluster = run("dc-asgd-a", Recording)
    shards, at = a_record_of(cluster, 0, "apply")
    for shard in shards:
        row = next(r for r in shard.rows if r[0] == "apply" and r[3:5] == shards[0].rows[at][3:5])
        row[11] = [[0, (row[11][0][1] + 1) % 20, *row[11][0][2:]]]
    with pytest.raises(ReplayError, match="digest"):
        again(cluster, shards)


def test_records_that_lack_an_answer_do_not_hang() -> None:
    cluster = run("dc-asgd-a", Recording)
    shards, at = a_record_of(cluster, 1, "apply")
    del shards[1].rows[at]
    with pytest.raises(ReplayError):
        again(cluster, shards)


def test_an_unknown_row_is_named() -> None:
    cluster = run("dc-asgd-a", Recording)
    shards = replays(cluster)
    shards[0].rows.insert(5, ["sold", 1])
    with pytest.raises(ReplayError, match="shard 0, row 6: a row 'sold' is unknown"):
        again(cluster, shards)
