"""What the rules promise, on small problems: Nesterov alone, stability with lag, no trace of who left.

The formulas of `reference` in float64 are held against torch and against each other; the kernels are held against
the formulas, push by push, for every rule, with lag, absent tensors, weights and several workers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from zasgd.core.layout import Segment
from zasgd.core.optimizer import ShardOptimizer
from zasgd.core.reference import ReferenceOptimizer
from zasgd.core.rules import RULES, GroupSpec, RuleSpec, refusal, shard_groups
from zasgd.core.slim import SlimMomentum

Array = np.ndarray[Any, Any]
Optimizer = ShardOptimizer | ReferenceOptimizer

SIZE = 90
SEGMENTS = (Segment(0, 40, 0, 0), Segment(40, 56, 1, 1), Segment(56, SIZE, 0, 2))
HEAVY = (GroupSpec(momentum=0.9, weight_decay=0.01), GroupSpec(lr_scale=0.5, momentum=0.9))
NAG = tuple(GroupSpec(g.lr_scale, g.momentum, True, g.weight_decay) for g in HEAVY)
PLAIN = (GroupSpec(weight_decay=0.01), GroupSpec(lr_scale=0.5))
ADAMW = (GroupSpec(algorithm="adamw", weight_decay=0.01), GroupSpec(0.5, algorithm="adamw", beta1=0.8))
FROZEN = (HEAVY[0], GroupSpec(lr_scale=0.0, momentum=0.9, weight_decay=0.1))


def dtype_of(optimizer: type[Optimizer]) -> Any:
    return np.float32 if optimizer is ShardOptimizer else np.float64


# T1: what dana sends alone is torch's Nesterov


def torch_nesterov(start: Array, pushed: Sequence[Array], lr: float, at: Sequence[Array]) -> None:
    """Check that torch's Nesterov, in float64, is at `at[k]` after k steps."""
    params = [torch.nn.Parameter(torch.from_numpy(start[s.start : s.stop].copy())) for s in SEGMENTS]
    optimizer = torch.optim.SGD(
        [
            {"params": [p], "lr": lr * g.lr_scale, "momentum": 0.9, "nesterov": True, "weight_decay": g.weight_decay}
            for p, g in zip(params, (HEAVY[s.group] for s in SEGMENTS), strict=True)
        ]
    )  # fmt: skip
    for values, sent in zip(pushed, at, strict=True):
        for param, s in zip(params, SEGMENTS, strict=True):
            param.grad = torch.from_numpy(values[s.start : s.stop].copy())
        optimizer.step()
        theirs = np.concatenate([p.detach().numpy() for p in params])
        np.testing.assert_allclose(sent, theirs, rtol=1e-10, atol=1e-13)


def bowl(at: Array, rng: np.random.Generator) -> Array:
    """A noisy gradient of a bowl."""
    return (at + 0.3 * rng.standard_normal(at.size)).astype(at.dtype)


def start_of(seed: int, dtype: Any = np.float64) -> Array:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(dtype)


def test_what_dana_sends_to_its_only_worker_is_torch_nesterov() -> None:
    rng, start = np.random.default_rng(1), start_of(0)
    dana = ReferenceOptimizer(RuleSpec("dana"), HEAVY, SEGMENTS, SIZE)
    w, sent, own = start.copy(), start.copy(), dana.new_own()
    pushed, all_sent = [], []
    for _ in range(60):
        pushed.append(bowl(sent, rng))
        out = np.empty(SIZE)
        dana.apply(w, [(0, pushed[-1])], sent, 0.05, out, own=own)
        all_sent.append(out)
        sent = out
    torch_nesterov(start, pushed, 0.05, all_sent)
    assert np.abs(sent - w).max() > 1e-3


