"""What a peer may say is bounded, so that what the cores say in return always fits into a message.

Every answer is encoded by the real wire: an answer that cannot be written would end the process that owes it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from zasgd.core import codec, wire
from zasgd.core.broker import Broker
from zasgd.core.codec import WireError
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.messages import (
    Ack,
    Admit,
    Admitted,
    Applied,
    Done,
    Err,
    Fence,
    Fenced,
    Grant,
    GrantMsg,
    Hello,
    Init,
    Message,
    Pull,
    Push,
    Renew,
    Status,
    Welcome,
)  # fmt: skip
from zasgd.core.node import BROKER, Effect, Send
from zasgd.core.parameters import ShardConfig
from zasgd.core.rules import GroupSpec, RuleSpec
from zasgd.core.run import BrokerConfig
from zasgd.core.schedule import Schedule
from zasgd.core.shard import Shard
from zasgd.core.tally import numbers

RUN = 3
SMALL = Layout((TensorSpec("w", (16,)),))
SHARD_CONFIG = ShardConfig(1, RuleSpec("asgd"), (GroupSpec(),), Schedule(lr=1.0, epochs=1))


def over_the_wire(msg: Message) -> Message:
    return wire.decode([bytes(frame) for frame in wire.encode(msg)])


def replies(effects: list[Effect]) -> list[Any]:
    """What was sent, as it arrives."""
    return [over_the_wire(e.message) for e in effects if isinstance(e, Send)]


class Desk:
    """A broker with its one server; `say` sends over the wire and brings back every message it sends in return."""

    def __init__(self, num_samples: int = 1 << 20) -> None:
        config = BrokerConfig(
            run=RUN, recipe="{}", num_shards=1, epochs=1 << 20, batch_size=8, shard_config=SHARD_CONFIG.to_json()
        )
        self.broker = Broker(0.0, config)
        self.num_samples = num_samples
        (welcome,) = self.say(Hello(role="server", token=b"s", endpoint="tcp://s:1"), "s")
        self.server = welcome.incarnation
        self.renews(1)

    def say(self, msg: Message, peer: str = "p") -> list[Any]:
        sent = replies(self.broker.on_message(0.0, peer, over_the_wire(msg)))
        self.broker.validate()
        return sent

    def renews(self, seq: int, **fields: Any) -> list[Any]:
        return self.say(Renew(run=RUN, shard=0, incarnation=self.server, seq=seq, role="server", **fields), "s")

    def joins(self, layout: Layout = SMALL) -> Any:
        (admit,) = self.say(Hello(role="worker", token=b"w", layout=layout, num_samples=self.num_samples), "w")
        assert isinstance(admit, Admit)
        (welcome,) = self.say(_admitted(admit), "s")
        return welcome


def _admitted(admit: Admit) -> Message:
    return Admitted(run=RUN, shard=0, worker=admit.worker, incarnation=admit.incarnation)


def refused(answers: list[Any]) -> str:
    (err,) = answers
    assert isinstance(err, Err), err
    return err.code


# ---- the door --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [b"", bytes(65), bytes(1 << 20)])
@pytest.mark.parametrize("role", ["worker", "server", "eval"])
def test_a_token_has_1_to_64_bytes(role: str, token: bytes) -> None:
    assert refused(Desk().say(Hello(role=role, token=token, layout=SMALL, num_samples=8))) == "BAD_FIELD"


@pytest.mark.parametrize("field", ["name", "host", "endpoint"])
@pytest.mark.parametrize("role", ["worker", "server", "eval"])
def test_names_hosts_and_endpoints_have_at_most_200_characters(role: str, field: str) -> None:
    long: dict[str, Any] = {field: "x" * 201}
    desk = Desk()
    assert refused(desk.say(Hello(role=role, token=b"t", layout=SMALL, num_samples=8, **long))) == "BAD_FIELD"
    assert desk.broker.run.layout is None, "its layout became the run's"


@pytest.mark.parametrize("num_samples", [(1 << 40) + 1, (1 << 63) - 1])
def test_a_run_has_at_most_2_to_the_40_samples(num_samples: int) -> None:
    desk = Desk()
    assert refused(desk.say(Hello(role="worker", token=b"t", layout=SMALL, num_samples=num_samples))) == "BAD_FIELD"
    assert desk.broker.run.layout is None


def test_a_status_of_the_most_samples_and_epochs_can_be_sent() -> None:
    desk = Desk(num_samples=1 << 40)
    desk.joins()
    (status,) = desk.say(Status())
    assert status.report["ledger"]["samples_total"] == 1 << 60


def test_a_layout_that_welcome_could_not_carry_is_refused_at_the_door() -> None:
    """HELLO and WELCOME have the same limit, but WELCOME carries more besides."""

    def named(length: int) -> Layout:
        return Layout(tuple(TensorSpec(f"{i:04}" + "n" * length, (1,)) for i in range(4000)))

    most = codec.MAX_LONG_BODY_BYTES - codec.MAX_BODY_BYTES
    size = len(codec.pack(named(0).to_plain())[0])
    fits, too_long = (named((most - size) // 4000 + d) for d in (-2, 2))
    assert refused(Desk().say(Hello(role="worker", token=b"t", layout=too_long, num_samples=8))) == "BAD_LAYOUT"
    welcome = Desk().joins(fits)
    assert isinstance(welcome, Welcome)
    assert welcome.layout == fits


# ---- grants ----------------------------------------------------------------------------------------------


def test_a_worker_that_never_shows_what_it_got_cannot_make_the_answer_grow() -> None:
    """It settles what it is granted and says that nothing has arrived: the answer repeats what is out, up to 64."""
    desk = Desk()
    me = desk.joins()
    desk.renews(2, seeded=me.incarnation)
    final: tuple[Applied, ...] = ()
    for seq in range(1, 300):
        renewal = Renew(run=RUN, worker=0, incarnation=me.incarnation, seq=seq, got=0, upto=1 << 40, final=final)
        answer = desk.say(renewal, "w")[0]
        assert isinstance(answer, GrantMsg)
        assert len(answer.grants) <= 64
        final = tuple(Applied(i, (grant,)) for i, grant in enumerate(answer.grants))


# ---- facts -----------------------------------------------------------------------------------------------

ABSURD = [math.nan, math.inf, -math.inf, 1e308, -1e308, (1 << 64) - 1, -(1 << 63), "12", None, True, [1], {"a": 1}]


@pytest.mark.parametrize("value", ABSURD)
def test_absurd_facts_of_workers_and_shards_leave_a_report_that_can_be_sent(value: Any) -> None:
    desk = Desk()
    me = desk.joins()
    for seq, name in enumerate(("samples", "loss_sum", "step_s", "lag"), 1):
        facts = {"samples": 1.0 * seq, "loss_sum": 2.0, "step_s": 0.1, "lag": 0, name: value}
        renewal = Renew(run=RUN, worker=0, incarnation=me.incarnation, seq=seq, steps=(1 << 63) - 1, facts=facts)
        assert isinstance(desk.say(renewal, "w")[0], GrantMsg)
    for seq, name in enumerate(("samples", "bytes", "resident_bytes", "lags", "worker_lags"), 2):
        desk.renews(seq, version=(1 << 63) - 1, facts={name: value})
        desk.renews(seq + 100, version=0, facts={"lags": {"0": value, "x": 1, "1" * 400: 1}})
    (status,) = desk.say(Status())
    (worker,) = status.report["workers"]
    assert all(math.isfinite(worker[key]) for key in ("lag", "lease_s", "steps"))
    assert worker["samples_per_s"] is None or math.isfinite(worker["samples_per_s"])


def test_numbers_takes_only_finite_numbers() -> None:
    facts = dict(enumerate(ABSURD))
    found = numbers({str(k): v for k, v in facts.items()}, [str(k) for k in facts])
    assert all(math.isfinite(v) for v in found.values())
    assert numbers(None, ["x"]) == {}


# ---- ERR -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [{}, {"run": RUN}, {"run": RUN + 1, "incarnation": 7}, {"shard": 0, "seq": 9}])
def test_a_broker_never_answers_an_err(ids: dict[str, int]) -> None:
    desk = Desk()
    for code in ("WRONG_RUN", "FENCED", "BAD_FRAME"):
        assert desk.say(Err(code=code, **ids)) == []


# ---- a shard's record ------------------------------------------------------------------------------------


def seeded_shard() -> Shard:
    shard = Shard(0.0, b"t", "x")
    welcome = Welcome(run=RUN, shard=0, incarnation=1, token=b"t", lease_s=10.0, config=SHARD_CONFIG.to_json())
    shard.on_message(0.0, BROKER, welcome)
    shard.on_message(0.0, BROKER, Admit(run=RUN, shard=0, worker=0, incarnation=2, layout=SMALL, num_samples=8))
    ids: dict[str, Any] = {"run": RUN, "shard": 0, "worker": 0, "incarnation": 2}
    zeros = (np.zeros(16, np.float32),)
    shard.on_message(0.0, "w", Init(**ids, seq=1, layout_hash=SMALL.hash, params=zeros))
    shard.on_message(0.0, "w", Pull(**ids, seq=2))
    return shard


def test_the_record_of_64_pushes_of_1024_grants_each_fits_into_one_answer() -> None:
    shard = seeded_shard()
    ids: dict[str, Any] = {"run": RUN, "shard": 0, "worker": 0, "incarnation": 2}
    most = (1 << 63) - 1
    grants = (Grant(most, most, 0, 1),) * 1024
    for seq in range(3, 67):
        push = Push(
            **ids, seq=most - 67 + seq, version=shard.version, layout_hash=SMALL.hash, commit=True,
            grads=(np.ones(16, np.float32),), grants=grants, num_samples=1024,
        )  # fmt: skip
        (ack,) = replies(shard.on_message(0.0, "w", over_the_wire(push)))
        assert isinstance(ack, Ack), ack
    (fenced,) = replies(shard.on_message(0.0, BROKER, Fence(**ids)))
    assert isinstance(fenced, Fenced)
    assert [len(p.grants) for p in fenced.pushes] == [1024] * 64
    assert fenced.high == most - 1


@pytest.mark.parametrize("field", ["seq", "version"])
def test_seq_and_version_are_below_2_to_the_63(field: str) -> None:
    """F1 repeats them as integers: a shard that remembered a larger one could not say so to its broker."""
    frames = wire.encode(Done(**{field: (1 << 63) - 1}))
    assert getattr(wire.decode(frames), field) == (1 << 63) - 1
    with pytest.raises(WireError, match="below 2\\^63") as raised:
        wire.decode(wire.encode(Done(**{field: 1 << 63})))
    assert raised.value.code == "BAD_FIELD"
