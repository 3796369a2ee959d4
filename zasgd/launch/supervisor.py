"""All processes of one run on this machine: starts them, reports their deaths, restarts workers, ends them.

Decides which local process is started again and when a run cannot go on; the run itself is the broker's business, and
the supervisor learns about it by asking STATUS like anybody else. It never touches a gradient or a recipe: how each
role is started comes in as a Roles.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from zasgd.launch.children import Child, ChildSet
from zasgd.launch.forkserver import TorchForkserver
from zasgd.net.client import BrokerError, Client
from zasgd.net.processes import host_name

MAX_RESTARTS = 3
"""A crashed local worker or evaluator is restarted this many times."""
EVALUATOR = "eval"
TICK_S = 0.2
STOP_TIMEOUT_S = 2.5
KILL_AFTER_S = 0.7
END_TIMEOUT_S = 3.0
"""Whoever still runs so long after the broker never heard of the end: it was starting."""
ASK_TIMEOUT_S = 1.0
LOOK_TIMEOUT_S = 0.4
"""At the end of a run the last look is at a broker that is gone."""
BROKER_ENDS_S = 5.0
"""A broker that has heard of a lost server ends the run within its GOODBYE_S."""


class Roles(Protocol):
    """How to start each process of a run."""

    def broker(self) -> Child: ...
    def server(self, number: int) -> Child: ...
    def evaluator(self) -> Child: ...
    def worker(self, slot: int) -> Child: ...


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended: exit code, one line, and the log to read when it went wrong."""

    code: int
    text: str = ""
    log: Path | None = None


@dataclass(slots=True)
class _Slot:
    """A process that is started again when it crashes, unless it was told to be let go."""

    child: Child
    start: Callable[[], Child]
    keep: bool = True
    restarts: int = 0


@dataclass(slots=True)
class Watch:
    """What whoever watches a run is called with. `tick` gets the broker's report; `say` one line for people."""

    tick: Callable[[Mapping[str, Any]], None] = lambda report: None
    say: Callable[[str], None] = lambda line: None


