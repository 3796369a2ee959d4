"""A lost shard or broker ends the run in one line; the run folder stays."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from e2e_counting import events_of, expect_each_sample_once_per_epoch, model_of, write_recipe
from e2e_job import Job, Process


@pytest.fixture
def command(job: Job) -> Process:
    """A run that would go on for hours, in mid-run."""
    recipe = write_recipe(job.folder, samples=5000, batch=5, epochs=100, min_step_s=0.05, workers=2, servers=2)
    command = job.train(recipe)
    job.worker("w0", steps=3)
    return command


def test_a_lost_shard_ends_the_run(job: Job, command: Process) -> None:
    os.kill(job.status()["shards"][1]["pid"], signal.SIGKILL)
    assert command.ends() == 3, command
    assert "shard 1 was lost" in command.error_line()
    assert "shard 1 was lost" in events_of(job.run_dir, "run_failed")[0]["reason"]
    _expect_the_folder_and_nothing_else(job, command)


def test_a_lost_broker_ends_the_run(job: Job, command: Process) -> None:
    os.kill(_child_of(command, "broker"), signal.SIGKILL)
    assert command.ends() == 3, command
    assert "broker" in command.error_line()
    _expect_the_folder_and_nothing_else(job, command)


def test_members_by_hand_give_up_a_broker_that_vanished(job: Job) -> None:
    recipe = write_recipe(job.folder, samples=5000, batch=5, epochs=100, min_step_s=0.05, lease_s=2.0)
    broker = job.start("broker", recipe, "--servers", "1", "--bind", job.address, "--run-dir", job.run_dir)
    server = job.start("server", "--broker", job.address, "--broker-timeout", "2")
    worker = job.start("worker", "--broker", job.address, "--name", "ann", "--broker-timeout", "2")
    job.worker("ann", steps=3)
    broker.send(signal.SIGKILL)
    killed_at = time.monotonic()
    for member in (worker, server):
        assert member.ends(15.0) == 3, member
        assert "has not answered for 2 s" in member.error_line()
    assert time.monotonic() - killed_at >= 1.5
    broker.ends()


def _child_of(process: Process, role: str) -> int:
    """The pid of its child that plays `role`."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return next(int(c) for c in children if f"\0{role}\0" in Path(f"/proc/{c}/cmdline").read_text())


def _expect_the_folder_and_nothing_else(job: Job, command: Process) -> None:
    assert f"The run folder is kept: {job.run_dir}" in command.stderr
    assert command.result()["exit_code"] == 3
    assert (job.run_dir / "events.jsonl").exists()
    assert (job.run_dir / "recipe.toml").exists()
    job.expect_nothing_left()


def test_an_evaluator_that_is_killed_is_started_again_and_the_last_score_is_of_the_last_model(job: Job) -> None:
    recipe = write_recipe(job.folder, samples=600, batch=5, epochs=2, min_step_s=0.02, workers=2, servers=1)
    command = job.train(recipe)
    job.worker("w0", steps=3)
    evaluator = job.until(lambda: job.status().get("evaluator"), "the evaluator has joined")
    os.kill(evaluator["pid"], signal.SIGKILL)
    assert command.ends() == 0, command
    assert "eval ended with SIGKILL, restarted (1 of 3)" in command.stderr
    assert command.result()["model"] == "model.safetensors"
    expect_each_sample_once_per_epoch(model_of(job.run_dir), epochs=2, torn=0)


def test_a_broker_that_is_killed_is_named_and_not_its_last_words(job: Job) -> None:
    command = job.train(
        write_recipe(job.folder, samples=5000, batch=5, epochs=9, min_step_s=0.05, workers=1, servers=1)
    )
    job.worker("w0", steps=1)
    os.kill(_child_of(command, "broker"), signal.SIGKILL)
    assert command.ends() == 3, command
    assert "error: the broker ended with SIGKILL (log: " in command.stderr
