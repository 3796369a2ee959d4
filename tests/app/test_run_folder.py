"""A run folder belongs to one run, and a run is judged by what it has to show."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from zasgd.app.display import Display
from zasgd.app.errors import explain
from zasgd.app.local import conclude, summarise
from zasgd.app.serve import EVENTS, RunFolderError, claim, finish
from zasgd.launch.supervisor import Ending
from zasgd.observe.events import EventLog
from zasgd.train.recipe import load_recipe

RECIPE = load_recipe("digits")
FIGURES: dict[str, Any] = {
    "samples": 100, "torn": 0, "skipped": 0, "reissued": 0, "epochs": 30, "updates": [5, 5], "train_loss": 0.1,
    "lag": {"mean": 0.0, "p50": 0, "p99": 0, "max": 0, "histogram": {"0": 10}}, "seconds": 1.0,
    "scores": {"test_accuracy": 0.97}, "scores_are_final": True, "evaluation_error": "",
}  # fmt: skip


def a_run(folder: Path, event: str = "run_completed", **figures: Any) -> Path:
    claim(folder)
    with EventLog(folder / EVENTS) as events:
        events.record(0.0, "run_opened", workers=2)
        events.record(1.0, event, **{**FIGURES, **figures})
    return folder


def test_a_folder_is_claimed_once(tmp_path: Path) -> None:
    claim(tmp_path / "new" / "run")
    with pytest.raises(RunFolderError, match="holds another run; choose another folder"):
        claim(tmp_path / "new" / "run")
    claim(tmp_path)  # an empty folder is as good as none


@pytest.mark.parametrize(("where", "why"), [("a file", "is no folder"), ("a file/below", "cannot be written")])
def test_a_path_that_is_no_folder_is_one_line_and_exit_2(tmp_path: Path, where: str, why: str) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(RunFolderError, match=why) as caught:
        claim(tmp_path / where)
    told = explain(caught.value)
    assert told is not None and told[1] == 2 and "\n" not in told[0]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, Path("/dev/full").open("w") as full:
        full.write("x")
        full.flush()
    assert explain(caught.value) == ("No space left on device", 1)
    assert explain(ValueError("a bug of ours")) is None


def test_a_run_that_never_began_gets_no_empty_report(tmp_path: Path) -> None:
    claim(tmp_path / "run")
    assert finish(tmp_path / "run") == {}
    assert not (tmp_path / "run" / "report.png").exists()


@pytest.mark.parametrize(
    ("figures", "code", "says"),
    [
        ({}, 0, ""),
        ({"samples": 0, "skipped": 100}, 1, "no gradient was applied: all 100 samples were skipped"),
        ({"evaluation_error": "RuntimeError: broken"}, 1, "the last evaluation failed: RuntimeError: broken"),
    ],
)
def test_what_has_nothing_to_show_did_not_succeed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], figures: dict[str, Any], code: int, says: str
) -> None:
    folder = a_run(tmp_path / "run", **figures)
    assert conclude(RECIPE, folder, Ending(0), json_output=True) == code
    told = capsys.readouterr()
    assert says in told.err
    assert f'"outcome": "{"failed" if code else "completed"}"' in told.out


def test_the_score_of_an_earlier_epoch_is_never_told_as_the_final_one(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", scores_are_final=False)
    summary = summarise(RECIPE, folder, finish(folder))
    assert (summary["test_accuracy"], summary["last_test_accuracy"]) == (None, 0.97)


def test_brackets_in_a_path_are_not_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path / "lr[red]0.1[/nonsense]")
    out = io.StringIO()
    Display.print_summary(Console(file=out, width=200), summarise(RECIPE, folder, finish(folder)))
    assert "lr[red]0.1[/nonsense]" in out.getvalue()
    assert conclude(RECIPE, folder, Ending(3, "it [red]failed[/x]"), json_output=False) == 3
    assert "it [red]failed[/x]" in capsys.readouterr().err
