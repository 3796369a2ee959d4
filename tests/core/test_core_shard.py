"""A shard: applies each push of an admitted incarnation at most once, to the snapshot it was computed on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.core.test_core_bounds import over_the_wire
from zasgd.core import wire
from zasgd.core.compress import decode, decode_onto, encode
from zasgd.core.compression import Compression
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.messages import (
    Ack,
    Admit,
    Admitted,
    Array,
    Attach,
    Attached,
    Err,
    Fence,
    Fenced,
    Grant,
    Init,
    Lease,
    Message,
    Observe,
    Params,
    Probe,
    Pull,
    Push,
    Renew,
    StopMsg,
    Welcome,
)  # fmt: skip
from zasgd.core.node import BROKER, Computed, Effect, Send, Share, Stop, Unshare
from zasgd.core.parameters import ShardConfig
from zasgd.core.region import RegionPlan, SharedMemoryError, private_region
from zasgd.core.rules import GroupSpec, RuleSpec
from zasgd.core.schedule import Schedule
from zasgd.core.shard import Shard

RUN, ANN, BOB = 9, 11, 12
LAYOUT = Layout(
    (
        TensorSpec("w", (20,)),
        TensorSpec("mean", (3,), section="stats"),
        TensorSpec("count", (), "int64", "counters"),
    )
)
SIZE = LAYOUT.sizes["params"]
CONFIG = ShardConfig(1, RuleSpec("asgd"), (GroupSpec(),), Schedule(lr=1.0, epochs=10))
WELCOME = {"run": RUN, "shard": 0, "incarnation": 1, "token": b"t", "num_shards": 1, "lease_s": 10.0}


class Bench:
    """A shard on a bench: what goes in by name, what comes out as messages. Validated after every event.

    Answers come over the wire, as they were when they were sent: the shard may reuse its arrays afterwards.
    """

    def __init__(self, config: ShardConfig = CONFIG, seeded: bool = True) -> None:
        self.shard = Shard(0.0, b"t", "tcp://x:1")
        self.broker(Welcome(**WELCOME, config=config.to_json()))
        self.admit(ANN)
        if seeded:
            assert isinstance(self.init()[0], Ack)

    def put(self, effects: list[Effect]) -> list[Message]:
        self.shard.validate()
        return [over_the_wire(e.message) for e in effects if isinstance(e, Send)]

    def broker(self, msg: Message) -> list[Message]:
        return self.put(self.shard.on_message(0.0, BROKER, msg))

    def ask(self, kind: type[Message], seq: int, who: int = ANN, **fields: Any) -> list[Message]:
        ids = {"run": RUN, "shard": 0, "worker": who - ANN, "incarnation": who, "seq": seq}
        return self.put(self.shard.on_message(0.0, ("route", who), kind(**{**ids, **fields})))

    def one(self, kind: type[Message], seq: int, who: int = ANN, **fields: Any) -> Any:
        (answer,) = self.ask(kind, seq, who, **fields)
        return answer

    def admit(self, who: int) -> list[Message]:
        return self.broker(Admit(run=RUN, shard=0, worker=who - ANN, incarnation=who, layout=LAYOUT, num_samples=100))

    def init(self, seq: int = 1, value: float = 0.0, who: int = ANN) -> list[Message]:
        buffers = {"stats": np.zeros(16, np.float32), "counters": np.zeros(8, np.int64)}
        params = (np.full(SIZE, value, np.float32),)
        return self.ask(Init, seq, who, layout_hash=LAYOUT.hash, params=params, **buffers)

    def push(self, seq: int, version: int, who: int = ANN, grad: float = 1.0, **fields: Any) -> Any:
        return self.one(Push, seq, who, version=version, **{**a_push(grad, seq), **fields})


def a_push(grad: float, batch: int) -> dict[str, Any]:
    return {
        "layout_hash": LAYOUT.hash,
        "grads": (np.full(SIZE, grad, np.float32),),
        "grants": (Grant(0, batch, 10 * batch, 10 * batch + 10),),
        "num_samples": 10,
        "commit": True,
    }


def values(*answers: Any) -> Array:
    return np.concatenate([piece for answer in answers for piece in answer.params])


# ---- joining and seeding -------------------------------------------------------------------------------


def test_a_server_says_hello_until_it_is_welcome_and_then_that_it_is_ready() -> None:
    shard = Shard(5.0, b"t", "tcp://x:1")
    assert [e.message.token for e in shard.on_timer(5.0) if isinstance(e, Send)] == [b"t"]  # type: ignore[attr-defined]
    assert 5.0 < shard.next_deadline() < 7.0
    effects = shard.on_message(5.1, BROKER, Welcome(**WELCOME, config=CONFIG.to_json()))
    renewals = [e.message for e in effects if isinstance(e, Send)]
    assert [type(m) for m in renewals] == [Renew] and renewals[0].seeded == 0  # type: ignore[attr-defined]


def test_nothing_is_served_before_it_is_seeded() -> None:
    bench = Bench(seeded=False)
    for kind in (Pull, Observe):
        answer = bench.one(kind, 1)
        assert (answer.code, answer.retryable) == ("UNSEEDED", True)


def test_seeding_is_told_to_the_broker_and_repeating_it_changes_nothing() -> None:
    bench = Bench(seeded=False)
    ack, renewal = bench.init(value=3.0)
    assert isinstance(ack, Ack) and isinstance(renewal, Renew) and renewal.seeded == ANN
    (again,) = bench.init(value=5.0)
    assert isinstance(again, Ack)
    assert (values(bench.one(Pull, 2)) == 3.0).all()
    bench.admit(BOB)
    assert bench.init(who=BOB)[0].code == "ALREADY_SEEDED"  # type: ignore[attr-defined]


def test_a_seeder_that_is_fenced_with_discard_leaves_an_unseeded_shard() -> None:
    bench = Bench()
    bench.broker(Fence(run=RUN, shard=0, worker=0, incarnation=ANN, discard=True))
    bench.admit(BOB)
    assert bench.one(Pull, 1, BOB).code == "UNSEEDED"
    assert isinstance(bench.init(seq=2, who=BOB, value=2.0)[0], Ack)
    assert (values(bench.one(Pull, 3, BOB)) == 2.0).all()


# ---- pushes ----------------------------------------------------------------------------------------------


def test_a_push_is_applied_and_its_answer_is_the_next_snapshot() -> None:
    bench = Bench()
    assert bench.one(Pull, 2).version == 0
    ack = bench.push(3, version=0)
    assert (ack.version, ack.lag) == (1, 0)
    assert (values(ack) == -1.0).all()
    assert (bench.shard.version, bench.shard.samples) == (1, 10)


def test_the_same_seq_twice_is_applied_once_and_answered_with_what_was_sent_then() -> None:
    bench = Bench()
    bench.admit(BOB)
    bench.ask(Pull, 2), bench.ask(Pull, 1, BOB)
    first = bench.push(3, version=0)
    bench.push(2, version=0, who=BOB)  # today's weights are others now
    again = bench.push(3, version=0)
    probed = bench.one(Probe, 3)
    assert bench.shard.version == 2
    for answer in (again, probed):
        assert (answer.version, answer.lag) == (first.version, first.lag)
        assert (values(answer) == values(first)).all()


def test_a_pull_shares_the_seqs_and_is_repeated_likewise() -> None:
    bench = Bench()
    bench.admit(BOB)
    before = bench.one(Pull, 2)
    bench.ask(Pull, 1, BOB)
    bench.push(2, version=0, who=BOB)
    again = bench.one(Pull, 2)
    assert again.version == 0 and (values(again) == values(before)).all()
    assert bench.one(Pull, 3).version == 1


def test_lag_is_counted_for_each_worker_and_push() -> None:
    bench = Bench()
    bench.admit(BOB)
    bench.ask(Pull, 2), bench.ask(Pull, 1, BOB)
    assert [bench.push(3 + i, version=i).lag for i in range(4)] == [0, 0, 0, 0]
    assert bench.push(2, version=0, who=BOB).lag == 4
    assert bench.push(3, version=5, who=BOB).lag == 0
    assert dict(bench.shard.values.lags) == {0: 5, 4: 1}
    assert bench.shard.facts()["worker_lags"] == {"0": 0, "1": 0}


def test_compensation_uses_the_snapshot_of_the_worker_not_the_last_weights() -> None:
    config = replace(CONFIG, rule=RuleSpec("dc-asgd-c", lam=0.5))
    bench = Bench(config)
    bench.admit(BOB)
    bench.ask(Pull, 2), bench.ask(Pull, 1, BOB)
    bench.push(3, version=0), bench.push(4, version=1)
    ack = bench.push(2, version=0, who=BOB, grad=2.0)  # w = -2, snapshot 0: g + 0.5 g g (w - 0) = 2 - 4
    assert (values(ack) == -2.0 - (2.0 - 4.0)).all()


def test_a_push_for_a_snapshot_that_was_never_sent_is_refused() -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    assert bench.push(3, version=7).code == "NO_SNAPSHOT"
    assert bench.shard.version == 0


def test_parts_are_staged_and_applied_once_when_the_last_commits() -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    half = SIZE // 2
    pieces = [np.full(half, 1.0, np.float32), np.full(SIZE - half, 2.0, np.float32)]
    first = {**a_push(0, 3), "grads": (pieces[0],), "commit": False, "part": 0, "parts": 2}
    assert bench.ask(Push, 3, version=0, **first) == []
    assert bench.shard.version == 0
    last = {**a_push(0, 3), "grads": (pieces[1],), "offset": half, "part": 1, "parts": 2}
    ack = bench.one(Push, 3, version=0, **last)
    assert bench.shard.version == 1 and (values(ack) == -np.concatenate(pieces)).all()


def test_a_commit_with_a_part_missing_is_incomplete_and_can_be_repaired() -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    last = {**a_push(1.0, 3), "grads": (np.ones(SIZE - 4, np.float32),), "offset": 4, "part": 1, "parts": 2}
    answer = bench.one(Push, 3, version=0, **last)
    assert (answer.code, answer.retryable, bench.shard.version) == ("INCOMPLETE", True, 0)
    bench.ask(Push, 3, version=0, **{**a_push(1.0, 3), "grads": (np.ones(4, np.float32),), "commit": False})
    assert isinstance(bench.one(Push, 3, version=0, **last), Ack)


def test_what_was_staged_is_discarded_by_abort_and_by_a_new_seq() -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    part = {**a_push(1.0, 3), "grads": (np.ones(4, np.float32),), "commit": False}
    bench.ask(Push, 3, version=0, **part)
    bench.ask(Push, 3, version=0, layout_hash=LAYOUT.hash, abort=True)
    assert not bench.shard.clients[ANN].staged
    assert bench.one(Push, 3, version=0, **part).code == "ABORTED", "a late copy of a part"
    bench.ask(Push, 4, version=0, **part)
    assert isinstance(bench.push(5, version=0), Ack)
    assert bench.shard.version == 1 and not bench.shard.clients[ANN].staged


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        ("NONFINITE", {"grads": (np.array([np.inf] + [0] * (SIZE - 1), np.float32),)}),
        ("NONFINITE", {"grads": (np.array([0] * (SIZE - 1) + [np.nan], np.float32),)}),
        ("NONFINITE", {"stats": np.full(16, np.nan, np.float32)}),
        ("BAD_SHAPE", {"offset": 8}),
        ("BAD_SHAPE", {"stats": np.zeros(3, np.float32)}),
        ("BAD_SHAPE", {"counters": np.zeros(3, np.int64)}),
        ("LAYOUT_MISMATCH", {"layout_hash": "00"}),
        ("HYPER", {"hyper": {"lr": 0.1}}),
        ("BAD_FIELD", {"num_samples": 11}),
        ("BAD_FIELD", {"num_samples": (1 << 63) - 1, "grants": ()}),
        ("WRONG_RUN", {"run": RUN + 1}),
        ("WRONG_SHARD", {"shard": 1}),
        ("FENCED", {"incarnation": 99}),
        ("FENCED", {"worker": 5}),
    ],
)
def test_a_bad_push_is_refused_and_changes_nothing(code: str, fields: dict[str, Any]) -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    before = bench.shard.values.params.copy()
    answer = bench.push(3, version=0, **fields)
    assert (type(answer), answer.code) == (Err, code)
    assert bench.shard.version == 0 and (bench.shard.values.params == before).all()
    assert bench.shard.refusals[code] == 1
    assert isinstance(bench.push(4, version=0), Ack), "the next push is served"


def test_a_late_part_of_an_older_push_does_not_disturb_the_one_that_is_staged() -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    half = {"grads": (np.ones(SIZE // 2, np.float32),), "commit": False}
    bench.ask(Push, 4, version=0, **{**a_push(1.0, 4), **half})
    assert bench.one(Push, 3, version=0, **{**a_push(1.0, 3), **half}).code == "OLD_SEQ"
    rest = {"grads": (np.ones(SIZE - SIZE // 2, np.float32),), "offset": SIZE // 2}
    assert isinstance(bench.one(Push, 4, version=0, **{**a_push(1.0, 4), **rest}), Ack)


def test_what_was_refused_for_good_is_never_applied_by_a_late_copy() -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    assert bench.push(3, version=7).code == "NO_SNAPSHOT"
    assert bench.push(3, version=0).code == "NO_SNAPSHOT", "what was said once is said again"
    assert bench.one(Probe, 3).code == "NO_SNAPSHOT"
    assert bench.shard.version == 0


def test_a_window_of_staged_bytes_is_the_most_a_worker_can_make_it_hold() -> None:
    bench = Bench(replace(CONFIG, window_bytes=1))
    bench.ask(Pull, 2)
    assert isinstance(bench.push(3, version=0), Ack), "one whole push always fits"
    part = {**a_push(1.0, 4), "commit": False}
    bench.ask(Push, 4, version=1, **part)
    overlap = {**part, "grads": (np.ones(SIZE - 4, np.float32),), "offset": 4}
    assert bench.one(Push, 4, version=1, **overlap).code == "WINDOW"


def test_a_seq_below_the_window_is_too_old_to_tell() -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    for i in range(70):
        bench.push(3 + i, version=i)
    assert bench.push(3, version=0).code == "OLD_SEQ"
    assert bench.shard.version == 70


# ---- slots -----------------------------------------------------------------------------------------------

TWO_SLOTS = replace(CONFIG, inflight=1)


def test_each_slot_has_its_own_snapshot_and_a_push_is_based_on_that_of_its_slot() -> None:
    bench = Bench(TWO_SLOTS)
    bench.ask(Pull, 2, slot=0), bench.ask(Pull, 3, slot=1)
    first = bench.push(4, version=0, slot=0)
    assert (first.version, first.lag) == (1, 0)
    second = bench.push(5, version=0, slot=1)
    assert (second.version, second.lag) == (2, 1)
    assert (values(first) == -1.0).all() and (values(second) == -2.0).all()
    assert (values(bench.one(Probe, 4)) == -1.0).all(), "the other slot's push has changed nothing in this one"
    assert bench.push(6, version=2, slot=0).code == "NO_SNAPSHOT", "that one is in slot 1"


def test_a_push_is_answered_without_parameters_once_its_slot_holds_newer_ones() -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    bench.push(3, version=0), bench.push(4, version=1)
    again = bench.push(3, version=0)
    assert (type(again), again.version, again.params) == (Ack, 1, ())
    assert bench.shard.version == 2


@pytest.mark.parametrize("config", [CONFIG, TWO_SLOTS], ids=["one", "two"])
def test_there_are_inflight_plus_one_slots(config: ShardConfig) -> None:
    bench = Bench(config)
    beyond = config.inflight + 1
    assert bench.one(Pull, 2, slot=beyond).code == "BAD_FIELD"
    bench.ask(Pull, 3, slot=config.inflight)
    assert bench.push(4, version=0, slot=beyond).code == "BAD_FIELD"
    assert isinstance(bench.push(5, version=0, slot=config.inflight), Ack)


def test_parts_of_two_pushes_are_staged_side_by_side() -> None:
    bench = Bench(TWO_SLOTS)
    bench.ask(Pull, 2, slot=0), bench.ask(Pull, 3, slot=1)
    half = {"grads": (np.ones(SIZE // 2, np.float32),), "commit": False}
    rest = {"grads": (np.ones(SIZE - SIZE // 2, np.float32),), "offset": SIZE // 2}
    for seq in (4, 5):
        assert bench.ask(Push, seq, version=0, slot=seq - 4, **{**a_push(1.0, seq), **half}) == []
    for seq in (4, 5):
        assert isinstance(bench.one(Push, seq, version=0, slot=seq - 4, **{**a_push(1.0, seq), **rest}), Ack)
    assert bench.shard.version == 2 and (bench.shard.values.params == -2.0).all()


# ---- shared memory ---------------------------------------------------------------------------------------


class Near(Bench):
    """A shard that has opened Ann's region before anything else."""

    def __init__(self, config: ShardConfig = CONFIG) -> None:
        super().__init__(config, seeded=False)
        self.plan = RegionPlan(SIZE, config.inflight + 1)
        self.region = replace(private_region(self.plan), token=b"proof")
        self.share = self.offer()
        assert self.share == Share("r", self.plan, create=False)
        (self.attached,) = self.open(self.region)
        assert isinstance(self.init(seq=2)[0], Ack)

    def offer(self, seq: int = 1, **fields: Any) -> Any:
        """The one effect of an offer."""
        ids = {"run": RUN, "shard": 0, "worker": 0, "incarnation": ANN, "seq": seq}
        attach = Attach(**{**ids, "name": "r", "slots": self.plan.num_slots, **fields})
        (effect,) = self.shard.on_message(0.0, ("route", ANN), attach)
        return effect

    def open(self, result: Any) -> list[Any]:
        return self.put(self.shard.on_done(0.0, Computed(self.share, result)))


