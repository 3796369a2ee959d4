"""A device whose copies are made when they are waited for, and until then leave NaN where they will write."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from zasgd.core.region import Memory

Array = np.ndarray[Any, Any]


class FakeDevice:
    """Computes on the CPU, in vectors of its own.

    behind: how many downloads are under way at a time before the oldest of them is done. A copy reads its source when
    it is made, so a source that changes meanwhile, or a result that is read too early, gives other values. Uploads
    are checked to wait for the last computation on the vector that they overwrite.
    """

    shares_memory = False

    def __init__(self, behind: int = 2) -> None:
        self.behind = behind
        self.registered: dict[int, Memory] = {}
        self.under_way: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self.uploads: list[tuple[Array, torch.Tensor]] = []
        self.num_downloads = self.num_uploads = self.num_marks = 0
        self.at_host: set[int] = set()

    def register(self, memory: Memory) -> None:
        assert id(memory.params) not in self.registered
        self.registered[id(memory.params)] = memory

    def release(self, memory: Memory) -> None:
        del self.registered[id(memory.params)]

    def vector(self, params: Array) -> torch.Tensor:
        return torch.full((len(params),), torch.nan)

    def mark(self) -> int:
        self.num_marks += 1
        return self.num_marks

    def upload(self, params: Array, into: torch.Tensor, after: int) -> None:
        assert id(params) in self.registered
        assert 0 < after <= self.num_marks
        self.num_uploads += 1
        with torch.no_grad():
            into.fill_(torch.nan)
        self.uploads.append((params, into))

    def await_uploads(self) -> None:
        with torch.no_grad():
            for params, into in self.uploads:
                into.copy_(torch.from_numpy(params))
        self.uploads.clear()

    def download(self, source: torch.Tensor, into: torch.Tensor) -> int:
        assert any(self._is_within(into, memory.grads) for memory in self.registered.values())
        self.num_downloads += 1
        into.fill_(torch.nan)
        self.under_way.append((self.num_downloads, source, into))
        return self.num_downloads

    def _is_within(self, into: torch.Tensor, grads: Array) -> bool:
        return 0 <= into.data_ptr() - grads.ctypes.data <= grads.nbytes - 4 * into.numel()

    def done(self, ticket: int) -> bool:
        while len(self.under_way) > self.behind:
            self._copy_one()
        return ticket in self.at_host

    def synchronize(self) -> None:
        while self.under_way:
            self._copy_one()

    @torch.no_grad()
    def _copy_one(self) -> None:
        ticket, source, into = self.under_way.popleft()
        into.copy_(source)
        self.at_host.add(ticket)
