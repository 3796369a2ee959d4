"""A broker, servers and workers as processes of their own, whose gradients cost nothing but the writing of them.

Decides what a measured worker does instead of computing. Everything else is what a run consists of.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from zasgd.app.bench.crew import BenchError, Crew, Lane, Meter, running
from zasgd.app.bench.limits import GRADIENT, RATE, one_tensor
from zasgd.core.compression import Compression
from zasgd.core.copying import copy_checked
from zasgd.core.layout import Layout
from zasgd.core.node import Note
from zasgd.core.optimizer import ShardOptimizer
from zasgd.core.parameters import ShardConfig
from zasgd.core.rules import GroupSpec, RuleSpec
from zasgd.core.run import BrokerConfig
from zasgd.core.schedule import Schedule
from zasgd.core.transfer import Gradient
from zasgd.core.worker import GradientTask, Worker, WorkerConfig
from zasgd.launch.ports import claim_port_block
from zasgd.net.arena import default_folder, sweep
from zasgd.net.processes import Post, host_name, new_run_id, new_token, run_broker, run_member, run_shard

NUM_SAMPLES = 1 << 40
"""More than any measurement consumes."""
SHAPE = 100
"""Of the Gamma distribution of compute times: their standard deviation is a tenth of their mean."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured.

    path: `arena`, `direct` or `relay`. writes: workers copy a gradient into place at each step, else it lies there.
    push, pull: codecs of what travels. step_s: mean of the compute time that a worker sleeps before it writes.
    """

    path: str
    params: int
    workers: int
    servers: int
    rule: RuleSpec
    writes: bool = False
    push: Compression = field(default_factory=Compression)
    pull: Compression = field(default_factory=Compression)
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What came of one turn: steps per second of all workers, and milliseconds per step of one worker.

    write_ms: of copying the gradient. apply_ms: of one shard's update. cpu_ms: of processor time by role, all
    processes of a role together.
    """

    steps_per_s: float
    write_ms: float
    apply_ms: float
    cpu_ms: dict[str, float]


class Cluster:
    """The processes, ready for their turns."""

    def __init__(self, setup: Setup) -> None:
        self.crew = Crew(setup.workers)
        self.writes = [Meter() for _ in range(setup.workers)]
        self.applies = [Meter() for _ in range(setup.servers)]
        self.pids: dict[str, list[int]] = {}

    def turn(self, seconds: float) -> Turn:
        """Let the workers work, `seconds` of which count. Raises BenchError."""
        writes, applies = Meter.total(self.writes), Meter.total(self.applies)
        cpu, steps = self._cpu_s(), self.crew.num_steps
        rate = sum(self.crew.rates(seconds))
        steps = self.crew.num_steps - steps
        return Turn(
            rate,
            Meter.total(self.writes).mean_ms_since(writes),
            Meter.total(self.applies).mean_ms_since(applies),
            {role: 1e3 * (now_s - cpu[role]) / steps for role, now_s in self._cpu_s().items()},
        )

    def _cpu_s(self) -> dict[str, float]:
        return {role: sum(map(_cpu_seconds, pids)) for role, pids in self.pids.items()}


@contextmanager
def running_cluster(setup: Setup) -> Iterator[Cluster]:
    """Start everything; kill everything at the end, and remove what memory was shared."""
    cluster = Cluster(setup)
    with ExitStack() as stack:
        stack.callback(sweep, default_folder())  # killed processes leave their regions behind
        base = stack.enter_context(claim_port_block(2)).base
        broker, relay = (f"127.0.0.1:{port}" for port in (base, base + 1))
        calls = [
            ("broker", run_broker, _broker_config(setup, base + 1), broker, relay),
            *(("shards", _serve, broker, meter) for meter in cluster.applies),
            *(("workers", _work, broker, setup, *own) for own in zip(cluster.crew.lanes, cluster.writes, strict=True)),
        ]
        for role, *call in calls:
            process = stack.enter_context(running(*call))
            cluster.crew.processes.append(process)
            cluster.pids.setdefault(role, []).append(process.pid or 0)
        yield cluster


def _broker_config(setup: Setup, data_port: int) -> BrokerConfig:
    schedule = Schedule(lr=RATE, epochs=1)
    shard = ShardConfig(setup.servers, setup.rule, (GroupSpec(),), schedule, pull=setup.pull)
    return BrokerConfig(new_run_id(), "{}", setup.servers, 1, 1, shard.to_json(), data_port=data_port)


def _serve(broker: str, meter: Meter) -> None:
    # The core has no clock, so it is timed from outside.
    ShardOptimizer.apply = meter.timed(ShardOptimizer.apply)  # type: ignore[method-assign]
    run_shard(broker, "127.0.0.1:0")


def _work(broker: str, setup: Setup, lane: Lane, meter: Meter) -> None:
    layout = one_tensor(setup.params)
    config = WorkerConfig(host=host_name(), pid=os.getpid(), data_path=setup.path, push=setup.push)
    node = Worker(time.monotonic(), new_token(), config, layout, NUM_SAMPLES, lambda: _initial(layout))
    run_member(node, broker, _Stand(setup, node, lane, meter), note=_insist)


def _initial(layout: Layout) -> dict[str, np.ndarray]:
    sizes = layout.sizes
    buffers = {"stats": np.empty(sizes["stats"], np.float32), "counters": np.empty(sizes["counters"], np.int64)}
    return {"params": np.ones(sizes["params"], np.float32), **buffers}


def _insist(note: Note) -> None:
    if note.event == "arena_refused":
        raise BenchError(f"no memory is shared: {note.fields['why']}")


class _Stand:
    """Stands for the model: sleeps as long as it would compute, and writes the gradient that it would."""

    def __init__(self, setup: Setup, node: Worker, lane: Lane, meter: Meter) -> None:
        self._setup, self._node, self._lane = setup, node, lane
        self._write = meter.timed(self._copy)
        self._random = np.random.default_rng()
        self._placed: set[int] = set()
        self._gradient = np.full(setup.params if setup.writes else 0, GRADIENT, np.float32)
        if setup.writes:
            copy_checked(self._gradient.ctypes.data, np.ones(1, np.float32).ctypes.data, 0)  # compiled before the turn

    def __call__(self, task: GradientTask, post: Post) -> Gradient:
        self._check_path()
        self._lane.begin_step()
        if self._setup.step_s:
            time.sleep(self._random.gamma(SHAPE, self._setup.step_s / SHAPE))
        memory = task.memory
        if self._setup.writes:
            self._write(task, post)
        elif memory.grads.ctypes.data not in self._placed:
            self._placed.add(memory.grads.ctypes.data)
            memory.grads.fill(GRADIENT)
        return Gradient(memory.grads, memory.stats, memory.counters, num_samples=1, loss=1.0, finite=True)

    def _copy(self, task: GradientTask, post: Post) -> None:
        """As a hook copies what backward leaves: what is final may leave while the rest is written."""
        into, source = task.memory.grads.ctypes.data, self._gradient.ctypes.data
        for start, stop in task.parts or ((0, self._setup.params),):
            copy_checked(into + 4 * start, source + 4 * start, stop - start)
            if task.parts:
                post(lambda now, start=start: self._node.on_part(now, task, start))  # type: ignore[misc]

    def _check_path(self) -> None:
        paths = self._node.paths
        if paths is not None and paths.name != self._setup.path:
            raise BenchError(f"data goes by {paths.name}, not by {self._setup.path}")


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process and its threads; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