def test_an_offered_region_is_opened_and_the_answer_proves_it() -> None:
    bench = Near()
    assert isinstance(bench.attached, Attached) and bench.attached.token == b"proof"
    again = bench.offer()
    assert isinstance(again.message, Attached) and again.message.token == b"proof", "asked again it answers again"
    assert bench.offer(seq=3, name="another").message.code == "NO_ARENA"
    assert bench.offer(seq=3, slots=2).message.code == "BAD_FIELD"


def test_in_shared_memory_gradient_and_parameters_stay_where_they_are() -> None:
    bench = Near()
    pulled = bench.one(Pull, 3, shared=True)
    assert (pulled.shared, pulled.params) == (True, ()) and pulled.stats.size == 16
    bench.region.grads[0][:] = 3.0
    ack = bench.push(4, version=0, grads=(), shared=True)
    assert (type(ack), ack.shared, ack.params, ack.version) == (Ack, True, (), 1)
    assert (bench.region.params[0] == -3.0).all() and (bench.shard.values.params == -3.0).all()
    (seen,) = bench.ask(Observe, 5)
    assert (values(seen) == -3.0).all() and not seen.shared, "an observer has no region"


def test_an_update_is_written_to_the_slot_of_its_push_and_to_no_other() -> None:
    bench = Near(TWO_SLOTS)
    bench.ask(Pull, 3, slot=1, shared=True)
    bench.region.params[0][:] = 9.0
    bench.region.grads[1][:] = 1.0
    bench.push(4, version=0, grads=(), shared=True, slot=1)
    assert (bench.region.params[1] == -1.0).all() and (bench.region.params[0] == 9.0).all()


