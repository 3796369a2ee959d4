"""The independent observer objects to each kind of wrong, and to nothing else."""

from collections.abc import Iterator

import numpy as np
import pytest

from zasgd.core.ledger import Ledger
from zasgd.core.messages import (
    Ack,
    Admit,
    Applied,
    Err,
    Fence,
    Grant,
    GrantMsg,
    Message,
    Push,
    Refused,
    Renew,
)
from zasgd.core.node import InvariantError
from zasgd.core.shard import Shard
from zasgd.sim.invariants import Observer, TableSizes, Tallies, table_sizes

BATCH = Grant(0, 0, 0, 8)
OTHER = Grant(0, 1, 8, 16)


class Story:
    """Two shards and what they are seen to do."""

    def __init__(self) -> None:
        self.observer = Observer(2)
        self.shards = []
        for number in range(2):
            shard = Shard(0.0, b"token", "")
            shard.number = number
            self.shards.append(shard)

    def hears(self, number: int, message: Message | None, *, moves: int = 0) -> None:
        shard = self.shards[number]
        shard.version += moves
        self.observer.handled(0.0, f"shard-{number}", shard, message, [])

    def says(self, message: Message) -> None:
        self.observer.sent(0.0, "somebody", self.shards[0], message)

    def admits(self, *incarnations: int) -> None:
        for number in range(2):
            for incarnation in incarnations:
                self.hears(number, Admit(incarnation=incarnation))

    def grants(self, incarnation: int, *grants: Grant) -> None:
        self.says(GrantMsg(incarnation=incarnation, grants=grants))

    def applies(self, number: int, incarnation: int, seq: int, *grants: Grant) -> None:
        push = Push(incarnation=incarnation, seq=seq, commit=True, layout_hash="", grants=grants)
        self.hears(number, push, moves=1)

    def acknowledges(self, number: int, incarnation: int, seq: int, version: int, value: float = 0.0) -> None:
        params = (np.full(4, value, np.float32),)
        self.says(Ack(shard=number, incarnation=incarnation, seq=seq, version=version, params=params))


@pytest.fixture
def story() -> Iterator[Story]:
    told = Story()
    told.admits(1, 2)
    told.grants(1, BATCH)
    yield told


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
    with pytest.raises(InvariantError, match="moved the version of shard 0 by 2"):
        story.hears(0, None, moves=2)
    with pytest.raises(InvariantError, match="changed its version on a timer"):
        story.hears(1, None, moves=1)
    with pytest.raises(InvariantError, match="changed its version on Err"):
        story.hears(1, Err(code="X"), moves=1)


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
    story.says(Renew(incarnation=1, refused=(Refused(BATCH, "nonfinite"),)))
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
