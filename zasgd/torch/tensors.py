"""A torch tensor as what the wire can carry, and back: an array beside the name of its torch dtype.

numpy has no bfloat16: its bits travel as unsigned 16-bit integers, the name says what they are. Only names in
`core.layout.TORCH_DTYPES` pass, in both directions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from zasgd.core.codec import WireError
from zasgd.core.layout import TORCH_DTYPES

Array = np.ndarray[Any, Any]


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def tensor_to_wire(tensor: torch.Tensor) -> tuple[str, Array]:
    """The dtype name and a C-order array of the tensor's shape on the CPU; bfloat16 as its bits in `<u2`.

    Shares memory with a contiguous CPU tensor, copies any other. Raises WireError for a dtype off the list.
    """
    name = dtype_name(tensor.dtype)
    if name not in TORCH_DTYPES:
        raise WireError(f"a tensor of torch dtype {name} cannot travel", "BAD_DTYPE")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return name, _bits(plain).numpy()


def tensor_from_wire(name: str, array: Array) -> torch.Tensor:
    """The inverse of tensor_to_wire: a CPU tensor that shares memory with a writable C-order array.

    Raises WireError for a name off the list or an array that is not of that dtype.
    """
    if type(name) is not str or name not in TORCH_DTYPES:
        raise WireError(f"unknown torch dtype {str(name)[:40]!r}", "BAD_DTYPE")
    dtype = getattr(torch, name)
    expected = _bits(torch.empty(0, dtype=dtype)).numpy().dtype
    if array.dtype != expected:
        raise WireError(f"a {name} tensor came as {array.dtype.str}, not {expected.str}", "BAD_DTYPE")
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = array.copy(order="C")  # received frames are read-only, torch wants to be able to write
    return torch.from_numpy(array).view(dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
