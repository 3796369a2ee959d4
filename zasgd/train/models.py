"""The shipped models. Decides architectures only; initial values come from torch's seeded generator."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(inputs: int = 64, hidden: Sequence[int] = (64, 64), outputs: int = 10, dropout: float = 0.0) -> nn.Sequential:
    """ReLU layers: (batch, inputs) float32 to (batch, outputs) scores. 64-64-64-10 has 8,970 parameters."""
    sizes = [inputs, *hidden]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def small_cnn(channels: int = 1, width: int = 16, outputs: int = 10) -> nn.Sequential:
    """Three convolutions with BatchNorm: (batch, channels, 28, 28) to (batch, outputs); 24,058 parameters."""
    return nn.Sequential(
        *_conv_norm(channels, width),
        nn.MaxPool2d(2),
        *_conv_norm(width, 2 * width),
        nn.MaxPool2d(2),
        *_conv_norm(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, outputs),
    )


def _conv_norm(before: int, after: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()


MODELS = {"mlp": mlp, "small-cnn": small_cnn}
"""Shipped name -> factory, for `model.factory`."""
