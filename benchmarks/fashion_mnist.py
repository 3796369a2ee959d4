"""fashion_mnist with 2 workers beside the same model trained by plain single-process PyTorch, in one run.

    python benchmarks/fashion_mnist.py [--epochs 6] [--workers 2]
    python benchmarks/fashion_mnist.py --recipe digits --workers 1 --threads 1 --repeats 3 [--set run.inflight=1]

Prints test accuracy, time per epoch and samples per second of both, and what the server's BatchNorm buffers are worth
beside buffers re-estimated over training data. One seed; with --repeats both run in turns and the ratio of the median
rates is printed. Takes several minutes.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR

from zasgd.core.ledger import permutation
from zasgd.observe.events import read_events
from zasgd.train.datasets import in_order, take
from zasgd.train.evaluate import Evaluator
from zasgd.train.export import read_model
from zasgd.train.recipe import Recipe, load_recipe
from zasgd.train.trainer import build_workload


def plain(recipe: Recipe, threads: int) -> dict[str, float]:
    """The recipe by a loop that anybody would write: same model, data, batches, optimizer and schedule."""
    torch.set_num_threads(threads)
    work = build_workload(recipe, "cpu")
    # A copy has none of the hooks that collect gradients for a server.
    module, optimizer_table = copy.deepcopy(work.flat.module), recipe.optimizer
    optimizer = torch.optim.SGD(
        module.parameters(),
        lr=1.0,
        momentum=optimizer_table.momentum,
        nesterov=optimizer_table.nesterov,
        weight_decay=optimizer_table.weight_decay,
    )
    schedule, num_samples = recipe.schedule_spec(), len(work.train)
    batch_size = recipe.train.batch_size
    clock = LambdaLR(optimizer, lambda step: schedule.lr_at(step * batch_size, num_samples))
    module.train()
    began_at = 0.0
    for epoch in range(recipe.train.epochs):
        began_at = began_at if epoch > 1 else time.monotonic()
        order = permutation(num_samples, recipe.train.seed, epoch)
        for start in range(0, num_samples, batch_size):
            inputs, targets = take(work.train, order[start : start + batch_size])
            optimizer.zero_grad()
            work.loss(module(inputs), targets).backward()
            optimizer.step()
            clock.step()
    seconds = time.monotonic() - began_at
    return {"accuracy": accuracy(module, work.test), **rates(recipe, num_samples, seconds)}


def accuracy(module: torch.nn.Module, data: object) -> float:
    """Share of right answers in eval mode."""
    module.eval()
    right = total = 0
    with torch.inference_mode():
        for inputs, targets in in_order(data, 512):
            right += int((module(inputs).argmax(1) == targets).sum())
            total += len(targets)
    return right / total


def served(recipe_name: str, recipe: Recipe, workers: int, sets: list[str], folder: Path) -> dict[str, float]:
    """The same by `zasgd train`; time from the end of the first epoch to the last sample."""
    options = [part for text in sets for part in ("--set", text)]
    command = [sys.executable, "-m", "zasgd", "train", recipe_name, "--workers", str(workers), *options]
    done = subprocess.run([*command, "--run-dir", str(folder), "--json"], stdout=subprocess.PIPE, check=True, text=True)
    summary = json.loads(done.stdout.splitlines()[-1])
    events = read_events(folder / "events.jsonl")
    ends = [e["t"] for e in events if e["event"] == "epoch_completed"]
    evaluator = Evaluator(recipe, "cpu", folder)
    evaluator.module.load_state_dict(read_model(folder / "model.safetensors"))
    return {
        "accuracy": summary["test_accuracy"],
        "reestimated_accuracy": evaluator.reestimated_scores()["test_accuracy"],
        "lag_mean": summary["lag"]["mean"],
        **rates(recipe, summary["samples"] // recipe.train.epochs, max(ends) - min(ends)),
    }


def rates(recipe: Recipe, num_samples: int, seconds: float) -> dict[str, float]:
    """Seconds per epoch and samples per second, without the first epoch, in which libraries warm up."""
    epochs = recipe.train.epochs - 1
    return {"seconds_per_epoch": round(seconds / epochs, 2), "samples_per_s": round(num_samples * epochs / seconds, 1)}


def main() -> None:
    """Run both and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="fashion_mnist")
    parser.add_argument("--epochs", type=int, default=0, help="at least 2; 0: the recipe's")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="of the plain run; 0: torch's own choice")
    parser.add_argument("--repeats", type=int, default=1, help="of both, in turns; the last are printed whole")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe")
    options = parser.parse_args()
    sets = [*options.set, *([f"train.epochs={options.epochs}"] if options.epochs else [])]
    recipe = load_recipe(options.recipe, sets)
    ours, beside = {}, {}
    of_ours, of_plain = [], []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            ours = served(options.recipe, recipe, options.workers, sets, Path(folder) / "run")
        beside = plain(recipe, options.threads or torch.get_num_threads())
        of_ours.append(ours["samples_per_s"])
        of_plain.append(beside["samples_per_s"])
    result = {
        "recipe": options.recipe,
        "epochs": recipe.train.epochs,
        "workers": options.workers,
        "zasgd": ours,
        "plain": beside,
        "zasgd_samples_per_s": of_ours,
        "plain_samples_per_s": of_plain,
        "rate_ratio": round(statistics.median(of_ours) / statistics.median(of_plain), 3),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
