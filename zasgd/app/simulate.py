"""One run of a recipe in virtual time: real gradients on the CPU, the real cores, simulated machines and network.

Decides what a simulated run consists of and what is told of it. The cores are those of a live run, driven by
`zasgd.sim`; only the time that a batch takes and the time that a message takes are made up.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zasgd.app.serve import as_json, broker_config
from zasgd.app.variants import parse_variant
from zasgd.core.layout import SECTIONS
from zasgd.core.ledger import num_batches
from zasgd.core.messages import Array, Err, Message
from zasgd.core.node import Compute, Effect, Node
from zasgd.core.parameters import Parameters
from zasgd.core.shard import Shard
from zasgd.core.transfer import Gradient
from zasgd.core.worker import GradientTask, WorkerConfig
from zasgd.sim.cluster import Cluster, Plan
from zasgd.sim.faults import Link
from zasgd.sim.problems import TaskTimes
from zasgd.sim.scenario import Arrival, ScenarioError, apply_churn, parse_churn, parse_network, parse_speeds
from zasgd.train import make_trainer
from zasgd.train.recipe import Recipe, load_recipe

Parsed = TypeVar("Parsed")

HORIZON = 100.0
"""A simulation is given up after this many times what one worker would need."""
CURVE_SAMPLES = 2000
"""The train loss after each epoch is that of so many training samples: scoring must not cost more than training."""
LEARNT = 0.9
"""A run diverged whose train loss is not finite or not below this part of the initial parameters'."""


class SimulationError(RuntimeError):
    """A simulation that did not come to its end; one line that says why."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a run is simulated, as the command line has it.

    num_workers: from the start, 0 for the recipe's. speeds, network, churn: see zasgd.sim.scenario; no churn is "".
    step_s: mean virtual seconds of a batch. seed: of times and schedule; initial parameters and data have the recipe's
    train.seed.
    """

    num_workers: int
    speeds: str = "homogeneous"
    network: str = "0.2,10"
    churn: str = ""
    step_s: float = 0.5
    seed: int = 0

    def check(self) -> None:
        """Read speeds, network and churn. Raises ScenarioError."""
        self.task_times(), self.link(), self.arrivals()

    def task_times(self) -> TaskTimes:
        """How long batches take. Raises ScenarioError."""
        return _parsed(self.speeds, lambda text: parse_speeds(text, self.step_s, self.derived_seed("times")))

    def link(self) -> Link:
        """How long messages take. Raises ScenarioError."""
        return parse_network(self.network)

    def arrivals(self) -> Sequence[Arrival]:
        """Who comes and goes besides those who are there from the start. Raises ScenarioError."""
        return _parsed(self.churn, lambda text: parse_churn(text, self.num_workers))

    def derived_seed(self, what: str) -> int:
        """A seed of its own for times, network or schedule: none of them shares a random number with another."""
        digest = hashlib.blake2b(f"{self.seed}/{what}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little")


def _parsed(given: str, parse: Callable[[str], Parsed]) -> Parsed:
    """What a text says or, where it is the name of a .csv file, what is in that. Raises ScenarioError."""
    if not given.endswith(".csv"):
        return parse(given)
    try:
        return parse(Path(given).read_text(encoding="utf-8-sig"))
    except OSError as e:
        raise ScenarioError(f"{given}: cannot be read: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ScenarioError(f"{given}: is no text") from None
    except ScenarioError as e:
        raise ScenarioError(f"{given}: {e}") from None


class Point(NamedTuple):
    """Scores at the end of an epoch: train_loss a mean over samples, test_error in percent, None for no classifier."""

    epoch: int
    virtual_seconds: float
    train_loss: float
    test_error: float | None


def run(source: str, rule: str | None, sets: Sequence[str], scene: Scene, *, curve: bool, json_output: bool) -> None:
    """Simulate a recipe, by its own rule or by `rule` (see variants), and print the result.

    Raises RecipeError, RuleError, ScenarioError, DataError, MissingExtraError, SimulationError.
    """
    recipe = loaded(source, rule, sets, scene.seed)
    alone = parse_variant(rule).num_workers if rule is not None else None
    num_workers = alone or scene.num_workers or recipe.run.workers
    simulation = Simulation(recipe, replace(scene, num_workers=num_workers), curve=curve)
    simulation.run()
    result = simulation.result() | ({"curve": [p._asdict() for p in simulation.points]} if curve else {})
    if json_output:
        print(as_json(result))
    else:
        _print(result)


def loaded(source: str, rule: str | None, sets: Sequence[str], seed: int) -> Recipe:
    """The recipe under `--set`, `--rule` and `--seed`."""
    if rule is None:
        return load_recipe(source, [f"train.seed={seed}", *sets])
    return parse_variant(rule).load(source, sets, seed)


def _print(result: dict[str, Any]) -> None:
    console, lag = Console(highlight=False), result["lag"]
    told = {
        "test error": _percent(result["test_error"]),
        "train loss": f"{result['train_loss']:.4g}{' (diverged)' if result['diverged'] else ''}",
        "updates": f"{result['updates']} by {result['workers']} workers, {result['dropped']} pushes dropped",
        "samples": f"{result['samples']} applied, {result['torn']} torn, {result['skipped']} skipped",
        "virtual time": f"{result['virtual_seconds']:.1f} s, {result['speedup']:.2f} times as fast as one worker",
        "lag": f"mean {lag['mean']:.2f}, p99 {lag['p99']}, max {lag['max']}; gap {result['gap_rmse']:.3g}",
    }
    for what, value in told.items():
        console.print(Text(f"{what:>12}  {value}"))
    if result.get("curve"):
        console.print(_curve_table(result["curve"]))


def _curve_table(curve: Iterable[Mapping[str, Any]]) -> Table:
    table = Table("epoch", "virtual seconds", "train loss", "test error")
    for point in curve:
        cells = (str(point["epoch"]), f"{point['virtual_seconds']:.1f}", f"{point['train_loss']:.4g}")
        table.add_row(*cells, _percent(point["test_error"]))
    return table


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:.2f} %"


