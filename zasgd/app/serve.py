"""A broker with its books: the events of a run go to its folder as they happen."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zasgd.core.broker import Broker
from zasgd.core.node import Note, Save, Stop
from zasgd.core.parameters import ShardConfig
from zasgd.core.run import BrokerConfig
from zasgd.net.disk import write_atomically, write_params
from zasgd.net.processes import new_run_id, run_broker
from zasgd.net.sockets import split_address
from zasgd.observe.events import EventLog, read_events
from zasgd.observe.metrics import write_metrics
from zasgd.observe.report import write_report
from zasgd.train.recipe import Recipe

EVENTS = "events.jsonl"


def serve(
    recipe: Recipe,
    num_servers: int,
    control: str,
    run_dir: Path,
    *,
    wants_evaluator: bool = False,
    ready: Callable[[], None] | None = None,
) -> Stop:
    """Broker a run of `recipe` at HOST:PORT `control`, data on the port after it; blocks until the run is over."""
    host, port = split_address(control)
    data = f"{host}:{port + 1 if port else 0}"
    prepare(run_dir, recipe)
    began_at = time.monotonic()
    with EventLog(run_dir / EVENTS) as events:

        def note(what: Note) -> None:
            events.record(time.monotonic() - began_at, what.event, **what.fields)

        def save(what: Save, broker: Broker) -> None:
            write_params(run_dir / f"{what.what}.npz", what.content["layout"], what.content["pieces"])

        note(Note("run_described", {"recipe": recipe.name, "rule": recipe.rule.name, "servers": num_servers}))
        config = broker_config(recipe, num_servers, port + 1, wants_evaluator)
        return run_broker(config, f"{host}:{port}", data, note=note, save=save, ready=ready)


def broker_config(recipe: Recipe, num_servers: int, data_port: int, wants_evaluator: bool) -> BrokerConfig:
    """What the cores must know of a recipe."""
    shard = ShardConfig(
        num_shards=num_servers,
        rule=recipe.rule_spec(),
        groups=recipe.group_specs(),
        schedule=recipe.schedule_spec(),
        window_bytes=recipe.run.window_bytes,
        inflight=recipe.run.inflight,
        push=recipe.push_compression(),
        pull=recipe.pull_compression(),
    )
    return BrokerConfig(
        run=new_run_id(),
        recipe=recipe.to_json(),
        num_shards=num_servers,
        epochs=recipe.train.epochs,
        batch_size=recipe.train.batch_size,
        shard_config=shard.to_json(),
        num_groups=len(shard.groups),
        data_port=data_port,
        lease_s=recipe.run.lease_s,
        window_bytes=recipe.run.window_bytes,
        evaluate_every=recipe.run.evaluate_every,
        wants_evaluator=wants_evaluator,
        push_every=recipe.rule.push_every,
    )


class RunFolderError(ValueError):
    """A folder that cannot be a run's; the text is one line that says why."""


def claim(run_dir: Path) -> None:
    """Make a folder this run's own. Raises RunFolderError when it cannot be written or holds another run."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / EVENTS).touch(exist_ok=False)
    except FileExistsError:
        what = "holds another run" if run_dir.is_dir() else "is no folder"
        raise RunFolderError(f"--run-dir {run_dir}: {what}; choose another folder") from None
    except OSError as e:
        raise RunFolderError(f"--run-dir {run_dir}: cannot be written: {e.strerror}; choose another folder") from None


def prepare(run_dir: Path, recipe: Recipe) -> None:
    """Put the resolved recipe into the folder of its run."""
    write_atomically(run_dir / "recipe.toml", lambda file: file.write(recipe.to_toml().encode()))


def new_run_dir(recipe: Recipe, role: str = "") -> Path:
    """runs/NAME-TIME below the current folder; a number is added where two begin in one second."""
    stem = f"{recipe.name}{'-' + role if role else ''}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [stem, *(f"{stem}-{i}" for i in range(2, 100))]
    return next((Path("runs") / n for n in names if not (Path("runs") / n).exists()), Path("runs") / stem)


def finish(run_dir: Path) -> dict[str, Any]:
    """Write metrics.csv and report.png from events.jsonl, if the run ever began; the facts of its last event."""
    events = read_events(run_dir / EVENTS)
    if any(e["event"] == "run_opened" for e in events):
        write_metrics(events, run_dir / "metrics.csv")
        write_report(events, run_dir / "report.png")
    return ending_of(run_dir)


def ending_of(run_dir: Path) -> dict[str, Any]:
    """The event that ended the run (run_completed, run_interrupted, run_stopped, run_failed), or nothing."""
    events = read_events(run_dir / EVENTS)
    endings = ("run_completed", "run_interrupted", "run_stopped", "run_failed")
    return next((dict(e) for e in reversed(events) if e["event"] in endings), {})


def as_json(summary: Any) -> str:
    """One line; null for what JSON has no number for."""
    return json.dumps(_finite(summary), default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
