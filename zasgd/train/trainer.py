"""What a worker computes: the gradient of one granted batch, at the parameters that were loaded.

Decides which samples a grant means and which random numbers its batch sees, from (seed, epoch, batch) alone,
so that it does not matter who computes it. Never updates a parameter and never talks to anybody.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from zasgd.core.layout import Layout
from zasgd.core.ledger import permutation
from zasgd.core.messages import Grant
from zasgd.core.worker import Gradient
from zasgd.torch.flat import FlatModule
from zasgd.train import DataError, DeviceError, datasets, factories, models
from zasgd.train.recipe import Recipe, RecipeError

Array = np.ndarray[Any, Any]
Loss = Callable[[Any, Any], torch.Tensor]

LOSSES: dict[str, Loss] = {"cross_entropy": nn.functional.cross_entropy, "mse": nn.functional.mse_loss}
"""Shipped name -> mean over a batch, for `train.loss`."""

_BATCH, _SAMPLE = 0, 1


@dataclass(frozen=True, slots=True)
class Workload:
    """What a recipe's model, data and loss name, built: `train` and `test` are map-style data sets."""

    flat: FlatModule
    train: Any
    test: Any
    loss: Loss


def build_workload(recipe: Recipe, device: str) -> Workload:
    """Build model and data under `train.seed`, the model on `device`.

    Raises RecipeError for factories that cannot be found, called or used, DataError for data that is not
    there, DeviceError; what else a user's factory raises passes through.
    """
    usable = _usable(device)
    seed_generators(recipe.train.seed, usable)
    train, test = _data(recipe)
    loss = factories.resolve("train.loss", recipe.train.loss, LOSSES)
    return Workload(_model(recipe, usable), train, test, loss)


def _usable(device: str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as e:  # torch asserts that it was built for the device
        said = str(e).partition("\n")[0][:200]
        raise DeviceError(f'device "{device}" cannot be used here: {said}') from e


def _model(recipe: Recipe, device: torch.device) -> FlatModule:
    factory = factories.resolve("model.factory", recipe.model.factory, models.MODELS)
    module = factories.call("model", factory, recipe.model.args)
    if not isinstance(module, nn.Module):
        raise RecipeError(f'model.factory: "{recipe.model.factory}" returned no torch.nn.Module')
    try:
        return FlatModule(module.to(device), no_decay_group=not recipe.optimizer.decay_norm_and_bias)
    except TypeError as e:
        raise RecipeError(f"model.factory: {e}") from None


def _data(recipe: Recipe) -> tuple[Any, Any]:
    factory = factories.resolve("data.factory", recipe.data.factory, datasets.DATASETS)
    found = factories.call("data", factory, recipe.data.args)
    if not isinstance(found, tuple) or len(found) != 2:
        raise RecipeError(f'data.factory: "{recipe.data.factory}" should return two data sets, (train, test)')
    if not all(hasattr(part, "__len__") and len(part) for part in found):
        raise DataError(f'data.factory: "{recipe.data.factory}" returned an empty data set, or one without length')
    return found


class Trainer:
    """Computes gradients for grants. `num_samples` and `layout` are what it tells the broker of itself."""

    def __init__(self, recipe: Recipe, device: str = "cpu") -> None:
        """Raises what build_workload raises."""
        self.recipe = recipe
        self._work = build_workload(recipe, device)
        self._flat = self._work.flat
        self._flat.module.train()
        self.layout: Layout = self._flat.layout
        self.num_samples: int = len(self._work.train)
        seed = recipe.train.seed
        self._order = lru_cache(maxsize=2)(lambda epoch: permutation(self.num_samples, seed, epoch))

    def initial(self) -> dict[str, Array]:
        """The sections as built from the recipe's seed, with which the first worker seeds the run."""
        return self._flat.initial()

    def load(self, section: str, start: int, piece: Array) -> None:
        """Take a piece of new parameters or buffers; the next `gradient` is computed on all that came."""
        self._flat.load(section, start, piece)

    def gradient(self, grant: Grant) -> Gradient:
        """Forward and backward over the grant's batch, in train mode, clipped to `optimizer.clip_norm`.

        The arrays of the result belong to the caller. An error of user code passes through.
        """
        flat = self._flat
        flat.adopt()
        flat.module.zero_grad(set_to_none=True)
        inputs, targets = self.batch(grant)
        seed_generators(_hash(self.recipe.train.seed, grant.epoch, _BATCH, grant.batch), flat.device)
        loss = self._work.loss(flat.module(inputs), targets)
        loss.backward()
        found = flat.gradient(self.recipe.optimizer.clip_norm)
        stats, counters, loss_value = flat.stats(), flat.counters(), float(loss.detach())
        finite = found.finite and math.isfinite(loss_value) and bool(np.isfinite(stats).all())
        if finite:
            flat.keep_buffers(stats, counters)
        else:
            flat.discard_buffers()  # this push will be refused, so its batch must leave no trace here either
        return Gradient(found.grads, stats, counters, grant.num_samples, loss_value, finite)

    def batch(self, grant: Grant) -> tuple[Any, Any]:
        """The inputs and targets that a grant means, on the device."""
        indices = self._order(grant.epoch)[grant.start : grant.stop]
        seed, epoch = self.recipe.train.seed, grant.epoch
        batch = datasets.take(self._work.train, indices, lambda index: _hash(seed, epoch, _SAMPLE, index))
        return input_and_target(batch, self._flat.device)


def input_and_target(batch: Any, device: torch.device) -> tuple[Any, Any]:
    """A batch as (inputs, targets) on the device; each a tensor, or a list, tuple or dict of tensors."""
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise TypeError(f"a sample should be a pair (input, target), not {type(batch).__name__}")
    return _moved(batch[0], device), _moved(batch[1], device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    return value


def _hash(seed: int, epoch: int, what: int, number: int) -> int:
    digest = hashlib.blake2b(struct.pack("<4Q", seed, epoch, what, number), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators that a model or an augmentation draws from: torch's of CPU and device, Python's."""
    torch.default_generator.manual_seed(seed)  # 1 us; torch.manual_seed visits every backend: over 100
    random.seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
