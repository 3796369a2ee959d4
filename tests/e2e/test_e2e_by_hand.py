"""The roles in terminals of their own: workers join and leave a running job in every way, and nobody else notices.

One cluster serves the stories. Broker and servers run where torch cannot be imported; `alice` is the worker that must
never be disturbed. The story that stops the cluster comes last.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_counting import (
    events_of,
    expect_complete_epochs,
    expect_each_sample_once_per_epoch,
    model_of,
    write_recipe,
)
from e2e_job import Job, Process

SAMPLES, BATCH, LEASE_S = 2000, 10, 3.0


class Cluster:
    """A broker, two servers, and workers by name."""

    def __init__(self, job: Job, without_torch: dict[str, str]) -> None:
        self.job = job
        self._workers: dict[str, Process] = {}
        self.recipe = write_recipe(
            job.folder, samples=SAMPLES, batch=BATCH, epochs=10_000, min_step_s=0.05, lease_s=LEASE_S
        )
        self.start_worker("alice")
        job.until(lambda: _has_loaded_zeromq(self._workers["alice"]), "alice looks for a broker")
        bind = ["--bind", job.address, "--run-dir", job.run_dir]
        self.broker = job.start("broker", self.recipe, "--servers", "2", *bind, "--json", env=without_torch)
        self.servers = [job.start("server", "--broker", job.address, env=without_torch) for _ in range(2)]

    def start_worker(self, name: str, env: dict[str, str] | None = None) -> Process:
        """Another process under this name, whoever else bears it. Alice alone takes the way through the broker."""
        options = ["--threads", "1", "--data-path", "relay" if name == "alice" else "direct"]
        self._workers[name] = self.job.start("worker", "--name", name, "--broker", self.job.address, *options, env=env)
        return self._workers[name]

    def worker(self, name: str) -> Process:
        """The process of the worker of this name, which has pushed; started unless it runs."""
        found = self._workers.get(name)
        if found is None or not found.running:
            found = self.start_worker(name)
        self.job.worker(name, steps=2, pid=found.pid)
        return found

    def ledger(self) -> dict[str, Any]:
        return dict(self.job.status()["ledger"])

    @contextmanager
    def alice_undisturbed(self) -> Iterator[None]:
        """She keeps her process and incarnation, and steps on during and after what happens inside."""
        before = self.job.worker("alice", steps=1)
        yield
        after = self.job.worker("alice", steps=before["steps"] + 2)
        self.job.worker("alice", steps=after["steps"] + 5, within_s=5.0)
        assert [after[key] for key in ("pid", "id", "incarnation")] == [
            before[key] for key in ("pid", "id", "incarnation")
        ]


@pytest.fixture(scope="module")
def cluster(make_job: Callable[[], Job], without_torch: dict[str, str]) -> Cluster:
    return Cluster(make_job(), without_torch)


def _has_loaded_zeromq(process: Process) -> bool:
    return "zmq" in Path(f"/proc/{process.pid}/maps").read_text()


# ---- joining ---------------------------------------------------------------------------------------


def test_a_worker_may_start_before_its_broker_which_needs_no_torch(
    cluster: Cluster, without_torch: dict[str, str]
) -> None:
    cluster.worker("alice")
    blocked = [sys.executable, "-c", "import torch"]
    assert subprocess.run(blocked, env={**os.environ, **without_torch}, capture_output=True).returncode != 0


def test_a_worker_without_a_broker_gives_up_and_names_the_address(job: Job) -> None:
    worker = job.run("worker", "--broker", job.address, "--connect-timeout", "0.5")
    assert worker.ends() == 3
    assert job.address in worker.error_line()


def test_status_tells_who_takes_part_and_how_far_the_run_is(cluster: Cluster) -> None:
    cluster.worker("alice")
    report = cluster.job.run("status", "--broker", cluster.job.address, "--json").result()
    worker = next(w for w in report["workers"] if w["name"] == "alice")
    assert worker.keys() >= {"id", "pid", "host", "state", "lag", "samples_per_s"}
    assert [s["id"] for s in report["shards"]] == [0, 1]
    assert {s["pid"] for s in report["shards"]} == {server.pid for server in cluster.servers}
    for shard in report["shards"]:
        assert shard.keys() >= {"id", "pid", "version", "bytes"}
        assert shard["version"] > 0
    assert sum(s["bytes"] for s in report["shards"]) == 2 * 4 * SAMPLES
    assert 0 < report["ledger"]["samples"] < report["ledger"]["samples_total"]
    table = cluster.job.run("status", "--broker", cluster.job.address)
    assert "alice" in table.stdout


def test_a_worker_with_another_model_is_refused(cluster: Cluster) -> None:
    with cluster.alice_undisturbed():
        other = cluster.start_worker("odd", env={"COUNTING_MORE": "1"})
        assert other.ends() == 2, other
        assert f"first [{SAMPLES}] float32 where the newcomer's has first [{SAMPLES + 1}]" in other.error_line()


# ---- leaving ---------------------------------------------------------------------------------------


def test_draining_nobody_says_who_is_there(cluster: Cluster) -> None:
    cluster.worker("alice")
    drain = cluster.job.run("drain", "nobody", "--broker", cluster.job.address)
    assert drain.ends() == 2
    assert "alice" in drain.error_line()


def test_sigterm_makes_a_worker_give_its_batches_back_and_leave(cluster: Cluster) -> None:
    cluster.worker("carl")
    with cluster.alice_undisturbed():
        _expect_to_leave_on(signal.SIGTERM, cluster)


def test_ctrl_c_does_the_same_and_the_next_process_under_the_name_keeps_the_id(cluster: Cluster) -> None:
    cluster.worker("carl")
    before = cluster.job.worker("carl")
    with cluster.alice_undisturbed():
        _expect_to_leave_on(signal.SIGINT, cluster)
        again = cluster.worker("carl")
    after = cluster.job.worker("carl", pid=again.pid)
    assert after["id"] == before["id"]
    assert after["incarnation"] > before["incarnation"]


def _expect_to_leave_on(number: signal.Signals, cluster: Cluster) -> None:
    carl = cluster.worker("carl")
    reissued = cluster.ledger()["reissued"]
    carl.send(number)
    assert carl.ends(5.0) == 0, carl
    assert "Traceback" not in carl.stderr
    assert number.name in _last_event(cluster, "worker_left", "carl")["reason"]
    cluster.job.until(lambda: cluster.ledger()["reissued"] > reissued, "its batches were given back", 5.0)


def test_a_worker_killed_and_started_again_at_once_pushes_within_three_seconds(cluster: Cluster) -> None:
    carl = cluster.worker("carl")
    first = cluster.job.worker("carl")
    with cluster.alice_undisturbed():
        carl.send(signal.SIGKILL)
        again = cluster.start_worker("carl")
        cluster.job.worker("carl", steps=1, pid=again.pid)
        pushed_at = time.monotonic()
    built_at = float(again.stdout.partition("built at ")[2].split()[0])
    assert pushed_at - built_at < 3.0
    assert cluster.job.worker("carl")["id"] == first["id"]


def test_a_second_worker_under_the_same_name_replaces_the_first(cluster: Cluster) -> None:
    first = cluster.worker("carl")
    before = cluster.job.worker("carl")
    with cluster.alice_undisturbed():
        second = cluster.start_worker("carl")
        after = cluster.job.worker("carl", steps=2, pid=second.pid)
        assert first.ends(5.0) == 3, first
    assert "another worker joined as 'carl'" in first.error_line()
    assert after["id"] == before["id"]
    assert after["incarnation"] > before["incarnation"]


def test_a_stopped_worker_loses_its_lease_and_joins_again_when_it_goes_on(cluster: Cluster) -> None:
    carl = cluster.worker("carl")
    before = cluster.job.worker("carl")
    reissued = cluster.ledger()["reissued"]
    with cluster.alice_undisturbed():
        carl.send(signal.SIGSTOP)
        cluster.job.until(lambda: "carl" not in cluster.job.workers(), "his lease runs out", LEASE_S + 3)
        cluster.job.until(lambda: cluster.ledger()["reissued"] > reissued, "his batches go to others", 5.0)
        assert _last_event(cluster, "worker_lost", "carl")["reason"] == "lease ran out"
    with cluster.alice_undisturbed():
        carl.send(signal.SIGCONT)
        after = cluster.job.worker("carl", steps=2, within_s=10.0)
    assert (after["pid"], after["id"]) == (before["pid"], before["id"])
    assert after["incarnation"] > before["incarnation"]
    assert "fenced" in carl.stderr


def test_a_drained_worker_finishes_its_batch_and_leaves(cluster: Cluster) -> None:
    carl = cluster.worker("carl")
    with cluster.alice_undisturbed():
        assert cluster.job.run("drain", "carl", "--broker", cluster.job.address).ends() == 0
        assert carl.ends(5.0) == 0, carl
    assert "drained" in _last_event(cluster, "worker_left", "carl")["reason"]


# ---- the end ---------------------------------------------------------------------------------------


def test_a_run_by_hand_completes_though_a_worker_leaves_in_the_middle(job: Job, without_torch: dict[str, str]) -> None:
    recipe = write_recipe(job.folder, samples=SAMPLES, batch=40, epochs=2, min_step_s=0.06)
    at = ["--broker", job.address]
    bind = ["--bind", job.address, "--run-dir", job.run_dir]
    broker = job.start("broker", recipe, "--servers", "2", *bind, "--json", env=without_torch)
    servers = [job.start("server", *at, env=without_torch) for _ in range(2)]
    evaluator = job.start("eval", *at, "--run-dir", job.folder / "eval", "--threads", "1")
    ann, bob = (job.start("worker", "--name", name, *at, "--threads", "1") for name in ("ann", "bob"))
    job.worker("ann", steps=3)
    ann.press_ctrl_c()
    assert ann.ends(5.0) == 0, ann
    assert job.status()["phase"] == "training"

    for process in (broker, *servers, evaluator, bob):
        assert process.ends() == 0, process
    ending = broker.result()
    assert (ending["event"], ending["samples"], ending["skipped"]) == ("run_completed", 2 * SAMPLES, 0)
    expect_complete_epochs(job.run_dir, 2, SAMPLES)
    expect_each_sample_once_per_epoch(model_of(job.folder / "eval"), 2, ending["torn"])


def test_stop_ends_every_process_and_leaves_the_parameters(cluster: Cluster) -> None:
    """Without an evaluator the broker writes them. This is the end of the cluster."""
    job = cluster.job
    alice = cluster.worker("alice")
    stopped_at = time.monotonic()
    assert job.run("stop", "--broker", job.address).ends() == 0
    for process in (cluster.broker, *cluster.servers, alice):
        assert process.ends(10.0 - (time.monotonic() - stopped_at)) == 0, process
        assert "Traceback" not in process.stderr
    job.expect_nothing_left()
    assert cluster.broker.result()["event"] == "run_stopped"
    with np.load(job.run_dir / "params.npz") as params:
        assert {name: params[name].shape for name in params} == {"first": (SAMPLES,), "second": (SAMPLES,)}
        for name in params:
            assert np.array_equal(params[name], np.round(params[name]))
            assert params[name].max() < 0


def _last_event(cluster: Cluster, name: str, worker: str) -> dict[str, Any]:
    def found() -> list[dict[str, Any]]:
        return [e for e in events_of(cluster.job.run_dir, name) if e["name"] == worker]

    return cluster.job.until(found, f"{name} of {worker}", 5.0)[-1]