def test_what_dana_slim_sends_to_its_only_worker_is_torch_nesterov() -> None:
    rng, start = np.random.default_rng(1), start_of(0)
    rule = RuleSpec("dana-slim")
    shard = ReferenceOptimizer(rule, shard_groups(rule, HEAVY), SEGMENTS, SIZE)
    slim = SlimMomentum(HEAVY, SEGMENTS, SIZE, np.float64)
    w, sent = start.copy(), start.copy()
    pushed, all_sent = [], []
    for _ in range(60):
        pushed.append(bowl(sent, rng))
        out = np.empty(SIZE)
        shard.apply(w, [(0, slim.push(pushed[-1].copy(), sent, 0.05))], sent, 0.05, out)
        all_sent.append(out)
        sent = out
    torch_nesterov(start, pushed, 0.05, all_sent)


# T5: dana-slim's parameters are what dana sends


@pytest.mark.parametrize("num_workers", [2, 5, 9])
def test_the_parameters_of_dana_slim_are_what_dana_sends(num_workers: int) -> None:
    rng, start = np.random.default_rng(num_workers), start_of(0)
    rule = RuleSpec("dana-slim")
    dana = ReferenceOptimizer(RuleSpec("dana"), HEAVY, SEGMENTS, SIZE)
    shard = ReferenceOptimizer(rule, shard_groups(rule, HEAVY), SEGMENTS, SIZE)
    w, w_slim = start.copy(), start.copy()
    owns = [dana.new_own() for _ in range(num_workers)]
    slims = [SlimMomentum(HEAVY, SEGMENTS, SIZE, np.float64) for _ in range(num_workers)]
    sent = [start.copy() for _ in range(num_workers)]
    for worker in rng.integers(num_workers, size=200):
        grad = bowl(sent[worker], rng)
        u = slims[worker].push(grad.copy(), sent[worker], 0.01)
        out, out_slim = np.empty(SIZE), np.empty(SIZE)
        dana.apply(w, [(0, grad)], sent[worker], 0.01, out, own=owns[worker])
        shard.apply(w_slim, [(0, u)], None, 0.01, out_slim)
        np.testing.assert_allclose(w_slim, out, rtol=1e-10, atol=1e-13)
        sent[worker] = out
    assert np.abs(out - w).max() > 1e-3


# T6: how large a step a lag bears


