"""Round trips of a small model: one push and its answer at a time, beside bare sockets moving the same bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq
from rich.console import Console
from rich.progress import track
from rich.table import Table

from zasgd.app.bench.crew import running
from zasgd.app.bench.limits import one_tensor
from zasgd.app.serve import as_json
from zasgd.core import wire
from zasgd.core.layout import Layout
from zasgd.core.messages import Grant, Push
from zasgd.core.node import Compute, Computed
from zasgd.core.parameters import ShardConfig
from zasgd.core.rules import GroupSpec, RuleSpec
from zasgd.core.run import BrokerConfig
from zasgd.core.schedule import Schedule
from zasgd.core.worker import Gradient, Worker, WorkerConfig
from zasgd.launch.ports import free_port_block
from zasgd.net import sockets
from zasgd.net.client import Client
from zasgd.net.links import MemberLinks
from zasgd.net.loop import Loop
from zasgd.net.processes import new_run_id, new_token, run_broker, run_shard

WARM_UP_TRIPS = 200
NUM_SAMPLES = 1 << 40
"""More than any measurement consumes."""
RULE = "dc-asgd-a"
PATIENCE_S = 5.0
"""For broker and shard to end as they were told."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Round trips per second, one figure per repetition."""

    direct: list[float]
    relay: list[float]
    bare_echo: list[float]
    bare_relay: list[float]

    def summary(self) -> dict[str, Any]:
        """Medians and the ratios that count."""
        medians = {name: statistics.median(getattr(self, name)) for name in self.__slots__}
        return {
            **{f"{name}_per_s": round(rate, 1) for name, rate in medians.items()},
            "direct_ratio": round(medians["direct"] / medians["bare_echo"], 4),
            "relay_ratio": round(medians["relay"] / medians["bare_relay"], 4),
        }


def roundtrip(num_params: int, seconds: float, repeats: int, *, json_output: bool) -> None:
    """Push+pull round trips of one worker and one shard, one outstanding, beside bare sockets moving the same bytes."""
    layout = one_tensor(num_params)
    base = free_port_block(6)
    console = Console(stderr=True)
    with _servers(layout, base), _bare(base + 3):
        measures: dict[str, Callable[[], float]] = {
            "direct": lambda: _ours(layout, base, "direct", seconds),
            "bare_echo": lambda: _bare_trips(layout, base + 4, seconds),
            "relay": lambda: _ours(layout, base, "relay", seconds),
            "bare_relay": lambda: _bare_trips(layout, base + 3, seconds),
        }
        found: dict[str, list[float]] = {name: [] for name in measures}
        for _ in track(range(repeats), "measuring", console=console, disable=not console.is_terminal):
            for name, measure in measures.items():
                found[name].append(measure())
    _tell(num_params, seconds, repeats, Rates(**found).summary(), json_output)


def _tell(num_params: int, seconds: float, repeats: int, summary: dict[str, Any], json_output: bool) -> None:
    if json_output:
        print(as_json({"params": num_params, "rule": RULE, "seconds": seconds, "repeats": repeats, **summary}))
        return
    title = f"round trips/s, {num_params} parameters, {RULE}, one outstanding; median of {repeats} x {seconds:g} s"
    table = Table("path", "zasgd: push, apply, new parameters", "bare sockets, same bytes", "ratio", title=title)
    for ours, bare in (("direct", "bare_echo"), ("relay", "bare_relay")):
        rates = (f"{summary[f'{ours}_per_s']:.0f}", f"{summary[f'{bare}_per_s']:.0f} ({bare.replace('_', ' ')})")
        table.add_row(ours, *rates, f"{100 * summary[f'{ours}_ratio']:.0f} %")
    Console(highlight=False).print(table)


# ---- ours --------------------------------------------------------------------------------------------


