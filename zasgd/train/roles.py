"""A worker and an evaluator of a run, given no more than the broker's address.

Decides on device and threads; recipe, layout and hyper-parameters come from the broker. The functions block until the
process's part in the run is over and return its exit code; what went wrong is one line on stderr.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zasgd.core.compress import warm
from zasgd.core.evaluator import Evaluator as EvaluatorNode
from zasgd.core.evaluator import ScoreTask
from zasgd.core.node import Note, Stop
from zasgd.core.transfer import Gradient
from zasgd.core.worker import GradientTask, Worker, WorkerConfig
from zasgd.net.client import BrokerError, Client
from zasgd.net.processes import Post, host_name, new_token, one_line, run_member
from zasgd.net.sockets import AddressError
from zasgd.train import DataError, DeviceError, MissingExtraError, make_evaluator, make_trainer, train_extra
from zasgd.train.recipe import Recipe, RecipeError


@dataclass(frozen=True, slots=True)
class RoleOptions:
    """What a person may set on a worker or evaluator.

    broker: HOST:PORT. name: keeps the id across restarts. device: `auto`, `cpu`, `cuda`, `cuda:1`. slot: which of this
    host's workers this is, for `auto`. threads: of torch, 0 for a fair share. data_path: in place of the recipe's.
    Times in seconds.
    """

    broker: str
    name: str = ""
    device: str = "auto"
    slot: int = 0
    threads: int = 0
    connect_timeout_s: float = 60.0
    broker_timeout_s: float = 30.0
    data_path: str = ""


def run_worker(options: RoleOptions) -> int:
    """Compute gradients for the broker's run until it is over, or this worker is told to leave."""
    return _reported(lambda: _worker(options))


def run_evaluator(options: RoleOptions, run_dir: str) -> int:
    """Score the model and write it to `run_dir` whenever the broker asks."""
    return _reported(lambda: _evaluator(options, Path(run_dir)))


def _worker(options: RoleOptions) -> Stop:
    recipe = _recipe(options)
    trainer = make_trainer(recipe, _prepare_torch(options, recipe))
    config = _config(options, recipe)
    if config.data_path in ("direct", "relay"):
        for compression in (recipe.push_compression(), recipe.pull_compression()):
            warm(compression)  # so that no message waits for a compiler
    node = Worker(time.monotonic(), new_token(), config, trainer.layout, trainer.num_samples, trainer.initial)

    own, life = trainer.new_own(), node.num_lives

    def compute(task: GradientTask, post: Post) -> Gradient:
        nonlocal own, life
        if life != node.num_lives:  # after a fence it is a newcomer: to the shards its momentum is gone
            own, life = trainer.new_own(), node.num_lives
            trainer.workload.flat.unbind()

        def ready(start: int, stop: int) -> None:
            post(lambda now: node.on_part(now, task, start))

        return trainer.gradient(task.grants, task.memory, task.samples, own, ready, task.parts)

    return run_member(node, options.broker, compute, note=_say)


def _evaluator(options: RoleOptions, run_dir: Path) -> Stop:
    recipe = _recipe(options)
    run_dir.mkdir(parents=True, exist_ok=True)
    evaluator = make_evaluator(recipe, _prepare_torch(options, recipe), run_dir)
    node = EvaluatorNode(time.monotonic(), new_token(), _config(options, recipe), evaluator.layout)

    def compute(task: ScoreTask, post: Post) -> dict[str, float]:
        for section, start, values in task.pieces:
            evaluator.load(section, start, values)
        if task.interrupted:
            evaluator.save(task.epoch)
            return {}
        return evaluator.evaluate(task.epoch, task.final)

    return run_member(node, options.broker, compute, note=_say)


def _recipe(options: RoleOptions) -> Recipe:
    with Client(options.broker) as client:
        return Recipe.from_json(client.describe(options.connect_timeout_s).recipe)


def _config(options: RoleOptions, recipe: Recipe) -> WorkerConfig:
    return WorkerConfig(
        name=options.name,
        host=host_name(),
        pid=os.getpid(),
        data_path=options.data_path or recipe.run.data_path,
        inflight=recipe.run.inflight,
        push=recipe.push_compression(),
        connect_timeout_s=options.connect_timeout_s,
        broker_timeout_s=options.broker_timeout_s,
        min_step_s=recipe.run.min_step_s,
        push_every=recipe.rule.push_every,
    )


def _prepare_torch(options: RoleOptions, recipe: Recipe) -> str:
    """Set torch's threads and choose the device: the GPU of this slot where there is one."""
    with train_extra():
        import torch
    share = max(1, (os.cpu_count() or 1) // recipe.run.workers)
    torch.set_num_threads(options.threads or share)
    if options.device != "auto":
        return options.device
    return f"cuda:{options.slot % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"


def _say(note: Note) -> None:
    facts = " ".join(f"{key}={value}" for key, value in note.fields.items())
    print(f"{note.event} {facts}", file=sys.stderr, flush=True)


def _reported(role: Callable[[], Stop]) -> int:
    """The exit code of a role; what a user can mend is one line."""
    try:
        stop = role()
    except BrokerError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        return e.code
    except (RecipeError, DataError, DeviceError, MissingExtraError, AddressError) as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        return 2
    except Exception as e:  # the user's model or data: the traceback belongs in this log, its head on its last line
        traceback.print_exc()
        print(f"error: {one_line(e)}", file=sys.stderr, flush=True)
        return 1
    print(f"{'error: ' if stop.code else ''}{stop.reason}", file=sys.stderr, flush=True)
    return stop.code
