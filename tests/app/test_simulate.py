"""`zasgd simulate`: a run in virtual time, by the very cores of a live one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zasgd.app.simulate import Scene, Simulation, lag_facts
from zasgd.app.variants import parse_variant

Command = Callable[..., Any]

TINY = """
model = { factory = "mlp", args = { inputs = 64, hidden = [16], outputs = 10 } }
data = { factory = "digits", args = { train_limit = 256, test_limit = 100 } }
rule = { name = "asgd" }
optimizer = { lr = 0.1 }
train = { epochs = 6, batch_size = 16 }
run = { servers = 2 }
"""
BATCHES = 96


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A recipe of 96 batches of 16 for a model of 1,210 parameters."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY, encoding="utf-8")
    return str(path)


def simulated(source: str, rule: str, workers: int, *sets: str, curve: bool = False, **scene: Any) -> Simulation:
    """A run that came to its end."""
    recipe = parse_variant(rule).load(source, sets, scene.get("seed", 0))
    simulation = Simulation(recipe, Scene(workers, **scene), curve=curve)
    simulation.run()
    return simulation


# ---- what one run tells ----------------------------------------------------------------------------------


def test_the_json_has_the_promised_keys_and_every_batch_was_applied_once(tiny: str, zasgd: Command) -> None:
    code, out, err = zasgd("simulate", tiny, "--workers", "4", "--rule", "dc-asgd-a", "--curve", "--json")
    assert code == 0, err
    told = json.loads(out)
    promised = (
        "rule workers test_error train_loss updates samples virtual_seconds speedup lag gap_rmse dropped torn skipped "
        "diverged seeds speeds network churn curve"
    )
    assert list(told) == promised.split()
    assert (told["rule"], told["workers"], told["updates"]) == ("dc-asgd-a", 4, BATCHES)
    assert (told["samples"], told["dropped"], told["diverged"]) == (6 * 256, 0, False)
    assert list(told["lag"]) == ["mean", "p99", "max"]
    assert 2.5 < told["lag"]["mean"] < 3.1, "the three others push between a pull and its push"
    assert 0 < told["gap_rmse"] < 1
    assert [point["epoch"] for point in told["curve"]] == [1, 2, 3, 4, 5, 6]


def test_the_last_point_of_the_curve_is_the_result(tiny: str) -> None:
    simulation = simulated(tiny, "asgd", 4, curve=True)
    result, last = simulation.result(), simulation.points[-1]
    assert (last.train_loss, last.test_error) == (result["train_loss"], result["test_error"])
    assert last.virtual_seconds == pytest.approx(result["virtual_seconds"])
    losses = [point.train_loss for point in simulation.points]
    assert losses[-1] < losses[0]


def test_it_trains_as_well_as_the_same_recipe_live_would(tiny: str) -> None:
    """One worker, one shard, plain SGD: the simulated run is torch's own loop, bit for bit."""
    simulation = simulated(tiny, "asgd", 1, "run.servers=1", "train.epochs=2")
    assert np.array_equal(simulation.shards[0].values.params, torch_sgd(tiny))


def torch_sgd(source: str) -> np.ndarray[Any, Any]:
    """The parameters after two epochs of torch.optim.SGD over the same batches."""
    import torch

    from zasgd.core.ledger import num_batches
    from zasgd.core.messages import Grant
    from zasgd.train.trainer import Trainer

    recipe = parse_variant("asgd").load(source, ["train.epochs=2"], 0)
    trainer = Trainer(recipe)
    work = trainer.workload
    optimizer = torch.optim.SGD(work.flat.module.parameters(), recipe.optimizer.lr)
    for epoch in range(2):
        for b in range(num_batches(256, 16)):
            inputs, targets = trainer.batch(Grant(epoch, b, 16 * b, 16 * b + 16))
            optimizer.zero_grad()
            work.loss(work.flat.module(inputs), targets).backward()
            optimizer.step()
    return work.flat.params()


# ---- time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sets", [(), ("rule.push_every=4",)], ids=["each batch", "every fourth"])
@pytest.mark.parametrize("network", ["0,10", "50,0.01"], ids=["fast network", "slow network"])
def test_one_worker_is_as_fast_as_one_worker(tiny: str, network: str, sets: tuple[str, ...]) -> None:
    simulation = simulated(tiny, "asgd", 1, "train.epochs=24", *sets, network=network)
    assert simulation.result()["speedup"] == pytest.approx(1.0, abs=0.02)


def test_workers_of_equal_speed_share_the_work(tiny: str) -> None:
    assert 3.5 < simulated(tiny, "asgd", 4).result()["speedup"] <= 4.05


def test_a_round_waits_for_the_slowest_and_asynchronous_workers_do_not(tiny: str) -> None:
    long = ("data.args.train_limit=1280", "train.epochs=2")
    alone = simulated(tiny, "asgd", 8, *long, speeds="heterogeneous").result()
    together = simulated(tiny, "sync", 8, *long, speeds="heterogeneous").result()
    assert alone["speedup"] > 1.5 * together["speedup"]
    assert (alone["updates"], together["lag"]["max"]) == (160, 0)
    assert 20 <= together["updates"] <= 24, "eight pushes are one update"


