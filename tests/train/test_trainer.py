"""What a worker computes is a function of the recipe, the parameters and the grant, and of nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from computing import gradient

from zasgd.core.ledger import permutation
from zasgd.core.messages import Grant
from zasgd.train import DataError, DeviceError, MissingExtraError, make_evaluator, make_trainer, train_extra
from zasgd.train.datasets import digits
from zasgd.train.models import mlp
from zasgd.train.recipe import RecipeError, load_recipe
from zasgd.train.trainer import Trainer

GRANT = Grant(epoch=1, batch=2, start=10, stop=15)


@pytest.fixture(autouse=True)
def beside_the_users_code(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "data"))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def users(*overrides: str) -> Trainer:
    """A trainer of the user's own model, data and loss."""
    own = ["model=user_recipe:net", "data=user_recipe:noisy", "train.loss=user_recipe:huber"]
    return Trainer(load_recipe("digits", [*own, *overrides]))


# ---- the gradient ------------------------------------------------------------------------------------------


def test_the_gradient_is_that_of_plain_torch_on_the_granted_samples():
    trainer = Trainer(load_recipe("digits"))
    found = gradient(trainer, [GRANT], 0)

    torch.manual_seed(0)
    net, (train, _) = mlp(), digits()
    inputs, targets = train[permutation(1297, 0, epoch=1)[10:15]]
    loss = torch.nn.functional.cross_entropy(net(inputs), targets)
    loss.backward()

    start = trainer.layout.offsets["2.weight"]
    np.testing.assert_array_equal(found.grads[start : start + 64 * 64], net[2].weight.grad.reshape(-1))
    assert (found.num_samples, found.finite, found.loss) == (5, True, pytest.approx(loss.item()))
    assert trainer.num_samples == 1297


def test_two_workers_compute_the_same_gradient_whatever_they_did_before():
    one, other = users(), users()
    gradient(other, [Grant(0, 0, 0, 9)], 0)
    gradient(other, [Grant(3, 1, 9, 18)], 0)
    torch.rand(1000)
    np.testing.assert_array_equal(gradient(one, [GRANT], 0).grads, gradient(other, [GRANT], 0).grads)


def test_dropout_and_augmentation_differ_between_batches_and_epochs_and_seeds():
    trainer = users()
    again, other_batch = gradient(trainer, [GRANT], 0).loss, gradient(trainer, [GRANT._replace(batch=3)], 0).loss
    assert gradient(trainer, [GRANT], 0).loss == again != other_batch
    seeds = {gradient(users(f"train.seed={seed}"), [GRANT], 0).loss for seed in range(3)}
    assert len(seeds) == 3


def test_a_sample_is_augmented_alike_in_whichever_batch_it_is():
    trainer = users()
    wide = trainer.batch(Grant(0, 0, 0, 20))[0]
    narrow = trainer.batch(Grant(0, 5, 10, 15))[0]
    assert torch.equal(wide[10:15], narrow)
    assert not torch.equal(wide, trainer.batch(Grant(1, 0, 0, 20))[0])


def test_what_the_memory_holds_is_what_the_gradient_is_computed_on_and_stays():
    values = Trainer(load_recipe("digits", ["train.seed=1"])).initial()["params"]
    trainer = Trainer(load_recipe("digits"))
    memory = trainer.new_memory()
    memory.params[:] = values
    found = trainer.gradient([GRANT], memory, 0)
    assert found.grads is memory.grads
    np.testing.assert_array_equal(memory.params, values)

    torch.manual_seed(1)
    net, (train, _) = mlp(), digits()
    inputs, targets = train[permutation(1297, 0, epoch=1)[10:15]]
    torch.nn.functional.cross_entropy(net(inputs), targets).backward()
    start = trainer.layout.offsets["4.weight"]
    np.testing.assert_array_equal(found.grads[start : start + 640], net[4].weight.grad.reshape(-1))


def test_memories_may_take_turns():
    trainer, alone = Trainer(load_recipe("digits")), Trainer(load_recipe("digits"))
    first, second = trainer.new_memory(), trainer.new_memory()
    second.params[:] *= 1.5
    for memory in (first, second, first, second):
        memory.params[:] += 0.01  # as an answer of the server does
        expected = gradient(alone, [GRANT], 0, params=memory.params)
        found = trainer.gradient([GRANT], memory, 0)
        np.testing.assert_array_equal(found.grads, expected.grads)
        assert found.loss == expected.loss


