"""The fused pass: agrees with the formulas, is vectorised float32, touches nothing it should not."""

from __future__ import annotations

import itertools
import math
import platform
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zasgd.core import kernels
from zasgd.core.kernels import Piece, ShardOptimizer, Vector, all_finite
from zasgd.core.layout import Segment
from zasgd.core.node import InvariantError
from zasgd.core.reference import MS_EPS, ReferenceOptimizer
from zasgd.core.rules import RULES, GroupSpec, RuleSpec

GROUPS = (
    GroupSpec(),
    GroupSpec(momentum=0.9),
    GroupSpec(momentum=0.9, nesterov=True),
    GroupSpec(weight_decay=1e-2),
    GroupSpec(lr_scale=3.0, momentum=0.5, nesterov=True, weight_decay=1e-4),
)


def covering(size: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """The stretches between sorted cuts of range(size)."""
    edges = sorted({0, size, *(cut for cut in cuts if cut < size)})
    return list(itertools.pairwise(edges))


def magnitudes(
    reference: ReferenceOptimizer, before: dict[str, Vector], w: Vector, g: Vector, known: Vector, lr: float
) -> dict[str, Vector]:
    """The sum of the magnitudes that enter each new value: the scale of its rounding errors."""
    sums = {"w": np.abs(w), "momentum": np.abs(before["momentum"]), "ms": reference.state["ms"]}
    for start, stop, index in reference.segments:
        run, group = slice(start, stop), reference.groups[index]
        strength = reference.rule.strength
        if reference.rule.name == "dc-asgd-a":
            strength = strength / np.sqrt(reference.state["ms"][run] + MS_EPS)
        d = np.abs(g[run]) + strength * g[run] ** 2 * np.abs(w[run] - known[run])
        d = d + group.weight_decay * np.abs(w[run])
        v = group.momentum * sums["momentum"][run] + d
        sums["momentum"][run] = v
        sums["w"][run] += lr * group.lr_scale * (d + group.momentum * v if group.nesterov else v)
    return sums


@st.composite
def shards(draw: st.DrawFn) -> tuple[RuleSpec, list[GroupSpec], list[Segment], list[int]]:
    """A rule, groups, their segments, and where the gradient is cut into pieces."""
    size = draw(st.integers(0, 300))
    cuts = st.lists(st.integers(0, 300), max_size=3)
    groups = draw(st.lists(st.sampled_from(GROUPS), min_size=1, max_size=2))
    segments = [Segment(a, b, i % len(groups)) for i, (a, b) in enumerate(covering(size, draw(cuts)))]
    rule = RuleSpec(
        draw(st.sampled_from(RULES)),
        draw(st.sampled_from((None, 0.0, 0.5))),
        draw(st.sampled_from((0.0, 0.95))),
    )
    return rule, groups, segments, [a for a, _ in covering(size, draw(cuts))] + [size]


@settings(max_examples=120, deadline=None)
@given(shards(), st.integers(0, 2**32 - 1), st.sampled_from((1e-4, 1.0, 1e3)))
def test_kernel_and_formulas_agree(
    shard: tuple[RuleSpec, list[GroupSpec], list[Segment], list[int]], seed: int, magnitude: float
) -> None:
    rule, groups, segments, edges = shard
    size, lr, rng = edges[-1], 0.1, np.random.default_rng(seed)
    optimizer = ShardOptimizer(rule, groups, segments, size)
    w, out = rng.standard_normal(size, dtype=np.float32), np.empty(size, np.float32)
    for _ in range(4):
        g = rng.standard_normal(size, dtype=np.float32) * np.float32(magnitude)
        known = w + np.float32(0.1) * rng.standard_normal(size, dtype=np.float32)
        pieces = [(a, g[a:b]) for a, b in itertools.pairwise(edges)]
        reference = ReferenceOptimizer(rule, groups, segments, size)
        for name, array in optimizer.state.items():
            reference.state[name][:] = array
        before = {name: array.copy() for name, array in reference.state.items()}
        old = w.astype(np.float64)
        expected = {"w": old.copy(), **reference.state}
        reference.apply(expected["w"], pieces, known, lr, np.empty(size))
        optimizer.apply(w, pieces, known, lr, out)
        scale = magnitudes(reference, before, old, g.astype(np.float64), known, lr)
        for name, array in {"w": w, "out": out, **optimizer.state}.items():
            what = "w" if name == "out" else name
            assert (np.abs(array - expected[what]) <= 1e-6 * scale[what]).all(), name


def apply_once(optimizer: ShardOptimizer, seed: int = 0) -> Vector:
    """What one push leaves of the parameters."""
    rng = np.random.default_rng(seed)
    w, g, known = rng.standard_normal((3, optimizer.size), dtype=np.float32)
    optimizer.apply(w, [(0, g)], known, 0.1, np.empty_like(w))
    return w


# packed multiply-add; conversions to or from float64 and roots in it
INSTRUCTIONS = {
    "x86_64": (r"\bvfn?madd\d*ps\b.*[yz]mm", r"\bv?cvt(ss2sd|sd2ss|ps2pd|pd2ps)\b|\bv?sqrt[sp]d\b"),
    "aarch64": (r"\bfml[as]\b.*\.4s", r"\bfcvt[nl]?2?\s|\bfsqrt\s+(d|v\d+\.2d)"),
}
known_processor = pytest.mark.skipif(
    platform.machine() not in INSTRUCTIONS, reason="the instructions of this processor are not listed here"
)


def loop_assembly(dispatcher: Any, signature: Any) -> str:
    """The compiled function without its wrapper, which unpacks Python floats and so does convert."""
    return str(re.split(r"\.globl\s+_ZN7cpython", dispatcher.inspect_asm(signature))[0])


@known_processor
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("group", GROUPS)
def test_every_combination_is_packed_float32(name: str, group: GroupSpec) -> None:
    packed, float64 = INSTRUCTIONS[platform.machine()]
    apply_once(ShardOptimizer(RuleSpec(name), [group], [Segment(0, 8, 0)], 8))
    for signature in kernels.sweep.signatures:
        assembly = loop_assembly(kernels.sweep, signature)
        assert re.search(packed, assembly), "no packed multiply-add"
        assert not re.search(float64, assembly), "float64 arithmetic"


@known_processor
def test_one_literal_of_python_would_be_seen_in_the_assembly() -> None:
    planted = kernels.njit(error_model="numpy", fastmath=False)(promoted)
    planted(np.ones(8, np.float32))
    _, float64 = INSTRUCTIONS[platform.machine()]
    assert re.search(float64, loop_assembly(planted, planted.signatures[0]))


@known_processor
def test_the_default_division_check_would_be_seen_in_the_assembly() -> None:
    source = kernels.sweep.py_func
    planted = kernels.njit(source)
    ones, one = np.ones(8, np.float32), np.float32(1)
    planted(ones.copy(), ones, ones, ones.copy(), ones.copy(), None, 0, 8, 0, one, one, one, one, None, one, None)
    packed, _ = INSTRUCTIONS[platform.machine()]
    assert not re.search(packed, loop_assembly(planted, planted.signatures[0]))


def promoted(w: Vector) -> None:
    """One literal that is not float32."""
    for i in range(w.size):
        w[i] = w[i] / math.sqrt(w[i] + 1e-7)


def test_state_is_only_what_the_rule_needs() -> None:
    def state(name: str, *groups: GroupSpec) -> set[str]:
        segments = [Segment(10 * i, 10 * (i + 1), i) for i in range(len(groups))]
        optimizer = ShardOptimizer(RuleSpec(name), groups, segments, 10 * len(groups))
        assert optimizer.num_bytes() == 4 * optimizer.size * len(optimizer.state)
        return set(optimizer.state)

    plain, momentum = GROUPS[:2]
    assert state("asgd", plain) == state("dc-asgd-c", plain) == set()
    assert state("asgd", plain, momentum) == {"momentum"}
    assert state("dc-asgd-a", plain) == {"ms"}
    assert state("dc-asgd-a", momentum, plain) == {"ms", "momentum"}


def test_a_group_outside_this_slice_costs_no_state() -> None:
    assert ShardOptimizer(RuleSpec("asgd"), GROUPS[:2], [Segment(0, 8, 0)], 8).state == {}


@pytest.mark.parametrize("name", RULES)
def test_an_empty_slice_takes_pushes(name: str) -> None:
    optimizer = ShardOptimizer(RuleSpec(name), GROUPS, [], 0)
    optimizer.warm()
    w, known, out = np.empty((3, 0), np.float32)
    optimizer.apply(w, [], known, 0.1, out)
    optimizer.apply(w, [(0, w.copy())], known, 0.1, out)
    assert optimizer.num_bytes() == 0 and all_finite(w)


def test_network_frames_and_own_arrays_share_what_warm_compiled() -> None:
    ShardOptimizer(RuleSpec(), GROUPS, [], 0).warm()
    optimizer = ShardOptimizer(RuleSpec(), GROUPS, [Segment(0, 40, 1), Segment(40, 64, 4)], 64)
    compiled = len(kernels.sweep.signatures), len(kernels.largest_magnitude.signatures)
    assert compiled[0] >= 4 and compiled[1] == 1
    w, out = np.ones((2, 64), np.float32)
    frame = np.frombuffer(bytes(8) + np.ones(64, np.float32).tobytes(), np.float32, offset=8)
    for gradient in (frame, np.ones(64, np.float32)):
        for known in (frame, np.ones(64, np.float32)):
            assert all_finite(gradient)
            optimizer.apply(w, [(0, gradient[:30]), (30, gradient[30:])], known, 0.1, out)
    assert (len(kernels.sweep.signatures), len(kernels.largest_magnitude.signatures)) == compiled


def test_warming_leaves_the_state_alone() -> None:
    fresh, warmed = (ShardOptimizer(RuleSpec(), GROUPS[1:2], [Segment(0, 9, 0)], 9) for _ in range(2))
    warmed.warm()
    np.testing.assert_array_equal(apply_once(warmed), apply_once(fresh))


def test_what_is_sent_may_replace_the_snapshot_in_place() -> None:
    apart, in_place = (ShardOptimizer(RuleSpec(), GROUPS[4:], [Segment(0, 99, 0)], 99) for _ in range(2))
    rng = np.random.default_rng(3)
    w, g, known = rng.standard_normal((3, 99), dtype=np.float32)
    other, out = w.copy(), np.empty_like(w)
    apart.apply(w, [(0, g)], known, 0.1, out)
    in_place.apply(other, [(0, g)], known, 0.1, known)
    np.testing.assert_array_equal(other, w)
    np.testing.assert_array_equal(known, out)


def test_asgd_needs_no_snapshot_and_the_others_do() -> None:
    w, g, out = np.ones((3, 4), np.float32)
    ShardOptimizer(RuleSpec("asgd"), GROUPS, [Segment(0, 4, 0)], 4).apply(w, [(0, g)], None, 0.5, out)
    np.testing.assert_array_equal(w, np.full(4, 0.5, np.float32))
    with pytest.raises(InvariantError, match="needs the worker's snapshot"):
        ShardOptimizer(RuleSpec(), GROUPS, [Segment(0, 4, 0)], 4).apply(w, [(0, g)], None, 0.5, out)


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [(0, np.ones(7, np.float32))],
        [(0, np.ones(9, np.float32))],
        [(1, np.ones(7, np.float32))],
        [(0, np.ones(4, np.float32)), (3, np.ones(5, np.float32))],
        [(4, np.ones(4, np.float32)), (0, np.ones(4, np.float32))],
        [(0, np.ones(8, np.float64))],
        [(0, np.ones((2, 4), np.float32))],
        [(0, np.ones(16, np.float32)[::2])],
    ],
)
def test_a_gradient_that_does_not_fit_changes_nothing(pieces: list[Piece]) -> None:
    optimizer = ShardOptimizer(RuleSpec("asgd"), GROUPS, [Segment(0, 8, 0)], 8)
    w, known, out = np.ones((3, 8), np.float32)
    with pytest.raises(InvariantError, match="pieces"):
        optimizer.apply(w, pieces, known, 0.1, out)
    np.testing.assert_array_equal(w, 1)


