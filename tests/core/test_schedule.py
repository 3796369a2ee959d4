"""The learning rate follows the samples, whoever computed them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zasgd.core.schedule import Schedule

EPOCH = 1000
"""Samples per epoch in these tests."""


def rates_of_a_run(schedule: Schedule, num_workers: int, batch: int) -> dict[int, float]:
    """Sample clock -> rate of the push applied there, with workers of different speed pushing as they finish."""
    clock, rates = 0, {}
    next_push_at = [1.0 + 0.37 * w for w in range(num_workers)]
    while clock < schedule.epochs * EPOCH:
        worker = min(range(num_workers), key=next_push_at.__getitem__)
        next_push_at[worker] += 1.0 + 0.37 * worker
        rates[clock] = schedule.lr_at(clock, EPOCH)
        clock += batch
    return rates


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(0.1, 4, "step", milestones=(0.5, 0.75)),
        Schedule(0.1, 4, "cosine", warmup_epochs=1),
        Schedule(0.1, 4, warmup_epochs=0.5, warmup_from=0.1),
    ],
    ids=lambda s: s.kind,
)
def test_two_and_eight_workers_see_the_same_rate_at_the_same_samples(schedule: Schedule) -> None:
    """torchft#58: a schedule on each worker's own steps ran at another speed after every join."""
    two, eight = rates_of_a_run(schedule, 2, 10), rates_of_a_run(schedule, 8, 10)
    assert two == eight
    assert len(set(two.values())) > 2
    larger_batches = rates_of_a_run(schedule, 8, 50)
    assert larger_batches == {clock: two[clock] for clock in larger_batches}


def test_constant_is_constant() -> None:
    schedule = Schedule(0.3, 10)
    assert {schedule.lr_at(samples, EPOCH) for samples in (0, 1, 5000, 10_000, 99_999)} == {0.3}


@pytest.mark.parametrize(
    ("samples", "lr"),
    [(0, 1.0), (4999, 1.0), (5000, 0.1), (7499, 0.1), (7500, 0.01), (9999, 0.01), (10_000, 0.01), (50_000, 0.01)],
)
def test_step_falls_at_the_sample_that_reaches_a_milestone(samples: int, lr: float) -> None:
    schedule = Schedule(1.0, 10, "step", milestones=(0.5, 0.75))
    assert schedule.lr_at(samples, EPOCH) == pytest.approx(lr)


@pytest.mark.parametrize(
    ("samples", "lr"),
    [(0, 2.0), (2500, 2 * math.cos(math.pi / 8) ** 2), (5000, 1.0), (10_000, 0.0), (12_000, 0.0)],
)
def test_cosine_falls_from_the_peak_to_nothing(samples: int, lr: float) -> None:
    assert Schedule(2.0, 10, "cosine").lr_at(samples, EPOCH) == pytest.approx(lr)


@pytest.mark.parametrize(
    ("samples", "lr"), [(0, 0.2), (1000, 0.6), (1999, 0.9996), (2000, 1.0), (6000, 0.5), (10_000, 0.0)]
)
def test_the_cosine_begins_where_the_warm_up_ends(samples: int, lr: float) -> None:
    schedule = Schedule(1.0, 10, "cosine", warmup_epochs=2, warmup_from=0.2)
    assert schedule.lr_at(samples, EPOCH) == pytest.approx(lr)


@given(
    st.sampled_from(["constant", "step", "cosine"]),
    st.integers(0, 20),
    st.floats(0, 25),
    st.floats(0, 1),
    st.integers(0, 30_000),
    st.integers(0, 2000),
)
def test_the_rate_stays_between_nothing_and_the_peak(
    kind: str, epochs: int, warmup_epochs: float, warmup_from: float, samples: int, per_epoch: int
) -> None:
    schedule = Schedule(0.1, epochs, kind, (0.3, 0.6), warmup_epochs=warmup_epochs, warmup_from=warmup_from)
    assert 0 <= schedule.lr_at(samples, per_epoch) <= 0.1 * (1 + 1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "linear"},
        {"lr": -0.1},
        {"lr": math.nan},
        {"lr": math.inf},
        {"epochs": -1},
        {"warmup_epochs": -1.0},
        {"warmup_epochs": math.nan},
        {"milestones": (0.5, 1.0)},
        {"milestones": (30,)},
    ],
    ids=str,
)
def test_a_schedule_out_of_range_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="schedule"):
        Schedule(**({"lr": 0.1, "epochs": 10} | wrong))  # type: ignore[arg-type]