def test_the_whole_gradient_is_clipped():
    free = gradient(Trainer(load_recipe("digits")), [GRANT], 0).grads
    clipped = gradient(Trainer(load_recipe("digits", ["optimizer.clip_norm=0.1"])), [GRANT], 0).grads
    assert np.linalg.norm(clipped) == pytest.approx(0.1, rel=1e-5)
    np.testing.assert_allclose(clipped, free * (0.1 / np.linalg.norm(free)), rtol=1e-4, atol=1e-9)


def test_a_batch_that_is_not_finite_is_marked_and_leaves_no_trace_in_the_buffers():
    trainer = users("model=user_recipe:batch_normed", "train.loss=user_recipe:infinite_at_large_targets")
    assert not gradient(trainer, [Grant(0, 0, 0, 37)], 0).finite
    targets = [2 * index for index in permutation(37, 0, 0).tolist()]
    start = next(i for i in range(36) if max(targets[i], targets[i + 1]) < 40)
    good = gradient(trainer, [Grant(0, 1, start, start + 2)], 0)
    assert good.finite
    assert good.counters.max() == 1


def test_buffers_after_the_batch_ride_on_the_gradient_and_the_memory_keeps_those_before():
    trainer = users("model=user_recipe:batch_normed")
    memory = trainer.new_memory()
    found, again = trainer.gradient([GRANT], memory, 0), trainer.gradient([GRANT], memory, 0)
    start = trainer.layout.offsets["1.running_mean"]
    assert found.stats[start : start + 3].any()
    assert not memory.stats[start : start + 3].any()
    assert found.counters[trainer.layout.offsets["1.num_batches_tracked"]] == 1
    np.testing.assert_array_equal(found.stats, again.stats)
    assert found.counters.tolist() == again.counters.tolist()


# ---- several batches in one push ---------------------------------------------------------------------------

SEVERAL = (GRANT, Grant(epoch=1, batch=3, start=15, stop=31))


def test_several_batches_give_the_mean_gradient_over_all_their_samples():
    trainer = Trainer(load_recipe("digits", ["rule.push_every=2"]))
    several, union = gradient(trainer, SEVERAL, 0), gradient(trainer, [Grant(1, 2, 10, 31)], 0)
    np.testing.assert_allclose(several.grads, union.grads, rtol=1e-5, atol=1e-7)
    assert several.loss == pytest.approx(union.loss, rel=1e-6)
    assert several.num_samples == union.num_samples == 21


def test_every_batch_of_a_push_sees_its_own_random_numbers_whoever_computes_it():
    one, other = users("rule.push_every=2"), users("rule.push_every=2")
    gradient(other, [Grant(0, 0, 0, 9), Grant(3, 1, 9, 18)], 0)
    torch.rand(1000)
    found = gradient(one, SEVERAL, 0)
    np.testing.assert_array_equal(found.grads, gradient(other, SEVERAL, 0).grads)
    alone = [gradient(other, [grant], 0) for grant in SEVERAL]
    assert found.loss == pytest.approx((5 * alone[0].loss + 16 * alone[1].loss) / 21, rel=1e-6)
    np.testing.assert_allclose(found.grads, (5 * alone[0].grads + 16 * alone[1].grads) / 21, rtol=1e-4, atol=1e-5)


def test_of_several_batches_the_mean_is_clipped_as_a_whole():
    free = gradient(Trainer(load_recipe("digits")), SEVERAL, 0).grads
    clipped = gradient(Trainer(load_recipe("digits", ["optimizer.clip_norm=0.1"])), SEVERAL, 0).grads
    np.testing.assert_allclose(clipped, free * (0.1 / np.linalg.norm(free)), rtol=1e-4, atol=1e-9)


def test_one_bad_batch_of_several_makes_the_push_not_finite():
    trainer = users("model=user_recipe:batch_normed", "train.loss=user_recipe:infinite_at_large_targets")
    small = [2 * index <= 40 for index in permutation(37, 0, 0).tolist()]
    start = next(i for i in range(36) if small[i] and small[i + 1])
    good, bad = Grant(0, 1, start, start + 2), Grant(0, 0, 0, 37)
    assert not gradient(trainer, [good, bad], 0).finite
    assert not gradient(trainer, [bad, good], 0).finite
    again = gradient(trainer, [good, good], 0)
    assert again.finite
    assert again.counters.max() == 2


# ---- parts that leave early --------------------------------------------------------------------------------


