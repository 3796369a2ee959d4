"""The independent observer objects to each kind of wrong, and to nothing else."""

from collections.abc import Iterator

import numpy as np
import pytest

from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.ledger import Ledger
from zasgd.core.messages import (
    Ack,
    Admit,
    Applied,
    Err,
    Fence,
    Grant,
    GrantMsg,
    Init,
    Message,
    Observe,
    Push,
    Refused,
    Renew,
)
from zasgd.core.node import InvariantError, Send
from zasgd.core.parameters import Parameters, ShardConfig
from zasgd.core.rules import GroupSpec, RuleSpec
from zasgd.core.schedule import Schedule
from zasgd.core.shard import Shard
from zasgd.sim.invariants import Observer, TableSizes, Tallies, table_sizes

BATCH = Grant(0, 0, 0, 8)
OTHER = Grant(0, 1, 8, 16)
LAYOUT = Layout((TensorSpec("w", (32,)),))


class Story:
    """Two shards and what they are seen to do."""

    def __init__(self, mode: str = "async") -> None:
        self.observer = Observer(2)
        self.shards = []
        rule = RuleSpec("asgd", mode=mode, quorum=0 if mode == "async" else 2)
        config = ShardConfig(2, rule, (GroupSpec(),), Schedule(lr=1.0, epochs=1))
        for number in range(2):
            shard = Shard(0.0, b"token", "")
            shard.number, shard.config = number, config
            shard.values = Parameters(config, LAYOUT, number, 1000)
            self.shards.append(shard)

    def hears(self, number: int, message: Message | None, *acks: Ack, moves: int = 0, samples: int = 0) -> None:
        """An event of a shard: the acknowledgements it causes, and how far version and sample clock move with it."""
        shard = self.shards[number]
        shard.values.version += moves
        shard.values.samples += samples
        self.observer.handled(0.0, f"shard-{number}", shard, message, [Send("w", ack) for ack in acks])

    def says(self, message: Message) -> None:
        self.observer.sent(0.0, "somebody", self.shards[0], message)

    def admits(self, *incarnations: int) -> None:
        for number in range(2):
            for incarnation in incarnations:
                self.hears(number, Admit(incarnation=incarnation))

    def grants(self, incarnation: int, *grants: Grant) -> None:
        self.says(GrantMsg(incarnation=incarnation, grants=grants))

    def applies(self, number: int, incarnation: int, seq: int, *grants: Grant) -> None:
        push = a_push(incarnation, seq, *grants)
        ack = Ack(shard=number, incarnation=incarnation, seq=seq, version=self.shards[number].version + 1)
        self.hears(number, push, ack, moves=1, samples=push.num_samples)

    def acknowledges(self, number: int, incarnation: int, seq: int, version: int, value: float = 0.0) -> None:
        params = (np.full(4, value, np.float32),)
        self.says(Ack(shard=number, incarnation=incarnation, seq=seq, version=version, params=params))


def a_push(incarnation: int, seq: int, *grants: Grant) -> Push:
    samples = sum(grant.num_samples for grant in grants)
    ids = {"incarnation": incarnation, "seq": seq, "layout_hash": LAYOUT.hash}
    return Push(**ids, commit=True, grants=grants, num_samples=samples)


def an_ack(incarnation: int, seq: int, version: int) -> Ack:
    return Ack(incarnation=incarnation, seq=seq, version=version)


def told(mode: str) -> Story:
    """Two workers are admitted, and have a batch each."""
    story = Story(mode)
    story.admits(1, 2)
    story.grants(1, BATCH)
    story.grants(2, OTHER)
    return story


@pytest.fixture
def story() -> Iterator[Story]:
    begun = Story()
    begun.admits(1, 2)
    begun.grants(1, BATCH)
    yield begun


def test_a_right_story_passes(story: Story) -> None:
    for number in range(2):
        story.applies(number, 1, 5, BATCH)
        story.acknowledges(number, 1, 5, 1, 0.5)
        story.acknowledges(number, 1, 5, 1, 0.5)
    story.says(Renew(incarnation=1, final=(Applied(5, (BATCH,)),)))
    story.grants(1, BATCH, OTHER)
    for number in range(2):
        story.hears(number, Fence(incarnation=1))
    story.grants(2, OTHER)
    story.applies(0, 2, 1, OTHER)
    assert story.observer.tallies([BATCH, OTHER]) == Tallies(once=8, torn=8, none=0)


def test_a_push_applied_twice_is_found(story: Story) -> None:
    story.applies(0, 1, 5, BATCH)
    with pytest.raises(InvariantError, match="twice"):
        story.applies(0, 1, 5, BATCH)


def test_a_version_that_jumps_or_moves_without_a_push_is_found(story: Story) -> None:
    with pytest.raises(InvariantError, match=r"shard 0 on a timer made the versions \[1, 2\], its pushes \[\]"):
        story.hears(0, None, moves=2)
    with pytest.raises(InvariantError, match=r"shard 1 on a timer made the versions \[1\]"):
        story.hears(1, None, moves=1)
    with pytest.raises(InvariantError, match=r"shard 1 on Err made the versions \[2\]"):
        story.hears(1, Err(code="X"), moves=1)
    with pytest.raises(InvariantError, match=r"made the versions \[3, 4\], its pushes \[3\]"):
        story.hears(0, a_push(1, 5, BATCH), an_ack(1, 5, 3), moves=2, samples=8)


