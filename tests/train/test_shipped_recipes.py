"""Every shipped recipe loads, runs and learns; BatchNorm is as good with the server's buffers as re-estimated."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from zasgd.core.kernels import ShardOptimizer
from zasgd.core.ledger import num_batches
from zasgd.core.messages import Grant
from zasgd.train.datasets import DEBIAN_FASHION, read_idx
from zasgd.train.evaluate import Evaluator
from zasgd.train.recipe import Recipe, load_recipe, shipped_recipes
from zasgd.train.trainer import Trainer


class Server:
    """One shard's arithmetic in this process: the parameters, and one snapshot per worker."""

    def __init__(self, recipe: Recipe, trainer: Trainer) -> None:
        self.recipe, self.num_samples, self.samples = recipe, trainer.num_samples, 0
        self.values = trainer.initial()
        whole = trainer.layout.slices("params", 1)[0]
        segments = trainer.layout.segments(whole)
        self.optimizer = ShardOptimizer(recipe.rule_spec(), recipe.group_specs(), segments, whole.size)

    def sent(self) -> dict[str, np.ndarray]:
        return {section: vector.copy() for section, vector in self.values.items()}

    def apply(self, gradient, snapshot: dict[str, np.ndarray]) -> None:
        lr = self.recipe.schedule_spec().lr_at(self.samples, self.num_samples)
        params, out = self.values["params"], np.empty_like(self.values["params"])
        self.optimizer.apply(params, [(0, gradient.grads)], snapshot["params"], lr, out)
        self.values["stats"] += gradient.stats - snapshot["stats"]
        np.maximum(self.values["counters"], gradient.counters, out=self.values["counters"])
        self.samples += gradient.num_samples


def grants(recipe: Recipe, num_samples: int) -> Iterator[Grant]:
    size, cells = recipe.train.batch_size, num_batches(num_samples, recipe.train.batch_size)
    for epoch in range(recipe.train.epochs):
        for cell in range(cells):
            stop = num_samples if cell == cells - 1 else (cell + 1) * size
            yield Grant(epoch, cell, cell * size, stop)


def train(recipe: Recipe, num_steps: int, num_workers: int) -> tuple[Server, list[float]]:
    """Workers take turns, so that each gradient is `num_workers - 1` updates late; returns the losses too."""
    trainer = Trainer(recipe)
    server, losses = Server(recipe, trainer), []
    held = [server.sent() for _ in range(num_workers)]
    for step, grant in zip(range(num_steps), grants(recipe, trainer.num_samples), strict=False):
        snapshot = held[step % num_workers]
        for section, vector in snapshot.items():
            trainer.load(section, 0, vector)
        gradient = trainer.gradient(grant)
        assert gradient.finite
        server.apply(gradient, snapshot)
        held[step % num_workers] = server.sent()
        losses.append(gradient.loss)
    return server, losses


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def made_images(num: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise with one bright stripe, whose place is the label."""
    rng, labels = np.random.default_rng(num), np.arange(num) % 10
    stripes = (np.arange(28) // 3)[None, :, None] == labels[:, None, None]
    return rng.integers(0, 100, (num, 28, 28)) + 150 * stripes, labels


@pytest.fixture(scope="module")
def few_images(tmp_path_factory) -> Path:
    """A folder with the first images of the real Fashion-MNIST where it is installed, else with made ones."""
    folder = tmp_path_factory.mktemp("images")
    for part, num in (("train", 3000), ("t10k", 1000)):
        images, labels = made_images(num)
        if DEBIAN_FASHION.is_dir():
            images = read_idx(DEBIAN_FASHION / f"{part}-images-idx3-ubyte.gz")[:num]
            labels = read_idx(DEBIAN_FASHION / f"{part}-labels-idx1-ubyte.gz")[:num]
        write_idx(folder / f"{part}-images-idx3-ubyte", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte", labels)
    return folder


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_each_recipe_runs_twenty_steps_and_its_loss_falls(name, few_images):
    folder = [f"data.args.folder={few_images}"] if name == "fashion_mnist" else []
    recipe = load_recipe(name, ["schedule.warmup_epochs=0", *folder])
    _, losses = train(recipe, num_steps=20, num_workers=2)
    assert len(losses) == 20
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_each_recipe_opens_with_how_to_launch_it_and_what_to_expect(name):
    text = shipped_recipes()[name].read_text()
    opening = text[: text.index("\n\n")]
    assert all(line.startswith("#") for line in opening.splitlines())
    for words in (f"zasgd train {name}", "samples", "batches", "pushes", "Accuracy", "Time"):
        assert words in opening, words


def test_digits_learns_asynchronously(tmp_path):
    recipe = load_recipe("digits", ["train.epochs=12"])
    server, _ = train(recipe, num_steps=12 * 81, num_workers=3)
    evaluator = Evaluator(recipe, "cpu", tmp_path)
    evaluator.load("params", 0, server.values["params"])
    assert evaluator.evaluate(12)["test_accuracy"] > 0.94


def test_the_servers_batchnorm_buffers_are_within_a_point_of_re_estimated_ones(tmp_path, few_images):
    small = ["train.epochs=6", "train.batch_size=24", "model.args.width=8", f"data.args.folder={few_images}"]
    recipe = load_recipe("fashion-mnist", small)
    server, _ = train(recipe, num_steps=6 * 125, num_workers=2)
    evaluator = Evaluator(recipe, "cpu", tmp_path)
    for section, vector in server.values.items():
        evaluator.load(section, 0, vector)
    by_server, afresh = evaluator.evaluate(6), evaluator.reestimated_scores()
    assert by_server["test_accuracy"] > 0.7
    assert abs(by_server["test_accuracy"] - afresh["test_accuracy"]) < 0.01
    assert by_server["test_loss"] != afresh["test_loss"]