def test_a_worker_that_never_heard_the_yes_is_sent_its_parameters() -> None:
    bench = Near()
    assert (values(bench.one(Pull, 3)) == 0.0).all()
    assert (values(bench.push(4, version=0)) == -1.0).all()
    assert (bench.region.params[0] == 0.0).all(), "nobody reads there"


def test_a_worker_that_has_begun_gets_no_region_any_more() -> None:
    bench = Near()
    bench.admit(BOB)
    bench.ask(Pull, 1, BOB)
    assert bench.offer(worker=BOB - ANN, incarnation=BOB, name="b", seq=2).message.code == "NO_ARENA"


def test_who_shares_no_memory_cannot_say_that_its_gradient_lies_there() -> None:
    bench = Bench()
    assert bench.one(Pull, 9, shared=True).code == "NO_ARENA"
    bench.ask(Pull, 2)
    assert bench.push(3, version=0, grads=(), shared=True).code == "NO_ARENA"
    assert bench.shard.version == 0


def test_a_region_that_cannot_be_opened_is_refused_and_data_travels() -> None:
    bench = Near()
    bench.admit(BOB)
    share = bench.offer(worker=BOB - ANN, incarnation=BOB, name="gone")
    refused = bench.put(bench.shard.on_done(0.0, Computed(share, SharedMemoryError("no region gone"))))
    assert [(m.code, m.text) for m in refused] == [("NO_ARENA", "no region gone")]  # type: ignore[attr-defined]
    assert values(bench.one(Pull, 3, BOB)).size == SIZE


