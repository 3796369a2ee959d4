"""Bad links, dead peers and crowds, over real sockets: nothing is lost, nothing is applied twice, nobody is held up.

Each test names the public report of the fault that it is about, where there is one.
"""

from __future__ import annotations

import gc
import queue
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from net_proxies import LossyProxy, RawZmtp, TcpProxy
from net_rig import SMALL, RawPeer, Rig, RunningWorker, Stepper, header, ones, until

from zasgd.core import wire
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.messages import Describe, Description, Kind, Pull, Status
from zasgd.core.node import Effect, Stop
from zasgd.net import sockets
from zasgd.net.client import Client
from zasgd.net.loop import Loop

MIB = 1 << 20
SIZE = SMALL.sizes["params"]


def memory(field: str) -> int:
    """Bytes: VmPeak or VmRSS of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def exactly_once(rig: Rig, num_batches: int, within_s: float = 40.0) -> dict[str, Any]:
    """The run ends; each batch was applied once on each shard: each adds -1 to every parameter."""
    summary = rig.completed(within_s)
    assert (summary["samples"], summary["torn"], summary["skipped"]) == (rig.epochs * rig.num_samples, 0, 0)
    assert summary["updates"] == [num_batches] * rig.num_shards
    assert np.array_equal(rig.flat(), np.full(SIZE, -num_batches, np.float32))
    return summary


# ---- frames and links --------------------------------------------------------------------------------


def test_a_frame_that_is_only_announced_reserves_nothing() -> None:
    """libzmq#4526: the length of a frame is believed only below our limit; the connection ends."""
    with Rig() as rig:
        shard_port = sockets.split_address(rig.shard(0).address)[1]
        Stepper(rig).leave()  # every thread has done its work once
        before = memory("VmPeak")
        for port in (rig.port, rig.relay.port, shard_port):
            for size in (2 * 1024 * MIB, sockets.MAX_INLINE_MESSAGE_BYTES + 1, (1 << 63) - 1):
                raw = RawZmtp(port)
                raw.sock.sendall(raw.start_of(size, more=False) + bytes(1000))
                assert raw.closed_by_peer()
        assert memory("VmPeak") - before < 256 * MIB, "glibc may give a thread or two an arena of 64 MiB meanwhile"
        rig.worker()
        exactly_once(rig, 8)


def test_a_message_that_never_ends_is_never_delivered_and_goes_with_its_sender() -> None:
    with Rig() as rig:
        raw = RawZmtp(rig.port)
        for frame in (b"", header(Kind.DESCRIBE), *(bytes(1000) for _ in range(200))):
            raw.sock.sendall(raw.start_of(len(frame), more=True) + frame)
        with RawPeer(rig.address, rig.ctx) as peer:
            assert isinstance(peer.ask(Describe()), Description)
            raw.reset()
            assert isinstance(peer.ask(Describe()), Description)
        assert rig.loop.garbage.total() == 0
        rig.worker()
        exactly_once(rig, 8)


@pytest.mark.slow
def test_64_mib_pass_through_8_mib_per_s_without_a_disconnect() -> None:
    """libzmq#2709: heartbeats time out under a frame that takes too long. Ours are small enough for slow links."""
    layout = Layout((TensorSpec("w", (16 * MIB,)),))
    with Rig(num_shards=1, layout=layout, lease_s=60) as rig, TcpProxy(rig.relay.port, 8 * MIB) as slow:
        stepper = Stepper(rig)
        stepper.open()
        sock = sockets.dealer(rig.ctx, f"tcp://{slow.address}", control=False)
        until(lambda: slow.num_connections == 1)
        pull = Pull(**stepper.ids, shard=0, seq=stepper.next_seq())
        sock.send_multipart([b"", *wire.encode(pull)])
        received, parts = 0, 0
        while parts < 16:
            assert sock.poll(20_000), f"nothing for 20 s after {received >> 20} MiB"
            received += sum(len(f) for f in sock.recv_multipart())
            parts += 1
        assert received > 64 * MIB
        seq = stepper.next_seq()
        push = [
            stepper.push(0, seq=seq, version=0, part=i, parts=16, offset=offset, grads=pieces, commit=i == 15)
            for i, (offset, pieces) in enumerate(wire.split(np.ones(16 * MIB, np.float32)))
        ]
        for part in push:
            sock.send_multipart([b"", *wire.encode(part)], copy=False)
        for _ in range(16):
            assert sock.poll(40_000), "no acknowledgement"
            answer = wire.decode(sock.recv_multipart()[1:])
            assert answer.version == 1
        assert slow.num_connections == 1, "it was connected again"
        sock.close(0)
        stepper.close()


