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
        job.folder, samples=SAMPLES, batch=BATCH, epochs=EPOCHS, min_step_s=0.12, workers=6, servers=2
    )
    command = job.train(recipe)
    job.worker("w5", steps=2)
    assert job.run("drain", "w4", "--broker", job.address).ends() == 0
    os.kill(job.worker("w5")["pid"], signal.SIGTERM)

    reaper = _Reaper(job, [f"w{slot}" for slot in range(4)])
    job.until(reaper.is_done, f"each of {reaper.victims} was killed {KILLS} times")

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


class _Reaper:
    """Kills workers, life after life, once each life has pushed."""

    def __init__(self, job: Job, victims: list[str]) -> None:
        self.victims = victims
        self._job = job
        self._killed: dict[str, set[int]] = {name: set() for name in victims}

    def is_done(self) -> bool:
        """Kill whoever is due; whether all have been killed often enough."""
        for name, worker in self._job.workers().items():
            killed = self._killed.get(name, set())
            if name in self.victims and len(killed) < KILLS and worker["steps"] >= 2 and worker["pid"] not in killed:
                os.kill(worker["pid"], signal.SIGKILL)
                killed.add(worker["pid"])
        return all(len(killed) == KILLS for killed in self._killed.values())
