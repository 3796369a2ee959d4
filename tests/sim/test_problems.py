"""The made-up work has the statistics that the experiments assume."""

import numpy as np
import pytest

from zasgd.core.messages import Grant
from zasgd.core.region import RegionPlan, memories, private_region
from zasgd.core.worker import GradientTask
from zasgd.sim.cluster import small_layout
from zasgd.sim.problems import (
    GammaTimes,
    MachineTimes,
    Quadratic,
    RecordedTimes,
    SimulatedWork,
    Tally,
    UniformTimes,
)


@pytest.mark.parametrize(("heterogeneous", "tail", "tolerance"), [(True, 0.279, 0.01), (False, 0.0094, 0.002)])
def test_gamma_task_times_have_the_published_tail(heterogeneous: bool, tail: float, tolerance: float) -> None:
    times = GammaTimes(2.0, heterogeneous=heterogeneous, seed=1)
    drawn = [times.next(f"machine-{i}") for i in range(40_000)]
    assert sum(t > 1.25 * 2.0 for t in drawn) / len(drawn) == pytest.approx(tail, abs=tolerance)
    assert sum(drawn) / len(drawn) == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize(
    ("heterogeneous", "num_workers", "gain", "tolerance"),
    [(False, 8, 1.15, 0.01), (False, 32, 1.22, 0.01), (True, 8, 3.1, 0.15), (True, 32, 4.2, 0.15)],
)
def test_async_throughput_over_sync_is_that_of_the_paper(
    heterogeneous: bool, num_workers: int, gain: float, tolerance: float
) -> None:
    """A synchronous round takes as long as its slowest task; without rounds each machine goes at its own pace."""
    gains = []
    for seed in range(600 if heterogeneous else 20):
        times = GammaTimes(1.0, heterogeneous=heterogeneous, seed=seed)
        rounds = np.array([[times.next(f"machine-{i}") for i in range(num_workers)] for _ in range(20)])
        gains.append((1.0 / rounds.mean(axis=0)).sum() / (num_workers / rounds.max(axis=1).mean()))
    assert np.mean(gains) == pytest.approx(gain, abs=tolerance)


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


def test_recorded_times_come_in_order_and_again_and_strangers_take_the_rows_in_turn() -> None:
    times = RecordedTimes({"worker-0": [1.0, 2.0], "worker-1": [5.0]})
    assert [times.next("worker-0") for _ in range(5)] == [1.0, 2.0, 1.0, 2.0, 1.0]
    assert [times.next("worker-7"), times.next("spot"), times.next("worker-7")] == [1.0, 5.0, 2.0]
    assert times.mean_s == 3.25


def test_machines_with_known_means_keep_them() -> None:
    times = MachineTimes({"worker-0": 1.0, "worker-1": 3.0}, seed=2)
    for machine, mean_s in (("worker-0", 1.0), ("worker-1", 3.0), ("worker-2", 1.0)):
        drawn = [times.next(machine) for _ in range(400)]
        assert np.mean(drawn) == pytest.approx(mean_s, rel=0.02)
        assert np.std(drawn) == pytest.approx(0.1 * mean_s, rel=0.15)
    assert times.mean_s == 2.0


def test_a_task_of_several_batches_takes_their_times_and_yields_their_mean() -> None:
    layout = small_layout(32)
    problem, bad = Quadratic(32), {(0, 2)}
    work = SimulatedWork(layout, problem, RecordedTimes({"worker-0": [1.0, 2.0, 4.0]}), bad=bad)
    first, second, rest = Grant(0, 0, 0, 16), Grant(0, 1, 16, 20), Grant(0, 2, 20, 24)
    (memory,) = memories(private_region(RegionPlan(32)), layout)
    memory.params[:] = np.linspace(-1, 1, 32)
    took_s, found = work("worker-0", 0, GradientTask((first, second), memory))
    at = memory.params.copy()
    assert found.grads is memory.grads and np.array_equal(work.params("worker-0"), at)
    assert (took_s, found.num_samples, found.finite, found.grads.dtype) == (3.0, 20, True, np.float32)
    assert found.grads == pytest.approx((4 * problem.of(at, first) + problem.of(at, second)) / 5, rel=1e-6)
    took_s, found = work("worker-0", 0, GradientTask((rest,), memory))
    assert (took_s, found.finite) == (4.0, False)
    assert np.array_equal(found.grads, problem.of(at, rest))


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
