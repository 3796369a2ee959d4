"""A whole run on this machine: `zasgd train`."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from zasgd.app import serve
from zasgd.app.display import Display
from zasgd.launch.children import RUN_VARIABLE, Child, spawn_command
from zasgd.launch.forkserver import TorchForkserver
from zasgd.launch.ports import free_port_block
from zasgd.launch.supervisor import Ending, Supervisor
from zasgd.net.sockets import DEFAULT_PORT
from zasgd.train import roles
from zasgd.train.recipe import Recipe

INTERRUPTED = 130
MODEL_FILES = ("model.safetensors", "params.npz")
"""What the evaluator writes; what the broker writes when there is none, or not yet."""
PORTS_BEYOND_SERVERS = 2
"""Control and relay; each server has one more."""


class LocalRoles:
    """How each role of one local run is started."""

    def __init__(self, recipe: Recipe, run_dir: Path, run: str, port: int, device: str, forkserver: TorchForkserver):
        self._recipe = recipe
        self._run_dir = run_dir
        self._env = {RUN_VARIABLE: run}
        self._port = port
        self._device = device
        self._forkserver = forkserver

    def broker(self) -> Child:
        recipe = str(self._run_dir / "recipe.toml")
        servers = str(self._recipe.run.servers)
        options = ["--servers", servers, "--bind", self._address, "--run-dir", str(self._run_dir), "--supervised"]
        return self._command("broker", "broker", recipe, *options)

    def server(self, number: int) -> Child:
        bind = f"127.0.0.1:{self._port + PORTS_BEYOND_SERVERS + number}"
        return self._command(f"server-{number}", "server", "--broker", self._address, "--bind", bind)

    def evaluator(self) -> Child:
        return self._fork("eval", roles.run_evaluator, self._options("eval", 0), str(self._run_dir))

    def worker(self, slot: int) -> Child:
        return self._fork(f"worker-{slot}", roles.run_worker, self._options(f"w{slot}", slot))

    @property
    def _address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def _options(self, name: str, slot: int) -> roles.RoleOptions:
        return roles.RoleOptions(broker=self._address, name=name, device=self._device, slot=slot)

    def _command(self, name: str, *arguments: str) -> Child:
        return spawn_command(name, [sys.executable, "-m", "zasgd", *arguments], self._log(name), self._env)

    def _fork(self, name: str, target: Any, *arguments: Any) -> Child:
        return self._forkserver.fork(target, arguments, name, self._log(name))

    def _log(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{name}.log"


def supervisor(recipe: Recipe, run_dir: Path, port: int | None, device: str) -> Supervisor:
    """Everything ready to run; nothing is started yet. Without `port` the first free block is taken."""
    run = secrets.token_hex(8)
    serve.prepare(run_dir, recipe)
    base = port if port is not None else free_port_block(PORTS_BEYOND_SERVERS + recipe.run.servers, DEFAULT_PORT)
    forkserver = TorchForkserver({RUN_VARIABLE: run}, run_dir / "logs" / "torch.log")
    local = LocalRoles(recipe, run_dir.absolute(), run, base, device, forkserver)
    return Supervisor(f"127.0.0.1:{base}", run, local, recipe.run.workers, recipe.run.servers, forkserver)


def train(recipe: Recipe, run_dir: Path, *, port: int | None, device: str, json_output: bool) -> int:
    """Run a recipe to its end with a live display; prints the summary, returns the exit code."""
    job = supervisor(recipe, run_dir, port, device)
    with Display(recipe, run_dir) as display:
        job.watch.tick, job.watch.say = display.tick, display.say
        ending = job.run()
    return conclude(recipe, run_dir, ending, json_output=json_output)


def conclude(recipe: Recipe, run_dir: Path, ending: Ending, *, json_output: bool) -> int:
    """Write metrics and report, tell the user how it went."""
    with contextlib.suppress(FileNotFoundError):
        serve.finish(run_dir)
    summary = summarise(recipe, run_dir, serve.ending_of(run_dir) if (run_dir / "events.jsonl").exists() else {})
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    failed = ending.code not in (0, INTERRUPTED)
    if failed:
        where = f" (log: {ending.log})" if ending.log else ""
        err.print(f"[red]error:[/red] {ending.text}{where}", markup=True)
        err.print(f"The run folder is kept: {run_dir}")
    if json_output:
        outcome = {"outcome": "failed", "interrupted": False, "reason": ending.text} if failed else {}
        print(serve.as_json({**summary, **outcome, "exit_code": ending.code}), flush=True)
    elif not failed and summary["updates"]:
        Display.print_summary(Console(highlight=False, soft_wrap=True), summary)
    return ending.code


def summarise(recipe: Recipe, run_dir: Path, ending: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a run, as `--json` prints it."""
    lag = {k: v for k, v in ending.get("lag", {}).items() if k != "histogram"}
    return {
        "recipe": recipe.name,
        "rule": recipe.rule.name,
        "outcome": str(ending.get("event", "run_failed")).removeprefix("run_"),
        "interrupted": ending.get("event") == "run_interrupted",
        "workers": recipe.run.workers,
        "servers": recipe.run.servers,
        "epochs": recipe.train.epochs,
        "samples": ending.get("samples", 0),
        "torn": ending.get("torn", 0),
        "skipped": ending.get("skipped", 0),
        "reissued_batches": ending.get("reissued", 0),
        "updates": ending.get("updates", []),
        "test_accuracy": ending.get("scores", {}).get("test_accuracy"),
        "train_loss": ending.get("train_loss"),
        "lag": lag or {"mean": 0.0, "p50": 0, "p99": 0, "max": 0},
        "seconds": ending.get("seconds", 0.0),
        "run_dir": os.fspath(run_dir),
        "model": next((name for name in MODEL_FILES if (run_dir / name).exists()), None),
    }
