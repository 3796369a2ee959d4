"""Modes buffer and block, the gates, N, absent tensors, dana's elastic momentum, and pushes of several batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.core.test_core_rounds import BASES, RUN, Floor, codes, desk_with_workers
from tests.core.test_core_worker import BATCHES, Seat, sent
from zasgd.core import wire
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.messages import (
    Ack,
    Applied,
    Array,
    Bye,
    Err,
    Fence,
    Fenced,
    Grant,
    Live,
    Observe,
    Params,
    Probe,
    Push,
    Refused,
    Renew,
)  # fmt: skip
from zasgd.core.node import Compute, Computed
from zasgd.core.optimizer import ShardOptimizer
from zasgd.core.rules import MAX_PUSH_EVERY, GroupSpec, RuleSpec
from zasgd.core.transfer import Gradient
from zasgd.core.worker import Phase, most_grants_out
from zasgd.sim.invariants import table_sizes


def buffered(quorum: int, name: str = "asgd", **stages: Any) -> RuleSpec:
    return RuleSpec(name, mode="buffer", quorum=quorum, **stages)


# ---- buffer --------------------------------------------------------------------------------------------


def test_a_buffer_acknowledges_before_it_applies() -> None:
    floor = Floor(buffered(3), 3)
    for who in range(2):
        (ack,) = floor.push(who, 1.0)
        assert (type(ack), ack.version, ack.lag) == (Ack, 0, 0)
        assert (ack.params[0] == 0).all() and floor.shards[0].version == 0
    (ack,) = floor.push(2, 1.0)
    assert ack.version == 1 and (ack.params[0] == -1.0).all()
    assert floor.shards[0].samples == 30


def test_a_buffers_mean_is_weighted_by_samples() -> None:
    floor = Floor(buffered(2), 2)
    floor.push(0, 1.0, samples=10), floor.push(1, 5.0, samples=30)
    assert (floor.w() == -4.0).all()
    floor.push(0, 1.0, samples=30), floor.push(1, 5.0, samples=10)
    assert (floor.w() == -6.0).all()


def test_a_worker_may_push_again_before_the_update_and_its_pushes_are_told_apart() -> None:
    floor = Floor(buffered(3), 1)
    acks = [floor.push(0, float(g))[0] for g in (1, 2, 6)]
    assert [a.version for a in acks] == [0, 0, 1] and (floor.w() == -3.0).all()
    (again,) = floor.push(0, 2.0, seq=acks[1].seq)
    assert (type(again), again.version) == (Ack, 0) and floor.shards[0].version == 1


@pytest.mark.parametrize("base", ["nesterov", "adamw"])
def test_a_buffer_makes_one_step_of_the_base_optimizer_per_update(base: str) -> None:
    """Weight decay, momentum and the step count of Adam once per update, not once per push."""
    draw = np.random.default_rng(1)
    few, many = (Floor(buffered(k), 1, groups=(BASES[base],), lr=0.1) for k in (1, 4))
    for _ in range(6):
        grad = draw.integers(-8, 9, 16).astype(np.float32)
        few.push(0, grad)
        for _ in range(4):
            many.push(0, grad)
        assert few.w().tobytes() == many.w().tobytes()
    assert (few.shards[0].version, many.shards[0].version) == (6, 6)


def test_lag_in_a_buffer_counts_updates_not_pushes() -> None:
    floor = Floor(buffered(2), 3)
    floor.push(0), floor.push(1)
    assert floor.push(0)[0].lag == 1, "it was acknowledged before the update and computed on the parameters before it"
    (ack,) = floor.push(2)  # computed on version 0; since then three pushes and one update
    assert ack.lag == 1 and floor.shards[0].version == 2
    assert dict(floor.shards[0].values.lags) == {0: 2, 1: 2}


def test_a_buffer_compensates_when_a_push_arrives_not_when_it_is_applied() -> None:
    """w goes 0, -2; worker 2 computed on 0. c = g + lam g g (w_at_arrival - 0)."""
    floor = Floor(buffered(2, "dc-asgd-c", lam=0.5), 3)
    floor.push(2, 2.0)  # D = 0: c = 2
    floor.push(0, 2.0)
    assert (floor.w() == -2.0).all()
    floor.push(1, 2.0)  # on version 0: c = 2 + 0.5 * 4 * (-2) = -2
    floor.push(0, 4.0)  # on version 1: c = 4
    assert (floor.w() == -2.0 - (-2.0 + 4.0) / 2).all()


@pytest.mark.parametrize("staleness", [False, True])
def test_a_scale_by_lag_is_the_weight_inside_the_mean(staleness: bool) -> None:
    floor = Floor(buffered(2, "staleness-aware" if staleness else "asgd"), 3)
    for _ in range(2):
        floor.push(0, 0.0), floor.push(1, 0.0)
    floor.push(2, 8.0)  # lag 2
    floor.push(0, 0.0)
    assert (floor.w() == (-2.0 if staleness else -4.0)).all()


@pytest.mark.parametrize("samples", [10, 30])
def test_a_buffer_is_emptied_at_the_end_of_an_epoch(samples: int) -> None:
    """By the sample clock: 100 samples are an epoch, 4 pushes an update."""
    floor = Floor(buffered(4), 1, epoch=100)
    updates = []
    for i in range(1, 21):
        before = floor.shards[0].version
        floor.push(0, 1.0, samples=samples)
        if floor.shards[0].version > before:
            updates.append(i * samples)
    expected = {10: [40, 80, 100, 140, 180, 200], 30: [120, 210, 300, 420, 510, 600]}[samples]
    assert updates == expected
    assert (floor.w() == -len(updates)).all()


def test_an_observer_of_the_whole_gets_what_was_gathered() -> None:
    floor = Floor(buffered(4), 2)
    floor.push(0, 1.0), floor.push(1, 3.0)
    (seen,) = floor.ask(9, Observe, 0, 1)
    assert (seen.version, seen.params[0][0]) == (0, 0.0), "a look in between changes nothing"
    (seen,) = floor.ask(9, Observe, 0, 2, whole=True)
    assert (type(seen), seen.version, seen.params[0][0]) == (Params, 1, -2.0)
    (seen,) = floor.ask(9, Observe, 0, 3, whole=True)
    assert seen.version == 1, "there was nothing more"
    floor.push(0), floor.push(1), floor.push(0)
    assert floor.shards[0].version == 1
    floor.push(1)
    assert floor.shards[0].version == 2, "the count begins anew after an update"


@pytest.mark.parametrize("samples", [(0,), (10, 0), (0, 10)])
def test_a_push_of_no_samples_does_not_end_the_shard(samples: Sequence[int]) -> None:
    """Pushes without grants are allowed, and so is a num_samples of 0: nothing a peer says may raise."""
    floor = Floor(buffered(3), 1)
    for n in samples:
        floor.push(0, 1.0, grants=(), num_samples=n)
    floor.push(0, 1.0), floor.push(0, 1.0), floor.push(0, 1.0)
    assert np.isfinite(floor.w()).all() and floor.shards[0].version >= 1


@pytest.mark.parametrize("num_workers", [2, 8, 32])
def test_batchnorms_averages_settle_in_a_buffer_of_any_size(num_workers: int) -> None:
    """Every worker moves the average by a tenth towards 1 from where it was when it began."""
    floor = Floor(buffered(2 * num_workers), num_workers)
    known = {who: np.zeros(16, np.float32) for who in range(num_workers)}
    seen = []
    for _ in range(40):
        for who in range(num_workers):
            (ack,) = floor.push(who, 0.0, stats=np.float32(0.9) * known[who] + np.float32(0.1))
            known[who] = ack.stats
            seen.append(float(ack.stats[0]))
    assert max(seen[-num_workers:]) < 1.2 and min(seen[-num_workers:]) > 0.8, (max(seen), seen[-3:])


# ---- block ---------------------------------------------------------------------------------------------


def blocking(max_lag: int) -> RuleSpec:
    return RuleSpec("asgd", max_lag=max_lag, lag_policy="block")


def test_who_is_ahead_waits_until_nobody_is_made_too_late_by_it() -> None:
    floor = Floor(blocking(2), 2)
    assert codes(floor.push(0)) == ["Ack"]
    assert floor.push(0) == [] and floor.shards[0].version == 1, "worker 1 computes on version 0"
    seq = floor.seqs[0]
    assert codes([*floor.ask(0, Probe, 0, seq), *floor.push(0, seq=seq)]) == ["WAITING", "WAITING"]
    (ack,) = floor.push(1)
    assert ack.lag == 1 and floor.shards[0].version == 3, "and with it goes the one that waited"
    assert [m.lag for m in floor.answers[0] if isinstance(m, Ack) and m.version] == [0, 1]


@dataclass
class Pace:
    """How long a worker's next step takes, in seconds."""

    mean_s: float
    spread: float
    draw: random.Random

    def next(self) -> float:
        return self.mean_s * self.draw.uniform(1 - self.spread, 1 + self.spread)


