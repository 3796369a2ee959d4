"""The evaluator: looks when it is asked, answers once, and is nobody's burden."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from zasgd.core.evaluator import Evaluator, ScoreTask
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.messages import (
    Bye,
    Err,
    Evaluate,
    Hello,
    Lease,
    Message,
    Observe,
    Params,
    Renew,
    Result,
    StopMsg,
    Welcome,
)  # fmt: skip
from zasgd.core.node import BROKER, Compute, Computed, Dial, Effect, Send, Stop, shard_peer
from zasgd.core.worker import Failed, WorkerConfig

LAYOUT = Layout((TensorSpec("w", (64,)),))
RUN, ME = 4, 11


class Seat:
    """An evaluator between a broker and two shards that the test plays; validated after every event."""

    def __init__(self, joined: bool = True, **config: Any) -> None:
        self.now = 0.0
        self.node = Evaluator(0.0, b"t", WorkerConfig(name="eve", **config), LAYOUT)
        self.effects: list[Effect] = []
        if joined:
            self.timers()
            welcome = Welcome(run=RUN, incarnation=ME, token=b"t", num_shards=2, lease_s=8.0, **ENDPOINTS)
            self.broker(welcome)

    def take(self, effects: list[Effect]) -> list[Effect]:
        if not self.node.stopped:
            self.node.validate()
        self.effects = effects
        return effects

    def broker(self, msg: Message) -> list[Effect]:
        return self.take(self.node.on_message(self.now, BROKER, msg))

    def order(self, seq: int = 1, **fields: Any) -> list[Effect]:
        return self.broker(Evaluate(run=RUN, seq=seq, **{"epoch": 0, **fields}))

    def shard(self, k: int, kind: type[Message] = Params, **fields: Any) -> list[Effect]:
        params = {"params": (np.full(32, k, np.float32),)} if kind is Params else {}
        return self.take(
            self.node.on_message(
                self.now, shard_peer(k), kind(**{"run": RUN, "shard": k, "seq": 1, **params, **fields})
            )
        )

    def timers(self) -> list[Effect]:
        self.now = max(self.now, self.node.next_deadline())
        return self.take(self.node.on_timer(self.now))

    def done(self, result: Any) -> list[Effect]:
        return self.take(self.node.on_done(self.now, Computed(self.node.task, result)))


ENDPOINTS: dict[str, Any] = {"endpoints": ("tcp://a:1", "tcp://b:2"), "data_port": 7471}


def sent(effects: list[Effect], kind: type[Message]) -> list[Any]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def scoring(seat: Seat) -> ScoreTask:
    """The order is given, both shards have answered, the task is in hand."""
    seat.order()
    seat.shard(0)
    (compute,) = [e for e in seat.shard(1) if isinstance(e, Compute)]
    task: ScoreTask = compute.task
    return task


def test_it_says_hello_until_it_is_welcome_then_dials_and_renews_each_quarter_of_a_lease() -> None:
    seat = Seat(joined=False)
    hellos = [m for _ in range(3) for m in sent(seat.timers(), Hello)]
    assert [(m.role, m.token, m.name) for m in hellos] == [("eval", b"t", "eve")] * 3
    assert seat.broker(Welcome(run=RUN, token=b"another's", num_shards=2)) == []
    effects = seat.broker(Welcome(run=RUN, incarnation=ME, token=b"t", num_shards=2, lease_s=8.0, **ENDPOINTS))
    assert [e.endpoint for e in effects if isinstance(e, Dial)] == ["tcp://*:7471"] * 2
    assert [(m.seq, m.role, m.phase) for m in sent(effects, Renew)] == [(1, "eval", "waiting")]
    assert seat.node.next_deadline() == seat.now + 2.0
    assert [m.seq for m in sent(seat.timers(), Renew)] == [2]


def test_on_the_direct_path_it_dials_the_shards() -> None:
    seat = Seat(data_path="direct")
    assert [e.endpoint for e in seat.effects if isinstance(e, Dial)] == ["tcp://a:1", "tcp://b:2"]


def test_an_order_is_observed_scored_and_answered() -> None:
    seat = Seat()
    observes = sent(seat.order(), Observe)
    assert [(m.shard, m.seq, m.run) for m in observes] == [(0, 1, RUN), (1, 1, RUN)]
    assert seat.shard(0) == []
    (compute,) = seat.shard(1)
    assert isinstance(compute, Compute)
    task = compute.task
    assert (task.epoch, task.final, task.interrupted) == (0, False, False)
    assert [(section, start, values[0]) for section, start, values in task.pieces] == [
        ("params", 0, 0),
        ("params", 32, 1),
    ]
    assert [m.phase for m in sent(seat.timers(), Renew)] == ["scoring"]
    (result,) = sent(seat.done({"test_accuracy": 0.5}), Result)
    assert (result.seq, result.epoch, result.scores) == (1, 0, {"test_accuracy": 0.5})


def test_a_repeated_order_gets_the_same_answer_and_no_second_look() -> None:
    seat = Seat()
    scoring(seat)
    assert seat.order() == [], "it is at it"
    seat.done({"test_accuracy": 0.5})
    (result,) = sent(seat.order(), Result)
    assert result.scores == {"test_accuracy": 0.5}
    assert sent(seat.effects, Observe) == []


def test_a_newer_order_replaces_one_that_is_still_observing() -> None:
    seat = Seat()
    seat.order(seq=1)
    seat.shard(0)
    assert len(sent(seat.order(seq=2, epoch=1), Observe)) == 2
    assert seat.shard(1) == [], "an answer to the former order"
    seat.shard(0, seq=2)
    (compute,) = seat.shard(1, seq=2)
    assert isinstance(compute, Compute)
    assert compute.task.epoch == 1
    assert seat.order(seq=1) == [], "an old order, overtaken"


def test_an_order_that_comes_while_it_scores_waits_for_its_repetition() -> None:
    seat = Seat()
    scoring(seat)
    assert seat.order(seq=2, epoch=1) == []
    seat.done({})
    assert len(sent(seat.order(seq=2, epoch=1), Observe)) == 2


def test_scores_of_another_task_are_nobodys() -> None:
    seat = Seat()
    old = scoring(seat)
    seat.done({})
    seat.order(seq=2, epoch=1)
    seat.shard(0, seq=2)
    seat.shard(1, seq=2)
    assert seat.node.task is not None
    assert seat.take(seat.node.on_done(0.0, Computed(old, {"test_accuracy": 1.0}))) == []


def test_a_silent_shard_is_asked_again() -> None:
    seat = Seat()
    seat.order()
    seat.shard(0)
    seat.now = 1.0
    assert [m.shard for m in sent(seat.take(seat.node.on_timer(1.0)), Observe)] == [1]


def test_a_shard_that_refuses_makes_it_wait_for_the_next_order() -> None:
    seat = Seat()
    seat.order()
    seat.shard(0)
    assert seat.shard(1, Err, code="WRONG_RUN") == []
    assert seat.node.order is None
    assert len(sent(seat.order(), Observe)) == 2, "the broker repeats its order"


def test_answers_that_do_not_make_up_the_model_are_not_scored() -> None:
    seat = Seat()
    seat.order()
    seat.shard(0)
    assert seat.shard(1, params=()) == []
    assert seat.node.task is None


def test_an_error_of_user_code_is_a_score_of_its_own_and_ends_nothing() -> None:
    seat = Seat()
    scoring(seat)
    (result,) = sent(seat.done(Failed("ValueError: no such file")), Result)
    assert result.scores == {"error": "ValueError: no such file"}
    assert not seat.node.stopped


def test_what_is_for_another_run_or_for_nobody_changes_nothing() -> None:
    seat = Seat()
    assert seat.broker(Evaluate(run=RUN + 1, seq=9, epoch=0)) == []
    assert seat.broker(StopMsg(run=RUN + 1)) == []
    assert seat.broker(Lease(run=RUN)) == []
    assert seat.shard(0) == [], "nothing was asked"
    seat.order()
    assert seat.shard(0, run=RUN + 1) == []
    assert seat.node.task is None


def test_stop_is_obeyed_with_a_farewell() -> None:
    seat = Seat()
    effects = seat.broker(StopMsg(run=RUN, reason="the run is completed"))
    assert len(sent(effects, Bye)) == 1
    assert effects[-1] == Stop("the run is completed", 0)
    assert seat.node.next_deadline() == math.inf
    assert seat.order() == []


def test_leaving_is_immediate_since_nobody_waits_for_an_evaluator() -> None:
    seat = Seat()
    scoring(seat)
    effects = seat.take(seat.node.leave(seat.now, "SIGTERM"))
    assert [m.reason for m in sent(effects, Bye)] == ["SIGTERM"]
    assert effects[-1] == Stop("SIGTERM", 0)


@pytest.mark.parametrize(
    ("joined", "code", "exit_code"),
    [(False, "LAYOUT_MISMATCH", 2), (False, "RUN_OVER", 0), (True, "FENCED", 3), (True, "RUN_OVER", 0)],
)
def test_a_refusal_ends_it_with_the_code_that_fits(joined: bool, code: str, exit_code: int) -> None:
    seat = Seat(joined=joined)
    assert seat.broker(Err(code=code, text="because")) == [Stop("because", exit_code)]


def test_a_refusal_that_time_can_heal_is_waited_out() -> None:
    seat = Seat(joined=False, connect_timeout_s=2.0)
    seat.timers()
    assert seat.broker(Err(code="NOT_READY", retryable=True, retry_after_ms=500)) == []
    assert sent(seat.timers(), Hello)


@pytest.mark.parametrize(("joined", "patience_s"), [(False, 4.0), (True, 6.0)])
def test_a_silent_broker_is_given_up_with_code_3(joined: bool, patience_s: float) -> None:
    seat = Seat(joined=joined, connect_timeout_s=4.0, broker_timeout_s=6.0)
    while not seat.node.stopped:
        seat.timers()
        assert seat.now < 20
    assert seat.effects == [Stop(f"no broker answered for {patience_s:g} s", 3)]


def test_a_process_that_stood_still_does_not_blame_its_broker() -> None:
    seat = Seat(broker_timeout_s=6.0)
    seat.now = seat.node.next_deadline() + 3600.0  # SIGSTOP, SIGCONT
    effects = seat.take(seat.node.on_timer(seat.now))
    assert not seat.node.stopped
    assert len(sent(effects, Renew)) == 1
