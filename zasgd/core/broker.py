"""The broker: membership, sample ledger, and the course of a run.

Decides who is fenced, which batch goes to whom, when a batch is final. Who may join is `admission.py`, how a run ends
is `ending.py`, what people are told is `report.py`. Never sees a gradient: data goes past it through the relay, and
what a shard applied it hears from that shard. Two rules keep the books exact: a worker's word that ALL shards
acknowledged a push makes its samples final, and after a worker's end nothing of it is granted again before every
shard has answered the FENCE.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from zasgd.core import report
from zasgd.core.admission import Admission
from zasgd.core.ending import Ending
from zasgd.core.membership import Event, Member, State
from zasgd.core.messages import (
    Admitted,
    Bye,
    Describe,
    Description,
    Done,
    Drain,
    Err,
    Expel,
    Fence,
    Fenced,
    GrantMsg,
    Hello,
    Lease,
    Live,
    Message,
    Params,
    Rejoin,
    Renew,
    Result,
    Round,
    Status,
    StopMsg,
)  # fmt: skip
from zasgd.core.node import Computed, Effect, Note, PeerId, Refusal, Send, require
from zasgd.core.run import BrokerConfig, Run, RunPhase, who
from zasgd.core.tally import RateMeter, counts, numbers
from zasgd.core.worker import most_grants_out

REPEAT_EVERY_S = 1.0
PROGRESS_EVERY_S = 1.0
MAX_DECISIONS_AT_ONCE = 64
INTERRUPTED_CODE = 130


class Broker:
    """The broker as a core (see node.Node)."""

    def __init__(self, now: float, config: BrokerConfig) -> None:
        self.run = Run(now, config)
        self.admission = Admission(self.run)
        self.ending = Ending(self.run)
        self._superseded: deque[int] = deque(maxlen=64)
        self._events = 0
        self._noted_samples = 0

    # ---- the node contract ------------------------------------------------------------------------

    def on_message(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        """Serve one message; whatever is wrong with it is answered with ERR and changes nothing."""
        self._events += 1
        if isinstance(msg, Err):
            return []  # an ERR is never answered, or two peers could refuse each other for ever
        serve = _SERVED.get(type(msg))
        try:
            if serve is None:
                raise Refusal("UNEXPECTED", f"a broker has no use for {msg.kind.name}")
            if msg.run != self.run.id and (msg.run or type(msg) not in _OPEN_TO_ALL):
                raise Refusal("WRONG_RUN", f"this broker serves run {self.run.id:08x}")
            return serve(self, now, peer, msg)
        except Refusal as refusal:
            self.run.refusals[refusal.code] += 1
            return [Send(peer, refusal.answer(msg, run=self.run.id))]

    def on_done(self, now: float, done: Computed) -> list[Effect]:
        """A broker asks for no slow work."""
        require(False, "a broker has nothing computed elsewhere")
        return []

    def on_timer(self, now: float) -> list[Effect]:
        """Leases, repeated orders, progress, and the bounds on an ending."""
        if self.run.phase is RunPhase.STOPPED:
            return []
        effects = self._forgive_own_stall(now)
        for member, event in self.run.members.due(now):
            effects += self._end(now, member, event, event.value)
        for name in self.run.timers.pop_due(now):
            effects += _TIMERS[name](self, now)  # type: ignore[index]
        return effects + self.ending.on_timer(now)

    def leave(self, now: float, reason: str) -> list[Effect]:
        """Interrupt the run: write the model, tell everybody to stop. Called by the shell."""
        self.run.exit_code = self.run.exit_code or INTERRUPTED_CODE
        return [] if self.run.over else self.ending.finish(now, "interrupted")

    def next_deadline(self) -> float:
        """The next lease, repetition or bound; never, once stopped."""
        if self.run.phase is RunPhase.STOPPED:
            return math.inf
        return min(self.run.timers.next(), self.run.members.next_due(), self.ending.next_deadline())

    def validate(self) -> None:
        """Raise InvariantError unless membership, ledger and phase agree; deeper every 1,000 events."""
        run = self.run
        self.admission.validate()
        run.members.validate()
        if run.books is None:
            return
        for owner in () if run.over else run.books.owners():  # at the end nobody settles what is left over
            require(run.members.get(owner) is not None, f"incarnation {owner} is gone and holds grants")
        if self._events % 1000 == 0 or run.phase is not RunPhase.TRAINING:
            run.books.validate()

    def _forgive_own_stall(self, now: float) -> list[Effect]:
        """A loop that itself stood still could not hear renewals: everybody gets the lost time back."""
        late_s = now - min(self.run.timers.next(), self.run.members.next_due())
        if late_s <= self.run.config.lease_s / 4:
            return []
        self.run.members.extend_all(now, late_s)
        return [Note("broker_stalled", {"seconds": round(late_s, 3)})]

    # ---- anybody ----------------------------------------------------------------------------------

    def _describe(self, now: float, peer: PeerId, msg: Describe) -> list[Effect]:
        run, config = self.run, self.run.config
        description = Description(
            run=run.id, inline=msg.inline, recipe=config.recipe, num_shards=config.num_shards, phase=run.phase.value,
            lease_s=config.lease_s, layout_hash=run.layout.hash if run.layout else "",
        )  # fmt: skip
        return [Send(peer, description)]

    def _status(self, now: float, peer: PeerId, msg: Status) -> list[Effect]:
        return [Send(peer, Status(run=self.run.id, report=report.status(self.run, now)))]

    def _drain(self, now: float, peer: PeerId, msg: Drain) -> list[Effect]:
        member = self.run.members.find(msg.target)
        if member is None:
            names = ", ".join(m.name or str(m.number) for m in self.run.members.of("worker")[:20]) or "none"
            raise Refusal("NO_SUCH_WORKER", f"no live worker {msg.target[:40]!r}; there are: {names}")
        member.drain = True
        return [Send(peer, Done(run=self.run.id, text=f"worker {member.number} finishes its batch and leaves"))]

    def _stop_request(self, now: float, peer: PeerId, msg: StopMsg) -> list[Effect]:
        done: list[Effect] = [Send(peer, Done(run=self.run.id, text="the run is ending"))]
        if self.run.over or (self.run.phase is RunPhase.FINISHING and not msg.interrupted):
            return done
        return done + self.ending.finish(now, "interrupted" if msg.interrupted else "stopped")

    def _expel(self, now: float, peer: PeerId, msg: Expel) -> list[Effect]:
        effects: list[Effect] = [Send(peer, Done(run=self.run.id))]
        for member in self.run.members.by_process(msg.host, msg.pid):
            effects += self._end(now, member, Event.EXPELLED, msg.reason[:200] or Event.EXPELLED.value)
        return effects

    # ---- joining ----------------------------------------------------------------------------------

    def _hello(self, now: float, peer: PeerId, msg: Hello) -> list[Effect]:
        awaited = (
            self.run.phase is RunPhase.FINISHING and msg.role == "eval"
        )  # a short run may end while it loads torch
        if (self.run.over or self.run.phase is RunPhase.FINISHING) and not awaited:
            raise Refusal("RUN_OVER", "the run is over")
        again = self.admission.known(peer, msg)
        if again is not None:
            return again
        match msg.role:
            case "server":
                return self.admission.server(now, peer, msg)
            case "eval":
                return self.admission.evaluator(now, peer, msg) + self.ending.ask_evaluator(now)
            case "worker":
                self.admission.check_worker(msg)
                superseded = self._supersede(now, msg.name)
                self.run.timers.set("repeat", now + REPEAT_EVERY_S)
                return superseded + self.admission.worker(now, peer, msg, rejoined=bool(superseded))
        raise Refusal("BAD_ROLE", f"a member is a worker, a server or eval, not {msg.role[:20]!r}")

    def _supersede(self, now: float, name: str) -> list[Effect]:
        """A newcomer takes over its name: whoever bears it now is fenced."""
        effects: list[Effect] = []
        for other in self.run.members.of("worker", State.ADMITTING, State.LIVE):
            if name and other.name == name[:80]:
                self._superseded.append(other.incarnation)
                effects += self._end(now, other, Event.SUPERSEDED, "another process joined under its name")
        return effects

    def _admitted(self, now: float, peer: PeerId, msg: Admitted) -> list[Effect]:
        return self.admission.admitted(now, msg)

    # ---- renewals ---------------------------------------------------------------------------------

    def _rejoin(self, now: float, peer: PeerId, msg: Rejoin) -> list[Effect]:
        member = self._alive(msg)
        member.peer = peer
        self.run.members.renew(now, member, member.steps, member.phase)
        return [Send(peer, self.admission.welcome(member))]

    def _alive(self, msg: Message) -> Member:
        member = self.run.members.get(msg.incarnation)
        if member is None or member.state is not State.LIVE:
            if msg.incarnation in self._superseded:
                raise Refusal("SUPERSEDED", "another process joined under this worker's name")
            why = member.end.value if member is not None and member.end is not None else "its lease ran out"
            raise Refusal("FENCED", f"incarnation {msg.incarnation} is no member: {why}")
        return member

    def _renew(self, now: float, peer: PeerId, msg: Renew) -> list[Effect]:
        member = self.run.speaker(msg) if msg.role == "server" else self._alive(msg)
        if member.incarnation != msg.incarnation:
            raise Refusal("FENCED", f"shard {msg.shard} is another process")
        if msg.seq <= member.renewals:
            return []
        member.renewals, member.peer = msg.seq, peer
        self.run.members.renew(now, member, msg.steps, msg.phase[:20])
        if member.role == "server":
            return self._renew_server(now, member, msg)
        if member.role == "eval":
            return [Send(peer, Lease(run=self.run.id, incarnation=member.incarnation, seq=msg.seq))]
        self._take_facts(now, member, msg)
        effects = self._settle_reports(member, msg)
        answer = Send(peer, self._grant(member, msg))
        return [*effects, answer, *self._tell_live(), *self._ledger_moved(now)]

    def _take_facts(self, now: float, member: Member, msg: Renew) -> None:
        member.facts.update(numbers(msg.facts, ("samples", "loss_sum", "step_s", "lag")))
        member.facts["data_path"] = str(msg.facts.get("data_path", ""))[:40]
        samples = member.facts.get("samples", 0.0)
        self.run.loss.report(member.incarnation, member.facts.get("loss_sum", 0.0), samples)
        self.run.rates.setdefault(member.incarnation, RateMeter()).look(now, samples)

    def _settle_reports(self, member: Member, msg: Renew | Bye) -> list[Effect]:
        ledger = self.run.ledger
        for push in msg.final:
            for grant in push.grants:
                ledger.confirm(member.incarnation, grant)
        for push in msg.torn:
            for grant in push.grants:
                ledger.tear(member.incarnation, grant)
        effects: list[Effect] = []
        for grant, text, number in msg.refused:
            if number <= member.num_refused:
                continue  # told again, since our answer was lost; the batch may be with somebody else by now
            member.num_refused, reason = number, text[:40]
            if reason in _GOOD_BUT_LATE:
                ledger.give_back(member.incarnation, grant)  # however often that happens: nothing is wrong with it
            elif ledger.refuse(member.incarnation, grant, reason):
                where = {"worker": member.number, "epoch": grant.epoch, "batch": grant.batch}
                effects.append(Note("batch_refused", {**where, "reason": reason}))
        return effects

    def _grant(self, member: Member, msg: Renew) -> GrantMsg:
        """What was issued and has not arrived, and new batches up to the total that the worker asks for."""
        run = self.run
        if not member.issued_base <= msg.got <= member.num_issued:
            raise Refusal("BAD_FIELD", f"{msg.got} grants arrived, {member.num_issued} were issued")
        del member.issued[: msg.got - member.issued_base]
        member.issued_base = msg.got
        if run.phase is RunPhase.TRAINING and not member.drain:
            # Settled without having been received they would pile up in `issued`, beyond what an answer can hold.
            room = most_grants_out(run.config.push_every) - max(
                len(run.ledger.held_by(member.incarnation)), len(member.issued)
            )
            wanted = min(msg.upto - member.num_issued, room)
            member.issued += run.ledger.take(member.incarnation, max(0, wanted))
        return GrantMsg(
            run=run.id, worker=member.number, incarnation=member.incarnation, seq=msg.seq, inline=msg.inline,
            base=member.issued_base, grants=tuple(member.issued), open=run.open, drain=member.drain,
            seed=member.incarnation == run.seeder and not run.open, num_workers=len(run.members.of("worker")),
        )  # fmt: skip

    def _renew_server(self, now: float, member: Member, msg: Renew) -> list[Effect]:
        run = self.run
        member.facts.update(numbers(msg.facts, _SHARD_NUMBERS))
        member.facts["alarm"] = str(msg.facts.get("alarm", ""))[:200]
        member.facts.update({name: counts(msg.facts, name) for name in ("lags", "worker_lags")})
        member.facts["version"] = msg.version
        run.shard_facts[member.number] = member.facts
        settled = tuple(i for i in msg.fenced if run.members.get(i) is None)
        lease = Lease(
            run=run.id, shard=msg.shard, incarnation=member.incarnation, seq=msg.seq, settled=settled,
            live=run.live, num_workers=run.num_busy,
        )  # fmt: skip
        effects: list[Effect] = [Send(member.peer, lease), *self._repeat_decisions(member, msg.decisions)]
        if member.state is State.ADMITTING:
            effects += self.admission.server_ready(member)
        opened = self.admission.seeding_reported(msg)
        if opened:
            run.timers.set("progress", now + PROGRESS_EVERY_S)
        return effects + opened

    # ---- what shards must know of the whole run ---------------------------------------------------

    def _tell_live(self) -> list[Effect]:
        """N, the workers that have work, to every shard whenever it changes."""
        run = self.run
        ending = sum(1 for m in run.members.of("worker", State.FENCING) if run.ledger.held_by(m.incarnation))
        busy = run.ledger.num_owners - ending
        if busy == run.num_busy:
            return []
        run.live, run.num_busy = run.live + 1, busy
        servers = run.members.of("server")
        return [Send(s.peer, Live(run=run.id, shard=s.number, live=run.live, num_workers=busy)) for s in servers]

    def _round(self, now: float, peer: PeerId, msg: Round) -> list[Effect]:
        """What shard 0 decided goes to the other shards, in order."""
        run = self.run
        if run.speaker(msg).number != 0:
            raise Refusal("UNEXPECTED", "only shard 0 decides about rounds")
        fresh = run.decisions.take(msg.base, msg.decisions)
        effects: list[Effect] = [Send(peer, Done(run=run.id, shard=0, seq=run.decisions.count))]
        if not fresh:
            return effects
        base = run.decisions.count - len(fresh) + 1
        others = (m for m in run.members.of("server") if m.number)
        return effects + [Send(m.peer, Round(run=run.id, shard=m.number, base=base, decisions=fresh)) for m in others]

    def _repeat_decisions(self, member: Member, known: int) -> list[Effect]:
        """A shard that missed some gets them again; what all have is forgotten."""
        run = self.run
        if not member.number or not run.decisions.count:
            return []
        member.facts["decisions"] = known
        missing = run.decisions.after(known, MAX_DECISIONS_AT_ONCE)
        run.decisions.forget(min(int(m.facts.get("decisions", 0)) for m in run.members.of("server") if m.number))
        if not missing:
            return []
        return [Send(member.peer, Round(run=run.id, shard=member.number, base=known + 1, decisions=missing))]

    # ---- leaving ----------------------------------------------------------------------------------

    def _bye(self, now: float, peer: PeerId, msg: Bye) -> list[Effect]:
        done: list[Effect] = [Send(peer, Done(run=self.run.id, incarnation=msg.incarnation))]
        member = self.run.members.get(msg.incarnation)
        if member is None or member.state is State.FENCING:
            return done
        if member.role == "worker":
            done = [*self._settle_reports(member, msg), *done]
        done += self._end(now, member, Event.LEFT, msg.reason[:200])
        return done + self._ledger_moved(now)

    def _end(self, now: float, member: Member, event: Event, reason: str) -> list[Effect]:
        """A member's life is over: fence a worker at every shard; without a server there is no run."""
        run = self.run
        run.members.step(member, event)
        run.ends[event.name.lower()] += 1
        effects = [_epitaph(member, event, reason)]
        if member.role == "worker":
            run.loss.forget(member.incarnation)
            run.rates.pop(member.incarnation, None)
            if not run.over:
                member.waiting_for = set(range(run.config.num_shards))
                run.timers.set("repeat", now + REPEAT_EVERY_S)
                return effects + self._fence(member) + (self._tell_live() if run.books else [])
        member.waiting_for = set()
        run.members.step(member, Event.FENCED)
        if run.over:
            return effects + self.ending.stop_if_alone(now)
        if member.role == "server":
            return effects + self.ending.fail(now, f"shard {member.number} was lost: {reason}")
        return effects + self.ending.ask_evaluator(now)

    def _fence(self, member: Member) -> list[Effect]:
        run = self.run
        ids: dict[str, Any] = {"run": run.id, "worker": member.number, "incarnation": member.incarnation}
        discard = member.incarnation == run.seeder and not run.open
        waited_for = [s for s in run.members.of("server") if s.number in member.waiting_for]
        return [Send(s.peer, Fence(**ids, shard=s.number, discard=discard)) for s in waited_for]

    def _fenced(self, now: float, peer: PeerId, msg: Fenced) -> list[Effect]:
        run = self.run
        run.speaker(msg)
        member = run.members.get(msg.incarnation)
        if member is None or member.state is not State.FENCING or msg.shard not in member.waiting_for:
            return []
        member.applied[msg.shard] = msg.pushes
        member.waiting_for.discard(msg.shard)
        if member.waiting_for:
            return []
        self._settle_fenced(member)
        run.members.step(member, Event.FENCED)
        if member.incarnation == run.seeder and not run.open:
            self.admission.elect()
        return self._ledger_moved(now)

    def _settle_fenced(self, member: Member) -> None:
        """Applied on no shard: granted again; on all: once; on some: torn."""
        ledger = self.run.ledger
        times = Counter(grant for pushes in member.applied.values() for push in pushes for grant in set(push.grants))
        for grant in ledger.held_by(member.incarnation):
            if times[grant] == 0:
                ledger.give_back(member.incarnation, grant)
            elif times[grant] >= self.run.config.num_shards:
                ledger.confirm(member.incarnation, grant)
            else:
                ledger.tear(member.incarnation, grant)

    # ---- the course of the run --------------------------------------------------------------------

    def _ledger_moved(self, now: float) -> list[Effect]:
        run = self.run
        effects: list[Effect] = []
        if run.phase is not RunPhase.TRAINING:
            return effects
        for tally in run.ledger.pop_completed():
            facts = {"epoch": tally.epoch, "once": tally.once, "torn": tally.torn, "skipped": tally.skipped}
            effects.append(Note("epoch_completed", facts))
            if (tally.epoch + 1) % run.config.evaluate_every == 0 and not run.ledger.complete:
                effects += self.ending.evaluate(now, tally.epoch, final=False)
        return effects + (self.ending.finish(now, "completed") if run.ledger.complete else [])

    def _result(self, now: float, peer: PeerId, msg: Result) -> list[Effect]:
        return self.ending.result(now, msg)

    def _observed(self, now: float, peer: PeerId, msg: Params) -> list[Effect]:
        if self.run.speaker(msg).peer != peer:
            return []  # parameters that are written to disk come from the shard itself
        return self.ending.observed(now, msg)

    # ---- timers -----------------------------------------------------------------------------------

    def _on_repeat_timer(self, now: float) -> list[Effect]:
        """ADMIT and FENCE again to whom has not answered."""
        effects: list[Effect] = []
        for member in self.run.members.of("worker", State.ADMITTING, State.FENCING):
            effects += self.admission.admit(member) if member.state is State.ADMITTING else self._fence(member)
        if effects:
            self.run.timers.set("repeat", now + REPEAT_EVERY_S)
        return effects

    def _on_progress_timer(self, now: float) -> list[Effect]:
        run = self.run
        if run.phase is not RunPhase.TRAINING:
            return []
        run.timers.set("progress", now + PROGRESS_EVERY_S)
        if run.settled == self._noted_samples:
            return []  # a run that waits for workers, perhaps for days, fills no log
        self._noted_samples = run.settled
        return [Note("progress", report.progress(run, now))]


def _epitaph(member: Member, event: Event, reason: str) -> Effect:
    if member.role == "worker":
        return Note("worker_left" if event is Event.LEFT else "worker_lost", {**who(member), "reason": reason})
    return Note(f"{'evaluator' if member.role == 'eval' else 'server'}_left", {"reason": reason})


_GOOD_BUT_LATE = ("LATE", "LAG")
_SHARD_NUMBERS = ("samples", "bytes", "resident_bytes", "gap_rmse", "damping", "alarms")
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
    Round: Broker._round,
}
_TIMERS: dict[str, Callable[[Broker, float], list[Effect]]] = {
    "repeat": Broker._on_repeat_timer,
    "progress": Broker._on_progress_timer,
    "evaluate": lambda broker, now: broker.ending.ask_evaluator(now),
    "finish": lambda broker, now: broker.ending.on_finish_timer(now),
    "save_over": lambda broker, now: broker.ending.on_save_over_timer(now),
    "stop": lambda broker, now: broker.ending.order_stop(now),
    "goodbye": lambda broker, now: broker.ending.stop(now),
}
