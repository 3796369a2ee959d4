"""The event log: what is written is read back, also after a crash, and nothing else passes for an event."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from zasgd.observe.events import EventLog, EventLogError, read_events


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "events.jsonl"


def test_events_are_read_back_in_order_while_the_log_is_still_open(path: Path) -> None:
    log = EventLog(path)
    log.record(0.0, "run_opened", workers=3)
    log.record(1.25, "worker_lost", worker=2, reason="lease ran out")
    assert read_events(path) == [
        {"t": 0.0, "event": "run_opened", "workers": 3},
        {"t": 1.25, "event": "worker_lost", "worker": 2, "reason": "lease ran out"},
    ]
    log.close()


def test_numpy_values_and_nested_fields_become_json(path: Path) -> None:
    with EventLog(path) as log:
        lag = {"mean": np.float32(0.5), "histogram": {0: np.int64(3), 1: 4}}
        log.record(2.0, "run_completed", updates=np.array([7, 8]), lag=lag, shards=(0, 1))
    (event,) = read_events(path)
    assert event["updates"] == [7, 8]
    assert event["lag"] == {"mean": 0.5, "histogram": {"0": 3, "1": 4}}
    assert event["shards"] == [0, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("-inf")])
def test_a_loss_that_is_not_finite_is_null_so_that_any_json_reader_takes_it(path: Path, value: float) -> None:
    with EventLog(path) as log:
        log.record(3.0, "progress", loss=value, lags=[value, 1.0])
    json.loads(path.read_text(), parse_constant=pytest.fail)
    (event,) = read_events(path)
    assert (event["loss"], event["lags"]) == (None, [None, 1.0])


def test_a_last_line_torn_by_a_crash_is_left_out_and_cut_off_by_the_next_writer(path: Path) -> None:
    with EventLog(path) as log:
        log.record(0.0, "run_opened", workers=1)
        log.record(1.0, "progress", epoch=0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert [event["event"] for event in read_events(path)] == ["run_opened"]

    with EventLog(path) as log:
        log.record(2.0, "run_interrupted")
    assert [event["event"] for event in read_events(path)] == ["run_opened", "run_interrupted"]


def test_a_log_is_continued_not_begun_anew(path: Path) -> None:
    for t in (0.0, 1.0):
        with EventLog(path) as log:
            log.record(t, "run_opened", workers=1)
    assert [event["t"] for event in read_events(path)] == [0.0, 1.0]


@pytest.mark.parametrize("line", ["not json", "[1, 2]", '{"event": "progress"}', '{"t": 1.0}', ""])
def test_a_line_that_is_not_an_event_is_named(path: Path, line: str) -> None:
    path.parent.mkdir()
    path.write_text('{"t": 0.0, "event": "run_opened"}\n' + line + "\n")
    with pytest.raises(EventLogError, match=rf"^{path}, line 2: not "):
        read_events(path)
