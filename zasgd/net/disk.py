"""Files of a run, written so that a reader never finds half of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from zasgd.core.exchange import Piece
from zasgd.core.layout import SECTIONS, Layout


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write beside `path`, flush to disk, rename over it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_params(path: Path, layout: Layout, pieces: tuple[Piece, ...]) -> None:
    """Tensors by name as a numpy .npz: what a run without an evaluator leaves. Needs no torch."""
    dtypes: dict[str, Any] = {"params": np.float32, "stats": np.float32, "counters": np.int64}
    flats = {section: np.zeros(layout.sizes[section], dtypes[section]) for section in SECTIONS}
    for section, start, values in pieces:
        flats[section][start : start + values.size] = values
    tensors = {
        t.name: flats[t.section][layout.offsets[t.name] :][: t.num_elements].reshape(t.shape) for t in layout.tensors
    }
    write_atomically(path, lambda file: np.savez(file, **tensors))
