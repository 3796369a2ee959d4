"""`zasgd train` to its end: what a user gets, and what a killed worker or a bad gradient changes about it."""

from __future__ import annotations

import csv
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from e2e_counting import (
    counts,
    events_of,
    expect_complete_epochs,
    expect_each_sample_once_per_epoch,
    model_of,
    write_recipe,
)
from e2e_job import Job, Process, ports_are_free, until

from zasgd.core.ledger import num_batches, permutation
from zasgd.train.recipe import load_recipe

DIGITS, EPOCHS = 1297, 3
SUMMARY_KEYS = {
    "recipe", "rule", "workers", "servers", "epochs", "samples", "torn", "skipped", "updates", "test_accuracy",
    "train_loss", "lag", "seconds", "run_dir",
}  # fmt: skip


# ---- digits, as the README says --------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(make_job: Callable[[], Job]) -> tuple[Job, Process, Path]:
    """A finished run: (job, the command, its folder)."""
    job = make_job()
    command = job.start("train", "digits", "--workers", "3", "--servers", "2", "--set", "train.epochs=3", "--json")
    command.ends()
    return job, command, job.folder / command.result()["run_dir"]


def test_train_digits_ends_well_with_a_summary_on_its_last_line(digits: tuple[Job, Process, Path]) -> None:
    _, command, run_dir = digits
    summary = command.result()
    assert command.ends() == 0, command
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["lag"].keys() >= {"mean", "p50", "p99", "max"}
    said = [summary[key] for key in ("recipe", "rule", "workers", "servers", "epochs", "outcome", "interrupted")]
    assert said == ["digits", "dc-asgd-a", 3, 2, EPOCHS, "completed", False]
    assert summary["test_accuracy"] > 0.6
    assert summary["train_loss"] < 2.3  # the loss of guessing
    assert run_dir.parent == digits[0].folder / "runs"


def test_each_sample_is_used_once_per_epoch(digits: tuple[Job, Process, Path]) -> None:
    _, command, run_dir = digits
    summary = command.result()
    assert (summary["samples"], summary["torn"], summary["skipped"]) == (EPOCHS * DIGITS, 0, 0)
    assert summary["updates"] == [EPOCHS * num_batches(DIGITS, 16)] * 2
    expect_complete_epochs(run_dir, EPOCHS, DIGITS)