def heard_by(trainer: Trainer, grants: tuple[Grant, ...]) -> list[tuple[int, int]]:
    """The parts that were ready before the gradient was, each seen to be final."""
    memory, size = trainer.new_memory(), trainer.layout.sizes["params"]
    parts = [(start, min(start + 2000, size)) for start in range(0, size, 2000)]
    found: list[tuple[int, int, np.ndarray]] = []
    for _ in range(2):  # the first lets nothing leave: it has yet to be seen that no parameter gets two gradients
        assert not found

        def ready(start: int, stop: int) -> None:
            found.append((start, stop, memory.grads[start:stop].copy()))

        trainer.gradient(grants, memory, 5000, ready=ready, parts=parts)
    for start, stop, values in found:
        np.testing.assert_array_equal(values, memory.grads[start:stop])
    return [(start, stop) for start, stop, _ in found]


@pytest.mark.parametrize("grants", [(GRANT,), SEVERAL])
def test_parts_of_a_mean_gradient_leave_before_it_is_complete(grants):
    trainer = Trainer(load_recipe("digits"))
    parts = heard_by(trainer, grants)
    assert len(parts) == 5
    assert parts[-1][0] in (0, 2000, 4000)  # of the first layer, which backward comes to last


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.clip_norm=0.1"],
        ["rule.name=dana-slim", "optimizer.momentum=0.9", "optimizer.lr=0.1"],
        ["rule.name=delta"],
        ["rule.name=easgd"],
    ],
    ids=["clipped", "dana-slim", "delta", "easgd"],
)
def test_nothing_leaves_early_of_what_is_yet_to_be_turned_into_something_else(overrides):
    assert heard_by(Trainer(load_recipe("digits", overrides)), SEVERAL) == []


# ---- tensors without gradient ------------------------------------------------------------------------------


def absent(trainer: Trainer, presence: bytes) -> set[str]:
    names = [t.name for t in trainer.layout.of_section("params")]
    bits = np.unpackbits(np.frombuffer(presence, np.uint8), bitorder="little")
    assert 0 <= len(bits) - len(names) < 8
    return {name for name, bit in zip(names, bits, strict=False) if not bit}


def test_a_push_says_which_tensors_got_no_gradient_and_a_frozen_one_is_none_of_them():
    trainer = Trainer(load_recipe("digits", ["model=branching:net"]))
    presence = gradient(trainer, [GRANT], 0).presence
    assert absent(trainer, presence) == {"rare.weight", "rare.bias", "never.weight", "never.bias"}


def test_a_tensor_that_one_batch_of_several_used_is_present():
    trainer = Trainer(load_recipe("digits", ["model=branching:net", "model.args.threshold=10"]))
    found = gradient(trainer, SEVERAL, 0)
    assert absent(trainer, found.presence) == {"never.weight", "never.bias"}
    start = trainer.layout.offsets["rare.weight"]
    only = gradient(trainer, SEVERAL[1:], 0).grads
    np.testing.assert_allclose(
        found.grads[start : start + 640], only[start : start + 640] * (16 / 21), rtol=1e-5, atol=1e-7
    )


def test_where_all_tensors_got_a_gradient_nothing_is_said():
    assert gradient(Trainer(load_recipe("digits")), [GRANT], 0).presence == b""
    assert gradient(users("model=user_recipe:batch_normed"), [GRANT], 0).presence == b""


# ---- dana-slim: the momentum of the worker -----------------------------------------------------------------

SLIM = ["rule.name=dana-slim", "optimizer.momentum=0.9", "optimizer.lr=0.1"]


def test_dana_slim_pushes_momentum_at_the_rate_of_the_sample_clock():
    slim, plain = (Trainer(load_recipe("digits", overrides)) for overrides in (SLIM, []))
    v, before = np.zeros(slim.layout.sizes["params"], np.float32), 0.0
    values = slim.initial()["params"]
    decay = np.float32(1e-4) * values
    for clock in (1000, 30000):  # of 30 epochs of 1,297 samples: within the warm-up, and after the first milestone
        lr = load_recipe("digits", SLIM).schedule_spec().lr_at(clock, 1297)
        d = gradient(plain, [GRANT], 0).grads + decay
        v = np.float32(0.9) * v * np.float32(before / lr if before else 1) + d
        np.testing.assert_allclose(gradient(slim, [GRANT], clock).grads, np.float32(0.9) * v + d, rtol=1e-5, atol=1e-8)
        before = lr


def test_a_push_of_dana_slim_that_is_not_finite_leaves_its_momentum_alone():
    overrides = ["train.loss=user_recipe:infinite_at_large_targets", *SLIM]
    trainer, untouched = users(*overrides), users(*overrides)
    small = [2 * index <= 40 for index in permutation(37, 0, 0).tolist()]
    start = next(i for i in range(36) if small[i] and small[i + 1])
    good, bad = Grant(0, 1, start, start + 2), Grant(0, 0, 0, 37)
    for each in (trainer, untouched):
        gradient(each, [good], 5000)
    assert not gradient(trainer, [bad], 5000).finite
    np.testing.assert_array_equal(gradient(trainer, [good], 5000).grads, gradient(untouched, [good], 5000).grads)


