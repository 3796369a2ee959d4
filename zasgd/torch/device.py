"""How a module's tensors and the flat vectors in host memory reach each other.

Decides when a copy begins and what waits for it; never which tensor is copied where. On the CPU nothing is copied: a
parameter is a view of the vector. A GPU has a vector of its own, and copies run beside the computation, on a stream of
their own, out of memory that is locked for them (the region itself, shared or not).
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Protocol

import numpy as np
import torch

from zasgd.core.region import Memory

Array = np.ndarray[Any, Any]

_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered


class Device(Protocol):
    """Where a module computes.

    shares_memory: parameters may be views of the host's vectors, and copies are made before a call returns.
    """

    shares_memory: bool

    def register(self, memory: Memory) -> None:
        """Prepare a memory for copies to and from the device."""

    def release(self, memory: Memory) -> None:
        """Undo `register`; no copy of this memory is under way."""

    def vector(self, params: Array) -> torch.Tensor:
        """A vector on the device, as long as `params`, float32, for parameters to be views of."""

    def mark(self) -> Any:
        """A ticket for all that has been asked to be computed so far."""

    def upload(self, params: Array, into: torch.Tensor, after: Any) -> None:
        """Begin to copy `params` into a `vector`, once `after` is done: the last computation that reads `into`."""

    def await_uploads(self) -> None:
        """Let what is computed from now on see what was uploaded; the host need not wait."""

    def download(self, source: torch.Tensor, into: torch.Tensor) -> Any:
        """Begin to copy, converted, as soon as what has been asked to compute `source` so far is done.

        into: a contiguous float32 tensor on the host, of a registered memory. Returns a ticket for `done`. `source`
        stays as it is until then.
        """

    def done(self, ticket: Any) -> bool:
        """Whether the host may read what this download wrote."""

    def synchronize(self) -> None:
        """Wait until every download is done."""


class HostDevice:
    """The CPU: a vector is the host's memory, and a copy is done when it has been asked for."""

    shares_memory = True

    def register(self, memory: Memory) -> None:
        """Nothing to do."""

    def release(self, memory: Memory) -> None:
        """Nothing to do."""

    def vector(self, params: Array) -> torch.Tensor:
        """The same memory."""
        return torch.from_numpy(params)

    def mark(self) -> None:
        """Nothing to tell: what was asked for is done."""

    def upload(self, params: Array, into: torch.Tensor, after: None) -> None:
        """Nothing to do."""

    def await_uploads(self) -> None:
        """Nothing to do."""

    def download(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Copy at once."""
        into.copy_(source)

    def done(self, ticket: None) -> bool:
        """Always."""
        return True

    def synchronize(self) -> None:
        """Nothing to do."""


class BlockingDevice(HostDevice):
    """Any accelerator that torch knows, by copies that the host waits for."""

    shares_memory = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def vector(self, params: Array) -> torch.Tensor:
        """A vector of its own."""
        return torch.empty(len(params), device=self._device)

    def upload(self, params: Array, into: torch.Tensor, after: None) -> None:
        """Copy at once."""
        into.copy_(torch.from_numpy(params))


class CudaDevice:
    """A GPU of CUDA: copies on a side stream, from and to memory that is locked with cudaHostRegister.

    Where memory cannot be locked, copies are as right and slower, and a warning says so.
    """

    shares_memory = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._locked: set[int] = set()

    def register(self, memory: Memory) -> None:
        """Lock its parameters and its gradient."""
        for vector in (memory.params, memory.grads):
            if vector.nbytes:
                self._lock(vector)

    def _lock(self, vector: Array) -> None:
        address = vector.ctypes.data
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, vector.nbytes, 0))
        if code == 0:
            self._locked.add(address)
            return
        _forget_last_error(self._device)
        if code != _ALREADY_REGISTERED:
            said = f"{vector.nbytes} bytes cannot be locked for {self._device} (CUDA error {code}): copies are slower"
            warnings.warn(said, stacklevel=2)

    def release(self, memory: Memory) -> None:
        """Unlock what `register` locked."""
        self.synchronize()
        for vector in (memory.params, memory.grads):
            address = vector.ctypes.data
            if address in self._locked:
                self._locked.remove(address)
                torch.cuda.cudart().cudaHostUnregister(address)

    def vector(self, params: Array) -> torch.Tensor:
        """A vector of its own."""
        return torch.empty(len(params), device=self._device)

    def mark(self) -> torch.cuda.Event:
        """An event of the current stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def upload(self, params: Array, into: torch.Tensor, after: torch.cuda.Event) -> None:
        """Copy on the side stream."""
        self._side.wait_event(after)
        with torch.cuda.stream(self._side):
            into.copy_(torch.from_numpy(params), non_blocking=True)

    def await_uploads(self) -> None:
        """Let the current stream wait for the side stream."""
        torch.cuda.current_stream(self._device).wait_stream(self._side)

    def download(self, source: torch.Tensor, into: torch.Tensor) -> torch.cuda.Event:
        """Copy on the side stream, behind the current one; the ticket is an event of the side stream."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            into.copy_(source, non_blocking=True)
            return self._side.record_event()

    def done(self, ticket: torch.cuda.Event) -> bool:
        """Whether the stream has come to the event."""
        return bool(ticket.query())

    def synchronize(self) -> None:
        """Wait for the side stream."""
        self._side.synchronize()


def _forget_last_error(device: torch.device) -> None:
    """Let the error that CUDA remembers come up here, not in the next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def device_of(device: torch.device) -> Device:
    """How to copy to and from a torch device."""
    if device.type == "cpu":
        return HostDevice()
    return CudaDevice(device) if device.type == "cuda" else BlockingDevice(device)