class Race:
    """Workers of different pace against one shard in virtual time; a refused push is computed again."""

    def __init__(self, rule: RuleSpec, means_s: Sequence[float], seed: int = 0, spread: float = 0.5) -> None:
        draw = random.Random(seed)
        self.floor = Floor(rule, len(means_s))
        self.paces = [Pace(m, spread, draw) for m in means_s]
        self.ready = {who: self.floor.now + p.next() for who, p in enumerate(self.paces)}
        self.applied: list[int] = []
        self.refused: list[str] = []
        self.longest_wait_s = 0.0
        self.waiting: dict[int, float] = {}

    def run(self, until_s: float, idle_after: dict[int, float] | None = None) -> None:
        floor, idle = self.floor, idle_after or {}
        end = floor.now + until_s
        start = floor.now
        while floor.now < end:
            due = min(self.ready.values(), default=end)
            floor.at(min(due, floor.now + 0.05, end))
            for who in [w for w, at in self.ready.items() if at <= floor.now]:
                del self.ready[who]
                floor.answers[who].clear()
                self.waiting[who] = floor.now
                floor.push(who)
            for who in list(self.waiting):
                if floor.answers[who]:
                    self._answered(who, floor.answers[who][-1], start + idle.get(who, 1e9))

    def _answered(self, who: int, answer: Any, idle_at: float) -> None:
        self.longest_wait_s = max(self.longest_wait_s, self.floor.now - self.waiting.pop(who))
        if isinstance(answer, Ack):
            self.applied.append(answer.lag)
        else:
            self.refused.append(answer.code)
            self.floor.pull(who)
        if self.floor.now < idle_at:
            self.ready[who] = self.floor.now + self.paces[who].next()


