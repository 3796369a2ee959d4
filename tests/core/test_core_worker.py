"""A worker: joins, computes what it is granted, pushes to every shard, leaves without losing anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from zasgd.core.exchange import Exchange, RoundTrip, backoff_s
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.messages import (
    Ack,
    Array,
    Attach,
    Attached,
    Bye,
    Done,
    Err,
    Grant,
    GrantMsg,
    Hello,
    Init,
    Message,
    Params,
    Probe,
    Pull,
    Push,
    Rejoin,
    Renew,
    StopMsg,
    Welcome,
)  # fmt: skip
from zasgd.core.node import BROKER, Compute, Computed, Dial, Effect, Note, Send, Share, Stop, Unshare, shard_peer
from zasgd.core.region import Region, RegionPlan, SharedMemoryError, private_region
from zasgd.core.transfer import Gradient
from zasgd.core.worker import Failed, GradientTask, Phase, Worker, WorkerConfig

RUN, ME = 5, 3
LAYOUT = Layout((TensorSpec("w", (64,)), TensorSpec("m", (16,), section="stats")))
BATCHES = [Grant(0, i, 10 * i, 10 * i + 10) for i in range(100)]


def vectors() -> dict[str, Array]:
    return {
        "params": np.arange(64, dtype=np.float32),
        "stats": np.zeros(16, np.float32),
        "counters": np.empty(0, np.int64),
    }


class Seat:
    """A worker between a broker and two shards that the test plays."""

    def __init__(self, joined: bool = True, hosts: tuple[str, ...] = ("", ""), **config: Any) -> None:
        """hosts: where the shards run."""
        self.now = 0.0
        self.worker = Worker(0.0, b"t", WorkerConfig(**config), LAYOUT, 1000, vectors)
        self.effects: list[Effect] = []
        self.renewals = 0
        if joined:
            (hello,) = self.timers(Hello)
            self.broker(welcome(hello.token, hosts=hosts))

    def take(self, effects: list[Effect]) -> list[Effect]:
        self.worker.validate()
        self.effects = effects
        renewals = [e.message.seq for e in effects if isinstance(e, Send) and isinstance(e.message, Renew)]
        self.renewals = max([self.renewals, *renewals])
        return effects

    def broker(self, msg: Message) -> list[Effect]:
        return self.take(self.worker.on_message(self.now, BROKER, msg))

    def shard(self, k: int, kind: type[Message], **fields: Any) -> list[Effect]:
        ids = {"run": RUN, "shard": k, "incarnation": ME, "seq": self.worker.seq}
        return self.take(self.worker.on_message(self.now, shard_peer(k), kind(**{**ids, **fields})))

    def grant(self, *grants: Grant, **fields: Any) -> list[Effect]:
        ids = {"run": RUN, "incarnation": ME, "seq": self.renewals, "base": self.worker.got}
        return self.broker(GrantMsg(**{**ids, "open": True, "grants": grants, **fields}))

    def params(self, k: int, version: int = 0, kind: type[Message] = Params, **fields: Any) -> list[Effect]:
        part = {"params": (np.full(32, version, np.float32),), "stats": np.full(16 * (1 - k), version, np.float32)}
        return self.shard(k, kind, version=version, **{**part, **fields})

    def done(self, finite: bool = True) -> list[Effect]:
        task = self.worker.task
        assert task is not None
        task.memory.grads[:] = 1
        return self.take(self.worker.on_done(self.now, Computed(task, gradient_of(task, finite))))

    def timers(self, kind: type[Message]) -> list[Any]:
        """Let the next timer fire; its messages of `kind`."""
        self.now = max(self.now, self.worker.next_deadline())
        return sent(self.take(self.worker.on_timer(self.now)), kind)

    def until(self, end: float) -> list[Effect]:
        found = []
        while (due := self.worker.next_deadline()) <= end:
            self.now = max(self.now, due)
            found += self.take(self.worker.on_timer(self.now))
        self.now = max(self.now, end)
        return found


def welcome(token: bytes, incarnation: int = ME, hosts: tuple[str, ...] = ("", "")) -> Welcome:
    where: dict[str, Any] = {"endpoints": ("tcp://a:1", "tcp://b:2"), "hosts": hosts, "data_port": 7471}
    return Welcome(run=RUN, worker=1, incarnation=incarnation, token=token, num_shards=2, lease_s=10.0, **where)


def sent(effects: list[Effect], kind: type[Message]) -> list[Any]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def gradient_of(task: GradientTask, finite: bool = True) -> Gradient:
    """What lies in the task's memory, as the mean of ten samples."""
    return Gradient(task.memory.grads, np.ones(16, np.float32), np.empty(0, np.int64), 10, 0.5, finite)


