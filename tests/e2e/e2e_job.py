"""Real processes of real command lines, watched from outside; none of them outlives its job."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from zasgd.launch.ports import free_port_block
from zasgd.net.client import BrokerError, Client

T = TypeVar("T")
MARKER = "ZASGD_E2E"
START_S = 60.0
"""For what begins with importing torch, on a machine that does other things too."""
PORTS = 8
USER_MODULES = Path(__file__).parents[1] / "data"


def until(ask: Callable[[], T], within_s: float, what: str, explain: Callable[[], str] = str) -> T:
    """The first true answer; fails when none comes in time."""
    deadline = time.monotonic() + within_s
    while True:
        found = ask()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}\n{explain()}"
        time.sleep(0.03)


class Process:
    """One command line at work; its output goes to files."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self.name, self.pid = name, popen.pid
        self._popen, self._out, self._err = popen, out, err

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def press_ctrl_c(self) -> None:
        """SIGINT to the whole process group, as a terminal does."""
        os.killpg(self.pid, signal.SIGINT)

    def ends(self, within_s: float = START_S) -> int:
        """Its exit code, once it has ended by itself."""
        try:
            return self._popen.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within_s:g} s: {self}") from None

    def result(self) -> dict[str, Any]:
        """The object on the last line of stdout."""
        found: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return found

    def error_line(self) -> str:
        """The one line on stderr that says what is wrong; fails when there are others, or a traceback."""
        assert "Traceback" not in self.stderr, self.stderr
        lines = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.stderr
        return lines[0]

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})\n  stdout: {self.stdout[-1500:]}\n  stderr: {self.stderr[-3000:]}"


class Job:
    """The processes of one test, marked by a variable in their environment that their children inherit.

    folder: where they run and write. address: HOST:PORT of the job's broker; its block of ports is its own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid4().hex
        self.port = free_port_block(PORTS, random.SystemRandom().randrange(20_000, 32_000))
        self.address = f"127.0.0.1:{self.port}"
        self.processes: list[Process] = []
        self._shm_before = _shared_memory()

    # ---- starting ---------------------------------------------------------------------------------

    def start(self, *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Process:
        """`python -m zasgd ARGUMENTS` in a session of its own, as if from a terminal of its own."""
        name = f"{len(self.processes)}-{arguments[0]}"
        out, err = self.folder / f"{name}.out", self.folder / f"{name}.err"
        modules = [(env or {}).get("PYTHONPATH", ""), str(USER_MODULES), os.environ.get("PYTHONPATH", "")]
        environ = {**os.environ, **(env or {}), MARKER: self.mark, "PYTHONPATH": os.pathsep.join(filter(None, modules))}
        with out.open("wb") as stdout, err.open("wb") as stderr:
            popen = subprocess.Popen(
                [sys.executable, "-m", "zasgd", *map(str, arguments)],
                cwd=cwd or self.folder,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environ,
                start_new_session=True,
            )
        self.processes.append(Process(f"zasgd {' '.join(map(str, arguments))}", popen, out, err))
        return self.processes[-1]

    def run(self, *arguments: str | Path, within_s: float = START_S, env: Mapping[str, str] | None = None) -> Process:
        """Start it and wait for its end."""
        process = self.start(*arguments, env=env)
        process.ends(within_s)
        return process

    def train(self, recipe: str | Path, *options: str | Path, env: Mapping[str, str] | None = None) -> Process:
        """`zasgd train` on this job's ports, into the folder `run`."""
        return self.start(
            "train", recipe, "--json", "--port", str(self.port), "--run-dir", self.run_dir, *options, env=env
        )

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    # ---- watching ---------------------------------------------------------------------------------

    def until(self, ask: Callable[[], T], what: str, within_s: float = START_S) -> T:
        """The first true answer; a failure shows what the processes said."""
        return until(ask, within_s, what, lambda: "\n".join(map(str, self.processes)) + self._logs())

    def status(self) -> dict[str, Any]:
        """What the broker reports, or nothing while there is none."""
        try:
            with Client(self.address) as client:
                return dict(client.status(1.0))
        except BrokerError:
            return {}

    def workers(self) -> dict[str, dict[str, Any]]:
        """Live workers by name."""
        return {w["name"]: w for w in self.status().get("workers", []) if w["state"] not in ("admitting", "fencing")}

    def worker(self, name: str, steps: int = 0, pid: int = 0, within_s: float = START_S) -> dict[str, Any]:
        """The report on a worker, once it has made so many steps (in the process `pid`, where one is given)."""

        def found() -> dict[str, Any] | None:
            worker = self.workers().get(name)
            return worker if worker and worker["steps"] >= steps and pid in (0, worker["pid"]) else None

        return self.until(found, f"worker {name} with {steps} steps", within_s)

    def log(self, name: str) -> Path:
        """A log of the run folder."""
        return self.run_dir / "logs" / f"{name}.log"

    def _logs(self) -> str:
        logs = sorted((self.run_dir / "logs").glob("*.log"))
        return "".join(f"\n{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs)

    # ---- the end ----------------------------------------------------------------------------------

    def left(self) -> list[str]:
        """What still runs of this job, with its command line."""
        return [f"pid {pid}: {_command_of(pid)}" for pid in _processes_with(f"{MARKER}={self.mark}")]

    def expect_nothing_left(self, within_s: float = 5.0) -> None:
        """No process, no port, no shared memory."""
        until(lambda: not self.left(), within_s, "no process is left", lambda: str(self.left()))
        until(self._ports_are_free, within_s, f"ports {self.port} to {self.port + PORTS - 1} are free")
        until(lambda: not _shared_memory() - self._shm_before, within_s, "/dev/shm as before")

    def close(self) -> None:
        """Kill and reap whatever is left, also of a test that failed."""
        for pid in _processes_with(f"{MARKER}={self.mark}"):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # it went with its parent
                continue
        for process in self.processes:
            process.ends(10.0)
        self.expect_nothing_left()

    def _ports_are_free(self) -> bool:
        return all(_can_bind(port) for port in range(self.port, self.port + PORTS))


def ports_are_free(*ports: int) -> bool:
    """Each can be bound on loopback."""
    return all(map(_can_bind, ports))


def _can_bind(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen(1)
        except OSError:
            return False
    return True


def _processes_with(variable: str) -> list[int]:
    return [int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit() and variable.encode() in _environ_of(e)]


def _environ_of(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it ended, or is another user's
        return []


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "ended"


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
