"""Local steps are those of plain torch, and what is pushed is what they led to."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from computing import gradient

from zasgd.core.ledger import permutation
from zasgd.core.messages import Grant
from zasgd.torch.flat import ForeignWriteError
from zasgd.train.datasets import digits
from zasgd.train.models import mlp
from zasgd.train.recipe import Recipe, load_recipe
from zasgd.train.trainer import Trainer

FIRST = tuple(Grant(0, b, 16 * b, 16 * b + 16) for b in range(3))
SECOND = tuple(Grant(0, b, 16 * b, 16 * b + 16) for b in range(3, 6))

SGD = ("optimizer.lr=0.1", "optimizer.momentum=0.9", "optimizer.nesterov=true", "optimizer.weight_decay=0.01")
ADAMW = ("optimizer.algorithm=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.1", "optimizer.beta1=0.8")
WHOLE = ("optimizer.decay_norm_and_bias=false", "rule.push_every=3")


@pytest.fixture(autouse=True)
def beside_the_users_code(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "data"))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def recipe_of(rule: str, *overrides: str) -> Recipe:
    return load_recipe("digits", [f"rule.name={rule}", *WHOLE, *overrides])


class Plain:
    """The loop that anybody would write: one process, torch's optimizer, the recipe's batches and schedule."""

    def __init__(self, recipe: Recipe) -> None:
        torch.manual_seed(recipe.train.seed)
        self.recipe, self.net, self.train = recipe, mlp(), digits()[0]
        o = recipe.optimizer
        decayed = [p for p in self.net.parameters() if p.dim() > 1]
        others = [p for p in self.net.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
        if o.algorithm == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, betas=(o.beta1, o.beta2), eps=o.eps)
        else:
            self.optimizer = torch.optim.SGD(groups, lr=1.0, momentum=o.momentum, nesterov=o.nesterov)
        self.clock = 0

    def step(self, grant: Grant) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.schedule_spec().lr_at(self.clock, 1297)
        inputs, targets = self.train[permutation(1297, 0, grant.epoch)[grant.start : grant.stop]]
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.net(inputs), targets)
        loss.backward()
        if self.recipe.optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.recipe.optimizer.clip_norm)
        self.optimizer.step()
        self.clock += grant.num_samples
        return loss.item()

    def params(self, trainer: Trainer) -> np.ndarray:
        flat = np.zeros(trainer.layout.sizes["params"], np.float32)
        for name, value in self.net.state_dict().items():
            start = trainer.layout.offsets[name]
            flat[start : start + value.numel()] = value.reshape(-1)
        return flat


@pytest.mark.parametrize("optimizer", [SGD, ADAMW, (*SGD, "optimizer.clip_norm=0.5")], ids=["sgd", "adamw", "clipped"])
def test_what_is_pushed_is_where_torchs_optimizer_began_minus_where_it_ended(optimizer):
    recipe = recipe_of("delta", *optimizer)
    trainer, plain = Trainer(recipe), Plain(recipe)
    memory = trainer.new_memory()
    for clock, grants in ((0, FIRST), (48, SECOND)):  # the second exchange needs the momentum of the first
        began = memory.params.copy()
        found = trainer.gradient(grants, memory, clock)
        np.testing.assert_array_equal(memory.params, began)
        losses = [plain.step(grant) for grant in grants]
        ended = plain.params(trainer)
        np.testing.assert_allclose(found.grads, began - ended, rtol=1e-4, atol=1e-8)
        assert np.abs(found.grads).max() > 1e-5
        assert (found.num_samples, found.loss) == (48, pytest.approx(np.mean(losses), rel=1e-6))
        memory.params[:] = ended


def test_by_easgd_a_worker_pushes_where_it_stands():
    recipe = recipe_of("easgd", *SGD)
    trainer, plain = Trainer(recipe), Plain(recipe)
    found = gradient(trainer, FIRST, 0)
    for grant in FIRST:
        plain.step(grant)
    np.testing.assert_allclose(found.grads, plain.params(trainer), rtol=1e-5, atol=1e-8)


def test_steps_that_nobody_answered_are_taken_back():
    trainer = Trainer(recipe_of("delta", "optimizer.lr=0.1"))
    first, again = gradient(trainer, FIRST, 5000), gradient(trainer, FIRST, 5000)
    np.testing.assert_array_equal(first.grads, again.grads)
    assert first.loss == again.loss


def test_steps_that_are_not_finite_leave_no_trace():
    own = ["model=user_recipe:batch_normed", "data=user_recipe:noisy"]
    own += ["train.loss=user_recipe:infinite_at_large_targets", "rule.name=delta", "optimizer.momentum=0.9"]
    small = [2 * index <= 40 for index in permutation(37, 0, 0).tolist()]
    start = next(i for i in range(36) if small[i] and small[i + 1])
    good, bad = Grant(0, 1, start, start + 2), Grant(0, 0, 0, 37)
    trainer, untouched = (Trainer(load_recipe("digits", own)) for _ in range(2))
    assert not gradient(trainer, [good, bad, good], 5000).finite
    found, expected = gradient(trainer, [good], 5000), gradient(untouched, [good], 5000)
    assert found.finite
    for section in ("grads", "stats", "counters"):
        np.testing.assert_array_equal(getattr(found, section), getattr(expected, section))


def test_a_step_that_overflows_is_not_pushed():
    trainer = Trainer(
        recipe_of("delta", "optimizer.lr=3e38", "optimizer.weight_decay=3e38", "schedule.warmup_epochs=0")
    )
    found = gradient(trainer, FIRST[:1], 0)
    assert math.isfinite(found.loss)
    assert not found.finite
    assert np.isfinite(gradient(trainer, FIRST[:1], 1 << 40).loss)


def test_a_tensor_that_no_step_moved_is_absent():
    overrides = ["model=branching:net", "model.args.threshold=10", "rule.name=delta", "optimizer.lr=0.1"]
    trainer = Trainer(load_recipe("digits", overrides))
    names = [t.name for t in trainer.layout.of_section("params")]

    def absent(*grants: Grant) -> set[str]:
        presence = gradient(trainer, grants, 5000).presence
        return {name for i, name in enumerate(names) if not presence[i >> 3] >> (i & 7) & 1}

    small, large = Grant(0, 0, 0, 5), Grant(0, 1, 5, 21)
    assert absent(small) == {"rare.weight", "rare.bias", "never.weight", "never.bias"}
    assert absent(large, small) == absent(small, large) == {"never.weight", "never.bias"}


def test_the_elastic_force_holds_the_tensors_that_no_step_moved_too():
    trainer = Trainer(load_recipe("digits", ["model=branching:net", "rule.name=easgd", "optimizer.lr=0.1"]))
    assert gradient(trainer, FIRST, 5000).presence == b""


def test_of_a_model_of_16_bits_only_what_the_steps_changed_is_pushed():
    trainer = Trainer(load_recipe("digits", ["model=branching:halves", "rule.name=delta", "optimizer.lr=1e-30"]))
    between = trainer.initial()["params"] + np.float32(1e-4)  # no bfloat16 number
    assert not gradient(trainer, FIRST, 5000, params=between).grads.any()


def test_one_trainer_serves_workers_whose_optimizers_are_their_own():
    recipe = recipe_of("diloco", *ADAMW)
    shared, alone = Trainer(recipe), [Trainer(recipe) for _ in range(2)]
    owns = [shared.new_own() for _ in alone]
    for worker, grants in ((0, FIRST), (1, FIRST), (1, SECOND), (0, SECOND)):
        expected = gradient(alone[worker], grants, 5000)
        np.testing.assert_array_equal(gradient(shared, grants, 5000, owns[worker]).grads, expected.grads)


def test_two_workers_take_the_same_steps_whatever_they_did_before():
    own = ["model=user_recipe:net", "data=user_recipe:noisy", "train.loss=user_recipe:huber"]
    recipe = load_recipe("digits", [*own, "rule.name=easgd", "rule.push_every=2"])
    one, other = Trainer(recipe), Trainer(recipe)
    gradient(other, [Grant(0, 0, 0, 9)], 500)
    torch.rand(1000)
    grants = (Grant(1, 2, 10, 15), Grant(1, 3, 15, 31))
    np.testing.assert_array_equal(gradient(one, grants, 500).grads, gradient(other, grants, 500).grads)


def test_a_step_of_the_optimizer_is_no_foreign_write_but_any_other_is():
    trainer = Trainer(recipe_of("delta", *SGD))
    gradient(trainer, FIRST, 0)

    @torch.no_grad()
    def clamp(net: torch.nn.Sequential, *_: object) -> None:
        net[4].bias.clamp_(min=0)

    trainer.workload.flat.module.register_forward_hook(clamp)
    with pytest.raises(ForeignWriteError, match=r"parameter 4\.bias was written in place"):
        gradient(trainer, FIRST, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_same_steps_are_taken():
    recipe = recipe_of("delta", *SGD)
    there, here = Trainer(recipe, "cuda"), Trainer(recipe)
    for grants in (FIRST, SECOND):
        found, expected = gradient(there, grants, 5000), gradient(here, grants, 5000)
        np.testing.assert_allclose(found.grads, expected.grads, rtol=1e-3, atol=1e-6)