def computed(effects: list[Effect]) -> list[GradientTask]:
    return [e.task for e in effects if isinstance(e, Compute)]


def computing(num_grants: int = 2, **config: Any) -> Seat:
    """A worker that has pulled version 0 from both shards and computes its first batch."""
    seat = Seat(**config)
    seat.grant(*BATCHES[:num_grants])
    seat.params(0)
    (task,) = computed(seat.params(1))
    assert task.grants[0] == BATCHES[0] and (task.memory.params == 0).all() and (task.memory.stats == 0).all()
    return seat


# ---- joining ---------------------------------------------------------------------------------------------


def test_it_says_hello_until_it_is_welcome_then_dials_and_asks_for_batches() -> None:
    seat = Seat(joined=False, name="ann")
    hellos = [m for _ in range(3) for m in seat.timers(Hello)]
    assert [(m.token, m.name, m.num_samples) for m in hellos] == [(b"t\x01", "ann", 1000)] * 3
    assert seat.broker(welcome(b"somebody else's")) == []
    effects = seat.broker(welcome(b"t\x01"))
    assert [e.endpoint for e in effects if isinstance(e, Dial)] == ["tcp://*:7471", "tcp://*:7471"]
    (renewal,) = sent(effects, Renew)
    assert (renewal.got, renewal.upto) == (0, 1), "one batch while its pace is unknown"


def test_direct_workers_dial_the_shards_themselves() -> None:
    seat = Seat(data_path="direct")
    assert [e.endpoint for e in seat.effects if isinstance(e, Dial)] == ["tcp://a:1", "tcp://b:2"]


def test_no_broker_for_connect_timeout_is_the_end() -> None:
    seat = Seat(joined=False, connect_timeout_s=4.0)
    stops = [e for e in seat.until(20.0) if isinstance(e, Stop)]
    assert [(s.code, s.reason) for s in stops] == [(3, "no broker answered for 4 s")]
    assert seat.worker.next_deadline() == float("inf")


def test_a_refusal_ends_it_unless_trying_again_can_help() -> None:
    seat = Seat(joined=False)
    assert seat.broker(Err(code="NOT_READY", retryable=True)) == []
    assert seat.broker(Err(code="LAYOUT_MISMATCH", text="other model")) == [Stop("other model", 2)]
    late = Seat(joined=False)
    assert late.broker(Err(code="RUN_OVER", text="the run is over")) == [Stop("the run is over", 0)]


def test_the_seeder_sends_each_shard_its_slice_and_says_so() -> None:
    seat = Seat()
    inits = sent(seat.grant(seed=True, open=False), Init)
    assert [(m.shard, m.params[0][0], len(m.params[0])) for m in inits] == [(0, 0.0, 32), (1, 32.0, 32)]
    assert seat.shard(0, Ack) == []
    assert sent(seat.shard(1, Ack), Renew)
    assert seat.worker.phase is Phase.IDLE


def test_it_seeds_only_once_although_the_broker_hears_of_it_later() -> None:
    """The shards' reports may come after its own next renewal: it must not send the whole model again."""
    seat = Seat()
    seat.grant(seed=True, open=False)
    seat.shard(0, Ack)
    seat.shard(1, Ack)
    assert sent(seat.grant(seed=True, open=False), Init) == []
    refused = Seat()
    refused.grant(seed=True, open=False)
    refused.shard(0, Ack)
    refused.shard(1, Err, code="BAD_SHAPE")
    assert len(sent(refused.grant(seed=True, open=False), Init)) == 2, "not all shards have it"


# ---- steps -----------------------------------------------------------------------------------------------


def test_a_step_pulls_computes_pushes_to_every_shard_and_goes_on_with_what_comes_back() -> None:
    seat = Seat()
    assert [m.shard for m in sent(seat.grant(*BATCHES[:2]), Pull)] == [0, 1]
    assert computed(seat.params(0)) == []
    assert len(computed(seat.params(1, version=7))) == 1
    pushes = sent(seat.done(), Push)
    assert [(m.shard, m.version, m.commit, m.grants) for m in pushes] == [
        (0, 0, True, (BATCHES[0],)),
        (1, 7, True, (BATCHES[0],)),
    ]
    seat.params(1, 8, Ack, lag=4)
    (task,) = computed(seat.params(0, 1, Ack, lag=2))
    assert task.grants[0] == BATCHES[1]
    assert (task.memory.params == np.repeat([1.0, 8.0], 32)).all() and (task.memory.stats == 1.0).all()
    assert (seat.worker.steps, seat.worker.lags) == (1, {0: 2, 1: 4})


