"""Virtual time: one heap of events, named processes, and the real wire between them.

Decides who runs when and carries out effects; it never judges what a core decides (`invariants.py`) and never
chooses a fault (`faults.py`). The cores are the ones that run over ZeroMQ, and every message goes through
the real encoder and decoder. The same seed gives the same run.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Protocol

from zasgd.core import wire
from zasgd.core.messages import Message
from zasgd.core.node import (
    BROKER,
    Compute,
    Computed,
    Dial,
    Effect,
    InvariantError,
    Node,
    Note,
    PeerId,
    Record,
    Save,
    Send,
    Share,
    Stop,
    Unshare,
)
from zasgd.core.region import Region, SharedMemoryError, private_region
from zasgd.sim.faults import Faults, Kill, Link, Network, Pause
from zasgd.sim.trace import Trace

MAX_TIMERS_AT_ONCE = 1000
"""A process whose timer fires this often without time moving on is spinning, which is a bug."""

SCHEME = "sim://"
"""How an endpoint names a process: `sim://` and its name."""

Factory = Callable[[float, int], Node]
"""Makes the core of a new process from (its local time, which life of the name this is, from 0)."""


class Violation(InvariantError):
    """An invariant broke during a simulated run; the text names seed, virtual time and the last events."""


class Route(NamedTuple):
    """The way back to one life of a process; it dies with that life. `via` is the name its sender called."""

    node: str
    life: int
    via: PeerId


class Problem(Protocol):
    """The slow work of workers and evaluators."""

    def __call__(self, name: str, life: int, task: Any) -> tuple[float, Any]:
        """Virtual seconds that `task` takes on process `name`, and its result."""
        ...


class Watch(Protocol):
    """Somebody who looks at every event and raises InvariantError."""

    def handled(self, at_s: float, name: str, node: Node, message: Message | None, effects: list[Effect]) -> None:
        """`node` has handled an event (`message` if it was one) and is about to cause `effects`."""
        ...

    def sent(self, at_s: float, name: str, node: Node, message: Message) -> None:
        """`node` has put `message` on the wire."""
        ...


class State(Enum):
    """What a process is doing."""

    ABSENT = "absent"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    DEAD = "dead"


@dataclass(slots=True)
class Process:
    """One named process over all its lives.

    clock_offset_s: its local clock minus virtual time. timer_at: virtual time of its one valid timer event.
    inbox: what arrived while it was paused. links: peer name to endpoint, as this life dialled them.
    """

    name: str
    factory: Factory
    clock_offset_s: float
    life: int = -1
    node: Node | None = None
    state: State = State.ABSENT
    stop: Stop | None = None
    num_events: int = 0
    num_sends: int = 0
    timer_at: float = math.inf
    num_timers_at_once: int = 0
    inbox: list[_Event] = field(default_factory=list)
    links: dict[PeerId, str] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Running or paused."""
        return self.state in (State.RUNNING, State.PAUSED)


class _Event(NamedTuple):
    at_s: float
    order: int
    kind: str
    name: str
    life: int
    content: Any


