"""One worker: joins, computes the batches it is granted, pushes, and leaves without losing anything.

Decides when to pull, compute, push, renew, retry, give up and leave. Never computes a gradient (that is a Compute
effect) and never counts samples as final unless every shard has acknowledged them. The course of its life is PHASES.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from zasgd.core import wire
from zasgd.core.compression import UNCOMPRESSED, Compression
from zasgd.core.exchange import Exchange, RoundTrip, over_shards
from zasgd.core.layout import SECTIONS, Layout, Slice
from zasgd.core.messages import (
    UNKNOWN_SHARD,
    Ack,
    Applied,
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
    Pull,
    Push,
    Rejoin,
    Renew,
    StopMsg,
    Welcome,
    no_counters,
    no_floats,
)  # fmt: skip
from zasgd.core.node import (
    BROKER,
    OWN_STALL_S,
    Compute,
    Computed,
    Deadlines,
    Effect,
    InvariantError,
    Note,
    PeerId,
    Send,
    Share,
    Stop,
    Unshare,
    require,
    shard_peer,
)  # fmt: skip
from zasgd.core.paths import Paths
from zasgd.core.region import Memory, Region, RegionPlan, memories, private_region
from zasgd.core.reports import Reports
from zasgd.core.snapshot import WINDOW
from zasgd.core.transfer import Gradient, Pusher, take

HELLO_EVERY_S = 0.5
ATTACH_FOR_S = 2.0
"""A shard that has not answered so long after it was offered shared memory is reached through the relay."""
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
    """How many grants a broker lets one worker hold: those of three pushes, at least 64."""
    return max(64, 3 * push_every)


@dataclass(frozen=True, slots=True)
class GradientTask:
    """Compute on the batches `grants` at what is in `memory`, and write the gradient there.

    samples: the sample clock at which the parameters were sent, for schedules that a worker follows itself. parts:
    ranges (start, stop) of the flat gradient that may leave as soon as they are final (`Worker.on_part`).
    """

    grants: tuple[Grant, ...]
    memory: Memory
    samples: int = 0
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The task raised: one line for the broker; the traceback is in the worker's own log."""

    error: str


class Phase(enum.Enum):
    """What a worker is doing; its value is what `zasgd status` shows."""

    JOINING = "joining"
    ATTACHING = "attaching"
    SEEDING = "seeding"
    IDLE = "idle"
    PULLING = "pulling"
    COMPUTING = "computing"
    PUSHING = "pushing"
    LEAVING = "leaving"
    STOPPED = "stopped"


PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.JOINING: frozenset({Phase.IDLE}),
    Phase.ATTACHING: frozenset({Phase.IDLE}),
    Phase.SEEDING: frozenset({Phase.IDLE}),
    Phase.IDLE: frozenset({Phase.ATTACHING, Phase.SEEDING, Phase.PULLING, Phase.COMPUTING, Phase.PUSHING}),
    Phase.PULLING: frozenset({Phase.IDLE}),
    Phase.COMPUTING: frozenset({Phase.PUSHING, Phase.IDLE}),
    Phase.PUSHING: frozenset({Phase.IDLE}),
    Phase.LEAVING: frozenset(),
    Phase.STOPPED: frozenset(),
}
"""Legal next phases; besides, a live phase may become LEAVING, STOPPED or, fenced, JOINING again."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """How a worker behaves; times in seconds.

    name: keeps its id across restarts. data_path: one of DATA_PATHS. inflight: pushes that may be on their way while
    the next gradient is computed, 0 or 1. push: how gradients are compressed where they travel. connect_timeout_s: for
    the first answer of a broker. broker_timeout_s: silence after which it gives up.
    min_step_s: a step takes at least this long (paced runs). grace_s: how long a leave may wait for the batch in hand.
    push_every: batches per push, as far as they have been granted.
    """

    name: str = ""
    host: str = ""
    pid: int = 0
    data_path: str = "auto"
    inflight: int = 0
    push: Compression = UNCOMPRESSED
    connect_timeout_s: float = 60.0
    broker_timeout_s: float = 30.0
    min_step_s: float = 0.0
    grace_s: float = 10.0
    push_every: int = 1


@dataclass(slots=True)
class Slot:
    """Memory of one gradient, and what is under way with it.

    versions: shard -> version of its parameters, which came at `fresh_at` with sample clock `samples`. exchange: the
    pull or push that is out. taken: parameters that its answers have brought. grants: what was computed. early: parts
    of the push `seq` that left before the rest.
    """

    number: int
    memory: Memory
    versions: dict[int, int] = field(default_factory=dict)
    samples: int = 0
    fresh_at: float = -math.inf
    exchange: Exchange | None = None
    pushing: bool = False
    taken: int = 0
    grants: tuple[Grant, ...] = ()
    seq: int = 0
    began_at: float = -math.inf
    early: list[Push] = field(default_factory=list)


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
        self.slots: list[Slot] = []
        self.front = 0
        self.joint: Exchange | None = None
        self.paths: Paths | None = None
        self._pusher: Pusher | None = None
        self.task: GradientTask | None = None
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
        self._step_began_at = self._free_since = -math.inf
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
        exchange = self._asked(msg.seq)
        if msg.run != self.run or msg.incarnation != self.incarnation or exchange is None:
            return []
        if isinstance(msg, Err):
            return self._on_shard_error(now, exchange, msg)
        if isinstance(msg, Ack | Params | Attached):
            if exchange.on_reply(now, msg):
                self._take(msg)
            return self._moved(now)
        return []

    def on_done(self, now: float, done: Computed) -> list[Effect]:
        """A Gradient for the task in hand, or Failed; a region. The result of any other task is of a former life."""
        self._events += 1
        if isinstance(done.task, Share):
            return self._shared(now, done)
        if self.phase is not Phase.COMPUTING or done.task is not self.task:
            return []
        self.task = None
        self._free_since = now
        slot = self.slots[self.front]
        if isinstance(done.result, Failed):
            self.exit_code = 1
            return self._leave_now(now, f"failed: {done.result.error}")
        if done.result.finite:
            return self._push(now, slot, done.result)
        return [*self._refuse(slot), *self._idle(now)]

    def on_part(self, now: float, task: GradientTask, start: int) -> list[Effect]:
        """The part of the gradient in hand that begins at `start` is final: it leaves, and is applied at the commit."""
        if task is not self.task or self._pusher is None:
            return []
        slot = self.slots[self.front]
        push = self._pusher.part(self._push_ids(slot), slot.number, slot.versions.__getitem__, slot.memory.grads, start)
        slot.early.append(push)
        return [Send(shard_peer(push.shard), push)]

    def _refuse(self, slot: Slot) -> list[Effect]:
        """A gradient with inf or NaN goes to no shard; what of it is there already is discarded."""
        self.reports.add_refused(slot.grants, "nonfinite")
        notes: list[Effect] = [Note("gradient_refused", {**g._asdict(), "reason": "nonfinite"}) for g in slot.grants]
        shards = sorted({push.shard for push in slot.early})
        head: dict[str, Any] = {"layout_hash": self.layout.hash, "slot": slot.number}
        aborts = [Push(**self._push_ids(slot)(k), **head, abort=True) for k in shards]
        slot.grants, slot.early = (), []
        self.dry = False
        return [*notes, *(Send(shard_peer(push.shard), push) for push in aborts)]

    def on_timer(self, now: float) -> list[Effect]:
        """HELLO, renewals, doubts about requests, pacing, and giving up."""
        self._forgive_own_stall(now)
        effects: list[Effect] = []
        for name in self._timers.pop_due(now):
            if self.phase is not Phase.STOPPED:
                effects += _TIMERS[name](self, now)  # type: ignore[index]
        for exchange in self._exchanges():
            if self.phase is not Phase.STOPPED:
                effects += exchange.on_timer(now)
        return effects

    def next_deadline(self) -> float:
        """The next timer or doubt; never, once stopped."""
        if self.phase is Phase.STOPPED:
            return math.inf
        return min(self._timers.next(), *(exchange.next_deadline() for exchange in self._exchanges()), math.inf)

    def _exchanges(self) -> list[Exchange]:
        """What is asked of the shards."""
        asked = [self.joint, *(slot.exchange for slot in self.slots)]
        return [exchange for exchange in asked if exchange is not None]

    def _asked(self, seq: int) -> Exchange | None:
        return next((exchange for exchange in self._exchanges() if exchange.seq == seq), None)

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
        joint = self.phase in (Phase.ATTACHING, Phase.SEEDING)
        require((self.joint is not None) == joint, f"a joint exchange in phase {self.phase}")
        require((self.task is not None) == (self.phase is Phase.COMPUTING), f"a task in phase {self.phase}")
        waits = self.phase in (Phase.PULLING, Phase.PUSHING)
        require(not waits or any(slot.exchange for slot in self.slots), f"nothing is asked in phase {self.phase}")
        for slot in self.slots:
            computes = self.phase is Phase.COMPUTING and slot.number == self.front
            pushes = slot.exchange is not None and slot.pushing
            require(not (computes and slot.exchange), "computing on what is being sent")
            require(not slot.grants or computes or pushes, "grants in hand")
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
        self.paths = Paths(self.config.data_path, self.config.host, msg)
        note = Note("joined", {"worker": self.worker, "incarnation": self.incarnation, "life": self.num_lives})
        return [*self.paths.dials(), note, *self._memory(), *self._renew(now)]

    # ---- memory -----------------------------------------------------------------------------------

    def _memory(self) -> list[Effect]:
        """Ask for memory that shards can share, where any may; else take memory of our own."""
        if not self._paths.offers_memory:
            self._settle(private_region(self._plan))
            return []
        self._paths.region = f"{self.run:08x}-{self._life_token().hex()}"
        return [Share(self._paths.region, self._plan, create=True)]

    @property
    def _plan(self) -> RegionPlan:
        return RegionPlan(self.layout.sizes["params"], self.config.inflight + 1)

    def _shared(self, now: float, done: Computed) -> list[Effect]:
        """The region that was asked for, or why there is none: then data travels."""
        paths = self._paths
        if done.task.name != paths.region or self.phase in (Phase.LEAVING, Phase.STOPPED):
            return []
        if not isinstance(done.result, Region):
            paths.region = ""
            self._settle(private_region(self._plan))
            dials = paths.fall_back(paths.dialled)
            note = Note("arena_refused", {"why": str(done.result), "data_path": paths.name})
            return [*dials, note, *self._advance(now)]
        paths.token = done.result.token
        self.slots = self._slots_in(done.result)
        self._timers.set("attach", now + ATTACH_FOR_S)
        slots = self.config.inflight + 1

        def offer(k: int) -> list[Message]:
            return [Attach(**self._ids(k), seq=self.seq, name=paths.region, slots=slots)]

        return self._ask_all(now, Phase.ATTACHING, offer)

    def _attach_ends(self, now: float) -> list[Effect]:
        """Every shard has answered, or has had its time: those that share no memory are reached over the network."""
        exchange, self.joint = self.joint, None
        if exchange is None:
            return []
        paths = self._paths
        self._timers.clear("attach")
        dials = paths.fall_back(k for k, leg in exchange.legs.items() if not leg.settled)
        unshare: list[Effect] = []
        if paths.attached:
            self._settle(None)
        else:
            unshare, paths.region = [Unshare(paths.region)], ""
            self._settle(private_region(self._plan))
        self._enter(Phase.IDLE)
        return [*dials, *unshare, Note("data_path", {"path": paths.name}), *self._renew(now), *self._advance(now)]

    def _settle(self, region: Region | None) -> None:
        """From here on gradients are computed in this region, or in the one that is attached."""
        if region is not None:
            self.slots = self._slots_in(region)
        self._pusher = Pusher(self.layout, self.num_shards, self.config.push, frozenset(self._paths.attached))

    def _slots_in(self, region: Region) -> list[Slot]:
        return [Slot(i, memory) for i, memory in enumerate(memories(region, self.layout))]

    @property
    def _paths(self) -> Paths:
        require(self.paths is not None, "not welcomed")
        return self.paths  # type: ignore[return-value]

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
        region = self._paths.region
        unshare: list[Effect] = [Unshare(region)] if region else []
        self.phase = Phase.JOINING
        self._begin_life(now)
        return [note, *unshare]

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
                "data_path": self.paths.name if self.paths else "",
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
        if self.phase is not Phase.IDLE or self._pusher is None:
            return []
        if self.leaving:
            return self._finish(now)
        effects = self._next_step(now)
        least = max(self._ahead() // 2, self.config.push_every - 1)
        low = self.open and not self.dry and len(self.grants) <= least
        wants_broker = (low or self.reports.num_pushes >= WINDOW // 2) and self.renewals == self.answered
        return effects + (self._renew(now) if wants_broker else [])

    def _next_step(self, now: float) -> list[Effect]:
        slot = self.slots[self.front]
        if slot.exchange is not None:
            self._enter(Phase.PUSHING)
            return []
        if not self.grants and self.dry and self._owes(slot):
            return self._push_owed(now, slot)
        out = sum(1 for other in self.slots if other.exchange is not None and other.pushing)
        if not self.grants or not self.open or self.reports.num_pushes + out >= WINDOW:
            return []
        if len(self.grants) < self.config.push_every and not self.dry:
            return []  # the rest of this push's batches has been asked for
        paced_at = self._step_began_at + self.config.min_step_s
        if now < paced_at:
            self._timers.set("pace", paced_at)
            return []
        return self._pull(now, slot) if self._stale(now, slot) else self._compute(now, slot)

    def _stale(self, now: float, slot: Slot) -> bool:
        """The parameters lay idle too long to begin on; computing, and waiting for the pace of a run, do not count."""
        paced_at = self._step_began_at + self.config.min_step_s
        idle_since = max(slot.fresh_at, paced_at, self._free_since)
        return slot.fresh_at == -math.inf or now - idle_since > STALE_AFTER_S

    def _finish(self, now: float) -> list[Effect]:
        """Leave when every push is answered and nothing is owed."""
        if any(slot.exchange for slot in self.slots):
            self._enter(Phase.PUSHING)
            return []
        owing = next((slot for slot in self.slots if self._owes(slot)), None)
        return self._push_owed(now, owing) if owing is not None else self._leave_now(now, self.leaving)

    def _owes(self, slot: Slot) -> bool:
        """Compression has held something back, and the slot can carry it."""
        return self._pusher is not None and slot.fresh_at != -math.inf and self._pusher.owes

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

        return self._ask_all(now, Phase.SEEDING, init)

    def _pull(self, now: float, slot: Slot) -> list[Effect]:
        self._enter(Phase.PULLING)
        self.seq += 1
        slot.seq, slot.pushing = self.seq, False

        def pull(k: int) -> list[Message]:
            return [Pull(**self._ids(k), seq=slot.seq, slot=slot.number, shared=k in self._paths.attached)]

        return self._ask(now, slot, pull)

    def _compute(self, now: float, slot: Slot) -> list[Effect]:
        self._enter(Phase.COMPUTING)
        self.seq += 1
        count = min(self.config.push_every, len(self.grants))
        slot.grants = tuple(self.grants.popleft() for _ in range(count))
        slot.seq, slot.early, slot.began_at = self.seq, [], now
        self._step_began_at = now
        parts = self._pusher.parts if self._pusher is not None else ()
        self.task = GradientTask(slot.grants, slot.memory, slot.samples, parts)
        return [Compute(self.task)]

    def _push(self, now: float, slot: Slot, done: Gradient) -> list[Effect]:
        self._samples += done.num_samples
        self._loss_sum += done.loss * done.num_samples
        if done.grads is not slot.memory.grads:
            np.copyto(slot.memory.grads, done.grads)
            done = replace(done, grads=slot.memory.grads)
        self._enter(Phase.PUSHING)
        self.dry = False
        self.front = (self.front + 1) % len(self.slots)
        pushed = self._ask_push(now, slot, done)
        return pushed if self.slots[self.front].exchange else [*pushed, *self._idle(now)]

    def _push_owed(self, now: float, slot: Slot) -> list[Effect]:
        """What compression held back, as a push of its own that consumes nothing."""
        self._enter(Phase.PUSHING)
        self.seq += 1
        slot.seq, slot.early, slot.grants = self.seq, [], ()
        slot.memory.grads.fill(0)
        nothing = Gradient(slot.memory.grads, no_floats(), no_counters(), num_samples=0, loss=math.nan, finite=True)
        return self._ask_push(now, slot, nothing)

    def _ask_push(self, now: float, slot: Slot, done: Gradient) -> list[Effect]:
        require(self._pusher is not None, "no memory yet")
        messages = self._pusher.push(  # type: ignore[union-attr]
            self._push_ids(slot), slot.number, slot.versions.__getitem__, done, slot.grants, slot.early,
            dense=bool(self.leaving) or not slot.grants,
        )  # fmt: skip
        slot.pushing, early, slot.early = True, slot.early, []
        return self._ask(now, slot, messages, early)

    def _push_ids(self, slot: Slot) -> Callable[[int], dict[str, Any]]:
        return lambda k: {**self._ids(k), "seq": slot.seq}

    def _ask(
        self, now: float, slot: Slot, make: Callable[[int], Sequence[Message]], sent: Sequence[Message] = ()
    ) -> list[Effect]:
        """Ask every shard about one slot."""
        requests = over_shards(self.num_shards, shard_peer, make)
        slot.taken = 0
        travels = self.num_shards - len(self._paths.attached)
        answer_bytes = 4 * self.layout.sizes["params"] // self.num_shards if travels else 0
        slot.exchange = Exchange(
            now, slot.seq, requests, self._round_trip, answer_bytes=answer_bytes, keeps_parts=False
        )
        return slot.exchange.start(sent)

    def _ask_all(self, now: float, phase: Phase, make: Callable[[int], Sequence[Message]]) -> list[Effect]:
        """Ask every shard for something that concerns no slot."""
        self._enter(phase)
        self.seq += 1
        requests = over_shards(self.num_shards, shard_peer, make)
        self.joint = Exchange(now, self.seq, requests, self._round_trip, keeps_parts=False)
        return self.joint.start()

    # ---- answers of shards ------------------------------------------------------------------------

    def _on_shard_error(self, now: float, exchange: Exchange, err: Err) -> list[Effect]:
        if err.code == "FENCED":
            # Only the broker can say what that means: it lists this incarnation, or fences it in so many words.
            return [Send(BROKER, Rejoin(**self._ids()))]
        return exchange.on_error(now, err) + self._moved(now)

    def _take(self, msg: Ack | Params | Attached) -> None:
        """A new part of an answer: parameters go where the next gradient of the slot is computed on them."""
        if isinstance(msg, Attached):
            self._paths.proved(msg)
            return
        slot = next((s for s in self.slots if s.exchange is not None and s.exchange.seq == msg.seq), None)
        if slot is not None:
            slot.taken += take(msg, slot.memory, self._slices(msg.shard), shared=msg.shard in self._paths.attached)

    def _slices(self, shard: int) -> dict[str, Slice]:
        return {section: self.layout.slices(section, self.num_shards)[shard] for section in SECTIONS}

    def _moved(self, now: float) -> list[Effect]:
        """Go on wherever every shard has answered."""
        effects: list[Effect] = []
        if self.joint is not None and self.joint.settled:
            effects += self._attach_ends(now) if self.phase is Phase.ATTACHING else self._seeded(now, self.joint)
        for slot in self.slots:
            if slot.exchange is not None and slot.exchange.settled:
                effects += self._answered(now, slot, slot.exchange)
        waits = self.phase in (Phase.PULLING, Phase.PUSHING)
        if waits and self.slots[self.front].exchange is None:
            return [*effects, *self._idle(now)]
        return [*effects, *self._advance(now)]

    def _idle(self, now: float) -> list[Effect]:
        self._enter(Phase.IDLE)
        return self._advance(now)

    def _seeded(self, now: float, exchange: Exchange) -> list[Effect]:
        self.joint = None
        self._enter(Phase.IDLE)
        self.has_seeded = not exchange.refusals  # the broker may hear of it later than of our next renewal
        return [*self._renew(now), *self._advance(now)]

    def _answered(self, now: float, slot: Slot, exchange: Exchange) -> list[Effect]:
        slot.exchange = None
        effects = self._pushed(now, slot, exchange) if slot.pushing else []
        if exchange.refusals or slot.taken != self.layout.sizes["params"]:
            slot.fresh_at = -math.inf
        else:
            slot.versions, slot.samples, slot.fresh_at = exchange.versions, exchange.samples, now
        return effects

    def _pushed(self, now: float, slot: Slot, exchange: Exchange) -> list[Effect]:
        """Every shard has answered a push: final, torn or refused, never in between."""
        grants, slot.grants = slot.grants, ()
        if not grants:
            return []  # it was owed, and consumed nothing
        self.steps += 1
        self.dry = False
        self.lags = exchange.lags
        took = now - slot.began_at
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
        self._drop()
        self._timers = Deadlines()
        self._timers.set("bye_over", now + BYE_FOR_S)
        return self._bye(now)

    def _bye(self, now: float) -> list[Effect]:
        self._timers.set("bye", now + BYE_EVERY_S)
        return [Send(BROKER, Bye(**self._ids(), reason=self.leaving[:200], **self._carried()))]

    def _stop(self, reason: str, code: int) -> list[Effect]:
        self.phase = Phase.STOPPED
        self._drop()
        return [Stop(reason, code)]

    def _drop(self) -> None:
        """Nothing is under way any more."""
        self.joint = self.task = None
        self.slots = []

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
    "attach": Worker._attach_ends,
    "grace": Worker._on_grace_timer,
    "bye": Worker._bye,
    "bye_over": Worker._on_bye_over_timer,
}