def test_what_all_shards_acknowledged_is_reported_until_the_broker_has_it() -> None:
    seat = computing()
    seat.done()
    seat.params(0, 1, Ack)
    seat.params(1, 1, Ack)
    first, *_ = sent(seat.until(seat.now + 3.0), Renew)
    assert [p.grants for p in first.final] == [(BATCHES[0],)]
    again = sent(seat.until(seat.now + 4.0), Renew)
    assert again and all([p.grants for p in m.final] == [(BATCHES[0],)] for m in again)
    seat.grant(seq=seat.renewals)
    assert all(not m.final for m in sent(seat.until(seat.now + 4.0), Renew))


@pytest.mark.parametrize(
    "fields", [{"seq": 1}, {"run": RUN + 1}, {"incarnation": ME + 1}, {"shard": 7}], ids=lambda f: next(iter(f))
)
def test_an_acknowledgement_of_anything_else_changes_nothing(fields: dict[str, int]) -> None:
    seat = computing()
    seat.done()
    seat.params(0, 1, Ack)
    assert seat.params(1, 1, Ack, **fields) == []
    assert seat.worker.phase is Phase.PUSHING and seat.worker.steps == 0


def test_a_gradient_that_is_not_finite_reaches_no_shard_and_is_reported() -> None:
    seat = computing()
    effects = seat.done(finite=False)
    assert sent(effects, Push) == []
    assert [n.event for n in effects if isinstance(n, Note)] == ["gradient_refused"]
    assert computed(effects)[0].grants[0] == BATCHES[1], "the parameters are as good as before"
    reported = [r for m in sent(seat.until(seat.now + 3.0), Renew) for r in m.refused]
    assert {(r.grant, r.reason) for r in reported} == {(BATCHES[0], "nonfinite")}


def test_a_push_that_some_shards_refuse_is_torn_and_one_that_all_refuse_is_refused() -> None:
    for codes, kind in (((None, "NONFINITE"), "torn"), (("NONFINITE", "NONFINITE"), "refused")):
        seat = computing()
        seat.done()
        for k, code in enumerate(codes):
            seat.shard(k, Err, code=code) if code else seat.params(k, 1, Ack)
        assert seat.worker.phase is Phase.PULLING, "what a refusing shard holds must be pulled again"
        (renewal, *_) = sent(seat.until(seat.now + 3.0), Renew)
        assert (len(renewal.final), len(renewal.torn), len(renewal.refused)) == (0, kind == "torn", kind == "refused")


def test_the_result_of_a_former_task_is_nobodys_gradient() -> None:
    seat = computing()
    stale = seat.worker.task
    assert stale is not None
    seat.broker(Err(run=RUN, incarnation=ME, code="FENCED", text="its lease ran out"))
    assert seat.worker.phase is Phase.JOINING
    assert seat.take(seat.worker.on_done(seat.now, Computed(stale, gradient_of(stale)))) == []


@pytest.mark.parametrize(("step_s", "ahead"), [(0.004, 32), (0.05, 10), (0.3, 2), (2.0, 1)])
def test_a_worker_holds_half_a_second_of_work_in_reserve_and_a_slow_one_a_single_batch(
    step_s: float, ahead: int
) -> None:
    seat = computing(1)
    seat.grant()
    seat.now += step_s
    seat.done()
    seat.params(0, 1, Ack)
    (renewal,) = sent(seat.params(1, 1, Ack), Renew)
    assert renewal.upto - renewal.got == ahead


def test_a_paced_worker_waits_without_pulling_again() -> None:
    seat = computing(min_step_s=1.0)
    seat.done()
    seat.params(0, 1, Ack)
    assert computed(seat.params(1, 1, Ack)) == []
    effects = seat.until(1.0)
    assert len(computed(effects)) == 1 and sent(effects, Pull) == []


def test_parameters_that_lay_idle_are_pulled_again() -> None:
    seat = computing(num_grants=1)
    seat.done()
    seat.params(0, 1, Ack)
    seat.params(1, 1, Ack)
    seat.until(seat.now + 5.0)
    assert sent(seat.grant(BATCHES[1]), Pull)