def amplitudes(optimizer: type[Optimizer], tau: int, eta_h: Array, steps: int) -> Array:
    """By how much |w| grows over the second half of `steps`, for f = h w w / 2 and a lag of always `tau`."""
    dtype = dtype_of(optimizer)
    h = eta_h.astype(dtype)
    asgd = optimizer(RuleSpec("asgd"), [GroupSpec()], [Segment(0, h.size, 0, 0)], h.size)
    w = np.ones(h.size, dtype)
    sent, out = [w.copy() for _ in range(tau + 1)], np.empty_like(w)
    peaks = np.zeros((2, h.size))
    for step in range(steps):
        worker = step % (tau + 1)
        with np.errstate(over="ignore", invalid="ignore"):
            asgd.apply(w, [(0, h * sent[worker])], sent[worker], 1.0, out)
        sent[worker][:] = out
        if step % (steps // 2) >= steps // 4:
            half = step // (steps // 2)
            peaks[half] = np.maximum(peaks[half], np.abs(w))
    died_out, overflown = peaks[1] == 0, ~np.isfinite(peaks[1])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(died_out, 0, np.where(overflown, np.inf, peaks[1] / peaks[0]))


@pytest.mark.parametrize("optimizer", [ShardOptimizer, ReferenceOptimizer])
@pytest.mark.parametrize(("tau", "rounded"), [(0, 2.0), (1, 1.0), (3, 0.445), (7, 0.209), (15, 0.101)])
def test_a_constant_lag_is_stable_exactly_up_to_the_known_limit(
    optimizer: type[Optimizer], tau: int, rounded: float
) -> None:
    """Bisected between a step a fifth too small and one a fifth too large, nine halvings at each look."""
    limit = 2 * math.sin(math.pi / (2 * (2 * tau + 1)))
    assert round(limit, 3) == rounded
    low, high = 0.8 * limit, 1.2 * limit
    for _ in range(2):
        tried = np.linspace(low, high, 513 if high - low < limit / 100 else 33)
        grows = amplitudes(optimizer, tau, tried, steps=4000) > 1
        first = int(np.argmax(grows))
        assert grows[-1] and not grows[0] and grows[first:].all()
        low, high = tried[first - 1], tried[first]
    assert low * 0.999 <= limit <= high * 1.001 and high - low < limit / 500


# Workers that come and go


def test_a_thousand_joins_and_leaves_under_dana_leave_no_trace() -> None:
    """S stays the sum of the v_j that are there, to float32's rounding, and is zero when nobody is."""
    rng, start = np.random.default_rng(4), start_of(1, np.float32)
    dana = ShardOptimizer(RuleSpec("dana"), HEAVY, SEGMENTS, SIZE)
    w, owns, sent = start.copy(), {}, {}
    worst, joined, left = 0.0, 0, 0
    while left < 1000:
        if joined < 1000 and (not owns or rng.random() < 0.2):
            own = dana.new_own()
            assert own is not None
            owns[joined], sent[joined] = own, np.empty_like(w)
            dana.outgoing(w, 0.01, sent[joined])
            joined += 1
        elif rng.random() < 0.25:
            gone = int(rng.choice(list(owns)))
            del owns[gone], sent[gone]
            dana.leave(owns.values())
            left += 1
        if owns:
            worker = int(rng.choice(list(owns)))
            out = np.empty_like(w)
            dana.apply(w, [(0, bowl(sent[worker], rng))], sent[worker], 0.01, out, own=owns[worker])
            sent[worker] = out
            exact = np.sum([own.astype(np.float64) for own in owns.values()], axis=0)
            usual = np.sum([np.abs(own) for own in owns.values()], axis=0).max()
            worst = max(worst, float(np.abs(dana.state["total"] - exact).max() / usual))
        else:
            assert not dana.state["total"].any()
    assert joined == 1000 and not owns and not dana.state["total"].any()
    assert 0 < worst < 1e-5
    out = np.empty_like(w)
    dana.outgoing(w, 0.01, out)
    np.testing.assert_array_equal(out, w)


def test_without_leave_the_momentum_of_who_left_stays_in_every_look_ahead() -> None:
    """What the test above would see: the look-ahead of those left is off by who is gone."""
    rng, w = np.random.default_rng(4), start_of(1, np.float32)
    dana = ShardOptimizer(RuleSpec("dana"), HEAVY, SEGMENTS, SIZE)
    own, out = dana.new_own(), np.empty_like(w)
    for _ in range(20):
        dana.apply(w, [(0, bowl(w, rng))], w.copy(), 0.01, out, own=own)
    assert np.abs(out - w).max() > 1e-2
    dana.leave([])
    dana.outgoing(w, 0.01, out)
    np.testing.assert_array_equal(out, w)


@pytest.mark.parametrize("optimizer", [ShardOptimizer, ReferenceOptimizer])
def test_a_join_or_leave_keeps_what_a_shard_has_learnt_of_squares_gaps_and_rates(optimizer: type[Optimizer]) -> None:
    """MS, R, their counts and the largest rate are the shard's: a run that workers left goes on bit for bit."""
    rule, ends = RuleSpec("dc-asgd-a+dana+ga"), []
    for churns in (False, True):
        rng, w = np.random.default_rng(4), start_of(1, dtype_of(optimizer))
        shard = optimizer(rule, HEAVY, SEGMENTS, SIZE)
        stays, sent, out = shard.new_own(), w.copy(), np.empty_like(w)
        assert stays is not None
        for step in range(40):
            lr = 0.05 if step < 10 else 0.005
            shard.apply(w, [(0, bowl(w, rng))], sent, lr, out, own=stays)
            if step % 4 == 0:
                sent = out.copy()
            if churns:
                assert shard.new_own() is not None
                shard.leave([stays])
            else:
                shard.state["total"][:] = stays
        ends.append((w, shard.state["ms"].copy(), shard.state["gap"].copy(), out.copy()))
    for calm, churned in zip(*ends, strict=True):
        np.testing.assert_array_equal(calm, churned)


@pytest.mark.parametrize("optimizer", [ShardOptimizer, ReferenceOptimizer])
def test_the_gap_is_measured_in_steps_of_the_largest_rate_seen(optimizer: type[Optimizer]) -> None:
    """After a decay of the rate a gap left from before must not count ten times as much."""
    steps = {}
    for before in (0.05, 0.005):
        shard = optimizer(RuleSpec("ga"), [GroupSpec()], [Segment(0, 4, 0, 0)], 4)
        w, out = np.ones(4, dtype_of(optimizer)), np.empty(4, dtype_of(optimizer))
        grad = np.full(4, 2.0, w.dtype)
        shard.apply(w, [(0, grad)], w.copy(), before, out)
        at = w.copy()
        shard.apply(w, [(0, grad)], at - w.dtype.type(0.1), 0.005, out)
        steps[before] = at - w
    # R is 4 without its bias, so that C is 2 eta_max: 1 + 0.1 / 0.1 and 1 + 0.1 / 0.01
    np.testing.assert_allclose(steps[0.05], 0.01 / 2, rtol=1e-4)
    np.testing.assert_allclose(steps[0.005], 0.01 / 11, rtol=1e-4)


# The kernels against the formulas


@dataclass(frozen=True)
class Case:
    """A rule, the recipe's groups and how it runs."""

    rule: RuleSpec
    groups: tuple[GroupSpec, ...]
    inflight: int = 0

    def __str__(self) -> str:
        spec = self.groups[0]
        base = spec.algorithm if spec.algorithm == "adamw" else f"sgd{spec.momentum:g}{'n' * spec.nesterov}"
        ahead = f"-inflight{self.inflight}" if self.inflight else ""
        frozen = "-frozen" if self.groups == FROZEN else ""
        outer = f"-{self.rule.delay_share:g}-{self.rule.outer_mean}" if self.rule.is_local else ""
        return f"{self.rule.name}-{self.rule.mode}-{self.rule.lag_policy}-{base}{frozen}{ahead}{outer}"


NAMES = [*RULES, "dana+ga", "dana-dc+ga+sa", "dc-asgd-a+ga+da", "dc-asgd-a+dana", "dc-asgd-c+sa"]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"max_lag": 2, "lag_policy": "damp"},
    {"mode": "sync"},
    {"mode": "buffer", "quorum": 3},
]
MORE = [
    RuleSpec("delta", outer_mean=False),
    RuleSpec("diloco", outer_mean=False, delay_share=0.6),
    RuleSpec("diloco", delay_share=1.0),
    RuleSpec("delta", mode="sync", outer_mean=False),
    RuleSpec("diloco", mode="sync", outer_mean=False),
]


