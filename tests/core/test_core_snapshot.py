"""What a shard remembers of one incarnation: a window of seqs, a few snapshots, one staged push."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zasgd.core.messages import Applied, Grant
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


def test_only_as_many_snapshots_are_kept_as_pushes_may_be_out() -> None:
    client = Client(0, 1, num_snapshots=2)
    for version in (0, 1, 2, 2, 3):
        client.keep(snapshot(version), 0.0)
    assert list(client.snapshots) == [2, 3]


def test_every_table_of_a_client_is_bounded() -> None:
    client = Client(0, 1, num_snapshots=1)
    for seq in range(1, 1000):
        client.keep(snapshot(seq), 0.0)
        client.record(seq, Outcome(True, seq), Applied(seq, (Grant(0, seq, 0, 1),)))
        client.stage(seq).add(0, (np.zeros(4, np.float32),))
        client.validate()
    assert (len(client.outcomes), len(client.pushes), len(client.snapshots)) == (WINDOW, WINDOW, 1)
    assert client.num_bytes == 4 + 16


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


def test_a_new_seq_discards_what_another_left() -> None:
    client = Client(0, 1, 1)
    client.stage(5).add(0, (np.zeros(4, np.float32),))
    assert client.stage(5).num_bytes == 16
    assert client.stage(6).num_bytes == 0


def test_a_frozen_copy_cannot_be_written() -> None:
    original = np.zeros(3, np.float32)
    copy = frozen_copy(original)
    original[0] = 1
    assert copy[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        copy[0] = 2
