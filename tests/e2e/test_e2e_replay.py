"""A live run, computed again from its records to the same bits; and what replay says when it cannot be."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from safetensors.numpy import load_file

from zasgd.app.errors import explain
from zasgd.app.replay import replay
from zasgd.core.replay import ReplayError
from zasgd.net.record import FORMAT, RecordError, read_rows, shard_file

UPDATES = ["--set", "train.epochs=3", "--set", "schedule.warmup_epochs=1"]  # 243 updates


def zasgd(*arguments: str, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zasgd", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def trained(folder: Path, rule: str, *more: str) -> Path:
    run = zasgd(
        "train", "digits", "--workers", "3", "--servers", "2", "--run-dir", str(folder),
        "--set", f"rule.name={rule}", *UPDATES, *more,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "dc", "dc-asgd-a")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def rewritten(folder: Path, shard: int, change: Any) -> None:
    """Let `change(rows)` edit the rows of one record in place."""
    path = shard_file(folder / "records", shard)
    rows = list(read_rows(path))
    change(rows)
    path.write_bytes(msgpack.packb(FORMAT) + b"".join(msgpack.packb(row) for row in rows))


def facts(folder: Path) -> dict[str, Any]:
    done = zasgd("replay", str(folder), "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_two_hundred_updates_by_three_workers_on_two_shards_are_bit_equal(run: Path) -> None:
    found = facts(run)
    assert found["bit_equal"] and found["updates"] == [243, 243] and found["gradients_computed"] == 243
    lags = [row[6] for row in read_rows(shard_file(run / "records", 0)) if row[0] == "apply"]
    assert max(lags) >= 2, "nothing was late, so nothing was compensated"


def test_plain_asgd_too_and_the_digests_are_those_of_the_model_that_was_written(tmp_path: Path) -> None:
    found = facts(trained(tmp_path / "asgd", "asgd"))
    assert found["bit_equal"] and found["updates"] == [243, 243]
    assert all(np.isfinite(tensor).all() for tensor in load_file(tmp_path / "asgd" / "model.safetensors").values())


def test_with_recorded_pushes_nothing_is_computed(tmp_path: Path) -> None:
    found = facts(trained(tmp_path / "recorded", "dana+ga", "--set", "optimizer.momentum=0.9", "--record-pushes"))
    assert found["bit_equal"] and found["gradients_computed"] == 0 and found["pushes"] == 486


def test_a_weight_that_was_another_is_found_at_its_row(copy: Path) -> None:
    def change(rows: list[list[Any]]) -> None:
        at = [i for i, row in enumerate(rows) if row[0] == "apply"][100]
        rows[at][9] = 0.5

    rewritten(copy, 1, change)
    done = zasgd("replay", str(copy))
    assert done.returncode == 1 and "shard 1, row " in done.stderr and "weight is 1.0 where" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_two_pushes_in_another_order_lead_to_other_parameters(copy: Path) -> None:
    def change(rows: list[list[Any]]) -> None:
        pushes = [i for i, row in enumerate(rows) if row[0] == "apply"]
        first, second = next((i, j) for i, j in itertools.pairwise(pushes) if rows[i][3] != rows[j][3] and j == i + 1)
        rows[first], rows[second] = rows[second], rows[first]

    rewritten(copy, 0, change)
    with pytest.raises(ReplayError, match="shard 0, row"):
        replay(copy, 1, json_output=True)


def test_a_record_without_an_end_is_said_to_be_one(copy: Path) -> None:
    rewritten(copy, 0, lambda rows: rows.pop())
    with pytest.raises(ReplayError, match="no end"):
        replay(copy, 1, json_output=True)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: shutil.rmtree(f / "records"), "no shard of this run has left a record"),
        (lambda f: shard_file(f / "records", 0).write_bytes(b"garbage"), "not the record of a shard"),
        (lambda f: (f / "recipe.toml").unlink(), "holds no recipe.toml"),
        (lambda f: shard_file(f / "records", 0).unlink(), "shard-0.record"),
    ],
    ids=["no records", "garbage", "no recipe", "one shard missing"],
)
def test_a_folder_that_cannot_be_replayed_is_refused_in_one_line(copy: Path, damage: Any, says: str) -> None:
    damage(copy)
    with pytest.raises(RecordError, match=says) as refused:
        replay(copy, 1, json_output=True)
    told = explain(refused.value)
    assert told is not None and told[1] == 2 and "\n" not in told[0]
