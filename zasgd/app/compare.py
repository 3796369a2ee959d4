"""A grid of simulated runs on all cores: rules by numbers of workers by seeds, with a table and a picture at the end.

Decides how cells are spread over processes and what becomes of them when one fails or the user stops; what a cell is
and whether it is done already is `grid`'s.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from zasgd.app import figures
from zasgd.app.grid import Cell, Grid, GridError, Results, Row
from zasgd.app.serve import as_json
from zasgd.app.simulate import Point, Scene, Simulation, SimulationError
from zasgd.app.variants import parse_variants
from zasgd.launch.lifeline import end_with_parent
from zasgd.net.disk import write_atomically

TABLE, PLOT = "table.md", "plot.png"


@dataclass(frozen=True, slots=True)
class Finished:
    """A cell's result as it comes back from a process, and the curve behind it."""

    row: Row
    curve: tuple[Point, ...]


def run(
    source: str,
    rules: str,
    workers: str,
    num_seeds: int,
    sets: Sequence[str],
    scene: Scene,
    out: Path,
    *,
    jobs: int,
    curve: bool,
    target_loss: float | None = None,
    json_output: bool,
) -> None:
    """Run what is missing of a grid, then write table.md and plot.png to `out` and print the table.

    target_loss: add a table of the virtual time to that train loss; needs `curve`.

    Whatever ends it, finished cells are kept: the same command goes on with the others. Raises GridError, RuleError,
    RecipeError, ScenarioError, DataError, SimulationError.
    """
    if target_loss is not None and not 0 < target_loss < math.inf:
        raise GridError(f"--target-loss {target_loss:g}: give a loss above 0")
    if target_loss is not None and not curve:
        raise GridError("--target-loss reads the scores after each epoch: leave --no-curve out")
    grid = Grid(source, tuple(sets), tuple(parse_variants(rules)), parse_counts(workers), num_seeds, scene, curve)
    grid.check()
    for cell in grid.cells():
        replace(scene, num_workers=cell.workers).check()
    results = Results(out, grid)
    fill(grid, results, jobs or os.cpu_count() or 1)
    rows = [results.rows[cell] for cell in grid.cells()]
    text = _summary(grid, results, rows, [scene_line(scene)], target_loss)
    print(as_json([row._asdict() for row in rows]) if json_output else text)


def parse_counts(text: str) -> tuple[int, ...]:
    """Numbers of workers, such as `1,4,8`: whole, at least 1, rising. Raises GridError."""
    if not re.fullmatch(r"\s*\d{1,4}\s*(,\s*\d{1,4}\s*)*", text):
        raise GridError(f"--workers {text[:40]!r} should be whole numbers parted by commas, such as 1,4,8")
    counts = tuple(int(part) for part in text.split(","))
    if list(counts) != sorted(set(counts)) or counts[0] < 1:
        raise GridError(f"--workers {text[:40]!r} should be rising numbers, at least 1, such as 1,4,8")
    return counts


def scene_line(scene: Scene) -> str:
    """What was simulated, for the reader of a table."""
    churn = f", churn {scene.churn}" if scene.churn else ""
    return f"{scene.speeds} machines, network {scene.network} (ms, Gbit/s){churn}, {scene.step_s * 1000:g} ms a batch"


def _summary(grid: Grid, results: Results, rows: Sequence[Row], head: Sequence[str], target: float | None) -> str:
    """Write table.md and plot.png; the table's text."""
    rules = [variant.text for variant in grid.variants]
    name = f"`{grid.source}`{''.join(f' --set {shlex.quote(text)}' for text in grid.sets)}"
    text = figures.table(rows, rules, [f"{name}, {head[0]}", *head[1:]])
    wanted = {row.cell for row in rows}
    curves = {cell: points for cell, points in results.curves().items() if cell in wanted}
    if target is not None:
        text += "\n" + figures.time_table(curves, rules, target)
    write_atomically(results.folder / TABLE, lambda file: file.write(text.encode()))
    if not figures.plot(rows, curves, rules, results.folder / PLOT):
        print(f"matplotlib is not installed, so there is no {PLOT}: pip install 'zasgd[train]'", file=sys.stderr)
    return text


# ---- running cells ---------------------------------------------------------------------------------------


def fill(grid: Grid, results: Results, jobs: int) -> None:
    """Run the cells that are missing, `jobs` at a time, and keep each as it finishes. Raises what a cell raises."""
    cells = grid.cells()
    missing = results.missing(cells)
    if not missing:
        return
    with _progress() as progress, _processes(min(jobs, len(missing))) as pool:
        task = progress.add_task("cells", total=len(cells), completed=len(cells) - len(missing))
        cell_of = {pool.submit(run_cell, grid, cell): cell for cell in missing}
        for future in as_completed(cell_of):
            finished = _result(future, cell_of[future])
            results.add(finished.row, finished.curve)
            progress.update(task, advance=1)
            progress.console.print(Text(_told(finished.row)))


def run_cell(grid: Grid, cell: Cell) -> Finished:
    """Simulate one cell in this process."""
    began_at = time.monotonic()
    recipe = grid.variant(cell).load(grid.source, grid.sets, cell.seed)
    scene = replace(grid.scene, num_workers=cell.workers, seed=cell.seed)
    simulation = Simulation(recipe, scene, curve=grid.curve)
    simulation.run()
    row = Row.of(cell, simulation.result(), time.monotonic() - began_at)
    return Finished(row, tuple(simulation.points))


def _result(future: Future[Finished], cell: Cell) -> Finished:
    try:
        return future.result()
    except SimulationError as e:
        raise SimulationError(f"{cell.rule}, {cell.workers} workers, seed {cell.seed}: {e}") from None
    except BrokenProcessPool:
        raise GridError(
            "a process that ran a cell was killed, perhaps for lack of memory; the same command goes on with what is "
            "missing (fewer at a time: --jobs)"
        ) from None


def _told(row: Row) -> str:
    error = "-" if row.test_error is None else f"{row.test_error:.2f} %"
    return (
        f"{row.rule}, N = {row.workers}, seed {row.seed}: {error}, loss {row.train_loss:.3g}, {row.wall_seconds:.1f} s"
    )


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True, highlight=False),
    )  # fmt: skip


@contextmanager
def _processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that each import torch once; none of them outlives the block, whatever they are at."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_follow_parent)
    before = set(multiprocessing.active_children())
    try:
        yield pool
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _follow_parent() -> None:
    """Interrupts are the parent's; whatever ends it, kill -9 included, ends this process too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
