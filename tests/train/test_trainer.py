"""What a worker computes is a function of the recipe, the parameters and the grant, and of nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

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


def users(*overrides: str) -> Trainer:
    """A trainer of the user's own model, data and loss."""
    own = ["model=user_recipe:net", "data=user_recipe:noisy", "train.loss=user_recipe:huber"]
    return Trainer(load_recipe("digits", [*own, *overrides]))


# ---- the gradient ------------------------------------------------------------------------------------------


def test_the_gradient_is_that_of_plain_torch_on_the_granted_samples():
    trainer = Trainer(load_recipe("digits"))
    found = trainer.gradient(GRANT)

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
    other.gradient(Grant(0, 0, 0, 9))
    other.gradient(Grant(3, 1, 9, 18))
    torch.rand(1000)
    np.testing.assert_array_equal(one.gradient(GRANT).grads, other.gradient(GRANT).grads)


def test_dropout_and_augmentation_differ_between_batches_and_epochs_and_seeds():
    trainer = users()
    again, other_batch = trainer.gradient(GRANT).loss, trainer.gradient(GRANT._replace(batch=3)).loss
    assert trainer.gradient(GRANT).loss == again != other_batch
    seeds = {users(f"train.seed={seed}").gradient(GRANT).loss for seed in range(3)}
    assert len(seeds) == 3


def test_a_sample_is_augmented_alike_in_whichever_batch_it_is():
    trainer = users()
    wide = trainer.batch(Grant(0, 0, 0, 20))[0]
    narrow = trainer.batch(Grant(0, 5, 10, 15))[0]
    assert torch.equal(wide[10:15], narrow)
    assert not torch.equal(wide, trainer.batch(Grant(1, 0, 0, 20))[0])


def test_what_was_loaded_is_what_the_gradient_is_computed_on():
    values = Trainer(load_recipe("digits", ["train.seed=1"])).initial()
    at_once, in_pieces, not_at_all = (Trainer(load_recipe("digits")) for _ in range(3))
    for section, vector in values.items():
        at_once.load(section, 0, vector)
        middle = len(vector) // 2
        in_pieces.load(section, middle, vector[middle:])
        in_pieces.load(section, 0, vector[:middle])
    np.testing.assert_array_equal(at_once.gradient(GRANT).grads, in_pieces.gradient(GRANT).grads)
    assert at_once.gradient(GRANT).loss != not_at_all.gradient(GRANT).loss


def test_the_whole_gradient_is_clipped():
    free = Trainer(load_recipe("digits")).gradient(GRANT).grads
    clipped = Trainer(load_recipe("digits", ["optimizer.clip_norm=0.1"])).gradient(GRANT).grads
    assert np.linalg.norm(clipped) == pytest.approx(0.1, rel=1e-5)
    np.testing.assert_allclose(clipped, free * (0.1 / np.linalg.norm(free)), rtol=1e-4, atol=1e-9)


def test_a_batch_that_is_not_finite_is_marked_and_leaves_no_trace_in_the_buffers():
    trainer = users("model=user_recipe:batch_normed", "train.loss=user_recipe:infinite_at_large_targets")
    assert not trainer.gradient(Grant(0, 0, 0, 37)).finite
    targets = [2 * index for index in permutation(37, 0, 0).tolist()]
    start = next(i for i in range(36) if max(targets[i], targets[i + 1]) < 40)
    good = trainer.gradient(Grant(0, 1, start, start + 2))
    assert good.finite
    assert good.counters.max() == 1


def test_buffers_after_the_batch_ride_on_the_gradient():
    trainer = users("model=user_recipe:batch_normed")
    found = trainer.gradient(GRANT)
    start = trainer.layout.offsets["1.running_mean"]
    assert found.stats[start : start + 3].any()
    assert found.counters[trainer.layout.offsets["1.num_batches_tracked"]] == 1


# ---- factories -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "error", "words"),
    [
        ("model=mpl", RecipeError, 'model.factory is "mpl", but should be one of mlp, small-cnn'),
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
        users("data=user_recipe:lonely_samples").gradient(Grant(0, 0, 0, 2))


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
