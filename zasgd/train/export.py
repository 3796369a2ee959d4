"""A trained module as a file that plain torch can read: a safetensors file of its state_dict.

Decides what is in the file and that a reader never sees half of it; never decides when one is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import nn

from zasgd.net.disk import write_atomically


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
    """Write the module's state_dict to `path`; a reader never finds half of one."""
    content = save(plain_state_dict(module), dict(metadata))
    write_atomically(path, lambda file: file.write(content))


def read_model(path: Path) -> dict[str, torch.Tensor]:
    """The state_dict in a file that write_model wrote."""
    return load_file(path)