# ---- a peer that does not read -----------------------------------------------------------------------


class TimedLoop(Loop):
    """Writes down how long each send took."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.sends_s: list[float] = []

    def _carry_out(self, effects: list[Effect]) -> None:
        began = time.perf_counter()
        super()._carry_out(effects)
        self.sends_s.append(time.perf_counter() - began)


def test_a_peer_that_stops_reading_and_dies_holds_nobody_up() -> None:
    """libzmq#2348: a ROUTER blocked for ever on the full pipe of a peer that was gone."""
    with Rig(loop=TimedLoop) as rig:
        deaf = RawZmtp(rig.port, receive_buffer=4096)
        frames = [b"", *(bytes(f) for f in wire.encode(Status()))]

        def full() -> bool:
            for _ in range(100):
                deaf.send(frames)
            return bool(rig.links.dropped["not connected or full"])

        until(full, 20, "a full pipe")
        with RawPeer(rig.address, rig.ctx) as peer:
            assert isinstance(peer.ask(Status()), Status)
            deaf.reset()
            assert isinstance(peer.ask(Status()), Status)
        rig.worker()
        exactly_once(rig, 8)
        took = sorted(rig.loop.sends_s)  # type: ignore[attr-defined]
        assert took[int(len(took) * 0.99)] < 0.05
        assert took[-1] < 1.0, "an iteration stood still"


def test_answers_to_the_departed_are_counted_and_dropped() -> None:
    with Rig() as rig:
        waits = threading.Event()
        worker = rig.worker(gradient=lambda task: waits.wait(10) and ones(SIZE, task))
        until(lambda: rig.events("run_opened"))
        until(lambda: worker.node.phase.value == "computing")
        incarnation = worker.node.incarnation
        member = rig.broker.run.members.get(incarnation)
        assert member is not None
        rig.running.look(lambda: setattr(member, "peer", (b"\0nobody",)))
        rig.running.loop.post(lambda now: rig.broker.ending.finish(now, "stopped"))
        until(lambda: rig.links.dropped["peer departed"])
        waits.set()


# ---- lost answers and cut links ----------------------------------------------------------------------


def test_a_run_completes_although_5_percent_of_the_answers_are_lost() -> None:
    """ipyparallel PR#598, on the control and on the data connection of every worker."""
    with (
        Rig(num_samples=40 * 8) as rig,
        LossyProxy(rig.relay.port, 0.05, 1) as data,
        LossyProxy(rig.port, 0.05, 2) as ctl,
    ):
        rig.lead_data_to(data.port)
        for _ in range(8):
            rig.worker(ctl.address)
        exactly_once(rig, 40)
        assert data.lost >= 2, "nothing was lost: the test shows nothing"
        assert data.lost + ctl.lost >= 4


def cutting(rig: Rig, when: dict[int, Callable[[], None]]) -> Callable[[Any], Any]:
    """A gradient that does something to the links at certain batches, once each."""

    def gradient(task: Any) -> Any:
        when.pop(task.grants[0].batch, lambda: None)()
        return ones(SIZE, task)

    return gradient


