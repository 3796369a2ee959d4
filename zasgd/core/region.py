"""Memory in which a worker's parameters and gradients lie: where each vector begins, whoever owns the bytes.

Decides geometry only. A region may be private to a worker or shared with the shards of its host (`zasgd.net.arena`);
either way a slot holds the parameters that one gradient is computed on and that gradient, and what a shard sends back
takes the place of those parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from zasgd.core.layout import Layout

Array = np.ndarray[Any, Any]

PAGE_BYTES = 4096
"""Vectors begin on pages: so they can be locked for a device, and no two share a cache line."""


class SharedMemoryError(Exception):
    """Memory that cannot be shared; the text is one line that says why."""


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """One page of header, then for each slot its parameters and its gradient, `num_params` float32 each."""

    num_params: int
    num_slots: int = 1

    @property
    def vector_bytes(self) -> int:
        """Bytes from one vector's beginning to the next."""
        return -(-4 * self.num_params // PAGE_BYTES) * PAGE_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole region."""
        return PAGE_BYTES + 2 * self.num_slots * self.vector_bytes

    def params_at(self, slot: int) -> int:
        """The byte at which a slot's parameters begin."""
        return PAGE_BYTES + 2 * slot * self.vector_bytes

    def grads_at(self, slot: int) -> int:
        """The byte at which a slot's gradient begins."""
        return self.params_at(slot) + self.vector_bytes

    def region(self, memory: Array, token: bytes = b"") -> Region:
        """The vectors in `memory`, `num_bytes` of uint8 that begin on a page."""

        def vector(start: int) -> Array:
            return memory[start : start + 4 * self.num_params].view(np.float32)

        slots = range(self.num_slots)
        return Region(
            tuple(vector(self.params_at(i)) for i in slots), tuple(vector(self.grads_at(i)) for i in slots), token
        )


@dataclass(frozen=True, slots=True)
class Region:
    """Flat float32 vectors by slot. token: random bytes in the header of a shared one, which prove that it is."""

    params: tuple[Array, ...]
    grads: tuple[Array, ...]
    token: bytes = b""


class Memory(NamedTuple):
    """What one gradient is computed with: flat vectors of a whole layout.

    params: float32, what to compute on. grads: float32, as long, where the gradient is written. stats: float32 and
    counters: int64, the buffers to begin with.
    """

    params: Array
    grads: Array
    stats: Array
    counters: Array


def private_region(plan: RegionPlan) -> Region:
    """A region of this process alone, zeroed."""
    memory = np.zeros(plan.num_bytes + PAGE_BYTES, np.uint8)
    first = -memory.ctypes.data % PAGE_BYTES
    return plan.region(memory[first : first + plan.num_bytes])


def memories(region: Region, layout: Layout) -> tuple[Memory, ...]:
    """A region's slots, each with buffers of its own."""
    sizes = layout.sizes
    return tuple(
        Memory(params, grads, np.zeros(sizes["stats"], np.float32), np.zeros(sizes["counters"], np.int64))
        for params, grads in zip(region.params, region.grads, strict=True)
    )