def test_a_lost_answer_with_grants_is_repaired_and_none_is_computed_twice() -> None:
    seat = computing(num_grants=2)
    assert sent(seat.until(seat.now + 2.6), Renew)
    seat.grant(*BATCHES[:3], base=0)
    assert list(seat.worker.grants) == BATCHES[1:3]
    assert seat.grant(*BATCHES[50:], seq=1) == [], "an answer to an older renewal"


# ---- two slots -------------------------------------------------------------------------------------------


def test_with_a_push_on_its_way_it_computes_on_the_other_slot() -> None:
    seat = computing(num_grants=4, inflight=1)
    first = seat.worker.task
    effects = seat.done()
    pushed = {m.seq for m in sent(effects, Push)}
    assert [m.slot for m in sent(effects, Push)] == [0, 0] and [m.slot for m in sent(effects, Pull)] == [1, 1]
    seat.params(0, 1)
    (second,) = computed(seat.params(1, 1))
    assert second.grants[0] == BATCHES[1] and (second.memory.params == 1.0).all()
    assert first is not None and not np.may_share_memory(first.memory.params, second.memory.params)
    (seq,) = pushed
    assert seat.params(0, 2, Ack, seq=seq) == []
    assert sent(seat.params(1, 2, Ack, seq=seq), Push) == [] and seat.worker.steps == 1
    assert (second.memory.params == 1.0).all(), "an answer to the other slot is no change to what is computed on"
    effects = seat.done()
    assert [(m.slot, m.version) for m in sent(effects, Push)] == [(1, 1), (1, 1)]
    (third,) = computed(effects)
    assert (third.memory.params == 2.0).all() and third.memory is first.memory


def test_no_more_pushes_are_out_than_there_are_slots() -> None:
    seat = computing(num_grants=4, inflight=1)
    seat.done()
    seat.params(0, 1), seat.params(1, 1)
    assert computed(seat.done()) == [] and seat.worker.phase is Phase.PUSHING
    assert sent(seat.effects, Pull) == []


def test_leaving_waits_for_both_pushes() -> None:
    seat = computing(num_grants=4, inflight=1)
    (seq,) = {m.seq for m in sent(seat.done(), Push)}
    seat.params(0, 1), seat.params(1, 1)
    seat.take(seat.worker.leave(seat.now, "SIGTERM"))
    assert len(sent(seat.done(), Push)) == 2
    seat.params(0, 2, Ack), seat.params(1, 2, Ack)
    assert seat.worker.phase is Phase.PUSHING
    seat.params(0, 1, Ack, seq=seq)
    (bye,) = sent(seat.params(1, 1, Ack, seq=seq), Bye)
    assert {p.grants for p in bye.final} == {(BATCHES[0],), (BATCHES[1],)}


# ---- shared memory ---------------------------------------------------------------------------------------


def sharing(**config: Any) -> tuple[Seat, Share]:
    """A worker on the host of shard 0, and the memory that it asks for."""
    seat = Seat(hosts=("here", "there"), **{"host": "here", **config})
    (share,) = (e for e in seat.effects if isinstance(e, Share))
    return seat, share


def with_region(seat: Seat, share: Share) -> Region:
    region = replace(private_region(share.plan), token=b"proof")
    seat.take(seat.worker.on_done(seat.now, Computed(share, region)))
    return region


def test_shards_of_its_host_are_dialled_and_offered_memory_before_anything_is_computed() -> None:
    seat, share = sharing()
    assert [e.endpoint for e in seat.effects if isinstance(e, Dial)] == ["tcp://a:1", "tcp://*:7471"]
    assert share.create and share.plan == RegionPlan(64, 1)
    seat.grant(*BATCHES[:2])
    assert seat.worker.phase is Phase.IDLE, "there is no memory yet"
    with_region(seat, share)
    assert [(m.shard, m.name, m.slots) for m in sent(seat.effects, Attach)] == [(0, share.name, 1), (1, share.name, 1)]
    assert seat.worker.phase is Phase.ATTACHING