class Supervisor:
    """Runs a job on this machine. `run` returns when every process it started is gone."""

    def __init__(
        self, address: str, run: str, roles: Roles, num_workers: int, num_servers: int, forkserver: TorchForkserver
    ) -> None:
        """address: HOST:PORT of the broker to be. run: the value of ZASGD_RUN in every child's environment."""
        self.address = address
        self.watch = Watch()
        self._roles = roles
        self._num_workers = num_workers
        self._num_servers = num_servers
        self._children = ChildSet(run, forkserver)
        self._forkserver = forkserver
        self._broker: Child | None = None
        self._servers: dict[int, Child] = {}
        self._slots: dict[str, _Slot] = {}
        self._num_added = 0
        self._ending: Ending | None = None
        self._given_up_by = math.inf
        self._given_up: Child | None = None
        self._last_worker = Ending(1, "no worker is left: all have left the run")

    # ---- what a watcher may do --------------------------------------------------------------------

    def add_worker(self, *, keep: bool = True) -> Child:
        """Start one more worker; with `keep` it is restarted when it crashes."""
        number = self._num_added
        self._num_added += 1
        return self._fill(f"worker-{number}", lambda: self._roles.worker(number), keep=keep)

    def run(self) -> Ending:
        """Start everything, watch it to its end, leave nothing behind.

        Ctrl-C, SIGTERM and SIGHUP interrupt in order: the model is written, the exit code is 128 and the signal.
        """
        try:
            with _interrupted_by_signals(), self._children:
                try:
                    self._start()
                    return self._watch_until_over()
                except KeyboardInterrupt as interrupt:
                    with _deaf_to_signals():
                        return self._interrupt(interrupt)
        finally:
            self._forkserver.stop()

    # ---- the course -------------------------------------------------------------------------------

    def _fill(self, name: str, start: Callable[[], Child], *, keep: bool = True) -> Child:
        self._slots[name] = _Slot(self._children.add(start()), start, keep)
        return self._slots[name].child

    @property
    def _has_workers(self) -> bool:
        return any(name != EVALUATOR for name in self._slots)

    def _start(self) -> None:
        self._forkserver.start()
        self._broker = self._children.add(self._roles.broker())
        for number in range(self._num_servers):
            child = self._children.add(self._roles.server(number))
            self._servers[child.pid] = child
        while not self._forkserver.ready() and self._ending is None:
            self._reap(None)
            time.sleep(TICK_S / 4)
        if self._ending is not None:
            return
        self._fill(EVALUATOR, self._roles.evaluator)
        for _ in range(self._num_workers):
            self.add_worker()

    def _watch_until_over(self) -> Ending:
        with Client(self.address) as client:
            while self._ending is None:
                self._reap(client)
                if self._ending is None:
                    self._look(client)
                    time.sleep(TICK_S)
        return self._end(self._ending)

    def _look(self, client: Client) -> None:
        try:
            report = client.status(LOOK_TIMEOUT_S)
        except BrokerError:
            return  # its process says whether it lives; a busy one answers the next time
        self.watch.tick(report)
        if not self._has_workers and not report["workers"] and not report["outcome"]:
            self._ending = self._last_worker

    def _reap(self, client: Client | None) -> None:
        self._children.poll()
        if self._broker is not None and self._broker.poll() is not None:
            self._ending = self._broker_ended(self._broker)
            return
        for name, slot in list(self._slots.items()):
            if slot.child.exit_code is not None:
                self._expel(client, slot.child)
                self._slot_ended(name, slot)
        self._reap_servers(client)

    def _slot_ended(self, name: str, slot: _Slot) -> None:
        child = slot.child
        if slot.keep and child.exit_code not in (0, 2) and slot.restarts < MAX_RESTARTS:
            slot.restarts += 1
            times = f"{slot.restarts} of {MAX_RESTARTS}"
            self.watch.say(f"{child.name} ended with {child.ending}, restarted ({times}); see {child.log}")
            slot.child = self._children.add(slot.start())
            return
        del self._slots[name]
        if child.exit_code and not slot.keep:
            self.watch.say(f"{child.name} ended with {child.ending}")
        elif child.exit_code:
            tried = f" after {slot.restarts} restarts" if slot.restarts else ""
            self.watch.say(f"{child.name} ended with {child.ending}{tried}: {_last_line(child)} (log: {child.log})")
            if name == EVALUATOR:
                self.watch.say("the run goes on without evaluations; its parameters will be written to params.npz")
            else:
                code = 2 if child.exit_code == 2 else 1
                self._last_worker = Ending(code, f"no worker is left: {_last_line(child)}", child.log)

    def _reap_servers(self, client: Client | None) -> None:
        """Without a server there is no run: the broker, told so, ends it, unless it never knew that server."""
        for pid, child in list(self._servers.items()):
            if child.exit_code == 2:
                self._ending = Ending(2, _last_line(child), child.log)
            elif child.exit_code is not None and client is not None:
                del self._servers[pid]
                self._expel(client, child)
                if child.exit_code and self._given_up is None:
                    self._given_up, self._given_up_by = child, time.monotonic() + BROKER_ENDS_S
        if self._given_up is not None and time.monotonic() >= self._given_up_by and self._ending is None:
            child = self._given_up
            last = _last_line(child)
            why = "" if last == child.ending else f": {last}"
            self._ending = Ending(3, f"{child.name} ended with {child.ending}{why}", child.log)

    def _broker_ended(self, child: Child) -> Ending:
        if child.exit_code == 0:
            return Ending(0)
        if child.exit_code is None or child.exit_code < 0:
            return Ending(3, f"the broker ended with {child.ending}", child.log)
        return Ending(child.exit_code, _last_line(child), child.log)

    def _expel(self, client: Client | None, child: Child) -> None:
        """The broker need not wait for the lease of a process that is known to be dead; who ended well has said BYE."""
        if client is None or child.exit_code == 0 or self._broker is None or self._broker.poll() is not None:
            return
        try:
            client.expel(host_name(), child.pid, f"process ended with {child.ending}", ASK_TIMEOUT_S)
        except BrokerError:
            return  # the lease ends it

    # ---- the end ----------------------------------------------------------------------------------

    def _end(self, ending: Ending) -> Ending:
        """After a run everybody has the order to stop; a run that cannot go on is stopped in order, if it can be."""
        if ending.code:
            self._stop_in_order()
        else:
            self._wait(END_TIMEOUT_S)
        self._children.terminate(KILL_AFTER_S)
        return ending

    def _interrupt(self, interrupt: KeyboardInterrupt) -> Ending:
        """Have the model written and everybody stopped; within 5 s nobody is left."""
        begun = bool(self._slots)
        self.watch.say("interrupted: the model as it is will be written" if begun else "interrupted")
        if begun:
            self._stop_in_order()
        self._children.terminate(KILL_AFTER_S)
        return Ending(128 + getattr(interrupt, "number", signal.SIGINT), "interrupted")

    def _stop_in_order(self) -> None:
        if self._broker is None or self._broker.poll() is not None:
            self._wait(KILL_AFTER_S)
            return
        try:
            with Client(self.address) as client:
                client.stop(STOP_TIMEOUT_S / 2, interrupted=True)
        except BrokerError:
            return  # it is not up yet, or gone: the signal ends it
        self._wait(STOP_TIMEOUT_S + 1.0)

    def _wait(self, at_most_s: float) -> None:
        deadline = time.monotonic() + at_most_s
        while self._children.running and time.monotonic() < deadline:
            self._children.poll()
            time.sleep(TICK_S / 10)


class _Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGHUP, taken like Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _interrupt_by(number: int, frame: object) -> None:
    raise _Interrupted(number)


@contextmanager
def _handling(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _interrupted_by_signals() -> AbstractContextManager[None]:
    return _handling(_interrupt_by, signal.SIGTERM, signal.SIGHUP)


def _deaf_to_signals() -> AbstractContextManager[None]:
    return _handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _last_line(child: Child) -> str:
    """The last line of a child's log, where every role says what it ended with."""
    try:
        lines = [line for line in child.log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return child.ending
    return lines[-1].removeprefix("error: ")[:300] if lines else child.ending
