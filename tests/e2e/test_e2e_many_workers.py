"""A crowd of light workers on one machine: each gets its turn, and broker and shards bear them within bounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_counting import events_of, write_recipe
from e2e_shared import SharedJob, num_files_of, own_memory_of, shared_job

KIB, MIB = 1 << 10, 1 << 20
NUM_PARAMS = 2000
VECTOR_BYTES = 4 * NUM_PARAMS
CONNECTION_BYTES = 256 * KIB
"""What a connected peer may cost beyond its vectors: ZeroMQ's buffers and our books (measured: 150 KiB)."""
SLACK_BYTES = 16 * MIB
SLACK_FILES = 16
SLOW = [pytest.mark.slow, pytest.mark.timeout(400)]


class Crowd:
    """A broker, two shards and `count` workers that push as fast as they can, all on one path."""

    def __init__(self, job: SharedJob, count: int, path: str, window_s: float) -> None:
        self.job, self.count = job, count
        recipe = write_recipe(job.folder, samples=20_000, batch=5, epochs=100_000)
        self.broker = job.start("broker", recipe, "--servers", "2", "--bind", job.address, "--run-dir", job.run_dir)
        self.shards = [job.start("server", "--broker", job.address) for _ in range(2)]
        job.until(self._is_ready, "the shards have been welcomed")
        self.alone = self.measured()
        how = ["--params", NUM_PARAMS, "--samples", 20_000, "--paths", path, "--window-s", window_s]
        self.workers = job.light("--count", count, *how)

    def rates(self) -> list[float]:
        """Steps/s of each worker, within a window that began when all had begun; rising."""
        self.job.until(lambda: self.workers.stdout.endswith("\n"), "the window is over", 200)
        counted = self.workers.result()
        return sorted(steps / counted["window_s"] for steps in counted["steps"])

    def measured(self) -> list[tuple[int, int]]:
        """Own memory in bytes and open descriptors of the broker and of each shard."""
        return [(own_memory_of(p.pid), num_files_of(p.pid)) for p in (self.broker, *self.shards)]

    def stop(self) -> None:
        """Everybody ends in order."""
        self.job.run("stop", "--broker", self.job.address)
        for process in (self.broker, *self.shards, self.workers):
            assert process.ends() == 0, process

    def _is_ready(self) -> bool:
        return [shard["state"] for shard in self.job.status().get("shards", [])] == ["ready"] * 2


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SharedJob]:
    with shared_job(tmp_path) as job:
        yield job


@pytest.mark.parametrize(
    ("count", "path", "window_s"),
    [(40, "relay", 2), pytest.param(200, "relay", 15, marks=SLOW), pytest.param(200, "auto", 15, marks=SLOW)],
)
def test_a_crowd_is_served_fairly_and_within_bounds(job: SharedJob, count: int, path: str, window_s: float) -> None:
    crowd = Crowd(job, count, path, window_s)
    job.until(lambda: len(job.workers()) == count, "all have joined", 200)
    joined = crowd.measured()
    rates = crowd.rates()
    served = crowd.measured()
    report = job.status()
    print(f"steps/s: {rates[0]:.2f} to {rates[-1]:.2f}, median {statistics.median(rates):.2f}, all {sum(rates):.0f}")
    print("MiB and descriptors, alone, joined, served:", *map(_in_words, (crowd.alone, joined, served)), sep="\n  ")

    assert rates[0] >= statistics.median(rates) / 2
    assert report["ends"] == {}
    assert len(events_of(job.run_dir, "worker_joined")) == len(report["workers"]) == count
    assert {worker["data_path"] for worker in report["workers"]} == {"arena" if path == "auto" else path}
    _expect_bounded(crowd, joined, served, path)
    crowd.stop()


def _expect_bounded(crowd: Crowd, joined: list[tuple[int, int]], served: list[tuple[int, int]], path: str) -> None:
    """Of each worker: its snapshot, a push and an answer, its connection; and no more after a while than at first."""
    each = 3 * VECTOR_BYTES + CONNECTION_BYTES
    for (alone, files_alone), (first, _), (late, files) in zip(crowd.alone, joined, served, strict=True):
        assert late - alone < crowd.count * each + SLACK_BYTES
        assert late - first < SLACK_BYTES
        # Two connections to the broker; or one there and, to a shard, one, and two descriptors of a region.
        assert files - files_alone <= (3 if path == "auto" else 2) * crowd.count + SLACK_FILES


def _in_words(measured: list[tuple[int, int]]) -> str:
    return ", ".join(f"{memory / MIB:.0f}/{files}" for memory, files in measured)