def test_a_push_is_applied_once_although_its_connection_was_reset_before_it_left() -> None:
    """The DEALER redials; the data went nowhere, PROBE finds UNKNOWN_SEQ, and it is sent again."""
    with Rig() as rig, TcpProxy(rig.relay.port) as data:
        rig.lead_data_to(data.port)
        rig.worker(gradient=cutting(rig, {2: data.cut, 5: data.cut}))
        exactly_once(rig, 8)
        assert data.num_cuts >= 2


def test_a_push_is_applied_once_although_its_acknowledgement_was_lost_with_the_connection() -> None:
    """PROBE finds the stored result."""
    with Rig() as rig, TcpProxy(rig.relay.port) as data:
        rig.lead_data_to(data.port)
        worker = rig.worker(gradient=cutting(rig, {2: lambda: data.cut_after(0), 5: lambda: data.cut_after(0)}))
        exactly_once(rig, 8)
        assert data.num_cuts >= 2
        assert worker.node.num_lives == 1


def test_a_worker_whose_broker_connection_is_reset_goes_on() -> None:
    with Rig(lease_s=2.0) as rig, TcpProxy(rig.port) as control:
        lose_a_grant = lambda: control.cut_after(0)  # noqa: E731
        worker = rig.worker(control.address, gradient=cutting(rig, {1: control.cut, 3: lose_a_grant}))
        exactly_once(rig, 8)
        assert control.num_cuts >= 2
        assert worker.node.num_lives == 1


def test_direct_links_are_repaired_too() -> None:
    with Rig(num_shards=1) as rig, TcpProxy(sockets.split_address(rig.shard(0).address)[1]) as data:
        (server,) = rig.broker.run.servers()
        rig.running.look(lambda: server.facts.update(endpoint=f"tcp://{data.address}"))
        cuts = cutting(rig, {2: data.cut, 5: lambda: data.cut_after(0)})
        rig.worker(data_path="direct", gradient=cuts)
        exactly_once(rig, 8)
        assert data.num_connections >= 3


# ---- lives -------------------------------------------------------------------------------------------


def test_a_second_worker_of_one_name_takes_over_and_the_first_is_told() -> None:
    """libzmq#4503, #2010: two live workers with one id; neither hangs and no batch is lost."""
    with Rig() as rig:
        second: queue.SimpleQueue[RunningWorker] = queue.SimpleQueue()

        def gradient(task: Any) -> Any:
            if task.grants[0].batch == 2:
                second.put(rig.worker(name="x"))
                until(lambda: len(rig.events("worker_joined")) == 2, what="the second's welcome")
            return ones(SIZE, task)

        first = rig.worker(name="x", gradient=gradient)
        stop = first.running.result()
        assert stop.code == 3
        assert "another worker joined as 'x'" in stop.reason
        exactly_once(rig, 8)
        assert second.get().running.result() == Stop("the run is completed", 0)
        joined = rig.events("worker_joined")
        assert [(j["worker"], j["rejoined"]) for j in joined] == [(0, False), (0, True)]
        assert joined[0]["incarnation"] < joined[1]["incarnation"]


def test_a_name_comes_back_at_once_after_a_kill() -> None:
    """libzmq#778: SIGKILL and a restart with the same id; training again in under 3 s."""
    with Rig() as rig:
        killed = threading.Event()

        def gradient(task: Any) -> Any:
            if task.grants[0].batch < 2:
                return ones(SIZE, task)
            killed.set()
            raise SystemExit("killed")  # the thread ends here, with its sockets open and nothing said

        rig.worker(name="x", gradient=gradient)
        assert killed.wait(10)
        began = time.monotonic()
        again = rig.worker(name="x")
        until(lambda: again.node.steps >= 1)
        assert time.monotonic() - began < 3
        exactly_once(rig, 8)


