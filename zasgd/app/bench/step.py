"""Steps per second of whole runs, beside what this machine can do at most; where the time of a step goes."""

from __future__ import annotations

import statistics
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from zasgd.app.bench.cluster import Setup, Turn, running_cluster
from zasgd.app.bench.crew import BenchError
from zasgd.app.bench.limits import Limit, bare_kernel, bare_sockets
from zasgd.app.serve import as_json
from zasgd.core.compress import packed_bytes
from zasgd.core.compression import CODECS, Compression
from zasgd.core.rules import RuleSpec

PATHS = ("arena", "direct", "relay")


def step(
    path: str,
    params: int,
    workers: int,
    servers: int,
    rule: str,
    seconds: float,
    repeats: int,
    *,
    write_grads: bool,
    compress: str,
    compress_pull: str,
    json_output: bool,
) -> None:
    """Push and pull of a whole model by all workers at once, in turns with the limit of that path.

    compress, compress_pull: codecs. Raises BenchError, RuleError, SharedMemoryError.
    """
    setup = Setup(path, params, workers, servers, RuleSpec(rule), write_grads, *_codecs(path, compress, compress_pull))
    console = Console(stderr=True)
    turns: list[Turn] = []
    limits: list[float] = []
    with ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(setup))
        limit = stack.enter_context(_limit(setup))
        for _ in track(range(repeats), "measuring", console=console, disable=not console.is_terminal):
            turns.append(cluster.turn(seconds))
            limits.append(limit(seconds))
    _tell(summary(setup, turns, limits), seconds, json_output)


def _codecs(path: str, push: str, pull: str) -> tuple[Compression, Compression]:
    if path not in PATHS:
        raise BenchError(f"--path is one of {', '.join(PATHS)}, not {path!r}")
    for option, codec in (("--compress", push), ("--compress-pull", pull)):
        if codec not in CODECS:
            raise BenchError(f"{option} is one of {', '.join(CODECS)}, not {codec!r}")
        if codec != "none" and path == "arena":
            raise BenchError(f"{option} changes what travels, and the arena moves nothing: use --path direct or relay")
    return Compression(push), Compression(pull)


def moved_bytes(setup: Setup) -> tuple[int, int]:
    """Bytes of one step: (pushed, answered)."""
    up, down = (
        4 * setup.params if how.codec == "none" else packed_bytes(how.codec, setup.params, how.share)
        for how in (setup.push, setup.pull)
    )
    return up, down


def _limit(setup: Setup) -> AbstractContextManager[Limit]:
    if setup.path == "arena":
        return bare_kernel(setup.params, setup.workers, setup.servers, setup.rule)
    return bare_sockets(*moved_bytes(setup), setup.workers, setup.servers)


def summary(setup: Setup, turns: list[Turn], limits: list[float]) -> dict[str, Any]:
    """Medians over the turns, and the ratio of the medians.

    breakdown_ms: of one worker's step, which is their sum. gradient_write and apply are measured where they happen;
    transfer is what the bare sockets of this run take for as many bytes, and nothing in the arena; wait is the rest:
    for shards that are busy with others, for messages, for a processor.
    """
    rate, limit = statistics.median(turn.steps_per_s for turn in turns), statistics.median(limits)
    parts = {
        "gradient_write": statistics.median(turn.write_ms for turn in turns),
        "transfer": 0.0 if setup.path == "arena" else 1e3 * setup.workers / limit,
        "apply": statistics.median(turn.apply_ms for turn in turns),
    }
    wait = 1e3 * setup.workers / rate - sum(parts.values())
    cpu = {role: statistics.median(turn.cpu_ms[role] for turn in turns) for role in turns[0].cpu_ms}
    return {
        "path": setup.path,
        "params": setup.params,
        "workers": setup.workers,
        "servers": setup.servers,
        "rule": setup.rule.name,
        "steps_per_s": round(rate, 3),
        "gb_per_s": round(rate * sum(moved_bytes(setup)) / 1e9, 3),
        "limit_steps_per_s": round(limit, 3),
        "ratio": round(rate / limit, 4),
        "breakdown_ms": {name: round(ms, 3) for name, ms in {**parts, "wait": wait}.items()},
        "cpu_ms": {role: round(ms, 3) for role, ms in cpu.items()},
        "write_grads": setup.writes,
        "compress": setup.push.codec,
        "compress_pull": setup.pull.codec,
        "repeats": len(turns),
        "spread": {
            "steps_per_s": _range([turn.steps_per_s for turn in turns]),
            "limit_steps_per_s": _range(limits),
        },
    }


def _range(figures: list[float]) -> list[float]:
    return [round(min(figures), 3), round(max(figures), 3)]


def _tell(found: dict[str, Any], seconds: float, json_output: bool) -> None:
    if json_output:
        print(as_json({**found, "seconds": seconds}))
        return
    title = (
        f"{found['path']}, {found['params']} parameters, {found['workers']} workers, {found['servers']} servers, "
        f"{found['rule']}; median of {found['repeats']} x {seconds:g} s"
    )
    limit = "bare kernel" if found["path"] == "arena" else "bare sockets"
    heads = (f"{name.replace('_', ' ')} ms" for name in found["breakdown_ms"])
    table = Table("steps/s", "GB/s", limit, "ratio", *heads, title=title)
    parts = (f"{ms:.1f}" for ms in found["breakdown_ms"].values())
    rates = (f"{found['steps_per_s']:.1f}", f"{found['gb_per_s']:.1f}", f"{found['limit_steps_per_s']:.1f}")
    table.add_row(*rates, f"{100 * found['ratio']:.0f} %", *parts)
    Console(highlight=False).print(table)
