"""The local processes of one run: started here, told to end here, and gone when this is done with them.

Decides nothing about who should run; the supervisor does. A process of a run is known by ZASGD_RUN in its
environment, grandchildren included.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

RUN_VARIABLE = "ZASGD_RUN"

_LIFELINE = Path(__file__).with_name("lifeline.py")
_POLL_S = 0.01
_REAP_S = 2.0  # a killed process is gone in milliseconds, unless the kernel itself holds it


class Child:
    """One process of ours.

    name: for people. log: the file with all it printed. exit_code: None while it runs, negative for a signal
    as in subprocess; as fresh as the last `poll`.
    """

    def __init__(self, name: str, pid: int, log: Path, ask_exit_code: Callable[[], int | None]) -> None:
        self.name = name
        self.pid = pid
        self.log = log
        self.exit_code: int | None = None
        self._ask_exit_code = ask_exit_code

    def poll(self) -> int | None:
        """Reap it if it has ended; its exit code, None while it runs."""
        if self.exit_code is None:
            self.exit_code = self._ask_exit_code()
        return self.exit_code

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens when it has ended."""
        if self.poll() is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:  # it ended since the poll, and the forkserver has reaped it
                return

    @property
    def ending(self) -> str:
        """How it ended, for a log line: `exit code 3`, `SIGKILL`, or `running`."""
        if self.exit_code is None:
            return "running"
        return f"exit code {self.exit_code}" if self.exit_code >= 0 else _signal_name(-self.exit_code)


def spawn_command(name: str, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> Child:
    """Start `argv` as a process of its own session that the kernel kills when this one ends, however it ends.

    env: variables added to this process's own. Stdin is empty; stdout and stderr are appended to `log`. A
    command that cannot be started ends with exit code 127 and the reason in its log. From the main thread
    only: the kernel ties a child's life to the thread that started it.
    """
    require_main_thread()
    log.parent.mkdir(parents=True, exist_ok=True)
    tied = [sys.executable, "-I", "-S", str(_LIFELINE), str(os.getpid()), *argv]
    with log.open("ab") as output:
        process = subprocess.Popen(
            tied,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
        )
    return Child(name, process.pid, log, process.poll)


class Forkserver(Protocol):
    """What a ChildSet has to stop besides its children."""

    def stop(self) -> None:
        """End the forkserver; called when all its children have ended."""
        ...


class ChildSet:
    """The children of one run, ended together. As a context it leaves no process of the run behind.

    run: the value of ZASGD_RUN that the children were started with.
    """

    def __init__(self, run: str, forkserver: Forkserver | None = None) -> None:
        self._run = run
        self._forkserver = forkserver
        self._running: list[Child] = []

    def add(self, child: Child) -> Child:
        """Look after `child` from now on."""
        self._running.append(child)
        return child

    @property
    def running(self) -> tuple[Child, ...]:
        """Those not yet reported by `poll`, in the order they were added."""
        return tuple(self._running)

    def poll(self) -> list[Child]:
        """The children that ended since the last call, each reported once."""
        ended = [child for child in self._running if child.poll() is not None]
        self._running = [child for child in self._running if child.exit_code is None]
        return ended

    def terminate(self, grace_s: float) -> list[Child]:
        """SIGTERM to all, SIGKILL after `grace_s` seconds to those that stay; returns the latter.

        Afterwards every child is reaped, the forkserver is stopped and no process of the run is left,
        grandchildren included. Returns within grace_s and a moment.
        """
        self._signal_and_wait(signal.SIGTERM, grace_s)
        stubborn = self._running
        self._signal_and_wait(signal.SIGKILL, _REAP_S)
        kill_processes_of_run(self._run)
        if self._forkserver is not None:
            self._forkserver.stop()
        return stubborn

    def _signal_and_wait(self, number: signal.Signals, at_most_s: float) -> None:
        for child in self._running:
            child.send(number)
        deadline = time.monotonic() + at_most_s
        self.poll()
        while self._running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self.poll()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.terminate(grace_s=0.0)


def processes_of_run(run: str) -> list[int]:
    """The pids of this user's live processes with ZASGD_RUN=run in their environment, this one excepted."""
    mark = f"{RUN_VARIABLE}={run}".encode()
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return sorted(pid for pid in pids if pid != os.getpid() and mark in _environ_of(pid))


def kill_processes_of_run(run: str) -> None:
    """SIGKILL whatever still carries ZASGD_RUN=run and wait until it is gone, for two seconds at most."""
    deadline = time.monotonic() + _REAP_S
    while (left := processes_of_run(run)) and time.monotonic() < deadline:
        for pid in left:
            _kill_if_of_run(pid, run)
        time.sleep(_POLL_S)


def require_main_thread() -> None:
    """Raise RuntimeError elsewhere: a child tied to the life of another thread would end with that thread."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("processes are started from the main thread: they would end with any other one")


def _kill_if_of_run(pid: int, run: str) -> None:
    """Look again through a handle of the process, so that a pid re-used since the scan is never hit."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if f"{RUN_VARIABLE}={run}".encode() in _environ_of(pid):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:  # it ended by itself
        return
    finally:
        os.close(handle)


def _environ_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"
