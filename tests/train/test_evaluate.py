"""The evaluator scores what was loaded, and its files load into the plain torch model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from computing import gradient
from safetensors import safe_open
from torch import nn

from zasgd.core.messages import Grant
from zasgd.train.datasets import digits
from zasgd.train.evaluate import BEST, LAST, Evaluator, Scorer
from zasgd.train.export import plain_state_dict, read_model, write_model
from zasgd.train.models import mlp
from zasgd.train.recipe import load_recipe
from zasgd.train.trainer import Trainer


@pytest.fixture
def evaluator(tmp_path) -> Evaluator:
    return Evaluator(load_recipe("digits"), "cpu", tmp_path)


def load_all(evaluator: Evaluator, sections: dict[str, np.ndarray]) -> None:
    for section, vector in sections.items():
        evaluator.load(section, 0, vector)


def test_scores_are_those_of_plain_torch(evaluator):
    load_all(evaluator, Trainer(load_recipe("digits", ["train.seed=7"])).initial())
    scores = evaluator.evaluate(epoch=1)
    torch.manual_seed(7)
    inputs, targets = digits()[1].tensors
    outputs = mlp()(inputs)
    assert scores["test_accuracy"] == int((outputs.argmax(1) == targets).sum()) / 500
    assert scores["test_loss"] == pytest.approx(nn.functional.cross_entropy(outputs, targets).item(), rel=1e-6)


def test_dropout_is_off_while_scoring(tmp_path):
    evaluator = Evaluator(load_recipe("digits", ["model.args.dropout=0.5"]), "cpu", tmp_path)
    assert evaluator.evaluate(0)["test_loss"] == evaluator.evaluate(0)["test_loss"]


def test_the_last_and_the_best_model_load_into_the_plain_model_strictly(evaluator, tmp_path):
    good = Trainer(load_recipe("digits")).initial()
    worse = {"params": np.zeros_like(good["params"])}
    load_all(evaluator, good)
    best = evaluator.evaluate(epoch=1)
    load_all(evaluator, worse)
    assert evaluator.evaluate(epoch=2, final=True)["test_accuracy"] < best["test_accuracy"]
    net = mlp()
    net.load_state_dict(read_model(tmp_path / LAST), strict=True)
    assert not any(p.any() for p in net.parameters())
    net.load_state_dict(read_model(tmp_path / BEST), strict=True)
    torch.manual_seed(0)
    assert torch.equal(net[0].weight, mlp()[0].weight)


def test_the_files_say_what_they_are(evaluator, tmp_path):
    evaluator.evaluate(epoch=3, final=True)
    with safe_open(tmp_path / LAST, "pt") as file:
        said = file.metadata()
    assert (said["recipe"], said["epoch"], said["final"]) == ("digits", "3", "true")
    assert 0 <= float(said["test_accuracy"]) <= 1


def test_an_interrupted_run_is_saved_without_being_scored(evaluator, tmp_path):
    evaluator.load("params", 0, np.ones(evaluator.layout.sizes["params"], np.float32))
    evaluator.save(epoch=4)
    assert bool((read_model(tmp_path / LAST)["0.weight"] == 1).all())
    with safe_open(tmp_path / LAST, "pt") as file:
        assert file.metadata()["interrupted"] == "true"
    assert not (tmp_path / BEST).exists()


def test_given_vectors_are_scored_on_both_parts_of_the_data_without_a_run_folder():
    trainer = Trainer(load_recipe("digits", ["train.seed=7"]))
    scorer = Scorer(load_recipe("digits"), trainer.workload)
    found = scorer.scores(trainer.initial())
    torch.manual_seed(7)
    net, (train, test) = mlp(), digits()
    for part, data in (("train", train), ("test", test)):
        inputs, targets = data.tensors
        expected = nn.functional.cross_entropy(net(inputs), targets).item()
        assert found[f"{part}_loss"] == pytest.approx(expected, rel=1e-6)
    assert found["test_accuracy"] == int((net(inputs).argmax(1) == targets).sum()) / 500
    inputs, targets = train.tensors
    expected = nn.functional.cross_entropy(net(inputs[:100]), targets[:100]).item()
    assert scorer.scores(trainer.initial(), at_most=100)["train_loss"] == pytest.approx(expected, rel=1e-6)


def test_scoring_leaves_the_trainers_own_model_alone():
    trainer = Trainer(load_recipe("digits"))
    before = gradient(trainer, [Grant(0, 0, 0, 16)], 0).grads
    zeros = {section: np.zeros_like(vector) for section, vector in trainer.initial().items()}
    Scorer(trainer.recipe, trainer.workload).scores(zeros, reestimate=100)
    np.testing.assert_array_equal(gradient(trainer, [Grant(0, 0, 0, 16)], 0).grads, before)


def test_batchnorm_is_re_estimated_where_it_is_and_nothing_is_where_it_is_not(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "data"))
    own = ["model=user_recipe:batch_normed", "data=user_recipe:noisy", "train.loss=mse"]
    trainer = Trainer(load_recipe("digits", own))
    scorer, vectors = Scorer(trainer.recipe, trainer.workload), trainer.initial()
    vectors["stats"] += 1  # else it would be what an estimate begins with
    as_given, afresh = scorer.scores(vectors), scorer.scores(vectors, reestimate=37)
    assert as_given["test_loss"] != afresh["test_loss"]
    assert as_given != scorer.scores(trainer.initial())
    assert scorer.scores(vectors, reestimate=37) == afresh != scorer.scores(vectors, reestimate=5)
    assert scorer.scores(vectors) == as_given
    without = Trainer(load_recipe("digits", ["model.args.dropout=0.5"]))
    plain = Scorer(without.recipe, without.workload)
    assert plain.scores(without.initial(), reestimate=100) == plain.scores(without.initial())


def test_a_regression_has_a_loss_and_no_accuracy(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "data"))
    recipe = load_recipe("digits", ["model=user_recipe:net", "data=user_recipe:noisy", "train.loss=mse"])
    assert Evaluator(recipe, "cpu", tmp_path).evaluate(0).keys() == {"test_loss"}
    assert (tmp_path / BEST).exists()


def test_tied_strided_and_half_tensors_are_exported_each_with_its_own_memory(tmp_path):
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2).bfloat16())
    net[0].to(memory_format=torch.channels_last)
    net[2].weight = net[1].weight
    state = plain_state_dict(net)
    assert len({t.data_ptr() for t in state.values()}) == len(state)
    write_model(tmp_path / "net.safetensors", net, {})
    back = read_model(tmp_path / "net.safetensors")
    assert back.keys() == net.state_dict().keys()
    assert all(torch.equal(back[k], v) and back[k].dtype == v.dtype for k, v in net.state_dict().items())


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path):
    path = tmp_path / LAST
    write_model(path, nn.Linear(1, 1), {})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_model(path, nn.Linear(2, 2), {"epoch": 3})  # safetensors wants texts
    assert path.read_bytes() == before
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_model(tmp_path / "folder", nn.Linear(1, 1), {})
    assert sorted(tmp_path.iterdir()) == [tmp_path / "folder", path]


def test_a_state_that_is_no_tensor_is_named(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(TypeError, match="_extra_state"):
        write_model(tmp_path / LAST, Extra(1, 1), {})
