"""A user's own model, data and loss, as a recipe names them: `user_recipe:net` and so on."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.utils.data import Dataset


class Noisy(Dataset):
    """Sample i is (i + noise from torch, noise from Python) with target 2 i: an augmentation, in small."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noisy = torch.tensor([float(index) + float(torch.rand(())), random.random()])
        return noisy, torch.tensor([2.0 * index])


def net(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.Dropout(0.5), nn.Linear(width, 1))


def noisy(size: int = 37) -> tuple[Noisy, Noisy]:
    return Noisy(size), Noisy(10)


def huber(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.huber_loss(outputs, targets)


def infinite_at_large_targets(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs * torch.where(targets > 40, torch.inf, 1.0)).mean()


def batch_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def float64_net() -> nn.Module:
    return nn.Linear(2, 1).double()


def no_module() -> list[int]:
    return [1]


def one_data_set() -> Noisy:
    return Noisy(3)


def empty() -> tuple[Noisy, Noisy]:
    return Noisy(0), Noisy(1)


def broken() -> nn.Module:
    raise ZeroDivisionError("a bug of the user")


def lonely_samples() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.zeros(2)] * 4, [torch.zeros(2)] * 4


not_callable = 3
