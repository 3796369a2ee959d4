"""Gradients come into memory bit for bit as plain autograd has them, and parts of them may leave early."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zasgd.torch import gradients
from zasgd.torch.flat import FlatModule
from zasgd.torch.gradients import RepeatedGradientError


@pytest.fixture(autouse=True, params=[0, gradients.SMALL_ELEMENTS], ids=["by hooks", "at the end"])
def small_elements(request, monkeypatch) -> int:
    """These models are small: without this none of their gradients would be taken by its hook."""
    monkeypatch.setattr(gradients, "SMALL_ELEMENTS", request.param)
    return request.param


class Branches(nn.Module):
    """A layer that only large inputs use, one that nothing uses, and one that the forward uses twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.rare, self.never = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.twice(torch.tanh(self.twice(self.first(x))))
        return self.rare(hidden) if x.abs().max() > 10 else hidden


class Tied(nn.Module):
    """One parameter under two names, in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def frozen() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    net[1].requires_grad_(False)
    return net


def halves() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6).bfloat16(), nn.Linear(6, 6).bfloat16())


def sparse() -> nn.Sequential:
    class Indices(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.abs().long() % 9

    return nn.Sequential(Indices(), nn.Embedding(9, 5, sparse=True))


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))


NETS: list[Callable[[], nn.Module]] = [Branches, Tied, frozen, halves, sparse, normed]


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def batch(seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) * scale


def backward(net: nn.Module, inputs: torch.Tensor, share: float = 1.0) -> None:
    inputs = inputs.to(next(net.parameters()).dtype)
    (net(inputs).float().square().mean() * share).backward()


def assert_as_plain(flat: FlatModule, grads: np.ndarray, plain: nn.Module) -> None:
    """Every element is what `plain` has in its `p.grad`, zero where that is None, and where no parameter lies."""
    expected = np.zeros_like(grads)
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            start = flat.layout.offsets[name]
            value = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            expected[start : start + parameter.numel()] = value.float().reshape(-1)
    np.testing.assert_array_equal(grads.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("make", NETS)
def test_one_backward_gives_what_plain_autograd_gives(make):
    flat, plain = FlatModule(built(make)), built(make)
    backward(flat.module, batch(1))
    backward(plain, batch(1))
    found = flat.gradient()
    assert found.finite
    assert_as_plain(flat, found.grads, plain)


@pytest.mark.parametrize("make", NETS)
def test_several_backwards_add_up_as_in_plain_autograd(make):
    flat, plain = FlatModule(built(make)), built(make)
    for seed, share in ((1, 0.25), (2, 0.5), (3, 0.25)):
        if seed == 3:
            flat.expect_last()
        for net in (flat.module, plain):
            backward(net, batch(seed), share)
    assert_as_plain(flat, flat.gradient().grads, plain)


@pytest.mark.parametrize("make", NETS)
def test_the_next_gradient_has_nothing_of_the_last_one(make):
    flat, plain = FlatModule(built(make)), built(make)
    backward(flat.module, batch(1, scale=100))
    flat.gradient()
    flat.zero_grad()
    plain.load_state_dict(flat.module.state_dict())  # the same statistics of the batch before
    backward(flat.module, batch(2))
    backward(plain, batch(2))
    assert_as_plain(flat, flat.gradient().grads, plain)


def test_a_tensor_that_only_an_earlier_backward_used_is_there_and_one_that_none_used_is_absent():
    flat, plain = FlatModule(built(Branches)), built(Branches)
    for seed, scale in ((1, 100), (2, 1)):
        for net in (flat.module, plain):
            backward(net, batch(seed, scale))
    found = flat.gradient()
    assert_as_plain(flat, found.grads, plain)
    names = [t.name for t in flat.layout.of_section("params")]
    assert {names[i] for i in found.absent} == {"never.weight", "never.bias"}


def test_autograds_buffer_makes_room_for_a_view_of_the_memory(small_elements):
    flat = FlatModule(built(Branches))
    memory = flat.new_memory()
    flat.bind(memory)
    flat.adopt()
    backward(flat.module, batch(1))
    grad = flat.module.first.weight.grad
    assert (grad.data_ptr() == memory.grads.ctypes.data) == (small_elements == 0)
    grad.fill_(7)
    assert (flat.gradient().grads[:36] == 7).all()
    assert flat.module.first.weight.grad.data_ptr() == memory.grads.ctypes.data


class Negated(torch.autograd.Function):
    """Its gradient is a view that torch negates lazily."""

    @staticmethod
    def forward(ctx, weight):
        return weight.sum()

    @staticmethod
    def backward(ctx, grad):
        return torch._neg_view(torch.full((5,), 3.0))


def test_a_gradient_that_is_negated_lazily_has_its_sign():
    net = nn.Module()
    net.weight = nn.Parameter(torch.ones(5))
    flat = FlatModule(net)
    Negated.apply(net.weight).backward()
    assert flat.gradient().grads[:5].tolist() == [-3.0] * 5


def test_a_gradient_that_was_put_there_by_hand_is_taken():
    net = nn.Linear(3, 2)
    flat = FlatModule(net)
    net.weight.grad = torch.full((2, 3), 4.0)
    net.bias.grad = torch.tensor([1.0, torch.nan])
    found = flat.gradient()
    assert (found.grads[:6] == 4).all()
    assert not found.finite


def test_a_strided_gradient_comes_in_the_order_of_its_parameter():
    net = nn.Linear(3, 2, bias=False)
    flat = FlatModule(net)
    net.weight.grad = torch.arange(6.0).view(3, 2).t()
    assert flat.gradient().grads[:6].tolist() == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("when", [0, 1])
def test_one_bad_element_in_one_of_two_backwards_is_seen(bad, when):
    flat = FlatModule(built(frozen))
    for i in range(2):
        inputs = batch(i)
        if i == when:
            inputs[2, 3] = bad
        backward(flat.module, inputs)
    assert not flat.gradient().finite
    flat.zero_grad()
    backward(flat.module, batch(3))
    assert flat.gradient().finite


# ---- parts that leave early ----------------------------------------------------------------------------------


class Listener:
    """Remembers what was in the memory when a part was ready, as what sends it would."""

    def __init__(self, flat: FlatModule) -> None:
        self._flat = flat
        self.heard: list[tuple[int, int, np.ndarray]] = []

    def __call__(self, start: int, stop: int) -> None:
        self.heard.append((start, stop, self._flat.grads[start:stop].copy()))

    @property
    def parts(self) -> list[tuple[int, int]]:
        return [(start, stop) for start, stop, _ in self.heard]


def surveyed(make: Callable[[], nn.Module]) -> FlatModule:
    """A module that has given one gradient."""
    flat = FlatModule(built(make))
    flat.expect_last()
    backward(flat.module, batch(9))
    flat.gradient()
    flat.zero_grad()
    return flat


def three() -> nn.Sequential:
    """48 elements a layer: 36, padded to 48, and 6, padded to 16, so a layer is at 0, 64, 128."""
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))


LAYERS = ((0, 64), (64, 128), (128, 192))


def test_parts_leave_from_the_last_layer_to_the_first_while_backward_runs_and_are_final():
    flat = surveyed(three)
    listener, at_first = Listener(flat), []
    flat.module[0].weight.register_hook(lambda _: at_first.append(listener.parts))
    flat.expect_last(LAYERS, listener)
    backward(flat.module, batch(1))
    assert listener.parts == [(128, 192), (64, 128), (0, 64)]
    assert at_first == [[(128, 192), (64, 128)]]
    grads = flat.gradient().grads
    for start, stop, values in listener.heard:
        np.testing.assert_array_equal(grads[start:stop], values)
    assert len(listener.heard) == 3


def test_a_part_waits_for_every_tensor_in_it_and_a_tensor_may_lie_in_two():
    flat = surveyed(three)
    listener = Listener(flat)
    flat.grads[:] = np.nan  # what was not copied when a part is ready is seen
    flat.expect_last([(0, 20), (20, 150), (150, 192)], listener)
    backward(flat.module, batch(1))
    assert listener.parts[0] == (150, 192)
    assert set(listener.parts[1:]) == {(20, 150), (0, 20)}
    grads = flat.gradient().grads
    for start, stop, values in listener.heard:
        np.testing.assert_array_equal(grads[start:stop], values)


def test_of_several_backwards_only_the_last_lets_parts_leave():
    flat = surveyed(three)
    listener = Listener(flat)
    backward(flat.module, batch(1))
    assert not listener.heard
    flat.expect_last(LAYERS, listener)
    backward(flat.module, batch(2))
    grads = flat.gradient().grads
    assert len(listener.heard) == 3
    for start, stop, values in listener.heard:
        np.testing.assert_array_equal(grads[start:stop], values)


def test_parts_with_an_absent_tensor_never_leave_and_what_is_not_trained_is_waited_for_by_none():
    branching, still = surveyed(Branches), surveyed(frozen)
    parts = [(start, start + 64) for start in range(0, 256, 64)]
    for flat, expected in ((branching, {parts[0], parts[1]}), (still, {parts[0], parts[1], parts[2]})):
        listener = Listener(flat)
        flat.expect_last(parts[: len(flat.grads) // 64], listener)
        backward(flat.module, batch(1))
        flat.gradient()
        assert set(listener.parts) == expected


def test_after_something_that_is_not_finite_nothing_leaves():
    flat = surveyed(three)
    flat.module[1].weight.register_hook(lambda grad: grad * torch.inf)
    listener = Listener(flat)
    flat.expect_last(LAYERS, listener)
    backward(flat.module, batch(1))
    assert not flat.gradient().finite
    assert listener.parts == [(128, 192)]


def test_after_a_backward_that_was_not_finite_the_last_lets_nothing_leave():
    flat = surveyed(three)
    bad = batch(1)
    bad[0, 0] = torch.nan
    backward(flat.module, bad)
    listener = Listener(flat)
    flat.expect_last(LAYERS, listener)
    backward(flat.module, batch(2))
    assert not flat.gradient().finite
    assert not listener.heard


class Shared(nn.Module):
    """Two checkpoints use one layer; the old kind of checkpoint then runs a backward of its own for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.twice = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(1 + self.twice):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_a_parameter_that_gets_two_gradients_in_one_backward_is_right_and_lets_nothing_leave():
    flat, plain = FlatModule(built(Shared)), built(Shared)
    for seed in (1, 2, 3):
        listener = Listener(flat)
        flat.zero_grad()
        plain.zero_grad()
        flat.expect_last([(0, 64)], listener)
        backward(flat.module, batch(seed))
        backward(plain, batch(seed))
        assert_as_plain(flat, flat.gradient().grads, plain)
        assert not listener.heard


def test_a_second_gradient_after_its_part_has_left_is_an_error_that_says_what_to_do():
    flat = FlatModule(built(Shared))
    flat.module.twice = False
    flat.expect_last()
    backward(flat.module, batch(1))
    flat.gradient()
    flat.zero_grad()
    flat.module.twice = True
    flat.expect_last([(0, 64)], Listener(flat))
    with pytest.raises(RepeatedGradientError, match=r"layer\.(weight|bias) two gradients.*use_reentrant=False"):
        backward(flat.module, batch(2))


def test_watching_does_not_keep_a_module_alive():
    flat = FlatModule(built(three))
    weight = flat.module[0].weight
    watching = weakref.ref(flat._gradients)
    del flat
    gc.collect()
    assert watching() is None
    weight.sum().backward()
    assert (weight.grad == 1).all()
