"""The broker: admits, grants, fences, settles, and ends a run. Events in, messages out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from zasgd.core.broker import Broker
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.messages import (
    Admit,
    Admitted,
    Applied,
    Bye,
    Describe,
    Drain,
    Err,
    Evaluate,
    Expel,
    Fence,
    Fenced,
    Grant,
    GrantMsg,
    Hello,
    Lease,
    Message,
    Observe,
    Params,
    Refused,
    Rejoin,
    Renew,
    Result,
    Status,
    StopMsg,
    Welcome,
)  # fmt: skip
from zasgd.core.node import Effect, Note, Save, Send, Stop
from zasgd.core.run import BrokerConfig, RunPhase

RUN = 5
LAYOUT = Layout((TensorSpec("w", (100,)),))
CONFIG = BrokerConfig(RUN, '{"recipe": 1}', num_shards=2, epochs=1, batch_size=10, shard_config="{}", data_port=7471)


class Desk:
    """A broker with two servers; every effect is sorted into messages by peer, notes, saves and stops."""

    def __init__(self, config: BrokerConfig = CONFIG, num_servers: int = 2) -> None:
        self.now = 0.0
        self.broker = Broker(0.0, config)
        self.notes: list[Note] = []
        self.stops: list[Stop] = []
        self.saves: list[Save] = []
        self.server_ids = []
        for k in range(num_servers):
            welcome = self.one(f"s{k}", Hello(role="server", token=b"s%d" % k, endpoint=f"tcp://s{k}:1", pid=100 + k))
            self.server_ids.append(welcome.incarnation)
            self.server_renews(k, 1)

    def take(self, effects: list[Effect]) -> list[tuple[Any, Message]]:
        self.broker.validate()
        self.notes += [e for e in effects if isinstance(e, Note)]
        self.stops += [e for e in effects if isinstance(e, Stop)]
        self.saves += [e for e in effects if isinstance(e, Save)]
        return [(e.peer, e.message) for e in effects if isinstance(e, Send)]

    def put(self, peer: str, msg: Message) -> list[tuple[Any, Message]]:
        return self.take(self.broker.on_message(self.now, peer, msg))

    def one(self, peer: str, msg: Message) -> Any:
        """The one answer to the asker."""
        (answer,) = [m for to, m in self.put(peer, msg) if to == peer]
        return answer

    def at(self, now: float) -> list[tuple[Any, Message]]:
        """Let time pass, timer by timer."""
        sent = []
        while (due := self.broker.next_deadline()) <= now:
            self.now = max(self.now, due)
            sent += self.take(self.broker.on_timer(self.now))
        self.now = now
        return sent

    def server_renews(self, k: int, seq: int, **fields: Any) -> list[tuple[Any, Message]]:
        ids = {"run": RUN, "shard": k, "incarnation": self.server_ids[k], "seq": seq, "role": "server"}
        return self.put(f"s{k}", Renew(**ids, **fields))

    def joins(self, token: bytes, name: str = "", layout: Layout | None = LAYOUT, num_samples: int = 40) -> Any:
        """A worker joins and both shards admit it; its WELCOME."""
        peer = token.decode()
        hello = Hello(role="worker", token=token, name=name, layout=layout, num_samples=num_samples, host="h", pid=7)
        orders = [(to, m) for to, m in self.put(peer, hello) if isinstance(m, Admit)]
        assert [to for to, _ in orders] == ["s0", "s1"]
        ids = {"run": RUN, "worker": orders[0][1].worker, "incarnation": orders[0][1].incarnation}
        assert self.put("s0", Admitted(**ids, shard=0)) == []
        ((to, welcome),) = self.put("s1", Admitted(**ids, shard=1))
        assert to == peer and isinstance(welcome, Welcome)
        return welcome

    def opens(self, seeder: Any, seq: int = 2) -> None:
        for k in range(2):
            self.server_renews(k, seq, seeded=seeder.incarnation)
        assert self.broker.run.open

    def renews(self, who: Any, peer: str, seq: int, **fields: Any) -> Any:
        return self.one(peer, Renew(run=RUN, worker=who.worker, incarnation=who.incarnation, seq=seq, **fields))

    def fences(self, who: Any, *applied: tuple[Applied, ...]) -> list[tuple[Any, Message]]:
        sent = []
        for k, pushes in enumerate(applied):
            ids = {"run": RUN, "shard": k, "worker": who.worker, "incarnation": who.incarnation}
            sent += self.put(f"s{k}", Fenced(**ids, pushes=pushes))
        return sent

    def noted(self, event: str) -> list[dict[str, Any]]:
        return [dict(n.fields) for n in self.notes if n.event == event]


def opened(config: BrokerConfig = CONFIG) -> tuple[Desk, Any]:
    """A run that trains, and its first worker, `ann`."""
    desk = Desk(config)
    ann = desk.joins(b"ann")
    desk.opens(ann)
    return desk, ann


# ---- joining ---------------------------------------------------------------------------------------------


def test_a_worker_that_comes_before_the_servers_is_asked_to_come_again() -> None:
    desk = Desk(num_servers=1)
    answer = desk.one("w", Hello(role="worker", token=b"w", layout=LAYOUT, num_samples=40))
    assert (answer.code, answer.retryable) == ("NOT_READY", True)
    assert "1 of 2 servers" in answer.text


def test_a_server_too_many_is_refused_and_a_repeated_hello_gets_the_same_answer() -> None:
    desk = Desk()
    again = desk.one("s0 by another line", Hello(role="server", token=b"s0"))
    assert (again.shard, again.incarnation) == (0, desk.server_ids[0])
    assert desk.one("s2", Hello(role="server", token=b"s2")).code == "FULL"


def test_a_worker_is_welcome_only_when_every_shard_serves_it_and_the_layout_travels_once() -> None:
    desk = Desk()
    desk.joins(b"ann")
    orders = [m for _, m in desk.put("bob", Hello(role="worker", token=b"bob", layout=LAYOUT)) if isinstance(m, Admit)]
    assert [m.layout for m in orders] == [None, None]
    assert desk.put("bob", Hello(role="worker", token=b"bob", layout=LAYOUT)) == []
    repeated = desk.at(1.5)
    assert [(to, type(m)) for to, m in repeated if isinstance(m, Admit)] == [("s0", Admit), ("s1", Admit)]


@pytest.mark.parametrize(
    ("layout", "num_samples", "says"),
    [
        (Layout((TensorSpec("w", (101,)),)), 40, "w [100] float32 where the newcomer's has w [101]"),
        (Layout((*LAYOUT.tensors, TensorSpec("b", (1,)))), 40, "1 tensors, the newcomer's 2"),
        (LAYOUT, 41, "40 samples, the worker has 41"),
    ],
)
def test_a_newcomer_with_another_model_or_data_set_is_refused(layout: Layout, num_samples: int, says: str) -> None:
    desk, _ = opened()
    answer = desk.one("bob", Hello(role="worker", token=b"bob", layout=layout, num_samples=num_samples))
    assert answer.code == "LAYOUT_MISMATCH" and says in answer.text


def test_a_newcomer_may_take_the_layout_of_the_run() -> None:
    desk, _ = opened()
    assert desk.joins(b"bob", layout=None).layout.hash == LAYOUT.hash


@pytest.mark.parametrize(
    ("layout", "num_samples", "code"),
    [
        (None, 40, "NO_LAYOUT"),
        (LAYOUT, 0, "NO_LAYOUT"),
        (Layout(()), 40, "NO_LAYOUT"),
        (Layout((TensorSpec("w", (1,), group=1),)), 40, "BAD_LAYOUT"),
        (Layout((TensorSpec("w", (1,)), TensorSpec("m", (3_000_000,), section="stats"))), 40, "BAD_LAYOUT"),
    ],
)
def test_a_first_layout_that_no_run_can_use_is_refused(layout: Layout | None, num_samples: int, code: str) -> None:
    desk = Desk()
    assert desk.one("w", Hello(role="worker", token=b"w", layout=layout, num_samples=num_samples)).code == code
    assert desk.broker.run.layout is None


def test_a_stranger_learns_the_recipe_and_the_phase() -> None:
    answer = Desk().one("x", Describe())
    assert (answer.recipe, answer.phase, answer.num_shards) == ('{"recipe": 1}', "waiting for parameters", 2)


# ---- seeding ---------------------------------------------------------------------------------------------


def test_the_first_worker_seeds_and_nobody_gets_a_batch_before_all_shards_have_the_parameters() -> None:
    desk = Desk()
    ann, bob = desk.joins(b"ann"), desk.joins(b"bob")
    answer = desk.renews(ann, "ann", 1, upto=4)
    assert (answer.seed, answer.open, answer.grants) == (True, False, ())
    assert not desk.renews(bob, "bob", 1, upto=4).seed
    desk.server_renews(0, 2, seeded=ann.incarnation)
    assert not desk.renews(ann, "ann", 2, upto=4).open
    desk.server_renews(1, 2, seeded=ann.incarnation)
    answer = desk.renews(bob, "bob", 2, upto=2)
    assert answer.open and len(answer.grants) == 2


def test_a_lost_seeder_is_fenced_with_discard_and_the_next_one_seeds() -> None:
    desk = Desk()
    ann, bob = desk.joins(b"ann"), desk.joins(b"bob")
    desk.server_renews(0, 2, seeded=ann.incarnation)
    orders = [m for _, m in desk.put("sup", Expel(host="h", pid=7)) if isinstance(m, Fence)]
    assert {m.discard for m in orders if m.incarnation == ann.incarnation} == {True}
    desk.server_renews(1, 2, seeded=ann.incarnation)
    assert not desk.broker.run.open, "what a dead seeder sent may be forgotten already"
    carol = desk.joins(b"carol")
    desk.fences(bob, (), ())
    desk.fences(ann, (), ())
    assert desk.renews(carol, "carol", 1).seed
    desk.server_renews(0, 3, seeded=ann.incarnation)
    desk.server_renews(1, 3, seeded=carol.incarnation)
    assert not desk.broker.run.open
    desk.opens(carol, seq=4)


# ---- grants ----------------------------------------------------------------------------------------------


def test_a_lost_answer_loses_no_grant_and_a_repeated_question_takes_none() -> None:
    desk, ann = opened()
    lost = desk.renews(ann, "ann", 1, upto=2)
    repaired = desk.renews(ann, "ann", 2, got=0, upto=2)
    assert (repaired.base, repaired.grants) == (0, lost.grants)
    later = desk.renews(ann, "ann", 3, got=2, upto=3)
    assert (later.base, [g.batch for g in later.grants]) == (2, [2])
    assert desk.put("ann", Renew(run=RUN, incarnation=ann.incarnation, seq=2, upto=9)) == [], "an old renewal"
    assert desk.one("ann", Renew(run=RUN, incarnation=ann.incarnation, seq=4, got=9)).code == "BAD_FIELD"


def test_final_pushes_complete_the_run_and_everybody_is_told_to_stop() -> None:
    desk, ann = opened()
    grants = desk.renews(ann, "ann", 1, upto=9).grants
    assert [g.batch for g in grants] == [0, 1, 2, 3]
    final = tuple(Applied(i, (g,)) for i, g in enumerate(grants))
    desk.renews(ann, "ann", 2, got=4, upto=4, final=final)
    assert desk.broker.run.phase is RunPhase.FINISHING
    assert desk.noted("epoch_completed") == [{"epoch": 0, "once": 40, "torn": 0, "skipped": 0}]
    observes = [(to, m) for to, m in desk.at(1.0) if isinstance(m, Observe)]
    assert [to for to, _ in observes] == ["s0", "s1"], "without an evaluator the broker looks itself"
    for k, (_, ask) in enumerate(observes):
        size = LAYOUT.slices("params", 2)[k].size
        answer = Params(run=RUN, shard=k, seq=ask.seq, version=4, params=(np.zeros(size, np.float32),))
        sent = desk.put(f"s{k}", answer)
    assert [s.what for s in desk.saves] == ["params"]
    assert {to for to, m in sent if isinstance(m, StopMsg)} == {"ann", "s0", "s1"}
    for peer, incarnation in [("ann", ann.incarnation), *zip(("s0", "s1"), desk.server_ids, strict=True)]:
        desk.put(peer, Bye(run=RUN, incarnation=incarnation))
    assert desk.stops == [Stop("the run is completed", 0)]
    (summary,) = desk.noted("run_completed")
    assert (summary["samples"], summary["torn"], summary["skipped"]) == (40, 0, 0)


def test_a_gradient_refused_twice_is_skipped_with_its_reason() -> None:
    desk, ann = opened()
    bad = desk.renews(ann, "ann", 1, upto=1).grants[0]
    again = desk.renews(ann, "ann", 2, got=1, upto=2, refused=(Refused(bad, "nonfinite", 1),)).grants
    assert again == (bad,)
    desk.renews(ann, "ann", 3, got=2, upto=2, refused=(Refused(bad, "nonfinite", 2),))
    assert desk.broker.run.ledger.skipped == 10
    assert [n["reason"] for n in desk.noted("batch_refused")] == ["nonfinite", "nonfinite"]


# ---- leaving and dying -----------------------------------------------------------------------------------


def test_a_dead_workers_batches_wait_for_every_shard_and_then_end_as_applied() -> None:
    desk, ann = opened()
    bob = desk.joins(b"bob")
    none, some, every, unsent = desk.renews(ann, "ann", 1, upto=4).grants
    desk.put("s", Expel(host="nowhere", pid=7))
    desk.at(9.0)
    for k in range(2):
        desk.server_renews(k, 3)
    desk.renews(bob, "bob", 1)
    orders = [m for _, m in desk.at(10.5) if isinstance(m, Fence)]
    assert {m.incarnation for m in orders} == {ann.incarnation}
    desk.fences(ann, (Applied(2, (some,)), Applied(3, (every,))))
    assert desk.renews(bob, "bob", 2, upto=4).grants == (), "one shard has not answered"
    ids = {"run": RUN, "shard": 1, "worker": ann.worker, "incarnation": ann.incarnation}
    desk.put("s1", Fenced(**ids, pushes=(Applied(3, (every,)),)))
    assert desk.renews(bob, "bob", 3, upto=4).grants == (none, unsent)
    ledger = desk.broker.run.ledger
    assert (ledger.once, ledger.torn) == (10, 10)
    assert desk.noted("worker_lost")[0]["reason"] == "lease ran out"


def test_the_fenced_are_told_so_and_settled_incarnations_may_be_forgotten() -> None:
    desk, ann = opened()
    desk.put("s", Expel(host="h", pid=7))
    for msg in (Renew(run=RUN, incarnation=ann.incarnation, seq=9), Rejoin(run=RUN, incarnation=ann.incarnation)):
        assert desk.one("ann", msg).code == "FENCED"
    ((_, lease),) = desk.server_renews(0, 3, fenced=(ann.incarnation,))
    assert isinstance(lease, Lease) and lease.settled == ()
    desk.fences(ann, (), ())
    assert desk.server_renews(0, 4, fenced=(ann.incarnation,))[0][1].settled == (ann.incarnation,)  # type: ignore[attr-defined]


def test_goodbye_settles_what_was_final_and_gives_the_rest_back() -> None:
    desk, ann = opened()
    done, held = desk.renews(ann, "ann", 1, upto=2).grants
    desk.put("ann", Bye(run=RUN, incarnation=ann.incarnation, final=(Applied(2, (done,)),)))
    desk.fences(ann, (Applied(2, (done,)),), (Applied(2, (done,)),))
    ledger = desk.broker.run.ledger
    assert (ledger.once, ledger.reissued) == (10, 1)
    bob = desk.joins(b"bob")
    assert desk.renews(bob, "bob", 1, upto=1).grants == (held,)


def test_a_second_process_under_one_name_takes_the_id_and_fences_the_first() -> None:
    desk = Desk()
    first = desk.joins(b"one", name="ann")
    second_hello = Hello(role="worker", token=b"two", name="ann", layout=LAYOUT, num_samples=40)
    sent = desk.put("two", second_hello)
    assert {m.incarnation for _, m in sent if isinstance(m, Fence)} == {first.incarnation}
    assert {m.worker for _, m in sent if isinstance(m, Admit)} == {first.worker}
    assert desk.one("one", Renew(run=RUN, incarnation=first.incarnation, seq=1)).code == "SUPERSEDED"


def test_a_drained_worker_gets_no_more_batches_and_is_told_to_leave() -> None:
    desk, ann = opened()
    assert desk.one("x", Drain(target="nobody")).code == "NO_SUCH_WORKER"
    desk.one("x", Drain(target=str(ann.worker)))
    answer = desk.renews(ann, "ann", 1, upto=4)
    assert answer.drain and answer.grants == ()
    assert desk.broker.run.members.of("worker")[0].drain


def test_without_a_server_there_is_no_run() -> None:
    desk, _ = opened()
    sent = desk.put("sup", Expel(host="", pid=101))
    assert {m.code for _, m in sent if isinstance(m, StopMsg)} == {3}
    assert desk.noted("run_failed")[0]["reason"].startswith("shard 1 was lost")
    desk.at(10.0)
    assert desk.stops == [Stop("the run is failed", 3)]


def test_a_broker_that_stood_still_accuses_nobody() -> None:
    desk, ann = opened()
    desk.now = 60.0  # stopped in the debugger, say
    desk.take(desk.broker.on_timer(60.0))
    assert desk.noted("broker_stalled") and not desk.noted("worker_lost")
    assert isinstance(desk.renews(ann, "ann", 1), GrantMsg)


# ---- evaluations and endings -----------------------------------------------------------------------------


def with_evaluator(config: BrokerConfig = CONFIG) -> tuple[Desk, Any, Any]:
    desk, ann = opened(config)
    return desk, ann, desk.one("ev", Hello(role="eval", token=b"ev", layout=LAYOUT))


def test_after_each_epoch_the_evaluator_is_asked_until_it_answers() -> None:
    desk, ann, ev = with_evaluator(replace(CONFIG, epochs=2))
    grants = desk.renews(ann, "ann", 1, upto=8).grants
    sent = desk.put(
        "ann",
        Renew(
            run=RUN, incarnation=ann.incarnation, seq=2, got=8, upto=8,
            final=tuple(Applied(i, (g,)) for i, g in enumerate(grants[:4])),
        ),
    )  # fmt: skip
    (order,) = [m for to, m in sent if to == "ev"]
    assert isinstance(order, Evaluate) and (order.epoch, order.final) == (0, False)
    assert [m.seq for to, m in desk.at(2.5) if to == "ev" and isinstance(m, Evaluate)] == [order.seq]
    scores = {"test_accuracy": 0.5, "rubbish": [1]}
    desk.put("ev", Result(run=RUN, incarnation=ev.incarnation, seq=order.seq, epoch=0, scores=scores))
    assert desk.noted("evaluated")[0]["test_accuracy"] == 0.5 and "rubbish" not in desk.noted("evaluated")[0]
    assert [m for to, m in desk.at(5.0) if isinstance(m, Evaluate)] == []


def test_a_request_to_stop_has_the_model_scored_and_written_first() -> None:
    desk, _, ev = with_evaluator()
    sent = desk.put("x", StopMsg())
    (order,) = [m for to, m in sent if to == "ev"]
    assert (order.final, order.interrupted) == (True, False)
    sent = desk.put("ev", Result(run=RUN, incarnation=ev.incarnation, seq=order.seq, epoch=0, final=True))
    assert {to for to, m in sent if isinstance(m, StopMsg)} == {"ann", "ev", "s0", "s1"}


def test_an_interrupted_run_waits_for_nobody_for_long() -> None:
    desk, _, _ = with_evaluator()
    (order,) = [m for to, m in desk.put("x", StopMsg(interrupted=True)) if to == "ev"]
    assert order.interrupted
    desk.at(9.0)
    assert desk.stops and desk.noted("run_interrupted")


def test_who_comes_after_the_end_is_told_so() -> None:
    desk, _ = opened()
    desk.put("x", StopMsg())
    assert desk.one("bob", Hello(role="worker", token=b"bob", layout=LAYOUT)).code == "RUN_OVER"


# ---- what people and strangers see -----------------------------------------------------------------------


def test_status_has_what_it_promises() -> None:
    desk, ann, _ = with_evaluator()
    desk.renews(ann, "ann", 1, upto=2, steps=3, phase="computing", facts={"lag": 2, "samples": 30})
    report = desk.one("x", Status()).report
    assert report.keys() >= {"run", "phase", "workers", "shards", "ledger", "lag", "scores", "refusals"}
    (worker,) = report["workers"]
    assert worker.keys() >= {"id", "pid", "host", "state", "lag", "samples_per_s", "name", "steps"}
    assert (worker["state"], worker["lag"], worker["steps"]) == ("computing", 2, 3)
    assert report["shards"][0].keys() >= {"id", "pid", "version", "bytes", "lag"}


@pytest.mark.parametrize(
    "facts", [{"step_s": "x"}, {"loss_sum": [1]}, {"lags": {"a": 1}}, {"lags": [1]}, {"lag": True}]
)
def test_rubbish_among_the_facts_harms_nobody(facts: dict[str, Any]) -> None:
    desk, ann = opened()
    assert isinstance(desk.renews(ann, "ann", 1, facts=facts), GrantMsg)
    desk.server_renews(0, 3, facts=facts)
    desk.at(5.0)
    assert isinstance(desk.one("x", Status()), Status)


def test_strangers_and_nonsense_are_refused() -> None:
    desk, _ = opened()
    assert desk.one("x", Renew(run=RUN + 1, incarnation=1, seq=1)).code == "WRONG_RUN"
    assert desk.one("x", Renew(run=RUN, incarnation=77, seq=1)).code == "FENCED"
    assert desk.one("x", Hello(role="king", token=b"k")).code == "BAD_ROLE"
    assert desk.one("x", GrantMsg(run=RUN)).code == "UNEXPECTED"
    assert desk.put("x", Err(run=RUN, code="X")) == []
    assert desk.one("x", Admitted(run=RUN, shard=9)).code == "FENCED"
    unknown = Grant(0, 0, 0, 10)
    assert isinstance(desk.one("x", Bye(run=RUN, incarnation=77, final=(Applied(1, (unknown,)),))), Message)
    assert desk.broker.run.ledger.once == 0