def test_a_fenced_worker_begins_another_life_and_no_batch_is_lost_or_repeated() -> None:
    with Rig() as rig:

        def gradient(task: Any) -> Any:
            if task.grants[0].batch == 3 and worker.node.num_lives == 1:
                with Client(rig.address) as client:
                    client.expel("here", 4711, "the test says so", 10)
                until(lambda: rig.events("worker_lost"))
            return ones(SIZE, task)

        worker = rig.worker(gradient=gradient, pid=4711)
        summary = exactly_once(rig, 8)
        assert worker.node.num_lives == 2
        assert summary["reissued"] >= 1
        assert [note.event for note in worker.notes] == ["joined", "fenced", "joined"]


def test_drain_lets_the_batch_finish_and_nobody_else_notices() -> None:
    """horovod#4015."""
    with Rig() as rig:
        drained = threading.Event()

        def gradient(task: Any) -> Any:
            if not drained.is_set():
                with Client(rig.address) as client:
                    assert client.drain("leaver", 10) == "worker 0 finishes its batch and leaves"
                drained.set()
            return ones(SIZE, task)

        leaver = rig.worker(name="leaver", gradient=gradient)
        assert leaver.running.result() == Stop("drained", 0)
        rig.worker(name="other")
        exactly_once(rig, 8)


# ---- crowds ------------------------------------------------------------------------------------------


def test_eight_workers_push_a_thousand_times_and_all_is_applied_once() -> None:
    """pyzmq#2043."""
    with Rig(num_samples=1000 * 8) as rig:
        for _ in range(8):
            rig.worker()
        summary = exactly_once(rig, 1000)
        assert sum(summary["lag"]["histogram"].values()) == 2000


CROWD = textwrap.dedent(
    """
    import sys, resource, threading, time
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    sys.path[:0] = [sys.argv[1]]
    from net_rig import Rig
    rig = Rig(num_shards=1)
    print(rig.port, flush=True)
    sys.stdin.readline()
    rig.__exit__()
    print("ended in order", rig.running.result().reason, flush=True)
    """
)


def test_a_broker_at_its_limit_of_descriptors_keeps_serving() -> None:
    """pyzmq#1642: a hundred dealers and 64 descriptors. Who is connected is served, and later others again."""
    process = subprocess.Popen(
        [sys.executable, "-c", CROWD, str(Path(__file__).parent)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = f"127.0.0.1:{int(process.stdout.readline())}"
        with zmq.Context() as ctx, RawPeer(address, ctx) as early:
            assert isinstance(early.ask(Status()), Status)
            crowd = [RawPeer(address, ctx) for _ in range(100)]
            for peer in crowd:
                peer.say(Status())
            until(lambda: sum(bool(peer.sock.poll(0)) for peer in crowd) >= 20, what="service for some of the crowd")
            for _ in range(50):
                assert isinstance(early.ask(Status()), Status)
            for peer in crowd:
                peer.sock.close(0)
            with RawPeer(address, ctx) as late:
                assert isinstance(late.ask(Status()), Status)
        out, _ = process.communicate("end\n", timeout=20)
        assert out == "ended in order the test is over\n"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("pushes", [100, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_memory_is_flat_over_many_pushes(pushes: int) -> None:
    """petastorm#454, with pushes of 8 MiB through the relay; both ends are in this process."""
    layout = Layout((TensorSpec("w", (2 * MIB,)),))
    marks: list[int] = []
    gradient_of = np.zeros(2 * MIB, np.float32)

    def gradient(task: Any) -> Any:
        if task.grants[0].batch in (pushes // 4, pushes - 1):
            gc.collect()
            marks.append(memory("VmRSS"))
        done = ones(1, task)
        return type(done)(gradient_of, done.stats, done.counters, done.num_samples, 1.0, True)

    with Rig(num_shards=1, layout=layout, num_samples=pushes * 8) as rig:
        rig.worker(gradient=gradient)
        summary = rig.completed(within_s=pushes / 4)
        assert summary["updates"] == [pushes]
        early, late = marks
        assert late - early < 48 * MIB, f"{early >> 20} MiB became {late >> 20} MiB"
