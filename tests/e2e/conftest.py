from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from e2e_job import Job

_WITHOUT_TORCH = '''
"""As if torch, torchvision and scikit-learn were not installed: no path has them."""
import importlib.machinery

_find_spec = importlib.machinery.PathFinder.find_spec


def _find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in ("torch", "torchvision", "sklearn") else _find_spec(name, path, target)


importlib.machinery.PathFinder.find_spec = staticmethod(_find_others)
'''


@pytest.fixture(scope="module")
def make_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Job]]:
    """Makes jobs that live as long as the tests of a module."""
    with ExitStack() as jobs:
        yield lambda: jobs.enter_context(closing(Job(tmp_path_factory.mktemp("job"))))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """The processes of this test; afterwards none is left, nor a port, nor shared memory."""
    with closing(Job(tmp_path)) as job:
        yield job


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which torch, torchvision and scikit-learn cannot be imported."""
    folder = tmp_path_factory.mktemp("without-torch")
    (folder / "sitecustomize.py").write_text(_WITHOUT_TORCH)
    return {"PYTHONPATH": str(folder)}
