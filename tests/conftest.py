"""Golden files, small parts and one hypothesis profile for the whole suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from zasgd.core import wire

DATA = Path(__file__).parent / "data"

# The same examples in every run and no time limit per example: the machines that run this are shared.
settings.register_profile("zasgd", derandomize=True, deadline=None, database=None, print_blob=True)
settings.load_profile("zasgd")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-golden",
        action="store_true",
        help="write what the code produces today into tests/data instead of comparing with it",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, dict[str, str]], None]:
    """Compare named lines with tests/data/NAME; only `pytest --rewrite-golden` changes that file."""

    def check(name: str, lines: dict[str, str]) -> None:
        path = DATA / name
        text = "".join(f"{key} {value}\n" for key, value in lines.items())
        if request.config.getoption("--rewrite-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        expected = dict(line.split(" ", 1) for line in path.read_text().splitlines())
        assert lines.keys() == expected.keys(), f"{path}: entries came or went"
        for key, value in lines.items():
            assert value == expected[key], f"{path}: {key} changed"

    return check


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve elements a part, compressed or not: slices of 32 elements travel in 12, 12 and 8."""
    for module in ("transfer", "parameters", "shard"):
        monkeypatch.setattr(f"zasgd.core.{module}.MAX_ELEMENTS", 12)
    cut = wire.split
    monkeypatch.setattr(wire, "split", lambda flat, limit=wire.MAX_PART_BYTES: cut(flat, min(limit, 48)))
