"""Measurements of this machine. Each figure stands beside a physical limit measured in the same run, in turns."""

from __future__ import annotations

import multiprocessing
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

from zasgd.app.serve import as_json
from zasgd.core import wire
from zasgd.core.layout import Layout, Segment, TensorSpec
from zasgd.core.messages import Grant, Push
from zasgd.core.node import Compute, Computed
from zasgd.core.optimizer import ShardOptimizer
from zasgd.core.parameters import ShardConfig
from zasgd.core.rules import RULES, GroupSpec, RuleSpec, refusal, shard_groups
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
    layout = Layout((TensorSpec("w", (num_params,)),))
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


# ---- the kernels ---------------------------------------------------------------------------------------


BASES = {
    "sgd": GroupSpec(weight_decay=1e-4),
    "momentum": GroupSpec(momentum=0.9, weight_decay=1e-4),
    "adamw": GroupSpec(algorithm="adamw", weight_decay=1e-4),
}
"""Base optimizers whose passes are measured; their constants change no speed."""
LOCAL = "local"
"""Stands for the base of rules whose shards see no gradient."""


@dataclass(frozen=True, slots=True)
class KernelRate:
    """How fast one rule applies pushes: medians, beside copying as many bytes.

    vectors: as long as the slice, float32, that a push reads or writes; one that it changes counts twice.
    """

    rule: str
    base: str
    params: int
    vectors: int
    apply_s: float
    copy_s: float

    def to_plain(self) -> dict[str, Any]:
        """What is printed of it."""
        num_bytes = 4 * self.params * self.vectors
        return {
            "rule": self.rule,
            "base": self.base,
            "vectors": self.vectors,
            "million_params_per_s": round(self.params / self.apply_s / 1e6, 1),
            "gb_per_s": round(num_bytes / self.apply_s / 1e9, 2),
            "copy_gb_per_s": round(num_bytes / self.copy_s / 1e9, 2),
            "ratio": round(self.copy_s / self.apply_s, 4),
        }


def kernels(params: int, repeats: int, rules: str, *, json_output: bool) -> None:
    """What a shard of `params` parameters does per push on one core, beside np.copyto of as many bytes.

    rules: names joined by commas, empty for all. Raises RuleError for a name that is none.
    """
    names = [name.strip() for name in rules.split(",")] if rules else [*RULES, "dana+ga"]
    cases = [case for name in names for case in _kernel_cases(name)]
    console = Console(stderr=True)
    measuring = track(cases, "measuring", console=console, disable=not console.is_terminal)
    rows = [_kernel_rate(*case, params, repeats).to_plain() for case in measuring]
    if json_output:
        print(as_json({"params": params, "repeats": repeats, "kernels": rows}))
        return
    title = f"one push on one core, {params} parameters, and a copy of as many bytes; median of {repeats}"
    table = Table("rule", "base", "vectors", "M param/s", "GB/s", "copy GB/s", "of copy", title=title)
    table.columns[0].no_wrap = True
    for row in rows:
        *cells, ratio = row.values()
        table.add_row(*map(str, cells), f"{100 * ratio:.0f} %")
    Console(highlight=False).print(table)


def _kernel_cases(name: str) -> list[tuple[RuleSpec, str, GroupSpec]]:
    """A rule with each base optimizer that it can train."""
    rule = RuleSpec(name)
    if rule.is_local:
        return [(rule, LOCAL, *shard_groups(rule, (GroupSpec(),)))]
    able = {base: group for base, group in BASES.items() if not refusal(rule, (group,))}
    return [(rule, base, *shard_groups(rule, (group,))) for base, group in able.items()]


def _kernel_rate(rule: RuleSpec, base: str, group: GroupSpec, params: int, repeats: int) -> KernelRate:
    optimizer = ShardOptimizer(rule, (group,), (Segment(0, params, 0),), params)
    own = optimizer.new_own()
    w, pushed, known, out = (np.full(params, value, np.float32) for value in (1.0, 1e-3, 0.999, 1.0))
    kept = len(optimizer.state) + (own is not None)
    vectors = 4 + rule.needs_snapshot + 2 * kept  # w read and written, what was pushed, what is sent

    def push() -> None:
        optimizer.apply(w, ((0, pushed),), known, 1e-6, out, own=own)

    def copy() -> None:
        for _ in range(vectors // 2):
            np.copyto(out, known)
        np.copyto(out[: params // 2 * (vectors % 2)], known[: params // 2 * (vectors % 2)])

    times: dict[Callable[[], None], list[float]] = {push: [], copy: []}
    for measure in times:
        measure()  # the compiler and the first touch of memory are not what is measured
    for _ in range(repeats):
        for measure, taken in times.items():
            began_at = time.perf_counter()
            measure()
            taken.append(time.perf_counter() - began_at)
    return KernelRate(rule.name, base, params, vectors, *(statistics.median(taken) for taken in times.values()))


# ---- ours --------------------------------------------------------------------------------------------


def _ours(layout: Layout, base: int, data_path: str, seconds: float) -> float:
    """The rate of the real worker core whose gradient costs nothing."""
    values = np.full(layout.sizes["params"], 1e-3, np.float32)
    empty = {"stats": np.empty(0, np.float32), "counters": np.empty(0, np.int64)}
    gradient = Gradient(values, **empty, num_samples=1, loss=1.0, finite=True)
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
    with _process(_serve_broker, config, *addresses), _process(_serve_shard, addresses[0], f"127.0.0.1:{base + 2}"):
        yield
        with Client(addresses[0]) as client:
            client.stop(5.0, interrupted=True)


def _serve_broker(config: BrokerConfig, control: str, data: str) -> None:
    run_broker(config, control, data)


def _serve_shard(broker: str, bind: str) -> None:
    run_shard(broker, bind)


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
    with _process(_bare_echo, port + 1), _process(_bare_relay, port, port + 1):
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


@contextmanager
def _process(target: Callable[..., None], *arguments: Any) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.join(timeout=0 if target in (_bare_echo, _bare_relay) else 5)
        process.kill()
        process.join()
