"""One slice of the parameter vector: applies pushes to it, each at most once, and sends it back.

Decides whether a push is served, known, too late or malformed, and what its lag is; the arithmetic is
`kernels.ShardOptimizer`. Validate, then mark + apply + version as one call, then acknowledge. Never talks to another
shard and never decides who is a member: it serves exactly the incarnations that the broker ADMITted and has not
FENCEd.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from zasgd.core import wire
from zasgd.core.kernels import ShardOptimizer, all_finite
from zasgd.core.layout import Layout, Slice
from zasgd.core.messages import (
    Ack,
    Admit,
    Admitted,
    Applied,
    Array,
    Bye,
    Err,
    Fence,
    Fenced,
    Hello,
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
from zasgd.core.node import BROKER, OWN_STALL_S, Computed, Deadlines, Effect, Note, PeerId, Refusal, Send, Stop, require
from zasgd.core.rules import GroupSpec, RuleSpec
from zasgd.core.schedule import Schedule
from zasgd.core.snapshot import Client, Outcome, Snapshot, frozen_copy

MAX_LAG_BUCKET = 4095
MAX_SAMPLES_PER_PUSH = 1 << 32
MAX_SETTLED = 1024
"""Lives whose end is settled that are remembered, so that a late ADMIT does not bring one back."""
HELLO_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """What a shard must know to apply pushes; the broker sends it as JSON in WELCOME.

    window_bytes: unacknowledged push bytes it stages per worker. inflight: pushes a worker may have out beyond one.
    """

    num_shards: int
    rule: RuleSpec
    groups: tuple[GroupSpec, ...]
    schedule: Schedule
    window_bytes: int = 1 << 30
    inflight: int = 0

    def to_json(self) -> str:
        """JSON text, the inverse of from_json."""
        plain = {**{name: getattr(self, name) for name in ("num_shards", "window_bytes", "inflight")}}
        plain["rule"] = self.rule.to_plain()
        plain["groups"] = [g.to_plain() for g in self.groups]
        plain["schedule"] = asdict(self.schedule)
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str) -> ShardConfig:
        """Read what to_json wrote; raises ValueError for anything else."""
        plain = json.loads(text)
        schedule = plain["schedule"]
        schedule["milestones"] = tuple(schedule["milestones"])
        return cls(
            num_shards=plain["num_shards"],
            rule=RuleSpec.from_plain(plain["rule"]),
            groups=tuple(GroupSpec.from_plain(g) for g in plain["groups"]),
            schedule=Schedule(**schedule),
            window_bytes=plain["window_bytes"],
            inflight=plain["inflight"],
        )


class Shard:
    """A parameter shard as a core (see node.Node)."""

    def __init__(
        self,
        now: float,
        token: bytes,
        endpoint: str,
        host: str = "",
        pid: int = 0,
        broker_timeout_s: float = 60.0,
    ) -> None:
        """token: random, names this process to the broker. endpoint: where workers can reach its data socket.

        It ends with code 3 when the broker has been silent for `broker_timeout_s`.
        """
        self.hello = Hello(role="server", token=token, host=host, pid=pid, endpoint=endpoint)
        self.broker_timeout_s = broker_timeout_s
        self.number = -1
        self.run = 0
        self.incarnation = 0
        self.lease_s = 0.0
        self.config: ShardConfig | None = None
        self.layout: Layout | None = None
        self.samples_per_epoch = 0
        self.slice = Slice(0, 0)
        self.params = np.empty(0, np.float32)
        self.stats = np.empty(0, np.float32)
        self.counters = np.empty(0, np.int64)
        self.optimizer: ShardOptimizer | None = None
        self.seeded_by = 0
        self.version = 0
        self.samples = 0
        self.lags: Counter[int] = Counter()
        self.refusals: Counter[str] = Counter()
        self.clients: dict[int, Client] = {}
        self.fenced: dict[int, Fenced] = {}
        self._settled: deque[int] = deque(maxlen=MAX_SETTLED)
        self.renewals = 0
        self.stopped = False
        self._events = 0
        self._heard_at = now
        self._timers = Deadlines()
        self._timers.set("hello", now)

    # ---- the node contract ------------------------------------------------------------------------

    def on_message(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        """Serve one message; whatever is wrong with it is answered with ERR and changes nothing."""
        self._events += 1
        if self.stopped:
            return []
        try:
            if peer == BROKER:
                return self._on_broker(now, msg)
            return self._on_data(now, peer, msg)
        except Refusal as refusal:
            self.refusals[refusal.code] += 1
            return [Send(peer, refusal.answer(msg, run=self.run, shard=max(self.number, 0)))]

    def on_done(self, now: float, done: Computed) -> list[Effect]:
        """A shard asks for no slow work: the kernel is pure and runs inline."""
        require(False, "a shard has nothing computed elsewhere")
        return []

    def on_timer(self, now: float) -> list[Effect]:
        """Say HELLO until welcomed, then renew; give up on a silent broker."""
        late_s = now - self.next_deadline()
        if late_s > OWN_STALL_S:
            self._heard_at = min(now, self._heard_at + late_s)  # stopped or starved, it asked nobody
        effects: list[Effect] = []
        for name in self._timers.pop_due(now):
            if now - self._heard_at > self.broker_timeout_s:
                return self._stop(f"the broker has not answered for {self.broker_timeout_s:.0f} s", 3)
            if name == "hello":
                effects.append(Send(BROKER, self.hello))
                self._timers.set("hello", now + HELLO_EVERY_S)
            else:
                effects += self._renew(now)
        return effects

    def leave(self, now: float, reason: str) -> list[Effect]:
        """Tell the broker and stop: the run cannot go on without this slice. Called by the shell."""
        bye: list[Effect] = [Send(BROKER, Bye(**self._ids(), reason=reason))] if self.config else []
        return bye + self._stop(reason, 3 if self.config else 0)

    def next_deadline(self) -> float:
        """When to renew next; never, once stopped."""
        return math.inf if self.stopped else self._timers.next()

    def validate(self) -> None:
        """Raise InvariantError unless versions, snapshots and tables agree; deeper every 1,000 events."""
        require(self.seeded_by == 0 or self.layout is not None, "seeded without a layout")
        require(not (self.clients.keys() & self.fenced.keys()), "a fenced incarnation is still served")
        require(self.version == sum(self.lags.values()), "version is not the number of applied pushes")
        for client in self.clients.values():
            require(all(v <= self.version for v in client.snapshots), "a snapshot is newer than the shard")
        if self._events % 1000 == 0:
            for client in self.clients.values():
                client.validate()

    # ---- the broker -------------------------------------------------------------------------------

    def _on_broker(self, now: float, msg: Message) -> list[Effect]:
        self._heard_at = now
        match msg:
            case Welcome():
                return self._welcomed(now, msg)
            case Err():
                code = 3 if self.config else 2
                return [] if msg.retryable else self._stop(f"the broker refused this server: {msg.text}", code)
            case StopMsg():
                bye = Send(BROKER, Bye(**self._ids(), reason="stopped"))
                return [*(self._renew(now) if self.config else []), bye, *self._stop(msg.reason, msg.code)]
        if msg.run != self.run or self.config is None:
            return []
        match msg:
            case Admit():
                return self._admit(now, msg)
            case Fence():
                return self._fence(now, msg)
            case Lease():
                for incarnation in msg.settled:
                    if self.fenced.pop(incarnation, None) is not None:
                        self._settled.append(incarnation)
                return []
            case Observe():
                return self._observe(BROKER, msg)
        raise Refusal("UNEXPECTED", f"a shard has no use for {msg.kind.name} from its broker")

    def _welcomed(self, now: float, msg: Welcome) -> list[Effect]:
        if self.config is not None or msg.token != self.hello.token:
            return []
        self.config = ShardConfig.from_json(msg.config)
        self.run, self.number, self.incarnation, self.lease_s = (
            msg.run,
            msg.shard,
            msg.incarnation,
            msg.lease_s,
        )
        # Compile before the first renewal says that this shard is ready: no push ever waits for a compiler.
        ShardOptimizer(self.config.rule, self.config.groups, (), 0).warm()
        self._timers.clear("hello")
        return [Note("welcomed", {"shard": self.number}), *self._renew(now)]

    def _admit(self, now: float, msg: Admit) -> list[Effect]:
        if msg.layout is not None and self.layout is None:
            try:
                self._take_layout(msg.layout, msg.num_samples)
            except MemoryError:
                return self._stop(f"no memory for a shard of a model of {msg.layout.num_parameters} parameters", 3)
        if self.layout is None:
            return []  # the broker repeats ADMIT with the layout until this shard has shown that it has it
        if msg.incarnation in self._settled:
            return []  # an old order, overtaken by the end of that life
        if msg.incarnation not in self.fenced and msg.incarnation not in self.clients:
            config = self._config
            self.clients[msg.incarnation] = Client(msg.worker, msg.incarnation, config.inflight + 1)
        return [Send(BROKER, Admitted(**self._ids(msg)))]

    def _take_layout(self, layout: Layout, num_samples: int) -> None:
        config = self._config
        self.layout, self.samples_per_epoch = layout, num_samples
        self.slice, stats, counters = (
            layout.slices(section, config.num_shards)[self.number] for section in ("params", "stats", "counters")
        )
        self.params = np.zeros(self.slice.size, np.float32)
        self.stats = np.zeros(stats.size, np.float32)
        self.counters = np.zeros(counters.size, np.int64)
        self._new_optimizer()

    def _new_optimizer(self) -> None:
        config, layout = self._config, self.layout
        require(layout is not None, "no layout")
        segments = layout.segments(self.slice)  # type: ignore[union-attr]
        self.optimizer = ShardOptimizer(config.rule, config.groups, segments, self.slice.size)

    def _fence(self, now: float, msg: Fence) -> list[Effect]:
        client = self.clients.pop(msg.incarnation, None)
        if msg.discard and self.seeded_by == msg.incarnation:
            self._unseed()
        if msg.incarnation not in self.fenced:
            client = client or Client(msg.worker, msg.incarnation, 1)
            self.fenced[msg.incarnation] = Fenced(
                **self._ids(msg),
                high=client.window.high,
                bitmap=client.window.bitmap,
                pushes=tuple(client.pushes),
            )
        return [Send(BROKER, self.fenced[msg.incarnation])]

    def _unseed(self) -> None:
        require(self.version == 0, "a shard that has applied pushes was told to forget them")
        self.seeded_by = 0
        self._new_optimizer()

    def _renew(self, now: float) -> list[Effect]:
        self.renewals += 1
        self._timers.set("renew", now + self.lease_s / 4)
        renewal = Renew(
            **self._ids(),
            seq=self.renewals,
            version=self.version,
            role="server",
            steps=self.version,
            phase="seeded" if self.seeded_by else "ready",
            seeded=self.seeded_by,
            fenced=tuple(self.fenced),
            facts=self.facts(),
        )
        return [Send(BROKER, renewal)]

    def facts(self) -> dict[str, Any]:
        """What `zasgd status` and the summary show of this shard: plain numbers and maps with text keys."""
        optimizer_bytes = self.optimizer.num_bytes() if self.optimizer else 0
        own = self.params.nbytes + self.stats.nbytes + self.counters.nbytes + optimizer_bytes
        return {
            "samples": self.samples,
            "bytes": self.params.nbytes,
            "resident_bytes": own + sum(c.num_bytes for c in self.clients.values()),
            "lags": {str(lag): n for lag, n in self.lags.items()},
            "worker_lags": {str(c.worker): c.lag for c in self.clients.values()},
            "refusals": dict(self.refusals),
        }

    # ---- workers and the evaluator ----------------------------------------------------------------

    def _on_data(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        if isinstance(msg, Err):
            return []  # an ERR is never answered, or two peers could refuse each other for ever
        if self.config is None or self.layout is None:
            raise Refusal("UNSEEDED", "this shard has no layout yet", retry_after_ms=200)
        if msg.run != self.run:
            raise Refusal("WRONG_RUN", f"this shard serves run {self.run:08x}")
        if msg.shard != self.number:
            raise Refusal("WRONG_SHARD", f"this is shard {self.number}")
        if isinstance(msg, Observe):
            return self._observe(peer, msg)
        serve = _SERVED.get(type(msg))
        if serve is None:
            raise Refusal("UNEXPECTED", f"a shard has no use for {msg.kind.name}")
        client = self.clients.get(msg.incarnation)
        if client is None or client.worker != msg.worker:
            raise Refusal("FENCED", f"incarnation {msg.incarnation} is not admitted here")
        known = client.window.state(msg.seq)
        if known == "old":
            raise Refusal("OLD_SEQ", f"seq {msg.seq} is below the window that ends at {client.window.high}")
        if known == "known":
            return self._repeat(peer, client, msg)
        return serve(self, now, peer, client, msg)

    def _observe(self, peer: PeerId, msg: Message) -> list[Effect]:
        if not self.seeded_by:
            raise Refusal("UNSEEDED", "this shard holds no parameters yet", retry_after_ms=200)
        return self._reply(Params, peer, msg, self._snapshot())

    def _pull(self, now: float, peer: PeerId, client: Client, msg: Message) -> list[Effect]:
        if not self.seeded_by:
            raise Refusal("UNSEEDED", "this shard holds no parameters yet", retry_after_ms=200)
        snapshot = client.snapshots.get(self.version) or self._snapshot()
        client.keep(snapshot)
        client.record(msg.seq, Outcome(push=False, version=self.version))
        return self._reply(Params, peer, msg, snapshot)

    def _probe(self, now: float, peer: PeerId, client: Client, msg: Message) -> list[Effect]:
        raise Refusal("UNKNOWN_SEQ", f"push {msg.seq} is not here", retry_after_ms=0)

    def _init(self, now: float, peer: PeerId, client: Client, init: Init) -> list[Effect]:
        self._check_layout(init.layout_hash)
        if self.seeded_by:
            raise Refusal("ALREADY_SEEDED", f"incarnation {self.seeded_by} seeded this shard")
        if init.part == 0 and (init.stats.size, init.counters.size) != (self.stats.size, self.counters.size):
            raise Refusal("BAD_SHAPE", f"a seeder brings {self.stats.size} stats and {self.counters.size} counters")
        staged = self._stage(client, init.seq, init.offset, init.params)
        if init.part == 0:
            self.stats[:], self.counters[:] = init.stats, init.counters
        pieces = staged.covering(self.slice.size)
        if pieces is None:
            return []
        for offset, piece in pieces:
            self.params[offset : offset + piece.size] = piece
        client.staged = None
        self.seeded_by = client.incarnation
        client.record(init.seq, Outcome(push=True, version=0))
        return [Send(peer, Ack(**self._ids(init), seq=init.seq)), *self._renew(now)]

    def _push(self, now: float, peer: PeerId, client: Client, push: Push) -> list[Effect]:
        try:
            return self._staged_push(peer, client, push)
        except Refusal as refusal:
            if refusal.retry_after_ms is None:
                # The worker goes on without it: no late copy of this seq may be applied after all.
                client.window.mark(push.seq)
                if client.staged is not None and client.staged.seq == push.seq:
                    client.staged = None
            raise

    def _staged_push(self, peer: PeerId, client: Client, push: Push) -> list[Effect]:
        if client.staged is not None and push.seq < client.staged.seq:
            raise Refusal("OLD_SEQ", f"push {push.seq} was given up for {client.staged.seq}")
        if push.abort:
            client.staged = None
            return []
        snapshot = self._checked(client, push)
        staged = self._stage(client, push.seq, push.offset, push.grads)
        if not push.commit:
            return []
        pieces = staged.covering(self.slice.size)
        if pieces is None:
            raise Refusal("INCOMPLETE", f"parts of push {push.seq} are missing", retry_after_ms=0)
        client.staged = None
        if not self._finite(pieces, push):
            raise Refusal("NONFINITE", "the gradient holds inf or NaN")
        return self._reply(Ack, peer, push, self._apply(client, push, pieces, snapshot))

    def _checked(self, client: Client, push: Push) -> Snapshot:
        """The snapshot that a well-formed push was computed on; raises Refusal otherwise."""
        self._check_layout(push.layout_hash)
        if push.hyper is not None:
            raise Refusal("HYPER", "this run computes hyper-parameters from its schedule; a push may not carry them")
        snapshot = client.snapshots.get(push.version)
        if snapshot is None:
            raise Refusal("NO_SNAPSHOT", f"nothing was sent to incarnation {client.incarnation} at {push.version}")
        self._check_buffers(push.stats, push.counters, wanted=push.commit)
        granted = sum(g.num_samples for g in push.grants)
        if push.num_samples > MAX_SAMPLES_PER_PUSH or (push.grants and push.num_samples != granted):
            raise Refusal("BAD_FIELD", f"num_samples is {push.num_samples}, the grants hold {granted}")
        return snapshot

    def _check_layout(self, layout_hash: str) -> None:
        own = self.layout.hash if self.layout else ""
        if layout_hash != own:
            raise Refusal("LAYOUT_MISMATCH", f"this run's layout is {own}, the message is for {layout_hash[:16]}")

    def _check_buffers(self, stats: Array, counters: Array, *, wanted: bool) -> None:
        """A push may leave buffers out; one that brings them brings all."""
        for name, got, own in (("stats", stats, self.stats), ("counters", counters, self.counters)):
            if got.size and (not wanted or got.size != own.size):
                raise Refusal("BAD_SHAPE", f"{name} has {got.size} elements, this shard {own.size}")

    def _stage(self, client: Client, seq: int, offset: int, pieces: tuple[Array, ...]) -> Any:
        num_elements = sum(p.size for p in pieces)
        if offset + num_elements > self.slice.size:
            raise Refusal("BAD_SHAPE", f"elements {offset} to {offset + num_elements} of {self.slice.size}")
        staged = client.stage(seq)
        if staged.num_bytes + 4 * num_elements > max(self._config.window_bytes, self.params.nbytes):
            client.staged = None
            raise Refusal("WINDOW", f"over {self._config.window_bytes} bytes are staged", retry_after_ms=100)
        staged.add(offset, pieces)
        return staged

    def _finite(self, pieces: list[tuple[int, Array]], push: Push) -> bool:
        return all(all_finite(piece) for _, piece in pieces) and (not push.stats.size or all_finite(push.stats))

    def _apply(self, client: Client, push: Push, pieces: list[tuple[int, Array]], snapshot: Snapshot) -> Snapshot:
        """Mark, apply and count as one call; the returned snapshot is what the worker gets and computes on next."""
        optimizer = self.optimizer
        require(optimizer is not None, "no optimizer")
        lr = self._config.schedule.lr_at(self.samples, self.samples_per_epoch)
        sent = np.empty_like(self.params)
        optimizer.apply(self.params, pieces, snapshot.params, lr, sent)  # type: ignore[union-attr]
        sent.flags.writeable = False
        if push.stats.size:
            # What this batch changed, as with a gradient: BatchNorm's own momentum then counts once, not twice.
            self.stats += _buffer_weight(self.version - snapshot.version) * (push.stats - snapshot.stats)
        if push.counters.size:
            np.maximum(self.counters, push.counters, out=self.counters)
        client.lag = self.version - snapshot.version
        self.lags[min(client.lag, MAX_LAG_BUCKET)] += 1
        self.version += 1
        self.samples += push.num_samples
        new = Snapshot(self.version, sent, *self._buffers())
        client.keep(new)
        outcome = Outcome(push=True, version=self.version, lag=client.lag)
        client.record(push.seq, outcome, Applied(push.seq, push.grants))
        return new

    def _repeat(self, peer: PeerId, client: Client, msg: Message) -> list[Effect]:
        """Answer a known seq with the stored result; today's parameters would not be what was sent then."""
        outcome = client.outcomes.get(msg.seq)
        if outcome is None:
            raise Refusal("OLD_SEQ", f"seq {msg.seq} was refused, or its result is no longer kept")
        snapshot = client.snapshots.get(outcome.version)
        cls = Ack if outcome.push else Params
        if snapshot is None or isinstance(msg, Init):
            return [Send(peer, cls(**self._ids(msg), seq=msg.seq, version=outcome.version))]
        return self._reply(cls, peer, msg, snapshot, outcome.lag)

    def _snapshot(self) -> Snapshot:
        return Snapshot(self.version, frozen_copy(self.params), *self._buffers())

    def _buffers(self) -> tuple[Array, Array]:
        """Copies of the buffers; an empty one is its own copy."""
        stats, counters = self.stats, self.counters
        return (frozen_copy(stats) if stats.size else stats), (frozen_copy(counters) if counters.size else counters)

    def _reply(
        self,
        cls: type[Ack] | type[Params],
        peer: PeerId,
        msg: Message,
        snapshot: Snapshot,
        lag: int | None = None,
    ) -> list[Effect]:
        """The snapshot in parts; buffers ride on the first."""
        client = self.clients.get(msg.incarnation)
        extra: dict[str, Any] = {"lag": lag if lag is not None else client.lag if client else 0} if cls is Ack else {}
        limit = wire.MAX_INLINE_PART_BYTES if msg.inline else wire.MAX_PART_BYTES
        parts = list(wire.split(snapshot.params, limit))
        effects: list[Effect] = []
        for i, (offset, pieces) in enumerate(parts):
            buffers: dict[str, Any] = {"stats": snapshot.stats, "counters": snapshot.counters} if i == 0 else {}
            reply = cls(
                **self._ids(msg), seq=msg.seq, version=snapshot.version, part=i, parts=len(parts), inline=msg.inline,
                offset=offset, params=pieces, **buffers, **extra,
            )  # fmt: skip
            effects.append(Send(peer, reply))
        return effects

    # ---- small things -----------------------------------------------------------------------------

    @property
    def _config(self) -> ShardConfig:
        require(self.config is not None, "not welcomed")
        return self.config  # type: ignore[return-value]

    def _ids(self, msg: Message | None = None) -> dict[str, Any]:
        """F0 fields of what this shard sends: about itself, or in answer to a worker's `msg`."""
        if msg is None:
            return {"run": self.run, "shard": self.number, "incarnation": self.incarnation}
        return {"run": self.run, "shard": self.number, "worker": msg.worker, "incarnation": msg.incarnation}

    def _stop(self, reason: str, code: int) -> list[Effect]:
        self.stopped = True
        return [Stop(reason, code)]


def _buffer_weight(lag: int) -> np.float32:
    """How much of a worker's change to a float buffer counts.

    A buffer that each batch moves by the fraction h towards its own value is stable under a lag of tau while
    weight * h < 2 sin(pi / (2 (2 tau + 1))) (RULES T6); 1 / (1 + tau) is for every h up to 1.
    """
    return np.float32(1.0 / (1 + lag))


_SERVED: dict[type[Message], Callable[[Shard, float, PeerId, Client, Any], list[Effect]]] = {
    Init: Shard._init,
    Pull: Shard._pull,
    Push: Shard._push,
    Probe: Shard._probe,
}
