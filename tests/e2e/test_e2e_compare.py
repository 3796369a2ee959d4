"""A comparison that is killed leaves no process behind, and goes on where it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def until(holds: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def compares(child: int) -> bool:
    try:
        return b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    except OSError:
        return False


def command(out: Path) -> list[str]:
    grid = ["--rules", "asgd,dc-asgd-a", "--workers", "1,2", "--seeds", "1", "--set", "train.epochs=4", "--jobs", "2"]
    return [sys.executable, "-m", "zasgd", "compare", "digits", *grid, "--out", str(out)]


def finished(out: Path) -> int:
    path = out / "results.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def test_killed_it_leaves_nobody_and_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "grid"
    job = subprocess.Popen(command(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: finished(out) >= 1, "a first cell is on disk")
    workers = [child for child in children_of(job.pid) if compares(child)]
    assert len(workers) == 2
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    until(lambda: not any(compares(worker) for worker in workers), "the processes of the grid have ended")
    before = (out / "results.csv").read_text().splitlines()
    again = subprocess.run(command(out), capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr
    assert finished(out) == 4 and (out / "results.csv").read_text().splitlines()[: len(before)] == before
    assert (out / "plot.png").stat().st_size > 10_000 and "| dc-asgd-a |" in (out / "table.md").read_text()