def _cases() -> Iterator[Case]:
    """Everything that combines."""
    rules = [rule for name in NAMES for extra in VARIANTS if (rule := _possible(name, extra)) is not None]
    for rule in rules + MORE:
        for groups in (PLAIN, HEAVY, NAG, ADAMW, FROZEN):
            if refusal(rule, groups) is None:
                yield Case(rule, groups)
    for name in ("dana+ga", "dana-dc+ga+sa"):
        yield Case(RuleSpec(name), HEAVY, inflight=1)


def _possible(name: str, extra: dict[str, Any]) -> RuleSpec | None:
    try:
        return RuleSpec(name, **extra)
    except ValueError:
        return None


CASES = list(_cases())


def test_the_cases_are_many() -> None:
    found = {str(case) for case in CASES}
    assert len(found) == len(CASES) > 60
    assert {case.rule.name for case in CASES} == set(NAMES)


TRAINED = {False: slice(None), True: np.r_[0:40, 56:SIZE]}
"""Whether the second group is frozen -> the elements whose state means anything."""


def doubled(state: Array | None) -> Array | None:
    return None if state is None else state.astype(np.float64)


def close(ours: Array, theirs: Array, scale: float) -> None:
    """Within float32's rounding of sums whose terms are of size `scale`."""
    np.testing.assert_allclose(ours, theirs, rtol=3e-6, atol=1e-6 * scale)


