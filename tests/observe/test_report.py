"""report.png: drawn for any run, however little it told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zasgd.observe.report import _worker_counts, write_report

pytest.importorskip("matplotlib")


def joined(t: float, worker: int) -> dict[str, Any]:
    return {"t": t, "event": "worker_joined", "worker": worker, "rejoined": False}


def progress(t: float, loss: float | None) -> dict[str, Any]:
    return {"t": t, "event": "progress", "loss": loss, "lag_mean": 1.0, "lag_p99": 2.0, "samples": 1}


DESCRIBED = {"t": 0.0, "event": "run_described", "recipe": "digits", "rule": "dc-asgd-a"}
EVALUATED = {"t": 3.0, "event": "evaluated", "epoch": 1, "test_accuracy": 0.5, "test_loss": 1.0}
LAG = {"mean": 30.0, "p50": 20, "p99": 120, "max": 120, "histogram": {"0": 5, "1": 9, "20": 3, "120": 1}}
COMPLETED = {"t": 9.0, "event": "run_completed", "samples": 1297, "lag": LAG}
WHOLE = [
    DESCRIBED,
    joined(0.5, 0),
    joined(0.6, 1),
    *(progress(1.0 + i / 100, 4.0 * 0.99**i) for i in range(500)),
    EVALUATED,
    {"t": 4.0, "event": "epoch_completed", "epoch": 0, "once": 1297, "torn": 0, "skipped": 0},
    {"t": 5.0, "event": "worker_lost", "worker": 0, "reason": "SIGKILL"},
    {"t": 6.0, "event": "worker_left", "worker": 1, "reason": "drained"},
    COMPLETED,
]

RUNS = {
    "nothing": [],
    "described only": [DESCRIBED],
    "one point": [DESCRIBED, joined(0.0, 0), progress(0.0, 2.0)],
    "a loss that diverged": [progress(1.0, 2.0), progress(2.0, None)],
    "a loss of zero": [progress(1.0, 2.0), progress(2.0, 0.0)],
    "evaluated only": [EVALUATED],
    "no lag": [{**COMPLETED, "lag": {"mean": None, "histogram": {}}}],
    "interrupted": [*WHOLE[:-1], {"t": 9.0, "event": "run_interrupted"}],
    "failed": [DESCRIBED, {"t": 1.0, "event": "run_failed", "reason": "shard 1 was lost"}],
    "whole": WHOLE,
}


@pytest.mark.parametrize("events", RUNS.values(), ids=RUNS.keys())
def test_a_report_is_drawn_for_any_run(events: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "report.png"
    assert write_report(events, path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (1500, 1000)


def test_workers_are_counted_by_who_is_there_not_by_how_many_messages_said_so() -> None:
    rejoined = {"t": 2.0, "event": "worker_joined", "worker": 0, "rejoined": True}
    lost_twice = [{"t": t, "event": "worker_lost", "worker": 0} for t in (3.0, 4.0)]
    counts = [count for _, count, _ in _worker_counts([joined(0.0, 0), joined(1.0, 1), rejoined, *lost_twice])]
    assert counts == [1, 2, 2, 1, 1]


def test_without_matplotlib_there_is_no_report_and_no_error(tmp_path: Path) -> None:
    code = f"""
import importlib.util, sys
from pathlib import Path
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
from zasgd.observe.report import write_report
print(write_report([], Path({str(tmp_path / "report.png")!r})), "matplotlib" in sys.modules)
"""
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert answer.split() == ["False", "False"]
    assert list(tmp_path.iterdir()) == []


def test_drawing_touches_no_global_state_of_matplotlib(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from zasgd.observe.report import write_report
write_report([], Path({str(tmp_path / "report.png")!r}))
print("matplotlib.pyplot" in sys.modules)
"""
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert answer.strip() == "False"
