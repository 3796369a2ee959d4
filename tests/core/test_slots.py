"""A worker with two slots: while one gradient is on its way, the next is computed in the other; and shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from zasgd.core import wire
from zasgd.core.compression import Compression
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.messages import (
    Ack,
    Attach,
    Attached,
    Bye,
    Err,
    Grant,
    GrantMsg,
    Hello,
    Message,
    Params,
    Pull,
    Push,
    Renew,
    Welcome,
)  # fmt: skip
from zasgd.core.node import BROKER, Computed, Dial, Effect, InvariantError, Send, Share, Unshare, shard_peer
from zasgd.core.region import Region, SharedMemoryError, private_region
from zasgd.core.snapshot import WINDOW
from zasgd.core.worker import Gradient, Phase, Worker, WorkerConfig

RUN, ME = 5, 3
LAYOUT = Layout((TensorSpec("w", (64,)),))
BATCHES = [Grant(0, i, 10 * i, 10 * i + 10) for i in range(200)]
TOP = Compression("topk", 0.01)


class Desk:
    """A worker between a broker and two shards that the test plays. `now` stands still unless a test moves it."""

    def __init__(self, **config: Any) -> None:
        self.now = 0.0
        self.worker = Worker(0.0, b"t", WorkerConfig(**{"inflight": 1, **config}), LAYOUT, 1000, dict)
        self.sent: list[Message] = []
        self.effects: list[Effect] = []
        self.region: Region | None = None
        self.take(self.worker.on_timer(0.0))
        self.welcome(ME)

    def welcome(self, incarnation: int, hosts: Sequence[str] = ()) -> None:
        hello = [m for m in self.sent if isinstance(m, Hello)][-1]
        where = {"endpoints": ("tcp://a:1", "tcp://b:2"), "hosts": tuple(hosts), "data_port": 7471}
        ids = {"run": RUN, "worker": 1, "incarnation": incarnation, "token": hello.token}
        self.take(self.worker.on_message(self.now, BROKER, Welcome(**ids, num_shards=2, lease_s=10.0, **where)))

    def take(self, effects: list[Effect]) -> list[Effect]:
        """Note what left; shared memory is there at once."""
        self.effects += effects
        self.sent += [e.message for e in effects if isinstance(e, Send)]
        for effect in effects:
            if isinstance(effect, Share):
                memory = private_region(effect.plan)
                self.region = Region(memory.params, memory.grads, b"in " + effect.name.encode())
                self.take(self.worker.on_done(self.now, Computed(effect, self.region)))
        self.worker.validate()
        return effects

    def grant(self, count: int, begin: int = 0, **fields: Any) -> None:
        renewal = max(m.seq for m in self.sent if isinstance(m, Renew))
        ids = {"run": RUN, "incarnation": self.worker.incarnation, "seq": renewal, "base": self.worker.got}
        grants = tuple(BATCHES[begin : begin + count])
        self.take(
            self.worker.on_message(self.now, BROKER, GrantMsg(**{**ids, "open": True, "grants": grants, **fields}))
        )

    def answer(self, msg: Message, version: int, **fields: Any) -> None:
        """The shard of `msg` answers it with parameters that are all `version`."""
        kind: type[Message] = Ack if isinstance(msg, Push) else Params
        ids = {"run": RUN, "shard": msg.shard, "incarnation": msg.incarnation, "seq": msg.seq, "version": version}
        part = {"params": (np.full(32, version, np.float32),)}
        reply = kind(**{**ids, **part, **fields})
        self.take(self.worker.on_message(self.now, shard_peer(msg.shard), reply))

    def refuse(self, msg: Message, code: str) -> None:
        err = Err(run=RUN, shard=msg.shard, incarnation=msg.incarnation, seq=msg.seq, code=code, text="")
        self.take(self.worker.on_message(self.now, shard_peer(msg.shard), err))

    def asked(self, kind: type[Message], count: int = 2) -> list[Any]:
        """The last `count` messages of a kind: one to each shard."""
        found = [m for m in self.sent if isinstance(m, kind)]
        assert len(found) >= count, f"no {count} of {kind.__name__} were sent"
        return found[-count:]

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(m, kind) for m in self.sent)

    def answer_all(self, kind: type[Message], version: int) -> None:
        for msg in self.asked(kind):
            self.answer(msg, version)

    def compute(self, value: float = 1.0, *, finite: bool = True) -> list[Any]:
        """The gradient in hand is ready; the pushes that left."""
        task, before = self.worker.task, self.count(Push)
        assert task is not None
        task.memory.grads[:] = value
        found = Gradient(task.memory.grads, np.empty(0, np.float32), np.empty(0, np.int64), 10, 0.5, finite)
        self.take(self.worker.on_done(self.now, Computed(task, found)))
        return [m for m in self.sent if isinstance(m, Push)][before:]

    def timer(self) -> None:
        self.now = max(self.now, self.worker.next_deadline())
        self.take(self.worker.on_timer(self.now))

    def params(self, slot: int) -> list[float]:
        return sorted(set(self.worker.slots[slot].memory.params.tolist()))


def one_out(**config: Any) -> tuple[Desk, list[Any]]:
    """Version 0 was computed on in slot 0 and pushed; slot 1 has pulled version 1 and computes."""
    desk = Desk(**config)
    desk.grant(8)
    desk.answer_all(Pull, 0)
    pushes = desk.compute()
    desk.answer_all(Pull, 1)
    assert desk.worker.phase is Phase.COMPUTING and len(pushes) == 2
    return desk, pushes


# ---- two slots -----------------------------------------------------------------------------------------


def test_the_other_slot_is_filled_and_computed_on_while_a_push_is_out() -> None:
    desk, pushes = one_out()
    assert {m.slot for m in pushes} == {0} and [m.slot for m in desk.asked(Pull)] == [1, 1]
    assert desk.worker.task is not None and desk.worker.task.memory is desk.worker.slots[1].memory
    assert desk.worker.task.grants == (BATCHES[1],)
    assert desk.params(0) == [0.0] and desk.params(1) == [1.0]


def test_an_answer_goes_into_the_slot_that_was_pushed() -> None:
    desk, pushes = one_out()
    for push in pushes:
        desk.answer(push, 7)
    assert desk.params(0) == [7.0] and desk.params(1) == [1.0]
    second = desk.compute()
    assert [(m.slot, m.version) for m in second] == [(1, 1)] * 2
    assert desk.worker.task is not None and desk.worker.task.memory is desk.worker.slots[0].memory
    assert desk.count(Pull) == 4, "what an answer brought needs no pull"


def test_with_both_slots_out_it_waits_for_its_own() -> None:
    desk, first = one_out()
    second = desk.compute()
    assert desk.worker.phase is Phase.PUSHING and desk.worker.task is None
    for push in second:
        desk.answer(push, 9)
    assert desk.worker.phase is Phase.PUSHING, "the slot that comes next is still being sent"
    desk.answer(first[1], 8)
    assert desk.worker.task is None
    desk.answer(first[0], 8)
    assert desk.worker.task is not None and desk.worker.task.memory is desk.worker.slots[0].memory
    assert desk.params(0) == [8.0] and desk.params(1) == [9.0]


def test_what_is_being_sent_stays_as_it_is_while_the_next_is_computed() -> None:
    desk, first = one_out()
    desk.compute(value=5.0)
    assert all(set(np.concatenate(m.grads).tolist()) == {1.0} for m in first)


def test_a_slot_that_one_shard_refused_is_pulled_again_and_the_other_goes_on() -> None:
    desk, first = one_out()
    desk.answer(first[0], 3)
    desk.refuse(first[1], "LAG")
    assert desk.worker.phase is Phase.COMPUTING
    desk.compute()
    assert [(m.slot, m.shard) for m in desk.asked(Pull)] == [(0, 0), (0, 1)]
    assert [r.seq for r in desk.worker.reports.carry(99)["torn"]] == [first[0].seq]


def test_an_answer_of_a_settled_push_changes_nothing() -> None:
    desk, first = one_out()
    for push in first:
        desk.answer(push, 7)
    for push in first:
        desk.answer(push, 8)
    assert desk.params(0) == [7.0]
    assert desk.worker.slots[0].versions == {0: 7, 1: 7}


def test_a_gradient_that_is_not_finite_leaves_the_push_on_its_way_alone() -> None:
    desk, first = one_out()
    assert desk.compute(finite=False) == []
    assert desk.worker.task is not None and desk.worker.task.memory is desk.worker.slots[1].memory
    assert desk.worker.slots[0].exchange is not None
    for push in first:
        desk.answer(push, 2)
    assert [r.seq for r in desk.worker.reports.carry(99)["final"]] == [first[0].seq]


def test_whoever_computes_on_what_is_being_sent_is_found() -> None:
    desk, _ = one_out()
    desk.worker.slots[1].exchange, desk.worker.slots[1].pushing = desk.worker.slots[0].exchange, True
    with pytest.raises(InvariantError, match="computing on what is being sent"):
        desk.worker.validate()


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_never_more_pushes_are_unconfirmed_than_a_shard_remembers(late: bool) -> None:
    """One renewal is answered late and confirms nothing, then the broker is silent; grants there are enough.

    late: a push is answered when the next one has left, so that one is always out.
    """
    desk = Desk()
    desk.grant(50)
    desk.answer_all(Pull, 0)
    desk.timer()
    renewal = desk.asked(Renew, 1)[0].seq
    out: list[Any] = []
    while desk.worker.task is not None:
        before, out = out, desk.compute()
        if desk.worker.phase is Phase.PULLING:
            desk.answer_all(Pull, 1)
        for push in before if late else out:
            desk.answer(push, 1)
        if len(desk.worker.grants) == 1 and desk.worker.got == 50:
            desk.grant(60, 50, seq=renewal)
    for push in out:
        desk.answer(push, 1)
    assert desk.worker.got == 110 and desk.worker.reports.num_pushes == WINDOW


def test_a_worker_that_ran_dry_asks_again_when_its_push_has_left() -> None:
    """Not only when its renewal is due, a quarter of a lease later."""
    desk = Desk()
    desk.grant(1)
    desk.answer_all(Pull, 0)
    desk.grant(0)
    pushes = desk.compute()
    before = desk.count(Renew)
    for push in pushes:
        desk.answer(push, 1)
    while desk.worker.next_deadline() < 1.0:
        desk.timer()
    assert desk.count(Renew) > before


# ---- leaving -------------------------------------------------------------------------------------------


def test_leaving_finishes_the_batch_in_hand_and_both_pushes() -> None:
    desk, first = one_out()
    desk.take(desk.worker.leave(desk.now, "SIGTERM"))
    second = desk.compute()
    for push in second:
        desk.answer(push, 9)
    assert not desk.count(Bye)
    for push in first:
        desk.answer(push, 8)
    [bye] = desk.asked(Bye, 1)
    assert [applied.seq for applied in bye.final] == [second[0].seq, first[0].seq]
    assert desk.worker.phase is Phase.LEAVING


def test_leaving_with_nothing_in_hand_waits_for_the_push_on_its_way() -> None:
    desk = Desk()
    desk.grant(1)
    desk.answer_all(Pull, 0)
    pushes = desk.compute()
    assert desk.worker.phase is Phase.IDLE
    desk.take(desk.worker.leave(desk.now, "SIGTERM"))
    assert not desk.count(Bye) and desk.worker.phase is Phase.PUSHING
    for push in pushes:
        desk.answer(push, 1)
    assert [applied.seq for applied in desk.asked(Bye, 1)[0].final] == [pushes[0].seq]


def test_a_shard_that_is_silent_holds_nobody_beyond_the_grace() -> None:
    desk, _ = one_out()
    desk.take(desk.worker.leave(desk.now, "SIGTERM"))
    desk.compute()
    while desk.worker.phase is not Phase.LEAVING:
        desk.timer()
    assert desk.now == pytest.approx(10.0) and desk.asked(Bye, 1)[0].final == ()


@pytest.mark.parametrize("slots_used", [1, 2, 3])
def test_leaving_sends_what_was_held_back_from_whichever_slot_is_fresh(slots_used: int) -> None:
    """One element of 32 has travelled with each push; the other slot may never have been filled."""
    desk = Desk(push=TOP)
    desk.grant(slots_used)
    desk.answer_all(Pull, 0)
    sent = 0
    for i in range(slots_used):
        for push in desk.compute():
            sent += push.packed[1].sum()
            desk.answer(push, i + 1)
        if i + 1 < slots_used and desk.worker.phase is Phase.PULLING:
            desk.answer_all(Pull, i + 1)
    desk.take(desk.worker.leave(desk.now, "SIGTERM"))
    assert not desk.count(Bye), "it leaves and takes along what it held back"
    owed = desk.asked(Push)
    assert all(m.codec == "" and m.grants == () and m.num_samples == 0 for m in owed)
    assert sent + sum(float(piece.sum()) for m in owed for piece in m.grads) == 64.0 * slots_used
    for push in owed:
        desk.answer(push, 9)
    assert desk.count(Bye) == 1


# ---- shared memory -------------------------------------------------------------------------------------


def shares(effects: Sequence[Effect]) -> list[str]:
    return [e.name for e in effects if isinstance(e, Share)]


def at_the_table(**config: Any) -> Desk:
    """A worker that has offered both shards its memory."""
    desk = Desk(data_path="arena", **config)
    assert desk.worker.phase is Phase.ATTACHING
    return desk


def attached(desk: Desk, msg: Message, token: bytes | None = None) -> None:
    assert desk.region is not None
    ids = {"run": RUN, "shard": msg.shard, "incarnation": msg.incarnation, "seq": msg.seq}
    reply = Attached(**ids, token=desk.region.token if token is None else token)
    desk.take(desk.worker.on_message(desk.now, shard_peer(msg.shard), reply))


def test_gradients_are_computed_in_the_region_and_a_push_says_only_where() -> None:
    desk = at_the_table()
    offers = desk.asked(Attach)
    assert [(m.shard, m.slots) for m in offers] == [(0, 2), (1, 2)] and offers[0].name == shares(desk.effects)[0]
    for offer in offers:
        attached(desk, offer)
    desk.grant(2)
    for pull in desk.asked(Pull):
        desk.answer(pull, 0, shared=True, params=())
    task = desk.worker.task
    assert task is not None and desk.region is not None and task.parts == ()
    assert task.memory.params is desk.region.params[0] and task.memory.grads is desk.region.grads[0]
    assert [(m.shared, m.grads, m.commit) for m in desk.compute()] == [(True, (), True)] * 2
    assert desk.worker.paths.name == "arena"


def test_who_read_another_token_shares_no_memory() -> None:
    desk = at_the_table()
    first, second = desk.asked(Attach)
    attached(desk, first)
    attached(desk, second, token=b"of another region")
    assert desk.worker.paths.attached == {0} and desk.worker.paths.name == "arena+relay"


def test_a_shard_that_refuses_is_sent_gradients() -> None:
    desk = at_the_table()
    first, second = desk.asked(Attach)
    desk.refuse(first, "NO_ARENA")
    attached(desk, second)
    desk.grant(2)
    desk.answer(desk.asked(Pull)[0], 0)
    desk.answer(desk.asked(Pull)[1], 0, shared=True, params=())
    pushes = {m.shard: m for m in desk.compute()}
    assert (pushes[0].shared, pushes[1].shared) == (False, True)
    assert sum(piece.size for piece in pushes[0].grads) == 32


def test_a_claim_to_have_written_into_memory_that_is_not_shared_brings_nothing() -> None:
    """A shard may have opened the region although its answer never came."""
    desk = at_the_table()
    while desk.worker.phase is Phase.ATTACHING:
        desk.timer()
    assert desk.worker.paths.attached == set()
    desk.grant(2)
    for pull in desk.asked(Pull):
        desk.answer(pull, 4, shared=True, params=())
    assert desk.worker.task is None, "it computes on zeros"


def test_offered_memory_that_nobody_took_is_given_back() -> None:
    desk = at_the_table()
    [name] = shares(desk.effects)
    while desk.worker.phase is Phase.ATTACHING:
        desk.timer()
    assert 2.0 <= desk.now < 2.1
    assert Unshare(name) in desk.effects
    relay = [e for e in desk.effects if isinstance(e, Dial)][-2:]
    assert [(e.peer, e.endpoint) for e in relay] == [(shard_peer(k), "tcp://*:7471") for k in (0, 1)]
    assert desk.worker.paths.name == "relay"


def test_a_region_that_cannot_be_made_costs_nothing_but_speed() -> None:
    class Full(Desk):
        def take(self, effects: list[Effect]) -> list[Effect]:
            for effect in effects:
                if isinstance(effect, Share):
                    done = Computed(effect, SharedMemoryError("no space"))
                    return super().take([*effects[: effects.index(effect)], *self.worker.on_done(self.now, done)])
            return super().take(effects)

    desk = Full(data_path="arena")
    assert desk.worker.phase is Phase.IDLE and desk.worker.paths.name == "relay"
    assert not desk.count(Attach)


def test_a_new_life_has_a_new_region_and_gives_the_old_one_back() -> None:
    desk = at_the_table()
    for offer in desk.asked(Attach):
        attached(desk, offer)
    fenced = Err(run=RUN, incarnation=ME, code="FENCED", text="lease ran out")
    desk.take(desk.worker.on_message(desk.now, BROKER, fenced))
    desk.timer()
    desk.welcome(ME + 1)
    old, new = shares(desk.effects)
    assert old != new and desk.asked(Attach)[0].name == new
    assert Unshare(old) in desk.effects, "the memory of the former life stays reserved"


def test_memory_near_by_is_looked_for_only_where_a_shard_is_near() -> None:
    class Elsewhere(Desk):
        def welcome(self, incarnation: int, hosts: Sequence[str] = ()) -> None:
            super().welcome(incarnation, ("there", "elsewhere"))

    class Beside(Desk):
        def welcome(self, incarnation: int, hosts: Sequence[str] = ()) -> None:
            super().welcome(incarnation, ("here", "elsewhere"))

    assert not shares(Elsewhere(data_path="auto", host="here").effects)
    desk = Beside(data_path="auto", host="here")
    assert len(shares(desk.effects)) == 1
    assert desk.worker.paths.dialled == {0: "direct", 1: "relay"}


# ---- parts that leave early ----------------------------------------------------------------------------


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of 32 elements travels in parts of 12, 12 and 8."""
    cut = wire.split
    monkeypatch.setattr(wire, "split", lambda flat, limit=wire.MAX_PART_BYTES: cut(flat, min(limit, 48)))


