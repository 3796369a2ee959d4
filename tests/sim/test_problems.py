"""The made-up work has the statistics that the experiments assume."""

import numpy as np
import pytest

from zasgd.core.messages import Grant
from zasgd.sim.problems import GammaTimes, Quadratic, Tally, UniformTimes


@pytest.mark.parametrize(("heterogeneous", "tail", "tolerance"), [(True, 0.279, 0.01), (False, 0.0094, 0.002)])
def test_gamma_task_times_have_the_published_tail(heterogeneous: bool, tail: float, tolerance: float) -> None:
    times = GammaTimes(2.0, heterogeneous=heterogeneous, seed=1)
    drawn = [times.next(f"machine-{i}") for i in range(40_000)]
    assert sum(t > 1.25 * 2.0 for t in drawn) / len(drawn) == pytest.approx(tail, abs=tolerance)
    assert sum(drawn) / len(drawn) == pytest.approx(2.0, rel=0.02)


def test_a_heterogeneous_machine_keeps_its_own_pace() -> None:
    times = GammaTimes(2.0, heterogeneous=True, seed=3)
    slow_and_fast = {m: np.mean([times.next(m) for _ in range(200)]) for m in ("a", "b", "c", "d")}
    for machine, mean_s in slow_and_fast.items():
        assert np.mean([times.next(machine) for _ in range(200)]) == pytest.approx(mean_s, rel=0.05)
    assert max(slow_and_fast.values()) > 1.2 * min(slow_and_fast.values())


def test_uniform_task_times_stay_within_their_spread() -> None:
    times = UniformTimes(2.0, 0.5, seed=0)
    drawn = [times.next("any") for _ in range(2_000)]
    assert 1.0 <= min(drawn) < 1.05
    assert 2.95 < max(drawn) <= 3.0


def test_the_quadratic_falls_along_its_gradient_and_its_noise_belongs_to_the_batch() -> None:
    problem = Quadratic(32)
    w = np.zeros(32, np.float32)
    for batch in range(200):
        w -= 0.2 * problem.of(w, Grant(0, batch, 0, 1))
    assert problem.loss(w) < 0.01 * problem.loss(np.zeros(32, np.float32))
    same = [problem.of(w, Grant(1, 5, 80, 96)) for _ in range(2)]
    assert np.array_equal(*same)
    assert not np.array_equal(same[0], problem.of(w, Grant(1, 6, 96, 112)))


def test_a_tally_counts_each_batch_once_in_every_shard() -> None:
    w = np.zeros(32, np.float32)
    w -= 1.0 * Tally(stride=16).of(w, Grant(0, 3, 0, 8))
    assert list(np.flatnonzero(w)) == [3, 19]
    assert w.sum() == 2.0
