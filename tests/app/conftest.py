"""Commands run in this process, as a user sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from zasgd.cli import main


class Told(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def zasgd(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    """Runs `zasgd ARGUMENTS...`."""

    def run(*arguments: str) -> Told:
        monkeypatch.setattr("sys.argv", ["zasgd", *arguments])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        told = capsys.readouterr()
        return Told(code, told.out, told.err)

    return run