def test_what_is_shared_does_not_travel_and_what_is_not_does() -> None:
    seat, share = sharing()
    region = with_region(seat, share)
    seat.shard(0, Attached, token=b"proof")
    seat.shard(1, Err, code="NO_ARENA")
    assert seat.worker.paths.name == "arena+relay"
    seat.grant(*BATCHES[:2])
    region.params[0][:32] = 7.0
    seat.shard(0, Params, version=3, shared=True, stats=np.zeros(16, np.float32))
    (task,) = computed(seat.params(1, 4))
    assert task.memory.params is region.params[0]
    assert (task.memory.params == np.repeat([7.0, 4.0], 32)).all()
    near, far = sent(seat.done(), Push)
    assert (near.shared, near.grads, near.commit, near.version) == (True, (), True, 3)
    assert (far.shared, far.commit) == (False, True) and (far.grads[0] == 1.0).all()
    seat.shard(0, Ack, version=4, shared=True)
    assert len(computed(seat.params(1, 5, Ack))) == 1, "nothing is missing"


def test_a_shard_that_has_read_something_else_has_other_memory() -> None:
    seat, share = sharing()
    with_region(seat, share)
    seat.shard(0, Attached, token=b"something else")
    effects = seat.shard(1, Err, code="NO_ARENA")
    assert seat.worker.paths.attached == set() and seat.worker.paths.name == "direct+relay"
    assert [e.name for e in effects if isinstance(e, Unshare)] == [share.name], (
        "memory that nobody shares is given back"
    )


def test_without_shared_memory_data_travels_and_a_note_says_why() -> None:
    seat, share = sharing()
    effects = seat.take(seat.worker.on_done(seat.now, Computed(share, SharedMemoryError("/dev/shm is full"))))
    (note,) = (e for e in effects if isinstance(e, Note))
    assert (note.event, note.fields["why"]) == ("arena_refused", "/dev/shm is full")
    assert sent(effects, Attach) == [] and sent(seat.grant(*BATCHES[:2]), Pull)


def test_a_shard_that_does_not_answer_the_offer_is_reached_through_the_relay_after_two_seconds() -> None:
    seat, share = sharing()
    with_region(seat, share)
    seat.shard(1, Err, code="NO_ARENA")
    effects = seat.until(seat.now + 2.1)
    assert [(e.peer, e.endpoint) for e in effects if isinstance(e, Dial)] == [(shard_peer(0), "tcp://*:7471")]
    assert seat.worker.phase is Phase.IDLE and seat.worker.paths.name == "relay"
    assert seat.shard(0, Attached, token=b"proof") == [] and seat.worker.paths.attached == set(), "too late"


@pytest.mark.parametrize(
    ("data_path", "asked"), [("auto", False), ("arena", True), ("direct", False), ("relay", False)]
)
def test_memory_is_asked_for_where_the_data_path_says(data_path: str, asked: bool) -> None:
    """Of shards on another host only `arena` tries: a container may share memory under another name."""
    seat = Seat(hosts=("there", "elsewhere"), host="here", data_path=data_path)
    assert any(isinstance(e, Share) for e in seat.effects) is asked


def test_a_fenced_life_ends_with_its_memory() -> None:
    seat, share = sharing()
    with_region(seat, share)
    seat.shard(0, Attached, token=b"proof"), seat.shard(1, Err, code="NO_ARENA")
    seat.broker(Err(run=RUN, incarnation=ME, code="FENCED", text="its lease ran out"))
    (hello,) = seat.timers(Hello)
    effects = seat.broker(welcome(hello.token, ME + 1, hosts=("here", "there")))
    (again,) = (e for e in effects if isinstance(e, Share))
    assert again.name != share.name and seat.worker.paths.attached == set()


# ---- trouble ---------------------------------------------------------------------------------------------


def test_a_push_without_an_answer_is_probed_and_repeated_only_when_unknown() -> None:
    seat = computing()
    seat.done()
    seat.params(0, 1, Ack)
    effects = seat.until(seat.now + 2.5)
    assert {m.shard for m in sent(effects, Probe)} == {1} and sent(effects, Push) == []
    again = seat.shard(1, Err, code="UNKNOWN_SEQ", retryable=True)
    assert [m.shard for m in sent(again, Push)] == [1]
    assert len(computed(seat.params(1, 1, Ack))) == 1


def test_it_rejoins_after_a_silent_lease_and_gives_up_after_broker_timeout() -> None:
    seat = computing(broker_timeout_s=25.0)
    effects = seat.until(20.0)
    assert sent(effects, Rejoin)
    assert [e.code for e in seat.until(60.0) if isinstance(e, Stop)] == [3]


