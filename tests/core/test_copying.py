"""One pass copies every element, whatever it is, and says whether all are finite."""

from __future__ import annotations

import numpy as np
import pytest

from zasgd.core.copying import copy_checked, finite_at


@pytest.mark.parametrize("size", [0, 1, 7, 64, 1001])
def test_every_bit_is_copied_and_nothing_beside(size):
    source = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    into = np.full(size + 2, 5, np.float32)
    assert copy_checked(into[1:].ctypes.data, source.ctypes.data, size)
    np.testing.assert_array_equal(into[1:-1].view(np.int32), source.view(np.int32))
    assert into[0] == into[-1] == 5


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("at", [0, 13, 99])
def test_one_element_that_is_not_finite_is_seen_and_copied_like_any_other(bad, at):
    source, into = np.full(100, 3e38, np.float32), np.zeros(100, np.float32)
    source[at] = bad
    assert not copy_checked(into.ctypes.data, source.ctypes.data, 100)
    np.testing.assert_array_equal(into.view(np.int32), source.view(np.int32))
    assert not finite_at(into.ctypes.data, 100)
    into[at] = -3e38
    assert finite_at(into.ctypes.data, 100)
