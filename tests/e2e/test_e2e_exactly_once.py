"""Workers come and go all the time; the weights themselves prove that each sample counted once per epoch."""

from __future__ import annotations

import os
import signal

import pytest
from e2e_counting import events_of, expect_complete_epochs, expect_each_sample_once_per_epoch, model_of, write_recipe
from e2e_job import Job

SAMPLES, BATCH, EPOCHS = 10_007, 64, 2
KILLS = 3
"""As often a crashed worker is restarted."""


@pytest.mark.timeout(240)
def test_each_sample_counts_once_per_epoch_whoever_comes_and_goes(job: Job) -> None:
    recipe = write_recipe(
        job.folder, samples=SAMPLES, batch=BATCH, epochs=EPOCHS, min_step_s=0.15, workers=6, servers=2
    )
    command = job.train(recipe)
    job.worker("w5", steps=2)
    assert job.run("drain", "w4", "--broker", job.address).ends() == 0
    os.kill(job.worker("w5")["pid"], signal.SIGTERM)

    lives = {f"w{slot}": _Lives(job, f"w{slot}") for slot in range(4)}
    job.until(lambda: all([life.killed_often_enough() for life in lives.values()]), "every worker was killed 3 times")

    assert command.ends(120.0) == 0, command
    summary = command.result()
    assert summary["samples"] == EPOCHS * SAMPLES
    assert summary["skipped"] == 0
    assert summary["reissued_batches"] > 0
    assert len(events_of(job.run_dir, "worker_lost")) == 4 * KILLS
    assert len(events_of(job.run_dir, "worker_joined")) == 6 + 4 * KILLS
    expect_complete_epochs(job.run_dir, EPOCHS, SAMPLES)
    expect_each_sample_once_per_epoch(model_of(job.run_dir), EPOCHS, summary["torn"])
    job.expect_nothing_left()


class _Lives:
    """Kills a worker under its name, life after life, once each life has pushed."""

    def __init__(self, job: Job, name: str) -> None:
        self._job, self._name = job, name
        self._killed: set[int] = set()

    def killed_often_enough(self) -> bool:
        worker = self._job.workers().get(self._name)
        if len(self._killed) < KILLS and worker and worker["steps"] >= 2 and worker["pid"] not in self._killed:
            os.kill(worker["pid"], signal.SIGKILL)
            self._killed.add(worker["pid"])
        return len(self._killed) == KILLS
