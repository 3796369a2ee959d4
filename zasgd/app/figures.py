"""A comparison as a table and a picture.

Decides when a cell failed, and how means and spreads are shown. Never runs a cell.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from zasgd.app.grid import Cell, Row
from zasgd.app.simulate import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAILED_TIMES, FAILED_PERCENT = 3.0, 20.0
FAILURE = (
    f"*fails*: the train loss is not finite or hardly below that of the initial parameters, or the error is over "
    f"{FAILED_PERCENT:g} % and over {FAILED_TIMES:g} times the best mean of one worker (without any, of all cells)."
)
"""When a cell counts as failed, for the reader of a table."""

Judge = Callable[[Row], bool]


def judge(rows: Iterable[Row]) -> Judge:
    """Whether a row failed, by FAILURE, beside all `rows`."""
    found = list(rows)
    alone = [r for r in found if r.workers == 1]
    means = [_mean(group) for group in _grouped(alone or found).values()]
    best = min((m for m in means if m is not None), default=None)

    def failed(row: Row) -> bool:
        if row.diverged or not math.isfinite(row.train_loss):
            return True
        if row.test_error is None or best is None:
            return False
        return row.test_error > FAILED_PERCENT and row.test_error > FAILED_TIMES * best

    return failed


def _grouped(rows: Iterable[Row]) -> dict[tuple[str, int], list[Row]]:
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.rule, row.workers), []).append(row)
    return groups


def _mean(rows: Sequence[Row]) -> float | None:
    errors = [row.test_error for row in rows if row.test_error is not None and math.isfinite(row.test_error)]
    return fmean(errors) if errors else None


# ---- the table -------------------------------------------------------------------------------------------


def table(rows: Iterable[Row], rules: Sequence[str], head: Sequence[str]) -> str:
    """Markdown: a row per rule, a column per number of workers; `head` are the lines above it."""
    found = list(rows)
    groups, failed = _grouped(found), judge(found)
    workers = sorted({n for _, n in groups})
    lines = [
        ["rule", *(f"N = {n}" for n in workers)],
        ["---"] * (len(workers) + 1),
        *([rule, *(_entry(groups.get((rule, n), []), failed) for n in workers)] for rule in rules),
    ]
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    seeds = len({row.seed for row in found})
    legend = f"Test error in %, mean (least-most) of {seeds} seed{'s'[: seeds > 1]}; train loss, mean. {FAILURE}"
    return "\n".join([*head, "", *body, "", legend, ""])


def time_table(curves: Mapping[Cell, Sequence[Point]], rules: Sequence[str], target: float) -> str:
    """Markdown: virtual seconds until the train loss at the end of an epoch is at most `target`, mean over seeds.

    In brackets how many times faster than the same rule, or the first one, with the fewest workers.
    """
    reached: dict[tuple[str, int], list[float | None]] = {}
    for cell, points in curves.items():
        at = next((p.virtual_seconds for p in points if p.train_loss <= target), None)
        reached.setdefault(cell[:2], []).append(at)
    workers = sorted({n for _, n in reached})
    means = {key: fmean([t for t in times if t is not None]) for key, times in reached.items() if None not in times}
    first = next((means[rule, n] for n in workers for rule in rules if (rule, n) in means), None)
    lines = [["rule", *(f"N = {n}" for n in workers)], ["---"] * (len(workers) + 1)]
    for rule in rules:
        own = next((means[rule, n] for n in workers if (rule, n) in means), first)
        lines.append([rule, *(_time_entry(reached.get((rule, n)), means.get((rule, n)), own) for n in workers)])
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    legend = f"Virtual seconds to a train loss of {target:g}, mean (times faster than with the fewest workers)."
    return "\n".join([*body, "", legend, ""])


def _time_entry(times: Sequence[float | None] | None, mean: float | None, alone: float | None) -> str:
    if times is None:
        return "-"
    if mean is None or alone is None:
        return f"never in {sum(t is None for t in times)} of {len(times)}"
    return f"{mean:.4g} ({alone / mean:.1f}x)"


def _entry(rows: Sequence[Row], failed: Judge) -> str:
    good = [row for row in rows if not failed(row)]
    if not rows:
        return "-"
    if not good:
        return "fails"
    lost = len(rows) - len(good)
    told = [f"{_spread([row.test_error for row in good])}; {fmean(row.train_loss for row in good):.2g}"]
    return ", ".join(told + ([f"fails {lost} of {len(rows)}"] if lost else []))


def _spread(errors: Sequence[float | None]) -> str:
    known = [error for error in errors if error is not None]
    if not known:
        return "-"
    mean = f"{fmean(known):.2f}"
    return mean if len(known) == 1 else f"{mean} ({min(known):.2f}-{max(known):.2f})"


# ---- the picture -----------------------------------------------------------------------------------------


def plot(rows: Iterable[Row], curves: Mapping[Cell, Sequence[Point]], rules: Sequence[str], path: Path) -> bool:
    """Error against workers, error against virtual time; False, and no file, where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), dpi=120, facecolor="white")
    figure.set_layout_engine("constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    shades = colormaps["tab20"].colors  # type: ignore[attr-defined]
    colors = {rule: shades[(2 * i + i // 10) % 20] for i, rule in enumerate(rules)}
    found = list(rows)
    _draw_workers(left, found, colors)
    _draw_time(right, curves, colors)
    figure.savefig(path, format="png")
    return True


def _draw_workers(axes: Axes, rows: Sequence[Row], colors: Mapping[str, Any]) -> None:
    groups = _grouped(rows)
    for rule, color in colors.items():
        points = [(n, [r.test_error for r in group if r.test_error is not None]) for (name, n), group in groups.items()
                  if name == rule]  # fmt: skip
        points = sorted((n, errors) for n, errors in points if errors)
        if points:
            xs = [n for n, _ in points]
            axes.plot(xs, [fmean(e) for _, e in points], "o-", color=color, label=rule, markersize=4, linewidth=1.5)
            axes.fill_between(xs, [min(e) for _, e in points], [max(e) for _, e in points], color=color, alpha=0.12)
    axes.set(xlabel="workers", ylabel="test error, %", title="Test error by workers, after the whole sample budget")
    axes.set_xscale("log", base=2)
    _finish(axes)


def _draw_time(axes: Axes, curves: Mapping[Cell, Sequence[Point]], colors: Mapping[str, Any]) -> None:
    """Each rule at its largest number of workers, the mean over seeds at each epoch."""
    most: dict[str, int] = {}
    for cell in curves:
        most[cell.rule] = max(cell.workers, most.get(cell.rule, 0))
    for rule, color in colors.items():
        runs = [points for cell, points in curves.items() if cell[:2] == (rule, most.get(rule))]
        epochs = [points for points in zip(*runs, strict=False) if all(p.test_error is not None for p in points)]
        if epochs:
            xs = [fmean(p.virtual_seconds for p in points) for points in epochs]
            ys = [fmean(p.test_error or 0.0 for p in points) for points in epochs]
            axes.plot(xs, ys, color=color, label=f"{rule}, N = {most[rule]}", linewidth=1.5)
    axes.set(xlabel="virtual seconds", ylabel="test error, %", title="Test error by virtual time, at the most workers")
    axes.set_xscale("log")
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.xaxis.set_major_formatter("{x:g}")
    if axes.lines:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.legend(frameon=False, fontsize=8)
    else:
        axes.text(0.5, 0.5, "nothing to show", transform=axes.transAxes, ha="center", va="center")
    axes.grid(alpha=0.2, which="both")