def _ours(layout: Layout, base: int, data_path: str, seconds: float) -> float:
    """The rate of the real worker core whose gradient costs nothing."""
    values = np.full(layout.sizes["params"], 1e-3, np.float32)
    empty = {"stats": np.empty(0, np.float32), "counters": np.empty(0, np.int64)}
    config = WorkerConfig(data_path=data_path)
    node = Worker(time.monotonic(), new_token(), config, layout, NUM_SAMPLES, lambda: {"params": values, **empty})
    began_at, trips = 0.0, 0

    def compute(effect: Compute) -> None:
        nonlocal began_at, trips
        trips += 1
        now = time.monotonic()
        if trips == WARM_UP_TRIPS:
            began_at = now
        if trips >= WARM_UP_TRIPS and now - began_at >= seconds:
            loop.post(lambda now: node.leave(now, "measured"))
        if trips == 1:
            effect.task.memory.grads[:] = values
        gradient = Gradient(effect.task.memory.grads, **empty, num_samples=1, loss=1.0, finite=True)
        done = Computed(effect.task, gradient)
        loop.post(lambda now: node.on_done(now, done))

    ctx = sockets.context()
    loop = Loop(node, MemberLinks(ctx, f"127.0.0.1:{base}"), compute=compute)
    loop.run()
    ctx.destroy(linger=0)
    return (trips - WARM_UP_TRIPS) / seconds


@contextmanager
def _servers(layout: Layout, base: int) -> Iterator[None]:
    shard = ShardConfig(1, RuleSpec(RULE), (GroupSpec(),), Schedule(lr=1e-4, epochs=1))
    config = BrokerConfig(new_run_id(), "{}", 1, 1, 1, shard.to_json(), data_port=base + 1)
    addresses = (f"127.0.0.1:{base}", f"127.0.0.1:{base + 1}")
    broker = running(run_broker, config, *addresses, patience_s=PATIENCE_S)
    shard = running(run_shard, addresses[0], f"127.0.0.1:{base + 2}", patience_s=PATIENCE_S)
    with broker, shard:
        yield
        with Client(addresses[0]) as client:
            client.stop(5.0, interrupted=True)


# ---- the limit -----------------------------------------------------------------------------------------


def _bare_trips(layout: Layout, port: int, seconds: float) -> float:
    """The rate of a bare DEALER sending the frames of such a push and getting as many bytes back."""
    push = Push(
        layout_hash=layout.hash,
        grads=(np.zeros(layout.sizes["params"], np.float32),),
        grants=(Grant(0, 0, 0, 1),),
        num_samples=1,
        commit=True,
    )
    frames = [b"", *wire.encode(push)]
    with zmq.Context() as ctx, ctx.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(WARM_UP_TRIPS):
            sock.send_multipart(frames)
            sock.recv_multipart()
        began_at, trips = time.monotonic(), 0
        while time.monotonic() - began_at < seconds:
            sock.send_multipart(frames)
            sock.recv_multipart()
            trips += 1
        return trips / seconds


@contextmanager
def _bare(port: int) -> Iterator[None]:
    """A bare relay at `port` in front of a bare echo at `port + 1`."""
    with running(_bare_echo, port + 1), running(_bare_relay, port, port + 1):
        yield


def _bare_echo(port: int) -> None:
    with zmq.Context() as ctx, ctx.socket(zmq.ROUTER) as sock:
        sock.bind(f"tcp://127.0.0.1:{port}")
        while True:
            sock.send_multipart(sock.recv_multipart())


def _bare_relay(port: int, behind: int) -> None:
    with zmq.Context() as ctx, ctx.socket(zmq.ROUTER) as front, ctx.socket(zmq.DEALER) as back:
        front.bind(f"tcp://127.0.0.1:{port}")
        back.connect(f"tcp://127.0.0.1:{behind}")
        poller = zmq.Poller()
        poller.register(front, zmq.POLLIN)
        poller.register(back, zmq.POLLIN)
        while True:
            for ready, _ in poller.poll():
                (back if ready is front else front).send_multipart(ready.recv_multipart())
