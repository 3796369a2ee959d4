"""What this machine can do at most, without us: the update pass alone, and bytes through bare sockets.

Both take their turns between those of what is measured against them, with as many processes and as many bytes.
"""

from __future__ import annotations

import secrets
import socket
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from zasgd.app.bench.crew import BenchError, Crew, Lane, running_crew
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.optimizer import ShardOptimizer
from zasgd.core.region import RegionPlan
from zasgd.core.rules import GroupSpec, RuleSpec, shard_groups
from zasgd.net.arena import Arena

Limit = Callable[[float], float]
"""Seconds to measure -> steps per second in total; a step takes one worker's whole model to all shards and back."""

RATE = 1e-6
"""Learning rate of measurements: parameters stay what they are, neither tiny nor infinite."""
GRADIENT = 1e-3
"""Every element of a measured gradient."""


def one_tensor(params: int) -> Layout:
    """The layout of measurements."""
    return Layout((TensorSpec("w", (params,)),))


# ---- the bare kernel -----------------------------------------------------------------------------------


@contextmanager
def bare_kernel(params: int, workers: int, servers: int, rule: RuleSpec) -> Iterator[Limit]:
    """As many processes as servers run the update over shared memory of all workers in turn; nobody sends a message.

    Raises SharedMemoryError when there is too little of it, BenchError for rules that make no update of a push.
    """
    if rule.needs_accumulator or rule.is_local:
        raise BenchError(f"{rule.name} does not make an update of every gradient: measure a rule that does")
    plan, names = RegionPlan(params), [secrets.token_hex(8) for _ in range(workers)]
    crew = Crew(servers)
    with Arena() as arena:
        for name in names:
            region = arena.create(name, plan)
            region.params[0].fill(1.0)
            region.grads[0].fill(GRADIENT)
        calls = [(_update_all, crew.lanes[k], names, plan, rule, servers, k) for k in range(servers)]
        with running_crew(crew, calls):
            # Each lane's step is one shard's share of a push.
            yield lambda seconds: statistics.mean(crew.rates(seconds))


def _update_all(lane: Lane, names: list[str], plan: RegionPlan, rule: RuleSpec, servers: int, number: int) -> None:
    layout = one_tensor(plan.num_params)
    part = layout.slices("params", servers)[number]
    optimizer = ShardOptimizer(rule, shard_groups(rule, (GroupSpec(),)), layout.segments(part), part.size)
    at = slice(part.start, part.stop)
    w = np.ones(part.size, np.float32)
    with Arena() as arena:
        regions = [arena.open(name, plan) for name in names]
        workers = [(region.params[0][at], region.grads[0][at], optimizer.new_own()) for region in regions]
        optimizer.warm()
        while True:
            for snapshot, gradient, own in workers:
                lane.begin_step()
                optimizer.apply(w, ((0, gradient),), snapshot, RATE, snapshot, own=own, num_workers=len(workers))


# ---- bare sockets --------------------------------------------------------------------------------------


@contextmanager
def bare_sockets(up_bytes: int, down_bytes: int, workers: int, servers: int) -> Iterator[Limit]:
    """As many processes as workers and servers move the bytes of a step over TCP on the loopback, and compute nothing.

    up_bytes, down_bytes: of one step, cut over the servers: what is pushed, and what each server answers once it has
    its whole share. Plain blocking sockets: larger buffers, pieces of 4 MiB or a thread per
    server changed the rate by less than a tenth.
    """
    crew = Crew(workers)
    share = [-(-count // servers) for count in (up_bytes, down_bytes)]
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=workers) for _ in range(servers)]
    ports = [listener.getsockname()[1] for listener in listeners]
    try:
        calls = [(_answer_all, listener, workers, *share) for listener in listeners]
        calls += [(_ask_all, lane, ports, *share) for lane in crew.lanes]
        with running_crew(crew, calls):
            yield lambda seconds: sum(crew.rates(seconds))
    finally:
        for listener in listeners:
            listener.close()


def _ask_all(lane: Lane, ports: list[int], up_bytes: int, down_bytes: int) -> None:
    links = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    shares = [(link, bytearray(up_bytes), memoryview(bytearray(down_bytes))) for link in links]
    while True:
        lane.begin_step()
        for link, pushed, _ in shares:
            link.sendall(pushed)
        for link, _, answer in shares:
            _fill(answer, link)


def _answer_all(listener: socket.socket, workers: int, up_bytes: int, down_bytes: int) -> None:
    # A thread per connection: one that serves them in turn deadlocks with workers that push to all before they read.
    threads = [
        threading.Thread(target=_answer, args=(listener.accept()[0], up_bytes, down_bytes)) for _ in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _answer(link: socket.socket, up_bytes: int, down_bytes: int) -> None:
    pushed, answer = memoryview(bytearray(up_bytes)), bytearray(down_bytes)
    while _fill(pushed, link):
        link.sendall(answer)


def _fill(memory: memoryview, link: socket.socket) -> bool:
    """Receive as many bytes as `memory` has; False if the other side is gone."""
    while memory:
        count = link.recv_into(memory)
        if not count:
            return False
        memory = memory[count:]
    return True
