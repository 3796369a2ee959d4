"""A module as flat vectors: what lies where, what forward sees, what leaves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from zasgd.core.layout import ALIGN_BYTES
from zasgd.torch.flat import FlatModule, ForeignWriteError
from zasgd.torch.placed import DECAYED, FROZEN, NO_DECAY
from zasgd.train import recipe


def small_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5))


def part(flat: FlatModule, vector: np.ndarray, name: str) -> np.ndarray:
    """The elements of the tensor `name` in its section's vector, in its shape."""
    spec = next(t for t in flat.layout.tensors if t.name == name)
    start = flat.layout.offsets[name]
    return vector[start : start + spec.num_elements].reshape(spec.shape)


def backward(flat: FlatModule, seed: int = 3) -> None:
    flat.module.zero_grad()
    inputs = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    flat.module(inputs).square().sum().backward()


def load_all(flat: FlatModule, sections: dict[str, np.ndarray], pieces: int = 3) -> None:
    """Load every section in several pieces, as they come from shards."""
    for section, vector in sections.items():
        cuts = np.linspace(0, len(vector), pieces + 1).astype(int)
        for start, stop in itertools.pairwise(cuts):
            flat.load(section, int(start), vector[start:stop])


# ---- what lies where ---------------------------------------------------------------------------------------


def test_parameters_buffers_and_counters_each_have_their_section():
    flat = FlatModule(small_net())
    sections = {t.name: (t.section, t.dtype) for t in flat.layout.tensors}
    assert sections["1.weight"] == ("params", "float32")
    assert sections["1.running_var"] == ("stats", "float32")
    assert sections["1.num_batches_tracked"] == ("counters", "int64")
    initial = flat.initial()
    assert {s: (v.dtype, len(v)) for s, v in initial.items()} == {
        "params": (np.float32, flat.layout.sizes["params"]),
        "stats": (np.float32, flat.layout.sizes["stats"]),
        "counters": (np.int64, flat.layout.sizes["counters"]),
    }
    np.testing.assert_array_equal(part(flat, initial["params"], "4.weight"), small_net()[4].weight.detach())
    assert part(flat, initial["stats"], "1.running_var").tolist() == [1, 1, 1]


def test_two_processes_that_build_the_same_model_agree_on_the_layout():
    assert FlatModule(small_net(0)).layout.hash == FlatModule(small_net(1)).layout.hash
    assert FlatModule(small_net(), no_decay_group=True).layout.hash != FlatModule(small_net()).layout.hash


def test_parameters_are_aligned_views_of_one_vector():
    flat = FlatModule(small_net())
    addresses = [p.data_ptr() for p in flat.module.parameters()]
    assert all(a % ALIGN_BYTES == 0 for a in addresses)
    assert max(addresses) - min(addresses) < flat.layout.sizes["params"] * 4


def test_without_decay_go_the_parameters_of_one_dimension():
    flat = FlatModule(small_net(), no_decay_group=True)
    groups = {t.name: t.group for t in flat.layout.of_section("params")}
    assert {n for n, g in groups.items() if g == DECAYED} == {"0.weight", "4.weight"}
    assert {n for n, g in groups.items() if g == NO_DECAY} == {"0.bias", "1.weight", "1.bias", "4.bias"}
    assert (recipe.DECAYED, recipe.NO_DECAY, recipe.FROZEN) == (DECAYED, NO_DECAY, FROZEN)


def test_a_tied_parameter_lies_once_and_is_exported_under_both_names():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    flat = FlatModule(net)
    assert [t.name for t in flat.layout.tensors] == ["0.weight"]
    flat.load("params", 0, np.full(16, 2, np.float32))
    flat.adopt()
    assert {k: v.unique().tolist() for k, v in net.state_dict().items()} == {"0.weight": [2], "1.weight": [2]}


def test_a_buffer_that_is_not_persistent_is_left_to_the_module():
    net = nn.Linear(2, 2)
    net.register_buffer("mask", torch.full((2,), -torch.inf), persistent=False)
    assert "mask" not in [t.name for t in FlatModule(net).layout.tensors]


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda net: net.double(), "parameter weight is float64"),
        (lambda net: net.to(torch.complex64), "parameter weight is complex64"),
        (lambda net: net.double().requires_grad_(False), "parameter weight is float64"),
        (lambda net: net.register_buffer("mean", torch.zeros(2).double()), "buffer mean is float64"),
        (lambda net: net.register_buffer("mask", torch.full((2,), -torch.inf)), "buffer mask holds inf or NaN"),
        (lambda net: net.add_module("late", nn.LazyLinear(3)), "parameter late.weight has no shape yet"),
    ],
    ids=["float64", "complex", "frozen float64", "float64 buffer", "inf buffer", "lazy"],
)
def test_a_tensor_without_a_place_in_a_layout_is_named(spoil, words):
    net = nn.Linear(2, 2)
    spoil(net)
    with pytest.raises(TypeError, match=words):
        FlatModule(net)


