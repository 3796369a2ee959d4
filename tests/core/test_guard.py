"""The guard: calm while a run learns, an alarm when it diverges, and a rate that comes back afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest

from tests.core.test_core_rounds import Floor
from zasgd.core import guard as module
from zasgd.core.guard import CALM_PUSHES, GAP_ELEMENTS, MIN_WEIGHT, WARM_UP_PUSHES, Gap, Guard
from zasgd.core.rules import RuleSpec


def fed(guard: Guard, losses: Iterable[float | None], gap: float = 0.01) -> list[float]:
    """The weights that the guard gave."""
    return [guard.observe(loss, gap) for loss in losses]


def falling(count: int, first: float = 2.3, last: float = 0.1, noise: float = 0.1, seed: int = 0) -> list[float]:
    """Losses of a run that converges exponentially; noise: relative, per push."""
    draw = np.random.default_rng(seed)
    means = last + (first - last) * np.exp(-5.0 * np.arange(count) / count)
    return [float(max(0.0, m * (1 + noise * draw.standard_normal()))) for m in means]


# ---- calm ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_converges_is_left_alone(noise: float, seed: int) -> None:
    guard = Guard(acts=True)
    assert set(fed(guard, falling(4000, noise=noise, seed=seed))) == {1.0}
    assert guard.num_alarms == 0 and guard.alarm is None


def test_steps_down_of_the_rate_are_no_alarm() -> None:
    """The loss falls at once and the gap with it, as the rate is a tenth."""
    guard = Guard(acts=True)
    draw = np.random.default_rng(2)
    for level, gap in ((2.3, 0.05), (0.8, 0.05), (0.3, 0.005), (0.2, 0.0005)):
        for _ in range(600):
            noisy = level * (1 + 0.3 * draw.standard_normal())
            assert guard.observe(max(0.0, noisy), gap * draw.uniform(0.5, 2.0)) == 1.0
    assert guard.num_alarms == 0


def test_a_warm_up_that_raises_the_gap_slowly_is_no_alarm() -> None:
    guard = Guard(acts=True)
    weights = [guard.observe(2.3 - i / 1000, 1e-4 * i) for i in range(2000)]
    assert set(weights) == {1.0}


def test_a_few_bad_batches_are_no_alarm() -> None:
    guard = Guard(acts=True)
    losses = falling(2000)
    losses[900], losses[1200] = 9.0, 9.0
    fed(guard, losses)
    assert guard.num_alarms == 0


@pytest.mark.parametrize("level", [0.0, -1.0, -50.0])
def test_a_loss_that_begins_at_zero_or_below_is_no_alarm_while_it_falls(level: float) -> None:
    """A log-likelihood of densities or a contrastive loss may be negative."""
    guard = Guard(acts=True)
    fed(guard, [level - 0.001 * i + 0.05 * math.sin(i) for i in range(1000)])
    assert guard.num_alarms == 0, guard.alarm


def test_without_losses_only_the_gap_is_watched() -> None:
    guard = Guard(acts=True)
    assert set(fed(guard, [None] * 600)) == {1.0}
    assert guard.observe(None, 0.01 * 20) == 0.5


# ---- alarm ---------------------------------------------------------------------------------------------


def test_a_loss_that_explodes_is_an_alarm_and_the_rate_is_halved_again_and_again() -> None:
    guard = Guard(acts=True)
    fed(guard, falling(1000))
    weights = fed(guard, [50.0] * (10 * CALM_PUSHES))
    steps = [b for a, b in zip([1.0, *weights], weights, strict=False) if a != b]
    assert steps == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, MIN_WEIGHT]
    at = [i for i, (a, b) in enumerate(zip([1.0, *weights], weights, strict=False)) if a != b]
    assert {b - a for a, b in pairwise(at)} == {CALM_PUSHES}
    assert guard.alarm is not None and "loss" in guard.alarm.reason


def test_losing_half_of_what_was_gained_is_an_alarm_though_the_loss_is_below_its_start() -> None:
    guard = Guard(acts=True)
    fed(guard, [2.0] * WARM_UP_PUSHES + falling(1000, 2.0, 0.2, noise=0.0) + [0.2] * 200)
    assert guard.num_alarms == 0
    fed(guard, [1.5] * 200)
    assert guard.num_alarms >= 1 and "had been" in guard.alarm.reason  # type: ignore[union-attr]


def test_a_gap_that_jumps_is_an_alarm() -> None:
    guard = Guard(acts=True)
    fed(guard, [1.0] * 600, gap=0.01)
    assert guard.observe(1.0, 0.02) == 1.0
    assert guard.observe(1.0, 0.2) == 0.5
    assert guard.alarm is not None and "gap" in guard.alarm.reason


def test_the_rate_comes_back_step_by_step_once_all_is_well() -> None:
    guard = Guard(acts=True)
    fed(guard, falling(1000, noise=0.0))
    fed(guard, [50.0] * 3)
    damped = guard.weight
    assert damped < 1.0
    weights = fed(guard, [0.1] * (40 * CALM_PUSHES))
    assert weights[-1] == 1.0 and guard.alarm is None and guard.num_alarms >= 1
    assert all(b <= 2 * a for a, b in pairwise(weights))


def test_it_only_acts_when_told() -> None:
    guard = Guard(acts=False)
    fed(guard, falling(1000))
    assert set(fed(guard, [50.0] * 300)) == {1.0}
    assert guard.damping == 1.0 and guard.num_alarms >= 1 and guard.alarm is not None


@pytest.mark.parametrize("gap", [math.inf, 1e300])
def test_a_gap_beyond_bounds_does_not_blind_the_guard(gap: float) -> None:
    guard = Guard(acts=True)
    fed(guard, [None] * 600, gap=0.01)
    guard.observe(None, gap)
    assert guard.num_alarms == 1
    fed(guard, [None] * 600, gap=0.01)
    assert math.isfinite(guard._gap)


# ---- the gap -------------------------------------------------------------------------------------------


def test_the_gap_is_the_root_mean_square_over_elements_and_pushes() -> None:
    gap = Gap(4)
    zeros = np.zeros(4, np.float32)
    assert gap.rmse == 0.0
    assert gap.observe(np.full(4, 3.0, np.float32), zeros) == pytest.approx(3.0)
    assert gap.observe(np.array([4, 0, 0, 0], np.float32), zeros) == pytest.approx(2.0)
    assert gap.rmse == pytest.approx(math.sqrt((9 + 4) / 2))


@pytest.mark.parametrize("size", [0, 1, GAP_ELEMENTS - 1, GAP_ELEMENTS + 1, 10 * GAP_ELEMENTS + 7])
def test_a_sample_of_a_large_slice_is_as_good(size: int) -> None:
    gap = Gap(size)
    w = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    found = gap.observe(w, np.zeros(size, np.float32))
    assert found == pytest.approx(1.0 if size > 1 else abs(float(w.sum())), rel=0.1)


# ---- in a shard ----------------------------------------------------------------------------------------


def diverging(acts: bool) -> Floor:
    floor = Floor(RuleSpec("asgd", guard=acts), 1, lr=1.0)
    for _ in range(200):
        floor.push(0, 0.0, loss=1.0)
    for _ in range(60):
        floor.push(0, 0.0, loss=40.0)
    return floor


@pytest.mark.parametrize("acts", [True, False])
def test_a_shard_damps_its_rate_only_when_told_and_says_so_either_way(acts: bool) -> None:
    floor = diverging(acts)
    facts = floor.shards[0].facts()
    assert facts["alarms"] >= 1 and "loss" in facts["alarm"]
    assert (facts["damping"] < 1.0) == acts
    before = floor.w().copy()
    floor.push(0, 1.0, loss=40.0)
    assert float((before - floor.w())[0]) == pytest.approx(facts["damping"])
    assert floor.what(0, "apply")[-1][9] == facts["damping"], "the record holds the weight"


def test_facts_of_a_calm_shard() -> None:
    floor = Floor(RuleSpec("asgd", guard=True), 2, lr=1.0)
    floor.push(0, 1.0), floor.push(1, 1.0)
    facts = floor.shards[0].facts()
    assert (facts["alarms"], facts["alarm"], facts["damping"]) == (0, "", 1.0)
    assert facts["gap_rmse"] == pytest.approx(math.sqrt(0.5)), "0 of the first push, 1 of the second"


def test_constants_are_such_that_a_weight_can_come_back() -> None:
    assert 0 < MIN_WEIGHT < 1 and module.FAST > module.SLOW > 0 and math.log2(1 / MIN_WEIGHT).is_integer()
