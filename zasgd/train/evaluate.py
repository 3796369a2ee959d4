"""What the parameters of a run are worth: loss and accuracy on the test data, and the model as a file.

Decides what counts as best, and how buffers are estimated again. Never trains.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from zasgd.core.layout import Layout
from zasgd.train.datasets import in_order
from zasgd.train.export import write_model
from zasgd.train.recipe import Recipe
from zasgd.train.trainer import Workload, build_model, build_workload, input_and_target, seed_generators

Array = np.ndarray[Any, Any]

LAST, BEST = "model.safetensors", "best.safetensors"
"""The files of a run folder: the model as of the latest evaluation, and as of the best one."""

_BATCH_SIZE = 500


class Scorer:
    """Scores flat vectors in eval mode: mean loss over samples and, for a classifier, the share of right answers.

    A classifier has integer targets and one score per class.
    """

    def __init__(self, recipe: Recipe, work: Workload) -> None:
        """Shares the data of `work` and builds a model of its own. Raises RecipeError."""
        self._recipe = recipe
        self._work = work
        self._flat = build_model(recipe, work.flat.device)
        self._flat.module.eval()

    def scores(self, vectors: Mapping[str, Array], reestimate: int = 0, at_most: int | None = None) -> dict[str, float]:
        """Of the whole sections `vectors`: test_loss, train_loss and, for a classifier, test_accuracy in [0, 1].

        reestimate: where the model has BatchNorm, take its statistics afresh from the first so many training samples,
        0 for the buffers given. train_loss is that of the first `at_most` training samples, by default of all.
        """
        seed_generators(self._recipe.train.seed, self._flat.device)  # of an augmentation in the data
        for section, vector in vectors.items():
            self._flat.load(section, 0, vector)
        self._flat.adopt()
        module = self._flat.module
        if reestimate:
            module = _reestimated(module, self._recipe, self._work, reestimate)
        train = _scores(module, self._work, self._work.train, at_most)
        return {"train_loss": train["loss"], **_named("test", _scores(module, self._work, self._work.test))}


class Evaluator:
    """Scores what was loaded, and keeps the last and the best model in `run_dir`."""

    def __init__(self, recipe: Recipe, device: str, run_dir: Path) -> None:
        """Raises what build_workload raises."""
        self.recipe = recipe
        self.run_dir = run_dir
        self._work = build_workload(recipe, device)
        self._flat = self._work.flat
        self._flat.module.eval()
        self.layout: Layout = self._flat.layout
        self.num_samples: int = len(self._work.train)
        self._best: tuple[float, float] | None = None

    @property
    def module(self) -> nn.Module:
        """The model that is scored, in eval mode."""
        return self._flat.module

    def load(self, section: str, start: int, piece: Array) -> None:
        """Take a piece of the parameters or buffers; the next `evaluate` scores all that came."""
        self._flat.load(section, start, piece)

    def evaluate(self, epoch: int, final: bool = False) -> dict[str, float]:
        """Write the model, score the test data and, where it is one, write the best model.

        A test set that raises costs the scores, never the model. Returns test_loss (mean over samples) and, for a
        classifier (integer targets, one score per class), test_accuracy in [0, 1].
        """
        self._flat.adopt()
        write_model(self.run_dir / LAST, self._flat.module, self._metadata(epoch, final))
        scores = _named("test", _scores(self._flat.module, self._work, self._work.test))
        metadata = self._metadata(epoch, final) | {key: f"{value:.6g}" for key, value in scores.items()}
        write_model(self.run_dir / LAST, self._flat.module, metadata)
        merit = (scores.get("test_accuracy", 0.0), -scores["test_loss"])
        if self._best is None or merit > self._best:
            self._best = merit
            write_model(self.run_dir / BEST, self._flat.module, metadata)
        return scores

    def save(self, epoch: int) -> None:
        """Write the last model without scoring it: of an interrupted run, which has no time."""
        self._flat.adopt()
        write_model(self.run_dir / LAST, self._flat.module, self._metadata(epoch, False) | {"interrupted": "true"})

    def reestimated_scores(self, num_samples: int | None = None) -> dict[str, float]:
        """The scores with BatchNorm statistics taken afresh from the first `num_samples` training samples.

        Tells whether the server's buffers are as good as they should be; changes nothing.
        """
        self._flat.adopt()
        module = _reestimated(self._flat.module, self.recipe, self._work, num_samples)
        return _named("test", _scores(module, self._work, self._work.test))

    def _metadata(self, epoch: int, final: bool) -> dict[str, str]:
        return {"recipe": self.recipe.name, "epoch": str(epoch), "final": str(final).lower()}


def _named(part: str, scores: Mapping[str, float]) -> dict[str, float]:
    return {f"{part}_{key}": value for key, value in scores.items()}


@torch.no_grad()
def _reestimated(module: nn.Module, recipe: Recipe, work: Workload, num_samples: int | None) -> nn.Module:
    """A copy in eval mode whose BatchNorm statistics are those of the first training samples, default all."""
    seed_generators(recipe.train.seed, work.flat.device)  # dropout is on meanwhile
    copied = copy.deepcopy(module)
    batches = in_order(work.train, _BATCH_SIZE, num_samples)
    update_bn((input_and_target(batch, work.flat.device)[0] for batch in batches), copied)
    return copied.eval()


@torch.no_grad()
def _scores(module: nn.Module, work: Workload, data: Any, at_most: int | None = None) -> dict[str, float]:
    """loss: the mean over the first `at_most` samples of `data`; for a classifier also accuracy."""
    loss = correct = 0.0
    classified = num_samples = 0
    for batch in in_order(data, _BATCH_SIZE, at_most):
        inputs, targets = input_and_target(batch, work.flat.device)
        outputs = module(inputs)
        size = len(targets)
        loss += float(work.loss(outputs, targets)) * size
        num_samples += size
        if _are_classes(outputs, targets):
            correct += float((outputs.argmax(1) == targets).sum())
            classified += targets.numel()
    scores = {"loss": loss / num_samples}
    return {"accuracy": correct / classified, **scores} if classified else scores


def _are_classes(outputs: Any, targets: Any) -> bool:
    if not (isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)):
        return False
    return not targets.is_floating_point() and outputs.dim() == targets.dim() + 1
