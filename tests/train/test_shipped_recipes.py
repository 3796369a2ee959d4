"""Every shipped recipe loads, runs and learns; BatchNorm is as good with the server's buffers as re-estimated."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from zasgd.core.ledger import num_batches
from zasgd.core.messages import Grant
from zasgd.core.optimizer import ShardOptimizer
from zasgd.core.rules import shard_groups
from zasgd.train.datasets import DEBIAN_FASHION, read_idx
from zasgd.train.evaluate import Evaluator
from zasgd.train.recipe import Recipe, load_recipe, shipped_recipes
from zasgd.train.trainer import Trainer


class Server:
    """One shard's arithmetic in this process: the parameters, and per worker a snapshot and the rule's own vector."""

    def __init__(self, recipe: Recipe, trainer: Trainer, num_workers: int) -> None:
        self.recipe, self.num_samples, self.samples = recipe, trainer.num_samples, 0
        self.values = trainer.initial()
        whole = trainer.layout.slices("params", 1)[0]
        segments = trainer.layout.segments(whole)
        rule, groups = recipe.rule_spec(), recipe.group_specs()
        self.optimizer = ShardOptimizer(rule, shard_groups(rule, groups), segments, whole.size)
        self.held = [self.sent() for _ in range(num_workers)]
        self.owns = [self.optimizer.new_own() for _ in range(num_workers)]

    def sent(self) -> dict[str, np.ndarray]:
        return {section: vector.copy() for section, vector in self.values.items()}

    def apply(self, gradient, worker: int) -> None:
        """Apply what `worker` computed on what it holds, and let it hold the answer."""
        snapshot, lr = self.held[worker], self.recipe.schedule_spec().lr_at(self.samples, self.num_samples)
        params, out = self.values["params"], np.empty_like(self.values["params"])
        pushed, count = [(0, gradient.grads)], len(self.held)
        own = self.owns[worker]
        self.optimizer.apply(params, pushed, snapshot["params"], lr, out, lag=count - 1, own=own, num_workers=count)
        self.values["stats"] += gradient.stats - snapshot["stats"]
        np.maximum(self.values["counters"], gradient.counters, out=self.values["counters"])
        self.samples += gradient.num_samples
        self.held[worker] = self.sent() | {"params": out}


def grants(recipe: Recipe, num_samples: int) -> Iterator[Grant]:
    size, cells = recipe.train.batch_size, num_batches(num_samples, recipe.train.batch_size)
    for epoch in range(recipe.train.epochs):
        for cell in range(cells):
            stop = num_samples if cell == cells - 1 else (cell + 1) * size
            yield Grant(epoch, cell, cell * size, stop)


def train(recipe: Recipe, num_steps: int, num_workers: int) -> tuple[Server, list[float]]:
    """Workers take turns, so that each gradient is `num_workers - 1` updates late; returns the losses too."""
    trainer = Trainer(recipe)
    server, losses = Server(recipe, trainer, num_workers), []
    owns = [trainer.new_own() for _ in range(num_workers)]
    memories = [trainer.new_memory() for _ in range(num_workers)]
    stream, every = grants(recipe, trainer.num_samples), recipe.rule.push_every
    for step in range(num_steps):
        worker, batches = step % num_workers, list(islice(stream, every))
        for section, vector in server.held[worker].items():
            getattr(memories[worker], section)[:] = vector
        gradient = trainer.gradient(batches, memories[worker], server.samples, owns[worker])
        assert gradient.finite
        server.apply(gradient, worker)
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
    recipe = load_recipe(name, ["schedule.warmup_epochs=0"])
    if name.startswith("fashion"):
        recipe = recipe.model_copy(
            update={"data": recipe.data.model_copy(update={"args": {"folder": str(few_images)}})}
        )
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


@pytest.mark.parametrize(
    ("overrides", "accuracy"),
    [
        ([], 0.94),
        (["rule.name=dana-slim", "optimizer.momentum=0.9", "optimizer.lr=0.02"], 0.94),
        (["rule.name=asgd", "rule.push_every=3"], 0.9),
        (["rule.name=asgd", "optimizer.algorithm=adamw", "optimizer.lr=0.003"], 0.94),
        (["rule.name=delta", "rule.outer_mean=false", "rule.push_every=3", "optimizer.lr=0.1"], 0.9),
        (["rule.name=easgd", "rule.push_every=3"], 0.9),
        (["rule.name=diloco", "rule.push_every=3", "optimizer.lr=0.03"], 0.9),
    ],
    ids=["as shipped", "dana-slim", "mean of 3", "adamw", "delta", "easgd", "diloco"],
)
def test_digits_learns_asynchronously(tmp_path, overrides, accuracy):
    recipe = load_recipe("digits", ["train.epochs=12", *overrides])
    server, _ = train(recipe, num_steps=12 * 81 // recipe.rule.push_every, num_workers=3)
    evaluator = Evaluator(recipe, "cpu", tmp_path)
    evaluator.load("params", 0, server.values["params"])
    assert evaluator.evaluate(12)["test_accuracy"] > accuracy


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