# ---- values in ---------------------------------------------------------------------------------------------


def test_loaded_pieces_become_the_modules_values_in_every_section():
    teacher, flat = FlatModule(small_net(1)), FlatModule(small_net(0))
    backward(teacher)
    load_all(flat, teacher.initial() | {"stats": teacher.stats(), "counters": teacher.counters()})
    flat.adopt()
    for name, value in teacher.module.state_dict().items():
        assert torch.equal(flat.module.state_dict()[name], value), name
    assert flat.module[1].num_batches_tracked == 1


def test_a_piece_beyond_the_section_is_refused():
    flat = FlatModule(small_net())
    for start in (-1, flat.layout.sizes["stats"] - 1):
        with pytest.raises(ValueError, match="do not fit into stats"):
            flat.load("stats", start, np.zeros(2, np.float32))


def test_autograd_notices_that_the_server_wrote_between_forward_and_backward():
    flat = FlatModule(small_net())
    loss = flat.module(torch.randn(8, 1, 4, 4)).square().sum()
    flat.load("params", 0, flat.initial()["params"])
    flat.adopt()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_memory_that_is_bound_brings_its_buffers_each_time():
    flat = FlatModule(small_net())
    memory = flat.new_memory()
    for _ in range(2):
        flat.bind(memory)
        flat.adopt()
        assert flat.counters().tolist() == memory.counters.tolist()
        np.testing.assert_array_equal(flat.stats(), memory.stats)
        backward(flat)
        assert flat.counters().max() == 1
        assert not np.array_equal(flat.stats(), memory.stats)


