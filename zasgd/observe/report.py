"""A run on one page: loss, accuracy, lag and workers, drawn from its events.

matplotlib is imported only to draw, through its object interface: no global state, no display, no fonts
beyond its own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zasgd.observe.events import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _GREEN, _GREY, _RED, _INK = "#2f6db3", "#2e8b57", "#8a8f98", "#c8452d", "#22262d"
_FEW = 40  # points up to here are drawn as dots too: a line of one point would be invisible
_MAX_BARS = 40


@dataclass(frozen=True, slots=True)
class _Mark:
    """How a change of the workers is drawn: an event, what the legend calls it, and its symbol."""

    event: str
    label: str
    symbol: str
    color: str


_MARKS = (
    _Mark("worker_joined", "joined", "^", _GREEN),
    _Mark("worker_left", "left", "v", _GREY),
    _Mark("worker_lost", "lost", "X", _RED),
)


def write_report(events: Sequence[Event], path: Path) -> bool:
    """Draw the run to `path` as a PNG of 1500 x 1000 pixels; False, and no file, where matplotlib is
    missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), dpi=125, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12, wspace=0.04, hspace=0.06)
    FigureCanvasAgg(figure)
    _draw(figure, events)
    figure.savefig(path, format="png")
    return True


def _draw(figure: Figure, events: Sequence[Event]) -> None:
    figure.suptitle(_title(events), fontsize=14, color=_INK)
    loss, accuracy, lag, workers = figure.subplots(2, 2).flat
    _draw_loss(loss, events)
    _draw_accuracy(accuracy, events)
    _draw_lag(lag, events)
    _draw_workers(workers, events)
    end = max((event["t"] for event in events), default=0.0) or 1.0
    for axes in (loss, accuracy, workers):
        axes.set_xlim(0.0, end * 1.02)
        _draw_epochs(axes, events)


def _title(events: Sequence[Event]) -> str:
    described = next(_named(events, "run_described"), {})
    done = next(_named(events, "run_completed"), None)
    parts = [str(described[key]) for key in ("recipe", "rule") if described.get(key)] or ["zasgd"]
    if done is not None and done.get("samples") is not None:
        parts.append(f"{done['samples']:,} samples in {done['t']:.0f} s")
    elif any(True for _ in _named(events, "run_failed")):
        parts.append("failed")
    elif any(True for _ in _named(events, "run_interrupted")):
        parts.append("interrupted")
    return "  ·  ".join(parts)


def _draw_loss(axes: Axes, events: Sequence[Event]) -> None:
    _head(axes, "Loss")
    train = _series(events, "progress", "loss")
    test = _series(events, "evaluated", "test_loss")
    _line(axes, train, _BLUE, "training")
    _line(axes, test, _RED, "test")
    values = [value for _, value in train + test]
    if values and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    _legend_or_excuse(axes, values, "no loss was reported")


def _draw_accuracy(axes: Axes, events: Sequence[Event]) -> None:
    _head(axes, "Test accuracy")
    points = [(t, 100 * value) for t, value in _series(events, "evaluated", "test_accuracy")]
    _line(axes, points, _GREEN, "")
    axes.yaxis.set_major_formatter("{x:g} %")
    if points:
        t, last = points[-1]
        axes.annotate(f"{last:.2f} %", (t, last), xytext=(-6, -16), textcoords="offset points", ha="right", color=_INK)
    _legend_or_excuse(axes, points, "no evaluation yet")


def _draw_lag(axes: Axes, events: Sequence[Event]) -> None:
    summary = next(_named(events, "run_completed"), {}).get("lag") or {}
    counts = {int(lag): count for lag, count in (summary.get("histogram") or {}).items() if count}
    if counts:
        _draw_histogram(axes, counts, summary)
    else:
        _draw_lag_over_time(axes, events)