def test_the_run_folder_holds_recipe_figures_and_a_log_per_process(digits: tuple[Job, Process, Path]) -> None:
    _, command, run_dir = digits
    summary = command.result()
    recipe = load_recipe(str(run_dir / "recipe.toml"))
    assert (recipe.train.epochs, recipe.run.workers, recipe.name) == (EPOCHS, 3, "digits")
    with (run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float([row["test_accuracy"] for row in rows if row["test_accuracy"]][-1]) == summary["test_accuracy"]
    assert (run_dir / "report.png").read_bytes().startswith(b"\x89PNG")
    assert {log.stem for log in (run_dir / "logs").iterdir()} == {
        "broker", "eval", "server-0", "server-1", "torch", "worker-0", "worker-1", "worker-2"
    }  # fmt: skip


def test_the_model_loads_into_plain_torch_and_is_as_good_as_reported(digits: tuple[Job, Process, Path]) -> None:
    _, command, run_dir = digits
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    from zasgd.train.datasets import digits as digits_data

    relu, linear = torch.nn.ReLU, torch.nn.Linear
    plain = torch.nn.Sequential(linear(64, 64), relu(), linear(64, 64), relu(), linear(64, 10))
    plain.load_state_dict(load_file(run_dir / "model.safetensors"), strict=True)
    inputs, labels = digits_data()[1].tensors
    accuracy = float((plain.eval()(inputs).argmax(1) == labels).float().mean())
    assert accuracy == pytest.approx(command.result()["test_accuracy"], abs=1e-9 + 1.5 / len(labels))


def test_nothing_of_the_run_is_left(digits: tuple[Job, Process, Path]) -> None:
    job, _, run_dir = digits
    job.expect_nothing_left()
    found = re.search(r"127\.0\.0\.1:(\d+)", (run_dir / "logs" / "broker.log").read_text())
    assert found is not None
    port = int(found[1])
    until(lambda: ports_are_free(*range(port, port + 4)), 5.0, f"ports {port} to {port + 3} are free")


# ---- a killed worker, a bad gradient ---------------------------------------------------------------


def test_a_killed_worker_is_restarted_and_the_others_neither_stop_nor_restart(job: Job) -> None:
    recipe = write_recipe(job.folder, samples=2000, batch=20, epochs=2, min_step_s=0.05, workers=3, servers=2)
    command = job.train(recipe)
    names = ("w0", "w1", "w2")
    before = {name: job.worker(name, steps=5) for name in names}
    os.kill(before["w1"]["pid"], signal.SIGKILL)

    again = job.until(lambda: _other_process(job, "w1", before["w1"]["pid"]), "w1 steps in another process")
    assert again["id"] == before["w1"]["id"]
    for name in ("w0", "w2"):
        after = job.worker(name, steps=before[name]["steps"] + 5)
        assert (after["pid"], after["incarnation"]) == (before[name]["pid"], before[name]["incarnation"])

    assert command.ends() == 0, command
    summary = command.result()
    assert (summary["samples"], summary["skipped"]) == (4000, 0)
    assert "worker-1 ended with SIGKILL, restarted (1 of 3)" in command.stderr
    assert [e["name"] for e in events_of(job.run_dir, "worker_lost")] == ["w1"]
    expect_complete_epochs(job.run_dir, 2, 2000)
    expect_each_sample_once_per_epoch(model_of(job.run_dir), 2, summary["torn"])
    job.expect_nothing_left()


def _other_process(job: Job, name: str, pid: int) -> dict[str, object] | None:
    worker = job.workers().get(name)
    return worker if worker and worker["pid"] != pid and worker["steps"] >= 3 else None


def test_an_infinite_gradient_is_refused_everywhere_and_costs_no_other_sample(job: Job) -> None:
    """One sample is always bad, another one only for the worker that meets it first.

    The evaluator starts so late that the training is over: the run waits for its verdict all the same.
    """
    samples, batch, epochs, bad, bad_once = 1000, 50, 2, 17, 400
    recipe = write_recipe(
        job.folder, samples=samples, batch=batch, epochs=epochs, workers=2, servers=2,
        data="counting_recipe:ids_late_for_evaluation",
        data_args=f', bad = {bad}, bad_once = {bad_once}, mark = "{job.folder / "mark"}", '
        f'events = "{job.run_dir / "events.jsonl"}", epochs = {epochs}',
    )  # fmt: skip
    command = job.train(recipe)
    assert command.ends(40.0) == 0, command  # a run that waits in vain for an evaluator takes a minute more

    places = [np.argsort(permutation(samples, 0, epoch)) // batch for epoch in range(epochs)]
    skipped = [place == place[bad] for place in places]
    expected = sum((~s).astype(np.float32) for s in skipped)
    first, second = counts(model_of(job.run_dir))
    assert np.array_equal(first, expected)
    assert np.array_equal(second, expected)

    summary = command.result()
    assert (summary["samples"], summary["skipped"], summary["torn"]) == (1900, 100, 0)
    assert summary["updates"] == [38, 38]
    refusals = events_of(job.run_dir, "batch_refused")
    assert {e["reason"] for e in refusals} == {"nonfinite"}
    wanted = [(epoch, place[bad]) for epoch, place in enumerate(places)] * 2
    once = next((e["epoch"], e["batch"]) for e in refusals if (e["epoch"], e["batch"]) not in wanted)
    assert once[1] == places[once[0]][bad_once]
    assert sorted((e["epoch"], e["batch"]) for e in refusals) == sorted([*wanted, once])
    expect_complete_epochs(job.run_dir, epochs, samples)


def test_two_runs_that_start_at_once_do_not_fight_over_ports(job: Job) -> None:
    recipe = write_recipe(job.folder, samples=100, batch=10, epochs=1, workers=1, servers=1)
    commands = [job.start("train", recipe, "--json", "--run-dir", job.folder / f"run-{k}") for k in range(2)]
    for command in commands:
        assert command.ends() == 0, command
        assert command.result()["samples"] == 100