def test_a_push_of_a_fenced_or_never_admitted_incarnation_is_found(story: Story) -> None:
    story.hears(0, Fence(incarnation=1))
    with pytest.raises(InvariantError, match="after it was fenced"):
        story.applies(0, 1, 5, BATCH)
    with pytest.raises(InvariantError, match="never admitted"):
        story.applies(1, 3, 1, BATCH)


def test_a_push_of_what_was_never_granted_is_found(story: Story) -> None:
    with pytest.raises(InvariantError, match="never granted"):
        story.applies(0, 1, 5, OTHER)


def test_a_batch_applied_by_two_pushes_is_found(story: Story) -> None:
    story.applies(0, 1, 5, BATCH)
    with pytest.raises(InvariantError, match="and again by"):
        story.applies(1, 1, 6, BATCH)


def test_an_acknowledgement_before_the_apply_or_unlike_the_first_is_found(story: Story) -> None:
    with pytest.raises(InvariantError, match="before it applied"):
        story.acknowledges(0, 1, 5, 1)
    story.applies(0, 1, 5, BATCH)
    story.acknowledges(0, 1, 5, 1, 0.5)
    with pytest.raises(InvariantError, match="other parameters"):
        story.acknowledges(0, 1, 5, 1, 0.6)
    with pytest.raises(InvariantError, match="another version"):
        story.acknowledges(0, 1, 5, 2, 0.5)


def test_an_acknowledgement_with_which_nothing_moved_is_found(story: Story) -> None:
    with pytest.raises(InvariantError, match="before it applied"):
        story.hears(0, a_push(1, 5, BATCH), an_ack(1, 5, 1))


def test_a_sample_clock_that_does_not_follow_the_pushes_is_found(story: Story) -> None:
    with pytest.raises(InvariantError, match="moved its sample clock by 7, the pushes that it took hold 8"):
        story.hears(0, a_push(1, 5, BATCH), an_ack(1, 5, 1), moves=1, samples=7)
    with pytest.raises(InvariantError, match="moved its sample clock by 3, the pushes that it took hold 0"):
        story.hears(1, None, samples=3)


def test_an_acknowledgement_of_a_push_that_never_came_is_found(story: Story) -> None:
    with pytest.raises(InvariantError, match="never came"):
        story.hears(0, None, an_ack(1, 5, 1), moves=1, samples=8)


def test_the_acknowledgement_of_a_seeding_is_none_of_a_push(story: Story) -> None:
    story.hears(0, Init(incarnation=1, seq=1, layout_hash=LAYOUT.hash), an_ack(1, 1, 0))
    story.says(Ack(shard=0, incarnation=1, seq=1))
    assert not story.observer.shards[0].applied


# ---- pushes that wait, rounds and buffers ----------------------------------------------------------------


def test_pushes_that_were_held_may_be_applied_together_but_each_makes_a_version() -> None:
    story = told("async")
    story.hears(0, a_push(1, 5, BATCH))
    story.hears(0, a_push(2, 3, OTHER), an_ack(2, 3, 1), an_ack(1, 5, 2), moves=2, samples=16)
    assert [a.version for a in story.observer.shards[0].applied.values()] == [1, 2]
    story.hears(1, a_push(1, 5, BATCH))
    with pytest.raises(InvariantError, match=r"made the versions \[1\], its pushes \[1, 1\]"):
        story.hears(1, a_push(2, 3, OTHER), an_ack(2, 3, 1), an_ack(1, 5, 1), moves=1, samples=16)


def test_a_push_that_waits_is_not_applied_by_the_end_of_its_life() -> None:
    story = told("async")
    story.hears(0, a_push(1, 5, BATCH))
    with pytest.raises(InvariantError, match="after it was fenced"):
        story.hears(0, Fence(incarnation=1), an_ack(1, 5, 1), moves=1, samples=8)


def test_a_round_is_one_version_of_all_its_members() -> None:
    story = told("sync")
    for number in range(2):
        story.hears(number, a_push(1, 5, BATCH))
        story.hears(number, a_push(2, 3, OTHER), an_ack(1, 5, 1), an_ack(2, 3, 1), moves=1, samples=16)
    story.hears(0, a_push(1, 5, BATCH), an_ack(1, 5, 1))
    story.says(Renew(incarnation=1, final=(Applied(5, (BATCH,)),)))
    assert story.observer.tallies([BATCH, OTHER]) == Tallies(once=16, torn=0, none=0)
    with pytest.raises(InvariantError, match="twice"):
        story.hears(0, a_push(1, 5, BATCH), an_ack(1, 5, 2), moves=1, samples=8)


