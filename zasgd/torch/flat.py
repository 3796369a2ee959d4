"""A torch module whose values come from flat vectors and whose gradient leaves in one.

Decides when parameters and flat memory are the same thing, and sees when somebody else parted them. Never decides
what to do with a gradient.

* A float32 parameter in C order is a view of the vector, on the module's device; any other is copied. On a CPU that
  vector is the memory itself: what is written there is at once what forward computes with.
* That memory is also what the server takes to be this worker's parameters. So a write by anybody else is an error, and
  so is a change of kind that the layout does not know (`.half()`, `.double()`, `.to(device)`). Parameters that only
  came to lie elsewhere (`.float()`, `.to("cpu")`, a swap of `.data`) are made views again, and ones that are strided
  now (channels_last) are copied from then on.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from zasgd.core.layout import SECTIONS, Layout
from zasgd.core.region import Memory, RegionPlan, memories, private_region
from zasgd.torch.departure import Parts, Ready
from zasgd.torch.device import Device, device_of
from zasgd.torch.gradients import CLIP_EPS, Gradients, dense
from zasgd.torch.placed import FROZEN, Placed, common_device, tensors_of
from zasgd.torch.slot import Slot
from zasgd.torch.tensors import dtype_name

Array = np.ndarray[Any, Any]

MAX_SLOTS = 8
"""Memories whose views are kept; of others they are made again, in microseconds per parameter."""

_NUMPY = {"params": np.float32, "stats": np.float32, "counters": np.int64}


class ForeignWriteError(RuntimeError):
    """User code wrote into a parameter; here only the server may, or the write would be lost."""


class DetachedError(RuntimeError):
    """A parameter is no longer what the run took over, so neither its values nor its gradient can be exchanged."""


@dataclass(frozen=True, slots=True)
class FlatGradient:
    """What leaves of the params section for one push.

    grads: the gradient in the memory that is bound: float32, as long as the section, zero where a parameter got none.
    absent: which trained tensors of the section, counted in its order, got no gradient. norm: its 2-norm before
    clipping, 0 where nothing was to be clipped.
    """

    grads: Array
    finite: bool
    absent: frozenset[int] = frozenset()
    norm: float = 0.0


class FlatModule:
    """Takes over `module`, which must be on its final device, and binds it to a memory of its own.

    With `no_decay_group` the parameters of at most one dimension (biases, norm weights) go into the group NO_DECAY.
    device: how to copy to and from the module's device, by default as its kind wants. Raises TypeError for a tensor
    that has no place in a layout: float64, complex, not yet initialised, or on another device than the rest.
    """

    def __init__(self, module: nn.Module, no_decay_group: bool = False, device: Device | None = None) -> None:
        self.module = module
        found = list(tensors_of(module, no_decay_group))
        self.device = common_device(module)
        self.layout = Layout(tuple(spec for _, _, spec in found))
        self._device = device or device_of(self.device)
        self._by_section: dict[str, list[Placed]] = {s: [] for s in SECTIONS}
        for owner, attribute, spec in found:
            beside, start = self._by_section[spec.section], self.layout.offsets[spec.name]
            beside.append(Placed(owner, attribute, spec, len(beside), start, start + spec.num_elements))
        self._params = self._by_section["params"]
        self._trained = [t for t in self._params if t.spec.group != FROZEN]
        for t in self._params:
            t.parameter = t.now()
        self._slots: OrderedDict[tuple[int, int], Slot] = OrderedDict()
        self._slot = self._private()
        self._bound = False
        self._unadopted: set[str] = set()
        self._gradients = Gradients(self._trained, self._device, self._slot)
        for t in self._params:
            self._share(t)

    def initial(self) -> dict[str, Array]:
        """Copies of the three sections as last loaded or bound; before that, as the module was built."""
        memory = self._slot.memory
        return {"params": memory.params.copy(), "stats": memory.stats.copy(), "counters": memory.counters.copy()}

    def new_memory(self) -> Memory:
        """A memory of this process alone with what `initial` gives."""
        plan = RegionPlan(self.layout.sizes["params"])
        memory = memories(private_region(plan), self.layout)[0]
        for section, vector in self.initial().items():
            getattr(memory, section)[:] = vector
        return memory

    # ---- memory -------------------------------------------------------------------------------------

    def bind(self, memory: Memory) -> None:
        """From now on parameters are what `memory` holds, and gradients are written there; `adopt` begins with it.

        Drops what every `p.grad` holds. The arrays are kept in use until `unbind` or until MAX_SLOTS others came.
        Raises ForeignWriteError if parameters were written since they were last adopted, and what `adopt` raises.
        """
        if self._bound:
            self._require_unwritten()
        slot = self._slot_of(memory)
        if slot is not self._slot:
            self._switch(slot)
        self._bound = True
        self._unadopted = set(SECTIONS)
        self._gradients.begin(slot)

    def unbind(self) -> None:
        """Go back to a memory of its own, with the values of the last, and let go of all others."""
        self._switch(self._slot_of(self.new_memory()))
        self._gradients.begin(self._slot)
        self._bound = False
        self._keep_only(self._slot)

    def prefetch(self, memory: Memory) -> None:
        """Begin to copy the parameters of a memory that was bound before to the device, for the next `bind`.

        They must be complete and stay. May be called while another memory is computed on, from another thread.
        """
        slot = self._slots.get(_key(memory))
        if slot is not None and not slot.fresh and slot is not self._slot:
            self._device.upload(memory.params, slot.values, slot.used)
            slot.fresh = True

    def _private(self) -> Slot:
        """A memory with the module's own values."""
        plan = RegionPlan(self.layout.sizes["params"])
        memory = memories(private_region(plan), self.layout)[0]
        for section in SECTIONS:
            self._collect_into(getattr(memory, section), section)
        slot = self._slot_of(memory)
        self._device.upload(memory.params, slot.values, slot.used)
        self._device.await_uploads()
        return slot

    def _slot_of(self, memory: Memory) -> Slot:
        """The slot of a memory: known by its vectors, of which a slot keeps hold."""
        key = _key(memory)
        slot = self._slots.get(key) or self._new_slot(memory)
        slot.memory = memory  # the same vectors, but perhaps other buffers
        self._slots[key] = slot
        self._slots.move_to_end(key)
        return slot

    def _new_slot(self, memory: Memory) -> Slot:
        while len(self._slots) >= MAX_SLOTS:
            self._device.release(self._slots.popitem(last=False)[1].memory)
        self._device.register(memory)
        return Slot(memory, self._params, self._device)

    def _switch(self, slot: Slot) -> None:
        """Let the parameters be views of another slot; of the first memory, which was only ours, nothing is kept."""
        self._follow_detached()
        for t in self._params:
            if t.viewed:
                t.parameter.data = slot.params[t.index]
        self._slot = slot
        if not self._bound:
            self._keep_only(slot)

    def _keep_only(self, slot: Slot) -> None:
        for key, other in list(self._slots.items()):
            if other is not slot:
                self._device.release(other.memory)
                del self._slots[key]

    # ---- values in ----------------------------------------------------------------------------------

    def load(self, section: str, start: int, piece: Array) -> None:
        """Write `piece` to the elements of a section from `start` on; `adopt` hands them to the module."""
        flat = getattr(self._slot.memory, section)
        if not 0 <= start <= start + len(piece) <= len(flat):
            raise ValueError(f"{len(piece)} elements at {start} do not fit into {section} of {len(flat)}")
        flat[start : start + len(piece)] = piece
        self._unadopted.add(section)

    def adopt(self) -> None:
        """Make what was bound or loaded the values that forward computes with, and tell autograd that they changed.

        Raises DetachedError.
        """
        if "params" in self._unadopted:
            self._follow_detached()
            self._adopt_params()
        for section in ("stats", "counters"):
            if section in self._unadopted and self._by_section[section]:
                self._adopt_buffers(section)
        self._unadopted.clear()

    def _adopt_params(self) -> None:
        slot = self._slot
        if not slot.fresh:
            self._device.upload(slot.memory.params, slot.values, self._device.mark())
        slot.fresh = False
        self._device.await_uploads()
        for t in self._params:
            if not t.viewed:
                t.parameter.data.copy_(slot.params[t.index])
        torch.autograd.graph.increment_version([t.parameter for t in self._params])
        self._note_versions()

    @torch.no_grad()
    def _adopt_buffers(self, section: str) -> None:
        flat = torch.from_numpy(getattr(self._slot.memory, section)).to(self.device)
        for t in self._by_section[section]:
            t.now().copy_(t.of(flat))

    def _note_versions(self) -> None:
        for t in self._params:
            t.version = t.parameter._version

    # ---- what others did to the parameters ------------------------------------------------------------

    def _share(self, t: Placed) -> None:
        """Let a parameter be a view of the slot, which holds its value already, if its kind allows."""
        parameter = t.parameter
        t.viewed = parameter.dtype == torch.float32 and parameter.is_contiguous() and t.spec.num_elements > 0
        t.direct = t.viewed and self._device.shares_memory
        if t.viewed:
            parameter.data = self._slot.params[t.index]
        t.version = parameter._version

    def _detached(self) -> list[Placed]:
        """The tensors whose parameter is another one, or lies elsewhere or in another form, than as we left it."""
        at = self._slot.params_at
        return [
            t
            for t in self._params
            if t.owner._parameters.get(t.attribute) is not t.parameter
            or (t.parameter.data_ptr() != at[t.index] if t.viewed else not self._is_as_placed(t, t.parameter))
        ]

    def _follow_detached(self) -> None:
        detached = self._detached()
        for t in detached:
            self._follow(t)
        if detached:
            self._slot.mend(self._params)

    def _follow(self, t: Placed) -> None:
        """Make a parameter that was moved or replaced a view again. Raises DetachedError for one of another kind."""
        found = self._required(t)
        if found is not t.parameter:
            t.parameter = found
            if t.spec.group != FROZEN:
                self._gradients.watch(t)
        self._share(t)

    def _required(self, t: Placed) -> Any:
        """What the module has for a parameter now, if it is what the layout says."""
        found = t.owner._parameters.get(t.attribute)
        if found is None or not self._is_as_placed(t, found):
            raise DetachedError(
                f"parameter {t.spec.name} was {t.spec.dtype} of shape {t.spec.shape} on {self.device} when the run took"
                f" the model over and is {_told(found)} now: convert or move a model in its factory, not later"
            )
        return found

    def _is_as_placed(self, t: Placed, parameter: torch.Tensor) -> bool:
        same = dtype_name(parameter.dtype) == t.spec.dtype and parameter.shape == t.spec.shape
        can_train = parameter is t.parameter or parameter.requires_grad == (t.spec.group != FROZEN)
        return same and can_train and parameter.device == self.device

    def _require_unwritten(self) -> None:
        written = [t for t in self._params if t.parameter._version != t.version]
        if written:
            self._note_versions()  # told once: the caller knows now that the memory is spoilt
            raise ForeignWriteError(f"parameter {written[0].spec.name} was written in place between pull and push")

    def _require_ours(self) -> None:
        """Raise unless the gradient that was just computed belongs to the values in memory."""
        for t in self._detached():
            found = self._required(t)
            if found is not t.parameter or not torch.equal(found.detach(), self._slot.params[t.index]):
                raise ForeignWriteError(f"parameter {t.spec.name} was replaced between pull and push")
            self._share(t)
        self._require_unwritten()

    # ---- values out ---------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Drop what every `p.grad` holds: the next backward begins a new gradient."""
        self._gradients.begin(self._slot)

    def expect_last(self, parts: Parts = (), ready: Ready | None = None) -> None:
        """Say that the next backward is the last of an unclipped gradient; see Gradients.expect_last."""
        self._gradients.expect_last(parts, ready)

    def gradient(self, clip_norm: float = 0.0) -> FlatGradient:
        """Complete the gradient in the memory that is bound; scale it in place to `clip_norm` if longer, 0 for never.

        Raises ForeignWriteError if a parameter was written since the last `adopt`, and DetachedError.
        """
        self._require_ours()
        absent, norm, finite = self._gradients.collect(clip_norm)
        self._slot.used = self._device.mark()
        return FlatGradient(self._slot.memory.grads, finite, absent, norm)

    def presence(self, absent: Collection[int]) -> bytes:
        """A bit per tensor of the params section, in order, lowest bit first, 0 for the absent; empty without any."""
        if not absent:
            return b""
        present = [t.index not in absent for t in self._params]
        return np.packbits(present, bitorder="little").tobytes()

    # ---- local steps --------------------------------------------------------------------------------

    def trained(self) -> dict[int, tuple[int, torch.Tensor]]:
        """Index in the params section -> (parameter group, parameter) of all that an optimizer may move."""
        return {t.index: (t.spec.group, t.parameter) for t in self._trained}

    @torch.no_grad()
    def clip(self, clip_norm: float) -> bool:
        """Scale every `p.grad` in place to `clip_norm` if longer, 0 for never; whether they are finite.

        Raises ForeignWriteError if a parameter was written since the last `adopt` or `step_with`, and DetachedError.
        """
        self._require_ours()
        if not clip_norm and self._gradients.sees_all:
            return self._gradients.finite
        grads = list(self._dense_grads())
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        if math.isfinite(norm) and 0 < clip_norm < norm:
            for g in grads:
                g.mul_(clip_norm / (norm + CLIP_EPS))
        return math.isfinite(norm)

    def _dense_grads(self) -> Iterator[torch.Tensor]:
        for t in self._trained:
            grad = t.parameter.grad
            if grad is not None:
                if grad.is_sparse:
                    t.parameter.grad = grad = dense(grad)
                yield grad

    def step_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer move the trained parameters, and on a CPU the memory with them."""
        optimizer.step()
        self._note_versions()

    @torch.no_grad()
    def go_back(self, params: Array) -> None:
        """Make the memory again what `params` gave before steps moved it; `adopt` brings it to the module."""
        if self._device.shares_memory:
            flat = torch.from_numpy(params)
            for t in self._params:
                if t.viewed:
                    self._slot.params[t.index].copy_(t.of(flat))
        self._unadopted.add("params")

    # ---- the module's values ------------------------------------------------------------------------

    def params(self, out: Array | None = None) -> Array:
        """The module's parameters as they are now: a float32 vector of the section, `out` or a new one."""
        return self._collected("params", out)

    @property
    def grads(self) -> Array:
        """Where gradients are written in the memory that is bound."""
        return self._slot.memory.grads

    def stats(self) -> Array:
        """The module's float buffers as they are now: a new float32 vector of the section."""
        return self._collected("stats")

    def counters(self) -> Array:
        """The module's integer and boolean buffers as they are now: a new int64 vector of the section."""
        return self._collected("counters")

    def _collected(self, section: str, out: Array | None = None) -> Array:
        flat = np.zeros(self.layout.sizes[section], _NUMPY[section]) if out is None else out
        if self._by_section[section]:
            self._collect_into(flat, section)
        return flat

    @torch.no_grad()
    def _collect_into(self, out: Array, section: str) -> None:
        flat = torch.from_numpy(out)
        for t in self._by_section[section]:
            t.of(flat).copy_(t.now())


def _key(memory: Memory) -> tuple[int, int]:
    return id(memory.params), id(memory.grads)


def _told(found: torch.Tensor | None) -> str:
    if found is None:
        return "gone"
    told = f"{dtype_name(found.dtype)} of shape {tuple(found.shape)} on {found.device}"
    return told if found.requires_grad else f"{told} without requires_grad"
