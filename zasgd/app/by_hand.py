"""The roles of a run in terminals of their own, and questions to a broker."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zasgd.app import serve
from zasgd.core.paths import DATA_PATHS
from zasgd.net.client import Client
from zasgd.net.processes import run_shard
from zasgd.net.sockets import AddressError, BindError, check_bind, is_loopback, split_address
from zasgd.train.recipe import Recipe, RecipeError

SERVER_PORTS = 64
"""A server without --bind tries this many ports after the broker's two."""


def broker(
    recipe: Recipe, bind: str, run_dir: Path | None, *, insecure: bool, json_output: bool, supervised: bool
) -> int:
    """Serve a run until it is over; its exit code."""
    host, port = check_bind(bind, insecure=insecure)
    folder = run_dir or serve.new_run_dir(recipe)
    if not supervised:
        serve.claim(folder)
    say = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

    def ready() -> None:
        say.print(
            f"broker of {recipe.name} at {host}:{port}, waiting for {recipe.run.servers} servers; folder {folder}"
        )

    stop = serve.serve(recipe, recipe.run.servers, f"{host}:{port}", folder, wants_evaluator=supervised, ready=ready)
    if not supervised:
        ending = serve.finish(folder)
        if json_output:
            print(serve.as_json(ending), flush=True)
    if stop.code == 3:
        print(f"error: {serve.ending_of(folder).get('reason', stop.reason)}", file=sys.stderr)
    else:
        say.print(stop.reason)
    return stop.code


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where a server listens, what it waits for, and where it records what moves its parameters."""

    bind: str
    advertise: str
    insecure: bool
    connect_timeout_s: float
    broker_timeout_s: float
    record_to: Path | None = None
    record_pushes: bool = False


def server(broker: str, options: ServerOptions) -> int:
    """Hold a shard until the run is over; its exit code."""
    bind = options.bind
    broker_host, broker_port = split_address(broker)
    if options.record_pushes and options.record_to is None:
        raise RecipeError("--record-pushes needs --record DIR, the folder to record them in")
    if not bind and not is_loopback(broker_host):
        raise AddressError(f"the broker is at {broker_host}: say where to listen with --bind HOST:PORT --insecure")
    if bind:
        check_bind(bind, insecure=options.insecure)
    with Client(broker) as client:
        client.describe(options.connect_timeout_s)
    choices = [bind] if bind else [f"127.0.0.1:{broker_port + 2 + i}" for i in range(SERVER_PORTS)]
    for i, choice in enumerate(choices):
        try:
            stop = run_shard(
                broker, choice, options.advertise, broker_timeout_s=options.broker_timeout_s,
                record_to=options.record_to, record_pushes=options.record_pushes,
            )  # fmt: skip
        except BindError:
            if i == len(choices) - 1:
                raise
            continue
        print(f"{'error: ' if stop.code else ''}{stop.reason}", file=sys.stderr)
        return stop.code
    return 3


def worker(
    broker: str,
    name: str,
    device: str,
    threads: int,
    connect_timeout_s: float,
    broker_timeout_s: float,
    data_path: str,
) -> int:
    """Compute gradients until the run is over or this worker leaves; its exit code."""
    from zasgd.train.roles import RoleOptions, run_worker

    split_address(broker)
    if data_path and data_path not in DATA_PATHS:
        raise RecipeError(f"--data-path is one of {', '.join(DATA_PATHS)}, not {data_path!r}")
    options = RoleOptions(
        broker=broker,
        name=name,
        device=device,
        threads=threads,
        connect_timeout_s=connect_timeout_s,
        broker_timeout_s=broker_timeout_s,
        data_path=data_path,
    )
    return run_worker(options)


def evaluate(
    broker: str, run_dir: Path | None, device: str, threads: int, connect_timeout_s: float, broker_timeout_s: float
) -> int:
    """Score the model until the run is over; its exit code."""
    from zasgd.train.roles import RoleOptions, run_evaluator

    options = RoleOptions(
        broker=broker,
        device=device,
        threads=threads,
        connect_timeout_s=connect_timeout_s,
        broker_timeout_s=broker_timeout_s,
    )
    with Client(broker) as client:
        recipe = Recipe.from_json(client.describe(connect_timeout_s).recipe)
    return run_evaluator(options, os.fspath(run_dir or serve.new_run_dir(recipe, "eval")))


def status(broker: str, timeout_s: float, *, json_output: bool) -> None:
    """Print the state of a run."""
    with Client(broker) as client:
        report: dict[str, Any] = dict(client.status(timeout_s))
    if json_output:
        print(serve.as_json(report))
    else:
        _print_report(Console(highlight=False, markup=False), report)


def drain(broker: str, target: str, timeout_s: float, *, json_output: bool) -> None:
    """Let a worker leave."""
    with Client(broker) as client:
        _answer(client.drain(target, timeout_s), json_output)


def stop(broker: str, timeout_s: float, *, json_output: bool) -> None:
    """End a run."""
    with Client(broker) as client:
        _answer(client.stop(timeout_s), json_output)


def _answer(text: str, json_output: bool) -> None:
    print(serve.as_json({"answer": text}) if json_output else text)


def _print_report(console: Console, report: dict[str, Any]) -> None:
    ledger = report["ledger"] or {}
    done, total = ledger.get("samples", 0), ledger.get("samples_total", 0)
    progress = f", epoch {ledger['epoch']} of {ledger['epochs']}, {done} of {total} samples" if ledger else ""
    console.print(f"run {report['run']}: {report['phase']}{progress}, {report['samples_per_s']:.0f} samples/s")
    workers = Table("worker", "name", "pid", "host", "path", "state", "steps", "lag", "samples/s")
    for w in report["workers"]:
        cells = (w["id"], w["name"], w["pid"], w["host"], w["data_path"], w["state"], w["steps"], w["lag"])
        cells = (*cells, f"{w['samples_per_s']:.1f}")
        workers.add_row(*(Text(str(cell)) for cell in cells))
    shards = Table("shard", "pid", "host", "state", "version", "bytes", "resident", "lag mean", "lag max")
    for s in report["shards"]:
        lag = s["lag"]
        cells = (s["id"], s["pid"], s["host"], s["state"], s["version"], s["bytes"], s["resident_bytes"])
        shards.add_row(*(Text(str(cell)) for cell in cells), f"{lag['mean']:.2f}", str(lag["max"]))
    console.print(workers)
    console.print(shards)
    for s in report["shards"]:
        if s["alarm"]:
            console.print(Text(f"shard {s['id']}: diverging? {s['alarm']}; {_remedy(s['damping'])}", style="red"))


def _remedy(damping: float) -> str:
    if damping < 1:
        return f"the learning rate is damped to {damping:.1%}"
    return "rule.guard = true would damp the learning rate; a rule that bears more lag would not need it"
