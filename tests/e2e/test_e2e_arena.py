"""Shared memory of real runs: it is there while somebody uses it, and gone afterwards, however its users end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_counting import events_of, expect_complete_epochs, expect_each_sample_once_per_epoch, model_of, write_recipe
from e2e_job import START_S, Process
from e2e_shared import SharedJob, shared_job

LEASE_S = 2.0
FENCE_S = 5.0
"""A worker whose process ended is fenced as soon as its supervisor has seen it; then the shards let go."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SharedJob]:
    with shared_job(tmp_path) as job:
        yield job


def endless(job: SharedJob, workers: int) -> Process:
    """A run that would go on for hours, with every worker in shared memory."""
    recipe = write_recipe(job.folder, samples=5000, batch=5, epochs=100, min_step_s=0.05, workers=workers, servers=2)
    command = job.train(recipe)
    for slot in range(workers):
        assert job.worker(f"w{slot}", steps=2)["data_path"] == "arena"
    assert len(job.regions()) == workers
    return command


# ---- while a run goes on -------------------------------------------------------------------------------


def test_a_killed_and_a_stopped_worker_leave_no_memory_behind_and_no_sample_is_lost(job: SharedJob) -> None:
    """And `zasgd clean` takes nothing from a run that goes on."""
    recipe = write_recipe(
        job.folder, samples=3000, batch=5, epochs=1, min_step_s=0.05, lease_s=LEASE_S, workers=4, servers=2
    )
    command = job.train(recipe)
    workers = [job.worker(f"w{slot}", steps=2) for slot in range(4)]
    assert [worker["data_path"] for worker in workers] == ["arena"] * 4
    others, killed, stopped = workers[:2], workers[2], workers[3]
    regions = {worker["name"]: job.region_of(worker["pid"]) for worker in workers}
    assert set(regions.values()) == job.regions()
    os.kill(stopped["pid"], signal.SIGSTOP)
    cleaned = job.run("clean", "--json").result()
    assert (cleaned["removed"], len(cleaned["in_use"])) == ([], 4)

    os.kill(killed["pid"], signal.SIGKILL)
    _expect_gone_while_the_run_goes_on(job, regions["w2"])
    job.until(lambda: "w3" not in job.workers(), "the lease of the stopped one runs out")
    os.kill(stopped["pid"], signal.SIGCONT)
    _expect_gone_while_the_run_goes_on(job, regions["w3"])

    reborn = job.worker("w3", steps=2)
    assert (reborn["pid"], reborn["data_path"]) == (stopped["pid"], "arena")
    assert reborn["incarnation"] > stopped["incarnation"]
    assert job.region_of(reborn["pid"]) in job.regions() - set(regions.values())
    assert "fenced" in job.log("worker-3").read_text()
    for before in others:
        after = job.worker(before["name"], steps=before["steps"] + 5)
        assert (after["pid"], after["incarnation"]) == (before["pid"], before["incarnation"])
        assert job.region_of(after["pid"]) == regions[before["name"]]

    assert command.ends() == 0, command
    summary = command.result()
    assert (summary["samples"], summary["skipped"]) == (3000, 0)
    assert len(events_of(job.run_dir, "worker_lost")) == 2
    expect_complete_epochs(job.run_dir, 1, 3000)
    expect_each_sample_once_per_epoch(model_of(job.run_dir), 1, summary["torn"])
    job.expect_nothing_left()


def _expect_gone_while_the_run_goes_on(job: SharedJob, region: str) -> None:
    job.until(lambda: region not in job.regions(), f"{region} is gone", FENCE_S)
    assert job.status().get("phase") == "training"


# ---- after a run ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_leaves_no_memory_behind(job: SharedJob) -> None:
    command = endless(job, workers=1)
    command.press_ctrl_c()
    assert command.ends() == 130, command
    job.expect_nothing_left()


def test_what_a_run_leaves_that_is_killed_as_a_whole_is_removed_by_clean(job: SharedJob) -> None:
    command = endless(job, workers=2)
    left = job.regions()
    everybody = [int(line.split()[1].rstrip(":")) for line in job.left()]
    assert len(everybody) >= 7, "supervisor, broker, two servers, torch, two workers"
    for number in (signal.SIGSTOP, signal.SIGKILL):  # so that nobody sees another one die
        for pid in everybody:
            os.kill(pid, number)
    assert command.ends() == -signal.SIGKILL
    job.until(lambda: not job.left(), "everybody is dead")
    assert job.regions() == left, "nobody was there to remove them"

    clean = job.run("clean")
    assert clean.ends() == 0
    removed = {line.split()[1] for line in clean.stdout.splitlines() if line.startswith("removed ")}
    assert {f"zasgd-{name}" for name in removed} == left
    assert job.regions() == set()
    assert job.run("clean").stdout.strip() == f"nothing to remove in {job.shm}"


# ---- where there is none -------------------------------------------------------------------------------


@pytest.fixture
def tiny_job(tmp_path: Path) -> Iterator[SharedJob]:
    """Its shared memory is 1 MiB in all."""
    with shared_job(tmp_path) as job:
        mounting = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(job.shm)]
        if os.geteuid() or subprocess.run(mounting, capture_output=True).returncode:
            pytest.skip("only root may mount a small tmpfs, and not in every container")
        try:
            yield job
        finally:
            subprocess.run(["umount", "--lazy", str(job.shm)], check=True)


def test_with_too_little_shared_memory_a_run_completes_over_the_network_and_says_so(tiny_job: SharedJob) -> None:
    job, samples = tiny_job, 200_000
    recipe = write_recipe(job.folder, samples=samples, batch=20_000, epochs=2, workers=1, servers=1)
    command = job.train(recipe)
    assert command.ends(2 * START_S) == 0, command
    notices = [line for line in job.log("worker-0").read_text().splitlines() if "arena_refused" in line]
    assert len(notices) == 1, notices
    assert "shared memory is too small: 3.1 MiB wanted, 1.0 MiB free" in notices[0]
    expect_each_sample_once_per_epoch(model_of(job.run_dir), 2, command.result()["torn"])
