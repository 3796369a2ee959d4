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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from zasgd.launch.children import Child, ChildSet
from zasgd.launch.forkserver import TorchForkserver
from zasgd.net.client import BrokerError, Client
from zasgd.net.processes import host_name

MAX_RESTARTS = 3
"""A crashed local worker is restarted this many times."""
TICK_S = 0.2
START_TIMEOUT_S = 60.0
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
    child: Child
    restarts: int = 0
    keep: bool = True


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
        self.slots: dict[int, _Slot] = {}
        self._roles = roles
        self._num_workers = num_workers
        self._num_servers = num_servers
        self._children = ChildSet(run, forkserver)
        self._forkserver = forkserver
        self._broker: Child | None = None
        self._essential: dict[int, Child] = {}
        self._others: list[Child] = []
        self._ending: Ending | None = None
        self._given_up_by = math.inf
        self._given_up: Child | None = None

    # ---- what a watcher may do --------------------------------------------------------------------

    def add_worker(self, *, keep: bool = True) -> Child:
        """Start one more worker; with `keep` it is restarted when it crashes."""
        slot = max(self.slots, default=-1) + 1
        self.slots[slot] = _Slot(self._children.add(self._roles.worker(slot)), keep=keep)
        return self.slots[slot].child

    def run(self) -> Ending:
        """Start everything, watch it to its end, leave nothing behind. Ctrl-C interrupts in order."""
        try:
            with self._children:
                try:
                    self._start()
                    return self._watch_until_over()
                except KeyboardInterrupt:
                    with _deaf_to_interrupts():
                        return self._interrupt()
        finally:
            self._forkserver.stop()

    # ---- the course -------------------------------------------------------------------------------

    def _start(self) -> None:
        self._forkserver.start()
        self._broker = self._children.add(self._roles.broker())
        for number in range(self._num_servers):
            child = self._children.add(self._roles.server(number))
            self._essential[child.pid] = child
        self._wait_for_torch()
        if self._ending is not None:
            return
        self._others.append(self._children.add(self._roles.evaluator()))
        for _ in range(self._num_workers):
            self.add_worker()

    def _wait_for_torch(self) -> None:
        while not self._forkserver.ready() and self._ending is None:
            self._reap(None)
            time.sleep(TICK_S / 4)

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
            self.watch.tick(client.status(LOOK_TIMEOUT_S))
        except BrokerError:
            return  # its process says whether it lives; a busy one answers the next time

    def _reap(self, client: Client | None) -> None:
        for child in self._children.poll():
            if child is self._broker:
                self._ending = self._broker_ended(child)
                return
        if self._broker is not None and self._broker.poll() is not None:
            self._ending = self._broker_ended(self._broker)
            return
        self._reap_workers(client)
        self._reap_servers(client)
        for child in [c for c in self._others if c.exit_code is not None]:
            self._others.remove(child)
            self._expel(client, child)
            if child.exit_code:
                self.watch.say(f"{child.name} ended with {child.ending}; see {child.log}")

    def _reap_servers(self, client: Client | None) -> None:
        """Without a server there is no run: the broker, told so, ends it, unless it never knew that server."""
        for pid, child in list(self._essential.items()):
            if child.exit_code == 2:
                self._ending = Ending(2, _last_line(child), child.log)
            elif child.exit_code is not None and client is not None:
                del self._essential[pid]
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
        return Ending(
            3 if child.exit_code in (3, None) or child.exit_code < 0 else child.exit_code, _last_line(child), child.log
        )

    def _reap_workers(self, client: Client | None) -> None:
        for slot, state in list(self.slots.items()):
            child = state.child
            if child.exit_code is None:
                continue
            self._expel(client, child)
            if child.exit_code == 0 or not state.keep:
                del self.slots[slot]
                if child.exit_code:
                    self.watch.say(f"{child.name} ended with {child.ending}")
            elif child.exit_code == 2 or state.restarts == MAX_RESTARTS:
                del self.slots[slot]
                self._gave_up(child, state.restarts)
            else:
                state.restarts += 1
                times = f"{state.restarts} of {MAX_RESTARTS}"
                self.watch.say(f"{child.name} ended with {child.ending}, restarted ({times}); see {child.log}")
                state.child = self._children.add(self._roles.worker(slot))

    def _gave_up(self, child: Child, restarts: int) -> None:
        tried = f" after {restarts} restarts" if restarts else ""
        self.watch.say(f"{child.name} ended with {child.ending}{tried}: {_last_line(child)} (log: {child.log})")
        if not self.slots and self._ending is None:
            code = 2 if child.exit_code == 2 else 1
            self._ending = Ending(code, f"no worker is left: {_last_line(child)}", child.log)

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
        """The broker is gone or will not be waited for: everybody else has the order to stop, or the signal."""
        deadline = time.monotonic() + (END_TIMEOUT_S if ending.code == 0 else KILL_AFTER_S)
        while self._children.running and time.monotonic() < deadline:
            self._children.poll()
            time.sleep(TICK_S / 10)
        self._children.terminate(KILL_AFTER_S)
        return ending

    def _interrupt(self) -> Ending:
        """Ctrl-C: have the model written and everybody stopped; within 5 s nobody is left."""
        self.watch.say("interrupted: the model as it is will be written")
        deadline = time.monotonic() + STOP_TIMEOUT_S
        if self._broker is not None and self._broker.poll() is None and self.slots:
            try:
                with Client(self.address) as client:
                    client.stop(STOP_TIMEOUT_S / 2, interrupted=True)
                while self._children.running and time.monotonic() < deadline + 1.0:
                    self._children.poll()
                    time.sleep(TICK_S / 10)
            except BrokerError:
                pass  # it is not up yet, or gone: the signal ends it
        self._children.terminate(KILL_AFTER_S)
        return Ending(130, "interrupted")


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _last_line(child: Child) -> str:
    """The last line of a child's log, where every role says what it ended with."""
    try:
        lines = [line for line in child.log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return child.ending
    return lines[-1].removeprefix("error: ")[:300] if lines else child.ending
