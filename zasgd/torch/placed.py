"""The tensors of a torch module and where each lies in the flat vectors of a run.

Decides which tensor goes into which section and group, and which has no place at all. Never touches a value.

* A parameter with `requires_grad=False` lies in `params` in the group FROZEN (rate 0, no decay): every worker
  and the exported model hold what the first worker had, bit for bit. Integer ones lie with the counters.
* Persistent float buffers are `stats`, integer and boolean ones `counters`; others are left to the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from zasgd.core.layout import TensorSpec
from zasgd.torch.tensors import dtype_name

DECAYED, NO_DECAY, FROZEN = 0, 1, 2
"""Parameter groups: weight decay applies, does not, nothing applies. `Recipe.group_specs` lists the three."""

_FLOATS = {torch.float32, torch.float16, torch.bfloat16}
_COUNTERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}


@dataclass(slots=True)
class Placed:
    """One tensor of the module: where it hangs and, from element `start` of its section to `stop`, where it lies.

    `index` counts the tensors of its section. Of a parameter of that section, `parameter` is the object
    that the run took over; `viewed`: it shares the memory of a flat vector; `direct`: of one in the
    host's memory, so that its gradient may too; `version`: autograd's count of in-place
    writes as of the last one of ours; `arrived`: the last backward of this push has given its gradient.
    """

    owner: nn.Module
    attribute: str
    spec: TensorSpec
    index: int
    start: int
    stop: int
    parameter: Any = None
    viewed: bool = False
    direct: bool = False
    version: int = 0
    arrived: bool = False

    def now(self) -> torch.Tensor:
        """The module's tensor; looked up each time, since a module may replace a buffer."""
        found: torch.Tensor = getattr(self.owner, self.attribute)
        return found

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This tensor's elements of its section's flat vector, in its shape."""
        return flat[self.start : self.stop].view(self.spec.shape)


def tensors_of(module: nn.Module, no_decay_group: bool) -> Iterator[tuple[nn.Module, str, TensorSpec]]:
    """Every tensor that a run holds, with its owner and attribute; a tied one once, under its first name.

    With `no_decay_group` the parameters of at most one dimension go into the group NO_DECAY. Raises TypeError for a
    tensor that has no place in a layout.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedTensorMixin):
            raise TypeError(f"parameter {name} has no shape yet: run one batch through the model in its factory")
        yield *_owner(module, name), _parameter_spec(name, parameter, no_decay_group)
    for name, buffer in module.named_buffers():
        owner, attribute = _owner(module, name)
        if attribute not in owner._non_persistent_buffers_set:
            yield owner, attribute, _buffer_spec("buffer", name, buffer)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def _parameter_spec(name: str, parameter: nn.Parameter, no_decay_group: bool) -> TensorSpec:
    if not parameter.requires_grad:
        spec = _buffer_spec("parameter", name, parameter)
        return spec._replace(section="params", group=FROZEN) if spec.section == "stats" else spec
    _require(parameter.dtype in _FLOATS, "parameter", name, parameter)
    group = NO_DECAY if no_decay_group and parameter.dim() <= 1 else DECAYED
    return TensorSpec(name, tuple(parameter.shape), dtype_name(parameter.dtype), "params", group)


def _buffer_spec(what: str, name: str, buffer: torch.Tensor) -> TensorSpec:
    _require(buffer.dtype in _FLOATS | _COUNTERS, what, name, buffer)
    section = "stats" if buffer.dtype in _FLOATS else "counters"
    if section == "stats" and not torch.isfinite(buffer).all():
        raise TypeError(f"{what} {name} holds inf or NaN, which a run refuses: register it with persistent=False")
    return TensorSpec(name, tuple(buffer.shape), dtype_name(buffer.dtype), section)


def _require(accepted: bool, what: str, name: str, tensor: torch.Tensor) -> None:
    if not accepted:
        raise TypeError(
            f"{what} {name} is {dtype_name(tensor.dtype)}; a run holds float32, float16, bfloat16, and "
            "integer or boolean buffers: convert it in the model's factory, for instance by module.float()"
        )


def common_device(module: nn.Module) -> torch.device:
    """The device that all of the module is on. Raises TypeError for a module on several."""
    devices = {t.device for t in (*module.parameters(), *module.buffers())}
    if len(devices) > 1:
        raise TypeError(f"the model is spread over {', '.join(sorted(map(str, devices)))}; a worker has one device")
    return devices.pop() if devices else torch.device("cpu")
