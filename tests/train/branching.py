"""Models for the recipes of these tests: a branch that is not always taken, a frozen layer, parameters of 16 bits."""

from __future__ import annotations

import torch
from torch import nn


class Branching(nn.Module):
    """The layer `rare` is used only where a batch has more than `threshold` samples, `never` not at all."""

    def __init__(self, threshold: int) -> None:
        super().__init__()
        self.threshold = threshold
        self.frozen = nn.Linear(64, 64)
        self.frozen.requires_grad_(False)
        self.always = nn.Linear(64, 10)
        self.rare = nn.Linear(64, 10)
        self.never = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(inputs)
        scores = self.always(hidden)
        return scores + self.rare(hidden) if len(inputs) > self.threshold else scores


class Halves(nn.Module):
    """Two bfloat16 layers for float32 inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).bfloat16()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs.bfloat16()).float()


def net(threshold: int = 1000) -> Branching:
    return Branching(threshold)


def halves() -> Halves:
    return Halves()
