"""One request to every shard: probed when doubted, sent again when unknown, put together from parts, applied once.

The property at the end plays an Exchange against real shards over a link that loses, repeats and reorders.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zasgd.core import exchange as module
from zasgd.core import wire
from zasgd.core.exchange import Exchange, Piece, RoundTrip, backoff_s, covers, over_shards
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.messages import Ack, Admit, Err, Init, Message, Observe, Params, Probe, Pull, Push, Welcome
from zasgd.core.node import BROKER, Effect, Send, shard_peer
from zasgd.core.parameters import ShardConfig
from zasgd.core.rules import GroupSpec, RuleSpec
from zasgd.core.schedule import Schedule
from zasgd.core.shard import Shard

LAYOUT = Layout((TensorSpec("w", (64,)), TensorSpec("m", (32,), section="stats")))
RUN, ME, SEQ = 9, 5, 7


def messages(effects: list[Effect]) -> list[Message]:
    return [e.message for e in effects if isinstance(e, Send)]


def kinds(effects: list[Effect]) -> list[tuple[str, int]]:
    return [(type(m).__name__, m.shard) for m in messages(effects)]


def push(k: int, parts: int = 1) -> list[Message]:
    cut = 32 // parts
    return [
        Push(
            run=RUN, shard=k, worker=1, incarnation=ME, seq=SEQ, part=i, parts=parts, layout_hash=LAYOUT.hash,
            offset=i * cut, grads=(np.ones(cut, np.float32),), commit=i == parts - 1,
        )
        for i in range(parts)
    ]  # fmt: skip


def asked(kind: type[Message] = Push, parts: int = 1, trips: RoundTrip | None = None) -> Exchange:
    """A request to two shards at time 0."""

    def make(k: int) -> list[Message]:
        return push(k, parts) if kind is Push else [kind(run=RUN, shard=k, incarnation=ME, seq=SEQ)]

    return Exchange(0.0, SEQ, over_shards(2, shard_peer, make), trips or RoundTrip())


def answer(k: int, kind: type[Any] = Ack, **fields: Any) -> Any:
    return kind(
        **{"run": RUN, "shard": k, "incarnation": ME, "seq": SEQ, "params": (np.zeros(32, np.float32),), **fields}
    )


# ---- doubts --------------------------------------------------------------------------------------------


def test_everything_is_sent_once_and_nothing_is_doubted_before_a_second() -> None:
    ask = asked(parts=2)
    assert kinds(ask.start()) == [("Push", 0)] * 2 + [("Push", 1)] * 2
    assert ask.next_deadline() == 1.0
    assert ask.on_timer(0.999) == []


def test_an_overdue_push_is_asked_for_and_an_overdue_pull_is_repeated() -> None:
    doubted = asked().on_timer(1.0)
    assert kinds(doubted) == [("Probe", 0), ("Probe", 1)]
    assert [(m.run, m.worker, m.incarnation, m.seq) for m in messages(doubted)] == [(RUN, 1, ME, SEQ)] * 2
    assert kinds(asked(Pull).on_timer(1.0)) == [("Pull", 0), ("Pull", 1)]
    assert kinds(asked(Observe).on_timer(1.0)) == [("Observe", 0), ("Observe", 1)]


def test_only_the_shard_that_is_silent_is_doubted() -> None:
    ask = asked()
    ask.on_reply(0.5, answer(0))
    assert kinds(ask.on_timer(1.0)) == [("Probe", 1)]
    ask.on_reply(1.1, answer(1))
    assert ask.settled
    assert ask.next_deadline() == math.inf
    assert ask.on_timer(100.0) == []


def test_doubts_become_rarer_up_to_half_a_minute() -> None:
    ask = asked()
    ask.on_reply(0.0, answer(0))
    gaps = []
    now = 0.0
    for _ in range(12):
        due = ask.next_deadline()
        gaps.append(due - now)
        now = due
        ask.on_timer(now)
    assert all(a < b for a, b in pairwise(gaps[:5]))
    assert max(gaps) <= 30 * 1.25


def test_what_the_shard_does_not_know_is_sent_again_in_all_its_parts() -> None:
    ask = asked(parts=2)
    again = ask.on_error(2.0, Err(shard=1, seq=SEQ, code="UNKNOWN_SEQ", retryable=True))
    assert kinds(again) == [("Push", 1), ("Push", 1)]
    assert [m.part for m in messages(again)] == [0, 1]
    assert ask.on_error(2.0, Err(shard=1, seq=SEQ - 1, code="UNKNOWN_SEQ", retryable=True)) == []
    assert ask.on_error(2.0, Err(shard=77, seq=SEQ, code="UNKNOWN_SEQ", retryable=True)) == []


def test_a_shard_that_asks_for_time_gets_it() -> None:
    ask = asked(Pull)
    ask.on_reply(0.0, answer(0, Params))
    assert ask.on_error(0.2, Err(shard=1, seq=SEQ, code="UNSEEDED", retryable=True, retry_after_ms=200)) == []
    assert ask.next_deadline() == pytest.approx(0.4)
    assert kinds(ask.on_timer(0.4)) == [("Pull", 1)]


def test_a_final_refusal_settles_that_shard_and_later_answers_change_nothing() -> None:
    ask = asked()
    ask.on_error(0.1, Err(shard=0, seq=SEQ, code="NONFINITE"))
    ask.on_reply(0.2, answer(0, version=4))
    assert not ask.settled
    ask.on_reply(0.3, answer(1, version=5, lag=2))
    assert ask.settled
    assert (ask.refusals, ask.versions, ask.lags) == ({0: "NONFINITE"}, {1: 5}, {1: 2})
    assert ask.on_error(0.4, Err(shard=1, seq=SEQ, code="NONFINITE")) == []
    assert ask.refusals == {0: "NONFINITE"}


# ---- parts ---------------------------------------------------------------------------------------------


def test_parts_come_in_any_order_and_more_than_once() -> None:
    ask = asked()
    ask.on_reply(0.1, answer(0))
    halves = [(np.full(16, i, np.float32),) for i in range(2)]
    second, first = (answer(1, part=i, parts=2, offset=16 * i, params=halves[i]) for i in (1, 0))
    for part in (second, second):
        ask.on_reply(0.2, part)
        assert not ask.settled
    ask.on_reply(0.3, first)
    assert ask.settled
    flat = np.full(64, 9, np.float32)
    place(flat, ask.pieces(LAYOUT))
    assert np.array_equal(flat, np.repeat(np.float32([0, 0, 0, 1]), 16))


def place(flat: np.ndarray[Any, Any], pieces: tuple[Piece, ...]) -> None:
    for section, start, values in pieces:
        if section == "params":
            flat[start : start + values.size] = values


def test_parts_of_another_version_begin_anew() -> None:
    ask = asked(Observe)
    ask.on_reply(0.1, answer(0, Params))
    half = (np.zeros(16, np.float32),)
    ask.on_reply(0.2, answer(1, Params, version=3, part=0, parts=2, params=half))
    ask.on_reply(0.3, answer(1, Params, version=4, part=1, parts=2, offset=16, params=half))
    assert not ask.settled
    ask.on_reply(0.4, answer(1, Params, version=4, part=0, parts=2, params=half))
    assert ask.settled
    assert ask.versions[1] == 4


def test_buffers_are_placed_in_their_own_sections() -> None:
    ask = asked(Pull)
    for k in range(2):
        ask.on_reply(0.1, answer(k, Params, stats=np.full(16, k, np.float32), counters=np.empty(0, np.int64)))
    pieces = ask.pieces(LAYOUT)
    assert [(s, at) for s, at, _ in pieces] == [("params", 0), ("stats", 0), ("params", 32), ("stats", 16)]
    assert covers(pieces, LAYOUT)
    assert not covers(pieces[1:], LAYOUT)


def test_an_acknowledgement_without_parameters_does_not_cover() -> None:
    """What a repeated push gets when its snapshot is gone: the worker pulls."""
    ask = asked()
    ask.on_reply(0.1, answer(0))
    ask.on_reply(0.1, answer(1, params=()))
    assert ask.settled
    assert not covers(ask.pieces(LAYOUT), LAYOUT)


# ---- times ---------------------------------------------------------------------------------------------


def test_a_timeout_follows_the_measured_round_trip_and_the_bytes() -> None:
    trips = RoundTrip()
    assert trips.timeout_s(0) == 1.0
    assert trips.timeout_s(64 * module.SLOWEST_BYTES_PER_S) == 64.0
    for _ in range(50):
        trips.add(3.0)
    assert 3.0 <= trips.timeout_s(0) < 3.1
    trips.add(9.0)
    assert trips.timeout_s(0) > 6.0


def test_every_doubt_doubles_the_next_timeout_until_an_answer_comes_that_was_not_doubted() -> None:
    trips = RoundTrip()
    ask = asked(Pull, trips=trips)
    ask.on_reply(0.0, answer(0, Params))
    now = 0.0
    for doubts in range(1, 7):
        now = ask.next_deadline()
        ask.on_timer(now)
        assert trips.timeout_s(0) == min(30.0, 2.0**doubts)
    ask.on_reply(now, answer(1, Params))
    assert trips.timeout_s(0) == 30.0, "that answer may be one to any of the six"
    asked(Pull, trips=trips).on_reply(0.1, answer(0, Params))
    assert trips.timeout_s(0) == 1.0


def test_a_shard_that_says_how_long_to_wait_is_not_in_doubt() -> None:
    """A push waits for its round longer than a second: the line is as good as ever, a lost one must soon be missed."""
    trips = RoundTrip()
    ask = asked(trips=trips)
    ask.on_reply(0.01, answer(0))
    now = ask.next_deadline()
    for _ in range(10):
        ask.on_timer(now)
        ask.on_error(now + 0.01, Err(shard=1, seq=SEQ, code="WAITING", retryable=True, retry_after_ms=500))
        now = ask.next_deadline()
    assert trips.timeout_s(0) <= 2.0


def test_an_answer_to_a_question_that_was_doubted_measures_nothing() -> None:
    """Nobody can tell which of the two it answers (Karn's rule)."""
    trips = RoundTrip()
    ask = asked(trips=trips)
    ask.on_timer(1.0)
    for k in range(2):
        ask.on_reply(50.0, answer(k))
    assert trips.srtt_s == 0.0
    again = asked(trips=trips)
    again.on_reply(0.25, answer(0))
    assert trips.srtt_s == 0.25


@given(st.floats(0.01, 100.0), st.integers(0, 1 << 40), st.integers(0, 1 << 20))
def test_backoff_is_bounded_positive_and_the_same_for_the_same_attempt(base: float, salt: int, attempt: int) -> None:
    found = backoff_s(base, salt, attempt)
    assert 0 < found <= 30 * 1.25
    assert found == backoff_s(base, salt, attempt)


# ---- with real shards over a bad link ------------------------------------------------------------------


def seeded_shards() -> list[Shard]:
    config = ShardConfig(2, RuleSpec("asgd"), (GroupSpec(),), Schedule(lr=1.0, epochs=1))
    shards = []
    for k in range(2):
        shard = Shard(0.0, b"t", "x")
        shard.on_message(
            0.0, BROKER, Welcome(run=RUN, shard=k, incarnation=1, token=b"t", lease_s=10.0, config=config.to_json())
        )
        admit = Admit(run=RUN, shard=k, worker=1, incarnation=ME, layout=LAYOUT, num_samples=8)
        shard.on_message(0.0, BROKER, admit)
        init = Init(
            run=RUN, shard=k, worker=1, incarnation=ME, seq=1, layout_hash=LAYOUT.hash,
            params=(np.zeros(32, np.float32),), stats=np.zeros(16, np.float32),
        )  # fmt: skip
        shard.on_message(0.0, "me", init)
        shard.on_message(0.0, "me", Pull(run=RUN, shard=k, worker=1, incarnation=ME, seq=2))
        assert (shard.seeded_by, shard.version) == (ME, 0)
        shards.append(shard)
    return shards


@given(st.data())
def test_whatever_the_link_does_a_push_is_applied_once_and_answered(data: st.DataObject) -> None:
    """Any message is lost, doubled or overtaken; after forty such accidents the link is sound and the push settles."""
    shards = seeded_shards()
    ask = asked(parts=4)
    under_way = [(m, True) for m in messages(ask.start())]
    now, accidents = 0.0, 40
    while not ask.settled:
        if not under_way:
            now = ask.next_deadline()
            under_way += [(m, True) for m in messages(ask.on_timer(now))]
            continue
        at = data.draw(st.integers(0, len(under_way) - 1)) if accidents else 0
        msg, to_shard = under_way.pop(at)
        fate = data.draw(st.sampled_from(["lost", "doubled", "arrives"])) if accidents else "arrives"
        accidents -= accidents > 0
        if fate == "doubled":
            under_way.append((msg, to_shard))
        if fate == "lost":
            continue
        msg = wire.decode(wire.encode(msg))
        if to_shard:
            under_way += [(m, False) for m in messages(shards[msg.shard].on_message(now, "me", msg))]
            shards[msg.shard].validate()
        elif isinstance(msg, Err):
            under_way += [(m, True) for m in messages(ask.on_error(now, msg))]
        elif isinstance(msg, Ack | Params):
            ask.on_reply(now, msg)
    assert ask.refusals == {}
    assert ask.versions == {0: 1, 1: 1}
    assert [shard.version for shard in shards] == [1, 1]
    flat = np.full(64, 9, np.float32)
    place(flat, ask.pieces(LAYOUT))
    assert np.array_equal(flat, np.full(64, -1, np.float32))


def test_a_probe_never_travels_with_data() -> None:
    (probe,) = [m for m in messages(asked(parts=2).on_timer(1.0)) if m.shard == 0]
    assert isinstance(probe, Probe)
    assert len(wire.encode(probe)) == 2
