"""`make demo`: digits on real processes, a worker that joins after epoch 2 and is killed after its 20th push.

Driven by what the broker reports, never by time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zasgd.app import local, serve
from zasgd.app.display import Display
from zasgd.launch.children import Child
from zasgd.launch.supervisor import Supervisor
from zasgd.train.recipe import load_recipe

JOIN_AFTER_EPOCH = 2
KILL_AFTER_PUSHES = 20
PACED = ("run.workers=3", "run.servers=2", "train.epochs=12", "run.min_step_s=0.05")
"""Slow enough to watch, fast enough for an impatient person."""


class Visitor:
    """The fourth worker: joins once the epoch is reached, is killed once it has pushed often enough."""

    def __init__(self, job: Supervisor, display: Display) -> None:
        self._job = job
        self._display = display
        self.child: Child | None = None
        self.killed = False

    def tick(self, report: Mapping[str, Any]) -> None:
        """Look at the run and act on what has happened."""
        self._display.tick(report)
        if self.child is None:
            if (report.get("ledger") or {}).get("epoch", 0) >= JOIN_AFTER_EPOCH:
                self.child = self._job.add_worker(keep=False)
                self._display.say(f"epoch {JOIN_AFTER_EPOCH} is complete: a fourth worker joins (pid {self.child.pid})")
        elif not self.killed:
            steps = next((w["steps"] for w in report["workers"] if w["pid"] == self.child.pid), 0)
            if steps >= KILL_AFTER_PUSHES:
                os.kill(self.child.pid, signal.SIGKILL)
                self.killed = True
                self._display.say(
                    f"kill -9 {self.child.pid}: the newcomer dies after {steps} pushes; nobody else stops"
                )


def run(run_dir: Path | None, *, json_output: bool) -> int:
    """Run the demonstration; 0 when the run completed with nothing missing and nothing repeated."""
    recipe = load_recipe("digits", PACED)
    folder = run_dir or serve.new_run_dir(recipe, "demo")
    job = local.supervisor(recipe, folder, local.Options(device="cpu"))
    with Display(recipe, folder) as display:
        visitor = Visitor(job, display)
        job.watch.tick, job.watch.say = visitor.tick, display.say
        ending = job.run()
        if ending.code == 0:
            display.say(_verdict(serve.ending_of(folder), visitor))
    return local.conclude(recipe, folder, ending, json_output=json_output)


def _verdict(ending: Mapping[str, Any], visitor: Visitor) -> str:
    samples, torn, skipped = ending["samples"], ending["torn"], ending["skipped"]
    story = (
        "one worker came, pushed and was killed" if visitor.killed else "the run ended before the newcomer was killed"
    )
    return (
        f"{story}; {samples + skipped} samples accounted for, {torn} torn, {skipped} skipped, "
        f"{ending['reissued']} batches given to another worker: nothing missing, nothing repeated"
    )
