"""The evaluator: looks at the parameters when the broker asks, and says what they are worth.

Decides when to observe and which answers belong together. Never stores a snapshot on a shard and never counts in the
run: without it the others go on. Scoring and writing the model are a Compute effect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from zasgd.core.exchange import Exchange, Piece, RoundTrip, covers, over_shards
from zasgd.core.layout import Layout
from zasgd.core.messages import (
    Ack,
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
)
from zasgd.core.node import (
    BROKER,
    OWN_STALL_S,
    Compute,
    Computed,
    Deadlines,
    Dial,
    Effect,
    PeerId,
    Send,
    Stop,
    require,
    shard_peer,
)  # fmt: skip
from zasgd.core.worker import HELLO_EVERY_S, Failed, WorkerConfig


@dataclass(frozen=True, slots=True)
class ScoreTask:
    """Adopt `pieces`, score the model, write it to the run folder. An interrupted run is written, not scored."""

    epoch: int
    final: bool
    interrupted: bool
    pieces: tuple[Piece, ...]


class Evaluator:
    """The evaluator as a core (see node.Node)."""

    def __init__(self, now: float, token: bytes, config: WorkerConfig, layout: Layout) -> None:
        """token: random, names this process to the broker. config: name, host, pid, data path and time-outs."""
        self.config = config
        self.layout = layout
        self.run = self.incarnation = self.num_shards = 0
        self.lease_s = 0.0
        self.exchange: Exchange | None = None
        self.order: Evaluate | None = None
        self.task: ScoreTask | None = None
        self.last: Result | None = None
        self.stopped = False
        self.leaving = ""
        self._token = token
        self._heard_at = now
        self._heard_ever = False
        self._renewals = 0
        self._round_trip = RoundTrip()
        self._timers = Deadlines()
        self._timers.set("hello", now)

    # ---- the node contract ------------------------------------------------------------------------

    def on_message(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        """Take an order of the broker or the answer of a shard."""
        if self.stopped:
            return []
        if peer == BROKER:
            return self._on_broker(now, msg)
        if msg.run != self.run or self.exchange is None:
            return []
        if isinstance(msg, Err):
            return self.exchange.on_error(now, msg) + self._moved(now)
        if isinstance(msg, Ack | Params):
            self.exchange.on_reply(now, msg)
        return self._moved(now)

    def on_done(self, now: float, done: Computed) -> list[Effect]:
        """The scores of the task in hand; a failure is reported as such and ends nothing."""
        if done.task is not self.task or self.order is None:
            return []
        failed = isinstance(done.result, Failed)
        scores = {"error": done.result.error} if failed else done.result
        self.last = Result(
            **self._ids(), seq=self.order.seq, epoch=self.order.epoch, final=self.order.final, scores=scores
        )
        self.task = self.order = None
        return [Send(BROKER, self.last)]

    def on_timer(self, now: float) -> list[Effect]:
        """HELLO until welcomed, then renewals; doubts about the shards' answers."""
        late_s = now - self.next_deadline()
        if late_s > OWN_STALL_S:
            self._heard_at = min(now, self._heard_at + late_s)  # stopped or starved, it asked nobody
        effects: list[Effect] = []
        for name in self._timers.pop_due(now):
            patience_s = self.config.broker_timeout_s if self._heard_ever else self.config.connect_timeout_s
            if now - self._heard_at >= patience_s:
                return self._stop(f"no broker answered for {patience_s:g} s", 3)
            effects += self._say_hello(now) if name == "hello" else self._renew(now)
        return effects + (self.exchange.on_timer(now) if self.exchange else [])

    def next_deadline(self) -> float:
        """The next renewal or doubt; never, once stopped."""
        if self.stopped:
            return math.inf
        return min(self._timers.next(), self.exchange.next_deadline() if self.exchange else math.inf)

    def leave(self, now: float, reason: str) -> list[Effect]:
        """Stop at once: nobody waits for an evaluator. Called by the shell."""
        return [Send(BROKER, Bye(**self._ids(), reason=reason)), *self._stop(reason, 0)]

    def validate(self) -> None:
        """Raise InvariantError unless at most one thing is in hand."""
        require(self.exchange is None or self.task is None, "observing and scoring at once")
        require(
            (self.order is not None) == (self.exchange is not None or self.task is not None),
            "an order in hand",
        )

    # ---- the broker -------------------------------------------------------------------------------

    def _on_broker(self, now: float, msg: Message) -> list[Effect]:
        self._heard_at, self._heard_ever = now, True
        match msg:
            case Welcome() if not self.run and msg.token == self._token:
                return self._welcomed(now, msg)
            case Err() if not msg.retryable:
                return self._stop(msg.text, 0 if msg.code == "RUN_OVER" else 3 if self.run else 2)
            case StopMsg() if msg.run == self.run:
                bye = Send(BROKER, Bye(**self._ids(), reason="stopped"))
                return [bye, *self._stop(msg.reason, msg.code)]
            case Evaluate() if msg.run == self.run:
                return self._ordered(now, msg)
            case Lease():
                return []
        return []

    def _welcomed(self, now: float, msg: Welcome) -> list[Effect]:
        self.run, self.incarnation, self.lease_s, self.num_shards = (
            msg.run,
            msg.incarnation,
            msg.lease_s,
            msg.num_shards,
        )
        self._timers.clear("hello")
        direct = self.config.data_path == "direct"
        endpoints = msg.endpoints if direct else (f"tcp://*:{msg.data_port}",) * msg.num_shards
        dials: list[Effect] = [Dial(shard_peer(k), endpoint) for k, endpoint in enumerate(endpoints)]
        return [*dials, *self._renew(now)]

    def _ordered(self, now: float, msg: Evaluate) -> list[Effect]:
        """Begin, unless it is in hand or done; a newer order replaces one that is still observing."""
        if self.last is not None and self.last.seq == msg.seq:
            return [Send(BROKER, self.last)]
        if self.task is not None or (self.order is not None and self.order.seq >= msg.seq):
            return []
        self.order = msg
        requests = over_shards(
            self.num_shards, shard_peer, lambda k: [Observe(**self._ids(k), seq=msg.seq, whole=True)]
        )
        self.exchange = Exchange(now, msg.seq, requests, self._round_trip)
        return self.exchange.start()

    def _moved(self, now: float) -> list[Effect]:
        exchange, order = self.exchange, self.order
        if exchange is None or order is None or not exchange.settled:
            return []
        self.exchange = None
        pieces = exchange.pieces(self.layout)
        if exchange.refusals or not covers(pieces, self.layout):
            self.order = None  # the broker repeats its order
            return []
        self.task = ScoreTask(order.epoch, order.final, order.interrupted, pieces)
        return [Compute(self.task)]

    # ---- small things -----------------------------------------------------------------------------

    def _say_hello(self, now: float) -> list[Effect]:
        self._timers.set("hello", now + HELLO_EVERY_S)
        hello = Hello(
            role="eval", token=self._token, name=self.config.name, host=self.config.host, pid=self.config.pid,
            layout=self.layout,
        )  # fmt: skip
        return [Send(BROKER, hello)]

    def _renew(self, now: float) -> list[Effect]:
        self._renewals += 1
        self._timers.set("renew", now + self.lease_s / 4)
        phase = "scoring" if self.task else "observing" if self.exchange else "waiting"
        return [Send(BROKER, Renew(**self._ids(), seq=self._renewals, role="eval", phase=phase))]

    def _ids(self, shard: int | None = None) -> dict[str, Any]:
        ids = {"run": self.run, "incarnation": self.incarnation}
        return ids if shard is None else {**ids, "shard": shard}

    def _stop(self, reason: str, code: int) -> list[Effect]:
        self.stopped = True
        return [Stop(reason, code)]
