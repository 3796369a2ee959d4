"""The cells of a comparison, rule by number of workers by seed, and the folder that keeps what they gave.

Decides what is still missing and whether a folder's cells belong to the settings at hand. Each finished cell is on disk
at once, so that a comparison that is broken off goes on where it was. Never runs a cell.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zasgd.app.simulate import Point, Scene
from zasgd.app.variants import Variant
from zasgd.net.disk import write_atomically
from zasgd.train.recipe import load_recipe

RESULTS, CURVES, SETTINGS = "results.csv", "curves.csv", "settings.json"


class GridError(ValueError):
    """A comparison that cannot be run, or a folder that holds another one; one line."""


class Cell(NamedTuple):
    """One simulated run of a comparison. rule: as written on the command line."""

    rule: str
    workers: int
    seed: int


class Row(NamedTuple):
    """What a cell gave, as a line of results.csv; the fields are those of `zasgd simulate --json`."""

    rule: str
    workers: int
    seed: int
    test_error: float | None
    train_loss: float
    updates: int
    samples: int
    virtual_seconds: float
    speedup: float
    lag_mean: float
    lag_p99: int
    lag_max: int
    gap_rmse: float
    dropped: int
    diverged: bool
    wall_seconds: float

    @property
    def cell(self) -> Cell:
        """The cell that it is of."""
        return Cell(self.rule, self.workers, self.seed)

    @classmethod
    def of(cls, cell: Cell, result: Mapping[str, Any], wall_s: float) -> Row:
        """From what a simulation told, and how long it took."""
        lag = {f"lag_{key}": value for key, value in result["lag"].items()}
        named = {**result, **lag, **cell._asdict(), "wall_seconds": round(wall_s, 2)}
        return cls(**{name: named[name] for name in cls._fields})


@dataclass(frozen=True, slots=True)
class Grid:
    """What is compared: a recipe under `sets`, by each of `variants`, on each number of workers, with each seed."""

    source: str
    sets: tuple[str, ...]
    variants: tuple[Variant, ...]
    workers: tuple[int, ...]
    num_seeds: int
    scene: Scene
    curve: bool = True

    def cells(self) -> list[Cell]:
        """Every cell, seed by seed, so that a table fills up evenly."""
        return [
            Cell(variant.text, n, seed)
            for seed in range(self.num_seeds)
            for variant in self.variants
            for n in ((variant.num_workers,) if variant.num_workers else self.workers)
        ]

    def variant(self, cell: Cell) -> Variant:
        """The rule of a cell."""
        return next(v for v in self.variants if v.text == cell.rule)

    def check(self) -> None:
        """Load what every cell will load. Raises RecipeError, RuleError."""
        for variant in self.variants:
            variant.load(self.source, self.sets)

    def settings(self) -> dict[str, Any]:
        """All that decides what a cell gives, apart from rule, workers and seed."""
        scene = self.scene
        return {
            "recipe": load_recipe(self.source, self.sets).model_dump(mode="json"),
            "sets": list(self.sets),
            "speeds": _with_digest(scene.speeds),
            "network": scene.network,
            "churn": _with_digest(scene.churn),
            "step_ms": scene.step_s * 1000.0,
            "curve": self.curve,
        }


def _with_digest(text: str) -> str:
    """A file name together with what the file says; any other text as it is."""
    path = Path(text)
    if not text.endswith(".csv") or not path.is_file():
        return text
    return f"{text} ({hashlib.blake2b(path.read_bytes(), digest_size=4).hexdigest()})"


class Results:
    """The folder of a comparison, made this grid's own. Raises GridError when it holds cells of other settings."""

    def __init__(self, folder: Path, grid: Grid) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise GridError(f"--out {folder}: cannot be made a folder: {e.strerror}") from None
        self._claim(grid.settings())
        _cut_torn_line(folder / RESULTS)
        _cut_torn_line(folder / CURVES)
        self.rows = {row.cell: row for row in _read_rows(folder / RESULTS)}

    def _claim(self, settings: dict[str, Any]) -> None:
        path = self.folder / SETTINGS
        if not path.exists():
            if (self.folder / RESULTS).exists():
                raise GridError(f"--out {self.folder}: holds a {RESULTS} of something else: choose another folder")
            text = json.dumps(settings, indent=1)
            write_atomically(path, lambda file: file.write(text.encode()))
            return
        changed = _first_difference(json.loads(path.read_text(encoding="utf-8")), settings)
        if changed:
            raise GridError(f"--out {self.folder}: holds cells of other settings, {changed}: choose another folder")

    def add(self, row: Row, curve: Iterable[Point]) -> None:
        """Keep a finished cell, on disk before this returns."""
        _append(self.folder / CURVES, (*Cell._fields, *Point._fields), [(*row.cell, *point) for point in curve])
        _append(self.folder / RESULTS, Row._fields, [row])
        self.rows[row.cell] = row

    def missing(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those that are not here yet, in order."""
        return [cell for cell in cells if cell not in self.rows]

    def curves(self) -> dict[Cell, list[Point]]:
        """The curve of every finished cell that has one, by epoch."""
        found: dict[Cell, dict[int, Point]] = {}
        for line in _read(self.folder / CURVES):
            cell = Cell(line["rule"], int(line["workers"]), int(line["seed"]))
            if cell in self.rows:  # else it was broken off between curve and result
                point = Point(
                    int(line["epoch"]), float(line["virtual_seconds"]), float(line["train_loss"]),
                    _number_or_none(line["test_error"]),
                )  # fmt: skip
                found.setdefault(cell, {})[point.epoch] = point
        return {cell: [points[epoch] for epoch in sorted(points)] for cell, points in found.items()}


def _first_difference(old: Any, new: Any, where: str = "") -> str:
    """Which key of two nested tables differs first, and how; empty when none does."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*new, *old])
        told = (_first_difference(old.get(k), new.get(k), f"{where}.{k}".lstrip(".")) for k in keys)
        return next((text for text in told if text), "")
    return "" if old == new else f"{where} was {json.dumps(old)[:60]} and is {json.dumps(new)[:60]}"


# ---- files of comma-separated lines ----------------------------------------------------------------------


def _append(path: Path, head: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    """Add lines and flush them to disk; a new file begins with `head`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if not path.exists() or not path.stat().st_size:
        writer.writerow(head)
    writer.writerows(lines)
    with path.open("a", encoding="utf-8") as file:
        file.write(text.getvalue())
        file.flush()
        os.fsync(file.fileno())


def _cut_torn_line(path: Path) -> None:
    """Take away a last line that was not written to its end."""
    if path.exists():
        whole, _, torn = path.read_bytes().rpartition(b"\n")
        if torn:
            os.truncate(path, len(whole) + bool(whole))


def _read(path: Path) -> Iterator[dict[str, str]]:
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)


def _read_rows(path: Path) -> Iterator[Row]:
    for line in _read(path):
        try:
            yield Row(
                line["rule"], int(line["workers"]), int(line["seed"]), _number_or_none(line["test_error"]),
                float(line["train_loss"]), int(line["updates"]), int(line["samples"]), float(line["virtual_seconds"]),
                float(line["speedup"]), float(line["lag_mean"]), int(line["lag_p99"]), int(line["lag_max"]),
                float(line["gap_rmse"]), int(line["dropped"]), line["diverged"] == "True", float(line["wall_seconds"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError):
            raise GridError(f"{path}: a line cannot be read: {dict(line)!s:.80}; delete it or the file") from None


def _number_or_none(text: str) -> float | None:
    return float(text) if text else None
