"""Parameters are the memory that is bound; what parts them is mended, or named before it does harm."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

from zasgd.core.layout import ALIGN_BYTES
from zasgd.core.region import Memory, RegionPlan, memories, private_region
from zasgd.torch.flat import MAX_SLOTS, DetachedError, FlatModule, ForeignWriteError


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 5))


def inputs(seed: int = 1) -> torch.Tensor:
    return torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(seed))


def slots(flat: FlatModule, count: int) -> tuple[Memory, ...]:
    """The slots of one region, each with other values."""
    found = memories(private_region(RegionPlan(flat.layout.sizes["params"], count)), flat.layout)
    for i, memory in enumerate(found):
        memory.params[:] = flat.initial()["params"] * (1 + i)
    return found


def stepped(flat: FlatModule, memory: Memory) -> np.ndarray:
    """The gradient at the values in `memory`, in its own array."""
    flat.bind(memory)
    flat.adopt()
    flat.module(inputs()).square().sum().backward()
    return flat.gradient().grads.copy()


def plain_gradient(flat: FlatModule, params: np.ndarray) -> np.ndarray:
    """The same by plain autograd."""
    plain, found = net(), np.zeros_like(params)
    for name, parameter in plain.named_parameters():
        start = flat.layout.offsets[name]
        value = torch.from_numpy(params[start : start + parameter.numel()].reshape(parameter.shape).copy())
        parameter.data = value
    plain(inputs()).square().sum().backward()
    for name, parameter in plain.named_parameters():
        start = flat.layout.offsets[name]
        found[start : start + parameter.numel()] = parameter.grad.reshape(-1)
    return found


# ---- memories ------------------------------------------------------------------------------------------------


def test_parameters_lie_in_the_memory_that_is_bound_each_with_a_storage_of_its_own():
    flat = FlatModule(net())
    (memory,) = slots(flat, 1)
    flat.bind(memory)
    for name, parameter in flat.module.named_parameters():
        assert parameter.data_ptr() == memory.params.ctypes.data + 4 * flat.layout.offsets[name]
        assert parameter.data_ptr() % ALIGN_BYTES == 0
        assert parameter.untyped_storage().nbytes() == 4 * parameter.numel()


def test_slots_take_turns_and_what_is_written_into_one_is_what_it_computes_on_next():
    flat = FlatModule(net())
    both = slots(flat, 2)
    for step in range(6):
        memory = both[step % 2]
        np.testing.assert_array_equal(stepped(flat, memory), plain_gradient(flat, memory.params))
        memory.params[:] *= np.float32(0.9)  # the answer of the server, in place


def test_the_gradient_of_one_slot_stays_while_another_is_computed_on():
    flat = FlatModule(net())
    first, second = slots(flat, 2)
    kept = stepped(flat, first)
    assert not np.array_equal(stepped(flat, second), kept)
    np.testing.assert_array_equal(first.grads, kept)


def test_more_memories_than_are_remembered_are_as_good():
    flat = FlatModule(net())
    many = slots(flat, 2 * MAX_SLOTS)
    for memory in (*many, *many):
        np.testing.assert_array_equal(stepped(flat, memory), plain_gradient(flat, memory.params))
    assert len(flat._slots) == MAX_SLOTS


def test_the_same_vectors_may_come_with_other_buffers():
    flat = FlatModule(net())
    (memory,) = slots(flat, 1)
    stepped(flat, memory)
    stats = np.full_like(memory.stats, 3)
    flat.bind(memory._replace(stats=stats))
    flat.adopt()
    assert flat.module[1].running_mean.tolist() == [3, 3, 3]


def test_a_module_lets_go_of_memories_with_their_values():
    flat = FlatModule(net())
    (memory,) = slots(flat, 1)
    stepped(flat, memory)
    flat.unbind()
    kept = memory.params.copy()
    memory.params[:] = 0
    np.testing.assert_array_equal(flat.params(), kept)
    assert list(flat._slots.values()) == [flat._slot]


def test_copies_and_files_of_a_module_hold_its_values_and_no_more():
    flat = FlatModule(net())
    (memory,) = slots(flat, 1)
    stepped(flat, memory)
    copied, file = copy.deepcopy(flat.module), io.BytesIO()
    torch.save(flat.module.state_dict(), file)
    memory.params[:] = 0
    expected = net()[3].weight
    assert torch.equal(copied[3].weight, expected)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded["3.weight"], expected)
    assert loaded["3.weight"].untyped_storage().nbytes() == 4 * 60


# ---- what is mended --------------------------------------------------------------------------------------------


MENDED = {
    "float": lambda module: module.float(),
    "half and back": lambda module: module.bfloat16().float(),
    "to cpu": lambda module: module.to("cpu"),
    "data": lambda module: setattr(module[3].weight, "data", module[3].weight.detach().clone()),
    "channels_last": lambda module: module.to(memory_format=torch.channels_last),
    "assigned": lambda module: module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True),
    "another parameter": lambda module: setattr(module[3], "weight", nn.Parameter(torch.ones(5, 12))),
}


@pytest.mark.parametrize("how", MENDED)
def test_what_came_to_lie_elsewhere_between_pushes_is_taken_up_again(how):
    flat = FlatModule(net())
    first, second = slots(flat, 2)
    stepped(flat, first)
    MENDED[how](flat.module)
    for memory in (second, first, first):
        np.testing.assert_allclose(stepped(flat, memory), plain_gradient(flat, memory.params), rtol=1e-4, atol=1e-5)
    assert flat.module[3].weight.data_ptr() == flat._slot.params_at[4]
    assert flat.module[3].weight.grad.data_ptr() == flat._slot.grads_at[4]
    flat.module(inputs()).square().sum().backward()  # adds to it where it lies: a hook sees it
    assert flat.module[3].weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("how", ["float", "to cpu", "data", "channels_last"])
def test_within_a_step_too_if_the_values_are_the_same(how):
    flat = FlatModule(net())
    (memory,) = slots(flat, 1)
    flat.bind(memory)
    flat.adopt()
    MENDED[how](flat.module)
    flat.module(inputs()).square().sum().backward()
    found = flat.gradient()
    assert found.finite
    np.testing.assert_allclose(found.grads, plain_gradient(flat, memory.params), rtol=1e-4, atol=1e-5)
    assert flat.module[3].weight.data_ptr() == flat._slot.params_at[4]


def test_a_channels_last_parameter_keeps_its_form_and_gets_new_values_by_copy():
    flat = FlatModule(net())
    (memory,) = slots(flat, 1)
    stepped(flat, memory)
    flat.module.to(memory_format=torch.channels_last)
    memory.params[:] = 2
    stepped(flat, memory)
    weight = flat.module[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    assert (weight == 2).all()


def test_before_the_first_memory_is_bound_the_module_may_be_written():
    flat = FlatModule(net())
    flat.module.load_state_dict(net(5).state_dict())
    assert torch.equal(flat.module[3].weight, net(5)[3].weight)
    flat.adopt()
    assert np.array_equal(flat.initial()["params"][flat.layout.offsets["3.bias"] :][:5], net(5)[3].bias.detach())
    (memory,) = slots(flat, 1)
    np.testing.assert_array_equal(stepped(flat, memory), plain_gradient(flat, memory.params))


def test_a_compiled_module_computes_on_whichever_memory_is_bound():
    flat = FlatModule(net())
    compiled = torch.compile(flat.module, backend="aot_eager")
    first, second = slots(flat, 2)
    for memory in (first, second, first):
        flat.bind(memory)
        flat.adopt()
        compiled(inputs()).square().sum().backward()
        found = flat.gradient()
        np.testing.assert_allclose(found.grads, plain_gradient(flat, memory.params), rtol=1e-4, atol=1e-5)
        assert flat.module[3].weight.grad.data_ptr() == flat._slot.grads_at[4]
        memory.params[:] *= np.float32(0.5)


# ---- what is named ---------------------------------------------------------------------------------------------


DETACHED = {
    "half": (lambda module: module.half(), "is float16 of shape"),
    "double": (lambda module: module.double(), "is float64 of shape"),
    "moved": (lambda module: module.to("meta"), "on meta"),
    "gone": (lambda module: delattr(module[0], "weight"), "is gone now"),
    "reshaped": (lambda module: setattr(module[0].weight, "data", torch.ones(3, 2, 2, 2)), r"\(3, 2, 2, 2\)"),
    "untrained": (lambda module: setattr(module[0], "weight", nn.Parameter(torch.ones(3, 2, 3, 3), False)), "without"),
}


@pytest.mark.parametrize("how", DETACHED)
@pytest.mark.parametrize("within_a_step", [False, True])
def test_a_parameter_of_another_kind_is_named_with_what_to_do(how, within_a_step):
    spoil, words = DETACHED[how]
    flat = FlatModule(net())
    (memory,) = slots(flat, 1)
    stepped(flat, memory)
    if within_a_step:
        flat.bind(memory)
        flat.adopt()
    spoil(flat.module)
    with pytest.raises(DetachedError, match=f"parameter 0.weight was float32 .*{words}.*factory") as caught:
        if within_a_step:
            flat.gradient()
        else:
            flat.bind(memory)
            flat.adopt()
    assert "\n" not in str(caught.value)


@torch.no_grad()
def clamp(module: nn.Module) -> None:
    module[3].weight.clamp_(0)


@pytest.mark.parametrize("write", [clamp, lambda module: module.load_state_dict(net(5).state_dict())])
def test_a_write_between_two_pushes_spoils_the_servers_snapshot_and_is_named(write):
    flat = FlatModule(net())
    first, second = slots(flat, 2)
    stepped(flat, first)
    write(flat.module)
    with pytest.raises(ForeignWriteError, match=r"parameter \d\.weight was written in place"):
        flat.bind(second)


@pytest.mark.parametrize(
    "swap",
    [
        lambda module: setattr(module[3].weight, "data", torch.ones(5, 12)),
        lambda module: setattr(module[3], "weight", nn.Parameter(module[3].weight.detach().clone())),
    ],
)
def test_other_values_or_another_parameter_between_pull_and_push_are_named(swap):
    flat = FlatModule(net())
    (memory,) = slots(flat, 1)
    flat.bind(memory)
    flat.adopt()
    swap(flat.module)
    flat.module(inputs()).square().sum().backward()
    with pytest.raises(ForeignWriteError, match=r"parameter 3\.weight was replaced between pull and push"):
        flat.gradient()
