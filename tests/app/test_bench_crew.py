"""Processes measured in turns: what a rate is made of, and that none outlives the measurement."""

from __future__ import annotations

import os
import time

import pytest

from zasgd.app.bench import crew as crews
from zasgd.app.bench.crew import BenchError, Crew, Lane, Meter, running_crew


def step_every(lane: Lane, seconds: float) -> None:
    while True:
        lane.begin_step()
        time.sleep(seconds)


def stop_after(lane: Lane, steps: int) -> None:
    for _ in range(steps):
        lane.begin_step()
    os._exit(7)


@pytest.fixture(autouse=True)
def short_margins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crews, "MARGIN_S", 0.05)


def test_a_turn_measures_what_happens_within_it_and_nobody_works_outside_it() -> None:
    crew = Crew(2)
    with running_crew(crew, [(step_every, crew.lanes[0], 0.02), (step_every, crew.lanes[1], 0.04)]):
        fast, slow = crew.rates(0.5)
        between = crew.num_steps
        crew.rates(0.1)
    assert fast <= 1 / 0.02 and slow <= 1 / 0.04  # a sleep is never shorter
    assert fast > slow
    assert crew.num_steps > between, "a second turn goes on"


def test_slow_steps_make_the_turn_longer_instead_of_leaving_it_without_a_rate() -> None:
    crew = Crew(1)
    with running_crew(crew, [(step_every, crew.lanes[0], 0.2)]):
        (rate,) = crew.rates(0.01)
    assert 0 < rate <= 5


def test_a_process_that_ends_by_itself_ends_the_measurement_and_all_others() -> None:
    crew = Crew(2)
    calls = [(stop_after, crew.lanes[0], 2), (step_every, crew.lanes[1], 0.01)]
    with pytest.raises(BenchError, match="exit code 7"), running_crew(crew, calls):
        crew.rates(60.0)
    assert [process.is_alive() for process in crew.processes] == [False, False]


def test_a_meter_tells_the_mean_of_what_was_called_since() -> None:
    meters = [Meter(), Meter()]
    before = Meter.total(meters)
    assert meters[0].timed(lambda a, b=1: a + b)(1, b=2) == 3
    meters[1].timed(time.sleep)(0.02)
    spent = Meter.total(meters)
    assert spent.times == 2 and spent.seconds >= 0.02
    assert spent.mean_ms_since(before) == pytest.approx(1e3 * spent.seconds / 2)
    assert spent.mean_ms_since(spent) == 0.0
