"""What a shard remembers of one incarnation: a window of seqs; for each slot a snapshot and a staged push."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zasgd.core.layout import Slice
from zasgd.core.messages import Applied, Grant
from zasgd.core.node import InvariantError
from zasgd.core.region import RegionPlan, private_region
from zasgd.core.snapshot import WINDOW, Client, Outcome, SeqWindow, Snapshot, Staged, frozen_copy


def snapshot(version: int) -> Snapshot:
    """One element that tells its version."""
    return Snapshot(version, np.full(1, version, np.float32), np.empty(0, np.float32), np.empty(0, np.int64))


@given(st.lists(st.integers(1, 300), max_size=150))
def test_a_window_knows_what_it_answered_and_says_so_when_it_cannot_tell(seqs: list[int]) -> None:
    window, answered = SeqWindow(), set()
    for seq in seqs:
        if window.state(seq) == "new":
            window.mark(seq)
            answered.add(seq)
    for seq in range(1, 301):
        if seq > window.high or (window.high - seq < WINDOW and seq not in answered):
            assert window.state(seq) == "new"
        else:
            assert window.state(seq) == ("known" if window.high - seq < WINDOW else "old")
    assert 0 <= window.bitmap < 1 << WINDOW


def test_a_jump_over_the_whole_window_forgets_it() -> None:
    window = SeqWindow()
    window.mark(1)
    window.mark(1 + WINDOW)
    assert (window.state(1), window.state(2), window.state(1 + WINDOW)) == ("old", "new", "known")
    window.mark(10_000)
    assert window.bitmap == 1


def test_a_slot_keeps_what_was_sent_to_it_last_and_the_newest_version_is_that_of_any_slot() -> None:
    client = Client(0, 1, num_slots=2)
    for seq, (slot, version) in enumerate([(0, 0), (1, 0), (1, 5), (0, 4)], 10):
        client.keep(slot, seq, snapshot(version), 2.0)
    assert {slot: kept.version for slot, kept in client.snapshots.items()} == {0: 4, 1: 5}
    assert (client.sent, client.newest, client.sent_at) == ({0: 13, 1: 12}, 5, 2.0)


def test_what_is_sent_to_a_slot_lies_in_one_array_for_good() -> None:
    """Its own, of the right size, until there is one; in the region for a worker that says so."""
    client, whole = Client(0, 1, num_slots=2), Slice(16, 48)
    first = client.array(0, whole, shared=False)
    assert (first.size, first.dtype) == (32, np.float32)
    client.keep(0, 1, replace(snapshot(0), params=first), 0.0)
    assert client.array(0, whole, shared=False) is first
    assert not np.may_share_memory(client.array(1, whole, shared=False), first)
    client.region = private_region(RegionPlan(64, 2))
    for slot in range(2):
        client.region.params[slot][:] = np.arange(64) + 100 * slot
        lies = client.array(slot, whole, shared=True)
        assert (lies == np.arange(16, 48) + 100 * slot).all() and np.may_share_memory(lies, client.region.params[slot])
    assert client.array(0, whole, shared=False) is first


def test_a_compressed_push_is_unpacked_where_that_of_its_slot_was() -> None:
    client = Client(0, 1, num_slots=2)
    assert client.decoded(0, 8) is client.decoded(0, 8)
    assert not np.may_share_memory(client.decoded(0, 8), client.decoded(1, 8))
    assert client.num_bytes == 2 * 8 * 4


def test_snapshots_in_shared_memory_are_not_bytes_of_the_shard() -> None:
    client = Client(0, 1, num_slots=1)
    client.keep(0, 1, snapshot(3), 0.0)
    assert client.num_bytes == 4
    client.region = private_region(RegionPlan(1))
    assert client.num_bytes == 0


@pytest.mark.parametrize("num_slots", [1, 2])
def test_every_table_of_a_client_is_bounded(num_slots: int) -> None:
    client = Client(0, 1, num_slots)
    for seq in range(1, 1000):
        client.keep(seq % num_slots, seq, snapshot(seq), 0.0)
        client.record(seq, Outcome(True, seq), Applied(seq, (Grant(0, seq, 0, 1),)))
        client.stage(seq % num_slots, seq).add(0, (np.zeros(4, np.float32),))  # type: ignore[union-attr]
        client.validate()
    assert (len(client.outcomes), len(client.pushes)) == (WINDOW, WINDOW)
    assert (len(client.snapshots), len(client.staged)) == (num_slots, num_slots)
    assert client.num_bytes == num_slots * (4 + 16)


@pytest.mark.parametrize("slot", [2, -1])
def test_a_snapshot_in_a_slot_that_is_none_is_found(slot: int) -> None:
    client = Client(0, 1, num_slots=2)
    client.keep(slot, 1, snapshot(0), 0.0)
    with pytest.raises(InvariantError, match="a snapshot in a slot that is none"):
        client.validate()
    client.snapshots.clear()
    client.validate()
    client.stage(slot, 1)
    with pytest.raises(InvariantError, match="staged in a slot that is none"):
        client.validate()


@given(st.permutations(range(6)), st.integers(0, 5))
def test_parts_in_any_order_with_repeats_cover_a_slice_once_all_are_in(order: list[int], repeated: int) -> None:
    values = np.arange(24, dtype=np.float32)
    staged = Staged(seq=1)
    for i, part in enumerate(order):
        assert staged.covering(24) is None, f"{i} of 6 parts are no whole"
        at = 4 * part
        staged.add(at, (values[at : at + 2], values[at + 2 : at + 4]))
    staged.add(4 * repeated, (values[4 * repeated : 4 * repeated + 2],))
    pieces = staged.covering(24)
    assert pieces is not None
    assert (np.concatenate([piece for _, piece in pieces]) == values).all()
    assert staged.num_bytes == values.nbytes


@pytest.mark.parametrize("offset", [3, 5])
def test_a_gap_or_an_overlap_covers_nothing(offset: int) -> None:
    staged = Staged(seq=1)
    staged.add(0, (np.zeros(4, np.float32),))
    staged.add(offset, (np.zeros(8 - offset, np.float32),))
    assert staged.covering(8) is None


def test_an_empty_slice_is_covered_by_nothing_at_all() -> None:
    staged = Staged(seq=1)
    staged.add(0, (np.empty(0, np.float32),))
    assert staged.covering(0) == []


def test_in_a_slot_a_newer_push_discards_an_older_one_which_does_not_come_back() -> None:
    client = Client(0, 1, num_slots=2)
    client.stage(0, 5).add(0, (np.zeros(4, np.float32),))  # type: ignore[union-attr]
    client.stage(1, 4).add(0, (np.zeros(2, np.float32),))  # type: ignore[union-attr]
    assert client.stage(0, 5).num_bytes == 16  # type: ignore[union-attr]
    assert client.stage(0, 6).num_bytes == 0  # type: ignore[union-attr]
    assert client.stage(0, 5) is None
    assert client.stage(1, 4).num_bytes == 8, "the other slot's"  # type: ignore[union-attr]


def test_what_is_forgotten_is_that_push_and_no_other() -> None:
    client = Client(0, 1, num_slots=2)
    client.stage(0, 6), client.stage(1, 7)
    client.unstage(0, 5), client.unstage(1, 6)
    assert {slot: staged.seq for slot, staged in client.staged.items()} == {0: 6, 1: 7}
    client.unstage(0, 6), client.unstage(0, 6)
    assert list(client.staged) == [1]


def test_a_frozen_copy_cannot_be_written() -> None:
    original = np.zeros(3, np.float32)
    copy = frozen_copy(original)
    original[0] = 1
    assert copy[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        copy[0] = 2
