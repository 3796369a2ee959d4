"""What a worker computes for the batches that it was granted, at the parameters that were loaded.

Decides which samples a grant means and which random numbers its batch sees, from (seed, epoch, batch) alone, so that
it does not matter who computes it; and, by the recipe's rule, what is pushed: the mean gradient, dana-slim's momentum
step, or what local steps led to. Never talks to anybody.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from zasgd.core.layout import Layout
from zasgd.core.ledger import permutation
from zasgd.core.messages import Grant
from zasgd.core.region import Memory
from zasgd.core.slim import SlimMomentum
from zasgd.core.worker import Gradient
from zasgd.torch.departure import Parts, Ready
from zasgd.torch.flat import FlatModule
from zasgd.train import DataError, DeviceError, datasets, factories, models
from zasgd.train.local import LocalOptimizer
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
    return Workload(build_model(recipe, usable), train, test, loss)


def _usable(device: str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as e:  # torch asserts that it was built for the device
        said = str(e).partition("\n")[0][:200]
        raise DeviceError(f'device "{device}" cannot be used here: {said}') from e


def build_model(recipe: Recipe, device: torch.device) -> FlatModule:
    """The recipe's model as flat vectors. Raises RecipeError."""
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


Own = SlimMomentum | LocalOptimizer | None
"""What one worker keeps from push to push: dana-slim's momentum, or the optimizer of local steps; others nothing."""


class _Pushed(NamedTuple):
    """Of what is pushed for some grants: whether it is finite, which tensors it leaves out, and the mean loss."""

    finite: bool
    absent: frozenset[int]
    loss: float