def test_vectors_that_do_not_fit_are_refused() -> None:
    optimizer = ShardOptimizer(RuleSpec(), GROUPS, [Segment(0, 8, 0)], 8)
    w, g, known, out = np.ones((4, 8), np.float32)
    frozen = w.copy()
    frozen.setflags(write=False)
    for args in [
        (w, w, 0.1, out),
        (w, known, 0.1, w),
        (w, known[:7], 0.1, out),
        (w, known, 0.1, out.astype(np.float64)),
        (w, known, math.nan, out),
        (frozen, known, 0.1, out),
        (w, known, 0.1, frozen),
    ]:
        vector, snapshot, lr, sent = args
        with pytest.raises(InvariantError):
            optimizer.apply(vector, [(0, g)], snapshot, lr, sent)
    np.testing.assert_array_equal(w, 1)


@pytest.mark.parametrize(
    "segments",
    [[], [Segment(0, 7, 0)], [Segment(1, 8, 0)], [Segment(0, 4, 0), Segment(5, 8, 0)], [Segment(0, 8, 5)]],
)
def test_segments_must_cover_the_slice(segments: list[Segment]) -> None:
    with pytest.raises(InvariantError, match="segment"):
        ShardOptimizer(RuleSpec(), GROUPS, segments, 8)


@given(st.integers(0, 200), st.sampled_from((math.inf, -math.inf, math.nan, -math.nan)), st.data())
@settings(deadline=None)
def test_one_bad_element_anywhere_is_seen(size: int, bad: float, data: st.DataObject) -> None:
    array = np.full(size, np.finfo(np.float32).max)
    array[::2] = -np.finfo(np.float32).tiny
    assert all_finite(array)
    if size:
        array[data.draw(st.integers(0, size - 1))] = bad
        assert not all_finite(array)


def test_finite_takes_any_shape_and_no_other_type() -> None:
    assert all_finite(np.zeros((3, 4, 5), np.float32))
    assert all_finite(np.float32(1).reshape(()))
    assert not all_finite(np.full((2, 2), np.nan, np.float32))
    with pytest.raises(InvariantError):
        all_finite(np.zeros(3))
    with pytest.raises(InvariantError):
        all_finite(np.zeros((4, 4), np.float32).T[::2])
