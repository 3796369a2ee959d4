"""The worker's half of dana-slim: v first, then u from it; a new rate rescales v; what is not trained passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zasgd.core.layout import Segment
from zasgd.core.rules import GroupSpec
from zasgd.core.slim import BLOCK, SlimMomentum

Array = np.ndarray[Any, Any]

HEAVY = GroupSpec(momentum=0.9, weight_decay=0.1)
SLOW = GroupSpec(lr_scale=0.5, momentum=0.9)
FROZEN = GroupSpec(lr_scale=0.0, momentum=0.9, weight_decay=0.1)
GROUPS = (HEAVY, SLOW, FROZEN)
SIZE = 12
SEGMENTS = (Segment(0, 4, 0, 0), Segment(4, 8, 1, 1), Segment(8, 12, 2, 2))


def by_hand(pushes: list[tuple[Array, Array]], group: GroupSpec) -> list[Array]:
    """u of every push of (gradient, parameters), from the sum over all d before it."""
    ds = [grad + group.weight_decay * params for grad, params in pushes]
    gamma = group.momentum
    us = []
    for k, d in enumerate(ds):
        v = sum(gamma ** (k - j) * earlier for j, earlier in enumerate(ds[: k + 1]))
        us.append(gamma * v + d)
    return us


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_u_is_the_momentum_after_this_gradient_and_the_gradient_again(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    pushes = [(rng.standard_normal(SIZE), rng.standard_normal(SIZE)) for _ in range(20)]
    slim = SlimMomentum(GROUPS, SEGMENTS, SIZE, dtype)
    us = [slim.push(grad.astype(dtype), params.astype(dtype), 0.1) for grad, params in pushes]
    heavy, slow = by_hand(pushes, HEAVY), by_hand(pushes, SLOW)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype is np.float64 else {"rtol": 1e-5, "atol": 1e-5}
    for u, a, b in zip(us, heavy, slow, strict=True):
        assert u.dtype == dtype
        np.testing.assert_allclose(u[:4], a[:4], **tolerance)
        np.testing.assert_allclose(u[4:8], b[4:8], **tolerance)


def test_a_vector_longer_than_a_block_is_the_same_everywhere() -> None:
    size = 2 * BLOCK + 3
    slim = SlimMomentum((HEAVY,), (Segment(0, size, 0, 0),), size, np.float64)
    for grad in (1.0, -2.0, 0.5):
        u = slim.push(np.full(size, grad), np.ones(size), 0.1)
    ones = np.ones(1)
    assert u == pytest.approx(by_hand([(g * ones, ones) for g in (1.0, -2.0, 0.5)], HEAVY)[-1][0], rel=1e-12)


def test_it_is_done_in_the_gradient_and_only_v_is_kept() -> None:
    """A second vector per worker would be the memory that dana-slim is chosen to spare."""
    slim = SlimMomentum(GROUPS, SEGMENTS, SIZE)
    grads, params = np.ones(SIZE, np.float32), np.ones(SIZE, np.float32)
    params.setflags(write=False)
    assert slim.push(grads, params, 0.1) is grads
    large = SlimMomentum((HEAVY,), (Segment(0, 10 * BLOCK, 0, 0),), 10 * BLOCK)
    kept = sum(value.nbytes for value in vars(large).values() if isinstance(value, np.ndarray))
    assert kept <= (10 + 1) * BLOCK * 4


def test_a_group_of_rate_zero_passes_as_it_is() -> None:
    slim = SlimMomentum(GROUPS, SEGMENTS, SIZE)
    for grad in (1.0, 2.0):
        u = slim.push(np.full(SIZE, grad, np.float32), np.ones(SIZE, np.float32), 0.1)
        assert (u[8:] == grad).all() and not slim.v[8:].any() and (u[:8] != grad).all()


def test_a_tensor_without_gradient_passes_and_keeps_its_momentum() -> None:
    slim = SlimMomentum(GROUPS, SEGMENTS, SIZE)
    params = np.ones(SIZE, np.float32)
    slim.push(np.ones(SIZE, np.float32), params, 0.1)
    before = slim.v.copy()
    u = slim.push(np.full(SIZE, np.nan, np.float32), params, 0.1, absent={0, 2})
    assert np.isnan(u[:4]).all() and (slim.v[:4] == before[:4]).all()
    assert np.isnan(slim.v[4:8]).all()


def test_a_new_rate_rescales_v_so_that_rate_times_v_stays() -> None:
    slim = SlimMomentum((SLOW,), (Segment(0, 3, 0, 0),), 3, np.float64)
    zeros = np.zeros(3)
    slim.push(np.ones(3), zeros, 0.1)
    rate_times_v = 0.1 * slim.v
    for lr in (0.2, 0.05, 1.0):
        slim.push(np.zeros(3), zeros, lr)
        rate_times_v *= 0.9  # what a push of zeros does
        np.testing.assert_allclose(lr * slim.v, rate_times_v, rtol=1e-12)


def test_the_parameters_go_on_as_if_the_rate_had_been_in_the_momentum() -> None:
    """What the shard does with u: w -= lr u, against velocities that hold the rate they were made with."""
    rng = np.random.default_rng(3)
    slim = SlimMomentum((SLOW,), (Segment(0, 5, 0, 0),), 5, np.float64)
    w, velocity = np.zeros(5), np.zeros(5)
    mirror = w.copy()
    for lr in (0.1, 0.1, 0.01, 0.01, 0.3, 0.0, 0.0, 0.2):
        grad = rng.standard_normal(5)
        w -= lr * slim.push(grad.copy(), w, lr)
        if lr:
            velocity = 0.9 * velocity + lr * grad
            mirror -= 0.9 * velocity + lr * grad
        np.testing.assert_allclose(w, mirror, rtol=1e-12)


@pytest.mark.parametrize("rates", [(0.0, 0.0, 0.1), (0.1, 0.0, 0.1), (0.1, 0.0, 0.0)])
def test_a_rate_of_zero_neither_moves_v_nor_divides_by_it(rates: tuple[float, ...]) -> None:
    slim = SlimMomentum((SLOW,), (Segment(0, 3, 0, 0),), 3, np.float64)
    moving = [lr for lr in rates if lr]
    with np.errstate(all="raise"):
        for lr in rates:
            slim.push(np.ones(3), np.zeros(3), lr)
    np.testing.assert_allclose(slim.v, sum(0.9**k for k in range(len(moving))), rtol=1e-12)
