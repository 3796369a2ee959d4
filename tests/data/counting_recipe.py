"""A user's model that counts: after a run its weights say how often each sample's gradient was applied.

Sample i is its own number. Both weights of sample i take part in its loss with factor 1, so that a rate of 1 without
momentum subtracts exactly 1 from each per applied gradient. The two vectors are equally long: with two servers each
holds one of them (but for a few elements), and a push that only one of them applied shows.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Counter(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(size))
        self.second = nn.Parameter(torch.zeros(size))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.first[ids] + self.second[ids]


class Ids:
    """Sample i is (i, 1.0); `bad` has an infinite target, `bad_once` only for whoever makes the file `mark` first."""

    def __init__(self, size: int, bad: int = -1, bad_once: int = -1, mark: str = "") -> None:
        self.size, self.bad, self.bad_once, self.mark = size, bad, bad_once, mark

    def __len__(self) -> int:
        return self.size

    def take(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        targets = torch.ones(len(ids))
        targets[ids == self.bad] = math.inf
        if (ids == self.bad_once).any() and self._is_first():
            targets[ids == self.bad_once] = math.inf
        return ids, targets

    def _is_first(self) -> bool:
        try:
            Path(self.mark).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def net(size: int) -> nn.Module:
    """Built last before a worker says HELLO: its log tells when, on the clock that all processes of a host share."""
    print(f"built at {time.monotonic()}", flush=True)
    return Counter(size + int(os.environ.get("COUNTING_MORE", "0")))


def ids(size: int, bad: int = -1, bad_once: int = -1, mark: str = "") -> tuple[Ids, Ids]:
    return Ids(size, bad, bad_once, mark), Ids(10)


def ids_late_for_evaluation(events: str, epochs: int, **arguments: Any) -> tuple[Ids, Ids]:
    """In the evaluator's process they take until the log `events` tells of so many complete epochs."""
    in_evaluator = multiprocessing.current_process().name == "eval"
    while in_evaluator and Path(events).read_text().count("epoch_completed") < epochs:
        time.sleep(0.02)
    return ids(**arguments)


def total(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs * targets).sum()


def raising_net(size: int) -> nn.Module:
    class Raising(Counter):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError("a bug of the user")

    return Raising(size)
