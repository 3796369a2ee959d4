"""metrics.csv: the progress and evaluation events as a table."""

from __future__ import annotations

import csv
from pathlib import Path

from zasgd.observe.metrics import COLUMNS, metric_rows, write_metrics

EVENTS = [
    {"t": 0.0, "event": "run_opened", "workers": 2},
    {
        "t": 1.5,
        "event": "progress",
        "epoch": 0,
        "samples": 640,
        "samples_total": 12970,
        "loss": 2.25,
        "samples_per_s": 512.0,
        "workers": 2,
        "lag_mean": 0.5,
        "lag_p99": 2,
        "lag_max": 3,
    },
    {"t": 2.0, "event": "evaluated", "epoch": 1, "samples": 1297, "test_accuracy": 0.75, "test_loss": 1.5},
    {"t": 2.5, "event": "progress", "epoch": 1, "samples": 1300, "loss": None},
]


def test_one_row_per_progress_and_evaluation_with_unknown_cells_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write_metrics(EVENTS, path)
    assert path.read_text().splitlines() == [
        "seconds,epoch,samples,workers,train_loss,test_accuracy,test_loss,samples_per_s,lag_mean,lag_p99,lag_max",
        "1.5,0,640,2,2.25,,,512.0,0.5,2,3",
        "2.0,1,1297,,,0.75,1.5,,,,",
        "2.5,1,1300,,,,,,,,",
    ]


def test_a_run_without_events_has_a_table_of_headings_only(tmp_path: Path) -> None:
    write_metrics([], tmp_path / "metrics.csv")
    with (tmp_path / "metrics.csv").open() as file:
        assert list(csv.reader(file)) == [list(COLUMNS)]


def test_writing_again_replaces_the_table_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write_metrics(EVENTS, path)
    write_metrics(EVENTS[:2], path)
    assert len(path.read_text().splitlines()) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.csv"]


def test_every_row_has_every_column() -> None:
    assert [tuple(row) for row in metric_rows(EVENTS)] == [COLUMNS] * 3
