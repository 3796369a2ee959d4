"""How much faster more workers are when each needs a given time to compute: sleeps stand for its GPU."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from zasgd.app.bench.cluster import Setup, running_cluster
from zasgd.app.bench.crew import BenchError
from zasgd.app.serve import as_json
from zasgd.core.rules import RuleSpec

RULE = "dc-asgd-c"


def scale(workers: str, step_ms: float, params: int, servers: int, steps: int, *, json_output: bool) -> None:
    """Speed-up over one worker, in the arena, gradients written.

    workers: numbers joined by commas. step_ms: mean of the compute time. steps: of each worker. Raises BenchError.
    """
    asked = numbers(workers)
    console = Console(stderr=True)
    counts = track(sorted({1, *asked}), "measuring", console=console, disable=not console.is_terminal)
    rates = {count: _rate(count, step_ms / 1e3, params, servers, steps) for count in counts}
    rows = [
        {"workers": count, "steps_per_s": round(rates[count], 3), "speedup": round(rates[count] / rates[1], 3)}
        for count in asked
    ]
    _tell(rows, step_ms, params, json_output)


def numbers(text: str) -> list[int]:
    """`1,2,4` as numbers of workers. Raises BenchError."""
    given = [number.strip() for number in text.split(",")]
    if not all(number.isascii() and number.isdigit() and int(number) > 0 for number in given):
        raise BenchError(f"--workers takes numbers above 0 joined by commas, as 1,2,4,8, not {text!r}")
    return [int(number) for number in given]


def _rate(workers: int, step_s: float, params: int, servers: int, steps: int) -> float:
    setup = Setup("arena", params, workers, servers, RuleSpec(RULE), writes=True, step_s=step_s)
    with running_cluster(setup) as cluster:
        return cluster.turn(steps * step_s).steps_per_s


def _tell(rows: list[dict[str, Any]], step_ms: float, params: int, json_output: bool) -> None:
    if json_output:
        print(as_json(rows))
        return
    title = f"{params} parameters, {step_ms:g} ms to compute"
    table = Table("workers", "steps/s", "speed-up", title=title)
    for row in rows:
        table.add_row(str(row["workers"]), f"{row['steps_per_s']:.2f}", f"{row['speedup']:.2f}")
    Console(highlight=False).print(table)