def test_the_network_costs_time_and_fewer_exchanges_cost_less(tiny: str) -> None:
    slow = {"network": "250,1"}
    free = simulated(tiny, "asgd", 2, network="0,100").course.seconds
    each = simulated(tiny, "asgd", 2, **slow).course.seconds
    rare = simulated(tiny, "asgd[push_every=4]", 2, **slow).course.seconds
    assert each > 1.8 * free, "a round trip is as long as a batch"
    assert free < rare < 0.8 * each


def test_the_same_seed_gives_the_same_run_and_another_another_one(tiny: str) -> None:
    first, again, other = (simulated(tiny, "asgd", 4, seed=seed).result() for seed in (1, 1, 2))
    assert first == again
    assert first["train_loss"] != other["train_loss"]
    assert first["virtual_seconds"] != other["virtual_seconds"]


def test_initial_parameters_and_data_have_a_seed_apart_from_the_schedules(tiny: str) -> None:
    runs = [simulated(tiny, "asgd", 4, "train.seed=5", seed=seed) for seed in (1, 2)]
    assert runs[0].initial_loss == runs[1].initial_loss
    assert runs[0].course.seconds != runs[1].course.seconds
    assert runs[0].result()["seeds"] == {"train": 5, "schedule": 1}


def test_times_and_schedule_share_no_random_numbers() -> None:
    scene = Scene(4, seed=7)
    assert scene.derived_seed("times") != scene.derived_seed("schedule")
    assert scene.derived_seed("times") == replace(scene, num_workers=9).derived_seed("times")


# ---- rules and lags --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        "dc-asgd-a", "dana+ga[momentum=0.9 lr=0.02]", "dana-slim[momentum=0.9 lr=0.02]", "sync[quorum=3]",
        "asgd[mode=buffer quorum=4]", "delta[push_every=4]", "easgd[push_every=4]", "diloco[push_every=4]",
        "asgd[algorithm=adamw lr=0.001]",
    ],
)  # fmt: skip
def test_every_kind_of_rule_consumes_every_sample_once(tiny: str, rule: str) -> None:
    result = simulated(tiny, rule, 4).result()
    assert result["samples"] == 6 * 256
    assert math.isfinite(result["train_loss"]) and not result["diverged"]


def test_what_the_gate_drops_is_counted_and_computed_again(tiny: str) -> None:
    gated = simulated(tiny, "asgd[max_lag=3]", 6).result()
    assert gated["dropped"] > 0
    assert gated["lag"]["max"] == 2


def test_a_run_that_diverges_is_told_so(tiny: str, zasgd: Command) -> None:
    code, out, err = zasgd("simulate", tiny, "--workers", "2", "--rule", "asgd[lr=1e6]")
    assert code == 0, err
    assert "(diverged)" in out


def test_lags_of_all_shards_are_counted_together() -> None:
    assert lag_facts([{0: 98, 5: 1}, {9: 1}]) == {"mean": 0.14, "p99": 5, "max": 9}
    assert lag_facts([{}]) == {"mean": 0.0, "p99": 0, "max": 0}


# ---- who comes and goes ----------------------------------------------------------------------------------


def test_workers_join_leave_and_die_on_a_schedule_and_nothing_is_lost(tiny: str, tmp_path: Path) -> None:
    churn = tmp_path / "churn.csv"
    churn.write_text("time,worker,action\n2,4,join\n4,0,leave\n5,1,kill\n9,1,join\n")
    simulation = simulated(tiny, "dana+ga[momentum=0.9 lr=0.02]", 3, "run.lease_s=2", churn=str(churn))
    joined = [note.fields for note in simulation.cluster.world.noted("worker_joined")]
    assert len(joined) == 5
    assert simulation.result()["samples"] == 6 * 256


def test_a_run_that_nobody_is_left_to_finish_is_one_line(tiny: str, tmp_path: Path, zasgd: Command) -> None:
    churn = tmp_path / "churn.csv"
    churn.write_text("time,worker,action\n4,0,leave\n")
    code, _, err = zasgd("simulate", tiny, "--workers", "1", "--churn", str(churn))
    assert code == 1 and "is there always a worker?" in err and err.count("\n") == 1


# ---- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--rule", "dcasgd"), "'dcasgd' is none of asgd"),
        (("--rule", "dana"), "momentum above 0"),
        (("--rule", "asgd[mode=buffer]"), "quorum"),
        (("--set", "train.epoch=3"), "train.epochs"),
        (("--speeds", "fast"), "fast"),
        (("--speeds", "nowhere.csv"), "nowhere.csv"),
        (("--network", "1"), "network"),
        (("--churn", "nowhere.csv"), "nowhere.csv"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tiny: str, zasgd: Command, arguments: tuple[str, ...], says: str) -> None:
    code, _, err = zasgd("simulate", tiny, *arguments)
    assert code == 2 and says in err and err.count("\n") == 1, err


def test_no_workers_and_no_time_are_refused(tiny: str, zasgd: Command) -> None:
    assert zasgd("simulate", tiny, "--workers", "0").code == 2
    assert zasgd("simulate", tiny, "--step-ms", "0").code == 2


def test_a_trace_that_cannot_be_read_is_one_line(tiny: str, tmp_path: Path, zasgd: Command) -> None:
    trace = tmp_path / "speeds.csv"
    trace.write_text("worker,seconds\n0,fast\n")
    code, _, err = zasgd("simulate", tiny, "--speeds", str(trace))
    assert code == 2 and str(trace) in err and err.count("\n") == 1