class Mixed(nn.Module):
    """A view, a half, a channels_last and an empty parameter, a frozen one, a frozen integer one, a bool buffer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.plain = nn.Parameter(torch.randn(3, 4, generator=generator))
        self.bits = nn.Parameter(torch.randn(5, generator=generator).bfloat16())
        last = torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
        self.last = nn.Parameter(last)
        self.none = nn.Parameter(torch.zeros(0))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.randn(7, generator=generator), requires_grad=False)
        self.table = nn.Parameter(torch.tensor([3, -1]), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self) -> torch.Tensor:
        weighted = (self.plain * self.frozen[:4]).sum() + (self.bits.float() ** 2).sum() + self.none.sum()
        return self.scale * (weighted + (self.last * torch.arange(5.0)).sum())


def test_parameters_of_every_kind_are_loaded_and_give_the_gradient_of_the_plain_module():
    flat, plain = FlatModule(Mixed()), Mixed()
    load_all(flat, {"params": flat.initial()["params"] * 2}, pieces=7)
    flat.adopt()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2 if parameter.is_floating_point() else 1)
    for name, value in plain.state_dict().items():
        assert torch.equal(flat.module.state_dict()[name], value), name
    flat.module().backward()
    plain().backward()
    grads = flat.gradient().grads
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            np.testing.assert_array_equal(part(flat, grads, name), expected.float(), err_msg=name)
    assert not part(flat, grads, "frozen").any()
    assert flat.module.last.is_contiguous(memory_format=torch.channels_last)


def test_a_frozen_parameter_is_held_in_its_own_group_and_an_integer_one_with_the_counters():
    flat = FlatModule(Mixed(), no_decay_group=True)
    found = {t.name: (t.section, t.group) for t in flat.layout.tensors}
    assert found["frozen"] == ("params", FROZEN)
    assert found["table"] == ("counters", 0)
    assert found["flags"] == ("counters", 0)
    assert found["scale"] == ("params", NO_DECAY)


def test_a_parameter_that_was_moved_and_back_is_adopted_again():
    flat = FlatModule(small_net())
    flat.module.half().float()
    flat.load("params", 0, np.ones(flat.layout.sizes["params"], np.float32))
    flat.adopt()
    assert all(bool((p == 1).all()) for p in flat.module.parameters())
    backward(flat)
    assert flat.gradient().finite


# ---- values out ----------------------------------------------------------------------------------------------


def test_the_gradient_is_that_of_the_plain_module_and_padding_is_zero():
    flat, plain = FlatModule(small_net()), small_net()
    backward(flat)
    plain(torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(3))).square().sum().backward()
    found = flat.gradient()
    for name, parameter in plain.named_parameters():
        np.testing.assert_array_equal(part(flat, found.grads, name), parameter.grad, err_msg=name)
    assert np.count_nonzero(found.grads) <= sum(p.numel() for p in plain.parameters())
    assert found.finite


def test_what_got_no_gradient_is_zero_though_memory_held_another():
    flat = FlatModule(small_net())
    backward(flat)
    assert flat.gradient().grads.any()
    flat.module.zero_grad()
    found = flat.gradient()
    assert not found.grads.any()
    assert len(found.absent) == 6


def test_a_sparse_gradient_is_collected():
    net = nn.Embedding(6, 2, sparse=True)
    flat = FlatModule(net)
    net(torch.tensor([1, 1, 4])).sum().backward()
    assert part(flat, flat.gradient().grads, "weight")[:, 0].tolist() == [0, 2, 0, 0, 1, 0]


def test_clipping_scales_the_whole_gradient_as_torch_does():
    flat, plain = FlatModule(small_net()), small_net()
    backward(flat)
    plain(torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(3))).square().sum().backward()
    unclipped = flat.gradient(clip_norm=1e9).grads.copy()
    norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
    clipped = flat.gradient(clip_norm=0.5)
    assert clipped.norm == pytest.approx(norm, rel=1e-6)
    assert norm > 0.5
    np.testing.assert_allclose(part(flat, clipped.grads, "4.weight"), plain[4].weight.grad, rtol=1e-6)
    np.testing.assert_allclose(unclipped * (0.5 / norm), clipped.grads, rtol=1e-5)
    assert flat.module[4].bias.grad.norm() < 0.5


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_bad_element_makes_the_gradient_not_finite(bad):
    flat = FlatModule(small_net())
    backward(flat)
    flat.module[4].bias.grad[2] = float(bad)
    assert not flat.gradient(clip_norm=1.0).finite


def test_large_finite_gradients_whose_squares_overflow_are_finite_and_clipped():
    flat = FlatModule(small_net())
    backward(flat)
    flat.module[4].bias.grad[2] = 1e30
    found = flat.gradient(clip_norm=1.0)
    assert found.finite
    assert part(flat, found.grads, "4.bias")[2] == pytest.approx(1.0)


def test_a_parameter_that_user_code_wrote_in_place_is_named():
    flat = FlatModule(small_net())
    backward(flat)
    with torch.no_grad():
        flat.module[4].bias.clamp_(0)
    with pytest.raises(ForeignWriteError, match=r"parameter 4\.bias was written in place"):
        flat.gradient()


def test_the_tensors_without_gradient_are_told_and_a_frozen_one_is_none_of_them():
    flat = FlatModule(Mixed())
    flat.module().backward()
    absent = flat.gradient().absent
    names = [t.name for t in flat.layout.of_section("params")]
    assert [names[i] for i in absent] == ["unused"]
    bits = np.unpackbits(np.frombuffer(flat.presence(absent), np.uint8), bitorder="little")
    assert bits.tolist() == [name != "unused" for name in names] + [0]
    assert flat.presence(frozenset()) == b""


# ---- local steps -----------------------------------------------------------------------------------------------


def test_the_gradients_are_clipped_in_place_as_the_collected_one_is():
    flat, collected = FlatModule(Mixed()), FlatModule(Mixed())
    for each in (flat, collected):
        each.module().backward()
    assert flat.clip(0.5)
    kept = flat.gradient().grads
    np.testing.assert_allclose(kept, collected.gradient(clip_norm=0.5).grads, rtol=1e-2)  # one tensor is of 16 bits
    assert np.linalg.norm(kept) == pytest.approx(0.5, rel=1e-3)
    assert flat.clip(0)
    np.testing.assert_array_equal(flat.gradient().grads, kept)
    flat.module.scale.grad.fill_(torch.nan)
    assert not flat.clip(0.5)


def test_an_optimizer_may_step_and_what_was_loaded_comes_back():
    flat = FlatModule(small_net())
    loaded = flat.initial()["params"]
    optimizer = torch.optim.SGD((p for _, p in flat.trained().values()), lr=0.1)
    for _ in range(2):
        backward(flat)
        assert flat.clip(1.0)
        flat.step_with(optimizer)
    assert not np.array_equal(flat.params(), loaded)
    backward(flat)
    assert flat.gradient().finite
    flat.load("params", 0, loaded)
    flat.adopt()
    np.testing.assert_array_equal(flat.params(), loaded)


def test_a_write_beside_the_optimizers_is_named():
    flat = FlatModule(small_net())
    backward(flat)
    with torch.no_grad():
        flat.module[4].bias.clamp_(0)
    with pytest.raises(ForeignWriteError, match=r"parameter 4\.bias was written in place"):
        flat.clip(1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_same_values_go_in_and_the_same_gradient_comes_out():
    flat, plain = FlatModule(Mixed().cuda()), FlatModule(Mixed())
    values = {s: v * 2 for s, v in plain.initial().items()}
    for each in (flat, plain):
        load_all(each, values)
        each.adopt()
    loss = flat.module.scale * (flat.module.plain**2).sum()
    loss.backward()
    (plain.module.scale * (plain.module.plain**2).sum()).backward()
    np.testing.assert_allclose(flat.gradient().grads, plain.gradient().grads, rtol=1e-6)
