from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from zasgd.launch.children import ChildSet, kill_processes_of_run
from zasgd.launch.forkserver import TorchForkserver


@pytest.fixture
def run() -> Iterator[str]:
    """A run of this test's own, of which nothing outlives the test, even a failing one."""
    run = uuid4().hex
    yield run
    kill_processes_of_run(run)


@pytest.fixture
def env(run: str) -> dict[str, str]:
    return {"ZASGD_RUN": run}


@pytest.fixture
def children(run: str) -> Iterator[ChildSet]:
    with ChildSet(run) as children:
        yield children


@pytest.fixture
def forkserver(env: dict[str, str], tmp_path: Path) -> TorchForkserver:
    """Not started yet; the ChildSet of the test that starts it stops it."""
    if importlib.util.find_spec("torch") is None:  # not importorskip: this process has no use for torch
        pytest.skip("torch is not installed")
    return TorchForkserver(env, tmp_path / "forkserver.log")