@pytest.mark.filterwarnings("ignore:overflow")
def test_momentum_that_overflows_is_not_pushed_and_not_kept():
    trainer = Trainer(load_recipe("digits", SLIM))
    own = trainer.new_own()
    gradient(trainer, [GRANT], 5000, own)
    own.v[:] = 3e38
    assert not gradient(trainer, [GRANT], 39000, own).finite  # at a smaller rate: the momentum is scaled up
    assert gradient(trainer, [GRANT], 39000, own).finite


def test_one_trainer_serves_workers_that_each_have_their_own():
    shared, alone = Trainer(load_recipe("digits", SLIM)), [Trainer(load_recipe("digits", SLIM)) for _ in range(2)]
    owns = [shared.new_own() for _ in alone]
    for step, worker in enumerate((0, 1, 1, 0)):
        grant = Grant(0, step, 16 * step, 16 * step + 16)
        expected = gradient(alone[worker], [grant], 5000)
        np.testing.assert_array_equal(gradient(shared, [grant], 5000, owns[worker]).grads, expected.grads)


# ---- factories -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "error", "words"),
    [
        ("model=mpl", RecipeError, 'model.factory is "mpl", but should be one of mlp, small-cnn, resnet8'),
        ("model=no_such_package:net", RecipeError, "No module named 'no_such_package'"),
        ("model=user_recipe:nett", RecipeError, "module user_recipe has no callable nett"),
        ("model=user_recipe:not_callable", RecipeError, "has no callable not_callable"),
        ("model=user_recipe:no_module", RecipeError, "returned no torch.nn.Module"),
        ("model=user_recipe:float64_net", RecipeError, "model.factory: parameter weight is float64"),
        ("model.args.widht=3", RecipeError, "model.args: net(): got an unexpected keyword argument 'widht'"),
        ("data=cifar", RecipeError, "data.factory is \"cifar\", but should be one of digits, fashion-mnist"),
        ("data=user_recipe:one_data_set", RecipeError, "should return two data sets"),
        ("data=user_recipe:empty", DataError, "returned an empty data set"),
        ("train.loss=cross_entropie", RecipeError, "train.loss is"),
    ],
)  # fmt: skip
def test_a_factory_that_cannot_be_used_is_named_in_one_line(override, error, words):
    with pytest.raises(error) as caught:
        users(override)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "xpu"])
def test_a_device_that_is_not_there_is_named_in_one_line(device):
    with pytest.raises(DeviceError, match=f'device "{device}" cannot be used here') as caught:
        Trainer(load_recipe("digits"), device)
    assert "\n" not in str(caught.value)


def test_an_error_inside_the_users_code_passes_through():
    with pytest.raises(ZeroDivisionError, match="a bug of the user"):
        users("model=user_recipe:broken")
    with pytest.raises(TypeError, match="a sample should be a pair"):
        gradient(users("data=user_recipe:lonely_samples"), [Grant(0, 0, 0, 2)], 0)


def test_a_users_module_in_the_current_folder_is_found(tmp_path):
    (tmp_path / "in_this_folder.py").write_text("def made(): pass\n")
    code = (
        "from zasgd.train import factories; import sys; sys.path.remove(''); "
        "print(factories.resolve('model.factory', 'in_this_folder:made', {}).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "made\n", done.stderr


# ---- without the train extra ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "package"), [("torch", "torch"), ("safetensors", "safetensors")])
def test_a_missing_package_of_the_extra_is_one_line_that_names_the_extra(module, package):
    code = f"""
import sys; sys.modules[{module!r}] = None
from pathlib import Path
from zasgd.train import MissingExtraError, make_evaluator
from zasgd.train.recipe import load_recipe
try:
    make_evaluator(load_recipe("digits"), "cpu", Path("."))
except MissingExtraError as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{package} is not installed here: pip install 'zasgd[train]'\n", done.stderr


def test_the_absence_of_any_other_package_is_not_blamed_on_the_extra():
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), train_extra():
        import no_such_package  # noqa: F401
    assert issubclass(MissingExtraError, Exception)


def test_the_factories_of_a_role_give_that_role(tmp_path):
    recipe = load_recipe("digits")
    trainer, evaluator = make_trainer(recipe, "cpu"), make_evaluator(recipe, "cpu", tmp_path)
    assert trainer.layout.hash == evaluator.layout.hash
    assert trainer.num_samples == evaluator.num_samples
