"""The figures of a run over time as a table: one row for every progress report and every evaluation."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zasgd.observe.events import Event

COLUMNS = (
    "seconds",
    "epoch",
    "samples",
    "workers",
    "train_loss",
    "test_accuracy",
    "test_loss",
    "samples_per_s",
    "lag_mean",
    "lag_p99",
    "lag_max",
)

_SOURCES = {"seconds": "t", "train_loss": "loss"}
"""The event's field where it is not named like the column."""


def metric_rows(events: Iterable[Event]) -> list[dict[str, Any]]:
    """A row with the keys COLUMNS per `progress` and `evaluated` event; None where the event does not say."""
    return [_row_of(event) for event in events if event["event"] in ("progress", "evaluated")]


def write_metrics(events: Iterable[Event], path: Path) -> None:
    """Write the rows as CSV, empty cells where a value is unknown, in place of what was there."""
    draft = path.with_name(path.name + ".part")
    with draft.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(metric_rows(events))
    draft.replace(path)


def _row_of(event: Mapping[str, Any]) -> dict[str, Any]:
    return {column: event.get(_SOURCES.get(column, column)) for column in COLUMNS}
