"""Takes each parameter's gradient into flat memory as backward produces it.

Decides when a gradient is copied, looked at and complete; never what becomes of it.

* A hook on each trained parameter runs when autograd has put its gradient into `p.grad`. Where the parameter is a view
  of the host's vector, one pass copies that into the slot and looks for what is not finite, and `p.grad` becomes a
  view of the slot: what is done to it later is done there, and later backwards add to it there. Autograd's own buffer
  is free again at once, so the next layer's gradient finds it in cache.
* Any other gradient (of 16 bits, strided, sparse, on a device) stays where autograd put it, and is copied when the last
  backward has given it. So does one of few elements, unless parts may leave early.
* Memory is never zeroed, except where a tensor got no gradient.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from zasgd.core.copying import copy_checked, finite_at
from zasgd.torch.departure import Departure, Parts, Plan, Ready, plan_of
from zasgd.torch.device import Device
from zasgd.torch.placed import Placed
from zasgd.torch.slot import Slot

CLIP_EPS = 1e-6  # of torch.nn.utils.clip_grad_norm_

SMALL_ELEMENTS = 8192
"""Gradients of up to so many elements wait for the end, unless parts may leave early: hooks cost more than that."""


class RepeatedGradientError(RuntimeError):
    """A part of a gradient that had already left changed: one backward gave the same parameter two gradients."""


class _Download(NamedTuple):
    """A copy under way; `source` is kept until it is done."""

    tensor: Placed
    ticket: Any
    source: torch.Tensor


class Gradients:
    """The gradients of `trained` tensors, collected in one slot at a time."""

    def __init__(self, trained: Sequence[Placed], device: Device, slot: Slot) -> None:
        self._trained = trained
        self._device = device
        self._copies_at_once = device.shares_memory
        self._slot = slot
        self._hooks: dict[int, RemovableHandle] = {}
        self._pending: deque[_Download] = deque()
        self._plan: Plan | None = None
        self._repeats: bool | None = None  # whether a backward gives a parameter two gradients: not known yet
        for t in trained:
            self.watch(t)
        self.begin(slot)

    def watch(self, t: Placed) -> None:
        """Hook the tensor's parameter, and no other that it had before."""
        if t.index in self._hooks:
            self._hooks.pop(t.index).remove()
        ours = weakref.ref(self)  # a parameter must not keep alive what watches it
        may_wait = t.stop - t.start <= SMALL_ELEMENTS

        def arrived(parameter: torch.Tensor) -> None:
            gradients = ours()
            if gradients is None or (may_wait and not gradients._listening):
                return
            grad = parameter.grad
            if grad is not None:
                gradients._arrived(t, grad)

        self._hooks[t.index] = t.parameter.register_post_accumulate_grad_hook(arrived)

    def begin(self, slot: Slot) -> None:
        """Drop what every `p.grad` holds; what backwards give from now on goes into `slot`."""
        if self._pending:
            self._device.synchronize()  # of a gradient that was given up: what is copied must not be freed
        self._slot = slot
        self._finite, self._last, self._listening = True, False, False
        self._departure: Departure | None = None
        self._pending.clear()
        for t in self._trained:
            t.parameter.grad = None
            t.arrived = False

    def expect_last(self, parts: Parts = (), ready: Ready | None = None) -> None:
        """The next backward is the last of this gradient, which will not be clipped: what it gives is final.

        ready(start, stop) is called for each of `parts` as soon as all that is trained in it has come and is finite,
        from within backward and perhaps on another thread; for none after the end of backward or after something was
        not finite. Until one gradient has shown that no parameter gets two within one backward, for none at all.
        """
        self._last = True
        if parts and ready and self._repeats is False:
            if self._plan is None or self._plan.parts != tuple(parts):
                self._plan = plan_of(parts, self._trained)
            if self._finite:
                self._departure = Departure(self._plan, ready)
        self._listening = self._departure is not None or self._repeats is None

    def collect(self, clip_norm: float) -> tuple[frozenset[int], float, bool]:
        """After the last backward: absent tensors, the norm if it is to be clipped (else 0), and whether all is finite.

        The whole gradient is then in the slot's memory, scaled to `clip_norm` if longer, 0 for never.
        """
        self._departure = None
        if self._last and self._repeats is None:
            self._repeats = False
        if clip_norm and not self._copies_at_once:
            absent, norm = self._clipped_on_device(clip_norm)
            return absent, norm, math.isfinite(norm)
        views = self._slot.grads
        others = [t for t in self._trained if t.parameter.grad is not views[t.index]]
        absent = frozenset(t.index for t in others if not self._completed(t))
        self._device.synchronize()
        self._land()
        norm = _clipped(self._slot.grad, clip_norm) if clip_norm else 0.0
        return absent, norm, self._finite and math.isfinite(norm)

    @property
    def finite(self) -> bool:
        """Whether all that was copied so far is."""
        return self._finite

    @property
    def sees_all(self) -> bool:
        """Whether every gradient is copied and looked at as backward gives it."""
        return self._copies_at_once and all(
            t.parameter.grad is None or t.parameter.grad is self._slot.grads[t.index] for t in self._trained
        )

    # ---- one tensor ---------------------------------------------------------------------------------

    def _arrived(self, t: Placed, grad: torch.Tensor) -> None:
        if t.direct and grad.layout is torch.strided:
            self._take(t, grad)
            if self._last:
                self._note_arrival(t)
                self._note_final(t)
        elif self._last:
            self._note_arrival(t)
            self._download(t, grad)
            self._land()

    def _take(self, t: Placed, grad: torch.Tensor) -> None:
        """Copy a gradient into the slot with the finite check, or check what was added to it there."""
        slot, i, source = self._slot, t.index, grad.data_ptr()
        at, count = slot.grads_at[i], t.stop - t.start
        if source == at:
            finite = finite_at(at, count)
        elif source and _is_plain(grad):
            finite = copy_checked(at, source, count)
            t.parameter.grad = slot.grads[i]
        else:
            with torch.no_grad():
                slot.grads[i].copy_(grad)
            finite = finite_at(at, count)
            t.parameter.grad = slot.grads[i]
        if not finite:
            self._finite = False

    def _download(self, t: Placed, grad: torch.Tensor) -> None:
        with torch.no_grad():
            source = dense(grad)
            ticket = self._device.download(source, self._slot.grads[t.index])
        self._pending.append(_Download(t, ticket, source))

    def _land(self) -> None:
        """Look at the downloads that are done, in their order."""
        while self._pending and self._device.done(self._pending[0].ticket):
            t = self._pending.popleft().tensor
            if not finite_at(self._slot.grads_at[t.index], t.stop - t.start):
                self._finite = False
            self._note_final(t)

    def _note_arrival(self, t: Placed) -> None:
        if t.arrived:
            self._repeats = True
            left = self._departure is not None and self._departure.has_left(t.index)
            self._departure = None
            if left:
                raise RepeatedGradientError(
                    f"one backward gave parameter {t.spec.name} two gradients, after the first had left: a checkpoint "
                    "that shares it should be made with use_reentrant=False"
                )
        t.arrived = True

    def _note_final(self, t: Placed) -> None:
        if not self._finite:
            self._departure = None
        elif self._departure is not None:
            self._departure.final(t.index)

    # ---- the whole gradient -------------------------------------------------------------------------

    def _completed(self, t: Placed) -> bool:
        """Whether the tensor has a gradient, which is then in the slot or on its way; zeros if it has none."""
        grad = t.parameter.grad
        if grad is None:
            self._slot.memory.grads[t.start : t.stop] = 0
        elif t.direct and grad.layout is torch.strided:
            self._take(t, grad)  # put there by hand: no hook has seen it
        elif not t.arrived:
            self._download(t, grad)
        return grad is not None

    def _clipped_on_device(self, clip_norm: float) -> tuple[frozenset[int], float]:
        """Put the gradient together on the device, where a norm costs little, and copy it as a whole."""
        flat = torch.zeros_like(self._slot.values)
        absent: set[int] = set()
        for t in self._trained:
            if t.parameter.grad is None:
                absent.add(t.index)
            else:
                t.of(flat).copy_(dense(t.parameter.grad))
        norm = _clipped(flat, clip_norm)
        self._device.download(flat, self._slot.grad)
        self._device.synchronize()
        return frozenset(absent), norm


def dense(grad: torch.Tensor) -> torch.Tensor:
    """The gradient itself, of a sparse one its dense form."""
    return grad if grad.layout is torch.strided else grad.to_dense()


def _is_plain(grad: torch.Tensor) -> bool:
    """Whether the values of a strided tensor lie in host memory one after another, as float32, just as they are."""
    return type(grad) is torch.Tensor and grad.dtype is torch.float32 and grad.is_contiguous() and not grad.is_neg()


def _clipped(flat: torch.Tensor, clip_norm: float) -> float:
    """Scale a vector in place to `clip_norm` if longer; its norm before, not finite exactly if an element is not."""
    norm = float(torch.linalg.vector_norm(flat))
    if not math.isfinite(norm):  # squares may overflow where the elements do not
        norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
    if math.isfinite(norm) and clip_norm < norm:
        flat.mul_(clip_norm / (norm + CLIP_EPS))
    return norm
