"""Ctrl-C at any moment of `zasgd train`: within five seconds nothing of it is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
from e2e_counting import counts, events_of, model_of, write_recipe
from e2e_job import Job, Process

from zasgd.launch.forkserver import READY

WITHIN_S = 5.0


def _while_torch_is_imported(job: Job) -> None:
    log = job.log("torch")
    job.until(log.exists, "the import of torch has begun")
    assert READY not in log.read_text()


def _just_after_the_start(job: Job) -> None:
    job.until(job.log("worker-0").exists, "the first worker is forked")


@pytest.fixture
def command(job: Job) -> Process:
    """A run that would go on for hours."""
    recipe = write_recipe(job.folder, samples=5000, batch=5, epochs=100, min_step_s=0.05, workers=2, servers=2)
    return job.train(recipe)


@pytest.mark.parametrize("moment", [_while_torch_is_imported, _just_after_the_start])
def test_ctrl_c_during_the_start_ends_everything(job: Job, command: Process, moment: Callable[[Job], None]) -> None:
    moment(job)
    command.press_ctrl_c()
    _expect_the_end(job, command)


def test_ctrl_c_in_mid_run_writes_the_model_and_a_summary_marked_interrupted(job: Job, command: Process) -> None:
    """An impatient second one changes nothing."""
    job.worker("w0", steps=3)
    job.until(lambda: job.status().get("evaluator"), "the evaluator has joined")
    command.press_ctrl_c()
    job.until(lambda: "interrupted" in command.stderr, "the first one is heard")
    command.press_ctrl_c()
    _expect_the_end(job, command)
    summary = command.result()
    assert (summary["interrupted"], summary["outcome"]) == (True, "interrupted")
    first, second = counts(model_of(job.run_dir))
    assert first.sum() > 0
    assert second.sum() > 0
    assert len(events_of(job.run_dir, "run_interrupted")) == 1
    assert (job.run_dir / "report.png").exists()
    assert (job.run_dir / "metrics.csv").exists()


def test_a_supervisor_killed_with_sigkill_takes_its_processes_along(job: Job, command: Process) -> None:
    _just_after_the_start(job)
    command.send(signal.SIGKILL)
    assert command.ends() == -signal.SIGKILL
    job.expect_nothing_left(WITHIN_S)


def _expect_the_end(job: Job, command: Process) -> None:
    pressed_at = time.monotonic()
    assert command.ends(WITHIN_S) == 130, command
    job.expect_nothing_left(WITHIN_S - (time.monotonic() - pressed_at))
    assert "Traceback" not in command.stderr, command


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_or_a_service_manager_interrupts_like_ctrl_c(
    job: Job, command: Process, number: signal.Signals
) -> None:
    job.worker("w0", steps=3)
    job.until(lambda: job.status().get("evaluator"), "the evaluator has joined")
    command.send(number)
    assert command.ends(WITHIN_S) == 128 + number, command
    job.expect_nothing_left(WITHIN_S)
    assert command.result()["interrupted"]
    assert counts(model_of(job.run_dir))[0].sum() > 0