def ready(desk: Desk, start: int, value: float = 1.0) -> Any:
    task = desk.worker.task
    assert task is not None
    stop = dict(task.parts)[start]
    task.memory.grads[start:stop] = value
    [effect] = desk.take(desk.worker.on_part(desk.now, task, start))
    assert isinstance(effect, Send)
    return effect.message


def test_a_part_leaves_when_it_is_ready_and_not_again_at_the_commit(small_parts: None) -> None:
    desk = Desk(inflight=0)
    desk.grant(1)
    desk.answer_all(Pull, 0)
    assert desk.worker.task is not None
    assert desk.worker.task.parts == ((12, 24), (24, 32), (44, 56), (56, 64))
    early = [ready(desk, 56), ready(desk, 24)]
    assert [(m.shard, m.part, m.parts, m.offset, m.commit) for m in early] == [
        (1, 2, 3, 24, False),
        (0, 2, 3, 24, False),
    ]
    rest = desk.compute()
    assert [(m.shard, m.part, m.commit) for m in rest] == [(0, 1, False), (0, 0, True), (1, 1, False), (1, 0, True)]
    assert {m.seq for m in [*early, *rest]} == {desk.worker.seq}


@pytest.mark.parametrize("code", ["INCOMPLETE", "UNKNOWN_SEQ"])
def test_a_shard_that_lacks_parts_gets_them_all_again(code: str, small_parts: None) -> None:
    desk = Desk(inflight=0)
    desk.grant(1)
    desk.answer_all(Pull, 0)
    for start in (56, 44):
        ready(desk, start)
    last = desk.compute()[-1]
    err = Err(run=RUN, shard=1, incarnation=ME, seq=last.seq, code=code, text="", retryable=True)
    again = [e.message for e in desk.take(desk.worker.on_message(desk.now, shard_peer(1), err)) if isinstance(e, Send)]
    assert [(m.shard, m.part, m.commit) for m in again] == [(1, 1, False), (1, 2, False), (1, 0, True)]  # type: ignore[attr-defined]


