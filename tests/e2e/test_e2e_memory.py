"""What a shard and a broker keep in memory: what they must, and no more after many pushes than after a few.

Baseline is a shard that has just been welcomed and holds no parameters: with numba and what it has compiled that is
about 185 MiB resident, a broker 116.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_counting import write_recipe
from e2e_job import Process
from e2e_shared import SharedJob, memory_of, own_memory_of, shared_job

MIB = 1 << 20
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]
SLACK_BYTES = 64 * MIB
RULE_VECTORS = 2
"""dc-asgd-a with momentum keeps mean squares and momentum, each as long as the parameters."""


class Served:
    """A broker and one shard by hand, which light workers use one after the other."""

    def __init__(self, job: SharedJob, vector_bytes: int) -> None:
        self.job, self.vector_bytes = job, vector_bytes
        recipe = write_recipe(job.folder, samples=1000, batch=5, epochs=100_000)
        text = recipe.read_text().replace('"asgd"', '"dc-asgd-a"').replace("lr = 1.0", "lr = 0.001\nmomentum = 0.9")
        recipe.write_text(text)
        bind = ["--bind", job.address, "--run-dir", job.run_dir]
        self.broker = job.start("broker", recipe, "--servers", "1", *bind)
        self.shard = job.start("server", "--broker", job.address)
        job.until(self._is_ready, "the shard has been welcomed")
        self.baseline, self.broker_baseline = own_memory_of(self.shard.pid), own_memory_of(self.broker.pid)

    def push(self, *paths: str, steps: int) -> None:
        """So many pushes of a worker on each of these paths, all at once, until they have left."""
        before, count = self.version(), len(paths)
        layout = ["--params", self.vector_bytes // 4, "--samples", 1000]
        light = self.job.light("--count", count, *layout, "--paths", ",".join(paths), "--steps", steps)
        assert light.ends(120 + count * steps / 5) == 0, light
        assert light.stderr.count("'path': 'arena'") == paths.count("arena")
        self.job.until(lambda: not self.job.workers(), "they have left")
        self.job.until(lambda: self.version() >= before + count * steps, "the pushes are counted")

    def version(self) -> int:
        """Pushes applied, as the shard last told."""
        return int(self.job.status()["shards"][0]["version"])

    def peak(self) -> int:
        """The most that was ever resident in the shard, shared memory included."""
        return memory_of(self.shard.pid)["VmHWM"]

    def stop(self) -> None:
        """Everybody ends in order."""
        self.job.run("stop", "--broker", self.job.address)
        for process in (self.broker, self.shard):
            assert process.ends() == 0, process

    def _is_ready(self) -> bool:
        return [shard["state"] for shard in self.job.status().get("shards", [])] == ["ready"]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SharedJob]:
    with shared_job(tmp_path) as job:
        yield job


@pytest.mark.parametrize(
    ("paths", "pushes"),
    [
        (["direct", "arena", "relay"], 80),
        *(pytest.param([path], 2000, marks=SLOW) for path in ("direct", "arena", "relay")),
    ],
)
def test_after_many_pushes_of_8_mib_no_more_is_resident_than_after_a_few(
    job: SharedJob, paths: list[str], pushes: int
) -> None:
    """petastorm#454, on every way; less than one push may stay."""
    served = Served(job, 8 * MIB)
    served.push(*paths, steps=20)
    shard, broker = _resident(served.shard), _resident(served.broker)
    served.push(*paths, steps=pushes)
    assert _resident(served.shard) - shard < 8 * MIB
    assert _resident(served.broker) - broker < 8 * MIB
    assert _resident(served.broker) - served.broker_baseline < SLACK_BYTES
    _expect_no_more_than_needed(served, paths)
    served.stop()


@pytest.mark.parametrize("path", [pytest.param(path, marks=SLOW) for path in ("direct", "arena", "relay")])
def test_a_shard_of_64_mib_and_four_workers_needs_what_it_must(job: SharedJob, path: str) -> None:
    served = Served(job, 64 * MIB)
    served.push(*[path] * 4, steps=30)
    _expect_no_more_than_needed(served, [path] * 4)
    served.stop()


def _resident(process: Process) -> int:
    return own_memory_of(process.pid)


def _expect_no_more_than_needed(served: Served, paths: list[str]) -> None:
    """Parameters, the rule's vectors, and for each worker its snapshot and a window of one push.

    In shared memory those two are the vectors of its region. The seeder's parameters travel on every path, in a window
    of their own where no push needs one.
    """
    vectors = 1 + RULE_VECTORS + 2 * len(paths) + (1 if set(paths) == {"arena"} else 0)
    extra, needed = served.peak() - served.baseline, vectors * served.vector_bytes
    found = f"{served.baseline / MIB:.0f} MiB, at most {extra / MIB:.0f} more; {needed / MIB:.0f} are needed"
    print(found)
    assert extra <= needed + SLACK_BYTES, found
