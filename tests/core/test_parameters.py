"""The values of one slice without a shard around it: lag, rate, clock, buffers, and what is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from zasgd.core.compress import decode_onto
from zasgd.core.compression import Compression
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.messages import Array, Grant, Push
from zasgd.core.node import InvariantError
from zasgd.core.optimizer import ShardOptimizer
from zasgd.core.parameters import MAX_LAG_BUCKET, Committed, Parameters, ShardConfig
from zasgd.core.rules import GroupSpec, RuleSpec, shard_groups
from zasgd.core.schedule import Schedule
from zasgd.core.snapshot import Snapshot

LAYOUT = Layout(
    (
        TensorSpec("w", (20,)),
        TensorSpec("b", (12,)),
        TensorSpec("mean", (3,), section="stats"),
        TensorSpec("count", (), "int64", "counters"),
    )
)
SIZE = LAYOUT.sizes["params"]
CONFIG = ShardConfig(1, RuleSpec("asgd"), (GroupSpec(),), Schedule(lr=1.0, epochs=10))


def values(rule: RuleSpec = CONFIG.rule, seed: bool = True, **config: Any) -> Parameters:
    found = Parameters(replace(CONFIG, rule=rule, **config), LAYOUT, 0, samples_per_epoch=100)
    if seed:
        found.seed([(0, np.zeros(SIZE, np.float32))])
    return found


def push(snapshot: Snapshot, grad: float | Array = 1.0, who: int = 11, samples: int = 10, **fields: Any) -> Committed:
    whole = np.broadcast_to(np.asarray(grad, np.float32), (SIZE,)).copy()
    grants = (Grant(0, 0, 0, samples),)
    return Committed(who, Push(layout_hash="", num_samples=samples, grants=grants, **fields), [(0, whole)], snapshot)


def pulled(shard: Parameters) -> Snapshot:
    """What a worker pulls, in an array of its own."""
    return shard.snapshot(np.full(shard.slice.size, 9, np.float32))


# ---- configuration -------------------------------------------------------------------------------------


def test_a_configuration_survives_its_json() -> None:
    config = ShardConfig(
        3,
        RuleSpec("dana+ga", max_lag=5, lag_policy="block", guard=True),
        (GroupSpec(momentum=0.9, weight_decay=1e-4), GroupSpec(lr_scale=0.5, momentum=0.9)),
        Schedule(lr=0.1, epochs=7, kind="step", milestones=(0.5, 0.75), warmup_epochs=1.5, warmup_from=0.1),
        window_bytes=77,
        inflight=1,
        pull=Compression("topk", 0.25),
    )
    assert ShardConfig.from_json(config.to_json()) == config


# ---- what is sent --------------------------------------------------------------------------------------


def test_what_is_sent_takes_the_place_of_what_the_push_was_computed_on() -> None:
    shard = values()
    first, other, seen = pulled(shard), pulled(shard), shard.observed()
    sent = shard.apply(push(first))
    assert sent.params is first.params and (sent.params == -1).all()
    again = shard.apply(push(sent))
    assert again.params is first.params and (again.params == -2).all() and (shard.params == -2).all()
    assert (again.version, sent.version) == (2, 1)
    assert (other.params == 0).all() and (seen.params == 0).all(), "what others were sent is left alone"
    assert not np.may_share_memory(again.params, shard.params)


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8", "topk"])
def test_of_a_compressed_answer_shard_and_worker_have_the_same_bits_and_nothing_is_lost(codec: str) -> None:
    shard, draw = values(pull=Compression(codec, 0.2)), np.random.default_rng(6)
    sent = pulled(shard)
    theirs = sent.params.copy()
    for i in range(40):
        grad = draw.standard_normal(SIZE).astype(np.float32) if i < 10 else 0.0
        sent = shard.apply(push(sent, grad))
        for part in sent.differences:
            decode_onto(codec, part.packed, theirs[part.start : part.start + part.size])
        assert sent.differences and sent.params.tobytes() == theirs.tobytes()
    assert theirs == pytest.approx(shard.params, abs=1e-6), "what one answer lacked came with a later one"
    at_hand = shard.apply(replace(push(sent), compressible=False))
    assert not at_hand.differences and at_hand.params.tobytes() == shard.params.tobytes()


def test_a_long_slice_is_compressed_in_parts_that_fit_into_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zasgd.core.parameters.MAX_ELEMENTS", 20)
    shard = values(pull=Compression("bf16"))
    sent = shard.apply(push(pulled(shard)))
    assert [(part.start, part.size) for part in sent.differences] == [(0, 20), (20, 20), (40, SIZE - 40)]


def test_buffers_and_what_an_observer_sees_can_never_be_written() -> None:
    shard = values()
    sent = shard.apply(push(pulled(shard)))
    frozen = [getattr(s, name) for s in (sent, shard.observed()) for name in ("stats", "counters")]
    for array in (*frozen, shard.observed().params):
        with pytest.raises(ValueError, match="read-only"):
            array[:1] = 9
    assert not np.may_share_memory(sent.stats, shard.stats)


def test_an_observer_sees_the_parameters_and_a_worker_where_they_will_be() -> None:
    shard = values(RuleSpec("dana"), groups=(GroupSpec(momentum=0.5),))
    sent = shard.apply(push(pulled(shard), 8.0))
    assert (shard.observed().params == -8.0).all()
    assert (sent.params == -12.0).all() and (pulled(shard).params == -12.0).all()


# ---- clocks --------------------------------------------------------------------------------------------


def test_versions_count_updates_and_samples_what_was_consumed() -> None:
    shard = values(RuleSpec("asgd", mode="buffer", quorum=2))
    snapshot = pulled(shard)
    shard.gather(push(snapshot, samples=7))
    assert (shard.version, shard.samples, shard.num_gathered, shard.is_full) == (0, 7, 1, False)
    shard.gather(push(snapshot, samples=5))
    assert shard.is_full
    shard.update()
    assert (shard.version, shard.samples, shard.num_gathered) == (1, 12, 0)
    shard.update()
    assert shard.version == 1, "nothing was gathered"


def test_the_rate_of_an_update_is_that_of_the_clock_before_its_first_push() -> None:
    schedule = Schedule(lr=1.0, epochs=1, kind="step", milestones=(0.5,))
    shard = values(RuleSpec("asgd", mode="buffer", quorum=4), schedule=schedule)
    rates = []
    for _ in range(2):
        for _ in range(4):
            shard.gather(push(pulled(shard), samples=12))
        shard.update()
        rates.append(shard.last.lr)
    assert rates == [1.0, pytest.approx(1.0 if 48 < 50 else 0.1)]
    shard.gather(push(pulled(shard), samples=12)), shard.update()
    assert shard.last.lr == pytest.approx(0.1)


def test_lags_beyond_the_table_share_its_last_entry() -> None:
    shard = values()
    old = pulled(shard)
    shard.version = MAX_LAG_BUCKET + 50
    assert shard.lag_of(old) == MAX_LAG_BUCKET + 50
    shard._count(push(old), shard.lag_of(old), 1.0)
    assert dict(shard.lags) == {MAX_LAG_BUCKET: 1}


# ---- sums ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [GroupSpec(momentum=0.9, nesterov=True, weight_decay=0.01), GroupSpec()])
def test_a_round_is_the_optimizers_own_sum_in_order(group: GroupSpec) -> None:
    rule = RuleSpec("asgd", mode="sync")
    shard = values(rule, groups=(group,))
    whole = LAYOUT.slices("params", 1)[0]
    plain = ShardOptimizer(rule, shard_groups(rule, (group,)), LAYOUT.segments(whole), SIZE)
    w, out, draw = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32), np.random.default_rng(4)
    for count in (3, 1, 4, 2):
        grads = draw.standard_normal((count, SIZE)).astype(np.float32)
        before = pulled(shard).params
        members = [push(pulled(shard), g, who=k) for k, g in enumerate(grads)]
        sent = shard.apply_round(members)
        for g in grads:
            plain.accumulate(w, [(0, g)], before)
        plain.apply_sum(w, 1.0, out, total_share=float(count))
        assert shard.params.tobytes() == w.tobytes()
        for member, answer in zip(members, sent, strict=True):
            assert answer.params is member.snapshot.params and answer.params.tobytes() == out.tobytes()
    assert (shard.version, shard.samples) == (4, 100)


def test_a_sum_is_split_like_a_slice() -> None:
    """T9 for sums: what is gathered over two shards is what one gathers."""
    rule, draw = RuleSpec("dc-asgd-a", mode="buffer", quorum=3), np.random.default_rng(5)
    one = values(rule)
    parts = LAYOUT.slices("params", 2)
    two = [Parameters(replace(CONFIG, num_shards=2, rule=rule), LAYOUT, k, 100) for k in range(2)]
    snapshots = [pulled(one), *(pulled(t) for t in two)]
    for i in range(9):
        grad = draw.standard_normal(SIZE).astype(np.float32)
        one.gather(push(snapshots[0], grad, samples=1 + i % 4))
        for k, part in enumerate(parts):
            own = push(snapshots[1 + k], samples=1 + i % 4)
            two[k].gather(replace(own, pieces=[(0, grad[part.start : part.stop].copy())]))
        if one.is_full:
            for shard in (one, *two):
                assert shard.is_full
                shard.update()
        if i % 4 == 3:
            snapshots = [pulled(one), *(pulled(t) for t in two)]
    joined = np.concatenate([t.params for t in two])
    assert joined.tobytes() == one.params.tobytes() and np.abs(joined).max() > 0


def test_a_tensor_that_one_member_has_no_gradient_for_takes_the_others_share() -> None:
    shard = values(RuleSpec("asgd", mode="sync"))
    shard.apply_round([push(pulled(shard), 2.0, presence=bytes([0b01])), push(pulled(shard), 4.0)])
    assert (shard.params[:20] == -3.0).all() and (shard.params[32:44] == -2.0).all()
    before = shard.params[32:44].tobytes()
    shard.apply_round([push(pulled(shard), 2.0, presence=bytes([0b01])) for _ in range(2)])
    assert shard.params[32:44].tobytes() == before


# ---- momentum per worker -------------------------------------------------------------------------------


def test_a_workers_momentum_goes_with_it_and_the_rest_is_summed_anew() -> None:
    shard = values(RuleSpec("dana"), groups=(GroupSpec(momentum=0.5),))
    for who, grad in ((1, 8.0), (2, 4.0), (3, 1.0)):
        shard.apply(push(pulled(shard), grad, who=who))
    total = shard.optimizer.state["total"]
    assert (total == 13.0).all()
    shard.leave(2)
    assert (total == 9.0).all()
    shard.leave(2), shard.leave(99)
    assert (total == 9.0).all() and shard.num_bytes > 0
    shard.validate([1, 3])
    with pytest.raises(InvariantError, match="momentum of a worker that is gone"):
        shard.validate([1])
    for who in (1, 3):
        shard.leave(who)
    assert (total == 0.0).all()


def test_rules_without_momentum_per_worker_keep_none() -> None:
    shard = values(RuleSpec("dc-asgd-a"), groups=(GroupSpec(momentum=0.9),))
    size = shard.num_bytes
    for who in range(20):
        shard.apply(push(pulled(shard), who=who))
    assert shard.num_bytes == size and not shard._own


# ---- seeding -------------------------------------------------------------------------------------------


def test_a_discarded_seeding_leaves_no_state_and_one_that_was_used_cannot_be_discarded() -> None:
    shard = values(RuleSpec("dc-asgd-a"))
    before = shard.optimizer
    shard.forget()
    assert shard.optimizer is not before
    shard.apply(push(pulled(shard)))
    with pytest.raises(InvariantError, match="has applied pushes"):
        shard.forget()


def test_pieces_of_a_seed_are_placed_by_their_offset() -> None:
    shard = values(seed=False)
    shard.seed([(16, np.full(SIZE - 16, 2.0, np.float32)), (0, np.ones(16, np.float32))])
    assert (shard.params[:16] == 1).all() and (shard.params[16:] == 2).all()


# ---- buffers -------------------------------------------------------------------------------------------


def test_buffers_move_by_what_a_batch_changed_and_counters_take_the_maximum() -> None:
    shard = values()
    first, second, third = (pulled(shard) for _ in range(3))
    stats, counters = np.full(16, 4.0, np.float32), np.full(8, 5, np.int64)
    shard.apply(push(first, stats=stats, counters=counters))
    shard.apply(push(second, stats=stats, counters=counters - 2))
    assert (shard.stats == 6.0).all() and (shard.counters == 5).all(), "half of the second's change: its lag is 1"
    shard.apply(push(third))
    assert (shard.stats == 6.0).all(), "a push may leave them out"
