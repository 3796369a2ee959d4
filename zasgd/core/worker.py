"""One worker: joins, computes the batches it is granted, pushes, and leaves without losing anything.

Decides when to pull, compute, push, renew, retry, give up and leave. Never computes a gradient (that is a Compute
effect) and never counts samples as final unless every shard has acknowledged them. The course of its life is PHASES.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zasgd.core import wire
from zasgd.core.exchange import Exchange, Piece, RoundTrip, covers, over_shards
from zasgd.core.layout import Layout
from zasgd.core.messages import (
    UNKNOWN_SHARD,
    Ack,
    Applied,
    Array,
    Bye,
    Done,
    Err,
    Grant,
    GrantMsg,
    Hello,
    Init,
    Message,
    Params,
    Pull,
    Push,
    Rejoin,
    Renew,
    StopMsg,
    Welcome,
)  # fmt: skip
from zasgd.core.node import (
    BROKER,
    OWN_STALL_S,
    Compute,
    Computed,
    Deadlines,
    Dial,
    Effect,
    InvariantError,
    Note,
    PeerId,
    Send,
    Stop,
    require,
    shard_peer,
)  # fmt: skip
from zasgd.core.reports import Reports
from zasgd.core.snapshot import WINDOW

HELLO_EVERY_S = 0.5
GRANTS_AHEAD_S = 0.5
"""A worker asks for about this much work ahead, at least one push and at most MAX_GRANTS_AHEAD batches."""
MAX_GRANTS_AHEAD = 32
STALE_AFTER_S = 0.25
"""Parameters that lay idle this long are pulled again before they are computed on."""
IDLE_RENEW_S = 0.25
"""How often a worker without grants asks: for the opening of the run, or for a grant that comes back."""
BYE_EVERY_S = 0.5
BYE_FOR_S = 3.0


def most_grants_out(push_every: int) -> int:
    """How many grants a broker lets one worker hold: those of two pushes, at least 64."""
    return max(64, 2 * push_every)


@dataclass(frozen=True, slots=True)
class Gradient:
    """What a worker pushes: the mean gradient of its batches, or what local steps over them led to.

    grads: float32, the flat params vector's size. stats: float32 and counters: int64, the buffers after the
    last batch. num_samples: of all batches; loss: mean over them. finite: no inf or NaN in grads. presence: bit i,
    lowest first, says that tensor i of the layout's parameters got a gradient; empty: all did.
    """

    grads: Array
    stats: Array
    counters: Array
    num_samples: int
    loss: float
    finite: bool
    presence: bytes = b""


@dataclass(frozen=True, slots=True)
class GradientTask:
    """Adopt `pieces` (new parameters and buffers), then compute on the batches `grants`.

    samples: the sample clock at which the parameters were sent, for schedules that a worker follows itself.
    """

    grants: tuple[Grant, ...]
    pieces: tuple[Piece, ...]
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The task raised: one line for the broker; the traceback is in the worker's own log."""

    error: str


class Phase(enum.Enum):
    """What a worker is doing; its value is what `zasgd status` shows."""

    JOINING = "joining"
    SEEDING = "seeding"
    IDLE = "idle"
    PULLING = "pulling"
    COMPUTING = "computing"
    PUSHING = "pushing"
    LEAVING = "leaving"
    STOPPED = "stopped"


PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.JOINING: frozenset({Phase.IDLE}),
    Phase.SEEDING: frozenset({Phase.IDLE}),
    Phase.IDLE: frozenset({Phase.SEEDING, Phase.PULLING, Phase.COMPUTING}),
    Phase.PULLING: frozenset({Phase.IDLE, Phase.COMPUTING}),
    Phase.COMPUTING: frozenset({Phase.PUSHING, Phase.IDLE}),
    Phase.PUSHING: frozenset({Phase.IDLE}),
    Phase.LEAVING: frozenset(),
    Phase.STOPPED: frozenset(),
}
"""Legal next phases; besides, a live phase may become LEAVING, STOPPED or, fenced, JOINING again."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """How a worker behaves; times in seconds.

    name: keeps its id across restarts. data_path: `relay` through the broker or `direct` to the shards.
    connect_timeout_s: for the first answer of a broker. broker_timeout_s: silence after which it gives up.
    min_step_s: a step takes at least this long (paced runs). grace_s: how long a leave may wait for the batch in hand.
    push_every: batches per push, as far as they have been granted.
    """

    name: str = ""
    host: str = ""
    pid: int = 0
    data_path: str = "relay"
    connect_timeout_s: float = 60.0
    broker_timeout_s: float = 30.0
    min_step_s: float = 0.0
    grace_s: float = 10.0
    push_every: int = 1


class Worker:
    """A worker as a core (see node.Node)."""

    def __init__(
        self,
        now: float,
        token: bytes,
        config: WorkerConfig,
        layout: Layout,
        num_samples: int,
        initial: Callable[[], dict[str, Array]],
    ) -> None:
        """token: random, names this process to the broker; a worker that was fenced derives its next one from it.

        num_samples: size of the training set. initial: the flat vectors by section, asked for only when this worker
        is to seed the shards.
        """
        self.config = config
        self.layout = layout
        self.num_samples = num_samples
        self.phase = Phase.JOINING
        self.leaving = ""
        self.exit_code = 0
        self.num_lives = 0
        self._token = token
        self._initial = initial
        self._created_at = self._heard_at = now
        self._heard_ever = False
        self._leave_by = math.inf
        self._round_trip = RoundTrip()
        self._timers = Deadlines()
        self._events = 0
        self._samples = 0
        self._loss_sum = 0.0
        self._step_s = 0.0
        self._begin_life(now)

    def _begin_life(self, now: float) -> None:
        """Forget everything that belonged to an incarnation."""
        self.num_lives += 1
        self.run = self.worker = self.incarnation = self.num_shards = 0
        self.lease_s = 0.0
        self.window_bytes = 0
        self.versions: dict[int, int] = {}
        self.pieces: tuple[Piece, ...] = ()
        self.sample_clock = 0
        self.fresh_at = -math.inf
        self.exchange: Exchange | None = None
        self.task: GradientTask | None = None
        self.in_hand: tuple[Grant, ...] = ()
        self.grants: deque[Grant] = deque()
        self.got = 0
        self.open = False
        self.has_seeded = False
        self.dry = False
        self.seq = 0
        self.steps = 0
        self.lags: dict[int, int] = {}
        self.renewals = 0
        self.answered = 0
        self._step_began_at = -math.inf
        self.reports = Reports()
        self._timers = Deadlines()
        self._timers.set("hello", now)

    # ---- the node contract ------------------------------------------------------------------------

    def on_message(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        """Take an answer of the broker or of a shard; whatever belongs to another life changes nothing."""
        self._events += 1
        if self.phase is Phase.STOPPED:
            return []
        if peer == BROKER:
            return self._on_broker(now, msg)
        if msg.run != self.run or msg.incarnation != self.incarnation or self.exchange is None:
            return []
        if isinstance(msg, Err):
            return self._on_shard_error(now, msg)
        if isinstance(msg, Ack | Params):
            self.exchange.on_reply(now, msg)
            return self._exchange_moved(now)
        return []

    def on_done(self, now: float, done: Computed) -> list[Effect]:
        """A Gradient for the task in hand, or Failed; the result of any other task is of a former life."""
        self._events += 1
        if self.phase is not Phase.COMPUTING or done.task is not self.task:
            return []
        self.task = None
        if isinstance(done.result, Failed):
            self.exit_code = 1
            return self._leave_now(now, f"failed: {done.result.error}")
        if done.result.finite:
            return self._push(now, done.result)
        grants, self.in_hand = self.in_hand, ()
        notes: list[Effect] = []
        self.reports.add_refused(grants, "nonfinite")
        for grant in grants:
            notes.append(Note("gradient_refused", {**grant._asdict(), "reason": "nonfinite"}))
        self.dry = False
        self._enter(Phase.IDLE)
        return [*notes, *self._advance(now)]

    def on_timer(self, now: float) -> list[Effect]:
        """HELLO, renewals, doubts about requests, pacing, and giving up."""
        self._forgive_own_stall(now)
        effects: list[Effect] = []
        for name in self._timers.pop_due(now):
            if self.phase is not Phase.STOPPED:
                effects += _TIMERS[name](self, now)  # type: ignore[index]
        if self.exchange is not None and self.phase is not Phase.STOPPED:
            effects += self.exchange.on_timer(now)
        return effects

    def next_deadline(self) -> float:
        """The next timer or doubt; never, once stopped."""
        if self.phase is Phase.STOPPED:
            return math.inf
        return min(self._timers.next(), self.exchange.next_deadline() if self.exchange else math.inf)

    def _forgive_own_stall(self, now: float) -> None:
        """A process that itself stood still asked nobody meanwhile: the broker was not silent."""
        late_s = now - self.next_deadline()
        if late_s > OWN_STALL_S:
            self._heard_at = min(now, self._heard_at + late_s)
            self._created_at = min(now, self._created_at + late_s)

    def leave(self, now: float, reason: str) -> list[Effect]:
        """Finish the batch in hand within the grace, push it, give the rest back, say BYE. Called by the shell."""
        if self.leaving or self.phase is Phase.STOPPED:
            return []
        self.leaving = reason
        self._leave_by = now + self.config.grace_s
        if self.phase is Phase.JOINING:
            return self._stop(reason, self.exit_code)
        self._timers.set("grace", self._leave_by)
        return self._advance(now)

    def validate(self) -> None:
        """Raise InvariantError unless phase, exchange and reports agree."""
        busy = self.phase in (Phase.PULLING, Phase.PUSHING, Phase.SEEDING)
        require((self.exchange is not None) == busy, f"an exchange in phase {self.phase}")
        require((self.task is not None) == (self.phase is Phase.COMPUTING), f"a task in phase {self.phase}")
        require(bool(self.in_hand) == (self.phase in (Phase.COMPUTING, Phase.PUSHING)), "grants in hand")
        require(self.reports.num_pushes <= WINDOW, "too many unconfirmed pushes")
        require(len(self.grants) <= most_grants_out(self.config.push_every), "grants are hoarded")

    # ---- the broker -------------------------------------------------------------------------------

    def _on_broker(self, now: float, msg: Message) -> list[Effect]:
        match msg:
            case Welcome() if self.phase is Phase.JOINING and msg.token == self._life_token():
                self._heard(now)
                return self._welcomed(now, msg)
            case Err() if self.phase is Phase.JOINING and not msg.incarnation:  # not about a former life
                self._heard(now)
                code = 0 if msg.code == "RUN_OVER" else 2
                return [] if msg.retryable else self._stop(msg.text, code)
        if msg.run != self.run or self.phase is Phase.JOINING:
            return []
        self._heard(now)
        match msg:
            case StopMsg():
                bye: list[Effect] = [Send(BROKER, Bye(**self._ids(), reason="stopped", **self._carried()))]
                return bye + self._stop(msg.reason, msg.code)
            case Done() if self.phase is Phase.LEAVING:
                return self._stop(self.leaving, self.exit_code)
            case GrantMsg() if msg.incarnation == self.incarnation:
                return self._granted(now, msg)
            case Err() if msg.code in ("FENCED", "SUPERSEDED") and msg.incarnation == self.incarnation:
                return self._fenced(now, msg)
        return []

    def _heard(self, now: float) -> None:
        self._heard_at, self._heard_ever = now, True

    def _welcomed(self, now: float, msg: Welcome) -> list[Effect]:
        self.run, self.worker, self.incarnation = msg.run, msg.worker, msg.incarnation
        self.num_shards, self.lease_s, self.window_bytes = msg.num_shards, msg.lease_s, msg.window_bytes
        self._timers.clear("hello")
        self._enter(Phase.IDLE)
        dials: list[Effect] = [Dial(shard_peer(k), self._endpoint(msg, k)) for k in range(msg.num_shards)]
        note = Note("joined", {"worker": self.worker, "incarnation": self.incarnation, "life": self.num_lives})
        return [*dials, note, *self._renew(now)]

    def _endpoint(self, msg: Welcome, shard: int) -> str:
        return msg.endpoints[shard] if self.config.data_path == "direct" else f"tcp://*:{msg.data_port}"

    def _granted(self, now: float, msg: GrantMsg) -> list[Effect]:
        if msg.seq <= self.answered:
            return []
        self.answered = msg.seq
        self.reports.answered(msg.seq)
        fresh = msg.grants[max(0, self.got - msg.base) :]
        if msg.base <= self.got and fresh:
            self.grants.extend(fresh)
            self.got += len(fresh)
        self.dry = not fresh  # asking again at once would bring no more: wait for a step or for the timer
        if msg.open and not self.open:
            self.open = True
        if msg.drain and not self.leaving:
            return self.leave(now, "drained")
        if msg.seed and not self.has_seeded and self.phase is Phase.IDLE:
            return self._seed(now)
        return self._advance(now)

    def _fenced(self, now: float, msg: Err) -> list[Effect]:
        """This incarnation is over. Unless another process took its name, begin the next one."""
        if self.leaving:
            return self._stop(self.leaving, self.exit_code)
        if msg.code == "SUPERSEDED":
            return self._stop(f"another worker joined as {self.config.name!r} and took this one's place", 3)
        note = Note("fenced", {"worker": self.worker, "incarnation": self.incarnation, "why": msg.text})
        self.phase = Phase.JOINING
        self._begin_life(now)
        return [note]

    # ---- renewals and reports ---------------------------------------------------------------------

    def _renew(self, now: float) -> list[Effect]:
        self.renewals += 1
        waiting = self.phase is Phase.IDLE and len(self.grants) < self.config.push_every
        self._timers.set("renew", now + min(self.lease_s / 4, IDLE_RENEW_S if waiting else math.inf))
        return [Send(BROKER, Renew(**self._ids(), seq=self.renewals, **self._carried(), **self._progress()))]

    def _carried(self) -> dict[str, Any]:
        return self.reports.carry(self.renewals)

    def _progress(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "phase": self.phase.value,
            "got": self.got,
            "upto": self.got + (0 if self.leaving else max(0, self._ahead() - len(self.grants))),
            "facts": {
                "samples": self._samples,
                "loss_sum": self._loss_sum,
                "step_s": self._step_s,
                "lag": max(self.lags.values(), default=0),
            },
        }

    def _ahead(self) -> int:
        """How many batches to hold beyond those in hand: for GRANTS_AHEAD_S of work, one push at first.

        What a slow worker holds in reserve keeps an epoch open, and fast ones without work.
        """
        each = self.config.push_every
        if not self._step_s:
            return each
        pushes = max(1, min(MAX_GRANTS_AHEAD // each, math.ceil(GRANTS_AHEAD_S / max(self._step_s, 1e-3))))
        return pushes * each

    # ---- steps ------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Effect]:
        """The one place that decides what a free worker does next."""
        if self.phase is not Phase.IDLE:
            return []
        if self.leaving:
            return self._leave_now(now, self.leaving)
        effects = self._next_step(now)
        least = max(self._ahead() // 2, self.config.push_every - 1)
        low = self.open and not self.dry and len(self.grants) <= least
        wants_broker = (low or self.reports.num_pushes >= WINDOW // 2) and self.renewals == self.answered
        return effects + (self._renew(now) if wants_broker else [])

    def _next_step(self, now: float) -> list[Effect]:
        if not self.grants or not self.open or self.reports.num_pushes >= WINDOW:
            return []
        if len(self.grants) < self.config.push_every and not self.dry:
            return []  # the rest of this push's batches has been asked for
        paced_at = self._step_began_at + self.config.min_step_s
        if now < paced_at:
            self._timers.set("pace", paced_at)
            return []
        return self._pull(now) if self._stale(now) else self._compute(now)

    def _stale(self, now: float) -> bool:
        """The parameters are too old to begin on; waiting for the pace of a run does not count."""
        paced_at = self._step_began_at + self.config.min_step_s
        return self.fresh_at == -math.inf or now - max(self.fresh_at, paced_at) > STALE_AFTER_S

    def _seed(self, now: float) -> list[Effect]:
        vectors = self._initial()
        slices = {section: self.layout.slices(section, self.num_shards) for section in vectors}

        def init(k: int) -> list[Message]:
            part = {section: vectors[section][s[k].start : s[k].stop] for section, s in slices.items()}
            cuts = list(wire.split(part["params"]))
            buffers: dict[str, Any] = {"stats": part["stats"], "counters": part["counters"]}
            return [
                Init(
                    **self._ids(k), seq=self.seq, part=i, parts=len(cuts), layout_hash=self.layout.hash,
                    offset=offset, params=pieces,
                    **(buffers if i == 0 else {}),
                )
                for i, (offset, pieces) in enumerate(cuts)
            ]  # fmt: skip

        return self._begin(now, Phase.SEEDING, init)

    def _pull(self, now: float) -> list[Effect]:
        return self._begin(now, Phase.PULLING, lambda k: [Pull(**self._ids(k), seq=self.seq)])

    def _compute(self, now: float) -> list[Effect]:
        self._enter(Phase.COMPUTING)
        count = min(self.config.push_every, len(self.grants))
        self.in_hand = tuple(self.grants.popleft() for _ in range(count))
        self._step_began_at = now
        self.task, self.pieces = GradientTask(self.in_hand, self.pieces, self.sample_clock), ()
        return [Compute(self.task)]

    def _push(self, now: float, done: Gradient) -> list[Effect]:
        self._samples += done.num_samples
        self._loss_sum += done.loss * done.num_samples
        slices = {s: self.layout.slices(s, self.num_shards) for s in ("params", "stats", "counters")}

        def push(k: int) -> list[Message]:
            own = {section: s[k] for section, s in slices.items()}
            cuts = list(wire.split(done.grads[own["params"].start : own["params"].stop]))
            committing: dict[str, Any] = {
                "commit": True,
                "grants": self.in_hand,
                "num_samples": done.num_samples,
                "presence": done.presence,
                "loss": done.loss if math.isfinite(done.loss) else None,
                "stats": done.stats[own["stats"].start : own["stats"].stop],
                "counters": done.counters[own["counters"].start : own["counters"].stop],
            }
            return [
                Push(
                    **self._ids(k), seq=self.seq, version=self.versions[k], part=i, parts=len(cuts),
                    layout_hash=self.layout.hash, offset=offset, grads=pieces,
                    **(committing if i == len(cuts) - 1 else {}),
                )
                for i, (offset, pieces) in enumerate(cuts)
            ]  # fmt: skip

        return self._begin(now, Phase.PUSHING, push)

    def _begin(self, now: float, phase: Phase, make: Callable[[int], list[Message]]) -> list[Effect]:
        """Ask every shard under a new seq."""
        self._enter(phase)
        self.seq += 1
        self.exchange = Exchange(now, self.seq, over_shards(self.num_shards, shard_peer, make), self._round_trip)
        return self.exchange.start()

    # ---- answers of shards ------------------------------------------------------------------------

    def _on_shard_error(self, now: float, err: Err) -> list[Effect]:
        exchange = self.exchange
        if exchange is None or err.seq != exchange.seq:
            return []
        if err.code == "FENCED":
            # Only the broker can say what that means: it lists this incarnation, or fences it in so many words.
            return [Send(BROKER, Rejoin(**self._ids()))]
        return exchange.on_error(now, err) + self._exchange_moved(now)

    def _exchange_moved(self, now: float) -> list[Effect]:
        exchange, phase = self.exchange, self.phase
        if exchange is None or not exchange.settled:
            return []
        self.exchange = None
        self._enter(Phase.IDLE)
        effects: list[Effect] = []
        if phase is Phase.SEEDING:
            self.has_seeded = not exchange.refusals  # the broker may hear of it later than of our next renewal
            effects += self._renew(now)
        elif phase is Phase.PUSHING:
            effects += self._pushed(now, exchange)
        if phase is not Phase.SEEDING:
            self._take_params(now, exchange)
        return effects + self._advance(now)

    def _take_params(self, now: float, exchange: Exchange) -> None:
        pieces = exchange.pieces(self.layout)
        if exchange.refusals or not covers(pieces, self.layout):
            self.fresh_at = -math.inf
            return
        self.versions, self.pieces, self.fresh_at = exchange.versions, pieces, now
        self.sample_clock = exchange.samples

    def _pushed(self, now: float, exchange: Exchange) -> list[Effect]:
        """Every shard has answered a push: final, torn or refused, never in between."""
        grants, self.in_hand = self.in_hand, ()
        require(grants, "a push without a grant")
        self.steps += 1
        self.dry = False
        self.lags = exchange.lags
        took = now - self._step_began_at
        self._step_s = took if not self._step_s else self._step_s + 0.2 * (took - self._step_s)
        refusals = exchange.refusals
        if not refusals:
            self.reports.add("final", Applied(exchange.seq, grants))
            return []
        if len(refusals) == self.num_shards:
            # LATE costs its batches nothing, so it goes before whatever another shard may have said
            self.reports.add_refused(grants, "LATE" if "LATE" in refusals.values() else next(iter(refusals.values())))
        else:
            self.reports.add("torn", Applied(exchange.seq, grants))
        return [Note("push_refused", {"seq": exchange.seq, "shards": {str(k): c for k, c in refusals.items()}})]

    # ---- the end ----------------------------------------------------------------------------------

    def _leave_now(self, now: float, reason: str) -> list[Effect]:
        """Say BYE, repeated until the broker has it; it hears from the shards what was applied."""
        self.leaving = reason
        self.phase = Phase.LEAVING
        self.exchange = self.task = None
        self.in_hand = ()
        self._timers = Deadlines()
        self._timers.set("bye_over", now + BYE_FOR_S)
        return self._bye(now)

    def _bye(self, now: float) -> list[Effect]:
        self._timers.set("bye", now + BYE_EVERY_S)
        return [Send(BROKER, Bye(**self._ids(), reason=self.leaving[:200], **self._carried()))]

    def _stop(self, reason: str, code: int) -> list[Effect]:
        self.phase = Phase.STOPPED
        self.exchange = self.task = None
        self.in_hand = ()
        return [Stop(reason, code)]

    # ---- timers -----------------------------------------------------------------------------------

    def _on_hello_timer(self, now: float) -> list[Effect]:
        patience_s = self.config.broker_timeout_s if self._heard_ever else self.config.connect_timeout_s
        silent_since = self._heard_at if self._heard_ever else self._created_at
        if now - silent_since >= patience_s:
            return self._stop(f"no broker answered for {patience_s:g} s", 3)
        self._timers.set("hello", now + HELLO_EVERY_S)
        hello = Hello(
            role="worker", token=self._life_token(), name=self.config.name, host=self.config.host, pid=self.config.pid,
            layout=self.layout, num_samples=self.num_samples,
        )  # fmt: skip
        return [Send(BROKER, hello)]

    def _on_renew_timer(self, now: float) -> list[Effect]:
        """Renew; after a lease without any answer ask to rejoin instead, after broker_timeout_s give up."""
        silent_s = now - self._heard_at
        if silent_s > self.config.broker_timeout_s:
            return self._stop(f"the broker has not answered for {self.config.broker_timeout_s:g} s", 3)
        if silent_s <= self.lease_s:
            return self._renew(now)
        self._timers.set("renew", now + self.lease_s / 4)
        return [Send(BROKER, Rejoin(**self._ids()))]

    def _on_grace_timer(self, now: float) -> list[Effect]:
        return self._leave_now(now, self.leaving) if self.phase is not Phase.LEAVING else []

    def _on_bye_over_timer(self, now: float) -> list[Effect]:
        return self._stop(self.leaving, self.exit_code)

    # ---- small things -----------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        if phase not in PHASES[self.phase]:
            raise InvariantError(f"no way from {self.phase} to {phase}")
        self.phase = phase

    def _life_token(self) -> bytes:
        return self._token + bytes([self.num_lives % 256])

    def _ids(self, shard: int = UNKNOWN_SHARD) -> dict[str, Any]:
        return {"run": self.run, "shard": shard, "worker": self.worker, "incarnation": self.incarnation}


_TIMERS: dict[str, Callable[[Worker, float], list[Effect]]] = {
    "hello": Worker._on_hello_timer,
    "renew": Worker._on_renew_timer,
    "pace": Worker._advance,
    "grace": Worker._on_grace_timer,
    "bye": Worker._bye,
    "bye_over": Worker._on_bye_over_timer,
}