class World:
    """Processes, the network between them, and the clock.

    seed: of everything that is left to chance here. problem: carries out Compute effects. watches: judges.
    names: process behind a peer name. A peer that is not among them is looked up in the links that the sender
    dialled; the process `x` is dialled at `sim://x`, any other endpoint or none means the broker's relay.
    validate_every: a core validates itself after each of so many events, 0 for never. traced: whether a trace is kept.
    """

    def __init__(
        self,
        seed: int,
        *,
        link: Link | None = None,
        faults: Faults | None = None,
        problem: Problem | None = None,
        watches: Sequence[Watch] = (),
        names: Mapping[PeerId, str] | None = None,
        keep_trace: int = 200,
        traced: bool = True,
        validate_every: int = 1,
    ) -> None:
        self.seed = seed
        self.now = 0.0
        self.trace = Trace(keep_trace, wanted=traced)
        self.notes: list[tuple[float, str, Note]] = []
        self.saved: dict[tuple[str, str], Any] = {}
        self.records: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self.processes: dict[str, Process] = {}
        self._regions: dict[str, Region] = {}
        self._draw = random.Random(seed)
        self._faults = faults or Faults()
        self._network = Network(self._draw, link or Link(), self._faults)
        self._problem = problem
        self._watches = tuple(watches)
        self._validate_every = validate_every
        self._names = {BROKER: "broker", **(names or {})}
        self._heap: list[_Event] = []
        self._order = 0
        self._plan_faults()

    # ---- what a story tells the world ------------------------------------------------------------

    def add(
        self,
        name: str,
        factory: Factory,
        *,
        at_s: float = 0.0,
        clock_offset_s: float | None = None,
        serves: bool = False,
    ) -> None:
        """A process that starts at `at_s`; its local clock is anywhere within a month unless told.

        serves: gradients and parameters share its line (see faults.Network).
        """
        offset = self._draw.uniform(0.0, 2.6e6) if clock_offset_s is None else clock_offset_s
        process = Process(name, factory, offset)
        process.kills = [k for k in self._faults.kills if k.name == name and k.at_s is None]
        self.processes[name] = process
        if serves:
            self._network.serve(name)
        self._schedule(at_s, "start", name, -1)

    def restart(self, name: str, after_s: float = 0.0) -> None:
        """Begin the process's next life `after_s` from now; nothing if it is alive then."""
        self._schedule(self.now + after_s, "start", name, -1)

    def at(self, at_s: float, action: Callable[[], object]) -> None:
        """Call `action` at that virtual time: a step of a test's story."""
        self._schedule(at_s, "action", "", 0, action)

    def kill(self, name: str, *, restart_after_s: float | None = None, cuts_line: bool = False) -> None:
        """End the process now, as kill -9 does; nothing when it is not alive."""
        process = self.processes[name]
        if not process.alive:
            return
        self.trace.record(self.now, name, "killed", str(process.life))
        self._end(process, State.DEAD)
        if cuts_line:
            self._forget_sent_by(name, process.life)
        if restart_after_s is not None:
            self.restart(name, restart_after_s)

    def pause(self, name: str, for_s: float) -> None:
        """SIGSTOP now and SIGCONT after `for_s`."""
        process = self.processes[name]
        if process.state is State.RUNNING:
            self.trace.record(self.now, name, "paused", f"{for_s:.6f}")
            process.state = State.PAUSED
            self._schedule(self.now + for_s, "wake", name, process.life)

    def signal(self, name: str, handler: Callable[[Any, float], list[Effect]]) -> None:
        """Run what the shell would on a signal: `handler(core, its local time)`, then the effects."""
        process = self.processes[name]
        self._schedule(self.now, "signal", name, process.life, handler)

    def node(self, name: str) -> Any:
        """The core of the named process; of its last life if it has ended."""
        return self.processes[name].node

    def local_time(self, name: str) -> float:
        """The named process's own clock, seconds."""
        return self.now + self.processes[name].clock_offset_s

    def stopped(self, *names: str) -> bool:
        """Whether all of these (none given: all that are not dead) have ended by themselves."""
        chosen = [self.processes[n] for n in names] if names else self._not_dead()
        return all(p.state is State.STOPPED for p in chosen)

    def _not_dead(self) -> list[Process]:
        return [p for p in self.processes.values() if p.state is not State.DEAD]

    def noted(self, event: str) -> list[Note]:
        """All notes of that event, in order."""
        return [note for _, _, note in self.notes if note.event == event]

    def run(self, until_s: float, *, stop_when: Callable[[], bool] = lambda: False) -> None:
        """Let virtual time pass up to `until_s`, or until `stop_when()` holds after an event.

        Raises Violation when a core or a watch finds an invariant broken.
        """
        while self._heap and self._heap[0].at_s <= until_s:
            event = heapq.heappop(self._heap)
            self.now = event.at_s
            self._take(event)
            if stop_when():
                return
        self.now = max(self.now, until_s)

    # ---- events ----------------------------------------------------------------------------------

    def _plan_faults(self) -> None:
        for kill in self._faults.kills:
            if kill.at_s is not None:
                self.at(kill.at_s, partial(self._carry_out_kill, kill))
        for pause in self._faults.pauses:
            self.at(pause.at_s, partial(self._carry_out_pause, pause))

    def _carry_out_kill(self, kill: Kill) -> None:
        self.kill(kill.name, restart_after_s=kill.restart_after_s, cuts_line=kill.cuts_line)

    def _carry_out_pause(self, pause: Pause) -> None:
        self.pause(pause.name, pause.for_s)

    def _schedule(self, at_s: float, kind: str, name: str, life: int, content: Any = None) -> None:
        self._order += 1
        heapq.heappush(self._heap, _Event(at_s, self._order, kind, name, life, content))

    def _take(self, event: _Event) -> None:
        if event.kind == "action":
            event.content()
            return
        process = self.processes[event.name]
        if process.state is State.RUNNING and process.life == event.life:
            self._handle(process, event)
        elif event.kind == "start":
            self._start(process)
        elif not process.alive or process.life != event.life:
            self._miss(event)
        elif event.kind == "wake":
            self._wake(process)
        elif event.kind != "timer":
            process.inbox.append(event)

    def _miss(self, event: _Event) -> None:
        if event.kind == "deliver":
            self.trace.record(self.now, event.name, "unheard", str(event.order))

    def _start(self, process: Process) -> None:
        if process.alive:
            return
        process.life += 1
        process.state = State.RUNNING
        process.stop = None
        process.links = {}
        process.node = process.factory(self.now + process.clock_offset_s, process.life)
        self.trace.record(self.now, process.name, "started", str(process.life))
        self._arm(process)

    def _wake(self, process: Process) -> None:
        self.trace.record(self.now, process.name, "woke", str(len(process.inbox)))
        process.state = State.RUNNING
        waiting, process.inbox = process.inbox, []
        process.timer_at = -math.inf  # sockets are drained before a timer fires, however overdue it is
        for event in waiting:
            if process.state is State.RUNNING:
                self._handle(process, event)
        process.timer_at = math.inf
        self._arm(process)

    def _handle(self, process: Process, event: _Event) -> None:
        if event.kind == "timer" and event.at_s != process.timer_at:
            return
        message: Message | None = None
        if event.kind == "deliver":
            message = wire.decode(event.content[1])
        try:
            effects = self._step(process, event, message)
        except InvariantError as e:
            raise self._violation(process.name, e) from e
        self._carry_out(process, effects)
        self._arm(process)

    def _step(self, process: Process, event: _Event, message: Message | None) -> list[Effect]:
        node = process.node
        if node is None:
            raise InvariantError("an event for a process that never started")
        now = self.now + process.clock_offset_s
        if message is not None:
            effects = node.on_message(now, event.content[0], message)
        elif event.kind == "done":
            effects = node.on_done(now, event.content)
        elif event.kind == "signal":
            effects = event.content(node, now)
        else:
            effects = node.on_timer(self._fire_time(process, node, now))
        process.num_events += 1
        if self.trace.wanted:
            detail = type(message).__name__ if message is not None else ""
            self.trace.record(self.now, process.name, event.kind, f"{event.order} {detail}")
        if self._validate_every and process.num_events % self._validate_every == 0:
            node.validate()
        for watch in self._watches:
            watch.handled(self.now, process.name, node, message, effects)
        return effects

    def _fire_time(self, process: Process, node: Node, now: float) -> float:
        process.timer_at = math.inf
        # Adding the clock offset rounds: a timer must never fire an ulp before its deadline.
        return max(now, min(node.next_deadline(), now + 1e-6))

    def _arm(self, process: Process) -> None:
        """Schedule the process's next timer event unless that very one is scheduled already."""
        if process.state is not State.RUNNING or process.node is None or process.timer_at == -math.inf:
            return
        deadline = process.node.next_deadline()
        if deadline == math.inf:
            process.timer_at = math.inf
            return
        at = max(self.now, deadline - process.clock_offset_s)
        if at == process.timer_at:
            return
        process.timer_at = at
        if at > self.now:
            process.num_timers_at_once = 0
        else:
            self._guard_spin(process)
        self._schedule(at, "timer", process.name, process.life)

    def _guard_spin(self, process: Process) -> None:
        process.num_timers_at_once += 1
        if process.num_timers_at_once > MAX_TIMERS_AT_ONCE:
            raise self._violation(process.name, "its timer fires again and again without time moving on")

    # ---- effects ---------------------------------------------------------------------------------

    def _carry_out(self, process: Process, effects: list[Effect]) -> None:
        if process.kills and self._dies_of(process, "after_events", process.num_events):
            return
        for effect in effects:
            if isinstance(effect, Send):
                self._send(process, effect)
                if process.kills and self._dies_of(process, "after_sends", process.num_sends):
                    return
            elif isinstance(effect, Dial):
                process.links[effect.peer] = effect.endpoint
            elif isinstance(effect, Compute):
                self._compute(process, effect.task)
            elif isinstance(effect, Share):
                self._share(process, effect)
            elif isinstance(effect, Unshare):
                self._regions.pop(effect.name, None)  # whoever has it keeps it; nobody opens it again
            elif isinstance(effect, Note):
                if self.trace.wanted:
                    self.trace.record(self.now, process.name, "note", _plain(effect))
                self.notes.append((self.now, process.name, effect))
            elif isinstance(effect, Save):
                self.trace.record(self.now, process.name, "saved", effect.what)
                self.saved[process.name, effect.what] = effect.content
            elif isinstance(effect, Record):
                self.records[process.name].append(effect.row)
            else:
                self.trace.record(self.now, process.name, "stopped", f"{effect.code} {effect.reason}")
                process.stop = effect
                self._end(process, State.STOPPED)

    def _share(self, process: Process, share: Share) -> None:
        """All processes share one memory; who finds a region there has the right one."""
        result: Any = self._regions.get(share.name) or SharedMemoryError(f"no region {share.name}")
        if share.create:
            region = private_region(share.plan)
            result = self._regions[share.name] = replace(region, token=f"in {share.name}".encode())
        if process.node is not None:
            self._carry_out(process, process.node.on_done(self.now + process.clock_offset_s, Computed(share, result)))

    def _dies_of(self, process: Process, count: str, reached: int) -> bool:
        for kill in process.kills:
            if getattr(kill, count) is not None and reached >= getattr(kill, count):
                process.kills.remove(kill)
                self._carry_out_kill(kill)
                return True
        return False

    def _send(self, process: Process, send: Send) -> None:
        message = send.message
        # Copied: a core may reuse its arrays once the event is over, a socket has sent them by then.
        frames = [frame if type(frame) is bytes else bytes(frame) for frame in wire.encode(message)]
        process.num_sends += 1
        if self._watches:
            self._judge_sent(process, message)
        receiver, life, seen_as = self._addressee(process, send.peer)
        if self.trace.wanted:
            self._record_sent(process.name, receiver, message.kind.name, frames)
        if receiver is None:
            return
        num_bytes = sum(map(len, frames))
        arrivals = self._network.arrivals(self.now, process.name, receiver, message.kind, num_bytes)
        if not arrivals:
            self.trace.record(self.now, process.name, "lost", message.kind.name)
        for at in arrivals:
            self._schedule(at, "deliver", receiver, life, (seen_as, frames, process.name, process.life))

    def _record_sent(self, sender: str, receiver: str | None, kind: str, frames: list[bytes]) -> None:
        self.trace.record(self.now, sender, "sent", f"{kind} {receiver}", b"".join(frames))
        self.trace.counts[f"sent {kind}"] += 1
        if receiver is None:
            self.trace.record(self.now, sender, "unroutable", kind)

    def _judge_sent(self, process: Process, message: Message) -> None:
        if process.node is None:
            return
        try:
            for watch in self._watches:
                watch.sent(self.now, process.name, process.node, message)
        except InvariantError as e:
            raise self._violation(process.name, e) from e

    def _addressee(self, sender: Process, peer: PeerId) -> tuple[str | None, int, PeerId]:
        """The process and life behind a peer, and the name under which it sees the sender."""
        if isinstance(peer, Route):
            process = self.processes[peer.node]
            living = process.alive and process.life == peer.life
            return (peer.node if living else None), peer.life, peer.via
        target = self.processes.get(self._name_of(sender, peer))
        if target is None or not target.alive:
            return None, 0, peer
        return target.name, target.life, Route(sender.name, sender.life, peer)

    def _name_of(self, sender: Process, peer: PeerId) -> str:
        if peer in self._names:
            return self._names[peer]
        endpoint = sender.links.get(peer, "")
        if not endpoint.startswith(SCHEME):
            relay = self.processes.get(self._names[BROKER])
            endpoint = relay.links.get(peer, "") if relay is not None and relay.alive else ""
        return endpoint.removeprefix(SCHEME)

    def _compute(self, process: Process, task: Any) -> None:
        if self._problem is None:
            raise self._violation(process.name, "it computes, but this world was given no problem")
        duration_s, result = self._problem(process.name, process.life, task)
        done = Computed(task, result)
        self._schedule(self.now + duration_s, "done", process.name, process.life, done)

    def _end(self, process: Process, state: State) -> None:
        process.state = state
        process.inbox.clear()
        process.timer_at = math.inf

    def _forget_sent_by(self, name: str, life: int) -> None:
        """The line is cut: what this life had on the wire arrives nowhere."""
        kept = [e for e in self._heap if e.kind != "deliver" or e.content[2:] != (name, life)]
        if len(kept) < len(self._heap):
            self._heap = kept
            heapq.heapify(self._heap)

    def _violation(self, name: str, what: object) -> Violation:
        tail = "\n  ".join(list(self.trace.tail)[-40:])
        return Violation(f"seed {self.seed}, {self.now:.6f} s, {name}: {what}\n  {tail}")


def _plain(note: Note) -> str:
    return f"{note.event} " + " ".join(f"{key}={value}" for key, value in note.fields.items())