def test_parts_of_a_gradient_that_is_not_finite_are_called_off_where_they_went(small_parts: None) -> None:
    desk = Desk(inflight=0)
    desk.grant(2)
    desk.answer_all(Pull, 0)
    part = ready(desk, 56)
    [abort] = desk.compute(finite=False)
    assert (abort.abort, abort.commit, abort.shard, abort.seq) == (True, False, 1, part.seq)
    assert desk.worker.task is not None and desk.worker.seq > part.seq


def test_a_part_of_a_former_task_does_not_leave(small_parts: None) -> None:
    desk = Desk(inflight=0)
    desk.grant(2)
    desk.answer_all(Pull, 0)
    old = desk.worker.task
    desk.compute(finite=False)
    assert old is not None and desk.worker.on_part(desk.now, old, 56) == []


def test_nothing_leaves_early_with_error_feedback_and_nothing_of_shared_memory(small_parts: None) -> None:
    desk = Desk(push=Compression("int8"))
    desk.grant(1)
    desk.answer_all(Pull, 0)
    assert desk.worker.task is not None and desk.worker.task.parts == ()
    desk = at_the_table()
    first, second = desk.asked(Attach)
    attached(desk, first)
    desk.refuse(second, "NO_ARENA")
    desk.grant(1)
    desk.answer(desk.asked(Pull)[0], 0, shared=True, params=())
    desk.answer(desk.asked(Pull)[1], 0)
    assert desk.worker.task is not None and desk.worker.task.parts == ((44, 56), (56, 64))
