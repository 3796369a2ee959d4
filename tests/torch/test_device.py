"""A device that copies when it is waited for computes what the CPU computes, whatever its copies overlap."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_device import FakeDevice
from torch import nn

from zasgd.core.messages import Grant
from zasgd.core.region import Memory, RegionPlan, memories, private_region
from zasgd.torch.device import BlockingDevice, CudaDevice, Device, HostDevice, device_of
from zasgd.torch.flat import MAX_SLOTS, FlatModule
from zasgd.train import trainer as training
from zasgd.train.recipe import load_recipe
from zasgd.train.trainer import Trainer


class Kinds(nn.Module):
    """Layers of 32 and 16 bits, a strided, a frozen and an unused parameter, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.narrow = nn.Linear(12, 6).bfloat16()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Linear(6, 5)
        self.unused = nn.Linear(2, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.conv(images)).flatten(1)
        return self.last(self.frozen(torch.tanh(self.narrow(hidden.bfloat16()).float())))


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(seed))


def slots(flat: FlatModule, count: int) -> tuple[Memory, ...]:
    found = memories(private_region(RegionPlan(flat.layout.sizes["params"], count)), flat.layout)
    for i, memory in enumerate(found):
        for section, vector in flat.initial().items():
            getattr(memory, section)[:] = vector
        memory.params[:] *= 1 + i / 4
    return found


def stepped(flat: FlatModule, memory: Memory, seed: int, num_backwards: int = 1, clip_norm: float = 0.0):
    flat.bind(memory)
    flat.adopt()
    for i in range(num_backwards):
        if i == num_backwards - 1 and not clip_norm:
            flat.expect_last()
        flat.module(inputs(seed + i)).square().sum().backward()
    return flat.gradient(clip_norm)


def both(device: Device) -> tuple[FlatModule, FlatModule]:
    return FlatModule(Kinds(), device=device), FlatModule(Kinds())


@pytest.mark.parametrize("behind", [0, 2, 100])
@pytest.mark.parametrize("num_backwards", [1, 3])
def test_values_go_in_and_gradients_come_out_bit_for_bit(behind, num_backwards):
    device = FakeDevice(behind)
    there, here = both(device)
    theirs, ours = slots(there, 2), slots(here, 2)
    for step in range(5):
        slot = step % 2
        found, expected = (
            stepped(flat, memory[slot], 10 * step, num_backwards) for flat, memory in ((there, theirs), (here, ours))
        )
        np.testing.assert_array_equal(found.grads, expected.grads)
        assert found.finite
        assert found.absent == expected.absent != frozenset()
        np.testing.assert_array_equal(there.stats(), here.stats())
        for memory in (theirs, ours):
            memory[slot].params[:] -= 0.01 * expected.grads
    assert device.num_downloads == 5 * 8  # each present tensor once a push, however many backwards there were


@pytest.mark.parametrize("clip_norm", [0.1, 1e9])
def test_clipping_is_done_on_the_device_and_comes_to_the_same(clip_norm):
    device = FakeDevice()
    there, here = both(device)
    (theirs,), (ours,) = slots(there, 1), slots(here, 1)
    found, expected = stepped(there, theirs, 1, 2, clip_norm), stepped(here, ours, 1, 2, clip_norm)
    np.testing.assert_allclose(found.grads, expected.grads, rtol=1e-6)
    assert found.norm == pytest.approx(expected.norm, rel=1e-6)
    assert found.absent == expected.absent
    assert device.num_downloads == 1


def test_what_is_not_finite_on_the_device_is_seen():
    there, _ = both(FakeDevice())
    (memory,) = slots(there, 1)
    for clip_norm in (0.0, 1.0):
        memory.params[there.layout.offsets["last.bias"]] = np.inf
        assert not stepped(there, memory, 1, 1, clip_norm).finite
        memory.params[there.layout.offsets["last.bias"]] = 0
        assert stepped(there, memory, 1, 1, clip_norm).finite


