"""`zasgd replay`: a run's updates again on one process, from the records of its shards, to the same bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from zasgd.app import serve
from zasgd.app.local import RECORDS
from zasgd.core.layout import Layout
from zasgd.core.messages import Array, Grant
from zasgd.core.parameters import ShardConfig
from zasgd.core.region import RegionPlan, memories, private_region
from zasgd.core.replay import PUSHES, Replay, ReplayError, ShardReplay
from zasgd.core.transfer import Gradient
from zasgd.net.record import RecordError, read_rows, shard_file
from zasgd.train.recipe import Recipe, load_recipe
from zasgd.train.trainer import Trainer


def replay(run_dir: Path, threads: int, *, json_output: bool) -> int:
    """Recompute a run; prints what was compared. Raises ReplayError at the first difference, RecordError."""
    recipe = load_recipe(str(_recipe_file(run_dir)))
    if (recipe.run.compress_push, recipe.run.compress_pull) != ("none", "none"):
        raise RecordError(
            f"{run_dir}: pushes or pulls of this run may have been compressed, which replay does not redo"
        )
    import torch

    torch.set_num_threads(threads)
    trainer = Trainer(recipe, "cpu")
    shards = _shards(run_dir / RECORDS, recipe, trainer.layout, trainer.num_samples)
    computing = _Computing(trainer)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replaying", total=sum(len(s.rows) for s in shards))
        again = Replay(trainer.layout, shards, trainer.initial(), computing)
        again.run(lambda done: progress.update(task, completed=done))
    return _told(run_dir, shards, computing, json_output=json_output)


def _recipe_file(run_dir: Path) -> Path:
    file = run_dir / "recipe.toml"
    if not file.is_file():
        raise RecordError(f"{run_dir}: holds no recipe.toml; give the folder of a run of `zasgd train`")
    return file


def _shards(folder: Path, recipe: Recipe, layout: Layout, num_samples: int) -> list[ShardReplay]:
    """One per record that is there, which must be all of a run."""
    config = ShardConfig(
        len(list(folder.glob("shard-*.record"))), recipe.rule_spec(), recipe.group_specs(), recipe.schedule_spec(),
        inflight=recipe.run.inflight,
    )  # fmt: skip
    if not config.num_shards:
        raise RecordError(f"{folder}: no shard of this run has left a record")
    shards: list[ShardReplay] = []
    runs = set()
    for number in range(config.num_shards):
        rows = read_rows(shard_file(folder, number))
        head = next(rows, None)
        if head is None or head[:2] != ["shard", number]:
            raise RecordError(f"{shard_file(folder, number)}: does not begin with shard {number}")
        if head[3] != layout.hash:
            raise RecordError(
                f"{folder}: the recipe builds another model now: its layout is {layout.hash}, the run's was {head[3]}"
            )
        if head[4] != config.num_shards:
            raise RecordError(f"{folder}: holds the records of {config.num_shards} shards, the run had {head[4]}")
        runs.add(head[2])
        shards.append(ShardReplay(config, layout, number, num_samples, rows))
    if len(runs) > 1:
        raise RecordError(f"{folder}: these records are of {len(runs)} different runs")
    return shards


class _Computing:
    """Computes gradients as the workers did; each incarnation keeps what a worker keeps."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        plan = RegionPlan(trainer.layout.sizes["params"])
        (self._memory,) = memories(private_region(plan), trainer.layout)
        self._own: dict[int, Any] = {}
        self.num_gradients = 0

    def __call__(
        self, incarnation: int, grants: tuple[Grant, ...], vectors: dict[str, Array], samples: int
    ) -> Gradient:
        for section, values in vectors.items():
            np.copyto(getattr(self._memory, section), values)
        if incarnation not in self._own:
            self._own[incarnation] = self._trainer.new_own()
        self.num_gradients += 1
        found = self._trainer.gradient(grants, self._memory, samples, self._own[incarnation])
        return dataclasses.replace(found, grads=found.grads.copy())


def _told(run_dir: Path, shards: list[ShardReplay], computing: _Computing, *, json_output: bool) -> int:
    unfinished = [s.number for s in shards if not s.ended]
    facts = {
        "run_dir": str(run_dir),
        "shards": len(shards),
        "updates": [s.num_updates for s in shards],
        "pushes": sum(row[0] in PUSHES for s in shards for row in s.rows),
        "gradients_computed": computing.num_gradients,
        "digests": [s.values.digest() for s in shards],
        "bit_equal": not unfinished,
    }
    if json_output:
        print(serve.as_json(facts))
    if unfinished:
        raise ReplayError(
            f"shards {unfinished}: their records have no end, as of processes that were killed; all before it is equal"
        )
    if not json_output:
        print(
            f"bit-equal: {len(shards)} shards, {facts['updates']} updates, "
            f"{computing.num_gradients} gradients computed; "
            "versions, lags, learning rates and the parameters at the end are those of the run"
        )
    return 0