def test_with_the_end_of_a_life_its_region_is_closed() -> None:
    bench = Near()
    effects = bench.shard.on_message(0.0, BROKER, Fence(run=RUN, shard=0, worker=0, incarnation=ANN))
    assert Unshare("r") in effects


def test_memory_that_is_shared_is_not_the_shards() -> None:
    bench, alone = Near(), Bench()
    bench.ask(Pull, 3, shared=True), alone.ask(Pull, 3)
    assert alone.shard.facts()["resident_bytes"] - bench.shard.facts()["resident_bytes"] >= 4 * SIZE


# ---- compression -----------------------------------------------------------------------------------------


def compressed(codec: str, grad: Array, offset: int = 0) -> dict[str, Any]:
    packed = encode(Compression(codec, 0.25), grad)
    return {"grads": (), "codec": codec, "packed": packed, "count": grad.size, "offset": offset}


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8", "topk"])
def test_a_compressed_push_is_applied_as_what_it_unpacks_to(codec: str) -> None:
    grad = np.random.default_rng(2).standard_normal(SIZE).astype(np.float32)
    bench, plain = Bench(), Bench()
    bench.ask(Pull, 2), plain.ask(Pull, 2)
    unpacked = np.zeros(SIZE, np.float32)
    decode(codec, encode(Compression(codec, 0.25), grad), unpacked)
    ack = bench.push(3, version=0, **compressed(codec, grad))
    expected = plain.push(3, version=0, grads=(unpacked,))
    assert values(ack).tobytes() == values(expected).tobytes() and np.abs(values(ack)).max() > 0