def test_fenced_it_begins_a_new_life_and_superseded_it_stops() -> None:
    seat = computing()
    seat.broker(Err(run=RUN, incarnation=ME, code="FENCED", text="its lease ran out"))
    (hello,) = seat.timers(Hello)
    assert hello.token == b"t\x02", "the next life bears another token"
    seat.broker(welcome(hello.token, ME + 1))
    assert (seat.worker.incarnation, seat.worker.num_lives, seat.worker.got) == (ME + 1, 2, 0)
    other = computing(name="ann")
    (stop,) = other.broker(Err(run=RUN, incarnation=ME, code="SUPERSEDED", text="x"))
    assert isinstance(stop, Stop) and stop.code == 3 and "'ann'" in stop.reason


def test_a_shard_that_says_fenced_makes_it_ask_the_broker() -> None:
    seat = computing()
    seat.done()
    assert sent(seat.shard(0, Err, code="FENCED"), Rejoin)


# ---- leaving ---------------------------------------------------------------------------------------------


def test_leaving_finishes_the_batch_in_hand_pushes_it_and_says_goodbye() -> None:
    seat = computing()
    assert seat.take(seat.worker.leave(seat.now, "SIGTERM")) == []
    assert len(sent(seat.done(), Push)) == 2
    seat.params(0, 1, Ack)
    (bye,) = sent(seat.params(1, 1, Ack), Bye)
    assert [p.grants for p in bye.final] == [(BATCHES[0],)]
    assert sent(seat.until(seat.now + 1.2), Bye), "repeated until it is heard"
    assert seat.broker(Done(run=RUN, incarnation=ME)) == [Stop("SIGTERM", 0)]


def test_a_drained_worker_leaves_and_one_whose_grace_is_over_does_not_wait() -> None:
    seat = computing()
    assert sent(seat.until(seat.now + 2.6), Renew)
    seat.grant(drain=True)
    assert seat.worker.leaving == "drained"
    hasty = computing(grace_s=2.0)
    hasty.worker.leave(hasty.now, "SIGTERM")
    assert sent(hasty.until(2.5), Bye)
    assert [e.code for e in hasty.until(20.0) if isinstance(e, Stop)] == [0], "a broker that is gone holds nobody"


def test_an_error_of_user_code_is_told_and_ends_it_with_code_1() -> None:
    seat = computing()
    effects = seat.take(seat.worker.on_done(seat.now, Computed(seat.worker.task, Failed("ValueError: no"))))
    assert [m.reason for m in sent(effects, Bye)] == ["failed: ValueError: no"]
    assert seat.broker(Done(run=RUN, incarnation=ME)) == [Stop("failed: ValueError: no", 1)]


def test_stop_is_obeyed_with_a_last_report() -> None:
    seat = computing()
    effects = seat.broker(StopMsg(run=RUN, reason="the run is completed"))
    assert sent(effects, Bye) and effects[-1] == Stop("the run is completed", 0)
    assert seat.worker.on_done(seat.now, Computed(None, None)) == []


# ---- exchanges -------------------------------------------------------------------------------------------


def test_backoff_grows_to_half_a_minute_and_never_beyond_its_jitter() -> None:
    waits = [backoff_s(1.0, 7, attempt) for attempt in range(12)]
    assert waits == [backoff_s(1.0, 7, attempt) for attempt in range(12)], "the jitter is a hash, not a die"
    assert all(0.75 * min(30, 2**i) <= wait <= 1.25 * min(30, 2**i) for i, wait in enumerate(waits))


def test_parts_of_two_versions_never_mix() -> None:
    pull = Pull(run=RUN, shard=0, seq=1)
    exchange = Exchange(0.0, 1, {0: ("s", [pull])}, RoundTrip())
    part = {"run": RUN, "shard": 0, "seq": 1, "parts": 2, "params": (np.zeros(32, np.float32),)}
    exchange.on_reply(0.1, Params(**part, part=0, version=1))
    exchange.on_reply(0.2, Params(**part, part=1, version=2, offset=32))
    assert not exchange.settled
    exchange.on_reply(0.3, Params(**part, part=0, version=2))
    assert exchange.settled and exchange.versions == {0: 2}


def test_a_shard_that_asks_for_patience_is_asked_again_later() -> None:
    pull = Pull(run=RUN, shard=0, seq=1)
    exchange = Exchange(0.0, 1, {0: ("s", [pull])}, RoundTrip())
    err = Err(run=RUN, shard=0, seq=1, code="UNSEEDED", retryable=True, retry_after_ms=200)
    assert exchange.on_error(0.1, err) == [] and exchange.next_deadline() == pytest.approx(0.3)
    assert exchange.on_timer(0.31) == [Send("s", pull)]
