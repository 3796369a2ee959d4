"""`zasgd bench step` and `scale`: whole runs beside their limits, small enough to test; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zasgd.app import bench
from zasgd.app.bench import BenchError
from zasgd.app.bench import crew as crews
from zasgd.app.bench.cluster import Setup, Turn
from zasgd.app.bench.limits import bare_kernel
from zasgd.core.compression import Compression
from zasgd.core.rules import RuleSpec

KEYS = [
    "path", "params", "workers", "servers", "rule", "steps_per_s", "gb_per_s", "limit_steps_per_s", "ratio",
    "breakdown_ms",
]  # fmt: skip


@pytest.fixture(autouse=True)
def short_margins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crews, "MARGIN_S", 0.1)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of shared memory, for this test alone."""
    monkeypatch.setenv("ZASGD_SHM_DIR", str(tmp_path))
    return tmp_path


def step(**changed: Any) -> None:
    options = {
        "path": "arena", "params": 4096, "workers": 2, "servers": 2, "rule": "dc-asgd-c", "seconds": 0.3, "repeats": 1,
        "write_grads": False, "compress": "none", "compress_pull": "none", "json_output": True,
    }  # fmt: skip
    bench.step(**(options | changed))


def setup(path: str, **changed: Any) -> Setup:
    return Setup(path, params=1_000_000, workers=4, servers=2, rule=RuleSpec("dc-asgd-c"), **changed)


def turn(steps_per_s: float) -> Turn:
    return Turn(steps_per_s, write_ms=5.0, apply_ms=10.0, cpu_ms={"workers": 1.0})


@pytest.mark.parametrize("path", ["arena", "direct"])
def test_a_whole_run_is_measured_beside_its_limit_and_leaves_nothing_behind(
    path: str, shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step(path=path, write_grads=True)
    found = json.loads(capsys.readouterr().out)
    assert list(found)[: len(KEYS)] == KEYS
    assert found["path"] == path
    assert found["ratio"] == pytest.approx(found["steps_per_s"] / found["limit_steps_per_s"], abs=1e-3)
    assert found["breakdown_ms"]["gradient_write"] > 0 and found["breakdown_ms"]["apply"] > 0
    assert list(shared.iterdir()) == []


@pytest.mark.slow
def test_speed_up_is_over_one_worker_whether_or_not_it_was_asked_for(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.scale("2", 20.0, 4096, 1, 20, json_output=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert list(row) == ["workers", "steps_per_s", "speedup"] and row["workers"] == 2
    assert 0 < row["steps_per_s"] < 2 * 1.5 / 0.020  # two workers asleep most of the time


def test_the_parts_of_a_step_add_up_to_it() -> None:
    found = bench.summary(setup("direct"), [turn(40.0), turn(10.0), turn(20.0)], [80.0, 40.0, 50.0])
    assert (found["steps_per_s"], found["limit_steps_per_s"], found["ratio"]) == (20.0, 50.0, 0.4)
    parts = found["breakdown_ms"]
    assert parts == {"gradient_write": 5.0, "transfer": 80.0, "apply": 10.0, "wait": 105.0}
    assert sum(parts.values()) == 1e3 * 4 / 20.0, "four workers make 20 steps a second: each takes 200 ms"
    assert found["gb_per_s"] == pytest.approx(20.0 * 8e6 / 1e9)
    assert found["spread"] == {"steps_per_s": [10.0, 40.0], "limit_steps_per_s": [40.0, 80.0]}


def test_nothing_is_transferred_in_the_arena() -> None:
    found = bench.summary(setup("arena"), [turn(20.0)], [50.0])
    assert found["breakdown_ms"] == {"gradient_write": 5.0, "transfer": 0.0, "apply": 10.0, "wait": 185.0}


def test_compressed_bytes_are_what_is_counted() -> None:
    halved = setup("direct", push=Compression("bf16"), pull=Compression("int8"))
    (whole,) = [bench.summary(setup("direct"), [turn(20.0)], [50.0])["gb_per_s"]]
    told = bench.summary(halved, [turn(20.0)], [50.0])
    assert told["gb_per_s"] == pytest.approx(whole / 8 * (2 + 1 + 4 / 256), abs=1e-3)
    assert (told["compress"], told["compress_pull"]) == ("bf16", "int8")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"path": "ether"}, "--path is one of arena, direct, relay, not 'ether'"),
        ({"path": "direct", "compress": "zip"}, "--compress is one of none, bf16"),
        ({"compress_pull": "bf16"}, "--compress-pull changes what travels"),
    ],
)
def test_what_makes_no_measurement_is_refused_in_one_line(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(BenchError, match=told) as refused:
        step(**changed)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("workers", ["", "1,,2", "0", "two", "-1"])
def test_numbers_of_workers_are_checked(workers: str) -> None:
    with pytest.raises(BenchError, match="numbers above 0 joined by commas"):
        bench.scale(workers, 1.0, 16, 1, 1, json_output=True)


def test_the_bare_kernel_is_that_of_rules_that_make_an_update_of_every_gradient(shared: Path) -> None:
    with (
        pytest.raises(BenchError, match="does not make an update of every gradient"),
        bare_kernel(16, 1, 1, RuleSpec("delta")),
    ):
        pass
    assert list(shared.iterdir()) == []