@pytest.mark.parametrize("max_lag", [4, 7])
@pytest.mark.parametrize("seed", range(2))
def test_no_push_of_four_workers_is_max_lag_updates_old_when_it_is_applied(max_lag: int, seed: int) -> None:
    race = Race(blocking(max_lag), [0.2, 0.3, 1.0, 2.0], seed)
    race.run(40.0)
    assert len(race.applied) > 10 and max(race.applied) < max_lag
    assert dict(race.floor.shards[0].values.lags).keys() <= set(range(max_lag))


@pytest.mark.parametrize("num_workers", [4, 8])
def test_with_a_max_lag_of_as_many_as_there_are_workers_nothing_is_computed_in_vain(num_workers: int) -> None:
    """Bounded staleness: who is ahead waits, and nobody's work is thrown away."""
    race = Race(blocking(num_workers), [0.5] * (num_workers // 2) + [1.0] * (num_workers // 2), seed=1)
    race.run(60.0)
    wasted = len(race.refused) / (len(race.applied) + len(race.refused))
    assert wasted < 0.01, f"{wasted:.1%} of {len(race.applied)} + {race.refused}"


def test_nobody_waits_for_ever_for_a_worker_that_has_nothing_to_do() -> None:
    race = Race(blocking(3), [0.3, 0.4, 0.5], seed=2)
    race.run(60.0, idle_after={2: 5.0})
    assert race.longest_wait_s < 10.0
    late = race.floor.shards[0].version
    race.run(10.0, idle_after={2: 0.0})
    assert race.floor.shards[0].version > late + 20, "once it is known to be idle the others go at their own pace"


def test_who_waits_goes_on_when_the_one_it_waited_for_dies() -> None:
    floor = Floor(blocking(2), 2)
    floor.push(0)
    assert floor.push(0) == []
    floor.fence(1)
    assert floor.shards[0].version == 2 and codes(floor.answers[0])[-1] == "Ack"


@pytest.mark.parametrize("num_workers", [3, 6])
def test_more_workers_than_max_lag_go_on_within_their_number(num_workers: int) -> None:
    """Nobody could keep a smaller bound by waiting; each must not wait until its patience is over either."""
    race = Race(blocking(2), [0.5] * num_workers, seed=1)
    race.run(30.0)
    assert len(race.applied) > 30.0 / 0.5 * num_workers * 0.5 and max(race.applied) <= num_workers and not race.refused


def test_a_straggler_that_nobody_waited_for_is_damped_not_given_up() -> None:
    """Refused by one shard and applied by another it would be torn, and its gradient is as good as any."""
    floor = Floor(blocking(2), 2)
    floor.push(0), floor.push(0)
    floor.at(floor.now + 30.0)  # worker 1 is silent for so long that it is not waited for
    for _ in range(3):
        floor.push(0)
    before, version = floor.w()[0], floor.shards[0].version
    (ack,) = floor.push(1, 4.0)
    assert ack.lag == version and before - floor.w()[0] == pytest.approx(4.0 * 2 / version)


def test_a_second_push_while_one_is_held_does_not_push_it_out() -> None:
    floor = Floor(blocking(2), 2)
    floor.push(0)
    assert floor.push(0, 4.0) == []
    first = floor.seqs[0]
    (answer,) = floor.push(0, 8.0)
    assert isinstance(answer, Err)
    (answer,) = floor.ask(0, Probe, 0, first)
    assert answer.code == "WAITING", "the held one is still held"


# ---- drop and damp -------------------------------------------------------------------------------------


def test_drop_refuses_what_is_max_lag_updates_old_and_applies_what_is_younger() -> None:
    floor = Floor(RuleSpec("asgd", max_lag=2, lag_policy="drop"), 3)
    floor.push(0)
    assert floor.push(1)[0].lag == 1
    (refused,) = floor.push(2)
    assert (refused.code, refused.retryable, floor.shards[0].version) == ("LAG", False, 2)
    (again,) = floor.push(2, seq=floor.seqs[2])
    assert isinstance(again, Err) and floor.shards[0].version == 2, "no late copy is applied after all"
    floor.pull(2)
    assert floor.push(2)[0].version == 3


def test_damp_applies_what_is_late_with_a_smaller_rate() -> None:
    floor = Floor(RuleSpec("asgd", max_lag=2, lag_policy="damp"), 2)
    for _ in range(8):
        floor.push(0, 0.0)
    (ack,) = floor.push(1, 4.0)
    assert ack.lag == 8 and (floor.w() == -1.0).all(), "2 / 8 of it"


def test_drop_in_a_buffer_counts_updates() -> None:
    floor = Floor(buffered(2, max_lag=1), 3)
    floor.push(0)
    assert codes(floor.push(0)) == ["Ack"] and floor.shards[0].version == 1
    assert codes(floor.push(1)) == ["LAG"]
    assert floor.shards[0].values.num_gathered == 0


# ---- N -------------------------------------------------------------------------------------------------


def test_a_difference_is_divided_by_the_number_of_workers_with_work() -> None:
    floor = Floor(RuleSpec("delta", push_every=2), 4)
    floor.push(0, 4.0)
    assert (floor.w() == -1.0).all()
    floor.tell_live(2)
    floor.broker(0, Live(run=RUN, shard=0, live=1, num_workers=9))
    floor.push(1, 4.0)
    assert (floor.w() == -3.0).all()


def test_easgd_pulls_by_its_elasticity_over_n_and_sends_back_what_is_left() -> None:
    floor = Floor(RuleSpec("easgd", push_every=2, elasticity=0.8), 4)
    (ack,) = floor.push(0, 5.0)  # x_i = 5, x = 0, a = 0.2
    assert floor.w()[0] == pytest.approx(1.0) and ack.params[0][0] == pytest.approx(4.0)


def test_the_record_says_with_which_n_each_push_was_applied() -> None:
    floor = Floor(RuleSpec("delta", push_every=2), 3)
    floor.push(0)
    floor.tell_live(2)
    floor.push(0)
    assert [row[7] for row in floor.what(0, "apply")] == [3, 2]


# ---- absent tensors ------------------------------------------------------------------------------------

STRADDLING = Layout((TensorSpec("a", (20,)), TensorSpec("b", (30,)), TensorSpec("c", (16,)), TensorSpec("d", (40,))))
"""Aligned to 16: a is 0-32, b 32-64, c 64-80, d 80-128; two shards cut at 64, three at 48 and 96."""


def places(name: str) -> slice:
    at = STRADDLING.offsets[name]
    return slice(at, at + next(t.num_elements for t in STRADDLING.tensors if t.name == name))


@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("mode", ["async", "sync", "buffer"])
def test_an_absent_tensor_is_bit_equal_afterwards_wherever_it_lies(mode: str, num_shards: int) -> None:
    rule = RuleSpec("asgd", mode=mode, quorum=1 if mode != "async" else 0)
    floor = Floor(rule, 1, num_shards, groups=(BASES["nesterov"],), layout=STRADDLING)
    draw = np.random.default_rng(0)

    def step(presence: bytes) -> Array:
        floor.push(0, draw.standard_normal(128).astype(np.float32), presence=presence)
        floor.pass_on()
        return np.concatenate([floor.w(k) for k in range(num_shards)])

    before = step(b"")
    after = step(bytes([0b0101]))  # a and c; b and d have none
    for name, absent in (("a", False), ("b", True), ("c", False), ("d", True)):
        same = before[places(name)].tobytes() == after[places(name)].tobytes()
        assert same == absent, name
    assert [s.version for s in floor.shards] == [2] * num_shards
    unmoved = step(bytes([0]))
    assert unmoved.tobytes() == after.tobytes() and floor.shards[0].version == 3


def test_presence_of_a_wrong_length_is_refused() -> None:
    floor = Floor(RuleSpec("asgd"), 1, layout=STRADDLING)
    for presence in (b"\xff\xff", bytes(9)):
        assert codes(floor.push(0, presence=presence)) == ["BAD_FIELD"]
    assert floor.shards[0].version == 0
    assert codes(floor.push(0, presence=b"\x0f")) == ["Ack"]


# ---- dana ----------------------------------------------------------------------------------------------


def sum_of_owns(floor: Floor) -> Array:
    values = floor.shards[0].values
    total = np.zeros(values.slice.size, np.float32)
    for own in values._own.values():
        total += own
    return total


def test_a_thousand_joins_and_leaves_leave_nothing_of_dana() -> None:
    floor = Floor(RuleSpec("dana+ga"), 2, groups=(GroupSpec(momentum=0.9),), lr=0.01)
    shard, draw = floor.shards[0], np.random.default_rng(0)
    early: tuple[dict[str, int], int] = ({}, 0)
    for i in range(1000):
        who = 2 + i
        floor.admit(who)
        floor.pull(who)
        for pusher in (who, i % 2):
            floor.push(pusher, draw.standard_normal(16).astype(np.float32))
        floor.fence(who)
        floor.settle(who)
        floor.answers.pop(who), floor.to_broker.clear(), floor.records[0].clear()
        if i == 300:
            early = (table_sizes(shard), shard.facts()["resident_bytes"])
    values = shard.values
    assert values._own.keys() == {10, 11}
    # What was added since the last leave is there in another order: not in every bit, but no drift either.
    floor.admit(5000), floor.fence(5000)
    total = values.optimizer.state["total"]
    assert np.allclose(total, sum_of_owns(floor), rtol=0, atol=1e-6)
    floor.admit(5001), floor.pull(5001), floor.push(5001), floor.fence(5001)
    assert total.tobytes() == sum_of_owns(floor).tobytes(), "made anew when somebody with momentum leaves"
    grown = {
        p: n for p, n in table_sizes(shard).items() if n > early[0].get(p, 0) + 8 and not p.startswith("._settled")
    }
    assert not grown
    assert shard.facts()["resident_bytes"] == early[1]


def test_the_look_ahead_after_a_leave_is_that_of_who_is_left() -> None:
    floor = Floor(RuleSpec("dana"), 2, groups=(GroupSpec(momentum=0.5),), lr=1.0)
    floor.push(0, 8.0), floor.push(1, 4.0)
    assert (floor.w() == -12.0).all()
    floor.admit(2), floor.admit(3)
    assert (floor.pull(2).params[0] == -12.0 - 0.5 * 12.0).all()
    floor.fence(1)
    assert (floor.pull(0).params[0] == -12.0 - 0.5 * 8.0).all()
    floor.fence(1)  # repeated until answered
    assert (floor.pull(3).params[0] == -12.0 - 0.5 * 8.0).all()


# ---- clocks --------------------------------------------------------------------------------------------


def test_answers_tell_the_sample_clock_at_which_they_were_made() -> None:
    """A worker's own schedule follows it: said again it must be the same, or a lost answer changes the run."""
    floor = Floor(RuleSpec("asgd"), 2)
    (first,) = floor.push(0)
    assert first.samples == 10 and floor.push(1)[0].samples == 20
    (again,) = floor.push(0, seq=first.seq)
    assert again.samples == first.samples


# ---- several batches per push --------------------------------------------------------------------------


def answer_of(task: Any, samples: int) -> Gradient:
    task.memory.grads[:] = 1
    return Gradient(task.memory.grads, np.ones(16, np.float32), np.empty(0, np.int64), samples, 0.5, True)


def compute(effects: list[Any]) -> list[Any]:
    return [e.task for e in effects if isinstance(e, Compute)]


@pytest.mark.parametrize("push_every", [2, 5, 200, MAX_PUSH_EVERY])
def test_a_worker_of_unknown_pace_asks_for_the_batches_of_one_push(push_every: int) -> None:
    """What a slow one holds in reserve keeps an epoch open; a fast one soon asks for more."""
    seat = Seat(push_every=push_every)
    (renewal,) = sent(seat.effects, Renew)
    assert renewal.upto == push_every <= most_grants_out(push_every)


def test_a_push_consumes_push_every_batches_and_reports_them_all() -> None:
    seat = Seat(push_every=3)
    seat.grant(*BATCHES[:6])
    seat.params(0), seat.params(1)
    (task,) = compute(seat.effects)
    assert task.grants == tuple(BATCHES[:3])
    effects = seat.take(seat.worker.on_done(seat.now, Computed(task, answer_of(task, 30))))
    pushes = sent(effects, Push)
    assert [p.grants for p in pushes] == [tuple(BATCHES[:3])] * 2 and {p.num_samples for p in pushes} == {30}
    seat.params(0, 1, Ack), seat.params(1, 1, Ack)
    (task,) = compute(seat.effects)
    assert task.grants == tuple(BATCHES[3:6])
    (final,) = sent([*seat.effects, *seat.until(seat.now + 5)], Renew)[0].final
    assert final.grants == tuple(BATCHES[:3])


def test_a_worker_waits_for_a_whole_push_and_takes_fewer_only_when_there_are_no_more() -> None:
    seat = Seat(push_every=4)
    seat.grant(BATCHES[0])
    assert seat.worker.phase is Phase.IDLE
    (asked,) = sent(seat.effects, Renew)
    assert asked.upto == 4, "one has come, three of four are missing"
    seat.grant(*BATCHES[1:3])
    assert seat.worker.phase is Phase.IDLE
    seat.grant()
    assert seat.worker.phase is Phase.PULLING, "the broker has no more: three are computed"
    seat.params(0), seat.params(1)
    (task,) = compute(seat.effects)
    assert task.grants == tuple(BATCHES[:3])


def test_a_worker_that_lacks_batches_for_a_push_asks_again_soon_when_the_answer_is_lost() -> None:
    """Not only after a quarter of its lease: with one batch too few it has as little to do as with none."""
    seat = Seat(push_every=4)
    seat.grant(*BATCHES[:3])
    assert sent(seat.effects, Renew), "it asks for the fourth; the answer is lost"
    began = seat.now
    seat.timers(Renew)
    assert seat.now - began <= 0.5


def test_a_push_that_no_shard_took_gives_all_its_batches_back_with_the_reason() -> None:
    seat = Seat(push_every=3)
    seat.grant(*BATCHES[:3]), seat.params(0), seat.params(1)
    (task,) = compute(seat.effects)
    seat.take(seat.worker.on_done(seat.now, Computed(task, answer_of(task, 30))))
    seat.shard(0, Err, code="LATE"), seat.shard(1, Err, code="LATE")
    refused = next(m.refused for m in sent([*seat.effects, *seat.until(seat.now + 5)], Renew) if m.refused)
    assert refused == tuple(Refused(grant, "LATE", i) for i, grant in enumerate(BATCHES[:3], 1))


@pytest.mark.parametrize("codes_by_shard", [("LATE", "OLD_SEQ"), ("OLD_SEQ", "LATE")])
def test_late_on_one_shard_is_late_whatever_the_other_said(codes_by_shard: tuple[str, str]) -> None:
    """Shard 0 alone decides who is late; where the word was lost another code stands for it."""
    seat = Seat()
    seat.grant(BATCHES[0]), seat.params(0), seat.params(1)
    seat.done()
    for k, code in enumerate(codes_by_shard):
        seat.shard(k, Err, code=code)
    refused = next(m.refused for m in sent([*seat.effects, *seat.until(seat.now + 5)], Renew) if m.refused)
    assert [r.reason for r in refused] == ["LATE"]


@pytest.mark.parametrize("push_every", [1, 64, 200, MAX_PUSH_EVERY])
def test_the_broker_grants_the_batches_of_three_pushes_and_everything_fits_the_wire(push_every: int) -> None:
    desk, (ann,) = desk_with_workers(1, push_every=push_every, batch_size=1, epochs=1000)
    ids = {"run": 5, "worker": ann.worker, "incarnation": ann.incarnation}
    answer = desk.one("w0", Renew(**ids, seq=1, upto=10_000))
    assert len(answer.grants) == most_grants_out(push_every) == max(64, 3 * push_every)
    assert len(wire.decode([bytes(f) for f in wire.encode(answer)]).grants) == len(answer.grants)  # type: ignore[attr-defined]
    refused = tuple(Refused(grant, "nonfinite", i) for i, grant in enumerate(answer.grants, 1))
    report = Renew(**ids, seq=2, got=len(answer.grants), upto=10_000, refused=refused)
    again = desk.one("w0", wire.decode([bytes(f) for f in wire.encode(report)]))
    assert len(again.grants) == most_grants_out(push_every)


def test_what_a_shard_tells_of_sixty_four_large_pushes_fits_the_wire() -> None:
    far = 1 << 40
    grants = tuple(Grant(60_000, far + i, far * 16 + i, far * 16 + i + 1) for i in range(MAX_PUSH_EVERY))
    floor = Floor(RuleSpec("delta", push_every=MAX_PUSH_EVERY), 1)
    for _ in range(70):
        (ack,) = floor.push(0, 0.0, grants=grants, num_samples=len(grants))
        assert isinstance(ack, Ack)
    floor.broker(0, Fence(run=RUN, shard=0, worker=0, incarnation=10))
    told = [m for m in floor.to_broker if isinstance(m, Fenced)][-1]
    again: Any = wire.decode([bytes(f) for f in wire.encode(told)])
    assert len(again.pushes) == 64 and again.pushes[0] == Applied(again.pushes[0].seq, grants)


def test_a_push_of_many_batches_that_one_dead_worker_left_is_granted_again_whole() -> None:
    desk, workers = desk_with_workers(2, push_every=5, batch_size=10)
    ann = workers[0]
    grants = desk.renews(ann, "w0", 1, upto=10).grants
    ids = {"run": 5, "worker": ann.worker, "incarnation": ann.incarnation}
    desk.put("w0", Bye(**ids, reason="done"))
    for k, pushes in enumerate([(Applied(3, grants[:5]),), (Applied(3, grants[:5]), Applied(4, grants[5:10]))]):
        desk.put(f"s{k}", Fenced(**ids, shard=k, pushes=pushes))
    ledger = desk.broker.run.ledger
    assert (ledger.once, ledger.torn, ledger.reissued) == (50, 50, 0)
    assert not ledger.held_by(ann.incarnation)


def test_warm_knows_every_mode() -> None:
    """What a push calls has been compiled before the shard says that it is ready."""
    for rule in (buffered(3), RuleSpec("asgd", mode="sync"), RuleSpec("diloco", mode="sync", push_every=5)):
        ShardOptimizer(rule, (GroupSpec(),), (), 0).warm()
