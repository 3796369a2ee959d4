"""`zasgd compare`: a grid that is run cell by cell, kept, gone on with, and shown."""

from __future__ import annotations

import csv
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zasgd.app import compare, figures
from zasgd.app.grid import Cell, Grid, GridError, Results, Row
from zasgd.app.simulate import Point, Scene
from zasgd.app.variants import parse_variant, parse_variants
from zasgd.core.rules import RuleError
from zasgd.train.recipe import RecipeError

Command = Callable[..., Any]

TINY = """
model = { factory = "mlp", args = { inputs = 64, hidden = [16], outputs = 10 } }
data = { factory = "digits", args = { train_limit = 128, test_limit = 100 } }
rule = { name = "dc-asgd-a", lam = 3.0 }
optimizer = { lr = 0.1, momentum = 0.9, nesterov = true }
train = { epochs = 2, batch_size = 16 }
run = { servers = 2 }
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A recipe of 16 batches."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY, encoding="utf-8")
    return str(path)


# ---- rules as they are written ---------------------------------------------------------------------------


def test_a_rule_may_carry_changes_to_the_recipe_in_brackets(tiny: str) -> None:
    recipe = parse_variant("asgd[ momentum=0.5  lr=0.02 train.epochs=7 max_lag=8]").load(tiny)
    assert (recipe.rule.name, recipe.rule.max_lag) == ("asgd", 8)
    assert (recipe.optimizer.momentum, recipe.optimizer.lr, recipe.train.epochs) == (0.5, 0.02, 7)


def test_commas_inside_brackets_do_not_part_rules() -> None:
    found = parse_variants("asgd, delta[schedule.milestones=[0.5,0.7] lr=1] ,sync")
    assert [v.text for v in found] == ["asgd", "delta[schedule.milestones=[0.5,0.7] lr=1]", "sync"]
    assert found[1].overrides == ("schedule.milestones=[0.5,0.7]", "optimizer.lr=1")


def test_the_lambda_of_the_recipes_rule_is_not_carried_over_to_another(tiny: str) -> None:
    assert parse_variant("dc-asgd-a").load(tiny).rule_spec().lam == 3.0
    assert parse_variant("dc-asgd-c").load(tiny).rule_spec().lam == 0.04
    assert parse_variant("dc-asgd-c").load(tiny, ["rule.lam=0.1"]).rule_spec().lam == 0.1
    assert parse_variant("dc-asgd-c[lam=0.2]").load(tiny, ["rule.lam=0.1"]).rule_spec().lam == 0.2


def test_a_look_ahead_takes_the_place_of_nesterov(tiny: str) -> None:
    assert parse_variant("dana").load(tiny).optimizer.nesterov is False
    assert parse_variant("gap-aware").load(tiny).optimizer.nesterov is True
    with pytest.raises(RecipeError, match="nesterov"):
        parse_variant("dana[nesterov=true]").load(tiny)


def test_sequential_and_sync_are_short_for_asgd(tiny: str) -> None:
    assert parse_variant("sequential").num_workers == 1
    sync = parse_variant("sync[quorum=3]").load(tiny)
    assert (sync.rule.name, sync.rule.mode, sync.rule.quorum) == ("asgd", "sync", 3)


def test_the_seed_of_a_cell_is_that_of_the_recipe_unless_it_is_set(tiny: str) -> None:
    assert parse_variant("asgd").load(tiny, [], 5).train.seed == 5
    assert parse_variant("asgd").load(tiny, ["train.seed=7"], 5).train.seed == 7


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dcasgd", "is none of asgd"),
        ("asgd[", "should look like"),
        ("asgd[lr=1]]", "should look like"),
        ("asgd]lr=1[", "should look like"),
        ("asgd[lr]", "should look like key=value"),
        ("asgd[momentun=0.9]", "the nearest is momentum"),
        ("asgd,asgd", "named twice"),
        (" , ", "no rule is given"),
    ],
)
def test_a_rule_that_cannot_be_read_is_refused_with_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(RuleError, match=says):
        parse_variants(text)


@pytest.mark.parametrize("text", ["", "4,", "0,4", "4,1", "four", "4,4", "-1"])
def test_numbers_of_workers_are_rising(text: str) -> None:
    with pytest.raises(GridError, match="--workers"):
        compare.parse_counts(text)


# ---- cells and their folder ------------------------------------------------------------------------------


def grid(tiny: str, rules: str = "sequential,asgd,dana", seeds: int = 2, **more: Any) -> Grid:
    return Grid(tiny, (), tuple(parse_variants(rules)), (2, 4), seeds, Scene(0), **more)


def row(cell: Cell, error: float | None = 5.0, **more: Any) -> Row:
    figures = {
        "test_error": error, "train_loss": 0.1, "updates": 16, "samples": 256, "virtual_seconds": 4.0, "speedup": 2.0,
        "lag_mean": 1.0, "lag_p99": 3, "lag_max": 3, "gap_rmse": 1e-3, "dropped": 0, "diverged": False,
        "wall_seconds": 0.1,
    }  # fmt: skip
    return Row(**{**cell._asdict(), **figures, **more})


CURVE = [Point(1, 2.0, 0.5, 9.0), Point(2, 4.0, 0.1, 5.0)]


def test_the_sequential_rule_has_one_worker_whatever_is_asked_for(tiny: str) -> None:
    cells = grid(tiny, seeds=1).cells()
    assert [(c.rule, c.workers) for c in cells] == [
        ("sequential", 1), ("asgd", 2), ("asgd", 4), ("dana", 2), ("dana", 4)
    ]  # fmt: skip


def test_finished_cells_are_on_disk_and_are_not_missing_any_more(tmp_path: Path, tiny: str) -> None:
    cells = grid(tiny).cells()
    first = Results(tmp_path / "out", grid(tiny))
    first.add(row(cells[0]), CURVE)
    first.add(row(cells[1], None), [])
    again = Results(tmp_path / "out", grid(tiny))
    assert again.rows == first.rows
    assert again.missing(cells) == cells[2:]
    assert again.curves() == {cells[0]: CURVE}


def test_more_seeds_and_rules_go_on_in_the_same_folder(tmp_path: Path, tiny: str) -> None:
    Results(tmp_path, grid(tiny, "asgd", 1)).add(row(Cell("asgd", 2, 0)), [])
    more = grid(tiny, "asgd,dana", 2)
    assert Cell("asgd", 2, 0) not in Results(tmp_path, more).missing(more.cells())


def test_a_line_that_was_broken_off_is_a_missing_cell(tmp_path: Path, tiny: str) -> None:
    cells = grid(tiny).cells()
    results = Results(tmp_path, grid(tiny))
    results.add(row(cells[0]), CURVE)
    results.add(row(cells[1]), CURVE)
    path = tmp_path / "results.csv"
    path.write_bytes(path.read_bytes()[:-9])
    again = Results(tmp_path, grid(tiny))
    assert again.missing(cells) == cells[1:]
    assert set(again.curves()) == {cells[0]}, "a curve without its result is not shown"
    again.add(row(cells[1]), CURVE)
    assert Results(tmp_path, grid(tiny)).curves()[cells[1]] == CURVE


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sets": ("train.epochs=3",)}, "recipe.train.epochs was 2 and is 3"),
        ({"scene": Scene(0, speeds="heterogeneous")}, "speeds was"),
        ({"scene": Scene(0, network="5,1")}, "network was"),
        ({"scene": Scene(0, step_s=0.1)}, "step_ms was 500.0 and is 100.0"),
        ({"curve": False}, "curve was true and is false"),
    ],
)
def test_a_folder_of_other_settings_is_refused(tmp_path: Path, tiny: str, change: dict[str, Any], says: str) -> None:
    Results(tmp_path, grid(tiny))
    with pytest.raises(GridError, match=says):
        Results(tmp_path, replace(grid(tiny), **change))


def test_a_trace_that_was_edited_is_another_setting(tmp_path: Path, tiny: str) -> None:
    trace = tmp_path / "speeds.csv"
    trace.write_text("0,0.5\n")
    before = replace(grid(tiny), scene=Scene(0, speeds=str(trace))).settings()
    trace.write_text("0,0.6\n")
    assert replace(grid(tiny), scene=Scene(0, speeds=str(trace))).settings() != before


def test_a_folder_with_results_of_something_else_is_left_alone(tmp_path: Path, tiny: str) -> None:
    (tmp_path / "results.csv").write_text("rule,loss\n")
    with pytest.raises(GridError, match="something else"):
        Results(tmp_path, grid(tiny))
    assert (tmp_path / "results.csv").read_text() == "rule,loss\n"


# ---- the table and the picture ---------------------------------------------------------------------------


def test_a_cell_shows_mean_and_spread_and_the_loss_beside_it() -> None:
    rows = [row(Cell("asgd", 2, 0), 4.0, train_loss=0.1), row(Cell("asgd", 2, 1), 5.0, train_loss=0.3)]
    assert "| asgd | 4.50 (4.00-5.00); 0.2 |" in figures.table(rows, ["asgd"], [])


def test_what_diverged_fails_and_what_is_bad_only_beside_a_bad_best_does_not() -> None:
    best = [row(Cell("sequential", 1, 0), 2.0)]
    rows = [
        *best,
        row(Cell("a", 4, 0), 21.0),
        row(Cell("b", 4, 0), 5.0, diverged=True),
        row(Cell("c", 4, 0), 5.0, train_loss=float("nan")),
        row(Cell("d", 4, 0), 19.0),
        row(Cell("e", 4, 0), 90.0),
        row(Cell("e", 4, 1), 3.0),
    ]
    text = figures.table(rows, list("abcde"), [])
    told = {line[2]: line for line in text.splitlines() if line.startswith("| ")}
    assert all("fails |" in told[rule] for rule in "abc")
    assert "19.00" in told["d"]
    assert "3.00; 0.1, fails 1 of 2" in told["e"]
    hard = [row(Cell("sequential", 1, 0), 30.0), row(Cell("a", 4, 0), 60.0)]
    assert "60.00" in figures.table(hard, ["a"], [])


def test_the_picture_is_drawn_whatever_is_there(tmp_path: Path) -> None:
    rows = [row(Cell(rule, n, 0), 5.0 * n) for rule in ("asgd", "dana") for n in (1, 4)]
    curves = {r.cell: CURVE for r in rows}
    for i, (some, lines) in enumerate([(rows, curves), (rows, {}), ([], {}), ([row(Cell("asgd", 1, 0), None)], {})]):
        path = tmp_path / f"{i}.png"
        assert figures.plot(some, lines, ["asgd", "dana"], path)
        assert path.read_bytes().startswith(b"\x89PNG")


# ---- whole comparisons -----------------------------------------------------------------------------------


def test_a_comparison_runs_its_cells_and_then_only_what_is_missing(tmp_path: Path, tiny: str, zasgd: Command) -> None:
    out = tmp_path / "out"
    command = [
        "compare",
        tiny,
        "--rules",
        "sequential,asgd[lr=0.01]",
        "--workers",
        "2",
        "--out",
        str(out),
        "--jobs",
        "1",
    ]
    code, told, err = zasgd(*command, "--seeds", "1")
    assert code == 0, err
    assert (out / "table.md").read_text() == told[:-1] and "| asgd[lr=0.01] |" in told
    assert (out / "plot.png").exists()
    with (out / "results.csv").open() as file:
        first = list(csv.DictReader(file))
    assert [(r["rule"], r["workers"], r["updates"]) for r in first] == [
        ("sequential", "1", "16"),
        ("asgd[lr=0.01]", "2", "16"),
    ]
    code, told, err = zasgd(*command, "--seeds", "2", "--json")
    rows = json.loads(told)
    assert code == 0 and len(rows) == 4
    assert [r["seed"] for r in rows] == [0, 0, 1, 1]
    assert err.count("seed 0") == 0 and err.count("seed 1") == 2, "only the second seed was run"
    assert rows[0]["wall_seconds"] == float(first[0]["wall_seconds"])


def test_an_interrupt_keeps_what_is_finished_and_leaves_no_process(tmp_path: Path, tiny: str) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "zasgd", "compare", tiny, "--rules", "asgd", "--workers", "2", "--seeds", "500"]
    began = subprocess.Popen(
        [*command, "--out", str(out), "--jobs", "1"], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not (out / "results.csv").exists() and time.monotonic() < deadline and began.poll() is None:
        select.select([], [], [], 0.05)
    began.send_signal(signal.SIGINT)
    _, err = began.communicate(timeout=60)
    assert began.returncode == 130 and "Traceback" not in err, err
    with (out / "results.csv").open() as file:
        assert 1 <= len(list(csv.DictReader(file))) < 500
    while group_lives(began.pid) and time.monotonic() < deadline:
        select.select([], [], [], 0.05)
    assert not group_lives(began.pid)


def group_lives(group: int) -> bool:
    """Whether a process of that group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--rules", "asgd,dcasgd"), "'dcasgd' is none of asgd"),
        (("--rules", "asgd[mode=buffer]"), "quorum"),
        (("--rules", "asgd", "--workers", "0"), "--workers"),
        (("--rules", "asgd", "--speeds", "fast"), "fast"),
        (("--rules", "asgd", "--set", "train.epoch=3"), "train.epochs"),
    ],
)
def test_bad_input_is_one_line_and_exit_2_and_makes_no_folder(
    tmp_path: Path, tiny: str, zasgd: Command, arguments: tuple[str, ...], says: str
) -> None:
    code, _, err = zasgd("compare", tiny, "--out", str(tmp_path / "out"), *arguments)
    assert code == 2 and says in err and err.count("\n") == 1, err
    assert not (tmp_path / "out").exists()


def test_an_out_that_is_a_file_is_one_line(tmp_path: Path, tiny: str, zasgd: Command) -> None:
    (tmp_path / "out").touch()
    code, _, err = zasgd("compare", tiny, "--rules", "asgd", "--out", str(tmp_path / "out"))
    assert code == 2 and err.count("\n") == 1 and "cannot be made a folder" in err
