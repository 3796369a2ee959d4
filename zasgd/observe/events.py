"""The event log of a run: one JSON object a line, in the order things happened.

Every line has `t`, the seconds since the run's start, and `event`, a name in the past tense; the other fields
belong to the event. The log is strict JSON: a number that is not finite becomes null. Never reads a clock.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Event = dict[str, Any]


class EventLogError(Exception):
    """A file is not an event log; names the file and the line."""


class EventLog:
    """Appends events to a file, each written at once and whole, so that a killed run keeps what it told.

    An incomplete last line, which a crash may leave, is cut off when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file = path.open("ab", buffering=0)

    def record(self, t: float, event: str, **fields: Any) -> None:
        """Append `event` at `t` seconds since the start of the run.

        fields: JSON values, numpy scalars and arrays, and mappings and sequences of them.
        """
        line = json.dumps({"t": round(t, 6), "event": event, **_plain(fields)}, allow_nan=False)
        self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file; the log is complete without it."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path) -> list[Event]:
    """The events of a log, also of one that is still being written: an incomplete last line is left out.

    Raises EventLogError for any other line that is not an event, OSError if the file cannot be read.
    """
    *lines, _torn = path.read_bytes().split(b"\n")
    return [_event_of(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _event_of(line: bytes, where: str) -> Event:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise EventLogError(f"{where}: not a JSON object ({error})") from error
    if not isinstance(event, dict) or not isinstance(event.get("event"), str) or "t" not in event:
        raise EventLogError(f'{where}: not an event, it needs "t" and "event"')
    return event


def _cut_torn_line(path: Path) -> None:
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)


def _plain(value: Any) -> Any:
    """`value` as JSON can say it: numpy's scalars and arrays as Python's, what is not finite as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