class Pair:
    """A kernel and the formulas that are handed the kernel's state before every push."""

    def __init__(self, case: Case) -> None:
        groups = shard_groups(case.rule, case.groups)
        self.trained = TRAINED[case.groups == FROZEN]
        self.kernel = ShardOptimizer(case.rule, groups, SEGMENTS, SIZE, case.inflight)
        self.formula = ReferenceOptimizer(case.rule, groups, SEGMENTS, SIZE, case.inflight)

    def both(
        self, method: str, w: Array, vectors: Sequence[Array | None], own: Array | None, **told: Any
    ) -> Array | None:
        """Call `method` on both and compare parameters, state and what is sent; returns what is sent.

        To the kernel it is sent in the place of the snapshot, as in a shard.
        """
        for key, value in self.kernel.state.items():
            self.formula.state[key][:] = value
        w64, own64 = w.astype(np.float64), doubled(own)
        sends = method != "accumulate"
        pushed, snapshot, lr = vectors[0], vectors[1], told.pop("lr", None)
        rest, rest64 = ([lr], [lr]) if sends else ([], [])
        out, out64 = np.full(SIZE, np.nan, np.float32), np.full(SIZE, np.nan)
        if method == "apply" and snapshot is not None:
            out[:] = snapshot
        if pushed is not None:
            cut = 50
            known = out if method == "apply" else snapshot
            rest = [[(0, pushed[:cut]), (cut, pushed[cut:])], known, *rest]
            rest64 = [[(0, pushed.astype(np.float64))], doubled(snapshot), *rest64]
        if method == "apply":
            told["own"] = own
        getattr(self.kernel, method)(w, *rest, *([out] if sends else []), **told)
        if method == "apply":
            told["own"] = own64
        getattr(self.formula, method)(w64, *rest64, *([out64] if sends else []), **told)
        self._compare(w, w64, own, own64)
        if not sends:
            return None
        close(out, out64, 4.0)
        return out

    def _compare(self, w: Array, w64: Array, own: Array | None, own64: Array | None) -> None:
        close(w, w64, 4.0)
        assert set(self.kernel.state) >= set(self.formula.state)
        for key, value in self.formula.state.items():
            close(self.kernel.state[key][self.trained], value[self.trained], 10.0)
        if own is not None and own64 is not None:
            close(own[self.trained], own64[self.trained], 10.0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_compute_the_formulas(case: Case) -> None:
    """Four workers in a random order, some pushes lighter, some tensors absent, the rate falling from 0.1."""
    rng, pair = np.random.default_rng(8), Pair(case)
    w = start_of(2, np.float32)
    sent = [w.copy() for _ in range(4)]
    owns = [pair.kernel.new_own() for _ in range(4)]
    at = [0, 0, 0, 0]
    waiting = 0.0
    for version in range(24):
        worker, lr = int(rng.integers(4)), 0.1 if version < 12 else 0.02
        absent = frozenset(int(tensor) for tensor in rng.choice(3, rng.choice(3, p=[0.6, 0.3, 0.1]), replace=False))
        pushed = rng.standard_normal(SIZE, dtype=np.float32)
        pushed[rng.random(SIZE) < 0.2] = 0.0
        lag = version - at[worker]
        if case.rule.mode == "async":
            weight = float(rng.choice([1.0, 0.5]))
            told = {"lag": lag, "weight": weight, "num_workers": int(rng.integers(1, 4)), "absent": absent, "lr": lr}
            out = pair.both("apply", w, (pushed, sent[worker]), owns[worker], **told)
        else:
            share = float(rng.choice([1.0, 0.25]))
            waiting += share
            pair.both("accumulate", w, (pushed, sent[worker]), None, lag=lag, share=share, absent=absent)
            if version % 3 != 2:
                continue
            out = pair.both("apply_sum", w, (None, None), None, lr=lr, total_share=waiting, weight=0.5, num_workers=3)
            waiting = 0.0
        assert out is not None
        sent[worker], at[worker] = out, version + 1
        if case.rule.exchange != "elastic":
            pulled = np.empty_like(w)
            pair.kernel.outgoing(w, lr, pulled)
            np.testing.assert_array_equal(pulled.view(np.uint32), out.view(np.uint32))


@pytest.mark.parametrize("case", [case for case in CASES if case.rule.mode != "async"], ids=str)
def test_a_round_of_one_push_is_that_push(case: Case) -> None:
    """Accumulating one push and applying the sum gives the bits of applying it.

    A scale by lag is the weight of a gradient in the mean: weight decay, added after it, is not scaled. So there
    the two agree without lag only.
    """
    plain = RuleSpec.from_plain(case.rule.to_plain() | {"mode": "async", "quorum": 0})
    groups = shard_groups(case.rule, case.groups)
    rng = np.random.default_rng(3)
    start = start_of(5, np.float32)
    ends = []
    for rule in (case.rule, plain):
        shard = ShardOptimizer(rule, groups, SEGMENTS, SIZE)
        rng = np.random.default_rng(3)
        w, out, snapshot = start.copy(), np.empty_like(start), start.copy()
        for step in range(8):
            lag = step if case.rule.scale == "none" else 0
            pushed = rng.standard_normal(SIZE, dtype=np.float32)
            pushed[rng.random(SIZE) < 0.2] *= np.float32(0.0)
            if rule.mode == "async":
                out[:] = snapshot
                shard.apply(w, [(0, pushed)], out, 0.1, out, lag=lag)
            else:
                shard.accumulate(w, [(0, pushed)], snapshot, lag=lag)
                shard.apply_sum(w, 0.1, out, total_share=1.0)
            if step % 3 == 2:
                snapshot = out.copy()
        ends.append(w)
    np.testing.assert_array_equal(ends[0].view(np.uint32), ends[1].view(np.uint32))
    assert np.abs(ends[0] - start).max() > 1e-3


# A tensor without gradient


@pytest.mark.parametrize("optimizer", [ShardOptimizer, ReferenceOptimizer])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_tensor_without_gradient_keeps_every_bit(case: Case, optimizer: type[Optimizer]) -> None:
    """No decay, momentum, mean square or gap of it moves, whatever garbage stands in its place."""
    dtype = dtype_of(optimizer)
    shard = optimizer(case.rule, shard_groups(case.rule, case.groups), SEGMENTS, SIZE, case.inflight)
    rng, w = np.random.default_rng(6), start_of(2, dtype)
    snapshot, out, own = w - w.dtype.type(0.1), np.empty_like(w), shard.new_own()

    def push(absent: frozenset[int], pushed: Array) -> None:
        if case.rule.mode == "async":
            out[:] = snapshot
            known = out if optimizer is ShardOptimizer else snapshot
            shard.apply(w, [(0, pushed)], known, 0.05, out, lag=3, own=own, num_workers=2, absent=absent)
        else:
            shard.accumulate(w, [(0, pushed)], snapshot, lag=3, absent=absent)
            shard.apply_sum(w, 0.05, out, total_share=1.0)

    for _ in range(3):
        push(frozenset(), rng.standard_normal(SIZE).astype(dtype))
    watched = {"w": w, "own": w if own is None else own, **shard.state}
    before = {key: value[40:56].copy() for key, value in watched.items()}
    moved = w.copy()
    for _ in range(3):
        pushed = rng.standard_normal(SIZE).astype(dtype)
        pushed[40:56] = np.nan
        push(frozenset({1}), pushed)
    for key, value in before.items():
        assert watched[key][40:56].tobytes() == value.tobytes(), key
    assert np.isfinite(out).all() and (w[:40] != moved[:40]).all()
    if case.rule.look_ahead != "shard":
        np.testing.assert_array_equal(out[40:56], w[40:56])


@pytest.mark.parametrize("optimizer", [ShardOptimizer, ReferenceOptimizer])
def test_a_round_nobody_had_a_gradient_of_a_tensor_in_leaves_it_and_its_step_count(optimizer: type[Optimizer]) -> None:
    """The next update of AdamW is then its first for that tensor: a whole step, with no bias of an empty one."""
    shard = optimizer(RuleSpec("asgd", mode="buffer", quorum=2), ADAMW, SEGMENTS, SIZE)
    w = np.ones(SIZE, dtype_of(optimizer))
    out, pushed = np.empty_like(w), np.full(SIZE, 3.0, w.dtype)
    for absent in (frozenset({1}), frozenset({0, 1}), frozenset(), frozenset({0})):
        shard.accumulate(w, [(0, pushed)], None, absent=absent)
        if absent == {0, 1}:
            shard.apply_sum(w, 0.1, out, total_share=2.0)
            assert (out[40:56] == 1).all() and (out[:40] != 1).all()
    shard.apply_sum(w, 0.1, out, total_share=2.0)
    np.testing.assert_allclose(out[40:56], 1 - 0.05, rtol=1e-6)


@pytest.mark.parametrize("optimizer", [ShardOptimizer, ReferenceOptimizer])
def test_the_first_gap_of_a_tensor_is_not_penalised_however_often_others_came(optimizer: type[Optimizer]) -> None:
    shard = optimizer(RuleSpec("ga"), (GroupSpec(), GroupSpec()), SEGMENTS, SIZE)
    w = np.zeros(SIZE, dtype_of(optimizer))
    snapshot, out, pushed = w - w.dtype.type(5), np.empty_like(w), np.ones_like(w)
    shard.apply(w, [(0, pushed)], snapshot, 0.1, out, absent=frozenset({1}))
    np.testing.assert_allclose(w[:40], -0.1, rtol=1e-6)
    w[:] = 0
    shard.apply(w, [(0, pushed)], snapshot, 0.1, out)
    np.testing.assert_allclose(w[40:56], -0.1, rtol=1e-6)
    np.testing.assert_allclose(w[:40], -0.1 / (1 + 5 / 0.1), rtol=1e-4)


@pytest.mark.parametrize("optimizer", [ShardOptimizer, ReferenceOptimizer])
@pytest.mark.parametrize("name", ["asgd", "dc-asgd-a", "dana+ga", "ga", "delta", "diloco"])
def test_a_frozen_group_keeps_every_bit_of_its_parameters(name: str, optimizer: type[Optimizer]) -> None:
    rng, w = np.random.default_rng(6), start_of(2, dtype_of(optimizer))
    shard = optimizer(RuleSpec(name), shard_groups(RuleSpec(name), FROZEN), SEGMENTS, SIZE)
    start, out, own = w.copy(), np.empty_like(w), shard.new_own()
    for _ in range(5):
        pushed = rng.standard_normal(SIZE).astype(w.dtype)
        shard.apply(w, [(0, pushed)], start - w.dtype.type(0.1), 0.05, out, own=own)
    for values in (w, out):
        assert values[40:56].tobytes() == start[40:56].tobytes() and (values[:40] != start[:40]).all()


# Trap 9


def test_a_gradient_averaged_over_k_batches_is_corrected_k_times_less() -> None:
    """The correction squares g: of k independent noisy gradients the mean of squares is k times that of their mean.

    So lambda does not carry over when push_every changes: with k batches to a push the same correction takes
    up to k times the lambda. Only where the gradient is all signal does it stay.
    """
    rng = np.random.default_rng(0)
    size, k = 40_000, 8
    noise = rng.standard_normal((k, size))

    def correction(gradients: Array) -> float:
        """The mean size of lam g g D for the mean of these gradients."""
        rule = RuleSpec("dc-asgd-c", lam=1.0)
        shard = ReferenceOptimizer(rule, [GroupSpec()], [Segment(0, size, 0, 0)], size)
        w, out, mean = np.zeros(size), np.empty(size), gradients.mean(0)
        shard.apply(w, [(0, mean)], w - 1.0, 1.0, out)
        return float(np.mean(-out - mean))

    assert correction(noise[:1]) / correction(noise) == pytest.approx(k, rel=0.05)
    signal = np.ones((k, size))
    assert correction(signal[:1]) / correction(signal) == pytest.approx(1)


# A worker that slept (tensorflow#14494)


@functools.cache
def least_squares() -> tuple[Array, Array]:
    """Linear features of 500 samples and what to predict, which is not quite linear in them."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((500, 30))
    return x, x @ rng.standard_normal(30) + 0.5 * rng.standard_normal(500)


def mean_square(w: Array) -> float:
    x, y = least_squares()
    return float(np.mean((x @ w - y) ** 2) / 2)


def gradient_of(w: Array, taken: Array) -> Array:
    x, y = least_squares()
    grad: Array = x[taken].T @ (x[taken] @ w - y[taken]) / len(taken)
    return grad.astype(w.dtype)


def loss_before_and_after_the_sleeper(rule: RuleSpec, group: GroupSpec) -> tuple[float, float]:
    """Four workers do 5,000 updates while a fifth sleeps on its first gradient; then it pushes.

    The second loss is the highest of the 30 updates from then on: what momentum makes of the push counts.
    """
    rng, rate = np.random.default_rng(2), 0.2 * (1 - group.momentum)
    shard = ShardOptimizer(rule, [group], [Segment(0, 30, 0, 0)], 30)
    w = np.full(30, 10, np.float32)
    sent, owns = [w.copy() for _ in range(5)], [shard.new_own() for _ in range(5)]

    def push(worker: int, grad: Array, lr: float, lag: int) -> float:
        out = np.empty_like(w)
        shard.apply(w, [(0, grad)], sent[worker], lr, out, lag=lag, own=owns[worker], num_workers=5)
        sent[worker] = out
        return mean_square(w)

    def awake(step: int) -> float:
        grad = gradient_of(sent[step % 4], rng.integers(500, size=32))
        return push(step % 4, grad, rate if step < 4000 else 0.1 * rate, lag=min(step, 3))

    asleep = gradient_of(w, np.arange(500))
    before = [awake(step) for step in range(5000)][-1]
    first = push(4, asleep, rate, lag=5000)
    return before, max(first, *(awake(step) for step in range(5000, 5029)))


SLEEPER = {
    "gate that damps": RuleSpec("asgd", max_lag=16, lag_policy="damp"),
    "staleness-aware": RuleSpec("staleness-aware"),
    "delay-adaptive": RuleSpec("delay-adaptive"),
    "gap-aware": RuleSpec("gap-aware"),
    "dana+ga": RuleSpec("dana+ga"),
}
NO_MOMENTUM = [name for name in SLEEPER if name != "dana+ga"]


@pytest.mark.parametrize(("name", "momentum"), [*((name, 0.9) for name in SLEEPER), *((n, 0.0) for n in NO_MOMENTUM)])
def test_one_push_of_a_worker_that_slept_5000_updates_does_no_harm(name: str, momentum: float) -> None:
    before, after = loss_before_and_after_the_sleeper(SLEEPER[name], GroupSpec(momentum=momentum))
    assert before < 0.15 and after < 1.05 * before


@pytest.mark.parametrize("name", ["asgd", "dc-asgd-c", "dana"])
def test_where_nothing_weighs_its_lag_it_does(name: str) -> None:
    before, after = loss_before_and_after_the_sleeper(RuleSpec(name), GroupSpec(momentum=0.9))
    assert before < 0.15 and after > 5 * before
