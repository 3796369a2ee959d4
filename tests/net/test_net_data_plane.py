"""Every way that gradients and parameters take, over real sockets: each batch is applied once on any line.

Each test names the public report of the fault that it is about, where there is one.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from net_proxies import LossyProxy, TcpProxy
from net_rig import SMALL, until
from net_shared_rig import SharedRig, SharingWorker, regions_in

from zasgd.core import wire
from zasgd.core.compression import CODECS, Compression
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.messages import Ack, Pull, Push
from zasgd.core.worker import GradientTask, Phase

MIB = 1 << 20
SIZE = SMALL.sizes["params"]
STEPS_S = 0.5
"""How long a worker is watched without another beside it, before and after."""
PATHS = {"arena": "arena", "direct": "direct", "relay": "relay", "mixed": "arena+direct"}
"""How a test asks to be served, and what `status` calls it; mixed: the second shard shares no memory."""


@pytest.fixture
def folders() -> Iterator[list[Path]]:
    """Two folders on real shared memory; all that was shared there is gone at the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tests-") as path:
        folders = [Path(path) / "a", Path(path) / "b"]
        for folder in folders:
            folder.mkdir()
        yield folders
        assert regions_in(*folders) == []


def layout_of(num_mib: float) -> Layout:
    return Layout((TensorSpec("w", (int(num_mib * MIB) // 4,)),))


def rig_for(path: str, folders: list[Path], **how: Any) -> SharedRig:
    """Two shards; where the paths are mixed, they look for shared memory in different places."""
    return SharedRig(folders if path == "mixed" else folders[:1] * 2, **how)


def data_path(path: str) -> dict[str, Any]:
    return {"data_path": "auto" if path == "mixed" else path}


# ---- each way, once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("inflight", [0, 1])
@pytest.mark.parametrize("path", PATHS)
def test_every_way_counts_every_batch_once(path: str, inflight: int, folders: list[Path]) -> None:
    with rig_for(path, folders, inflight=inflight, num_samples=60 * 8) as rig:
        for name in ("w0", "w1", "w2"):
            rig.sharing_worker(name=name, **data_path(path))
        until(lambda: rig.paths() == dict.fromkeys(["w0", "w1", "w2"], PATHS[path]), what="the paths in status")
        assert len(regions_in(*folders)) == (0 if path in ("direct", "relay") else 3)
        rig.exactly_once(60)
        assert rig.count(Push, shared=True) > 0 or path in ("direct", "relay")
        assert rig.count(Push) > 0 or path == "arena"
        assert rig.relay.dropped.total() == 0


def test_status_tells_how_each_worker_is_served(folders: list[Path]) -> None:
    with rig_for("mixed", folders) as rig:
        there: dict[str, dict[str, Any]] = {
            "near": {}, "forced": {"data_path": "direct"}, "relayed": {"data_path": "relay"}, "far": {"host": "away"},
        }  # fmt: skip
        for name, how in there.items():
            rig.sharing_worker(name=name, **how)
        expected = {"near": "arena+direct", "forced": "direct", "relayed": "relay", "far": "relay"}
        until(lambda: rig.paths() == expected, what="the paths in status")
        rig.exactly_once(8)


@pytest.mark.parametrize(("path", "inflight"), [("direct", 1), ("relay", 0)])
def test_parts_leave_while_the_gradient_is_computed(path: str, inflight: int, folders: list[Path]) -> None:
    """Each of two shards takes its slice in two parts; the one that commits leaves last, the other early."""
    layout = layout_of(2 * 1.25 * wire.MAX_PART_BYTES / MIB)
    with rig_for(path, folders, layout=layout, inflight=inflight, num_samples=6 * 8) as rig:
        worker = rig.sharing_worker(data_path=path)
        rig.exactly_once(6)
        assert worker.num_early == 6 * 2
        assert rig.count(Push) == 6 * 2 * 2


# ---- compression ---------------------------------------------------------------------------------------


def batch_values(task: GradientTask, size: int = SIZE) -> Any:
    """Small whole numbers that depend on the batch: sums of them are exact, also in 16 bits."""
    return np.random.default_rng(task.grants[0].batch).integers(-50, 50, size).astype(np.float32)


def sum_of_batches(num_batches: int, size: int = SIZE) -> Any:
    return sum(np.random.default_rng(batch).integers(-50, 50, size) for batch in range(num_batches))


def leaving_after(num_batches: int, worker: Callable[[], SharingWorker]) -> Callable[[GradientTask], Any]:
    """The values of a batch, of a worker that then leaves."""

    def values(task: GradientTask) -> Any:
        if task.grants[0].batch == num_batches - 1:
            worker().leave()
        return batch_values(task)

    return values


@pytest.mark.parametrize(("codec", "path"), [*zip(CODECS, cycle(["relay", "direct"]), strict=False)])
def test_compressed_pushes_lose_nothing_by_the_time_their_worker_has_left(
    codec: str, path: str, folders: list[Path]
) -> None:
    with rig_for(path, folders, num_samples=40 * 8) as rig:
        compression = Compression(codec, share=0.1)
        worker: list[SharingWorker] = []
        values = leaving_after(20, lambda: worker[0])
        worker.append(rig.sharing_worker(values=values, data_path=path, push=compression))
        rig.begin()
        worker[0].running.result()
        compressed = rig.count(Push, "" if codec == "none" else codec)
        rig.sharing_worker(values=batch_values, data_path="arena")
        summary = rig.ended()
        assert (summary["samples"], summary["torn"], summary["skipped"]) == (40 * 8, 0, 0)
        assert compressed >= 19 * 2
        assert np.allclose(rig.flat(), -sum_of_batches(40), rtol=0, atol=0.01 if codec == "int8" else 0)


@pytest.mark.parametrize(("codec", "inflight"), [*zip(CODECS, cycle([0, 1]), strict=False)])
def test_compressed_answers_leave_both_sides_with_the_same_parameters(
    codec: str, inflight: int, folders: list[Path]
) -> None:
    with rig_for("direct", folders, inflight=inflight, pull=Compression(codec, 0.1), num_samples=40 * 8) as rig:
        for path in ("direct", "relay"):
            rig.sharing_worker(values=batch_values, data_path=path)
        rig.ended()
        assert np.array_equal(rig.flat(), -sum_of_batches(40))
        assert rig.count(Ack, "" if codec == "none" else codec) >= 40 * 2


# ---- lost answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["arena", "relay", *(pytest.param(path, marks=pytest.mark.slow) for path in ("direct", "mixed"))]
)
def test_a_run_completes_although_5_percent_of_the_answers_are_lost(path: str, folders: list[Path]) -> None:
    """ipyparallel PR#598, on every way; compressed where anything travels, and with two slots."""
    both = Compression("topk", 0.1)
    with ExitStack() as proxies, rig_for(path, folders, inflight=1, pull=both, num_samples=40 * 8) as rig:
        lossy = rig.lead_shards_to(lambda port: proxies.enter_context(LossyProxy(port, 0.05, port)))
        relay = proxies.enter_context(LossyProxy(rig.relay.port, 0.05, 1))
        rig.lead_data_to(relay.port)
        control = proxies.enter_context(LossyProxy(rig.port, 0.05, 2))
        for _ in range(8):
            rig.sharing_worker(address=control.address, push=both, values=batch_values, **data_path(path))
        summary = rig.ended()
        assert (summary["samples"], summary["torn"], summary["skipped"]) == (40 * 8, 0, 0)
        assert relay.lost + sum(proxy.lost for proxy in lossy) >= 2, "nothing was lost: the test shows nothing"


# ---- slow lines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_mib", "mib_per_s"),
    [
        (4, 8),
        pytest.param(64, 8, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
        pytest.param(16, 1, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    ],
)
def test_a_push_through_a_slow_line_arrives_without_a_disconnect(
    num_mib: int, mib_per_s: int, folders: list[Path]
) -> None:
    """libzmq#2709: heartbeats time out under a frame that takes too long. At 1 MiB/s ours take longer than a beat."""
    with ExitStack() as proxies, SharedRig(folders[:1], layout=layout_of(num_mib), num_samples=8) as rig:
        (slow,) = rig.lead_shards_to(lambda port: proxies.enter_context(TcpProxy(port, mib_per_s * MIB)))
        worker = rig.sharing_worker(data_path="direct")
        summary = rig.ended(within_s=20 * num_mib / mib_per_s + 20)
        assert summary["updates"] == [1]
        assert np.array_equal(rig.flat(), np.full(num_mib * MIB // 4, -1, np.float32))
        assert (slow.num_connections, worker.node.num_lives) == (1, 1)


def test_what_comes_through_a_slow_line_is_asked_for_once(folders: list[Path]) -> None:
    """An answer that is still on its way need not be sent again: a line that is slow already would carry it twice."""
    with ExitStack() as proxies, SharedRig(folders[:1], layout=layout_of(2), num_samples=64 * 8) as rig:
        seeder = rig.sharing_worker(data_path="direct")
        until(lambda: seeder.node.phase is Phase.COMPUTING, what="the opening of the run")
        rig.lead_shards_to(lambda port: proxies.enter_context(TcpProxy(port, MIB)))
        before = rig.count(Pull)
        late = rig.sharing_worker(data_path="direct")
        until(lambda: late.node.phase is Phase.COMPUTING, 60, "its first parameters")
        assert rig.count(Pull) - before == 1


@pytest.mark.parametrize("path", ["relay", pytest.param("direct", marks=pytest.mark.slow)])
def test_a_slow_line_of_one_worker_leaves_the_rate_of_another_alone(path: str, folders: list[Path]) -> None:
    """byteps#162: two workers on one host."""
    with ExitStack() as proxies, SharedRig(folders[:1], layout=layout_of(1), num_samples=100_000) as rig:
        fast = rig.sharing_worker(data_path=path)
        rig.begin()
        until(lambda: fast.computed_at and time.monotonic() > fast.computed_at[0] + STEPS_S, 60, "steps alone")
        if path == "direct":
            rig.lead_shards_to(lambda port: proxies.enter_context(TcpProxy(port, MIB)))
        else:
            rig.lead_data_to(proxies.enter_context(TcpProxy(rig.relay.port, MIB)).port)
        joined_at = time.monotonic()
        slow = rig.sharing_worker(data_path=path)
        until(lambda: len(slow.computed_at) >= 2, 60, "a push of the slow worker through its line")
        pushed_at = slow.computed_at[1]
        assert pushed_at - joined_at > 2, "2 MiB have come and 1 MiB has gone: the line is not slow"
        slow.leave()
        until(lambda: fast.computed_at[-1] > pushed_at + STEPS_S, 60, "steps of the fast worker alone again")
        ended_at = fast.computed_at[-1]
        beside = sum(joined_at < at < pushed_at for at in fast.computed_at)
        alone = len(fast.computed_at) - beside
        alone_s = ended_at - fast.computed_at[0] - (pushed_at - joined_at)
        assert beside / (pushed_at - joined_at) > 0.4 * alone / alone_s, "the fast one waits for the slow one's line"


# ---- crowds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_eight_workers_push_at_once(path: str, folders: list[Path]) -> None:
    """pyzmq#2043, with 4 MiB each: every gradient is ready before the first one leaves."""
    with rig_for(path, folders, layout=layout_of(4), num_samples=32 * 8) as rig:
        all_ready, this_one = threading.Barrier(8), threading.local()

        def values(task: GradientTask) -> float:
            if not hasattr(this_one, "has_begun"):
                this_one.has_begun = True
                all_ready.wait(60)
            return 1.0

        for _ in range(8):
            rig.sharing_worker(values=values, **data_path(path))
        summary = rig.exactly_once(32)
        assert summary["lag"]["max"] >= 7, "they did not push at once"