def test_compressed_parts_are_put_together() -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    halves = [np.full(SIZE // 2, 2.0, np.float32), np.full(SIZE - SIZE // 2, 4.0, np.float32)]
    first = {**a_push(0, 3), **compressed("bf16", halves[0]), "commit": False, "part": 0, "parts": 2}
    assert bench.ask(Push, 3, version=0, **first) == []
    ack = bench.push(3, version=0, **compressed("bf16", halves[1], SIZE // 2), part=1, parts=2)
    assert (values(ack) == -np.concatenate(halves)).all()


def test_a_late_part_of_a_given_up_push_leaves_the_compressed_one_that_is_staged_alone() -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    half = SIZE // 2
    first, rest = np.full(half, 2.0, np.float32), np.full(SIZE - half, 4.0, np.float32)
    parts = {"commit": False, "part": 0, "parts": 2}
    bench.ask(Push, 4, version=0, **{**a_push(0, 4), **compressed("bf16", first), **parts})
    late = {**a_push(0, 3), **compressed("bf16", np.full(half, 99.0, np.float32)), **parts}
    assert bench.one(Push, 3, version=0, **late).code == "OLD_SEQ"
    ack = bench.push(4, version=0, **compressed("bf16", rest, half), part=1, parts=2)
    assert (values(ack) == -np.concatenate([first, rest])).all()


@pytest.mark.parametrize(
    "fields",
    [
        {"codec": "zip"},
        {"count": SIZE - 1},
        {"count": SIZE + 16},
        {"offset": 4},
        {"count": 1 << 62},
        {"packed": ()},
        {"packed": (np.zeros(SIZE, np.float32),)},
        {"grads": (np.ones(SIZE, np.float32),)},
    ],
    ids=str,
)
def test_what_does_not_unpack_is_refused_and_changes_nothing(fields: dict[str, Any]) -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    body = {**compressed("bf16", np.ones(SIZE, np.float32)), **fields}
    assert bench.push(3, version=0, **body).code in ("BAD_SHAPE", "BAD_FIELD")
    assert bench.shard.version == 0
    assert isinstance(bench.push(4, version=0), Ack)


def test_what_unpacks_to_something_not_finite_is_refused() -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    grad = np.ones(SIZE, np.float32)
    grad[5] = np.inf
    assert bench.push(3, version=0, **compressed("bf16", grad)).code == "NONFINITE"


def test_a_compressed_answer_is_the_difference_to_what_was_sent_before_and_comes_whole_when_repeated() -> None:
    bench = Bench(replace(CONFIG, pull=Compression("bf16")))
    theirs = values(bench.one(Pull, 2)).copy()
    ack = bench.push(3, version=0, grad=1.001)
    assert (ack.codec, ack.params, ack.count) == ("bf16", (), SIZE)
    decode_onto(ack.codec, ack.packed, theirs)
    again = bench.push(3, version=0, grad=1.001)
    assert again.codec == "" and values(again).tobytes() == theirs.tobytes()
    assert (bench.shard.values.params != theirs).all(), "the difference lacks some bits, and the snapshot knows it"


# ---- clocks and buffers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [2, 8])
def test_the_learning_rate_follows_the_samples_not_the_workers(num_workers: int) -> None:
    """torchft#58: the same rate for 2 and for 8 workers at the same samples seen."""
    bench = Bench(replace(CONFIG, schedule=Schedule(lr=1.0, epochs=2, kind="step", milestones=(0.5,))))
    for k in range(num_workers):
        bench.admit(ANN + k)
        bench.ask(Pull, 2, ANN + k)
    steps = []
    for i in range(16):
        who = ANN + i % num_workers
        before = bench.shard.values.params[0]
        bench.ask(Pull, 3 + 2 * i, who)
        bench.push(4 + 2 * i, version=i, who=who)
        steps.append(round(float(before - bench.shard.values.params[0]), 4))
    assert steps == [1.0] * 10 + [0.1] * 6  # 100 samples an epoch, 10 a push


def test_a_push_moves_the_float_buffers_by_what_its_batch_changed_and_counters_take_the_maximum() -> None:
    bench = Bench()
    bench.admit(BOB)
    sevens = np.full(8, 7, np.int64)
    bench.ask(Pull, 2), bench.ask(Pull, 2, BOB)
    ack = bench.push(3, version=0, stats=np.full(16, 10.0, np.float32), counters=sevens)
    assert ack.stats == pytest.approx(10.0) and (ack.counters == 7).all()
    ack = bench.push(3, version=0, who=BOB, stats=np.full(16, 4.0, np.float32), counters=sevens - 5)
    assert ack.stats == pytest.approx(12.0) and (ack.counters == 7).all(), "half of the change, as its lag is 1"


def buffers_after(num_workers: int, steps: int, momentum: float) -> list[float]:
    """The first float buffer after each push of workers in turn, each moving it by `momentum` towards 1."""
    bench = Bench()
    for k in range(num_workers):
        bench.admit(ANN + k)
    stats = [bench.one(Pull, 2, ANN + k).stats for k in range(num_workers)]
    versions = [0] * num_workers
    seen = []
    for i in range(steps * num_workers):
        k = i % num_workers
        moved = np.float32(1 - momentum) * stats[k] + np.float32(momentum)
        ack = bench.push(3 + i // num_workers, version=versions[k], who=ANN + k, stats=moved)
        stats[k], versions[k] = ack.stats, ack.version
        seen.append(float(ack.stats[0]))
    return seen


@pytest.mark.parametrize("num_workers", [1, 2, 4, 16])
def test_batchnorms_average_follows_as_fast_as_each_worker_steps(num_workers: int) -> None:
    """mxnet#1410: an average of averages would have a tenth of that speed, and evaluation would be far off."""
    assert 1 - buffers_after(num_workers, steps=20, momentum=0.1)[-1] == pytest.approx(0.9**20, abs=0.05)


@pytest.mark.parametrize("num_workers", [2, 4, 8, 32])
def test_a_buffer_that_every_batch_sets_anew_settles_whatever_the_lag(num_workers: int) -> None:
    seen = buffers_after(num_workers, steps=30, momentum=1.0)
    first_round = sum(1 / (1 + lag) for lag in range(num_workers))  # everybody's first change, each with its lag
    assert max(seen) <= first_round + 0.01 and seen[-1] == pytest.approx(1.0, abs=0.01)


def test_a_buffer_that_does_not_change_is_left_alone_bit_for_bit() -> None:
    bench = Bench()
    bench.shard.values.stats[:] = np.float32(0.1)
    bench.ask(Pull, 2)
    for i in range(50):
        bench.push(3 + i, version=i, stats=np.full(16, 0.1, np.float32))
    assert (bench.shard.values.stats == np.float32(0.1)).all()


# ---- the end of a worker, of the shard -------------------------------------------------------------------


def test_a_fenced_incarnation_is_told_what_was_applied_and_never_served_again() -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    bench.push(3, version=0)
    order = Fence(run=RUN, shard=0, worker=0, incarnation=ANN)
    (told,) = bench.broker(order)
    assert isinstance(told, Fenced) and [p.seq for p in told.pushes] == [3] and told.high == 3
    (again,) = bench.broker(order)
    assert again.pushes == told.pushes  # type: ignore[attr-defined]
    assert bench.push(4, version=1).code == "FENCED"
    bench.broker(Lease(run=RUN, shard=0, settled=(ANN,)))
    assert not bench.shard.fenced
    bench.admit(ANN)
    assert bench.push(4, version=1).code == "FENCED", "a late copy of ADMIT does not raise the dead"


def test_fencing_somebody_unknown_is_answered_too() -> None:
    bench = Bench()
    (told,) = bench.broker(Fence(run=RUN, shard=0, worker=7, incarnation=77))
    assert isinstance(told, Fenced) and told.pushes == ()
    assert [type(m) for m in bench.broker(Admit(run=RUN, shard=0, worker=7, incarnation=77))] == [Admitted]
    assert bench.one(Pull, 1, 77, worker=7).code == "FENCED"


def test_observing_leaves_no_trace() -> None:
    bench = Bench()
    answer = bench.one(Observe, 1, who=99)
    assert isinstance(answer, Params) and (values(answer) == 0).all()
    assert list(bench.shard.clients) == [ANN] and not bench.shard.clients[ANN].snapshots


def test_an_err_is_never_answered() -> None:
    assert Bench().ask(Err, 1, code="X") == []


def test_stop_ends_it_with_its_last_figures() -> None:
    bench = Bench()
    effects = bench.shard.on_message(0.0, BROKER, StopMsg(run=RUN, reason="done", code=0))
    kinds = [e.message.kind.name for e in effects if isinstance(e, Send)]
    assert kinds == ["RENEW", "BYE"] and effects[-1] == Stop("done", 0)
    assert bench.ask(Pull, 9) == []


def test_a_silent_broker_is_given_up() -> None:
    shard = Shard(0.0, b"t", "tcp://x:1", broker_timeout_s=5.0)
    now, ends = 0.0, []
    while not ends and now < 60:
        now = shard.next_deadline()
        ends = [e for e in shard.on_timer(now) if isinstance(e, Stop)]
    assert 5.0 <= now < 8.0 and ends[0].code == 3


def test_a_large_slice_is_sent_in_parts_that_fit() -> None:
    layout = Layout((TensorSpec("w", (5_000_000,)),))
    shard = Shard(0.0, b"t", "tcp://x:1")
    shard.on_message(0.0, BROKER, Welcome(**WELCOME, config=CONFIG.to_json()))
    shard.on_message(0.0, BROKER, Admit(run=RUN, shard=0, incarnation=ANN, layout=layout, num_samples=1))
    ids = {"run": RUN, "shard": 0, "incarnation": ANN}
    cuts = list(wire.split(np.arange(layout.sizes["params"], dtype=np.float32)))
    for i, (offset, pieces) in enumerate(cuts):
        init = Init(**ids, seq=1, part=i, parts=len(cuts), layout_hash=layout.hash, offset=offset, params=pieces)
        shard.on_message(0.0, "r", init)
    answers = [e.message for e in shard.on_message(0.0, "r", Pull(**ids, seq=2)) if isinstance(e, Send)]
    assert len(answers) == len(cuts) > 1
    decoded = [wire.decode([bytes(f) for f in wire.encode(answer)]) for answer in answers]
    assert (values(*decoded) == np.arange(layout.sizes["params"])).all()
    for answer in shard.on_message(0.0, "r", Pull(**ids, seq=3, inline=True)):
        wire.encode(answer.message)  # type: ignore[union-attr]
