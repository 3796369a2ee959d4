"""A trained module as a file that plain torch can read: a safetensors file of its state_dict.

Decides what is in the file and that a reader never sees half of it; never decides when one is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn


def plain_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's state_dict as contiguous CPU tensors with memory of their own; tied ones under each name.

    Loads into the same model with `strict=True`. Raises TypeError for a state that is not a tensor.
    """
    state = module.state_dict()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} of the model's state_dict is a {type(value).__name__}, which cannot be exported")
    return {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in state.items()}


def write_model(path: Path, module: nn.Module, metadata: Mapping[str, str]) -> None:
    """Write the module's state_dict to `path`, by a file beside it that is renamed once it is on disk."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(plain_state_dict(module), partial, dict(metadata))
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_model(path: Path) -> dict[str, torch.Tensor]:
    """The state_dict in a file that write_model wrote."""
    return load_file(path)
