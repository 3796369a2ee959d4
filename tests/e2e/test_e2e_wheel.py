"""The wheel: what a stranger installs works in any folder, recipes included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from e2e_job import Job

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the installed wheel."""
    pytest.importorskip("build")
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("installed")
    _run("build", "--wheel", "--no-isolation", "--outdir", wheels, ROOT)
    (wheel,) = wheels.glob("zasgd-*.whl")
    _run("pip", "install", "--no-deps", "--no-index", "--no-compile", "--target", target, wheel)
    return target


def _run(module: str, *arguments: str | Path) -> None:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_installed_recipes_are_listed_and_train(job: Job, installed: Path) -> None:
    env = {"PYTHONPATH": str(installed)}
    assert job.run("recipes", "--json", env=env).result().keys() >= {"digits", "fashion_mnist"}
    command = job.train("digits", "--set", "train.epochs=1", env=env)
    assert command.ends() == 0, command
    assert command.result()["samples"] == 1297
    assert str(ROOT) not in command.stderr
    where = [sys.executable, "-c", "import zasgd; print(zasgd.__file__)"]
    found = subprocess.run(where, env={"PYTHONPATH": str(installed)}, cwd=job.folder, capture_output=True, text=True)
    assert found.stdout.strip() == str(installed / "zasgd" / "__init__.py")
