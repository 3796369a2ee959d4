"""The broker: membership, sample ledger, opening and end of a run.

Decides who is admitted, who is fenced, which batch goes to whom, when a batch is final, when the run is over. Never
sees a gradient: data goes past it through the relay, and what a shard applied it hears from that shard. Two rules
keep the books exact: a worker's word that ALL shards acknowledged a push makes its samples final, and after a
worker's end nothing of it is granted again before every shard has answered the FENCE.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zasgd.core.codec import MAX_FRAME_BYTES
from zasgd.core.exchange import Exchange, RoundTrip, over_shards
from zasgd.core.layout import SECTIONS, Layout
from zasgd.core.ledger import Ledger
from zasgd.core.membership import Event, Member, Membership, State
from zasgd.core.messages import (
    Ack,
    Admit,
    Admitted,
    Bye,
    Describe,
    Description,
    Done,
    Drain,
    Err,
    Evaluate,
    Expel,
    Fence,
    Fenced,
    GrantMsg,
    Hello,
    Lease,
    Message,
    Observe,
    Params,
    Rejoin,
    Renew,
    Result,
    Status,
    StopMsg,
    Welcome,
)  # fmt: skip
from zasgd.core.node import (
    Computed,
    Deadlines,
    Dial,
    Effect,
    Note,
    PeerId,
    Refusal,
    Save,
    Send,
    Stop,
    require,
    shard_peer,
)  # fmt: skip
from zasgd.core.tally import LossMeter, RateMeter, counts, lag_summary, numbers

REPEAT_EVERY_S = 1.0
PROGRESS_EVERY_S = 1.0
SERVER_START_S = 120.0
"""A server may take this long between WELCOME and its first renewal: it compiles its kernel."""
EVALUATOR_WAIT_S = 60.0
INTERRUPTED_WAIT_S = 2.0
GOODBYE_S = 2.0
MAX_GRANTS_OUT = 64
INTERRUPTED_CODE = 130


class RunPhase(enum.Enum):
    """Where a run is."""

    WAITING = "waiting for servers"
    SEEDING = "waiting for parameters"
    TRAINING = "training"
    FINISHING = "finishing"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """What the broker must know of a run.

    run: random 32-bit id. recipe: JSON text that workers get. shard_config: JSON text that shards get. num_groups:
    parameter groups for which it holds hyper-parameters. data_port: where the relay listens. evaluate_every: epochs
    between evaluations. wants_evaluator: wait for one at the end.
    """

    run: int
    recipe: str
    num_shards: int
    epochs: int
    batch_size: int
    shard_config: str
    num_groups: int = 1
    data_port: int = 0
    lease_s: float = 10.0
    window_bytes: int = 1 << 30
    evaluate_every: int = 1
    wants_evaluator: bool = False


class Broker:
    """The broker as a core (see node.Node)."""

    def __init__(self, now: float, config: BrokerConfig) -> None:
        self.config = config
        self.run = config.run
        self.phase = RunPhase.WAITING
        self.members = Membership(config.lease_s)
        self.layout: Layout | None = None
        self.num_samples = 0
        self.ledger: Ledger | None = None
        self.seeder = 0
        self.seeded: dict[int, int] = {}
        self.open = False
        self.ends: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.scores: dict[str, Any] = {}
        self.outcome = ""
        self.exit_code = 0
        self.began_at = now
        self._superseded: deque[int] = deque(maxlen=64)
        self._shard_facts: dict[int, dict[str, Any]] = {}
        self._rates: dict[int, RateMeter] = {}
        self._rate = RateMeter()
        self._loss = LossMeter(1.0)
        self._evaluation: Evaluate | None = None
        self._num_evaluations = 0
        self._finish_by = math.inf
        self._saving: Exchange | None = None
        self._events = 0
        self._noted_samples = 0
        self._timers = Deadlines()

    # ---- the node contract ------------------------------------------------------------------------

    def on_message(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        """Serve one message; whatever is wrong with it is answered with ERR and changes nothing."""
        self._events += 1
        serve = _SERVED.get(type(msg))
        try:
            if serve is None:
                raise Refusal("UNEXPECTED", f"a broker has no use for {msg.kind.name}")
            if msg.run != self.run and (msg.run or type(msg) not in _OPEN_TO_ALL):
                raise Refusal("WRONG_RUN", f"this broker serves run {self.run:08x}")
            return serve(self, now, peer, msg)
        except Refusal as refusal:
            self.refusals[refusal.code] += 1
            return [Send(peer, refusal.answer(msg, run=self.run))]

    def on_done(self, now: float, done: Computed) -> list[Effect]:
        """A broker asks for no slow work."""
        require(False, "a broker has nothing computed elsewhere")
        return []

    def on_timer(self, now: float) -> list[Effect]:
        """Leases, repeated orders, progress, and the bounds on an ending."""
        if self.phase is RunPhase.STOPPED:
            return []
        effects = self._forgive_own_stall(now)
        for member, event in self.members.due(now):
            effects += self._end(now, member, event, event.value)
        for name in self._timers.pop_due(now):
            effects += _TIMERS[name](self, now)  # type: ignore[index]
        if self._saving is not None:
            effects += self._saving.on_timer(now)
        return effects

    def leave(self, now: float, reason: str) -> list[Effect]:
        """Interrupt the run: write the model, tell everybody to stop. Called by the shell."""
        self.exit_code = self.exit_code or INTERRUPTED_CODE
        if self.phase in (RunPhase.STOPPING, RunPhase.STOPPED):
            return []
        return self._finish(now, "interrupted")

    def next_deadline(self) -> float:
        """The next lease, repetition or bound; never, once stopped."""
        if self.phase is RunPhase.STOPPED:
            return math.inf
        saving = self._saving.next_deadline() if self._saving else math.inf
        return min(self._timers.next(), self.members.next_due(), saving)

    def validate(self) -> None:
        """Raise InvariantError unless membership, ledger and phase agree; deeper every 1,000 events."""
        require(not self.open or self.ledger is not None, "open without a ledger")
        require(len(self.seeded) <= self.config.num_shards, "more shards seeded than there are")
        self.members.validate()
        if self.ledger is not None:
            ending = self.phase in (RunPhase.STOPPING, RunPhase.STOPPED)  # nobody settles what is left over
            for owner in () if ending else self.ledger.owners():
                require(self.members.get(owner) is not None, f"incarnation {owner} is gone and holds grants")
            if self._events % 1000 == 0 or self.phase is not RunPhase.TRAINING:
                self.ledger.validate()

    def _forgive_own_stall(self, now: float) -> list[Effect]:
        """A loop that itself stood still could not hear renewals: everybody gets the lost time back."""
        late_s = now - min(self._timers.next(), self.members.next_due())
        if late_s <= self.config.lease_s / 4:
            return []
        self.members.extend_all(now, late_s)
        return [Note("broker_stalled", {"seconds": round(late_s, 3)})]

    # ---- anybody ----------------------------------------------------------------------------------

    def _describe(self, now: float, peer: PeerId, msg: Describe) -> list[Effect]:
        description = Description(
            run=self.run, inline=msg.inline, recipe=self.config.recipe, num_shards=self.config.num_shards,
            phase=self.phase.value, lease_s=self.config.lease_s, layout_hash=self.layout.hash if self.layout else "",
        )  # fmt: skip
        return [Send(peer, description)]

    def _status(self, now: float, peer: PeerId, msg: Status) -> list[Effect]:
        return [Send(peer, Status(run=self.run, report=self.report(now)))]

    def _drain(self, now: float, peer: PeerId, msg: Drain) -> list[Effect]:
        member = self.members.find(msg.target)
        if member is None:
            names = ", ".join(m.name or str(m.number) for m in self.members.of("worker")[:20]) or "none"
            raise Refusal("NO_SUCH_WORKER", f"no live worker {msg.target[:40]!r}; there are: {names}")
        member.drain = True
        return [Send(peer, Done(run=self.run, text=f"worker {member.number} finishes its batch and leaves"))]

    def _stop_request(self, now: float, peer: PeerId, msg: StopMsg) -> list[Effect]:
        done: list[Effect] = [Send(peer, Done(run=self.run, text="the run is ending"))]
        if self.phase in (RunPhase.STOPPING, RunPhase.STOPPED, RunPhase.FINISHING) and not msg.interrupted:
            return done
        if self.phase in (RunPhase.STOPPING, RunPhase.STOPPED):
            return done
        return done + self._finish(now, "interrupted" if msg.interrupted else "stopped")

    def _expel(self, now: float, peer: PeerId, msg: Expel) -> list[Effect]:
        effects: list[Effect] = [Send(peer, Done(run=self.run))]
        for member in self.members.by_process(msg.host, msg.pid):
            effects += self._end(now, member, Event.EXPELLED, msg.reason[:200] or Event.EXPELLED.value)
        return effects

    # ---- joining ----------------------------------------------------------------------------------

    def _hello(self, now: float, peer: PeerId, msg: Hello) -> list[Effect]:
        if self.phase in (RunPhase.FINISHING, RunPhase.STOPPING, RunPhase.STOPPED):
            raise Refusal("RUN_OVER", "the run is over")
        known = self.members.by_token(msg.token)
        if known is not None and known.state is not State.FENCING:
            known.peer = peer
            return [] if self._awaits_admission(known) else [Send(peer, self._welcome(known))]
        join = {"server": self._join_server, "worker": self._join_worker, "eval": self._join_evaluator}.get(msg.role)
        if join is None:
            raise Refusal("BAD_ROLE", f"a member is a worker, a server or eval, not {msg.role[:20]!r}")
        return join(now, peer, msg)

    def _awaits_admission(self, member: Member) -> bool:
        return member.role == "worker" and member.state is State.ADMITTING

    def _join_server(self, now: float, peer: PeerId, msg: Hello) -> list[Effect]:
        taken = {m.number for m in self.members.of("server", State.ADMITTING, State.LIVE)}
        free = [k for k in range(self.config.num_shards) if k not in taken]
        if not free or self.open:
            raise Refusal("FULL", f"all {self.config.num_shards} servers of this run have joined")
        member = self.members.join(now, "server", free[0], msg.token, peer, msg.name, msg.host, msg.pid)
        member.lease_until = now + SERVER_START_S
        member.facts["endpoint"] = msg.endpoint
        return [Send(peer, self._welcome(member)), Dial(shard_peer(member.number), msg.endpoint)]

    def _join_evaluator(self, now: float, peer: PeerId, msg: Hello) -> list[Effect]:
        if self.layout is None:
            raise Refusal("NOT_READY", "no worker has shown its layout yet", retry_after_ms=500)
        if msg.layout is not None:
            self._same_layout(msg.layout)
        if self.members.of("eval"):
            # One that was killed is a member until its lease runs out: its successor waits.
            raise Refusal("FULL", "this run has an evaluator", retry_after_ms=500)
        member = self.members.join(now, "eval", 0, msg.token, peer, msg.name, msg.host, msg.pid)
        self.members.step(member, Event.ADMITTED)
        note = Note("evaluator_joined", {"host": msg.host, "pid": msg.pid})
        return [Send(peer, self._welcome(member)), note, *self._order_evaluation(now)]

    def _join_worker(self, now: float, peer: PeerId, msg: Hello) -> list[Effect]:
        if self.phase is RunPhase.WAITING:
            joined = len(self.members.of("server"))
            text = f"{joined} of {self.config.num_shards} servers have joined"
            raise Refusal("NOT_READY", text, retry_after_ms=500)
        self._take_layout(msg)
        effects: list[Effect] = []
        number = self.members.worker_id(msg.name)
        rejoined = False
        for other in self.members.of("worker", State.ADMITTING, State.LIVE):
            if msg.name and other.number == number:
                rejoined = True
                self._superseded.append(other.incarnation)
                effects += self._end(now, other, Event.SUPERSEDED, "another process joined under its name")
        member = self.members.join(now, "worker", number, msg.token, peer, msg.name[:80], msg.host[:80], msg.pid)
        member.facts["rejoined"] = rejoined
        member.waiting_for = set(range(self.config.num_shards))
        if not self.open and not self.seeder:
            self.seeder = member.incarnation
        self._timers.set("repeat", now + REPEAT_EVERY_S)
        return effects + self._admit(member)

    def _take_layout(self, msg: Hello) -> None:
        """The first worker's layout is the run's; everybody else shows the same or is refused."""
        if msg.layout is None:
            if self.layout is None:
                raise Refusal("NO_LAYOUT", "the first worker must bring the layout of the model")
            return
        if self.layout is not None:
            self._same_layout(msg.layout)
            if msg.num_samples and msg.num_samples != self.num_samples:
                text = f"this run trains on {self.num_samples} samples, the worker has {msg.num_samples}"
                raise Refusal("LAYOUT_MISMATCH", text)
            return
        self._check_first_layout(msg.layout, msg.num_samples)
        self.layout, self.num_samples = msg.layout, msg.num_samples
        self.ledger = Ledger(self.num_samples, self.config.batch_size, self.config.epochs)
        self._loss = LossMeter(self.num_samples / 2)

    def _check_first_layout(self, layout: Layout, num_samples: int) -> None:
        if not num_samples or not layout.num_parameters:
            raise Refusal("NO_LAYOUT", "a run needs at least one sample and one parameter")
        if max(t.group for t in layout.tensors) >= self.config.num_groups:
            raise Refusal("BAD_LAYOUT", f"this run has hyper-parameters for {self.config.num_groups} parameter groups")
        for section in ("stats", "counters"):
            num_bytes = max(s.size for s in layout.slices(section, self.config.num_shards)) * SECTIONS[section]
            if num_bytes > MAX_FRAME_BYTES:
                text = f"the buffers ({section}) take {num_bytes} bytes per shard, one frame holds {MAX_FRAME_BYTES}"
                raise Refusal("BAD_LAYOUT", f"{text}: use more servers")

    def _same_layout(self, layout: Layout) -> None:
        own = self.layout
        require(own is not None, "no layout to compare with")
        if layout.hash == own.hash:  # type: ignore[union-attr]
            return
        pairs = zip(own.tensors, layout.tensors, strict=False)  # type: ignore[union-attr]
        differing = next(((a, b) for a, b in pairs if a != b), None)
        if differing is None:
            text = f"this run's model has {len(own.tensors)} tensors, the newcomer's {len(layout.tensors)}"  # type: ignore[union-attr]
        else:
            a, b = differing
            text = f"this run's model has {_named(a)} where the newcomer's has {_named(b)}"
        raise Refusal("LAYOUT_MISMATCH", text)

    def _welcome(self, member: Member) -> Welcome:
        servers = {m.number: m for m in self.members.of("server", State.ADMITTING, State.LIVE)}
        shards = range(self.config.num_shards)
        endpoints = tuple(str(servers[k].facts.get("endpoint", "")) if k in servers else "" for k in shards)
        is_server = member.role == "server"
        return Welcome(
            run=self.run, shard=member.number if is_server else 0, worker=0 if is_server else member.number,
            incarnation=member.incarnation, token=member.token, num_shards=self.config.num_shards,
            lease_s=self.config.lease_s, window_bytes=self.config.window_bytes, data_port=self.config.data_port,
            endpoints=() if is_server else endpoints, config=self.config.shard_config if is_server else "",
            layout=None if is_server else self.layout,
        )  # fmt: skip

    def _admit(self, member: Member) -> list[Effect]:
        """ADMIT to the shards that have not answered; with the layout, which a shard takes once."""
        effects: list[Effect] = []
        for shard in self.members.of("server"):
            if shard.number in member.waiting_for:
                order = Admit(
                    run=self.run, shard=shard.number, worker=member.number, incarnation=member.incarnation,
                    layout=None if shard.facts.get("has_layout") else self.layout, num_samples=self.num_samples,
                )  # fmt: skip
                effects.append(Send(shard.peer, order))
        return effects

    def _admitted(self, now: float, peer: PeerId, msg: Admitted) -> list[Effect]:
        self._shard(msg).facts["has_layout"] = True
        member = self.members.get(msg.incarnation)
        if member is None or member.state is not State.ADMITTING:
            return []
        member.waiting_for.discard(msg.shard)
        if member.waiting_for:
            return []
        self.members.step(member, Event.ADMITTED)
        member.lease_until = now + self.config.lease_s
        member.progress_at = now
        note = Note("worker_joined", {**self._who(member), "rejoined": bool(member.facts.get("rejoined"))})
        return [Send(member.peer, self._welcome(member)), note]

    def _shard(self, msg: Message) -> Member:
        """The live server that speaks, or a Refusal."""
        for member in self.members.of("server", State.ADMITTING, State.LIVE):
            if member.number == msg.shard:
                return member
        raise Refusal("FENCED", f"no shard {msg.shard} belongs to this run")

    # ---- renewals ---------------------------------------------------------------------------------

    def _rejoin(self, now: float, peer: PeerId, msg: Rejoin) -> list[Effect]:
        member = self._alive(msg)
        member.peer = peer
        self.members.renew(now, member, member.steps, member.phase)
        return [Send(peer, self._welcome(member))]

    def _alive(self, msg: Message) -> Member:
        member = self.members.get(msg.incarnation)
        if member is None or member.state is not State.LIVE:
            if msg.incarnation in self._superseded:
                raise Refusal("SUPERSEDED", "another process joined under this worker's name")
            why = member.end.value if member is not None and member.end is not None else "its lease ran out"
            raise Refusal("FENCED", f"incarnation {msg.incarnation} is no member: {why}")
        return member

    def _renew(self, now: float, peer: PeerId, msg: Renew) -> list[Effect]:
        if msg.role == "server":
            return self._renew_server(now, peer, msg)
        member = self._alive(msg)
        if msg.seq <= member.renewals:
            return []
        member.renewals, member.peer = msg.seq, peer
        self.members.renew(now, member, msg.steps, msg.phase[:20])
        if member.role == "eval":
            return [Send(peer, Lease(run=self.run, incarnation=member.incarnation, seq=msg.seq))]
        member.facts.update(numbers(msg.facts, ("samples", "loss_sum", "step_s", "lag")))
        self._loss.report(member.incarnation, member.facts.get("loss_sum", 0.0), member.facts.get("samples", 0.0))
        rate = self._rates.setdefault(member.incarnation, RateMeter())
        rate.look(now, member.facts.get("samples", 0.0))
        effects = self._settle_reports(member, msg)
        answer = Send(peer, self._grant(member, msg))
        return [*effects, answer, *self._ledger_moved(now)]

    def _settle_reports(self, member: Member, msg: Renew | Bye) -> list[Effect]:
        ledger = self._ledger
        for push in msg.final:
            for grant in push.grants:
                ledger.confirm(member.incarnation, grant)
        for push in msg.torn:
            for grant in push.grants:
                ledger.tear(member.incarnation, grant)
        effects: list[Effect] = []
        for grant, reason in msg.refused:
            if ledger.refuse(member.incarnation, grant, reason[:40]):
                facts = {
                    "worker": member.number,
                    "epoch": grant.epoch,
                    "batch": grant.batch,
                    "reason": reason[:40],
                }
                effects.append(Note("batch_refused", facts))
        return effects

    def _grant(self, member: Member, msg: Renew) -> GrantMsg:
        """What was issued and has not arrived, and new batches up to the total that the worker asks for."""
        if not member.issued_base <= msg.got <= member.num_issued:
            raise Refusal("BAD_FIELD", f"{msg.got} grants arrived, {member.num_issued} were issued")
        del member.issued[: msg.got - member.issued_base]
        member.issued_base = msg.got
        if self.open and self.phase is RunPhase.TRAINING and not member.drain:
            room = MAX_GRANTS_OUT - len(self._ledger.held_by(member.incarnation))
            wanted = min(msg.upto - member.num_issued, room)
            member.issued += self._ledger.take(member.incarnation, max(0, wanted))
        return GrantMsg(
            run=self.run, worker=member.number, incarnation=member.incarnation, seq=msg.seq, inline=msg.inline,
            base=member.issued_base, grants=tuple(member.issued), open=self.open, drain=member.drain,
            seed=member.incarnation == self.seeder and not self.open, num_workers=len(self.members.of("worker")),
        )  # fmt: skip

    def _renew_server(self, now: float, peer: PeerId, msg: Renew) -> list[Effect]:
        member = self._shard(msg)
        if member.incarnation != msg.incarnation:
            raise Refusal("FENCED", f"shard {msg.shard} is another process")
        if msg.seq <= member.renewals:
            return []
        member.renewals, member.peer = msg.seq, peer
        self.members.renew(now, member, msg.steps, msg.phase[:20])
        member.facts.update(numbers(msg.facts, ("samples", "bytes", "resident_bytes")))
        member.facts.update({name: counts(msg.facts, name) for name in ("lags", "worker_lags")})
        member.facts["version"] = msg.version
        self._shard_facts[member.number] = member.facts
        settled = tuple(i for i in msg.fenced if self.members.get(i) is None)
        lease = Lease(run=self.run, shard=msg.shard, incarnation=member.incarnation, seq=msg.seq, settled=settled)
        effects: list[Effect] = [Send(peer, lease)]
        if member.state is State.ADMITTING:
            effects += self._server_ready(now, member)
        if msg.seeded:
            self.seeded[msg.shard] = msg.seeded
        return effects + self._open_if_seeded(now)

    def _server_ready(self, now: float, member: Member) -> list[Effect]:
        self.members.step(member, Event.ADMITTED)
        facts = {"shard": member.number, "host": member.host, "pid": member.pid}
        if len(self.members.of("server")) == self.config.num_shards and self.phase is RunPhase.WAITING:
            self.phase = RunPhase.SEEDING
        return [Note("server_joined", facts)]

    def _open_if_seeded(self, now: float) -> list[Effect]:
        """All shards hold what one and the same live seeder sent: the run is open."""
        by_seeder = [k for k, incarnation in self.seeded.items() if incarnation == self.seeder]
        seeder = self.members.get(self.seeder)
        # Of a seeder that is being fenced the shards may have forgotten everything already.
        if self.open or seeder is None or seeder.state is State.FENCING or len(by_seeder) < self.config.num_shards:
            return []
        self.open = True
        self.phase = RunPhase.TRAINING
        self._timers.set("progress", now + PROGRESS_EVERY_S)
        return [Note("run_opened", {"workers": len(self.members.of("worker")), "seeder": self.seeder})]

    # ---- leaving ----------------------------------------------------------------------------------

    def _bye(self, now: float, peer: PeerId, msg: Bye) -> list[Effect]:
        done: list[Effect] = [Send(peer, Done(run=self.run, incarnation=msg.incarnation))]
        member = self.members.get(msg.incarnation)
        if member is None or member.state is State.FENCING:
            return done
        if member.role == "worker":
            done = [*self._settle_reports(member, msg), *done]
        done += self._end(now, member, Event.LEFT, msg.reason[:200])
        return done + self._ledger_moved(now)

    def _end(self, now: float, member: Member, event: Event, reason: str) -> list[Effect]:
        """A member's life is over: fence a worker at every shard; without a server there is no run."""
        self.members.step(member, event)
        self.ends[event.name.lower()] += 1
        stopping = self.phase in (RunPhase.STOPPING, RunPhase.STOPPED)
        if member.role == "worker":
            self._loss.forget(member.incarnation)
            self._rates.pop(member.incarnation, None)
            name = "worker_left" if event is Event.LEFT else "worker_lost"
            effects: list[Effect] = [Note(name, {**self._who(member), "reason": reason})]
            if not stopping:
                member.waiting_for = set(range(self.config.num_shards))
                self._timers.set("repeat", now + REPEAT_EVERY_S)
                return effects + self._fence(member)
        elif member.role == "server" and not stopping:
            self.members.step(member, Event.FENCED)
            return self._fail(now, f"shard {member.number} was lost: {reason}")
        else:
            effects = [Note(f"{'evaluator' if member.role == 'eval' else member.role}_left", {"reason": reason})]
        member.waiting_for = set()
        self.members.step(member, Event.FENCED)
        return effects + (self._stopped_if_alone(now) if stopping else self._order_evaluation(now))

    def _fence(self, member: Member) -> list[Effect]:
        discard = member.incarnation == self.seeder and not self.open
        return [
            Send(
                shard.peer,
                Fence(
                    run=self.run, shard=shard.number, worker=member.number, incarnation=member.incarnation,
                    discard=discard,
                ),
            )
            for shard in self.members.of("server")
            if shard.number in member.waiting_for
        ]  # fmt: skip

    def _fenced(self, now: float, peer: PeerId, msg: Fenced) -> list[Effect]:
        self._shard(msg)
        member = self.members.get(msg.incarnation)
        if member is None or member.state is not State.FENCING or msg.shard not in member.waiting_for:
            return []
        member.applied[msg.shard] = msg.pushes
        member.waiting_for.discard(msg.shard)
        if member.waiting_for:
            return []
        self._settle_fenced(member)
        self.members.step(member, Event.FENCED)
        if member.incarnation == self.seeder and not self.open:
            self._elect()
        return self._ledger_moved(now)

    def _settle_fenced(self, member: Member) -> None:
        """Applied on no shard: granted again; on all: once; on some: torn."""
        times = Counter(grant for pushes in member.applied.values() for push in pushes for grant in set(push.grants))
        for grant in self._ledger.held_by(member.incarnation):
            if times[grant] == 0:
                self._ledger.give_back(member.incarnation, grant)
            elif times[grant] >= self.config.num_shards:
                self._ledger.confirm(member.incarnation, grant)
            else:
                self._ledger.tear(member.incarnation, grant)

    def _elect(self) -> None:
        """The oldest live worker seeds; it hears so with its next renewal."""
        self.seeded.clear()
        others = self.members.of("worker", State.LIVE, State.ADMITTING)
        self.seeder = others[0].incarnation if others else 0

    # ---- the course of the run --------------------------------------------------------------------

    def _ledger_moved(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self.phase is not RunPhase.TRAINING:
            return effects
        ledger = self._ledger
        for tally in ledger.pop_completed():
            facts = {"epoch": tally.epoch, "once": tally.once, "torn": tally.torn, "skipped": tally.skipped}
            effects.append(Note("epoch_completed", facts))
            if (tally.epoch + 1) % self.config.evaluate_every == 0 and not ledger.complete:
                effects += self._evaluate(now, tally.epoch, final=False)
        return effects + (self._finish(now, "completed") if ledger.complete else [])

    def _evaluate(self, now: float, epoch: int, *, final: bool, interrupted: bool = False) -> list[Effect]:
        self._num_evaluations += 1
        self._evaluation = Evaluate(
            run=self.run, seq=self._num_evaluations, epoch=epoch, final=final, interrupted=interrupted
        )
        return self._order_evaluation(now)

    def _order_evaluation(self, now: float) -> list[Effect]:
        evaluators = self.members.of("eval")
        if self._evaluation is None or not evaluators:
            return []
        self._timers.set("evaluate", now + 2 * REPEAT_EVERY_S)
        return [Send(evaluators[0].peer, self._evaluation)]

    def _result(self, now: float, peer: PeerId, msg: Result) -> list[Effect]:
        order = self._evaluation
        if order is None or msg.seq != order.seq:
            return []
        self._evaluation = None
        self._timers.clear("evaluate")
        scores = {str(k)[:40]: v for k, v in (msg.scores or {}).items() if type(v) in (int, float, str)}
        self.scores = scores or self.scores
        note = Note("evaluated", {"epoch": order.epoch, "samples": self._settled(), "final": order.final, **scores})
        if not order.final:
            return [note]
        return [note, *(self._save(now) if "error" in scores else self._stop_all(now))]

    def _finish(self, now: float, outcome: str) -> list[Effect]:
        """No more grants; the last evaluation, or without an evaluator the parameters as they are; then STOP."""
        was_open = self.open
        self.outcome = outcome
        self.phase = RunPhase.FINISHING
        interrupted = outcome == "interrupted"
        self._finish_by = now + (INTERRUPTED_WAIT_S if interrupted else EVALUATOR_WAIT_S)
        self._timers.set("finish", now + REPEAT_EVERY_S / 4)
        if not was_open:
            return self._stop_all(now)
        epoch = max(0, self._ledger.epoch - (1 if self._ledger.complete else 0))
        return self._evaluate(now, epoch, final=True, interrupted=interrupted)

    def _on_finish_timer(self, now: float) -> list[Effect]:
        if self.phase is not RunPhase.FINISHING or self._saving is not None or self._evaluation is None:
            return []
        self._timers.set("finish", now + REPEAT_EVERY_S / 4)
        has_evaluator = bool(self.members.of("eval"))
        interrupted = self.outcome == "interrupted"
        patient = has_evaluator and not interrupted
        if patient or (now < self._finish_by and (has_evaluator or (self.config.wants_evaluator and not interrupted))):
            return []
        return self._save(now)

    def _save(self, now: float) -> list[Effect]:
        """Without an evaluator the broker's side writes the parameters."""
        self._evaluation = None
        peers = {m.number: m.peer for m in self.members.of("server")}
        if len(peers) < self.config.num_shards:
            return self._stop_all(now)
        self._num_evaluations += 1
        seq = self._num_evaluations
        requests = over_shards(
            self.config.num_shards, peers.__getitem__, lambda k: [Observe(run=self.run, shard=k, seq=seq)]
        )
        self._saving = Exchange(now, seq, requests, RoundTrip())
        self._timers.set("save_over", now + (INTERRUPTED_WAIT_S if self.outcome == "interrupted" else 60.0))
        return self._saving.start()

    def _observed(self, now: float, peer: PeerId, msg: Params | Ack) -> list[Effect]:
        saving = self._saving
        if saving is None:
            return []
        saving.on_reply(now, msg)
        if not saving.settled:
            return []
        self._saving = None
        content = {"layout": self.layout, "pieces": saving.pieces(self._layout)}
        return [Save("params", content), *self._stop_all(now)]

    def _on_save_over_timer(self, now: float) -> list[Effect]:
        if self._saving is None:
            return []
        self._saving = None
        return [Note("save_failed", {"reason": "the shards did not answer"}), *self._stop_all(now)]

    def _fail(self, now: float, reason: str) -> list[Effect]:
        self.outcome, self.exit_code = "failed", 3
        return [Note("run_failed", {"reason": reason}), *self._stop_all(now, reason)]

    def _stop_all(self, now: float, reason: str = "") -> list[Effect]:
        reason = reason or f"the run is {self.outcome}"
        self.phase = RunPhase.STOPPING
        self._saving = self._evaluation = None
        self._timers = Deadlines()
        self._timers.set("goodbye", now + GOODBYE_S)
        self._timers.set("repeat", now + REPEAT_EVERY_S / 2)
        return self._order_stop(reason) + self._stopped_if_alone(now)

    def _order_stop(self, reason: str) -> list[Effect]:
        code = 0 if self.outcome == "interrupted" else self.exit_code
        order = StopMsg(run=self.run, reason=reason, code=code, interrupted=self.outcome == "interrupted")
        members = self.members.of("worker") + self.members.of("eval") + self.members.of("server")
        return [Send(m.peer, order) for m in members]

    def _stopped_if_alone(self, now: float) -> list[Effect]:
        states = (State.ADMITTING, State.LIVE)
        if any(self.members.of(role, *states) for role in ("worker", "eval", "server")):
            return []
        return self._stopped(now)

    def _stopped(self, now: float) -> list[Effect]:
        """Everybody has said BYE, with last figures, or has had the time to."""
        if self.phase is RunPhase.STOPPED:
            return []
        self.phase = RunPhase.STOPPED
        note: list[Effect] = [Note(f"run_{self.outcome}", self.summary(now))] if self.outcome != "failed" else []
        return [*note, Stop(f"the run is {self.outcome}", self.exit_code)]

    # ---- timers -----------------------------------------------------------------------------------

    def _on_repeat_timer(self, now: float) -> list[Effect]:
        """ADMIT, FENCE and STOP again to whom has not answered."""
        if self.phase is RunPhase.STOPPING:
            self._timers.set("repeat", now + REPEAT_EVERY_S / 2)
            return self._order_stop(f"the run is {self.outcome}")
        effects: list[Effect] = []
        for member in self.members.of("worker", State.ADMITTING, State.FENCING):
            effects += self._admit(member) if member.state is State.ADMITTING else self._fence(member)
        if effects:
            self._timers.set("repeat", now + REPEAT_EVERY_S)
        return effects

    def _on_progress_timer(self, now: float) -> list[Effect]:
        if self.phase is not RunPhase.TRAINING:
            return []
        self._timers.set("progress", now + PROGRESS_EVERY_S)
        if self._settled() == self._noted_samples:
            return []  # a run that waits for workers, perhaps for days, fills no log
        self._noted_samples = self._settled()
        lags = lag_summary(self._lags())
        facts = {
            "epoch": self._ledger.epoch,
            "samples": self._settled(),
            "samples_total": self._ledger.epochs * self.num_samples,
            "loss": _plain(self._loss.value),
            "samples_per_s": round(self._rate.look(now, self._settled()), 2),
            "workers": len(self.members.of("worker")),
            **{f"lag_{name}": value for name, value in lags.items() if name != "p50"},
        }
        return [Note("progress", facts)]

    def _on_evaluate_timer(self, now: float) -> list[Effect]:
        return self._order_evaluation(now)

    def _on_goodbye_timer(self, now: float) -> list[Effect]:
        return self._stopped(now)

    # ---- what people ask --------------------------------------------------------------------------

    def report(self, now: float) -> dict[str, Any]:
        """The answer to STATUS: plain values only."""
        return {
            "run": f"{self.run:08x}",
            "phase": self.phase.value,
            "outcome": self.outcome,
            "seconds": round(now - self.began_at, 3),
            "num_shards": self.config.num_shards,
            "loss": _plain(self._loss.value),
            "samples_per_s": round(self._rate.value, 2),
            "workers": [self._worker_report(m, now) for m in self.members.of("worker", *State)],
            "shards": [self._shard_report(m) for m in self.members.of("server", State.ADMITTING, State.LIVE)],
            "evaluator": next(
                ({"host": m.host, "pid": m.pid, "phase": m.phase} for m in self.members.of("eval")), None
            ),
            "ledger": self.ledger.progress() if self.ledger else None,
            "lag": lag_summary(self._lags()),
            "scores": self.scores,
            "ends": dict(self.ends),
            "refusals": dict(self.refusals),
        }

    def _worker_report(self, member: Member, now: float) -> dict[str, Any]:
        rate = self._rates.get(member.incarnation)
        state = member.phase if member.state is State.LIVE and member.phase else member.state.value
        return {
            **self._who(member),
            "id": member.number,
            "state": "draining" if member.drain and member.state is State.LIVE else state,
            "steps": member.steps,
            "lag": int(member.facts.get("lag", 0)),
            "samples_per_s": round(rate.value, 2) if rate else 0.0,
            "lease_s": round(member.lease_until - now, 2),
        }

    def _shard_report(self, member: Member) -> dict[str, Any]:
        facts = member.facts
        return {
            "id": member.number,
            "pid": member.pid,
            "host": member.host,
            "state": member.phase or member.state.value,
            "version": int(facts.get("version", 0)),
            "samples": int(facts.get("samples", 0)),
            "bytes": int(facts.get("bytes", 0)),
            "resident_bytes": int(facts.get("resident_bytes", 0)),
            "lag": lag_summary(facts.get("lags", Counter())),
        }

    def summary(self, now: float) -> dict[str, Any]:
        """What the end of a run is told with: samples by state, updates per shard, lag, loss, scores."""
        lags = self._lags()
        ledger = self.ledger.progress() if self.ledger else {}
        return {
            "samples": ledger.get("once", 0) + ledger.get("torn", 0),
            "torn": ledger.get("torn", 0),
            "skipped": ledger.get("skipped", 0),
            "reissued": ledger.get("reissued", 0),
            "epochs": ledger.get("epoch", 0),
            "updates": [int(self._shard_facts[k].get("version", 0)) for k in sorted(self._shard_facts)],
            "lag": {**lag_summary(lags), "histogram": {str(k): lags[k] for k in sorted(lags)}},
            "train_loss": _plain(self._loss.value),
            "seconds": round(now - self.began_at, 3),
            "ends": dict(self.ends),
            "scores": self.scores,
        }

    # ---- small things -----------------------------------------------------------------------------

    @property
    def _ledger(self) -> Ledger:
        require(self.ledger is not None, "no ledger yet")
        return self.ledger  # type: ignore[return-value]

    @property
    def _layout(self) -> Layout:
        require(self.layout is not None, "no layout yet")
        return self.layout  # type: ignore[return-value]

    def _settled(self) -> int:
        return self.ledger.settled if self.ledger else 0

    def _lags(self) -> Counter[int]:
        total: Counter[int] = Counter()
        for facts in self._shard_facts.values():
            total.update(facts.get("lags", Counter()))
        return total

    def _who(self, member: Member) -> dict[str, Any]:
        return {
            "worker": member.number, "name": member.name, "incarnation": member.incarnation, "host": member.host,
            "pid": member.pid,
        }  # fmt: skip


def _named(tensor: Any) -> str:
    return f"{tensor.name[:60]} {list(tensor.shape)} {tensor.dtype}"


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)


_OPEN_TO_ALL = (Describe, Hello, Status, Drain, StopMsg, Expel)
_SERVED: dict[type[Message], Callable[[Broker, float, PeerId, Any], list[Effect]]] = {
    Describe: Broker._describe,
    Status: Broker._status,
    Drain: Broker._drain,
    StopMsg: Broker._stop_request,
    Expel: Broker._expel,
    Hello: Broker._hello,
    Admitted: Broker._admitted,
    Rejoin: Broker._rejoin,
    Renew: Broker._renew,
    Bye: Broker._bye,
    Fenced: Broker._fenced,
    Result: Broker._result,
    Params: Broker._observed,
    Err: lambda broker, now, peer, msg: [],
}
_TIMERS: dict[str, Callable[[Broker, float], list[Effect]]] = {
    "repeat": Broker._on_repeat_timer,
    "progress": Broker._on_progress_timer,
    "evaluate": Broker._on_evaluate_timer,
    "finish": Broker._on_finish_timer,
    "save_over": Broker._on_save_over_timer,
    "goodbye": Broker._on_goodbye_timer,
}
