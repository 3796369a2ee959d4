"""Recipes, models, data, and what a worker and an evaluator of a run compute.

Decides what is trained and how good it is; never talks to a socket. Importing this package (and
`zasgd.train.recipe`) imports no torch, so that broker, shards and the command line run without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zasgd.train.evaluate import Evaluator
    from zasgd.train.recipe import Recipe
    from zasgd.train.trainer import Trainer

_FROM_EXTRA = {
    "torch": "torch", "torchvision": "torchvision", "sklearn": "scikit-learn", "safetensors": "safetensors",
}  # fmt: skip


class MissingExtraError(Exception):
    """A package of the `train` extra is needed here and not installed; the text is one line that says so."""


class DeviceError(Exception):
    """The device asked for cannot be computed on; the text is one line."""


class DataError(Exception):
    """The data of a recipe cannot be had; the text is one line that says where it was looked for."""


@contextmanager
def train_extra() -> Iterator[None]:
    """Turn the absence of a package of the `train` extra into a MissingExtraError of one line."""
    try:
        yield
    except ModuleNotFoundError as e:
        package = _FROM_EXTRA.get((e.name or "").partition(".")[0])
        if package is None:
            raise
        raise MissingExtraError(f"{package} is not installed here: pip install 'zasgd[train]'") from None


def make_trainer(recipe: Recipe, device: str = "cpu") -> Trainer:
    """What a worker computes with. Raises MissingExtraError, DeviceError, DataError, RecipeError (factories)."""
    with train_extra():
        from zasgd.train.trainer import Trainer

        return Trainer(recipe, device)


def make_evaluator(recipe: Recipe, device: str, run_dir: Path) -> Evaluator:
    """What the evaluator computes with. Raises what make_trainer raises."""
    with train_extra():
        from zasgd.train.evaluate import Evaluator

        return Evaluator(recipe, device, run_dir)
