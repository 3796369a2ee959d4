"""The record of a run: one file of msgpack rows per shard, appended as things happen.

Decides the file's form only; what the rows mean is `core.replay`. A row is lost only when its process is killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgpack

FORMAT = "zasgd-record-2"
BUFFER_BYTES = 1 << 16


class RecordError(ValueError):
    """A record that cannot be read or written; the text is one line that says why."""


def shard_file(folder: Path, shard: int) -> Path:
    """Where shard number `shard` of a run writes."""
    return folder / f"shard-{shard}.record"


class RecordWriter:
    """Appends rows to a shard's file, which begins with the format's name; opened with the first row."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Any = None

    def __call__(self, row: tuple[Any, ...]) -> None:
        """Write one row; the first one, `("shard", number, ...)`, names the file."""
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = shard_file(self._folder, row[1]).open("wb", buffering=BUFFER_BYTES)
            self._file.write(msgpack.packb(FORMAT))
        self._file.write(msgpack.packb(row))

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def read_rows(path: Path) -> Iterator[list[Any]]:
    """The rows of a shard's file; a last row that is cut off is left out. Raises RecordError."""
    try:
        with path.open("rb") as file:
            rows = msgpack.Unpacker(file, raw=False, max_buffer_size=0, strict_map_key=False)
            if next(rows, None) != FORMAT:
                raise RecordError(f"{path}: not the record of a shard in the format {FORMAT}")
            yield from rows
    except OSError as e:
        raise RecordError(f"{path}: {e.strerror}: the run left no record of this shard") from None
    except RecordError:
        raise
    except (ValueError, msgpack.exceptions.UnpackException) as e:
        raise RecordError(f"{path}: damaged: {str(e)[:100]}") from None
