"""A whole run on this machine: `zasgd train`."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from zasgd.app import serve
from zasgd.app.display import Display
from zasgd.launch.children import RUN_VARIABLE, Child, spawn_command
from zasgd.launch.forkserver import TorchForkserver
from zasgd.launch.ports import PortClaim, claim_port_block
from zasgd.launch.supervisor import Ending, Supervisor
from zasgd.net.arena import default_folder, sweep
from zasgd.net.sockets import DEFAULT_PORT
from zasgd.train import roles
from zasgd.train.recipe import Recipe

MODEL_FILES = ("params.npz", "model.safetensors")
"""What the broker writes at the end when no evaluator did; what the evaluator writes, then of an earlier epoch."""
RECORDS = "records"
"""Folder of a run in which its shards write their records."""
PORTS_BEYOND_SERVERS = 2
"""Control and relay; each server has one more."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a recipe runs here. port: of the broker, None for the first free block. record_pushes: gradients too."""

    port: int | None = None
    device: str = "auto"
    record_pushes: bool = False


class LocalRoles:
    """How each role of one local run is started."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        run: str,
        port: int,
        options: Options,
        forkserver: TorchForkserver,
        claim: PortClaim | None,
    ) -> None:
        """claim: holds the block from `port` on while this object lives."""
        self._recipe = recipe
        self._run_dir = run_dir
        self._env = {RUN_VARIABLE: run}
        self._port = port
        self._device = options.device
        self._record_pushes = options.record_pushes
        self._forkserver = forkserver
        self._claim = claim

    def broker(self) -> Child:
        recipe = str(self._run_dir / "recipe.toml")
        servers = str(self._recipe.run.servers)
        options = ["--servers", servers, "--bind", self._address, "--run-dir", str(self._run_dir), "--supervised"]
        return self._command("broker", "broker", recipe, *options)

    def server(self, number: int) -> Child:
        bind = f"127.0.0.1:{self._port + PORTS_BEYOND_SERVERS + number}"
        options = ["--bind", bind, "--record", str(self._run_dir / RECORDS)]
        if self._record_pushes:
            options.append("--record-pushes")
        return self._command(f"server-{number}", "server", "--broker", self._address, *options)

    def evaluator(self) -> Child:
        return self._fork("eval", roles.run_evaluator, self._options("eval", 0), str(self._run_dir))

    def worker(self, slot: int) -> Child:
        return self._fork(f"worker-{slot}", roles.run_worker, self._options(f"w{slot}", slot))

    @property
    def _address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def _options(self, name: str, slot: int) -> roles.RoleOptions:
        return roles.RoleOptions(broker=self._address, name=name, device=self._device, slot=slot, threads=self._threads)

    @property
    def _threads(self) -> int:
        """A fair share of the cores that the servers leave: with one thread too many, torch's wait for each other."""
        run = self._recipe.run
        return max(1, ((os.cpu_count() or 1) - run.servers) // run.workers)

    def _command(self, name: str, *arguments: str) -> Child:
        return spawn_command(name, [sys.executable, "-m", "zasgd", *arguments], self._log(name), self._env)

    def _fork(self, name: str, target: Any, *arguments: Any) -> Child:
        return self._forkserver.fork(target, arguments, name, self._log(name))

    def _log(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{name}.log"


def supervisor(recipe: Recipe, run_dir: Path, options: Options) -> Supervisor:
    """Everything ready to run; nothing is started yet.

    Without `options.port` the first free block is claimed, for as long as this process lives. Raises RunFolderError.
    """
    run, port = secrets.token_hex(8), options.port
    serve.claim(run_dir)
    serve.prepare(run_dir, recipe)
    claim = None if port is not None else claim_port_block(PORTS_BEYOND_SERVERS + recipe.run.servers, DEFAULT_PORT)
    base = claim.base if claim is not None else port or DEFAULT_PORT
    forkserver = TorchForkserver({RUN_VARIABLE: run}, run_dir / "logs" / "torch.log")
    local = LocalRoles(recipe, run_dir.absolute(), run, base, options, forkserver, claim)
    return Supervisor(f"127.0.0.1:{base}", run, local, recipe.run.workers, recipe.run.servers, forkserver)


def train(recipe: Recipe, run_dir: Path, options: Options, *, json_output: bool) -> int:
    """Run a recipe to its end with a live display; prints the summary, returns the exit code."""
    job = supervisor(recipe, run_dir, options)
    with Display(recipe, run_dir) as display:
        job.watch.tick, job.watch.say = display.tick, display.say
        ending = job.run()
    sweep(default_folder())  # whoever was killed has left its shared memory behind
    return conclude(recipe, run_dir, ending, json_output=json_output)


def conclude(recipe: Recipe, run_dir: Path, ending: Ending, *, json_output: bool) -> int:
    """Write metrics and report, tell the user how it went; the exit code."""
    told = serve.finish(run_dir)
    ending = _judged(ending, told)
    interrupted = ending.code >= 128
    summary = summarise(recipe, run_dir, told)
    if ending.code and not interrupted:
        summary |= {"outcome": "failed", "interrupted": False, "reason": ending.text}
        err = Console(stderr=True, highlight=False, soft_wrap=True)
        err.print("error:", style="red", end=" ")
        err.print(f"{ending.text}{f' (log: {ending.log})' if ending.log else ''}", markup=False)
        err.print(f"The run folder is kept: {run_dir}", markup=False)
    if json_output:
        print(serve.as_json({**summary, "exit_code": ending.code}), flush=True)
    elif summary["updates"] and (interrupted or not ending.code):
        Display.print_summary(Console(highlight=False, soft_wrap=True, markup=False), summary)
    return ending.code


def _judged(ending: Ending, told: Mapping[str, Any]) -> Ending:
    """A run that came to its end and has nothing to show for it did not succeed."""
    if ending.code or told.get("event") != "run_completed":
        return ending
    if not told["samples"]:
        return Ending(1, f"no gradient was applied: all {told['skipped']} samples were skipped; see events.jsonl")
    if told["evaluation_error"]:
        return Ending(1, f"the last evaluation failed: {told['evaluation_error']}; see logs/eval.log")
    return ending


def summarise(recipe: Recipe, run_dir: Path, ending: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a run, as `--json` prints it."""
    scores = ending.get("scores", {})
    lag = {k: v for k, v in ending.get("lag", {}).items() if k != "histogram"}
    return {
        "recipe": recipe.name,
        "rule": recipe.rule.name,
        "outcome": str(ending.get("event", "run_failed")).removeprefix("run_"),
        "interrupted": ending.get("event") == "run_interrupted",
        "workers": recipe.run.workers,
        "servers": recipe.run.servers,
        "epochs": recipe.train.epochs,
        "epochs_completed": ending.get("epochs", 0),
        "samples": ending.get("samples", 0),
        "torn": ending.get("torn", 0),
        "skipped": ending.get("skipped", 0),
        "reissued_batches": ending.get("reissued", 0),
        "updates": ending.get("updates", []),
        "test_accuracy": scores.get("test_accuracy") if ending.get("scores_are_final") else None,
        "last_test_accuracy": scores.get("test_accuracy"),
        "train_loss": ending.get("train_loss"),
        "lag": lag or {"mean": 0.0, "p50": 0, "p99": 0, "max": 0},
        "seconds": ending.get("seconds", 0.0),
        "run_dir": os.fspath(run_dir),
        "model": next((name for name in MODEL_FILES if (run_dir / name).exists()), None),
    }
