"""What this machine has, what of it a run needs, and what is wrong."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from zasgd import __version__
from zasgd.app.advice import warning
from zasgd.app.serve import as_json
from zasgd.launch.ports import port_owner
from zasgd.net.sockets import DEFAULT_PORT
from zasgd.train.recipe import Recipe

CORE = ("pyzmq", "msgpack", "numpy", "numba", "typer", "rich", "pydantic")
EXTRA = ("torch", "torchvision", "scikit-learn", "matplotlib", "safetensors")
SMALL_SHM_BYTES = 64 * 1024 * 1024
"""What containers give /dev/shm by default."""


def run(recipe: Recipe | None = None, workers: int | None = None, *, warm: bool = False, json_output: bool) -> int:
    """Print the findings; 1 when something is wrong that a run needs, else 0.

    recipe: whether its rule bears its workers, or as many as `workers`. warm: compile the kernels of every rule.
    """
    facts = _facts()
    wrong, advice = _judge(facts)
    if recipe is not None:
        told = warning(recipe, workers or recipe.run.workers)
        advice += [told] if told else []
    if warm:
        facts["kernels"] = _warm_all()
        wrong += [f"the kernels of {rule} do not compile: {found}" for rule, found in facts["kernels"].items() if found]
    if json_output:
        print(as_json({**facts, "wrong": wrong, "advice": advice}))
    else:
        _print(facts, wrong, advice)
    return 1 if wrong else 0


def _facts() -> dict[str, Any]:
    return {
        "zasgd": __version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in (*CORE, *EXTRA)},
        "libzmq": _libzmq(),
        "cuda_devices": _cuda_devices(),
        "shm_bytes": _shm_bytes(),
        "port_owners": {port: port_owner(port) for port in range(DEFAULT_PORT, DEFAULT_PORT + 4)},
        "kernel": _kernel(),
    }


def _judge(facts: dict[str, Any]) -> tuple[list[str], list[str]]:
    wrong = [f"{name} is not installed" for name in CORE if facts["packages"][name] is None]
    if facts["kernel"] != "ok":
        wrong.append(f"the update kernel does not compile: {facts['kernel']}")
    advice = []
    if facts["packages"]["torch"] is None:
        advice.append(
            "torch is not installed: this machine can be broker or server; for workers pip install 'zasgd[train]'"
        )
    taken = {port: owner for port, owner in facts["port_owners"].items() if owner}
    advice += [f"port {port} is used by {owner}" for port, owner in taken.items()]
    if facts["shm_bytes"] is not None and facts["shm_bytes"] <= SMALL_SHM_BYTES:
        advice.append(f"/dev/shm has only {facts['shm_bytes'] >> 20} MiB")
    return wrong, advice


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _libzmq() -> str:
    import zmq

    return zmq.zmq_version()


def _cuda_devices() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _shm_bytes() -> int | None:
    return shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None


def _kernel() -> str:
    return _compiled("dc-asgd-a") or "ok"


def _warm_all() -> dict[str, str]:
    """Rule -> what kept its kernels from compiling, empty when they do."""
    from zasgd.core.rules import RULES

    return {rule: _compiled(rule) for rule in track([*RULES, "dana+ga"], "compiling", transient=True)}


def _compiled(rule: str) -> str:
    from zasgd.core.optimizer import ShardOptimizer
    from zasgd.core.rules import GroupSpec, RuleSpec, shard_groups

    spec = RuleSpec(rule)
    groups = shard_groups(spec, (GroupSpec(momentum=0.9, weight_decay=1e-4), GroupSpec(momentum=0.9)))
    try:
        ShardOptimizer(spec, groups, (), 0).warm()
    except Exception as e:  # whatever numba or LLVM raise here is the finding
        return f"{type(e).__name__}: {str(e)[:120]}"
    return ""


def _print(facts: dict[str, Any], wrong: list[str], advice: list[str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    table = Table(show_header=False)
    for key in ("zasgd", "python", "cores", "libzmq", "kernel"):
        table.add_row(key, str(facts[key]))
    for name, version in facts["packages"].items():
        table.add_row(name, version or "not installed")
    table.add_row("CUDA devices", ", ".join(facts["cuda_devices"]) or "none")
    shm = facts["shm_bytes"]
    table.add_row("shared memory", "none" if shm is None else f"{shm >> 20} MiB")
    for port, owner in facts["port_owners"].items():
        table.add_row(f"port {port}", owner or "free")
    if "kernels" in facts:
        compiled = [rule for rule, found in facts["kernels"].items() if not found]
        table.add_row("rules whose kernels compile", ", ".join(compiled))
    console.print(table)
    for line in wrong:
        console.print("wrong:", style="red", end=" ")
        console.print(line, markup=False)
    for line in advice:
        console.print("note:", style="yellow", end=" ")
        console.print(line, markup=False)
    if not wrong:
        console.print("Nothing is wrong.")
