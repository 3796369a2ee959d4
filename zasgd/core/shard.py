"""One slice of the parameter vector: applies pushes to it, each at most once, and sends it back.

Decides whether a push is served, known, too late or malformed, and when it is applied: at once, in a round with others
(mode sync), or when nobody falls too far behind by it (lag_policy block). What it does to the parameters is
`parameters.Parameters`. Validate, then mark + apply + version as one call, then acknowledge. Never talks to another
shard and never decides who is a member: it serves exactly the incarnations that the broker ADMITted and has not
FENCEd.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zasgd.core import wire
from zasgd.core.compress import MAX_ELEMENTS, CodecError, decode
from zasgd.core.kernels import all_finite
from zasgd.core.layout import Layout
from zasgd.core.messages import (
    Ack,
    Admit,
    Admitted,
    Applied,
    Array,
    Attach,
    Attached,
    Bye,
    Decision,
    Done,
    Err,
    Fence,
    Fenced,
    Hello,
    Init,
    Lease,
    Live,
    Message,
    Observe,
    Params,
    Probe,
    Pull,
    Push,
    PushId,
    Renew,
    Round,
    StopMsg,
    Welcome,
)  # fmt: skip
from zasgd.core.node import (
    BROKER,
    OWN_STALL_S,
    Computed,
    Deadlines,
    Effect,
    Note,
    PeerId,
    Record,
    Refusal,
    Send,
    Share,
    Stop,
    Unshare,
    require,
)  # fmt: skip
from zasgd.core.optimizer import Piece
from zasgd.core.parameters import Committed, Parameters, ShardConfig
from zasgd.core.region import Region, RegionPlan
from zasgd.core.rounds import Rounds, Waiting
from zasgd.core.snapshot import Client, Outcome, Snapshot, Staged

MAX_SAMPLES_PER_PUSH = 1 << 32
MAX_SETTLED = 1024
"""Lives whose end is settled that are remembered, so that a late ADMIT does not bring one back."""
HELLO_EVERY_S = 0.5
LOOK_EVERY_S = 0.25
"""How often held pushes are looked at again while no other push comes."""
ASK_AGAIN_MS = 500
"""A worker asks this much later again for a push that waits."""
PATIENCE_STEPS, MIN_PATIENCE_S = 8, 1.0
"""A worker counts as computing for so many of its own steps, and at least so long; then nobody waits for it."""


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
        records: bool = False,
        records_pushes: bool = False,
    ) -> None:
        """token: random, names this process to the broker. endpoint: where workers can reach its data socket.

        It ends with code 3 when the broker has been silent for `broker_timeout_s`. records: emit a Record of all
        that moves the parameters, for `zasgd replay`; records_pushes: gradients included.
        """
        self.hello = Hello(role="server", token=token, host=host, pid=pid, endpoint=endpoint)
        self.broker_timeout_s = broker_timeout_s
        self.number = -1
        self.run = 0
        self.incarnation = 0
        self.lease_s = 0.0
        self.config: ShardConfig | None = None
        self.layout: Layout | None = None
        self.values: Parameters | None = None
        self.rounds = Rounds()
        self.live = 0
        self.seeded_by = 0
        self.refusals: Counter[str] = Counter()
        self.clients: dict[int, Client] = {}
        self.fenced: dict[int, Fenced] = {}
        self._settled: deque[int] = deque(maxlen=MAX_SETTLED)
        self.renewals = 0
        self.stopped = False
        self._attaching: tuple[PeerId, Attach] | None = None
        self._records = records
        self._records_pushes = records_pushes
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
        """A region was opened, or could not be: the only thing a shard asks for, since the kernel runs inline."""
        require(isinstance(done.task, Share) and self._attaching is not None, "a shard has nothing computed elsewhere")
        (peer, msg), self._attaching = self._attaching, None  # type: ignore[misc]
        client = self.clients.get(msg.incarnation)
        if client is None:
            return [Unshare(msg.name)]
        if not isinstance(done.result, Region):
            refusal = Refusal("NO_ARENA", str(done.result))
            return [Send(peer, refusal.answer(msg, run=self.run, shard=self.number))]
        client.region, client.region_name = done.result, msg.name
        return [self._attached(peer, client, msg)]

    def on_timer(self, now: float) -> list[Effect]:
        """Say HELLO until welcomed, then renew; give up on a silent broker."""
        late_s = now - self.next_deadline()
        if late_s > OWN_STALL_S:
            self._heard_at = min(now, self._heard_at + late_s)  # stopped or starved, it asked nobody
        effects: list[Effect] = []
        for name in self._timers.pop_due(now):
            if now - self._heard_at > self.broker_timeout_s:
                return self._stop(f"the broker has not answered for {self.broker_timeout_s:.0f} s", 3)
            effects += _TIMERS[name](self, now)  # type: ignore[index]
        return effects

    def _say_hello(self, now: float) -> list[Effect]:
        self._timers.set("hello", now + HELLO_EVERY_S)
        return [Send(BROKER, self.hello)]

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
        if self._events % 1000 == 0:
            self._validate_all()

    def _validate_all(self) -> None:
        """The full sweep over everything that is kept."""
        self.rounds.validate()
        if self.values is not None:
            self.values.validate(list(self.clients))
        for client in self.clients.values():
            client.validate()
            newest = max((s.version for s in client.snapshots.values()), default=0)
            require(newest <= self.version, "a snapshot is newer than the shard")

    @property
    def version(self) -> int:
        """Updates applied."""
        return self.values.version if self.values else 0

    @property
    def samples(self) -> int:
        """The sample clock."""
        return self.values.samples if self.values else 0

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
                return self._take_live(now, msg)
            case Live():
                return self._take_live(now, msg)
            case Round():
                self.rounds.told(msg.base, msg.decisions)
                return self._carry_out(now)
            case Done():
                self.rounds.confirmed(msg.seq)
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
        self.config.warm()
        self._timers.clear("hello")
        return [Note("welcomed", {"shard": self.number}), *self._renew(now)]

    def _admit(self, now: float, msg: Admit) -> list[Effect]:
        if msg.layout is not None and self.layout is None:
            try:
                self.values = Parameters(self._config, msg.layout, self.number, msg.num_samples)
            except MemoryError:
                return self._stop(f"no memory for a shard of a model of {msg.layout.num_parameters} parameters", 3)
            self.layout = msg.layout
            return [
                *self._record("shard", self.number, self.run, msg.layout.hash, self._config.num_shards),
                *self._serve_newcomer(msg),
            ]
        if self.layout is None:
            return []  # the broker repeats ADMIT with the layout until this shard has shown that it has it
        return self._serve_newcomer(msg)

    def _serve_newcomer(self, msg: Admit) -> list[Effect]:
        if msg.incarnation in self._settled:
            return []  # an old order, overtaken by the end of that life
        if msg.incarnation not in self.fenced and msg.incarnation not in self.clients:
            config = self._config
            self.clients[msg.incarnation] = Client(msg.worker, msg.incarnation, config.inflight + 1)
        return [Send(BROKER, Admitted(**self._ids(msg)))]

    def _fence(self, now: float, msg: Fence) -> list[Effect]:
        client = self.clients.pop(msg.incarnation, None)
        unshare: list[Effect] = [Unshare(client.region_name)] if client is not None and client.region_name else []
        if msg.discard and self.seeded_by == msg.incarnation:
            self.seeded_by = 0
            self._values.forget()
        effects = self._forget_worker(now, msg.incarnation)
        if msg.incarnation not in self.fenced:
            client = client or Client(msg.worker, msg.incarnation, 1)
            self.fenced[msg.incarnation] = Fenced(
                **self._ids(msg),
                high=client.window.high,
                bitmap=client.window.bitmap,
                pushes=tuple(client.pushes),
            )
        return [*effects, *unshare, Send(BROKER, self.fenced[msg.incarnation])]

    def _forget_worker(self, now: float, incarnation: int) -> list[Effect]:
        """Its momentum goes, and nobody waits for it any more."""
        if self.values is None or not self.seeded_by:
            return []
        left = self._record("leave", incarnation) if self.values.leave(incarnation) else []
        self.rounds.forget(incarnation)
        return [*left, *self._move_on(now)]

    def _take_live(self, now: float, msg: Lease | Live) -> list[Effect]:
        """N, by which differences are divided and rounds are closed."""
        if msg.live <= self.live or self.values is None:
            return []
        self.live, self.values.num_workers = msg.live, max(1, msg.num_workers)
        return self._move_on(now)

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
            decisions=self.rounds.num_known,
            facts=self.facts(),
        )
        return [Send(BROKER, renewal), *self._publish()]

    def facts(self) -> dict[str, Any]:
        """What `zasgd status` and the summary show of this shard: plain numbers and maps with text keys."""
        values = self.values
        if values is None:
            return {"samples": 0, "bytes": 0, "resident_bytes": 0, "refusals": dict(self.refusals)}
        alarm = values.guard.alarm
        return {
            "samples": values.samples,
            "bytes": values.params.nbytes,
            "resident_bytes": values.num_bytes + sum(c.num_bytes for c in self.clients.values()),
            "lags": {str(lag): n for lag, n in values.lags.items()},
            "worker_lags": {str(c.worker): c.lag for c in self.clients.values()},
            "refusals": dict(self.refusals),
            "gap_rmse": values.gap.rmse,
            "damping": values.guard.damping,
            "alarms": values.guard.num_alarms,
            "alarm": alarm.reason if alarm else "",
        }

    # ---- workers and the evaluator ----------------------------------------------------------------

    def _on_data(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        if isinstance(msg, Err):
            return []  # an ERR is never answered, or two peers could refuse each other for ever
        if self.config is None or self.layout is None or self.values is None:
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
        if isinstance(msg, Attach):
            return self._attach(now, peer, client, msg)  # not a seq of its own: asked again it is done again
        known = client.window.state(msg.seq)
        if known == "old":
            raise Refusal("OLD_SEQ", f"seq {msg.seq} is below the window that ends at {client.window.high}")
        if known == "known":
            return self._repeat(peer, client, msg)
        return serve(self, now, peer, client, msg)

    def _observe(self, peer: PeerId, msg: Message) -> list[Effect]:
        if not self.seeded_by:
            raise Refusal("UNSEEDED", "this shard holds no parameters yet", retry_after_ms=200)
        whole = isinstance(msg, Observe) and msg.whole
        effects = self._update() if whole else []
        return [*effects, *self._reply(Params, peer, msg, self._values.observed())]

    def _attach(self, now: float, peer: PeerId, client: Client, msg: Attach) -> list[Effect]:
        """Open the worker's region; asked again it answers again."""
        if msg.slots != client.num_slots:
            raise Refusal("BAD_FIELD", f"a worker has {client.num_slots} slots in this run, not {msg.slots}")
        if client.region_name == msg.name:
            return [self._attached(peer, client, msg)]
        if client.region_name or client.outcomes:
            raise Refusal("NO_ARENA", "this worker has begun without this region")
        plan = RegionPlan(self._layout.sizes["params"], msg.slots)
        self._attaching = (peer, msg)
        return [Share(msg.name, plan, create=False)]

    def _attached(self, peer: PeerId, client: Client, msg: Attach) -> Send:
        token = client.region.token if client.region is not None else b""
        return Send(peer, Attached(**self._ids(msg), seq=msg.seq, token=token))

    def _pull(self, now: float, peer: PeerId, client: Client, msg: Pull) -> list[Effect]:
        if not self.seeded_by:
            raise Refusal("UNSEEDED", "this shard holds no parameters yet", retry_after_ms=200)
        self._check_slot(client, msg.slot)
        self._check_shared(client, msg)
        into = client.array(msg.slot, self._values.slice, shared=msg.shared)
        snapshot = self._values.snapshot(into)
        client.keep(msg.slot, msg.seq, snapshot, now)
        client.record(msg.seq, Outcome(push=False, version=self.version, slot=msg.slot, shared=msg.shared))
        return [
            *self._record("pull", client.incarnation, msg.seq, self.version, msg.slot),
            *self._reply(Params, peer, msg, snapshot, shared=msg.shared),
        ]

    def _check_shared(self, client: Client, msg: Pull | Push) -> None:
        if msg.shared and client.region is None:
            raise Refusal("NO_ARENA", "this shard shares no memory with the worker")

    def _check_slot(self, client: Client, slot: int) -> None:
        if slot >= client.num_slots:
            raise Refusal("BAD_FIELD", f"slot {slot} of {client.num_slots}")

    def _probe(self, now: float, peer: PeerId, client: Client, msg: Message) -> list[Effect]:
        if client.waiting is not None and client.waiting.committed.push.seq == msg.seq:
            raise Refusal("WAITING", f"push {msg.seq} is here and waits for others", retry_after_ms=ASK_AGAIN_MS)
        raise Refusal("UNKNOWN_SEQ", f"push {msg.seq} is not here", retry_after_ms=0)

    def _init(self, now: float, peer: PeerId, client: Client, init: Init) -> list[Effect]:
        self._check_layout(init.layout_hash)
        if self.seeded_by:
            raise Refusal("ALREADY_SEEDED", f"incarnation {self.seeded_by} seeded this shard")
        values = self._values
        own = (values.stats.size, values.counters.size)
        if init.part == 0 and (init.stats.size, init.counters.size) != own:
            raise Refusal("BAD_SHAPE", f"a seeder brings {own[0]} stats and {own[1]} counters")
        staged = self._stage(client, init, init.params)
        if init.part == 0:
            values.stats[:], values.counters[:] = init.stats, init.counters
        pieces = staged.covering(values.slice.size)
        if pieces is None:
            return []
        values.seed(pieces)
        client.staged.clear()
        self.seeded_by = client.incarnation
        client.record(init.seq, Outcome(push=True, version=0))
        first = values.params.tobytes() if self._records_pushes else b""
        return [
            *self._record("seed", client.incarnation, first),
            Send(peer, Ack(**self._ids(init), seq=init.seq)),
            *self._renew(now),
            Note("seeded", {"shard": self.number}),
        ]

    def _push(self, now: float, peer: PeerId, client: Client, push: Push) -> list[Effect]:
        try:
            return self._staged_push(now, peer, client, push)
        except Refusal as refusal:
            if refusal.retry_after_ms is None:
                # The worker goes on without it: no late copy of this seq may be applied after all.
                client.record(push.seq, Outcome(push=True, version=self.version, refused=refusal.code))
                client.unstage(push.slot, push.seq)
                self._give_up_round(push)
            raise

    def _give_up_round(self, push: Push) -> None:
        """Mode sync: the other shards hear that shard 0 will never have this one."""
        if self.number == 0 and self._config.rule.mode == "sync":
            self._note_decision(Decision((), (PushId(push.incarnation, push.seq),)))

    def _staged_push(self, now: float, peer: PeerId, client: Client, push: Push) -> list[Effect]:
        if push.abort:  # on record, so that a late copy of a part is not staged again
            client.unstage(push.slot, push.seq)
            client.record(push.seq, Outcome(push=True, version=self.version, refused="ABORTED"))
            return []
        if client.waiting is not None:
            raise Refusal("WAITING", "a push of this worker is here and waits for others", retry_after_ms=ASK_AGAIN_MS)
        snapshot = self._checked(client, push)
        if push.shared:
            pieces = self._shared_gradient(client, push)
        else:
            staged = self._stage(client, push, push.grads)
            if not push.commit:
                return []
            pieces = self._complete(client, staged, push)
        client.pushed(now)
        compressible = not push.shared and not push.inline  # who wants stock arrays knows no codec
        committed = Committed(client.incarnation, push, pieces, snapshot, compressible)
        return _DISCIPLINES[self._config.rule.mode](self, now, client, Waiting(peer, committed))

    def _shared_gradient(self, client: Client, push: Push) -> list[Piece]:
        """The worker's own memory; it has looked for inf and NaN while it wrote there."""
        self._check_shared(client, push)
        if client.region is None or not push.commit:
            raise Refusal("BAD_FIELD", "a shared gradient comes with its commit")
        part = self._values.slice
        return [(0, client.region.grads[push.slot][part.start : part.stop])] if part.size else []

    def _complete(self, client: Client, staged: Staged, push: Push) -> list[Piece]:
        """All of a committed push."""
        pieces = staged.covering(self._values.slice.size)
        if pieces is None:
            raise Refusal("INCOMPLETE", f"parts of push {push.seq} are missing", retry_after_ms=0)
        client.unstage(push.slot, push.seq)
        if not staged.finite or (push.stats.size and not all_finite(push.stats)):
            raise Refusal("NONFINITE", "the gradient holds inf or NaN")
        return pieces

    def _unpacked(self, client: Client, push: Push) -> tuple[Array, ...]:
        """A compressed part, as float32."""
        if push.grads:
            raise Refusal("BAD_FIELD", "a part is compressed or it is not")
        values = client.decoded(push.slot, self._values.slice.size)[push.offset : push.offset + push.count]
        try:
            decode(push.codec, push.packed, values)
        except CodecError as e:
            raise Refusal("BAD_SHAPE", str(e)) from None
        return (values,)

    def _checked(self, client: Client, push: Push) -> Snapshot:
        """The snapshot that a well-formed push was computed on; raises Refusal otherwise."""
        self._check_layout(push.layout_hash)
        if push.hyper is not None:
            raise Refusal("HYPER", "this run computes hyper-parameters from its schedule; a push may not carry them")
        self._check_slot(client, push.slot)
        snapshot = client.snapshots.get(push.slot)
        if snapshot is None or snapshot.version != push.version:
            raise Refusal("NO_SNAPSHOT", f"nothing was sent to incarnation {client.incarnation} at {push.version}")
        self._check_buffers(push.stats, push.counters, wanted=push.commit)
        if push.presence and len(push.presence) != -(-self._values.num_tensors // 8):
            raise Refusal(
                "BAD_FIELD", f"presence has {len(push.presence)} bytes for {self._values.num_tensors} tensors"
            )
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
        values = self._values
        for name, got, own in (("stats", stats, values.stats), ("counters", counters, values.counters)):
            if got.size and (not wanted or got.size != own.size):
                raise Refusal("BAD_SHAPE", f"{name} has {got.size} elements, this shard {own.size}")

    def _stage(self, client: Client, msg: Push | Init, pieces: tuple[Array, ...]) -> Staged:
        num_elements = msg.count if isinstance(msg, Push) and msg.codec else sum(p.size for p in pieces)
        values = self._values
        if msg.offset + num_elements > values.slice.size:
            raise Refusal("BAD_SHAPE", f"elements {msg.offset} to {msg.offset + num_elements} of {values.slice.size}")
        slot = msg.slot if isinstance(msg, Push) else 0
        staged = client.stage(slot, msg.seq)
        if staged is None:
            raise Refusal("OLD_SEQ", f"seq {msg.seq} was given up for a later one")
        if staged.num_bytes + 4 * num_elements > max(self._config.window_bytes, values.params.nbytes):
            client.unstage(slot, msg.seq)
            raise Refusal("WINDOW", f"over {self._config.window_bytes} bytes are staged", retry_after_ms=100)
        if isinstance(msg, Push) and msg.codec:
            pieces = self._unpacked(client, msg)
        staged.add(msg.offset, pieces)
        if isinstance(msg, Push):  # now, while the part is in the cache
            staged.finite = staged.finite and all(all_finite(piece) for piece in pieces)
        return staged

    # ---- when a push is applied -------------------------------------------------------------------

    def _apply_or_hold(self, now: float, client: Client, waiting: Waiting) -> list[Effect]:
        """Mode async: at once, unless the gate says otherwise."""
        self._gate(waiting.committed)
        if self._outruns_somebody(now, client):
            client.waiting = waiting
            self._timers.set("held", now + LOOK_EVERY_S)
            return []
        return [*self._apply(now, client, waiting), *self._move_on(now)]

    def _apply(self, now: float, client: Client, waiting: Waiting) -> list[Effect]:
        """Mark, apply and count as one call; the worker gets, and computes on next, what is sent back."""
        base = waiting.committed.snapshot.version
        new = self._values.apply(waiting.committed)
        recorded = self._record_push("apply", waiting.committed, base)
        return [*recorded, *self._acknowledge(now, client, waiting, new, self._values.last.lag)]

    def _gate(self, push: Committed) -> None:
        rule, lag = self._config.rule, self._values.lag_of(push.snapshot)
        if rule.max_lag and rule.lag_policy == "drop" and lag >= rule.max_lag:
            raise Refusal("LAG", f"the gradient is {lag} updates old, this run takes less than {rule.max_lag}")

    def _outruns_somebody(self, now: float, client: Client) -> bool:
        """Whether one more update would make the push that another worker is computing too late."""
        rule = self._config.rule
        if not rule.max_lag or rule.lag_policy != "block":
            return False
        others = (c for c in self.clients.values() if c is not client and c.waiting is None)
        bases = sorted(c.newest for c in others if c.newest >= 0 and self._computes(now, c))
        # They need one version each: the i-th of them is applied i versions after the first at the earliest. So with
        # more workers than max_lag the bound is their number: nobody could keep a smaller one by waiting.
        bound = max(rule.max_lag, len(bases) + 1)
        return any(self.version + 1 + i - base >= bound for i, base in enumerate(bases))

    def _computes(self, now: float, client: Client) -> bool:
        usual_s = PATIENCE_STEPS * client.step_s if client.step_s else self.lease_s
        return now - client.sent_at <= max(MIN_PATIENCE_S, usual_s)

    def _gather(self, now: float, client: Client, waiting: Waiting) -> list[Effect]:
        """Mode buffer: compensated and acknowledged now, applied with others."""
        self._gate(waiting.committed)
        base = waiting.committed.snapshot.version
        self._values.gather(waiting.committed)
        effects = self._record_push("gather", waiting.committed, base)
        lag = self._values.last.lag
        if self._values.is_full:
            effects += self._update()
        new = self._values.snapshot(waiting.committed.snapshot.params)
        return [*effects, *self._acknowledge(now, client, waiting, new, lag)]

    def _update(self) -> list[Effect]:
        """Apply what has been gathered, if anything."""
        if not self._values.num_gathered:
            return []
        self._values.update()
        return self._record("update", self.version, self._values.last.lr, self._values.last.weight)

    def _await_round(self, now: float, client: Client, waiting: Waiting) -> list[Effect]:
        """Mode sync: shard 0 decides about it now or with a later push; the others wait to be told."""
        client.waiting = waiting
        self.rounds.arrived[waiting.id] = waiting
        effects: list[Effect] = []
        if self.number == 0 and waiting.committed.snapshot.version < self.version:
            effects += self._decide(Decision((), (waiting.id,)))
        return [*effects, *self._move_on(now)]

    def _close_round(self) -> list[Effect]:
        """Shard 0: a round is made when `quorum` pushes are there, or one of every worker that has work."""
        quorum = min(self._config.rule.quorum or self._values.num_workers, self._values.num_workers)
        here = tuple(self.rounds.arrived)
        return self._decide(Decision(here, ())) if here and len(here) >= quorum else []

    def _decide(self, decision: Decision) -> list[Effect]:
        self._note_decision(decision)
        return self._publish()

    def _note_decision(self, decision: Decision) -> None:
        """It goes to the broker with the next one or with a renewal at the latest."""
        number = self.rounds.decide(decision)
        if self._config.num_shards == 1:
            self.rounds.confirmed(number)  # there is nobody else to tell

    def _publish(self) -> list[Effect]:
        """What the broker has not confirmed of the decisions made here."""
        base, decisions = self.rounds.unconfirmed()
        if self.number or self._config.num_shards == 1 or not decisions:
            return []
        return [Send(BROKER, Round(**self._ids(), base=base, decisions=decisions))]

    def _carry_out(self, now: float) -> list[Effect]:
        """Everything that has been decided and can be done."""
        effects: list[Effect] = []
        while True:
            for late in self.rounds.pop_late(self.clients):
                effects += self._refuse_waiting(late, "the round was complete before this push came")
            members = self.rounds.pop_round(self._never_comes)
            if members is None:
                return effects
            effects += self._apply_round(now, members)

    def _never_comes(self, push: PushId) -> bool:
        """Its worker's life is over, or this shard has refused it for good."""
        client = self.clients.get(push.incarnation)
        return client is None or client.window.state(push.seq) != "new"

    def _refuse_waiting(self, waiting: Waiting, text: str) -> list[Effect]:
        """LATE: its batches are granted again, however often that happens."""
        client, push = self.clients[waiting.committed.incarnation], waiting.committed.push
        client.waiting = None
        client.record(push.seq, Outcome(push=True, version=self.version, refused="LATE"))
        self.refusals["LATE"] += 1
        return [Send(waiting.peer, Refusal("LATE", text).answer(push, run=self.run, shard=self.number))]

    def _apply_round(self, now: float, members: list[Waiting]) -> list[Effect]:
        if not members:
            return []  # all died before their pushes came here
        new = self._values.apply_round([m.committed for m in members])
        effects: list[Effect] = []
        for member in members:
            effects += self._record_push("member", member.committed, member.committed.snapshot.version)
        effects += self._record("round", self.version, self._values.last.lr, self._values.last.weight)
        for member, sent in zip(members, new, strict=True):
            effects += self._acknowledge(now, self.clients[member.committed.incarnation], member, sent, 0)
        return effects

    def _move_on(self, now: float) -> list[Effect]:
        """Something has changed that pushes may have waited for."""
        if self._config.rule.mode == "sync":
            return [*self._carry_out(now), *(self._close_and_carry_out(now) if self.number == 0 else [])]
        if self._config.rule.lag_policy != "block":
            return []
        return self._release(now)

    def _close_and_carry_out(self, now: float) -> list[Effect]:
        decided = self._close_round()
        return [*decided, *self._carry_out(now)]

    def _release(self, now: float) -> list[Effect]:
        """Apply held pushes, the oldest parameters first, as far as nobody falls too far behind."""
        effects: list[Effect] = []
        while True:
            held = sorted((c for c in self.clients.values() if c.waiting), key=lambda c: (c.newest, c.incarnation))
            client = next((c for c in held if not self._outruns_somebody(now, c)), None)
            if client is None or client.waiting is None:
                break
            effects += self._apply(now, client, client.waiting)
        if held:
            self._timers.set("held", now + LOOK_EVERY_S)
        return effects

    def _acknowledge(self, now: float, client: Client, waiting: Waiting, new: Snapshot, lag: int) -> list[Effect]:
        push = waiting.committed.push
        client.waiting = None
        client.lag = lag
        client.keep(push.slot, push.seq, replace(new, differences=()) if new.differences else new, now)
        outcome = Outcome(push=True, version=new.version, lag=lag, slot=push.slot, shared=push.shared)
        client.record(push.seq, outcome, Applied(push.seq, push.grants))
        return self._reply(Ack, waiting.peer, push, new, lag, shared=push.shared)

    # ---- answers ----------------------------------------------------------------------------------

    def _repeat(self, peer: PeerId, client: Client, msg: Message) -> list[Effect]:
        """Answer a known seq with the stored result; today's parameters would not be what was sent then."""
        outcome = client.outcomes.get(msg.seq)
        if outcome is None:
            raise Refusal("OLD_SEQ", f"the result of seq {msg.seq} is no longer kept")
        if outcome.refused:
            raise Refusal(outcome.refused, f"push {msg.seq} was refused")
        snapshot = client.snapshots.get(outcome.slot)
        cls = Ack if outcome.push else Params
        if snapshot is None or client.sent.get(outcome.slot) != msg.seq or isinstance(msg, Init):
            return [Send(peer, cls(**self._ids(msg), seq=msg.seq, version=outcome.version))]
        return self._reply(cls, peer, msg, snapshot, outcome.lag, shared=outcome.shared)

    def _reply(
        self,
        cls: type[Ack] | type[Params],
        peer: PeerId,
        msg: Message,
        snapshot: Snapshot,
        lag: int | None = None,
        *,
        shared: bool = False,
    ) -> list[Effect]:
        """The snapshot, in parts if it travels; buffers ride on the first."""
        client = self.clients.get(msg.incarnation)
        common: dict[str, Any] = {**self._ids(msg), "seq": msg.seq, "version": snapshot.version}
        common |= {"samples": snapshot.samples, "inline": msg.inline}
        if cls is Ack:
            common["lag"] = lag if lag is not None else client.lag if client else 0
        contents: list[dict[str, Any]] = [{"shared": True}] if shared else self._contents(snapshot, msg.inline)
        contents[0] = {**contents[0], "stats": snapshot.stats, "counters": snapshot.counters}
        return [Send(peer, cls(**common, part=i, parts=len(contents), **content)) for i, content in enumerate(contents)]

    def _contents(self, snapshot: Snapshot, inline: bool) -> list[dict[str, Any]]:
        """What each part of an answer holds: parameters, or differences cut at the same places."""
        codec = self._config.pull.codec
        if snapshot.differences:
            return [
                {"offset": d.start, "codec": codec, "packed": d.packed, "count": d.size} for d in snapshot.differences
            ]
        limit = wire.MAX_INLINE_PART_BYTES if inline else wire.MAX_PART_BYTES
        if codec != "none":
            limit = min(limit, 4 * MAX_ELEMENTS)
        return [{"offset": offset, "params": pieces} for offset, pieces in wire.split(snapshot.params, limit)]

    # ---- the record -------------------------------------------------------------------------------

    def _record(self, what: str, *facts: Any) -> list[Effect]:
        return [Record((what, *facts))] if self._records else []

    def _record_push(self, what: str, committed: Committed, base: int) -> list[Effect]:
        """One push as it was counted; see docs/replay.md for the columns."""
        if not self._records:
            return []
        push, values = committed.push, self._values
        worker = self.clients[committed.incarnation].worker
        grads = b"".join(piece.tobytes() for _, piece in committed.pieces) if self._records_pushes else b""
        row = (
            values.version, worker, committed.incarnation, push.seq, base, values.last.lag, values.num_workers,
            values.last.lr, values.last.weight, push.num_samples, push.grants, push.presence, push.loss, push.slot,
            grads,
        )  # fmt: skip
        return [Record((what, *row))]

    # ---- small things -----------------------------------------------------------------------------

    @property
    def _config(self) -> ShardConfig:
        require(self.config is not None, "not welcomed")
        return self.config  # type: ignore[return-value]

    @property
    def _layout(self) -> Layout:
        require(self.layout is not None, "no layout yet")
        return self.layout  # type: ignore[return-value]

    @property
    def _values(self) -> Parameters:
        require(self.values is not None, "no layout yet")
        return self.values  # type: ignore[return-value]

    def _ids(self, msg: Message | None = None) -> dict[str, Any]:
        """F0 fields of what this shard sends: about itself, or in answer to a worker's `msg`."""
        if msg is None:
            return {"run": self.run, "shard": self.number, "incarnation": self.incarnation}
        return {"run": self.run, "shard": self.number, "worker": msg.worker, "incarnation": msg.incarnation}

    def _stop(self, reason: str, code: int) -> list[Effect]:
        self.stopped = True
        values = self.values
        ended = self._record("end", values.version, values.digest()) if values and self._records else []
        return [*ended, Stop(reason, code)]


_SERVED: dict[type[Message], Callable[[Shard, float, PeerId, Client, Any], list[Effect]]] = {
    Attach: Shard._attach,
    Init: Shard._init,
    Pull: Shard._pull,
    Push: Shard._push,
    Probe: Shard._probe,
}
_DISCIPLINES: dict[str, Callable[[Shard, float, Client, Waiting], list[Effect]]] = {
    "async": Shard._apply_or_hold,
    "buffer": Shard._gather,
    "sync": Shard._await_round,
}
_TIMERS: dict[str, Callable[[Shard, float], list[Effect]]] = {
    "hello": Shard._say_hello,
    "renew": Shard._renew,
    "held": Shard._move_on,
}
