"""`zasgd clean`: what a crash left goes, what a process uses stays, and a person is told which."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zasgd.app.clean import clean
from zasgd.core.region import RegionPlan
from zasgd.net.arena import Arena

PLAN = RegionPlan(num_params=200_000)
CRASH = """
import os, sys
from zasgd.core.region import RegionPlan
from zasgd.net.arena import Arena
region = Arena().create(sys.argv[1], RegionPlan(200_000))
os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ZASGD_SHM_DIR", str(tmp_path))
    return tmp_path


def crash(name: str) -> None:
    assert subprocess.run([sys.executable, "-c", CRASH, name], timeout=60).returncode == -9


def test_what_a_crash_left_is_removed_and_what_is_used_stays(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    crash("dead-1")
    with Arena() as arena:
        arena.create("a11-1", PLAN)
        clean(json_output=False)
        assert capsys.readouterr().out.splitlines() == ["removed dead-1 (1.5 MiB)", "in use: a11-1 (1.5 MiB)"]
        assert [path.name for path in folder.iterdir()] == ["zasgd-a11-1"]


def test_the_same_as_json(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    crash("dead-1")
    with Arena() as arena:
        arena.create("a11-1", PLAN)
        clean(json_output=True)
    assert json.loads(capsys.readouterr().out) == {
        "folder": str(folder),
        "removed": [{"name": "dead-1", "bytes": PLAN.num_bytes}],
        "in_use": [{"name": "a11-1", "bytes": PLAN.num_bytes}],
    }


@pytest.mark.parametrize("missing", [False, True])
def test_nothing_to_do_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, missing: bool
) -> None:
    if missing:
        folder = folder / "absent"
        monkeypatch.setenv("ZASGD_SHM_DIR", str(folder))
    clean(json_output=False)
    assert capsys.readouterr().out == f"nothing to remove in {folder}\n"