# ---- what happens in a simulated run ----------------------------------------------------------------------


class Work:
    """The batches of all workers, computed by one trainer (a Problem of the world).

    Each life of a worker keeps what is its own: momentum or a local optimizer.
    """

    def __init__(self, trainer: Any, times: TaskTimes) -> None:
        self._trainer = trainer
        self._times = times
        self._lives: dict[str, _Life] = {}

    def __call__(self, name: str, number: int, task: GradientTask) -> tuple[float, Gradient]:
        """Virtual seconds of the task, and its real gradient."""
        life = self._lives.get(name)
        if life is None or life.number != number:
            life = self._lives[name] = _Life(number, self._trainer.new_own())
        gradient = self._trainer.gradient(task.grants, task.memory, task.samples, life.own)
        return sum(self._times.next(name) for _ in task.grants), gradient


@dataclass(slots=True)
class _Life:
    """What one life of a worker keeps from batch to batch. own: see Trainer.new_own."""

    number: int
    own: Any


class Course:
    """Watches when the first batch began, when the last update was made, and when all shards had an epoch's samples.

    dropped: pushes (incarnation, seq) that a shard refused as too late.
    """

    def __init__(
        self, num_shards: int, samples_per_epoch: int, on_epoch: Callable[[int, float], None] | None = None
    ) -> None:
        self.began_at: float | None = None
        self.ended_at = 0.0
        self._versions = [0] * num_shards
        self._samples = [0] * num_shards
        self._samples_per_epoch = samples_per_epoch
        self._on_epoch = on_epoch
        self._epoch = 0
        self.dropped: set[tuple[int, int]] = set()

    @property
    def seconds(self) -> float:
        """Virtual seconds from the first computation to the last update."""
        return self.ended_at - (self.ended_at if self.began_at is None else self.began_at)

    def handled(self, at_s: float, name: str, node: Node, message: Message | None, effects: list[Effect]) -> None:
        """Look at a shard after its event, and at all until the first batch."""
        if self.began_at is None and any(isinstance(effect, Compute) for effect in effects):
            self.began_at = at_s
        if isinstance(node, Shard) and node.version != self._versions[node.number]:
            self._versions[node.number], self._samples[node.number] = node.version, node.samples
            self.ended_at = at_s
            self._told(min(self._samples) // self._samples_per_epoch)

    def sent(self, at_s: float, name: str, node: Node, message: Message) -> None:
        """Note a push that comes too late to be applied."""
        if isinstance(message, Err) and message.code in ("LAG", "LATE"):
            self.dropped.add((message.incarnation, message.seq))

    def _told(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._epoch = epoch
            if self._on_epoch is not None:
                self._on_epoch(epoch, self.seconds)


class Simulation:
    """One run; `run` lets it happen, the rest says how it went."""

    def __init__(self, recipe: Recipe, scene: Scene, *, curve: bool = False) -> None:
        """Raises RecipeError, DataError, MissingExtraError, ScenarioError."""
        import torch

        from zasgd.train.evaluate import Scorer

        torch.set_num_threads(1)
        self.recipe, self.scene = recipe, scene
        self.trainer = make_trainer(recipe)
        self.scorer = Scorer(recipe, self.trainer.workload)
        self.times = scene.task_times()
        self.link = scene.link()
        self.course = Course(recipe.run.servers, self.trainer.num_samples, self._score_epoch if curve else None)
        self.points: list[Point] = []
        initial = self.trainer.initial()
        self.initial_loss = self._score(initial).train_loss
        self.cluster = self._cluster(initial)
        apply_churn(scene.arrivals(), self.cluster)

    def _cluster(self, initial: Mapping[str, Array]) -> Cluster:
        recipe = self.recipe
        config = broker_config(recipe, recipe.run.servers, 0, wants_evaluator=False)
        plan = Plan(
            num_workers=self.scene.num_workers, num_shards=recipe.run.servers, num_samples=self.trainer.num_samples,
            batch_size=recipe.train.batch_size, epochs=recipe.train.epochs, layout=self.trainer.layout,
            rule=recipe.rule_spec(), groups=recipe.group_specs(), config=config,
            member=WorkerConfig(inflight=recipe.run.inflight, push=recipe.push_compression()),
        )  # fmt: skip
        work = Work(self.trainer, self.times)
        seed = self.scene.derived_seed("schedule")
        return Cluster(
            plan, seed, link=self.link, problem=work, initial=initial, watches=(self.course,), traced=False,
            validate_every=0,
        )  # fmt: skip

    def run(self) -> None:
        """Let the run happen. Raises SimulationError when it does not come to its end."""
        horizon_s = HORIZON * max(1.0, self.alone_s)
        self.cluster.run(horizon_s)
        outcome = self.cluster.broker.run.outcome
        if outcome != "completed":
            raise SimulationError(
                f"after {self.cluster.world.now:.0f} virtual seconds the run is {outcome or 'not over'}: "
                "is there always a worker?"
            )

    # ---- how it went --------------------------------------------------------------------------------

    @property
    def shards(self) -> list[Shard]:
        """The shards' cores, in order of their slices."""
        return [self.cluster.shard(k) for k in range(self.recipe.run.servers)]

    @property
    def alone_s(self) -> float:
        """What one worker is expected to need: every batch at the mean time, and a round trip per push."""
        train = self.recipe.train
        batches = train.epochs * num_batches(self.trainer.num_samples, train.batch_size)
        pushes = math.ceil(batches / self.recipe.rule.push_every)
        slices = self.trainer.layout.slices("params", self.recipe.run.servers)  # each over its own server's line
        largest_bytes = 4 * max(part.size for part in slices)
        return batches * self.times.mean_s + pushes * self.link.round_trip_s(largest_bytes)

    @property
    def _share_applied(self) -> float:
        """Of all samples: what was skipped cost no time that a single worker would have spent."""
        ledger = self.cluster.broker.run.ledger
        return ledger.once / (ledger.epochs * ledger.num_samples)

    def result(self) -> dict[str, Any]:
        """What `--json` prints, but for the curve."""
        end, shards, seconds = self._score(self._vectors()), self.shards, self.course.seconds
        return {
            "rule": self.recipe.rule.name,
            "workers": self.scene.num_workers,
            "test_error": end.test_error,
            "train_loss": end.train_loss,
            "updates": shards[0].version,
            "samples": self.cluster.broker.run.ledger.once,
            "virtual_seconds": seconds,
            "speedup": self.alone_s * self._share_applied / seconds if seconds else None,
            "lag": lag_facts([_values(shard).lags for shard in shards]),
            "gap_rmse": _gap_rmse([_values(shard) for shard in shards]),
            "dropped": len(self.course.dropped),
            "torn": self.cluster.broker.run.ledger.torn,
            "skipped": self.cluster.broker.run.ledger.skipped,
            "diverged": not end.train_loss < LEARNT * self.initial_loss,
            "seeds": {"train": self.recipe.train.seed, "schedule": self.scene.seed},
            "speeds": self.scene.speeds,
            "network": self.scene.network,
            "churn": self.scene.churn,
        }

    def _score_epoch(self, epoch: int, seconds: float) -> None:
        self.points.append(self._score(self._vectors(), CURVE_SAMPLES)._replace(epoch=epoch, virtual_seconds=seconds))

    def _vectors(self) -> dict[str, Array]:
        """The shards' own parameters and buffers as they are now, by section."""
        held = [_values(shard).observed() for shard in self.shards]
        return {section: np.concatenate([getattr(h, section) for h in held]) for section in SECTIONS}

    def _score(self, vectors: Mapping[str, Array], at_most: int | None = None) -> Point:
        scores = self.scorer.scores(vectors, at_most=at_most)
        accuracy = scores.get("test_accuracy")
        error = None if accuracy is None else round(100.0 * (1.0 - accuracy), 6)
        return Point(self.recipe.train.epochs, self.course.seconds, scores["train_loss"], error)


def lag_facts(lags: Iterable[Mapping[int, int]]) -> dict[str, Any]:
    """mean, p99 and max over all pushes on all shards; lags: lag -> pushes, per shard."""
    total: Counter[int] = Counter()
    for counts in lags:
        total.update(counts)
    ordered, pushes = sorted(total.items()), sum(total.values())
    if not pushes:
        return {"mean": 0.0, "p99": 0, "max": 0}
    upto = accumulate(count for _, count in ordered)
    p99 = next(lag for (lag, _), seen in zip(ordered, upto, strict=True) if seen >= 0.99 * pushes)
    return {"mean": sum(lag * n for lag, n in ordered) / pushes, "p99": p99, "max": ordered[-1][0]}


def _gap_rmse(values: Sequence[Parameters]) -> float:
    """Root mean square of w - w_snapshot at apply, over pushes and elements of all shards."""
    size = sum(v.params.size for v in values)
    return math.sqrt(sum(v.gap.rmse**2 * v.params.size for v in values) / max(1, size))


def _values(shard: Shard) -> Parameters:
    if shard.values is None:
        raise SimulationError(f"shard {shard.number} never got parameters")
    return shard.values