@pytest.mark.parametrize("behind", [0, 1, 3, 100])
def test_parts_leave_when_their_copies_are_done_and_not_before(behind):
    there, here = both(FakeDevice(behind))
    (theirs,), (ours,) = slots(there, 1), slots(here, 1)
    stepped(there, theirs, 0)
    size = there.layout.sizes["params"]
    heard: list[tuple[int, int, np.ndarray]] = []
    there.bind(theirs)
    there.adopt()
    there.expect_last(
        [(i, i + 16) for i in range(0, size, 16)],
        lambda start, stop: heard.append((start, stop, theirs.grads[start:stop].copy())),
    )
    there.module(inputs(1)).square().sum().backward()
    assert there.gradient().finite
    stepped(here, ours, 0)
    expected = stepped(here, ours, 1).grads
    for start, stop, values in heard:
        np.testing.assert_array_equal(values, expected[start:stop])
    unused = sum(there.layout.offsets[f"unused.{name}"] // 16 * 16 != 0 for name in ("weight", "bias"))
    waiting = sum(1 for start, _, _ in heard if expected[start : start + 16].any())
    assert len({start for start, _, _ in heard}) == len(heard) <= size // 16 - unused
    if behind == 0:
        assert len(heard) == size // 16 - unused
    else:
        assert waiting < np.count_nonzero(expected.reshape(-1, 16).any(axis=1))


def test_the_next_parameters_may_be_on_their_way_while_others_are_computed_on():
    device = FakeDevice()
    there, here = both(device)
    theirs, ours = slots(there, 2), slots(here, 2)
    for memory in theirs:
        stepped(there, memory, 0)
    there.bind(theirs[0])
    there.adopt()
    theirs[1].params[:] *= 2
    ours[1].params[:] *= 2
    uploads = device.num_uploads
    there.prefetch(theirs[1])
    there.module(inputs(3)).square().sum().backward()
    assert there.gradient().finite
    found = stepped(there, theirs[1], 4)
    assert device.num_uploads == uploads + 1
    np.testing.assert_array_equal(found.grads, stepped(here, ours[1], 4).grads)
    stepped(there, theirs[1], 5)
    assert device.num_uploads == uploads + 2


def test_memories_are_registered_once_and_released_when_they_are_let_go():
    device = FakeDevice()
    flat = FlatModule(Kinds(), device=device)
    many = slots(flat, MAX_SLOTS + 2)
    for memory in (*many, *many[-2:]):
        stepped(flat, memory, 0)
    assert len(device.registered) == MAX_SLOTS
    flat.unbind()
    assert len(device.registered) == 1
    assert not {id(memory.params) for memory in many} & device.registered.keys()


@pytest.mark.parametrize("rule", ["asgd", "delta", "easgd", "dana-slim"])
def test_a_trainer_pushes_the_same_from_a_device(rule, monkeypatch):
    overrides = [f"rule.name={rule}", "optimizer.lr=0.1", "optimizer.momentum=0.9", "rule.push_every=2"]
    if rule == "dana-slim":
        overrides.pop()
    recipe = load_recipe("digits", overrides)
    here = Trainer(recipe)
    original = training.FlatModule
    monkeypatch.setattr(training, "FlatModule", lambda *given, **named: original(*given, **named, device=FakeDevice()))
    there = Trainer(recipe)
    ours, theirs = here.new_memory(), there.new_memory()
    for batch in range(0, 4, 2):
        grants = [Grant(0, b, 16 * b, 16 * b + 16) for b in (batch, batch + 1)]
        expected, found = here.gradient(grants, ours, 5000), there.gradient(grants, theirs, 5000)
        np.testing.assert_array_equal(found.grads, expected.grads)
        np.testing.assert_array_equal(theirs.params, ours.params)
        assert (found.loss, found.finite) == (expected.loss, True)


def test_each_kind_of_device_has_its_way_of_copying():
    assert isinstance(device_of(torch.device("cpu")), HostDevice)
    assert isinstance(device_of(torch.device("meta")), BlockingDevice)


def test_a_device_that_copies_at_once_is_as_right():
    there, here = both(BlockingDevice(torch.device("cpu")))
    (theirs,), (ours,) = slots(there, 1), slots(here, 1)
    for step in range(2):
        np.testing.assert_array_equal(stepped(there, theirs, step).grads, stepped(here, ours, step).grads)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_values_go_in_and_gradients_come_out():
    there, here = FlatModule(Kinds().cuda()), FlatModule(Kinds())
    assert isinstance(there._device, CudaDevice)
    (theirs,), (ours,) = slots(there, 1), slots(here, 1)
    for memory, flat in ((theirs, there), (ours, here)):
        flat.bind(memory)
        flat.adopt()
        flat.expect_last()
        flat.module(inputs(1).to(flat.device)).square().sum().backward()
    np.testing.assert_allclose(there.gradient().grads, here.gradient().grads, rtol=1e-2, atol=1e-4)
    there.unbind()
