"""A worker's own optimizer, of the rules that push what several steps led to instead of a gradient.

Decides how the module's parameters move between two exchanges and what is pushed of it. Never touches the buffers,
and never computes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from zasgd.core.rules import GroupSpec
from zasgd.torch.flat import FlatModule

Array = np.ndarray[Any, Any]


class Walk(NamedTuple):
    """What steps led to: whether it is finite, and which tensors none moved."""

    finite: bool
    absent: frozenset[int]


class LocalOptimizer:
    """torch's SGD or AdamW over a module's parameters, its momentum or moments kept from exchange to exchange.

    groups: as a recipe has them, `group_specs()`. Several can share one module: each keeps only its own state.
    """

    def __init__(self, flat: FlatModule, groups: Sequence[GroupSpec], clip_norm: float = 0.0) -> None:
        self._flat = flat
        self._clip_norm = clip_norm
        self._optimizer = _torch_optimizer(flat, groups)
        self._began_at: Array | None = None  # memory to remember them in, the same for every walk

    def walk(self, rates: Sequence[float], backward: Callable[[int], Any], elastic: bool) -> Walk:
        """Take a step at each of the learning `rates`, from the adopted parameters on, and give what to push.

        backward(i) computes the gradient of step i into every `p.grad`. What is pushed takes the place of the gradient
        in the memory that is bound: where they began minus where they ended, or, `elastic`, where they ended (easgd's
        x_i). The parameters there are again what they were. Steps end at the first gradient that is not finite; the
        momentum is then forgotten, since it holds steps that nobody will apply. Raises ForeignWriteError.
        """
        began_at = self._began_at = self._flat.params(self._began_at)
        pushed = self._flat.grads
        try:
            moved = self._moved(rates, backward)
            self._flat.params(pushed)
        finally:
            self._flat.go_back(began_at)
        if not elastic:
            np.subtract(began_at, pushed, out=pushed)
        finite = moved is not None and bool(np.isfinite(pushed).all())
        if not finite:
            self._optimizer.state.clear()
        # The elastic force has no need of a gradient: it holds every tensor, or a branch's x_i would be lost.
        absent = () if elastic or moved is None else self._flat.trained().keys() - moved
        return Walk(finite, frozenset(absent))

    def _moved(self, rates: Sequence[float], backward: Callable[[int], Any]) -> set[int] | None:
        """Take the steps; which parameters any of them moved, None after a gradient that is not finite."""
        moved: set[int] = set()
        for i, lr in enumerate(rates):
            self._flat.zero_grad()
            backward(i)
            if not self._flat.clip(self._clip_norm):
                return None
            for group in self._optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            self._flat.step_with(self._optimizer)
            moved.update(index for index, (_, p) in self._flat.trained().items() if p.grad is not None)
        return moved


def _torch_optimizer(flat: FlatModule, groups: Sequence[GroupSpec]) -> torch.optim.Optimizer:
    members: dict[int, list[torch.Tensor]] = {}
    for group, parameter in flat.trained().values():
        members.setdefault(group, []).append(parameter)
    adamw = any(groups[group].algorithm == "adamw" for group in members)
    options = [{"params": found, **_options(groups[group])} for group, found in sorted(members.items())]
    return torch.optim.AdamW(options) if adamw else torch.optim.SGD(options)


def _options(group: GroupSpec) -> dict[str, Any]:
    if group.algorithm == "adamw":
        options: dict[str, Any] = {"betas": (group.beta1, group.beta2), "eps": group.eps}
    else:
        options = {"momentum": group.momentum, "nesterov": group.nesterov}
    return options | {"weight_decay": group.weight_decay, "lr": 0.0, "lr_scale": group.lr_scale}