def test_a_round_without_members_or_out_of_order_is_found() -> None:
    story = told("sync")
    with pytest.raises(InvariantError, match=r"made the versions \[1\], its rounds \[\]"):
        story.hears(0, None, moves=1)
    story.hears(1, a_push(1, 5, BATCH))
    with pytest.raises(InvariantError, match=r"out of order: \[2, 1\]"):
        story.hears(1, a_push(2, 3, OTHER), an_ack(1, 5, 2), an_ack(2, 3, 1), moves=2, samples=16)


def test_a_buffer_takes_a_push_without_a_version_and_makes_one_of_several() -> None:
    story = told("buffer")
    for number in range(2):
        story.hears(number, a_push(1, 5, BATCH), an_ack(1, 5, 0), samples=8)
        story.hears(number, a_push(2, 3, OTHER), an_ack(2, 3, 1), moves=1, samples=8)
    story.says(Renew(incarnation=1, final=(Applied(5, (BATCH,)),)))
    assert story.observer.tallies([BATCH, OTHER]) == Tallies(once=16, torn=0, none=0)
    with pytest.raises(InvariantError, match="an update of nothing"):
        story.hears(0, Observe(whole=True), moves=1)


def test_what_a_buffer_holds_at_the_end_of_an_epoch_makes_a_version_of_its_own() -> None:
    story = told("buffer")
    story.hears(0, a_push(1, 5, BATCH), an_ack(1, 5, 0), samples=8)
    story.hears(0, Observe(whole=True), moves=1)
    with pytest.raises(InvariantError, match="moved its version by 2"):
        story.hears(0, Observe(whole=True), moves=2)


def test_a_buffer_that_acknowledges_without_taking_or_takes_twice_is_found() -> None:
    story = told("buffer")
    with pytest.raises(InvariantError, match="before it applied"):
        story.hears(0, a_push(1, 5, BATCH), an_ack(1, 5, 0))
    story.hears(1, a_push(1, 5, BATCH), an_ack(1, 5, 0), samples=8)
    with pytest.raises(InvariantError, match="moved its sample clock by 8, the pushes that it took hold 0"):
        story.hears(1, a_push(1, 5, BATCH), an_ack(1, 5, 0), samples=8)


# ---- grants and reports ----------------------------------------------------------------------------------


def test_a_push_called_final_that_one_shard_never_applied_is_found(story: Story) -> None:
    story.applies(0, 1, 5, BATCH)
    with pytest.raises(InvariantError, match=r"final without \[1\]"):
        story.says(Renew(incarnation=1, final=(Applied(5, (BATCH,)),)))


def test_a_batch_issued_again_before_every_shard_fenced_its_holder_is_found(story: Story) -> None:
    story.hears(0, Fence(incarnation=1))
    with pytest.raises(InvariantError, match=r"not fenced at shards \[1\]"):
        story.grants(2, BATCH)


def test_a_batch_issued_again_although_somebody_applied_it_is_found(story: Story) -> None:
    story.applies(0, 1, 5, BATCH)
    for number in range(2):
        story.hears(number, Fence(incarnation=1))
    with pytest.raises(InvariantError, match="applied by"):
        story.grants(2, BATCH)


def test_a_refused_batch_may_go_to_another_worker(story: Story) -> None:
    story.says(Renew(incarnation=1, refused=(Refused(BATCH, "nonfinite", 1),)))
    story.grants(2, BATCH)


def test_the_ledger_is_held_against_what_was_seen(story: Story) -> None:
    ledger = Ledger(num_samples=8, batch_size=8, epochs=1)
    ledger.take(1, 1)
    with pytest.raises(InvariantError, match="incomplete ledger"):
        story.observer.settle(ledger, [BATCH])
    story.applies(0, 1, 5, BATCH)
    ledger.confirm(1, BATCH)
    with pytest.raises(InvariantError, match="the ledger says"):
        story.observer.settle(ledger, [BATCH])
    story.applies(1, 1, 5, BATCH)
    assert story.observer.settle(ledger, [BATCH]) == Tallies(8, 0, 0)


def test_every_table_of_a_core_is_counted_by_its_path() -> None:
    shard = Shard(0.0, b"token", "")
    shard.refusals.update({"A": 1, "B": 2})
    sizes = table_sizes(shard)
    assert sizes[".refusals"] == 2
    assert sizes["._timers._at"] == 1
    assert sizes[".clients"] == 0


def test_a_table_that_keeps_growing_is_found_and_one_that_does_not_is_left_alone() -> None:
    tables, shard = TableSizes(every_s=1.0), Shard(0.0, b"token", "")
    for i in range(100):
        shard.refusals[f"code {i % 10}"] += 1
        tables.handled(float(i), "shard-0", shard, None, [])
    tables.check(50.0, at_most=100, slack=5)
    for i in range(100):
        shard.fenced[i] = None  # type: ignore[assignment]
        tables.handled(100.0 + i, "shard-0", shard, None, [])
    with pytest.raises(InvariantError, match=r"\.fenced.* keeps growing: 49 entries, then 100"):
        tables.check(149.0, at_most=100, slack=5)
    with pytest.raises(InvariantError, match="holds 100 entries"):
        tables.check(149.0, at_most=60, slack=5)
