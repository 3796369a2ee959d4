"""One memory of a worker as torch sees it: a view for each parameter and one for each gradient.

Decides nothing. Each view has a storage of its own, so that a copy or a file of one tensor is not that of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from zasgd.core.region import Memory
from zasgd.torch.device import Device
from zasgd.torch.placed import Placed

Array = np.ndarray[Any, Any]


class Slot:
    """A memory, and the tensors that are views of it, by index in the params section.

    values: the flat vector that parameters are views of, on their device. params: those views, each where it lies at
    `params_at`. grads: views of memory.grads in the shape of each parameter, at the addresses `grads_at`.
    used: the device's ticket for the last computation on `values`. fresh: memory.params is already on its way there.
    """

    def __init__(self, memory: Memory, params: Sequence[Placed], device: Device) -> None:
        self.memory = memory
        self.values = device.vector(memory.params)
        self.grad = torch.from_numpy(memory.grads)
        if device.shares_memory:
            self.params = [_view(memory.params, t) for t in params]
        else:
            self.params = [t.of(self.values) for t in params]
        self.params_at = [view.data_ptr() for view in self.params]
        self.grads = [_view(memory.grads, t) for t in params]
        self.grads_at = [view.data_ptr() for view in self.grads]
        self.used: Any = device.mark()
        self.fresh = False

    def mend(self, params: Sequence[Placed]) -> None:
        """Make views of gradients again of what `.half()` and its kin let such a view become, being a `p.grad`."""
        for t in params:
            if self.grads[t.index].data_ptr() != self.grads_at[t.index]:
                self.grads[t.index] = _view(self.memory.grads, t)


def _view(flat: Array, t: Placed) -> torch.Tensor:
    return torch.from_numpy(flat[t.start : t.stop].reshape(t.spec.shape))