def _draw_histogram(axes: Axes, counts: dict[int, int], summary: dict[str, Any]) -> None:
    _head(axes, "Lag of the applied updates")
    width = max(counts) // _MAX_BARS + 1
    shares: dict[int, float] = {}
    for lag, count in counts.items():
        left = lag // width * width
        shares[left] = shares.get(left, 0.0) + 100.0 * count / sum(counts.values())
    middles = [left + (width - 1) / 2 for left in shares]
    axes.bar(middles, list(shares.values()), width=0.85 * width, color=_BLUE)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.set_xlabel("updates applied between pull and apply")
    known = [(name, summary[name]) for name in ("mean", "p50", "p99", "max") if summary.get(name) is not None]
    text = "\n".join(f"{name}  {value:.3g}" for name, value in known)
    axes.text(0.97, 0.95, text, transform=axes.transAxes, ha="right", va="top", color=_INK, fontsize=9)


def _draw_lag_over_time(axes: Axes, events: Sequence[Event]) -> None:
    _head(axes, "Lag")
    mean, p99 = (_series(events, "progress", name) for name in ("lag_mean", "lag_p99"))
    _line(axes, mean, _BLUE, "mean")
    _line(axes, p99, _RED, "99 %")
    axes.set_xlabel("seconds")
    axes.set_ylim(bottom=0.0)
    _legend_or_excuse(axes, mean + p99, "no lag was reported")


def _draw_workers(axes: Axes, events: Sequence[Event]) -> None:
    _head(axes, "Workers")
    changes = list(_worker_counts(events))
    if changes:
        end = max(event["t"] for event in events)
        times = [0.0, *(t for t, _, _ in changes), end]
        counts = [0, *(count for _, count, _ in changes), changes[-1][1]]
        axes.step(times, counts, where="post", color=_BLUE, linewidth=1.8)
    for mark in _MARKS:
        points = [(t, count) for t, count, event in changes if event == mark.event]
        axes.plot(
            [t for t, _ in points],
            [count for _, count in points],
            mark.symbol,
            color=mark.color,
            markersize=8,
            markeredgecolor="white",
            label=mark.label if points else None,
        )
    axes.set_ylim(0.0, max((count for _, count, _ in changes), default=0) + 1.0)
    axes.yaxis.get_major_locator().set_params(integer=True)
    _legend_or_excuse(axes, changes, "no worker joined")


def _worker_counts(events: Iterable[Event]) -> Iterator[tuple[float, int, str]]:
    """(t, workers from then on, name of the event) for every join, leave and loss."""
    alive: set[Any] = set()
    for event in events:
        if event["event"] == "worker_joined":
            alive.add(event.get("worker"))
        elif event["event"] in ("worker_left", "worker_lost"):
            alive.discard(event.get("worker"))
        else:
            continue
        yield event["t"], len(alive), event["event"]


def _draw_epochs(axes: Axes, events: Sequence[Event]) -> None:
    """A faint line where an epoch was completed, thinned out so that the lines stay apart."""
    ends = list(_named(events, "epoch_completed"))
    axes.set_xlabel("seconds (vertical lines: ends of epochs)" if ends else "seconds")
    for event in ends[:: len(ends) // 20 + 1]:
        axes.axvline(event["t"], color=_GREY, alpha=0.25, linewidth=0.8, zorder=0)


def _head(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", color=_INK, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9)


def _line(axes: Axes, points: Sequence[tuple[float, float]], color: str, label: str) -> None:
    if points:
        marker = "o" if len(points) <= _FEW else None
        times, values = zip(*points, strict=True)
        axes.plot(times, values, color=color, marker=marker, markersize=4, linewidth=1.6, label=label)


def _legend_or_excuse(axes: Axes, points: Sequence[Any], excuse: str) -> None:
    if not points:
        axes.text(0.5, 0.5, excuse, transform=axes.transAxes, ha="center", va="center", color=_GREY)
        axes.set_yticks([])
    elif axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=9)


def _series(events: Iterable[Event], event: str, field: str) -> list[tuple[float, float]]:
    return [(found["t"], found[field]) for found in _named(events, event) if found.get(field) is not None]


def _named(events: Iterable[Event], name: str) -> Iterator[Event]:
    return (event for event in events if event["event"] == name)