class Trainer:
    """Computes what is pushed for grants. `num_samples` and `layout` are what it tells the broker of itself.

    One serves many workers that take turns, as in a simulation, if each has an `own` of `new_own`.
    """

    def __init__(self, recipe: Recipe, device: str = "cpu") -> None:
        """Raises what build_workload raises."""
        self.recipe = recipe
        self.workload = build_workload(recipe, device)
        self._flat = self.workload.flat
        self._flat.module.train()
        self.layout: Layout = self._flat.layout
        self.num_samples: int = len(self.workload.train)
        self._rule = recipe.rule_spec()
        self._schedule = recipe.schedule_spec()
        seed = recipe.train.seed
        self._order = lru_cache(maxsize=2)(lambda epoch: permutation(self.num_samples, seed, epoch))
        self._own = self.new_own()

    def new_own(self) -> Own:
        """What a worker that begins keeps, for the `own` of its calls of `gradient`."""
        groups = self.recipe.group_specs()
        if self._rule.is_local:
            return LocalOptimizer(self._flat, groups, self.recipe.optimizer.clip_norm)
        if self._rule.look_ahead == "worker":
            whole = self.layout.slices("params", 1)[0]
            return SlimMomentum(groups, self.layout.segments(whole), whole.size)
        return None

    def initial(self) -> dict[str, Array]:
        """The sections as built from the recipe's seed, with which the first worker seeds the run."""
        return self._flat.initial()

    def new_memory(self) -> Memory:
        """A memory of this process alone to compute with, which holds what `initial` gives."""
        return self._flat.new_memory()

    def prefetch(self, memory: Memory) -> None:
        """Begin to bring parameters, complete in a memory used before, to the device; the next `gradient` needs them.

        May be called while `gradient` computes with another memory, from another thread.
        """
        self._flat.prefetch(memory)

    def gradient(
        self,
        grants: Sequence[Grant],
        memory: Memory,
        samples: int,
        own: Own = None,
        ready: Ready | None = None,
        parts: Parts = (),
    ) -> Gradient:
        """What to push for one or more grants, in train mode, at the parameters and buffers in `memory`.

        By a gradient rule the mean gradient over all their samples, clipped to `optimizer.clip_norm`; by a local rule
        what one step per grant led to, each clipped. It is written into memory.grads; what else is in the memory stays
        as it is. samples: the sample clock of the shards, from which the learning rate of what happens here follows.
        own: of the worker that computes, by default the only one. ready(start, stop) is called, perhaps on another
        thread, for those of `parts` that are final and finite while backward still runs, see `FlatModule.expect_last`;
        for none where the gradient is clipped or turned into something else at the end. An error of user code passes
        through, and ForeignWriteError and DetachedError.
        """
        own = self._own if own is None else own
        flat = self._flat
        flat.bind(memory)
        flat.adopt()
        if isinstance(own, LocalOptimizer):
            pushed = self._walked(grants, samples, own)
        else:
            pushed = self._mean_gradient(grants, ready, parts if own is None else ())
        stats, counters = flat.stats(), flat.counters()
        finite = pushed.finite and math.isfinite(pushed.loss) and (not stats.size or bool(np.isfinite(stats).all()))
        if finite and isinstance(own, SlimMomentum):
            finite = self._turned(memory, pushed.absent, samples, own)
        num_samples = sum(grant.num_samples for grant in grants)
        presence = flat.presence(pushed.absent)
        return Gradient(memory.grads, stats, counters, num_samples, pushed.loss, finite, presence)

    def _mean_gradient(self, grants: Sequence[Grant], ready: Ready | None, parts: Parts) -> _Pushed:
        """Autograd adds the batches up in every `p.grad`, each weighted by its share of the samples."""
        shares, clip_norm = _shares(grants), self.recipe.optimizer.clip_norm
        losses: list[torch.Tensor] = []
        for i, (grant, share) in enumerate(zip(grants, shares, strict=True)):
            if i == len(grants) - 1 and not clip_norm:
                self._flat.expect_last(parts, ready)
            losses.append(self._backward(grant, share))
        found = self._flat.gradient(clip_norm)
        return _Pushed(found.finite, found.absent, _mean(losses, shares))

    def _walked(self, grants: Sequence[Grant], samples: int, own: LocalOptimizer) -> _Pushed:
        """One step per grant; the clock runs on within them, as it does where one worker trains alone."""
        clocks = accumulate((grant.num_samples for grant in grants[:-1]), initial=samples)
        rates = [self._schedule.lr_at(clock, self.num_samples) for clock in clocks]
        losses: list[torch.Tensor] = []
        elastic = self._rule.exchange == "elastic"
        walk = own.walk(rates, lambda i: losses.append(self._backward(grants[i])), elastic)
        loss = _mean(losses, _shares(grants[: len(losses)]))
        return _Pushed(walk.finite, walk.absent, loss)

    def _turned(self, memory: Memory, absent: frozenset[int], samples: int, own: SlimMomentum) -> bool:
        """Turn a finite gradient into dana-slim's step, in place; whether that is finite too."""
        lr = self._schedule.lr_at(samples, self.num_samples)
        if np.isfinite(own.push(memory.grads, memory.params, lr, absent)).all():
            return True
        own.v[:] = 0  # what overflowed would stay in it for good
        return False

    def _backward(self, grant: Grant, share: float = 1.0) -> torch.Tensor:
        """Forward and backward over one batch with its own random numbers; its mean loss, detached."""
        inputs, targets = self.batch(grant)
        seed_generators(_hash(self.recipe.train.seed, grant.epoch, _BATCH, grant.batch), self._flat.device)
        loss = self.workload.loss(self._flat.module(inputs), targets)
        (loss if share == 1.0 else loss * share).backward()
        return loss.detach()

    def batch(self, grant: Grant) -> tuple[Any, Any]:
        """The inputs and targets that a grant means, on the device."""
        indices = self._order(grant.epoch)[grant.start : grant.stop]
        seed, epoch = self.recipe.train.seed, grant.epoch
        batch = datasets.take(self.workload.train, indices, lambda index: _hash(seed, epoch, _SAMPLE, index))
        return input_and_target(batch, self._flat.device)


def _shares(grants: Sequence[Grant]) -> list[float]:
    total = sum(grant.num_samples for grant in grants)
    return [grant.num_samples / total for grant in grants]


def _mean(losses: Sequence[torch.Tensor], shares: Sequence[float]) -> float:
    return sum(share * float(loss) for share, loss in zip(shares, losses, strict=True))


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
