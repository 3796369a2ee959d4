"""A torch module as the flat vectors of a run, and back.

Decides which tensor lies in which section and group, makes parameters views of one vector, and collects
gradients into another. Never decides what to do with them.

* A float32 parameter in C order becomes a view of the vector, on the module's device; any other is copied.
* A parameter with `requires_grad=False` lies in `params` in the group FROZEN (rate 0, no decay): every worker
  and the exported model hold what the first worker had, bit for bit. Integer ones lie with the counters.
* Persistent float buffers are `stats`, integer and boolean ones `counters`; others are left to the module.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from zasgd.core.layout import ALIGN_BYTES, SECTIONS, Layout, TensorSpec
from zasgd.torch.tensors import dtype_name

Array = np.ndarray[Any, Any]

DECAYED, NO_DECAY, FROZEN = 0, 1, 2
"""Parameter groups: weight decay applies, does not, nothing applies. `Recipe.group_specs` lists the three."""

_NUMPY = {"params": np.float32, "stats": np.float32, "counters": np.int64}
_FLOATS = {torch.float32, torch.float16, torch.bfloat16}
_COUNTERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}


_CLIP_EPS = 1e-6  # of torch.nn.utils.clip_grad_norm_


class ForeignWriteError(RuntimeError):
    """User code wrote into a parameter in place; here only the server may, or the write would be lost."""


@dataclass(frozen=True, slots=True)
class FlatGradient:
    """What leaves of the params section for one push.

    grads: float32, as long as the section, zero where a parameter got no gradient. norm: of the gradient, its 2-norm
    before clipping. absent: which trained tensors of the section, counted in its order, got no gradient.
    """

    grads: Array
    norm: float
    finite: bool
    absent: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Tensor:
    """One tensor of the module: where it hangs and, from element `start` of its section on, where it lies.

    `index` counts the tensors of its section.

    `view` is set while the parameter shares the flat vector's memory; `version` is autograd's count of
    in-place writes as of the last one of ours.
    """

    owner: nn.Module
    attribute: str
    spec: TensorSpec
    index: int
    start: int
    view: torch.Tensor | None = None
    version: int = 0

    def now(self) -> torch.Tensor:
        """The module's tensor; looked up each time, since a module may replace a buffer."""
        found: torch.Tensor = getattr(self.owner, self.attribute)
        return found

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This tensor's elements of its section's flat vector, in its shape."""
        return flat[self.start : self.start + self.spec.num_elements].view(self.spec.shape)


class FlatModule:
    """A module whose values come from flat vectors and whose gradient leaves in one.

    Takes over `module`, which must be on its final device. With `no_decay_group` the parameters of at most
    one dimension (biases, norm weights) go into the group NO_DECAY. Raises TypeError for a tensor that has no
    place in a layout: float64, complex, not yet initialised, or on another device than the rest.
    """

    def __init__(self, module: nn.Module, no_decay_group: bool = False) -> None:
        self.module = module
        found = list(_tensors_of(module, no_decay_group))
        self.device = _common_device(module)
        self.layout = Layout(tuple(spec for _, _, spec in found))
        self._by_section: dict[str, list[_Tensor]] = {s: [] for s in SECTIONS}
        for owner, attribute, spec in found:
            beside = self._by_section[spec.section]
            beside.append(_Tensor(owner, attribute, spec, len(beside), self.layout.offsets[spec.name]))
        self._trained = [t for t in self._by_section["params"] if t.spec.group != FROZEN]
        self._host = {s: aligned_zeros(n, _NUMPY[s]) for s, n in self.layout.sizes.items()}
        for section, flat in self._host.items():
            flat[:] = self._collected(section)
        self._values = torch.from_numpy(self._host["params"]).to(self.device)  # on the CPU the same memory
        self._unadopted: set[str] = set()
        for t in self._by_section["params"]:
            self._share(t)

    def initial(self) -> dict[str, Array]:
        """Copies of the three sections as last loaded; before any `load`, as the module was built."""
        return {section: flat.copy() for section, flat in self._host.items()}

    # ---- values in ----------------------------------------------------------------------------------

    def load(self, section: str, start: int, piece: Array) -> None:
        """Write `piece` to the elements of a section from `start` on; `adopt` hands them to the module."""
        flat = self._host[section]
        if not 0 <= start <= start + len(piece) <= len(flat):
            raise ValueError(f"{len(piece)} elements at {start} do not fit into {section} of {len(flat)}")
        flat[start : start + len(piece)] = piece
        self._unadopted.add(section)

    @torch.no_grad()
    def adopt(self) -> None:
        """Make what was loaded the values that forward computes with, and tell autograd that they changed."""
        if "params" in self._unadopted:
            if self.device.type != "cpu":
                self._values.copy_(torch.from_numpy(self._host["params"]))
            for t in self._by_section["params"]:
                self._adopt(t)
        for section in self._unadopted - {"params"}:
            flat = torch.from_numpy(self._host[section])
            for t in self._by_section[section]:
                t.now().copy_(t.of(flat))
        self._unadopted.clear()

    def keep_buffers(self, stats: Array, counters: Array) -> None:
        """Make these, as `stats` and `counters` gave them, what `discard_buffers` goes back to."""
        self._host["stats"][:], self._host["counters"][:] = stats, counters

    def discard_buffers(self) -> None:
        """Forget what forward did to the buffers: the next `adopt` makes them what was last loaded or kept."""
        self._unadopted |= {"stats", "counters"}

    def _adopt(self, t: _Tensor) -> None:
        parameter = t.now()
        if t.view is None:
            parameter.copy_(t.of(self._values))
        elif parameter.data_ptr() != t.view.data_ptr():
            self._share(t)  # a round trip such as `.half().float()` gave it memory of its own
        torch.autograd.graph.increment_version(parameter)
        t.version = parameter._version

    def _share(self, t: _Tensor) -> None:
        """Let a parameter be a view of the flat vector, which holds its value already, if its kind allows."""
        parameter = t.now()
        if parameter.dtype == torch.float32 and parameter.is_contiguous() and t.spec.num_elements:
            parameter.data = t.view = t.of(self._values)
        else:
            t.view = None
        t.version = parameter._version

    # ---- values out ---------------------------------------------------------------------------------

    @torch.no_grad()
    def gradient(self, clip_norm: float = 0.0) -> FlatGradient:
        """Collect every `p.grad` into a new vector, which the caller owns; scale it to `clip_norm` if longer.

        Raises ForeignWriteError if a trained parameter was written since the last `adopt`.
        """
        flat = torch.zeros(self.layout.sizes["params"], device=self.device)
        absent: set[int] = set()
        for t in self._trained:
            parameter = t.now()
            self._require_ours(t, parameter)
            if parameter.grad is None:
                absent.add(t.index)
            else:
                t.of(flat).copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
        norm = _norm(flat)
        finite = math.isfinite(norm)
        if finite and 0 < clip_norm < norm:
            flat.mul_(clip_norm / (norm + _CLIP_EPS))
        return FlatGradient(flat.cpu().numpy(), norm, finite, frozenset(absent))

    def presence(self, absent: Collection[int]) -> bytes:
        """A bit per tensor of the params section, in order, lowest bit first, 0 for the absent; empty without any."""
        if not absent:
            return b""
        present = [t.index not in absent for t in self._by_section["params"]]
        return np.packbits(present, bitorder="little").tobytes()

    def _require_ours(self, t: _Tensor, parameter: torch.Tensor) -> None:
        if parameter._version != t.version:
            raise ForeignWriteError(f"parameter {t.spec.name} was written in place between pull and push")

    # ---- local steps --------------------------------------------------------------------------------

    def trained(self) -> dict[int, tuple[int, torch.Tensor]]:
        """Index in the params section -> (parameter group, parameter) of all that an optimizer may move."""
        return {t.index: (t.spec.group, t.now()) for t in self._trained}

    @torch.no_grad()
    def clip(self, clip_norm: float) -> bool:
        """Scale every `p.grad` in place to `clip_norm` if longer, 0 for never; whether they are finite.

        Raises ForeignWriteError if a trained parameter was written since the last `adopt` or `step_with`.
        """
        grads = []
        for t in self._trained:
            parameter = t.now()
            self._require_ours(t, parameter)
            if parameter.grad is not None:
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
                grads.append(parameter.grad)
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        if math.isfinite(norm) and 0 < clip_norm < norm:
            for g in grads:
                g.mul_(clip_norm / (norm + _CLIP_EPS))
        return math.isfinite(norm)

    def step_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer move the trained parameters; `load` and `adopt` bring back what it moved them from."""
        optimizer.step()
        for t in self._trained:
            t.version = t.now()._version

    def params(self) -> Array:
        """The module's parameters as they are now: a new float32 vector of the section."""
        return self._collected("params")

    @property
    def loaded_params(self) -> Array:
        """The parameters as last loaded, to read until the next `load` or step; a view, not a copy."""
        return self._host["params"]

    def stats(self) -> Array:
        """The module's float buffers as they are now: a new float32 vector of the section."""
        return self._collected("stats")

    def counters(self) -> Array:
        """The module's integer and boolean buffers as they are now: a new int64 vector of the section."""
        return self._collected("counters")

    @torch.no_grad()
    def _collected(self, section: str) -> Array:
        flat = aligned_zeros(self.layout.sizes[section], _NUMPY[section])
        for t in self._by_section[section]:
            t.of(torch.from_numpy(flat)).copy_(t.now())
        return flat


def aligned_zeros(num_elements: int, dtype: Any) -> Array:
    """A zeroed vector that begins on a cache line."""
    num_bytes = num_elements * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + ALIGN_BYTES, np.uint8)
    first = -memory.ctypes.data % ALIGN_BYTES
    return memory[first : first + num_bytes].view(dtype)


def _norm(flat: torch.Tensor) -> float:
    """The 2-norm, in one pass where the squares fit float32; not finite exactly if an element is not."""
    norm = float(torch.linalg.vector_norm(flat))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(flat, dtype=torch.float64))


def _tensors_of(module: nn.Module, no_decay_group: bool) -> Iterator[tuple[nn.Module, str, TensorSpec]]:
    """Every tensor that a run holds, with its owner and attribute; a tied one once, under its first name."""
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


def _common_device(module: nn.Module) -> torch.device:
    devices = {t.device for t in (*module.parameters(), *module.buffers())}
    if len(devices) > 1:
        raise TypeError(f"the model is spread over {', '.join(sorted(map(str, devices)))}; a worker has one device")
    return devices.pop() if devices else torch.device("cpu")
