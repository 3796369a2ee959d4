"""Processes that are measured in turns: each stands still until its crew's turn, then stamps every step it takes.

Decides how a rate comes out of stamps. Never decides what a step is.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from zasgd.launch.lifeline import end_with_parent

CAPACITY = 1 << 20
"""Stamps that are kept of one process; older ones of the same turn are lost."""
MARGIN_S = 1.0
"""The beginning and the end of a turn, which do not count: not everybody is at work yet, or any more."""
FEWEST_STEPS = 3
"""Of each process in a turn, however long they take."""
PATIENCE_S = 120.0
"""For processes to start, compile and reach their first step, or to finish their last."""

SPAWN = multiprocessing.get_context("spawn")


class BenchError(Exception):
    """A measurement that could not be made; the text is one line."""


class Lane:
    """One process of a crew, and when its steps began."""

    def __init__(self, turn: Any) -> None:
        """turn: shared, 1 while it is the crew's turn."""
        self._turn = turn
        self._stamps = SPAWN.RawArray("d", CAPACITY)
        self._num_stamps = SPAWN.RawValue("q", 0)
        self._stands = SPAWN.RawValue("b", 0)
        self._woken, self._waker = SPAWN.Pipe(duplex=False)  # an Event would leave semaphores when we are killed

    def begin_step(self) -> None:
        """Called by the process before each step: stands still while it is not the crew's turn, then stamps."""
        if not self._turn.value:
            self._stands.value = 1
            self._woken.recv_bytes()
            self._stands.value = 0
        self._stamps[self._num_stamps.value % CAPACITY] = time.monotonic()
        self._num_stamps.value += 1

    def wake(self) -> None:
        """Let the process go on, which stands still."""
        self._waker.send_bytes(b"x")

    @property
    def num_steps(self) -> int:
        """Steps begun."""
        return int(self._num_stamps.value)

    @property
    def stands(self) -> bool:
        """Whether the process waits for its turn."""
        return bool(self._stands.value)

    def begun(self, since: float, until: float) -> list[float]:
        """The moments between two at which steps began."""
        first = max(0, self.num_steps - CAPACITY)
        stamps = [self._stamps[i % CAPACITY] for i in range(first, self.num_steps)]
        return [at for at in stamps if since <= at <= until]


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds in all, and how often."""

    seconds: float
    times: float

    def mean_ms_since(self, earlier: Spent) -> float:
        """Milliseconds that one took since; 0 if there was none."""
        times = self.times - earlier.times
        return 1e3 * (self.seconds - earlier.seconds) / times if times else 0.0


class Meter:
    """What one process spends on one thing."""

    def __init__(self) -> None:
        self._spent = SPAWN.RawArray("d", 2)

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, metered."""

        def metered(*args: Any, **kwargs: Any) -> Any:
            began_at = time.perf_counter()
            result = call(*args, **kwargs)
            self._spent[0] += time.perf_counter() - began_at
            self._spent[1] += 1
            return result

        return metered

    @staticmethod
    def total(meters: Sequence[Meter]) -> Spent:
        """What they have spent until now."""
        return Spent(*(sum(meter._spent[i] for meter in meters) for i in (0, 1)))


class Crew:
    """Processes that have their turns together."""

    def __init__(self, size: int) -> None:
        self._turn = SPAWN.RawValue("b", 0)
        self.lanes = tuple(Lane(self._turn) for _ in range(size))
        self.processes: list[BaseProcess] = []

    @property
    def num_steps(self) -> int:
        """Steps begun by all."""
        return sum(lane.num_steps for lane in self.lanes)

    def rates(self, seconds: float) -> list[float]:
        """Give the crew its turn, `seconds` of which count, or more if steps are that slow: steps per second by lane.

        Raises BenchError.
        """
        self._until_all_stand()
        self._turn.value = 1
        for lane in self.lanes:
            lane.wake()
        since = time.monotonic() + MARGIN_S
        try:
            self._rest(MARGIN_S + seconds)
            until = self._until_enough(since, since + seconds)
            self._rest(MARGIN_S)
        finally:
            self._turn.value = 0
        self._until_all_stand()
        return [(len(begun) - 1) / (begun[-1] - begun[0]) for begun in self._begun(since, until)]

    def _begun(self, since: float, until: float) -> list[list[float]]:
        return [lane.begun(since, until) for lane in self.lanes]

    def _until_enough(self, since: float, until: float) -> float:
        """Wait until every lane has begun so many steps that they make a rate; the end of what counts."""
        give_up_at = time.monotonic() + PATIENCE_S
        while min(map(len, self._begun(since, until))) <= FEWEST_STEPS:
            if time.monotonic() > give_up_at:
                raise BenchError(f"a process took fewer than {FEWEST_STEPS} steps in {PATIENCE_S:g} s")
            self._rest(0.1)
            until = time.monotonic()
        return until

    def _until_all_stand(self) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        while not all(lane.stands for lane in self.lanes):
            if time.monotonic() > give_up_at:
                raise BenchError(f"not every process was ready within {PATIENCE_S:g} s")
            self._rest(0.005)

    def _rest(self, seconds: float) -> None:
        ended = wait([process.sentinel for process in self.processes], timeout=seconds)
        if ended:
            first = next(process for process in self.processes if process.sentinel in ended)
            first.join()
            raise BenchError(f"a process of the measurement ended by itself, with exit code {first.exitcode}")


@contextmanager
def running(target: Callable[..., None], *arguments: Any, patience_s: float = 0.0) -> Iterator[BaseProcess]:
    """A process that calls `target`; killed at the end unless it ends by itself within `patience_s`."""
    process = SPAWN.Process(target=_tied, args=(os.getpid(), target, *arguments), daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.join(patience_s)
        process.kill()
        process.join()


@contextmanager
def running_crew(crew: Crew, calls: Sequence[tuple[Any, ...]]) -> Iterator[Crew]:
    """Processes that make the calls, (function, arguments...); all are killed at the end."""
    with ExitStack() as stack:
        crew.processes += [stack.enter_context(running(*call)) for call in calls]
        yield crew


def _tied(parent_pid: int, target: Callable[..., None], *arguments: Any) -> None:
    end_with_parent()
    if os.getppid() != parent_pid:
        return  # it ended while we were being imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # our parent hears it too, and ends us
    try:
        target(*arguments)
    except BenchError as error:
        print(f"zasgd: {error}", file=sys.stderr)
        sys.exit(1)
