"""Recipes around tests/data/counting_recipe.py, and what the weights of such a run prove."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zasgd.observe.events import read_events

Array = np.ndarray[Any, Any]


def write_recipe(
    folder: Path,
    *,
    samples: int,
    batch: int,
    epochs: int,
    net: str = "counting_recipe:net",
    data: str = "counting_recipe:ids",
    data_args: str = "",
    **run: float,
) -> Path:
    """A recipe file of a counting run; `run` goes into its table [run]."""
    more = "".join(f"{key} = {value}\n" for key, value in run.items())
    path = folder / "counting.toml"
    path.write_text(
        f'[model]\nfactory = "{net}"\nargs = {{ size = {samples} }}\n'
        f'[data]\nfactory = "{data}"\nargs = {{ size = {samples}{data_args} }}\n'
        '[rule]\nname = "asgd"\n[optimizer]\nlr = 1.0\n'
        f'[train]\nepochs = {epochs}\nbatch_size = {batch}\nloss = "counting_recipe:total"\n[run]\n{more}'
    )
    return path


def counts(tensors: Mapping[str, Array]) -> tuple[Array, Array]:
    """How often each sample's gradient was applied to the first and to the second vector."""
    return -tensors["first"], -tensors["second"]


def model_of(run_dir: Path) -> dict[str, Array]:
    """The model that an evaluator wrote."""
    from safetensors.numpy import load_file

    return load_file(run_dir / "model.safetensors")


def expect_each_sample_once_per_epoch(tensors: Mapping[str, Array], epochs: int, torn: int) -> None:
    """No sample was applied more often than there were epochs, none is missing, and the torn ones lack one half."""
    first, second = counts(tensors)
    for applied in (first, second):
        assert np.array_equal(applied, np.round(applied))
        assert applied.max() <= epochs, f"applied more than once: {np.flatnonzero(applied > epochs)}"
    assert (first + second).min() >= epochs, "missing: in each epoch at least one half of a sample is applied"
    assert int((2 * epochs - first - second).sum()) == torn
    if not torn:
        assert first.min() == second.min() == epochs


def events_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """The events of that name."""
    return [event for event in read_events(run_dir / "events.jsonl") if event["event"] == name]


def expect_complete_epochs(run_dir: Path, epochs: int, samples: int) -> None:
    """By the broker's books each epoch ended once, with every sample in exactly one state."""
    completed = events_of(run_dir, "epoch_completed")
    assert sorted(e["epoch"] for e in completed) == list(range(epochs))  # two are open at a time
    assert [e["once"] + e["torn"] + e["skipped"] for e in completed] == [samples] * epochs
